/* ---- >>cuda-queue ----
 * What every operation needs of a device: its stream, errors as status and text, and whether a kernel may touch a
 * pointer. */
#ifndef DTRAIN__CUDA_QUEUE
#define DTRAIN__CUDA_QUEUE
#include "cuda.h"
#include "body.h"

/* Functions of the driver, which the runtime hands out: cuPointerGetAttribute, cuCtxPushCurrent, cuCtxPopCurrent,
 * cuStreamWriteValue32 and cuStreamWaitValue32. */
typedef int (*dtrain__cuda_attribute_fn)(void *data, int attribute, unsigned long long pointer);
typedef int (*dtrain__cuda_push_fn)(void *context);
typedef int (*dtrain__cuda_pop_fn)(void **context);
typedef int (*dtrain__cuda_word_fn)(cudaStream_t stream, unsigned long long at, uint32_t value, unsigned flags);

typedef struct dtrain__cuda_queue {
    dtrain_device device;
    cudaStream_t stream;
    int index, own_stream;
    int processors; /* of the GPU */
    uint64_t peers; /* bit g: memory of GPU g is open to this one */
    char name[16];
    dtrain__cuda_attribute_fn attribute; /* NULL: the ends of allocations are unknown */
    void *context;                       /* the GPU's primary context; NULL: cudaSetDevice is used instead */
    dtrain__cuda_push_fn push;
    dtrain__cuda_pop_fn pop;
    dtrain__cuda_word_fn word_write, word_await; /* NULL: the driver has none */
} dtrain__cuda_queue;

static dtrain__cuda_queue *dtrain__cuda_queue_of(dtrain_device *device)
{
    return (dtrain__cuda_queue *)device->self;
}

/* Returns whether every later call of this process fails after this error, of a kernel or of the GPU's memory or links.
 */
static int dtrain__cuda_lost(cudaError_t error)
{
    int code = (int)error;
    return code == cudaErrorIllegalAddress || code == 702 || code == 710 || (code >= 714 && code <= 719) ||
           code == 721 || code == 214 || code == 220 || code == 226 || code == 810;
}

/* Returns the status of an error of the runtime, and what its reader can do. */
static dtrain_status dtrain__cuda_meaning(cudaError_t error, const char **cure)
{
    switch ((int)error) {
    case cudaErrorStubLibrary:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
        *cure = "install a driver of NVIDIA's that is new enough for the CUDA of this build, or go on without a GPU";
        return DTRAIN_ERR_UNSUPPORTED;
    case cudaErrorNoDevice:
    case cudaErrorCompatNotSupportedOnDevice:
        *cure = "no GPU here that this build can use (CUDA_VISIBLE_DEVICES hides some); go on without";
        return DTRAIN_ERR_UNSUPPORTED;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction: /* cudaFuncGetAttributes reports it for a kernel without code here */
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
        *cure = "compile dtrain_cuda.h with nvcc -arch for this GPU, such as -arch=sm_90 for an H100";
        return DTRAIN_ERR_UNSUPPORTED;
    case cudaErrorMemoryAllocation: *cure = "free some memory or allocate less"; return DTRAIN_ERR_MEMORY;
    case cudaErrorInvalidResourceHandle:
    case cudaErrorContextIsDestroyed:
        *cure = "the stream or event is destroyed or another GPU's; make another device";
        return DTRAIN_ERR_INVALID;
    case cudaErrorInvalidDevice: *cure = "see dtrain_cuda_count for how many there are"; return DTRAIN_ERR_INVALID;
    case cudaErrorDevicesUnavailable: *cure = "another process has the GPU for itself; end it"; return DTRAIN_ERR_IO;
    case cudaErrorInitializationError:
        *cure = "a child of fork cannot use CUDA that its parent has used; make processes before";
        return DTRAIN_ERR_IO;
    default: break;
    }
    if (dtrain__cuda_lost(error))
        *cure =
            "the GPU is lost to this process, and what its memory held: begin again in a new one; compute-sanitizer "
            "finds a kernel's fault";
    else
        *cure = "what was queued may not have been done; wait for the device, and end this process if that fails too";
    return DTRAIN_ERR_IO;
}

/* Makes an error of what the CUDA runtime returned to `call`, or passes success on. */
static dtrain_status dtrain__cuda_status(dtrain_device *device, const char *call, cudaError_t error)
{
    const char *cure, *name = device != NULL ? device->name : "CUDA";
    char memory[80] = "";
    size_t free_bytes = 0, total = 0;
    if (error == cudaSuccess)
        return DTRAIN_OK;
    (void)cudaGetLastError(); /* or the program's next call would report it */
    dtrain_status status = dtrain__cuda_meaning(error, &cure);
    if (status == DTRAIN_ERR_MEMORY && cudaMemGetInfo(&free_bytes, &total) == cudaSuccess)
        snprintf(memory, sizeof memory, ", %zu of %zu bytes are free", free_bytes, total);
    return dtrain_error_set(status, "%s on %s: %s (%s, error %d)%s; %s", call, name, cudaGetErrorString(error),
                            cudaGetErrorName(error), (int)error, memory, cure);
}

/* Drops the error of a call that cannot report it; an error that lasts is reported by the next call that can. Leaves an
 * error that the program itself has not asked for yet. */
static void dtrain__cuda_drop(cudaError_t error)
{
    if (error != cudaSuccess)
        (void)cudaGetLastError();
}

/* Makes the queue's GPU the calling thread's current one; *before: the one before it. It pushes the GPU's context and
 * pops it later. cudaSetDevice back would make a context on a GPU that had none. That takes hundreds of megabytes of
 * GPU 0's memory for each process that works on another. */
static cudaError_t dtrain__cuda_switch(dtrain_device *device, int *before)
{
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    cudaError_t error = cudaGetDevice(before);
    if (error == cudaSuccess && *before != queue->index)
        error = queue->context != NULL ? (cudaError_t)queue->push(queue->context) : cudaSetDevice(queue->index);
    if (error != cudaSuccess)
        *before = queue->index; /* nothing to go back to */
    return error;
}

static void dtrain__cuda_leave(dtrain_device *device, int before)
{
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    void *context;
    if (before == queue->index)
        return;
    if (queue->context != NULL)
        (void)queue->pop(&context);
    else
        dtrain__cuda_drop(cudaSetDevice(before));
}

/* Returns the bytes from pointer to the end of its allocation, or SIZE_MAX if the driver cannot tell. */
static size_t dtrain__cuda_room(const dtrain__cuda_queue *queue, const void *pointer)
{
#ifdef DTRAIN_CUDA_EMULATE
    dtrain__cuda_emulated_thing thing;
    (void)queue;
    if (!dtrain__cuda_emulated_find(-1, pointer, 0, &thing))
        return SIZE_MAX;
    return thing.bytes - (size_t)((uintptr_t)pointer - (uintptr_t)thing.pointer);
#else
    enum { plain = 10, range_start = 11, range_bytes = 12 }; /* CU_POINTER_ATTRIBUTE_... */
    unsigned long long start = 0, at = (unsigned long long)(uintptr_t)pointer;
    size_t bytes = 0;
    int is_plain = 0; /* a range mapped piece by piece may go on in the next piece */
    if (queue->attribute == NULL || queue->attribute(&is_plain, plain, at) != 0 || !is_plain ||
        queue->attribute(&start, range_start, at) != 0 || queue->attribute(&bytes, range_bytes, at) != 0 ||
        at < start || at - start > bytes)
        return SIZE_MAX;
    return (size_t)(bytes - (at - start));
#endif
}

/* Refuses a range that reaches beyond its allocation. */
static dtrain_status dtrain__cuda_fits(dtrain_device *device, const char *call, const char *what, const void *pointer,
                                       size_t bytes)
{
    size_t room = dtrain__cuda_room(dtrain__cuda_queue_of(device), pointer);
    if (bytes <= room)
        return DTRAIN_OK;
    return dtrain_error_set(DTRAIN_ERR_INVALID,
                            "%s on %s: %s (%p) must hold %zu bytes, and its allocation ends after %zu: allocate more, "
                            "or pass a smaller count",
                            call, device->name, what, pointer, bytes, room);
}

/* ---- memory of other GPUs ----
 * A reduction opens a GPU's memory to another GPU when the other is first given some of it, as groups of devices do. It
 * stays open, as it belongs to the process. */

/* Opens a peer's memory, which the program may have done already. *can: it is open. */
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

/* Returns whether memory of a pool, or mapped piece by piece, was opened to this GPU by its maker. */
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

/* Refuses a peer's memory that this GPU does not reach. */
static dtrain_status dtrain__cuda_reach(dtrain_device *device, const char *call, const char *what, const void *pointer,
                                        int peer)
{
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    int can = 0;
    cudaError_t error = dtrain__cuda_open_peer(queue, peer, &can);
    if (error != cudaSuccess)
        return dtrain__cuda_status(device, call, error);
    if (can && dtrain__cuda_is_open(queue, pointer))
        return DTRAIN_OK;
    return dtrain_error_set(DTRAIN_ERR_INVALID,
                            "%s on %s: %s (%p) is memory of cuda:%d, which %s; copy it over with dtrain_device_copy",
                            call, device->name, what, pointer, peer,
                            can ? "its pool or mapping opens to others only (cudaMemPoolSetAccess)"
                                : "this GPU cannot reach (cudaDeviceCanAccessPeer)");
}

/* ---- arguments of a call ---- */

/* Checks that the device's kernels may touch `bytes` bytes at pointer: its own memory, pinned memory, or with `peers`
 * that of a GPU that it reaches. */
static dtrain_status dtrain__cuda_memory(dtrain_device *device, const char *call, const char *what, const void *pointer,
                                         size_t bytes, int peers)
{
    cudaPointerAttributes found;
    dtrain_status status = DTRAIN_OK;
    if (bytes == 0)
        return DTRAIN_OK;
    cudaError_t error = cudaPointerGetAttributes(&found, pointer);
    if (error != cudaSuccess && error != cudaErrorInvalidValue)
        return dtrain__cuda_status(device, call, error);
    if (error == cudaErrorInvalidValue || found.type == cudaMemoryTypeUnregistered) {
        (void)cudaGetLastError();
        return dtrain_error_set(DTRAIN_ERR_INVALID,
                                "%s on %s: %s (%p) must be memory of the device, and CUDA does not know it: it is the "
                                "CPU's, or freed; allocate with dtrain_device_alloc and copy with dtrain_device_copy",
                                call, device->name, what, pointer);
    }
    int others = found.type == cudaMemoryTypeDevice && found.device != dtrain__cuda_queue_of(device)->index;
    if (others && !peers)
        return dtrain_error_set(DTRAIN_ERR_INVALID,
                                "%s on %s: %s (%p) is memory of cuda:%d; copy it over with dtrain_device_copy", call,
                                device->name, what, pointer, found.device);
    if (others)
        status = dtrain__cuda_reach(device, call, what, pointer, found.device);
    return status == DTRAIN_OK ? dtrain__cuda_fits(device, call, what, pointer, bytes) : status;
}

/* An array of a call. */
typedef struct dtrain__cuda_array {
    const char *what;    /* NULL: ends the list */
    const void *pointer; /* NULL: no array */
    size_t width, count;
    int whole; /* 1: must lie at multiples of an element's width; a kernel's first access elsewhere would cost the
                  process the GPU */
} dtrain__cuda_array;

static dtrain_status dtrain__cuda_arrays(dtrain_device *device, const char *call, const dtrain__cuda_array *arrays)
{
    for (; arrays->what != NULL; arrays++) {
        size_t bytes = arrays->pointer != NULL ? arrays->count * arrays->width : 0;
        dtrain_status status = dtrain__cuda_memory(device, call, arrays->what, arrays->pointer, bytes, 0);
        if (status != DTRAIN_OK)
            return status;
        if (arrays->whole && bytes > 0 && (uintptr_t)arrays->pointer % arrays->width != 0)
            return dtrain_error_set(DTRAIN_ERR_INVALID,
                                    "%s on %s: %s (%p) must be at a multiple of %zu bytes; copy it to one with "
                                    "dtrain_device_copy",
                                    call, device->name, arrays->what, arrays->pointer, arrays->width);
    }
    return DTRAIN_OK;
}

#endif
