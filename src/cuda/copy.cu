/* ---- >>cuda-copy ----
 * GPU memory, pinned memory, copies, fills and events: what the runtime does itself. DTRAIN__CUDA_ROW wraps the
 * functions as rows of the table, and takes care of the calling thread's current GPU. */
#ifndef DTRAIN__CUDA_COPY
#define DTRAIN__CUDA_COPY
#include "body.h"
#include "queue.cu"

static dtrain_status dtrain__cuda_allocate(dtrain_device *device, dtrain_memory memory, size_t bytes, void **pointer)
{
    char call[64];
    snprintf(call, sizeof call, "alloc of %zu %sbytes", bytes, memory == DTRAIN_MEMORY_PINNED ? "pinned " : "");
    if (memory == DTRAIN_MEMORY_PINNED)
        return dtrain__cuda_status(device, call, cudaHostAlloc(pointer, bytes, cudaHostAllocDefault));
    return dtrain__cuda_status(device, call, cudaMalloc(pointer, bytes));
}

static void dtrain__cuda_release(dtrain_device *device, dtrain_memory memory, void *pointer)
{
    dtrain__cuda_drop(cudaStreamSynchronize(dtrain__cuda_queue_of(device)->stream));
    dtrain__cuda_drop(memory == DTRAIN_MEMORY_PINNED ? cudaFreeHost(pointer) : cudaFree(pointer));
}

/* Finds out whether CUDA knows the memory. If it does, checks that the range is inside its allocation. */
static dtrain_status dtrain__cuda_known(dtrain_device *device, const char *what, const void *pointer, size_t bytes,
                                        int *known)
{
    cudaPointerAttributes found;
    cudaError_t error = cudaPointerGetAttributes(&found, pointer);
    *known = error == cudaSuccess && found.type != cudaMemoryTypeUnregistered;
    if (*known)
        return dtrain__cuda_fits(device, "device_copy", what, pointer, bytes);
    if (error == cudaErrorInvalidValue) {
        (void)cudaGetLastError();
        error = cudaSuccess;
    }
    return dtrain__cuda_status(device, "device_copy", error);
}

static dtrain_status dtrain__cuda_copy(dtrain_device *device, void *to, const void *from, size_t bytes)
{
    cudaStream_t stream = dtrain__cuda_queue_of(device)->stream;
    int knows_to = 0, knows_from = 0;
    cudaError_t error = cudaSuccess;
    dtrain_status status = dtrain__cuda_known(device, "to", to, bytes, &knows_to);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_known(device, "from", from, bytes, &knows_from);
    if (status != DTRAIN_OK)
        return status;
    if (knows_to || knows_from)
        error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
    /* For memory that it does not know, the system and the direction decide whether the runtime is done with it. */
    if (error == cudaSuccess && !(knows_to && knows_from))
        error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess && !knows_to && !knows_from)
        memcpy(to, from, bytes);
    return dtrain__cuda_status(device, "device_copy", error);
}

typedef struct dtrain__cuda_fill_args {
    unsigned char *to;
    size_t head, vectors, tail; /* bytes before the first multiple of 16; groups of 16 bytes; bytes after the last */
    uint64_t word;              /* 8 bytes as they repeat at multiples of 8 */
} dtrain__cuda_fill_args;

DTRAIN__CUDA_FN void dtrain__cuda_fill_all_body(const dtrain__cuda_fill_args *args, dtrain__cuda_at at,
                                                dtrain__cuda_none *shared, dtrain__cuda_none *own, int phase)
{
    size_t index = at.block * at.threads + at.thread, step = at.blocks * at.threads;
    uint32_t low = (uint32_t)args->word, high = (uint32_t)(args->word >> 32);
    unsigned char *first = args->to + args->head, *last = first + 16 * args->vectors;
    dtrain__cuda_vector value = {{low, high, low, high}};
    (void)shared, (void)own, (void)phase;
    for (size_t i = index; i < args->vectors; i += step)
        ((dtrain__cuda_vector *)(void *)first)[i] = value;
    if (index < args->head)
        args->to[index] = (unsigned char)(args->word >> 8 * ((uintptr_t)(args->to + index) % 8));
    if (index < args->tail)
        last[index] = (unsigned char)(args->word >> 8 * (index % 8));
}
DTRAIN__CUDA_KERNEL(dtrain__cuda_fill_all, dtrain__cuda_fill_args, dtrain__cuda_none, dtrain__cuda_none, 256, 1)

static dtrain_status dtrain__cuda_fill(dtrain_device *device, void *to, const void *element, size_t element_bytes,
                                       size_t count)
{
    const unsigned char *source = (const unsigned char *)element;
    size_t bytes = count * element_bytes, at = (uintptr_t)to % 16;
    dtrain__cuda_fill_args args;
    dtrain_status status = dtrain__cuda_memory(device, "device_fill", "to", to, bytes, 0);
    if (status != DTRAIN_OK)
        return status;
    args.to = (unsigned char *)to;
    args.head = (16 - at) % 16 < bytes ? (16 - at) % 16 : bytes;
    args.vectors = (bytes - args.head) / 16;
    args.tail = (bytes - args.head) % 16;
    args.word = 0;
    for (size_t i = 0; i < 8; i++) /* address 8 k + i has byte (i - at) of an element, modulo its width */
        args.word |= (uint64_t)source[(i - at) % element_bytes] << 8 * i;
    size_t blocks = args.vectors / 256 + 1, most = 16 * (size_t)dtrain__cuda_queue_of(device)->processors;
    return dtrain__cuda_fill_all_launch(device, "device_fill", blocks < most ? blocks : most, &args);
}

static dtrain_status dtrain__cuda_wait(dtrain_device *device)
{
    return dtrain__cuda_status(device, "device_wait", cudaStreamSynchronize(dtrain__cuda_queue_of(device)->stream));
}

static dtrain_status dtrain__cuda_event_create(dtrain_device *device, dtrain_device_event **event)
{
    cudaEvent_t made = NULL;
    cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    *event = (dtrain_device_event *)made;
    return dtrain__cuda_status(device, "device_event_create", error);
}

static void dtrain__cuda_event_destroy(dtrain_device *device, dtrain_device_event *event)
{
    (void)device;
    dtrain__cuda_drop(cudaEventDestroy((cudaEvent_t)event));
}

static dtrain_status dtrain__cuda_event_record(dtrain_device *device, dtrain_device_event *event)
{
    cudaStream_t stream = dtrain__cuda_queue_of(device)->stream;
    return dtrain__cuda_status(device, "device_event_record", cudaEventRecord((cudaEvent_t)event, stream));
}

static dtrain_status dtrain__cuda_event_await(dtrain_device *device, dtrain_device_event *event)
{
    cudaStream_t stream = dtrain__cuda_queue_of(device)->stream;
    return dtrain__cuda_status(device, "device_event_await", cudaStreamWaitEvent(stream, (cudaEvent_t)event, 0));
}

static dtrain_status dtrain__cuda_event_done(dtrain_device *device, dtrain_device_event *event, int *done)
{
    cudaError_t error = cudaEventQuery((cudaEvent_t)event);
    *done = error == cudaSuccess;
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return DTRAIN_OK;
    }
    return dtrain__cuda_status(device, "device_event_done", error);
}

#endif
