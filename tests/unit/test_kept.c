/* ---- >>test_kept ----
 * What compression keeps between steps: a step that is not applied leaves it as if that step had never been, whatever
 * ended it; it is a share of the mean, so that a step of another weight gets no more than its due; and it is finite. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include <math.h>
#include "test.h"
#include "processes.h"
#include "checkpoint_model.h"

enum { N = 4096, RANKS = 3, STEPS = 9, BAD = 5 };

/* The objects that keep something. */
enum { OF_DDP, OF_FSDP, OF_HYBRID, OF_AGGREGATOR, OF_BARE, OBJECTS };
static const char *const objects[] = {"DDP", "FSDP", "HYBRID_SHARD", "aggregator", "bare"};

static const struct {
    const char *name;
    dtrain_compression kind;
    float momentum;
    int no_masking;
    uint64_t start;
} kinds[] = {{"top-k", DTRAIN_COMPRESS_TOPK, 0, 0, 0},
             {"top-k with momentum", DTRAIN_COMPRESS_TOPK, 0.9f, 0, 0},
             {"top-k with momentum, unmasked", DTRAIN_COMPRESS_TOPK, 0.9f, 1, 0},
             {"top-k from step 3", DTRAIN_COMPRESS_TOPK, 0, 0, 3},
             {"sign", DTRAIN_COMPRESS_SIGN, 0, 0, 0},
             {"int8", DTRAIN_COMPRESS_INT8, 0, 0, 0},
             {"fp8", DTRAIN_COMPRESS_FP8, 0, 0, 0},
             {"bf16", DTRAIN_COMPRESS_BF16, 0, 0, 0},
             {"powersgd", DTRAIN_COMPRESS_POWERSGD, 0, 0, 0},
             {"powersgd from step 7", DTRAIN_COMPRESS_POWERSGD, 0, 0, 7}};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* What happens to the bad step. */
enum {
    NEVER,       /* there is none */
    DROPPED,     /* before its gradients are finished */
    FINISHED,    /* and then dropped */
    WEIGHTLESS,  /* its weight is 0 */
    REFUSED,     /* the optimizer refuses its rate */
    LOADED,      /* the run goes back to its last checkpoint while the step is open */
    LOADED_LATE, /* and once its gradients are finished */
    ENDS
};
static const char *const ways[] = {
    "never", "dropped", "finished and dropped", "of weight 0", "refused", "loaded over while open", "loaded over"};

typedef struct trial {
    int object, kind, way;
    float bad; /* every gradient of the bad step */
    uint64_t hash;
    const char *directory;
} trial;

typedef struct rig {
    dtrain_comm *world;
    const trial *t;
    float w[N], g[N], sum[N], weight;
    dtrain_param table[2];
    dtrain_ddp *ddp;
    dtrain_fsdp *fsdp;
    dtrain_aggregator aggregator;
    dtrain_compressed *bare;
    dtrain_optimizer *optimizer;
    dtrain_checkpoint *ckpt;
    dtrain_pieces lists[2];
    int step, wrong;
} rig;

static dtrain_compress_desc compress_of(int kind)
{
    dtrain_compress_desc c;
    memset(&c, 0, sizeof c);
    c.kind = kinds[kind].kind;
    c.topk.schedule.ratio = 0.02;
    c.topk.schedule.stage_steps = 2; /* the number of steps counts */
    c.rank = 2;
    c.feedback.momentum = kinds[kind].momentum;
    c.feedback.no_masking = kinds[kind].no_masking;
    c.feedback.start_step = kinds[kind].start;
    return c;
}

static void fill(rig *r, float *g)
{
    int rank = dtrain_comm_rank(r->world);
    for (int i = 0; i < N; i++)
        g[i] += r->wrong ? r->t->bad * (float)(1 + i % 7)
                         : r->weight * (float)(((i * 7 + r->step * 13 + rank * 5) % 64) - 30) / 64.0f;
}

static void open_bare(rig *r, const dtrain_compress_desc *c)
{
    dtrain_compressor q = dtrain_compressor_of(c->kind, 0);
    if (c->kind == DTRAIN_COMPRESS_TOPK)
        CHECK_EQ(dtrain_compressor_topk(&q, &c->topk, NULL), DTRAIN_OK);
    if (c->kind == DTRAIN_COMPRESS_POWERSGD)
        CHECK_EQ(dtrain_compressor_powersgd(&q, 64, 64, 2, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&r->bare, r->world, N, &q, &c->feedback), DTRAIN_OK);
    r->lists[1] = dtrain_compressed_pieces(r->bare);
}

static void rig_open(rig *r)
{
    dtrain_compress_desc c = compress_of(r->t->kind);
    dtrain_optimizer_desc sgd;
    memset(&sgd, 0, sizeof sgd);
    sgd.kind = DTRAIN_SGD;
    r->weight = 4.0f;
    r->table[0].name = "w"; /* one parameter is compressed, and a small one is not */
    r->table[1].name = "small";
    for (int i = 0; i < 2; i++) {
        int begin = i == 0 ? 0 : N - 64;
        r->table[i].dtype = DTRAIN_F32;
        r->table[i].shape[0] = i == 0 ? 63 : 64;
        r->table[i].shape[1] = i == 0 ? 64 : 0;
        r->table[i].data = r->w + begin;
        r->table[i].grad = r->g + begin;
        r->table[i].dense = i;
    }
    if (r->t->object == OF_DDP) {
        dtrain_ddp_desc d;
        memset(&d, 0, sizeof d);
        d.compress = &c;
        CHECK_EQ(dtrain_ddp_create(&r->ddp, r->world, r->table, 2, &d), DTRAIN_OK);
        r->lists[1] = dtrain_ddp_pieces(r->ddp);
    } else if (r->t->object == OF_FSDP || r->t->object == OF_HYBRID) {
        dtrain_fsdp_desc d;
        memset(&d, 0, sizeof d);
        d.strategy = r->t->object == OF_FSDP ? DTRAIN_DDP : DTRAIN_HYBRID_SHARD;
        d.shard_size = 2;
        d.optimizer = sgd;
        d.compress = &c;
        CHECK_EQ(dtrain_fsdp_create(&r->fsdp, r->world, r->table, 2, &d), DTRAIN_OK);
        r->lists[0] = dtrain_fsdp_pieces(r->fsdp);
    } else if (r->t->object == OF_AGGREGATOR) {
        CHECK_EQ(dtrain_aggregator_compressed(&r->aggregator, r->world, r->table, 2, &c), DTRAIN_OK);
        r->lists[1] = dtrain_aggregator_pieces(&r->aggregator);
    } else
        open_bare(r, &c);
    if (r->fsdp == NULL) {
        CHECK_EQ(dtrain_optimizer_create(&r->optimizer, r->table, 2, &sgd, NULL), DTRAIN_OK);
        r->lists[0] = dtrain_params_pieces(r->table, 2, r->optimizer);
    }
    if (r->t->way >= LOADED) {
        dtrain_checkpoint_desc d;
        memset(&d, 0, sizeof d);
        d.directory = r->t->directory;
        d.no_sync = 1;
        CHECK_EQ(dtrain_checkpoint_create(&r->ckpt, r->world, &d), DTRAIN_OK);
    }
}

static void rig_close(rig *r)
{
    dtrain_checkpoint_destroy(r->ckpt);
    dtrain_ddp_destroy(r->ddp);
    dtrain_fsdp_destroy(r->fsdp);
    dtrain_aggregator_destroy(&r->aggregator);
    dtrain_compressed_destroy(r->bare);
    dtrain_optimizer_destroy(r->optimizer);
}

static dtrain_status save_or_load(rig *r, int load)
{
    dtrain_checkpoint_state q;
    memset(&q, 0, sizeof q);
    q.lists = r->lists;
    q.list_count = r->fsdp != NULL ? 1 : 2;
    q.step = BAD;
    return load ? dtrain_checkpoint_load(r->ckpt, &q, NULL, NULL) : dtrain_checkpoint_save(r->ckpt, &q);
}

static dtrain_status compute(void *user, double *weight)
{
    rig *r = (rig *)user;
    fill(r, r->g);
    *weight = (double)r->weight;
    return DTRAIN_OK;
}

/* A step up to where its gradients are finished, or before. */
static void begin(rig *r, int finishes)
{
    if (r->ddp != NULL) {
        CHECK_EQ(dtrain_ddp_begin(r->ddp, 1, (double)r->weight), DTRAIN_OK);
        fill(r, r->g);
        CHECK_EQ(dtrain_ddp_reduce(r->ddp, 0), DTRAIN_OK);
        if (finishes)
            CHECK_EQ(dtrain_ddp_finish(r->ddp, NULL), DTRAIN_OK);
    } else if (r->fsdp != NULL) {
        float part[N];
        CHECK_EQ(dtrain_fsdp_begin(r->fsdp, 1, (double)r->weight), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_gather(r->fsdp, 0), DTRAIN_OK);
        memset(part, 0, sizeof part);
        fill(r, part);
        for (int i = 0; i < N; i++)
            (i < N - 64 ? dtrain_fsdp_grad(r->fsdp, "w") + i
                        : dtrain_fsdp_grad(r->fsdp, "small") + (i - (N - 64)))[0] += part[i];
        CHECK_EQ(dtrain_fsdp_reduce(r->fsdp, 0), DTRAIN_OK);
        if (finishes)
            CHECK_EQ(dtrain_fsdp_finish(r->fsdp, NULL), DTRAIN_OK);
    } else if (r->bare != NULL) {
        memset(r->g, 0, sizeof r->g);
        fill(r, r->g);
        CHECK_EQ(dtrain_compressed_all_reduce(r->bare, r->g, r->g, DTRAIN_MEAN), DTRAIN_OK);
    } else {
        double total;
        memset(r->g, 0, sizeof r->g);
        fill(r, r->g);
        CHECK_EQ(r->aggregator.aggregate(r->aggregator.self, r->table, 2, (double)r->weight, &total), DTRAIN_OK);
    }
}

static void drop(rig *r)
{
    if (r->ddp != NULL)
        CHECK_EQ(dtrain_ddp_drop(r->ddp), DTRAIN_OK);
    else if (r->fsdp != NULL)
        CHECK_EQ(dtrain_fsdp_drop(r->fsdp), DTRAIN_OK);
    else if (r->bare != NULL)
        dtrain_compressed_drop(r->bare);
    else
        r->aggregator.drop(r->aggregator.self);
}

static void good_step(rig *r)
{
    begin(r, 1);
    if (r->fsdp != NULL)
        CHECK_EQ(dtrain_fsdp_step(r->fsdp, 0.01f), DTRAIN_OK);
    else
        CHECK_EQ(dtrain_optimizer_step(r->optimizer, 0.01f), DTRAIN_OK);
}

static void bad_step(rig *r)
{
    dtrain_step_desc step = {r->table, 2, compute, r, &r->aggregator, r->optimizer, NAN, 0};
    r->wrong = 1;
    r->weight = r->t->way == WEIGHTLESS ? 0 : 4.0f;
    if (r->t->way >= LOADED)
        CHECK_EQ(save_or_load(r, 0), DTRAIN_OK);
    if (r->t->way == REFUSED)
        CHECK_EQ(dtrain_train_step(&step, NULL), DTRAIN_ERR_INVALID);
    else
        begin(r, r->t->way == FINISHED || r->t->way == WEIGHTLESS || r->t->way == LOADED_LATE);
    if (r->t->way >= LOADED)
        CHECK_EQ(save_or_load(r, 1), DTRAIN_OK);
    else if (r->t->way == DROPPED || r->t->way == FINISHED || (r->t->way == WEIGHTLESS && r->fsdp != NULL))
        drop(r);
    r->wrong = 0;
    r->weight = 4.0f;
}

static void visit(void *user, const dtrain_piece *piece)
{
    uint64_t *hash = (uint64_t *)user;
    const unsigned char *data = (const unsigned char *)piece->data;
    for (size_t i = 0; i < piece->count * dtrain_dtype_bits(piece->dtype) / 8; i++)
        *hash = (*hash ^ data[i]) * 1099511628211u;
}

static dtrain_status trial_body(dtrain_comm *world, void *user)
{
    trial *t = (trial *)user;
    rig *r = (rig *)calloc(1, sizeof *r);
    uint64_t hash = 14695981039346656037u;
    r->world = world;
    r->t = t;
    rig_open(r);
    for (r->step = 0; r->step < STEPS; r->step++) {
        if (r->step == BAD && t->way != NEVER)
            bad_step(r);
        good_step(r);
    }
    CHECK_EQ(dtrain_pieces_each(r->lists, r->fsdp != NULL ? 1 : 2, dtrain_comm_size(world), dtrain_comm_rank(world),
                                visit, &hash),
             DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, &hash, &hash, 1, DTRAIN_U64, DTRAIN_SUM), DTRAIN_OK);
    t->hash = hash; /* the same on every rank */
    rig_close(r);
    free(r);
    return DTRAIN_OK;
}

/* Whether the object can lose a step in this way. */
static int may(int object, int way)
{
    int finishes = object == OF_DDP || object == OF_FSDP || object == OF_HYBRID;
    return way == DROPPED || way == LOADED ? finishes
           : way == REFUSED                ? object == OF_AGGREGATOR
           : way == WEIGHTLESS             ? object != OF_BARE
                                           : 1;
}

static void every_way(int object)
{
    static const float bads[] = {1e6f, NAN, INFINITY};
    for (int kind = 0; kind < KINDS; kind++) {
        trial t = {object, kind, NEVER, 0, 0, NULL};
        if (object == OF_HYBRID && kinds[kind].kind == DTRAIN_COMPRESS_POWERSGD)
            continue; /* it needs whole matrices */
        CHECK_EQ(dtrain_run_threads(object == OF_HYBRID ? 4 : RANKS, trial_body, &t, NULL), DTRAIN_OK);
        uint64_t expected = t.hash;
        for (int way = DROPPED; way < ENDS; way++) {
            if (!may(object, way))
                continue;
            t.way = way;
            t.bad = way == WEIGHTLESS ? 0.0f : bads[(way + kind) % 3];
            t.directory = fresh("kept");
            CHECK_EQ(dtrain_run_threads(object == OF_HYBRID ? 4 : RANKS, trial_body, &t, NULL), DTRAIN_OK);
            if (t.hash != expected)
                TEST_FAIL(
                    "%s, %s: after a step of %g that was %s, weights or what is kept differ from a run without it",
                    objects[object], kinds[kind].name, (double)t.bad, ways[way]);
        }
    }
}

TEST(a_lost_step_leaves_no_trace_in_ddp)
{
    every_way(OF_DDP);
}

TEST(a_lost_step_leaves_no_trace_in_fsdp)
{
    every_way(OF_FSDP);
}

TEST(a_lost_step_leaves_no_trace_in_hybrid_sharding)
{
    every_way(OF_HYBRID);
}

TEST(a_lost_step_leaves_no_trace_in_an_aggregator)
{
    every_way(OF_AGGREGATOR);
}

TEST(a_lost_step_leaves_no_trace_in_a_vector)
{
    every_way(OF_BARE);
}

/* ---- steps that are refused ---- */

static uint64_t hash_of(rig *r)
{
    uint64_t hash = 14695981039346656037u;
    CHECK_EQ(dtrain_pieces_each(&r->lists[r->fsdp == NULL], 1, dtrain_comm_size(r->world), dtrain_comm_rank(r->world),
                                visit, &hash),
             DTRAIN_OK);
    return hash;
}

/* Every way in which an object's next step fails at its arguments. Returns 0 after the last one. */
static int refused_step(rig *r, int way)
{
    double total;
    if (r->ddp != NULL && way < 2)
        CHECK_EQ(dtrain_ddp_begin(r->ddp, way == 0 ? 1 : -1, way == 0 ? (double)NAN : 1.0), DTRAIN_ERR_INVALID);
    else if (r->bare != NULL && way < 2)
        CHECK_EQ(
            dtrain_compressed_all_reduce(r->bare, way == 0 ? r->g : NULL, r->g, way == 0 ? DTRAIN_MAX : DTRAIN_SUM),
            DTRAIN_ERR_INVALID);
    else if (r->aggregator.aggregate != NULL && way < 2)
        CHECK_EQ(r->aggregator.aggregate(r->aggregator.self, r->table, 2 - (size_t)way, way == 0 ? (double)NAN : 1.0,
                                         &total),
                 DTRAIN_ERR_INVALID);
    else
        return 0;
    return 1;
}

static dtrain_status refused_body(dtrain_comm *world, void *user)
{
    rig *r = (rig *)calloc(1, sizeof *r);
    r->world = world;
    r->t = (const trial *)user;
    rig_open(r);
    for (int way = 0, goes_on = 1; goes_on; way++) {
        uint64_t before = hash_of(r);
        good_step(r);
        r->step++;
        uint64_t applied = hash_of(r);
        CHECK(applied != before || kinds[r->t->kind].kind == DTRAIN_COMPRESS_BF16); /* which loses nothing here */
        goes_on = refused_step(r, way);
        CHECK(hash_of(r) == applied);
        drop(r);
        CHECK(hash_of(r) == (goes_on ? applied : before)); /* with no call between the two, drop takes it back */
        drop(r);
        CHECK(hash_of(r) == (goes_on ? applied : before));
    }
    rig_close(r);
    free(r);
    return DTRAIN_OK;
}

TEST(a_drop_after_a_refused_step_leaves_the_step_before_it)
{
    for (int object = OF_DDP; object < OBJECTS; object++)
        for (int kind = 0; kind < KINDS && object != OF_FSDP && object != OF_HYBRID; kind++) {
            trial t = {object, kind, NEVER, 0, 0, NULL};
            CHECK_EQ(dtrain_run_threads(2, refused_body, &t, NULL), DTRAIN_OK);
        }
}

/* The last rank leaves after two steps, and the third fails on the others. */
static dtrain_status deserted_body(dtrain_comm *world, void *user)
{
    rig *r = (rig *)calloc(1, sizeof *r);
    double total;
    r->world = world;
    r->t = (const trial *)user;
    rig_open(r);
    good_step(r);
    good_step(r);
    uint64_t applied = hash_of(r);
    if (dtrain_comm_rank(world) < RANKS - 1) {
        CHECK(r->bare != NULL ? dtrain_compressed_all_reduce(r->bare, r->g, r->g, DTRAIN_SUM) != DTRAIN_OK
                              : r->aggregator.aggregate(r->aggregator.self, r->table, 2, 1, &total) != DTRAIN_OK);
        drop(r);
        CHECK(hash_of(r) == applied);
    }
    rig_close(r);
    free(r);
    return DTRAIN_OK;
}

TEST(a_drop_after_a_step_that_a_lost_rank_has_ended_leaves_the_step_before_it)
{
    for (int object = OF_AGGREGATOR; object <= OF_BARE; object++)
        for (int kind = 0; kind < KINDS; kind++) {
            trial t = {object, kind, NEVER, 0, 0, NULL};
            CHECK_EQ(dtrain_run_threads(RANKS, deserted_body, &t, NULL), DTRAIN_OK);
        }
}

/* ---- weights ---- */

/* Every example's gradient is 1, so no element may have got more than one for each step. last: weight of the last step;
 * before and at: the sum of the mean gradients in the step before, and in that one. */
typedef struct shares {
    int object, kind, loads;
    double last, before, at, most;
    const char *directory;
} shares;

static double sum_of(const float *g)
{
    double all = 0;
    for (int i = 0; i < N; i++)
        all += (double)g[i];
    return all;
}

static double all_ones(rig *r, float weight)
{
    r->weight = weight;
    if (r->ddp != NULL) {
        CHECK_EQ(dtrain_ddp_begin(r->ddp, 1, (double)weight), DTRAIN_OK);
        for (int i = 0; i < N; i++)
            r->g[i] += weight;
        CHECK_EQ(dtrain_ddp_reduce(r->ddp, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_ddp_finish(r->ddp, NULL), DTRAIN_OK);
    } else {
        double total;
        for (int i = 0; i < N; i++)
            r->g[i] = weight;
        CHECK_EQ(r->aggregator.aggregate(r->aggregator.self, r->table, 2, (double)weight, &total), DTRAIN_OK);
    }
    for (int i = 0; i < N - 64; i++)
        r->sum[i] += r->g[i];
    return sum_of(r->g);
}

static dtrain_status shares_body(dtrain_comm *world, void *user)
{
    shares *s = (shares *)user;
    trial t = {s->object, s->kind, s->loads ? LOADED : NEVER, 0, 0, s->directory};
    rig *r = (rig *)calloc(1, sizeof *r);
    double before = 0, at = 0, most = 0;
    r->world = world;
    r->t = &t;
    rig_open(r);
    for (int step = 0; step < 40; step++)
        before = all_ones(r, 32);
    if (s->loads) {
        CHECK_EQ(save_or_load(r, 0), DTRAIN_OK);
        rig_close(r);
        float *kept = (float *)malloc(sizeof r->sum);
        memcpy(kept, r->sum, sizeof r->sum);
        memset(r, 0, sizeof *r);
        memcpy(r->sum, kept, sizeof r->sum);
        free(kept);
        r->world = world;
        r->t = &t;
        rig_open(r);
        CHECK_EQ(save_or_load(r, 1), DTRAIN_OK);
    }
    at = all_ones(r, (float)s->last);
    for (int step = 0; step < 20; step++)
        all_ones(r, 32);
    for (int i = 0; i < N - 64; i++)
        most = (double)r->sum[i] > most ? (double)r->sum[i] : most;
    rig_close(r);
    free(r);
    if (dtrain_comm_rank(world) == 0) {
        s->before = before;
        s->at = at;
        s->most = most;
    }
    return DTRAIN_OK;
}

TEST(a_step_of_another_weight_gets_its_share_of_what_is_kept)
{
    static const int some[] = {0, 4, 5};
    for (int object = OF_DDP; object <= OF_AGGREGATOR; object += OF_AGGREGATOR - OF_DDP)
        for (int k = 0; k < 3; k++)
            for (int last = 0; last < 3; last++)
                for (int loads = 0; loads < 2; loads++) {
                    static const double lasts[] = {32, 1, 0};
                    shares s = {object, some[k], loads, lasts[last], 0, 0, 0, fresh("shares")};
                    CHECK_EQ(dtrain_run_threads(2, shares_body, &s, NULL), DTRAIN_OK);
                    if (!(s.most <= 61.5) || (s.last > 0 && !(fabs(s.at - s.before) < 0.2 * s.before)) ||
                        (s.last == 0 && !(s.at == 0)))
                        TEST_FAIL("%s, %s: %g in the step before, %g in the last of weight %g%s; one element %g in 61",
                                  objects[object], kinds[some[k]].name, s.before, s.at, s.last,
                                  loads ? ", after a load" : "", s.most);
                }
}

/* ---- NaN and infinity ---- */

typedef struct lost {
    int kind, steps, object;
    float bad;
} lost;

static dtrain_status lost_body(dtrain_comm *world, void *user)
{
    lost *l = (lost *)user;
    trial t = {l->object, l->kind, NEVER, 0, 0, NULL};
    rig *r = (rig *)calloc(1, sizeof *r);
    int steps = 0;
    r->world = world;
    r->t = &t;
    rig_open(r);
    for (int step = 0; step < 40; step++) {
        int bad = 0;
        if (r->ddp != NULL)
            CHECK_EQ(dtrain_ddp_begin(r->ddp, 1, 1), DTRAIN_OK);
        for (int i = 0; i < N; i++)
            r->g[i] = step == 12 && dtrain_comm_rank(world) == 0 && i % 3 == 0 ? l->bad : 1.0f;
        if (r->ddp != NULL) {
            CHECK_EQ(dtrain_ddp_reduce(r->ddp, 0), DTRAIN_OK);
            CHECK_EQ(dtrain_ddp_finish(r->ddp, NULL), DTRAIN_OK);
        } else
            CHECK_EQ(dtrain_compressed_all_reduce(r->bare, r->g, r->g, DTRAIN_SUM), DTRAIN_OK);
        for (int i = 0; i < N; i++)
            bad |= !isfinite(r->g[i]);
        steps += bad;
        CHECK(bad == (step == 12));
    }
    rig_close(r);
    free(r);
    if (dtrain_comm_rank(world) == 0)
        l->steps = steps;
    return DTRAIN_OK;
}

TEST(one_bad_step_costs_one_step)
{
    for (int object = OF_DDP; object <= OF_BARE; object += OF_BARE - OF_DDP)
        for (int kind = 0; kind < KINDS; kind++)
            for (int infinite = 0; infinite < 2; infinite++) {
                lost l = {kind, 0, object, infinite ? -INFINITY : NAN};
                CHECK_EQ(dtrain_run_threads(2, lost_body, &l, NULL), DTRAIN_OK);
                if (l.steps != 1)
                    TEST_FAIL("%s, %s: one step of %g lost %d", objects[object], kinds[kind].name, (double)l.bad,
                              l.steps);
            }
}

/* A compressor of the caller's own, which packs or reduces, and leaves what it likes in the residual. */
static size_t own_bytes(const dtrain_compressor *q, size_t count)
{
    (void)q;
    return count * sizeof(float);
}

static void own_pack(const dtrain_compressor *q, const float *in, size_t count, void *out)
{
    (void)q;
    memcpy(out, in, count * sizeof(float));
}

static void own_unpack(const dtrain_compressor *q, const void *in, float *out, size_t count)
{
    (void)q;
    for (size_t i = 0; i < count; i++) {
        memcpy(&out[i], (const char *)in + 4 * i, 4);
        out[i] *= i % 7 == 0 ? -0.9f : i % 7 == 1 ? NAN : 0.5f;
    }
}

static dtrain_status own_reduce(const dtrain_compressor *q, dtrain_comm *comm, const float *in, float *residual,
                                float *out, size_t count, uint64_t *sent)
{
    (void)q, (void)sent;
    for (size_t i = 0; i < count; i++)
        residual[i] += i % 5 == 0 ? INFINITY : i % 5 == 1 ? NAN : in[i] * 10;
    return dtrain_all_reduce(comm, in, out, count, DTRAIN_F32, DTRAIN_SUM);
}

static void count_unbounded(void *user, const dtrain_piece *piece)
{
    const float *data = (const float *)piece->data;
    for (size_t i = 0; piece->dtype == DTRAIN_F32 && i < piece->count; i++)
        *(int *)user += !isfinite(data[i]);
}

static int unbounded(dtrain_comm *world, dtrain_pieces list)
{
    int bad = 0;
    CHECK_EQ(dtrain_pieces_each(&list, 1, dtrain_comm_size(world), dtrain_comm_rank(world), count_unbounded, &bad),
             DTRAIN_OK);
    return bad;
}

/* How a vector is compressed, and how large its elements are. */
typedef struct vast {
    dtrain_compressor q; /* without functions: a kind of the table */
    int kind, splits, numbers, bad;
} vast;

static float vast_number(int numbers, int rank, int step, int i)
{
    static const float ends[] = {3.4e38f, -3.4e38f, 1e38f, -1e38f, 1e30f, 1.7e38f, 8.57e37f, 1};
    if (numbers == 0) /* one large element in each block of signs, and small ones that cancel out between ranks */
        return step > 0 ? 0.0f : i % 8 == 0 ? 3.4e38f : rank == 0 ? 1.0f : -1.0f;
    if (numbers == 1) /* a residual at the very end, to which the rounding of a sum is added */
        return rank == 0 ? 3.40282347e38f : i % 100 >= 90 ? (rank == 1 ? 0x1p127f : 0x1.02p126f) : 0.0f;
    if (numbers == 2)
        return ends[(i * 7 + step * 3 + rank * 5) % 8];
    return step % 3 == 1 ? 1.0f : i % 11 == step ? NAN : i % 13 == rank ? -INFINITY : ends[(i + step) % 8];
}

static dtrain_status vast_body(dtrain_comm *world, void *user)
{
    vast *v = (vast *)user;
    int rank = dtrain_comm_rank(world), bad = 0;
    float *g = (float *)malloc(N * sizeof *g);
    dtrain_compress_desc c = compress_of(v->kind);
    dtrain_compressor q = v->q;
    dtrain_compressed *compressed;
    c.topk.exchange = v->splits ? DTRAIN_EXCHANGE_SPLIT : DTRAIN_EXCHANGE_GATHER;
    c.topk.values = v->splits ? DTRAIN_BF16 : DTRAIN_F32;
    if (q.reduce != NULL || q.pack != NULL)
        memset(&c.feedback, 0, sizeof c.feedback);
    else if (c.kind == DTRAIN_COMPRESS_TOPK)
        CHECK_EQ(dtrain_compressor_topk(&q, &c.topk, NULL), DTRAIN_OK);
    else if (c.kind == DTRAIN_COMPRESS_POWERSGD)
        CHECK_EQ(dtrain_compressor_powersgd(&q, 64, 64, 2, 1, NULL), DTRAIN_OK);
    else
        q = dtrain_compressor_of(c.kind, c.kind == DTRAIN_COMPRESS_SIGN ? 8 : 0);
    CHECK_EQ(dtrain_compressed_create(&compressed, world, N, &q, &c.feedback), DTRAIN_OK);
    for (int step = 0; step < 8; step++) {
        for (int i = 0; i < N; i++)
            g[i] = vast_number(v->numbers, rank, step, i);
        CHECK_EQ(dtrain_compressed_all_reduce(compressed, g, g, DTRAIN_SUM), DTRAIN_OK);
        bad += unbounded(world, dtrain_compressed_pieces(compressed));
        for (int i = 0; i < N && v->numbers == 0; i++)
            bad += !isfinite(g[i]); /* no sum of these is too large */
    }
    dtrain_compressed_destroy(compressed);
    free(g);
    CHECK_EQ(dtrain_all_reduce(world, &bad, &bad, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_OK);
    v->bad = bad;
    return DTRAIN_OK;
}

TEST(what_is_kept_stays_finite_whatever_is_added_up)
{
    for (int numbers = 0; numbers < 4; numbers++)
        for (int kind = 0; kind < KINDS + 2; kind++)
            for (int splits = 0; splits < 2; splits++) {
                vast v;
                memset(&v, 0, sizeof v);
                v.numbers = numbers;
                v.kind = kind < KINDS ? kind : 0;
                v.splits = splits;
                if (numbers == 0 && kind < KINDS && kinds[kind].kind != DTRAIN_COMPRESS_SIGN)
                    continue;
                if (kind >= KINDS && (splits || numbers == 0))
                    continue;
                if (kind >= KINDS)
                    v.q.name = "own";
                if (kind == KINDS)
                    v.q.reduce = own_reduce;
                else if (kind > KINDS)
                    v.q.bytes = own_bytes, v.q.pack = own_pack, v.q.unpack = own_unpack;
                CHECK_EQ(dtrain_run_threads(numbers == 0 ? 2 : 3, vast_body, &v, NULL), DTRAIN_OK);
                if (v.bad != 0)
                    TEST_FAIL("%s, numbers %d, %s: %d of what is kept are not finite",
                              kind < KINDS    ? kinds[kind].name
                              : kind == KINDS ? "own reduce"
                                              : "own pack",
                              numbers, splits ? "split" : "gathered", v.bad);
            }
}

TEST(the_scale_of_signs_is_finite_for_finite_blocks)
{
    dtrain_compressor sign = dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 1024);
    static float in[2048], out[2048];
    unsigned char packed[2048];
    for (int i = 0; i < 2048; i++)
        in[i] = (i % 3 == 0 ? -1.0f : 1.0f) * (i < 1024 ? 4e37f : 3.40282347e38f);
    CHECK(sign.bytes(&sign, 2048) <= sizeof packed);
    sign.pack(&sign, in, 2048, packed);
    sign.unpack(&sign, packed, out, 2048);
    for (int i = 0; i < 2048; i++)
        CHECK(isfinite(out[i]) && (out[i] < 0) == (i % 3 == 0) && fabsf(out[i] / in[i] - 1) < 1e-6f);
    in[5] = INFINITY;
    sign.pack(&sign, in, 2048, packed);
    sign.unpack(&sign, packed, out, 2048);
    CHECK(isnan(out[0]) && isnan(out[1023]) && isfinite(out[1024]));
}

/* ---- servers ---- */

/* A worker pushes what each example has as gradient 1, `empty` pushes of weight 0 between them. */
typedef struct pushes {
    int packs, empty;
    double moved;
} pushes;

static dtrain_status pushes_body(dtrain_comm *world, void *user)
{
    pushes *p = (pushes *)user;
    static float w[2][N], g[2][N];
    int rank = dtrain_comm_rank(world);
    dtrain_param table;
    dtrain_compress_desc c = compress_of(0);
    dtrain_server_desc d;
    dtrain_server *server = NULL;
    c.topk.schedule.stage_steps = 0;
    c.topk.schedule.ratio = 0.1;
    memset(&table, 0, sizeof table), memset(&d, 0, sizeof d), memset(w[rank], 0, sizeof w[rank]);
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = N;
    table.data = w[rank];
    table.grad = g[rank];
    d.async = 1;
    d.compress = p->packs ? &c : NULL;
    CHECK_EQ(dtrain_server_create(&server, world, &table, 1, &d), DTRAIN_OK);
    if (rank == 0) {
        dtrain_optimizer *optimizer;
        dtrain_optimizer_desc sgd;
        dtrain_serve_desc serve;
        memset(&sgd, 0, sizeof sgd), memset(&serve, 0, sizeof serve);
        sgd.kind = DTRAIN_SGD;
        serve.schedule.lr = 1;
        CHECK_EQ(dtrain_optimizer_create(&optimizer, &table, 1, &sgd, NULL), DTRAIN_OK);
        serve.optimizer = optimizer;
        CHECK_EQ(dtrain_server_run(server, &serve), DTRAIN_OK);
        p->moved = -sum_of(w[0]) / N;
        dtrain_optimizer_destroy(optimizer);
    } else {
        for (int i = 0; i < 60 * (1 + p->empty); i++) {
            float weight = i % (1 + p->empty) == 0 ? 8.0f : 0.0f;
            for (int k = 0; k < N; k++)
                g[1][k] = weight;
            CHECK_EQ(dtrain_server_push(server, (double)weight), DTRAIN_OK);
            CHECK_EQ(dtrain_server_pull(server), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
    }
    dtrain_server_destroy(server);
    return DTRAIN_OK;
}

TEST(pushes_of_weight_0_lose_nothing)
{
    pushes plain = {0, 0, 0}, packed = {1, 0, 0};
    CHECK_EQ(dtrain_run_threads(2, pushes_body, &plain, NULL), DTRAIN_OK);
    CHECK(plain.moved == 60);
    CHECK_EQ(dtrain_run_threads(2, pushes_body, &packed, NULL), DTRAIN_OK);
    CHECK(packed.moved > 50 && packed.moved < 60);
    for (int empty = 1; empty < 4; empty++) {
        pushes p = {1, empty, 0};
        CHECK_EQ(dtrain_run_threads(2, pushes_body, &p, NULL), DTRAIN_OK);
        CHECK(p.moved == packed.moved);
    }
}

/* A synchronous server over ranks with weights of their own. The means of all steps are 1, so no element gets more than
 * one a step, and with bf16's small errors each gets nearly that. */
typedef struct synchronous {
    dtrain_compression kind;
    double least, most;
} synchronous;

static dtrain_status synchronous_body(dtrain_comm *world, void *user)
{
    synchronous *s = (synchronous *)user;
    static float w[3][N], g[3][N], sum[N];
    int rank = dtrain_comm_rank(world);
    dtrain_param table;
    dtrain_compress_desc c;
    dtrain_server_desc d;
    dtrain_server *server = NULL;
    memset(&table, 0, sizeof table), memset(&d, 0, sizeof d), memset(&c, 0, sizeof c),
        memset(w[rank], 0, sizeof w[rank]);
    if (rank == 0)
        memset(sum, 0, sizeof sum);
    c.kind = s->kind;
    c.topk.schedule.ratio = 0.1;
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = N;
    table.data = w[rank];
    table.grad = g[rank];
    d.compress = &c;
    CHECK_EQ(dtrain_server_create(&server, world, &table, 1, &d), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int step = 0; step < 60; step++) {
        float weight = step % 4 == 3 ? (rank == 1 ? 1.0f : 0.0f) : step % 7 == 5 && rank == 2 ? 0.0f : 16.0f;
        double total;
        for (int i = 0; i < N; i++)
            g[rank][i] = weight;
        CHECK_EQ(aggregator.aggregate(aggregator.self, &table, 1, (double)weight, &total), DTRAIN_OK);
        for (int i = 0; rank == 0 && i < N; i++)
            sum[i] += g[rank][i];
    }
    if (rank == 0) {
        s->least = s->most = (double)sum[0];
        for (int i = 0; i < N; i++) {
            s->least = (double)sum[i] < s->least ? (double)sum[i] : s->least;
            s->most = (double)sum[i] > s->most ? (double)sum[i] : s->most;
        }
    }
    dtrain_server_destroy(server);
    return DTRAIN_OK;
}

TEST(a_synchronous_server_keeps_shares_of_the_mean)
{
    static const struct {
        dtrain_compression kind;
        double least;
    } some[] = {{DTRAIN_COMPRESS_TOPK, 40}, {DTRAIN_COMPRESS_SIGN, 57}, {DTRAIN_COMPRESS_INT8, 59}};
    for (int k = 0; k < 3; k++) {
        synchronous s = {some[k].kind, 0, 0};
        CHECK_EQ(dtrain_run_threads(3, synchronous_body, &s, NULL), DTRAIN_OK);
        if (!(s.most <= 61 && s.least >= some[k].least))
            TEST_FAIL("kind %d: elements got %g to %g in 60 steps of 1", (int)some[k].kind, s.least, s.most);
    }
}

/* A worker says that it brings a large weight, and is lost before it sends a piece. */
typedef struct left_out {
    int server;
    double at, before, most;
} left_out;

static dtrain_status left_out_body(dtrain_comm *world, void *user)
{
    left_out *s = (left_out *)user;
    enum { LOST_AT = 20, ALL = 40 };
    int rank = dtrain_comm_rank(world);
    float *w = (float *)calloc(3 * N, sizeof *w), *g = w + N, *sum = g + N;
    dtrain_param table;
    dtrain_compress_desc c;
    dtrain_server_desc d;
    dtrain_server *server = NULL;
    double total = 0;
    memset(&table, 0, sizeof table), memset(&d, 0, sizeof d), memset(&c, 0, sizeof c);
    c.topk.schedule.ratio = 0.1;
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = N;
    table.data = w;
    table.grad = g;
    d.compress = &c;
    d.server = s->server;
    CHECK_EQ(dtrain_server_create(&server, world, &table, 1, &d), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int step = 0; step < ALL; step++) {
        if (step == LOST_AT && rank == 2) {
            CHECK_EQ(dtrain__server_ask_total(server, 1600, &total), DTRAIN_OK);
            CHECK(total == 1632);
            break;
        }
        for (int i = 0; i < N; i++)
            g[i] = 16;
        CHECK_EQ(aggregator.aggregate(aggregator.self, &table, 1, 16, &total), DTRAIN_OK);
        CHECK(total == (step < LOST_AT ? 48 : step == LOST_AT ? 1632 : 32));
        for (int i = 0; i < N; i++)
            sum[i] += g[i];
        if (step == LOST_AT - 1 && rank == 0)
            s->before = sum_of(g);
        if (step == LOST_AT && rank == 0)
            s->at = sum_of(g);
    }
    for (int i = 0; i < N && rank == 0; i++)
        s->most = (double)sum[i] > s->most ? (double)sum[i] : s->most;
    dtrain_server_destroy(server);
    free(w);
    return DTRAIN_OK;
}

TEST(a_worker_lost_after_it_told_its_weight_makes_no_residual_count_more)
{
    for (int at = 0; at < 2; at++) {
        left_out s;
        memset(&s, 0, sizeof s);
        s.server = at;
        CHECK_EQ(dtrain_run_threads(3, left_out_body, &s, NULL), DTRAIN_OK);
        if (!(s.at < s.before * 1.2 && s.most <= 41))
            TEST_FAIL("%g in the step before, %g when it was lost; one element got %g in 40 steps of 1", s.before, s.at,
                      s.most);
    }
}

static dtrain_status refused_by_server(dtrain_comm *world, void *user)
{
    float *w = (float *)calloc(2 * N, sizeof *w);
    dtrain_param table;
    dtrain_compress_desc c = compress_of(4);
    dtrain_server_desc d;
    dtrain_server *server = NULL;
    double total;
    (void)user;
    memset(&table, 0, sizeof table), memset(&d, 0, sizeof d);
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = N;
    table.data = w;
    table.grad = w + N;
    d.compress = &c;
    CHECK_EQ(dtrain_server_create(&server, world, &table, 1, &d), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    uint64_t hashes[3] = {0, 0, 0};
    for (int i = 0; i < 3; i++) {
        dtrain_pieces list = dtrain_aggregator_pieces(&aggregator);
        for (int k = 0; k < N && i < 2; k++)
            w[N + k] = (float)(k % 5 + 1);
        if (i < 2)
            CHECK_EQ(aggregator.aggregate(aggregator.self, &table, 1, i == 0 ? 1 : (double)NAN, &total),
                     i == 0 ? DTRAIN_OK : DTRAIN_ERR_INVALID);
        else
            aggregator.drop(aggregator.self);
        CHECK_EQ(dtrain_pieces_each(&list, 1, 2, dtrain_comm_rank(world), visit, &hashes[i]), DTRAIN_OK);
    }
    CHECK(hashes[0] == hashes[1] && hashes[0] == hashes[2]);
    dtrain_server_destroy(server);
    free(w);
    return DTRAIN_OK;
}

TEST(a_drop_after_a_step_that_a_server_refused_leaves_the_step_before_it)
{
    CHECK_EQ(dtrain_run_threads(2, refused_by_server, NULL, NULL), DTRAIN_OK);
}

/* ---- local SGD ---- */

enum { LOCAL = 3000 };

typedef struct local_run {
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
    int astray;    /* the step in which rank 1's weights become NaN; -1: none */
    int back;      /* 1: goes back to step 6 from step 9 */
    int publishes; /* 1: other weights at step 6 */
    const char *directory;
    float w[3][LOCAL];
} local_run;

static dtrain_status local_save_or_load(dtrain_comm *world, const local_run *run, const dtrain_param *table,
                                        dtrain_local_sgd *local, int load)
{
    dtrain_checkpoint *ckpt;
    dtrain_checkpoint_desc d;
    dtrain_checkpoint_state q;
    dtrain_pieces lists[2];
    lists[0] = dtrain_local_sgd_pieces(local);
    lists[1] = dtrain_params_pieces(table, 1, NULL);
    memset(&d, 0, sizeof d), memset(&q, 0, sizeof q);
    d.directory = run->directory;
    d.no_sync = 1;
    q.lists = lists;
    q.list_count = 2;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &d), DTRAIN_OK);
    dtrain_status status = load ? dtrain_checkpoint_load(ckpt, &q, NULL, NULL) : dtrain_checkpoint_save(ckpt, &q);
    dtrain_checkpoint_destroy(ckpt);
    return status;
}

static dtrain_status local_body(dtrain_comm *world, void *user)
{
    local_run *run = (local_run *)user;
    int rank = dtrain_comm_rank(world), back = run->back;
    float *w = run->w[rank], *g = (float *)calloc(LOCAL, sizeof *g);
    dtrain_param table;
    dtrain_local_sgd *local = NULL;
    memset(&table, 0, sizeof table), memset(w, 0, sizeof run->w[rank]);
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = LOCAL;
    table.data = w;
    table.grad = g;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, &table, 1, &run->desc), DTRAIN_OK);
    for (int step = 0; step < 12; step++) {
        if (step == 6) {
            CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
            if (run->directory != NULL)
                CHECK_EQ(local_save_or_load(world, run, &table, local, 0), DTRAIN_OK);
            for (int i = 0; run->publishes && i < LOCAL; i++)
                w[i] = 100;
            if (run->publishes)
                CHECK_EQ(dtrain_local_sgd_publish(local), DTRAIN_OK);
        }
        for (int i = 0; i < LOCAL; i++)
            w[i] += (float)(rank + 1) * (float)(1 + i % 3);
        if (step == run->astray && rank == 1)
            w[7] = NAN;
        CHECK_EQ(dtrain_local_sgd_step(local, run->compress.kind != 0 && step % 5 == 4 ? 0.25 : 1), DTRAIN_OK);
        if (step == 8 && back) {
            back = 0;
            CHECK_EQ(local_save_or_load(world, run, &table, local, 1), DTRAIN_OK);
            step = 5;
            /* the save of step 6 is not made again */
            for (step = 6; step < 12; step++) {
                for (int i = 0; i < LOCAL; i++)
                    w[i] += (float)(rank + 1) * (float)(1 + i % 3);
                CHECK_EQ(dtrain_local_sgd_step(local, run->compress.kind != 0 && step % 5 == 4 ? 0.25 : 1), DTRAIN_OK);
            }
        }
    }
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    free(g);
    return DTRAIN_OK;
}

static local_run *local_of(int averages)
{
    local_run *run = (local_run *)calloc(1, sizeof *run);
    run->desc.steps = 1;
    run->desc.blocking = 1;
    run->desc.window_ms = -1;
    run->astray = -1;
    if (averages) {
        run->desc.outer_lr = 1;
        run->desc.no_momentum = 1;
    }
    return run;
}

TEST(a_member_whose_weights_are_not_finite_costs_its_own_work_alone)
{
    for (int averages = 0; averages < 2; averages++) {
        local_run *run = local_of(averages);
        run->astray = 4;
        CHECK_EQ(dtrain_run_threads(3, local_body, run, NULL), DTRAIN_OK);
        for (int rank = 0; rank < 3; rank++)
            for (int i = 0; i < LOCAL; i++) /* the mean of 1, 2 and 3 is that of 1 and 3 */
                CHECK(averages ? run->w[rank][i] == 24.0f * (float)(1 + i % 3) : isfinite(run->w[rank][i]));
        free(run);
    }
}

TEST(published_weights_are_where_rounds_go_on_from)
{
    local_run *run = local_of(1);
    run->publishes = 1;
    CHECK_EQ(dtrain_run_threads(3, local_body, run, NULL), DTRAIN_OK);
    for (int rank = 0; rank < 3; rank++)
        for (int i = 0; i < LOCAL; i++)
            CHECK(run->w[rank][i] == 100.0f + 12.0f * (float)(1 + i % 3));
    free(run);
}

/* Both members go the same way in each round, so that the momentum would grow to ten times that. Later they go less
 * far.
 */
static dtrain_status grows_body(dtrain_comm *world, void *user)
{
    float *w = (float *)calloc(2 * LOCAL, sizeof *w);
    dtrain_param table;
    dtrain_local_sgd_desc d;
    dtrain_local_sgd *local = NULL;
    int bad = 0;
    memset(&table, 0, sizeof table), memset(&d, 0, sizeof d);
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = LOCAL;
    table.data = w;
    table.grad = w + LOCAL;
    d.steps = 1;
    d.blocking = 1;
    d.window_ms = -1;
    d.outer_lr = 1e-6f;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, &table, 1, &d), DTRAIN_OK);
    for (int step = 0; step < 12; step++) {
        for (int i = 0; i < LOCAL; i++)
            w[i] += step < 8 ? 1e38f : 1.0f;
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        bad += unbounded(world, dtrain_local_sgd_pieces(local));
    }
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    __atomic_add_fetch((int *)user, bad, __ATOMIC_SEQ_CST);
    CHECK(isfinite(w[0]) && w[0] > 1e32f);
    dtrain_local_sgd_destroy(local);
    free(w);
    return DTRAIN_OK;
}

TEST(the_outer_momentum_stays_finite_and_rounds_go_on)
{
    int bad = 0;
    CHECK_EQ(dtrain_run_threads(2, grows_body, &bad, NULL), DTRAIN_OK);
    CHECK_EQ(bad, 0);
}

TEST(local_sgd_goes_back_to_a_checkpoint_while_rounds_are_under_way)
{
    static const dtrain_compression some[] = {DTRAIN_COMPRESS_DEFAULT, DTRAIN_COMPRESS_SIGN, DTRAIN_COMPRESS_INT8};
    for (int k = 0; k < 3; k++)
        for (int server = 0; server < 2; server++) {
            local_run *runs[2];
            for (int back = 0; back < 2; back++) {
                local_run *run = runs[back] = local_of(0);
                run->desc.steps = 2;
                run->desc.overlap = 1;
                run->desc.through_server = server;
                run->compress.kind = some[k];
                run->desc.compress = k > 0 ? &run->compress : NULL;
                run->back = back;
                run->directory = fresh("local");
                CHECK_EQ(dtrain_run_threads(3, local_body, run, NULL), DTRAIN_OK);
            }
            if (memcmp(runs[0]->w, runs[1]->w, sizeof runs[0]->w) != 0)
                TEST_FAIL("compression %d%s: other weights than those of a run that did not go back", (int)some[k],
                          server ? ", through a server" : "");
            free(runs[0]);
            free(runs[1]);
        }
}

/* ---- members at different steps ---- */

/* Rank 0 has handed in, and the others are a step behind, when all do what the way says. Each step adds 1, and a round
 * averages. */
enum { LOADS, LOADS_A_MODEL, LOADS_LENIENTLY, PUBLISHES };

typedef struct apart {
    int way, server;
    int64_t window_ms;
    dtrain_compression kind; /* DEFAULT: none */
    const char *directory;
    char model[200];
    float w[3][LOCAL];
} apart;

static dtrain_param table_of(float *w, float *g, size_t count)
{
    dtrain_param table;
    memset(&table, 0, sizeof table);
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = count;
    table.data = w;
    table.grad = g;
    return table;
}

static void add_to(float *w, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        w[i] += value;
}

static dtrain_status apart_body(dtrain_comm *world, void *user)
{
    apart *a = (apart *)user;
    int rank = dtrain_comm_rank(world);
    float *w = a->w[rank], *g = (float *)calloc(LOCAL, sizeof *g);
    dtrain_param table = table_of(w, g, LOCAL);
    dtrain_compress_desc c;
    dtrain_local_sgd_desc d;
    dtrain_local_sgd *local = NULL;
    dtrain_checkpoint_desc into;
    dtrain_checkpoint_load_desc how;
    dtrain_checkpoint_state q;
    dtrain_checkpoint *ckpt;
    dtrain_pieces lists[2];
    memset(&c, 0, sizeof c), memset(&d, 0, sizeof d), memset(&into, 0, sizeof into), memset(&how, 0, sizeof how),
        memset(&q, 0, sizeof q);
    c.kind = a->kind;
    d.compress = a->kind != DTRAIN_COMPRESS_DEFAULT ? &c : NULL;
    d.steps = 2;
    d.overlap = 1;
    d.blocking = a->window_ms != 1; /* with nobody left out, results do not depend on time */
    d.window_ms = a->window_ms;
    d.outer_lr = 1;
    d.no_momentum = 1;
    d.through_server = a->server;
    memset(w, 0, sizeof a->w[rank]);
    add_to(w, LOCAL, 1);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, &table, 1, &d), DTRAIN_OK);
    lists[0] = dtrain_params_pieces(&table, 1, NULL);
    lists[1] = dtrain_local_sgd_pieces(local);
    into.directory = a->directory;
    into.no_sync = 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &into), DTRAIN_OK);
    q.lists = lists;
    q.list_count = a->way == LOADS ? 2 : 1;
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &q), DTRAIN_OK);
    size_t shape[1] = {LOCAL};
    dtrain_safetensors_source source = {"w", 0, DTRAIN_F32, 1, shape, w, NULL, NULL};
    if (rank == 0 && a->way == LOADS_A_MODEL)
        CHECK_EQ(dtrain_safetensors_save(a->model, &source, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    for (int step = 0; step < (rank == 0 ? 2 : 1); step++) {
        add_to(w, LOCAL, 1);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    if (rank == 0 && a->window_ms < 0)
        usleep(20000); /* the others hear that it has handed in */
    q.list_count = 2;
    how.lenient = a->way != LOADS;
    how.path = a->way == LOADS_A_MODEL ? a->model : NULL;
    if (a->way == PUBLISHES) /* weights that the program has read */
        memset(w, 0, sizeof a->w[rank]), add_to(w, LOCAL, rank == 0 ? 1 : 50);
    CHECK_EQ(a->way == PUBLISHES ? dtrain_local_sgd_publish(local) : dtrain_checkpoint_load(ckpt, &q, &how, NULL),
             DTRAIN_OK);
    for (int step = 0; step < 4; step++) {
        add_to(w, LOCAL, 1);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_get_stats(local).left, dtrain_comm_size(world));
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    dtrain_local_sgd_destroy(local);
    free(g);
    return DTRAIN_OK;
}

TEST(members_at_different_steps_load_and_publish_at_once_and_stay_equal)
{
    static const char *const does[] = {"a load", "a load of a model", "a lenient load", "publishing"};
    static const int64_t windows[] = {-1, 1, 600000};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 20000;
    for (int way = LOADS; way <= PUBLISHES; way++)
        for (int window = 0; window < 3; window++)
            for (int server = 0; server < 2; server++)
                for (int kind = 0; kind < 2; kind++) {
                    apart *a = (apart *)calloc(1, sizeof *a);
                    a->way = way;
                    a->window_ms = windows[window];
                    a->server = server;
                    a->kind = kind ? DTRAIN_COMPRESS_INT8 : DTRAIN_COMPRESS_DEFAULT;
                    a->directory = fresh("apart");
                    snprintf(a->model, sizeof a->model, "%s/model.safetensors", base);
                    CHECK_EQ(dtrain_run_threads(3, apart_body, a, &desc), DTRAIN_OK);
                    for (int rank = 1; rank < 3; rank++)
                        CHECK(memcmp(a->w[0], a->w[rank], sizeof a->w[0]) == 0);
                    /* from 1, by hand: rounds 3 and 4.5; after publishing, rank 0 is still one step ahead */
                    double expected = way == PUBLISHES ? 13.0 / 3 : 4.5;
                    if (windows[window] != 1 && !(fabs((double)a->w[0][7] - expected) < 0.03))
                        TEST_FAIL("%s, window %d ms%s%s: an element is %g, expected %g", does[way],
                                  (int)windows[window], server ? ", server" : "", kind ? ", int8" : "",
                                  (double)a->w[0][7], expected);
                    free(a);
                }
}

/* Members publish and make two steps of 1, again and again; a round opens as soon as one has handed in. */
enum { PUBLISHERS = 5, WIDE_LOCAL = 100000 };

static dtrain_status publishers_body(dtrain_comm *world, void *user)
{
    float *w = (float *)calloc(WIDE_LOCAL, sizeof *w), *g = (float *)calloc(WIDE_LOCAL, sizeof *g);
    dtrain_param table = table_of(w, g, WIDE_LOCAL);
    dtrain_local_sgd_desc d;
    dtrain_local_sgd *local = NULL;
    memset(&d, 0, sizeof d);
    d.steps = 1;
    d.window_ms = 1;
    d.blocking = 1;
    d.no_broadcast = *(int *)user;
    d.no_momentum = 1;
    d.outer_lr = 1;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, &table, 1, &d), DTRAIN_OK);
    for (int k = 0; k < 40; k++) {
        for (int i = 0; i < WIDE_LOCAL; i++)
            w[i] = (float)(k + 1);
        CHECK_EQ(dtrain_local_sgd_publish(local), DTRAIN_OK);
        for (int step = 0; step < 2; step++) {
            add_to(w, WIDE_LOCAL, 1);
            CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_check_equal(world, w, WIDE_LOCAL, DTRAIN_F32), DTRAIN_OK);
    }
    dtrain_local_sgd_destroy(local);
    free(w);
    free(g);
    return DTRAIN_OK;
}

TEST(no_round_is_made_before_every_member_has_published)
{
    for (int no_broadcast = 0; no_broadcast < 2; no_broadcast++)
        CHECK_EQ(dtrain_run_threads(PUBLISHERS, publishers_body, &no_broadcast, NULL), DTRAIN_OK);
}

/* What a save would keep of a member that is a step ahead, and of one that has handed in nothing. */
typedef struct kept_round {
    uint64_t rounds[2];
    float outer[2];
} kept_round;

static void visit_round(void *user, const dtrain_piece *piece)
{
    kept_round *k = (kept_round *)user;
    if (strncmp(piece->name, "counters", 8) == 0)
        k->rounds[0] = ((const uint64_t *)piece->data)[1];
    if (strncmp(piece->name, "outer", 5) == 0)
        k->outer[0] = *(const float *)piece->data;
}

static dtrain_status synced_body(dtrain_comm *world, void *user)
{
    kept_round *all = (kept_round *)user, mine;
    int rank = dtrain_comm_rank(world);
    float w[64] = {0}, g[64] = {0};
    dtrain_param table = table_of(w, g, 64);
    dtrain_local_sgd_desc d;
    dtrain_local_sgd *local = NULL;
    memset(&d, 0, sizeof d);
    d.steps = 2;
    d.window_ms = 5;
    d.no_momentum = 1;
    d.outer_lr = 1;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, &table, 1, &d), DTRAIN_OK);
    for (int step = 0; step < (rank == 0 ? 2 : 1); step++) {
        add_to(w, 64, 1);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_pieces list = dtrain_local_sgd_pieces(local);
    CHECK_EQ(dtrain_pieces_each(&list, 1, 2, rank, visit_round, &mine), DTRAIN_OK);
    all->rounds[rank] = mine.rounds[0];
    all->outer[rank] = mine.outer[0];
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    return DTRAIN_OK;
}

TEST(all_members_keep_the_same_round_once_sync_has_returned_on_all)
{
    for (int turn = 0; turn < 60; turn++) {
        kept_round all;
        CHECK_EQ(dtrain_run_threads(2, synced_body, &all, NULL), DTRAIN_OK);
        CHECK(all.rounds[0] == 1 && all.rounds[1] == 1 && all.outer[0] == 2 && all.outer[1] == 2);
    }
}

/* Rank 2 leaves. The others save, and go back to that while rank 0 has handed in. */
static dtrain_status left_body(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    float w[64], g[64];
    dtrain_param table = table_of(w, g, 64);
    dtrain_comm *pair = NULL;
    dtrain_local_sgd_desc d;
    dtrain_local_sgd *local = NULL;
    dtrain_checkpoint_desc into;
    dtrain_checkpoint_state q;
    dtrain_checkpoint *ckpt;
    dtrain_pieces lists[2];
    memset(&d, 0, sizeof d), memset(&into, 0, sizeof into), memset(&q, 0, sizeof q), memset(w, 0, sizeof w);
    d.steps = 2;
    d.window_ms = -1;
    d.no_momentum = 1;
    d.outer_lr = 1;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, &table, 1, &d), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank == 2, rank, &pair), DTRAIN_OK);
    if (rank < 2) {
        while (dtrain_local_sgd_get_stats(local).left == 3)
            usleep(1000);
        lists[0] = dtrain_local_sgd_pieces(local);
        lists[1] = dtrain_params_pieces(&table, 1, NULL);
        into.directory = *(const char **)user;
        into.no_sync = 1;
        q.lists = lists;
        q.list_count = 2;
        CHECK_EQ(dtrain_checkpoint_create(&ckpt, pair, &into), DTRAIN_OK);
        CHECK_EQ(dtrain_checkpoint_save(ckpt, &q), DTRAIN_OK);
        for (int step = 0; step < (rank == 0 ? 2 : 1); step++) {
            add_to(w, 64, 1);
            CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_checkpoint_load(ckpt, &q, NULL, NULL), DTRAIN_OK);
        add_to(w, 64, 1);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
        CHECK(w[0] == 1 && w[63] == 1);
        CHECK_EQ(dtrain_barrier(pair), DTRAIN_OK);
        dtrain_checkpoint_destroy(ckpt);
    }
    dtrain_local_sgd_destroy(local);
    dtrain_comm_destroy(pair);
    return DTRAIN_OK;
}

TEST(members_that_are_left_go_back_to_a_checkpoint)
{
    const char *directory = fresh("left");
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 5000;
    CHECK_EQ(dtrain_run_threads(3, left_body, &directory, &desc), DTRAIN_OK);
}

/* ---- loads that fail ---- */

static int broken; /* 1: a rank has waited in vain for another, so that its FSDP is broken */

/* Waits until a rank has set the flag: longer than a group waits. */
static void await(int *flag, int sets)
{
    if (sets)
        __atomic_store_n(flag, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(flag, __ATOMIC_SEQ_CST) == 0)
        usleep(1000);
}

/* Three steps of weight 32 in which every gradient is 1, a load that fails, and one of weight 1. */
enum { NO_LOAD, BROKEN_LIST, DAMAGED_FILE };

typedef struct failing {
    int way;
    const char *directory;
    double most, unit; /* of mean gradients in the last step; after the load */
    uint64_t steps, rounds;
    dtrain_status status;
} failing;

static void visit_failing(void *user, const dtrain_piece *piece)
{
    failing *f = (failing *)user;
    if (strncmp(piece->name, "unit.", 5) == 0)
        f->unit = *(const double *)piece->data;
    if (strncmp(piece->name, "counters", 8) == 0) {
        f->steps = ((const uint64_t *)piece->data)[0];
        f->rounds = ((const uint64_t *)piece->data)[1];
    }
}

/* Flips the last byte of the largest file. */
static void damage(const char *directory)
{
    char command[600];
    snprintf(command, sizeof command,
             "f=$(ls -S %s/step-*/rank-* | head -n 1) && n=$(wc -c <\"$f\") && "
             "printf '\\377' | dd of=\"$f\" bs=1 seek=$((n - 1)) conv=notrunc 2>/dev/null",
             directory);
    CHECK_EQ(system(command), 0);
}

static dtrain_status failing_body(dtrain_comm *world, void *user)
{
    failing *all = (failing *)user, mine = *all;
    int rank = dtrain_comm_rank(world);
    static float w[2][3][2000], g[2][3][2000], big[2][50000];
    dtrain_param table[3];
    dtrain_compress_desc c = compress_of(0);
    dtrain_fsdp_desc fd;
    dtrain_ddp_desc dd;
    dtrain_local_sgd_desc ld;
    dtrain_checkpoint_desc into;
    dtrain_checkpoint_state q;
    dtrain_checkpoint *ckpt;
    dtrain_fsdp *fsdp;
    dtrain_ddp *ddp;
    dtrain_local_sgd *local;
    dtrain_pieces lists[4];
    dtrain_piece own;
    memset(&fd, 0, sizeof fd), memset(&dd, 0, sizeof dd), memset(&ld, 0, sizeof ld), memset(&into, 0, sizeof into),
        memset(&q, 0, sizeof q), memset(&own, 0, sizeof own), memset(lists, 0, sizeof lists);
    for (int i = 0; i < 3; i++) {
        table[i] = table_of(w[rank][i], g[rank][i], 2000);
        table[i].name = i == 0 ? "a" : i == 1 ? "b" : "c";
    }
    c.topk.schedule.stage_steps = 0;
    c.topk.schedule.ratio = 0.01;
    fd.strategy = DTRAIN_DDP;
    fd.optimizer.kind = DTRAIN_SGD;
    dd.compress = &c;
    ld.steps = 2;
    ld.blocking = 1;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, &table[0], 1, &fd), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, &table[1], 1, &dd), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, &table[2], 1, &ld), DTRAIN_OK);
    own.name = "z"; /* the last that is read */
    own.dtype = DTRAIN_F32;
    own.ndim = 1;
    own.shape[0] = own.count = 50000;
    own.copies = 2;
    own.copy = rank;
    own.data = big[rank];
    lists[0] = dtrain_ddp_pieces(ddp);
    lists[1] = dtrain_local_sgd_pieces(local);
    lists[2] = dtrain_fsdp_pieces(fsdp);
    lists[3].pieces = &own;
    lists[3].count = 1;
    into.directory = all->directory;
    into.no_sync = 1;
    q.lists = lists;
    q.list_count = 4;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &into), DTRAIN_OK);
    for (int step = 0; step < 4; step++) {
        float weight = step < 3 ? 32.0f : 1.0f;
        if (step == 3) {
            CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
            CHECK_EQ(dtrain_checkpoint_save(ckpt, &q), DTRAIN_OK);
            if (all->way == BROKEN_LIST) { /* rank 0 does not come */
                CHECK_EQ(dtrain_fsdp_begin(fsdp, 1, 1), DTRAIN_OK);
                if (rank == 1)
                    CHECK(dtrain_fsdp_step(fsdp, 0.1f) != DTRAIN_OK);
                await(&broken, rank == 1);
            }
            if (all->way == DAMAGED_FILE && rank == 0)
                damage(all->directory);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            mine.status = all->way == NO_LOAD ? DTRAIN_OK : dtrain_checkpoint_load(ckpt, &q, NULL, NULL);
            CHECK_EQ(dtrain_pieces_each(lists, 2, 2, rank, visit_failing, &mine), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_ddp_begin(ddp, 1, (double)weight), DTRAIN_OK);
        memset(g[rank][1], 0, sizeof g[rank][1]);
        add_to(g[rank][1], 2000, weight);
        CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    for (int i = 0; i < 2000; i++)
        mine.most = (double)g[rank][1][i] > mine.most ? (double)g[rank][1][i] : mine.most;
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0)
        *all = mine;
    dtrain_checkpoint_destroy(ckpt);
    dtrain_fsdp_destroy(fsdp);
    dtrain_ddp_destroy(ddp);
    dtrain_local_sgd_destroy(local);
    return DTRAIN_OK;
}

TEST(a_load_that_fails_leaves_what_is_kept_or_drops_it)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 2000;
    for (int way = NO_LOAD; way <= DAMAGED_FILE; way++) {
        broken = 0;
        failing f = {way, fresh("failing"), 0, 0, 0, 0, DTRAIN_OK};
        CHECK_EQ(dtrain_run_threads(2, failing_body, &f, &desc), DTRAIN_OK);
        CHECK((f.status == DTRAIN_OK) == (way == NO_LOAD));
        CHECK(way != DAMAGED_FILE || f.status == DTRAIN_ERR_CORRUPT);
        int kept = way != DAMAGED_FILE; /* else reading has begun */
        if (!(f.most <= 4.001) || f.unit != (kept ? 64 : 0) || f.steps != (kept ? 3u : 0u) ||
            f.rounds != (kept ? 1u : 0u))
            TEST_FAIL("way %d: a mean gradient of %g, expected at most 4; sums of weight %g, %d steps, %d rounds", way,
                      f.most, f.unit, (int)f.steps, (int)f.rounds);
    }
}

/* A list of ranks 0 and 1 is broken on rank 1; one of all ranks is not. */
static dtrain_status broken_body(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), n = 0;
    static float w[3][2][2000], g[3][2][2000];
    dtrain_param table[2];
    dtrain_comm *part = NULL;
    dtrain_fsdp_desc d;
    dtrain_fsdp *bad = NULL, *good = NULL;
    dtrain_checkpoint_desc into;
    dtrain_checkpoint_state q;
    dtrain_checkpoint *ckpt;
    dtrain_pieces lists[2];
    memset(&d, 0, sizeof d), memset(&into, 0, sizeof into), memset(&q, 0, sizeof q);
    for (int i = 0; i < 2; i++) {
        table[i] = table_of(w[rank][i], g[rank][i], 2000);
        table[i].name = i == 0 ? "a" : "b";
    }
    d.strategy = DTRAIN_DDP;
    d.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_comm_split(world, rank == 2, rank, &part), DTRAIN_OK);
    if (rank < 2) {
        CHECK_EQ(dtrain_fsdp_create(&bad, part, &table[0], 1, &d), DTRAIN_OK);
        lists[n++] = dtrain_fsdp_pieces(bad);
    }
    CHECK_EQ(dtrain_fsdp_create(&good, world, &table[1], 1, &d), DTRAIN_OK);
    lists[n++] = dtrain_fsdp_pieces(good);
    into.directory = *(const char **)user;
    into.no_sync = 1;
    q.lists = lists;
    q.list_count = (size_t)n;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &into), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &q), DTRAIN_OK);
    if (rank < 2)
        CHECK_EQ(dtrain_fsdp_begin(bad, 1, 1), DTRAIN_OK);
    if (rank == 1)
        CHECK(dtrain_fsdp_step(bad, 0.1f) != DTRAIN_OK);
    await(&broken, rank == 1);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    CHECK(dtrain_checkpoint_load(ckpt, &q, NULL, NULL) != DTRAIN_OK);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    CHECK((double)(ended.tv_sec - began.tv_sec) + 1e-9 * (double)(ended.tv_nsec - began.tv_nsec) < 1.5);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_gather(good, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_reduce(good, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_step(good, 0.1f), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    dtrain_fsdp_destroy(bad);
    dtrain_fsdp_destroy(good);
    dtrain_comm_destroy(part);
    return DTRAIN_OK;
}

TEST(a_load_fails_at_once_and_breaks_no_other_list)
{
    const char *directory = fresh("broken");
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 3000;
    broken = 0;
    CHECK_EQ(dtrain_run_threads(3, broken_body, &directory, &desc), DTRAIN_OK);
}

/* Goes on from a checkpoint whose residuals are of another shape, after steps of another weight. */
static dtrain_status reshaped_body(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    static float w[2][N], g[2][N];
    for (int again = 0; again < 2; again++) {
        float weight = again ? 512.0f : 1.0f, most = 0;
        size_t count = again ? 3000 : N;
        dtrain_param table = table_of(w[rank], g[rank], count);
        dtrain_compress_desc c = compress_of(0);
        dtrain_ddp_desc d;
        dtrain_ddp *ddp;
        dtrain_checkpoint_desc into;
        dtrain_checkpoint_load_desc how;
        dtrain_checkpoint_state q;
        dtrain_checkpoint *ckpt;
        memset(&d, 0, sizeof d), memset(&into, 0, sizeof into), memset(&how, 0, sizeof how), memset(&q, 0, sizeof q);
        c.topk.schedule.stage_steps = 0;
        c.topk.schedule.ratio = 0.01;
        d.compress = &c;
        how.lenient = 1;
        CHECK_EQ(dtrain_ddp_create(&ddp, world, &table, 1, &d), DTRAIN_OK);
        dtrain_pieces list = dtrain_ddp_pieces(ddp);
        into.directory = *(const char **)user;
        into.no_sync = 1;
        q.lists = &list;
        q.list_count = 1;
        CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &into), DTRAIN_OK);
        for (int step = 0; step < 4; step++) {
            if (step == 3)
                CHECK_EQ(again ? dtrain_checkpoint_load(ckpt, &q, &how, NULL) : dtrain_checkpoint_save(ckpt, &q),
                         DTRAIN_OK);
            CHECK_EQ(dtrain_ddp_begin(ddp, 1, (double)weight), DTRAIN_OK);
            memset(g[rank], 0, sizeof g[rank]);
            add_to(g[rank], count, weight);
            CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_OK);
            CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
        }
        for (size_t i = 0; i < count; i++)
            most = g[rank][i] > most ? g[rank][i] : most;
        CHECK(most > 0 && most <= 4.001f);
        dtrain_checkpoint_destroy(ckpt);
        dtrain_ddp_destroy(ddp);
    }
    return DTRAIN_OK;
}

TEST(residuals_that_do_not_fit_take_no_weight_from_the_checkpoint)
{
    const char *directory = fresh("reshaped");
    CHECK_EQ(dtrain_run_threads(2, reshaped_body, &directory, NULL), DTRAIN_OK);
}
