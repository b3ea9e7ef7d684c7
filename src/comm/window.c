/* ---- >>window ----
 * Memory that all ranks of a host map: see dtrain_comm_alloc. One rank makes it, and each has a part. Collectives on
 * such buffers are done in place (see >>fused). A post names a buffer by its window and its place in the rank's part,
 * if all ranks of the group have the window. So all of them find the buffers, or none does.
 *
 * Invariants: a freed window stays mapped until all its ranks have freed it or its world has ended, as a peer may still
 * name it. A struct serves later windows and is never given back, as calls may still look at it. */
#ifndef DTRAIN__WINDOW
#define DTRAIN__WINDOW
#include "group.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__WINDOW_KEY_BYTES 16 /* at the end of the memory, then a word for each rank: it has freed its part */

typedef struct dtrain__window {
    struct dtrain__window *next;
    uint64_t id;    /* the same on all its ranks; 0: no peer maps this rank's part */
    uint64_t world; /* its council's serial */
    unsigned char *memory;
    size_t bytes;
    int count, rank; /* its ranks, and this one */
    int used, freed;
    pid_t process;
    size_t *begins; /* where each rank's part begins, and the end; one block with the next two */
    size_t *sizes;  /* the bytes that each rank asked for */
    int *worlds;    /* each one's rank in the world */
} dtrain__window;

/* All windows of this process. A forked child has them too, but none of the other threads. */
static dtrain__window *dtrain__windows;
static pthread_mutex_t dtrain__window_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t dtrain__window_epoch; /* counts what changes in any of them */
static pid_t dtrain__window_process;

static void dtrain__window_lock(int lock)
{
    if (dtrain__window_process != 0 && dtrain__window_process != dtrain__os_pid())
        return; /* the parent's threads may have held it */
    if (lock)
        pthread_mutex_lock(&dtrain__window_mutex);
    else
        pthread_mutex_unlock(&dtrain__window_mutex);
}

static uint32_t *dtrain__window_ends(const dtrain__window *window)
{
    return (uint32_t *)(void *)(window->memory + window->begins[window->count] + DTRAIN__WINDOW_KEY_BYTES);
}

/* The window's place of a rank of the group; -1: it has none. */
static int dtrain__window_place(const dtrain__window *window, const dtrain_comm *comm, int rank)
{
    int world = dtrain__seat_world(comm->seat, rank), place = 0;
    while (place < window->count && window->worlds[place] != world)
        place++;
    return place < window->count ? place : -1;
}

/* Whether all ranks of the group can reach this rank's part. */
static int dtrain__window_serves(const dtrain__window *window, const dtrain_comm *comm)
{
    int good = window->used && !window->freed && window->id != 0 && window->world == comm->seat->council->serial &&
               window->process == dtrain__os_pid();
    for (int rank = 0; good && rank < comm->size; rank++)
        good = dtrain__window_place(window, comm, rank) >= 0;
    return good;
}

/* Whether bytes at a pointer lie in this rank's part. */
static int dtrain__window_holds(const dtrain__window *window, const void *pointer, size_t bytes)
{
    uintptr_t begin = (uintptr_t)window->memory + window->begins[window->rank], at = (uintptr_t)pointer;
    size_t most = window->sizes[window->rank];
    return at >= begin && at - begin <= most && bytes <= most - (size_t)(at - begin);
}

/* Finds the window of a buffer for a post of the group. Returns its id, and the buffer's place in this rank's part; 0:
 * not all ranks can reach it. */
static uint64_t dtrain__window_name(dtrain_comm *comm, const void *pointer, size_t bytes, size_t *at)
{
    uint64_t epoch = __atomic_load_n(&dtrain__window_epoch, __ATOMIC_SEQ_CST);
    dtrain__window *window = comm->window;
    if (epoch == 0)
        return 0;
    if (window == NULL || comm->window_epoch != epoch || !dtrain__window_holds(window, pointer, bytes)) {
        dtrain__window_lock(1);
        for (window = dtrain__windows; window != NULL; window = window->next)
            if (window->used && dtrain__window_holds(window, pointer, bytes) && dtrain__window_serves(window, comm))
                break;
        dtrain__window_lock(0);
        if (window == NULL)
            return 0;
        comm->window = window;
        comm->window_epoch = epoch;
    }
    *at = (size_t)((uintptr_t)pointer - (uintptr_t)window->memory) - window->begins[window->rank];
    return window->id;
}

/* Returns a buffer that a rank of the group has named; NULL: this rank does not have it. */
static unsigned char *dtrain__window_find(dtrain_comm *comm, uint64_t id, int rank, size_t at, size_t bytes)
{
    dtrain__window *window = comm->window;
    unsigned char *found = NULL;
    int place = -1;
    dtrain__window_lock(1);
    if (window == NULL || window->id != id || !window->used)
        for (window = dtrain__windows; window != NULL; window = window->next)
            if (window->used && window->id == id && window->world == comm->seat->council->serial)
                break;
    if (window != NULL)
        place = dtrain__window_place(window, comm, rank);
    if (place >= 0 && at <= window->sizes[place] && bytes <= window->sizes[place] - at)
        found = window->memory + window->begins[place] + at;
    dtrain__window_lock(0);
    return found;
}

DTRAIN__FAST_END

/* Unmaps a window. The caller holds the lock. */
static void dtrain__window_drop(dtrain__window *window)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    __atomic_add_fetch(&dtrain__window_epoch, 1, __ATOMIC_SEQ_CST);
    if (window->memory != NULL)
        dtrain__os_unreserve(window->memory, window->bytes);
    dtrain__free(&heap, window->begins);
    window->begins = NULL;
    window->memory = NULL;
    window->used = 0;
}

/* Unmaps the freed windows that no peer names any more. world: one that has ended; 0: none. The caller holds the lock.
 */
static void dtrain__window_sweep(uint64_t world)
{
    for (dtrain__window *window = dtrain__windows; window != NULL; window = window->next) {
        int ended = window->id == 0 || window->world == 0, left = window->count;
        if (!window->used)
            continue;
        if (world != 0 && window->world == world) {
            __atomic_add_fetch(&dtrain__window_epoch, 1, __ATOMIC_SEQ_CST);
            window->world = 0;
            ended = 1;
        }
        for (int place = 0; !ended && place < window->count; place++)
            left -= __atomic_load_n(&dtrain__window_ends(window)[place], __ATOMIC_SEQ_CST) != 0;
        if (window->freed && (ended || left == 0))
            dtrain__window_drop(window);
    }
}

static void dtrain__window_world_ended(uint64_t world)
{
    dtrain__window_lock(1);
    dtrain__window_sweep(world);
    dtrain__window_lock(0);
}

/* Takes this rank's part with the buffer from the others, which may have been stopped inside it. They keep what was
 * shared, and this rank gets a copy at the same place. */
static void dtrain__window_part_from(const void *pointer)
{
    dtrain__window *window;
    dtrain__window_lock(1);
    for (window = dtrain__windows; window != NULL; window = window->next)
        if (window->used && window->id != 0 && dtrain__window_holds(window, pointer, 0))
            break;
    if (window != NULL) {
        unsigned char *part = window->memory + window->begins[window->rank];
        size_t bytes = window->begins[window->rank + 1] - window->begins[window->rank];
        __atomic_add_fetch(&dtrain__window_epoch, 1, __ATOMIC_SEQ_CST);
        if (dtrain__os_privately(part, bytes) != 0)
            dtrain__log(DTRAIN_LOG_ERROR,
                        "a rank that was stopped may still write to memory of dtrain_comm_alloc at %p: the system "
                        "refuses to take it away",
                        (void *)part);
        dtrain__window_ends(window)[window->rank] = 1;
        window->id = 0;
    }
    dtrain__window_lock(0);
}

#endif
