/* ---- >>test_topk ----
 * Selections against sorting everything, and against counting where that is too much; packed vectors byte by byte and
 * with each of their bytes wrong. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include <float.h>
#include "test.h"

/* By the definition: NaN above infinity above all numbers, by magnitude. */
static uint32_t rank_of(float value)
{
    uint32_t bits = to_bits(value) & 0x7fffffffu;
    return bits > 0x7f800000u ? 0x7f800001u : bits;
}

enum { NOISE, CONSTANT, RISING, FALLING, SUBNORMAL, SPECIAL, SPARSE, FEW, STEPS, KINDS };

static void fill(float *data, size_t n, int kind, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = dtrain_random_u64(seed, i);
        float noise = (float)((int)(bits >> 40) - 8388608) / 8388608.0f;
        switch (kind) {
        case CONSTANT: data[i] = -2.5f; break;
        case RISING: data[i] = (float)i; break;
        case FALLING: data[i] = -(float)(n - i); break;
        case SUBNORMAL: data[i] = from_bits((uint32_t)bits & 0x807fffffu); break;
        case SPECIAL:
            data[i] = bits % 7 == 0   ? from_bits(0x7f800000u | (uint32_t)(bits >> 32 & 0x80000000u))
                      : bits % 7 == 1 ? from_bits(0x7f800001u + (uint32_t)(bits >> 33 & 0x3fffffu))
                                      : noise;
            break;
        case SPARSE: data[i] = bits % 50 == 0 ? noise : from_bits((uint32_t)bits & 0x80000000u); break;
        case STEPS: data[i] = bits % 1000 < 11 ? 100 : bits % 1000 < 14 ? 50 : noise / 1000; break;
        case FEW: data[i] = (float)((int)(bits % 5) - 2); break;
        default: data[i] = noise * noise * noise;
        }
    }
}

static const float *sorting;

static int by_rank(const void *a, const void *b)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    uint32_t x = rank_of(sorting[i]), y = rank_of(sorting[j]);
    return x != y ? (x < y ? 1 : -1) : i < j ? -1 : 1;
}

/* The first k of `order` are chosen, listed in ascending order with the bits of their values. */
static int selected(const dtrain__sparse *sparse, const float *data, size_t n, size_t k, const uint32_t *order)
{
    static unsigned char chosen[1024];
    size_t next = 0;
    memset(chosen, 0, n);
    for (size_t i = 0; i < k; i++)
        chosen[order[i]] = 1;
    if (sparse->count != k || sparse->original_count != n)
        return 0;
    for (size_t i = 0; i < n; i++)
        if (chosen[i] && (sparse->indices[next] != i || to_bits(sparse->values[next++]) != to_bits(data[i])))
            return 0;
    return 1;
}

TEST(every_k_of_every_size_to_1000_is_what_sorting_gives)
{
    static float data[1000];
    static uint32_t order[1000];
    dtrain__sparse sparse;
    memset(&sparse, 0, sizeof sparse);
    for (size_t n = 1; n <= 1000; n++)
        for (int kind = 0; kind < KINDS; kind++) {
            size_t step = n < 40 || (int)(n % KINDS) == kind ? 1 : n / 5;
            fill(data, n, kind, n);
            for (size_t i = 0; i < n; i++)
                order[i] = (uint32_t)i;
            sorting = data;
            qsort(order, n, sizeof order[0], by_rank);
            for (size_t k = 1; k <= n; k += step) {
                if (dtrain__topk_pick(data, n, k, &sparse) == DTRAIN_OK && selected(&sparse, data, n, k, order))
                    continue;
                TEST_FAIL("the first %zu of %zu of kind %d are others", k, n, kind);
                return;
            }
        }
    dtrain__sparse_destroy(&sparse);
    CHECK(sparse.indices == NULL && sparse.capacity == 0);
}

/* No element that was left out ranks above one that was taken, nor as high and before it. */
static int is_the_selection(const dtrain__sparse *sparse, const float *data, size_t n, size_t k)
{
    uint32_t least = UINT32_MAX;
    size_t next = 0, gap_of_equals = 0;
    if (sparse->count != k || sparse->original_count != n)
        return 0;
    for (size_t i = 0; i < k; i++)
        least = rank_of(sparse->values[i]) < least ? rank_of(sparse->values[i]) : least;
    for (size_t i = 0; i < n; i++) {
        uint32_t rank = rank_of(data[i]);
        if (next < k && sparse->indices[next] == i) {
            if (to_bits(sparse->values[next]) != to_bits(data[i]) || (rank == least && gap_of_equals))
                return 0;
            next++;
        } else if (rank > least) {
            return 0;
        } else if (rank == least) {
            gap_of_equals = 1;
        }
    }
    return next == k;
}

static void large_selections(size_t n, int kinds, uint64_t seed)
{
    float *data = (float *)malloc(n * sizeof(float));
    dtrain__sparse sparse;
    memset(&sparse, 0, sizeof sparse);
    CHECK(data != NULL);
    for (int kind = 0; data != NULL && kind < kinds; kind++) {
        const size_t ks[] = {1, 7, n / 1000, dtrain_topk_count(n, 0.01), n / 4, n / 2 - 1, n / 2, n - 1, n};
        fill(data, n, kind, seed);
        for (size_t j = 0; j < sizeof ks / sizeof ks[0]; j++) {
            CHECK_EQ(dtrain__topk_pick(data, n, ks[j], &sparse), DTRAIN_OK);
            if (!is_the_selection(&sparse, data, n, ks[j]))
                TEST_FAIL("the first %zu of %zu of kind %d are others", ks[j], n, kind);
        }
    }
    free(data);
    dtrain__sparse_destroy(&sparse);
}

TEST(large_vectors_are_selected_as_small_ones)
{
    const char *large = getenv("PROPERTY_LARGE");
    const size_t sizes[] = {65535, 65536, 65537, 70001, 1000003, (size_t)1 << 22};
    uint64_t seed = 20250131;
    printf("seed %llu\n", (unsigned long long)seed);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        large_selections(sizes[s], KINDS, seed + s);
    if (large != NULL)
        large_selections((size_t)1 << 27, 2, seed);
}

/* Elements that the sample looks at are unlike the others: small in one vector, large in the other. */
TEST(a_sample_that_misleads_changes_nothing)
{
    enum { N = 1 << 20, SAMPLE = N / 64, PIECE = 64 };
    float *data = (float *)malloc(N * sizeof(float));
    dtrain__sparse sparse;
    memset(&sparse, 0, sizeof sparse);
    for (int large = 0; large < 2; large++) {
        uint32_t state = 1;
        for (size_t i = 0; i < N; i++)
            data[i] = (float)(i % 1013) * 0.001f + (large ? 0.0f : 10.0f);
        for (size_t i = 0; i < SAMPLE; i++) {
            state = state * 1664525u + 1013904223u;
            data[i * PIECE + ((uint64_t)state * PIECE >> 32)] = large ? 100.0f + (float)i : 0.5f;
        }
        CHECK_EQ(dtrain__topk_pick(data, N, N / 32, &sparse), DTRAIN_OK);
        CHECK(is_the_selection(&sparse, data, N, N / 32));
    }
    free(data);
    dtrain__sparse_destroy(&sparse);
}

TEST(every_instruction_set_lists_the_same)
{
    enum { N = 1024 };
    static float data[N + 3], sums[2][N], add[N];
    static uint32_t indices[2][2 * N];
    static float values[2][2 * N];
    dtrain__topk_block blocks[4] = {dtrain__topk_block_scalar, NULL, NULL, NULL};
    int count = 1;
#if defined(__x86_64__)
    blocks[count++] = dtrain__topk_block_sse2;
    if (__builtin_cpu_supports("avx2"))
        blocks[count++] = dtrain__topk_block_avx2;
    if (__builtin_cpu_supports("avx512f"))
        blocks[count++] = dtrain__topk_block_avx512;
#endif
    for (int b = 1; b < count; b++)
        for (size_t n = 0; n <= N; n += n < 70 ? 1 : 159)
            for (int kind = 0; kind < KINDS; kind++) {
                const uint32_t bars[] = {0, 1, rank_of(0.5f), 0x7f800000u, 0x7f800001u, 0x80000000u};
                uint32_t bar = bars[(n + (size_t)kind) % 6];
                fill(data + n % 3, n, kind, n);
                fill(add, n, (kind + 1) % KINDS, n);
                size_t a = blocks[0](data + n % 3, NULL, NULL, n, bar, 5, indices[0], values[0]);
                CHECK_EQ(blocks[b](data + n % 3, NULL, NULL, n, bar, 5, indices[1], values[1]), a);
                CHECK(memcmp(indices[0], indices[1], 4 * a) == 0 && memcmp(values[0], values[1], 4 * a) == 0);
                if (kind == SPECIAL || (kind + 1) % KINDS == SPECIAL)
                    continue; /* payloads of NaNs that sums give are nobody's */
                for (int s = 0; s < 2; s++)
                    memcpy(sums[s], data + n % 3, n * sizeof(float));
                a = blocks[0](sums[0], sums[0], add, n, bar, 0, indices[0], values[0]);
                CHECK_EQ(blocks[b](sums[1], sums[1], add, n, bar, 0, indices[1], values[1]), a);
                CHECK(memcmp(indices[0], indices[1], 4 * a) == 0 && memcmp(values[0], values[1], 4 * a) == 0);
                CHECK(memcmp(sums[0], sums[1], 4 * n) == 0);
            }
}

TEST(adding_first_selects_of_the_sum)
{
    const size_t sizes[] = {1, 5, 1000, 65536, 300007};
    dtrain__sparse sparse, apart;
    memset(&sparse, 0, sizeof sparse);
    memset(&apart, 0, sizeof apart);
    for (size_t s = 0; s < 5; s++)
        for (int kind = 0; kind < KINDS; kind++) {
            size_t n = sizes[s], k = dtrain_topk_count(n, 0.03);
            float *sum = (float *)malloc(n * sizeof(float)), *add = (float *)malloc(n * sizeof(float));
            float *expected = (float *)malloc(n * sizeof(float));
            fill(sum, n, kind, 1);
            fill(add, n, kind == SPECIAL ? NOISE : (kind + 3) % KINDS, 2);
            for (size_t i = 0; i < n; i++)
                expected[i] = sum[i] + add[i];
            CHECK_EQ(dtrain__topk_add(sum, add, n, k, &sparse), DTRAIN_OK);
            size_t equal = 0;
            for (size_t i = 0; i < n; i++)
                equal += to_bits(sum[i]) == to_bits(expected[i]) || (sum[i] != sum[i] && expected[i] != expected[i]);
            CHECK_EQ(equal, n);
            CHECK(is_the_selection(&sparse, sum, n, k));
            free(sum);
            free(add);
            free(expected);
        }
    dtrain__sparse_destroy(&sparse);
    dtrain__sparse_destroy(&apart);
}

TEST(counts_round_up_exactly)
{
    CHECK_EQ(dtrain_topk_count(0, 0.5), 0);
    CHECK_EQ(dtrain_topk_count(1, 0.0), 1);
    const size_t large = SIZE_MAX / 4 + 1; /* a power of two */
    CHECK_EQ(dtrain_topk_count(10, -1.0), 1);
    CHECK_EQ(dtrain_topk_count(10, 7.0), 10);
    CHECK_EQ(dtrain_topk_count(10, 1.0), 10);
    CHECK_EQ(dtrain_topk_count(10, from_bits(0x7fc00000)), 1);
    CHECK_EQ(dtrain_topk_count(10, from_bits(0xff800000)), 1);
    CHECK_EQ(dtrain_topk_count(10, from_bits(0x7f800000)), 10);
    CHECK_EQ(dtrain_topk_count(8, 0.25), 2);
    CHECK_EQ(dtrain_topk_count(9, 0.25), 3);
    CHECK_EQ(dtrain_topk_count(100, 0.01), 2);   /* the double 0.01 is a little above 1/100 */
    CHECK_EQ(dtrain_topk_count(1000, 0.001), 2); /* and so is 0.001 */
    CHECK_EQ(dtrain_topk_count(10, 0.3), 3);     /* 0.3 is below 3/10 */
    CHECK_EQ(dtrain_topk_count(10, 0.1), 2);     /* 0.1 is above 1/10, though 10 * 0.1 rounds to 1 */
    CHECK_EQ(dtrain_topk_count(5, 4.9e-324), 1);
    CHECK_EQ(dtrain_topk_count(SIZE_MAX, 4.9e-324), 1);
    CHECK_EQ(dtrain_topk_count(1000, 0.99999999999999988898), 1000);
    CHECK_EQ(dtrain_topk_count(large, 0.5), large / 2);
    CHECK_EQ(dtrain_topk_count(large + 1, 0.5), large / 2 + 1);
    CHECK_EQ(dtrain_topk_count(large, 1.0 / (double)large), 1);
    CHECK_EQ(dtrain_topk_count(large + 1, 1.0 / (double)large), 2);
    for (size_t n = 1; n < 2048 && LDBL_MANT_DIG >= 64; n++) /* the product is exact: n has 11 bits, a ratio 53 */
        for (int r = 1; r < 100; r += 7) {
            double ratio = r / 101.0;
            long double product = (long double)n * ratio;
            size_t k = (size_t)product;
            CHECK_EQ(dtrain_topk_count(n, ratio), k + ((long double)k < product));
        }
}

TEST(a_warm_up_quarters_the_ratio_each_stage)
{
    dtrain_topk_schedule schedule = {0.001, 10, 0.0, 0.0};
    CHECK(dtrain__topk_ratio(&schedule, 0) == 0.25);
    CHECK(dtrain__topk_ratio(&schedule, 9) == 0.25);
    CHECK(dtrain__topk_ratio(&schedule, 10) == 0.0625);
    CHECK(dtrain__topk_ratio(&schedule, 25) == 0.015625);
    CHECK(dtrain__topk_ratio(&schedule, 39) == 0.00390625);
    CHECK(dtrain__topk_ratio(&schedule, 40) == 0.001); /* 0.0009765625 would be below */
    CHECK(dtrain__topk_ratio(&schedule, UINT64_MAX) == 0.001);
    schedule.factor = 0.5;
    schedule.first_ratio = 0.008;
    CHECK(dtrain__topk_ratio(&schedule, 11) == 0.004);
    schedule.stage_steps = 0;
    CHECK(dtrain__topk_ratio(&schedule, 0) == 0.001);
}

TEST(selections_refuse_what_cannot_be)
{
    float data[4] = {1, 2, 3, 4};
    dtrain__sparse sparse;
    memset(&sparse, 0, sizeof sparse);
#if SIZE_MAX > UINT32_MAX
    CHECK_EQ(dtrain__topk_pick(data, (size_t)1 << 32, 1, &sparse), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "4294967296 elements");
#endif
    CHECK_EQ(dtrain__topk_pick(NULL, 0, 0, &sparse), DTRAIN_OK);
    CHECK_EQ(sparse.count, 0);
    dtrain__sparse_destroy(&sparse);
}

static int refusals;

static void *sometimes(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    (void)old_bytes;
    if (new_bytes > 0 && refusals-- == 0)
        return NULL;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    free(pointer);
    return block;
}

TEST(memory_is_counted_kept_and_may_be_refused)
{
    enum { N = 200000 };
    static float data[N];
    dtrain_allocator allocator = {sometimes, NULL, 0, 0};
    dtrain__sparse sparse;
    memset(&sparse, 0, sizeof sparse);
    sparse.allocator = &allocator;
    fill(data, N, NOISE, 3);
    refusals = 0;
    CHECK_EQ(dtrain__topk_pick(data, N, 100, &sparse), DTRAIN_ERR_MEMORY);
    CHECK_EQ(allocator.bytes, 0);
    refusals = 1000;
    CHECK_EQ(dtrain__topk_pick(data, N, 2000, &sparse), DTRAIN_OK);
    size_t bytes = allocator.bytes;
    CHECK(bytes > 0 && bytes < 100000);
    refusals = 0; /* warm: it asks for nothing */
    for (int kind = 0; kind < KINDS; kind++) {
        fill(data, N, kind, 4);
        CHECK_EQ(dtrain__topk_pick(data, N, 2000, &sparse), DTRAIN_OK);
        CHECK(is_the_selection(&sparse, data, N, 2000));
    }
    CHECK_EQ(allocator.peak_bytes, bytes);
    dtrain__sparse_destroy(&sparse);
    CHECK_EQ(allocator.bytes, 0);
}

static dtrain__sparse of(uint32_t *indices, float *values, size_t count, size_t original)
{
    dtrain__sparse made;
    memset(&made, 0, sizeof made);
    made.indices = indices;
    made.values = values;
    made.count = count;
    made.original_count = original;
    return made;
}

TEST(dense_vectors_are_overwritten)
{
    uint32_t indices[] = {0, 3};
    float values[] = {1.5f, -2.0f}, data[] = {1, 1, 1, 1, 1};
    dtrain__sparse sparse = of(indices, values, 2, 5);
    dtrain__sparse_write(&sparse, data);
    CHECK(data[0] == 1.5f && data[1] == 0.0f && data[2] == 0.0f && data[3] == -2.0f && data[4] == 0.0f);
}

static size_t packed_bytes(const dtrain__sparse *sparse, dtrain_dtype values, dtrain_index_form form)
{
    return dtrain__sparse_size(sparse, values, &form);
}

/* Packs, and returns how many bytes that are. */
static size_t pack(const dtrain__sparse *sparse, dtrain_dtype values, dtrain_index_form form, unsigned char *out)
{
    size_t bytes = dtrain__sparse_size(sparse, values, &form);
    dtrain__sparse_pack(sparse, values, form, out);
    return bytes;
}

TEST(packed_bytes_are_as_documented)
{
    uint32_t indices[] = {2, 3, 200};
    float values[] = {1.0f, -2.0f, 0.5f};
    dtrain__sparse sparse = of(indices, values, 3, 1000);
    unsigned char out[128];
    /* gaps 2, 0 and 196 = 0xc4: low seven bits 0x44 and one more byte */
    unsigned char expected[] = {'D', 'T', 'S',  '1', 0xbf, 0x02, DTRAIN_BF16, 0, 3,    0,    0,    0,    0,    0,
                                0,   0,   0xe8, 3,   0,    0,    0,           0, 0,    0,    4,    0,    0,    0,
                                0,   0,   0,    0,   2,    0,    0xc4,        1, 0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f};
    little_endian(expected, 1, 4);
    little_endian(expected + 4, 2, 2);
    little_endian(expected + 8, 3, 8);
    little_endian(expected + 36, 3, 2);
    CHECK_EQ(DTRAIN_INDEX_DELTA, 0x2bf);
    CHECK_EQ(pack(&sparse, DTRAIN_BF16, DTRAIN_INDEX_AUTO, out), sizeof expected);
    CHECK(memcmp(out, expected, sizeof expected) == 0);
    CHECK_EQ(packed_bytes(&sparse, DTRAIN_F32, DTRAIN_INDEX_U32), 32 + 12 + 12);
    CHECK_EQ(packed_bytes(&sparse, DTRAIN_F32, DTRAIN_INDEX_U16), 32 + 6 + 12);
    CHECK_EQ(packed_bytes(&sparse, DTRAIN_F16, DTRAIN_INDEX_NONE), 32 + 2000);
    sparse.original_count = 201;
    CHECK_EQ(packed_bytes(&sparse, DTRAIN_F32, DTRAIN_INDEX_AUTO), 32 + 4 + 12);
    indices[2] = 4;
    sparse.original_count = 3 + 2;
    CHECK_EQ(packed_bytes(&sparse, DTRAIN_F16, DTRAIN_INDEX_AUTO), 32 + 3 + 6); /* dense has 10: shorter is 9 */
    sparse.original_count = 4;
    sparse.count = 2;
    CHECK_EQ(packed_bytes(&sparse, DTRAIN_F32, DTRAIN_INDEX_AUTO), 32 + 2 + 8);
    sparse.indices[0] = 0, sparse.indices[1] = 1, sparse.original_count = 2;
    CHECK_EQ(packed_bytes(&sparse, DTRAIN_F32, DTRAIN_INDEX_AUTO), 32 + 8); /* dense */
}

TEST(packing_and_unpacking_gives_the_vector_back)
{
    enum { N = 3000 };
    static float data[N], back[N], again[N];
    static unsigned char packed[32 + 8 * N];
    const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16};
    dtrain__sparse sparse, got;
    memset(&sparse, 0, sizeof sparse);
    memset(&got, 0, sizeof got);
    for (size_t n = 1; n <= N; n = n * 3 + 1)
        for (int form = DTRAIN_INDEX_U32; form <= DTRAIN_INDEX_NONE; form++)
            for (int d = 0; d < 3; d++)
                for (size_t k = 1; k <= n; k = k * 4) {
                    fill(data, n, NOISE, n + k);
                    CHECK_EQ(dtrain__topk_pick(data, n, k, &sparse), DTRAIN_OK);
                    size_t bytes = pack(&sparse, dtypes[d], (dtrain_index_form)form, packed);
                    CHECK_EQ(dtrain__sparse_unpack(&got, packed, bytes, n), DTRAIN_OK);
                    CHECK_EQ(got.count, form == DTRAIN_INDEX_NONE ? n : k);
                    CHECK_EQ(dtrain_convert(sparse.values, DTRAIN_F32, again, dtypes[d], k), DTRAIN_OK);
                    CHECK_EQ(dtrain_convert(again, dtypes[d], sparse.values, DTRAIN_F32, k), DTRAIN_OK);
                    dtrain__sparse_write(&sparse, back);
                    dtrain__sparse_write(&got, again);
                    CHECK(memcmp(back, again, n * sizeof(float)) == 0);
                }
    dtrain__sparse_destroy(&sparse);
    dtrain__sparse_destroy(&got);
}

/* What is corrupt is refused, or else is a good vector: ascending and in range. Memory ends with the bytes, so that
 * sanitizers see one read too many. */
static void damaged(const unsigned char *packed, size_t bytes, size_t n)
{
    dtrain__sparse got;
    unsigned char *copy = (unsigned char *)malloc(bytes > 0 ? bytes : 1);
    memset(&got, 0, sizeof got);
    memcpy(copy, packed, bytes);
    dtrain_status status = dtrain__sparse_unpack(&got, copy, bytes, n);
    CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_CORRUPT);
    CHECK(status == DTRAIN_OK || got.count == 0);
    for (size_t i = 0; i < got.count; i++)
        CHECK(got.indices[i] < n && (i == 0 || got.indices[i] > got.indices[i - 1]));
    dtrain__sparse_destroy(&got);
    free(copy);
}

TEST(no_damaged_bytes_write_anything)
{
    uint32_t indices[] = {1, 9, 10, 250};
    float values[] = {1, 2, 3, 4};
    for (int form = DTRAIN_INDEX_U32; form <= DTRAIN_INDEX_NONE; form++) {
        unsigned char packed[2048];
        dtrain__sparse sparse = of(indices, values, 4, 256), got;
        memset(&got, 0, sizeof got);
        size_t bytes = pack(&sparse, DTRAIN_BF16, (dtrain_index_form)form, packed);
        for (size_t cut = 0; cut < bytes; cut++) {
            CHECK_EQ(dtrain__sparse_unpack(&got, packed, cut, 256), DTRAIN_ERR_CORRUPT);
            damaged(packed, cut, 256);
        }
        CHECK_EQ(dtrain__sparse_unpack(&got, packed, bytes + 1, 256), DTRAIN_ERR_CORRUPT);
        CHECK_EQ(dtrain__sparse_unpack(&got, packed, bytes, 255), DTRAIN_ERR_CORRUPT);
        CHECK_CONTAINS(dtrain_last_error(), "of 256 came, expected a part of 255");
        for (size_t at = 0; at < bytes && at < 60; at++)
            for (int value = 0; value < 256; value++) {
                unsigned char kept = packed[at];
                packed[at] = (unsigned char)value;
                damaged(packed, bytes, 256);
                packed[at] = kept;
            }
        dtrain__sparse_destroy(&got);
    }
}

TEST(indices_out_of_range_or_order_are_refused)
{
    uint32_t indices[] = {1, 9, 10};
    float values[] = {1, 2, 3};
    unsigned char packed[128];
    dtrain__sparse sparse = of(indices, values, 3, 11), got;
    memset(&got, 0, sizeof got);
    size_t bytes = pack(&sparse, DTRAIN_F32, DTRAIN_INDEX_U32, packed);
    const uint32_t bad[] = {11, 9, 1, 0, UINT32_MAX};
    for (size_t i = 0; i < 5; i++) {
        memcpy(packed + 32 + 8, &bad[i], 4);
        CHECK_EQ(dtrain__sparse_unpack(&got, packed, bytes, 11), DTRAIN_ERR_CORRUPT);
        CHECK_CONTAINS(dtrain_last_error(), "index 2 of 3 is out of range, out of order");
    }
    bytes = pack(&sparse, DTRAIN_F32, DTRAIN_INDEX_DELTA, packed);
    packed[32 + 1] = 8; /* 1 + 1 + 8 = 10, and the next 11 */
    CHECK_EQ(dtrain__sparse_unpack(&got, packed, bytes, 11), DTRAIN_ERR_CORRUPT);
    CHECK_EQ(dtrain__sparse_unpack(&got, packed, bytes, (size_t)-1), DTRAIN_ERR_CORRUPT);
    dtrain__sparse_destroy(&got);
}
