/* Who leaves is not lost, and a death is heard by all: what other ranks may still call, on threads and on processes. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

/* Comes back when this rank knows that the group is broken. */
static void until_known(dtrain_comm *world)
{
    while (dtrain__group_cause(world) == NULL) {
        if (world->desc.progress == DTRAIN_PROGRESS_POLL)
            DTRAIN_IGNORE(dtrain_comm_poll(world, 0));
        usleep(200);
    }
}

/* Comes back when the hub knows that the process of a rank is gone. */
static void until_gone(dtrain_comm *world, int rank)
{
    dtrain__hub *hub = ((dtrain__channel *)world->transport.self)->hub;
    for (int gone = 0; !gone;) {
        pthread_mutex_lock(&hub->mutex);
        gone = hub->members[rank].gone != DTRAIN__PRESENT;
        pthread_mutex_unlock(&hub->mutex);
        if (!gone)
            usleep(200);
    }
}

/* Ranks 1 and 2 only send to rank 0, which calls nothing; each of their calls would be over at once. */
static int only_sends(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    float x[4] = {1, 2, 3, 4}, y[4];
    dtrain_work *work[2];
    CHECK_EQ(dtrain_gather(world, x, y, 4, DTRAIN_F32, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_reduce(world, x, y, 4, DTRAIN_F32, DTRAIN_SUM, 0), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 3)
        kill(getpid(), SIGKILL);
    until_known(world);
    if (rank != 0) {
        CHECK_EQ(dtrain_gather(world, x, y, 4, DTRAIN_F32, 0), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(world->error.text, "rank 3 (");
        CHECK_EQ(dtrain_reduce(world, x, y, 4, DTRAIN_F32, DTRAIN_SUM, 0), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_broadcast(world, x, 4, DTRAIN_F32, rank), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_send(world, x, 4, DTRAIN_F32, 0), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_exchange(world, x, 4, 0, NULL, 0, -1, DTRAIN_F32), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_send_async(world, x, 4, DTRAIN_F32, 0, &work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_broadcast_async(world, x, 4, DTRAIN_F32, rank, &work[1]), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work[0]), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
        CHECK_EQ(dtrain_send(world, x, 4, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fuse_end(world), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(world->error.text, "rank 3 (");
    }
    return 0;
}

/* Runs four ranks, of which rank 3 kills itself. */
static void without_rank_3(scene *s, rank_body body)
{
    pid_t pids[4];
    for (int rank = 0; rank < 4; rank++)
        pids[rank] = start_rank(s, rank, body);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(end_of(pids[rank], 60), rank == 3 ? 128 + SIGKILL : 0);
}

TEST(a_call_that_only_sends_fails_once_its_rank_knows_of_a_death)
{
    for (int poll = 0; poll < 2; poll++) {
        scene s;
        scene_begin(&s, 4, poll);
        s.desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        without_rank_3(&s, only_sends);
    }
}

/* Rank 0 sends three messages to rank 1 before the group breaks, and would send more. */
static int one_view(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), dies = *(const int *)s->user;
    dtrain_status broken = dies ? DTRAIN_ERR_PEER_LOST : DTRAIN_ERR_MISMATCH;
    int32_t x = 0;
    for (int i = 0; rank == 0 && i < 3; i++)
        CHECK_EQ(dtrain_send(world, &i, 1, DTRAIN_I32, 1), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 3 && dies)
        kill(getpid(), SIGKILL);
    if (rank == 3) /* rank 2 awaits another count */
        DTRAIN_IGNORE(dtrain_send(world, &x, 1, DTRAIN_I32, 2));
    if (rank == 2)
        CHECK_EQ(dtrain_recv(world, NULL, 0, DTRAIN_I32, 3), broken);
    until_known(world);
    for (int i = 0; rank == 0 && i < 6; i++)
        CHECK_EQ(dtrain_send(world, &i, 1, DTRAIN_I32, 1), broken);
    if (rank == 1)
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_I32, 3), broken);
    for (int i = 0; rank == 1 && i < 6; i++) {
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_I32, 0), i < 3 ? DTRAIN_OK : broken);
        CHECK_EQ(x, i < 3 ? i : 2);
    }
    if (rank == 1)
        CHECK_CONTAINS(world->error.text,
                       dies ? "rank 3 (" : "rank 3 called send #1 (i32 x 1), this rank 2 recv #1 (i32 x 0)");
    return 0;
}

TEST(a_message_on_a_broken_group_is_the_same_to_both_its_ranks)
{
    int dies = 0;
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        scene_begin(&s, 4, tcp);
        s.user = &dies;
        dies = 1;
        without_rank_3(&s, one_view);
        scene_begin(&s, 4, tcp);
        s.user = &dies;
        dies = 0;
        run_ranks(&s, one_view);
        on_threads(4, one_view, &s);
    }
}

/* All destroy the world, and none its duplicate; the others are gone before rank 0 comes to the last reduce. */
static int keeps_a_group(dtrain_comm *world, scene *s)
{
    static float x[300000];
    dtrain_comm *kept;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &kept), DTRAIN_OK);
    CHECK_EQ(sum(kept, 1), 5);
    scene_meet(s->ranks); /* a rank that ended the sum and is gone would break it for those who are still in it */
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < 300000; i++)
            x[i] = 1;
        for (int rank = 1; turn == 2 && dtrain_comm_rank(world) == 0 && rank < 5; rank++)
            until_gone(world, rank);
        CHECK_EQ(dtrain_reduce(world, x, x, turn == 1 ? 300000 : 1, DTRAIN_F32, DTRAIN_SUM, 0), DTRAIN_OK);
        CHECK(dtrain_comm_rank(world) != 0 || (x[0] == 5 && x[299999] == (turn == 1 ? 5 : 1)));
        if (world->error.text[0] != 0)
            TEST_FAIL("%s", world->error.text);
    }
    return 0;
}

TEST(a_group_that_was_not_destroyed_breaks_no_other)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        scene_begin(&s, 5, tcp);
        s.desc.algorithm = DTRAIN_ALGORITHM_TREE; /* its leaves do not wait for the root */
        run_ranks(&s, keeps_a_group);
    }
}

/* Rank 2 of four leaves a group, having sent to rank 0. */
static int one_leaves(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), next = rank == 3 ? 0 : rank == 1 ? 3 : 1, before = rank == 0 ? 3 : rank / 2;
    int32_t x[4] = {rank, 1, 2, 3}, y[4] = {0}, z = 0;
    dtrain_comm *group, *rest;
    dtrain_work *work;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    if (rank == 2) {
        CHECK_EQ(dtrain_send(group, x, 4, DTRAIN_I32, 0), DTRAIN_OK);
        dtrain_comm_destroy(group);
    }
    while (rank != 2 && !dtrain__group_has_left(group, 2))
        usleep(200);
    for (int turn = 0; rank != 2 && turn < 3; turn++) {
        CHECK_EQ(dtrain_barrier(group), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(group->error.text, "rank 2 has left the group");
        CHECK_EQ(dtrain_gather(group, x, y, 4, DTRAIN_I32, 0), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_all_reduce_async(group, x, y, 4, DTRAIN_I32, DTRAIN_SUM, &work), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_recv(group, y, 4, DTRAIN_I32, 2), rank == 0 && turn == 0 ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST);
        CHECK(rank != 0 || turn > 0 || (y[0] == 2 && y[3] == 3));
        CHECK_EQ(dtrain_send(group, x, 4, DTRAIN_I32, 2), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(group->error.text, "rank 2 has left the group");
        CHECK_EQ(dtrain_exchange(group, x, 4, 2, y, 4, before, DTRAIN_I32), DTRAIN_ERR_PEER_LOST);
        scene_meet(s->ranks - 1);
        CHECK_EQ(dtrain_exchange(group, &rank, 1, next, &z, 1, before, DTRAIN_I32), DTRAIN_OK);
        CHECK_EQ(z, before);
        scene_meet(s->ranks - 1);
    }
    if (rank != 2) {
        CHECK_EQ(dtrain_comm_shrink(group, &rest), DTRAIN_OK);
        CHECK_EQ(sum(rest, rank), 4);
        dtrain_comm_destroy(rest);
        dtrain_comm_destroy(group);
    }
    CHECK_EQ(sum(world, 1), 4);
    return 0;
}

TEST(a_rank_that_has_left_is_missed_by_calls_that_need_it_and_no_others)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        scene_begin(&s, 4, tcp);
        run_ranks(&s, one_leaves);
        scene_begin(&s, 4, tcp);
        on_threads(4, one_leaves, &s);
    }
}

/* Rank 2 of four leaves while the others are in a collective, or come to it; some of that has moved between them. */
static int cuts_off(dtrain_comm *world, scene *s)
{
    enum { MOST = 300000 };
    static const size_t counts[] = {1, 3000, MOST};
    static float in[4][MOST], out[4][MOST]; /* of ranks that share an address space */
    int rank = dtrain_comm_rank(world), next = rank == 3 ? 0 : rank == 1 ? 3 : 1, before = rank == 0 ? 3 : rank / 2;
    float *x = in[rank], *y = out[rank];
    dtrain_work *work;
    for (int i = 0; i < MOST; i++)
        x[i] = (float)(rank + 1);
    for (int round = 0; round < 12; round++) {
        dtrain_comm *group;
        size_t count = counts[round % 3];
        CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
        CHECK_EQ(sum(group, 1), 4);
        if (rank == 2 && round % 2 && !world->plane->in_process) /* in the middle of it */
            CHECK_EQ(dtrain_all_reduce_async(group, x, y, MOST, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        while (rank == 0 && round % 2 && !dtrain__group_has_left(group, 2)) /* or that would end well */
            usleep(100);
        for (int turn = 0; rank != 2 && turn < 3; turn++) {
            if (turn < 2)
                CHECK_EQ(dtrain_all_reduce(group, x, y, round % 2 ? MOST : count, DTRAIN_F32, DTRAIN_SUM),
                         DTRAIN_ERR_PEER_LOST);
            CHECK_CONTAINS(group->error.text, "rank 2 has left the group");
            CHECK_EQ(dtrain_exchange(group, x, count, next, y, count, before, DTRAIN_F32), DTRAIN_OK);
            CHECK(y[0] == (float)(before + 1) && y[count / 2] == y[0] && y[count - 1] == y[0]);
        }
        dtrain_comm_destroy(group);
    }
    (void)s;
    return 0;
}

TEST(a_collective_that_a_leaver_cuts_off_leaves_messages_between_others_whole)
{
    static const dtrain_algorithm algorithms[] = {DTRAIN_ALGORITHM_AUTO, DTRAIN_ALGORITHM_RING, DTRAIN_ALGORITHM_TREE};
    for (int i = 0; i < 3; i++) {
        scene s;
        play p = {cuts_off, &s};
        scene_begin(&s, 4, i % 2);
        s.desc.algorithm = algorithms[i];
        run_ranks(&s, cuts_off);
        CHECK_EQ(dtrain_run_threads(4, play_rank, &p, &s.desc), DTRAIN_OK);
    }
}

/* Rank 0 is told that rank 2 has left before rank 1 is: it gives up a collective in which rank 1 waits, and sends rank
 * 1 a message. Of that rank 1 learns why. */
static int told_by_a_message(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), number = 7;
    float x = 1;
    (void)s;
    CHECK_EQ(sum(world, 1), 3);
    if (rank == 0) {
        CHECK_EQ(dtrain_recv(world, &number, 1, DTRAIN_I32, 1), DTRAIN_OK);
        usleep(50000); /* until rank 1 waits in the collective, most of the time */
        dtrain__seat_skipped(world->seat, 2, world->number);
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_send(world, &number, 1, DTRAIN_I32, 1), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(world, &number, 1, DTRAIN_I32, 1), DTRAIN_OK);
    } else if (rank == 1) {
        CHECK_EQ(dtrain_send(world, &number, 1, DTRAIN_I32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank 2 has left the group");
        number = 0;
        CHECK_EQ(dtrain_recv(world, &number, 1, DTRAIN_I32, 0), DTRAIN_OK);
        CHECK_EQ(number, 7);
        CHECK_EQ(dtrain_send(world, &number, 1, DTRAIN_I32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_send(world, &number, 1, DTRAIN_I32, 2), DTRAIN_ERR_PEER_LOST);
    } else {
        usleep(300000);
    }
    return 0;
}

TEST(a_message_tells_of_a_leaver_whom_its_receiver_does_not_know_of)
{
    static const dtrain_algorithm algorithms[] = {DTRAIN_ALGORITHM_AUTO, DTRAIN_ALGORITHM_TREE};
    for (int i = 0; i < 4; i++) {
        scene s;
        scene_begin(&s, 3, i % 2);
        s.desc.algorithm = algorithms[i / 2];
        run_ranks(&s, told_by_a_message);
    }
}

/* Rank 1 leaves when rank 0 has left, to which it would have told so, and before anybody else can hear of it. */
static int two_leave(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), other = 5 - rank, x;
    (void)s;
    CHECK_EQ(sum(world, 1), 4);
    if (rank == 1)
        until_gone(world, 0);
    if (rank > 1) {
        until_gone(world, 1);
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(dtrain_exchange(world, &rank, 1, other, &x, 1, other, DTRAIN_I32), DTRAIN_OK);
            CHECK_EQ(x, other);
        }
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_I32, 0), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(world->error.text, "rank 0 has left the group");
        CHECK_EQ(dtrain_exchange(world, &rank, 1, other, &x, 1, other, DTRAIN_I32), DTRAIN_OK);
        if (rank == 2)
            CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_I32, 1), DTRAIN_ERR_PEER_LOST);
    }
    return 0;
}

TEST(ranks_that_leave_one_right_after_the_other_are_not_lost)
{
    scene s;
    scene_begin(&s, 4, 1);
    run_ranks(&s, two_leave);
}

enum { LEAVERS = 512 };

/* All ranks leave, in their order; the later, the fewer collectives they have ended. */
static void *all_leave(void *pointer)
{
    dtrain__membership *members = (dtrain__membership *)pointer;
    for (int rank = 0; rank < LEAVERS; rank++)
        dtrain__membership_leave(members, rank);
    return NULL;
}

/* Asks who missed a collective that the next rank to leave, and all after it, have not come to. */
TEST(of_ranks_that_leave_during_a_look_the_first_is_named)
{
    static dtrain__departure ranks[LEAVERS];
    dtrain__membership members;
    for (int round = 0; round < 400; round++) {
        pthread_t thread;
        int wrong = 0, next = 0;
        memset(&members, 0, sizeof members);
        memset(ranks, 0, sizeof ranks);
        members.size = LEAVERS;
        members.ranks = ranks;
        for (int rank = 0; rank < LEAVERS; rank++)
            ranks[rank].calls = (uint64_t)(LEAVERS - rank);
        pthread_create(&thread, NULL, all_leave, &members);
        while (next < LEAVERS) {
            int missing = dtrain__membership_misses(&members, (uint64_t)(LEAVERS - next + 1));
            wrong += missing >= 0 && missing != next;
            next = (int)__atomic_load_n(&members.leavers, __ATOMIC_SEQ_CST);
        }
        pthread_join(thread, NULL);
        CHECK_EQ(wrong, 0);
    }
}
