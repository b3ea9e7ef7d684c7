/* ---- >>cuda-elementwise ----
 * Scale, axpy, adding a selection, and the search for NaNs and infinities, with the bits of >>vector. A product is
 * rounded before it is added. 16-bit floats are computed as float32 and rounded once. */
#ifndef DTRAIN__CUDA_ELEMENTWISE
#define DTRAIN__CUDA_ELEMENTWISE
#include "walk.cu"
#include "convert.cu"
#include "fold.cu"
#include "body.h"
#include "queue.cu"

#define DTRAIN__CUDA_ELEMENTWISE_GROUPS 4 /* groups that a thread loads before it stores the first */

typedef struct dtrain__cuda_axpy_args {
    const void *x; /* NULL: y[i] = by * y[i] */
    void *y;
    dtrain__cuda_walk walk;
    double by_f64;
    float by_f32;
} dtrain__cuda_axpy_args;

typedef struct dtrain__cuda_axpy_held {
    dtrain__cuda_vector y, x;
} dtrain__cuda_axpy_held;

/* Defines kernels scale_kind and axpy_kind. `adds` is a constant in each, so that scale does not load x. */
#define DTRAIN__CUDA_AXPY_BY(name, adds, partial, times, by, join, rounded, width) \
    DTRAIN__CUDA_FN dtrain__cuda_axpy_held name##_load(const dtrain__cuda_axpy_args *args, size_t element, int whole) \
    { \
        dtrain__cuda_axpy_held held; \
        held.y = dtrain__cuda_load(args->y, element, width, whole); \
        held.x = (adds) ? dtrain__cuda_load(args->x, element, width, whole) : held.y; \
        return held; \
    } \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_axpy_args *args, size_t element, int whole, \
                                      const dtrain__cuda_axpy_held *held) \
    { \
        dtrain__cuda_store(args->y, element, width, whole, \
                           rounded((adds) ? join(DTRAIN_SUM, partial(held->y), times(partial(held->x), args->by)) \
                                          : times(partial(held->y), args->by))); \
    } \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_axpy_args, dtrain__cuda_axpy_held, 16 / (width), \
                             DTRAIN__CUDA_ELEMENTWISE_GROUPS)
#define DTRAIN__CUDA_AXPY(kind, partial, times, by, join, rounded, width) \
    DTRAIN__CUDA_AXPY_BY(dtrain__cuda_scale_##kind, 0, partial, times, by, join, rounded, width) \
    DTRAIN__CUDA_AXPY_BY(dtrain__cuda_axpy_##kind, 1, partial, times, by, join, rounded, width)

DTRAIN__CUDA_AXPY(f64, dtrain__cuda_same, dtrain__cuda_times_f64, by_f64, dtrain__cuda_join_f64, dtrain__cuda_same, 8)
DTRAIN__CUDA_AXPY(f32, dtrain__cuda_same, dtrain__cuda_times_f32, by_f32, dtrain__cuda_join_f32, dtrain__cuda_same, 4)
DTRAIN__CUDA_AXPY(f16, dtrain__cuda_partial_f16, dtrain__cuda_times_wide, by_f32, dtrain__cuda_join_wide,
                  dtrain__cuda_rounded_f16, 2)
DTRAIN__CUDA_AXPY(bf16, dtrain__cuda_partial_bf16, dtrain__cuda_times_wide, by_f32, dtrain__cuda_join_wide,
                  dtrain__cuda_rounded_bf16, 2)

/* Computes y = by * y, or y + by * x. */
static dtrain_status dtrain__cuda_axpy_any(dtrain_device *device, const char *call, dtrain_dtype dtype, void *y,
                                           double by, const void *x, size_t count)
{
    typedef dtrain_status (*walk)(dtrain_device *, const char *, const dtrain__cuda_axpy_args *);
    static const walk walks[4][2] = {{dtrain__cuda_scale_f64_walk, dtrain__cuda_axpy_f64_walk},
                                     {dtrain__cuda_scale_f32_walk, dtrain__cuda_axpy_f32_walk},
                                     {dtrain__cuda_scale_f16_walk, dtrain__cuda_axpy_f16_walk},
                                     {dtrain__cuda_scale_bf16_walk, dtrain__cuda_axpy_bf16_walk}};
    int row = dtype == DTRAIN_F64 ? 0 : dtype == DTRAIN_F32 ? 1 : dtype == DTRAIN_F16 ? 2 : 3;
    size_t width = dtrain_dtype_bits(dtype) / 8;
    const dtrain__cuda_array arrays[] = {
        {x != NULL ? "y" : "x", y, width, count, 0}, {"x", x, width, count, 0}, {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_axpy_args args = {x, y, {0, 0, 0, 0}, by, 0};
    /* does not depend on the CPU's floating-point mode */
    DTRAIN_IGNORE(dtrain_convert(&by, DTRAIN_F64, &args.by_f32, DTRAIN_F32, 1));
    dtrain_status status = dtrain__cuda_walk_arrays(device, call, arrays, &args.walk);
    return status == DTRAIN_OK ? walks[row][x != NULL](device, call, &args) : status;
}

static dtrain_status dtrain__cuda_scale(dtrain_device *device, dtrain_dtype dtype, void *x, double factor, size_t count)
{
    return dtrain__cuda_axpy_any(device, "device_scale", dtype, x, factor, NULL, count);
}

static dtrain_status dtrain__cuda_axpy(dtrain_device *device, dtrain_dtype dtype, void *y, double alpha, const void *x,
                                       size_t count)
{
    return dtrain__cuda_axpy_any(device, "device_axpy", dtype, y, alpha, x, count);
}

/* A NaN or an infinity has an exponent of ones. A word holds the exponent of one float32 or of two 16-bit floats. An
 * odd word holds that of a float64. */
typedef struct dtrain__cuda_overflow_args {
    const void *x;
    uint32_t *found;
    dtrain__cuda_walk walk;
    size_t width;
    uint32_t exponents[2]; /* masks in a word; both the same if it has one */
} dtrain__cuda_overflow_args;

/* Returns the least that an exponent lacks to be all ones: 0 if there is a NaN or an infinity. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_overflow_lacks(const dtrain__cuda_overflow_args *args, dtrain__cuda_vector v)
{
    uint32_t least = 0xffffffffu;
    DTRAIN__CUDA_UNROLL for (int k = 0; k < 4; k++)
    {
        uint32_t word = v.word[args->width == 8 ? k | 1 : k], low = ~word & args->exponents[0];
        uint32_t high = ~word & args->exponents[1];
        least = low < least ? low : least;
        least = high < least ? high : least;
    }
    return least;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_overflow_any_load(const dtrain__cuda_overflow_args *args,
                                                                  size_t element, int whole)
{
    return dtrain__cuda_load(args->x, element, args->width, whole);
}

/* All threads that find one write the same 1, and none waits for another. */
DTRAIN__CUDA_FN void dtrain__cuda_overflow_any_store(const dtrain__cuda_overflow_args *args, size_t element, int whole,
                                                     const dtrain__cuda_vector *held)
{
    (void)element, (void)whole;
    if (dtrain__cuda_overflow_lacks(args, *held) == 0)
        *args->found = 1;
}

DTRAIN__CUDA_WALK_KERNEL(dtrain__cuda_overflow_any, dtrain__cuda_overflow_args, dtrain__cuda_vector, args->walk.lanes,
                         DTRAIN__CUDA_ELEMENTWISE_GROUPS)

static dtrain_status dtrain__cuda_overflow(dtrain_device *device, dtrain_dtype dtype, const void *x, size_t count,
                                           uint32_t *found)
{
    const char *call = "device_overflow";
    uint32_t exponent = dtype == DTRAIN_F64 ? 0x7ff00000u : dtype == DTRAIN_F16 ? 0x7c00u : 0x7f80u;
    size_t width = dtrain_dtype_bits(dtype) / 8;
    const dtrain__cuda_array all[] = {{"x", x, width, count, 0}, {NULL, NULL, 0, 0, 0}};
    const dtrain__cuda_array one[] = {{"found", found, sizeof *found, 1, 1}, {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_overflow_args args = {x, found, {0, 0, 0, 0}, width, {0, 0}};
    dtrain_status status = dtrain__cuda_walk_arrays(device, call, all, &args.walk);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_arrays(device, call, one);
    args.exponents[0] = dtype == DTRAIN_F32 ? 0x7f800000u : exponent;
    args.exponents[1] = width == 2 ? exponent << 16 : args.exponents[0];
    return status == DTRAIN_OK ? dtrain__cuda_overflow_any_walk(device, call, &args) : status;
}

/* ---- adding a selection ----
 * Each index comes once, so that no two threads meet. Indices out of range are skipped, as no check on the device has
 * found them. */

#define DTRAIN__CUDA_SPARSE_THREADS 256u
#define DTRAIN__CUDA_SPARSE_EACH 4u /* elements that a thread adds, side by side */

typedef struct dtrain__cuda_sparse_args {
    const unsigned char *indices, *values;
    unsigned char *data;
    size_t k, count;
    int align; /* 16, 4 or 1: all three addresses are multiples of it; data's of 4 at most */
} dtrain__cuda_sparse_args;

DTRAIN__CUDA_FN void dtrain__cuda_sparse_kernel_body(const dtrain__cuda_sparse_args *args, dtrain__cuda_at at,
                                                     dtrain__cuda_none *shared, dtrain__cuda_none *own, int phase)
{
    size_t stride = at.blocks * at.threads * DTRAIN__CUDA_SPARSE_EACH;
    (void)shared, (void)own, (void)phase;
    for (size_t i = (at.block * at.threads + at.thread) * DTRAIN__CUDA_SPARSE_EACH; i < args->k; i += stride) {
        size_t n = args->k - i;
        dtrain__cuda_vector index = dtrain__cuda_vector_load(args->indices + 4 * i, n, args->align);
        dtrain__cuda_vector value = dtrain__cuda_vector_load(args->values + 4 * i, n, args->align), old;
        for (uint32_t j = 0; j < DTRAIN__CUDA_SPARSE_EACH; j++) {
            old.word[j] = 0;
            if (j < n && index.word[j] < args->count)
                old.word[j] = dtrain__cuda_word_load(args->data + 4 * (size_t)index.word[j], args->align);
        }
        for (uint32_t j = 0; j < DTRAIN__CUDA_SPARSE_EACH; j++) {
            float sum = dtrain__cuda_add_f32(dtrain__cuda_float_of(old.word[j]), dtrain__cuda_float_of(value.word[j]));
            if (j < n && index.word[j] < args->count)
                dtrain__cuda_word_store(args->data + 4 * (size_t)index.word[j], dtrain__cuda_bits_f32(sum),
                                        args->align);
        }
    }
}
DTRAIN__CUDA_KERNEL(dtrain__cuda_sparse_kernel, dtrain__cuda_sparse_args, dtrain__cuda_none, dtrain__cuda_none,
                    DTRAIN__CUDA_SPARSE_THREADS, 1)

static dtrain_status dtrain__cuda_sparse_add(dtrain_device *device, const uint32_t *indices, const float *values,
                                             size_t k, float *data, size_t count)
{
    const size_t tile = DTRAIN__CUDA_SPARSE_THREADS * DTRAIN__CUDA_SPARSE_EACH;
    const dtrain__cuda_array all[] = {{"indices", indices, sizeof *indices, k, 0},
                                      {"values", values, sizeof *values, k, 0},
                                      {"data", data, sizeof *data, count, 0},
                                      {NULL, NULL, 0, 0, 0}};
    uintptr_t arrays = (uintptr_t)indices | (uintptr_t)values, any = arrays | (uintptr_t)data;
    size_t blocks = k / tile + (k % tile != 0), most = (size_t)dtrain__cuda_queue_of(device)->processors * 32;
    dtrain_status status = dtrain__cuda_arrays(device, "device_sparse_add", all);
    if (status != DTRAIN_OK)
        return status;
    dtrain__cuda_sparse_args args;
    args.indices = (const unsigned char *)indices;
    args.values = (const unsigned char *)values;
    args.data = (unsigned char *)data;
    args.k = k;
    args.count = count;
    args.align = any % 4 != 0 ? 1 : arrays % 16 == 0 ? 16 : 4;
    return dtrain__cuda_sparse_kernel_launch(device, "device_sparse_add", blocks < most ? blocks : most, &args);
}

#endif
