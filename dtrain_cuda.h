/* dtrain_cuda.h - NVIDIA's GPUs for dtrain.h. Public domain or MIT, at your choice: see LICENSE.
 *
 * A dtrain_device (dtrain.h, >>device) over a stream of the CUDA runtime: memory, copies, events, and kernels that give
 * the same bits as the CPU's. Programs that have no GPU, or no driver, are told so by a status and run on.
 *
 * CONTENTS (search for the mark)
 *     >>cuda           how many GPUs, queues on them, streams of the program's own
 *     >>cuda-body      how kernels are written, on a GPU and emulated
 *
 * BUILD: a C program keeps its C compiler, and one file goes to nvcc.
 *
 *     dtrain.c      #define DTRAIN_IMPLEMENTATION
 *                   #include "dtrain.h"
 *     kernels.cu    #define DTRAIN_CUDA_IMPLEMENTATION
 *                   #include "dtrain_cuda.h"
 *
 *     cc -O2 -c dtrain.c program.c
 *     nvcc -O2 -arch=sm_90 -c kernels.cu
 *     nvcc dtrain.o program.o kernels.o -lpthread -lm
 *
 * Or both implementations in one .cu file, dtrain.h first and before any system header. CUDA 12.0 or later, GPUs from
 * compute capability 8.0 on; -arch=all-major makes code for all of them. Links with the runtime alone, statically.
 *
 * A FIRST PROGRAM
 *
 *     dtrain_device *gpu;
 *     void *x;
 *     float one = 1;
 *     DTRAIN_CHECK(dtrain_cuda_create(&gpu, NULL));
 *     DTRAIN_CHECK(dtrain_device_alloc(gpu, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &x));
 *     DTRAIN_CHECK(dtrain_device_fill(gpu, x, &one, sizeof one, count));
 *     DTRAIN_CHECK(dtrain_device_scale(gpu, DTRAIN_F32, x, 0.5, count));
 *     DTRAIN_CHECK(dtrain_device_copy(gpu, host, x, count * sizeof(float)));   returns when host is written
 *     dtrain_device_free(gpu, DTRAIN_MEMORY_DEVICE, x);
 *     dtrain_cuda_destroy(gpu);
 *
 * CONVENTIONS, beside those of dtrain.h
 *     Order     A device is a stream: what is handed to it runs in the order of the calls. Hand it a stream of your own
 *               (dtrain_cuda_desc), or queue your kernels on its (dtrain_cuda_stream), and they run in that order too.
 *     Pointers  Device memory of any origin will do: dtrain_device_alloc, cudaMalloc, a tensor of PyTorch's; and pinned
 *               or managed memory. Other memory of the CPU, another GPU's, freed memory, and where CUDA can tell a
 *               range that ends beyond its allocation, are DTRAIN_ERR_INVALID, but for dtrain_device_copy, which takes
 *               the CPU's, and therefore cannot tell freed memory of the GPU from it.
 *     Current   The calling thread's current GPU (cudaSetDevice) is after a call what it was before.
 *     Errors    The text has CUDA's own name, number and message. DTRAIN_ERR_UNSUPPORTED: no driver, no GPU, or no code
 *               for it in this build. DTRAIN_ERR_MEMORY says what is free; the device works on. A kernel's fault, of
 *               the program's own kernels too, is DTRAIN_ERR_IO in every later call: CUDA gives the GPU back to a new
 *               process only.
 *     Bits      The same as dtrain.h's on the CPU, whatever nvcc's flags (--use_fast_math, --fmad) and the GPU; what a
 *               NaN holds is nobody's.
 *
 * MACROS, before the implementation
 *     DTRAIN_CUDA_STUB      no CUDA here: compiles as C or C++, and every call returns DTRAIN_ERR_UNSUPPORTED
 *     DTRAIN_CUDA_EMULATE   two GPUs on the CPU, for tests: compiles as C by gcc or clang, on POSIX. Kernels run thread
 *                           after thread, in changing order. Device memory cannot be touched but by the device, and
 *                           writes beside an allocation end in DTRAIN_ERR_IO when it is freed. In the environment,
 *                           DTRAIN_CUDA_EMULATED_BYTES is how much of it both have together (2^34 by default)
 */

/* ---- >>cuda ----
 * Devices for NVIDIA's GPUs: a dtrain_device over a stream of the CUDA runtime. Needs the CUDA Toolkit to build and a
 * driver to run; without one every call returns DTRAIN_ERR_UNSUPPORTED and the program goes on. */
#ifndef DTRAIN__CUDA_H
#define DTRAIN__CUDA_H

#if defined(DTRAIN_CUDA_EMULATE) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE 1 /* mmap's MAP_ANONYMOUS */
#endif
#include "dtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_cuda_desc {
    int index;    /* the GPU, from 0 */
    void *stream; /* a cudaStream_t of the caller's, which must outlive the device; NULL: a stream of its own */
} dtrain_cuda_desc;

/* Counts the GPUs that this process can use.
 *
 *   count    out: 0 on an error
 *   errors   DTRAIN_ERR_UNSUPPORTED  no driver, no GPU, or a build without CUDA; the text says which
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_cuda_count(int *count);

/* Makes a queue on a GPU. Several on one GPU run side by side.
 *
 *   device   out: NULL on an error
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_UNSUPPORTED  as dtrain_cuda_count; or the build has no code for this GPU
 *            DTRAIN_ERR_INVALID      no such GPU; a stream that is destroyed or another GPU's
 *            DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc);

/* Waits for what was queued and frees the queue; memory that was allocated through it stays the caller's to free,
 * before this. NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device);

/* Returns the stream as a cudaStream_t, to queue kernels of your own in order with the rest; NULL for no device of
 * dtrain_cuda_create.
 *
 * any thread */
DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device);

#ifdef __cplusplus
}
#endif

#endif

/* ---- >>cuda-stub ----
 * DTRAIN_CUDA_STUB: the implementation for a program that is built without a CUDA Toolkit, by a compiler of C or C++.
 * Stands before the rest of the implementation, and takes its place. */
#ifndef DTRAIN__CUDA_STUB
#define DTRAIN__CUDA_STUB

#if defined(DTRAIN_CUDA_IMPLEMENTATION) && defined(DTRAIN_CUDA_STUB)
#undef DTRAIN_CUDA_IMPLEMENTATION

static dtrain_status dtrain__cuda_stub(const char *call)
{
    return dtrain_error_set(
        DTRAIN_ERR_UNSUPPORTED,
        "%s: this build has no CUDA (DTRAIN_CUDA_STUB); compile dtrain_cuda.h with nvcc and without "
        "the macro, or go on without a GPU",
        call);
}

DTRAIN_API dtrain_status dtrain_cuda_count(int *count)
{
    if (count != NULL)
        *count = 0;
    return dtrain__cuda_stub("dtrain_cuda_count");
}

DTRAIN_API dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc)
{
    (void)desc;
    if (device != NULL)
        *device = NULL;
    return dtrain__cuda_stub("dtrain_cuda_create");
}

DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device)
{
    (void)device;
}

DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device)
{
    (void)device;
    return NULL;
}
#endif

#endif

#ifdef DTRAIN_CUDA_IMPLEMENTATION

/* ---- >>cuda-emulate ----
 * DTRAIN_CUDA_EMULATE: what this header calls of the CUDA runtime, on the CPU, so that the code above it is the same.
 * There are two GPUs. Their memory is out of the CPU's reach but while a kernel, a copy or a fill runs, and what lies
 * beside an allocation is looked at when it is freed. Streams run at once. Every call reports the lasting error, once
 * there is one, as the runtime does after a kernel's fault. */
#ifndef DTRAIN__CUDA_EMULATE
#define DTRAIN__CUDA_EMULATE

#ifdef DTRAIN_CUDA_EMULATE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#error "DTRAIN_CUDA_EMULATE: include dtrain_cuda.h before any system header, or compile with -D_DEFAULT_SOURCE"
#endif

#define DTRAIN__CUDA_EMULATED_GPUS 2
#define DTRAIN__CUDA_EMULATED_FREE 0xee /* bytes that nobody has written */

typedef int cudaError_t;
typedef void *cudaStream_t;
typedef void *cudaEvent_t;

enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorStubLibrary = 34,
    cudaErrorInsufficientDriver = 35,
    cudaErrorDevicesUnavailable = 46,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorContextIsDestroyed = 709,
    cudaErrorSystemDriverMismatch = 803,
    cudaErrorCompatNotSupportedOnDevice = 804
};
enum { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum { cudaMemcpyDefault = 4, cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1, cudaHostAllocDefault = 0 };
enum { cudaDevAttrMultiProcessorCount = 16 };

typedef struct cudaPointerAttributes {
    int type, device;
} cudaPointerAttributes;

/* One allocation, stream or event of the emulation. */
typedef struct dtrain__cuda_emulated_thing {
    struct dtrain__cuda_emulated_thing *next;
    char *map; /* of memory: guard pages at both ends, the allocation before the last */
    char *pointer;
    size_t map_bytes, bytes;
    int kind, gpu; /* a memory type, 's' or 'e' */
} dtrain__cuda_emulated_thing;

static struct dtrain__cuda_emulation {
    pthread_mutex_t mutex;
    dtrain__cuda_emulated_thing *things;
    size_t used;
    int open; /* operations that run now */
    cudaError_t lasting;
    cudaError_t next; /* for tests: what a call reports, once, that many calls that can fail from now */
    int after;
} dtrain__cuda_emulated = {PTHREAD_MUTEX_INITIALIZER, NULL, 0, 0, 0, 0, 0};
static __thread int dtrain__cuda_emulated_gpu;

static size_t dtrain__cuda_emulated_limit(void)
{
    const char *text = getenv("DTRAIN_CUDA_EMULATED_BYTES");
    return text != NULL ? (size_t)strtoull(text, NULL, 10) : (size_t)1 << 34;
}

/* What a call reports before it begins. */
static cudaError_t dtrain__cuda_emulated_error(void)
{
    cudaError_t error = dtrain__cuda_emulated.lasting;
    if (error == 0 && dtrain__cuda_emulated.next != 0 && dtrain__cuda_emulated.after-- == 0) {
        error = dtrain__cuda_emulated.next;
        dtrain__cuda_emulated.next = 0;
    }
    return error;
}

static void dtrain__cuda_emulated_protect(int protection)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (dtrain__cuda_emulated_thing *thing = dtrain__cuda_emulated.things; thing != NULL; thing = thing->next)
        if (thing->kind == cudaMemoryTypeDevice)
            mprotect(thing->map + page, thing->map_bytes - 2 * page, protection);
}

/* Around what may touch a device's memory. */
static void dtrain__cuda_emulated_enter(void)
{
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    if (dtrain__cuda_emulated.open++ == 0)
        dtrain__cuda_emulated_protect(PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
}

static void dtrain__cuda_emulated_leave(void)
{
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    if (--dtrain__cuda_emulated.open == 0)
        dtrain__cuda_emulated_protect(PROT_NONE);
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
}

static cudaError_t dtrain__cuda_emulated_add(int kind, size_t bytes, dtrain__cuda_emulated_thing **made)
{
    dtrain__cuda_emulated_thing *thing = (dtrain__cuda_emulated_thing *)calloc(1, sizeof *thing);
    *made = thing;
    if (thing == NULL)
        return cudaErrorMemoryAllocation;
    thing->kind = kind, thing->gpu = dtrain__cuda_emulated_gpu, thing->bytes = bytes;
    thing->pointer = (char *)thing; /* of streams and events */
    return cudaSuccess;
}

static void dtrain__cuda_emulated_link(dtrain__cuda_emulated_thing *thing)
{
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    thing->next = dtrain__cuda_emulated.things;
    dtrain__cuda_emulated.things = thing;
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
}

/* Finds a thing of a kind by any of its addresses, and takes it out of the book where asked to. kind -1: any memory. */
static int dtrain__cuda_emulated_find(int kind, const void *pointer, int take, dtrain__cuda_emulated_thing *found)
{
    uintptr_t at = (uintptr_t)pointer;
    int hit = 0;
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    dtrain__cuda_emulated_thing **link = &dtrain__cuda_emulated.things;
    for (; *link != NULL && !hit; link = hit ? link : &(*link)->next) {
        dtrain__cuda_emulated_thing *thing = *link;
        hit = (kind < 0 ? thing->kind < 'e' : kind == thing->kind) && at >= (uintptr_t)thing->pointer &&
              (at == (uintptr_t)thing->pointer || at - (uintptr_t)thing->pointer < thing->bytes);
        if (hit && found != NULL)
            *found = *thing;
        if (hit && take) {
            *link = thing->next;
            dtrain__cuda_emulated.used -= thing->kind == cudaMemoryTypeDevice ? thing->bytes : 0;
            free(thing);
            break;
        }
    }
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    return hit;
}

/* A stream of the current GPU, or its own, NULL. */
static cudaError_t dtrain__cuda_emulated_stream(cudaStream_t stream)
{
    dtrain__cuda_emulated_thing thing;
    cudaError_t error = dtrain__cuda_emulated_error();
    if (error != 0 || stream == NULL)
        return error;
    if (!dtrain__cuda_emulated_find('s', stream, 0, &thing) || thing.gpu != dtrain__cuda_emulated_gpu)
        return cudaErrorInvalidResourceHandle;
    return cudaSuccess;
}

/* Before a kernel: may it run? */
static cudaError_t dtrain__cuda_emulated_launch(cudaStream_t stream, size_t blocks)
{
    return blocks > 0x7fffffffu ? cudaErrorInvalidConfiguration : dtrain__cuda_emulated_stream(stream);
}

static const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    default: return "cudaError";
    }
}

static const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "emulated error";
    }
}

static cudaError_t cudaGetLastError(void)
{
    return dtrain__cuda_emulated.lasting;
}

static cudaError_t cudaGetDeviceCount(int *count)
{
    *count = DTRAIN__CUDA_EMULATED_GPUS;
    return dtrain__cuda_emulated_error();
}

static cudaError_t cudaGetDevice(int *gpu)
{
    *gpu = dtrain__cuda_emulated_gpu;
    return dtrain__cuda_emulated.lasting;
}

static cudaError_t cudaSetDevice(int gpu)
{
    if (dtrain__cuda_emulated.lasting != 0)
        return dtrain__cuda_emulated.lasting;
    if (gpu < 0 || gpu >= DTRAIN__CUDA_EMULATED_GPUS)
        return cudaErrorInvalidDevice;
    dtrain__cuda_emulated_gpu = gpu;
    return cudaSuccess;
}

static cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int gpu)
{
    (void)attribute, (void)gpu;
    *value = 4;
    return dtrain__cuda_emulated_error();
}

static cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *total = dtrain__cuda_emulated_limit();
    *free_bytes = *total - dtrain__cuda_emulated.used;
    return dtrain__cuda_emulated.lasting;
}

static cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    dtrain__cuda_emulated_thing *thing;
    cudaError_t error = dtrain__cuda_emulated_error();
    (void)flags;
    if (error == 0)
        error = dtrain__cuda_emulated_add('s', 0, &thing);
    if (error != 0)
        return error;
    dtrain__cuda_emulated_link(thing);
    *stream = thing;
    return cudaSuccess;
}

static cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return dtrain__cuda_emulated_find('s', stream, 1, NULL) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

static cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return dtrain__cuda_emulated_stream(stream);
}

static cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    dtrain__cuda_emulated_thing *thing;
    cudaError_t error = dtrain__cuda_emulated_error();
    (void)flags;
    if (error == 0)
        error = dtrain__cuda_emulated_add('e', 0, &thing);
    if (error != 0)
        return error;
    dtrain__cuda_emulated_link(thing);
    *event = thing;
    return cudaSuccess;
}

static cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    return dtrain__cuda_emulated_find('e', event, 1, NULL) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

static cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    dtrain__cuda_emulated_thing thing;
    if (!dtrain__cuda_emulated_find('e', event, 0, &thing) || thing.gpu != dtrain__cuda_emulated_gpu)
        return cudaErrorInvalidResourceHandle;
    return dtrain__cuda_emulated_stream(stream);
}

static cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (!dtrain__cuda_emulated_find('e', event, 0, NULL))
        return cudaErrorInvalidResourceHandle;
    return dtrain__cuda_emulated_error();
}

static cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    if (!dtrain__cuda_emulated_find('e', event, 0, NULL))
        return cudaErrorInvalidResourceHandle;
    return dtrain__cuda_emulated_stream(stream);
}

/* Memory whose end lies before a guard page, but for what an alignment of 256 bytes leaves between. */
static cudaError_t dtrain__cuda_emulated_map(int kind, void **pointer, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room;
    dtrain__cuda_emulated_thing *thing;
    cudaError_t error = dtrain__cuda_emulated_error();
    if (error == 0 && bytes > (SIZE_MAX >> 1))
        error = cudaErrorMemoryAllocation;
    if (error == 0)
        error = dtrain__cuda_emulated_add(kind, bytes, &thing);
    if (error != 0)
        return error;
    room = (bytes + page - 1) / page * page;
    thing->map_bytes = room + 2 * page;
    thing->map = (char *)mmap(NULL, thing->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (thing->map == MAP_FAILED) {
        free(thing);
        return cudaErrorMemoryAllocation;
    }
    thing->pointer = thing->map + page + room - (bytes + 255) / 256 * 256;
    mprotect(thing->map + page, room, PROT_READ | PROT_WRITE);
    if (bytes <= (size_t)1 << 26) /* larger memory takes pages only where it is written */
        memset(thing->map + page, DTRAIN__CUDA_EMULATED_FREE, room);
    dtrain__cuda_emulated_link(thing);
    dtrain__cuda_emulated_enter(); /* leaving closes what was made just now as well */
    dtrain__cuda_emulated_leave();
    *pointer = thing->pointer;
    return cudaSuccess;
}

/* Was anything written beside the allocation? */
static int dtrain__cuda_emulated_overrun(const dtrain__cuda_emulated_thing *thing)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const char *end = thing->map + thing->map_bytes - page;
    if (thing->bytes > (size_t)1 << 26)
        return 0;
    for (const char *at = thing->map + page; at < end; at++)
        if (at == thing->pointer && thing->bytes > 0)
            at += thing->bytes - 1;
        else if (*(const unsigned char *)at != DTRAIN__CUDA_EMULATED_FREE)
            return 1;
    return 0;
}

static cudaError_t dtrain__cuda_emulated_unmap(int kind, void *pointer)
{
    dtrain__cuda_emulated_thing thing;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!dtrain__cuda_emulated_find(kind, pointer, 1, &thing))
        return cudaErrorInvalidValue;
    mprotect(thing.map + page, thing.map_bytes - 2 * page, PROT_READ | PROT_WRITE);
    if (dtrain__cuda_emulated_overrun(&thing)) {
        fprintf(stderr, "dtrain_cuda.h: something was written beside an allocation of %zu bytes of emulated memory\n",
                thing.bytes);
        dtrain__cuda_emulated.lasting = cudaErrorIllegalAddress;
    }
    munmap(thing.map, thing.map_bytes);
    return dtrain__cuda_emulated.lasting;
}

static cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    size_t limit = dtrain__cuda_emulated_limit();
    int full;
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    full = dtrain__cuda_emulated.used > limit || bytes > limit - dtrain__cuda_emulated.used;
    dtrain__cuda_emulated.used += full ? 0 : bytes;
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    if (full)
        return cudaErrorMemoryAllocation;
    cudaError_t error = dtrain__cuda_emulated_map(cudaMemoryTypeDevice, pointer, bytes);
    if (error != 0) {
        pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
        dtrain__cuda_emulated.used -= bytes;
        pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    }
    return error;
}

static cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    return dtrain__cuda_emulated_map(cudaMemoryTypeHost, pointer, bytes);
}

static cudaError_t cudaFree(void *pointer)
{
    return dtrain__cuda_emulated_unmap(cudaMemoryTypeDevice, pointer);
}

static cudaError_t cudaFreeHost(void *pointer)
{
    return dtrain__cuda_emulated_unmap(cudaMemoryTypeHost, pointer);
}

static cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer)
{
    dtrain__cuda_emulated_thing thing;
    int found = dtrain__cuda_emulated_find(-1, pointer, 0, &thing);
    attributes->type = found ? thing.kind : cudaMemoryTypeUnregistered;
    attributes->device = found ? thing.gpu : -2;
    return dtrain__cuda_emulated.lasting;
}

static cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, cudaStream_t stream)
{
    cudaError_t error = dtrain__cuda_emulated_stream(stream);
    (void)direction;
    if (error != 0)
        return error;
    dtrain__cuda_emulated_enter();
    memcpy(to, from, bytes);
    dtrain__cuda_emulated_leave();
    return cudaSuccess;
}
#endif

#endif

/* ---- >>cuda-body ----
 * How kernels are written: once, in C, as a function of where a thread stands, which a device's compiler makes a kernel
 * of, and an emulation (DTRAIN_CUDA_EMULATE) calls thread after thread on the CPU. A body is called once a phase; what
 * threads of a block have written to shared memory in one phase, all of them see in the next. The order in which the
 * threads of a phase and the blocks of a kernel come is open, and the emulation varies it.
 * Arithmetic goes through the functions below, each one rounding to nearest with subnormals kept, whatever the
 * compiler's flags say. */
#ifndef DTRAIN__CUDA_BODY
#define DTRAIN__CUDA_BODY

#if !defined(__CUDACC__) && !defined(DTRAIN_CUDA_EMULATE)
#error "DTRAIN_CUDA_IMPLEMENTATION stands in a .cu file, for nvcc; without a CUDA Toolkit define DTRAIN_CUDA_STUB too"
#endif
#ifndef DTRAIN_CUDA_EMULATE
#include <cuda_runtime.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_FN static inline __attribute__((unused))
#else
#define DTRAIN__CUDA_FN static __device__ __forceinline__
#endif

typedef struct dtrain__cuda_at {
    size_t block, blocks;
    uint32_t thread, threads;
} dtrain__cuda_at;

typedef struct dtrain__cuda_none { /* shared memory, or variables, of kernels that have none */
    char none;
} dtrain__cuda_none;

/* 16 bytes of any type, loaded and stored at once; at multiples of 16. */
typedef struct dtrain__cuda_vector {
    uint32_t word[4];
} __attribute__((aligned(16), may_alias)) dtrain__cuda_vector;

#ifdef DTRAIN_CUDA_EMULATE
/* Which way threads and blocks are walked: up and down in turn. */
static __thread unsigned dtrain__cuda_turn;

/* Defines name_launch(stream, blocks, args), which runs name_body(args, at, shared, own, phase) for every thread of
 * blocks, phases 0 to phases - 1. own: a thread's variables, which last over its phases. */
#define DTRAIN__CUDA_KERNEL(name, args_type, shared_type, own_type, thread_count, phases)                              \
    __attribute__((unused)) static cudaError_t name##_launch(cudaStream_t stream, size_t blocks,                       \
                                                             const args_type *args)                                    \
    {                                                                                                                  \
        shared_type *shared = (shared_type *)malloc(sizeof *shared);                                                   \
        own_type *own = (own_type *)malloc((thread_count) * sizeof *own);                                              \
        unsigned turn = dtrain__cuda_turn++;                                                                           \
        cudaError_t status = dtrain__cuda_emulated_launch(stream, blocks);                                             \
        if (shared == NULL || own == NULL)                                                                             \
            status = cudaErrorMemoryAllocation;                                                                        \
        dtrain__cuda_emulated_enter();                                                                                 \
        for (size_t b = 0; status == 0 && b < blocks; b++) {                                                           \
            memset(shared, 0xa5, sizeof *shared);                                                                      \
            memset(own, 0xa5, (thread_count) * sizeof *own);                                                           \
            for (int phase = 0; phase < (phases); phase++)                                                             \
                for (uint32_t t = 0; t < (thread_count); t++) {                                                        \
                    uint32_t thread = (turn + (unsigned)phase) % 2 != 0 ? (thread_count)-1 - t : t;                    \
                    dtrain__cuda_at at = {turn % 4 < 2 ? b : blocks - 1 - b, blocks, thread, (thread_count)};          \
                    name##_body(args, at, shared, own + thread, phase);                                                \
                }                                                                                                      \
        }                                                                                                              \
        dtrain__cuda_emulated_leave();                                                                                 \
        free(shared);                                                                                                  \
        free(own);                                                                                                     \
        return status;                                                                                                 \
    }
#else
#define DTRAIN__CUDA_KERNEL(name, args_type, shared_type, own_type, thread_count, phases)                              \
    static __global__ void __launch_bounds__(thread_count) name(const __grid_constant__ args_type args)                \
    {                                                                                                                  \
        __shared__ shared_type shared;                                                                                 \
        own_type own;                                                                                                  \
        dtrain__cuda_at at = {blockIdx.x, gridDim.x, threadIdx.x, (thread_count)};                                     \
        _Pragma("unroll") for (int phase = 0; phase < (phases); phase++)                                               \
        {                                                                                                              \
            if (phase > 0)                                                                                             \
                __syncthreads();                                                                                       \
            name##_body(&args, at, &shared, &own, phase);                                                              \
        }                                                                                                              \
    }                                                                                                                  \
    static cudaError_t name##_launch(cudaStream_t stream, size_t blocks, const args_type *args)                        \
    {                                                                                                                  \
        void *list[] = {(void *)args}; /* not <<<>>>, whose error may be that of the program's own last call */        \
        if (blocks == 0)                                                                                               \
            return cudaSuccess;                                                                                        \
        if (blocks > 0x7fffffffu)                                                                                      \
            return cudaErrorInvalidConfiguration;                                                                      \
        return cudaLaunchKernel((const void *)name, dim3((unsigned)blocks), dim3(thread_count), list, 0, stream);      \
    }
#endif

/* Each operation on its own, not to be joined with a neighbour, nor to flush subnormals, as the compiler's own
 * operators are under --fmad and --use_fast_math. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign)                                                     \
    DTRAIN__CUDA_FN type name(type a, type b)                                                                          \
    {                                                                                                                  \
        volatile type result = a sign b; /* no contraction */                                                          \
        return result;                                                                                                 \
    }
#define DTRAIN__CUDA_ROOT(name, type, letter, instruction, root)                                                       \
    DTRAIN__CUDA_FN type name(type a)                                                                                  \
    {                                                                                                                  \
        return root(a);                                                                                                \
    }
#else
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign)                                                     \
    DTRAIN__CUDA_FN type name(type a, type b)                                                                          \
    {                                                                                                                  \
        type result;                                                                                                   \
        asm(instruction " %0, %1, %2;" : "=" letter(result) : letter(a), letter(b));                                   \
        return result;                                                                                                 \
    }
#define DTRAIN__CUDA_ROOT(name, type, letter, instruction, root)                                                       \
    DTRAIN__CUDA_FN type name(type a)                                                                                  \
    {                                                                                                                  \
        type result;                                                                                                   \
        asm(instruction " %0, %1;" : "=" letter(result) : letter(a));                                                  \
        return result;                                                                                                 \
    }
#endif
DTRAIN__CUDA_BINARY(dtrain__cuda_add_f32, float, "f", "add.rn.f32", +)
DTRAIN__CUDA_BINARY(dtrain__cuda_sub_f32, float, "f", "sub.rn.f32", -)
DTRAIN__CUDA_BINARY(dtrain__cuda_mul_f32, float, "f", "mul.rn.f32", *)
DTRAIN__CUDA_BINARY(dtrain__cuda_div_f32, float, "f", "div.rn.f32", /)
DTRAIN__CUDA_BINARY(dtrain__cuda_add_f64, double, "d", "add.rn.f64", +)
DTRAIN__CUDA_BINARY(dtrain__cuda_sub_f64, double, "d", "sub.rn.f64", -)
DTRAIN__CUDA_BINARY(dtrain__cuda_mul_f64, double, "d", "mul.rn.f64", *)
DTRAIN__CUDA_BINARY(dtrain__cuda_div_f64, double, "d", "div.rn.f64", /)
DTRAIN__CUDA_ROOT(dtrain__cuda_sqrt_f32, float, "f", "sqrt.rn.f32", __builtin_sqrtf)
DTRAIN__CUDA_ROOT(dtrain__cuda_sqrt_f64, double, "d", "sqrt.rn.f64", __builtin_sqrt)

DTRAIN__CUDA_FN uint32_t dtrain__cuda_bits_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

DTRAIN__CUDA_FN float dtrain__cuda_float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Integer atomics, in shared or device memory; each returns what was there before. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_atomic_add_u32(uint32_t *to, uint32_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t before = *to;
    *to += value;
    return before;
#else
    return atomicAdd(to, value);
#endif
}

DTRAIN__CUDA_FN uint64_t dtrain__cuda_atomic_add_u64(uint64_t *to, uint64_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint64_t before = *to;
    *to += value;
    return before;
#else
    return atomicAdd((unsigned long long *)to, (unsigned long long)value);
#endif
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_atomic_max_u32(uint32_t *to, uint32_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t before = *to;
    *to = value > before ? value : before;
    return before;
#else
    return atomicMax(to, value);
#endif
}

#endif

/* ---- >>cuda-queue ----
 * What every operation needs of a device: its stream, errors as status and text, and whether a pointer is memory that
 * a kernel may touch. */
#ifndef DTRAIN__CUDA_QUEUE
#define DTRAIN__CUDA_QUEUE

/* The driver's cuPointerGetAttribute, which the runtime hands out. */
typedef int (*dtrain__cuda_attribute_fn)(void *data, int attribute, unsigned long long pointer);

typedef struct dtrain__cuda_queue {
    dtrain_device device;
    cudaStream_t stream;
    int index, own_stream;
    int processors; /* of the GPU */
    char name[16];
    dtrain__cuda_attribute_fn attribute; /* NULL: where allocations end is not known */
} dtrain__cuda_queue;

static dtrain__cuda_queue *dtrain__cuda_queue_of(dtrain_device *device)
{
    return (dtrain__cuda_queue *)device->self;
}

/* Errors after which every call of this process fails: of a kernel, and of the GPU's memory or links. */
static int dtrain__cuda_lost(cudaError_t error)
{
    int code = (int)error;
    return code == cudaErrorIllegalAddress || code == 702 || code == 710 || (code >= 714 && code <= 719) ||
           code == 214 || code == 220;
}

/* Which status an error of the runtime is, and what its reader can do. */
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
    case cudaErrorUnsupportedPtxVersion:
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

/* Makes an error of what the CUDA runtime said to `call`, or passes success on. */
static dtrain_status dtrain__cuda_status(dtrain_device *device, const char *call, cudaError_t error)
{
    const char *cure, *name = device != NULL ? device->name : "CUDA";
    char memory[80] = "";
    size_t free_bytes = 0, total = 0;
    if (error == cudaSuccess)
        return DTRAIN_OK;
    (void)cudaGetLastError(); /* or the program's next call would report this one */
    dtrain_status status = dtrain__cuda_meaning(error, &cure);
    if (status == DTRAIN_ERR_MEMORY && cudaMemGetInfo(&free_bytes, &total) == cudaSuccess)
        snprintf(memory, sizeof memory, ", %zu of %zu bytes are free", free_bytes, total);
    return dtrain_error_set(status, "%s on %s: %s (%s, error %d)%s; %s", call, name, cudaGetErrorString(error),
                            cudaGetErrorName(error), (int)error, memory, cure);
}

/* Makes the queue's GPU the calling thread's own, and says in *before which was. */
static cudaError_t dtrain__cuda_switch(dtrain_device *device, int *before)
{
    int index = dtrain__cuda_queue_of(device)->index;
    cudaError_t error = cudaGetDevice(before);
    if (error == cudaSuccess && *before != index)
        error = cudaSetDevice(index);
    if (error != cudaSuccess)
        *before = index; /* nothing to go back to */
    return error;
}

static void dtrain__cuda_leave(dtrain_device *device, int before)
{
    if (before != dtrain__cuda_queue_of(device)->index)
        (void)cudaSetDevice(before);
}

/* Bytes from pointer to the end of its allocation; SIZE_MAX where nobody can tell. */
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
    int is_plain = 0; /* a range that is mapped piece by piece may go on in the next piece */
    if (queue->attribute == NULL || queue->attribute(&is_plain, plain, at) != 0 || !is_plain ||
        queue->attribute(&start, range_start, at) != 0 || queue->attribute(&bytes, range_bytes, at) != 0 ||
        at < start || at - start > bytes)
        return SIZE_MAX;
    return (size_t)(bytes - (at - start));
#endif
}

/* Refuses a range that is longer than what is left of its allocation. */
static dtrain_status dtrain__cuda_fits(dtrain_device *device, const char *call, const char *what, const void *pointer,
                                       size_t bytes)
{
    size_t room = dtrain__cuda_room(dtrain__cuda_queue_of(device), pointer);
    if (bytes <= room)
        return DTRAIN_OK;
    return dtrain_error_set(DTRAIN_ERR_INVALID,
                            "%s on %s: %s (%p) must hold %zu bytes, its allocation ends after %zu; allocate more, or "
                            "pass a smaller count",
                            call, device->name, what, pointer, bytes, room);
}

/* Says whether `bytes` bytes at pointer are memory that the device's kernels may touch: its own, or pinned. */
static dtrain_status dtrain__cuda_memory(dtrain_device *device, const char *call, const char *what, const void *pointer,
                                         size_t bytes)
{
    int index = dtrain__cuda_queue_of(device)->index;
    cudaPointerAttributes found;
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
    if (found.type == cudaMemoryTypeDevice && found.device != index)
        return dtrain_error_set(DTRAIN_ERR_INVALID,
                                "%s on %s: %s (%p) is memory of cuda:%d; copy it over with dtrain_device_copy", call,
                                device->name, what, pointer, found.device);
    return dtrain__cuda_fits(device, call, what, pointer, bytes);
}

#endif

/* ---- >>cuda-copy ----
 * Memory of a GPU, pinned memory, copies, fills and events: what the runtime does itself. A row of the table is the
 * function of the same name between DTRAIN__CUDA_ROW's, which sees to the calling thread's current GPU. */
#ifndef DTRAIN__CUDA_COPY
#define DTRAIN__CUDA_COPY

static dtrain_status dtrain__cuda_allocate(dtrain_device *device, dtrain_memory memory, size_t bytes, void **pointer)
{
    char call[64];
    *pointer = NULL;
    if (bytes == 0)
        return DTRAIN_OK;
    snprintf(call, sizeof call, "alloc of %zu %sbytes", bytes, memory == DTRAIN_MEMORY_PINNED ? "pinned " : "");
    if (memory == DTRAIN_MEMORY_PINNED)
        return dtrain__cuda_status(device, call, cudaHostAlloc(pointer, bytes, cudaHostAllocDefault));
    return dtrain__cuda_status(device, call, cudaMalloc(pointer, bytes));
}

static void dtrain__cuda_release(dtrain_device *device, dtrain_memory memory, void *pointer)
{
    if (pointer == NULL)
        return;
    (void)cudaStreamSynchronize(dtrain__cuda_queue_of(device)->stream);
    (void)(memory == DTRAIN_MEMORY_PINNED ? cudaFreeHost(pointer) : cudaFree(pointer));
    (void)cudaGetLastError(); /* what failed before is reported by the next call that can */
}

/* Says whether CUDA knows the memory, and refuses a range that is longer than it. */
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
    if (bytes == 0)
        return DTRAIN_OK;
    dtrain_status status = dtrain__cuda_known(device, "to", to, bytes, &knows_to);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_known(device, "from", from, bytes, &knows_from);
    if (status != DTRAIN_OK)
        return status;
    if (knows_to || knows_from)
        error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
    /* Whether the runtime is done with memory that it does not know depends on the system and the direction. */
    if (error == cudaSuccess && !(knows_to && knows_from))
        error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess && !knows_to && !knows_from)
        memcpy(to, from, bytes);
    return dtrain__cuda_status(device, "device_copy", error);
}

typedef struct dtrain__cuda_fill_args {
    unsigned char *to;
    size_t head, vectors, tail; /* bytes before the first multiple of 16; 16 bytes each; bytes after the last */
    uint64_t word;              /* 8 bytes as they are at multiples of 8 */
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
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    const unsigned char *source = (const unsigned char *)element;
    size_t bytes = count * element_bytes, at = (uintptr_t)to % 16;
    dtrain__cuda_fill_args args;
    if (bytes == 0)
        return DTRAIN_OK;
    dtrain_status status = dtrain__cuda_memory(device, "device_fill", "to", to, bytes);
    if (status != DTRAIN_OK)
        return status;
    args.to = (unsigned char *)to;
    args.head = (16 - at) % 16 < bytes ? (16 - at) % 16 : bytes;
    args.vectors = (bytes - args.head) / 16;
    args.tail = (bytes - args.head) % 16;
    args.word = 0;
    for (size_t i = 0; i < 8; i++) /* address 8 k + i is byte (i - at) of an element, modulo its width, as 8 is */
        args.word |= (uint64_t)source[(i - at) % element_bytes] << 8 * i;
    size_t blocks = args.vectors / 256 + 1, most = 16 * (size_t)queue->processors;
    return dtrain__cuda_status(device, "device_fill",
                               dtrain__cuda_fill_all_launch(queue->stream, blocks < most ? blocks : most, &args));
}

static dtrain_status dtrain__cuda_wait(dtrain_device *device)
{
    return dtrain__cuda_status(device, "device_wait", cudaStreamSynchronize(dtrain__cuda_queue_of(device)->stream));
}

static dtrain_status dtrain__cuda_event_create(dtrain_device *device, void **event)
{
    cudaEvent_t made = NULL;
    cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    *event = error == cudaSuccess ? (void *)made : NULL;
    return dtrain__cuda_status(device, "device_event_create", error);
}

static void dtrain__cuda_event_destroy(dtrain_device *device, void *event)
{
    (void)device;
    if (event != NULL && cudaEventDestroy((cudaEvent_t)event) != cudaSuccess)
        (void)cudaGetLastError();
}

static dtrain_status dtrain__cuda_event_record(dtrain_device *device, void *event)
{
    cudaStream_t stream = dtrain__cuda_queue_of(device)->stream;
    return dtrain__cuda_status(device, "device_event_record", cudaEventRecord((cudaEvent_t)event, stream));
}

static dtrain_status dtrain__cuda_event_await(dtrain_device *device, void *event)
{
    cudaStream_t stream = dtrain__cuda_queue_of(device)->stream;
    return dtrain__cuda_status(device, "device_event_await", cudaStreamWaitEvent(stream, (cudaEvent_t)event, 0));
}

static dtrain_status dtrain__cuda_event_done(dtrain_device *device, void *event, int *done)
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

/* ---- >>cuda-create ----
 * The table of operations, and devices made and freed. Stands last: it knows every operation. */
#ifndef DTRAIN__CUDA_CREATE
#define DTRAIN__CUDA_CREATE

/* A row of the table: the operation, while the queue's GPU is the calling thread's current one. */
#define DTRAIN__CUDA_ROW(name, parameters, arguments)                                                                  \
    static dtrain_status dtrain__cuda_row_##name parameters                                                            \
    {                                                                                                                  \
        int before;                                                                                                    \
        dtrain_status status = dtrain__cuda_status(device, "device_" #name, dtrain__cuda_switch(device, &before));     \
        if (status != DTRAIN_OK)                                                                                       \
            return status;                                                                                             \
        status = dtrain__cuda_##name arguments;                                                                        \
        dtrain__cuda_leave(device, before);                                                                            \
        return status;                                                                                                 \
    }
#define DTRAIN__CUDA_VOID_ROW(name, parameters, arguments)                                                             \
    static void dtrain__cuda_row_##name parameters                                                                     \
    {                                                                                                                  \
        int before;                                                                                                    \
        (void)dtrain__cuda_switch(device, &before); /* if the GPU is lost, the CPU's part is freed all the same */     \
        dtrain__cuda_##name arguments;                                                                                 \
        dtrain__cuda_leave(device, before);                                                                            \
    }

DTRAIN__CUDA_ROW(allocate, (dtrain_device * device, dtrain_memory memory, size_t bytes, void **pointer),
                 (device, memory, bytes, pointer))
DTRAIN__CUDA_VOID_ROW(release, (dtrain_device * device, dtrain_memory memory, void *pointer), (device, memory, pointer))
DTRAIN__CUDA_ROW(copy, (dtrain_device * device, void *to, const void *from, size_t bytes), (device, to, from, bytes))
DTRAIN__CUDA_ROW(fill, (dtrain_device * device, void *to, const void *element, size_t element_bytes, size_t count),
                 (device, to, element, element_bytes, count))
DTRAIN__CUDA_ROW(wait, (dtrain_device * device), (device))
DTRAIN__CUDA_ROW(event_create, (dtrain_device * device, void **event), (device, event))
DTRAIN__CUDA_VOID_ROW(event_destroy, (dtrain_device * device, void *event), (device, event))
DTRAIN__CUDA_ROW(event_record, (dtrain_device * device, void *event), (device, event))
DTRAIN__CUDA_ROW(event_await, (dtrain_device * device, void *event), (device, event))
DTRAIN__CUDA_ROW(event_done, (dtrain_device * device, void *event, int *done), (device, event, done))


static const dtrain_device_ops dtrain__cuda_ops = {
    dtrain__cuda_row_allocate,
    dtrain__cuda_row_release,
    dtrain__cuda_row_copy,
    dtrain__cuda_row_fill,
    dtrain__cuda_row_wait,
    dtrain__cuda_row_event_create,
    dtrain__cuda_row_event_destroy,
    dtrain__cuda_row_event_record,
    dtrain__cuda_row_event_await,
    dtrain__cuda_row_event_done,
    NULL, /* convert */
    NULL, /* reduce */
    NULL, /* scale */
    NULL, /* axpy */
    NULL, /* adamw */
    NULL, /* sgd */
    NULL, /* overflow */
    NULL, /* squares */
    NULL, /* clip */
    NULL, /* selection_create */
    NULL, /* selection_destroy */
    NULL, /* select */
    NULL, /* sparse_add */
    NULL, /* pack */
    NULL, /* unpack */
};

DTRAIN_API dtrain_status dtrain_cuda_count(int *count)
{
    int found = 0;
    if (count == NULL)
        return dtrain_error_set(DTRAIN_ERR_INVALID, "dtrain_cuda_count: count must be an address, it is NULL");
    *count = 0;
    dtrain_status status = dtrain__cuda_status(NULL, "dtrain_cuda_count", cudaGetDeviceCount(&found));
    if (status == DTRAIN_OK)
        *count = found;
    return status;
}

/* The driver's functions come through the runtime, so that nothing is linked with the driver. */
static void dtrain__cuda_find_attribute(dtrain__cuda_queue *queue)
{
    queue->attribute = NULL;
#ifndef DTRAIN_CUDA_EMULATE
    void *found = NULL;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &found, 12000, cudaEnableDefault, &result);
#else
    cudaError_t error = cudaGetDriverEntryPoint("cuPointerGetAttribute", &found, cudaEnableDefault, &result);
#endif
    if (error == cudaSuccess && result == cudaDriverEntryPointSuccess)
        queue->attribute = (dtrain__cuda_attribute_fn)found;
    else
        (void)cudaGetLastError();
#endif
}

/* Has this build code for the GPU? Asked of one kernel, for all. */
static cudaError_t dtrain__cuda_find_code(void)
{
#ifdef DTRAIN_CUDA_EMULATE
    return cudaSuccess;
#else
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, (const void *)dtrain__cuda_fill_all);
#endif
}

/* The caller's stream is tried with an event, which another GPU's stream or a destroyed one refuses. */
static cudaError_t dtrain__cuda_try_stream(cudaStream_t stream)
{
    cudaEvent_t event = NULL;
    cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error != cudaSuccess)
        return error;
    error = cudaEventRecord(event, stream);
    (void)cudaEventDestroy(event);
    return error;
}

/* Fills the queue, whose GPU is the current one. */
static dtrain_status dtrain__cuda_open(dtrain__cuda_queue *queue, void *stream)
{
    cudaError_t error = cudaDeviceGetAttribute(&queue->processors, cudaDevAttrMultiProcessorCount, queue->index);
    if (error == cudaSuccess)
        error = dtrain__cuda_find_code();
    if (error != cudaSuccess)
        return dtrain__cuda_status(&queue->device, "dtrain_cuda_create", error);
    dtrain__cuda_find_attribute(queue);
    queue->own_stream = stream == NULL;
    queue->stream = (cudaStream_t)stream;
    if (stream == NULL)
        error = cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking);
    else
        error = dtrain__cuda_try_stream(queue->stream);
    return dtrain__cuda_status(&queue->device, stream == NULL ? "dtrain_cuda_create" : "dtrain_cuda_create: stream",
                               error);
}

static dtrain_status dtrain__cuda_check_create(dtrain_device **device, int index)
{
    int count = 0;
    if (device == NULL)
        return dtrain_error_set(DTRAIN_ERR_INVALID, "dtrain_cuda_create: device must be an address, it is NULL");
    *device = NULL;
    dtrain_status status = dtrain__cuda_status(NULL, "dtrain_cuda_create", cudaGetDeviceCount(&count));
    if (status == DTRAIN_OK && (index < 0 || index >= count))
        return dtrain_error_set(DTRAIN_ERR_INVALID,
                                "dtrain_cuda_create: index must be 0 to %d, as this process sees %d GPUs, it is %d",
                                count - 1, count, index);
    return status;
}

DTRAIN_API dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc)
{
    int index = desc != NULL ? desc->index : 0, before;
    dtrain_status status = dtrain__cuda_check_create(device, index);
    if (status != DTRAIN_OK)
        return status;
    dtrain__cuda_queue *queue = (dtrain__cuda_queue *)calloc(1, sizeof *queue);
    if (queue == NULL)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "dtrain_cuda_create: no %zu bytes for a queue", sizeof *queue);
    snprintf(queue->name, sizeof queue->name, "cuda:%d", index);
    queue->index = index;
    queue->device.ops = &dtrain__cuda_ops;
    queue->device.name = queue->name;
    queue->device.self = queue;
    status = dtrain__cuda_status(&queue->device, "dtrain_cuda_create", dtrain__cuda_switch(&queue->device, &before));
    if (status == DTRAIN_OK) {
        status = dtrain__cuda_open(queue, desc != NULL ? desc->stream : NULL);
        dtrain__cuda_leave(&queue->device, before);
    }
    if (status != DTRAIN_OK)
        free(queue);
    else
        *device = &queue->device;
    return status;
}

DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device)
{
    int before;
    if (device == NULL || device->ops != &dtrain__cuda_ops)
        return;
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    (void)dtrain__cuda_switch(device, &before);
    (void)cudaStreamSynchronize(queue->stream);
    if (queue->own_stream)
        (void)cudaStreamDestroy(queue->stream);
    (void)cudaGetLastError();
    dtrain__cuda_leave(device, before);
    free(queue);
}

DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device)
{
    if (device == NULL || device->ops != &dtrain__cuda_ops)
        return NULL;
    return (void *)((const dtrain__cuda_queue *)device->self)->stream;
}

#endif

#endif
