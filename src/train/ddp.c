/* ---- >>ddp ----
 * Data-parallel training. Gradients are copied, unit by unit, into one flat buffer in the order in which backward
 * passes finish: the last unit first. Buckets are stretches of it. All ranks start them in that one order, whatever
 * the order of their units, since operations of a group are matched by their order.
 *
 * Micro-batches are folded by a binary counter: after micro-batch k the level of k's trailing ones takes the sum of
 * that many lower levels and k; the last collapses what there is, low levels first, which is the balanced tree whose
 * left part is the largest power of two. The highest level is the flat buffer itself. A unit that took no part in a
 * micro-batch adds -0, the one number that changes no other, so that the tree keeps its shape. */
#ifndef DTRAIN__DDP
#define DTRAIN__DDP
#include "train.h"
#include "kernels.c"
#include "params.c"

#define DTRAIN__DDP_LEVELS 32
#define DTRAIN__DDP_CHUNK 2048 /* elements folded at a time: what stays in the first cache */
#define DTRAIN__DDP_BUCKET_BYTES ((size_t)1 << 20)

typedef struct dtrain__bucket {
    size_t begin, count; /* in the flat buffer */
    int units;           /* with gradients */
    int missing;         /* of them, not yet folded in this step's last micro-batch */
    dtrain_work *work;
} dtrain__bucket;

typedef struct dtrain__ddp_unit {
    size_t begin, count; /* in the flat buffer */
    int bucket;
    int reduced; /* in this micro-batch */
} dtrain__ddp_unit;

struct dtrain_ddp {
    dtrain_comm *comm;
    dtrain_allocator *allocator;
    dtrain__params params;
    dtrain__ddp_unit *units;
    dtrain__bucket *buckets;   /* room for one a unit */
    int bucket_count, started; /* buckets before `started` are on their way */
    int overlap;
    float *levels[DTRAIN__DDP_LEVELS]; /* [0] is the flat buffer */
    size_t count;                      /* elements of each */
    int open, micro_batches;
    int ended;         /* micro-batches of this step that are over */
    int used, reduced; /* units with gradients; of them, reduced in this micro-batch */
    double weight, total_weight;
    dtrain_work *weight_work;
    dtrain_status step_status; /* the first failure of this step */
    dtrain__error error;
};

static int dtrain__ddp_level_count(int micro_batches)
{
    int levels = 0;
    while (micro_batches > 1 && (micro_batches - 1) >> levels != 0)
        levels++;
    return levels;
}

/* A failure that ends the step: kept, and returned by every call until finish. */
static dtrain_status dtrain__ddp_break(dtrain_ddp *ddp, dtrain_status status, const char *what)
{
    if (ddp->step_status == DTRAIN_OK) {
        ddp->step_status = status;
        dtrain__fail(&ddp->error, status, "ddp, %s: %s", what, dtrain_last_error());
    }
    return ddp->step_status;
}

static dtrain_status dtrain__ddp_start(dtrain_ddp *ddp)
{
    while (ddp->started < ddp->bucket_count && ddp->buckets[ddp->started].missing == 0) {
        dtrain__bucket *bucket = &ddp->buckets[ddp->started];
        float *begin = ddp->levels[0] + bucket->begin;
        if (!ddp->overlap)
            return DTRAIN_OK;
        dtrain_status status =
            dtrain_all_reduce_async(ddp->comm, begin, begin, bucket->count, DTRAIN_F32, DTRAIN_SUM, &bucket->work);
        if (status != DTRAIN_OK) {
            bucket->work = NULL;
            return dtrain__ddp_break(ddp, status, "starting a bucket");
        }
        ddp->started++;
    }
    return DTRAIN_OK;
}

/* Adds count gradients to what earlier micro-batches left at `begin` of the levels. */
static void dtrain__ddp_fold(dtrain_ddp *ddp, const float *grad, size_t begin, size_t count)
{
    const dtrain__train_kernels *kernels = dtrain__train_kernels_get();
    int last = ddp->ended == ddp->micro_batches - 1, top = dtrain__ddp_level_count(ddp->micro_batches) - 1;
    unsigned held = (unsigned)ddp->ended; /* bit l: level l has a sum */
    int ones = 0;
    while (held >> ones & 1)
        ones++;
    unsigned taken = last ? held : held & ((1u << ones) - 1);
    float *out = (last ? ddp->levels[0] : ddp->levels[top - ones]) + begin;
    for (size_t i = 0; i < count; i += DTRAIN__DDP_CHUNK) {
        size_t chunk = count - i < DTRAIN__DDP_CHUNK ? count - i : DTRAIN__DDP_CHUNK;
        float sums[DTRAIN__DDP_CHUNK];
        const float *sum = grad + i;
        for (int level = 0; taken >> level != 0; level++) {
            if (taken >> level & 1) {
                kernels->add(sums, ddp->levels[top - level] + begin + i, sum, chunk);
                sum = sums;
            }
        }
        memcpy(out + i, sum, chunk * sizeof(float));
    }
}

static void dtrain__ddp_fill(float *to, size_t count)
{
    const uint32_t negative_zero = 0x80000000u; /* by its bits: -Ofast knows no sign of zero */
    for (size_t i = 0; i < count; i++)
        memcpy(to + i, &negative_zero, sizeof negative_zero);
}

/* Folds one unit's gradients, or nothing when it was not used, and zeroes them for the next micro-batch. */
static void dtrain__ddp_fold_unit(dtrain_ddp *ddp, int number, int unused)
{
    uint64_t mode = dtrain__fpmode_enter();
    size_t done = ddp->units[number].begin;
    int last = ddp->ended == ddp->micro_batches - 1;
    for (size_t i = ddp->params.unit_begin[number]; i < ddp->params.unit_begin[number + 1]; i++) {
        const dtrain__range *range = &ddp->params.ranges[i];
        if (unused)
            dtrain__ddp_fill(range->grad, range->count);
        dtrain__ddp_fold(ddp, range->grad, done, range->count);
        if (!last && range->count > 0)
            memset(range->grad, 0, range->count * sizeof(float));
        done += range->count;
    }
    dtrain__fpmode_restore(mode);
    ddp->units[number].reduced = 1;
    ddp->reduced++;
    if (last)
        ddp->buckets[ddp->units[number].bucket].missing--;
}

/* Ends a micro-batch: units that were not reduced were not used. */
static dtrain_status dtrain__ddp_end_micro_batch(dtrain_ddp *ddp)
{
    for (int unit = ddp->params.units - 1; unit >= 0; unit--) {
        if (ddp->units[unit].count > 0 && !ddp->units[unit].reduced)
            dtrain__ddp_fold_unit(ddp, unit, 1);
        ddp->units[unit].reduced = 0;
    }
    ddp->reduced = 0;
    ddp->ended++;
    return dtrain__ddp_start(ddp);
}

static dtrain_status dtrain__ddp_grow(dtrain_ddp *ddp, int micro_batches)
{
    int levels = dtrain__ddp_level_count(micro_batches);
    for (int level = 0; level < levels; level++) {
        if (ddp->levels[level] == NULL)
            ddp->levels[level] = (float *)dtrain__alloc(ddp->allocator, ddp->count * sizeof(float));
        if (ddp->levels[level] == NULL)
            return dtrain__fail(
                &ddp->error, DTRAIN_ERR_MEMORY,
                "dtrain_ddp_begin: no memory for partial sum %d of %d, %zu bytes: use fewer micro-batches "
                "than %d",
                level + 1, levels, ddp->count * sizeof(float), micro_batches);
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__ddp_check_begin(dtrain_ddp *ddp, int micro_batches, double weight)
{
    if (ddp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_begin: the ddp is NULL: create it first");
    if (ddp->open)
        return dtrain__fail(&ddp->error, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_begin: a step is open: call dtrain_ddp_finish before the next");
    if (micro_batches < 0)
        return dtrain__fail(&ddp->error, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_begin: micro_batches is %d, expected 0 or more", micro_batches);
    if (!dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(&ddp->error, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_begin: weight is %g, expected a number of at least 0", weight);
    return dtrain__ddp_grow(ddp, micro_batches);
}

DTRAIN_API dtrain_status dtrain_ddp_begin(dtrain_ddp *ddp, int micro_batches, double weight)
{
    dtrain_status status = dtrain__ddp_check_begin(ddp, micro_batches, weight);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < ddp->params.range_count; i++) {
        if (ddp->params.ranges[i].count > 0)
            memset(ddp->params.ranges[i].grad, 0, ddp->params.ranges[i].count * sizeof(float));
    }
    for (int i = 0; i < ddp->bucket_count; i++)
        ddp->buckets[i].missing = micro_batches > 0 ? ddp->buckets[i].units : 0;
    for (int i = 0; i < ddp->params.units; i++)
        ddp->units[i].reduced = 0;
    ddp->open = 1;
    ddp->micro_batches = micro_batches;
    ddp->ended = ddp->reduced = ddp->started = 0;
    ddp->weight = ddp->total_weight = weight;
    ddp->step_status = DTRAIN_OK;
    if (ddp->overlap) {
        status = dtrain_all_reduce_async(ddp->comm, &ddp->weight, &ddp->total_weight, 1, DTRAIN_F64, DTRAIN_SUM,
                                         &ddp->weight_work);
        if (status != DTRAIN_OK) {
            ddp->weight_work = NULL;
            return dtrain__ddp_break(ddp, status, "starting the sum of weights");
        }
    }
    if (micro_batches > 0)
        return DTRAIN_OK;
    dtrain__ddp_fill(ddp->levels[0], ddp->count);
    return dtrain__ddp_start(ddp);
}

/* Says whether a call between begin and finish may go on. */
static dtrain_status dtrain__ddp_check_open(dtrain_ddp *ddp, const char *call)
{
    if (ddp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the ddp is NULL: create it first", call);
    if (!ddp->open)
        return dtrain__fail(&ddp->error, DTRAIN_ERR_INVALID, "%s: no step is open: call dtrain_ddp_begin first", call);
    if (ddp->step_status != DTRAIN_OK)
        return dtrain__report(&ddp->error);
    return DTRAIN_OK;
}

static dtrain_status dtrain__ddp_check_count(dtrain_ddp *ddp, const char *call)
{
    if (ddp->ended < ddp->micro_batches)
        return DTRAIN_OK;
    return dtrain__fail(
        &ddp->error, DTRAIN_ERR_INVALID,
        "%s: all %d micro-batches announced to dtrain_ddp_begin are over: announce as many as you compute", call,
        ddp->micro_batches);
}

DTRAIN_API dtrain_status dtrain_ddp_reduce(dtrain_ddp *ddp, int unit)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_reduce");
    if (status != DTRAIN_OK)
        return status;
    if (unit < 0 || unit >= ddp->params.units)
        return dtrain__fail(&ddp->error, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_reduce: there is no unit %d: the table has units 0 to %d", unit,
                            ddp->params.units - 1);
    if (ddp->units[unit].count == 0)
        return DTRAIN_OK;
    if (ddp->units[unit].reduced && ddp->reduced < ddp->used)
        return dtrain__fail(&ddp->error, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_reduce: unit %d was reduced twice in micro-batch %d, of whose %d units %d are "
                            "missing: when these are unused, end the micro-batch with dtrain_ddp_next",
                            unit, ddp->ended, ddp->used, ddp->used - ddp->reduced);
    if (ddp->units[unit].reduced && (status = dtrain__ddp_end_micro_batch(ddp)) != DTRAIN_OK)
        return status;
    status = dtrain__ddp_check_count(ddp, "dtrain_ddp_reduce");
    if (status != DTRAIN_OK)
        return status;
    dtrain__ddp_fold_unit(ddp, unit, 0);
    return ddp->ended == ddp->micro_batches - 1 ? dtrain__ddp_start(ddp) : DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_ddp_next(dtrain_ddp *ddp)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_next");
    if (status == DTRAIN_OK)
        status = dtrain__ddp_check_count(ddp, "dtrain_ddp_next");
    return status == DTRAIN_OK ? dtrain__ddp_end_micro_batch(ddp) : status;
}

/* Ends the last micro-batch where the caller has not; refuses where more than that is missing. */
static dtrain_status dtrain__ddp_check_finish(dtrain_ddp *ddp)
{
    int begun = ddp->ended + (ddp->reduced > 0);
    if (ddp->used > 0 && begun < ddp->micro_batches)
        return dtrain__fail(&ddp->error, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_finish: %d of %d micro-batches were reduced: reduce the rest, or call "
                            "dtrain_ddp_next for those that used no unit",
                            begun, ddp->micro_batches);
    if (ddp->reduced > 0)
        dtrain__ddp_end_micro_batch(ddp);
    return DTRAIN_OK;
}

static dtrain_status dtrain__ddp_wait(dtrain_ddp *ddp, dtrain_work **work, const char *what)
{
    dtrain_work *waited = *work;
    *work = NULL;
    dtrain_status status = waited != NULL ? dtrain_work_wait(waited) : DTRAIN_OK;
    return status != DTRAIN_OK ? dtrain__ddp_break(ddp, status, what) : DTRAIN_OK;
}

/* Copies a bucket's sums back, divided by the total weight. */
static void dtrain__ddp_unpack(dtrain_ddp *ddp, int bucket)
{
    const dtrain__train_kernels *kernels = dtrain__train_kernels_get();
    float divisor = ddp->total_weight > 0.0 ? (float)ddp->total_weight : 1.0f;
    uint64_t mode = dtrain__fpmode_enter();
    for (int unit = 0; unit < ddp->params.units; unit++) {
        const float *sums = ddp->levels[0] + ddp->units[unit].begin;
        if (ddp->units[unit].bucket != bucket || ddp->units[unit].count == 0)
            continue;
        for (size_t i = ddp->params.unit_begin[unit]; i < ddp->params.unit_begin[unit + 1]; i++) {
            kernels->divide(ddp->params.ranges[i].grad, sums, divisor, ddp->params.ranges[i].count);
            sums += ddp->params.ranges[i].count;
        }
    }
    dtrain__fpmode_restore(mode);
}

/* Reduces by blocking calls what was not started; a world of one has nothing to reduce. */
static void dtrain__ddp_reduce_now(dtrain_ddp *ddp)
{
    dtrain_status status = DTRAIN_OK;
    if (ddp->overlap || dtrain_comm_size(ddp->comm) == 1)
        return;
    status = dtrain_all_reduce(ddp->comm, &ddp->weight, &ddp->total_weight, 1, DTRAIN_F64, DTRAIN_SUM);
    for (int i = 0; status == DTRAIN_OK && i < ddp->bucket_count; i++) {
        float *begin = ddp->levels[0] + ddp->buckets[i].begin;
        status = dtrain_all_reduce(ddp->comm, begin, begin, ddp->buckets[i].count, DTRAIN_F32, DTRAIN_SUM);
    }
    if (status != DTRAIN_OK)
        dtrain__ddp_break(ddp, status, "reducing");
}

DTRAIN_API dtrain_status dtrain_ddp_finish(dtrain_ddp *ddp, double *total_weight)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_finish");
    if (ddp == NULL || !ddp->open)
        return status;
    if (status == DTRAIN_OK && (status = dtrain__ddp_check_finish(ddp)) != DTRAIN_OK)
        return status;
    if (ddp->step_status == DTRAIN_OK)
        dtrain__ddp_reduce_now(ddp);
    dtrain__ddp_wait(ddp, &ddp->weight_work, "summing weights");
    for (int i = 0; i < ddp->bucket_count; i++) {
        if (dtrain__ddp_wait(ddp, &ddp->buckets[i].work, "reducing a bucket") == DTRAIN_OK &&
            ddp->step_status == DTRAIN_OK)
            dtrain__ddp_unpack(ddp, i);
    }
    ddp->open = 0;
    if (total_weight != NULL)
        *total_weight = ddp->total_weight;
    return ddp->step_status == DTRAIN_OK ? DTRAIN_OK : dtrain__report(&ddp->error);
}

DTRAIN_API const char *dtrain_ddp_error(const dtrain_ddp *ddp)
{
    return ddp != NULL ? ddp->error.text : "";
}

/* Lays units out in the flat buffer, the last first, and cuts it into buckets. */
static void dtrain__ddp_lay_out(dtrain_ddp *ddp, size_t bucket_bytes)
{
    dtrain__bucket *bucket = NULL;
    for (int number = ddp->params.units - 1; number >= 0; number--) {
        dtrain__ddp_unit *unit = &ddp->units[number];
        unit->begin = ddp->count;
        for (size_t i = ddp->params.unit_begin[number]; i < ddp->params.unit_begin[number + 1]; i++)
            unit->count += ddp->params.ranges[i].count;
        if (unit->count == 0)
            continue;
        if (bucket == NULL || bucket->count >= bucket_bytes / sizeof(float)) {
            bucket = &ddp->buckets[ddp->bucket_count++];
            bucket->begin = ddp->count;
        }
        unit->bucket = ddp->bucket_count - 1;
        bucket->count += unit->count;
        bucket->units++;
        ddp->count += unit->count;
        ddp->used++;
    }
}

/* Compares tables and descs: ranks that differ in them would add what does not belong together. */
static dtrain_status dtrain__ddp_check_tables(dtrain_ddp *ddp, const dtrain_param *table, size_t count,
                                              const dtrain_ddp_desc *desc)
{
    const uint64_t fields[3] = {desc->bucket_bytes, (uint64_t)desc->no_broadcast, (uint64_t)desc->no_overlap};
    unsigned char digest[32];
    dtrain_sha256(fields, sizeof fields, digest);
    dtrain__params_digest(table, count, digest);
    dtrain_status status = dtrain_comm_check_equal(ddp->comm, digest, sizeof digest, DTRAIN_U8);
    if (status == DTRAIN_ERR_MISMATCH)
        return dtrain__fail(
            NULL, status,
            "dtrain_ddp_create: rank %d of %d has another parameter table or desc than others: build them "
            "alike on every rank (by hash: %s)",
            dtrain_comm_rank(ddp->comm), dtrain_comm_size(ddp->comm), dtrain_last_error());
    return status;
}

static dtrain_status dtrain__ddp_init(dtrain_ddp *ddp, const dtrain_param *table, size_t count,
                                      const dtrain_ddp_desc *desc)
{
    dtrain_status status = dtrain__params_create(&ddp->params, table, count, ddp->allocator);
    if (status != DTRAIN_OK)
        return status;
    size_t units = (size_t)ddp->params.units;
    ddp->overlap = !desc->no_overlap && dtrain_comm_size(ddp->comm) > 1;
    ddp->units = (dtrain__ddp_unit *)dtrain__alloc(ddp->allocator, units * sizeof *ddp->units);
    ddp->buckets = (dtrain__bucket *)dtrain__alloc(ddp->allocator, units * sizeof *ddp->buckets);
    if (ddp->units == NULL || ddp->buckets == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_ddp_create: no memory for %zu units", units);
    dtrain__ddp_lay_out(ddp, desc->bucket_bytes > 0 ? desc->bucket_bytes : DTRAIN__DDP_BUCKET_BYTES);
    ddp->levels[0] = (float *)dtrain__alloc(ddp->allocator, ddp->count * sizeof(float));
    if (ddp->levels[0] == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_ddp_create: no memory for %zu bytes of gradients",
                            ddp->count * sizeof(float));
    if (dtrain_comm_size(ddp->comm) == 1)
        return DTRAIN_OK;
    status = dtrain__ddp_check_tables(ddp, table, count, desc);
    for (size_t i = 0; status == DTRAIN_OK && !desc->no_broadcast && i < count; i++)
        status = dtrain_broadcast(ddp->comm, table[i].data, dtrain_param_elements(&table[i]), table[i].dtype, 0);
    return status;
}

DTRAIN_API dtrain_status dtrain_ddp_create(dtrain_ddp **ddp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                           const dtrain_ddp_desc *desc)
{
    dtrain_ddp_desc full = {0, 0, 0};
    if (ddp == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_create: ddp and comm are needed, got NULL");
    *ddp = NULL;
    if (desc != NULL)
        full = *desc;
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain_ddp *made = (dtrain_ddp *)dtrain__alloc(allocator, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_ddp_create: no memory for %zu bytes", sizeof *made);
    made->comm = comm;
    made->allocator = allocator;
    dtrain_status status = dtrain__ddp_init(made, table, count, &full);
    if (status != DTRAIN_OK) {
        dtrain_ddp_destroy(made);
        return status;
    }
    *ddp = made;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_ddp_destroy(dtrain_ddp *ddp)
{
    if (ddp == NULL)
        return;
    size_t units = (size_t)ddp->params.units;
    dtrain__ddp_wait(ddp, &ddp->weight_work, "destroying");
    for (int i = 0; i < ddp->bucket_count; i++)
        dtrain__ddp_wait(ddp, &ddp->buckets[i].work, "destroying");
    for (int i = 0; i < DTRAIN__DDP_LEVELS; i++)
        dtrain__free(ddp->allocator, ddp->levels[i], ddp->count * sizeof(float));
    dtrain__free(ddp->allocator, ddp->units, units * sizeof *ddp->units);
    dtrain__free(ddp->allocator, ddp->buckets, units * sizeof *ddp->buckets);
    dtrain__params_destroy(&ddp->params, ddp->allocator);
    dtrain__free(ddp->allocator, ddp, sizeof *ddp);
}

#endif
