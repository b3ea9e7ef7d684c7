/* ---- >>pipeline ----
 * Pipelines: layers cut into stages, one or more a rank, through which a step's micro-batches go one after the other.
 * What each rank does, in which order, is planned before anything runs, and can be looked at: how long ranks idle, how
 * many micro-batches they hold. */
#ifndef DTRAIN__PIPELINE_H
#define DTRAIN__PIPELINE_H
#include "../base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Splits layers into stages as evenly as can be, earlier stages one longer.
 *
 *   begins   out: stages + 1 numbers; stage s has layers begins[s] to begins[s + 1] - 1
 *   errors   DTRAIN_ERR_INVALID  no stage, or more of them than layers: the text says what would fit
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_split_into_stages(int layers, int stages, int *begins);

/* Splits layers so that the most expensive stage is as cheap as can be; of such cuts, the one whose earlier stages are
 * longest. Every stage has a layer.
 *
 *   costs    one a layer, finite, 0 or above
 *   begins   out: as dtrain_split_into_stages
 *   errors   as dtrain_split_into_stages; DTRAIN_ERR_INVALID a bad cost; DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_split_by_cost(const double *costs, int layers, int stages, int *begins);

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

/* A plan. Tasks may be put in another order, and looked at again by dtrain_pipeline_plan_check. */
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
 * legal; interleaved, a number that the ranks do not divide is planned as the next that they do, what is too much left
 * out.
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
DTRAIN_API dtrain_status dtrain_pipeline_plan_create(dtrain_pipeline_plan **plan, const dtrain_pipeline_plan_desc *desc,
                                                     dtrain_allocator *allocator);

/* Says whether a plan's tasks can run in their order, and sets times, span, bubble and peak by it.
 *
 * Every part of every micro-batch once on each rank; forward before backward, input before weights; and no rank waits
 * for ever where a rank has room for one activation and one gradient that the next rank has not taken.
 *
 *   errors   DTRAIN_ERR_INVALID  it cannot; the text names the rank, the task and what is missing
 *            DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_pipeline_plan_check(dtrain_pipeline_plan *plan);

/* Writes a plan as text, a line a rank: "0: F0 F1 B0 ...", of several chunks "F0.1"; I and W are the two parts of B.
 *
 *   out       capacity bytes, ended by a zero where there is room for it; may be NULL with capacity 0
 *   returns   how many bytes the whole text has, without the zero
 *
 * any thread */
DTRAIN_API size_t dtrain_pipeline_plan_text(const dtrain_pipeline_plan *plan, char *out, size_t capacity);

/* Draws a plan as SVG, a row a rank, time to the right; the file is replaced when it is whole.
 *
 *   errors   DTRAIN_ERR_IO  the text has the system's reason; the old file is as it was
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_pipeline_plan_draw(const dtrain_pipeline_plan *plan, const char *path);

/* Frees a plan; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_pipeline_plan_destroy(dtrain_pipeline_plan *plan);

#ifdef __cplusplus
}
#endif

#endif
