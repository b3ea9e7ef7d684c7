/* ---- >>device_async ----
 * Started calls on memory of devices, which run beside the caller's queue. The group then has a queue of its own, and a
 * thread that makes the calls there, blocking, in the order in which they were started. The caller records an event in
 * its queue when it starts a call, and the group's queue waits for it. The thread records another after the call, and
 * the caller's queue waits for that in dtrain_device_work_wait. Only the caller touches its queue, and only the thread
 * the group's queue and comm. If there can be no second queue or no thread, the caller makes its calls itself. */
#ifndef DTRAIN__DEVICE_ASYNC
#define DTRAIN__DEVICE_ASYNC
#include "device_call.c"
#include "staged.c"
#include "events.c"
#include "flags.c"
#include "hosts.c"

#define DTRAIN__ASYNC_GRACE_NS ((int64_t)1000000000) /* time for a call under way when its group is destroyed */

typedef struct dtrain__async dtrain__async;

struct dtrain_device_work {
    dtrain__worker_job job;
    dtrain__async *async;
    dtrain_device_work *next;           /* of the worker, or of the spare ones */
    dtrain_device_work *older;          /* the one made before this, of all */
    dtrain__op op;                      /* its counts and offsets follow this struct */
    uint64_t told;                      /* number of failures that the caller knew of when it started this */
    uint64_t failure;                   /* number of the failure that this ended with */
    dtrain_device_event *begun, *ended; /* in the caller's queue and in the group's; made when first needed */
    int ordered;                        /* ended was recorded */
    int64_t begin_ns, end_ns;
    dtrain__error error; /* before the call: what the caller's device returned */
};

struct dtrain__async {
    dtrain_device_group *group;
    dtrain_device *caller;
    dtrain_comm shell; /* rank and size for checks by the caller; the thread writes the group's own comm */
    dtrain_device_work *spare, *newest; /* used by the caller alone */
    uint64_t told;                      /* number of failures that the caller was told of */
    uint64_t failures;                  /* used by the maker of calls alone, as the next two */
    dtrain__error error;                /* the last error that no earlier error caused */
    int broken;                         /* that error broke the group */
    dtrain__worker worker;
    long process;
};

/* Makes a checked call in the group's mode. */
static dtrain_status dtrain__async_run(dtrain_device_group *group, const dtrain__op *op)
{
    if (group->no_devices) {
        dtrain__op all = *op;
        return dtrain__device_step(group, op, 0, &all);
    }
    if (op->kind == DTRAIN__REDUCE_SCATTER || op->kind == DTRAIN__ALL_GATHER)
        dtrain__op_extents(group->comm, op, op->counts, op->offsets, group->shards);
    if (group->mode == DTRAIN_DEVICE_FLAGS)
        return dtrain__flags_run(group, op);
    if (group->mode == DTRAIN_DEVICE_HOSTS)
        return dtrain__hosts_run(group, op);
    return group->mode == DTRAIN_DEVICE_EVENTS ? dtrain__events_run(group, op) : dtrain__staged_run(group, op);
}

/* ---- the maker of calls: the thread, or the caller ---- */

/* Makes the group's queue wait for what the caller's queue held when it started the work. */
static dtrain_status dtrain__async_enter(dtrain__async *async, dtrain_device_work *work)
{
    dtrain_device *device = async->group->device;
    dtrain_status status = dtrain__report(&work->error);
    if (status == DTRAIN_OK && device != async->caller)
        status = dtrain__device_event_await(device, work->begun);
    if (status == DTRAIN_OK && work->ended == NULL)
        status = dtrain__device_event_create(device, &work->ended);
    return status;
}

/* Makes a call. Even after an error, what it has queued ends before its second event. */
static dtrain_status dtrain__async_make(dtrain__async *async, dtrain_device_work *work)
{
    dtrain_device_group *group = async->group;
    dtrain_status status = dtrain__async_enter(async, work);
    if (status != DTRAIN_OK) {
        status = dtrain__device_failed(group, &work->op, group->comm->number + 1, status);
    } else {
        status = dtrain__device_begin(group, &work->op);
        if (status == DTRAIN_OK)
            status = dtrain__async_run(group, &work->op);
    }
    dtrain__error kept = dtrain__thread_error;
    dtrain_status recorded = work->ended != NULL ? dtrain__device_event_record(group->device, work->ended) : status;
    work->ordered = recorded == DTRAIN_OK;
    if (!work->ordered)
        dtrain__events_wait(group);
    if (status == DTRAIN_OK && recorded != DTRAIN_OK)
        return dtrain__device_failed(group, &work->op, group->comm->number, recorded);
    dtrain__thread_error = kept;
    return status;
}

/* Makes a work's call and hands it back to the caller. */
static void dtrain__async_perform(void *owner, dtrain__worker_job *job)
{
    dtrain__async *async = (dtrain__async *)owner;
    dtrain_device_work *work = (dtrain_device_work *)(void *)job;
    const dtrain_comm *comm = async->group->comm;
    dtrain_status status;
    int follows = async->broken || work->told < async->failures;
    work->begin_ns = dtrain__os_now_ns();
    if (follows) /* a peer could take it for the call that failed */
        status = dtrain__fail(NULL, async->error.status, "%s on rank %d, after one that failed: %s",
                              dtrain__device_text(comm, &work->op, comm->number + 1).text, comm->rank,
                              dtrain__status_cause(&async->error));
    else
        status = dtrain__async_make(async, work);
    work->error.status = status;
    if (status != DTRAIN_OK)
        memcpy(work->error.text, dtrain__thread_error.text, sizeof work->error.text);
    if (status != DTRAIN_OK && !follows) {
        async->error = work->error;
        async->failures++;
        async->broken = dtrain__group_is_broken(comm);
    }
    work->failure = async->failures;
    work->end_ns = dtrain__os_now_ns();
}

/* ---- the caller ---- */

static dtrain_status dtrain__async_forked(const dtrain__async *async, const char *call)
{
    return dtrain__fail(
        NULL, DTRAIN_ERR_INVALID,
        "%s: process %ld made this group of devices, and this is its forked child %ld: make a group after the fork",
        call, async->process, dtrain__os_self());
}

/* Returns a spare work, or a new one. */
static dtrain_device_work *dtrain__async_take(dtrain__async *async)
{
    const dtrain_comm *comm = async->group->comm;
    dtrain_device_work *work = async->spare;
    if (work != NULL) {
        async->spare = work->next;
        return work;
    }
    work = (dtrain_device_work *)dtrain__alloc(comm->allocator, sizeof *work + 2 * (size_t)comm->size * sizeof(size_t));
    if (work == NULL) {
        dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                     "device_group on rank %d: no memory for another call: wait for works that were started",
                     async->shell.rank);
        return NULL;
    }
    work->async = async;
    work->older = async->newest;
    async->newest = work;
    return work;
}

/* Marks in the caller's queue what the call comes after. The thread tells the others of an error. */
static void dtrain__async_mark(dtrain__async *async, dtrain_device_work *work)
{
    dtrain_status status = DTRAIN_OK;
    work->error.status = DTRAIN_OK;
    if (async->group->device == async->caller)
        return;
    if (work->begun == NULL)
        status = dtrain__device_event_create(async->caller, &work->begun);
    if (status == DTRAIN_OK)
        status = dtrain__device_event_record(async->caller, work->begun);
    if (status != DTRAIN_OK) {
        work->error = dtrain__thread_error;
        work->error.status = status;
    }
}

/* Checks and starts a call. */
static dtrain_status dtrain__async_start(dtrain_device_group *group, const dtrain__op *op, dtrain_device_work **made)
{
    dtrain__async *async = group->async;
    *made = NULL;
    if (async->process != dtrain__os_self())
        return dtrain__async_forked(async, dtrain__op_kind_name((uint64_t)op->kind));
    dtrain_status status = dtrain__op_check(&async->shell, op);
    if (status != DTRAIN_OK)
        return status;
    dtrain_device_work *work = dtrain__async_take(async);
    if (work == NULL)
        return DTRAIN_ERR_MEMORY;
    memcpy(&work->op, op, offsetof(dtrain__op, error));
    if (op->counts != NULL) {
        size_t *counts = (size_t *)(void *)(work + 1), ranks = (size_t)async->shell.size;
        memcpy(counts, op->counts, ranks * sizeof *counts);
        work->op.counts = counts;
        if (op->offsets != NULL)
            memcpy(counts + ranks, op->offsets, ranks * sizeof *counts);
        work->op.offsets = op->offsets != NULL ? counts + ranks : NULL;
    }
    work->ordered = 0;
    work->told = async->told;
    dtrain__async_mark(async, work);
    dtrain__worker_post(&async->worker, &work->job);
    if (!async->worker.threaded)
        dtrain__worker_wait(&async->worker, work->job.number, INT64_MAX);
    *made = work;
    return DTRAIN_OK;
}

/* Waits until work `number` was handed back, or until until_ns. Returns whether it was. */
static int dtrain__async_wait(dtrain__async *async, uint64_t number, int64_t until_ns)
{
    int64_t began = dtrain__os_now_ns();
    int over = dtrain__worker_wait(&async->worker, number, until_ns);
    if (async->group->comm->apart)
        dtrain__work_blocked(async->group->comm, dtrain__os_now_ns() - began);
    return over;
}

DTRAIN_API dtrain_status dtrain_device_work_wait(dtrain_device_work *work, dtrain_device *device)
{
    if (work == NULL)
        return DTRAIN_OK;
    dtrain__async *async = work->async;
    dtrain_device *own = async->group->device;
    if (async->process != dtrain__os_self())
        return dtrain__async_forked(async, "device_work_wait");
    device = device != NULL ? device : async->caller;
    if (own != NULL && device->ops != own->ops)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "device_work_wait on rank %d: device %s is of another kind than the group's, %s: wait on a "
                            "queue of that kind, and copy from there",
                            async->shell.rank, dtrain_device_name(device), dtrain_device_name(own));
    dtrain__async_wait(async, work->job.number, INT64_MAX);
    dtrain__error ended = work->error;
    if (ended.status != DTRAIN_OK && work->failure > async->told)
        async->told = work->failure;
    if (own != device && own != NULL && work->ordered) {
        dtrain_status status = dtrain__device_event_await(device, work->ended);
        if (status != DTRAIN_OK && ended.status == DTRAIN_OK)
            ended.status = dtrain__fail(&ended, status, "device_work_wait on rank %d: the device %s failed: %.400s",
                                        async->shell.rank, dtrain_device_name(device), dtrain__thread_error.text);
    }
    work->next = async->spare;
    async->spare = work;
    return dtrain__report(&ended);
}

/* Gives the times of a work's call. If it has not ended, returns 0 and leaves them as they are. */
static int dtrain__async_times(const dtrain_device_work *work, int64_t *begin_ns, int64_t *end_ns)
{
    if (work->async->process != dtrain__os_self() || !dtrain__worker_is_done(&work->async->worker, work->job.number))
        return 0;
    *begin_ns = work->begin_ns;
    *end_ns = work->end_ns;
    return 1;
}

/* ---- create and destroy ---- */

/* Gives the group its queue and thread, if there can be both. */
static dtrain_status dtrain__async_create(dtrain_device_group *group)
{
    dtrain_comm *comm = group->comm;
    dtrain_device *own = NULL;
    dtrain__async *async = (dtrain__async *)dtrain__alloc(comm->allocator, sizeof *async);
    group->async = async;
    if (async == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", sizeof *async);
    async->group = group;
    async->caller = group->device;
    async->shell.rank = comm->rank;
    async->shell.size = comm->size;
    async->process = dtrain__os_self();
    async->worker.owner = async;
    async->worker.perform = dtrain__async_perform;
    if (comm->desc.progress == DTRAIN_PROGRESS_POLL)
        return DTRAIN_OK;
    dtrain_status status = dtrain__device_queue_create(group->device, &own);
    if (status == DTRAIN_ERR_UNSUPPORTED)
        return DTRAIN_OK;
    if (status != DTRAIN_OK)
        return status;
    group->device = own;
    return dtrain__device_thread(&async->worker, "leave desc.async 0");
}

static void dtrain__async_abort(dtrain_device_group *group)
{
    const char *why = "it has destroyed its group of devices while this was under way";
    DTRAIN_IGNORE(dtrain_comm_abort(group->comm, why));
    if (group->hosts == NULL)
        return;
    DTRAIN_IGNORE(dtrain_comm_abort(group->hosts->near_ranks, why));
    DTRAIN_IGNORE(dtrain_comm_abort(group->hosts->far_ranks, why));
}

/* Ends the thread. A call under way gets a second to end; then the group is aborted. Returns 0 in a forked child, which
 * has no thread, and whose devices are its parent's. */
static int dtrain__async_stop(dtrain_device_group *group)
{
    dtrain__async *async = group->async;
    if (async == NULL)
        return 1;
    if (async->process != dtrain__os_self())
        return 0;
    if (async->worker.threaded &&
        !dtrain__async_wait(async, async->worker.posted, dtrain__os_now_ns() + DTRAIN__ASYNC_GRACE_NS))
        dtrain__async_abort(group);
    dtrain__worker_end(&async->worker);
    return 1;
}

/* Frees the queue and all works, also those that were not waited for. here: the devices are this process's. */
static void dtrain__async_destroy(dtrain_device_group *group, int here)
{
    dtrain__async *async = group->async;
    if (async == NULL)
        return;
    while (async->newest != NULL) {
        dtrain_device_work *work = async->newest;
        async->newest = work->older;
        if (here) {
            dtrain__device_event_destroy(async->caller, work->begun);
            dtrain__device_event_destroy(group->device, work->ended);
        }
        dtrain__free(group->comm->allocator, work);
    }
    if (here && group->device != async->caller)
        dtrain__device_queue_destroy(group->device);
    dtrain__free(group->comm->allocator, async);
}

/* ---- the calls ---- */

/* Makes the op of a call on parts that the caller cuts. */
static dtrain_status dtrain__async_op_v(dtrain_device_group *group, dtrain__kind kind, const void *in, void *out,
                                        const size_t *counts, const size_t *offsets, dtrain_dtype dtype, dtrain__op *op)
{
    *op = dtrain__op_of_parts(group != NULL ? group->comm : NULL, kind, in, out, counts, offsets, dtype);
    if (counts != NULL || group == NULL)
        return DTRAIN_OK;
    return dtrain__fail(group->async != NULL ? NULL : &group->comm->error, DTRAIN_ERR_INVALID,
                        "device_group_%s_v on rank %d: counts is NULL, expected one for each rank",
                        dtrain__op_kind_name((uint64_t)kind), group->comm->rank);
}

static dtrain_status dtrain__async_begin(dtrain_device_group *group, const dtrain__op *op, dtrain_device_work **work)
{
    const char *kind = dtrain__op_kind_name((uint64_t)op->kind);
    if (work != NULL)
        *work = NULL;
    if (group == NULL)
        return dtrain__device_begin(NULL, op);
    if (work == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "device_group_%s_async on rank %d: work is NULL, expected an address for the work", kind,
                            group->comm->rank);
    if (group->async == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "device_group_%s_async on rank %d: the group was made with desc.async 0, expected 1", kind,
                            group->comm->rank);
    return dtrain__async_start(group, op, work);
}

DTRAIN_API dtrain_status dtrain_device_group_all_reduce_async(dtrain_device_group *group, const void *in, void *out,
                                                              size_t count, dtrain_dtype dtype, dtrain_op op,
                                                              dtrain_device_work **work)
{
    dtrain__op call = dtrain__op_of(DTRAIN__ALL_REDUCE, in, out, count, dtype);
    call.op = op;
    return dtrain__async_begin(group, &call, work);
}

/* Starts a reduce-scatter or an all-gather of uneven parts, one after the other. op: for a reduce-scatter. */
static dtrain_status dtrain__async_start_v(dtrain_device_group *group, dtrain__kind kind, const void *in, void *out,
                                           const size_t *counts, dtrain_dtype dtype, dtrain_op op,
                                           dtrain_device_work **work)
{
    dtrain__op call;
    *work = NULL;
    dtrain_status status = dtrain__async_op_v(group, kind, in, out, counts, NULL, dtype, &call);
    call.op = op;
    return status == DTRAIN_OK ? dtrain__async_begin(group, &call, work) : status;
}

#endif
