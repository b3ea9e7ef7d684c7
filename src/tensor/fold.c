/* ---- >>fold ----
 * The reduction behind every collective. The elements i of n inputs become one value in the tree order (see >>order),
 * which is written to m outputs. All inputs at an index are read before an output is written there, so outputs may be
 * inputs. Sums of two, four and eight float inputs run in registers. The rest runs in tiles of 4 KiB, with one tile for
 * each level of the tree. 16-bit floats are folded as float32 and rounded once. */
#ifndef DTRAIN__FOLD
#define DTRAIN__FOLD
#include "tensor.h"
#include "../base/status.c"
#include "isa.c"
#include "dtype.c"

#define DTRAIN__FOLD_TILE_BYTES 4096
#define DTRAIN__FOLD_LEVELS 11                           /* of 1,024 inputs */
#define DTRAIN__FOLD_SMALL (DTRAIN__FOLD_TILE_BYTES / 4) /* of a tile of more inputs: 44 levels take as much stack */

static int dtrain__fold_supported(dtrain_dtype dtype, dtrain_op op)
{
    int bits = op == DTRAIN_AND || op == DTRAIN_OR || op == DTRAIN_XOR;
    if (op < DTRAIN_SUM || op > DTRAIN_XOR)
        return 0;
    switch (dtype) {
    case DTRAIN_F64:
    case DTRAIN_F32:
    case DTRAIN_F16:
    case DTRAIN_BF16: return !bits;
    case DTRAIN_I8:
    case DTRAIN_U8:
    case DTRAIN_I32:
    case DTRAIN_U32:
    case DTRAIN_I64:
    case DTRAIN_U64: return op != DTRAIN_MEAN;
    default: return 0;
    }
}

/* Returns the dtype of partial results. */
static dtrain_dtype dtrain__fold_partial(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F16 || dtype == DTRAIN_BF16 ? DTRAIN_F32 : dtype;
}

static int dtrain__fold_left(int n)
{
    int left = 1;
    while (2 * left < n)
        left *= 2;
    return left;
}

DTRAIN__EXACT_BEGIN

/* a[i] = a[i] op b[i] */
#define DTRAIN__FOLD_PAIR(name, type, expression) \
    DTRAIN__LOOP(name, (void *left, const void *right, size_t count), (left, right, count), type *a = (type *)left; \
                 const type *b = (const type *)right, a[i] = expression)

/* The same for integers. The base instruction set is fast enough for their loops. */
#define DTRAIN__FOLD_PAIR_INT(name, type, expression) \
    static void name(void *left, const void *right, size_t count) \
    { \
        type *a = (type *)left; \
        const type *b = (const type *)right; \
        size_t whole = count - count % DTRAIN__ISA_BLOCK; \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < whole; i++) a[i] = (type)(expression); \
        for (size_t i = count; i-- % DTRAIN__ISA_BLOCK != 0;) \
            a[i] = (type)(expression); \
    }

/* Minimum and maximum of floats by the order of their bits: -0 is below +0, and a NaN wins. Masks take the place of
 * conditions, which not every compiler vectorises. */
#define DTRAIN__FOLD_PICK(name, type, top, infinity, relation) \
    DTRAIN__INLINE type name(type a, type b) \
    { \
        const type size = (type)(((uint64_t)1 << top) - 1); \
        type a_nan = -(type)((a & size) > infinity), b_nan = -(type)((b & size) > infinity); \
        type first = -(type)((a ^ (a >> top & size)) relation(b ^ (b >> top & size))); \
        return b ^ ((a ^ b) & (a_nan | (first & ~b_nan))); \
    }
DTRAIN__FOLD_PICK(dtrain__fold_lower_f32, int32_t, 31, 0x7f800000, <)
DTRAIN__FOLD_PICK(dtrain__fold_upper_f32, int32_t, 31, 0x7f800000, >)
DTRAIN__FOLD_PICK(dtrain__fold_lower_f64, int64_t, 63, 0x7ff0000000000000, <)
DTRAIN__FOLD_PICK(dtrain__fold_upper_f64, int64_t, 63, 0x7ff0000000000000, >)

DTRAIN__FOLD_PAIR(dtrain__fold_sum_f32, dtrain__f32, a[i] + b[i])
DTRAIN__FOLD_PAIR(dtrain__fold_sum_f64, dtrain__f64, a[i] + b[i])
DTRAIN__FOLD_PAIR(dtrain__fold_prod_f32, dtrain__f32, a[i] * b[i])
DTRAIN__FOLD_PAIR(dtrain__fold_prod_f64, dtrain__f64, a[i] * b[i])
DTRAIN__FOLD_PAIR(dtrain__fold_min_f32, dtrain__i32, dtrain__fold_lower_f32(a[i], b[i]))
DTRAIN__FOLD_PAIR(dtrain__fold_max_f32, dtrain__i32, dtrain__fold_upper_f32(a[i], b[i]))
DTRAIN__FOLD_PAIR(dtrain__fold_min_f64, dtrain__i64, dtrain__fold_lower_f64(a[i], b[i]))
DTRAIN__FOLD_PAIR(dtrain__fold_max_f64, dtrain__i64, dtrain__fold_upper_f64(a[i], b[i]))
DTRAIN__FOLD_PAIR_INT(dtrain__fold_sum_u8, uint8_t, (unsigned)a[i] + b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_sum_u32, dtrain__u32, a[i] + b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_sum_u64, dtrain__u64, a[i] + b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_prod_u8, uint8_t, (unsigned)a[i] * b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_prod_u32, dtrain__u32, a[i] * b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_prod_u64, dtrain__u64, a[i] * b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_and_u8, uint8_t, a[i] & b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_or_u8, uint8_t, a[i] | b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_xor_u8, uint8_t, a[i] ^ b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_min_i8, int8_t, a[i] < b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_min_u8, uint8_t, a[i] < b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_min_i32, dtrain__i32, a[i] < b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_min_u32, dtrain__u32, a[i] < b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_min_i64, dtrain__i64, a[i] < b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_min_u64, dtrain__u64, a[i] < b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_max_i8, int8_t, a[i] > b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_max_u8, uint8_t, a[i] > b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_max_i32, dtrain__i32, a[i] > b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_max_u32, dtrain__u32, a[i] > b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_max_i64, dtrain__i64, a[i] > b[i] ? a[i] : b[i])
DTRAIN__FOLD_PAIR_INT(dtrain__fold_max_u64, dtrain__u64, a[i] > b[i] ? a[i] : b[i])

/* x[i] = x[i] / divisor */
#define DTRAIN__FOLD_DIVIDE(name, type) \
    DTRAIN__LOOP(name, (void *data, double divisor, size_t count), (data, divisor, count), type *x = (type *)data; \
                 type by = (type)divisor, x[i] = x[i] / by)

DTRAIN__FOLD_DIVIDE(dtrain__fold_divide_f32, dtrain__f32)
DTRAIN__FOLD_DIVIDE(dtrain__fold_divide_f64, dtrain__f64)

/* y[i] = x[i] * factor; y may be x */
#define DTRAIN__FOLD_WEIGH(name, type) \
    DTRAIN__LOOP(name, (const void *in, double factor, void *out, size_t count), (in, factor, out, count), \
                 const type *x = (const type *)in; \
                 type *y = (type *)out; type by = (type)factor, y[i] = x[i] * by)

DTRAIN__FOLD_WEIGH(dtrain__fold_weigh_f32, dtrain__f32)
DTRAIN__FOLD_WEIGH(dtrain__fold_weigh_f64, dtrain__f64)

/* Sums n inputs in registers and writes m copies of the sum. n, m and mean are constants after inlining. */
#define DTRAIN__FOLD_DIRECT(name, type) \
    DTRAIN__INLINE void name##_loop(const void *const *in, int n, void *const *out, int m, size_t begin, size_t count, \
                                    double divisor, int mean) \
    { \
        const type *x0 = (const type *)in[0] + begin, *x1 = (const type *)in[n > 1 ? 1 : 0] + begin; \
        const type *x2 = (const type *)in[n > 2 ? 2 : 0] + begin, *x3 = (const type *)in[n > 2 ? 3 : 0] + begin; \
        const type *x4 = (const type *)in[n > 4 ? 4 : 0] + begin, *x5 = (const type *)in[n > 4 ? 5 : 0] + begin; \
        const type *x6 = (const type *)in[n > 4 ? 6 : 0] + begin, *x7 = (const type *)in[n > 4 ? 7 : 0] + begin; \
        type *y0 = (type *)out[0] + begin, *y1 = (type *)out[m > 1 ? 1 : 0] + begin; \
        type *y2 = (type *)out[m > 2 ? 2 : 0] + begin, *y3 = (type *)out[m > 2 ? 3 : 0] + begin; \
        type *y4 = (type *)out[m > 4 ? 4 : 0] + begin, *y5 = (type *)out[m > 4 ? 5 : 0] + begin; \
        type *y6 = (type *)out[m > 4 ? 6 : 0] + begin, *y7 = (type *)out[m > 4 ? 7 : 0] + begin; \
        type by = (type)divisor; \
        count -= count % DTRAIN__ISA_BLOCK; \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) \
        { \
            type s = x0[i]; \
            if (n > 1) \
                s = s + x1[i]; \
            if (n > 2) \
                s = s + (x2[i] + x3[i]); \
            if (n > 4) \
                s = s + ((x4[i] + x5[i]) + (x6[i] + x7[i])); \
            if (mean) \
                s = s / by; \
            y0[i] = s; \
            if (m > 1) \
                y1[i] = s; \
            if (m > 2) { \
                y2[i] = s; \
                y3[i] = s; \
            } \
            if (m > 4) { \
                y4[i] = s; \
                y5[i] = s; \
                y6[i] = s; \
                y7[i] = s; \
            } \
        } \
    } \
    /* The elements after the last whole block. */ \
    static void name##_rest(const void *const *in, int n, void *const *out, int m, size_t begin, size_t end, \
                            double divisor, int mean) \
    { \
        for (size_t i = begin; i < end; i++) { \
            const type *const *x = (const type *const *)in; \
            type s = x[0][i] + x[1][i]; \
            if (n > 2) \
                s = s + (x[2][i] + x[3][i]); \
            if (n > 4) \
                s = s + ((x[4][i] + x[5][i]) + (x[6][i] + x[7][i])); \
            if (mean) \
                s = s / (type)divisor; \
            for (int k = 0; k < m; k++) \
                ((type *)out[k])[i] = s; \
        } \
    } \
    DTRAIN__INLINE void name##_body(const void *const *in, int n, void *const *out, int m, size_t begin, size_t count, \
                                    double divisor, int mean) \
    { \
        if (n == 2 && m == n && !mean) \
            name##_loop(in, 2, out, 2, begin, count, divisor, 0); \
        else if (n == 2 && m == n) \
            name##_loop(in, 2, out, 2, begin, count, divisor, 1); \
        else if (n == 2) \
            name##_loop(in, 2, out, 1, begin, count, divisor, mean); \
        else if (n == 4 && m == n) \
            name##_loop(in, 4, out, 4, begin, count, divisor, mean); \
        else if (n == 4) \
            name##_loop(in, 4, out, 1, begin, count, divisor, mean); \
        else if (m == n) \
            name##_loop(in, 8, out, 8, begin, count, divisor, mean); \
        else \
            name##_loop(in, 8, out, 1, begin, count, divisor, mean); \
    } \
    DTRAIN__KERNEL( \
        name, \
        (const void *const *in, int n, void *const *out, int m, size_t begin, size_t count, double divisor, int mean), \
        (in, n, out, m, begin, count, divisor, mean))

DTRAIN__FOLD_DIRECT(dtrain__fold_direct_f32, dtrain__f32)
DTRAIN__FOLD_DIRECT(dtrain__fold_direct_f64, dtrain__f64)

DTRAIN__EXACT_END

/* left[i] = left[i] op right[i], both of a partial dtype; a mean adds. The caller has set the mode. */
static void dtrain__fold_pair_kernel(dtrain_dtype dtype, dtrain_op op, void *left, const void *right, size_t count)
{
    typedef void (*pair)(void *, const void *, size_t);
    static const pair bits[] = {dtrain__fold_and_u8, dtrain__fold_or_u8, dtrain__fold_xor_u8};
    static const dtrain_dtype columns[] = {DTRAIN_F32, DTRAIN_F64, DTRAIN_I8,  DTRAIN_U8,
                                           DTRAIN_I32, DTRAIN_U32, DTRAIN_I64, DTRAIN_U64};
    static const pair values[4][8] = {
        {dtrain__fold_sum_f32, dtrain__fold_sum_f64, dtrain__fold_sum_u8, dtrain__fold_sum_u8, dtrain__fold_sum_u32,
         dtrain__fold_sum_u32, dtrain__fold_sum_u64, dtrain__fold_sum_u64},
        {dtrain__fold_prod_f32, dtrain__fold_prod_f64, dtrain__fold_prod_u8, dtrain__fold_prod_u8,
         dtrain__fold_prod_u32, dtrain__fold_prod_u32, dtrain__fold_prod_u64, dtrain__fold_prod_u64},
        {dtrain__fold_min_f32, dtrain__fold_min_f64, dtrain__fold_min_i8, dtrain__fold_min_u8, dtrain__fold_min_i32,
         dtrain__fold_min_u32, dtrain__fold_min_i64, dtrain__fold_min_u64},
        {dtrain__fold_max_f32, dtrain__fold_max_f64, dtrain__fold_max_i8, dtrain__fold_max_u8, dtrain__fold_max_i32,
         dtrain__fold_max_u32, dtrain__fold_max_i64, dtrain__fold_max_u64}};
    int column = 0;
    if (op >= DTRAIN_AND) {
        bits[op - DTRAIN_AND](left, right, count * (dtrain_dtype_bits(dtype) / 8));
        return;
    }
    while (column < 7 && columns[column] != dtype)
        column++;
    values[op <= DTRAIN_MEAN ? 0 : op - DTRAIN_MEAN][column](left, right, count);
}

static void dtrain__fold_pair(dtrain_dtype dtype, dtrain_op op, void *left, const void *right, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__fold_pair_kernel(dtype, op, left, right, count);
    dtrain__fpmode_restore(mode);
}

static void dtrain__fold_divide(dtrain_dtype dtype, dtrain_op op, double divisor, void *partial, size_t count)
{
    if (op != DTRAIN_MEAN || divisor == 1)
        return;
    if (dtype == DTRAIN_F64)
        dtrain__fold_divide_f64(partial, divisor, count);
    else
        dtrain__fold_divide_f32(partial, divisor, count);
}

/* Turns partial results into results of dtype: divides a mean once, and rounds once. It may overwrite partial. If both
 * have the same dtype, out may be partial. */
static void dtrain__fold_finish(dtrain_dtype dtype, dtrain_op op, double divisor, void *partial, void *out,
                                size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_dtype wide = dtrain__fold_partial(dtype);
    dtrain__fold_divide(wide, op, divisor, partial, count);
    if (partial != out)
        dtrain__dtype_convert(partial, wide, out, dtype, count);
    dtrain__fpmode_restore(mode);
}

/* tile = tree over in[0 .. n-1], for count elements from byte `at` on. The levels below have the next tiles, each
 * `stride` bytes on. */
static void dtrain__fold_tree(dtrain_dtype dtype, dtrain_op op, const void *const *in, int n, size_t at, size_t count,
                              unsigned char *tile, size_t stride)
{
    dtrain_dtype wide = dtrain__fold_partial(dtype);
    int left = dtrain__fold_left(n);
    if (n == 1) {
        const unsigned char *from = (const unsigned char *)in[0] + at;
        if (wide == dtype)
            memcpy(tile, from, count * (dtrain_dtype_bits(dtype) / 8));
        else
            dtrain__dtype_convert(from, dtype, tile, wide, count);
        return;
    }
    dtrain__fold_tree(dtype, op, in, left, at, count, tile, stride);
    if (n - left == 1 && wide == dtype) {
        dtrain__fold_pair_kernel(wide, op, tile, (const unsigned char *)in[left] + at, count);
        return;
    }
    dtrain__fold_tree(dtype, op, in + left, n - left, at, count, tile + stride, stride);
    dtrain__fold_pair_kernel(wide, op, tile, tile + stride, count);
}

/* Folds as dtrain__fold does, to results of dtype `to`: dtype or its partial dtype. The caller has set the mode. */
static void dtrain__fold_tiles(dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n,
                               dtrain_dtype to, void *const *out, int m, size_t begin, size_t count)
{
    unsigned char tiles[DTRAIN__FOLD_LEVELS * DTRAIN__FOLD_TILE_BYTES] __attribute__((aligned(64)));
    size_t stride = n <= 1 << (DTRAIN__FOLD_LEVELS - 1) ? DTRAIN__FOLD_TILE_BYTES : DTRAIN__FOLD_SMALL;
    dtrain_dtype wide = dtrain__fold_partial(dtype);
    size_t width = dtrain_dtype_bits(dtype) / 8, to_width = dtrain_dtype_bits(to) / 8;
    size_t tile = stride / (dtrain_dtype_bits(wide) / 8);
    for (size_t at = begin; at < begin + count; at += tile) {
        size_t step = begin + count - at < tile ? begin + count - at : tile;
        unsigned char *result = tiles;
        dtrain__fold_tree(dtype, op, in, n, at * width, step, tiles, stride);
        dtrain__fold_divide(wide, op, divisor, tiles, step);
        if (wide != to) {
            dtrain__dtype_convert(tiles, wide, tiles + stride, to, step);
            result = tiles + stride;
        }
        for (int k = 0; k < m; k++)
            memcpy((unsigned char *)out[k] + at * to_width, result, step * to_width);
    }
}

/* out[i] = tree of sums over in[0 .. n-1][i], for i below count. Partial results: 16-bit floats are not rounded. */
static void dtrain__fold_partials(dtrain_dtype dtype, const void *const *in, int n, void *out, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__fold_tiles(dtype, DTRAIN_SUM, 1, in, n, dtrain__fold_partial(dtype), &out, 1, 0, count);
    dtrain__fpmode_restore(mode);
}

/* out[k][i] = tree over in[0 .. n-1][i], for i in [begin, begin + count) and every k below m. */
static void dtrain__fold(dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n,
                         void *const *out, int m, size_t begin, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    int mean = op == DTRAIN_MEAN && divisor != 1, direct = n == 2 || n == 4 || n == 8;
    direct = direct && (m == 1 || m == n) && (op == DTRAIN_SUM || op == DTRAIN_MEAN);
    size_t end = begin + count, rest = end - count % DTRAIN__ISA_BLOCK;
    if (direct && dtype == DTRAIN_F32) {
        if (rest > begin)
            dtrain__fold_direct_f32(in, n, out, m, begin, count, divisor, mean);
        dtrain__fold_direct_f32_rest(in, n, out, m, rest, end, divisor, mean);
    } else if (direct && dtype == DTRAIN_F64) {
        if (rest > begin)
            dtrain__fold_direct_f64(in, n, out, m, begin, count, divisor, mean);
        dtrain__fold_direct_f64_rest(in, n, out, m, rest, end, divisor, mean);
    } else
        dtrain__fold_tiles(dtype, op, divisor, in, n, dtype, out, m, begin, count);
    dtrain__fpmode_restore(mode);
}

#endif
