/* ---- >>test_cuda_topk ----
 * Selections of the companion against the CPU's: indices, values and sums, at every size to 1,000
 * and every alignment, over steps whose numbers stay, grow and shrink, with bars that are wrong on purpose, and with
 * numbers that are all equal, not finite, sorted, or in one place. */
#include "dtrain.h"
#define DTRAIN__CUDA_TOPK_SPANS 3u /* so that few numbers make several chunks a span */
#include "cuda_device.h"

enum { NOISE, CONSTANT, RISING, FALLING, SUBNORMAL, SPECIAL, SPARSE, FEW, NANS, ZEROS, CLUSTER, LOG, KINDS };

static float one_of(int kind, uint64_t seed, size_t i, size_t n)
{
    uint64_t random = dtrain_random_u64(seed, i);
    uint32_t bits = (uint32_t)(random >> 32), sign = bits & 0x80000000u;
    float noise = ((float)(bits >> 8) - 8388608.0f) / 8388608.0f;
    switch (kind) {
    case CONSTANT: return sign ? -2.5f : 2.5f;
    case RISING: return (float)i;
    case FALLING: return -(float)(n - i);
    case SUBNORMAL: return from_bits(bits & 0x807FFFFFu);
    case SPECIAL:
        return random % 7 == 0   ? from_bits(0x7F800000u | sign)
               : random % 7 == 1 ? from_bits(0x7FC00000u | (bits & 0x803FFFFFu))
                                 : noise;
    case SPARSE: return random % 50 == 0 ? noise : from_bits(sign);
    case FEW: return (float)((int)(random % 5) - 2);
    case NANS: return from_bits(0x7FC00000u | (bits & 0x803FFFFFu));
    case ZEROS: return from_bits(sign);
    case CLUSTER: return i > n / 3 && i < n / 3 + n / 50 ? 100.0f + noise : noise;
    case LOG: return from_bits(sign | (bits & 0x7FFFFFu) | (uint32_t)(80 + random % 60) << 23);
    default: return noise * noise * noise;
    }
}

static int same_float(float a, float b)
{
    return to_bits(a) == to_bits(b) || (a != a && b != b);
}

/* A selection, and the vector that it goes over, on a device and on the CPU. */
typedef struct both {
    dtrain_device *device;
    dtrain_device_selection *selection;
    size_t n, k, offset, add_offset;
    float *there, *add_there, *values_there; /* begin `offset` after a multiple of 16 bytes */
    uint32_t *indices_there;
    float *sum, *add, *values, *sum_back;
    uint32_t *indices;
    dtrain_device_selection *cpu;
    uint32_t *cpu_indices;
    float *cpu_values;
    uint32_t listed; /* of the last step: it was read once */
} both;

static both both_of(int processors, size_t n, size_t k, size_t offset, size_t add_offset)
{
    both b;
    memset(&b, 0, sizeof b);
    b.device = device_of(processors);
    b.n = n;
    b.k = k;
    b.offset = offset;
    b.add_offset = add_offset;
    b.there = (float *)device_put(b.device, NULL, (n + offset) * sizeof(float));
    b.add_there = (float *)device_put(b.device, NULL, (n + add_offset) * sizeof(float));
    b.values_there = (float *)device_put(b.device, NULL, k * sizeof(float));
    b.indices_there = (uint32_t *)device_put(b.device, NULL, k * sizeof(uint32_t));
    b.sum = (float *)malloc((n + 1) * sizeof(float));
    b.add = (float *)malloc((n + 1) * sizeof(float));
    b.sum_back = (float *)malloc((n + 1) * sizeof(float));
    b.values = (float *)malloc((k + 1) * sizeof(float));
    b.indices = (uint32_t *)malloc((k + 1) * sizeof(uint32_t));
    b.cpu_values = (float *)malloc((k + 1) * sizeof(float));
    b.cpu_indices = (uint32_t *)malloc((k + 1) * sizeof(uint32_t));
    CHECK_EQ(dtrain_device_selection_create(NULL, n, k, &b.cpu), DTRAIN_OK);
    CHECK_EQ(dtrain__cuda_selection_create(b.device, n, k, &b.selection), DTRAIN_OK);
    return b;
}

static void both_end(both *b)
{
    dtrain__cuda_selection_destroy(b->device, b->selection);
    device_drop(b->device, b->there);
    device_drop(b->device, b->add_there);
    device_drop(b->device, b->values_there);
    device_drop(b->device, b->indices_there);
    free(b->sum);
    free(b->add);
    free(b->sum_back);
    free(b->values);
    free(b->indices);
    free(b->cpu_values);
    free(b->cpu_indices);
    dtrain_device_selection_destroy(NULL, b->cpu);
}

static void both_put(both *b, void *to, const void *from, size_t bytes)
{
    if (bytes > 0)
        CHECK_OK(dtrain_device_copy(b->device, to, from, bytes));
}

/* Selects from b->sum, with b->add where asked for, and compares. */
static int both_step(both *b, int with_add)
{
    dtrain__cuda_topk_state *state = ((dtrain__cuda_selection *)b->selection)->args.state;
    const float *add = with_add ? b->add_there + b->add_offset : NULL;
    memset(b->values, 0xEE, b->k * sizeof(float));
    memset(b->indices, 0xEE, b->k * sizeof(uint32_t));
    both_put(b, b->values_there, b->values, b->k * sizeof(float));
    both_put(b, b->indices_there, b->indices, b->k * sizeof(uint32_t));
    both_put(b, b->there + b->offset, b->sum, b->n * sizeof(float));
    both_put(b, b->add_there + b->add_offset, b->add, b->n * sizeof(float));
    dtrain_status status =
        dtrain__cuda_select(b->device, b->selection, b->there + b->offset, add, b->indices_there, b->values_there);
    CHECK_EQ(dtrain_device_select(NULL, b->cpu, b->sum, with_add ? b->add : NULL, b->cpu_indices, b->cpu_values),
             DTRAIN_OK);
    both_put(b, b->values, b->values_there, b->k * sizeof(float));
    both_put(b, b->indices, b->indices_there, b->k * sizeof(uint32_t));
    both_put(b, b->sum_back, b->there + b->offset, b->n * sizeof(float));
    both_put(b, &b->listed, &state->listed, sizeof b->listed);
    for (size_t i = 0; i < b->n; i++)
        if (with_add ? !same_float(b->sum[i], b->sum_back[i]) : to_bits(b->sum[i]) != to_bits(b->sum_back[i]))
            return 0;
    for (size_t i = 0; i < b->k; i++)
        if (b->indices[i] != b->cpu_indices[i] || (with_add ? !same_float(b->values[i], b->cpu_values[i])
                                                               : to_bits(b->values[i]) != to_bits(b->cpu_values[i])))
            return 0;
    return status == DTRAIN_OK;
}

static void both_set(both *b, int kind, uint64_t seed, float scale)
{
    for (size_t i = 0; i < b->n; i++) {
        b->sum[i] = one_of(kind, seed, i, b->n);
        b->sum[i] = scale != 1.0f ? b->sum[i] * scale : b->sum[i];
        b->add[i] = one_of(kind == NOISE ? NOISE : (int)(seed % KINDS), seed + 1, i, b->n);
    }
}

static void both_bar(both *b, uint32_t bar)
{
    ((dtrain__cuda_selection *)b->selection)->args.bar = bar;
}

TEST(all_small_sizes_and_alignments_select_as_the_cpu)
{
    for (size_t n = 0; n <= 1000; n++) {
        size_t ks[4] = {n / 10 + (n > 0), n, n - n / 3, n > 1}, k = ks[n % 4];
        int kind = (int)(n % KINDS);
        both b = both_of(1 + (int)(n % 3), n, k, n / 2 % 4, n / 8 % 4);
        for (uint64_t step = 0; step < 4; step++) {
            both_set(&b, kind, n + (step & 2), 1.0f);
            if (!both_step(&b, (int)(step & 1)))
                TEST_FAIL("%zu of %zu numbers of kind %d, step %d", k, n, kind, (int)step);
        }
        both_end(&b);
    }
}

TEST(none_selected_still_adds)
{
    for (size_t n = 0; n < 40000; n = 2 * n + 1) {
        both b = both_of(2, n, 0, 1, n % 4);
        both_set(&b, NOISE, n, 1.0f);
        CHECK(both_step(&b, 1));
        CHECK(both_step(&b, 0));
        both_end(&b);
    }
}

/* Tiles and chunks of tiles end at multiples of 8,192 and 65,536, less what comes before a multiple of 16 bytes. */
TEST(sizes_about_tiles_and_chunks_select_as_the_cpu)
{
    for (size_t whole = 8192; whole <= 131072; whole *= 2)
        for (size_t n = whole - 4; n <= whole + 4; n++) {
            both b = both_of(2, n, n / 50, n % 4, n / 4 % 4);
            for (uint64_t step = 0; step < 3; step++) {
                both_set(&b, NOISE, n + step, 1.0f);
                CHECK(both_step(&b, step == 2));
            }
            both_end(&b);
        }
}

TEST(every_kind_of_a_large_vector_selects_as_the_cpu)
{
    for (int kind = 0; kind < KINDS; kind++) {
        size_t n = (1 << 18) + 12345, k = kind % 3 == 0 ? n / 100 : kind % 3 == 1 ? n / 3 : 1000;
        both b = both_of(4, n, k, (size_t)kind % 4, (size_t)kind / 3);
        for (uint64_t step = 0; step < 3; step++) {
            both_set(&b, kind, step, 1.0f);
            if (!both_step(&b, step > 1))
                TEST_FAIL("%zu of %zu numbers of kind %d, step %d", k, n, kind, (int)step);
        }
        both_end(&b);
    }
}

/* A sample is enough: nothing but the search among what passed the bar follows the one read. */
TEST(vectors_are_read_once)
{
    static const int kinds[5] = {NOISE, LOG, CLUSTER, RISING, SUBNORMAL};
    static const float scales[4] = {1.0f, 3.0f, 0.1f, 0.5f};
    for (int i = 0; i < 5; i++) {
        both b = both_of(4, 300001, i % 2 ? 3000 : 100, 0, 0);
        for (uint64_t step = 0; step < 4; step++) {
            both_set(&b, kinds[i], step, scales[step]);
            CHECK(both_step(&b, 0));
            if (b.listed != 1)
                TEST_FAIL("kind %d, step %d", kinds[i], (int)step);
        }
        both_end(&b);
    }
}

TEST(numbers_that_grow_and_shrink_select_as_the_cpu)
{
    static const float scales[8] = {1.0f, 1.1f, 0.7f, 100.0f, 1.0f, 1e-30f, 1e-42f, 1e30f};
    both b = both_of(3, 150000, 1500, 3, 2);
    for (uint64_t step = 0; step < 16; step++) {
        both_set(&b, NOISE, step, scales[step % 8]);
        CHECK(both_step(&b, (int)(step / 8)));
    }
    both_end(&b);
}

/* The sum keeps what was not selected, as in error feedback. */
TEST(steps_of_a_residual_select_as_the_cpu)
{
    both b = both_of(3, 100003, 1000, 1, 1);
    both_set(&b, NOISE, 0, 1.0f);
    for (uint64_t step = 1; step < 12; step++) {
        for (size_t i = 0; i < b.n; i++)
            b.add[i] = one_of(NOISE, step, i, b.n);
        CHECK(both_step(&b, 1));
        for (size_t i = 0; i < b.k; i++)
            b.sum[b.indices[i]] = 0.0f;
    }
    both_end(&b);
}

TEST(no_bar_changes_the_answer)
{
    static const uint32_t bars[12] = {0,           1,           2,           0x00800000u, 0x3E000000u, 0x3F000000u,
                                      0x3F7FFFFFu, 0x3F800000u, 0x7F800000u, 0x7F800001u, 0x80000000u, 0xFFFFFFFFu};
    static const int kinds[4] = {NOISE, SPECIAL, FEW, SPARSE};
    for (int i = 0; i < 4; i++) {
        both b = both_of(2, 70001, 700, 2, 1);
        uint32_t key = 0, once = 0;
        for (uint64_t step = 0; step < 16; step++) {
            both_set(&b, kinds[i], 1, 1.0f);
            if (step < 12)
                both_bar(&b, bars[step]);
            else
                both_bar(&b, key - 1 + (uint32_t)(step - 12)); /* just below, at and above the k-th key */
            if (!both_step(&b, (int)(step % 3 == 2)))
                TEST_FAIL("kind %d, step %d", kinds[i], (int)step);
            once += b.listed;
            key = 0x7FFFFFFFu;
            for (size_t j = 0; j < b.k; j++) {
                uint32_t its = to_bits(b.cpu_values[j]) & 0x7fffffffu;
                its = its > 0x7f800001u ? 0x7f800001u : its; /* all NaNs are one key */
                key = its < key ? its : key;
            }
        }
        /* Of equals as many pass as there are: the vector is read again. Elsewhere both ways have been gone. */
        CHECK(kinds[i] == SPECIAL || kinds[i] == FEW ? once == 0 : once > 0 && once < 16);
        both_end(&b);
    }
}
