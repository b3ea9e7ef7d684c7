/* ---- >>pipeline-run ----
 * Runs a plan: the tasks of this rank in their order, with receiving started one task ahead. All messages of a step are
 * sent and received even if a callback fails, so that no other rank waits. */
#ifndef DTRAIN__PIPELINE_RUN
#define DTRAIN__PIPELINE_RUN
#include "pipeline_agree.c"

static unsigned char *dtrain__pipeline_slot(const dtrain_pipeline *pipeline, int slot)
{
    return pipeline->memory + (size_t)slot * pipeline->slot_bytes;
}

/* ---- one task ---- */

/* What a task runs with. A tensor whose data is NULL is missing. */
typedef struct dtrain__pipeline_task_run {
    const dtrain__pipeline_cell *cell;
    const dtrain_pipeline_task *task;
    dtrain__pipeline_move *move;
    dtrain_module *module;
    dtrain_fsdp *fsdp;
    dtrain_tensor in, out; /* forward: input and output of the stage; backward: gradients of its output and input */
} dtrain__pipeline_task_run;

/* Starts to receive what a task, and the task after it, will use. */
static dtrain_status dtrain__pipeline_post(dtrain_pipeline *pipeline, size_t task)
{
    while (pipeline->posted < pipeline->message_count && pipeline->messages[pipeline->posted].when <= task) {
        dtrain__pipeline_message *message = &pipeline->messages[pipeline->posted++];
        const dtrain_pipeline_task *user = &pipeline->tasks[message->task];
        const dtrain__pipeline_cell *cell = dtrain__pipeline_at(pipeline, user->chunk, user->micro_batch);
        const dtrain_tensor *shape = user->part == DTRAIN_PART_FORWARD ? &cell->input : &cell->output;
        dtrain_status status = dtrain_recv_async(pipeline->group, dtrain__pipeline_slot(pipeline, message->slot),
                                                 shape->count, shape->dtype, message->peer, &message->receiving);
        if (status != DTRAIN_OK)
            return status;
    }
    return DTRAIN_OK;
}

/* Finds the input of a forward task. If there is none, its data is NULL. */
static void dtrain__pipeline_input(dtrain_pipeline *pipeline, dtrain__pipeline_task_run *run,
                                   const dtrain_tensor *inputs)
{
    int micro = run->task->micro_batch, chunk = run->task->chunk;
    run->in = run->cell->input;
    if (run->move->in >= 0) {
        run->in.data = dtrain__pipeline_slot(pipeline, run->move->in);
    } else if (chunk > 0) {
        const dtrain_module *before = pipeline->modules[chunk - 1];
        int place = dtrain__pipeline_at(pipeline, chunk - 1, micro)->place;
        if (before->places[place].sized)
            run->in.data = before->places[place].values[before->layer_count].tensor.data;
    } else if (inputs == NULL || !dtrain__module_alike(&inputs[micro], &run->in) ||
               (inputs[micro].data == NULL && run->in.bytes > 0)) {
        dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                     "input %d is %.48s%s, agreed on was %.48s: call dtrain_pipeline_agree when shapes change", micro,
                     inputs != NULL ? dtrain__tensor_text(&inputs[micro]).text : "NULL",
                     inputs != NULL && inputs[micro].data == NULL ? " without data" : "",
                     dtrain__tensor_text(&run->in).text);
        dtrain__pipeline_note_down(pipeline, DTRAIN_ERR_INVALID, dtrain_last_error());
        run->in.dtype = (dtrain_dtype)0;
    } else {
        run->in.data = inputs[micro].data;
    }
}

/* Notes an error of a module that concerns this rank alone. Returns an error that broke FSDP. */
static dtrain_status dtrain__pipeline_judge(dtrain_pipeline *pipeline, const dtrain__pipeline_task_run *run,
                                            dtrain_status status)
{
    dtrain_status broken = dtrain__fsdp_broken(run->fsdp);
    if (broken != DTRAIN_OK)
        return broken;
    if (status == DTRAIN_OK)
        status = run->module->places[run->move->place].failed;
    if (status != DTRAIN_OK)
        dtrain__pipeline_note_down(pipeline, status, run->module->error.text);
    return DTRAIN_OK;
}

static dtrain_status dtrain__pipeline_forward(dtrain_pipeline *pipeline, dtrain__pipeline_task_run *run, void *batch)
{
    dtrain__module_place *place = &run->module->places[run->move->place];
    const dtrain_tensor *shape = &run->cell->output;
    dtrain_status status = DTRAIN_OK;
    if (run->fsdp == NULL && pipeline->note.status != DTRAIN_OK)
        place->sized = 0; /* so that no one takes the output of an earlier micro-batch for this one's */
    else if (run->in.dtype == 0 || (run->in.data == NULL && run->in.bytes > 0))
        status = dtrain__module_forward_blank(run->fsdp, run->module, run->move->place);
    else
        status = dtrain_fsdp_forward(run->fsdp, run->module, run->move->place, &run->in, batch, &run->out);
    status = dtrain__pipeline_judge(pipeline, run, status);
    if (run->out.dtype != 0 && !dtrain__module_alike(&run->out, shape)) {
        dtrain__fail(
            NULL, DTRAIN_ERR_MISMATCH,
            "micro-batch %d of chunk %d came out as %.48s, agreed on was %.48s: shape must say the same each time",
            run->task->micro_batch, run->task->chunk, dtrain__tensor_text(&run->out).text,
            dtrain__tensor_text(shape).text);
        dtrain__pipeline_note_down(pipeline, DTRAIN_ERR_MISMATCH, dtrain_last_error());
        place->sized = 0;
        run->out.data = NULL;
    }
    if (run->out.data == NULL)
        run->out.data = dtrain__pipeline_slot(pipeline, pipeline->slots);
    return status;
}

static dtrain_status dtrain__pipeline_backward(dtrain_pipeline *pipeline, dtrain__pipeline_task_run *run)
{
    const dtrain_tensor *d_output = run->move->in >= 0 ? &run->in : NULL;
    const dtrain_tensor *d_input = run->move->out >= 0 ? &run->out : NULL;
    dtrain_status status = DTRAIN_OK;
    int pass = run->task->part == DTRAIN_PART_INPUT     ? DTRAIN__MODULE_INPUTS
               : run->task->part == DTRAIN_PART_WEIGHTS ? DTRAIN__MODULE_WEIGHTS
                                                        : DTRAIN__MODULE_BACK;
    run->in = run->cell->output;
    run->out = run->cell->input;
    if (d_output != NULL)
        run->in.data = dtrain__pipeline_slot(pipeline, run->move->in);
    if (d_input != NULL)
        run->out.data = dtrain__pipeline_slot(pipeline, run->move->out);
    if (run->fsdp != NULL || pipeline->note.status == DTRAIN_OK)
        status = dtrain__module_backward(pass, run->fsdp, run->module, run->move->place, d_output, d_input);
    status = dtrain__pipeline_judge(pipeline, run, status);
    if (d_input != NULL && run->out.bytes > 0 && pipeline->note.status != DTRAIN_OK)
        memset(run->out.data, 0, run->out.bytes);
    return status;
}

static dtrain_status dtrain__pipeline_task(dtrain_pipeline *pipeline, size_t index, const dtrain_tensor *inputs,
                                           void *const *batches)
{
    dtrain__pipeline_task_run run;
    memset(&run, 0, sizeof run);
    run.task = &pipeline->tasks[index];
    run.move = &pipeline->moves[index];
    run.cell = dtrain__pipeline_at(pipeline, run.task->chunk, run.task->micro_batch);
    run.module = pipeline->modules[run.task->chunk];
    run.fsdp = pipeline->fsdps[run.task->chunk];
    int ahead = run.task->part == DTRAIN_PART_FORWARD;
    dtrain_status status = dtrain__pipeline_post(pipeline, index);
    if (status == DTRAIN_OK && run.move->message >= 0)
        status = dtrain__pipeline_wait(&pipeline->messages[run.move->message].receiving);
    if (status == DTRAIN_OK && run.move->after >= 0)
        status = dtrain__pipeline_wait(&pipeline->moves[run.move->after].sending);
    if (status != DTRAIN_OK)
        return status;
    if (ahead)
        dtrain__pipeline_input(pipeline, &run, inputs);
    int64_t begin = dtrain__os_now_ns();
    status = ahead ? dtrain__pipeline_forward(pipeline, &run, batches != NULL ? batches[run.task->micro_batch] : NULL)
                   : dtrain__pipeline_backward(pipeline, &run);
    pipeline->stats.computed_ns += dtrain__os_now_ns() - begin;
    int held = 0; /* chunks of micro-batches in this rank's modules */
    for (int c = 0; ahead && c < pipeline->chunks; c++)
        for (int i = 0; i < pipeline->modules[c]->place_count - 1; i++)
            held += pipeline->modules[c]->places[i].state != DTRAIN__MODULE_FREE;
    pipeline->stats.peak = held > pipeline->stats.peak ? held : pipeline->stats.peak;
    if (status != DTRAIN_OK || run.move->to < 0)
        return status;
    const dtrain_tensor *shape = ahead ? &run.cell->output : &run.out;
    return dtrain_send_async(pipeline->group, run.out.data, shape->count, shape->dtype, run.move->to,
                             &run.move->sending);
}

DTRAIN_API dtrain_status dtrain_pipeline_step(dtrain_pipeline *pipeline, const dtrain_tensor *inputs,
                                              void *const *batches)
{
    int64_t begin = dtrain__os_now_ns();
    dtrain_status status = dtrain__pipeline_enter(pipeline, "dtrain_pipeline_step");
    if (status != DTRAIN_OK)
        return status;
    if (!pipeline->agreed)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_pipeline_step: the shapes of micro-batches are not known on rank %d: call "
                            "dtrain_pipeline_agree first",
                            pipeline->rank);
    memset(&pipeline->stats, 0, sizeof pipeline->stats);
    pipeline->posted = 0;
    for (size_t t = 0; status == DTRAIN_OK && t < pipeline->task_count; t++)
        status = dtrain__pipeline_task(pipeline, t, inputs, batches);
    if (status == DTRAIN_OK)
        status = dtrain__pipeline_settle(pipeline);
    status = status == DTRAIN_OK ? dtrain__pipeline_verdict(pipeline, 1) : dtrain__pipeline_break(pipeline, status);
    dtrain_pipeline_stats *stats = &pipeline->stats;
    stats->step_ns = dtrain__os_now_ns() - begin;
    if (stats->step_ns > 0)
        stats->bubble = 1.0 - (double)stats->computed_ns / (double)stats->step_ns;
    return status;
}

/* ---- evaluation ---- */

/* Receives the input of a stage: first its shape, then, once this rank has said that there is memory, its data. If an
 * earlier stage failed, or there is no memory here, dtype is 0. */
static dtrain_status dtrain__pipeline_evaluate_receive(dtrain_pipeline *pipeline, dtrain_tensor *input)
{
    uint64_t words[DTRAIN__PIPELINE_WORDS], fits;
    dtrain_status status = dtrain_recv(pipeline->group, words, DTRAIN__PIPELINE_WORDS, DTRAIN_U64, pipeline->before);
    if (status != DTRAIN_OK || !dtrain__pipeline_read_shape(words, input))
        return status;
    void *room = dtrain__memory_room(pipeline->allocator, pipeline->evaluated, input->bytes);
    fits = room != NULL;
    status = dtrain_send(pipeline->group, &fits, 1, DTRAIN_U64, pipeline->before);
    if (room == NULL) {
        dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %.48s to evaluate", dtrain__tensor_text(input).text);
        dtrain__pipeline_note_down(pipeline, DTRAIN_ERR_MEMORY, dtrain_last_error());
        memset(input, 0, sizeof *input);
        return status;
    }
    input->data = pipeline->evaluated = (unsigned char *)room;
    if (status != DTRAIN_OK)
        return status;
    return dtrain_recv(pipeline->group, input->data, input->count, input->dtype, pipeline->before);
}

static dtrain_status dtrain__pipeline_evaluate_send(dtrain_pipeline *pipeline, const dtrain_tensor *output)
{
    uint64_t words[DTRAIN__PIPELINE_WORDS], room = 0;
    dtrain__pipeline_write_shape(words, output);
    dtrain_status status = dtrain_send(pipeline->group, words, DTRAIN__PIPELINE_WORDS, DTRAIN_U64, pipeline->after);
    if (status != DTRAIN_OK || output->dtype == 0)
        return status;
    status = dtrain_recv(pipeline->group, &room, 1, DTRAIN_U64, pipeline->after);
    if (status != DTRAIN_OK || !room)
        return status;
    return dtrain_send(pipeline->group, output->data, output->count, output->dtype, pipeline->after);
}

/* Runs one stage. If it fails, the dtype of output is 0. */
static dtrain_status dtrain__pipeline_evaluate_stage(dtrain_pipeline *pipeline, int chunk, const dtrain_tensor *input,
                                                     void *batch, dtrain_tensor *output)
{
    dtrain_module *module = pipeline->modules[chunk];
    dtrain_fsdp *fsdp = pipeline->fsdps[chunk];
    dtrain_status status = DTRAIN_OK;
    memset(output, 0, sizeof *output);
    if (input->dtype != 0)
        status = dtrain_fsdp_forward(fsdp, module, DTRAIN_EVALUATE, input, batch, output);
    else if (fsdp != NULL)
        status = dtrain__module_forward_blank(fsdp, module, DTRAIN_EVALUATE);
    dtrain_status broken = dtrain__fsdp_broken(fsdp);
    if (broken != DTRAIN_OK || status == DTRAIN_OK)
        return broken;
    dtrain__pipeline_note_down(pipeline, status, module->error.text);
    memset(output, 0, sizeof *output);
    return DTRAIN_OK;
}

/* Views the input of the first stage. If it cannot be read, the dtype of in is 0. */
static void dtrain__pipeline_evaluate_input(dtrain_pipeline *pipeline, const dtrain_tensor *input, dtrain_tensor *in)
{
    dtrain_status status = DTRAIN_ERR_INVALID;
    memset(in, 0, sizeof *in);
    if (input != NULL)
        status = dtrain_tensor_view(in, input->dtype, input->ndim, input->shape, input->data);
    if (status == DTRAIN_OK)
        return;
    dtrain__pipeline_note_down(
        pipeline, status, input == NULL ? "input is NULL on rank 0, expected a tensor with data" : dtrain_last_error());
    memset(in, 0, sizeof *in);
}

DTRAIN_API dtrain_status dtrain_pipeline_evaluate(dtrain_pipeline *pipeline, const dtrain_tensor *input, void *batch,
                                                  dtrain_tensor *output)
{
    dtrain_tensor in, out;
    dtrain_status status = dtrain__pipeline_enter(pipeline, "dtrain_pipeline_evaluate");
    if (output != NULL)
        memset(output, 0, sizeof *output);
    if (status != DTRAIN_OK)
        return status;
    int last = pipeline->rank == pipeline->ranks - 1;
    memset(&out, 0, sizeof out);
    for (int c = 0; status == DTRAIN_OK && c < pipeline->chunks; c++) {
        in = out;
        if (c == 0 && pipeline->rank == 0) {
            dtrain__pipeline_evaluate_input(pipeline, input, &in);
        } else if (pipeline->ranks > 1) {
            status = dtrain__pipeline_evaluate_receive(pipeline, &in);
        }
        if (status == DTRAIN_OK)
            status = dtrain__pipeline_evaluate_stage(pipeline, c, &in, batch, &out);
        if (status == DTRAIN_OK && pipeline->ranks > 1 && !(last && c == pipeline->chunks - 1))
            status = dtrain__pipeline_evaluate_send(pipeline, &out);
    }
    status = status == DTRAIN_OK ? dtrain__pipeline_verdict(pipeline, 0) : dtrain__pipeline_break(pipeline, status);
    if (status == DTRAIN_OK && last && output != NULL)
        *output = out;
    return status;
}

#endif
