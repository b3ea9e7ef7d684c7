/* ---- >>fsdp ----
 * Fully sharded data parallelism for a program that keeps its own loop. Parameters are declared once, in a table;
 * their addresses never change, but a unit's memory is there only while the unit is gathered. Gradients are reduced
 * to the shards of their owners as soon as a unit's are complete, and the optimizer runs on shards.
 *
 * A unit is the concatenation of its ranges in table order (a stacked tensor gives one layer to each of its units).
 * It is cut into as many slices as ranks shard it, earlier ones one element longer; there is no padding, and a rank
 * may hold nothing of a tensor, or of a unit. The same calls serve every strategy:
 *
 *                  parameters      gradients    optimizer state   sent a step, for P bytes on n ranks
 *   FULL_SHARD     slice           slice        slice             2 or 3 P (n-1)/n
 *   SHARD_GRAD_OP  full            slice        slice             2 P (n-1)/n
 *   DDP            full            full         full              2 P (n-1)/n
 *   HYBRID_SHARD   slice of a node, replicated over the nodes; as FULL_SHARD in a node of s ranks, and
 *                  2 P/s (m-1)/m between m nodes
 *
 * (PyTorch's SHARD_GRAD_OP shards parameters between steps; here they stay.) Reductions are the tree of >>order, so
 * FULL_SHARD, SHARD_GRAD_OP and DDP give the same weights, bit for bit; HYBRID_SHARD does if shard_size is a power of
 * two. Micro-batches are folded by the same tree: if micro-batch i of rank r is number i * ranks + r of the step
 * (dtrain_sampler_desc.strided), a fixed number of them gives the same weights on 1, 2, 4 and 8 ranks.
 *
 * With a reduce_dtype of 16 bits, a gradient is rounded when it leaves its rank, also in a world of one: once a
 * micro-batch, or with keep_full_grads once a step. The owner adds in float32 and rounds nothing again, so all of the
 * above holds under FULL_SHARD and SHARD_GRAD_OP. DDP and HYBRID_SHARD also round the sum of each copy, and what all
 * copies get, once in each reduction; their weights differ in these roundings. On a device the rounded numbers travel
 * to their owner as float32, with the same bits; between copies they travel in 16 bits.
 *
 * Compressed sums (desc.compress) imply keep_full_grads, and bucket_bytes says among how much top-k selects. A thread
 * of the object's sends bucket after bucket while backward still runs. With no_overlap, or progress by poll, the call
 * that ends the step sends, with the same bits. A world of one compresses too, so that it trains as several do.
 *
 * Quantised parameters (quantise_gather) are within half a scale of the masters, 1/254 of the largest of their block,
 * the same bits on every rank; gradients (quantise_reduce) are once more rounded so before they are added. A world of
 * one rounds nothing.
 *
 * Every rank makes the same gather calls in the same order: gathering is collective, and between two of them each rank
 * lets go of the same units, by dtrain_fsdp_release or dtrain_fsdp_reduce. Reductions may come in any order of units,
 * and a rank may leave some out: a unit that was gathered on the way down and released adds nothing. (Over a transport
 * of the caller's own, every rank makes the same reductions in the same order.) A group's death ends every call with
 * DTRAIN_ERR_PEER_LOST; the object can then only be asked for its slices and destroyed.
 *
 * On a device (dtrain_param.device, the same queue for all of a table) the same calls give the same bits. What the
 * caller queues on that queue comes in order with them: after a gather it sees the parameters, before a reduce it has
 * left the gradients. Gathers and reductions go on beside it, on queues of their own, and so does the CPU, but where it
 * is told a number (a norm, a loss scale's verdict) and where groups of devices stage (>>device-group). A unit of which
 * the caller holds no memory is one piece: its ranges lie one after another in table order, at addresses that stay
 * (dtrain_fsdp_unit_param). Units of even numbers share one place, those of odd numbers another. So two units that are
 * held together have one even and one odd number, or are tied, and gradients are reduced from the last unit to the
 * first; else the result is DTRAIN_ERR_INVALID. Nothing there travels quantised. With DTRAIN_PROGRESS_POLL, or if a
 * device has one queue, nothing goes on beside the caller: ranks make the same reductions in the same order.
 *
 * Replicas (DDP, HYBRID_SHARD) compare a hash of their weights when a step is finished (desc.check_every): of one part
 * of the trained weights a step, at least 1,024 elements, in a message that is sent anyway. If it differs, that call
 * ends on every rank with DTRAIN_ERR_MISMATCH: the text names the first parameter that differs and the ranks that have
 * other values than most. The step is dropped, and the object can be used: give every rank the same values, or destroy
 * it. On a device the exact sum of the part's squares stands for the hash, and a difference is found a step later, or
 * some steps if the CPU runs far ahead.
 *
 * With DTRAIN_DEBUG=1 in the environment, or desc.debug, a wrong order of calls ends the program where it would train
 * on other numbers. Parameters that are not gathered cannot be read; gradients that were reduced cannot be written
 * before their unit's next gather. Such an access is a SIGSEGV, or on some systems a SIGBUS, after a line on stderr:
 *
 *   dtrain: rank 1 read parameter qkvw (unit 3), which is not gathered: call dtrain_fsdp_gather(fsdp, 3) before
 *
 * The signal goes to the handler that the program has set before, or ends the program as it would without dtrain. A
 * system call that is given such memory fails with EFAULT. Memory of the caller's is closed as the library's is, in
 * whole pages; a page that two units share stays open while one of them is. Slices of dtrain_fsdp_local stay open, and
 * so do parameters under the strategies that keep them and on a rank alone. Nothing is gathered ahead. Memory of a
 * device is not watched. If the system closes no pages, the log says so.
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

/* What some parameters have of their own. The first group of a desc whose name fits counts. */
typedef struct dtrain_param_group {
    const char *name;   /* of a parameter; with a * at its end, of all that begin so */
    float lr_factor;    /* of the learning rate; 0: 1 */
    float weight_decay; /* 0: the optimizer's */
    int no_decay;       /* 1: none */
} dtrain_param_group;

/* What reducing some units' gradients took in a step: units that were added between copies together, or one whose
 * gradients were scattered. */
typedef struct dtrain_bucket {
    int first_unit, last_unit;
    uint64_t dense_bytes; /* that this rank would have sent as float32 */
    uint64_t sent_bytes;  /* that it has sent, headers aside */
    int64_t ns;           /* that it was under way */
} dtrain_bucket;

typedef struct dtrain_fsdp_desc {
    dtrain_strategy strategy;         /* 0: full shard */
    int shard_size;                   /* hybrid: ranks of a node, which divides the world size; others: not read */
    dtrain_dtype gather_dtype;        /* that parameters travel in, F32, BF16 or F16; 0: F32. Masters stay F32 */
    dtrain_dtype reduce_dtype;        /* that gradients travel in, F32, BF16 or F16; 0: F32. They are summed in F32:
                                         the first page of >>fsdp says what is rounded */
    dtrain_optimizer_desc optimizer;  /* kind DTRAIN_OPTIMIZER_NONE: the caller's own, see dtrain_fsdp_local */
    const dtrain_param_group *groups; /* read by create */
    size_t group_count;
    int no_reshard_after_forward; /* 1: what was gathered stays until the step */
    int no_prefetch;              /* 1: a unit is gathered when it is asked for */
    int no_overlap;               /* 1: nothing is reduced before all units of a micro-batch are */
    int keep_full_grads;          /* 1: micro-batches are folded on each rank in full, and communicated once a step */
    int micro_batches;            /* of a rank in a step, the most, for the plan; 0: 1 */
    float loss_scale;             /* the first, by which the caller multiplies its loss; 0: none is used */
    int loss_scale_steps;         /* good steps after which it doubles; 0: 2,000 */
    size_t bucket_bytes;          /* units are added up between copies (DDP, hybrid) once so much of them waits,
                                     each by itself where gradients travel in 16 bits; 0: 1 MiB; 1: each by itself */
    int no_broadcast;             /* 1: data in the table is the same on all ranks already */
    size_t trace_events;          /* kept for dtrain_fsdp_trace, the last of them; 0: none */
    size_t quantise_gather; /* full shard, hybrid: parameters travel as int8 from the F32 masters, so many elements to a
                             * scale, a multiple of 8, at most 65,536 (256 is usual); 0: in gather_dtype */
    size_t quantise_reduce; /* full shard, shard-grad-op, hybrid: so do gradients to their owner, who adds them in F32;
                             * what rounding loses is lost. 0: in reduce_dtype. Of neither the small ranges */
    const dtrain_compress_desc *compress; /* copied; DDP, hybrid: sums travel compressed between copies, once a
                                           * step, bucket by bucket. NULL: as they are */
    int check_every; /* DDP, hybrid: replicas compare a hash of their weights at the end of every step, one of so
                      * many parts of them at a time; 0: 1,000 steps for all parts; negative: never */
    int debug; /* 1: memory is watched, see above; alike on every rank. 0: where the environment has DTRAIN_DEBUG=1 */
} dtrain_fsdp_desc;

/* What one rank will need and send, in bytes. Peak is what is in use at most at once, in whole pages. */
typedef struct dtrain_fsdp_plan_result {
    size_t weights;       /* this rank's slices; 0 for those that lie in the full parameters */
    size_t gradients;     /* slices of sums, with those of earlier micro-batches */
    size_t optimizer;     /* state */
    size_t compression;   /* residuals and velocities, at most; what a step packs comes from the group's allocator */
    size_t full_weights;  /* pages of parameters that are gathered at once, at most, and of slices that lie there */
    size_t full_grads;    /* pages of gradients that are in full at once, at most; with no_overlap of all units */
    size_t bookkeeping;   /* tables and page counts */
    size_t peak;          /* the sum of all these */
    uint64_t sent_gather; /* to other ranks in a step of one micro-batch, all parameters used */
    uint64_t sent_reduce; /* and for gradients, quantised or compressed if they are. Of top-k at most, by its last
                             ratio, as fewer bytes may name the elements; of OWN with reduce as without compression */
} dtrain_fsdp_plan_result;

/* Says what one rank of world_size will need, before anything is allocated. The table needs no memory for it.
 *
 *   desc     NULL: all defaults
 *   plan     out
 *   errors   DTRAIN_ERR_INVALID  as dtrain_fsdp_create
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_plan(const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc,
                                               int world_size, int rank, dtrain_fsdp_plan_result *plan);

typedef struct dtrain_fsdp dtrain_fsdp;

/* Shards a table's parameters over a group.
 *
 * A parameter whose data is NULL gets a range of addresses from the library, and starts as zeros (see dtrain_fsdp_put
 * and dtrain_fsdp_set); one that has data lies there, takes its first values from it, rank 0's unless no_broadcast,
 * and its pages stay the caller's, as does its gradient's memory. A parameter with frozen set has no gradient, and no
 * optimizer state.
 *
 *   comm     must outlive it; three or four groups of its ranks are made from it
 *   table    copied, names and parts included; the same on every rank but for addresses. F32; a frozen
 *            parameter of another dtype must have data, and stays there in full on every rank
 *   desc     NULL: all defaults; the same on every rank
 *   errors   DTRAIN_ERR_INVALID      a bad table, optimizer or desc; a world that is no multiple of shard_size
 *            DTRAIN_ERR_UNSUPPORTED  a parameter that is neither F32 nor frozen with data; parameters of several
 *                                    devices; on a device something quantised, or a transport that has no groups;
 *                                    compress.adam where m and v are sharded or on a device
 *            DTRAIN_ERR_MISMATCH     tables or descs differ between ranks; the text names the first parameter or field
 *                                    that does, and who gave what
 *            DTRAIN_ERR_ABORTED      another rank could not make its own; the text has its number and why
 *            DTRAIN_ERR_MEMORY; those of dtrain_comm_split and dtrain_broadcast
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_create(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table,
                                                 size_t count, const dtrain_fsdp_desc *desc);

/* As dtrain_fsdp_create, for a program that has its parameters already: takes their values over, then writes where they
 * are from now on into the table.
 *
 * Every F32 parameter gets memory of the library's. Its values are those of rank 0's data, zeros if that is NULL; other
 * ranks may leave data NULL, so that only rank 0 loads a model. With no_broadcast each rank brings the same values. The
 * old memory is only read, and stays yours: free it when your program uses the new. Until then a rank holds it beside
 * its slices, under strategies that keep full parameters beside a second copy. The call itself takes 1 MiB more.
 *
 *   table    in and out: data and grad become what dtrain_fsdp_param and dtrain_fsdp_grad return, grad of a frozen
 *            parameter NULL. On a device data may be its memory; those of stacked parameters become NULL, see
 *            dtrain_fsdp_unit_param. A frozen parameter of another dtype stays in its memory
 *   others   as dtrain_fsdp_create
 *   errors   as dtrain_fsdp_create; the table and all F32 values are as they were
 *            DTRAIN_ERR_INVALID  with no_broadcast, a parameter has data on some ranks only
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_adopt(dtrain_fsdp **fsdp, dtrain_comm *comm, dtrain_param *table,
                                                size_t count, const dtrain_fsdp_desc *desc);

/* Frees it; NULL is legal. Memory of the caller's is left as it is: after dtrain_fsdp_unshard, full parameters.
 * Operations on their way are given a second to end, then cut short: ranks that go on with theirs get
 * DTRAIN_ERR_ABORTED. (Over a transport of the caller's own, whose one group they share, they are waited for.)
 *
 * one thread per object */
DTRAIN_API void dtrain_fsdp_destroy(dtrain_fsdp *fsdp);

/* Return the address of a parameter and of its gradient, of full size, the same for the object's life; NULL for none of
 * that name, for the gradient of a frozen one, and on a device for a stacked one without memory of the caller's: see
 * dtrain_fsdp_unit_param. The parameter may be read while its unit is gathered, and written then to be handed to
 * dtrain_fsdp_put. The gradient is zeros until the caller adds to it, and again from dtrain_fsdp_reduce on.
 *
 * one thread per object */
DTRAIN_API float *dtrain_fsdp_param(const dtrain_fsdp *fsdp, const char *name);
DTRAIN_API float *dtrain_fsdp_grad(const dtrain_fsdp *fsdp, const char *name);

/* Return where one unit's part of a parameter lies in full, the whole of it or the layer of a stacked one, and where
 * its gradient does, as long as the object lives. On a device tied units have a place of their own. NULL for none of
 * that name in that unit, and for the gradient of a frozen one.
 *
 * one thread per object */
DTRAIN_API float *dtrain_fsdp_unit_param(const dtrain_fsdp *fsdp, const char *name, int unit);
DTRAIN_API float *dtrain_fsdp_unit_grad(const dtrain_fsdp *fsdp, const char *name, int unit);

/* Makes a unit's parameters readable, and starts to gather the next one, in the direction in which calls go.
 *
 * A released unit stays until its room is needed: at most two units that rotate and the tied ones are in memory, so
 * that the last of a forward pass is still there for the backward pass. A unit may be gathered again while it is
 * gathered. Under strategies that keep full parameters the call only takes note.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit; those of dtrain_all_gather: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_gather(dtrain_fsdp *fsdp, int unit);

/* Says that a unit's parameters are not needed for now.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit, or it is not gathered
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_release(dtrain_fsdp *fsdp, int unit);

/* Go on to a unit in one call at the top of a layer's loop: leave the unit that the last such call went to, and gather
 * this one as dtrain_fsdp_gather does.
 *
 * The unit that forward_to went to is released. The unit that backward_to went to is reduced: its gradients are
 * complete then. If backward_to begins with the unit that forward_to ended with, the unit stays. The last unit of a
 * backward pass is reduced by the next forward_to, or by the call that ends the step or micro-batch: finish,
 * clip_grad_norm, step, next, join, drop, publish. That of a forward pass is held until then: begin the next pass with
 * forward_to, too. A unit that you have released or reduced by yourself is not left again. Units that you gather beside
 * these (tied ones) stay until you release or reduce them.
 *
 *   errors   those of dtrain_fsdp_release or dtrain_fsdp_reduce, and of dtrain_fsdp_gather
 *
 * collective: every rank, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_forward_to(dtrain_fsdp *fsdp, int unit);
DTRAIN_API_MUST dtrain_status dtrain_fsdp_backward_to(dtrain_fsdp *fsdp, int unit);

/* Opens a step, for ranks whose batches differ. Without it every rank weighs 1, and the step has as many micro-batches
 * as are reduced.
 *
 *   micro_batches   of this rank; more are an error. With keep_full_grads needed where there is more than one
 *   weight          of this rank's examples in the whole step, usually their tokens; may be 0. Gradients are sums,
 *                   divided once by the weight of all ranks
 *   errors          DTRAIN_ERR_INVALID  gradients of a step are not used yet; a bad weight or number
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_begin(dtrain_fsdp *fsdp, int micro_batches, double weight);

/* Takes a unit's gradients over when backward has finished with the unit, starts to reduce them, and releases the
 * unit's parameters. Gradients are zero, and their memory free, as soon as they are on their way.
 *
 * Units are reduced from the last to the first; one that comes before a later one waits for it in full, unless that one
 * was gathered on the way down and released, which leaves it out. Units without gradients are only released. When all
 * were reduced and one is again, the next micro-batch has begun.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit; it was not gathered in this pass, so that its gradients cannot have
 *                                been computed: a gather before the forward pass counts only while the unit is not
 *                                released, or where parameters stay; reduced twice while others are missing (see
 *                                dtrain_fsdp_next); more micro-batches than announced. The object stays as it was
 *            those of dtrain_reduce_scatter: the object is broken
 *
 * collective: every rank, any order of units; blocks up to timeout_ms for the unit before, and with
 * DTRAIN_PROGRESS_POLL at a micro-batch's first until every rank has come to its own, or to the step's end */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_reduce(dtrain_fsdp *fsdp, int unit);

/* Ends a micro-batch in which this rank left units out: they add nothing to the sums. After one that ended by itself it
 * does nothing, until the next pass up has begun.
 *
 *   errors   DTRAIN_ERR_INVALID  more micro-batches than announced; gradients of a step are not used yet
 *
 * one thread per object; blocks as dtrain_fsdp_reduce */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_next(dtrain_fsdp *fsdp);

/* Stands in for a micro-batch for which this rank has no examples: gathers and releases every unit from the first to
 * the last and back, as the others do, and adds nothing. Not counted among those that this rank has announced.
 *
 *   errors   DTRAIN_ERR_INVALID  units of a micro-batch were reduced; gradients of a step are not used yet
 *
 * collective: every rank, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_join(dtrain_fsdp *fsdp);

/* Waits for all gradients and divides them once by the weight of all ranks, and by the loss scale. A rank with fewer
 * micro-batches than others adds nothing to those that it lacks; where units are gathered it has made their gathers, by
 * dtrain_fsdp_join. Called by clip_grad_norm and step where the caller has not.
 *
 *   total_weight   out: of all ranks; may be NULL. When it is 0 gradients are not divided
 *   errors         DTRAIN_ERR_INVALID  on every rank: no rank has reduced anything. The object can be used
 *                  DTRAIN_ERR_ABORTED  a rank could not go on: see dtrain_fsdp_forward
 *                  DTRAIN_ERR_MISMATCH on every rank: weights of replicas differ (desc.check_every); the text names the
 *                                      first parameter and the ranks. The object can be used
 *                  those of dtrain_reduce_scatter: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_finish(dtrain_fsdp *fsdp, double *total_weight);

/* Measures the length of all gradients as one vector, and shortens it to max_norm when it is longer.
 *
 * The sum of squares is exact, every element once, whatever the sharding, and rounded to float64 once; the factor
 * max_norm / norm is rounded to float32 once. Not finite: gradients are left as they are.
 *
 *   max_norm   0: measure only
 *   norm       out, the same on every rank; NULL: on a device the CPU does not wait for it
 *   errors     as dtrain_fsdp_finish
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_clip_grad_norm(dtrain_fsdp *fsdp, float max_norm, double *norm);

/* As dtrain_fsdp_clip_grad_norm over a whole model, of which this rank's objects and those of other ranks hold parts,
 * as stages of a pipeline and parts of tensors: every element counts once, also of parameters that several ranks have
 * alike (dtrain_param_part.copies). If a part of the model drops the step, all of it does. With a loss scale, all parts
 * skip a step together.
 *
 *   fsdps    count objects of this rank, one a chunk of a pipeline
 *   model    ranks whose objects together hold the model once, over groups of ranks that hold the same: of a mesh,
 *            those that differ in pipeline and tensor coordinates alone; NULL: this rank's objects are the model
 *   norm     out, the same on every rank; may be NULL
 *   errors   as dtrain_fsdp_finish, and dtrain_all_reduce over model
 *            DTRAIN_ERR_ABORTED  another part of the model has dropped the step
 *
 * collective: every rank of model and of the objects' groups, same order; blocks up to timeout_ms for each */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_clip_model_grad_norm(dtrain_fsdp *const *fsdps, int count, dtrain_comm *model,
                                                               float max_norm, double *norm);

/* Updates the weights from the gradients, which are gone then, and gathers them where full parameters are kept.
 *
 * With a loss scale, a step in which any rank's gradient is not finite changes no weight and halves the scale; see
 * skipped of dtrain_fsdp_get_stats. Without one it is applied as it is.
 *
 *   errors   as dtrain_fsdp_finish; DTRAIN_ERR_INVALID lr negative or not finite, or no optimizer
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_step(dtrain_fsdp *fsdp, float lr);

/* Drops the gradients of a step that is not to be applied; legal at any time but within a micro-batch.
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_drop(dtrain_fsdp *fsdp);

/* The part of one range that this rank holds: what an optimizer of the caller's updates, and a checkpoint saves. */
typedef struct dtrain_slice {
    const char *name; /* of the parameter */
    dtrain_dtype dtype;
    size_t shape[DTRAIN_MAX_DIMS]; /* of the parameter in full; of one that is a part the part's */
    int ndim;
    int layer; /* of a stacked parameter: the box [layer, ...]; -1: the box is all of it */
    int unit;
    size_t begin, count; /* elements of the box in row-major order; count may be 0 */
    int no_decay;
    float *weights;  /* count float32 each; NULL where there is none, or none yet */
    float *grads;    /* after dtrain_fsdp_finish, until the step */
    float *state[2]; /* AdamW: m and v; SGD with momentum: the velocity */
    dtrain_device *device; /* whose memory these are; NULL: the CPU's */
} dtrain_slice;

/* Lists this rank's slices, those of no elements included: by unit, in table order. The array is the object's; it stays
 * until the next call that takes the object.
 *
 * After an own update of the weights, call dtrain_fsdp_publish. To resume, write weights and state, then publish, and
 * say with dtrain_fsdp_set_step how old they are. They can be read when the object is broken, too.
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_local(dtrain_fsdp *fsdp, const dtrain_slice **slices, size_t *count);

/* Makes new slices of weights count: what was gathered before is not used again; where full parameters are kept they
 * are gathered. Gradients are dropped.
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_publish(dtrain_fsdp *fsdp);

/* Return and set the number of steps that the optimizer has made, by which AdamW corrects its averages: part of what
 * is saved and resumed. The same on every rank. A step that could not be published is counted.
 *
 *   errors   DTRAIN_ERR_INVALID  gradients of a step are not used yet
 *
 * one thread per object; never blocks */
DTRAIN_API uint64_t dtrain_fsdp_get_step(const dtrain_fsdp *fsdp);
DTRAIN_API_MUST dtrain_status dtrain_fsdp_set_step(dtrain_fsdp *fsdp, uint64_t step);

/* Takes this rank's slice of a gathered unit from its full parameters: the caller has written them, the same on every
 * rank, as when it initialises a model that no rank can hold.
 *
 *   errors   DTRAIN_ERR_INVALID  the unit is not gathered
 *
 * one thread per object; never blocks, but on a device with a gather_dtype of 16 bits: up to timeout_ms for another
 * unit that is on its way */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_put(dtrain_fsdp *fsdp, int unit);

/* Sets a parameter from one rank's full value.
 *
 *   value    all elements on root, in the CPU's memory; on other ranks not read, may be NULL
 *   errors   DTRAIN_ERR_INVALID  no such parameter, or a bad root
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_set(dtrain_fsdp *fsdp, const char *name, const float *value, int root);

/* Copies a parameter's full value, in F32, to one rank, or with root -1 to all.
 *
 *   value    out: all elements, in the CPU's memory; on ranks that get none not touched, may be NULL
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_get(dtrain_fsdp *fsdp, const char *name, float *value, int root);

/* Gathers every parameter and keeps all until the next step: for an evaluation by foreign code, or before destroy,
 * which leaves them in memory of the caller's. Rounded to gather_dtype, as all that is gathered; dtrain_fsdp_get has
 * the masters.
 *
 *   errors   DTRAIN_ERR_UNSUPPORTED  on a device, where units share places
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_unshard(dtrain_fsdp *fsdp);

/* Return the number of ranks that share one copy of the parameters, and the factor by which the caller multiplies its
 * loss now, which is 1 if none is used.
 *
 * one thread per object */
DTRAIN_API int dtrain_fsdp_shard_size(const dtrain_fsdp *fsdp);
DTRAIN_API float dtrain_fsdp_loss_scale(const dtrain_fsdp *fsdp);

/* What an object has done since it was made. */
typedef struct dtrain_fsdp_stats {
    uint64_t steps;          /* applied */
    uint64_t skipped;        /* not applied, because a gradient was not finite */
    int64_t communicated_ns; /* that gathers and reductions were under way, each by itself */
    int64_t waited_ns;       /* that the caller waited for them */
    uint64_t dense_bytes;    /* that this rank's reductions would have sent as float32 */
    uint64_t sent_bytes;     /* that they have sent, headers aside */
    size_t bytes;            /* in use now: memory and pages */
    size_t peak_bytes;       /* the most at once */
} dtrain_fsdp_stats;

/* Returns the counters; hidden communication is 1 - waited_ns / communicated_ns.
 *
 * one thread per object */
DTRAIN_API dtrain_fsdp_stats dtrain_fsdp_get_stats(const dtrain_fsdp *fsdp);

/* Lists the buckets of the last step that was finished, in the order in which they were sent; returns how many. The
 * array is the object's, and stays until the next step.
 *
 *   buckets   out; may be NULL
 *
 * one thread per object; never blocks */
DTRAIN_API size_t dtrain_fsdp_buckets(const dtrain_fsdp *fsdp, const dtrain_bucket **buckets);

/* Adds what the caller has sent of a step's gradients by a way of its own, such as an aggregator, between
 * dtrain_fsdp_finish and the step: to the counters, to the buckets as one of all units, and to the trace, from begin_ns
 * until now.
 *
 *   begin_ns      of CLOCK_MONOTONIC; not after now
 *   dense_bytes   that it would have sent as float32
 *   errors        DTRAIN_ERR_INVALID  NULL
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_add_sent(dtrain_fsdp *fsdp, int64_t begin_ns, uint64_t dense_bytes,
                                                   uint64_t sent_bytes);

/* Lists an FSDP's state between steps: weights, optimizer state under NAME@adam.m, NAME@adam.v or NAME@momentum, its
 * settings and number of steps, and the loss scale with the good steps since it changed. A load publishes the weights.
 *
 * A parameter that is a part (see dtrain_param_part) gives pieces of the whole tensor: of a part of several blocks one
 * for each run of elements inside a block. Its copies multiply with those of the FSDP. Where slices are sharded, those
 * of its copies are cut otherwise on each rank: of these, copy 0's are saved.
 *
 * With desc.compress it also lists what compression keeps: for each bucket in the order in which they are sent, by
 * PowerSGD for each matrix, what dtrain_compressed_pieces says, numbered from 0. With feedback.momentum the velocity of
 * what travels as it is comes last, as plain_velocity.NUMBER. Each has a row for each rank of the FSDP, and as many
 * ranks go on from it. If shards are not equally long, each shard has its own under shard-N/NAME, with a row for each
 * copy. Several compressed FSDPs in one checkpoint need a dtrain_pieces.name each.
 *
 * any thread; a save or load is collective over the FSDP's ranks */
DTRAIN_API dtrain_pieces dtrain_fsdp_pieces(dtrain_fsdp *fsdp);

/* Writes the last events as a Chrome trace: a lane of computation, of gathers, of reductions, and of waiting.
 * Reductions say how many bytes they sent, and would have sent dense.
 *
 *   errors   DTRAIN_ERR_INVALID  the desc has no trace_events; DTRAIN_ERR_IO
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_trace(const dtrain_fsdp *fsdp, const char *path);

#ifdef __cplusplus
}
#endif

#endif
