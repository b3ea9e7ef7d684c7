/* ---- >>fsdp-reduce ----
 * Gradients, from a unit in full to this rank's part of the sum. In every micro-batch all ranks start units from the
 * last to the first, in whatever order the caller reduces them. A unit that a rank leaves out adds -0, the one number
 * that changes no other. A unit's full gradients are free once they are scattered; between copies only parts travel.
 * Micro-batches are folded by >>terms: this rank's parts after each round, or with keep_full_grads all before the only
 * round. */
#ifndef DTRAIN__FSDP_REDUCE
#define DTRAIN__FSDP_REDUCE
#include "fsdp_gather.c"
#include "reducer.c"
#include "../comm/plan.c"

/* Says whether a unit's part of the reduction waits in 16 bits. It does if it travels between copies. A rank that
 * shares its parameters with no other rounds as if it did. */
static int dtrain__fsdp_waits_narrow(const dtrain_fsdp *fsdp)
{
    return fsdp->desc.reduce_dtype != DTRAIN_F32 && (fsdp->reduces == NULL || fsdp->copies != NULL);
}

/* Returns where a unit's part of the current reduction goes. */
static float *dtrain__fsdp_target(const dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    return fsdp->state.parts.levels[fsdp->state.units[number].level] + (fsdp->in_place ? unit->small : unit->grad);
}

static dtrain_status dtrain__fsdp_level(dtrain_fsdp *fsdp, float **level, size_t count)
{
    if (*level == NULL)
        *level = (float *)dtrain__fsdp_alloc(fsdp, count * sizeof(float));
    if (*level != NULL)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                        "no memory on %s for %zu bytes of gradient sums: use fewer micro-batches",
                        dtrain_device_name(fsdp->device.queue), count * sizeof(float));
}

/* Folds the complete sum of a unit with those of earlier micro-batches. */
static void dtrain__fsdp_fold(dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout_unit *cuts = &fsdp->layout.units[number];
    float *sum = dtrain__fsdp_target(fsdp, number);
    uint64_t mode = dtrain__fpmode_enter();
    if (dtrain__fsdp_waits_narrow(fsdp))
        dtrain__fsdp_convert_sum(fsdp, number, sum, 1);
    dtrain__fsdp_queued(fsdp, dtrain__terms_add(&fsdp->state.parts, (1u << fsdp->state.units[number].level) - 1,
                                                cuts->grad, sum, sum, cuts->grad_count, fsdp->device.queue));
    dtrain__fpmode_restore(mode);
    fsdp->state.units[number].stage = DTRAIN__FSDP_GRADS_IDLE;
}

/* Starts to send every rank its part of the gradients in `in`, which has reduce_dtype, and to add up this rank's. */
static dtrain_status dtrain__fsdp_scatter(dtrain_fsdp *fsdp, const void *in, float *out, const size_t *counts,
                                          size_t index)
{
    dtrain_dtype dtype = fsdp->desc.reduce_dtype;
    if (fsdp->desc.reduce_dtype != DTRAIN_F32)
        return dtrain__reduce_scatter_partial(fsdp->reduces, in, out, counts, dtype, &fsdp->schedule.reducing[index]);
    return dtrain__reduce_scatter_v(fsdp->reduces, in, out, counts, NULL, dtype, DTRAIN_SUM,
                                    &fsdp->schedule.reducing[index]);
}

/* Returns where this rank's part of the sums of a unit's small ranges is, one range after another. */
static float *dtrain__fsdp_packed_sums(const dtrain_fsdp *fsdp, size_t begin)
{
    if (fsdp->desc.reduce_dtype != DTRAIN_F32) /* apart from the input, which may be half as wide */
        return fsdp->state.stages + DTRAIN__FSDP_STAGES * fsdp->layout.stage;
    return fsdp->state.stages + (DTRAIN__FSDP_STAGES - 1) * fsdp->layout.stage + begin;
}

/* Starts to reduce the small ranges of a unit together; on a device all ranges. A device rounds them to 16 bits as the
 * CPU does, but sends float32. `sum` is where this rank's part of the unit goes. */
static dtrain_status dtrain__fsdp_reduce_packed(dtrain_fsdp *fsdp, int number, float *sum)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    int queues = fsdp->device.queue != NULL, straight = unit->whole[1];
    dtrain_dtype dtype = queues ? DTRAIN_F32 : fsdp->desc.reduce_dtype;
    size_t width = dtype == DTRAIN_F32 ? 4 : 2, begin, first = unit->end;
    const size_t *counts = dtrain__fsdp_packed(fsdp, number, 1, &begin);
    unsigned char *in = straight ? (unsigned char *)(fsdp->device.blocks[1] + unit->place[1])
                                 : dtrain__fsdp_stage(fsdp, DTRAIN__FSDP_STAGES - 1);
    if (unit->packed_grads == 0)
        return DTRAIN_OK;
    for (size_t i = unit->first; i < unit->end && queues; i++)
        if (fsdp->layout.cuts[i].trained)
            dtrain__fsdp_round(fsdp, fsdp->layout.cuts[i].grads, fsdp->layout.cuts[i].count, fsdp->desc.reduce_dtype,
                               DTRAIN__FSDP_STAGES - 1);
    for (size_t i = unit->end; i-- > unit->first && !straight;) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (!cut->packed || !cut->trained)
            continue;
        first = i;
        dtrain__fsdp_convert(fsdp, cut->grads, DTRAIN_F32, in + cut->grad_stage * width, dtype, cut->count);
    }
    return queues ? dtrain__async_start_v(fsdp->device.groups[DTRAIN__FSDP_REDUCES], DTRAIN__REDUCE_SCATTER, in, sum,
                                          counts, dtype, DTRAIN_SUM, &fsdp->device.works[DTRAIN__FSDP_REDUCES][number])
                  : dtrain__fsdp_scatter(fsdp, in, dtrain__fsdp_packed_sums(fsdp, begin), counts, first);
}

/* Moves this rank's sums of small ranges to those of the other ranges, and adds up the quantised ranges. */
static void dtrain__fsdp_unpack_grads(dtrain_fsdp *fsdp, int number)
{
    size_t begin;
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    dtrain__fsdp_packed(fsdp, number, 1, &begin);
    const float *sums = dtrain__fsdp_packed_sums(fsdp, begin);
    for (size_t i = unit->first; i < unit->end; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        float *target = dtrain__fsdp_target(fsdp, number) + (cut->grad - unit->grad);
        if (cut->codes_grad) {
            dtrain__fsdp_code_reduced(fsdp, i, target);
        } else if (cut->packed && cut->trained && cut->own_count > 0) {
            memcpy(target, sums, cut->own_count * sizeof(float));
            sums += cut->own_count;
        }
    }
}

/* Copies the small gradients of a bucket to `sum`, one after another, or back; returns how many elements they have. */
static size_t dtrain__fsdp_pack_small(const dtrain_fsdp *fsdp, int lowest, float *sum, int back)
{
    const dtrain__layout *layout = &fsdp->layout;
    size_t count = 0;
    for (size_t i = layout->units[lowest].first; i < layout->units[fsdp->state.units[lowest].highest].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        if (!cut->trained || cut->count >= DTRAIN__LAYOUT_ALONE)
            continue;
        memcpy(back ? cut->grads : sum + count, back ? sum + count : cut->grads, cut->count * sizeof(float));
        count += cut->count;
    }
    return count;
}

/* Starts to add a bucket's gradients over the copies: large ones each in place, small ones together. */
static dtrain_status dtrain__fsdp_add_in_place(dtrain_fsdp *fsdp, int lowest, float *sum)
{
    const dtrain__layout *layout = &fsdp->layout;
    size_t small = dtrain__fsdp_pack_small(fsdp, lowest, sum, 0),
           end = layout->units[fsdp->state.units[lowest].highest].end;
    dtrain_status status = DTRAIN_OK;
    if (small > 0)
        status = dtrain_all_reduce_async(fsdp->copies, sum, sum, small, DTRAIN_F32, DTRAIN_SUM,
                                         &fsdp->schedule.copying[lowest]);
    for (size_t i = layout->units[lowest].first; status == DTRAIN_OK && i < end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        if (cut->trained && cut->count >= DTRAIN__LAYOUT_ALONE)
            status = dtrain_all_reduce_async(fsdp->copies, cut->grads, cut->grads, cut->count, DTRAIN_F32, DTRAIN_SUM,
                                             &fsdp->schedule.reducing[i]);
    }
    return status;
}

/* Waits for a bucket that dtrain__fsdp_add_in_place has started. */
static dtrain_status dtrain__fsdp_wait_in_place(dtrain_fsdp *fsdp, int lowest)
{
    dtrain_status status = dtrain__fsdp_wait(fsdp, &fsdp->schedule.copying[lowest], DTRAIN__FSDP_LANE_REDUCE, lowest);
    for (int i = lowest; i <= fsdp->state.units[lowest].highest; i++) {
        dtrain_status next = dtrain__fsdp_wait_all(fsdp, fsdp->schedule.reducing, DTRAIN__FSDP_LANE_REDUCE, i);
        status = status == DTRAIN_OK ? next : status;
    }
    if (status == DTRAIN_OK)
        dtrain__fsdp_pack_small(fsdp, lowest, dtrain__fsdp_target(fsdp, lowest), 1);
    return status;
}

/* Starts to add the open bucket over the copies: units fsdp->schedule.bucket down to `lowest`, whose parts lie side by
 * side. */
static dtrain_status dtrain__fsdp_send_bucket(dtrain_fsdp *fsdp, int lowest)
{
    const dtrain__layout_unit *units = fsdp->layout.units;
    size_t count = units[fsdp->schedule.bucket].grad + units[fsdp->schedule.bucket].grad_count - units[lowest].grad;
    float *sum = dtrain__fsdp_target(fsdp, lowest);
    int highest = fsdp->schedule.bucket;
    for (int i = lowest; i <= highest; i++)
        fsdp->state.units[i].lowest = lowest;
    fsdp->state.units[lowest].highest = highest;
    fsdp->schedule.bucket = -1;
    if (fsdp->reducer != NULL) {
        dtrain__fsdp_queued(fsdp, dtrain__reducer_take(fsdp, lowest, highest, sum - units[lowest].grad));
        return DTRAIN_OK;
    }
    void *data = dtrain__fsdp_part(fsdp, lowest, sum);
    dtrain_dtype dtype = fsdp->desc.reduce_dtype;
    dtrain_status status =
        fsdp->in_place ? dtrain__fsdp_add_in_place(fsdp, lowest, sum)
        : fsdp->device.queue == NULL
            ? dtrain_all_reduce_async(fsdp->copies, data, data, count, dtype, DTRAIN_SUM,
                                      &fsdp->schedule.copying[lowest])
            : dtrain_device_group_all_reduce_async(fsdp->device.groups[DTRAIN__FSDP_COPIES], data, data, count, dtype,
                                                   DTRAIN_SUM, &fsdp->device.works[DTRAIN__FSDP_COPIES][lowest]);
    fsdp->state.units[lowest].job = status == DTRAIN_OK;
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    fsdp->schedule.copying[lowest] = NULL;
    return dtrain__fsdp_break(fsdp, status, "starting to reduce", lowest);
}

/* Between micro-batches the caller may add to a gradient before it gathers the unit for backward. */
static void dtrain__fsdp_between(dtrain_fsdp *fsdp)
{
    if (fsdp->schedule.reduced_units == 0)
        dtrain__pages_put_away(&fsdp->state.pages[1]);
}

/* Waits until the bucket of a unit has been added over the copies. */
static dtrain_status dtrain__fsdp_wait_copies(dtrain_fsdp *fsdp, int number)
{
    int lowest = fsdp->state.units[number].lowest, highest = fsdp->state.units[lowest].highest;
    const dtrain__layout_unit *units = fsdp->layout.units;
    int64_t before_ns = fsdp->figures.stats.communicated_ns;
    if (fsdp->reducer != NULL)
        return dtrain__reducer_finish(fsdp, number);
    if (fsdp->state.units[lowest].job == 0)
        return DTRAIN_OK;
    fsdp->state.units[lowest].job = 0;
    dtrain_status status =
        fsdp->in_place ? dtrain__fsdp_wait_in_place(fsdp, lowest)
        : fsdp->device.queue != NULL
            ? dtrain__fsdp_device_wait(fsdp, DTRAIN__FSDP_COPIES, lowest, number)
            : dtrain__fsdp_wait(fsdp, &fsdp->schedule.copying[lowest], DTRAIN__FSDP_LANE_REDUCE, number);
    if (status != DTRAIN_OK)
        return status;
    uint64_t dense = dtrain__plan_sent_bytes(units[highest].grad + units[highest].grad_count - units[lowest].grad,
                                             fsdp->layout.copies);
    dtrain__fsdp_account(fsdp, lowest, highest, dense, fsdp->desc.reduce_dtype != DTRAIN_F32 ? dense / 2 : dense,
                         fsdp->figures.stats.communicated_ns - before_ns);
    return DTRAIN_OK;
}

/* Ends scattering a unit: frees its full gradients, and sends its part on to the other copies. */
static dtrain_status dtrain__fsdp_scattered(dtrain_fsdp *fsdp, int number)
{
    int64_t before_ns = fsdp->figures.stats.communicated_ns;
    dtrain_status status = fsdp->device.queue != NULL
                               ? dtrain__fsdp_device_wait(fsdp, DTRAIN__FSDP_REDUCES, number, number)
                               : dtrain__fsdp_wait_all(fsdp, fsdp->schedule.reducing, DTRAIN__FSDP_LANE_REDUCE, number);
    fsdp->schedule.scattering = -1;
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->device.queue == NULL)
        dtrain__fsdp_unpack_grads(fsdp, number);
    if (fsdp->reduces != NULL) {
        const dtrain__layout_unit *unit = &fsdp->layout.units[number];
        dtrain__fsdp_account(fsdp, number, number, 4 * (uint64_t)(unit->trained - unit->grad_count),
                             dtrain__layout_sends(&fsdp->layout, &fsdp->desc, number, 1),
                             fsdp->figures.stats.communicated_ns - before_ns);
    }
    if (fsdp->in_place || fsdp->left != NULL)
        fsdp->state.units[number].has_grads = 0; /* they stay, to become sums or to be compared by >>fsdp-debug */
    else
        dtrain__fsdp_page_grads(fsdp, number, 0);
    dtrain__fsdp_between(fsdp);
    if (fsdp->copies == NULL && fsdp->reducer == NULL) {
        dtrain__fsdp_fold(fsdp, number);
        return DTRAIN_OK;
    }
    if (fsdp->reduces != NULL && dtrain__fsdp_waits_narrow(fsdp))
        dtrain__fsdp_convert_sum(fsdp, number, dtrain__fsdp_target(fsdp, number), 0);
    fsdp->state.units[number].stage = DTRAIN__FSDP_GRADS_COPYING;
    fsdp->schedule.bucket = fsdp->schedule.bucket < 0 ? number : fsdp->schedule.bucket;
    /* numbers of 16 bits wait apart for each unit, so units travel alone */
    int goes = fsdp->desc.reduce_dtype != DTRAIN_F32 ||
               dtrain__layout_ends_bucket(&fsdp->layout, number, fsdp->schedule.bucket, fsdp->desc.bucket_bytes);
    return goes ? dtrain__fsdp_send_bucket(fsdp, number) : DTRAIN_OK;
}

/* Ends the reduction of a unit, if it is under way. */
static dtrain_status dtrain__fsdp_settle(dtrain_fsdp *fsdp, int number)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->state.units[number].stage == DTRAIN__FSDP_GRADS_SCATTERING)
        status = dtrain__fsdp_scattered(fsdp, number);
    /* in the next micro-batch: scattering the last unit of this one sends the bucket */
    if (status == DTRAIN_OK && fsdp->schedule.bucket >= number && fsdp->schedule.scattering >= 0)
        status = dtrain__fsdp_scattered(fsdp, fsdp->schedule.scattering);
    if (status == DTRAIN_OK && fsdp->state.units[number].stage == DTRAIN__FSDP_GRADS_COPYING) {
        status = dtrain__fsdp_wait_copies(fsdp, number);
        if (status == DTRAIN_OK)
            dtrain__fsdp_fold(fsdp, number);
    }
    return status;
}

/* Ends a scatter that is in a unit's way: of its own gradients, or on a device of those in its place. */
static dtrain_status dtrain__fsdp_clear_way(dtrain_fsdp *fsdp, int unit)
{
    int now = fsdp->schedule.scattering;
    if (now >= 0 && (now == unit || dtrain__fsdp_share_place(fsdp, now, unit, 1)))
        return dtrain__fsdp_scattered(fsdp, now);
    return DTRAIN_OK;
}

/* Does the same, and ends a scatter whose operations are done. Not on a device: there an operation is done for the CPU
 * before the caller's queue has reached it, and that queue must not wait early. */
static dtrain_status dtrain__fsdp_advance(dtrain_fsdp *fsdp, int unit)
{
    int now = fsdp->schedule.scattering;
    if (now >= 0 && fsdp->device.queue == NULL && dtrain__fsdp_all_done(fsdp, fsdp->schedule.reducing, now))
        return dtrain__fsdp_scattered(fsdp, now);
    return dtrain__fsdp_clear_way(fsdp, unit);
}

/* Starts to send every rank its part of one range's gradients. */
static dtrain_status dtrain__fsdp_reduce_cut(dtrain_fsdp *fsdp, size_t index, float *sum)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = fsdp->state.counts + index * (size_t)fsdp->layout.shards;
    if (cut->codes_grad)
        return dtrain__fsdp_code_reduce(fsdp, index);
    if (fsdp->desc.reduce_dtype == DTRAIN_F32)
        return dtrain__fsdp_scatter(fsdp, cut->grads, sum, counts, index);
    dtrain__fsdp_narrow(cut->grads, cut->count, fsdp->desc.reduce_dtype);
    return dtrain__fsdp_scatter(fsdp, dtrain__fsdp_half(cut->grads, cut->count), sum, counts, index);
}

/* Starts to reduce the gradients of a unit to `sum`. If this rank has all of them, they are copied there, to be added
 * between copies. */
static dtrain_status dtrain__fsdp_reduce_unit(dtrain_fsdp *fsdp, int number, float *sum)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    dtrain_dtype dtype = fsdp->desc.reduce_dtype;
    unsigned char *part = (unsigned char *)dtrain__fsdp_part(fsdp, number, sum);
    dtrain_status status = fsdp->reduces != NULL ? dtrain__fsdp_reduce_packed(fsdp, number, sum) : DTRAIN_OK;
    for (size_t i = unit->first; status == DTRAIN_OK && i < unit->end && !fsdp->in_place; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        size_t at = cut->grad - unit->grad;
        if (!cut->trained || cut->count == 0)
            continue;
        if (fsdp->reduces == NULL)
            dtrain__fsdp_convert(fsdp, cut->grads, DTRAIN_F32, part + at * (dtype == DTRAIN_F32 ? 4 : 2), dtype,
                                 cut->count);
        else if (!cut->packed)
            status = dtrain__fsdp_reduce_cut(fsdp, i, sum + at);
    }
    return status;
}

static dtrain_status dtrain__fsdp_reduce_start(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->state.units[number];
    dtrain_status status =
        fsdp->schedule.scattering >= 0 ? dtrain__fsdp_scattered(fsdp, fsdp->schedule.scattering) : DTRAIN_OK;
    if (status != DTRAIN_OK)
        return status;
    unit->level = dtrain__terms_level((unsigned)fsdp->schedule.round);
    unit->stage = DTRAIN__FSDP_GRADS_SCATTERING;
    fsdp->schedule.scattering = number;
    dtrain__fsdp_debug_compare(fsdp, number);
    dtrain__fsdp_debug_set(fsdp, number, 1, 1); /* they are narrowed in place */
    status = dtrain__fsdp_level(fsdp, &fsdp->state.parts.levels[unit->level], fsdp->layout.grads);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_reduce_unit(fsdp, number, dtrain__fsdp_target(fsdp, number));
    dtrain__fsdp_debug_set(fsdp, number, 1, 0);
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "starting to reduce", number);
    return fsdp->reduces == NULL ? dtrain__fsdp_scattered(fsdp, number) : DTRAIN_OK;
}

/* Starts to reduce the units whose turn it is. */
static dtrain_status dtrain__fsdp_reduce_turns(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->desc.no_overlap && fsdp->schedule.reduced_units < fsdp->schedule.trained_units)
        return DTRAIN_OK;
    for (; status == DTRAIN_OK && fsdp->schedule.turn >= 0; fsdp->schedule.turn--) {
        if (fsdp->layout.units[fsdp->schedule.turn].trained == 0)
            continue;
        if (fsdp->state.units[fsdp->schedule.turn].stage != DTRAIN__FSDP_GRADS_WAITING)
            return DTRAIN_OK;
        status = dtrain__fsdp_reduce_start(fsdp, fsdp->schedule.turn);
    }
    return status;
}

/* Folds one range's gradients with those of this rank's earlier micro-batches. The last micro-batch leaves the sum in
 * place. */
static void dtrain__fsdp_keep_cut(dtrain_fsdp *fsdp, const dtrain__layout_cut *cut, int last)
{
    unsigned term = (unsigned)fsdp->schedule.ended;
    int level = dtrain__terms_level(term);
    float *out = last ? cut->grads : fsdp->state.full.levels[level] + cut->full_grad;
    dtrain__fsdp_queued(fsdp, dtrain__terms_add(&fsdp->state.full, last ? term : (1u << level) - 1, cut->full_grad,
                                                cut->grads, out, cut->count, fsdp->device.queue));
}

/* Counts the micro-batches that are folded in full before they are reduced, this one included. Ranks that gather
 * together also reduce together, in the last pass of all. Else some would wait in a reduction, others in a gather. */
static DTRAIN__NOINLINE dtrain_status dtrain__fsdp_folded(dtrain_fsdp *fsdp, int *count)
{
    dtrain_status status = DTRAIN_OK;
    *count = 1;
    if (!fsdp->desc.keep_full_grads)
        return DTRAIN_OK;
    if (!fsdp->layout.resident)
        status = dtrain__fsdp_announced(fsdp);
    *count = fsdp->layout.resident ? fsdp->exchange.announced : fsdp->exchange.most;
    return status;
}

/* Waits for the notes of the other ranks. */
static dtrain_status dtrain__fsdp_recv_notes(dtrain_fsdp *fsdp)
{
    dtrain_work *exchanging = fsdp->exchange.exchanging;
    fsdp->exchange.exchanging = NULL;
    dtrain_status status = exchanging != NULL ? dtrain_work_wait(exchanging) : DTRAIN_OK;
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, "hearing of the other ranks", -1);
}

/* Tells all ranks whether this one begins a round. Each rank says so before each round and once after its last. If one
 * begins a round, ranks without gradients take part and add nothing. */
static dtrain_status dtrain__fsdp_send_note(dtrain_fsdp *fsdp, int begins)
{
    size_t ranks = (size_t)dtrain_comm_size(fsdp->comm);
    dtrain_status status = dtrain__fsdp_recv_notes(fsdp);
    if (status != DTRAIN_OK)
        return status;
    fsdp->exchange.sent_note = fsdp->exchange.note;
    fsdp->exchange.sent_note.rounds = (uint64_t)fsdp->schedule.round + (uint64_t)begins;
    fsdp->exchange.called = fsdp->schedule.round + 1;
    if (fsdp->world == NULL)
        fsdp->exchange.notes[0] = fsdp->exchange.sent_note;
    else
        status =
            dtrain_all_gather_async(fsdp->world, &fsdp->exchange.sent_note, fsdp->exchange.notes,
                                    sizeof fsdp->exchange.sent_note * ranks, DTRAIN_U8, &fsdp->exchange.exchanging);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    fsdp->exchange.exchanging = NULL;
    return dtrain__fsdp_break(fsdp, status, "telling the other ranks", -1);
}

/* Ends the reductions of all units. */
static dtrain_status dtrain__fsdp_settle_all(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = fsdp->layout.unit_count - 1; status == DTRAIN_OK && i >= 0; i--)
        status = dtrain__fsdp_settle(fsdp, i);
    return status;
}

/* Waits for the notes now. With DTRAIN_PROGRESS_POLL it ends all reductions first. A compressed bucket starts only when
 * this rank waits for it, and the others may wait for this rank. */
static dtrain_status dtrain__fsdp_settle_and_recv(dtrain_fsdp *fsdp)
{
    int polls = fsdp->comm->desc.progress == DTRAIN_PROGRESS_POLL;
    dtrain_status status = polls ? dtrain__fsdp_settle_all(fsdp) : DTRAIN_OK;
    return status == DTRAIN_OK ? dtrain__fsdp_recv_notes(fsdp) : status;
}

/* Begins a round. With DTRAIN_PROGRESS_POLL it also waits for the notes, if the round may block this rank before the
 * step ends. */
static dtrain_status dtrain__fsdp_open_round(dtrain_fsdp *fsdp)
{
    int once = fsdp->desc.keep_full_grads && fsdp->reduces == NULL && fsdp->device.queue == NULL;
    if (fsdp->exchange.called > fsdp->schedule.round)
        return DTRAIN_OK;
    dtrain_status status = dtrain__fsdp_send_note(fsdp, 1);
    if (status != DTRAIN_OK || once || fsdp->comm->desc.progress != DTRAIN_PROGRESS_POLL)
        return status;
    return dtrain__fsdp_settle_and_recv(fsdp);
}

/* Takes a unit's gradients over, or -0 if this rank has none, and reduces the units whose turn it is. */
static dtrain_status dtrain__fsdp_take(dtrain_fsdp *fsdp, int number, int unused)
{
    const dtrain__layout *layout = &fsdp->layout;
    const uint32_t negative_zero = 0x80000000u; /* by its bits: -Ofast knows no sign of zero */
    int folded;
    dtrain_status status = dtrain__fsdp_folded(fsdp, &folded);
    int keeps = folded > 1, last = fsdp->schedule.ended >= folded - 1;
    if (status == DTRAIN_OK && last)
        status = dtrain__fsdp_open_round(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_settle(fsdp, number);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_clear_way(fsdp, number);
    if (status == DTRAIN_OK && keeps && !last)
        status = dtrain__fsdp_level(fsdp, &fsdp->state.full.levels[dtrain__terms_level((unsigned)fsdp->schedule.ended)],
                                    layout->trained);
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "taking the gradients", number);
    dtrain__fsdp_page_grads(fsdp, number, 1);
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        if (cut->trained && unused && cut->count > 0)
            dtrain__fsdp_queued(fsdp, dtrain_device_fill(fsdp->device.queue, cut->grads, &negative_zero,
                                                         sizeof negative_zero, cut->count));
        if (cut->trained && keeps)
            dtrain__fsdp_keep_cut(fsdp, cut, last);
    }
    fsdp->state.units[number].reduced = 1;
    fsdp->state.units[number].backward = 0;
    fsdp->schedule.reduced_units++;
    if (keeps && !last)
        dtrain__fsdp_page_grads(fsdp, number, 0);
    else
        fsdp->state.units[number].stage = DTRAIN__FSDP_GRADS_WAITING;
    dtrain__fsdp_debug_set(fsdp, number, 1, 0);
    return dtrain__fsdp_reduce_turns(fsdp);
}

/* Takes over the units above `unit` that were gathered on the way down and released, as unused. Other ranks wait for
 * their reduction, maybe with a gather that this rank needs. So it cannot wait for the end of the micro-batch. */
static dtrain_status dtrain__fsdp_left_out(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = fsdp->layout.unit_count - 1; status == DTRAIN_OK && i > unit; i--)
        if (fsdp->state.units[i].backward && !fsdp->state.units[i].held && fsdp->layout.units[i].trained > 0)
            status = dtrain__fsdp_take(fsdp, i, 1);
    return status;
}

/* Ends a micro-batch whose units have all been taken over. */
static void dtrain__fsdp_micro_batch_over(dtrain_fsdp *fsdp)
{
    for (int i = 0; i < fsdp->layout.unit_count; i++)
        fsdp->state.units[i].reduced = 0;
    fsdp->schedule.reduced_units = 0;
    dtrain__fsdp_between(fsdp);
    fsdp->schedule.ended++;
    fsdp->schedule.just_ended = 1;
    if (fsdp->schedule.turn < 0) {
        fsdp->schedule.round++;
        fsdp->schedule.turn = fsdp->layout.unit_count - 1;
    }
}

/* Ends a micro-batch: takes over the units that were not reduced, as unused. */
static dtrain_status dtrain__fsdp_end_micro_batch(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = fsdp->layout.unit_count - 1; status == DTRAIN_OK && i >= 0; i--)
        if (fsdp->layout.units[i].trained > 0 && !fsdp->state.units[i].reduced)
            status = dtrain__fsdp_take(fsdp, i, 1);
    if (status == DTRAIN_OK)
        dtrain__fsdp_micro_batch_over(fsdp);
    return status;
}

static dtrain_status dtrain__fsdp_check_open(dtrain_fsdp *fsdp, const char *call)
{
    if (fsdp->state.grads == NULL)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "%s: the gradients of the last step are finished but not used on rank %d: call "
                        "dtrain_fsdp_step, dtrain_fsdp_publish or dtrain_fsdp_drop first",
                        call, dtrain__fsdp_rank(fsdp));
}

/* Checks that this rank has an announced micro-batch left. Micro-batches that it joined do not count. */
static dtrain_status dtrain__fsdp_check_left(dtrain_fsdp *fsdp, const char *call)
{
    int computed = fsdp->schedule.ended - fsdp->schedule.joined;
    if (computed < (fsdp->exchange.announced >= 0 ? fsdp->exchange.announced
                    : fsdp->desc.keep_full_grads  ? 1
                                                  : INT_MAX))
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "%s: all %d micro-batches of this step are over on rank %d: announce as many as you compute "
                        "with dtrain_%s_begin",
                        call, computed, dtrain__fsdp_rank(fsdp), fsdp->ddp ? "ddp" : "fsdp");
}

/* Checks that a unit's gradients are still missing in this micro-batch. */
static dtrain_status dtrain__fsdp_check_missing(dtrain_fsdp *fsdp, int number, const char *call)
{
    if (fsdp->layout.units[number].trained == 0)
        return DTRAIN_OK;
    dtrain_status status = dtrain__fsdp_check_open(fsdp, call);
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->state.units[number].reduced)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: unit %d was reduced twice in micro-batch %d on rank %d, while %d of %d units are "
                            "missing: reduce those, or if they are unused call dtrain_%s_next first",
                            call, number, fsdp->schedule.ended, dtrain__fsdp_rank(fsdp),
                            fsdp->schedule.trained_units - fsdp->schedule.reduced_units, fsdp->schedule.trained_units,
                            fsdp->ddp ? "ddp" : "fsdp");
    return dtrain__fsdp_check_left(fsdp, call);
}

static dtrain_status dtrain__fsdp_check_reduce(dtrain_fsdp *fsdp, int number, const char *call)
{
    /* The parameters must have been in memory when the gradients were computed. The rule is the same on any number of
     * ranks: the unit is gathered, or was on the way down, or gathered units stay. */
    const dtrain__fsdp_unit *unit = &fsdp->state.units[number];
    dtrain_strategy strategy = fsdp->desc.strategy;
    int rank = dtrain__fsdp_rank(fsdp), stays = strategy == DTRAIN_SHARD_GRAD_OP || strategy == DTRAIN_DDP ||
                                                fsdp->schedule.keeps || fsdp->desc.no_reshard_after_forward;
    if (unit->fresh && (unit->held || unit->backward || stays))
        return dtrain__fsdp_check_missing(fsdp, number, call);
    if (!fsdp->state.units[number].fresh)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: unit %d has not been gathered on rank %d since it was reduced last: call "
                            "dtrain_fsdp_gather(fsdp, %d), compute, then reduce",
                            call, number, rank, number);
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "%s: unit %d was released on rank %d after its forward pass and not gathered since, so its "
                        "gradients come from parameters that may be gone: call dtrain_fsdp_gather(fsdp, %d) before its "
                        "backward pass",
                        call, number, rank, number);
}

static dtrain_status dtrain__fsdp_reduce_now(dtrain_fsdp *fsdp, int unit, const char *call)
{
    if (fsdp->layout.units[unit].trained == 0)
        return dtrain__fsdp_release_now(fsdp, unit);
    dtrain_status status = dtrain__fsdp_check_reduce(fsdp, unit, call);
    if (status != DTRAIN_OK)
        return status;
    fsdp->state.units[unit].fresh = 0;
    fsdp->schedule.just_ended = 0;
    status = dtrain__fsdp_left_out(fsdp, unit);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_take(fsdp, unit, 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_release_now(fsdp, unit);
    if (status == DTRAIN_OK && fsdp->schedule.reduced_units == fsdp->schedule.trained_units)
        dtrain__fsdp_micro_batch_over(fsdp);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_reduce(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_reduce", unit);
    if (status != DTRAIN_OK)
        return status;
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_reduce_now(fsdp, unit, "dtrain_fsdp_reduce"));
}

#endif
