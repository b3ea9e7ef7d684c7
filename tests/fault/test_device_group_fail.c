/* Collectives over devices that go wrong: ranks that leave or are killed in every phase, devices that break at every
 * operation, calls and descs that differ. Nobody hangs, everybody can clean up, and texts say what came. */
#include "hooks.h"
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "device_worlds.h"

enum { COUNT = 3001, VICTIM = 1 };

static const dtrain_device_mode modes[] = {DTRAIN_DEVICE_EVENTS, DTRAIN_DEVICE_STAGED};

static void keep(dg_rank *r, dtrain_status status)
{
    r->world->status[r->rank] = status;
    snprintf(r->world->text[r->rank], sizeof r->world->text[r->rank], "%s", dtrain_last_error());
}

/* Calls of all kinds in turn until one fails, the device's own errors included. */
static dtrain_status until_it_breaks(dg_rank *r, char *x, char *y, size_t count, int calls)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < calls && status == DTRAIN_OK; i++) {
        dg_call c = {i % DG_KINDS, DTRAIN_F32, DTRAIN_SUM, count, i % r->size, NULL, NULL};
        if (r->rank == 0 && r->device != NULL && r->world->behind_us > 0)
            async_sleep(r->device, r->world->behind_us);
        status = dg_do(r->comm, r->group, &c, x, y);
        if (status == DTRAIN_OK && i % 3 == 2)
            status = dtrain_device_wait(r->device);
    }
    return status;
}

/* ---- ranks that leave ---- */

enum { BEFORE_CREATION, AFTER_CREATION, BETWEEN_CALLS, IN_A_CALL };

/* The victim leaves in the world's phase; its queue is far behind when it has called. */
static void one_leaves(dg_rank *r)
{
    int64_t phase = r->world->number;
    if (r->rank == VICTIM && phase == BEFORE_CREATION)
        return;
    dtrain_status status = dg_create(r);
    if (status != DTRAIN_OK || (r->rank == VICTIM && phase == AFTER_CREATION)) {
        keep(r, status);
        return;
    }
    char *x = dg_alloc(r, COUNT * 4), *y = dg_alloc(r, COUNT * 4);
    if (r->rank == VICTIM && phase == IN_A_CALL)
        async_sleep(r->device, 20000);
    keep(r, until_it_breaks(r, x, y, COUNT, r->rank == VICTIM ? 2 : 1000));
    dg_free(r, x);
    dg_free(r, y);
}

TEST(a_rank_that_leaves_in_any_phase_is_lost_to_the_others)
{
    for (int i = 0; i < 2; i++)
        for (int phase = BEFORE_CREATION; phase <= IN_A_CALL; phase++)
            for (int ranks = 2; ranks <= 5; ranks += 3) {
                dg_world w = dg_new(ranks, modes[i], one_leaves);
                w.alone = 1;
                w.number = phase;
                dg_on_threads(&w);
                for (int rank = 0; rank < ranks; rank++) {
                    CHECK_EQ(w.status[rank], rank == VICTIM ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST);
                    if (rank != VICTIM)
                        CHECK_CONTAINS(w.text[rank], "rank 1");
                }
            }
}

/* A rank's process dies in the midst of its n-th operation on the device. */
static void one_is_killed(dg_rank *r)
{
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    scene_meet(r->world->ranks);
    if (r->rank == VICTIM && r->world->number == 0)
        kill(getpid(), SIGKILL);
    if (r->rank == VICTIM)
        r->fake.kill_done = r->world->number;
    dtrain_status status = dg_create(r);
    if (status == DTRAIN_OK) {
        char *x = dg_alloc(r, 200000 * 4), *y = dg_alloc(r, 200000 * 4);
        status = until_it_breaks(r, x, y, 200000, 1000);
        dg_free(r, x);
        dg_free(r, y);
    }
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1");
}

TEST(a_killed_process_is_lost_to_the_others_whatever_its_device_was_at)
{
    static const int64_t at[] = {0, 1, 2, 3, 4, 5, 6, 8, 11, 15, 20, 31};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        scene s;
        pid_t pids[3];
        dg_world w = dg_new(3, DTRAIN_DEVICE_STAGED, one_is_killed);
        w.alone = 1;
        w.number = at[i];
        scene_begin(&s, 3, 1);
        s.user = &w;
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, dg_process);
        for (int rank = 0; rank < 3; rank++)
            CHECK_EQ(end_of(pids[rank], 60), rank == VICTIM ? 128 + SIGKILL : 0);
    }
}

/* ---- devices that break ---- */

enum { IN_A_CALL_OF_IT, WHEN_ITS_TURN_COMES, ALLOCATION };

static void one_breaks(dg_rank *r)
{
    int64_t how = r->world->number % 4, n = r->world->number / 4;
    char *x = dg_alloc(r, 70000 * 4), *y = dg_alloc(r, 70000 * 4);
    if (r->rank == VICTIM) {
        r->fake.fail_call = how == IN_A_CALL_OF_IT ? n : 0;
        r->fake.fail_done = how == WHEN_ITS_TURN_COMES ? n : 0;
        r->fake.fail_allocation = how == ALLOCATION ? r->fake.allocations + n : 0;
    }
    dtrain_status status = dg_create(r);
    keep(r, status == DTRAIN_OK ? until_it_breaks(r, x, y, 70000, how == ALLOCATION ? 4 : 60) : status);
    dtrain_device_group_destroy(r->group);
    r->group = NULL;
    dg_free(r, x);
    dg_free(r, y);
}

static dg_world broken_world(dtrain_device_mode mode, int how, int n)
{
    dg_world w = dg_new(3, mode, one_breaks);
    w.alone = 1;
    w.delay_us = 20;
    w.seed = (uint64_t)n;
    w.number = n * 4 + how;
    w.behind_us = how == IN_A_CALL_OF_IT ? 3000 : 0; /* so that its work is yet to come when the others clean up */
    dg_on_threads(&w);
    return w;
}

/* A device that breaks while the ranks try whether they reach each other's memory is one that does not. */
static int broke_in_the_trial(const dg_world *w)
{
    int unsupported = 0;
    for (int rank = 0; rank < w->ranks; rank++)
        unsupported += w->status[rank] == DTRAIN_ERR_UNSUPPORTED && strstr(w->text[rank], "rank 1") != NULL;
    return w->desc.mode == DTRAIN_DEVICE_EVENTS && unsupported == w->ranks;
}

static void check_broken(const dg_world *w, int how, int n)
{
    int before = test_failures;
    CHECK_CONTAINS(w->text[VICTIM], "fake:1");
    if (broke_in_the_trial(w))
        return;
    CHECK_EQ(w->status[VICTIM], DTRAIN_ERR_IO);
    for (int rank = 0; rank < w->ranks; rank++) {
        if (rank == VICTIM)
            continue;
        CHECK(w->status[rank] == DTRAIN_ERR_IO || w->status[rank] == DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(w->text[rank], "rank 1");
    }
    if (test_failures != before)
        TEST_FAIL("mode %d, failing %s %d", (int)w->desc.mode, how == IN_A_CALL_OF_IT ? "call" : "operation", n);
}

TEST(a_device_that_breaks_at_any_call_or_operation_ends_the_group_everywhere)
{
    for (int i = 0; i < 2; i++)
        for (int how = IN_A_CALL_OF_IT; how <= WHEN_ITS_TURN_COMES; how++)
            for (int n = 1; n <= 45; n++) {
                dg_world w = broken_world(modes[i], how, n);
                check_broken(&w, how, n);
            }
}

TEST(no_memory_on_one_rank_is_no_memory_on_all)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = broken_world(modes[i], ALLOCATION, 1);
        for (int rank = 0; rank < w.ranks; rank++) {
            CHECK_EQ(w.status[rank], DTRAIN_ERR_MEMORY);
            CHECK_CONTAINS(w.text[rank], "rank 1");
            CHECK_CONTAINS(w.text[rank], "fake:1");
        }
        w = broken_world(modes[i], ALLOCATION, 2);
        for (int rank = 0; rank < w.ranks; rank++)
            CHECK_EQ(w.status[rank], DTRAIN_OK);
    }
}

/* ---- calls that differ ---- */

typedef struct difference {
    dg_call call[2]; /* rank 1 makes the second */
    const char *text[2];
} difference;

#define BIG 1000000

static const difference differences[] = {{{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 101, 0, NULL, NULL}},
                                          {"f32 x 100)", "f32 x 101)"}},
                                         {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 0, 0, NULL, NULL},
                                           {DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 1, 0, NULL, NULL}},
                                          {"f32 x 0)", "f32 x 1)"}},
                                         {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, BIG, 0, NULL, NULL},
                                           {DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, BIG + 1, 0, NULL, NULL}},
                                          {"f32 x 1000000)", "f32 x 1000001)"}},
                                         {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, BIG, 0, NULL, NULL},
                                           {DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 65536, 0, NULL, NULL}},
                                          {"f32 x 1000000)", "f32 x 65536)"}},
                                         {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_ALL_REDUCE, DTRAIN_I32, DTRAIN_SUM, 100, 0, NULL, NULL}},
                                          {"f32 x 100", "i32 x 100"}},
                                         {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_MAX, 100, 0, NULL, NULL}},
                                          {"sum, f32", "max, f32"}},
                                         {{{DG_REDUCE_SCATTER, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_REDUCE_SCATTER, DTRAIN_F32, DTRAIN_MEAN, 100, 0, NULL, NULL}},
                                          {"sum, f32", "mean, f32"}},
                                         {{{DG_REDUCE_SCATTER, DTRAIN_F32, DTRAIN_SUM, BIG, 0, NULL, NULL},
                                           {DG_REDUCE_SCATTER, DTRAIN_F32, DTRAIN_SUM, BIG + 1, 0, NULL, NULL}},
                                          {"f32 x 1000000)", "f32 x 1000001)"}},
                                         {{{DG_ALL_GATHER, DTRAIN_F32, DTRAIN_SUM, BIG, 0, NULL, NULL},
                                           {DG_ALL_GATHER, DTRAIN_F32, DTRAIN_SUM, BIG + 3, 0, NULL, NULL}},
                                          {"f32 x 1000000)", "f32 x 1000003)"}},
                                         {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_ALL_GATHER, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL}},
                                          {"all_reduce", "all_gather"}},
                                         {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_REDUCE_SCATTER, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL}},
                                          {"all_reduce", "reduce_scatter"}},
                                         {{{DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_ALL_GATHER, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL}},
                                          {"broadcast", "all_gather"}},
                                         {{{DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                           {DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, 100, 2, NULL, NULL}},
                                          {"root 0", "root 2"}},
                                         {{{DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, BIG, 0, NULL, NULL},
                                           {DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, BIG + 1, 0, NULL, NULL}},
                                          {"f32 x 1000000, root", "f32 x 1000001, root"}}};

enum { DIFFERENCES = sizeof differences / sizeof *differences };

/* Every rank has an error in the call or, where it only sends in it, in the next. */
static void calls_differ(dg_rank *r)
{
    const difference *d = &differences[r->world->number];
    char *x = dg_alloc(r, (BIG + 3) * 4), *y = dg_alloc(r, (BIG + 3) * 4);
    dtrain_status status = dg_do(r->comm, r->group, &d->call[r->rank == VICTIM], x, y);
    keep(r, status);
    if (status == DTRAIN_OK)
        keep(r, dtrain_device_group_all_reduce(r->group, x, x, 10, DTRAIN_F32, DTRAIN_SUM));
    if (dtrain_device_wait(r->device) != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    dg_free(r, x);
    dg_free(r, y);
}

static void check_difference(const dg_world *w)
{
    const difference *d = &differences[w->number];
    int before = test_failures, quoted = 0;
    for (int rank = 0; rank < w->ranks; rank++) {
        CHECK_EQ(w->status[rank], DTRAIN_ERR_MISMATCH);
        quoted += strstr(w->text[rank], d->text[0]) != NULL && strstr(w->text[rank], d->text[1]) != NULL;
    }
    CHECK(quoted > 0);
    if (test_failures != before)
        TEST_FAIL("%s, difference %d: \"%s\", \"%s\"", w->desc.mode == DTRAIN_DEVICE_EVENTS ? "events" : "staged",
                  (int)w->number, w->text[0], w->text[1]);
}

TEST(calls_that_differ_are_a_mismatch_that_quotes_both)
{
    for (int i = 0; i < 2; i++)
        for (int n = 0; n < DIFFERENCES; n++) {
            dg_world w = dg_new(3, modes[i], calls_differ);
            w.number = n;
            w.comm.timeout_ms = 5000;
            w.without = i == 1 && n % 2 == 1 ? 1 : 0;
            dg_on_threads(&w);
            check_difference(&w);
        }
}

typedef struct cut {
    size_t counts[2][2]; /* rank 1 has the second */
    int kind[2];
} cut;

static const cut cuts[] = {
    {{{100, 0}, {50, 50}}, {DG_REDUCE_SCATTER_V, DG_REDUCE_SCATTER_V}},
    {{{100, 0}, {0, 100}}, {DG_ALL_GATHER_V, DG_ALL_GATHER_V}},
    {{{BIG, 1}, {1, BIG}}, {DG_ALL_GATHER_V, DG_ALL_GATHER_V}},
    {{{BIG, 70000}, {BIG - 1, 70001}}, {DG_REDUCE_SCATTER_V, DG_REDUCE_SCATTER_V}},
    {{{50, 50}, {50, 51}}, {DG_REDUCE_SCATTER_V, DG_REDUCE_SCATTER_V}},
    {{{50, 50}, {50, 50}}, {DG_REDUCE_SCATTER_V, DG_REDUCE_SCATTER}},
    {{{50, 50}, {50, 50}}, {DG_ALL_GATHER, DG_ALL_GATHER_V}},
};

static void shards_differ(dg_rank *r)
{
    const cut *t = &cuts[r->world->number];
    const size_t *counts = t->counts[r->rank];
    char *x = dg_alloc(r, (counts[0] + counts[1]) * 4), *y = dg_alloc(r, (counts[0] + counts[1]) * 4);
    dg_call c = {t->kind[r->rank], DTRAIN_F32, DTRAIN_SUM, counts[0] + counts[1], 0, counts, NULL};
    keep(r, dg_do(r->comm, r->group, &c, x, y));
    dtrain_device_group_destroy(r->group);
    r->group = NULL;
    dg_free(r, x);
    dg_free(r, y);
}

TEST(shards_that_differ_in_length_are_a_mismatch_and_never_a_sum)
{
    for (int i = 0; i < 3; i++)
        for (size_t n = 0; n < sizeof cuts / sizeof *cuts; n++) {
            int before = test_failures;
            dg_world w = dg_new(2, modes[i % 2], shards_differ);
            w.without = i == 2 ? 3 : 0;
            w.desc.mode = i == 2 ? DTRAIN_DEVICE_STAGED : w.desc.mode;
            w.number = (int64_t)n;
            dg_on_threads(&w);
            for (int rank = 0; rank < 2; rank++)
                CHECK_EQ(w.status[rank], DTRAIN_ERR_MISMATCH);
            CHECK(strstr(w.text[0], "_v #") != NULL && strstr(w.text[1], "_v #") != NULL);
            if (n < 4)
                CHECK(strstr(w.text[0], "per-rank counts") != NULL && strstr(w.text[1], "per-rank counts") != NULL);
            if (test_failures != before)
                TEST_FAIL("cut %zu, way %d: %s; %s", n, i, w.text[0], w.text[1]);
        }
}

/* One rank calls the CPU's collective of the same kind and size. */
static void one_calls_the_cpus(dg_rank *r)
{
    float host[8] = {0};
    char *x = dg_alloc(r, sizeof host);
    dtrain_status status = r->rank == VICTIM
                               ? dtrain_all_reduce(r->comm, host, host, 8, DTRAIN_F32, DTRAIN_SUM)
                               : dtrain_device_group_all_reduce(r->group, x, x, 8, DTRAIN_F32, DTRAIN_SUM);
    keep(r, status);
    dg_free(r, x);
}

TEST(a_call_on_devices_beside_one_on_the_cpu_is_a_mismatch)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = dg_new(2, modes[i], one_calls_the_cpus);
        dg_on_threads(&w);
        for (int rank = 0; rank < 2; rank++) {
            CHECK_EQ(w.status[rank], DTRAIN_ERR_MISMATCH);
            CHECK_CONTAINS(w.text[rank], "device_group_all_reduce");
        }
    }
}

/* ---- creation ---- */

static void creates(dg_rank *r)
{
    keep(r, dg_create(r));
    CHECK((r->group == NULL) == (r->world->status[r->rank] != DTRAIN_OK));
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
}

static void creates_other(dg_rank *r)
{
    dtrain_device_group_desc desc = r->world->desc;
    if (r->rank == VICTIM && r->world->number == 0)
        desc.slots = 5;
    if (r->rank == VICTIM && r->world->number == 1)
        desc.chunk_bytes = 1 << 19;
    if (r->rank == VICTIM && r->world->number == 2)
        desc.mode = DTRAIN_DEVICE_MODE_AUTO;
    if (r->rank == VICTIM && r->world->number == 3)
        desc.async = 1;
    keep(r, dtrain_device_group_create(&r->group, r->comm, r->device, &desc));
    CHECK(r->group == NULL);
}

TEST(descs_that_differ_are_named)
{
    static const char *const fields[] = {"slots", "chunk_bytes", "mode", "async"};
    for (int n = 0; n < 4; n++) {
        dg_world w = dg_new(3, DTRAIN_DEVICE_STAGED, creates_other);
        w.alone = 1;
        w.number = n;
        dg_on_threads(&w);
        for (int rank = 0; rank < 3; rank++) {
            CHECK_EQ(w.status[rank], DTRAIN_ERR_MISMATCH);
            CHECK_CONTAINS(w.text[rank], fields[n]);
            CHECK_CONTAINS(w.text[rank], "rank 1");
        }
    }
}

static void creation_is(dg_world *w, dtrain_status status, const char *text)
{
    w->alone = 1;
    w->body = creates;
    dg_on_threads(w);
    for (int rank = 0; rank < w->ranks; rank++) {
        CHECK_EQ(w->status[rank], status);
        if (status != DTRAIN_OK)
            CHECK_CONTAINS(w->text[rank], text);
    }
}

TEST(descs_out_of_bounds_are_invalid_and_events_need_a_device_on_every_rank)
{
    dg_world w = dg_new(3, DTRAIN_DEVICE_STAGED, NULL);
    w.desc.slots = 1;
    creation_is(&w, DTRAIN_ERR_INVALID, "slots");
    w = dg_new(3, DTRAIN_DEVICE_STAGED, NULL);
    w.desc.chunk_bytes = 262143;
    creation_is(&w, DTRAIN_ERR_INVALID, "chunk_bytes");
    w.desc.chunk_bytes = (4u << 20) + 1;
    creation_is(&w, DTRAIN_ERR_INVALID, "chunk_bytes");
    w = dg_new(3, DTRAIN_DEVICE_STAGED, NULL);
    w.desc.async = 2;
    creation_is(&w, DTRAIN_ERR_INVALID, "async");
    w = dg_new(3, DTRAIN_DEVICE_EVENTS, NULL);
    w.without = 4;
    creation_is(&w, DTRAIN_ERR_UNSUPPORTED, "rank 2");
}

static void no_events_here(dg_rank *r)
{
    CHECK_EQ(dg_create(r), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_DEVICE_STAGED");
}

TEST(processes_have_no_events)
{
    dg_world w = dg_new(2, DTRAIN_DEVICE_EVENTS, no_events_here);
    w.alone = 1;
    dg_on_processes(&w);
}

/* ---- calls that can be made again ---- */

static void bad_arguments(dg_rank *r)
{
    char *x = dg_alloc(r, 64);
    float number = 3, got = 0;
    dtrain_device_work *work;
    CHECK_EQ(dtrain_device_group_all_reduce(NULL, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, NULL, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_group_broadcast(r->group, x, 1, DTRAIN_F32, r->size), DTRAIN_ERR_INVALID);
    CHECK(dtrain_device_group_all_reduce(r->group, x, x, 1, DTRAIN_I64, DTRAIN_MEAN) != DTRAIN_OK);
    CHECK(dtrain_device_group_all_gather(r->group, x, x + 32, 4, DTRAIN_F4) != DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_reduce_scatter_v(r->group, x, x, NULL, NULL, DTRAIN_F32, DTRAIN_SUM),
             DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "counts");
    CHECK_EQ(dtrain_device_group_all_gather_v(NULL, x, x, NULL, NULL, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_group_all_reduce_async(r->group, x, x, 1, DTRAIN_F32, DTRAIN_SUM, &work),
             DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "desc.async");
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, NULL, NULL, 0, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_device_fill(r->device, x, &number, 4, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(r->device, &got, x, 4), DTRAIN_OK);
    CHECK(got == 3.0f * (float)r->size);
    dg_free(r, x);
}

TEST(bad_arguments_are_refused_and_leave_the_group_whole)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = dg_new(2, modes[i], bad_arguments);
        dg_on_threads(&w);
    }
}

static int given_up;

/* Rank 0 gives up once before rank 1 calls; both then have the sum. */
static void one_is_late(dg_rank *r)
{
    char *x = dg_alloc(r, COUNT * 4);
    float number = (float)(r->rank + 1), got = 0;
    CHECK_EQ(dtrain_device_fill(r->device, x, &number, 4, COUNT), DTRAIN_OK);
    if (r->rank == 0) {
        CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_TIMEOUT);
        __atomic_store_n(&given_up, 1, __ATOMIC_SEQ_CST);
    }
    while (!__atomic_load_n(&given_up, __ATOMIC_SEQ_CST))
        usleep(1000);
    dtrain_status status = DTRAIN_ERR_TIMEOUT;
    for (int i = 0; i < 100 && status == DTRAIN_ERR_TIMEOUT; i++)
        status = dtrain_device_group_all_reduce(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM);
    CHECK_EQ(status, DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(r->device, &got, x + (COUNT - 1) * 4, 4), DTRAIN_OK);
    CHECK(got == 3.0f);
    dg_free(r, x);
}

TEST(a_call_that_timed_out_before_anything_moved_can_be_made_again)
{
    for (int i = 0; i < 2; i++) {
        dg_world w = dg_new(2, modes[i], one_is_late);
        w.comm.timeout_ms = 300;
        given_up = 0;
        dg_on_threads(&w);
    }
}
