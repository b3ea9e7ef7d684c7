/* ---- >>vector ----
 * Elementwise kernels over float32 and float64, and the sum of squares. Products are rounded before they are added.
 * 16-bit tensors are converted to float32, one tile at a time. */
#ifndef DTRAIN__VECTOR
#define DTRAIN__VECTOR
#include "tensor.h"
#include "isa.c"
#include "dtype.c"
#include "fold.c"

DTRAIN__EXACT_BEGIN

/* y[i] = y[i] + factor * x[i] */
#define DTRAIN__VECTOR_AXPY(name, type, rounded) \
    DTRAIN__LOOP(name, (void *to, double factor, const void *from, size_t count), (to, factor, from, count), \
                 type *y = (type *)to; const type *x = (const type *)from; type by = (type)factor; \
                 uint32_t zero = dtrain__isa_zero, y[i] = y[i] + rounded(by * x[i], zero))

/* Element i goes to lane i % 8. The square of a float32 is exact in float64. */
DTRAIN__INLINE void dtrain__vector_squares_body(const float *data, size_t count, double lanes[8])
{
    const dtrain__f32 *x = (const dtrain__f32 *)data;
    uint32_t zero = dtrain__isa_zero;
    double l[8] = {0};
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int k = 0; k < 8; k++)
            l[k] = l[k] + dtrain__isa_rounded_f64((double)x[i + (size_t)k] * (double)x[i + (size_t)k], zero);
    for (int k = 0; i < count; i++, k++)
        l[k] = l[k] + dtrain__isa_rounded_f64((double)x[i] * (double)x[i], zero);
    for (int k = 0; k < 8; k++)
        lanes[k] = l[k];
}
DTRAIN__KERNEL(dtrain__vector_squares, (const float *data, size_t count, double lanes[8]), (data, count, lanes))

DTRAIN__VECTOR_AXPY(dtrain__vector_axpy_f32, dtrain__f32, dtrain__isa_rounded_f32)
DTRAIN__VECTOR_AXPY(dtrain__vector_axpy_f64, dtrain__f64, dtrain__isa_rounded_f64)

static double dtrain__vector_sqrt_f64(double square)
{
#if defined(DTRAIN__X86)
    __m128d both = _mm_set_sd(square); /* one instruction: the C library's function may set errno */
    return _mm_cvtsd_f64(_mm_sqrt_sd(both, both));
#else
    return __builtin_sqrt(square);
#endif
}

/* Returns the sum of squares. It joins the lanes as a tree. The caller has set the mode. */
static double dtrain__vector_sum_squares(const float *data, size_t count)
{
    double lanes[8];
    dtrain__vector_squares(data, count, lanes);
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

DTRAIN__EXACT_END

/* y[i] *= factor if x is NULL, else y[i] += factor * x[i], on a tile or array of float32 or float64. */
static void dtrain__vector_wide(dtrain_dtype dtype, void *y, double factor, const void *x, size_t count)
{
    int wide = dtype == DTRAIN_F64;
    if (x == NULL)
        (wide ? dtrain__fold_weigh_f64 : dtrain__fold_weigh_f32)(y, factor, y, count);
    else
        (wide ? dtrain__vector_axpy_f64 : dtrain__vector_axpy_f32)(y, factor, x, count);
}

/* The same for any of the four float dtypes. */
static void dtrain__vector(dtrain_dtype dtype, void *y, double factor, const void *x, size_t count)
{
    float a[512], b[512];
    unsigned char *to = (unsigned char *)y;
    const unsigned char *from = (const unsigned char *)x;
    uint64_t mode = dtrain__fpmode_enter();
    if (dtype == DTRAIN_F64 || dtype == DTRAIN_F32) {
        dtrain__vector_wide(dtype, y, factor, x, count);
        count = 0;
    }
    for (size_t at = 0; at < count; at += 512) {
        size_t n = count - at < 512 ? count - at : 512;
        dtrain__dtype_convert(to + 2 * at, dtype, a, DTRAIN_F32, n);
        if (x != NULL)
            dtrain__dtype_convert(from + 2 * at, dtype, b, DTRAIN_F32, n);
        dtrain__vector_wide(DTRAIN_F32, a, factor, x != NULL ? b : NULL, n);
        dtrain__dtype_convert(a, DTRAIN_F32, to + 2 * at, dtype, n);
    }
    dtrain__fpmode_restore(mode);
}

#endif
