/* FSDP against a reference that is computed by one rank with plain loops: gradients summed by the tree of the manual,
 * the norm in twice the precision of a double, AdamW from its formula's own function on whole arrays. Then what each
 * call promises, with values written by hand. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "fsdp_model.h"

static void run_as(dtrain_strategy strategy, int ranks, int shard_size, int micro, int keep_full)
{
    trial t = trial_of(strategy, ranks, shard_size, micro);
    t.desc.keep_full_grads = keep_full;
    trial_run(t, NULL);
}

TEST(full_grad_and_none_give_the_weights_of_the_reference_bit_for_bit)
{
    const int worlds[] = {1, 2, 3, 4, 6, 8};
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_DDP; strategy++)
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
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_DDP; strategy++)
        for (int ranks = 1; ranks <= 8; ranks *= 2)
            for (int keep = 0; keep < 2; keep++)
                run_as((dtrain_strategy)strategy, ranks, 0, 8, keep);
    run_as(DTRAIN_HYBRID_SHARD, 4, 2, 8, 0);
    run_as(DTRAIN_HYBRID_SHARD, 8, 4, 8, 1);
}

static const dtrain_strategy strategies[4] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP,
                                              DTRAIN_HYBRID_SHARD};

TEST(no_way_of_gathering_changes_a_bit)
{
    for (int i = 0; i < 4; i++)
        for (int way = 1; way < 8; way++) {
            trial t = trial_of(strategies[i], 4, 2, 8);
            t.desc.no_prefetch = way & 1;
            t.desc.no_reshard_after_forward = way >> 1 & 1;
            t.desc.keep_full_grads = way >> 2 & 1;
            t.swapped = way & 1;
            trial_run(t, NULL);
        }
}

TEST(memory_of_the_callers_takes_rank_0s_first_values)
{
    for (int i = 0; i < 4; i++)
        for (int way = 1; way < 4; way++) {
            trial t = trial_of(strategies[i], 4, 2, 4);
            t.own_data = way & 1;
            t.own_grads = way >> 1;
            trial_run(t, NULL);
            t.desc.no_broadcast = 1;
            trial_run(t, NULL);
        }
}

TEST(units_that_a_rank_leaves_out_add_nothing)
{
    const unsigned masks[] = {1u << 2, 1u << 3, 1u << 4,  1u << 0,     3u << 1,    7u << 1,
                              3u << 2, 3u << 3, 15u << 1, 0x8000001eu, 0x80000004u};
    dtrain_comm_desc soon = {0};
    soon.timeout_ms = 5000;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 11; k++) {
            trial t = trial_of(strategies[i], 4, 2, 8);
            t.unused = masks[k];
            trial_run(t, &soon);
            t.desc.no_prefetch = 1;
            trial_run(t, &soon);
            t.desc.keep_full_grads = 1;
            trial_run(t, &soon);
        }
}

TEST(ranks_without_a_micro_batch_join)
{
    dtrain_comm_desc soon = {0};
    soon.timeout_ms = 5000;
    for (int i = 0; i < 4; i++)
        for (int way = 0; way < 4; way++)
            for (int micro = 1; micro < 8; micro++) {
                trial t = trial_of(strategies[i], 4, 2, micro);
                t.desc.keep_full_grads = way & 1;
                soon.progress = way & 2 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
                trial_run(t, &soon);
            }
}

TEST(sixteen_bits_on_the_way_leave_float32_masters)
{
    const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16};
    const int worlds[] = {1, 2, 4, 8};
    for (int i = 0; i < 4; i++)
        for (int w = 0; w < 4; w++)
            for (int k = 1; k < 9; k++) {
                trial t = trial_of(strategies[i], worlds[w], worlds[w] > 1 ? 2 : 1, 8);
                t.desc.gather_dtype = dtypes[k % 3];
                t.desc.reduce_dtype = dtypes[k / 3];
                t.own_data = k & 1;
                trial_run(t, NULL);
            }
}

/* ---- what each call promises, by hand ---- */

static const dtrain_comm_desc hurried = {.timeout_ms = 10000};

/* Runs a body on threads; what it returns must be expected. */
static void on_ranks(int ranks, dtrain_status (*body)(dtrain_comm *, void *), void *user)
{
    dtrain_status status = dtrain_run_threads(ranks, body, user, &hurried);
    if (status != DTRAIN_OK)
        TEST_FAIL("%d ranks: %s", ranks, dtrain_last_error());
}

static dtrain_fsdp *made(dtrain_comm *world, const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc)
{
    dtrain_fsdp *fsdp = NULL;
    if (dtrain_fsdp_create(&fsdp, world, table, count, desc) != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", dtrain_comm_rank(world), dtrain_last_error());
    return fsdp;
}

/* One parameter of unit u after the other; data may be NULL. */
static dtrain_param param(const char *name, size_t elements, int unit, float *data)
{
    dtrain_param made_of;
    memset(&made_of, 0, sizeof made_of);
    made_of.name = name;
    made_of.dtype = DTRAIN_F32;
    made_of.shape[0] = elements;
    made_of.unit = unit;
    made_of.data = data;
    return made_of;
}

static void check_floats(const float *got, const float *expected, size_t count, const char *what)
{
    for (size_t i = 0; i < count; i++)
        if (!(fabsf(got[i] - expected[i]) <= 1e-6f * fabsf(expected[i])))
            TEST_FAIL("%s: element %zu is %.9g, expected %.9g", what, i, (double)got[i], (double)expected[i]);
}

/* Forward and backward of a unit whose gradient is given. */
static void train_unit(dtrain_fsdp *fsdp, int unit, const char *name, const float *g, size_t count)
{
    CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
    float *grad = dtrain_fsdp_grad(fsdp, name);
    for (size_t i = 0; i < count; i++)
        grad[i] += g[i];
    CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
}

static dtrain_status weights_of_two_ranks(dtrain_comm *world, void *user)
{
    float weights[] = {10, 20, 30, 40};
    dtrain_param table = param("weight", 4, 0, weights);
    dtrain_fsdp *fsdp = made(world, &table, 1, NULL);
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    int rank = dtrain_comm_rank(world);
    (void)user;
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    CHECK_EQ(count, 1);
    CHECK_EQ(slices[0].count, 2);
    CHECK_EQ(slices[0].begin, 2 * rank);
    CHECK_EQ(slices[0].ndim, 1);
    CHECK_EQ(slices[0].shape[0], 4);
    CHECK_EQ(slices[0].layer, -1);
    CHECK(slices[0].grads == NULL && slices[0].state[0] != NULL && slices[0].state[1] != NULL);
    check_floats(slices[0].weights, weights + 2 * rank, 2, "slice");
    CHECK_EQ(dtrain_fsdp_shard_size(fsdp), 2);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(four_weights_on_two_ranks_are_two_each)
{
    on_ranks(2, weights_of_two_ranks, NULL);
}

static dtrain_status gradients_of_two_nodes(dtrain_comm *world, void *user)
{
    dtrain_param table = param("weight", 4, 0, NULL);
    dtrain_fsdp_desc desc = {.strategy = DTRAIN_HYBRID_SHARD, .shard_size = 2};
    const float node[2][4] = {{2, 4, 6, 8}, {10, 20, 30, 40}}, mean[] = {6, 12, 18, 24};
    dtrain_fsdp *fsdp = made(world, &table, 1, &desc);
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    int rank = dtrain_comm_rank(world);
    double total = 0;
    (void)user;
    train_unit(fsdp, 0, "weight", node[rank / 2], 4);
    CHECK_EQ(dtrain_fsdp_finish(fsdp, &total), DTRAIN_OK);
    CHECK(total == 4.0);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    CHECK_EQ(slices[0].count, 2);
    check_floats(slices[0].grads, mean + 2 * (rank % 2), 2, "mean gradient");
    CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
    CHECK(slices[0].grads == NULL);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(gradients_are_scattered_in_a_node_and_summed_between_nodes)
{
    on_ranks(4, gradients_of_two_nodes, NULL);
}

static dtrain_status updates_of_ones_own(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = {.strategy = *(dtrain_strategy *)user};
    float weights[] = {1, 2, 3, 4}, ones[] = {1, 1, 1, 1}, value[4] = {0, 0, 0, 0};
    const float expected[] = {11, 12, 23, 24};
    dtrain_param table = param("weight", 4, 0, NULL);
    dtrain_fsdp *fsdp = made(world, &table, 1, &desc);
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    CHECK_EQ(dtrain_fsdp_set(fsdp, "weight", dtrain_comm_rank(world) == 0 ? weights : NULL, 0), DTRAIN_OK);
    train_unit(fsdp, 0, "weight", ones, 4);
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    for (size_t i = 0; i < slices[0].count; i++)
        slices[0].weights[i] += (slices[0].begin + i) / 2 == 0 ? 10.0f : 20.0f;
    CHECK_EQ(dtrain_fsdp_publish(fsdp), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
    check_floats(dtrain_fsdp_param(fsdp, "weight"), expected, 4, "after publish");
    check_floats(dtrain_fsdp_grad(fsdp, "weight"), value, 4, "gradient after publish");
    CHECK_EQ(dtrain_fsdp_get(fsdp, "weight", value, -1), DTRAIN_OK);
    check_floats(value, expected, 4, "got");
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(an_optimizer_of_ones_own_updates_slices_and_publishes)
{
    for (int i = 0; i < 3; i++) {
        dtrain_strategy strategy = strategies[i];
        on_ranks(2, updates_of_ones_own, &strategy);
    }
}

/* Of three micro-batches the second is left out as a whole, in the pass down or before it. */
static dtrain_status left_out_whole(dtrain_comm *world, void *user)
{
    const int *how = (const int *)user; /* the strategy; whether it has a pass down */
    const float g[4] = {1, 2, 3, 4}, g3[4] = {3, 6, 9, 12}, expected[4] = {4, 8, 12, 16};
    const char *const names[2] = {"a", "b"};
    dtrain_param table[2] = {param("a", 4, 0, NULL), param("b", 4, 1, NULL)};
    dtrain_fsdp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.strategy = (dtrain_strategy)how[0];
    desc.shard_size = 2;
    dtrain_fsdp *fsdp = made(world, table, 2, &desc);
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    CHECK_EQ(dtrain_fsdp_begin(fsdp, 3, 1.0), DTRAIN_OK);
    for (int micro = 0; micro < 3; micro++) {
        CHECK_EQ(forward_pass(fsdp, 2), DTRAIN_OK);
        for (int unit = 1; unit >= 0 && micro != 1; unit--)
            train_unit(fsdp, unit, names[unit], micro == 0 ? g : g3, 4);
        for (int unit = 1; unit >= 0 && micro == 1 && how[1]; unit--) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
            CHECK_EQ(dtrain_fsdp_release(fsdp, unit), DTRAIN_OK);
        }
        if (micro == 1)
            CHECK_EQ(dtrain_fsdp_next(fsdp), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_next(fsdp), DTRAIN_OK); /* of one that has ended by itself */
    CHECK_EQ(dtrain_fsdp_next(fsdp), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "all 3 micro-batches");
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    for (size_t i = 0; i < count; i++)
        check_floats(slices[i].grads, expected + slices[i].begin, slices[i].count, slices[i].name);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_micro_batch_of_which_all_is_left_out_counts)
{
    for (int i = 0; i < 4; i++)
        for (int down = 0; down < 2; down++) {
            int how[2] = {(int)strategies[i], down};
            on_ranks(2, left_out_whole, how);
        }
}

static dtrain_status grouped_parameters(dtrain_comm *world, void *user)
{
    float ones[4][3] = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}}, value[3];
    dtrain_param_group groups[] = {{"h.1.w", 10, 0, 0}, {"h.*", 2, 0.5f, 0}, {"ln", 0, 0, 1}};
    dtrain_fsdp_desc desc = {.groups = groups, .group_count = 3};
    const char *names[] = {"h.0.w", "h.1.w", "ln", "rest"};
    /* w - lr factor (g + decay w), with g = 1, lr = 0.01 and a decay of 0.1 unless the group has its own */
    const float expected[] = {1 - 0.02f * 1.5f, 1 - 0.1f * 1.1f, 1 - 0.01f * 1.0f, 1 - 0.01f * 1.1f};
    dtrain_param table[4];
    (void)user;
    desc.optimizer.kind = DTRAIN_SGD;
    desc.optimizer.weight_decay = 0.1f;
    for (int i = 0; i < 4; i++)
        table[i] = param(names[i], 3, i / 2, ones[i]);
    dtrain_fsdp *fsdp = made(world, table, 4, &desc);
    memset(groups, 0x55, sizeof groups); /* read by create alone */
    for (int u = 1; u >= 0; u--) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
        for (int i = 0; i < 6; i++)
            dtrain_fsdp_grad(fsdp, names[2 * u + i / 3])[i % 3] += 1;
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, u), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_step(fsdp, 0.01f), DTRAIN_OK);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(dtrain_fsdp_get(fsdp, names[i], value, -1), DTRAIN_OK);
        for (int k = 0; k < 3; k++)
            check_floats(value + k, expected + i, 1, names[i]);
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(the_first_group_that_fits_a_name_counts)
{
    on_ranks(1, grouped_parameters, NULL);
    on_ranks(2, grouped_parameters, NULL);
}

/* Gradients are sums of examples: 6 of weight 3 and 2 of weight 1 are 8 of weight 4. */
static dtrain_status weighted_batches(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = {.strategy = *(dtrain_strategy *)user, .shard_size = 1};
    dtrain_param table = param("weight", 5, 0, NULL);
    dtrain_fsdp *fsdp = made(world, &table, 1, &desc);
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    int rank = dtrain_comm_rank(world);
    for (int way = 0; way < 3; way++) { /* weights 3, 1, and 0 with no data; weights 0; no announcement */
        const float sums[3][3] = {{6, 2, 0}, {3, 5, 1}, {3, 5, 1}}, expected[] = {2, 9, 3};
        const double weights[3][3] = {{3, 1, 0}, {0, 0, 0}, {1, 1, 1}}, totals[] = {4, 0, 3};
        double total = -1;
        float g[5];
        for (int i = 0; i < 5; i++)
            g[i] = sums[way][rank];
        if (way < 2)
            CHECK_EQ(dtrain_fsdp_begin(fsdp, !(way == 0 && rank == 2), weights[way][rank]), DTRAIN_OK);
        if (way == 0 && rank == 2)
            CHECK_EQ(dtrain_fsdp_join(fsdp), DTRAIN_OK);
        else {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
            CHECK_EQ(dtrain_fsdp_release(fsdp, 0), DTRAIN_OK);
            train_unit(fsdp, 0, "weight", g, 5);
        }
        CHECK_EQ(dtrain_fsdp_finish(fsdp, &total), DTRAIN_OK);
        CHECK(total == totals[way]);
        CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
        for (size_t i = 0; i < slices[0].count; i++)
            check_floats(slices[0].grads + i, expected + way, 1, "weighted gradient");
        CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(gradients_are_divided_once_by_the_weight_of_all_ranks)
{
    for (int i = 0; i < 4; i++) {
        dtrain_strategy strategy = strategies[i];
        on_ranks(3, weighted_batches, &strategy);
    }
}

#define MANY 20011

static dtrain_status values_by_name(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = {.strategy = *(dtrain_strategy *)user, .shard_size = 2};
    dtrain_param table[3] = {param("a", 3, 0, NULL), param("many", MANY, 1, NULL), param("c", 2, 2, NULL)};
    float *value = (float *)malloc(MANY * sizeof(float));
    int rank = dtrain_comm_rank(world), last = dtrain_comm_size(world) - 1;
    dtrain_fsdp *fsdp = made(world, table, 3, &desc);
    for (int round = 0; round < 3; round++) {
        if (round == 1)
            CHECK_EQ(dtrain_fsdp_gather(fsdp, 1), DTRAIN_OK); /* set while it is held */
        if (round == 2)
            CHECK_EQ(dtrain_fsdp_unshard(fsdp), DTRAIN_OK);
        for (int i = 0; i < MANY; i++)
            value[i] = rank == last ? (float)(i + round) : -1.0f;
        CHECK_EQ(dtrain_fsdp_set(fsdp, "many", rank == last ? value : NULL, last), DTRAIN_OK);
        CHECK_EQ(round == 2 ? dtrain_fsdp_unshard(fsdp) : dtrain_fsdp_gather(fsdp, 1), DTRAIN_OK);
        for (int i = 0; i < MANY; i += 37)
            CHECK(dtrain_fsdp_param(fsdp, "many")[i] == (float)(i + round));
        memset(value, 0, MANY * sizeof(float));
        CHECK_EQ(dtrain_fsdp_get(fsdp, "many", rank == 1 ? value : NULL, 1), DTRAIN_OK);
        for (int i = 0; i < MANY; i++)
            CHECK(value[i] == (rank == 1 ? (float)(i + round) : 0.0f));
        if (round < 2)
            CHECK_EQ(dtrain_fsdp_release(fsdp, 1), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_get(fsdp, "c", value, -1), DTRAIN_OK);
    CHECK(value[0] == 0.0f && value[1] == 0.0f);
    dtrain_fsdp_destroy(fsdp);
    free(value);
    return DTRAIN_OK;
}

TEST(a_parameter_is_set_and_got_by_its_name)
{
    for (int i = 0; i < 4; i++) {
        dtrain_strategy strategy = strategies[i];
        on_ranks(2, values_by_name, &strategy);
        on_ranks(4, values_by_name, &strategy);
    }
}

static dtrain_status left_in_memory(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = {.strategy = *(dtrain_strategy *)user, .shard_size = 1};
    float a[5] = {1, 2, 3, 4, 5}, b[3] = {6, 7, 8}, ones[5] = {1, 1, 1, 1, 1};
    const float expected_a[] = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f}, expected_b[] = {5.5f, 6.5f, 7.5f};
    dtrain_param table[2] = {param("a", 5, 0, a), param("b", 3, 1, b)};
    desc.optimizer.kind = DTRAIN_SGD;
    dtrain_fsdp *fsdp = made(world, table, 2, &desc);
    train_unit(fsdp, 1, "b", ones, 3);
    train_unit(fsdp, 0, "a", ones, 5);
    CHECK_EQ(dtrain_fsdp_step(fsdp, 0.5f), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_unshard(fsdp), DTRAIN_OK);
    dtrain_fsdp_destroy(fsdp);
    check_floats(a, expected_a, 5, "a");
    check_floats(b, expected_b, 3, "b");
    return DTRAIN_OK;
}

TEST(unshard_and_destroy_leave_full_parameters_to_the_caller)
{
    for (int i = 0; i < 4; i++) {
        dtrain_strategy strategy = strategies[i];
        on_ranks(3, left_in_memory, &strategy);
    }
}

/* The tied unit's gradient is written first at the other end of the pass, on a page that the units there share. */
static dtrain_status tied_embedding(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = {.strategy = *(dtrain_strategy *)user, .shard_size = 2};
    dtrain_param table[4] = {param("emb", 4, 0, NULL), param("h1", 4, 1, NULL), param("h2", 4, 2, NULL),
                             param("h3", 4, 3, NULL)};
    const char *names[] = {"emb", "h1", "h2", "h3"};
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    table[0].tied = 1;
    dtrain_fsdp *fsdp = made(world, table, 4, &desc);
    for (int again = 0; again < 4; again++) { /* held all the time, or gathered again beside the last unit */
        for (int u = 0; u < 4; u++) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
            if (u > 0 || again % 2)
                CHECK_EQ(dtrain_fsdp_release(fsdp, u), DTRAIN_OK);
        }
        for (int u = 3; u >= 0; u--) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
            if (u == 3 && again % 2)
                CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
            for (int i = 0; i < 4; i++) {
                dtrain_fsdp_grad(fsdp, names[u])[i] += (float)(u + 1);
                dtrain_fsdp_grad(fsdp, "emb")[i] += u == 3 ? 10.0f : 0.0f;
            }
            CHECK_EQ(dtrain_fsdp_reduce(fsdp, u), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
        CHECK_EQ(count, 4);
        for (size_t k = 0; k < count; k++)
            for (size_t i = 0; i < slices[k].count; i++)
                CHECK(slices[k].grads[i] == (float)slices[k].unit + (slices[k].unit == 0 ? 11.0f : 1.0f));
        CHECK_EQ(dtrain_fsdp_step(fsdp, 0.0f), DTRAIN_OK);
        for (int u = 0; u < 4; u++)
            for (int i = 0; i < 4; i++)
                CHECK(dtrain_fsdp_grad(fsdp, names[u])[i] == 0.0f);
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_tied_parameters_gradient_comes_from_both_ends_of_the_pass)
{
    for (int i = 0; i < 4; i++) {
        dtrain_strategy strategy = strategies[i];
        on_ranks(2, tied_embedding, &strategy);
        on_ranks(4, tied_embedding, &strategy);
    }
}

static dtrain_status clipped_again(dtrain_comm *world, void *user)
{
    dtrain_param table = param("weight", 2, 0, NULL);
    const float g[] = {3, 4};
    dtrain_fsdp *fsdp = made(world, &table, 1, NULL);
    const double norms[] = {5, 5, 1, 1, 0.25};
    const float most[] = {0, 1, 2, 0.25f, 0};
    (void)user;
    train_unit(fsdp, 0, "weight", g, 2);
    for (int i = 0; i < 5; i++) {
        double norm = 0;
        CHECK_EQ(dtrain_fsdp_clip_grad_norm(fsdp, most[i], &norm), DTRAIN_OK);
        CHECK(fabs(norm - norms[i]) < 1e-6);
    }
    CHECK_EQ(dtrain_fsdp_clip_grad_norm(fsdp, -1.0f, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "max_norm is -1");
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(each_clip_measures_what_the_one_before_has_left)
{
    on_ranks(2, clipped_again, NULL);
}

static dtrain_status scaled_loss(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = {
        .strategy = *(dtrain_strategy *)user, .shard_size = 2, .loss_scale = 8, .loss_scale_steps = 2};
    dtrain_param table = param("weight", 5, 0, NULL);
    const float scales[] = {8, 8, 4, 4, 8}; /* before each step; the second overflows, two good ones double it */
    float value[5], expected = 0;
    int rank = dtrain_comm_rank(world);
    desc.optimizer.kind = DTRAIN_SGD;
    dtrain_fsdp *fsdp = made(world, &table, 1, &desc);
    for (int step = 0; step < 5; step++) {
        float scale = dtrain_fsdp_loss_scale(fsdp), g[5] = {scale, scale, scale, scale, scale};
        CHECK(scale == scales[step]);
        if (step == 1 && rank == 1)
            g[4] = INFINITY;
        train_unit(fsdp, 0, "weight", g, 5);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 1.0f), DTRAIN_OK);
        expected -= step == 1 ? 0.0f : 1.0f;
        CHECK_EQ(dtrain_fsdp_get(fsdp, "weight", value, -1), DTRAIN_OK);
        for (int i = 0; i < 5; i++)
            CHECK(value[i] == expected);
        CHECK_EQ(dtrain_fsdp_get_stats(fsdp).skipped, step >= 1);
        CHECK_EQ(dtrain_fsdp_get_stats(fsdp).steps, step + (step < 1));
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(an_overflow_on_one_rank_skips_the_step_on_all)
{
    for (int i = 0; i < 4; i++) {
        dtrain_strategy strategy = strategies[i];
        on_ranks(4, scaled_loss, &strategy);
    }
}

static dtrain_status several_objects(dtrain_comm *world, void *user)
{
    dtrain_fsdp *fsdp[3];
    float ones[] = {1, 1, 1}, value[3];
    dtrain_param table = param("weight", 3, 0, NULL);
    (void)user;
    for (int i = 0; i < 200; i++) {
        dtrain_fsdp_desc desc = {.strategy = strategies[i % 4], .shard_size = 2};
        fsdp[0] = made(world, &table, 1, &desc);
        dtrain_fsdp_destroy(fsdp[0]);
    }
    for (int i = 0; i < 3; i++) {
        dtrain_fsdp_desc desc = {.strategy = strategies[i]};
        desc.optimizer.kind = DTRAIN_SGD;
        fsdp[i] = made(world, &table, 1, &desc);
    }
    for (int i = 0; i < 3; i++)
        train_unit(fsdp[i], 0, "weight", ones, 3);
    for (int i = 2; i >= 0; i--)
        CHECK_EQ(dtrain_fsdp_step(fsdp[i], (float)(i + 1)), DTRAIN_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(dtrain_fsdp_get(fsdp[i], "weight", value, -1), DTRAIN_OK);
        CHECK(value[0] == (float)-(i + 1) && value[2] == (float)-(i + 1));
        dtrain_fsdp_destroy(fsdp[i]);
    }
    return DTRAIN_OK;
}

TEST(objects_come_and_go_on_one_group_and_do_not_mix)
{
    on_ranks(4, several_objects, NULL);
}

static dtrain_status count_operations(dtrain_comm *world, void *user)
{
    const dtrain_fsdp_desc *desc = (const dtrain_fsdp_desc *)user;
    dtrain_param table[1] = {{"w", DTRAIN_F32, {6, 10}, 0, 1, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0}};
    dtrain_fsdp *fsdp;
    /* a unit has 40 bytes: three fill a bucket of 100 */
    uint64_t expected = desc->bucket_bytes == 0 ? 1 : desc->bucket_bytes == 1 ? 6 : 2;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, desc), DTRAIN_OK);
    for (int step = 1; step <= 2; step++) {
        uint64_t before = fsdp->copies->number;
        for (int unit = 5; unit >= 0; unit--) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
            dtrain_fsdp_grad(fsdp, "w")[10 * unit + 9] += (float)(unit + dtrain_comm_rank(world));
            CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_step(fsdp, 1.0f), DTRAIN_OK);
        CHECK_EQ(fsdp->copies->number - before, expected);
        for (int unit = 0; unit < 6; unit++) /* ranks 0 and 1 give unit and unit + 1 */
            CHECK(dtrain_fsdp_param(fsdp, "w")[10 * unit + 9] == -(float)step * ((float)unit + 0.5f));
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(small_units_are_added_over_copies_together)
{
    static const size_t buckets[] = {0, 1, 100};
    for (int i = 0; i < 3; i++) {
        dtrain_fsdp_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.strategy = DTRAIN_DDP;
        desc.optimizer.kind = DTRAIN_SGD;
        desc.bucket_bytes = buckets[i];
        CHECK_EQ(dtrain_run_threads(2, count_operations, &desc, NULL), DTRAIN_OK);
    }
}
