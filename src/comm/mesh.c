/* ---- >>mesh ----
 * The ranks of a world laid out in named dimensions, and the group along each: the ranks that differ in that
 * coordinate alone. Arithmetic over dtrain_comm_split. */
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

/* Checks the dimensions; *rest is the size of one that says 0. */
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
                return dtrain__mesh_flaw(world, "has a name that is taken", dims, i);
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
                            "mesh_create on rank %d: the sizes multiply to %d, and the world has %d ranks%s",
                            world->rank, product, world->size, open >= 0 ? ", which that does not divide" : "");
    return DTRAIN_OK;
}

/* Says to all whether what this rank gave is good, and compares it by its digest. */
static dtrain_status dtrain__mesh_agree(dtrain_comm *world, const char *call, const char *what, dtrain__sha256 *sha,
                                        dtrain_status mine)
{
    dtrain__split_state split;
    dtrain__error flaw = dtrain__thread_error;
    unsigned char digest[32];
    dtrain_status status = dtrain__split_begin(&split, world, call);
    if (status != DTRAIN_OK)
        return status;
    dtrain__sha256_finish(sha, digest);
    status = dtrain__split_meet(&split, dtrain__get_le(digest, 8), mine);
    for (int rank = 0; status == DTRAIN_OK && mine == DTRAIN_OK && rank < world->size; rank++) {
        if (split.entries[rank].key != DTRAIN_OK)
            status = dtrain__fail(&world->error, dtrain__status_told((uint64_t)split.entries[rank].key),
                                  "%s on rank %d: rank %d gave %s that cannot be (%s)", call, world->rank, rank, what,
                                  dtrain_status_name(dtrain__status_told((uint64_t)split.entries[rank].key)));
        else if (split.entries[rank].color != split.entries[0].color)
            status = dtrain__fail(&world->error, DTRAIN_ERR_MISMATCH,
                                  "%s on rank %d: rank %d gave other %s than rank 0; every rank must give the same",
                                  call, world->rank, rank, what);
    }
    dtrain__split_end(&split);
    return mine != DTRAIN_OK ? dtrain__report(&flaw) : status;
}

/* Memory for the mesh, and this rank's place in it. */
static dtrain_mesh *dtrain__mesh_place(dtrain_comm *world, const dtrain_mesh_dim *dims, int count, int rest)
{
    dtrain_allocator *allocator = world->desc.allocator, first = {NULL, NULL, 0, 0};
    size_t bytes = sizeof(dtrain_mesh) + (size_t)count * sizeof(dtrain__axis);
    dtrain_mesh *mesh = (dtrain_mesh *)dtrain__alloc(allocator != NULL ? allocator : &first, bytes);
    int rank = world->rank;
    if (mesh == NULL)
        return NULL;
    mesh->own = first;
    mesh->allocator = allocator != NULL ? allocator : &mesh->own;
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

DTRAIN_API dtrain_status dtrain_mesh_create(dtrain_mesh **out, dtrain_comm *world, const dtrain_mesh_dim *dims,
                                            int count)
{
    dtrain_mesh *mesh = NULL;
    dtrain_status status;
    dtrain__sha256 sha;
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
    dtrain__sha256_start(&sha);
    for (int i = 0; status == DTRAIN_OK && i < count; i++) {
        dtrain__sha256_add(&sha, mesh->axes[i].name, sizeof mesh->axes[i].name);
        dtrain__sha256_add(&sha, &mesh->axes[i].size, sizeof mesh->axes[i].size);
    }
    status = dtrain__mesh_agree(world, "mesh_create", "dimensions", &sha, status);
    for (int i = count; status == DTRAIN_OK && i-- > 0;) {
        dtrain__axis *axis = &mesh->axes[i]; /* its group: the rank with this coordinate taken out */
        status = dtrain__split_by_color(world, world->rank - axis->index * stride, axis->index, 1, &axis->group,
                                        "mesh_create");
        stride *= axis->size;
    }
    if (status == DTRAIN_OK) {
        *out = mesh;
        return DTRAIN_OK;
    }
    dtrain__error kept = dtrain__thread_error;
    dtrain_mesh_destroy(mesh);
    return dtrain__report(&kept);
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

/* Checks the names of a join, and that the mesh lies in this world. */
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
    if (size != world->size)
        return dtrain__fail(&world->error, DTRAIN_ERR_INVALID,
                            "mesh_join on rank %d: the group has %d ranks and the mesh %d: give the world that the "
                            "mesh was made from",
                            world->rank, world->size, size);
    if (rank != world->rank)
        return dtrain__fail(&world->error, DTRAIN_ERR_INVALID,
                            "mesh_join on rank %d: this rank is %d in the mesh: give the world that the mesh was made "
                            "from",
                            world->rank, rank);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_mesh_join(const dtrain_mesh *mesh, dtrain_comm *world, const char *const *names,
                                          int count, dtrain_comm **group)
{
    dtrain__sha256 sha;
    int rest, stride = 1;
    if (group != NULL)
        *group = NULL;
    if (mesh == NULL || world == NULL || group == NULL)
        return dtrain__fail(world != NULL ? &world->error : NULL, DTRAIN_ERR_INVALID,
                            "mesh_join: needs a mesh, its world and a place for the group (%s is NULL)",
                            mesh == NULL    ? "mesh"
                            : world == NULL ? "world"
                                            : "group");
    dtrain_status status = dtrain__mesh_check_join(mesh, world, names, count);
    dtrain__sha256_start(&sha);
    rest = world->rank;
    for (int i = mesh->count; status == DTRAIN_OK && i-- > 0;) { /* takes coordinates that are joined out of the rank */
        const dtrain__axis *axis = &mesh->axes[i];
        for (int k = 0; k < count; k++)
            if (strcmp(names[k], axis->name) == 0) {
                rest -= axis->index * stride;
                dtrain__sha256_add(&sha, axis->name, sizeof axis->name);
                break;
            }
        stride *= axis->size;
    }
    status = dtrain__mesh_agree(world, "mesh_join", "names or another world", &sha, status);
    return status == DTRAIN_OK ? dtrain__split_by_color(world, rest, world->rank, 1, group, "mesh_join") : status;
}

DTRAIN_API void dtrain_mesh_destroy(dtrain_mesh *mesh)
{
    dtrain_allocator own;
    if (mesh == NULL)
        return;
    for (int i = 0; i < mesh->count; i++)
        dtrain_comm_destroy(mesh->axes[i].group);
    own = mesh->own;
    dtrain__free(mesh->allocator == &mesh->own ? &own : mesh->allocator, mesh,
                 sizeof *mesh + (size_t)mesh->count * sizeof(dtrain__axis));
}

#endif
