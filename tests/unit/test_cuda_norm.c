/* ---- >>test_cuda_norm ----
 * The exact sum of squares and the clipping of the companion against those of the CPU, bit for bit: every size to 1,000
 * at every alignment, any grid, windows that are placed badly, numbers on the edges of windows, what is not finite,
 * limbs that were never carried. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "cuda_device.h"

enum { LIMBS = DTRAIN_SQUARES_LIMBS, LARGE = 1 << 20 };
enum { NOISE, ANY, ZEROS, NARROW, WIDE, RISING, FALLING, SUBNORMALS, LARGEST, SPECIAL, LAYERS, EDGES, KINDS };

static float one_of(int kind, uint64_t seed, size_t i, size_t n)
{
    uint64_t random = dtrain_random_u64(seed, i);
    uint32_t bits = (uint32_t)(random >> 32), sign = bits & 0x80000000u, mantissa = bits & 0x7FFFFFu;
    uint32_t rising = (uint32_t)(i * 254 / (n > 0 ? n : 1));
    switch (kind) {
    case NOISE: return ((float)(bits >> 8) - 8388608.0f) / 8388608.0f;
    case ANY: return from_bits(sign | mantissa | (uint32_t)(random % 255) << 23);
    case ZEROS: return random % 100 == 0 ? from_bits(sign | mantissa | 120u << 23) : from_bits(sign);
    case NARROW: return from_bits(sign | mantissa | 127u << 23);
    case WIDE: return from_bits(sign | mantissa | (uint32_t)(100 + random % 40) << 23);
    case RISING: return from_bits(sign | mantissa | rising << 23);
    case FALLING: return from_bits(sign | mantissa | (254 - rising) << 23);
    case SUBNORMALS: return from_bits(sign | mantissa | (uint32_t)(random % 3) << 23);
    case LARGEST: return from_bits(sign | 0x7F7FFFFFu);
    case SPECIAL:
        return random % 97 == 0   ? from_bits(sign | 0x7F800000u)
               : random % 89 == 0 ? from_bits(sign | 0x7FC00000u | mantissa)
                                  : from_bits(sign | mantissa | (uint32_t)(random % 255) << 23);
    case LAYERS: return from_bits(sign | mantissa | (rising < 127 ? 90u : 140u) << 23);
    default: return from_bits(sign | (random % 2 ? 0x7FFFFFu : 0) | (uint32_t)(127 - random % 2 * 38) << 23);
    }
}

/* Both sums, carried: limbs below 2^32. */
static int same_sum(const dtrain__norm *expected, const int64_t *got)
{
    dtrain__norm a = *expected, b;
    memcpy(b.limbs, got, sizeof b.limbs);
    dtrain__norm_carry(&a);
    dtrain__norm_carry(&b);
    return memcmp(&a, &b, sizeof a) == 0;
}

/* Adds n numbers to limbs that hold `sum` already, on a device, and compares with the CPU. */
static int squares_are_the_cpus(int processors, const float *x, size_t n, size_t offset, const dtrain__norm *sum)
{
    dtrain_device *device = device_of(processors);
    float *there = (float *)device_put(device, NULL, (n + offset) * sizeof *x);
    int64_t *limbs = (int64_t *)device_put(device, sum->limbs, sizeof sum->limbs), got[LIMBS];
    dtrain__norm expected = *sum;
    if (n > 0)
        CHECK_OK(dtrain_device_copy(device, there + offset, x, n * sizeof *x));
    CHECK_EQ(dtrain_device_squares(device, there + offset, n, limbs), DTRAIN_OK);
    CHECK_OK(dtrain_device_copy(device, got, limbs, sizeof got));
    dtrain__norm_add_squares(&expected, x, n);
    device_drop(device, there);
    device_drop(device, limbs);
    return same_sum(&expected, got);
}

TEST(squares_of_all_small_sizes_and_alignments_are_the_cpus)
{
    static float x[1000];
    dtrain__norm sum;
    memset(&sum, 0, sizeof sum);
    for (size_t n = 0; n <= 1000; n++) {
        int kind = (int)(n % KINDS);
        for (size_t i = 0; i < n; i++)
            x[i] = one_of(kind, n, i, n);
        for (size_t offset = 0; offset < 4; offset++)
            if (!squares_are_the_cpus(1 + (int)(n % 3), x, n, offset, &sum))
                TEST_FAIL("%zu numbers of kind %d, %zu beyond a multiple of 16 bytes", n, kind, offset);
    }
}

TEST(squares_of_every_kind_and_grid_are_the_cpus)
{
    float *x = (float *)malloc((size_t)LARGE * sizeof *x);
    dtrain__norm sum;
    memset(&sum, 0, sizeof sum);
    for (int kind = 0; kind < KINDS; kind++) {
        size_t n = (size_t)LARGE - (size_t)(kind * 1237);
        for (size_t i = 0; i < n; i++)
            x[i] = one_of(kind, 7, i, n);
        for (int processors = 1; processors <= 9; processors += 4)
            if (!squares_are_the_cpus(processors, x, n - 3, (size_t)kind % 4, &sum))
                TEST_FAIL("%zu numbers of kind %d on %d processors", n, kind, processors);
    }
    free(x);
}

/* 2^20 numbers on a grid of 4 blocks are 2^10 a thread, which has to empty its accumulators before the last of them. */
TEST(squares_of_the_greatest_numbers_of_a_window_stay_exact)
{
    float *x = (float *)malloc((size_t)LARGE * sizeof *x);
    dtrain__norm sum;
    memset(&sum, 0, sizeof sum);
    for (int pattern = 0; pattern < 4; pattern++) {
        for (size_t i = 0; i < LARGE; i++)
            x[i] = from_bits(pattern == 0                ? 0x3F7FFFFFu
                             : pattern == 1              ? 0x7F7FFFFFu
                             : pattern == 2 && i > 4096  ? 0x7F7FFFFFu
                             : pattern == 3 && i % 2 > 0 ? 0x2D000001u
                                                         : 0x3F7FFFFFu);
        CHECK(squares_are_the_cpus(1, x, LARGE, 0, &sum));
    }
    free(x);
}

TEST(squares_add_to_limbs_of_any_carry)
{
    static float x[5000];
    dtrain__norm sum;
    for (size_t i = 0; i < 5000; i++)
        x[i] = one_of(ANY, 3, i, 5000);
    for (int i = 0; i < LIMBS; i++)
        sum.limbs[i] = (int64_t)(dtrain_random_u64(5, (uint64_t)i) >> (i < 19 ? 8 : 40));
    CHECK(squares_are_the_cpus(2, x, 5000, 1, &sum));
}

/* Each call leaves limbs below 2^45: any number of calls is as far from their end as one. */
TEST(many_calls_do_not_fill_limbs)
{
    dtrain_device *device = device_of(16);
    static float x[70000];
    dtrain__norm expected;
    int64_t got[LIMBS], largest = 0;
    memset(&expected, 0, sizeof expected);
    for (size_t i = 0; i < 70000; i++)
        x[i] = one_of(WIDE, 11, i, 70000);
    float *there = (float *)device_put(device, x, sizeof x);
    int64_t *limbs = (int64_t *)device_put(device, expected.limbs, sizeof expected.limbs);
    for (int call = 0; call < 50; call++) {
        CHECK_EQ(dtrain_device_squares(device, there, 70000, limbs), DTRAIN_OK);
        dtrain__norm_add_squares(&expected, x, 70000);
    }
    CHECK_OK(dtrain_device_copy(device, got, limbs, sizeof got));
    for (int i = 0; i < LIMBS - 3; i++)
        largest = got[i] > largest ? got[i] : largest;
    CHECK(same_sum(&expected, got));
    CHECK(largest < (int64_t)1 << 39); /* 64 blocks add 2^38, which the next call carries */
    device_drop(device, there);
    device_drop(device, limbs);
}

/* ---- clip ---- */

static int same_float(float a, float b)
{
    return to_bits(a) == to_bits(b) || (a != a && b != b);
}

/* Clips n numbers on a device by limbs, and on the CPU as dtrain_clip_grad_norm does. */
static void check_clip(const dtrain__norm *sum, float max_norm, const float *x, size_t n, size_t offset)
{
    dtrain_device *device = device_of(2);
    double poison = -1.0, norm, length = sqrt(dtrain__norm_value(sum));
    int shorten = max_norm != 0.0f && dtrain__norm_finite(sum) && length > (double)max_norm;
    float factor = dtrain__device_ratio((double)max_norm, length), *got = (float *)malloc((n + 1) * sizeof *got);
    float *there = (float *)device_put(device, NULL, (n + offset) * sizeof *x);
    int64_t *limbs = (int64_t *)device_put(device, sum->limbs, sizeof sum->limbs);
    double *root = (double *)device_put(device, &poison, sizeof poison);
    size_t wrong = 0;
    if (n > 0)
        CHECK_OK(dtrain_device_copy(device, there + offset, x, n * sizeof *x));
    CHECK_EQ(dtrain_device_clip(device, limbs, max_norm, root, there + offset, n), DTRAIN_OK);
    CHECK_OK(dtrain_device_copy(device, &norm, root, sizeof norm));
    if (n > 0)
        CHECK_OK(dtrain_device_copy(device, got, there + offset, n * sizeof *x));
    for (size_t i = 0; i < n; i++) {
        float expected = shorten ? x[i] * factor : x[i];
        wrong += shorten ? !same_float(got[i], expected) : to_bits(got[i]) != to_bits(x[i]);
    }
    CHECK_EQ(wrong, 0);
    CHECK(memcmp(&norm, &length, sizeof norm) == 0 || (norm != norm && length != length));
    device_drop(device, there);
    device_drop(device, limbs);
    device_drop(device, root);
    free(got);
}

TEST(clip_of_all_small_sizes_and_alignments_is_the_cpus)
{
    static float x[1000];
    static const float most[4] = {1.0f, 0.0f, 1e-30f, 1e38f};
    for (size_t n = 0; n <= 1000; n++) {
        dtrain__norm sum;
        memset(&sum, 0, sizeof sum);
        for (size_t i = 0; i < n; i++)
            x[i] = one_of(n % 5 == 4 ? SUBNORMALS : n % 5 == 3 ? SPECIAL : (int)(n % 5), n, i, n);
        dtrain__norm_add_squares(&sum, x, n);
        for (size_t offset = 0; offset < 4; offset++)
            check_clip(&sum, most[(n + offset) % 4], x, n, offset);
    }
}

/* The root of every length of a sum, with bits just below, at and above the middle of two float64; uncarried too. */
TEST(norms_round_as_the_cpus)
{
    float x[3] = {1.0f, -3.0f, 1e-39f};
    for (uint64_t round = 0; round < 4000; round++) {
        dtrain__norm sum;
        memset(&sum, 0, sizeof sum);
        int top = (int)(round % 19);
        for (int i = 0; i <= top; i++) {
            uint64_t random = dtrain_random_u64(round, (uint64_t)i);
            sum.limbs[i] = (int64_t)(random >> (round % 3 == 0 ? 32 : 10));
            if (round % 5 == 0 && i < top - 2)
                sum.limbs[i] = 0;
            if (round % 7 == 0 && i == top - 2)
                sum.limbs[i] = (int64_t)1 << 31;
        }
        sum.limbs[20] = round % 100 == 1;
        sum.limbs[21] = round % 200 == 1;
        check_clip(&sum, 2.0f, x, 3, 0);
    }
}

/* A table of parameters goes through dtrain_clip_grad_norm itself. */
TEST(clip_after_squares_is_dtrain_clip_grad_norm)
{
    enum { N = 9999 };
    static float x[N], grad[N], got[N], zeros[LIMBS * 2];
    dtrain_device *device = device_of(3);
    dtrain_param table[1];
    double norm, root;
    memset(table, 0, sizeof table);
    for (size_t i = 0; i < N; i++)
        grad[i] = x[i] = one_of(NOISE, 1, i, N);
    table[0].name = "x";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = N;
    table[0].data = got;
    table[0].grad = grad;
    float *there = (float *)device_put(device, x, sizeof x);
    int64_t *limbs = (int64_t *)device_put(device, zeros, sizeof zeros);
    double *length = (double *)device_put(device, NULL, sizeof norm);
    CHECK_EQ(dtrain_clip_grad_norm(table, 1, 0.5f, &norm), DTRAIN_OK);
    CHECK_EQ(dtrain_device_squares(device, there, N, limbs), DTRAIN_OK);
    CHECK_EQ(dtrain_device_clip(device, limbs, 0.5f, length, there, N), DTRAIN_OK);
    CHECK_OK(dtrain_device_copy(device, got, there, sizeof got));
    CHECK_OK(dtrain_device_copy(device, &root, length, sizeof root));
    CHECK(memcmp(&norm, &root, sizeof norm) == 0);
    CHECK(memcmp(got, grad, sizeof got) == 0);
    CHECK(memcmp(grad, x, sizeof x) != 0);
    device_drop(device, there);
    device_drop(device, limbs);
    device_drop(device, length);
}
