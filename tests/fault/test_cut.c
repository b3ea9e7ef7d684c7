/* ---- >>test_cut ----
 * A network that is cut in two. One rank's connections are all reset, and each new one is refused, as by a firewall,
 * while every process runs on: one part alone goes on. Deaths that the system proves stop nobody on one machine. */
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "local_sgd_toy.h"

#ifdef __linux__
#include <errno.h>
#include <sys/syscall.h>

static int is_cut; /* this process reaches no other one */

/* Stands in for the system's. */
int connect(int fd, const struct sockaddr *to, socklen_t bytes)
{
    if (is_cut && to->sa_family == AF_INET) {
        errno = ECONNREFUSED;
        return -1;
    }
    return (int)syscall(SYS_connect, fd, to, bytes);
}

/* Resets all connections of this process over TCP, for both sides, and closes where it listens. */
static void cut_off(void)
{
    struct sockaddr none, own;
    memset(&none, 0, sizeof none);
    none.sa_family = AF_UNSPEC;
    __atomic_store_n(&is_cut, 1, __ATOMIC_SEQ_CST);
    for (int fd = 0; fd < 256; fd++) {
        socklen_t bytes = sizeof own;
        if (getsockname(fd, &own, &bytes) == 0 && own.sa_family == AF_INET)
            CHECK_EQ(connect(fd, &none, sizeof none), 0);
    }
}

/* The last rank of all is cut off. */
typedef struct cut {
    int agrees; /* they agree, instead of shrinking */
} cut;

static int among_cut(dtrain_comm *world, scene *s)
{
    const cut *c = (const cut *)s->user;
    int rank = dtrain_comm_rank(world), last = s->ranks - 1, any = s->desc.quorum == DTRAIN_QUORUM_ANY;
    int32_t here = 1;
    uint64_t flags = 7;
    char counted[64];
    dtrain_comm *rest = NULL;
    dtrain_status status;
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == last)
        cut_off();
    do
        status = dtrain_barrier(world);
    while (status == DTRAIN_OK);
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    status = c->agrees ? dtrain_comm_agree(world, &flags) : dtrain_comm_shrink(world, &rest);
    CHECK_EQ(status, rank < last || any ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST);
    if (status == DTRAIN_ERR_PEER_LOST) {
        snprintf(counted, sizeof counted, "rank %d: 1 of %d ranks are here; the others may still run", rank, s->ranks);
        CHECK_CONTAINS(dtrain_last_error(), counted);
        CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_QUORUM_ANY");
    } else if (!c->agrees) {
        CHECK_EQ(dtrain_comm_size(rest), rank < last ? last : 1);
        CHECK_EQ(dtrain_all_reduce(rest, &here, &here, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(here, rank < last ? last : 1);
    }
    scene_meet(s->ranks); /* until then every process runs */
    dtrain_comm_destroy(rest);
    return 0;
}

TEST(one_part_alone_goes_on_where_resets_and_refusals_cut_the_network)
{
    cut shrinks = {0}, agrees = {1};
    scene s;
    for (int ranks = 2; ranks <= 4; ranks++) { /* of two halves rank 0 goes on */
        scene_begin(&s, ranks, 1);
        s.user = ranks == 3 ? &agrees : &shrinks;
        run_ranks(&s, among_cut);
    }
}

TEST(any_quorum_lets_both_parts_go_on)
{
    cut shrinks = {0}, agrees = {1};
    scene s;
    for (int turn = 0; turn < 2; turn++) {
        scene_begin(&s, 3, 1);
        s.user = turn ? &agrees : &shrinks;
        s.desc.quorum = DTRAIN_QUORUM_ANY;
        run_ranks(&s, among_cut);
    }
}

static int went_alone; /* the log has said why */

static void hears_why(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    if (strstr(text, "rank 3 goes on alone: ") != NULL && strstr(text, "1 of 4 ranks are here") != NULL)
        __atomic_store_n(&went_alone, 1, __ATOMIC_SEQ_CST);
}

/* The last rank's network is cut between rounds of local SGD. */
static int trains_while_cut(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), last = s->ranks - 1, left = rank == last ? 1 : last;
    double until = now_s() + 20;
    dtrain_local_sgd *local;
    dtrain_local_sgd_desc desc;
    toy t;
    memset(&desc, 0, sizeof desc);
    desc.steps = 2;
    desc.window_ms = 5;
    dtrain_set_log(hears_why, NULL);
    toy_begin(&t, 20);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 0; now_s() < until && dtrain_local_sgd_get_stats(local).left != left; step++) {
        if (rank == last && step == 20)
            cut_off();
        toy_step(&t, 1, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        usleep(1000);
    }
    CHECK_EQ(dtrain_local_sgd_get_stats(local).left, left);
    CHECK_EQ(__atomic_load_n(&went_alone, __ATOMIC_SEQ_CST), rank == last);
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    scene_meet(s->ranks);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return 0;
}

TEST(a_member_of_local_sgd_that_is_cut_off_trains_alone)
{
    scene s;
    scene_begin(&s, 4, 1);
    run_ranks(&s, trains_while_cut);
}
#endif

/* Ranks of a mask are killed. */
typedef struct killing {
    int victims, goes_on;
} killing;

static int among_killed(dtrain_comm *world, scene *s)
{
    const killing *k = (const killing *)s->user;
    int left = s->ranks - __builtin_popcount((unsigned)k->victims);
    int32_t here = 1;
    uint64_t flags = 7;
    dtrain_comm *rest = NULL;
    dtrain_status status;
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (k->victims >> dtrain_comm_rank(world) & 1)
        raise(SIGKILL);
    do
        status = dtrain_barrier(world);
    while (status == DTRAIN_OK);
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    usleep(100000); /* else one may be found dead only after the vote */
    CHECK_EQ(dtrain_comm_agree(world, &flags), k->goes_on ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST);
    CHECK_EQ(dtrain_comm_shrink(world, &rest), k->goes_on ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST);
    if (k->goes_on) {
        CHECK_EQ(dtrain_comm_size(rest), left);
        CHECK_EQ(dtrain_all_reduce(rest, &here, &here, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(here, left);
    } else {
        CHECK_CONTAINS(dtrain_last_error(), "2 of 4 ranks are here");
    }
    dtrain_comm_destroy(rest);
    return 0;
}

static void with_killed(int ranks, int way, int hosts, dtrain_quorum quorum, int victims, int goes_on)
{
    killing k = {victims, goes_on};
    scene s;
    pid_t pids[4];
    scene_begin_by(&s, ranks, way);
    s.user = &k;
    s.desc.quorum = quorum;
    if (s.own != NULL)
        s.own->hosts = hosts;
    for (int rank = 0; rank < ranks; rank++)
        pids[rank] = start_rank(&s, rank, among_killed);
    for (int rank = 0; rank < ranks; rank++) {
        int end = end_of(pids[rank], 30);
        if (end != (victims >> rank & 1 ? 128 + SIGKILL : 0))
            TEST_FAIL("way %d, victims 0x%x: rank %d ended with %d", way, (unsigned)victims, rank, end);
    }
}

TEST(whoever_is_left_on_one_machine_goes_on_after_deaths)
{
    static const int ways[] = {UNIX, TCP, OWN_ASKED, OWN_HOST};
    for (int i = 0; i < 4; i++) {
        for (int victim = 0; victim < 2; victim++)
            with_killed(2, ways[i], ways[i] == OWN_HOST, DTRAIN_QUORUM_MAJORITY, 1 << victim, 1);
        with_killed(4, ways[i], ways[i] == OWN_HOST, DTRAIN_QUORUM_MAJORITY, 1 | 2 | 4, 1);
    }
}

TEST(deaths_on_another_machine_are_no_votes)
{
    with_killed(4, OWN_HOST, 2, DTRAIN_QUORUM_MAJORITY, 1 | 2, 0);
    with_killed(4, OWN_HOST, 2, DTRAIN_QUORUM_MAJORITY, 4 | 8, 1); /* rank 0 is here */
    with_killed(4, OWN_HOST, 2, DTRAIN_QUORUM_ANY, 1 | 2, 1);
}
