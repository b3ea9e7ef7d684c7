/* ---- >>fsdp ----
 * Fully sharded data parallelism (FSDP) for a program that keeps its own training loop.
 *
 * THE LOOP. List the parameters once, in a table of dtrain_param. FSDP gives each one an address that never changes.
 * The memory behind it is there while the parameter's unit, usually one layer, is gathered. Gradients are reduced to
 * the ranks that own them as soon as a unit's are complete, and the optimizer runs on those parts.
 *
 *     dtrain_fsdp_desc desc = {0};
 *     desc.strategy = DTRAIN_FULL_SHARD;
 *     DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc));
 *     float *qkvw = dtrain_fsdp_param(fsdp, "qkvw");         // of full size
 *     float *d_qkvw = dtrain_fsdp_grad(fsdp, "qkvw");
 *     for (uint64_t step = 0; step < steps; step++) {
 *         for (int unit = 0; unit < units; unit++) {
 *             DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, unit));  // also starts the next unit
 *             forward(qkvw, unit);
 *             DTRAIN_CHECK(dtrain_fsdp_release(fsdp, unit));
 *         }
 *         for (int unit = units - 1; unit >= 0; unit--) {
 *             DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, unit));
 *             backward(qkvw, d_qkvw, unit);                  // adds to the gradients
 *             DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, unit));  // travels while the next unit is computed
 *         }
 *         DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, &norm));
 *         DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *     }
 *     dtrain_fsdp_destroy(fsdp);
 *
 * dtrain_fsdp_forward_to and dtrain_fsdp_backward_to make one call of each gather and the release or reduce before it.
 *
 * STRATEGIES. A unit is the concatenation of its ranges in table order; a stacked tensor gives one layer to each of its
 * units. The ranks of a copy cut a unit into one slice each. Earlier slices are one element longer where the sizes do
 * not divide; there is no padding. A rank may hold nothing of a tensor, or of a unit. The calls are the same under
 * every strategy. For P bytes of parameters on n ranks, or on m nodes of s ranks, each rank keeps and sends:
 *
 *   strategy       parameters  gradients  optimizer  gathers send               reductions send, a micro-batch
 *   FULL_SHARD     slice       slice      slice      2 P (n-1)/n a micro-batch  P (n-1)/n
 *   SHARD_GRAD_OP  full        slice      slice      P (n-1)/n a step           P (n-1)/n
 *   DDP            full        full       full       nothing                    2 P (n-1)/n
 *   HYBRID_SHARD   slice       slice      slice      2 P (s-1)/s a micro-batch  P (s-1)/s + 2 (P/s) (m-1)/m
 *
 * HYBRID_SHARD cuts slices within a node and copies them between nodes. PyTorch's SHARD_GRAD_OP shards parameters
 * between steps; here they stay. With no_reshard_after_forward, a unit is gathered once a step. With keep_full_grads,
 * reductions send once a step. A unit that is still in memory is not gathered again.
 *
 * WHAT A RANK NEEDS. dtrain_fsdp_plan says what a rank needs and sends, before anything is allocated.
 * `build/train_gpt --ranks 4 --accum 2 --strategy full` prints the plan of every strategy, and what the run then used:
 *
 *     875264 parameters on 4 ranks; MiB at most on rank 0, and sent by it in a step:
 *     strategy   weights  gradients  optimizer  gathered    total     sent
 *     full          0.83       1.67       1.67      3.12     7.53    13.70  <- this run
 *     grad          3.34       1.67       1.67      1.56     8.48     7.51
 *     ddp           3.34       6.68       6.68      1.56    18.29    10.02
 *     hybrid        1.67       3.34       3.34      3.12    11.70    12.47
 *     memory of full: 7.53 MiB planned, 7.48 MiB used at most
 *
 * "gathered" is what is in full at once: two units of weights, unless full weights stay, and two units of gradients.
 * There are two sets of gradients here because each rank sums two micro-batches a step.
 *
 * THE SAME WEIGHTS. Reductions are the tree of >>order. So FULL_SHARD, SHARD_GRAD_OP and DDP give the same weights, bit
 * for bit; HYBRID_SHARD does if shard_size is a power of two. Micro-batches are folded by the same tree. Let
 * micro-batch i of rank r be number i * ranks + r of the step (dtrain_sampler_desc.strided). Then a fixed number of
 * micro-batches gives the same weights on 1, 2, 4 and 8 ranks. Begin each step with dtrain_fsdp_begin and the weight
 * of this rank's micro-batches: without it gradients are divided by the number of ranks.
 *
 * 16 BITS. A gradient is rounded to a reduce_dtype of 16 bits when it leaves its rank, also in a world of one: once a
 * micro-batch, or with keep_full_grads once a step. The owner adds in float32 and rounds nothing again. So FULL_SHARD
 * and SHARD_GRAD_OP still give the same weights. DDP and HYBRID_SHARD round two things more in each reduction: the sum
 * of each copy, and the total that all copies get. Their weights differ by these roundings. On a device, the rounded
 * numbers travel to their owner as float32, with the same bits; between copies they travel in 16 bits.
 *
 * COMPRESSION. Compressed sums (desc.compress) imply keep_full_grads. Top-k selects within a bucket; bucket_bytes
 * sets its size. A thread of the object sends bucket after bucket while backward still runs. With no_overlap,
 * DTRAIN_PROGRESS_POLL or a transport of your own, the call that ends the step sends, with the same bits. A world of
 * one compresses too, so that it trains as several ranks do. What is left unsent counts as a share of the mean,
 * whatever the weights of the steps; it changes only with a step that is applied.
 *
 * QUANTISATION. Parameters that travel quantised (quantise_gather) are off by at most half a scale: 1/254 of the
 * largest element of their block. Every rank gets the same bits. Gradients (quantise_reduce) are rounded in the same
 * way before they are added. A world of one rounds nothing.
 *
 * ORDER OF CALLS. Gathering is collective: every rank makes the same gather calls in the same order. Between two of
 * them each rank lets go of the same units, by dtrain_fsdp_release or dtrain_fsdp_reduce. Reductions may come in any
 * order of units, and a rank may leave some out: a unit that it gathered on the way down and released adds nothing.
 * (Over a transport of your own, every rank makes the same reductions in the same order.) When the group dies, every
 * call returns DTRAIN_ERR_PEER_LOST. You can then only read the object's slices and destroy it.
 *
 * ON A DEVICE. The same calls give the same bits where dtrain_param.device is set, the same queue for all of a table.
 * What you put on that queue runs in order with the calls: after a gather it sees the parameters, before a reduce it
 * has left the gradients. Gathers and reductions run beside it, on queues of their own. The CPU runs ahead, except
 * where it is told a number (a norm, the verdict of a loss scale) and where device groups stage (>>device-group).
 *
 * A unit for which you bring no memory is one piece there: its ranges lie one after another in table order, at
 * addresses that stay (dtrain_fsdp_unit_param). Units of even numbers share one place, units of odd numbers another.
 * So hold one even and one odd unit at a time, beside the tied ones, and reduce from the last unit to the first. Else
 * the result is DTRAIN_ERR_INVALID. Parameters that stay in full do not share, nor do gradients with no_overlap.
 * Nothing travels quantised. With DTRAIN_PROGRESS_POLL, or if a device has one queue, nothing runs beside the caller:
 * then ranks make the same reductions in the same order.
 *
 * REPLICAS THAT DRIFT. Replicas (DDP, HYBRID_SHARD) compare a hash of their weights at the end of each step
 * (desc.check_every). It covers one part of the trained weights a step, at least 1,024 elements, and travels in a
 * message that is sent anyway. If a hash differs, the call ends on every rank with DTRAIN_ERR_MISMATCH. The text names
 * the first parameter that differs, and the ranks whose values differ from most. The step is dropped, and you can use
 * the object: give every rank the same values, or destroy it. On a device, the exact sum of the part's squares stands
 * for the hash. A difference is then found a step later, or more if the CPU runs far ahead.
 *
 * DEBUGGING. Set DTRAIN_DEBUG=1 in the environment, or desc.debug, to stop at a wrong order of calls instead of
 * training on wrong numbers. You cannot read parameters that are not gathered. You cannot write gradients between
 * their reduction and their unit's next gather. Such an access prints a line on stderr and raises SIGSEGV, or on some
 * systems SIGBUS:
 *
 *   dtrain: rank 1 read parameter qkvw (unit 3), which is not gathered: call dtrain_fsdp_gather(fsdp, 3) before
 *
 * The signal goes to the handler that the program set before, or ends the program as it would without dtrain. A system
 * call that is given such memory fails with EFAULT. The check covers whole pages, also of memory that you bring. A page
 * that two units share stays open while one of them is open. Slices of dtrain_fsdp_local stay open. So do parameters
 * that a strategy keeps in full, and those of a rank alone. Nothing is gathered ahead. Memory of a device is not
 * watched. If the system cannot close pages, the log says so.
 *
 *   source   Rajbhandari, Rasley, Ruwase, He, ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023 */
#ifndef DTRAIN__FSDP_H
#define DTRAIN__FSDP_H
#include "../train/train.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dtrain_strategy {
    DTRAIN_STRATEGY_DEFAULT = 0, /* full shard */
    DTRAIN_FULL_SHARD = 601,
    DTRAIN_SHARD_GRAD_OP,
    DTRAIN_DDP,
    DTRAIN_HYBRID_SHARD
} dtrain_strategy;

/* Settings for the parameters whose name matches. The first group of a desc that matches a parameter counts. */
typedef struct dtrain_param_group {
    const char *name;   /* of one parameter, at most 127 characters; a * at its end matches any rest. It must
                         * match a parameter of the table */
    float lr_factor;    /* multiplies the learning rate; 0: 1 */
    float weight_decay; /* 0: the optimizer's */
    int no_decay;       /* 1: none */
} dtrain_param_group;

/* What it cost to reduce the gradients of some units in a step. These are units that travelled between copies together,
 * or one unit whose gradients were scattered to their owners. */
typedef struct dtrain_bucket {
    int first_unit, last_unit;
    uint64_t dense_bytes; /* that this rank would have sent as float32 */
    uint64_t sent_bytes;  /* that it sent, without headers */
    int64_t ns;           /* time under way */
} dtrain_bucket;

typedef struct dtrain_fsdp_desc {
    dtrain_strategy strategy;         /* 0: full shard */
    int shard_size;                   /* hybrid: ranks of a node; must divide the world size. Others: not read */
    dtrain_dtype gather_dtype;        /* that parameters travel in: F32, BF16 or F16; 0: F32. Masters stay F32 */
    dtrain_dtype reduce_dtype;        /* that gradients travel in: F32, BF16 or F16; 0: F32. They are summed in F32:
                                         see "16 bits" in >>fsdp */
    dtrain_optimizer_desc optimizer;  /* kind DTRAIN_OPTIMIZER_NONE: you update the slices of dtrain_fsdp_local */
    const dtrain_param_group *groups; /* read by create */
    size_t group_count;
    int no_reshard_after_forward; /* 1: a gathered unit stays until the step */
    int no_prefetch;              /* 1: a unit is gathered when you ask for it, not before */
    int no_overlap;               /* 1: reductions start when all units of a micro-batch are complete */
    int keep_full_grads;          /* 1: each rank folds its micro-batches in full, and communicates once a step */
    int micro_batches;            /* the most of a rank in a step, for the plan; 0: 1 */
    float loss_scale;             /* the first scale, by which you multiply the loss; 0: none */
    int loss_scale_steps;         /* good steps after which it doubles; 0: 2,000 */
    size_t bucket_bytes;          /* DDP, hybrid: units travel between copies once this much waits. Each travels alone
                                     if reduce_dtype has 16 bits; 0: 1 MiB; 1: each alone */
    int no_broadcast;             /* 1: data in the table is the same on all ranks already */
    size_t trace_events;          /* how many of the last events dtrain_fsdp_trace keeps; 0: none */
    size_t quantise_gather; /* full shard, hybrid: parameters travel as int8, made from the F32 masters. Elements to a
                             * scale: a multiple of 8, at most 65,536 (256 is usual); 0: in gather_dtype */
    size_t quantise_reduce; /* full shard, shard-grad-op, hybrid: gradients travel so to their owner, who adds them in
                             * F32; rounding errors are lost. 0: in reduce_dtype. Small ranges are never quantised */
    const dtrain_compress_desc *compress; /* copied. DDP, hybrid: sums travel compressed between copies, once a step,
                                           * bucket by bucket. NULL: uncompressed */
    int check_every; /* DDP, hybrid: replicas compare one part of their weights at the end of every step, and all parts
                      * in this many steps; 0: 1,000; negative: never */
    int debug;       /* 1: watch memory, see "debugging" in >>fsdp; alike on every rank. 0: if DTRAIN_DEBUG=1 is set */
} dtrain_fsdp_desc;

/* What one rank will need and send, in bytes. Sizes are what is in use at most at once, in whole pages. */
typedef struct dtrain_fsdp_plan_result {
    size_t weights;       /* this rank's slices; without those that lie in the full parameters */
    size_t gradients;     /* slices of sums, and those of earlier micro-batches */
    size_t optimizer;     /* state */
    size_t compression;   /* residuals and velocities, at most. The group's allocator holds what a step packs */
    size_t full_weights;  /* pages of parameters in full at once, at most, and of slices that lie there */
    size_t full_grads;    /* pages of gradients in full at once, at most; with no_overlap of all units */
    size_t bookkeeping;   /* tables and page counts */
    size_t peak;          /* the sum of all these */
    uint64_t sent_gather; /* sent to other ranks in a step of one micro-batch that uses all parameters */
    uint64_t sent_reduce; /* the same for gradients, quantised or compressed if they are. Top-k: at most, by its last
                             ratio. A compressor of your own with `reduce`: as if uncompressed */
} dtrain_fsdp_plan_result;

/* Computes what one rank of world_size will need and send, before anything of the model is allocated.
 *
 *   table    as for dtrain_fsdp_create; it needs no memory
 *   desc     NULL: all defaults
 *   plan     out
 *   errors   DTRAIN_ERR_INVALID  a bad rank or world_size, or plan is NULL
 *            those of dtrain_fsdp_create for a bad table or desc
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_plan(const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc,
                                               int world_size, int rank, dtrain_fsdp_plan_result *plan);

typedef struct dtrain_fsdp dtrain_fsdp;

/* Shards the parameters of a table over a group.
 *
 * A parameter whose data is NULL gets addresses from the library and starts as zeros; see dtrain_fsdp_put and
 * dtrain_fsdp_set. A parameter with data lies there, and takes its first values from rank 0, or with no_broadcast from
 * each rank. Its pages stay yours, and so does its gradient's memory. A frozen parameter has no gradient and no
 * optimizer state.
 *
 *   comm     must outlive the object, which splits up to four groups off it, on a device up to seven
 *   table    copied, with names and parts; the same on every rank except for addresses. Parameters are F32. A frozen
 *            one of another dtype must have data, and stays there in full on every rank
 *   desc     NULL: all defaults; the same on every rank
 *   errors   DTRAIN_ERR_INVALID      a bad table, optimizer or desc; shard_size does not divide the world size;
 *                                    a group matches no parameter
 *            DTRAIN_ERR_UNSUPPORTED  A parameter is neither F32 nor frozen with data. Parameters are of several
 *                                    devices. On a device: quantised travel, or a transport that has no groups.
 *                                    compress.adam where m and v are sharded or on a device
 *            DTRAIN_ERR_MISMATCH     tables or descs differ between ranks; the text names the first parameter or field
 *                                    that differs, and who gave what
 *            DTRAIN_ERR_ABORTED      another rank failed; the text has its number and why
 *            DTRAIN_ERR_MEMORY
 *            those of dtrain_comm_split and dtrain_broadcast
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_create(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table,
                                                 size_t count, const dtrain_fsdp_desc *desc);

/* Shards a model that is in memory already: takes its values over, then writes the new addresses into the table.
 *
 * Every F32 parameter moves to memory of the library's. Its values are those of rank 0's data, or zeros if that is
 * NULL. Other ranks may leave data NULL, so only rank 0 needs to load a model. With no_broadcast each rank brings the
 * same values. The old memory is only read and stays yours: free it after the call. Until then a rank holds it beside
 * its slices, or beside a second full copy where the strategy keeps one. The call itself takes 1 MiB more.
 *
 *   table    in and out: data and grad become what dtrain_fsdp_param and dtrain_fsdp_grad return; grad of a frozen
 *            parameter becomes NULL. On a device data may be its memory. Those of stacked parameters become NULL, see
 *            dtrain_fsdp_unit_param. A frozen parameter of another dtype stays in its memory
 *   others   as for dtrain_fsdp_create
 *   errors   those of dtrain_fsdp_create; the table and all F32 values are unchanged
 *            DTRAIN_ERR_INVALID  with no_broadcast, a parameter has data on some ranks only
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_adopt(dtrain_fsdp **fsdp, dtrain_comm *comm, dtrain_param *table,
                                                size_t count, const dtrain_fsdp_desc *desc);

/* Frees the object; NULL is legal.
 *
 * Memory that you brought keeps its contents: after dtrain_fsdp_unshard, full parameters. Operations under way get one
 * second to end. After that they are cut short, and ranks that continue get DTRAIN_ERR_ABORTED. Over a transport of
 * your own, the call waits for them instead, because all groups are one.
 *
 * one thread per object */
DTRAIN_API void dtrain_fsdp_destroy(dtrain_fsdp *fsdp);

/* Return the address of a parameter and of its gradient, of full size, the same for the object's life.
 *
 * You may read the parameter while its unit is gathered. To set it, write it then and call dtrain_fsdp_put. The
 * gradient is zeros until you add to it, and again after dtrain_fsdp_reduce.
 *
 *   returns   NULL for an unknown name, and for the gradient of a frozen parameter. On a device also for a stacked
 *             parameter for which you brought no memory: see dtrain_fsdp_unit_param
 *
 * one thread per object */
DTRAIN_API float *dtrain_fsdp_param(const dtrain_fsdp *fsdp, const char *name);
DTRAIN_API float *dtrain_fsdp_grad(const dtrain_fsdp *fsdp, const char *name);

/* Return the address of one unit's part of a parameter in full, and of its gradient, the same for the object's life.
 *
 * The part is the whole parameter, or one layer of a stacked one. On a device, tied units have places of their own.
 *
 *   returns   NULL for a name that the unit does not have, and for the gradient of a frozen parameter
 *
 * one thread per object */
DTRAIN_API float *dtrain_fsdp_unit_param(const dtrain_fsdp *fsdp, const char *name, int unit);
DTRAIN_API float *dtrain_fsdp_unit_grad(const dtrain_fsdp *fsdp, const char *name, int unit);

/* Makes a unit's parameters readable, and starts to gather the next unit in the direction of the pass.
 *
 * A released unit stays until its room is needed. At most two units and the tied ones are in memory, so the last unit
 * of a forward pass is still there for the backward pass. You may gather a gathered unit again. Under strategies that
 * keep full parameters nothing is sent.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit; on a device, a held unit has its place
 *            those of dtrain_all_gather: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_gather(dtrain_fsdp *fsdp, int unit);

/* Says that you do not need a unit's parameters for now.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit, or it is not gathered
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_release(dtrain_fsdp *fsdp, int unit);

/* Go on to a unit: leave the unit that the last such call went to, and gather this one as dtrain_fsdp_gather does.
 *
 * Call one of them at the top of a layer's loop. They leave units as follows:
 *
 *   a unit that forward_to went to    is released
 *   a unit that backward_to went to   is reduced, because its gradients are complete
 *   the same unit, at the turn        stays: backward_to begins with the unit that forward_to ended with
 *   the last of a backward pass       is reduced by the next forward_to, or by the call that ends the step or
 *                                     micro-batch: finish, clip_grad_norm, step, next, join, drop, publish
 *   the last of a forward pass        is held until such a call: begin the next pass with forward_to, too
 *   one that you left yourself        is not left again
 *   one that you gathered beside      stays until you release or reduce it, as tied units do
 *
 *   errors   those of dtrain_fsdp_release or dtrain_fsdp_reduce, and of dtrain_fsdp_gather
 *
 * collective: every rank, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_forward_to(dtrain_fsdp *fsdp, int unit);
DTRAIN_API_MUST dtrain_status dtrain_fsdp_backward_to(dtrain_fsdp *fsdp, int unit);

/* Opens a step, for ranks whose batches differ. Without it every rank weighs 1, and the step has as many micro-batches
 * as you reduce.
 *
 *   micro_batches   of this rank; more are an error. With keep_full_grads, call it if there is more than one
 *   weight          of this rank's examples in the whole step, usually their tokens; at least 0. Gradients are sums,
 *                   divided once by the weight of all ranks
 *   errors          DTRAIN_ERR_INVALID  a step is open; a bad weight or number
 *                   those of dtrain_all_gather_async: the object is broken
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_begin(dtrain_fsdp *fsdp, int micro_batches, double weight);

/* Takes over a unit's gradients, starts to reduce them, and releases the unit's parameters. Call it when backward has
 * finished with the unit.
 *
 * The gradients become zeros, and their memory is free, as soon as they are on their way. Units travel from the last to
 * the first. A unit that you reduce before a later one waits for that one, in full. It does not wait for a unit that
 * you gathered and released on the way down, which leaves that unit out. Units without gradients are only released.
 * When all units are reduced, the next reduce begins the next micro-batch.
 *
 *   errors   DTRAIN_ERR_INVALID  No such unit, or more micro-batches than announced. The unit was reduced twice while
 *                                others are missing: see dtrain_fsdp_next. The unit was not gathered in this pass. A
 *                                gather for the forward pass counts only while the unit is not released, or where
 *                                parameters stay. The object stays as it was
 *            those of dtrain_reduce_scatter: the object is broken
 *
 * collective: every rank, any order of units; blocks up to timeout_ms for the unit before. With DTRAIN_PROGRESS_POLL a
 * micro-batch's first reduce waits until every rank has come to its own, or to the step's end */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_reduce(dtrain_fsdp *fsdp, int unit);

/* Ends a micro-batch in which this rank left units out: they add nothing to the sums. You may call it once after every
 * micro-batch, before the next forward pass. If all units are reduced already, it does nothing.
 *
 *   errors   DTRAIN_ERR_INVALID  more micro-batches than announced; the gradients of the last step are unused
 *
 * one thread per object; blocks as dtrain_fsdp_reduce does */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_next(dtrain_fsdp *fsdp);

/* Takes part in a micro-batch for which this rank has no examples. It gathers and releases every unit from the first to
 * the last and back, as the other ranks do, and adds nothing. It does not count as one of the announced micro-batches.
 *
 *   errors   DTRAIN_ERR_INVALID  a micro-batch is open: some of its units are reduced
 *                                the gradients of the last step are unused
 *
 * collective: every rank, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_join(dtrain_fsdp *fsdp);

/* Waits for all gradients, and divides them once: by the weight of all ranks, and by the loss scale.
 *
 * dtrain_fsdp_clip_grad_norm and dtrain_fsdp_step call it if you have not. A rank with fewer micro-batches than others
 * adds nothing to those that it lacks. Where units are gathered, it must have made their gathers by dtrain_fsdp_join.
 *
 *   total_weight   out: of all ranks; may be NULL. If it is 0, the gradients are not divided
 *   errors         DTRAIN_ERR_INVALID   on every rank: no rank has reduced anything, or with compress.adam all weights
 *                                       are 0. You can use the object
 *                  DTRAIN_ERR_ABORTED   a rank could not continue: see dtrain_fsdp_forward. You can use the object
 *                  DTRAIN_ERR_MISMATCH  on every rank: the weights of replicas differ (desc.check_every); the text
 *                                       names the first parameter and the ranks. You can use the object
 *                  those of dtrain_reduce_scatter: the object is broken
 *                  on any error the gradients are dropped
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_finish(dtrain_fsdp *fsdp, double *total_weight);

/* Measures the length of all gradients as one vector, and shortens it to max_norm if it is longer.
 *
 * The sum of squares is exact under any sharding, counts every element once, and is rounded to float64 once. The factor
 * max_norm / norm is rounded to float32 once. If the norm is not finite, the gradients stay as they are.
 *
 *   max_norm   0: measure only
 *   norm       out: the length before, the same on every rank. NULL: on a device the CPU does not wait for it
 *   errors     DTRAIN_ERR_INVALID  max_norm is negative or NaN
 *              those of dtrain_fsdp_finish
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_clip_grad_norm(dtrain_fsdp *fsdp, float max_norm, double *norm);

/* Measures and shortens the gradients of a whole model whose parts are on several ranks, such as stages of a pipeline
 * and parts of tensors.
 *
 * It works as dtrain_fsdp_clip_grad_norm does. Every element counts once, also where several ranks hold the same
 * parameter (dtrain_param_part.copies). If one part of the model drops the step, all parts do.
 *
 * With a loss scale, all parts skip a step together. So dtrain_fsdp_step needs this call if dtrain_comm_split made the
 * object's group from a larger one, or made the group that it was split or shrunk from in this way. Which ranks have
 * left since then makes no difference. The survivors of the world need no such call.
 *
 *   fsdps    count objects of this rank, one a chunk of a pipeline, each once
 *   model    the ranks whose objects together hold the model once. In a mesh these differ in pipeline and tensor
 *            coordinates alone. NULL: this rank's objects are the model
 *   norm     out, the same on every rank; may be NULL
 *   errors   those of dtrain_fsdp_clip_grad_norm, and of dtrain_all_reduce over model
 *            DTRAIN_ERR_ABORTED  another part of the model dropped the step
 *
 * collective: every rank of model and of the objects' groups, same order; blocks up to timeout_ms for each */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_clip_model_grad_norm(dtrain_fsdp *const *fsdps, int count, dtrain_comm *model,
                                                               float max_norm, double *norm);

/* Updates the weights from the gradients, drops the gradients, and gathers the weights where full parameters are kept.
 *
 * With a loss scale, a step in which any gradient of any rank is not finite changes no weight and halves the scale; see
 * `skipped` of dtrain_fsdp_get_stats. Without a loss scale such a step is applied as it is.
 *
 *   errors   DTRAIN_ERR_INVALID  lr negative or not finite, or no optimizer. On every rank: a loss scale in a group
 *                                that was split from a larger one, without dtrain_fsdp_clip_model_grad_norm in this
 *                                step. The step stays open
 *            those of dtrain_fsdp_finish
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_step(dtrain_fsdp *fsdp, float lr);

/* Drops the gradients of a step that you do not want to apply, and with compression all that it has left unsent. Do not
 * call it within a micro-batch.
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_drop(dtrain_fsdp *fsdp);

/* The part of one range that this rank holds. An optimizer of your own updates it, and a checkpoint saves it. */
typedef struct dtrain_slice {
    const char *name; /* of the parameter */
    dtrain_dtype dtype;
    size_t shape[DTRAIN_MAX_DIMS]; /* of the parameter in full; if it is a part of a tensor, the part's */
    int ndim;
    int layer; /* of a stacked parameter: the box is [layer, ...]; -1: the box is all of it */
    int unit;
    size_t begin, count; /* elements of the box in row-major order; count may be 0 */
    int no_decay;
    float *weights;        /* count float32 each; NULL if there is none, or none yet */
    float *grads;          /* set from dtrain_fsdp_finish to the step */
    float *state[2];       /* AdamW: m and v; SGD with momentum: the velocity */
    dtrain_device *device; /* that the memory belongs to; NULL: the CPU's */
} dtrain_slice;

/* Lists this rank's slices by unit, in table order, empty ones included.
 *
 * After your own update of the weights, call dtrain_fsdp_publish. To resume a run, write weights and state, call
 * dtrain_fsdp_publish, then dtrain_fsdp_set_step. It also works on a broken object.
 *
 *   slices   out: an array of the object's, good until the next call that takes the object
 *   count    out
 *   errors   DTRAIN_ERR_INVALID  NULL
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_local(dtrain_fsdp *fsdp, const dtrain_slice **slices, size_t *count);

/* Makes the weights that you wrote to the slices count, and drops the gradients. What was gathered before is not used
 * again. Where full parameters are kept, they are gathered.
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_publish(dtrain_fsdp *fsdp);

/* Return and set how many steps the optimizer has made. AdamW corrects its averages by this number, so save and restore
 * it. It is the same on every rank. A step whose weights could not be gathered counts.
 *
 *   errors   DTRAIN_ERR_INVALID  the gradients of a step are unused
 *
 * one thread per object; never blocks */
DTRAIN_API uint64_t dtrain_fsdp_get_step(const dtrain_fsdp *fsdp);
DTRAIN_API_MUST dtrain_status dtrain_fsdp_set_step(dtrain_fsdp *fsdp, uint64_t step);

/* Takes this rank's slice of a gathered unit from its full parameters. Write the same values on every rank first. With
 * it you can initialise a model that no rank can hold.
 *
 *   errors   DTRAIN_ERR_INVALID  the unit is not gathered
 *
 * one thread per object; never blocks. On a device with a gather_dtype of 16 bits it blocks up to timeout_ms for
 * another unit that is under way */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_put(dtrain_fsdp *fsdp, int unit);

/* Sets a parameter from one rank's full value.
 *
 *   value    on root: all elements, float32 in the CPU's memory. On other ranks: not read, may be NULL
 *   errors   DTRAIN_ERR_INVALID      no such parameter, a bad root, or value is NULL on root
 *            DTRAIN_ERR_UNSUPPORTED  the parameter is not F32
 *            those of dtrain_broadcast: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_set(dtrain_fsdp *fsdp, const char *name, const float *value, int root);

/* Copies a parameter's full value, as float32, to one rank, or with root -1 to all.
 *
 *   value    out: all elements, in the CPU's memory. On ranks that get none: not touched, may be NULL
 *   errors   DTRAIN_ERR_INVALID      no such parameter, a bad root, or value is NULL on a rank that gets it
 *            DTRAIN_ERR_UNSUPPORTED  the parameter is not F32
 *            those of dtrain_gather: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_get(dtrain_fsdp *fsdp, const char *name, float *value, int root);

/* Gathers every parameter and keeps all of them until the next step.
 *
 * Call it before other code evaluates the model, or before destroy, which leaves full parameters in memory that you
 * brought. They are rounded to gather_dtype, like all that is gathered; dtrain_fsdp_get returns the masters.
 *
 *   errors   DTRAIN_ERR_UNSUPPORTED  on a device where units share places
 *            those of dtrain_all_gather: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_unshard(dtrain_fsdp *fsdp);

/* Return the number of ranks that share one copy of the parameters, and the factor by which you multiply the loss now.
 * Without a loss scale the factor is 1.
 *
 * one thread per object */
DTRAIN_API int dtrain_fsdp_shard_size(const dtrain_fsdp *fsdp);
DTRAIN_API float dtrain_fsdp_loss_scale(const dtrain_fsdp *fsdp);

/* What an object has done since it was made. */
typedef struct dtrain_fsdp_stats {
    uint64_t steps;          /* applied */
    uint64_t skipped;        /* not applied, because a gradient was not finite */
    int64_t communicated_ns; /* time that gathers and reductions were under way, summed over all of them */
    int64_t waited_ns;       /* time that the caller waited for them */
    uint64_t dense_bytes;    /* that this rank's reductions would have sent as float32 */
    uint64_t sent_bytes;     /* that they sent, without headers */
    size_t bytes;            /* in use now: memory and pages */
    size_t peak_bytes;       /* the most at once */
} dtrain_fsdp_stats;

/* Returns the counters. The share of communication that computing hides is 1 - waited_ns / communicated_ns, or 0 where
 * the waits took longer, as when a wait is for a rank that computes longer.
 *
 * one thread per object */
DTRAIN_API dtrain_fsdp_stats dtrain_fsdp_get_stats(const dtrain_fsdp *fsdp);

/* Lists the buckets of the last finished step, in the order in which they were sent.
 *
 *   buckets   out: an array of the object's, good until the next step; may be NULL
 *   returns   how many there are
 *
 * one thread per object; never blocks */
DTRAIN_API size_t dtrain_fsdp_buckets(const dtrain_fsdp *fsdp, const dtrain_bucket **buckets);

/* Counts bytes that you sent of a step's gradients by a way of your own, such as an aggregator.
 *
 * Call it between dtrain_fsdp_finish and the step. It adds to the counters, adds one bucket of all units, and adds a
 * trace event from begin_ns until now.
 *
 *   begin_ns      when it began, by CLOCK_MONOTONIC; not after now
 *   dense_bytes   that it would have sent as float32
 *   sent_bytes    that it sent
 *   errors        DTRAIN_ERR_INVALID  NULL
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_add_sent(dtrain_fsdp *fsdp, int64_t begin_ns, uint64_t dense_bytes,
                                                   uint64_t sent_bytes);

/* Lists an FSDP's state between steps, for a checkpoint. In an open step it is the state before that step. A load gives
 * an open step up, and publishes the weights. The list has:
 *
 *   NAME                    weights
 *   NAME@adam.m, @adam.v    optimizer state of AdamW
 *   NAME@momentum           optimizer state of SGD
 *   settings                the optimizer's constants and number of steps; the loss scale, and its good steps
 *   with desc.compress      what compression keeps, for each bucket in the order in which they are sent
 *
 * A parameter that is a part (see dtrain_param_part) gives pieces of the whole tensor. A part of several blocks gives
 * one piece for each run of elements inside a block. Its copies multiply with those of the FSDP. If slices are sharded,
 * each copy of a part is cut in another way, and only copy 0 is saved.
 *
 * What compression keeps is as dtrain_compressed_pieces says, numbered from 0; PowerSGD has an entry for each matrix.
 * With feedback.momentum the velocity of what travels uncompressed follows, as plain_velocity.NUMBER. unit.0 is the
 * weight of the sums that all of these are of. What a load does not bring together with it is forgotten, and the log
 * says so: older files have no unit.0, and with `lenient` an entry may have another shape.
 * Each entry has a row for each rank of the FSDP, and only as many ranks can continue from it. If shards have different
 * lengths, each shard has entries of its own, under shard-N/NAME, with a row for each copy. Give each of several
 * compressed FSDPs in one checkpoint a dtrain_pieces.name.
 *
 * any thread; a save or load is collective over the FSDP's ranks */
DTRAIN_API dtrain_pieces dtrain_fsdp_pieces(dtrain_fsdp *fsdp);

/* Writes the last events to a file as a Chrome trace, with lanes for computing, gathers, reductions and waiting.
 * Reductions say how many bytes they sent, and would have sent as float32.
 *
 *   errors   DTRAIN_ERR_INVALID  the desc has no trace_events, or path is NULL
 *            DTRAIN_ERR_IO       the file cannot be written
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_trace(const dtrain_fsdp *fsdp, const char *path);

#ifdef __cplusplus
}
#endif

#endif
