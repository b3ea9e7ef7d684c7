/* ---- >>groups ----
 * Groups made from a group: by color, of those that survive, and meshes of named dimensions. What survivors agree on, and the state that they give to newcomers. */
#ifndef DTRAIN__GROUPS_H
#define DTRAIN__GROUPS_H
#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a group of the ranks that give the same color, in order of key, then of their rank in comm.
 *
 * With one color for all ranks the group is a second one of the same ranks, whose operations do not mix with those of
 * comm: give one to each thread.
 *
 * Groups are used like the one they come of: several at once, also from several threads of a rank; none waits for
 * another. An error or a lost rank ends the groups that contain it, and no other. A group takes over timeout_ms,
 * algorithm, progress and allocator. It may be destroyed before or after comm.
 *
 *   color    0 or more; negative: this rank is in none of the groups
 *   group    out: this rank's end; NULL for a negative color and on an error
 *   errors   the same on every rank, and then none has a group: as dtrain_all_gather; and
 *            DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO  the text says on which rank
 *            DTRAIN_ERR_INVALID                on this rank alone: a fuse is open
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **group);

/* Makes a working group of the ranks of comm that are left, in their old order.
 *
 * For a group that is broken as ranks were lost; it may be called on a whole one, too. More ranks may be lost
 * meanwhile, rank 0 included: a survivor that the group still counts breaks it, and the call is made again on that.
 * Who is counted out stays out, even should it come back. A connection that was closed or refused proves a death;
 * where a rank is only silent (for heartbeat_ms, or has not reconnected within reconnect_ms), the larger part of comm
 * goes on, of two halves the one with the lowest rank, so that no two parts ever do. Over a transport of your own a
 * rank is lost when send or recv says DTRAIN_ERR_PEER_LOST, or `alive` 0; silence does not count there.
 *
 *   survivors  out: this rank's end; NULL on an error
 *   errors     DTRAIN_ERR_TIMEOUT    a rank neither called it nor is lost; it can be called again
 *              DTRAIN_ERR_PEER_LOST  this rank is in the smaller part, or was given up; it cannot go on
 *              DTRAIN_ERR_MISMATCH   others called dtrain_comm_agree
 *              DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_shrink(dtrain_comm *comm, dtrain_comm **survivors);

/* Begins dtrain_comm_shrink, or goes on with it, and comes back within a budget: for loops that must not wait.
 *
 * Call it once a frame until it gives a group or an error. With DTRAIN_PROGRESS_POLL it also does what dtrain_comm_poll
 * does. Other ranks may call either form. If you destroy the group while this is pending, the others may still wait for
 * this rank up to their deadline.
 *
 *   budget_us   how long it may wait for the others, 0 or more; making the group at the end comes on top
 *   survivors   out: NULL until all that are left have called; then the group
 *   errors      DTRAIN_ERR_TIMEOUT  timeout_ms since the first call; the next call begins again. Others as
 *                                   dtrain_comm_shrink
 *
 * collective: the ranks that are left */
DTRAIN_API_MUST dtrain_status dtrain_comm_shrink_poll(dtrain_comm *comm, int64_t budget_us, dtrain_comm **survivors);

/* Gives every rank of comm that is left the same answer: the bits that all of them set. Works on a broken group.
 *
 *   flags    in: this rank's; out: the AND of the survivors', unchanged on an error
 *   errors   as dtrain_comm_shrink
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_agree(dtrain_comm *comm, uint64_t *flags);

/* Copies the state of the rank with the highest step, of several the lowest, to all others.
 *
 *   step       of this rank's state
 *   buffers    count of them, buffers[i] of bytes[i] bytes, the same sizes on every rank; overwritten on the others
 *              when all has come, for which they take as much memory as all buffers; unchanged on an error
 *   step_out   out: the highest step, unchanged on an error; may be NULL
 *   errors     DTRAIN_ERR_MISMATCH  sizes differ; DTRAIN_ERR_MEMORY, on all ranks; others as dtrain_broadcast
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_resync(dtrain_comm *comm, uint64_t step, void *const *buffers, const size_t *bytes,
                                            int count, uint64_t *step_out);

/* Ranks laid out in named dimensions: a world of 8 as "data" x "tensor" of 4 x 2. */
typedef struct dtrain_mesh dtrain_mesh;

#define DTRAIN_MESH_NAME_BYTES 32

typedef struct dtrain_mesh_dim {
    const char *name; /* 1 to 31 characters, copied */
    int size;         /* 0, in one dimension: what is left of the world */
} dtrain_mesh_dim;

/* Lays the ranks of world out in `count` dimensions, the last varying fastest, and makes the group along each: the
 * ranks that differ in that coordinate alone, in its order (see dtrain_comm_split).
 *
 * The ranks of a mesh hold one model together: the loss of one ends every group of it with DTRAIN_ERR_PEER_LOST, and
 * every group that is made from these, also where the lost rank is no member.
 *
 *   mesh     out; NULL on an error. Independent of world, which may be destroyed before or after it
 *   dims     the same on every rank; the sizes multiply to the size of world
 *   errors   DTRAIN_ERR_INVALID   a name or size cannot be; the text names the dimension, or the rank that gave it
 *            DTRAIN_ERR_MISMATCH  ranks gave different dimensions
 *            others as dtrain_comm_split
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_mesh_create(dtrain_mesh **mesh, dtrain_comm *world, const dtrain_mesh_dim *dims,
                                                 int count);

/* Returns the group along a dimension, which the mesh owns; NULL and an error text where there is no such name. This
 * rank's coordinate is its dtrain_comm_rank in the group, the dimension's size the group's dtrain_comm_size.
 *
 * any thread */
DTRAIN_API dtrain_comm *dtrain_mesh_group(const dtrain_mesh *mesh, const char *name);

/* Makes the group over several dimensions: the ranks that differ in these coordinates alone, in the order of world, as
 * "data" and "shard" for FSDP, or "pipeline" and "tensor" for all that hold one copy of a model.
 *
 *   world    that the mesh was made from
 *   names    count of them, the same on every rank, in any order
 *   group    out, the caller's to destroy; NULL on an error
 *   errors   on every rank: DTRAIN_ERR_INVALID   a rank gave no name, one that is no dimension's, or another world
 *                           DTRAIN_ERR_MISMATCH  ranks gave different names
 *            others as dtrain_comm_split
 *
 * collective: every rank of world, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_mesh_join(const dtrain_mesh *mesh, dtrain_comm *world, const char *const *names,
                                               int count, dtrain_comm **group);

/* Destroys the mesh and its groups; NULL is legal. Never waits for a peer.
 *
 * one thread per object */
DTRAIN_API void dtrain_mesh_destroy(dtrain_mesh *mesh);

#ifdef __cplusplus
}
#endif

#endif
