/* Collectives of devices that go on beside the caller's queue: the bits of the CPU's in any interleaving with the
 * queue's own work and with blocking calls, and an end on every rank whatever breaks, leaves or is destroyed. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "device_worlds.h"

enum { BUFFERS = 8, VICTIM = 1, COUNT = 3001, SOME = 4 };

static const dtrain_device_mode modes[] = {DTRAIN_DEVICE_EVENTS, DTRAIN_DEVICE_STAGED};

static void *counted(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    return hook_resize(pointer, old_bytes, new_bytes, align);
}

static dtrain_allocator allocator = {counted, NULL, 0, 0};

static dg_world async_world(int ranks, dtrain_device_mode mode, void (*body)(dg_rank *r))
{
    dg_world w = dg_new(ranks, mode, body);
    w.desc.async = 1;
    w.comm.allocator = &allocator;
    return w;
}

static void keep(dg_rank *r, dtrain_status status)
{
    r->world->status[r->rank] = status;
    snprintf(r->world->text[r->rank], sizeof r->world->text[r->rank], "%s", dtrain_last_error());
}

/* Starts a call of the group; on the CPU, without one, does it. */
static dtrain_status start(dtrain_comm *comm, dtrain_device_group *group, const dg_call *c, const void *in, void *out,
                           dtrain_device_work **work)
{
    *work = NULL;
    if (group == NULL)
        return dg_do(comm, NULL, c, in, out);
    switch (c->kind) {
    case DG_ALL_REDUCE: return dtrain_device_group_all_reduce_async(group, in, out, c->count, c->dtype, c->op, work);
    case DG_REDUCE_SCATTER_V:
        return dtrain__async_start_v(group, DTRAIN__REDUCE_SCATTER, in, out, c->counts, c->dtype, c->op, work);
    default: return dtrain__async_start_v(group, DTRAIN__ALL_GATHER, in, out, c->counts, c->dtype, (dtrain_op)0, work);
    }
}

/* ---- programs of works, local work and blocking calls, on devices and on the CPU ---- */

typedef struct program {
    dg_rank *r;
    dtrain_device *device;
    dtrain_device_group *group; /* NULL: the same on the CPU, where works are done when they are started */
    char *x[BUFFERS];
    size_t count;
    unsigned busy; /* buffers that works have */
    dtrain_device_work *works[BUFFERS];
    unsigned uses[BUFFERS]; /* of each work */
    int flying;
} program;

static int a_free_one(const program *p, uint64_t draw, int but)
{
    for (int i = 0; i < BUFFERS; i++) {
        int at = (int)((draw + (uint64_t)i) % BUFFERS);
        if (at != but && !(p->busy >> at & 1))
            return at;
    }
    return -1;
}

static void land(program *p, int which)
{
    if (p->group != NULL && dtrain_device_work_wait(p->works[which], which % 2 ? p->device : NULL) != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", p->r->rank, dtrain_last_error());
    p->busy &= ~p->uses[which];
    p->flying--;
    for (int i = which; i < p->flying; i++) {
        p->works[i] = p->works[i + 1];
        p->uses[i] = p->uses[i + 1];
    }
}

static dtrain_status local(program *p, int a, int b, uint64_t draw)
{
    float number = (float)(p->r->rank + 1) * (float)(draw % 97);
    switch (draw / 128 % (b < 0 ? 2 : 4)) {
    case 0: return dtrain_device_fill(p->device, p->x[a], &number, 4, p->count);
    case 1: return dtrain_device_scale(p->device, DTRAIN_F32, p->x[a], 0.75, p->count);
    case 2: return dtrain_device_copy(p->device, p->x[b], p->x[a], p->count * 4);
    default: return dtrain_device_axpy(p->device, DTRAIN_F32, p->x[a], 0.5, p->x[b], p->count);
    }
}

/* A collective on free buffers, started or blocking. */
static dtrain_status together(program *p, int a, int b, uint64_t draw, int blocks)
{
    static const dtrain_op ops[] = {DTRAIN_MEAN, DTRAIN_MAX, DTRAIN_MIN, DTRAIN_MEAN};
    static const int kinds[] = {DG_ALL_REDUCE,     DG_REDUCE_SCATTER_V, DG_ALL_GATHER_V,
                                DG_REDUCE_SCATTER, DG_ALL_GATHER,       DG_BROADCAST};
    dg_rank *r = p->r;
    size_t counts[DG_MANY];
    dg_call c = {kinds[draw / 8 % (blocks ? 6 : 3)],
                 DTRAIN_F32,
                 ops[draw / 64 % 4],
                 p->count,
                 (int)(draw / 512 % (uint64_t)r->size),
                 counts,
                 NULL};
    dg_place place = {0, 0, b < 0 || draw / 256 % 2};
    const char *in;
    char *out;
    size_t sum = dg_counts(counts, r->size, p->count / (size_t)r->size, draw % 999);
    if (c.kind == DG_REDUCE_SCATTER_V || c.kind == DG_ALL_GATHER_V)
        c.count = sum;
    dg_pointers(r, &c, &place, p->x[a], p->x[b < 0 ? a : b], &in, &out);
    if (blocks)
        return dg_do(r->comm, p->group, &c, in, out);
    p->uses[p->flying] = 1u << a | (place.in_place ? 0 : 1u << b);
    p->busy |= p->uses[p->flying];
    return start(r->comm, p->group, &c, in, out, &p->works[p->flying++]);
}

static void turn(program *p, uint64_t draw)
{
    int what = (int)(draw % 8), a = a_free_one(p, draw / 65536, -1), b = a_free_one(p, draw / 1048576, a);
    dtrain_status status = DTRAIN_OK;
    if (a < 0 || (what == 4 && p->flying > 0))
        land(p, (int)(draw / 8 % (uint64_t)p->flying));
    else if (what < 4)
        status = together(p, a, b, draw, 0);
    else if (what == 5)
        status = together(p, a, b, draw, 1);
    else
        status = local(p, a, b, draw);
    if (status != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", p->r->rank, dtrain_last_error());
}

static void run_program(program *p, int turns, uint64_t seed)
{
    for (int i = 0; i < turns; i++)
        turn(p, dg_mix(seed * 1000 + (uint64_t)i));
    while (p->flying > 0)
        land(p, (int)(seed % (uint64_t)p->flying));
}

static void same_as_on_the_cpu(dg_rank *r, size_t count, int turns, uint64_t seed)
{
    program on_device = {0}, on_cpu = {0};
    char *back = (char *)malloc(count * 4);
    on_device.r = on_cpu.r = r;
    on_device.count = on_cpu.count = count;
    on_device.device = r->device;
    on_device.group = r->group;
    for (int i = 0; i < BUFFERS; i++) {
        on_device.x[i] = dg_alloc(r, count * 4);
        on_cpu.x[i] = (char *)malloc(count * 4);
        dg_numbers(on_cpu.x[i], DTRAIN_F32, count, seed * 64 + (uint64_t)(r->rank * BUFFERS + i));
        CHECK_EQ(dtrain_device_copy(r->device, on_device.x[i], on_cpu.x[i], count * 4), DTRAIN_OK);
    }
    run_program(&on_device, turns, seed);
    run_program(&on_cpu, turns, seed);
    for (int i = 0; i < BUFFERS; i++) {
        CHECK_EQ(dtrain_device_copy(r->device, back, on_device.x[i], count * 4), DTRAIN_OK);
        long at = dg_first_difference(back, on_cpu.x[i], count * 4);
        if (at >= 0)
            TEST_FAIL("seed %llu, rank %d of %d, %zu elements: byte %ld of buffer %d differs", (unsigned long long)seed,
                      r->rank, r->size, count, at, i);
        dg_free(r, on_device.x[i]);
        free(on_cpu.x[i]);
    }
    free(back);
}

static void short_and_long(dg_rank *r)
{
    same_as_on_the_cpu(r, 1009, 60, r->world->seed);
    same_as_on_the_cpu(r, 150001, 9, r->world->seed + 1);
}

TEST(works_in_flight_among_other_work_give_the_cpus_bits)
{
    static const int sizes[] = {1, 2, 3, 5, 8};
    for (int i = 0; i < 10; i++) {
        dg_world w = async_world(sizes[i / 2], modes[i % 2], short_and_long);
        w.seed = (uint64_t)i + 1;
        dg_on_threads(&w);
    }
}

TEST(works_of_processes_give_the_cpus_bits)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        dg_world w = async_world(ranks, DTRAIN_DEVICE_STAGED, short_and_long);
        w.without = ranks == 3 ? 2 : 0;
        dg_on_processes(&w);
    }
}

TEST(works_of_ranks_without_a_device_give_the_cpus_bits)
{
    static const unsigned without[] = {1, 6, 7};
    for (int i = 0; i < 3; i++) {
        dg_world w = async_world(3, DTRAIN_DEVICE_STAGED, short_and_long);
        w.without = without[i];
        dg_on_threads(&w);
    }
}

static void one_short(dg_rank *r)
{
    static const size_t counts[] = {1, 2, 3, 7, 64, 257, 1000, 5003};
    same_as_on_the_cpu(r, counts[r->world->seed % 8], 5 + (int)(r->world->seed / 8 % 30), r->world->seed);
}

TEST(seeded_interleavings_give_the_cpus_bits)
{
    const char *text = getenv("DTRAIN_TEST_INTERLEAVINGS");
    int number = text != NULL ? atoi(text) : 200;
    int before = test_failures;
    for (int i = 0; i < number && test_failures == before; i++) {
        dg_world w = async_world(2 + i % 4, modes[i % 3 == 2], one_short);
        w.seed = (uint64_t)i + 1000;
        w.delay_us = (unsigned)(dg_mix((uint64_t)i) % 300);
        dg_on_threads(&w);
        if (test_failures != before)
            TEST_FAIL("seed %llu", (unsigned long long)w.seed);
    }
}

/* ---- where there is no thread ---- */

static void at_once(dg_rank *r)
{
    dtrain_device_work *work;
    int64_t begin, end;
    char *x = dg_alloc(r, COUNT * 4);
    CHECK(r->fake.queue == NULL);
    CHECK_EQ(dtrain_device_group_all_reduce_async(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    CHECK_EQ(dtrain__async_times(work, &begin, &end), 1);
    CHECK_EQ(dtrain_device_work_wait(work, r->device), DTRAIN_OK);
    same_as_on_the_cpu(r, 1009, 60, r->world->seed);
    dg_free(r, x);
}

/* A table that makes no queues. */
static void without_queues(dg_rank *r)
{
    static dtrain_device_ops ops[DG_MANY];
    dtrain_device_ops *own = &ops[r->world->desc.mode == DTRAIN_DEVICE_EVENTS ? 0 : r->rank];
    if (r->rank == 0)
        for (int i = 0; i < DG_MANY; i++) {
            ops[i] = *async_ops();
            ops[i].queue_create = NULL;
            ops[i].queue_destroy = NULL;
        }
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    r->fake.device.ops = own;
    CHECK_EQ(dg_create(r), DTRAIN_OK);
    at_once(r);
    dtrain_device_group_destroy(r->group);
    r->group = NULL;
}

TEST(without_a_thread_the_call_is_over_when_its_start_returns)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(3, modes[i], at_once);
        w.comm.progress = DTRAIN_PROGRESS_POLL;
        dg_on_threads(&w);
        w = async_world(3, modes[i], without_queues);
        w.alone = 1;
        dg_on_threads(&w);
    }
}

/* ---- handles ---- */

static int seen;

static void wait_for_seen(int value)
{
    while (__atomic_load_n(&seen, __ATOMIC_SEQ_CST) < value)
        usleep(500);
}

static void tell_seen(int value)
{
    __atomic_store_n(&seen, value, __ATOMIC_SEQ_CST);
}

/* Rank 0's work is under way until rank 1 starts its own. */
static void looks(dg_rank *r)
{
    dtrain_device_work *work;
    int64_t begin = 0, end = 0, before = dtrain__os_now_ns();
    char *x = dg_alloc(r, COUNT * 4);
    if (r->rank == 1)
        wait_for_seen(1);
    CHECK_EQ(dtrain_device_group_all_reduce_async(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    if (r->rank == 0) {
        usleep(20000);
        CHECK_EQ(dtrain__async_times(work, &begin, &end), 0);
        CHECK_EQ(begin, 0);
        CHECK_EQ(end, 0);
        tell_seen(1);
    }
    while (!dtrain__async_times(work, &begin, &end))
        usleep(500);
    CHECK(before <= begin && begin <= end && end <= dtrain__os_now_ns());
    CHECK(r->rank == 1 || end - begin >= 20000000 / 2);
    CHECK_EQ(dtrain_device_work_wait(work, NULL), DTRAIN_OK);
    dg_free(r, x);
}

TEST(a_work_is_done_when_it_has_been_handed_over)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(2, modes[i], looks);
        seen = 0;
        dg_on_threads(&w);
    }
    CHECK_EQ(dtrain_device_work_wait(NULL, NULL), DTRAIN_OK);
}

/* The result is read by another queue of the rank's, the caller's own is far behind. */
static void another_queue(dg_rank *r)
{
    dtrain_device *other, stranger = *r->device;
    dtrain_device_ops ops = *stranger.ops;
    dtrain_device_work *work;
    float number = (float)(r->rank + 1), got[2];
    char *x = dg_alloc(r, COUNT * 4), *y = dg_alloc(r, COUNT * 4);
    stranger.ops = &ops;
    CHECK_EQ(dtrain__device_queue_create(r->device, &other), DTRAIN_OK);
    async_sleep(r->device, 5000);
    CHECK_EQ(dtrain_device_fill(r->device, x, &number, 4, COUNT), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_all_reduce_async(r->group, x, y, COUNT, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    async_sleep(r->device, 20000);
    CHECK_EQ(dtrain_device_work_wait(work, &stranger), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_work_wait(work, other), DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(other, got, y, 4), DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(other, got + 1, y + (COUNT - 1) * 4, 4), DTRAIN_OK);
    CHECK(got[0] == 6.0f && got[1] == 6.0f);
    dtrain__device_queue_destroy(other);
    dg_free(r, x);
    dg_free(r, y);
}

TEST(a_work_can_be_waited_for_on_another_queue_of_the_rank)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(3, modes[i], another_queue);
        dg_on_threads(&w);
    }
}

static void bad_arguments(dg_rank *r)
{
    size_t counts[2] = {1, 1}, huge[2] = {SIZE_MAX, 2};
    char *x = dg_alloc(r, 64);
    dtrain_device_work *work = (dtrain_device_work *)x;
    float number = 3, got = 0;
    CHECK_EQ(dtrain_device_group_all_reduce_async(NULL, x, x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_ERR_INVALID);
    CHECK(work == NULL);
    CHECK_EQ(dtrain_device_group_all_reduce_async(r->group, x, x, 1, DTRAIN_F32, DTRAIN_SUM, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_group_all_reduce_async(r->group, NULL, x, 1, DTRAIN_F32, DTRAIN_SUM, &work),
             DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "in is NULL");
    CHECK_EQ(dtrain__async_start_v(r->group, DTRAIN__ALL_GATHER, x, x, NULL, DTRAIN_F32, (dtrain_op)0, &work),
             DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "counts");
    CHECK_EQ(dtrain__async_start_v(r->group, DTRAIN__REDUCE_SCATTER, x, x, huge, DTRAIN_F32, DTRAIN_SUM, &work),
             DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain__async_start_v(r->group, DTRAIN__REDUCE_SCATTER, x, x + 4, counts, DTRAIN_F32, DTRAIN_SUM, &work),
             r->rank == 1 ? DTRAIN_OK : DTRAIN_ERR_INVALID); /* in place is at the rank's own offset */
    if (r->rank == 0)
        CHECK_EQ(dtrain__async_start_v(r->group, DTRAIN__REDUCE_SCATTER, x, x, counts, DTRAIN_F32, DTRAIN_SUM, &work),
                 DTRAIN_OK);
    CHECK_EQ(dtrain_device_work_wait(work, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, 1, DTRAIN_I64, DTRAIN_MEAN), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_fill(r->device, x, &number, 4, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(r->device, &got, x, 4), DTRAIN_OK);
    CHECK(got == 6.0f);
    dg_free(r, x);
}

TEST(bad_arguments_are_refused_by_the_start_and_leave_the_group_whole)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(2, modes[i], bad_arguments);
        dg_on_threads(&w);
    }
}

/* ---- several at a time, until they end badly ---- */

typedef struct several {
    char *in[SOME], *out[SOME];
    dtrain_device_work *work[SOME];
    size_t count;
} several;

static void several_begin(dg_rank *r, several *s, size_t count)
{
    memset(s, 0, sizeof *s);
    s->count = count;
    for (int i = 0; i < SOME; i++) {
        s->in[i] = dg_alloc(r, count * 4);
        s->out[i] = dg_alloc(r, count * 4);
    }
}

static void several_end(dg_rank *r, several *s)
{
    dtrain_device_group_destroy(r->group);
    r->group = NULL;
    for (int i = 0; i < SOME; i++) {
        dg_free(r, s->in[i]);
        dg_free(r, s->out[i]);
    }
}

static dtrain_status several_start(dg_rank *r, several *s)
{
    dtrain_status status = DTRAIN_OK;
    size_t counts[DG_MANY];
    for (int i = 0; i < SOME && status == DTRAIN_OK; i++) {
        dg_call c = {i % 3 == 0   ? DG_ALL_REDUCE
                     : i % 3 == 1 ? DG_REDUCE_SCATTER_V
                                  : DG_ALL_GATHER_V,
                     DTRAIN_F32,
                     DTRAIN_SUM,
                     s->count,
                     0,
                     counts,
                     NULL};
        dg_counts(counts, r->size, s->count / (size_t)r->size, (uint64_t)i + 1);
        status = start(r->comm, r->group, &c, s->in[i], s->out[i], &s->work[i]);
    }
    return status;
}

/* Waits for all; returns the first error, whose text it leaves, and after which no later work may be well. */
static dtrain_status several_wait(dg_rank *r, several *s)
{
    dtrain_status first = DTRAIN_OK;
    char text[512] = "";
    for (int i = 0; i < SOME; i++) {
        dtrain_status status = dtrain_device_work_wait(s->work[i], r->device);
        if (first == DTRAIN_OK && status != DTRAIN_OK)
            snprintf(text, sizeof text, "%s", dtrain_last_error());
        else if (first != DTRAIN_OK && status == DTRAIN_OK && r->rank != VICTIM)
            TEST_FAIL("rank %d: a work ended well after one that failed: %s", r->rank, text);
        first = first == DTRAIN_OK ? status : first;
        s->work[i] = NULL;
    }
    if (first != DTRAIN_OK)
        DTRAIN_IGNORE(dtrain_error_set(first, "%s", text));
    return first;
}

static dtrain_status until_it_breaks(dg_rank *r, several *s, int rounds)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < rounds && status == DTRAIN_OK; i++) {
        status = several_start(r, s);
        if (status == DTRAIN_OK)
            status = several_wait(r, s);
    }
    return status;
}

enum { CALLERS_CALL, OWN_CALL, OWN_TURN, HOWS };

static void one_breaks(dg_rank *r)
{
    several s;
    int64_t how = r->world->number % HOWS, n = r->world->number / HOWS;
    several_begin(r, &s, 70000);
    if (r->rank == VICTIM) {
        r->fake.fail_call = how == CALLERS_CALL ? n : 0;
        r->fake.queue_fail_call = how == OWN_CALL ? n : 0;
        r->fake.queue_fail_done = how == OWN_TURN ? n : 0;
    }
    dtrain_status status = dg_create(r);
    for (int i = 0; i < 60 && status == DTRAIN_OK; i++) {
        status = until_it_breaks(r, &s, 1);
        if (r->rank == VICTIM && how == OWN_TURN) /* else all rounds may be queued before its turn comes */
            async_idle(r->fake.queue);
    }
    keep(r, status);
    several_end(r, &s);
}

static void check_broken(const dg_world *w, int n)
{
    int before = test_failures, trial = 0;
    for (int rank = 0; rank < w->ranks; rank++)
        trial += w->status[rank] == DTRAIN_ERR_UNSUPPORTED && strstr(w->text[rank], "rank 1") != NULL;
    if (w->desc.mode == DTRAIN_DEVICE_EVENTS && trial == w->ranks)
        return; /* a device that breaks while they try whether they reach each other's memory does not */
    CHECK_CONTAINS(w->text[VICTIM], "fake:1");
    CHECK_EQ(w->status[VICTIM], DTRAIN_ERR_IO);
    for (int rank = 0; rank < w->ranks; rank++) {
        if (rank == VICTIM)
            continue;
        CHECK(w->status[rank] == DTRAIN_ERR_IO || w->status[rank] == DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(w->text[rank], "rank 1");
    }
    if (test_failures != before)
        TEST_FAIL("mode %d, way %d, %d: %s", (int)w->desc.mode, (int)(w->number % HOWS), n, w->text[0]);
}

TEST(a_device_that_breaks_with_works_under_way_ends_the_group_everywhere)
{
    for (int i = 0; i < 2; i++)
        for (int how = 0; how < HOWS; how++)
            for (int n = 1 + how % 2; n <= 40; n += 2) {
                dg_world w = async_world(3, modes[i], one_breaks);
                w.alone = 1;
                w.delay_us = 20;
                w.seed = (uint64_t)n;
                w.number = n * HOWS + how;
                int before = test_failures;
                dg_on_threads(&w);
                check_broken(&w, n);
                if (test_failures != before)
                    TEST_FAIL("mode %d, way %d, %d", (int)modes[i], how, n);
            }
}

/* The victim starts some, or none, and leaves. */
static void one_leaves(dg_rank *r)
{
    several s;
    several_begin(r, &s, COUNT);
    if (r->rank == VICTIM) {
        if (r->world->number > 0)
            CHECK_EQ(until_it_breaks(r, &s, (int)r->world->number), DTRAIN_OK);
        keep(r, DTRAIN_OK);
    } else {
        keep(r, until_it_breaks(r, &s, 1000));
    }
    several_end(r, &s);
}

TEST(a_rank_that_leaves_is_lost_to_the_works_of_the_others)
{
    for (int i = 0; i < 2; i++)
        for (int rounds = 0; rounds < 3; rounds++) {
            dg_world w = async_world(2 + rounds, modes[i], one_leaves);
            w.number = rounds;
            dg_on_threads(&w);
            for (int rank = 0; rank < w.ranks; rank++) {
                CHECK_EQ(w.status[rank], rank == VICTIM ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST);
                if (rank != VICTIM)
                    CHECK_CONTAINS(w.text[rank], "rank 1");
            }
        }
}

/* A rank's process dies in the midst of its n-th operation on the group's queue. */
static void one_is_killed(dg_rank *r)
{
    several s;
    several_begin(r, &s, 200000);
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    scene_meet(r->world->ranks);
    if (r->rank == VICTIM && r->world->number == 0)
        kill(getpid(), SIGKILL);
    if (r->rank == VICTIM)
        r->fake.queue->kill_done = r->world->number;
    CHECK_EQ(until_it_breaks(r, &s, 1000), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1");
    several_end(r, &s);
}

TEST(a_killed_process_is_lost_to_the_works_of_the_others)
{
    static const int64_t at[] = {0, 1, 2, 3, 5, 8, 13, 21, 34};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        scene s;
        pid_t pids[3];
        dg_world w = async_world(3, DTRAIN_DEVICE_STAGED, one_is_killed);
        w.number = at[i];
        scene_begin(&s, 3, 1);
        s.user = &w;
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, dg_process);
        for (int rank = 0; rank < 3; rank++)
            CHECK_EQ(end_of(pids[rank], 60), rank == VICTIM ? 128 + SIGKILL : 0);
    }
}

/* ---- works that nobody waits for ---- */

static void nobody_waits(dg_rank *r)
{
    several s;
    several_begin(r, &s, 70000);
    CHECK_EQ(several_start(r, &s), DTRAIN_OK);
    several_end(r, &s);
}

TEST(a_group_is_destroyed_while_works_are_under_way_and_ends_them)
{
    for (int i = 0; i < 2; i++)
        for (int seed = 1; seed <= 10; seed++) {
            dg_world w = async_world(3, modes[i], nobody_waits);
            w.seed = (uint64_t)seed;
            w.delay_us = 300;
            dg_on_threads(&w);
        }
}

/* Rank 1 starts what the others have started when they have given it up. */
static void nobody_comes(dg_rank *r)
{
    several s;
    int64_t begun = dtrain__os_now_ns();
    several_begin(r, &s, COUNT);
    if (r->rank == VICTIM) {
        wait_for_seen(r->size - 1);
        dtrain_status status = several_start(r, &s);
        CHECK_EQ(status, DTRAIN_OK);
        keep(r, several_wait(r, &s));
        CHECK(dtrain__os_now_ns() - begun < (int64_t)20000000000);
        several_end(r, &s);
        return;
    }
    CHECK_EQ(several_start(r, &s), DTRAIN_OK);
    several_end(r, &s);
    CHECK(dtrain__os_now_ns() - begun > 900000000 && dtrain__os_now_ns() - begun < (int64_t)10000000000);
    __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
}

TEST(a_group_that_is_destroyed_before_its_peers_have_come_is_aborted_after_a_second)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(3, modes[i], nobody_comes);
        seen = 0;
        dg_on_threads(&w);
        CHECK_EQ(w.status[VICTIM], DTRAIN_ERR_ABORTED);
    }
}

/* ---- calls that fail ---- */

static void late_begin(dg_rank *r, several *s)
{
    several_begin(r, s, COUNT);
    for (int i = 0; i < 2; i++) {
        float number = (float)((r->rank + 1) * (i + 1));
        CHECK_EQ(dtrain_device_fill(r->device, s->in[i], &number, 4, COUNT), DTRAIN_OK);
    }
}

static void late_start(dg_rank *r, several *s, int i)
{
    CHECK_EQ(
        dtrain_device_group_all_reduce_async(r->group, s->in[i], s->out[i], COUNT, DTRAIN_F32, DTRAIN_SUM, &s->work[i]),
        DTRAIN_OK);
}

/* Rank 0 starts two calls, which look alike, and gives up the first while rank 1 has yet to come: the second must not
 * take its place in rank 1's eyes. Both are started again until they are well. */
static void one_is_late(dg_rank *r)
{
    several s;
    int timeouts = 0, well[2] = {0, 0};
    late_begin(r, &s);
    if (r->rank == 1)
        usleep(450000);
    for (int round = 0; round < 100 && !(well[0] && well[1]); round++) {
        for (int i = 0; i < 2; i++)
            if (!well[i])
                late_start(r, &s, i);
        for (int i = 0; i < 2; i++)
            if (!well[i]) {
                dtrain_status status = dtrain_device_work_wait(s.work[i], NULL);
                CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_TIMEOUT);
                timeouts += status == DTRAIN_ERR_TIMEOUT;
                well[i] = status == DTRAIN_OK;
            }
    }
    CHECK(r->rank == 1 || timeouts >= 2);
    for (int i = 0; i < 2; i++) {
        float got = 0;
        CHECK_EQ(well[i], 1);
        CHECK_EQ(dtrain_device_copy(r->device, &got, s.out[i] + (COUNT - 1) * 4, 4), DTRAIN_OK);
        CHECK(got == 3.0f * (float)(i + 1));
    }
    several_end(r, &s);
}

TEST(works_that_follow_one_that_timed_out_do_not_take_its_place)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(2, modes[i], one_is_late);
        w.comm.timeout_ms = 300;
        dg_on_threads(&w);
    }
}

/* All works under way end with the first difference; what is started when that is known is made. */
static void one_differs(dg_rank *r)
{
    several s;
    several_begin(r, &s, COUNT);
    for (int i = 0; i < SOME; i++)
        CHECK_EQ(dtrain_device_group_all_reduce_async(r->group, s.in[i], s.out[i], COUNT - (size_t)(i == 1 && r->rank),
                                                      DTRAIN_F32, DTRAIN_SUM, &s.work[i]),
                 DTRAIN_OK);
    for (int i = 0; i < SOME; i++) {
        CHECK_EQ(dtrain_device_work_wait(s.work[i], NULL), i == 0 ? DTRAIN_OK : DTRAIN_ERR_MISMATCH);
        if (i > 0)
            CHECK_CONTAINS(dtrain_last_error(), "f32 x 3000)");
    }
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, s.in[0], s.out[0], COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    several_end(r, &s);
}

TEST(a_mismatch_ends_the_works_that_were_started_after_it)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(2, modes[i], one_differs);
        dg_on_threads(&w);
    }
}

/* ---- what is made ---- */

static void warm(dg_rank *r)
{
    long made = 0, events = 0, own = 0, allocations = 0;
    several s;
    several_begin(r, &s, 200000);
    for (int i = 0; i < 12; i++) {
        CHECK_EQ(several_start(r, &s), DTRAIN_OK);
        CHECK_EQ(several_wait(r, &s), DTRAIN_OK);
        CHECK_EQ(dtrain_device_group_all_reduce(r->group, s.in[0], s.out[0], 1000, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(dtrain_device_wait(r->device), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
        if (i == 3) {
            made = __atomic_load_n(&resizes, __ATOMIC_SEQ_CST);
            events = r->fake.events;
            own = r->fake.queue->events;
            allocations = r->fake.allocations + r->fake.queue->allocations;
        }
        CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    }
    CHECK_EQ(r->fake.events, events);
    CHECK_EQ(r->fake.queue->events, own);
    CHECK_EQ(r->fake.allocations + r->fake.queue->allocations, allocations);
    CHECK_EQ(__atomic_load_n(&resizes, __ATOMIC_SEQ_CST), made);
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    several_end(r, &s);
}

TEST(nothing_is_made_once_as_many_works_were_in_flight)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = async_world(3, modes[i], warm);
        dg_on_threads(&w);
    }
}

/* A forked child has no such thread: it is told so, and can free its copy. */
TEST(a_forked_child_is_refused_and_frees_its_copy)
{
    dtrain_comm *comm;
    dtrain_device_group *group;
    dtrain_device_group_desc desc;
    dtrain_device_work *work, *none;
    float x = 3;
    int status = -1;
    memset(&desc, 0, sizeof desc);
    desc.async = 1;
    CHECK_EQ(dtrain_comm_create(&comm, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_create(&group, comm, NULL, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_all_reduce_async(group, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    pid_t child = fork();
    if (child == 0) {
        int good = dtrain_device_group_all_reduce_async(group, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &none) ==
                       DTRAIN_ERR_INVALID &&
                   dtrain_device_work_wait(work, NULL) == DTRAIN_ERR_INVALID;
        dtrain_device_group_destroy(group);
        _exit(good ? 0 : 1);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(dtrain_device_work_wait(work, NULL), DTRAIN_OK);
    CHECK(x == 3.0f);
    dtrain_device_group_destroy(group);
    dtrain_comm_destroy(comm);
}
