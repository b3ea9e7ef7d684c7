/* ---- >>test_one_bit_adam ----
 * FSDP's AdamW in the form of 1-bit Adam against the formulas of the paper in float64, on threads and processes; steps
 * that are dropped, runs that are resumed before and after v is frozen, and what is refused. */
#include "dtrain.h"
#include "test.h"
#include "worlds.h"

#include <math.h>

enum { EMBEDDING = 40 * 30, MATRIX = 3000, BIAS = 7, ALL = EMBEDDING + MATRIX + BIAS, RANKS = 3, START = 3, STEPS = 8 };

/* Unit 0: an embedding that is dense. Unit 1: a matrix and a bias, which are a vector of their own. */
typedef struct model {
    float data[ALL], grad[ALL];
    dtrain_param table[3];
    dtrain_compress_desc compress;
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp;
} model;

static unsigned char threads_digest[32];

static float first_value(size_t i)
{
    return dtrain_random_normal(3, i);
}

static double gradient(int rank, int step, size_t i)
{
    return (double)dtrain_random_normal((uint64_t)(100 * step + rank + 7), i) + 0.5 * (double)(i % 3);
}

/* Of a rank's examples; rank 1 has none in every other step. */
static double weight_of(int rank, int step)
{
    return rank == 1 && step % 2 ? 0 : 1.5 * rank + 1 + step % 3;
}

static void model_open(model *m, dtrain_comm *world)
{
    static const char *const names[] = {"embedding", "matrix", "bias"};
    static const size_t counts[] = {EMBEDDING, MATRIX, BIAS};
    size_t at = 0;
    memset(m, 0, sizeof *m);
    for (int i = 0; i < 3; i++) {
        m->table[i].name = names[i];
        m->table[i].dtype = DTRAIN_F32;
        m->table[i].unit = i > 0;
        m->table[i].shape[0] = counts[i];
        m->table[i].data = m->data + at;
        m->table[i].grad = m->grad + at;
        m->table[i].dense = i == 0;
        at += counts[i];
    }
    for (size_t i = 0; i < ALL; i++)
        m->data[i] = first_value(i);
    m->compress.kind = DTRAIN_COMPRESS_TOPK;
    m->compress.topk.schedule.ratio = 0.05;
    m->compress.feedback.start_step = START;
    m->compress.adam = 1;
    m->desc.strategy = DTRAIN_DDP;
    m->desc.compress = &m->compress;
    m->desc.optimizer.weight_decay = 0.1f;
    m->desc.optimizer.beta2 = 0.95f;
    CHECK_EQ(dtrain_fsdp_create(&m->fsdp, world, m->table, 3, &m->desc), DTRAIN_OK);
}

static void model_close(model *m)
{
    dtrain_fsdp_destroy(m->fsdp);
    free(m);
}

/* Hands a step's gradients over. */
static void model_reduce(model *m, int rank, int step)
{
    CHECK_EQ(dtrain_fsdp_begin(m->fsdp, 1, weight_of(rank, step)), DTRAIN_OK);
    for (int unit = 1; unit >= 0; unit--) {
        CHECK_EQ(dtrain_fsdp_gather(m->fsdp, unit), DTRAIN_OK);
        for (size_t i = unit ? EMBEDDING : 0; i < (size_t)(unit ? ALL : EMBEDDING); i++)
            m->grad[i] = weight_of(rank, step) > 0 ? (float)gradient(rank, step, i) : 0;
        CHECK_EQ(dtrain_fsdp_reduce(m->fsdp, unit), DTRAIN_OK);
    }
}

static float rate_of(int step)
{
    return 0.01f / (float)(1 + step);
}

/* ---- the paper, in float64 ---- */

typedef struct reference {
    double p[ALL], m[ALL], v[ALL], residual[RANKS][ALL], sum[ALL]; /* residual: a share of the mean */
} reference;

static int larger(const void *a, const void *b)
{
    double x = fabs(*(const double *)a), y = fabs(*(const double *)b);
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Adds to the sums what a rank sends of its vector: the largest of the residual. */
static void reference_send(reference *ref, int rank, size_t begin, size_t count, size_t k)
{
    double *residual = ref->residual[rank] + begin, sorted[ALL];
    memcpy(sorted, residual, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, larger);
    for (size_t i = 0; i < count; i++)
        if (fabs(residual[i]) >= fabs(sorted[k - 1])) {
            ref->sum[begin + i] += residual[i];
            residual[i] = 0;
        }
}

static void reference_step(reference *ref, int step)
{
    const double beta1 = (double)0.9f, beta2 = (double)0.95f, decay = (double)0.1f, eps = (double)1e-8f;
    double total = 0, lr = (double)rate_of(step), t = step + 1, formed = step < START ? t : START;
    int frozen = step >= START;
    memset(ref->sum, 0, sizeof ref->sum);
    for (int r = 0; r < RANKS; r++)
        total += weight_of(r, step);
    for (int r = 0; r < RANKS; r++) {
        double weight = weight_of(r, step);
        for (size_t i = 0; i < ALL; i++)
            ref->residual[r][i] *= total;
        for (size_t i = 0; i < ALL; i++) {
            double g = weight > 0 ? (double)(float)gradient(r, step, i) : 0;
            if (frozen && i >= EMBEDDING)
                ref->residual[r][i] += (1 - beta1) * g + beta1 * weight * ref->m[i];
            else
                ref->sum[i] += g;
        }
        if (frozen)
            reference_send(ref, r, EMBEDDING, MATRIX + BIAS, dtrain_topk_count(MATRIX + BIAS, 0.05));
        for (size_t i = 0; i < ALL; i++)
            ref->residual[r][i] /= total;
    }
    for (size_t i = 0; i < ALL; i++) {
        double mean = ref->sum[i] / total, n = i < EMBEDDING ? t : formed;
        int momentum = frozen && i >= EMBEDDING;
        ref->m[i] = momentum ? mean : beta1 * ref->m[i] + (1 - beta1) * mean;
        ref->v[i] = momentum ? ref->v[i] : beta2 * ref->v[i] + (1 - beta2) * mean * mean;
        ref->p[i] -= lr * decay * ref->p[i];
        ref->p[i] -= lr / (1 - pow(beta1, t)) * ref->m[i] / (sqrt(ref->v[i] / (1 - pow(beta2, n))) + eps);
    }
}

static void near_reference(const model *m, const reference *ref, int step)
{
    for (size_t i = 0; i < ALL; i++)
        if (!(fabs((double)m->data[i] - ref->p[i]) <= 2e-5)) {
            TEST_FAIL("step %d: weight %zu is %.9g, expected %.9g", step, i, (double)m->data[i], ref->p[i]);
            return;
        }
}

static void follows_the_paper(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = (model *)malloc(sizeof *m);
    reference *ref = (reference *)calloc(1, sizeof *ref);
    unsigned char digest[32];
    model_open(m, world);
    for (size_t i = 0; i < ALL; i++)
        ref->p[i] = (double)first_value(i);
    for (int step = 0; step < STEPS; step++) {
        if (step == 1 || step == START + 2) { /* one that is not applied counts as none */
            model_reduce(m, rank, 50);
            CHECK_EQ(dtrain_fsdp_drop(m->fsdp), DTRAIN_OK);
        }
        model_reduce(m, rank, step);
        CHECK_EQ(dtrain_fsdp_step(m->fsdp, rate_of(step)), DTRAIN_OK);
        reference_step(ref, step);
        near_reference(m, ref, step);
        CHECK_EQ(dtrain_comm_check_equal(world, m->data, ALL, DTRAIN_F32), DTRAIN_OK);
    }
    if (rank == 0) {
        dtrain_sha256(m->data, sizeof m->data, digest);
        if (threads_digest[0] != 0)
            CHECK(memcmp(digest, threads_digest, 32) == 0);
        memcpy(threads_digest, digest, 32);
    }
    model_close(m);
    free(ref);
}

TEST(momenta_are_sent_and_v_is_frozen_as_in_the_paper_with_the_same_bits_on_threads_and_processes)
{
    memset(threads_digest, 0, sizeof threads_digest);
    on_threads(RANKS, follows_the_paper, NULL);
    on_processes(RANKS, follows_the_paper, NULL);
    on_cables(RANKS, follows_the_paper, NULL);
}

/* Where each piece lies, in the order in which they are listed. */
typedef struct places {
    void *data[64];
    size_t bytes[64];
    int count;
} places;

static void places_add(void *user, const dtrain_piece *piece)
{
    places *p = (places *)user;
    p->bytes[p->count] = piece->count * (dtrain_dtype_bits(piece->dtype) / 8);
    p->data[p->count++] = piece->data;
}

/* Copies weights, m, v and the state of compression, as a checkpoint keeps them. */
static void model_copy(model *to, model *from)
{
    places a, b;
    dtrain_pieces lists[2] = {dtrain_fsdp_pieces(from->fsdp), dtrain_fsdp_pieces(to->fsdp)};
    a.count = b.count = 0;
    CHECK_EQ(dtrain_pieces_each(&lists[0], 1, 64, 0, places_add, &a), DTRAIN_OK);
    CHECK_EQ(dtrain_pieces_each(&lists[1], 1, 64, 0, places_add, &b), DTRAIN_OK);
    CHECK_EQ(a.count, b.count);
    for (int i = 0; i < a.count; i++)
        memcpy(b.data[i], a.data[i], a.bytes[i]);
    CHECK_EQ(dtrain_fsdp_set_step(to->fsdp, dtrain_fsdp_get_step(from->fsdp)), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_publish(to->fsdp), DTRAIN_OK);
}

static void goes_on(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    for (int stop = 1; stop <= START + 2; stop++) {
        model *whole = (model *)malloc(sizeof *whole), *half = (model *)malloc(sizeof *half);
        model_open(whole, world);
        model_open(half, world);
        for (int step = 0; step < STEPS; step++) {
            if (step == stop)
                model_copy(half, whole);
            model_reduce(whole, rank, step);
            CHECK_EQ(dtrain_fsdp_step(whole->fsdp, rate_of(step)), DTRAIN_OK);
            if (step < stop)
                continue;
            model_reduce(half, rank, step);
            CHECK_EQ(dtrain_fsdp_step(half->fsdp, rate_of(step)), DTRAIN_OK);
        }
        CHECK(memcmp(whole->data, half->data, sizeof whole->data) == 0);
        model_close(whole);
        model_close(half);
    }
}

TEST(a_run_goes_on_with_the_same_bits_before_and_after_v_is_frozen)
{
    on_threads(2, goes_on, NULL);
}

static void refuse(dtrain_comm *world, model *m, dtrain_status expected, const char *text)
{
    dtrain_fsdp *fsdp = NULL;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, m->table, 3, &m->desc), expected);
    CHECK_CONTAINS(dtrain_last_error(), text);
}

static void refuses(dtrain_comm *world)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_aggregator aggregator;
    dtrain_ddp_desc ddp_desc;
    dtrain_ddp *ddp = NULL;
    model_open(m, world);
    m->desc.strategy = DTRAIN_HYBRID_SHARD;
    m->desc.shard_size = 1;
    refuse(world, m, DTRAIN_ERR_UNSUPPORTED, "compress.adam needs all of m and v in each rank's memory");
    m->desc.strategy = DTRAIN_FULL_SHARD;
    refuse(world, m, DTRAIN_ERR_UNSUPPORTED, "use DTRAIN_DDP there");
    m->desc.strategy = DTRAIN_DDP;
    m->desc.optimizer.kind = DTRAIN_SGD;
    refuse(world, m, DTRAIN_ERR_INVALID, "compress.adam with DTRAIN_SGD");
    m->desc.optimizer.kind = DTRAIN_ADAMW;
    m->compress.feedback.momentum = 0.5f;
    refuse(world, m, DTRAIN_ERR_INVALID, "feedback.momentum 0.5");
    m->compress.feedback.momentum = 0;
    m->compress.feedback.start_step = 0;
    refuse(world, m, DTRAIN_ERR_INVALID, "expected DTRAIN_ADAMW, a start_step above 0");
    m->compress.feedback.start_step = START;
    memset(&ddp_desc, 0, sizeof ddp_desc);
    ddp_desc.compress = &m->compress;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &ddp_desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "use a dtrain_fsdp with DTRAIN_DDP and that optimizer");
    CHECK_EQ(dtrain_aggregator_compressed(&aggregator, world, m->table, 3, &m->compress), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "aggregator_compressed: compress.adam is 1");
    CHECK_EQ(dtrain_fsdp_begin(m->fsdp, 1, 0), DTRAIN_OK);
    for (int unit = 1; unit >= 0; unit--) {
        CHECK_EQ(dtrain_fsdp_gather(m->fsdp, unit), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_reduce(m->fsdp, unit), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_step(m->fsdp, 0.1f), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the weights of all ranks are 0");
    model_reduce(m, dtrain_comm_rank(world), 0);
    CHECK_EQ(dtrain_fsdp_step(m->fsdp, 0.1f), DTRAIN_OK);
    model_close(m);
}

TEST(what_has_no_momenta_is_refused)
{
    on_threads(2, refuses, NULL);
}
