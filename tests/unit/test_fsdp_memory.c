/* The memory of FSDP: what is counted against the plan, what the plan says against figures by hand, pages that are
 * really gone, allocations of a warm loop, and with FSDP_LAYER_FLOATS=4194304 the resident size of four processes that
 * train 200 million parameters. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#include <sys/mman.h>

static const dtrain_strategy strategies[4] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP,
                                              DTRAIN_HYBRID_SHARD};

static dtrain_param param(const char *name, size_t layers, size_t elements, int unit)
{
    dtrain_param made_of;
    memset(&made_of, 0, sizeof made_of);
    made_of.name = name;
    made_of.dtype = DTRAIN_F32;
    made_of.shape[0] = layers > 0 ? layers : elements;
    made_of.shape[1] = layers > 0 ? elements : 0;
    made_of.stacked = layers > 0;
    made_of.unit = unit;
    return made_of;
}

typedef struct load {
    dtrain_param table[8];
    size_t count;
    dtrain_fsdp_desc desc;
    int micro, steps, evaluations;
} load;

/* Adds 1 to each gradient of a unit. */
static void add_ones(dtrain_fsdp *fsdp, const load *l, int unit)
{
    for (size_t p = 0; p < l->count; p++) {
        const dtrain_param *param = &l->table[p];
        size_t layers = param->stacked ? param->shape[0] : 1, each = dtrain_param_elements(param) / layers;
        float *grad = dtrain_fsdp_grad(fsdp, param->name);
        if (grad == NULL || unit < param->unit || unit >= param->unit + (int)layers)
            continue;
        grad += (size_t)(unit - param->unit) * each;
        for (size_t i = 0; i < each; i++)
            grad[i] += 1.0f;
    }
}

static dtrain_status forward(dtrain_fsdp *fsdp, int units)
{
    dtrain_status status = DTRAIN_OK;
    for (int u = 0; u < units && status == DTRAIN_OK; u++) {
        status = dtrain_fsdp_gather(fsdp, u);
        status = status == DTRAIN_OK ? dtrain_fsdp_release(fsdp, u) : status;
    }
    return status;
}

static dtrain_status train_step(dtrain_fsdp *fsdp, const load *l)
{
    int units = dtrain_params_units(l->table, l->count);
    dtrain_status status = dtrain_fsdp_begin(fsdp, l->micro, 1);
    for (int j = 0; j < l->micro && status == DTRAIN_OK; j++) {
        status = forward(fsdp, units);
        for (int u = units - 1; u >= 0 && status == DTRAIN_OK; u--) {
            status = dtrain_fsdp_gather(fsdp, u);
            add_ones(fsdp, l, u);
            status = status == DTRAIN_OK ? dtrain_fsdp_reduce(fsdp, u) : status;
        }
    }
    status = status == DTRAIN_OK ? dtrain_fsdp_clip_grad_norm(fsdp, 1, NULL) : status;
    return status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.01f) : status;
}

static dtrain_status train(dtrain_fsdp *fsdp, const load *l)
{
    int units = dtrain_params_units(l->table, l->count);
    dtrain_status status = DTRAIN_OK;
    for (int step = 0; step < l->steps && status == DTRAIN_OK; step++) {
        for (int i = 0; i < l->evaluations && status == DTRAIN_OK; i++)
            status = forward(fsdp, units);
        status = status == DTRAIN_OK ? train_step(fsdp, l) : status;
    }
    return status;
}

static dtrain_status keeps_to_the_plan(dtrain_comm *world, void *user)
{
    const load *l = (const load *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    float *value = (float *)calloc(dtrain_param_elements(&l->table[0]), sizeof(float));
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_plan_result plan;
    CHECK_EQ(dtrain_fsdp_plan(l->table, l->count, &l->desc, ranks, rank, &plan), DTRAIN_OK);
    CHECK_EQ(plan.peak,
             plan.weights + plan.gradients + plan.optimizer + plan.full_weights + plan.full_grads + plan.bookkeeping);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, l->table, l->count, &l->desc), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_set(fsdp, l->table[0].name, value, 0), DTRAIN_OK);
    dtrain_status status = train(fsdp, l);
    if (status != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    CHECK_EQ(dtrain_fsdp_get(fsdp, l->table[0].name, value, -1), DTRAIN_OK);
    dtrain_fsdp_stats stats = dtrain_fsdp_get_stats(fsdp);
    if (stats.peak_bytes > plan.peak + 65536 || stats.peak_bytes + 65536 + plan.peak / 4 < plan.peak)
        TEST_FAIL("rank %d of %d, strategy %d, %d micro-batches, keeps %d: a peak of %zu bytes, planned %zu", rank,
                  ranks, (int)l->desc.strategy, l->micro, l->desc.keep_full_grads, stats.peak_bytes, plan.peak);
    if (status == DTRAIN_OK && l->desc.strategy == DTRAIN_FULL_SHARD && ranks > 1) /* pages wait for their next use */
        CHECK(stats.bytes <= plan.peak + 64);
    dtrain_fsdp_destroy(fsdp);
    free(value);
    return status;
}

/* Odd sizes, a stack, one tied, a frozen unit between large ones, the largest at both ends. */
static void odd_load(load *l, int variant)
{
    memset(l, 0, sizeof *l);
    l->count = 6;
    l->table[0] = param("first", 0, 40009, 0);
    l->table[1] = param("stack", 5, 20011, 1);
    l->table[2] = param("biases", 5, 13, 1);
    l->table[3] = param("frozen", 0, 9001, 6);
    l->table[4] = param("scalar", 0, 1, 7);
    l->table[5] = param("last", 0, 50021, 7);
    l->table[3].frozen = 1;
    l->table[variant % 3 == 1 ? 0 : 5].tied = variant % 3 > 0;
    l->desc.optimizer.kind = variant % 2 ? DTRAIN_SGD : DTRAIN_ADAMW;
    l->desc.optimizer.momentum = variant % 4 == 1 ? 0.9f : 0.0f;
    l->desc.gather_dtype = variant / 2 % 2 ? DTRAIN_BF16 : DTRAIN_F32;
    l->desc.no_reshard_after_forward = variant == 5;
    l->desc.no_prefetch = variant == 4;
    l->desc.trace_events = variant == 3 ? 100 : 0;
    l->micro = 1 + variant % 5;
    l->desc.micro_batches = l->micro;
    l->desc.keep_full_grads = variant % 7 > 3;
    l->desc.no_overlap = variant == 6 || variant == 9;
    l->steps = 2;
    l->evaluations = variant % 3;
}

TEST(peak_bytes_stay_within_the_plan)
{
    for (int i = 0; i < 4; i++)
        for (int ranks = 1; ranks <= 8; ranks++)
            for (int variant = ranks % 2; variant < 12; variant += 2) {
                load l;
                odd_load(&l, variant);
                l.desc.strategy = strategies[i];
                l.desc.shard_size = ranks % 2 ? 1 : 2;
                CHECK_EQ(dtrain_run_threads(ranks, keeps_to_the_plan, &l, NULL), DTRAIN_OK);
            }
}

/* Ten layers of 64 KiB, so that pages are the layers' own. */
TEST(a_plan_is_what_a_hand_computes)
{
    const size_t layer = 65536, all = 10 * layer, tables = 65536;
    dtrain_param table = param("stack", 10, 16384, 0);
    dtrain_fsdp_desc desc = {0};
    dtrain_fsdp_plan_result plan;
    CHECK_EQ(dtrain_fsdp_plan(&table, 1, NULL, 4, 3, &plan), DTRAIN_OK);
    CHECK_EQ(plan.weights, all / 4);
    CHECK_EQ(plan.gradients, all / 4);
    CHECK_EQ(plan.optimizer, 2 * all / 4);
    CHECK_EQ(plan.full_weights, 2 * layer);
    CHECK_EQ(plan.full_grads, 2 * layer);
    CHECK(plan.bookkeeping < tables);
    CHECK(plan.peak < (all + all + 2 * all) / 4 + 4 * layer + tables);
    CHECK_EQ(plan.sent_gather, (8 + 10) * layer * 3 / 4); /* the last two are still there for the backward pass */
    CHECK_EQ(plan.sent_reduce, all * 3 / 4);
    desc.strategy = DTRAIN_SHARD_GRAD_OP;
    CHECK_EQ(dtrain_fsdp_plan(&table, 1, &desc, 4, 0, &plan), DTRAIN_OK);
    CHECK_EQ(plan.weights, 0);
    CHECK_EQ(plan.full_weights, all);
    CHECK_EQ(plan.gradients, all / 4);
    CHECK_EQ(plan.sent_gather, all * 3 / 4);
    desc.strategy = DTRAIN_DDP;
    desc.optimizer.kind = DTRAIN_SGD;
    desc.micro_batches = 5;
    CHECK_EQ(dtrain_fsdp_plan(&table, 1, &desc, 4, 0, &plan), DTRAIN_OK);
    CHECK_EQ(plan.optimizer, 0);
    CHECK_EQ(plan.gradients, 3 * all); /* sums of 1, 2 and 4 micro-batches */
    CHECK_EQ(plan.full_weights, all);
    CHECK_EQ(plan.sent_gather, 0);
    CHECK_EQ(plan.sent_reduce, 2 * all * 3 / 4);
    desc.strategy = DTRAIN_HYBRID_SHARD;
    desc.shard_size = 2;
    desc.micro_batches = 0;
    desc.gather_dtype = DTRAIN_BF16;
    CHECK_EQ(dtrain_fsdp_plan(&table, 1, &desc, 4, 0, &plan), DTRAIN_OK);
    CHECK_EQ(plan.weights, all / 2);
    CHECK_EQ(plan.sent_gather, (8 + 10) * layer / 2 / 2);
    CHECK_EQ(plan.sent_reduce, all / 2 + 2 * (all / 2) / 2);
}

/* ---- bytes ---- */

typedef struct traffic {
    load l;
    dtrain_compress_desc compress;
} traffic;

/* What the counters say after two steps of one micro-batch is twice what was planned, and of top-k not much less. */
static dtrain_status sends_what_was_planned(dtrain_comm *world, void *user)
{
    const traffic *t = (const traffic *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), kind = (int)t->compress.kind;
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_plan_result plan;
    CHECK_EQ(dtrain_fsdp_plan(t->l.table, t->l.count, &t->l.desc, ranks, rank, &plan), DTRAIN_OK);
    dtrain_status status = dtrain_fsdp_create(&fsdp, world, t->l.table, t->l.count, &t->l.desc);
    status = status == DTRAIN_OK ? train(fsdp, &t->l) : status;
    if (status != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    uint64_t sent = dtrain_fsdp_get_stats(fsdp).sent_bytes, planned = 2 * plan.sent_reduce;
    if (kind == DTRAIN_COMPRESS_TOPK ? sent > planned || sent * 3 < planned : sent != planned)
        TEST_FAIL("rank %d of %d, strategy %d, kind %d: %llu bytes sent, planned %llu", rank, ranks,
                  (int)t->l.desc.strategy, kind, (unsigned long long)sent, (unsigned long long)planned);
    dtrain_fsdp_destroy(fsdp);
    return status;
}

static void plan_and_send(traffic *t, int ranks, dtrain_strategy strategy, size_t bucket_bytes)
{
    t->l.desc.strategy = strategy;
    t->l.desc.shard_size = 2;
    t->l.desc.bucket_bytes = bucket_bytes;
    CHECK_EQ(dtrain_run_threads(ranks, sends_what_was_planned, t, NULL), DTRAIN_OK);
}

TEST(planned_bytes_are_those_sent_dense_quantised_and_compressed)
{
    static const dtrain_compression kinds[] = {DTRAIN_COMPRESS_DEFAULT, DTRAIN_COMPRESS_BF16, DTRAIN_COMPRESS_INT8,
                                               DTRAIN_COMPRESS_FP8,     DTRAIN_COMPRESS_SIGN, DTRAIN_COMPRESS_POWERSGD,
                                               DTRAIN_COMPRESS_TOPK};
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int way = 0; way < 3; way++)
            for (int k = 0; k < 7; k++) {
                traffic t;
                memset(&t, 0, sizeof t);
                odd_load(&t.l, 0);
                t.l.table[1].dense = way == 1;
                t.compress.kind = kinds[k];
                t.compress.topk.schedule.ratio = way == 2 ? 0.4 : 0.01; /* of the first, vectors are sent */
                t.l.desc.compress = k > 0 ? &t.compress : NULL;
                t.l.desc.reduce_dtype = k == 0 && way == 1 ? DTRAIN_BF16 : DTRAIN_F32;
                if (k == 0)
                    t.l.desc.quantise_reduce = way == 2 ? 256 : 0;
                if (k > 0 || way < 2)
                    plan_and_send(&t, ranks, DTRAIN_DDP, (size_t)way * 300000);
                if (kinds[k] != DTRAIN_COMPRESS_POWERSGD)
                    plan_and_send(&t, ranks, DTRAIN_HYBRID_SHARD, 1);
                if (k == 0)
                    plan_and_send(&t, ranks, DTRAIN_FULL_SHARD, 0);
            }
}

/* A vector of 100 whose least_count is 1, in two halves: each rank sends the other's half in bf16, and its own sum. */
TEST(planned_bytes_are_what_a_hand_computes)
{
    dtrain_param table = param("all", 0, 100, 0);
    dtrain_fsdp_desc desc = {0};
    dtrain_compress_desc compress = {0};
    dtrain_fsdp_plan_result plan;
    desc.strategy = DTRAIN_DDP;
    desc.compress = &compress;
    compress.least_count = 1;
    compress.kind = DTRAIN_COMPRESS_BF16;
    CHECK_EQ(dtrain_fsdp_plan(&table, 1, &desc, 2, 1, &plan), DTRAIN_OK);
    CHECK_EQ(plan.sent_reduce, 2 * 50 + 2 * 50);
    compress.kind = DTRAIN_COMPRESS_TOPK; /* lengths, a header of 32, and 13 indices and values, to the other */
    compress.topk.schedule.ratio = 0.125;
    CHECK_EQ(dtrain_fsdp_plan(&table, 1, &desc, 2, 1, &plan), DTRAIN_OK);
    CHECK_EQ(plan.sent_reduce, 8 + 32 + 13 * 8);
}

/* ---- pages ---- */

static size_t resident(const void *at, size_t bytes)
{
    static __thread unsigned char pages[4096];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), sum = 0;
    CHECK((uintptr_t)at % page == 0 && bytes / page <= sizeof pages);
    CHECK_EQ(mincore((void *)(uintptr_t)at, bytes, pages), 0);
    for (size_t i = 0; i < bytes / page; i++)
        sum += pages[i] & 1 ? page : 0;
    return sum;
}

#define LAYER_BYTES ((size_t)65536)

static dtrain_status pages_come_and_go(dtrain_comm *world, void *user)
{
    load l;
    dtrain_fsdp *fsdp = NULL;
    (void)user;
    memset(&l, 0, sizeof l);
    l.table[0] = param("stack", 6, LAYER_BYTES / sizeof(float), 0);
    l.count = 1;
    l.micro = 1;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, l.table, 1, NULL), DTRAIN_OK);
    const char *w = (const char *)dtrain_fsdp_param(fsdp, "stack"), *g = (const char *)dtrain_fsdp_grad(fsdp, "stack");
    for (int step = 0; step < 2; step++) {
        for (int u = 0; u < 6; u++) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
            CHECK_EQ(resident(w + (size_t)u * LAYER_BYTES, LAYER_BYTES), LAYER_BYTES);
            CHECK(resident(w, 6 * LAYER_BYTES) <= 2 * LAYER_BYTES);
            CHECK_EQ(dtrain_fsdp_release(fsdp, u), DTRAIN_OK);
        }
        CHECK_EQ(resident(g, 6 * LAYER_BYTES), 0);
        for (int u = 5; u >= 0; u--) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, u), DTRAIN_OK);
            add_ones(fsdp, &l, u);
            CHECK(resident(w, 6 * LAYER_BYTES) <= 2 * LAYER_BYTES);
            CHECK(resident(g, 6 * LAYER_BYTES) <= 2 * LAYER_BYTES);
            CHECK_EQ(dtrain_fsdp_reduce(fsdp, u), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_step(fsdp, 0.1f), DTRAIN_OK);
        CHECK(resident(w, 6 * LAYER_BYTES) <= 2 * LAYER_BYTES); /* they wait for the next pass */
        CHECK_EQ(resident(g, 6 * LAYER_BYTES), 0);
    }
    for (size_t i = 0; i < 6 * LAYER_BYTES; i++)
        CHECK(g[i] == 0);
    CHECK_EQ(dtrain_fsdp_unshard(fsdp), DTRAIN_OK);
    CHECK_EQ(resident(w, 6 * LAYER_BYTES), 6 * LAYER_BYTES);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(pages_are_there_for_two_units_and_gone_for_the_rest)
{
    CHECK_EQ(dtrain_run_threads(2, pages_come_and_go, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_run_threads(5, pages_come_and_go, NULL, NULL), DTRAIN_OK);
}

/* ---- allocations ---- */

static long allocations;

static void *counting_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (block != NULL && pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

static dtrain_status stays_warm(dtrain_comm *world, void *user)
{
    const load *l = (const load *)user;
    dtrain_fsdp *fsdp = NULL;
    long before = 0;
    dtrain_status status = dtrain_fsdp_create(&fsdp, world, l->table, l->count, &l->desc);
    for (int step = 1; step <= 20 && status == DTRAIN_OK; step++) {
        if (step == 3) {
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            before = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
        status = train(fsdp, l);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(__atomic_load_n(&allocations, __ATOMIC_SEQ_CST) - before, 0);
    CHECK(before > 0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (status != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    dtrain_fsdp_destroy(fsdp);
    return status;
}

static int stays_warm_in_a_process(dtrain_comm *world, scene *s)
{
    return stays_warm(world, s->user) != DTRAIN_OK;
}

TEST(steps_3_to_20_allocate_nothing)
{
    dtrain_allocator allocator = {counting_resize, NULL, 0, 0};
    for (int i = 0; i < 4; i++)
        for (int variant = 0; variant < 8; variant += 3) {
            load l;
            scene s;
            dtrain_comm_desc desc = {0};
            int before = test_failures;
            odd_load(&l, variant);
            l.steps = 1;
            l.desc.strategy = strategies[i];
            l.desc.shard_size = 2;
            desc.allocator = &allocator;
            CHECK_EQ(dtrain_run_threads(4, stays_warm, &l, &desc), DTRAIN_OK);
            scene_begin(&s, 4, i % 2);
            s.desc.allocator = &allocator;
            s.user = &l;
            run_ranks(&s, stays_warm_in_a_process);
            if (test_failures != before)
                TEST_FAIL("strategy %d, variant %d", (int)strategies[i], variant);
        }
}

/* ---- processes ---- */

static size_t read_kib(const char *path, const char *line)
{
    char text[128];
    size_t value = 0;
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(text, sizeof text, file) != NULL)
        if (strncmp(text, line, strlen(line)) == 0)
            value = (size_t)strtoul(text + strlen(line) + 1, NULL, 10);
    if (file != NULL)
        fclose(file);
    return value;
}

typedef struct kib {
    size_t peak, shared, own_shared;
} kib;

static kib memory_now(void)
{
    kib now = {read_kib("/proc/self/status", "VmHWM:"), read_kib("/proc/self/status", "RssShmem:"),
               read_kib("/proc/self/smaps_rollup", "Pss_Shmem:")};
    return now;
}

static int grows_by_the_plan(dtrain_comm *world, scene *s)
{
    const load *l = (const load *)s->user;
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_plan_result plan;
    kib before = memory_now();
    CHECK_EQ(dtrain_fsdp_plan(l->table, l->count, &l->desc, s->ranks, dtrain_comm_rank(world), &plan), DTRAIN_OK);
    dtrain_status status = dtrain_fsdp_create(&fsdp, world, l->table, l->count, &l->desc);
    status = status == DTRAIN_OK ? train(fsdp, l) : status;
    CHECK_EQ(status, DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    kib after = memory_now();
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    /* of a page that n ranks map, each counts an n-th */
    size_t grown_kib = after.peak - before.peak - (after.shared - before.shared) + after.own_shared - before.own_shared;
    double grown = (double)grown_kib * 1024.0, ratio = grown / (double)plan.peak;
    if (dtrain_comm_rank(world) == 0)
        printf("strategy %d: %.1f MB planned, %.1f MB resident at most: %.3f\n", (int)l->desc.strategy,
               (double)plan.peak / 1e6, grown / 1e6, ratio);
    if (after.shared > before.shared && after.own_shared == 0)
        printf("skipped: this system does not say how many processes map a page\n");
    else if (!dtrain__os_moves())
        printf("skipped: this system does not move pages, and ranges stay\n");
    else
        CHECK(ratio > 0.9 && ratio < 1.1);
    dtrain_fsdp_destroy(fsdp);
    return status != DTRAIN_OK;
}

TEST(four_processes_grow_as_the_plan_says)
{
    const char *floats = getenv("FSDP_LAYER_FLOATS");
    for (int i = 0; i < 4; i++) {
        load l;
        scene s;
        memset(&l, 0, sizeof l);
        l.table[0] = param("stack", 48, floats != NULL ? (size_t)strtoul(floats, NULL, 10) : 419431, 0);
        l.count = 1;
        l.desc.strategy = strategies[i];
        l.desc.shard_size = 2;
        l.desc.optimizer.kind = DTRAIN_SGD;
        l.micro = 1;
        l.steps = 2;
        scene_begin(&s, 4, 0);
        s.user = &l;
        s.desc.timeout_ms = test_ms(60000);
        run_ranks(&s, grows_by_the_plan);
    }
}
