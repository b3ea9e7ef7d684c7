/* Modules against a hand-written loop over the same arithmetic, against finite differences in float64, and against
 * themselves without FSDP; several micro-batches in flight; memory. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "module_model.h"
#include <unistd.h>

/* ---- references ---- */

static float loss_by_hand(const float *w, const batch *b)
{
    float a[ROWS * HIDDEN], c[ROWS * HIDDEN];
    size_t begin[PARAMS], rows = b->input.shape[0];
    offsets(begin);
    scale(b->x, w + begin[GAIN], a, rows);
    linear(a, w + begin[W_IN], w + begin[B_IN], c, rows, IN, HIDDEN);
    soft(c, a, rows * HIDDEN);
    for (size_t l = 0; l < DEEP; l++) {
        linear(a, w + begin[W_DEEP] + l * HIDDEN * HIDDEN, w + begin[B_DEEP] + l * HIDDEN, c, rows, HIDDEN, HIDDEN);
        soft(c, a, rows * HIDDEN);
    }
    linear(a, w + begin[W_OUT], w + begin[B_OUT], c, rows, HIDDEN, IN);
    for (size_t i = 0; i < rows * IN; i++)
        c[i] += w[begin[SHIFT] + i % IN];
    scale(c, w + begin[GAIN], a, rows);
    return loss_of(a, b->target, rows * IN);
}

static void linear_f64(const double *x, const double *w, const double *bias, double *y, int in, int out)
{
    for (int j = 0; j < out; j++) {
        y[j] = bias[j];
        for (int i = 0; i < in; i++)
            y[j] += x[i] * w[i * out + j];
    }
}

/* Of one row after the other, in float64; x may differ from the batch's. */
static double loss_f64(const double *w, const double *x, const batch *b)
{
    size_t begin[PARAMS];
    double a[HIDDEN], c[HIDDEN], loss = 0;
    offsets(begin);
    for (size_t r = 0; r < b->input.shape[0]; r++) {
        for (int i = 0; i < IN; i++)
            a[i] = x[r * IN + (size_t)i] * w[begin[GAIN] + (size_t)i];
        linear_f64(a, w + begin[W_IN], w + begin[B_IN], c, IN, HIDDEN);
        for (size_t l = 0; l <= DEEP; l++) {
            for (int i = 0; i < HIDDEN; i++)
                a[i] = c[i] / (1 + fabs(c[i]));
            if (l < DEEP)
                linear_f64(a, w + begin[W_DEEP] + l * HIDDEN * HIDDEN, w + begin[B_DEEP] + l * HIDDEN, c, HIDDEN,
                           HIDDEN);
        }
        linear_f64(a, w + begin[W_OUT], w + begin[B_OUT], c, HIDDEN, IN);
        for (size_t i = 0; i < IN; i++) {
            double y = (c[i] + w[begin[SHIFT] + i]) * w[begin[GAIN] + i] - (double)b->target[r * IN + i];
            loss += y * y / 2;
        }
    }
    return loss;
}

/* The gradient of micro-batch j, from a run without FSDP. */
static void gradient_of(int j, float *grads)
{
    model *m = model_create(1, 1, NULL);
    batch b;
    batch_init(&b, j);
    CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), DTRAIN_OK);
    memcpy(grads, m->grads, sizeof m->grads);
    model_destroy(m);
}

static float tree(const float *x, int n)
{
    int left = 1;
    if (n == 1)
        return x[0];
    while (2 * left < n)
        left *= 2;
    return tree(x, left) + tree(x + left, n - left);
}

/* What a step over micro-batches 0 to n - 1 divides by `weight`. */
static void expected_gradient(int n, float divisor, float *expected)
{
    static float all[MOST][WEIGHTS];
    for (int j = 0; j < n; j++)
        gradient_of(j, all[j]);
    for (size_t e = 0; e < WEIGHTS; e++) {
        float x[MOST];
        for (int j = 0; j < n; j++)
            x[j] = all[j][e];
        expected[e] = tree(x, n) / divisor;
    }
}

/* ---- forward ---- */

static dtrain_status sum_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved_bytes)
{
    (void)user, (void)input, (void)saved_bytes;
    output->ndim = 0;
    return DTRAIN_OK;
}

static dtrain_status sum_forward(void *user, const dtrain_layer_context *c)
{
    const float *w = c->params[0];
    (void)user;
    out_of(c)[0] = (w[0] + w[1] + w[2] + w[3]) * in_of(c)[0];
    return DTRAIN_OK;
}

static dtrain_status no_backward(void *user, const dtrain_layer_context *c)
{
    (void)user, (void)c;
    return DTRAIN_OK;
}

static dtrain_status twenty(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    const char *names[] = {"weight"};
    float ten[] = {1, 2, 3, 4}, two = 2;
    size_t one = 1;
    dtrain_param table[] = {{"weight", DTRAIN_F32, {4}, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0}};
    dtrain_layer layer = {"sum", names, 1, 0, sum_shape, sum_forward, no_backward, NULL, NULL, 0};
    dtrain_tensor input, output;
    dtrain_fsdp *fsdp;
    dtrain_module *module;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, &r->desc), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_set(fsdp, "weight", ten, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_module_create(&module, &layer, 1, table, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_tensor_view(&input, DTRAIN_F32, 1, &one, &two), DTRAIN_OK);
    for (int pass = 0; pass < 3; pass++) {
        CHECK_EQ(dtrain_fsdp_forward(fsdp, module, pass == 2 ? DTRAIN_EVALUATE : 0, &input, NULL, &output), DTRAIN_OK);
        CHECK_EQ(output.count, 1);
        CHECK(((float *)output.data)[0] == 20.0f);
    }
    dtrain_module_destroy(module);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(the_sum_of_1_2_3_4_times_2_is_20_on_every_rank_prefetched_or_not)
{
    run r;
    memset(&r, 0, sizeof r);
    for (r.desc.no_prefetch = 0; r.desc.no_prefetch < 2; r.desc.no_prefetch++)
        under_every_strategy(twenty, &r, 1);
}

static dtrain_status forwards(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    model *m = model_create(0, 2, dtrain_comm_allocator(world));
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    for (int pass = 0; pass < 6; pass++) {
        batch b;
        float loss = 0;
        batch_init(&b, pass * 4 + dtrain_comm_rank(world));
        CHECK_EQ(forward(fsdp, m, pass % 3 - 1, &b, &loss), DTRAIN_OK);
        CHECK(loss == loss_by_hand(m->weights, &b));
    }
    CHECK_EQ(m->users[FIRST].forwards, 6);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(forward_equals_a_loop_by_hand_bit_for_bit)
{
    run r;
    memset(&r, 0, sizeof r);
    under_every_strategy(forwards, &r, 1);
}

/* ---- gradients ---- */

TEST(backward_without_fsdp_refuses_a_parameter_without_a_gradient)
{
    model *m = model_create(1, 1, NULL);
    batch b;
    batch_init(&b, 1);
    m->module->table[0].grad = NULL;
    CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "is not frozen, and its grad is NULL");
    CHECK_CONTAINS(dtrain_last_error(), m->table[0].name);
    model_destroy(m);
}

TEST(gradients_are_those_of_finite_differences_in_float64)
{
    model *m = model_create(1, 1, NULL);
    double w[WEIGHTS], x[ROWS * IN], step = 1e-5;
    float d_input[ROWS * IN];
    dtrain_tensor gradient;
    batch b;
    batch_init(&b, 1);
    CHECK_EQ(b.input.shape[0], ROWS);
    CHECK_EQ(dtrain_tensor_view(&gradient, DTRAIN_F32, 2, b.input.shape, d_input), DTRAIN_OK);
    CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, &gradient), DTRAIN_OK);
    for (size_t e = 0; e < WEIGHTS; e++)
        w[e] = (double)m->weights[e];
    for (size_t i = 0; i < ROWS * IN; i++)
        x[i] = (double)b.x[i];
    for (size_t e = 0; e < WEIGHTS + ROWS * IN; e++) {
        double *at = e < WEIGHTS ? &w[e] : &x[e - WEIGHTS], kept = *at, up, down;
        double got = e < WEIGHTS ? (double)m->grads[e] : (double)d_input[e - WEIGHTS];
        *at = kept + step;
        up = loss_f64(w, x, &b);
        *at = kept - step;
        down = loss_f64(w, x, &b);
        *at = kept;
        double expected = (up - down) / (2 * step);
        if (e >= m->begin[SHIFT] && e < WEIGHTS) /* frozen: none */
            expected = 0;
        if (!(fabs(got - expected) <= 2e-5 * (1 + fabs(expected))))
            TEST_FAIL("element %zu has gradient %.9g, expected %.9g", e, got, expected);
    }
    CHECK_EQ(m->users[FIRST].backwards, 1);
    model_destroy(m);
}

/* This rank's slices of the gradient are those of `expected`. */
static void check_slices(dtrain_fsdp *fsdp, const model *m, const float *expected)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    CHECK_EQ(count, PARAMS + 2 * (DEEP - 1));
    for (size_t i = 0; i < count; i++) {
        size_t p = 0, box;
        while (strcmp(table_of_model[p].name, slices[i].name) != 0)
            p++;
        box = dtrain_param_elements(&table_of_model[p]) / (slices[i].layer < 0 ? 1 : slices[i].shape[0]);
        box *= slices[i].layer < 0 ? 0 : (size_t)slices[i].layer;
        CHECK_EQ(slices[i].grads == NULL, p == SHIFT);
        if (slices[i].grads != NULL)
            CHECK(memcmp(slices[i].grads, expected + m->begin[p] + box + slices[i].begin,
                         slices[i].count * sizeof(float)) == 0);
    }
}

/* All micro-batches of a rank are run forward before the first goes backward. */
static dtrain_status trains(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    model *m = model_create(0, r->micro, dtrain_comm_allocator(world));
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    batch b[MOST], other;
    batch_init(&other, 77);
    for (int step = 0; step < 2; step++) {
        CHECK_EQ(dtrain_fsdp_begin(fsdp, r->micro, r->micro), DTRAIN_OK);
        for (int i = 0; i < r->micro; i++) {
            batch_init(&b[i], i * ranks + rank);
            CHECK_EQ(forward(fsdp, m, i, &b[i], NULL), DTRAIN_OK);
            memset(b[i].x, 0, sizeof b[i].x); /* the input was copied */
        }
        CHECK_EQ(forward(fsdp, m, DTRAIN_EVALUATE, &other, NULL), DTRAIN_OK);
        for (int i = 0; i < r->micro; i++)
            CHECK_EQ(dtrain_fsdp_backward(fsdp, m->module, i, NULL, NULL), DTRAIN_OK);
        check_slices(fsdp, m, r->expected);
        CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
    }
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

static void train_on(int ranks, int micro)
{
    static float expected[WEIGHTS];
    run r;
    memset(&r, 0, sizeof r);
    r.micro = micro;
    r.expected = expected;
    expected_gradient(ranks * micro, (float)(ranks * micro), expected);
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_HYBRID_SHARD; strategy++)
        for (r.desc.keep_full_grads = 0; r.desc.keep_full_grads < 2; r.desc.keep_full_grads++) {
            int before = test_failures;
            r.desc.strategy = (dtrain_strategy)strategy;
            r.desc.shard_size = ranks % 2 == 0 ? 2 : 1;
            if (r.desc.keep_full_grads && micro > 1 && ranks > 1)
                continue; /* folds another order of micro-batches */
            CHECK_EQ(dtrain_run_threads(ranks, trains, &r, NULL), DTRAIN_OK);
            if (test_failures != before)
                TEST_FAIL("strategy %d on %d ranks, keep_full_grads %d", strategy, ranks, r.desc.keep_full_grads);
        }
}

TEST(gradients_over_ranks_are_the_tree_of_those_of_one)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        train_on(ranks, 1);
}

TEST(two_and_more_micro_batches_in_flight_do_not_disturb_each_other)
{
    train_on(1, 2);
    train_on(1, 5);
    train_on(2, 2);
    train_on(4, 2);
}

static dtrain_status publishes_between(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    model *m = model_create(0, 1, NULL);
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    double norm = 0, squares = 0;
    batch b;
    batch_init(&b, dtrain_comm_rank(world));
    CHECK_EQ(forward(fsdp, m, 0, &b, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_publish(fsdp), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_backward(fsdp, m->module, 0, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_clip_grad_norm(fsdp, 0, &norm), DTRAIN_OK);
    for (size_t e = 0; e < WEIGHTS; e++)
        squares += (double)r->expected[e] * (double)r->expected[e];
    CHECK(fabs(norm - sqrt(squares)) < 1e-9 * norm);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(what_is_dropped_between_forward_and_backward_is_gathered_again_tied_parameters_too)
{
    static float expected[WEIGHTS];
    run r;
    memset(&r, 0, sizeof r);
    r.expected = expected;
    r.desc.strategy = DTRAIN_FULL_SHARD;
    for (int ranks = 1; ranks <= 4; ranks++) {
        expected_gradient(ranks, (float)ranks, expected);
        CHECK_EQ(dtrain_run_threads(ranks, publishes_between, &r, NULL), DTRAIN_OK);
    }
}

/* ---- memory ---- */

static dtrain_status steady(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    int rank = dtrain_comm_rank(world);
    model *m = model_create(0, 2, dtrain_comm_allocator(world));
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    uint64_t warm = 0;
    batch b[3];
    for (int step = 1; step <= 20; step++) {
        if (step == 3) {
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            warm = __atomic_load_n(r->allocations, __ATOMIC_RELAXED);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
        for (int i = 0; i < 2; i++) {
            batch_init(&b[i], step > 2 ? step * 2 + i + rank : 1); /* the first are the largest */
            CHECK_EQ(forward(fsdp, m, i, &b[i], NULL), DTRAIN_OK);
        }
        batch_init(&b[2], 1);
        CHECK_EQ(forward(fsdp, m, DTRAIN_EVALUATE, &b[2], NULL), DTRAIN_OK);
        for (int i = 0; i < 2; i++)
            CHECK_EQ(dtrain_fsdp_backward(fsdp, m->module, i, NULL, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 0.01f), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK(warm > 0);
    CHECK_EQ(__atomic_load_n(r->allocations, __ATOMIC_RELAXED), warm);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(steps_3_to_20_allocate_nothing)
{
    run r;
    memset(&r, 0, sizeof r);
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_HYBRID_SHARD; strategy++) {
        heap h = {0, 0};
        dtrain_allocator allocator = {count_or_refuse, &h, 0, 0};
        dtrain_comm_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.allocator = &allocator;
        r.allocations = &h.calls;
        r.desc.strategy = (dtrain_strategy)strategy;
        r.desc.shard_size = 2;
        CHECK_EQ(dtrain_run_threads(4, steady, &r, &desc), DTRAIN_OK);
        CHECK_EQ(allocator.bytes, 0);
    }
}

/* ---- memory of FSDP while micro-batches follow each other ---- */

#define BIG (1 << 18) /* elements of a unit: 1 MiB */
#define BIG_UNITS 4

static dtrain_status touch(void *user, const dtrain_layer_context *c)
{
    (void)user;
    out_of(c)[0] = c->params[0][0];
    return DTRAIN_OK;
}

/* Rank 1 is slow, so that rank 0's reduction before this one is still on its way. */
static dtrain_status touch_back(void *user, const dtrain_layer_context *c)
{
    if (*(int *)user == 1)
        usleep(5000);
    c->grads[0][0] += 1.0f;
    return DTRAIN_OK;
}

static dtrain_status big(dtrain_comm *world, void *user)
{
    static const char *const names[] = {"w"};
    int rank = dtrain_comm_rank(world);
    dtrain_param table[] = {{"w", DTRAIN_F32, {BIG_UNITS, BIG}, 0, 1, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0}};
    dtrain_layer layers[BIG_UNITS];
    dtrain_fsdp_desc desc;
    dtrain_fsdp_plan_result plan;
    dtrain_fsdp *fsdp = NULL;
    dtrain_module *module = NULL;
    batch b;
    (void)user;
    memset(&desc, 0, sizeof desc);
    memset(layers, 0, sizeof layers);
    desc.micro_batches = 2;
    for (int i = 0; i < BIG_UNITS; i++) {
        dtrain_layer layer = {"big", names, 1, i, NULL, touch, touch_back, NULL, &rank, 0};
        layers[i] = layer;
    }
    batch_init(&b, 0);
    CHECK_EQ(dtrain_fsdp_plan(table, 1, &desc, 2, rank, &plan), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_module_create(&module, layers, BIG_UNITS, table, 1, NULL), DTRAIN_OK);
    for (int i = 0; i < 4; i++) {
        dtrain_tensor output;
        CHECK_EQ(dtrain_fsdp_forward(fsdp, module, 0, &b.input, NULL, &output), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_backward(fsdp, module, 0, &b.input, NULL), DTRAIN_OK);
        if (i % 2 == 1)
            CHECK_EQ(dtrain_fsdp_step(fsdp, 0.01f), DTRAIN_OK);
    }
    if (dtrain_fsdp_get_stats(fsdp).peak_bytes > plan.peak + 65536)
        TEST_FAIL("rank %d used %zu bytes, the plan says %zu", rank, dtrain_fsdp_get_stats(fsdp).peak_bytes, plan.peak);
    dtrain_module_destroy(module);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_second_micro_batch_stays_within_the_plan)
{
    CHECK_EQ(dtrain_run_threads(2, big, NULL, NULL), DTRAIN_OK);
}
