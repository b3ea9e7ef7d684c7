/* ---- >>test_train ----
 * The training floor: the table, optimizers against float64 references, aggregators over threads. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include <fenv.h>
#include <math.h>

/* Numbers of every size and sign, so that the order of additions shows in their bits. */
static float noise(uint64_t seed, uint64_t index)
{
    uint64_t bits = dtrain_random_u64(seed, index);
    float value = (float)(bits >> 40) / 16777216.0f - 0.5f;
    return value * (float)(1 << (bits & 15));
}

/* ---- the table ---- */

static float memory[4096];

static dtrain_param param(const char *name, int unit, size_t count, float *data, float *grad)
{
    dtrain_param made;
    memset(&made, 0, sizeof made);
    made.name = name;
    made.dtype = DTRAIN_F32;
    made.shape[0] = count;
    made.unit = unit;
    made.data = data;
    made.grad = grad;
    return made;
}

TEST(a_table_counts_elements_and_units)
{
    dtrain_param table[2];
    table[0] = param("wte", 0, 5, memory, memory + 100);
    table[0].shape[1] = 3;
    table[1] = param("qkv", 1, 4, memory + 200, memory + 300);
    table[1].shape[1] = 2;
    table[1].stacked = 1;
    CHECK_EQ(dtrain__params_check(table, 2), DTRAIN_OK);
    CHECK_EQ(dtrain_param_elements(&table[0]), 15);
    CHECK_EQ(dtrain_params_units(table, 2), 5);
    CHECK_EQ(dtrain_params_units(NULL, 0), 0);
}

TEST(a_bad_table_is_refused_by_name)
{
    dtrain_param good[2], bad[2];
    good[0] = param("a", 0, 10, memory, memory + 10);
    good[1] = param("b", 1, 10, memory + 20, memory + 30);
    CHECK_EQ(dtrain__params_check(good, 2), DTRAIN_OK);
    CHECK_EQ(dtrain__params_check(NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "empty");
#define REFUSED(change, text) \
    memcpy(bad, good, sizeof bad); \
    change; \
    CHECK_EQ(dtrain__params_check(bad, 2), DTRAIN_ERR_INVALID); \
    CHECK_CONTAINS(dtrain_last_error(), text)
    REFUSED(bad[1].name = NULL, "parameter 1 of the table has no name");
    REFUSED(bad[1].name = "", "has no name");
    REFUSED(bad[1].name = "a", "two parameters are named a");
    REFUSED(bad[0].dtype = (dtrain_dtype)30, "dtype");
    REFUSED(bad[0].dtype = DTRAIN_F4, "whole bytes");
    REFUSED(bad[0].ndim = 9, "ndim is 9");
    REFUSED(bad[0].shape[0] = 0, "no shape");
    REFUSED((bad[0].shape[0] = SIZE_MAX / 2, bad[0].shape[1] = 3), "more than memory");
    REFUSED(bad[0].shape[0] = SIZE_MAX / 2, "more than memory");
    REFUSED(bad[1].unit = -1, "unit -1");
    REFUSED((bad[1].unit = 0x7fffffff, bad[1].stacked = 1), "layers");
    REFUSED(bad[1].unit = 2, "none has unit 1");
    REFUSED(bad[1].data = NULL, "data is NULL");
    REFUSED(bad[1].data = memory + 9, "overlap");
    REFUSED(bad[1].grad = bad[1].data, "overlap");
#undef REFUSED
    bad[1].frozen = 1; /* its grad is not looked at */
    CHECK_EQ(dtrain__params_check(bad, 2), DTRAIN_OK);
}

/* Three arrays: an embedding of 6, two layers of 4, a norm of 3; by hand. */
TEST(a_table_is_made_of_arrays)
{
    static const char *const names[] = {"wte", "qkvw", "lnfw"};
    size_t sizes[] = {6, 8, 3};
    int layers[] = {0, 2, 0};
    float weights[17], grads[17];
    dtrain_param table[3];
    CHECK_EQ(dtrain_params_of_arrays(table, 3, names, sizes, layers, weights, grads), DTRAIN_OK);
    CHECK_EQ(dtrain_params_units(table, 3), 3);
    CHECK(table[0].data == weights && table[0].grad == grads && dtrain_param_elements(&table[0]) == 6);
    CHECK(table[0].unit == 0 && table[0].tied && !table[0].stacked);
    CHECK(table[1].data == weights + 6 && table[1].grad == grads + 6);
    CHECK(table[1].shape[0] == 2 && table[1].shape[1] == 4 && table[1].unit == 1 && table[1].stacked && !table[1].tied);
    CHECK(table[2].data == weights + 14 && table[2].grad == grads + 14 && dtrain_param_elements(&table[2]) == 3);
    CHECK_EQ(dtrain_params_of_arrays(table, 3, names, sizes, NULL, NULL, NULL), DTRAIN_OK);
    CHECK(table[1].data == NULL && table[1].grad == NULL && table[1].unit == 0 && table[1].shape[0] == 8);
    sizes[2] = 0; /* an array may be empty, a table too */
    CHECK_EQ(dtrain_params_of_arrays(table, 3, names, sizes, layers, weights, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_params_of_arrays(NULL, 0, NULL, NULL, NULL, NULL, NULL), DTRAIN_OK);
    layers[1] = 3;
    CHECK_EQ(dtrain_params_of_arrays(table, 3, names, sizes, layers, weights, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "array 1 (\"qkvw\") has 8 elements in 3 layers");
    layers[1] = -2;
    CHECK_EQ(dtrain_params_of_arrays(table, 3, names, sizes, layers, weights, NULL), DTRAIN_ERR_INVALID);
    layers[1] = 2;
    sizes[1] = SIZE_MAX / 4 + 2;
    sizes[1] += sizes[1] % 2;
    CHECK_EQ(dtrain_params_of_arrays(table, 3, names, sizes, layers, weights, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_params_of_arrays(table, 3, names, NULL, layers, weights, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "sizes is NULL");
}

TEST(only_a_library_that_reserves_takes_a_table_without_memory)
{
    dtrain_param table[2];
    table[0] = param("a", 0, 10, NULL, NULL);
    table[1] = param("b", 1, 10, memory, memory + 10);
    CHECK_EQ(dtrain__params_check_for(table, 2, 1), DTRAIN_OK);
    CHECK_EQ(dtrain__params_check_for(table, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "parameter a: data is NULL, expected 40 bytes");
    CHECK_EQ(dtrain__params_check(table, 2), DTRAIN_ERR_INVALID);
    table[0].data = memory + 9;
    CHECK_EQ(dtrain__params_check_for(table, 2, 1), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "overlap");
    table[0] = param("b", 0, 10, NULL, NULL);
    CHECK_EQ(dtrain__params_check_for(table, 2, 1), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "two parameters are named b");
}

/* What ranks compare of a table of two: nonzero where it is as before. */
static int same_lines(const dtrain_param *one, const dtrain_param *other)
{
    dtrain__alike_line lines[2];
    int differ = 0;
    memset(lines, 0, sizeof lines);
    for (size_t i = 0; i < dtrain__params_lines(2); i++) {
        CHECK(dtrain__params_line(one, 2, 0, i, &lines[0]) && dtrain__params_line(other, 2, 0, i, &lines[1]));
        differ += strcmp(lines[0].what, lines[1].what) != 0 || strcmp(lines[0].value, lines[1].value) != 0;
    }
    CHECK_EQ(dtrain__params_line(one, 2, 0, dtrain__params_lines(2), &lines[0]), 0);
    return !differ;
}

TEST(ranks_compare_all_of_a_table_but_its_addresses)
{
    dtrain_param good[2], other[2];
    good[0] = param("a", 0, 10, memory, memory + 10);
    good[1] = param("b", 1, 10, memory + 20, memory + 30);
#define DIFFERS(change) \
    memcpy(other, good, sizeof other); \
    change; \
    CHECK(!same_lines(good, other))
    memcpy(other, good, sizeof other);
    other[0].data = memory + 50;
    other[1].grad = memory + 60;
    CHECK(same_lines(good, other));
    DIFFERS(other[0].name = "c");
    DIFFERS((other[0] = good[1], other[1] = good[0]));
    DIFFERS(other[1].dtype = DTRAIN_BF16);
    DIFFERS(other[1].shape[0] = 11);
    DIFFERS(other[1].shape[1] = 1);
    DIFFERS(other[1].ndim = 2);
    DIFFERS(other[1].stacked = 1);
    DIFFERS(other[1].unit = 0);
    DIFFERS(other[1].grad = NULL);
    DIFFERS(other[1].frozen = 1);
    DIFFERS(other[1].tied = 1);
    DIFFERS(other[1].no_decay = 1);
    DIFFERS(other[1].dense = 1);
#undef DIFFERS
}

#define NO_GRADIENT(call) \
    CHECK_EQ(call, DTRAIN_ERR_INVALID); \
    CHECK_CONTAINS(dtrain_last_error(), \
                   "parameter b is not frozen, and its grad is NULL, expected memory for 2 elements")

TEST(calls_that_use_gradients_refuse_a_parameter_without_one)
{
    float data[4] = {1, 1, 1, 1}, grad[4] = {0};
    double weight;
    dtrain_param table[2];
    dtrain_comm *world;
    dtrain_optimizer *optimizer;
    dtrain_local_sgd *local;
    dtrain_local_sgd_desc rounds;
    dtrain_server *server;
    dtrain_aggregator aggregator;
    table[0] = param("a", 0, 2, data, grad);
    table[1] = param("b", 0, 2, data + 2, NULL);
    memset(&rounds, 0, sizeof rounds);
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    NO_GRADIENT(dtrain_optimizer_create(&optimizer, table, 2, NULL, NULL));
    NO_GRADIENT(dtrain_clip_grad_norm(table, 2, 1.0f, &weight));
    NO_GRADIENT(dtrain_local_sgd_create(&local, world, table, 2, &rounds));
    NO_GRADIENT(dtrain_server_create(&server, world, table, 2, NULL));
    NO_GRADIENT(dtrain_aggregator_compressed(&aggregator, world, table, 2, NULL));
    aggregator = dtrain_aggregator_all_reduce(world);
    NO_GRADIENT(aggregator.aggregate(aggregator.self, table, 2, 1.0, &weight));
    dtrain_aggregator_destroy(&aggregator);
    table[1].frozen = 1;
    CHECK_EQ(dtrain_clip_grad_norm(table, 2, 1.0f, &weight), DTRAIN_OK);
    table[1].frozen = 0;
    table[1].ndim = 1;
    table[1].shape[0] = 0; /* no elements: no gradient is needed */
    CHECK_EQ(dtrain_optimizer_create(&optimizer, table, 2, NULL, NULL), DTRAIN_OK);
    dtrain_optimizer_destroy(optimizer);
    dtrain_comm_destroy(world);
}

static dtrain_status unit_gradients(void *user, double *weight)
{
    float *grad = (float *)user;
    grad[0] = grad[1] = grad[3] = 2.0f;
    *weight = 4.0;
    return DTRAIN_OK;
}

TEST(what_is_frozen_keeps_its_weights_and_its_gradient)
{
    float data[4] = {1, 1, 1, 1}, grad[4] = {7, 7, 7, 7};
    dtrain_step_desc step;
    dtrain_step_result result;
    dtrain_optimizer_desc sgd;
    dtrain_param table[3];
    memset(&step, 0, sizeof step);
    memset(&sgd, 0, sizeof sgd);
    sgd.kind = DTRAIN_SGD;
    table[0] = param("a", 0, 2, data, grad);
    table[1] = param("frozen", 0, 1, data + 2, grad + 2);
    table[1].frozen = 1;
    table[2] = param("b", 0, 1, data + 3, grad + 3);
    step.table = table;
    step.count = 3;
    step.compute = unit_gradients;
    step.user = grad;
    step.lr = 1.0f;
    step.max_norm = 100.0f;
    CHECK_EQ(dtrain_optimizer_create(&step.optimizer, table, 3, &sgd, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_train_step(&step, &result), DTRAIN_OK);
    CHECK(result.norm * result.norm > 0.7499999 && result.norm * result.norm < 0.7500001); /* three times 0.5^2 */
    CHECK(grad[0] == 0.5f && grad[2] == 7.0f && grad[3] == 0.5f);
    CHECK(data[0] == 0.5f && data[1] == 0.5f && data[2] == 1.0f && data[3] == 0.5f);
    CHECK_EQ(dtrain_clip_grad_norm(table, 3, 0.01f, NULL), DTRAIN_OK);
    CHECK(grad[0] < 0.01f && grad[2] == 7.0f);
    dtrain_optimizer_destroy(step.optimizer);
    table[1].dtype = DTRAIN_BF16; /* and may be of any dtype */
    CHECK_EQ(dtrain_clip_grad_norm(table, 3, 0.01f, NULL), DTRAIN_OK);
}

/* ---- optimizers ---- */

#define N 37

static void adamw_reference(double *p, const double *g, double *m, double *v, double lr, double decay, int step)
{
    double b1 = (double)0.9f, b2 = (double)0.95f;
    for (int i = 0; i < N; i++) {
        m[i] = b1 * m[i] + (1 - b1) * g[i];
        v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
        p[i] -= lr * decay * p[i];
        p[i] -= lr * (m[i] / (1 - pow(b1, step))) / (sqrt(v[i] / (1 - pow(b2, step))) + 1e-8);
    }
}

TEST(adamw_follows_a_float64_reference)
{
    float p[N], g[N];
    double rp[N], rg[N], rm[N] = {0}, rv[N] = {0};
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc desc;
    dtrain_allocator allocator;
    memset(&desc, 0, sizeof desc);
    memset(&allocator, 0, sizeof allocator);
    desc.weight_decay = 0.1f;
    desc.beta2 = 0.95f;
    for (int i = 0; i < N; i++)
        rp[i] = (double)(p[i] = noise(1, (uint64_t)i) / 1000.0f);
    dtrain_param table[2];
    table[0] = param("decayed", 0, 20, p, g);
    table[1] = param("not", 0, N - 20, p + 20, g + 20);
    table[1].no_decay = 1;
    CHECK_EQ(dtrain_optimizer_create(&optimizer, table, 2, &desc, &allocator), DTRAIN_OK);
    size_t warm = allocator.bytes;
    for (int step = 1; step <= 200; step++) {
        double kept[N];
        for (int i = 0; i < N; i++)
            rg[i] = (double)(g[i] = noise((uint64_t)step, (uint64_t)i));
        memcpy(kept, rp, sizeof kept);
        CHECK_EQ(dtrain_optimizer_step(optimizer, 0.01f), DTRAIN_OK);
        adamw_reference(rp, rg, rm, rv, (double)0.01f, (double)0.1f, step);
        for (int i = 20; i < N; i++)
            rp[i] += (double)0.01f * (double)0.1f * kept[i];
    }
    for (int i = 0; i < N; i++)
        CHECK(fabs((double)p[i] - rp[i]) < 1e-5 * (1 + fabs(rp[i])));
    CHECK_EQ(allocator.bytes, warm);
    CHECK_EQ(allocator.peak_bytes, warm);
    dtrain_optimizer_destroy(optimizer);
    dtrain_optimizer_destroy(NULL);
    CHECK_EQ(allocator.bytes, 0);
}

TEST(adamw_of_slices_is_adamw_of_the_whole_at_any_alignment)
{
    enum { COUNT = 259 };
    static float p[2][COUNT + 3], g[2][COUNT + 3], m[2][COUNT + 3], v[2][COUNT + 3];
    for (uint64_t step = 1; step <= 5; step++) {
        for (size_t i = 0; i < COUNT; i++)
            g[0][i] = g[1][i + 3] = noise(step, i);
        dtrain_adamw(p[0], g[0], m[0], v[0], COUNT, NULL, 0.1f, step);
        for (size_t at = 0, part; at < COUNT; at += part) {
            part = at % 7 + 1 < COUNT - at ? at % 7 + 1 : COUNT - at;
            dtrain_adamw(p[1] + 3 + at, g[1] + 3 + at, m[1] + 3 + at, v[1] + 3 + at, part, NULL, 0.1f, step);
        }
    }
    CHECK(memcmp(p[0], p[1] + 3, COUNT * sizeof(float)) == 0);
    CHECK(memcmp(m[0], m[1] + 3, COUNT * sizeof(float)) == 0);
    CHECK(memcmp(v[0], v[1] + 3, COUNT * sizeof(float)) == 0);
}

static void check_sgd(float momentum, int nesterov, int decoupled)
{
    float p[N], g[N];
    double rp[N], rv[N] = {0};
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_SGD;
    desc.momentum = momentum;
    desc.nesterov = nesterov;
    desc.decoupled_decay = decoupled;
    desc.weight_decay = 0.1f;
    for (int i = 0; i < N; i++)
        rp[i] = (double)(p[i] = noise(2, (uint64_t)i));
    dtrain_param table = param("p", 0, N, p, g);
    CHECK_EQ(dtrain_optimizer_create(&optimizer, &table, 1, &desc, NULL), DTRAIN_OK);
    for (int step = 0; step < 50; step++) {
        for (int i = 0; i < N; i++) {
            double gi = (double)(g[i] = noise((uint64_t)step, (uint64_t)i)) + (decoupled ? 0 : (double)0.1f * rp[i]);
            rv[i] = (double)momentum * rv[i] + gi;
            rp[i] = rp[i] * (decoupled ? 1 - (double)0.01f * (double)0.1f : 1) -
                    (double)0.01f * (nesterov ? gi + (double)momentum * rv[i] : rv[i]);
        }
        CHECK_EQ(dtrain_optimizer_step(optimizer, 0.01f), DTRAIN_OK);
    }
    for (int i = 0; i < N; i++)
        CHECK(fabs((double)p[i] - rp[i]) < 1e-4 * (1 + fabs(rp[i])));
    dtrain_optimizer_destroy(optimizer);
}

TEST(sgd_follows_a_float64_reference)
{
    check_sgd(0.0f, 0, 0);
    check_sgd(0.0f, 0, 1);
    check_sgd(0.9f, 0, 0);
    check_sgd(0.9f, 1, 0);
    check_sgd(0.9f, 1, 1);
}

TEST(an_optimizer_refuses_bad_constants_and_tables)
{
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc desc;
    dtrain_param table = param("p", 0, 8, memory, memory + 8);
#define REFUSED(change, text) \
    memset(&desc, 0, sizeof desc); \
    change; \
    CHECK_EQ(dtrain_optimizer_create(&optimizer, &table, 1, &desc, NULL), DTRAIN_ERR_INVALID); \
    CHECK_CONTAINS(dtrain_last_error(), text); \
    CHECK(optimizer == NULL)
    REFUSED(desc.beta1 = 1.0f, "beta1");
    REFUSED(desc.beta2 = -0.5f, "beta2");
    REFUSED(desc.eps = -1.0f, "eps");
    REFUSED(desc.weight_decay = -1.0f, "weight_decay");
    REFUSED(desc.momentum = 1.5f, "momentum");
    REFUSED(desc.kind = (dtrain_optimizer_kind)3, "kind");
    REFUSED(table.name = NULL, "no name");
#undef REFUSED
    table.name = "p";
    table.dtype = DTRAIN_F16;
    CHECK_EQ(dtrain_optimizer_create(&optimizer, &table, 1, NULL, NULL), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "F32 only");
    CHECK_EQ(dtrain_optimizer_create(NULL, &table, 1, NULL, NULL), DTRAIN_ERR_INVALID);
    table.dtype = DTRAIN_F32;
    CHECK_EQ(dtrain_optimizer_create(&optimizer, &table, 1, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_optimizer_step(NULL, 1.0f), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_optimizer_step(optimizer, -1.0f), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "lr is -1");
    dtrain_optimizer_destroy(optimizer);
}

static void *no_memory_after(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    int *left = (int *)user;
    (void)align;
    (void)old_bytes;
    if (new_bytes == 0) {
        free(pointer);
        return NULL;
    }
    return (*left)-- > 0 ? realloc(pointer, new_bytes) : NULL;
}

TEST(running_out_of_memory_is_a_status_and_leaks_nothing)
{
    dtrain_param table = param("p", 0, 8, memory, memory + 8);
    for (int allowed = 0, done = 0; !done; allowed++) {
        int left = allowed;
        dtrain_optimizer *optimizer;
        dtrain_allocator allocator;
        memset(&allocator, 0, sizeof allocator);
        allocator.resize = no_memory_after;
        allocator.user = &left;
        dtrain_status status = dtrain_optimizer_create(&optimizer, &table, 1, NULL, &allocator);
        CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_MEMORY);
        done = status == DTRAIN_OK;
        dtrain_optimizer_destroy(optimizer);
        CHECK_EQ(allocator.bytes, 0);
    }
}

TEST(clipping_shortens_only_what_is_too_long)
{
    float grads[4] = {3, 0, 0, 4}, data[4];
    double norm = 0;
    dtrain_param table[2];
    table[0] = param("a", 0, 2, data, grads);
    table[1] = param("b", 0, 2, data + 2, grads + 2);
    CHECK_EQ(dtrain_clip_grad_norm(table, 2, 0.0f, &norm), DTRAIN_OK);
    CHECK(norm == 5.0 && grads[0] == 3.0f);
    CHECK_EQ(dtrain_clip_grad_norm(table, 2, 6.0f, NULL), DTRAIN_OK);
    CHECK(grads[0] == 3.0f);
    CHECK_EQ(dtrain_clip_grad_norm(table, 2, 2.5f, &norm), DTRAIN_OK);
    CHECK(norm == 5.0 && grads[0] == 1.5f && grads[3] == 2.0f);
    CHECK_EQ(dtrain_clip_grad_norm(table, 2, -1.0f, &norm), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "max_norm is -1");
    table[1].dtype = DTRAIN_BF16;
    CHECK_EQ(dtrain_clip_grad_norm(table, 2, 1.0f, &norm), DTRAIN_ERR_UNSUPPORTED);
}

TEST(a_norm_is_rounded_to_nearest_in_any_mode)
{
    const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD};
    float grads[7] = {1, 1, 1, 1, 1, 1, 1}, data[7];
    double norms[3];
    dtrain_param table = param("a", 0, 7, data, grads);
    for (int i = 0; i < 3; i++) {
        fesetround(modes[i]);
        dtrain_status status = dtrain_clip_grad_norm(&table, 1, 0.0f, &norms[i]);
        fesetround(FE_TONEAREST);
        CHECK_EQ(status, DTRAIN_OK);
        CHECK(memcmp(&norms[i], &norms[0], sizeof norms[0]) == 0);
    }
}

/* ---- aggregators and the step ---- */

typedef struct line {
    dtrain_comm *world;
    float w, grad, data[8];
    int fails;
} line;

/* The gradient of sum((w x - 3 x)^2) / 2 over this rank's x. */
static dtrain_status line_compute(void *user, double *weight)
{
    line *l = (line *)user;
    size_t begin, count = dtrain_shard(l->world, 5, dtrain_comm_rank(l->world), &begin);
    if (l->fails)
        return DTRAIN_ERR_ABORTED;
    for (size_t i = begin; i < begin + count; i++) {
        float x = (float)i - 2.0f;
        l->grad += (l->w * x - 3.0f * x) * x;
    }
    *weight = (double)count;
    return DTRAIN_OK;
}

static dtrain_status line_rank(dtrain_comm *world, void *user)
{
    line l;
    dtrain_step_desc step;
    dtrain_step_result result;
    dtrain_optimizer_desc sgd;
    memset(&l, 0, sizeof l);
    memset(&step, 0, sizeof step);
    memset(&sgd, 0, sizeof sgd);
    l.world = world;
    sgd.kind = DTRAIN_SGD;
    dtrain_param table = param("w", 0, 1, &l.w, &l.grad);
    dtrain_aggregator aggregator = dtrain_aggregator_all_reduce(world);
    step.table = &table;
    step.count = 1;
    step.compute = line_compute;
    step.user = &l;
    step.aggregator = dtrain_comm_size(world) > 1 ? &aggregator : NULL;
    step.lr = 0.25f;
    CHECK_EQ(dtrain_optimizer_create(&step.optimizer, &table, 1, &sgd, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_train_step(&step, &result), DTRAIN_OK);
    CHECK(result.total_weight == 5.0 && result.norm == 0.0);
    CHECK(l.grad == -6.0f && l.w == 1.5f); /* the mean of x^2 is 2: 2 (w - 3) */
    step.max_norm = 1.0f;
    CHECK_EQ(dtrain_train_step(&step, &result), DTRAIN_OK);
    CHECK(result.norm == 3.0 && l.w == 1.75f);
    l.fails = 1;
    CHECK_EQ(dtrain_train_step(&step, &result), DTRAIN_ERR_ABORTED);
    CHECK(l.w == 1.75f);
    (void)user;
    dtrain_optimizer_destroy(step.optimizer);
    dtrain_aggregator_destroy(&aggregator);
    dtrain_aggregator_destroy(NULL);
    return DTRAIN_OK;
}

TEST(a_train_step_computes_aggregates_clips_and_applies)
{
    for (int ranks = 1; ranks <= 7; ranks++)
        CHECK_EQ(dtrain_run_threads(ranks, line_rank, NULL, NULL), DTRAIN_OK);
}

TEST(a_train_step_names_what_is_missing)
{
    dtrain_step_desc step;
    dtrain_param table = param("w", 0, 1, memory, memory + 1);
    memset(&step, 0, sizeof step);
    CHECK_EQ(dtrain_train_step(NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the desc is NULL");
    CHECK_EQ(dtrain_train_step(&step, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "table is NULL");
    step.table = &table;
    CHECK_EQ(dtrain_train_step(&step, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "compute is NULL");
    step.compute = line_compute;
    CHECK_EQ(dtrain_train_step(&step, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "optimizer is NULL");
}

/* ---- bits ---- */

/* The floats as little-endian bytes. */
static uint64_t bits_hash(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += sizeof(float)) {
        unsigned char word[sizeof(float)];
        memcpy(word, (const unsigned char *)data + i, sizeof word);
        little_endian(word, 1, sizeof word);
        for (size_t b = 0; b < sizeof word; b++)
            hash = (hash ^ word[b]) * UINT64_C(1099511628211);
    }
    return hash;
}

/* Any finite float, subnormals among them. */
static void bits_fill(float *to, size_t count, uint32_t seed, int exponents)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        uint32_t exponent = (seed >> 8) % (uint32_t)exponents + (exponents < 64 ? 110u : 0u);
        uint32_t bits = (seed & 0x80000000u) | exponent << 23 | (seed * 2654435761u >> 9);
        memcpy(to + i, &bits, sizeof bits);
    }
}

static uint64_t bits_of_optimizers(void)
{
    enum { COUNT = 1003 };
    static float p[COUNT], g[COUNT], m[COUNT], v[COUNT];
    uint64_t hash = UINT64_C(14695981039346656037);
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.weight_decay = 0.1f;
    desc.momentum = 0.9f;
    for (int kind = 0; kind < 4; kind++) {
        memset(m, 0, sizeof m);
        memset(v, 0, sizeof v);
        bits_fill(p, COUNT, 1, 20);
        desc.nesterov = kind == 2;
        desc.decoupled_decay = kind == 3;
        for (uint64_t step = 1; step <= 20; step++) {
            bits_fill(g, COUNT, (uint32_t)step, step % 2 ? 20 : 150);
            if (kind == 0)
                dtrain_adamw(p, g, m, v, COUNT, &desc, 1e-3f, step);
            else
                DTRAIN_IGNORE(dtrain_device_sgd(NULL, p, g, m, COUNT, &desc, 1e-3f, NULL));
        }
        hash = bits_hash(hash, p, sizeof p);
        hash = bits_hash(hash, m, sizeof m);
        hash = bits_hash(hash, v, sizeof v);
    }
    return hash;
}

static uint64_t bits_of_aggregation(void)
{
    static float g[1003], data[1003];
    uint64_t hash = UINT64_C(14695981039346656037);
    double total;
    dtrain_param table = param("p", 0, 1003, data, g);
    dtrain_aggregator local = dtrain__aggregator_local();
    dtrain_schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = DTRAIN_SCHEDULE_COSINE;
    schedule.lr = 1e-3f;
    schedule.min_lr = 1e-5f;
    schedule.total_steps = 1000;
    bits_fill(g, 1003, 5, 20);
    CHECK_EQ(dtrain_clip_grad_norm(&table, 1, 1.0f, NULL), DTRAIN_OK);
    CHECK_EQ(local.aggregate(local.self, &table, 1, 37.0, &total), DTRAIN_OK);
    hash = bits_hash(hash, g, sizeof g);
    for (uint64_t step = 0; step < 1000; step++) {
        float lr = dtrain_schedule_lr(&schedule, step);
        schedule.kind = step % 2 ? DTRAIN_SCHEDULE_COSINE : DTRAIN_SCHEDULE_LINEAR;
        hash = bits_hash(hash, &lr, sizeof lr);
    }
    return hash;
}

/* The constants are this test's own, taken where it first passed: what they say is that flags, compilers,
 * instruction sets and the caller's floating-point mode change nothing. */
TEST(optimizers_and_schedules_have_the_same_bits_everywhere)
{
    CHECK_EQ(bits_of_optimizers(), UINT64_C(1226218798581780968));
    CHECK_EQ(bits_of_aggregation(), UINT64_C(12039809273514531524));
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040u); /* flush to zero, denormals are zero */
    CHECK_EQ(bits_of_optimizers(), UINT64_C(1226218798581780968));
    CHECK_EQ(__builtin_ia32_stmxcsr() & 0x8040u, 0x8040u);
    __builtin_ia32_ldmxcsr(before);
#endif
}
