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

/* What is kept between steps. */
typedef struct dtrain__compressed_kept {
    float *residual, *velocity;    /* NULL: none */
    float *start;                  /* of PowerSGD; NULL: none */
    float step[2], dense_steps[2]; /* of top-k; and those not compressed, up to start_step: see >>feedback */
    double unit;                   /* weight of the sums that residual and velocity are parts of; 0: none yet */
} dtrain__compressed_kept;

/* A step reads the version that counts and writes the other one, which counts once the step is applied. */
struct dtrain_compressed {
    dtrain__device_vector vector;
    dtrain_compressor compressor;
    dtrain_compressed_desc desc;
    dtrain__compressed_kept kept[2];
    dtrain__versions versions;
    size_t *numbers; /* 4 a rank, for >>packed */
    dtrain_compressed_stats stats;
};

static int dtrain__compressed_is_topk(const dtrain_compressed *c)
{
    return c->compressor.reduce == dtrain__selections_reduce;
}

static size_t dtrain__compressed_starts(const dtrain_compressed *c)
{
    const dtrain__powersgd *p = (const dtrain__powersgd *)c->compressor.self;
    return c->compressor.reduce == dtrain__powersgd_reduce ? p->columns * p->rank : 0;
}

/* to = from * factor, of the vector's length. */
static dtrain_status dtrain__compressed_carry(const dtrain__device_vector *v, float *to, const float *from,
                                              float factor)
{
    if (to == NULL || v->count == 0)
        return DTRAIN_OK;
    dtrain_status status = dtrain_device_copy(v->device, to, from, v->count * sizeof(float));
    return status == DTRAIN_OK && factor != 1.0f
               ? dtrain_device_scale(v->device, DTRAIN_F32, to, (double)factor, v->count)
               : status;
}

/* Begins a step whose sums have weight `unit`: writes what is kept, in its unit, to the version that the step changes.
 */
static dtrain_status dtrain__compressed_open(dtrain_compressed *c, double unit)
{
    dtrain__device_vector *v = &c->vector;
    const dtrain__compressed_kept *old = &c->kept[c->versions.now];
    dtrain__compressed_kept *next = &c->kept[!c->versions.now];
    float factor = dtrain__feedback_ratio(unit, old->unit);
    c->versions.other = DTRAIN__VERSION_NONE;
    memcpy(next->step, old->step, sizeof next->step);
    memcpy(next->dense_steps, old->dense_steps, sizeof next->dense_steps);
    next->unit = unit;
    v->residual = next->residual;
    v->velocity = next->velocity;
    if (next->start != NULL)
        memcpy(((dtrain__powersgd *)c->compressor.self)->right, old->start,
               dtrain__compressed_starts(c) * sizeof(float));
    if (dtrain__compressed_is_topk(c))
        memcpy(((dtrain__selections_state *)c->compressor.self)->step, old->step, sizeof old->step);
    dtrain_status status = dtrain__compressed_carry(v, next->residual, old->residual, factor);
    if (status == DTRAIN_OK)
        status = dtrain__compressed_carry(v, next->velocity, old->velocity, factor);
    return v->device != NULL ? dtrain__device_vector_broken(v->comm, v->device, status) : status;
}

/* Takes over what the compressor itself has changed. */
static void dtrain__compressed_close(dtrain_compressed *c)
{
    dtrain__compressed_kept *next = &c->kept[!c->versions.now];
    if (next->start != NULL)
        memcpy(next->start, ((const dtrain__powersgd *)c->compressor.self)->right,
               dtrain__compressed_starts(c) * sizeof(float));
    if (dtrain__compressed_is_topk(c))
        memcpy(next->step, ((const dtrain__selections_state *)c->compressor.self)->step, sizeof next->step);
    c->versions.other = DTRAIN__VERSION_AFTER;
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

/* All-reduces a vector without a compressor. */
static dtrain_status dtrain__compressed_dense(dtrain_compressed *c, const float *in, float *out, dtrain_op op)
{
    dtrain__device_vector *v = &c->vector;
    c->stats.sent_bytes += dtrain__plan_sent_bytes(v->count, dtrain_comm_size(v->comm));
    return dtrain_all_reduce(v->comm, in, out, v->count, DTRAIN_F32, op);
}

static dtrain_status dtrain__compressed_run(dtrain_compressed *c, const float *in, float *out, dtrain_op op,
                                            double unit, const uint64_t *step)
{
    dtrain__device_vector *v = &c->vector;
    const dtrain_compressor *q = &c->compressor;
    dtrain__compressed_kept *next = &c->kept[!c->versions.now];
    int ranks = dtrain_comm_size(v->comm), divides = op == DTRAIN_MEAN && ranks > 1;
    dtrain_status status = divides ? dtrain__device_vector_can_divide(v, ranks) : DTRAIN_OK;
    v->out = out;
    if (status == DTRAIN_OK)
        status = dtrain__compressed_open(c, unit);
    if (status == DTRAIN_OK && v->velocity != NULL) {
        status = dtrain__device_vector_gain(v, in, c->desc.momentum);
        in = v->velocity;
    }
    if (status != DTRAIN_OK)
        return status;
    uint64_t dense = step != NULL ? *step : dtrain__feedback_steps(next->dense_steps);
    dtrain__feedback_set_steps(next->dense_steps, dense < c->desc.start_step ? dense + 1 : c->desc.start_step);
    if (dense < c->desc.start_step) {
        status = dtrain__compressed_dense(c, in, out, op);
        divides = 0;
    } else if (dtrain__compressed_is_topk(c))
        status = dtrain__selections_run(q, v, in, &c->stats.sent_bytes);
    else if (q->reduce != NULL)
        status = q->reduce(q, v->comm, in, v->residual, out, v->count, &c->stats.sent_bytes);
    else
        status = dtrain__packed_reduce(v, q, c->numbers, in, &c->stats.sent_bytes);
    if (dense < c->desc.start_step || (q->reduce != NULL && !dtrain__compressed_is_topk(c))) { /* the others do it */
        dtrain__feedback_finite(v->residual, v->count);
        dtrain__feedback_finite(v->velocity, v->count);
    }
    if (status == DTRAIN_OK && divides)
        status = dtrain__device_vector_divide(v, ranks);
    if (status == DTRAIN_OK)
        dtrain__compressed_close(c);
    return status;
}

/* Makes a step whose sums have weight `unit` over all ranks, in the floating-point mode of the caller; see >>feedback.
 * step: the number of steps before it; NULL: counted here. What is kept changes once the step counts. */
static dtrain_status dtrain__compressed_step(dtrain_compressed *c, const float *in, float *out, dtrain_op op,
                                             double unit, const uint64_t *step)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_status status = dtrain__compressed_run(c, in, out, op, unit, step);
    c->stats.steps++;
    c->stats.dense_bytes += dtrain__plan_sent_bytes(c->vector.count, dtrain_comm_size(c->vector.comm));
    dtrain__fpmode_restore(mode);
    return status;
}

/* Sums a vector over all ranks as it is, and leaves what is kept. */
static dtrain_status dtrain__compressed_whole(dtrain_compressed *c, float *vector)
{
    dtrain__device_vector *v = &c->vector;
    size_t bytes = v->count * sizeof(float);
    float *here = vector;
    dtrain_status status = DTRAIN_OK;
    if (v->device != NULL) {
        status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_WHOLE, bytes);
        here = dtrain__device_vector_floats(v, DTRAIN__DEVICE_WHOLE);
        if (status == DTRAIN_OK)
            status = dtrain_device_copy(v->device, here, vector, bytes);
        if (status == DTRAIN_OK)
            status = dtrain_device_wait(v->device);
        status = dtrain__device_vector_broken(v->comm, v->device, status);
    }
    if (status == DTRAIN_OK)
        status = dtrain__compressed_dense(c, here, here, DTRAIN_SUM);
    if (status != DTRAIN_OK || v->device == NULL)
        return status;
    return dtrain__device_vector_broken(v->comm, v->device, dtrain_device_copy(v->device, vector, here, bytes));
}

DTRAIN_API dtrain_status dtrain_compressed_all_reduce(dtrain_compressed *compressed, const float *in, float *out,
                                                      dtrain_op op)
{
    dtrain_compressed *c = compressed;
    if (c != NULL) /* the step before can no longer be taken back, even after an error */
        dtrain__versions_end(&c->versions, 0);
    dtrain_status status = dtrain__compressed_check(c, in, out, op);
    if (status == DTRAIN_OK)
        status = dtrain__group_whole(c->vector.comm, "compressed_all_reduce");
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__compressed_step(c, in, out, op, 1.0, NULL);
    dtrain__versions_end(&c->versions, 1);
    return status;
}

DTRAIN_API void dtrain_compressed_drop(dtrain_compressed *compressed)
{
    if (compressed != NULL)
        dtrain__versions_undo(&compressed->versions);
}

static void dtrain__compressed_list(const dtrain_compressed *c, const dtrain__pieces_row *row, dtrain__lister *lister)
{
    const dtrain__device_vector *v = &c->vector;
    const dtrain__compressed_kept *kept = &c->kept[c->versions.now];
    dtrain__pieces_put_row(lister, row, "residual", DTRAIN_F32, kept->residual, v->count, v->device);
    dtrain__pieces_put_row(lister, row, "velocity", DTRAIN_F32, kept->velocity, v->count, v->device);
    dtrain__pieces_put_row(lister, row, "start", DTRAIN_F32, kept->start, dtrain__compressed_starts(c), NULL);
    dtrain__pieces_put_row(lister, row, "step", DTRAIN_F32, dtrain__compressed_is_topk(c) ? kept->step : NULL, 2, NULL);
    if (c->desc.start_step > 0)
        dtrain__pieces_put_row(lister, row, "dense_steps", DTRAIN_F32, kept->dense_steps, 2, NULL);
}

/* Returns whether a load has brought all that is kept of sums. */
static int dtrain__compressed_got(const dtrain_compressed *c, const dtrain__lister *lister)
{
    const dtrain__compressed_kept *kept = &c->kept[c->versions.now];
    return (kept->residual == NULL || dtrain__pieces_got(lister, kept->residual)) &&
           (kept->velocity == NULL || dtrain__pieces_got(lister, kept->velocity));
}

/* After a load no step can be taken back. */
static dtrain_status dtrain__compressed_loaded(const dtrain_pieces *list, const dtrain__lister *lister)
{
    (void)lister;
    ((dtrain_compressed *)list->object)->versions.other = DTRAIN__VERSION_NONE;
    return DTRAIN_OK;
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
    return dtrain__pieces_make(compressed, dtrain__compressed_list_one, dtrain__compressed_loaded);
}

DTRAIN_API dtrain_compressed_stats dtrain_compressed_get_stats(const dtrain_compressed *compressed)
{
    dtrain_compressed_stats none = {0, 0, 0};
    return compressed != NULL ? compressed->stats : none;
}

static dtrain_status dtrain__compressed_check_desc(const dtrain_compressor *compressor,
                                                   const dtrain_compressed_desc *desc)
{
    uint32_t momentum;
    memcpy(&momentum, &desc->momentum, sizeof momentum);
    if (desc->start_step >> 48 != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressed_create: start_step is %llu, expected below 2^48" DTRAIN__ZERO_FIRST,
                            (unsigned long long)desc->start_step);
    if (momentum >= 0x3f800000u)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressed_create: momentum is %g, expected a number of at least 0 and below 1",
                            (double)desc->momentum);
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
    if (!topk && !dtrain__packed_can(q))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: %s has no kernels for the compressor %s: take top-k, int8, "
                            "fp8, or a cast, %s",
                            rank, device, q->name != NULL ? q->name : "of your own", cure);
    if (c->desc.start_step > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "compressed_create on rank %d: start_step is %llu, and a vector on %s is compressed from "
                            "its first step on: leave it 0, %s",
                            rank, (unsigned long long)c->desc.start_step, device, cure);
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
    for (int i = 0; i < 2; i++) {
        dtrain__compressed_kept *kept = &c->kept[i];
        if (status == DTRAIN_OK && !c->desc.no_feedback)
            status = dtrain__device_vector_zeros(v, &kept->residual);
        if (status == DTRAIN_OK && c->desc.momentum > 0.0f)
            status = dtrain__device_vector_zeros(v, &kept->velocity);
        size_t starts = dtrain__compressed_starts(c);
        if (status == DTRAIN_OK && starts > 0 &&
            (kept->start = (float *)dtrain__alloc(v->allocator, starts * sizeof(float))) == NULL)
            status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu elements", starts);
    }
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
    for (int i = 0; i < 2; i++) {
        dtrain__device_vector_free(&compressed->vector, DTRAIN_MEMORY_DEVICE, compressed->kept[i].residual);
        dtrain__device_vector_free(&compressed->vector, DTRAIN_MEMORY_DEVICE, compressed->kept[i].velocity);
        dtrain__free(allocator, compressed->kept[i].start);
    }
    dtrain__quantise_destroy(&compressed->compressor);
    dtrain__device_vector_destroy(&compressed->vector);
    dtrain__free(allocator, compressed->numbers);
    dtrain__free(allocator, compressed);
}

/* ---- for other modules that own the state of a vector on the CPU ---- */

/* Returns the residual that counts; NULL: there is none. */
static float *dtrain__compressed_residual(const dtrain_compressed *c)
{
    return c->kept[c->versions.now].residual;
}

/* For owners whose steps end later; they list the weight of the sums, too. */
static dtrain__versions *dtrain__compressed_versions(dtrain_compressed *c)
{
    return &c->versions;
}

/* The weight of the sums that what is kept is of. */
static double *dtrain__compressed_unit(dtrain_compressed *c)
{
    return &c->kept[c->versions.now].unit;
}

/* Forgets what is kept of sums, as nothing says what weight they have. */
static dtrain_status dtrain__compressed_forget(dtrain_compressed *c)
{
    dtrain__device_vector *v = &c->vector;
    dtrain__compressed_kept *kept = &c->kept[c->versions.now];
    const float zero = 0.0f;
    dtrain_status status = DTRAIN_OK;
    kept->unit = 0.0;
    if (kept->residual != NULL)
        status = dtrain_device_fill(v->device, kept->residual, &zero, sizeof zero, v->count);
    if (status == DTRAIN_OK && kept->velocity != NULL)
        status = dtrain_device_fill(v->device, kept->velocity, &zero, sizeof zero, v->count);
    return status;
}

/* Returns the bytes of the state, without the memory for packing that the owner lends. */
static size_t dtrain__compressed_bytes(size_t count, int ranks, const dtrain_compressed_desc *desc)
{
    return sizeof(dtrain_compressed) + 4 * (size_t)ranks * sizeof(size_t) +
           (desc->no_feedback ? 0 : 2 * count * sizeof(float));
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

/* Begins a step for an owner that sends packed parts itself: packs `in`, unless it is NULL. out: room for the sum. The
 * owner says with dtrain__versions_end whether the step counts. */
static dtrain_status dtrain__compressed_begin(dtrain_compressed *c, dtrain__packed *p, const float *in, float *out,
                                              double unit)
{
    dtrain_status status = dtrain__packed_open(p, &c->vector, &c->compressor, c->numbers, &c->stats.sent_bytes);
    c->vector.out = out;
    if (status == DTRAIN_OK)
        status = dtrain__compressed_open(c, unit);
    c->versions.other = DTRAIN__VERSION_AFTER;
    return status == DTRAIN_OK && in != NULL ? dtrain__packed_send(p, in) : status;
}

DTRAIN__FAST_END
#endif
