/* ---- >>data-parallel ----
 * DDP: every rank holds all parameters, and a program keeps its own optimizer. Gradients are reduced bucket by bucket
 * while the backward pass still runs. */
#ifndef DTRAIN__DDP_H
#define DTRAIN__DDP_H
#include "fsdp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gradients of a table that all ranks sum. */
typedef struct dtrain_ddp dtrain_ddp;

typedef struct dtrain_ddp_desc {
    size_t bucket_bytes; /* units travel together once they are so large; 0: 1 MiB; 1: each by itself */
    int no_broadcast;    /* 1: parameters are the same on all ranks already */
    int no_overlap;      /* 1: nothing is reduced before all units are */
    const dtrain_compress_desc *compress; /* copied; sums travel compressed, bucket by bucket, on a thread that the DDP
                                           * starts; with no_overlap in dtrain_ddp_finish. NULL: as they are */
    int check_every; /* ranks compare a hash of their weights in every dtrain_ddp_finish, one of so many parts of them
                      * at a time; 0: 1,000 steps for all parts; negative: never */
    int debug; /* the same on every rank. 1: a gradient that is written between its last reduce and the step's end is an
                * error of dtrain_ddp_finish, at the price of reading all gradients twice; on the CPU alone. 0: where
                * DTRAIN_DEBUG is 1 in the environment */
} dtrain_ddp_desc;

/* Makes a DDP over a group, and gives every rank the parameters of rank 0.
 *
 * Memory: gradients are reduced where they lie, those below 65,536 elements in a copy. With compression, with debug and
 * on a device all are once more. When gradients accumulate, they are log2(micro_batches) - 1 times more.
 *
 * On a device the calls take their turn in its queue, and sums travel beside it, as under >>fsdp.
 *
 *   comm     must outlive it
 *   table    copied; its data and grad are used until destroyed; the same on every rank but for addresses
 *   desc     NULL: all defaults
 *   errors   those of dtrain_fsdp_create, dtrain_compressor_topk, dtrain_compressor_powersgd, dtrain_compressed_create;
 *            DTRAIN_ERR_UNSUPPORTED a gradient that is not F32
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_ddp_create(dtrain_ddp **ddp, dtrain_comm *comm, const dtrain_param *table,
                                                size_t count, const dtrain_ddp_desc *desc);

/* Opens a step: sets all gradients to zero and says what this rank will bring to it.
 *
 * Until dtrain_ddp_finish the group is the DDP's: no other collective of comm.
 *
 *   micro_batches   of this rank; 0 is legal: then dtrain_ddp_finish comes next
 *   weight          of this rank's examples in the whole step, usually their tokens; may be 0
 *   errors          DTRAIN_ERR_INVALID  a step is open; micro_batches negative; weight negative or not finite
 *                   DTRAIN_ERR_MEMORY   more micro-batches than in any step before
 *                   those of dtrain_all_reduce_async
 *
 * collective: every rank of comm, same order; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_ddp_begin(dtrain_ddp *ddp, int micro_batches, double weight);

/* Takes a unit's gradients over: called when a micro-batch's backward pass has finished with the unit.
 *
 * The gradients hold the SUM over the micro-batch's examples. They are added to those of earlier micro-batches by
 * the tree and set to zero for the next. After the last, the unit is on its way as soon as those after it are, and the
 * gradients are the DDP's until dtrain_ddp_finish: do not write them, not even zeros. Any order of units; the next
 * micro-batch begins when every unit was reduced and one is again, or with dtrain_ddp_next.
 *
 *   errors   DTRAIN_ERR_INVALID  no step is open; no such unit; the unit was reduced in this micro-batch and others
 *                                were not; more micro-batches than announced
 *            those of dtrain_all_reduce_async
 *
 * one thread per object; never blocks, but up to timeout_ms on devices that have one queue or DTRAIN_PROGRESS_POLL */
DTRAIN_API_MUST dtrain_status dtrain_ddp_reduce(dtrain_ddp *ddp, int unit);

/* Ends a micro-batch in which some units were not used, and so not reduced; legal after every micro-batch: the first
 * call after one of which all units were reduced is taken as its.
 *
 *   errors   DTRAIN_ERR_INVALID  no step is open, or all its micro-batches have ended
 *            those of dtrain_all_reduce_async
 *
 * one thread per object; blocks as dtrain_ddp_reduce */
DTRAIN_API_MUST dtrain_status dtrain_ddp_next(dtrain_ddp *ddp);

/* Closes the step: waits for all units, then divides once. Every gradient is now the weighted mean over all ranks,
 * the same bits on each of them.
 *
 * Units that this rank has not reduced in the last micro-batch count as unused in it: they add nothing.
 *
 * Ranks also compare a hash of a part of their weights (desc.check_every), those that the step was computed with, of
 * parameters that have gradients. It finds other first weights, a step or a learning rate that one rank has alone, and
 * an optimizer whose instructions differ between processors. See >>fsdp for memory of a device.
 *
 *   total_weight   out: the sum of all ranks' weights; may be NULL. When it is 0 the gradients are not divided
 *   errors         DTRAIN_ERR_INVALID  no step is open; fewer micro-batches than announced: the step stays open
 *                  DTRAIN_ERR_MISMATCH on every rank: weights differ; the text names the first parameter and the
 *                                      ranks. The step is closed, gradients are undefined, the DDP can be used
 *                  DTRAIN_ERR_ABORTED  with debug: a rank has written a gradient after its last dtrain_ddp_reduce, so
 *                                      that the sum misses it. The step is closed, gradients are dropped
 *                  those of dtrain_all_reduce: the step is closed, gradients are undefined
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_ddp_finish(dtrain_ddp *ddp, double *total_weight);

/* As dtrain_fsdp_buckets.
 *
 * one thread per object; never blocks */
DTRAIN_API size_t dtrain_ddp_buckets(const dtrain_ddp *ddp, const dtrain_bucket **buckets);

/* Lists what a checkpoint keeps between steps besides the table: what compression has left unsent, as of
 * dtrain_fsdp_pieces; without compression nothing.
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_ddp_pieces(dtrain_ddp *ddp);

/* Frees a DDP; NULL is legal. In an open step it first waits for the units on their way, up to timeout_ms.
 *
 * one thread per object */
DTRAIN_API void dtrain_ddp_destroy(dtrain_ddp *ddp);

#ifdef __cplusplus
}
#endif

#endif
