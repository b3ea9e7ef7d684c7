/* ---- >>reducer ----
 * Gradients that travel compressed between copies, bucket by bucket, while backward still runs. One thread, which has
 * the group to itself, sends buckets in the order in which they are posted. That order is the same on every rank, so
 * bits do not depend on who is ready when. With no_overlap, DTRAIN_PROGRESS_POLL, a world of one, or a transport
 * without groups there is no thread. Then the call that waits for a bucket sends it, and those before it. After the
 * first failure no bucket is sent.
 *
 * A queue of the thread's own sends sums on a device. Events put each bucket after the work that the caller's queue
 * holds when the bucket is posted. Work that the caller queues after waiting for a bucket comes after that bucket. */
#ifndef DTRAIN__REDUCER
#define DTRAIN__REDUCER
#include "fsdp.c"
#include "../train/compression.c"
#include "../base/worker.c"

typedef struct dtrain__reducer_job {
    dtrain__worker_job job;
    int lowest, highest; /* units */
    float *sums;         /* of the whole layout, at a level */
    dtrain__compression_momenta momenta;
    uint64_t step; /* counted from 0 */
    double total;  /* weight of all ranks */
    dtrain_status status;
    dtrain_compressed_stats stats;
    int64_t begin_ns, end_ns;
} dtrain__reducer_job;

struct dtrain__reducer {
    dtrain_comm *comm;
    dtrain_allocator *memory;
    const dtrain__layout *layout;
    dtrain__compression_set set;
    dtrain_device *caller, *queue; /* queues of a device: the caller's, and the thread's; NULL: none */
    dtrain_device_event **events;  /* two a job: before and after it; NULL without a queue of the thread's */
    int adam;                      /* 1-bit Adam: the step number is the job's, not what the states have counted */
    size_t *ends;                  /* a unit's: one past the last part of its bucket */
    dtrain__reducer_job *jobs;     /* by a bucket's lowest unit */
    dtrain__error error;           /* of the first failure; written before its job is done */
    dtrain__worker worker;
};

static dtrain_status dtrain__reducer_run(dtrain__reducer *reducer, dtrain__reducer_job *job)
{
    const size_t *ends = reducer->ends;
    size_t first = job->highest + 1 < reducer->layout->unit_count ? ends[job->highest + 1] : 0;
    dtrain_device_event **events = reducer->queue != NULL ? &reducer->events[2 * job->lowest] : NULL;
    dtrain_status status = events != NULL ? dtrain__device_event_await(reducer->queue, events[0]) : DTRAIN_OK;
    if (job->momenta.m != NULL)
        dtrain__compression_fold(&reducer->set, job->sums, first, ends[job->lowest], &job->momenta);
    if (status == DTRAIN_OK)
        status = dtrain__compression_send(&reducer->set, job->sums, first, ends[job->lowest], job->total,
                                          reducer->adam ? &job->step : NULL, &job->stats);
    return status == DTRAIN_OK && events != NULL ? dtrain__device_event_record(reducer->queue, events[1]) : status;
}

static void dtrain__reducer_perform(void *owner, dtrain__worker_job *posted)
{
    dtrain__reducer *reducer = (dtrain__reducer *)owner;
    dtrain__reducer_job *job = (dtrain__reducer_job *)(void *)posted;
    job->status = reducer->error.status;
    job->begin_ns = dtrain__os_now_ns();
    if (job->status == DTRAIN_OK) {
        job->status = dtrain__reducer_run(reducer, job);
        if (job->status != DTRAIN_OK) /* the other ranks learn it when the waiting call breaks the groups */
            reducer->error = dtrain__thread_error;
    }
    job->end_ns = dtrain__os_now_ns();
}

/* Waits until a job has ended, or until until_ns. Returns 0 if it is still under way. */
static int dtrain__reducer_wait(dtrain__reducer *reducer, uint64_t number, int64_t until_ns)
{
    int64_t began = dtrain__os_now_ns();
    int ended = dtrain__worker_wait(&reducer->worker, number, until_ns);
    if (reducer->worker.threaded)
        dtrain__work_blocked(reducer->comm, dtrain__os_now_ns() - began);
    return ended;
}

/* Ends the thread, and frees the reducer. Jobs under way have until until_ns to end, then they are aborted. */
static void dtrain__reducer_destroy(dtrain__reducer *reducer, int64_t until_ns)
{
    if (reducer == NULL)
        return;
    dtrain_allocator *memory = reducer->memory;
    size_t units = (size_t)reducer->layout->unit_count;
    if (dtrain__worker_runs(&reducer->worker)) {
        if (reducer->worker.posted > 0 && !dtrain__reducer_wait(reducer, reducer->worker.posted, until_ns))
            DTRAIN_IGNORE(
                dtrain_comm_abort(reducer->comm, "it has destroyed its dtrain_fsdp while this was under way"));
        dtrain__worker_end(&reducer->worker);
    }
    dtrain__compression_close(&reducer->set);
    for (size_t i = 0; reducer->events != NULL && i < 2 * units; i++)
        dtrain__device_event_destroy(reducer->caller, reducer->events[i]);
    dtrain__device_queue_destroy(reducer->queue);
    dtrain__free(memory, reducer->events);
    dtrain__free(memory, reducer->ends);
    dtrain__free(memory, reducer->jobs);
    dtrain__free(memory, reducer);
}

/* A part of a bucket that travels as one vector. */
typedef struct dtrain__reducer_part {
    size_t at, count, rows;
    int dense;
} dtrain__reducer_part;

/* Finds the part that begins with cut i of a bucket, whose cuts end at `end`. Under PowerSGD it is one matrix. Else it
 * is all cuts up to the next whose `dense` differs. Returns the cut after it. */
static size_t dtrain__reducer_next_part(const dtrain__layout *layout, const dtrain_compress_desc *desc, size_t i,
                                        size_t end, dtrain__reducer_part *part)
{
    const dtrain__layout_cut *cut = &layout->cuts[i];
    int matrix = desc->kind == DTRAIN_COMPRESS_POWERSGD;
    part->at = cut->grad;
    part->count = 0;
    part->rows = matrix ? layout->table[cut->param].shape[cut->layer >= 0 ? 1 : 0] : 1;
    part->dense = layout->table[cut->param].dense;
    do
        part->count += layout->cuts[i].trained ? layout->cuts[i].own_count : 0;
    while (++i < end && !matrix && layout->table[layout->cuts[i].param].dense == part->dense);
    return i;
}

/* Adds the parts of a bucket. */
static dtrain_status dtrain__reducer_add(dtrain__reducer *reducer, const dtrain_compress_desc *desc, int lowest,
                                         int highest)
{
    const dtrain__layout *layout = reducer->layout;
    dtrain_status status = DTRAIN_OK;
    dtrain__reducer_part part;
    for (size_t i = layout->units[lowest].first, end = layout->units[highest].end; status == DTRAIN_OK && i < end;) {
        i = dtrain__reducer_next_part(layout, desc, i, end, &part);
        status = dtrain__compression_add(&reducer->set, desc, part.at, part.count, part.rows, part.dense);
    }
    return status;
}

/* Sets up the parts of all buckets, in the order in which they are sent. */
static dtrain_status dtrain__reducer_fill(dtrain__reducer *reducer, const dtrain_compress_desc *desc,
                                          size_t bucket_bytes)
{
    const dtrain__layout *layout = reducer->layout;
    size_t units = (size_t)layout->unit_count;
    int highest = -1;
    reducer->ends = (size_t *)dtrain__alloc(reducer->memory, units * sizeof *reducer->ends);
    reducer->jobs = (dtrain__reducer_job *)dtrain__alloc(reducer->memory, units * sizeof *reducer->jobs);
    if (reducer->ends == NULL || reducer->jobs == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory to send %d units compressed", layout->unit_count);
    dtrain_status status = dtrain__compression_begin(&reducer->set, reducer->comm,
                                                     reducer->queue != NULL ? reducer->queue : reducer->caller,
                                                     reducer->memory, layout->cut_count + units);
    for (int unit = layout->unit_count - 1; status == DTRAIN_OK && unit >= 0; unit--) {
        highest = highest < 0 && layout->units[unit].trained > 0 ? unit : highest;
        if (highest >= 0 && layout->units[unit].trained > 0 &&
            dtrain__layout_ends_bucket(layout, unit, highest, bucket_bytes)) {
            status = dtrain__reducer_add(reducer, desc, unit, highest);
            highest = -1;
        }
        reducer->ends[unit] = reducer->set.part_count;
    }
    return status == DTRAIN_OK ? dtrain__compression_end(&reducer->set, desc) : status;
}

/* Makes the thread's queue and the events. If the device has only one queue, there is no thread. */
static dtrain_status dtrain__reducer_make_queue(dtrain__reducer *reducer, int *threaded)
{
    size_t events = 2 * (size_t)reducer->layout->unit_count;
    dtrain_status status = dtrain__device_queue_create(reducer->caller, &reducer->queue);
    *threaded = status == DTRAIN_OK;
    if (status == DTRAIN_ERR_UNSUPPORTED)
        return DTRAIN_OK;
    reducer->events = (dtrain_device_event **)dtrain__alloc(reducer->memory, events * sizeof *reducer->events);
    if (reducer->events == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu events", events);
    for (size_t i = 0; status == DTRAIN_OK && i < events; i++)
        status = dtrain__device_event_create(reducer->caller, &reducer->events[i]);
    return status;
}

/* Makes a reducer over `comm`. threaded: it has comm to itself, and its thread sends buckets as they are posted. */
static dtrain_status dtrain__reducer_create(dtrain__reducer **made, dtrain_comm *comm, int threaded,
                                            const dtrain__layout *layout, const dtrain_compress_desc *desc,
                                            size_t bucket_bytes, dtrain_allocator *memory)
{
    dtrain__reducer *reducer = (dtrain__reducer *)dtrain__alloc(memory, sizeof *reducer);
    *made = reducer;
    if (reducer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", sizeof *reducer);
    reducer->comm = comm;
    reducer->memory = memory;
    reducer->layout = layout;
    reducer->worker.owner = reducer;
    reducer->worker.perform = dtrain__reducer_perform;
    reducer->adam = desc->adam;
    reducer->caller = layout->device;
    dtrain_status status =
        threaded && reducer->caller != NULL ? dtrain__reducer_make_queue(reducer, &threaded) : DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = dtrain__reducer_fill(reducer, desc, bucket_bytes);
    if (status != DTRAIN_OK || !threaded)
        return status;
    comm->apart = 1;
    int error = dtrain__worker_start(&reducer->worker);
    if (error != 0)
        status = dtrain__fail(
            NULL, DTRAIN_ERR_IO,
            "the system refused a thread (%s; see ulimit -u and pids.max): set no_overlap to send without one",
            dtrain__os_error_text(error));
    return status;
}

/* Takes over the units of a bucket, once all ranks have announced their weights. The sums, and under 1-bit Adam the
 * momenta that are folded into them, must stay in place until dtrain__reducer_finish. */
static dtrain_status dtrain__reducer_take(dtrain_fsdp *fsdp, int lowest, int highest, float *sums)
{
    dtrain__reducer *reducer = fsdp->reducer;
    dtrain__reducer_job *job = &reducer->jobs[lowest];
    double weight = fsdp->exchange.announced >= 0 ? fsdp->exchange.announcement[1] : 1.0;
    dtrain_status status = dtrain__fsdp_announced(fsdp);
    if (status == DTRAIN_OK && reducer->queue != NULL)
        status = dtrain__device_event_record(reducer->caller, reducer->events[2 * lowest]);
    if (status != DTRAIN_OK)
        return status;
    memset(job, 0, sizeof *job);
    job->lowest = lowest;
    job->highest = highest;
    job->sums = sums;
    job->step = fsdp->step;
    job->total = fsdp->exchange.total_weight;
    if (fsdp->freezes && fsdp->step >= fsdp->freeze_step) {
        job->momenta.m = fsdp->state.arrays; /* laid out as the gradients */
        job->momenta.rest1 = (float)(1.0 - (double)fsdp->optimizer.beta1);
        job->momenta.factor = (float)((double)fsdp->optimizer.beta1 * weight);
    }
    dtrain__worker_post(&reducer->worker, &job->job);
    fsdp->state.units[lowest].job = job->job.number;
    return DTRAIN_OK;
}

/* Waits until the bucket of a unit has been sent, and counts as dtrain__fsdp_wait does. */
static dtrain_status dtrain__reducer_finish(dtrain_fsdp *fsdp, int number)
{
    dtrain__reducer *reducer = fsdp->reducer;
    int lowest = fsdp->state.units[number].lowest;
    const dtrain__reducer_job *job = &reducer->jobs[lowest];
    int64_t begin = dtrain__os_now_ns();
    if (fsdp->state.units[lowest].job == 0)
        return DTRAIN_OK;
    dtrain__reducer_wait(reducer, fsdp->state.units[lowest].job, INT64_MAX);
    if (job->status == DTRAIN_OK && reducer->queue != NULL)
        dtrain__fsdp_queued(fsdp, dtrain__device_event_await(reducer->caller, reducer->events[2 * lowest + 1]));
    fsdp->state.units[lowest].job = 0;
    dtrain__fsdp_waited(fsdp, number, begin, job->end_ns - job->begin_ns);
    if (job->status != DTRAIN_OK) {
        dtrain__report(&reducer->error);
        return dtrain__fsdp_break(fsdp, job->status, "reducing", number);
    }
    dtrain__fsdp_record(fsdp, DTRAIN__FSDP_LANE_REDUCE, lowest, job->begin_ns, job->end_ns);
    dtrain__fsdp_account(fsdp, lowest, job->highest, job->stats.dense_bytes, job->stats.sent_bytes,
                         job->end_ns - job->begin_ns);
    return DTRAIN_OK;
}

/* Ends a step: see dtrain__compression_end_step. No bucket is under way. */
static void dtrain__reducer_end_step(dtrain__reducer *reducer, int applied)
{
    if (reducer != NULL)
        dtrain__compression_end_step(&reducer->set, applied);
}

static void dtrain__reducer_undo(dtrain__reducer *reducer)
{
    if (reducer != NULL)
        dtrain__compression_undo(&reducer->set);
}

static void dtrain__reducer_loading(dtrain__reducer *reducer)
{
    if (reducer != NULL)
        dtrain__compression_loading(&reducer->set);
}

static dtrain_status dtrain__reducer_loaded(dtrain__reducer *reducer, const dtrain__lister *lister)
{
    return reducer != NULL ? dtrain__compression_loaded(&reducer->set, lister) : DTRAIN_OK;
}

/* Lists what compression keeps: a row for each rank. If buckets differ in size between shards, each shard has rows of
 * its own. */
static void dtrain__reducer_list(const dtrain__reducer *reducer, const dtrain__layout *layout, int rank,
                                 dtrain__lister *lister)
{
    dtrain__pieces_row row = {rank, layout->copies * layout->shards, 1, 0, 0};
    int even = 1;
    for (size_t i = 0; i < layout->cut_count && layout->shards > 1; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i], *last = i > 0 ? cut - 1 : cut;
        even = even && layout->units[cut->unit].count % (size_t)layout->shards == 0 &&
               (cut->unit != last->unit ||
                (cut->trained == last->trained && layout->table[cut->param].dense == layout->table[last->param].dense));
    }
    if (!even) {
        row.rank = rank / layout->shards;
        row.ranks = layout->copies;
        row.shards = layout->shards;
        row.shard = layout->shard;
    }
    if (reducer != NULL)
        dtrain__compression_list(&reducer->set, row, lister);
}

/* ---- what it will send ---- */

/* Returns the most bytes of a selection: the header and, for each element, its index and its value. */
static uint64_t dtrain__reducer_selection_bytes(const dtrain_topk_desc *topk, size_t chosen, size_t count)
{
    uint64_t width = topk->values == DTRAIN_BF16 || topk->values == DTRAIN_F16 ? 2 : 4;
    uint64_t bytes = (uint64_t)chosen * (width + (topk->indices == DTRAIN_INDEX_DELTA ? 5 : 4));
    if (topk->indices == DTRAIN_INDEX_AUTO && bytes > width * count) /* then without indices */
        bytes = width * count;
    return DTRAIN__SPARSE_HEADER + bytes;
}

/* Returns the most bytes that top-k sends after its warm-up. Lengths travel before the selections. */
static uint64_t dtrain__reducer_topk_bytes(const dtrain_topk_desc *topk, size_t count, int ranks)
{
    double ratio = topk->schedule.ratio == 0.0 ? 0.01 : topk->schedule.ratio;
    size_t chosen = dtrain_topk_count(count, ratio), part = dtrain__split(count, ranks, 0, NULL), picked;
    uint64_t others = (uint64_t)(ranks - 1), one = dtrain__reducer_selection_bytes(topk, chosen, count);
    uint64_t dense = dtrain__plan_sent_bytes(count, ranks), most = 8 * (uint64_t)count;
    if (topk->exchange == DTRAIN_EXCHANGE_GATHER || (topk->exchange == DTRAIN_EXCHANGE_AUTO && ranks <= 8)) {
        if (one * (uint64_t)ranks <= most)
            return others * (8 + one);
        one = one < most ? one : most; /* if all selections are longer than that, vectors are sent instead */
        return 8 * others + (others * one > dense ? others * one : dense);
    }
    picked = chosen > part / (size_t)ranks ? part : chosen * (size_t)ranks;
    return others * (16 + DTRAIN__SPARSE_HEADER + dtrain__reducer_selection_bytes(topk, picked, part)) +
           dtrain__reducer_selection_bytes(topk, chosen, SIZE_MAX / 8);
}

/* Returns the bytes that a packing compressor sends: to each other rank its part, and to all others this rank's sum. */
static uint64_t dtrain__reducer_pack_bytes(const dtrain_compressor *q, size_t count, int ranks, int rank)
{
    uint64_t bytes = 0;
    for (int r = 0; r < ranks; r++)
        bytes += q->bytes(q, dtrain__split(count, ranks, r, NULL)) * (r == rank ? (uint64_t)(ranks - 1) : 1);
    return bytes;
}

/* Returns the bytes that one part of a bucket sends compressed. Adds elements that travel uncompressed to *plain. */
static uint64_t dtrain__reducer_part_bytes(const dtrain_compress_desc *desc, const dtrain__reducer_part *part,
                                           int ranks, int rank, size_t *plain)
{
    size_t thin, count = part->count, rows = part->rows > 0 ? part->rows : 1;
    dtrain_compressor q;
    if (count == 0 || ranks < 2)
        return 0;
    if (part->dense || dtrain__compression_is_plain(desc, count, rows)) {
        *plain += count;
        return 0;
    }
    switch (desc->kind) {
    case DTRAIN_COMPRESS_DEFAULT:
    case DTRAIN_COMPRESS_TOPK: return dtrain__reducer_topk_bytes(&desc->topk, count, ranks);
    case DTRAIN_COMPRESS_POWERSGD:
        thin = (rows + count / rows) * (desc->rank > 0 ? (size_t)desc->rank : 4);
        return dtrain__plan_sent_bytes(thin < count ? thin : count, ranks);
    default: break;
    }
    if (dtrain__compression_make(desc, 1, 1, NULL, &q) != DTRAIN_OK || q.reduce != NULL)
        return dtrain__plan_sent_bytes(count, ranks); /* its length is not known before */
    return dtrain__reducer_pack_bytes(&q, count, ranks, rank);
}

/* Returns the bytes that a bucket sends compressed. Sets *plain to the elements that travel uncompressed. */
static uint64_t dtrain__reducer_bytes(const dtrain__layout *layout, const dtrain_compress_desc *desc, int lowest,
                                      int highest, int copy, size_t *plain)
{
    uint64_t bytes = 0;
    dtrain__reducer_part part;
    *plain = 0;
    for (size_t i = layout->units[lowest].first, end = layout->units[highest].end; i < end;) {
        i = dtrain__reducer_next_part(layout, desc, i, end, &part);
        bytes += dtrain__reducer_part_bytes(desc, &part, layout->copies, copy, plain);
    }
    return bytes;
}

#endif
