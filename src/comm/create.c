/* ---- >>create ----
 * Makes and destroys groups: a world of one, the ranks of one process, and those of several processes. Destroying
 * cancels pending work and tells whoever needs this rank. It waits for a peer only where dtrain_comm_destroy says so.
 */
#ifndef DTRAIN__CREATE
#define DTRAIN__CREATE
#include "../base/log.c"
#include "op.c"
#include "place.c"
#include "recorder.c"
#include "trace.c"
#include "watch.c"
#include "work.c"

static void dtrain__create_free(dtrain_comm *comm)
{
    dtrain_allocator *allocator = comm->allocator;
    dtrain__watch_remove(comm);
    while (comm->queue.newest != NULL) {
        dtrain_work *work = comm->queue.newest;
        comm->queue.newest = work->older;
        DTRAIN__ATOMIC_STORE(&work->mark, DTRAIN__GONE, RELAXED);
        dtrain__free(allocator, work);
    }
    for (int peer = 0; comm->messages.directions != NULL && peer < comm->size; peer++)
        dtrain__free(allocator, comm->messages.directions[peer]);
    dtrain__free(allocator, comm->messages.directions);
    dtrain__free(allocator, comm->parts);
    dtrain__free(allocator, comm->scratch);
    dtrain__free(allocator, comm->fuse.notes);
    dtrain__free(allocator, comm->fuse.packed);
    dtrain__trace_end_failure(comm);
    dtrain__recorder_free(comm);
    dtrain__work_blocked_release(comm->blocked, allocator);
    dtrain__free(allocator, comm->vote.room);
    dtrain__free(allocator, comm->meet);
    dtrain__os_mutex_free(&comm->queue.mutex);
    dtrain__os_mutex_free(&comm->queue.drive);
    DTRAIN__ATOMIC_STORE(&comm->use.mark, DTRAIN__GONE, RELAXED);
    dtrain__free(allocator, comm);
}

/* Takes the algorithms and the nodes from desc and environment. */
static dtrain_status dtrain__create_choose(dtrain_comm *comm)
{
    int64_t ranks = comm->desc.node_ranks;
    comm->checks = comm->desc.checksum > 0 || (comm->desc.checksum == 0 && comm->plane->checks);
    for (int kind = 0; kind < DTRAIN__KINDS; kind++)
        comm->asked[kind] = comm->desc.algorithm;
    if (comm->desc.node_ranks < 0)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "comm desc: node_ranks is %d; expected 1 or more, or 0 to detect it" DTRAIN__ZERO_FIRST,
                            comm->desc.node_ranks);
    if (dtrain__place_option(ranks == 0, "DTRAIN_NODE_RANKS", 0, INT_MAX, &ranks) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    comm->node_ranks = ranks < comm->size ? (int)ranks : comm->size;
    return dtrain__plan_ask(comm, dtrain__os_getenv("DTRAIN_ALGORITHM"));
}

/* Makes one rank's end. On an error the transport stays the caller's. */
static dtrain_status dtrain__create_new(dtrain_comm **out, const dtrain__end *end, const dtrain_comm_desc *desc)
{
    const dtrain_transport *transport = &end->transport;
    dtrain_allocator *allocator = end->allocator;
    dtrain_status status;
    dtrain_comm *comm = (dtrain_comm *)dtrain__alloc(allocator, sizeof *comm);
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "rank %d: no memory for its end of a group", transport->rank);
    comm->use.mark = DTRAIN__COMM_MARK;
    comm->allocator = allocator;
    comm->rank = transport->rank;
    comm->size = transport->size;
    comm->transport = *transport;
    comm->plane = end->plane;
    comm->seat = end->seat;
    comm->origin = end->origin;
    comm->members = end->members;
    comm->shared = end->shared;
    comm->long_runs = end->long_runs;
    comm->decided = comm->shared != NULL || comm->plane->sharing == NULL;
    comm->use.process = dtrain__os_pid();
    comm->desc = *desc;
    if (desc->quorum == DTRAIN_QUORUM_ANY)
        dtrain__seat_any_quorum(comm->seat);
    if (comm->desc.timeout_ms == 0)
        comm->desc.timeout_ms = 60000;
    comm->bell = end->shared != NULL ? &end->shared->bell : &comm->own_bell;
    dtrain__os_mutex_init(&comm->queue.mutex);
    dtrain__os_mutex_init(&comm->queue.drive);
    comm->queue.busy_end = &comm->queue.busy;
    comm->blocked = (dtrain__blocked *)dtrain__alloc(allocator, sizeof *comm->blocked);
    if (comm->blocked != NULL)
        comm->blocked->held = 1;
    if (comm->blocked == NULL || !dtrain__recorder_create(comm))
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "rank %d: no memory for its end of a group", transport->rank);
    else
        status = dtrain__trace_prefix(comm, desc->trace_on_failure);
    if (status == DTRAIN_OK)
        status = dtrain__create_choose(comm);
    if (status == DTRAIN_OK)
        dtrain__watch_add(*out = comm);
    else
        dtrain__create_free(comm);
    return status;
}

DTRAIN__OF_PROCESS(dtrain_comm_desc, dtrain__create_defaults) /* only read */

/* Checks a desc. NULL becomes a desc with all defaults. */
static dtrain_status dtrain__create_check_desc(const dtrain_comm_desc **given)
{
    const dtrain_comm_desc *desc = *given != NULL ? *given : dtrain__create_defaults();
    int algorithm = (int)desc->algorithm, progress = (int)desc->progress;
    *given = desc;
    if (algorithm != DTRAIN_ALGORITHM_AUTO &&
        (algorithm < DTRAIN_ALGORITHM_FUSED || algorithm > DTRAIN_ALGORITHM_DOUBLE_TREE))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm desc: algorithm is %d; expected a DTRAIN_ALGORITHM constant" DTRAIN__ZERO_FIRST,
                            algorithm);
    if (progress != DTRAIN_PROGRESS_THREAD && progress != DTRAIN_PROGRESS_POLL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm desc: progress is %d; expected a DTRAIN_PROGRESS constant" DTRAIN__ZERO_FIRST,
                            progress);
    if (desc->order != DTRAIN_ORDER_TREE && desc->order != DTRAIN_ORDER_ANY)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm desc: order is %d; expected a DTRAIN_ORDER constant" DTRAIN__ZERO_FIRST,
                            (int)desc->order);
    if (desc->quorum != DTRAIN_QUORUM_MAJORITY && desc->quorum != DTRAIN_QUORUM_ANY)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm desc: quorum is %d; expected a DTRAIN_QUORUM constant" DTRAIN__ZERO_FIRST,
                            (int)desc->quorum);
    if (desc->connections < 0 || desc->connections > DTRAIN__MAX_LANES)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm desc: connections is %d; expected 1 to %d, or 0 for 1" DTRAIN__ZERO_FIRST,
                            desc->connections, DTRAIN__MAX_LANES);
    if (desc->secure < -1 || desc->secure > 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm desc: secure is %d; expected 1 (on), 0 (automatic) or -1 (off)" DTRAIN__ZERO_FIRST,
                            desc->secure);
    if (desc->fingerprint != NULL && strlen(desc->fingerprint) > DTRAIN__FINGERPRINT_BYTES - 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm desc: fingerprint has %zu bytes; expected at most %d",
                            strlen(desc->fingerprint), DTRAIN__FINGERPRINT_BYTES - 1);
    return DTRAIN_OK;
}

/* Makes one rank's end over a transport of this library; on an error the transport is destroyed. */
static dtrain_status dtrain__create_end(dtrain_comm **out, const dtrain__end *end, const dtrain_comm_desc *desc)
{
    dtrain_comm *comm = NULL;
    dtrain_status status = dtrain__create_new(&comm, end, desc);
    if (status == DTRAIN_OK && end->origin->step != NULL && desc->progress == DTRAIN_PROGRESS_THREAD) {
        status = dtrain__service_join(comm);
        if (status != DTRAIN_OK)
            dtrain__create_free(comm);
    }
    if (status != DTRAIN_OK) {
        dtrain__error kept = dtrain__thread_error;
        end->transport.destroy(end->transport.self);
        return dtrain__report(&kept);
    }
    if (comm->plane->publish != NULL)
        comm->plane->publish(comm->transport.self, dtrain__recorder_tell, comm->recorder);
    comm->published = comm->plane->in_process;
    *out = comm;
    return DTRAIN_OK;
}

DTRAIN__OF_PROCESS(uint32_t, dtrain__create_told)

/* Logs once that threads make a world of their own in each process that a launcher has started, often by mistake. */
static void dtrain__create_tell_apart(int ranks)
{
    dtrain__error kept = dtrain__thread_error;
    dtrain__place place;
    int launcher;
    memset(&place, 0, sizeof place);
    dtrain_status status = dtrain__place_launcher(&place, &launcher);
    dtrain__thread_error = kept;
    if (status == DTRAIN_OK && place.keys.world_size > 1 &&
        DTRAIN__ATOMIC_EXCHANGE(dtrain__create_told(), 1, RELAXED) == 0)
        dtrain__log(
            DTRAIN_LOG_WARN,
            "a launcher started this process as one of %d ranks (%s), and its %d threads are a world apart from "
            "those of the other processes; for one world of processes call dtrain_comm_create, for one world "
            "of threads start the program once",
            place.keys.world_size, place.believed, ranks);
}

/* Refuses more ranks than there is memory for. */
static dtrain_status dtrain__create_fits(const char *call, int ranks)
{
    size_t each = sizeof(dtrain_comm) + sizeof(dtrain__recorder) + sizeof(dtrain__slot);
    if (dtrain__memory_fits(ranks, each))
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: %d ranks take %llu MiB, and %llu MiB are left: give fewer", call,
                        ranks, (unsigned long long)ranks * each >> 20,
                        (unsigned long long)(dtrain__os_memory_left() >> 20));
}

DTRAIN_API dtrain_status dtrain_threads_create(dtrain_comm **comms, int ranks, const dtrain_comm_desc *desc)
{
    dtrain__threads_group *group;
    dtrain__end end;
    if (comms == NULL || ranks < 1 || ranks > DTRAIN__MAX_RANKS)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "threads_create: ranks is %d and comms is %s; expected 1 to %d ranks and an array for them",
                            ranks, comms == NULL ? "NULL" : "given", DTRAIN__MAX_RANKS);
    for (int rank = 0; rank < ranks; rank++)
        comms[rank] = NULL;
    dtrain_status status = dtrain__create_check_desc(&desc);
    if (status == DTRAIN_OK)
        status = dtrain__create_fits("threads_create", ranks);
    if (ranks > 1)
        dtrain__create_tell_apart(ranks);
    if (status == DTRAIN_OK)
        status = dtrain__threads_create(&group, ranks, desc->allocator);
    if (status != DTRAIN_OK)
        return status;
    group->world->polls = desc->progress == DTRAIN_PROGRESS_POLL;
    for (int rank = 0; rank < ranks; rank++) {
        dtrain__threads_end(&end, group, rank);
        if (status == DTRAIN_OK)
            status = dtrain__create_end(&comms[rank], &end, desc);
        else
            end.transport.destroy(end.transport.self);
    }
    for (int rank = 0; status != DTRAIN_OK && rank < ranks; rank++) {
        dtrain_comm_destroy(comms[rank]);
        comms[rank] = NULL;
    }
    return status;
}

static dtrain_status dtrain__from_mpi_world(dtrain_comm **comm, const dtrain_comm_desc *desc);

DTRAIN_API dtrain_status dtrain_comm_create_async(dtrain_comm **comm, const dtrain_comm_desc *desc)
{
    int transport = DTRAIN__TRANSPORT_ANY;
    int64_t now = dtrain__os_now_ns();
    dtrain__place place;
    dtrain__end end;
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: comm is NULL; give an address for the group");
    *comm = NULL;
    dtrain_status status = dtrain__create_check_desc(&desc);
    if (status == DTRAIN_OK)
        status = dtrain__place_transport(desc, &transport);
    if (status == DTRAIN_OK && transport == DTRAIN__TRANSPORT_MPI)
        return dtrain__from_mpi_world(comm, desc);
    if (status == DTRAIN_OK)
        status = dtrain__place_read(&place, desc);
    if (status != DTRAIN_OK)
        return status;
    if (place.keys.world_size == 1) {
        status = dtrain_threads_create(comm, 1, desc);
        if (status == DTRAIN_OK)
            (*comm)->alone = place.alone;
        return status;
    }
    if (desc->algorithm == DTRAIN_ALGORITHM_FUSED)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_create: DTRAIN_ALGORITHM_FUSED is for ranks that share an "
                            "address space; choose another for %d processes",
                            place.keys.world_size);
    dtrain_comm_desc placed = *desc;
    placed.timeout_ms = place.hub.timeout_ms;
    status = dtrain__socket_plane_create(&end, &place.keys, &place.hub, desc->allocator);
    memset(&place, 0, sizeof place);
    if (status == DTRAIN_OK)
        status = dtrain__create_end(comm, &end, &placed);
    if (status != DTRAIN_OK)
        return status;
    (*comm)->forming = 1; /* the service thread or polling completes it */
    (*comm)->started_ns = now;
    return DTRAIN_OK;
}

/* Says whether all ranks have come. wait: waits until they have, or until the deadline. */
static dtrain_status dtrain__create_form(dtrain_comm *comm, int *ready, int wait)
{
    dtrain_status status = DTRAIN_OK;
    int formed = 1;
    if (comm->forming)
        status = comm->plane->form(comm->transport.self, &formed, comm->started_ns,
                                   dtrain__group_deadline(comm, comm->started_ns), wait);
    if (status != DTRAIN_OK)
        comm->error = dtrain__thread_error;
    else if (formed) {
        comm->forming = 0;
        if (comm->node_ranks == 0)
            comm->node_ranks = dtrain__plane_node_ranks(comm->plane, comm->transport.self, comm->size);
    }
    *ready = status == DTRAIN_OK && formed;
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_ready(dtrain_comm *comm, int *ready)
{
    if (comm == NULL || ready == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_ready: %s is NULL; give a group and an address for the answer",
                            comm == NULL ? "comm" : "ready");
    *ready = 0;
    dtrain_status status = dtrain__group_alive(comm, "comm_ready");
    return status == DTRAIN_OK ? dtrain__create_form(comm, ready, 0) : status;
}

DTRAIN_API dtrain_status dtrain_comm_create(dtrain_comm **comm, const dtrain_comm_desc *desc)
{
    dtrain_status status = dtrain_comm_create_async(comm, desc);
    int ready = 0;
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__create_form(*comm, &ready, 1);
    if (status != DTRAIN_OK) {
        dtrain_comm_destroy(*comm);
        *comm = NULL;
    }
    return status;
}

/* Logs how many handles nobody has waited for, as a program then never learns of an error. After an error of the group
 * it need not wait. */
static void dtrain__create_tell_unwaited(dtrain_comm *comm)
{
    const dtrain_work *first = NULL;
    int count = 0;
    if (comm->own || comm->error.status != DTRAIN_OK || dtrain__membership_broken(comm->members))
        return;
    dtrain__os_lock(&comm->queue.mutex);
    for (const dtrain_work *work = comm->queue.newest; work != NULL; work = work->older)
        if (work->mark == DTRAIN__WORK_MARK) {
            count++;
            if (first == NULL || work->op.number - 1 < first->op.number - 1) /* 0: not begun */
                first = work;
        }
    dtrain__os_unlock(&comm->queue.mutex);
    if (count > 0)
        dtrain__log(
            DTRAIN_LOG_WARN,
            "comm_destroy: rank %d: nobody waited for %d handle%s, the first of %s: call dtrain_work_wait once for "
            "each before you destroy the group, or its error stays unknown and its buffers may be incomplete",
            comm->rank, count, count > 1 ? "s" : "", dtrain__op_text(comm, &first->op).text);
}

/* Leaves with a reason for the peers; NULL: none. The thread's last error stays. */
static void dtrain__create_leave(dtrain_comm *comm, const dtrain__error *why)
{
    dtrain_transport transport = comm->transport;
    dtrain__error kept = dtrain__thread_error, cause;
    dtrain_work *work = NULL;
    int forked = comm->use.process != dtrain__os_pid();
    dtrain__service_leave(comm, forked);
    if (!forked) { /* the parent's threads may have held the locks */
        if (why == NULL)
            dtrain__create_tell_unwaited(comm);
        if (comm->plane->publish != NULL)
            comm->plane->publish(transport.self, NULL, NULL);
        work = comm->shared != NULL ? dtrain__queue_head(comm) : NULL;
    }
    if (work != NULL &&
        dtrain__fused_cancel(comm, &work->op)) { /* peers hear of it, and no longer use the buffers of the handles */
        dtrain__fail(&cause, DTRAIN_ERR_PEER_LOST, "rank %d has left the group with %s under way", comm->rank,
                     dtrain__op_text(comm, &work->op).text);
        dtrain__group_break(comm, &cause);
        dtrain__fused_revoke(comm, &work->op);
    }
    dtrain__seat_leaving(comm->seat, forked, comm->number);
    if (transport.leave != NULL)
        transport.leave(transport.self, why != NULL ? why->text : "");
    dtrain__create_free(comm); /* the transport owns its allocator */
    dtrain__os_orphan(forked);
    transport.destroy(transport.self);
    dtrain__os_orphan(0);
    dtrain__thread_error = kept;
}

DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm)
{
    if (comm != NULL && dtrain__group_alive(comm, "comm_destroy") != DTRAIN_OK)
        dtrain__log(DTRAIN_LOG_ERROR, "%s", dtrain__thread_error.text);
    else if (comm != NULL)
        dtrain__create_leave(comm, comm->error.status != DTRAIN_OK ? &comm->error : NULL);
    dtrain__log_flush(DTRAIN__LOG_WAIT_NS);
}

DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm)
{
    return comm != NULL ? comm->rank : 0;
}

DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm)
{
    return comm != NULL ? comm->size : 1;
}

DTRAIN_API dtrain_allocator *dtrain_comm_allocator(dtrain_comm *comm)
{
    return comm != NULL ? comm->allocator : NULL;
}

DTRAIN_API int64_t dtrain_comm_blocked_ns(const dtrain_comm *comm)
{
    if (comm == NULL || DTRAIN__ATOMIC_LOAD(&comm->use.mark, RELAXED) != DTRAIN__COMM_MARK)
        return 0;
    return DTRAIN__ATOMIC_LOAD(&comm->blocked->ns, RELAXED);
}

#define DTRAIN__LEAST_STACK 65536

typedef struct dtrain__create_runner {
    dtrain__os_thread thread;
    dtrain_comm *comm;
    dtrain_status (*body)(dtrain_comm *, void *);
    void *user;
    uint32_t *failures; /* counts up, to find the first failure */
    uint32_t place;
    dtrain__error error;
} dtrain__create_runner;

static void dtrain__create_runner_main(void *pointer)
{
    dtrain__create_runner *runner = (dtrain__create_runner *)pointer;
    int rank = runner->comm->rank;
    dtrain__thread_error.text[0] = 0;
    dtrain_status status = runner->body(runner->comm, runner->user);
    if (status != DTRAIN_OK) {
        dtrain__error last = dtrain__thread_error;
        dtrain__fail(&runner->error, status, "rank %d: %.600s", rank,
                     last.text[0] != 0 ? last.text : dtrain_status_name(status));
        runner->place = DTRAIN__ATOMIC_ADD(runner->failures, 1, SEQ_CST);
    }
    if (dtrain__group_alive(runner->comm, "run_threads") != DTRAIN_OK) {
        dtrain__log(DTRAIN_LOG_ERROR, "run_threads: rank %d has destroyed its world; leave that to run_threads", rank);
        return;
    }
    if (status != DTRAIN_OK)
        dtrain__threads_give_up(runner->comm->transport.self, &runner->error);
    dtrain__create_leave(runner->comm, status != DTRAIN_OK ? &runner->error : NULL);
}

/* Runs each rank on a thread of its own. Returns the error of the rank that failed first. */
static dtrain_status dtrain__create_run(dtrain__create_runner *runners, int ranks, size_t stack)
{
    dtrain__error first = {DTRAIN_OK, ""};
    int started = 0;
    while (started < ranks && first.status == DTRAIN_OK) {
        dtrain__create_runner *runner = &runners[started];
        int error = dtrain__os_thread_start(&runner->thread, dtrain__create_runner_main, runner, stack);
        if (error != 0)
            dtrain__fail(&first, DTRAIN_ERR_IO,
                         "run_threads: rank %d of %d could not start, as the system refused its thread with a stack of "
                         "%zu bytes (%s): the limit on threads (ulimit -u, pids.max) or on memory (ulimit -v) is "
                         "reached; run fewer ranks, raise the limit, or set a smaller stack_bytes",
                         started, ranks, stack, dtrain__os_error_text(error));
        else
            started++;
    }
    for (int rank = started; rank < ranks; rank++) /* ranks that run learn why these never come */
        dtrain__create_leave(runners[rank].comm, &first);
    for (int rank = 0; rank < started; rank++) {
        dtrain__os_thread_join(&runners[rank].thread);
        if (started == ranks && runners[rank].place == 1)
            first = runners[rank].error;
    }
    return dtrain__report(&first);
}

DTRAIN_API dtrain_status dtrain_run_threads(int ranks, dtrain_status (*body)(dtrain_comm *world, void *user),
                                            void *user, const dtrain_comm_desc *desc)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    size_t n = ranks > 0 && ranks <= DTRAIN__MAX_RANKS ? (size_t)ranks : 0;
    size_t stack = desc != NULL && desc->stack_bytes > 0 ? desc->stack_bytes : (size_t)8 << 20;
    uint32_t failures = 0;
    if (n == 0 || body == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "run_threads: ranks is %d and body is %s; expected 1 to %d ranks and a function", ranks,
                            body == NULL ? "NULL" : "given", DTRAIN__MAX_RANKS);
    if (dtrain__create_fits("run_threads", ranks) != DTRAIN_OK)
        return DTRAIN_ERR_MEMORY;
    if (stack < DTRAIN__LEAST_STACK)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "run_threads: desc.stack_bytes is %zu; calls need %d; add what body needs" DTRAIN__ZERO_FIRST, stack,
            DTRAIN__LEAST_STACK);
    dtrain__create_runner *runners =
        (dtrain__create_runner *)dtrain__alloc(&heap, n * (sizeof *runners + sizeof(dtrain_comm *)));
    if (runners == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "run_threads: no memory for %d ranks", ranks);
    dtrain_comm **comms = (dtrain_comm **)(void *)(runners + n);
    dtrain_status status = dtrain_threads_create(comms, ranks, desc);
    for (size_t rank = 0; rank < n; rank++) {
        runners[rank].comm = comms[rank];
        runners[rank].body = body;
        runners[rank].user = user;
        runners[rank].failures = &failures;
    }
    if (status == DTRAIN_OK)
        status = dtrain__create_run(runners, ranks, stack);
    dtrain__free(&heap, runners);
    return status;
}

#endif
