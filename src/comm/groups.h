/* ---- >>groups ----
 * Groups made from a group: by color, of the survivors, and along the named dimensions of a mesh. Here are also what
 * survivors agree on, and the state that they give to each other. */
#ifndef DTRAIN__GROUPS_H
#define DTRAIN__GROUPS_H
#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a group of the ranks that give the same color, in order of key, then of their rank in comm.
 *
 * Groups work like the one they were made from. You may use several at once, also from several threads of a rank, and
 * none waits for another. To give each thread a group of its own, split once for each with one color for all ranks.
 *
 * An error or a lost rank ends the groups that contain it, and no other. A group takes over the desc and the allocator
 * of comm. It may be destroyed before or after comm.
 *
 * Between processes a group takes descriptors, of which RLIMIT_NOFILE (ulimit -n) limits the number. Each process uses
 * one for the group, and `connections` for each peer that it exchanges messages with. If the ranks share memory, one
 * more for each peer. So a group of 4 ranks of one host takes at most 7. A call that finds none left ends the group on
 * all its ranks with DTRAIN_ERR_IO.
 *
 *   color    0 or more; negative: this rank is in none of the groups
 *   key      any number; ranks with equal keys keep their order
 *   group    out: this rank's end; NULL for a negative color and on an error
 *   errors   the same on every rank, and then none has a group: as dtrain_all_gather; and
 *            DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO  the text says on which rank
 *            DTRAIN_ERR_INVALID                on this rank alone: a fuse is open
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **group);

/* Gives every rank memory that the other ranks on its host map, too. Processes do collectives on it in place.
 *
 * Between processes of one host a large collective is two to three times as fast if all its buffers are such memory.
 * Each rank then reads and writes the buffers of the others. Any address inside counts. It works in comm and in every
 * group made from it. Ranks of one process get memory of their own. So do processes that share none (see
 * dtrain_comm_desc); the log says so if they share other memory.
 *
 * If a process is stopped while it writes to a buffer, its group breaks at the deadline. The buffer is then taken from
 * the other processes, and later calls copy this rank's memory of that call.
 *
 *   bytes     this rank's; ranks may ask for different sizes. 0 gives an address, too
 *   pointer   out: zeroed memory, aligned to 64 bytes; NULL on an error
 *   errors    the same on every rank, and then none has memory: as dtrain_all_gather; and
 *             DTRAIN_ERR_MEMORY   there is too little for all ranks of a host; the text says on which rank
 *             DTRAIN_ERR_TIMEOUT  getting the memory counts; the group is broken
 *             DTRAIN_ERR_INVALID  pointer is NULL, or a fuse is open: on this rank alone
 *   lifetime  until dtrain_comm_free: it outlives comm and lost ranks. If processes share it, a forked child does, too
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_alloc(dtrain_comm *comm, size_t bytes, void **pointer);

/* Frees this rank's memory of dtrain_comm_alloc; NULL is legal.
 *
 * No call may use it any more. The system gets the memory back when all ranks that map it have freed it or ended. Of
 * lost ranks the others learn in dtrain_comm_shrink, and at the end of the world.
 *
 *   pointer   as dtrain_comm_alloc gave it; any other is logged as an error
 *
 * any thread */
DTRAIN_API void dtrain_comm_free(void *pointer);

/* Makes a working group of the ranks of comm that are left, in their old order.
 *
 * Call it on a group that is broken because ranks were lost; a whole group may be shrunk, too. Any rank may be lost
 * meanwhile, rank 0 included. If the new group still counts such a rank, it is broken: call dtrain_comm_shrink on it. A
 * rank that was counted out stays out, even if it comes back.
 *
 * Those that are left go on if they are more than half of comm, or the half with the lowest rank. So two parts of a
 * network that is cut never both go on. A rank that left of its own will does not count. If all of comm is on one
 * machine, neither does one that is proved dead, so there the last rank goes on, too:
 *
 *   proof of a death    the system says that the process has ended. If it does not know the process, as between
 *                       containers: a unix socket of its was closed. A transport of your own returns 0 from `alive`
 *   no proof            silence for heartbeat_ms; a connection that was reset or refused, as a firewall does; none that
 *                       came back within reconnect_ms; DTRAIN_ERR_PEER_LOST of a transport of your own; all over MPI
 *
 * With desc.quorum DTRAIN_QUORUM_ANY whoever is left goes on. Use it only where the network between the ranks cannot be
 * cut: else two parts of a run train apart, and both save.
 *
 *   survivors  out: this rank's end; NULL on an error
 *   errors     DTRAIN_ERR_TIMEOUT    a rank neither called it nor is lost; you can call it again
 *              DTRAIN_ERR_PEER_LOST  too few are here, or the others gave this rank up; it cannot continue
 *              DTRAIN_ERR_MISMATCH   others called dtrain_comm_agree
 *              DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_shrink(dtrain_comm *comm, dtrain_comm **survivors);

/* Starts or continues dtrain_comm_shrink and returns within a budget, for loops that must not wait.
 *
 * Call it once a frame until it gives a group or an error. With DTRAIN_PROGRESS_POLL it also does what dtrain_comm_poll
 * does. Other ranks may call either form. If you destroy the group while this is pending, the others may still wait for
 * this rank up to their deadline.
 *
 *   budget_us   how long it may wait for the others, 0 or more; making the group at the end takes extra time
 *   survivors   out: NULL until all that are left have called; then the group
 *   errors      DTRAIN_ERR_TIMEOUT  timeout_ms have passed since the first call; the next call starts again
 *               others as dtrain_comm_shrink
 *
 * collective: the ranks that are left */
DTRAIN_API_MUST dtrain_status dtrain_comm_shrink_poll(dtrain_comm *comm, int64_t budget_us, dtrain_comm **survivors);

/* Gives every rank of comm that is left the same flags: the bits that all of them set. Works on a broken group.
 *
 *   flags    in: this rank's; out: the AND of the survivors', unchanged on an error
 *   errors   as dtrain_comm_shrink
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_agree(dtrain_comm *comm, uint64_t *flags);

/* Copies the state of the rank with the highest step to all others. Among equal steps the lowest rank's counts.
 *
 *   step       of this rank's state
 *   buffers    count of them, buffers[i] of bytes[i] bytes, the same sizes on every rank. They are overwritten on the
 *              other ranks once everything has arrived, which takes as much memory again; unchanged on an error
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
    int size;         /* one dimension may say 0: it gets what the others leave of the world */
} dtrain_mesh_dim;

/* Lays out the ranks of world in `count` dimensions, the last varying fastest, and makes the group along each.
 *
 * A group along a dimension holds the ranks that differ in that coordinate alone, in its order (see dtrain_comm_split).
 *
 *   dims { "data", 4 }, { "tensor", 2 }     "data" along a column, "tensor" along a row
 *                 tensor 0   tensor 1
 *      data 0     rank 0     rank 1
 *      data 1     rank 2     rank 3
 *      data 2     rank 4     rank 5
 *      data 3     rank 6     rank 7
 *
 * The ranks of a mesh hold one model together. The loss of one ends every group of the mesh with DTRAIN_ERR_PEER_LOST,
 * and every group made from these, even if the lost rank is no member.
 *
 *   mesh     out; NULL on an error. You may destroy world before or after it
 *   dims     the same on every rank; the sizes multiply to the size of world
 *   errors   DTRAIN_ERR_INVALID   a bad name or size; the text names the dimension, and the rank that gave it
 *            DTRAIN_ERR_MISMATCH  ranks gave different dimensions
 *            others as dtrain_comm_split
 *
 * collective: every rank of world, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_mesh_create(dtrain_mesh **mesh, dtrain_comm *world, const dtrain_mesh_dim *dims,
                                                 int count);

/* Returns the group along a dimension; NULL with an error text for an unknown name. The mesh owns the group.
 *
 * dtrain_comm_rank of the group is this rank's coordinate, and dtrain_comm_size the dimension's size.
 *
 * any thread */
DTRAIN_API dtrain_comm *dtrain_mesh_group(const dtrain_mesh *mesh, const char *name);

/* Makes the group over several dimensions: the ranks that differ in these coordinates alone, in the order of world.
 *
 * Join "data" and "shard" for FSDP. Join "pipeline" and "tensor" for the ranks that hold one copy of a model.
 *
 *   world    the one that the mesh was made from
 *   names    count of them, the same on every rank, in any order
 *   group    out: yours to destroy; NULL on an error
 *   errors   on every rank: DTRAIN_ERR_INVALID   a rank gave no name, an unknown name, or another world
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
