/* Fused calls and crossing messages: on threads, on processes over TCP, and over a transport that has
 * nothing but send and recv. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "worlds.h"
#include "wait_in_part.h"

/* ---- fuse ---- */

static const size_t small_counts[MANY] = {1024, 1, 0, 7, 513, 300000, 64, 64, 3};

/* Calls of every kind, fused or not; the results go to out[0 .. MANY + 4]. */
static void mixture(dtrain_comm *world, float **in, float **out, int fused)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), to = (rank + 1) % ranks;
    size_t low, n = dtrain_shard(world, small_counts[0], rank, &low);
    if (fused)
        CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    for (int k = 0; k < MANY; k++) {
        dtrain_op op = k == 4 ? DTRAIN_MEAN : DTRAIN_SUM;
        int in_place = k % 2;
        if (in_place)
            memcpy(out[k], in[k], small_counts[k] * sizeof(float));
        CHECK_EQ(dtrain_all_reduce(world, in_place ? out[k] : in[k], out[k], small_counts[k], DTRAIN_F32, op),
                 DTRAIN_OK);
        if (fused && k == 6)
            CHECK_EQ(dtrain_send(world, in[0], 1024, DTRAIN_F32, to), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_broadcast(world, out[MANY], 1000, DTRAIN_F32, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_broadcast(world, out[MANY + 1], 9, DTRAIN_F32, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_broadcast(world, out[MANY + 2], 9, DTRAIN_F32, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_reduce_scatter(world, in[0], out[MANY + 3], 1024, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_gather(world, in[0] + low, out[MANY + 4], 1024, DTRAIN_F32), DTRAIN_OK);
    if (!fused)
        return;
    CHECK_EQ(dtrain_recv(world, out[MANY + 5], 1024, DTRAIN_F32, (rank + ranks - 1) % ranks), DTRAIN_OK);
    CHECK_EQ(dtrain_exchange(world, in[0], 700, to, out[MANY + 6], 700, (rank + ranks - 1) % ranks, DTRAIN_F32),
             DTRAIN_OK);
    CHECK(n == 0 || out[MANY + 4][low] == 0); /* nothing has run yet */
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK(holds(out[MANY + 5], (rank + ranks - 1) % ranks, 1024));
    CHECK(holds(out[MANY + 6], (rank + ranks - 1) % ranks, 700));
}

static void a_mixture(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float *in[MANY], *alone[MANY + 7], *fused[MANY + 7];
    for (int k = 0; k < MANY; k++)
        in[k] = values(rank, small_counts[k]);
    for (int k = 0; k < MANY + 7; k++) {
        size_t count = k < MANY ? small_counts[k] : 1024;
        alone[k] = (float *)calloc(count + 1, sizeof(float));
        fused[k] = (float *)calloc(count + 1, sizeof(float));
        for (size_t i = 0; i < count && k >= MANY && k < MANY + 3; i++)
            alone[k][i] = fused[k][i] = value(rank, i);
    }
    mixture(world, in, alone, 0);
    uint64_t before = world->number;
    mixture(world, in, fused, 1);
    /* 4 sums, a mean, a large sum, 3 sums; 2 broadcasts from rank 1, one from rank 0; 3 others; messages apart */
    int ring = world->desc.algorithm == DTRAIN_ALGORITHM_RING;
    CHECK_EQ(world->number - before, (ring ? MANY : 4) + 2 + 3);
    for (int k = 0; k < MANY + 5; k++)
        CHECK_EQ(memcmp(alone[k], fused[k], (k < MANY ? small_counts[k] : 1024) * sizeof(float)), 0);
    for (int k = 0; k < MANY + 7; k++) {
        free(alone[k]);
        free(fused[k]);
        if (k < MANY)
            free(in[k]);
    }
}

TEST(fused_calls_give_the_bits_of_the_calls_alone_in_fewer_operations)
{
    everywhere(3, a_mixture);
    everywhere(2, a_mixture);
}

TEST(fused_calls_give_the_bits_of_the_ring_where_that_was_asked_for)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.algorithm = DTRAIN_ALGORITHM_RING;
    on_threads(3, a_mixture, &desc);
    on_processes(3, a_mixture, &desc);
}

/* Every rank sends to and receives from every other, each in an order of its own, around an all_reduce. */
static void all_to_all(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    static const size_t sizes[] = {5, 400000};
    float one = 1;
    for (int turn = 0; turn < 2; turn++) {
        size_t count = sizes[turn];
        float *mine = values(rank, count), *got = (float *)calloc(count * (size_t)ranks, sizeof(float)), sum = 0;
        CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
        for (int k = 0; k < 2 * ranks; k++) {
            int peer = rank % 2 ? k / 2 : ranks - 1 - k / 2;
            if (k == rank)
                CHECK_EQ(dtrain_all_reduce(world, &one, &sum, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
            if (peer == rank)
                continue;
            if ((k + rank) % 2)
                CHECK_EQ(dtrain_send(world, mine, count, DTRAIN_F32, peer), DTRAIN_OK);
            else
                CHECK_EQ(dtrain_recv(world, got + (size_t)peer * count, count, DTRAIN_F32, peer), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
        CHECK(sum == (float)ranks);
        for (int peer = 0; peer < ranks; peer++)
            CHECK(peer == rank || holds(got + (size_t)peer * count, peer, count));
        free(mine);
        free(got);
    }
}

TEST(everyone_sends_to_everyone_in_one_fuse)
{
    everywhere(2, all_to_all);
    everywhere(5, all_to_all);
}

static void other_fuse(dtrain_comm *world)
{
    float x[4] = {1, 2, 3, 4};
    int rank = dtrain_comm_rank(world);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x, x, rank == 0 ? 1 : 2, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x + 2, x + 2, rank == 0 ? 2 : 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce #1 (sum, f32 x 1, 2 fused)");
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce #1 (sum, f32 x 2, 2 fused)");
    CHECK_CONTAINS(world->error.text, "2 fused");
}

TEST(ranks_that_fuse_differently_are_told_even_where_the_sizes_add_up)
{
    on_threads(2, other_fuse, NULL);
    on_processes(2, other_fuse, NULL);
}

static void fuse_misused(dtrain_comm *world)
{
    float x[4] = {1, 1, 1, 1};
    dtrain_mesh_dim dim = {"data", 0};
    dtrain_mesh *mesh = (dtrain_mesh *)x;
    dtrain_comm *group = world;
    dtrain_work *work = (dtrain_work *)x;
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "there was no fuse_begin");
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "call fuse_end first");
    CHECK_EQ(dtrain_all_reduce_async(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce_async on rank");
    CHECK(work == NULL);
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, (dtrain_dtype)DTRAIN_SUM, (dtrain_op)DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_check_equal(world, x, 1, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "comm_split on rank");
    CHECK_CONTAINS(dtrain_last_error(), "it needs results at once and cannot be fused; call fuse_end first");
    CHECK(group == NULL);
    CHECK_EQ(dtrain_mesh_create(&mesh, world, &dim, 1), DTRAIN_ERR_INVALID);
    CHECK(mesh == NULL);
    CHECK_EQ(dtrain_all_reduce(world, x + 1, x + 1, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK(x[0] == 2 && x[1] == 2 && x[2] == 1);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
}

TEST(a_fuse_says_what_it_does_not_take_and_may_be_left_open)
{
    everywhere(2, fuse_misused);
    CHECK_EQ(dtrain_fuse_begin(NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fuse_end(NULL), DTRAIN_ERR_INVALID);
}

static dtrain_status left_with_handles(dtrain_comm *world, void *user)
{
    static float x[2][3];
    dtrain_work *work[3];
    (void)user;
    for (int i = 0; i < 3; i++) {
        float *at = &x[dtrain_comm_rank(world)][i];
        CHECK_EQ(dtrain_all_reduce_async(world, at, at, 1, DTRAIN_F32, DTRAIN_SUM, &work[i]), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_OK);
    CHECK(dtrain_work_done(work[0]));
    return DTRAIN_OK;
}

TEST(handles_that_nobody_waited_for_go_with_the_group)
{
    dtrain_allocator allocator = {NULL, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    CHECK_EQ(dtrain_run_threads(2, left_with_handles, NULL, &desc), DTRAIN_OK);
    CHECK_EQ(allocator.bytes, 0);
}

static void warm_fuses(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), peer = 1 - rank;
    float *x = values(rank, 6000);
    size_t warm = 0, peak = 0;
    for (int step = 0; step < 30; step++) {
        CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
        for (size_t k = 0; k < 20; k++) {
            CHECK_EQ(dtrain_all_reduce(world, x + 100 * k, x + 100 * k, 100, DTRAIN_F32, DTRAIN_MEAN), DTRAIN_OK);
            CHECK_EQ(dtrain_send(world, x + 2000, 100, DTRAIN_F32, peer), DTRAIN_OK);
            CHECK_EQ(dtrain_recv(world, x + 3000 + 100 * k, 100, DTRAIN_F32, peer), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (step == 2) {
            warm = dtrain_comm_allocator(world)->bytes;
            peak = dtrain_comm_allocator(world)->peak_bytes;
        }
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_comm_allocator(world)->bytes, warm);
    CHECK_EQ(dtrain_comm_allocator(world)->peak_bytes, peak);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    free(x);
}

TEST(a_warm_fuse_allocates_nothing)
{
    on_threads(2, warm_fuses, NULL);
    on_processes(2, warm_fuses, NULL); /* over cables, messages that come early are kept in memory */
}

/* ---- messages that cross ---- */

static void crossing(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t count = 1000000;
    float *mine = values(rank, count), *got = (float *)calloc(count * (size_t)ranks, sizeof(float)), sum = 1;
    dtrain_work *work[16];
    int started = 0;
    for (int k = 1; k < ranks; k++)
        CHECK_EQ(dtrain_send_async(world, mine, count, DTRAIN_F32, (rank + k) % ranks, &work[started++]), DTRAIN_OK);
    for (int peer = 0; peer < ranks; peer++)
        if (peer != rank) {
            float *to = got + (size_t)peer * count;
            CHECK_EQ(dtrain_recv_async(world, to, count, DTRAIN_F32, peer, &work[started++]), DTRAIN_OK);
        }
    CHECK_EQ(dtrain_all_reduce_async(world, &sum, &sum, 1, DTRAIN_F32, DTRAIN_SUM, &work[started++]), DTRAIN_OK);
    while (polling && !dtrain_work_done(work[started - 1])) {
        CHECK_EQ(dtrain_comm_poll(world, 500), DTRAIN_OK);
        for (int k = 0; k < started && dtrain_work_done(work[started - 1]); k++) /* a sum comes after all messages */
            CHECK(dtrain_work_done(work[k]));
        sched_yield();
    }
    for (int k = started - 1; k >= 0; k--)
        CHECK_EQ(dtrain_work_wait(work[k]), DTRAIN_OK);
    CHECK(sum == (float)ranks);
    for (int peer = 0; peer < ranks; peer++)
        CHECK(peer == rank || holds(got + (size_t)peer * count, peer, count));
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    free(mine);
    free(got);
}

TEST(large_messages_cross_whatever_was_queued_first)
{
    everywhere(2, crossing);
    everywhere(4, crossing);
}

/* Rank 1 answers when it has two messages; rank 0 awaits the answer before it sends them. */
static void asks(dtrain_comm *world)
{
    float in[3] = {0}, out[2] = {1, 2};
    dtrain_work *answer, *work;
    if (dtrain_comm_rank(world) == 1) {
        CHECK_EQ(dtrain_recv(world, &in[0], 1, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(world, &in[1], 1, DTRAIN_F32, 0), DTRAIN_OK);
        in[2] = in[0] + in[1];
        CHECK_EQ(dtrain_send(world, &in[2], 1, DTRAIN_F32, 0), DTRAIN_OK);
        return;
    }
    CHECK_EQ(dtrain_recv_async(world, &in[2], 1, DTRAIN_F32, 1, &answer), DTRAIN_OK);
    CHECK_EQ(dtrain_send_async(world, &out[0], 1, DTRAIN_F32, 1, &work), DTRAIN_OK);
    for (double until = now_s() + 20; !dtrain_work_done(work) && now_s() < until; sched_yield())
        if (polling)
            CHECK_EQ(dtrain_comm_poll(world, 100), DTRAIN_OK);
    CHECK(dtrain_work_done(work));
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK(!dtrain_work_done(answer));
    CHECK_EQ(wait_in_part(answer, 1), 0);
    CHECK_EQ(dtrain_send(world, &out[1], 1, DTRAIN_F32, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(answer), DTRAIN_OK);
    CHECK(in[2] == 3);
}

TEST(a_message_is_done_when_it_has_gone_whatever_was_called_before)
{
    everywhere(2, asks);
}

static void one_after_another(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), peer = 1 - rank;
    float in[200], out[200];
    dtrain_work *work[400];
    for (int k = 0; k < 200; k++) {
        in[k] = value(rank, (size_t)k);
        CHECK_EQ(dtrain_send_async(world, &in[k], 1, DTRAIN_F32, peer, &work[2 * k]), DTRAIN_OK);
        CHECK_EQ(dtrain_recv_async(world, &out[k], 1, DTRAIN_F32, peer, &work[2 * k + 1]), DTRAIN_OK);
    }
    for (int k = 0; k < 400; k++)
        if (dtrain_work_wait(work[k]) != DTRAIN_OK)
            TEST_FAIL("%s", dtrain_last_error());
    CHECK(holds(out, peer, 200));
}

TEST(messages_between_two_ranks_keep_their_order)
{
    everywhere(2, one_after_another);
}

/* Rank 1 sends, and rank `to` receives after a collective that both call in between. */
static void across(dtrain_comm *world, size_t count, int to)
{
    int rank = dtrain_comm_rank(world);
    float *x = values(rank, count), y[4] = {0};
    dtrain_work *work = NULL;
    dtrain_status met = DTRAIN_OK, came = DTRAIN_OK;
    if (rank == 1)
        CHECK_EQ(dtrain_send_async(world, x, count, DTRAIN_F32, to, &work), DTRAIN_OK);
    met = dtrain_broadcast(world, y, 4, DTRAIN_F32, 0);
    CHECK(met == DTRAIN_OK || met == DTRAIN_ERR_MISMATCH);
    if (rank == to) {
        came = dtrain_recv(world, x, count, DTRAIN_F32, 1);
        CHECK_EQ(came, DTRAIN_ERR_MISMATCH);
        CHECK(strstr(dtrain_last_error(), "receive a message before the next collective") != NULL);
    }
    if (rank == 1) {
        came = dtrain_work_wait(work);
        CHECK(came == DTRAIN_OK || came == DTRAIN_ERR_MISMATCH);
    }
    free(x);
}

static void small_across(dtrain_comm *world)
{
    across(world, 1, 0);
}

static void large_across(dtrain_comm *world)
{
    across(world, 100000, 0);
}

/* A broadcast moves nothing between ranks 1 and 2. */
static void across_apart(dtrain_comm *world)
{
    across(world, 1, 2);
}

TEST(a_message_that_a_collective_parts_is_a_mismatch_on_every_transport)
{
    everywhere(2, small_across);
    everywhere(2, large_across);
    everywhere(3, across_apart);
}

/* ---- many messages ---- */

enum { OUTSTANDING = 30000, LOOKS = 200 };

static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* What a poll of this thread costs: the least of many, as others share the processor. */
static int64_t poll_ns(dtrain_comm *world)
{
    int64_t least = INT64_MAX;
    for (int i = 0; i < LOOKS; i++) {
        int64_t from = cpu_ns();
        CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK);
        int64_t ns = cpu_ns() - from;
        least = ns < least ? ns : least;
    }
    return least;
}

/* 30,000 messages would cost 1,000 times as much as 30, if a poll looked at all of them. */
TEST(a_poll_costs_the_same_with_thirty_thousand_messages_outstanding)
{
    static dtrain_work *work[OUTSTANDING], *sent[OUTSTANDING];
    static int out[OUTSTANDING], in[OUTSTANDING];
    dtrain_comm *ranks[3];
    dtrain_comm_desc desc;
    int64_t few = 0;
    memset(&desc, 0, sizeof desc);
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_threads_create(ranks, 3, &desc), DTRAIN_OK);
    for (int i = 0; i < OUTSTANDING; i++) {
        in[i] = -1;
        CHECK_EQ(dtrain_recv_async(ranks[0], &in[i], 1, DTRAIN_I32, 1 + i % 2, &work[i]), DTRAIN_OK);
        if (i == 29)
            few = poll_ns(ranks[0]);
    }
    int64_t many = poll_ns(ranks[0]);
    if (many > 20 * few)
        TEST_FAIL("a poll takes %lld ns with 30 messages outstanding and %lld ns with %d", (long long)few,
                  (long long)many, OUTSTANDING);
    for (int i = 0; i < OUTSTANDING; i++) {
        out[i] = i;
        CHECK_EQ(dtrain_send_async(ranks[1 + i % 2], &out[i], 1, DTRAIN_I32, 0, &sent[i]), DTRAIN_OK);
    }
    for (int i = 0; i < OUTSTANDING; i++)
        while (!dtrain_work_done(work[i]) || !dtrain_work_done(sent[i]))
            for (int rank = 0; rank < 3; rank++)
                CHECK_EQ(dtrain_comm_poll(ranks[rank], 100), DTRAIN_OK);
    for (int i = 0; i < OUTSTANDING; i++) {
        CHECK_EQ(dtrain_work_wait(work[i]), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(sent[i]), DTRAIN_OK);
        CHECK_EQ(in[i], i);
    }
    for (int rank = 0; rank < 3; rank++)
        dtrain_comm_destroy(ranks[rank]);
}
