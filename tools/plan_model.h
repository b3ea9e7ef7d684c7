/* Estimates a step of train_gpt under a layout of ranks: the memory, bytes and time of the ranks that have most of
 * each. Include dtrain.h first.
 *
 * A layout is dp x pp x tp ranks: dp replicas of a pipeline of pp stages, in each of which tp ranks split every layer.
 * The function plan_table says how parameters are cut. FSDP works over the dp ranks that hold the same part.
 *
 * The time of a step is that of the schedule's tasks. A task takes the time of its products, of the other work of the
 * processor, and of the all-reduces over tp that are not hidden. FSDP's gathers and reductions run beside a task, and
 * make it longer if they take longer than the task.
 *
 * Ranks that are threads of one machine (processors) have nothing beside them to send: there a message is work like any
 * other, and all ranks share the processors.
 *
 *   source   Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005 (the cost of a collective); Narayanan and others,
 *            Megatron-LM, SC 2021 (what tensor and pipeline parallelism send) */
#ifndef PLAN_MODEL_H
#define PLAN_MODEL_H

#include "plan_shared.h"
#include "plan_stage.h"
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct plan_memory {
    double weights, gradients, optimizer, activations, other, all;
} plan_memory;

/* The estimate of a layout. Bytes are those of the rank that needs, or sends, the most. Seconds are those of a step;
 * step is the sum of compute, bubble, tp, pp and dp. */
typedef struct plan_result {
    plan_layout layout;
    char why[200]; /* why the layout is left out, and what would fit; empty: it is estimated */
    int fits;      /* 1: in the memory of a rank */
    int live;      /* the most micro-batches, over a rank's stages, whose activations it holds at once */
    plan_memory memory;
    double sent_tp, sent_pp, sent_dp, sent;
    double compute, bubble, tp, pp, dp, step; /* dp: the part of reductions and gathers that is not hidden */
    double tp_hidden, dp_hidden;
    double bubble_share; /* share of the pipeline's time in which ranks idle, if each has its own processor */
} plan_result;

/* ---- which layouts there are ---- */

/* Writes the numbers from 1 to most that divide count, as "1, 2 or 4". */
static inline const char *plan_divisors(long count, long most, char *text, size_t size)
{
    long last = 1;
    size_t used = 0;
    for (long i = 1; i <= most; i++)
        last = count % i == 0 ? i : last;
    text[0] = 0;
    for (long i = 1; i <= last && used < size; i++)
        if (count % i == 0)
            used += (size_t)snprintf(text + used, size - used, "%s%ld", i == 1 ? "" : i == last ? " or " : ", ", i);
    return text;
}

/* Returns whether the model allows a layout; if not, result->why says why. */
static inline int plan_is_legal(const plan_input *in, plan_result *result)
{
    const plan_layout *l = &result->layout;
    int stages = l->pp * l->chunks, *begins = (int *)malloc(((size_t)stages + 1) * sizeof *begins);
    char fits[100];
    result->why[0] = 0;
    if (begins == NULL)
        snprintf(result->why, sizeof result->why, "no memory for %d stages", stages);
    else if (in->heads % l->tp != 0)
        snprintf(result->why, sizeof result->why, "%ld heads are not split evenly over tp=%d; tp of %s would fit",
                 in->heads, l->tp, plan_divisors(in->heads, in->heads, fits, sizeof fits));
    else if (l->tp > in->vocab)
        snprintf(result->why, sizeof result->why, "a vocabulary of %ld has no part for each of tp=%d", in->vocab,
                 l->tp);
    else if (dtrain_split_stages(NULL, (int)in->layers, stages, begins) != DTRAIN_OK)
        snprintf(result->why, sizeof result->why, "%.190s", dtrain_last_error());
    else if (in->micro % l->dp != 0)
        snprintf(result->why, sizeof result->why,
                 "%ld micro-batches are not dealt evenly to dp=%d; dp of %s, or a multiple of %d as --micro, would fit",
                 in->micro, l->dp, plan_divisors(in->micro, in->ranks, fits, sizeof fits), l->dp);
    free(begins);
    return result->why[0] == 0;
}

/* ---- memory and bytes ---- */

/* Adds what a stage needs with `live` micro-batches at once, and what it sends for all of them. */
static inline void plan_add_stage(const plan_input *in, plan_result *result, const plan_stage *stage, int live)
{
    const dtrain_fsdp_plan_result *f = &stage->fsdp;
    plan_memory *memory = &result->memory;
    double micro = (double)plan_micro(in, &result->layout);
    memory->weights += (double)(f->weights + f->full_weights);
    memory->gradients += (double)(f->gradients + f->full_grads);
    memory->optimizer += (double)f->optimizer;
    memory->activations += live * stage->activations;
    memory->other += (double)f->bookkeeping;
    result->sent_tp += micro * stage->tp_bytes;
    result->sent_pp += micro * stage->pp_bytes;
    result->sent_dp +=
        plan_gathers_each_time(&result->layout) ? micro * (double)f->sent_gather : (double)f->sent_gather;
    result->sent_dp += micro * (double)f->sent_reduce;
    result->live += live;
}

/* Returns the most micro-batches of a chunk that a rank holds at once. */
static inline int plan_live(const dtrain_pipeline_plan *plan, int rank, int chunk)
{
    int held = 0, most = 0;
    for (size_t i = 0; i < plan->rank_tasks; i++) {
        const dtrain_pipeline_task *task = &plan->tasks[(size_t)rank * plan->rank_tasks + i];
        if (task->chunk != chunk)
            continue;
        held += task->part == DTRAIN_PART_FORWARD;
        most = held > most ? held : most;
        held -= task->part == DTRAIN_PART_BACKWARD || task->part == DTRAIN_PART_WEIGHTS;
    }
    return most;
}

/* Sets the memory of the rank that needs the most, and the bytes of the rank that sends the most. */
static inline void plan_most(const plan_input *in, const plan_stage *stages, const dtrain_pipeline_plan *plan,
                             plan_result *result)
{
    const plan_layout *l = &result->layout;
    for (int rank = 0; rank < l->pp; rank++) {
        plan_result of;
        memset(&of, 0, sizeof of);
        of.layout = *l;
        of.memory.activations = plan_scratch(in, l);
        for (int chunk = 0; chunk < l->chunks; chunk++)
            plan_add_stage(in, &of, &stages[chunk * l->pp + rank], plan_live(plan, rank, chunk));
        of.memory.all =
            of.memory.weights + of.memory.gradients + of.memory.optimizer + of.memory.activations + of.memory.other;
        of.sent = of.sent_tp + of.sent_pp + of.sent_dp;
        result->live = of.live > result->live ? of.live : result->live;
        if (of.memory.all > result->memory.all)
            result->memory = of.memory;
        if (of.sent > result->sent) {
            result->sent_tp = of.sent_tp;
            result->sent_pp = of.sent_pp;
            result->sent_dp = of.sent_dp;
            result->sent = of.sent;
        }
    }
    result->fits = in->memory <= 0 || result->memory.all <= in->memory;
}

/* ---- time ---- */

/* Plans the schedule. In every stage F, I and W take the same shares of the stage's time. */
static inline dtrain_status plan_schedule(const plan_input *in, const plan_layout *l, const plan_stage *stages,
                                          int with_dp, double transfer, double *shares, dtrain_pipeline_plan **plan)
{
    dtrain_pipeline_plan_desc desc;
    int count = l->pp * l->chunks;
    double all;
    memset(&desc, 0, sizeof desc);
    desc.schedule = l->schedule;
    desc.ranks = l->pp;
    desc.chunks = l->chunks;
    desc.micro_batches = (int)plan_micro(in, l);
    desc.transfer = transfer;
    for (int i = 0; i < count; i++) {
        plan_times times = plan_task_times(&stages[i], l, with_dp && plan_overlaps(in), with_dp);
        desc.forward += times.forward;
        desc.backward_input += times.input;
        desc.backward_weights += times.weights;
        shares[i] = times.forward + times.input + times.weights;
    }
    all = (desc.forward + desc.backward_input + desc.backward_weights) / l->chunks;
    for (int i = 0; i < count; i++)
        shares[i] /= all;
    desc.shares = shares;
    return dtrain_pipeline_plan_create(plan, &desc, NULL);
}

/* Finds the span of a schedule: the library's, or if ranks share processors that of plan_shared_span. */
static inline dtrain_status plan_span(const plan_input *in, const plan_layout *l, const plan_stage *stages, int with_dp,
                                      double transfer, double *span)
{
    double *shares = (double *)malloc((size_t)l->pp * (size_t)l->chunks * sizeof *shares);
    dtrain_pipeline_plan *plan = NULL;
    dtrain_status status =
        shares != NULL ? plan_schedule(in, l, stages, with_dp, transfer, shares, &plan) : DTRAIN_ERR_MEMORY;
    if (status == DTRAIN_OK) {
        *span = plan->span;
        if (in->processors > 0 && in->processors < plan_ranks(l))
            *span = plan_shared_span(plan, (double)in->processors / (l->dp * l->tp));
        status = *span >= 0 ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    }
    dtrain_pipeline_plan_destroy(plan);
    free(shares);
    return status;
}

/* Sets compute, tp and tp_hidden to those of the busiest rank, and *all to the sum over the ranks of a pipeline. */
static inline void plan_busiest(const plan_input *in, const plan_stage *stages, plan_result *result, double *all)
{
    const plan_layout *l = &result->layout;
    double micro = (double)plan_micro(in, l);
    *all = 0;
    for (int rank = 0; rank < l->pp; rank++) {
        double compute = 0, tp = 0, hidden = 0;
        for (int chunk = 0; chunk < l->chunks; chunk++) {
            const plan_stage *s = &stages[chunk * l->pp + rank];
            compute += micro * (s->compute.forward + s->compute.input + s->compute.weights);
            tp += micro * (s->tp_forward + s->tp_input);
            hidden += micro * s->tp_hidden;
        }
        *all += compute + tp;
        if (compute + tp > result->compute + result->tp) {
            result->compute = compute;
            result->tp = tp;
            result->tp_hidden = hidden;
        }
    }
}

/* Returns the seconds of FSDP's messages that nothing hides: before the first task, after the last and at the step.
 * *all is those of all its messages. */
static inline double plan_dp_edges(const plan_input *in, const plan_stage *stages, const plan_layout *l, double *all)
{
    double publish = 0, most = 0, micro = (double)plan_micro(in, l), crowd = plan_crowd(in, l);
    for (int rank = 0; rank < l->pp; rank++) {
        double beside = 0, own = 0;
        for (int chunk = 0; chunk < l->chunks; chunk++) {
            const plan_stage *s = &stages[chunk * l->pp + rank];
            beside += micro * (s->dp_gather_forward + s->dp_gather_backward + s->dp_reduce);
            own += s->dp_publish;
        }
        most = beside > most ? beside : most;
        publish = own > publish ? own : publish;
    }
    *all = (most + publish) * crowd;
    return publish * crowd + (plan_overlaps(in) ? stages[0].dp_first_gather + stages[0].dp_last_reduce : 0);
}

static inline double plan_optimizer_time(const plan_input *in, const plan_stage *stages, const plan_layout *l)
{
    double most = 0;
    for (int rank = 0; rank < l->pp; rank++) {
        double own = 0;
        for (int chunk = 0; chunk < l->chunks; chunk++)
            own += (double)stages[chunk * l->pp + rank].fsdp.optimizer / (2 * sizeof(float));
        most = own > most ? own : most;
    }
    return most * PLAN_STEP_FLOATS * (double)sizeof(float) / in->copy_rate * plan_crowd(in, l);
}

static inline dtrain_status plan_time(const plan_input *in, const plan_stage *stages, plan_result *result)
{
    const plan_layout *l = &result->layout;
    double transfer = l->pp > 1 ? plan_message_time(in, plan_activation_bytes(in)) : 0;
    double alone, with_transfer, with_dp, busy, all, edges, travelling;
    dtrain_status status = plan_span(in, l, stages, 0, 0, &alone);
    if (status == DTRAIN_OK)
        status = plan_span(in, l, stages, 0, transfer, &with_transfer);
    if (status == DTRAIN_OK)
        status = plan_span(in, l, stages, 1, transfer, &with_dp);
    if (status != DTRAIN_OK)
        return status;
    plan_busiest(in, stages, result, &all);
    busy = result->compute + result->tp;
    /* the shared processors may have more to do than the busiest rank */
    if (in->processors > 0 && all * (l->dp * l->tp) / (double)in->processors > busy) {
        double stretch = all * (l->dp * l->tp) / (double)in->processors / busy;
        result->compute *= stretch;
        result->tp *= stretch;
        busy *= stretch;
    }
    edges = plan_dp_edges(in, stages, l, &travelling);
    result->compute += plan_optimizer_time(in, stages, l);
    result->bubble = alone > busy ? alone - busy : 0; /* only rounding makes it shorter */
    result->pp = with_transfer - alone;
    result->dp = with_dp - with_transfer + edges;
    result->dp_hidden = travelling > result->dp ? travelling - result->dp : 0;
    result->step = result->compute + result->tp + result->bubble + result->pp + result->dp;
    return DTRAIN_OK;
}

/* ---- all together ---- */

static inline dtrain_status plan_stages(const plan_input *in, const plan_layout *l, plan_stage *stages)
{
    int count = l->pp * l->chunks, *begins = (int *)malloc(((size_t)count + 1) * sizeof *begins);
    dtrain_status status =
        begins != NULL ? dtrain_split_stages(NULL, (int)in->layers, count, begins) : DTRAIN_ERR_MEMORY;
    for (int i = 0; i < count && status == DTRAIN_OK; i++)
        status = plan_stage_set(in, l, &stages[i], begins[i + 1] - begins[i], i == 0, i == count - 1);
    free(begins);
    return status;
}

/* Estimates a step under result->layout, or sets result->why if the model does not allow the layout.
 *
 *   errors   DTRAIN_ERR_MEMORY; those of dtrain_fsdp_plan and dtrain_pipeline_plan_create
 */
static inline dtrain_status plan_estimate(const plan_input *in, plan_result *result)
{
    plan_layout l = result->layout;
    dtrain_pipeline_plan *plan = NULL;
    dtrain_status status;
    memset(result, 0, sizeof *result);
    result->layout = l;
    if (!plan_is_legal(in, result))
        return DTRAIN_OK;
    plan_stage *stages = (plan_stage *)calloc((size_t)l.pp * (size_t)l.chunks, sizeof *stages);
    double *shares = (double *)calloc((size_t)l.pp * (size_t)l.chunks, sizeof *shares);
    status = stages != NULL && shares != NULL ? plan_stages(in, &l, stages) : DTRAIN_ERR_MEMORY;
    if (status == DTRAIN_OK)
        status = plan_schedule(in, &l, stages, 0, 0, shares, &plan);
    if (status == DTRAIN_OK) {
        plan_most(in, stages, plan, result);
        result->bubble_share = plan->bubble;
        status = plan_time(in, stages, result);
    }
    dtrain_pipeline_plan_destroy(plan);
    free(shares);
    free(stages);
    return status;
}

static inline int plan_compare(const void *left, const void *right)
{
    const plan_result *a = (const plan_result *)left, *b = (const plan_result *)right;
    int out = (a->why[0] != 0) - (b->why[0] != 0);
    if (out != 0 || a->why[0] != 0) /* layouts that are left out stand last, in the order of plan_list */
        return out != 0 ? out : a->layout.number - b->layout.number;
    if (a->step < b->step || a->step > b->step)
        return a->step < b->step ? -1 : 1;
    if (a->memory.all < b->memory.all || a->memory.all > b->memory.all)
        return a->memory.all < b->memory.all ? -1 : 1;
    return a->layout.number - b->layout.number;
}

/* Lists a layout with every schedule of its pipeline and every strategy over its replicas. */
static inline size_t plan_list_variants(const plan_input *in, plan_layout layout, plan_result *results)
{
    static const dtrain_pipeline_schedule schedules[] = {DTRAIN_PIPELINE_1F1B, DTRAIN_PIPELINE_GPIPE,
                                                         DTRAIN_PIPELINE_INTERLEAVED, DTRAIN_PIPELINE_ZB_H1};
    static const dtrain_strategy strategies[] = {DTRAIN_DDP, DTRAIN_SHARD_GRAD_OP, DTRAIN_FULL_SHARD};
    size_t used = 0;
    for (int s = 0; s < (layout.pp > 1 ? 4 : 1); s++)
        for (int k = 0; k < (layout.dp > 1 ? 3 : 1); k++) {
            layout.schedule = schedules[s];
            layout.strategy = strategies[k];
            layout.chunks = schedules[s] == DTRAIN_PIPELINE_INTERLEAVED ? (int)in->chunks : 1;
            if (results != NULL)
                results[used].layout = layout;
            used++;
        }
    return used;
}

/* Lists every layout and returns how many there are; results may be NULL. */
static inline size_t plan_list(const plan_input *in, plan_result *results)
{
    size_t used = 0;
    for (int dp = 1; dp <= in->ranks; dp++)
        for (int pp = 1; in->ranks % dp == 0 && pp <= in->ranks / dp; pp++) {
            plan_layout layout;
            if (in->ranks / dp % pp != 0)
                continue;
            memset(&layout, 0, sizeof layout);
            layout.dp = dp;
            layout.pp = pp;
            layout.tp = (int)in->ranks / dp / pp;
            used += plan_list_variants(in, layout, results != NULL ? results + used : NULL);
        }
    for (size_t i = 0; i < used && results != NULL; i++)
        results[i].layout.number = (int)i;
    return used;
}

/* Estimates every layout of the ranks and sorts them by time; layouts that are left out stand last.
 *
 *   results   out: the caller frees it
 *   errors    as plan_estimate */
static inline dtrain_status plan_all(const plan_input *in, plan_result **results, size_t *count)
{
    dtrain_status status = DTRAIN_OK;
    *count = plan_list(in, NULL);
    *results = (plan_result *)calloc(*count, sizeof **results);
    if (*results == NULL)
        return DTRAIN_ERR_MEMORY;
    plan_list(in, *results);
    for (size_t i = 0; i < *count && status == DTRAIN_OK; i++) {
        progress_show((double)i, (double)*count, "layout %zu of %zu", i + 1, *count);
        status = plan_estimate(in, &(*results)[i]);
    }
    qsort(*results, *count, sizeof **results, plan_compare);
    return status;
}

/* Returns the fastest layout that fits. If none fits it returns NULL, and *least is the layout that needs the least
 * memory, or NULL. */
static inline const plan_result *plan_best(const plan_result *results, size_t count, const plan_result **least)
{
    *least = NULL;
    for (size_t i = 0; i < count && results[i].why[0] == 0; i++) {
        if (results[i].fits)
            return &results[i];
        if (*least == NULL || results[i].memory.all < (*least)->memory.all)
            *least = &results[i];
    }
    return NULL;
}

/* ---- as text ---- */

static inline const char *plan_schedule_name(const plan_layout *l)
{
    return l->schedule == DTRAIN_PIPELINE_GPIPE         ? "gpipe"
           : l->schedule == DTRAIN_PIPELINE_INTERLEAVED ? "interleaved"
           : l->schedule == DTRAIN_PIPELINE_ZB_H1       ? "zb"
                                                        : "1f1b";
}

static inline const char *plan_strategy_name(const plan_layout *l)
{
    return l->strategy == DTRAIN_FULL_SHARD ? "full" : l->strategy == DTRAIN_SHARD_GRAD_OP ? "grad" : "ddp";
}

/* Writes the flags of train_gpt for a layout. */
static inline const char *plan_flags(const plan_input *in, const plan_layout *l, char *text, size_t size)
{
    int used = snprintf(text, size, "--mesh dp=%d,pp=%d,tp=%d", l->dp, l->pp, l->tp);
    if (l->pp > 1 && used >= 0 && (size_t)used < size)
        used += snprintf(text + used, size - (size_t)used, " --schedule %s", plan_schedule_name(l));
    if (l->chunks > 2 && used >= 0 && (size_t)used < size)
        used += snprintf(text + used, size - (size_t)used, " --chunks %d", l->chunks);
    if (used >= 0 && (size_t)used < size)
        snprintf(text + used, size - (size_t)used, " --micro %ld --strategy %s", in->micro, plan_strategy_name(l));
    return text;
}

/* Writes an estimate as a key=value line in the form of tools/bench.c. */
static inline const char *plan_line(const plan_result *r, char *text, size_t size)
{
    const plan_layout *l = &r->layout;
    snprintf(text, size,
             "op=plan ranks=%d mesh=dp%d.pp%d.tp%d schedule=%s strategy=%s us=%.1f compute_us=%.1f bubble_us=%.1f "
             "tp_us=%.1f pp_us=%.1f dp_us=%.1f bubble=%.4f memory=%.0f bytes=%.0f",
             plan_ranks(l), l->dp, l->pp, l->tp, plan_schedule_name(l), plan_strategy_name(l), r->step * 1e6,
             r->compute * 1e6, r->bubble * 1e6, r->tp * 1e6, r->pp * 1e6, r->dp * 1e6, r->bubble_share, r->memory.all,
             r->sent);
    return text;
}

#endif
