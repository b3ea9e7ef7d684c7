/* ---- >>fsdp-plan ----
 * What an object will need, computed from its layout before anything is allocated. */
#ifndef DTRAIN__FSDP_PLAN
#define DTRAIN__FSDP_PLAN
#include "fsdp_device.c"
#include "fsdp_quantise.c"
#include "reducer.c"

/* Returns the bytes of the pages that the reserved ranges of units `first` to `end` cover.
 *
 *   tied      1: only tied units
 *   staying   1: only the parts that are never dropped */
static size_t dtrain__fsdp_plan_units(const dtrain__layout *layout, int first, int end, int tied, int grads,
                                      int staying, dtrain__params_span *spans)
{
    size_t page = dtrain__os_page_bytes(), used = 0, pages = 0, covered = 0;
    for (size_t i = layout->units[first].first; i < layout->units[end - 1].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        const dtrain_param *param = &layout->table[cut->param];
        size_t at = 0, count = staying ? dtrain__layout_staying(cut, grads, &at) : cut->count;
        size_t begin = layout->offsets[cut->param] + (cut->element + at) * sizeof(float);
        if (count == 0 || (tied && !layout->units[cut->unit].tied) ||
            (grads ? !cut->trained || param->grad != NULL : param->data != NULL))
            continue;
        spans[used].begin = begin / page;
        spans[used++].end = (begin + count * sizeof(float) - 1) / page + 1;
    }
    qsort(spans, used, sizeof *spans, dtrain__params_compare_spans);
    for (size_t i = 0; i < used; i++) {
        size_t begin = spans[i].begin > covered ? spans[i].begin : covered;
        pages += spans[i].end > begin ? spans[i].end - begin : 0;
        covered = spans[i].end > covered ? spans[i].end : covered;
    }
    return pages * page;
}

/* Returns the bytes of those pages that come and go. */
static size_t dtrain__fsdp_plan_transient(const dtrain__layout *layout, int first, int end, int tied, int grads,
                                          dtrain__params_span *spans)
{
    return dtrain__fsdp_plan_units(layout, first, end, tied, grads, 0, spans) -
           dtrain__fsdp_plan_units(layout, first, end, tied, grads, 1, spans);
}

/* Returns the most bytes in pages at once: those that stay, those of tied units, and those of the two largest other
 * units; `all`: of all units. Any two units may meet, as the last and the first do between two passes. */
static size_t dtrain__fsdp_plan_pages(const dtrain__layout *layout, int grads, int all, dtrain__params_span *spans)
{
    int units = layout->unit_count;
    size_t stay = dtrain__fsdp_plan_units(layout, 0, units, 0, grads, 1, spans), two[2] = {0, 0};
    if (all)
        return stay + dtrain__fsdp_plan_transient(layout, 0, units, 0, grads, spans);
    for (int unit = 0; unit < units; unit++) {
        size_t bytes =
            layout->units[unit].tied ? 0 : dtrain__fsdp_plan_transient(layout, unit, unit + 1, 0, grads, spans);
        two[1] = bytes > two[0] ? two[0] : bytes > two[1] ? bytes : two[1];
        two[0] = bytes > two[0] ? bytes : two[0];
    }
    return stay + dtrain__fsdp_plan_transient(layout, 0, units, 1, grads, spans) + two[0] + two[1];
}

static size_t dtrain__fsdp_plan_state_floats(const dtrain_optimizer_desc *optimizer)
{
    return optimizer->kind == DTRAIN_ADAMW ? 2 : optimizer->kind == DTRAIN_SGD && optimizer->momentum != 0.0f;
}

/* Returns the bytes of stages. On the CPU, sums of gradients that travel in 16 bits have one more. */
static size_t dtrain__fsdp_plan_stages(const dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    size_t stages = DTRAIN__FSDP_STAGES;
    if (layout->device == NULL && desc->reduce_dtype != DTRAIN_F32)
        stages++;
    return stages * layout->stage * sizeof(float);
}

/* Takes the tables of an object from a block of zeros, and returns the block's bytes. NULL: it only counts them. */
static size_t dtrain__fsdp_plan_tables(dtrain_fsdp *fsdp, const dtrain__layout *layout, const dtrain_fsdp_desc *desc,
                                       int ranks, unsigned char *block)
{
    size_t cuts = layout->cut_count, params = layout->table_count, units = (size_t)layout->unit_count, used = 0;
    size_t shards = (size_t)layout->shards, world = (size_t)ranks,
           ways = layout->device != NULL ? DTRAIN__FSDP_WAYS : 0;
#define DTRAIN__FSDP_TAKE(type, count) (type *)dtrain__layout_take(block, &used, count, sizeof(type))
    fsdp->state.units = DTRAIN__FSDP_TAKE(dtrain__fsdp_unit, units);
    fsdp->schedule.copying = DTRAIN__FSDP_TAKE(dtrain_work *, units);
    fsdp->state.reserved = DTRAIN__FSDP_TAKE(unsigned char, params);
    fsdp->state.lr_factors = DTRAIN__FSDP_TAKE(float, params);
    fsdp->state.decays = DTRAIN__FSDP_TAKE(float, params);
    fsdp->state.counts = DTRAIN__FSDP_TAKE(size_t, cuts * shards);
    fsdp->state.packed_counts = DTRAIN__FSDP_TAKE(size_t, 2 * units * shards);
    fsdp->codes.parts = DTRAIN__FSDP_TAKE(const void *, shards);
    fsdp->codes.counts = (size_t *)dtrain__layout_take(block, &used, dtrain__fsdp_code_memory(layout, desc), 1);
    fsdp->schedule.gathering = DTRAIN__FSDP_TAKE(dtrain_work *, cuts);
    fsdp->schedule.reducing = DTRAIN__FSDP_TAKE(dtrain_work *, cuts);
    fsdp->state.slices = DTRAIN__FSDP_TAKE(dtrain_slice, cuts);
    fsdp->state.aliases = DTRAIN__FSDP_TAKE(dtrain__window_alias, cuts);
    fsdp->exchange.notes = DTRAIN__FSDP_TAKE(dtrain__fsdp_note, world);
    fsdp->exchange.announcements = DTRAIN__FSDP_TAKE(double, 2 * world);
    fsdp->figures.buckets = DTRAIN__FSDP_TAKE(dtrain_bucket, 2 * units);
    fsdp->figures.events = DTRAIN__FSDP_TAKE(dtrain__fsdp_event, desc->trace_events);
    for (size_t way = 0; way < ways; way++)
        fsdp->device.works[way] = DTRAIN__FSDP_TAKE(dtrain_device_work *, units);
#undef DTRAIN__FSDP_TAKE
    return used;
}

static size_t dtrain__fsdp_plan_bookkeeping(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int world)
{
    dtrain_fsdp none;
    return sizeof none + layout->bytes + dtrain__fsdp_plan_tables(&none, layout, desc, world, NULL) +
           2 * (layout->reserved / dtrain__os_page_bytes() + 1) * sizeof(uint16_t) +
           (dtrain__layout_line(layout->weights) - layout->weights) * sizeof(float) +
           (layout->device == NULL ? dtrain__fsdp_plan_stages(layout, desc) : 0);
}

/* Returns the most bytes that compression keeps from step to step. */
static size_t dtrain__fsdp_plan_compression(const dtrain__layout *layout, const dtrain_compress_desc *desc)
{
    size_t floats = 0;
    if (desc == NULL)
        return 0;
    floats += !desc->feedback.no_feedback;
    floats += desc->feedback.momentum > 0.0f;
    return 2 * floats * layout->grads * sizeof(float); /* in two versions */
}

/* Returns the bytes that all buckets send between copies. */
static uint64_t dtrain__fsdp_plan_copies(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int copy)
{
    const dtrain__layout_unit *units = layout->units;
    uint64_t bytes = 0;
    int highest = -1, narrow = dtrain__layout_is_16_bit(desc->reduce_dtype);
    for (int unit = layout->unit_count - 1; unit >= 0; unit--) {
        if (units[unit].trained == 0)
            continue;
        highest = highest < 0 ? unit : highest;
        if (!narrow && !dtrain__layout_ends_bucket(layout, unit, highest, desc->bucket_bytes))
            continue;
        size_t plain = units[highest].grad + units[highest].grad_count - units[unit].grad;
        if (desc->compress != NULL)
            bytes += dtrain__reducer_bytes(layout, desc->compress, unit, highest, copy, &plain);
        bytes += dtrain__plan_sent_bytes(plain, layout->copies) / (narrow ? 2 : 1);
        highest = -1;
    }
    return bytes;
}

/* Computes what a rank sends in a step, as the counters of a run show it. For top-k this is the most, because nobody
 * knows the lengths of selections before. Each unit is gathered in both passes, except the last two, which are still
 * there. */
static void dtrain__fsdp_plan_traffic(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int rank,
                                      dtrain_fsdp_plan_result *plan)
{
    int once = layout->resident || desc->no_reshard_after_forward;
    for (int i = 0; i < layout->unit_count; i++) {
        int passes = once || i + DTRAIN__FSDP_ROTATING >= layout->unit_count || layout->units[i].tied ? 1 : 2;
        plan->sent_gather += (uint64_t)passes * dtrain__layout_sends(layout, desc, i, 0);
        plan->sent_reduce += dtrain__layout_sends(layout, desc, i, 1);
    }
    if (layout->copies > 1)
        plan->sent_reduce += dtrain__fsdp_plan_copies(layout, desc, rank / layout->shards);
}

static dtrain_status dtrain__fsdp_plan_fill(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int world,
                                            int rank, dtrain_allocator *allocator, dtrain_fsdp_plan_result *plan)
{
    dtrain_optimizer_desc optimizer = dtrain__optimizer_defaults(&desc->optimizer);
    int micro = desc->micro_batches > 1 ? desc->micro_batches : 1;
    int all = layout->resident || desc->no_reshard_after_forward;
    size_t bytes = (layout->cut_count + 1) * sizeof(dtrain__params_span);
    dtrain__params_span *spans = (dtrain__params_span *)dtrain__alloc(allocator, bytes);
    if (spans == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_fsdp_plan: no memory for %zu bytes", bytes);
    plan->weights = layout->weights * sizeof(float);
    plan->gradients = layout->grads * sizeof(float);
    if (desc->keep_full_grads)
        plan->gradients +=
            micro > 1 ? layout->trained * sizeof(float) * (size_t)dtrain__terms_levels((unsigned)micro - 1) : 0;
    else
        plan->gradients *= (size_t)dtrain__terms_levels((unsigned)micro);
    plan->optimizer = layout->grads * sizeof(float) * dtrain__fsdp_plan_state_floats(&optimizer);
    if (layout->device == NULL) {
        plan->full_weights = dtrain__fsdp_plan_pages(layout, 0, all, spans);
        plan->full_grads = dtrain__fsdp_plan_pages(layout, 1, desc->no_overlap, spans);
    } else {
        plan->full_weights = (layout->place_floats[0] + 2 * layout->stage) * sizeof(float);
        plan->full_grads = (layout->place_floats[1] + layout->stage) * sizeof(float) +
                           dtrain__fsdp_place_half_bytes(layout, desc) + DTRAIN__FSDP_PLACE_SUM_BYTES;
    }
    plan->bookkeeping = dtrain__fsdp_plan_bookkeeping(layout, desc, world);
    plan->compression = dtrain__fsdp_plan_compression(layout, desc->compress);
    plan->peak = plan->weights + plan->gradients + plan->optimizer + plan->full_weights + plan->full_grads +
                 plan->bookkeeping + plan->compression;
    dtrain__fsdp_plan_traffic(layout, desc, rank, plan);
    dtrain__free(allocator, spans);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_plan(const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc,
                                          int world_size, int rank, dtrain_fsdp_plan_result *plan)
{
    dtrain_allocator allocator = {NULL, NULL, 0, 0};
    dtrain_fsdp_desc full = dtrain__layout_desc(desc);
    dtrain__layout layout;
    if (plan == NULL || rank < 0 || rank >= world_size || world_size > DTRAIN__MAX_RANKS)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_plan: rank %d of %d%s: expected a rank from 0 to world_size - 1, at most %d "
                            "ranks, and a plan to fill in",
                            rank, world_size, plan == NULL ? ", plan is NULL" : "", DTRAIN__MAX_RANKS);
    memset(plan, 0, sizeof *plan);
    dtrain_status status = dtrain__layout_create(&layout, table, count, &full, world_size, rank, &allocator);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__fsdp_plan_fill(&layout, &full, world_size, rank, &allocator, plan);
    dtrain__layout_destroy(&layout, &allocator);
    return status;
}

#endif
