/* ---- >>module-run ----
 * The passes over a module's layers. Parameters are gathered, released and reduced by the public calls of >>fsdp.
 *
 * A rank on which something fails must not keep others waiting. It skips callbacks from then on, but still takes part
 * in gathers and reductions. */
#ifndef DTRAIN__MODULE_RUN
#define DTRAIN__MODULE_RUN
#include "module_memory.c"
#include "../shard/fsdp_create.c"

/* Whether this pass adds to the gradients that FSDP reduces. The first of two halves keeps gradients apart. */
static int dtrain__module_adds(const dtrain__module_run *run)
{
    return run->pass == DTRAIN__MODULE_BACK || run->pass == DTRAIN__MODULE_WEIGHTS;
}

/* Looks up the addresses of parameters in each pass, because the program may use another FSDP object this time. */
static dtrain_status dtrain__module_bind(dtrain__module_run *run)
{
    dtrain_module *module = run->module;
    const dtrain_param *table = run->fsdp != NULL ? run->fsdp->layout.table : module->table;
    int fits = run->fsdp == NULL || run->fsdp->layout.table_count == module->table_count;
    for (size_t i = 0; i < module->use_count; i++) {
        const dtrain__module_use *use = &module->uses[i];
        const dtrain_param *mine = &module->table[use->param], *param = fits ? &table[use->param] : mine;
        if (!fits || strcmp(mine->name, param->name) != 0 || mine->unit != param->unit ||
            mine->stacked != param->stacked || dtrain_param_elements(mine) != dtrain_param_elements(param))
            return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                                "%s: fsdp was made from another table than the module (see parameter %s): give both "
                                "the same",
                                run->call, mine->name);
        if (param->data == NULL)
            return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                                "%s: parameter %s has no memory: give an fsdp, or set data in the module's table",
                                run->call, mine->name);
        if (dtrain__module_adds(run) && run->fsdp == NULL &&
            dtrain__params_check_grads(param, 1, run->call) != DTRAIN_OK) {
            module->error = dtrain__thread_error;
            return module->error.status;
        }
        module->addresses[i] = (float *)param->data + use->offset;
        module->addresses[module->use_count + i] =
            param->frozen || param->grad == NULL ? NULL : (float *)param->grad + use->offset;
    }
    return DTRAIN_OK;
}

/* Begins a pass. */
static dtrain_status dtrain__module_enter(dtrain__module_run *run, int pass, dtrain_fsdp *fsdp, dtrain_module *module,
                                          int micro_batch)
{
    static const char *const calls[] = {"dtrain_fsdp_forward", "dtrain_fsdp_backward", "backward_input",
                                        "backward_weights"};
    const char *call = calls[pass];
    int lowest = pass != DTRAIN__MODULE_AHEAD ? 0 : DTRAIN_EVALUATE;
    memset(run, 0, sizeof *run);
    if (module == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: module is NULL: create it first", call);
    if (micro_batch < lowest || micro_batch >= module->place_count - 1)
        return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                            "%s: micro_batch is %d, expected 0 to %d%s: for more in flight raise micro_batches in the "
                            "module's desc",
                            call, micro_batch, module->place_count - 2, lowest < 0 ? ", or DTRAIN_EVALUATE" : "");
    run->call = call;
    run->pass = pass;
    run->fsdp = fsdp;
    run->module = module;
    run->place = &module->places[micro_batch >= 0 ? micro_batch : module->place_count - 1];
    run->context.micro_batch = micro_batch;
    return dtrain__module_bind(run);
}

/* Makes a layer's parameters readable, and fills in its context. */
static dtrain_status dtrain__module_open(dtrain__module_run *run, int index)
{
    dtrain_module *module = run->module;
    const dtrain__module_layer *layer = &module->layers[index];
    dtrain_status status = DTRAIN_OK;
    for (size_t k = 0; run->fsdp != NULL && status == DTRAIN_OK && k < layer->desc.param_count; k++)
        if (module->uses[layer->first_use + k].unit != layer->unit)
            status = dtrain__fsdp_attend(run->fsdp, module->uses[layer->first_use + k].unit, dtrain__module_adds(run));
    if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 &&
        index == (run->pass != DTRAIN__MODULE_AHEAD ? layer->last : layer->first))
        status = dtrain_fsdp_gather(run->fsdp, layer->unit);
    if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 && dtrain__module_adds(run))
        dtrain__fsdp_page_grads(run->fsdp, layer->unit, 1); /* FSDP may have taken the gather for a forward pass's */
    run->context.layer = index;
    run->context.params = module->addresses + layer->first_use;
    run->context.grads = module->addresses + module->use_count + layer->first_use;
    if (run->fsdp != NULL && run->pass == DTRAIN__MODULE_INPUTS)
        run->context.grads += module->use_count;
    run->context.input = run->place->values[index].tensor;
    run->context.output = run->place->values[index + 1].tensor;
    run->context.saved = run->place->values[index].saved;
    if (layer->desc.recompute && run->context.micro_batch != DTRAIN_EVALUATE)
        run->context.saved = module->again;
    return status;
}

/* Whether the pass goes on. Without FSDP it ends at the first failing callback. */
static int dtrain__module_goes_on(const dtrain__module_run *run, dtrain_status status)
{
    return status == DTRAIN_OK && (run->fsdp != NULL || run->place->failed == DTRAIN_OK);
}

/* Ends a public call with the error of FSDP, or with that of a callback if no step follows that would report it. */
static dtrain_status dtrain__module_leave(dtrain__module_run *run, dtrain_status status)
{
    if (status != DTRAIN_OK)
        run->module->error = dtrain__thread_error;
    else if (run->place->failed != DTRAIN_OK && (run->fsdp == NULL || run->context.micro_batch == DTRAIN_EVALUATE))
        return dtrain__report(&run->module->error);
    return status;
}

/* Runs all layers forward in a prepared place. */
static dtrain_status dtrain__module_ahead(dtrain__module_run *run)
{
    dtrain_module *module = run->module;
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; dtrain__module_goes_on(run, status) && i < module->layer_count; i++) {
        const dtrain__module_layer *layer = &module->layers[i];
        status = dtrain__module_open(run, i);
        if (status == DTRAIN_OK && run->place->failed == DTRAIN_OK)
            dtrain__module_call(run, i, "forward", layer->desc.forward, &run->context);
        if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 && i == layer->last)
            status = dtrain_fsdp_release(run->fsdp, layer->unit);
    }
    if (run->context.micro_batch >= 0 && dtrain__module_goes_on(run, status))
        run->place->state = DTRAIN__MODULE_FORWARD;
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_forward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                             const dtrain_tensor *input, void *batch, dtrain_tensor *output)
{
    dtrain__module_run run;
    dtrain_tensor checked;
    dtrain_status status = dtrain__module_enter(&run, DTRAIN__MODULE_AHEAD, fsdp, module, micro_batch);
    if (status != DTRAIN_OK)
        return status;
    if (input == NULL || output == NULL ||
        dtrain_tensor_view(&checked, input->dtype, input->ndim, input->shape, input->data) != DTRAIN_OK)
        return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_forward: expected a tensor with data as input, and room for output's view: %s",
                            input == NULL    ? "input is NULL"
                            : output == NULL ? "output is NULL"
                                             : dtrain_last_error());
    run.context.batch = batch;
    dtrain__module_prepare(&run, &checked);
    status = dtrain__module_ahead(&run);
    memset(output, 0, sizeof *output);
    if (run.place->sized)
        *output = run.place->values[module->layer_count].tensor;
    if (run.place->failed != DTRAIN_OK && output->bytes > 0)
        memset(output->data, 0, output->bytes);
    return dtrain__module_leave(&run, status);
}

/* Takes part in the gathers of a micro-batch for which this rank has no input. Its backward then takes part in gathers
 * and reductions likewise. */
static dtrain_status dtrain__module_forward_blank(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch)
{
    dtrain__module_run run;
    dtrain_status status = dtrain__module_enter(&run, DTRAIN__MODULE_AHEAD, fsdp, module, micro_batch);
    if (status != DTRAIN_OK)
        return status;
    run.place->sized = 0;
    run.place->state = DTRAIN__MODULE_FREE;
    run.place->failed = DTRAIN_ERR_ABORTED;
    status = dtrain__module_ahead(&run);
    if (status != DTRAIN_OK)
        module->error = dtrain__thread_error;
    return status;
}

/* Computes the shape of a module's output for an input, by the shape callbacks. */
static dtrain_status dtrain__module_shape_of(dtrain_module *module, const dtrain_tensor *input, dtrain_tensor *output)
{
    dtrain__module_run run;
    memset(&run, 0, sizeof run);
    run.call = "dtrain_pipeline_agree";
    run.module = module;
    run.context.micro_batch = DTRAIN_EVALUATE;
    run.place = &module->places[module->place_count - 1];
    run.place->failed = DTRAIN_OK;
    run.place->sized = 0;
    run.place->values[0].tensor = *input;
    dtrain__module_shapes(&run);
    *output = run.place->values[module->layer_count].tensor;
    return run.place->failed == DTRAIN_OK ? DTRAIN_OK : dtrain__report(&module->error);
}

/* ---- backward ---- */

static int dtrain__module_alike(const dtrain_tensor *a, const dtrain_tensor *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim && memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

/* Checks that a gradient from the caller has the dtype and shape of its value. */
static dtrain_status dtrain__module_check_gradient(dtrain__module_run *run, const char *name,
                                                   const dtrain_tensor *gradient, const dtrain_tensor *value)
{
    dtrain_tensor checked;
    if (gradient == NULL || !run->place->sized)
        return DTRAIN_OK;
    dtrain_status status =
        dtrain_tensor_view(&checked, gradient->dtype, gradient->ndim, gradient->shape, gradient->data);
    if (status == DTRAIN_OK && dtrain__module_alike(&checked, value))
        return DTRAIN_OK;
    return dtrain__fail(&run->module->error, DTRAIN_ERR_INVALID,
                        "%s: %s is %s%s, expected %s as the forward pass had it", run->call, name,
                        dtrain__tensor_text(gradient).text, gradient->data == NULL ? " without data" : "",
                        dtrain__tensor_text(value).text);
}

static dtrain_status dtrain__module_check_backward(dtrain__module_run *run, const dtrain_tensor *d_output,
                                                   const dtrain_tensor *d_input)
{
    const dtrain__module_value *values = run->place->values;
    int half = run->pass == DTRAIN__MODULE_WEIGHTS;
    if (run->place->state != (half ? DTRAIN__MODULE_HALF : DTRAIN__MODULE_FORWARD))
        return dtrain__fail(&run->module->error, DTRAIN_ERR_INVALID,
                            "%s: micro_batch %d has had no %s since its last backward: run %s in this place first",
                            run->call, run->context.micro_batch, half ? "backward_input" : "forward",
                            half ? "backward_input" : "dtrain_fsdp_forward");
    dtrain_status status =
        dtrain__module_check_gradient(run, "d_output", d_output, &values[run->module->layer_count].tensor);
    if (status == DTRAIN_OK)
        status = dtrain__module_check_gradient(run, "d_input", d_input, &values[0].tensor);
    for (int i = 0; status == DTRAIN_OK && run->fsdp != NULL && i < run->module->layer_count; i++) {
        int unit = run->module->layers[i].unit;
        if (run->pass == DTRAIN__MODULE_INPUTS)
            status = dtrain__fsdp_check_open(run->fsdp, run->call);
        else if (unit >= 0)
            status = dtrain__fsdp_check_missing(run->fsdp, unit, run->call);
        if (status != DTRAIN_OK)
            run->module->error = dtrain__thread_error;
    }
    return status;
}

/* Sets the addresses of d_output and d_input of a layer. Values with odd and even numbers have their gradients in the
 * two halves of one block. */
static void dtrain__module_aim(dtrain__module_run *run, int index, const dtrain_tensor *d_output,
                               const dtrain_tensor *d_input)
{
    dtrain_module *module = run->module;
    const dtrain__module_value *values = run->place->values;
    dtrain_layer_context *context = &run->context;
    int halves = run->pass != DTRAIN__MODULE_BACK, last = index == module->layer_count - 1;
    context->d_output = context->output;
    context->d_output.data = module->gradients + (size_t)((index + 1) & 1) * run->place->half;
    if (last)
        context->d_output.data = d_output != NULL ? d_output->data : NULL;
    if (halves && values[index + 1].gradient != NULL) {
        if (last && run->pass == DTRAIN__MODULE_INPUTS && context->output.bytes > 0)
            memcpy(values[index + 1].gradient, d_output->data, context->output.bytes);
        context->d_output.data = values[index + 1].gradient;
    }
    context->d_input = context->input;
    context->d_input.data = module->gradients + (size_t)(index & 1) * run->place->half;
    if (halves && index > 0 && values[index].gradient != NULL)
        context->d_input.data = values[index].gradient;
    if (index == 0)
        context->d_input.data = d_input != NULL ? d_input->data : NULL;
    if (run->pass == DTRAIN__MODULE_WEIGHTS)
        context->d_input.data = NULL;
}

/* Runs a layer forward again for what it saves. Its output goes where the gradient of its input will be: that room is
 * still free. */
static void dtrain__module_again(dtrain__module_run *run, int index)
{
    const dtrain_layer *layer = &run->module->layers[index].desc;
    dtrain_layer_context context = run->context;
    context.output.data = run->module->gradients + (size_t)(index & 1) * run->place->half;
    context.grads = NULL;
    context.d_output.data = context.d_input.data = NULL;
    dtrain__module_call(run, index, "forward", layer->forward, &context);
}

/* Calls those callbacks of a layer that belong to this pass. */
static void dtrain__module_back(dtrain__module_run *run, int index, const dtrain_tensor *d_output,
                                const dtrain_tensor *d_input)
{
    const dtrain__module_layer *layer = &run->module->layers[index];
    const dtrain_layer *desc = &layer->desc;
    dtrain_layer_context *context = &run->context;
    dtrain__module_aim(run, index, d_output, d_input);
    int inputs =
        run->pass != DTRAIN__MODULE_WEIGHTS && (context->d_input.data != NULL || desc->backward_weights == NULL);
    int weights = desc->backward_weights != NULL &&
                  (run->pass == DTRAIN__MODULE_BACK || layer->defers == (run->pass == DTRAIN__MODULE_WEIGHTS));
    if (desc->recompute && (inputs || weights))
        dtrain__module_again(run, index);
    if (inputs && run->place->failed == DTRAIN_OK)
        dtrain__module_call(run, index, "backward", desc->backward, context);
    if (weights && run->place->failed == DTRAIN_OK)
        dtrain__module_call(run, index, "backward_weights", desc->backward_weights, context);
    if (run->pass == DTRAIN__MODULE_WEIGHTS && run->fsdp != NULL && !layer->defers)
        dtrain__module_add_kept(run, index);
}

/* Runs a backward pass, or one half of it. The first half, INPUTS, computes gradients of inputs, for which other ranks
 * wait. The second half, WEIGHTS, does the rest at any later time; other micro-batches may come between. Both halves
 * together have the bits of a whole pass. Micro-batches are added up in the order of their second halves, which may be
 * another than that of their first halves.
 *
 * Layers without backward_weights do all in the first half, and so do layers that share a parameter with one of them.
 * With FSDP, what these add to gradients is kept for the micro-batch until its second half. For each other layer the
 * place keeps the gradient of its output until then. d_output is read until the call returns. Sharded units are
 * gathered once for each half. */
static dtrain_status dtrain__module_backward(int pass, dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                             const dtrain_tensor *d_output, const dtrain_tensor *d_input)
{
    dtrain__module_run made, *run = &made;
    size_t kept;
    dtrain_status status = dtrain__module_enter(run, pass, fsdp, module, micro_batch);
    if (status == DTRAIN_OK)
        status = dtrain__module_check_backward(run, d_output, d_input);
    if (status != DTRAIN_OK)
        return status;
    dtrain__module_place *place = run->place;
    place->state = DTRAIN__MODULE_FREE;
    run->context.batch = place->batch;
    if (run->pass == DTRAIN__MODULE_INPUTS) {
        place->seeded = d_output != NULL;
        if (place->failed == DTRAIN_OK)
            dtrain__module_keep_halves(run);
    } else if (run->pass == DTRAIN__MODULE_WEIGHTS && place->failed == DTRAIN_OK) {
        dtrain__module_lay_out_kept(run, place->kept, &kept);
    }
    for (int i = module->layer_count - 1; dtrain__module_goes_on(run, status) && i >= 0; i--) {
        const dtrain__module_layer *layer = &module->layers[i];
        status = dtrain__module_open(run, i);
        if (status == DTRAIN_OK && place->failed == DTRAIN_OK)
            dtrain__module_back(run, i, d_output, d_input);
        if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 && i == layer->first)
            status = run->pass == DTRAIN__MODULE_INPUTS ? dtrain__fsdp_put_off(run->fsdp, layer->unit)
                                                        : dtrain_fsdp_reduce(run->fsdp, layer->unit);
    }
    if (run->pass == DTRAIN__MODULE_INPUTS && dtrain__module_goes_on(run, status))
        place->state = DTRAIN__MODULE_HALF;
    return dtrain__module_leave(run, status);
}

DTRAIN_API dtrain_status dtrain_fsdp_backward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                              const dtrain_tensor *d_output, const dtrain_tensor *d_input)
{
    return dtrain__module_backward(DTRAIN__MODULE_BACK, fsdp, module, micro_batch, d_output, d_input);
}

#endif
