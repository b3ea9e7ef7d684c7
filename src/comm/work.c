/* ---- >>work ----
 * What becomes of a call. It runs on its own thread, or goes into the queue as a work. The service, a poll, or whoever
 * waits for it drives the queue. A collective waits for all works before it, and all works after it wait for it.
 * Between two collectives each message ends by itself: it waits only for earlier messages to or from the same peer. */
#ifndef DTRAIN__WORK
#define DTRAIN__WORK
#include "place.c"
#include "queue.c"
#include "watch.c"
DTRAIN__FAST_BEGIN

/* Refuses a group of processes in a forked child, and before all ranks have come. */
static dtrain_status dtrain__work_usable(dtrain_comm *comm, const char *call)
{
    int ready = 1;
    if (dtrain__group_ours(comm, &comm->error, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (comm->forming && dtrain_comm_ready(comm, &ready) != DTRAIN_OK)
        return comm->error.status;
    if (!ready)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s: the group is still forming; call it when dtrain_comm_ready says 1", call);
    return DTRAIN_OK;
}

DTRAIN__OF_PROCESS(uint32_t, dtrain__work_told)

/* Logs once a process that its world has one rank, which is often a mistake. A program that runs threads makes no calls
 * on such a world, so it gets no warning. */
static void dtrain__work_tell_alone(dtrain_comm *comm)
{
    char half[120];
    comm->alone = 0;
    if (DTRAIN__ATOMIC_EXCHANGE(dtrain__work_told(), 1, RELAXED) != 0)
        return;
    dtrain__place_half(half, sizeof half);
    dtrain__log(
        DTRAIN_LOG_WARN,
        "no launcher has set a rank%s, so this is a world of one; start four ranks with \"dtrun -n 4 PROGRAM\", "
        "torchrun, srun or mpirun, or set DTRAIN_WORLD_SIZE=1 if one is meant",
        half);
}

static dtrain_status dtrain__work_begin(dtrain_comm *comm, dtrain__op *op)
{
    dtrain_status status = dtrain__op_check(comm, op);
    if (status == DTRAIN_OK && !comm->plane->in_process)
        status = dtrain__work_usable(comm, dtrain__op_kind_name(op->kind));
    if (status != DTRAIN_OK)
        return status;
    if (comm->alone)
        dtrain__work_tell_alone(comm);
    if (comm->watch.on)
        dtrain__watch_note(comm, op);
    op->algorithm = dtrain__plan_select(comm, op);
    op->awaited = -1;
    return DTRAIN_OK;
}

/* Puts an operation at the end of the queue; NULL: no memory. */
static dtrain_work *dtrain__work_add(dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__os_lock(&comm->queue.mutex);
    dtrain_work *work = comm->queue.spare;
    if (work != NULL)
        comm->queue.spare = work->next;
    else
        work = (dtrain_work *)dtrain__alloc(comm->allocator, sizeof *work);
    if (work != NULL && work->comm == NULL) {
        work->comm = comm;
        work->older = comm->queue.newest;
        comm->queue.newest = work;
    }
    if (work != NULL) {
        work->next = NULL;
        work->done = 0;
        work->ended = 0;
        work->mark = DTRAIN__WORK_MARK;
        work->op = *op;
        work->op.packet = dtrain__op_is_one_way(op) ? work->packet : NULL;
        work->op.queued = 1;
        if (comm->queue.tail != NULL)
            comm->queue.tail->next = work;
        else
            comm->queue.head = work;
        comm->queue.tail = work;
        DTRAIN__ATOMIC_ADD(&comm->queue.pending, 1, SEQ_CST);
    }
    dtrain__os_unlock(&comm->queue.mutex);
    if (work == NULL)
        dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for a work handle", comm->rank);
    return work;
}

static dtrain_status dtrain__work_enqueue(dtrain_comm *comm, const dtrain__op *op, dtrain_work **out)
{
    dtrain_status status = DTRAIN_OK;
    if (comm->service == NULL && comm->desc.progress == DTRAIN_PROGRESS_THREAD)
        status = dtrain__service_join(comm);
    if (status != DTRAIN_OK)
        return status;
    *out = dtrain__work_add(comm, op);
    if (*out == NULL)
        return DTRAIN_ERR_MEMORY;
    dtrain__bell_ring(comm->bell);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    return DTRAIN_OK;
}

DTRAIN_API int dtrain_work_done(const dtrain_work *work)
{
    return work == NULL || DTRAIN__ATOMIC_LOAD(&work->done, SEQ_CST) != 0;
}

static int dtrain__work_ready(void *pointer)
{
    return dtrain_work_done((const dtrain_work *)pointer);
}

/* Drives the queue on the calling thread, or watches another thread do so, until work has ended or until_ns. */
static void dtrain__work_help(dtrain_work *work, int64_t until_ns)
{
    dtrain_comm *comm = work->comm;
    /* a caller that returns again and again without waiting still makes connections and answers peers */
    if (until_ns != INT64_MAX && !dtrain_work_done(work) && comm->desc.progress == DTRAIN_PROGRESS_POLL &&
        comm->transport.poll != NULL)
        comm->transport.poll(comm->transport.self, 0);
    for (unsigned turn = 0; !dtrain_work_done(work); turn++) {
        if (dtrain__os_try_lock(&comm->queue.drive)) {
            dtrain_work *head;
            while (!dtrain_work_done(work) && (head = dtrain__queue_head(comm)) != NULL) {
                dtrain_work *message = dtrain__op_is_one_way(&head->op) ? head : NULL;
                if (!dtrain__queue_run(comm, &head->op, message, until_ns))
                    break;
                if (message == NULL) /* messages take themselves off the queue */
                    dtrain__queue_finish(comm, head);
            }
            dtrain__os_unlock(&comm->queue.drive);
            if (DTRAIN__ATOMIC_LOAD(&comm->queue.pending, SEQ_CST) > 0)
                dtrain__bell_ring(comm->bell); /* the service continues with the rest */
        } else {
            dtrain__bell_wait(comm->bell, turn, dtrain__os_now_ns() + 1000000, dtrain__work_ready, work);
        }
        if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            return;
    }
}

/* Counts the caller's wait for the group's work, wherever it waited. */
static void dtrain__work_blocked(dtrain_comm *comm, int64_t ns)
{
    for (dtrain__blocked *blocked = comm->blocked; blocked != NULL; blocked = blocked->above)
        DTRAIN__ATOMIC_ADD(&blocked->ns, ns, RELAXED);
}

/* The same for a wait inside a call of the group. */
static void dtrain__work_blocked_in(dtrain_comm *comm, int64_t ns)
{
    if (!comm->apart)
        dtrain__work_blocked(comm, ns);
}

static void dtrain__work_blocked_release(dtrain__blocked *blocked, dtrain_allocator *allocator)
{
    while (blocked != NULL && DTRAIN__ATOMIC_SUB(&blocked->held, 1, ACQ_REL) == 0) {
        dtrain__blocked *above = blocked->above;
        dtrain__free(allocator, blocked);
        blocked = above;
    }
}

/* Refuses a handle that was waited for, or whose group is gone. Best effort: a later call may use the handle again. */
static dtrain_status dtrain__work_alive(const dtrain_work *work, const char *call)
{
    uint32_t mark = DTRAIN__ATOMIC_LOAD(&work->mark, RELAXED);
    if (mark == DTRAIN__WORK_MARK)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s", call,
                        mark == DTRAIN__GONE
                            ? "the group of this handle was destroyed with its handles; wait before that"
                            : "this handle was waited for before, which freed it; wait once");
}

/* Waits for work until until_ns. Returns its result and frees it; *ended = 0: it is still under way. */
static dtrain_status dtrain__work_end(dtrain_work *work, int64_t until_ns, int *ended)
{
    dtrain_status status = dtrain__work_alive(work, "work_wait");
    int64_t started;
    *ended = 1;
    if (status != DTRAIN_OK)
        return status;
    dtrain_comm *comm = work->comm;
    if (!comm->plane->in_process && (status = dtrain__work_usable(comm, "work_wait")) != DTRAIN_OK)
        return status;
    started = dtrain__os_now_ns();
    dtrain__work_help(work, until_ns);
    dtrain__work_blocked_in(comm, dtrain__os_now_ns() - started);
    *ended = dtrain_work_done(work);
    if (!*ended)
        return DTRAIN_OK;
    status = dtrain__report(&work->op.error);
    if (status != DTRAIN_OK)
        comm->error = work->op.error;
    comm->waited_ns[0] = work->op.run_ns;
    comm->waited_ns[1] = work->op.ended_ns;
    dtrain__os_lock(&comm->queue.mutex);
    DTRAIN__ATOMIC_STORE(&work->mark, 0, RELAXED);
    work->next = comm->queue.spare;
    comm->queue.spare = work;
    dtrain__os_unlock(&comm->queue.mutex);
    return status;
}

DTRAIN_API DTRAIN__NOINLINE dtrain_status dtrain_work_wait(dtrain_work *work)
{
    int ended;
    if (work == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "work_wait: the handle is NULL; check the status of the call that makes it");
    return dtrain__work_end(work, INT64_MAX, &ended);
}

/* Waits for a work, if there is one, and forgets it. */
static dtrain_status dtrain__work_settle(dtrain_work **work)
{
    dtrain_work *pending = *work;
    *work = NULL;
    return pending != NULL ? dtrain_work_wait(pending) : DTRAIN_OK;
}

/* It may run beside another call of the group, so the group's error text stays as it is. */
DTRAIN_API dtrain_status dtrain_comm_abort(dtrain_comm *comm, const char *why)
{
    dtrain__error cause, kept = dtrain__thread_error;
    if (dtrain__group_alive(comm, "comm_abort") != DTRAIN_OK ||
        dtrain__group_ours(comm, NULL, "comm_abort") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    dtrain__fail(&cause, DTRAIN_ERR_ABORTED, "rank %d aborted the group: %.300s", comm->rank,
                 why != NULL && why[0] != 0 ? why : "it gave no reason");
    dtrain__thread_error = kept;
    dtrain__group_break(comm, &cause);
    return DTRAIN_OK;
}

/* Drives the queue. A peer answers within microseconds if it polls at the same time, so once something has moved this
 * looks again for a while. A yield could last longer than the budget. */
static void dtrain__work_drive(dtrain_comm *comm, int64_t until, int64_t patience_ns)
{
    int64_t now, awake = 0;
    do {
        if (!dtrain__os_try_lock(&comm->queue.drive)) /* a call in another group of this rank drives it */
            return;
        int moved = dtrain__queue_drive(comm, until);
        dtrain__os_unlock(&comm->queue.drive);
        dtrain__os_pause();
        now = dtrain__os_now_ns();
        awake = moved ? now + patience_ns : awake;
    } while (now < until && now < awake && DTRAIN__ATOMIC_LOAD(&comm->queue.pending, SEQ_CST) > 0);
}

DTRAIN_API dtrain_status dtrain_comm_poll(dtrain_comm *comm, int64_t budget_us)
{
    int64_t until, now;
    if (comm != NULL && dtrain__group_alive(comm, "comm_poll") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (comm == NULL || comm->desc.progress != DTRAIN_PROGRESS_POLL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_poll: the group needs progress = DTRAIN_PROGRESS_POLL in its desc");
    if (dtrain__group_ours(comm, &comm->error, "comm_poll") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    now = dtrain__os_now_ns();
    until = now + (budget_us < 0 ? 0 : budget_us < INT64_MAX / 4000 ? budget_us * 1000 : INT64_MAX / 4);
    if (comm->transport.poll != NULL)
        comm->transport.poll(comm->transport.self, 0);
    dtrain__work_drive(comm, until, (until - now) / 4);
    return DTRAIN_OK;
}

/* Notes a call for fuse_end. Its buffers and arrays belong to the fuse until then. */
static dtrain_status dtrain__work_note(dtrain_comm *comm, const dtrain__op *op)
{
    void *notes = dtrain__memory_grow(comm->allocator, comm->fuse.notes, sizeof *comm->fuse.notes, comm->fuse.noted, 2);
    if (notes == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory to fuse %zu calls", comm->rank,
                            comm->fuse.noted + 1);
    comm->fuse.notes = (dtrain__note *)notes;
    for (int receives = 0; receives < 2; receives++) { /* an exchange becomes a send and a recv */
        dtrain__note *note = &comm->fuse.notes[comm->fuse.noted];
        int splits = op->kind == DTRAIN__EXCHANGE, peer = receives ? op->from : op->root;
        if (splits ? peer < 0 : receives)
            continue;
        memcpy(&note->op, op, offsetof(dtrain__op, error));
        note->op.error.status = DTRAIN_OK;
        note->op.kind = !splits ? op->kind : receives ? DTRAIN__RECV : DTRAIN__SEND;
        note->op.root = peer;
        note->op.count = splits && receives ? op->in_count : op->count;
        note->op.in_count = 0;
        note->work = NULL;
        comm->fuse.noted++;
    }
    return DTRAIN_OK;
}

/* As dtrain__work_call, on the one thread that is in a call of the group. */
static dtrain_status dtrain__work_do(dtrain_comm *comm, dtrain__op *op, dtrain_work **work)
{
    dtrain_status status = dtrain__work_begin(comm, op);
    dtrain_work *queued = NULL;
    int64_t now;
    if (status != DTRAIN_OK)
        return status;
    op->async = work != NULL;
    if (comm->fuse.open && work != NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s_async on rank %d: calls between fuse_begin and fuse_end cannot be asynchronous; call "
                            "fuse_end first",
                            dtrain__op_kind_name(op->kind), comm->rank);
    if (comm->fuse.open)
        return dtrain__work_note(comm, op);
    int waits = work != NULL || DTRAIN__ATOMIC_LOAD(&comm->queue.pending, SEQ_CST) > 0;
    if (waits || !dtrain__fused_posts_first(comm, op))
        dtrain__op_clock(comm, op);
    if (work != NULL)
        return dtrain__work_enqueue(comm, op, work);
    if (waits) {
        status = dtrain__work_enqueue(comm, op, &queued);
        return status != DTRAIN_OK ? status : dtrain_work_wait(queued);
    }
    DTRAIN__ATOMIC_STORE(&comm->watch.running, op, RELEASE);
    dtrain__queue_run(comm, op, NULL, INT64_MAX);
    DTRAIN__ATOMIC_STORE(&comm->watch.running, (const dtrain__op *)NULL, RELEASE);
    now = dtrain__os_now_ns();
    if (op->started_ns == 0) /* the group was broken, so it was not posted */
        op->started_ns = now;
    dtrain__queue_ended(comm, op, now);
    dtrain__work_blocked_in(comm, now - op->started_ns);
    if (op->error.status != DTRAIN_OK)
        comm->error = op->error;
    return dtrain__report(&op->error);
}

/* Runs a call to its end (work NULL), or starts it; inside a fuse notes it. */
static dtrain_status dtrain__work_call(dtrain_comm *comm, dtrain__op *op, dtrain_work **work)
{
    const char *name = dtrain__op_kind_name(op->kind);
    int entered;
    if (work != NULL)
        *work = NULL;
    dtrain_status status = dtrain__group_enter(comm, name, &entered);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__work_do(comm, op, work);
    dtrain__group_exit(comm, entered);
    return status;
}

DTRAIN__FAST_END
#endif
