/* ---- >>tp-softmax ----
 * The softmax of rows of float32: the largest element, exponentials, their sum. Every operation is rounded by itself,
 * and none is from the C library, so that the bits are the same under any flags and instruction set. Sums and dot
 * products run in eight lanes of float64, where products of float32 are exact. NaN is recognised by its bits. */
#ifndef DTRAIN__TP_SOFTMAX
#define DTRAIN__TP_SOFTMAX
#include "../train/train_kernels.c"

#define DTRAIN__TP_LANES 8

DTRAIN__EXACT_BEGIN

/* exp(x) for x <= 0 and NaN, within 2 ulp, subnormal results included: 2^n times a polynomial of the remainder.
 *
 *   source   expf of the Cephes library, Moshier */
DTRAIN__INLINE float dtrain__tp_exp(float x, uint32_t zero)
{
    float bounded, n, r, square, p = 1.9875691500e-4f, high, low;
    uint32_t bits, size, rounded, power;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0x7FFFFFFFu;
    size = bits < 0x42D00000u ? bits : 0x42D00000u; /* 104: exp(-104) is 0 */
    size |= 0x80000000u;
    memcpy(&bounded, &size, sizeof bounded);
    n = dtrain__isa_rounded_f32(bounded * 1.44269504f, zero) +
        12582912.0f; /* 1.5 * 2^23: the last bits are an integer */
    memcpy(&rounded, &n, sizeof rounded);
    rounded -= 0x4B400000u;
    n = (float)(int32_t)rounded;
    r = (bounded - dtrain__isa_rounded_f32(n * 0.693359375f, zero)) + dtrain__isa_rounded_f32(n * 2.12194440e-4f, zero);
    p = dtrain__isa_rounded_f32(p * r, zero) + 1.3981999507e-3f;
    p = dtrain__isa_rounded_f32(p * r, zero) + 8.3334519073e-3f;
    p = dtrain__isa_rounded_f32(p * r, zero) + 4.1665795894e-2f;
    p = dtrain__isa_rounded_f32(p * r, zero) + 1.6666665459e-1f;
    p = dtrain__isa_rounded_f32(p * r, zero) + 5.0000001201e-1f;
    square = dtrain__isa_rounded_f32(r * r, zero);
    p = dtrain__isa_rounded_f32(p * square, zero) + r;
    power = rounded + 256u; /* n is at least -150: two normal factors, and only the last product rounds */
    size = (power / 2 - 1u) << 23;
    memcpy(&high, &size, sizeof high);
    size = (power - power / 2 - 1u) << 23;
    memcpy(&low, &size, sizeof low);
    p = dtrain__isa_rounded_f32((p + 1.0f) * high, zero) * low;
    memcpy(&size, &p, sizeof size);
    /* for NaN, size is 0 here; a conditional would be a branch and keep the loop from being vectorised */
    size |= (0u - ((0x7F800000u - bits) >> 31)) & 0x7FC00000u;
    memcpy(&p, &size, sizeof p);
    return p;
}

/* The largest element by the order of bits; -infinity for none. A positive NaN is the largest; a negative NaN is not
 * found here, but makes the sum of exponentials NaN. */
DTRAIN__INLINE void dtrain__tp_max_body(const float *from, size_t count, float *out)
{
    const dtrain__i32 *x = (const dtrain__i32 *)from;
    int32_t lanes[DTRAIN__TP_LANES], most = (int32_t)0x807FFFFF;
    size_t i = 0;
    for (int k = 0; k < DTRAIN__TP_LANES; k++)
        lanes[k] = most;
    for (; count - i >= DTRAIN__TP_LANES; i += DTRAIN__TP_LANES)
        for (size_t k = 0; k < DTRAIN__TP_LANES; k++) {
            int32_t key = x[i + k] ^ (x[i + k] >> 31 & 0x7FFFFFFF);
            lanes[k] = key > lanes[k] ? key : lanes[k];
        }
    for (; i < count; i++) {
        int32_t key = x[i] ^ (x[i] >> 31 & 0x7FFFFFFF);
        most = key > most ? key : most;
    }
    for (int k = 0; k < DTRAIN__TP_LANES; k++)
        most = lanes[k] > most ? lanes[k] : most;
    most = most ^ (most >> 31 & 0x7FFFFFFF);
    memcpy(out, &most, sizeof most);
}
DTRAIN__KERNEL(dtrain__tp_max, (const float *from, size_t count, float *out), (from, count, out))

/* x[i] = exp(x[i] - most) */
DTRAIN__INLINE void dtrain__tp_exps_body(float *data, size_t count, float most)
{
    dtrain__f32 *x = (dtrain__f32 *)data;
    uint32_t zero = dtrain__isa_zero;
    DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) x[i] = dtrain__tp_exp(x[i] - most, zero);
}
DTRAIN__KERNEL(dtrain__tp_exps, (float *data, size_t count, float most), (data, count, most))

#define DTRAIN__TP_JOIN(l) (((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7])))

DTRAIN__INLINE void dtrain__tp_sum_body(const float *from, size_t count, double *out)
{
    const dtrain__f32 *x = (const dtrain__f32 *)from;
    double lanes[DTRAIN__TP_LANES] = {0, 0, 0, 0, 0, 0, 0, 0};
    size_t i = 0;
    for (; count - i >= DTRAIN__TP_LANES; i += DTRAIN__TP_LANES)
        for (size_t k = 0; k < DTRAIN__TP_LANES; k++)
            lanes[k] = lanes[k] + (double)x[i + k];
    for (size_t k = 0; i < count; i++, k++)
        lanes[k] = lanes[k] + (double)x[i];
    *out = DTRAIN__TP_JOIN(lanes);
}
DTRAIN__KERNEL(dtrain__tp_sum, (const float *from, size_t count, double *out), (from, count, out))

/* Products are exact, so that the bits are the same with contraction and without. */
DTRAIN__INLINE void dtrain__tp_dot_body(const float *left, const float *right, size_t count, double *out)
{
    const dtrain__f32 *a = (const dtrain__f32 *)left, *b = (const dtrain__f32 *)right;
    double lanes[DTRAIN__TP_LANES] = {0, 0, 0, 0, 0, 0, 0, 0};
    size_t i = 0;
    for (; count - i >= DTRAIN__TP_LANES; i += DTRAIN__TP_LANES)
        for (size_t k = 0; k < DTRAIN__TP_LANES; k++)
            lanes[k] = lanes[k] + (double)a[i + k] * (double)b[i + k];
    for (size_t k = 0; i < count; i++, k++)
        lanes[k] = lanes[k] + (double)a[i] * (double)b[i];
    *out = DTRAIN__TP_JOIN(lanes);
}
DTRAIN__KERNEL(dtrain__tp_dot, (const float *left, const float *right, size_t count, double *out),
               (left, right, count, out))

/* p[i] = p[i] * (d[i] - mean): from the gradient of a probability to that of its score */
DTRAIN__INLINE void dtrain__tp_slope_body(float *probabilities, const float *slopes, size_t count, float mean)
{
    dtrain__f32 *p = (dtrain__f32 *)probabilities;
    const dtrain__f32 *d = (const dtrain__f32 *)slopes;
    DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) p[i] = p[i] * (d[i] - mean);
}
DTRAIN__KERNEL(dtrain__tp_slope, (float *probabilities, const float *slopes, size_t count, float mean),
               (probabilities, slopes, count, mean))

/* log(x) for x >= 1 and NaN, within 2 ulp: x = 2^e m with sqrt(1/2) <= m < sqrt(2), and log(m) by the series of atanh.
 */
static double dtrain__tp_log(double x)
{
    uint32_t zero = dtrain__isa_zero;
    uint64_t bits, mantissa;
    double m, s, square, p = 0, e;
    memcpy(&bits, &x, sizeof bits);
    if (bits >> 52 >= 0x7FF)
        return x;
    mantissa = bits & 0xFFFFFFFFFFFFFu;
    int above = mantissa >= 0x6A09E667F3BCDu; /* sqrt(2) */
    mantissa |= (uint64_t)(above ? 0x3FE : 0x3FF) << 52;
    memcpy(&m, &mantissa, sizeof m);
    e = (double)((int)(bits >> 52) - 0x3FF + above);
    s = (m - 1.0) / (m + 1.0);
    square = dtrain__isa_rounded_f64(s * s, zero);
    for (int k = 23; k >= 3; k -= 2)
        p = dtrain__isa_rounded_f64((p + 1.0 / (double)k) * square, zero);
    p = dtrain__isa_rounded_f64(2.0 * s, zero) + dtrain__isa_rounded_f64(2.0 * s * p, zero);
    return dtrain__isa_rounded_f64(e * 6.93147180369123816490e-01, zero) +
           (p + dtrain__isa_rounded_f64(e * 1.90821492927058770002e-10, zero));
}

/* Turns a row into probabilities. */
static void dtrain__tp_softmax_row(float *x, size_t count)
{
    float most;
    double sum;
    dtrain__tp_max(x, count, &most);
    dtrain__tp_exps(x, count, most);
    dtrain__tp_sum(x, count, &sum);
    dtrain__fold_divide_f32(x, sum, count);
}

DTRAIN__EXACT_END

#endif
