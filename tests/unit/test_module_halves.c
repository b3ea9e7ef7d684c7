/* Backward passes in halves, other micro-batches between them, and layers that recompute what they save: the bits of
 * whole passes, with and without FSDP; what is called how often; memory; wrong uses and failures. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "module_model.h"

#define MICRO 5
#define PLACES 3

/* The calls of the last stage but one of ZB-H1: forward passes are two ahead, weights one behind. */
typedef struct call {
    char what;
    int micro_batch;
} call;

static const call order[] = {{'F', 0}, {'F', 1}, {'I', 0}, {'F', 2}, {'I', 1}, {'W', 0}, {'F', 3}, {'I', 2},
                             {'W', 1}, {'F', 4}, {'I', 3}, {'W', 2}, {'I', 4}, {'W', 3}, {'W', 4}};

static dtrain_status backward_input(dtrain_fsdp *fsdp, dtrain_module *module, int place, const dtrain_tensor *d_output,
                                    const dtrain_tensor *d_input)
{
    return dtrain__module_backward(DTRAIN__MODULE_INPUTS, fsdp, module, place, d_output, d_input);
}

static dtrain_status backward_weights(dtrain_fsdp *fsdp, dtrain_module *module, int place)
{
    return dtrain__module_backward(DTRAIN__MODULE_WEIGHTS, fsdp, module, place, NULL, NULL);
}

static dtrain_status make(const call *c, dtrain_fsdp *fsdp, model *m, batch *b, const dtrain_tensor *d_input)
{
    int place = c->micro_batch % PLACES;
    if (c->what == 'F')
        return forward(fsdp, m, place, b, NULL);
    if (c->what == 'I')
        return backward_input(fsdp, m->module, place, NULL, d_input);
    return backward_weights(fsdp, m->module, place);
}

/* Runs the order with the micro-batches first, first + stride, ... and compares the gradients of inputs. */
static void in_halves(dtrain_fsdp *fsdp, model *m, int first, int stride, float d_inputs[MICRO][ROWS * IN])
{
    batch b[MICRO];
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        int j = order[i].micro_batch;
        dtrain_tensor d_input;
        if (order[i].what == 'F')
            batch_init(&b[j], first + j * stride);
        CHECK_EQ(dtrain_tensor_view(&d_input, DTRAIN_F32, 2, b[j].input.shape, d_inputs[j]), DTRAIN_OK);
        CHECK_EQ(make(&order[i], fsdp, m, &b[j], &d_input), DTRAIN_OK);
    }
}

/* ---- whole passes, one micro-batch after the other ---- */

static void whole(model *m, int first, int stride, float d_inputs[MICRO][ROWS * IN])
{
    for (int j = 0; j < MICRO; j++) {
        dtrain_tensor d_input;
        batch b;
        batch_init(&b, first + j * stride);
        CHECK_EQ(dtrain_tensor_view(&d_input, DTRAIN_F32, 2, b.input.shape, d_inputs[j]), DTRAIN_OK);
        CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, &d_input), DTRAIN_OK);
    }
}

static model *variant_create(int owns, int apart, int recompute, int places)
{
    variant.apart = apart;
    variant.recompute = recompute;
    model *m = model_create(owns, places, NULL);
    return m;
}

TEST(halves_and_recomputed_layers_give_the_bits_of_whole_passes)
{
    static float expected[MICRO][ROWS * IN], got[MICRO][ROWS * IN];
    model *reference = variant_create(1, 0, 0, 1);
    whole(reference, 0, 1, expected);
    for (int apart = 0; apart <= 3; apart++)
        for (int recompute = 0; recompute <= 1; recompute++)
            for (int halves = 0; halves <= 1; halves++) {
                model *m = variant_create(1, apart, recompute, PLACES);
                memset(got, 0, sizeof got);
                if (halves)
                    in_halves(NULL, m, 0, 1, got);
                else
                    whole(m, 0, 1, got);
                if (memcmp(m->grads, reference->grads, sizeof m->grads) != 0 || memcmp(got, expected, sizeof got) != 0)
                    TEST_FAIL("apart %d, recompute %d, halves %d", apart, recompute, halves);
                CHECK_EQ(m->users[FIRST].forwards, MICRO * (1 + recompute * (1 + halves)));
                CHECK_EQ(m->users[FIRST].backwards, MICRO);
                model_destroy(m);
            }
    variant.apart = variant.recompute = 0;
    model_destroy(reference);
}

/* The first linear layer alone, whose weights wait for the second half: what it is given for its output is gone then.
 */
TEST(the_gradient_that_a_module_is_given_is_kept_for_the_second_half)
{
    static const char *const names[] = {"w_in", "b_in"};
    float sums[2][IN * HIDDEN + HIDDEN], d[2][ROWS * HIDDEN];
    model *m = (model *)calloc(1, sizeof *m);
    dtrain_param table[2] = {table_of_model[W_IN], table_of_model[B_IN]};
    dtrain_module_desc desc = {2, NULL};
    dtrain_tensor output, d_output;
    linear_init(m, FIRST, "first", names, 0, IN, HIDDEN);
    for (size_t e = 0; e < WEIGHTS; e++)
        m->weights[e] = weight(e);
    for (int halves = 0; halves < 2; halves++) {
        batch b;
        memset(sums[halves], 0, sizeof sums[halves]);
        table[0].unit = table[1].unit = 0;
        table[0].data = m->weights;
        table[1].data = m->weights + IN * HIDDEN;
        table[0].grad = sums[halves];
        table[1].grad = sums[halves] + IN * HIDDEN;
        CHECK_EQ(dtrain_module_create(&m->module, &m->layers[FIRST], 1, table, 2, &desc), DTRAIN_OK);
        for (int j = 0; j < 2; j++) {
            for (size_t i = 0; i < ROWS * HIDDEN; i++)
                d[j][i] = dtrain_random_normal(20 + (uint64_t)j, i);
            batch_init(&b, j);
            CHECK_EQ(dtrain_fsdp_forward(NULL, m->module, j, &b.input, NULL, &output), DTRAIN_OK);
            CHECK_EQ(dtrain_tensor_view(&d_output, DTRAIN_F32, 2, output.shape, d[j]), DTRAIN_OK);
            if (halves)
                CHECK_EQ(backward_input(NULL, m->module, j, &d_output, NULL), DTRAIN_OK);
            else
                CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, j, &d_output, NULL), DTRAIN_OK);
            memset(d[j], 0x55, sizeof d[j]);
        }
        for (int j = 0; halves && j < 2; j++)
            CHECK_EQ(backward_weights(NULL, m->module, j), DTRAIN_OK);
        dtrain_module_destroy(m->module);
    }
    CHECK(memcmp(sums[0], sums[1], sizeof sums[0]) == 0);
    CHECK(sums[0][0] != 0.0f);
    free(m);
}

/* ---- over ranks ---- */

static float tree(const float *x, int n)
{
    int left = 1;
    if (n == 1)
        return x[0];
    while (2 * left < n)
        left *= 2;
    return tree(x, left) + tree(x + left, n - left);
}

/* The tree over micro-batches of the trees over ranks, divided by their number: each gradient from a run of its own. */
static void expected_gradient(int ranks, float *expected)
{
    static float all[4 * MICRO][WEIGHTS];
    int n = ranks * MICRO;
    for (int j = 0; j < n; j++) {
        model *m = variant_create(1, 0, 0, 1);
        batch b;
        batch_init(&b, j);
        CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), DTRAIN_OK);
        memcpy(all[j], m->grads, sizeof m->grads);
        model_destroy(m);
    }
    for (size_t e = 0; e < WEIGHTS; e++) {
        float sums[MICRO], x[4];
        for (int i = 0; i < MICRO; i++) {
            for (int rank = 0; rank < ranks; rank++)
                x[rank] = all[i * ranks + rank][e];
            sums[i] = tree(x, ranks);
        }
        expected[e] = tree(sums, MICRO) / (float)n;
    }
}

static void check_slices(dtrain_fsdp *fsdp, const model *m, const float *expected)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    for (size_t i = 0; i < count; i++) {
        size_t p = 0, box = 0;
        while (strcmp(table_of_model[p].name, slices[i].name) != 0)
            p++;
        if (slices[i].layer >= 0)
            box = dtrain_param_elements(&table_of_model[p]) / slices[i].shape[0] * (size_t)slices[i].layer;
        if (slices[i].grads != NULL && memcmp(slices[i].grads, expected + m->begin[p] + box + slices[i].begin,
                                              slices[i].count * sizeof(float)) != 0)
            TEST_FAIL("%s differs", slices[i].name);
    }
}

static dtrain_status halves_over_ranks(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    static _Thread_local float d_inputs[MICRO][ROWS * IN];
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    model *m = model_create(0, PLACES, dtrain_comm_allocator(world));
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    for (int step = 0; step < 2; step++) {
        CHECK_EQ(dtrain_fsdp_begin(fsdp, MICRO, MICRO), DTRAIN_OK);
        in_halves(fsdp, m, rank, ranks, d_inputs);
        check_slices(fsdp, m, r->expected);
        CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(halves_over_ranks_reduce_the_tree_of_all_micro_batches)
{
    static float expected[WEIGHTS];
    for (int ranks = 1; ranks <= 4; ranks++) {
        expected_gradient(ranks, expected);
        for (int apart = 0; apart <= 3; apart++)
            for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_HYBRID_SHARD; strategy++) {
                run r;
                int before = test_failures;
                memset(&r, 0, sizeof r);
                r.expected = expected;
                r.desc.strategy = (dtrain_strategy)strategy;
                r.desc.shard_size = ranks % 2 == 0 ? 2 : 1;
                variant.apart = apart;
                variant.recompute = apart % 2;
                CHECK_EQ(dtrain_run_threads(ranks, halves_over_ranks, &r, NULL), DTRAIN_OK);
                if (test_failures != before)
                    TEST_FAIL("strategy %d on %d ranks, apart %d", strategy, ranks, apart);
            }
    }
    variant.apart = variant.recompute = 0;
}

/* ---- memory ---- */

/* What a module takes of memory, and how often a second step asks for more. */
static size_t bytes_of(int recompute, int halves, uint64_t *more)
{
    static float d_inputs[MICRO][ROWS * IN];
    heap h = {0, 0};
    dtrain_allocator allocator = {count_or_refuse, &h, 0, 0};
    variant.recompute = recompute;
    model *m = model_create(1, PLACES, &allocator);
    for (int step = 0; step < 2; step++) {
        *more = h.calls;
        if (halves)
            in_halves(NULL, m, 0, 1, d_inputs);
        else
            whole(m, 0, 1, d_inputs);
    }
    *more = h.calls - *more;
    size_t bytes = allocator.bytes;
    model_destroy(m);
    CHECK_EQ(allocator.bytes, 0);
    variant.recompute = 0;
    return bytes;
}

TEST(recomputed_layers_keep_less_and_a_second_step_allocates_nothing)
{
    uint64_t more;
    size_t kept = bytes_of(0, 0, &more);
    CHECK_EQ(more, 0);
    size_t again = bytes_of(1, 0, &more);
    CHECK_EQ(more, 0);
    /* three soft layers save 7 floats a row, the loss 5; of up to 4 rows, each rounded up to 64 bytes; the
     * largest is shared */
    CHECK_EQ(kept - again, 3 * 128 + 128 - 4 * 7 * 4);
    bytes_of(0, 1, &more);
    CHECK_EQ(more, 0);
}

/* ---- wrong use, failures ---- */

static void check_wrong(dtrain_status status, const char *text)
{
    CHECK_EQ(status, DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), text);
}

TEST(halves_in_the_wrong_order_are_refused_and_change_nothing)
{
    model *m = variant_create(1, 1, 0, 1);
    size_t shape[2] = {3, IN + 1};
    float some[3 * (IN + 1)];
    dtrain_tensor bad;
    batch b;
    batch_init(&b, 0); /* 3 rows */
    CHECK_EQ(dtrain_tensor_view(&bad, DTRAIN_F32, 2, shape, some), DTRAIN_OK);
    check_wrong(backward_weights(NULL, m->module, 0), "micro_batch 0 has had no backward_input");
    CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_OK);
    check_wrong(backward_weights(NULL, m->module, 0), "run backward_input in this place");
    check_wrong(backward_input(NULL, m->module, 0, NULL, &bad),
                "backward_input: d_input is F32 [3, 6], expected F32 [3, 5]");
    CHECK_EQ(backward_input(NULL, m->module, 0, NULL, NULL), DTRAIN_OK);
    check_wrong(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), "micro_batch 0 has had no forward");
    CHECK_EQ(backward_weights(NULL, m->module, 0), DTRAIN_OK);
    check_wrong(backward_weights(NULL, m->module, 0), "micro_batch 0 has had no backward_input");
    CHECK_EQ(backward_input(NULL, NULL, 0, NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(backward_weights(NULL, NULL, 0), DTRAIN_ERR_INVALID);
    model_destroy(m);
}

static dtrain_status fails(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    static _Thread_local float d_inputs[MICRO][ROWS * IN];
    int rank = dtrain_comm_rank(world);
    model *m = model_create(0, PLACES, NULL);
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    layer_user *who = &m->users[r->fails_layer];
    who->world = world;
    who->fails_on = 1;
    who->fails_in = r->fails_in;
    CHECK_EQ(dtrain_fsdp_begin(fsdp, MICRO, MICRO), DTRAIN_OK);
    in_halves(fsdp, m, rank, dtrain_comm_size(world), d_inputs);
    CHECK_EQ(dtrain_fsdp_step(fsdp, 0.01f), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 could not go on");
    CHECK_CONTAINS(dtrain_last_error(), r->text);
    who->fails_in = NULL;
    CHECK_EQ(dtrain_fsdp_begin(fsdp, MICRO, MICRO), DTRAIN_OK);
    in_halves(fsdp, m, rank, dtrain_comm_size(world), d_inputs);
    check_slices(fsdp, m, r->expected);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_half_that_fails_on_one_rank_drops_the_step_on_all)
{
    static const char *const names[] = {"forward", "backward", "backward_weights"};
    static float expected[WEIGHTS];
    run r;
    memset(&r, 0, sizeof r);
    expected_gradient(2, expected);
    r.expected = expected;
    r.fails_layer = DEEP_1;
    for (int i = 0; i < 3; i++)
        for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_DDP; strategy++) {
            char text[64];
            snprintf(text, sizeof text, "layer deep 1: %s returned ERR_IO (33)", names[i]);
            r.text = text;
            r.fails_in = names[i];
            r.desc.strategy = (dtrain_strategy)strategy;
            variant.apart = 1;
            CHECK_EQ(dtrain_run_threads(2, fails, &r, NULL), DTRAIN_OK);
        }
    variant.apart = 0;
}
