/* ---- >>test_ddp ----
 * Data-parallel steps over threads: folds by the tree, weights, ranks without examples, calls out of place. Gradients
 * are made from their micro-batch's number, so that any rank can compute any of them. */
#include "dtrain.h"
#include "test.h"
#include <math.h>

/* Numbers of every size and sign, so that the order of additions shows in their bits. */
static float noise(uint64_t seed, uint64_t index)
{
    uint64_t bits = dtrain_random_u64(seed, index);
    float value = (float)(bits >> 40) / 16777216.0f - 0.5f;
    return value * (float)(1 << (bits & 15));
}

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

enum { LAYERS = 3, WIDTH = 700, FLAT = 5 + LAYERS * WIDTH + 64 };

typedef struct model {
    float data[FLAT], grad[FLAT];
    dtrain_param table[3];
} model;

static void model_init(model *m)
{
    memset(m, 0, sizeof *m);
    m->table[0] = param("first", 0, 5, m->data, m->grad);
    m->table[1] = param("layers", 1, LAYERS, m->data + 5, m->grad + 5);
    m->table[1].shape[1] = WIDTH;
    m->table[1].stacked = 1;
    m->table[2] = param("frozen", LAYERS + 1, 64, m->data + 5 + LAYERS * WIDTH, NULL);
    m->table[2].frozen = 1;
}

static size_t unit_begin(int unit)
{
    return unit == 0 ? 0 : 5 + (size_t)(unit - 1) * WIDTH;
}

static size_t unit_count(int unit)
{
    return unit == 0 ? 5 : WIDTH;
}

/* The micro-batch's gradient of an element, and its weight: 1, 2, 3, 1, ... */
static float micro_grad(int micro, size_t element)
{
    return noise((uint64_t)micro + 100, element);
}

static double micro_weight(int micro)
{
    return micro % 3 + 1;
}

/* Units that micro-batch does not use: unit 2 in 1 and 6, when asked for. */
static int unused(int skips, int micro, int unit)
{
    return skips && unit == 2 && (micro == 1 || micro == 6);
}

DTRAIN__EXACT_BEGIN

static float tree(int skips, int first, int count, size_t element, int unit)
{
    if (count == 1)
        return unused(skips, first, unit) ? -0.0f : micro_grad(first, element);
    int left = 1;
    while (left * 2 < count)
        left *= 2;
    return tree(skips, first, left, element, unit) + tree(skips, first + left, count - left, element, unit);
}

typedef struct ddp_run {
    int micro_batches, no_overlap, shuffled, skips, poll;
    size_t bucket_bytes;
    float first[FLAT]; /* rank 0's result */
} ddp_run;

/* Backward of one micro-batch; ranks may finish their units in other orders. */
static void backward(dtrain_ddp *ddp, model *m, const ddp_run *run, int micro, int rank)
{
    for (int i = LAYERS; i >= 0; i--) {
        int unit = run->shuffled ? (i + rank + micro) % (LAYERS + 1) : i;
        if (unused(run->skips, micro, unit))
            continue;
        for (size_t e = unit_begin(unit); e < unit_begin(unit) + unit_count(unit); e++)
            m->grad[e] += micro_grad(micro, e);
        CHECK_EQ(dtrain_ddp_reduce(ddp, unit), DTRAIN_OK);
    }
    if (run->skips)
        CHECK_EQ(dtrain_ddp_next(ddp), DTRAIN_OK);
}

static dtrain_status ddp_rank(dtrain_comm *world, void *user)
{
    ddp_run *run = (ddp_run *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp;
    dtrain_ddp_desc desc;
    size_t begin, share = cut_of((size_t)run->micro_batches, ranks, rank, &begin), warm = 0;
    double weight = 0, total = 0, expected = 0;
    model_init(m);
    memset(&desc, 0, sizeof desc);
    desc.no_overlap = run->no_overlap;
    desc.bucket_bytes = run->bucket_bytes;
    for (int i = 0; i < FLAT; i++)
        m->data[i] = (float)(i + rank);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_OK);
    for (int i = 0; i < FLAT; i++)
        CHECK(m->data[i] == (float)i);
    for (int micro = 0; micro < run->micro_batches; micro++) {
        int mine = micro >= (int)begin && micro < (int)(begin + share);
        weight += mine ? micro_weight(micro) : 0;
        expected += micro_weight(micro);
    }
    for (int step = 0; step < 3; step++) {
        memset(m->grad, 0x55, (5 + LAYERS * WIDTH) * sizeof(float)); /* begin sets gradients to zero */
        CHECK_EQ(dtrain_ddp_begin(ddp, (int)share, weight), DTRAIN_OK);
        for (int micro = (int)begin; micro < (int)(begin + share); micro++)
            backward(ddp, m, run, micro, rank);
        CHECK_EQ(dtrain_ddp_finish(ddp, &total), DTRAIN_OK);
        CHECK(total == expected);
        CHECK_EQ(dtrain_comm_check_equal(world, m->grad, FLAT, DTRAIN_F32), DTRAIN_OK);
        if (ranks == 1 && step == 0)
            warm = dtrain_comm_allocator(world)->peak_bytes;
        if (ranks == 1)
            CHECK_EQ(dtrain_comm_allocator(world)->peak_bytes, warm);
    }
    if (rank == 0)
        memcpy(run->first, m->grad, sizeof run->first);
    dtrain_ddp_destroy(ddp);
    free(m);
    return DTRAIN_OK;
}

static void run_ddp(ddp_run *run, int ranks)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.progress = run->poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
    CHECK_EQ(dtrain_run_threads(ranks, ddp_rank, run, &desc), DTRAIN_OK);
}

/* The result of a sequential tree over all micro-batches, by bits. */
static void check_tree(const ddp_run *run)
{
    float weight = 0;
    for (int micro = 0; micro < run->micro_batches; micro++)
        weight += (float)micro_weight(micro);
    for (int unit = 0; unit <= LAYERS; unit++) {
        for (size_t e = unit_begin(unit); e < unit_begin(unit) + unit_count(unit); e++) {
            float expected = tree(run->skips, 0, run->micro_batches, e, unit) / weight;
            CHECK(memcmp(&expected, &run->first[e], sizeof expected) == 0);
        }
    }
}

enum { LARGE = 70000, SMALL = 6 };

static size_t held;

static void *counting_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    __atomic_add_fetch(&held, new_bytes - old_bytes, __ATOMIC_SEQ_CST);
    return test_resize(pointer, old_bytes, new_bytes, align);
}

/* Two units of a large and a small gradient, one micro-batch a rank. */
static dtrain_status large_rank(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    float *large = (float *)calloc(4 * LARGE, sizeof(float)), small[4 * SMALL] = {0};
    dtrain_param table[2];
    dtrain_ddp_desc desc;
    dtrain_ddp *ddp;
    memset(&desc, 0, sizeof desc);
    desc.no_overlap = *(int *)user & 1;
    desc.bucket_bytes = *(int *)user & 2 ? 1 : 0;
    desc.debug = *(int *)user & 4;
    int debug = desc.debug || getenv("DTRAIN_DEBUG") != NULL;
    table[0] = param("large", 0, 2, large, large + 2 * LARGE);
    table[1] = param("small", 0, 2, small, small + 2 * SMALL);
    table[0].shape[1] = LARGE;
    table[1].shape[1] = SMALL;
    table[0].stacked = table[1].stacked = 1;
    size_t before = held;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, table, 2, &desc), DTRAIN_OK);
    CHECK(ranks > 1 || debug || held - before < LARGE * sizeof(float)); /* none has a copy */
    for (int step = 0; step < 2; step++) {
        CHECK_EQ(dtrain_ddp_begin(ddp, 1, 1.0), DTRAIN_OK);
        for (int unit = 1; unit >= 0; unit--) {
            for (int i = 0; i < LARGE + SMALL; i++)
                *(i < LARGE ? large + (2 + unit) * LARGE + i : small + (2 + unit) * SMALL + i - LARGE) =
                    micro_grad(rank, (size_t)(i + unit * step));
            CHECK_EQ(dtrain_ddp_reduce(ddp, unit), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
        for (int k = 0; k < 2 * (LARGE + SMALL); k++) {
            int unit = k / (LARGE + SMALL), i = k % (LARGE + SMALL);
            float expected = tree(0, 0, ranks, (size_t)(i + unit * step), 0) / (float)ranks;
            CHECK(memcmp(&expected, i < LARGE ? large + (2 + unit) * LARGE + i : small + (2 + unit) * SMALL + i - LARGE,
                         sizeof expected) == 0);
        }
    }
    dtrain_ddp_destroy(ddp);
    free(large);
    return DTRAIN_OK;
}

DTRAIN__EXACT_END

TEST(large_gradients_are_reduced_where_they_lie_and_small_ones_together)
{
    dtrain_allocator allocator = {counting_resize, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    for (int variant = 0; variant < 8; variant++)
        for (int ranks = 1; ranks <= 4; ranks++)
            CHECK_EQ(dtrain_run_threads(ranks, large_rank, &variant, &desc), DTRAIN_OK);
    CHECK_EQ(held, 0);
}

TEST(eight_micro_batches_give_the_sequential_tree_on_1_2_4_and_8_ranks)
{
    static ddp_run run;
    for (int variant = 0; variant < 32; variant++) {
        run.micro_batches = 8;
        run.no_overlap = variant & 1;
        run.shuffled = variant >> 1 & 1;
        run.skips = variant >> 2 & 1;
        run.bucket_bytes = variant & 8 ? 1 : 5000;
        run.poll = variant >> 4 & 1;
        for (int ranks = 1; ranks <= 8; ranks *= 2) {
            run_ddp(&run, ranks);
            check_tree(&run);
        }
    }
}

TEST(any_number_of_micro_batches_folds_by_the_tree)
{
    static ddp_run run;
    for (run.micro_batches = 1; run.micro_batches <= 17; run.micro_batches++) {
        run.skips = run.micro_batches > 1;
        run_ddp(&run, 1);
        check_tree(&run);
    }
}

TEST(other_numbers_of_ranks_agree_within_rounding_and_ranks_may_have_none)
{
    static ddp_run run, one;
    const int worlds[] = {3, 5, 6, 7, 11};
    one.micro_batches = run.micro_batches = 8;
    run_ddp(&one, 1);
    for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; w++) {
        run_ddp(&run, worlds[w]); /* eleven ranks: three have none */
        for (size_t e = 0; e < unit_begin(LAYERS) + WIDTH; e++)
            CHECK(fabs((double)run.first[e] - (double)one.first[e]) < 0.05);
    }
    run.micro_batches = 1; /* a sum of one and of nothing keeps its bits */
    run_ddp(&run, 4);
    check_tree(&run);
}

static dtrain_status weightless_rank(dtrain_comm *world, void *user)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp;
    double total = -1;
    (void)user;
    model_init(m);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_begin(ddp, 0, 0.0), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_finish(ddp, &total), DTRAIN_OK);
    CHECK(total == 0.0);
    for (size_t i = 0; i < unit_begin(LAYERS) + WIDTH; i++)
        CHECK(m->grad[i] == 0.0f);
    dtrain_ddp_destroy(ddp);
    free(m);
    return DTRAIN_OK;
}

TEST(a_step_without_examples_has_zero_gradients_and_no_weight)
{
    CHECK_EQ(dtrain_run_threads(3, weightless_rank, NULL, NULL), DTRAIN_OK);
}

TEST(ddp_calls_out_of_place_are_refused)
{
    static model m;
    dtrain_comm *world;
    dtrain_ddp *ddp;
    model_init(&m);
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_create(NULL, world, m.table, 3, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_create(&ddp, NULL, m.table, 3, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m.table, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK(ddp == NULL);
    CHECK_CONTAINS(dtrain_last_error(), "empty");
    m.table[0].dtype = DTRAIN_F64;
    m.table[0].shape[0] = 2;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m.table, 3, NULL), DTRAIN_ERR_UNSUPPORTED);
    model_init(&m);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m.table, 3, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_begin(NULL, 1, 1.0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_reduce(NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "no step is open");
    CHECK_EQ(dtrain_ddp_next(ddp), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "no step is open");
    CHECK_EQ(dtrain_ddp_begin(ddp, -1, 1.0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "micro_batches is -1");
    CHECK_EQ(dtrain_ddp_begin(ddp, 1, -1.0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "weight -1");
    CHECK_EQ(dtrain_ddp_begin(ddp, 2, 1.0), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_begin(ddp, 2, 1.0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "a step is open");
    CHECK_EQ(dtrain_ddp_reduce(ddp, LAYERS + 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "there is no unit 5");
    CHECK_EQ(dtrain_ddp_reduce(ddp, -1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_reduce(ddp, LAYERS + 1), DTRAIN_OK); /* frozen: nothing to do */
    CHECK_EQ(dtrain_ddp_reduce(ddp, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_reduce(ddp, 1), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "unit 1 was reduced twice in micro-batch 0");
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "1 of 2 micro-batches");
    CHECK_EQ(dtrain_ddp_next(ddp), DTRAIN_OK);
    for (int unit = 0; unit <= LAYERS; unit++)
        CHECK_EQ(dtrain_ddp_reduce(ddp, unit), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "all 2 micro-batches");
    CHECK_EQ(dtrain_ddp_next(ddp), DTRAIN_OK); /* legal after every micro-batch */
    CHECK_EQ(dtrain_ddp_next(ddp), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_begin(ddp, 0, 0.0), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_begin(ddp, 3, 1.0), DTRAIN_OK); /* destroyed in an open step */
    dtrain_ddp_destroy(ddp);
    dtrain_ddp_destroy(NULL);
    CHECK_EQ(dtrain_comm_allocator(world)->bytes > 0, 1);
    dtrain_comm_destroy(world);
}

static dtrain_status rank_without_gradient(dtrain_comm *world, void *user)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp;
    int lacks = dtrain_comm_rank(world) == 1;
    (void)user;
    model_init(m);
    m->table[1].grad = lacks ? NULL : m->table[1].grad;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, NULL), lacks ? DTRAIN_ERR_INVALID : DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(),
                   "parameter layers is not frozen, and its grad is NULL, expected memory for 2100 "
                   "elements: set grad, or set frozen");
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 1, NULL), DTRAIN_OK); /* the group can be used */
    dtrain_ddp_destroy(ddp);
    free(m);
    return DTRAIN_OK;
}

TEST(a_parameter_that_is_not_frozen_and_has_no_gradient_is_refused)
{
    CHECK_EQ(dtrain_run_threads(2, rank_without_gradient, NULL, NULL), DTRAIN_OK);
}

static dtrain_status frozen_rank(dtrain_comm *world, void *user)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp;
    float kept = 7.0f;
    (void)user;
    model_init(m);
    m->table[2].grad = &m->grad[FLAT - 64];
    m->table[2].frozen = 1;
    m->grad[FLAT - 64] = kept;
    m->data[FLAT - 64] = (float)dtrain_comm_rank(world);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, NULL), DTRAIN_OK);
    CHECK(m->data[FLAT - 64] == 0.0f); /* as rank 0 has it: frozen weights are used too */
    CHECK_EQ(dtrain_ddp_begin(ddp, 1, 1.0), DTRAIN_OK);
    m->grad[0] = (float)dtrain_comm_rank(world);
    for (int unit = LAYERS + 1; unit >= 0; unit--)
        CHECK_EQ(dtrain_ddp_reduce(ddp, unit), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
    CHECK(m->grad[0] == 1.0f); /* (0 + 1 + 2) / 3 */
    CHECK(m->grad[FLAT - 64] == kept);
    dtrain_ddp_destroy(ddp);
    free(m);
    return DTRAIN_OK;
}

TEST(a_frozen_gradient_is_neither_cleared_nor_reduced)
{
    CHECK_EQ(dtrain_run_threads(3, frozen_rank, NULL, NULL), DTRAIN_OK);
}

static const char *const other_tables[] = {"dtrain_ddp_create: parameter 2: name ", "on rank 0, but \"ice\" on rank 1",
                                           "frozen 0 on rank 0, but 1 on rank 1; give all ranks the same table",
                                           "tied 0 on rank 0, but 1 on rank 1; give all ranks the same table"};

static dtrain_status differing_rank(dtrain_comm *world, void *user)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp;
    model_init(m);
    if (dtrain_comm_rank(world) == 1 && *(int *)user == 0)
        m->table[2].name = "ice";
    if (dtrain_comm_rank(world) == 1 && *(int *)user == 1)
        m->table[0].frozen = 1;
    if (dtrain_comm_rank(world) == 1 && *(int *)user == 2)
        m->table[0].tied = 1;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, NULL), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), other_tables[*(int *)user + 1]);
    if (*(int *)user == 0)
        CHECK_CONTAINS(dtrain_last_error(), other_tables[0]);
    free(m);
    return DTRAIN_OK;
}

static dtrain_status four_ranks_three_shapes(dtrain_comm *world, void *user)
{
    static const size_t rows[] = {4, 3, 3, 2};
    float data[32] = {0}, grad[32];
    int rank = dtrain_comm_rank(world);
    dtrain_param table[2];
    dtrain_ddp *ddp;
    (void)user;
    memset(table, 0, sizeof table);
    table[0].name = "a";
    table[1].name = "wte";
    for (int i = 0; i < 2; i++) {
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = 1;
        table[i].data = data + 16 * i;
        table[i].grad = grad + 16 * i;
    }
    table[1].shape[0] = rows[rank];
    table[1].shape[1] = 4;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, table, 2, NULL), DTRAIN_ERR_MISMATCH);
    CHECK(strcmp(dtrain_last_error(),
                 "dtrain_ddp_create: parameter 1 \"wte\": shape {4, 4} on rank 0, but {3, 4} on ranks 1, 2, and {2, 4} "
                 "on rank 3; give all ranks the same table and desc") == 0);
    table[0].name = rank == 2 ? NULL : "a"; /* refused before anything is compared */
    CHECK_EQ(dtrain_ddp_create(&ddp, world, table, 2, NULL), rank == 2 ? DTRAIN_ERR_INVALID : DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), rank == 2 ? "parameter 0 of the table has no name"
                                                  : "dtrain_ddp_create: rank 2 of 4 could not make its part: parameter "
                                                    "0 of the table has no name");
    table[0].name = "a";
    table[1].shape[0] = 4;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, table, 2, NULL), DTRAIN_OK); /* the group can be used */
    dtrain_ddp_destroy(ddp);
    return DTRAIN_OK;
}

TEST(a_refused_table_says_which_parameter_and_field_differ_on_which_ranks)
{
    CHECK_EQ(dtrain_run_threads(4, four_ranks_three_shapes, NULL, NULL), DTRAIN_OK);
}

TEST(ranks_with_other_tables_are_refused)
{
    for (int difference = 0; difference < 3; difference++)
        CHECK_EQ(dtrain_run_threads(2, differing_rank, &difference, NULL), DTRAIN_OK);
}

static dtrain_status leaving_rank(dtrain_comm *world, void *user)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp;
    dtrain_ddp_desc desc;
    model_init(m);
    memset(&desc, 0, sizeof desc);
    desc.no_overlap = *(int *)user;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_OK);
    if (dtrain_comm_rank(world) != 2) {
        dtrain_status status = dtrain_ddp_begin(ddp, 1, 1.0);
        for (int unit = LAYERS; unit >= 0; unit--) {
            if (status == DTRAIN_OK)
                status = dtrain_ddp_reduce(ddp, unit);
        }
        CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank 2");
        CHECK(strstr(dtrain_last_error(), "rank 2") != NULL);
        CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_ERR_INVALID); /* the step is closed */
    }
    dtrain_ddp_destroy(ddp);
    free(m);
    return DTRAIN_OK;
}

TEST(a_rank_that_leaves_is_named_by_finish)
{
    for (int no_overlap = 0; no_overlap < 2; no_overlap++)
        CHECK_EQ(dtrain_run_threads(3, leaving_rank, &no_overlap, NULL), DTRAIN_OK);
}
