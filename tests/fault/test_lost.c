/* Groups of processes that go wrong: ranks that are killed, stopped or leave, calls and settings that differ, links
 * that are cut. Every rank is a process of its own. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

static const char token[] = "sixteen bytes or more of secret";

/* What a rank says of the end of its group; the victim dies or stops in the 20th step. */
typedef struct victim {
    int rank, signal;
    dtrain_status expected;
    const char *text;
    double within;
} victim;

static int until_it_breaks(dtrain_comm *world, scene *s)
{
    const victim *v = (const victim *)s->user;
    float x[5000] = {0};
    dtrain_status status = DTRAIN_OK;
    double begin = 0;
    for (int step = 0; status == DTRAIN_OK && step < 100000; step++) {
        begin = now_s();
        if (step == 20 && dtrain_comm_rank(world) == v->rank)
            kill(getpid(), v->signal);
        status = dtrain_all_reduce(world, x, x, 5000, DTRAIN_F32, DTRAIN_SUM);
    }
    CHECK_EQ(status, v->expected);
    CHECK_CONTAINS(world->error.text, v->text);
    if (now_s() - begin > v->within)
        TEST_FAIL("rank %d heard of it after %.2f s", dtrain_comm_rank(world), now_s() - begin);
    status = dtrain_barrier(world);
    CHECK(status != DTRAIN_OK);
    CHECK_CONTAINS(world->error.text, v->text);
    return 0;
}

static void with_a_victim(victim v, int way, int64_t timeout_ms, int64_t heartbeat_ms)
{
    scene s;
    pid_t pids[4];
    scene_begin_by(&s, 4, way);
    s.user = &v;
    s.desc.timeout_ms = timeout_ms;
    s.desc.heartbeat_ms = heartbeat_ms;
    for (int rank = 0; rank < 4; rank++)
        pids[rank] = start_rank(&s, rank, until_it_breaks);
    for (int rank = 0; rank < 4; rank++)
        if (rank != v.rank)
            CHECK_EQ(end_of(pids[rank], 30), 0);
    kill(pids[v.rank], SIGKILL);
    kill(pids[v.rank], SIGCONT);
    end_of(pids[v.rank], 5);
}

TEST(a_killed_rank_is_named_by_all_others_within_two_seconds)
{
    for (int way = TCP; way < WAYS; way++) {
        victim v = {2, SIGKILL, DTRAIN_ERR_PEER_LOST, way == TCP ? "rank 2 (" : "rank 2 is lost", 2};
        with_a_victim(v, way, 60000, 0);
        v.rank = 3;
        v.text = way == TCP ? "rank 3 (" : "rank 3 is lost";
        with_a_victim(v, way, 60000, 0);
    }
}

TEST(a_killed_rank_0_is_named_by_all_others_within_two_seconds)
{
    for (int way = TCP; way < WAYS; way++) {
        victim v = {0, SIGKILL, DTRAIN_ERR_PEER_LOST, way == TCP ? "rank 0 (" : "rank 0 is lost", 2};
        with_a_victim(v, way, 60000, 0);
    }
}

/* Rank 2 is killed while the others wait for what it has no part in. */
static int waits_for_others(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), what = *(const int *)s->user, next = rank == 0 ? 1 : rank == 1 ? 3 : 0;
    float x = 1;
    size_t bytes;
    dtrain_work *work = NULL;
    dtrain_status status;
    double begin;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 2) {
        usleep(20000);
        raise(SIGKILL);
    }
    begin = now_s();
    switch (what) {
    case 0: status = dtrain_recv(world, &x, 1, DTRAIN_F32, next); break;
    case 1: status = dtrain_store_wait(world, "nobody sets it", NULL, 0, &bytes); break;
    default:
        CHECK_EQ(dtrain_recv_async(world, &x, 1, DTRAIN_F32, next, &work), DTRAIN_OK);
        status = dtrain_work_wait(work);
    }
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(world->error.text, s->own != NULL ? "rank 2 is lost" : "rank 2 (");
    CHECK_WITHIN(now_s() - begin, 2);
    return 0;
}

TEST(a_killed_rank_is_named_whatever_the_others_wait_for)
{
    for (int turn = 0; turn < 9; turn++) {
        scene s;
        pid_t pids[4];
        int what = turn % 3;
        scene_begin_by(&s, 4, TCP + turn / 3);
        s.desc.progress = turn % 2 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        s.user = &what;
        for (int rank = 0; rank < 4; rank++)
            pids[rank] = start_rank(&s, rank, waits_for_others);
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == 2 ? 128 + SIGKILL : 0);
    }
}

/* Rank 1 has heard that rank 0 is gone, calls the others as their leader and leaves; rank 2 hears the end of that call
 * before rank 0's. */
static int hears_the_next_leader_end_first(dtrain_comm *world, scene *s)
{
    float x = 1;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 2) {
        pthread_mutex_lock(&CHANNEL(world)->hub->mutex);
        dtrain__hub_control_down(CHANNEL(world)->hub, 1, ECONNRESET);
        pthread_mutex_unlock(&CHANNEL(world)->hub->mutex);
    }
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    scene_meet(s->ranks);
    if (dtrain_comm_rank(world) == 0)
        kill(getpid(), SIGKILL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(world->error.text, "rank 0 (");
    return 0;
}

TEST(the_end_of_a_call_from_the_next_leader_does_not_hide_who_is_lost)
{
    scene s;
    pid_t pids[3];
    for (int reconnect_ms = 0; reconnect_ms <= 1000; reconnect_ms += 1000) {
        scene_begin(&s, 3, 1);
        s.desc.reconnect_ms = reconnect_ms;
        s.desc.heartbeat_ms = 2000;
        s.desc.token = token;
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, hears_the_next_leader_end_first);
        for (int rank = 0; rank < 3; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == 0 ? 128 + SIGKILL : 0);
    }
}

TEST(a_stopped_rank_is_named_when_its_heartbeat_is_overdue)
{
    victim v = {2, SIGSTOP, DTRAIN_ERR_PEER_LOST, "rank 2 (", 3};
    with_a_victim(v, TCP, 60000, 1000);
    v.rank = 0;
    v.text = "rank 0 (";
    with_a_victim(v, TCP, 60000, 1000);
}

TEST(a_stopped_rank_that_goes_on_hears_that_it_was_lost)
{
    victim v = {1, SIGSTOP, DTRAIN_ERR_PEER_LOST, "rank 1 (", 20};
    scene s;
    pid_t pids[3];
    for (; v.rank >= 0; v.rank--, v.text = "rank 0 (") {
        scene_begin(&s, 3, 1);
        s.user = &v;
        s.desc.heartbeat_ms = 1000;
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, until_it_breaks);
        for (int rank = 0; rank < 3; rank++)
            if (rank != v.rank)
                CHECK_EQ(end_of(pids[rank], 30), 0);
        kill(pids[v.rank], SIGCONT);
        CHECK_EQ(end_of(pids[v.rank], 10), 0);
    }
}

TEST(a_stopped_rank_is_named_at_the_deadline)
{
    victim v = {3, SIGSTOP, DTRAIN_ERR_TIMEOUT, "rank 3", 6};
    with_a_victim(v, TCP, 2500, 0);
}

static int leaves_early(dtrain_comm *world, scene *s)
{
    float x = 1;
    (void)s;
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 1)
        return 0;
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(world->error.text, "rank 1 has left the group");
    return 0;
}

TEST(a_rank_that_leaves_is_named)
{
    scene s;
    for (int way = UNIX; way < WAYS; way++) {
        scene_begin_by(&s, 3, way);
        run_ranks(&s, leaves_early);
    }
}

static int ends_in_step(dtrain_comm *world, scene *s)
{
    static float x[1 << 18];
    (void)s;
    for (int i = 0; i < 3; i++)
        CHECK_EQ(dtrain_all_reduce(world, x, x, 1 << 18, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 3)
        usleep(100000);
    CHECK_EQ(dtrain_broadcast(world, x, 1 << 18, DTRAIN_F32, 3), DTRAIN_OK);
    return 0;
}

TEST(leaving_right_after_the_last_call_disturbs_nobody)
{
    scene s;
    for (int round = 0; round < 8; round++) {
        scene_begin_by(&s, 4, round % WAYS);
        run_ranks(&s, ends_in_step);
    }
}

static int calls_something_else(dtrain_comm *world, scene *s)
{
    float x[8] = {0};
    dtrain_status status;
    (void)s;
    if (dtrain_comm_rank(world) == 1)
        status = dtrain_broadcast(world, x, 8, DTRAIN_F32, 0);
    else
        status = dtrain_all_reduce(world, x, x, 8, DTRAIN_F32, DTRAIN_SUM);
    CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(world->error.text, "broadcast #1 (f32 x 8, root 0)");
    CHECK_CONTAINS(world->error.text, "all_reduce #1 (sum, f32 x 8)");
    return 0;
}

TEST(a_mismatch_quotes_both_calls_on_both_ranks)
{
    scene s;
    scene_begin(&s, 2, 1);
    run_ranks(&s, calls_something_else);
}

/* Rank 0 only sends in its call, which may be over before rank 1 has looked at what came. Either may find it out. */
static int sends_to_another_call(dtrain_comm *world, scene *s)
{
    static const char *const sent[] = {"broadcast #1 (f32 x 8, root 0)", "reduce #1 (sum, f32 x 8, root 1)",
                                       "gather #1 (f32 x 8, root 1)", "scatter #1 (f32 x 8, root 0)",
                                       "send #1 (f32 x 8)"};
    float in[8] = {0}, out[8] = {0};
    int what = *(const int *)s->user;
    dtrain_status status;
    if (dtrain_comm_rank(world) == 1) {
        status = what == 4 ? dtrain_recv(world, out, 7, DTRAIN_F32, 0) : dtrain_barrier(world);
        CHECK_CONTAINS(world->error.text, sent[what]);
    } else {
        status = what == 0   ? dtrain_broadcast(world, in, 8, DTRAIN_F32, 0)
                 : what == 1 ? dtrain_reduce(world, in, NULL, 8, DTRAIN_F32, DTRAIN_SUM, 1)
                 : what == 2 ? dtrain_gather(world, in, NULL, 8, DTRAIN_F32, 1)
                 : what == 3 ? dtrain_scatter(world, in, out, 8, DTRAIN_F32, 0)
                             : dtrain_send(world, in, 8, DTRAIN_F32, 1);
        if (status == DTRAIN_OK)
            status = dtrain_recv(world, out, 1, DTRAIN_F32, 1);
    }
    CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(world->error.text, what == 4 ? "recv #1 (f32 x 7)" : "barrier #1");
    return 0;
}

static dtrain_status sends_to_another_call_on_threads(dtrain_comm *world, void *user)
{
    CHECK_EQ(sends_to_another_call(world, (scene *)user), 0);
    return DTRAIN_OK;
}

TEST(a_rank_that_only_sent_has_the_mismatch_when_it_next_receives)
{
    for (int what = 0; what < 5; what++) {
        scene s;
        scene_begin(&s, 2, what % 2);
        s.user = &what;
        run_ranks(&s, sends_to_another_call);
        CHECK_EQ(dtrain_run_threads(2, sends_to_another_call_on_threads, &s, NULL), DTRAIN_OK);
    }
}

static int believes_in_other_nodes(dtrain_comm *world, scene *s)
{
    float x[8] = {0};
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);               /* all are there */
    world->node_ranks = dtrain_comm_rank(world) == 3 ? 2 : 4; /* as with another DTRAIN_NODE_RANKS */
    CHECK_EQ(dtrain_all_reduce(world, x, x, 8, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(world->error.text, "rank 3");
    CHECK_CONTAINS(world->error.text, "by nodes of 2 ranks");
    CHECK_CONTAINS(world->error.text, "by nodes of 4 ranks");
    return 0;
}

static int adds_in_another_order(dtrain_comm *world, scene *s)
{
    float x[8] = {0};
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    world->desc.order = dtrain_comm_rank(world) == 1 ? DTRAIN_ORDER_ANY : DTRAIN_ORDER_TREE;
    CHECK_EQ(dtrain_all_reduce(world, x, x, 8, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(world->error.text, "in any order");
    CHECK_CONTAINS(world->error.text, "give every rank the same desc.algorithm, order, node_ranks");
    return 0;
}

TEST(settings_that_change_the_steps_are_compared_and_named)
{
    scene s;
    scene_begin(&s, 4, 0);
    s.desc.algorithm = DTRAIN_ALGORITHM_NODES;
    run_ranks(&s, believes_in_other_nodes);
    scene_begin(&s, 2, 0);
    run_ranks(&s, adds_in_another_order);
}

/* Cuts this rank's data connections and, on the last rank, its control connection, as a lost link would. */
static int cut_and_go_on(dtrain_comm *world, scene *s)
{
    enum { COUNT = 400009 };
    static float x[COUNT];
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    (void)s;
    for (int turn = 0; turn < 24; turn++) {
        for (int i = 0; i < COUNT; i++)
            x[i] = (float)(rank + turn + i % 5);
        if (turn % 6 == rank) {
            dtrain__hub *hub = CHANNEL(world)->hub;
            pthread_mutex_lock(&hub->mutex);
            for (int peer = 0; peer < ranks; peer++)
                if (CHANNEL(world)->peers[peer].lanes[0].stream.fd >= 0)
                    shutdown(CHANNEL(world)->peers[peer].lanes[0].stream.fd, SHUT_RDWR);
            if (rank == ranks - 1)
                shutdown(hub->members[0].control.fd, SHUT_RDWR);
            pthread_mutex_unlock(&hub->mutex);
        }
        if (dtrain_all_reduce(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM) != DTRAIN_OK) {
            TEST_FAIL("turn %d: %s", turn, world->error.text);
            return 1;
        }
        for (int i = 0; i < COUNT; i += 997)
            CHECK(x[i] == (float)(ranks * (ranks - 1) / 2 + ranks * (turn + i % 5)));
    }
    return 0;
}

TEST(a_reset_link_comes_back_and_loses_nothing)
{
    scene s;
    for (int tcp = 0; tcp < 2; tcp++) {
        scene_begin(&s, 4, tcp);
        s.desc.reconnect_ms = 5000;
        s.desc.token = token;
        run_ranks(&s, cut_and_go_on);
    }
}

/* Rank 1 sends and then does something else; rank 0 loses the connection with the bytes unread. */
static int lost_after_the_last_word(dtrain_comm *world, scene *s)
{
    enum { COUNT = 60000 };
    static float x[COUNT];
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 1) {
        for (int i = 0; i < COUNT; i++)
            x[i] = (float)i;
        CHECK_EQ(dtrain_send(world, x, COUNT, DTRAIN_F32, 0), DTRAIN_OK);
        usleep(1500000);
    } else {
        dtrain__lane *lane = &CHANNEL(world)->peers[1].lanes[0];
        double begin;
        usleep(300000);
        pthread_mutex_lock(&CHANNEL(world)->hub->mutex);
        dtrain__stream_cut(&lane->stream);
        lane->down_ns = dtrain__os_now_ns();
        pthread_mutex_unlock(&CHANNEL(world)->hub->mutex);
        begin = now_s();
        CHECK_EQ(dtrain_recv(world, x, COUNT, DTRAIN_F32, 1), DTRAIN_OK);
        CHECK(x[1] == 1 && x[COUNT - 1] == COUNT - 1);
        CHECK_WITHIN(now_s() - begin, 1); /* while rank 1 still did something else */
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(what_a_cut_link_lost_is_sent_again_by_a_rank_that_sends_no_more)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.reconnect_ms = 5000;
    run_ranks(&s, lost_after_the_last_word);
}
