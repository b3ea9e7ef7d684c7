/* FSDP and DDP over memory of devices whose queues run behind the CPU: the weights, and every parameter that a layer
 * saw, are the bits of the same training on the CPU. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "async_device.h"
#include "device_training.h"

static dtrain_device *training_device(int rank, uint64_t seed)
{
    return async_begin((async_device *)malloc(sizeof(async_device)), rank, seed, 40);
}

static void training_device_end(dtrain_device *device)
{
    async_end(async_of(device));
    free(async_of(device));
}

TEST(every_strategy_gives_the_cpus_bits)
{
    for (int i = 0; i < 4; i++) {
        run r = plain(strategies[i]);
        check_run(r, "the library's memory");
        r.own_memory = 1;
        check_run(r, "the caller's memory");
    }
}

TEST(one_two_and_three_ranks_give_the_cpus_bits)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        run r = plain(DTRAIN_FULL_SHARD);
        r.ranks = ranks;
        check_run(r, "full shard");
        r.gather = DTRAIN_BF16;
        check_run(r, "full shard in bf16");
        r = plain(DTRAIN_DDP);
        r.ranks = ranks;
        r.micro_batches = 3;
        check_run(r, "DDP");
    }
}

TEST(sixteen_bits_on_the_way_give_the_cpus_bits)
{
    for (int i = 0; i < 4; i++) {
        run r = plain(strategies[i]);
        r.gather = DTRAIN_BF16;
        r.reduce = DTRAIN_BF16;
        check_run(r, "bf16");
        r.own_memory = 1;
        r.gather = DTRAIN_F16;
        check_run(r, "f16 and bf16 over the caller's memory");
    }
}

TEST(micro_batches_give_the_cpus_bits)
{
    for (int i = 0; i < 4; i++) {
        run r = plain(strategies[i]);
        r.micro_batches = 5;
        r.sgd = 1;
        check_run(r, "five micro-batches");
        r.begin = 1;
        r.keep_full_grads = 1;
        check_run(r, "five that are folded in full, one rank with four");
        r.keep_full_grads = 0;
        check_run(r, "five, one rank with four");
    }
}

TEST(options_give_the_cpus_bits)
{
    run r = plain(DTRAIN_FULL_SHARD);
    r.no_overlap = 1;
    check_run(r, "no overlap");
    r.no_overlap = 0;
    r.no_reshard = 1;
    check_run(r, "what was gathered stays");
}

TEST(ddp_gives_the_cpus_bits)
{
    run r = plain(DTRAIN_DDP);
    r.ddp = 1;
    for (r.ranks = 1; r.ranks <= 4; r.ranks++) {
        r.micro_batches = r.ranks;
        check_run(r, "DDP");
    }
}

TEST(ddp_takes_units_in_any_order)
{
    run r = plain(DTRAIN_DDP);
    r.ddp = 1;
    r.upwards = 1;
    r.ranks = 3;
    r.micro_batches = 2;
    check_run(r, "DDP from the first unit to the last");
    r.packs = DTRAIN_COMPRESS_INT8;
    check_run(r, "DDP in int8 from the first unit to the last");
}

TEST(ddp_that_packs_its_sums_gives_the_cpus_bits)
{
    run r = plain(DTRAIN_DDP);
    r.ddp = 1;
    r.packs = DTRAIN_COMPRESS_INT8;
    for (r.ranks = 1; r.ranks <= 4; r.ranks++) {
        r.no_overlap = r.ranks == 2;
        check_run(r, "DDP in int8");
    }
}

/* ---- what is refused ---- */

static dtrain_status refuse(dtrain_comm *comm, void *user)
{
    async_device fake;
    dtrain_fsdp *fsdp = NULL;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc desc;
    int rank = dtrain_comm_rank(comm);
    dtrain_device *device = async_begin(&fake, rank, 1, 20);
    (void)user;
    memset(&desc, 0, sizeof desc);
    fill_table(table, device);
    table[2].device = NULL;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "bias is on cpu");
    fill_table(table, rank == 1 ? NULL : device);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, &desc), DTRAIN_ERR_MISMATCH);
    fill_table(table, device);
    desc.quantise_gather = 64;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, &desc), DTRAIN_ERR_UNSUPPORTED);
    desc.quantise_gather = 0;
    CHECK_OK(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, &desc));
    CHECK_EQ(dtrain_fsdp_unshard(fsdp), DTRAIN_ERR_UNSUPPORTED);
    CHECK(dtrain_fsdp_param(fsdp, "attn") == NULL); /* its layers share places */
    CHECK(dtrain_fsdp_param(fsdp, "wte") == dtrain_fsdp_unit_param(fsdp, "wte", 0));
    CHECK(dtrain_fsdp_unit_param(fsdp, "wte", 1) == NULL);
    CHECK(dtrain_fsdp_unit_grad(fsdp, "fixed", 1) == NULL);
    CHECK(dtrain_fsdp_unit_param(fsdp, "attn", 1) == dtrain_fsdp_unit_param(fsdp, "attn", 3));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 1));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 2));
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 3), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "unit 3 lies where unit 1 does");
    CHECK_OK(dtrain_fsdp_release(fsdp, 1));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 3));
    dtrain_fsdp_destroy(fsdp);
    async_end(&fake);
    return DTRAIN_OK;
}

TEST(what_a_device_cannot_hold_is_refused)
{
    CHECK_OK(dtrain_run_threads(3, refuse, NULL, NULL));
}

/* ---- units that are held, and written ---- */

static void forward(dtrain_fsdp *fsdp)
{
    for (int unit = 0; unit < LAYERS + 2; unit++) {
        CHECK_OK(dtrain_fsdp_gather(fsdp, unit));
        CHECK_OK(dtrain_fsdp_release(fsdp, unit));
    }
}

/* Layers' parameters, of which the caller may hold the memory. */
static dtrain_status hold(dtrain_comm *comm, void *user)
{
    async_device fake;
    dtrain_fsdp *fsdp = NULL;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc desc;
    static const float none[MOST];
    int own_memory = *(const int *)user;
    dtrain_device *device = async_begin(&fake, dtrain_comm_rank(comm), 1, 20);
    memset(&desc, 0, sizeof desc);
    fill_table(table, device);
    for (int p = 0; p < PARAMS && own_memory; p++) {
        table[p].data = upload(device, none, sizes[p]);
        table[p].grad = table[p].frozen ? NULL : upload(device, none, sizes[p]);
    }
    CHECK_OK(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, &desc));
    forward(fsdp);
    CHECK_OK(dtrain_fsdp_gather(fsdp, LAYERS + 1)); /* the pass turns */
    CHECK_OK(dtrain_fsdp_publish(fsdp));            /* while one is held, of whose place others have had gradients */
    forward(fsdp);
    CHECK_OK(dtrain_fsdp_gather(fsdp, LAYERS + 1));
    CHECK_OK(dtrain_fsdp_drop(fsdp));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 1));
    if (own_memory) {
        CHECK_OK(dtrain_fsdp_gather(fsdp, 3)); /* apart from the first */
        CHECK_OK(dtrain_fsdp_gather(fsdp, 5));
        CHECK_OK(dtrain_fsdp_unshard(fsdp));
    }
    dtrain_fsdp_destroy(fsdp);
    for (int p = 0; p < PARAMS && own_memory; p++) {
        drop(device, table[p].data);
        drop(device, table[p].grad);
    }
    async_end(&fake);
    return DTRAIN_OK;
}

TEST(steps_are_dropped_while_units_are_held)
{
    for (int own_memory = 0; own_memory < 2; own_memory++)
        CHECK_OK(dtrain_run_threads(3, hold, &own_memory, NULL));
}

/* Two units that train lie in one place, and between them are frozen ones. */
static dtrain_status leave_out(dtrain_comm *comm, void *user)
{
    async_device fake;
    dtrain_fsdp *fsdp = NULL;
    dtrain_param table[PARAMS];
    float host[MOST];
    dtrain_device *device = async_begin(&fake, dtrain_comm_rank(comm), 1, 20);
    (void)user;
    fill_table(table, device);
    table[0].tied = 0;
    table[1].frozen = table[2].frozen = 1;
    CHECK_OK(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, NULL));
    forward(fsdp);
    CHECK_OK(dtrain_fsdp_gather(fsdp, LAYERS + 1));
    CHECK_OK(dtrain_fsdp_reduce(fsdp, LAYERS + 1));
    CHECK_OK(dtrain_fsdp_next(fsdp)); /* the first unit counts as unused while the last one is on its way */
    CHECK_OK(dtrain_fsdp_step(fsdp, 0.1f));
    CHECK_OK(dtrain_fsdp_begin(fsdp, 0, 1.0));
    CHECK_OK(dtrain_fsdp_drop(fsdp));
    forward(fsdp); /* outside of a step, from where gradients go nowhere */
    CHECK_OK(dtrain_fsdp_gather(fsdp, LAYERS + 1));
    CHECK_OK(dtrain_device_fill(device, dtrain_fsdp_unit_grad(fsdp, names[4], LAYERS + 1), "\1\2\3\4", 4, sizes[4]));
    CHECK_OK(dtrain_fsdp_release(fsdp, LAYERS + 1));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 0));
    CHECK_OK(dtrain_device_copy(device, host, dtrain_fsdp_unit_grad(fsdp, names[0], 0), sizes[0] * sizeof *host));
    for (size_t i = 0; i < sizes[0]; i++)
        CHECK_EQ(to_bits(host[i]), 0);
    dtrain_fsdp_destroy(fsdp);
    async_end(&fake);
    return DTRAIN_OK;
}

TEST(units_that_are_left_out_leave_their_place_clean)
{
    CHECK_OK(dtrain_run_threads(3, leave_out, NULL, NULL));
}

static float as_bf16(float value)
{
    return from_bits((to_bits(value) + 0x7fff + (to_bits(value) >> 16 & 1)) & 0xffff0000u);
}

/* A unit is written while the next one is on its way, which lies where the first is rounded. */
static dtrain_status write_beside(dtrain_comm *comm, void *user)
{
    async_device fake;
    dtrain_fsdp *fsdp = NULL;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc desc;
    float first[MOST], host[MOST];
    size_t layer_size = part_of(1);
    dtrain_device *device = async_begin(&fake, dtrain_comm_rank(comm), 1, 0);
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.gather_dtype = DTRAIN_BF16;
    fill_table(table, device);
    CHECK_OK(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, &desc));
    for (size_t i = 0; i < sizes[1]; i++)
        first[i] = dtrain_random_normal(8, i);
    CHECK_OK(dtrain_fsdp_set(fsdp, names[1], first, 0));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 1)); /* and starts unit 2 */
    async_sleep(device, 100000);           /* which is there before the rest begins */
    CHECK_OK(dtrain_device_scale(device, DTRAIN_F32, dtrain_fsdp_unit_param(fsdp, names[1], 1), 3.0, layer_size));
    CHECK_OK(dtrain_fsdp_put(fsdp, 1));
    CHECK_OK(dtrain_device_copy(device, host, dtrain_fsdp_unit_param(fsdp, names[1], 1), layer_size * sizeof *host));
    for (size_t i = 0; i < layer_size; i++)
        CHECK_EQ(to_bits(host[i]), to_bits(as_bf16(3.0f * as_bf16(first[i]))));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 2));
    CHECK_OK(dtrain_device_copy(device, host, dtrain_fsdp_unit_param(fsdp, names[1], 2), layer_size * sizeof *host));
    for (size_t i = 0; i < layer_size; i++)
        CHECK_EQ(to_bits(host[i]), to_bits(as_bf16(first[layer_size + i])));
    dtrain_fsdp_destroy(fsdp);
    async_end(&fake);
    return DTRAIN_OK;
}

TEST(a_unit_is_written_while_another_is_on_its_way)
{
    CHECK_OK(dtrain_run_threads(3, write_beside, NULL, NULL));
}

/* A prefetch between the end of a step and the update of its slices, on the way for as long as rank 1 is late: it reads
 * what was there before. */
static dtrain_status prefetch_and_update(dtrain_comm *comm, void *user)
{
    enum { COUNT = 3000 };
    static const float none[COUNT], one = 1.0f;
    int on_device = *(const int *)user, rank = dtrain_comm_rank(comm);
    float host[COUNT];
    async_device fake;
    dtrain_fsdp *fsdp = NULL;
    dtrain_param table;
    dtrain_fsdp_desc desc;
    dtrain_device *device = on_device ? async_begin(&fake, rank, 1, 20) : NULL;
    memset(&table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    desc.optimizer.kind = DTRAIN_SGD;
    table.name = "weights";
    table.dtype = DTRAIN_F32;
    table.shape[0] = COUNT;
    table.device = device;
    CHECK_OK(dtrain_fsdp_create(&fsdp, comm, &table, 1, &desc));
    CHECK_OK(dtrain_fsdp_gather(fsdp, 0));
    CHECK_OK(dtrain_device_fill(device, dtrain_fsdp_unit_grad(fsdp, "weights", 0), &one, sizeof one, COUNT));
    CHECK_OK(dtrain_fsdp_reduce(fsdp, 0));
    CHECK_OK(dtrain_fsdp_finish(fsdp, NULL));
    CHECK_OK(dtrain_fsdp_set(fsdp, "weights", none, 0)); /* so that the prefetch has something to bring */
    if (rank == 1 && on_device)
        async_sleep(device, 100000);
    else if (rank == 1)
        usleep(100000);
    CHECK_OK(dtrain__fsdp_gather_ahead(fsdp, 0));
    CHECK_OK(dtrain_fsdp_step(fsdp, 0.5f));
    if (on_device) { /* where it came is left as it is until another comes */
        CHECK_OK(dtrain_device_copy(device, host, dtrain_fsdp_unit_param(fsdp, "weights", 0), sizeof host));
        CHECK(memcmp(host, none, sizeof host) == 0);
    }
    CHECK_OK(dtrain_fsdp_gather(fsdp, 0));
    CHECK_OK(dtrain_device_copy(device, host, dtrain_fsdp_unit_param(fsdp, "weights", 0), sizeof host));
    for (size_t i = 0; i < COUNT; i++)
        CHECK(host[i] == -0.5f);
    dtrain_fsdp_destroy(fsdp);
    if (on_device)
        async_end(&fake);
    return DTRAIN_OK;
}

TEST(a_prefetch_reads_no_weights_that_are_being_updated)
{
    for (int on_device = 0; on_device < 2; on_device++)
        CHECK_OK(dtrain_run_threads(3, prefetch_and_update, &on_device, NULL));
}

/* ---- no threads, and ends ---- */

TEST(ranks_without_threads_of_the_librarys_give_the_cpus_bits)
{
    for (int i = 0; i < 4; i++) {
        run r = plain(strategies[i]);
        r.polls = 1;
        r.micro_batches = 2;
        check_run(r, "progress by poll");
        r.ddp = i == 2;
        check_run(r, "progress by poll again");
    }
}

/* Destroys while gathers, or reductions, are on their way, which one rank does not make. */
static dtrain_status leave_early(dtrain_comm *comm, void *user)
{
    async_device fake;
    dtrain_fsdp *fsdp = NULL;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc desc;
    int calls = *(const int *)user, rank = dtrain_comm_rank(comm), unit = LAYERS + 1;
    dtrain_device *device = async_begin(&fake, rank, 1, 200);
    memset(&desc, 0, sizeof desc);
    desc.trace_events = 16;
    fill_table(table, device);
    CHECK_OK(dtrain_fsdp_create(&fsdp, comm, table, PARAMS, &desc));
    if (calls > 0)
        forward(fsdp);
    for (int i = 0; i < calls - (calls > 1 && rank == 1); i++, unit--) {
        CHECK_OK(dtrain_fsdp_gather(fsdp, unit));
        if (i < calls - 1)
            CHECK_OK(dtrain_fsdp_reduce(fsdp, unit));
    }
    dtrain_fsdp_destroy(fsdp);
    async_end(&fake);
    return DTRAIN_OK;
}

TEST(what_is_under_way_ends_with_its_object)
{
    for (int calls = 0; calls < 5; calls++)
        CHECK_OK(dtrain_run_threads(3, leave_early, &calls, NULL));
}

/* ---- the plan ---- */

/* One step; what was in use at most is what the plan said, but for bookkeeping of the CPU's memory alone. */
static dtrain_status measure(dtrain_comm *comm, void *user)
{
    async_device fake;
    rank_state s;
    run r = *(const run *)user;
    dtrain_fsdp_desc desc;
    dtrain_fsdp_plan_result plan;
    int rank = dtrain_comm_rank(comm);
    memset(&s, 0, sizeof s);
    s.r = &r;
    s.comm = comm;
    s.device = async_begin(&fake, rank, 1, 20);
    fill_table(s.table, s.device);
    static const float none[MOST];
    for (int p = 0; p < PARAMS; p++) {
        if (r.own_memory) {
            s.table[p].data = upload(s.device, none, sizes[p]);
            s.table[p].grad = s.table[p].frozen ? NULL : upload(s.device, none, sizes[p]);
        }
        s.seen[p] = upload(s.device, none, sizes[p]);
    }
    s.noise = upload(s.device, none, MOST);
    memset(&desc, 0, sizeof desc);
    desc.strategy = r.strategy;
    desc.shard_size = r.shard_size;
    desc.gather_dtype = r.gather;
    desc.reduce_dtype = r.reduce;
    desc.keep_full_grads = r.keep_full_grads;
    desc.no_overlap = r.no_overlap;
    desc.micro_batches = r.micro_batches;
    desc.optimizer.kind = r.sgd ? DTRAIN_SGD : DTRAIN_ADAMW;
    CHECK_OK(dtrain_fsdp_plan(s.table, PARAMS, &desc, r.ranks, rank, &plan));
    CHECK_OK(dtrain_fsdp_create(&s.fsdp, comm, s.table, PARAMS, &desc));
    fsdp_step(&s, 0);
    dtrain_fsdp_stats stats = dtrain_fsdp_get_stats(s.fsdp);
    CHECK(stats.peak_bytes <= plan.peak);
    CHECK(stats.peak_bytes + plan.bookkeeping >= plan.peak);
    unmake(&s);
    async_end(&fake);
    return DTRAIN_OK;
}

TEST(memory_is_what_the_plan_says)
{
    for (int i = 0; i < 32; i++) {
        run r = plain(strategies[i % 4]);
        r.ranks = 4;
        r.own_memory = i / 4 % 2;
        r.sgd = i / 4 % 2;
        r.gather = r.reduce = i / 8 % 2 ? DTRAIN_BF16 : DTRAIN_F32;
        r.no_overlap = i / 8 % 2;
        r.micro_batches = i / 16 % 2 ? 5 : 1;
        r.begin = r.keep_full_grads = i / 16 % 2;
        int before = test_failures;
        CHECK_OK(dtrain_run_threads(r.ranks, measure, &r, NULL));
        if (test_failures != before)
            TEST_FAIL("in round %d", i);
    }
}

/* ---- memory from step to step ---- */

static long resizes;

static void *count_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    __atomic_add_fetch(&resizes, 1, __ATOMIC_SEQ_CST);
    return test_resize(pointer, old_bytes, new_bytes, align);
}

/* Of memory of the CPU's and of the device's, and events. */
static long made_so_far(const async_device *fake)
{
    return __atomic_load_n(&resizes, __ATOMIC_SEQ_CST) + fake->allocations + fake->events + fake->queue->events;
}

static dtrain_status warm_up(dtrain_comm *comm, void *user)
{
    async_device fake;
    rank_state s;
    run r = *(const run *)user;
    long before = 0;
    memset(&s, 0, sizeof s);
    s.r = &r;
    s.comm = comm;
    s.device = async_begin(&fake, dtrain_comm_rank(comm), 1, 20);
    make(&s);
    for (int step = 0; step < 4; step++) {
        if (step == 2) {
            CHECK_OK(dtrain_barrier(comm));
            before = made_so_far(&fake) + (r.ddp ? 2 : 0); /* dtrain_clip_grad_norm's, once a step */
            CHECK_OK(dtrain_barrier(comm));
        }
        (r.ddp ? ddp_step : fsdp_step)(&s, step == 2 ? 1 : step); /* where the norm is not waited for */
    }
    CHECK_OK(dtrain_barrier(comm));
    CHECK_EQ(made_so_far(&fake), before);
    CHECK_OK(dtrain_barrier(comm));
    unmake(&s);
    async_end(&fake);
    return DTRAIN_OK;
}

TEST(warm_steps_allocate_nothing)
{
    dtrain_allocator allocator = {count_resize, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    for (int i = 0; i < 6; i++) {
        run r = plain(strategies[i % 4]);
        r.ranks = 4;
        r.ddp = i > 3;
        r.packs = i == 5 ? DTRAIN_COMPRESS_INT8 : (dtrain_compression)0;
        r.micro_batches = 3;
        r.gather = r.reduce = i % 2 ? DTRAIN_BF16 : DTRAIN_F32;
        int before = test_failures;
        CHECK_OK(dtrain_run_threads(r.ranks, warm_up, &r, &desc));
        if (test_failures != before)
            TEST_FAIL("in round %d", i);
    }
}
