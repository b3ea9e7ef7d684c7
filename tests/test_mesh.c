/* Ranks in rows and columns: who differs where, how far a loss reaches, and one norm over parts that differ. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

static int in_a_mesh(dtrain_comm *world, scene *s)
{
    const dtrain_mesh_dim dims[] = {{"data", 0}, {"pipe", 3}, {"tensor", 2}};
    int rank = dtrain_comm_rank(world);
    dtrain_mesh *mesh;
    (void)s;
    CHECK_EQ(dtrain_mesh_create(&mesh, world, dims, 3), DTRAIN_OK); /* rank = 6 data + 2 pipe + tensor */
    CHECK_EQ(dtrain_mesh_size(mesh, "data"), 2);
    CHECK_EQ(dtrain_mesh_size(mesh, "pipe"), 3);
    CHECK_EQ(dtrain_mesh_index(mesh, "data"), rank / 6);
    CHECK_EQ(dtrain_mesh_index(mesh, "pipe"), rank / 2 % 3);
    CHECK_EQ(dtrain_mesh_index(mesh, "tensor"), rank % 2);
    CHECK_EQ(dtrain_comm_rank(dtrain_mesh_group(mesh, "pipe")), rank / 2 % 3);
    CHECK_EQ(sum(dtrain_mesh_group(mesh, "data"), rank), 2 * (rank % 6) + 6);
    CHECK_EQ(sum(dtrain_mesh_group(mesh, "pipe"), rank), 3 * (rank / 6 * 6 + rank % 2) + 6);
    CHECK_EQ(sum(dtrain_mesh_group(mesh, "tensor"), rank), 2 * (rank / 2 * 2) + 1);
    CHECK(dtrain_mesh_group(mesh, "expert") == NULL);
    CHECK_CONTAINS(dtrain_last_error(), "the mesh has no dimension \"expert\"; it has data, pipe, tensor");
    CHECK_EQ(dtrain_mesh_index(mesh, NULL), -1);
    CHECK_EQ(dtrain_mesh_size(NULL, "data"), 0);
    dtrain_mesh_destroy(mesh);
    dtrain_mesh_destroy(NULL);
    return 0;
}

TEST(a_mesh_has_the_group_along_each_dimension)
{
    scene s;
    on_threads(12, in_a_mesh, NULL);
    scene_begin(&s, 12, 0);
    run_ranks(&s, in_a_mesh);
}

static int in_no_mesh(dtrain_comm *world, scene *s)
{
    const dtrain_mesh_dim same[] = {{"a", 2}, {"a", 2}}, open[] = {{"a", 0}, {"b", 0}}, small[] = {{"a", 3}, {"b", 1}};
    const dtrain_mesh_dim large[] = {{"a", 2}, {"b", 3}}, odd[] = {{"a", 3}, {"b", 0}}, nameless[] = {{"", 4}};
    const dtrain_mesh_dim good[] = {{"a", 2}, {"b", 2}}, turned[] = {{"b", 2}, {"a", 2}};
    int rank = dtrain_comm_rank(world);
    dtrain_mesh *mesh;
    (void)s;
    CHECK_EQ(dtrain_mesh_create(&mesh, world, same, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world), "dimension 1 (a, size 2) has a name that is taken");
    CHECK(mesh == NULL);
    CHECK_EQ(dtrain_mesh_create(&mesh, world, open, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world), "one dimension alone may have 0");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, small, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world), "the sizes multiply to 3, and the world has 4 ranks");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, large, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world), "dimension 1 (b, size 3) makes the mesh larger than the world");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, odd, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world), "multiply to 3, and the world has 4 ranks, which that does not divide");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, nameless, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_mesh_create(&mesh, world, NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world), "0 dimensions; give at least one");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, rank == 2 ? turned : good, 2), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_comm_error(world), "rank 2 gave other dimensions than rank 0");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, rank == 1 ? large : good, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world),
                   rank == 1 ? "larger than the world" : "rank 1 gave dimensions that cannot");
    CHECK_EQ(dtrain_mesh_create(NULL, world, good, 2), DTRAIN_ERR_INVALID);
    CHECK_EQ(sum(world, 1), 4);
    return 0;
}

TEST(dimensions_that_cannot_be_are_named)
{
    on_both(4, in_no_mesh);
}

static int in_joined_groups(dtrain_comm *world, scene *s)
{
    const dtrain_mesh_dim dims[] = {{"data", 2}, {"pipe", 3}, {"tensor", 2}};
    const char *model[] = {"pipe", "tensor"}, *outer[] = {"tensor", "data"}, *wrong[] = {"pipe", "expert"};
    int rank = dtrain_comm_rank(world);
    dtrain_mesh *mesh;
    dtrain_comm *group, *half;
    (void)s;
    CHECK_EQ(dtrain_mesh_create(&mesh, world, dims, 3), DTRAIN_OK); /* rank = 6 data + 2 pipe + tensor */
    CHECK_EQ(dtrain_mesh_join(mesh, world, model, 2, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(group), 6);
    CHECK_EQ(dtrain_comm_rank(group), rank % 6);
    CHECK_EQ(sum(group, rank), rank < 6 ? 15 : 51);
    dtrain_comm_destroy(group);
    CHECK_EQ(dtrain_mesh_join(mesh, world, outer, 2, &group), DTRAIN_OK); /* 2 pipe + {0, 1, 6, 7} */
    CHECK_EQ(dtrain_comm_rank(group), rank / 6 * 2 + rank % 2);
    CHECK_EQ(sum(group, rank), 4 * (rank / 2 % 3 * 2) + 14);
    dtrain_comm_destroy(group);
    CHECK_EQ(dtrain_mesh_join(mesh, world, wrong, 2, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "no dimension \"expert\"; it has data, pipe, tensor");
    CHECK(group == NULL);
    CHECK_EQ(dtrain_mesh_join(mesh, world, model, 0, &group), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_split(world, rank % 2, 0, &half), DTRAIN_OK);
    CHECK_EQ(dtrain_mesh_join(mesh, half, model, 2, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the group has 6 ranks and the mesh 12");
    dtrain_comm_destroy(half);
    dtrain_mesh_destroy(mesh);
    return 0;
}

TEST(groups_over_several_dimensions_join)
{
    scene s;
    on_threads(12, in_joined_groups, NULL);
    scene_begin(&s, 12, 0);
    run_ranks(&s, in_joined_groups);
}

/* What the victim leaves behind, to be freed when all threads have ended. */
typedef struct remains {
    dtrain_mesh *mesh;
    dtrain_comm *child;
} remains;

/* A mesh of 2 x 2 x 2 of which rank 5 goes. Rank r waits for its tensor neighbour, which waits for another. */
static int with_a_loss(dtrain_comm *world, remains *left, const char *text)
{
    const dtrain_mesh_dim dims[] = {{"data", 2}, {"pipe", 2}, {"tensor", 2}};
    const char *const names[] = {"data", "pipe", "tensor"};
    int rank = dtrain_comm_rank(world);
    char key[32];
    size_t bytes;
    float x = 1;
    dtrain_mesh *mesh;
    dtrain_comm *child, *free_group;
    CHECK_EQ(dtrain_mesh_create(&mesh, world, dims, 3), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_duplicate(dtrain_mesh_group(mesh, "tensor"), &child), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank == 5 ? -1 : 0, 0, &free_group), DTRAIN_OK);
    CHECK_EQ(sum(world, 1), 8);
    snprintf(key, sizeof key, "%d has come so far", rank);
    CHECK_EQ(dtrain_store_set(world, key, NULL, 0), DTRAIN_OK);
    for (int other = 0; rank == 5 && other < 8; other++) {
        snprintf(key, sizeof key, "%d has come so far", other);
        CHECK_EQ(dtrain_store_wait(world, key, NULL, 0, &bytes), DTRAIN_OK);
    }
    if (rank == 5) {
        left->mesh = mesh;
        left->child = child;
        return 1;
    }
    CHECK_EQ(dtrain_recv(child, &x, 1, DTRAIN_F32, 1 - dtrain_comm_rank(child)), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_comm_error(child), text);
    for (int i = 0; i < 3; i++) {
        dtrain_status status = DTRAIN_OK;
        while (status == DTRAIN_OK) /* the news comes to one group after the other */
            status = dtrain_barrier(dtrain_mesh_group(mesh, names[i]));
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_comm_error(dtrain_mesh_group(mesh, names[i])), text);
    }
    CHECK_EQ(sum(free_group, 1), 7); /* of no mesh: goes on */
    dtrain_comm_destroy(free_group);
    dtrain_comm_destroy(child);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static int killed_at_5(dtrain_comm *world, scene *s)
{
    remains left;
    (void)s;
    if (with_a_loss(world, &left, "rank 5 of the world"))
        kill(getpid(), SIGKILL);
    return 0;
}

TEST(a_killed_process_ends_every_group_of_its_mesh)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        pid_t pids[8];
        char path[300];
        scene_begin(&s, 8, tcp);
        for (int rank = 0; rank < 8; rank++)
            pids[rank] = start_rank(&s, rank, killed_at_5);
        for (int rank = 0; rank < 8; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == 5 ? 128 + SIGKILL : 0);
        snprintf(path, sizeof path, "%s.5", s.root + 5); /* what the killed rank could not remove */
        if (!tcp)
            unlink(path);
    }
}

static dtrain_status gives_up_at_5(dtrain_comm *world, void *user)
{
    if (with_a_loss(world, (remains *)user, "rank 5: recv: the group is NULL"))
        return dtrain_recv(NULL, NULL, 0, DTRAIN_F32, 0); /* any error */
    return DTRAIN_OK;
}

TEST(a_thread_that_gives_up_ends_every_group_of_its_mesh)
{
    remains left = {NULL, NULL};
    CHECK_EQ(dtrain_run_threads(8, gives_up_at_5, &left, NULL), DTRAIN_ERR_INVALID);
    dtrain_comm_destroy(left.child);
    dtrain_mesh_destroy(left.mesh);
}
