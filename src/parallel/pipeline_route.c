/* ---- >>pipeline-route ----
 * What one rank sends and receives when it runs its plan, found out before anything runs: in which order messages come
 * from each neighbour, when to ask for each, and which block of memory each is in. A step follows it and decides
 * nothing.
 *
 * Messages from one rank come in the order of its tasks, which between two ranks alone, where both ways go to the same
 * one, need not be the order in which they are used: what comes earlier is asked for earlier. A result waits for room
 * no longer than in the plan's walk, so that what the plan allows cannot lock. */
#ifndef DTRAIN__PIPELINE_ROUTE
#define DTRAIN__PIPELINE_ROUTE
#include "pipeline_plan.c"
#include "module_run.c"

#define DTRAIN__PIPELINE_SENDS 2 /* gradients that leave a rank at once */
#define DTRAIN__PIPELINE_WHY 184
#define DTRAIN__PIPELINE_WORDS (2 + DTRAIN_MAX_DIMS) /* dtype, dimensions, sizes */

/* What a task of this rank needs and leaves. */
typedef struct dtrain__pipeline_move {
    int place;            /* of its micro-batch in the module */
    int in;               /* slot where its input is; -1: it has none, or it is in the module before */
    int out;              /* slot where the gradient of its input goes; -1: nobody wants one */
    int to;               /* rank that its result is sent to; -1: none */
    ptrdiff_t after;      /* the move whose result was sent from the same memory; -1: none */
    ptrdiff_t message;    /* what it waits for; -1: nothing */
    dtrain_work *sending; /* NULL: nothing, or it has ended */
} dtrain__pipeline_move;

/* A message to be received. */
typedef struct dtrain__pipeline_message {
    size_t task, when; /* that uses it; before which it is asked for */
    int peer, slot;
    dtrain_work *receiving;
} dtrain__pipeline_message;

struct dtrain_pipeline {
    dtrain_allocator own; /* used when the caller gives none */
    dtrain_allocator *allocator;
    dtrain_comm *group;
    dtrain_pipeline_plan *plan;
    int rank, ranks, chunks, micro_batches;
    dtrain_module **modules;
    dtrain_fsdp **fsdps;
    const dtrain_pipeline_task *tasks; /* of this rank */
    size_t task_count;
    dtrain__pipeline_move *moves; /* of each task */
    dtrain__pipeline_message *messages;
    size_t message_count, posted; /* posted: in this step */
    int *places;                  /* of micro-batch i in chunk c: [c * micro_batches + i] */
    int slots;
    dtrain_tensor *inputs, *outputs; /* of a chunk, without data, as places */
    unsigned char *memory;           /* slots, then one of zeros */
    size_t slot_bytes;
    unsigned char *evaluated; /* what was received to evaluate */
    uint64_t *shapes;         /* of all micro-batches, as they travel */
    int agreed;
    const char *call;
    dtrain_pipeline_stats stats;
    dtrain__error note, broken; /* note: why this rank cannot go on in the call under way */
};

/* Scratch of one making. */
typedef struct dtrain__pipeline_router {
    dtrain_pipeline *pipeline;
    size_t *tasks;   /* the task of a way, chunk and micro-batch: [way * cells + chunk * micro_batches + i] */
    size_t *arrives; /* of both neighbours: the tasks that use what they send, in its order */
    size_t *known;   /* of a task: 1 + where it is in arrives; 0: its input does not travel */
    char *busy;      /* slots */
    size_t cells, count[2];
    int peers[2];
} dtrain__pipeline_router;

static size_t dtrain__pipeline_cell(const dtrain_pipeline *pipeline, int chunk, int micro_batch)
{
    return (size_t)chunk * (size_t)pipeline->micro_batches + (size_t)micro_batch;
}

/* Lists the results of a neighbour's tasks that are sent to this rank. */
static void dtrain__pipeline_list(dtrain__pipeline_router *router, int which)
{
    const dtrain_pipeline *pipeline = router->pipeline;
    const dtrain_pipeline_plan *plan = pipeline->plan;
    int peer = router->peers[which];
    for (size_t i = 0; i < pipeline->task_count; i++) {
        const dtrain_pipeline_task *task = &plan->tasks[(size_t)peer * plan->rank_tasks + i];
        int way = dtrain__pipeline_way(task->part), chunk = task->chunk;
        if (way == DTRAIN__PIPELINE_HERE ||
            dtrain__pipeline_neighbour(plan, peer, way == DTRAIN__PIPELINE_AHEAD ? 1 : -1, &chunk) != pipeline->rank)
            continue;
        size_t at = (size_t)which * 2 * router->cells + router->count[which]++;
        size_t user =
            router->tasks[(size_t)way * router->cells + dtrain__pipeline_cell(pipeline, chunk, task->micro_batch)];
        router->arrives[at] = user;
        router->known[user] = at + 1;
    }
}

/* Puts messages in the order in which they are asked for, one task ahead. */
static void dtrain__pipeline_order_messages(dtrain__pipeline_router *router)
{
    dtrain_pipeline *pipeline = router->pipeline;
    size_t asked[2] = {0, 0};
    for (size_t t = 0; t < pipeline->task_count; t++) {
        if (router->known[t] == 0)
            continue;
        size_t at = router->known[t] - 1, which = at / (2 * router->cells), place = at % (2 * router->cells);
        for (; asked[which] <= place; asked[which]++) {
            dtrain__pipeline_message *message = &pipeline->messages[pipeline->message_count];
            message->task = router->arrives[which * 2 * router->cells + asked[which]];
            message->when = t > 0 ? t - 1 : 0;
            message->peer = router->peers[which];
            pipeline->moves[message->task].message = (ptrdiff_t)pipeline->message_count++;
        }
    }
}

static int dtrain__pipeline_take(dtrain__pipeline_router *router)
{
    int slot = 0;
    while (router->busy[slot])
        slot++;
    router->busy[slot] = 1;
    if (slot >= router->pipeline->slots)
        router->pipeline->slots = slot + 1;
    return slot;
}

/* Gives what is received, and what one chunk hands to another of the same rank, memory for as long as it is needed. */
static void dtrain__pipeline_slots(dtrain__pipeline_router *router)
{
    dtrain_pipeline *pipeline = router->pipeline;
    size_t asked = 0;
    for (size_t t = 0; t < pipeline->task_count; t++) {
        const dtrain_pipeline_task *task = &pipeline->tasks[t];
        dtrain__pipeline_move *move = &pipeline->moves[t];
        for (; asked < pipeline->message_count && pipeline->messages[asked].when <= t; asked++) {
            pipeline->messages[asked].slot = dtrain__pipeline_take(router);
            pipeline->moves[pipeline->messages[asked].task].in = pipeline->messages[asked].slot;
        }
        if (pipeline->ranks == 1 && dtrain__pipeline_way(task->part) == DTRAIN__PIPELINE_BACK && task->chunk > 0) {
            size_t user = router->tasks[DTRAIN__PIPELINE_BACK * router->cells +
                                        dtrain__pipeline_cell(pipeline, task->chunk - 1, task->micro_batch)];
            move->out = pipeline->moves[user].in = dtrain__pipeline_take(router);
        }
        if (move->in >= 0)
            router->busy[move->in] = 0;
    }
}

/* Says where results go, and what must have left their memory before. Activations are sent from the module. */
static void dtrain__pipeline_results(dtrain__pipeline_router *router)
{
    dtrain_pipeline *pipeline = router->pipeline;
    ptrdiff_t sent[DTRAIN__PIPELINE_SENDS] = {-1, -1};
    int next = 0, gradients = pipeline->slots;
    for (size_t t = 0; t < pipeline->task_count; t++) {
        const dtrain_pipeline_task *task = &pipeline->tasks[t];
        dtrain__pipeline_move *move = &pipeline->moves[t];
        int way = dtrain__pipeline_way(task->part), chunk = task->chunk;
        if (way == DTRAIN__PIPELINE_HERE)
            continue;
        move->to =
            dtrain__pipeline_neighbour(pipeline->plan, pipeline->rank, way == DTRAIN__PIPELINE_AHEAD ? 1 : -1, &chunk);
        move->to = move->to == pipeline->rank ? -1 : move->to;
        if (way == DTRAIN__PIPELINE_AHEAD || move->to < 0)
            continue;
        move->out = gradients + next;
        move->after = sent[next];
        sent[next] = (ptrdiff_t)t;
        pipeline->slots = gradients + DTRAIN__PIPELINE_SENDS;
        next = (next + 1) % DTRAIN__PIPELINE_SENDS;
    }
}

/* Gives every micro-batch a place of its chunk's module, from its forward pass until its gradients are complete.
 * Returns how many of a chunk's are in use at once; last[place]: the move that used it last. */
static int dtrain__pipeline_set_places(dtrain_pipeline *pipeline, int chunk, char *busy, ptrdiff_t *last)
{
    int most = 0, place;
    memset(busy, 0, (size_t)pipeline->micro_batches);
    for (int i = 0; i < pipeline->micro_batches; i++)
        last[i] = -1;
    for (size_t t = 0; t < pipeline->task_count; t++) {
        const dtrain_pipeline_task *task = &pipeline->tasks[t];
        int *own = &pipeline->places[dtrain__pipeline_cell(pipeline, chunk, task->micro_batch)];
        if (task->chunk != chunk)
            continue;
        if (task->part == DTRAIN_PART_FORWARD) {
            for (place = 0; busy[place];)
                place++;
            most = place >= most ? place + 1 : most;
            busy[place] = 1;
            *own = place;
            pipeline->moves[t].after = last[place];
            last[place] = (ptrdiff_t)t;
        }
        pipeline->moves[t].place = *own;
        if (task->part == DTRAIN_PART_BACKWARD || task->part == DTRAIN_PART_WEIGHTS)
            busy[*own] = 0;
    }
    return most;
}

/* Finds everything out; memory of the pipeline's is there. */
static dtrain_status dtrain__pipeline_route(dtrain__pipeline_router *router)
{
    dtrain_pipeline *pipeline = router->pipeline;
    for (size_t t = 0; t < pipeline->task_count; t++) {
        const dtrain_pipeline_task *task = &pipeline->tasks[t];
        int way = dtrain__pipeline_way(task->part);
        dtrain__pipeline_move *move = &pipeline->moves[t];
        move->in = move->out = move->to = -1;
        move->after = move->message = -1;
        router->tasks[(size_t)way * router->cells + dtrain__pipeline_cell(pipeline, task->chunk, task->micro_batch)] =
            t;
    }
    for (int c = 0; c < pipeline->chunks; c++) {
        int need = dtrain__pipeline_set_places(pipeline, c, router->busy, (ptrdiff_t *)(void *)router->arrives);
        int have = pipeline->modules[c]->place_count - 1;
        if (have < need)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "dtrain_pipeline_create: the module of chunk %d on rank %d is made for %d micro-batches "
                "in flight, the schedule needs %d: set micro_batches of its desc to at least that",
                c, pipeline->rank, have, need);
    }
    memset(router->busy, 0, 4 * router->cells + 1);
    router->peers[0] = (pipeline->rank + pipeline->ranks - 1) % pipeline->ranks;
    router->peers[1] = (pipeline->rank + 1) % pipeline->ranks;
    for (int which = 0; which < 2 && pipeline->ranks > 1; which++)
        if (which == 0 || router->peers[1] != router->peers[0])
            dtrain__pipeline_list(router, which);
    dtrain__pipeline_order_messages(router);
    dtrain__pipeline_slots(router);
    dtrain__pipeline_results(router);
    return DTRAIN_OK;
}

#endif
