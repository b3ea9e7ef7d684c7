/* Which elements of pieces that exist make up pieces that are wanted: what tests of regions and pieces compare with
 * counting. */
#ifndef RESHARD_PLAN_H
#define RESHARD_PLAN_H

/* Elements that go from a piece that exists to one that is wanted. */
typedef struct reshard_copy {
    size_t from, to;             /* which pieces */
    size_t from_begin, to_begin; /* elements of their data */
    size_t count;
} reshard_copy;

static int reshard_same_tensor(const dtrain_piece *a, const dtrain_piece *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0;
}

static int reshard_by_region(const void *left, const void *right)
{
    const dtrain_piece *a = *(const dtrain_piece *const *)left, *b = *(const dtrain_piece *const *)right;
    dtrain__region x, y;
    int order = dtrain__region_compare_names(a, b);
    if (order != 0 || a->ndim != b->ndim)
        return order != 0 ? order : a->ndim - b->ndim;
    dtrain__region_of(&x, a);
    dtrain__region_of(&y, b);
    order = dtrain__region_compare(&x, &y);
    return order != 0 ? order : a < b ? -1 : a > b;
}

static int reshard_by_element(const void *left, const void *right)
{
    const reshard_copy *a = (const reshard_copy *)left, *b = (const reshard_copy *)right;
    return a->to_begin < b->to_begin ? -1 : a->to_begin > b->to_begin;
}

typedef struct reshard {
    const dtrain_piece *have, *want;
    const dtrain_piece **sorted; /* what exists, by name and region, copies left out */
    size_t sorted_count;
    reshard_copy *copies;
    size_t capacity, count;
} reshard;

static dtrain_status reshard_sort(reshard *plan, size_t have_count)
{
    dtrain__region region, before;
    size_t used = 0;
    for (size_t i = 0; i < have_count; i++) {
        dtrain_status status = dtrain__region_check(&region, &plan->have[i], i, "reshard_plan, of what exists");
        if (status != DTRAIN_OK)
            return status;
        if (!plan->have[i].unsaved)
            plan->sorted[used++] = &plan->have[i];
    }
    if (used > 0)
        qsort(plan->sorted, used, sizeof *plan->sorted, reshard_by_region);
    for (size_t i = 0; i < used; i++) {
        const dtrain_piece *piece = plan->sorted[i],
                           *last = plan->sorted_count > 0 ? plan->sorted[plan->sorted_count - 1] : NULL;
        dtrain__region_of(&region, piece);
        if (last != NULL && piece->copies > 1 && last->copies > 1 && dtrain__region_compare_names(piece, last) == 0 &&
            reshard_same_tensor(piece, last)) {
            dtrain__region_of(&before, last);
            if (dtrain__region_compare(&region, &before) == 0)
                continue;
        }
        plan->sorted[plan->sorted_count++] = piece;
    }
    return DTRAIN_OK;
}

/* The first piece of a wanted one's tensor. */
static size_t reshard_find(const reshard *plan, const dtrain_piece *want)
{
    size_t low = 0, high = plan->sorted_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (dtrain__region_compare_names(plan->sorted[middle], want) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Lists what one wanted piece gets. */
static dtrain_status reshard_piece(reshard *plan, const dtrain_piece *want, const dtrain__region *to)
{
    size_t first = plan->count;
    char name[160];
    dtrain__region_tiling tiling;
    dtrain__region_tiling_begin(&tiling, to);
    for (size_t i = reshard_find(plan, want);
         i < plan->sorted_count && dtrain__region_compare_names(plan->sorted[i], want) == 0; i++) {
        const dtrain_piece *have = plan->sorted[i];
        dtrain__region from;
        dtrain__region_overlap overlap;
        dtrain__region_overlap_run run;
        if (!reshard_same_tensor(have, want))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "reshard_plan: \"%s\" is wanted with another shape or dtype than it has",
                                dtrain__region_name(name, want));
        dtrain__region_of(&from, have);
        if (!dtrain__region_overlap_begin(&overlap, &from, to))
            continue;
        overlap.both.count = dtrain__region_overlap_count(&overlap);
        dtrain__region_tiling_add(&tiling, &overlap.both);
        for (; dtrain__region_overlap_next(&overlap, &run); plan->count++)
            if (plan->count < plan->capacity) {
                reshard_copy copy = {(size_t)(have - plan->have), (size_t)(want - plan->want), run.from_begin,
                                            run.to_begin, run.count};
                plan->copies[plan->count] = copy;
            }
    }
    if (!dtrain__region_tiling_whole(&tiling))
        return dtrain__fail(
            NULL, tiling.count > want->count ? DTRAIN_ERR_INVALID : DTRAIN_ERR_MISMATCH,
            "reshard_plan: %zu elements of \"%s\" are wanted, and the pieces that exist have %zu "
            "of them: each must be in exactly one, or in copies of one",
            want->count, dtrain__region_name(name, want), tiling.count);
    if (plan->count <= plan->capacity && plan->count > first)
        qsort(plan->copies + first, plan->count - first, sizeof *plan->copies, reshard_by_element);
    return DTRAIN_OK;
}

/* Says which elements of the pieces that exist make up those that are wanted, by the regions that checkpoints are loaded
 * by.
 *
 *   have     pieces of any number of ranks; of copies of one piece the first in the list is used, and none that is
 *            marked unsaved. Data is not read
 *   want     pieces, likewise
 *   copies   out: room for capacity of them, by wanted piece, in the order of its elements; may be NULL with 0
 *   count    out: how many there are, also when there is no room for them
 *   errors   DTRAIN_ERR_INVALID   a bad piece; shapes or dtypes of one tensor differ; pieces overlap that are no copies
 *            DTRAIN_ERR_MISMATCH  elements that are wanted are nowhere; the text names the first tensor
 *            DTRAIN_ERR_MEMORY */
static dtrain_status reshard_plan(const dtrain_piece *have, size_t have_count, const dtrain_piece *want,
                                             size_t want_count, reshard_copy *copies, size_t capacity,
                                             size_t *count)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    reshard plan;
    dtrain__region to;
    size_t bytes;
    memset(&plan, 0, sizeof plan);
    if ((have == NULL && have_count > 0) || (want == NULL && want_count > 0) || count == NULL ||
        (copies == NULL && capacity > 0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "reshard_plan: an array or count is NULL");
    plan.have = have;
    plan.want = want;
    plan.copies = copies;
    plan.capacity = capacity;
    if (dtrain__mul_size(have_count, sizeof *plan.sorted, &bytes))
        plan.sorted = (const dtrain_piece **)dtrain__alloc(&heap, bytes);
    if (plan.sorted == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "reshard_plan: no memory for %zu pieces", have_count);
    dtrain_status status = reshard_sort(&plan, have_count);
    for (size_t i = 0; i < want_count && status == DTRAIN_OK; i++) {
        status = dtrain__region_check(&to, &want[i], i, "reshard_plan, of what is wanted");
        if (status == DTRAIN_OK && want[i].count > 0)
            status = reshard_piece(&plan, &want[i], &to);
    }
    dtrain__free(&heap, (void *)plan.sorted);
    *count = plan.count;
    return status;
}

#endif
