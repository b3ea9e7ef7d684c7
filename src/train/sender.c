/* ---- >>sender ----
 * Gradients that travel compressed between copies, bucket by bucket, while backward still runs. Buckets are taken in
 * the order in which they are posted, which is that of the units on every rank, by one thread that has the group to
 * itself, so that bits do not depend on who is ready when. Where there can be no thread (no_overlap,
 * DTRAIN_PROGRESS_POLL, a world of one, a transport that has no groups) whoever waits for a bucket sends it and those
 * before it. After the first that fails none is sent.
 *
 * Sums on a device are sent by a queue of the thread's own; events order each bucket after what the caller's queue
 * holds when it is posted, and what that queue is given once it has been waited for after the bucket. */
#ifndef DTRAIN__SENDER
#define DTRAIN__SENDER
#include "fsdp.c"
#include "compression.c"

typedef struct dtrain__sender_job {
    int lowest, highest; /* units */
    float *sums;         /* of the whole layout, at a level */
    dtrain_status status;
    dtrain_compressed_stats stats;
    int64_t begin_ns, end_ns;
} dtrain__sender_job;

struct dtrain__sender {
    dtrain_comm *comm;
    dtrain_allocator *memory;
    const dtrain__layout *layout;
    dtrain__compression_set set;
    dtrain_device *caller, *queue; /* of a device: the caller's, and the thread's; NULL: none */
    void **events;                 /* two a job: before and after it; NULL where there is no such queue */
    size_t *ends;                  /* of a unit: the parts of its bucket, and of those sent before it, end there */
    dtrain__sender_job *jobs;      /* as many as units, taken in turn */
    uint64_t posted, sent;         /* jobs so far; posted by the caller alone, sent by whoever sends alone */
    dtrain__error error;           /* of the first that failed; written before `sent` says so */
    dtrain__bell bell;
    dtrain__os_thread thread;
    int threaded;
    pid_t process;
    uint32_t stop;
};

static dtrain_status dtrain__sender_send(dtrain__sender *sender, dtrain__sender_job *job)
{
    const size_t *ends = sender->ends;
    size_t first = job->highest + 1 < sender->layout->unit_count ? ends[job->highest + 1] : 0;
    void **events = sender->queue != NULL ? &sender->events[2 * (job - sender->jobs)] : NULL;
    dtrain_status status = events != NULL ? dtrain_device_event_await(sender->queue, events[0]) : DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = dtrain__compression_send(&sender->set, job->sums, first, ends[job->lowest], &job->stats);
    return status == DTRAIN_OK && events != NULL ? dtrain_device_event_record(sender->queue, events[1]) : status;
}

/* Sends the next of the jobs that are posted. */
static void dtrain__sender_next(dtrain__sender *sender)
{
    uint64_t number = sender->sent;
    dtrain__sender_job *job = &sender->jobs[number % (uint64_t)sender->layout->unit_count];
    job->status = sender->error.status;
    job->begin_ns = dtrain__os_now_ns();
    if (job->status == DTRAIN_OK) {
        job->status = dtrain__sender_send(sender, job);
        if (job->status != DTRAIN_OK) /* the others hear of it when this rank's caller does, and breaks its groups */
            sender->error = dtrain__thread_error;
    }
    job->end_ns = dtrain__os_now_ns();
    __atomic_store_n(&sender->sent, number + 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(&sender->bell);
}

static int dtrain__sender_busy(void *argument)
{
    dtrain__sender *sender = (dtrain__sender *)argument;
    return __atomic_load_n(&sender->stop, __ATOMIC_SEQ_CST) != 0 ||
           __atomic_load_n(&sender->posted, __ATOMIC_SEQ_CST) != sender->sent;
}

static void dtrain__sender_body(void *argument)
{
    dtrain__sender *sender = (dtrain__sender *)argument;
    for (;;) {
        for (unsigned turn = 0; !dtrain__sender_busy(sender); turn++)
            dtrain__bell_wait(&sender->bell, turn, INT64_MAX, dtrain__sender_busy, sender);
        if (__atomic_load_n(&sender->stop, __ATOMIC_SEQ_CST) != 0)
            return;
        dtrain__sender_next(sender);
    }
}

/* Hands over the units of a bucket, whose sums stay where they are until the job has been waited for; *number is the
 * job's, above 0. */
static dtrain_status dtrain__sender_post(dtrain__sender *sender, int lowest, int highest, float *sums, uint64_t *number)
{
    uint64_t slot = sender->posted % (uint64_t)sender->layout->unit_count;
    dtrain__sender_job *job = &sender->jobs[slot];
    dtrain_status status =
        sender->queue != NULL ? dtrain_device_event_record(sender->caller, sender->events[2 * slot]) : DTRAIN_OK;
    if (status != DTRAIN_OK)
        return status;
    *number = sender->posted + 1;
    memset(job, 0, sizeof *job);
    job->lowest = lowest;
    job->highest = highest;
    job->sums = sums;
    __atomic_store_n(&sender->posted, *number, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(&sender->bell);
    return DTRAIN_OK;
}

typedef struct dtrain__sender_goal {
    const dtrain__sender *sender;
    uint64_t number;
} dtrain__sender_goal;

static int dtrain__sender_reached(void *argument)
{
    const dtrain__sender_goal *goal = (const dtrain__sender_goal *)argument;
    return __atomic_load_n(&goal->sender->sent, __ATOMIC_SEQ_CST) >= goal->number;
}

/* Waits until a job has ended, or until then; returns it, or NULL while it is under way. */
static const dtrain__sender_job *dtrain__sender_wait(dtrain__sender *sender, uint64_t number, int64_t until_ns)
{
    dtrain__sender_goal goal;
    goal.sender = sender;
    goal.number = number;
    while (!sender->threaded && sender->sent < number)
        dtrain__sender_next(sender);
    for (unsigned turn = 0; !dtrain__sender_reached(&goal); turn++) {
        if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            return NULL;
        dtrain__bell_wait(&sender->bell, turn, until_ns, dtrain__sender_reached, &goal);
    }
    return &sender->jobs[(number - 1) % (uint64_t)sender->layout->unit_count];
}

/* Has the caller's queue wait for a job that has ended well. */
static dtrain_status dtrain__sender_order(dtrain__sender *sender, uint64_t number)
{
    uint64_t slot = (number - 1) % (uint64_t)sender->layout->unit_count;
    return sender->queue != NULL ? dtrain_device_event_await(sender->caller, sender->events[2 * slot + 1]) : DTRAIN_OK;
}

/* Ends the thread: what is under way is given until then to end, and is broken off after that. */
static void dtrain__sender_stop(dtrain__sender *sender, int64_t until_ns)
{
    if (sender == NULL || !sender->threaded)
        return;
    if (sender->process != getpid()) /* a forked child has no such thread */
        return;
    if (sender->posted > 0 && dtrain__sender_wait(sender, sender->posted, until_ns) == NULL)
        dtrain_comm_abort(sender->comm, "it has destroyed its dtrain_fsdp while this was under way");
    __atomic_store_n(&sender->stop, 1u, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(&sender->bell);
    dtrain__os_thread_join(&sender->thread);
    sender->threaded = 0;
}

static void dtrain__sender_destroy(dtrain__sender *sender)
{
    if (sender == NULL)
        return;
    dtrain_allocator *memory = sender->memory;
    size_t units = (size_t)sender->layout->unit_count;
    dtrain__compression_close(&sender->set);
    for (size_t i = 0; sender->events != NULL && i < 2 * units; i++)
        dtrain_device_event_destroy(sender->caller, sender->events[i]);
    dtrain_device_queue_destroy(sender->queue);
    dtrain__free(memory, sender->events, 2 * units * sizeof *sender->events);
    dtrain__free(memory, sender->ends, units * sizeof *sender->ends);
    dtrain__free(memory, sender->jobs, units * sizeof *sender->jobs);
    dtrain__free(memory, sender, sizeof *sender);
}

/* Adds the parts of a bucket: all of it together, of PowerSGD each matrix. */
static dtrain_status dtrain__sender_add(dtrain__sender *sender, const dtrain_compress_desc *desc, int lowest,
                                        int highest)
{
    const dtrain__layout *layout = sender->layout;
    const dtrain__cut_unit *units = layout->units;
    dtrain_status status = DTRAIN_OK;
    if (desc->kind != DTRAIN_COMPRESS_POWERSGD)
        return dtrain__compression_add(&sender->set, desc, units[lowest].grad,
                                       units[highest].grad + units[highest].grad_count - units[lowest].grad, 1);
    for (size_t i = units[lowest].first; status == DTRAIN_OK && i < units[highest].end; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        if (cut->trained)
            status = dtrain__compression_add(&sender->set, desc, cut->grad, cut->own_count,
                                             layout->table[cut->param].shape[cut->layer >= 0 ? 1 : 0]);
    }
    return status;
}

/* Sets up the parts of all buckets, in the order in which they are sent. */
static dtrain_status dtrain__sender_fill(dtrain__sender *sender, const dtrain_compress_desc *desc, size_t bucket_bytes)
{
    const dtrain__layout *layout = sender->layout;
    size_t units = (size_t)layout->unit_count;
    int highest = -1;
    sender->ends = (size_t *)dtrain__alloc(sender->memory, units * sizeof *sender->ends);
    sender->jobs = (dtrain__sender_job *)dtrain__alloc(sender->memory, units * sizeof *sender->jobs);
    if (sender->ends == NULL || sender->jobs == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory to send %d units compressed", layout->unit_count);
    dtrain_status status =
        dtrain__compression_begin(&sender->set, sender->comm, sender->memory, layout->cut_count + units);
    if (status == DTRAIN_OK && sender->caller != NULL)
        dtrain__compression_on(&sender->set, sender->queue != NULL ? sender->queue : sender->caller);
    for (int unit = layout->unit_count - 1; status == DTRAIN_OK && unit >= 0; unit--) {
        highest = highest < 0 && layout->units[unit].trained > 0 ? unit : highest;
        if (highest >= 0 && layout->units[unit].trained > 0 &&
            dtrain__layout_ends_bucket(layout, unit, highest, bucket_bytes)) {
            status = dtrain__sender_add(sender, desc, unit, highest);
            highest = -1;
        }
        sender->ends[unit] = sender->set.part_count;
    }
    return status == DTRAIN_OK ? dtrain__compression_end(&sender->set, desc) : status;
}

/* Makes the thread's queue and the events; where a device has one queue only, whoever waits for a bucket sends it. */
static dtrain_status dtrain__sender_beside(dtrain__sender *sender, int *threaded)
{
    size_t events = 2 * (size_t)sender->layout->unit_count;
    dtrain_status status = dtrain_device_queue_create(sender->caller, &sender->queue);
    *threaded = status == DTRAIN_OK;
    if (status == DTRAIN_ERR_UNSUPPORTED)
        return DTRAIN_OK;
    sender->events = (void **)dtrain__alloc(sender->memory, events * sizeof *sender->events);
    if (sender->events == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu events", events);
    for (size_t i = 0; status == DTRAIN_OK && i < events; i++)
        status = dtrain_device_event_create(sender->caller, &sender->events[i]);
    return status;
}

/* Makes a sender over `comm`; threaded: which it has to itself, and buckets travel before they are waited for. */
static dtrain_status dtrain__sender_create(dtrain__sender **made, dtrain_comm *comm, int threaded,
                                           const dtrain__layout *layout, const dtrain_compress_desc *desc,
                                           size_t bucket_bytes, dtrain_allocator *memory)
{
    dtrain__sender *sender = (dtrain__sender *)dtrain__alloc(memory, sizeof *sender);
    *made = sender;
    if (sender == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", sizeof *sender);
    sender->comm = comm;
    sender->memory = memory;
    sender->layout = layout;
    sender->process = getpid();
    sender->caller = layout->device;
    dtrain_status status = threaded && sender->caller != NULL ? dtrain__sender_beside(sender, &threaded) : DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = dtrain__sender_fill(sender, desc, bucket_bytes);
    if (status != DTRAIN_OK || !threaded)
        return status;
    int error = dtrain__os_thread_start(&sender->thread, dtrain__sender_body, sender, 0);
    sender->threaded = error == 0;
    if (error != 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_IO,
                              "the system refused a thread (%s): set no_overlap to send what is compressed without one",
                              strerror(error));
    return status;
}

#endif
