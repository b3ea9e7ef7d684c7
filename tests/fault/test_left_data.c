/* ---- >>test_left_data ----
 * What a rank had sent before it left or died is received, also by a rank that was sending to it. Every lane, sealed
 * connections, and links that may come back keep that. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

enum { WORDS = 250, UNREAD = 16 << 20 };

/* What rank 0 does after its message: it leaves, or it is killed. */
typedef struct parting {
    int killed;
    size_t count; /* of the message */
} parting;

static int32_t word(size_t i)
{
    return (int32_t)(i * 7 + 3);
}

/* Comes back when this rank knows that rank 0 is gone. */
static void until_gone(dtrain_comm *world)
{
    dtrain__hub *hub = CHANNEL(world)->hub;
    for (int gone = 0; !gone; usleep(1000)) {
        dtrain__os_lock(&hub->mutex);
        gone = hub->members[0].gone != DTRAIN__PRESENT;
        dtrain__os_unlock(&hub->mutex);
    }
}

/* Rank 1 is sending to rank 0, which receives nothing, when that ends after a message of its own. */
static int crossing(dtrain_comm *world, scene *s)
{
    const parting *p = (const parting *)s->user;
    int32_t *x = (int32_t *)calloc(p->count, sizeof *x);
    char *unread = (char *)calloc(UNREAD, 1);
    dtrain_work *work;
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0) {
        for (size_t i = 0; i < p->count; i++)
            x[i] = word(i);
        scene_meet(s->ranks);
        CHECK_EQ(dtrain_send(world, x, p->count, DTRAIN_I32, 1), DTRAIN_OK);
        usleep(p->killed ? 50000 : 0); /* the system carries what was sent to the other process */
        if (p->killed)
            kill(getpid(), SIGKILL);
    } else {
        CHECK_EQ(dtrain_send_async(world, unread, UNREAD, DTRAIN_U8, 0, &work), DTRAIN_OK);
        usleep(50000); /* it fills the connection */
        scene_meet(s->ranks);
        until_gone(world);
        dtrain_status sent = dtrain_work_wait(work);
        CHECK(sent == DTRAIN_ERR_PEER_LOST || (sent == DTRAIN_OK && !p->killed)); /* one that leaves drops what comes */
        CHECK_EQ(dtrain_recv(world, x, p->count, DTRAIN_I32, 0), DTRAIN_OK);
        for (size_t i = 0; i < p->count; i++)
            if (x[i] != word(i)) {
                TEST_FAIL("element %zu is %d", i, (int)x[i]);
                break;
            }
        CHECK_EQ(dtrain_recv(world, x, p->count, DTRAIN_I32, 0), DTRAIN_ERR_PEER_LOST);
    }
    free(unread);
    free(x);
    return 0;
}

static const char *const ways[] = {"tcp", "unix", "shm"};

static void cross(int way, int killed, size_t count, int connections, int64_t reconnect_ms, int secure)
{
    parting p = {killed, count};
    scene s;
    scene_begin(&s, 2, way == 0);
    s.user = &p;
    s.transport = ways[way];
    s.desc.connections = connections;
    s.desc.reconnect_ms = reconnect_ms;
    s.desc.secure = secure;
    s.desc.token = "what a sealed connection takes";
    run_ranks_but(&s, killed ? 0 : -1, crossing);
}

TEST(what_a_rank_sent_before_it_left_or_died_is_received_by_one_that_was_sending_to_it)
{
    for (int way = 0; way < 3; way++)
        for (int killed = 0; killed < 2; killed++)
            cross(way, killed, WORDS, 1, 0, 0);
}

TEST(so_it_is_over_several_connections_sealed_ones_and_ones_that_may_come_back)
{
    for (int killed = 0; killed < 2; killed++) {
        cross(0, killed, WORDS, 3, 0, 0);
        cross(0, killed, WORDS, 1, 0, 1);
        cross(1, killed, WORDS, 1, 1000, 0);
        cross(0, killed, WORDS, 1, 1000, 1);
    }
}

TEST(a_message_that_fills_the_connection_outlives_a_rank_that_leaves)
{
    cross(0, 0, 100000, 1, 0, 0);
    cross(0, 0, 100000, 3, 0, 0);
}
