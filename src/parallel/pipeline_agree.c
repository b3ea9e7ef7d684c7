/* ---- >>pipeline-agree ----
 * What the ranks of a pipeline tell each other besides data: shapes, and at the end of each call which rank could not
 * go on and why. If one of a rank's groups breaks, the rank breaks all its groups, so that no other rank waits for it.
 */
#ifndef DTRAIN__PIPELINE_AGREE
#define DTRAIN__PIPELINE_AGREE
#include "pipeline_route.c"
#include "../comm/alike.c"

/* Notes why this rank cannot go on. The first cause stays. */
static DTRAIN__NOINLINE void dtrain__pipeline_note_down(dtrain_pipeline *pipeline, dtrain_status status,
                                                        const char *why)
{
    if (pipeline->note.status == DTRAIN_OK)
        dtrain__fail(&pipeline->note, status, "%s: %s", dtrain_status_name(status), why);
}

static dtrain_status dtrain__pipeline_wait(dtrain_work **work)
{
    dtrain_work *waited = *work;
    *work = NULL;
    return waited != NULL ? dtrain_work_wait(waited) : DTRAIN_OK;
}

/* Waits for all operations under way. Their buffers are free afterwards. */
static dtrain_status dtrain__pipeline_settle(dtrain_pipeline *pipeline)
{
    dtrain_status first = DTRAIN_OK;
    for (size_t i = 0; i < pipeline->task_count + pipeline->message_count; i++) {
        dtrain_status status =
            dtrain__pipeline_wait(i < pipeline->task_count ? &pipeline->moves[i].sending
                                                           : &pipeline->messages[i - pipeline->task_count].receiving);
        first = first == DTRAIN_OK ? status : first;
    }
    return first;
}

/* Keeps the failure of one group, and breaks the pipeline's other groups with it. */
static dtrain_status dtrain__pipeline_break(dtrain_pipeline *pipeline, dtrain_status status)
{
    dtrain__error cause = dtrain__thread_error, told;
    dtrain__fail(&pipeline->broken, status, "%s on rank %d of the pipeline: %.560s", pipeline->call, pipeline->rank,
                 cause.text);
    dtrain__fail(&told, dtrain__fsdp_told(status), "rank %d has broken off: %.560s", pipeline->rank, cause.text);
    if (pipeline->ranks > 1)
        dtrain__group_break(pipeline->group, &told);
    cause.status = status;
    for (int c = 0; c < pipeline->chunks; c++)
        dtrain__fsdp_break_with(pipeline->fsdps[c], pipeline->call, &cause);
    dtrain__pipeline_settle(pipeline);
    return dtrain__report(&pipeline->broken);
}

/* Begins a public call. */
static dtrain_status dtrain__pipeline_enter(dtrain_pipeline *pipeline, const char *call)
{
    if (pipeline == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: pipeline is NULL: create it first", call);
    if (pipeline->broken.status != DTRAIN_OK)
        return dtrain__report(&pipeline->broken);
    if (dtrain__group_whole(pipeline->group, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    pipeline->call = call;
    pipeline->note.status = DTRAIN_OK;
    return DTRAIN_OK;
}

/* Ends a call on all ranks with one result: if a rank could not go on, all fail. fails_step: the call belongs to a
 * step, which then fails, too. */
static dtrain_status dtrain__pipeline_verdict(dtrain_pipeline *pipeline, int fails_step)
{
    dtrain__alike alike = {pipeline->call, NULL, dtrain__alike_nothing, "", 1, {0}, 0};
    dtrain_status status = dtrain__alike_meet(pipeline->group, &alike, dtrain__report(&pipeline->note));
    if (alike.unheard)
        return dtrain__pipeline_break(pipeline, dtrain__report(&pipeline->group->error));
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    dtrain__error told = dtrain__thread_error;
    for (int c = 0; c < pipeline->chunks && fails_step; c++) {
        dtrain_module *module = pipeline->modules[c];
        dtrain__fsdp_fail(pipeline->fsdps[c], told.text);
        for (int i = 0; i < module->place_count - 1; i++) /* forget the micro-batches in flight */
            module->places[i].state = DTRAIN__MODULE_FREE;
    }
    return dtrain__fail(NULL, status == DTRAIN_ERR_PEER_LOST ? status : DTRAIN_ERR_ABORTED,
                        "%s: the pipeline could not go on: %s", pipeline->call, told.text);
}

/* ---- shapes ---- */

static void dtrain__pipeline_write_shape(uint64_t *words, const dtrain_tensor *tensor)
{
    words[0] = (uint64_t)tensor->dtype;
    words[1] = (uint64_t)tensor->ndim;
    for (int i = 0; i < DTRAIN_MAX_DIMS; i++)
        words[2 + i] = i < tensor->ndim ? tensor->shape[i] : 0;
}

/* Returns 0 if there is no shape, because an earlier stage could not compute it. */
static int dtrain__pipeline_read_shape(const uint64_t *words, dtrain_tensor *tensor)
{
    size_t shape[DTRAIN_MAX_DIMS];
    memset(tensor, 0, sizeof *tensor);
    for (int i = 0; i < DTRAIN_MAX_DIMS; i++)
        shape[i] = (size_t)words[2 + i];
    return words[0] != 0 && words[1] <= DTRAIN_MAX_DIMS &&
           dtrain__tensor_shape(tensor, (dtrain_dtype)words[0], (int)words[1], shape) == DTRAIN_OK;
}

/* Writes the shapes of the first stage's inputs into pipeline->shapes. */
static void dtrain__pipeline_first_shapes(dtrain_pipeline *pipeline, const dtrain_tensor *inputs)
{
    memset(pipeline->shapes, 0, (size_t)pipeline->micro_batches * DTRAIN__PIPELINE_WORDS * sizeof *pipeline->shapes);
    if (inputs == NULL)
        dtrain__pipeline_note_down(pipeline, DTRAIN_ERR_INVALID,
                                   "inputs is NULL on rank 0, expected the shapes of all micro-batches");
    for (int i = 0; inputs != NULL && i < pipeline->micro_batches; i++) {
        dtrain_tensor checked;
        if (dtrain__tensor_shape(&checked, inputs[i].dtype, inputs[i].ndim, inputs[i].shape) == DTRAIN_OK)
            dtrain__pipeline_write_shape(pipeline->shapes + (size_t)i * DTRAIN__PIPELINE_WORDS, &checked);
        else
            dtrain__pipeline_note_down(pipeline, DTRAIN_ERR_INVALID, dtrain_last_error());
    }
}

/* Replaces the input shapes in pipeline->shapes by the shapes of a stage's outputs. */
static void dtrain__pipeline_stage_shapes(dtrain_pipeline *pipeline, int chunk)
{
    for (int i = 0; i < pipeline->micro_batches; i++) {
        uint64_t *words = pipeline->shapes + (size_t)i * DTRAIN__PIPELINE_WORDS;
        dtrain__pipeline_cell *cell = dtrain__pipeline_at(pipeline, chunk, i);
        dtrain_tensor *input = &cell->input, *output = &cell->output;
        memset(output, 0, sizeof *output);
        if (!dtrain__pipeline_read_shape(words, input))
            continue;
        dtrain_status status = dtrain__module_shape_of(pipeline->modules[chunk], input, output);
        if (status != DTRAIN_OK) {
            dtrain__pipeline_note_down(pipeline, status, pipeline->modules[chunk]->error.text);
            memset(output, 0, sizeof *output);
        }
        dtrain__pipeline_write_shape(words, output);
        output->data = NULL;
    }
}

/* Passes shapes through the stages, on the way that data will take. */
static dtrain_status dtrain__pipeline_pass_shapes(dtrain_pipeline *pipeline, const dtrain_tensor *inputs)
{
    size_t words = (size_t)pipeline->micro_batches * DTRAIN__PIPELINE_WORDS;
    int last = pipeline->rank == pipeline->ranks - 1;
    dtrain_status status = DTRAIN_OK;
    for (int c = 0; status == DTRAIN_OK && c < pipeline->chunks; c++) {
        if (c == 0 && pipeline->rank == 0)
            dtrain__pipeline_first_shapes(pipeline, inputs);
        else if (pipeline->ranks > 1)
            status = dtrain_recv(pipeline->group, pipeline->shapes, words, DTRAIN_U64, pipeline->before);
        if (status == DTRAIN_OK)
            dtrain__pipeline_stage_shapes(pipeline, c);
        if (status == DTRAIN_OK && pipeline->ranks > 1 && !(last && c == pipeline->chunks - 1))
            status = dtrain_send(pipeline->group, pipeline->shapes, words, DTRAIN_U64, pipeline->after);
    }
    return status;
}

/* Allocates the slots, each as large as the largest tensor that travels. */
static void dtrain__pipeline_take_memory(dtrain_pipeline *pipeline)
{
    size_t largest = 0, need, line = DTRAIN__CACHE_LINE;
    for (int c = 0; c < pipeline->chunks; c++)
        for (int i = 0; i < pipeline->micro_batches; i++) {
            const dtrain__pipeline_cell *cell = dtrain__pipeline_at(pipeline, c, i);
            int first = c == 0 && pipeline->rank == 0;
            int last = c == pipeline->chunks - 1 && pipeline->rank == pipeline->ranks - 1;
            if (!first && cell->input.bytes > largest)
                largest = cell->input.bytes;
            if (!last && cell->output.bytes > largest)
                largest = cell->output.bytes;
        }
    int fits = dtrain__add_size(largest, line - 1, &need);
    pipeline->slot_bytes = need / line * line;
    fits = fits && dtrain__mul_size(pipeline->slot_bytes, (size_t)pipeline->slots + 1, &need);
    void *room = fits ? dtrain__memory_room(pipeline->allocator, pipeline->memory, need) : NULL;
    if (room == NULL) {
        dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for what travels between stages: %d times %zu bytes",
                     pipeline->slots + 1, pipeline->slot_bytes);
        dtrain__pipeline_note_down(pipeline, DTRAIN_ERR_MEMORY, dtrain_last_error());
        return;
    }
    pipeline->memory = (unsigned char *)room;
    memset(pipeline->memory + (size_t)pipeline->slots * pipeline->slot_bytes, 0, pipeline->slot_bytes);
}

static const dtrain__alike_field dtrain__pipeline_fields[] = {
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, schedule, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, ranks, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, micro_batches, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, chunks, NUMBER),
    /* times and shares only say how a plan is timed; they do not change its tasks */
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, forward, OWN),
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, backward_input, OWN),
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, backward_weights, OWN),
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, transfer, OWN),
    DTRAIN__ALIKE_FIELD(dtrain_pipeline_plan_desc, shares, OWN)};

static int dtrain__pipeline_line(const void *desc, size_t index, dtrain__alike_line *line)
{
    return index < sizeof dtrain__pipeline_fields / sizeof dtrain__pipeline_fields[0] &&
           dtrain__alike_field_line(line, "the plan's ", &dtrain__pipeline_fields[index], desc);
}

DTRAIN_API dtrain_status dtrain_pipeline_agree(dtrain_pipeline *pipeline, const dtrain_tensor *inputs)
{
    dtrain_status status = dtrain__pipeline_enter(pipeline, "dtrain_pipeline_agree");
    if (status != DTRAIN_OK)
        return status;
    pipeline->agreed = 0;
    dtrain__alike alike = {
        pipeline->call, &pipeline->plan->desc, dtrain__pipeline_line, "give all the same", 0, {0}, 0};
    status = dtrain__alike_meet(pipeline->group, &alike, DTRAIN_OK);
    if (alike.unheard || (status != DTRAIN_OK && status != DTRAIN_ERR_MISMATCH))
        return dtrain__pipeline_break(pipeline, status);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__pipeline_pass_shapes(pipeline, inputs);
    if (status != DTRAIN_OK)
        return dtrain__pipeline_break(pipeline, status);
    if (pipeline->note.status == DTRAIN_OK)
        dtrain__pipeline_take_memory(pipeline);
    status = dtrain__pipeline_verdict(pipeline, 0);
    pipeline->agreed = status == DTRAIN_OK;
    return status;
}

#endif
