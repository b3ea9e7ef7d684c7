/* One stage of a rank's pipeline, for tools/plan_model.h: the table of its parameters, and what a micro-batch costs in
 * it. Include dtrain.h first.
 *
 * The model is that of examples/gpt.h. Tensor parallelism cuts its parameters like this:
 *
 *   by columns   qkv and the first product after the second norm
 *   by rows      the two products that join the residual, the embedding and the head's vocabulary
 *   not at all   norms, positions, biases of the products that join the residual */
#ifndef PLAN_STAGE_H
#define PLAN_STAGE_H

#include <string.h>

/* The question: the model, the step and the machine. */
typedef struct plan_input {
    long layers, heads, width, context, vocab;
    long sequences, micro;     /* of a step, over all ranks; sequences is a multiple of micro, the micro-batches */
    long ranks, chunks;        /* chunks: stages of a rank with the interleaved schedule */
    long processors;           /* ranks are threads that share so many; 0: each rank has its own */
    double bandwidth, latency; /* of a rank's link: bytes a second, seconds */
    double memory;             /* bytes of a rank; 0: no limit */
    double rate;               /* of a rank's matrix products: operations a second, two for each multiply-add */
    double copy_rate;          /* of a rank's other work: bytes read and written a second */
} plan_input;

typedef struct plan_layout {
    int dp, pp, tp, chunks;
    dtrain_pipeline_schedule schedule;
    dtrain_strategy strategy;
    int number; /* in the order of plan_list */
} plan_layout;

typedef struct plan_times {
    double forward, input, weights; /* seconds of a micro-batch: forward, and the two halves of backward */
} plan_times;

enum { PLAN_PARAMS = 17 };

typedef struct plan_stage {
    dtrain_param table[PLAN_PARAMS];
    size_t params, elements, first_unit; /* elements: of all units; first_unit: of the first one */
    int units;
    dtrain_fsdp_plan_result fsdp; /* of dp rank 0, which has the largest slices */
    double activations;           /* bytes held for a micro-batch */
    plan_times compute;
    double tp_forward, tp_input, tp_hidden; /* seconds of a micro-batch's all-reduces over tp: not hidden, and hidden */
    double tp_bytes, pp_bytes;              /* sent for a micro-batch */
    double dp_gather_forward, dp_gather_backward, dp_reduce; /* seconds of a micro-batch */
    double dp_publish, dp_first_gather, dp_last_reduce;      /* seconds of a step */
} plan_stage;

/* The work on one element of the parameters, as the number of floats that one thread copies in the same time.
 *
 *   PLAN_GRADIENT_FLOATS   of a micro-batch: the gradient is zeroed, added to by its product, taken over and summed
 *   PLAN_STEP_FLOATS       of a step: the norm, the division and AdamW */
#define PLAN_GRADIENT_FLOATS 16
#define PLAN_STEP_FLOATS 12
#define PLAN_BUCKET_BYTES 1048576.0 /* the default of dtrain_fsdp_desc.bucket_bytes */

/* Returns the longest part of count elements: see dtrain_shard. */
static inline size_t plan_largest(size_t count, int parts)
{
    return (count + (size_t)parts - 1) / (size_t)parts;
}

static inline int plan_ranks(const plan_layout *l)
{
    return l->dp * l->pp * l->tp;
}

/* Returns the micro-batches of a replica. */
static inline long plan_micro(const plan_input *in, const plan_layout *l)
{
    return in->micro / l->dp;
}

/* Returns the rows of a micro-batch, which are its tokens. */
static inline double plan_rows(const plan_input *in)
{
    return (double)(in->sequences / in->micro) * (double)in->context;
}

static inline double plan_activation_bytes(const plan_input *in)
{
    return plan_rows(in) * (double)in->width * (double)sizeof(float);
}

/* Returns whether messages overlap with computation. Ranks that are threads need processors to spare for that. */
static inline int plan_overlaps(const plan_input *in)
{
    return in->processors == 0 || in->processors > in->ranks;
}

/* Returns how many ranks share a processor when all compute; at least 1. */
static inline double plan_crowd(const plan_input *in, const plan_layout *l)
{
    return in->processors > 0 && in->processors < plan_ranks(l) ? plan_ranks(l) / (double)in->processors : 1.0;
}

static inline int plan_gathers_each_time(const plan_layout *l)
{
    return l->strategy == DTRAIN_FULL_SHARD;
}

/* ---- the time of messages ---- */

typedef struct plan_message {
    double seconds, bytes; /* bytes that a rank sends */
} plan_message;

static inline double plan_message_time(const plan_input *in, double bytes)
{
    return in->latency + bytes / in->bandwidth;
}

/* Returns the rounds of a collective that doubles its reach in each round. */
static inline int plan_rounds(int ranks)
{
    int rounds = 0;
    while ((1L << rounds) < ranks)
        rounds++;
    return rounds;
}

/* Returns the cost of an all-reduce: recursive doubling, or halving and doubling if that is faster. */
static inline plan_message plan_all_reduce(const plan_input *in, int ranks, double bytes)
{
    double rounds = plan_rounds(ranks), halved = 2.0 * bytes * (ranks - 1) / ranks;
    plan_message doubling = {rounds * plan_message_time(in, bytes), rounds * bytes};
    plan_message halving = {2.0 * rounds * in->latency + halved / in->bandwidth, halved};
    return doubling.seconds < halving.seconds ? doubling : halving;
}

/* ---- the parameters of a stage ---- */

static inline void plan_param(plan_stage *stage, const char *name, int unit, int layers, size_t a, size_t b)
{
    dtrain_param *p = &stage->table[stage->params++];
    size_t sizes[3], n = 0;
    memset(p, 0, sizeof *p);
    if (layers > 0)
        sizes[n++] = (size_t)layers;
    sizes[n++] = a;
    if (b > 0)
        sizes[n++] = b;
    memcpy(p->shape, sizes, n * sizeof sizes[0]);
    p->name = name;
    p->dtype = DTRAIN_F32;
    p->unit = unit;
    p->stacked = layers > 0;
    stage->elements += dtrain_param_elements(p);
    if (unit == 0)
        stage->first_unit += dtrain_param_elements(p) / (layers > 0 ? (size_t)layers : 1);
}

static inline void plan_layer_params(const plan_input *in, const plan_layout *l, plan_stage *stage, int layers)
{
    size_t C = (size_t)in->width, part = C / (size_t)l->tp, wide = plan_largest(4 * C, l->tp);
    int unit = stage->units;
    plan_param(stage, "ln1w", unit, layers, C, 0);
    plan_param(stage, "ln1b", unit, layers, C, 0);
    plan_param(stage, "qkvw", unit, layers, 3 * part, C);
    plan_param(stage, "qkvb", unit, layers, 3 * part, 0);
    plan_param(stage, "projw", unit, layers, C, part);
    plan_param(stage, "projb", unit, layers, C, 0);
    plan_param(stage, "ln2w", unit, layers, C, 0);
    plan_param(stage, "ln2b", unit, layers, C, 0);
    plan_param(stage, "fcw", unit, layers, wide, C);
    plan_param(stage, "fcb", unit, layers, wide, 0);
    plan_param(stage, "fcprojw", unit, layers, C, wide);
    plan_param(stage, "fcprojb", unit, layers, C, 0);
    stage->units += layers;
}

/* Lists the parameters of tensor-parallel rank 0, which has the largest part. The first stage has the embedding, the
 * last stage the head. */
static inline void plan_table(const plan_input *in, const plan_layout *l, plan_stage *stage, int layers, int first,
                              int last)
{
    size_t C = (size_t)in->width, vocab = plan_largest((size_t)in->vocab, l->tp);
    if (first) {
        plan_param(stage, "wte", 0, 0, vocab, C);
        plan_param(stage, "wpe", 0, 0, (size_t)in->context, C);
        stage->units = 1;
    }
    plan_layer_params(in, l, stage, layers);
    if (last) {
        plan_param(stage, "lnfw", stage->units, 0, C, 0);
        plan_param(stage, "lnfb", stage->units, 0, C, 0);
        plan_param(stage, "headw", stage->units, 0, vocab, C);
        stage->units++;
    }
}

/* ---- the cost of a micro-batch ---- */

/* The sizes of a tensor-parallel part that times and bytes depend on. */
typedef struct plan_sizes {
    double rows, C, part, wide, vocab, scores; /* scores: attention scores of this rank's heads in a row */
} plan_sizes;

static inline plan_sizes plan_sizes_of(const plan_input *in, const plan_layout *l)
{
    plan_sizes s;
    s.rows = plan_rows(in);
    s.C = (double)in->width;
    s.part = s.C / l->tp;
    s.wide = (double)plan_largest(4 * (size_t)in->width, l->tp);
    s.vocab = (double)plan_largest((size_t)in->vocab, l->tp);
    s.scores = (double)in->context * (double)(in->heads / l->tp);
    return s;
}

/* Sets the bytes that a micro-batch holds from its forward to its backward pass. They are the activations that
 * examples/gpt.h keeps and the output for the next stage. With the schedule zb they are also the gradients of all
 * products' results, because the weights' gradients come later. */
static inline void plan_held(const plan_sizes *s, const plan_layout *l, plan_stage *stage, int layers, int last)
{
    double floats = layers * (4 * s->C + 4 * s->part + 2 * s->wide + 4 + s->scores);
    floats += last ? 2 * s->C + 2 + s->vocab : s->C;
    if (l->schedule == DTRAIN_PIPELINE_ZB_H1)
        floats += layers * (2 * s->C + 3 * s->part + s->wide) + (last ? s->vocab : 0);
    stage->activations = s->rows * floats * (double)sizeof(float);
}

/* Returns the bytes that a rank needs once, for any number of micro-batches: the gradients inside a layer. In a
 * pipeline it also receives an activation and a gradient ahead. */
static inline double plan_scratch(const plan_input *in, const plan_layout *l)
{
    plan_sizes s = plan_sizes_of(in, l);
    double floats = s.rows * ((l->pp > 1 ? 4 : 2) * s.C + s.wide);
    return (floats + (double)in->context * (double)in->context + 2 * s.C) * (double)sizeof(float);
}

/* Sets the seconds of a micro-batch. Products run at `rate`, all other loops at `copy_rate`. The loops of examples/nn.h
 * count as floats that one thread copies in the same time:
 *
 *   layer norm                       2 an element: read and written
 *   GELU                             4 an element, 5 back
 *   residual, bias                   1 an element
 *   attention without its products   9 a score, 5 back
 *   loss                             7 a logit
 *   FSDP                             PLAN_GRADIENT_FLOATS a gradient */
static inline void plan_compute(const plan_input *in, const plan_sizes *s, plan_stage *stage, int layers, int first,
                                int last)
{
    double product = 2 * s->rows * s->C / in->rate, copy = (double)sizeof(float) / in->copy_rate;
    double attention = 4 * s->rows * (double)in->context * s->part / in->rate, other = s->rows * copy;
    double linear = layers * product * (4 * s->part + 2 * s->wide) + (last ? product * s->vocab : 0);
    plan_times *t = &stage->compute;
    t->forward = linear + layers * (attention + other * (8 * s->C + 3 * s->part + 5 * s->wide + 9 * s->scores));
    t->input = linear + layers * (2 * attention + other * (4 * s->C + 5 * s->wide + 5 * s->scores));
    t->weights = linear + layers * other * (2 * s->C + 3 * s->part + s->wide);
    t->forward += other * ((first ? 3 * s->C : 0) + (last ? 2 * s->C + 7 * s->vocab : 0));
    t->input += last ? other * 2 * s->C : 0;
    t->weights += first ? other * 6 * s->C : 0;
    t->weights += (double)stage->elements * PLAN_GRADIENT_FLOATS * copy;
}

/* Adds an all-reduce of the backward pass. The product of the same layer's weights hides as much of it as the product
 * takes. */
static inline void plan_add_hidden(plan_stage *stage, plan_message reduce, double product)
{
    double hidden = reduce.seconds < product ? reduce.seconds : product;
    stage->tp_hidden += hidden;
    stage->tp_input += reduce.seconds - hidden;
    stage->tp_bytes += reduce.bytes;
}

/* Sets the all-reduces over tp. Those of the forward pass are not hidden, because the next operation needs the sums.
 *
 *   a layer     two forward, two back
 *   embedding   one forward
 *   head        for each row the largest logit, the sum and the target's logit; one back */
static inline void plan_tp(const plan_input *in, const plan_layout *l, const plan_sizes *s, plan_stage *stage,
                           int layers, int first, int last)
{
    int hides = plan_overlaps(in) && l->schedule != DTRAIN_PIPELINE_ZB_H1; /* there the weights' product comes later */
    double product = hides ? 2 * s->rows * s->C / in->rate : 0, row = s->rows * (double)sizeof(float);
    plan_message wide = plan_all_reduce(in, l->tp, plan_activation_bytes(in));
    plan_message most = plan_all_reduce(in, l->tp, row), sums = plan_all_reduce(in, l->tp, 2 * row);
    if (l->tp == 1)
        return;
    stage->tp_forward = (2 * layers + first) * wide.seconds + (last ? most.seconds + sums.seconds : 0);
    stage->tp_bytes = (2 * layers + first) * wide.bytes + (last ? most.bytes + sums.bytes : 0);
    for (int i = 0; i < layers; i++) {
        plan_add_hidden(stage, wide, product * 3 * s->part);
        plan_add_hidden(stage, wide, product * s->wide);
    }
    if (last)
        plan_add_hidden(stage, wide, product * s->vocab);
}

/* Sets FSDP's gathers and reductions: the bytes of dtrain_fsdp_plan, and the messages of each unit. */
static inline void plan_dp(const plan_input *in, const plan_layout *l, plan_stage *stage)
{
    const dtrain_fsdp_plan_result *f = &stage->fsdp;
    double others = (double)sizeof(float) * (l->dp - 1) / l->dp, a_unit = plan_rounds(l->dp) * in->latency;
    double gathered = (double)stage->elements * others, first = (double)stage->first_unit * others / in->bandwidth;
    double reductions = stage->units;
    if (l->dp == 1)
        return;
    if (l->strategy == DTRAIN_DDP) { /* a bucket reduces small units together */
        double buckets = (double)stage->elements * (double)sizeof(float) / PLAN_BUCKET_BYTES + 1;
        reductions = 2 * (buckets < reductions ? buckets : reductions);
    }
    stage->dp_reduce = (double)f->sent_reduce / in->bandwidth + reductions * a_unit;
    stage->dp_last_reduce = l->strategy == DTRAIN_DDP ? 2 * (first + a_unit) : first + a_unit;
    if (l->strategy == DTRAIN_SHARD_GRAD_OP)
        stage->dp_publish = (double)f->sent_gather / in->bandwidth + stage->units * a_unit;
    if (!plan_gathers_each_time(l))
        return;
    stage->dp_first_gather = first + a_unit;
    stage->dp_gather_forward = gathered / in->bandwidth + stage->units * a_unit;
    if ((double)f->sent_gather > gathered)
        stage->dp_gather_backward = ((double)f->sent_gather - gathered) / in->bandwidth + (stage->units - 2) * a_unit;
}

/* Returns the seconds of a stage's tasks for a micro-batch. FSDP's messages run beside them, or after them if nothing
 * overlaps. */
static inline plan_times plan_task_times(const plan_stage *s, const plan_layout *l, int overlaps, int with_dp)
{
    plan_times t = {s->compute.forward + s->tp_forward, s->compute.input + s->tp_input, s->compute.weights};
    double back = s->dp_gather_backward + s->dp_reduce;
    if (!with_dp)
        return t;
    if (!overlaps) {
        t.forward += s->dp_gather_forward;
        t.input += s->dp_gather_backward;
        t.weights += s->dp_reduce;
        return t;
    }
    t.forward = t.forward > s->dp_gather_forward ? t.forward : s->dp_gather_forward;
    if (l->schedule == DTRAIN_PIPELINE_ZB_H1) {
        t.input = t.input > s->dp_gather_backward ? t.input : s->dp_gather_backward;
        t.weights = t.weights > s->dp_reduce ? t.weights : s->dp_reduce;
    } else if (t.input + t.weights < back)
        t.weights = back - t.input;
    return t;
}

/* Fills in a stage of `layers` layers. */
static inline dtrain_status plan_stage_set(const plan_input *in, const plan_layout *l, plan_stage *stage, int layers,
                                           int first, int last)
{
    plan_sizes sizes = plan_sizes_of(in, l);
    dtrain_fsdp_desc desc;
    memset(stage, 0, sizeof *stage);
    plan_table(in, l, stage, layers, first, last);
    memset(&desc, 0, sizeof desc);
    desc.strategy = l->strategy;
    desc.micro_batches = (int)plan_micro(in, l);
    dtrain_status status = dtrain_fsdp_plan(stage->table, stage->params, &desc, l->dp, 0, &stage->fsdp);
    if (status != DTRAIN_OK)
        return status;
    plan_held(&sizes, l, stage, layers, last);
    plan_compute(in, &sizes, stage, layers, first, last);
    plan_tp(in, l, &sizes, stage, layers, first, last);
    stage->pp_bytes = plan_activation_bytes(in) * ((first ? 0 : 1) + (last ? 0 : 1));
    plan_dp(in, l, stage);
    return DTRAIN_OK;
}

#endif
