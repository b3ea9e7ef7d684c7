/* ---- >>comm_core ----
 * Making and leaving groups, the queue of asynchronous work, and the threads that drive it. A call runs on
 * its own thread when nothing is queued; otherwise it queues and waits, so that operations of one group run
 * one after another in the order of their calls. Whoever drives a queue holds the group's drive_mutex.
 * One service thread serves all groups of a world that this process has: those of its family of boards, those of
 * its hub; a transport of the user's own has one of its own. */
#ifndef DTRAIN__COMM
#define DTRAIN__COMM
#include "op.c"
#include "fused.c"
#include "message.c"
#include "recorder.c"
#include "trace.c"

#define DTRAIN__SERVICE_SLICE_NS 1000000 /* of one group, before the next one's turn */

struct dtrain__service {
    dtrain__os_thread thread;
    dtrain__hub *hub;            /* of groups of processes; else NULL */
    dtrain_transport *transport; /* of the user's own that wants to be polled; else NULL */
    dtrain__bell *bell;          /* of whatever has no hub */
    dtrain_allocator *allocator;
    pthread_mutex_t mutex; /* guards comms; taken before a drive_mutex */
    dtrain_comm *comms;
    uint32_t stop;
};

static int dtrain__comm_fused(const dtrain__op *op)
{
    return op->algorithm == DTRAIN_ALGORITHM_FUSED;
}

/* Advances one operation; returns 1 at its end. wait_ns: INT64_MAX, the caller does nothing else until the end;
 * 0, what goes at once; else until about then. */
static int dtrain__comm_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    int64_t slice = wait_ns;
    if (dtrain__comm_fused(op)) {
        int ended = dtrain__fused_advance(comm, op, wait_ns);
        if (!ended)
            dtrain__recorder_start(comm, op);
        return ended;
    }
    if (wait_ns == INT64_MAX) {
        /* In slices, so that the log can say who is awaited long before the deadline. */
        int64_t now = dtrain__os_now_ns();
        slice = now + 100000000 < op->deadline_ns ? now + 100000000 : op->deadline_ns;
    } else if (comm->transport.board != NULL)
        slice = 0; /* other ranks' queues are driven on this thread as well */
    return dtrain__message_advance(comm, op, slice);
}

static int dtrain__comm_expire(dtrain_comm *comm, dtrain__op *op)
{
    return dtrain__comm_fused(op) ? dtrain__fused_expire(comm, op) : dtrain__message_expire(comm, op);
}

/* Keeps what became of an operation; a failure is written to its file by the thread that met it. */
static void dtrain__comm_ended(dtrain_comm *comm, dtrain__op *op, int64_t now)
{
    dtrain__recorder_end(comm, op, now);
    if (op->error.status != DTRAIN_OK)
        dtrain__trace_failure(comm, op);
}

typedef struct dtrain__comm_wait {
    dtrain_comm *comm;
    dtrain__op *op;
    int ended;
} dtrain__comm_wait;

static int dtrain__comm_ready(void *pointer)
{
    dtrain__comm_wait *wait = (dtrain__comm_wait *)pointer;
    wait->ended = dtrain__comm_advance(wait->comm, wait->op, INT64_MAX);
    return wait->ended;
}

/* Runs one operation to its end on the calling thread. */
static void dtrain__comm_run(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__comm_wait wait = {comm, op, 0};
    int phase = op->phase;
    size_t at = op->at;
    for (unsigned turn = 0; !dtrain__comm_ready(&wait); turn++) {
        if (op->phase != phase || op->at != at)
            turn = 0;
        phase = op->phase;
        at = op->at;
        if ((turn > comm->bell->spins || !dtrain__comm_fused(op)) && dtrain__op_late(comm, op) &&
            dtrain__comm_expire(comm, op))
            return;
        if (dtrain__comm_fused(op))
            dtrain__bell_wait(comm->bell, turn, op->deadline_ns, dtrain__comm_ready, &wait);
        if (wait.ended)
            return;
    }
}

static dtrain_work *dtrain__queue_head(dtrain_comm *comm)
{
    pthread_mutex_lock(&comm->queue_mutex);
    dtrain_work *work = comm->head;
    pthread_mutex_unlock(&comm->queue_mutex);
    return work;
}

/* Takes the head off the queue and makes its result visible; the handle may be gone right after. */
static void dtrain__queue_finish(dtrain_comm *comm, dtrain_work *work)
{
    dtrain__comm_ended(comm, &work->op, dtrain__os_now_ns());
    pthread_mutex_lock(&comm->queue_mutex);
    comm->head = work->next;
    if (comm->head == NULL)
        comm->tail = NULL;
    pthread_mutex_unlock(&comm->queue_mutex);
    __atomic_sub_fetch(&comm->pending, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&work->done, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(comm->bell);
}

/* A number that changes whenever the operation gets on. */
static size_t dtrain__op_progress(const dtrain__op *op)
{
    return (size_t)op->phase + op->at + op->send_at + op->sent + op->received;
}

/* Advances queued work until until_ns or nothing moves; the caller holds drive_mutex. Returns whether anything did. */
static int dtrain__comm_drive(dtrain_comm *comm, int64_t until_ns)
{
    int moved = 0;
    dtrain_work *work;
    while ((work = dtrain__queue_head(comm)) != NULL) {
        size_t before = dtrain__op_progress(&work->op);
        int ended = dtrain__comm_advance(comm, &work->op, until_ns);
        if (!ended && dtrain__op_late(comm, &work->op))
            ended = dtrain__comm_expire(comm, &work->op);
        moved |= ended || dtrain__op_progress(&work->op) != before;
        if (!ended)
            break;
        dtrain__queue_finish(comm, work);
        if (until_ns != 0 && until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            break;
        if (until_ns == 0 && comm->poll_until_ns > 0 && dtrain__os_now_ns() >= comm->poll_until_ns)
            break;
    }
    return moved;
}

/* Advances queued work until until_ns without waiting for a peer; the caller holds drive_mutex. */
static int dtrain__comm_drive_within(dtrain_comm *comm, int64_t until_ns)
{
    int moved = 0;
    comm->poll_until_ns = until_ns;
    while (dtrain__comm_drive(comm, comm->transport.board != NULL ? until_ns : 0)) {
        moved = 1;
        if (dtrain__os_now_ns() >= until_ns)
            break;
    }
    return moved;
}

/* One round over the groups that nobody else is driving. */
static int dtrain__service_round(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    int moved = __atomic_load_n(&service->stop, __ATOMIC_SEQ_CST) != 0;
    pthread_mutex_lock(&service->mutex);
    for (dtrain_comm *comm = service->comms; comm != NULL; comm = comm->next_served) {
        if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) == 0 || pthread_mutex_trylock(&comm->drive_mutex) != 0)
            continue;
        int messages = comm->transport.board == NULL;
        moved |= dtrain__comm_drive(comm, dtrain__os_now_ns() + (messages ? DTRAIN__MESSAGE_SLICE_NS : 1000000));
        moved |= messages && comm->pending > 0;
        pthread_mutex_unlock(&comm->drive_mutex);
    }
    pthread_mutex_unlock(&service->mutex);
    return moved;
}

/* Advances all groups of the hub without waiting for a peer. Returns for how long there is nothing to do unless
 * something comes. */
static int64_t dtrain__service_drive(dtrain__service *service)
{
    int64_t span = 1000000000;
    pthread_mutex_lock(&service->mutex);
    for (dtrain_comm *comm = service->comms; comm != NULL; comm = comm->next_served) {
        int64_t most = 50000000; /* deadlines are looked at */
        dtrain__socket_rest(comm->socket);
        if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) == 0)
            continue;
        if (pthread_mutex_trylock(&comm->drive_mutex) != 0) {
            most = 1000000; /* whoever drives it may leave work behind */
        } else {
            if (dtrain__comm_drive_within(comm, dtrain__os_now_ns() + DTRAIN__SERVICE_SLICE_NS))
                most = 0;
            pthread_mutex_unlock(&comm->drive_mutex);
        }
        span = most < span ? most : span;
    }
    pthread_mutex_unlock(&service->mutex);
    return span;
}

/* Looks after the connections of a group over a transport of the user's own, and drives its queue. */
static void dtrain__service_tend(dtrain__service *service)
{
    dtrain_transport *transport = service->transport;
    while (!__atomic_load_n(&service->stop, __ATOMIC_SEQ_CST)) {
        dtrain_comm *comm = __atomic_load_n(&service->comms, __ATOMIC_SEQ_CST);
        int pending = comm != NULL && __atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0;
        int driven = pending && pthread_mutex_trylock(&comm->drive_mutex) == 0;
        if (driven) {
            dtrain__comm_drive(comm, dtrain__os_now_ns() + DTRAIN__MESSAGE_SLICE_NS);
            pthread_mutex_unlock(&comm->drive_mutex);
        }
        transport->poll(transport->self, driven ? 0 : dtrain__os_now_ns() + (pending ? 1000000 : 1000000000));
    }
}

static void dtrain__service_main(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    while (service->hub != NULL && !__atomic_load_n(&service->stop, __ATOMIC_SEQ_CST)) {
        int64_t span = dtrain__service_drive(service);
        dtrain__socket_step(service->hub, span > 0 ? dtrain__os_now_ns() + span : 0);
    }
    if (service->hub != NULL)
        return;
    if (service->transport != NULL) {
        dtrain__service_tend(service);
        return;
    }
    unsigned first = service->bell->spins + DTRAIN__WAIT_YIELDS - 10; /* yield a little, then sleep */
    for (unsigned turn = first; !__atomic_load_n(&service->stop, __ATOMIC_SEQ_CST); turn++) {
        if (dtrain__service_round(service))
            turn = first;
        dtrain__bell_wait(service->bell, turn, INT64_MAX, dtrain__service_round, service);
    }
}

static void dtrain__service_stop(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    __atomic_store_n(&service->stop, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(service->bell);
    if (service->hub != NULL)
        dtrain__hub_kick(service->hub);
    if (service->transport != NULL && service->transport->wake != NULL)
        service->transport->wake(service->transport->self);
    dtrain__os_thread_join(&service->thread);
    pthread_mutex_destroy(&service->mutex);
    dtrain__free(service->allocator, service, sizeof *service);
}

static dtrain_status dtrain__service_start(dtrain_comm *comm, dtrain__service **out)
{
    dtrain_allocator *allocator = comm->allocator;
    dtrain__board *board = comm->transport.board;
    dtrain__service *service = (dtrain__service *)dtrain__alloc(allocator, sizeof *service);
    if (service == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for a service thread", comm->rank);
    service->allocator = allocator;
    service->hub = comm->socket != NULL ? comm->socket->hub : NULL;
    service->bell = board != NULL ? &board->family->bell : service->hub == NULL ? comm->bell : NULL;
    service->transport = service->hub == NULL && comm->transport.poll != NULL ? &comm->transport : NULL;
    pthread_mutex_init(&service->mutex, NULL);
    int error = dtrain__os_thread_start(&service->thread, dtrain__service_main, service, (size_t)1 << 20);
    if (error == 0) {
        *out = service;
        return DTRAIN_OK;
    }
    pthread_mutex_destroy(&service->mutex);
    dtrain__free(allocator, service, sizeof *service);
    return dtrain__fail(&comm->error, DTRAIN_ERR_IO,
                        "rank %d: the system refused a service thread (%s); set progress to DTRAIN_PROGRESS_POLL to do "
                        "without",
                        comm->rank, strerror(error));
}

/* The service thread of the group's origin, started where there is none yet. */
static dtrain_status dtrain__service_find(dtrain_comm *comm, dtrain__service **out)
{
    dtrain__family *family = comm->transport.board != NULL ? comm->transport.board->family : NULL;
    dtrain__hub *hub = comm->socket != NULL ? comm->socket->hub : NULL;
    pthread_mutex_t *mutex;
    void **place;
    dtrain_status status = DTRAIN_OK;
    if (family == NULL && hub == NULL)
        return dtrain__service_start(comm, out);
    mutex = family != NULL ? &family->mutex : &hub->mutex;
    place = family != NULL ? &family->service : &hub->service;
    pthread_mutex_lock(mutex);
    if (*place == NULL)
        status = dtrain__service_start(comm, out);
    else
        *out = (dtrain__service *)*place;
    if (status == DTRAIN_OK) {
        *place = *out;
        *(family != NULL ? &family->last_gone : &hub->last_gone) = dtrain__service_stop;
    }
    pthread_mutex_unlock(mutex);
    return status;
}

/* Puts the group under a service thread, at the first asynchronous call. */
static dtrain_status dtrain__service_join(dtrain_comm *comm)
{
    dtrain__service *service;
    dtrain_status status = dtrain__service_find(comm, &service);
    if (status != DTRAIN_OK)
        return status;
    pthread_mutex_lock(&service->mutex);
    comm->next_served = service->comms;
    __atomic_store_n(&service->comms, comm, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&service->mutex);
    comm->service = service;
    return DTRAIN_OK;
}

static void dtrain__service_leave(dtrain_comm *comm)
{
    dtrain__service *service = comm->service;
    dtrain_comm **at;
    if (service == NULL)
        return;
    pthread_mutex_lock(&service->mutex);
    for (at = &service->comms; *at != comm;)
        at = &(*at)->next_served;
    __atomic_store_n(at, comm->next_served, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&service->mutex);
    if (comm->transport.board == NULL && comm->socket == NULL)
        dtrain__service_stop(service);
}

/* Groups of processes are not for a forked child, nor for a caller that has not waited for all ranks. */
static dtrain_status dtrain__comm_usable(dtrain_comm *comm, const char *call)
{
    int ready = 1;
    if (comm->process != getpid())
        return dtrain__fail(
            &comm->error, DTRAIN_ERR_INVALID,
            "%s: process %ld made this group, and this is its forked child %ld; make one after the fork", call,
            (long)comm->process, (long)getpid());
    if (comm->forming && dtrain_comm_ready(comm, &ready) != DTRAIN_OK)
        return comm->error.status;
    if (!ready)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s: the group is still forming; call it when dtrain_comm_ready says 1", call);
    return DTRAIN_OK;
}

static dtrain_status dtrain__comm_begin(dtrain_comm *comm, dtrain__op *op)
{
    dtrain_status status = dtrain__op_check(comm, op);
    if (status == DTRAIN_OK && comm->transport.board == NULL)
        status = dtrain__comm_usable(comm, dtrain__kind_name((uint64_t)op->kind));
    if (status != DTRAIN_OK)
        return status;
    op->algorithm = dtrain__plan_select(comm, op);
    op->awaited = -1;
    op->started_ns = dtrain__os_now_ns();
    op->deadline_ns =
        comm->desc.timeout_ms < 0 ? INT64_MAX : op->started_ns + dtrain__os_ms_to_ns(comm->desc.timeout_ms);
    return DTRAIN_OK;
}

static dtrain_status dtrain__comm_enqueue(dtrain_comm *comm, const dtrain__op *op, dtrain_work **out)
{
    dtrain_status status = DTRAIN_OK;
    if (comm->service == NULL && comm->desc.progress == DTRAIN_PROGRESS_THREAD)
        status = dtrain__service_join(comm);
    if (status != DTRAIN_OK)
        return status;
    pthread_mutex_lock(&comm->queue_mutex);
    dtrain_work *work = comm->spare;
    if (work != NULL)
        comm->spare = work->next;
    else
        work = (dtrain_work *)dtrain__alloc(comm->allocator, sizeof *work);
    if (work != NULL) {
        work->comm = comm;
        work->next = NULL;
        work->done = 0;
        work->op = *op;
        work->op.queued = 1;
        if (comm->tail != NULL)
            comm->tail->next = work;
        else
            comm->head = work;
        comm->tail = work;
        __atomic_add_fetch(&comm->pending, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&comm->queue_mutex);
    if (work == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for a work handle", comm->rank);
    dtrain__bell_ring(comm->bell);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    *out = work;
    return DTRAIN_OK;
}

DTRAIN_API int dtrain_work_done(const dtrain_work *work)
{
    return work == NULL || __atomic_load_n(&work->done, __ATOMIC_SEQ_CST) != 0;
}

static int dtrain__work_ready(void *pointer)
{
    return dtrain_work_done((const dtrain_work *)pointer);
}

/* Drives the queue on the calling thread until work has ended, or looks on while another thread does. */
static void dtrain__work_help(dtrain_work *work)
{
    dtrain_comm *comm = work->comm;
    unsigned turn = 0;
    while (!dtrain_work_done(work)) {
        if (pthread_mutex_trylock(&comm->drive_mutex) == 0) {
            dtrain_work *head;
            while (!dtrain_work_done(work) && (head = dtrain__queue_head(comm)) != NULL) {
                dtrain__comm_run(comm, &head->op);
                dtrain__queue_finish(comm, head);
            }
            pthread_mutex_unlock(&comm->drive_mutex);
        } else {
            dtrain__bell_wait(comm->bell, turn++, dtrain__os_now_ns() + 1000000, dtrain__work_ready, work);
        }
    }
}

DTRAIN_API dtrain_status dtrain_work_wait(dtrain_work *work)
{
    dtrain_status status;
    dtrain_comm *comm;
    int64_t started;
    if (work == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "work_wait: the handle is NULL; was its call checked?");
    comm = work->comm;
    if (comm->transport.board == NULL && (status = dtrain__comm_usable(comm, "work_wait")) != DTRAIN_OK)
        return status;
    started = dtrain__os_now_ns();
    dtrain__work_help(work);
    comm->blocked_ns += dtrain__os_now_ns() - started;
    status = dtrain__report(&work->op.error);
    if (status != DTRAIN_OK)
        comm->error = work->op.error;
    pthread_mutex_lock(&comm->queue_mutex);
    work->next = comm->spare;
    comm->spare = work;
    pthread_mutex_unlock(&comm->queue_mutex);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_poll(dtrain_comm *comm, int64_t budget_us)
{
    int64_t until;
    if (comm == NULL || comm->desc.progress != DTRAIN_PROGRESS_POLL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_poll: the group needs progress = DTRAIN_PROGRESS_POLL in its desc");
    if (comm->process != getpid())
        return dtrain__comm_usable(comm, "comm_poll");
    until = dtrain__os_now_ns() + (budget_us < 0 ? 0 : budget_us < INT64_MAX / 4000 ? budget_us * 1000 : INT64_MAX / 4);
    if (comm->transport.poll != NULL)
        comm->transport.poll(comm->transport.self, 0);
    pthread_mutex_lock(&comm->drive_mutex);
    dtrain__comm_drive_within(comm, until);
    pthread_mutex_unlock(&comm->drive_mutex);
    return DTRAIN_OK;
}

/* Runs a call to its end (work NULL), or starts it. */
static dtrain_status dtrain__comm_call(dtrain_comm *comm, dtrain__op *op, dtrain_work **work)
{
    dtrain_status status;
    dtrain_work *queued = NULL;
    int64_t now;
    if (work != NULL)
        *work = NULL;
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the group is NULL; was its creation checked?",
                            dtrain__kind_name((uint64_t)op->kind));
    status = dtrain__comm_begin(comm, op);
    if (status != DTRAIN_OK)
        return status;
    op->async = work != NULL;
    if (work != NULL)
        return dtrain__comm_enqueue(comm, op, work);
    if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0) {
        status = dtrain__comm_enqueue(comm, op, &queued);
        return status != DTRAIN_OK ? status : dtrain_work_wait(queued);
    }
    dtrain__comm_run(comm, op);
    now = dtrain__os_now_ns();
    dtrain__comm_ended(comm, op, now);
    comm->blocked_ns += now - op->started_ns;
    if (op->error.status != DTRAIN_OK)
        comm->error = op->error;
    return dtrain__report(&op->error);
}

#endif
