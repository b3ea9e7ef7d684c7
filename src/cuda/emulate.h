/* ---- >>cuda-emulate ----
 * DTRAIN_CUDA_EMULATE: the part of the CUDA runtime that this header calls, on the CPU, so that the code above it is
 * the same. There are two GPUs. The CPU can touch their memory only while a kernel, a copy or a fill runs. The bytes
 * beside an allocation are checked when it is freed. Streams run at once. After an error that lasts, every call reports
 * it, as the runtime does after a kernel's fault. */
#ifndef DTRAIN__CUDA_EMULATE
#define DTRAIN__CUDA_EMULATE
#include "cuda.h"

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
