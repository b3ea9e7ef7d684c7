/* ---- >>module-memory ----
 * The memory of micro-batches in flight. A place holds the input, the output of each layer, and what each layer saves.
 * The place for DTRAIN_EVALUATE has room for two outputs, which layers use in turn.
 *
 * All places share one block for gradients of activations, because a backward pass ends before the next begins. Layers
 * use its two halves in turn. If a backward pass comes in halves, the place also keeps the gradients that the second
 * half reads, and what layers without a second half have added. */
#ifndef DTRAIN__MODULE_MEMORY
#define DTRAIN__MODULE_MEMORY
#include "module.c"

/* The pass: forward; backward as a whole; or one half of it. */
enum { DTRAIN__MODULE_AHEAD, DTRAIN__MODULE_BACK, DTRAIN__MODULE_INPUTS, DTRAIN__MODULE_WEIGHTS };

/* One pass over the layers. */
typedef struct dtrain__module_run {
    dtrain_fsdp *fsdp;
    dtrain_module *module;
    dtrain__module_place *place;
    const char *call;
    int pass;
    dtrain_layer_context context;
} dtrain__module_run;

/* Adds bytes, rounded up to whole cache lines. Returns 0 on an overflow. */
static int dtrain__module_add(size_t *total, size_t bytes)
{
    size_t rounded;
    return dtrain__add_size(bytes, DTRAIN__CACHE_LINE - 1, &rounded) &&
           dtrain__add_size(*total, rounded / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE, total);
}

/* Returns the next bytes of a block; without a block it only counts them. *fits becomes 0 on an overflow. */
static unsigned char *dtrain__module_next(unsigned char *block, size_t *at, size_t bytes, int *fits)
{
    unsigned char *next = block != NULL ? block + *at : NULL;
    *fits = dtrain__module_add(at, bytes) && *fits;
    return next;
}

/* Makes a block at least as long as needed. A block that grows loses its contents. A block that cannot grow keeps them,
 * because other places may use them. */
static int dtrain__module_room(dtrain_module *module, unsigned char **block, size_t need)
{
    void *more = dtrain__memory_room(module->allocator, *block, need);
    *block = more != NULL ? (unsigned char *)more : *block;
    return more != NULL;
}

/* This rank skips callbacks from here on. If a step follows, it fails on all ranks; if not, the call returns the error.
 */
static void dtrain__module_give_up(dtrain__module_run *run, dtrain_status status, const char *why)
{
    int steps = run->fsdp != NULL && run->context.micro_batch != DTRAIN_EVALUATE;
    run->place->failed = status;
    if (run->fsdp != NULL)
        dtrain__fail(&run->module->error, status, "%s on rank %d: %s%s", run->call, dtrain__fsdp_rank(run->fsdp), why,
                     steps ? ": the step will be dropped on all ranks" : "");
    else
        dtrain__fail(&run->module->error, status, "%s: %s", run->call, why);
    if (steps)
        dtrain__fsdp_fail(run->fsdp, why);
}

/* Handles what a layer's callback returned. */
static void dtrain__module_returned(dtrain__module_run *run, int index, const char *what, dtrain_status status)
{
    char why[256];
    if (status == DTRAIN_OK)
        return;
    int lost = status == DTRAIN_ERR_PEER_LOST && dtrain__thread_error.status == status; /* in the callback's group */
    snprintf(why, sizeof why, "layer %.32s: %s returned %s (%d)%s%.120s", run->module->layers[index].desc.name, what,
             dtrain_status_name(status), (int)status, lost ? ": " : "", lost ? dtrain__thread_error.text : "");
    dtrain__module_give_up(run, status, why);
}

/* Calls one of a layer's callbacks; `what` is its name in error texts. */
static void dtrain__module_call(dtrain__module_run *run, int index, const char *what, dtrain_layer_fn callback,
                                const dtrain_layer_context *context)
{
    const dtrain__module_layer *layer = &run->module->layers[index];
    dtrain__module_returned(run, index, what, callback(layer->desc.user, context));
}

/* Asks each layer for the shape of its output. */
static void dtrain__module_shapes(dtrain__module_run *run)
{
    dtrain__module_place *place = run->place;
    for (int i = 0; place->failed == DTRAIN_OK && i < run->module->layer_count; i++) {
        const dtrain_layer *layer = &run->module->layers[i].desc;
        dtrain_tensor input = place->values[i].tensor, output = input;
        dtrain_status status = DTRAIN_OK;
        place->values[i].saved_bytes = 0;
        input.data = output.data = NULL;
        if (layer->shape != NULL)
            status = layer->shape(layer->user, &input, &output, &place->values[i].saved_bytes);
        dtrain__module_returned(run, i, "shape", status);
        if (status == DTRAIN_OK)
            status = dtrain__tensor_shape(&place->values[i + 1].tensor, output.dtype, output.ndim, output.shape);
        if (place->failed == DTRAIN_OK)
            dtrain__module_returned(run, i, "shape, which described no valid tensor,", status);
    }
}

/* Sets the addresses of values, and of what layers save, in the block, and counts its bytes. With block NULL it only
 * counts. *again: the most that a recomputing layer saves. Returns 0 on an overflow. */
static int dtrain__module_lay_out(dtrain__module_run *run, unsigned char *block, size_t *bytes, size_t *again)
{
    const dtrain_module *module = run->module;
    dtrain__module_place *place = run->place;
    int turns = run->context.micro_batch == DTRAIN_EVALUATE;
    size_t at = 0, most = 0;
    for (int i = 1; i <= module->layer_count; i++)
        most = place->values[i].tensor.bytes > most ? place->values[i].tensor.bytes : most;
    place->half = *bytes = *again = 0;
    int fits = dtrain__module_add(&place->half, most) && place->half <= SIZE_MAX / 2;
    for (int i = 0; i <= module->layer_count; i++) {
        dtrain__module_value *value = &place->values[i];
        int keeps = i < module->layer_count && !module->layers[i].desc.recompute;
        if (turns)
            at = (size_t)(i & 1) * place->half;
        value->tensor.data = dtrain__module_next(block, &at, turns && i == 0 ? 0 : value->tensor.bytes, &fits);
        if (turns)
            at = 2 * place->half;
        value->saved = dtrain__module_next(block, &at, turns || keeps ? value->saved_bytes : 0, &fits);
        if (!keeps && value->saved_bytes > *again)
            *again = value->saved_bytes;
        *bytes = at > *bytes ? at : *bytes;
        value->gradient = NULL;
    }
    return fits;
}

/* Prepares a place for an input: shapes, memory, and a copy of the input. */
static void dtrain__module_prepare(dtrain__module_run *run, const dtrain_tensor *input)
{
    dtrain_module *module = run->module;
    dtrain__module_place *place = run->place;
    int evaluates = run->context.micro_batch == DTRAIN_EVALUATE;
    size_t need, again;
    place->failed = DTRAIN_OK;
    place->sized = 0;
    place->state = DTRAIN__MODULE_FREE;
    place->batch = run->context.batch;
    place->values[0].tensor = *input;
    dtrain__module_shapes(run);
    if (place->failed != DTRAIN_OK)
        return;
    if (!dtrain__module_lay_out(run, NULL, &need, &again) || !dtrain__module_room(module, &place->block, need) ||
        (!evaluates && !dtrain__module_room(module, &module->gradients, 2 * place->half)) ||
        (!evaluates && again > 0 && !dtrain__module_room(module, &module->again, again))) {
        dtrain__module_give_up(run, DTRAIN_ERR_MEMORY, "no memory for activations");
        return;
    }
    dtrain__module_lay_out(run, place->block, &need, &again);
    if (evaluates)
        place->values[0].tensor.data = input->data;
    else if (input->bytes > 0)
        memcpy(place->values[0].tensor.data, input->data, input->bytes);
    place->sized = 1;
}

/* Sets the addresses of what is kept between the halves of a backward pass in the block, and counts its bytes. With
 * block NULL it only counts. Returns 0 on an overflow. Both halves call it and get the same addresses. */
static int dtrain__module_lay_out_kept(dtrain__module_run *run, unsigned char *block, size_t *bytes)
{
    dtrain_module *module = run->module;
    dtrain__module_value *values = run->place->values;
    float **added = module->addresses + 2 * module->use_count;
    int fits = 1;
    *bytes = 0;
    for (int i = 0; i < module->layer_count; i++)
        values[i + 1].gradient =
            module->layers[i].defers ? dtrain__module_next(block, bytes, values[i + 1].tensor.bytes, &fits) : NULL;
    if (!run->place->seeded)
        values[module->layer_count].gradient = NULL;
    for (size_t i = 0; i < module->use_count; i++) {
        const dtrain__module_use *use = &module->uses[i];
        added[i] = use->twin < i ? added[use->twin] : NULL;
        if (run->fsdp != NULL && use->twin == i && !module->layers[use->layer].defers &&
            !module->table[use->param].frozen)
            added[i] = (float *)(void *)dtrain__module_next(block, bytes, use->count * sizeof(float), &fits);
    }
    return fits;
}

/* Allocates what is kept between the halves, and clears the gradients of weights in it. */
static void dtrain__module_keep_halves(dtrain__module_run *run)
{
    dtrain__module_place *place = run->place;
    size_t need;
    if (!dtrain__module_lay_out_kept(run, NULL, &need) || !dtrain__module_room(run->module, &place->kept, need)) {
        dtrain__module_give_up(run, DTRAIN_ERR_MEMORY, "no memory for what is kept until backward_weights");
        return;
    }
    dtrain__module_lay_out_kept(run, place->kept, &need);
    for (size_t i = 0; i < run->module->use_count; i++) {
        float *added = run->module->addresses[2 * run->module->use_count + i];
        if (added != NULL && run->module->uses[i].twin == i)
            memset(added, 0, run->module->uses[i].count * sizeof(float));
    }
}

/* Adds what a layer computed in the first half to the gradients of its parameters. */
static void dtrain__module_add_kept(const dtrain__module_run *run, int index)
{
    const dtrain_module *module = run->module;
    const dtrain__module_layer *layer = &module->layers[index];
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t k = 0; k < layer->desc.param_count; k++) {
        size_t use = layer->first_use + k;
        float *sum = module->addresses[module->use_count + use],
              *added = module->addresses[2 * module->use_count + use];
        if (module->uses[use].twin == use && added != NULL && sum != NULL)
            dtrain__fold_sum_f32(sum, added, module->uses[use].count);
    }
    dtrain__fpmode_restore(mode);
}

#endif
