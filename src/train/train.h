/* ---- >>train ----
 * From gradients to the next weights: the parameter table, the sampler, optimizers, schedules, gradient
 * clipping, and aggregators. DDP is under >>data-parallel.
 * Gradients are sums with a weight (usually a number of tokens) and are divided once, by the weight of all
 * ranks, so that uneven batches and ranks with none are right. Micro-batches are folded by the tree of
 * >>order: a fixed number of them gives the same weights, bit for bit, on 1, 2, 4 and 8 ranks. */
#ifndef DTRAIN__TRAIN_H
#define DTRAIN__TRAIN_H
#include "../base/base.h"
#include "../tensor/tensor.h"
#include "../tensor/device.h"
#include "../tensor/pieces.h"
#include "../comm/comm.h"
#include "../compress/descs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a parameter lies in a tensor of the whole model that several ranks hold: layers of a stage, rows or columns of
 * a tensor-parallel rank. What is saved and loaded is in terms of the whole tensor, of the parameter's name. */
typedef struct dtrain_param_part {
    size_t shape[DTRAIN_MAX_DIMS]; /* of the whole tensor, which has as many sizes as the parameter */
    size_t first_layer;            /* stacked: of the tensor's layers, the parameter's first */
    int dim;                       /* that is cut; of a stacked one above 0. Not cut: both have the same size there */
    size_t blocks; /* the cut dimension is so many equal blocks, each cut alike: 3 for query, key, value; 0: 1 */
    size_t begin;  /* of the parameter's elements in each block of the tensor */
    int copies;    /* ranks of the model that hold the very same, as norms under tensor parallelism; 0: 1 */
    int copy;      /* which of them this is: the norm of gradients counts copy 0 */
} dtrain_param_part;

/* One tensor of a model. A table of these names every parameter once; zero what does not apply.
 *
 * A unit is what is computed, and so reduced, together: usually one layer. Units are numbered from 0 without
 * gaps, in the order of the forward pass. A stacked tensor, whose first size is the number of layers, gives
 * one layer to each of the units unit, unit + 1, ... A size may be 0 where ndim is given: a part of nothing, as of a
 * dimension cut over more ranks than it has elements.
 *
 * Calls that take a table refuse a bad one with DTRAIN_ERR_INVALID and a text that names the parameter: a name missing
 * or used twice; a bad dtype or shape; sizes that overflow; units with a gap; memory missing or shared by two tensors;
 * a part that does not lie inside its whole tensor. */
typedef struct dtrain_param {
    const char *name; /* unique, not empty */
    dtrain_dtype dtype;
    size_t shape[DTRAIN_MAX_DIMS];
    int ndim;     /* 0: the leading nonzero sizes of shape */
    int stacked;  /* 1: the first size counts layers, one unit each */
    int unit;     /* the unit, or the first layer's */
    int no_decay; /* 1: no weight decay (biases, norms) */
    int frozen;   /* 1: no gradient: neither reduced nor updated */
    int tied;     /* 1: also used outside its unit, as an embedding that is the output layer too: FSDP keeps its unit
                     besides the two that rotate */
    void *data;
    void *grad;                    /* as data; not touched when frozen; NULL: as frozen */
    const dtrain_param_part *part; /* of which tensor of the whole model this is a part; NULL: it is whole */
    dtrain_device *device;         /* whose memory data and grad are; NULL: the CPU's. An optimizer, clipping, DDP,
                                      FSDP and checkpoints know such parameters, everything else refuses them */
    int dense; /* 1: its gradient travels as it is where a dtrain_compress_desc compresses others (embeddings, whose
                  rows are seldom used). Local SGD compresses all alike */
} dtrain_param;

/* Returns the number of units of a good table: its highest unit number and one more; 0 for no table.
 *
 * any thread */
DTRAIN_API int dtrain_params_units(const dtrain_param *table, size_t count);

/* Returns the number of elements of one parameter; 0 when they overflow.
 *
 * any thread */
DTRAIN_API size_t dtrain_param_elements(const dtrain_param *param);

/* Makes of a parameter the part of it that one rank of several holds: rows or columns, for tensor parallelism.
 *
 * Sizes of param become the part's, part is filled in and param->part points to it; memory is not touched. This and the
 * next two may follow one another on one parameter, with the same part.
 *
 *   part      must outlive param; objects that copy a table copy the parts as well
 *   dim       to be cut, 0 to ndim - 1; of a stacked one above 0. One dimension can be cut, once
 *   blocks    the dimension is so many equal blocks, each cut alike: 3 for query, key and value in one; 0: 1
 *   granule   cuts are at its multiples, as at those of a head's size; 0: 1. The granules of a block are dealt by
 *             dtrain_shard; a block's last may be short
 *   parts     of which this one is `index`, 0 to parts - 1; it has no elements where parts are more than granules
 *   errors    DTRAIN_ERR_INVALID  a bad number, or cut before; param is as it was
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_param_cut(dtrain_param *param, dtrain_param_part *part, int dim, size_t blocks,
                                               size_t granule, int parts, int index);

/* Makes of a stacked parameter the layers of it that one rank holds, for a stage of a pipeline. Units are the caller's
 * to number.
 *
 *   first, count   of the layers that param has now; count at least 1
 *   others         as dtrain_param_cut
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_param_layers(dtrain_param *param, dtrain_param_part *part, size_t first,
                                                  size_t count);

/* Says that several ranks hold the very same parameter, or part, and which of them this one is; calls that take a
 * table check the numbers. Not for the copies that an FSDP or DDP makes: those multiply with these.
 *
 *   copies, copy   as in dtrain_param_part
 *   others         as dtrain_param_cut
 *
 * any thread */
DTRAIN_API void dtrain_param_copies(dtrain_param *param, dtrain_param_part *part, int copies, int copy);

/* Returns which element of the tensor of the whole model an element of a parameter is, both counted row by row.
 *
 * A model that is initialised with dtrain_random_normal(seed, that number) is the same under every layout.
 *
 *   element   below dtrain_param_elements
 *   returns   element where param is whole
 *
 * any thread */
DTRAIN_API size_t dtrain_param_whole_index(const dtrain_param *param, size_t element);

/* What to draw from, and how a step is cut. */
typedef struct dtrain_sampler_desc {
    uint64_t count;    /* examples of an epoch; at least 1 */
    uint64_t seed;     /* of the shuffle */
    int no_shuffle;    /* 1: in order */
    size_t batch;      /* examples a micro-batch; 0: 1 */
    int micro_batches; /* micro-batches a step, over all ranks together; 0: 1 */
    int strided;       /* 1: rank r has micro-batches r, r + ranks, ... of a step, as where each is reduced at once */
} dtrain_sampler_desc;

/* Deals every example of an epoch exactly once, shuffled by seed and epoch alone. It holds no position: any step may be
 * asked for, by any number of ranks, and a resumed run starts at a later step. It owns nothing; copy it freely. */
typedef struct dtrain_sampler {
    dtrain_sampler_desc desc;
    uint64_t rows, columns; /* of the rectangle that the shuffle permutes */
} dtrain_sampler;

/* Sets a sampler up.
 *
 *   errors   DTRAIN_ERR_INVALID  no examples, or a negative or overflowing cut
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_sampler_init(dtrain_sampler *sampler, const dtrain_sampler_desc *desc);

/* Returns the number of steps of an epoch; the last may be short.
 *
 * any thread */
DTRAIN_API uint64_t dtrain_sampler_steps(const dtrain_sampler *sampler);

/* Says which of a step's micro-batches are a rank's: a contiguous block, so that the sum of what it keeps until the
 * step ends fits the tree. Strided: every ranks-th, so that the i-th of all ranks are a contiguous block.
 *
 *   step      counted over all epochs: epoch step / steps, in it step % steps
 *   first     out: the first of them, 0 to micro_batches - 1; may be NULL. The others are first + 1, first + 2, ...;
 *             strided: first is rank, the others are first + ranks, first + 2 * ranks, ...
 *   returns   how many there are, those without examples left out: 0 for a rank that has none this step, whose first
 *             then means nothing
 *
 * any thread */
DTRAIN_API int dtrain_sampler_share(const dtrain_sampler *sampler, uint64_t step, int rank, int ranks, int *first);

/* Lists the examples of one micro-batch, whatever the number of ranks. What is left for an epoch's last step is split
 * over its micro-batches evenly, earlier ones one longer.
 *
 *   micro_batch   0 to micro_batches - 1
 *   examples      out: room for batch of them
 *   returns       how many there are: batch, or fewer in an epoch's last step
 *   source        a Feistel network over a rectangle, walked until it lands inside: Black and Rogaway, CT-RSA 2002
 *
 * any thread */
DTRAIN_API size_t dtrain_sampler_batch(const dtrain_sampler *sampler, uint64_t step, int micro_batch,
                                       uint64_t *examples);

typedef enum dtrain_schedule_kind {
    DTRAIN_SCHEDULE_CONSTANT = 0,
    DTRAIN_SCHEDULE_LINEAR = 1501, /* falls from lr to min_lr in a line */
    DTRAIN_SCHEDULE_COSINE         /* falls from lr to min_lr along half a cosine */
} dtrain_schedule_kind;

/* A learning rate over time. */
typedef struct dtrain_schedule {
    dtrain_schedule_kind kind;
    float lr;              /* the highest, reached when the warm-up ends */
    float min_lr;          /* the last of a falling schedule */
    uint64_t warmup_steps; /* step s of them has lr * (s + 1) / warmup_steps; 0: none */
    uint64_t total_steps;  /* when a falling schedule has reached min_lr, warm-up included */
} dtrain_schedule;

/* Returns the learning rate of a step, counted from 0; the same bits on every machine. 0 for NULL. For a
 * kind that is no DTRAIN_SCHEDULE constant it sets the last error and returns NaN, which every step refuses.
 *
 * After the warm-up, with t = (step - warmup_steps) / (total_steps - warmup_steps), at most 1:
 * linear lr + (min_lr - lr) t, cosine min_lr + (lr - min_lr) (1 + cos(pi t)) / 2.
 *
 *   source   Loshchilov and Hutter, SGDR, ICLR 2017
 *
 * any thread */
DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, uint64_t step);

/* List what a sampler and a schedule are: they hold no position, and a load refuses another one, under which the run
 * would go on with other examples or learning rates.
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_sampler_pieces(const dtrain_sampler *sampler);
DTRAIN_API dtrain_pieces dtrain_schedule_pieces(const dtrain_schedule *schedule);

typedef enum dtrain_optimizer_kind {
    DTRAIN_OPTIMIZER_DEFAULT = 0, /* AdamW */
    DTRAIN_SGD = 501,
    DTRAIN_ADAMW,
    DTRAIN_OPTIMIZER_NONE /* of FSDP: no state, no step; the caller updates its slices */
} dtrain_optimizer_kind;

/* An optimizer's constants. */
typedef struct dtrain_optimizer_desc {
    dtrain_optimizer_kind kind; /* 0: AdamW */
    float beta1;                /* AdamW; 0: 0.9 */
    float beta2;                /* AdamW; 0: 0.999 */
    float eps;                  /* AdamW; 0: 1e-8 */
    float weight_decay;         /* 0: none */
    float momentum;             /* SGD; 0: none, and no memory for it */
    int nesterov;               /* SGD: 1 steps along g + momentum * velocity */
    int decoupled_decay;        /* SGD: 1 decays the weights themselves; 0 adds weight_decay * p to the gradient */
} dtrain_optimizer_desc;

/* One step of AdamW over a slice: what remains of the optimizer when its state is sharded.
 *
 * In float32, each operation rounded, the same bits under any flags and instruction set:
 *   m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g)
 *   p = (1 - lr * weight_decay) * p - (lr / (1 - beta1^step)) * (m / (sqrt(v) * root + eps))
 * where root = 1 / sqrt(1 - beta2^step). Constants are computed in float64, the powers by squaring, and rounded once.
 *
 *   params, grads, m, v   count float32, any alignment, apart from each other; m and v zero before step 1
 *   desc                  NULL: all defaults; kind is not read
 *   step                  counted from 1
 *   source                Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019
 *
 * any thread; allocates nothing */
DTRAIN_API void dtrain_adamw(float *params, const float *grads, float *m, float *v, size_t count,
                             const dtrain_optimizer_desc *desc, float lr, uint64_t step);

/* A step of AdamW and of SGD over a slice in a device's memory, in one pass; NULL is the CPU. AdamW is dtrain_adamw, the
 * same bits. SGD is, in float32, each operation rounded, the same bits under any flags and instruction set:
 *
 *   coupled decay   g = g + weight_decay * p; decoupled: p = (1 - lr * weight_decay) * p
 *   velocity = momentum * velocity + g;  d = velocity, or with nesterov g + momentum * velocity
 *   p = p - lr * d
 *
 *   velocity    zero before the first step; not read where desc has no momentum, and then d = g
 *   copy_bf16   out: the new parameters rounded to BF16, count of them; NULL: none
 *   others      as dtrain_adamw
 *   errors      DTRAIN_ERR_INVALID  a NULL pointer; constants out of range; lr negative or not finite; step 0
 *   source      Sutskever, Martens, Dahl, Hinton, ICML 2013, as PyTorch writes it
 *
 * one thread per object; allocates nothing */
DTRAIN_API_MUST dtrain_status dtrain_device_adamw(dtrain_device *device, float *params, const float *grads, float *m,
                                                  float *v, size_t count, const dtrain_optimizer_desc *desc, float lr,
                                                  uint64_t step, uint16_t *copy_bf16);
DTRAIN_API_MUST dtrain_status dtrain_device_sgd(dtrain_device *device, float *params, const float *grads,
                                                float *velocity, size_t count, const dtrain_optimizer_desc *desc,
                                                float lr, uint16_t *copy_bf16);

typedef struct dtrain_optimizer dtrain_optimizer;

/* Makes an optimizer for the parameters of a table that have a gradient.
 *
 *   table       copied; its data and grad are used by every step. All of it that has a gradient is of one device, or of
 *               the CPU; the device must outlive the optimizer
 *   desc        NULL: all defaults
 *   allocator   of the state: 2 floats an element for AdamW, 1 for SGD with momentum; must outlive it. NULL: the
 *               C library. Of parameters on a device the state is there, in memory of dtrain_device_alloc
 *   errors      DTRAIN_ERR_INVALID      a bad table (see dtrain_param), or constants out of range
 *               DTRAIN_ERR_UNSUPPORTED  a parameter that is not F32, or two that are on different devices
 *               DTRAIN_ERR_MEMORY; those of the device
 *
 * any thread, on a device one */
DTRAIN_API_MUST dtrain_status dtrain_optimizer_create(dtrain_optimizer **optimizer, const dtrain_param *table,
                                                      size_t count, const dtrain_optimizer_desc *desc,
                                                      dtrain_allocator *allocator);

/* Updates every parameter from its gradient, which stays as it is; on a device in its queue, for which nobody waits.
 *
 *   errors   DTRAIN_ERR_INVALID  a NULL optimizer, or lr negative or not finite; those of the device, after which
 *                                parameters and state are undefined
 *
 * one thread per object; allocates nothing */
DTRAIN_API_MUST dtrain_status dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr);

/* Lists a replicated table, as under DDP, and its optimizer's state, settings and number of steps. Parameters that are
 * parts give pieces of the whole tensors, as of dtrain_fsdp_pieces. Optimizer state is NAME@adam.m and NAME@adam.v, or
 * NAME@momentum, as many floats as the parameter has: memory of the table's device, to be read and written between
 * steps.
 *
 *   table       must outlive the list. Every rank of the checkpoint holds the very same, or dtrain_pieces.copies of them
 *   optimizer   made from the same table; NULL: none
 *   errors      of a save or load: DTRAIN_ERR_INVALID  a bad table, an optimizer of another, or copy is not from 0 to
 *               copies - 1
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_params_pieces(const dtrain_param *table, size_t count, dtrain_optimizer *optimizer);

/* Frees an optimizer; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer);

/* Measures the length of all gradients of a table as one vector, and shortens it to max_norm when it is longer.
 *
 * The sum of squares is exact, whatever the order of elements and parameters, and rounded to float64 once; its root
 * is norm. The factor max_norm / norm is rounded to float32 once.
 *
 *   max_norm   0: measure only
 *   norm       out: the length before; may be NULL. NaN when a gradient has a NaN, else infinity when one has an
 *              infinity: then the gradients are left as they are
 *   errors     DTRAIN_ERR_INVALID      max_norm negative or not finite, or no table
 *              DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32, or two that are on different devices
 *              those of the device
 *   source     Neal, Fast exact summation using small and large superaccumulators, arXiv:1505.05571, 2015
 *
 * On a device it asks for 184 bytes there and gives them back, for which it waits: dtrain_device_squares and
 * dtrain_device_clip do the same over memory that is kept, and wait for nothing.
 *
 * any thread, on a device one; allocates nothing on the CPU */
DTRAIN_API_MUST dtrain_status dtrain_clip_grad_norm(const dtrain_param *table, size_t count, float max_norm,
                                                    double *norm);

/* How gradients are compressed: of an aggregator all together, of DDP and FSDP each bucket, as one vector; by PowerSGD
 * each parameter, by DDP and FSDP each layer of a stacked one. A dense parameter travels as it is, and ends the vector
 * before it. Zero means the default.
 *
 * The first gradients of a run are large and change fast: feedback.start_step sends them as they are.
 *
 * Under AdamW, gradients that are compressed train worse than momenta. With adam, the steps before feedback.start_step
 * are AdamW's. From then on v stays as it is. Each rank adds its gradient to m, compresses that, and m becomes the mean
 * of what all ranks sent; a norm that is clipped is that of m. Dense parameters go on as before. An element whose
 * gradient was always 0 until then has v = 0 and would make a step of lr * m / eps: make embeddings dense. It needs
 * DTRAIN_DDP on the CPU. A step that is dropped leaves no residual; for that each rank keeps the residual twice.
 * Source: Tang and others, 1-bit Adam, ICML 2021.
 *
 * What has less than least_count elements is all-reduced as it is. So is, by PowerSGD, a parameter of one dimension; of
 * others the first is the rows, of stacked ones in an aggregator the first two. With feedback.momentum, what is
 * all-reduced as it is has a velocity too. */
typedef struct dtrain_compress_desc {
    dtrain_compression kind;         /* 0: top-k */
    dtrain_topk_desc topk;           /* a ratio of 0 without a threshold: 0.01 */
    size_t block;                    /* of int8, fp8 and sign; 0: their default */
    int rank;                        /* of PowerSGD; 0: 4 */
    const dtrain_compressor *own;    /* copied for every parameter, its destroy is never called */
    dtrain_compressed_desc feedback; /* by default on */
    size_t least_count;              /* 0: 1,024; 1: all are compressed */
    int adam;                        /* 1: the form of 1-bit Adam, of FSDP's own AdamW: see above */
} dtrain_compress_desc;

/* How the gradients of all ranks become one: a table of functions, to be filled by you or by those below. */
typedef struct dtrain_aggregator {
    void *self; /* given to every function */
    /* Turns each gradient of the table, this rank's sum, into the mean over all ranks by weight, and sets
     * *total_weight to the sum of the weights; with a total of 0 it does not divide. */
    dtrain_status (*aggregate)(void *self, const dtrain_param *table, size_t count, double weight,
                               double *total_weight);
    void (*destroy)(void *self); /* may be NULL */
    /* What it has sent so far, for dtrain_aggregator_get_stats; may be NULL. */
    dtrain_compressed_stats (*get_stats)(const void *self);
    /* What a checkpoint keeps of it, for dtrain_aggregator_pieces; may be NULL. */
    dtrain_pieces (*get_pieces)(void *self);
} dtrain_aggregator;

/* Makes the aggregator that all-reduces each gradient over comm, which must outlive it.
 *
 * any thread; its aggregate is collective, and blocks up to timeout_ms */
DTRAIN_API dtrain_aggregator dtrain_aggregator_all_reduce(dtrain_comm *comm);

/* Makes the aggregator that all-reduces the gradients of table compressed, with feedback. Memory: the gradients once
 * more, and what dtrain_compressed_create says.
 *
 *   comm      must outlive it
 *   table     every call has the same parameters; their gradients may move
 *   desc      NULL: all defaults
 *   errors    as dtrain_compressor_topk, dtrain_compressor_powersgd and dtrain_compressed_create; a bad table
 *
 * any thread; its aggregate is collective, and blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_aggregator_compressed(dtrain_aggregator *aggregator, dtrain_comm *comm,
                                                           const dtrain_param *table, size_t count,
                                                           const dtrain_compress_desc *desc);

/* Lists what a checkpoint keeps of an aggregator between steps: the state of the compressed, as of dtrain_fsdp_pieces,
 * and what a server's packing has left unsent, residual.0; of others nothing. As many ranks go on from it.
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_aggregator_pieces(const dtrain_aggregator *aggregator);

/* Says what all parameters together have sent, those that are sent as they are included; a step is a call. Zeroes for
 * an aggregator that does not count. The compressed and a server's do, of this end: a worker's gradients, the server's
 * answers to all workers; dense_bytes what these would have been unpacked.
 *
 * one thread per object */
DTRAIN_API dtrain_compressed_stats dtrain_aggregator_get_stats(const dtrain_aggregator *aggregator);

/* Frees what an aggregator owns.
 *
 * one thread per object */
DTRAIN_API void dtrain_aggregator_destroy(dtrain_aggregator *aggregator);

/* Adds the gradients of this rank's examples to the table's, which are zero, and sets *weight to their weight. */
typedef dtrain_status (*dtrain_compute_fn)(void *user, double *weight);

/* One training step: what to compute, how to aggregate, how to apply. */
typedef struct dtrain_step_desc {
    const dtrain_param *table;
    size_t count;
    dtrain_compute_fn compute;
    void *user;                          /* given to compute */
    const dtrain_aggregator *aggregator; /* NULL: local */
    dtrain_optimizer *optimizer;         /* made from the same table */
    float lr;
    float max_norm; /* of the gradient; 0: not clipped */
} dtrain_step_desc;

typedef struct dtrain_step_result {
    double total_weight; /* of all ranks; 0: nothing was applied */
    double norm;         /* of the gradient before clipping; 0 when max_norm is */
} dtrain_step_result;

/* Sets gradients to zero, computes, aggregates, clips and applies.
 *
 *   result   out; may be NULL
 *   errors   DTRAIN_ERR_INVALID      a missing table, compute or optimizer
 *            DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32, or a parameter on a device: nothing was computed
 *            the status of compute, or those of aggregating; nothing was applied. When compute fails on one rank,
 *            the others learn it when this rank leaves the group, or at their deadline
 *
 * collective when its aggregator is */
DTRAIN_API_MUST dtrain_status dtrain_train_step(const dtrain_step_desc *desc, dtrain_step_result *result);

/* ---- the matrix product of layers, for programs that bring no BLAS ---- */

/* c = alpha op(a) x op(b) + beta c over row-major float32 matrices of any leading dimension.
 *
 *   m, n, k      op(a) is m x k, op(b) is k x n, c is m x n; zero is legal
 *   lda, ldb, ldc   elements from one row to the next, as stored
 *   alpha        0 leaves a and b unread
 *   beta         0 overwrites c without reading it
 *   override     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), defined
 *                before the implementation, takes the place of the built-in product
 *   bits         the same for one shape under any compiler flags, with avx2, avx512 and neon, which round each
 *                term once; and the same elsewhere, where each term is rounded twice
 *   source       Goto and van de Geijn, ACM TOMS 34(3), 2008
 *
 * any thread; c overlaps neither a nor b; allocates nothing */
DTRAIN_API void dtrain_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                             const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc);

#ifdef __cplusplus
}
#endif

#endif
