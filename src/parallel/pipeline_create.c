/* ---- >>pipeline-create ----
 * Creation and destruction of a rank's end of a pipeline. */
#ifndef DTRAIN__PIPELINE_CREATE
#define DTRAIN__PIPELINE_CREATE
#include "pipeline_run.c"

/* Allocates every array but the slots, whose size dtrain_pipeline_agree finds. */
static int dtrain__pipeline_allocate(dtrain_pipeline *pipeline)
{
    dtrain_allocator *memory = pipeline->allocator;
    size_t chunks = (size_t)pipeline->chunks, micro = (size_t)pipeline->micro_batches, cells = chunks * micro;
    pipeline->modules = (dtrain_module **)dtrain__alloc(memory, chunks * sizeof *pipeline->modules);
    pipeline->fsdps = (dtrain_fsdp **)dtrain__alloc(memory, chunks * sizeof *pipeline->fsdps);
    pipeline->moves = (dtrain__pipeline_move *)dtrain__alloc(memory, pipeline->task_count * sizeof *pipeline->moves);
    pipeline->messages = (dtrain__pipeline_message *)dtrain__alloc(memory, 2 * cells * sizeof *pipeline->messages);
    pipeline->cells = (dtrain__pipeline_cell *)dtrain__alloc(memory, cells * sizeof *pipeline->cells);
    pipeline->shapes = (uint64_t *)dtrain__alloc(memory, micro * DTRAIN__PIPELINE_WORDS * sizeof *pipeline->shapes);
    return pipeline->modules != NULL && pipeline->fsdps != NULL && pipeline->moves != NULL &&
           pipeline->messages != NULL && pipeline->cells != NULL && pipeline->shapes != NULL;
}

static dtrain_status dtrain__pipeline_make_route(dtrain_pipeline *pipeline)
{
    dtrain_allocator *memory = pipeline->allocator;
    dtrain__pipeline_router router;
    memset(&router, 0, sizeof router);
    router.pipeline = pipeline;
    router.cells = (size_t)pipeline->chunks * (size_t)pipeline->micro_batches;
    dtrain_status status = DTRAIN_ERR_MEMORY;
    router.tasks = (size_t *)dtrain__alloc(memory, DTRAIN__PIPELINE_WAYS * router.cells * sizeof *router.tasks);
    router.last = (ptrdiff_t *)dtrain__alloc(memory, (size_t)pipeline->micro_batches * sizeof *router.last);
    router.busy = (char *)dtrain__alloc(memory, 4 * router.cells + 1);
    if (router.tasks != NULL && router.last != NULL && router.busy != NULL)
        status = dtrain__pipeline_route(&router);
    else
        dtrain__fail(NULL, status, "dtrain_pipeline_create: no memory for %zu tasks", pipeline->task_count);
    dtrain__free(memory, router.tasks);
    dtrain__free(memory, router.last);
    dtrain__free(memory, router.busy);
    return status;
}

/* Takes the module and FSDP of a chunk from the desc. They must have one table, and belong to no other chunk. */
static dtrain_status dtrain__pipeline_take_chunk(dtrain_pipeline *pipeline, const dtrain_pipeline_desc *desc, int chunk)
{
    dtrain__module_run run;
    if (desc->modules[chunk] == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_pipeline_create: the module of chunk %d is NULL: each of the %d chunks of a "
                            "rank needs one",
                            chunk, pipeline->chunks);
    memset(&run, 0, sizeof run);
    run.call = "dtrain_pipeline_create";
    run.module = pipeline->modules[chunk] = desc->modules[chunk];
    run.fsdp = pipeline->fsdps[chunk] = desc->fsdps != NULL ? desc->fsdps[chunk] : NULL;
    for (int c = 0; c < chunk; c++)
        if (pipeline->modules[c] == run.module || (run.fsdp != NULL && pipeline->fsdps[c] == run.fsdp))
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "dtrain_pipeline_create: chunks %d and %d have the same %s: each is a stage of its own, "
                "and needs one of its own",
                c, chunk, pipeline->modules[c] == run.module ? "module" : "fsdp");
    return dtrain__module_bind(&run);
}

/* Fills in a pipeline that has its plan. */
static dtrain_status dtrain__pipeline_set_up(dtrain_pipeline *pipeline, dtrain_comm *group,
                                             const dtrain_pipeline_desc *desc)
{
    const dtrain_pipeline_plan *plan = pipeline->plan;
    pipeline->group = group;
    pipeline->rank = dtrain_comm_rank(group);
    pipeline->ranks = plan->desc.ranks;
    pipeline->before = (pipeline->rank + pipeline->ranks - 1) % pipeline->ranks;
    pipeline->after = (pipeline->rank + 1) % pipeline->ranks;
    pipeline->chunks = plan->desc.chunks;
    pipeline->micro_batches = plan->desc.micro_batches;
    pipeline->task_count = plan->rank_tasks;
    pipeline->tasks = plan->tasks + (size_t)pipeline->rank * plan->rank_tasks;
    if (!dtrain__pipeline_allocate(pipeline))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_pipeline_create: no memory for %zu tasks",
                            pipeline->task_count);
    dtrain_status status = DTRAIN_OK;
    for (int c = 0; status == DTRAIN_OK && c < pipeline->chunks; c++)
        status = dtrain__pipeline_take_chunk(pipeline, desc, c);
    return status == DTRAIN_OK ? dtrain__pipeline_make_route(pipeline) : status;
}

DTRAIN_API dtrain_status dtrain_pipeline_create(dtrain_pipeline **pipeline, dtrain_comm *group,
                                                const dtrain_pipeline_desc *desc)
{
    dtrain_pipeline_plan_desc plan;
    memset(&plan, 0, sizeof plan);
    if (pipeline == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_pipeline_create: pipeline is NULL: nowhere to put it");
    *pipeline = NULL;
    if (group == NULL || desc == NULL || desc->modules == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_pipeline_create: %s is NULL: expected a group, and a desc with a module a chunk",
                            group == NULL  ? "group"
                            : desc == NULL ? "desc"
                                           : "modules");
    dtrain_allocator *memory;
    dtrain_pipeline *made =
        (dtrain_pipeline *)dtrain__memory_owner(desc->allocator, sizeof *made, offsetof(dtrain_pipeline, own), &memory);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_pipeline_create: no memory for %zu bytes", sizeof *made);
    made->allocator = memory;
    plan.schedule = desc->schedule;
    plan.ranks = dtrain_comm_size(group);
    plan.micro_batches = desc->micro_batches;
    plan.chunks = desc->chunks;
    dtrain_status status = dtrain_pipeline_plan_create(&made->plan, &plan, made->allocator);
    if (status == DTRAIN_OK)
        status = dtrain__pipeline_set_up(made, group, desc);
    if (status == DTRAIN_OK)
        *pipeline = made;
    else
        dtrain_pipeline_destroy(made);
    return status;
}

DTRAIN_API const dtrain_pipeline_plan *dtrain_pipeline_get_plan(const dtrain_pipeline *pipeline)
{
    return pipeline != NULL ? pipeline->plan : NULL;
}

DTRAIN_API dtrain_pipeline_stats dtrain_pipeline_get_stats(const dtrain_pipeline *pipeline)
{
    dtrain_pipeline_stats none;
    memset(&none, 0, sizeof none);
    return pipeline != NULL ? pipeline->stats : none;
}

DTRAIN_API void dtrain_pipeline_destroy(dtrain_pipeline *pipeline)
{
    if (pipeline == NULL)
        return;
    dtrain_allocator *memory = pipeline->allocator;
    dtrain__free(memory, pipeline->modules);
    dtrain__free(memory, pipeline->fsdps);
    dtrain__free(memory, pipeline->moves);
    dtrain__free(memory, pipeline->messages);
    dtrain__free(memory, pipeline->cells);
    dtrain__free(memory, pipeline->shapes);
    dtrain__free(memory, pipeline->memory);
    dtrain__free(memory, pipeline->evaluated);
    dtrain_pipeline_plan_destroy(pipeline->plan);
    dtrain__free(memory, pipeline);
}

#endif
