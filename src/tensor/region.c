/* ---- >>region ----
 * Arithmetic of pieces: what a piece has of its tensor, which elements two pieces share, and whether pieces tile a
 * tensor.
 *
 * A region is a range of a box, counted row by row. Its elements come in the order of the tensor. So what two regions
 * share is found by walking the box that their boxes share, run by run. A run is a range of elements that are
 * neighbours in the tensor, and so in both regions. */
#ifndef DTRAIN__REGION
#define DTRAIN__REGION
#include "pieces.c"
#include "../base/xxh64.c"
#include "../base/memory.c"
#include "../base/random.c"
DTRAIN__FAST_BEGIN

typedef struct dtrain__region {
    int ndim;
    size_t shape[DTRAIN_MAX_DIMS], stride[DTRAIN_MAX_DIMS]; /* of the tensor */
    size_t begin[DTRAIN_MAX_DIMS], size[DTRAIN_MAX_DIMS];   /* of the box */
    size_t at, count;                                       /* range in the box */
    size_t run;                                             /* elements of the box that are neighbours in the tensor */
} dtrain__region;

/* Derives stride and run. The shape's elements must not overflow, and the box must be inside it. */
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
        return "its dtype has no whole number of bytes";
    region->ndim = piece->ndim;
    for (int d = 0; d < piece->ndim; d++) {
        region->shape[d] = piece->shape[d];
        region->begin[d] = piece->boxed ? piece->box_begin[d] : 0;
        region->size[d] = piece->boxed ? piece->box_size[d] : piece->shape[d];
        if (region->begin[d] > region->shape[d] || region->size[d] > region->shape[d] - region->begin[d])
            return "its box reaches beyond the shape";
        if (!dtrain__mul_size(elements, region->shape[d], &elements))
            return "its shape has more elements than memory";
    }
    if (!dtrain__mul_size(elements, dtrain_dtype_bits(piece->dtype), &bits))
        return "its shape has more elements than memory";
    elements = dtrain__pieces_product(region->size, 0, region->ndim);
    if (piece->begin > elements || piece->count > elements - piece->begin)
        return "its range reaches beyond the box";
    if (piece->copies < 0 || piece->copy < 0 || piece->copy >= (piece->copies > 0 ? piece->copies : 1))
        return "copy is not from 0 to copies - 1";
    region->at = piece->begin;
    region->count = piece->count;
    dtrain__region_settle(region);
    return NULL;
}

/* Returns the place in the tensor of element e of the box. */
static size_t dtrain__region_place(const dtrain__region *region, size_t e)
{
    size_t place = 0;
    for (int d = region->ndim - 1; d >= 0; d--) {
        place += (region->begin[d] + e % region->size[d]) * region->stride[d];
        e /= region->size[d];
    }
    return place;
}

/* Returns the first element of the box whose place in the tensor is at or after `place`. */
static size_t dtrain__region_seek(const dtrain__region *region, size_t place)
{
    size_t e = region->ndim == 0 ? place : 0; /* a scalar: 0, or its end */
    for (int d = 0; d < region->ndim; d++) {
        size_t index = place / region->stride[d];
        place %= region->stride[d];
        if (index < region->begin[d])
            return e * dtrain__pieces_product(region->size, d, region->ndim);
        if (index - region->begin[d] >= region->size[d])
            return (e + 1) * dtrain__pieces_product(region->size, d, region->ndim);
        e = e * region->size[d] + (index - region->begin[d]);
    }
    return e;
}

/* Walks what two regions of one tensor share, run by run. */
typedef struct dtrain__region_overlap {
    const dtrain__region *from, *to;
    dtrain__region both; /* at: the next element */
    size_t end;
} dtrain__region_overlap;

/* Elements [from_begin, from_begin + count) of one region are [to_begin, ...) of the other. */
typedef struct dtrain__region_overlap_run {
    size_t from_begin, to_begin, count;
} dtrain__region_overlap_run;

/* Begins a walk. Returns 0 if they share nothing. */
static int dtrain__region_overlap_begin(dtrain__region_overlap *overlap, const dtrain__region *from,
                                        const dtrain__region *to)
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
static int dtrain__region_overlap_next(dtrain__region_overlap *overlap, dtrain__region_overlap_run *run)
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

/* Returns the number of elements that they share. The overlap must be at its beginning. */
static size_t dtrain__region_overlap_count(const dtrain__region_overlap *overlap)
{
    return overlap->end - overlap->both.at;
}

/* ---- boxes of a range ---- */

typedef dtrain_status (*dtrain__region_visit)(void *user, const dtrain__region *box);

/* Calls visit with the boxes that a region consists of, at most 2 * ndim - 1, in the order of its elements. Dimensions
 * before d are one index wide; low and high count in those from d on. Recurses at most ndim deep. */
static dtrain_status dtrain__region_boxes_from(dtrain__region *box, int d, size_t low, size_t high,
                                               dtrain__region_visit visit, void *user)
{
    size_t all = dtrain__pieces_product(box->size, d, box->ndim);
    dtrain_status status = DTRAIN_OK;
    if (low >= high)
        return DTRAIN_OK;
    if (low == 0 && high == all)
        return visit(user, box);
    size_t inner = all / box->size[d], begin = box->begin[d], size = box->size[d];
    size_t first = (low + inner - 1) / inner, last = high / inner; /* whole indices: first up to last */
    box->size[d] = 1;
    if (low % inner != 0) { /* the rest of one index, which may also end the range */
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
 * Checks that regions hold every element of their tensor once. Every index of every dimension gets a random weight
 * modulo a prime. A box weighs the product of its sides' sums, and a set of boxes weighs what its elements weigh
 * together. Regions that tile the tensor weigh what it weighs. Others pass only by chance (Schwartz and Zippel), in
 * both of two rounds at most once in 2^55. This takes time linear in the number of regions, whatever their form;
 * comparing pairs does not. The code draws the running sums of weights at random, which is equivalent. */

#define DTRAIN__REGION_TILING_PRIME 0x7fffffffu /* 2^31 - 1 */

typedef struct dtrain__region_tiling {
    uint64_t seed[2];
    uint64_t weight[2], whole[2];
    size_t count; /* elements of all regions, for the error text */
} dtrain__region_tiling;

/* Returns the sum of the weights of indices below `index`. */
static uint64_t dtrain__region_tiling_sum(uint64_t seed, int d, size_t index)
{
    return index == 0 ? 0 : dtrain_random_u64(seed + (uint64_t)d, index) % DTRAIN__REGION_TILING_PRIME;
}

static dtrain_status dtrain__region_tiling_weigh(void *user, const dtrain__region *box)
{
    dtrain__region_tiling *tiling = (dtrain__region_tiling *)user;
    for (int k = 0; k < 2; k++) {
        uint64_t weight = 1;
        for (int d = 0; d < box->ndim; d++) {
            uint64_t below = dtrain__region_tiling_sum(tiling->seed[k], d, box->begin[d]);
            uint64_t upto = dtrain__region_tiling_sum(tiling->seed[k], d, box->begin[d] + box->size[d]);
            weight = weight * ((upto + DTRAIN__REGION_TILING_PRIME - below) % DTRAIN__REGION_TILING_PRIME) %
                     DTRAIN__REGION_TILING_PRIME;
        }
        tiling->weight[k] = (tiling->weight[k] + weight) % DTRAIN__REGION_TILING_PRIME;
    }
    return DTRAIN_OK;
}

/* Begins the check of a tensor, or of a region of it. */
static void dtrain__region_tiling_begin(dtrain__region_tiling *tiling, const dtrain__region *whole)
{
    memset(tiling, 0, sizeof *tiling);
    if (dtrain__os_random(tiling->seed, sizeof tiling->seed) != 0)
        tiling->seed[0] = tiling->seed[1] = (uint64_t)dtrain__os_now_ns();
    tiling->seed[1] ^= 0x9e3779b97f4a7c15u;
    if (whole->count > 0)
        dtrain__region_boxes(whole, dtrain__region_tiling_weigh, tiling);
    memcpy(tiling->whole, tiling->weight, sizeof tiling->whole);
    memset(tiling->weight, 0, sizeof tiling->weight);
}

static void dtrain__region_tiling_add(dtrain__region_tiling *tiling, const dtrain__region *region)
{
    if (region->count > 0)
        dtrain__region_boxes(region, dtrain__region_tiling_weigh, tiling);
    tiling->count = region->count <= SIZE_MAX - tiling->count ? tiling->count + region->count : SIZE_MAX;
}

static int dtrain__region_tiling_whole(const dtrain__region_tiling *tiling)
{
    return tiling->weight[0] == tiling->whole[0] && tiling->weight[1] == tiling->whole[1];
}

/* ---- pieces ---- */

/* Compares the names of two pieces with their suffixes, byte by byte; also for qsort. */
static int dtrain__region_compare_names(const void *left, const void *right)
{
    const dtrain_piece *a = (const dtrain_piece *)left, *b = (const dtrain_piece *)right;
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

/* Writes the full name, cut if it is long, for texts. */
static const char *dtrain__region_name(char out[160], const dtrain_piece *piece)
{
    snprintf(out, 160, "%.120s%s", piece->name != NULL ? piece->name : "(no name)",
             piece->suffix != NULL ? piece->suffix : "");
    return out;
}

static dtrain_status dtrain__region_check(dtrain__region *region, const dtrain_piece *piece, size_t index,
                                          const char *call)
{
    char name[160];
    if (piece->name == NULL || piece->name[0] == '\0')
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: piece %zu has no name: give it its tensor's", call, index);
    const char *bad = dtrain__region_of(region, piece);
    if (bad != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: piece %zu, of \"%s\": %s", call, index,
                            dtrain__region_name(name, piece), bad);
    return DTRAIN_OK;
}

/* Orders regions of one tensor; 0: they are equal. */
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

DTRAIN__FAST_END
#endif
