/* ---- >>compressed ----
 * The all-reduce of one vector through a compressor, and what a step hands to the next. Packing compressors: quantise,
 * give each rank its part of all, add as float32 by the tree, quantise, gather. A part's owner keeps what its second
 * packing lost. What a device's vector asks of it is >>device_vector's and >>device_packed's. */
#ifndef DTRAIN__COMPRESSED
#define DTRAIN__COMPRESSED
#include "compress.h"
#include "../tensor/pieces.c"
#include "quantise.c"
#include "feedback.c"
#include "selections.c"
#include "powersgd.c"
#include "device_packed.c"

struct dtrain_compressed {
    dtrain_comm *comm;
    dtrain_allocator *allocator;
    dtrain_compressor compressor;
    dtrain_compressed_desc desc;
    size_t count;
    int rank, ranks;
    dtrain__device_vector *there;   /* what the vector has on its device; NULL: it is the CPU's */
    float *residual, *velocity;     /* of the CPU's; NULL: none */
    float dense_steps[2];           /* not compressed, up to start_step; see >>feedback */
    size_t *numbers;                /* 4 * ranks: counts and offsets of what goes out, and of what comes in */
    const void **parts;             /* what is folded, a rank */
    unsigned char *out, *in, *wide; /* what goes out, what comes in, and that unpacked; they grow */
    dtrain_compressed_stats stats;
};

/* Packs every rank's part of `from`, which it then unpacks to out, to take that from the residual. */
static void dtrain__compressed_pack(dtrain_compressed *c, const float *from, float *out)
{
    const dtrain_compressor *q = &c->compressor;
    size_t *counts = c->numbers, *offsets = counts + c->ranks, at = 0;
    for (int r = 0; r < c->ranks; r++) {
        size_t begin, part = dtrain__split(c->count, c->ranks, r, &begin);
        offsets[r] = at;
        counts[r] = q->bytes(q, part);
        q->pack(q, from + begin, part, c->out + at);
        at += counts[r];
        c->stats.sent_bytes += r != c->rank ? counts[r] : 0;
        if (c->residual == NULL)
            continue;
        q->unpack(q, c->out + offsets[r], out + begin, part);
        dtrain__feedback_left(c->residual + begin, out + begin, part);
    }
}

/* Unpacks what came and adds it up in this rank's part of out. */
static void dtrain__compressed_fold(dtrain_compressed *c, float *sum, size_t part)
{
    const dtrain_compressor *q = &c->compressor;
    size_t bytes = q->bytes(q, part);
    void *outs[1];
    outs[0] = sum;
    for (int r = 0; r < c->ranks; r++) {
        float *wide = (float *)(void *)c->wide + (size_t)r * part;
        q->unpack(q, c->in + (size_t)r * bytes, wide, part);
        c->parts[r] = wide;
    }
    if (part > 0)
        dtrain__fold(DTRAIN_F32, DTRAIN_SUM, 1.0, c->parts, c->ranks, outs, 1, 0, part);
}

/* Packs the sum of a rank's part into its place among those of all, and keeps what that loses. */
static void dtrain__compressed_pack_sum(dtrain_compressed *c, int rank, const float *sum, size_t begin, size_t part)
{
    const dtrain_compressor *q = &c->compressor;
    const size_t *offsets = c->numbers + c->ranks;
    float *lost = (float *)(void *)c->wide, *back = lost + part;
    q->pack(q, sum, part, c->out + offsets[rank]);
    c->stats.sent_bytes += q->bytes(q, part) * (uint64_t)(c->ranks - 1);
    if (c->residual == NULL || part == 0)
        return;
    memcpy(lost, sum, part * sizeof(float));
    q->unpack(q, c->out + offsets[rank], back, part);
    dtrain__feedback_left(lost, back, part);
    dtrain__fold_sum_f32(c->residual + begin, lost, part);
}

/* What all parts, what comes for one of them, and the unpacked need. */
static dtrain_status dtrain__compressed_reserve(dtrain_compressed *c, size_t part)
{
    const dtrain_compressor *q = &c->compressor;
    size_t all = 0, in = q->bytes(q, part), wide;
    dtrain_status status = DTRAIN_OK;
    for (int r = 0; r < c->ranks; r++)
        if (!dtrain__add_size(all, q->bytes(q, dtrain__split(c->count, c->ranks, r, NULL)), &all))
            all = SIZE_MAX;
    if (!dtrain__mul_size(in, (size_t)c->ranks, &in))
        in = SIZE_MAX;
    if (!dtrain__mul_size(part * sizeof(float), (size_t)(c->ranks > 2 ? c->ranks : 2), &wide))
        wide = SIZE_MAX;
    status = dtrain__feedback_reserve(&c->out, c->allocator, all);
    if (status == DTRAIN_OK)
        status = dtrain__feedback_reserve(&c->in, c->allocator, in);
    if (status == DTRAIN_OK)
        status = dtrain__feedback_reserve(&c->wide, c->allocator, wide);
    return status;
}

static dtrain_status dtrain__compressed_dense(dtrain_compressed *c, const float *in, float *out)
{
    const dtrain_compressor *q = &c->compressor;
    size_t begin, part = dtrain__split(c->count, c->ranks, c->rank, &begin), n = (size_t)c->ranks;
    size_t *counts = c->numbers, *offsets = counts + n, *in_counts = counts + 2 * n, *in_offsets = counts + 3 * n;
    dtrain_status status = dtrain__compressed_reserve(c, part);
    if (status != DTRAIN_OK)
        return status;
    if (c->residual != NULL)
        dtrain__fold_sum_f32(c->residual, in, c->count);
    dtrain__compressed_pack(c, c->residual != NULL ? c->residual : in, out);
    for (size_t r = 0; r < n; r++) {
        in_counts[r] = q->bytes(q, part);
        in_offsets[r] = r * in_counts[r];
    }
    status = dtrain_all_to_all_v(c->comm, c->out, counts, offsets, c->in, in_counts, in_offsets, DTRAIN_U8);
    if (status != DTRAIN_OK)
        return status;
    dtrain__compressed_fold(c, out + begin, part);
    dtrain__compressed_pack_sum(c, c->rank, out + begin, begin, part);
    status = dtrain_all_gather_v(c->comm, c->out + offsets[c->rank], c->out, counts, offsets, DTRAIN_U8);
    for (int r = 0; status == DTRAIN_OK && r < c->ranks; r++) {
        size_t at, count = dtrain__split(c->count, c->ranks, r, &at);
        q->unpack(q, c->out + offsets[r], out + at, count);
    }
    return status;
}

static int dtrain__compressed_is_topk(const dtrain_compressed *c)
{
    return c->compressor.reduce == dtrain__selections_reduce;
}

/* Shortens the vector, and folds it into the velocity; returns what is to be sent, which may be in out. */
static const float *dtrain__compressed_prepare(dtrain_compressed *c, const float *in, float *out)
{
    float factor = 1.0f;
    if (c->desc.max_norm > 0.0f && c->count > 0)
        factor =
            dtrain__feedback_factor(in, c->count, (double)c->desc.max_norm / dtrain__vector_sqrt_f64((double)c->ranks));
    if (c->velocity != NULL) {
        dtrain__feedback_velocity(c->velocity, in, c->desc.momentum, factor, c->count);
        return c->velocity;
    }
    if (factor != 1.0f) {
        dtrain__fold_weigh_f32(in, (double)factor, out, c->count);
        return out;
    }
    return in;
}

static dtrain_status dtrain__compressed_check(const dtrain_compressed *c, const float *in, const float *out,
                                              dtrain_op op)
{
    if (c == NULL || (c->count > 0 && (in == NULL || out == NULL)))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "compressed all_reduce: %s is NULL",
                            c == NULL    ? "the object"
                            : in == NULL ? "in"
                                         : "out");
    if (op != DTRAIN_SUM && op != DTRAIN_MEAN)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressed all_reduce: operation %d, expected DTRAIN_SUM or DTRAIN_MEAN", (int)op);
    return DTRAIN_OK;
}

/* Says how many steps were made before the next one, for an owner that counts them itself. */
static void dtrain__compressed_at_step(dtrain_compressed *c, uint64_t step)
{
    step = step < c->desc.start_step ? step : c->desc.start_step;
    c->dense_steps[0] = (float)(step & 0xffffff);
    c->dense_steps[1] = (float)(step >> 24 & 0xffffff);
}

static dtrain_status dtrain__compressed_here(dtrain_compressed *c, const float *in, float *out, dtrain_op op)
{
    const float *from = dtrain__compressed_prepare(c, in, out);
    dtrain_status status;
    if (dtrain__feedback_steps(c->dense_steps) < c->desc.start_step) {
        dtrain__feedback_count(c->dense_steps);
        c->stats.sent_bytes += dtrain__plan_sent_bytes(c->count, c->ranks);
        return dtrain_all_reduce(c->comm, from, out, c->count, DTRAIN_F32, op);
    }
    if (c->compressor.reduce != NULL)
        status = c->compressor.reduce(&c->compressor, c->comm, from, c->residual, out, c->count, &c->stats.sent_bytes);
    else
        status = dtrain__compressed_dense(c, from, out);
    if (status == DTRAIN_OK && c->velocity != NULL && !c->desc.no_masking) {
        const dtrain__sparse *chosen = &((dtrain__selections_state *)c->compressor.self)->chosen;
        for (size_t i = 0; i < chosen->count; i++) /* the velocity of what was sent starts anew */
            c->velocity[chosen->indices[i]] = 0.0f;
    }
    if (status == DTRAIN_OK && op == DTRAIN_MEAN && c->ranks > 1)
        dtrain__fold_divide_f32(out, (double)c->ranks, c->count);
    return status;
}

/* The same on a device. */
static dtrain_status dtrain__compressed_there(dtrain_compressed *c, const float *in, float *out, dtrain_op op)
{
    dtrain__device_vector *v = c->there;
    uint64_t *sent = &c->stats.sent_bytes;
    int divides = op == DTRAIN_MEAN && c->ranks > 1;
    dtrain_status status = divides ? dtrain__device_vector_can_divide(v, c->ranks) : DTRAIN_OK;
    v->out = out;
    if (status == DTRAIN_OK && v->velocity != NULL)
        status = dtrain__device_vector_gain(v, in, c->desc.momentum);
    in = v->velocity != NULL ? v->velocity : in;
    if (status == DTRAIN_OK && dtrain__compressed_is_topk(c))
        status = dtrain__selections_reduce_there(&c->compressor, v, in, sent);
    else if (status == DTRAIN_OK)
        status = dtrain__device_packed_reduce(v, &c->compressor, c->numbers, in, sent);
    return status == DTRAIN_OK && divides ? dtrain__device_vector_divide(v, c->ranks) : status;
}

DTRAIN_API dtrain_status dtrain_compressed_all_reduce(dtrain_compressed *compressed, const float *in, float *out,
                                                      dtrain_op op)
{
    dtrain_compressed *c = compressed;
    dtrain_status status = dtrain__compressed_check(c, in, out, op);
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    status = (c->there != NULL ? dtrain__compressed_there : dtrain__compressed_here)(c, in, out, op);
    c->stats.steps++;
    c->stats.dense_bytes += dtrain__plan_sent_bytes(c->count, c->ranks);
    dtrain__fpmode_restore(mode);
    return status;
}

static void dtrain__compressed_list(const dtrain_compressed *c, const dtrain__pieces_row *row, dtrain__lister *lister)
{
    dtrain_device *device = c->there != NULL ? c->desc.device : NULL;
    const float *residual = device != NULL ? c->there->residual : c->residual, *start = NULL, *step = NULL;
    const float *velocity = device != NULL ? c->there->velocity : c->velocity;
    size_t starts = 0;
    if (dtrain__compressed_is_topk(c))
        step = ((const dtrain__selections_state *)c->compressor.self)->step;
    if (c->compressor.reduce == dtrain__powersgd_reduce) {
        const dtrain__powersgd *p = (const dtrain__powersgd *)c->compressor.self;
        start = p->right;
        starts = p->columns * p->rank;
    }
    dtrain__pieces_put_row(lister, row, "residual", DTRAIN_F32, residual, c->count, device);
    dtrain__pieces_put_row(lister, row, "velocity", DTRAIN_F32, velocity, c->count, device);
    dtrain__pieces_put_row(lister, row, "start", DTRAIN_F32, start, starts, NULL);
    dtrain__pieces_put_row(lister, row, "step", DTRAIN_F32, step, 2, NULL);
    if (c->desc.start_step > 0)
        dtrain__pieces_put_row(lister, row, "dense_steps", DTRAIN_F32, c->dense_steps, 2, NULL);
}

static dtrain_status dtrain__compressed_list_one(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_compressed *c = (const dtrain_compressed *)list->object;
    dtrain__pieces_row row = {c->rank, c->ranks, 1, 0, 0};
    dtrain__compressed_list(c, &row, lister);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_pieces dtrain_compressed_pieces(dtrain_compressed *compressed)
{
    return dtrain__pieces_make(compressed, dtrain__compressed_list_one, NULL);
}

DTRAIN_API dtrain_compressed_stats dtrain_compressed_get_stats(const dtrain_compressed *compressed)
{
    dtrain_compressed_stats none = {0, 0, 0};
    return compressed != NULL ? compressed->stats : none;
}

static dtrain_status dtrain__compressed_check_desc(const dtrain_compressor *compressor,
                                                   const dtrain_compressed_desc *desc)
{
    uint32_t momentum, norm;
    memcpy(&momentum, &desc->momentum, sizeof momentum);
    memcpy(&norm, &desc->max_norm, sizeof norm);
    if (desc->start_step >> 48 != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "compressed_create: start_step is %llu, expected below 2^48",
                            (unsigned long long)desc->start_step);
    if (momentum >= 0x3f800000u || norm >= 0x7f800000u)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressed_create: momentum is %g, max_norm %g; expected 0 or more, momentum below 1",
                            (double)desc->momentum, (double)desc->max_norm);
    if (momentum != 0 && (desc->no_feedback || compressor->reduce != dtrain__selections_reduce))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressed_create: momentum %g needs top-k with feedback; of other compressors it is the "
                            "optimizer's",
                            (double)desc->momentum);
    return dtrain__quantise_check_compressor(compressor, "compressed_create");
}

/* Refuses what a device cannot do with the CPU's bits. */
static dtrain_status dtrain__compressed_check_there(const dtrain_compressed *c)
{
    const char *device = dtrain_device_name(c->desc.device), *cure = "or keep the vector on the CPU, device NULL";
    const dtrain_compressor *q = &c->compressor;
    int topk = dtrain__compressed_is_topk(c);
    if (!topk && !dtrain__device_packed_can(q))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: %s has no kernels for the compressor %s: take top-k, int8, "
                            "fp8, or a cast, %s",
                            c->rank, device, q->name != NULL ? q->name : "of your own", cure);
    if (topk && ((const dtrain__selections_state *)q->self)->desc.threshold > 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: %s selects so many elements, not those from a threshold of "
                            "%g on: give topk a ratio, %s",
                            c->rank, device, (double)((const dtrain__selections_state *)q->self)->desc.threshold, cure);
    if (c->desc.start_step > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: start_step is %llu, and a vector on %s is compressed from "
                            "its first step on: leave it 0, %s",
                            c->rank, (unsigned long long)c->desc.start_step, device, cure);
    if (c->desc.max_norm > 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: max_norm is %g, and %s does not shorten a rank's vector: "
                            "leave it 0 and call dtrain_device_clip before, %s",
                            c->rank, (double)c->desc.max_norm, device, cure);
    return DTRAIN_OK;
}

/* Makes the state of a vector on a device; what fails is the caller's to destroy. */
static dtrain_status dtrain__compressed_open_there(dtrain_compressed *c)
{
    dtrain_device *device = c->desc.device;
    dtrain_status status = dtrain__compressed_check_there(c);
    if (status != DTRAIN_OK)
        return status;
    dtrain__device_vector *v = (dtrain__device_vector *)dtrain__alloc(c->allocator, sizeof *v);
    c->there = v;
    if (v == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compressed_create: no memory for %zu bytes", sizeof *v);
    v->device = device;
    v->comm = c->comm;
    v->count = c->count;
    v->masks = !c->desc.no_masking;
    if (!c->desc.no_feedback)
        status = dtrain__device_vector_zeros(device, c->count, &v->residual);
    if (status == DTRAIN_OK && c->desc.momentum > 0.0f)
        status = dtrain__device_vector_zeros(device, c->count, &v->velocity);
    if (status == DTRAIN_OK && dtrain__compressed_is_topk(c)) {
        const dtrain__selections_state *state = (const dtrain__selections_state *)c->compressor.self;
        double ratio = dtrain__topk_ratio(&state->desc.schedule, 0); /* of the first step */
        status = dtrain__device_vector_aim(v, dtrain_topk_count(c->count, ratio));
    } else if (status == DTRAIN_OK) {
        status = dtrain__device_packed_reserve(v, &c->compressor, c->ranks);
    }
    if (status == DTRAIN_OK)
        return status;
    return dtrain__fail(NULL, status, "compressed_create of %zu elements on rank %d, %s: %.500s", c->count, c->rank,
                        dtrain_device_name(device), dtrain__thread_error.text);
}

/* Fills what is there already but for its memory; what fails is the caller's to destroy. */
static dtrain_status dtrain__compressed_init(dtrain_compressed *c)
{
    size_t bytes = 0, n = (size_t)c->ranks;
    int good = dtrain__mul_size(c->count, sizeof(float), &bytes), here = c->desc.device == NULL;
    int residual = here && !c->desc.no_feedback, velocity = here && c->desc.momentum > 0.0f;
    dtrain_status status = dtrain__compressed_check_desc(&c->compressor, &c->desc);
    if (status != DTRAIN_OK)
        return status;
    c->numbers = (size_t *)dtrain__alloc(c->allocator, 4 * n * sizeof(size_t));
    c->parts = (const void **)dtrain__alloc(c->allocator, n * sizeof(void *));
    if (good && residual)
        c->residual = (float *)dtrain__alloc(c->allocator, bytes);
    if (good && velocity)
        c->velocity = (float *)dtrain__alloc(c->allocator, bytes);
    if (!good || c->numbers == NULL || c->parts == NULL || (residual && c->residual == NULL) ||
        (velocity && c->velocity == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compressed_create: no memory for the state of %zu elements",
                            c->count);
    return here ? DTRAIN_OK : dtrain__compressed_open_there(c);
}

DTRAIN_API dtrain_status dtrain_compressed_create(dtrain_compressed **compressed, dtrain_comm *comm, size_t count,
                                                  const dtrain_compressor *compressor,
                                                  const dtrain_compressed_desc *desc)
{
    if (compressed != NULL)
        *compressed = NULL;
    if (compressed == NULL || comm == NULL || compressor == NULL) {
        if (compressor != NULL && compressor->destroy != NULL)
            compressor->destroy(compressor->self);
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "compressed_create: %s is NULL",
                            compressed == NULL ? "compressed"
                            : comm == NULL     ? "the group"
                                               : "the compressor");
    }
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain_compressed *c = (dtrain_compressed *)dtrain__alloc(allocator, sizeof *c);
    if (c == NULL) {
        if (compressor->destroy != NULL)
            compressor->destroy(compressor->self);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compressed_create: no memory for %zu bytes", sizeof *c);
    }
    c->comm = comm;
    c->allocator = allocator;
    c->compressor = *compressor;
    c->count = count;
    c->rank = dtrain_comm_rank(comm);
    c->ranks = dtrain_comm_size(comm);
    if (desc != NULL)
        c->desc = *desc;
    dtrain_status status = dtrain__compressed_init(c);
    if (status == DTRAIN_OK)
        *compressed = c;
    else
        dtrain_compressed_destroy(c);
    return status;
}

DTRAIN_API void dtrain_compressed_destroy(dtrain_compressed *compressed)
{
    dtrain_compressed *c = compressed;
    if (c == NULL)
        return;
    dtrain__quantise_destroy(&c->compressor);
    dtrain__device_vector_destroy(c->there, c->allocator);
    dtrain__free(c->allocator, c->residual);
    dtrain__free(c->allocator, c->velocity);
    dtrain__free(c->allocator, c->numbers);
    dtrain__free(c->allocator, c->parts);
    dtrain__free(c->allocator, c->out);
    dtrain__free(c->allocator, c->in);
    dtrain__free(c->allocator, c->wide);
    dtrain__free(c->allocator, c);
}

#endif
