/* ---- >>device_processes ----
 * Lets the devices of several processes of one host reach each other's memory. The ranks exchange handles of memory,
 * and share a page of words. The page does between processes what >>threads and events do between threads (see
 * >>device_events).
 *
 * A process that dies leaves its words as they were. No rank waits for it: its queues end with it, before the system
 * counts it as gone. A rank that is lost may also be stopped, or hang in a driver, while it is still in the others'
 * memory. The others wait for it for a limited time. */
#ifndef DTRAIN__DEVICE_PROCESSES
#define DTRAIN__DEVICE_PROCESSES
#include "device_call.c"

#define DTRAIN__PROCESSES_GRACE_NS 2000000000 /* for a rank that is lost but has not ended */
#define DTRAIN__PROCESSES_WATCH_NS 100000000  /* between two looks of the thread */
#define DTRAIN__PROCESSES_NUMBER 0xfffffff0u  /* the number before the first: every long run wraps */

/* A rank's part of the page. */
typedef struct dtrain__processes_words {
    uint32_t passed[2]; /* numbers of the last first and second place of a call that its queue has reached */
    dtrain__device_word device;
    uint64_t process, began; /* process 0: it has not come */
    uint64_t failure;        /* see `errors` of dtrain_device_flags */
    uint32_t told;           /* why can be read */
    dtrain__error why;       /* why it broke the group */
    char pad[DTRAIN__CACHE_LINE];
} dtrain__processes_words;

typedef struct dtrain__processes_page {
    uint64_t key[2];
    uint32_t broken; /* 1 + the first rank that said why; 0: not broken */
    uint32_t missed; /* 1 + a rank that was lost before its queue came to a place that another awaits; 0: none */
    char pad[DTRAIN__CACHE_LINE];
    dtrain__processes_words ranks[DTRAIN__DEVICE_MOST];
} dtrain__processes_page;

/* A peer's allocation that is open on this rank's device. */
typedef struct dtrain__processes_opened {
    dtrain_device_shared what;
    void *base;
    int rank;
} dtrain__processes_opened;

/* A rank's buffers of a call, in whole 64-bit words. */
typedef struct dtrain__processes_buffers {
    uint64_t status; /* if not DTRAIN_OK, they cannot be shared, and text says why */
    uint64_t mark;   /* number of its first place in this call */
    uint64_t has_in, has_out;
    dtrain_device_shared in, out;
    char text[DTRAIN__DEVICE_NOTE_TEXT];
} dtrain__processes_buffers;

#define DTRAIN__PROCESSES_BUFFERS_WORDS (sizeof(dtrain__processes_buffers) / sizeof(uint64_t))

/* What this process knows of a peer. */
typedef struct dtrain__processes_peer {
    uint32_t awaited[2]; /* its last numbers that this rank's queue waits for */
    int gone;            /* its queue does no more work */
    int64_t lost_ns;     /* when it was found to be lost; 0: it is not */
} dtrain__processes_peer;

struct dtrain__processes {
    dtrain__processes_page *page;
    unsigned char *queues;    /* address of the page for this process's queues; NULL: they have no access */
    int page_fd;              /* rank 0: open until all have opened it; else -1 */
    uint32_t mark;            /* number of this rank's last first place */
    dtrain_device_event *end; /* an event of this rank's queue */
    dtrain__worker watch;
    dtrain__processes_peer *peers;
    dtrain__processes_buffers *buffers; /* of the call under way */
    dtrain__processes_opened *opened;
    size_t opened_count;
};

/* ---- the page ----
 * Rank 0 offers it as a memory file without a name. The others open it by the number of that process and of its
 * descriptor, and check its key. A rank that cannot do so counts as one on another host. However a process ends, no
 * file is left behind. */

static void dtrain__processes_close_offer(dtrain_device_group *group)
{
    if (group->processes != NULL && group->processes->page_fd >= 0) {
        dtrain__os_share_close(group->processes->page_fd);
        group->processes->page_fd = -1;
    }
}

static dtrain_status dtrain__processes_new(dtrain_device_group *group)
{
    const dtrain_comm *comm = group->comm;
    size_t size = (size_t)comm->size, header = (sizeof(dtrain__processes) + 63) / 64 * 64;
    size_t bytes = header + size * (sizeof(dtrain__processes_buffers) + sizeof(dtrain__processes_peer));
    unsigned char *block = (unsigned char *)dtrain__alloc(comm->allocator, bytes);
    if (block == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", bytes);
    group->processes = (dtrain__processes *)(void *)block;
    group->processes->page_fd = -1;
    group->processes->buffers = (dtrain__processes_buffers *)(void *)(block + header);
    group->processes->peers = (dtrain__processes_peer *)(void *)(group->processes->buffers + size);
    group->processes->mark = DTRAIN__PROCESSES_NUMBER;
    for (size_t i = 0; i < 2 * size; i++)
        group->processes->peers[i / 2].awaited[i % 2] = DTRAIN__PROCESSES_NUMBER;
    return DTRAIN_OK;
}

/* Writes this rank's process into the page, and that its queue has reached no place. */
static dtrain_status dtrain__processes_sign(dtrain_device_group *group)
{
    dtrain__processes_words *own = &group->processes->page->ranks[group->comm->rank];
    int known;
    own->began = dtrain__os_process_began(dtrain__os_self(), &known);
    if (own->began == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "its process cannot see itself in /proc: mount it");
    own->passed[0] = own->passed[1] = DTRAIN__PROCESSES_NUMBER;
    DTRAIN__ATOMIC_STORE(&own->process, (uint64_t)dtrain__os_self(), SEQ_CST);
    return DTRAIN_OK;
}

/* Fills in what the others must know before it is clear which ranks share a host. Rank 0 makes and offers the page. */
static void dtrain__processes_offer(dtrain_device_group *group)
{
    const dtrain_device_ops *ops = group->device->ops;
    dtrain__device_note *note = &group->mine;
    snprintf(note->handles, sizeof note->handles, "%s", ops->handles);
    note->process = (uint64_t)dtrain__os_self();
    if (group->comm->rank != 0 || dtrain__processes_new(group) != DTRAIN_OK)
        return;
    dtrain__processes *all = group->processes;
    all->page = (dtrain__processes_page *)dtrain__os_share(sizeof *all->page, &all->page_fd);
    if (all->page == NULL || dtrain__os_random(note->page_key, sizeof note->page_key) != 0)
        return;
    memcpy(all->page->key, note->page_key, sizeof note->page_key);
    note->page_fd = (uint64_t)all->page_fd + 1;
}

/* Opens the page that rank 0 offers. UNSUPPORTED: this rank cannot open it. */
static dtrain_status dtrain__processes_join(dtrain_device_group *group)
{
    const dtrain__device_note *first = &group->notes[0];
    dtrain__processes_page *page;
    if (group->comm->rank == 0)
        return dtrain__processes_sign(group);
    dtrain_status status = dtrain__processes_new(group);
    if (status != DTRAIN_OK)
        return status;
    page =
        (dtrain__processes_page *)dtrain__os_share_open((long)first->process, (int)first->page_fd - 1, sizeof *page, 0);
    group->processes->page = page;
    if (page == NULL || memcmp(page->key, first->page_key, sizeof page->key) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "it cannot open the memory of rank 0's process %llu: they are on two hosts, in two "
                            "containers, or of two users",
                            (unsigned long long)first->process);
    return dtrain__processes_sign(group);
}

/* Checks that this rank can see every other's process, and that no two ranks are in one. */
static dtrain_status dtrain__processes_meet_all(const dtrain_device_group *group)
{
    const dtrain__processes_words *ranks = group->processes->page->ranks;
    for (int rank = 0; rank < group->comm->size; rank++) {
        int known;
        uint64_t process = DTRAIN__ATOMIC_LOAD(&ranks[rank].process, SEQ_CST);
        if (process == 0 || dtrain__os_process_began((long)process, &known) != ranks[rank].began)
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

/* Returns the rank that a word of the page names, 1 for rank 0. Any rank can write nonsense there: it is taken for this
 * one. */
static int dtrain__processes_named(const dtrain_device_group *group, uint64_t word)
{
    return word >= 1 && word <= (uint64_t)group->comm->size ? (int)word - 1 : group->comm->rank;
}

/* Returns whether a peer's process has ended, with all that its queues held. */
static int dtrain__processes_gone(const dtrain_device_group *group, int rank)
{
    const dtrain__processes_words *words = &group->processes->page->ranks[rank];
    int known;
    uint64_t began = dtrain__os_process_began((long)words->process, &known);
    return known && began != words->began;
}

/* Marks the group as broken in the page; the first cause stays. */
static void dtrain__processes_break(dtrain_device_group *group, const dtrain__error *cause)
{
    dtrain__processes_page *page = group->processes->page;
    dtrain__processes_words *own = &page->ranks[group->comm->rank];
    uint32_t whole = 0;
    if (own->told)
        return;
    own->why = *cause;
    own->told = 1;
    DTRAIN__ATOMIC_COMPARE_EXCHANGE(&page->broken, &whole, (uint32_t)group->comm->rank + 1, SEQ_CST);
}

/* Returns whether to stop waiting for a peer: its process has ended, or it was lost two seconds ago. */
static int dtrain__processes_is_out(dtrain_device_group *group, int rank)
{
    dtrain__processes_peer *peer = &group->processes->peers[rank];
    int64_t now = dtrain__os_now_ns();
    if (dtrain__processes_gone(group, rank))
        return 1;
    if (peer->lost_ns == 0 && dtrain__group_has_left(group->comm, rank))
        peer->lost_ns = now;
    return peer->lost_ns != 0 && now - peer->lost_ns > DTRAIN__PROCESSES_GRACE_NS;
}

/* Pauses between two looks at a device. */
static void dtrain__processes_sleep(dtrain_comm *comm, unsigned turn)
{
    if (turn < DTRAIN__BELL_YIELDS) {
        dtrain__os_yield();
        return;
    }
    if (comm->desc.progress == DTRAIN_PROGRESS_POLL && comm->transport.poll != NULL)
        comm->transport.poll(comm->transport.self, dtrain__os_now_ns());
    dtrain__os_sleep(1000000);
}

/* ---- numbers that queues write and await ----
 * A queue that comes to a place of a call writes a number into the page, and the others' queues wait for that
 * number. It only grows, modulo 2^32. A queue that has ended writes no more. Then each rank that waits for it stores
 * the number itself, as soon as it waits for its own queue. A program may also wait for its queue without a call of
 * this library; then a thread of the group stores the number. A rank whose device has failed stores its own numbers
 * when it breaks or leaves the group.
 *
 * Kernels that wait for each other (see >>device_flags) also look at `failure` of their rank. Their calls have only a
 * second place. A rank that ends waits stores failures too. */

/* Returns the address of a part of the page for this process's queues. */
static void *dtrain__processes_queued(const dtrain_device_group *group, const void *in_page)
{
    const dtrain__processes *all = group->processes;
    return all->queues + ((const unsigned char *)in_page - (const unsigned char *)all->page);
}

static uint32_t *dtrain__processes_word(const dtrain_device_group *group, int rank, int second)
{
    return (uint32_t *)dtrain__processes_queued(group, &group->processes->page->ranks[rank].passed[second]);
}

/* Returns the number of the second place of a call. */
static uint32_t dtrain__processes_second(uint64_t turn)
{
    return (uint32_t)turn + DTRAIN__PROCESSES_NUMBER;
}

/* Queues the write of this rank's number: of its next first place, or of the second place of a call. */
static dtrain_status dtrain__processes_mark(dtrain_device_group *group, uint64_t turn, int second)
{
    uint32_t number = second ? dtrain__processes_second(turn) : ++group->processes->mark;
    uint32_t *word = dtrain__processes_word(group, group->comm->rank, second);
    return group->device->ops->word_write(group->device, word, number);
}

/* Queues the wait for a place of a peer. */
static dtrain_status dtrain__processes_await(dtrain_device_group *group, int rank, int second, uint64_t turn)
{
    uint32_t mark = (uint32_t)group->processes->buffers[rank].mark;
    uint32_t number = second ? dtrain__processes_second(turn) : mark;
    DTRAIN__ATOMIC_STORE(&group->processes->peers[rank].awaited[second], number, SEQ_CST);
    return group->device->ops->word_await(group->device, dtrain__processes_word(group, rank, second), number);
}

/* Returns whether a peer's device is in others' memory, or about to be, by a kernel that waits for theirs. */
static int dtrain__processes_is_in(dtrain_device_group *group, int rank)
{
    const dtrain__processes_words *words = &group->processes->page->ranks[rank];
    if (DTRAIN__ATOMIC_LOAD(&words->device.inside, SEQ_CST) == 0) {
        uint32_t second = dtrain__processes_second(DTRAIN__ATOMIC_LOAD(&words->device.turn, SEQ_CST));
        if ((int32_t)(DTRAIN__ATOMIC_LOAD(&words->passed[1], SEQ_CST) - second) >= 0)
            return 0;
    }
    return !dtrain__processes_is_out(group, rank);
}

/* Lets all go on that wait for this number or an earlier one. */
static void dtrain__processes_pass(uint32_t *word, uint32_t number)
{
    uint32_t now = DTRAIN__ATOMIC_LOAD(word, SEQ_CST);
    while ((int32_t)(now - number) < 0 && !DTRAIN__ATOMIC_COMPARE_EXCHANGE(word, &now, number, SEQ_CST))
        continue;
}

/* Ends the kernels of all ranks that wait for each other, as `rank` will not come. Any thread may call it. */
static void dtrain__processes_stop(const dtrain_device_group *group, int rank)
{
    uint64_t failure = (uint64_t)(group->comm->rank + 1) << 16 | (uint64_t)(rank + 1);
    for (int other = 0; other < group->comm->size; other++) {
        uint64_t none = 0;
        DTRAIN__ATOMIC_COMPARE_EXCHANGE(&group->processes->page->ranks[other].failure, &none, failure, SEQ_CST);
    }
}

/* Returns whether this rank's queue waits for a peer's. Any thread may call it. */
static int dtrain__processes_waits(const dtrain_device_group *group, int rank)
{
    const uint32_t *passed = group->processes->page->ranks[rank].passed;
    const uint32_t *awaited = group->processes->peers[rank].awaited;
    int waits = 0;
    for (int second = 0; second < 2 && rank != group->comm->rank; second++)
        waits |= (int32_t)(DTRAIN__ATOMIC_LOAD(&passed[second], SEQ_CST) -
                           DTRAIN__ATOMIC_LOAD(&awaited[second], SEQ_CST)) < 0;
    return waits;
}

/* Ends this rank's waits for a peer whose queue does no more. First marks `missed`, so that all who go on know. Any
 * thread may call it. */
static void dtrain__processes_release(dtrain_device_group *group, int rank)
{
    const dtrain__processes *all = group->processes;
    DTRAIN__ATOMIC_STORE(&all->page->missed, (uint32_t)rank + 1, SEQ_CST);
    dtrain__processes_stop(group, rank);
    for (int second = 0; second < 2; second++)
        dtrain__processes_pass(&all->page->ranks[rank].passed[second],
                               DTRAIN__ATOMIC_LOAD(&all->peers[rank].awaited[second], SEQ_CST));
}

/* Waits for this rank's queue, and ends its waits for peers that are out. From until_ns on it ends its waits for all
 * peers, and returns 1. When the queue is done or has failed, no peer waits for it any more. */
static int dtrain__processes_drain(dtrain_device_group *group, int64_t until_ns, dtrain_status *status)
{
    const dtrain__processes *all = group->processes;
    dtrain__processes_words *own = &all->page->ranks[group->comm->rank];
    int done = 0, late = 0;
    *status = dtrain__device_event_record(group->device, all->end);
    for (unsigned turn = 0; *status == DTRAIN_OK; turn++) {
        *status = dtrain__device_event_done(group->device, all->end, &done);
        if (done || *status != DTRAIN_OK)
            break;
        late = until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns;
        for (int rank = 0; rank < group->comm->size && turn >= DTRAIN__BELL_YIELDS; rank++)
            if (dtrain__processes_waits(group, rank) && (late || dtrain__processes_is_out(group, rank)))
                dtrain__processes_release(group, rank);
        dtrain__processes_sleep(group->comm, turn);
    }
    dtrain__error said = dtrain__thread_error;
    dtrain_status waited = dtrain_device_wait(group->device);
    if (*status == DTRAIN_OK)
        *status = waited;
    else
        dtrain__report(&said);
    if (*status != DTRAIN_OK)
        dtrain__processes_stop(group, group->comm->rank);
    dtrain__processes_pass(&own->passed[0], all->mark);
    dtrain__processes_pass(&own->passed[1], dtrain__processes_second(own->device.turn));
    return late;
}

static dtrain_status dtrain__processes_wait(dtrain_device_group *group)
{
    dtrain_status status;
    dtrain__processes_drain(group, INT64_MAX, &status);
    return status;
}

/* Returns whether a peer is lost that this rank's kernel has waited for in vain. */
static int dtrain__processes_missed(dtrain_device_group *group, int rank)
{
    uint32_t none = 0;
    if (dtrain__processes_gone(group, rank) || dtrain__group_has_left(group->comm, rank))
        DTRAIN__ATOMIC_COMPARE_EXCHANGE(&group->processes->page->missed, &none, (uint32_t)rank + 1, SEQ_CST);
    return DTRAIN__ATOMIC_LOAD(&group->processes->page->missed, SEQ_CST) != 0;
}

/* Makes an error of a wait that was ended because a peer was lost: results since then are undefined. */
static dtrain_status dtrain__processes_check(dtrain_device_group *group)
{
    dtrain_comm *comm = group->comm;
    uint32_t missed = DTRAIN__ATOMIC_LOAD(&group->processes->page->missed, SEQ_CST);
    int rank = dtrain__processes_named(group, missed);
    if (missed == 0)
        return DTRAIN_OK;
    dtrain__fail(&comm->error, DTRAIN_ERR_PEER_LOST,
                 "device_group on rank %d: rank %d is lost: its process %llu has ended, or was given up, before its "
                 "device had done its part of an earlier call; results since are undefined, go on with "
                 "dtrain_comm_shrink",
                 comm->rank, rank, (unsigned long long)group->processes->page->ranks[rank].process);
    return dtrain__device_break(group);
}

/* Runs one turn of the group's thread. */
static int64_t dtrain__processes_watch(void *owner)
{
    dtrain_device_group *group = (dtrain_device_group *)owner;
    for (int rank = 0; rank < group->comm->size; rank++)
        if (dtrain__processes_waits(group, rank) && dtrain__processes_gone(group, rank))
            dtrain__processes_release(group, rank);
    return dtrain__os_now_ns() + DTRAIN__PROCESSES_WATCH_NS;
}

/* ---- memory of peers ----
 * Memory of a peer that this rank's device has opened stays open, and is found again by its handle. It is closed when
 * the group is destroyed, or when the peer has other memory in its place. */

static void dtrain__processes_close(dtrain_device_group *group, size_t index)
{
    dtrain__processes *all = group->processes;
    group->device->ops->memory_close(group->device, all->opened[index].base);
    all->opened[index] = all->opened[--all->opened_count];
}

/* Closes what was opened of a peer at the place of other memory, after the queue is done with it. */
static dtrain_status dtrain__processes_forget(dtrain_device_group *group, int rank, const dtrain_device_shared *now)
{
    dtrain__processes *all = group->processes;
    dtrain_status status = DTRAIN_OK;
    for (size_t i = all->opened_count; i-- > 0 && status == DTRAIN_OK;) {
        const dtrain__processes_opened *o = &all->opened[i];
        if (o->rank != rank ||
            (o->what.base - now->base >= now->bytes && now->base - o->what.base >= o->what.bytes)) /* they do not
                                                                                                      overlap */
            continue;
        status = dtrain__processes_wait(group);
        if (status == DTRAIN_OK)
            dtrain__processes_close(group, i);
    }
    return status;
}

/* Gives the address of a peer's memory for this rank's device; opens it if needed. */
static dtrain_status dtrain__processes_open(dtrain_device_group *group, int rank, const dtrain_device_shared *what,
                                            void **pointer)
{
    dtrain__processes *all = group->processes;
    dtrain__processes_opened made;
    for (size_t i = 0; i < all->opened_count; i++) {
        const dtrain__processes_opened *o = &all->opened[i];
        if (o->rank == rank && o->what.base == what->base && o->what.id == what->id && o->what.bytes == what->bytes &&
            memcmp(o->what.handle, what->handle, sizeof what->handle) == 0) {
            *pointer = (unsigned char *)o->base + what->offset;
            return DTRAIN_OK;
        }
    }
    dtrain_status status = dtrain__processes_forget(group, rank, what);
    if (status != DTRAIN_OK)
        return status;
    void *grown = dtrain__memory_grow(group->comm->allocator, all->opened, sizeof *all->opened, all->opened_count, 1);
    if (grown == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu ranges of peers", all->opened_count + 1);
    all->opened = (dtrain__processes_opened *)grown;
    made.what = *what;
    made.rank = rank;
    made.base = NULL;
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

/* Lists the memory that the others' devices touch in a call. */
static dtrain_status dtrain__processes_pack(dtrain_device_group *group, const dtrain__op *op,
                                            dtrain__processes_buffers *mine)
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

/* Exchanges what every rank has. If some rank's memory cannot be shared, the call fails on all, and the group stays
 * usable. */
static dtrain_status dtrain__processes_tell(dtrain_device_group *group, const dtrain__op *whole,
                                            dtrain__processes_buffers *mine, dtrain__processes_buffers *all)
{
    dtrain_comm *comm = group->comm;
    if (mine->status != DTRAIN_OK)
        snprintf(mine->text, sizeof mine->text, "%.255s", dtrain__thread_error.text);
    dtrain__op op =
        dtrain__op_of(DTRAIN__ALL_GATHER, mine, all, DTRAIN__PROCESSES_BUFFERS_WORDS * (size_t)comm->size, DTRAIN_U64);
    dtrain_status status = dtrain__device_step(group, whole, 0, &op);
    for (int rank = 0; rank < comm->size && status == DTRAIN_OK; rank++) {
        all[rank].text[sizeof all[rank].text - 1] = 0;
        if (all[rank].status != DTRAIN_OK)
            status =
                dtrain__fail(&comm->error, dtrain__status_told(all[rank].status), "%s on rank %d: rank %d's memory: %s",
                             dtrain__device_text(comm, whole, comm->number).text, comm->rank, rank, all[rank].text);
    }
    return status;
}

/* Exchanges the buffers of all ranks. */
static dtrain_status dtrain__processes_meet(dtrain_device_group *group, const dtrain__op *whole)
{
    dtrain__processes_buffers mine;
    memset(&mine, 0, sizeof mine);
    mine.status = (uint64_t)dtrain__processes_pack(group, whole, &mine);
    mine.mark = group->processes->mark;
    return dtrain__processes_tell(group, whole, &mine, group->processes->buffers);
}

/* Handles a peer's memory that could not be opened. Either the peer is lost, and its memory went with it, or this
 * rank's device has failed. */
static dtrain_status dtrain__processes_unreached(dtrain_device_group *group, const dtrain__op *op, int rank,
                                                 dtrain_status status)
{
    dtrain_comm *comm = group->comm;
    dtrain__error said = dtrain__thread_error;
    int64_t until = dtrain__os_now_ns() + DTRAIN__PROCESSES_GRACE_NS;
    int lost = 0;
    while (!(lost = dtrain__processes_gone(group, rank) || dtrain__group_has_left(comm, rank)) &&
           dtrain__os_now_ns() < until)
        dtrain__os_yield(); /* a process that ends closes its files first: look again */
    if (!lost) {
        dtrain__report(&said);
        return dtrain__device_failed(group, op, comm->number, status);
    }
    dtrain__fail(&comm->error, DTRAIN_ERR_PEER_LOST,
                 "%s on rank %d: rank %d is lost: its process %llu has ended, and its work on its device; go on with "
                 "dtrain_comm_shrink",
                 dtrain__device_text(comm, op, comm->number).text, comm->rank, rank,
                 (unsigned long long)group->processes->page->ranks[rank].process);
    return dtrain__device_break(group);
}

/* Returns whether a peer's buffer of `bytes` bytes lies inside the allocation that it has told. */
static int dtrain__processes_holds(const dtrain_device_shared *what, size_t bytes)
{
    return what->offset <= what->bytes && bytes <= what->bytes - what->offset;
}

/* Opens the buffers of a call, which all ranks have told, for this rank's device. */
static dtrain_status dtrain__processes_reach(dtrain_device_group *group, const dtrain__op *op)
{
    size_t bytes = dtrain__device_span(group, op) * (dtrain_dtype_bits(op->dtype) / 8);
    for (int rank = 0; rank < group->comm->size; rank++) {
        const dtrain__processes_buffers *its = &group->processes->buffers[rank];
        int peer = rank != group->comm->rank;
        void *in = peer ? NULL : (void *)op->in, *out = peer ? NULL : op->out;
        dtrain_status status = DTRAIN_OK;
        if (peer && ((its->has_in && !dtrain__processes_holds(&its->in, bytes)) ||
                     (its->has_out && !dtrain__processes_holds(&its->out, bytes)))) {
            status = dtrain__fail(
                NULL, DTRAIN_ERR_CORRUPT,
                "rank %d sent a buffer that lies outside its allocation: build all ranks from one dtrain.h", rank);
            return dtrain__device_failed(group, op, group->comm->number, status);
        }
        if (peer && its->has_in)
            status = dtrain__processes_open(group, rank, &its->in, &in);
        if (peer && its->has_out && status == DTRAIN_OK)
            status = dtrain__processes_open(group, rank, &its->out, &out);
        if (status != DTRAIN_OK)
            return dtrain__processes_unreached(group, op, rank, status);
        group->buffers[rank].in = in;
        group->buffers[rank].out = out;
    }
    return DTRAIN_OK;
}

/* ---- whether EVENTS is possible ---- */

static int dtrain__processes_has_all(const dtrain_device *device)
{
    const dtrain_device_ops *ops = device->ops;
    return ops->handles != NULL && ops->memory_share != NULL && ops->memory_open != NULL && ops->memory_close != NULL &&
           ops->page_open != NULL && ops->page_close != NULL && ops->word_write != NULL && ops->word_await != NULL &&
           ops->event_done != NULL;
}

/* Returns why processes cannot share memory, by what all have told; NULL: they may. */
static const char *dtrain__processes_hindrance(const dtrain_device_group *group, int rank)
{
    const dtrain__device_note *note = &group->notes[rank], *first = &group->notes[0];
    if (note->handles[0] == 0)
        return "its device's table cannot share memory with other processes";
    if (memcmp(note->handles, first->handles, sizeof note->handles) != 0)
        return "its device is of another kind than that of rank 0";
    return rank == 0 && first->page_fd == 0 ? "the system gave it no memory to share" : NULL;
}

/* Opens the page to this process's queues. The first mark of all ranks is the first number. */
static dtrain_status dtrain__processes_open_page(dtrain_device_group *group)
{
    dtrain__processes *all = group->processes;
    void *queues = NULL;
    dtrain_status status = dtrain__device_event_create(group->device, &all->end);
    if (status == DTRAIN_OK)
        status = group->device->ops->page_open(group->device, all->page, sizeof *all->page, &queues);
    if (status != DTRAIN_OK)
        return status;
    all->queues = (unsigned char *)queues;
    for (int rank = 0; rank < group->comm->size; rank++)
        all->buffers[rank].mark = (uint32_t)(DTRAIN__PROCESSES_NUMBER + 1);
    if (group->comm->size == 1 || group->comm->desc.progress == DTRAIN_PROGRESS_POLL)
        return DTRAIN_OK;
    all->watch.owner = group;
    all->watch.turn = dtrain__processes_watch;
    return dtrain__device_thread(&all->watch, "ask for DTRAIN_DEVICE_STAGED");
}

/* Waits for what this rank's queue has tried, early enough to tell the others. Closes what the peers own before they
 * know that the trial has ended. */
static dtrain_status dtrain__processes_try(dtrain_device_group *group)
{
    int64_t ms = group->comm->desc.timeout_ms;
    int64_t until = ms < 0 ? INT64_MAX : dtrain__os_now_ns() + dtrain__os_ms_to_ns(ms) / 2;
    dtrain_status status;
    int late = dtrain__processes_drain(group, until, &status);
    if (late && status == DTRAIN_OK)
        status = dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                              "its device %s has waited %lld ms for words that the other queues write, or for earlier "
                              "work of its own queue: make the group while the devices are idle",
                              dtrain_device_name(group->device), (long long)ms / 2);
    dtrain__processes_close_all(group);
    return status;
}

/* Frees what the ranks share, once this rank's queue is done. */
static void dtrain__processes_free(dtrain_device_group *group)
{
    dtrain__processes *all = group->processes;
    if (all == NULL)
        return;
    dtrain__processes_close_offer(group);
    if (all->queues != NULL) {
        dtrain__processes_wait(group);
        dtrain__worker_end(&all->watch);
        dtrain__processes_close_all(group);
        group->device->ops->page_close(group->device, all->page);
    }
    dtrain__device_event_destroy(group->device, all->end);
    dtrain__free(group->comm->allocator, all->opened);
    if (all->page != NULL)
        dtrain__os_unreserve(all->page, sizeof *all->page);
    dtrain__free(group->comm->allocator, all);
    group->processes = NULL;
}

#endif
