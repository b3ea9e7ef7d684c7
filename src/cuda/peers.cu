/* ---- >>cuda-peers ----
 * Memory of another GPU that this one can reach. A GPU's memory is opened to another when the other is first handed
 * some of it by a reduction, as groups of devices do; it stays open, as it is the process's. */
#ifndef DTRAIN__CUDA_PEERS
#define DTRAIN__CUDA_PEERS
#include "body.h"
#include "queue.cu"

/* Opens a peer's memory, which this and that GPU's program may have done before. *can: whether it is open now. */
static cudaError_t dtrain__cuda_open_peer(dtrain__cuda_queue *queue, int peer, int *can)
{
    uint64_t bit = peer < 64 ? (uint64_t)1 << peer : 0;
    *can = 1;
    if (queue->peers & bit)
        return cudaSuccess;
    cudaError_t error = cudaDeviceCanAccessPeer(can, queue->index, peer);
    if (error != cudaSuccess || !*can)
        return error;
    error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        error = cudaSuccess;
    }
    if (error == cudaSuccess)
        queue->peers |= bit;
    return error;
}

/* Memory of a pool, or mapped piece by piece, is open to whom its maker has said. */
static int dtrain__cuda_is_open(const dtrain__cuda_queue *queue, const void *pointer)
{
#ifdef DTRAIN_CUDA_EMULATE
    (void)queue, (void)pointer;
    return 1;
#else
    enum { plain = 10, access = 16, read_write = 3 }; /* CU_POINTER_ATTRIBUTE_... */
    unsigned long long at = (unsigned long long)(uintptr_t)pointer, flags = 0;
    int is_plain = 0;
    if (queue->attribute == NULL || queue->attribute(&is_plain, plain, at) != 0 || is_plain)
        return 1;
    return queue->attribute(&flags, access, at) != 0 || (flags & read_write) == read_write;
#endif
}

/* dtrain__cuda_memory, for a call that may be handed a peer's. */
static dtrain_status dtrain__cuda_reach(dtrain_device *device, const char *call, const char *what, const void *pointer,
                                        size_t bytes)
{
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    cudaPointerAttributes found;
    int can = 0;
    if (bytes == 0)
        return DTRAIN_OK;
    cudaError_t error = cudaPointerGetAttributes(&found, pointer);
    if (error != cudaSuccess || found.type != cudaMemoryTypeDevice || found.device == queue->index) {
        if (error == cudaErrorInvalidValue)
            (void)cudaGetLastError();
        return dtrain__cuda_memory(device, call, what, pointer, bytes);
    }
    error = dtrain__cuda_open_peer(queue, found.device, &can);
    if (error != cudaSuccess)
        return dtrain__cuda_status(device, call, error);
    if (!can || !dtrain__cuda_is_open(queue, pointer))
        return dtrain_error_set(DTRAIN_ERR_INVALID,
                                "%s on %s: %s (%p) is memory of cuda:%d, which %s; copy it over with "
                                "dtrain_device_copy",
                                call, device->name, what, pointer, found.device,
                                can ? "its pool or mapping opens to others only (cudaMemPoolSetAccess)"
                                    : "this GPU cannot reach (cudaDeviceCanAccessPeer)");
    return dtrain__cuda_fits(device, call, what, pointer, bytes);
}

#endif
