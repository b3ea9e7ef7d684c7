/* ---- >>device_processes ----
 * What ranks that are processes of one host share, so that their devices can reach each other's memory: a page of
 * words, which stand for those of a board (see >>device_events), and handles of memory and events.
 *
 * Rank 0 offers the page as a memory file without a name; the others open it by that process' number and descriptor,
 * and know it by a key. Who cannot is on another host, or as good as that. No file is left behind, however a process
 * ends.
 *
 * What a rank's device opens of a peer's memory stays open, to be found again by its handle, until the group is
 * destroyed or the peer has other memory in its place.
 *
 * A process that dies leaves its words as they were. It is not waited for: its queues end with it, before the system
 * counts it as gone. One that is lost but neither gone nor out of the others' memory is stopped, or hangs in a driver;
 * it is waited for a while only. */
#ifndef DTRAIN__DEVICE_PROCESSES
#define DTRAIN__DEVICE_PROCESSES
#include "device_call.c"

#define DTRAIN__PROCESS_GRACE_NS 2000000000 /* for a rank that is lost, and has not gone */

/* A rank's part of the page. */
typedef struct dtrain__process_words {
    dtrain__device_word device;
    uint64_t process, began; /* process 0: it has not come */
    uint32_t told;           /* why is readable */
    dtrain__error why;       /* it broke the group */
    char pad[DTRAIN__CACHE_LINE];
} dtrain__process_words;

typedef struct dtrain__process_page {
    uint64_t key[2];
    uint32_t broken; /* 1 + the first rank that said why */
    char pad[DTRAIN__CACHE_LINE];
    dtrain__process_words ranks[DTRAIN__DEVICE_MOST];
} dtrain__process_page;

/* A peer's allocation that this rank's device has open. */
typedef struct dtrain__opened {
    dtrain_device_shared what;
    void *base;
    int rank;
} dtrain__opened;

/* Where a rank's buffers of a call are, in whole 64-bit words. */
typedef struct dtrain__parcel {
    uint64_t status; /* not DTRAIN_OK: they cannot be shared, and text says why */
    uint64_t has_in, has_out;
    dtrain_device_shared in, out;
    char text[DTRAIN__DEVICE_NOTE_TEXT];
} dtrain__parcel;

#define DTRAIN__PARCEL_WORDS (sizeof(dtrain__parcel) / sizeof(uint64_t))

/* A peer's events and probe, as this process has them. */
typedef struct dtrain__process_peer {
    void *events[2];
    unsigned char *probe;
    int gone; /* its events may never pass, and need not: its queue does no more */
} dtrain__process_peer;

struct dtrain__processes {
    dtrain__process_page *page;
    int page_fd; /* rank 0's, until all have opened it; else -1 */
    size_t bytes;
    dtrain__process_peer *peers;
    dtrain__parcel *parcels; /* of the call under way */
    dtrain__opened *opened;
    size_t opened_count, opened_room;
};

/* ---- the page ---- */

static void dtrain__processes_close_offer(dtrain_device_group *group)
{
    if (group->processes != NULL && group->processes->page_fd >= 0) {
        close(group->processes->page_fd);
        group->processes->page_fd = -1;
    }
}

static dtrain_status dtrain__processes_new(dtrain_device_group *group)
{
    const dtrain_comm *comm = group->comm;
    size_t size = (size_t)comm->size, header = (sizeof(dtrain__processes) + 63) / 64 * 64;
    size_t bytes = header + size * (sizeof(dtrain__parcel) + sizeof(dtrain__process_peer));
    unsigned char *block = (unsigned char *)dtrain__alloc(comm->allocator, bytes);
    if (block == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", bytes);
    group->processes = (dtrain__processes *)(void *)block;
    group->processes->bytes = bytes;
    group->processes->page_fd = -1;
    group->processes->parcels = (dtrain__parcel *)(void *)(block + header);
    group->processes->peers = (dtrain__process_peer *)(void *)(group->processes->parcels + size);
    return DTRAIN_OK;
}

/* Writes into the page who this rank is. */
static dtrain_status dtrain__processes_sign(dtrain_device_group *group)
{
    dtrain__process_words *own = &group->processes->page->ranks[group->comm->rank];
    int known;
    own->began = dtrain__os_process_began(getpid(), &known);
    if (own->began == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "its process cannot see itself in /proc");
    __atomic_store_n(&own->process, (uint64_t)getpid(), __ATOMIC_SEQ_CST);
    return DTRAIN_OK;
}

/* What a rank tells the others before they know whether they share a host; rank 0 offers the page. */
static void dtrain__processes_offer(dtrain_device_group *group)
{
    const dtrain_device_ops *ops = group->device->ops;
    dtrain__device_note *note = &group->mine;
    snprintf(note->handles, sizeof note->handles, "%s", ops->handles);
    note->process = (uint64_t)getpid();
    if (group->comm->rank != 0 || dtrain__processes_new(group) != DTRAIN_OK)
        return;
    dtrain__processes *all = group->processes;
    all->page = (dtrain__process_page *)dtrain__os_share(sizeof *all->page, &all->page_fd);
    if (all->page == NULL || dtrain__os_random(note->page_key, sizeof note->page_key) != 0)
        return;
    memcpy(all->page->key, note->page_key, sizeof note->page_key);
    note->page_fd = (uint64_t)all->page_fd + 1;
}

/* Opens the page that rank 0 offers. UNSUPPORTED: there is none for this rank. */
static dtrain_status dtrain__processes_join(dtrain_device_group *group)
{
    const dtrain__device_note *first = &group->notes[0];
    dtrain__process_page *page;
    if (group->comm->rank == 0)
        return dtrain__processes_sign(group);
    dtrain_status status = dtrain__processes_new(group);
    if (status != DTRAIN_OK)
        return status;
    page = (dtrain__process_page *)dtrain__os_share_open((pid_t)first->process, (int)first->page_fd - 1, sizeof *page);
    group->processes->page = page;
    if (page == NULL || memcmp(page->key, first->page_key, sizeof page->key) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "it cannot open the memory of rank 0's process %llu: they are on two hosts, in two "
                            "containers or two users'",
                            (unsigned long long)first->process);
    return dtrain__processes_sign(group);
}

/* Whether this rank can see every other's process, and no two are one. */
static dtrain_status dtrain__processes_meet_all(const dtrain_device_group *group)
{
    const dtrain__process_words *ranks = group->processes->page->ranks;
    for (int rank = 0; rank < group->comm->size; rank++) {
        int known;
        uint64_t process = __atomic_load_n(&ranks[rank].process, __ATOMIC_SEQ_CST);
        if (process == 0 || dtrain__os_process_began((pid_t)process, &known) != ranks[rank].began)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "it cannot see rank %d's process", rank);
        for (int other = 0; other < rank; other++)
            if (ranks[other].process == process)
                return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                    "rank %d and rank %d are in one process; give it one rank, or make its ranks "
                                    "threads of one group",
                                    other, rank);
    }
    return DTRAIN_OK;
}

/* Whether a peer's process has ended, with all that its queues held. */
static int dtrain__processes_gone(const dtrain_device_group *group, int rank)
{
    const dtrain__process_words *words = &group->processes->page->ranks[rank];
    int known;
    uint64_t began = dtrain__os_process_began((pid_t)words->process, &known);
    return known && began != words->began;
}

/* Ends the group for those who look at the page; the first cause stays. */
static void dtrain__processes_break(dtrain_device_group *group, const dtrain__error *cause)
{
    dtrain__process_page *page = group->processes->page;
    dtrain__process_words *own = &page->ranks[group->comm->rank];
    uint32_t whole = 0;
    if (own->told)
        return;
    own->why = *cause;
    own->told = 1;
    __atomic_compare_exchange_n(&page->broken, &whole, (uint32_t)group->comm->rank + 1, 0, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}

/* Finds out whose process has ended. */
static void dtrain__processes_look(dtrain_device_group *group)
{
    for (int rank = 0; rank < group->comm->size; rank++)
        if (rank != group->comm->rank)
            group->processes->peers[rank].gone = dtrain__processes_gone(group, rank);
}

/* Waits until a peer's word is no more than `inside`, or its device can be in nobody's memory. */
static void dtrain__processes_settle(dtrain_device_group *group, int rank, uint32_t inside)
{
    dtrain_comm *comm = group->comm;
    const uint32_t *word = &group->processes->page->ranks[rank].device.inside;
    int64_t lost_ns = 0;
    for (unsigned turn = 0; __atomic_load_n(word, __ATOMIC_SEQ_CST) > inside; turn++) {
        int64_t now = dtrain__os_now_ns();
        if (turn < DTRAIN__WAIT_YIELDS) {
            sched_yield();
            continue;
        }
        if (dtrain__processes_gone(group, rank))
            return;
        if (comm->desc.progress == DTRAIN_PROGRESS_POLL && comm->transport.poll != NULL)
            comm->transport.poll(comm->transport.self, now);
        if (lost_ns == 0 && dtrain__comm_has_left(comm, rank))
            lost_ns = now;
        if (lost_ns != 0 && now - lost_ns > DTRAIN__PROCESS_GRACE_NS)
            return;
        struct timespec nap = dtrain__os_timespec(1000000);
        nanosleep(&nap, NULL);
    }
}

/* ---- memory of peers ---- */

static void dtrain__processes_close(dtrain_device_group *group, size_t index)
{
    dtrain__processes *all = group->processes;
    group->device->ops->memory_close(group->device, all->opened[index].base);
    all->opened[index] = all->opened[--all->opened_count];
}

/* Closes what was opened of a peer where other memory is now; the queue is done with it before. */
static dtrain_status dtrain__processes_forget(dtrain_device_group *group, int rank, const dtrain_device_shared *now)
{
    dtrain__processes *all = group->processes;
    dtrain_status status = DTRAIN_OK;
    for (size_t i = all->opened_count; i-- > 0 && status == DTRAIN_OK;) {
        const dtrain__opened *o = &all->opened[i];
        if (o->rank != rank ||
            (o->what.base - now->base >= now->bytes && now->base - o->what.base >= o->what.bytes)) /* apart */
            continue;
        status = dtrain_device_wait(group->device);
        if (status == DTRAIN_OK)
            dtrain__processes_close(group, i);
    }
    return status;
}

static dtrain_status dtrain__processes_room(dtrain_device_group *group)
{
    dtrain__processes *all = group->processes;
    size_t room = 2 * all->opened_room + 16, width = sizeof(dtrain__opened);
    if (all->opened_count < all->opened_room)
        return DTRAIN_OK;
    void *grown = dtrain__resize(group->comm->allocator, all->opened, all->opened_room * width, room * width);
    if (grown == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", room * width);
    all->opened = (dtrain__opened *)grown;
    all->opened_room = room;
    return DTRAIN_OK;
}

/* Where a peer's memory is for this rank's device. */
static dtrain_status dtrain__processes_open(dtrain_device_group *group, int rank, const dtrain_device_shared *what,
                                            void **pointer)
{
    dtrain__processes *all = group->processes;
    dtrain__opened made;
    for (size_t i = 0; i < all->opened_count; i++) {
        const dtrain__opened *o = &all->opened[i];
        if (o->rank == rank && o->what.base == what->base && o->what.id == what->id && o->what.bytes == what->bytes &&
            memcmp(o->what.handle, what->handle, sizeof what->handle) == 0) {
            *pointer = (unsigned char *)o->base + what->offset;
            return DTRAIN_OK;
        }
    }
    dtrain_status status = dtrain__processes_forget(group, rank, what);
    if (status == DTRAIN_OK)
        status = dtrain__processes_room(group);
    made.what = *what;
    made.rank = rank;
    made.base = NULL;
    if (status == DTRAIN_OK)
        status = group->device->ops->memory_open(group->device, what, &made.base);
    if (status != DTRAIN_OK)
        return status;
    all->opened[all->opened_count++] = made;
    *pointer = (unsigned char *)made.base + what->offset;
    return DTRAIN_OK;
}

static void dtrain__processes_close_all(dtrain_device_group *group)
{
    while (group->processes->opened_count > 0)
        dtrain__processes_close(group, group->processes->opened_count - 1);
}

/* Says what of a call the others' devices touch. */
static dtrain_status dtrain__processes_pack(dtrain_device_group *group, const dtrain__op *op, dtrain__parcel *mine)
{
    dtrain_device *device = group->device;
    dtrain_status status = DTRAIN_OK;
    int root = op->kind != DTRAIN__BROADCAST || op->root == group->comm->rank;
    mine->has_in = op->count > 0 && op->kind != DTRAIN__ALL_GATHER && root && op->in != NULL;
    mine->has_out = op->count > 0 && op->kind != DTRAIN__REDUCE_SCATTER && op->out != NULL &&
                    (op->kind != DTRAIN__BROADCAST || !root);
    if (mine->has_in)
        status = device->ops->memory_share(device, op->in, &mine->in);
    if (status != DTRAIN_OK || !mine->has_out)
        return status;
    uint64_t beyond = mine->has_in ? (uint64_t)(uintptr_t)op->out - mine->in.base : 0;
    if (!mine->has_in || beyond >= mine->in.bytes)
        return device->ops->memory_share(device, op->out, &mine->out);
    mine->out = mine->in;
    mine->out.offset = beyond;
    return DTRAIN_OK;
}

/* Tells the others where this rank's buffers are, and hears where theirs are. Memory of one rank's that cannot be
 * shared ends the call on all, and no more than that. */
static dtrain_status dtrain__processes_meet(dtrain_device_group *group, const dtrain__op *whole)
{
    dtrain_comm *comm = group->comm;
    dtrain__parcel mine, *parcels = group->processes->parcels;
    memset(&mine, 0, sizeof mine);
    mine.status = (uint64_t)dtrain__processes_pack(group, whole, &mine);
    if (mine.status != DTRAIN_OK)
        snprintf(mine.text, sizeof mine.text, "%.255s", dtrain__thread_error.text);
    dtrain__op op =
        dtrain__op_of(DTRAIN__ALL_GATHER, &mine, parcels, DTRAIN__PARCEL_WORDS * (size_t)comm->size, DTRAIN_U64);
    dtrain_status status = dtrain__device_step(group, whole, 0, &op);
    for (int rank = 0; rank < comm->size && status == DTRAIN_OK; rank++) {
        parcels[rank].text[sizeof parcels[rank].text - 1] = 0;
        if (parcels[rank].status != DTRAIN_OK)
            status =
                dtrain__fail(&comm->error, (dtrain_status)parcels[rank].status, "%s on rank %d: rank %d's memory: %s",
                             dtrain__device_text(comm, whole, comm->number).text, comm->rank, rank, parcels[rank].text);
    }
    return status;
}

/* A peer's memory could not be opened: it is lost, as what it had went with it, or else this rank's device has failed.
 */
static dtrain_status dtrain__processes_unreached(dtrain_device_group *group, const dtrain__op *op, int rank,
                                                 dtrain_status status)
{
    dtrain_comm *comm = group->comm;
    dtrain__error said = dtrain__thread_error;
    int64_t until = dtrain__os_now_ns() + DTRAIN__PROCESS_GRACE_NS;
    int lost = 0;
    while (!(lost = dtrain__processes_gone(group, rank) || dtrain__comm_has_left(comm, rank)) &&
           dtrain__os_now_ns() < until)
        sched_yield(); /* a process that ends closes its files first */
    if (!lost) {
        dtrain__report(&said);
        return dtrain__device_failed(group, op, comm->number, status);
    }
    dtrain__fail(&comm->error, DTRAIN_ERR_PEER_LOST,
                 "%s on rank %d: rank %d is lost: its process %llu has ended, and what it had on its device",
                 dtrain__device_text(comm, op, comm->number).text, comm->rank, rank,
                 (unsigned long long)group->processes->page->ranks[rank].process);
    return dtrain__device_break(group);
}

/* Makes the buffers of a call, which all ranks have told, ones that this rank's device can touch. */
static dtrain_status dtrain__processes_reach(dtrain_device_group *group, const dtrain__op *op)
{
    for (int rank = 0; rank < group->comm->size; rank++) {
        const dtrain__parcel *parcel = &group->processes->parcels[rank];
        int peer = rank != group->comm->rank;
        void *in = peer ? NULL : (void *)op->in, *out = peer ? NULL : op->out;
        dtrain_status status = DTRAIN_OK;
        if (peer && parcel->has_in)
            status = dtrain__processes_open(group, rank, &parcel->in, &in);
        if (peer && parcel->has_out && status == DTRAIN_OK)
            status = dtrain__processes_open(group, rank, &parcel->out, &out);
        if (status != DTRAIN_OK)
            return dtrain__processes_unreached(group, op, rank, status);
        group->buffers[rank].in = in;
        group->buffers[rank].out = out;
    }
    return DTRAIN_OK;
}

/* ---- whether it can be done ---- */

static int dtrain__processes_has_all(const dtrain_device *device)
{
    const dtrain_device_ops *ops = device->ops;
    return ops->handles != NULL && ops->memory_share != NULL && ops->memory_open != NULL && ops->memory_close != NULL &&
           ops->event_create_shared != NULL && ops->event_share != NULL && ops->event_open != NULL;
}

/* Why processes cannot, by what all have said; NULL: they may. */
static const char *dtrain__processes_hindrance(const dtrain_device_group *group, int rank)
{
    const dtrain__device_note *note = &group->notes[rank], *first = &group->notes[0];
    if (note->handles[0] == 0)
        return "its device's table shares nothing with other processes";
    if (memcmp(note->handles, first->handles, sizeof note->handles) != 0)
        return "its device is of another kind than that of rank 0";
    return rank == 0 && first->page_fd == 0 ? "the system gave it no memory to share" : NULL;
}

/* Makes what the others need of this rank to try. */
static dtrain_status dtrain__processes_share(dtrain_device_group *group)
{
    dtrain_device *device = group->device;
    dtrain__device_note *note = &group->mine;
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < 2 && status == DTRAIN_OK; i++)
        status = device->ops->event_share(device, note->events[i], note->shared_events[i]);
    return status == DTRAIN_OK ? device->ops->memory_share(device, note->probe, &note->shared_probe) : status;
}

/* Opens what the others have made. */
static dtrain_status dtrain__processes_open_peers(dtrain_device_group *group)
{
    dtrain_device *device = group->device;
    dtrain_status status = dtrain__processes_meet_all(group);
    for (int rank = 0; rank < group->comm->size && status == DTRAIN_OK; rank++) {
        dtrain__process_peer *peer = &group->processes->peers[rank];
        const dtrain__device_note *note = &group->notes[rank];
        void *probe = group->mine.probe;
        for (int i = 0; i < 2 && rank != group->comm->rank && status == DTRAIN_OK; i++)
            status = device->ops->event_open(device, note->shared_events[i], &peer->events[i]);
        if (rank != group->comm->rank && status == DTRAIN_OK)
            status = dtrain__processes_open(group, rank, &note->shared_probe, &probe);
        peer->probe = (unsigned char *)probe;
    }
    return status;
}

static void dtrain__processes_free(dtrain_device_group *group)
{
    dtrain__processes *all = group->processes;
    if (all == NULL)
        return;
    dtrain__processes_close_offer(group);
    dtrain__processes_close_all(group);
    for (int i = 0; i < 2 * group->comm->size; i++)
        dtrain_device_event_destroy(group->device, all->peers[i / 2].events[i % 2]);
    dtrain__free(group->comm->allocator, all->opened, all->opened_room * sizeof(dtrain__opened));
    if (all->page != NULL)
        dtrain__os_unreserve(all->page, sizeof *all->page);
    dtrain__free(group->comm->allocator, all, all->bytes);
    group->processes = NULL;
}

#endif
