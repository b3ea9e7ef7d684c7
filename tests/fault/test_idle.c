/* ---- >>test_idle ----
 * A firewall forgets a connection that was idle: both processes run and speak to the leader, but their data connection
 * carries nothing. A socket filter that drops all packets stands for the firewall. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#ifdef __linux__
#include <linux/filter.h>
#include <netinet/tcp.h>

static int option(int fd, int level, int name)
{
    int value = -1;
    socklen_t bytes = sizeof value;
    CHECK_EQ(getsockopt(fd, level, name, &value, &bytes), 0);
    return value;
}

static dtrain__lane *lane_to_other(dtrain_comm *world)
{
    return &CHANNEL(world)->peers[1 - dtrain_comm_rank(world)].lanes[0];
}

/* The data connection of the world lets no packet in from here on. */
static void forget(dtrain_comm *world)
{
    struct sock_filter drop = {BPF_RET | BPF_K, 0, 0, 0};
    struct sock_fprog program = {1, &drop};
    CHECK_EQ(setsockopt(lane_to_other(world)->stream.fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
}

static int is_kept_alive(dtrain_comm *world, scene *s)
{
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    int fd = lane_to_other(world)->stream.fd;
    CHECK_EQ(option(fd, SOL_SOCKET, SO_KEEPALIVE), 1);
    CHECK_EQ(option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 1);
    CHECK_EQ(option(fd, IPPROTO_TCP, TCP_KEEPCNT), 8);
    CHECK_EQ(option(fd, IPPROTO_TCP, TCP_KEEPINTVL), 30);   /* timeout_ms 240 s over 8 */
    CHECK_EQ(option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT), 0); /* it would end one whose peer does not read */
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(an_idle_connection_says_every_second_that_it_is_there)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.timeout_ms = 240000;
    run_ranks(&s, is_kept_alive);
}

static int sums_after(dtrain_comm *world, scene *s)
{
    int32_t one = 1;
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    forget(world);
    scene_meet(s->ranks);
    dtrain_status status = dtrain_all_reduce(world, &one, &one, 1, DTRAIN_I32, DTRAIN_SUM);
    if (s->desc.reconnect_ms > 0) {
        CHECK_EQ(status, DTRAIN_OK);
        CHECK_EQ(one, 2);
        CHECK(lane_to_other(world)->links > 1);
        return 0;
    }
    const char *text = dtrain_last_error();
    CHECK_CONTAINS(text, "127.0.0.1:"); /* the connection */
    CHECK_CONTAINS(text, " to 127.0.0.1:");
    CHECK_CONTAINS(text, "firewall");
    CHECK_CONTAINS(text, "reconnect_ms");
    CHECK(strstr(text, "every rank must call it") == NULL);
    CHECK_EQ(status, s->desc.heartbeat_ms < s->desc.timeout_ms ? DTRAIN_ERR_PEER_LOST : DTRAIN_ERR_TIMEOUT);
    scene_meet(s->ranks);
    return 0;
}

static void forgotten(int64_t heartbeat_ms, int64_t timeout_ms, int64_t reconnect_ms)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.heartbeat_ms = heartbeat_ms;
    s.desc.timeout_ms = timeout_ms;
    s.desc.reconnect_ms = reconnect_ms;
    run_ranks(&s, sums_after);
}

TEST(a_connection_that_is_forgotten_is_made_again)
{
    forgotten(1000, 20000, 10000);
}

TEST(without_reconnect_ms_a_forgotten_connection_is_named_after_heartbeat_ms)
{
    forgotten(1000, 20000, 0);
}

TEST(at_a_deadline_the_connection_is_named_and_not_the_program_if_all_are_in_the_call)
{
    forgotten(20000, 3000, 0);
}
#else
TEST(idle_connections_cannot_be_cut_here)
{
    puts("skipped: this system has no socket filters");
}
#endif
