/* ---- >>topk ----
 * The k elements of largest magnitude. Elements are ordered by a key: their bits without the sign, and one key above
 * infinity for all NaNs. So the order is that of integers, and the same everywhere.
 *
 * A sample of the keys gives a bar that a few more than k elements should reach. One pass over the data collects those;
 * it can also add a vector to the data. A radix search among them finds the k-th. If the sample was misleading, a
 * histogram of the upper bits of all keys gives the bar. Both ways give the same result. */
#ifndef DTRAIN__TOPK
#define DTRAIN__TOPK
#include "compress.h"
#include "../base/memory.c"
#include "../tensor/isa.c"
DTRAIN__FAST_BEGIN

/* Some elements of a vector, in ascending order of index. Before its first use all but the allocator is zero. Calls
 * that fill it grow its arrays, which it keeps. */
typedef struct dtrain__sparse {
    uint32_t *indices; /* ascending, none twice, below original_count */
    float *values;
    size_t count;
    size_t original_count;       /* elements of the whole vector */
    size_t capacity;             /* of the arrays */
    dtrain_allocator *allocator; /* NULL: the C library */
} dtrain__sparse;

#define DTRAIN__TOPK_BLOCK ((size_t)1024)      /* elements collected at once, and room beyond the last in arrays */
#define DTRAIN__TOPK_SAMPLE ((size_t)32768)    /* keys of the largest sample */
#define DTRAIN__TOPK_SAMPLED ((size_t)1 << 16) /* smaller vectors are not sampled */
#define DTRAIN__TOPK_BINS 2048
#define DTRAIN__TOPK_KEY_BITS 31
#define DTRAIN__TOPK_NEAR_BITS 20      /* an eighth of a power of two above a bar */
#define DTRAIN__TOPK_NEVER 0x80000000u /* a bar above every key */
#define DTRAIN__TOPK_KEY_NAN 0x7f800001u

/* Lists the elements of a block whose key is at least the bar, and returns how many. If sum is not NULL, it is data,
 * and add is added to it first. count is at most DTRAIN__TOPK_BLOCK; indices and values have room for all. */
typedef size_t (*dtrain__topk_block)(const float *data, float *sum, const float *add, size_t count, uint32_t bar,
                                     uint32_t first, uint32_t *indices, float *values);

static uint32_t dtrain__topk_bits(const float *from)
{
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    return bits & 0x7fffffffu;
}

static uint32_t dtrain__topk_key(const float *from)
{
    uint32_t bits = dtrain__topk_bits(from);
    return bits < DTRAIN__TOPK_KEY_NAN ? bits : DTRAIN__TOPK_KEY_NAN;
}

DTRAIN__EXACT_BEGIN

static size_t dtrain__topk_block_scalar(const float *data, float *sum, const float *add, size_t count, uint32_t bar,
                                        uint32_t first, uint32_t *indices, float *values)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        if (sum != NULL)
            sum[i] = sum[i] + add[i];
        if (dtrain__topk_bits(data + i) < bar)
            continue;
        indices[found] = first + (uint32_t)i;
        values[found++] = data[i];
    }
    return found;
}

#if defined(DTRAIN__X86) || defined(DTRAIN__NEON)
/* A form for vectors of `width` numbers; the scalar form does the rest of a block. */
#define DTRAIN__TOPK_BLOCK_OF(isa, target, width, op, list) \
    target static size_t dtrain__topk_block_##isa(const float *data, float *sum, const float *add, size_t count, \
                                                  uint32_t bar, uint32_t first, uint32_t *indices, float *values) \
    { \
        size_t found = 0, i = 0; \
        for (; count - i >= width; i += width) { \
            if (sum != NULL) \
                op##_storeu_ps(sum + i, op##_loadu_ps(sum + i) + op##_loadu_ps(add + i)); \
            list \
        } \
        return found + dtrain__topk_block_scalar(data + i, sum != NULL ? sum + i : NULL, sum != NULL ? add + i : NULL, \
                                                 count - i, bar, first + (uint32_t)i, indices + found, \
                                                 values + found); \
    }

/* mask: one of `bits` bits for each number that passes. */
#define DTRAIN__TOPK_LIST(mask, bits) \
    for (uint64_t left = (mask); left != 0; left &= left - 1) { \
        unsigned lane = (unsigned)__builtin_ctzll(left) / bits; \
        indices[found] = first + (uint32_t)i + lane; \
        values[found++] = data[i + lane]; \
    }
#endif

#if defined(DTRAIN__X86)
/* Keys are not negative, so that a signed "greater than bar - 1" serves. It holds for DTRAIN__TOPK_NEVER, too. */
#define DTRAIN__TOPK_PASS_sse2 \
    __m128i keys = \
        _mm_and_si128(_mm_loadu_si128((const __m128i *)(const void *)(data + i)), _mm_set1_epi32(0x7fffffff)); \
    DTRAIN__TOPK_LIST( \
        (unsigned)_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(keys, _mm_set1_epi32((int)(bar - 1))))), 1)
#define DTRAIN__TOPK_PASS_avx2 \
    __m256i keys = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(data + i)), \
                                    _mm256_set1_epi32(0x7fffffff)); \
    DTRAIN__TOPK_LIST((unsigned)_mm256_movemask_ps( \
                          _mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, _mm256_set1_epi32((int)(bar - 1))))), \
                      1)
#define DTRAIN__TOPK_PASS_avx512 \
    __m512i bits = _mm512_loadu_si512((const void *)(data + i)); \
    __mmask16 mask = \
        _mm512_cmpge_epu32_mask(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32((int)bar)); \
    if (mask != 0) { \
        __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); \
        __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(first + (uint32_t)i))); \
        _mm512_storeu_si512((void *)(indices + found), _mm512_maskz_compress_epi32(mask, at)); \
        _mm512_storeu_si512((void *)(values + found), _mm512_maskz_compress_epi32(mask, bits)); \
        found += (size_t)__builtin_popcount(mask); \
    }

DTRAIN__TOPK_BLOCK_OF(sse2, , 4, _mm, DTRAIN__TOPK_PASS_sse2)
DTRAIN__TOPK_BLOCK_OF(avx2, __attribute__((target("avx2"))), 8, _mm256, DTRAIN__TOPK_PASS_avx2)
DTRAIN__TOPK_BLOCK_OF(avx512, __attribute__((target("avx512f"))), 16, _mm512, DTRAIN__TOPK_PASS_avx512)
#elif defined(DTRAIN__NEON)
#define DTRAIN__TOPK_PASS_neon \
    uint32x4_t keys = vreinterpretq_u32_u8(vld1q_u8((const unsigned char *)(data + i))); \
    uint16x4_t pass = vmovn_u32(vcgeq_u32(vandq_u32(keys, vdupq_n_u32(0x7fffffff)), vdupq_n_u32(bar))); \
    DTRAIN__TOPK_LIST(vget_lane_u64(vreinterpret_u64_u16(pass), 0) & UINT64_C(0x0001000100010001), 16)
DTRAIN__TOPK_BLOCK_OF(neon, , 4, dtrain__x4, DTRAIN__TOPK_PASS_neon)
#endif

DTRAIN__EXACT_END

static dtrain__topk_block dtrain__topk_block_get(void)
{
    switch (dtrain__isa()) {
#if defined(DTRAIN__X86)
    case DTRAIN__ISA_SSE2: return dtrain__topk_block_sse2;
    case DTRAIN__ISA_AVX2: return dtrain__topk_block_avx2;
    case DTRAIN__ISA_AVX512: return dtrain__topk_block_avx512;
#elif defined(DTRAIN__NEON)
    case DTRAIN__ISA_NEON:
    case DTRAIN__ISA_NEON_BF16: return dtrain__topk_block_neon;
#endif
    default: return dtrain__topk_block_scalar;
    }
}

static dtrain_allocator *dtrain__topk_allocator(const dtrain__sparse *sparse, dtrain_allocator *heap)
{
    memset(heap, 0, sizeof *heap);
    return sparse->allocator != NULL ? sparse->allocator : heap;
}

/* Makes room for count elements, and for what a vector store writes beyond them. It grows by half more than needed,
 * because counts vary a little from step to step. The arrays are one block, and lose their contents. */
static dtrain_status dtrain__topk_reserve(dtrain__sparse *sparse, size_t count)
{
    dtrain_allocator heap;
    size_t capacity, bytes;
    uint32_t *block = NULL;
    sparse->count = 0;
    if (sparse->capacity > 0 && sparse->capacity - DTRAIN__TOPK_BLOCK >= count)
        return DTRAIN_OK;
    if (dtrain__add_size(count, count / 2 + 256 + DTRAIN__TOPK_BLOCK, &capacity) &&
        dtrain__mul_size(capacity, 2 * sizeof(float), &bytes))
        block = (uint32_t *)dtrain__memory_room(dtrain__topk_allocator(sparse, &heap), sparse->indices, bytes);
    if (block == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "sparse: no memory for %zu elements", count);
    sparse->indices = block;
    sparse->values = (float *)(void *)(block + capacity);
    sparse->capacity = capacity;
    return DTRAIN_OK;
}

static void dtrain__sparse_destroy(dtrain__sparse *sparse)
{
    dtrain_allocator heap;
    dtrain__free(dtrain__topk_allocator(sparse, &heap), sparse->indices);
    memset(sparse, 0, sizeof *sparse);
}

/* ceil(count * mantissa / 2^shift), mantissa below 2^53, from the 128 bits of the product. */
static uint64_t dtrain__topk_ceil(uint64_t count, uint64_t mantissa, int shift)
{
    uint64_t low = (count & 0xffffffffu) * (mantissa & 0xffffffffu), middle = (count >> 32) * (mantissa & 0xffffffffu);
    uint64_t other = (count & 0xffffffffu) * (mantissa >> 32), high = (count >> 32) * (mantissa >> 32);
    uint64_t carry = (low >> 32) + (middle & 0xffffffffu) + (other & 0xffffffffu);
    high += (middle >> 32) + (other >> 32) + (carry >> 32);
    low = carry << 32 | (low & 0xffffffffu);
    if (shift > 117)
        return 1;
    if (shift >= 64)
        return (high >> (shift - 64)) + ((high & (((uint64_t)1 << (shift - 64)) - 1)) != 0 || low != 0);
    return (high << (64 - shift)) + (low >> shift) + ((low & (((uint64_t)1 << shift) - 1)) != 0);
}

DTRAIN_API size_t dtrain_topk_count(size_t count, double ratio)
{
    uint64_t bits, mantissa;
    int exponent;
    memcpy(&bits, &ratio, sizeof bits);
    exponent = (int)(bits >> 52 & 0x7ff);
    mantissa = bits & 0xfffffffffffffu;
    if (count == 0)
        return 0;
    if (bits >> 63 || (exponent == 0x7ff && mantissa != 0) || bits == 0)
        return 1;
    if (exponent >= 1023)
        return count;
    /* The ratio is mantissa / 2^shift. */
    int shift = exponent > 0 ? 1075 - exponent : 1074;
    uint64_t k = dtrain__topk_ceil(count, exponent > 0 ? mantissa | (uint64_t)1 << 52 : mantissa, shift);
    return k > 0 ? (size_t)k : 1;
}

DTRAIN__EXACT_BEGIN

/* Returns the ratio of a step, counted from 0; the same bits on every machine.
 *
 *   source   Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018 */
static double dtrain__topk_ratio(const dtrain_topk_schedule *schedule, uint64_t step)
{
    double ratio = schedule->first_ratio > 0.0 ? schedule->first_ratio : 0.25;
    double factor = schedule->factor > 0.0 && schedule->factor < 1.0 ? schedule->factor : 0.25;
    uint64_t stage = schedule->stage_steps > 0 ? step / schedule->stage_steps : UINT64_MAX;
    for (uint64_t i = 0; i < stage && ratio > schedule->ratio; i++)
        ratio = ratio * factor;
    return schedule->stage_steps > 0 && ratio > schedule->ratio ? ratio : schedule->ratio;
}

DTRAIN__EXACT_END

/* A search for the k-th largest key by its bits, from the top: 11, 10 and 10 of them. If a base is known that no key is
 * below, it looks at what keys are above that, and takes more than `most` for `most`. */
typedef struct dtrain__topk_search {
    uint32_t base, most;
    uint32_t prefix; /* its bits found so far */
    int shift;       /* how many are not found yet */
    size_t left;     /* its place among the keys with this prefix: 1 is the largest */
    size_t equal;    /* how many keys have this prefix */
} dtrain__topk_search;

/* Finds the next bits of the key. Two tables take turns: equal neighbours would wait for each other's increment. Keys
 * with another prefix are counted in a bin that no other key has then, as a branch would often be guessed wrong. */
static void dtrain__topk_narrow(dtrain__topk_search *search, const float *data, size_t count)
{
    uint32_t bins[2][DTRAIN__TOPK_BINS];
    int known = search->shift, shift = known == DTRAIN__TOPK_KEY_BITS ? 20 : known - 10;
    uint32_t mask = known == DTRAIN__TOPK_KEY_BITS ? 2047 : 1023, bin = mask;
    memset(bins, 0, sizeof bins);
    for (size_t i = 0; i < count; i++) {
        uint32_t above = dtrain__topk_key(data + i) - search->base, key = above < search->most ? above : search->most;
        uint32_t other = 0u - (uint32_t)(key >> known != search->prefix);
        bins[i & 1][(key >> shift & mask) | (other & (DTRAIN__TOPK_BINS - 1))]++;
    }
    size_t here = (size_t)bins[0][bin] + bins[1][bin];
    while (here < search->left) {
        search->left -= here;
        bin--;
        here = (size_t)bins[0][bin] + bins[1][bin];
    }
    search->prefix = known == DTRAIN__TOPK_KEY_BITS ? bin : search->prefix << 10 | bin;
    search->shift = shift;
    search->equal = here;
}

static dtrain__topk_search dtrain__topk_begin(size_t k, uint32_t base, int bits)
{
    dtrain__topk_search search;
    memset(&search, 0, sizeof search);
    search.base = base;
    search.most = ((uint32_t)1 << bits) - 1;
    search.shift = bits;
    search.left = k;
    return search;
}

/* Finds the k-th largest of count keys, 1 <= k <= count. bits: how many of them are looked at. */
static dtrain__topk_search dtrain__topk_find(const float *data, size_t count, size_t k, uint32_t base, int bits)
{
    dtrain__topk_search search = dtrain__topk_begin(k, base, bits);
    while (search.shift > 0)
        dtrain__topk_narrow(&search, data, count);
    search.prefix += base;
    return search;
}

/* Keeps the k largest of the collected elements: those above the k-th key, and the first of those equal to it. No key
 * is below the bar, and the k-th is seldom far above. */
static void dtrain__topk_keep(dtrain__sparse *sparse, size_t k, uint32_t bar)
{
    if (sparse->count == k)
        return;
    dtrain__topk_search search = dtrain__topk_find(sparse->values, sparse->count, k, bar, DTRAIN__TOPK_NEAR_BITS);
    if (search.prefix == bar + search.most)
        search = dtrain__topk_find(sparse->values, sparse->count, k, 0, DTRAIN__TOPK_KEY_BITS);
    size_t kept = 0, ties = search.left;
    for (size_t i = 0; i < sparse->count; i++) {
        uint32_t key = dtrain__topk_key(sparse->values + i), index = sparse->indices[i];
        float value = sparse->values[i];
        size_t tie = key == search.prefix && ties > 0;
        sparse->indices[kept] = index;
        sparse->values[kept] = value;
        kept += (size_t)(key > search.prefix) | tie;
        ties -= tie;
    }
    sparse->count = kept;
}

/* What a selection reads: data. If sum is not NULL, it is data, and the first pass adds add to it. */
typedef struct dtrain__topk_source {
    const float *data;
    float *sum;
    const float *add;
    size_t count, k;
} dtrain__topk_source;

/* Collects every element whose key is at least the bar. Returns 0 if they do not fit; the sum is complete all the same.
 */
static int dtrain__topk_collect(dtrain__topk_source *from, uint32_t bar, dtrain__sparse *sparse)
{
    dtrain__topk_block block = dtrain__topk_block_get();
    uint64_t mode = dtrain__fpmode_enter();
    int fits = 1;
    sparse->count = 0;
    for (size_t at = 0; at < from->count && (fits || from->sum != NULL); at += DTRAIN__TOPK_BLOCK) {
        size_t n = from->count - at < DTRAIN__TOPK_BLOCK ? from->count - at : DTRAIN__TOPK_BLOCK;
        sparse->count += block(from->data + at, from->sum != NULL ? from->sum + at : NULL,
                               from->sum != NULL ? from->add + at : NULL, n, fits ? bar : DTRAIN__TOPK_NEVER,
                               (uint32_t)at, sparse->indices + sparse->count, sparse->values + sparse->count);
        fits = fits && sparse->count <= sparse->capacity - DTRAIN__TOPK_BLOCK;
        if (!fits)
            sparse->count = 0;
    }
    from->sum = NULL; /* added once */
    dtrain__fpmode_restore(mode);
    return fits;
}

/* Collects the k elements that a finished search found. Many may equal the k-th. */
static void dtrain__topk_exactly(const dtrain__topk_source *from, const dtrain__topk_search *search,
                                 dtrain__sparse *sparse)
{
    dtrain__topk_block block = dtrain__topk_block_get();
    size_t ties = search->left;
    sparse->count = 0;
    for (size_t at = 0; at < from->count; at += DTRAIN__TOPK_BLOCK) {
        size_t n = from->count - at < DTRAIN__TOPK_BLOCK ? from->count - at : DTRAIN__TOPK_BLOCK;
        uint32_t *indices = sparse->indices + sparse->count;
        float *values = sparse->values + sparse->count;
        size_t found =
                   block(from->data + at, NULL, NULL, n, search->prefix + (ties == 0), (uint32_t)at, indices, values),
               kept = 0;
        for (size_t i = 0; i < found; i++) {
            int tie = dtrain__topk_key(values + i) == search->prefix;
            if (tie && ties == 0)
                continue;
            ties -= (size_t)tie;
            indices[kept] = indices[i];
            values[kept++] = values[i];
        }
        sparse->count += kept;
    }
}

static size_t dtrain__topk_root(size_t square)
{
    size_t root = 0;
    while ((root + 1) * (root + 1) <= square)
        root++;
    return root;
}

/* Returns a bar that a few more than k elements should reach: the key at a place in a sample, 4 standard deviations
 * below that of k. The sample has one element of each of equal pieces, at a pseudorandom place, so that patterns in the
 * data do no harm. It is written to values. */
static uint32_t dtrain__topk_guess(const dtrain__topk_source *from, float *values, size_t sample)
{
    uint64_t mode = dtrain__fpmode_enter();
    size_t piece = from->count / sample, expected = (size_t)((uint64_t)from->k * sample / from->count);
    uint32_t state = 1;
    for (size_t i = 0; i < sample; i++) {
        state = state * 1664525u + 1013904223u;
        size_t at = i * piece + (size_t)((uint64_t)state * piece >> 32);
        values[i] = from->data[at];
        if (from->sum != NULL)
            values[i] += from->add[at];
    }
    dtrain__fpmode_restore(mode);
    size_t place = expected + 4 * dtrain__topk_root(expected) + 8;
    return dtrain__topk_find(values, sample, place < sample ? place : sample, 0, DTRAIN__TOPK_KEY_BITS).prefix;
}

/* Selects by a histogram of the upper bits of all keys, which always works. If too many keys share those bits, it finds
 * the k-th key exactly. */
static void dtrain__topk_surely(dtrain__topk_source *from, dtrain__sparse *sparse)
{
    dtrain__topk_search search = dtrain__topk_begin(from->k, 0, DTRAIN__TOPK_KEY_BITS);
    if (from->sum != NULL)
        dtrain__topk_collect(from, DTRAIN__TOPK_NEVER, sparse);
    dtrain__topk_narrow(&search, from->data, from->count);
    size_t passing = from->k - search.left + search.equal;
    if (passing <= sparse->capacity - DTRAIN__TOPK_BLOCK) {
        uint32_t bar = search.prefix << search.shift;
        dtrain__topk_collect(from, bar, sparse);
        dtrain__topk_keep(sparse, from->k, bar);
        return;
    }
    while (search.shift > 0)
        dtrain__topk_narrow(&search, from->data, from->count);
    dtrain__topk_exactly(from, &search, sparse);
}

/* Returns how many elements a selection of k of n needs room for. */
static size_t dtrain__topk_room(size_t n, size_t k)
{
    size_t room = n / 64 + k + k / 2;
    return room < n ? room : n;
}

/* Makes room for a selection of at most `room` of `count` elements. */
static dtrain_status dtrain__topk_open(dtrain__sparse *sparse, size_t count, size_t room)
{
    sparse->original_count = count;
    const uint64_t most = UINT32_MAX; /* a constant would have compilers for 32 bits warn */
    if (count > most)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "topk: %zu elements, an index has 32 bits: cut the vector into pieces below 2^32", count);
    return dtrain__topk_reserve(sparse, room);
}

static dtrain_status dtrain__topk_select(dtrain__topk_source *from, dtrain__sparse *sparse)
{
    size_t n = from->count, k = from->k, sample = n / 64 < DTRAIN__TOPK_SAMPLE ? n / 64 : DTRAIN__TOPK_SAMPLE;
    dtrain_status status = dtrain__topk_open(sparse, n, dtrain__topk_room(n, k));
    if (status != DTRAIN_OK)
        return status;
    if (k == 0 || k == n) {
        dtrain__topk_collect(from, k == 0 ? DTRAIN__TOPK_NEVER : 0, sparse);
        return DTRAIN_OK;
    }
    uint32_t bar = n >= DTRAIN__TOPK_SAMPLED && k < n / 2 ? dtrain__topk_guess(from, sparse->values, sample) : 0;
    if (bar > 0 && dtrain__topk_collect(from, bar, sparse) && sparse->count >= k)
        dtrain__topk_keep(sparse, k, bar);
    else
        dtrain__topk_surely(from, sparse);
    return DTRAIN_OK;
}

/* Selects the k elements of largest magnitude, k <= count. NaN and then infinity come before all numbers, and of equal
 * magnitudes the first. It allocates only what sparse lacks. */
static dtrain_status dtrain__topk_pick(const float *data, size_t count, size_t k, dtrain__sparse *sparse)
{
    dtrain__topk_source from = {data, NULL, NULL, count, k};
    return dtrain__topk_select(&from, sparse);
}

/* Adds data to sum and selects from the sum, in one pass. */
static dtrain_status dtrain__topk_add(float *sum, const float *data, size_t count, size_t k, dtrain__sparse *sparse)
{
    dtrain__topk_source from = {sum, sum, data, count, k};
    return dtrain__topk_select(&from, sparse);
}

DTRAIN__FAST_END
#endif
