/* ---- >>cuda-share ----
 * Sharing a GPU's memory with other processes of the host, by CUDA's legacy IPC. A handle names a whole allocation of
 * cudaMalloc; the place of a pointer in it travels beside. Streams of processes are ordered by words in memory of the
 * CPU that all have mapped. Waits for an event of a killed process may never end; a word can be written for that
 * process. */
#ifndef DTRAIN__CUDA_SHARE
#define DTRAIN__CUDA_SHARE
#include "emulate_share.h"
#include "queue.cu"

#define DTRAIN__CUDA_CURE \
    "allocate it with dtrain_device_alloc or cudaMalloc, or make the group with DTRAIN_DEVICE_STAGED"

/* Reports that processes or GPUs cannot share: UNSUPPORTED, except for a lost GPU and lack of memory. */
static dtrain_status dtrain__cuda_apart(dtrain_device *device, const char *call, cudaError_t error)
{
    if (error == cudaSuccess || error == cudaErrorMemoryAllocation || dtrain__cuda_lost(error))
        return dtrain__cuda_status(device, call, error);
    (void)cudaGetLastError();
    return dtrain_error_set(DTRAIN_ERR_UNSUPPORTED,
                            "%s on %s: %s (%s, error %d); processes share memory if each sees the other's GPU and can "
                            "reach it, on one host, in one container or with the host's IPC and PID namespaces",
                            call, device->name, cudaGetErrorString(error), cudaGetErrorName(error), (int)error);
}

static dtrain_status dtrain__cuda_unshared(dtrain_device *device, const void *pointer, const char *what)
{
    return dtrain_error_set(
        DTRAIN_ERR_UNSUPPORTED,
        "%p on %s is %s, which no other process can open by cudaIpcGetMemHandle; " DTRAIN__CUDA_CURE, pointer,
        device->name, what);
}

/* Refuses memory of a kind that other processes cannot open. */
static dtrain_status dtrain__cuda_sharable(dtrain_device *device, const void *pointer)
{
    enum { legacy = 10, pool = 17 }; /* CU_POINTER_ATTRIBUTE_... */
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    unsigned long long at = (unsigned long long)(uintptr_t)pointer;
    cudaPointerAttributes found;
    void *of_pool = NULL;
    int is_legacy = 0;
    dtrain_status status = dtrain__cuda_memory(device, "memory_share", "memory", pointer, 1, 0);
    if (status != DTRAIN_OK)
        return status;
    cudaError_t error = cudaPointerGetAttributes(&found, pointer);
    if (error != cudaSuccess)
        return dtrain__cuda_status(device, "memory_share", error);
    if (found.type == cudaMemoryTypeManaged)
        return dtrain__cuda_unshared(device, pointer, "managed memory (cudaMallocManaged)");
    if (found.type != cudaMemoryTypeDevice)
        return dtrain__cuda_unshared(device, pointer, "pinned memory of the CPU's");
    if (queue->attribute == NULL || queue->attribute(&is_legacy, legacy, at) != 0)
        return dtrain__cuda_unshared(device, pointer, "memory of which the driver tells nothing");
    if (is_legacy)
        return DTRAIN_OK;
    if (queue->attribute(&of_pool, pool, at) == 0 && of_pool != NULL)
        return dtrain__cuda_unshared(device, pointer, "memory of a pool (cudaMallocAsync)");
    return dtrain__cuda_unshared(device, pointer,
                                 "memory mapped piece by piece (cuMemCreate; PyTorch's expandable segments)");
}

static dtrain_status dtrain__cuda_memory_share(dtrain_device *device, const void *pointer, dtrain_device_shared *shared)
{
    enum { id = 7, range_start = 11, range_bytes = 12 }; /* CU_POINTER_ATTRIBUTE_... */
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    unsigned long long at = (unsigned long long)(uintptr_t)pointer, start = 0, number = 0;
    size_t bytes = 0;
    cudaIpcMemHandle_t handle;
    dtrain_status status = dtrain__cuda_sharable(device, pointer);
    if (status != DTRAIN_OK)
        return status;
    if (queue->attribute(&start, range_start, at) != 0 || queue->attribute(&bytes, range_bytes, at) != 0 ||
        queue->attribute(&number, id, at) != 0)
        return dtrain__cuda_unshared(device, pointer, "memory of which the driver tells no bounds");
    status = dtrain__cuda_apart(device, "cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, (void *)(uintptr_t)start));
    memset(shared, 0, sizeof *shared);
    memcpy(shared->handle, &handle, sizeof shared->handle);
    shared->base = (uint64_t)start;
    shared->id = (uint64_t)number;
    shared->bytes = (uint64_t)bytes;
    shared->offset = (uint64_t)(at - start);
    return status;
}

static dtrain_status dtrain__cuda_memory_open(dtrain_device *device, const dtrain_device_shared *shared, void **base)
{
    cudaIpcMemHandle_t handle;
    *base = NULL;
    memcpy(&handle, shared->handle, sizeof handle);
    return dtrain__cuda_apart(device, "cudaIpcOpenMemHandle",
                              cudaIpcOpenMemHandle(base, handle, cudaIpcMemLazyEnablePeerAccess));
}

static void dtrain__cuda_memory_close(dtrain_device *device, void *base)
{
    (void)device;
    if (base != NULL)
        dtrain__cuda_drop(cudaIpcCloseMemHandle(base));
}

/* Registers a page for all GPUs of the process. */
static dtrain_status dtrain__cuda_page_open(dtrain_device *device, void *page, size_t bytes, void **queues)
{
    const dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    *queues = NULL;
    if (queue->word_write == NULL || queue->word_await == NULL)
        return dtrain__cuda_apart(device, "cuStreamWriteValue32", cudaErrorNotSupported);
    cudaError_t error = cudaHostRegister(page, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (error != cudaSuccess)
        return dtrain__cuda_apart(device, "cudaHostRegister", error);
    error = cudaHostGetDevicePointer(queues, page, 0);
    if (error != cudaSuccess)
        dtrain__cuda_drop(cudaHostUnregister(page));
    return dtrain__cuda_apart(device, "cudaHostGetDevicePointer", error);
}

static void dtrain__cuda_page_close(dtrain_device *device, void *page)
{
    (void)device;
    dtrain__cuda_drop(cudaHostUnregister(page));
}

/* Reports what the driver returned for a word. A driver that takes no words is found by trying. */
static dtrain_status dtrain__cuda_word(dtrain_device *device, const char *call, int code)
{
    cudaError_t error = (cudaError_t)code; /* the driver and the runtime have the same numbers */
    if (error == cudaErrorNotSupported || error == cudaErrorInvalidValue)
        return dtrain__cuda_apart(device, call, error);
    return dtrain__cuda_status(device, call, error);
}

static dtrain_status dtrain__cuda_word_write(dtrain_device *device, uint32_t *word, uint32_t value)
{
    enum { fenced = 0 }; /* CU_STREAM_WRITE_VALUE_DEFAULT: the stream's earlier work is seen before the word */
    const dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    unsigned long long at = (unsigned long long)(uintptr_t)word;
    return dtrain__cuda_word(device, "cuStreamWriteValue32", queue->word_write(queue->stream, at, value, fenced));
}

static dtrain_status dtrain__cuda_word_await(dtrain_device *device, uint32_t *word, uint32_t value)
{
    enum { at_least = 0 }; /* CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(word - value) >= 0 */
    const dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    unsigned long long at = (unsigned long long)(uintptr_t)word;
    return dtrain__cuda_word(device, "cuStreamWaitValue32", queue->word_await(queue->stream, at, value, at_least));
}

#endif
