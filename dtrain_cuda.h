/* dtrain_cuda.h - NVIDIA's GPUs for dtrain.h. Public domain or MIT, at your choice: see LICENSE.
 *
 * Makes a dtrain_device (dtrain.h, >>device) of a stream of the CUDA runtime: memory, copies, events and kernels. They
 * give the same bits as the CPU. On a machine without a GPU or a driver, calls return DTRAIN_ERR_UNSUPPORTED and the
 * text says why; the program runs on.
 *
 * CONTENTS (search for the mark)
 *     >>cuda           number of GPUs, queues on them, streams of your own
 *     >>cuda-body      how kernels are written, on a GPU and emulated
 *
 * BUILD. A C program keeps its C compiler; one file goes to nvcc.
 *
 *     dtrain.c      #define DTRAIN_IMPLEMENTATION
 *                   #include "dtrain.h"
 *     kernels.cu    #define DTRAIN_CUDA_IMPLEMENTATION
 *                   #include "dtrain_cuda.h"
 *
 *     cc -O2 -ffp-contract=off -c dtrain.c program.c
 *     nvcc -std=c++17 -O2 -arch=sm_90 -c kernels.cu
 *     nvcc dtrain.o program.o kernels.o -lpthread -lm
 *
 * You may also put both implementations into one .cu file, dtrain.h first and before any system header. You need CUDA
 * 12.0 or later and a GPU of compute capability 8.0 or later. With CUDA 13, -arch=all-major makes code for every GPU.
 * CUDA 12's all-major begins with GPUs that are too old: name yours. The program links with the CUDA runtime alone,
 * statically: it needs no libcudart or libcuda to start.
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
 * examples/device_reduce.cu is a whole program. These calls of dtrain.h take a device, and run on the CPU for NULL:
 *
 *     memory and copies            >>device
 *     reduce, scale, axpy          F64, F32, F16, BF16; the reduction also takes integers
 *     convert                      between F64, F32, F16, BF16 and both FP8
 *     overflow, norm, clipping     >>device
 *     AdamW and SGD                by a parameter table, see below
 *     top-k, sparse sums           below 2^32 elements; with or without a residual
 *     int8, fp8                    with a scale a block
 *
 * Matrix products, sign compression and PowerSGD have no kernels here.
 *
 * RANKS talk from device memory through a group of devices: dtrain.h, >>device-group.
 *
 * TRAINING. Give every parameter of the table the same device. Then the calls of DDP and FSDP are those of the CPU.
 *
 *     for (size_t i = 0; i < count; i++)
 *         table[i].device = gpu;                               data, grad: memory of the GPU; for FSDP also NULL
 *     DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc));    or dtrain_ddp_create
 *     float *w = dtrain_fsdp_unit_param(fsdp, "qkvw", unit);   layer by layer, at addresses that stay
 *     ...
 *     DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, unit));            then queue kernels on dtrain_cuda_stream(gpu)
 *     DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, NULL));             NULL: the CPU does not wait for the norm
 *
 * Gathers and reductions run beside your kernels, ordered by events. The same gradients give the weights of the CPU,
 * bit for bit. With compress (top-k, int8, fp8, bf16, f16) the GPU selects or packs, and the result goes through the
 * socket. Checkpoints save from GPUs and load onto them; the files are those of the CPU.
 *
 * examples/train_gpt_cuda.cu trains the model of train_gpt with kernels of its own and cuBLAS:
 *
 *     make cuda
 *     build/train_gpt_cuda --ranks 4 --steps 200               threads, which share the GPUs
 *     build/train_gpt_cuda --ranks 4 --gpus 1 --strategy full --trace trace.json
 *     build/dtrun -n 4 build/train_gpt_cuda --steps 200        processes
 *     build/train_gpt_cuda --ranks 4 --save run --every 50     then --resume, on any number of ranks
 *
 * Its flags, files and checkpoints are those of train_gpt, and either program goes on from the other's checkpoint. It
 * refuses --mesh, --aggregator, --local-steps, --compress sign and powersgd, --tokens, --open and --export, and prints
 * no sample.
 *
 * LIMITS. These return DTRAIN_ERR_UNSUPPORTED for a table on a device: modules, pipelines, aggregators, local SGD, the
 * parameter server, and FSDP with quantise_gather, quantise_reduce or compress.adam. Tensor parallelism computes on
 * the CPU.
 *
 * WHAT IS CHECKED
 *
 *     - checked: it compiles for compute capability 8.0, 9.0 and 10.0 without spills or local memory
 *     - checked: its arithmetic in PTX is neither contracted nor flushed to zero
 *     - checked: emulated GPUs give the CPU's bits, to threads and processes, also when ranks are killed
 *     - checked on one H100: every test, kernels under memcheck and racecheck, train_gpt_cuda in every layout, and speed
 *     - NOT checked: several GPUs, so peer access and FLAGS between GPUs, or another kind of GPU
 *
 * On a machine with GPUs, these check the rest:
 *
 *     make test-cuda CUDA_LARGE=1                    every size to 2^28; train_gpt_cuda's losses beside train_gpt's
 *     make test-cuda SANITIZER="compute-sanitizer --tool memcheck"      or racecheck, synccheck, initcheck
 *     make bench-cuda                                one line each, with what it should reach: ok, MISSED or skipped
 *     python3 tools/bench_cuda_peers.py              the kernels' lines in PyTorch
 *
 * CONVENTIONS, in addition to those of dtrain.h
 *     Order     A device is a stream: calls run in the order in which you make them. Give it a stream of your own
 *               (dtrain_cuda_desc), or queue your kernels on its stream (dtrain_cuda_stream); they keep that order too.
 *     Pointers  Use device memory of any origin: dtrain_device_alloc, cudaMalloc, a tensor of PyTorch; pinned or
 *               managed memory too. Other memory of the CPU, another GPU's memory and freed memory are
 *               DTRAIN_ERR_INVALID. So is a range that ends beyond its allocation, if CUDA can tell. dtrain_device_copy
 *               also takes the CPU's memory, so it cannot tell freed memory of the GPU from that.
 *     Peers     dtrain_device_reduce and groups of devices take memory of any GPU that theirs reaches. On first use
 *               they open that GPU's memory to theirs (cudaDeviceEnablePeerAccess), for the rest of the process. Memory
 *               of cudaMallocAsync, or mapped by the driver's calls, is open only to GPUs that its maker has named.
 *               dtrain_device_copy copies between any two.
 *     Align     Any alignment will do, with two exceptions: arrays of the norm and of top-k, and what a call counts or
 *               reports in. Those lie at multiples of their elements' width, or are DTRAIN_ERR_INVALID.
 *     Current   A call leaves the calling thread's current GPU (cudaSetDevice) as it was. It makes no context on any
 *               GPU but the device's.
 *     Errors    Texts have CUDA's own name, number and message. DTRAIN_ERR_UNSUPPORTED: no driver, no GPU, or no code
 *               for it in this build. DTRAIN_ERR_MEMORY: the text says how much is free, and the device works on. After
 *               a fault of a kernel, also of your own, every later call returns DTRAIN_ERR_IO: CUDA gives the GPU back
 *               only to a new process.
 *     Bits      They are those of dtrain.h on the CPU, whatever the GPU and nvcc's flags (--use_fast_math, --fmad). A
 *               NaN stays a NaN; its payload may differ.
 *
 * MACROS, before the implementation
 *     DTRAIN_CUDA_STUB      for a machine without CUDA: compiles as C or C++; calls return DTRAIN_ERR_UNSUPPORTED
 *     DTRAIN_CUDA_EMULATE   two GPUs on the CPU, for tests: compiles as C by gcc or clang, on POSIX; make test uses it
 *
 * Emulated kernels run thread after thread, in changing order. Only the device may touch its memory, and your own
 * kernels between dtrain_cuda_emulated_open and _close. A write beside an allocation is DTRAIN_ERR_IO when it is freed.
 * DTRAIN_CUDA_EMULATED_BYTES in the environment is the memory of both GPUs together: 2^34 by default, and 2^28 where an
 * address has 32 bits.
 */

/* ---- >>cuda ----
 * Devices for NVIDIA's GPUs: a dtrain_device over a stream of the CUDA runtime. You need the CUDA Toolkit to build and
 * a driver to run. Without a driver the calls return DTRAIN_ERR_UNSUPPORTED and the program goes on. */
#ifndef DTRAIN__CUDA_H
#define DTRAIN__CUDA_H

#if defined(DTRAIN_CUDA_EMULATE) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE 1 /* mmap's MAP_ANONYMOUS */
#endif
#include "dtrain.h"
#ifdef DTRAIN_NO_DEVICE
#error "dtrain_cuda.h: its devices need the part that DTRAIN_NO_DEVICE leaves out: remove that macro"
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_cuda_desc {
    int index;    /* the GPU, from 0 */
    void *stream; /* a cudaStream_t of yours, which must outlive the device; NULL: a new stream, which is not ordered
                   * with the default stream */
} dtrain_cuda_desc;

/* Counts the GPUs that this process can use.
 *
 *   count    out: 0 on an error
 *   errors   DTRAIN_ERR_UNSUPPORTED  no driver, no GPU, or a build without CUDA; the text says which
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_cuda_count(int *count);

/* Creates a device: a queue on a GPU. Several on one GPU run side by side.
 *
 *   device   out: the device; NULL on an error
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_UNSUPPORTED  as dtrain_cuda_count; or the build has no code for this GPU
 *            DTRAIN_ERR_INVALID      no such GPU; or a stream that is destroyed or another GPU's
 *            DTRAIN_ERR_MEMORY       no memory
 *            DTRAIN_ERR_IO           CUDA returned an error; the text quotes it
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc);

/* Waits for what was queued, and frees the device; NULL is legal. Before it, free the memory that you allocated through
 * the device.
 *
 * one thread per object */
DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device);

/* Returns the stream of a device as a cudaStream_t: queue your own kernels on it, in order with the rest.
 *
 * For a device that dtrain_cuda_create did not make it returns NULL.
 *
 * any thread */
DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device);

#ifdef DTRAIN_CUDA_EMULATE
/* Open the memory of emulated devices to the CPU, and close it again. Call them around your own kernels, which are
 * calls of functions there.
 *
 * The memory is open to the calling thread and to threads that it starts meanwhile. Other threads may have access too.
 *
 * any thread */
DTRAIN_API void dtrain_cuda_emulated_open(void);
DTRAIN_API void dtrain_cuda_emulated_close(void);
#endif

#ifdef __cplusplus
}
#endif

#endif

/* ---- >>cuda-stub ----
 * DTRAIN_CUDA_STUB: the implementation for a program that is built without a CUDA Toolkit, by a compiler of C or C++.
 * Stands before the rest of the implementation, and replaces it. */
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
 * DTRAIN_CUDA_EMULATE: the part of the CUDA runtime that this header calls, on the CPU, so that the code above it is
 * the same. There are two GPUs. The CPU can touch their memory only while a kernel, a copy or a fill runs. The bytes
 * beside an allocation are checked when it is freed. Streams run at once. After an error that lasts, every call reports
 * it, as the runtime does after a kernel's fault. */
#ifndef DTRAIN__CUDA_EMULATE
#define DTRAIN__CUDA_EMULATE

#ifdef DTRAIN_CUDA_EMULATE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#error "DTRAIN_CUDA_EMULATE: include dtrain_cuda.h before any system header, or compile with -D_DEFAULT_SOURCE"
#endif

#ifndef DTRAIN__CUDA_EMULATED_GPUS
#define DTRAIN__CUDA_EMULATED_GPUS 2
#endif
#define DTRAIN__CUDA_EMULATED_FREE 0xee /* bytes that were never written */

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
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorDeviceUninitialized = 201, /* a process opens its own handle */
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorJitCompilerNotFound = 221,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorJitCompilationDisabled = 223,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorContextIsDestroyed = 709,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorNotSupported = 801,
    cudaErrorSystemDriverMismatch = 803,
    cudaErrorCompatNotSupportedOnDevice = 804
};
enum { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum {
    cudaMemcpyDefault = 4,
    cudaEventDisableTiming = 2,
    cudaStreamNonBlocking = 1,
    cudaHostAllocDefault = 0,
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2
};
enum {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrPciBusId = 33,
    cudaDevAttrPciDeviceId = 34,
    cudaDevAttrPciDomainId = 50
};
enum { cudaIpcMemLazyEnablePeerAccess = 1 };

typedef struct cudaPointerAttributes {
    int type, device;
} cudaPointerAttributes;

typedef struct cudaIpcMemHandle_t {
    char reserved[64];
} cudaIpcMemHandle_t;

/* Kinds of things besides the memory types: memory of a pool, and of another process. */
enum { DTRAIN__CUDA_EMULATED_POOL = 10, DTRAIN__CUDA_EMULATED_OPENED };

/* One allocation, stream or event of the emulation. */
typedef struct dtrain__cuda_emulated_thing {
    struct dtrain__cuda_emulated_thing *next;
    char *map; /* of memory: a guard page, the allocation, a guard page */
    char *pointer;
    size_t map_bytes, bytes;
    int kind, gpu;  /* kind: a memory type or one of the above, 's', 'e', or 'p' for a registered page */
    int fd;         /* 1 + the file that other processes may open; 0: none */
    uint64_t id;    /* of memory; for another process's memory, its file's number */
    long opened_of; /* the process that owns it */
    int opened;     /* number of times */
} dtrain__cuda_emulated_thing;

typedef struct dtrain__cuda_emulation {
    pthread_mutex_t mutex;
    dtrain__cuda_emulated_thing *things;
    size_t used;
    int open;                                  /* number of operations that run now */
    char contexts[DTRAIN__CUDA_EMULATED_GPUS]; /* 1: the GPU has a context; contexts last */
    cudaError_t lasting;
    cudaError_t next; /* for tests: the error that a later call reports, once */
    int after;
    int no_ipc;   /* for tests: this GPU shares no memory between processes */
    int no_words; /* for tests: this GPU's streams neither write nor await words */
    uint64_t made;
    int apart; /* for tests: 1: no GPU reaches another's memory */
    uint32_t peers[DTRAIN__CUDA_EMULATED_GPUS][DTRAIN__CUDA_EMULATED_GPUS]; /* 1: the first reaches the second's */
} dtrain__cuda_emulation;

static dtrain__cuda_emulation dtrain__cuda_emulated = {
    PTHREAD_MUTEX_INITIALIZER, NULL, 0, 0, {0}, 0, 0, 0, 0, 0, 0, 0, {{0}}};
static __thread int dtrain__cuda_emulated_gpu;          /* the current GPU */
static __thread int dtrain__cuda_emulated_depth;        /* this thread's operations that run now */
static __thread int dtrain__cuda_emulated_below;        /* the current GPU before a push */
static __thread cudaError_t dtrain__cuda_emulated_last; /* for tests: the error of the program's own last call */

static void dtrain__cuda_emulated_context(int gpu)
{
    __atomic_store_n(&dtrain__cuda_emulated.contexts[gpu], 1, __ATOMIC_RELAXED);
}

static size_t dtrain__cuda_emulated_limit(void)
{
    const char *text = getenv("DTRAIN_CUDA_EMULATED_BYTES");
    return text != NULL ? (size_t)strtoull(text, NULL, 10) : (size_t)1 << (sizeof(size_t) == 8 ? 34 : 28);
}

/* Returns the error that a call reports before it begins. */
static cudaError_t dtrain__cuda_emulated_error(void)
{
    cudaError_t error = dtrain__cuda_emulated.lasting;
    if (error == 0 && dtrain__cuda_emulated.next != 0 && dtrain__cuda_emulated.after-- == 0) {
        error = dtrain__cuda_emulated.next;
        dtrain__cuda_emulated.next = 0;
    }
    return error;
}

/* Returns whether the CPU must not touch memory of this kind. */
static int dtrain__cuda_emulated_guarded(int kind)
{
    return kind == cudaMemoryTypeDevice || kind == DTRAIN__CUDA_EMULATED_POOL || kind == DTRAIN__CUDA_EMULATED_OPENED;
}

/* Returns whether DTRAIN_WITHOUT names `what`, a thing that not every machine has. */
static int dtrain__cuda_emulated_without(const char *what)
{
    const char *text = getenv("DTRAIN_WITHOUT");
    size_t bytes = strlen(what), part;
    for (; text != NULL && *text != '\0'; text += part + (text[part] != '\0')) {
        part = strcspn(text, ",");
        if ((part == bytes && memcmp(text, what, bytes) == 0) || (part == 3 && memcmp(text, "all", 3) == 0))
            return 1;
    }
    return 0;
}

/* Opening and closing all memory around each operation takes many system calls. With protection keys, a thread does it
 * in a register of its own. */
#if defined(__linux__) && defined(__x86_64__) && defined(SYS_pkey_alloc) && defined(SYS_pkey_mprotect)
#define DTRAIN__CUDA_EMULATED_NO_ACCESS 1u /* one of the two bits of a key; the other forbids writes */

static int dtrain__cuda_emulated_key; /* 0: not asked for yet; negative: there is none */

/* Sets the protection and, if the machine has them, the key of memory. Returns 0 or -1. */
static int dtrain__cuda_emulated_lock(char *memory, size_t bytes, int protection, int key)
{
    if (__atomic_load_n(&dtrain__cuda_emulated_key, __ATOMIC_ACQUIRE) <= 0) /* the system refuses key 0 there */
        return mprotect(memory, bytes, protection);
    return (int)syscall(SYS_pkey_mprotect, memory, bytes, protection, key);
}

/* Returns the key, or 0. Locks no bytes first, to see whether the system has that call. */
static int dtrain__cuda_emulated_get_key(void)
{
    int key = __atomic_load_n(&dtrain__cuda_emulated_key, __ATOMIC_ACQUIRE), none = 0;
    if (key == 0) {
        if (!dtrain__cuda_emulated_without("pkeys"))
            key = (int)syscall(SYS_pkey_alloc, 0ul, (unsigned long)DTRAIN__CUDA_EMULATED_NO_ACCESS);
        if (key > 0 && syscall(SYS_pkey_mprotect, NULL, (size_t)0, PROT_NONE, key) != 0) {
            syscall(SYS_pkey_free, key);
            key = -1;
        }
        key = key > 0 ? key : -1;
        if (!__atomic_compare_exchange_n(&dtrain__cuda_emulated_key, &none, key, 0, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE)) {
            if (key > 0)
                syscall(SYS_pkey_free, key);
            key = none;
        }
    }
    return key > 0 ? key : 0;
}

static void dtrain__cuda_emulated_turn_key(int key, int open)
{
    uint32_t rights, high, forbids = 3u << 2 * key;
    __asm__ volatile(".byte 0x0f, 0x01, 0xee" : "=a"(rights), "=d"(high) : "c"(0)); /* rdpkru */
    rights = open ? rights & ~forbids : rights | DTRAIN__CUDA_EMULATED_NO_ACCESS << 2 * key;
    __asm__ volatile(".byte 0x0f, 0x01, 0xef" : : "a"(rights), "c"(0), "d"(0) : "memory"); /* wrpkru */
}
#else
#define dtrain__cuda_emulated_get_key() 0
#define dtrain__cuda_emulated_turn_key(key, open) (void)(key)
#define dtrain__cuda_emulated_lock(memory, bytes, protection, key) mprotect(memory, bytes, protection)
#endif

/* Sets the protection of an allocation, and its key; 0: the key of other memory. A refusal by the system is an error
 * that lasts. */
static void dtrain__cuda_emulated_guard(const dtrain__cuda_emulated_thing *thing, int protection, int key)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = thing->map_bytes - 2 * page;
    (void)key;
    if (dtrain__cuda_emulated_lock(thing->map + page, bytes, protection, key) == 0)
        return;
    fprintf(stderr, "dtrain_cuda.h: the system does not change the protection of %zu bytes of emulated memory: %s\n",
            bytes, strerror(errno));
    dtrain__cuda_emulated.lasting = cudaErrorIllegalAddress;
}

static void dtrain__cuda_emulated_protect(int protection)
{
    for (dtrain__cuda_emulated_thing *thing = dtrain__cuda_emulated.things; thing != NULL; thing = thing->next)
        if (dtrain__cuda_emulated_guarded(thing->kind))
            dtrain__cuda_emulated_guard(thing, protection, 0);
}

/* Stands before all that touches a device's memory; first checks for an error that lasts. */
static void dtrain__cuda_emulated_enter(void)
{
    int key = dtrain__cuda_emulated_get_key();
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    if (dtrain__cuda_emulated.open++ == 0 && key == 0)
        dtrain__cuda_emulated_protect(PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    if (key > 0 && dtrain__cuda_emulated_depth++ == 0)
        dtrain__cuda_emulated_turn_key(key, 1);
}

static void dtrain__cuda_emulated_leave(void)
{
    int key = dtrain__cuda_emulated_get_key();
    if (key > 0 && --dtrain__cuda_emulated_depth == 0)
        dtrain__cuda_emulated_turn_key(key, 0);
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    if (--dtrain__cuda_emulated.open == 0 && key == 0)
        dtrain__cuda_emulated_protect(PROT_NONE);
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
}

/* Puts a registered allocation out of the CPU's reach. */
static void dtrain__cuda_emulated_shut(const dtrain__cuda_emulated_thing *thing)
{
    int key = dtrain__cuda_emulated_get_key();
    if (key > 0) {
        dtrain__cuda_emulated_guard(thing, PROT_READ | PROT_WRITE, key);
        return;
    }
    dtrain__cuda_emulated_enter(); /* leaving shuts the new one if nothing else runs */
    dtrain__cuda_emulated_leave();
}

static cudaError_t dtrain__cuda_emulated_add(int kind, size_t bytes, dtrain__cuda_emulated_thing **made)
{
    dtrain__cuda_emulated_thing *thing = (dtrain__cuda_emulated_thing *)calloc(1, sizeof *thing);
    *made = thing;
    if (thing == NULL)
        return cudaErrorMemoryAllocation;
    dtrain__cuda_emulated_context(dtrain__cuda_emulated_gpu);
    thing->kind = kind, thing->gpu = dtrain__cuda_emulated_gpu, thing->bytes = bytes;
    thing->pointer = (char *)thing; /* for streams and events */
    return cudaSuccess;
}

static void dtrain__cuda_emulated_link(dtrain__cuda_emulated_thing *thing)
{
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    thing->id = thing->id != 0 ? thing->id : ++dtrain__cuda_emulated.made;
    thing->next = dtrain__cuda_emulated.things;
    dtrain__cuda_emulated.things = thing;
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
}

/* Finds a thing of a kind by any of its addresses; take: removes it from the list. kind -1: any memory. */
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
            int counts =
                thing->kind != cudaMemoryTypeHost && thing->kind != DTRAIN__CUDA_EMULATED_OPENED && thing->kind != 'p';
            dtrain__cuda_emulated.used -= counts ? thing->bytes : 0;
            free(thing);
            break;
        }
    }
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    return hit;
}

/* Checks that a stream is of the current GPU; NULL is its own stream. */
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

/* Checks before a kernel whether it may run. */
static cudaError_t dtrain__cuda_emulated_launch(cudaStream_t stream, size_t blocks)
{
    return blocks == 0 || blocks > 0x7fffffffu ? cudaErrorInvalidConfiguration : dtrain__cuda_emulated_stream(stream);
}

/* Returns the name of an error that tests look for, or what the runtime says of it. */
static const char *dtrain__cuda_emulated_text(cudaError_t error, int name)
{
    static const struct {
        cudaError_t error;
        const char *texts[2];
    } known[] = {{cudaErrorMemoryAllocation, {"out of memory", "cudaErrorMemoryAllocation"}},
                 {cudaErrorInsufficientDriver,
                  {"CUDA driver version is insufficient for CUDA runtime version", "cudaErrorInsufficientDriver"}},
                 {cudaErrorNoDevice, {"no CUDA-capable device is detected", "cudaErrorNoDevice"}},
                 {cudaErrorInvalidResourceHandle, {"invalid resource handle", "cudaErrorInvalidResourceHandle"}},
                 {cudaErrorIllegalAddress, {"an illegal memory access was encountered", "cudaErrorIllegalAddress"}},
                 {cudaErrorNotSupported, {"operation not supported", "cudaErrorNotSupported"}}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].error == error)
            return known[i].texts[name];
    return name ? "cudaError" : "emulated error";
}

#define cudaGetErrorName(error) dtrain__cuda_emulated_text(error, 1)
#define cudaGetErrorString(error) dtrain__cuda_emulated_text(error, 0)

static cudaError_t cudaGetLastError(void)
{
    cudaError_t last = dtrain__cuda_emulated_last;
    dtrain__cuda_emulated_last = 0;
    return dtrain__cuda_emulated.lasting != 0 ? dtrain__cuda_emulated.lasting : last;
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
    dtrain__cuda_emulated_context(gpu);
    return cudaSuccess;
}

/* Emulates the driver: the address of a GPU's flag stands for its context. At most one is pushed. */
static int dtrain__cuda_emulated_get(int *gpu, int index)
{
    *gpu = index;
    return dtrain__cuda_emulated.lasting;
}

static int dtrain__cuda_emulated_retain(void **context, int gpu)
{
    *context = dtrain__cuda_emulated.contexts + gpu;
    dtrain__cuda_emulated_context(gpu);
    return dtrain__cuda_emulated.lasting;
}

static int dtrain__cuda_emulated_push(void *context)
{
    dtrain__cuda_emulated_below = dtrain__cuda_emulated_gpu;
    dtrain__cuda_emulated_gpu = (int)((char *)context - dtrain__cuda_emulated.contexts);
    return cudaSuccess;
}

static int dtrain__cuda_emulated_pop(void **context)
{
    *context = dtrain__cuda_emulated.contexts + dtrain__cuda_emulated_gpu;
    dtrain__cuda_emulated_gpu = dtrain__cuda_emulated_below;
    return cudaSuccess;
}

static cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int gpu)
{
    *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : attribute == cudaDevAttrPciBusId ? gpu + 1 : 0;
    return dtrain__cuda_emulated_error();
}

static cudaError_t cudaDeviceCanAccessPeer(int *can, int gpu, int peer)
{
    *can = !dtrain__cuda_emulated.apart && gpu != peer;
    return dtrain__cuda_emulated_error();
}

static cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)flags;
    if (__atomic_exchange_n(&dtrain__cuda_emulated.peers[dtrain__cuda_emulated_gpu][peer], 1, __ATOMIC_SEQ_CST) == 0)
        return dtrain__cuda_emulated_error();
    return dtrain__cuda_emulated_last = cudaErrorPeerAccessAlreadyEnabled;
}

static cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *total = dtrain__cuda_emulated_limit();
    *free_bytes = *total - dtrain__cuda_emulated.used;
    return dtrain__cuda_emulated.lasting;
}

/* Makes a stream or an event. */
static cudaError_t dtrain__cuda_emulated_make(int kind, void **made)
{
    dtrain__cuda_emulated_thing *thing = NULL;
    cudaError_t error = dtrain__cuda_emulated_error();
    if (error == 0)
        error = dtrain__cuda_emulated_add(kind, 0, &thing);
    if (error != 0)
        return error;
    dtrain__cuda_emulated_link(thing);
    *made = thing;
    return cudaSuccess;
}

static cudaError_t dtrain__cuda_emulated_end(int kind, void *made)
{
    return dtrain__cuda_emulated_find(kind, made, 1, NULL) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

#define cudaStreamCreateWithFlags(stream, flags) dtrain__cuda_emulated_make('s', stream)
#define cudaStreamDestroy(stream) dtrain__cuda_emulated_end('s', stream)
#define cudaStreamSynchronize(stream) dtrain__cuda_emulated_stream(stream)
#define cudaEventCreateWithFlags(event, flags) dtrain__cuda_emulated_make('e', event)
#define cudaEventDestroy(event) dtrain__cuda_emulated_end('e', event)

/* Makes a file without a name; gives 1 + its descriptor. */
static cudaError_t dtrain__cuda_emulated_file(int *fd, size_t bytes)
{
    int made = -1;
#ifdef __NR_memfd_create
    if (!dtrain__cuda_emulated.no_ipc && !dtrain__cuda_emulated_without("memfd"))
        made = (int)syscall(__NR_memfd_create, "dtrain-cuda", 1u); /* close-on-exec */
#endif
    FILE *file = made < 0 && !dtrain__cuda_emulated.no_ipc ? tmpfile() : NULL;
    if (file != NULL) {
        made = fcntl(fileno(file), F_DUPFD_CLOEXEC, 0);
        fclose(file);
    }
    if (made < 0)
        return cudaErrorNotSupported;
    if (ftruncate(made, (off_t)bytes) != 0) {
        close(made);
        return cudaErrorMemoryAllocation;
    }
    *fd = made + 1;
    return cudaSuccess;
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

/* Allocates memory that ends at a guard page, except for what an alignment of 256 bytes leaves between. */
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
    if (thing->map == MAP_FAILED || mprotect(thing->map + page, room, PROT_READ | PROT_WRITE) != 0) {
        if (thing->map != MAP_FAILED)
            munmap(thing->map, thing->map_bytes);
        free(thing);
        return cudaErrorMemoryAllocation;
    }
    thing->pointer = thing->map + page + room - (bytes + 255) / 256 * 256;
    if (bytes <= (size_t)1 << 26) /* larger memory takes pages only where it is written */
        memset(thing->map + page, DTRAIN__CUDA_EMULATED_FREE, room);
    dtrain__cuda_emulated_link(thing);
    if (dtrain__cuda_emulated_guarded(kind))
        dtrain__cuda_emulated_shut(thing);
    *pointer = thing->pointer;
    return cudaSuccess;
}

/* Returns whether bytes beside the allocation were written. */
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
    if (!dtrain__cuda_emulated_find(kind, pointer, 1, &thing))
        return cudaErrorInvalidValue;
    dtrain__cuda_emulated_guard(&thing, PROT_READ | PROT_WRITE, 0);
    if (dtrain__cuda_emulated.lasting == 0 && dtrain__cuda_emulated_overrun(&thing)) {
        fprintf(stderr, "dtrain_cuda.h: something was written beside an allocation of %zu bytes of emulated memory\n",
                thing.bytes);
        dtrain__cuda_emulated.lasting = cudaErrorIllegalAddress;
    }
    munmap(thing.map, thing.map_bytes);
    if (thing.fd > 0)
        close(thing.fd - 1);
    return dtrain__cuda_emulated.lasting;
}

static cudaError_t dtrain__cuda_emulated_allocate(int kind, void **pointer, size_t bytes)
{
    size_t limit = dtrain__cuda_emulated_limit();
    int full;
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    full = dtrain__cuda_emulated.used > limit || bytes > limit - dtrain__cuda_emulated.used;
    dtrain__cuda_emulated.used += full ? 0 : bytes;
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    if (full)
        return cudaErrorMemoryAllocation;
    cudaError_t error = dtrain__cuda_emulated_map(kind, pointer, bytes);
    if (error != 0) {
        pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
        dtrain__cuda_emulated.used -= bytes;
        pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    }
    return error;
}

#define cudaMalloc(pointer, bytes) dtrain__cuda_emulated_allocate(cudaMemoryTypeDevice, pointer, bytes)
#define cudaMallocManaged(pointer, bytes) dtrain__cuda_emulated_allocate(cudaMemoryTypeManaged, pointer, bytes)
#define cudaHostAlloc(pointer, bytes, flags) dtrain__cuda_emulated_map(cudaMemoryTypeHost, pointer, bytes)
#define cudaFreeHost(pointer) dtrain__cuda_emulated_unmap(cudaMemoryTypeHost, pointer)

/* For tests: memory that other processes cannot open. cudaFree frees it. */
#define cudaMallocAsync(pointer, bytes, stream) \
    dtrain__cuda_emulated_allocate(DTRAIN__CUDA_EMULATED_POOL, pointer, bytes)

static cudaError_t cudaFree(void *pointer)
{
    static const int kinds[] = {cudaMemoryTypeDevice, DTRAIN__CUDA_EMULATED_POOL, cudaMemoryTypeManaged};
    int i = 0;
    while (i < 2 && !dtrain__cuda_emulated_find(kinds[i], pointer, 0, NULL))
        i++;
    return dtrain__cuda_emulated_unmap(kinds[i], pointer);
}

static cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer)
{
    dtrain__cuda_emulated_thing thing;
    int found = dtrain__cuda_emulated_find(-1, pointer, 0, &thing);
    if (found && dtrain__cuda_emulated_guarded(thing.kind))
        thing.kind = cudaMemoryTypeDevice;
    attributes->type = found ? thing.kind : cudaMemoryTypeUnregistered;
    attributes->device = found ? thing.gpu : -2;
    return dtrain__cuda_emulated.lasting;
}

static cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, cudaStream_t stream)
{
    (void)direction;
    dtrain__cuda_emulated_enter();
    cudaError_t error = dtrain__cuda_emulated_stream(stream);
    if (error == 0)
        memcpy(to, from, bytes);
    dtrain__cuda_emulated_leave();
    return error;
}
#endif

#endif

/* ---- >>cuda-emulate-share ----
 * DTRAIN_CUDA_EMULATE: memory between processes, and words that order their streams. A shared allocation moves into a
 * file without a name. Others find it by the number of this process and of the descriptor, while both exist, so a
 * killed process leaves nothing behind. Opened memory is out of the CPU's reach like the rest, and outlives its owner.
 */
#ifndef DTRAIN__CUDA_EMULATE_SHARE
#define DTRAIN__CUDA_EMULATE_SHARE

#ifdef DTRAIN_CUDA_EMULATE
#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>

/* The contents of a handle. */
typedef struct dtrain__cuda_emulated_token {
    uint64_t device, file; /* numbers of the file, unique while it exists */
    uint64_t map_bytes, at, bytes;
    int32_t process, fd, gpu;
} dtrain__cuda_emulated_token;

/* Emulates the driver's cuPointerGetAttribute for BUFFER_ID, IS_LEGACY_CUDA_IPC_CAPABLE, RANGE_START_ADDR, RANGE_SIZE
 * and MEMPOOL_HANDLE. */
static int dtrain__cuda_emulated_attribute(void *data, int attribute, unsigned long long pointer)
{
    dtrain__cuda_emulated_thing thing;
    if (!dtrain__cuda_emulated_find(-1, (const void *)(uintptr_t)pointer, 0, &thing))
        return cudaErrorInvalidValue;
    switch (attribute) {
    case 7: *(unsigned long long *)data = (unsigned long long)thing.id; return 0;
    case 10: *(int *)data = thing.kind == cudaMemoryTypeDevice; return 0;
    case 11: *(unsigned long long *)data = (unsigned long long)(uintptr_t)thing.pointer; return 0;
    case 12: *(size_t *)data = thing.bytes; return 0;
    case 17: *(void **)data = thing.kind == DTRAIN__CUDA_EMULATED_POOL ? &dtrain__cuda_emulated : NULL; return 0;
    default: return cudaErrorInvalidValue;
    }
}

/* Moves an allocation into a file. Hold the mutex; nothing may run. */
static cudaError_t dtrain__cuda_emulated_move(dtrain__cuda_emulated_thing *thing)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = thing->map_bytes - 2 * page;
    cudaError_t error = dtrain__cuda_emulated_file(&thing->fd, room);
    if (error != 0)
        return error;
    char *copy = (char *)mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, thing->fd - 1, 0);
    if (copy != MAP_FAILED) {
        dtrain__cuda_emulated_guard(thing, PROT_READ, 0);
        if (dtrain__cuda_emulated.lasting == 0)
            memcpy(copy, thing->map + page, room);
        munmap(copy, room);
        int moved = mmap(thing->map + page, room, PROT_NONE, MAP_SHARED | MAP_FIXED, thing->fd - 1, 0) != MAP_FAILED;
        if (dtrain__cuda_emulated_get_key() > 0)
            dtrain__cuda_emulated_shut(thing);
        else if (!moved)
            dtrain__cuda_emulated_guard(thing, PROT_NONE, 0);
        if (moved)
            return cudaSuccess;
    }
    close(thing->fd - 1);
    thing->fd = 0;
    return cudaErrorMemoryAllocation;
}

/* Finds an allocation that is to be shared. Hold the mutex. */
static dtrain__cuda_emulated_thing *dtrain__cuda_emulated_whole(const void *pointer)
{
    dtrain__cuda_emulated_thing *thing = dtrain__cuda_emulated.things;
    while (thing != NULL && (thing->kind != cudaMemoryTypeDevice || thing->pointer != (const char *)pointer))
        thing = thing->next;
    return thing;
}

static cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer)
{
    dtrain__cuda_emulated_token token;
    struct stat file;
    cudaError_t error = dtrain__cuda_emulated_error();
    if (error == 0 && dtrain__cuda_emulated.no_ipc)
        error = cudaErrorNotSupported;
    if (error != 0)
        return error;
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    dtrain__cuda_emulated_thing *thing;
    while ((thing = dtrain__cuda_emulated_whole(pointer)) != NULL && thing->fd == 0 && dtrain__cuda_emulated.open > 0) {
        pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
        sched_yield(); /* kernels of other threads run: memory must not move */
        pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    }
    error = thing != NULL ? cudaSuccess : cudaErrorInvalidValue;
    if (thing != NULL && thing->fd == 0)
        error = dtrain__cuda_emulated_move(thing);
    if (error == 0 && fstat(thing->fd - 1, &file) == 0) {
        memset(&token, 0, sizeof token);
        token.device = (uint64_t)file.st_dev, token.file = (uint64_t)file.st_ino;
        token.map_bytes = (uint64_t)thing->map_bytes, token.bytes = (uint64_t)thing->bytes;
        token.at = (uint64_t)(thing->pointer - thing->map);
        token.process = (int32_t)getpid(), token.fd = thing->fd - 1, token.gpu = thing->gpu;
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &token, sizeof token);
    }
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    return error;
}

/* Opens the file of a token. It is an error if the file is this process's own or gone, or if its process is gone. */
static cudaError_t dtrain__cuda_emulated_take(const cudaIpcMemHandle_t *handle, dtrain__cuda_emulated_token *token,
                                              int *fd)
{
    char path[64];
    struct stat file;
    cudaError_t error = dtrain__cuda_emulated_error();
    if (error == 0 && dtrain__cuda_emulated.no_ipc)
        error = cudaErrorNotSupported;
    memcpy(token, handle, sizeof *token);
    if (error == 0 && token->process == (int32_t)getpid())
        error = cudaErrorDeviceUninitialized;
    if (error != 0)
        return error;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)token->process, (int)token->fd);
    *fd = stat(path, &file) == 0 && S_ISREG(file.st_mode) ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (*fd < 0)
        return cudaErrorInvalidResourceHandle;
    if (fstat(*fd, &file) == 0 && (uint64_t)file.st_dev == token->device && (uint64_t)file.st_ino == token->file)
        return cudaSuccess;
    close(*fd);
    return cudaErrorInvalidResourceHandle;
}

/* Opens memory that is open already, at the same address. */
static int dtrain__cuda_emulated_again(const dtrain__cuda_emulated_token *token, void **pointer)
{
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    dtrain__cuda_emulated_thing *thing = dtrain__cuda_emulated.things;
    while (thing != NULL && (thing->kind != DTRAIN__CUDA_EMULATED_OPENED || thing->id != token->file ||
                             thing->opened_of != (long)token->process))
        thing = thing->next;
    if (thing != NULL) {
        thing->opened++;
        *pointer = thing->pointer;
    }
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    return thing != NULL;
}

static cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    dtrain__cuda_emulated_token token;
    dtrain__cuda_emulated_thing *thing = NULL;
    int fd;
    cudaError_t error = dtrain__cuda_emulated_take(&handle, &token, &fd);
    (void)flags;
    if (error != 0)
        return error;
    if (dtrain__cuda_emulated_again(&token, pointer)) {
        close(fd);
        return cudaSuccess;
    }
    error = dtrain__cuda_emulated_add(DTRAIN__CUDA_EMULATED_OPENED, (size_t)token.bytes, &thing);
    char *map =
        (char *)mmap(NULL, (size_t)token.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (error == 0 && (map == MAP_FAILED || mmap(map + page, (size_t)token.map_bytes - 2 * page, PROT_READ | PROT_WRITE,
                                                 MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED))
        error = cudaErrorMemoryAllocation;
    close(fd);
    if (error != 0) {
        if (map != MAP_FAILED)
            munmap(map, (size_t)token.map_bytes);
        free(thing);
        return error;
    }
    thing->map = map, thing->map_bytes = (size_t)token.map_bytes, thing->pointer = map + token.at;
    thing->gpu = token.gpu, thing->id = token.file, thing->opened_of = (long)token.process, thing->opened = 1;
    dtrain__cuda_emulated_link(thing);
    dtrain__cuda_emulated_shut(thing); /* without keys: first waits for what other threads run */
    *pointer = thing->pointer;
    return cudaSuccess;
}

static cudaError_t cudaIpcCloseMemHandle(void *pointer)
{
    int left = -1;
    pthread_mutex_lock(&dtrain__cuda_emulated.mutex);
    dtrain__cuda_emulated_thing **link = &dtrain__cuda_emulated.things, *thing;
    while ((thing = *link) != NULL &&
           (thing->kind != DTRAIN__CUDA_EMULATED_OPENED || thing->pointer != (char *)pointer))
        link = &thing->next;
    if (thing != NULL && (left = --thing->opened) == 0) {
        *link = thing->next;
        munmap(thing->map, thing->map_bytes);
        free(thing);
    }
    pthread_mutex_unlock(&dtrain__cuda_emulated.mutex);
    return left >= 0 ? dtrain__cuda_emulated.lasting : cudaErrorInvalidValue;
}

static cudaError_t cudaHostRegister(void *page, size_t bytes, unsigned flags)
{
    dtrain__cuda_emulated_thing *thing;
    cudaError_t error = dtrain__cuda_emulated_error();
    (void)flags;
    if (error == 0 && dtrain__cuda_emulated_find('p', page, 0, NULL))
        error = cudaErrorHostMemoryAlreadyRegistered;
    if (error == 0)
        error = dtrain__cuda_emulated_add('p', bytes, &thing);
    if (error != 0)
        return error;
    thing->pointer = (char *)page;
    dtrain__cuda_emulated_link(thing);
    return cudaSuccess;
}

static cudaError_t cudaHostUnregister(void *page)
{
    return dtrain__cuda_emulated_find('p', page, 1, NULL) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

static cudaError_t cudaHostGetDevicePointer(void **pointer, void *page, unsigned flags)
{
    (void)flags;
    *pointer = page;
    return dtrain__cuda_emulated_find('p', page, 0, NULL) ? dtrain__cuda_emulated_error() : cudaErrorInvalidValue;
}

/* Checks before a word whether it is in a registered page. */
static cudaError_t dtrain__cuda_emulated_word(cudaStream_t stream, unsigned long long at)
{
    cudaError_t error = dtrain__cuda_emulated_stream(stream);
    if (error == 0 && dtrain__cuda_emulated.no_words)
        error = cudaErrorNotSupported;
    if (error == 0 &&
        (at % sizeof(uint32_t) != 0 || !dtrain__cuda_emulated_find('p', (const void *)(uintptr_t)at, 0, NULL)))
        error = cudaErrorInvalidValue;
    return error;
}

/* Waits a little for what another rank's kernel or queue writes. Ranks outnumber processors, so after many turns it
 * sleeps. */
static void dtrain__cuda_emulated_pause(unsigned turn)
{
    if (turn < 800)
        sched_yield();
    else
        usleep(200);
}

/* Emulates the driver's cuStreamWriteValue32. */
static int dtrain__cuda_emulated_write(cudaStream_t stream, unsigned long long at, uint32_t value, unsigned flags)
{
    cudaError_t error = dtrain__cuda_emulated_word(stream, at);
    (void)flags;
    if (error == 0)
        __atomic_store_n((uint32_t *)(uintptr_t)at, value, __ATOMIC_SEQ_CST);
    return error;
}

/* Emulates the driver's cuStreamWaitValue32. Streams run at once. A word whose write came before this call is there,
 * and is not waited for. */
static int dtrain__cuda_emulated_await(cudaStream_t stream, unsigned long long at, uint32_t value, unsigned flags)
{
    cudaError_t error = dtrain__cuda_emulated_word(stream, at);
    (void)flags;
    for (unsigned turn = 0;
         error == 0 && (int32_t)(__atomic_load_n((uint32_t *)(uintptr_t)at, __ATOMIC_SEQ_CST) - value) < 0; turn++)
        dtrain__cuda_emulated_pause(turn);
    return error;
}
#endif

#endif

/* ---- >>cuda-body ----
 * How kernels are written. A kernel's body is a C function of a thread's place. The device's compiler makes a kernel of
 * it. The emulation (DTRAIN_CUDA_EMULATE) calls it thread after thread on the CPU. A body is called once a phase. What
 * threads of a block write to shared memory in one phase, all of them see in the next. The order of threads within a
 * phase, and of blocks, is open; the emulation varies it.
 *
 * Arithmetic goes through the functions below. Each rounds to nearest and keeps subnormals, whatever the compiler's
 * flags. */
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

typedef struct dtrain__cuda_none { /* for kernels without shared memory, or without variables */
    char none;
} dtrain__cuda_none;

/* 16 bytes of any type, loaded and stored at once, at multiples of 16. */
typedef struct dtrain__cuda_vector {
    uint32_t word[4];
} __attribute__((aligned(16), may_alias)) dtrain__cuda_vector;

typedef uint16_t dtrain__cuda_u16 __attribute__((may_alias));
typedef uint32_t dtrain__cuda_u32 __attribute__((may_alias));
typedef uint64_t dtrain__cuda_u64 __attribute__((may_alias));

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_UNROLL
#define DTRAIN__CUDA_ROLLED
#else
#define DTRAIN__CUDA_UNROLL _Pragma("unroll")
#define DTRAIN__CUDA_ROLLED _Pragma("unroll 1")
#endif

/* Defines name_launch(device, caller, blocks, args). It runs name_body(args, at, shared, own, phase) for every thread
 * of the blocks, phases 0 to phases - 1. Errors name the caller. own: a thread's variables, which last over its phases.
 */
#define DTRAIN__CUDA_KERNEL(name, args_type, shared_type, own_type, thread_count, phases) \
    DTRAIN__CUDA_KERNEL_BY(0, (thread_count), name, args_type, shared_type, own_type, thread_count, phases)

/* Does the same for a kernel whose blocks all run at the same time, so that one may wait for others, on any device. No
 * block begins a phase before all have ended the one before it. */
#define DTRAIN__CUDA_TOGETHER(name, args_type, shared_type, own_type, thread_count, phases) \
    DTRAIN__CUDA_KERNEL_BY(1, (thread_count, 1), name, args_type, shared_type, own_type, thread_count, phases)

#ifdef DTRAIN_CUDA_EMULATE
/* The direction of the walk over threads and blocks, which alternates. */
static __thread unsigned dtrain__cuda_turn;

#define DTRAIN__CUDA_KERNEL_BY(together, bounds, name, args_type, shared_type, own_type, thread_count, phases) \
    __attribute__((unused)) static dtrain_status name##_launch(dtrain_device *device, const char *caller, \
                                                               size_t blocks, const args_type *args) \
    { \
        size_t some = (together) ? blocks : 1, all = some * (thread_count); \
        shared_type *shared = (shared_type *)malloc(some * sizeof *shared); \
        own_type *own = (own_type *)malloc(all * sizeof *own); \
        unsigned turn = dtrain__cuda_turn++; \
        dtrain__cuda_emulated_enter(); \
        cudaError_t status = dtrain__cuda_emulated_launch(dtrain__cuda_queue_of(device)->stream, blocks); \
        if (shared == NULL || own == NULL) \
            status = cudaErrorMemoryAllocation; \
        for (size_t first = 0; status == 0 && first < blocks; first += some) { \
            memset(shared, 0xa5, some * sizeof *shared); \
            memset(own, 0xa5, all * sizeof *own); \
            for (int phase = 0; phase < (phases); phase++) \
                for (size_t i = 0; i < all; i++) { \
                    size_t t = (turn + (unsigned)phase) % 2 != 0 ? all - 1 - i : i, b = first + t / (thread_count); \
                    dtrain__cuda_at at = {turn % 4 < 2 ? b : blocks - 1 - b, blocks, (uint32_t)(t % (thread_count)), \
                                          (thread_count)}; \
                    name##_body(args, at, shared + t / (thread_count), own + t, phase); \
                } \
        } \
        dtrain__cuda_emulated_leave(); \
        free(shared); \
        free(own); \
        return dtrain__cuda_status(device, caller, status); \
    }
#else
#define DTRAIN__CUDA_KERNEL_BY(together, bounds, name, args_type, shared_type, own_type, thread_count, phases) \
    static __global__ void __launch_bounds__ bounds name(const __grid_constant__ args_type args) \
    { \
        __shared__ shared_type shared; \
        own_type own; \
        dtrain__cuda_at at = {blockIdx.x, gridDim.x, threadIdx.x, (thread_count)}; \
        _Pragma("unroll") for (int phase = 0; phase < (phases); phase++) \
        { \
            if (phase > 0) \
                __syncthreads(); \
            name##_body(&args, at, &shared, &own, phase); \
        } \
    } \
    static dtrain_status name##_launch(dtrain_device *device, const char *caller, size_t blocks, const args_type *args)\
    { \
        void *list[] = {(void *)args}; /* <<<>>> could report an error of the program's own last call */ \
        cudaStream_t stream = dtrain__cuda_queue_of(device)->stream; \
        const void *kernel = (const void *)name; \
        dim3 grid((unsigned)blocks), block(thread_count); \
        cudaError_t error = blocks > 0x7fffffffu ? cudaErrorInvalidConfiguration \
                            : (together) ? cudaLaunchCooperativeKernel(kernel, grid, block, list, 0, stream) \
                                         : cudaLaunchKernel(kernel, grid, block, list, 0, stream); \
        return dtrain__cuda_status(device, caller, error); \
    }
#endif

/* Each operation stands alone: it is not joined with a neighbour, and keeps subnormals. The compiler's own operators do
 * neither under --fmad and --use_fast_math. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign) \
    DTRAIN__CUDA_FN type name(type a, type b) \
    { \
        volatile type result = a sign b; /* no contraction */ \
        return result; \
    }
#define DTRAIN__CUDA_UNARY(name, to, to_letter, from, from_letter, instruction, expression) \
    DTRAIN__CUDA_FN to name(from a) \
    { \
        return expression; \
    }
#else
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign) \
    DTRAIN__CUDA_FN type name(type a, type b) \
    { \
        type result; \
        asm(instruction " %0, %1, %2;" : "=" letter(result) : letter(a), letter(b)); \
        return result; \
    }
#define DTRAIN__CUDA_UNARY(name, to, to_letter, from, from_letter, instruction, expression) \
    DTRAIN__CUDA_FN to name(from a) \
    { \
        to result; \
        asm(instruction " %0, %1;" : "=" to_letter(result) : from_letter(a)); \
        return result; \
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
DTRAIN__CUDA_UNARY(dtrain__cuda_sqrt_f32, float, "f", float, "f", "sqrt.rn.f32", __builtin_sqrtf(a))
DTRAIN__CUDA_UNARY(dtrain__cuda_sqrt_f64, double, "d", double, "d", "sqrt.rn.f64", __builtin_sqrt(a))
DTRAIN__CUDA_UNARY(dtrain__cuda_widen_f32, double, "d", float, "f", "cvt.f64.f32", (double)a)
DTRAIN__CUDA_UNARY(dtrain__cuda_narrow_f64, float, "f", double, "d", "cvt.rn.f32.f64", (float)a)

#define DTRAIN__CUDA_SAME_BITS(name, to, from) \
    DTRAIN__CUDA_FN to name(from x) \
    { \
        to same; \
        memcpy(&same, &x, sizeof same); \
        return same; \
    }

DTRAIN__CUDA_SAME_BITS(dtrain__cuda_bits_f32, uint32_t, float)
DTRAIN__CUDA_SAME_BITS(dtrain__cuda_float_of, float, uint32_t)
DTRAIN__CUDA_SAME_BITS(dtrain__cuda_bits_f64, uint64_t, double)
DTRAIN__CUDA_SAME_BITS(dtrain__cuda_double_of, double, uint64_t)

/* Integer atomics in shared or device memory; each returns the old value. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_ATOMIC(name, type, native, instruction, after) \
    DTRAIN__CUDA_FN type name(type *to, type value) \
    { \
        type before = *to; \
        *to = after; \
        return before; \
    }
#else
#define DTRAIN__CUDA_ATOMIC(name, type, native, instruction, after) \
    DTRAIN__CUDA_FN type name(type *to, type value) \
    { \
        return instruction((native *)to, (native)value); \
    }
#endif
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_add_u32, uint32_t, unsigned, atomicAdd, before + value)
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_add_u64, uint64_t, unsigned long long, atomicAdd, before + value)
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_max_u32, uint32_t, unsigned, atomicMax, value > before ? value : before)
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_or_u32, uint32_t, unsigned, atomicOr, before | value)

/* ---- words at any address ----
 * `align`, the same for all threads, says what the address is a multiple of. 16: a vector is loaded and stored at once;
 * 4: word by word; 1: byte by byte. */

static int dtrain__cuda_align_of(const void *pointer)
{
    return (uintptr_t)pointer % 16 == 0 ? 16 : (uintptr_t)pointer % 4 == 0 ? 4 : 1;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_word_load(const unsigned char *from, int align)
{
    uint32_t word;
    if (align >= 4)
        return *(const dtrain__cuda_u32 *)from;
    memcpy(&word, from, sizeof word);
    return word;
}

DTRAIN__CUDA_FN void dtrain__cuda_word_store(unsigned char *to, uint32_t word, int align)
{
    if (align >= 4)
        *(dtrain__cuda_u32 *)to = word;
    else
        memcpy(to, &word, sizeof word);
}

/* Loads the first n words of a vector; the others are zero. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_vector_load(const unsigned char *from, size_t n, int align)
{
    dtrain__cuda_vector x;
    if (align == 16 && n >= 4)
        return *(const dtrain__cuda_vector *)from;
    x.word[0] = n > 0 ? dtrain__cuda_word_load(from, align) : 0;
    x.word[1] = n > 1 ? dtrain__cuda_word_load(from + 4, align) : 0;
    x.word[2] = n > 2 ? dtrain__cuda_word_load(from + 8, align) : 0;
    x.word[3] = n > 3 ? dtrain__cuda_word_load(from + 12, align) : 0;
    return x;
}

DTRAIN__CUDA_FN void dtrain__cuda_vector_store(unsigned char *to, dtrain__cuda_vector x, size_t n, int align)
{
    if (align == 16 && n >= 4) {
        *(dtrain__cuda_vector *)to = x;
        return;
    }
    for (uint32_t k = 0; k < 4; k++)
        if (k < n)
            dtrain__cuda_word_store(to + 4 * k, x.word[k], align);
}

#endif

/* ---- >>cuda-queue ----
 * What every operation needs of a device: its stream, errors as status and text, and whether a kernel may touch a
 * pointer. */
#ifndef DTRAIN__CUDA_QUEUE
#define DTRAIN__CUDA_QUEUE

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

/* ---- >>cuda-copy ----
 * GPU memory, pinned memory, copies, fills and events: what the runtime does itself. DTRAIN__CUDA_ROW wraps the
 * functions as rows of the table, and takes care of the calling thread's current GPU. */
#ifndef DTRAIN__CUDA_COPY
#define DTRAIN__CUDA_COPY

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

/* ---- >>cuda-share ----
 * Sharing a GPU's memory with other processes of the host, by CUDA's legacy IPC. A handle names a whole allocation of
 * cudaMalloc; the place of a pointer in it travels beside. Streams of processes are ordered by words in memory of the
 * CPU that all have mapped. Waits for an event of a killed process may never end; a word can be written for that
 * process. */
#ifndef DTRAIN__CUDA_SHARE
#define DTRAIN__CUDA_SHARE

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

/* ---- >>cuda-walk ----
 * How kernels walk flat arrays. They take groups of 16 bytes of the widest array if all pointers reach a multiple of
 * that at one index. Before that index, after the last group, and if there is no such index, they take single elements.
 * An element belongs to one thread, which reads all of it before it writes, so outputs may be inputs. Any alignment
 * will do, even one that does not suit an element. */
#ifndef DTRAIN__CUDA_WALK
#define DTRAIN__CUDA_WALK

#define DTRAIN__CUDA_THREADS 256
/* Most blocks a processor. A block that ends is faster than one that goes round (3 % of a copy on an H100), so almost
 * none does. The emulation's do, as the code for it needs tests. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_BLOCKS 32
#else
#define DTRAIN__CUDA_BLOCKS 65536
#endif

/* Elements [head, head + groups * lanes) go by groups; the rest, `singles`, one by one. */
typedef struct dtrain__cuda_walk {
    size_t head, groups, singles, lanes;
} dtrain__cuda_walk;

/* Bit h of the result: pointer, h elements on, is at a multiple of the bytes of `lanes` elements. */
static uint32_t dtrain__cuda_heads(const void *pointer, size_t width, size_t lanes)
{
    uint32_t heads = 0;
    for (size_t h = 0; h < lanes; h++)
        if (((uintptr_t)pointer + h * width) % (lanes * width) == 0)
            heads |= (uint32_t)1 << h;
    return heads;
}

/* heads: the results of dtrain__cuda_heads for all pointers, joined by &. */
static dtrain__cuda_walk dtrain__cuda_walk_make(uint32_t heads, size_t lanes, size_t count)
{
    dtrain__cuda_walk walk = {0, 0, 0, lanes};
    while (heads != 0 && (heads >> walk.head & 1) == 0)
        walk.head++;
    if (heads != 0 && count > walk.head)
        walk.groups = (count - walk.head) / lanes;
    walk.singles = count - walk.groups * lanes;
    return walk;
}

/* Checks the arrays of a call, all as long as the first, and says how to walk them together. */
static dtrain_status dtrain__cuda_walk_arrays(dtrain_device *device, const char *call, const dtrain__cuda_array *arrays,
                                              dtrain__cuda_walk *walk)
{
    uint32_t heads = ~(uint32_t)0;
    size_t widest = 0;
    for (size_t i = 0; arrays[i].what != NULL; i++)
        widest = arrays[i].width > widest ? arrays[i].width : widest;
    for (size_t i = 0; arrays[i].what != NULL; i++)
        if (arrays[i].pointer != NULL)
            heads &= dtrain__cuda_heads(arrays[i].pointer, arrays[i].width, 16 / widest);
    *walk = dtrain__cuda_walk_make(heads, 16 / widest, arrays->count);
    return dtrain__cuda_arrays(device, call, arrays);
}

/* Returns the blocks of a kernel whose threads hold `unroll` groups at once. */
static size_t dtrain__cuda_walk_blocks(dtrain_device *device, const dtrain__cuda_walk *walk, size_t unroll)
{
    size_t most = (size_t)dtrain__cuda_queue_of(device)->processors * DTRAIN__CUDA_BLOCKS;
    size_t grouped = walk->groups / (DTRAIN__CUDA_THREADS * unroll), single = walk->singles / DTRAIN__CUDA_THREADS;
    size_t blocks = (grouped > single ? grouped : single) + 1;
    return blocks < most ? blocks : most;
}

/* Returns the bits of one element of 1, 2, 4 or 8 bytes. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_element(const unsigned char *at, size_t width)
{
    uint64_t bits = 0;
    if (width == 1)
        return *at;
    if ((uintptr_t)at % width != 0) {
        for (size_t i = 0; i < width; i++)
            bits |= (uint64_t)at[i] << 8 * i;
        return bits;
    }
    if (width == 2)
        return *(const dtrain__cuda_u16 *)at;
    if (width == 4)
        return *(const dtrain__cuda_u32 *)at;
    return *(const dtrain__cuda_u64 *)at;
}

DTRAIN__CUDA_FN void dtrain__cuda_element_store(unsigned char *at, size_t width, uint64_t bits)
{
    if (width == 1)
        *at = (unsigned char)bits;
    else if ((uintptr_t)at % width != 0)
        for (size_t i = 0; i < width; i++)
            at[i] = (unsigned char)(bits >> 8 * i);
    else if (width == 2)
        *(dtrain__cuda_u16 *)at = (uint16_t)bits;
    else if (width == 4)
        *(dtrain__cuda_u32 *)at = (uint32_t)bits;
    else
        *(dtrain__cuda_u64 *)at = bits;
}

/* Loads a whole group from element number `element` on, or that element alone, in the lowest lane above zeros. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_load(const void *from, size_t element, size_t width, int whole)
{
    const unsigned char *at = (const unsigned char *)from + element * width;
    dtrain__cuda_vector v = {{0, 0, 0, 0}};
    uint64_t bits;
    if (whole)
        return *(const dtrain__cuda_vector *)at;
    bits = dtrain__cuda_element(at, width);
    v.word[0] = (uint32_t)bits;
    v.word[1] = (uint32_t)(bits >> 32);
    return v;
}

DTRAIN__CUDA_FN void dtrain__cuda_store(void *to, size_t element, size_t width, int whole, dtrain__cuda_vector v)
{
    unsigned char *at = (unsigned char *)to + element * width;
    if (whole)
        *(dtrain__cuda_vector *)at = v;
    else
        dtrain__cuda_element_store(at, width, v.word[0] | (uint64_t)v.word[1] << 32);
}

/* Does the same for groups of 4 elements of 16 bits that accompany groups of 32 bits, in one 64-bit word. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_load_half(const void *from, size_t element, int whole)
{
    const unsigned char *at = (const unsigned char *)from + element * 2;
    return whole ? *(const dtrain__cuda_u64 *)at : dtrain__cuda_element(at, 2);
}

DTRAIN__CUDA_FN void dtrain__cuda_store_half(void *to, size_t element, int whole, uint64_t bits)
{
    unsigned char *at = (unsigned char *)to + element * 2;
    if (whole)
        *(dtrain__cuda_u64 *)at = bits;
    else
        dtrain__cuda_element_store(at, 2, bits);
}

/* Defines name_walk(device, call, args), which queues a walk args->walk. name_load(args, element, whole) returns what a
 * thread holds of a group or an element; name_store(args, element, whole, &held) does the rest. A thread loads `unroll`
 * groups before it stores the first. Past the end it loads its first group again, which takes no branch. */
#define DTRAIN__CUDA_WALK_KERNEL(name, args_type, held_type, lanes, unroll) \
    DTRAIN__CUDA_FN void name##_body(const args_type *args, dtrain__cuda_at at, dtrain__cuda_none *shared, \
                                     dtrain__cuda_none *own, int phase) \
    { \
        size_t threads = at.threads, groups = args->walk.groups, head = args->walk.head; \
        (void)shared, (void)own, (void)phase; \
        for (size_t first = at.block * threads * (unroll) + at.thread; first < groups; \
             first += at.blocks * threads * (unroll)) { \
            held_type held[unroll]; \
            DTRAIN__CUDA_UNROLL for (size_t u = 0; u < (unroll); u++) \
            { \
                size_t group = first + u * threads; \
                held[u] = name##_load(args, head + (group < groups ? group : first) * (lanes), 1); \
            } \
            DTRAIN__CUDA_UNROLL for (size_t u = 0; u < (unroll); u++) if (first + u * threads < groups) \
                name##_store(args, head + (first + u * threads) * (lanes), 1, &held[u]); \
        } \
        for (size_t i = at.block * threads + at.thread; i < args->walk.singles; i += at.blocks * threads) { \
            size_t element = i < head ? i : i + groups * (lanes); \
            held_type held = name##_load(args, element, 0); \
            name##_store(args, element, 0, &held); \
        } \
    } \
    DTRAIN__CUDA_KERNEL(name, args_type, dtrain__cuda_none, dtrain__cuda_none, DTRAIN__CUDA_THREADS, 1) \
    static dtrain_status name##_walk(dtrain_device *device, const char *call, const args_type *args) \
    { \
        return name##_launch(device, call, dtrain__cuda_walk_blocks(device, &args->walk, unroll), args); \
    }

#endif

/* ---- >>cuda-convert ----
 * Conversions between float dtypes, with the bits of >>dtype. They use its integer arithmetic, and the hardware's where
 * that rounds the same. Between float32 and 16 bits a thread holds several groups. All other pairs go element by
 * element through float64's bits; no training step waits for them. */
#ifndef DTRAIN__CUDA_CONVERT
#define DTRAIN__CUDA_CONVERT

#define DTRAIN__CUDA_CONVERT_GROUPS 4 /* groups that a thread loads before it stores the first */

DTRAIN__CUDA_FN uint32_t dtrain__cuda_bf16_of(float x)
{
    uint32_t bits = dtrain__cuda_bits_f32(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

/* Returns the nearest float16; some NaN for a NaN. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_f16_of(float x)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t bits = dtrain__cuda_bits_f32(x), size = bits & 0x7fffffffu, exponent = size >> 23;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
    uint32_t mantissa = (size & 0x7fffffu) | 0x800000u, shift = exponent < 113 ? 126 - exponent : 1, small;
    shift = shift > 31 ? 31 : shift;
    small = (mantissa + ((1u << (shift - 1)) - 1) + (mantissa >> shift & 1)) >> shift;
    normal = normal > 0x7c00u ? 0x7c00u : normal;
    if (size > 0x7f800000u)
        return 0x7fffu;
    return (bits >> 16 & 0x8000u) | (exponent < 113 ? small : normal);
#else
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
#endif
}

/* Returns the float16 in the lowest 16 bits, exactly; some NaN for a NaN. */
DTRAIN__CUDA_FN float dtrain__cuda_of_f16(uint32_t half)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t sign = (half & 0x8000u) << 16, size = half & 0x7fffu, exponent = size >> 10;
    float small = dtrain__cuda_float_of(0x3f000000u | size) - 0.5f;
    if (exponent == 31)
        return dtrain__cuda_float_of(size > 0x7c00u ? 0x7fffffffu : sign | 0x7f800000u);
    return dtrain__cuda_float_of(sign | (exponent == 0 ? dtrain__cuda_bits_f32(small) : (size << 13) + 0x38000000u));
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((uint16_t)half));
    return x;
#endif
}

/* Two floats of 16 bits in one word, the first in the low half. */
DTRAIN__CUDA_FN float dtrain__cuda_low_f16(uint32_t word)
{
    return dtrain__cuda_of_f16(word & 0xffffu);
}

DTRAIN__CUDA_FN float dtrain__cuda_high_f16(uint32_t word)
{
    return dtrain__cuda_of_f16(word >> 16);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_both_f16(float low, float high)
{
    return dtrain__cuda_f16_of(low) | dtrain__cuda_f16_of(high) << 16;
}

DTRAIN__CUDA_FN float dtrain__cuda_low_bf16(uint32_t word)
{
    return dtrain__cuda_float_of(word << 16);
}

DTRAIN__CUDA_FN float dtrain__cuda_high_bf16(uint32_t word)
{
    return dtrain__cuda_float_of(word & 0xffff0000u);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_both_bf16(float low, float high)
{
    return dtrain__cuda_bf16_of(low) | dtrain__cuda_bf16_of(high) << 16;
}

/* A format, with the fields of >>dtype. E4M3 is the one without infinities. */
typedef struct dtrain__cuda_format {
    int exponent, mantissa, finite, bytes;
} dtrain__cuda_format;

typedef struct dtrain__cuda_convert_args {
    const void *in;
    void *out;
    dtrain__cuda_walk walk;
    dtrain__cuda_format from, to;
} dtrain__cuda_convert_args;

/* Converts float32 bits to 16 bits and back; a NaN keeps its sign and payload. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_narrow_bf16_one(uint32_t bits)
{
    return dtrain__cuda_bf16_of(dtrain__cuda_float_of(bits));
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_narrow_f16_one(uint32_t bits)
{
    uint32_t nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : dtrain__cuda_f16_of(dtrain__cuda_float_of(bits));
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_widen_bf16_one(uint32_t half)
{
    return half << 16;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_widen_f16_one(uint32_t half)
{
    uint32_t nan = (half & 0x8000u) << 16 | 0x7fc00000u | (half & 0x3ffu) << 13;
    return (half & 0x7fffu) > 0x7c00u ? nan : dtrain__cuda_bits_f32(dtrain__cuda_of_f16(half));
}

#define DTRAIN__CUDA_NARROW(name) \
    DTRAIN__CUDA_FN dtrain__cuda_vector name##_load(const dtrain__cuda_convert_args *args, size_t element, int whole) \
    { \
        return dtrain__cuda_load(args->in, element, 4, whole); \
    } \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_convert_args *args, size_t element, int whole, \
                                      const dtrain__cuda_vector *held) \
    { \
        uint64_t out = 0; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) out |= (uint64_t)name##_one(held->word[i]) << 16 * i; \
        dtrain__cuda_store_half(args->out, element, whole, out); \
    } \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_convert_args, dtrain__cuda_vector, 4, DTRAIN__CUDA_CONVERT_GROUPS)

#define DTRAIN__CUDA_WIDEN(name) \
    DTRAIN__CUDA_FN uint64_t name##_load(const dtrain__cuda_convert_args *args, size_t element, int whole) \
    { \
        return dtrain__cuda_load_half(args->in, element, whole); \
    } \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_convert_args *args, size_t element, int whole, \
                                      const uint64_t *held) \
    { \
        dtrain__cuda_vector out; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) out.word[i] = \
            name##_one((uint32_t)(*held >> 16 * i) & 0xffffu); \
        dtrain__cuda_store(args->out, element, 4, whole, out); \
    } \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_convert_args, uint64_t, 4, DTRAIN__CUDA_CONVERT_GROUPS)

DTRAIN__CUDA_NARROW(dtrain__cuda_narrow_bf16)
DTRAIN__CUDA_NARROW(dtrain__cuda_narrow_f16)
DTRAIN__CUDA_WIDEN(dtrain__cuda_widen_bf16)
DTRAIN__CUDA_WIDEN(dtrain__cuda_widen_f16)

/* The elements of a group, from the lowest bits up. */
typedef struct dtrain__cuda_group {
    uint64_t low, high;
} dtrain__cuda_group;

static dtrain__cuda_format dtrain__cuda_format_of(dtrain_dtype dtype)
{
    const dtrain__cuda_format f64 = {11, 52, 0, 8}, f32 = {8, 23, 0, 4}, f16 = {5, 10, 0, 2};
    const dtrain__cuda_format bf16 = {8, 7, 0, 2}, e4m3 = {4, 3, 1, 1}, e5m2 = {5, 2, 0, 1};
    switch (dtype) {
    case DTRAIN_F64: return f64;
    case DTRAIN_F32: return f32;
    case DTRAIN_F16: return f16;
    case DTRAIN_BF16: return bf16;
    case DTRAIN_F8_E4M3: return e4m3;
    default: return e5m2;
    }
}

/* Returns the float64 bits of a value of format f. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_widen_generic(uint64_t bits, const dtrain__cuda_format f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    uint64_t sign = (bits >> (f.exponent + f.mantissa)) << 63;
    uint64_t mantissa = bits & (((uint64_t)1 << f.mantissa) - 1);
    int exponent = (int)(bits >> f.mantissa) & top;
    if (f.exponent == 11)
        return bits;
    if (exponent == top && (f.finite ? mantissa == ((uint64_t)1 << f.mantissa) - 1 : mantissa != 0))
        return sign | 0x7ff8000000000000u | mantissa << (52 - f.mantissa);
    if (exponent == top && !f.finite)
        return sign | 0x7ff0000000000000u;
    if (exponent == 0) {
        if (mantissa == 0)
            return sign;
        for (exponent = 1; (mantissa >> f.mantissa) == 0; exponent--)
            mantissa <<= 1;
        mantissa &= ((uint64_t)1 << f.mantissa) - 1;
    }
    return sign | (uint64_t)(exponent - bias + 1023) << 52 | mantissa << (52 - f.mantissa);
}

/* Rounds float64 bits to format f, to the nearest, ties to even. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_narrow_generic(uint64_t bits, const dtrain__cuda_format f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    int exponent = (int)(bits >> 52 & 0x7ff) - 1023 + bias, shift = 52 - f.mantissa;
    uint64_t sign = (bits >> 63) << (f.exponent + f.mantissa), mantissa = bits & 0xfffffffffffffu;
    uint64_t ones = ((uint64_t)1 << f.mantissa) - 1, infinity = (uint64_t)top << f.mantissa, rounded;
    if (f.exponent == 11)
        return bits;
    if ((bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u)
        return sign | infinity | (f.finite ? ones : mantissa >> shift | (uint64_t)1 << (f.mantissa - 1));
    mantissa |= (uint64_t)1 << 52; /* a float64 subnormal rounds to zero in every narrower format anyway */
    if (exponent < 1)
        shift = 1 - exponent < 54 - shift ? shift + 1 - exponent : 54;
    rounded = (mantissa + ((uint64_t)1 << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    if (exponent > 0)
        rounded += (uint64_t)(exponent - 1) << f.mantissa; /* the hidden bit adds the last one; so does a carry */
    if (exponent > top || rounded >= (f.finite ? infinity | ones : infinity))
        rounded = f.finite ? infinity | ones : infinity;
    return sign | rounded;
}

DTRAIN__CUDA_FN dtrain__cuda_group dtrain__cuda_generic_load(const dtrain__cuda_convert_args *args, size_t element,
                                                             int whole)
{
    size_t width = (size_t)args->from.bytes, bytes = whole ? args->walk.lanes * width : width;
    const unsigned char *at = (const unsigned char *)args->in + element * width;
    dtrain__cuda_group group = {0, 0};
    if (bytes == 16) {
        dtrain__cuda_vector v = *(const dtrain__cuda_vector *)at;
        group.low = v.word[0] | (uint64_t)v.word[1] << 32;
        group.high = v.word[2] | (uint64_t)v.word[3] << 32;
    } else {
        group.low = dtrain__cuda_element(at, bytes);
    }
    return group;
}

DTRAIN__CUDA_FN void dtrain__cuda_generic_store(const dtrain__cuda_convert_args *args, size_t element, int whole,
                                                const dtrain__cuda_group *held)
{
    uint32_t from = 8 * (uint32_t)args->from.bytes, to = 8 * (uint32_t)args->to.bytes;
    uint32_t lanes = whole ? (uint32_t)args->walk.lanes : 1;
    unsigned char *at = (unsigned char *)args->out + element * (to / 8);
    dtrain__cuda_group group = {0, 0};
    for (uint32_t i = 0; i < lanes; i++) {
        uint32_t bit = i * from, put = i * to;
        uint64_t bits = (bit < 64 ? held->low >> bit : held->high >> (bit - 64)) & ~(uint64_t)0 >> (64 - from);
        bits = dtrain__cuda_narrow_generic(dtrain__cuda_widen_generic(bits, args->from), args->to);
        if (put < 64)
            group.low |= bits << put;
        else
            group.high |= bits << (put - 64);
    }
    if (lanes * to == 128) {
        dtrain__cuda_vector v = {
            {(uint32_t)group.low, (uint32_t)(group.low >> 32), (uint32_t)group.high, (uint32_t)(group.high >> 32)}};
        *(dtrain__cuda_vector *)at = v;
    } else {
        dtrain__cuda_element_store(at, lanes * to / 8, group.low);
    }
}

DTRAIN__CUDA_WALK_KERNEL(dtrain__cuda_generic, dtrain__cuda_convert_args, dtrain__cuda_group, args->walk.lanes, 1)

static dtrain_status dtrain__cuda_convert(dtrain_device *device, const void *in, dtrain_dtype from, void *out,
                                          dtrain_dtype to, size_t count)
{
    const char *call = "device_convert";
    dtrain__cuda_convert_args args = {in, out, {0, 0, 0, 0}, dtrain__cuda_format_of(from), dtrain__cuda_format_of(to)};
    size_t width = (size_t)args.from.bytes;
    const dtrain__cuda_array arrays[] = {
        {"in", in, width, count, 0}, {"out", out, (size_t)args.to.bytes, count, 0}, {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_walk_arrays(device, call, arrays, &args.walk);
    if (status != DTRAIN_OK)
        return status;
    if (from == to)
        return dtrain__cuda_copy(device, out, in, count * width);
    if (from == DTRAIN_F32 && to == DTRAIN_BF16)
        return dtrain__cuda_narrow_bf16_walk(device, call, &args);
    if (from == DTRAIN_F32 && to == DTRAIN_F16)
        return dtrain__cuda_narrow_f16_walk(device, call, &args);
    if (from == DTRAIN_BF16 && to == DTRAIN_F32)
        return dtrain__cuda_widen_bf16_walk(device, call, &args);
    if (from == DTRAIN_F16 && to == DTRAIN_F32)
        return dtrain__cuda_widen_f16_walk(device, call, &args);
    return dtrain__cuda_generic_walk(device, call, &args);
}

#endif

/* ---- >>cuda-flags ----
 * Collectives of several GPUs in one kernel a rank: the folds of >>cuda-fold between two rounds of flags. A flag is a
 * word in memory of the rank that waits for it. There is one for every block, round and peer, which the same block of
 * the peer's kernel writes. So all blocks of all ranks' kernels must run at the same time, each rank's on a GPU of its
 * own. Thread p of a block waits for peer p. The barriers between phases carry what it releases and acquires to the
 * others. */
#ifndef DTRAIN__CUDA_FLAGS
#define DTRAIN__CUDA_FLAGS
#ifdef DTRAIN_CUDA_EMULATE
#include <sched.h>
#include <time.h>
#endif

#define DTRAIN__CUDA_FLAGS_MOST 64      /* most ranks */
#define DTRAIN__CUDA_FLAGS_GLANCE 100000 /* ns between looks at the error word, which is in the CPU's memory */

typedef struct dtrain__cuda_flags {
    uint32_t *words[DTRAIN__CUDA_FLAGS_MOST];
    uint64_t *errors[DTRAIN__CUDA_FLAGS_MOST];
    uint64_t deadline_ns;
    uint32_t epoch;
    int rank, ranks;
} dtrain__cuda_flags;

typedef struct dtrain__cuda_flags_block {
    int stop; /* 1: the block leaves its work undone */
} dtrain__cuda_flags_block;

/* ---- memory that several GPUs and the CPU share ---- */

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_SYSTEM(load, store, type, letter, acquire, release, load_order, store_order) \
    DTRAIN__CUDA_FN type load(const type *from) \
    { \
        return __atomic_load_n(from, load_order); \
    } \
    DTRAIN__CUDA_FN void store(type *to, type value) \
    { \
        __atomic_store_n(to, value, store_order); \
    }
#else
#define DTRAIN__CUDA_SYSTEM(load, store, type, letter, acquire, release, load_order, store_order) \
    DTRAIN__CUDA_FN type load(const type *from) \
    { \
        type value; \
        asm volatile(acquire " %0, [%1];" : "=" letter(value) : "l"(from) : "memory"); \
        return value; \
    } \
    DTRAIN__CUDA_FN void store(type *to, type value) \
    { \
        asm volatile(release " [%0], %1;" : : "l"(to), letter(value) : "memory"); \
    }
#endif
DTRAIN__CUDA_SYSTEM(dtrain__cuda_acquire_u32, dtrain__cuda_release_u32, uint32_t, "r", "ld.acquire.sys.u32",
                    "st.release.sys.u32", __ATOMIC_ACQUIRE, __ATOMIC_RELEASE)
DTRAIN__CUDA_SYSTEM(dtrain__cuda_error_load, dtrain__cuda_error_store, uint64_t, "l", "ld.relaxed.sys.u64",
                    "st.relaxed.sys.u64", __ATOMIC_RELAXED, __ATOMIC_RELAXED)

/* Returns the device's clock, in ns. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_clock(void)
{
#ifdef DTRAIN_CUDA_EMULATE
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#else
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#endif
}

/* ---- rounds ---- */

DTRAIN__CUDA_FN int dtrain__cuda_flags_is_peer(const dtrain__cuda_flags *args, dtrain__cuda_at at)
{
    return (int)at.thread < args->ranks && (int)at.thread != args->rank;
}

DTRAIN__CUDA_FN void dtrain__cuda_flags_signal(const dtrain__cuda_flags *args, dtrain__cuda_at at, int round)
{
    size_t word = (at.block * 2 + (size_t)round) * (size_t)args->ranks + (size_t)args->rank;
    if (dtrain__cuda_flags_is_peer(args, at))
        dtrain__cuda_release_u32(args->words[at.thread] + word, args->epoch);
}

DTRAIN__CUDA_FN void dtrain__cuda_flags_report(const dtrain__cuda_flags *args, uint32_t peer)
{
    uint64_t error = (uint64_t)args->epoch << 32 | (uint64_t)(uint32_t)(args->rank + 1) << 16 | (peer + 1);
    for (int rank = 0; rank < args->ranks; rank++)
        if (dtrain__cuda_error_load(args->errors[rank]) == 0)
            dtrain__cuda_error_store(args->errors[rank], error);
}

/* Waits for this thread's peer. Sets *stop when it is to wait no longer. */
DTRAIN__CUDA_FN void dtrain__cuda_flags_await(const dtrain__cuda_flags *args, dtrain__cuda_at at, int round, int *stop)
{
    const uint32_t *word;
    uint64_t begin, glance, now;
    if (!dtrain__cuda_flags_is_peer(args, at))
        return;
    word = args->words[args->rank] + (at.block * 2 + (size_t)round) * (size_t)args->ranks + at.thread;
    begin = glance = dtrain__cuda_clock();
    while ((int32_t)(dtrain__cuda_acquire_u32(word) - args->epoch) < 0) {
        now = dtrain__cuda_clock();
#ifdef DTRAIN_CUDA_EMULATE
        dtrain__cuda_emulated_pause((unsigned)((now - begin) / 256)); /* about the ns of a turn */
#endif
        if (now - glance < DTRAIN__CUDA_FLAGS_GLANCE)
            continue;
        glance = now;
        int ended = dtrain__cuda_error_load(args->errors[args->rank]) != 0;
        int late = args->deadline_ns > 0 && now - begin > args->deadline_ns;
        if (late && !ended)
            dtrain__cuda_flags_report(args, at.thread);
        if (late || ended) {
            *stop = 1; /* never set to 0: other threads wait for other peers */
            return;
        }
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_flags_begin(const dtrain__cuda_flags *args, dtrain__cuda_at at, int *stop)
{
    if (at.thread == 0)
        *stop = dtrain__cuda_error_load(args->errors[args->rank]) != 0;
    dtrain__cuda_flags_signal(args, at, 0);
}

#endif

/* ---- >>cuda-fold ----
 * The reduction of >>fold. Element i of n inputs becomes one value in the tree order, stored to m outputs. A thread
 * reads all inputs of its elements before it writes one. Float sums and products follow the tree. One, two, four and
 * eight inputs are unrolled. Any other number goes eight at a time, under a binary counter of partial results, which
 * gives the same tree. Operations that are exact in any order (integers, least and greatest) fold from left to right.
 */
#ifndef DTRAIN__CUDA_FOLD
#define DTRAIN__CUDA_FOLD

#define DTRAIN__CUDA_FOLD_MOST 64 /* most inputs, and most outputs */

/* How a sum is finished. A division by a power of two is a product, which rounds the same. */
enum { DTRAIN__CUDA_FOLD_AS_IS, DTRAIN__CUDA_FOLD_MULTIPLY, DTRAIN__CUDA_FOLD_DIVIDE };

typedef struct dtrain__cuda_fold {
    const void *in[DTRAIN__CUDA_FOLD_MOST];
    void *out[DTRAIN__CUDA_FOLD_MOST];
    dtrain__cuda_walk walk;
    int n, m, op, finish;
    double by_f64;
    float by_f32;
    uint32_t flip; /* 1: signed integers */
} dtrain__cuda_fold;

/* Eight floats of 16 bits as float32: the low halves of four words, and the high ones. */
typedef struct dtrain__cuda_wide {
    dtrain__cuda_vector low, high;
} dtrain__cuda_wide;

DTRAIN__CUDA_FN uint64_t dtrain__cuda_lane_u64(dtrain__cuda_vector v, int lane)
{
    return v.word[2 * lane] | (uint64_t)v.word[2 * lane + 1] << 32;
}

DTRAIN__CUDA_FN void dtrain__cuda_lane_u64_set(dtrain__cuda_vector *v, int lane, uint64_t bits)
{
    v->word[2 * lane] = (uint32_t)bits;
    v->word[2 * lane + 1] = (uint32_t)(bits >> 32);
}

DTRAIN__CUDA_FN double dtrain__cuda_lane_f64(dtrain__cuda_vector v, int lane)
{
    return dtrain__cuda_double_of(dtrain__cuda_lane_u64(v, lane));
}

DTRAIN__CUDA_FN void dtrain__cuda_lane_f64_set(dtrain__cuda_vector *v, int lane, double x)
{
    dtrain__cuda_lane_u64_set(v, lane, dtrain__cuda_bits_f64(x));
}

/* ---- a op b, lane by lane ---- */

/* Gives r, whose words are each `expression` of a and b, the words of left and right. */
#define DTRAIN__CUDA_WORDS(expression) \
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) \
    { \
        uint32_t a = left.word[i], b = right.word[i]; \
        r.word[i] = expression; \
    }

#define DTRAIN__CUDA_LONGS(expression) \
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++) \
    { \
        uint64_t a = dtrain__cuda_lane_u64(left, i), b = dtrain__cuda_lane_u64(right, i); \
        dtrain__cuda_lane_u64_set(&r, i, expression); \
    }

/* Sums and products of floats. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_join_f32(int op, dtrain__cuda_vector left, dtrain__cuda_vector right)
{
    dtrain__cuda_vector r;
    if (op == DTRAIN_PROD)
        DTRAIN__CUDA_WORDS(
            dtrain__cuda_bits_f32(dtrain__cuda_mul_f32(dtrain__cuda_float_of(a), dtrain__cuda_float_of(b))))
    else
        DTRAIN__CUDA_WORDS(
            dtrain__cuda_bits_f32(dtrain__cuda_add_f32(dtrain__cuda_float_of(a), dtrain__cuda_float_of(b))))
    return r;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_join_f64(int op, dtrain__cuda_vector left, dtrain__cuda_vector right)
{
    dtrain__cuda_vector r;
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++)
    {
        double a = dtrain__cuda_lane_f64(left, i), b = dtrain__cuda_lane_f64(right, i);
        dtrain__cuda_lane_f64_set(&r, i, op == DTRAIN_PROD ? dtrain__cuda_mul_f64(a, b) : dtrain__cuda_add_f64(a, b));
    }
    return r;
}

DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_join_wide(int op, dtrain__cuda_wide left, dtrain__cuda_wide right)
{
    dtrain__cuda_wide r;
    r.low = dtrain__cuda_join_f32(op, left.low, right.low);
    r.high = dtrain__cuda_join_f32(op, left.high, right.high);
    return r;
}

/* Compares by bits: -0 is below +0, and a NaN before all. */
#define DTRAIN__CUDA_LEAST(kind, type, int_type, top, infinity, lanes) \
    DTRAIN__CUDA_FN type dtrain__cuda_pick_##kind(int op, type a, type b) \
    { \
        const type size = ((type)1 << (top)) - 1; \
        int_type left = (int_type)(a ^ (a >> (top)) * size), right = (int_type)(b ^ (b >> (top)) * size); \
        if ((a & size) > (infinity)) \
            return a; \
        if ((b & size) > (infinity)) \
            return b; \
        return (op == DTRAIN_MIN ? left < right : left > right) ? a : b; \
    } \
    DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_least_##kind(int op, uint32_t flip, dtrain__cuda_vector left, \
                                                                  dtrain__cuda_vector right) \
    { \
        dtrain__cuda_vector r; \
        (void)flip; \
        lanes(dtrain__cuda_pick_##kind(op, a, b)) \
        return r; \
    }

DTRAIN__CUDA_LEAST(f32, uint32_t, int32_t, 31, 0x7f800000u, DTRAIN__CUDA_WORDS)
DTRAIN__CUDA_LEAST(f64, uint64_t, int64_t, 63, 0x7ff0000000000000u, DTRAIN__CUDA_LONGS)

DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_least_wide(int op, uint32_t flip, dtrain__cuda_wide left,
                                                          dtrain__cuda_wide right)
{
    dtrain__cuda_wide r;
    r.low = dtrain__cuda_least_f32(op, flip, left.low, right.low);
    r.high = dtrain__cuda_least_f32(op, flip, left.high, right.high);
    return r;
}

/* Integers. flip maps the order of signed ones to that of unsigned ones. */
#define DTRAIN__CUDA_INTS(name, type, top, lanes) \
    DTRAIN__CUDA_FN dtrain__cuda_vector name(int op, uint32_t flip, dtrain__cuda_vector left, \
                                             dtrain__cuda_vector right) \
    { \
        dtrain__cuda_vector r; \
        type sign = (type)flip << (top); \
        switch (op) { \
        case DTRAIN_SUM: lanes(a + b) break; \
        case DTRAIN_PROD: lanes(a *b) break; \
        case DTRAIN_MIN: lanes((a ^ sign) < (b ^ sign) ? a : b) break; \
        case DTRAIN_MAX: lanes((a ^ sign) > (b ^ sign) ? a : b) break; \
        case DTRAIN_AND: lanes(a &b) break; \
        case DTRAIN_OR: lanes(a | b) break; \
        default: lanes(a ^ b) \
        } \
        return r; \
    }

DTRAIN__CUDA_INTS(dtrain__cuda_join_u32, uint32_t, 31, DTRAIN__CUDA_WORDS)
DTRAIN__CUDA_INTS(dtrain__cuda_join_u64, uint64_t, 63, DTRAIN__CUDA_LONGS)

/* Combines the four bytes of a word. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_bytes(int op, uint32_t flip, uint32_t left, uint32_t right)
{
    uint32_t r = 0, sign = flip << 7;
    if (op == DTRAIN_SUM) /* seven bits of each, which do not carry into the next, and the eighth without a carry */
        return ((left & 0x7f7f7f7fu) + (right & 0x7f7f7f7fu)) ^ ((left ^ right) & 0x80808080u);
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 32; i += 8)
    {
        uint32_t a = left >> i & 0xffu, b = right >> i & 0xffu;
        uint32_t below = (a ^ sign) < (b ^ sign), one = below == (uint32_t)(op == DTRAIN_MIN) ? a : b;
        r |= (op == DTRAIN_PROD ? a * b & 0xffu : one) << i;
    }
    return r;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_join_u8(int op, uint32_t flip, dtrain__cuda_vector left,
                                                         dtrain__cuda_vector right)
{
    dtrain__cuda_vector r;
    if (op >= DTRAIN_AND)
        return dtrain__cuda_join_u32(op, 0, left, right);
    DTRAIN__CUDA_WORDS(dtrain__cuda_bytes(op, flip, a, b))
    return r;
}

/* ---- into partial results, and out of them ---- */

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_same(dtrain__cuda_vector v)
{
    return v;
}

/* Returns x[i] * by, each product rounded. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_times_f32(dtrain__cuda_vector v, float by)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] =
        dtrain__cuda_bits_f32(dtrain__cuda_mul_f32(dtrain__cuda_float_of(v.word[i]), by));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_times_wide(dtrain__cuda_wide v, float by)
{
    v.low = dtrain__cuda_times_f32(v.low, by);
    v.high = dtrain__cuda_times_f32(v.high, by);
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_times_f64(dtrain__cuda_vector v, double by)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++)
        dtrain__cuda_lane_f64_set(&v, i, dtrain__cuda_mul_f64(dtrain__cuda_lane_f64(v, i), by));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_same(const dtrain__cuda_fold *args, dtrain__cuda_vector v)
{
    (void)args;
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_f32(const dtrain__cuda_fold *args, dtrain__cuda_vector v)
{
    if (args->finish == DTRAIN__CUDA_FOLD_MULTIPLY)
        return dtrain__cuda_times_f32(v, args->by_f32);
    if (args->finish == DTRAIN__CUDA_FOLD_DIVIDE)
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] =
            dtrain__cuda_bits_f32(dtrain__cuda_div_f32(dtrain__cuda_float_of(v.word[i]), args->by_f32));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_f64(const dtrain__cuda_fold *args, dtrain__cuda_vector v)
{
    if (args->finish == DTRAIN__CUDA_FOLD_MULTIPLY)
        return dtrain__cuda_times_f64(v, args->by_f64);
    if (args->finish == DTRAIN__CUDA_FOLD_DIVIDE)
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++)
            dtrain__cuda_lane_f64_set(&v, i, dtrain__cuda_div_f64(dtrain__cuda_lane_f64(v, i), args->by_f64));
    return v;
}

/* Floats of 16 bits: widens them to float32, rounds them back, and finishes them. */
#define DTRAIN__CUDA_HALVES(kind) \
    DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_partial_##kind(dtrain__cuda_vector v) \
    { \
        dtrain__cuda_wide wide; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) \
        { \
            wide.low.word[i] = dtrain__cuda_bits_f32(dtrain__cuda_low_##kind(v.word[i])); \
            wide.high.word[i] = dtrain__cuda_bits_f32(dtrain__cuda_high_##kind(v.word[i])); \
        } \
        return wide; \
    } \
    DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_rounded_##kind(dtrain__cuda_wide w) \
    { \
        dtrain__cuda_vector v; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] = \
            dtrain__cuda_both_##kind(dtrain__cuda_float_of(w.low.word[i]), dtrain__cuda_float_of(w.high.word[i])); \
        return v; \
    } \
    DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_##kind(const dtrain__cuda_fold *args, dtrain__cuda_wide w) \
    { \
        w.low = dtrain__cuda_finish_f32(args, w.low); \
        w.high = dtrain__cuda_finish_f32(args, w.high); \
        return dtrain__cuda_rounded_##kind(w); \
    }

DTRAIN__CUDA_HALVES(f16)
DTRAIN__CUDA_HALVES(bf16)

DTRAIN__CUDA_FN void dtrain__cuda_fold_store(const dtrain__cuda_fold *args, size_t element, size_t width, int whole,
                                             dtrain__cuda_vector v)
{
    for (int k = 0; k < args->m; k++)
        dtrain__cuda_store(args->out[k], element, width, whole, v);
}

/* ---- kernels ---- */

#define DTRAIN__CUDA_FOLD_PHASES 6 /* phases of a fold between two rounds of flags */

typedef struct dtrain__cuda_fold_flags {
    dtrain__cuda_fold fold;
    dtrain__cuda_flags flags;
    int at_once;
} dtrain__cuda_fold_flags;

/* Defines the kernel `name` of a fold, and name_flags, which does it between two rounds of flags. Threads hold
 * name_held. */
#define DTRAIN__CUDA_FOLD_KERNELS(name, lanes, unroll) \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_fold, name##_held, lanes, unroll) \
    typedef struct name##_kept { \
        name##_held group, single; \
    } name##_kept; \
    DTRAIN__CUDA_FN void name##_flags_body(const dtrain__cuda_fold_flags *args, dtrain__cuda_at at, \
                                           dtrain__cuda_flags_block *shared, name##_kept *own, int phase) \
    { \
        const dtrain__cuda_fold *fold = &args->fold; \
        size_t i = at.block * at.threads + at.thread, groups = fold->walk.groups, head = fold->walk.head; \
        size_t element = head + i * (lanes), alone = i < head ? i : i + groups * (lanes); \
        if (phase == 0) \
            dtrain__cuda_flags_begin(&args->flags, at, &shared->stop); \
        else if (shared->stop) \
            return; \
        else if (phase == 1 || phase == 4) \
            dtrain__cuda_flags_await(&args->flags, at, phase == 4, &shared->stop); \
        else if (phase == 3) \
            dtrain__cuda_flags_signal(&args->flags, at, 1); \
        else if (phase == 2 && !args->at_once) \
            name##_body(fold, at, NULL, NULL, 0); \
        else if (phase == 2) { \
            if (i < groups) \
                own->group = name##_load(fold, element, 1); \
            if (i < fold->walk.singles) \
                own->single = name##_load(fold, alone, 0); \
        } else if (args->at_once) { \
            if (i < groups) \
                name##_store(fold, element, 1, &own->group); \
            if (i < fold->walk.singles) \
                name##_store(fold, alone, 0, &own->single); \
        } \
    } \
    DTRAIN__CUDA_TOGETHER(name##_flags, dtrain__cuda_fold_flags, dtrain__cuda_flags_block, name##_kept, \
                          DTRAIN__CUDA_THREADS, DTRAIN__CUDA_FOLD_PHASES)

/* Does the same for a fold whose threads hold its result. */
#define DTRAIN__CUDA_FOLD_HELD(name, wide, finish, width) \
    typedef wide name##_held; \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_fold *args, size_t element, int whole, const wide *held) \
    { \
        dtrain__cuda_fold_store(args, element, width, whole, finish(args, *held)); \
    } \
    DTRAIN__CUDA_FOLD_KERNELS(name, 16 / (width), 1)

/* Sums of `inputs` (1, 2, 4 or 8) inputs. */
#define DTRAIN__CUDA_FOLD_FIXED(name, inputs, unroll, wide, partial, join, finish, width) \
    typedef struct name##_held { \
        dtrain__cuda_vector in[inputs]; \
    } name##_held; \
    DTRAIN__CUDA_FN name##_held name##_load(const dtrain__cuda_fold *args, size_t element, int whole) \
    { \
        name##_held held; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < (inputs); k++) held.in[k] = \
            dtrain__cuda_load(args->in[k], element, width, whole); \
        return held; \
    } \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_fold *args, size_t element, int whole, \
                                      const name##_held *held) \
    { \
        wide part[inputs]; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < (inputs); k++) part[k] = partial(held->in[k]); \
        DTRAIN__CUDA_UNROLL for (int step = 1; step < (inputs); step *= 2) \
            DTRAIN__CUDA_UNROLL for (int k = 0; k + step < (inputs); k += 2 * step) part[k] = \
                join(DTRAIN_SUM, part[k], part[k + step]); \
        dtrain__cuda_fold_store(args, element, width, whole, finish(args, part[0])); \
    } \
    DTRAIN__CUDA_FOLD_KERNELS(name, 16 / (width), unroll)

/* Sums and products of any number of inputs. Partial results p8, p16 and p32 stand for that many inputs. The bits of
 * the number of eights say which of them are held. At the end the smaller joins the larger before it. */
#define DTRAIN__CUDA_FOLD_TREE(name, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FN wide name##_eight(const dtrain__cuda_fold *args, int from, size_t element, int whole) \
    { \
        dtrain__cuda_vector in[8]; \
        wide part[8]; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < 8; k++) in[k] = \
            dtrain__cuda_load(args->in[from + k], element, width, whole); \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < 8; k++) part[k] = partial(in[k]); \
        DTRAIN__CUDA_UNROLL for (int step = 1; step < 8; step *= 2) \
            DTRAIN__CUDA_UNROLL for (int k = 0; k + step < 8; k += 2 * step) part[k] = \
                join(args->op, part[k], part[k + step]); \
        return part[0]; \
    } \
    /* 1 to 7 inputs: four, then two, then one of them. The first stands in for those that do not exist. */ \
    DTRAIN__CUDA_FN wide name##_rest(const dtrain__cuda_fold *args, int from, int some, size_t element, int whole) \
    { \
        dtrain__cuda_vector in[7]; \
        wide four, two, one; \
        int op = args->op; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < 7; k++) \
        { \
            int has = some & (k < 4 ? 4 : k < 6 ? 2 : 1), at = k < 4 ? k : k < 6 ? (some & 4) + k - 4 : some & 6; \
            in[k] = dtrain__cuda_load(args->in[from + (has ? at : 0)], element, width, whole); \
        } \
        four = join(op, join(op, partial(in[0]), partial(in[1])), join(op, partial(in[2]), partial(in[3]))); \
        two = join(op, partial(in[4]), partial(in[5])); \
        one = partial(in[6]); \
        if (some & 2) \
            one = some & 1 ? join(op, two, one) : two; \
        if (some & 4) \
            one = some & 3 ? join(op, four, one) : four; \
        return one; \
    } \
    DTRAIN__CUDA_FN wide name##_load(const dtrain__cuda_fold *args, size_t element, int whole) \
    { \
        int eights = args->n / 8, some = args->n % 8, op = args->op, has = some != 0; \
        wide p, p8, p16, p32; \
        memset(&p8, 0, sizeof p8); \
        p = p16 = p32 = p8; \
        for (int k = 0; k < eights; k++) { \
            p = name##_eight(args, 8 * k, element, whole); \
            if (k & 1) \
                p = join(op, p8, p); \
            if ((k & 3) == 3) \
                p = join(op, p16, p); \
            if ((k & 7) == 7) \
                p = join(op, p32, p); \
            p8 = (k & 1) == 0 ? p : p8; \
            p16 = (k & 3) == 1 ? p : p16; \
            p32 = (k & 7) == 3 ? p : p32; \
        } \
        if (has) \
            p = name##_rest(args, 8 * eights, some, element, whole); \
        if (eights & 1) \
            p = has ? join(op, p8, p) : p8; \
        has |= eights & 1; \
        if (eights & 2) \
            p = has ? join(op, p16, p) : p16; \
        has |= eights & 2; \
        if (eights & 4) \
            p = has ? join(op, p32, p) : p32; \
        return p; \
    } \
    DTRAIN__CUDA_FOLD_HELD(name, wide, finish, width)

/* Operations exact in any order: four inputs at a time, from left to right. */
#define DTRAIN__CUDA_FOLD_ROW(name, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FN wide name##_load(const dtrain__cuda_fold *args, size_t element, int whole) \
    { \
        wide p = partial(dtrain__cuda_load(args->in[0], element, width, whole)); \
        for (int from = 1; from < args->n; from += 4) { \
            dtrain__cuda_vector in[4]; \
            DTRAIN__CUDA_UNROLL for (int k = 0; k < 4; k++) in[k] = \
                dtrain__cuda_load(args->in[from + k < args->n ? from + k : 0], element, width, whole); \
            DTRAIN__CUDA_UNROLL for (int k = 0; k < 4; k++) if (from + k < args->n) p = \
                join(args->op, args->flip, p, partial(in[k])); \
        } \
        return p; \
    } \
    DTRAIN__CUDA_FOLD_HELD(name, wide, finish, width)

/* A thread loads this many groups before it stores the first; the number of inputs times this are in flight. */
#define DTRAIN__CUDA_FOLD_SUMS(name, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_1, 1, 4, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_2, 2, 4, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_4, 4, 2, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_8, 8, 1, wide, partial, join, finish, width)

DTRAIN__CUDA_FOLD_SUMS(dtrain__cuda_sum_f32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_f32,
                       dtrain__cuda_finish_f32, 4)
DTRAIN__CUDA_FOLD_SUMS(dtrain__cuda_sum_f16, dtrain__cuda_wide, dtrain__cuda_partial_f16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_f16, 2)
DTRAIN__CUDA_FOLD_SUMS(dtrain__cuda_sum_bf16, dtrain__cuda_wide, dtrain__cuda_partial_bf16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_bf16, 2)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_f64, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_f64,
                       dtrain__cuda_finish_f64, 8)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_f32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_f32,
                       dtrain__cuda_finish_f32, 4)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_f16, dtrain__cuda_wide, dtrain__cuda_partial_f16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_f16, 2)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_bf16, dtrain__cuda_wide, dtrain__cuda_partial_bf16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_bf16, 2)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_f64, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_least_f64,
                      dtrain__cuda_finish_same, 8)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_f32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_least_f32,
                      dtrain__cuda_finish_same, 4)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_f16, dtrain__cuda_wide, dtrain__cuda_partial_f16, dtrain__cuda_least_wide,
                      dtrain__cuda_finish_f16, 2)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_bf16, dtrain__cuda_wide, dtrain__cuda_partial_bf16, dtrain__cuda_least_wide,
                      dtrain__cuda_finish_bf16, 2)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_u8, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_u8,
                      dtrain__cuda_finish_same, 1)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_u32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_u32,
                      dtrain__cuda_finish_same, 4)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_u64, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_u64,
                      dtrain__cuda_finish_same, 8)

/* ---- the operation ---- */

/* In place of a number of inputs: any number by the tree, or in a row. */
enum { DTRAIN__CUDA_FOLD_BY_TREE = -2, DTRAIN__CUDA_FOLD_IN_A_ROW = -1 };

/* All folds, as each(name, dtype, inputs). Signed integers go as unsigned ones. */
#define DTRAIN__CUDA_FOLD_EACH(each) \
    each(dtrain__cuda_sum_f32_1, DTRAIN_F32, 1) each(dtrain__cuda_sum_f32_2, DTRAIN_F32, 2) \
    each(dtrain__cuda_sum_f32_4, DTRAIN_F32, 4) each(dtrain__cuda_sum_f32_8, DTRAIN_F32, 8) \
    each(dtrain__cuda_sum_f16_1, DTRAIN_F16, 1) each(dtrain__cuda_sum_f16_2, DTRAIN_F16, 2) \
    each(dtrain__cuda_sum_f16_4, DTRAIN_F16, 4) each(dtrain__cuda_sum_f16_8, DTRAIN_F16, 8) \
    each(dtrain__cuda_sum_bf16_1, DTRAIN_BF16, 1) each(dtrain__cuda_sum_bf16_2, DTRAIN_BF16, 2) \
    each(dtrain__cuda_sum_bf16_4, DTRAIN_BF16, 4) each(dtrain__cuda_sum_bf16_8, DTRAIN_BF16, 8) \
    each(dtrain__cuda_tree_f64, DTRAIN_F64, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_tree_f32, DTRAIN_F32, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_tree_f16, DTRAIN_F16, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_tree_bf16, DTRAIN_BF16, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_row_f64, DTRAIN_F64, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_f32, DTRAIN_F32, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_f16, DTRAIN_F16, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_bf16, DTRAIN_BF16, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_u8, DTRAIN_U8, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_u32, DTRAIN_U32, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_u64, DTRAIN_U64, DTRAIN__CUDA_FOLD_IN_A_ROW)

typedef dtrain_status (*dtrain__cuda_flags_launch)(dtrain_device *device, const char *call, size_t blocks,
                                                   const dtrain__cuda_fold_flags *args);

typedef struct dtrain__cuda_fold_kernel {
    dtrain_dtype dtype;
    int inputs;
    dtrain_status (*walk)(dtrain_device *device, const char *call, const dtrain__cuda_fold *args);
    dtrain__cuda_flags_launch flags;
} dtrain__cuda_fold_kernel;

/* Finds the kernel of an operation on n inputs: for sums the one of that number, if there is one. */
static const dtrain__cuda_fold_kernel *dtrain__cuda_fold_find(dtrain_dtype dtype, dtrain_op op, int n)
{
#define DTRAIN__CUDA_FOLD_ENTRY(name, dtype, inputs) {dtype, inputs, name##_walk, name##_flags_launch},
    static const dtrain__cuda_fold_kernel kernels[] = {DTRAIN__CUDA_FOLD_EACH(DTRAIN__CUDA_FOLD_ENTRY)};
#undef DTRAIN__CUDA_FOLD_ENTRY
    const int ways[] = {n, DTRAIN__CUDA_FOLD_BY_TREE, DTRAIN__CUDA_FOLD_IN_A_ROW};
    for (int way = op == DTRAIN_SUM ? 0 : op == DTRAIN_PROD ? 1 : 2; way < 3; way++)
        for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
            if (kernels[i].dtype == dtype && kernels[i].inputs == ways[way])
                return &kernels[i];
    return NULL;
}

/* Says how a mean is finished. A power of two is recognised by its bits; its inverse must also be normal. */
static void dtrain__cuda_fold_finish(dtrain__cuda_fold *args, dtrain_dtype dtype, double divisor)
{
    uint64_t bits;
    memcpy(&bits, &divisor, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023, most = dtype == DTRAIN_F64 ? 1022 : 126; /* larger if negative */
    args->finish = DTRAIN__CUDA_FOLD_DIVIDE;
    if (bits << 12 == 0 && exponent >= -most && exponent <= most) {
        args->finish = exponent == 0 ? DTRAIN__CUDA_FOLD_AS_IS : DTRAIN__CUDA_FOLD_MULTIPLY;
        bits = (uint64_t)(1023 - exponent) << 52;
        memcpy(&divisor, &bits, sizeof bits);
    }
    args->by_f64 = divisor;
    /* does not depend on the CPU's floating-point mode */
    DTRAIN_IGNORE(dtrain_convert(&divisor, DTRAIN_F64, &args->by_f32, DTRAIN_F32, 1));
}

/* Takes over one of a list of arrays, which may be of other GPUs. */
static dtrain_status dtrain__cuda_fold_pointers(dtrain_device *device, const char *what, const void *const *list, int n,
                                                size_t width, size_t begin, size_t count, const void **taken,
                                                uint32_t *heads)
{
    dtrain_status status = DTRAIN_OK;
    for (int k = 0; k < n && status == DTRAIN_OK; k++) {
        taken[k] = (const unsigned char *)list[k] + begin * width;
        *heads &= dtrain__cuda_heads(taken[k], width, 16 / width);
        status = dtrain__cuda_memory(device, "device_reduce", what, taken[k], count * width, 1);
    }
    return status;
}

/* Makes the arguments of a reduction, also of an empty one, and chooses its kernel. */
static dtrain_status dtrain__cuda_fold_make(dtrain_device *device, dtrain__cuda_fold *args, dtrain_dtype dtype,
                                            dtrain_op op, double divisor, const void *const *in, int n,
                                            void *const *out, int m, size_t begin, size_t count,
                                            const dtrain__cuda_fold_kernel **kernel)
{
    dtrain_dtype bits = dtype == DTRAIN_I8    ? DTRAIN_U8
                        : dtype == DTRAIN_I32 ? DTRAIN_U32
                        : dtype == DTRAIN_I64 ? DTRAIN_U64
                                              : dtype;
    size_t width = dtrain_dtype_bits(dtype) / 8;
    uint32_t heads = ~(uint32_t)0;
    memset(args, 0, sizeof *args);
    args->n = n;
    args->m = m;
    args->op = (int)(op == DTRAIN_MEAN ? DTRAIN_SUM : op);
    args->flip = bits != dtype;
    *kernel = dtrain__cuda_fold_find(bits, (dtrain_op)args->op, n);
    if (op == DTRAIN_MEAN)
        dtrain__cuda_fold_finish(args, dtype, divisor);
    dtrain_status status =
        dtrain__cuda_fold_pointers(device, "an input", in, n, width, begin, count, args->in, &heads);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_fold_pointers(device, "an output", (const void *const *)out, m, width, begin, count,
                                            (const void **)args->out, &heads);
    args->walk = dtrain__cuda_walk_make(heads, 16 / width, count);
    return status;
}

static dtrain_status dtrain__cuda_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op, double divisor,
                                         const void *const *in, int n, void *const *out, int m, size_t begin,
                                         size_t count)
{
    const dtrain__cuda_fold_kernel *kernel;
    dtrain__cuda_fold args;
    dtrain_status status =
        dtrain__cuda_fold_make(device, &args, dtype, op, divisor, in, n, out, m, begin, count, &kernel);
    return status == DTRAIN_OK ? kernel->walk(device, "device_reduce", &args) : status;
}

/* ---- between flags ---- */

/* Reports one block a processor. They are resident with any kernel, as these take 256 threads and hardly any shared
 * memory. */
static dtrain_status dtrain__cuda_flag_traits(dtrain_device *device, dtrain_device_flag_traits *traits)
{
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    int domain = 0, bus = 0, slot = 0;
    cudaError_t error = cudaDeviceGetAttribute(&domain, cudaDevAttrPciDomainId, queue->index);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, queue->index);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&slot, cudaDevAttrPciDeviceId, queue->index);
    traits->identity = (uint64_t)(uint32_t)domain << 32 | (uint64_t)(uint32_t)bus << 8 | (uint64_t)(uint32_t)slot;
    traits->blocks = queue->processors;
    traits->block_bytes = DTRAIN__CUDA_THREADS * sizeof(dtrain__cuda_vector);
    return dtrain__cuda_status(device, "device_flag_traits", error);
}

/* Makes the kernel's arguments, and chooses the kernel. */
static dtrain_status dtrain__cuda_flags_make(dtrain_device *device, const dtrain_device_flags *part,
                                             dtrain__cuda_fold_flags *args, dtrain__cuda_flags_launch *launch)
{
    const dtrain__cuda_fold_kernel *kernel;
    memset(&args->flags, 0, sizeof args->flags);
    args->at_once = part->at_once;
    args->flags.deadline_ns = part->deadline_ns;
    args->flags.epoch = part->epoch;
    args->flags.rank = part->rank;
    args->flags.ranks = part->ranks;
    for (int rank = 0; rank < part->ranks; rank++) {
        args->flags.words[rank] = part->words[rank];
        args->flags.errors[rank] = part->errors[rank];
    }
    dtrain_status status = dtrain__cuda_fold_make(device, &args->fold, part->dtype, part->op, (double)part->n, part->in,
                                                  part->n, part->out, part->m, part->begin, part->count, &kernel);
    *launch = kernel->flags;
    return status;
}

static dtrain_status dtrain__cuda_flags_run(dtrain_device *device, const dtrain_device_flags *part)
{
    const char *call = "device_flags";
    dtrain__cuda_flags_launch launch;
    dtrain__cuda_fold_flags args;
    dtrain_status status = DTRAIN_OK;
    for (int rank = 0; rank < part->ranks && status == DTRAIN_OK; rank++)
        status = dtrain__cuda_memory(device, call, "the words of a rank", part->words[rank], sizeof(uint32_t), 1);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_flags_make(device, part, &args, &launch);
    return status == DTRAIN_OK ? launch(device, call, (size_t)part->blocks, &args) : status;
}

#endif

/* ---- >>cuda-elementwise ----
 * Scale, axpy, adding a selection, and the search for NaNs and infinities, with the bits of >>vector. A product is
 * rounded before it is added. 16-bit floats are computed as float32 and rounded once. */
#ifndef DTRAIN__CUDA_ELEMENTWISE
#define DTRAIN__CUDA_ELEMENTWISE

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

/* ---- >>cuda-optimizer ----
 * AdamW and SGD in one pass over memory. The operations are those of >>train-kernels, in their order, each rounded by
 * itself. If a copy is asked for, the new parameters are also stored as BF16. */
#ifndef DTRAIN__CUDA_OPTIMIZER
#define DTRAIN__CUDA_OPTIMIZER

#define DTRAIN__CUDA_OPTIMIZER_GROUPS 2 /* groups that a thread loads from each array before it stores the first */

typedef struct dtrain__cuda_adamw_args {
    dtrain_device_adamw_step step;
    dtrain__cuda_walk walk;
} dtrain__cuda_adamw_args;

typedef struct dtrain__cuda_sgd_args {
    dtrain_device_sgd_step step;
    dtrain__cuda_walk walk;
    int decays, remembers; /* a coupled decay; a velocity */
} dtrain__cuda_sgd_args;

typedef struct dtrain__cuda_step_held {
    dtrain__cuda_vector p, g, m, v; /* m: also SGD's velocity */
} dtrain__cuda_step_held;

DTRAIN__CUDA_FN void dtrain__cuda_step_copy(uint16_t *copy, size_t element, int whole, dtrain__cuda_vector p)
{
    uint64_t bits = 0;
    if (copy == NULL)
        return;
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) bits |=
        (uint64_t)dtrain__cuda_bf16_of(dtrain__cuda_float_of(p.word[i])) << 16 * i;
    dtrain__cuda_store_half(copy, element, whole, bits);
}

DTRAIN__CUDA_FN dtrain__cuda_step_held dtrain__cuda_adamw_all_load(const dtrain__cuda_adamw_args *args, size_t element,
                                                                   int whole)
{
    dtrain__cuda_step_held held;
    held.p = dtrain__cuda_load(args->step.params, element, 4, whole);
    held.g = dtrain__cuda_load(args->step.grads, element, 4, whole);
    held.m = dtrain__cuda_load(args->step.m, element, 4, whole);
    held.v = dtrain__cuda_load(args->step.v, element, 4, whole);
    return held;
}

DTRAIN__CUDA_FN void dtrain__cuda_adamw_one(const dtrain_device_adamw_step *c, uint32_t *p_bits, uint32_t g_bits,
                                            uint32_t *m_bits, uint32_t *v_bits)
{
    float p = dtrain__cuda_float_of(*p_bits), g = dtrain__cuda_float_of(g_bits);
    float m = dtrain__cuda_float_of(*m_bits), v = dtrain__cuda_float_of(*v_bits);
    float grown = dtrain__cuda_mul_f32(g, c->rest1),
          square = dtrain__cuda_mul_f32(dtrain__cuda_mul_f32(g, g), c->rest2);
    float spread, change;
    m = dtrain__cuda_add_f32(dtrain__cuda_mul_f32(m, c->beta1), grown);
    v = dtrain__cuda_add_f32(dtrain__cuda_mul_f32(v, c->beta2), square);
    spread = dtrain__cuda_mul_f32(dtrain__cuda_sqrt_f32(v), c->root);
    change = dtrain__cuda_mul_f32(dtrain__cuda_div_f32(m, dtrain__cuda_add_f32(spread, c->eps)), c->rate);
    *p_bits = dtrain__cuda_bits_f32(dtrain__cuda_sub_f32(dtrain__cuda_mul_f32(p, c->keep), change));
    *m_bits = dtrain__cuda_bits_f32(m);
    *v_bits = dtrain__cuda_bits_f32(v);
}

DTRAIN__CUDA_FN void dtrain__cuda_adamw_all_store(const dtrain__cuda_adamw_args *args, size_t element, int whole,
                                                  dtrain__cuda_step_held *held)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++)
        dtrain__cuda_adamw_one(&args->step, &held->p.word[i], held->g.word[i], &held->m.word[i], &held->v.word[i]);
    dtrain__cuda_store(args->step.m, element, 4, whole, held->m);
    dtrain__cuda_store(args->step.v, element, 4, whole, held->v);
    dtrain__cuda_store(args->step.params, element, 4, whole, held->p);
    dtrain__cuda_step_copy(args->step.copy, element, whole, held->p);
}

DTRAIN__CUDA_WALK_KERNEL(dtrain__cuda_adamw_all, dtrain__cuda_adamw_args, dtrain__cuda_step_held, 4,
                         DTRAIN__CUDA_OPTIMIZER_GROUPS)

DTRAIN__CUDA_FN dtrain__cuda_step_held dtrain__cuda_sgd_all_load(const dtrain__cuda_sgd_args *args, size_t element,
                                                                 int whole)
{
    dtrain__cuda_step_held held;
    held.p = dtrain__cuda_load(args->step.params, element, 4, whole);
    held.g = dtrain__cuda_load(args->step.grads, element, 4, whole);
    held.m = args->remembers ? dtrain__cuda_load(args->step.velocity, element, 4, whole) : held.g;
    held.v = held.m; /* unused */
    return held;
}

DTRAIN__CUDA_FN void dtrain__cuda_sgd_one(const dtrain__cuda_sgd_args *args, uint32_t *p_bits, uint32_t g_bits,
                                          uint32_t *m_bits)
{
    const dtrain_device_sgd_step *c = &args->step;
    float p = dtrain__cuda_float_of(*p_bits), g = dtrain__cuda_float_of(g_bits);
    if (args->decays)
        g = dtrain__cuda_add_f32(g, dtrain__cuda_mul_f32(p, c->coupled));
    if (args->remembers) {
        float v = dtrain__cuda_add_f32(dtrain__cuda_mul_f32(dtrain__cuda_float_of(*m_bits), c->momentum), g);
        g = c->nesterov ? dtrain__cuda_add_f32(g, dtrain__cuda_mul_f32(v, c->momentum)) : v;
        *m_bits = dtrain__cuda_bits_f32(v);
    }
    p = dtrain__cuda_sub_f32(dtrain__cuda_mul_f32(p, c->keep), dtrain__cuda_mul_f32(g, c->lr));
    *p_bits = dtrain__cuda_bits_f32(p);
}

DTRAIN__CUDA_FN void dtrain__cuda_sgd_all_store(const dtrain__cuda_sgd_args *args, size_t element, int whole,
                                                dtrain__cuda_step_held *held)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++)
        dtrain__cuda_sgd_one(args, &held->p.word[i], held->g.word[i], &held->m.word[i]);
    if (args->remembers)
        dtrain__cuda_store(args->step.velocity, element, 4, whole, held->m);
    dtrain__cuda_store(args->step.params, element, 4, whole, held->p);
    dtrain__cuda_step_copy(args->step.copy, element, whole, held->p);
}

DTRAIN__CUDA_WALK_KERNEL(dtrain__cuda_sgd_all, dtrain__cuda_sgd_args, dtrain__cuda_step_held, 4,
                         DTRAIN__CUDA_OPTIMIZER_GROUPS)

static dtrain_status dtrain__cuda_adamw(dtrain_device *device, const dtrain_device_adamw_step *step)
{
    const dtrain__cuda_array arrays[] = {{"params", step->params, 4, step->count, 0},
                                         {"grads", step->grads, 4, step->count, 0},
                                         {"m", step->m, 4, step->count, 0},
                                         {"v", step->v, 4, step->count, 0},
                                         {"copy", step->copy, 2, step->count, 0},
                                         {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_adamw_args args;
    args.step = *step;
    dtrain_status status = dtrain__cuda_walk_arrays(device, "device_adamw", arrays, &args.walk);
    return status == DTRAIN_OK ? dtrain__cuda_adamw_all_walk(device, "device_adamw", &args) : status;
}

static dtrain_status dtrain__cuda_sgd(dtrain_device *device, const dtrain_device_sgd_step *step)
{
    const dtrain__cuda_array arrays[] = {{"params", step->params, 4, step->count, 0},
                                         {"grads", step->grads, 4, step->count, 0},
                                         {"velocity", step->velocity, 4, step->count, 0},
                                         {"copy", step->copy, 2, step->count, 0},
                                         {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_sgd_args args;
    uint32_t coupled;
    args.step = *step;
    memcpy(&coupled, &step->coupled, sizeof coupled);
    args.decays = coupled << 1 != 0; /* by its bits, as the CPU may treat a subnormal as zero */
    args.remembers = step->velocity != NULL;
    dtrain_status status = dtrain__cuda_walk_arrays(device, "device_sgd", arrays, &args.walk);
    return status == DTRAIN_OK ? dtrain__cuda_sgd_all_walk(device, "device_sgd", &args) : status;
}

#endif

/* ---- >>cuda-norm ----
 * The exact sum of squares of >>norm on a GPU, and the clipping by it. A square of a float32 is exact in float64. A
 * thread adds squares to three float64 that are integers times powers of two. Each starts at 1.5 times its anchor 2^(52
 * + p) and stays in that binade, so its last place is worth 2^p throughout. An addition rounds to a multiple of 2^p.
 * The difference to the value before is exact, and so is the rest (Fast2Sum), which goes to the next one.
 *
 * A window has squares in [2^(2b), 2^(2b + 76)), at most N = 2^10 of them. Their last bit is g = 2b - 46.
 *
 *   first    p = g + 82: at most N 2^(g + 122) = 2^(p + 50), and N roundings of half a place; rests up to 2^(g + 81)
 *   second   p = g + 41: at most N 2^(g + 81) = 2^(p + 50), and N roundings of half a place; rests up to 2^(g + 40)
 *   third    p = g:      at most N 2^(g + 40) = 2^(p + 50), multiples of 2^g: nothing is rounded
 *
 * All stay within 2^(p + 51), half a binade. A rest is exact, as its last bit is the square's or higher, in one of two
 * ways. Either the rest is what was to be added, of 48 bits. Or what was to be added reaches half a place, and from
 * there to its last bit are at most 48 bits.
 *
 * Each block places its window by the largest of its first numbers, and a thread moves its window up if it must.
 * Numbers below the window go to the block's limbs, one by one. The accumulators of a block are added as integers and
 * go to limbs of 32 bits that carry at once. Those go to the caller's limbs, which every call carries. Every addition
 * is of integers, so no grid and no order changes the sum.
 *
 *   source   Dekker, A floating-point technique for extending the available precision, 1971 (Fast2Sum)
 *            Demmel, Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64(7), 2015 (anchors) */
#ifndef DTRAIN__CUDA_NORM
#define DTRAIN__CUDA_NORM

#define DTRAIN__CUDA_NORM_THREADS 256
#define DTRAIN__CUDA_NORM_DIGITS 20
#define DTRAIN__CUDA_NORM_INFINITIES 20 /* limb of the caller's, and of a block's, where each counter has two words */
#define DTRAIN__CUDA_NORM_NANS 22
#define DTRAIN__CUDA_NORM_LOWEST (-298)
#define DTRAIN__CUDA_NORM_BINADES 38u
#define DTRAIN__CUDA_NORM_PLACES 41 /* places between two accumulators */
#define DTRAIN__CUDA_NORM_ABOVE 4u  /* binades of a window above the largest number that placed it */
#define DTRAIN__CUDA_NORM_ROUNDS 60 /* of 16 squares; with those at the ends, fewer than 2^10 */
#define DTRAIN__CUDA_INFINITY 0x7F800000u

typedef struct dtrain__cuda_squares_args {
    const float *x;
    uint64_t *limbs;
    dtrain__cuda_walk walk;
} dtrain__cuda_squares_args;

typedef struct dtrain__cuda_squares_shared {
    uint32_t limbs[24]; /* digits, and two counters of two words */
    uint32_t first_top, top;
    int64_t parts[3][DTRAIN__CUDA_NORM_THREADS], sums[3][16];
} dtrain__cuda_squares_shared;

/* A window holds numbers from `lowest` on, over `span` of bits. Their exponents, with the bias, are below top. */
typedef struct dtrain__cuda_squares_own {
    double sums[3];
    uint32_t lowest, span, top;
} dtrain__cuda_squares_own;

/* Adds to one limb of a block, and carries. */
DTRAIN__CUDA_FN void dtrain__cuda_limb_add(uint32_t *limb, uint32_t value)
{
    for (; value != 0; limb++)
        value = dtrain__cuda_atomic_add_u32(limb, value) > UINT32_MAX - value;
}

/* Adds a word whose bit 0 is at bit `position` of a block's limbs. */
DTRAIN__CUDA_FN void dtrain__cuda_limb_add_word(uint32_t *limbs, uint32_t position, uint64_t word)
{
    uint64_t lower = (word & 0xFFFFFFFFu) << position % 32, upper = (word >> 32) << position % 32;
    uint32_t *limb = limbs + position / 32;
    dtrain__cuda_limb_add(limb, (uint32_t)lower);
    dtrain__cuda_limb_add(limb + 1, (uint32_t)(lower >> 32));
    dtrain__cuda_limb_add(limb + 1, (uint32_t)upper);
    dtrain__cuda_limb_add(limb + 2, (uint32_t)(upper >> 32));
}

/* Returns a bit position in the limbs; bit 0 of limb 0 is worth 2^-298. It is that of the last place of a window's last
 * accumulator, and of a number's square. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_position(uint32_t exponent)
{
    return exponent > 0 ? 2 * exponent - 2 : 0;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_bottom(uint32_t top)
{
    return top - DTRAIN__CUDA_NORM_BINADES;
}

DTRAIN__CUDA_FN uint64_t dtrain__cuda_squares_anchor(uint32_t top, int accumulator)
{
    int place = (int)dtrain__cuda_squares_position(dtrain__cuda_squares_bottom(top)) + DTRAIN__CUDA_NORM_LOWEST +
                DTRAIN__CUDA_NORM_PLACES * (2 - accumulator);
    return (uint64_t)(1023 + 52 + place) << 52 | (uint64_t)1 << 51;
}

/* The lowest window also holds subnormals, whose last place is that of the smallest normal number. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_place(dtrain__cuda_squares_own *own, uint32_t top)
{
    uint32_t bottom = dtrain__cuda_squares_bottom(top);
    own->top = top;
    own->lowest = bottom > 1 ? bottom << 23 : 0;
    own->span = (top << 23) - own->lowest;
    for (int i = 0; i < 3; i++)
        own->sums[i] = dtrain__cuda_double_of(dtrain__cuda_squares_anchor(top, i));
}

/* Returns the top of a window for numbers of up to this exponent. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_top(uint32_t exponent)
{
    uint32_t top = exponent + 1 + DTRAIN__CUDA_NORM_ABOVE, least = DTRAIN__CUDA_NORM_BINADES + 1;
    return top < least ? least : top > 255 ? 255 : top;
}

/* Returns what an accumulator holds, in its last places. */
DTRAIN__CUDA_FN int64_t dtrain__cuda_squares_places(const dtrain__cuda_squares_own *own, int accumulator)
{
    return (int64_t)(dtrain__cuda_bits_f64(own->sums[accumulator]) -
                     dtrain__cuda_squares_anchor(own->top, accumulator));
}

/* Adds a 2^82 + b 2^41 + c, in last places of the window of top. It is not negative, and a is below 2^60. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_flush(uint32_t *limbs, uint32_t top, int64_t a, int64_t b, int64_t c)
{
    uint32_t position = dtrain__cuda_squares_position(dtrain__cuda_squares_bottom(top));
    uint64_t low = (uint64_t)c, middle = (uint64_t)(c >> 63), high = middle, carry;
    low += (uint64_t)b << 41;
    carry = low < (uint64_t)b << 41;
    middle += carry;
    high += middle < carry;
    middle += (uint64_t)(b >> 23);
    high += (uint64_t)(b >> 63) + (middle < (uint64_t)(b >> 23));
    middle += (uint64_t)a << 18;
    high += (uint64_t)(a >> 46) + (middle < (uint64_t)a << 18);
    dtrain__cuda_limb_add_word(limbs, position, low);
    dtrain__cuda_limb_add_word(limbs, position + 64, middle);
    dtrain__cuda_limb_add_word(limbs, position + 128, high);
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_flush_own(dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own)
{
    dtrain__cuda_squares_flush(shared->limbs, own->top, dtrain__cuda_squares_places(own, 0),
                               dtrain__cuda_squares_places(own, 1), dtrain__cuda_squares_places(own, 2));
    dtrain__cuda_squares_place(own, own->top);
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_accumulate(dtrain__cuda_squares_own *own, float number)
{
    double x = dtrain__cuda_widen_f32(number), rest = dtrain__cuda_mul_f64(x, x);
    for (int i = 0; i < 2; i++) {
        double sum = dtrain__cuda_add_f64(own->sums[i], rest);
        rest = dtrain__cuda_sub_f64(rest, dtrain__cuda_sub_f64(sum, own->sums[i]));
        own->sums[i] = sum;
    }
    own->sums[2] = dtrain__cuda_add_f64(own->sums[2], rest);
}

/* Returns whether the window does not hold one of four numbers. It holds zero. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_misses(const dtrain__cuda_squares_own *own, dtrain__cuda_vector v)
{
    uint32_t misses = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t key = v.word[i] & 0x7FFFFFFFu;
        misses |= (uint32_t)(key - own->lowest >= own->span) & (uint32_t)(key != 0);
    }
    return misses;
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_take(dtrain__cuda_squares_own *own, dtrain__cuda_vector v)
{
    for (int i = 0; i < 4; i++)
        dtrain__cuda_squares_accumulate(own, dtrain__cuda_float_of(v.word[i]));
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_put(uint32_t *limbs, uint32_t key)
{
    uint32_t exponent = key >> 23, mantissa = (key & 0x7FFFFFu) | (exponent > 0 ? 0x800000u : 0);
    dtrain__cuda_limb_add_word(limbs, dtrain__cuda_squares_position(exponent), (uint64_t)mantissa * mantissa);
}

/* Adds any number. A window moves by steps of 16 binades, so that threads' windows seldom differ. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_any(dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own,
                                              uint32_t key)
{
    if (key >= DTRAIN__CUDA_INFINITY) {
        dtrain__cuda_limb_add(
            shared->limbs + (key > DTRAIN__CUDA_INFINITY ? DTRAIN__CUDA_NORM_NANS : DTRAIN__CUDA_NORM_INFINITIES), 1);
        return;
    }
    if (key < own->lowest) {
        dtrain__cuda_squares_put(shared->limbs, key);
        return;
    }
    if (key - own->lowest >= own->span) {
        uint32_t top = (dtrain__cuda_squares_top(key >> 23) + 15) / 16 * 16;
        dtrain__cuda_squares_flush_own(shared, own);
        dtrain__cuda_squares_place(own, top < 255 ? top : 255);
    }
    dtrain__cuda_squares_accumulate(own, dtrain__cuda_float_of(key));
}

/* Adds `vectors` times 4 numbers, `stride` numbers from 4 to 4, if the window does not hold all. It reads them again:
 * few come here, and registers cannot be indexed. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_each(dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own,
                                               const float *x, size_t stride, uint32_t vectors)
{
    DTRAIN__CUDA_ROLLED
    for (uint32_t i = 0; i < 4 * vectors; i++)
        dtrain__cuda_squares_any(shared, own, dtrain__cuda_bits_f32(x[i / 4 * stride + i % 4]) & 0x7FFFFFFFu);
}

/* Adds the numbers before and after those at multiples of 16 bytes, at most 6. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_ends(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                               dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own)
{
    size_t i = at.thread < args->walk.head ? at.thread : 4 * args->walk.groups + at.thread;
    if (at.block == 0 && at.thread < args->walk.singles)
        dtrain__cuda_squares_any(shared, own, dtrain__cuda_bits_f32(args->x[i]) & 0x7FFFFFFFu);
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_all(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                              dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own)
{
    const float *x = args->x + args->walk.head;
    const dtrain__cuda_vector *v = (const dtrain__cuda_vector *)x;
    size_t step = at.blocks * at.threads, i = at.block * at.threads + at.thread;
    int rounds = 0;
    DTRAIN__CUDA_ROLLED
    for (; i < args->walk.groups && args->walk.groups - i > 3 * step; i += 4 * step) {
        dtrain__cuda_vector a = v[i], b = v[i + step], c = v[i + 2 * step], d = v[i + 3 * step];
        /* The branch comes after all four loads, so that they are in flight together. */
        if (dtrain__cuda_squares_misses(own, a) | dtrain__cuda_squares_misses(own, b) |
            dtrain__cuda_squares_misses(own, c) | dtrain__cuda_squares_misses(own, d)) {
            dtrain__cuda_squares_each(shared, own, x + 4 * i, 4 * step, 4);
        } else {
            dtrain__cuda_squares_take(own, a);
            dtrain__cuda_squares_take(own, b);
            dtrain__cuda_squares_take(own, c);
            dtrain__cuda_squares_take(own, d);
        }
        if (++rounds < DTRAIN__CUDA_NORM_ROUNDS)
            continue;
        dtrain__cuda_squares_flush_own(shared, own);
        rounds = 0;
    }
    DTRAIN__CUDA_ROLLED
    for (; i < args->walk.groups; i += step)
        dtrain__cuda_squares_each(shared, own, x + 4 * i, 0, 1);
}

/* Finds the largest exponent of the block's first numbers. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_sample(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                                 dtrain__cuda_squares_shared *shared)
{
    const dtrain__cuda_vector *v = (const dtrain__cuda_vector *)(args->x + args->walk.head);
    size_t i = at.block * at.threads + at.thread;
    uint32_t top = dtrain__cuda_squares_top(0);
    if (i < args->walk.groups) {
        dtrain__cuda_vector sample = v[i];
        for (int j = 0; j < 4; j++) {
            uint32_t key = sample.word[j] & 0x7FFFFFFFu, its = dtrain__cuda_squares_top(key >> 23);
            top = key < DTRAIN__CUDA_INFINITY && its > top ? its : top;
        }
    }
    dtrain__cuda_atomic_max_u32(&shared->first_top, top);
}

/* Adds the block's limbs to the caller's. Block 0 carries these, also by additions, so it waits for no block. Limbs
 * stay below 2^45 after any number of calls. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_deliver(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                                  const dtrain__cuda_squares_shared *shared)
{
    uint64_t value = 0, carry, before;
    if (at.thread >= DTRAIN__CUDA_NORM_DIGITS + 2)
        return;
    if (at.thread < DTRAIN__CUDA_NORM_DIGITS) {
        value = shared->limbs[at.thread];
    } else {
        uint32_t from = 2 * at.thread - DTRAIN__CUDA_NORM_DIGITS;
        value = shared->limbs[from] | (uint64_t)shared->limbs[from + 1] << 32;
    }
    if (value == 0 && at.block > 0)
        return;
    before = dtrain__cuda_atomic_add_u64(args->limbs + at.thread, value);
    if (at.block > 0 || at.thread >= DTRAIN__CUDA_NORM_DIGITS - 1)
        return;
    carry = (uint64_t)((int64_t)(before + value) >> 32);
    if (carry != 0) {
        dtrain__cuda_atomic_add_u64(args->limbs + at.thread, 0u - (carry << 32));
        dtrain__cuda_atomic_add_u64(args->limbs + at.thread + 1, carry);
    }
}

/* Adds, as integers, the accumulators of all threads whose window is the block's highest; the others go to the limbs.
 */
DTRAIN__CUDA_FN void dtrain__cuda_squares_part(dtrain__cuda_at at, dtrain__cuda_squares_shared *shared,
                                               dtrain__cuda_squares_own *own)
{
    if (own->top != shared->top)
        dtrain__cuda_squares_flush_own(shared, own);
    for (int i = 0; i < 3; i++)
        shared->parts[i][at.thread] = dtrain__cuda_squares_places(own, i);
}

DTRAIN__CUDA_FN int64_t dtrain__cuda_squares_sum16(const int64_t *from)
{
    int64_t sum = 0;
    for (int i = 0; i < 16; i++)
        sum += from[i];
    return sum;
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_run_body(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                                   dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own,
                                                   int phase)
{
    if (phase == 0) {
        if (at.thread < 24)
            shared->limbs[at.thread] = 0;
        if (at.thread == 24)
            shared->first_top = shared->top = 0;
    } else if (phase == 1) {
        dtrain__cuda_squares_sample(args, at, shared);
    } else if (phase == 2) {
        dtrain__cuda_squares_place(own, shared->first_top);
        dtrain__cuda_squares_all(args, at, shared, own);
        dtrain__cuda_squares_ends(args, at, shared, own);
        if (own->top != shared->first_top || at.thread == 0)
            dtrain__cuda_atomic_max_u32(&shared->top, own->top);
    } else if (phase == 3) {
        dtrain__cuda_squares_part(at, shared, own);
    } else if (phase == 4) {
        if (at.thread < 48)
            shared->sums[at.thread / 16][at.thread % 16] =
                dtrain__cuda_squares_sum16(shared->parts[at.thread / 16] + at.thread % 16 * 16);
    } else if (phase == 5) {
        if (at.thread < 3)
            shared->parts[at.thread][0] = dtrain__cuda_squares_sum16(shared->sums[at.thread]);
    } else if (phase == 6) {
        if (at.thread == 0)
            dtrain__cuda_squares_flush(shared->limbs, shared->top, shared->parts[0][0], shared->parts[1][0],
                                       shared->parts[2][0]);
    } else {
        dtrain__cuda_squares_deliver(args, at, shared);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_squares_run, dtrain__cuda_squares_args, dtrain__cuda_squares_shared,
                    dtrain__cuda_squares_own, DTRAIN__CUDA_NORM_THREADS, 8)

/* Returns as many blocks as the GPU holds at once, or fewer if there is less to do. */
static size_t dtrain__cuda_norm_blocks(dtrain_device *device, size_t vectors)
{
    size_t most = (size_t)dtrain__cuda_queue_of(device)->processors * 4;
    size_t blocks = vectors / (4 * (size_t)DTRAIN__CUDA_NORM_THREADS) + 1;
    return blocks < most ? blocks : most;
}

static dtrain_status dtrain__cuda_squares(dtrain_device *device, const float *x, size_t count, int64_t *limbs)
{
    const char *call = "device_squares";
    const dtrain__cuda_array all[] = {{"x", x, sizeof *x, count, 1}, {NULL, NULL, 0, 0, 0}};
    const dtrain__cuda_array sum[] = {{"limbs", limbs, sizeof *limbs, DTRAIN_SQUARES_LIMBS, 1}, {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_squares_args args = {x, (uint64_t *)limbs, {0, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_walk_arrays(device, call, all, &args.walk);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_arrays(device, call, sum);
    size_t blocks = dtrain__cuda_norm_blocks(device, args.walk.groups);
    return status == DTRAIN_OK ? dtrain__cuda_squares_run_launch(device, call, blocks, &args) : status;
}

typedef struct dtrain__cuda_clip_args {
    const int64_t *limbs;
    double *norm;
    float *x;
    dtrain__cuda_walk walk;
    float max_norm;
} dtrain__cuda_clip_args;

typedef struct dtrain__cuda_clip_shared {
    int64_t limbs[DTRAIN_SQUARES_LIMBS];
    float factor;
    int shorten;
} dtrain__cuda_clip_shared;

/* Does what dtrain__norm_value does, and carries the limbs. */
DTRAIN__CUDA_FN double dtrain__cuda_clip_value(int64_t *limbs)
{
    int top = DTRAIN__CUDA_NORM_DIGITS - 1, zeros = 0;
    uint64_t bits = 0, rest = 0;
    DTRAIN__CUDA_ROLLED
    for (int i = 0; i < top; i++) {
        limbs[i + 1] += limbs[i] >> 32;
        limbs[i] &= 0xFFFFFFFF;
    }
    while (top > 0 && limbs[top] == 0)
        top--;
    DTRAIN__CUDA_ROLLED
    for (int i = top; i >= 0; i--) {
        uint64_t limb = (uint64_t)limbs[i];
        if (i > top - 2)
            bits |= limb << (i == top ? 32 : 0);
        else
            rest |= i == top - 2 ? limb << 32 : (uint64_t)(limb != 0);
    }
    while (bits != 0 && bits >> 63 == 0) {
        bits = bits << 1 | rest >> 63;
        rest = rest << 1;
        zeros++;
    }
    if (bits != 0) {
        uint64_t exponent = (uint64_t)(32 * top + 31 - zeros + DTRAIN__CUDA_NORM_LOWEST + 1023);
        uint64_t below = (bits & 0x7FF) | (uint64_t)(rest != 0), half = 0x400;
        bits = (exponent << 52) + (bits << 1 >> 12);
        bits += below > half || (below == half && (bits & 1));
    }
    if (limbs[DTRAIN_SQUARES_LIMBS - 1] != 0)
        bits = UINT64_C(0x7FF8000000000000);
    else if (limbs[DTRAIN_SQUARES_LIMBS - 2] != 0)
        bits = UINT64_C(0x7FF0000000000000);
    return dtrain__cuda_double_of(bits);
}

DTRAIN__CUDA_FN void dtrain__cuda_clip_measure(const dtrain__cuda_clip_args *args, dtrain__cuda_at at,
                                               dtrain__cuda_clip_shared *shared)
{
    double norm = dtrain__cuda_sqrt_f64(dtrain__cuda_clip_value(shared->limbs));
    double most = dtrain__cuda_widen_f32(args->max_norm);
    int finite = dtrain__cuda_bits_f64(norm) < UINT64_C(0x7FF0000000000000);
    if (at.block == 0)
        *args->norm = norm;
    shared->factor = dtrain__cuda_narrow_f64(dtrain__cuda_div_f64(most, norm));
    shared->shorten = most != 0.0 && finite && norm > most;
}

DTRAIN__CUDA_FN void dtrain__cuda_clip_run_body(const dtrain__cuda_clip_args *args, dtrain__cuda_at at,
                                                dtrain__cuda_clip_shared *shared, dtrain__cuda_none *own, int phase)
{
    (void)own;
    if (phase == 0) {
        if (at.thread < DTRAIN_SQUARES_LIMBS)
            shared->limbs[at.thread] = args->limbs[at.thread];
    } else if (phase == 1) {
        if (at.thread == 0)
            dtrain__cuda_clip_measure(args, at, shared);
    } else if (shared->shorten) {
        dtrain__cuda_axpy_args scale = {NULL, args->x, args->walk, 0, shared->factor};
        dtrain__cuda_scale_f32_body(&scale, at, NULL, NULL, 0);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_clip_run, dtrain__cuda_clip_args, dtrain__cuda_clip_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_NORM_THREADS, 3)

static dtrain_status dtrain__cuda_clip(dtrain_device *device, const int64_t *limbs, float max_norm, double *norm,
                                       float *x, size_t count)
{
    const char *call = "device_clip";
    const dtrain__cuda_array sum[] = {{"limbs", limbs, sizeof *limbs, DTRAIN_SQUARES_LIMBS, 1},
                                      {"norm", norm, sizeof *norm, 1, 1},
                                      {NULL, NULL, 0, 0, 0}};
    const dtrain__cuda_array all[] = {{"x", x, sizeof *x, count, 1}, {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_clip_args args = {limbs, norm, x, {0, 0, 0, 0}, max_norm};
    dtrain_status status = dtrain__cuda_arrays(device, call, sum);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_walk_arrays(device, call, all, &args.walk);
    /* if nothing is shortened, one block writes the norm */
    size_t blocks = dtrain__cuda_norm_blocks(device, max_norm > 0.0f ? args.walk.groups : 0);
    return status == DTRAIN_OK ? dtrain__cuda_clip_run_launch(device, call, blocks, &args) : status;
}

#endif

/* ---- >>cuda-topk ----
 * The k elements of largest magnitude on a GPU, with the bits and the order of >>topk. A key is a number's bits without
 * the sign; all NaNs have one key, above infinity. A sample of the keys gives a bar that slightly more than k should
 * pass. Then the vector is read once. A block takes a tile, adds the addend, and lists in order what passes the bar.
 * The lists come in any order in one array, and are found again by their tiles; >>cuda-topk-select chooses among them.
 * If the bar was wrong, and fewer than k passed or more than there is room for, it reads the vector instead. So results
 * never depend on the bar.
 *
 * A position is an index counted from the last multiple of 16 bytes before the vector. */
#ifndef DTRAIN__CUDA_TOPK
#define DTRAIN__CUDA_TOPK

#define DTRAIN__CUDA_TOPK_THREADS 256
#define DTRAIN__CUDA_TOPK_VECTORS 8 /* of 4 elements, for a thread */
#define DTRAIN__CUDA_TOPK_TILE 8192u
#define DTRAIN__CUDA_TOPK_TILES 8u  /* in a chunk, which a block counts and lists */
#define DTRAIN__CUDA_TOPK_PARTS 32u /* of a tile; each of as many threads has one */
#define DTRAIN__CUDA_TOPK_BINS 2048
#define DTRAIN__CUDA_TOPK_EACH 4096u /* listed keys that a block counts, about */
#define DTRAIN__CUDA_TOPK_SAMPLE 16384u
#define DTRAIN__CUDA_TOPK_NEVER 0x80000000u /* a bar above every key */
#define DTRAIN__CUDA_TOPK_NAN 0x7F800001u

/* Groups of chunks, at most 256, so that no block adds the counts of all chunks before its own. Fewer make each longer.
 */
#ifndef DTRAIN__CUDA_TOPK_SPANS
#define DTRAIN__CUDA_TOPK_SPANS 256u
#endif

/* What is known of the k-th largest key: its upper bits, and its place among the keys that share them. */
typedef struct dtrain__cuda_topk_search {
    uint32_t prefix, left;
} dtrain__cuda_topk_search;

/* State in device memory that lasts from step to step; zero at first. */
typedef struct dtrain__cuda_topk_state {
    uint32_t bar;
    uint32_t sampled; /* number of blocks that have sampled */
    uint32_t passed;
    uint32_t listed; /* the lists hold the k largest; for the last kernel */
    dtrain__cuda_topk_search search[3];
    uint32_t bins[3][DTRAIN__CUDA_TOPK_BINS];
    uint64_t spans[DTRAIN__CUDA_TOPK_SPANS]; /* counts: keys above the k-th, plus 2^32 times the keys equal to it */
} dtrain__cuda_topk_state;

typedef struct dtrain__cuda_topk_run {
    uint32_t start, count;
} dtrain__cuda_topk_run;

/* The arguments of all kernels. */
typedef struct dtrain__cuda_topk_args {
    float *data;      /* with add: becomes the sum */
    const float *add; /* or NULL */
    size_t count, k;
    size_t first, end; /* positions of the vector */
    size_t tiles, chunks;
    dtrain__cuda_topk_state *state;
    dtrain__cuda_topk_run *runs; /* one a tile: its list */
    uint32_t *sample;            /* keys */
    uint64_t *totals, *parts;    /* counts of a chunk, and of its threads */
    uint32_t *listed_indices;    /* and values, each with room for `room` */
    float *listed_values;
    size_t room;
    uint32_t *indices;
    float *values;
    uint32_t bar;         /* the bar of every step; 0: from a sample */
    int level, add_whole; /* add_whole: add is at multiples of 16 bytes where data is */
} dtrain__cuda_topk_args;

typedef struct dtrain__cuda_topk_collect_shared {
    uint32_t words[DTRAIN__CUDA_TOPK_TILE / 32]; /* one bit an element: it passes */
    uint32_t before[DTRAIN__CUDA_TOPK_TILE / 32], groups[16];
    uint32_t start, fits;
} dtrain__cuda_topk_collect_shared;

typedef struct dtrain__cuda_topk_collect_own {
    dtrain__cuda_vector v[DTRAIN__CUDA_TOPK_VECTORS];
    uint32_t mask; /* one bit an element: it passes */
} dtrain__cuda_topk_collect_own;

DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_key(uint32_t bits)
{
    uint32_t key = bits & 0x7FFFFFFFu;
    return key < DTRAIN__CUDA_TOPK_NAN ? key : DTRAIN__CUDA_TOPK_NAN;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_ones(uint32_t word)
{
#ifdef DTRAIN_CUDA_EMULATE
    return (uint32_t)__builtin_popcount(word);
#else
    return (uint32_t)__popc(word);
#endif
}

/* Lets all blocks see what the thread has written before they see its later writes. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_fence(void)
{
#ifndef DTRAIN_CUDA_EMULATE
    __threadfence();
#endif
}

/* Loads 4 numbers from position `at` on, a multiple of 4; zeros for positions outside first and end. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_topk_load(const float *data, size_t at, size_t first, size_t end)
{
    dtrain__cuda_vector v;
    if (at >= first && at + 4 <= end)
        return *(const dtrain__cuda_vector *)(data + (at - first));
    for (size_t i = 0; i < 4; i++)
        v.word[i] = at + i >= first && at + i < end ? *(const dtrain__cuda_u32 *)(data + (at + i - first)) : 0;
    return v;
}

/* Loads four addends, all of which exist. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_topk_addend(const float *add, int whole)
{
    dtrain__cuda_vector v;
    if (whole)
        return *(const dtrain__cuda_vector *)add;
    for (int i = 0; i < 4; i++)
        v.word[i] = dtrain__cuda_bits_f32(add[i]);
    return v;
}

/* Reads a tile that lies inside the vector. All loads of a half come before its stores. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_read_whole(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_collect_own *own)
{
    size_t from = at.block * DTRAIN__CUDA_TOPK_TILE + 4 * at.thread - args->first;
    dtrain__cuda_vector *v = (dtrain__cuda_vector *)(args->data + from);
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++)
        own->v[j] = v[j * DTRAIN__CUDA_TOPK_THREADS];
    if (args->add == NULL)
        return;
    for (int half = 0; half < DTRAIN__CUDA_TOPK_VECTORS; half += 4) {
        const float *add = args->add + from + (size_t)half * 4 * DTRAIN__CUDA_TOPK_THREADS;
        dtrain__cuda_vector more[4];
        for (int j = 0; j < 4; j++)
            more[j] = dtrain__cuda_topk_addend(add + j * 4 * DTRAIN__CUDA_TOPK_THREADS, args->add_whole);
        for (int j = 0; j < 4; j++)
            own->v[half + j] = dtrain__cuda_join_f32(DTRAIN_SUM, own->v[half + j], more[j]);
        for (int j = half; j < half + 4; j++)
            v[j * DTRAIN__CUDA_TOPK_THREADS] = own->v[j];
    }
}

/* Reads the first or the last tile. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_read_end(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                dtrain__cuda_topk_collect_own *own)
{
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++) {
        size_t from = at.block * DTRAIN__CUDA_TOPK_TILE + 4 * ((size_t)j * DTRAIN__CUDA_TOPK_THREADS + at.thread);
        own->v[j] = dtrain__cuda_topk_load(args->data, from, args->first, args->end);
        for (size_t i = 0; args->add != NULL && i < 4; i++) {
            if (from + i < args->first || from + i >= args->end)
                continue;
            float sum =
                dtrain__cuda_add_f32(dtrain__cuda_float_of(own->v[j].word[i]), args->add[from + i - args->first]);
            own->v[j].word[i] = dtrain__cuda_bits_f32(sum);
            args->data[from + i - args->first] = sum;
        }
    }
}

/* Reads a tile. Positions outside the vector read as zero, which no bar lets pass. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_read(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                            dtrain__cuda_topk_collect_own *own)
{
    size_t from = at.block * DTRAIN__CUDA_TOPK_TILE;
    uint32_t bar = args->k > 0 ? args->state->bar : DTRAIN__CUDA_TOPK_NEVER;
    if (from >= args->first && from + DTRAIN__CUDA_TOPK_TILE <= args->end)
        dtrain__cuda_topk_read_whole(args, at, own);
    else
        dtrain__cuda_topk_read_end(args, at, own);
    own->mask = 0;
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++)
        for (int i = 0; i < 4; i++)
            own->mask |= (uint32_t)((own->v[j].word[i] & 0x7FFFFFFFu) >= bar) << (4 * j + i);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_word(uint32_t thread, int j)
{
    return (uint32_t)j * (DTRAIN__CUDA_TOPK_THREADS / 8) + thread / 8;
}

/* Writes a thread's passing elements to their place in the tile's list. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_list(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                            const dtrain__cuda_topk_collect_shared *shared,
                                            const dtrain__cuda_topk_collect_own *own)
{
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++) {
        uint32_t passing = own->mask >> (4 * j) & 15, word = dtrain__cuda_topk_word(at.thread, j);
        if (passing == 0)
            continue;
        uint32_t lower = ((uint32_t)1 << (4 * (at.thread % 8))) - 1;
        size_t to = (size_t)shared->start + shared->groups[word / 16] + shared->before[word] +
                    dtrain__cuda_topk_ones(shared->words[word] & lower);
        size_t from =
            at.block * DTRAIN__CUDA_TOPK_TILE + 4 * ((size_t)j * DTRAIN__CUDA_TOPK_THREADS + at.thread) - args->first;
        for (uint32_t i = 0; i < 4; i++) {
            if ((passing >> i & 1) == 0)
                continue;
            args->listed_indices[to] = (uint32_t)(from + i);
            args->listed_values[to++] = dtrain__cuda_float_of(own->v[j].word[i]);
        }
    }
}

/* Takes room for the tile's list. The order of lists is open and does not matter. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_reserve(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                               dtrain__cuda_topk_collect_shared *shared)
{
    uint32_t total = 0;
    for (int i = 0; i < 16; i++) {
        uint32_t its = shared->groups[i];
        shared->groups[i] = total;
        total += its;
    }
    shared->start = total > 0 ? dtrain__cuda_atomic_add_u32(&args->state->passed, total) : 0;
    shared->fits = (size_t)shared->start + total <= args->room;
    if (args->k > 0) {
        args->runs[at.block].start = shared->start;
        args->runs[at.block].count = total;
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_collect_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                    dtrain__cuda_topk_collect_shared *shared,
                                                    dtrain__cuda_topk_collect_own *own, int phase)
{
    if (phase == 0) {
        shared->words[at.thread] = 0;
        dtrain__cuda_topk_read(args, at, own);
    } else if (phase == 1) {
        for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++) {
            uint32_t passing = own->mask >> (4 * j) & 15;
            if (passing != 0)
                dtrain__cuda_atomic_or_u32(shared->words + dtrain__cuda_topk_word(at.thread, j),
                                           passing << (4 * (at.thread % 8)));
        }
    } else if (phase == 2) {
        uint32_t sum = 0;
        for (uint32_t i = 16 * at.thread; at.thread < 16 && i < 16 * at.thread + 16; i++) {
            shared->before[i] = sum;
            sum += dtrain__cuda_topk_ones(shared->words[i]);
        }
        if (at.thread < 16)
            shared->groups[at.thread] = sum;
    } else if (phase == 3) {
        if (at.thread == 0)
            dtrain__cuda_topk_reserve(args, at, shared);
    } else if (shared->fits) {
        dtrain__cuda_topk_list(args, at, shared, own);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_collect, dtrain__cuda_topk_args, dtrain__cuda_topk_collect_shared,
                    dtrain__cuda_topk_collect_own, DTRAIN__CUDA_TOPK_THREADS, 5)

#endif

/* ---- >>cuda-topk-select ----
 * Finds the k-th largest key in the lists of >>cuda-topk, or in the vector if the lists do not hold it. It does so by
 * 11, 10 and 10 bits from the top. For each a kernel counts keys by these bits. Then each chunk of tiles is counted:
 * keys above the k-th, and equal to it. Of the equal ones the first are taken. Last, each chunk is written at the place
 * that the counts of the chunks before it give. Every kernel reads either source by the same code, and no block waits
 * for another. */
#ifndef DTRAIN__CUDA_TOPK_SELECT
#define DTRAIN__CUDA_TOPK_SELECT

/* The keys: positions first to end of data, counted from the last multiple of 16 bytes before it. */
typedef struct dtrain__cuda_topk_source {
    const float *data;
    size_t first, end;
} dtrain__cuda_topk_source;

typedef struct dtrain__cuda_topk_find_shared {
    uint32_t sums[DTRAIN__CUDA_TOPK_THREADS], groups[16];
    dtrain__cuda_topk_search found;
} dtrain__cuda_topk_find_shared;

typedef struct dtrain__cuda_topk_aim_shared {
    uint32_t bins[1024];
    dtrain__cuda_topk_find_shared find;
    dtrain__cuda_topk_search upper;
    uint32_t last;
} dtrain__cuda_topk_aim_shared;

typedef struct dtrain__cuda_topk_bins_shared {
    uint32_t bins[DTRAIN__CUDA_TOPK_BINS];
    dtrain__cuda_topk_find_shared find;
} dtrain__cuda_topk_bins_shared;

typedef struct dtrain__cuda_topk_chunk_shared {
    uint64_t parts[DTRAIN__CUDA_TOPK_THREADS], groups[16];
    uint64_t before[DTRAIN__CUDA_TOPK_THREADS], befores[16];
    dtrain__cuda_topk_find_shared find;
} dtrain__cuda_topk_chunk_shared;

/* A thread's part of a tile, as positions of a source. */
typedef struct dtrain__cuda_topk_part {
    size_t begin, end;
} dtrain__cuda_topk_part;

DTRAIN__CUDA_FN int dtrain__cuda_topk_listed(const dtrain__cuda_topk_args *args)
{
    return args->state->passed >= args->k && args->state->passed <= args->room;
}

DTRAIN__CUDA_FN dtrain__cuda_topk_source dtrain__cuda_topk_source_of(const dtrain__cuda_topk_args *args, int listed)
{
    dtrain__cuda_topk_source source = {args->data, args->first, args->end};
    if (listed) {
        source.data = args->listed_values;
        source.first = 0;
        source.end = args->room;
    }
    return source;
}

/* Finds the next bits of the key from the counts of a level, in phases 0 to 2; known: the bits found before. Each
 * thread has 8 bins from the top on, or 4 of the 1024 of later levels. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_find(const uint32_t *bins, dtrain__cuda_topk_search known, dtrain__cuda_at at,
                                            dtrain__cuda_topk_find_shared *shared, int level, int phase)
{
    uint32_t each = level == 0 ? 8 : 4, bin = each * (DTRAIN__CUDA_TOPK_THREADS - at.thread) - 1;
    if (phase == 0) {
        uint32_t sum = 0;
        for (uint32_t i = 0; i < each; i++)
            sum += bins[bin - i];
        shared->sums[at.thread] = sum;
    } else if (phase == 1) {
        uint32_t sum = 0;
        for (uint32_t i = 0; at.thread < 16 && i < 16; i++)
            sum += shared->sums[16 * at.thread + i];
        if (at.thread < 16)
            shared->groups[at.thread] = sum;
    } else {
        uint32_t left = known.left, above = 0;
        for (uint32_t i = 0; i < at.thread / 16; i++)
            above += shared->groups[i];
        for (uint32_t i = at.thread / 16 * 16; i < at.thread; i++)
            above += shared->sums[i];
        if (above >= left || left - above > shared->sums[at.thread])
            return;
        left -= above;
        for (; left > bins[bin]; bin--)
            left -= bins[bin];
        shared->found.prefix = level == 0 ? bin : known.prefix << 10 | bin;
        shared->found.left = left;
    }
}

/* Does the same as the kernels after a level. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_find_level(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_find_shared *shared, int level, int phase)
{
    dtrain__cuda_topk_search known = {0, (uint32_t)args->k};
    if (level > 0)
        known = args->state->search[level - 1];
    dtrain__cuda_topk_find(args->state->bins[level], known, at, shared, level, phase);
}

/* Returns the number of elements in the sample. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_sample(const dtrain__cuda_topk_args *args)
{
    size_t quarter = (args->count + 3) / 4;
    return quarter < DTRAIN__CUDA_TOPK_SAMPLE ? (uint32_t)quarter : DTRAIN__CUDA_TOPK_SAMPLE;
}

/* Returns the place in the sample of a key that k of all should pass: 4 deviations below that of k. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_place(const dtrain__cuda_topk_args *args)
{
    uint32_t sample = dtrain__cuda_topk_sample(args);
    uint32_t expected = (uint32_t)((uint64_t)args->k * sample / args->count), root = 0;
    for (uint32_t bit = 128; bit > 0; bit /= 2)
        root += (root + bit) * (root + bit) <= expected ? bit : 0;
    uint32_t place = expected + 4 * root + 8;
    return place < sample ? place : sample;
}

/* Counts the upper bits of a sampled key. The vector is cut into equal pieces, and one key of each is taken, at a place
 * that no pattern of the data follows. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_look(const dtrain__cuda_topk_args *args, dtrain__cuda_at at)
{
    uint32_t sample = dtrain__cuda_topk_sample(args), i = (uint32_t)at.block * at.threads + at.thread;
    uint32_t random = (i + 1) * 0x9E3779B9u;
    if (i >= sample)
        return;
    size_t piece = args->count / sample;
    random = (random ^ random >> 15) * 0x85EBCA6Bu;
    size_t from = i * piece + (size_t)((uint64_t)(random ^ random >> 13) * piece >> 32);
    float x = args->data[from];
    if (args->add != NULL)
        x = dtrain__cuda_add_f32(x, args->add[from]);
    uint32_t key = dtrain__cuda_topk_key(dtrain__cuda_bits_f32(x));
    args->sample[i] = key;
    dtrain__cuda_atomic_add_u32(args->state->bins[0] + (key >> 20), 1);
}

/* The bits of a key that a level knows, and those that it finds. */
typedef struct dtrain__cuda_topk_level {
    uint32_t known, prefix, shift, mask;
} dtrain__cuda_topk_level;

/* Counts 4 keys from position `at` on, if the source has them. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_count4(uint32_t *bins, dtrain__cuda_topk_level level,
                                              dtrain__cuda_topk_source source, dtrain__cuda_vector v, size_t at)
{
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t key = dtrain__cuda_topk_key(v.word[j]);
        if (at + j >= source.first && at + j < source.end && key >> level.known == level.prefix)
            dtrain__cuda_atomic_add_u32(bins + (key >> level.shift & level.mask), 1);
    }
}

/* Returns whether one of 4 keys has the known bits. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_any(dtrain__cuda_topk_level level, dtrain__cuda_vector v)
{
    uint32_t any = 0;
    for (int j = 0; j < 4; j++)
        any |= (uint32_t)(dtrain__cuda_topk_key(v.word[j]) >> level.known == level.prefix);
    return any;
}

/* Counts the keys of a source that have the known bits, by the bits of a level. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_count_source(uint32_t *bins, dtrain__cuda_topk_level level,
                                                    dtrain__cuda_topk_source source, dtrain__cuda_at at)
{
    dtrain__cuda_topk_source all = {source.data, 0, 4}; /* what is whole needs no look at the ends */
    size_t step = 4 * at.blocks * at.threads, i = 4 * (at.block * at.threads + at.thread);
    if (i < source.first) { /* what follows is whole, except at the end */
        dtrain__cuda_topk_count4(bins, level, source, dtrain__cuda_topk_load(source.data, i, source.first, source.end),
                                 i);
        i += step;
    }
    for (; i + 3 * step + 4 <= source.end; i += 4 * step) {
        const dtrain__cuda_vector *from = (const dtrain__cuda_vector *)(source.data + (i - source.first));
        dtrain__cuda_vector v[4];
        uint32_t any = 0;
        /* The branch comes after all four loads, so that they are in flight together. */
        for (size_t j = 0; j < 4; j++)
            v[j] = from[step / 4 * j];
        for (int j = 0; j < 4; j++)
            any |= dtrain__cuda_topk_any(level, v[j]);
        for (int j = 0; any != 0 && j < 4; j++)
            dtrain__cuda_topk_count4(bins, level, all, v[j], 0);
    }
    for (; i < source.end; i += step)
        dtrain__cuda_topk_count4(bins, level, source, dtrain__cuda_topk_load(source.data, i, source.first, source.end),
                                 i);
}

/* Finds the upper 21 bits of the key: some from the blocks' counts, the rest from the keys that share those. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_aim_at(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                              dtrain__cuda_topk_aim_shared *shared, int phase)
{
    dtrain__cuda_topk_search known = {0, dtrain__cuda_topk_place(args)};
    if (phase < 3) {
        dtrain__cuda_topk_find(args->state->bins[0], known, at, &shared->find, 0, phase);
    } else if (phase == 3) {
        if (at.thread == 0)
            shared->upper = shared->find.found;
        dtrain__cuda_topk_level level = {20, shared->find.found.prefix, 10, 1023};
        dtrain__cuda_topk_source keys = {(const float *)args->sample, 0, dtrain__cuda_topk_sample(args)};
        dtrain__cuda_at alone = {0, 1, at.thread, at.threads};
        dtrain__cuda_topk_count_source(shared->bins, level, keys, alone);
    } else {
        dtrain__cuda_topk_find(shared->bins, shared->upper, at, &shared->find, 1, phase - 4);
    }
}

/* The last block to sample finds the bar from all samples. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_aim_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                dtrain__cuda_topk_aim_shared *shared, dtrain__cuda_none *own, int phase)
{
    (void)own;
    if (phase == 0) {
        for (uint32_t i = at.thread; i < 1024; i += at.threads)
            shared->bins[i] = 0;
        dtrain__cuda_topk_look(args, at);
        dtrain__cuda_topk_fence();
    } else if (phase == 1) {
        if (at.thread == 0) {
            shared->last = dtrain__cuda_atomic_add_u32(&args->state->sampled, 1) + 1 == at.blocks;
            dtrain__cuda_topk_fence();
        }
    } else if (!shared->last) {
        return;
    } else if (phase < 9) {
        dtrain__cuda_topk_aim_at(args, at, shared, phase - 2);
    } else {
        uint32_t bar = shared->find.found.prefix << 10;
        for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            args->state->bins[0][i] = 0;
        if (at.thread > 0)
            return;
        args->state->sampled = 0;
        args->state->bar = args->bar != 0 ? args->bar : bar > 0 ? bar : 1;
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_aim, dtrain__cuda_topk_args, dtrain__cuda_topk_aim_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 10)

/* Counts the keys of the source that have the known bits, by the bits of a level. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_count_bins(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_bins_shared *shared)
{
    int listed = dtrain__cuda_topk_listed(args);
    dtrain__cuda_topk_level level = {31, 0, 20, 2047};
    if (args->level > 0) {
        level.known = args->level == 1 ? 20 : 10;
        level.prefix = shared->find.found.prefix;
        level.shift = level.known - 10;
        level.mask = 1023;
    }
    dtrain__cuda_topk_source source = dtrain__cuda_topk_source_of(args, listed);
    source.end = listed ? args->state->passed : source.end;
    dtrain__cuda_topk_count_source(shared->bins, level, source, at);
}

/* Block 0 also keeps what was found, and clears what this step will add to. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_keep(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                            const dtrain__cuda_topk_bins_shared *shared)
{
    if (at.block > 0)
        return;
    if (args->level == 0)
        args->state->spans[at.thread % DTRAIN__CUDA_TOPK_SPANS] = 0;
    else if (at.thread == 0)
        args->state->search[args->level - 1] = shared->find.found;
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_bins_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                 dtrain__cuda_topk_bins_shared *shared, dtrain__cuda_none *own,
                                                 int phase)
{
    (void)own;
    if (dtrain__cuda_topk_listed(args)) { /* fewer blocks have fewer bins to add */
        size_t enough = args->state->passed / DTRAIN__CUDA_TOPK_EACH + 1;
        at.blocks = at.blocks < enough ? at.blocks : enough;
    }
    if (at.block >= at.blocks)
        return;
    if (phase == 0) {
        for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            shared->bins[i] = 0;
    }
    if (phase < 3) {
        if (args->level > 0)
            dtrain__cuda_topk_find_level(args, at, &shared->find, args->level - 1, phase);
    } else if (phase == 3) {
        dtrain__cuda_topk_keep(args, at, shared);
        dtrain__cuda_topk_count_bins(args, at, shared);
    } else {
        for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            if (shared->bins[i] != 0)
                dtrain__cuda_atomic_add_u32(args->state->bins[args->level] + i, shared->bins[i]);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_bins, dtrain__cuda_topk_args, dtrain__cuda_topk_bins_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 5)

/* Returns a thread's part of a chunk. Threads come in the order of the elements. */
DTRAIN__CUDA_FN dtrain__cuda_topk_part dtrain__cuda_topk_part_of(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                                 int listed)
{
    size_t tile = at.block * DTRAIN__CUDA_TOPK_TILES + at.thread / DTRAIN__CUDA_TOPK_PARTS;
    uint64_t part = at.thread % DTRAIN__CUDA_TOPK_PARTS;
    dtrain__cuda_topk_part its = {0, 0};
    if (tile >= args->tiles)
        return its;
    if (listed) {
        dtrain__cuda_topk_run run = args->runs[tile];
        its.begin = (size_t)(run.start + run.count * part / DTRAIN__CUDA_TOPK_PARTS);
        its.end = (size_t)(run.start + run.count * (part + 1) / DTRAIN__CUDA_TOPK_PARTS);
        return its;
    }
    its.begin = tile * DTRAIN__CUDA_TOPK_TILE + (size_t)part * (DTRAIN__CUDA_TOPK_TILE / DTRAIN__CUDA_TOPK_PARTS);
    its.end = its.begin + DTRAIN__CUDA_TOPK_TILE / DTRAIN__CUDA_TOPK_PARTS;
    its.begin = its.begin > args->first ? its.begin : args->first;
    its.end = its.end < args->end ? its.end : args->end;
    return its;
}

/* Returns the keys of a part above the k-th, plus 2^32 times the keys equal to it. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_topk_count_part(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                      uint32_t least)
{
    int listed = dtrain__cuda_topk_listed(args);
    dtrain__cuda_topk_source source = dtrain__cuda_topk_source_of(args, listed);
    dtrain__cuda_topk_part part = dtrain__cuda_topk_part_of(args, at, listed);
    uint64_t counts = 0;
    source.end = listed ? args->state->passed : source.end;
    for (size_t i = part.begin / 4 * 4; i < part.end; i += 4) {
        dtrain__cuda_vector v = dtrain__cuda_topk_load(source.data, i, source.first, source.end);
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t key = dtrain__cuda_topk_key(v.word[j]);
            if (i + j >= part.begin && i + j < part.end)
                counts += (uint64_t)(key > least) + ((uint64_t)(key == least) << 32);
        }
    }
    return counts;
}

/* Keeps here what the last kernel needs, as it clears the rest for the next step. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_settle(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                              dtrain__cuda_topk_search found)
{
    if (at.block > 0)
        return;
    for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
        args->state->bins[0][i] = args->state->bins[1][i] = 0;
    if (at.thread > 0)
        return;
    args->state->search[2] = found;
    args->state->listed = (uint32_t)dtrain__cuda_topk_listed(args);
}

DTRAIN__CUDA_FN size_t dtrain__cuda_topk_span(const dtrain__cuda_topk_args *args)
{
    return (args->chunks + DTRAIN__CUDA_TOPK_SPANS - 1) / DTRAIN__CUDA_TOPK_SPANS;
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_sum16(const uint64_t *from, uint64_t *to, uint32_t thread)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < 16; i++)
        sum += from[16 * thread + i];
    to[thread] = sum;
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_count_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_chunk_shared *shared, dtrain__cuda_none *own,
                                                  int phase)
{
    (void)own;
    if (phase < 3) {
        dtrain__cuda_topk_find_level(args, at, &shared->find, 2, phase);
    } else if (phase == 3) {
        uint64_t counts = dtrain__cuda_topk_count_part(args, at, shared->find.found.prefix);
        shared->parts[at.thread] = counts;
        args->parts[at.block * at.threads + at.thread] = counts;
    } else if (phase == 4) {
        dtrain__cuda_topk_settle(args, at, shared->find.found);
        if (at.thread < 16)
            dtrain__cuda_topk_sum16(shared->parts, shared->groups, at.thread);
    } else if (at.thread == 0) {
        uint64_t total = 0;
        for (int i = 0; i < 16; i++)
            total += shared->groups[i];
        args->totals[at.block] = total;
        dtrain__cuda_atomic_add_u64(args->state->spans + at.block / dtrain__cuda_topk_span(args), total);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_count, dtrain__cuda_topk_args, dtrain__cuda_topk_chunk_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 6)

/* Returns the thread's share of the counts of all chunks before the block's. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_topk_before(const dtrain__cuda_topk_args *args, dtrain__cuda_at at)
{
    size_t each = dtrain__cuda_topk_span(args), span = at.block / each;
    uint64_t sum = at.thread < span ? args->state->spans[at.thread] : 0;
    for (size_t i = span * each + at.thread; i < at.block; i += at.threads)
        sum += args->totals[i];
    return sum;
}

/* Writes what is chosen of a part. `counts`: keys before it that are above the k-th, and equal to it. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_write(const dtrain__cuda_topk_args *args, dtrain__cuda_at at, uint64_t counts)
{
    int listed = (int)args->state->listed;
    dtrain__cuda_topk_source source = dtrain__cuda_topk_source_of(args, listed);
    dtrain__cuda_topk_part part = dtrain__cuda_topk_part_of(args, at, listed);
    uint32_t least = args->state->search[2].prefix, left = args->state->search[2].left;
    uint32_t ties = (uint32_t)(counts >> 32), taken = ties < left ? ties : left;
    size_t to = (size_t)(uint32_t)counts + taken;
    for (size_t i = part.begin / 4 * 4; i < part.end; i += 4) {
        dtrain__cuda_vector v = dtrain__cuda_topk_load(source.data, i, source.first, listed ? part.end : source.end),
                            n = v;
        if (listed) /* the load does not wait for the choice */
            n = dtrain__cuda_topk_load((const float *)args->listed_indices, i, 0, part.end);
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t key = dtrain__cuda_topk_key(v.word[j]);
            if (i + j < part.begin || i + j >= part.end || key < least || (key == least && taken == left) ||
                to == args->k) /* only if the vector is written meanwhile */
                continue;
            taken += key == least;
            args->indices[to] = listed ? n.word[j] : (uint32_t)(i + j - source.first);
            args->values[to++] = dtrain__cuda_float_of(v.word[j]);
        }
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_fill_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                 dtrain__cuda_topk_chunk_shared *shared, dtrain__cuda_none *own,
                                                 int phase)
{
    (void)own;
    if (phase == 0) {
        shared->parts[at.thread] = args->parts[at.block * at.threads + at.thread];
        shared->before[at.thread] = dtrain__cuda_topk_before(args, at);
        for (uint32_t i = at.thread; at.block == 0 && i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            args->state->bins[2][i] = 0;
        if (at.block == 0 && at.thread == 0)
            args->state->passed = 0;
    } else if (phase == 1) {
        if (at.thread < 16)
            dtrain__cuda_topk_sum16(shared->parts, shared->groups, at.thread);
        else if (at.thread < 32)
            dtrain__cuda_topk_sum16(shared->before, shared->befores, at.thread - 16);
    } else {
        uint64_t counts = 0;
        for (int i = 0; i < 16; i++)
            counts += shared->befores[i];
        for (uint32_t i = 0; i < at.thread / 16; i++)
            counts += shared->groups[i];
        for (uint32_t i = at.thread / 16 * 16; i < at.thread; i++)
            counts += shared->parts[i];
        dtrain__cuda_topk_write(args, at, counts);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_fill, dtrain__cuda_topk_args, dtrain__cuda_topk_chunk_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 3)

/* What a dtrain_device_selection points to. */
typedef struct dtrain__cuda_selection {
    void *memory;
    dtrain__cuda_topk_args args; /* those that do not change from step to step */
} dtrain__cuda_selection;

static void *dtrain__cuda_topk_take(uintptr_t *at, size_t bytes)
{
    void *taken = (void *)*at;
    *at += (bytes + 255) / 256 * 256;
    return taken;
}

/* Lays out the workspace from memory on; returns its bytes. */
static size_t dtrain__cuda_topk_lay(dtrain__cuda_topk_args *args, void *memory)
{
    size_t tiles = (args->count + 3 + DTRAIN__CUDA_TOPK_TILE - 1) / DTRAIN__CUDA_TOPK_TILE;
    size_t chunks = (tiles + DTRAIN__CUDA_TOPK_TILES - 1) / DTRAIN__CUDA_TOPK_TILES;
    size_t parts = chunks * DTRAIN__CUDA_TOPK_THREADS, room = args->room;
    uintptr_t at = (uintptr_t)memory;
    args->state = (dtrain__cuda_topk_state *)dtrain__cuda_topk_take(&at, sizeof *args->state);
    args->runs = (dtrain__cuda_topk_run *)dtrain__cuda_topk_take(&at, tiles * sizeof *args->runs);
    args->sample = (uint32_t *)dtrain__cuda_topk_take(&at, DTRAIN__CUDA_TOPK_SAMPLE * sizeof *args->sample);
    args->totals = (uint64_t *)dtrain__cuda_topk_take(&at, chunks * sizeof *args->totals);
    args->parts = (uint64_t *)dtrain__cuda_topk_take(&at, parts * sizeof *args->parts);
    args->listed_indices = (uint32_t *)dtrain__cuda_topk_take(&at, room * sizeof *args->listed_indices);
    args->listed_values = (float *)dtrain__cuda_topk_take(&at, room * sizeof *args->listed_values);
    return (size_t)(at - (uintptr_t)memory);
}

static dtrain_status dtrain__cuda_selection_create(dtrain_device *device, size_t count, size_t k,
                                                   dtrain_device_selection **made)
{
    size_t room = count / 64 + k + k / 2;
    uint32_t zero = 0;
    dtrain__cuda_selection *selection = (dtrain__cuda_selection *)calloc(1, sizeof *selection);
    *made = NULL;
    if (selection == NULL)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "device_selection_create: no memory for %zu bytes",
                                sizeof *selection);
    selection->args.count = count;
    selection->args.k = k;
    selection->args.room = room < count ? room : count;
    size_t bytes = dtrain__cuda_topk_lay(&selection->args, NULL);
    dtrain_status status = device->ops->allocate(device, DTRAIN_MEMORY_DEVICE, bytes, &selection->memory);
    if (status == DTRAIN_OK)
        status = device->ops->fill(device, selection->memory, &zero, sizeof zero,
                                   sizeof(dtrain__cuda_topk_state) / sizeof zero);
    if (status != DTRAIN_OK) {
        if (selection->memory != NULL)
            device->ops->release(device, DTRAIN_MEMORY_DEVICE, selection->memory);
        free(selection);
        return status;
    }
    dtrain__cuda_topk_lay(&selection->args, selection->memory);
    *made = (dtrain_device_selection *)selection;
    return DTRAIN_OK;
}

static void dtrain__cuda_selection_destroy(dtrain_device *device, dtrain_device_selection *selection)
{
    device->ops->release(device, DTRAIN_MEMORY_DEVICE, ((dtrain__cuda_selection *)selection)->memory);
    free(selection);
}

/* Launches the kernels of a step, in order. */
static dtrain_status dtrain__cuda_topk_launch(dtrain_device *device, dtrain__cuda_topk_args *args)
{
    const char *call = "device_select";
    size_t blocks = 4 * (size_t)dtrain__cuda_queue_of(device)->processors;
    size_t most = args->tiles * DTRAIN__CUDA_TOPK_VECTORS;
    size_t most_samples = DTRAIN__CUDA_TOPK_SAMPLE / DTRAIN__CUDA_TOPK_THREADS;
    size_t samples = (args->count + 4 * DTRAIN__CUDA_TOPK_THREADS - 1) / (4 * DTRAIN__CUDA_TOPK_THREADS);
    dtrain_status status = DTRAIN_OK;
    blocks = blocks < most ? blocks : most;
    samples = samples < most_samples ? samples : most_samples;
    if (args->k > 0)
        status = dtrain__cuda_topk_aim_launch(device, call, samples, args);
    if (status == DTRAIN_OK && args->count > 0 && (args->k > 0 || args->add != NULL))
        status = dtrain__cuda_topk_collect_launch(device, call, args->tiles, args);
    if (args->k == 0)
        return status;
    for (args->level = 0; status == DTRAIN_OK && args->level < 3; args->level++)
        status = dtrain__cuda_topk_bins_launch(device, call, blocks, args);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_topk_count_launch(device, call, args->chunks, args);
    return status == DTRAIN_OK ? dtrain__cuda_topk_fill_launch(device, call, args->chunks, args) : status;
}

static dtrain_status dtrain__cuda_select(dtrain_device *device, dtrain_device_selection *selection, float *sum,
                                         const float *add, uint32_t *indices, float *values)
{
    dtrain__cuda_topk_args args = ((dtrain__cuda_selection *)selection)->args;
    const dtrain__cuda_array arrays[] = {{"sum", sum, sizeof *sum, args.count, 1},
                                         {"add", add, sizeof *add, args.count, 1},
                                         {"indices", indices, sizeof *indices, args.k, 1},
                                         {"values", values, sizeof *values, args.k, 1},
                                         {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_arrays(device, "device_select", arrays);
    if (status != DTRAIN_OK)
        return status;
    args.data = sum;
    args.add = add;
    args.indices = indices;
    args.values = values;
    args.first = ((uintptr_t)sum & 15) / sizeof *sum;
    args.end = args.first + args.count;
    args.tiles = (args.end + DTRAIN__CUDA_TOPK_TILE - 1) / DTRAIN__CUDA_TOPK_TILE;
    args.chunks = (args.tiles + DTRAIN__CUDA_TOPK_TILES - 1) / DTRAIN__CUDA_TOPK_TILES;
    args.add_whole = (((uintptr_t)sum ^ (uintptr_t)add) & 15) == 0;
    return dtrain__cuda_topk_launch(device, &args);
}

#endif

/* ---- >>cuda-quantise ----
 * int8 and fp8 with a scale a block, in the layout and with the bits of >>quantise: the scales of all blocks, then a
 * byte an element. A tile holds several blocks of up to 4,096 elements. A thread block keeps it in registers while it
 * finds their scales, so it reads them once. A longer block has a thread block of its own, which reads it twice. Packed
 * vectors and floats may start at any address. Whole words are loaded and stored only at addresses that suit their
 * size. */
#ifndef DTRAIN__CUDA_QUANTISE
#define DTRAIN__CUDA_QUANTISE

#define DTRAIN__CUDA_QUANTISE_THREADS 256u
#define DTRAIN__CUDA_QUANTISE_VECTORS 4u /* of 4 elements, held by a thread */
#define DTRAIN__CUDA_QUANTISE_TILE (4u * DTRAIN__CUDA_QUANTISE_VECTORS * DTRAIN__CUDA_QUANTISE_THREADS)
#define DTRAIN__CUDA_QUANTISE_SPREAD 8u /* words for a block's largest, so that few threads of a warp meet */
#define DTRAIN__CUDA_QUANTISE_LONG 512u /* threads for a long block */

typedef struct dtrain__cuda_quantise_args {
    const unsigned char *in;
    unsigned char *out;
    size_t count, block, blocks;
    uint32_t tile;   /* elements: whole blocks, or a part of a long one */
    uint32_t whole;  /* blocks in a tile */
    uint32_t parts;  /* tiles in a long block; 1 if blocks fit a tile */
    uint32_t divide; /* 2^20 / vectors in a block, rounded up: see dtrain__cuda_quantise_block_of */
    int floats;      /* 16, 4 or 1: the floats' address is a multiple of it */
    int packed;      /* the same for the packed bytes, whose codes are loaded and stored 4 at a time */
    int add;         /* unpack adds to the floats */
} dtrain__cuda_quantise_args;

/* A tile: its first element, that element's block, and the number of elements. */
typedef struct dtrain__cuda_quantise_tile {
    size_t begin, block;
    uint32_t count;
} dtrain__cuda_quantise_tile;

typedef struct dtrain__cuda_quantise_own {
    dtrain__cuda_vector x[DTRAIN__CUDA_QUANTISE_VECTORS];
} dtrain__cuda_quantise_own;

/* For each block of a tile, of 8 elements or more: first its largest magnitude, spread; then its factors. */
typedef struct dtrain__cuda_quantise_shared {
    uint32_t word[DTRAIN__CUDA_QUANTISE_TILE / 8][DTRAIN__CUDA_QUANTISE_SPREAD];
} dtrain__cuda_quantise_shared;

typedef struct dtrain__cuda_quantise_long_own {
    uint32_t largest;
} dtrain__cuda_quantise_long_own;

typedef struct dtrain__cuda_quantise_long_shared {
    uint32_t largest[DTRAIN__CUDA_QUANTISE_LONG], grow, inverse;
} dtrain__cuda_quantise_long_shared;

/* Loads a thread's 4 vectors of n floats, `stride` vectors apart, from vector `first` on; n is above 0. Vectors beyond
 * the floats are others of them, or zeros, so that aligned loads need no branch. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_read(const unsigned char *from, uint32_t n, uint32_t first, uint32_t stride,
                                                int align, dtrain__cuda_vector *x)
{
    if (align == 16 && n % 4 == 0) {
        for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
            uint32_t at = 4 * (first + k * stride);
            x[k] = dtrain__cuda_vector_load(from + 4 * (size_t)(at < n ? at : 0), 4, 16);
        }
        return;
    }
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t at = 4 * (first + k * stride);
        x[k] = dtrain__cuda_vector_load(from + 4 * (size_t)at, at < n ? n - at : 0, align);
    }
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_max(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_largest(dtrain__cuda_vector x)
{
    return dtrain__cuda_quantise_max(dtrain__cuda_quantise_max(x.word[0] & 0x7fffffffu, x.word[1] & 0x7fffffffu),
                                     dtrain__cuda_quantise_max(x.word[2] & 0x7fffffffu, x.word[3] & 0x7fffffffu));
}

/* Returns which block of its tile a vector is in. There are at most 1,024 vectors, and as many in a block. Rounding up
 * 2^20 / vectors adds remainders below 1,023 * 1,023 < 2^20 in all, which is less than the quotient's next step. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_block_of(const dtrain__cuda_quantise_args *args, uint32_t vector)
{
    return args->parts > 1 ? 0 : vector * args->divide >> 20;
}

DTRAIN__CUDA_FN dtrain__cuda_quantise_tile dtrain__cuda_quantise_tile_of(const dtrain__cuda_quantise_args *args,
                                                                         size_t block)
{
    dtrain__cuda_quantise_tile tile = {block * args->tile, block, 0};
    size_t left, in_block = args->tile;
    if (args->parts > 1) {
        size_t done = block % args->parts * args->tile;
        tile.block = block / args->parts;
        tile.begin = tile.block * args->block + done;
        in_block = args->block - done < in_block ? args->block - done : in_block;
    } else {
        tile.block = block * args->whole;
    }
    left = args->count - tile.begin;
    tile.count = (uint32_t)(left < in_block ? left : in_block);
    return tile;
}

/* Returns a block's scale as bits, and the factors of its numbers: first *grow, then *inverse. In a block with a NaN or
 * an infinity *grow is 0, and so are its codes. Blocks below 2^-100 grow first, as in dtrain__quantise_scale_of. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_scale(uint32_t largest, float top, uint32_t *grow, uint32_t *inverse)
{
    float value = dtrain__cuda_float_of(largest), by = dtrain__cuda_float_of(0x3f800000u);
    *grow = largest >= 0x7f800000u ? 0 : 0x3f800000u;
    *inverse = 0;
    if (largest >= 0x7f800000u || largest == 0)
        return largest == 0 ? 0 : 0x7fc00000u;
    if (largest < 0x0d800000u) {
        by = dtrain__cuda_float_of(0x71800000u); /* 2^100 */
        *grow = 0x71800000u;
    }
    *inverse = dtrain__cuda_bits_f32(dtrain__cuda_div_f32(top, dtrain__cuda_mul_f32(value, by)));
    return dtrain__cuda_bits_f32(dtrain__cuda_div_f32(value, top));
}

/* The constants' last places are those of the codes: 1, and 2^-9 for fp8's subnormals. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_encode(float x, int fp8)
{
    uint32_t bits = dtrain__cuda_bits_f32(x), size = bits & 0x7fffffffu, normal, small;
    if (!fp8)
        return dtrain__cuda_bits_f32(dtrain__cuda_add_f32(x, 12582912.0f)) & 0xffu;
    normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
    small = dtrain__cuda_bits_f32(dtrain__cuda_add_f32(dtrain__cuda_float_of(size), 24576.0f));
    return (bits >> 24 & 0x80u) | ((size < 121u << 23 ? small : normal) & 0x7fu);
}

DTRAIN__CUDA_FN float dtrain__cuda_quantise_decode(uint32_t code, int fp8)
{
    uint32_t size = code & 0x7fu, bits = (size << 20) + (120u << 23);
    if (!fp8)
        return (float)(int32_t)(int8_t)(unsigned char)code;
    if (size < 8)
        bits = dtrain__cuda_bits_f32(dtrain__cuda_mul_f32((float)(int32_t)size, 0.001953125f)); /* 2^-9 */
    return dtrain__cuda_float_of(bits | (code & 0x80u) << 24);
}

/* Returns the codes of 4 numbers, the first one lowest. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_codes(dtrain__cuda_vector x, uint32_t grow, uint32_t inverse, int fp8)
{
    float by = dtrain__cuda_float_of(grow), and_by = dtrain__cuda_float_of(inverse);
    uint32_t codes = 0;
    for (uint32_t k = 0; k < 4; k++) {
        float grown = dtrain__cuda_mul_f32(dtrain__cuda_float_of(x.word[k]), by);
        codes |= dtrain__cuda_quantise_encode(dtrain__cuda_mul_f32(grown, and_by), fp8) << (8 * k);
    }
    return grow == 0 ? 0 : codes;
}

DTRAIN__CUDA_FN void dtrain__cuda_quantise_put_codes(unsigned char *to, uint32_t codes, uint32_t n, int align)
{
    if (n >= 4 && align >= 4) {
        dtrain__cuda_word_store(to, codes, align);
        return;
    }
    for (uint32_t k = 0; k < 4; k++)
        if (k < n)
            to[k] = (unsigned char)(codes >> (8 * k));
}

/* Runs phase 2 of a tile: the scales of its blocks. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_scales(const dtrain__cuda_quantise_args *args,
                                                  dtrain__cuda_quantise_tile tile, uint32_t thread, float top,
                                                  dtrain__cuda_quantise_shared *shared)
{
    for (uint32_t b = thread; b < args->whole && b * args->block < tile.count; b += DTRAIN__CUDA_QUANTISE_THREADS) {
        uint32_t largest = 0, *word = shared->word[b], scale;
        for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_SPREAD; k++)
            largest = dtrain__cuda_quantise_max(largest, word[k]);
        scale = dtrain__cuda_quantise_scale(largest, top, &word[0], &word[1]);
        dtrain__cuda_word_store(args->out + 4 * (tile.block + b), scale, args->packed);
    }
}

/* Packs a tile of whole blocks: loads, largest magnitudes, scales, codes. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_pack_tile(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                     dtrain__cuda_quantise_shared *shared,
                                                     dtrain__cuda_quantise_own *own, int phase, int fp8)
{
    dtrain__cuda_quantise_tile tile = dtrain__cuda_quantise_tile_of(args, at.block);
    unsigned char *codes = args->out + 4 * args->blocks + tile.begin;
    if (phase == 0) {
        uint32_t words = args->whole * DTRAIN__CUDA_QUANTISE_SPREAD, *word = shared->word[0];
        dtrain__cuda_quantise_read(args->in + 4 * tile.begin, tile.count, at.thread, at.threads, args->floats, own->x);
        for (uint32_t i = at.thread; i < words; i += at.threads)
            word[i] = 0;
    }
    if (phase == 2)
        dtrain__cuda_quantise_scales(args, tile, at.thread, fp8 ? 448.0f : 127.0f, shared);
    if (phase != 1 && phase != 3)
        return;
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t vector = at.thread + k * at.threads, first = 4 * vector;
        uint32_t *word = shared->word[dtrain__cuda_quantise_block_of(args, vector)];
        if (first < tile.count && phase == 1)
            dtrain__cuda_atomic_max_u32(word + at.thread % DTRAIN__CUDA_QUANTISE_SPREAD,
                                        dtrain__cuda_quantise_largest(own->x[k]));
        if (first < tile.count && phase == 3)
            dtrain__cuda_quantise_put_codes(codes + first,
                                            dtrain__cuda_quantise_codes(own->x[k], word[0], word[1], fp8),
                                            tile.count - first, args->packed);
    }
}

/* Runs phases 1 and 2 of a long block: the largest of all threads, then the scale. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_long_scale(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                      dtrain__cuda_quantise_long_shared *shared, int phase, float top)
{
    uint32_t largest = 0, stride = phase == 1 ? 32 : 1, end = phase == 1 ? DTRAIN__CUDA_QUANTISE_LONG : 32;
    if (at.thread >= stride)
        return;
    for (uint32_t i = at.thread; i < end; i += stride)
        largest = dtrain__cuda_quantise_max(largest, shared->largest[i]);
    if (phase == 1)
        shared->largest[at.thread] = largest;
    else
        dtrain__cuda_word_store(args->out + 4 * at.block,
                                dtrain__cuda_quantise_scale(largest, top, &shared->grow, &shared->inverse),
                                args->packed);
}

/* Packs a block longer than a tile: its largest magnitude, its scale, and its numbers once more for the codes. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_pack_long(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                     dtrain__cuda_quantise_long_shared *shared,
                                                     dtrain__cuda_quantise_long_own *own, int phase, int fp8)
{
    size_t begin = at.block * args->block, left = args->count - begin;
    uint32_t n = (uint32_t)(left < args->block ? left : args->block);
    unsigned char *codes = args->out + 4 * args->blocks + begin;
    if (phase == 1 || phase == 2)
        dtrain__cuda_quantise_long_scale(args, at, shared, phase, fp8 ? 448.0f : 127.0f);
    if (phase == 1 || phase == 2)
        return;
    own->largest = 0;
    for (uint32_t v = at.thread; 4 * v < n; v += DTRAIN__CUDA_QUANTISE_VECTORS * at.threads) {
        dtrain__cuda_vector x[DTRAIN__CUDA_QUANTISE_VECTORS];
        dtrain__cuda_quantise_read(args->in + 4 * begin, n, v, at.threads, args->floats, x);
        for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
            uint32_t first = 4 * (v + k * at.threads);
            own->largest = dtrain__cuda_quantise_max(own->largest, dtrain__cuda_quantise_largest(x[k]));
            if (phase == 3 && first < n)
                dtrain__cuda_quantise_put_codes(codes + first,
                                                dtrain__cuda_quantise_codes(x[k], shared->grow, shared->inverse, fp8),
                                                n - first, args->packed);
        }
    }
    if (phase == 0)
        shared->largest[at.thread] = own->largest;
}

/* Multiplies 4 decoded numbers by their scale, adds the old values if asked to, and stores those below n. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_put_floats(const dtrain__cuda_quantise_args *args, unsigned char *to,
                                                      uint32_t codes, uint32_t scale, dtrain__cuda_vector old,
                                                      uint32_t n, int fp8)
{
    dtrain__cuda_vector x;
    for (uint32_t k = 0; k < 4; k++) {
        float number = dtrain__cuda_mul_f32(dtrain__cuda_quantise_decode(codes >> (8 * k) & 0xffu, fp8),
                                            dtrain__cuda_float_of(scale));
        if (args->add)
            number = dtrain__cuda_add_f32(dtrain__cuda_float_of(old.word[k]), number);
        x.word[k] = dtrain__cuda_bits_f32(number);
    }
    dtrain__cuda_vector_store(to, x, n, args->floats);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_get_codes(const unsigned char *from, uint32_t n)
{
    uint32_t codes = 0;
    for (uint32_t k = 0; k < 4; k++)
        if (k < n)
            codes |= (uint32_t)from[k] << (8 * k);
    return codes;
}

/* Loads the codes of a thread's 4 vectors and their blocks' scales; beyond the tile, those of its first vector. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_read_codes(const dtrain__cuda_quantise_args *args,
                                                      dtrain__cuda_quantise_tile tile, dtrain__cuda_at at,
                                                      uint32_t *codes, uint32_t *scale)
{
    const unsigned char *from = args->in + 4 * args->blocks + tile.begin, *scales = args->in + 4 * tile.block;
    int whole = args->packed >= 4 && tile.count % 4 == 0;
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t vector = at.thread + k * at.threads, left;
        vector = 4 * vector < tile.count ? vector : 0;
        left = tile.count - 4 * vector;
        codes[k] = whole ? dtrain__cuda_word_load(from + 4 * vector, 4)
                         : dtrain__cuda_quantise_get_codes(from + 4 * vector, left);
        scale[k] = dtrain__cuda_word_load(scales + 4 * dtrain__cuda_quantise_block_of(args, vector), args->packed);
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_quantise_unpack_tile(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                       int fp8)
{
    dtrain__cuda_quantise_tile tile = dtrain__cuda_quantise_tile_of(args, at.block);
    unsigned char *to = args->out + 4 * tile.begin;
    uint32_t codes[DTRAIN__CUDA_QUANTISE_VECTORS], scale[DTRAIN__CUDA_QUANTISE_VECTORS];
    dtrain__cuda_vector old[DTRAIN__CUDA_QUANTISE_VECTORS];
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++)
        old[k].word[0] = old[k].word[1] = old[k].word[2] = old[k].word[3] = 0;
    dtrain__cuda_quantise_read_codes(args, tile, at, codes, scale);
    if (args->add)
        dtrain__cuda_quantise_read(to, tile.count, at.thread, at.threads, args->floats, old);
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t first = 4 * (at.thread + k * at.threads);
        if (first < tile.count)
            dtrain__cuda_quantise_put_floats(args, to + 4 * (size_t)first, codes[k], scale[k], old[k],
                                             tile.count - first, fp8);
    }
}

/* fp8 is a constant in each kernel, so that neither has the other's code. */
#define DTRAIN__CUDA_QUANTISE_KERNELS(name, fp8) \
    DTRAIN__CUDA_FN void name##_pack_body(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at, \
                                          dtrain__cuda_quantise_shared *shared, dtrain__cuda_quantise_own *own, \
                                          int phase) \
    { \
        dtrain__cuda_quantise_pack_tile(args, at, shared, own, phase, fp8); \
    } \
    DTRAIN__CUDA_FN void name##_long_body(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at, \
                                          dtrain__cuda_quantise_long_shared *shared, \
                                          dtrain__cuda_quantise_long_own *own, int phase) \
    { \
        dtrain__cuda_quantise_pack_long(args, at, shared, own, phase, fp8); \
    } \
    DTRAIN__CUDA_FN void name##_unpack_body(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at, \
                                            dtrain__cuda_none *shared, dtrain__cuda_none *own, int phase) \
    { \
        (void)shared, (void)own, (void)phase; \
        dtrain__cuda_quantise_unpack_tile(args, at, fp8); \
    } \
    DTRAIN__CUDA_KERNEL(name##_pack, dtrain__cuda_quantise_args, dtrain__cuda_quantise_shared, \
                        dtrain__cuda_quantise_own, DTRAIN__CUDA_QUANTISE_THREADS, 4) \
    DTRAIN__CUDA_KERNEL(name##_long, dtrain__cuda_quantise_args, dtrain__cuda_quantise_long_shared, \
                        dtrain__cuda_quantise_long_own, DTRAIN__CUDA_QUANTISE_LONG, 4) \
    DTRAIN__CUDA_KERNEL(name##_unpack, dtrain__cuda_quantise_args, dtrain__cuda_none, dtrain__cuda_none, \
                        DTRAIN__CUDA_QUANTISE_THREADS, 1)

DTRAIN__CUDA_QUANTISE_KERNELS(dtrain__cuda_int8, 0)
DTRAIN__CUDA_QUANTISE_KERNELS(dtrain__cuda_fp8, 1)

static dtrain__cuda_quantise_args dtrain__cuda_quantise_args_of(const void *in, void *out, size_t count, size_t block,
                                                                const void *floats, const void *packed)
{
    dtrain__cuda_quantise_args args;
    args.in = (const unsigned char *)in;
    args.out = (unsigned char *)out;
    args.count = count;
    args.block = block;
    args.blocks = count / block + (count % block != 0);
    args.tile = DTRAIN__CUDA_QUANTISE_TILE;
    args.parts = (uint32_t)((block + args.tile - 1) / args.tile);
    if (args.parts == 1)
        args.tile -= args.tile % (uint32_t)block;
    args.whole = args.tile / (uint32_t)block;
    args.divide = (uint32_t)(((1u << 20) + block / 4 - 1) / (block / 4));
    args.floats = dtrain__cuda_align_of(floats);
    args.packed = dtrain__cuda_align_of(packed);
    args.add = 0;
    return args;
}

static size_t dtrain__cuda_quantise_tiles(const dtrain__cuda_quantise_args *args)
{
    size_t whole = args->count / args->block, rest = args->count % args->block;
    return args->parts > 1 ? whole * args->parts + (rest + args->tile - 1) / args->tile
                           : args->count / args->tile + (args->count % args->tile != 0);
}

static dtrain_status dtrain__cuda_pack(dtrain_device *device, dtrain_dtype code, size_t block, const float *in,
                                       size_t count, void *out)
{
    const char *call = "device_pack";
    dtrain__cuda_quantise_args args = dtrain__cuda_quantise_args_of(in, out, count, block, in, out);
    const dtrain__cuda_array arrays[] = {
        {"in", in, sizeof *in, count, 0}, {"out", out, 1, 4 * args.blocks + count, 0}, {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_arrays(device, call, arrays);
    if (status != DTRAIN_OK)
        return status;
    if (args.parts > 1)
        return code == DTRAIN_I8 ? dtrain__cuda_int8_long_launch(device, call, args.blocks, &args)
                                 : dtrain__cuda_fp8_long_launch(device, call, args.blocks, &args);
    size_t tiles = dtrain__cuda_quantise_tiles(&args);
    return code == DTRAIN_I8 ? dtrain__cuda_int8_pack_launch(device, call, tiles, &args)
                             : dtrain__cuda_fp8_pack_launch(device, call, tiles, &args);
}

static dtrain_status dtrain__cuda_unpack(dtrain_device *device, dtrain_dtype code, size_t block, const void *in,
                                         float *out, size_t count, int add)
{
    const char *call = "device_unpack";
    dtrain__cuda_quantise_args args = dtrain__cuda_quantise_args_of(in, out, count, block, out, in);
    const dtrain__cuda_array arrays[] = {
        {"in", in, 1, 4 * args.blocks + count, 0}, {"out", out, sizeof *out, count, 0}, {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_arrays(device, call, arrays);
    if (status != DTRAIN_OK)
        return status;
    args.add = add;
    size_t tiles = dtrain__cuda_quantise_tiles(&args);
    return code == DTRAIN_I8 ? dtrain__cuda_int8_unpack_launch(device, call, tiles, &args)
                             : dtrain__cuda_fp8_unpack_launch(device, call, tiles, &args);
}

#endif

/* ---- >>cuda-create ----
 * The table of operations, and making and freeing devices. Stands last, as it names every operation. */
#ifndef DTRAIN__CUDA_CREATE
#define DTRAIN__CUDA_CREATE

/* A row of the table: does the operation while the queue's GPU is the calling thread's current one. */
#define DTRAIN__CUDA_ROW(name, parameters, arguments) \
    static dtrain_status dtrain__cuda_row_##name parameters \
    { \
        int before; \
        dtrain_status status = dtrain__cuda_status(device, "device_" #name, dtrain__cuda_switch(device, &before)); \
        if (status != DTRAIN_OK) \
            return status; \
        status = dtrain__cuda_##name arguments; \
        dtrain__cuda_leave(device, before); \
        return status; \
    }
#define DTRAIN__CUDA_VOID_ROW(name, parameters, arguments) \
    static void dtrain__cuda_row_##name parameters \
    { \
        int before; \
        /* Even if the GPU is lost, the CPU's part is freed. */ \
        dtrain__cuda_drop(dtrain__cuda_switch(device, &before)); \
        dtrain__cuda_##name arguments; \
        dtrain__cuda_leave(device, before); \
    }

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_HANDLES "cuda ipc, emulated"
#else
#define DTRAIN__CUDA_HANDLES "cuda ipc"
#endif

/* Makes a queue with a stream of its own on the same GPU. */
static dtrain_status dtrain__cuda_queue_create(dtrain_device *device, dtrain_device **made)
{
    dtrain_cuda_desc desc;
    desc.index = dtrain__cuda_queue_of(device)->index;
    desc.stream = NULL;
    return dtrain_cuda_create(made, &desc);
}

/* The operations in the order of the table: those before the queues, and those after them. */
#define DTRAIN__CUDA_ROWS(ROW, VOID_ROW) \
    ROW(allocate, (dtrain_device * device, dtrain_memory memory, size_t bytes, void **pointer), \
        (device, memory, bytes, pointer)) \
    VOID_ROW(release, (dtrain_device * device, dtrain_memory memory, void *pointer), (device, memory, pointer)) \
    ROW(copy, (dtrain_device * device, void *to, const void *from, size_t bytes), (device, to, from, bytes)) \
    ROW(fill, (dtrain_device * device, void *to, const void *element, size_t element_bytes, size_t count), \
        (device, to, element, element_bytes, count)) \
    ROW(wait, (dtrain_device * device), (device)) \
    ROW(event_create, (dtrain_device * device, dtrain_device_event * *event), (device, event)) \
    VOID_ROW(event_destroy, (dtrain_device * device, dtrain_device_event * event), (device, event)) \
    ROW(event_record, (dtrain_device * device, dtrain_device_event * event), (device, event)) \
    ROW(event_await, (dtrain_device * device, dtrain_device_event * event), (device, event)) \
    ROW(event_done, (dtrain_device * device, dtrain_device_event * event, int *done), (device, event, done)) \
    ROW(convert, \
        (dtrain_device * device, const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count), \
        (device, in, from, out, to, count)) \
    ROW(reduce, \
        (dtrain_device * device, dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n, \
         void *const *out, int m, size_t begin, size_t count), \
        (device, dtype, op, divisor, in, n, out, m, begin, count)) \
    ROW(scale, (dtrain_device * device, dtrain_dtype dtype, void *x, double factor, size_t count), \
        (device, dtype, x, factor, count)) \
    ROW(axpy, (dtrain_device * device, dtrain_dtype dtype, void *y, double alpha, const void *x, size_t count), \
        (device, dtype, y, alpha, x, count)) \
    ROW(adamw, (dtrain_device * device, const dtrain_device_adamw_step *step), (device, step)) \
    ROW(sgd, (dtrain_device * device, const dtrain_device_sgd_step *step), (device, step)) \
    ROW(overflow, (dtrain_device * device, dtrain_dtype dtype, const void *x, size_t count, uint32_t *found), \
        (device, dtype, x, count, found)) \
    ROW(squares, (dtrain_device * device, const float *x, size_t count, int64_t *limbs), (device, x, count, limbs)) \
    ROW(clip, (dtrain_device * device, const int64_t *limbs, float max_norm, double *norm, float *x, size_t count), \
        (device, limbs, max_norm, norm, x, count)) \
    ROW(selection_create, (dtrain_device * device, size_t count, size_t k, dtrain_device_selection * *made), \
        (device, count, k, made)) \
    VOID_ROW(selection_destroy, (dtrain_device * device, dtrain_device_selection * selection), (device, selection)) \
    ROW(select, \
        (dtrain_device * device, dtrain_device_selection * selection, float *sum, const float *add, uint32_t *indices, \
         float *values), \
        (device, selection, sum, add, indices, values)) \
    ROW(sparse_add, \
        (dtrain_device * device, const uint32_t *indices, const float *values, size_t k, float *data, size_t count), \
        (device, indices, values, k, data, count)) \
    ROW(pack, (dtrain_device * device, dtrain_dtype code, size_t block, const float *in, size_t count, void *out), \
        (device, code, block, in, count, out)) \
    ROW(unpack, \
        (dtrain_device * device, dtrain_dtype code, size_t block, const void *in, float *out, size_t count, int add), \
        (device, code, block, in, out, count, add))

#define DTRAIN__CUDA_SHARING_ROWS(ROW, VOID_ROW) \
    ROW(memory_share, (dtrain_device * device, const void *pointer, dtrain_device_shared *shared), \
        (device, pointer, shared)) \
    ROW(memory_open, (dtrain_device * device, const dtrain_device_shared *shared, void **base), \
        (device, shared, base)) \
    VOID_ROW(memory_close, (dtrain_device * device, void *base), (device, base)) \
    ROW(page_open, (dtrain_device * device, void *page, size_t bytes, void **queues), (device, page, bytes, queues)) \
    VOID_ROW(page_close, (dtrain_device * device, void *page), (device, page)) \
    ROW(word_write, (dtrain_device * device, uint32_t * word, uint32_t value), (device, word, value)) \
    ROW(word_await, (dtrain_device * device, uint32_t * word, uint32_t value), (device, word, value)) \
    ROW(flag_traits, (dtrain_device * device, dtrain_device_flag_traits * traits), (device, traits)) \
    ROW(flags_run, (dtrain_device * device, const dtrain_device_flags *part), (device, part))

DTRAIN__CUDA_ROWS(DTRAIN__CUDA_ROW, DTRAIN__CUDA_VOID_ROW)
DTRAIN__CUDA_SHARING_ROWS(DTRAIN__CUDA_ROW, DTRAIN__CUDA_VOID_ROW)

#define DTRAIN__CUDA_ENTRY(name, parameters, arguments) dtrain__cuda_row_##name,
static const dtrain_device_ops dtrain__cuda_ops = {
    DTRAIN__CUDA_ROWS(DTRAIN__CUDA_ENTRY, DTRAIN__CUDA_ENTRY) dtrain__cuda_queue_create, dtrain_cuda_destroy,
    DTRAIN__CUDA_HANDLES, DTRAIN__CUDA_SHARING_ROWS(DTRAIN__CUDA_ENTRY, DTRAIN__CUDA_ENTRY)};

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

/* The runtime hands out the driver's functions, so that nothing is linked with the driver. NULL: it has none. */
#ifndef DTRAIN_CUDA_EMULATE
static void *dtrain__cuda_driver(const char *name)
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    dtrain__cuda_drop(error);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : NULL;
}
#endif

/* Holds the primary context, which the runtime uses too, until the process ends, as the runtime does. What the program
 * has in it outlives the queue. */
static void dtrain__cuda_find_driver(dtrain__cuda_queue *queue)
{
    typedef int (*get_fn)(int *gpu, int index);
    typedef int (*retain_fn)(void **context, int gpu);
    int gpu = 0;
#ifdef DTRAIN_CUDA_EMULATE
    get_fn get = dtrain__cuda_emulated_get;
    retain_fn retain = dtrain__cuda_emulated_retain;
    queue->push = dtrain__cuda_emulated_push;
    queue->pop = dtrain__cuda_emulated_pop;
    queue->attribute = dtrain__cuda_emulated_attribute;
    queue->word_write = dtrain__cuda_emulated_write;
    queue->word_await = dtrain__cuda_emulated_await;
#else
    get_fn get = (get_fn)dtrain__cuda_driver("cuDeviceGet");
    retain_fn retain = (retain_fn)dtrain__cuda_driver("cuDevicePrimaryCtxRetain");
    queue->push = (dtrain__cuda_push_fn)dtrain__cuda_driver("cuCtxPushCurrent");
    queue->pop = (dtrain__cuda_pop_fn)dtrain__cuda_driver("cuCtxPopCurrent");
    queue->attribute = (dtrain__cuda_attribute_fn)dtrain__cuda_driver("cuPointerGetAttribute");
    queue->word_write = (dtrain__cuda_word_fn)dtrain__cuda_driver("cuStreamWriteValue32");
    queue->word_await = (dtrain__cuda_word_fn)dtrain__cuda_driver("cuStreamWaitValue32");
#endif
    if (get == NULL || retain == NULL || queue->push == NULL || queue->pop == NULL || get(&gpu, queue->index) != 0 ||
        retain(&queue->context, gpu) != 0)
        queue->context = NULL;
}

/* Finds out whether this build has code for the GPU, by asking for one kernel. */
static cudaError_t dtrain__cuda_find_code(void)
{
#ifdef DTRAIN_CUDA_EMULATE
    return cudaSuccess;
#else
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, (const void *)dtrain__cuda_fill_all);
#endif
}

/* Tries the caller's stream with an event. A destroyed stream, or another GPU's, refuses it. */
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

/* Fills the queue; its GPU is the current one. */
static dtrain_status dtrain__cuda_open(dtrain__cuda_queue *queue, void *stream)
{
    cudaError_t error = cudaDeviceGetAttribute(&queue->processors, cudaDevAttrMultiProcessorCount, queue->index);
    if (error == cudaSuccess)
        error = dtrain__cuda_find_code();
    if (error != cudaSuccess)
        return dtrain__cuda_status(&queue->device, "dtrain_cuda_create", error);
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
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "dtrain_cuda_create: no memory for %zu bytes", sizeof *queue);
    snprintf(queue->name, sizeof queue->name, "cuda:%d", index);
    queue->index = index;
    queue->device.ops = &dtrain__cuda_ops;
    queue->device.name = queue->name;
    queue->device.self = queue;
    dtrain__cuda_find_driver(queue);
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
    dtrain__cuda_drop(dtrain__cuda_switch(device, &before));
    dtrain__cuda_drop(cudaStreamSynchronize(queue->stream));
    if (queue->own_stream)
        dtrain__cuda_drop(cudaStreamDestroy(queue->stream));
    dtrain__cuda_leave(device, before);
    free(queue);
}

DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device)
{
    if (device == NULL || device->ops != &dtrain__cuda_ops)
        return NULL;
    return (void *)((const dtrain__cuda_queue *)device->self)->stream;
}

#ifdef DTRAIN_CUDA_EMULATE
DTRAIN_API void dtrain_cuda_emulated_open(void)
{
    dtrain__cuda_emulated_enter();
}

DTRAIN_API void dtrain_cuda_emulated_close(void)
{
    dtrain__cuda_emulated_leave();
}
#endif

#endif

#endif
