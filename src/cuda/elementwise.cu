/* ---- >>cuda-elementwise ----
 * Scale, axpy, adding a selection, and the search for what is not finite, with the bits of >>vector: a product is
 * rounded before it is added to anything, and 16-bit floats go through float32 and are rounded once. */
#ifndef DTRAIN__CUDA_ELEMENTWISE
#define DTRAIN__CUDA_ELEMENTWISE
#include "walk.cu"
#include "convert.cu"
#include "fold.cu"
#include "body.h"
#include "queue.cu"

#define DTRAIN__CUDA_ELEMENTWISE_GROUPS 4 /* a thread, loaded before the first is stored */

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

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_scaled_f64(const dtrain__cuda_axpy_args *args, dtrain__cuda_vector v)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++)
        dtrain__cuda_lane_f64_set(&v, i, dtrain__cuda_mul_f64(args->by_f64, dtrain__cuda_lane_f64(v, i)));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_scaled_f32(const dtrain__cuda_axpy_args *args, dtrain__cuda_vector v)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] =
        dtrain__cuda_bits_f32(dtrain__cuda_mul_f32(args->by_f32, dtrain__cuda_float_of(v.word[i])));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_scaled_wide(const dtrain__cuda_axpy_args *args, dtrain__cuda_wide v)
{
    v.low = dtrain__cuda_scaled_f32(args, v.low);
    v.high = dtrain__cuda_scaled_f32(args, v.high);
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_rounded_same(dtrain__cuda_vector v)
{
    return v;
}

#define DTRAIN__CUDA_ROUNDED(kind)                                                                                     \
    DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_rounded_##kind(dtrain__cuda_wide w)                               \
    {                                                                                                                  \
        dtrain__cuda_vector v;                                                                                         \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] =                                                    \
            dtrain__cuda_both_##kind(dtrain__cuda_float_of(w.low.word[i]), dtrain__cuda_float_of(w.high.word[i]));     \
        return v;                                                                                                      \
    }

DTRAIN__CUDA_ROUNDED(f16)
DTRAIN__CUDA_ROUNDED(bf16)

#define DTRAIN__CUDA_SCALE(name, partial, scaled, rounded, width)                                                      \
    DTRAIN__CUDA_FN dtrain__cuda_vector name##_load(const dtrain__cuda_axpy_args *args, size_t element, int whole)     \
    {                                                                                                                  \
        return dtrain__cuda_load(args->y, element, width, whole);                                                      \
    }                                                                                                                  \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_axpy_args *args, size_t element, int whole,                   \
                                      const dtrain__cuda_vector *held)                                                 \
    {                                                                                                                  \
        dtrain__cuda_store(args->y, element, width, whole, rounded(scaled(args, partial(*held))));                     \
    }                                                                                                                  \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_axpy_args, dtrain__cuda_vector, 16 / (width),                          \
                             DTRAIN__CUDA_ELEMENTWISE_GROUPS)

#define DTRAIN__CUDA_AXPY(name, partial, scaled, join, rounded, width)                                                 \
    DTRAIN__CUDA_FN dtrain__cuda_axpy_held name##_load(const dtrain__cuda_axpy_args *args, size_t element, int whole)  \
    {                                                                                                                  \
        dtrain__cuda_axpy_held held;                                                                                   \
        held.y = dtrain__cuda_load(args->y, element, width, whole);                                                    \
        held.x = dtrain__cuda_load(args->x, element, width, whole);                                                    \
        return held;                                                                                                   \
    }                                                                                                                  \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_axpy_args *args, size_t element, int whole,                   \
                                      const dtrain__cuda_axpy_held *held)                                              \
    {                                                                                                                  \
        dtrain__cuda_store(args->y, element, width, whole,                                                             \
                           rounded(join(DTRAIN_SUM, partial(held->y), scaled(args, partial(held->x)))));               \
    }                                                                                                                  \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_axpy_args, dtrain__cuda_axpy_held, 16 / (width),                       \
                             DTRAIN__CUDA_ELEMENTWISE_GROUPS)

DTRAIN__CUDA_SCALE(dtrain__cuda_scale_f64, dtrain__cuda_partial_same, dtrain__cuda_scaled_f64,
                   dtrain__cuda_rounded_same, 8)
DTRAIN__CUDA_SCALE(dtrain__cuda_scale_f32, dtrain__cuda_partial_same, dtrain__cuda_scaled_f32,
                   dtrain__cuda_rounded_same, 4)
DTRAIN__CUDA_SCALE(dtrain__cuda_scale_f16, dtrain__cuda_partial_f16, dtrain__cuda_scaled_wide, dtrain__cuda_rounded_f16,
                   2)
DTRAIN__CUDA_SCALE(dtrain__cuda_scale_bf16, dtrain__cuda_partial_bf16, dtrain__cuda_scaled_wide,
                   dtrain__cuda_rounded_bf16, 2)
DTRAIN__CUDA_AXPY(dtrain__cuda_axpy_f64, dtrain__cuda_partial_same, dtrain__cuda_scaled_f64, dtrain__cuda_join_f64,
                  dtrain__cuda_rounded_same, 8)
DTRAIN__CUDA_AXPY(dtrain__cuda_axpy_f32, dtrain__cuda_partial_same, dtrain__cuda_scaled_f32, dtrain__cuda_join_f32,
                  dtrain__cuda_rounded_same, 4)
DTRAIN__CUDA_AXPY(dtrain__cuda_axpy_f16, dtrain__cuda_partial_f16, dtrain__cuda_scaled_wide, dtrain__cuda_join_wide,
                  dtrain__cuda_rounded_f16, 2)
DTRAIN__CUDA_AXPY(dtrain__cuda_axpy_bf16, dtrain__cuda_partial_bf16, dtrain__cuda_scaled_wide, dtrain__cuda_join_wide,
                  dtrain__cuda_rounded_bf16, 2)

/* y = by * y, or y + by * x. */
static dtrain_status dtrain__cuda_axpy_any(dtrain_device *device, const char *call, dtrain_dtype dtype, void *y,
                                           double by, const void *x, size_t count)
{
    typedef cudaError_t (*launch)(cudaStream_t, size_t, const dtrain__cuda_axpy_args *);
    static const launch launches[4][2] = {{dtrain__cuda_scale_f64_launch, dtrain__cuda_axpy_f64_launch},
                                          {dtrain__cuda_scale_f32_launch, dtrain__cuda_axpy_f32_launch},
                                          {dtrain__cuda_scale_f16_launch, dtrain__cuda_axpy_f16_launch},
                                          {dtrain__cuda_scale_bf16_launch, dtrain__cuda_axpy_bf16_launch}};
    int row = dtype == DTRAIN_F64 ? 0 : dtype == DTRAIN_F32 ? 1 : dtype == DTRAIN_F16 ? 2 : 3;
    size_t width = dtrain_dtype_bits(dtype) / 8, lanes = 16 / width;
    uint32_t heads = dtrain__cuda_heads(y, width, lanes) & dtrain__cuda_heads(x != NULL ? x : y, width, lanes);
    dtrain__cuda_axpy_args args = {x, y, dtrain__cuda_walk_make(heads, lanes, count), by, 0};
    dtrain_status status;
    if (count == 0)
        return DTRAIN_OK;
    /* whatever the CPU's floating-point mode */
    DTRAIN_IGNORE(dtrain_convert(&by, DTRAIN_F64, &args.by_f32, DTRAIN_F32, 1));
    status = dtrain__cuda_memory(device, call, x != NULL ? "y" : "x", y, count * width);
    if (status == DTRAIN_OK && x != NULL)
        status = dtrain__cuda_memory(device, call, "x", x, count * width);
    if (status != DTRAIN_OK)
        return status;
    return dtrain__cuda_status(
        device, call,
        launches[row][x != NULL](dtrain__cuda_queue_of(device)->stream,
                                 dtrain__cuda_walk_blocks(device, &args.walk, DTRAIN__CUDA_ELEMENTWISE_GROUPS), &args));
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

/* What is not finite has an exponent of ones. A word holds that of a float32, those of two floats of 16 bits, or, where
 * it is odd, that of a float64. */
typedef struct dtrain__cuda_overflow_args {
    const void *x;
    uint32_t *found;
    dtrain__cuda_walk walk;
    size_t width, lanes;
    uint32_t exponents[2]; /* in a word; the same where there is one */
} dtrain__cuda_overflow_args;

/* The least of what exponents lack of ones: 0 where something is not finite. */
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

/* All that find something write the same 1, and none waits for another; who sees it goes home. It is asked for behind
 * the loads, so that these do not wait for it. */
DTRAIN__CUDA_FN void dtrain__cuda_overflow_any_body(const dtrain__cuda_overflow_args *args, dtrain__cuda_at at,
                                                    dtrain__cuda_none *shared, dtrain__cuda_none *own, int phase)
{
    const size_t unroll = DTRAIN__CUDA_ELEMENTWISE_GROUPS, threads = at.threads, groups = args->walk.groups;
    volatile uint32_t *found = args->found;
    int bad = 0;
    (void)shared, (void)own, (void)phase;
    for (size_t first = at.block * threads * unroll + at.thread; first < groups && !bad;
         first += at.blocks * threads * unroll) {
        dtrain__cuda_vector held[DTRAIN__CUDA_ELEMENTWISE_GROUPS];
        DTRAIN__CUDA_UNROLL for (size_t u = 0; u < unroll; u++)
        {
            size_t group = first + u * threads < groups ? first + u * threads : first;
            held[u] = dtrain__cuda_load(args->x, args->walk.head + group * args->lanes, args->width, 1);
        }
        if (*found == 1)
            return;
        DTRAIN__CUDA_UNROLL for (size_t u = 0; u < unroll; u++) bad |= dtrain__cuda_overflow_lacks(args, held[u]) == 0;
    }
    for (size_t i = at.block * threads + at.thread; i < args->walk.singles && !bad; i += at.blocks * threads) {
        size_t element = i < args->walk.head ? i : i + groups * args->lanes;
        dtrain__cuda_vector one = dtrain__cuda_load(args->x, element, args->width, 0);
        bad = dtrain__cuda_overflow_lacks(args, one) == 0;
    }
    if (bad)
        *found = 1;
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_overflow_any, dtrain__cuda_overflow_args, dtrain__cuda_none, dtrain__cuda_none,
                    DTRAIN__CUDA_THREADS, 1)

static dtrain_status dtrain__cuda_overflow(dtrain_device *device, dtrain_dtype dtype, const void *x, size_t count,
                                           uint32_t *found)
{
    uint32_t exponent = dtype == DTRAIN_F64 ? 0x7ff00000u : dtype == DTRAIN_F16 ? 0x7c00u : 0x7f80u;
    size_t width = dtrain_dtype_bits(dtype) / 8, lanes = 16 / width;
    dtrain__cuda_overflow_args args;
    dtrain_status status;
    if (count == 0)
        return DTRAIN_OK;
    status = dtrain__cuda_memory(device, "device_overflow", "x", x, count * width);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_whole(device, "device_overflow", "found", found, sizeof *found, 1);
    if (status != DTRAIN_OK)
        return status;
    args.x = x;
    args.found = found;
    args.walk = dtrain__cuda_walk_make(dtrain__cuda_heads(x, width, lanes), lanes, count);
    args.width = width;
    args.lanes = lanes;
    args.exponents[0] = dtype == DTRAIN_F32 ? 0x7f800000u : exponent;
    args.exponents[1] = width == 2 ? exponent << 16 : args.exponents[0];
    return dtrain__cuda_status(
        device, "device_overflow",
        dtrain__cuda_overflow_any_launch(dtrain__cuda_queue_of(device)->stream,
                                         dtrain__cuda_walk_blocks(device, &args.walk, DTRAIN__CUDA_ELEMENTWISE_GROUPS),
                                         &args));
}

/* ---- adding a selection ----
 * Indices come once each, so that no two threads meet; what is out of range is left out, since nothing on the device
 * has checked it. */

#define DTRAIN__CUDA_SPARSE_THREADS 256u
#define DTRAIN__CUDA_SPARSE_EACH 4u /* elements a thread adds, side by side */

typedef struct dtrain__cuda_sparse_args {
    const unsigned char *indices, *values;
    unsigned char *data;
    size_t k, count;
    int align; /* 16, 4 or 1: what all three addresses are multiples of, data's of 4 at most */
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
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    uintptr_t arrays = (uintptr_t)indices | (uintptr_t)values, all = arrays | (uintptr_t)data;
    size_t blocks = k / tile + (k % tile != 0), most = (size_t)queue->processors * 32;
    dtrain__cuda_sparse_args args;
    dtrain_status status;
    if (k == 0 || count == 0)
        return DTRAIN_OK;
    status = dtrain__cuda_memory(device, "device_sparse_add", "indices", indices, k * sizeof(uint32_t));
    if (status == DTRAIN_OK)
        status = dtrain__cuda_memory(device, "device_sparse_add", "values", values, k * sizeof(float));
    if (status == DTRAIN_OK)
        status = dtrain__cuda_memory(device, "device_sparse_add", "data", data, count * sizeof(float));
    if (status != DTRAIN_OK)
        return status;
    args.indices = (const unsigned char *)indices;
    args.values = (const unsigned char *)values;
    args.data = (unsigned char *)data;
    args.k = k;
    args.count = count;
    args.align = all % 4 != 0 ? 1 : arrays % 16 == 0 ? 16 : 4;
    return dtrain__cuda_status(device, "device_sparse_add",
                               dtrain__cuda_sparse_kernel_launch(queue->stream, blocks < most ? blocks : most, &args));
}

#endif
