/* Callbacks that fail on one rank, ranks without memory, and wrong uses: what each says, and that all go on. */
#include "dtrain.h"
#include "test.h"
#include "module_model.h"

/* ---- failures ---- */

static dtrain_status one_step(dtrain_fsdp *fsdp, model *m, int rank)
{
    batch b;
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; status == DTRAIN_OK && i < 2; i++) {
        batch_init(&b, 2 * rank + i);
        status = forward(fsdp, m, 0, &b, NULL);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_backward(fsdp, m->module, 0, NULL, NULL);
    }
    return status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.01f) : status;
}

static dtrain_status fails(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    int rank = dtrain_comm_rank(world);
    model *m = model_create(0, 1, NULL);
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    float before[WEIGHTS], after[WEIGHTS];
    layer_user *who = &m->users[r->fails_layer];
    CHECK_EQ(one_step(fsdp, m, rank), DTRAIN_OK);
    for (int p = 0; p < PARAMS; p++)
        CHECK_EQ(dtrain_fsdp_get(fsdp, table_of_model[p].name, before + m->begin[p], -1), DTRAIN_OK);
    who->world = world;
    who->fails_on = 1;
    who->fails_in = r->fails_in;
    CHECK_EQ(one_step(fsdp, m, rank), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 could not go on");
    CHECK_CONTAINS(dtrain_last_error(), r->text);
    who->fails_in = NULL;
    for (int p = 0; p < PARAMS; p++)
        CHECK_EQ(dtrain_fsdp_get(fsdp, table_of_model[p].name, after + m->begin[p], -1), DTRAIN_OK);
    CHECK(memcmp(before, after, sizeof before) == 0);
    CHECK_EQ(one_step(fsdp, m, rank), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get(fsdp, "w_in", after, -1), DTRAIN_OK);
    CHECK(memcmp(before + m->begin[W_IN], after, IN * HIDDEN * sizeof(float)) != 0);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

static void fail_in(int layer, const char *what, const char *text)
{
    run r;
    memset(&r, 0, sizeof r);
    r.fails_layer = layer;
    r.fails_in = what;
    r.text = text;
    under_every_strategy(fails, &r, 2);
}

TEST(a_callback_that_fails_on_one_rank_drops_the_step_on_all)
{
    fail_in(FIRST, "forward", "layer first: forward returned ERR_IO (33)");
    fail_in(DEEP_2, "forward", "layer deep 2: forward returned ERR_IO (33)");
    fail_in(UNSCALE, "backward", "layer unscale: backward returned ERR_IO (33)");
    fail_in(DEEP_1, "backward", "layer deep 1: backward returned ERR_IO (33)");
    fail_in(FIRST, "backward_weights", "layer first: backward_weights returned ERR_IO (33)");
    fail_in(LAST, "shape", "layer last: shape returned ERR_IO (33)");
}

static dtrain_status fails_to_evaluate(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    int rank = dtrain_comm_rank(world);
    model *m = model_create(0, 1, NULL);
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc);
    dtrain_tensor output;
    batch b;
    batch_init(&b, rank);
    m->users[DEEP_1].world = world;
    m->users[DEEP_1].fails_on = 1;
    m->users[DEEP_1].fails_in = "forward";
    CHECK_EQ(dtrain_fsdp_forward(fsdp, m->module, DTRAIN_EVALUATE, &b.input, b.target, &output),
             rank == 1 ? DTRAIN_ERR_IO : DTRAIN_OK);
    if (rank == 1)
        CHECK_CONTAINS(dtrain_last_error(), "dtrain_fsdp_forward on rank 1: layer deep 1: forward returned ERR_IO (33)");
    CHECK((((float *)output.data)[0] == 0.0f) == (rank == 1));
    CHECK_EQ(dtrain_fsdp_forward(fsdp, m->module, 0, &b.input, b.target, &output), DTRAIN_OK);
    CHECK((((float *)output.data)[0] == 0.0f) == (rank == 1)); /* the step will tell */
    m->users[DEEP_1].fails_in = NULL;
    CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
    CHECK_EQ(one_step(fsdp, m, rank), DTRAIN_OK);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(an_evaluation_that_fails_is_told_to_its_own_rank)
{
    run r;
    memset(&r, 0, sizeof r);
    under_every_strategy(fails_to_evaluate, &r, 2);
}

TEST(without_fsdp_a_callback_s_status_is_returned_and_nothing_else_is_called)
{
    model *m = model_create(1, 1, NULL);
    batch b;
    batch_init(&b, 0);
    m->users[FIRST].fails_in = "forward";
    CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "layer first: forward returned ERR_IO (33)");
    CHECK_CONTAINS(dtrain_last_error(), "layer first: forward");
    CHECK_EQ(m->users[DEEP_1].forwards, 0);
    CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), DTRAIN_ERR_INVALID);
    m->users[FIRST].fails_in = NULL;
    m->users[DEEP_2].fails_in = "backward";
    CHECK_EQ(forward(NULL, m, 0, &b, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), DTRAIN_ERR_IO);
    CHECK_EQ(m->users[DEEP_1].backwards, 0);
    model_destroy(m);
}

static dtrain_status lacks_memory(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    heap h = {0, 0};
    dtrain_allocator allocator = {count_or_refuse, &h, 0, 0};
    model *m = model_create(0, 1, &allocator);
    dtrain_fsdp *fsdp = fsdp_create(world, m, &((run *)user)->desc);
    h.refuses = rank == 1;
    CHECK_EQ(one_step(fsdp, m, rank), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 could not go on: no memory for activations");
    h.refuses = 0;
    CHECK_EQ(one_step(fsdp, m, rank), DTRAIN_OK);
    model_destroy(m);
    CHECK_EQ(allocator.bytes, 0);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_rank_without_memory_for_activations_drops_the_step_on_all)
{
    run r;
    memset(&r, 0, sizeof r);
    under_every_strategy(lacks_memory, &r, 2);
}

/* ---- wrong use ---- */

static void refused(model *m, dtrain_status expected, const char *text)
{
    dtrain_module *module = m->module;
    CHECK_EQ(dtrain_module_create(&module, m->layers, LAYERS, m->table, PARAMS, NULL), expected);
    CHECK(module == NULL);
    CHECK_CONTAINS(dtrain_last_error(), text);
    memcpy(m->table, table_of_model, sizeof m->table);
    memset(m->layers, 0, sizeof m->layers);
    model_layers(m);
}

TEST(a_bad_list_of_layers_is_refused_with_the_layer_s_name)
{
    static const char *const other[] = {"nobody"}, *const late[] = {"w_out", "b_out"};
    model *m = model_create(0, 1, NULL);
    memset(m->layers, 0, sizeof m->layers);
    model_layers(m);
    m->layers[ADD].params = other;
    refused(m, DTRAIN_ERR_INVALID, "layer add lists parameter nobody, which the table does not have");
    m->layers[ADD].name = NULL;
    refused(m, DTRAIN_ERR_INVALID,
            "layer 8 (NULL) needs a name, forward, backward, and params if param_count is above 0; the name is");
    m->layers[LAST].backward = NULL;
    refused(m, DTRAIN_ERR_INVALID, "params if param_count is above 0; backward is missing");
    m->layers[DEEP_2].unit = 4;
    refused(m, DTRAIN_ERR_INVALID, "layer deep 2 has unit 4, but its parameter w_deep is stacked over units 2 to 3");
    m->layers[FIRST].params = late;
    refused(m, DTRAIN_ERR_INVALID, "layer first of unit 1, after unit 0, uses parameter w_out of unit 4");
    m->table[GAIN].tied = 0;
    refused(m, DTRAIN_ERR_INVALID, "layer unscale of unit 0, after unit 4, uses parameter gain of unit 0");
    m->layers[DEEP_1].unit = 3;
    m->layers[DEEP_2].unit = 2;
    refused(m, DTRAIN_ERR_INVALID, "layer deep 2 of unit 2, after unit 3, uses parameter w_deep of unit 2");
    m->table[B_OUT].dtype = DTRAIN_F64;
    refused(m, DTRAIN_ERR_UNSUPPORTED, "parameter b_out is F64");
    m->table[B_OUT].name = "w_out";
    refused(m, DTRAIN_ERR_INVALID, "w_out");
    model_destroy(m);
}

TEST(no_layers_no_room_and_bad_descs_are_refused)
{
    model *m = model_create(0, 1, NULL);
    dtrain_module_desc desc = {-1, NULL};
    dtrain_module *module;
    memset(m->layers, 0, sizeof m->layers);
    model_layers(m);
    CHECK_EQ(dtrain_module_create(&module, m->layers, 0, m->table, PARAMS, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_module_create(&module, m->layers, LAYERS, m->table, PARAMS, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "micro_batches is -1");
    CHECK_EQ(dtrain_module_create(NULL, m->layers, LAYERS, m->table, PARAMS, NULL), DTRAIN_ERR_INVALID);
    for (int refuses = 0; refuses < 2; refuses++) {
        heap h = {0, refuses};
        dtrain_allocator allocator = {count_or_refuse, &h, 0, 0};
        desc.micro_batches = 1;
        desc.allocator = &allocator;
        CHECK_EQ(dtrain_module_create(&module, m->layers, LAYERS, m->table, PARAMS, &desc),
                 refuses ? DTRAIN_ERR_MEMORY : DTRAIN_OK);
        dtrain_module_destroy(module);
        CHECK_EQ(allocator.bytes, 0);
    }
    model_destroy(m);
}

static void check_wrong(dtrain_status status, const char *text)
{
    CHECK_EQ(status, DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), text);
}

TEST(wrong_calls_say_what_was_expected_and_change_nothing)
{
    model *m = model_create(1, 2, NULL), *bare = model_create(0, 1, NULL);
    dtrain_tensor output, bad;
    batch b;
    size_t shape[2] = {3, IN + 1};
    float some[3 * (IN + 1)] = {0}, loss;
    batch_init(&b, 0); /* 3 rows */
    check_wrong(forward(NULL, m, 2, &b, NULL), "micro_batch is 2, expected 0 to 1, or DTRAIN_EVALUATE");
    check_wrong(forward(NULL, m, -2, &b, NULL), "micro_batch is -2");
    check_wrong(dtrain_fsdp_backward(NULL, m->module, DTRAIN_EVALUATE, NULL, NULL), "expected 0 to 1: for more");
    check_wrong(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), "micro_batch 0 has had no forward");
    check_wrong(dtrain_fsdp_forward(NULL, m->module, 0, NULL, NULL, &output), "input is NULL");
    check_wrong(dtrain_fsdp_forward(NULL, m->module, 0, &b.input, NULL, NULL), "output is NULL");
    bad = b.input;
    bad.data = NULL;
    check_wrong(dtrain_fsdp_forward(NULL, m->module, 0, &bad, NULL, &output), "data is NULL");
    check_wrong(forward(NULL, bare, 0, &b, NULL), "parameter gain has no memory: give an fsdp");
    CHECK_EQ(forward(NULL, m, 0, &b, &loss), DTRAIN_OK);
    CHECK_EQ(dtrain_tensor_view(&bad, DTRAIN_F32, 2, shape, some), DTRAIN_OK);
    check_wrong(dtrain_fsdp_backward(NULL, m->module, 0, NULL, &bad), "d_input is F32 [3, 6], expected F32 [3, 5]");
    check_wrong(dtrain_fsdp_backward(NULL, m->module, 0, &bad, NULL), "d_output is F32 [3, 6], expected F32 [1]");
    bad = b.input;
    bad.data = NULL;
    check_wrong(dtrain_fsdp_backward(NULL, m->module, 0, NULL, &bad), "d_input is F32 [3, 5] without data");
    CHECK_EQ(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), DTRAIN_OK);
    check_wrong(dtrain_fsdp_backward(NULL, m->module, 0, NULL, NULL), "micro_batch 0 has had no forward");
    CHECK_EQ(dtrain_fsdp_forward(NULL, NULL, 0, &b.input, NULL, &output), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fsdp_backward(NULL, NULL, 0, NULL, NULL), DTRAIN_ERR_INVALID);
    dtrain_module_destroy(NULL);
    model_destroy(m);
    model_destroy(bare);
}

static dtrain_status wrong_steps(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    int rank = dtrain_comm_rank(world);
    model *m = model_create(0, 1, NULL);
    dtrain_fsdp *fsdp = fsdp_create(world, m, &r->desc), *other;
    dtrain_param table[PARAMS];
    batch b;
    float once[WEIGHTS], again[WEIGHTS];
    batch_init(&b, rank);
    memcpy(table, table_of_model, sizeof table);
    table[W_OUT].name = "w_exit";
    CHECK_EQ(dtrain_fsdp_create(&other, world, table, PARAMS, &r->desc), DTRAIN_OK);
    check_wrong(forward(other, m, 0, &b, NULL), "another table than the module (see parameter w_out)");
    dtrain_fsdp_destroy(other);
    CHECK_EQ(dtrain_fsdp_begin(fsdp, 1, 1), DTRAIN_OK);
    CHECK_EQ(forward(fsdp, m, 0, &b, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_backward(fsdp, m->module, 0, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(forward(fsdp, m, 0, &b, NULL), DTRAIN_OK);
    check_wrong(dtrain_fsdp_backward(fsdp, m->module, 0, NULL, NULL), "all 1 micro-batches of this step are over");
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    check_wrong(dtrain_fsdp_backward(fsdp, m->module, 0, NULL, NULL), "finished but not used");
    CHECK_EQ(dtrain_fsdp_step(fsdp, 0.01f), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get(fsdp, "w_in", once, -1), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_step(fsdp, 0.01f), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fsdp_get(fsdp, "w_in", again, -1), DTRAIN_OK);
    CHECK(memcmp(once, again, IN * HIDDEN * sizeof(float)) == 0);
    CHECK_EQ(one_step(fsdp, m, rank), DTRAIN_OK);
    model_destroy(m);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_backward_that_the_step_has_no_room_for_changes_nothing)
{
    run r;
    memset(&r, 0, sizeof r);
    under_every_strategy(wrong_steps, &r, 1);
}
