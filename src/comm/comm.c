/* ---- >>comm_core ----
 * Making and leaving groups, the queue of asynchronous work, and the threads that drive it. A call runs on
 * its own thread when nothing is queued; otherwise it queues and waits, so that operations of one group run
 * one after another in the order of their calls. Whoever drives a queue holds the group's drive_mutex.
 * One service thread serves all groups of a world that this process has: those of its family of boards, those of
 * its hub; a transport of the user's own has one of its own. With progress by poll a service has no thread and the
 * groups of one rank: a call that waits in one of them goes on with what was begun in the others. */
#ifndef DTRAIN__COMM
#define DTRAIN__COMM
#include "op.c"
#include "fused.c"
#include "message.c"
#include "recorder.c"
#include "trace.c"

#define DTRAIN__SERVICE_SLICE_NS 1000000 /* of one group, before the next one's turn */
/* With progress by poll, how soon a call that waits looks at the rank's other groups again */
#define DTRAIN__SERVICE_AWAKE_NS 200000  /* without sleeping, after something has moved there */
#define DTRAIN__SERVICE_LOOK_NS 1000000  /* where something is under way */
#define DTRAIN__SERVICE_IDLE_NS 10000000 /* where nothing is: another thread of the rank may begin it */

struct dtrain__service {
    dtrain__os_thread thread;
    dtrain__hub *hub;            /* of groups of processes; else NULL */
    dtrain_transport *transport; /* of the user's own that wants to be polled; else NULL */
    dtrain__bell *bell;          /* of whatever has no hub and a thread */
    dtrain_allocator *allocator;
    pthread_mutex_t mutex; /* guards comms; taken before a drive_mutex */
    dtrain_comm *comms;
    uint32_t stop;
};

static int dtrain__comm_fused(const dtrain__op *op)
{
    return op->algorithm == DTRAIN_ALGORITHM_FUSED;
}

/* Ends a cancelled operation. A message that has not begun ends alone: nobody knows of it, and the next one takes its
 * place. All else breaks the group. */
static int dtrain__comm_give_up(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__error cause;
    int message = dtrain__op_is_letter(op);
    if (op->phase == 0)
        dtrain__message_number(comm, op);
    dtrain__fail(&cause, DTRAIN_ERR_ABORTED, "rank %d cancelled %s", comm->rank, dtrain__op_text(comm, op).text);
    if (op->phase == 0 && (message || comm->size == 1)) {
        dtrain__fail(&op->error, DTRAIN_ERR_ABORTED, "%.600s before it began", cause.text);
        return 1;
    }
    dtrain__comm_break(comm, &cause);
    if (dtrain__comm_fused(op))
        return dtrain__fused_end_broken(comm, op);
    comm->broken = comm->broken.status == DTRAIN_OK ? cause : comm->broken;
    dtrain__op_blame(comm, op, &cause);
    return 1;
}

/* Advances one operation; returns 1 at its end. wait_ns: INT64_MAX, the caller does nothing else until the end;
 * 0, what goes at once; else until about then. */
static int dtrain__comm_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    if (__atomic_load_n(&op->cancelled, __ATOMIC_SEQ_CST))
        return dtrain__comm_give_up(comm, op);
    if (dtrain__comm_fused(op)) {
        int ended = dtrain__fused_advance(comm, op, wait_ns);
        if (!ended)
            dtrain__recorder_start(comm, op);
        return ended;
    }
    if (comm->transport.board != NULL && wait_ns != INT64_MAX && comm->desc.progress == DTRAIN_PROGRESS_THREAD) {
        wait_ns = 0; /* other ranks' queues are driven on this thread as well */
    } else if (wait_ns != 0) {
        /* In slices, so that the log can say who is awaited long before the deadline, and an abort is seen. */
        int64_t slice = dtrain__os_now_ns() + 100000000;
        slice = slice < op->deadline_ns ? slice : op->deadline_ns;
        wait_ns = wait_ns < slice ? wait_ns : slice;
    }
    return dtrain__message_advance(comm, op, wait_ns);
}

static int dtrain__comm_expire(dtrain_comm *comm, dtrain__op *op)
{
    return dtrain__comm_fused(op) ? dtrain__fused_expire(comm, op) : dtrain__message_expire(comm, op);
}

/* Keeps what became of an operation; a failure is written to its file by the thread that met it. */
static void dtrain__comm_ended(dtrain_comm *comm, dtrain__op *op, int64_t now)
{
    op->ended_ns = now;
    dtrain__recorder_end(comm, op, now);
    if (op->error.status != DTRAIN_OK)
        dtrain__trace_failure(comm, op);
}

/* A number that changes whenever the operation gets on. */
static size_t dtrain__op_progress(const dtrain__op *op)
{
    return (size_t)op->phase + op->at + op->send_at + op->sent + op->received;
}

/* Advances one operation and judges its deadline; returns 1 at its end. Sets *moved when it got on. */
static int dtrain__comm_turn(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns, int *moved)
{
    size_t before = dtrain__op_progress(op);
    int ended = dtrain__comm_advance(comm, op, wait_ns);
    if (!ended && dtrain__op_late(comm, op))
        ended = dtrain__comm_expire(comm, op);
    *moved |= ended || dtrain__op_progress(op) != before;
    return ended;
}

/* The messages of a queue that are under way together. */
typedef struct dtrain__sweep {
    dtrain__op *out; /* the first one that goes out; NULL: none */
    dtrain_work *in; /* the first one that comes in */
    int others;      /* how many more there are */
    int moved;
} dtrain__sweep;

/* Advances, without waiting, the messages from head to the next collective: of those to one peer the first, of those
 * from one peer the first. Crossing messages so get past each other, whatever was queued first. Stops at until_ns once
 * one has moved. */
static dtrain__sweep dtrain__queue_sweep(dtrain_comm *comm, dtrain_work *head, int64_t until_ns)
{
    dtrain__sweep sweep = {NULL, NULL, 0, 0};
    int taken = 0, lanes = 2 * (comm->size - 1);
    comm->sweep++;
    for (dtrain_work *work = head; work != NULL && dtrain__op_is_letter(&work->op) && taken < lanes;
         work = __atomic_load_n(&work->next, __ATOMIC_ACQUIRE)) {
        int sends = work->op.kind == DTRAIN__SEND;
        uint64_t *lane = &comm->lanes[2 * work->op.root + sends];
        if (work->ended || *lane == comm->sweep)
            continue;
        if (sweep.moved && until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            break;
        work->ended = dtrain__comm_turn(comm, &work->op, 0, &sweep.moved);
        if (work->ended)
            continue;
        *lane = comm->sweep;
        taken++;
        if (sends && sweep.out == NULL)
            sweep.out = &work->op;
        else if (!sends && sweep.in == NULL)
            sweep.in = work;
        else
            sweep.others++;
    }
    return sweep;
}

/* Waits until slice_ns for the first messages out and in; the others get their turn after that. */
static void dtrain__queue_wait(dtrain_comm *comm, dtrain_work *head, const dtrain__sweep *sweep, int64_t slice_ns)
{
    int moved = 0;
    if (comm->transport.exchange == NULL)
        head->ended = dtrain__comm_turn(comm, &head->op, slice_ns, &moved);
    else if (dtrain__message_pair(comm, sweep->out, sweep->in != NULL ? &sweep->in->op : NULL, slice_ns))
        sweep->in->ended = 1;
}

/* Advances the queue whose head is a message until that has ended, or until_ns (0: what goes at once). Where ranks
 * share an address space, it never waits: the caller does, for the bell. */
static int dtrain__queue_mail(dtrain_comm *comm, dtrain_work *head, int64_t until_ns, int *moved)
{
    for (;;) {
        dtrain__sweep sweep = dtrain__queue_sweep(comm, head, until_ns != 0 ? until_ns : comm->poll_until_ns);
        int64_t now, slice;
        int crowded;
        *moved |= sweep.moved;
        if (head->ended || comm->transport.board != NULL || until_ns == 0 || (now = dtrain__os_now_ns()) >= until_ns)
            return head->ended;
        /* more than one call of the transport can wait for */
        crowded = sweep.others > 0 || (comm->transport.exchange == NULL && sweep.out != NULL && sweep.in != NULL);
        if (sweep.moved && crowded)
            continue;
        slice = now + (crowded ? 1000000 : 100000000);
        dtrain__queue_wait(comm, head, &sweep, slice < until_ns ? slice : until_ns);
    }
}

typedef struct dtrain__comm_wait {
    dtrain_comm *comm;
    dtrain__op *op;
    dtrain_work *mail; /* the queue's head, where that is a message */
    int64_t until_ns;
    int ended, moved;
} dtrain__comm_wait;

static int dtrain__comm_ready(void *pointer)
{
    dtrain__comm_wait *wait = (dtrain__comm_wait *)pointer;
    wait->moved = 0;
    wait->ended = wait->mail != NULL ? dtrain__queue_mail(wait->comm, wait->mail, wait->until_ns, &wait->moved)
                                     : dtrain__comm_advance(wait->comm, wait->op, wait->until_ns);
    return wait->ended;
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

/* Advances queued work until until_ns or nothing moves; the caller holds drive_mutex. Returns whether anything did. */
static int dtrain__comm_drive(dtrain_comm *comm, int64_t until_ns)
{
    int moved = 0;
    dtrain_work *work;
    while ((work = dtrain__queue_head(comm)) != NULL) {
        if (!work->ended && dtrain__op_is_letter(&work->op))
            dtrain__queue_mail(comm, work, until_ns, &moved);
        else if (!work->ended)
            /* where ranks share an address space, this thread drives other ranks' queues as well */
            work->ended = dtrain__comm_turn(
                comm, &work->op, comm->transport.board != NULL && !dtrain__comm_fused(&work->op) ? 0 : until_ns,
                &moved);
        if (!work->ended)
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

/* Drives what is queued in a group that another call waits beside; leaves alone what another thread drives. Returns
 * whether any of it got on, and sets *left where there is more. */
static int dtrain__service_lend(dtrain_comm *other, int64_t until_ns, int *left)
{
    int moved = 0;
    if (__atomic_load_n(&other->pending, __ATOMIC_SEQ_CST) == 0 || pthread_mutex_trylock(&other->drive_mutex) != 0)
        return 0;
    /* what is pending now stays so; a group with nothing may be in a call that takes no lock */
    if (__atomic_load_n(&other->pending, __ATOMIC_SEQ_CST) > 0) {
        int64_t slice_ns = dtrain__os_now_ns() + DTRAIN__SERVICE_SLICE_NS;
        dtrain__error kept = dtrain__thread_error;
        moved = dtrain__comm_drive_within(other, slice_ns < until_ns ? slice_ns : until_ns);
        dtrain__thread_error = kept;
    }
    pthread_mutex_unlock(&other->drive_mutex);
    *left |= __atomic_load_n(&other->pending, __ATOMIC_SEQ_CST) > 0;
    return moved;
}

/* With progress by poll: goes on with what the rank has begun in other groups than the one that the caller waits in,
 * without waiting there. Returns for how long the caller may then wait in its own: not at all up to *awake_ns, which is
 * set anew whenever something moves. */
static int64_t dtrain__service_help(dtrain_comm *comm, int64_t until_ns, int64_t *awake_ns)
{
    dtrain__service *service = comm->desc.progress == DTRAIN_PROGRESS_POLL ? comm->service : NULL;
    int left = 0, moved = 0;
    if (service == NULL)
        return INT64_MAX;
    if (pthread_mutex_trylock(&service->mutex) != 0) /* another thread of the rank is at it, which may end sooner */
        return DTRAIN__SERVICE_LOOK_NS;
    for (dtrain_comm *other = service->comms; other != NULL; other = other->next_served)
        if (other != comm)
            moved |= dtrain__service_lend(other, until_ns, &left);
    pthread_mutex_unlock(&service->mutex);
    if (!left)
        return DTRAIN__SERVICE_IDLE_NS;
    if (moved)
        *awake_ns = dtrain__os_now_ns() + DTRAIN__SERVICE_AWAKE_NS;
    return dtrain__os_now_ns() < *awake_ns ? 0 : DTRAIN__SERVICE_LOOK_NS;
}

/* Runs one operation on the calling thread, to its end or until until_ns (INT64_MAX: no limit), which returns 0.
 * mail: as in dtrain__comm_wait. */
static int dtrain__comm_run(dtrain_comm *comm, dtrain__op *op, dtrain_work *mail, int64_t until_ns)
{
    dtrain__comm_wait wait = {comm, op, mail, until_ns, 0, 0};
    int64_t limit = until_ns < op->deadline_ns ? until_ns : op->deadline_ns, awake_ns = 0;
    int bell = dtrain__comm_fused(op) || (mail != NULL && comm->transport.board != NULL);
    int sleeps = bell || (comm->transport.board != NULL && until_ns != INT64_MAX &&
                          comm->desc.progress == DTRAIN_PROGRESS_THREAD); /* as dtrain__comm_advance does not */
    size_t progress = dtrain__op_progress(op);
    for (unsigned turn = 0;; turn++) {
        int64_t span = INT64_MAX, soon = INT64_MAX; /* then this rank's other groups are looked at again */
        if (turn >= comm->bell->spins || !bell)
            span = dtrain__service_help(comm, until_ns, &awake_ns);
        if (span != INT64_MAX)
            soon = dtrain__os_now_ns() + span;
        wait.until_ns = bell || until_ns < soon ? until_ns : soon;
        if (dtrain__comm_ready(&wait))
            return 1;
        if (wait.moved || dtrain__op_progress(op) != progress)
            turn = 0;
        progress = dtrain__op_progress(op);
        if (turn > comm->bell->spins || !bell) {
            if (mail == NULL && dtrain__op_late(comm, op) && dtrain__comm_expire(comm, op))
                return 1;
            if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
                return 0;
        }
        if (span == 0)
            sched_yield();
        else if (sleeps)
            dtrain__bell_wait(comm->bell, turn, limit < soon ? limit : soon, dtrain__comm_ready, &wait);
        if (wait.ended)
            return 1;
    }
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
        moved |= messages && __atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0;
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

static void dtrain__service_free(dtrain__service *service)
{
    pthread_mutex_destroy(&service->mutex);
    dtrain__free(service->allocator, service, sizeof *service);
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
    dtrain__service_free(service);
}

/* One without its thread. */
static dtrain_status dtrain__service_new(dtrain_comm *comm, dtrain__service **out)
{
    dtrain__service *service = (dtrain__service *)dtrain__alloc(comm->allocator, sizeof *service);
    *out = service;
    if (service == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for %zu bytes that serve its groups",
                            comm->rank, sizeof *service);
    service->allocator = comm->allocator;
    pthread_mutex_init(&service->mutex, NULL);
    return DTRAIN_OK;
}

static dtrain_status dtrain__service_start(dtrain_comm *comm, dtrain__service **out)
{
    dtrain__board *board = comm->transport.board;
    dtrain__service *service;
    dtrain_status status = dtrain__service_new(comm, &service);
    if (status != DTRAIN_OK)
        return status;
    service->hub = comm->socket != NULL ? comm->socket->hub : NULL;
    service->bell = board != NULL ? &board->family->bell : service->hub == NULL ? comm->bell : NULL;
    service->transport = service->hub == NULL && comm->transport.poll != NULL ? &comm->transport : NULL;
    int error = dtrain__os_thread_start(&service->thread, dtrain__service_main, service, (size_t)1 << 20);
    if (error == 0) {
        *out = service;
        return DTRAIN_OK;
    }
    dtrain__service_free(service);
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

static void dtrain__service_add(dtrain__service *service, dtrain_comm *comm)
{
    pthread_mutex_lock(&service->mutex);
    comm->next_served = service->comms;
    __atomic_store_n(&service->comms, comm, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&service->mutex);
    comm->service = service;
}

/* Puts the group under a service thread, at the first asynchronous call. */
static dtrain_status dtrain__service_join(dtrain_comm *comm)
{
    dtrain__service *service;
    dtrain_status status = dtrain__service_find(comm, &service);
    if (status == DTRAIN_OK)
        dtrain__service_add(service, comm);
    return status;
}

/* With progress by poll, before a group is made out of this one: has a service that both can share. A transport of the
 * user's own has no groups but of one rank, where nothing waits. */
static dtrain_status dtrain__service_share(dtrain_comm *comm)
{
    dtrain__service *service;
    if (comm->desc.progress != DTRAIN_PROGRESS_POLL || comm->service != NULL ||
        (comm->transport.board == NULL && comm->socket == NULL))
        return DTRAIN_OK;
    dtrain_status status = dtrain__service_new(comm, &service);
    if (status == DTRAIN_OK)
        dtrain__service_add(service, comm);
    return status;
}

/* A forked child has neither a service thread nor a right to the lock, but is alone with its copy of the list. */
static void dtrain__service_leave(dtrain_comm *comm, int forked)
{
    dtrain__service *service = comm->service;
    dtrain_comm **at;
    if (service == NULL || (forked && comm->desc.progress != DTRAIN_PROGRESS_POLL))
        return;
    if (!forked)
        pthread_mutex_lock(&service->mutex);
    for (at = &service->comms; *at != comm;)
        at = &(*at)->next_served;
    __atomic_store_n(at, comm->next_served, __ATOMIC_SEQ_CST);
    int last = service->comms == NULL;
    if (!forked)
        pthread_mutex_unlock(&service->mutex);
    if (comm->desc.progress == DTRAIN_PROGRESS_POLL && last)
        dtrain__service_free(service);
    else if (comm->transport.board == NULL && comm->socket == NULL)
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
    return DTRAIN_OK;
}

/* The time allowed to a call begins. */
static void dtrain__comm_clock(dtrain_comm *comm, dtrain__op *op)
{
    op->started_ns = dtrain__os_now_ns();
    op->deadline_ns =
        comm->desc.timeout_ms < 0 ? INT64_MAX : op->started_ns + dtrain__os_ms_to_ns(comm->desc.timeout_ms);
}

/* Puts an operation at the end of the queue; NULL: no memory. */
static dtrain_work *dtrain__queue_add(dtrain_comm *comm, const dtrain__op *op)
{
    pthread_mutex_lock(&comm->queue_mutex);
    dtrain_work *work = comm->spare;
    if (work != NULL)
        comm->spare = work->next;
    else
        work = (dtrain_work *)dtrain__alloc(comm->allocator, sizeof *work);
    if (work != NULL && work->comm == NULL) {
        work->comm = comm;
        work->older = comm->newest;
        comm->newest = work;
    }
    if (work != NULL) {
        work->next = NULL;
        work->done = 0;
        work->ended = 0;
        work->op = *op;
        work->op.letter = dtrain__op_is_letter(op) ? work->letter : NULL;
        work->op.queued = 1;
        if (comm->tail != NULL)
            __atomic_store_n(&comm->tail->next, work, __ATOMIC_RELEASE); /* a sweep may stand there */
        else
            comm->head = work;
        comm->tail = work;
        __atomic_add_fetch(&comm->pending, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&comm->queue_mutex);
    if (work == NULL)
        dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for a work handle", comm->rank);
    return work;
}

static dtrain_status dtrain__comm_enqueue(dtrain_comm *comm, const dtrain__op *op, dtrain_work **out)
{
    dtrain_status status = DTRAIN_OK;
    if (comm->service == NULL && comm->desc.progress == DTRAIN_PROGRESS_THREAD)
        status = dtrain__service_join(comm);
    if (status != DTRAIN_OK)
        return status;
    *out = dtrain__queue_add(comm, op);
    if (*out == NULL)
        return DTRAIN_ERR_MEMORY;
    dtrain__bell_ring(comm->bell);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
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

/* Drives the queue on the calling thread, or looks on while another thread does, until work has ended or until_ns. */
static void dtrain__work_help(dtrain_work *work, int64_t until_ns)
{
    dtrain_comm *comm = work->comm;
    /* who comes back again and again, and never waits, makes connections and answers peers all the same */
    if (until_ns != INT64_MAX && !dtrain_work_done(work) && comm->desc.progress == DTRAIN_PROGRESS_POLL &&
        comm->transport.poll != NULL)
        comm->transport.poll(comm->transport.self, 0);
    for (unsigned turn = 0; !dtrain_work_done(work); turn++) {
        if (pthread_mutex_trylock(&comm->drive_mutex) == 0) {
            dtrain_work *head;
            while (!dtrain_work_done(work) && (head = dtrain__queue_head(comm)) != NULL) {
                dtrain_work *mail = dtrain__op_is_letter(&head->op) ? head : NULL;
                if (!head->ended && !dtrain__comm_run(comm, &head->op, mail, until_ns))
                    break;
                dtrain__queue_finish(comm, head);
            }
            pthread_mutex_unlock(&comm->drive_mutex);
            if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0)
                dtrain__bell_ring(comm->bell); /* the service goes on with the rest */
        } else {
            dtrain__bell_wait(comm->bell, turn, dtrain__os_now_ns() + 1000000, dtrain__work_ready, work);
        }
        if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            return;
    }
}

/* Waits for work until until_ns. Returns its result and frees it; 0 in *ended: it goes on. */
static dtrain_status dtrain__work_end(dtrain_work *work, int64_t until_ns, int *ended)
{
    dtrain_status status;
    dtrain_comm *comm = work->comm;
    int64_t started;
    *ended = 1;
    if (comm->transport.board == NULL && (status = dtrain__comm_usable(comm, "work_wait")) != DTRAIN_OK)
        return status;
    started = dtrain__os_now_ns();
    dtrain__work_help(work, until_ns);
    comm->blocked_ns += dtrain__os_now_ns() - started;
    *ended = dtrain_work_done(work);
    if (!*ended)
        return DTRAIN_OK;
    status = dtrain__report(&work->op.error);
    if (status != DTRAIN_OK)
        comm->error = work->op.error;
    comm->waited_ns[0] = work->op.run_ns;
    comm->waited_ns[1] = work->op.ended_ns;
    pthread_mutex_lock(&comm->queue_mutex);
    work->next = comm->spare;
    comm->spare = work;
    pthread_mutex_unlock(&comm->queue_mutex);
    return status;
}

DTRAIN_API dtrain_status dtrain_work_wait(dtrain_work *work)
{
    int ended;
    if (work == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "work_wait: the handle is NULL; was its call checked?");
    return dtrain__work_end(work, INT64_MAX, &ended);
}

DTRAIN_API dtrain_status dtrain_work_wait_for(dtrain_work *work, int64_t timeout_ms)
{
    int64_t now = dtrain__os_now_ns();
    int ended;
    dtrain_status status;
    if (work == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "work_wait_for: the handle is NULL; was its call checked?");
    status = dtrain__work_end(
        work, timeout_ms < 0 || timeout_ms > (INT64_MAX - now) / 1000000 ? INT64_MAX : now + timeout_ms * 1000000,
        &ended);
    if (ended)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                        "work_wait_for on rank %d: %s of %zu elements is still under way after %lld ms; it goes on, "
                        "and its handle can be waited for again",
                        work->comm->rank, dtrain__kind_name((uint64_t)work->op.kind), work->op.count,
                        (long long)timeout_ms);
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
    if (pthread_mutex_trylock(&comm->drive_mutex) == 0) { /* else a call in another group of the rank is at it */
        dtrain__comm_drive_within(comm, until);
        pthread_mutex_unlock(&comm->drive_mutex);
    }
    return DTRAIN_OK;
}

/* Keeps a call for fuse_end; its buffers and arrays stay the caller's until then. */
static dtrain_status dtrain__comm_note(dtrain_comm *comm, const dtrain__op *op)
{
    if (comm->noted + 2 > comm->notes_capacity) {
        size_t more = comm->notes_capacity > 0 ? 2 * comm->notes_capacity : 16;
        dtrain__note *notes = (dtrain__note *)dtrain__resize(
            comm->allocator, comm->notes, comm->notes_capacity * sizeof(dtrain__note), more * sizeof(dtrain__note));
        if (notes == NULL)
            return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory to fuse %zu calls", comm->rank,
                                comm->noted + 1);
        comm->notes = notes;
        comm->notes_capacity = more;
    }
    for (int receives = 0; receives < 2; receives++) { /* an exchange is a send and a recv */
        dtrain__note *note = &comm->notes[comm->noted];
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
        comm->noted++;
    }
    return DTRAIN_OK;
}

/* Runs a call to its end (work NULL), or starts it; inside a fuse notes it. */
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
    if (comm->fusing && work != NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s_async on rank %d: calls between fuse_begin and fuse_end cannot be asynchronous; call "
                            "fuse_end first",
                            dtrain__kind_name((uint64_t)op->kind), comm->rank);
    if (comm->fusing)
        return dtrain__comm_note(comm, op);
    dtrain__comm_clock(comm, op);
    if (work != NULL)
        return dtrain__comm_enqueue(comm, op, work);
    if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0) {
        status = dtrain__comm_enqueue(comm, op, &queued);
        return status != DTRAIN_OK ? status : dtrain_work_wait(queued);
    }
    dtrain__comm_run(comm, op, NULL, INT64_MAX);
    now = dtrain__os_now_ns();
    dtrain__comm_ended(comm, op, now);
    comm->blocked_ns += now - op->started_ns;
    if (op->error.status != DTRAIN_OK)
        comm->error = op->error;
    return dtrain__report(&op->error);
}

#endif
