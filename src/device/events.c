/* ---- >>device_events ----
 * Collectives of devices on each other's memory, between threads or processes of one host. Each rank records an event
 * after what its queue holds, and tells the others where its buffers are. Each queue waits for the others' events,
 * folds or copies its rank's share of all inputs to all outputs, and records a second event. When all ranks have
 * recorded theirs, each queue waits for those.
 *
 * Events are recorded before the exchange and waited for after it, so no queue waits for an event that was never
 * recorded. The first event is recorded again after the exchange that ends a call, the second after the one that begins
 * the next call: no rank uses them then. Between processes, numbers in a shared page serve as events. */
#ifndef DTRAIN__DEVICE_EVENTS_C
#define DTRAIN__DEVICE_EVENTS_C
#include "device_call.c"
#include "processes.c"

#define DTRAIN__EVENTS_LINE 256 /* bytes: shares of a vector begin at multiples of this */

/* ---- a group that breaks in a call ----
 * A device may then be inside another rank's memory. So a rank raises `inside` in its word before it queues anything
 * there, unless the group is broken. A rank that fails breaks the group before it reads the others' words. It returns
 * when no device is in its memory, nor its device in theirs. `turn` counts the calls whose second event a rank has
 * recorded. The words, and the mark of a broken group, are in >>threads between threads, and in >>device_processes
 * between processes. */

enum { DTRAIN__EVENTS_FREE = 0, DTRAIN__EVENTS_NAMED, DTRAIN__EVENTS_INSIDE };

static dtrain__device_word *dtrain__events_word(dtrain_device_group *group, int rank)
{
    return group->processes != NULL ? &group->processes->page->ranks[rank].device
                                    : &group->comm->shared->slots[rank].device;
}

static void dtrain__events_set(dtrain_device_group *group, uint32_t inside)
{
    DTRAIN__ATOMIC_STORE(&dtrain__events_word(group, group->comm->rank)->inside, inside, SEQ_CST);
}

/* Returns whether no rank may enter the others' memory any more. */
static int dtrain__events_ended(dtrain_device_group *group)
{
    return group->processes != NULL ? DTRAIN__ATOMIC_LOAD(&group->processes->page->broken, SEQ_CST) != 0
                                    : dtrain__membership_broken(group->comm->members);
}

static dtrain__error dtrain__events_cause(dtrain_device_group *group)
{
    if (group->processes == NULL)
        return *dtrain__group_cause(group->comm);
    dtrain__processes_page *page = group->processes->page;
    dtrain__error why = page->ranks[dtrain__processes_named(group, DTRAIN__ATOMIC_LOAD(&page->broken, SEQ_CST))].why;
    why.status = dtrain__status_told((uint64_t)why.status);
    why.text[sizeof why.text - 1] = 0;
    return why;
}

/* Keeps all ranks from entering after this. The group is broken, and this thread's last error says why. */
static void dtrain__events_end(dtrain_device_group *group)
{
    if (group->processes != NULL)
        dtrain__processes_break(group, &dtrain__thread_error);
}

/* Waits until every peer's state is at most `inside`, or its device can be in no memory. Meanwhile no peer waits for
 * this rank. */
static void dtrain__events_settle(dtrain_device_group *group, uint32_t inside)
{
    for (int rank = 0; rank < group->comm->size; rank++) {
        const uint32_t *word = &dtrain__events_word(group, rank)->inside;
        for (unsigned turn = 0; rank != group->comm->rank && DTRAIN__ATOMIC_LOAD(word, SEQ_CST) > inside; turn++) {
            if (group->processes != NULL && turn >= DTRAIN__BELL_YIELDS && dtrain__processes_is_out(group, rank))
                break;
            dtrain__processes_sleep(group->comm, turn);
        }
    }
}

/* Records the first (0) or second (1) event of call number `turn`. */
static dtrain_status dtrain__events_record(dtrain_device_group *group, uint64_t turn, int second)
{
    if (group->processes == NULL)
        return dtrain__device_event_record(group->device, group->mine.events[second]);
    return dtrain__processes_mark(group, turn, second);
}

/* Waits for this rank's queue. */
static dtrain_status dtrain__events_wait(dtrain_device_group *group)
{
    return group->processes != NULL ? dtrain__processes_wait(group) : dtrain_device_wait(group->device);
}

/* Queues the wait for the first (0) or second (1) events of call `turn`, for peers that have recorded them. */
static dtrain_status dtrain__events_await(dtrain_device_group *group, uint64_t turn, int second)
{
    const dtrain_comm *comm = group->comm;
    dtrain_status status = DTRAIN_OK;
    for (int rank = 0; rank < comm->size && status == DTRAIN_OK; rank++) {
        uint64_t theirs = DTRAIN__ATOMIC_LOAD(&dtrain__events_word(group, rank)->turn, SEQ_CST);
        int gone = group->processes != NULL && group->processes->peers[rank].gone;
        if (rank == comm->rank || (second && theirs < turn) || gone)
            continue;
        status = group->processes != NULL
                     ? dtrain__processes_await(group, rank, second, turn)
                     : dtrain__device_event_await(group->device, group->notes[rank].events[second]);
    }
    return status;
}

/* Ends a call that failed after the others knew this rank's buffers. Waits until its device has left their memory, and
 * theirs its own. If this rank has recorded its second event, a peer's call may have ended well and left work under
 * way: this rank waits for the peer's second event. Otherwise there is no such work, and the peer's events may be gone.
 */
static dtrain_status dtrain__events_retreat(dtrain_device_group *group, uint64_t turn, dtrain_status status)
{
    dtrain__error cause = dtrain__thread_error;
    dtrain__events_end(group);
    dtrain__events_wait(group);
    dtrain__events_set(group, DTRAIN__EVENTS_NAMED);
    dtrain__events_settle(group, DTRAIN__EVENTS_NAMED);
    for (int rank = 0; rank < group->comm->size && group->processes != NULL; rank++)
        group->processes->peers[rank].gone = rank != group->comm->rank && dtrain__processes_gone(group, rank);
    int recorded = dtrain__events_word(group, group->comm->rank)->turn == turn;
    if (recorded && dtrain__events_await(group, turn, 1) == DTRAIN_OK)
        dtrain__events_wait(group);
    dtrain__events_set(group, DTRAIN__EVENTS_FREE);
    dtrain__thread_error = cause;
    return status;
}

/* Prepares to queue work on peers' memory, with this rank INSIDE. It is an error if the group is broken. */
static dtrain_status dtrain__events_enter(dtrain_device_group *group, const dtrain__op *whole)
{
    dtrain_comm *comm = group->comm;
    if (!dtrain__events_ended(group))
        return group->processes != NULL ? dtrain__processes_reach(group, whole) : DTRAIN_OK;
    dtrain__error cause = dtrain__events_cause(group);
    dtrain_status status =
        dtrain__fail(&comm->error, cause.status, "%s on rank %d: %s",
                     dtrain__device_text(comm, whole, comm->number).text, comm->rank, dtrain__status_cause(&cause));
    return group->processes != NULL ? dtrain__device_break(group) : status;
}

/* Gives this rank's share, in elements, of a vector that every rank has whole. */
static size_t dtrain__events_share(const dtrain_comm *comm, size_t count, size_t width, size_t *begin)
{
    size_t line = DTRAIN__EVENTS_LINE / width;
    size_t lines = dtrain__split(count / line + 1, comm->size, comm->rank, begin);
    size_t end = (*begin + lines) * line;
    *begin *= line;
    end = end < count ? end : count;
    return end > *begin ? end - *begin : 0;
}

/* Queues this rank's share of an all-reduce. Shares do not overlap, so outputs may be inputs. */
static dtrain_status dtrain__events_fold(dtrain_device_group *group, const dtrain__op *op)
{
    const dtrain_comm *comm = group->comm;
    size_t begin, n = dtrain__events_share(comm, op->count, dtrain_dtype_bits(op->dtype) / 8, &begin);
    for (int rank = 0; rank < comm->size; rank++) {
        group->ins[rank] = group->buffers[rank].in;
        group->outs[rank] = group->buffers[rank].out;
    }
    return n > 0 ? dtrain__device_share(group, op->dtype, op->op, comm->size, comm->size, begin, n) : DTRAIN_OK;
}

/* Queues this rank's share of a broadcast, as bytes: an OR of one input copies it. */
static dtrain_status dtrain__events_copy(dtrain_device_group *group, const dtrain__op *op)
{
    const dtrain_comm *comm = group->comm;
    size_t begin, n = dtrain__events_share(comm, op->count * (dtrain_dtype_bits(op->dtype) / 8), 1, &begin);
    int m = 0;
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != op->root)
            group->outs[m++] = (unsigned char *)group->buffers[rank].out + begin;
    group->ins[0] = (const unsigned char *)group->buffers[op->root].in + begin;
    return n > 0 && m > 0 ? dtrain__device_share(group, DTRAIN_U8, DTRAIN_OR, 1, m, 0, n) : DTRAIN_OK;
}

/* Queues this rank's shard, or the pieces of it. A piece is folded, or copied to the others' outputs. The copy's source
 * is this rank's input, or its output if it has no input. */
static dtrain_status dtrain__events_shard(dtrain_device_group *group, const dtrain__op *op)
{
    const dtrain_comm *comm = group->comm;
    const dtrain_extent *pieces = group->piece_count > 0 ? group->pieces : &group->shards[comm->rank];
    int count = group->piece_count > 0 ? group->piece_count : 1, folds = dtrain__op_reduces(op);
    size_t width = dtrain_dtype_bits(op->dtype) / 8, done = 0;
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < count && status == DTRAIN_OK; i++) {
        size_t offset = pieces[i].begin * width, bytes = pieces[i].count * width;
        int m = 0;
        if (bytes == 0)
            continue;
        for (int rank = 0; rank < comm->size; rank++)
            if (folds)
                group->ins[rank] = (const unsigned char *)group->buffers[rank].in + offset;
            else if (rank != comm->rank || op->in != NULL)
                group->outs[m++] = (unsigned char *)group->buffers[rank].out + offset;
        if (folds)
            group->outs[0] = (unsigned char *)op->out + done;
        else
            group->ins[0] = op->in != NULL ? op->in : (const unsigned char *)op->out + offset;
        status = folds ? dtrain__device_share(group, op->dtype, op->op, comm->size, 1, 0, bytes / width)
                       : dtrain__device_share(group, DTRAIN_U8, DTRAIN_OR, 1, m, 0, bytes);
        done += bytes;
    }
    return status;
}

/* Queues what this rank's device does in a call. */
static dtrain_status dtrain__events_queue(dtrain_device_group *group, const dtrain__op *op)
{
    if (op->kind == DTRAIN__ALL_REDUCE)
        return dtrain__events_fold(group, op);
    return op->kind == DTRAIN__BROADCAST ? dtrain__events_copy(group, op) : dtrain__events_shard(group, op);
}

/* Queues all that a call does between its two exchanges. */
static dtrain_status dtrain__events_work(dtrain_device_group *group, const dtrain__op *op, uint64_t turn)
{
    dtrain_status status = dtrain__events_await(group, 0, 0);
    if (status == DTRAIN_OK)
        status = dtrain__events_queue(group, op);
    return status == DTRAIN_OK ? dtrain__events_record(group, turn, 1) : status;
}

/* Exchanges the addresses of all ranks' buffers. */
static dtrain_status dtrain__events_meet(dtrain_device_group *group, const dtrain__op *whole)
{
    dtrain__device_buffers mine;
    dtrain__op op;
    if (group->processes != NULL)
        return dtrain__processes_meet(group, whole);
    memset(&mine, 0, sizeof mine);
    mine.in = whole->in;
    mine.out = whole->out;
    op = dtrain__op_of(DTRAIN__ALL_GATHER, &mine, group->buffers,
                       DTRAIN__DEVICE_BUFFER_WORDS * (size_t)group->comm->size, DTRAIN_U64);
    return dtrain__device_step(group, whole, 0, &op);
}

/* Returns whether a step that failed has left the group usable. */
static int dtrain__events_whole(dtrain_device_group *group)
{
    return group->processes != NULL ? !dtrain__group_is_broken(group->comm) : !dtrain__events_ended(group);
}

static dtrain_status dtrain__events_run(dtrain_device_group *group, const dtrain__op *op)
{
    dtrain_comm *comm = group->comm;
    dtrain__device_word *word = dtrain__events_word(group, comm->rank);
    uint64_t turn = word->turn + 1;
    dtrain_status status = dtrain__events_record(group, turn, 0);
    if (status != DTRAIN_OK)
        return dtrain__device_failed(group, op, comm->number + 1, status);
    status = dtrain__events_meet(group, op);
    if (status != DTRAIN_OK) /* usable: no rank went on */
        return dtrain__events_whole(group) ? status : dtrain__events_retreat(group, turn, status);
    dtrain__events_set(group, DTRAIN__EVENTS_INSIDE);
    status = dtrain__events_enter(group, op);
    if (status != DTRAIN_OK)
        return dtrain__events_retreat(group, turn, status);
    status = dtrain__events_work(group, op, turn);
    if (status != DTRAIN_OK)
        return dtrain__events_retreat(group, turn, dtrain__device_failed(group, op, comm->number, status));
    DTRAIN__ATOMIC_STORE(&word->turn, turn, SEQ_CST);
    dtrain__op parting = dtrain__op_of(DTRAIN__BARRIER, NULL, NULL, 0, DTRAIN_U8);
    status = dtrain__device_step(group, op, 1, &parting); /* waits until every rank has recorded its second event */
    if (status != DTRAIN_OK)                              /* all ranks have work under way */
        return dtrain__events_retreat(group, turn, dtrain__device_break(group));
    status = dtrain__events_await(group, turn, 1);
    if (status != DTRAIN_OK)
        return dtrain__events_retreat(group, turn, dtrain__device_failed(group, op, comm->number, status));
    dtrain__events_set(group, DTRAIN__EVENTS_FREE);
    return DTRAIN_OK;
}

/* ---- whether EVENTS is possible ---- */

#define DTRAIN__EVENTS_PROBE_BYTES 256 /* rank r reads byte r of each probe, and writes byte 128 + r */

static int dtrain__events_has_all(const dtrain_device *device)
{
    const dtrain_device_ops *ops = device->ops;
    return ops != NULL && ops->allocate != NULL && ops->release != NULL && ops->wait != NULL && ops->reduce != NULL &&
           ops->event_create != NULL && ops->event_destroy != NULL && ops->event_record != NULL &&
           ops->event_await != NULL;
}

static dtrain_status dtrain__events_make(dtrain_device_group *group)
{
    dtrain_device *device = group->device;
    void *probe = NULL;
    int threads = group->comm->plane->in_process;
    dtrain_status status = threads ? DTRAIN_OK : dtrain__processes_join(group);
    for (int i = 0; i < 2 && threads && status == DTRAIN_OK; i++)
        status = dtrain__device_event_create(device, &group->mine.events[i]);
    if (!threads && status == DTRAIN_OK)
        status = dtrain__processes_open_page(group);
    if (status == DTRAIN_OK)
        status = dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, DTRAIN__EVENTS_PROBE_BYTES, &probe);
    group->mine.probe = (unsigned char *)probe;
    if (status == DTRAIN_OK && !threads)
        status = device->ops->memory_share(device, probe, &group->mine.shared_probe);
    if (status == DTRAIN_OK)
        status = dtrain__events_record(group, 0, 0);
    return status;
}

/* Reads and writes bytes of every rank's probe, as calls do with buffers, and waits for the result. */
static dtrain_status dtrain__events_try(dtrain_device_group *group)
{
    const dtrain_comm *comm = group->comm;
    int processes = group->processes != NULL;
    dtrain_status status = processes ? dtrain__processes_meet_all(group) : DTRAIN_OK;
    for (int rank = 0; rank < comm->size && status == DTRAIN_OK; rank++) {
        void *probe = group->notes[rank].probe;
        if (processes && rank != comm->rank)
            status = dtrain__processes_open(group, rank, &group->notes[rank].shared_probe, &probe);
        group->ins[rank] = (unsigned char *)probe + comm->rank;
        group->outs[rank] = (unsigned char *)probe + DTRAIN__EVENTS_PROBE_BYTES / 2 + comm->rank;
    }
    if (status == DTRAIN_OK)
        status = dtrain__events_await(group, 0, 0);
    if (status == DTRAIN_OK)
        status = dtrain_device_reduce(group->device, DTRAIN_U8, DTRAIN_OR, group->ins, comm->size, group->outs,
                                      comm->size, 0, 1);
    dtrain__error said = dtrain__thread_error;
    dtrain_status waited = processes ? dtrain__processes_try(group) : dtrain_device_wait(group->device);
    return status == DTRAIN_OK ? waited : dtrain__report(&said);
}

#endif
