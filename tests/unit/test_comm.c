/* Groups and collectives on threads: results against a sequential reference, failures provoked for real. */
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

const size_t hook_block_bytes = 20 << 10; /* several pieces at small counts */
const size_t hook_block_alone = 40 << 10;
const size_t hook_message_chunk = 8 << 10; /* and several chunks in each */

typedef struct scenario {
    size_t count;
    dtrain_comm_desc desc;
} scenario;

static float value(int rank, size_t i)
{
    return (float)((int)((size_t)rank * 7919 + i * 31) % 1000) * 0.37f - 100.0f;
}

/* The tree of the manual, written recursively: the left part is the largest power of two below n. */
static float tree(int first, int n, size_t i)
{
    int left = 1;
    if (n == 1)
        return value(first, i);
    while (2 * left < n)
        left *= 2;
    return tree(first, left, i) + tree(first + left, n - left, i);
}

static int same(const float *a, const float *b, size_t count)
{
    return count == 0 || memcmp(a, b, count * sizeof(float)) == 0;
}

static int close_to(const float *a, const float *b, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (a[i] - b[i] > 0.01f || b[i] - a[i] > 0.01f)
            return 0;
    return 1;
}

static float *floats(size_t count)
{
    return (float *)calloc(count + 1, sizeof(float));
}

static dtrain_status reductions(dtrain_comm *world, void *user)
{
    scenario *s = (scenario *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    int (*equal)(const float *, const float *, size_t) = s->desc.algorithm == DTRAIN_ALGORITHM_RING ? close_to : same;
    size_t count = s->count, low, n = dtrain_shard(world, count, rank, &low);
    float *mine = floats(count), *out = floats(count), *sum = floats(count), *mean = floats(count);
    for (size_t i = 0; i < count; i++) {
        mine[i] = value(rank, i);
        sum[i] = tree(0, ranks, i);
        mean[i] = sum[i] / (float)ranks;
    }
    CHECK_EQ(dtrain_all_reduce(world, mine, out, count, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(equal(out, sum, count));
    memcpy(out, mine, count * sizeof(float));
    CHECK_EQ(dtrain_all_reduce(world, out, out, count, DTRAIN_F32, DTRAIN_MEAN), DTRAIN_OK);
    CHECK(equal(out, mean, count));
    CHECK_EQ(dtrain_reduce_scatter(world, mine, out, count, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(equal(out, sum + low, n));
    memcpy(out, mine, count * sizeof(float));
    CHECK_EQ(dtrain_reduce_scatter(world, out, out + low, count, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(equal(out + low, sum + low, n));
    CHECK_EQ(dtrain_all_gather(world, out + low, out, count, DTRAIN_F32), DTRAIN_OK);
    CHECK(equal(out, sum, count));
    memset(out, 0, count * sizeof(float));
    CHECK_EQ(dtrain_all_gather(world, sum + low, out, count, DTRAIN_F32), DTRAIN_OK);
    CHECK(same(out, sum, count));
    free(mine);
    free(out);
    free(sum);
    free(mean);
    return DTRAIN_OK;
}

static dtrain_status copies_and_work(dtrain_comm *world, void *user)
{
    scenario *s = (scenario *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t count = s->count;
    float *buffer = floats(count), *sum = floats(count), *several[4];
    dtrain_work *work[4];
    for (size_t i = 0; i < count; i++)
        sum[i] = tree(0, ranks, i);
    for (int root = 0; root < ranks; root++) {
        for (size_t i = 0; i < count; i++)
            buffer[i] = value(rank, i);
        CHECK_EQ(dtrain_broadcast(world, buffer, count, DTRAIN_F32, root), DTRAIN_OK);
        for (size_t i = 0; i < count; i++)
            CHECK(buffer[i] == value(root, i));
    }
    for (int k = 0; k < 4; k++) {
        several[k] = floats(count);
        for (size_t i = 0; i < count; i++)
            several[k][i] = value(rank, i);
        CHECK_EQ(dtrain_all_reduce_async(world, several[k], several[k], count, DTRAIN_F32, DTRAIN_SUM, &work[k]),
                 DTRAIN_OK);
    }
    if (s->desc.progress == DTRAIN_PROGRESS_POLL)
        while (!dtrain_work_done(work[3])) {
            CHECK_EQ(dtrain_comm_poll(world, 100), DTRAIN_OK);
            sched_yield();
        }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    for (int k = 0; k < 4; k++) {
        CHECK(dtrain_work_done(work[k]));
        CHECK_EQ(dtrain_work_wait(work[k]), DTRAIN_OK);
        CHECK(s->desc.algorithm == DTRAIN_ALGORITHM_RING || same(several[k], sum, count));
        free(several[k]);
    }
    CHECK_EQ(dtrain_comm_check_equal(world, sum, count, DTRAIN_F32), DTRAIN_OK);
    free(buffer);
    free(sum);
    return DTRAIN_OK;
}

static dtrain_status around_the_ring(dtrain_comm *world, void *user)
{
    scenario *s = (scenario *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    float *mine = floats(s->count), *got = floats(s->count);
    for (size_t i = 0; i < s->count; i++)
        mine[i] = value(rank, i);
    if (ranks > 1 && rank % 2 == 0) {
        dtrain_work *work;
        CHECK_EQ(dtrain_send_async(world, mine, s->count, DTRAIN_F32, to, &work), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(world, got, s->count, DTRAIN_F32, from), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    } else if (ranks > 1) {
        CHECK_EQ(dtrain_recv(world, got, s->count, DTRAIN_F32, from), DTRAIN_OK);
        CHECK_EQ(dtrain_send(world, mine, s->count, DTRAIN_F32, to), DTRAIN_OK);
    }
    for (size_t i = 0; ranks > 1 && i < s->count; i++)
        CHECK(got[i] == value(from, i));
    free(mine);
    free(got);
    return DTRAIN_OK;
}

static const size_t counts[] = {0, 1, 2, 3, 5, 17, 64, 1000, 1023, 1025, 4097, 70001};

static void at_every_size(dtrain_status (*body)(dtrain_comm *, void *), dtrain_algorithm algorithm,
                          dtrain_progress progress)
{
    for (int ranks = 1; ranks <= 16; ranks++)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            scenario s;
            memset(&s, 0, sizeof s);
            s.count = counts[c];
            s.desc.algorithm = algorithm;
            s.desc.progress = progress;
            s.desc.timeout_ms = test_ms(60000);
            if (ranks > 5 && s.count > 5000)
                continue;
            if (dtrain_run_threads(ranks, body, &s, &s.desc) != DTRAIN_OK)
                TEST_FAIL("%d ranks, %zu elements: %s", ranks, s.count, dtrain_last_error());
        }
}

TEST(fused_reductions_follow_the_tree_at_1_to_16_ranks)
{
    at_every_size(reductions, DTRAIN_ALGORITHM_AUTO, DTRAIN_PROGRESS_THREAD);
}

TEST(recursive_doubling_gives_the_same_bits)
{
    at_every_size(reductions, DTRAIN_ALGORITHM_RECURSIVE_DOUBLING, DTRAIN_PROGRESS_THREAD);
}

TEST(the_message_tree_gives_the_same_bits)
{
    at_every_size(reductions, DTRAIN_ALGORITHM_TREE, DTRAIN_PROGRESS_THREAD);
}

TEST(halving_and_doubling_over_binary_blocks_gives_the_same_bits)
{
    at_every_size(reductions, DTRAIN_ALGORITHM_HALVING_DOUBLING, DTRAIN_PROGRESS_THREAD);
}

/* An exchange over the threads transport that now completes one direction first, now the other, now in odd pieces. */
static dtrain_status lopsided_exchange(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns)
{
    static __thread uint64_t turn;
    for (turn++;; turn++) { /* every call begins with another throw */
        uint64_t dice = dtrain_random_u64(99, turn);
        size_t most = dice % 3 == 0 ? 1 + dice / 8 % 5000 : SIZE_MAX, moved = 0;
        dtrain_transfer *one = dice / 4 % 2 ? out : in;
        dtrain_status status = DTRAIN_ERR_TIMEOUT;
        if (one != NULL) {
            size_t bytes = one->bytes - one->moved < most ? one->bytes - one->moved : most;
            status = one == out ? dtrain__threads_send(self, one->peer, one->data + one->moved, bytes, 0, &moved)
                                : dtrain__threads_recv(self, one->peer, one->data + one->moved, bytes, 0, &moved);
            one->moved += moved;
            if (one->moved == one->bytes)
                return DTRAIN_OK;
        }
        if (status != DTRAIN_OK && status != DTRAIN_ERR_TIMEOUT)
            return status;
        if (dtrain__os_now_ns() >= deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (moved == 0)
            sched_yield();
    }
}

typedef struct lopsided {
    dtrain__threads_group *board;
    int rank;
    scenario s;
} lopsided;

static void *lopsided_rank(void *pointer)
{
    lopsided *l = (lopsided *)pointer;
    dtrain__end end;
    dtrain_comm *world;
    dtrain__threads_end(&end, l->board, l->rank);
    dtrain_transport transport = end.transport;
    transport.fail = NULL;
    transport.exchange = lopsided_exchange;
    CHECK_EQ(dtrain_comm_from_transport(&world, &transport, &l->s.desc), DTRAIN_OK);
    for (int round = 0; round < 3; round++)
        CHECK_EQ(reductions(world, &l->s), DTRAIN_OK);
    dtrain_comm_destroy(world);
    return NULL;
}

TEST(whichever_direction_completes_first_the_bits_are_the_same)
{
    static const dtrain_algorithm algorithms[] = {DTRAIN_ALGORITHM_HALVING_DOUBLING,
                                                  DTRAIN_ALGORITHM_RECURSIVE_DOUBLING, DTRAIN_ALGORITHM_TREE,
                                                  DTRAIN_ALGORITHM_RING};
    for (int ranks = 2; ranks <= 5; ranks++)
        for (int a = 0; a < 4; a++)
            for (size_t count = 1025; count < 200000; count = count * 5 + 1) {
                lopsided ends[5];
                pthread_t threads[5];
                dtrain__threads_group *board;
                CHECK_EQ(dtrain__threads_create(&board, ranks, NULL), DTRAIN_OK);
                memset(ends, 0, sizeof ends);
                for (int rank = 0; rank < ranks; rank++) {
                    ends[rank].board = board;
                    ends[rank].rank = rank;
                    ends[rank].s.count = count;
                    ends[rank].s.desc.algorithm = algorithms[a];
                    pthread_create(&threads[rank], NULL, lopsided_rank, &ends[rank]);
                }
                for (int rank = 0; rank < ranks; rank++)
                    pthread_join(threads[rank], NULL);
            }
}

TEST(the_ring_sums_within_rounding)
{
    at_every_size(reductions, DTRAIN_ALGORITHM_RING, DTRAIN_PROGRESS_THREAD);
}

TEST(async_work_finishes_under_a_service_thread)
{
    at_every_size(copies_and_work, DTRAIN_ALGORITHM_AUTO, DTRAIN_PROGRESS_THREAD);
}

TEST(async_work_finishes_by_polling_alone)
{
    at_every_size(copies_and_work, DTRAIN_ALGORITHM_AUTO, DTRAIN_PROGRESS_POLL);
    at_every_size(copies_and_work, DTRAIN_ALGORITHM_TREE, DTRAIN_PROGRESS_POLL);
}

TEST(messages_go_around_the_ranks)
{
    at_every_size(around_the_ring, DTRAIN_ALGORITHM_AUTO, DTRAIN_PROGRESS_THREAD);
}

static dtrain_status of_every_dtype(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    int8_t i8 = (int8_t)(100 + rank);
    uint8_t u8 = (uint8_t)(200 + rank);
    int64_t i64 = (int64_t)1 << (40 + rank);
    uint32_t u32 = 4000000000u;
    double f64 = rank + 0.5;
    uint16_t bf16 = 0x3f80, f16 = 0x3c00; /* 1.0 */
    (void)user;
    CHECK_EQ(dtrain_all_reduce(world, &i8, &i8, 1, DTRAIN_I8, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(i8, (int8_t)(uint8_t)(100 + 101 + 102)); /* wraps around */
    CHECK_EQ(dtrain_all_reduce(world, &u8, &u8, 1, DTRAIN_U8, DTRAIN_MAX), DTRAIN_OK);
    CHECK_EQ(u8, 202);
    CHECK_EQ(dtrain_all_reduce(world, &i64, &i64, 1, DTRAIN_I64, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(i64, (int64_t)7 << 40);
    CHECK_EQ(dtrain_all_reduce(world, &u32, &u32, 1, DTRAIN_U32, DTRAIN_MIN), DTRAIN_OK);
    CHECK_EQ(u32, 4000000000u);
    CHECK_EQ(dtrain_all_reduce(world, &f64, &f64, 1, DTRAIN_F64, DTRAIN_PROD), DTRAIN_OK);
    CHECK(f64 == 0.5 * 1.5 * 2.5);
    CHECK_EQ(dtrain_all_reduce(world, &bf16, &bf16, 1, DTRAIN_BF16, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(bf16, 0x4040); /* 3.0 */
    CHECK_EQ(dtrain_all_reduce(world, &f16, &f16, 1, DTRAIN_F16, DTRAIN_MEAN), DTRAIN_OK);
    CHECK_EQ(f16, 0x3c00);
    return DTRAIN_OK;
}

TEST(every_dtype_reduces)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    CHECK_EQ(dtrain_run_threads(3, of_every_dtype, NULL, NULL), DTRAIN_OK);
    desc.algorithm = DTRAIN_ALGORITHM_TREE;
    CHECK_EQ(dtrain_run_threads(3, of_every_dtype, NULL, &desc), DTRAIN_OK);
}

/* Of x = 2, 4, 9, 1e8, -1e8 on ranks 0 to 4. */
static dtrain_status scanned_by_hand(dtrain_comm *world, void *user)
{
    static const float x[5] = {2, 4, 9, 1e8f, -1e8f}, means[5] = {2, 3, 5, 25000004, 3.2f};
    static const float sums[5] = {2, 6, 15, 100000016, 16}; /* (2 + 4) + (9 + 1e8) rounds to 1e8 + 16 */
    int rank = dtrain_comm_rank(world);
    float out = -7, mean = x[rank];
    int8_t least = (int8_t)(5 - rank * rank);
    DTRAIN_CHECK(dtrain_scan(world, &x[rank], &out, 1, DTRAIN_F32, DTRAIN_SUM));
    CHECK(out == sums[rank]);
    DTRAIN_CHECK(dtrain_exscan(world, &x[rank], rank > 0 ? &out : NULL, 1, DTRAIN_F32, DTRAIN_SUM));
    CHECK(out == (rank > 0 ? sums[rank - 1] : sums[0])); /* as it was on rank 0 */
    DTRAIN_CHECK(dtrain_scan(world, &mean, &mean, 1, DTRAIN_F32, DTRAIN_MEAN));
    CHECK(mean == means[rank]);
    DTRAIN_CHECK(dtrain_exscan(world, &least, &least, 1, DTRAIN_I8, DTRAIN_MIN));
    CHECK_EQ(least, rank > 0 ? 5 - (rank - 1) * (rank - 1) : 5);
    if (user == NULL) /* by messages a rank may still be in its last call when others have met */
        return DTRAIN_OK;
    dtrain_status status = rank == 2 ? dtrain_exscan(world, &mean, &out, 1, DTRAIN_F32, DTRAIN_SUM)
                                     : dtrain_scan(world, &mean, &out, 1, DTRAIN_F32, DTRAIN_SUM);
    CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "exscan #5 (sum, f32 x 1)");
    return DTRAIN_OK;
}

TEST(scans_are_what_a_hand_computes)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    CHECK_EQ(dtrain_run_threads(5, scanned_by_hand, &desc, &desc), DTRAIN_OK);
    desc.algorithm = DTRAIN_ALGORITHM_TREE;
    CHECK_EQ(dtrain_run_threads(5, scanned_by_hand, NULL, &desc), DTRAIN_OK);
}

static dtrain_status rank_1_fails(dtrain_comm *world, void *user)
{
    float x = 1;
    (void)user;
    if (dtrain_comm_rank(world) == 1)
        return dtrain_tensor_view(NULL, DTRAIN_F32, 0, NULL, NULL);
    dtrain_status status = dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM);
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(world->error.text, "rank 1 has left the group");
    CHECK_CONTAINS(world->error.text, "all_reduce #1 (sum, f32 x 1)");
    CHECK_CONTAINS(world->error.text, "tensor is NULL, expected a dtrain_tensor");
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_PEER_LOST);
    return status;
}

TEST(a_rank_that_returns_early_is_named_with_its_reason)
{
    CHECK_EQ(dtrain_run_threads(4, rank_1_fails, NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1: tensor: tensor is NULL, expected");
}

static dtrain_status different_calls(dtrain_comm *world, void *user)
{
    float x[4] = {1, 2, 3, 4};
    int rank = dtrain_comm_rank(world);
    dtrain_status status;
    (void)user;
    status = rank == 2 ? dtrain_broadcast(world, x, 4, DTRAIN_F32, 0)
                       : dtrain_all_reduce(world, x, x, 4, DTRAIN_F32, DTRAIN_SUM);
    CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce #1 (sum, f32 x 4)");
    CHECK_CONTAINS(dtrain_last_error(), "broadcast #1 (f32 x 4, root 0)");
    CHECK_CONTAINS(dtrain_last_error(), rank == 2 ? "rank 0 called all_reduce" : "rank 2 called broadcast");
    CHECK(x[0] == 1 && x[3] == 4);
    CHECK_EQ(dtrain_all_reduce(world, x, x, (size_t)(rank == 1 ? 0 : 4), DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_MISMATCH);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return DTRAIN_OK;
}

TEST(different_calls_are_quoted_on_every_rank_and_touch_nothing)
{
    CHECK_EQ(dtrain_run_threads(3, different_calls, NULL, NULL), DTRAIN_OK);
}

static dtrain_status different_messages(dtrain_comm *world, void *user)
{
    float x[4] = {1, 2, 3, 4};
    dtrain_status status;
    (void)user;
    if (dtrain_comm_rank(world) == 0)
        return dtrain_send(world, x, 3, DTRAIN_F32, 1);
    status = dtrain_recv(world, x, 4, DTRAIN_F32, 0);
    CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "recv #1 (f32 x 4)");
    CHECK_CONTAINS(dtrain_last_error(), "rank 0 called send #1 (f32 x 3)");
    CHECK(x[0] == 1 && x[3] == 4);
    return DTRAIN_OK;
}

TEST(a_message_of_another_size_is_refused_before_its_bytes_are_taken)
{
    CHECK_EQ(dtrain_run_threads(2, different_messages, NULL, NULL), DTRAIN_OK);
}

/* Rank 1 comes late: rank 0's call expires, its buffer is freed at once, and the call is made again. */
static dtrain_status late(dtrain_comm *world, void *user)
{
    size_t count = 100000;
    float *x = floats(count);
    int rank = dtrain_comm_rank(world);
    dtrain_status status;
    (void)user;
    x[7] = (float)(rank + 1);
    if (rank == 1)
        usleep(300000);
    while ((status = dtrain_all_reduce(world, x, x, count, DTRAIN_F32, DTRAIN_SUM)) == DTRAIN_ERR_TIMEOUT) {
        CHECK_EQ(rank, 0);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0 waited");
        CHECK_CONTAINS(dtrain_last_error(),
                       "for rank 1; rank 1 has called nothing yet; nothing had moved, so the call");
        free(x);
        x = floats(count);
        x[7] = 1;
    }
    CHECK_EQ(status, DTRAIN_OK);
    CHECK(x[7] == 3);
    free(x);
    return DTRAIN_OK;
}

TEST(a_call_that_expires_can_be_made_again)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 50;
    CHECK_EQ(dtrain_run_threads(2, late, NULL, &desc), DTRAIN_OK);
}

TEST(a_rank_that_posts_and_never_polls_again_breaks_the_group_at_the_deadline)
{
    dtrain_comm *comms[2];
    dtrain_comm_desc desc;
    size_t count = 1 << 20;
    float *mine = floats(count), *theirs = floats(count);
    dtrain_work *work[2];
    memset(&desc, 0, sizeof desc);
    desc.progress = DTRAIN_PROGRESS_POLL;
    desc.timeout_ms = 100;
    CHECK_EQ(dtrain_threads_create(comms, 2, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce_async(comms[1], theirs, theirs, count, DTRAIN_F32, DTRAIN_SUM, &work[1]), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_poll(comms[1], 0), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(comms[0], mine, mine, count, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(comms[0]->error.text, "for rank 1; rank 1 is in all_reduce #1 (sum, f32 x 1048576) since 0.");
    CHECK_CONTAINS(comms[0]->error.text, "; data had moved, so the group is broken");
    free(mine);
    CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(comms[1]->error.text, "rank 0 waited");
    free(theirs);
    dtrain_comm_destroy(comms[0]);
    dtrain_comm_destroy(comms[1]);
}

TEST(no_rank_commits_while_another_takes_its_post_back)
{
    dtrain_comm_desc desc;
    dtrain_comm *comms[3];
    dtrain_work *work[3];
    float x[3] = {1, 2, 3};
    memset(&desc, 0, sizeof desc);
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_threads_create(comms, 3, &desc), DTRAIN_OK);
    uint64_t *withdrawn = &comms[0]->shared->slots[0].withdrawn;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(dtrain_all_reduce_async(comms[i], &x[i], &x[i], 1, DTRAIN_F32, DTRAIN_SUM, &work[i]), DTRAIN_OK);
        *withdrawn += i == 2; /* somebody is at it */
        CHECK_EQ(dtrain_comm_poll(comms[i], 0), DTRAIN_OK);
        CHECK(!dtrain_work_done(work[i]));
    }
    *withdrawn += 1;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(dtrain_work_wait(work[i]), DTRAIN_OK);
        CHECK(x[i] == 6);
    }
    for (int i = 0; i < 3; i++)
        dtrain_comm_destroy(comms[i]);
}

TEST(leaving_with_work_pending_tells_the_others)
{
    dtrain_comm *comms[2];
    float x[2] = {1, 2};
    dtrain_work *work;
    CHECK_EQ(dtrain_threads_create(comms, 2, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce_async(comms[1], &x[1], &x[1], 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    dtrain_comm_destroy(comms[1]);
    CHECK_EQ(dtrain_all_reduce(comms[0], &x[0], &x[0], 1, DTRAIN_F32, DTRAIN_MEAN), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 has left the group with all_reduce");
    dtrain_comm_destroy(comms[0]);
}

TEST(bad_arguments_are_named)
{
    dtrain_comm *world, *none = NULL;
    dtrain_comm_desc desc;
    dtrain_transport transport;
    float x[8] = {0};
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(world), 1);
    CHECK_EQ(dtrain_all_reduce(NULL, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the group is NULL");
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, (dtrain_dtype)DTRAIN_SUM, (dtrain_op)DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "are the two swapped?");
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, DTRAIN_I32, DTRAIN_MEAN), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_all_reduce(world, x, x + 1, 4, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "in and out overlap");
    CHECK_EQ(dtrain_all_reduce(world, NULL, x, 4, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "in is NULL");
    CHECK_EQ(dtrain_all_reduce(world, x, x, SIZE_MAX / 2, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "overflow");
    CHECK_EQ(dtrain_broadcast(world, x, 4, DTRAIN_F32, 1), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 is not among the 1 ranks");
    CHECK_EQ(dtrain_send(world, x, 4, DTRAIN_F32, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "this rank itself");
    CHECK_EQ(dtrain_all_reduce_async(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_poll(world, 10), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_PROGRESS_POLL");
    CHECK_EQ(dtrain_work_wait(NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_threads_create(&none, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_run_threads(2, NULL, NULL, NULL), DTRAIN_ERR_INVALID);
    memset(&desc, 0, sizeof desc);
    desc.stack_bytes = 32768;
    CHECK_EQ(dtrain_run_threads(2, different_calls, NULL, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "desc.stack_bytes is 32768; calls need 65536");
    memset(&desc, 0, sizeof desc);
    desc.world_size = 2;
    CHECK_EQ(dtrain_comm_create(&none, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "desc.root is needed");
    CHECK(none == NULL);
    desc.world_size = 0;
    desc.algorithm = (dtrain_algorithm)7;
    CHECK_EQ(dtrain_comm_create(&none, &desc), DTRAIN_ERR_INVALID);
    memset(&transport, 0, sizeof transport);
    CHECK_EQ(dtrain_comm_from_transport(&none, &transport, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "send and recv");
    dtrain_comm_destroy(world);
    dtrain_comm_destroy(NULL);
}

static dtrain_status one_element_differs(dtrain_comm *world, void *user)
{
    float x[100] = {0};
    (void)user;
    if (dtrain_comm_rank(world) >= 2)
        x[40 + dtrain_comm_rank(world)] = 1;
    CHECK_EQ(dtrain_comm_check_equal(world, x, 100, DTRAIN_F32), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "rank 2 differs from rank 0, first in element 42");
    return DTRAIN_OK;
}

TEST(check_equal_names_the_first_rank_and_element)
{
    CHECK_EQ(dtrain_run_threads(4, one_element_differs, NULL, NULL), DTRAIN_OK);
}

static size_t budget;

static void *short_of_memory(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    if (new_bytes > old_bytes && new_bytes - old_bytes > budget)
        return NULL;
    budget -= new_bytes - old_bytes;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (pointer != NULL && block != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

TEST(out_of_memory_is_a_status_and_leaks_nothing)
{
    dtrain_allocator allocator = {short_of_memory, NULL, 0, 0};
    dtrain_comm_desc desc;
    dtrain_comm *comms[3];
    int failures = 0;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    for (size_t limit = 0; limit < 250000; limit += 241) {
        budget = limit;
        dtrain_status status = dtrain_threads_create(comms, 3, &desc);
        if (status == DTRAIN_OK) {
            CHECK(allocator.bytes > 0);
            for (int i = 0; i < 3; i++)
                dtrain_comm_destroy(comms[i]);
        } else {
            failures++;
            CHECK_EQ(status, DTRAIN_ERR_MEMORY);
            CHECK(comms[0] == NULL && comms[2] == NULL);
        }
        CHECK_EQ(allocator.bytes, 0);
    }
    CHECK(failures > 100);
    CHECK(allocator.peak_bytes > 0 && allocator.peak_bytes < 250000);
}

static dtrain_status warm_loop(dtrain_comm *world, void *user)
{
    dtrain_work *work[3];
    static float data[4][3000];
    float *x = data[dtrain_comm_rank(world)];
    size_t warm = 0;
    (void)user;
    for (int step = 0; step < 50; step++) {
        for (int k = 0; k < 3; k++)
            CHECK_EQ(dtrain_all_reduce_async(world, x + 1000 * k, x + 1000 * k, 1000, DTRAIN_F32, DTRAIN_SUM, &work[k]),
                     DTRAIN_OK);
        for (int k = 0; k < 3; k++)
            CHECK_EQ(dtrain_work_wait(work[k]), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (step == 1)
            warm = dtrain_comm_allocator(world)->bytes;
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_comm_allocator(world)->bytes, warm);
    return dtrain_barrier(world);
}

TEST(a_warm_loop_allocates_nothing)
{
    CHECK_EQ(dtrain_run_threads(4, warm_loop, NULL, NULL), DTRAIN_OK);
}

static dtrain_status a_barrier(dtrain_comm *world, void *user)
{
    (void)user;
    return dtrain_barrier(world);
}

/* Returns the bytes that a world of threads takes for each rank. */
static size_t bytes_of_each(int ranks)
{
    dtrain_comm **world = (dtrain_comm **)calloc((size_t)ranks, sizeof *world);
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &heap;
    CHECK_EQ(dtrain_threads_create(world, ranks, &desc), DTRAIN_OK);
    size_t bytes = heap.bytes / (size_t)ranks;
    for (int rank = 0; rank < ranks; rank++)
        dtrain_comm_destroy(world[rank]);
    CHECK_EQ(heap.bytes, 0);
    free(world);
    return bytes;
}

TEST(a_rank_of_two_thousand_takes_no_more_memory_than_one_of_a_hundred)
{
    size_t few = bytes_of_each(100), many = bytes_of_each(2000);
    if (many > few + few / 100)
        TEST_FAIL("%zu bytes for each of 2,000 ranks, %zu for each of 100", many, few);
}

static dtrain_status a_ring(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), last = rank;
    int64_t sum = rank;
    (void)user;
    CHECK_EQ(dtrain_all_reduce(world, &sum, &sum, 1, DTRAIN_I64, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(sum, (int64_t)ranks * (ranks - 1) / 2);
    CHECK_EQ(dtrain_exchange(world, &rank, 1, (rank + 1) % ranks, &last, 1, (rank + ranks - 1) % ranks, DTRAIN_I32),
             DTRAIN_OK);
    CHECK_EQ(last, (rank + ranks - 1) % ranks);
    CHECK_EQ(dtrain_broadcast(world, &last, 1, DTRAIN_I32, ranks - 1), DTRAIN_OK);
    CHECK_EQ(last, ranks - 2);
    return DTRAIN_OK;
}

TEST(eleven_hundred_ranks_sum_and_send)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.stack_bytes = 256 << 10;
    CHECK_EQ(dtrain_run_threads(1100, a_ring, NULL, &desc), DTRAIN_OK);
}

TEST(two_hundred_ranks_on_small_stacks_meet)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.stack_bytes = 256 << 10;
    CHECK_EQ(dtrain_run_threads(200, a_barrier, NULL, &desc), DTRAIN_OK);
}

/* Their memory is more than a machine has. It is an error, and the system ends no process. */
TEST(more_ranks_than_memory_are_an_error)
{
    enum { MANY = 16000000 };
    dtrain_comm **world = (dtrain_comm **)calloc(MANY, sizeof *world);
    CHECK(world != NULL);
    CHECK_EQ(dtrain_threads_create(world, MANY, NULL), DTRAIN_ERR_MEMORY);
    CHECK(strstr(dtrain_last_error(), "16000000 ranks take ") != NULL);
    CHECK(world[0] == NULL && world[MANY - 1] == NULL);
    CHECK_EQ(dtrain_run_threads(MANY, a_barrier, NULL, NULL), DTRAIN_ERR_MEMORY);
    free(world);
}
