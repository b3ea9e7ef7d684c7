/* ---- >>test_tensor ----
 * Conversions against a reference in double arithmetic, folds against the tree written out sequentially, the matrix
 * product against float64 sums, tensors cut and joined, and the texts of errors. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include <float.h>
#include <math.h>

static uint64_t state = 1;

static uint64_t draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) ^ (state << 17);
}

static double uniform(void)
{
    return (double)(draw() >> 12 & 0xfffffff) / (double)(1 << 27) - 1;
}

/* ---- formats, from their definitions: values as doubles, decoded and encoded with ldexp alone ---- */

typedef struct format {
    dtrain_dtype dtype;
    int exponent, mantissa, has_infinity;
} format;

static const format formats[] = {{DTRAIN_F16, 5, 10, 1},
                                 {DTRAIN_BF16, 8, 7, 1},
                                 {DTRAIN_F8_E4M3, 4, 3, 0},
                                 {DTRAIN_F8_E5M2, 5, 2, 1},
                                 {DTRAIN_F32, 8, 23, 1}};

static int bias_of(format f)
{
    return (1 << (f.exponent - 1)) - 1;
}

/* The largest finite value: the all-ones exponent is ordinary in E4M3 but for its last mantissa. */
static double largest_of(format f)
{
    double ones = ldexp(1, f.mantissa + 1) - (f.has_infinity ? 1 : 2);
    int top = (1 << f.exponent) - (f.has_infinity ? 2 : 1);
    return ldexp(ones, top - bias_of(f) - f.mantissa);
}

static double decode(uint32_t bits, format f)
{
    uint32_t mantissa = bits & ((1u << f.mantissa) - 1), exponent = bits >> f.mantissa & ((1u << f.exponent) - 1);
    double sign = bits >> (f.exponent + f.mantissa) & 1 ? -1 : 1, size;
    if (exponent == (1u << f.exponent) - 1 && f.has_infinity)
        return mantissa != 0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == (1u << f.exponent) - 1 && mantissa == (1u << f.mantissa) - 1)
        return (double)NAN;
    if (exponent == 0)
        size = ldexp((double)mantissa, 1 - bias_of(f) - f.mantissa);
    else
        size = ldexp((double)(mantissa + (1u << f.mantissa)), (int)exponent - bias_of(f) - f.mantissa);
    return sign * size;
}

/* The value of the format nearest to x, ties to even, as a double; infinity or NaN beyond its range. */
static double nearest(double x, format f)
{
    int exponent, lowest = 1 - bias_of(f);
    double unit, scaled, down, rounded;
    if (isnan(x) || x == 0)
        return x;
    if (!isinf(x)) {
        frexp(x, &exponent);
        exponent = exponent - 1 < lowest ? lowest : exponent - 1;
        unit = ldexp(1, exponent - f.mantissa < -1074 ? -1074 : exponent - f.mantissa);
        scaled = x / unit; /* a power of two: exact */
        down = floor(scaled);
        rounded = scaled - down > 0.5 || (scaled - down == 0.5 && fmod(down, 2) != 0) ? down + 1 : down;
        x = copysign(rounded * unit, x);
    }
    if (fabs(x) > largest_of(f))
        return f.has_infinity ? copysign((double)INFINITY, x) : (double)NAN;
    return x;
}

/* Stores the lowest `width` bytes of a number as an integer of that width. */
static void put_bits(void *memory, uint64_t bits, size_t width)
{
    unsigned char bytes[8];
    for (size_t i = 0; i < width; i++)
        bytes[i] = (unsigned char)(bits >> 8 * i);
    little_endian(bytes, 1, width);
    memcpy(memory, bytes, width);
}

static uint32_t bits_at(const void *memory, dtrain_dtype dtype)
{
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    switch (dtrain_dtype_bits(dtype)) {
    case 8: memcpy(&u8, memory, 1); return u8;
    case 16: memcpy(&u16, memory, 2); return u16;
    default: memcpy(&u32, memory, 4); return u32;
    }
}

/* Equal as values and as zeros, or both NaN. */
static int same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

TEST(every_8_and_16_bit_pattern_widens_to_its_value_and_comes_back)
{
    static unsigned char narrow[65536 * 2 + 1], back[65536 * 2];
    static float single[65536];
    static double wide[65536];
    for (int t = 0; t < 4; t++) {
        format f = formats[t];
        int bits = (int)dtrain_dtype_bits(f.dtype);
        size_t count = (size_t)1 << bits, width = (size_t)bits / 8;
        for (uint32_t i = 0; i < count; i++)
            put_bits(narrow + 1 + i * width, i, width); /* an odd address */
        CHECK_EQ(dtrain_convert(narrow + 1, f.dtype, single, DTRAIN_F32, count), DTRAIN_OK);
        CHECK_EQ(dtrain_convert(narrow + 1, f.dtype, wide, DTRAIN_F64, count), DTRAIN_OK);
        for (int from_wide = 0; from_wide < 2; from_wide++) {
            int wrong = 0;
            CHECK_EQ(dtrain_convert(from_wide ? (void *)wide : (void *)single, from_wide ? DTRAIN_F64 : DTRAIN_F32,
                                    back, f.dtype, count),
                     DTRAIN_OK);
            for (uint32_t i = 0; i < count; i++) {
                double value = decode(i, f);
                uint32_t again = bits_at(back + i * width, f.dtype);
                int sign = (int)(i >> (bits - 1));
                wrong += !same(wide[i], value) || !same((double)single[i], value);
                wrong += isnan(value) ? !isnan(decode(again, f)) || (int)(again >> (bits - 1)) != sign ||
                                            (signbit(wide[i]) != 0) != sign || (signbit(single[i]) != 0) != sign
                                      : again != i;
            }
            CHECK_EQ(wrong, 0);
        }
    }
}

/* Between two neighbours: the middle, and one float or double to either side of it. */
TEST(ties_go_to_even_and_their_neighbours_do_not)
{
    for (int t = 0; t < 4; t++) {
        format f = formats[t];
        int bits = (int)dtrain_dtype_bits(f.dtype), wrong = 0;
        for (uint32_t i = 0; i + 1 < 1u << (bits - 1); i++) {
            double low = decode(i, f), high = decode(i + 1, f), middle, points[6];
            if (isnan(low) || isinf(low) || isnan(high))
                continue;
            middle = isinf(high) ? low + (low - decode(i - 1, f)) / 2 : (low + high) / 2;
            points[0] = middle;
            points[1] = nextafter(middle, 0);
            points[2] = nextafter(middle, (double)INFINITY);
            points[3] = (double)nextafterf((float)middle, 0.0f);
            points[4] = (double)nextafterf((float)middle, INFINITY);
            points[5] = low;
            for (int p = 0; p < 12; p++) {
                double x = p < 6 ? points[p] : -points[p - 6];
                float single = (float)x;
                uint32_t out = 0, out_single = 0;
                CHECK_EQ(dtrain_convert(&x, DTRAIN_F64, &out, f.dtype, 1), DTRAIN_OK);
                CHECK_EQ(dtrain_convert(&single, DTRAIN_F32, &out_single, f.dtype, 1), DTRAIN_OK);
                wrong += !same(decode(bits_at(&out, f.dtype), f), nearest(x, f));
                wrong += !same(decode(bits_at(&out_single, f.dtype), f), nearest((double)single, f));
            }
        }
        CHECK_EQ(wrong, 0);
    }
}

TEST(float64_rounds_once)
{
    /* 1 + 2^-11 + 2^-40: by way of float32 it becomes the tie 1 + 2^-11, and then 1. */
    double x = 1 + ldexp(1, -11) + ldexp(1, -40), y = 1 + ldexp(1, -8) + ldexp(1, -40);
    uint16_t half, brain;
    CHECK_EQ(dtrain_convert(&x, DTRAIN_F64, &half, DTRAIN_F16, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_convert(&y, DTRAIN_F64, &brain, DTRAIN_BF16, 1), DTRAIN_OK);
    CHECK_EQ(half, 0x3c01);
    CHECK_EQ(brain, 0x3f81);
}

TEST(random_doubles_round_to_the_nearest_of_every_format)
{
    static double in[4096];
    static unsigned char out[4096 * 4];
    static const int ranges[] = {3, 20, 40, 160, 1060};
    for (int t = 0; t < 5; t++)
        for (int r = 0; r < 5; r++) {
            format f = formats[t];
            size_t width = dtrain_dtype_bits(f.dtype) / 8;
            int wrong = 0;
            for (int i = 0; i < 4096; i++)
                in[i] = ldexp(uniform(), (int)(draw() % (unsigned)(2 * ranges[r])) - ranges[r]);
            in[0] = (double)INFINITY;
            in[1] = -(double)INFINITY;
            in[2] = -0.0;
            in[3] = 5e-324;
            CHECK_EQ(dtrain_convert(in, DTRAIN_F64, out, f.dtype, 4096), DTRAIN_OK);
            for (size_t i = 0; i < 4096; i++)
                wrong += !same(decode(bits_at(out + i * width, f.dtype), f), nearest(in[i], f));
            CHECK_EQ(wrong, 0);
        }
}

TEST(float32_rounds_to_the_nearest_half_at_every_length_and_address)
{
    static unsigned char in[4 * 260 + 4], out[2 * 260 + 4];
    for (int t = 0; t < 2; t++)
        for (size_t count = 0; count < 70; count++)
            for (size_t shift = 0; shift < 4; shift++) {
                int wrong = 0;
                for (size_t i = 0; i < count; i++) {
                    uint32_t bits = (uint32_t)draw();
                    memcpy(in + shift + 4 * i, &bits, 4);
                }
                memset(out, 0x5a, sizeof out);
                CHECK_EQ(dtrain_convert(in + shift, DTRAIN_F32, out + 1, formats[t].dtype, count), DTRAIN_OK);
                for (size_t i = 0; i < count; i++)
                    wrong += !same(decode(bits_at(out + 1 + 2 * i, formats[t].dtype), formats[t]),
                                   nearest(decode(bits_at(in + shift + 4 * i, DTRAIN_F32), formats[4]), formats[t]));
                wrong += out[0] != 0x5a || out[1 + 2 * count] != 0x5a;
                CHECK_EQ(wrong, 0);
            }
}

TEST(conversion_says_which_dtypes_it_knows)
{
    int x = 0;
    CHECK_EQ(dtrain_convert(&x, DTRAIN_I32, &x, DTRAIN_F32, 1), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "convert I32 to F32");
    CHECK_EQ(dtrain_convert(NULL, DTRAIN_F32, &x, DTRAIN_F16, 3), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "in is NULL, expected memory of 3 elements");
    CHECK_EQ(dtrain_convert(NULL, DTRAIN_F32, NULL, DTRAIN_F16, 0), DTRAIN_OK);
}

TEST(names_and_widths_of_dtypes_agree_both_ways)
{
    dtrain_dtype dtype = DTRAIN_BOOL;
    for (int i = (int)DTRAIN_BOOL; i <= (int)DTRAIN_U64; i++) {
        const char *name = dtrain_dtype_name((dtrain_dtype)i);
        CHECK_EQ(dtrain_dtype_from_name(&dtype, name, strlen(name)), DTRAIN_OK);
        CHECK_EQ(dtype, i);
    }
    CHECK_EQ(dtrain_dtype_bits(DTRAIN_F4), 4);
    CHECK_EQ(dtrain_dtype_bits(DTRAIN_F6_E3M2), 6);
    CHECK_EQ(dtrain_dtype_bits(DTRAIN_F8_E5M2FNUZ), 8);
    CHECK_EQ(dtrain_dtype_bits(DTRAIN_BF16), 16);
    CHECK_EQ(dtrain_dtype_bits(DTRAIN_C64), 64);
    CHECK_EQ(dtrain_dtype_bits((dtrain_dtype)0), 0);
    CHECK_EQ(dtrain_dtype_bits((dtrain_dtype)DTRAIN_SUM), 0);
    CHECK_CONTAINS(dtrain_dtype_name((dtrain_dtype)99), "?");
    CHECK_EQ(dtrain_dtype_from_name(&dtype, "F3", 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "\"F3\"");
    CHECK_EQ(dtrain_dtype_from_name(&dtype, "F32x", 3), DTRAIN_OK);
    CHECK_EQ(dtrain_dtype_from_name(&dtype, "f32", 3), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_dtype_from_name(&dtype, "?", 1), DTRAIN_ERR_INVALID);
}

TEST(a_split_covers_the_count_with_earlier_parts_one_longer)
{
    size_t begin;
    CHECK_EQ(dtrain__split(7, 3, 0, &begin), 3);
    CHECK_EQ(begin, 0);
    CHECK_EQ(dtrain__split(7, 3, 1, &begin), 2);
    CHECK_EQ(begin, 3);
    CHECK_EQ(dtrain__split(7, 3, 2, &begin), 2);
    CHECK_EQ(begin, 5);
    CHECK_EQ(dtrain__split(2, 5, 4, &begin), 0);
    CHECK_EQ(begin, 2);
    CHECK_EQ(dtrain__split(7, 3, 3, NULL), 0);
    CHECK_EQ(dtrain__split(7, 0, 0, NULL), 0);
    CHECK_EQ(dtrain__split(SIZE_MAX, 2, 0, NULL) == SIZE_MAX / 2 + 1, 1);
    CHECK_EQ(dtrain_shard(NULL, 7, 0, &begin), 0);
}

/* ---- folds ---- */

/* The tree of one element, by recursion on its definition: op in the type that the dtype accumulates in. */
static double tree_float(dtrain_dtype dtype, dtrain_op op, const double *x, int n)
{
    int left = 1;
    double a, b;
    if (n == 1)
        return x[0];
    while (2 * left < n)
        left *= 2;
    a = tree_float(dtype, op, x, left);
    b = tree_float(dtype, op, x + left, n - left);
    if (isnan(a) || isnan(b))
        return (double)NAN;
    if (op == DTRAIN_MIN)
        return a < b || (a == b && signbit(a)) ? a : b;
    if (op == DTRAIN_MAX)
        return a > b || (a == b && !signbit(a)) ? a : b;
    if (dtype == DTRAIN_F64)
        return op == DTRAIN_PROD ? a * b : a + b;
    /* A double holds a product of floats, and rounds a sum twice harmlessly: 53 >= 2 x 24 + 2. */
    return nearest(op == DTRAIN_PROD ? a * b : a + b, formats[4]);
}

static uint64_t tree_int(dtrain_op op, int is_signed, const uint64_t *x, int n)
{
    uint64_t a = x[0]; /* the order of wrapping integers does not matter */
    for (int i = 1; i < n; i++) {
        int less = is_signed ? (int64_t)x[i] < (int64_t)a : x[i] < a;
        if (op == DTRAIN_SUM)
            a += x[i];
        else if (op == DTRAIN_PROD)
            a *= x[i];
        else if (less == (op == DTRAIN_MIN))
            a = x[i];
    }
    return a;
}

static double load_float(const unsigned char *from, dtrain_dtype dtype)
{
    double wide;
    if (dtype == DTRAIN_F64) {
        memcpy(&wide, from, 8);
        return wide;
    }
    return decode(bits_at(from, dtype), formats[dtype == DTRAIN_F32 ? 4 : dtype == DTRAIN_F16 ? 0 : 1]);
}

static uint64_t load_int(const unsigned char *from, dtrain_dtype dtype)
{
    uint64_t bits = 0;
    unsigned char bytes[8];
    unsigned width = dtrain_dtype_bits(dtype);
    memcpy(bytes, from, width / 8);
    little_endian(bytes, 1, width / 8);
    for (unsigned i = 0; i < width / 8; i++)
        bits |= (uint64_t)bytes[i] << 8 * i;
    if ((dtype == DTRAIN_I8 || dtype == DTRAIN_I32) && bits >> (width - 1) != 0)
        bits |= ~(uint64_t)0 << width;
    return bits;
}

#define FOLD_ROOM 24000 /* bytes of one input */
static unsigned char fold_in[17][FOLD_ROOM], fold_out[17][FOLD_ROOM];

/* Values whose sums round, zeros of both signs, equal values, subnormals, infinities and NaN. */
static void fill_inputs(dtrain_dtype dtype, size_t offset, size_t count, int n)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < count; i++) {
            unsigned char *to = fold_in[k] + offset + i * width;
            uint64_t bits = draw();
            double x = ldexp(uniform(), (int)(draw() % 12) - 6);
            unsigned kind = (unsigned)(draw() % 64);
            x = kind == 0 ? 0.0 : kind == 1 ? -0.0 : kind == 2 ? (double)INFINITY : kind == 3 ? -(double)INFINITY : x;
            x = kind == 4 ? (double)NAN : kind == 5 ? ldexp(x, dtype == DTRAIN_F16 ? -18 : -130) : kind == 6 ? 1.0 : x;
            if (dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16)
                CHECK_EQ(dtrain_convert(&x, DTRAIN_F64, to, dtype, 1), DTRAIN_OK);
            else
                memcpy(to, &bits, width);
        }
}

static int fold_right(dtrain_dtype dtype, dtrain_op op, double divisor, const unsigned char *got, size_t at, int n)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    double x[17], result, single;
    uint64_t ints[17];
    int is_float = dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16;
    for (int k = 0; k < n; k++) {
        x[k] = is_float ? load_float(fold_in[k] + at, dtype) : 0;
        ints[k] = is_float ? 0 : load_int(fold_in[k] + at, dtype);
    }
    if (!is_float) {
        uint64_t value = tree_int(op, dtype == DTRAIN_I8 || dtype == DTRAIN_I32 || dtype == DTRAIN_I64, ints, n);
        unsigned char expected[8];
        put_bits(expected, value, width);
        return load_int(got, dtype) == load_int(expected, dtype);
    }
    result = tree_float(dtype, op, x, n);
    if (op == DTRAIN_MEAN && dtype == DTRAIN_F64)
        result /= divisor;
    single = op == DTRAIN_MEAN ? nearest(result / nearest(divisor, formats[4]), formats[4]) : result;
    if (dtype == DTRAIN_F64)
        return same(load_float(got, dtype), result);
    return same(load_float(got, dtype),
                dtype == DTRAIN_F32 ? single : nearest(single, formats[dtype == DTRAIN_F16 ? 0 : 1]));
}

/* Folds n inputs into m outputs; alias puts each output on the input of its number. */
static int fold_wrong(dtrain_dtype dtype, dtrain_op op, double divisor, int n, int m, size_t offset, size_t begin,
                      size_t count, int alias)
{
    static unsigned char work[17][FOLD_ROOM];
    size_t width = dtrain_dtype_bits(dtype) / 8;
    const void *in[17];
    void *out[17];
    int wrong = 0;
    fill_inputs(dtype, offset, begin + count + 1, n);
    for (int k = 0; k < 17; k++) {
        memcpy(work[k], fold_in[k], offset + (begin + count + 1) * width);
        memset(fold_out[k], 0x5a, offset + (begin + count + 1) * width);
        in[k] = work[k] + offset;
        out[k] = alias && k < n ? work[k] + offset : fold_out[k] + offset;
    }
    dtrain__fold(dtype, op, divisor, in, n, out, m, begin, count);
    for (int k = 0; k < m; k++) {
        const unsigned char *before = alias && k < n ? fold_in[k] + offset : NULL,
                            *base = (const unsigned char *)out[k];
        for (size_t i = 0; i < begin + count + 1; i++)
            if (i >= begin && i < begin + count)
                wrong += k == 0 ? !fold_right(dtype, op, divisor, base + i * width, offset + i * width, n)
                                : memcmp(base + i * width, (const unsigned char *)out[0] + i * width, width) != 0;
            else
                for (size_t b = i * width; b < (i + 1) * width; b++)
                    wrong += base[b] != (before != NULL ? before[b] : 0x5a);
    }
    return wrong;
}

static const dtrain_dtype fold_dtypes[] = {DTRAIN_F64, DTRAIN_F32, DTRAIN_F16, DTRAIN_BF16, DTRAIN_I8,
                                           DTRAIN_U8,  DTRAIN_I32, DTRAIN_U32, DTRAIN_I64,  DTRAIN_U64};
static const dtrain_op fold_ops[] = {DTRAIN_SUM, DTRAIN_MEAN, DTRAIN_PROD, DTRAIN_MIN, DTRAIN_MAX};

TEST(folds_follow_the_tree_for_1_to_17_inputs_every_dtype_and_op)
{
    for (int t = 0; t < 10; t++)
        for (int o = 0; o < 5; o++) {
            if (!dtrain__fold_supported(fold_dtypes[t], fold_ops[o])) {
                CHECK(t >= 4 && fold_ops[o] == DTRAIN_MEAN);
                continue;
            }
            for (int n = 1; n <= 17; n++)
                for (int form = 0; form < 4; form++) {
                    size_t count = form == 0 ? 1 : (size_t)(draw() % 97) + 1,
                           begin = form < 2 ? 0 : (size_t)(draw() % 9);
                    size_t offset = form == 0 ? 0 : (size_t)(draw() % 9);
                    double divisor = form == 1 ? 1 : form == 2 ? 0.37 : n;
                    int m = form == 3 ? 1 : n, wrong;
                    wrong = fold_wrong(fold_dtypes[t], fold_ops[o], divisor, n, m, offset, begin, count, form % 2);
                    if (wrong != 0)
                        TEST_FAIL("%s op %d n %d m %d count %zu begin %zu: %d wrong", dtrain_dtype_name(fold_dtypes[t]),
                                  (int)fold_ops[o], n, m, count, begin, wrong);
                }
        }
    CHECK(!dtrain__fold_supported(DTRAIN_F8_E4M3, DTRAIN_SUM));
    CHECK(!dtrain__fold_supported(DTRAIN_F32, (dtrain_op)DTRAIN_F32));
}

TEST(folds_longer_than_a_tile_follow_the_tree)
{
    for (int t = 0; t < 4; t++)
        for (int n = 2; n <= 8; n++)
            CHECK_EQ(fold_wrong(fold_dtypes[t], DTRAIN_MEAN, n, n, n, 3, 1, 2111, 1), 0);
    CHECK_EQ(fold_wrong(DTRAIN_F32, DTRAIN_MAX, 1, 5, 2, 0, 0, 4099, 1), 0);
    CHECK_EQ(fold_wrong(DTRAIN_I8, DTRAIN_SUM, 1, 3, 3, 1, 0, 9001, 0), 0);
}

/* Message-based collectives fold pairs of partial sums and finish once. */
TEST(pairs_and_a_finish_give_the_bits_of_the_fold)
{
    static double partial[4][512];
    static unsigned char whole[4096], pieces[4096];
    for (int t = 0; t < 4; t++)
        for (int o = 0; o < 5; o++) {
            dtrain_dtype dtype = fold_dtypes[t], wide = dtrain__fold_partial(dtype);
            const void *in[4];
            void *out[1];
            fill_inputs(dtype, 0, 401, 3);
            for (int k = 0; k < 3; k++) {
                in[k] = fold_in[k];
                CHECK_EQ(dtrain_convert(fold_in[k], dtype, partial[k], wide, 401), DTRAIN_OK);
            }
            out[0] = whole;
            dtrain__fold(dtype, fold_ops[o], 3, in, 3, out, 1, 0, 401);
            dtrain__fold_pair(wide, fold_ops[o], partial[0], partial[1], 401);
            dtrain__fold_pair(wide, fold_ops[o], partial[0], partial[2], 401);
            dtrain__fold_finish(dtype, fold_ops[o], 3, partial[0], pieces, 401);
            for (size_t i = 0; i < 401; i++) {
                size_t width = dtrain_dtype_bits(dtype) / 8;
                CHECK(same(load_float(whole + i * width, dtype), load_float(pieces + i * width, dtype)));
            }
        }
}

TEST(any_number_of_inputs_fits_the_stack)
{
    enum { MOST = 70000, LONG = 700 };
    static const int counts[] = {1021, 1022, 1023, 1024, 1025, 2047, 2048, 2049, 4097, 65536, MOST};
    static double value[MOST], sum;
    static float same_value[LONG], many[LONG];
    static const void *in[MOST];
    void *out[1];
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        int n = counts[c];
        out[0] = &sum;
        for (int k = 0; k < n; k++) {
            value[k] = uniform();
            in[k] = &value[k];
        }
        dtrain__fold(DTRAIN_F64, DTRAIN_SUM, 1, in, n, out, 1, 0, 1);
        CHECK(sum == tree_float(DTRAIN_F64, DTRAIN_SUM, value, n));
        out[0] = many; /* several tiles; small integers are exact in any order */
        for (int k = 0; k < n; k++)
            in[k] = same_value;
        for (int i = 0; i < LONG; i++)
            same_value[i] = (float)(i % 7);
        dtrain__fold(DTRAIN_F32, DTRAIN_SUM, 1, in, n, out, 1, 0, LONG);
        for (int i = 0; i < LONG; i++)
            CHECK(many[i] == (float)(i % 7 * n));
    }
}

/* ---- the matrix product ---- */

#define MATRIX_ROOM (300 * 330)
static float a_memory[MATRIX_ROOM], b_memory[MATRIX_ROOM], mat_c[MATRIX_ROOM], mat_before[MATRIX_ROOM];

/* The operands end where their memory ends, so that a sanitizer sees a row or column read too many. */

static int product_wrong(int ta, int tb, size_t m, size_t n, size_t k, float alpha, float beta, size_t pad)
{
    size_t lda = (ta ? m : k) + pad, ldb = (tb ? k : n) + pad, ldc = n + pad;
    const float *mat_a = a_memory + MATRIX_ROOM - (((ta ? k : m) - 1) * lda + (ta ? m : k));
    const float *mat_b = b_memory + MATRIX_ROOM - (((tb ? n : k) - 1) * ldb + (tb ? k : n));
    int wrong = 0;
    for (size_t i = 0; i < MATRIX_ROOM; i++) {
        a_memory[i] = (float)uniform();
        b_memory[i] = (float)uniform();
        mat_before[i] = mat_c[i] = beta == 0 && i % ldc < n && i / ldc < m ? NAN : (float)uniform();
    }
    dtrain_sgemm(ta, tb, m, n, k, alpha, mat_a, lda, mat_b, ldb, beta, mat_c, ldc);
    for (size_t i = 0; i <= m; i++)
        for (size_t j = 0; j < ldc; j++) {
            double sum = 0, size = 0, expected = (double)mat_before[i * ldc + j];
            if (i == m || j >= n) {
                wrong += mat_c[i * ldc + j] != mat_before[i * ldc + j];
                continue;
            }
            for (size_t p = 0; p < k; p++) {
                double x = (double)mat_a[ta ? p * lda + i : i * lda + p],
                       y = (double)mat_b[tb ? j * ldb + p : p * ldb + j];
                sum += x * y;
                size += fabs(x * y);
            }
            expected = (double)alpha * sum + (beta == 0 ? 0 : (double)beta * expected);
            wrong += !(fabs((double)mat_c[i * ldc + j] - expected) <= 1e-6 * (size * fabs((double)alpha) + 1));
        }
    return wrong;
}

TEST(products_agree_with_float64_for_every_transpose_and_odd_size)
{
    static const size_t sizes[][3] = {{1, 1, 1},    {2, 3, 4},    {7, 31, 5},    {8, 32, 16},    {9, 33, 17},
                                      {6, 16, 3},   {13, 47, 64}, {16, 100, 29}, {17, 129, 31},  {5, 257, 12},
                                      {40, 7, 257}, {1, 64, 300}, {64, 1, 99},   {33, 260, 270}, {35, 110, 260}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int transposes = 0; transposes < 4; transposes++)
            for (int form = 0; form < 4; form++) {
                float alpha = form == 1 ? -0.75f : 1, beta = form == 1 ? 0.5f : form == 2 ? 1.0f : 0;
                int wrong = product_wrong(transposes & 1, transposes >> 1, sizes[s][0], sizes[s][1], sizes[s][2], alpha,
                                          beta, form == 3 ? 3 : 0);
                if (wrong != 0)
                    TEST_FAIL("%zu x %zu x %zu, transposes %d, form %d: %d wrong", sizes[s][0], sizes[s][1],
                              sizes[s][2], transposes, form, wrong);
            }
}

TEST(products_of_nothing_scale_or_clear_c)
{
    float a[1] = {NAN}, c[4] = {NAN, 1, 2, 3};
    dtrain_sgemm(0, 0, 1, 1, 0, 1, NULL, 0, NULL, 1, 0, c, 1);
    CHECK(c[0] == 0);
    dtrain_sgemm(0, 0, 1, 3, 0, 1, NULL, 0, NULL, 3, 2, c + 1, 3);
    CHECK(c[1] == 2 && c[2] == 4 && c[3] == 6);
    dtrain_sgemm(0, 0, 1, 1, 1, 0, a, 1, a, 1, 1, c + 1, 1);
    CHECK(c[1] == 2);
    dtrain_sgemm(0, 0, 0, 3, 2, 1, NULL, 2, NULL, 3, 0, c, 3);
    dtrain_sgemm(0, 0, 3, 0, 2, 1, NULL, 2, NULL, 0, 0, c, 0);
    CHECK(c[0] == 0 && c[1] == 2);
}

/* ---- tensors ---- */

static dtrain_allocator memory;

TEST(a_tensor_is_zeroed_aligned_counted_and_freed)
{
    static const size_t shape[] = {3, 5, 7};
    dtrain_tensor x;
    int wrong = 0;
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F16, 3, shape, &memory), DTRAIN_OK);
    CHECK_EQ(x.count, 105);
    CHECK_EQ(x.bytes, 210);
    CHECK_EQ((uintptr_t)x.data % 64, 0);
    CHECK_EQ(memory.bytes, 210);
    for (size_t i = 0; i < x.bytes; i++)
        wrong += ((unsigned char *)x.data)[i] != 0;
    CHECK_EQ(wrong, 0);
    dtrain_tensor_destroy(&x);
    dtrain_tensor_destroy(&x);
    dtrain_tensor_destroy(NULL);
    CHECK_EQ(memory.bytes, 0);
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F64, 0, NULL, &memory), DTRAIN_OK);
    CHECK_EQ(x.count, 1);
    dtrain_tensor_destroy(&x);
}

static void *no_memory(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    (void)pointer;
    (void)old_bytes;
    (void)new_bytes;
    (void)align;
    return NULL;
}

TEST(bad_shapes_are_refused_in_words)
{
    static const size_t huge[] = {SIZE_MAX / 2, 3}, odd[] = {3}, wide[] = {SIZE_MAX / 16};
    size_t shape[] = {2, 3};
    dtrain_allocator empty;
    dtrain_tensor x;
    memset(&empty, 0, sizeof empty);
    empty.resize = no_memory;
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F32, 2, huge, &memory), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the most that can be counted");
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F32, 1, wide, &memory), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F4, 1, odd, &memory), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "3 elements of F4");
    CHECK_EQ(dtrain_tensor_create(&x, (dtrain_dtype)DTRAIN_SUM, 2, shape, &memory), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "dtype is 101");
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F32, 9, shape, &memory), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "ndim 9 and shape given; expected one of dtrain_dtype, 0 to 8 dimensions");
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F32, 2, shape, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "allocator");
    CHECK_EQ(dtrain_tensor_create(&x, DTRAIN_F32, 2, shape, &empty), DTRAIN_ERR_MEMORY);
    CHECK_CONTAINS(dtrain_last_error(), "F32 [2, 3], 24 bytes");
    CHECK_EQ(dtrain_tensor_view(&x, DTRAIN_F32, 2, shape, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "data is NULL, expected 24 bytes");
    shape[0] = 0;
    CHECK_EQ(dtrain_tensor_view(&x, DTRAIN_F32, 2, shape, NULL), DTRAIN_OK);
    CHECK_EQ(memory.bytes, 0);
}

TEST(operations_round_each_step_once)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_F16, DTRAIN_BF16};
    static const format kinds[] = {{DTRAIN_F32, 8, 23, 1}, {DTRAIN_F16, 5, 10, 1}, {DTRAIN_BF16, 8, 7, 1}};
    static float x[1031], y[1031];
    for (int t = 0; t < 3; t++) {
        size_t width = dtrain_dtype_bits(dtypes[t]) / 8;
        int wrong = 0;
        fill_inputs(dtypes[t], 0, 1031, 2);
        memcpy(x, fold_in[0], 1031 * width);
        memcpy(y, fold_in[1], 1031 * width);
        CHECK_EQ(dtrain_device_axpy(NULL, dtypes[t], y, 0.3, x, 1031), DTRAIN_OK);
        CHECK_EQ(dtrain_device_scale(NULL, dtypes[t], x, 0.3, 1031), DTRAIN_OK);
        for (size_t i = 0; i < 1031; i++) {
            double a = load_float(fold_in[0] + i * width, dtypes[t]), b = load_float(fold_in[1] + i * width, dtypes[t]);
            double by = (double)0.3f, product = nearest(a * by, formats[4]);
            const unsigned char *at = (const unsigned char *)y + i * width;
            wrong += !same(load_float(at, dtypes[t]), nearest(nearest(b + product, formats[4]), kinds[t]));
            at = (const unsigned char *)x + i * width;
            wrong += !same(load_float(at, dtypes[t]), nearest(product, kinds[t]));
        }
        CHECK_EQ(wrong, 0);
    }
}

/* The documented order: lane i % 8 takes element i, lanes join as a tree. */
TEST(sums_of_squares_add_in_8_lanes)
{
    static float data[1003];
    for (size_t count = 0; count < 1003; count += count < 20 ? 1 : 61) {
        double lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0}, expected;
        for (size_t i = 0; i < count; i++) {
            double square;
            data[i] = (float)uniform();
            square = (double)data[i] * (double)data[i];
            lanes[i % 8] += square;
        }
        expected = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
        CHECK(dtrain__vector_sum_squares(data, count) == expected);
    }
}

#if defined(__x86_64__)
TEST(the_callers_floating_point_mode_is_set_aside_and_comes_back)
{
    uint32_t before = _mm_getcsr(), after;
    float tiny[2] = {1e-40f, 2e-40f};
    uint32_t bits;
    _mm_setcsr(0xffc0); /* flush, zero, round toward zero, exceptions masked */
    CHECK_EQ(dtrain_device_axpy(NULL, DTRAIN_F32, &tiny[0], 1, &tiny[1], 1), DTRAIN_OK);
    after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK_EQ(after & 0xffc0u, 0xffc0u);
    memcpy(&bits, &tiny[0], 4);
    CHECK_EQ(bits, 71362 + 142725);
}
#endif

TEST(saturating_conversion_ends_at_the_largest_finite_number)
{
    static const struct {
        float in;
        int e4m3, e5m2;
    } of[] = {{448, 0x7e, 0x5f},
              {-448, 0xfe, 0xdf},
              {464, 0x7e, 0x5f},
              {464.0001f, 0x7e, 0x5f},
              {-480, 0xfe, 0xe0},
              {432, 0x7e, 0x5f},
              {431, 0x7d, 0x5f},
              {57344, 0x7e, 0x7b},
              {61440, 0x7e, 0x7b},
              {-61440, 0xfe, 0xfb},
              {FLT_MAX, 0x7e, 0x7b},
              {(float)INFINITY, 0x7e, 0x7b},
              {-(float)INFINITY, 0xfe, 0xfb},
              {0, 0, 0},
              {-0.0f, 0x80, 0x80},
              {0.001953125f, 0x01, 0x18},
              {0.0009765625f, 0x00, 0x14}};
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        unsigned char out = 0x55;
        double wide = (double)of[i].in;
        CHECK_EQ(dtrain_convert_saturating(&of[i].in, DTRAIN_F32, &out, DTRAIN_F8_E4M3, 1), DTRAIN_OK);
        CHECK_EQ(out, of[i].e4m3);
        CHECK_EQ(dtrain_convert_saturating(&of[i].in, DTRAIN_F32, &out, DTRAIN_F8_E5M2, 1), DTRAIN_OK);
        CHECK_EQ(out, of[i].e5m2);
        CHECK_EQ(dtrain_convert_saturating(&wide, DTRAIN_F64, &out, DTRAIN_F8_E4M3, 1), DTRAIN_OK);
        CHECK_EQ(out, of[i].e4m3);
    }
}

TEST(saturating_conversion_is_the_other_one_below_that_and_keeps_nan)
{
    static const dtrain_dtype to[] = {DTRAIN_F8_E4M3, DTRAIN_F8_E5M2};
    static const double largest[] = {448, 57344};
    static const int patterns[] = {0x7e, 0x7b};
    for (int k = 0; k < 2; k++)
        for (unsigned bits = 0; bits < 65536; bits++) {
            uint16_t in = (uint16_t)bits;
            unsigned char plain = 0, out = 0;
            float value;
            CHECK_EQ(dtrain_convert(&in, DTRAIN_BF16, &value, DTRAIN_F32, 1), DTRAIN_OK);
            CHECK_EQ(dtrain_convert(&in, DTRAIN_BF16, &plain, to[k], 1), DTRAIN_OK);
            CHECK_EQ(dtrain_convert_saturating(&in, DTRAIN_BF16, &out, to[k], 1), DTRAIN_OK);
            if (fabs((double)value) > largest[k])
                CHECK_EQ(out, patterns[k] | (bits >> 15 ? 0x80 : 0));
            else
                CHECK_EQ(out, plain);
        }
}

TEST(saturating_conversion_takes_infinities_of_its_own_dtype_and_refuses_others)
{
    const unsigned char in[] = {0x7c, 0xfc, 0x7b, 0x7f};
    unsigned char out[4], unread = 0;
    CHECK_EQ(dtrain_convert_saturating(in, DTRAIN_F8_E5M2, out, DTRAIN_F8_E5M2, 4), DTRAIN_OK);
    CHECK_EQ(out[0], 0x7b);
    CHECK_EQ(out[1], 0xfb);
    CHECK_EQ(out[2], 0x7b);
    CHECK_EQ(out[3], 0x7f);
    CHECK_EQ(dtrain_convert_saturating(in, DTRAIN_F8_E5M2, out, DTRAIN_F8_E4M3, 4), DTRAIN_OK);
    CHECK_EQ(out[0], 0x7e);
    CHECK_EQ(out[1], 0xfe);
    CHECK_EQ(out[2], 0x7e);
    CHECK_EQ(out[3], 0x7f);
    CHECK_EQ(dtrain_convert_saturating(NULL, DTRAIN_F32, NULL, DTRAIN_F8_E4M3, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_convert_saturating(NULL, DTRAIN_F32, &unread, DTRAIN_F8_E4M3, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_convert_saturating(in, DTRAIN_F32, out, DTRAIN_F16, 1), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(dtrain_convert_saturating(in, DTRAIN_I8, out, DTRAIN_F8_E4M3, 1), DTRAIN_ERR_UNSUPPORTED);
}
