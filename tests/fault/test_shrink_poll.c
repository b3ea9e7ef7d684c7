/* Survivors make a group within a frame's budget: processes are killed before and meanwhile, one leaves while it is
 * pending, one never comes. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

enum { BUDGET_US = 300 };

static __thread double longest_ms;

/* One frame's part; returns the result. */
static dtrain_status frame(dtrain_comm *world, dtrain_comm **group)
{
    double began = now_s();
    dtrain_status status = dtrain_comm_shrink_poll(world, BUDGET_US, group);
    double ms = (now_s() - began) * 1e3;
    longest_ms = ms > longest_ms ? ms : longest_ms;
    usleep((useconds_t)(dtrain_random_u64((uint64_t)getpid(), (uint64_t)(began * 1e6)) % 3000));
    return status;
}

/* Calls it in every frame until there is a group of so many that works. */
static dtrain_comm *until_there(dtrain_comm *world, int size)
{
    dtrain_comm *group = NULL, *last = NULL;
    double until = now_s() + 15;
    while (now_s() < until) {
        dtrain_status status = frame(last != NULL ? last : world, &group);
        if (status != DTRAIN_OK)
            TEST_FAIL("rank %d: %s", dtrain_comm_rank(world), dtrain_last_error());
        if (status != DTRAIN_OK || group == NULL)
            continue;
        dtrain_comm_destroy(last);
        last = group;
        if (dtrain_comm_size(group) == size)
            return group;
    }
    TEST_FAIL("rank %d: no group of %d", dtrain_comm_rank(world), size);
    return last;
}

/* Rank 1 is killed, then rank 3 once its own vote is given; ranks 0 and 2 go on. */
static int deaths(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    dtrain_comm *group = NULL;
    dtrain_work *work = NULL;
    float x = 1;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 1)
        raise(SIGKILL);
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    while (!dtrain_work_done(work))
        if (dtrain_comm_poll(world, BUDGET_US) != DTRAIN_OK)
            break;
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_PEER_LOST);
    if (rank == 3) {
        CHECK_EQ(frame(world, &group), DTRAIN_OK);
        raise(SIGKILL);
    }
    group = until_there(world, 2);
    CHECK_EQ(sum(group, rank), 2);
    if (getenv("SHRINK_LONGEST") != NULL)
        fprintf(stderr, "rank %d: longest call %.3f ms\n", rank, longest_ms);
    dtrain_comm_destroy(group);
    return 0;
}

static void start(scene *s, int ranks, int way, rank_body body, int killed)
{
    pid_t pids[MAX_PROCESSES];
    for (int rank = 0; rank < ranks; rank++)
        pids[rank] = start_rank(s, rank, body);
    for (int rank = 0; rank < ranks; rank++)
        CHECK_EQ(end_of(pids[rank], 30), killed >> rank & 1 ? 128 + SIGKILL : 0);
    if (way == UNIX)
        unlink(s->root + 5);
}

TEST(killed_before_and_meanwhile)
{
    for (int way = UNIX; way < WAYS; way++)
        for (int poll = 0; poll < 2; poll++) {
            scene s;
            scene_begin_by(&s, 4, way);
            s.desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
            start(&s, 4, way, deaths, 1 << 1 | 1 << 3);
        }
}

/* Nobody is lost; rank 2 leaves while the shrink is pending, rank 1 calls the other form. */
static int leaver(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), size = dtrain_comm_size(world);
    dtrain_comm *group = NULL, *own = NULL;
    size_t bytes;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &own), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 2) {
        CHECK_EQ(dtrain_comm_shrink_poll(own, 0, &group), DTRAIN_OK);
        CHECK(group == NULL);
        dtrain_comm_destroy(own);
        CHECK_EQ(dtrain_store_set(world, "left", NULL, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        return 0;
    }
    CHECK_EQ(dtrain_comm_shrink_poll(own, -1, &group), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_shrink_poll(own, 0, NULL), DTRAIN_ERR_INVALID);
    if (rank == 1) { /* the others wait for this one */
        CHECK_EQ(dtrain_store_wait(world, "left", NULL, 0, &bytes), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_shrink(own, &group), DTRAIN_OK);
    }
    for (int first = 1; rank != 1 && group == NULL; first = 0) {
        CHECK_EQ(frame(own, &group), DTRAIN_OK);
        if (first) {
            CHECK(group == NULL);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
    }
    CHECK_EQ(dtrain_comm_size(group), size - 1);
    CHECK_EQ(sum(group, 1), size - 1);
    dtrain_comm_destroy(group);
    dtrain_comm_destroy(own);
    return 0;
}

TEST(who_leaves_while_it_is_pending_is_not_waited_for)
{
    for (int way = UNIX; way < WAYS; way++) {
        scene s;
        scene_begin_by(&s, 4, way);
        s.desc.progress = way % 2 ? DTRAIN_PROGRESS_THREAD : DTRAIN_PROGRESS_POLL;
        run_ranks(&s, leaver);
    }
    on_threads(4, leaver, NULL);
}

/* Rank 1 comes too late for the first attempt. */
static int late(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    dtrain_comm *group = NULL;
    dtrain_status status = DTRAIN_OK;
    (void)s;
    world->desc.timeout_ms = 100;
    while (rank == 0 && status == DTRAIN_OK && group == NULL)
        status = frame(world, &group);
    if (rank == 0) {
        CHECK_EQ(status, DTRAIN_ERR_TIMEOUT);
        CHECK_CONTAINS(world->error.text, "for rank 1 to call it as well or to be lost; it can be called again");
    }
    world->desc.timeout_ms = test_ms(20000);
    if (rank == 0)
        CHECK_EQ(dtrain_store_set(world, "late", NULL, 0), DTRAIN_OK);
    size_t bytes;
    CHECK_EQ(dtrain_store_wait(world, "late", NULL, 0, &bytes), DTRAIN_OK);
    group = until_there(world, 2);
    CHECK_EQ(sum(group, 1), 2);
    dtrain_comm_destroy(group);
    return 0;
}

TEST(a_deadline_runs_from_the_first_call)
{
    scene s;
    on_threads(2, late, NULL);
    for (int way = UNIX; way <= OWN; way += OWN) {
        scene_begin_by(&s, 2, way);
        s.desc.progress = DTRAIN_PROGRESS_POLL;
        run_ranks(&s, late);
    }
}
