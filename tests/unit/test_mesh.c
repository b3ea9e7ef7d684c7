/* Ranks in rows and columns: who differs where, how far a loss reaches, and one norm over parts that differ. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

#include <math.h>

static int in_a_mesh(dtrain_comm *world, scene *s)
{
    const dtrain_mesh_dim dims[] = {{"data", 0}, {"pipe", 3}, {"tensor", 2}};
    int rank = dtrain_comm_rank(world);
    dtrain_mesh *mesh;
    (void)s;
    CHECK_EQ(dtrain_mesh_create(&mesh, world, dims, 3), DTRAIN_OK); /* rank = 6 data + 2 pipe + tensor */
    CHECK_EQ(dtrain_comm_size(dtrain_mesh_group(mesh, "data")), 2);
    CHECK_EQ(dtrain_comm_size(dtrain_mesh_group(mesh, "pipe")), 3);
    CHECK_EQ(dtrain_comm_rank(dtrain_mesh_group(mesh, "data")), rank / 6);
    CHECK_EQ(dtrain_comm_rank(dtrain_mesh_group(mesh, "pipe")), rank / 2 % 3);
    CHECK_EQ(dtrain_comm_rank(dtrain_mesh_group(mesh, "tensor")), rank % 2);
    CHECK_EQ(sum(dtrain_mesh_group(mesh, "data"), rank), 2 * (rank % 6) + 6);
    CHECK_EQ(sum(dtrain_mesh_group(mesh, "pipe"), rank), 3 * (rank / 6 * 6 + rank % 2) + 6);
    CHECK_EQ(sum(dtrain_mesh_group(mesh, "tensor"), rank), 2 * (rank / 2 * 2) + 1);
    CHECK(dtrain_mesh_group(mesh, "expert") == NULL);
    CHECK_CONTAINS(dtrain_last_error(), "the mesh has no dimension \"expert\"; it has data, pipe, tensor");
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
    CHECK_CONTAINS(dtrain_last_error(), "dimension 1 (a, size 2) has a name that is taken");
    CHECK(mesh == NULL);
    CHECK_EQ(dtrain_mesh_create(&mesh, world, open, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "one dimension alone may have 0");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, small, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the sizes multiply to 3; expected all of the world's 4 ranks");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, large, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "dimension 1 (b, size 3) makes the mesh larger than the world");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, odd, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "multiply to 3; expected a divisor of the world's 4 ranks");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, nameless, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_mesh_create(&mesh, world, NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "0 dimensions; give at least one");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, rank == 2 ? turned : good, 2), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "dimension 0 is a of 2 on ranks 0, 1, 3, but b of 2 on rank 2; give every rank the same");
    CHECK_EQ(dtrain_mesh_create(&mesh, world, rank == 1 ? large : good, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(),
                   "rank 1: mesh_create on rank 1: dimension 1 (b, size 3) makes the mesh larger than the world");
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

static int in_no_joined_group(dtrain_comm *world, scene *s)
{
    const dtrain_mesh_dim dims[] = {{"a", 2}, {"b", 2}};
    const char *a[] = {"a"}, *b[] = {"b"}, *both[] = {"a", "b"}, *turned[] = {"b", "a"}, *none[] = {"z"};
    int rank = dtrain_comm_rank(world);
    dtrain_mesh *mesh;
    dtrain_comm *group, *other;
    (void)s;
    CHECK_EQ(dtrain_mesh_create(&mesh, world, dims, 2), DTRAIN_OK);
    CHECK_EQ(dtrain_mesh_join(mesh, world, rank == 3 ? a : b, 1, &group), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "dimension a is not joined on ranks 0 to 2, but joined on rank 3");
    CHECK(group == NULL);
    CHECK_EQ(dtrain_mesh_join(mesh, world, rank == 1 ? none : b, 1, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(),
                   "rank 1: mesh_join: the mesh has no dimension \"z\"; it has a, b");
    CHECK_EQ(dtrain_mesh_join(mesh, world, rank == 0 ? NULL : b, rank == 2 ? 0 : 1, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0: mesh_join on rank 0: 1 names at NULL; give at least one");
    CHECK_EQ(dtrain_mesh_join(NULL, world, b, 1, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "mesh is NULL");
    CHECK_EQ(dtrain_comm_split(world, 0, rank == 0 ? 9 : rank, &other), DTRAIN_OK); /* 1, 2, 3, 0 */
    CHECK_EQ(dtrain_mesh_join(mesh, other, a, 1, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "in the mesh: give the world that the mesh was made from");
    CHECK(group == NULL);
    CHECK_EQ(dtrain_mesh_join(mesh, world, rank == 1 ? turned : both, 2, &group), DTRAIN_OK);
    CHECK_EQ(sum(group, 1), 4);
    dtrain_comm_destroy(group);
    dtrain_comm_destroy(other);
    dtrain_mesh_destroy(mesh);
    return 0;
}

TEST(names_and_worlds_that_do_not_join_are_told_to_all)
{
    on_both(4, in_no_joined_group);
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
    CHECK_EQ(dtrain_comm_split(dtrain_mesh_group(mesh, "tensor"), 0, 0, &child), DTRAIN_OK);
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
    CHECK_CONTAINS(dtrain_last_error(), text);
    for (int i = 0; i < 3; i++) {
        dtrain_status status = DTRAIN_OK;
        while (status == DTRAIN_OK) /* the news comes to one group after the other */
            status = dtrain_barrier(dtrain_mesh_group(mesh, names[i]));
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), text);
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
        char path[320];
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

/* A model of two stages, 2 x 6 + 2 elements, of which tensor ranks have 3 each of w and the same 2 of b. With grads set
 * to g, the sum of squares is 9 (1 + 4 + 9 + 16) + 25 (1 + 4) = 395. */
typedef struct stage {
    dtrain_mesh *mesh;
    dtrain_comm *model;
    dtrain_param table[2];
    dtrain_param_part parts[2];
    float w[3], dw[3], b[2], db[2];
    dtrain_fsdp *fsdps[3];
    int objects, pipe, tensor;
} stage;

static void stage_create(stage *m, dtrain_comm *world, int objects)
{
    const dtrain_mesh_dim dims[] = {{"data", 2}, {"pipe", 2}, {"tensor", 2}};
    const char *names[] = {"pipe", "tensor"};
    dtrain_fsdp_desc desc;
    memset(m, 0, sizeof *m);
    memset(&desc, 0, sizeof desc);
    desc.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_mesh_create(&m->mesh, world, dims, 3), DTRAIN_OK);
    CHECK_EQ(dtrain_mesh_join(m->mesh, world, names, 2, &m->model), DTRAIN_OK);
    m->pipe = dtrain_comm_rank(dtrain_mesh_group(m->mesh, "pipe"));
    m->tensor = dtrain_comm_rank(dtrain_mesh_group(m->mesh, "tensor"));
    m->objects = objects;
    for (int i = 0; i < 2; i++) {
        dtrain_param *param = &m->table[i];
        param->name = i == 0 ? "w" : "b";
        param->dtype = DTRAIN_F32;
        param->shape[0] = i == 0 ? 3 : 2;
        param->unit = objects == 1 ? i : 0;
        param->data = i == 0 ? m->w : m->b;
        param->grad = i == 0 ? m->dw : m->db;
        param->part = &m->parts[i];
        m->parts[i].shape[0] = i == 0 ? 6 : 2;
    }
    m->parts[0].begin = 3 * (size_t)m->tensor;
    m->parts[1].copies = 2;
    m->parts[1].copy = m->tensor;
    for (int i = 0; i < objects; i++)
        CHECK_EQ(dtrain_fsdp_create(&m->fsdps[i], dtrain_mesh_group(m->mesh, "data"), m->table + i,
                                    objects == 1 ? 2 : 1, &desc),
                 DTRAIN_OK);
}

static void stage_backward(stage *m)
{
    const float g[3] = {1, 2, 2}, h[2] = {3, 4};
    for (int i = 0; i < 3; i++)
        m->dw[i] = g[i] * (float)(1 + 2 * m->pipe + m->tensor);
    for (int i = 0; i < 2; i++)
        m->db[i] = h[i] * (float)(1 + m->pipe);
    for (int i = 1; i >= 0; i--) {
        dtrain_fsdp *fsdp = m->fsdps[m->objects == 1 ? 0 : i];
        CHECK_EQ(dtrain_fsdp_gather(fsdp, m->objects == 1 ? i : 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, m->objects == 1 ? i : 0), DTRAIN_OK);
    }
}

static int one_norm(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    (void)s;
    for (int objects = 1; objects <= 2; objects++) {
        stage m;
        double norm = 0;
        const dtrain_slice *slices = NULL;
        size_t count;
        stage_create(&m, world, objects);
        stage_backward(&m);
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(m.fsdps, objects, m.model, 0.5f, &norm), DTRAIN_OK);
        CHECK(norm > 19.874606 && norm < 19.874607); /* sqrt(395) */
        CHECK_EQ(dtrain_fsdp_local(m.fsdps[0], &slices, &count), DTRAIN_OK);
        for (size_t i = 0; i < slices[0].count; i++) /* of w: 1, 2, 2 times 0.5 / sqrt(395) */
            CHECK(fabs((double)slices[0].grads[i] -
                       (slices[0].begin + i == 0 ? 1 : 2) * (1 + 2 * m.pipe + m.tensor) * 0.025157730) < 1e-6);
        for (int i = 0; i < objects; i++)
            CHECK_EQ(dtrain_fsdp_step(m.fsdps[i], 1), DTRAIN_OK);
        stage_backward(&m);
        if (rank == 3)
            dtrain__fsdp_fail(m.fsdps[objects - 1], "the coffee is cold");
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(m.fsdps, objects, m.model, 1, &norm), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), m.pipe == 1 && m.tensor == 1 ? "the coffee is cold" : "parts of the model");
        stage_backward(&m);
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(m.fsdps, objects, m.model, 0, &norm), DTRAIN_OK);
        CHECK(norm > 19.874606 && norm < 19.874607);
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(m.fsdps, 0, m.model, 0, &norm), DTRAIN_ERR_INVALID);
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(m.fsdps, objects, m.model, -1, &norm), DTRAIN_ERR_INVALID);
        m.fsdps[objects] = m.fsdps[0];
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(m.fsdps, objects + 1, m.model, 0, &norm), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "are the same: give each once");
        CHECK_EQ(dtrain_fuse_begin(m.model), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(m.fsdps, objects, m.model, 0, &norm), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "cannot be fused; call fuse_end first");
        CHECK_EQ(dtrain_fuse_end(m.model), DTRAIN_OK);
        for (int i = 0; i < objects; i++)
            dtrain_fsdp_destroy(m.fsdps[i]);
        dtrain_comm_destroy(m.model);
        dtrain_mesh_destroy(m.mesh);
    }
    return 0;
}

TEST(one_call_measures_a_model_in_parts_and_all_drop_a_step_together)
{
    scene s;
    on_threads(8, one_norm, NULL);
    scene_begin(&s, 8, 0);
    run_ranks(&s, one_norm);
}
