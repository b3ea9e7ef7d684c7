/* FSDP against a reference that is computed by one rank with plain loops: gradients summed by the tree of the manual,
 * the norm in twice the precision of a double, AdamW from its formula's own function on whole arrays. Slices, memory,
 * misuse and loss. */
#define DTRAIN_IMPLEMENTATION
#include "../dtrain.h"
#include "test.h"
#include <math.h>

#define STEPS 4
#define MOST_MICRO 16

/* Odd sizes, a parameter smaller than most worlds, a stacked one, one frozen, one tied. */
enum { TOKENS, SCALAR, TWO, LAYERS, BIAS, FROZEN, SEVEN, LAST, PARAMS };
#define L 3

static size_t model_describe(dtrain_param *table)
{
    memset(table, 0, PARAMS * sizeof *table);
    dtrain_param params[PARAMS] = {
        {"tokens", DTRAIN_F32, {13, 5}, 0, 0, 0, 0, 0, 1, NULL, NULL},
        {"scalar", DTRAIN_F32, {1}, 0, 0, 0, 1, 0, 0, NULL, NULL},
        {"two", DTRAIN_F32, {2}, 0, 0, 1, 0, 0, 0, NULL, NULL},
        {"layers", DTRAIN_F32, {L, 7, 11}, 0, 1, 1, 0, 0, 0, NULL, NULL},
        {"bias", DTRAIN_F32, {L, 3}, 0, 1, 1, 1, 0, 0, NULL, NULL},
        {"frozen", DTRAIN_F32, {9}, 0, 0, 2, 0, 1, 0, NULL, NULL},
        {"seven", DTRAIN_F32, {7}, 0, 0, 3, 0, 0, 0, NULL, NULL},
        {"last", DTRAIN_F32, {8191}, 0, 0, L + 1, 0, 0, 0, NULL, NULL},
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

static float first_value(size_t element)
{
    return dtrain_random_normal(5, element);
}

/* The gradient of element `e` in micro-batch j of a step, where its weight is w. */
static float gradient(int step, int j, size_t e, float w)
{
    return dtrain_random_normal(100 + (uint64_t)step, (uint64_t)j * 100000 + e) + 0.125f * w;
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

typedef struct scene {
    dtrain_fsdp_desc desc;
    int micro;   /* micro-batches of a step, all ranks together */
    int release; /* 0: units are reduced from the last; 1: in another order */
    float clip;
    int unused; /* 1: unit 2 is left out in micro-batch 1 */
    float *expected;
    double norms[STEPS];
} scene;

static int is_used(const scene *s, int j, int unit)
{
    return !(s->unused && j == 1 && unit == 2);
}

static int unit_of(const dtrain_param *table, const size_t *begin, int p, size_t e)
{
    size_t layer = dtrain_param_elements(&table[p]) / table[p].shape[0];
    return table[p].unit + (table[p].stacked ? (int)((e - begin[p]) / layer) : 0);
}

static void reference(scene *s)
{
    dtrain_param table[PARAMS];
    size_t begin[PARAMS], n;
    float x[MOST_MICRO];
    model_describe(table);
    n = model_elements(table, begin);
    float *w = (float *)malloc(4 * n * sizeof *w), *g = w + n, *m = g + n, *v = m + n;
    memset(w, 0, 4 * n * sizeof *w);
    for (size_t e = 0; e < n; e++)
        w[e] = first_value(e);
    for (int step = 0; step < STEPS; step++) {
        double squares = 0, rest = 0;
        for (int p = 0; p < PARAMS; p++)
            for (size_t e = begin[p]; e < begin[p] + dtrain_param_elements(&table[p]); e++) {
                for (int j = 0; j < s->micro; j++)
                    x[j] = is_used(s, j, unit_of(table, begin, p, e)) ? gradient(step, j, e, w[e]) : -0.0f;
                g[e] = table[p].frozen ? 0.0f : tree(x, s->micro) / (float)s->micro;
                add_square(&squares, &rest, g[e]);
            }
        s->norms[step] = sqrt(squares + rest);
        float factor = (float)((double)s->clip / s->norms[step]);
        for (size_t e = 0; e < n && s->clip > 0 && s->norms[step] > (double)s->clip; e++)
            g[e] *= factor;
        for (int p = 0; p < PARAMS; p++) {
            dtrain_optimizer_desc desc = s->desc.optimizer;
            desc.weight_decay = table[p].no_decay ? 0.0f : desc.weight_decay;
            if (!table[p].frozen)
                dtrain_adamw(w + begin[p], g + begin[p], m + begin[p], v + begin[p], dtrain_param_elements(&table[p]),
                             &desc, 0.01f, (uint64_t)step + 1);
        }
    }
    s->expected = w;
}

/* ---- the same, sharded ---- */

typedef struct view {
    dtrain_param table[PARAMS];
    size_t begin[PARAMS];
    float *data[PARAMS], *grad[PARAMS];
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

static dtrain_status one_micro_batch(dtrain_fsdp *fsdp, view *v, const scene *s, int step, int j)
{
    dtrain_status status = DTRAIN_OK;
    int left_out = 0;
    for (int u = 0; u < L + 2 && status == DTRAIN_OK; u++) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_release(fsdp, u);
    }
    for (int u = L + 1; u >= 0 && status == DTRAIN_OK; u--) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK && is_used(s, j, u)) {
            each_of_unit(v, u, step, j, 0);
            status = dtrain_fsdp_reduce(fsdp, u);
        } else if (status == DTRAIN_OK) {
            left_out = 1;
            status = dtrain_fsdp_release(fsdp, u);
        }
    }
    return status == DTRAIN_OK && left_out ? dtrain_fsdp_next(fsdp) : status;
}

static dtrain_status sharded(dtrain_comm *world, void *user)
{
    scene *s = (scene *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_fsdp *fsdp = NULL;
    view v;
    float *value = (float *)malloc(8191 * sizeof *value);
    double norm = 0;
    model_describe(v.table);
    model_elements(v.table, v.begin);
    dtrain_status status = dtrain_fsdp_create(&fsdp, world, v.table, PARAMS, &s->desc);
    CHECK_EQ(status, DTRAIN_OK);
    for (int p = 0; p < PARAMS && status == DTRAIN_OK; p++) {
        v.data[p] = dtrain_fsdp_param(fsdp, v.table[p].name);
        v.grad[p] = dtrain_fsdp_grad(fsdp, v.table[p].name);
    }
    for (int u = 0; u < L + 2 && status == DTRAIN_OK; u++) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK)
            each_of_unit(&v, u, 0, 0, 1);
        status = status == DTRAIN_OK ? dtrain_fsdp_put(fsdp, u) : status;
        status = status == DTRAIN_OK ? dtrain_fsdp_release(fsdp, u) : status;
    }
    for (int step = 0; step < STEPS && status == DTRAIN_OK; step++) {
        int mine = s->micro / ranks + (rank < s->micro % ranks), first = rank, stride = ranks;
        size_t low;
        if (s->desc.keep_full_grads) {
            mine = (int)dtrain_split((size_t)s->micro, ranks, rank, &low);
            first = (int)low;
            stride = 1;
        }
        status = dtrain_fsdp_begin(fsdp, mine, mine);
        for (int i = 0; i < mine && status == DTRAIN_OK; i++)
            status = one_micro_batch(fsdp, &v, s, step, first + i * stride);
        for (int i = mine; i < (s->micro + ranks - 1) / ranks && status == DTRAIN_OK; i++)
            status = dtrain_fsdp_join(fsdp);
        status = status == DTRAIN_OK ? dtrain_fsdp_clip_grad_norm(fsdp, s->clip, &norm) : status;
        CHECK(norm == s->norms[step]);
        status = status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.01f) : status;
    }
    for (int p = 0; p < PARAMS && status == DTRAIN_OK; p++) {
        status = dtrain_fsdp_get(fsdp, v.table[p].name, value, -1);
        CHECK(memcmp(value, s->expected + v.begin[p], dtrain_param_elements(&v.table[p]) * sizeof(float)) == 0);
    }
    CHECK_EQ(status, DTRAIN_OK);
    if (status != DTRAIN_OK)
        TEST_FAIL("rank %d of %d: %s", rank, ranks, dtrain_last_error());
    dtrain_fsdp_destroy(fsdp);
    free(value);
    return status;
}

static void run_as(dtrain_strategy strategy, int ranks, int shard_size, int micro, int keep_full)
{
    scene s;
    memset(&s, 0, sizeof s);
    s.desc.strategy = strategy;
    s.desc.shard_size = shard_size;
    s.desc.optimizer.weight_decay = 0.1f;
    s.desc.keep_full_grads = keep_full;
    s.micro = micro;
    s.clip = 0.5f;
    reference(&s);
    int before = test_failures;
    CHECK_EQ(dtrain_run_threads(ranks, sharded, &s, NULL), DTRAIN_OK);
    if (test_failures != before)
        TEST_FAIL("strategy %d, %d ranks, shard_size %d, %d micro-batches", (int)strategy, ranks, shard_size, micro);
    free(s.expected);
}

TEST(full_grad_and_none_give_the_weights_of_the_reference_bit_for_bit)
{
    const int worlds[] = {1, 2, 3, 4, 6, 8};
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_NO_SHARD; strategy++)
        for (int i = 0; i < 6; i++)
            run_as((dtrain_strategy)strategy, worlds[i], 0, worlds[i], 0);
}

TEST(hybrid_gives_them_where_shard_size_is_a_power_of_two)
{
    run_as(DTRAIN_HYBRID_SHARD, 4, 2, 4, 0);
    run_as(DTRAIN_HYBRID_SHARD, 8, 2, 8, 0);
    run_as(DTRAIN_HYBRID_SHARD, 8, 4, 8, 0);
    run_as(DTRAIN_HYBRID_SHARD, 6, 2, 6, 0);
    run_as(DTRAIN_HYBRID_SHARD, 4, 4, 4, 0);
    run_as(DTRAIN_HYBRID_SHARD, 4, 1, 4, 0);
}

TEST(eight_micro_batches_give_the_same_weights_on_1_2_4_and_8_ranks)
{
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_NO_SHARD; strategy++)
        for (int ranks = 1; ranks <= 8; ranks *= 2)
            for (int keep = 0; keep < 2; keep++)
                run_as((dtrain_strategy)strategy, ranks, 0, 8, keep);
    run_as(DTRAIN_HYBRID_SHARD, 4, 2, 8, 0);
    run_as(DTRAIN_HYBRID_SHARD, 8, 4, 8, 1);
}
