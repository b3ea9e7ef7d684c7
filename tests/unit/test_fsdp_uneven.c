/* Ranks that take part in a step with fewer micro-batches than others, or with none, and leave the rest to the end of
 * the step: every rank has the sums of all. Threads and processes, with progress by a thread and by poll, the CPU and
 * devices whose queues run behind it. */
#include "dtrain.h"
#include "test.h"
#include "async_device.h"
#include "processes.h"

enum { UNITS = 4, EACH = 6, MOST_RANKS = 3, STEPS = 2 };

typedef struct uneven {
    dtrain_strategy strategy; /* 0: DDP */
    int ranks, micro[MOST_RANKS];
    int begins, keep_full_grads, no_overlap, packs; /* packs: as what is compressed, yet as it is, being small */
    size_t bucket_bytes;
    dtrain_progress progress;
    int on_device; /* 2: of one queue */
} uneven;

/* Small whole numbers, whose sums are exact in every order. */
static float gradient(int rank, int micro, int unit, int e)
{
    return (float)(1000 * rank + 100 * micro + 10 * unit + e + 1);
}

/* The mean over all ranks by weight: a rank weighs as much as it has micro-batches where it says so, else 1. */
static float mean(const uneven *u, int unit, int e)
{
    float sum = 0, weight = 0;
    for (int rank = 0; rank < u->ranks; rank++) {
        weight += u->begins ? (float)u->micro[rank] : 1.0f;
        for (int micro = 0; micro < u->micro[rank]; micro++)
            sum += gradient(rank, micro, unit, e);
    }
    return sum / weight;
}

typedef struct member {
    const uneven *u;
    int rank;
    dtrain_device *device; /* NULL: the CPU */
    dtrain_fsdp *fsdp;
    dtrain_ddp *ddp;
    char names[UNITS][8];
    dtrain_param table[UNITS];
    float *numbers; /* where gradients come from */
    int failed;
} member;

/* The first failure says why. */
static void check_ok(member *m, const char *call, dtrain_status status)
{
    if (status != DTRAIN_OK && !m->failed++)
        TEST_FAIL("rank %d, %s: %s", m->rank, call, dtrain_last_error());
}

#define CHECK_OK(call) check_ok(m, #call, call)

static float *memory(member *m, size_t count)
{
    void *made = NULL;
    CHECK_OK(dtrain_device_alloc(m->device, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &made));
    memset(made, 0, count * sizeof(float));
    return (float *)made;
}

static void make(member *m, dtrain_comm *world)
{
    dtrain_fsdp_desc desc;
    dtrain_ddp_desc ddp;
    dtrain_compress_desc small;
    memset(&desc, 0, sizeof desc);
    memset(&ddp, 0, sizeof ddp);
    memset(&small, 0, sizeof small);
    for (int unit = 0; unit < UNITS; unit++) {
        dtrain_param *param = &m->table[unit];
        snprintf(m->names[unit], sizeof m->names[unit], "p%d", unit);
        param->name = m->names[unit];
        param->dtype = DTRAIN_F32;
        param->shape[0] = EACH;
        param->unit = unit;
        param->device = m->device;
        param->data = m->u->strategy == 0 ? memory(m, EACH) : NULL;
        param->grad = m->u->strategy == 0 ? memory(m, EACH) : NULL;
    }
    m->numbers = memory(m, EACH);
    desc.strategy = m->u->strategy;
    desc.keep_full_grads = m->u->keep_full_grads;
    desc.no_overlap = ddp.no_overlap = m->u->no_overlap;
    desc.bucket_bytes = ddp.bucket_bytes = m->u->bucket_bytes;
    desc.compress = ddp.compress = m->u->packs ? &small : NULL;
    if (m->u->strategy == 0)
        CHECK_OK(dtrain_ddp_create(&m->ddp, world, m->table, UNITS, &ddp));
    else
        CHECK_OK(dtrain_fsdp_create(&m->fsdp, world, m->table, UNITS, &desc));
}

static void unmake(member *m)
{
    dtrain_fsdp_destroy(m->fsdp);
    dtrain_ddp_destroy(m->ddp);
    for (int unit = 0; unit < UNITS; unit++) {
        dtrain_device_free(m->device, DTRAIN_MEMORY_DEVICE, m->table[unit].data);
        dtrain_device_free(m->device, DTRAIN_MEMORY_DEVICE, m->table[unit].grad);
    }
    dtrain_device_free(m->device, DTRAIN_MEMORY_DEVICE, m->numbers);
}

static void micro_batch(member *m, int micro)
{
    for (int unit = 0; unit < UNITS && m->fsdp != NULL; unit++) {
        CHECK_OK(dtrain_fsdp_gather(m->fsdp, unit));
        CHECK_OK(dtrain_fsdp_release(m->fsdp, unit));
    }
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        float host[EACH], *grad = (float *)m->table[unit].grad;
        for (int e = 0; e < EACH; e++)
            host[e] = gradient(m->rank, micro, unit, e);
        if (m->fsdp != NULL) {
            CHECK_OK(dtrain_fsdp_gather(m->fsdp, unit));
            grad = dtrain_fsdp_unit_grad(m->fsdp, m->names[unit], unit);
        }
        CHECK_OK(dtrain_device_copy(m->device, m->numbers, host, sizeof host));
        CHECK_OK(dtrain_device_axpy(m->device, DTRAIN_F32, grad, 1.0, m->numbers, EACH));
        CHECK_OK(m->fsdp != NULL ? dtrain_fsdp_reduce(m->fsdp, unit) : dtrain_ddp_reduce(m->ddp, unit));
    }
}

static void check_part(member *m, int unit, size_t begin, size_t count, const float *part)
{
    float host[EACH];
    CHECK_OK(dtrain_device_copy(m->device, host, part, count * sizeof *host));
    for (size_t i = 0; i < count; i++)
        if (!(host[i] == mean(m->u, unit, (int)(begin + i)))) {
            TEST_FAIL("rank %d, unit %d: element %zu is %g, expected %g", m->rank, unit, begin + i, (double)host[i],
                      (double)mean(m->u, unit, (int)(begin + i)));
            return;
        }
}

static void step(member *m)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    int mine = m->u->micro[m->rank];
    if (m->ddp != NULL)
        CHECK_OK(dtrain_ddp_begin(m->ddp, mine, mine));
    else if (m->u->begins)
        CHECK_OK(dtrain_fsdp_begin(m->fsdp, mine, mine));
    for (int micro = 0; micro < mine && !m->failed; micro++)
        micro_batch(m, micro);
    CHECK_OK(m->ddp != NULL ? dtrain_ddp_finish(m->ddp, NULL) : dtrain_fsdp_finish(m->fsdp, NULL));
    if (m->failed)
        return;
    for (int unit = 0; unit < UNITS && m->ddp != NULL; unit++)
        check_part(m, unit, 0, EACH, (const float *)m->table[unit].grad);
    if (m->fsdp != NULL)
        CHECK_OK(dtrain_fsdp_local(m->fsdp, &slices, &count));
    for (size_t i = 0; i < count; i++)
        check_part(m, slices[i].unit, slices[i].begin, slices[i].count, slices[i].grads);
    if (m->fsdp != NULL)
        CHECK_OK(dtrain_fsdp_drop(m->fsdp));
}

/* The table of a device that makes no second queue. */
static const dtrain_device_ops *one_queue(void)
{
    static dtrain_device_ops ops;
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    if (ops.copy == NULL) {
        ops = *async_ops();
        ops.queue_create = NULL;
        ops.queue_destroy = NULL;
    }
    pthread_mutex_unlock(&mutex);
    return &ops;
}

static dtrain_status take_part(dtrain_comm *world, void *user)
{
    async_device device;
    member m;
    memset(&m, 0, sizeof m);
    m.u = (const uneven *)user;
    m.rank = dtrain_comm_rank(world);
    if (m.u->on_device)
        m.device = async_begin(&device, m.rank, 1, 20);
    if (m.u->on_device == 2)
        m.device->ops = one_queue();
    make(&m, world);
    for (int i = 0; i < STEPS && !m.failed; i++)
        step(&m);
    unmake(&m);
    if (m.device != NULL)
        async_end(&device);
    return DTRAIN_OK;
}

static int take_part_in_a_process(dtrain_comm *world, scene *s)
{
    return take_part(world, s->user) != DTRAIN_OK;
}

static void blame(const uneven *u, int before)
{
    if (test_failures != before)
        TEST_FAIL("strategy %d, %d ranks with %d, %d, %d micro-batches, begins %d, kept %d, no_overlap %d, packs %d, "
                  "bucket %zu, progress %d, device %d",
                  (int)u->strategy, u->ranks, u->micro[0], u->micro[1], u->micro[2], u->begins, u->keep_full_grads,
                  u->no_overlap, u->packs, u->bucket_bytes, (int)u->progress, u->on_device);
}

static void on_threads(uneven u)
{
    dtrain_comm_desc desc;
    int before = test_failures;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 5000;
    desc.progress = u.progress;
    CHECK_EQ(dtrain_run_threads(u.ranks, take_part, &u, &desc), DTRAIN_OK);
    blame(&u, before);
}

static void in_processes(uneven u, int tcp)
{
    scene s;
    int before = test_failures;
    scene_begin(&s, u.ranks, tcp);
    s.desc.timeout_ms = 5000;
    s.desc.progress = u.progress;
    s.user = &u;
    run_ranks(&s, take_part_in_a_process);
    blame(&u, before);
}

static const int shares[][MOST_RANKS] = {{2, 1, 0}, {0, 2, 4}, {1, 0, 0}, {1, 5, 1}};
enum { SHARES = sizeof shares / sizeof shares[0] };

/* Where ranks gather nothing, or nothing that others wait for. */
static const dtrain_strategy strategies[] = {DTRAIN_STRATEGY_DEFAULT, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP};
static const dtrain_progress ways[] = {DTRAIN_PROGRESS_THREAD, DTRAIN_PROGRESS_POLL};

/* Which: 0 to 5, of DDP the even ones. */
static uneven drawn(dtrain_strategy strategy, const int *micro, dtrain_progress progress, int which)
{
    uneven u;
    memset(&u, 0, sizeof u);
    u.strategy = strategy;
    u.ranks = MOST_RANKS;
    memcpy(u.micro, micro, sizeof u.micro);
    u.progress = progress;
    u.begins = strategy == DTRAIN_STRATEGY_DEFAULT || which % 2 == 0;
    u.keep_full_grads = which == 2;
    u.no_overlap = which > 4 || (which == 4 && micro[0] > 0);
    u.bucket_bytes = which > 1;
    u.packs = which == 4 && strategy != DTRAIN_SHARD_GRAD_OP;
    return u;
}

static void every_kind(int on_device)
{
    int before = test_failures;
    for (int i = 0; i < 3; i++)
        for (int way = 0; way < 2; way++)
            for (int k = 0; k < SHARES; k++)
                for (int which = 0; which < 6; which += i == 0 ? 2 : 1) {
                    uneven u = drawn(strategies[i], shares[k], ways[way], which);
                    u.on_device = on_device;
                    on_threads(u);
                    if (test_failures != before) /* each waits to its deadline */
                        return;
                }
}

TEST(ranks_with_fewer_micro_batches_add_nothing_to_the_rest)
{
    every_kind(0);
}

TEST(they_add_nothing_on_devices)
{
    every_kind(1);
}

TEST(they_add_nothing_on_devices_of_one_queue)
{
    every_kind(2);
}

TEST(processes_with_fewer_add_nothing)
{
    for (int i = 0; i < 3; i++)
        for (int way = 0; way < 2; way++)
            for (int k = 0; k < SHARES; k++)
                in_processes(drawn(strategies[i], shares[k], ways[way], (i + k) % 2), k % 2);
}
