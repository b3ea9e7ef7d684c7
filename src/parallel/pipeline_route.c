/* ---- >>pipeline-route ----
 * The messages of one rank when it runs its plan. They are fixed before anything runs: the order of messages from each
 * neighbour, when to start receiving each, and in which slot of memory. A step only follows this route.
 *
 * Messages from one rank arrive in the order of its tasks. With two ranks, both directions go to the same neighbour.
 * Then the order of arrival may differ from the order of use, and messages are received in the order of arrival. A
 * result waits for room no longer than in the walk of the plan. So a plan whose walk ends cannot deadlock. */
#ifndef DTRAIN__PIPELINE_ROUTE
#define DTRAIN__PIPELINE_ROUTE
#include "pipeline_plan.c"
#include "module_run.c"

#define DTRAIN__PIPELINE_SENDS 2                     /* gradients that leave a rank at once */
#define DTRAIN__PIPELINE_WORDS (2 + DTRAIN_MAX_DIMS) /* dtype, dimensions, sizes */

/* What a task of this rank needs and leaves. */
typedef struct dtrain__pipeline_move {
    int place;            /* of its micro-batch in the module */
    int in;               /* slot of its input; -1: no input, or the input is in the module of the chunk before */
    int out;              /* slot for the gradient of its input; -1: not wanted */
    int to;               /* rank that gets its result; -1: none */
    ptrdiff_t after;      /* the earlier move whose result is sent from the same memory; -1: none */
    ptrdiff_t message;    /* the message that it waits for; -1: none */
    dtrain_work *sending; /* NULL: nothing is being sent */
} dtrain__pipeline_move;

/* A message to be received. */
typedef struct dtrain__pipeline_message {
    size_t task, when; /* the task that uses it; the task before which receiving starts */
    int peer, slot;
    dtrain_work *receiving;
} dtrain__pipeline_message;

/* A micro-batch in a chunk of this rank. */
typedef struct dtrain__pipeline_cell {
    int place;                   /* of the module */
    dtrain_tensor input, output; /* of the chunk; without data */
} dtrain__pipeline_cell;

struct dtrain_pipeline {
    dtrain_allocator own; /* used if the caller gives none */
    dtrain_allocator *allocator;
    dtrain_comm *group;
    dtrain_pipeline_plan *plan;
    int rank, ranks, chunks, micro_batches;
    int before, after; /* neighbouring ranks; the last rank is before the first */
    dtrain_module **modules;
    dtrain_fsdp **fsdps;
    const dtrain_pipeline_task *tasks; /* of this rank */
    size_t task_count;
    dtrain__pipeline_move *moves; /* of each task */
    dtrain__pipeline_message *messages;
    size_t message_count, posted; /* posted: messages of this step whose receiving has started */
    dtrain__pipeline_cell *cells; /* that of micro-batch i in chunk c is [c * micro_batches + i] */
    int slots;
    unsigned char *memory; /* the slots, then one of zeros */
    size_t slot_bytes;
    unsigned char *evaluated; /* the input received by dtrain_pipeline_evaluate */
    uint64_t *shapes;         /* of all micro-batches, as they are sent */
    int agreed;
    const char *call;
    dtrain_pipeline_stats stats;
    dtrain__error note, broken; /* note: why this rank cannot go on in this call */
};

/* Temporary memory while a route is made. */
typedef struct dtrain__pipeline_router {
    dtrain_pipeline *pipeline;
    size_t *tasks;   /* that of a way, chunk and micro-batch i is [(way * chunks + chunk) * micro_batches + i] */
    ptrdiff_t *last; /* for each place the last move that used it */
    char *busy;      /* which places, and later which slots, are in use */
    size_t cells;
} dtrain__pipeline_router;

static dtrain__pipeline_cell *dtrain__pipeline_at(const dtrain_pipeline *pipeline, int chunk, int micro_batch)
{
    return &pipeline->cells[(size_t)chunk * (size_t)pipeline->micro_batches + (size_t)micro_batch];
}

/* Points to the task that uses the input of a chunk's micro-batch in a direction. */
static size_t *dtrain__pipeline_user(const dtrain__pipeline_router *router, int way, int chunk, int micro_batch)
{
    return &router->tasks[((size_t)way * (size_t)router->pipeline->chunks + (size_t)chunk) *
                              (size_t)router->pipeline->micro_batches +
                          (size_t)micro_batch];
}

/* Adds a message for the next result that a neighbour sends to this rank. *at: the neighbour's tasks searched so far.
 */
static void dtrain__pipeline_add_message(dtrain__pipeline_router *router, int peer, size_t *at, size_t when)
{
    dtrain_pipeline *pipeline = router->pipeline;
    const dtrain_pipeline_plan *plan = pipeline->plan;
    const dtrain_pipeline_task *task = &plan->tasks[(size_t)peer * plan->rank_tasks + *at];
    dtrain__pipeline_message *message = &pipeline->messages[pipeline->message_count];
    int chunk;
    for (; dtrain__pipeline_peer(plan, peer, task, 1, &chunk) != pipeline->rank; ++*at)
        task++;
    ++*at;
    message->task = *dtrain__pipeline_user(router, dtrain__pipeline_way(task), chunk, task->micro_batch);
    message->when = when;
    message->peer = peer;
    pipeline->moves[message->task].message = (ptrdiff_t)pipeline->message_count++;
}

/* Lists messages in the order of receiving, which starts one task ahead of their use. */
static void dtrain__pipeline_order_messages(dtrain__pipeline_router *router)
{
    dtrain_pipeline *pipeline = router->pipeline;
    size_t looked[2] = {0, 0}; /* tasks searched of the rank before, and of the rank after if it is another */
    for (size_t t = 0; t < pipeline->task_count; t++) {
        int chunk, from = dtrain__pipeline_peer(pipeline->plan, pipeline->rank, &pipeline->tasks[t], 0, &chunk);
        if (from < 0 || from == pipeline->rank)
            continue;
        while (pipeline->moves[t].message < 0)
            dtrain__pipeline_add_message(router, from, &looked[from != pipeline->before], t > 0 ? t - 1 : 0);
    }
}

/* Takes the first free place or slot and returns its number. */
static int dtrain__pipeline_take(char *busy, int *most)
{
    int i = 0;
    while (busy[i])
        i++;
    busy[i] = 1;
    *most = i >= *most ? i + 1 : *most;
    return i;
}

/* Assigns slots, and says where results go. Three things have a slot while they are needed: received messages,
 * gradients from one chunk to another of this rank, and gradients that are sent. Activations are sent from the module.
 */
static void dtrain__pipeline_slots(dtrain__pipeline_router *router)
{
    dtrain_pipeline *pipeline = router->pipeline;
    ptrdiff_t sent[DTRAIN__PIPELINE_SENDS] = {-1, -1};
    size_t asked = 0;
    int next = 0, chunk;
    memset(router->busy, 0, 4 * router->cells + 1);
    for (int i = 0; i < DTRAIN__PIPELINE_SENDS && pipeline->ranks > 1 && pipeline->rank + pipeline->chunks > 1; i++)
        dtrain__pipeline_take(router->busy, &pipeline->slots); /* the first slots are for sending gradients */
    for (size_t t = 0; t < pipeline->task_count; t++) {
        const dtrain_pipeline_task *task = &pipeline->tasks[t];
        dtrain__pipeline_move *move = &pipeline->moves[t];
        for (; asked < pipeline->message_count && pipeline->messages[asked].when <= t; asked++) {
            pipeline->messages[asked].slot = dtrain__pipeline_take(router->busy, &pipeline->slots);
            pipeline->moves[pipeline->messages[asked].task].in = pipeline->messages[asked].slot;
        }
        int to = dtrain__pipeline_peer(pipeline->plan, pipeline->rank, task, 1, &chunk);
        move->to = to == pipeline->rank ? -1 : to;
        if (task->part != DTRAIN_PART_FORWARD && to == pipeline->rank) {
            move->out = dtrain__pipeline_take(router->busy, &pipeline->slots);
            pipeline->moves[*dtrain__pipeline_user(router, DTRAIN__PIPELINE_BACK, chunk, task->micro_batch)].in =
                move->out;
        } else if (task->part != DTRAIN_PART_FORWARD && to >= 0) {
            move->out = next;
            move->after = sent[next];
            sent[next] = (ptrdiff_t)t;
            next = (next + 1) % DTRAIN__PIPELINE_SENDS;
        }
        if (move->in >= 0)
            router->busy[move->in] = 0;
    }
}

/* Gives every micro-batch a place in its chunk's module, from its forward pass until its gradients are complete.
 * Returns how many places of the chunk are in use at once. */
static int dtrain__pipeline_set_places(dtrain__pipeline_router *router, int chunk)
{
    dtrain_pipeline *pipeline = router->pipeline;
    int most = 0;
    memset(router->busy, 0, (size_t)pipeline->micro_batches);
    for (int i = 0; i < pipeline->micro_batches; i++)
        router->last[i] = -1;
    for (size_t t = 0; t < pipeline->task_count; t++) {
        const dtrain_pipeline_task *task = &pipeline->tasks[t];
        int *own = &dtrain__pipeline_at(pipeline, chunk, task->micro_batch)->place;
        if (task->chunk != chunk)
            continue;
        if (task->part == DTRAIN_PART_FORWARD) {
            *own = dtrain__pipeline_take(router->busy, &most);
            pipeline->moves[t].after = router->last[*own];
            router->last[*own] = (ptrdiff_t)t;
        }
        pipeline->moves[t].place = *own;
        if (task->part == DTRAIN_PART_BACKWARD || task->part == DTRAIN_PART_WEIGHTS)
            router->busy[*own] = 0;
    }
    return most;
}

/* Makes the route. The arrays of the pipeline are allocated already. */
static dtrain_status dtrain__pipeline_route(dtrain__pipeline_router *router)
{
    dtrain_pipeline *pipeline = router->pipeline;
    for (size_t t = 0; t < pipeline->task_count; t++) {
        const dtrain_pipeline_task *task = &pipeline->tasks[t];
        dtrain__pipeline_move *move = &pipeline->moves[t];
        move->in = move->out = -1;
        move->after = move->message = -1;
        if (task->part != DTRAIN_PART_WEIGHTS)
            *dtrain__pipeline_user(router, dtrain__pipeline_way(task), task->chunk, task->micro_batch) = t;
    }
    for (int c = 0; c < pipeline->chunks; c++) {
        int need = dtrain__pipeline_set_places(router, c), have = pipeline->modules[c]->place_count - 1;
        if (have < need)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "dtrain_pipeline_create: the module of chunk %d on rank %d is made for %d micro-batches "
                "in flight, the schedule needs %d: set micro_batches of its desc to at least that",
                c, pipeline->rank, have, need);
    }
    dtrain__pipeline_order_messages(router);
    dtrain__pipeline_slots(router);
    return DTRAIN_OK;
}

#endif
