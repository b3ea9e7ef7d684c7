/* ---- >>pipeline ----
 * Models in parts, and pipelines.
 *
 * MODELS IN PARTS: use this for a model that is too large for one rank. A mesh lays the ranks out as replicas, stages
 * of a pipeline, and parts of each layer. The table says which part of a tensor a rank holds. The norm then counts
 * every element once, and a checkpoint of one layout loads under another. From examples/gpt_mesh.h, shortened:
 *
 *     dtrain_mesh_dim dims[] = {{"data", 0}, {"pipeline", 2}, {"tensor", 2}};     0: what is left of the ranks
 *     const char *both[] = {"pipeline", "tensor"};
 *     DTRAIN_CHECK(dtrain_mesh_create(&mesh, world, dims, 3));
 *     DTRAIN_CHECK(dtrain_mesh_join(mesh, world, both, 2, &model));               the ranks of one copy of the model
 *     DTRAIN_CHECK(dtrain_param_layers(&table[QKVW], &parts[QKVW], first, count));             this stage's layers
 *     DTRAIN_CHECK(dtrain_param_cut(&table[QKVW], &parts[QKVW], 1, 3, channels, tp, rank));    this rank's heads
 *     DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, dtrain_mesh_group(mesh, "data"), table, table_count, &desc));
 *     DTRAIN_CHECK(dtrain_module_create(&module, layers, layer_count, table, table_count, &in_flight));
 *     DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, dtrain_mesh_group(mesh, "pipeline"), &stages));
 *     ...
 *     DTRAIN_CHECK(dtrain_pipeline_step(pipeline, inputs, batches));              all micro-batches, both ways
 *     DTRAIN_CHECK(dtrain_fsdp_clip_model_grad_norm(&fsdp, 1, model, 1.0f, &norm));
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *
 * The callbacks of the module call the layers of >>tensor-parallel, which compute this rank's part and communicate.
 * Layouts that only distribute layers and micro-batches end with the same weights, bit for bit. Layers that are split
 * inside add in another order: their losses equal those of one rank to rounding. If a rank dies, every group of the
 * mesh ends. Try any layout with train_gpt:
 *
 *     build/train_gpt --ranks 8 --mesh dp=2,pp=2,tp=2 --schedule 1f1b --micro 8 --layers 8 --heads 8 --strategy full
 *
 * WHICH LAYOUT: build/plan estimates a step of train_gpt under each layout: memory, bytes sent, and time with its
 * parts. It computes from the sizes of the model, the links and a rank's memory; with --measure it times this machine
 * instead. It prints the fastest layout that fits as flags of train_gpt. If none fits, it prints what the smallest
 * would need.
 *
 *     $ build/plan --layers 24 --heads 16 --width 2048 --context 1024 --sequences 256 --micro 64 --ranks 16 \
 *           --bandwidth 12 --rate 10000 --copy 1000 --memory 16 | tail -1
 *     best: train_gpt --layers 24 --heads 16 --width 2048 --context 1024 --batch 4 --mesh dp=8,pp=1,tp=2 --micro 64 \
 *           --strategy full
 *
 * A PIPELINE cuts the layers into stages. Each rank holds one stage or more, and the micro-batches of a step go through
 * the stages one after the other. A plan, made before anything runs, fixes the order of work on each rank. It says how
 * long ranks idle and how many micro-batches they hold. dtrain_pipeline runs the plan over modules, one for each stage
 * of the rank:
 *
 *     DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, group, &desc));
 *     DTRAIN_CHECK(dtrain_pipeline_agree(pipeline, rank == 0 ? inputs : NULL));
 *     for (int step = 0; step < steps; step++) {
 *         DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, micro_batches, weight));
 *         DTRAIN_CHECK(dtrain_pipeline_step(pipeline, rank == 0 ? inputs : NULL, batches));
 *         DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *     }
 *
 * Gradients have the same bits under every schedule and on any number of ranks: each stage adds micro-batches in the
 * order of their numbers. */
#ifndef DTRAIN__PIPELINE_H
#define DTRAIN__PIPELINE_H
#include "module.h"
#include "../comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Splits layers into contiguous stages so that the most expensive stage costs as little as possible.
 *
 * If several cuts are equally good, earlier stages get more layers. Every stage has at least one layer.
 *
 *   costs    one a layer, finite, at least 0; NULL: equal costs. Then numbers of layers differ by at most one, and
 *            earlier stages are longer
 *   begins   out: stages + 1 numbers; stage s has layers begins[s] to begins[s + 1] - 1
 *   errors   DTRAIN_ERR_INVALID  no stage, or more stages than layers: the text says what fits; a bad cost
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_split_stages(const double *costs, int layers, int stages, int *begins);

/* The order in which a rank runs forward and backward passes.
 *
 * Idle is the share of a step in which ranks wait, for p ranks, m micro-batches, v chunks a rank and equal times. Held
 * is the most that rank r keeps activations of at once: micro-batches, or if interleaved chunks of micro-batches.
 *
 *   schedule      idle                      held                        condition of idle
 *   GPIPE         (p - 1) / (m + p - 1)     m
 *   1F1B          (p - 1) / (m + p - 1)     p - r
 *   INTERLEAVED   (p - 1) / (v m + p - 1)   2 (p - r) + (v - 1) p - 1   p divides m
 *   ZB_H1         (p - 1) / (3 m + p - 1)   p                           m is at least p */
typedef enum dtrain_pipeline_schedule {
    DTRAIN_PIPELINE_DEFAULT = 0,  /* 1F1B */
    DTRAIN_PIPELINE_GPIPE = 1001, /* all forward, then all backward */
    DTRAIN_PIPELINE_1F1B,         /* one forward, one backward, in turn */
    DTRAIN_PIPELINE_INTERLEAVED,  /* 1F1B over several chunks a rank: chunk c of rank r is stage c p + r */
    DTRAIN_PIPELINE_ZB_H1         /* 1F1B that computes weight gradients in the gaps */
} dtrain_pipeline_schedule;

typedef enum dtrain_pipeline_part {
    DTRAIN_PART_FORWARD = 1101,
    DTRAIN_PART_BACKWARD, /* gradients of the input, then of the weights */
    DTRAIN_PART_INPUT,    /* gradients of the input alone */
    DTRAIN_PART_WEIGHTS   /* gradients of the weights alone, at some time after DTRAIN_PART_INPUT */
} dtrain_pipeline_part;

/* One piece of work of a rank. */
typedef struct dtrain_pipeline_task {
    dtrain_pipeline_part part;
    int micro_batch, chunk;
    double begin, end; /* in the unit of the times in the desc */
} dtrain_pipeline_task;

/* What to plan. Zero means the default. */
typedef struct dtrain_pipeline_plan_desc {
    dtrain_pipeline_schedule schedule;
    int ranks;                                        /* 0: 1 */
    int micro_batches;                                /* in a step; 0: 1 */
    int chunks;                                       /* stages a rank; 0: 2 if interleaved, else 1. Above 1 only if
                                                       * interleaved */
    double forward, backward_input, backward_weights; /* time of a micro-batch on one rank, all its chunks. All three
                                                       * 0: 1 each */
    double transfer;                                  /* time of an activation from one rank to the next */
    const double *shares; /* ranks * chunks factors, one a stage, on the times above divided by chunks; NULL: 1 each */
} dtrain_pipeline_plan_desc;

/* A plan. Read its fields; do not write them. */
typedef struct dtrain_pipeline_plan {
    dtrain_pipeline_plan_desc desc; /* with defaults filled in; shares still points to your memory */
    dtrain_pipeline_task *tasks;    /* rank_tasks a rank, in order; those of rank r begin at tasks[r * rank_tasks] */
    size_t rank_tasks;
    double span;                      /* from the begin of the first task to the end of the last */
    double bubble;                    /* share of span * ranks in which ranks idle */
    int *peak;                        /* for each rank: the most chunks of micro-batches that it holds at once */
    dtrain_allocator *allocator, own; /* own: used if you gave none */
} dtrain_pipeline_plan;

/* Plans a step: the order of work on every rank, and the time of each piece.
 *
 * A rank begins a task when the task before it is done and its input has arrived. There may be fewer micro-batches than
 * ranks. If the ranks do not divide micro_batches, an interleaved plan rounds up and skips the extra slots.
 *
 *   desc        NULL: all defaults
 *   allocator   must outlive the plan; NULL: the C library
 *   errors      DTRAIN_ERR_INVALID  a negative number; chunks without interleaving; a time that is negative or not
 *                                   finite. The text says what fits
 *               DTRAIN_ERR_MEMORY
 *   source      Huang and others, GPipe, NeurIPS 2019.
 *               1F1B: Narayanan and others, PipeDream, SOSP 2019.
 *               Interleaved: Narayanan and others, Megatron-LM, SC 2021.
 *               ZB-H1: Qi, Wan, Huang, Lin, Zero bubble pipeline parallelism, ICLR 2024
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

/* What a pipeline runs. The numbers are the same on every rank. Zero means the default. */
typedef struct dtrain_pipeline_desc {
    dtrain_pipeline_schedule schedule; /* 0: 1F1B */
    int micro_batches;                 /* in a step; 0: 1; fewer than ranks is legal */
    int chunks;                        /* stages a rank; 0: 2 if interleaved, else 1. Above 1 only if interleaved */
    dtrain_module *const *modules;     /* one a chunk; chunk c of rank r is stage c * ranks + r. The last layer of the
                                        * last stage is the loss. Each module has as many micro-batches in flight as the
                                        * plan holds of its chunk; plan.peak of the rank is always enough */
    dtrain_fsdp *const *fsdps;         /* one a chunk, each over the ranks that hold this stage in their pipelines.
                                        * NULL, or an element NULL: parameters are in the table's memory */
    dtrain_allocator *allocator;       /* must outlive the pipeline; NULL: the C library */
} dtrain_pipeline_desc;

/* Makes this rank's end of a pipeline over a group. It communicates nothing.
 *
 *   group    the ranks in the order of their stages; one rank is legal. It must outlive the pipeline. You may use it
 *            between calls of the pipeline
 *   desc     modules and fsdps must outlive the pipeline; the arrays of pointers are copied
 *   errors   DTRAIN_ERR_INVALID  no group, desc or module; one module or fsdp for two chunks. A
 *                                module for fewer micro-batches than the plan holds: the text says how many. An fsdp
 *                                of another table than its module's; a parameter without memory. And those of
 *                                dtrain_pipeline_plan_create
 *            DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_create(dtrain_pipeline **pipeline, dtrain_comm *group,
                                                     const dtrain_pipeline_desc *desc);

/* Passes the shapes of a step's micro-batches through the stages, and allocates memory for what will travel.
 *
 * Call it before the first step, and again whenever shapes change.
 *
 *   inputs   on rank 0: micro_batches tensors, the inputs of the first stage. Their dtypes and shapes are read, their
 *            data is not; shapes may differ. NULL on other ranks
 *   errors   on every rank: DTRAIN_ERR_MISMATCH  ranks have other schedules, micro-batches or chunks
 *                           DTRAIN_ERR_ABORTED   a rank cannot go on: bad inputs, a shape callback that fails, no
 *                                                memory. The text names the rank and the cause. You may call it again
 *            those of dtrain_send and dtrain_recv: the pipeline is broken
 *
 * collective: every rank of group, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_agree(dtrain_pipeline *pipeline, const dtrain_tensor *inputs);

/* Runs the forward and backward passes of one step in the order of the plan.
 *
 * Gradients are where dtrain_fsdp_backward leaves them. With FSDP, begin the step before this call and end it after, as
 * in the example above. Activations and their gradients arrive while the task before theirs is computed.
 *
 * If a callback fails, no rank waits for its rank. That rank sends zeros from then on and takes part in what its FSDP
 * gathers and reduces. Without FSDP it calls no further callbacks. After DTRAIN_ERR_ABORTED do not use the gradients.
 * With FSDP call dtrain_fsdp_step all the same: it drops the step on every rank, in other pipelines too.
 *
 *   inputs    on rank 0: the micro-batches, with the shapes agreed on; read during the call. NULL on other ranks
 *   batches   micro_batches pointers, passed to the callbacks of this rank; may be NULL
 *   errors    on every rank:
 *             DTRAIN_ERR_ABORTED    a callback or its rank failed; the text names the rank, the layer and its status
 *             DTRAIN_ERR_PEER_LOST  a callback returned it, because a group that the callback uses lost a rank
 *             DTRAIN_ERR_INVALID    dtrain_pipeline_agree has not been called
 *             those of group, or of an FSDP: the pipeline, its group and its fsdps are broken, and no rank waits for
 *             this one
 *
 * collective: every rank of group, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_step(dtrain_pipeline *pipeline, const dtrain_tensor *inputs,
                                                   void *const *batches);

/* Runs one input forward through all stages, without a backward pass. It does not disturb a step.
 *
 * It needs no dtrain_pipeline_agree: the input may have any shape. If it fails, the step of an FSDP does not.
 *
 *   input    on rank 0; NULL on other ranks
 *   batch    passed to the callbacks of this rank; may be NULL
 *   output   out, on the last rank: the output of the last stage, valid until the next call of this function. On other
 *            ranks, and on an error, its dtype is 0 and its data NULL; there it may be NULL
 *   errors   as dtrain_pipeline_step
 *
 * collective: every rank of group, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_pipeline_evaluate(dtrain_pipeline *pipeline, const dtrain_tensor *input,
                                                       void *batch, dtrain_tensor *output);

/* Returns the plan that the pipeline runs, with equal times; NULL for NULL.
 *
 * one thread per object */
DTRAIN_API const dtrain_pipeline_plan *dtrain_pipeline_get_plan(const dtrain_pipeline *pipeline);

/* Figures of the last step on this rank. */
typedef struct dtrain_pipeline_stats {
    int64_t step_ns;     /* time of the call; it ends when the slowest rank is done */
    int64_t computed_ns; /* time in modules, including their waits for FSDP */
    double bubble;       /* share of step_ns outside modules */
    int peak;            /* most chunks of micro-batches held at once */
} dtrain_pipeline_stats;

/* Returns the figures of the last step; zeros before the first, and for NULL.
 *
 * one thread per object */
DTRAIN_API dtrain_pipeline_stats dtrain_pipeline_get_stats(const dtrain_pipeline *pipeline);

/* Frees this rank's end; NULL is legal. It does not free group, modules and fsdps.
 *
 * one thread per object */
DTRAIN_API void dtrain_pipeline_destroy(dtrain_pipeline *pipeline);

#ifdef __cplusplus
}
#endif

#endif
