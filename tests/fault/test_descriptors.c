/* At the limit of descriptors a group works or ends on all its ranks at once, with a text that says which limit. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#include <sys/resource.h>

static int open_files(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* Leaves this process `more` descriptors beside those that it has; -1: as many as before. */
static void leave(int more)
{
    static rlim_t before;
    struct rlimit limit;
    int fd = 0;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    before = before == 0 ? limit.rlim_cur : before;
    for (int left = more; more >= 0 && (left > 0 || fcntl(fd, F_GETFD) >= 0); fd++)
        left -= fcntl(fd, F_GETFD) < 0;
    limit.rlim_cur = more < 0 ? before : (rlim_t)fd;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

static dtrain_status sum_of(dtrain_comm *group)
{
    int one[8] = {1, 1, 1, 1, 1, 1, 1, 1}, out[8];
    dtrain_status status = dtrain_all_reduce(group, one, one, 1, DTRAIN_I32, DTRAIN_SUM);
    return status == DTRAIN_OK ? dtrain_all_to_all(group, one, out, 1, DTRAIN_I32) : status;
}

/* Rank 1 has from none to 9 descriptors for a group of all four. */
static int at_the_limit(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), bad = 0, good = 0;
    (void)s;
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(sum_of(world), DTRAIN_OK); /* connects all */
    for (int more = 0; more < 10; more++) {
        dtrain_comm *group = NULL;
        int worst[2];
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (rank == 1)
            leave(more);
        dtrain_status status = dtrain_comm_split(world, 0, 0, &group);
        if (status == DTRAIN_OK)
            status = sum_of(group);
        if (status != DTRAIN_OK) {
            CHECK_EQ(status, DTRAIN_ERR_IO);
            CHECK_CONTAINS(dtrain_last_error(), "rank 1");
            CHECK_CONTAINS(dtrain_last_error(), "RLIMIT_NOFILE");
        }
        if (rank == 1)
            leave(-1);
        worst[0] = status == DTRAIN_OK, worst[1] = -worst[0];
        CHECK_EQ(dtrain_all_reduce(world, worst, worst, 2, DTRAIN_I32, DTRAIN_MAX), DTRAIN_OK);
        CHECK_EQ(worst[0], -worst[1]); /* all alike */
        good += status == DTRAIN_OK;
        bad += status != DTRAIN_OK;
        dtrain_comm_destroy(group);
    }
    CHECK(good > 0 && bad > 0);
    return 0;
}

TEST(a_group_without_descriptors_ends_on_all_ranks_and_names_the_limit)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        scene_begin(&s, 4, tcp);
        s.desc.timeout_ms = test_ms(6000);
        run_ranks(&s, at_the_limit);
    }
}

/* As the manual of dtrain_comm_split says. */
static int costs_seven(dtrain_comm *world, scene *s)
{
    dtrain_comm *group;
    (void)s;
    CHECK_EQ(sum_of(world), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    int before = open_files();
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    CHECK_EQ(sum_of(group), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(group), DTRAIN_OK);
    CHECK(open_files() - before <= 7);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(group);
    return 0;
}

TEST(a_group_of_four_on_one_host_takes_at_most_seven_descriptors)
{
    scene s;
    scene_begin(&s, 4, 0);
    if (!scene_has_unix() || dtrain__without("proc")) {
        printf("skipped: without unix sockets and /proc a group takes others\n");
        return;
    }
    run_ranks(&s, costs_seven);
}
