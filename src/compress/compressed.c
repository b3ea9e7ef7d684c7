/* ---- >>compressed ----
 * The compressed all-reduce of one vector, and the state that it keeps between steps. >>selections, >>powersgd or
 * >>packed does the work, on a vector of >>device_vector. */
#ifndef DTRAIN__COMPRESSED
#define DTRAIN__COMPRESSED
#include "compress.h"
#include "../tensor/pieces.c"
#include "quantise.c"
#include "feedback.c"
#include "selections.c"
#include "powersgd.c"
#include "packed.c"
DTRAIN__FAST_BEGIN

struct dtrain_compressed {
    dtrain__device_vector vector;
    dtrain_compressor compressor;
    dtrain_compressed_desc desc;
    float dense_steps[2]; /* steps not compressed, up to start_step; see >>feedback */
    size_t *numbers;      /* 4 a rank, for >>packed */
    dtrain_compressed_stats stats;
};

static int dtrain__compressed_is_topk(const dtrain_compressed *c)
{
    return c->compressor.reduce == dtrain__selections_reduce;
}

/* Shortens the vector, and adds it to the velocity. *in: what to send afterwards, which may be in out. */
static dtrain_status dtrain__compressed_prepare(dtrain_compressed *c, const float **in, float *out)
{
    dtrain__device_vector *v = &c->vector;
    double ranks = (double)dtrain_comm_size(v->comm);
    float factor = 1.0f;
    if (c->desc.max_norm > 0.0f && v->count > 0)
        factor = dtrain__feedback_factor(*in, v->count, (double)c->desc.max_norm / dtrain__vector_sqrt_f64(ranks));
    if (v->velocity != NULL) {
        const float *from = *in;
        *in = v->velocity;
        return dtrain__device_vector_gain(v, from, c->desc.momentum, factor);
    }
    if (factor != 1.0f) {
        dtrain__fold_weigh_f32(*in, (double)factor, out, v->count);
        *in = out;
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__compressed_check(const dtrain_compressed *c, const float *in, const float *out,
                                              dtrain_op op)
{
    if (c == NULL || (c->vector.count > 0 && (in == NULL || out == NULL)))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressed all_reduce: %s is NULL, expected an object and memory of its vector",
                            c == NULL    ? "the object"
                            : in == NULL ? "in"
                                         : "out");
    if (op != DTRAIN_SUM && op != DTRAIN_MEAN)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressed all_reduce: operation %d, expected DTRAIN_SUM or DTRAIN_MEAN", (int)op);
    return DTRAIN_OK;
}

/* Sets the number of steps before the next one, for an owner that counts steps itself. */
static void dtrain__compressed_at_step(dtrain_compressed *c, uint64_t step)
{
    dtrain__feedback_set_steps(c->dense_steps, step < c->desc.start_step ? step : c->desc.start_step);
}

static dtrain_status dtrain__compressed_run(dtrain_compressed *c, const float *in, float *out, dtrain_op op)
{
    dtrain__device_vector *v = &c->vector;
    const dtrain_compressor *q = &c->compressor;
    uint64_t *sent = &c->stats.sent_bytes;
    int ranks = dtrain_comm_size(v->comm), divides = op == DTRAIN_MEAN && ranks > 1;
    dtrain_status status = divides ? dtrain__device_vector_can_divide(v, ranks) : DTRAIN_OK;
    v->out = out;
    if (status == DTRAIN_OK)
        status = dtrain__compressed_prepare(c, &in, out);
    if (status != DTRAIN_OK)
        return status;
    uint64_t step = dtrain__feedback_steps(c->dense_steps);
    if (step < c->desc.start_step) {
        dtrain__feedback_set_steps(c->dense_steps, step + 1);
        *sent += dtrain__plan_sent_bytes(v->count, ranks);
        return dtrain_all_reduce(v->comm, in, out, v->count, DTRAIN_F32, op);
    }
    if (dtrain__compressed_is_topk(c))
        status = dtrain__selections_run(q, v, in, sent);
    else if (q->reduce != NULL)
        status = q->reduce(q, v->comm, in, v->residual, out, v->count, sent);
    else
        status = dtrain__packed_reduce(v, q, c->numbers, in, sent);
    return status == DTRAIN_OK && divides ? dtrain__device_vector_divide(v, ranks) : status;
}

DTRAIN_API dtrain_status dtrain_compressed_all_reduce(dtrain_compressed *compressed, const float *in, float *out,
                                                      dtrain_op op)
{
    dtrain_compressed *c = compressed;
    dtrain_status status = dtrain__compressed_check(c, in, out, op);
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    status = dtrain__compressed_run(c, in, out, op);
    c->stats.steps++;
    c->stats.dense_bytes += dtrain__plan_sent_bytes(c->vector.count, dtrain_comm_size(c->vector.comm));
    dtrain__fpmode_restore(mode);
    return status;
}

static void dtrain__compressed_list(const dtrain_compressed *c, const dtrain__pieces_row *row, dtrain__lister *lister)
{
    const dtrain__device_vector *v = &c->vector;
    const float *start = NULL, *step = NULL;
    size_t starts = 0;
    if (dtrain__compressed_is_topk(c))
        step = ((const dtrain__selections_state *)c->compressor.self)->step;
    if (c->compressor.reduce == dtrain__powersgd_reduce) {
        const dtrain__powersgd *p = (const dtrain__powersgd *)c->compressor.self;
        start = p->right;
        starts = p->columns * p->rank;
    }
    dtrain__pieces_put_row(lister, row, "residual", DTRAIN_F32, v->residual, v->count, v->device);
    dtrain__pieces_put_row(lister, row, "velocity", DTRAIN_F32, v->velocity, v->count, v->device);
    dtrain__pieces_put_row(lister, row, "start", DTRAIN_F32, start, starts, NULL);
    dtrain__pieces_put_row(lister, row, "step", DTRAIN_F32, step, 2, NULL);
    if (c->desc.start_step > 0)
        dtrain__pieces_put_row(lister, row, "dense_steps", DTRAIN_F32, c->dense_steps, 2, NULL);
}

static dtrain_status dtrain__compressed_list_one(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_compressed *c = (const dtrain_compressed *)list->object;
    dtrain__pieces_row row = {dtrain_comm_rank(c->vector.comm), dtrain_comm_size(c->vector.comm), 1, 0, 0};
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
                            "compressed_create: momentum is %g, max_norm %g; expected finite numbers of at least 0, "
                            "momentum below 1",
                            (double)desc->momentum, (double)desc->max_norm);
    if (momentum != 0 && (desc->no_feedback || compressor->reduce != dtrain__selections_reduce))
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "compressed_create: momentum %g needs top-k with feedback; otherwise leave it 0, and set the "
            "optimizer's momentum",
            (double)desc->momentum);
    return dtrain__quantise_check_compressor(compressor, "compressed_create");
}

/* Refuses what a device does not support with the bits of the CPU. */
static dtrain_status dtrain__compressed_check_there(const dtrain_compressed *c)
{
    const char *device = dtrain_device_name(c->desc.device), *cure = "or keep the vector on the CPU, device NULL";
    const dtrain_compressor *q = &c->compressor;
    int topk = dtrain__compressed_is_topk(c), rank = dtrain_comm_rank(c->vector.comm);
    float threshold = topk ? ((const dtrain__selections_state *)q->self)->desc.threshold : 0.0f;
    if (!topk && !dtrain__packed_can(q))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: %s has no kernels for the compressor %s: take top-k, int8, "
                            "fp8, or a cast, %s",
                            rank, device, q->name != NULL ? q->name : "of your own", cure);
    if (threshold > 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: %s selects by a ratio, and the threshold is %g: give topk a "
                            "ratio, %s",
                            rank, device, (double)threshold, cure);
    if (c->desc.start_step > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: start_step is %llu, and a vector on %s is compressed from "
                            "its first step on: leave it 0, %s",
                            rank, (unsigned long long)c->desc.start_step, device, cure);
    if (c->desc.max_norm > 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: max_norm is %g, and %s does not shorten a rank's vector: "
                            "leave it 0 and call dtrain_device_clip before, %s",
                            rank, (double)c->desc.max_norm, device, cure);
    return DTRAIN_OK;
}

/* Allocates all memory that steps on a device need. */
static dtrain_status dtrain__compressed_reserve(dtrain_compressed *c)
{
    dtrain__device_vector *v = &c->vector;
    dtrain__packed unused;
    if (!dtrain__compressed_is_topk(c))
        return dtrain__packed_open(&unused, v, &c->compressor, c->numbers, &c->stats.sent_bytes);
    const dtrain__selections_state *state = (const dtrain__selections_state *)c->compressor.self;
    double ratio = dtrain__topk_ratio(&state->desc.schedule, 0); /* that of the first step, which is the largest */
    return dtrain__device_vector_aim(v, dtrain_topk_count(v->count, ratio));
}

/* Checks the desc and allocates memory. If it fails, the caller destroys the state. */
static dtrain_status dtrain__compressed_init(dtrain_compressed *c)
{
    dtrain__device_vector *v = &c->vector;
    dtrain_status status = dtrain__compressed_check_desc(&c->compressor, &c->desc);
    if (status == DTRAIN_OK && v->device != NULL)
        status = dtrain__compressed_check_there(c);
    if (status != DTRAIN_OK)
        return status;
    c->numbers = (size_t *)dtrain__alloc(v->allocator, 4 * (size_t)dtrain_comm_size(v->comm) * sizeof(size_t));
    if (c->numbers == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for counts and offsets");
    if (status == DTRAIN_OK && !c->desc.no_feedback)
        status = dtrain__device_vector_zeros(v, &v->residual);
    if (status == DTRAIN_OK && c->desc.momentum > 0.0f)
        status = dtrain__device_vector_zeros(v, &v->velocity);
    if (status == DTRAIN_OK && v->device != NULL)
        status = dtrain__compressed_reserve(c);
    if (status == DTRAIN_OK)
        return status;
    return dtrain__fail(NULL, status, "compressed_create of %zu elements on rank %d, %s: %.500s", v->count,
                        dtrain_comm_rank(v->comm), dtrain_device_name(v->device), dtrain__thread_error.text);
}

DTRAIN_API dtrain_status dtrain_compressed_create(dtrain_compressed **compressed, dtrain_comm *comm, size_t count,
                                                  const dtrain_compressor *compressor,
                                                  const dtrain_compressed_desc *desc)
{
    dtrain_compressed *c = NULL;
    dtrain_status status;
    if (compressed != NULL)
        *compressed = NULL;
    if (compressed == NULL || comm == NULL || compressor == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                              "compressed_create: %s is NULL, expected a place, a group and a compressor",
                              compressed == NULL ? "compressed"
                              : comm == NULL     ? "the group"
                                                 : "the compressor");
    else if ((c = (dtrain_compressed *)dtrain__alloc(dtrain_comm_allocator(comm), sizeof *c)) == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compressed_create: no memory for %zu bytes", sizeof *c);
    if (c == NULL) {
        if (compressor != NULL && compressor->destroy != NULL)
            compressor->destroy(compressor->self);
        return status;
    }
    c->compressor = *compressor;
    if (desc != NULL)
        c->desc = *desc;
    c->vector.device = c->desc.device;
    c->vector.comm = comm;
    c->vector.allocator = dtrain_comm_allocator(comm);
    c->vector.count = count;
    c->vector.masks = !c->desc.no_masking;
    status = dtrain__compressed_init(c);
    if (status == DTRAIN_OK)
        *compressed = c;
    else
        dtrain_compressed_destroy(c);
    return status;
}

DTRAIN_API void dtrain_compressed_destroy(dtrain_compressed *compressed)
{
    if (compressed == NULL)
        return;
    dtrain_allocator *allocator = compressed->vector.allocator;
    dtrain__quantise_destroy(&compressed->compressor);
    dtrain__device_vector_destroy(&compressed->vector);
    dtrain__free(allocator, compressed->numbers);
    dtrain__free(allocator, compressed);
}

/* ---- for other modules that own the state of a vector on the CPU ---- */

/* Returns the residual; NULL: there is none. */
static float *dtrain__compressed_residual(const dtrain_compressed *c)
{
    return c->vector.residual;
}

/* Returns the bytes of the state, without the memory for packing that the owner lends. */
static size_t dtrain__compressed_bytes(size_t count, int ranks, const dtrain_compressed_desc *desc)
{
    return sizeof(dtrain_compressed) + 4 * (size_t)ranks * sizeof(size_t) +
           (desc->no_feedback ? 0 : count * sizeof(float));
}

/* Lends memory for packed parts that go out, that come in, and for unpacked ones. With rooms NULL it takes it back. */
static void dtrain__compressed_lend(dtrain_compressed *c, unsigned char *const *rooms, const size_t *bytes)
{
    static const int which[3] = {DTRAIN__DEVICE_OUT, DTRAIN__DEVICE_IN, DTRAIN__DEVICE_WIDE};
    for (int i = 0; i < 3; i++) {
        c->vector.buffers[which[i]].data = rooms != NULL ? rooms[i] : NULL;
        c->vector.buffers[which[i]].bytes = rooms != NULL ? bytes[i] : 0;
    }
}

/* Goes on in another group, which has no more ranks. */
static void dtrain__compressed_move(dtrain_compressed *c, dtrain_comm *comm)
{
    c->vector.comm = comm;
}

/* Packs `in`, unless it is NULL, for an owner that sends packed parts itself. out: room for the sum. */
static dtrain_status dtrain__compressed_begin(dtrain_compressed *c, dtrain__packed *p, const float *in, float *out)
{
    dtrain_status status = dtrain__packed_open(p, &c->vector, &c->compressor, c->numbers, &c->stats.sent_bytes);
    c->vector.out = out;
    if (status == DTRAIN_OK && in != NULL)
        status = dtrain__compressed_prepare(c, &in, out);
    return status == DTRAIN_OK && in != NULL ? dtrain__packed_send(p, in) : status;
}

DTRAIN__FAST_END
#endif
