/* ---- >>local-sgd ----
 * Local SGD and DiLoCo: each rank trains by itself for many steps with any optimizer, then the ranks average how far
 * they have come, and make one outer step with it. A thread of each object carries these rounds; a training step never
 * waits for the network. A round happens on all members that are left, or on none.
 *
 * The first member that hands in its difference opens a round, which waits up to window_ms for the others. Who has
 * handed nothing in takes part with a weight of 0, so that all have the newest outer weights and nobody has to catch
 * up. Sums are all-reduces, or go through a server. */
#ifndef DTRAIN__LOCAL_SGD_H
#define DTRAIN__LOCAL_SGD_H
#include "../train/train.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_local_sgd dtrain_local_sgd;

/* How rounds are made. Zero means the default, which is the paper's where it has one. */
typedef struct dtrain_local_sgd_desc {
    int steps;            /* inner steps a round; 0: 500 */
    float outer_lr;       /* 0: 0.7 */
    float outer_momentum; /* Nesterov's; 0: 0.9; for few rounds, and for rounds of few steps, 0.5 trains better */
    int no_momentum;      /* 1: the outer step is outer_lr times the mean difference; with outer_lr 1 an average */
    int warmup_rounds;    /* so many rounds of each fragment have no momentum at first; 0: 2; negative: none */
    int fragments;        /* unit u is in fragment u % fragments, each with rounds of its own, evenly spread over the
                             steps; 0: 1; at most as many as units */
    int overlap;          /* steps that are made before what a round brings is applied, at least; below steps */
    float mixing;         /* share of the outer weights where steps were made since the snapshot; 0: 0.5. Without
                             such steps they are taken as they are */
    int blocking;         /* 1: the overlap-th step after a snapshot waits for its round, up to window_ms and the
                             group's timeout_ms: the same bits in every run in which nobody is late or lost */
    const dtrain_compress_desc *compress; /* copied; how differences travel: BF16, F16, INT8, FP8, SIGN or OWN that
                                           * packs. NULL: as float32 */
    int64_t window_ms;  /* how long a round waits, from the first that has come; 0: 10,000; negative: for all */
    size_t max_bytes;   /* that dtrain_local_sgd_create takes and keeps, at most; 0: no limit */
    int no_broadcast;   /* 1: parameters are the same on all ranks already */
    int through_server; /* 1: rounds go through one rank, see dtrain_local_sgd_create, in place of an all-reduce */
    int server;         /* that rank, which trains too; 0 */
} dtrain_local_sgd_desc;

/* Gives every rank the parameters of rank 0, which are the first outer weights, and starts the thread.
 *
 * Through a server, differences and sums travel between that rank and each member alone. The bits are those of the
 * all-reduce, unless packing keeps what it loses (feedback): what the packing of the sum loses is then the server's.
 * When the server is lost, every other member trains on alone, and the log says so. A server that makes no steps holds
 * up every round for window_ms.
 *
 * Memory, from the group's allocator: 4 floats an element (outer weights, momentum, the weights that this rank started
 * from, its difference), what a round needs of the largest fragment, and residuals. A server holds the members' pieces
 * besides. Nothing is allocated later. The two groups that it makes are not in it.
 *
 *   comm      must outlive it, and is the caller's to use; progress by a service thread, unless it has one rank
 *   table     copied; its data is read and written by the calls below alone, never by the thread; the same on every
 *             rank but for addresses
 *   desc      NULL: all defaults; the same on every rank
 *   errors    DTRAIN_ERR_INVALID      a bad table or one without gradients; constants or server out of range
 *             DTRAIN_ERR_MEMORY       also when max_bytes is too few: the text has the number needed
 *             DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32; a compressor that does not pack; a group that the
 *                                     program polls, or over a transport of its own
 *             DTRAIN_ERR_MISMATCH     tables or descs differ; the text names the parameter or field, and who gave what
 *             DTRAIN_ERR_ABORTED      another rank could not create it; the text has its number and why
 *             those of dtrain_comm_split
 *   source    Douillard and others, DiLoCo, arXiv:2311.08105, 2023; fragments, overlap and mixing: Douillard and
 *             others, Streaming DiLoCo, arXiv:2501.18512, 2025
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_create(dtrain_local_sgd **local, dtrain_comm *comm,
                                                      const dtrain_param *table, size_t count,
                                                      const dtrain_local_sgd_desc *desc);

/* Tells that the program has made an inner step; called after each.
 *
 * After every steps-th it hands in how far the parameters are from the outer weights that they started from, and it
 * applies what has come in. The outer step is that of dtrain_device_sgd on the outer weights, whose gradient is the
 * mean of the members' differences by their weights.
 *
 * A difference that a round did not wait for counts in the next one. Lost members are no error: rounds go on with those
 * left, and a member that is alone makes its outer steps alone.
 *
 *   weight   of the step's examples on this rank, usually their number or that of their tokens
 *   errors   DTRAIN_ERR_INVALID  NULL, or weight negative or not finite: nothing was done
 *
 * one thread per object; never blocks, unless desc.blocking; allocates nothing */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_step(dtrain_local_sgd *local, double weight);

/* Waits until no round of this rank is under way, and applies what came of them. When every rank has returned from it,
 * and none has made a step since, checkpoints may be made of dtrain_local_sgd_pieces.
 *
 *   errors   DTRAIN_ERR_TIMEOUT  a round did not come within window_ms and timeout_ms: the others are not there yet.
 *                                It can be called again, and training can go on
 *
 * one thread per object; blocks up to timeout_ms and window_ms */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_sync(dtrain_local_sgd *local);

/* Ends training: takes part in rounds until every member that is left has called it. Then all have the same
 * parameters, bit for bit, in which all their steps are. Training may go on afterwards.
 *
 *   errors   DTRAIN_ERR_TIMEOUT  no round was made within timeout_ms. It can be called again; the parameters are the
 *                                newest outer weights that came
 *
 * collective: every member that is left; blocks up to timeout_ms after each round that is made meanwhile */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_finish(dtrain_local_sgd *local);

typedef struct dtrain_local_sgd_stats {
    uint64_t steps;       /* inner steps of this rank */
    uint64_t rounds;      /* that were made, of all fragments, with or without this rank */
    uint64_t taken;       /* of them with this rank */
    uint64_t missed;      /* of them without it */
    uint64_t undone;      /* attempts in which a member was lost; they are made again */
    uint64_t applied;     /* how often this rank's parameters were changed */
    int members;          /* that had handed in, in the last round */
    int left;             /* members that are left */
    uint64_t sent_bytes;  /* by this rank in rounds */
    uint64_t dense_bytes; /* that it would have sent, had it all-reduced gradients in every step */
} dtrain_local_sgd_stats;

/* Returns the counters; zeroes for NULL.
 *
 * any thread */
DTRAIN_API dtrain_local_sgd_stats dtrain_local_sgd_get_stats(dtrain_local_sgd *local);

/* Lists the ranks, as comm had them, that had handed in for the last round.
 *
 *   ranks     out: room for as many as comm has
 *   returns   how many
 *
 * any thread */
DTRAIN_API int dtrain_local_sgd_members(dtrain_local_sgd *local, int *ranks);

/* Lists what a checkpoint keeps besides the parameters, when dtrain_local_sgd_sync says that one may be made. A load
 * writes it into a new object, made from the same table and desc; parameters and these give the same bits as a run
 * never stopped.
 *
 * Each has one row for each rank, from which as many ranks go on: outer, momentum, and base, what this rank started
 * from (DTRAIN_F32); weights of the steps since the last snapshots (DTRAIN_F64); counters of steps, then of the rounds
 * of each fragment (DTRAIN_U64); residual.0, ... of the fragments.
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_local_sgd_pieces(dtrain_local_sgd *local);

/* Leaves, ends the thread and frees; NULL is legal. Unless all have finished (dtrain_local_sgd_finish), the others log
 * that they go on without this rank; a round that it has handed in for may count it or not, for all alike.
 *
 * one thread per object; never waits for a peer */
DTRAIN_API void dtrain_local_sgd_destroy(dtrain_local_sgd *local);

#ifdef __cplusplus
}
#endif

#endif
