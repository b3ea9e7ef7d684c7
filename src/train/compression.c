/* ---- >>compression ----
 * A flat vector of gradients whose parts travel compressed, each with a state of its own; and the aggregator that sends
 * all gradients of a table in this way.
 *
 * A compressor that selects works on one large part. With a part for each parameter, the few elements that matter would
 * share the sent ones with many that do not. Sums travel, and are divided once, by the weight of all ranks. What is
 * kept of them is a share of the mean: a step of another weight scales it first, and one of weight 0 leaves it. */
#ifndef DTRAIN__COMPRESSION
#define DTRAIN__COMPRESSION
#include "train.h"
#include "params.c"
#include "aggregator.c"
#include "../tensor/device.c"
#include "../compress/compressed.c"

#define DTRAIN__COMPRESSION_LEAST 1024

/* A part of the vector that travels by itself. */
typedef struct dtrain__compression_part {
    size_t at, count;
    int dense;                /* the table marks its parameters dense */
    dtrain_compressed *state; /* NULL: it is all-reduced uncompressed */
} dtrain__compression_part;

typedef struct dtrain__compression_set {
    dtrain_comm *comm;
    dtrain_allocator *allocator;
    dtrain_device *device; /* where the vector is; NULL: the CPU */
    dtrain__compression_part *parts;
    size_t part_count, plain_count;
    float *plain; /* uncompressed parts side by side; for a vector on a device in pinned memory */
    float momentum;
    float *velocity[2]; /* of the sums of uncompressed parts, plain_count floats in each version; NULL: none */
    double unit[2];     /* weight of the sums that each version is of; 0: none yet */
    dtrain__versions versions;
} dtrain__compression_set;

typedef struct dtrain__compression {
    dtrain__compression_set set;
    size_t count, *elements; /* of each parameter; the array follows this struct */
    size_t total;
    float *flat; /* all gradients */
    dtrain_compressed_stats stats;
} dtrain__compression;

/* Makes a compressor for one part. */
static dtrain_status dtrain__compression_make(const dtrain_compress_desc *desc, size_t rows, size_t columns,
                                              dtrain_allocator *allocator, dtrain_compressor *made)
{
    dtrain_topk_desc topk = desc->topk;
    memset(made, 0, sizeof *made);
    if (desc->feedback.device != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compress: feedback.device is %s, expected NULL: the table's parameters have the device",
                            dtrain_device_name(desc->feedback.device));
    if (desc->kind == DTRAIN_COMPRESS_DEFAULT || desc->kind == DTRAIN_COMPRESS_TOPK) {
        if (topk.schedule.ratio == 0.0)
            topk.schedule.ratio = 0.01;
        return dtrain_compressor_topk(made, &topk, allocator);
    }
    if (desc->kind == DTRAIN_COMPRESS_POWERSGD)
        return dtrain_compressor_powersgd(made, rows, columns, desc->rank, 1, allocator);
    *made = dtrain_compressor_of(desc->kind, desc->block); /* for another kind it has no functions */
    if (made->bytes != NULL)
        return DTRAIN_OK;
    if (desc->kind != DTRAIN_COMPRESS_OWN || desc->own == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compress: kind %d%s: expected one of dtrain_compression, and own for "
                            "DTRAIN_COMPRESS_OWN" DTRAIN__ZERO_FIRST,
                            (int)desc->kind, desc->own == NULL ? " without own" : "");
    *made = *desc->own;
    made->destroy = NULL;
    return DTRAIN_OK;
}

/* Returns a desc for compressors that pack: with defaults filled in, and fields that its kind does not read at zero. */
static dtrain_compress_desc dtrain__compression_defaults(const dtrain_compress_desc *given)
{
    dtrain_compress_desc desc = *given;
    desc.kind = given->kind == DTRAIN_COMPRESS_DEFAULT ? DTRAIN_COMPRESS_TOPK : given->kind;
    memset(&desc.topk, 0, sizeof desc.topk);
    if (desc.kind == DTRAIN_COMPRESS_TOPK) {
        desc.topk.schedule.ratio = given->topk.schedule.ratio != 0.0 ? given->topk.schedule.ratio : 0.01;
        desc.topk.values = given->topk.values != 0 ? given->topk.values : DTRAIN_F32;
    }
    desc.own = desc.kind == DTRAIN_COMPRESS_OWN ? given->own : NULL;
    int blocks =
        desc.kind == DTRAIN_COMPRESS_INT8 || desc.kind == DTRAIN_COMPRESS_FP8 || desc.kind == DTRAIN_COMPRESS_SIGN;
    desc.block = blocks ? dtrain_compressor_of(desc.kind, given->block).block : desc.own != NULL ? desc.own->block : 0;
    desc.rank = desc.feedback.no_masking = 0;
    desc.least_count = given->least_count > 0 ? given->least_count : DTRAIN__COMPRESSION_LEAST;
    return desc;
}

/* Compares tables and descs on all ranks, with the defaults of compression filled in. mine: this rank's failure. */
static dtrain_status dtrain__compression_meet(dtrain_comm *comm, const char *call, const char *advice,
                                              dtrain__params_given given, dtrain_status mine)
{
    dtrain_compress_desc compress;
    if (given.compress != NULL) {
        compress = dtrain__compression_defaults(given.compress);
        given.compress = &compress;
    }
    dtrain__alike alike = {call, &given, dtrain__params_given_line, advice, 0, {0}, 0};
    return dtrain__alike_meet(comm, &alike, mine);
}

static void dtrain__compression_close(dtrain__compression_set *set)
{
    for (size_t i = 0; i < set->part_count; i++)
        dtrain_compressed_destroy(set->parts[i].state);
    dtrain__free(set->allocator, set->parts);
    if (set->device != NULL)
        dtrain_device_free(set->device, DTRAIN_MEMORY_PINNED, set->plain);
    else
        dtrain__free(set->allocator, set->plain);
    dtrain__free(set->allocator, set->velocity[0]);
    dtrain__free(set->allocator, set->velocity[1]);
    memset(set, 0, sizeof *set);
}

/* Begins a set of at most `capacity` parts. The caller closes it, also after a failure. While a thread sends, it alone
 * uses the device's queue. */
static dtrain_status dtrain__compression_begin(dtrain__compression_set *set, dtrain_comm *comm, dtrain_device *device,
                                               dtrain_allocator *allocator, size_t capacity)
{
    size_t bytes = 0;
    set->comm = comm;
    set->device = device;
    set->allocator = allocator;
    if (dtrain__mul_size(capacity, sizeof *set->parts, &bytes))
        set->parts = (dtrain__compression_part *)dtrain__alloc(allocator, bytes);
    return set->parts != NULL ? DTRAIN_OK
                              : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compress: no memory for %zu parts", capacity);
}

/* Says whether a part of this size travels uncompressed. */
static int dtrain__compression_is_plain(const dtrain_compress_desc *desc, size_t count, size_t rows)
{
    size_t least = desc->least_count > 0 ? desc->least_count : DTRAIN__COMPRESSION_LEAST;
    return count < least || (desc->kind == DTRAIN_COMPRESS_POWERSGD && count / rows < 2);
}

/* Adds the next part. dense: it travels uncompressed. */
static dtrain_status dtrain__compression_add(dtrain__compression_set *set, const dtrain_compress_desc *desc, size_t at,
                                             size_t count, size_t rows, int dense)
{
    dtrain__compression_part *part = &set->parts[set->part_count];
    dtrain_compressor compressor;
    dtrain_compressed_desc feedback = desc->feedback;
    if (count == 0)
        return DTRAIN_OK;
    part->at = at;
    part->count = count;
    part->dense = dense;
    set->part_count++;
    rows = rows > 0 ? rows : 1;
    if (dense || dtrain__compression_is_plain(desc, count, rows)) {
        set->plain_count += count;
        return DTRAIN_OK;
    }
    dtrain_status status = dtrain__compression_make(desc, rows, count / rows, set->allocator, &compressor);
    feedback.device = set->device;
    return status == DTRAIN_OK ? dtrain_compressed_create(&part->state, set->comm, count, &compressor, &feedback)
                               : status;
}

/* Ends a set after all parts have been added. */
static dtrain_status dtrain__compression_end(dtrain__compression_set *set, const dtrain_compress_desc *desc)
{
    size_t bytes = set->plain_count * sizeof(float);
    set->momentum = desc->feedback.momentum;
    dtrain_status status = DTRAIN_OK;
    void *plain;
    if (set->device != NULL)
        status = dtrain_device_alloc(set->device, DTRAIN_MEMORY_PINNED, bytes > 0 ? bytes : 1, &plain);
    else
        plain = dtrain__alloc(set->allocator, bytes);
    if (status != DTRAIN_OK)
        return status;
    set->plain = (float *)plain;
    int good = set->plain != NULL;
    for (int i = 0; i < 2 && set->momentum > 0.0f; i++)
        good &= (set->velocity[i] = (float *)dtrain__alloc(set->allocator, bytes)) != NULL;
    if (!good)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compress: no memory for %zu bytes of small parts", bytes);
    return DTRAIN_OK;
}

/* Whether anything is kept of sums. */
static int dtrain__compression_keeps(const dtrain__compression_set *set)
{
    int keeps = set->velocity[0] != NULL;
    for (size_t i = 0; i < set->part_count && !keeps; i++)
        keeps = set->parts[i].state != NULL && dtrain__compressed_residual(set->parts[i].state) != NULL;
    return keeps;
}

/* Lists the states of all parts, then the velocity of uncompressed parts, and last the weight of the sums. */
static void dtrain__compression_list(const dtrain__compression_set *set, dtrain__pieces_row row, dtrain__lister *lister)
{
    for (size_t i = 0; i < set->part_count; i++)
        if (set->parts[i].state != NULL) {
            dtrain__compressed_list(set->parts[i].state, &row, lister);
            row.number++;
        }
    if (set->plain_count > 0)
        dtrain__pieces_put_row(lister, &row, "plain_velocity", DTRAIN_F32, set->velocity[set->versions.now],
                               set->plain_count, NULL);
    row.number = 0;
    if (dtrain__compression_keeps(set))
        dtrain__pieces_put_optional(lister, &row, "unit", DTRAIN_F64, &set->unit[set->versions.now], 1);
}

/* After a load: whether it has brought the weight of the sums. Without it, what is kept of them must be forgotten. */
static int dtrain__compression_known(double *unit, const dtrain__lister *lister)
{
    int known = dtrain__pieces_got(lister, unit) && dtrain__train_finite(*unit) && *unit >= 0.0;
    *unit = known ? *unit : 0.0;
    return known;
}

/* After a load that has brought no weight, or no residuals: what is kept was forgotten. */
static void dtrain__compression_say_forgotten(int rank, const dtrain__lister *lister)
{
    if (lister->ask != NULL)
        dtrain__log(DTRAIN_LOG_WARN, "compress: rank %d starts with nothing unsent: %s", rank,
                    lister->failed ? "the load ended in an error"
                                   : "the checkpoint lacks residuals that fit, or the weight of the sums that they are "
                                     "of, as older ones did");
}

/* Before a load: a step that is open is given up. */
static void dtrain__compression_loading(dtrain__compression_set *set)
{
    dtrain__versions_end(&set->versions, 0);
    for (size_t i = 0; i < set->part_count; i++)
        if (set->parts[i].state != NULL)
            dtrain__versions_end(dtrain__compressed_versions(set->parts[i].state), 0);
}

/* After a load. What is kept of sums is forgotten unless it was loaded with their weight. */
static dtrain_status dtrain__compression_loaded(dtrain__compression_set *set, const dtrain__lister *lister)
{
    float *velocity = set->velocity[set->versions.now];
    dtrain_status status = DTRAIN_OK;
    int known = dtrain__compression_known(&set->unit[set->versions.now], lister), forgets = 0;
    for (size_t i = 0; i < set->part_count; i++) {
        dtrain_compressed *state = set->parts[i].state;
        if (state == NULL || (known && dtrain__compressed_got(state, lister)))
            continue;
        forgets = 1;
        if (status == DTRAIN_OK)
            status = dtrain__compressed_forget(state);
    }
    if (velocity != NULL && set->plain_count > 0 && !(known && dtrain__pieces_got(lister, velocity))) {
        memset(velocity, 0, set->plain_count * sizeof(float));
        forgets = 1;
    }
    if (forgets && dtrain__compression_keeps(set))
        dtrain__compression_say_forgotten(dtrain_comm_rank(set->comm), lister);
    return status;
}

/* Copies the uncompressed parts from first to end out of the vector, side by side, or back. When it returns, the CPU
 * may use the copies. */
static dtrain_status dtrain__compression_copy_plain(dtrain__compression_set *set, float *plain, float *vector,
                                                    size_t first, size_t end, int back)
{
    dtrain_status status = DTRAIN_OK;
    for (size_t i = first; status == DTRAIN_OK && i < end; i++) {
        const dtrain__compression_part *part = &set->parts[i];
        float *there = vector + part->at;
        if (part->state != NULL)
            continue;
        status =
            dtrain_device_copy(set->device, back ? there : plain, back ? plain : there, part->count * sizeof(float));
        plain += part->count;
    }
    if (status == DTRAIN_OK && !back)
        status = dtrain_device_wait(set->device);
    return set->device != NULL ? dtrain__device_vector_broken(set->comm, set->device, status) : status;
}

/* All-reduces the uncompressed parts from first to end as one. total: the weight of all ranks. */
static dtrain_status dtrain__compression_send_plain(dtrain__compression_set *set, float *vector, size_t first,
                                                    size_t end, double total, dtrain_compressed_stats *stats)
{
    size_t before = 0, count = 0; /* elements of uncompressed parts before first, and from there to end */
    for (size_t i = 0; i < end; i++)
        if (set->parts[i].state == NULL)
            *(i < first ? &before : &count) += set->parts[i].count;
    if (count == 0)
        return DTRAIN_OK;
    float *sum = set->plain + before;
    uint64_t bytes = dtrain__plan_sent_bytes(count, dtrain_comm_size(set->comm));
    stats->dense_bytes += bytes;
    stats->sent_bytes += bytes;
    dtrain_status status = dtrain__compression_copy_plain(set, sum, vector, first, end, 0);
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(set->comm, sum, sum, count, DTRAIN_F32, DTRAIN_SUM);
    if (status == DTRAIN_OK && total > 0.0 &&
        set->velocity[0] != NULL) { /* with feedback.momentum the optimizer has none */
        const float *old = set->velocity[set->versions.now] + before;
        float *next = set->velocity[!set->versions.now] + before;
        uint64_t mode = dtrain__fpmode_enter();
        float momentum = set->momentum * dtrain__feedback_ratio(total, set->unit[set->versions.now]);
        memcpy(next, old, count * sizeof(float));
        dtrain__feedback_velocity(next, sum, momentum, 1.0f, count);
        memcpy(sum, next, count * sizeof(float));
        dtrain__feedback_finite(next, count);
        dtrain__fpmode_restore(mode);
    }
    return status == DTRAIN_OK ? dtrain__compression_copy_plain(set, sum, vector, first, end, 1) : status;
}

/* AdamW's momenta, at the places of their gradients, and the factors of 1-bit Adam. */
typedef struct dtrain__compression_momenta {
    const float *m;      /* NULL: gradients travel */
    float rest1, factor; /* 1 - beta1, and beta1 times this rank's weight */
} dtrain__compression_momenta;

/* Turns this rank's gradients of the parts from first to end into its share of the next momenta. The sum of all shares,
 * divided by the weight of all ranks, is beta1 m + (1 - beta1) times the mean gradient. */
static void dtrain__compression_fold(dtrain__compression_set *set, float *vector, size_t first, size_t end,
                                     const dtrain__compression_momenta *momenta)
{
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = first; i < end; i++) {
        const dtrain__compression_part *part = &set->parts[i];
        if (!part->dense)
            dtrain__feedback_velocity(vector + part->at, momenta->m + part->at, momenta->rest1, momenta->factor,
                                      part->count);
    }
    dtrain__fpmode_restore(mode);
}

/* Ends a step: applied, or as if it had never been. */
static void dtrain__compression_end_step(dtrain__compression_set *set, int applied)
{
    dtrain__versions_end(&set->versions, applied);
    for (size_t i = 0; i < set->part_count; i++)
        if (set->parts[i].state != NULL)
            dtrain__versions_end(dtrain__compressed_versions(set->parts[i].state), applied);
}

/* Takes the last step back, if that was applied and no other has begun. */
static void dtrain__compression_undo(dtrain__compression_set *set)
{
    dtrain__versions_undo(&set->versions);
    for (size_t i = 0; i < set->part_count; i++)
        if (set->parts[i].state != NULL)
            dtrain__versions_undo(dtrain__compressed_versions(set->parts[i].state));
}

/* Sums the parts from first to end over all ranks, and adds the bytes sent to stats. On a device, the sums are complete
 * in the order of its queue. total: the weight of all ranks. With 0 all parts travel uncompressed, and no state
 * changes. step: the number of steps before this one; NULL: the states count. */
static dtrain_status dtrain__compression_send(dtrain__compression_set *set, float *vector, size_t first, size_t end,
                                              double total, const uint64_t *step, dtrain_compressed_stats *stats)
{
    if (total > 0.0) {
        set->unit[!set->versions.now] = total;
        set->versions.other = DTRAIN__VERSION_AFTER;
    }
    dtrain_status status = dtrain__compression_send_plain(set, vector, first, end, total, stats);
    for (size_t i = first; status == DTRAIN_OK && i < end; i++) {
        const dtrain__compression_part *part = &set->parts[i];
        if (part->state == NULL)
            continue;
        dtrain_compressed_stats before = dtrain_compressed_get_stats(part->state), after;
        float *at = vector + part->at;
        *dtrain__compressed_unit(part->state) = set->unit[set->versions.now];
        status = total > 0.0 ? dtrain__compressed_step(part->state, at, at, DTRAIN_SUM, total, step)
                             : dtrain__compressed_whole(part->state, at);
        after = dtrain_compressed_get_stats(part->state);
        stats->dense_bytes += after.dense_bytes - before.dense_bytes;
        stats->sent_bytes += after.sent_bytes - before.sent_bytes;
    }
    return status;
}

/* Notes the elements of each parameter, and sets up the parts: under PowerSGD each matrix, else all gradients between
 * two dense parameters. */
static dtrain_status dtrain__compression_fill(dtrain__compression *all, const dtrain_param *table, size_t count,
                                              const dtrain_compress_desc *desc)
{
    dtrain_status status = DTRAIN_OK;
    size_t begin = 0; /* of the part that is being collected */
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++) {
        const dtrain_param *param = &table[i];
        size_t elements = dtrain__params_gradients(param), rows = param->shape[0];
        int ends = desc->kind == DTRAIN_COMPRESS_POWERSGD || i + 1 == count || param->dense != param[1].dense;
        all->elements[i] = elements;
        all->total += elements;
        rows = desc->kind != DTRAIN_COMPRESS_POWERSGD ? 1 : param->stacked ? rows * param->shape[1] : rows;
        if (ends) {
            status = dtrain__compression_add(&all->set, desc, begin, all->total - begin, rows, param->dense);
            begin = all->total;
        }
    }
    all->flat = (float *)dtrain__alloc(all->set.allocator, all->total * sizeof(float));
    if (status == DTRAIN_OK && all->flat == NULL)
        status =
            dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "aggregator_compressed: no memory for %zu gradients", all->total);
    return status == DTRAIN_OK ? dtrain__compression_end(&all->set, desc) : status;
}

static void dtrain__compression_destroy(void *self)
{
    dtrain__compression *all = (dtrain__compression *)self;
    dtrain_allocator *allocator = all->set.allocator;
    dtrain__free(allocator, all->flat);
    dtrain__compression_close(&all->set);
    dtrain__free(allocator, all);
}

static dtrain_status dtrain__compression_run(void *self, const dtrain_param *table, size_t count, double weight,
                                             double *total_weight)
{
    dtrain__compression *all = (dtrain__compression *)self;
    dtrain__compression_end_step(&all->set, 0); /* the step before can no longer be taken back, even after an error */
    dtrain_status status = dtrain__aggregator_check_made(table, count, weight, all->count, all->elements);
    size_t in = 0, out = 0;
    if (status == DTRAIN_OK)
        status = dtrain__group_whole(all->set.comm, "aggregate");
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(all->set.comm, &weight, total_weight, 1, DTRAIN_F64, DTRAIN_SUM);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < count; in += all->elements[i++])
        if (all->elements[i] > 0)
            memcpy(all->flat + in, table[i].grad, all->elements[i] * sizeof(float));
    status = dtrain__compression_send(&all->set, all->flat, 0, all->set.part_count, *total_weight, NULL, &all->stats);
    dtrain__compression_end_step(&all->set, status == DTRAIN_OK);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < count; out += all->elements[i++])
        if (all->elements[i] > 0)
            memcpy(table[i].grad, all->flat + out, all->elements[i] * sizeof(float));
    dtrain__aggregator_divide(table, count, *total_weight);
    all->stats.steps++;
    return DTRAIN_OK;
}

static void dtrain__compression_drop(void *self)
{
    dtrain__compression_undo(&((dtrain__compression *)self)->set);
}

static dtrain_compressed_stats dtrain__compression_counters(const void *self)
{
    return ((const dtrain__compression *)self)->stats;
}

static dtrain_status dtrain__compression_list_all(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain__compression_set *set = &((const dtrain__compression *)list->object)->set;
    dtrain__pieces_row row = {dtrain_comm_rank(set->comm), dtrain_comm_size(set->comm), 1, 0, 0};
    dtrain__compression_list(set, row, lister);
    return DTRAIN_OK;
}

static dtrain_status dtrain__compression_loading_all(const dtrain_pieces *list, int turn)
{
    if (turn == 0)
        dtrain__compression_loading(&((dtrain__compression *)list->object)->set);
    return DTRAIN_OK;
}

static dtrain_status dtrain__compression_loaded_all(const dtrain_pieces *list, const dtrain__lister *lister)
{
    return dtrain__compression_loaded(&((dtrain__compression *)list->object)->set, lister);
}

static dtrain_pieces dtrain__compression_pieces(void *self)
{
    dtrain_pieces made = dtrain__pieces_make(self, dtrain__compression_list_all, dtrain__compression_loaded_all);
    made.loading = dtrain__compression_loading_all;
    return made;
}

DTRAIN_API dtrain_status dtrain_aggregator_compressed(dtrain_aggregator *aggregator, dtrain_comm *comm,
                                                      const dtrain_param *table, size_t count,
                                                      const dtrain_compress_desc *desc)
{
    dtrain_compress_desc full;
    if (aggregator == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "aggregator_compressed: %s is NULL, expected its address",
                            comm == NULL ? "comm" : "aggregator");
    memset(aggregator, 0, sizeof *aggregator);
    memset(&full, 0, sizeof full);
    if (desc != NULL)
        full = *desc;
    dtrain_status status = dtrain__params_check_cpu_grads(table, count, "aggregator_compressed");
    if (status == DTRAIN_OK)
        status = dtrain__params_no_adam(&full, "aggregator_compressed");
    if (status != DTRAIN_OK)
        return status;
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain__compression *all =
        (dtrain__compression *)dtrain__alloc(allocator, sizeof *all + count * sizeof *all->elements);
    if (all == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "aggregator_compressed: no memory for %zu parameters", count);
    all->count = count;
    all->elements = (size_t *)(void *)(all + 1);
    status = dtrain__compression_begin(&all->set, comm, NULL, allocator, count);
    if (status == DTRAIN_OK)
        status = dtrain__compression_fill(all, table, count, &full);
    if (status != DTRAIN_OK) {
        dtrain__compression_destroy(all);
        return status;
    }
    aggregator->self = all;
    aggregator->aggregate = dtrain__compression_run;
    aggregator->drop = dtrain__compression_drop;
    aggregator->destroy = dtrain__compression_destroy;
    aggregator->get_stats = dtrain__compression_counters;
    aggregator->get_pieces = dtrain__compression_pieces;
    return DTRAIN_OK;
}

#endif
