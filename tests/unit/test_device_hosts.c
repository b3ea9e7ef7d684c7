/* Collectives over devices of several hosts, which are one here that the ranks take for several: the bits of the CPU's
 * for every way that ranks lie on hosts, and an end on every rank in whatever phase one leaves or breaks. */
#include "hooks.h"
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "device_bits.h"

enum { COUNT = 3001, VICTIM = 1 };

static const char *hosts; /* a letter for each rank */

uint64_t hook_device_host(int rank)
{
    return (uint64_t)(unsigned char)hosts[rank];
}

static dg_world hosts_world(const char *on, dtrain_device_mode mode, void (*body)(dg_rank *r))
{
    hosts = on;
    dg_world w = dg_new((int)strlen(on), mode, body);
    w.desc.chunk_bytes = 262144;
    w.desc.slots = 2;
    w.delay_us = 20;
    return w;
}

static const char *const layouts[] = {"aabb", "aaaabbbb", "aabbcc", "aabbccdd"};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* ---- results ---- */

static void on_all_layouts(void (*body)(dg_rank *r), int async)
{
    for (int i = 0; i < LAYOUTS; i++) {
        dg_world w = hosts_world(layouts[i], DTRAIN_DEVICE_HOSTS, body);
        w.seed = (uint64_t)(i + 1);
        w.desc.async = async;
        dg_on_threads(&w);
    }
}

TEST(every_count_below_65_gives_the_cpus_bits_across_hosts)
{
    on_all_layouts(every_small_count, 0);
}

TEST(large_counts_give_the_cpus_bits_across_hosts)
{
    on_all_layouts(large_counts, 0);
}

TEST(shards_of_any_length_give_the_cpus_bits_across_hosts)
{
    on_all_layouts(cut_shards, 0);
}

/* Every dtype and operation, at a count of several lines and at one of several chunks. */
static void every_reduction(dg_rank *r)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F64, DTRAIN_F32, DTRAIN_F16, DTRAIN_BF16, DTRAIN_I8,
                                          DTRAIN_U8,  DTRAIN_I32, DTRAIN_U32, DTRAIN_I64,  DTRAIN_U64};
    static const dtrain_op ops[] = {DTRAIN_SUM, DTRAIN_MEAN, DTRAIN_PROD, DTRAIN_MIN,
                                    DTRAIN_MAX, DTRAIN_AND,  DTRAIN_OR,   DTRAIN_XOR};
    pair p;
    pair_begin(r, &p, 8 * 70001);
    for (size_t i = 0; i < 80; i++)
        for (int kind = DG_ALL_REDUCE; kind <= DG_REDUCE_SCATTER; kind++) {
            dg_call c = {kind, dtypes[i / 8], ops[i % 8], i % 7 == 0 ? 70001 : 777, 0, NULL, NULL};
            dg_place place = {i % 8, i % 5, (int)i % 2};
            int ints = i / 8 >= 4, bits = i % 8 >= 5;
            if (ints ? c.op == DTRAIN_MEAN : bits || c.dtype == DTRAIN_F16)
                continue;
            same_bits(r, &p, &c, &place, i);
        }
    pair_end(r, &p);
}

TEST(every_reduction_gives_the_cpus_bits_across_hosts)
{
    on_all_layouts(every_reduction, 0);
}

/* A root on every host, and at every place in it. */
static void every_root(dg_rank *r)
{
    static const size_t counts[] = {0, 1, 65, 4099, 200003};
    pair p;
    pair_begin(r, &p, 4 * 200003);
    for (int i = 0; i < 5; i++)
        for (int root = 0; root < r->size; root++) {
            dg_call c = {DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, counts[i], root, NULL, NULL};
            dg_place place = {0, (size_t)root, 0};
            same_bits(r, &p, &c, &place, (uint64_t)root);
        }
    pair_end(r, &p);
}

TEST(a_broadcast_from_every_rank_reaches_every_host)
{
    on_all_layouts(every_root, 0);
}

TEST(a_group_with_a_thread_gives_the_cpus_bits_across_hosts)
{
    on_all_layouts(small_and_large, 1);
}

/* Small whole numbers, whose sums are the same in any order. */
static void chunks_of_many_sizes(dg_rank *r)
{
    enum { MOST = 9000001 };
    static const size_t counts[] = {28000, 29000, 150001, 1000003, MOST};
    float *host = (float *)malloc(MOST * sizeof *host);
    char *x = dg_alloc(r, MOST * 4);
    for (size_t i = 0; i < 5; i++) {
        size_t wrong = 0;
        for (size_t k = 0; k < counts[i]; k++)
            host[k] = (float)((k * 7 + (size_t)r->rank) % 1009);
        CHECK_EQ(dtrain_device_copy(r->device, x, host, counts[i] * 4), DTRAIN_OK);
        CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, counts[i], DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(dtrain_device_copy(r->device, host, x, counts[i] * 4), DTRAIN_OK);
        for (size_t k = 0; k < counts[i]; k++) {
            size_t sum = 0;
            for (int rank = 0; rank < r->size; rank++)
                sum += (k * 7 + (size_t)rank) % 1009;
            wrong += host[k] != (float)sum;
        }
        CHECK_EQ(wrong, 0);
    }
    dg_free(r, x);
    free(host);
}

TEST(chunks_by_the_size_of_the_call_give_the_sums)
{
    dg_world w = hosts_world("aabb", DTRAIN_DEVICE_HOSTS, chunks_of_many_sizes);
    w.desc.chunk_bytes = 0;
    w.desc.slots = 0;
    dg_on_threads(&w);
    w = hosts_world("ab", DTRAIN_DEVICE_STAGED, chunks_of_many_sizes);
    w.desc.chunk_bytes = 0;
    w.desc.slots = 0;
    dg_on_threads(&w);
}

/* The root of S * 600,000 bytes, by hand: 387,298.3 of 250,000; 774,596.7 of 10^6; 2,449,489.7 of 10^7. */
TEST(a_chunk_is_the_root_of_what_a_call_has_times_600000_bytes)
{
    CHECK_EQ(dtrain__staged_chunk(0), 262144);
    CHECK_EQ(dtrain__staged_chunk(114588), 262144); /* 262,208^2 / 600,000 = 114,588.4 */
    CHECK_EQ(dtrain__staged_chunk(114589), 262208);
    CHECK_EQ(dtrain__staged_chunk(250000), 387264);
    CHECK_EQ(dtrain__staged_chunk(1000000), 774592);
    CHECK_EQ(dtrain__staged_chunk(10000000), 2449472);
    CHECK_EQ(dtrain__staged_chunk(29320310), 4194240); /* 2^44 / 600,000 = 29,320,310.07 */
    CHECK_EQ(dtrain__staged_chunk(29320311), 4194304);
    CHECK_EQ(dtrain__staged_chunk(SIZE_MAX / 2), 4194304);
    CHECK_EQ(dtrain__staged_chunk(SIZE_MAX), 4194304);
}

/* ---- which way is gone ---- */

static void mode_is(dg_rank *r)
{
    CHECK_EQ(dtrain_device_group_mode(r->group), r->world->number);
    char *x = dg_alloc(r, COUNT * 4);
    float one = 1, got[COUNT];
    CHECK_EQ(dtrain_device_fill(r->device, x, &one, 4, COUNT), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(r->device, got, x, sizeof got), DTRAIN_OK);
    CHECK_EQ(got[COUNT - 1], (float)r->size);
    dg_free(r, x);
}

static void not_hosts(dg_rank *r)
{
    CHECK_EQ(dg_create(r), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_DEVICE_HOSTS is not possible on rank ");
}

TEST(hosts_is_taken_where_hosts_have_equal_powers_of_two_of_neighbours_and_else_staged)
{
    static const char *const staged[] = {"ab", "abcd", "aab", "aaab", "abab", "aaabbb", "aabbb", "aabbaa", "aaaabb"};
    for (int i = 0; i < LAYOUTS; i++) {
        dg_world w = hosts_world(layouts[i], DTRAIN_DEVICE_MODE_AUTO, mode_is);
        w.number = DTRAIN_DEVICE_HOSTS;
        dg_on_threads(&w);
    }
    for (size_t i = 0; i < sizeof staged / sizeof *staged; i++) {
        dg_world w = hosts_world(staged[i], DTRAIN_DEVICE_MODE_AUTO, mode_is);
        w.number = DTRAIN_DEVICE_STAGED;
        dg_on_threads(&w);
        w = hosts_world(staged[i], DTRAIN_DEVICE_HOSTS, not_hosts);
        w.alone = 1;
        dg_on_threads(&w);
    }
    dg_world w = hosts_world("aaaa", DTRAIN_DEVICE_MODE_AUTO, mode_is);
    w.number = DTRAIN_DEVICE_EVENTS;
    dg_on_threads(&w);
    w = hosts_world("aaaa", DTRAIN_DEVICE_HOSTS, not_hosts);
    w.alone = 1;
    dg_on_threads(&w);
    w = hosts_world("aabb", DTRAIN_DEVICE_STAGED, mode_is);
    w.number = DTRAIN_DEVICE_STAGED;
    dg_on_threads(&w);
}

TEST(where_the_order_is_free_hosts_of_three_ranks_go_by_hosts_too)
{
    dg_world w = hosts_world("aaabbb", DTRAIN_DEVICE_MODE_AUTO, mode_is);
    w.comm.order = DTRAIN_ORDER_ANY;
    w.number = DTRAIN_DEVICE_HOSTS;
    dg_on_threads(&w);
}

/* ---- ranks that leave, devices that break, calls that differ ---- */

static void keep(dg_rank *r, dtrain_status status)
{
    r->world->status[r->rank] = status;
    snprintf(r->world->text[r->rank], sizeof r->world->text[r->rank], "%s", dtrain_last_error());
}

static dtrain_status until_it_breaks(dg_rank *r, char *x, char *y, size_t count, int calls)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < calls && status == DTRAIN_OK; i++) {
        dg_call c = {i % DG_KINDS, DTRAIN_F32, DTRAIN_SUM, count, i % r->size, NULL, NULL};
        status = dg_do(r->comm, r->group, &c, x, y);
        if (status == DTRAIN_OK && i % 3 == 2)
            DTRAIN_IGNORE(dtrain_device_wait(r->device)); /* what has broken stays so: the next call says it to all */
    }
    return status;
}

static void one_leaves(dg_rank *r)
{
    char *x = dg_alloc(r, COUNT * 4), *y = dg_alloc(r, COUNT * 4);
    if (r->rank == VICTIM)
        async_sleep(r->device, 20000);
    keep(r, until_it_breaks(r, x, y, COUNT, r->rank == VICTIM ? (int)r->world->number : 1000));
    dg_free(r, x);
    dg_free(r, y);
}

TEST(a_rank_that_leaves_is_lost_to_all_hosts)
{
    for (int calls = 0; calls < 5; calls++) {
        dg_world w = hosts_world("aabb", DTRAIN_DEVICE_HOSTS, one_leaves);
        w.number = calls;
        dg_on_threads(&w);
        for (int rank = 0; rank < w.ranks; rank++)
            CHECK_EQ(w.status[rank], rank == VICTIM ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST);
    }
}

enum { IN_A_CALL_OF_IT, WHEN_ITS_TURN_COMES };

static int ended; /* ranks whose call has failed, which they keep their groups until the others have heard of */

static void wait_for_all(const dg_rank *r)
{
    double begun = now_s();
    __atomic_add_fetch(&ended, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&ended, __ATOMIC_SEQ_CST) < r->size && now_s() < begun + 10)
        usleep(200);
    if (__atomic_load_n(&ended, __ATOMIC_SEQ_CST) < r->size)
        TEST_FAIL("rank %d has failed, and the others have not heard of it", r->rank);
}

static void one_breaks(dg_rank *r)
{
    char *x = dg_alloc(r, 70000 * 4), *y = dg_alloc(r, 70000 * 4);
    if (r->rank == VICTIM) {
        r->fake.fail_call = r->world->number % 2 == IN_A_CALL_OF_IT ? r->world->number / 2 : 0;
        r->fake.fail_done = r->world->number % 2 == WHEN_ITS_TURN_COMES ? r->world->number / 2 : 0;
    }
    dtrain_status status = dg_create(r);
    keep(r, status == DTRAIN_OK ? until_it_breaks(r, x, y, 70000, 60) : status);
    wait_for_all(r);
    dtrain_device_group_destroy(r->group);
    r->group = NULL;
    dg_free(r, x);
    dg_free(r, y);
}

/* Its host cannot be told from one whose devices reach no other's while that is tried. */
static int broke_in_the_trial(const dg_world *w)
{
    int unsupported = 0;
    for (int rank = 0; rank < w->ranks; rank++)
        unsupported += w->status[rank] == DTRAIN_ERR_UNSUPPORTED && strstr(w->text[rank], "fake:1") != NULL;
    return unsupported == w->ranks;
}

TEST(a_device_that_breaks_at_any_call_or_operation_ends_the_group_on_all_hosts)
{
    int trials = 0, calls = 0;
    for (int n = 2; n <= 2 * 70 + 1; n++) {
        dg_world w = hosts_world("aabb", DTRAIN_DEVICE_HOSTS, one_breaks);
        int before = test_failures;
        w.alone = 1;
        w.number = n;
        w.seed = (uint64_t)n;
        ended = 0;
        dg_on_threads(&w);
        CHECK_CONTAINS(w.text[VICTIM], "fake:1");
        trials += broke_in_the_trial(&w);
        if (broke_in_the_trial(&w))
            continue;
        CHECK_EQ(w.status[VICTIM], DTRAIN_ERR_IO);
        for (int rank = 0; rank < w.ranks; rank++) {
            CHECK(w.status[rank] == DTRAIN_ERR_IO || w.status[rank] == DTRAIN_ERR_PEER_LOST);
            calls += strstr(w.text[rank], "inside its host") != NULL || strstr(w.text[rank], "between hosts") != NULL;
        }
        if (test_failures != before)
            TEST_FAIL("failing %s %d: \"%s\", \"%s\"", n % 2 == IN_A_CALL_OF_IT ? "call" : "operation", n / 2,
                      w.text[0], w.text[2]);
    }
    CHECK(trials > 0 && trials < 60);
    CHECK(calls > 100);
}

static void calls_differ(dg_rank *r)
{
    static const dg_call calls[][2] = {{{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                        {DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 101, 0, NULL, NULL}},
                                       {{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                        {DG_ALL_REDUCE, DTRAIN_BF16, DTRAIN_SUM, 100, 0, NULL, NULL}},
                                       {{DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                        {DG_ALL_REDUCE, DTRAIN_F32, DTRAIN_MEAN, 100, 0, NULL, NULL}},
                                       {{DG_ALL_GATHER, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                        {DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL}},
                                       {{DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, 100, 0, NULL, NULL},
                                        {DG_BROADCAST, DTRAIN_F32, DTRAIN_SUM, 100, 3, NULL, NULL}}};
    char *x = dg_alloc(r, 404), *y = dg_alloc(r, 404);
    keep(r, dg_do(r->comm, r->group, &calls[r->world->number][r->rank >= 2], x, y));
    dg_free(r, x);
    dg_free(r, y);
}

TEST(calls_that_differ_between_hosts_are_a_mismatch_everywhere)
{
    for (int n = 0; n < 5; n++) {
        dg_world w = hosts_world("aabb", DTRAIN_DEVICE_HOSTS, calls_differ);
        w.number = n;
        w.comm.timeout_ms = 5000;
        dg_on_threads(&w);
        for (int rank = 0; rank < w.ranks; rank++)
            CHECK_EQ(w.status[rank], DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(w.text[0], "device_group_");
    }
}

/* A rank that comes too late leaves the group usable: nothing had been done. */
static void one_is_late(dg_rank *r)
{
    char *x = dg_alloc(r, COUNT * 4);
    float one = 1, got[COUNT];
    CHECK_EQ(dtrain_device_fill(r->device, x, &one, 4, COUNT), DTRAIN_OK);
    if (r->rank != VICTIM)
        CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_TIMEOUT);
    else
        usleep(900000);
    CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_device_copy(r->device, got, x, sizeof got), DTRAIN_OK);
    CHECK_EQ(got[0], 4);
    CHECK_EQ(got[COUNT - 1], 4);
    dg_free(r, x);
}

TEST(a_call_that_one_rank_is_late_for_can_be_made_again)
{
    dg_world w = hosts_world("aabb", DTRAIN_DEVICE_HOSTS, one_is_late);
    w.comm.timeout_ms = 600;
    dg_on_threads(&w);
}

/* ---- what it takes ---- */

static void warm(dg_rank *r)
{
    char *x = dg_alloc(r, 70001 * 4), *y = dg_alloc(r, 70001 * 4);
    long before = 0, events = 0, allocations = 0;
    for (int i = 0; i < 40; i++) {
        dg_call c = {i % DG_KINDS, DTRAIN_F32, DTRAIN_MEAN, i < 4 ? 70001 : (size_t)(1 + i * 997 % 70001),
                     i % r->size,  NULL,       NULL};
        if (i == 4) {
            CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
            before = __atomic_load_n(&resizes, __ATOMIC_SEQ_CST);
            events = r->fake.events;
            allocations = r->fake.allocations;
            CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
        }
        CHECK_EQ(dg_do(r->comm, r->group, &c, x, y), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    CHECK_EQ(__atomic_load_n(&resizes, __ATOMIC_SEQ_CST), before);
    CHECK_EQ(r->fake.events, events);
    CHECK_EQ(r->fake.allocations, allocations);
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    dg_free(r, x);
    dg_free(r, y);
}

TEST(nothing_is_made_after_the_start)
{
    dg_world w = hosts_world("aabb", DTRAIN_DEVICE_HOSTS, warm);
    dg_on_threads(&w);
}
