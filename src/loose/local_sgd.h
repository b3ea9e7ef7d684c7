/* ---- >>local-sgd ----
 * Local SGD and DiLoCo: less often over slow links. Each rank trains by itself for many steps, with any optimizer. Then
 * a round averages how far the ranks have come, and every rank makes the same outer step with the average. A thread of
 * the object runs the rounds, so that a training step never waits for the network.
 *
 * The first member that hands in its difference opens a round, which waits up to window_ms for the others. A member
 * that hands in nothing takes part with a weight of 0, and so gets the newest outer weights, too. A round happens on
 * all members that are left, or on none. If a member dies, the others go on where dtrain_comm_shrink lets them
 * (examples/robot_swarm.c).
 *
 * Differences travel as float32 or packed (compress), in one piece or in fragments. A round is an all-reduce, or goes
 * through one member that all others can reach (through_server). As float32, both have the same bits. Try train_gpt
 * with --local-steps 50, and with --local-steps 50 --aggregator ps.
 *
 * With H steps a round, each rank sends 1 / H of what an all-reduce in every step sends. What it costs: held-out loss
 * of train_gpt after 300 steps on 4 ranks with AdamW, measured with tools/loss_table. The outer momentum there is 0.8
 * unless the flags say another:
 *
 *     flags of train_gpt                          loss
 *     none: an all-reduce in every step           1.981
 *     --local-steps 20                            2.054   +3.7 %
 *     --local-steps 20 --outer-warmup 0           2.114   +6.7 %
 *     --local-steps 5                             2.401   +21.2 %
 *     --local-steps 5 --outer-momentum 0.5        2.175   +9.8 %
 *     --local-steps 5 --outer-momentum 0          2.183   +10.2 %
 *
 * So rounds of few steps need less outer momentum. The first rounds have none (warmup_rounds), which also helps long
 * runs. After 1,200 steps with H = 20 the loss is 0.5 % below that of an all-reduce in every step with this warm-up,
 * and 2.3 % above it without. */
#ifndef DTRAIN__LOCAL_SGD_H
#define DTRAIN__LOCAL_SGD_H
#include "../train/train.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_local_sgd dtrain_local_sgd;

/* How rounds work. Zero means the default, which is that of the DiLoCo papers where they have one. */
typedef struct dtrain_local_sgd_desc {
    int steps;            /* training steps a round; 0: 500 */
    float outer_lr;       /* learning rate of the outer step; 0: 0.7 */
    float outer_momentum; /* Nesterov momentum of the outer step; 0: 0.9. With few rounds, or few steps a round, 0.5
                             trains better */
    int no_momentum;      /* 1: the outer step is outer_lr times the mean difference; with outer_lr 1 it averages */
    int warmup_rounds;    /* the first rounds of each fragment have no momentum; 0: 2; negative: none */
    int fragments;        /* unit u is in fragment u % fragments. Each fragment has rounds of its own, spread evenly
                             over the steps; 0: 1; at most the number of units */
    int overlap;          /* at least this many steps pass between a snapshot and its round's result; below steps */
    float mixing;         /* share of the outer weights if you made steps since the snapshot; 0: 0.5. Without such
                             steps the parameters become the outer weights */
    int blocking;         /* 1: the overlap-th step after a snapshot waits for its round, up to window_ms and the
                             group's timeout_ms. Every run in which nobody is late or lost then has the same bits */
    const dtrain_compress_desc *compress; /* copied; how differences travel: BF16, F16, INT8, FP8, SIGN, or an OWN that
                                           * packs. NULL: float32 */
    int64_t window_ms;  /* how long a round waits after the first member has handed in; 0: 10,000; negative: for all */
    size_t max_bytes;   /* most memory that the object may take; 0: no limit */
    int no_broadcast;   /* 1: all ranks have the same parameters already */
    int through_server; /* 1: rounds go through one rank instead of an all-reduce: see dtrain_local_sgd_create */
    int server;         /* that rank, which trains too; 0 */
} dtrain_local_sgd_desc;

/* Makes the object, gives every rank the parameters of rank 0 as first outer weights, and starts the thread.
 *
 * Through a server, that rank exchanges differences and sums with each member, and members do not talk to each other.
 * The bits are those of the all-reduce, with one exception: if packing has feedback, the server keeps what packing the
 * sum loses. If the server is lost, every other member goes on alone, and the log says so. The server must make steps,
 * too: every round waits window_ms for a server that makes none.
 *
 * Memory comes from the group's allocator. It is 4 floats an element (outer weights, momentum, the weights that this
 * rank started from, its difference), what a round of the largest fragment needs, and residuals twice. A server also
 * holds pieces of all members. The three groups that the object makes come on top. Nothing is allocated later.
 *
 *   comm      must outlive the object; you may go on using it. Its progress is by a service thread, unless it has one
 *             rank
 *   table     copied. Only the calls below read and write its data; the thread never does. The same on every rank but
 *             for addresses
 *   desc      NULL: all defaults; the same on every rank but for mixing, blocking and max_bytes
 *   errors    DTRAIN_ERR_INVALID      a bad table, or one that is all frozen; constants or server out of range
 *             DTRAIN_ERR_MEMORY       no memory, or more than max_bytes: the text says how much it takes
 *             DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32, or not in the CPU's memory; a compressor that does
 *                                     not pack; a group under DTRAIN_PROGRESS_POLL, or over a transport of your own
 *             DTRAIN_ERR_MISMATCH     tables or descs differ; the text names the parameter or field, and both values
 *             DTRAIN_ERR_ABORTED      another rank could not make its object; the text names it and the cause
 *             those of dtrain_comm_split
 *   source    Douillard and others, DiLoCo, arXiv:2311.08105, 2023. Fragments, overlap and mixing: Douillard and
 *             others, Streaming DiLoCo, arXiv:2501.18512, 2025
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_create(dtrain_local_sgd **local, dtrain_comm *comm,
                                                      const dtrain_param *table, size_t count,
                                                      const dtrain_local_sgd_desc *desc);

/* Says that the program has made a training step. Call it after each one.
 *
 * It applies the results of rounds that have arrived. In every steps-th call it also hands in a difference: how far the
 * parameters are from the outer weights that they started from. The outer step is dtrain_device_sgd on the outer
 * weights. Its gradient is the mean of the members' differences by their weights.
 *
 * A difference that is too late for a round counts in the next one. A lost member is no error: rounds go on with those
 * that dtrain_comm_shrink lets go on. Any other member, cut off by the network, makes its outer steps alone, to weights
 * of its own. The log says so, and dtrain_local_sgd_stats.left is 1. A member whose parameters are not finite hands in
 * nothing, and goes on from the outer weights; the log says so.
 *
 * If the outer step would make a weight or a momentum infinite, the round changes neither, and the log says so.
 *
 *   weight   weight of the step on this rank, at least 0: usually its number of examples or tokens
 *   errors   DTRAIN_ERR_INVALID  NULL, or a weight that is negative or not finite: nothing was done
 *
 * one thread per object; never blocks, unless desc.blocking; allocates nothing */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_step(dtrain_local_sgd *local, double weight);

/* Waits until no round of this rank is under way, and applies the results.
 *
 * Call it before a checkpoint, and then dtrain_barrier. Once it has returned on every rank, and before the next step,
 * all members have made the same rounds, and dtrain_local_sgd_pieces may be saved.
 *
 *   errors   DTRAIN_ERR_TIMEOUT  no result within window_ms and timeout_ms, because other members are late. You may
 *                                call it again, or train on
 *
 * one thread per object; blocks up to timeout_ms and window_ms */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_sync(dtrain_local_sgd *local);

/* Makes the parameters as they are the outer weights: those of rank 0, unless desc.no_broadcast says that all ranks
 * have the same. Call it after you have set them, or loaded them without dtrain_local_sgd_pieces; else the next round
 * goes on from the old ones.
 *
 *     read_weights(path, weights);                              into the table's memory
 *     DTRAIN_CHECK(dtrain_local_sgd_publish(local));
 *
 * The outer momentum and what packing has left unsent start again from 0. Steps that no round has counted are dropped,
 * and so are results that are not applied yet. It waits for no window. It needs every rank of comm: if one is lost,
 * make a new object on the group that dtrain_comm_shrink gives.
 *
 *   errors   DTRAIN_ERR_TIMEOUT  a round that had begun did not end within timeout_ms: nothing is published
 *            those of dtrain_all_reduce, dtrain_broadcast and dtrain_barrier
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_publish(dtrain_local_sgd *local);

/* Ends training: takes part in rounds until every member that is left has called it.
 *
 * Then all have the same parameters, bit for bit, and all their steps are in them. You may train on afterwards.
 *
 *   errors   DTRAIN_ERR_TIMEOUT  no round within timeout_ms. You may call it again; the parameters are the newest outer
 *                                weights that arrived
 *
 * collective: every member that is left; blocks up to timeout_ms after each round that is made meanwhile */
DTRAIN_API_MUST dtrain_status dtrain_local_sgd_finish(dtrain_local_sgd *local);

typedef struct dtrain_local_sgd_stats {
    uint64_t steps;       /* training steps of this rank */
    uint64_t rounds;      /* rounds of all fragments, with or without this rank */
    uint64_t taken;       /* rounds with a difference of this rank */
    uint64_t missed;      /* rounds without one */
    uint64_t undone;      /* attempts that ended because a member was lost; the round is made again */
    uint64_t applied;     /* how often a result changed this rank's parameters */
    int members;          /* members that had handed in for the last round */
    int left;             /* members that are left; 1: this rank goes on alone */
    uint64_t sent_bytes;  /* bytes that this rank sent in rounds */
    uint64_t dense_bytes; /* bytes that it would have sent with an all-reduce of gradients in every step */
} dtrain_local_sgd_stats;

/* Returns the counters; zeros for NULL.
 *
 * any thread */
DTRAIN_API dtrain_local_sgd_stats dtrain_local_sgd_get_stats(dtrain_local_sgd *local);

/* Lists the members that had handed in for the last round, by their ranks in comm.
 *
 *   ranks     out: room for as many numbers as comm has ranks
 *   returns   how many there are; 0 for NULL
 *
 * any thread */
DTRAIN_API int dtrain_local_sgd_members(dtrain_local_sgd *local, int *ranks);

/* Lists what a checkpoint keeps besides the parameters. Before a save, call dtrain_local_sgd_sync and then
 * dtrain_barrier on every rank.
 *
 * A load writes into an object made from the same table and desc. Like dtrain_local_sgd_publish, it drops steps that no
 * round has counted, and it waits for no window. With the parameters loaded too, the run goes on with the bits of one
 * that never stopped. It needs as many ranks as saved: each list has one row for each rank.
 *
 * A file may lack this state, and be loaded with `lenient`. Then each rank's parameters are its outer weights, and all
 * else starts from 0. So load the same parameters on all ranks, or call dtrain_local_sgd_publish. The same holds after
 * a load that fails while it reads. Residuals that do not fit, or have no unit, are dropped, and the log says so.
 *
 *   outer          F32   outer weights
 *   momentum       F32   of the outer step; not listed if it has none
 *   base           F32   the weights that this rank started from
 *   weights        F64   of the steps since the last snapshot, for each fragment
 *   counters       U64   steps, then rounds of each fragment
 *   residual.0 ... F32   of each fragment that is packed with feedback
 *   unit.0 ...     F64   the weight of the sums that these are of
 *
 * any thread; a load is collective over all members that are left */
DTRAIN_API dtrain_pieces dtrain_local_sgd_pieces(dtrain_local_sgd *local);

/* Leaves the group, ends the thread and frees the object; NULL is legal.
 *
 * Unless all have called dtrain_local_sgd_finish, the others log that they go on without this rank. A round that it has
 * handed in for may count its difference or not, but in the same way on all ranks.
 *
 * one thread per object; never waits for a peer */
DTRAIN_API void dtrain_local_sgd_destroy(dtrain_local_sgd *local);

#ifdef __cplusplus
}
#endif

#endif
