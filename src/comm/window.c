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

/* Pages of a rank's part that this rank has mapped at other addresses too. */
typedef struct dtrain__window_alias {
    uintptr_t begin;
    size_t bytes, place; /* place: in the part */
} dtrain__window_alias;

typedef struct dtrain__window {
    struct dtrain__window *next;
    uint64_t id;    /* the same on all its ranks; 0: no peer maps this rank's part */
    uint64_t world; /* its council's serial */
    unsigned char *memory;
    size_t bytes;
    int count, rank; /* its ranks, and this one */
    int used, freed;
    int open;   /* it is made, and other threads may look at it */
    int parted; /* the others no longer map all of this rank's part */
    long process;
    size_t *begins;                      /* where each rank's part begins, and the end; one block with the next two */
    size_t *sizes;                       /* the bytes that each rank asked for */
    int *worlds;                         /* each one's rank in the world; -1: it is gone and names nothing more */
    const dtrain__window_alias *aliases; /* ascending; the caller's */
    size_t alias_count;
} dtrain__window;

/* All windows of this process. A forked child has them too, but none of the other threads. */
typedef struct dtrain__window_all {
    dtrain__window *first;
    uint64_t epoch; /* counts what changes in any of them */
    long process;
} dtrain__window_all;

DTRAIN__OF_PROCESS(dtrain__window_all, dtrain__windows)
DTRAIN__MUTEX_OF_PROCESS(dtrain__window_mutex)

static void dtrain__window_lock(int lock)
{
    long process = DTRAIN__ATOMIC_LOAD(&dtrain__windows()->process, RELAXED);
    if (process != 0 && process != dtrain__os_pid())
        return; /* the parent's threads may have held it */
    if (lock)
        dtrain__os_lock(dtrain__window_mutex());
    else
        dtrain__os_unlock(dtrain__window_mutex());
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
    int good = window->open && !window->freed && !window->parted && window->id != 0 &&
               window->world == comm->seat->council->serial && window->process == dtrain__os_pid();
    for (int rank = 0; good && rank < comm->size; rank++)
        good = dtrain__window_place(window, comm, rank) >= 0;
    return good;
}

static uintptr_t dtrain__window_begin(const dtrain__window *window)
{
    return (uintptr_t)window->memory + window->begins[window->rank];
}

/* Whether bytes at a pointer lie in a part. */
static int dtrain__window_holds(uintptr_t begin, size_t most, const void *pointer, size_t bytes)
{
    uintptr_t at = (uintptr_t)pointer;
    return at >= begin && at - begin <= most && bytes <= most - (size_t)(at - begin);
}

/* Finds the pages of this rank's part that have the bytes: in the window, or by an alias. */
static int dtrain__window_pages(const dtrain__window *window, const void *pointer, size_t bytes,
                                dtrain__window_alias *found)
{
    size_t low = 0, high = window->alias_count;
    found->begin = dtrain__window_begin(window);
    found->bytes = window->sizes[window->rank];
    found->place = 0;
    while (low < high) { /* to the first alias that begins after the pointer */
        size_t middle = low + (high - low) / 2;
        if (window->aliases[middle].begin <= (uintptr_t)pointer)
            low = middle + 1;
        else
            high = middle;
    }
    if (low > 0 && dtrain__window_holds(window->aliases[low - 1].begin, window->aliases[low - 1].bytes, pointer, bytes))
        *found = window->aliases[low - 1];
    return dtrain__window_holds(found->begin, found->bytes, pointer, bytes);
}

/* Returns the window whose part of this rank has the bytes, and where; NULL: none. The caller holds the lock. */
static dtrain__window *dtrain__window_of(const void *pointer, size_t bytes, const dtrain_comm *comm,
                                         dtrain__window_alias *found)
{
    dtrain__window *window = dtrain__windows()->first;
    while (window != NULL && (!window->open || (comm != NULL && !dtrain__window_serves(window, comm)) ||
                              !dtrain__window_pages(window, pointer, bytes, found)))
        window = window->next;
    return window;
}

/* Finds the window of a buffer for a post of the group. Returns its id, and the buffer's place in this rank's part; 0:
 * not all ranks can reach it. */
static uint64_t dtrain__window_name(dtrain_comm *comm, const void *pointer, size_t bytes, size_t *at)
{
    uint64_t epoch = DTRAIN__ATOMIC_LOAD(&dtrain__windows()->epoch, SEQ_CST);
    if (epoch == 0)
        return 0;
    if (comm->found.epoch != epoch || !dtrain__window_holds(comm->found.begin, comm->found.bytes, pointer, bytes)) {
        dtrain__window_lock(1); /* a thread may free another window */
        dtrain__window_alias found = {0, 0, 0};
        dtrain__window *window = dtrain__window_of(pointer, bytes, comm, &found);
        comm->found.epoch = window != NULL ? epoch : 0;
        if (window != NULL) {
            comm->found.window = window;
            comm->found.id = window->id;
            comm->found.begin = found.begin;
            comm->found.bytes = found.bytes;
            comm->found.place = found.place;
        }
        dtrain__window_lock(0);
        if (window == NULL)
            return 0;
    }
    *at = comm->found.place + (size_t)((uintptr_t)pointer - comm->found.begin);
    return comm->found.id;
}

/* Returns a buffer that a rank of the group has named; NULL: this rank does not have it. at: as it was posted, maybe by
 * a rank with longer words. */
static unsigned char *dtrain__window_find(dtrain_comm *comm, uint64_t id, int rank, uint64_t at, size_t bytes)
{
    dtrain__window *window = comm->found.window;
    unsigned char *found = NULL;
    int place = -1;
    dtrain__window_lock(1);
    if (window == NULL || window->id != id || !window->open)
        for (window = dtrain__windows()->first; window != NULL; window = window->next)
            if (window->open && window->id == id && window->world == comm->seat->council->serial)
                break;
    if (window != NULL)
        place = dtrain__window_place(window, comm, rank);
    if (place >= 0 && at <= window->sizes[place] && bytes <= window->sizes[place] - (size_t)at)
        found = window->memory + window->begins[place] + (size_t)at;
    dtrain__window_lock(0);
    return found;
}

DTRAIN__FAST_END

/* Tells the window of a block of dtrain_comm_alloc where its pages are mapped too. The list is read until the block is
 * freed. */
static void dtrain__window_map(const void *block, const dtrain__window_alias *aliases, size_t count)
{
    dtrain__window_alias found;
    dtrain__window_lock(1);
    dtrain__window *window = dtrain__window_of(block, 0, NULL, &found);
    if (window != NULL) {
        window->aliases = aliases;
        window->alias_count = count;
        DTRAIN__ATOMIC_ADD(&dtrain__windows()->epoch, 1, SEQ_CST);
    }
    dtrain__window_lock(0);
}

/* Unmaps a window. The caller holds the lock. */
static void dtrain__window_drop(dtrain__window *window)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    DTRAIN__ATOMIC_ADD(&dtrain__windows()->epoch, 1, SEQ_CST);
    if (window->memory != NULL)
        dtrain__os_unreserve(window->memory, window->bytes);
    dtrain__free(&heap, window->begins);
    window->begins = NULL;
    window->memory = NULL;
    window->used = window->open = 0;
}

/* Unmaps the freed windows that no peer names any more. world: one that has ended; 0: none. The caller holds the lock.
 */
static void dtrain__window_sweep(uint64_t world)
{
    for (dtrain__window *window = dtrain__windows()->first; window != NULL; window = window->next) {
        if (!window->open)
            continue;
        int ended = window->id == 0 || window->world == 0, left = window->count;
        if (world != 0 && window->world == world) {
            DTRAIN__ATOMIC_ADD(&dtrain__windows()->epoch, 1, SEQ_CST);
            window->world = 0;
            ended = 1;
        }
        for (int place = 0; !ended && place < window->count; place++)
            left -= window->worlds[place] < 0 || DTRAIN__ATOMIC_LOAD(&dtrain__window_ends(window)[place], SEQ_CST) != 0;
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

/* Notes which ranks of the group's world are gone, and unmaps what only they had not freed. */
static void dtrain__window_note(const dtrain_comm *comm)
{
    const dtrain__council *council = comm->seat->council;
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    unsigned char *gone = DTRAIN__ATOMIC_LOAD(&dtrain__windows()->epoch, SEQ_CST) != 0
                              ? (unsigned char *)dtrain__alloc(&heap, (size_t)council->size)
                              : NULL;
    if (gone == NULL)
        return; /* without memory, windows stay until the next call */
    dtrain__seat_lock(comm->seat, 1);
    for (int rank = 0; rank < council->size; rank++)
        gone[rank] = council->gone(council->self, rank) != DTRAIN__PRESENT;
    dtrain__seat_lock(comm->seat, 0);
    dtrain__window_lock(1);
    for (dtrain__window *window = dtrain__windows()->first; window != NULL; window = window->next)
        for (int place = 0; window->open && window->world == council->serial && place < window->count; place++)
            if (window->worlds[place] >= 0 && gone[window->worlds[place]])
                window->worlds[place] = -1;
    dtrain__window_sweep(0);
    dtrain__window_lock(0);
    dtrain__free(&heap, gone);
}

/* Takes the pages of a buffer from the others, as one of them was stopped while it wrote there. They keep what was
 * shared. This rank gets a copy at the same place, and its part serves no later call in place. Pages that hold anything
 * else stay. */
static void dtrain__window_part_from(const void *pointer, size_t bytes)
{
    size_t page = dtrain__os_page_bytes(), before = (size_t)(0 - (uintptr_t)pointer) % page;
    dtrain__window_lock(1);
    dtrain__window_alias found;
    dtrain__window *window = bytes > 0 ? dtrain__window_of(pointer, bytes, NULL, &found) : NULL;
    if (window != NULL && window->id != 0) {
        unsigned char *pages = (unsigned char *)(uintptr_t)pointer + before;
        DTRAIN__ATOMIC_ADD(&dtrain__windows()->epoch, 1, SEQ_CST);
        window->parted = 1;
        bytes = bytes > before ? (bytes - before) / page * page : 0;
        if (bytes > 0 && dtrain__os_privately(pages, bytes) != 0)
            dtrain__log(DTRAIN_LOG_ERROR,
                        "a rank that was stopped may still write to memory of dtrain_comm_alloc at %p: the system "
                        "refuses to take it away",
                        (void *)pages);
    }
    dtrain__window_lock(0);
}

#endif
