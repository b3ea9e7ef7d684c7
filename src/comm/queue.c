/* ---- >>queue ----
 * The queue of a group's works. Collectives run one after another in the order of their calls. The messages between two
 * of them move together. Whoever drives a queue holds the group's queue.drive: a waiting caller, a poll, or the service
 * thread. One service thread drives all groups of a world that this process has. With progress by poll a service has no
 * thread, and serves the groups of one rank. A call that waits then also drives what the rank has started in its other
 * groups. */
#ifndef DTRAIN__QUEUE
#define DTRAIN__QUEUE
#include "op.c"
#include "fused.c"
#include "message.c"
#include "meet.c"
#include "recorder.c"
#include "trace.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__SERVICE_SLICE_NS 1000000 /* of one group, before the next group's turn */
/* With progress by poll: how soon a call that waits looks at the rank's other groups again */
#define DTRAIN__SERVICE_AWAKE_NS 200000  /* without sleeping, after something has moved there */
#define DTRAIN__SERVICE_LOOK_NS 1000000  /* while something is under way there */
#define DTRAIN__SERVICE_IDLE_NS 10000000 /* while nothing is: another thread of the rank may start something */

struct dtrain__service {
    dtrain__os_thread thread;
    dtrain__origin *origin; /* the origin of its groups */
    dtrain__bell *bell;     /* what its thread waits for; NULL: its origin's step waits */
    dtrain_allocator *allocator;
    dtrain__os_mutex mutex; /* guards comms; taken before a queue.drive */
    dtrain_comm *comms;
    uint32_t stop;
};

/* Advances one operation; returns 1 at its end.
 *
 *   wait_ns   INT64_MAX: the caller does nothing else until the end; 0: do what needs no waiting; else until about then
 */
static int dtrain__queue_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    int ended;
    if (dtrain__op_is_fused(op) && comm->decided) {
        ended = dtrain__fused_advance(comm, op, wait_ns);
        if (!ended)
            dtrain__recorder_start(comm, op);
        return ended;
    }
    if (comm->plane->in_process && wait_ns != INT64_MAX && comm->desc.progress == DTRAIN_PROGRESS_THREAD) {
        wait_ns = 0; /* this thread drives other ranks' queues as well */
    } else if (wait_ns != 0) {
        /* in slices, so that the log can name the awaited rank long before the deadline, and an abort is seen */
        int64_t slice = dtrain__os_now_ns() + 100000000;
        slice = slice < op->deadline_ns ? slice : op->deadline_ns;
        wait_ns = wait_ns < slice ? wait_ns : slice;
    }
    if (op->phase == 0 && !comm->plane->in_process && !op->posted && !dtrain__op_is_message(op)) {
        if (!comm->decided && dtrain__plan_fuses(comm, op) && !dtrain__meet_advance(comm, op, wait_ns, &ended))
            return ended;
        op->algorithm = dtrain__plan_select(comm, op); /* it may have been chosen before that was known */
        if (dtrain__op_is_fused(op))
            return dtrain__queue_advance(comm, op, wait_ns);
    }
    return dtrain__message_advance(comm, op, wait_ns);
}

static int dtrain__queue_expire(dtrain_comm *comm, dtrain__op *op)
{
    if (!comm->decided && comm->meet != NULL && op->phase == 0 && dtrain__plan_fuses(comm, op))
        return dtrain__meet_expire(comm, op);
    if (dtrain__op_is_fused(op))
        return dtrain__fused_expire(comm, op);
    dtrain__recorder_expire(comm, op);
    return dtrain__message_fail(comm, op);
}

/* Records how an operation ended. The thread that met a failure writes it to its file. */
static void dtrain__queue_ended(dtrain_comm *comm, dtrain__op *op, int64_t now)
{
    op->ended_ns = now;
    dtrain__recorder_end(comm, op, now);
    if (op->error.status != DTRAIN_OK)
        dtrain__trace_failure(comm, op);
}

/* A number that changes whenever the operation makes progress. */
static size_t dtrain__queue_progress(const dtrain__op *op)
{
    return (size_t)op->phase + op->at + op->send_at + op->sent + op->received;
}

/* A rank waits for a peer's post. Returns 1 if that peer has sent it a message before: nobody receives it any more, and
 * a large one keeps its sender from the collective. */
static int dtrain__queue_crossed(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__message_header came;
    dtrain_transfer in = {op->awaited, (unsigned char *)&came, sizeof came, 0, 0};
    if (!dtrain__op_is_fused(op) || op->phase != DTRAIN__FUSED_GATHER || op->awaited < 0 ||
        comm->plane->untaken == NULL || comm->messages.missed != 0 ||
        comm->plane->untaken(comm->transport.self, op->awaited) < sizeof came ||
        dtrain__fused_arrived(comm, op, op->awaited)) /* else it may have sent it after the collective */
        return 0;
    if (dtrain__message_transfer(comm, NULL, &in, 0) != DTRAIN_OK || came.magic != DTRAIN__MESSAGE_MAGIC)
        return 0;
    if (dtrain__message_is_whole(comm, &came) && came.call.kind == DTRAIN__SEND &&
        dtrain__message_keep(comm, op, op->awaited, came.tag, &came, sizeof came))
        return 0; /* the operation misses that rank, too, and ends at the next look */
    dtrain__op_mismatch(comm, op, op->awaited, &came.call);
    dtrain__fused_break(comm, op);
    return 1;
}

/* Ends an operation whose deadline has passed, or that waits in vain. Returns 1 if it has ended. */
static int dtrain__queue_late(dtrain_comm *comm, dtrain__op *op)
{
    return dtrain__queue_crossed(comm, op) || (dtrain__recorder_late(comm, op) && dtrain__queue_expire(comm, op));
}

/* Advances one operation and checks its deadline; returns 1 at its end. Sets *moved if it made progress. */
static int dtrain__queue_turn(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns, int *moved)
{
    size_t before = dtrain__queue_progress(op);
    int ended = dtrain__queue_advance(comm, op, wait_ns);
    if (!ended)
        ended = dtrain__queue_late(comm, op);
    *moved |= ended || dtrain__queue_progress(op) != before;
    return ended;
}

/* Returns what is driven next: the first message under way, else the head of the queue. The caller holds queue.drive.
 */
static dtrain_work *dtrain__queue_head(dtrain_comm *comm)
{
    if (comm->queue.busy != NULL)
        return comm->queue.busy->first;
    dtrain__os_lock(&comm->queue.mutex);
    dtrain_work *work = comm->queue.head;
    dtrain__os_unlock(&comm->queue.mutex);
    return work;
}

/* Takes the head off the queue. The caller holds queue_mutex. */
static void dtrain__queue_pop(dtrain_comm *comm)
{
    comm->queue.head = comm->queue.head->next;
    if (comm->queue.head == NULL)
        comm->queue.tail = NULL;
}

/* Makes the result of a work visible: of the head if it is a collective, or of a message that is in no list. The handle
 * may be gone right afterwards. */
static void dtrain__queue_finish(dtrain_comm *comm, dtrain_work *work)
{
    dtrain__queue_ended(comm, &work->op, dtrain__os_now_ns());
    if (!dtrain__op_is_one_way(&work->op)) {
        dtrain__os_lock(&comm->queue.mutex);
        dtrain__queue_pop(comm);
        dtrain__os_unlock(&comm->queue.mutex);
    }
    DTRAIN__ATOMIC_SUB(&comm->queue.pending, 1, SEQ_CST);
    DTRAIN__ATOMIC_STORE(&work->done, 1, SEQ_CST);
    dtrain__bell_ring(comm->bell);
}

/* Puts a direction that has messages behind the others. */
static void dtrain__queue_busy(dtrain_comm *comm, dtrain__direction *direction)
{
    direction->next = NULL;
    *comm->queue.busy_end = direction;
    comm->queue.busy_end = &direction->next;
}

/* Moves the messages before the next collective to their directions, so that no step depends on how many there are. */
static void dtrain__queue_deal(dtrain_comm *comm)
{
    dtrain_work *work;
    dtrain__os_lock(&comm->queue.mutex);
    while ((work = comm->queue.head) != NULL && dtrain__op_is_one_way(&work->op)) {
        dtrain__direction *direction = dtrain__group_direction(comm, work->op.root, work->op.kind == DTRAIN__SEND);
        dtrain__queue_pop(comm);
        work->next = NULL;
        if (direction->first != NULL) {
            direction->last->next = work;
        } else {
            direction->first = work;
            dtrain__queue_busy(comm, direction);
        }
        direction->last = work;
    }
    dtrain__os_unlock(&comm->queue.mutex);
}

/* Takes the first message of the busy direction *at off its list. The other directions come before its next one. */
static void dtrain__queue_next(dtrain_comm *comm, dtrain__direction **at)
{
    dtrain__direction *direction = *at;
    direction->first = direction->first->next;
    *at = direction->next;
    if (*at == NULL)
        comm->queue.busy_end = at;
    if (direction->first != NULL)
        dtrain__queue_busy(comm, direction);
}

/* The messages of a queue that are under way together. */
typedef struct dtrain__queue_look {
    dtrain__op *out; /* the first outgoing one; NULL: none */
    dtrain_work *in; /* the first incoming one; NULL: none */
    int others;      /* how many others there are */
    int moved, finished;
} dtrain__queue_look;

/* Advances the messages from head to the next collective without waiting, and takes those off that have ended. For each
 * peer and direction only the first one moves. So messages that cross get past each other, whatever was queued first.
 * Stops at until_ns once one has moved. */
static dtrain__queue_look dtrain__queue_sweep(dtrain_comm *comm, int64_t until_ns)
{
    dtrain__queue_look sweep = {NULL, NULL, 0, 0, 0};
    dtrain__direction **at = &comm->queue.busy;
    dtrain__queue_deal(comm);
    while (*at != NULL) {
        dtrain_work *work = (*at)->first;
        int sends = work->op.kind == DTRAIN__SEND;
        if (sweep.moved && until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            break;
        if (work->ended || dtrain__queue_turn(comm, &work->op, 0, &sweep.moved)) {
            dtrain__queue_next(comm, at);
            dtrain__queue_finish(comm, work);
            sweep.finished = 1;
            continue;
        }
        at = &(*at)->next;
        if (sends && sweep.out == NULL)
            sweep.out = &work->op;
        else if (!sends && sweep.in == NULL)
            sweep.in = work;
        else
            sweep.others++;
    }
    return sweep;
}

/* Advances a queue whose head is a message, until one has ended or until until_ns (0: what needs no waiting). Returns
 * whether one has, and so is off the queue: the head or another. Between ranks of one address space it never waits: the
 * caller waits, for the bell. */
static int dtrain__queue_messages(dtrain_comm *comm, dtrain_work *head, int64_t until_ns, int *moved)
{
    for (;;) {
        dtrain__queue_look sweep = dtrain__queue_sweep(comm, until_ns != 0 ? until_ns : comm->poll_until_ns);
        int64_t now, slice;
        int crowded, alone = comm->transport.exchange == NULL && sweep.out != NULL && sweep.in != NULL;
        *moved |= sweep.moved;
        if (sweep.finished || comm->plane->in_process || until_ns == 0 || (now = dtrain__os_now_ns()) >= until_ns)
            return sweep.finished;
        /* there is more than one call of the transport can wait for */
        crowded = sweep.others > 0 || alone;
        if (sweep.moved && crowded)
            continue;
        slice = now + (crowded ? 1000000 : 100000000);
        slice = slice < until_ns ? slice : until_ns;
        /* waits for the first message out and the first in, or for the head alone; then the others get their turn */
        dtrain__op *out = alone && sweep.out != &head->op ? NULL : sweep.out;
        dtrain__op *in = sweep.in == NULL || (alone && out != NULL) ? NULL : &sweep.in->op;
        if (dtrain__message_pair(comm, out, in, slice))
            sweep.in->ended = 1;
    }
}

typedef struct dtrain__queue_call {
    dtrain_comm *comm;
    dtrain__op *op;
    dtrain_work *message; /* the queue's head, if that is a message */
    int64_t until_ns;
    int ended, moved;
} dtrain__queue_call;

static int dtrain__queue_ready(void *pointer)
{
    dtrain__queue_call *wait = (dtrain__queue_call *)pointer;
    wait->moved = 0;
    wait->ended = wait->message != NULL
                      ? dtrain__queue_messages(wait->comm, wait->message, wait->until_ns, &wait->moved)
                      : dtrain__queue_advance(wait->comm, wait->op, wait->until_ns);
    return wait->ended;
}

/* Advances queued work until until_ns, or until nothing moves, without waiting for a peer. The caller holds
 * queue.drive. Returns whether anything moved. */
static int dtrain__queue_drive(dtrain_comm *comm, int64_t until_ns)
{
    int in_process = comm->plane->in_process;
    int64_t slice_ns = in_process ? until_ns : 0;
    int any = 0;
    dtrain_work *work;
    comm->poll_until_ns = until_ns;
    while ((work = dtrain__queue_head(comm)) != NULL) {
        int ended, moved = 0, others = in_process && !dtrain__op_is_fused(&work->op);
        if (dtrain__op_is_one_way(&work->op)) {
            ended = dtrain__queue_messages(comm, work, slice_ns, &moved);
        } else { /* between ranks of one address space this thread drives other ranks' queues as well */
            ended = dtrain__queue_turn(comm, &work->op, others ? 0 : slice_ns, &moved);
            if (ended)
                dtrain__queue_finish(comm, work);
        }
        any |= ended || moved;
        if ((!ended && !moved) || dtrain__os_now_ns() >= until_ns)
            break;
    }
    return any;
}

/* Drives the queue of a group that another call waits beside, unless another thread drives it. Returns whether anything
 * moved. Sets *left if more is queued. */
static int dtrain__queue_lend(dtrain_comm *other, int64_t until_ns, int *left)
{
    int moved = 0;
    if (DTRAIN__ATOMIC_LOAD(&other->queue.pending, SEQ_CST) == 0 || !dtrain__os_try_lock(&other->queue.drive))
        return 0;
    /* pending work stays pending now; in a group with none, a call may run that takes no lock */
    if (DTRAIN__ATOMIC_LOAD(&other->queue.pending, SEQ_CST) > 0) {
        int64_t slice_ns = dtrain__os_now_ns() + DTRAIN__SERVICE_SLICE_NS;
        dtrain__error kept = dtrain__thread_error;
        moved = dtrain__queue_drive(other, slice_ns < until_ns ? slice_ns : until_ns);
        dtrain__thread_error = kept;
    }
    dtrain__os_unlock(&other->queue.drive);
    *left |= DTRAIN__ATOMIC_LOAD(&other->queue.pending, SEQ_CST) > 0;
    return moved;
}

/* With progress by poll: drives what the rank has started in other groups than the one that the caller waits in,
 * without waiting there. Returns how long the caller may wait in its own: not at all until *awake_ns, which is set
 * again whenever something moves. */
static int64_t dtrain__queue_help(dtrain_comm *comm, int64_t until_ns, int64_t *awake_ns)
{
    dtrain__service *service = comm->desc.progress == DTRAIN_PROGRESS_POLL ? comm->service : NULL;
    int left = 0, moved = 0;
    if (service == NULL)
        return INT64_MAX;
    if (!dtrain__os_try_lock(&service->mutex)) /* another thread of the rank does this, and may end sooner */
        return DTRAIN__SERVICE_LOOK_NS;
    for (dtrain_comm *other = service->comms; other != NULL; other = other->next_served)
        if (other != comm)
            moved |= dtrain__queue_lend(other, until_ns, &left);
    dtrain__os_unlock(&service->mutex);
    if (!left)
        return DTRAIN__SERVICE_IDLE_NS;
    if (moved)
        *awake_ns = dtrain__os_now_ns() + DTRAIN__SERVICE_AWAKE_NS;
    return dtrain__os_now_ns() < *awake_ns ? 0 : DTRAIN__SERVICE_LOOK_NS;
}

/* Runs one operation on the calling thread to its end, or until until_ns (INT64_MAX: no limit): then returns 0.
 * message: as in dtrain__queue_call. */
static int dtrain__queue_run(dtrain_comm *comm, dtrain__op *op, dtrain_work *message, int64_t until_ns)
{
    dtrain__queue_call wait = {comm, op, message, until_ns, 0, 0};
    int64_t awake_ns = 0;
    int in_process = comm->plane->in_process;
    size_t progress = dtrain__queue_progress(op);
    for (unsigned turn = 0;; turn++) {
        int64_t span = INT64_MAX, soon = INT64_MAX; /* then this rank's other groups are looked at again */
        int fused = dtrain__op_is_fused(op), bell = fused || (message != NULL && in_process);
        unsigned spins = fused && !in_process ? DTRAIN__FUSED_LOOKS : comm->bell->spins;
        if (turn >= spins || !bell)
            span = dtrain__queue_help(comm, until_ns, &awake_ns);
        if (span != INT64_MAX)
            soon = dtrain__os_now_ns() + span;
        wait.until_ns = bell || until_ns < soon ? until_ns : soon;
        if (dtrain__queue_ready(&wait))
            return 1;
        if (wait.moved || dtrain__queue_progress(op) != progress)
            turn = 0;
        progress = dtrain__queue_progress(op);
        if (turn > spins || !bell) {
            if (message == NULL && dtrain__queue_late(comm, op))
                return 1;
            if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
                return 0;
        }
        int64_t limit = until_ns < op->deadline_ns ? until_ns : op->deadline_ns;
        limit = limit < soon ? limit : soon;
        if (span == 0)
            dtrain__os_yield();
        else if (dtrain__op_is_fused(op) && !in_process)
            turn = dtrain__fused_wait(comm, turn, limit, dtrain__queue_ready, &wait);
        else if (bell || (in_process && until_ns != INT64_MAX &&
                          comm->desc.progress == DTRAIN_PROGRESS_THREAD)) /* dtrain__queue_advance does not wait then */
            dtrain__bell_wait(comm->bell, turn, limit, dtrain__queue_ready, &wait);
        if (wait.ended)
            return 1;
    }
}

DTRAIN__FAST_END

/* ---- the service ---- */

/* The service thread holds queue.drive and will sleep. Returns 1 if it must look once more before. */
static int dtrain__queue_doze(dtrain_comm *comm)
{
    dtrain_work *head = dtrain__queue_head(comm);
    return head != NULL && dtrain__op_is_fused(&head->op) && !comm->plane->in_process && dtrain__fused_doze(comm);
}

/* Advances all groups without waiting for a peer. Returns how long there is nothing to do unless something comes. */
static int64_t dtrain__service_drive(dtrain__service *service)
{
    int64_t span = 1000000000;
    dtrain__os_lock(&service->mutex);
    for (dtrain_comm *comm = service->comms; comm != NULL; comm = comm->next_served) {
        int64_t most = 50000000; /* then deadlines are checked */
        if (comm->plane->rest != NULL)
            comm->plane->rest(comm->transport.self);
        if (DTRAIN__ATOMIC_LOAD(&comm->queue.pending, SEQ_CST) == 0)
            continue;
        if (!dtrain__os_try_lock(&comm->queue.drive)) {
            most = 1000000; /* whoever drives it may leave work behind */
        } else {
            if (dtrain__queue_drive(comm, dtrain__os_now_ns() + DTRAIN__SERVICE_SLICE_NS) || dtrain__queue_doze(comm))
                most = 0;
            dtrain__os_unlock(&comm->queue.drive);
        }
        span = most < span ? most : span;
    }
    dtrain__os_unlock(&service->mutex);
    return span;
}

static int dtrain__service_round(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    return DTRAIN__ATOMIC_LOAD(&service->stop, SEQ_CST) != 0 || dtrain__service_drive(service) == 0;
}

static void dtrain__service_main(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    dtrain__origin *origin = service->origin;
    for (unsigned turn = 0; !DTRAIN__ATOMIC_LOAD(&service->stop, SEQ_CST); turn++) {
        int64_t span = dtrain__service_drive(service);
        turn = span > 0 ? turn : 0;
        if (origin->step != NULL)
            origin->step(origin, span > 0 ? dtrain__os_now_ns() + span : 0);
        else /* yields a few times, then sleeps */
            dtrain__bell_wait(service->bell, service->bell->spins + DTRAIN__BELL_YIELDS - 10 + turn, INT64_MAX,
                              dtrain__service_round, service);
    }
}

static void dtrain__service_free(dtrain__service *service)
{
    dtrain__os_mutex_free(&service->mutex);
    dtrain__free(service->allocator, service);
}

static void dtrain__service_stop(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    DTRAIN__ATOMIC_STORE(&service->stop, 1, SEQ_CST);
    dtrain__bell_ring(service->bell);
    if (service->origin->kick != NULL)
        service->origin->kick(service->origin);
    dtrain__os_thread_join(&service->thread);
    dtrain__service_free(service);
}

/* Makes a service without a thread. */
static dtrain_status dtrain__service_new(dtrain_comm *comm, dtrain__service **out)
{
    dtrain__service *service = (dtrain__service *)dtrain__alloc(comm->allocator, sizeof *service);
    *out = service;
    if (service == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for the %zu bytes of its service",
                            comm->rank, sizeof *service);
    service->allocator = comm->allocator;
    dtrain__os_mutex_init(&service->mutex);
    return DTRAIN_OK;
}

static void dtrain__service_add(dtrain__service *service, dtrain_comm *comm)
{
    dtrain__os_lock(&service->mutex);
    comm->next_served = service->comms;
    DTRAIN__ATOMIC_STORE(&service->comms, comm, SEQ_CST);
    dtrain__os_unlock(&service->mutex);
    comm->service = service;
}

/* Starts the service thread of the group's origin. The caller holds the origin's mutex. */
static dtrain_status dtrain__service_start(dtrain_comm *comm)
{
    dtrain__origin *origin = comm->origin;
    dtrain__service *service;
    dtrain_status status = dtrain__service_new(comm, &service);
    if (status != DTRAIN_OK)
        return status;
    service->origin = origin;
    service->bell = origin->bell;
    int error = dtrain__os_thread_start(&service->thread, dtrain__service_main, service, (size_t)1 << 20);
    if (error != 0) {
        dtrain__service_free(service);
        return dtrain__fail(&comm->error, DTRAIN_ERR_IO,
                            "rank %d: the system refused a service thread (%s; see ulimit -u and pids.max); set "
                            "progress to DTRAIN_PROGRESS_POLL "
                            "to do without",
                            comm->rank, dtrain__os_error_text(error));
    }
    origin->service = service;
    origin->last_gone = dtrain__service_stop;
    return DTRAIN_OK;
}

/* Puts the group under the service thread of its origin: of processes when it is made, of threads at the first
 * asynchronous call. */
static dtrain_status dtrain__service_join(dtrain_comm *comm)
{
    dtrain__origin *origin = comm->origin;
    dtrain__os_lock(&origin->mutex);
    dtrain_status status = origin->service == NULL ? dtrain__service_start(comm) : DTRAIN_OK;
    dtrain__os_unlock(&origin->mutex);
    if (status == DTRAIN_OK)
        dtrain__service_add((dtrain__service *)origin->service, comm);
    return status;
}

/* With progress by poll: makes a service that this group shares with one that is about to be made from it. */
static dtrain_status dtrain__service_share(dtrain_comm *comm)
{
    dtrain__service *service;
    if (comm->desc.progress != DTRAIN_PROGRESS_POLL || comm->service != NULL)
        return DTRAIN_OK;
    dtrain_status status = dtrain__service_new(comm, &service);
    if (status == DTRAIN_OK)
        dtrain__service_add(service, comm);
    return status;
}

/* Takes the group from its service. A forked child has no service thread and no right to the lock, only its copy of the
 * list. */
static void dtrain__service_leave(dtrain_comm *comm, int forked)
{
    dtrain__service *service = comm->service;
    dtrain_comm **at;
    if (service == NULL || (forked && comm->desc.progress != DTRAIN_PROGRESS_POLL))
        return;
    if (!forked)
        dtrain__os_lock(&service->mutex);
    for (at = &service->comms; *at != comm;)
        at = &(*at)->next_served;
    DTRAIN__ATOMIC_STORE(at, comm->next_served, SEQ_CST);
    int last = service->comms == NULL;
    if (!forked)
        dtrain__os_unlock(&service->mutex);
    if (comm->desc.progress == DTRAIN_PROGRESS_POLL && last)
        dtrain__service_free(service);
}

#endif
