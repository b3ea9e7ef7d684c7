/* Parameters that a program has already, taken over by dtrain_fsdp_adopt, and passes that name only the unit they come
 * to: the same bits as dtrain_fsdp_create with every gather, release and reduce written out. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "async_device.h"

#define LAYERS 3
#define UNITS (LAYERS + 1)
#define STEPS 2
#define BATCHES 3
#define BIG 70001 /* more than a rank keeps apart */

enum { EMBED, SCALAR, WEIGHTS, BIASES, FROZEN, PARAMS };
static const size_t sizes[PARAMS] = {BIG, 1, LAYERS * 5 * 7, LAYERS * 3, 11};

typedef struct plan {
    dtrain_fsdp_desc desc;
    int written_out; /* every call by itself, on a table without memory */
    int all_load;    /* every rank has the values */
    float result[PARAMS][BIG];
} plan;

static float value(int param, size_t i)
{
    return (float)((i * 7919 + (size_t)param * 104729) % 2001) * 0.001f - 1.0f;
}

static void describe(dtrain_param *table)
{
    static const char *const names[PARAMS] = {"embed", "scalar", "weights", "biases", "frozen"};
    memset(table, 0, PARAMS * sizeof *table);
    for (int p = 0; p < PARAMS; p++) {
        table[p].name = names[p];
        table[p].dtype = DTRAIN_F32;
        table[p].shape[0] = sizes[p];
    }
    for (int p = WEIGHTS; p <= BIASES; p++) {
        table[p].shape[0] = LAYERS;
        table[p].shape[1] = sizes[p] / LAYERS;
        table[p].stacked = table[p].unit = 1;
    }
    table[EMBED].tied = table[SCALAR].tied = table[FROZEN].tied = 1;
    table[FROZEN].frozen = 1;
}

/* What a trainer has before it shards: one block, of which `loads` ranks hold the model's values. */
static float *load(dtrain_param *table, int loads)
{
    size_t count = 0, at = 0;
    for (int p = 0; p < PARAMS; p++)
        count += sizes[p];
    float *block = (float *)malloc(2 * count * sizeof(float));
    for (int p = 0; p < PARAMS; at += sizes[p++])
        for (size_t i = 0; i < sizes[p]; i++) {
            block[at + i] = loads ? value(p, i) : 77.0f;
            block[count + at + i] = 88.0f;
        }
    at = 0;
    for (int p = 0; p < PARAMS; at += sizes[p++]) {
        table[p].data = block + at;
        table[p].grad = block + count + at;
    }
    return block;
}

/* Adds a gradient to each element that a unit has. */
static void compute(dtrain_fsdp *fsdp, int unit, int number)
{
    dtrain_param table[PARAMS];
    describe(table);
    for (int p = 0; p < PARAMS; p++) {
        int layers = table[p].stacked;
        size_t count = layers ? sizes[p] / LAYERS : sizes[p], at = layers ? (size_t)(unit - 1) * count : 0;
        if (p == FROZEN || (unit > 0) != layers)
            continue;
        float *param = dtrain_fsdp_unit_param(fsdp, table[p].name, unit);
        float *grad = dtrain_fsdp_unit_grad(fsdp, table[p].name, unit);
        for (size_t i = 0; i < count; i++)
            grad[i] += param[i] * 0.5f + value(number, at + i);
    }
}

static void batch_written_out(dtrain_fsdp *fsdp, int number)
{
    for (int unit = 0; unit < UNITS; unit++) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
        if (unit < UNITS - 1)
            CHECK_EQ(dtrain_fsdp_release(fsdp, unit), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
    compute(fsdp, 0, number + 50);
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
        compute(fsdp, unit, number);
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
    }
}

static void batch_by_units(dtrain_fsdp *fsdp, int number)
{
    for (int unit = 0; unit < UNITS; unit++)
        CHECK_EQ(dtrain_fsdp_forward_to(fsdp, unit), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
    compute(fsdp, 0, number + 50);
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        CHECK_EQ(dtrain_fsdp_backward_to(fsdp, unit), DTRAIN_OK);
        compute(fsdp, unit, number);
        if (unit == 2) /* by hand: it is not left again */
            CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
    }
}

static void evaluate(dtrain_fsdp *fsdp, int written_out)
{
    for (int unit = 0; unit < UNITS; unit++) {
        CHECK_EQ(written_out ? dtrain_fsdp_gather(fsdp, unit) : dtrain_fsdp_forward_to(fsdp, unit), DTRAIN_OK);
        if (written_out)
            CHECK_EQ(dtrain_fsdp_release(fsdp, unit), DTRAIN_OK);
    }
}

static dtrain_fsdp *begin(dtrain_comm *world, const plan *p)
{
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    describe(table);
    float *block = load(table, p->all_load || dtrain_comm_rank(world) == 0);
    if (!p->written_out) {
        if (!p->all_load && dtrain_comm_rank(world) == 1) /* only rank 0's data counts */
            table[EMBED].data = table[WEIGHTS].data = NULL;
        CHECK_EQ(dtrain_fsdp_adopt(&fsdp, world, table, PARAMS, &p->desc), DTRAIN_OK);
        for (int i = 0; i < PARAMS; i++) {
            CHECK(table[i].data == dtrain_fsdp_param(fsdp, table[i].name));
            CHECK(table[i].grad == dtrain_fsdp_grad(fsdp, table[i].name));
            CHECK((i == FROZEN) == (table[i].grad == NULL) && table[i].data != NULL);
        }
    } else {
        float *rank_0s[PARAMS];
        for (int i = 0; i < PARAMS; i++) {
            rank_0s[i] = (float *)table[i].data;
            table[i].data = table[i].grad = NULL;
        }
        CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &p->desc), DTRAIN_OK);
        for (int i = 0; i < PARAMS; i++)
            CHECK_EQ(dtrain_fsdp_set(fsdp, table[i].name, rank_0s[i], 0), DTRAIN_OK);
    }
    free(block);
    return fsdp;
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    plan *p = (plan *)user;
    dtrain_fsdp *fsdp = begin(world, p);
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_param table[PARAMS];
    describe(table);
    for (int step = 0; step < STEPS; step++) {
        for (int j = 0; j < BATCHES; j++) {
            int number = (step * BATCHES + j) * ranks + rank;
            if (p->written_out)
                batch_written_out(fsdp, number);
            else
                batch_by_units(fsdp, number);
        }
        CHECK_EQ(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 0.01f), DTRAIN_OK);
        evaluate(fsdp, p->written_out);
    }
    for (int i = 0; i < PARAMS; i++)
        CHECK_EQ(dtrain_fsdp_get(fsdp, table[i].name, rank == 0 ? p->result[i] : NULL, 0), DTRAIN_OK);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

static plan ours, theirs;

static void compare(int ranks, dtrain_strategy strategy, int shard_size, dtrain_dtype gather)
{
    dtrain_comm_desc soon;
    memset(&soon, 0, sizeof soon);
    soon.timeout_ms = test_ms(20000);
    memset(&ours.desc, 0, sizeof ours.desc);
    ours.desc.strategy = strategy;
    ours.desc.shard_size = shard_size;
    ours.desc.gather_dtype = gather;
    ours.desc.optimizer.kind = DTRAIN_ADAMW;
    ours.desc.no_broadcast = ours.all_load;
    theirs.desc = ours.desc;
    theirs.written_out = 1;
    CHECK_EQ(dtrain_run_threads(ranks, train, &theirs, &soon), DTRAIN_OK);
    CHECK_EQ(dtrain_run_threads(ranks, train, &ours, &soon), DTRAIN_OK);
    for (int i = 0; i < PARAMS; i++)
        if (memcmp(ours.result[i], theirs.result[i], sizes[i] * sizeof(float)) != 0)
            TEST_FAIL("%d ranks, strategy %d: parameter %d differs", ranks, (int)strategy, i);
    for (size_t i = 0; i < sizes[FROZEN]; i++)
        CHECK(ours.result[FROZEN][i] == value(FROZEN, i));
    CHECK(ours.result[EMBED][5] != value(EMBED, 5));
}

TEST(adopted_parameters_train_as_created_ones_under_every_strategy)
{
    ours.all_load = 0;
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_DDP; strategy++)
        for (int ranks = 1; ranks <= 3; ranks++)
            compare(ranks, (dtrain_strategy)strategy, 0, ranks == 2 ? DTRAIN_BF16 : DTRAIN_F32);
    compare(4, DTRAIN_HYBRID_SHARD, 2, DTRAIN_F32);
}

TEST(so_they_do_where_every_rank_brings_them)
{
    ours.all_load = 1;
    compare(3, DTRAIN_FULL_SHARD, 0, DTRAIN_F32);
    compare(2, DTRAIN_DDP, 0, DTRAIN_F32);
    ours.all_load = 0;
}

/* Evaluations that go to a unit for each of its two layers, then a step: no such visit is a turn of the pass. */
static dtrain_status go_twice(dtrain_comm *world, void *user)
{
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    (void)user;
    describe(table);
    float *block = load(table, 1);
    CHECK_EQ(dtrain_fsdp_adopt(&fsdp, world, table, PARAMS, NULL), DTRAIN_OK);
    free(block);
    for (int pass = 0; pass < 3; pass++)
        for (int visit = 0; visit < 2 * UNITS; visit++)
            CHECK_EQ(dtrain_fsdp_forward_to(fsdp, visit / 2), DTRAIN_OK);
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        CHECK_EQ(dtrain_fsdp_backward_to(fsdp, unit), DTRAIN_OK);
        for (int p = 0; p < PARAMS; p++) {
            float *grad = dtrain_fsdp_unit_grad(fsdp, table[p].name, unit);
            for (size_t i = 0; grad != NULL && i < (table[p].stacked ? sizes[p] / LAYERS : sizes[p]); i++)
                grad[i] += (float)(1 + unit);
        }
    }
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    for (size_t s = 0; s < count; s++)
        for (size_t i = 0; slices[s].grads != NULL && i < slices[s].count; i++)
            if (slices[s].grads[i] != (float)(1 + slices[s].unit)) {
                TEST_FAIL("%s: gradient %g in unit %d", slices[s].name, (double)slices[s].grads[i], slices[s].unit);
                break;
            }
    CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_unit_that_a_forward_pass_goes_to_twice_loses_no_gradient)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        CHECK_EQ(dtrain_run_threads(ranks, go_twice, NULL, NULL), DTRAIN_OK);
}

/* ---- what goes wrong ---- */

typedef struct counted {
    int fails; /* allocations that are refused from this one on; 0: none */
    int made;
} counted;

static void *counted_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    counted *c = (counted *)user;
    if (new_bytes > old_bytes && __atomic_add_fetch(&c->made, 1, __ATOMIC_SEQ_CST) >= c->fails && c->fails > 0)
        return NULL;
    return test_resize(pointer, old_bytes, new_bytes, align);
}

static void check_untouched(const dtrain_param *table, const dtrain_param *before, dtrain_fsdp *fsdp)
{
    CHECK(fsdp == NULL);
    CHECK(memcmp(table, before, PARAMS * sizeof *table) == 0);
    for (int p = 0; p < PARAMS; p++)
        for (size_t i = 0; i < sizes[p]; i++)
            if (table[p].data != NULL && ((const float *)table[p].data)[i] != value(p, i))
                TEST_FAIL("parameter %d has another value at %zu", p, i);
}

static dtrain_status refuse(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), way = *(int *)user;
    dtrain_fsdp_desc desc;
    dtrain_param table[PARAMS], before[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    dtrain_status status;
    memset(&desc, 0, sizeof desc);
    describe(table);
    float *block = load(table, 1);
    if (way == 0)
        desc.no_prefetch = rank;
    desc.no_broadcast = way == 1;
    if (way == 1 && rank == 1)
        table[WEIGHTS].data = NULL;
    memcpy(before, table, sizeof before);
    status = dtrain_fsdp_adopt(&fsdp, world, table, PARAMS, &desc);
    CHECK_EQ(status, way == 0 ? DTRAIN_ERR_MISMATCH : rank == 1 ? DTRAIN_ERR_INVALID : DTRAIN_ERR_ABORTED);
    if (way == 1)
        CHECK_CONTAINS(dtrain_last_error(), "weights has data on rank 0");
    check_untouched(table, before, fsdp);
    free(block);
    return DTRAIN_OK;
}

TEST(what_ranks_do_not_agree_on_leaves_the_table_as_it_was)
{
    for (int way = 0; way < 2; way++)
        CHECK_EQ(dtrain_run_threads(2, refuse, &way, NULL), DTRAIN_OK);
    dtrain_fsdp *fsdp;
    CHECK_EQ(dtrain_fsdp_adopt(&fsdp, NULL, NULL, 0, NULL), DTRAIN_ERR_INVALID);
}

/* A rank's allocator refuses from the n-th allocation on, for every n that adopting comes to. */
TEST(without_memory_the_table_stays_as_it_was)
{
    int fails = 1;
    for (int made = 0; !made && fails < 200; fails++) {
        counted c = {0, 0};
        dtrain_comm_desc desc;
        dtrain_allocator allocator = {counted_resize, &c, 0, 0};
        dtrain_comm *world;
        dtrain_param table[PARAMS], before[PARAMS];
        dtrain_fsdp *fsdp = NULL;
        memset(&desc, 0, sizeof desc);
        desc.allocator = &allocator;
        CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_OK);
        describe(table);
        float *block = load(table, 1);
        memcpy(before, table, sizeof before);
        c.made = 0;
        c.fails = fails;
        made = dtrain_fsdp_adopt(&fsdp, world, table, PARAMS, NULL) == DTRAIN_OK;
        if (!made)
            check_untouched(table, before, fsdp);
        c.fails = 0;
        dtrain_fsdp_destroy(fsdp);
        free(block);
        size_t left = allocator.bytes;
        dtrain_comm_destroy(world);
        CHECK(left > 0 && allocator.bytes == 0);
    }
    CHECK(fails > 10 && fails < 200);
}

/* ---- memory ---- */

TEST(adopting_needs_a_mebibyte_more_than_creating)
{
    dtrain_comm *world; /* of one: threads share an allocator */
    dtrain_param table[PARAMS], bare[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    describe(table);
    describe(bare);
    float *block = load(table, 1);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, bare, PARAMS, NULL), DTRAIN_OK);
    size_t created = dtrain_fsdp_get_stats(fsdp).peak_bytes;
    dtrain_fsdp_destroy(fsdp);
    size_t before = dtrain_comm_allocator(world)->peak_bytes;
    CHECK_EQ(dtrain_fsdp_adopt(&fsdp, world, table, PARAMS, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get_stats(fsdp).peak_bytes, created);
    CHECK(dtrain_comm_allocator(world)->peak_bytes <= before + ((size_t)1 << 20) + 4096);
    free(block);
    dtrain_fsdp_destroy(fsdp);
    dtrain_comm_destroy(world);
}

/* ---- on a device ---- */

static dtrain_status adopt_on_a_device(dtrain_comm *world, void *user)
{
    static async_device fakes[2];
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    int rank = dtrain_comm_rank(world);
    float *got = (float *)malloc(BIG * sizeof(float));
    dtrain_device *device = async_begin(&fakes[rank], rank, 5, 50);
    void *memory[PARAMS];
    (void)user;
    describe(table);
    float *block = load(table, rank == 0);
    for (int p = 0; p < PARAMS; p++) {
        CHECK_EQ(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, sizes[p] * sizeof(float), &memory[p]), DTRAIN_OK);
        CHECK_EQ(dtrain_device_copy(device, memory[p], table[p].data, sizes[p] * sizeof(float)), DTRAIN_OK);
        table[p].data = memory[p];
        table[p].grad = NULL;
        table[p].device = device;
    }
    CHECK_EQ(dtrain_fsdp_adopt(&fsdp, world, table, PARAMS, NULL), DTRAIN_OK);
    CHECK(table[WEIGHTS].data == NULL && table[EMBED].data == dtrain_fsdp_unit_param(fsdp, "embed", 0));
    for (int p = 0; p < PARAMS; p++)
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, memory[p]);
    for (int p = 0; p < PARAMS; p++) {
        CHECK_EQ(dtrain_fsdp_get(fsdp, table[p].name, got, -1), DTRAIN_OK);
        for (size_t i = 0; i < sizes[p]; i++)
            if (got[i] != value(p, i)) {
                TEST_FAIL("parameter %d is %g at %zu, expected %g", p, (double)got[i], i, (double)value(p, i));
                break;
            }
    }
    dtrain_fsdp_destroy(fsdp);
    async_end(&fakes[rank]);
    free(block);
    free(got);
    return DTRAIN_OK;
}

TEST(memory_of_a_device_is_adopted_too)
{
    CHECK_EQ(dtrain_run_threads(2, adopt_on_a_device, NULL, NULL), DTRAIN_OK);
}
