/* FSDP and DDP on devices when a device refuses a call, does not do what it was given, has no memory left, or a rank
 * leaves: every call of every rank ends, with a status and a text that says whose fault it was, and all can be
 * destroyed without a leak. */
#include "dtrain.h"
#include "test.h"
#include "async_device.h"
#include <time.h>

enum { UNITS = 4, PARAMS = 4, RANKS = 3 };

static pthread_barrier_t all_are_through;

/* What befalls one rank. */
typedef struct fault {
    dtrain_strategy strategy;
    dtrain_dtype dtype;
    int rank, ddp, packs;
    long call, done, allocation, queue_call, queue_done; /* of its device, from 1; 0: never */
    int leaves;                                          /* after so many calls of its own; 0: never */
    int struck, own;                                     /* out: it came to that, in a call of the test's own */
} fault;

typedef struct place {
    fault *f;
    dtrain_device *device;
    dtrain_fsdp *fsdp;
    dtrain_ddp *ddp;
    float *memory[2 * PARAMS];
    dtrain_param table[PARAMS];
    dtrain_status first; /* error */
    char text[512];
    int calls, rank;
} place;

/* Notes a call's status; returns whether the rank goes on. */
static int goes_on(place *p, dtrain_status status)
{
    if (status != DTRAIN_OK && p->first == DTRAIN_OK) {
        p->first = status;
        snprintf(p->text, sizeof p->text, "%s", dtrain_last_error());
        CHECK(p->text[0] != 0);
    }
    p->calls++;
    return p->first == DTRAIN_OK && (p->rank != p->f->rank || p->f->leaves == 0 || p->calls < p->f->leaves);
}

static int compute(place *p, int unit)
{
    float *weights = p->ddp != NULL ? (float *)p->table[unit].data : dtrain_fsdp_unit_param(p->fsdp, "stack", unit);
    float *grads = p->ddp != NULL ? (float *)p->table[unit].grad : dtrain_fsdp_unit_grad(p->fsdp, "stack", unit);
    size_t count = p->ddp != NULL ? p->table[unit].shape[0] : 301;
    dtrain_status status = dtrain_device_axpy(p->device, DTRAIN_F32, grads, 1.0, weights, count);
    if (status != DTRAIN_OK)
        __atomic_store_n(&p->f->own, 1, __ATOMIC_SEQ_CST);
    return goes_on(p, status);
}

static int a_step(place *p)
{
    double norm;
    int on = 1;
    for (int unit = 0; on && unit < UNITS; unit++)
        on = goes_on(p, dtrain_fsdp_gather(p->fsdp, unit)) && goes_on(p, dtrain_fsdp_release(p->fsdp, unit));
    for (int unit = UNITS - 1; on && unit >= 0; unit--)
        on = goes_on(p, dtrain_fsdp_gather(p->fsdp, unit)) && compute(p, unit) &&
             goes_on(p, dtrain_fsdp_reduce(p->fsdp, unit));
    return on && goes_on(p, dtrain_fsdp_clip_grad_norm(p->fsdp, 0.5f, &norm)) &&
           goes_on(p, dtrain_fsdp_step(p->fsdp, 0.1f));
}

static int a_ddp_step(place *p)
{
    int on = goes_on(p, dtrain_ddp_begin(p->ddp, 1, 1.0));
    for (int unit = UNITS - 1; on && unit >= 0; unit--)
        on = compute(p, unit) && goes_on(p, dtrain_ddp_reduce(p->ddp, unit));
    return on && goes_on(p, dtrain_ddp_finish(p->ddp, NULL));
}

static int make(place *p, dtrain_comm *comm)
{
    dtrain_fsdp_desc desc;
    dtrain_ddp_desc some;
    dtrain_compress_desc packs;
    memset(&desc, 0, sizeof desc);
    memset(&some, 0, sizeof some);
    memset(&packs, 0, sizeof packs);
    desc.strategy = p->f->strategy;
    desc.gather_dtype = desc.reduce_dtype = p->f->dtype;
    packs.kind = DTRAIN_COMPRESS_INT8;
    packs.least_count = 1;
    some.bucket_bytes = 1;
    some.compress = p->f->packs ? &packs : NULL;
    if (!p->f->ddp) {
        p->table[0].name = "stack";
        p->table[0].dtype = DTRAIN_F32;
        p->table[0].shape[0] = UNITS;
        p->table[0].shape[1] = 301;
        p->table[0].stacked = 1;
        p->table[0].device = p->device;
        return goes_on(p, dtrain_fsdp_create(&p->fsdp, comm, p->table, 1, &desc));
    }
    return goes_on(p, dtrain_ddp_create(&p->ddp, comm, p->table, PARAMS, &some));
}

/* Memory of a DDP's, before anything goes wrong. */
static void give_memory(place *p)
{
    static const char *const names[PARAMS] = {"a", "b", "c", "d"};
    for (int i = 0; i < PARAMS && p->f->ddp; i++) {
        const float one = 1.0f;
        void *memory = NULL;
        size_t count = 200 + 7 * (size_t)i;
        CHECK_EQ(dtrain_device_alloc(p->device, DTRAIN_MEMORY_DEVICE, 2 * count * sizeof(float), &memory), DTRAIN_OK);
        CHECK_EQ(dtrain_device_fill(p->device, memory, &one, sizeof one, 2 * count), DTRAIN_OK);
        p->memory[i] = (float *)memory;
        p->table[i].name = names[i];
        p->table[i].dtype = DTRAIN_F32;
        p->table[i].shape[0] = count;
        p->table[i].unit = i;
        p->table[i].data = memory;
        p->table[i].grad = p->memory[i] + count;
        p->table[i].device = p->device;
    }
}

static dtrain_status suffer(dtrain_comm *comm, void *user)
{
    fault *f = (fault *)user;
    async_device *fake = (async_device *)malloc(sizeof *fake);
    place *p = (place *)calloc(1, sizeof *p);
    p->f = f;
    p->rank = dtrain_comm_rank(comm);
    p->device = async_begin(fake, p->rank, 3, 10);
    give_memory(p);
    async_idle(fake);
    if (p->rank == f->rank) {
        fake->fail_call = f->call > 0 ? fake->calls + f->call : 0;
        fake->fail_done = f->done > 0 ? fake->done + f->done : 0;
        fake->fail_allocation = f->allocation > 0 ? fake->allocations + f->allocation : 0;
        fake->queue_fail_call = f->queue_call;
        fake->queue_fail_done = f->queue_done;
    }
    int on = make(p, comm);
    for (int step = 0; step < 2 && on; step++)
        on = f->ddp ? a_ddp_step(p) : a_step(p);
    if (on && f->ddp && p->rank == f->rank) /* what was queued last fails after the last call */
        on = goes_on(p, dtrain_device_wait(p->device));
    if (p->rank == f->rank)
        f->struck = !on;
    else if (!on && p->first != DTRAIN_ERR_PEER_LOST && p->first != DTRAIN_ERR_ABORTED && p->first != DTRAIN_ERR_IO)
        TEST_FAIL("rank %d: status %d: %s", p->rank, (int)p->first, p->text);
    if (!on && p->rank != f->rank && f->leaves == 0) { /* the cause travels */
        CHECK_CONTAINS(p->text, "rank 1");
        if (!__atomic_load_n(&f->own, __ATOMIC_SEQ_CST))
            CHECK_CONTAINS(p->text, "fake:1");
    }
    if (p->fsdp != NULL && p->first != DTRAIN_OK && !(p->rank == f->rank && f->own)) { /* for good */
        CHECK(dtrain_fsdp_gather(p->fsdp, 0) != DTRAIN_OK);
        CHECK_CONTAINS(dtrain_last_error(), "on rank");
    }
    dtrain_fsdp_destroy(p->fsdp);
    dtrain_ddp_destroy(p->ddp);
    for (int i = 0; i < PARAMS; i++)
        dtrain_device_free(p->device, DTRAIN_MEMORY_DEVICE, p->memory[i]);
    pthread_barrier_wait(&all_are_through); /* a device that has failed keeps its memory until here */
    async_end(fake);
    free(fake);
    free(p);
    return DTRAIN_OK;
}

static void run_all(fault *f)
{
    dtrain_comm_desc some;
    memset(&some, 0, sizeof some);
    some.timeout_ms = test_ms(20000);
    pthread_barrier_init(&all_are_through, NULL, RANKS);
    CHECK_EQ(dtrain_run_threads(RANKS, suffer, f, &some), DTRAIN_OK);
    pthread_barrier_destroy(&all_are_through);
}

/* Moves a fault from the first call to the last. */
static void sweep(fault *f, long *which, const char *what)
{
    /* DDP has 13 operations of its own */
    int few = which == &f->allocation || (f->ddp && which == &f->done);
    int all = few || getenv("DTRAIN_TEST_INTERLEAVINGS") != NULL;
    long stride = all ? 1 : 5, calls = 0;
    f->rank = 1;
    for (*which = 1; *which < 5000; *which += stride) {
        int before = test_failures;
        time_t begun = time(NULL);
        f->struck = f->own = 0;
        run_all(f);
        if (time(NULL) - begun > 15)
            TEST_FAIL("a rank has waited for its deadline");
        if (test_failures != before) {
            TEST_FAIL("%s %ld of strategy %d", what, *which, (int)f->strategy);
            return;
        }
        if (!f->struck)
            break;
        calls++;
    }
    CHECK(calls > 2);
}

static const dtrain_strategy strategies[] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP};

static fault of_strategy(int i)
{
    fault f;
    memset(&f, 0, sizeof f);
    f.strategy = strategies[i];
    f.dtype = i == 0 ? DTRAIN_BF16 : DTRAIN_F32;
    return f;
}

TEST(a_device_that_refuses_a_call_ends_all_ranks)
{
    for (int i = 0; i < 3; i++) {
        fault f = of_strategy(i);
        sweep(&f, &f.call, "call");
    }
}

TEST(a_device_that_does_not_do_what_it_was_given_ends_all_ranks)
{
    for (int i = 0; i < 3; i++) {
        fault f = of_strategy(i);
        sweep(&f, &f.done, "operation");
    }
}

TEST(a_queue_of_a_group_that_fails_ends_all_ranks)
{
    for (int i = 0; i < 3; i++) {
        fault f = of_strategy(i);
        sweep(&f, &f.queue_call, "call of its queue");
        f.queue_call = 0;
        sweep(&f, &f.queue_done, "operation of its queue");
    }
}

TEST(a_device_without_memory_ends_all_ranks)
{
    for (int i = 0; i < 3; i++) {
        fault f = of_strategy(i);
        sweep(&f, &f.allocation, "allocation");
    }
}

TEST(ddp_on_a_device_that_fails_ends_all_ranks)
{
    for (int packs = 0; packs < 2; packs++) {
        fault f = of_strategy(2);
        f.ddp = 1;
        f.packs = packs;
        sweep(&f, &f.call, "call");
        f.call = 0;
        sweep(&f, &f.done, "operation");
        f.done = 0;
        sweep(&f, &f.queue_call, "call of its queue");
        f.queue_call = 0;
        sweep(&f, &f.queue_done, "operation of its queue");
        f.queue_done = 0;
        sweep(&f, &f.allocation, "allocation");
    }
}

TEST(a_rank_that_leaves_ends_the_others)
{
    for (int i = 0; i < 3; i++) {
        fault f = of_strategy(i);
        f.rank = 1;
        for (f.leaves = 2; f.leaves < 40; f.leaves += 3) {
            time_t begun = time(NULL);
            run_all(&f);
            if (time(NULL) - begun > 15)
                TEST_FAIL("a rank has waited for its deadline, strategy %d, call %d", (int)f.strategy, f.leaves);
        }
    }
}
