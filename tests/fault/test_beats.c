/* How often ranks that do nothing send heartbeats, and that each rank's own heartbeat_ms counts. */
#define _GNU_SOURCE
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

/* The bytes that have come from each member, which a world that does nothing gets as heartbeats. */
static void hear(dtrain_comm *world, uint64_t bytes[3])
{
    dtrain__hub *hub = CHANNEL(world)->hub;
    dtrain__os_lock(&hub->mutex);
    for (int rank = 0; rank < 3; rank++)
        bytes[rank] = hub->members[rank].control.received;
    dtrain__os_unlock(&hub->mutex);
}

/* The leader hears each other rank, and they hear the leader. */
static int idles(dtrain_comm *world, scene *s)
{
    uint64_t first[3], now[3];
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    hear(world, first);
    for (int rank = 0; rank < 3; rank++)
        do {
            usleep(1000);
            hear(world, now);
        } while ((dtrain_comm_rank(world) == 0) != (rank == 0) && now[rank] == first[rank]);
    scene_meet(s->ranks); /* all have heard a heartbeat */
    usleep(1100000);      /* what else has been sent has come */
    hear(world, first);
    usleep(2200000);
    hear(world, now);
    CHECK(memcmp(first, now, sizeof now) == 0);
    scene_meet(s->ranks);
    return 0;
}

/* The next heartbeats go after 15 s. */
TEST(a_heartbeat_ms_of_a_minute_sends_none_in_two_seconds)
{
    for (int way = UNIX; way <= TCP; way++) {
        scene s;
        scene_begin(&s, 3, way == TCP);
        s.desc.heartbeat_ms = 60000;
        s.desc.timeout_ms = -1;
        run_ranks(&s, idles);
    }
}

/* Rank 2 counts the heartbeats that come. */
static int counts(dtrain_comm *world, scene *s)
{
    uint64_t first[3], now[3], one;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (dtrain_comm_rank(world) == 2) {
        usleep(1100000); /* all have heard each other's heartbeat_ms */
        hear(world, first);
        do {
            usleep(1000);
            hear(world, now);
        } while (now[0] == first[0]);
        one = now[0] - first[0];
        int64_t began = dtrain__os_now_ns();
        usleep(3000000);
        hear(world, first);
        int64_t most = (dtrain__os_now_ns() - began) / 500000000 + 2;
        if ((first[0] - now[0]) / one > (uint64_t)most)
            TEST_FAIL("%llu heartbeats have come, at most %lld are due",
                      (unsigned long long)((first[0] - now[0]) / one), (long long)most);
    }
    scene_meet(s->ranks);
    return 0;
}

/* The leader sends one each 120 ms to rank 1, and each 500 ms to rank 2. */
TEST(an_impatient_rank_makes_nobody_send_more_heartbeats_to_others)
{
    pid_t pids[3];
    scene s;
    scene_begin(&s, 3, 0);
    for (int rank = 0; rank < 3; rank++) {
        s.desc.heartbeat_ms = rank == 0 ? 60000 : rank == 1 ? 480 : 2000;
        pids[rank] = start_rank(&s, rank, counts);
    }
    for (int rank = 0; rank < 3; rank++)
        CHECK_EQ(end_of(pids[rank], 30), 0);
}

static int waits(dtrain_comm *world, scene *s)
{
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    usleep(2000000);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

/* Two ranks of one world; rank 1 waits no longer than 480 ms for a sign of life. */
static void one_is_impatient(int impatient)
{
    pid_t pids[2];
    scene s;
    scene_begin(&s, 2, 0);
    for (int rank = 0; rank < 2; rank++) {
        s.desc.heartbeat_ms = rank == impatient ? 480 : 60000;
        pids[rank] = start_rank(&s, rank, waits);
    }
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(end_of(pids[rank], 30), 0);
}

TEST(a_rank_sends_heartbeats_as_often_as_its_peer_needs_them)
{
    one_is_impatient(0);
    one_is_impatient(1);
}
