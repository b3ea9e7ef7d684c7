/* ---- >>mesh ----
 * Lays out the ranks of a world in named dimensions and makes the group along each. It is arithmetic over
 * dtrain_comm_split. */
#ifndef DTRAIN__MESH
#define DTRAIN__MESH
#include "split.c"

typedef struct dtrain__axis {
    char name[DTRAIN_MESH_NAME_BYTES];
    int size, index; /* this rank's coordinate */
    dtrain_comm *group;
} dtrain__axis;

struct dtrain_mesh {
    dtrain_allocator *allocator, own;
    int count;
    dtrain__axis *axes;
};

static dtrain_status dtrain__mesh_flaw(dtrain_comm *world, const char *what, const dtrain_mesh_dim *dims, int i)
{
    return dtrain__fail(&world->error, DTRAIN_ERR_INVALID, "mesh_create on rank %d: dimension %d (%.60s, size %d) %s",
                        world->rank, i, dims[i].name != NULL ? dims[i].name : "NULL", dims[i].size, what);
}

/* Checks the dimensions. *rest: the size of the dimension that says 0. */
static dtrain_status dtrain__mesh_check(dtrain_comm *world, const dtrain_mesh_dim *dims, int count, int *rest)
{
    int product = 1, open = -1;
    if (count < 1 || dims == NULL)
        return dtrain__fail(&world->error, DTRAIN_ERR_INVALID,
                            "mesh_create on rank %d: %d dimensions; give at least one", world->rank, count);
    for (int i = 0; i < count; i++) {
        if (dims[i].name == NULL || dims[i].name[0] == 0 || strlen(dims[i].name) >= DTRAIN_MESH_NAME_BYTES)
            return dtrain__mesh_flaw(world, "needs a name of 1 to 31 characters", dims, i);
        for (int k = 0; k < i; k++)
            if (strcmp(dims[k].name, dims[i].name) == 0)
                return dtrain__mesh_flaw(world, "has a name that is taken; give each its own", dims, i);
        if (dims[i].size < 0 || (dims[i].size == 0 && open >= 0))
            return dtrain__mesh_flaw(world, "needs a size of 1 or more; one dimension alone may have 0", dims, i);
        open = dims[i].size == 0 ? i : open;
        if (dims[i].size > 0 && product > world->size / dims[i].size)
            return dtrain__mesh_flaw(world, "makes the mesh larger than the world", dims, i);
        product *= dims[i].size > 0 ? dims[i].size : 1;
    }
    *rest = world->size / product;
    if (world->size % product != 0 || (open < 0 && *rest != 1))
        return dtrain__fail(&world->error, DTRAIN_ERR_INVALID,
                            "mesh_create on rank %d: the sizes multiply to %d; expected %s of the world's %d ranks",
                            world->rank, product, open >= 0 ? "a divisor" : "all", world->size);
    return DTRAIN_OK;
}

static dtrain_mesh *dtrain__mesh_place(dtrain_comm *world, const dtrain_mesh_dim *dims, int count, int rest)
{
    dtrain_allocator *allocator;
    size_t bytes = sizeof(dtrain_mesh) + (size_t)count * sizeof(dtrain__axis);
    dtrain_mesh *mesh =
        (dtrain_mesh *)dtrain__memory_owner(world->desc.allocator, bytes, offsetof(dtrain_mesh, own), &allocator);
    int rank = world->rank;
    if (mesh == NULL)
        return NULL;
    mesh->allocator = allocator;
    mesh->count = count;
    mesh->axes = (dtrain__axis *)(void *)(mesh + 1);
    for (int i = count; i-- > 0;) {
        dtrain__axis *axis = &mesh->axes[i];
        snprintf(axis->name, sizeof axis->name, "%s", dims[i].name);
        axis->size = dims[i].size > 0 ? dims[i].size : rest;
        axis->index = rank % axis->size;
        rank /= axis->size;
    }
    return mesh;
}

static int dtrain__mesh_line(const void *given, size_t index, dtrain__alike_line *line)
{
    const dtrain_mesh *mesh = (const dtrain_mesh *)given;
    if (index > (size_t)mesh->count)
        return 0;
    if (index == 0)
        return dtrain__alike_number(line, "the number of dimensions is", mesh->count, 0);
    snprintf(line->what, sizeof line->what, "dimension %zu is", index - 1);
    snprintf(line->value, sizeof line->value, "%s of %d", mesh->axes[index - 1].name, mesh->axes[index - 1].size);
    return 1;
}

DTRAIN_API dtrain_status dtrain_mesh_create(dtrain_mesh **out, dtrain_comm *world, const dtrain_mesh_dim *dims,
                                            int count)
{
    dtrain_mesh *mesh = NULL;
    dtrain_status status;
    int rest = 1, stride = 1;
    if (out != NULL)
        *out = NULL;
    if (out == NULL || world == NULL)
        return dtrain__fail(world != NULL ? &world->error : NULL, DTRAIN_ERR_INVALID,
                            "mesh_create: needs a world and a place for the mesh (%s is NULL)",
                            world == NULL ? "world" : "mesh");
    status = dtrain__mesh_check(world, dims, count, &rest);
    if (status == DTRAIN_OK && (mesh = dtrain__mesh_place(world, dims, count, rest)) == NULL)
        status = dtrain__fail(&world->error, DTRAIN_ERR_MEMORY, "mesh_create on rank %d: no memory", world->rank);
    dtrain__alike alike = {"mesh_create", mesh, dtrain__mesh_line, "give every rank the same", 1, {0}, 0};
    status = dtrain__alike_meet(world, &alike, status);
    for (int i = count; status == DTRAIN_OK && i-- > 0;) {
        dtrain__axis *axis = &mesh->axes[i]; /* color: the rank without this coordinate */
        status = dtrain__split_by_color(world, world->rank - axis->index * stride, axis->index, 1, &axis->group,
                                        "mesh_create");
        stride *= axis->size;
    }
    if (status == DTRAIN_OK)
        *out = mesh;
    else
        dtrain_mesh_destroy(mesh);
    return status;
}

static dtrain__axis *dtrain__mesh_axis(const dtrain_mesh *mesh, const char *name, const char *call)
{
    char names[160] = "";
    size_t used = 0;
    for (int i = 0; mesh != NULL && name != NULL && i < mesh->count; i++) {
        if (strcmp(mesh->axes[i].name, name) == 0)
            return &mesh->axes[i];
        if (used < sizeof names - 40)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "", mesh->axes[i].name);
    }
    dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s has no dimension \"%.60s\"; it has %s", call,
                 mesh != NULL ? "the mesh" : "no mesh (NULL)", name != NULL ? name : "NULL",
                 names[0] != 0 ? names : "none");
    return NULL;
}

DTRAIN_API dtrain_comm *dtrain_mesh_group(const dtrain_mesh *mesh, const char *name)
{
    dtrain__axis *axis = dtrain__mesh_axis(mesh, name, "mesh_group");
    return axis != NULL ? axis->group : NULL;
}

/* Checks the names of a join, and that world is the mesh's. */
static dtrain_status dtrain__mesh_check_join(const dtrain_mesh *mesh, dtrain_comm *world, const char *const *names,
                                             int count)
{
    int size = 1, rank = 0;
    if (names == NULL || count < 1)
        return dtrain__fail(&world->error, DTRAIN_ERR_INVALID, "mesh_join on rank %d: %d names%s; give at least one",
                            world->rank, count, names == NULL ? " at NULL" : "");
    for (int i = 0; i < count; i++)
        if (dtrain__mesh_axis(mesh, names[i], "mesh_join") == NULL) {
            world->error = dtrain__thread_error;
            return world->error.status;
        }
    for (int i = mesh->count; i-- > 0; size *= mesh->axes[i].size)
        rank += mesh->axes[i].index * size;
    if (size == world->size && rank == world->rank)
        return DTRAIN_OK;
    return dtrain__fail(&world->error, DTRAIN_ERR_INVALID,
                        "mesh_join on rank %d: the group has %d ranks and the mesh %d, and this rank is %d in "
                        "the mesh: give the world that the mesh was made from",
                        world->rank, world->size, size, rank);
}

typedef struct dtrain__mesh_joined {
    const dtrain_mesh *mesh;
    const char *const *names;
    int count;
} dtrain__mesh_joined;

static int dtrain__mesh_joins(const dtrain__mesh_joined *join, int axis)
{
    for (int k = 0; k < join->count; k++)
        if (strcmp(join->names[k], join->mesh->axes[axis].name) == 0)
            return 1;
    return 0;
}

static int dtrain__mesh_joined_line(const void *given, size_t index, dtrain__alike_line *line)
{
    const dtrain__mesh_joined *join = (const dtrain__mesh_joined *)given;
    if (index >= (size_t)join->mesh->count)
        return 0;
    dtrain__alike_text(line, "", dtrain__mesh_joins(join, (int)index) ? "joined" : "not joined");
    snprintf(line->what, sizeof line->what, "dimension %s is", join->mesh->axes[index].name);
    return 1;
}

DTRAIN_API dtrain_status dtrain_mesh_join(const dtrain_mesh *mesh, dtrain_comm *world, const char *const *names,
                                          int count, dtrain_comm **group)
{
    dtrain__mesh_joined join = {mesh, names, count};
    dtrain__alike alike = {"mesh_join", &join, dtrain__mesh_joined_line, "give every rank the same names", 1, {0}, 0};
    int stride = 1;
    if (group != NULL)
        *group = NULL;
    if (mesh == NULL || world == NULL || group == NULL)
        return dtrain__fail(world != NULL ? &world->error : NULL, DTRAIN_ERR_INVALID,
                            "mesh_join: needs a mesh, its world and a place for the group (%s is NULL)",
                            mesh == NULL    ? "mesh"
                            : world == NULL ? "world"
                                            : "group");
    dtrain_status status = dtrain__mesh_check_join(mesh, world, names, count);
    status = dtrain__alike_meet(world, &alike, status);
    int rest = world->rank;
    for (int i = mesh->count; status == DTRAIN_OK && i-- > 0;) { /* takes the joined coordinates out of the rank */
        rest -= dtrain__mesh_joins(&join, i) ? mesh->axes[i].index * stride : 0;
        stride *= mesh->axes[i].size;
    }
    return status == DTRAIN_OK ? dtrain__split_by_color(world, rest, world->rank, 1, group, "mesh_join") : status;
}

DTRAIN_API void dtrain_mesh_destroy(dtrain_mesh *mesh)
{
    if (mesh == NULL)
        return;
    for (int i = 0; i < mesh->count; i++)
        dtrain_comm_destroy(mesh->axes[i].group);
    dtrain__free(mesh->allocator, mesh);
}

#endif
