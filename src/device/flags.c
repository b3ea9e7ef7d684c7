/* ---- >>device_flags ----
 * Collectives of devices that wait for each other themselves. Each rank has a device of its own, and the ranks are
 * threads or processes of one host. One kernel a rank does all of a call, between two rounds of flags. A flag is in the
 * memory of the rank that waits for it. The CPU makes one exchange, of where the buffers are, as in >>device_events.
 *
 * Processes share only the page of >>device_processes. It has three things for each rank. `inside` is INSIDE or FREE. A
 * number, which the rank's queue writes when its kernel has ended. An error word, by which a CPU ends waits for a
 * killed process. Flags are opened as buffers are. Each process keeps a state of its own with their addresses. */
#ifndef DTRAIN__DEVICE_FLAGS_C
#define DTRAIN__DEVICE_FLAGS_C
#include "device_call.c"
#include "events.c"

#define DTRAIN__FLAGS_EPOCH 0xfffffff0u             /* the epoch before the first */
#define DTRAIN__FLAGS_ALL 4096                      /* one call in this many uses all blocks */
#define DTRAIN__FLAGS_BLOCKS 256                    /* most blocks */
#define DTRAIN__FLAGS_AT_ONCE ((size_t)256 << 10)   /* most bytes of a vector that every rank folds whole */
#define DTRAIN__FLAGS_AT_ONCE_ALL ((size_t)2 << 20) /* most bytes of all ranks' inputs then: 8 ranks of 256 KiB */

/* ---- what ranks are doing ----
 * A device may be in a call, and so inside another rank's memory, long after the CPU has returned from it. The group's
 * state says what each rank was last doing. All ranks share it, and the last to leave frees it.
 *
 *   INSIDE   the rank gives its device work there; not once the communicator is broken
 *   LEFT     the rank's event marks the end of that work
 *   NAMED    the rank asks about events of ranks that have LEFT
 *   FREE     none of these
 *
 * A rank that fails breaks the communicator before it reads the others' states. It returns when its device is done, no
 * peer is INSIDE, and the work of peers that have LEFT has ended. */

enum { DTRAIN__FLAGS_FREE = 0, DTRAIN__FLAGS_NAMED, DTRAIN__FLAGS_INSIDE, DTRAIN__FLAGS_LEFT };

struct dtrain__flags_state {
    int members;
    uint32_t state[DTRAIN__DEVICE_MOST];
    dtrain_device_event *event[DTRAIN__DEVICE_MOST];
    uint32_t *words[DTRAIN__DEVICE_MOST];
    uint64_t *errors[DTRAIN__DEVICE_MOST];
};

static void dtrain__flags_set(dtrain_device_group *group, uint32_t state)
{
    if (group->processes != NULL)
        dtrain__events_set(group, state);
    else
        DTRAIN__ATOMIC_STORE(&group->flags->state[group->comm->rank], state, SEQ_CST);
}

/* Returns the number of the last call that this rank's queue was given. */
static uint64_t dtrain__flags_turn(const dtrain_device_group *group)
{
    return (uint64_t)(uint32_t)(group->epoch - DTRAIN__FLAGS_EPOCH);
}

/* Returns whether a rank's device is in others' memory, or about to be. Its event exists while this rank is NAMED. */
static int dtrain__flags_is_in(dtrain_device_group *group, int rank)
{
    if (group->processes != NULL)
        return dtrain__processes_is_in(group, rank);
    uint32_t state = DTRAIN__ATOMIC_LOAD(&group->flags->state[rank], SEQ_CST);
    int done = 0;
    if (state != DTRAIN__FLAGS_LEFT)
        return state == DTRAIN__FLAGS_INSIDE;
    return dtrain__device_event_done(group->device, group->flags->event[rank], &done) == DTRAIN_OK && !done;
}

/* Waits until this rank's device has left the others' memory, and theirs its own. */
static void dtrain__flags_settle(dtrain_device_group *group)
{
    dtrain__error kept = dtrain__thread_error;
    dtrain__events_wait(group);
    dtrain__flags_set(group, group->processes == NULL ? DTRAIN__FLAGS_NAMED : DTRAIN__FLAGS_FREE);
    for (int rank = 0; rank < group->comm->size; rank++)
        for (unsigned turn = 0; rank != group->comm->rank && dtrain__flags_is_in(group, rank); turn++)
            dtrain__processes_sleep(group->comm, turn);
    dtrain__flags_set(group, DTRAIN__FLAGS_FREE);
    dtrain__thread_error = kept;
}

/* Ends a call that failed, and with it the group. */
static dtrain_status dtrain__flags_retreat(dtrain_device_group *group, dtrain_status status)
{
    if (group->processes != NULL) {
        dtrain__events_end(group);
        dtrain__processes_stop(group, group->comm->rank);
    }
    dtrain__flags_settle(group);
    return status;
}

/* ---- making and leaving ---- */

/* Fills in what the others must know of this rank's device. Leaves blocks 0 if it lacks something. */
static dtrain_status dtrain__flags_note(dtrain_device_group *group)
{
    dtrain_device_flag_traits traits;
    const dtrain_device_ops *ops = group->device != NULL ? group->device->ops : NULL;
    if (ops == NULL || ops->flags == NULL || ops->flag_traits == NULL || ops->fill == NULL || ops->event_done == NULL)
        return DTRAIN_OK;
    memset(&traits, 0, sizeof traits);
    dtrain_status status =
        DTRAIN__DEVICE_CALL(group->device, "device_flag_traits", flag_traits, (group->device, &traits));
    if (status != DTRAIN_OK || traits.blocks < 1)
        return status;
    group->mine.identity = traits.identity;
    group->mine.blocks = (uint64_t)traits.blocks;
    group->mine.block_bytes = (uint64_t)traits.block_bytes;
    return DTRAIN_OK;
}

/* Returns why FLAGS is not possible where EVENTS is, and on which rank; NULL: it is possible. */
static const char *dtrain__flags_hindrance(const dtrain_device_group *group, int *rank)
{
    for (*rank = 0; *rank < group->comm->size; ++*rank) {
        if (group->notes[*rank].blocks == 0)
            return "its device's table lacks flags, flag_traits, fill or event_done";
        for (int other = 0; other < *rank; other++)
            if (group->notes[other].identity == group->notes[*rank].identity)
                return "another rank has a queue on the same physical device, where kernels that wait for each other "
                       "may never run side by side";
    }
    return NULL;
}

static dtrain_status dtrain__flags_new(dtrain_device_group *group)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    group->flags = (dtrain__flags_state *)dtrain__alloc(&heap, sizeof *group->flags);
    if (group->flags == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", sizeof *group->flags);
    group->flags->members = 1;
    return DTRAIN_OK;
}

/* Makes this rank's flags; between threads also its error word, and on rank 0 the shared state. The first notes of all
 * ranks have come. */
static dtrain_status dtrain__flags_make(dtrain_device_group *group)
{
    const uint32_t before = DTRAIN__FLAGS_EPOCH;
    size_t count, size = (size_t)group->comm->size;
    void *words = NULL, *error = NULL;
    group->blocks = DTRAIN__FLAGS_BLOCKS;
    group->block_bytes = SIZE_MAX;
    for (size_t rank = 0; rank < size; rank++) {
        const dtrain__device_note *note = &group->notes[rank];
        group->blocks = note->blocks < (uint64_t)group->blocks ? (int)note->blocks : group->blocks;
        group->block_bytes = note->block_bytes < group->block_bytes ? (size_t)note->block_bytes : group->block_bytes;
    }
    group->epoch = before;
    count = (size_t)group->blocks * 2 * size;
    dtrain_status status = dtrain_device_alloc(group->device, DTRAIN_MEMORY_DEVICE, count * sizeof before, &words);
    group->words = (uint32_t *)words;
    if (status == DTRAIN_OK)
        status = dtrain_device_fill(group->device, words, &before, sizeof before, count);
    if (status == DTRAIN_OK && !group->comm->plane->in_process)
        return group->device->ops->memory_share(group->device, words, &group->mine.shared_words);
    if (status == DTRAIN_OK)
        status = dtrain_device_alloc(group->device, DTRAIN_MEMORY_PINNED, sizeof *group->failure, &error);
    group->failure = (uint64_t *)error;
    if (status != DTRAIN_OK)
        return status;
    *group->failure = 0;
    if (group->comm->rank == 0)
        status = dtrain__flags_new(group);
    group->mine.flags = group->flags;
    return status;
}

/* Makes this process's state: opens the flags, and takes the error words of the page. */
static dtrain_status dtrain__flags_open(dtrain_device_group *group)
{
    dtrain_status status = dtrain__flags_new(group);
    for (int rank = 0; rank < group->comm->size && status == DTRAIN_OK; rank++) {
        void *words = group->words;
        if (rank != group->comm->rank)
            status = dtrain__processes_open(group, rank, &group->notes[rank].shared_words, &words);
        group->flags->words[rank] = (uint32_t *)words;
        group->flags->errors[rank] =
            (uint64_t *)dtrain__processes_queued(group, &group->processes->page->ranks[rank].failure);
    }
    group->failure = &group->processes->page->ranks[group->comm->rank].failure;
    return status;
}

/* Joins rank 0's state, which exists while this rank is inside: see dtrain__device_try_events. */
static dtrain_status dtrain__flags_join(dtrain_device_group *group)
{
    int rank = group->comm->rank;
    if (group->processes != NULL)
        return dtrain__flags_open(group);
    if (rank != 0) {
        group->flags = group->notes[0].flags;
        DTRAIN__ATOMIC_ADD(&group->flags->members, 1, SEQ_CST);
    }
    group->flags->event[rank] = group->mine.events[1];
    group->flags->words[rank] = group->words;
    group->flags->errors[rank] = group->failure;
    return DTRAIN_OK;
}

/* Frees this rank's flags, before its events are destroyed. */
static void dtrain__flags_leave(dtrain_device_group *group)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain__flags_state *shared = group->flags;
    if (shared != NULL) {
        dtrain__flags_settle(group);
        for (int rank = 0; rank < group->comm->size; rank++)
            while (DTRAIN__ATOMIC_LOAD(&shared->state[rank], SEQ_CST) == DTRAIN__FLAGS_NAMED)
                dtrain__os_yield();
        if (DTRAIN__ATOMIC_SUB(&shared->members, 1, SEQ_CST) == 0)
            dtrain__free(&heap, shared);
        group->flags = NULL;
    }
    dtrain_device_free(group->device, DTRAIN_MEMORY_DEVICE, group->words);
    if (group->processes == NULL)
        dtrain_device_free(group->device, DTRAIN_MEMORY_PINNED, group->failure);
}

/* ---- calls ----
 * Epochs number a group's calls. They begin a little before they wrap, so every long run passes that point. A call uses
 * no more blocks than it needs. One call in DTRAIN__FLAGS_ALL uses all blocks, so that a difference of 32 bits can tell
 * the epoch of every flag. */

/* Returns whether every rank can fold all of a call for itself. The answer is the same on all ranks, as allocations
 * begin at multiples of 256 bytes in every process. */
static int dtrain__flags_at_once(const dtrain_device_group *group, const dtrain__op *op)
{
    size_t size = (size_t)group->comm->size, width = dtrain_dtype_bits(op->dtype) / 8;
    size_t room = (size_t)group->blocks * group->block_bytes, most = DTRAIN__FLAGS_AT_ONCE_ALL / size;
    uintptr_t first = (uintptr_t)group->buffers[0].in, differ = 0;
    most = most < DTRAIN__FLAGS_AT_ONCE ? most : DTRAIN__FLAGS_AT_ONCE;
    if (op->kind != DTRAIN__ALL_REDUCE || op->count == 0 || op->count > (most < room ? most : room) / width)
        return 0;
    for (size_t rank = 0; rank < size; rank++)
        differ |= (first ^ (uintptr_t)group->buffers[rank].in) | (first ^ (uintptr_t)group->buffers[rank].out);
    return differ % 16 == 0 && first % width == 0;
}

/* Returns how many blocks a call uses; the same on all ranks. */
static int dtrain__flags_blocks(const dtrain_device_group *group, const dtrain__op *op, int at_once)
{
    size_t bytes = op->count * (dtrain_dtype_bits(op->dtype) / 8);
    size_t enough = (at_once ? bytes : bytes / (size_t)group->comm->size) / group->block_bytes + 1;
    if (group->epoch % DTRAIN__FLAGS_ALL == 0 || enough > (size_t)group->blocks)
        return group->blocks;
    return (int)enough;
}

/* Queues this rank's part of the call under way, for n inputs and m outputs of the group's arrays. Both may be 0. */
static dtrain_status dtrain__flags_reduce(dtrain_device_group *group, dtrain_dtype dtype, dtrain_op op, int n, int m,
                                          size_t begin, size_t count)
{
    const dtrain_comm *comm = group->comm;
    dtrain_device_flags part;
    memset(&part, 0, sizeof part);
    part.words = group->flags->words;
    part.errors = group->flags->errors;
    part.deadline_ns = comm->desc.timeout_ms < 0 ? 0 : (uint64_t)dtrain__os_ms_to_ns(comm->desc.timeout_ms);
    part.epoch = group->epoch;
    part.rank = comm->rank;
    part.ranks = comm->size;
    part.blocks = group->part_blocks;
    part.at_once = group->part_at_once;
    part.dtype = dtype;
    part.op = op;
    part.in = group->ins;
    part.out = group->outs;
    part.n = n;
    part.m = m;
    part.begin = begin;
    part.count = count;
    group->part_queued = 1;
    return DTRAIN__DEVICE_CALL(group->device, "device_flags", flags, (group->device, &part));
}

/* Queues this rank's part of a call, and the mark of its end. Peers' queues have their parts, or will get them. */
static dtrain_status dtrain__flags_work(dtrain_device_group *group, const dtrain__op *op)
{
    dtrain_status status;
    int size = group->comm->size;
    group->epoch++;
    uint32_t second = dtrain__processes_second(dtrain__flags_turn(group)); /* this kernel waits for it on all peers */
    for (int rank = 0; rank < size && group->processes != NULL; rank++)
        DTRAIN__ATOMIC_STORE(&group->processes->peers[rank].awaited[1], second, SEQ_CST);
    group->part_at_once = dtrain__flags_at_once(group, op);
    group->part_blocks = dtrain__flags_blocks(group, op, group->part_at_once);
    group->part_queued = 0;
    if (group->part_at_once) {
        for (int rank = 0; rank < size; rank++)
            group->ins[rank] = group->buffers[rank].in;
        group->outs[0] = op->out;
        status = dtrain__flags_reduce(group, op->dtype, op->op, size, 1, 0, op->count);
    } else {
        status = dtrain__events_queue(group, op);
        if (status == DTRAIN_OK && !group->part_queued) /* a rank without a share waits like the others */
            status = dtrain__flags_reduce(group, DTRAIN_U8, DTRAIN_OR, 0, 0, 0, 0);
    }
    return status == DTRAIN_OK ? dtrain__events_record(group, dtrain__flags_turn(group), 1) : status;
}

/* Makes an error of what a kernel or a peer has left, and breaks the group. All ranks have the first cause. */
static dtrain_status dtrain__flags_check(dtrain_device_group *group)
{
    dtrain_comm *comm = group->comm;
    uint64_t failure = group->failure != NULL ? DTRAIN__ATOMIC_LOAD(group->failure, ACQUIRE) : 0;
    int rank = dtrain__processes_named(group, failure >> 16 & 0xffff);
    int peer = dtrain__processes_named(group, failure & 0xffff);
    if (failure == 0)
        return DTRAIN_OK;
    if (dtrain__events_ended(group)) {
        dtrain__error cause = dtrain__events_cause(group);
        dtrain__fail(&comm->error, cause.status, "device_group on rank %d: %.400s", comm->rank, cause.text);
    } else if (group->processes != NULL && dtrain__processes_missed(group, peer)) {
        return dtrain__processes_check(group);
    } else if (rank == peer) {
        dtrain__fail(&comm->error, DTRAIN_ERR_IO,
                     "device_group on rank %d: the device of rank %d failed in an earlier call: that rank's error says "
                     "why; results since are undefined, make a new group",
                     comm->rank, rank);
    } else {
        dtrain__fail(&comm->error, DTRAIN_ERR_TIMEOUT,
                     "device_group on rank %d: in an earlier call the device of rank %d waited %lld ms for that of "
                     "rank %d, whose queue did not get there; results since are undefined, make a new group",
                     comm->rank, rank, (long long)comm->desc.timeout_ms, peer);
    }
    return dtrain__device_break(group);
}

/* Tells the devices that wait for this rank's device that it does not come. The broken communicator says why. A rank
 * that is out may be gone; one that is in stays until this rank, which is INSIDE, is out. */
static void dtrain__flags_give_up(dtrain_device_group *group)
{
    uint64_t rank = (uint64_t)group->comm->rank + 1, failure = (uint64_t)group->epoch << 32 | rank << 16 | rank;
    for (int other = 0; other < group->comm->size && group->processes == NULL; other++) {
        uint64_t none = 0;
        if (DTRAIN__ATOMIC_LOAD(&group->flags->state[other], SEQ_CST) >= DTRAIN__FLAGS_INSIDE)
            DTRAIN__ATOMIC_COMPARE_EXCHANGE(group->flags->errors[other], &none, failure, SEQ_CST);
    }
}

static dtrain_status dtrain__flags_run(dtrain_device_group *group, const dtrain__op *op)
{
    dtrain_status status = dtrain__flags_check(group);
    if (status != DTRAIN_OK)
        return dtrain__flags_retreat(group, status);
    status = dtrain__events_meet(group, op);
    dtrain_status earlier = status != DTRAIN_OK ? dtrain__flags_check(group) : DTRAIN_OK;
    if (earlier != DTRAIN_OK) /* that may be why the others have left */
        return dtrain__flags_retreat(group, earlier);
    if (status != DTRAIN_OK) /* usable: no rank went on */
        return dtrain__events_whole(group) ? status : dtrain__flags_retreat(group, status);
    dtrain__flags_set(group, DTRAIN__FLAGS_INSIDE);
    status = dtrain__events_enter(group, op);
    if (status == DTRAIN_OK) {
        status = dtrain__flags_work(group, op);
        if (status != DTRAIN_OK)
            status = dtrain__device_failed(group, op, group->comm->number, status);
    }
    if (status != DTRAIN_OK) {
        dtrain__flags_give_up(group);
        return dtrain__flags_retreat(group, status);
    }
    if (group->processes != NULL) /* all can see when the device's work will have ended */
        DTRAIN__ATOMIC_STORE(&dtrain__events_word(group, group->comm->rank)->turn, dtrain__flags_turn(group), SEQ_CST);
    dtrain__flags_set(group, group->processes != NULL ? DTRAIN__FLAGS_FREE : DTRAIN__FLAGS_LEFT);
    return DTRAIN_OK;
}

#endif
