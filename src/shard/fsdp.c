/* ---- >>fsdp-core ----
 * The object of >>fsdp: what it holds, how it fails, waits and counts.
 *
 *   >>fsdp-gather    units come and go
 *   >>fsdp-reduce    gradients are reduced
 *   >>fsdp-step      steps are made
 *   >>fsdp-create    objects are made
 *
 * Gathers, reductions and small agreements have a group each, so that they do not wait for each other. Over a transport
 * without groups, all three are the caller's group. A failed operation breaks the object for good: it keeps the first
 * cause. Its buffers stay until destroy has waited for all operations that may still use them. */
#ifndef DTRAIN__FSDP
#define DTRAIN__FSDP
#include "layout.c"
#include "pages.c"
#include "../tensor/norm.c"
#include "../tensor/terms.c"
#include "../train/train_kernels.c"
#include "../train/optimizer.c"
#include "../comm/op.c"
#include "../device/device_group.c"

#define DTRAIN__FSDP_CHUNK 2048 /* elements at a time, in the first cache */
#define DTRAIN__FSDP_WHY 104
#define DTRAIN__FSDP_ROTATING 2          /* units that are gathered at once, beside the tied ones */
#define DTRAIN__FSDP_GRACE_NS 1000000000 /* for operations under way when an object is destroyed */
#define DTRAIN__FSDP_STAGES 3            /* of small ranges: for even units, for odd units, for gradients */

enum {
    DTRAIN__FSDP_WEIGHTS_ABSENT,
    DTRAIN__FSDP_WEIGHTS_GATHERING,
    DTRAIN__FSDP_WEIGHTS_READY
}; /* a unit's parameters */
enum {
    DTRAIN__FSDP_GRADS_IDLE,
    DTRAIN__FSDP_GRADS_WAITING,
    DTRAIN__FSDP_GRADS_SCATTERING,
    DTRAIN__FSDP_GRADS_COPYING
}; /* its gradients */
enum {
    DTRAIN__FSDP_LANE_COMPUTE,
    DTRAIN__FSDP_LANE_GATHER,
    DTRAIN__FSDP_LANE_REDUCE,
    DTRAIN__FSDP_LANE_WAIT,
    DTRAIN__FSDP_LANES
};

typedef struct dtrain__fsdp_unit {
    int state;
    int held;     /* gathered, and neither released nor reduced since */
    int fresh;    /* gathered since it was last reduced */
    int stale;    /* memory holds older values than a gather would bring */
    int backward; /* gathered on the way down, and its gradients not taken over since */
    int has_pages, has_grads;
    uint64_t used; /* the clock at its last gather */
    int reduced;   /* in this micro-batch */
    int stage, level;
    int lowest;   /* the lowest unit of its bucket, which stands for the operation between copies */
    int highest;  /* of a lowest unit: the other end of its bucket */
    uint64_t job; /* of a lowest unit: the reducer's job, or 1; 0: nothing to wait for */
} dtrain__fsdp_unit;

enum { DTRAIN__FSDP_GATHERS, DTRAIN__FSDP_REDUCES, DTRAIN__FSDP_COPIES, DTRAIN__FSDP_WAYS };

/* More fields of an object over memory of a device; see >>fsdp-device. */
typedef struct dtrain__fsdp_device {
    dtrain_device *queue; /* NULL: memory of the CPU; nothing else here is set */
    dtrain_comm *comms[DTRAIN__FSDP_WAYS];
    dtrain_device_group *groups[DTRAIN__FSDP_WAYS];
    dtrain_device_work **works[DTRAIN__FSDP_WAYS]; /* by unit; between copies by the bucket's lowest unit */
    float *blocks[2];                              /* memory of all places: for weights, for gradients */
    uint16_t *halves;                              /* this rank's part of sums that travel in 16 bits */
    int64_t *limbs;                                /* the exact sum of squares, then the norm */
    int64_t *drift;                                /* the exact sum of squares of a part of the weights */
    int64_t *drift_heard;                          /* the same in pinned memory, valid after drift_event */
    dtrain_device_event *drift_event;
    int drift_queued; /* 1: the sum is under way, or here; -1: this device cannot compute it */
    dtrain__norm drift_sum;
    dtrain__error refused; /* the first work that the device refused since a call began */
} dtrain__fsdp_device;

typedef struct dtrain__fsdp_event {
    int lane, unit;
    int64_t begin_ns, end_ns;
    uint64_t dense_bytes, sent_bytes; /* of a bucket; 0: no bucket */
} dtrain__fsdp_event;

typedef struct dtrain__reducer dtrain__reducer;

/* What ranks tell each other when one of them begins a round, and at the end of a step. A round is one reduction of
 * every unit. */
typedef struct dtrain__fsdp_note {
    uint64_t rounds; /* that the rank has begun */
    uint64_t begun;  /* micro-batches of which the rank has reduced some unit */
    uint64_t failed;
    char why[DTRAIN__FSDP_WHY];
    uint64_t weights; /* a hash of a part of them; 0: none */
} dtrain__fsdp_note;

/* What an object keeps in memory for its layout. */
typedef struct dtrain__fsdp_state {
    dtrain__pages pages[2]; /* of parameters, of gradients */
    unsigned char *tables;  /* the block of all tables with an entry a unit, cut, parameter, shard or rank */
    dtrain__fsdp_unit *units;
    unsigned char *reserved;       /* a parameter's: 1: its data, 2: its gradient lies in pages */
    float *lr_factors, *decays;    /* a parameter's */
    size_t *counts;                /* a cut's: every rank's part */
    size_t *packed_counts;         /* a unit's: every rank's part of its small ranges, then of those trained */
    float *stages;                 /* where small ranges are packed, on a device whole units. Its block also has
                                    * masters and the first level of parts */
    unsigned char *window;         /* that block is of dtrain_comm_alloc, and begins with pages of slices; or NULL */
    dtrain__window_alias *aliases; /* where those pages are mapped too */
    dtrain_slice *slices;          /* a cut's */
    float *masters, *arrays;       /* arrays: the optimizer's */
    dtrain__terms parts;           /* sums of micro-batches, this rank's parts */
    dtrain__terms full;            /* the same in full, with keep_full_grads */
    float *grads;                  /* after finish; NULL: not finished */
} dtrain__fsdp_state;

/* Of quantised ranges: see >>fsdp-quantise. */
typedef struct dtrain__fsdp_codes {
    size_t *counts;
    float *scratch;
    unsigned char *stages;
    const void **parts; /* a rank's */
} dtrain__fsdp_codes;

/* Where a step is, and what is under way. */
typedef struct dtrain__fsdp_schedule {
    dtrain_work **gathering, **reducing; /* a cut's */
    dtrain_work **copying;               /* a unit's */
    int staged[2];                       /* the units whose parameters are in the stages; -1: none */
    uint64_t clock;
    int last;                                /* the unit gathered last; -1: none in this step */
    int at, at_backward;                     /* the unit that a pass is at, by forward_to or backward_to; -1: none */
    int keeps;                               /* nothing is dropped until the step */
    int trained_units, reduced_units, ended; /* units with gradients; reduced ones of them; ended micro-batches */
    int just_ended;                          /* no unit reduced and no pass begun since the last micro-batch ended */
    int turn;                                /* the unit whose reduction is next */
    int scattering;                          /* the unit whose full gradients are being reduced; -1: none */
    int bucket;                              /* the highest unit that waits to be added over the copies; -1: none */
    int round;                               /* rounds that have begun and ended: see dtrain__fsdp_note */
    int joined;                              /* ended micro-batches without data of this rank */
} dtrain__fsdp_schedule;

/* What ranks tell each other in a step. */
typedef struct dtrain__fsdp_exchange {
    int announced; /* micro-batches; -1: begin was not called */
    int begins;    /* begin was called once */
    int most;      /* the most micro-batches that a rank has announced */
    double announcement[2], *announcements, total_weight;
    dtrain_work *announcing;
    dtrain__fsdp_note note, sent_note, *notes;
    dtrain_work *exchanging;
    int called; /* rounds of which this rank has told the others whether it begins them */
} dtrain__fsdp_exchange;

typedef struct dtrain__fsdp_scaling {
    dtrain__norm sum;   /* of squares, valid if summed */
    int summed, agreed; /* agreed: the sum is that of all parts of the model */
    float loss_scale;
    int good_steps;
} dtrain__fsdp_scaling;

typedef struct dtrain__fsdp_figures {
    dtrain_bucket *buckets; /* of the last step: at most twice as many as units */
    size_t bucket_count;
    int buckets_old; /* the next bucket of this step replaces them all */
    dtrain_fsdp_stats stats;
    dtrain__fsdp_event *events;
    size_t event_count;
    int64_t left_ns; /* when the last call returned */
} dtrain__fsdp_figures;

struct dtrain_fsdp {
    const char *call;               /* the last public call */
    dtrain_comm *comm;              /* the caller's */
    dtrain_comm *gathers, *reduces; /* the ranks of one copy; NULL: one rank */
    dtrain_comm *copies;            /* the ranks with the same slices; NULL: one rank */
    dtrain_comm *world;             /* all ranks; NULL: one rank */
    int shares_comm;                /* 1: these are the caller's comm */
    dtrain_allocator memory;
    dtrain_fsdp_desc desc;
    dtrain_optimizer_desc optimizer;
    uint64_t step, freeze_step;
    int freezes;     /* 1-bit Adam: v is frozen after freeze_step steps */
    int ddp;         /* it is a DDP's */
    int in_place;    /* gradients are reduced and divided in the caller's memory */
    uint64_t checks; /* parts of the weights that were found alike */
    dtrain__layout layout;
    dtrain__fsdp_state state;
    dtrain__fsdp_codes codes;
    dtrain__fsdp_schedule schedule;
    dtrain__fsdp_exchange exchange;
    dtrain__fsdp_scaling scaling;
    dtrain__fsdp_figures figures;
    dtrain__fsdp_device device;
    dtrain__reducer *reducer;    /* sends compressed sums; NULL: nothing is compressed */
    struct dtrain__guard *guard; /* of watched memory, see >>fsdp-debug; NULL: nothing is watched */
    uint64_t *left; /* a cut's: a hash of its gradients after a DDP's reduce; 0: they may be written. NULL: nothing is
                     * compared */
    dtrain__error broken;
};

static int dtrain__fsdp_rank(const dtrain_fsdp *fsdp)
{
    return dtrain_comm_rank(fsdp->comm);
}

static DTRAIN__NOINLINE void dtrain__fsdp_record(dtrain_fsdp *fsdp, int lane, int unit, int64_t begin_ns,
                                                 int64_t end_ns)
{
    if (fsdp->desc.trace_events == 0 || end_ns <= begin_ns)
        return;
    dtrain__fsdp_event *event = &fsdp->figures.events[fsdp->figures.event_count++ % fsdp->desc.trace_events];
    event->lane = lane;
    event->unit = unit;
    event->begin_ns = begin_ns;
    event->end_ns = end_ns;
    event->dense_bytes = event->sent_bytes = 0;
}

/* Counts a bucket that was sent. Its event is the last one. A step of several micro-batches sends it several times. */
static void dtrain__fsdp_account(dtrain_fsdp *fsdp, int first, int last, uint64_t dense, uint64_t sent, int64_t ns)
{
    dtrain_bucket *bucket = fsdp->figures.buckets, *end;
    if (fsdp->figures.buckets_old)
        fsdp->figures.bucket_count = 0;
    fsdp->figures.buckets_old = 0;
    for (end = bucket + fsdp->figures.bucket_count; bucket < end; bucket++)
        if (bucket->first_unit == first && bucket->last_unit == last)
            break;
    if (bucket == end) {
        memset(bucket, 0, sizeof *bucket);
        bucket->first_unit = first;
        bucket->last_unit = last;
        fsdp->figures.bucket_count++;
    }
    bucket->dense_bytes += dense;
    bucket->sent_bytes += sent;
    bucket->ns += ns;
    fsdp->figures.stats.dense_bytes += dense;
    fsdp->figures.stats.sent_bytes += sent;
    if (fsdp->desc.trace_events == 0 || fsdp->figures.event_count == 0)
        return;
    dtrain__fsdp_event *event = &fsdp->figures.events[(fsdp->figures.event_count - 1) % fsdp->desc.trace_events];
    if (event->lane == DTRAIN__FSDP_LANE_REDUCE) {
        event->dense_bytes += dense;
        event->sent_bytes += sent;
    }
}

/* Returns the status that other groups get for a failure. A failure of this rank alone becomes ABORTED there. */
static dtrain_status dtrain__fsdp_told(dtrain_status status)
{
    return status == DTRAIN_ERR_MEMORY || status == DTRAIN_ERR_IO || status == DTRAIN_ERR_INVALID ? DTRAIN_ERR_ABORTED
                                                                                                  : status;
}

/* Breaks all groups of the object. When a rank is lost, only the groups that it was in learn it from the system; ranks
 * of the others would wait for this rank. */
static void dtrain__fsdp_break_groups(dtrain_fsdp *fsdp)
{
    dtrain_comm *groups[] = {fsdp->gathers,
                             fsdp->reduces,
                             fsdp->copies,
                             fsdp->world,
                             fsdp->device.comms[DTRAIN__FSDP_GATHERS],
                             fsdp->device.comms[DTRAIN__FSDP_REDUCES],
                             fsdp->device.comms[DTRAIN__FSDP_COPIES]};
    dtrain__error cause, kept = dtrain__thread_error;
    dtrain__fail(&cause, dtrain__fsdp_told(fsdp->broken.status), "rank %d has broken off: %.560s",
                 dtrain__fsdp_rank(fsdp), fsdp->broken.text);
    for (size_t i = 0; i < sizeof groups / sizeof groups[0] && !fsdp->shares_comm; i++)
        if (groups[i] != NULL)
            dtrain__group_break(groups[i], &cause);
    dtrain__thread_error = kept;
}

/* Breaks the object and keeps the first failure. Nothing continues, because buffers may still be in use. */
static dtrain_status dtrain__fsdp_break(dtrain_fsdp *fsdp, dtrain_status status, const char *what, int unit)
{
    if (fsdp->broken.status == DTRAIN_OK) {
        int alone = status == DTRAIN_ERR_TIMEOUT || status == DTRAIN_ERR_MISMATCH;
        char of[32] = "";
        if (unit >= 0)
            snprintf(of, sizeof of, " of unit %d", unit);
        dtrain__fail(&fsdp->broken, status, "%s on rank %d, %s%s: %s%s", fsdp->call, dtrain__fsdp_rank(fsdp), what, of,
                     dtrain__status_cause(&dtrain__thread_error),
                     alone ? "; gather and reduce on every rank, also to sample or to validate" : "");
        dtrain__fsdp_break_groups(fsdp);
    }
    return dtrain__report(&fsdp->broken);
}

/* Notes that this rank cannot continue the step, so that no rank applies it. The next dtrain_fsdp_finish, or a call
 * that implies it, ends on every rank with DTRAIN_ERR_ABORTED, this rank's number and the reason. This rank must still
 * make the gathers and reductions that the others make. */
static void dtrain__fsdp_fail(dtrain_fsdp *fsdp, const char *why)
{
    if (fsdp == NULL || fsdp->exchange.note.failed)
        return;
    fsdp->exchange.note.failed = 1;
    snprintf(fsdp->exchange.note.why, sizeof fsdp->exchange.note.why, "%.*s", DTRAIN__FSDP_WHY - 1,
             why != NULL ? why : "");
}

/* Begins a public call: checks the object and the unit, and ends the caller's computation in the trace. */
static dtrain_status dtrain__fsdp_enter(dtrain_fsdp *fsdp, const char *call, int unit)
{
    if (fsdp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the object is NULL: create it first", call);
    if (fsdp->broken.status != DTRAIN_OK)
        return dtrain__report(&fsdp->broken);
    if (fsdp->reducer != NULL && fsdp->copies == NULL && dtrain__group_whole(fsdp->comm, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID; /* a world of one: compressed sums use the caller's group */
    fsdp->call = call;
    if (unit < 0 || unit >= fsdp->layout.unit_count)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: there is no unit %d: the table has units 0 to %d", call,
                            unit, fsdp->layout.unit_count - 1);
    if (fsdp->figures.left_ns != 0)
        dtrain__fsdp_record(fsdp, DTRAIN__FSDP_LANE_COMPUTE, fsdp->schedule.last, fsdp->figures.left_ns,
                            dtrain__os_now_ns());
    return DTRAIN_OK;
}

/* Notes that a device's queue has refused work. dtrain__fsdp_leave ends the public call with that. */
static DTRAIN__NOINLINE void dtrain__fsdp_queued(dtrain_fsdp *fsdp, dtrain_status status)
{
    if (status != DTRAIN_OK && fsdp->device.refused.status == DTRAIN_OK)
        fsdp->device.refused = dtrain__thread_error;
}

/* Ends a public call. */
static dtrain_status dtrain__fsdp_leave(dtrain_fsdp *fsdp, dtrain_status status)
{
    if (fsdp->device.refused.status != DTRAIN_OK && fsdp->broken.status == DTRAIN_OK) {
        dtrain__report(&fsdp->device.refused);
        status = dtrain__fsdp_break(fsdp, fsdp->device.refused.status, "queueing on its device the work",
                                    fsdp->schedule.last);
    }
    if (fsdp->desc.trace_events > 0)
        fsdp->figures.left_ns = dtrain__os_now_ns();
    return status;
}

/* Counts the time of a wait that has ended, and took_ns, the time of the operation itself. */
static void dtrain__fsdp_waited(dtrain_fsdp *fsdp, int unit, int64_t begin_ns, int64_t took_ns)
{
    int64_t end_ns = dtrain__os_now_ns();
    fsdp->figures.stats.waited_ns += end_ns - begin_ns;
    fsdp->figures.stats.communicated_ns += took_ns;
    dtrain__fsdp_record(fsdp, DTRAIN__FSDP_LANE_WAIT, unit, begin_ns, end_ns);
}

/* Waits for one operation, and counts the time of the wait and of the operation. */
static dtrain_status dtrain__fsdp_wait(dtrain_fsdp *fsdp, dtrain_work **work, int lane, int unit)
{
    dtrain_work *waited = *work;
    if (waited == NULL)
        return DTRAIN_OK;
    const int64_t *ran_ns = waited->comm->waited_ns;
    int64_t begin_ns = dtrain__os_now_ns();
    *work = NULL;
    dtrain_status status = dtrain_work_wait(waited);
    int ran = ran_ns[0] > 0 && ran_ns[1] > ran_ns[0];
    dtrain__fsdp_waited(fsdp, unit, begin_ns, ran ? ran_ns[1] - ran_ns[0] : 0);
    if (ran)
        dtrain__fsdp_record(fsdp, lane, unit, ran_ns[0], ran_ns[1]);
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, lane == DTRAIN__FSDP_LANE_GATHER ? "gathering" : "reducing", unit);
    return DTRAIN_OK;
}

/* Finds the weight of all ranks, and the most micro-batches of one rank, from what they announced. */
static dtrain_status dtrain__fsdp_announced(dtrain_fsdp *fsdp)
{
    int ranks = dtrain_comm_size(fsdp->comm);
    fsdp->exchange.total_weight = (double)ranks;
    fsdp->exchange.most = 1;
    if (fsdp->exchange.announced < 0)
        return DTRAIN_OK;
    const double *all = fsdp->world != NULL ? fsdp->exchange.announcements : fsdp->exchange.announcement;
    dtrain_status status = dtrain__fsdp_wait(fsdp, &fsdp->exchange.announcing, DTRAIN__FSDP_LANE_REDUCE, 0);
    fsdp->exchange.total_weight = 0.0;
    for (int rank = 0; rank < ranks && status == DTRAIN_OK; rank++) {
        if (!(all[2 * rank] >= 0.0 && all[2 * rank] <= (double)INT_MAX) || !(all[2 * rank + 1] >= 0.0) ||
            !dtrain__train_finite(all[2 * rank + 1])) {
            dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                         "rank %d announces %g micro-batches of weight %g: expected finite numbers of at least 0", rank,
                         all[2 * rank], all[2 * rank + 1]);
            return dtrain__fsdp_break(fsdp, DTRAIN_ERR_CORRUPT, "hearing what ranks announce", -1);
        }
        fsdp->exchange.most = all[2 * rank] > (double)fsdp->exchange.most ? (int)all[2 * rank] : fsdp->exchange.most;
        fsdp->exchange.total_weight += all[2 * rank + 1];
    }
    return status;
}

/* Waits for all operations of a unit, also after a failure, because their buffers must be free. */
static dtrain_status dtrain__fsdp_wait_all(dtrain_fsdp *fsdp, dtrain_work **works, int lane, int unit)
{
    dtrain_status first = DTRAIN_OK, status;
    for (size_t i = fsdp->layout.units[unit].first; i < fsdp->layout.units[unit].end; i++) {
        status = dtrain__fsdp_wait(fsdp, &works[i], lane, unit);
        first = first == DTRAIN_OK ? status : first;
    }
    return first;
}

static int dtrain__fsdp_all_done(const dtrain_fsdp *fsdp, dtrain_work *const *works, int unit)
{
    for (size_t i = fsdp->layout.units[unit].first; i < fsdp->layout.units[unit].end; i++)
        if (!dtrain_work_done(works[i]))
            return 0;
    return 1;
}

/* Returns this rank's part of a range. */
static float *dtrain__fsdp_own(const dtrain_fsdp *fsdp, const dtrain__layout_cut *cut)
{
    return fsdp->layout.apart && !cut->home ? fsdp->state.masters + cut->weight : cut->data + cut->own;
}

/* Returns where count numbers of 16 bits wait: in the upper half of the memory of count floats. */
static unsigned char *dtrain__fsdp_half(float *floats, size_t count)
{
    return (unsigned char *)floats + 2 * count;
}

/* These narrow floats into their upper half, last float first, and widen them from there, first float first. In that
 * order nothing is overwritten before it is read. */
static void dtrain__fsdp_narrow(float *floats, size_t count, dtrain_dtype dtype)
{
    uint16_t chunk[DTRAIN__FSDP_CHUNK];
    for (size_t end = count, n; end > 0; end -= n) {
        n = end < DTRAIN__FSDP_CHUNK ? end : DTRAIN__FSDP_CHUNK;
        DTRAIN_IGNORE(dtrain_convert(floats + end - n, DTRAIN_F32, chunk, dtype, n));
        memcpy(dtrain__fsdp_half(floats, count) + 2 * (end - n), chunk, 2 * n);
    }
}

static void dtrain__fsdp_widen(float *floats, size_t count, dtrain_dtype dtype)
{
    uint16_t chunk[DTRAIN__FSDP_CHUNK];
    for (size_t i = 0; i < count; i += DTRAIN__FSDP_CHUNK) {
        size_t n = count - i < DTRAIN__FSDP_CHUNK ? count - i : DTRAIN__FSDP_CHUNK;
        memcpy(chunk, dtrain__fsdp_half(floats, count) + 2 * i, 2 * n);
        DTRAIN_IGNORE(dtrain_convert(chunk, dtype, floats + i, DTRAIN_F32, n));
    }
}

static unsigned char *dtrain__fsdp_stage(const dtrain_fsdp *fsdp, int number)
{
    return (unsigned char *)(fsdp->state.stages + (size_t)number * fsdp->layout.stage);
}

/* Returns every rank's part of a unit's small ranges, or of their gradients. Sets *begin to where its own begins. */
static const size_t *dtrain__fsdp_packed(const dtrain_fsdp *fsdp, int number, int grads, size_t *begin)
{
    const size_t *counts =
        fsdp->state.packed_counts + (2 * (size_t)number + (size_t)grads) * (size_t)fsdp->layout.shards;
    *begin = 0;
    for (int shard = 0; shard < fsdp->layout.shard; shard++)
        *begin += counts[shard];
    return counts;
}

/* Takes or drops the reserved pages of a unit's parameters. */
static void dtrain__fsdp_page_weights(dtrain_fsdp *fsdp, int number, int take)
{
    const dtrain__layout *layout = &fsdp->layout;
    if (fsdp->state.units[number].has_pages == take || fsdp->state.pages[0].base == NULL)
        return;
    fsdp->state.units[number].has_pages = take;
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        size_t begin = layout->offsets[cut->param] + cut->element * sizeof(float);
        if (fsdp->state.reserved[cut->param] & 1)
            (take ? dtrain__pages_take : dtrain__pages_drop)(&fsdp->state.pages[0], begin, cut->count * sizeof(float));
    }
}

/* Says whether two units share a place on a device. Even units share one, odd units another. */
static int dtrain__fsdp_share_place(const dtrain_fsdp *fsdp, int a, int b, int grads)
{
    const dtrain__layout_unit *units = fsdp->layout.units;
    return a % 2 == b % 2 && units[a].shares[grads] && units[b].shares[grads];
}

static void dtrain__fsdp_page_grads(dtrain_fsdp *fsdp, int number, int take);

/* Frees the place of a unit's gradients from another unit that was left without a reduce. */
static void dtrain__fsdp_clear_place(dtrain_fsdp *fsdp, int number)
{
    for (int i = 0; i < fsdp->layout.unit_count; i++) {
        const dtrain__fsdp_unit *other = &fsdp->state.units[i];
        if (i == number || !other->has_grads || !dtrain__fsdp_share_place(fsdp, i, number, 1))
            continue;
        if (other->held || other->stage == DTRAIN__FSDP_GRADS_WAITING || other->stage == DTRAIN__FSDP_GRADS_SCATTERING)
            dtrain__fsdp_queued(fsdp, dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                                   "gradients of unit %d lie where those of unit %d do, which are not "
                                                   "reduced yet: reduce units from the last to the first",
                                                   number, i));
        else
            dtrain__fsdp_page_grads(fsdp, i, 0);
    }
}

static void dtrain__fsdp_debug_set(const dtrain_fsdp *fsdp, int number, int grads, int open);
static int dtrain__fsdp_debug_grads_open(const dtrain_fsdp *fsdp, int number);

/* Takes the reserved pages of a unit's gradients; or drops them, and sets the gradients to zero. A place on a device is
 * zeros while no unit has it. */
static void dtrain__fsdp_page_grads(dtrain_fsdp *fsdp, int number, int take)
{
    const dtrain__layout *layout = &fsdp->layout;
    const unsigned char zero = 0;
    int open = take || dtrain__fsdp_debug_grads_open(fsdp, number);
    if (take)
        dtrain__fsdp_debug_set(fsdp, number, 1, 1);
    if (fsdp->state.units[number].has_grads == take)
        return;
    dtrain__fsdp_debug_set(fsdp, number, 1, 1);
    fsdp->state.units[number].has_grads = take;
    if (take)
        dtrain__fsdp_clear_place(fsdp, number);
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        size_t begin = layout->offsets[cut->param] + cut->element * sizeof(float), bytes = cut->count * sizeof(float);
        if (!cut->trained || cut->count == 0)
            continue;
        if (fsdp->state.pages[1].base != NULL && (fsdp->state.reserved[cut->param] & 2))
            (take ? dtrain__pages_take : dtrain__pages_drop)(&fsdp->state.pages[1], begin, bytes);
        else if (!take)
            dtrain__fsdp_queued(fsdp, dtrain_device_fill(fsdp->device.queue, cut->grads, &zero, 1, bytes));
    }
    dtrain__fsdp_debug_set(fsdp, number, 1, open);
}

#endif
