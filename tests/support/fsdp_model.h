/* A small model with every kind of parameter, a step of it computed by one rank with plain loops, and the same step
 * through FSDP. What tests vary is in `trial`; a rank's body is trial_rank(). */
#ifndef DTRAIN_TEST_FSDP_MODEL_H
#define DTRAIN_TEST_FSDP_MODEL_H
#include <math.h>

#define STEPS 3
#define MOST_MICRO 16

/* Odd sizes, a parameter smaller than most worlds, a stacked one, one frozen, one tied. */
enum { TOKENS, SCALAR, TWO, LAYERS, BIAS, FROZEN, SEVEN, LAST, PARAMS };
#define L 3
#define UNITS (L + 2)

static size_t model_describe(dtrain_param *table)
{
    memset(table, 0, PARAMS * sizeof *table);
    dtrain_param params[PARAMS] = {
        {"tokens", DTRAIN_F32, {13, 5}, 0, 0, 0, 0, 0, 1, NULL, NULL, NULL, NULL, 0},
        {"scalar", DTRAIN_F32, {1}, 0, 0, 0, 1, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"two", DTRAIN_F32, {2}, 0, 0, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"layers", DTRAIN_F32, {L, 7, 11}, 0, 1, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"bias", DTRAIN_F32, {L, 3}, 0, 1, 1, 1, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"frozen", DTRAIN_F32, {9}, 0, 0, 2, 0, 1, 0, NULL, NULL, NULL, NULL, 0},
        {"seven", DTRAIN_F32, {7}, 0, 0, 3, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
        {"last", DTRAIN_F32, {8191}, 0, 0, L + 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    };
    memcpy(table, params, sizeof params);
    return PARAMS;
}

static size_t model_elements(const dtrain_param *table, size_t *begin)
{
    size_t all = 0;
    for (int i = 0; i < PARAMS; i++) {
        begin[i] = all;
        all += dtrain_param_elements(&table[i]);
    }
    return all;
}

/* Between -2 and 2, from all bits of the key. */
static float noise(uint64_t key)
{
    key = (key ^ key >> 31) * 0x7fb5d329728ea185u;
    key = (key ^ key >> 27) * 0x81dadef4bc2dd44du;
    return (float)((int64_t)(key >> 40) - 8388608) * 0x1p-22f;
}

static float first_value(size_t element)
{
    return noise(5000000000u + element);
}

/* The gradient of element `e` in micro-batch j of a step, where its weight is w. */
static float gradient(int step, int j, size_t e, float w)
{
    return noise(((uint64_t)step * 64 + (uint64_t)j) * 100000 + e) + 0.125f * w;
}

/* ---- the reference ---- */

static float tree(const float *x, int n)
{
    int left = 1;
    if (n == 1)
        return x[0];
    while (2 * left < n)
        left *= 2;
    return tree(x, left) + tree(x + left, n - left);
}

/* The square of a float is exact in a double; what a sum rounds off is summed apart. Source: Knuth, TAOCP 2, 4.2.2. */
static void add_square(double *sum, double *rest, float x)
{
    double square = (double)x * (double)x, more = *sum + square, back = more - *sum;
    *rest += (*sum - (more - back)) + (square - back);
    *sum = more;
}

typedef struct trial {
    dtrain_fsdp_desc desc;
    int ranks;
    int micro;               /* micro-batches of a step, all ranks together */
    int swapped;             /* 1: units are reduced two by two, the lower one first */
    unsigned unused;         /* bit u: unit u is left out in micro-batch 1; with bit 31 in all of them */
    int own_data, own_grads; /* 1: memory is the caller's */
    float clip;
    float *expected;
    double norms[STEPS];
} trial;

static int is_used(const trial *t, int j, int unit)
{
    return !((t->unused >> unit & 1) && (j == 1 || t->unused >> 31));
}

static int unit_of(const dtrain_param *table, const size_t *begin, int p, size_t e)
{
    size_t layer = dtrain_param_elements(&table[p]) / table[p].shape[0];
    return table[p].unit + (table[p].stacked ? (int)((e - begin[p]) / layer) : 0);
}

static float rounded(float x, dtrain_dtype dtype)
{
    uint16_t narrow;
    if (dtype == 0 || dtype == DTRAIN_F32)
        return x;
    CHECK_EQ(dtrain_convert(&x, DTRAIN_F32, &narrow, dtype, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_convert(&narrow, dtype, &x, DTRAIN_F32, 1), DTRAIN_OK);
    return x;
}

/* The sum over a step's micro-batches: over the ranks of a copy, over copies, over rounds. */
static float summed(const trial *t, const float *x)
{
    int shards = t->desc.strategy == DTRAIN_DDP       ? 1
                 : t->desc.strategy == DTRAIN_HYBRID_SHARD ? t->desc.shard_size
                                                           : t->ranks;
    dtrain_dtype dtype = t->desc.reduce_dtype;
    float rounds[MOST_MICRO], copies[MOST_MICRO], narrow[MOST_MICRO];
    if (t->desc.keep_full_grads) { /* contiguous blocks are folded on their ranks first */
        for (int rank = 0; rank < t->ranks; rank++) {
            size_t low, mine = cut_of((size_t)t->micro, t->ranks, rank, &low);
            narrow[rank] = mine > 0 ? tree(x + low, (int)mine) : -0.0f;
        }
        return tree(narrow, t->ranks);
    }
    if (dtype == 0 || dtype == DTRAIN_F32)
        return tree(x, t->micro);
    for (int round = 0; round * t->ranks < t->micro; round++) {
        for (int copy = 0; copy * shards < t->ranks; copy++) {
            for (int i = 0; i < shards; i++)
                narrow[i] = rounded(x[round * t->ranks + copy * shards + i], dtype);
            copies[copy] = tree(narrow, shards);
            copies[copy] = shards < t->ranks ? rounded(copies[copy], dtype) : copies[copy];
        }
        rounds[round] = tree(copies, t->ranks / shards);
        rounds[round] = shards < t->ranks ? rounded(rounds[round], dtype) : rounds[round];
    }
    return tree(rounds, t->micro / t->ranks);
}

static double reference_gradients(const trial *t, const dtrain_param *table, const size_t *begin, int step,
                                  const float *w, float *g)
{
    double squares = 0, rest = 0;
    float x[MOST_MICRO];
    for (int p = 0; p < PARAMS; p++)
        for (size_t e = begin[p]; e < begin[p] + dtrain_param_elements(&table[p]); e++) {
            float seen = rounded(w[e], t->desc.gather_dtype);
            for (int j = 0; j < t->micro; j++)
                x[j] = is_used(t, j, unit_of(table, begin, p, e)) ? gradient(step, j, e, seen) : -0.0f;
            g[e] = table[p].frozen ? 0.0f : summed(t, x) / (float)t->micro;
            add_square(&squares, &rest, g[e]);
        }
    return sqrt(squares + rest);
}

static void reference(trial *t)
{
    dtrain_param table[PARAMS];
    size_t begin[PARAMS], n;
    model_describe(table);
    n = model_elements(table, begin);
    float *w = (float *)malloc(4 * n * sizeof *w), *g = w + n, *m = g + n, *v = m + n;
    memset(w, 0, 4 * n * sizeof *w);
    for (size_t e = 0; e < n; e++)
        w[e] = first_value(e);
    for (int step = 0; step < STEPS; step++) {
        double norm = reference_gradients(t, table, begin, step, w, g);
        float factor = (float)((double)t->clip / norm);
        t->norms[step] = norm;
        for (size_t e = 0; e < n && t->clip > 0 && norm > (double)t->clip; e++)
            g[e] *= factor;
        for (int p = 0; p < PARAMS; p++) {
            dtrain_optimizer_desc desc = t->desc.optimizer;
            desc.weight_decay = table[p].no_decay ? 0.0f : desc.weight_decay;
            if (!table[p].frozen)
                dtrain_adamw(w + begin[p], g + begin[p], m + begin[p], v + begin[p], dtrain_param_elements(&table[p]),
                             &desc, 0.01f, (uint64_t)step + 1);
        }
    }
    t->expected = w;
}

/* ---- the same, sharded ---- */

typedef struct view {
    dtrain_param table[PARAMS];
    size_t begin[PARAMS];
    float *data[PARAMS], *grad[PARAMS];
    float *own[2]; /* the caller's memory */
} view;

static void each_of_unit(view *v, int unit, int step, int j, int writes)
{
    for (int p = 0; p < PARAMS; p++) {
        size_t layers = v->table[p].stacked ? L : 1, each = dtrain_param_elements(&v->table[p]) / layers;
        if (unit < v->table[p].unit || unit >= v->table[p].unit + (int)layers)
            continue;
        size_t first = (size_t)(unit - v->table[p].unit) * each;
        for (size_t i = first; i < first + each; i++) {
            if (writes)
                v->data[p][i] = first_value(v->begin[p] + i);
            else if (v->grad[p] != NULL)
                v->grad[p][i] += gradient(step, j, v->begin[p] + i, v->data[p][i]);
        }
    }
}

static dtrain_status forward_pass(dtrain_fsdp *fsdp, int units)
{
    dtrain_status status = DTRAIN_OK;
    for (int u = 0; u < units && status == DTRAIN_OK; u++) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_release(fsdp, u);
    }
    return status;
}

static dtrain_status one_micro_batch(dtrain_fsdp *fsdp, view *v, const trial *t, int step, int j)
{
    dtrain_status status = forward_pass(fsdp, UNITS);
    int left_out = 0, held = -1;
    for (int u = UNITS - 1; u >= 0 && status == DTRAIN_OK; u--) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status != DTRAIN_OK)
            return status;
        if (!is_used(t, j, u)) {
            left_out = 1;
            status = dtrain_fsdp_release(fsdp, u);
            continue;
        }
        each_of_unit(v, u, step, j, 0);
        if (t->swapped && u % 2 == 0 && u > 0) {
            held = u;
            continue;
        }
        status = dtrain_fsdp_reduce(fsdp, u);
        if (held >= 0 && status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, held);
        held = -1;
    }
    return status == DTRAIN_OK && left_out ? dtrain_fsdp_next(fsdp) : status;
}

/* Memory of the caller's: only rank 0 has the first values, gradients hold anything. */
static void give_memory(view *v, const trial *t, int rank)
{
    size_t n = model_elements(v->table, v->begin);
    for (int k = 0; k < 2; k++)
        v->own[k] = (float *)malloc(n * sizeof(float));
    for (size_t e = 0; e < n; e++) {
        v->own[0][e] = rank == 0 || t->desc.no_broadcast ? first_value(e) : 77.0f;
        v->own[1][e] = 88.0f;
    }
    for (int p = 0; p < PARAMS; p++) {
        if (t->own_data)
            v->table[p].data = v->own[0] + v->begin[p];
        if (t->own_grads)
            v->table[p].grad = v->own[1] + v->begin[p];
    }
}

static dtrain_status first_values(dtrain_fsdp *fsdp, view *v, const trial *t)
{
    dtrain_status status = DTRAIN_OK;
    for (int p = 0; p < PARAMS; p++) {
        v->data[p] = dtrain_fsdp_param(fsdp, v->table[p].name);
        v->grad[p] = dtrain_fsdp_grad(fsdp, v->table[p].name);
    }
    for (int u = 0; u < UNITS && status == DTRAIN_OK && !t->own_data; u++) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK)
            each_of_unit(v, u, 0, 0, 1);
        status = status == DTRAIN_OK ? dtrain_fsdp_put(fsdp, u) : status;
        status = status == DTRAIN_OK ? dtrain_fsdp_release(fsdp, u) : status;
    }
    return status;
}

/* A rank's micro-batches are contiguous where gradients are kept, else every ranks-th. */
static dtrain_status one_step(dtrain_fsdp *fsdp, view *v, const trial *t, int rank, int step)
{
    int ranks = t->ranks, mine = t->micro / ranks + (rank < t->micro % ranks), first = rank, stride = ranks;
    double norm = 0;
    size_t low;
    if (t->desc.keep_full_grads) {
        mine = (int)cut_of((size_t)t->micro, ranks, rank, &low);
        first = (int)low;
        stride = 1;
    }
    dtrain_status status = dtrain_fsdp_begin(fsdp, mine, mine);
    for (int i = 0; i < mine && status == DTRAIN_OK; i++)
        status = one_micro_batch(fsdp, v, t, step, first + i * stride);
    for (int i = mine; i < (t->micro + ranks - 1) / ranks && status == DTRAIN_OK; i++)
        status = dtrain_fsdp_join(fsdp);
    status = status == DTRAIN_OK ? dtrain_fsdp_clip_grad_norm(fsdp, t->clip, &norm) : status;
    CHECK(norm == t->norms[step]);
    return status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.01f) : status;
}

static dtrain_status trial_rank(dtrain_comm *world, void *user)
{
    trial *t = (trial *)user;
    int rank = dtrain_comm_rank(world);
    dtrain_fsdp *fsdp = NULL;
    view v;
    float *value = (float *)malloc(8191 * sizeof *value);
    memset(&v, 0, sizeof v);
    model_describe(v.table);
    give_memory(&v, t, rank);
    dtrain_status status = dtrain_fsdp_create(&fsdp, world, v.table, PARAMS, &t->desc);
    status = status == DTRAIN_OK ? first_values(fsdp, &v, t) : status;
    for (int step = 0; step < STEPS && status == DTRAIN_OK; step++)
        status = one_step(fsdp, &v, t, rank, step);
    for (int p = 0; p < PARAMS && status == DTRAIN_OK; p++) {
        status = dtrain_fsdp_get(fsdp, v.table[p].name, value, -1);
        CHECK(memcmp(value, t->expected + v.begin[p], dtrain_param_elements(&v.table[p]) * sizeof(float)) == 0);
    }
    if (status != DTRAIN_OK)
        TEST_FAIL("rank %d of %d: %s", rank, t->ranks, dtrain_last_error());
    dtrain_fsdp_destroy(fsdp);
    free(v.own[0]);
    free(v.own[1]);
    free(value);
    return status;
}

__attribute__((unused)) static trial trial_of(dtrain_strategy strategy, int ranks, int shard_size, int micro)
{
    trial t;
    memset(&t, 0, sizeof t);
    t.desc.strategy = strategy;
    t.desc.shard_size = shard_size;
    t.desc.optimizer.weight_decay = 0.1f;
    t.ranks = ranks;
    t.micro = micro;
    t.clip = 0.5f;
    return t;
}

/* Says which trial has failed. */
static void trial_blame(const trial *t, int before)
{
    if (test_failures != before)
        TEST_FAIL("strategy %d, %d ranks, shard_size %d, %d micro-batches, kept %d, unused %x, swapped %d, own memory "
                  "%d %d, gather %d, reduce %d",
                  (int)t->desc.strategy, t->ranks, t->desc.shard_size, t->micro, t->desc.keep_full_grads, t->unused,
                  t->swapped, t->own_data, t->own_grads, (int)t->desc.gather_dtype, (int)t->desc.reduce_dtype);
}

__attribute__((unused)) static void trial_run(trial t, const dtrain_comm_desc *desc)
{
    int before = test_failures;
    reference(&t);
    CHECK_EQ(dtrain_run_threads(t.ranks, trial_rank, &t, desc), DTRAIN_OK);
    trial_blame(&t, before);
    free(t.expected);
}

#endif
