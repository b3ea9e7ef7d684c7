/* ---- >>fsdp-device ----
 * An object over memory of a device. The caller's queue does all arithmetic, in the order of the calls. Device groups
 * gather units, scatter them, and add them over copies. Each group has a queue of its own, which events order with the
 * caller's. Nothing here waits for a device, except where the CPU is told a number.
 *
 * A unit is one piece on a device: its ranges lie one after another, in table order. So each rank's slice is one piece
 * too, and one operation gathers or scatters all of it. Ranges in the caller's memory are copied to a stage that is one
 * piece, and back. Even units share one place, odd units another. */
#ifndef DTRAIN__FSDP_DEVICE
#define DTRAIN__FSDP_DEVICE
#include "fsdp.c"

/* ---- memory and arithmetic, wherever the parameters are ---- */

/* Allocates zeros, and counts them as the object's memory; NULL: no memory. */
static void *dtrain__fsdp_alloc(dtrain_fsdp *fsdp, size_t bytes)
{
    dtrain_device *queue = fsdp->device.queue;
    const unsigned char zero = 0;
    void *made = NULL;
    if (queue == NULL)
        return dtrain__alloc(&fsdp->memory, bytes);
    if (dtrain_device_alloc(queue, DTRAIN_MEMORY_DEVICE, bytes > 0 ? bytes : 1, &made) != DTRAIN_OK)
        return NULL;
    if (bytes > 0)
        dtrain__fsdp_queued(fsdp, dtrain_device_fill(queue, made, &zero, 1, bytes));
    dtrain__memory_count(&fsdp->memory, bytes);
    return made;
}

static void dtrain__fsdp_release(dtrain_fsdp *fsdp, void *memory)
{
    if (fsdp->device.queue == NULL)
        dtrain__free(&fsdp->memory, memory);
    else
        dtrain_device_free(fsdp->device.queue, DTRAIN_MEMORY_DEVICE, memory);
}

static DTRAIN__NOINLINE void dtrain__fsdp_copy(dtrain_fsdp *fsdp, float *to, const float *from, size_t count)
{
    if (to != from && count > 0)
        dtrain__fsdp_queued(fsdp, dtrain_device_copy(fsdp->device.queue, to, from, count * sizeof(float)));
}

/* Copies numbers from one dtype to another, or to the same. */
static void dtrain__fsdp_convert(dtrain_fsdp *fsdp, const void *from, dtrain_dtype is, void *to, dtrain_dtype becomes,
                                 size_t count)
{
    if (is == becomes)
        dtrain__fsdp_copy(fsdp, (float *)to, (const float *)from, count);
    else if (count > 0)
        dtrain__fsdp_queued(fsdp, dtrain_device_convert(fsdp->device.queue, from, is, to, becomes, count));
}

static void dtrain__fsdp_divide_by(dtrain_fsdp *fsdp, float *x, double divisor, size_t count)
{
    dtrain_device *queue = fsdp->device.queue;
    const void *in[1];
    void *out[1];
    in[0] = out[0] = x;
    if (queue == NULL)
        dtrain__fold_finish(DTRAIN_F32, DTRAIN_MEAN, divisor, x, x, count);
    else if (count > 0)
        dtrain__fsdp_queued(fsdp, queue->ops->reduce(queue, DTRAIN_F32, DTRAIN_MEAN, divisor, in, 1, out, 1, 0, count));
}

/* Rounds count numbers to a dtype of 16 bits. On a device it overwrites a stage, which must not be in use. */
static void dtrain__fsdp_round(dtrain_fsdp *fsdp, float *x, size_t count, dtrain_dtype dtype, int stage)
{
    uint16_t chunk[DTRAIN__FSDP_CHUNK];
    int queues = fsdp->device.queue != NULL;
    void *narrow = queues ? (void *)dtrain__fsdp_stage(fsdp, stage) : (void *)chunk;
    size_t most = queues ? count : DTRAIN__FSDP_CHUNK;
    for (size_t i = 0; i < count && dtype != DTRAIN_F32; i += most) {
        size_t n = count - i < most ? count - i : most;
        dtrain__fsdp_convert(fsdp, x + i, DTRAIN_F32, narrow, dtype, n);
        dtrain__fsdp_convert(fsdp, narrow, dtype, x + i, DTRAIN_F32, n);
    }
}

/* Returns what travels between copies of a unit's sum: the sum, or its numbers of 16 bits. */
static void *dtrain__fsdp_part(const dtrain_fsdp *fsdp, int number, float *sum)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    if (fsdp->desc.reduce_dtype == DTRAIN_F32)
        return sum;
    return fsdp->device.queue != NULL ? (void *)(fsdp->device.halves + unit->grad)
                                      : (void *)dtrain__fsdp_half(sum, unit->grad_count);
}

/* Narrows a unit's sum to these numbers of 16 bits, or widens it again. */
static void dtrain__fsdp_convert_sum(dtrain_fsdp *fsdp, int number, float *sum, int widens)
{
    size_t count = fsdp->layout.units[number].grad_count;
    dtrain_dtype dtype = fsdp->desc.reduce_dtype;
    void *part = dtrain__fsdp_part(fsdp, number, sum);
    if (fsdp->device.queue == NULL)
        (widens ? dtrain__fsdp_widen : dtrain__fsdp_narrow)(sum, count, dtype);
    else if (widens)
        dtrain__fsdp_convert(fsdp, part, dtype, sum, DTRAIN_F32, count);
    else
        dtrain__fsdp_convert(fsdp, sum, DTRAIN_F32, part, dtype, count);
}

/* ---- where units lie ---- */

static size_t dtrain__fsdp_place_half_bytes(const dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    int narrow = desc->reduce_dtype != DTRAIN_F32 && (layout->shards == 1 || layout->copies > 1);
    return narrow ? layout->grads * sizeof(uint16_t) : 0;
}

/* Two exact sums, and the norm between them. */
#define DTRAIN__FSDP_PLACE_SUM_BYTES (2 * DTRAIN__NORM_LIMBS * sizeof(int64_t) + sizeof(double))

/* Makes what >>fsdp-drift needs. A device without pinned memory or events has no check. */
static dtrain_status dtrain__fsdp_make_drift(dtrain_fsdp *fsdp)
{
    dtrain__fsdp_device *d = &fsdp->device;
    void *heard = NULL;
    d->drift = d->limbs + DTRAIN__NORM_LIMBS + 1;
    if (fsdp->desc.check_every < 0 || fsdp->copies == NULL)
        return DTRAIN_OK;
    dtrain_status status = dtrain__device_event_create(d->queue, &d->drift_event);
    if (status == DTRAIN_OK)
        status = dtrain_device_alloc(d->queue, DTRAIN_MEMORY_PINNED, sizeof d->drift_sum.limbs, &heard);
    d->drift_heard = (int64_t *)heard;
    d->drift_queued = status == DTRAIN_OK ? 0 : -1;
    return status == DTRAIN_ERR_UNSUPPORTED ? DTRAIN_OK : status;
}

static dtrain_status dtrain__fsdp_device_reserve(dtrain_fsdp *fsdp)
{
    dtrain__fsdp_device *d = &fsdp->device;
    const dtrain__layout *layout = &fsdp->layout;
    for (int grads = 0; grads < 2; grads++)
        d->blocks[grads] = (float *)dtrain__fsdp_alloc(fsdp, layout->place_floats[grads] * sizeof(float));
    d->halves = (uint16_t *)dtrain__fsdp_alloc(fsdp, dtrain__fsdp_place_half_bytes(layout, &fsdp->desc));
    d->limbs = (int64_t *)dtrain__fsdp_alloc(fsdp, DTRAIN__FSDP_PLACE_SUM_BYTES);
    if (d->blocks[0] == NULL || d->blocks[1] == NULL || d->halves == NULL || d->limbs == NULL)
        return dtrain__fail(
            NULL, DTRAIN_ERR_MEMORY,
            "%s: no memory on rank %d's %s for units in full: %zu bytes of weights and %zu of gradients", fsdp->call,
            dtrain__fsdp_rank(fsdp), dtrain_device_name(d->queue), layout->place_floats[0] * sizeof(float),
            layout->place_floats[1] * sizeof(float));
    for (size_t i = 0; i < layout->cut_count; i++) {
        dtrain__layout_cut *cut = &layout->cuts[i];
        const dtrain__layout_unit *unit = &layout->units[cut->unit];
        if (unit->floats[0] > 0 && (fsdp->state.reserved[cut->param] & 1))
            cut->data = d->blocks[0] + unit->place[0] + cut->stage;
        if (unit->floats[1] > 0 && (fsdp->state.reserved[cut->param] & 2))
            cut->grads = d->blocks[1] + unit->place[1] + cut->grad_stage;
    }
    return dtrain__fsdp_make_drift(fsdp);
}

/* Makes a device group over each group of the object, with a comm, a queue and a thread of its own. */
static dtrain_status dtrain__fsdp_make_device_groups(dtrain_fsdp *fsdp)
{
    dtrain_comm *comms[DTRAIN__FSDP_WAYS];
    dtrain_status status = DTRAIN_OK;
    comms[DTRAIN__FSDP_GATHERS] = fsdp->gathers;
    comms[DTRAIN__FSDP_REDUCES] = fsdp->reduces;
    comms[DTRAIN__FSDP_COPIES] = fsdp->copies;
    for (int i = 0; i < DTRAIN__FSDP_WAYS && status == DTRAIN_OK; i++) {
        if (comms[i] == NULL)
            continue;
        status = dtrain_comm_split(comms[i], 0, 0, &fsdp->device.comms[i]);
        if (status == DTRAIN_OK) {
            fsdp->device.comms[i]->apart = 1;
            status = dtrain__device_group_async(&fsdp->device.groups[i], fsdp->device.comms[i], fsdp->device.queue);
        }
    }
    return status;
}

static void dtrain__fsdp_free_places(dtrain_fsdp *fsdp)
{
    dtrain__fsdp_device *d = &fsdp->device;
    dtrain__fsdp_release(fsdp, d->blocks[0]);
    dtrain__fsdp_release(fsdp, d->blocks[1]);
    dtrain__fsdp_release(fsdp, d->halves);
    dtrain__fsdp_release(fsdp, d->limbs);
    dtrain_device_free(d->queue, DTRAIN_MEMORY_PINNED, d->drift_heard);
    if (d->drift_event != NULL)
        dtrain__device_event_destroy(d->queue, d->drift_event);
}

/* ---- operations ---- */

/* Makes the caller's queue wait for an operation, and counts as dtrain__fsdp_wait does. */
static dtrain_status dtrain__fsdp_device_wait(dtrain_fsdp *fsdp, int way, int lowest, int unit)
{
    dtrain_device_work **work = &fsdp->device.works[way][lowest], *waited = *work;
    int gathers = way == DTRAIN__FSDP_GATHERS;
    int64_t begin = dtrain__os_now_ns(), began = begin, ended = 0;
    if (waited == NULL)
        return DTRAIN_OK;
    *work = NULL;
    dtrain__async_times(waited, &began, &ended);
    dtrain_status status = dtrain_device_work_wait(waited, fsdp->device.queue);
    ended = ended > 0 ? ended : dtrain__os_now_ns();
    dtrain__fsdp_waited(fsdp, unit, begin, ended - began);
    dtrain__fsdp_record(fsdp, gathers ? DTRAIN__FSDP_LANE_GATHER : DTRAIN__FSDP_LANE_REDUCE, unit, began, ended);
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, gathers ? "gathering" : "reducing", unit);
}

/* Gives every rank the values of rank 0. On a device they go to the same shard of each copy first, then within each
 * copy. */
static dtrain_status dtrain__fsdp_broadcast(dtrain_fsdp *fsdp, void *data, size_t count, dtrain_dtype dtype)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->device.queue == NULL)
        return dtrain_broadcast(fsdp->world, data, count, dtype, 0);
    if (fsdp->copies != NULL)
        status = dtrain_device_group_broadcast(fsdp->device.groups[DTRAIN__FSDP_COPIES], data, count, dtype, 0);
    if (status == DTRAIN_OK && fsdp->gathers != NULL)
        status = dtrain_device_group_broadcast(fsdp->device.groups[DTRAIN__FSDP_GATHERS], data, count, dtype, 0);
    return status;
}

/* ---- the norm ---- */

/* Queues the sum of squares of all gradients of a copy. Each element counts once; parameters that another rank of the
 * model counts are left out. limbs: memory where the parameters are. */
static dtrain_status dtrain__fsdp_queue_squares(dtrain_fsdp *fsdp, int64_t *limbs)
{
    dtrain_device *queue = fsdp->device.queue;
    const int64_t zero = 0;
    dtrain_status status = dtrain_device_fill(queue, limbs, &zero, sizeof zero, DTRAIN__NORM_LIMBS);
    for (size_t i = 0; status == DTRAIN_OK && i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        const dtrain_param_part *part = fsdp->layout.table[cut->param].part;
        if (cut->trained && cut->own_count > 0 && (part == NULL || part->copy == 0))
            status = dtrain_device_squares(queue, fsdp->state.slices[i].grads, cut->own_count, limbs);
    }
    if (status != DTRAIN_OK || fsdp->reduces == NULL)
        return status;
    return queue != NULL ? dtrain_device_group_all_reduce(fsdp->device.groups[DTRAIN__FSDP_REDUCES], limbs, limbs,
                                                          DTRAIN__NORM_LIMBS, DTRAIN_I64, DTRAIN_SUM)
                         : dtrain_all_reduce(fsdp->reduces, limbs, limbs, DTRAIN__NORM_LIMBS, DTRAIN_I64, DTRAIN_SUM);
}

/* Puts that sum into fsdp->scaling.sum, if it is not there. The CPU waits for a device. */
static dtrain_status dtrain__fsdp_sum_squares(dtrain_fsdp *fsdp)
{
    int64_t *limbs = fsdp->device.queue != NULL ? fsdp->device.limbs : fsdp->scaling.sum.limbs;
    if (fsdp->scaling.summed)
        return DTRAIN_OK;
    dtrain_status status = dtrain__fsdp_queue_squares(fsdp, limbs);
    if (status == DTRAIN_OK && limbs != fsdp->scaling.sum.limbs)
        status = dtrain_device_copy(fsdp->device.queue, fsdp->scaling.sum.limbs, limbs, sizeof fsdp->scaling.sum.limbs);
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "measuring gradients", -1);
    dtrain__norm_carry(&fsdp->scaling.sum);
    fsdp->scaling.summed = 1;
    return DTRAIN_OK;
}

#endif
