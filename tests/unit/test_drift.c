/* Replicas that drift apart: DDP and FSDP compare a hash of their weights on messages that are sent anyway. Which step
 * finds a difference is computed by hand from where it is; the group and the object can be used after it. */
#include "dtrain.h"
#include "test.h"
#include "worlds.h"
#include "async_device.h"
#include <math.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* 2703 weights in three parts of 901: they would be a thousand, but a part has at least 1,024 where there are so many,
 * and ceil(2703 / 1024) is 3. */
enum { WTE = 1500, LAYERS = 2, BLOCK = 600, BIAS = 3, FLAT = WTE + LAYERS * BLOCK + BIAS, PART = FLAT / 3 };
enum { UNITS = LAYERS + 1, PARAMS = 4 };
enum { NOTHING, FIRST_WEIGHT, SKIPS, OTHER_RATE, APPROXIMATES };

typedef struct model {
    float data[FLAT], grad[FLAT];
    dtrain_param table[PARAMS];
} model;

static struct {
    int what, rank, micro_batches, check_every;
    size_t at;          /* of the weight that differs */
    unsigned ranks;     /* bits: those that differ */
    const char *expect; /* in the text */
    int found;          /* by this step; -1: never */
} plan;

static void model_open(model *m)
{
    const size_t sizes[PARAMS] = {WTE, 0, BLOCK, BIAS}, begins[PARAMS] = {0, WTE, WTE, WTE + LAYERS * BLOCK};
    static const char *const names[PARAMS] = {"wte", "empty", "blocks", "bias"};
    memset(m, 0, sizeof *m);
    for (int i = 0; i < PARAMS; i++) {
        m->table[i].name = names[i];
        m->table[i].dtype = DTRAIN_F32;
        m->table[i].shape[0] = i == 2 ? LAYERS : sizes[i];
        m->table[i].shape[1] = i == 2 ? BLOCK : 0;
        m->table[i].ndim = i == 2 ? 2 : 1;
        m->table[i].stacked = i == 2;
        m->table[i].unit = i == 0 ? 0 : i == 3 ? 2 : 1;
        m->table[i].data = m->data + begins[i];
        m->table[i].grad = m->grad + begins[i];
    }
    for (int i = 0; i < FLAT; i++)
        m->data[i] = (float)(i % 13 + 1);
}

static float inverse_root(float x, int approximates)
{
#if defined(__SSE__)
    return approximates ? _mm_cvtss_f32(_mm_rsqrt_ss(_mm_set_ss(x))) : 1.0f / sqrtf(x);
#else
    return approximates ? nextafterf(1.0f / sqrtf(x), 1.0f) : 1.0f / sqrtf(x);
#endif
}

static dtrain_status ddp_step(dtrain_ddp *ddp, model *m, int step)
{
    dtrain_status status = dtrain_ddp_begin(ddp, plan.micro_batches, 1.0);
    for (int k = 0; status == DTRAIN_OK && k < plan.micro_batches; k++) {
        for (int i = 0; i < FLAT; i++)
            m->grad[i] = (float)(i % 7 + step + 1);
        for (int unit = UNITS - 1; status == DTRAIN_OK && unit >= 0; unit--)
            status = dtrain_ddp_reduce(ddp, unit);
    }
    return status == DTRAIN_OK ? dtrain_ddp_finish(ddp, NULL) : status;
}

static void update(model *m, int step, int differs)
{
    if (differs && plan.what == SKIPS && step == 1)
        return;
    for (int i = 0; i < FLAT; i++) {
        float rate = differs && plan.what == OTHER_RATE && step == 1 ? 0.125f : 0.25f;
        m->data[i] -= rate * inverse_root(m->grad[i], differs && plan.what == APPROXIMATES && step == 1);
    }
}

/* Eight steps; weights of all ranks are the same again after a difference was found. */
static void drifts(dtrain_comm *world)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp = NULL;
    dtrain_ddp_desc desc;
    int rank = dtrain_comm_rank(world), differs = (int)(plan.ranks >> rank & 1), found = -1;
    memset(&desc, 0, sizeof desc);
    desc.no_broadcast = 1;
    desc.check_every = plan.check_every;
    model_open(m);
    if (differs && plan.what == FIRST_WEIGHT)
        m->data[plan.at] = -7.0f;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, PARAMS, &desc), DTRAIN_OK);
    for (int step = 0; step < 8; step++) {
        dtrain_status status = ddp_step(ddp, m, step);
        if (found >= 0 || status == DTRAIN_OK) {
            if (status != DTRAIN_OK)
                fprintf(stderr, "rank %d, step %d: %s\n", rank, step, dtrain_last_error());
            CHECK_EQ(status, DTRAIN_OK);
            CHECK(m->grad[WTE] == (float)(WTE % 7 + step + 1) * (float)plan.micro_batches);
            update(m, step, differs);
            continue;
        }
        found = step;
        CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(dtrain_last_error(), plan.expect);
        CHECK_CONTAINS(dtrain_last_error(), "dtrain_ddp_finish: ");
        CHECK_EQ(dtrain_broadcast(world, m->data, FLAT, DTRAIN_F32, 0), DTRAIN_OK);
    }
    CHECK_EQ(found, plan.found);
    dtrain_ddp_destroy(ddp);
    free(m);
}

static void set_plan(int what, unsigned ranks, size_t at, int found, const char *expect)
{
    memset(&plan, 0, sizeof plan);
    plan.what = what;
    plan.ranks = ranks;
    plan.at = at;
    plan.found = found;
    plan.expect = expect;
    plan.micro_batches = 1;
}

TEST(a_first_weight_that_differs_is_found_in_the_step_of_its_part)
{
    static const size_t at[] = {0, PART - 1, PART, WTE - 1, WTE, WTE + BLOCK, FLAT - BIAS, FLAT - 1};
    static const char *const names[] = {"0 \"wte\"",    "0 \"wte\"",    "0 \"wte\"",  "0 \"wte\"",
                                        "2 \"blocks\"", "2 \"blocks\"", "3 \"bias\"", "3 \"bias\""};
    for (int i = 0; i < 8; i++) {
        char text[96];
        snprintf(text, sizeof text, "parameter %s of rank 1 is not that of rank 0", names[i]);
        set_plan(FIRST_WEIGHT, 1u << 1, at[i], (int)(at[i] / PART), text);
        plan.micro_batches = 1 + i % 3; /* steps count, not micro-batches */
        on_threads(2 + i % 2, drifts, NULL);
    }
    set_plan(FIRST_WEIGHT, 1u << 2, FLAT - 1, 2, "parameter 3 \"bias\" of rank 2 is not that of rank 0");
    on_processes(3, drifts, NULL);
    on_cables(3, drifts, NULL);
    dtrain_comm_desc polls;
    memset(&polls, 0, sizeof polls);
    polls.progress = DTRAIN_PROGRESS_POLL;
    on_processes(3, drifts, &polls);
}

TEST(fewer_parts_find_it_sooner_and_none_never)
{
    set_plan(FIRST_WEIGHT, 1u << 1, FLAT - 1, 0, "\"bias\" of rank 1");
    plan.check_every = 1;
    on_threads(3, drifts, NULL);
    plan.check_every = 2; /* of 1,352 and 1,351 */
    plan.found = 1;
    on_threads(3, drifts, NULL);
    plan.check_every = -1;
    plan.found = -1;
    on_threads(3, drifts, NULL);
    set_plan(FIRST_WEIGHT, 1, 0, -1, "");
    on_threads(1, drifts, NULL); /* nobody to differ from */
    set_plan(NOTHING, 0, 0, -1, "");
    on_threads(4, drifts, NULL);
}

TEST(another_step_rate_or_instruction_on_a_rank_is_found_in_the_next_step)
{
    for (int what = SKIPS; what <= APPROXIMATES; what++) {
        set_plan(what, 1u << 3, 0, 2, "parameter 0 \"wte\" of rank 3 is not that of rank 0");
        on_threads(4, drifts, NULL);
    }
    on_processes(4, drifts, NULL);
}

TEST(ranks_that_differ_from_most_are_named)
{
    set_plan(FIRST_WEIGHT, 1u << 0, 3, 0, "\"wte\" of rank 0 is not that of rank 1:");
    on_threads(3, drifts, NULL);
    set_plan(FIRST_WEIGHT, 1u << 1 | 1u << 3 | 1u << 4, 3, 0, "\"wte\" of ranks 1, 3, 4 is not that of rank 0:");
    on_threads(7, drifts, NULL);
    set_plan(FIRST_WEIGHT, 1u << 2 | 1u << 3 | 1u << 4 | 1u << 7, 3, 0,
             "\"wte\" of ranks 2 to 4, 7 is not that of rank");
    on_threads(9, drifts, NULL);
}

static void other_rounds(dtrain_comm *world)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp = NULL;
    dtrain_ddp_desc desc;
    memset(&desc, 0, sizeof desc);
    model_open(m);
    desc.check_every = dtrain_comm_rank(world) == 1 ? 50 : 0;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, PARAMS, &desc), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "dtrain_ddp_create: desc.check_every 0 on rank 0, but 50 on rank 1; ");
    free(m);
}

TEST(ranks_that_would_compare_other_parts_are_refused)
{
    on_threads(2, other_rounds, NULL);
}

/* ---- FSDP ---- */

static struct {
    dtrain_strategy strategy;
    int shard_size, rank, loses; /* rank: whose weights change; loses: the step is lost to them */
    dtrain_dtype gather;
    const char *expect;
} shards;

static dtrain_status fsdp_step(dtrain_fsdp *fsdp, int step)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; status == DTRAIN_OK && i < 2 * UNITS; i++) {
        int unit = i < UNITS ? i : 2 * UNITS - 1 - i;
        status = dtrain_fsdp_gather(fsdp, unit);
        float *grad = unit == 0 ? dtrain_fsdp_grad(fsdp, "wte") : dtrain_fsdp_unit_grad(fsdp, "blocks", unit);
        for (int k = 0; status == DTRAIN_OK && i >= UNITS && k < (unit == 0 ? WTE : BLOCK); k++)
            grad[k] += (float)(k % 5 + step);
        if (status == DTRAIN_OK)
            status = i < UNITS ? dtrain_fsdp_release(fsdp, unit) : dtrain_fsdp_reduce(fsdp, unit);
    }
    return status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.25f) : status;
}

static void sharded(dtrain_comm *world)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_desc desc;
    const dtrain_slice *slices;
    size_t count;
    int loses = shards.loses && dtrain_comm_size(world) > 1, rank = dtrain_comm_rank(world);
    memset(&desc, 0, sizeof desc);
    desc.strategy = shards.strategy;
    desc.shard_size = shards.shard_size;
    desc.gather_dtype = shards.gather;
    desc.check_every = 1;
    desc.optimizer.kind = DTRAIN_SGD;
    model_open(m);
    for (int i = 0; i < PARAMS; i++)
        m->table[i].grad = NULL;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, m->table, PARAMS, &desc), DTRAIN_OK);
    CHECK_EQ(fsdp_step(fsdp, 0), DTRAIN_OK);
    CHECK_EQ(fsdp_step(fsdp, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    float *changed = NULL, kept = 0.0f;
    for (size_t i = 0; i < count && changed == NULL; i++)
        if (strcmp(slices[i].name, "blocks") == 0 && slices[i].count > 0)
            changed = slices[i].weights + slices[i].count - 1;
    if (rank == shards.rank && changed != NULL) {
        kept = *changed;
        *changed = nextafterf(kept, 100.0f);
    }
    CHECK_EQ(fsdp_step(fsdp, 2), loses ? DTRAIN_ERR_MISMATCH : DTRAIN_OK);
    if (loses) {
        CHECK_CONTAINS(dtrain_last_error(), shards.expect);
        CHECK_EQ(dtrain_fsdp_get_step(fsdp), 2);
        CHECK_EQ(fsdp_step(fsdp, 2), DTRAIN_ERR_MISMATCH); /* as long as it is so */
        if (rank == shards.rank)
            *changed = kept;
        CHECK_EQ(dtrain_fsdp_publish(fsdp), DTRAIN_OK);
        CHECK_EQ(fsdp_step(fsdp, 2), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_get_step(fsdp), 3);
    }
    dtrain_fsdp_destroy(fsdp);
    free(m);
}

TEST(replicas_of_slices_are_compared_and_slices_of_one_copy_are_not)
{
    shards.gather = DTRAIN_F32;
    shards.rank = 3;
    shards.loses = 1;
    shards.strategy = DTRAIN_HYBRID_SHARD;
    shards.shard_size = 2;
    shards.expect =
        "dtrain_fsdp_step: replicas have drifted apart: parameter 2 \"blocks\" of rank 3 is not that of rank 1:";
    on_threads(6, sharded, NULL);
    shards.gather = DTRAIN_BF16; /* the masters are compared */
    on_threads(6, sharded, NULL);
    shards.strategy = DTRAIN_DDP;
    shards.rank = 2;
    shards.expect = "parameter 2 \"blocks\" of rank 2 is not that of rank 0:";
    on_threads(3, sharded, NULL);
    shards.gather = DTRAIN_F32;
    on_processes(3, sharded, NULL);
    shards.loses = 0;
    shards.strategy = DTRAIN_FULL_SHARD;
    on_threads(3, sharded, NULL);
    shards.strategy = DTRAIN_HYBRID_SHARD;
    shards.shard_size = 3;
    on_threads(3, sharded, NULL);
}

/* All that is trained lies in the second slice: the ranks of the first have nothing to compare. */
static void few_are_trained(dtrain_comm *world)
{
    dtrain_param table[2];
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_desc desc;
    int rank = dtrain_comm_rank(world);
    memset(table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < 2; i++) {
        table[i].name = i == 0 ? "base" : "head";
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = i == 0 ? 5000 : 100;
        table[i].frozen = i == 0;
    }
    desc.strategy = DTRAIN_HYBRID_SHARD;
    desc.shard_size = 2;
    desc.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 2, &desc), DTRAIN_OK);
    for (int step = 0; step < 3; step++) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
        dtrain_fsdp_grad(fsdp, "head")[7] += 1.0f;
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdp, rank == 3 && step == 1 ? 0.5f : 0.25f),
                 step < 2 ? DTRAIN_OK : DTRAIN_ERR_MISMATCH);
    }
    CHECK_CONTAINS(dtrain_last_error(), "parameter 1 \"head\" of rank 3 is not that of rank 1:");
    dtrain_fsdp_destroy(fsdp);
}

TEST(they_are_where_some_ranks_of_a_copy_train_nothing)
{
    on_threads(4, few_are_trained, NULL);
}

/* ---- on a device ---- */

static float *upload(dtrain_device *device, const void *from, size_t bytes)
{
    void *made = NULL;
    CHECK_EQ(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, bytes, &made), DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(device, made, from, bytes), DTRAIN_OK);
    return (float *)made;
}

static void on_a_device(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), found = -1;
    async_device own;
    dtrain_device *device = async_begin(&own, rank, 7, 40);
    model *m = (model *)malloc(sizeof *m);
    dtrain_ddp *ddp = NULL;
    dtrain_ddp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.no_broadcast = 1;
    model_open(m);
    if (rank == plan.rank)
        m->data[plan.at] += 1.0f;
    float *data = upload(device, m->data, sizeof m->data);
    float *grad = upload(device, m->grad, sizeof m->grad);
    for (int i = 0; i < PARAMS; i++) {
        m->table[i].device = device;
        m->table[i].data = data + ((float *)m->table[i].data - m->data);
        m->table[i].grad = grad + ((float *)m->table[i].grad - m->grad);
    }
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, PARAMS, &desc), DTRAIN_OK);
    for (int step = 0; step < 12 && found < 0; step++) {
        CHECK_EQ(dtrain_ddp_begin(ddp, 1, 1.0), DTRAIN_OK);
        for (int unit = UNITS - 1; unit >= 0; unit--)
            CHECK_EQ(dtrain_ddp_reduce(ddp, unit), DTRAIN_OK);
        dtrain_status status = dtrain_ddp_finish(ddp, NULL);
        found = status == DTRAIN_OK ? -1 : step;
        CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_MISMATCH);
        CHECK_EQ(dtrain_device_wait(device), DTRAIN_OK); /* so that a sum is heard in the next step */
    }
    CHECK(plan.rank < 0 ? found < 0 : found >= plan.found && found <= plan.found + 2);
    if (plan.rank >= 0)
        CHECK_CONTAINS(dtrain_last_error(), plan.expect);
    dtrain_ddp_destroy(ddp);
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, data);
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, grad);
    async_end(&own);
    free(m);
}

TEST(weights_on_a_device_are_compared_without_waiting_for_it)
{
    set_plan(FIRST_WEIGHT, 0, WTE - 1, 1, "parameter 0 \"wte\" of rank 1 is not that of rank 0:");
    plan.rank = 1;
    on_threads(3, on_a_device, NULL);
    set_plan(FIRST_WEIGHT, 0, FLAT - 1, 2, "parameter 3 \"bias\" of rank 2 is not that of rank 0:");
    plan.rank = 2;
    on_threads(3, on_a_device, NULL);
    plan.rank = -1;
    on_threads(2, on_a_device, NULL);
}
