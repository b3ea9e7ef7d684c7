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
#include "../tensor/vector.c"

typedef struct dtrain__train_adamw_constants {
    float beta1, rest1; /* rest: 1 - beta */
    float beta2, rest2;
    float root;         /* 1 / sqrt(1 - beta2^step) */
    float eps;
    float rate;         /* lr / (1 - beta1^step) */
    float keep;         /* 1 - lr * weight_decay */
} dtrain__train_adamw_constants;

typedef struct dtrain__train_sgd_constants {
    float momentum, lr, keep, coupled;
    int nesterov;
} dtrain__train_sgd_constants;

typedef struct dtrain__train_kernels {
    void (*adamw)(float *p, const float *g, float *m, float *v, size_t count, const dtrain__train_adamw_constants *c);
    void (*sgd)(float *p, const float *g, float *velocity, size_t count, const dtrain__train_sgd_constants *c);
    void (*add)(float *out, const float *a, const float *b, size_t count);       /* out = a + b; out may be a or b */
    void (*divide)(float *out, const float *a, float divisor, size_t count);
    void (*multiply)(float *out, const float *a, float factor, size_t count);
} dtrain__train_kernels;

DTRAIN__EXACT_BEGIN

/* A compiler's back end may contract a product with the sum that follows, or approximate a root, whatever the
 * pragmas say. It does not look into these: the first is no instruction, the second is the one it should be. */
#if defined(DTRAIN__X86)
#ifdef __AVX__
#define DTRAIN__TRAIN_ROOT_sse2(x) __asm__("vsqrtps %0, %0" : "+x"(x))
#else
#define DTRAIN__TRAIN_ROOT_sse2(x) __asm__("sqrtps %0, %0" : "+x"(x))
#endif
#define DTRAIN__TRAIN_ROOT_avx2(x) __asm__("vsqrtps %0, %0" : "+x"(x))
#define DTRAIN__TRAIN_ROOT_avx512(x) __asm__("vsqrtps %0, %0" : "+v"(x))
#define DTRAIN__TRAIN_ROUNDED_scalar(x) __asm__("" : "+x"(x))
#define DTRAIN__TRAIN_ROUNDED_sse2(x) __asm__("" : "+x"(x))
#define DTRAIN__TRAIN_ROUNDED_avx2(x) __asm__("" : "+x"(x))
#define DTRAIN__TRAIN_ROUNDED_avx512(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define DTRAIN__TRAIN_ROUNDED_scalar(x) __asm__("" : "+w"(x))
#define DTRAIN__TRAIN_ROUNDED_neon(x) __asm__("" : "+w"(x))
#else
#define DTRAIN__TRAIN_ROUNDED_scalar(x) (x = dtrain__isa_rounded_f32(x, dtrain__isa_zero))
#endif

#define DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op)                                                           \
    target static void dtrain__train_adamw_##isa(float *p, const float *g, float *m, float *v, size_t count,          \
                                                 const dtrain__train_adamw_constants *c)                                    \
    {                                                                                                                 \
        vector beta1 = op##_set1_ps(c->beta1), rest1 = op##_set1_ps(c->rest1), beta2 = op##_set1_ps(c->beta2);        \
        vector rest2 = op##_set1_ps(c->rest2), root = op##_set1_ps(c->root), eps = op##_set1_ps(c->eps);              \
        vector rate = op##_set1_ps(c->rate), keep = op##_set1_ps(c->keep);                                            \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector gi = op##_loadu_ps(g + i), grown = gi * rest1, square = gi * gi;                                   \
            vector mi = op##_loadu_ps(m + i) * beta1, vi = op##_loadu_ps(v + i) * beta2;                              \
            vector kept = op##_loadu_ps(p + i) * keep, spread, change;                                                \
            square = square * rest2;                                                                                  \
            DTRAIN__TRAIN_ROUNDED_##isa(grown);                                                                             \
            DTRAIN__TRAIN_ROUNDED_##isa(square);                                                                            \
            DTRAIN__TRAIN_ROUNDED_##isa(mi);                                                                                \
            DTRAIN__TRAIN_ROUNDED_##isa(vi);                                                                                \
            DTRAIN__TRAIN_ROUNDED_##isa(kept);                                                                              \
            mi = mi + grown;                                                                                          \
            vi = vi + square;                                                                                         \
            spread = vi;                                                                                              \
            DTRAIN__TRAIN_ROOT_##isa(spread);                                                                               \
            spread = spread * root;                                                                                   \
            DTRAIN__TRAIN_ROUNDED_##isa(spread);                                                                            \
            change = mi / (spread + eps) * rate;                                                                      \
            DTRAIN__TRAIN_ROUNDED_##isa(change);                                                                            \
            op##_storeu_ps(m + i, mi);                                                                                \
            op##_storeu_ps(v + i, vi);                                                                                \
            op##_storeu_ps(p + i, kept - change);                                                                     \
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
                                               const dtrain__train_sgd_constants *c)                                        \
    {                                                                                                                 \
        vector momentum = op##_set1_ps(c->momentum), lr = op##_set1_ps(c->lr), keep = op##_set1_ps(c->keep);          \
        vector coupled = op##_set1_ps(c->coupled);                                                                    \
        int decays = c->coupled != 0.0f;                                                                              \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector pi = op##_loadu_ps(p + i), gi = op##_loadu_ps(g + i), product, kept;                               \
            if (decays) {                                                                                             \
                product = pi * coupled;                                                                               \
                DTRAIN__TRAIN_ROUNDED_##isa(product);                                                                       \
                gi = gi + product;                                                                                    \
            }                                                                                                         \
            if (velocity != NULL) {                                                                                   \
                product = op##_loadu_ps(velocity + i) * momentum;                                                     \
                DTRAIN__TRAIN_ROUNDED_##isa(product);                                                                       \
                vector vi = product + gi;                                                                             \
                op##_storeu_ps(velocity + i, vi);                                                                     \
                product = vi * momentum;                                                                              \
                DTRAIN__TRAIN_ROUNDED_##isa(product);                                                                       \
                if (c->nesterov)                                                                                      \
                    gi = gi + product;                                                                                \
                else                                                                                                  \
                    gi = vi;                                                                                          \
            }                                                                                                         \
            product = gi * lr;                                                                                        \
            kept = pi * keep;                                                                                         \
            DTRAIN__TRAIN_ROUNDED_##isa(product);                                                                           \
            DTRAIN__TRAIN_ROUNDED_##isa(kept);                                                                              \
            op##_storeu_ps(p + i, kept - product);                                                                    \
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

/* out = a operation b, where b may be one number for all. */
#define DTRAIN__TRAIN_MAP(name, isa, target, vector, width, op, b_parameter, b_vector, b_end, operation)              \
    target static void dtrain__train_##name##_##isa(float *out, const float *a, b_parameter, size_t count)            \
    {                                                                                                                 \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector x = op##_loadu_ps(a + i), y = b_vector;                                                            \
            op##_storeu_ps(out + i, x operation y);                                                                   \
        }                                                                                                             \
        if (i < count) {                                                                                              \
            float left[width] = {0}, right[width] = {0};                                                              \
            size_t bytes = (count - i) * sizeof(float);                                                               \
            memcpy(left, a + i, bytes);                                                                               \
            (void)&right[0];                                                                                          \
            b_end;                                                                                                    \
            memcpy(out + i, left, bytes);                                                                             \
        }                                                                                                             \
    }

#define DTRAIN__TRAIN_KERNELS_FOR(isa, target, vector, width, op)                                                     \
    DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op)                                                               \
    DTRAIN__TRAIN_SGD(isa, target, vector, width, op)                                                                 \
    DTRAIN__TRAIN_MAP(add, isa, target, vector, width, op, const float *b, op##_loadu_ps(b + i),                      \
                      (memcpy(right, b + i, bytes), dtrain__train_add_##isa(left, left, right, width)), +)            \
    DTRAIN__TRAIN_MAP(divide, isa, target, vector, width, op, float b, op##_set1_ps(b),                               \
                      dtrain__train_divide_##isa(left, left, b, width), /)                                            \
    DTRAIN__TRAIN_MAP(multiply, isa, target, vector, width, op, float b, op##_set1_ps(b),                             \
                      dtrain__train_multiply_##isa(left, left, b, width), *)                                          \
    static const dtrain__train_kernels dtrain__train_kernels_##isa = {                                                \
        dtrain__train_adamw_##isa, dtrain__train_sgd_##isa, dtrain__train_add_##isa, dtrain__train_divide_##isa,      \
        dtrain__train_multiply_##isa};

static float dtrain__train_one_loadu_ps(const float *from)
{
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void dtrain__train_one_storeu_ps(float *to, float value)
{
    memcpy(to, &value, sizeof value);
}

#define dtrain__train_one_set1_ps(a) (a)
#define DTRAIN__TRAIN_ROOT_scalar(x) (x = dtrain__isa_sqrt_f32(x))
DTRAIN__TRAIN_KERNELS_FOR(scalar, , float, 1, dtrain__train_one)

#if defined(DTRAIN__X86)
DTRAIN__TRAIN_KERNELS_FOR(sse2, , __m128, 4, _mm)
DTRAIN__TRAIN_KERNELS_FOR(avx2, __attribute__((target("avx2"))), __m256, 8, _mm256)
DTRAIN__TRAIN_KERNELS_FOR(avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512)
#elif defined(__aarch64__)
#define dtrain__train_neon_loadu_ps(from) vld1q_f32(from)
#define dtrain__train_neon_storeu_ps(to, value) vst1q_f32(to, value)
#define dtrain__train_neon_set1_ps(a) vdupq_n_f32(a)
#define DTRAIN__TRAIN_ROOT_neon(x) __asm__("fsqrt %0.4s, %0.4s" : "+w"(x))
DTRAIN__TRAIN_KERNELS_FOR(neon, , float32x4_t, 4, dtrain__train_neon)
#endif

DTRAIN__EXACT_END

static const dtrain__train_kernels *dtrain__train_kernels_get(void)
{
    switch (dtrain__isa()) {
#if defined(DTRAIN__X86)
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
