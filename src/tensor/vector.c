/* ---- >>vector ----
 * Elementwise kernels over float32 and float64, and the sum of squares. Products are rounded before they
 * are added to anything. 16-bit tensors go through float32 a tile at a time. */
#ifndef DTRAIN__VECTOR
#define DTRAIN__VECTOR
#include "tensor.h"
#include "isa.c"
#include "dtype.c"
#include "fold.c"

DTRAIN__EXACT_BEGIN

/* y[i] = y[i] + factor * x[i] */
#define DTRAIN__VECTOR_AXPY(name, type, rounded)                                                                       \
    DTRAIN__LOOP(name, (void *to, double factor, const void *from, size_t count), (to, factor, from, count),           \
                 type *y = (type *)to; const type *x = (const type *)from; type by = (type)factor;                     \
                 uint32_t zero = dtrain__isa_zero, y[i] = y[i] + rounded(by * x[i], zero))

/* Lane i % 8 takes element i; lanes are joined as a tree. A float32's square is exact in float64. */
#define DTRAIN__VECTOR_SQUARES_KERNEL(name, type)                                                                 \
    DTRAIN__INLINE void name##_body(const void *data, size_t count, double *lanes)                                \
    {                                                                                                             \
        const type *x = (const type *)data;                                                                       \
        uint32_t zero = dtrain__isa_zero;                                                                         \
        double l[8];                                                                                              \
        size_t i = 0;                                                                                             \
        for (int k = 0; k < 8; k++)                                                                               \
            l[k] = lanes[k];                                                                                      \
        for (; i + 8 <= count; i += 8)                                                                            \
            for (int k = 0; k < 8; k++)                                                                           \
                l[k] = l[k] + dtrain__isa_rounded_f64((double)x[i + (size_t)k] * (double)x[i + (size_t)k], zero); \
        for (int k = 0; i < count; i++, k++)                                                                      \
            l[k] = l[k] + dtrain__isa_rounded_f64((double)x[i] * (double)x[i], zero);                             \
        for (int k = 0; k < 8; k++)                                                                               \
            lanes[k] = l[k];                                                                                      \
    }                                                                                                             \
    DTRAIN__KERNEL(name, (const void *data, size_t count, double *lanes), (data, count, lanes))

DTRAIN__VECTOR_AXPY(dtrain__vector_axpy_f32, dtrain__f32, dtrain__isa_rounded_f32)
DTRAIN__VECTOR_AXPY(dtrain__vector_axpy_f64, dtrain__f64, dtrain__isa_rounded_f64)
DTRAIN__VECTOR_SQUARES_KERNEL(dtrain__vector_squares_f32, dtrain__f32)
DTRAIN__VECTOR_SQUARES_KERNEL(dtrain__vector_squares_f64, dtrain__f64)

static double dtrain__vector_sqrt_f64(double square)
{
#if defined(DTRAIN__X86)
    __m128d both = _mm_set_sd(square); /* one instruction: the C library's may set errno */
    return _mm_cvtsd_f64(_mm_sqrt_sd(both, both));
#else
    return __builtin_sqrt(square);
#endif
}

static double dtrain__vector_squares_total(const double *lanes)
{
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

DTRAIN__EXACT_END

/* The sum of squares of count elements of a float dtype; the caller has set the mode. */
static double dtrain__vector_sum_squares(dtrain_dtype dtype, const void *data, size_t count)
{
    double lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    float tile[512];
    if (dtype == DTRAIN_F64) {
        dtrain__vector_squares_f64(data, count, lanes);
    } else if (dtype == DTRAIN_F32) {
        dtrain__vector_squares_f32(data, count, lanes);
    } else {
        for (size_t at = 0; at < count; at += 512) {
            size_t n = count - at < 512 ? count - at : 512;
            dtrain__dtype_convert((const unsigned char *)data + 2 * at, dtype, tile, DTRAIN_F32, n);
            dtrain__vector_squares_f32(tile, n, lanes);
        }
    }
    return dtrain__vector_squares_total(lanes);
}

typedef enum dtrain__vector_op { DTRAIN__VECTOR_ADD, DTRAIN__VECTOR_SCALE, DTRAIN__VECTOR_AXPY } dtrain__vector_op;

/* y op= x on one tile or array of float32 or float64. */
static void dtrain__vector_wide(dtrain__vector_op op, dtrain_dtype dtype, void *y, double factor, const void *x,
                                size_t count)
{
    int wide = dtype == DTRAIN_F64;
    if (op == DTRAIN__VECTOR_ADD)
        (wide ? dtrain__fold_sum_f64 : dtrain__fold_sum_f32)(y, x, count);
    else if (op == DTRAIN__VECTOR_SCALE)
        (wide ? dtrain__fold_weigh_f64 : dtrain__fold_weigh_f32)(y, factor, y, count);
    else
        (wide ? dtrain__vector_axpy_f64 : dtrain__vector_axpy_f32)(y, factor, x, count);
}

/* y op= x for 16-bit floats, a tile at a time; x is NULL for a scale. */
static void dtrain__vector_narrow(dtrain__vector_op op, dtrain_dtype dtype, unsigned char *y, double factor,
                                  const unsigned char *x, size_t count)
{
    float a[512], b[512] = {0};
    for (size_t at = 0; at < count; at += 512) {
        size_t n = count - at < 512 ? count - at : 512;
        dtrain__dtype_convert(y + 2 * at, dtype, a, DTRAIN_F32, n);
        if (x != NULL)
            dtrain__dtype_convert(x + 2 * at, dtype, b, DTRAIN_F32, n);
        dtrain__vector_wide(op, DTRAIN_F32, a, factor, b, n);
        dtrain__dtype_convert(a, DTRAIN_F32, y + 2 * at, dtype, n);
    }
}

/* y op= x for any of the four float dtypes. */
static void dtrain__vector(dtrain__vector_op op, dtrain_dtype dtype, void *y, double factor, const void *x,
                           size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    if (dtype == DTRAIN_F64 || dtype == DTRAIN_F32)
        dtrain__vector_wide(op, dtype, y, factor, x, count);
    else
        dtrain__vector_narrow(op, dtype, (unsigned char *)y, factor, (const unsigned char *)x, count);
    dtrain__fpmode_restore(mode);
}

#endif
