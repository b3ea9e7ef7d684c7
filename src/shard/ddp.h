/* ---- >>data-parallel ----
 * DDP: every rank holds all parameters, and your program keeps its own optimizer. Gradients are reduced bucket by
 * bucket while the backward pass still runs. A step is dtrain_ddp_begin, a dtrain_ddp_reduce for each unit of each
 * micro-batch, and dtrain_ddp_finish. */
#ifndef DTRAIN__DDP_H
#define DTRAIN__DDP_H
#include "fsdp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gradients of a table that all ranks sum. */
typedef struct dtrain_ddp dtrain_ddp;

typedef struct dtrain_ddp_desc {
    size_t bucket_bytes;                  /* units travel together once they have this size; 0: 1 MiB; 1: each alone */
    int no_broadcast;                     /* 1: parameters are the same on all ranks already */
    int no_overlap;                       /* 1: reductions start when all units are complete */
    const dtrain_compress_desc *compress; /* copied. Sums travel compressed, bucket by bucket, on a thread that the DDP
                                           * starts; with no_overlap in dtrain_ddp_finish. NULL: uncompressed */
    int check_every; /* ranks compare one part of their weights in every dtrain_ddp_finish, and all parts in this many
                      * steps; 0: 1,000; negative: never */
    int debug; /* alike on every rank. 1: dtrain_ddp_finish fails if a gradient is written between its last reduce and
                * the step's end. It reads all gradients twice, on the CPU alone. 0: if DTRAIN_DEBUG=1 is set */
} dtrain_ddp_desc;

/* Makes a DDP over a group, and gives every rank the parameters of rank 0.
 *
 * Gradients are reduced in place. On top of them it needs memory for:
 *
 *   gradients below 65,536 elements          one copy of these
 *   compression, debug, or a device          one copy of all gradients
 *   steps of more than one micro-batch       log2(micro_batches), rounded up, more copies of all gradients
 *
 * On a device the calls take their turn in its queue, and sums travel beside it: see >>fsdp.
 *
 *   comm     must outlive the DDP
 *   table    copied; its data and grad are used until destroy; the same on every rank except for addresses
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID      a parameter that is not frozen has no grad
 *            DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32
 *            those of dtrain_fsdp_create, dtrain_compressor_topk, dtrain_compressor_powersgd and
 *            dtrain_compressed_create
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_ddp_create(dtrain_ddp **ddp, dtrain_comm *comm, const dtrain_param *table,
                                                size_t count, const dtrain_ddp_desc *desc);

/* Opens a step: sets all gradients to zero, and says what this rank will bring.
 *
 * Until dtrain_ddp_finish make no other collective of comm.
 *
 *   micro_batches   of this rank; 0 is legal: then dtrain_ddp_finish comes next
 *   weight          of this rank's examples in the whole step, usually their tokens; may be 0
 *   errors          DTRAIN_ERR_INVALID  a step is open; micro_batches negative; weight negative or not finite
 *                   those of dtrain_all_gather_async: the object is broken
 *
 * collective: every rank of comm, same order; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_ddp_begin(dtrain_ddp *ddp, int micro_batches, double weight);

/* Takes over a unit's gradients. Call it when the backward pass of a micro-batch has finished with the unit.
 *
 * The gradients hold the sum over the micro-batch's examples, not the mean. They are added to those of earlier
 * micro-batches by the tree of >>order, and set to zero for the next. After the last micro-batch the unit travels as
 * soon as the units after it do. From then to dtrain_ddp_finish do not write the gradients, not even zeros.
 *
 * Units may come in any order. When all units are reduced, the next reduce begins the next micro-batch; with
 * dtrain_ddp_next it begins earlier.
 *
 *   errors   DTRAIN_ERR_INVALID  no step is open; no such unit; more micro-batches than announced; the unit was reduced
 *                                twice in this micro-batch while others are missing
 *            DTRAIN_ERR_MEMORY   a step has more micro-batches than any before it; the object is broken
 *            those of dtrain_all_reduce_async: the object is broken
 *
 * one thread per object; never blocks, but up to timeout_ms on devices that have one queue, under DTRAIN_PROGRESS_POLL,
 * and with compression, until every rank has begun the step */
DTRAIN_API_MUST dtrain_status dtrain_ddp_reduce(dtrain_ddp *ddp, int unit);

/* Ends a micro-batch in which some units were not used, and so not reduced. You may call it once after every
 * micro-batch. If all units are reduced already, it does nothing.
 *
 *   errors   DTRAIN_ERR_INVALID  no step is open, or all its micro-batches have ended
 *            those of dtrain_all_reduce_async
 *
 * one thread per object; blocks as dtrain_ddp_reduce does */
DTRAIN_API_MUST dtrain_status dtrain_ddp_next(dtrain_ddp *ddp);

/* Closes the step: waits for all units, then divides once. Every gradient is then the weighted mean over all ranks, the
 * same bits on each of them.
 *
 * Units that this rank has not reduced in the last micro-batch count as unused: they add nothing.
 *
 * Ranks also compare a hash of a part of their weights (desc.check_every), as the step used them, of parameters that
 * have gradients. It finds different first weights, a step or a learning rate that one rank has alone, and an optimizer
 * whose instructions differ between processors. See >>fsdp for memory of a device.
 *
 *   total_weight   out: the sum of all ranks' weights; may be NULL. If it is 0, the gradients are not divided
 *   errors         DTRAIN_ERR_INVALID   no step is open. With fewer micro-batches than announced, the step stays open
 *                  DTRAIN_ERR_MISMATCH  on every rank: weights differ; the text names the first parameter and the
 *                                       ranks. The step is closed, gradients are undefined, you can use the DDP
 *                  DTRAIN_ERR_ABORTED   with debug: a rank wrote a gradient after its last dtrain_ddp_reduce, so the
 *                                       sum misses it. The step is closed, gradients are dropped
 *                  those of dtrain_all_reduce: the step is closed, gradients are undefined
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_ddp_finish(dtrain_ddp *ddp, double *total_weight);

/* Gives a step up: the open one, or the last finished one if you do not apply its gradients. What compression keeps
 * between steps is again as before it; else parts of the step come back in later ones. Gradients are undefined then.
 *
 * With no step open, it takes back the step of the last dtrain_ddp_begin. It does nothing if that call returned an
 * error, even DTRAIN_ERR_INVALID, if the step's dtrain_ddp_finish did, or if a load or another drop came after it.
 *
 *     DTRAIN_CHECK(dtrain_ddp_finish(ddp, &examples));
 *     if (examples == 0 || !all_finite(grads, count))
 *         DTRAIN_CHECK(dtrain_ddp_drop(ddp));                                            and leave the optimizer out
 *
 *   errors   those of dtrain_all_reduce: the DDP is broken
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_ddp_drop(dtrain_ddp *ddp);

/* Lists the buckets of the last finished step, as dtrain_fsdp_buckets does.
 *
 * one thread per object; never blocks */
DTRAIN_API size_t dtrain_ddp_buckets(const dtrain_ddp *ddp, const dtrain_bucket **buckets);

/* Lists what a checkpoint keeps between steps besides the table: what compression has left unsent, as
 * dtrain_fsdp_pieces says. Without compression the list is empty.
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_ddp_pieces(dtrain_ddp *ddp);

/* Frees a DDP; NULL is legal. In an open step, operations under way get one second to end: see dtrain_fsdp_destroy.
 *
 * one thread per object */
DTRAIN_API void dtrain_ddp_destroy(dtrain_ddp *ddp);

#ifdef __cplusplus
}
#endif

#endif
