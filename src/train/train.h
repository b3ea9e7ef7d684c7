/* ---- >>train ----
 * From gradients to the next weights: the parameter table, the sampler, optimizers, schedules, gradient clipping, and
 * aggregators. DDP is under >>data-parallel.
 *
 * Gradients are sums with a weight, usually a number of tokens. They are divided once, by the weight of all ranks. So
 * uneven batches, and ranks without examples, give the right mean. Micro-batches are folded by the tree of >>order: a
 * fixed number of them gives the same weights, bit for bit, on 1, 2, 4 and 8 ranks. */
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

/* Where a parameter lies in a tensor of the whole model that several ranks hold together. The part is layers of a
 * stage, or rows or columns of a tensor-parallel rank. Checkpoints save and load the whole tensor, under the
 * parameter's name. */
typedef struct dtrain_param_part {
    size_t shape[DTRAIN_MAX_DIMS]; /* of the whole tensor; it has as many dimensions as the parameter */
    size_t first_layer;            /* stacked: the index in the whole tensor of the parameter's first layer */
    int dim;                       /* the cut dimension; above 0 if stacked. If nothing is cut, both have one size */
    size_t blocks; /* equal blocks in the cut dimension, each cut alike: 3 for query, key, value; 0: 1 */
    size_t begin;  /* where the parameter's elements begin in each block of the tensor */
    int copies;    /* ranks of the model that hold the same part, as norms under tensor parallelism; 0: 1 */
    int copy;      /* which of them this is: the norm of gradients counts copy 0 */
} dtrain_param_part;

/* One tensor of a model. A table of these names every parameter once. Leave fields that you do not use at zero.
 *
 * A unit is what is computed, and so reduced, together: usually one layer. Units are numbered from 0 without gaps, in
 * the order of the forward pass. A stacked tensor has the number of layers as its first size. It gives one layer to
 * each of the units unit, unit + 1, ... If you set ndim, a size may be 0: the part of a rank that gets no elements of a
 * cut dimension.
 *
 * Calls that take a table refuse a bad one with DTRAIN_ERR_INVALID. The text names the parameter:
 *
 *   name     missing, or used twice
 *   shape    missing, or its sizes overflow
 *   dtype    not a whole number of bytes
 *   unit     a unit without parameters below it
 *   memory   missing, or two tensors overlap
 *   grad     missing although frozen is 0, in a call that uses gradients. FSDP allocates it instead. A parameter
 *            without elements needs none
 *   part     it does not lie inside the whole tensor */
typedef struct dtrain_param {
    const char *name; /* unique, not empty */
    dtrain_dtype dtype;
    size_t shape[DTRAIN_MAX_DIMS];
    int ndim;     /* 0: the leading nonzero sizes of shape */
    int stacked;  /* 1: the first size counts layers, one unit each */
    int unit;     /* the unit, or the first layer's */
    int no_decay; /* 1: no weight decay (biases, norms) */
    int frozen;   /* 1: no gradient: neither reduced nor updated */
    int tied;     /* 1: also used outside its unit, as an embedding that is also the output layer. FSDP keeps its unit
                     beside the two that come and go */
    void *data;
    void *grad;                    /* as data; not touched if frozen. NULL: FSDP allocates it */
    const dtrain_param_part *part; /* its place in a tensor of the whole model; NULL: it is a whole tensor */
    dtrain_device *device;         /* that data and grad belong to; NULL: the CPU. An optimizer, clipping, DDP, FSDP
                                      and checkpoints take parameters of a device; everything else refuses them */
    int dense; /* 1: its gradient travels uncompressed where a dtrain_compress_desc compresses others (embeddings, whose
                  rows are seldom used). Local SGD compresses all alike */
} dtrain_param;

/* Returns the number of units of a good table: its highest unit number plus one; 0 for no table.
 *
 * any thread */
DTRAIN_API int dtrain_params_units(const dtrain_param *table, size_t count);

/* Makes a table of F32 parameters out of the arrays of a trainer, which lie in one block one after another.
 *
 *   table    out: count of them. Biases and norms have weight decay as well: set no_decay of those that shall have none
 *   names    of the arrays; they must outlive the table
 *   sizes    elements of each array
 *   layers   of each array: how many layers it holds, one after another. The layers are units 1, 2 and so on. 0: the
 *            array is used outside them, such as an embedding; it is in unit 0, tied. NULL: all are 0
 *   data     the block of weights; NULL: the table has none
 *   grad     the block of gradients, laid out likewise; NULL: the table has none
 *   errors   DTRAIN_ERR_INVALID  table, names or sizes is NULL; an array does not divide by its layers; the sizes
 *                                overflow. The table is undefined
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_params_of_arrays(dtrain_param *table, size_t count, const char *const *names,
                                                      const size_t *sizes, const int *layers, float *data, float *grad);

/* Returns the number of elements of one parameter; 0 if the number overflows.
 *
 * any thread */
DTRAIN_API size_t dtrain_param_elements(const dtrain_param *param);

/* Cuts a parameter down to the rows or columns that one rank of several holds, for tensor parallelism.
 *
 * The sizes of param become the part's; part is filled in, and param->part points to it. Memory is not touched. You may
 * call this function and the next two on the same parameter, with the same part.
 *
 *   part      must outlive param; objects that copy a table copy the parts as well
 *   dim       the dimension to cut: 0 to ndim - 1, above 0 if stacked. One dimension can be cut, once
 *   blocks    equal blocks of the dimension, each cut alike: 3 for query, key and value in one tensor; 0: 1
 *   granule   cuts are at multiples of it, such as the size of a head; 0: 1. Earlier parts of a block get one granule
 *             more. The last granule of a block may be short
 *   parts     how many parts there are
 *   index     which one this is, 0 to parts - 1. It has no elements if there are more parts than granules
 *   errors    DTRAIN_ERR_INVALID  a bad number, or a second cut; param is unchanged
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_param_cut(dtrain_param *param, dtrain_param_part *part, int dim, size_t blocks,
                                               size_t granule, int parts, int index);

/* Cuts a stacked parameter down to the layers that one rank holds, for a stage of a pipeline. It does not change
 * param->unit: number the units of the stage yourself.
 *
 *   first, count   of the layers that param has now; count at least 1
 *   others         as in dtrain_param_cut
 *   errors         DTRAIN_ERR_INVALID  not stacked, or no such layers; param is unchanged
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_param_layers(dtrain_param *param, dtrain_param_part *part, size_t first,
                                                  size_t count);

/* Says that several ranks hold the same parameter or part, and which of them this one is. Calls that take a table check
 * the numbers. Do not count the copies that an FSDP or DDP makes: those multiply with these.
 *
 *   copies, copy   as in dtrain_param_part
 *   others         as in dtrain_param_cut
 *
 * any thread */
DTRAIN_API void dtrain_param_copies(dtrain_param *param, dtrain_param_part *part, int copies, int copy);

/* Returns the index in the whole model's tensor of one element of a parameter. Both indices count row by row.
 *
 * Initialise a model with dtrain_random_normal(seed, this index), and it is the same under every layout.
 *
 *   element   below dtrain_param_elements
 *   returns   element itself if param is not a part
 *
 * any thread */
DTRAIN_API size_t dtrain_param_whole_index(const dtrain_param *param, size_t element);

/* The examples, and how a step is cut. */
typedef struct dtrain_sampler_desc {
    uint64_t count;    /* examples of an epoch; at least 1 */
    uint64_t seed;     /* of the shuffle */
    int no_shuffle;    /* 1: in order */
    size_t batch;      /* examples a micro-batch; 0: 1 */
    int micro_batches; /* micro-batches a step, over all ranks together: at least as many as ranks; 0: 1 */
    int strided;       /* 1: rank r has micro-batches r, r + ranks, ... of a step; for FSDP that reduces each one */
} dtrain_sampler_desc;

/* Deals every example of an epoch exactly once. Seed and epoch alone decide the shuffle. A sampler holds no position:
 * ask it for any step and number of ranks. A resumed run starts at a later step. It owns nothing: copy it freely. */
typedef struct dtrain_sampler {
    dtrain_sampler_desc desc;
    uint64_t rows, columns; /* of the rectangle that the shuffle permutes */
} dtrain_sampler;

/* Sets a sampler up.
 *
 *   desc     copied
 *   errors   DTRAIN_ERR_INVALID  count is 0 or above 2^62, micro_batches negative, or batch above 2^30
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_sampler_init(dtrain_sampler *sampler, const dtrain_sampler_desc *desc);

/* Returns the number of steps of an epoch. The last step may be short.
 *
 * any thread */
DTRAIN_API uint64_t dtrain_sampler_steps(const dtrain_sampler *sampler);

/* Says which micro-batches of a step belong to a rank.
 *
 *   desc.strided   micro-batches of the rank                      for gradients that are reduced
 *   0              first, first + 1, ...: a contiguous block      once a step (DDP, keep_full_grads)
 *   1              first = rank, first + ranks, ...               after each micro-batch (FSDP)
 *
 * Each way fits the tree of >>order. If ranks do not divide micro_batches, earlier ranks have one more. If there are
 * fewer micro_batches than ranks, the log warns once.
 *
 *   step      counted over all epochs: epoch step / steps, in it step % steps
 *   first     out: the first of them, 0 to micro_batches - 1; may be NULL
 *   returns   how many there are, without those that have no examples. If 0, first means nothing
 *
 * any thread */
DTRAIN_API int dtrain_sampler_share(const dtrain_sampler *sampler, uint64_t step, int rank, int ranks, int *first);

/* Lists the examples of one micro-batch. They do not depend on the number of ranks. The examples that are left for an
 * epoch's last step are split evenly over its micro-batches; earlier ones get one more.
 *
 *   micro_batch   0 to micro_batches - 1
 *   examples      out: room for batch of them; may be NULL
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

/* Returns the learning rate of a step, with the same bits on every machine.
 *
 * After the warm-up, with t = (step - warmup_steps) / (total_steps - warmup_steps), at most 1:
 *
 *     constant   lr
 *     linear     lr + (min_lr - lr) t
 *     cosine     min_lr + (lr - min_lr) (1 + cos(pi t)) / 2
 *
 *   step      counted from 0
 *   returns   0 for NULL. For an unknown kind NaN, which every step refuses; dtrain_last_error has the text
 *   source    Loshchilov and Hutter, SGDR, ICLR 2017
 *
 * any thread */
DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, uint64_t step);

/* List the settings of a sampler and of a schedule, for a checkpoint. They hold no position. A load refuses other
 * settings, which would continue the run with other examples or learning rates.
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_sampler_pieces(const dtrain_sampler *sampler);
DTRAIN_API dtrain_pieces dtrain_schedule_pieces(const dtrain_schedule *schedule);

typedef enum dtrain_optimizer_kind {
    DTRAIN_OPTIMIZER_DEFAULT = 0, /* AdamW */
    DTRAIN_SGD = 501,
    DTRAIN_ADAMW,
    DTRAIN_OPTIMIZER_NONE /* FSDP only: no state and no step; you update the slices */
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

/* Makes one step of AdamW over a slice, as when optimizer state is sharded.
 *
 * It computes in float32 and rounds each operation, so the bits are the same under any flags and instruction set:
 *
 *     m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g);
 *     root = 1 / sqrt(1 - pow(beta2, step));
 *     p = (1 - lr * weight_decay) * p - (lr / (1 - pow(beta1, step))) * (m / (sqrt(v) * root + eps));
 *
 * Constants are computed in float64, the powers by squaring, and rounded once.
 *
 *   params, grads, m, v   count float32 each, any alignment, apart from each other; m and v are zero before step 1
 *   desc                  NULL: all defaults; kind is not read
 *   step                  counted from 1
 *   source                Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019
 *
 * any thread; allocates nothing */
DTRAIN_API void dtrain_adamw(float *params, const float *grads, float *m, float *v, size_t count,
                             const dtrain_optimizer_desc *desc, float lr, uint64_t step);

/* Make one step of AdamW or of SGD over a slice in a device's memory, in one pass.
 *
 * AdamW has the bits of dtrain_adamw. SGD computes in float32 and rounds each operation, so its bits are also the same
 * under any flags and instruction set:
 *
 *     g = g + weight_decay * p;                  // coupled decay
 *     p = (1 - lr * weight_decay) * p;           // or decoupled decay
 *     velocity = momentum * velocity + g;
 *     d = velocity;                              // nesterov: g + momentum * velocity; no momentum: g
 *     p = p - lr * d;
 *
 *   device      NULL: the CPU
 *   velocity    zero before the first step; not read if desc has no momentum
 *   copy_bf16   out: the new parameters rounded to BF16, count of them; NULL: none
 *   others      as in dtrain_adamw
 *   errors      DTRAIN_ERR_INVALID  a NULL pointer; constants out of range; lr negative or not finite; step 0
 *               those of the device
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
 *   table       copied; every step uses its data and grad. All parameters with a gradient are on one device, or on the
 *               CPU. The device must outlive the optimizer
 *   desc        NULL: all defaults
 *   allocator   of the state: 2 floats an element for AdamW, 1 for SGD with momentum; must outlive the optimizer. NULL:
 *               the C library. For parameters on a device the state is there, from dtrain_device_alloc
 *   errors      DTRAIN_ERR_INVALID      a bad table (see dtrain_param), or constants out of range
 *               DTRAIN_ERR_UNSUPPORTED  a parameter that is not F32, or two that are on different devices
 *               DTRAIN_ERR_MEMORY; those of the device
 *
 * any thread, on a device one */
DTRAIN_API_MUST dtrain_status dtrain_optimizer_create(dtrain_optimizer **optimizer, const dtrain_param *table,
                                                      size_t count, const dtrain_optimizer_desc *desc,
                                                      dtrain_allocator *allocator);

/* Updates every parameter from its gradient. The gradients stay as they are. On a device the step goes to its queue;
 * the CPU does not wait.
 *
 *   errors   DTRAIN_ERR_INVALID  a NULL optimizer, or lr negative or not finite
 *            those of the device: parameters and state are undefined
 *
 * one thread per object; allocates nothing */
DTRAIN_API_MUST dtrain_status dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr);

/* Lists a replicated table, as under DDP, and its optimizer's state, settings and number of steps, for a checkpoint.
 *
 * Parameters that are parts give pieces of the whole tensors, as in dtrain_fsdp_pieces. Optimizer state is NAME@adam.m
 * and NAME@adam.v, or NAME@momentum, as many floats as the parameter has. It is memory of the table's device. Read and
 * write it between steps.
 *
 *   table       must outlive the list. Every rank of the checkpoint holds the same, or dtrain_pieces.copies of them do
 *   optimizer   made from the same table; NULL: none
 *   errors      of a save or load:
 *               DTRAIN_ERR_INVALID  a bad table, an optimizer of another table, or copy is not from 0 to copies - 1
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_params_pieces(const dtrain_param *table, size_t count, dtrain_optimizer *optimizer);

/* Frees an optimizer; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer);

/* Measures the length of all gradients of a table as one vector, and shortens it to max_norm if it is longer.
 *
 * The sum of squares is exact in any order of elements and parameters, and is rounded to float64 once. The norm is its
 * root. The factor max_norm / norm is rounded to float32 once.
 *
 * On a device the call allocates 184 bytes there, and waits for the device to free them. To wait for nothing, call
 * dtrain_device_squares and dtrain_device_clip with memory that you keep.
 *
 *   max_norm   0: measure only
 *   norm       out: the length before; may be NULL. NaN if a gradient has a NaN, else infinity if one has an infinity.
 *              In both cases the gradients stay as they are
 *   errors     DTRAIN_ERR_INVALID      max_norm negative or not finite, or a bad table
 *              DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32, or two that are on different devices
 *              those of the device
 *   source     Neal, Fast exact summation using small and large superaccumulators, arXiv:1505.05571, 2015
 *
 * any thread, on a device one; allocates nothing on the CPU */
DTRAIN_API_MUST dtrain_status dtrain_clip_grad_norm(const dtrain_param *table, size_t count, float max_norm,
                                                    double *norm);

/* How gradients are compressed. Zero means the default.
 *
 *   compressed by      as one vector
 *   an aggregator      all gradients
 *   DDP and FSDP       each bucket
 *   PowerSGD           each parameter; under DDP and FSDP each layer of a stacked one
 *
 * A dense parameter travels uncompressed, and ends the vector before it. A vector of less than least_count elements
 * travels uncompressed too, and under PowerSGD a parameter of one dimension. PowerSGD takes the first dimension as the
 * rows; in an aggregator it takes the first two of a stacked parameter. With feedback.momentum, gradients that travel
 * uncompressed have a velocity as well.
 *
 * The first gradients of a run are large and change fast: feedback.start_step sends them uncompressed.
 *
 * Under AdamW, compressed gradients train worse than compressed momenta. With adam, the steps before
 * feedback.start_step are AdamW's. From then on v stays fixed. Each rank adds its gradient to m and compresses the sum,
 * and m becomes the mean of what all ranks sent. A clipped norm is that of m. Dense parameters continue under AdamW. An
 * element whose gradient was always 0 until then has v = 0, and would make a step of lr * m / eps: make embeddings
 * dense. adam needs DTRAIN_DDP on the CPU. A dropped step leaves no residual; for that each rank keeps the residual
 * twice. Source: Tang and others, 1-bit Adam, ICML 2021. */
typedef struct dtrain_compress_desc {
    dtrain_compression kind;         /* 0: top-k */
    dtrain_topk_desc topk;           /* a ratio of 0: 0.01 */
    size_t block;                    /* of int8, fp8 and sign; 0: their default */
    int rank;                        /* of PowerSGD; 0: 4 */
    const dtrain_compressor *own;    /* kind OWN: copied for every vector; its destroy is never called */
    dtrain_compressed_desc feedback; /* on by default */
    size_t least_count;              /* 0: 1,024; 1: all are compressed */
    int adam;                        /* 1: compress momenta of FSDP's own AdamW, as 1-bit Adam does: see above */
} dtrain_compress_desc;

/* A way to combine the gradients of all ranks: a table of functions. Fill it yourself, or use the calls below. */
typedef struct dtrain_aggregator {
    void *self; /* given to every function */
    /* Turns each gradient of the table, this rank's sum, into the weighted mean over all ranks. Sets *total_weight to
     * the sum of the weights. If that is 0, it does not divide. */
    dtrain_status (*aggregate)(void *self, const dtrain_param *table, size_t count, double weight,
                               double *total_weight);
    void (*destroy)(void *self); /* may be NULL */
    /* Returns what it has sent so far, for dtrain_aggregator_get_stats; may be NULL. */
    dtrain_compressed_stats (*get_stats)(const void *self);
    /* Lists what a checkpoint keeps of it, for dtrain_aggregator_pieces; may be NULL. */
    dtrain_pieces (*get_pieces)(void *self);
    /* Takes back the step of the last aggregate: what it keeps between steps is again as before that call. Call it on
     * every rank if you do not apply a step, or parts of it come back in later ones; dtrain_train_step does so. It does
     * nothing if that call returned an error, even DTRAIN_ERR_INVALID, or if a load or another drop came after it. May
     * be NULL. */
    void (*drop)(void *self);
} dtrain_aggregator;

/* Makes the aggregator that all-reduces each gradient over comm, which must outlive it.
 *
 * any thread; its aggregate is collective, and blocks up to timeout_ms */
DTRAIN_API dtrain_aggregator dtrain_aggregator_all_reduce(dtrain_comm *comm);

/* Makes the aggregator that all-reduces the gradients of table compressed, with feedback. It needs memory for one more
 * copy of the gradients, and for what dtrain_compressed_create says.
 *
 *   comm     must outlive it
 *   table    give every aggregate call the same parameters; their gradients may move
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID      NULL
 *            DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32, a parameter on a device, or desc.adam
 *            those of dtrain_compressor_topk, dtrain_compressor_powersgd and dtrain_compressed_create
 *
 * any thread; its aggregate is collective, and blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_aggregator_compressed(dtrain_aggregator *aggregator, dtrain_comm *comm,
                                                           const dtrain_param *table, size_t count,
                                                           const dtrain_compress_desc *desc);

/* Lists what a checkpoint keeps of an aggregator between steps. Only as many ranks can continue from it.
 *
 *   compressed        its state, as in dtrain_fsdp_pieces
 *   a server's        residual.0, which packing has left unsent, and unit.0, the weight of its sums
 *   others            nothing
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_aggregator_pieces(const dtrain_aggregator *aggregator);

/* Returns how much an aggregator has sent for all parameters, uncompressed ones included. A step is one aggregate call.
 *
 *   compressed        counts what this rank has sent
 *   a server's        counts a worker's gradients, or the server's answers to all workers; dense_bytes is their size
 *                     unpacked
 *   others            zeros
 *
 * one thread per object */
DTRAIN_API dtrain_compressed_stats dtrain_aggregator_get_stats(const dtrain_aggregator *aggregator);

/* Frees what an aggregator owns.
 *
 * one thread per object */
DTRAIN_API void dtrain_aggregator_destroy(dtrain_aggregator *aggregator);

/* Computes a step: adds the gradients of this rank's examples to the table's, which are zero, and sets *weight. */
typedef dtrain_status (*dtrain_compute_fn)(void *user, double *weight);

/* One training step: what to compute, how to aggregate, how to apply. */
typedef struct dtrain_step_desc {
    const dtrain_param *table;
    size_t count;
    dtrain_compute_fn compute;
    void *user;                          /* given to compute */
    const dtrain_aggregator *aggregator; /* NULL: this rank alone */
    dtrain_optimizer *optimizer;         /* made from the same table */
    float lr;
    float max_norm; /* of the gradient; 0: not clipped */
} dtrain_step_desc;

typedef struct dtrain_step_result {
    double total_weight; /* of all ranks; 0: nothing was applied */
    double norm;         /* of the gradient before clipping; 0 if max_norm is 0 */
} dtrain_step_result;

/* Makes one training step: sets gradients to zero, computes, aggregates, clips and applies.
 *
 *   result   out; may be NULL
 *   errors   DTRAIN_ERR_INVALID      a missing table, compute or optimizer: nothing was computed
 *            DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32, or a parameter on a device: nothing was computed
 *            the status of compute, or those of aggregate. Nothing was applied, and what the aggregator keeps is as
 *            before. When compute fails on one rank, the others learn it when this rank leaves the group, or at their
 *            deadline
 *
 * collective when its aggregator is */
DTRAIN_API_MUST dtrain_status dtrain_train_step(const dtrain_step_desc *desc, dtrain_step_result *result);

#ifdef __cplusplus
}
#endif

#endif
