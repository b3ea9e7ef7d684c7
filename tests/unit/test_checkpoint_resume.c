/* A run that was stopped and resumed from a checkpoint, against one that never stopped: the same bits on as many ranks,
 * with the order of data, random numbers and the loss scale; on another number of ranks, the same losses. */
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "checkpoint_model.h"

enum { UNITS = 3, ELEMENTS = 1201, STEPS = 8, STOP = 3, MICRO = 12, BATCH = 2 };

static const char *const names[UNITS] = {"a", "b", "c"};

typedef struct run {
    const char *directory;
    int strategy, momentum, scaled, async;
    int forgets;    /* after loading: 1 the random stream's place, 2 the optimizer's step */
    int first, end; /* steps of this stretch; from a checkpoint where first > 0, to one where end < STEPS */
    float weights[UNITS][ELEMENTS];
    double loss;
    float scale;
} run;

static dtrain_status run_create(const run *r, dtrain_fsdp **fsdp, dtrain_comm *world)
{
    dtrain_param table[UNITS];
    dtrain_fsdp_desc desc = desc_of((dtrain_strategy)r->strategy, 2, r->momentum);
    memset(table, 0, sizeof table);
    desc.loss_scale = r->scaled ? 1024.0f : 0.0f;
    desc.loss_scale_steps = 2;
    desc.micro_batches = MICRO;
    for (int i = 0; i < UNITS; i++) {
        table[i].name = names[i];
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = ELEMENTS;
        table[i].unit = i;
    }
    dtrain_status status = dtrain_fsdp_create(fsdp, world, table, UNITS, &desc);
    for (int i = 0; i < UNITS && status == DTRAIN_OK; i++) {
        float first[ELEMENTS];
        for (int e = 0; e < ELEMENTS; e++)
            first[e] = value_of(names[i], 0, (size_t)e);
        status = dtrain_fsdp_set(*fsdp, names[i], first, 0);
    }
    return status;
}

/* The gradient of a distance to what the examples say: it depends on the weights, the examples and a random stream. */
static dtrain_status run_micro_batch(dtrain_fsdp *fsdp, const uint64_t *examples, size_t count, uint64_t random,
                                     float scale)
{
    dtrain_status status = DTRAIN_OK;
    for (int unit = 0; unit < UNITS && status == DTRAIN_OK; unit++)
        if ((status = dtrain_fsdp_gather(fsdp, unit)) == DTRAIN_OK)
            status = dtrain_fsdp_release(fsdp, unit);
    for (int unit = UNITS - 1; unit >= 0 && status == DTRAIN_OK; unit--) {
        status = dtrain_fsdp_gather(fsdp, unit);
        float *grad = dtrain_fsdp_grad(fsdp, names[unit]), *weight = dtrain_fsdp_param(fsdp, names[unit]);
        for (size_t k = 0; k < count && status == DTRAIN_OK; k++) {
            float noise = 0.1f * dtrain_random_normal(77, random * 100 + k);
            for (int e = 0; e < ELEMENTS; e++)
                grad[e] += scale * (weight[e] - (dtrain_random_normal(examples[k], (uint64_t)e) + noise));
        }
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, unit);
    }
    return status;
}

static dtrain_status run_step(run *r, dtrain_fsdp *fsdp, dtrain_comm *world, const dtrain_sampler *sampler, int step,
                              uint64_t *random)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), done = 0;
    int mine = MICRO / ranks + (rank < MICRO % ranks);
    float scale = r->scaled ? dtrain_fsdp_loss_scale(fsdp) : 1.0f;
    dtrain_status status = dtrain_fsdp_begin(fsdp, mine, (double)(mine * BATCH));
    for (int micro = rank; micro < MICRO && status == DTRAIN_OK; micro += ranks, done++) {
        uint64_t examples[BATCH];
        size_t count = dtrain_sampler_batch(sampler, (uint64_t)step, micro, examples);
        status = run_micro_batch(fsdp, examples, count, *random + (uint64_t)micro, scale);
    }
    for (; done < (MICRO + ranks - 1) / ranks && status == DTRAIN_OK; done++)
        status = dtrain_fsdp_join(fsdp);
    *random += MICRO;
    return status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.05f) : status;
}

/* What the run is worth: the mean square of its weights' distance from 1, over all of them. */
static dtrain_status run_end(run *r, dtrain_fsdp *fsdp, int root)
{
    dtrain_status status = DTRAIN_OK;
    double loss = 0;
    static __thread float weights[ELEMENTS];
    for (int i = 0; i < UNITS && status == DTRAIN_OK; i++) {
        status = dtrain_fsdp_get(fsdp, names[i], weights, -1);
        for (int e = 0; e < ELEMENTS; e++)
            loss += ((double)weights[e] - 1) * ((double)weights[e] - 1);
        if (root)
            memcpy(r->weights[i], weights, sizeof weights);
    }
    if (root) {
        r->loss = loss / (UNITS * ELEMENTS);
        r->scale = dtrain_fsdp_loss_scale(fsdp);
    }
    return status;
}

static dtrain_status run_body(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint_state state;
    dtrain_checkpoint *ckpt = NULL;
    dtrain_sampler sampler;
    dtrain_sampler_desc sampler_desc = {101, 9, 0, BATCH, MICRO, 1};
    dtrain_fsdp *fsdp = NULL;
    memset(&desc, 0, sizeof desc);
    memset(&state, 0, sizeof state);
    desc.directory = r->directory;
    desc.no_sync = 1;
    CHECK_EQ(dtrain_sampler_init(&sampler, &sampler_desc), DTRAIN_OK);
    dtrain_status status = run_create(r, &fsdp, world);
    dtrain_pieces lists[2] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&sampler)};
    state.lists = lists;
    state.list_count = 2;
    if (status == DTRAIN_OK)
        status = dtrain_checkpoint_create(&ckpt, world, &desc);
    if (status == DTRAIN_OK && r->first > 0)
        status = dtrain_checkpoint_load(ckpt, &state, NULL, NULL);
    CHECK_EQ(state.step, r->first);
    if (r->forgets == 1 && status == DTRAIN_OK)
        state.random_index = 0;
    if (r->forgets == 2 && status == DTRAIN_OK)
        status = dtrain_fsdp_set_step(fsdp, 0);
    for (int step = (int)state.step; step < r->end && status == DTRAIN_OK; step++)
        status = run_step(r, fsdp, world, &sampler, step, &state.random_index);
    state.step = (uint64_t)r->end;
    if (status == DTRAIN_OK && r->end < STEPS)
        status = r->async ? dtrain_checkpoint_save_async(ckpt, &state) : dtrain_checkpoint_save(ckpt, &state);
    if (status == DTRAIN_OK && r->async)
        status = dtrain_checkpoint_wait(ckpt);
    if (status == DTRAIN_OK)
        status = run_end(r, fsdp, dtrain_comm_rank(world) == 0);
    if (status != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", dtrain_comm_rank(world), dtrain_last_error());
    dtrain_checkpoint_destroy(ckpt);
    dtrain_fsdp_destroy(fsdp);
    return status;
}

static int forget; /* see forgets */

/* Runs steps [0, STOP) on some ranks and the rest on others; straight: all on the first. */
static run run_of(int strategy, int momentum, int scaled, int ranks, int then_strategy, int then)
{
    run r;
    memset(&r, 0, sizeof r);
    r.directory = fresh("resume");
    r.strategy = strategy;
    r.momentum = momentum;
    r.scaled = scaled;
    r.async = ranks % 2;
    r.forgets = forget;
    r.end = then > 0 ? STOP : STEPS;
    CHECK_EQ(dtrain_run_threads(ranks, run_body, &r, NULL), DTRAIN_OK);
    if (then == 0)
        return r;
    r.first = STOP;
    r.end = STEPS;
    r.strategy = then_strategy;
    CHECK_EQ(dtrain_run_threads(then, run_body, &r, NULL), DTRAIN_OK);
    return r;
}

TEST(a_run_resumed_on_as_many_ranks_has_the_bits_of_one_that_never_stopped)
{
    static run straight, resumed;
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_HYBRID_SHARD; strategy++)
        for (int kind = 0; kind < 3; kind++) { /* AdamW, momentum, and AdamW with a loss scale */
            int ranks = strategy == DTRAIN_HYBRID_SHARD ? 4 : 3;
            straight = run_of(strategy, kind == 1, kind == 2, ranks, 0, 0);
            resumed = run_of(strategy, kind == 1, kind == 2, ranks, strategy, ranks);
            CHECK(memcmp(straight.weights, resumed.weights, sizeof straight.weights) == 0);
            CHECK(straight.scale == resumed.scale);
            CHECK(kind != 2 || straight.scale == 1024.0f * 16); /* doubled every second step of 8 */
        }
}

TEST(a_resumed_run_that_forgets_a_counter_differs)
{
    static run straight, resumed;
    straight = run_of(DTRAIN_FULL_SHARD, 0, 0, 3, 0, 0);
    for (forget = 1; forget <= 2; forget++) {
        resumed = run_of(DTRAIN_FULL_SHARD, 0, 0, 3, DTRAIN_FULL_SHARD, 3);
        CHECK(memcmp(straight.weights, resumed.weights, sizeof straight.weights) != 0);
    }
    forget = 0;
}

TEST(a_run_resumed_on_another_number_of_ranks_goes_on_alike)
{
    static run straight, resumed;
    const struct {
        int from, strategy, to, then;
    } cases[] = {{4, DTRAIN_FULL_SHARD, 3, DTRAIN_FULL_SHARD},
                 {4, DTRAIN_FULL_SHARD, 2, DTRAIN_DDP},
                 {2, DTRAIN_DDP, 4, DTRAIN_HYBRID_SHARD},
                 {1, DTRAIN_FULL_SHARD, 5, DTRAIN_SHARD_GRAD_OP},
                 {3, DTRAIN_SHARD_GRAD_OP, 1, DTRAIN_FULL_SHARD}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        straight = run_of(cases[i].strategy, 0, 0, cases[i].from, 0, 0);
        resumed = run_of(cases[i].strategy, 0, 0, cases[i].from, cases[i].then, cases[i].to);
        double off = (resumed.loss - straight.loss) / straight.loss;
        if (!(off < 1e-5 && off > -1e-5))
            TEST_FAIL("case %zu: the loss is %.9g, expected %.9g", i, resumed.loss, straight.loss);
        if (cases[i].from != 3 && cases[i].to != 3 && cases[i].to != 5) /* 12 micro-batches fold alike on 1, 2 and 4 */
            CHECK(memcmp(straight.weights, resumed.weights, sizeof straight.weights) == 0);
    }
}
