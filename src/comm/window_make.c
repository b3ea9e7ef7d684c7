/* ---- >>window_make ----
 * Making and freeing windows: see >>window. Ranks of several hosts make one window on each host. */
#ifndef DTRAIN__WINDOW_MAKE
#define DTRAIN__WINDOW_MAKE
#include "alike.c"
#include "split.c"
#include "window.c"

/* Takes a window that serves nobody, or makes one. Returns NULL without memory. */
static dtrain__window *dtrain__window_take(dtrain_comm *group)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain__window *window;
    size_t count = (size_t)group->size;
    size_t *begins = (size_t *)dtrain__alloc(&heap, (2 * count + 1) * sizeof(size_t) + count * sizeof(int));
    dtrain__window_note(group);
    long process = DTRAIN__ATOMIC_LOAD(&dtrain__windows()->process, RELAXED);
    if (process != 0 && process != dtrain__os_pid()) /* a forked child's: threads of its parent may have held it */
        dtrain__os_mutex_init(dtrain__window_mutex());
    DTRAIN__ATOMIC_STORE(&dtrain__windows()->process, dtrain__os_pid(), RELAXED);
    dtrain__window_lock(1);
    dtrain__window_sweep(0);
    for (window = dtrain__windows()->first; window != NULL && window->used;)
        window = window->next;
    if (window == NULL && begins != NULL && (window = (dtrain__window *)dtrain__alloc(&heap, sizeof *window)) != NULL) {
        window->next = dtrain__windows()->first;
        dtrain__windows()->first = window;
    }
    if (window != NULL && begins != NULL) {
        window->process = dtrain__os_pid();
        dtrain__council_close closing = dtrain__window_world_ended;
        DTRAIN__ATOMIC_STORE(dtrain__council_closing(), closing, SEQ_CST);
        window->used = 1;
        window->freed = window->parted = 0;
        window->alias_count = 0;
        window->id = 0;
        window->world = group->seat->council->serial;
        window->count = group->size;
        window->rank = group->rank;
        window->begins = begins;
        window->sizes = begins + count + 1;
        window->worlds = (int *)(void *)(window->sizes + count);
        for (int rank = 0; rank < group->size; rank++)
            window->worlds[rank] = dtrain__seat_world(group->seat, rank);
        begins = NULL;
    }
    dtrain__window_lock(0);
    int good = begins == NULL && window != NULL;
    dtrain__free(&heap, begins);
    return good ? window : NULL;
}

/* Lays out the parts. A page lies between two: at a distance of 2^n bytes they would share the same sets of caches and
 * banks of memory. Returns 0 if this rank cannot address their sum; ranks with longer words may. */
static int dtrain__window_lay(dtrain__window *window)
{
    size_t page = dtrain__os_page_bytes(), total = 0;
    int fits = 1;
    for (int rank = 0; rank < window->count; rank++) {
        size_t bytes = window->sizes[rank];
        window->begins[rank] = total;
        fits = fits && bytes <= SIZE_MAX / 4 && total <= SIZE_MAX / 4;
        total += fits ? (bytes + page - 1) / page * page + page : 0;
    }
    window->begins[window->count] = total;
    window->bytes = total + DTRAIN__WINDOW_KEY_BYTES + (size_t)window->count * sizeof(uint32_t);
    return fits;
}

/* Rank 0 makes the memory, and all open it. fits: this rank can. Returns the status of the exchange; *shared: all ranks
 * have it. */
static dtrain_status dtrain__window_share(dtrain_comm *group, dtrain__window *window, int fits, int *shared)
{
    unsigned char offer[16 + DTRAIN__WINDOW_KEY_BYTES] = {0}, *memory = NULL;
    size_t key = window->begins[window->count];
    int fd = -1;
    if (group->rank == 0 && fits && (memory = (unsigned char *)dtrain__os_share(window->bytes, &fd)) != NULL &&
        dtrain__os_random(memory + key, DTRAIN__WINDOW_KEY_BYTES) == 0) {
        dtrain__put_le(offer, (uint64_t)dtrain__os_self(), 8);
        dtrain__put_le(offer + 8, (uint64_t)fd, 8);
        memcpy(offer + 16, memory + key, DTRAIN__WINDOW_KEY_BYTES);
    }
    dtrain_status status = dtrain_broadcast(group, offer, sizeof offer, DTRAIN_U8, 0);
    uint64_t process = dtrain__get_le(offer, 8), id = dtrain__get_le(offer + 16, 8);
    if (status == DTRAIN_OK && group->rank != 0 && fits && process > 0 && process <= INT_MAX)
        memory =
            (unsigned char *)dtrain__os_share_open((long)process, (int)dtrain__get_le(offer + 8, 8), window->bytes, 1);
    int32_t good =
        memory != NULL && process > 0 && id != 0 && memcmp(memory + key, offer + 16, DTRAIN__WINDOW_KEY_BYTES) == 0;
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(group, &good, &good, 1, DTRAIN_I32, DTRAIN_MIN);
    if (fd >= 0)
        dtrain__os_share_close(fd);
    *shared = status == DTRAIN_OK && good;
    if (!*shared && memory != NULL)
        dtrain__os_unreserve(memory, window->bytes);
    if (*shared) {
        window->memory = memory;
        window->id = id;
    }
    return status;
}

/* Gives this rank plain memory: the parts of the others have none here. They are of this host, so all must fit. */
static dtrain_status dtrain__window_plain(dtrain_comm *group, dtrain__window *window)
{
    size_t page = dtrain__os_page_bytes(), bytes = window->sizes[window->rank], part = 0;
    uint64_t left = dtrain__os_memory_left(), all = 0;
    for (int rank = 0; rank < window->count; rank++)
        all = window->sizes[rank] < UINT64_MAX - all ? all + window->sizes[rank] : UINT64_MAX;
    if (bytes <= SIZE_MAX / 4)
        part = (bytes + page - 1) / page * page + page;
    if (group->size > 1 && group->shared != NULL && !group->plane->in_process && group->rank == 0)
        dtrain__log(DTRAIN_LOG_WARN,
                    "comm_alloc: the system lets these ranks share no memory of %llu bytes; each gets its own",
                    (unsigned long long)all);
    for (int rank = 0; rank <= window->count; rank++)
        window->begins[rank] = rank > window->rank ? part : 0;
    window->bytes = part;
    window->memory = part > 0 && all < left ? (unsigned char *)dtrain__os_reserve(part) : NULL;
    if (window->memory != NULL)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                        "comm_alloc: rank %d has no memory for %zu bytes: the ranks of its host ask for %llu MiB, and "
                        "%llu MiB are left",
                        group->rank, bytes, (unsigned long long)(all >> 20), (unsigned long long)(left >> 20));
}

/* The same on ranks of one host, or of one process. */
static dtrain_status dtrain__window_on_host(dtrain_comm *group, size_t bytes, dtrain__window **out)
{
    dtrain__window *window = dtrain__window_take(group);
    dtrain_status status = DTRAIN_OK;
    uint64_t mine = bytes, *sizes = NULL;
    int shared = 0;
    if (window == NULL || (sizes = (uint64_t *)dtrain__alloc(group->allocator, (size_t)group->size * 8)) == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "comm_alloc: rank %d has no memory for its books", group->rank);
    status = dtrain__alike_agree(group, "comm_alloc", 1, status);
    if (status == DTRAIN_OK)
        status = dtrain_all_gather(group, &mine, sizes, (size_t)group->size, DTRAIN_U64);
    for (int rank = 0; status == DTRAIN_OK && rank < group->size; rank++)
        window->sizes[rank] = sizes[rank] < SIZE_MAX ? (size_t)sizes[rank] : SIZE_MAX;
    dtrain__free(group->allocator, sizes);
    int fits = status == DTRAIN_OK && dtrain__window_lay(window);
    if (status == DTRAIN_OK && group->size > 1 && group->shared != NULL && !group->plane->in_process)
        status = dtrain__window_share(group, window, fits, &shared);
    if (status == DTRAIN_OK && !shared)
        status = dtrain__alike_agree(group, "comm_alloc", 1, dtrain__window_plain(group, window));
    if (status == DTRAIN_ERR_TIMEOUT) /* some ranks may have ended the call, so it cannot be made again */
        dtrain__group_break(group, &group->error);
    if (window != NULL) {
        dtrain__window_lock(1);
        if (status == DTRAIN_OK)
            window->open = 1;
        else
            dtrain__window_drop(window);
        dtrain__window_lock(0);
        window = status == DTRAIN_OK ? window : NULL;
    }
    DTRAIN__ATOMIC_ADD(&dtrain__windows()->epoch, 1, SEQ_CST);
    *out = window;
    return status;
}

/* The lowest rank on this rank's host. */
static int dtrain__window_host(const dtrain_comm *comm)
{
    const dtrain__plane *plane = comm->plane;
    int rank = 0;
    if (plane->host == NULL || plane->sharing == NULL)
        return 0;
    while (plane->host(comm->transport.self, rank) != plane->host(comm->transport.self, comm->rank))
        rank++;
    return rank;
}

static int dtrain__window_hosts_differ(const dtrain_comm *comm)
{
    int differ = 0;
    for (int rank = 1; comm->plane->host != NULL && comm->plane->sharing != NULL && rank < comm->size; rank++)
        differ |= comm->plane->host(comm->transport.self, rank) != comm->plane->host(comm->transport.self, 0);
    return differ;
}

DTRAIN_API dtrain_status dtrain_comm_alloc(dtrain_comm *comm, size_t bytes, void **pointer)
{
    dtrain_comm *host = comm;
    dtrain__window *window = NULL;
    if (pointer != NULL)
        *pointer = NULL;
    dtrain_status status = dtrain__group_whole(comm, "comm_alloc");
    if (status == DTRAIN_OK && pointer == NULL)
        status = dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                              "comm_alloc: pointer is NULL; give the address of a pointer");
    if (status == DTRAIN_OK && !comm->plane->in_process)
        status = dtrain__work_usable(comm, "comm_alloc");
    if (status != DTRAIN_OK)
        return status;
    int differ = dtrain__window_hosts_differ(comm);
    if (differ)
        status = dtrain_comm_split(comm, dtrain__window_host(comm), comm->rank, &host);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__window_on_host(host, bytes, &window);
    if (differ) {
        dtrain_comm_destroy(host);
        status = dtrain__alike_agree(comm, "comm_alloc", 1, status);
    }
    if (status == DTRAIN_OK)
        *pointer = window->memory + window->begins[window->rank];
    else if (window != NULL)
        dtrain_comm_free(window->memory + window->begins[window->rank]);
    return status;
}

DTRAIN_API void dtrain_comm_free(void *pointer)
{
    dtrain__window *window;
    if (pointer == NULL)
        return;
    dtrain__window_lock(1);
    for (window = dtrain__windows()->first; window != NULL; window = window->next)
        if (window->open && !window->freed && window->memory + window->begins[window->rank] == pointer)
            break;
    if (window != NULL) {
        int forked = window->process != dtrain__os_pid(); /* only its parent is one of the ranks */
        window->freed = 1;
        window->alias_count = 0;
        if (window->id != 0 && !forked)
            DTRAIN__ATOMIC_STORE(&dtrain__window_ends(window)[window->rank], 1u, SEQ_CST);
        if (forked)
            dtrain__window_drop(window);
        DTRAIN__ATOMIC_ADD(&dtrain__windows()->epoch, 1, SEQ_CST);
        dtrain__window_sweep(0);
    }
    dtrain__window_lock(0);
    if (window == NULL)
        dtrain__log(DTRAIN_LOG_ERROR, "comm_free: %p was not given by dtrain_comm_alloc, or was freed before", pointer);
}

#endif
