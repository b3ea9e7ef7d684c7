/* ---- >>pipeline-plan ----
 * Cutting layers into stages, and planning: the order of tasks and the times at which they run. The rule of a schedule
 * gives the order. A walk over all ranks then finds when each task runs, and whether one never can. */
#ifndef DTRAIN__PIPELINE_PLAN
#define DTRAIN__PIPELINE_PLAN
#include "pipeline.h"
#include "../base/status.c"
#include "../base/memory.c"
#include "../base/os_files.c"
#include "../tensor/dtype.c"

#define DTRAIN__PIPELINE_MOST 1000000 /* ranks, micro-batches, chunks */

/* ---- the order of tasks ---- */

/* Adds a part of the i-th pair of micro-batch and chunk of a rank; nothing if that micro-batch does not exist.
 *
 * Micro-batches go in groups of as many as there are ranks. A group goes through all chunks, backward from the last.
 * The last group may be short: the missing micro-batches are skipped, which is safe because no other task needs them.
 */
static void dtrain__pipeline_add(const dtrain_pipeline_plan *plan, dtrain_pipeline_task **next,
                                 dtrain_pipeline_part part, size_t i)
{
    size_t ranks = (size_t)plan->desc.ranks, group = ranks * (size_t)plan->desc.chunks;
    size_t micro_batch = i / group * ranks + i % ranks;
    int chunk = (int)(i % group / ranks);
    if (micro_batch >= (size_t)plan->desc.micro_batches)
        return;
    (*next)->part = part;
    (*next)->micro_batch = (int)micro_batch;
    (*next)->chunk = part == DTRAIN_PART_FORWARD ? chunk : plan->desc.chunks - 1 - chunk;
    ++*next;
}

/* Writes the order of a rank's tasks. Every schedule is 1F1B with its own number of forward passes ahead of the
 * backward passes; for GPipe that is all. In ZB-H1 the weight gradients are `rank` micro-batches behind those of the
 * input. So later ranks hold as many micro-batches as rank 0, and fill the end of a step with work. A micro-batch
 * number below 0 wraps around to a large one, and dtrain__pipeline_add skips it. */
static void dtrain__pipeline_order(const dtrain_pipeline_plan *plan, int rank)
{
    dtrain_pipeline_task *next = &plan->tasks[(size_t)rank * plan->rank_tasks], *end = next + plan->rank_tasks;
    size_t ranks = (size_t)plan->desc.ranks, chunks = (size_t)plan->desc.chunks, ahead = ranks - (size_t)rank - 1;
    int halves = plan->desc.schedule == DTRAIN_PIPELINE_ZB_H1;
    if (plan->desc.schedule == DTRAIN_PIPELINE_GPIPE)
        ahead = (size_t)plan->desc.micro_batches;
    else if (chunks > 1)
        ahead = 2 * ahead + (chunks - 1) * ranks;
    for (size_t i = 0; next < end; i++) {
        dtrain__pipeline_add(plan, &next, DTRAIN_PART_FORWARD, i);
        dtrain__pipeline_add(plan, &next, halves ? DTRAIN_PART_INPUT : DTRAIN_PART_BACKWARD, i - ahead);
        if (halves)
            dtrain__pipeline_add(plan, &next, DTRAIN_PART_WEIGHTS, i - ahead - (size_t)rank);
    }
}

/* ---- the walk ---- */

/* Outputs of forward passes go AHEAD to the next rank, gradients of inputs BACK to the rank before. */
enum { DTRAIN__PIPELINE_AHEAD, DTRAIN__PIPELINE_BACK, DTRAIN__PIPELINE_WAYS };

typedef struct dtrain__pipeline_rank {
    size_t next;                               /* next task */
    double free;                               /* when the last task ended */
    int held;                                  /* chunks of micro-batches */
    const double *result;                      /* of the last task, waiting for room in sent; NULL: none */
    const double *sent[DTRAIN__PIPELINE_WAYS]; /* sent, but not yet taken by the neighbour; NULL: nothing */
} dtrain__pipeline_rank;

typedef struct dtrain__pipeline_walk {
    dtrain_pipeline_plan *plan;
    double *ends; /* when each forward pass and each gradient of an input is done, for each rank; -1: not yet */
    dtrain__pipeline_rank *ranks;
} dtrain__pipeline_walk;

static double *dtrain__pipeline_end(const dtrain__pipeline_walk *walk, int rank, int way, int chunk, int micro_batch)
{
    size_t chunks = (size_t)walk->plan->desc.chunks, count = (size_t)walk->plan->desc.micro_batches;
    size_t row = ((size_t)rank * DTRAIN__PIPELINE_WAYS + (size_t)way) * chunks + (size_t)chunk;
    return &walk->ends[row * count + (size_t)micro_batch];
}

/* The direction in which a task's input and result travel. */
static int dtrain__pipeline_way(const dtrain_pipeline_task *task)
{
    return task->part == DTRAIN_PART_FORWARD ? DTRAIN__PIPELINE_AHEAD : DTRAIN__PIPELINE_BACK;
}

/* Returns the rank that takes a task's result (to: 1) or gives its input (to: 0), and in *chunk the chunk there; -1:
 * none. */
static int dtrain__pipeline_peer(const dtrain_pipeline_plan *plan, int rank, const dtrain_pipeline_task *task, int to,
                                 int *chunk)
{
    int ranks = plan->desc.ranks, step = to == (task->part == DTRAIN_PART_FORWARD) ? 1 : -1, next = rank + step;
    *chunk = task->chunk;
    if (task->part == DTRAIN_PART_WEIGHTS)
        return -1;
    if (next >= 0 && next < ranks)
        return next;
    *chunk += step;
    return *chunk >= 0 && *chunk < plan->desc.chunks ? (next + ranks) % ranks : -1;
}

/* Takes the input of a task if it has arrived. *since: when it did. */
static int dtrain__pipeline_take_input(const dtrain__pipeline_walk *walk, int rank, const dtrain_pipeline_task *task,
                                       double *since)
{
    int chunk, way = dtrain__pipeline_way(task), from = dtrain__pipeline_peer(walk->plan, rank, task, 0, &chunk);
    int before = task->part == DTRAIN_PART_WEIGHTS ? DTRAIN__PIPELINE_BACK : DTRAIN__PIPELINE_AHEAD;
    *since = 0.0;
    if (task->part != DTRAIN_PART_FORWARD &&
        *dtrain__pipeline_end(walk, rank, before, task->chunk, task->micro_batch) < 0.0)
        return 0;
    if (from < 0)
        return 1;
    const double *input = dtrain__pipeline_end(walk, from, way, chunk, task->micro_batch);
    *since = *input + (from != rank ? walk->plan->desc.transfer : 0.0);
    if (from == rank)
        return *input >= 0.0;
    if (walk->ranks[from].sent[way] != input)
        return 0;
    walk->ranks[from].sent[way] = NULL;
    return 1;
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

/* Runs a task whose input has arrived. */
static void dtrain__pipeline_run(dtrain__pipeline_walk *walk, int rank, dtrain_pipeline_task *task, double since)
{
    dtrain_pipeline_plan *plan = walk->plan;
    dtrain__pipeline_rank *me = &walk->ranks[rank];
    int chunk, to = dtrain__pipeline_peer(plan, rank, task, 1, &chunk);
    task->begin = since > me->free ? since : me->free;
    task->end = me->free = task->begin + dtrain__pipeline_cost(plan, rank, task);
    me->held += task->part == DTRAIN_PART_FORWARD;
    plan->peak[rank] = me->held > plan->peak[rank] ? me->held : plan->peak[rank];
    me->held -= task->part == DTRAIN_PART_BACKWARD || task->part == DTRAIN_PART_WEIGHTS;
    me->next++;
    if (task->part == DTRAIN_PART_WEIGHTS)
        return;
    double *end = dtrain__pipeline_end(walk, rank, dtrain__pipeline_way(task), task->chunk, task->micro_batch);
    *end = task->end;
    me->result = to >= 0 && to != rank ? end : NULL;
}

/* Lets a rank send its last result or run its next task, if it can. Returns whether it did. */
static int dtrain__pipeline_advance(dtrain__pipeline_walk *walk, int rank)
{
    dtrain__pipeline_rank *me = &walk->ranks[rank];
    dtrain_pipeline_task *task = &walk->plan->tasks[(size_t)rank * walk->plan->rank_tasks + me->next];
    double since;
    if (me->result != NULL) {
        const double **room = &me->sent[dtrain__pipeline_way(task - 1)];
        if (*room != NULL)
            return 0;
        *room = me->result;
        me->result = NULL;
        return 1;
    }
    if (me->next == walk->plan->rank_tasks || !dtrain__pipeline_take_input(walk, rank, task, &since))
        return 0;
    dtrain__pipeline_run(walk, rank, task, since);
    return 1;
}

/* If a walk stopped before its end, reports the task that would have been the earliest. */
static dtrain_status dtrain__pipeline_check_end(const dtrain__pipeline_walk *walk)
{
    const dtrain_pipeline_plan *plan = walk->plan;
    const dtrain__pipeline_rank *me, *first = NULL;
    for (me = walk->ranks; me < walk->ranks + plan->desc.ranks; me++)
        if ((me->next < plan->rank_tasks || me->result != NULL) && (first == NULL || me->free < first->free))
            first = me;
    if (first == NULL)
        return DTRAIN_OK;
    size_t rank = (size_t)(first - walk->ranks), at = first->next - (first->result != NULL);
    const dtrain_pipeline_task *task = &plan->tasks[rank * plan->rank_tasks + at];
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "pipeline_plan: rank %zu stops at its task %zu, %c%d of chunk %d, %s; put it in another order",
                        rank, at, "FBIW"[task->part - DTRAIN_PART_FORWARD], task -> micro_batch, task -> chunk,
                        first -> result != NULL ? "whose result is not taken by the next rank"
                                                : "whose input is never there");
}

/* Computes the span of a plan and the share in which ranks idle. */
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

/* Finds when each task runs. If a task can never run, that is an error. */
static dtrain_status dtrain__pipeline_plan_check(dtrain_pipeline_plan *plan)
{
    size_t ranks = (size_t)plan->desc.ranks;
    size_t ends = ranks * DTRAIN__PIPELINE_WAYS * (size_t)plan->desc.chunks * (size_t)plan->desc.micro_batches;
    dtrain__pipeline_walk walk;
    dtrain_status status = DTRAIN_ERR_MEMORY;
    walk.plan = plan;
    walk.ends = (double *)dtrain__alloc(plan->allocator, ends * sizeof *walk.ends);
    walk.ranks = (dtrain__pipeline_rank *)dtrain__alloc(plan->allocator, ranks * sizeof *walk.ranks);
    if (walk.ends == NULL || walk.ranks == NULL) {
        dtrain__fail(NULL, status, "pipeline_plan: no memory for %zu tasks", ranks * plan->rank_tasks);
        goto done;
    }
    for (size_t i = 0; i < ends; i++)
        walk.ends[i] = -1.0;
    memset(plan->peak, 0, ranks * sizeof *plan->peak);
    for (int moved = 1; moved;) {
        moved = 0;
        for (int rank = 0; rank < plan->desc.ranks; rank++)
            while (dtrain__pipeline_advance(&walk, rank))
                moved = 1;
    }
    status = dtrain__pipeline_check_end(&walk);
    if (status == DTRAIN_OK)
        dtrain__pipeline_sum_up(plan);
done:
    dtrain__free(plan->allocator, walk.ends);
    dtrain__free(plan->allocator, walk.ranks);
    return status;
}

/* ---- making a plan ---- */

static dtrain_status dtrain__pipeline_check_times(const dtrain_pipeline_plan_desc *desc)
{
    double times[4] = {desc->forward, desc->backward_input, desc->backward_weights, desc->transfer};
    static const char *const names[4] = {"forward", "backward_input", "backward_weights", "transfer"};
    int stages = desc->ranks * desc->chunks;
    for (int i = 0; i < 4; i++)
        if (!(times[i] >= 0.0 && times[i] < HUGE_VAL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "pipeline_plan: %s is %g, expected a finite number of at least 0", names[i], times[i]);
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
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "pipeline_plan: there is no schedule %d; expected one of dtrain_pipeline_schedule" DTRAIN__ZERO_FIRST,
            (int)desc->schedule);
    int numbers[3] = {desc->ranks, desc->micro_batches, desc->chunks};
    for (int i = 0; i < 3; i++)
        if (numbers[i] < 0 || numbers[i] > DTRAIN__PIPELINE_MOST)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "pipeline_plan: %d ranks, %d micro-batches, %d chunks; expected 1 to %d of each, or 0 for the "
                "default",
                numbers[0], numbers[1], numbers[2], DTRAIN__PIPELINE_MOST);
    if (desc->chunks > 1 && !interleaves)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "pipeline_plan: %d chunks a rank are for the interleaved schedule alone; others have 1: leave "
            "chunks 0, or set schedule",
            desc->chunks);
    desc->ranks += desc->ranks == 0;
    desc->micro_batches += desc->micro_batches == 0;
    desc->chunks = desc->chunks > 0 ? desc->chunks : interleaves ? 2 : 1;
    if (desc->forward == 0.0 && desc->backward_input == 0.0 && desc->backward_weights == 0.0)
        desc->forward = desc->backward_input = desc->backward_weights = 1.0;
    return dtrain__pipeline_check_times(desc);
}

/* Allocates the memory of a plan. The walk needs less, so that its sizes do not overflow either. */
static int dtrain__pipeline_reserve(dtrain_pipeline_plan *plan)
{
    const dtrain_pipeline_plan_desc *desc = &plan->desc;
    size_t bytes, ranks = (size_t)desc->ranks, parts = desc->schedule == DTRAIN_PIPELINE_ZB_H1 ? 3 : 2;
    if (!dtrain__mul_size(parts * (size_t)desc->micro_batches, (size_t)desc->chunks, &plan->rank_tasks) ||
        !dtrain__mul_size(plan->rank_tasks, ranks, &bytes) || !dtrain__mul_size(bytes, sizeof *plan->tasks, &bytes))
        return 0;
    plan->tasks = (dtrain_pipeline_task *)dtrain__alloc(plan->allocator, bytes);
    plan->peak = (int *)dtrain__alloc(plan->allocator, ranks * sizeof *plan->peak);
    return plan->tasks != NULL && plan->peak != NULL;
}

DTRAIN_API dtrain_status dtrain_pipeline_plan_create(dtrain_pipeline_plan **plan, const dtrain_pipeline_plan_desc *desc,
                                                     dtrain_allocator *allocator)
{
    dtrain_pipeline_plan_desc full;
    if (plan == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "pipeline_plan_create: plan is NULL, expected a place for the plan");
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
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                              "pipeline_plan_create: no memory for %d micro-batches in %d chunks on %d ranks",
                              full.micro_batches, full.chunks, full.ranks);
    } else {
        for (int rank = 0; rank < full.ranks; rank++)
            dtrain__pipeline_order(made, rank);
        status = dtrain__pipeline_plan_check(made);
    }
    if (status == DTRAIN_OK)
        *plan = made;
    else
        dtrain_pipeline_plan_destroy(made);
    return status;
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

/* Fills each stage up to the cost `most`, with at least one layer each, and leaves one for every later stage. Returns
 * whether all layers found a place. */
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

/* Returns the least cost of the most expensive stage, by bisection over bits: doubles of at least 0 have the order of
 * their bits. */
static double dtrain__pipeline_stages_least(const double *costs, int layers, int stages, int *begins)
{
    double most = HUGE_VAL;
    uint64_t low = 0, high, middle; /* high is enough; anything below low is not */
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
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "split_stages: %d layers cannot be cut into %d stages; 1 to %d would fit", layers, stages,
                            layers > 1 ? layers : 1);
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
