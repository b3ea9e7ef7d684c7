/* ---- >>cuda-share ----
 * Memory and events of a GPU as other processes of the host have them, by CUDA's legacy IPC: a handle names a whole
 * allocation of cudaMalloc's, and where in it a pointer is travels beside. */
#ifndef DTRAIN__CUDA_SHARE
#define DTRAIN__CUDA_SHARE
#include "emulate_share.h"
#include "queue.cu"

#define DTRAIN__CUDA_CURE                                                                                              \
    "allocate it with dtrain_device_alloc or cudaMalloc, or make the group with DTRAIN_DEVICE_STAGED"

/* What says that processes, or GPUs, cannot share: UNSUPPORTED, but for a lost GPU and want of memory. */
static dtrain_status dtrain__cuda_apart(dtrain_device *device, const char *call, cudaError_t error)
{
    if (error == cudaSuccess || error == cudaErrorMemoryAllocation || dtrain__cuda_lost(error))
        return dtrain__cuda_status(device, call, error);
    (void)cudaGetLastError();
    return dtrain_error_set(
        DTRAIN_ERR_UNSUPPORTED,
        "%s on %s: %s (%s, error %d); processes share memory where each sees the other's GPU, which "
        "can reach it, on one host and in one container or with the host's IPC and process names",
        call, device->name, cudaGetErrorString(error), cudaGetErrorName(error), (int)error);
}

static dtrain_status dtrain__cuda_unshared(dtrain_device *device, const void *pointer, const char *what)
{
    return dtrain_error_set(
        DTRAIN_ERR_UNSUPPORTED,
        "%p on %s is %s, which no other process can open by cudaIpcGetMemHandle; " DTRAIN__CUDA_CURE, pointer,
        device->name, what);
}

/* Refuses memory that other processes cannot have, by what it is. */
static dtrain_status dtrain__cuda_sharable(dtrain_device *device, const void *pointer)
{
    enum { legacy = 10, pool = 17 }; /* CU_POINTER_ATTRIBUTE_... */
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    unsigned long long at = (unsigned long long)(uintptr_t)pointer;
    cudaPointerAttributes found;
    void *of_pool = NULL;
    int is_legacy = 0;
    dtrain_status status = dtrain__cuda_memory(device, "memory_share", "memory", pointer, 1);
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

static dtrain_status dtrain__cuda_event_create_shared(dtrain_device *device, void **event)
{
    cudaEvent_t made = NULL;
    cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventInterprocess);
    *event = error == cudaSuccess ? (void *)made : NULL;
    return dtrain__cuda_apart(device, "cudaEventCreateWithFlags (between processes)", error);
}

static dtrain_status dtrain__cuda_event_share(dtrain_device *device, void *event, unsigned char *handle)
{
    cudaIpcEventHandle_t made;
    memset(&made, 0, sizeof made);
    cudaError_t error = cudaIpcGetEventHandle(&made, (cudaEvent_t)event);
    memcpy(handle, &made, DTRAIN_DEVICE_HANDLE_BYTES);
    return dtrain__cuda_apart(device, "cudaIpcGetEventHandle", error);
}

static dtrain_status dtrain__cuda_event_open(dtrain_device *device, const unsigned char *handle, void **event)
{
    cudaIpcEventHandle_t theirs;
    cudaEvent_t made = NULL;
    memcpy(&theirs, handle, sizeof theirs);
    cudaError_t error = cudaIpcOpenEventHandle(&made, theirs);
    *event = error == cudaSuccess ? (void *)made : NULL;
    return dtrain__cuda_apart(device, "cudaIpcOpenEventHandle", error);
}

#endif
