/* ---- >>cuda-sparse ----
 * Adds the elements of a selection to those of a vector. Indices come once each, so that no two threads meet; what is
 * out of range is left out, since nothing on the device has checked it. */
#ifndef DTRAIN__CUDA_SPARSE
#define DTRAIN__CUDA_SPARSE
#include "body.h"
#include "queue.cu"
#include "addresses.cu"

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
