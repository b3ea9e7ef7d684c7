/* What a caller waits is counted once in each group from which the waiting one was made, and in no other. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

enum { LATE_US = 5000 };

/* The last rank comes late to a barrier of the group; returns what the others waited, as each of `groups` has it. */
static void wait_in(dtrain_comm *group, int late, dtrain_comm *const *groups, int count, int64_t *waited)
{
    for (int i = 0; i < count; i++)
        waited[i] = dtrain_comm_blocked_ns(groups[i]);
    if (late)
        usleep(LATE_US);
    CHECK_EQ(dtrain_barrier(group), DTRAIN_OK);
    for (int i = 0; i < count; i++)
        waited[i] = dtrain_comm_blocked_ns(groups[i]) - waited[i];
}

static int groups_of_groups(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), size = dtrain_comm_size(world), late = rank == size - 1;
    dtrain_comm *child, *grandchild, *sibling, *rest;
    int64_t waited[4];
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &child), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(child, 0, 0, &grandchild), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &sibling), DTRAIN_OK);
    dtrain_comm *all[] = {world, child, grandchild, sibling};
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    wait_in(grandchild, late, all, 4, waited);
    CHECK(waited[2] > 0);
    CHECK_EQ(waited[0], waited[2]); /* once, and the same */
    CHECK_EQ(waited[1], waited[2]);
    CHECK_EQ(waited[3], 0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(child); /* what is between may be gone */
    all[1] = grandchild;
    wait_in(grandchild, late, all, 3, waited);
    CHECK(waited[0] > 0);
    CHECK_EQ(waited[0], waited[1]);
    CHECK_EQ(dtrain_comm_shrink(grandchild, &rest), DTRAIN_OK);
    dtrain_comm_destroy(grandchild);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    all[1] = rest;
    wait_in(rest, late, all, 2, waited); /* what came in another's place adds to the same groups */
    CHECK(waited[0] > 0);
    CHECK_EQ(waited[0], waited[1]);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(rest);
    dtrain_comm_destroy(sibling);
    return 0;
}

TEST(a_groups_waits_are_those_of_the_groups_made_from_it_too)
{
    scene s;
    on_threads(1, groups_of_groups, NULL);
    on_threads(3, groups_of_groups, NULL);
    scene_begin(&s, 3, 0);
    run_ranks(&s, groups_of_groups);
}

/* A rank that is late makes the others wait inside FSDP, DDP and local SGD, whose groups are their own. */
static dtrain_status trainers(dtrain_comm *world, void *user)
{
    int late = dtrain_comm_rank(world) == 1;
    float data[64] = {0}, grad[64] = {0};
    dtrain_param table[1];
    dtrain_ddp_desc ddp_desc;
    dtrain_local_sgd_desc local_desc;
    dtrain_ddp *ddp = NULL;
    dtrain_local_sgd *local = NULL;
    int64_t before, waited;
    (void)user;
    memset(table, 0, sizeof table);
    memset(&ddp_desc, 0, sizeof ddp_desc);
    memset(&local_desc, 0, sizeof local_desc);
    table[0].name = "w";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = 64;
    table[0].data = data;
    table[0].grad = grad;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, table, 1, &ddp_desc), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    before = dtrain_comm_blocked_ns(world);
    if (late)
        usleep(LATE_US);
    CHECK_EQ(dtrain_ddp_begin(ddp, 1, 1.0), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
    waited = dtrain_comm_blocked_ns(world) - before;
    CHECK(waited > 0);
    dtrain_ddp_destroy(ddp);
    local_desc.steps = 1;
    local_desc.blocking = 1;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, table, 1, &local_desc), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    before = dtrain_comm_blocked_ns(world);
    if (late)
        usleep(LATE_US);
    CHECK_EQ(dtrain_local_sgd_step(local, 1.0), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    waited = dtrain_comm_blocked_ns(world) - before;
    CHECK(waited > 0);
    dtrain_local_sgd_destroy(local);
    return DTRAIN_OK;
}

TEST(a_group_counts_what_trainers_over_it_wait)
{
    CHECK_EQ(dtrain_run_threads(2, trainers, NULL, NULL), DTRAIN_OK);
}
