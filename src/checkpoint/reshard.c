/* ---- >>reshard ----
 * Which elements of one piece are those of another, and whether pieces tile their tensors. Arithmetic alone.
 *
 * A region is a range of a box, counted row by row. Elements of a region come in the order in which they come in the
 * tensor, so that what two regions share is found by walking the box that their boxes share, run by run: a run is what
 * lies next to each other in the tensor, and so in both. */
#ifndef DTRAIN__RESHARD
#define DTRAIN__RESHARD
#include "checkpoint.h"
#include "xxh64.c"
#include "../base/memory.c"
#include "../base/random.c"

typedef struct dtrain__region {
    int ndim;
    size_t shape[DTRAIN_MAX_DIMS], stride[DTRAIN_MAX_DIMS]; /* of the tensor */
    size_t begin[DTRAIN_MAX_DIMS], size[DTRAIN_MAX_DIMS];   /* of the box */
    size_t at, count;                                       /* elements of the box */
    size_t run;                                             /* elements of the box that lie together */
} dtrain__region;

static size_t dtrain__region_product(const size_t *sizes, int first, int end)
{
    size_t product = 1;
    for (int d = first; d < end; d++)
        product *= sizes[d];
    return product;
}

/* Derives stride and run. The shape's elements do not overflow, the box is inside it. */
static void dtrain__region_settle(dtrain__region *region)
{
    int whole = 1;
    size_t stride = 1;
    region->run = 1;
    for (int d = region->ndim - 1; d >= 0; d--) {
        region->stride[d] = stride;
        stride *= region->shape[d];
        if (whole)
            region->run *= region->size[d];
        whole = whole && region->size[d] == region->shape[d];
    }
    region->run = region->run > 0 ? region->run : 1;
}

/* Makes the region of a piece. Returns what is wrong with it, or NULL. */
static const char *dtrain__region_of(dtrain__region *region, const dtrain_piece *piece)
{
    size_t elements = 1, bits;
    memset(region, 0, sizeof *region);
    if (piece->ndim < 0 || piece->ndim > DTRAIN_MAX_DIMS)
        return "ndim is not from 0 to 8";
    if (dtrain_dtype_bits(piece->dtype) < 8)
        return "its dtype is none of a byte or more";
    region->ndim = piece->ndim;
    for (int d = 0; d < piece->ndim; d++) {
        region->shape[d] = piece->shape[d];
        region->begin[d] = piece->boxed ? piece->box_begin[d] : 0;
        region->size[d] = piece->boxed ? piece->box_size[d] : piece->shape[d];
        if (region->begin[d] > region->shape[d] || region->size[d] > region->shape[d] - region->begin[d])
            return "its box reaches beyond the shape";
        if (!dtrain__mul_size(elements, region->shape[d], &elements))
            return "its shape multiplies to more than memory";
    }
    if (!dtrain__mul_size(elements, dtrain_dtype_bits(piece->dtype), &bits))
        return "its shape multiplies to more than memory";
    elements = dtrain__region_product(region->size, 0, region->ndim);
    if (piece->begin > elements || piece->count > elements - piece->begin)
        return "its range reaches beyond the box";
    if (piece->copies < 0 || piece->copy < 0 || piece->copy >= (piece->copies > 0 ? piece->copies : 1))
        return "copy is not from 0 to copies - 1";
    region->at = piece->begin;
    region->count = piece->count;
    dtrain__region_settle(region);
    return NULL;
}

/* The place in the tensor of element e of the box. */
static size_t dtrain__region_place(const dtrain__region *region, size_t e)
{
    size_t place = 0;
    for (int d = region->ndim - 1; d >= 0; d--) {
        place += (region->begin[d] + e % region->size[d]) * region->stride[d];
        e /= region->size[d];
    }
    return place;
}

/* The first element of the box whose place in the tensor is not before `place`. */
static size_t dtrain__region_seek(const dtrain__region *region, size_t place)
{
    size_t e = region->ndim == 0 ? place : 0; /* a scalar's own place, or its end */
    for (int d = 0; d < region->ndim; d++) {
        size_t index = place / region->stride[d];
        place %= region->stride[d];
        if (index < region->begin[d])
            return e * dtrain__region_product(region->size, d, region->ndim);
        if (index - region->begin[d] >= region->size[d])
            return (e + 1) * dtrain__region_product(region->size, d, region->ndim);
        e = e * region->size[d] + (index - region->begin[d]);
    }
    return e;
}

/* What two regions of one tensor share, to be taken run by run. */
typedef struct dtrain__overlap {
    const dtrain__region *from, *to;
    dtrain__region both; /* at: the next element */
    size_t end;
} dtrain__overlap;

/* Elements [from_begin, from_begin + count) of one are [to_begin, ...) of the other. */
typedef struct dtrain__overlap_run {
    size_t from_begin, to_begin, count;
} dtrain__overlap_run;

/* Returns 0 when they share nothing. */
static int dtrain__overlap_begin(dtrain__overlap *overlap, const dtrain__region *from, const dtrain__region *to)
{
    dtrain__region *both = &overlap->both;
    overlap->from = from;
    overlap->to = to;
    if (from->count == 0 || to->count == 0)
        return 0;
    *both = *from;
    for (int d = 0; d < both->ndim; d++) {
        size_t begin = from->begin[d] > to->begin[d] ? from->begin[d] : to->begin[d];
        size_t a = from->begin[d] + from->size[d], b = to->begin[d] + to->size[d], end = a < b ? a : b;
        if (begin >= end)
            return 0;
        both->begin[d] = begin;
        both->size[d] = end - begin;
    }
    dtrain__region_settle(both);
    size_t low = dtrain__region_place(from, from->at), low_to = dtrain__region_place(to, to->at);
    size_t high = dtrain__region_place(from, from->at + from->count - 1);
    size_t high_to = dtrain__region_place(to, to->at + to->count - 1);
    low = low > low_to ? low : low_to;
    high = high < high_to ? high : high_to;
    if (low > high)
        return 0;
    both->at = dtrain__region_seek(both, low);
    overlap->end = dtrain__region_seek(both, high + 1);
    return both->at < overlap->end;
}

/* Gives the next run; returns 0 after the last. */
static int dtrain__overlap_next(dtrain__overlap *overlap, dtrain__overlap_run *run)
{
    dtrain__region *both = &overlap->both;
    run->count = 0;
    while (both->at < overlap->end) {
        size_t n = both->run - both->at % both->run, left = overlap->end - both->at;
        size_t place = dtrain__region_place(both, both->at);
        size_t from = dtrain__region_seek(overlap->from, place) - overlap->from->at;
        size_t to = dtrain__region_seek(overlap->to, place) - overlap->to->at;
        n = n < left ? n : left;
        if (run->count > 0 && (from != run->from_begin + run->count || to != run->to_begin + run->count))
            break;
        if (run->count == 0) {
            run->from_begin = from;
            run->to_begin = to;
        }
        run->count += n;
        both->at += n;
    }
    return run->count > 0;
}

/* All elements that they share; the overlap is at its beginning. */
static size_t dtrain__overlap_count(const dtrain__overlap *overlap)
{
    return overlap->end - overlap->both.at;
}

/* ---- boxes of a range ---- */

typedef dtrain_status (*dtrain__region_visit)(void *user, const dtrain__region *box);

/* Calls visit with the boxes, at most 2 * ndim - 1, that a region is made of, in the order of its elements. Dimensions
 * before d are one index wide; low and high count in those from d on. At most ndim deep. */
static dtrain_status dtrain__region_boxes_from(dtrain__region *box, int d, size_t low, size_t high,
                                               dtrain__region_visit visit, void *user)
{
    size_t all = dtrain__region_product(box->size, d, box->ndim);
    dtrain_status status = DTRAIN_OK;
    if (low >= high)
        return DTRAIN_OK;
    if (low == 0 && high == all)
        return visit(user, box);
    size_t inner = all / box->size[d], begin = box->begin[d], size = box->size[d];
    size_t first = (low + inner - 1) / inner, last = high / inner; /* whole indices: first to last */
    box->size[d] = 1;
    if (low % inner != 0) { /* the end of an index; it may be the end of the range as well */
        box->begin[d] = begin + low / inner;
        status = dtrain__region_boxes_from(box, d + 1, low % inner, high / inner == low / inner ? high % inner : inner,
                                           visit, user);
    }
    if (status == DTRAIN_OK && first < last) {
        box->begin[d] = begin + first;
        box->size[d] = last - first;
        status = visit(user, box);
        box->size[d] = 1;
    }
    if (status == DTRAIN_OK && high % inner != 0 && first <= last) {
        box->begin[d] = begin + last;
        status = dtrain__region_boxes_from(box, d + 1, 0, high % inner, visit, user);
    }
    box->begin[d] = begin;
    box->size[d] = size;
    return status;
}

static dtrain_status dtrain__region_boxes(const dtrain__region *region, dtrain__region_visit visit, void *user)
{
    dtrain__region box = *region;
    return dtrain__region_boxes_from(&box, 0, region->at, region->at + region->count, visit, user);
}

/* ---- tiling ----
 * Whether regions hold every element of their tensor once. Every index of every dimension gets a random weight modulo a
 * prime; a box then weighs the product of its sides' sums, and a set of boxes what its elements weigh together. Regions
 * that weigh what the tensor weighs tile it: others pass by chance alone (Schwartz and Zippel), twice at most once in
 * 2^55. This takes time linear in the number of regions, whatever their form, where comparing pairs does not. The sum
 * of weights up to an index is itself drawn at random, which comes to the same. */

#define DTRAIN__TILING_PRIME 0x7fffffffu /* 2^31 - 1 */

typedef struct dtrain__tiling {
    uint64_t seed[2];
    uint64_t weight[2], whole[2];
    size_t count; /* elements of all regions, for the text */
} dtrain__tiling;

/* The sum of the weights of indices below `index`. */
static uint64_t dtrain__tiling_sum(uint64_t seed, int d, size_t index)
{
    return index == 0 ? 0 : dtrain_random_u64(seed + (uint64_t)d, index) % DTRAIN__TILING_PRIME;
}

static dtrain_status dtrain__tiling_weigh(void *user, const dtrain__region *box)
{
    dtrain__tiling *tiling = (dtrain__tiling *)user;
    for (int k = 0; k < 2; k++) {
        uint64_t weight = 1;
        for (int d = 0; d < box->ndim; d++) {
            uint64_t below = dtrain__tiling_sum(tiling->seed[k], d, box->begin[d]);
            uint64_t upto = dtrain__tiling_sum(tiling->seed[k], d, box->begin[d] + box->size[d]);
            weight = weight * ((upto + DTRAIN__TILING_PRIME - below) % DTRAIN__TILING_PRIME) % DTRAIN__TILING_PRIME;
        }
        tiling->weight[k] = (tiling->weight[k] + weight) % DTRAIN__TILING_PRIME;
    }
    return DTRAIN_OK;
}

/* Begins the check of a tensor, or of a region of it. */
static void dtrain__tiling_begin(dtrain__tiling *tiling, const dtrain__region *whole)
{
    memset(tiling, 0, sizeof *tiling);
    if (dtrain__os_random(tiling->seed, sizeof tiling->seed) != 0)
        tiling->seed[0] = tiling->seed[1] = (uint64_t)dtrain__os_now_ns();
    tiling->seed[1] ^= 0x9e3779b97f4a7c15u;
    if (whole->count > 0)
        dtrain__region_boxes(whole, dtrain__tiling_weigh, tiling);
    memcpy(tiling->whole, tiling->weight, sizeof tiling->whole);
    memset(tiling->weight, 0, sizeof tiling->weight);
}

static void dtrain__tiling_add(dtrain__tiling *tiling, const dtrain__region *region)
{
    if (region->count > 0)
        dtrain__region_boxes(region, dtrain__tiling_weigh, tiling);
    tiling->count = region->count <= SIZE_MAX - tiling->count ? tiling->count + region->count : SIZE_MAX;
}

static int dtrain__tiling_whole(const dtrain__tiling *tiling)
{
    return tiling->weight[0] == tiling->whole[0] && tiling->weight[1] == tiling->whole[1];
}

/* ---- the plan ---- */

/* Compares names with their suffixes, byte by byte. */
static int dtrain__piece_compare_names(const dtrain_piece *a, const dtrain_piece *b)
{
    const char *parts[2][2] = {{a->name, a->suffix != NULL ? a->suffix : ""},
                               {b->name, b->suffix != NULL ? b->suffix : ""}};
    int part[2] = {0, 0};
    for (;;) {
        for (int k = 0; k < 2; k++)
            if (*parts[k][part[k]] == '\0' && part[k] == 0)
                part[k] = 1;
        int x = (unsigned char)*parts[0][part[0]], y = (unsigned char)*parts[1][part[1]];
        if (x != y || x == 0)
            return x - y;
        parts[0][part[0]]++;
        parts[1][part[1]]++;
    }
}

static int dtrain__piece_same_tensor(const dtrain_piece *a, const dtrain_piece *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0;
}

/* The name in full, cut where it is long, for texts. */
static const char *dtrain__piece_name(char out[160], const dtrain_piece *piece)
{
    snprintf(out, 160, "%.120s%s", piece->name != NULL ? piece->name : "(no name)",
             piece->suffix != NULL ? piece->suffix : "");
    return out;
}

static dtrain_status dtrain__piece_check(dtrain__region *region, const dtrain_piece *piece, size_t index,
                                         const char *call)
{
    char name[160];
    if (piece->name == NULL || piece->name[0] == '\0')
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: piece %zu has no name: give it its tensor's", call, index);
    const char *bad = dtrain__region_of(region, piece);
    if (bad != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: piece %zu, of \"%s\": %s", call, index,
                            dtrain__piece_name(name, piece), bad);
    return DTRAIN_OK;
}

/* Orders regions of one tensor; 0: they are the same. */
static int dtrain__region_compare(const dtrain__region *a, const dtrain__region *b)
{
    for (int d = 0; d < a->ndim; d++) {
        if (a->begin[d] != b->begin[d])
            return a->begin[d] < b->begin[d] ? -1 : 1;
        if (a->size[d] != b->size[d])
            return a->size[d] < b->size[d] ? -1 : 1;
    }
    if (a->at != b->at)
        return a->at < b->at ? -1 : 1;
    return a->count < b->count ? -1 : a->count > b->count;
}

static int dtrain__reshard_by_region(const void *left, const void *right)
{
    const dtrain_piece *a = *(const dtrain_piece *const *)left, *b = *(const dtrain_piece *const *)right;
    dtrain__region x, y;
    int order = dtrain__piece_compare_names(a, b);
    if (order != 0 || a->ndim != b->ndim)
        return order != 0 ? order : a->ndim - b->ndim;
    dtrain__region_of(&x, a);
    dtrain__region_of(&y, b);
    order = dtrain__region_compare(&x, &y);
    return order != 0 ? order : a < b ? -1 : a > b;
}

static int dtrain__reshard_by_element(const void *left, const void *right)
{
    const dtrain_reshard_copy *a = (const dtrain_reshard_copy *)left, *b = (const dtrain_reshard_copy *)right;
    return a->to_begin < b->to_begin ? -1 : a->to_begin > b->to_begin;
}

typedef struct dtrain__reshard {
    const dtrain_piece *have, *want;
    const dtrain_piece **sorted; /* what exists, by name and region, copies left out */
    size_t sorted_count;
    dtrain_reshard_copy *copies;
    size_t capacity, count;
} dtrain__reshard;

static dtrain_status dtrain__reshard_sort(dtrain__reshard *plan, size_t have_count)
{
    dtrain__region region, before;
    size_t used = 0;
    for (size_t i = 0; i < have_count; i++) {
        dtrain_status status = dtrain__piece_check(&region, &plan->have[i], i, "dtrain_reshard_plan, of what exists");
        if (status != DTRAIN_OK)
            return status;
        if (!plan->have[i].unsaved)
            plan->sorted[used++] = &plan->have[i];
    }
    if (used > 0)
        qsort(plan->sorted, used, sizeof *plan->sorted, dtrain__reshard_by_region);
    for (size_t i = 0; i < used; i++) {
        const dtrain_piece *piece = plan->sorted[i],
                           *last = plan->sorted_count > 0 ? plan->sorted[plan->sorted_count - 1] : NULL;
        dtrain__region_of(&region, piece);
        if (last != NULL && piece->copies > 1 && last->copies > 1 && dtrain__piece_compare_names(piece, last) == 0 &&
            dtrain__piece_same_tensor(piece, last)) {
            dtrain__region_of(&before, last);
            if (dtrain__region_compare(&region, &before) == 0)
                continue;
        }
        plan->sorted[plan->sorted_count++] = piece;
    }
    return DTRAIN_OK;
}

/* The first piece of a wanted one's tensor. */
static size_t dtrain__reshard_find(const dtrain__reshard *plan, const dtrain_piece *want)
{
    size_t low = 0, high = plan->sorted_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (dtrain__piece_compare_names(plan->sorted[middle], want) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Lists what one wanted piece gets. */
static dtrain_status dtrain__reshard_piece(dtrain__reshard *plan, const dtrain_piece *want, const dtrain__region *to)
{
    size_t first = plan->count;
    char name[160];
    dtrain__tiling tiling;
    dtrain__tiling_begin(&tiling, to);
    for (size_t i = dtrain__reshard_find(plan, want);
         i < plan->sorted_count && dtrain__piece_compare_names(plan->sorted[i], want) == 0; i++) {
        const dtrain_piece *have = plan->sorted[i];
        dtrain__region from;
        dtrain__overlap overlap;
        dtrain__overlap_run run;
        if (!dtrain__piece_same_tensor(have, want))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "dtrain_reshard_plan: \"%s\" is wanted with another shape or dtype than it has",
                                dtrain__piece_name(name, want));
        dtrain__region_of(&from, have);
        if (!dtrain__overlap_begin(&overlap, &from, to))
            continue;
        overlap.both.count = dtrain__overlap_count(&overlap);
        dtrain__tiling_add(&tiling, &overlap.both);
        for (; dtrain__overlap_next(&overlap, &run); plan->count++)
            if (plan->count < plan->capacity) {
                dtrain_reshard_copy copy = {(size_t)(have - plan->have), (size_t)(want - plan->want), run.from_begin,
                                            run.to_begin, run.count};
                plan->copies[plan->count] = copy;
            }
    }
    if (!dtrain__tiling_whole(&tiling))
        return dtrain__fail(
            NULL, tiling.count > want->count ? DTRAIN_ERR_INVALID : DTRAIN_ERR_MISMATCH,
            "dtrain_reshard_plan: %zu elements of \"%s\" are wanted, and the pieces that exist have %zu "
            "of them: each must be in exactly one, or in copies of one",
            want->count, dtrain__piece_name(name, want), tiling.count);
    if (plan->count <= plan->capacity && plan->count > first)
        qsort(plan->copies + first, plan->count - first, sizeof *plan->copies, dtrain__reshard_by_element);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_reshard_plan(const dtrain_piece *have, size_t have_count, const dtrain_piece *want,
                                             size_t want_count, dtrain_reshard_copy *copies, size_t capacity,
                                             size_t *count)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain__reshard plan;
    dtrain__region to;
    size_t bytes;
    memset(&plan, 0, sizeof plan);
    if ((have == NULL && have_count > 0) || (want == NULL && want_count > 0) || count == NULL ||
        (copies == NULL && capacity > 0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_reshard_plan: an array or count is NULL");
    plan.have = have;
    plan.want = want;
    plan.copies = copies;
    plan.capacity = capacity;
    if (dtrain__mul_size(have_count, sizeof *plan.sorted, &bytes))
        plan.sorted = (const dtrain_piece **)dtrain__alloc(&heap, bytes);
    if (plan.sorted == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_reshard_plan: no memory for %zu pieces", have_count);
    dtrain_status status = dtrain__reshard_sort(&plan, have_count);
    for (size_t i = 0; i < want_count && status == DTRAIN_OK; i++) {
        status = dtrain__piece_check(&to, &want[i], i, "dtrain_reshard_plan, of what is wanted");
        if (status == DTRAIN_OK && want[i].count > 0)
            status = dtrain__reshard_piece(&plan, &want[i], &to);
    }
    dtrain__free(&heap, (void *)plan.sorted, bytes);
    *count = plan.count;
    return status;
}

#endif
