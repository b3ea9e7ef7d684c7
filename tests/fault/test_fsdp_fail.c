/* What FSDP does when it is called wrongly, on one rank or on all, and when a rank dies: an error on every rank that
 * says what was expected, an object that can be used or says that it cannot, and nothing left behind. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "fsdp_model.h"

typedef struct heap {
    long blocks, bytes;
} heap;

static void *heap_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    heap *h = (heap *)user;
    void *block = test_resize(pointer, old_bytes, new_bytes, align);
    if (new_bytes > 0 && block == NULL)
        return NULL;
    __atomic_add_fetch(&h->blocks, (new_bytes > 0) - (pointer != NULL), __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&h->bytes, (long)new_bytes - (long)old_bytes, __ATOMIC_SEQ_CST);
    return block;
}

/* Runs a body that gets as user what is given, on threads that must leave no memory behind. */
static dtrain_status on_threads(int ranks, dtrain_status (*body)(dtrain_comm *, void *), void *user)
{
    heap h = {0, 0};
    dtrain_allocator allocator = {heap_resize, &h, 0, 0};
    dtrain_comm_desc desc = {0};
    desc.timeout_ms = test_ms(10000);
    desc.allocator = &allocator;
    dtrain_status status = dtrain_run_threads(ranks, body, user, &desc);
    CHECK_EQ(h.blocks, 0);
    CHECK_EQ(h.bytes, 0);
    return status;
}

static const dtrain_strategy strategies[4] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP, DTRAIN_HYBRID_SHARD};

/* ---- tables and descs ---- */

enum { NAME, SHAPE, SIZE, FREEZES, DECAY, UNIT, FEWER, STRATEGY, DTYPE, RATE, GROUP, CLIPPED, DIFFERENCES };

static const char *const said_of[DIFFERENCES] = {"parameter 6: name ",
                                                 "parameter 0 \"tokens\": shape ",
                                                 "parameter 7 \"last\": shape ",
                                                 "parameter 6 \"seven\": frozen ",
                                                 "parameter 6 \"seven\": no_decay ",
                                                 "parameter 6 \"seven\": unit ",
                                                 "the number of parameters is ",
                                                 "desc.strategy ",
                                                 "desc.gather_dtype ",
                                                 "desc.optimizer.beta1 ",
                                                 "desc.groups[0].lr_factor ",
                                                 "desc.loss_scale "};

typedef struct difference {
    int what, ranks, where;
} difference;

static dtrain_status a_rank_that_differs(dtrain_comm *world, void *user)
{
    const difference *d = (const difference *)user;
    int differs = dtrain_comm_rank(world) == d->where;
    char text[32];
    dtrain_param table[PARAMS];
    dtrain_param_group groups[1] = {{"tokens", 2, 0, 0}};
    dtrain_fsdp_desc desc = {0};
    dtrain_fsdp *fsdp = (dtrain_fsdp *)&desc;
    size_t count = model_describe(table);
    desc.groups = groups;
    desc.group_count = 1;
    switch (differs ? d->what : DIFFERENCES) {
    case NAME: table[SEVEN].name = "eleven"; break;
    case SHAPE: table[TOKENS].shape[0] = 5, table[TOKENS].shape[1] = 13; break;
    case SIZE: table[LAST].shape[0]++; break;
    case FREEZES: table[SEVEN].frozen = 1; break;
    case DECAY: table[SEVEN].no_decay = 1; break;
    case UNIT: table[SEVEN].unit = 2; break;
    case FEWER: count -= 2; break;
    case STRATEGY: desc.strategy = DTRAIN_DDP; break;
    case DTYPE: desc.gather_dtype = DTRAIN_BF16; break;
    case RATE: desc.optimizer.beta1 = 0.5f; break;
    case GROUP: groups[0].lr_factor = 3; break;
    case CLIPPED: desc.loss_scale = 4; break;
    default: break;
    }
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, count, &desc), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "dtrain_fsdp_create: ");
    CHECK_CONTAINS(dtrain_last_error(), said_of[d->what]);
    snprintf(text, sizeof text, " on rank %d", d->where);
    CHECK_CONTAINS(dtrain_last_error(), text);
    CHECK(fsdp == NULL);
    dtrain_fsdp_destroy(fsdp);
    model_describe(table); /* the group can be used */
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, PARAMS, NULL), DTRAIN_OK);
    CHECK_EQ(forward_pass(fsdp, UNITS), DTRAIN_OK);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_table_or_desc_that_differs_on_one_rank_is_an_error_on_all)
{
    for (int what = 0; what < DIFFERENCES; what++) {
        difference d = {what, 3, what % 3};
        int before = test_failures;
        CHECK_EQ(on_threads(3, a_rank_that_differs, &d), DTRAIN_OK);
        if (test_failures != before)
            TEST_FAIL("difference %d", what);
    }
}

typedef struct refusal {
    dtrain_status status;
    const char *text;
} refusal;

/* Spoils a table or desc; what must be said of it. */
static refusal spoil(int what, dtrain_param *table, size_t *count, dtrain_fsdp_desc *desc)
{
    static const dtrain_param_group nameless[1] = {{NULL, 0, 0, 0}}, negative[1] = {{"a", -1, 0, 0}},
                                    misspelt[2] = {{"two", 2, 0, 0}, {"sevn*", 0, 0, 1}};
    refusal r = {DTRAIN_ERR_INVALID, ""};
    switch (what) {
    case 0: table[SEVEN].name = "two", r.text = "two parameters are named two"; break;
    case 1: table[SEVEN].name = NULL, r.text = "has no name"; break;
    case 2: table[LAST].unit = 9, r.text = "number units without gaps"; break;
    case 3: table[TWO].shape[0] = 0, r.text = "parameter two has no shape"; break;
    case 4: table[TWO].shape[0] = table[TWO].shape[1] = (size_t)1 << 40, r.text = "more than memory"; break;
    case 5: *count = 0, r.text = "the parameter table is empty"; break;
    case 6: table[TWO].dtype = DTRAIN_BF16, r.status = DTRAIN_ERR_UNSUPPORTED, r.text = "parameter two is BF16"; break;
    case 7: desc->strategy = (dtrain_strategy)7, r.text = "strategy is 7"; break;
    case 8:
        desc->strategy = DTRAIN_HYBRID_SHARD, desc->shard_size = 2;
        r.text = "shard_size is 2 on 3 ranks: hybrid sharding needs one that divides";
        break;
    case 9: desc->strategy = DTRAIN_HYBRID_SHARD, r.text = "shard_size is 0"; break;
    case 10: desc->gather_dtype = DTRAIN_F64, r.text = "gather_dtype is"; break;
    case 11: desc->reduce_dtype = DTRAIN_I8, r.text = "reduce_dtype is"; break;
    case 12: desc->loss_scale = -1, r.text = "loss_scale -1"; break;
    case 13: desc->micro_batches = -1, r.text = "micro_batches is -1"; break;
    case 14: desc->trace_events = SIZE_MAX / 40 + 1, r.text = "trace_events is 4611"; break;
    case 15: /* each has sizes of its own, together they wrap */
        for (int i = 0; i < 2; i++) {
            dtrain_param *param = &table[i == 0 ? TWO : SEVEN];
            memset(param->shape, 0, sizeof param->shape);
            param->shape[0] = (size_t)1 << 61;
            param->data = param->grad = NULL;
            param->ndim = 1;
        }
        r.text = "have more elements or layers than memory";
        break;
    case 16: desc->optimizer.beta1 = 2, r.text = "optimizer's beta1 is 2, expected"; break;
    case 17: desc->group_count = 1, r.text = "groups is NULL"; break;
    case 18: desc->group_count = 1, desc->groups = nameless, r.text = "groups[0] has name NULL"; break;
    case 19: desc->group_count = 1, desc->groups = negative, r.text = "lr_factor -1"; break;
    case 20:
        desc->group_count = 2, desc->groups = misspelt;
        r.text = "groups[1] has name sevn*, which none of the ";
        break;
    default: r.text = NULL; break;
    }
    return r;
}

static dtrain_status a_bad_table(dtrain_comm *world, void *user)
{
    int what = ((int *)user)[0], where = ((int *)user)[1];
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc desc = {0};
    dtrain_fsdp *fsdp = NULL;
    size_t count = model_describe(table);
    refusal r = {DTRAIN_ERR_ABORTED, " of 3 could not make its part: "};
    if (where < 0 || where == dtrain_comm_rank(world))
        r = spoil(what, table, &count, &desc);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, count, &desc), r.status);
    CHECK_CONTAINS(dtrain_last_error(), r.text);
    return DTRAIN_OK;
}

TEST(a_bad_table_or_desc_is_refused_and_the_other_ranks_learn_it)
{
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc none = {0};
    dtrain_fsdp_plan_result plan;
    size_t count;
    for (int what = 0;; what++) {
        int how[2] = {what, -1}, before = test_failures;
        dtrain_fsdp_desc desc = none;
        count = model_describe(table);
        refusal r = spoil(what, table, &count, &desc);
        if (r.text == NULL)
            break;
        CHECK_EQ(on_threads(3, a_bad_table, how), DTRAIN_OK);
        how[1] = what % 3;
        CHECK_EQ(on_threads(3, a_bad_table, how), DTRAIN_OK);
        if (what < 16) {
            CHECK_EQ(dtrain_fsdp_plan(table, count, &desc, 3, 0, &plan), r.status);
            CHECK_CONTAINS(dtrain_last_error(), r.text);
        }
        if (test_failures != before)
            TEST_FAIL("spoiled in way %d", what);
    }
    model_describe(table);
    CHECK_EQ(dtrain_fsdp_plan(table, PARAMS, NULL, 3, 3, &plan), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 3 of 3");
    CHECK_EQ(dtrain_fsdp_plan(table, PARAMS, NULL, 3, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fsdp_create(NULL, NULL, table, PARAMS, NULL), DTRAIN_ERR_INVALID);
}

/* ---- calls ---- */

#define REFUSED(call, text_) \
    do { \
        CHECK_EQ(call, DTRAIN_ERR_INVALID); \
        CHECK_CONTAINS(dtrain_last_error(), text_); \
        CHECK_CONTAINS(dtrain_last_error(), text_); \
    } while (0)

static void refuse_by_arguments(dtrain_fsdp *fsdp, int ranks)
{
    float value[1] = {0};
    REFUSED(dtrain_fsdp_gather(fsdp, -1), "dtrain_fsdp_gather: there is no unit -1: the table has units 0 to 4");
    REFUSED(dtrain_fsdp_gather(fsdp, UNITS), "no unit 5");
    REFUSED(dtrain_fsdp_release(fsdp, UNITS), "no unit 5");
    REFUSED(dtrain_fsdp_reduce(fsdp, UNITS), "no unit 5");
    REFUSED(dtrain_fsdp_put(fsdp, UNITS), "no unit 5");
    REFUSED(dtrain_fsdp_release(fsdp, 1), "unit 1 is not gathered");
    REFUSED(dtrain_fsdp_put(fsdp, 1), "unit 1 is not gathered");
    REFUSED(dtrain_fsdp_reduce(fsdp, 1), "unit 1 has not been gathered");
    REFUSED(dtrain_fsdp_begin(fsdp, -1, 1), "micro_batches is -1");
    REFUSED(dtrain_fsdp_begin(fsdp, 1, -1), "weight -1");
    REFUSED(dtrain_fsdp_begin(fsdp, 1, NAN), "weight");
    REFUSED(dtrain_fsdp_begin(fsdp, 1, INFINITY), "weight inf");
    REFUSED(dtrain_fsdp_step(fsdp, -1), "lr is -1");
    REFUSED(dtrain_fsdp_step(fsdp, NAN), "lr is");
    REFUSED(dtrain_fsdp_clip_grad_norm(fsdp, NAN, NULL), "max_norm");
    REFUSED(dtrain_fsdp_set(fsdp, "none", value, 0), "no parameter named none");
    REFUSED(dtrain_fsdp_get(fsdp, NULL, value, 0), "no parameter named NULL");
    REFUSED(dtrain_fsdp_set(fsdp, "scalar", value, ranks), "root is");
    REFUSED(dtrain_fsdp_set(fsdp, "scalar", value, -1), "root is -1, expected 0");
    REFUSED(dtrain_fsdp_get(fsdp, "scalar", value, -2), "root is -2, expected -1");
    REFUSED(dtrain_fsdp_get(fsdp, "scalar", NULL, -1), "value is NULL");
    REFUSED(dtrain_fsdp_local(fsdp, NULL, NULL), "got NULL");
    CHECK(dtrain_fsdp_param(fsdp, "none") == NULL && dtrain_fsdp_grad(fsdp, "none") == NULL);
    CHECK(dtrain_fsdp_param(fsdp, NULL) == NULL && dtrain_fsdp_grad(fsdp, "frozen") == NULL);
    CHECK_EQ(dtrain_fsdp_trace(fsdp, "/tmp/none"), DTRAIN_ERR_INVALID);
}

static void refuse_by_order(dtrain_fsdp *fsdp, int keeps)
{
    CHECK_EQ(dtrain_fsdp_begin(fsdp, 1, 1), DTRAIN_OK);
    REFUSED(dtrain_fsdp_begin(fsdp, 1, 1), "a step is open");
    CHECK_EQ(forward_pass(fsdp, UNITS), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 4), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_reduce(fsdp, 4), DTRAIN_OK);
    REFUSED(dtrain_fsdp_reduce(fsdp, 4), "unit 4 has not been gathered");
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 4), DTRAIN_OK);
    REFUSED(dtrain_fsdp_reduce(fsdp, 4), "unit 4 was reduced twice");
    REFUSED(dtrain_fsdp_join(fsdp), "has reduced 1 of 5 units");
    for (int u = 3; u >= 0; u--) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, u), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 4), DTRAIN_OK);
    REFUSED(dtrain_fsdp_reduce(fsdp, 4), "all 1 micro-batches of this step are over");
    CHECK_EQ(dtrain_fsdp_next(fsdp), DTRAIN_OK); /* it was over already */
    REFUSED(dtrain_fsdp_next(fsdp), "all 1 micro-batches");
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    REFUSED(dtrain_fsdp_reduce(fsdp, 4), "finished but not used");
    REFUSED(dtrain_fsdp_next(fsdp), "finished but not used");
    REFUSED(dtrain_fsdp_join(fsdp), "finished but not used");
    REFUSED(dtrain_fsdp_begin(fsdp, 1, 1), "a step is open");
    CHECK_EQ(dtrain_fsdp_step(fsdp, 0.1f), DTRAIN_OK);
    (void)keeps;
}

static dtrain_status called_wrongly(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = *(const dtrain_fsdp_desc *)user;
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    size_t count = model_describe(table);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, count, &desc), DTRAIN_OK);
    for (int round = 0; round < 2; round++) { /* what is refused changes nothing */
        refuse_by_arguments(fsdp, dtrain_comm_size(world));
        REFUSED(dtrain_fsdp_step(fsdp, 0.1f), "no rank has reduced a gradient");
        REFUSED(dtrain_fsdp_finish(fsdp, NULL), "the object can be used");
        refuse_by_order(fsdp, desc.keep_full_grads);
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(wrong_calls_are_refused_and_change_nothing)
{
    for (int i = 0; i < 4; i++)
        for (int keep = 0; keep < 2; keep++) {
            dtrain_fsdp_desc desc = {0};
            desc.strategy = strategies[i];
            desc.shard_size = 2;
            desc.keep_full_grads = keep;
            CHECK_EQ(on_threads(4, called_wrongly, &desc), DTRAIN_OK);
            if (i < 3)
                CHECK_EQ(on_threads(1, called_wrongly, &desc), DTRAIN_OK);
        }
    CHECK_EQ(dtrain_fsdp_gather(NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the object is NULL");
    CHECK_EQ(dtrain_fsdp_step(NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fsdp_join(NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fsdp_get(NULL, "a", NULL, 0), DTRAIN_ERR_INVALID);
    CHECK(dtrain_fsdp_param(NULL, "a") == NULL);
    dtrain_fsdp_destroy(NULL);
}

/* ---- one rank alone ---- */

static dtrain_status a_step_for_ones(dtrain_fsdp *fsdp, const dtrain_param *table, int computes)
{
    dtrain_status status = forward_pass(fsdp, UNITS);
    for (int u = UNITS - 1; u >= 0 && status == DTRAIN_OK; u--) {
        status = dtrain_fsdp_gather(fsdp, u);
        for (int p = 0; p < PARAMS && computes; p++) {
            size_t layers = table[p].stacked ? L : 1, each = dtrain_param_elements(&table[p]) / layers;
            float *grad = dtrain_fsdp_grad(fsdp, table[p].name);
            if (grad == NULL || u < table[p].unit || u >= table[p].unit + (int)layers)
                continue;
            for (size_t i = 0; i < each; i++)
                grad[(size_t)(u - table[p].unit) * each + i] += 1.0f;
        }
        if (status == DTRAIN_OK)
            status = computes ? dtrain_fsdp_reduce(fsdp, u) : dtrain_fsdp_release(fsdp, u);
    }
    return status;
}

static void check_all(dtrain_fsdp *fsdp, const dtrain_param *table, float expected)
{
    static __thread float value[8191];
    for (int p = 0; p < PARAMS; p++) {
        CHECK_EQ(dtrain_fsdp_get(fsdp, table[p].name, value, -1), DTRAIN_OK);
        for (size_t i = 0; i < dtrain_param_elements(&table[p]); i++)
            CHECK(value[i] == (table[p].frozen ? 0.0f : expected));
    }
}

/* A rank gives up before, in the middle of, and after its backward pass; or reduces nothing at all. */
static dtrain_status gives_up(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = *(const dtrain_fsdp_desc *)user;
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    size_t count = model_describe(table);
    int me = dtrain_comm_rank(world) == 1;
    desc.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, count, &desc), DTRAIN_OK);
    for (int way = 0; way < 4; way++) {
        if (me && way == 0) {
            dtrain__fsdp_fail(fsdp, "no more data");
            CHECK_EQ(dtrain_fsdp_join(fsdp), DTRAIN_OK);
        } else {
            CHECK_EQ(a_step_for_ones(fsdp, table, !(me && way == 2)), DTRAIN_OK);
            if (me && way == 1)
                dtrain__fsdp_fail(fsdp, NULL);
        }
        dtrain_status status = dtrain_fsdp_step(fsdp, 1.0f);
        CHECK_EQ(status, way < 2 ? DTRAIN_ERR_ABORTED : DTRAIN_OK);
        if (way < 2)
            CHECK_CONTAINS(dtrain_last_error(), way == 0 ? "rank 1 could not go on: no more data" : "rank 1 could");
        if (way == 2) /* three of four ranks have added 1 */
            check_all(fsdp, table, -0.75f);
    }
    check_all(fsdp, table, -1.75f);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_rank_that_cannot_go_on_spares_the_others_the_step)
{
    for (int i = 0; i < 4; i++) {
        dtrain_fsdp_desc desc = {0};
        desc.strategy = strategies[i];
        desc.shard_size = 2;
        CHECK_EQ(on_threads(4, gives_up, &desc), DTRAIN_OK);
    }
}

/* Gradients that were begun, reduced or finished are dropped; the step after them has its own alone. */
static dtrain_status drops(dtrain_comm *world, void *user)
{
    dtrain_fsdp_desc desc = *(const dtrain_fsdp_desc *)user;
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    size_t count = model_describe(table);
    desc.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, count, &desc), DTRAIN_OK);
    for (int way = 0; way < 6; way++) {
        if (way > 0)
            CHECK_EQ(a_step_for_ones(fsdp, table, 1), DTRAIN_OK);
        if (way == 2)
            CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
        if (way == 0 || way == 5) { /* computed, and never handed over */
            CHECK_EQ(dtrain_fsdp_gather(fsdp, 3), DTRAIN_OK);
            dtrain_fsdp_grad(fsdp, "seven")[6] = 5.0f;
        }
        CHECK_EQ(way == 3 ? dtrain_fsdp_publish(fsdp) : dtrain_fsdp_drop(fsdp), DTRAIN_OK);
        CHECK(dtrain_fsdp_grad(fsdp, "seven")[6] == 0.0f);
        CHECK_EQ(a_step_for_ones(fsdp, table, 1), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 1.0f), DTRAIN_OK);
        check_all(fsdp, table, -(float)(way + 1));
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(dropped_gradients_leave_no_trace)
{
    for (int i = 0; i < 4; i++) {
        dtrain_fsdp_desc desc = {0};
        desc.strategy = strategies[i];
        desc.shard_size = 2;
        CHECK_EQ(on_threads(4, drops, &desc), DTRAIN_OK);
    }
}

/* ---- the death of a rank ---- */

enum { DIES_AT_ONCE, DIES_IN_FORWARD, DIES_IN_BACKWARD, DIES_BEFORE_STEP, DIES_IN_CLIP, DEATHS };

typedef struct death {
    dtrain_fsdp_desc desc;
    int when, step;
} death;

static dtrain_status until_death(dtrain_fsdp *fsdp, const death *d, int dies)
{
    dtrain_status status = DTRAIN_OK;
    for (int step = 0; step < 3 && status == DTRAIN_OK; step++) {
        int now = dies && step == d->step;
        if (now && d->when == DIES_AT_ONCE)
            return DTRAIN_ERR_IO;
        for (int u = 0; u < UNITS && status == DTRAIN_OK; u++) {
            status = dtrain_fsdp_gather(fsdp, u);
            if (now && d->when == DIES_IN_FORWARD && u == 2)
                return DTRAIN_ERR_IO;
            status = status == DTRAIN_OK ? dtrain_fsdp_release(fsdp, u) : status;
        }
        for (int u = UNITS - 1; u >= 0 && status == DTRAIN_OK; u--) {
            status = dtrain_fsdp_gather(fsdp, u);
            status = status == DTRAIN_OK ? dtrain_fsdp_reduce(fsdp, u) : status;
            if (now && d->when == DIES_IN_BACKWARD && u == 2)
                return DTRAIN_ERR_IO;
        }
        if (now && d->when == DIES_BEFORE_STEP)
            return DTRAIN_ERR_IO;
        status = status == DTRAIN_OK ? dtrain_fsdp_clip_grad_norm(fsdp, 1, NULL) : status;
        if (now && d->when == DIES_IN_CLIP)
            return DTRAIN_ERR_IO;
        status = status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.1f) : status;
    }
    return status;
}

static dtrain_status dies_or_mourns(dtrain_comm *world, void *user)
{
    const death *d = (const death *)user;
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    const dtrain_slice *slices = NULL;
    size_t count = model_describe(table), listed = 0;
    int dies = dtrain_comm_rank(world) == 2;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, count, &d->desc), DTRAIN_OK);
    dtrain_status status = until_death(fsdp, d, dies);
    if (!dies) {
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank");
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 0.1f), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &listed), DTRAIN_OK);
        CHECK(listed > 0 && slices[0].weights != NULL);
    }
    double begin = now_s();
    dtrain_fsdp_destroy(fsdp);
    CHECK_WITHIN(now_s() - begin, 5);
    return status;
}

TEST(a_rank_that_leaves_is_an_error_on_all_others_and_no_leak)
{
    for (int i = 0; i < 4; i++)
        for (int when = 0; when < DEATHS; when++)
            for (int step = 0; step < 2; step++) {
                death d;
                int before = test_failures;
                memset(&d, 0, sizeof d);
                d.desc.strategy = strategies[i];
                d.desc.shard_size = 2;
                d.desc.gather_dtype = step ? DTRAIN_BF16 : DTRAIN_F32;
                d.when = when;
                d.step = step;
                dtrain_status status = on_threads(4, dies_or_mourns, &d); /* of whichever rank returned first */
                CHECK(status == DTRAIN_ERR_IO || status == DTRAIN_ERR_PEER_LOST);
                if (test_failures != before)
                    TEST_FAIL("strategy %d, death %d in step %d", (int)strategies[i], when, step);
            }
}

static dtrain_status destroys_early(dtrain_comm *world, void *user)
{
    dtrain_param table[1] = {{"w", DTRAIN_F32, {6, 1000}, 0, 1, 0, 0, 0, 0, NULL, NULL, NULL, NULL, 0}};
    dtrain_fsdp *fsdp;
    (void)user;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, NULL), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0) {
        CHECK_EQ(dtrain__fsdp_gather_ahead(fsdp, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 6), DTRAIN_ERR_INVALID);
        double begin = now_s();
        dtrain_fsdp_destroy(fsdp);
        CHECK_CONTAINS(dtrain_last_error(), "no unit 6"); /* of a call; destroying is none that fails */
        CHECK_WITHIN(now_s() - begin, 10);                /* the deadline is a minute */
        return dtrain_barrier(world);                     /* the caller's own group is as good as before */
    }
    usleep(2500000);
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0");
    CHECK_CONTAINS(dtrain_last_error(), "destroyed its dtrain_fsdp");
    dtrain_fsdp_destroy(fsdp);
    return dtrain_barrier(world);
}

TEST(destroy_waits_for_no_peer_that_does_not_come)
{
    unsetenv("DTRAIN_DEBUG"); /* with which nothing is gathered ahead */
    CHECK_EQ(on_threads(2, destroys_early, NULL), DTRAIN_OK);
}
