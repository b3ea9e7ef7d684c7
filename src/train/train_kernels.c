/* ---- >>train-kernels ----
 * The steps of AdamW and SGD over float32, once for each instruction set. Every operation is rounded by itself in a
 * fixed order, so all instruction sets give the same bits. Nothing here allocates. Any alignment will do. */
#ifndef DTRAIN__TRAIN_KERNELS
#define DTRAIN__TRAIN_KERNELS
#include "train.h"
#include "../base/memory.c"
#include "../tensor/isa.c"
#include "../tensor/vector.c"

/* A kernel makes a step over whole blocks. The constants of the step are in its struct for devices.
 *
 *   x[0]   gradients, only read
 *   x[1]   parameters
 *   x[2]   AdamW's m, or SGD's velocity: NULL without momentum
 *   x[3]   AdamW's v */
typedef void (*dtrain__train_kernel)(float *const x[4], size_t count, const void *step);

DTRAIN__EXACT_BEGIN

/* A compiler's back end may ignore the pragmas: it may contract a product with the sum that follows, or approximate a
 * root. It does not look into these macros. ROUNDED emits no instruction, ROOT emits the exact square root. */
#if defined(DTRAIN__X86)
#define DTRAIN__TRAIN_ROUNDED_base(x) __asm__("" : "+x"(x))
#define DTRAIN__TRAIN_ROUNDED_avx2(x) __asm__("" : "+x"(x))
#define DTRAIN__TRAIN_ROUNDED_avx512(x) __asm__("" : "+v"(x))
#ifdef __AVX__
#define DTRAIN__TRAIN_ROOT_base(x) __asm__("vsqrtps %0, %0" : "+x"(x))
#else
#define DTRAIN__TRAIN_ROOT_base(x) __asm__("sqrtps %0, %0" : "+x"(x))
#endif
#define DTRAIN__TRAIN_ROOT_avx2(x) __asm__("vsqrtps %0, %0" : "+x"(x))
#define DTRAIN__TRAIN_ROOT_avx512(x) __asm__("vsqrtps %0, %0" : "+v"(x))
#elif defined(DTRAIN__NEON)
#define DTRAIN__TRAIN_ROUNDED_base(x) __asm__("" : "+w"(x))
#define DTRAIN__TRAIN_ROUNDED_neon(x) __asm__("" : "+w"(x))
#define DTRAIN__TRAIN_ROOT_base(x) __asm__("fsqrt %s0, %s0" : "+w"(x))
#define DTRAIN__TRAIN_ROOT_neon(x) __asm__("fsqrt %0.4s, %0.4s" : "+w"(x))
#else
#define DTRAIN__TRAIN_ROUNDED_base(x) x = dtrain__isa_rounded_f32(x, dtrain__isa_zero)
#define DTRAIN__TRAIN_ROOT_base(x) x = __builtin_sqrtf(x)
#endif

#define DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op) \
    target static void dtrain__train_adamw_blocks_##isa(float *const x[4], size_t count, const void *step) \
    { \
        const dtrain_device_adamw_step *c = (const dtrain_device_adamw_step *)step; \
        vector beta1 = op##_set1_ps(c->beta1), rest1 = op##_set1_ps(c->rest1), beta2 = op##_set1_ps(c->beta2); \
        vector rest2 = op##_set1_ps(c->rest2), root = op##_set1_ps(c->root), eps = op##_set1_ps(c->eps); \
        vector rate = op##_set1_ps(c->rate), keep = op##_set1_ps(c->keep); \
        float *p = x[1], *m = x[2], *v = x[3]; \
        for (size_t i = 0; i < count; i += width) { \
            vector gi = op##_loadu_ps(x[0] + i), grown = gi * rest1, square = gi * gi; \
            vector mi = op##_loadu_ps(m + i) * beta1, vi = op##_loadu_ps(v + i) * beta2; \
            vector kept = op##_loadu_ps(p + i) * keep, spread, change; \
            square = square * rest2; \
            DTRAIN__TRAIN_ROUNDED_##isa(grown); \
            DTRAIN__TRAIN_ROUNDED_##isa(square); \
            DTRAIN__TRAIN_ROUNDED_##isa(mi); \
            DTRAIN__TRAIN_ROUNDED_##isa(vi); \
            DTRAIN__TRAIN_ROUNDED_##isa(kept); \
            mi = mi + grown; \
            vi = vi + square; \
            spread = vi; \
            DTRAIN__TRAIN_ROOT_##isa(spread); \
            spread = spread * root; \
            DTRAIN__TRAIN_ROUNDED_##isa(spread); \
            change = mi / (spread + eps) * rate; \
            DTRAIN__TRAIN_ROUNDED_##isa(change); \
            op##_storeu_ps(m + i, mi); \
            op##_storeu_ps(v + i, vi); \
            op##_storeu_ps(p + i, kept - change); \
        } \
    }

#define DTRAIN__TRAIN_SGD(isa, target, vector, width, op) \
    target static void dtrain__train_sgd_blocks_##isa(float *const x[4], size_t count, const void *step) \
    { \
        const dtrain_device_sgd_step *c = (const dtrain_device_sgd_step *)step; \
        vector momentum = op##_set1_ps(c->momentum), lr = op##_set1_ps(c->lr), keep = op##_set1_ps(c->keep); \
        vector coupled = op##_set1_ps(c->coupled); \
        float *p = x[1], *velocity = x[2]; \
        int decays = c->coupled != 0.0f; \
        for (size_t i = 0; i < count; i += width) { \
            vector pi = op##_loadu_ps(p + i), gi = op##_loadu_ps(x[0] + i), product, kept; \
            if (decays) { \
                product = pi * coupled; \
                DTRAIN__TRAIN_ROUNDED_##isa(product); \
                gi = gi + product; \
            } \
            if (velocity != NULL) { \
                product = op##_loadu_ps(velocity + i) * momentum; \
                DTRAIN__TRAIN_ROUNDED_##isa(product); \
                vector vi = product + gi; \
                op##_storeu_ps(velocity + i, vi); \
                product = vi * momentum; \
                DTRAIN__TRAIN_ROUNDED_##isa(product); \
                if (c->nesterov) \
                    gi = gi + product; \
                else \
                    gi = vi; \
            } \
            product = gi * lr; \
            kept = pi * keep; \
            DTRAIN__TRAIN_ROUNDED_##isa(product); \
            DTRAIN__TRAIN_ROUNDED_##isa(kept); \
            op##_storeu_ps(p + i, kept - product); \
        } \
    }

#define DTRAIN__TRAIN_STEPS(isa, target, vector, width, op) \
    DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op) \
    DTRAIN__TRAIN_SGD(isa, target, vector, width, op)

#if defined(DTRAIN__X86)
DTRAIN__TRAIN_STEPS(base, , dtrain__x4, 4, dtrain__x4)
DTRAIN__TRAIN_STEPS(avx2, __attribute__((target("avx2"))), __m256, 8, _mm256)
DTRAIN__TRAIN_STEPS(avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512)
#else
#if defined(DTRAIN__NEON)
DTRAIN__TRAIN_STEPS(neon, , dtrain__x4, 4, dtrain__x4)
#endif
DTRAIN__TRAIN_STEPS(base, , dtrain__x1, 1, dtrain__x1)
#endif
DTRAIN__DISPATCH(dtrain__train_adamw_blocks, (float *const x[4], size_t count, const void *step), (x, count, step))
DTRAIN__DISPATCH(dtrain__train_sgd_blocks, (float *const x[4], size_t count, const void *step), (x, count, step))

DTRAIN__EXACT_END

/* Runs a kernel over whole blocks, then once over the rest, padded with zeros. */
static void dtrain__train_run(dtrain__train_kernel kernel, float *const x[4], size_t count, const void *step)
{
    float end[4][DTRAIN__ISA_BLOCK] = {{0}}, *padded[4];
    size_t left = count % DTRAIN__ISA_BLOCK, whole = count - left;
    uint64_t mode = dtrain__fpmode_enter();
    kernel(x, whole, step);
    for (int k = 0; k < 4 && left > 0; k++) {
        padded[k] = x[k] != NULL ? end[k] : NULL;
        if (x[k] != NULL)
            memcpy(end[k], x[k] + whole, left * sizeof(float));
    }
    if (left > 0)
        kernel(padded, DTRAIN__ISA_BLOCK, step);
    for (int k = 1; k < 4 && left > 0; k++)
        if (x[k] != NULL)
            memcpy(x[k] + whole, end[k], left * sizeof(float));
    dtrain__fpmode_restore(mode);
}

/* These do what a device's table does, in the CPU's memory. */
static dtrain_status dtrain__train_adamw(const dtrain_device_adamw_step *step)
{
    float *const x[4] = {(float *)(uintptr_t)step->grads, step->params, step->m, step->v};
    dtrain__train_run(dtrain__train_adamw_blocks, x, step->count, step);
    return step->copy != NULL ? dtrain_convert(step->params, DTRAIN_F32, step->copy, DTRAIN_BF16, step->count)
                              : DTRAIN_OK;
}

static dtrain_status dtrain__train_sgd(const dtrain_device_sgd_step *step)
{
    float *const x[4] = {(float *)(uintptr_t)step->grads, step->params, step->velocity, NULL};
    dtrain__train_run(dtrain__train_sgd_blocks, x, step->count, step);
    return step->copy != NULL ? dtrain_convert(step->params, DTRAIN_F32, step->copy, DTRAIN_BF16, step->count)
                              : DTRAIN_OK;
}

/* Says whether a number is finite, by its bits: under -Ofast a compiler takes every number for finite. */
static int dtrain__train_finite(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7FF) != 0x7FF;
}

#endif
