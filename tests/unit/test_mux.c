/* Groups over a transport of the user's own that has send and recv alone: socket pairs between threads. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

#define MOST 4
#define MIB ((size_t)1 << 20)

typedef struct pairs_end {
    int rank, ranks;
    int fds[MOST];
    int *dead; /* ranks that alive knows to be gone; NULL: there is no alive, and their ends close */
    void (*body)(dtrain_comm *world, struct pairs_end *end);
    const dtrain_comm_desc *desc;
    unsigned char digest[32]; /* of what the body has got */
    pthread_t thread;
} pairs_end;

static int pairs_ready(int fd, short events, int64_t deadline_ns)
{
    struct pollfd entry = {fd, events, 0};
    for (;;) {
        int64_t left = deadline_ns > 0 ? (deadline_ns - dtrain__os_now_ns() + 999999) / 1000000 : 0;
        int ready = poll(&entry, 1, left <= 0 ? 0 : left > 1000 ? 1000 : (int)left);
        if (ready > 0 || left <= 0)
            return ready > 0;
    }
}

static dtrain_status pairs_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    int fd = ((pairs_end *)self)->fds[peer];
    for (*moved = 0; *moved < bytes;) {
        ssize_t n = send(fd, (const char *)data + *moved, bytes - *moved, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0)
            *moved += (size_t)n;
        else if (errno != EAGAIN)
            return DTRAIN_ERR_PEER_LOST;
        else if (!pairs_ready(fd, POLLOUT, deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
    }
    return DTRAIN_OK;
}

static dtrain_status pairs_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    int fd = ((pairs_end *)self)->fds[peer];
    for (*moved = 0; *moved < bytes;) {
        ssize_t n = recv(fd, (char *)data + *moved, bytes - *moved, MSG_DONTWAIT);
        if (n > 0)
            *moved += (size_t)n;
        else if (n == 0 || errno != EAGAIN)
            return DTRAIN_ERR_PEER_LOST;
        else if (!pairs_ready(fd, POLLIN, deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
    }
    return DTRAIN_OK;
}

static int pairs_alive(void *self, int peer)
{
    return __atomic_load_n(&((pairs_end *)self)->dead[peer], __ATOMIC_SEQ_CST) == 0;
}

/* Dies: its ends close without a word. */
static void pairs_die(pairs_end *end)
{
    for (int peer = 0; peer < end->ranks; peer++)
        if (peer != end->rank)
            shutdown(end->fds[peer], SHUT_RDWR);
}

/* Pairs for each group, which the first of two ranks to come makes for both. */
typedef struct lane_pair {
    uint64_t group;
    int low, high, fds[2];
} lane_pair;

static struct {
    pthread_mutex_t mutex;
    lane_pair pairs[64];
    int count, given;
} lanes = {PTHREAD_MUTEX_INITIALIZER, {{0, 0, 0, {0, 0}}}, 0, 0};

static void lane_destroy(void *self)
{
    pairs_end *end = (pairs_end *)self;
    for (int peer = 0; peer < end->ranks; peer++)
        if (peer != end->rank)
            close(end->fds[peer]);
    free(end);
}

static int lane_fd(uint64_t group, int rank, int peer)
{
    int low = rank < peer ? rank : peer, high = rank < peer ? peer : rank, at = 0;
    while (at < lanes.count &&
           (lanes.pairs[at].group != group || lanes.pairs[at].low != low || lanes.pairs[at].high != high))
        at++;
    if (at == lanes.count) {
        lanes.pairs[at].group = group;
        lanes.pairs[at].low = low;
        lanes.pairs[at].high = high;
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, lanes.pairs[at].fds), 0);
        lanes.count++;
    }
    return lanes.pairs[at].fds[rank > peer];
}

static dtrain_status pairs_lanes(void *self, uint64_t group, const int *ranks, int size, dtrain_transport *lane)
{
    pairs_end *end = (pairs_end *)calloc(1, sizeof *end);
    end->ranks = size;
    pthread_mutex_lock(&lanes.mutex);
    for (int rank = 0; rank < size; rank++)
        if (ranks[rank] == ((pairs_end *)self)->rank)
            end->rank = rank;
    for (int peer = 0; peer < size; peer++)
        if (peer != end->rank)
            end->fds[peer] = lane_fd(group, ranks[end->rank], ranks[peer]);
    lanes.given++;
    pthread_mutex_unlock(&lanes.mutex);
    lane->self = end;
    lane->send = pairs_send;
    lane->recv = pairs_recv;
    lane->destroy = lane_destroy;
    return DTRAIN_OK;
}

static int with_lanes; /* set before any rank is */

static void *pairs_main(void *pointer)
{
    pairs_end *end = (pairs_end *)pointer;
    dtrain_transport transport;
    dtrain_comm *world = NULL;
    memset(&transport, 0, sizeof transport);
    transport.self = end;
    transport.rank = end->rank;
    transport.size = end->ranks;
    transport.send = pairs_send;
    transport.recv = pairs_recv;
    transport.alive = end->dead != NULL ? pairs_alive : NULL;
    transport.lanes = with_lanes ? pairs_lanes : NULL;
    CHECK_EQ(dtrain_comm_from_transport(&world, &transport, end->desc), DTRAIN_OK);
    end->body(world, end);
    dtrain_comm_destroy(world);
    return NULL;
}

static void on_pairs_with(int ranks, void (*body)(dtrain_comm *world, pairs_end *end), const dtrain_comm_desc *desc,
                          int *dead, pairs_end *ends)
{
    lanes.count = 0;
    memset(ends, 0, MOST * sizeof *ends);
    for (int a = 0; a < ranks; a++)
        for (int b = a + 1; b < ranks; b++) {
            int fds[2];
            CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
            ends[a].fds[b] = fds[0];
            ends[b].fds[a] = fds[1];
        }
    for (int rank = 0; rank < ranks; rank++) {
        ends[rank].rank = rank;
        ends[rank].ranks = ranks;
        ends[rank].body = body;
        ends[rank].desc = desc;
        ends[rank].dead = dead;
        CHECK_EQ(pthread_create(&ends[rank].thread, NULL, pairs_main, &ends[rank]), 0);
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(ends[rank].thread, NULL);
    for (int rank = 0; rank < ranks; rank++)
        for (int peer = 0; peer < ranks; peer++)
            if (peer != rank)
                close(ends[rank].fds[peer]);
}

/* With a service thread and by poll. */
static void on_pairs(int ranks, void (*body)(dtrain_comm *world, pairs_end *end))
{
    pairs_end ends[MOST];
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = test_ms(20000);
    for (int polls = 0; polls < 2; polls++) {
        desc.progress = polls ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        on_pairs_with(ranks, body, &desc, NULL, ends);
    }
}

static int sum(dtrain_comm *group, int x)
{
    int32_t value = x;
    CHECK_EQ(dtrain_all_reduce(group, &value, &value, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_OK);
    return value;
}

/* ---- groups ---- */

static void makes_groups(dtrain_comm *world, pairs_end *end)
{
    dtrain_comm *half = NULL, *twin = NULL, *three = NULL, *own = NULL;
    int rank = end->rank;
    CHECK_EQ(dtrain_comm_split(world, rank / 2, -rank, &half), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(half, 0, 0, &twin), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank == 1 ? -1 : 7, (rank + 1) % 4, &three), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(half, dtrain_comm_rank(half), 0, &own), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_rank(half), 1 - rank % 2);
    CHECK_EQ(dtrain_comm_size(own), 1);
    CHECK_EQ(sum(half, rank + 1), rank < 2 ? 3 : 7);
    CHECK_EQ(sum(world, 1), 4);
    CHECK_EQ(sum(twin, 10), 20);
    CHECK_EQ(sum(own, rank), rank);
    CHECK_EQ(three == NULL, rank == 1);
    if (three != NULL)
        CHECK_EQ(sum(three, 1 << dtrain_comm_rank(three)), 7);
    dtrain_comm_destroy(half);
    CHECK_EQ(sum(twin, 1), 2);
    CHECK_EQ(sum(world, rank), 6);
    dtrain_comm_destroy(twin);
    dtrain_comm_destroy(own);
    dtrain_comm_destroy(three);
}

TEST(send_and_recv_have_groups_of_their_ranks)
{
    on_pairs(4, makes_groups);
}

static float value(int rank, size_t i)
{
    return (float)((int)((size_t)rank * 7919 + i * 31) % 1000) * 0.37f - 100.0f;
}

/* Sums along both dimensions, queued and not, whose rounding tells in which order. */
static void reduces_in_a_mesh(dtrain_comm *world, unsigned char digest[32])
{
    const dtrain_mesh_dim dims[] = {{"data", 2}, {"tensor", 2}};
    enum { COUNT = 30000 };
    static const char *const names[] = {"tensor", "data"};
    float *x = (float *)malloc(2 * COUNT * sizeof *x);
    dtrain_work *works[2];
    dtrain_mesh *mesh = NULL;
    CHECK_EQ(dtrain_mesh_create(&mesh, world, dims, 2), DTRAIN_OK);
    for (size_t i = 0; i < 2 * COUNT; i++)
        x[i] = value(dtrain_comm_rank(world), i);
    for (int step = 0; step < 5; step++) {
        for (int way = 0; way < 2; way++)
            CHECK_EQ(dtrain_all_reduce_async(dtrain_mesh_group(mesh, names[way]), x + way * COUNT, x + way * COUNT,
                                             COUNT, DTRAIN_F32, DTRAIN_MEAN, &works[way]),
                     DTRAIN_OK);
        for (int way = 1; way >= 0; way--)
            CHECK_EQ(dtrain_work_wait(works[way]), DTRAIN_OK);
        CHECK_EQ(dtrain_all_reduce(world, x, x, 2 * COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        for (size_t i = 0; i < 2 * COUNT; i++)
            x[i] = x[i] * 0.1f + value(dtrain_comm_rank(world), i + (size_t)step);
    }
    dtrain_sha256(x, 2 * COUNT * sizeof *x, digest);
    dtrain_mesh_destroy(mesh);
    free(x);
}

static void meshes(dtrain_comm *world, pairs_end *end)
{
    reduces_in_a_mesh(world, end->digest);
}

static dtrain_status meshes_on_threads(dtrain_comm *world, void *user)
{
    reduces_in_a_mesh(world, ((pairs_end *)user)[dtrain_comm_rank(world)].digest);
    return DTRAIN_OK;
}

TEST(a_mesh_of_four_gives_the_bits_of_threads)
{
    pairs_end ours[MOST], threads[MOST];
    dtrain_comm_desc desc;
    CHECK_EQ(dtrain_run_threads(4, meshes_on_threads, threads, NULL), DTRAIN_OK);
    memset(&desc, 0, sizeof desc);
    for (int polls = 0; polls < 2; polls++) {
        desc.progress = polls ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        on_pairs_with(4, meshes, &desc, NULL, ours);
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(memcmp(ours[rank].digest, threads[rank].digest, 32), 0);
    }
}

/* ---- orders ---- */

static void crosses(dtrain_comm *world, pairs_end *end)
{
    size_t bytes = 8 * MIB;
    unsigned char *data = (unsigned char *)malloc(2 * bytes);
    dtrain_comm *groups[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(dtrain_comm_split(world, 0, 0, &groups[i]), DTRAIN_OK);
    for (int i = 0; i < 2 && end->rank == 0; i++) {
        memset(data, 5 + i, bytes);
        CHECK_EQ(dtrain_send(groups[i], data, bytes, DTRAIN_U8, 1), DTRAIN_OK);
    }
    for (int i = 1; i >= 0 && end->rank == 1; i--) {
        CHECK_EQ(dtrain_recv(groups[i], data, bytes, DTRAIN_U8, 0), DTRAIN_OK);
        CHECK(data[0] == 5 + i && data[bytes / 2] == 5 + i && data[bytes - 1] == 5 + i);
    }
    for (int i = 0; i < 2; i++)
        CHECK_EQ(sum(groups[i], 1), 2);
    for (int i = 0; i < 2; i++)
        dtrain_comm_destroy(groups[i]);
    free(data);
}

TEST(large_messages_of_two_groups_are_received_in_the_other_order)
{
    on_pairs(2, crosses);
}

static void runs_in_a_circle(dtrain_comm *world, pairs_end *end)
{
    size_t count = MIB;
    int next = (end->rank + 1) % 3, last = (end->rank + 2) % 3;
    float *out = (float *)malloc(2 * count * sizeof *out), *in = out + count;
    dtrain_comm *groups[3];
    for (int i = 0; i < 3; i++)
        CHECK_EQ(dtrain_comm_split(world, 0, 0, &groups[i]), DTRAIN_OK);
    for (size_t i = 0; i < count; i++)
        out[i] = value(end->rank, i);
    CHECK_EQ(dtrain_send(groups[end->rank], out, count, DTRAIN_F32, next), DTRAIN_OK);
    CHECK_EQ(dtrain_recv(groups[last], in, count, DTRAIN_F32, last), DTRAIN_OK);
    for (size_t i = 0; i < count; i += 1000)
        CHECK(in[i] == value(last, i));
    for (int i = 0; i < 3; i++)
        dtrain_comm_destroy(groups[i]);
    free(out);
}

TEST(three_ranks_that_send_in_a_circle_each_in_its_group_get_on)
{
    on_pairs(3, runs_in_a_circle);
}

typedef struct second {
    dtrain_comm *group;
    int rank;
} second;

static void *second_main(void *pointer)
{
    second *mine = (second *)pointer;
    for (int i = 0; i < 300; i++)
        CHECK_EQ(sum(mine->group, i), 3 * i);
    return NULL;
}

static void has_two_threads(dtrain_comm *world, pairs_end *end)
{
    float *x = (float *)calloc(100000, sizeof *x);
    pthread_t thread;
    second mine = {NULL, end->rank};
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &mine.group), DTRAIN_OK);
    CHECK_EQ(pthread_create(&thread, NULL, second_main, &mine), 0);
    for (int i = 0; i < 30; i++)
        CHECK_EQ(dtrain_all_reduce(world, x, x, 100000, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    pthread_join(thread, NULL);
    dtrain_comm_destroy(mine.group);
    free(x);
}

TEST(two_threads_of_a_rank_use_a_group_each)
{
    on_pairs(3, has_two_threads);
}

static void sends_too_much(dtrain_comm *world, pairs_end *end)
{
    size_t bytes = 80 * MIB;
    unsigned char *data = (unsigned char *)malloc(bytes);
    dtrain_comm *groups[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(dtrain_comm_split(world, 0, 0, &groups[i]), DTRAIN_OK);
    memset(data, end->rank == 0 ? 7 : 0, bytes);
    if (end->rank == 0) {
        CHECK_EQ(dtrain_send(groups[0], data, bytes, DTRAIN_U8, 1), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_recv(groups[1], data, bytes, DTRAIN_U8, 0), DTRAIN_ERR_MEMORY);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0 sends to group");
        CHECK_CONTAINS(dtrain_last_error(), "67108864 bytes of it are kept");
        CHECK_CONTAINS(dtrain_last_error(), "receive from groups in the order in which peers send");
        CHECK_EQ(dtrain_recv(groups[0], data, bytes, DTRAIN_U8, 0), DTRAIN_OK);
        CHECK(data[0] == 7 && data[64 * MIB] == 7 && data[bytes - 1] == 7);
    }
    CHECK_EQ(sum(world, 1), 2);
    for (int i = 0; i < 2; i++)
        dtrain_comm_destroy(groups[i]);
    free(data);
}

TEST(more_than_64_mib_for_another_group_is_an_error_that_says_so)
{
    on_pairs(2, sends_too_much);
}

/* Rank 0 waits for rank 2, which computes, while rank 1 sends more to another group than is kept. */
static void waits_for_another(dtrain_comm *world, pairs_end *end)
{
    size_t bytes = 80 * MIB;
    unsigned char *data = (unsigned char *)calloc(bytes, 1);
    dtrain_comm *group = NULL;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    if (end->rank == 1)
        CHECK_EQ(dtrain_send(group, data, bytes, DTRAIN_U8, 0), DTRAIN_OK);
    if (end->rank == 2) {
        sleep(2);
        CHECK_EQ(dtrain_send(world, data, 1, DTRAIN_U8, 0), DTRAIN_OK);
    }
    if (end->rank == 0) {
        CHECK_EQ(dtrain_recv(world, data, 1, DTRAIN_U8, 2), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(group, data, bytes, DTRAIN_U8, 1), DTRAIN_OK);
    }
    dtrain_comm_destroy(group);
    free(data);
}

TEST(what_one_peer_sends_ends_no_wait_for_another)
{
    on_pairs(3, waits_for_another);
}

/* ---- ends ---- */

static void goes_early(dtrain_comm *world, pairs_end *end)
{
    unsigned char *data = (unsigned char *)calloc(MIB, 1);
    dtrain_comm *group = NULL, *other = NULL;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &other), DTRAIN_OK);
    if (end->rank == 1) {
        dtrain_comm_destroy(group);
        CHECK_EQ(sum(other, 1), 2);
    } else {
        dtrain_status status = dtrain_send(group, data, MIB, DTRAIN_U8, 1); /* it may be gone before that is known */
        CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(sum(other, 1), 2);
        CHECK_EQ(dtrain_recv(group, data, MIB, DTRAIN_U8, 1), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank 1 has left the group");
        dtrain_comm_destroy(group);
    }
    CHECK_EQ(sum(world, 3), 6);
    dtrain_comm_destroy(other);
    free(data);
}

TEST(a_rank_that_leaves_a_group_early_stays_in_the_others)
{
    on_pairs(2, goes_early);
}

static int stage; /* 1: rank 0 has sent a part */

/* Rank 0 sends a part of a frame, and the rest while it waits for another group. There it learns that rank 1 has all
 * and has left. */
static void leaves_with_the_last_bytes(dtrain_comm *world, pairs_end *end)
{
    static unsigned char data[2][60000];
    dtrain_comm *group = NULL;
    dtrain_transfer all = {1 - end->rank, data[end->rank], sizeof data[0], 0, 0};
    int few = 4096;
    CHECK_EQ(setsockopt(end->fds[1 - end->rank], SOL_SOCKET, SO_SNDBUF, &few, sizeof few), 0);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    void *lane = group->transport.self;
    if (end->rank == 0) {
        CHECK_EQ(dtrain__mux_move(lane, &all, NULL, 0), DTRAIN_ERR_TIMEOUT);
        CHECK(all.moved < all.bytes);
        __atomic_store_n(&stage, 1, __ATOMIC_SEQ_CST);
        CHECK_EQ(sum(world, 1), 2);
        CHECK(dtrain__membership_left(((dtrain__mux_lane *)lane)->seat.members, 1));
        CHECK_EQ(dtrain__mux_move(lane, &all, NULL, 0), DTRAIN_OK);
        CHECK_EQ(all.moved, all.bytes);
        dtrain_comm_destroy(group);
    } else {
        while (!__atomic_load_n(&stage, __ATOMIC_SEQ_CST))
            usleep(1000);
        CHECK_EQ(dtrain__mux_move(lane, NULL, &all, dtrain__os_now_ns() + 10000000000), DTRAIN_OK);
        dtrain_comm_destroy(group);
        CHECK_EQ(sum(world, 1), 2);
    }
}

TEST(a_call_whose_last_bytes_another_sends_is_complete_though_the_peer_has_left)
{
    pairs_end ends[MOST];
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = test_ms(20000);
    desc.progress = DTRAIN_PROGRESS_POLL;
    on_pairs_with(2, leaves_with_the_last_bytes, &desc, NULL, ends);
}

static void breaks_a_group(dtrain_comm *world, pairs_end *end)
{
    dtrain_comm *group = NULL;
    int32_t x = 1;
    CHECK_EQ(dtrain_comm_split(world, end->rank != 3, 0, &group), DTRAIN_OK);
    if (end->rank == 1)
        CHECK_EQ(dtrain_comm_abort(group, "it has had enough"), DTRAIN_OK);
    if (end->rank != 3) {
        CHECK_EQ(dtrain_all_reduce(group, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "it has had enough");
    }
    CHECK_EQ(sum(world, 1), 4);
    dtrain_comm_destroy(group);
}

TEST(a_group_that_breaks_tells_its_members_and_harms_no_other)
{
    on_pairs(4, breaks_a_group);
}

/* Rank 2 says no more; until the others know, it does not leave either. */
static void is_dead(pairs_end *end)
{
    if (end->dead == NULL)
        pairs_die(end);
    else
        __atomic_store_n(&end->dead[end->rank], 1, __ATOMIC_SEQ_CST);
    while (end->dead != NULL && __atomic_load_n(&end->dead[end->rank], __ATOMIC_SEQ_CST) < end->ranks)
        usleep(1000);
}

static void outlives_rank_2(dtrain_comm *world, pairs_end *end)
{
    dtrain_comm *pair = NULL, *three = NULL;
    int64_t began = dtrain__os_now_ns();
    int32_t x = 1;
    CHECK_EQ(dtrain_comm_split(world, end->rank < 2, 0, &pair), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, end->rank > 0, 0, &three), DTRAIN_OK);
    CHECK_EQ(sum(world, 1), 4);
    if (end->rank == 2) {
        is_dead(end);
    } else {
        if (end->rank > 0) {
            CHECK_EQ(dtrain_all_reduce(three, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_ERR_PEER_LOST);
            CHECK_CONTAINS(dtrain_last_error(),
                           "rank 1 (rank 2 of the world) is lost: its end of the transport is closed");
        }
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank 2 is lost: its end of the transport is closed");
        if (end->rank < 2)
            CHECK_EQ(sum(pair, 5), 10);
        CHECK(dtrain__os_now_ns() - began < 10000000000);
        if (end->dead != NULL)
            __atomic_add_fetch(&end->dead[2], 1, __ATOMIC_SEQ_CST);
    }
    dtrain_comm_destroy(pair);
    dtrain_comm_destroy(three);
}

TEST(a_dead_peer_ends_the_groups_that_it_was_in)
{
    on_pairs(4, outlives_rank_2);
}

TEST(alive_tells_of_a_dead_peer_that_nothing_else_tells_of)
{
    pairs_end ends[MOST];
    int dead[MOST] = {0, 0, 0, 0};
    on_pairs_with(4, outlives_rank_2, NULL, dead, ends);
}

/* ---- lanes ---- */

TEST(groups_with_streams_of_their_own_do_the_same)
{
    static void (*const bodies[])(dtrain_comm *, pairs_end *) = {makes_groups, has_two_threads, goes_early,
                                                                 breaks_a_group, outlives_rank_2};
    static const int ranks[] = {4, 3, 2, 4, 4};
    pairs_end ours[MOST], threads[MOST];
    with_lanes = 1;
    for (int i = 0; i < 5; i++) {
        lanes.given = 0;
        on_pairs(ranks[i], bodies[i]);
        CHECK(lanes.given > 0);
    }
    CHECK_EQ(dtrain_run_threads(4, meshes_on_threads, threads, NULL), DTRAIN_OK);
    on_pairs_with(4, meshes, NULL, NULL, ours);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(memcmp(ours[rank].digest, threads[rank].digest, 32), 0);
    with_lanes = 0;
}
