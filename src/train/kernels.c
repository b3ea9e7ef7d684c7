/* ---- >>train-kernels ----
 * The loops over elements of this floor, once for each instruction set. Every operation is rounded by itself and no
 * order is left open, so that all of them give the same bits; ends shorter than a vector go through a padded one.
 * Nothing here allocates or fails, and any alignment will do. */
#ifndef DTRAIN__TRAIN_KERNELS
#define DTRAIN__TRAIN_KERNELS
#include "train.h"
#include "../base/platform.h"
#include "../base/memory.c"
#include "../tensor/isa.c"

typedef struct dtrain__adamw_constants {
    float beta1, rest1; /* rest: 1 - beta */
    float beta2, rest2;
    float root;         /* 1 / sqrt(1 - beta2^step) */
    float eps;
    float rate;         /* lr / (1 - beta1^step) */
    float keep;         /* 1 - lr * weight_decay */
} dtrain__adamw_constants;

typedef struct dtrain__sgd_constants {
    float momentum, lr, keep, coupled;
    int nesterov;
} dtrain__sgd_constants;

typedef struct dtrain__train_kernels {
    void (*adamw)(float *p, const float *g, float *m, float *v, size_t count, const dtrain__adamw_constants *c);
    void (*sgd)(float *p, const float *g, float *velocity, size_t count, const dtrain__sgd_constants *c);
    void (*add)(float *out, const float *a, const float *b, size_t count);       /* out = a + b; out may be a or b */
    void (*divide)(float *out, const float *a, float divisor, size_t count);
    void (*multiply)(float *out, const float *a, float factor, size_t count);
} dtrain__train_kernels;

DTRAIN__EXACT_BEGIN

#define DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op)                                                           \
    target static void dtrain__train_adamw_##isa(float *p, const float *g, float *m, float *v, size_t count,          \
                                                 const dtrain__adamw_constants *c)                                    \
    {                                                                                                                 \
        vector beta1 = op##_set1_ps(c->beta1), rest1 = op##_set1_ps(c->rest1), beta2 = op##_set1_ps(c->beta2);        \
        vector rest2 = op##_set1_ps(c->rest2), root = op##_set1_ps(c->root), eps = op##_set1_ps(c->eps);              \
        vector rate = op##_set1_ps(c->rate), keep = op##_set1_ps(c->keep);                                            \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector gi = op##_loadu_ps(g + i), kept = op##_mul_ps(op##_loadu_ps(p + i), keep);                         \
            vector mi = op##_add_ps(op##_mul_ps(op##_loadu_ps(m + i), beta1), op##_mul_ps(gi, rest1));                \
            vector square = op##_mul_ps(gi, gi);                                                                      \
            vector vi = op##_add_ps(op##_mul_ps(op##_loadu_ps(v + i), beta2), op##_mul_ps(square, rest2));            \
            vector spread = op##_add_ps(op##_mul_ps(dtrain__train_sqrt_##isa(vi), root), eps);                                    \
            op##_storeu_ps(m + i, mi);                                                                                \
            op##_storeu_ps(v + i, vi);                                                                                \
            op##_storeu_ps(p + i, op##_sub_ps(kept, op##_mul_ps(op##_div_ps(mi, spread), rate)));                     \
        }                                                                                                             \
        if (i < count) {                                                                                              \
            float end[4][width] = {{0}};                                                                              \
            size_t bytes = (count - i) * sizeof(float);                                                               \
            memcpy(end[0], p + i, bytes);                                                                             \
            memcpy(end[1], g + i, bytes);                                                                             \
            memcpy(end[2], m + i, bytes);                                                                             \
            memcpy(end[3], v + i, bytes);                                                                             \
            dtrain__train_adamw_##isa(end[0], end[1], end[2], end[3], width, c);                                      \
            memcpy(p + i, end[0], bytes);                                                                             \
            memcpy(m + i, end[2], bytes);                                                                             \
            memcpy(v + i, end[3], bytes);                                                                             \
        }                                                                                                             \
    }

/* Without momentum the velocity is the gradient and is not kept. */
#define DTRAIN__TRAIN_SGD(isa, target, vector, width, op)                                                             \
    target static void dtrain__train_sgd_##isa(float *p, const float *g, float *velocity, size_t count,               \
                                               const dtrain__sgd_constants *c)                                        \
    {                                                                                                                 \
        vector momentum = op##_set1_ps(c->momentum), lr = op##_set1_ps(c->lr), keep = op##_set1_ps(c->keep);          \
        vector coupled = op##_set1_ps(c->coupled);                                                                    \
        int decays = c->coupled != 0.0f;                                                                              \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector pi = op##_loadu_ps(p + i), gi = op##_loadu_ps(g + i);                                              \
            if (decays)                                                                                               \
                gi = op##_add_ps(gi, op##_mul_ps(pi, coupled));                                                       \
            if (velocity != NULL) {                                                                                   \
                vector vi = op##_add_ps(op##_mul_ps(op##_loadu_ps(velocity + i), momentum), gi);                      \
                op##_storeu_ps(velocity + i, vi);                                                                     \
                gi = c->nesterov ? op##_add_ps(gi, op##_mul_ps(vi, momentum)) : vi;                                   \
            }                                                                                                         \
            op##_storeu_ps(p + i, op##_sub_ps(op##_mul_ps(pi, keep), op##_mul_ps(gi, lr)));                           \
        }                                                                                                             \
        if (i < count) {                                                                                              \
            float end[3][width] = {{0}};                                                                              \
            size_t bytes = (count - i) * sizeof(float);                                                               \
            memcpy(end[0], p + i, bytes);                                                                             \
            memcpy(end[1], g + i, bytes);                                                                             \
            if (velocity != NULL)                                                                                     \
                memcpy(end[2], velocity + i, bytes);                                                                  \
            dtrain__train_sgd_##isa(end[0], end[1], velocity != NULL ? end[2] : NULL, width, c);                      \
            memcpy(p + i, end[0], bytes);                                                                             \
            if (velocity != NULL)                                                                                     \
                memcpy(velocity + i, end[2], bytes);                                                                  \
        }                                                                                                             \
    }

/* out = expression of a and b, where b may be one number for all. */
#define DTRAIN__TRAIN_MAP(name, isa, target, vector, width, op, b_parameter, b_vector, b_end, expression)             \
    target static void dtrain__train_##name##_##isa(float *out, const float *a, b_parameter, size_t count)            \
    {                                                                                                                 \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector x = op##_loadu_ps(a + i), y = b_vector;                                                            \
            op##_storeu_ps(out + i, op##_##expression##_ps(x, y));                                                    \
        }                                                                                                             \
        if (i < count) {                                                                                              \
            float left[width] = {0}, right[width] = {0};                                                              \
            size_t bytes = (count - i) * sizeof(float);                                                               \
            memcpy(left, a + i, bytes);                                                                               \
            (void)right;                                                                                              \
            b_end;                                                                                                    \
            memcpy(out + i, left, bytes);                                                                             \
        }                                                                                                             \
    }

#define DTRAIN__TRAIN_KERNELS_FOR(isa, target, vector, width, op)                                                     \
    DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op)                                                               \
    DTRAIN__TRAIN_SGD(isa, target, vector, width, op)                                                                 \
    DTRAIN__TRAIN_MAP(add, isa, target, vector, width, op, const float *b, op##_loadu_ps(b + i),                      \
                      (memcpy(right, b + i, bytes), dtrain__train_add_##isa(left, left, right, width)), add)          \
    DTRAIN__TRAIN_MAP(divide, isa, target, vector, width, op, float b, op##_set1_ps(b),                               \
                      dtrain__train_divide_##isa(left, left, b, width), div)                                          \
    DTRAIN__TRAIN_MAP(multiply, isa, target, vector, width, op, float b, op##_set1_ps(b),                             \
                      dtrain__train_multiply_##isa(left, left, b, width), mul)                                        \
    static const dtrain__train_kernels dtrain__train_kernels_##isa = {                                                \
        dtrain__train_adamw_##isa, dtrain__train_sgd_##isa, dtrain__train_add_##isa, dtrain__train_divide_##isa,      \
        dtrain__train_multiply_##isa};

/* Square roots that are one instruction: the C library's may set errno. */
#if defined(__x86_64__)
static float dtrain__train_rootf(float square)
{
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(square)));
}

static double dtrain__train_root(double square)
{
    __m128d both = _mm_set_sd(square);
    return _mm_cvtsd_f64(_mm_sqrt_sd(both, both));
}
#else
static float dtrain__train_rootf(float square)
{
    return __builtin_sqrtf(square);
}

static double dtrain__train_root(double square)
{
    return __builtin_sqrt(square);
}
#endif

static float dtrain__train_ratio(double over, double under)
{
    return (float)(over / under);
}

static float dtrain__one_loadu_ps(const float *from)
{
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void dtrain__one_storeu_ps(float *to, float value)
{
    memcpy(to, &value, sizeof value);
}

#define dtrain__one_set1_ps(a) (a)
#define dtrain__one_add_ps(a, b) ((a) + (b))
#define dtrain__one_sub_ps(a, b) ((a) - (b))
#define dtrain__one_mul_ps(a, b) ((a) * (b))
#define dtrain__one_div_ps(a, b) ((a) / (b))
#define dtrain__train_sqrt_scalar(a) dtrain__train_rootf(a)
DTRAIN__TRAIN_KERNELS_FOR(scalar, , float, 1, dtrain__one)

#if defined(__x86_64__)
#define dtrain__train_sqrt_sse2(a) _mm_sqrt_ps(a)
#define dtrain__train_sqrt_avx2(a) _mm256_sqrt_ps(a)
/* _mm512_sqrt_ps warns of an undefined operand in gcc's own header. */
#define dtrain__train_sqrt_avx512(a) _mm512_mask_sqrt_ps(a, 0xFFFF, a)
DTRAIN__TRAIN_KERNELS_FOR(sse2, , __m128, 4, _mm)
DTRAIN__TRAIN_KERNELS_FOR(avx2, __attribute__((target("avx2"))), __m256, 8, _mm256)
DTRAIN__TRAIN_KERNELS_FOR(avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512)
#elif defined(__aarch64__)
#define dtrain__neon_loadu_ps(from) vld1q_f32(from)
#define dtrain__neon_storeu_ps(to, value) vst1q_f32(to, value)
#define dtrain__neon_set1_ps(a) vdupq_n_f32(a)
#define dtrain__neon_add_ps(a, b) vaddq_f32(a, b)
#define dtrain__neon_sub_ps(a, b) vsubq_f32(a, b)
#define dtrain__neon_mul_ps(a, b) vmulq_f32(a, b)
#define dtrain__neon_div_ps(a, b) vdivq_f32(a, b)
#define dtrain__train_sqrt_neon(a) vsqrtq_f32(a)
DTRAIN__TRAIN_KERNELS_FOR(neon, , float32x4_t, 4, dtrain__neon)
#endif

DTRAIN__EXACT_END

static const dtrain__train_kernels *dtrain__train_kernels_get(void)
{
    switch (dtrain__isa()) {
#if defined(__x86_64__)
    case DTRAIN__ISA_SSE2: return &dtrain__train_kernels_sse2;
    case DTRAIN__ISA_AVX2: return &dtrain__train_kernels_avx2;
    case DTRAIN__ISA_AVX512: return &dtrain__train_kernels_avx512;
#elif defined(__aarch64__)
    case DTRAIN__ISA_NEON: return &dtrain__train_kernels_neon;
#endif
    default: return &dtrain__train_kernels_scalar;
    }
}

/* Numbers are judged by their bits: under -Ofast a compiler takes every number for finite. */
static int dtrain__train_finite(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7FF) != 0x7FF;
}

#endif
