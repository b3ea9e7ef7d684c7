/* The span of a pipeline's plan when its ranks share processors, for tools/plan_model.h. A rank without a task to run
 * leaves its processor time to the others. A bubble then costs less than when each rank has its own processor. Include
 * dtrain.h first. */
#ifndef PLAN_SHARED_H
#define PLAN_SHARED_H

#include <math.h>
#include <stdlib.h>

typedef struct plan_shared {
    const dtrain_pipeline_plan *plan;
    double *ends;  /* ends of a stage's micro-batch, forward and backward; HUGE_VAL: it has not ended */
    double *left;  /* processor seconds that each rank's task still needs */
    double *since; /* when each rank's task can begin; HUGE_VAL: unknown; -1: it has begun */
    size_t *next;  /* next task of each rank */
    double now;
} plan_shared;

static inline double *plan_shared_end(const plan_shared *s, int stage, int micro, int back)
{
    return &s->ends[((size_t)stage * (size_t)s->plan->desc.micro_batches + (size_t)micro) * 2 + (size_t)back];
}

static inline const dtrain_pipeline_task *plan_shared_task(const plan_shared *s, int rank)
{
    size_t tasks = s->plan->rank_tasks;
    return s->next[rank] < tasks ? &s->plan->tasks[(size_t)rank * tasks + s->next[rank]] : NULL;
}

/* Returns when a rank's next task has its input. */
static inline double plan_shared_since(const plan_shared *s, int rank)
{
    const dtrain_pipeline_task *task = plan_shared_task(s, rank);
    const dtrain_pipeline_plan_desc *desc = &s->plan->desc;
    if (task == NULL)
        return HUGE_VAL;
    int forward = task->part == DTRAIN_PART_FORWARD, stage = task->chunk * desc->ranks + rank;
    int other = forward ? stage - 1 : stage + 1;
    if (task->part == DTRAIN_PART_WEIGHTS || other < 0 || other == desc->ranks * desc->chunks)
        return 0;
    return *plan_shared_end(s, other, task->micro_batch, !forward) + (desc->ranks > 1 ? desc->transfer : 0);
}

static inline void plan_shared_begin(plan_shared *s, int rank)
{
    const dtrain_pipeline_task *task = plan_shared_task(s, rank);
    s->left[rank] = task != NULL ? task->end - task->begin : 0;
}

/* Ends a rank's task and begins the next one. */
static inline void plan_shared_finish(plan_shared *s, int rank)
{
    const dtrain_pipeline_task *task = plan_shared_task(s, rank);
    if (task->part != DTRAIN_PART_WEIGHTS)
        *plan_shared_end(s, task->chunk * s->plan->desc.ranks + rank, task->micro_batch,
                         task->part != DTRAIN_PART_FORWARD) = s->now;
    s->next[rank]++;
    plan_shared_begin(s, rank);
}

/* Moves the time to the next end of a task or arrival of an input; returns 0 if there is none. */
static inline int plan_shared_advance(plan_shared *s, double processors)
{
    double least = HUGE_VAL, input = HUGE_VAL, speed, took;
    int ranks = s->plan->desc.ranks, run = 0;
    for (int rank = 0; rank < ranks; rank++) {
        s->since[rank] = plan_shared_since(s, rank);
        if (s->since[rank] <= s->now) {
            s->since[rank] = -1;
            run++;
            least = s->left[rank] < least ? s->left[rank] : least;
        } else
            input = s->since[rank] < input ? s->since[rank] : input;
    }
    if (run == 0) {
        s->now = input < HUGE_VAL ? input : s->now;
        return input < HUGE_VAL;
    }
    speed = run > processors ? processors / run : 1.0;
    took = least / speed;
    if (input - s->now < took) {
        took = input - s->now;
        least = took * speed;
        s->now = input;
    } else
        s->now += took;
    for (int rank = 0; rank < ranks; rank++)
        if (s->since[rank] < 0) {
            s->left[rank] -= least;
            if (!(s->left[rank] > 0))
                plan_shared_finish(s, rank);
        }
    return 1;
}

/* Returns how long a plan's tasks take in their order. The ranks share the processors evenly, and each rank uses at
 * most one. Returns a negative number if there is no memory.
 *
 *   processors   above 0; a fraction if several copies of the pipeline share the processors */
static inline double plan_shared_span(const dtrain_pipeline_plan *plan, double processors)
{
    size_t ranks = (size_t)plan->desc.ranks, ends;
    plan_shared s;
    ends = ranks * (size_t)plan->desc.chunks * (size_t)plan->desc.micro_batches * 2;
    s.plan = plan;
    s.now = 0;
    s.ends = (double *)malloc(ends * sizeof *s.ends);
    s.left = (double *)malloc(ranks * sizeof *s.left);
    s.since = (double *)malloc(ranks * sizeof *s.since);
    s.next = (size_t *)calloc(ranks, sizeof *s.next);
    if (s.ends == NULL || s.left == NULL || s.since == NULL || s.next == NULL)
        s.now = -1;
    else {
        for (size_t i = 0; i < ends; i++)
            s.ends[i] = HUGE_VAL;
        for (int rank = 0; rank < plan->desc.ranks; rank++)
            plan_shared_begin(&s, rank);
        while (plan_shared_advance(&s, processors))
            continue;
    }
    free(s.ends);
    free(s.left);
    free(s.since);
    free(s.next);
    return s.now;
}

#endif
