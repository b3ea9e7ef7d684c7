/* ---- >>fsdp-device ----
 * An object over memory of a device. The caller's queue does all arithmetic, in the order of the calls; units are
 * gathered, scattered and added over copies by groups of devices, each on a queue of its own, which events order with
 * the caller's. Nothing here waits for a device, but where the CPU is told a number.
 *
 * A unit is one piece on a device: its ranges lie one after another, in table order, so that each rank's slice is one
 * piece, too, and one operation gathers or scatters all of it. Ranges that lie in the caller's memory are copied to a
 * stage that is so, and back. Units of even numbers share one place, those of odd numbers another. */
#ifndef DTRAIN__FSDP_DEVICE
#define DTRAIN__FSDP_DEVICE
#include "fsdp.c"

#define DTRAIN__FSDP_LINE 64 /* floats, at whose multiples units begin */

/* ---- memory, which counts as the object's ---- */

static void *dtrain__fsdp_device_alloc(dtrain_fsdp *fsdp, size_t bytes)
{
    dtrain_device *queue = fsdp->device.queue;
    const unsigned char zero = 0;
    void *made = NULL;
    if (dtrain_device_alloc(queue, DTRAIN_MEMORY_DEVICE, bytes > 0 ? bytes : 1, &made) != DTRAIN_OK)
        return NULL;
    if (bytes > 0)
        dtrain__fsdp_queued(fsdp, dtrain_device_fill(queue, made, &zero, 1, bytes));
    fsdp->memory.bytes += bytes;
    if (fsdp->memory.peak_bytes < fsdp->memory.bytes)
        fsdp->memory.peak_bytes = fsdp->memory.bytes;
    return made;
}

static void dtrain__fsdp_device_release(dtrain_fsdp *fsdp, void *memory)
{
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

/* out[i] = a[i] + b[i] */
static void dtrain__fsdp_add(dtrain_fsdp *fsdp, float *out, const float *a, const float *b, size_t count)
{
    const void *in[2];
    void *outs[1];
    in[0] = a;
    in[1] = b;
    outs[0] = out;
    dtrain__fsdp_queued(fsdp,
                        dtrain_device_reduce(fsdp->device.queue, DTRAIN_F32, DTRAIN_SUM, in, 2, outs, 1, 0, count));
}

static void dtrain__fsdp_device_divide(dtrain_fsdp *fsdp, float *x, double divisor, size_t count)
{
    dtrain_device *queue = fsdp->device.queue;
    const void *in[1];
    void *out[1];
    in[0] = out[0] = x;
    if (count > 0)
        dtrain__fsdp_queued(fsdp, queue->ops->reduce(queue, DTRAIN_F32, DTRAIN_MEAN, divisor, in, 1, out, 1, 0, count));
}

/* ---- where units lie ---- */

/* Floats of a place for one unit's weights, or gradients; 0 where it has all of them from the caller. */
static size_t dtrain__fsdp_place_floats(const dtrain__layout *layout, int number, int grads)
{
    const dtrain__layout_unit *unit = &layout->units[number];
    int reserved = 0;
    for (size_t i = unit->first; i < unit->end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        const dtrain_param *param = &layout->table[cut->param];
        reserved |= cut->count > 0 && (grads ? cut->trained && param->grad == NULL : param->data == NULL);
    }
    size_t floats = reserved ? (grads ? unit->trained : unit->count) : 0;
    return (floats + DTRAIN__FSDP_LINE - 1) / DTRAIN__FSDP_LINE * DTRAIN__FSDP_LINE;
}

/* Says whether a unit shares its place. */
static DTRAIN__NOINLINE int dtrain__fsdp_place_shares(const dtrain__layout *layout, const dtrain_fsdp_desc *desc,
                                                      int number, int grads)
{
    return !layout->units[number].tied &&
           !(grads ? desc->no_overlap : layout->resident || desc->no_reshard_after_forward);
}

/* Floats of all places: the shared two first, then those of units that have their own; *at: where `number`'s is. */
static size_t dtrain__fsdp_place_all(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int grads, int number,
                                     size_t *at)
{
    size_t shared[2] = {0, 0}, own = 0;
    for (int i = 0; i < layout->unit_count; i++) {
        size_t floats = dtrain__fsdp_place_floats(layout, i, grads);
        if (dtrain__fsdp_place_shares(layout, desc, i, grads))
            shared[i & 1] = floats > shared[i & 1] ? floats : shared[i & 1];
    }
    *at = number & 1 ? shared[0] : 0;
    for (int i = 0; i < layout->unit_count; i++) {
        if (dtrain__fsdp_place_shares(layout, desc, i, grads))
            continue;
        if (i == number)
            *at = shared[0] + shared[1] + own;
        own += dtrain__fsdp_place_floats(layout, i, grads);
    }
    return shared[0] + shared[1] + own;
}

/* Says whether all ranges of a unit lie in memory of the library's. */
static int dtrain__fsdp_place_is_whole(const dtrain__layout *layout, int number, int grads)
{
    int whole = 1;
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        const dtrain_param *param = &layout->table[cut->param];
        if (cut->count > 0 && (!grads || cut->trained))
            whole &= (grads ? param->grad : param->data) == NULL;
    }
    return whole;
}

/* Bytes of one stage: none where nothing is copied to one. */
static size_t dtrain__fsdp_place_stage(const dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    int gathers = layout->apart || layout->shards > 1, needed = 0;
    for (int i = 0; i < layout->unit_count; i++)
        needed |= (gathers && !dtrain__fsdp_place_is_whole(layout, i, 0)) ||
                  (layout->shards > 1 && !dtrain__fsdp_place_is_whole(layout, i, 1));
    needed |= gathers && dtrain__layout_is_16_bit(desc->gather_dtype);
    needed |= layout->shards > 1 && dtrain__layout_is_16_bit(desc->reduce_dtype);
    return needed ? (layout->stage + DTRAIN__FSDP_LINE - 1) / DTRAIN__FSDP_LINE * DTRAIN__FSDP_LINE * sizeof(float) : 0;
}

static size_t dtrain__fsdp_place_half_bytes(const dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    int narrow = dtrain__layout_is_16_bit(desc->reduce_dtype) && (layout->shards == 1 || layout->copies > 1);
    return narrow ? layout->grads * sizeof(uint16_t) : 0;
}

/* Two sums, and the norm between them. */
#define DTRAIN__FSDP_PLACE_SUM_BYTES (2 * DTRAIN__NORM_LIMBS * sizeof(int64_t) + sizeof(double))

/* What hears of a part of the weights; a device that has no such memory or event has no check. */
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
    size_t units = (size_t)layout->unit_count, at;
    d->places = (dtrain__fsdp_place *)dtrain__alloc(&fsdp->memory, units * sizeof *d->places);
    d->works[0] =
        (dtrain_device_work **)dtrain__alloc(&fsdp->memory, DTRAIN__FSDP_WAYS * units * sizeof(dtrain_device_work *));
    for (int grads = 0; grads < 2; grads++) {
        d->block_floats[grads] = dtrain__fsdp_place_all(layout, &fsdp->desc, grads, 0, &at);
        d->blocks[grads] = (float *)dtrain__fsdp_device_alloc(fsdp, d->block_floats[grads] * sizeof(float));
    }
    d->stage_bytes = dtrain__fsdp_place_stage(layout, &fsdp->desc);
    d->stages = (unsigned char *)dtrain__fsdp_device_alloc(fsdp, DTRAIN__FSDP_STAGES * d->stage_bytes);
    d->halves = (uint16_t *)dtrain__fsdp_device_alloc(fsdp, dtrain__fsdp_place_half_bytes(layout, &fsdp->desc));
    d->limbs = (int64_t *)dtrain__fsdp_device_alloc(fsdp, DTRAIN__FSDP_PLACE_SUM_BYTES);
    if (d->places == NULL || d->works[0] == NULL || d->blocks[0] == NULL || d->blocks[1] == NULL || d->stages == NULL ||
        d->halves == NULL || d->limbs == NULL)
        return dtrain__fail(
            NULL, DTRAIN_ERR_MEMORY,
            "%s: no memory on rank %d's %s for units in full: %zu bytes of weights and %zu of gradients", fsdp->call,
            dtrain__fsdp_rank(fsdp), dtrain_device_name(d->queue), d->block_floats[0] * sizeof(float),
            d->block_floats[1] * sizeof(float));
    d->works[1] = d->works[0] + units;
    d->works[2] = d->works[1] + units;
    for (int i = 0; i < layout->unit_count; i++) {
        dtrain__fsdp_place *place = &d->places[i];
        dtrain__fsdp_place_all(layout, &fsdp->desc, 0, i, &at);
        place->weights = dtrain__fsdp_place_floats(layout, i, 0) > 0 ? d->blocks[0] + at : NULL;
        dtrain__fsdp_place_all(layout, &fsdp->desc, 1, i, &at);
        place->grads = dtrain__fsdp_place_floats(layout, i, 1) > 0 ? d->blocks[1] + at : NULL;
        place->shares = dtrain__fsdp_place_shares(layout, &fsdp->desc, i, 0);
        place->shares_grads = place->grads != NULL && dtrain__fsdp_place_shares(layout, &fsdp->desc, i, 1);
        place->whole = dtrain__fsdp_place_is_whole(layout, i, 0);
        place->whole_grads = dtrain__fsdp_place_is_whole(layout, i, 1);
        for (size_t k = layout->units[i].first; k < layout->units[i].end; k++) {
            dtrain__layout_cut *cut = &layout->cuts[k];
            if (place->weights != NULL && (fsdp->reserved[cut->param] & 1))
                cut->data = place->weights + cut->stage;
            if (place->grads != NULL && (fsdp->reserved[cut->param] & 2))
                cut->grads = place->grads + cut->grad_stage;
        }
    }
    return dtrain__fsdp_make_drift(fsdp);
}

/* Groups of devices over the groups of the object, each with ranks, a queue and a thread of its own. */
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
    dtrain__free(&fsdp->memory, d->places);
    dtrain__free(&fsdp->memory, d->works[0]);
    dtrain__fsdp_device_release(fsdp, d->blocks[0]);
    dtrain__fsdp_device_release(fsdp, d->blocks[1]);
    dtrain__fsdp_device_release(fsdp, d->stages);
    dtrain__fsdp_device_release(fsdp, d->halves);
    dtrain__fsdp_device_release(fsdp, d->limbs);
    dtrain_device_free(d->queue, DTRAIN_MEMORY_PINNED, d->drift_heard);
    if (d->drift_event != NULL)
        dtrain__device_event_destroy(d->queue, d->drift_event);
}

/* ---- operations ---- */

/* Has the caller's queue wait for an operation, and counts as dtrain__fsdp_wait does. */
static dtrain_status dtrain__fsdp_device_wait(dtrain_fsdp *fsdp, int way, int lowest, int unit)
{
    dtrain_device_work **work = &fsdp->device.works[way][lowest], *waited = *work;
    int gathers = way == DTRAIN__FSDP_GATHERS;
    int64_t begin = dtrain__os_now_ns(), began = begin, ended = 0;
    if (waited == NULL)
        return DTRAIN_OK;
    *work = NULL;
    if (dtrain__async_done(waited))
        dtrain__async_times(waited, &began, &ended);
    dtrain_status status = dtrain_device_work_wait(waited, fsdp->device.queue);
    ended = ended > 0 ? ended : dtrain__os_now_ns();
    dtrain__fsdp_waited(fsdp, unit, begin, ended - began);
    dtrain__fsdp_record(fsdp, gathers ? DTRAIN__FSDP_LANE_GATHER : DTRAIN__FSDP_LANE_REDUCE, unit, began, ended);
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, gathers ? "gathering" : "reducing", unit);
}

static unsigned char *dtrain__fsdp_device_stage(const dtrain_fsdp *fsdp, int number)
{
    return fsdp->device.stages + (size_t)number * fsdp->device.stage_bytes;
}

/* Starts to gather a unit, into its place where that is all of it and as wide as what travels. */
static dtrain_status dtrain__fsdp_device_gather(dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    const dtrain__fsdp_place *place = &fsdp->device.places[number];
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    size_t width = dtype == DTRAIN_F32 ? 4 : 2, begin;
    const size_t *counts = dtrain__fsdp_packed(fsdp, number, 0, &begin);
    int straight = place->whole && dtype == DTRAIN_F32;
    unsigned char *all = straight ? (unsigned char *)place->weights : dtrain__fsdp_device_stage(fsdp, number & 1);
    const void *mine;
    if (unit->count == 0)
        return DTRAIN_OK;
    mine = all + begin * width;
    if (straight && fsdp->layout.apart)
        mine = fsdp->masters + fsdp->layout.cuts[unit->first].weight;
    for (size_t i = unit->first; !straight && i < unit->end; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        dtrain__fsdp_convert(fsdp, dtrain__fsdp_own(fsdp, cut), DTRAIN_F32, all + (cut->stage + cut->own) * width,
                             dtype, cut->own_count);
    }
    if (fsdp->gathers == NULL)
        return DTRAIN_OK;
    return dtrain__async_all_gather_v(fsdp->device.groups[DTRAIN__FSDP_GATHERS], mine, all, counts, dtype,
                                      &fsdp->device.works[DTRAIN__FSDP_GATHERS][number]);
}

/* Ends it. */
static dtrain_status dtrain__fsdp_device_gathered(dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    size_t width = dtype == DTRAIN_F32 ? 4 : 2;
    const unsigned char *stage = dtrain__fsdp_device_stage(fsdp, number & 1);
    dtrain_status status = dtrain__fsdp_device_wait(fsdp, DTRAIN__FSDP_GATHERS, number, number);
    if (status != DTRAIN_OK || (fsdp->device.places[number].whole && dtype == DTRAIN_F32))
        return status;
    for (size_t i = unit->first; i < unit->end; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        dtrain__fsdp_convert(fsdp, stage + cut->stage * width, dtype, cut->data, DTRAIN_F32, cut->count);
    }
    return DTRAIN_OK;
}

/* What is added between copies: this rank's part of a unit's sum, or that rounded to what travels. */
static DTRAIN__NOINLINE void *dtrain__fsdp_device_part(const dtrain_fsdp *fsdp, int number, float *sum)
{
    return fsdp->desc.reduce_dtype == DTRAIN_F32 ? (void *)sum
                                                 : (void *)(fsdp->device.halves + fsdp->layout.units[number].grad);
}

/* Rounds count numbers, by way of a stage in which nothing may be under way. */
static void dtrain__fsdp_device_round(dtrain_fsdp *fsdp, float *x, size_t count, dtrain_dtype dtype, int stage)
{
    unsigned char *narrow = dtrain__fsdp_device_stage(fsdp, stage);
    if (dtype == DTRAIN_F32)
        return;
    dtrain__fsdp_convert(fsdp, x, DTRAIN_F32, narrow, dtype, count);
    dtrain__fsdp_convert(fsdp, narrow, dtype, x, DTRAIN_F32, count);
}

/* The sum of a unit as it travels between copies, and back. */
static void dtrain__fsdp_device_narrow(dtrain_fsdp *fsdp, int number, float *sum)
{
    dtrain__fsdp_convert(fsdp, sum, DTRAIN_F32, dtrain__fsdp_device_part(fsdp, number, sum), fsdp->desc.reduce_dtype,
                         fsdp->layout.units[number].grad_count);
}

static void dtrain__fsdp_device_widen(dtrain_fsdp *fsdp, int number, float *sum)
{
    dtrain__fsdp_convert(fsdp, dtrain__fsdp_device_part(fsdp, number, sum), fsdp->desc.reduce_dtype, sum, DTRAIN_F32,
                         fsdp->layout.units[number].grad_count);
}

/* Starts to reduce a unit; `sum` is where this rank's part goes. */
static dtrain_status dtrain__fsdp_device_reduce(dtrain_fsdp *fsdp, int number, float *sum)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    const dtrain__fsdp_place *place = &fsdp->device.places[number];
    dtrain_dtype dtype = fsdp->reduces != NULL ? DTRAIN_F32 : fsdp->desc.reduce_dtype;
    size_t width = dtype == DTRAIN_F32 ? 4 : 2, begin;
    const size_t *counts = dtrain__fsdp_packed(fsdp, number, 1, &begin);
    unsigned char *out =
        fsdp->reduces != NULL ? (unsigned char *)sum : (unsigned char *)dtrain__fsdp_device_part(fsdp, number, sum);
    unsigned char *in = out;
    int straight = fsdp->reduces != NULL && place->whole_grads;
    for (size_t i = unit->first; fsdp->reduces != NULL && i < unit->end; i++) /* as the CPU's that travel in 16 bits */
        if (fsdp->layout.cuts[i].trained)
            dtrain__fsdp_device_round(fsdp, fsdp->layout.cuts[i].grads, fsdp->layout.cuts[i].count,
                                      fsdp->desc.reduce_dtype, DTRAIN__FSDP_STAGES - 1);
    if (fsdp->reduces != NULL)
        in = straight ? (unsigned char *)place->grads : dtrain__fsdp_device_stage(fsdp, DTRAIN__FSDP_STAGES - 1);
    for (size_t i = unit->first; !straight && i < unit->end; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (cut->trained)
            dtrain__fsdp_convert(fsdp, cut->grads, DTRAIN_F32, in + cut->grad_stage * width, dtype, cut->count);
    }
    if (fsdp->reduces == NULL)
        return DTRAIN_OK;
    return dtrain__async_reduce_scatter_v(fsdp->device.groups[DTRAIN__FSDP_REDUCES], in, out, counts, dtype, DTRAIN_SUM,
                                          &fsdp->device.works[DTRAIN__FSDP_REDUCES][number]);
}

/* Starts to add count numbers of a bucket over the copies. */
static dtrain_status dtrain__fsdp_device_add(dtrain_fsdp *fsdp, int lowest, float *sum, size_t count)
{
    void *data = dtrain__fsdp_device_part(fsdp, lowest, sum);
    return dtrain_device_group_all_reduce_async(fsdp->device.groups[DTRAIN__FSDP_COPIES], data, data, count,
                                                fsdp->desc.reduce_dtype, DTRAIN_SUM,
                                                &fsdp->device.works[DTRAIN__FSDP_COPIES][lowest]);
}

/* Gives every rank rank 0's values: first those that have its part of other copies, then each copy's. */
static dtrain_status dtrain__fsdp_device_broadcast(dtrain_fsdp *fsdp, void *data, size_t count, dtrain_dtype dtype)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->copies != NULL)
        status = dtrain_device_group_broadcast(fsdp->device.groups[DTRAIN__FSDP_COPIES], data, count, dtype, 0);
    if (status == DTRAIN_OK && fsdp->gathers != NULL)
        status = dtrain_device_group_broadcast(fsdp->device.groups[DTRAIN__FSDP_GATHERS], data, count, dtype, 0);
    return status;
}

/* A range's full value: `own`, this rank's part of it, is copied to the CPU first. */
static dtrain_status dtrain__fsdp_device_get(dtrain_fsdp *fsdp, size_t index, const float *own, float *out, int root)
{
    size_t bytes = fsdp->layout.cuts[index].own_count * sizeof(float);
    float *copy = (float *)dtrain__alloc(&fsdp->memory, bytes);
    if (copy == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", bytes);
    dtrain_status status = dtrain_device_copy(fsdp->device.queue, copy, own, bytes);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_cpu_get(fsdp, index, copy, out, root);
    dtrain__free(&fsdp->memory, copy);
    return status;
}

/* ---- the norm ---- */

/* Queues the sum of squares of all gradients of a copy, each element once, which stays on the device. */
static dtrain_status dtrain__fsdp_device_queue_squares(dtrain_fsdp *fsdp)
{
    dtrain_device *queue = fsdp->device.queue;
    int64_t *limbs = fsdp->device.limbs;
    const int64_t zero = 0;
    dtrain_status status = dtrain_device_fill(queue, limbs, &zero, sizeof zero, DTRAIN__NORM_LIMBS);
    for (size_t i = 0; status == DTRAIN_OK && i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        const dtrain_param_part *part = fsdp->layout.table[cut->param].part;
        if (cut->trained && cut->own_count > 0 && (part == NULL || part->copy == 0))
            status = dtrain_device_squares(queue, fsdp->slices[i].grads, cut->own_count, limbs);
    }
    if (status == DTRAIN_OK && fsdp->reduces != NULL)
        status = dtrain_device_group_all_reduce(fsdp->device.groups[DTRAIN__FSDP_REDUCES], limbs, limbs,
                                                DTRAIN__NORM_LIMBS, DTRAIN_I64, DTRAIN_SUM);
    return status;
}

/* The same, for which the CPU waits. */
static dtrain_status dtrain__fsdp_device_squares(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_device_queue_squares(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(fsdp->device.queue, fsdp->sum.limbs, fsdp->device.limbs, sizeof fsdp->sum.limbs);
    dtrain__norm_carry(&fsdp->sum);
    return status;
}

#endif
