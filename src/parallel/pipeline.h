/* ---- >>pipeline ----
 * Pipelines: layers cut into stages, one or more a rank, through which a step's micro-batches go one after the other.
 * What each rank does is planned before anything runs: in which order, how long ranks idle, how many micro-batches they
 * hold. dtrain_pipeline then runs the plan over modules, one for each stage of the rank:
 *
 *     DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, group, &desc));
 *     DTRAIN_CHECK(dtrain_pipeline_agree(pipeline, rank == 0 ? inputs : NULL));
 *     for (...) {
 *         DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, micro_batches, weight));
 *         DTRAIN_CHECK(dtrain_pipeline_step(pipeline, rank == 0 ? inputs : NULL, batches));
 *         DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *     }
 *
 * Gradients have the same bits under every schedule and on any number of ranks: each stage adds micro-batches up in
 * the order of their numbers. */
#ifndef DTRAIN__PIPELINE_H
#define DTRAIN__PIPELINE_H
#include "module.h"
#include "../comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Splits layers into stages of a pipeline, so that the most expensive stage is as cheap as can be; of such cuts, the
 * one whose earlier stages are longest. Every stage has a layer.
 *
 *   costs    one a layer, finite, 0 or above; NULL: the numbers of layers differ by at most one, earlier stages longer
 *   begins   out: stages + 1 numbers; stage s has layers begins[s] to begins[s + 1] - 1
 *   errors   DTRAIN_ERR_INVALID  no stage, or more of them than layers: the text says what would fit. Or a bad cost
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_split_stages(const double *costs, int layers, int stages, int *begins);

/* In which order a rank makes forward and backward passes. With p ranks, m micro-batches, v chunks a rank, and equal
 * times, ranks idle for this share of a step: GPipe and 1F1B (p - 1) / (m + p - 1); interleaved, where p divides m,
 * (p - 1) / (v m + p - 1); ZB-H1, from m = p on and with weight gradients that take a third, (p - 1) / (3 m + p - 1).
 */
typedef enum dtrain_pipeline_schedule {
    DTRAIN_PIPELINE_DEFAULT = 0,  /* 1F1B */
    DTRAIN_PIPELINE_GPIPE = 1001, /* all forward, then all backward; holds all micro-batches */
    DTRAIN_PIPELINE_1F1B,         /* one forward, one backward; rank r holds p - r */
    DTRAIN_PIPELINE_INTERLEAVED,  /* 1F1B over several chunks a rank: chunk c of rank r is stage c p + r */
    DTRAIN_PIPELINE_ZB_H1         /* 1F1B whose weight gradients fill the gaps; every rank holds up to p */
} dtrain_pipeline_schedule;

typedef enum dtrain_pipeline_part {
    DTRAIN_PART_FORWARD = 1101,
    DTRAIN_PART_BACKWARD, /* gradients of the input, then of the weights */
    DTRAIN_PART_INPUT,    /* gradients of the input alone */
    DTRAIN_PART_WEIGHTS   /* gradients of the weights alone, at some time after those of the input */
} dtrain_pipeline_part;

typedef struct dtrain_pipeline_task {
    dtrain_pipeline_part part;
    int micro_batch, chunk;
    double begin, end; /* in the unit of the desc's times */
} dtrain_pipeline_task;

/* What is to be planned. Zero means the default. */
typedef struct dtrain_pipeline_plan_desc {
    dtrain_pipeline_schedule schedule;
    int ranks;                                        /* 0: 1 */
    int micro_batches;                                /* of a step; 0: 1 */
    int chunks;                                       /* a rank; 0: 1, interleaved 2. Others than interleaved have 1 */
    double forward, backward_input, backward_weights; /* that a micro-batch takes on one rank, all its chunks; 0: 1 */
    double transfer;                                  /* that an activation takes from a rank to the next */
    const double *shares; /* ranks * chunks numbers: what a stage takes, in the above divided by chunks; NULL: 1 each */
} dtrain_pipeline_plan_desc;

/* A plan; its fields are to be read. */
typedef struct dtrain_pipeline_plan {
    dtrain_pipeline_plan_desc desc; /* defaults filled in; shares are the caller's, and needed by later calls */
    dtrain_pipeline_task *tasks;    /* of rank r: tasks[r * rank_tasks] and those after it, in order */
    size_t rank_tasks;
    double span;                      /* from the first task to the end of the last */
    double bubble;                    /* share of span * ranks in which ranks idle */
    int *peak;                        /* of each rank: chunks of micro-batches that are held at once, at most */
    dtrain_allocator *allocator, own; /* own: where the caller gave none */
} dtrain_pipeline_plan;

/* Plans a step: what every rank does in which order, and when, were it alone on its processors.
 *
 * A rank begins a task when it is done with the one before and its input is there. Fewer micro-batches than ranks are
 * legal. If the ranks do not divide micro_batches, an interleaved plan rounds up and skips the extra slots.
 *
 *   allocator   must outlive it; NULL: the C library
 *   errors   DTRAIN_ERR_INVALID  numbers below 0; chunks without interleaving; times not finite or below 0. The text
 *                                says what would fit
 *            DTRAIN_ERR_MEMORY
 *   source   Huang and others, GPipe, NeurIPS 2019; 1F1B: Narayanan and others, PipeDream, SOSP 2019; interleaved:
 *            Narayanan and others, Megatron-LM, SC 2021; ZB-H1: Qi, Wan, Huang, Lin, Zero bubble pipeline parallelism,
 *            ICLR 2024
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_plan_create(dtrain_pipeline_plan **plan,
                                                          const dtrain_pipeline_plan_desc *desc,
                                                          dtrain_allocator *allocator);

/* Frees a plan; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_pipeline_plan_destroy(dtrain_pipeline_plan *plan);

/* One rank's end of a pipeline. */
typedef struct dtrain_pipeline dtrain_pipeline;

/* What a pipeline runs; the same numbers on every rank. Zero means the default. */
typedef struct dtrain_pipeline_desc {
    dtrain_pipeline_schedule schedule; /* 0: 1F1B */
    int micro_batches;                 /* of a step; 0: 1; fewer than ranks is legal */
    int chunks;                        /* a rank; 0: 1, interleaved 2. Others than interleaved have 1 */
    dtrain_module *const *modules;     /* of each chunk: chunk c of rank r is stage c * ranks + r. The last stage's last
                                        * layer is the loss. As many micro-batches in flight as the plan has of the
                                        * chunk at once; plan.peak of the rank is always enough */
    dtrain_fsdp *const *fsdps;         /* of each chunk, over the ranks that hold the same stage of several pipelines;
                                        * NULL, or NULL in it: parameters are in memory of the table's */
    dtrain_allocator *allocator;       /* must outlive the pipeline; NULL: the C library */
} dtrain_pipeline_desc;

/* Makes this rank's end of a pipeline over a group; nothing is communicated.
 *
 *   group    the ranks in the order of their stages; one rank is legal. It must outlive the pipeline, which sends by it
 *            during its own calls alone
 *   desc     modules and fsdps must outlive the pipeline; the arrays are copied
 *   errors   DTRAIN_ERR_INVALID  no group, desc or module; a module for fewer micro-batches than the plan holds, with
 *                                what it needs; one of two chunks; an fsdp of another table than its module's, or a
 *                                parameter without memory; those of dtrain_pipeline_plan_create
 *            DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_create(dtrain_pipeline **pipeline, dtrain_comm *group,
                                                     const dtrain_pipeline_desc *desc);

/* Tells every stage the shapes of a step's micro-batches, and takes the memory for what will travel. Before the first
 * step, and again whenever shapes change.
 *
 *   inputs   as many as micro-batches, of the first stage: dtype and shape are read, data is not. They may differ among
 *            each other. Read on rank 0; NULL elsewhere
 *   errors   on every rank: DTRAIN_ERR_MISMATCH  ranks have other schedules, micro-batches or chunks
 *                           DTRAIN_ERR_ABORTED   a rank cannot go on: bad inputs, a layer's shape that fails, no
 *                                                memory; the text has the rank and why. It can be called again
 *            those of dtrain_send and dtrain_recv: the pipeline is broken
 *
 * collective: every rank of group, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_agree(dtrain_pipeline *pipeline, const dtrain_tensor *inputs);

/* Makes one step's forward and backward passes in the order of the plan. Gradients are left where dtrain_fsdp_backward
 * leaves them; a step of FSDP is opened and ended by the caller.
 *
 * Activations and their gradients are received while the task before is computed. A callback that fails keeps nobody
 * waiting: its rank then passes zeros on, takes part in what its FSDP gathers and reduces, and without FSDP calls no
 * callback. After DTRAIN_ERR_ABORTED gradients are worthless; with FSDP call dtrain_fsdp_step all the same: it drops
 * the step on every rank, those of other pipelines included.
 *
 *   inputs    the micro-batches, of the shapes agreed on; read on rank 0, during the call; NULL elsewhere
 *   batches   as many as micro-batches, handed to this rank's callbacks; may be NULL
 *   errors    on every rank:
 *             DTRAIN_ERR_ABORTED    a callback or its rank failed; the text has the rank, the layer and its status
 *             DTRAIN_ERR_INVALID    dtrain_pipeline_agree has not been called
 *             DTRAIN_ERR_PEER_LOST  a callback returned this, as a rank of a group of its own is lost: else as aborted
 *             those of group or of an FSDP: the pipeline, group and the fsdps are broken: no rank waits for this one
 *
 * collective: every rank of group, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_step(dtrain_pipeline *pipeline, const dtrain_tensor *inputs,
                                                   void *const *batches);

/* Runs one input forward through all stages; no backward follows, and a step is not disturbed.
 *
 *   input    of any shape; read on rank 0; NULL elsewhere
 *   batch    handed to this rank's callbacks; may be NULL
 *   output   out: of the last stage, on the last rank; good until the next call of this kind. Elsewhere and on an error
 *            without dtype, shape and data; may be NULL there
 *   errors   as dtrain_pipeline_step; needs no dtrain_pipeline_agree, and lets no step of FSDP fail
 *
 * collective: every rank of group, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_evaluate(dtrain_pipeline *pipeline, const dtrain_tensor *input,
                                                       void *batch, dtrain_tensor *output);

/* Returns the plan that is run, with all times equal; NULL for NULL.
 *
 * one thread per object */
DTRAIN_API const dtrain_pipeline_plan *dtrain_pipeline_get_plan(const dtrain_pipeline *pipeline);

/* What the last step was on this rank. */
typedef struct dtrain_pipeline_stats {
    int64_t step_ns;     /* the call, to the end of the slowest rank */
    int64_t computed_ns; /* of it in modules, and what these waited for FSDP */
    double bubble;       /* the share that was neither */
    int peak;            /* chunks of micro-batches that were held at once, at most */
} dtrain_pipeline_stats;

/* Returns the figures of the last step; zeros before the first, and for NULL.
 *
 * one thread per object */
DTRAIN_API dtrain_pipeline_stats dtrain_pipeline_get_stats(const dtrain_pipeline *pipeline);

/* Frees this end; NULL is legal. Group, modules and fsdps stay.
 *
 * one thread per object */
DTRAIN_API void dtrain_pipeline_destroy(dtrain_pipeline *pipeline);

#ifdef __cplusplus
}
#endif

#endif
