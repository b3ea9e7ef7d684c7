/* ---- >>pipeline-plan ----
 * Cutting layers into stages, orders of tasks, and the time that they take. An order is written down by its schedule's
 * rule; one and the same walk over all ranks then finds when each task runs, or which one never can. A plan can be had
 * as text and as a picture. */
#ifndef DTRAIN__PIPELINE_PLAN
#define DTRAIN__PIPELINE_PLAN
#include "pipeline.h"
#include "../base/status.c"
#include "../base/memory.c"
#include "../base/os.c"
#include "../tensor/dtype.c"

#define DTRAIN__PIPELINE_MOST 1000000 /* ranks, micro-batches, chunks */

/* ---- orders ---- */

static void dtrain__pipeline_add(dtrain_pipeline_plan *plan, int rank, size_t *n, dtrain_pipeline_part part,
                                 int micro_batch, int chunk)
{
    dtrain_pipeline_task *task = &plan->tasks[(size_t)rank * plan->rank_tasks + *n];
    if (micro_batch >= plan->desc.micro_batches)
        return; /* made up, see dtrain__pipeline_interleave */
    task->part = part;
    task->micro_batch = micro_batch;
    task->chunk = chunk;
    ++*n;
}

static void dtrain__pipeline_gpipe(dtrain_pipeline_plan *plan, int rank)
{
    size_t n = 0;
    for (int i = 0; i < plan->desc.micro_batches; i++)
        dtrain__pipeline_add(plan, rank, &n, DTRAIN_PART_FORWARD, i, 0);
    for (int i = 0; i < plan->desc.micro_batches; i++)
        dtrain__pipeline_add(plan, rank, &n, DTRAIN_PART_BACKWARD, i, 0);
}

/* The i-th forward or backward of the interleaved order: groups of as many micro-batches as ranks go through all
 * chunks, backward from the last. The last group is filled up with micro-batches that are left out; what is left
 * still fits together, as nothing depends on them. */
static void dtrain__pipeline_interleave(dtrain_pipeline_plan *plan, int rank, size_t *n, dtrain_pipeline_part part,
                                        size_t i)
{
    size_t ranks = (size_t)plan->desc.ranks, group = ranks * (size_t)plan->desc.chunks;
    int micro_batch = (int)(i / group * ranks + i % ranks), chunk = (int)(i % group / ranks);
    dtrain__pipeline_add(plan, rank, n, part, micro_batch,
                         part == DTRAIN_PART_FORWARD ? chunk : plan->desc.chunks - 1 - chunk);
}

/* 1F1B, of one chunk or of several. */
static void dtrain__pipeline_one_by_one(dtrain_pipeline_plan *plan, int rank)
{
    size_t ranks = (size_t)plan->desc.ranks, chunks = (size_t)plan->desc.chunks, after = ranks - (size_t)rank - 1;
    size_t groups = ((size_t)plan->desc.micro_batches + ranks - 1) / ranks, n = 0;
    size_t all = chunks > 1 ? groups * ranks * chunks : (size_t)plan->desc.micro_batches;
    size_t ahead = chunks > 1 ? 2 * after + (chunks - 1) * ranks : after;
    ahead = ahead < all ? ahead : all;
    for (size_t i = 0; i < all + ahead; i++) {
        if (i < all)
            dtrain__pipeline_interleave(plan, rank, &n, DTRAIN_PART_FORWARD, i);
        if (i >= ahead)
            dtrain__pipeline_interleave(plan, rank, &n, DTRAIN_PART_BACKWARD, i - ahead);
    }
}

/* As 1F1B, with weight gradients rank micro-batches behind those of the input: later ranks hold as many as the first,
 * and have work left when it is the only one that still waits. */
static void dtrain__pipeline_zero_bubble(dtrain_pipeline_plan *plan, int rank)
{
    int count = plan->desc.micro_batches, forwards = plan->desc.ranks - rank;
    size_t n = 0;
    forwards = forwards < count ? forwards : count;
    for (int i = 0; i < forwards; i++)
        dtrain__pipeline_add(plan, rank, &n, DTRAIN_PART_FORWARD, i, 0);
    for (int i = 0; i < count + rank; i++) {
        if (i < count)
            dtrain__pipeline_add(plan, rank, &n, DTRAIN_PART_INPUT, i, 0);
        if (i >= rank)
            dtrain__pipeline_add(plan, rank, &n, DTRAIN_PART_WEIGHTS, i - rank, 0);
        if (forwards < count)
            dtrain__pipeline_add(plan, rank, &n, DTRAIN_PART_FORWARD, forwards++, 0);
    }
}

/* ---- the walk ---- */

/* Which part of which chunk of which micro-batch, on a rank: AHEAD is the forward pass, whose result goes to the next
 * rank; BACK the gradients of the input, which go to the one before; HERE those of the weights. */
enum { DTRAIN__PIPELINE_AHEAD, DTRAIN__PIPELINE_BACK, DTRAIN__PIPELINE_HERE, DTRAIN__PIPELINE_WAYS };

typedef struct dtrain__pipeline_mark {
    int done;
    double end;
} dtrain__pipeline_mark;

typedef struct dtrain__pipeline_rank {
    size_t next;                                              /* task */
    double free;                                              /* since when */
    int held;                                                 /* chunks of micro-batches */
    int sends;                                                /* a way whose result has no room yet; -1: none */
    const dtrain__pipeline_mark *result;                      /* that */
    const dtrain__pipeline_mark *sent[DTRAIN__PIPELINE_HERE]; /* and what the neighbour has not taken; NULL: nothing */
} dtrain__pipeline_rank;

typedef struct dtrain__pipeline_walk {
    dtrain_pipeline_plan *plan;
    dtrain__pipeline_mark *marks;
    size_t mark_count;
    dtrain__pipeline_rank *ranks;
} dtrain__pipeline_walk;

static dtrain__pipeline_mark *dtrain__pipeline_at(const dtrain__pipeline_walk *walk, int rank, int way, int chunk,
                                                  int micro_batch)
{
    size_t chunks = (size_t)walk->plan->desc.chunks, count = (size_t)walk->plan->desc.micro_batches;
    size_t row = ((size_t)rank * DTRAIN__PIPELINE_WAYS + (size_t)way) * chunks + (size_t)chunk;
    return &walk->marks[row * count + (size_t)micro_batch];
}

/* The rank that is a step ahead (1) or back (-1), and in *chunk the chunk there; -1: there is none. */
static int dtrain__pipeline_neighbour(const dtrain_pipeline_plan *plan, int rank, int step, int *chunk)
{
    int ranks = plan->desc.ranks, next = rank + step;
    if (next >= 0 && next < ranks)
        return next;
    *chunk += step;
    return *chunk >= 0 && *chunk < plan->desc.chunks ? (next + ranks) % ranks : -1;
}

/* AHEAD, BACK or HERE; of no part, BACK. */
static int dtrain__pipeline_way(dtrain_pipeline_part part)
{
    return part == DTRAIN_PART_FORWARD   ? DTRAIN__PIPELINE_AHEAD
           : part == DTRAIN_PART_WEIGHTS ? DTRAIN__PIPELINE_HERE
                                         : DTRAIN__PIPELINE_BACK;
}

/* Whether what a task needs is there, and since when; *from: the rank that sent it, or -1. */
static int dtrain__pipeline_ready(const dtrain__pipeline_walk *walk, int rank, const dtrain_pipeline_task *task,
                                  double *since, int *from)
{
    int ahead = task->part == DTRAIN_PART_FORWARD, chunk = task->chunk, micro = task->micro_batch;
    *since = 0.0;
    *from = -1;
    if (task->part == DTRAIN_PART_WEIGHTS)
        return dtrain__pipeline_at(walk, rank, DTRAIN__PIPELINE_BACK, chunk, micro)->done;
    if (!ahead && !dtrain__pipeline_at(walk, rank, DTRAIN__PIPELINE_AHEAD, chunk, micro)->done)
        return 0;
    int other = dtrain__pipeline_neighbour(walk->plan, rank, ahead ? -1 : 1, &chunk);
    if (other < 0)
        return 1;
    int way = ahead ? DTRAIN__PIPELINE_AHEAD : DTRAIN__PIPELINE_BACK;
    const dtrain__pipeline_mark *mark = dtrain__pipeline_at(walk, other, way, chunk, micro);
    if (other == rank) {
        *since = mark->end;
        return mark->done;
    }
    *since = mark->end + walk->plan->desc.transfer;
    *from = other;
    return walk->ranks[other].sent[way] == mark;
}

static double dtrain__pipeline_cost(const dtrain_pipeline_plan *plan, int rank, const dtrain_pipeline_task *task)
{
    const dtrain_pipeline_plan_desc *desc = &plan->desc;
    double cost = task->part == DTRAIN_PART_FORWARD   ? desc->forward
                  : task->part == DTRAIN_PART_INPUT   ? desc->backward_input
                  : task->part == DTRAIN_PART_WEIGHTS ? desc->backward_weights
                                                      : desc->backward_input + desc->backward_weights;
    return cost / desc->chunks * (desc->shares != NULL ? desc->shares[task->chunk * desc->ranks + rank] : 1.0);
}

/* Runs a task, whose input is there. */
static void dtrain__pipeline_run(dtrain__pipeline_walk *walk, int rank, dtrain_pipeline_task *task, double since)
{
    dtrain_pipeline_plan *plan = walk->plan;
    dtrain__pipeline_rank *me = &walk->ranks[rank];
    int way = dtrain__pipeline_way(task->part), chunk = task->chunk;
    dtrain__pipeline_mark *mark = dtrain__pipeline_at(walk, rank, way, chunk, task->micro_batch);
    task->begin = since > me->free ? since : me->free;
    task->end = me->free = mark->end = task->begin + dtrain__pipeline_cost(plan, rank, task);
    mark->done = 1;
    if (task->part == DTRAIN_PART_BACKWARD)
        dtrain__pipeline_at(walk, rank, DTRAIN__PIPELINE_HERE, chunk, task->micro_batch)->done = 1;
    me->held += task->part == DTRAIN_PART_FORWARD;
    plan->peak[rank] = me->held > plan->peak[rank] ? me->held : plan->peak[rank];
    me->held -= task->part == DTRAIN_PART_BACKWARD || task->part == DTRAIN_PART_WEIGHTS;
    int to = way != DTRAIN__PIPELINE_HERE
                 ? dtrain__pipeline_neighbour(plan, rank, way == DTRAIN__PIPELINE_AHEAD ? 1 : -1, &chunk)
                 : -1;
    me->sends = to >= 0 && to != rank ? way : -1;
    me->result = mark;
    me->next++;
}

/* Lets a rank send or run what comes next, if it can; returns whether anything has moved. */
static int dtrain__pipeline_advance(dtrain__pipeline_walk *walk, int rank)
{
    dtrain__pipeline_rank *me = &walk->ranks[rank];
    int from;
    double since;
    if (me->sends >= 0) {
        if (me->sent[me->sends] != NULL)
            return 0;
        me->sent[me->sends] = me->result;
        me->sends = -1;
        return 1;
    }
    if (me->next == walk->plan->rank_tasks)
        return 0;
    dtrain_pipeline_task *task = &walk->plan->tasks[(size_t)rank * walk->plan->rank_tasks + me->next];
    if (!dtrain__pipeline_ready(walk, rank, task, &since, &from))
        return 0;
    if (from >= 0)
        walk->ranks[from].sent[task->part == DTRAIN_PART_FORWARD ? DTRAIN__PIPELINE_AHEAD : DTRAIN__PIPELINE_BACK] =
            NULL;
    dtrain__pipeline_run(walk, rank, task, since);
    return 1;
}

/* ---- what is wrong with an order ---- */

typedef struct dtrain__pipeline_name {
    char text[64];
} dtrain__pipeline_name;

static dtrain__pipeline_name dtrain__pipeline_task_name(const dtrain_pipeline_plan *plan,
                                                        const dtrain_pipeline_task *task)
{
    static const char letters[] = {'F', 'B', 'I', 'W'};
    dtrain__pipeline_name name;
    int at = (int)task->part - (int)DTRAIN_PART_FORWARD;
    char letter = '?';
    if (at >= 0 && at < 4)
        letter = letters[at];
    if (plan->desc.chunks > 1)
        snprintf(name.text, sizeof name.text, "%c%d.%d", letter, task->micro_batch, task->chunk);
    else
        snprintf(name.text, sizeof name.text, "%c%d", letter, task->micro_batch);
    return name;
}

/* Every task is one, and none is there twice; walk->marks are zero again afterwards. */
static dtrain_status dtrain__pipeline_check_tasks(dtrain__pipeline_walk *walk)
{
    const dtrain_pipeline_plan *plan = walk->plan;
    size_t missing = walk->mark_count;
    for (size_t i = 0; i < plan->rank_tasks * (size_t)plan->desc.ranks; i++) {
        const dtrain_pipeline_task *task = &plan->tasks[i];
        int rank = (int)(i / plan->rank_tasks), bad = 1, way = dtrain__pipeline_way(task->part);
        if (task->part >= DTRAIN_PART_FORWARD && task->part <= DTRAIN_PART_WEIGHTS && task->micro_batch >= 0 &&
            task->micro_batch < plan->desc.micro_batches && task->chunk >= 0 && task->chunk < plan->desc.chunks) {
            bad = dtrain__pipeline_at(walk, rank, way, task->chunk, task->micro_batch)->done++;
            missing--;
            if (task->part == DTRAIN_PART_BACKWARD) {
                bad |= dtrain__pipeline_at(walk, rank, DTRAIN__PIPELINE_HERE, task->chunk, task->micro_batch)->done++;
                missing--;
            }
        }
        if (bad)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "pipeline_plan: task %zu of rank %d, %s, is there twice, or is none of %d micro-batches "
                "and %d chunks",
                i % plan->rank_tasks, rank, dtrain__pipeline_task_name(plan, task).text, plan->desc.micro_batches,
                plan->desc.chunks);
    }
    if (missing > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "pipeline_plan: %zu parts of micro-batches are missing", missing);
    memset(walk->marks, 0, walk->mark_count * sizeof *walk->marks);
    return DTRAIN_OK;
}

/* Says where a walk has come to a stop: of the ranks, the one whose next task would be the earliest. */
static dtrain_status dtrain__pipeline_stuck(const dtrain__pipeline_walk *walk)
{
    const dtrain_pipeline_plan *plan = walk->plan;
    int rank = -1;
    for (int r = 0; r < plan->desc.ranks; r++)
        if ((walk->ranks[r].next < plan->rank_tasks || walk->ranks[r].sends >= 0) &&
            (rank < 0 || walk->ranks[r].free < walk->ranks[rank].free))
            rank = r;
    const dtrain__pipeline_rank *me = &walk->ranks[rank];
    size_t at = me->next - (me->sends >= 0);
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "pipeline_plan: rank %d stops at its task %zu, %s, %s; put it in another order", rank, at,
                        dtrain__pipeline_task_name(plan, &plan->tasks[(size_t)rank * plan->rank_tasks + at]).text,
                        me->sends >= 0 ? "whose result is not taken by the next rank" : "whose input is never there");
}

/* Span, and what of it ranks idle. */
static void dtrain__pipeline_sum_up(dtrain_pipeline_plan *plan)
{
    double busy = 0.0;
    plan->span = 0.0;
    for (size_t i = 0; i < plan->rank_tasks * (size_t)plan->desc.ranks; i++) {
        busy += plan->tasks[i].end - plan->tasks[i].begin;
        plan->span = plan->tasks[i].end > plan->span ? plan->tasks[i].end : plan->span;
    }
    plan->bubble = plan->span > 0.0 ? 1.0 - busy / (plan->span * plan->desc.ranks) : 0.0;
}

static dtrain_status dtrain__pipeline_walk_all(dtrain__pipeline_walk *walk)
{
    dtrain_pipeline_plan *plan = walk->plan;
    int moved = 1;
    dtrain_status status = dtrain__pipeline_check_tasks(walk);
    if (status != DTRAIN_OK)
        return status;
    for (int rank = 0; rank < plan->desc.ranks; rank++)
        walk->ranks[rank].sends = -1;
    memset(plan->peak, 0, (size_t)plan->desc.ranks * sizeof *plan->peak);
    while (moved) {
        moved = 0;
        for (int rank = 0; rank < plan->desc.ranks; rank++)
            while (dtrain__pipeline_advance(walk, rank))
                moved = 1;
    }
    for (int rank = 0; rank < plan->desc.ranks; rank++)
        if (walk->ranks[rank].next < plan->rank_tasks || walk->ranks[rank].sends >= 0)
            return dtrain__pipeline_stuck(walk);
    dtrain__pipeline_sum_up(plan);
    return DTRAIN_OK;
}

static dtrain_status dtrain__pipeline_plan_check(dtrain_pipeline_plan *plan)
{
    dtrain__pipeline_walk walk;
    size_t ranks = (size_t)plan->desc.ranks;
    memset(&walk, 0, sizeof walk);
    walk.plan = plan;
    walk.mark_count =
        ranks * DTRAIN__PIPELINE_WAYS * (size_t)plan->desc.chunks * (size_t)plan->desc.micro_batches; /* as the tasks */
    walk.marks = (dtrain__pipeline_mark *)dtrain__alloc(plan->allocator, walk.mark_count * sizeof *walk.marks);
    walk.ranks = (dtrain__pipeline_rank *)dtrain__alloc(plan->allocator, ranks * sizeof *walk.ranks);
    dtrain_status status =
        walk.marks != NULL && walk.ranks != NULL
            ? dtrain__pipeline_walk_all(&walk)
            : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "pipeline_plan: no memory for %zu tasks", ranks * plan->rank_tasks);
    dtrain__free(plan->allocator, walk.marks);
    dtrain__free(plan->allocator, walk.ranks);
    return status;
}

/* ---- making a plan ---- */

static dtrain_status dtrain__pipeline_check_times(const dtrain_pipeline_plan_desc *desc)
{
    double times[4] = {desc->forward, desc->backward_input, desc->backward_weights, desc->transfer};
    int stages = desc->ranks * desc->chunks;
    for (int i = 0; i < 4; i++)
        if (!(times[i] >= 0.0 && times[i] < HUGE_VAL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "pipeline_plan: a time is %g, expected a finite number of at least 0", times[i]);
    for (int i = 0; desc->shares != NULL && i < stages; i++)
        if (!(desc->shares[i] >= 0.0 && desc->shares[i] < HUGE_VAL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "pipeline_plan: the share of stage %d is %g, expected a finite number of at least 0", i,
                                desc->shares[i]);
    return DTRAIN_OK;
}

static dtrain_status dtrain__pipeline_fill(dtrain_pipeline_plan_desc *desc)
{
    int interleaves = desc->schedule == DTRAIN_PIPELINE_INTERLEAVED;
    if (desc->schedule == DTRAIN_PIPELINE_DEFAULT)
        desc->schedule = DTRAIN_PIPELINE_1F1B;
    if (desc->schedule < DTRAIN_PIPELINE_GPIPE || desc->schedule > DTRAIN_PIPELINE_ZB_H1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "pipeline_plan: there is no schedule %d; expected one of dtrain_pipeline_schedule",
                            (int)desc->schedule);
    int numbers[3] = {desc->ranks, desc->micro_batches, desc->chunks};
    for (int i = 0; i < 3; i++)
        if (numbers[i] < 0 || numbers[i] > DTRAIN__PIPELINE_MOST)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "pipeline_plan: %d ranks, %d micro-batches, %d chunks; expected 1 to %d of each",
                                numbers[0], numbers[1], numbers[2], DTRAIN__PIPELINE_MOST);
    if (desc->chunks > 1 && !interleaves)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "pipeline_plan: %d chunks a rank are for the interleaved schedule alone; others have 1",
                            desc->chunks);
    desc->ranks += desc->ranks == 0;
    desc->micro_batches += desc->micro_batches == 0;
    desc->chunks = desc->chunks > 0 ? desc->chunks : interleaves ? 2 : 1;
    if (desc->forward == 0.0 && desc->backward_input == 0.0 && desc->backward_weights == 0.0)
        desc->forward = desc->backward_input = desc->backward_weights = 1.0;
    return dtrain__pipeline_check_times(desc);
}

/* Takes the memory of a plan; marks are no more than six words a task. */
static int dtrain__pipeline_reserve(dtrain_pipeline_plan *plan)
{
    const dtrain_pipeline_plan_desc *desc = &plan->desc;
    size_t bytes, ranks = (size_t)desc->ranks, parts = desc->schedule == DTRAIN_PIPELINE_ZB_H1 ? 3 : 2;
    if (!dtrain__mul_size(parts * (size_t)desc->micro_batches, (size_t)desc->chunks, &plan->rank_tasks) ||
        !dtrain__mul_size(plan->rank_tasks, ranks, &bytes) || !dtrain__mul_size(bytes, 64, &bytes))
        return 0;
    plan->tasks =
        (dtrain_pipeline_task *)dtrain__alloc(plan->allocator, plan->rank_tasks * ranks * sizeof *plan->tasks);
    plan->peak = (int *)dtrain__alloc(plan->allocator, ranks * sizeof *plan->peak);
    return plan->tasks != NULL && plan->peak != NULL;
}

DTRAIN_API dtrain_status dtrain_pipeline_plan_create(dtrain_pipeline_plan **plan, const dtrain_pipeline_plan_desc *desc,
                                                     dtrain_allocator *allocator)
{
    dtrain_pipeline_plan_desc full;
    if (plan == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "pipeline_plan_create: plan is NULL");
    *plan = NULL;
    memset(&full, 0, sizeof full);
    if (desc != NULL)
        full = *desc;
    dtrain_status status = dtrain__pipeline_fill(&full);
    if (status != DTRAIN_OK)
        return status;
    dtrain_pipeline_plan *made = (dtrain_pipeline_plan *)dtrain__memory_owner(
        allocator, sizeof *made, offsetof(dtrain_pipeline_plan, own), &allocator);
    if (made != NULL) {
        made->allocator = allocator;
        made->desc = full;
    }
    if (made == NULL || !dtrain__pipeline_reserve(made)) {
        dtrain_pipeline_plan_destroy(made);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "pipeline_plan_create: no memory for %d micro-batches in %d chunks on %d ranks",
                            full.micro_batches, full.chunks, full.ranks);
    }
    for (int rank = 0; rank < full.ranks; rank++)
        switch (full.schedule) {
        case DTRAIN_PIPELINE_GPIPE: dtrain__pipeline_gpipe(made, rank); break;
        case DTRAIN_PIPELINE_ZB_H1: dtrain__pipeline_zero_bubble(made, rank); break;
        default: dtrain__pipeline_one_by_one(made, rank);
        }
    status = dtrain__pipeline_plan_check(made);
    if (status != DTRAIN_OK) {
        dtrain_pipeline_plan_destroy(made);
        return status;
    }
    *plan = made;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_pipeline_plan_destroy(dtrain_pipeline_plan *plan)
{
    if (plan == NULL)
        return;
    dtrain__free(plan->allocator, plan->tasks);
    dtrain__free(plan->allocator, plan->peak);
    dtrain__free(plan->allocator, plan);
}

/* ---- cutting layers into stages ---- */

/* Fills stages up to most, each with a layer at least, so that those to come have one left as well. Returns whether all
 * layers have found a place. */
static int dtrain__pipeline_stages_fill(const double *costs, int layers, int stages, double most, int *begins)
{
    int layer = 0;
    for (int s = 0; s < stages; s++) {
        double cost = costs[layer];
        begins[s] = layer++;
        if (cost > most)
            return 0;
        while (layer < layers - (stages - s - 1) && cost + costs[layer] <= most)
            cost += costs[layer++];
    }
    begins[stages] = layers;
    return layer == layers;
}

/* The least that is enough for all stages, to the last bit: numbers of at least 0 are in the order of their bits. */
static double dtrain__pipeline_stages_least(const double *costs, int layers, int stages, int *begins)
{
    double most = HUGE_VAL;
    uint64_t low = 0, high, middle; /* high is enough, and what is below low is not */
    memcpy(&high, &most, sizeof high);
    while (low < high) {
        middle = low + (high - low) / 2;
        memcpy(&most, &middle, sizeof most);
        if (dtrain__pipeline_stages_fill(costs, layers, stages, most, begins))
            high = middle;
        else
            low = middle + 1;
    }
    memcpy(&most, &high, sizeof most);
    return most;
}

DTRAIN_API dtrain_status dtrain_split_stages(const double *costs, int layers, int stages, int *begins)
{
    if (begins == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "split_stages: begins is NULL, expected stages + 1 numbers");
    if (stages < 1 || stages > layers)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "split_stages: %d layers make no %d stages; 1 to %d would fit",
                            layers, stages, layers > 1 ? layers : 1);
    for (int s = 0; costs == NULL && s < stages; s++) {
        size_t begin;
        dtrain__split((size_t)layers, stages, s, &begin);
        begins[s] = (int)begin;
    }
    begins[stages] = layers;
    if (costs == NULL)
        return DTRAIN_OK;
    for (int i = 0; i < layers; i++)
        if (!(costs[i] >= 0.0 && costs[i] < HUGE_VAL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "split_stages: layer %d costs %g, expected a finite number of at least 0", i, costs[i]);
    dtrain__pipeline_stages_fill(costs, layers, stages, dtrain__pipeline_stages_least(costs, layers, stages, begins),
                                 begins);
    return DTRAIN_OK;
}

#endif
