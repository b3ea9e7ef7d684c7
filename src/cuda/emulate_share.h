/* ---- >>cuda-emulate-share ----
 * DTRAIN_CUDA_EMULATE: memory between processes, and words that order their streams. A shared allocation moves into a
 * file without a name. Others find it by the number of this process and of the descriptor, while both exist, so a
 * killed process leaves nothing behind. Opened memory is out of the CPU's reach like the rest, and outlives its owner.
 */
#ifndef DTRAIN__CUDA_EMULATE_SHARE
#define DTRAIN__CUDA_EMULATE_SHARE
#include "emulate.h"

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
