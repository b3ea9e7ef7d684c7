/* ---- >>test_norm ----
 * The exact sum of squares: values that a hand can write down, a second implementation that adds one square at a time
 * to a row of bits, any order and partition, ranks, what is not finite; and the clipping that stands on it. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include <math.h>

#define SUBNORMAL 1.401298464324817e-45f /* 2^-149 */
#define LARGEST 3.4028234663852886e+38f  /* (2^24 - 1) 2^104 */
#define SMALLEST 1.1754943508222875e-38f /* 2^-126, of those that are normal */

static int same_bits(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Any float that is finite: each exponent as likely as any other. */
static float any_float(uint64_t seed, uint64_t index)
{
    uint64_t random = dtrain_random_u64(seed, index);
    return from_bits((uint32_t)(random >> 32 & 0x807FFFFF) | (uint32_t)(random % 255) << 23);
}

static dtrain__norm exact_of(const float *x, size_t count)
{
    dtrain__norm sum;
    memset(&sum, 0, sizeof sum);
    dtrain__norm_add_squares(&sum, x, count);
    return sum;
}

static double value_of(const float *x, size_t count)
{
    dtrain__norm sum = exact_of(x, count);
    return dtrain__norm_value(&sum);
}

/* ---- the reference ---- */

enum { ROW = 640 }; /* bit 0 stands for 2^-298 */

static void row_add(unsigned char *row, float x)
{
    int exponent;
    double part = frexp(fabs((double)x), &exponent); /* in [0.5, 1) and of 24 bits */
    uint64_t square = (uint64_t)ldexp(part, 24) * (uint64_t)ldexp(part, 24);
    int at = 2 * (exponent - 24) + 298, carry = 0;
    while (at < 0) { /* of a subnormal, whose low bits are 0 */
        square >>= 1;
        at++;
    }
    for (; square != 0 || carry != 0; square >>= 1, at++) {
        int bit = row[at] + (int)(square & 1) + carry;
        row[at] = (unsigned char)(bit & 1);
        carry = bit >> 1;
    }
}

static double row_value(const unsigned char *row)
{
    int top = ROW - 1, lower = 0;
    uint64_t kept = 0;
    while (top > 0 && !row[top])
        top--;
    for (int i = top; i > top - 53; i--)
        kept = kept << 1 | (i >= 0 ? row[i] : 0);
    for (int i = top - 54; i >= 0; i--)
        lower |= row[i];
    if (top >= 53 && row[top - 53] && (lower || (kept & 1)))
        kept++;
    return ldexp((double)kept, top - 52 - 298);
}

static double reference(const float *x, size_t count)
{
    unsigned char row[ROW] = {0};
    for (size_t i = 0; i < count; i++)
        row_add(row, x[i]);
    return row_value(row);
}

/* ---- values ---- */

TEST(one_square_is_the_float64_square)
{
    const float values[] = {0.0f,     -0.0f,     1.0f,         -3.0f,        0.1f,    SUBNORMAL, -3 * SUBNORMAL,
                            SMALLEST, -SMALLEST, SMALLEST / 2, SMALLEST * 3, LARGEST, -LARGEST,  1e-40f};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) /* 48 bits: float64 squares them exactly */
        CHECK(same_bits(value_of(&values[i], 1), (double)values[i] * (double)values[i]));
    for (uint64_t i = 0; i < 100000; i++) {
        float x = any_float(1, i);
        CHECK(same_bits(value_of(&x, 1), (double)x * (double)x));
    }
    CHECK(same_bits(value_of(NULL, 0), 0.0));
    CHECK(value_of(values + 5, 1) == ldexp(1, -298));
    CHECK(value_of(values + 7, 1) == ldexp(1, -252));
}

/* Float64 has 256 between neighbours at 2^60: adding ones to it changes nothing. */
TEST(what_float64_would_lose_decides_the_rounding)
{
    static float x[600];
    const double large = 1152921504606846976.0; /* 2^60 */
    for (size_t i = 0; i < 600; i++)
        x[i] = 1.0f;
    x[0] = 1073741824.0f;
    CHECK(value_of(x, 1) == large);
    CHECK(value_of(x, 1 + 127) == large);
    CHECK(value_of(x, 1 + 128) == large); /* a tie, to even */
    CHECK(value_of(x, 1 + 129) == large + 256);
    CHECK(value_of(x, 1 + 383) == large + 256);
    CHECK(value_of(x, 1 + 384) == large + 512); /* a tie, to even: up */
    x[129] = SUBNORMAL;                         /* 2^-298 breaks the tie */
    CHECK(value_of(x, 1 + 128) == large);
    CHECK(value_of(x, 1 + 129) == large + 256);
    x[129] = -0.0f;
    CHECK(value_of(x, 1 + 129) == large);
}

TEST(rounding_up_goes_on_into_the_exponent)
{
    float x[3] = {134217728.0f, 0, 0}; /* (2^27)^2 = 2^54, where neighbours below are 2 apart */
    dtrain__norm sum = exact_of(x, 1);
    sum.limbs[9] -= 1 << 10; /* bit 298 is bit 10 of limb 9: 2^54 - 1, a tie between 2^54 - 2 and 2^54 */
    CHECK(dtrain__norm_value(&sum) == 18014398509481984.0);
    sum.limbs[0] -= 1;
    CHECK(dtrain__norm_value(&sum) == 18014398509481982.0);
}

/* (2^24 - 1)^2 2^208 = (2^48 - 2^25 + 1) 2^208 */
TEST(as_many_of_the_largest_as_fill_a_bin_do_not_overflow)
{
    enum { COUNT = 3 * 65536 };
    float *x = (float *)malloc(COUNT * sizeof *x);
    for (size_t i = 0; i < COUNT; i++)
        x[i] = i % 2 ? -LARGEST : LARGEST;
    CHECK(value_of(x, 65536) == ldexp(1, 272) - ldexp(1, 249) + ldexp(1, 224));
    CHECK(value_of(x, 2 * 65536) == ldexp(1, 273) - ldexp(1, 250) + ldexp(1, 225));
    CHECK(value_of(x, 64) == ldexp(1, 262) - ldexp(1, 239) + ldexp(1, 214));
    CHECK(same_bits(value_of(x, COUNT), reference(x, COUNT)));
    CHECK(same_bits(value_of(x, COUNT - 1), reference(x, COUNT - 1)));
    for (size_t i = 0; i < COUNT; i++)
        x[i] = SUBNORMAL * 8388607.0f; /* the largest of the subnormals: (2^23 - 1) 2^-149 */
    CHECK(value_of(x, 65536) == ldexp(1, -236) - ldexp(1, -258) + ldexp(1, -282));
    free(x);
}

TEST(all_that_can_be_added_fits)
{
    dtrain__norm sum;
    memset(&sum, 0, sizeof sum);
    for (int i = 0; i < 19; i++)
        sum.limbs[i] = INT64_C(1024) * 0xFFFFFFFF; /* 1024 ranks with full limbs: 2^10 (2^608 - 1) 2^-298 */
    CHECK(dtrain__norm_value(&sum) == ldexp(1, 320));
    sum = exact_of(NULL, 0);
    float largest = LARGEST;
    dtrain__norm_add_squares(&sum, &largest, 1);
    for (int doubled = 0; doubled < 48; doubled++) {
        for (int i = 0; i < DTRAIN__NORM_LIMBS; i++)
            sum.limbs[i] *= 2;
        dtrain__norm_add_squares(&sum, NULL, 0); /* as every call ends */
    }
    for (int i = 0; i < DTRAIN__NORM_DIGITS; i++) {
        CHECK(sum.limbs[i] >= 0 && sum.limbs[i] <= 0xFFFFFFFF);
        sum.limbs[i] *= 1024;
    }
    /* 2^58 (2^48 - 2^25 + 1) 2^208 */
    CHECK(dtrain__norm_value(&sum) == ldexp(1, 314) - ldexp(1, 291) + ldexp(1, 266));
    largest = SUBNORMAL;
    dtrain__norm_add_squares(&sum, &largest, 1);
    CHECK(dtrain__norm_value(&sum) == ldexp(1, 314) - ldexp(1, 291) + ldexp(1, 266));
}

/* Sums whose bits below the 53rd are drawn from few: ties, and just beside them. */
TEST(every_rounding_is_the_references)
{
    for (uint64_t run = 0; run < 20000; run++) {
        float x[6];
        uint64_t random = dtrain_random_u64(3, run);
        int high = (int)(random % 60);
        for (int i = 0; i < 6; i++) {
            int exponent = i < 2 ? high - i : high - 24 - (int)(random >> (8 * i) & 7);
            x[i] = (float)ldexp((random >> (40 + i) & 1) ? 1 : 1.5, exponent);
        }
        CHECK(same_bits(value_of(x, 6), reference(x, 6)));
    }
}

TEST(random_slices_of_all_lengths_are_the_references)
{
    static float x[70000];
    const size_t counts[] = {2, 3, 7, 126, 127, 128, 129, 131, 257, 1000, 4096, 65535, 65536, 65537, 65664, 69999};
    for (uint64_t seed = 10; seed < 13; seed++) {
        for (size_t i = 0; i < 70000; i++) {
            x[i] = any_float(seed, i);
            if (seed == 11) /* of narrow range, as gradients are */
                x[i] = (float)ldexp((double)x[i], -ilogb((double)x[i]) - (int)(i % 9));
            if (seed == 12 && i % 3)
                x[i] = 0.0f;
        }
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
            CHECK(same_bits(value_of(x, counts[c]), reference(x, counts[c])));
    }
}

/* ---- order ---- */

TEST(any_order_and_partition_at_any_alignment_gives_the_same_limbs)
{
    enum { COUNT = 5000 };
    static float x[COUNT];
    static unsigned char shifted[COUNT * sizeof(float) + 8];
    for (size_t i = 0; i < COUNT; i++)
        x[i] = any_float(20, i);
    dtrain__norm whole = exact_of(x, COUNT);
    for (uint64_t run = 0; run < 200; run++) {
        dtrain__norm parts = exact_of(NULL, 0);
        size_t shift = run % 8;
        for (size_t i = COUNT - 1; i > 0; i--) {
            size_t other = (size_t)(dtrain_random_u64(run, i) % (i + 1));
            float swapped = x[i];
            x[i] = x[other];
            x[other] = swapped;
        }
        memcpy(shifted + shift, x, sizeof x);
        for (size_t at = 0, part; at < COUNT; at += part) {
            part = (size_t)(dtrain_random_u64(run, at) % (run % 2 ? 700 : 5)) + 1;
            part = part < COUNT - at ? part : COUNT - at;
            dtrain__norm_add_squares(&parts, (const float *)(void *)(shifted + shift + at * sizeof(float)), part);
        }
        CHECK(memcmp(&whole, &parts, sizeof whole) == 0);
    }
    CHECK(same_bits(dtrain__norm_value(&whole), reference(x, COUNT)));
}

typedef struct shares {
    const float *x;
    size_t count;
    double value;
} shares;

static dtrain_status sum_of_shares(dtrain_comm *world, void *user)
{
    const shares *s = (const shares *)user;
    size_t begin, count = dtrain_shard(world, s->count, dtrain_comm_rank(world), &begin);
    dtrain__norm sum = exact_of(s->x + begin, count);
    CHECK_EQ(dtrain_all_reduce(world, sum.limbs, sum.limbs, DTRAIN__NORM_LIMBS, DTRAIN_I64, DTRAIN_SUM), DTRAIN_OK);
    CHECK(same_bits(dtrain__norm_value(&sum), s->value));
    CHECK(dtrain__norm_finite(&sum));
    return DTRAIN_OK;
}

TEST(ranks_that_reduce_their_limbs_have_the_whole_sum)
{
    static float x[3001];
    shares s = {x, 3001, 0};
    for (size_t i = 0; i < 3001; i++)
        x[i] = any_float(30, i);
    s.value = reference(x, 3001);
    for (int ranks = 1; ranks <= 5; ranks++)
        CHECK_EQ(dtrain_run_threads(ranks, sum_of_shares, &s, NULL), DTRAIN_OK);
}

/* ---- what is not finite ---- */

#define NAN_BITS 0x7FC00000u
#define INFINITY_BITS 0x7F800000u

static int is_nan(double value)
{
    return (bits_of(value) & ~(UINT64_C(1) << 63)) > UINT64_C(0x7FF0000000000000);
}

static int is_infinity(double value)
{
    return bits_of(value) == UINT64_C(0x7FF0000000000000);
}

TEST(infinities_and_nans_are_counted_wherever_they_stand)
{
    static float x[1003];
    const size_t counts[] = {1, 5, 127, 128, 1001, 1003};
    for (size_t i = 0; i < 1003; i++)
        x[i] = any_float(40, i);
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        dtrain__norm finite = exact_of(x, counts[c]);
        CHECK(dtrain__norm_finite(&finite));
        for (size_t at = 0; at < counts[c]; at += counts[c] < 200 ? 1 : 37) {
            const uint32_t kinds[] = {INFINITY_BITS, INFINITY_BITS | 0x80000000u, NAN_BITS, 0xFF800001u, 0x7FFFFFFFu};
            float kept = x[at];
            for (int kind = 0; kind < 5; kind++) {
                uint32_t bits = kinds[kind];
                memcpy(&x[at], &bits, sizeof bits);
                dtrain__norm sum = exact_of(x, counts[c]);
                CHECK(!dtrain__norm_finite(&sum));
                CHECK_EQ(sum.limbs[DTRAIN__NORM_INFINITIES], kind < 2);
                CHECK_EQ(sum.limbs[DTRAIN__NORM_NANS], kind >= 2);
                CHECK(kind < 2 ? is_infinity(dtrain__norm_value(&sum)) : is_nan(dtrain__norm_value(&sum)));
            }
            x[at] = kept;
        }
    }
}

TEST(a_nan_outweighs_infinities_and_every_one_counts)
{
    enum { COUNT = 66000 };
    static uint32_t bits[COUNT];
    dtrain__norm sum;
    for (size_t i = 0; i < COUNT; i++)
        bits[i] = i % 3 ? INFINITY_BITS : 0x3F800000u;
    bits[65999] = NAN_BITS;
    memset(&sum, 0, sizeof sum);
    dtrain__norm_add_squares(&sum, (const float *)(const void *)bits, COUNT);
    CHECK_EQ(sum.limbs[DTRAIN__NORM_INFINITIES], 43999); /* two thirds, and the NaN was one */
    CHECK_EQ(sum.limbs[DTRAIN__NORM_NANS], 1);
    CHECK(is_nan(dtrain__norm_value(&sum)));
    sum.limbs[DTRAIN__NORM_NANS] = 0;
    CHECK(is_infinity(dtrain__norm_value(&sum)));
    sum.limbs[DTRAIN__NORM_INFINITIES] = 0;
    CHECK(dtrain__norm_value(&sum) == 22000.0); /* the ones among them */
}

/* ---- clipping ---- */

static dtrain_param param(const char *name, size_t count, float *data, float *grad)
{
    dtrain_param made;
    memset(&made, 0, sizeof made);
    made.name = name;
    made.dtype = DTRAIN_F32;
    made.shape[0] = count;
    made.data = data;
    made.grad = grad;
    return made;
}

TEST(a_clipped_norm_is_the_root_of_the_exact_sum_in_any_order)
{
    enum { COUNT = 1200 };
    static float data[COUNT], grad[COUNT];
    double forward = 0, backward = 0;
    for (size_t i = 0; i < COUNT; i++)
        grad[i] = any_float(50, i);
    dtrain_param table[3];
    table[0] = param("a", 1, data, grad);
    table[1] = param("b", 900, data + 1, grad + 1);
    table[2] = param("c", COUNT - 901, data + 901, grad + 901);
    CHECK_EQ(dtrain_clip_grad_norm(table, 3, 0.0f, &forward), DTRAIN_OK);
    dtrain_param first = table[0];
    table[0] = table[2];
    table[2] = first;
    CHECK_EQ(dtrain_clip_grad_norm(table, 3, 0.0f, &backward), DTRAIN_OK);
    CHECK(same_bits(forward, sqrt(reference(grad, COUNT))));
    CHECK(same_bits(forward, backward));
    for (size_t i = 0; i < COUNT; i++)
        grad[i] = 0.0f;
    CHECK_EQ(dtrain_clip_grad_norm(table, 3, 1.0f, &forward), DTRAIN_OK);
    CHECK(same_bits(forward, 0.0));
    grad[5] = LARGEST;
    grad[1000] = -LARGEST;
    CHECK_EQ(dtrain_clip_grad_norm(table, 3, 1.0f, &forward), DTRAIN_OK);
    CHECK(same_bits(forward, sqrt(2.0 * (double)LARGEST * (double)LARGEST)));
    CHECK(grad[5] > 0.70710f && grad[5] < 0.70711f && grad[1000] < -0.70710f && grad[7] == 0.0f);
}

TEST(gradients_that_are_not_finite_stay_as_they_are)
{
    float data[300], grad[300], kept[300];
    double norm = 0;
    dtrain_param table[2];
    table[0] = param("a", 3, data, grad);
    table[1] = param("b", 297, data + 3, grad + 3);
    for (int kind = 0; kind < 3; kind++) {
        for (size_t i = 0; i < 300; i++)
            grad[i] = 4.0f;
        if (kind != 1)
            grad[1] = from_bits(INFINITY_BITS | 0x80000000u);
        if (kind != 0)
            grad[200] = from_bits(NAN_BITS);
        memcpy(kept, grad, sizeof kept);
        CHECK_EQ(dtrain_clip_grad_norm(table, 2, 1.0f, &norm), DTRAIN_OK);
        CHECK(kind == 0 ? is_infinity(norm) : is_nan(norm));
        CHECK(memcmp(kept, grad, sizeof kept) == 0);
    }
    table[1].frozen = 1; /* its NaN is nobody's */
    grad[1] = 4.0f;
    CHECK_EQ(dtrain_clip_grad_norm(table, 2, 1.0f, &norm), DTRAIN_OK);
    CHECK(same_bits(norm, sqrt(48.0)));
}

#if defined(__x86_64__)
TEST(modes_that_flush_subnormals_change_nothing)
{
    static float x[2000];
    unsigned before = __builtin_ia32_stmxcsr();
    for (size_t i = 0; i < 2000; i++)
        x[i] = from_bits((uint32_t)dtrain_random_u64(60, i) & 0x807FFFFFu); /* subnormals */
    double expected = reference(x, 2000);
    __builtin_ia32_ldmxcsr(before | 0x8040u);
    double got = value_of(x, 2000), few = value_of(x, 100);
    __builtin_ia32_ldmxcsr(before);
    CHECK(same_bits(got, expected));
    CHECK(same_bits(few, reference(x, 100)));
}
#endif
