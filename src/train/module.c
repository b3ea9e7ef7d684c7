/* ---- >>module-run ----
 * Makes modules and drives them. Parameters come and go by the public calls of >>fsdp; here are the memory of each
 * micro-batch in flight, and the order of calls. A place holds the input, and each layer's output and what it saved; to
 * evaluate, two outputs take turns. Gradients of activations take turns in two halves of a block that all places share:
 * a backward pass runs to its end before the next begins.
 *
 * What fails on one rank must not keep others waiting: from then on callbacks are left out, gathers and reductions are
 * not. */
#ifndef DTRAIN__MODULE
#define DTRAIN__MODULE
#include "module.h"
#include "fsdp_create.c"
#include "../tensor/tensor.c"

typedef struct dtrain__module_use {
    size_t param, offset; /* of the table; elements to the layer's part of a stacked one */
    int unit;
} dtrain__module_use;

typedef struct dtrain__module_layer {
    dtrain_layer desc; /* its params are not kept */
    size_t first_use;
    int unit;        /* that is gathered for it; -1: none */
    int first, last; /* layers of that unit */
} dtrain__module_layer;

/* A layer's input, and what the layer saves. */
typedef struct dtrain__module_value {
    dtrain_tensor tensor;
    size_t saved_bytes;
    void *saved;
} dtrain__module_value;

typedef struct dtrain__module_place {
    unsigned char *block;
    size_t bytes, half;           /* of the block; of the room for one gradient */
    dtrain__module_value *values; /* of each layer; the last is the output */
    void *batch;
    int sized, live;      /* values have shapes and memory; a forward was run, and no backward since */
    dtrain_status failed; /* why callbacks are left out */
} dtrain__module_place;

struct dtrain_module {
    dtrain_allocator own; /* used when the caller gives none */
    dtrain_allocator *allocator;
    dtrain__module_layer *layers;
    int layer_count, place_count; /* the last place is to evaluate */
    dtrain_param *table;
    size_t table_count, use_count, text_bytes, text_used, gradient_bytes;
    char *text; /* names */
    dtrain__module_use *uses;
    float **addresses; /* of parameters, then of their gradients, a use */
    dtrain__module_place *places;
    dtrain__module_value *values; /* of all places */
    unsigned char *gradients;
    dtrain__error error;
};

/* One pass over the layers. */
typedef struct dtrain__module_run {
    dtrain_fsdp *fsdp;
    dtrain_module *module;
    dtrain__module_place *place;
    const char *call;
    int backward;
    dtrain_layer_context context;
} dtrain__module_run;

/* ---- making one ---- */

static const char *dtrain__module_keep(dtrain_module *module, const char *name)
{
    size_t bytes = strlen(name) + 1;
    char *kept = module->text + module->text_used;
    memcpy(kept, name, bytes);
    module->text_used += bytes;
    return kept;
}

static int dtrain__module_has_unit(const dtrain_module *module, int layers, int unit)
{
    for (int i = 0; i < layers; i++)
        if (module->layers[i].unit == unit)
            return 1;
    return 0;
}

/* Finds one parameter of a layer. Layers before it are known; `highest` is the last unit of theirs. */
static dtrain_status dtrain__module_resolve(dtrain_module *module, int index, const char *name, int highest,
                                            dtrain__module_use *use)
{
    dtrain__module_layer *layer = &module->layers[index];
    size_t i = 0;
    while (name != NULL && i < module->table_count && strcmp(module->table[i].name, name) != 0)
        i++;
    if (name == NULL || i == module->table_count)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: layer %s lists parameter %s, which the table does not have",
                            layer->desc.name, name != NULL ? name : "NULL");
    const dtrain_param *param = &module->table[i];
    int steps = layer->desc.unit - param->unit, layers = (int)dtrain__params_layers(param);
    use->param = i;
    use->unit = param->stacked ? layer->desc.unit : param->unit;
    if (param->stacked && (steps < 0 || steps >= layers))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: layer %s has unit %d, but its parameter %s is stacked over units "
                            "%d to %d: give it one of these",
                            layer->desc.name, layer->desc.unit, name, param->unit, param->unit + layers - 1);
    if (param->stacked)
        use->offset = dtrain_param_elements(param) / (size_t)layers * (size_t)steps;
    if (use->unit == layer->desc.unit && use->unit >= highest)
        layer->unit = use->unit;
    else if (!param->tied || !dtrain__module_has_unit(module, index, use->unit))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: layer %s of unit %d, after unit %d, uses parameter %s of unit %d: "
                            "order layers by unit, or where an earlier layer has that unit too, set tied in the table",
                            layer->desc.name, layer->desc.unit, highest, name, use->unit);
    return DTRAIN_OK;
}

static dtrain_status dtrain__module_link(dtrain_module *module, const dtrain_layer *layers)
{
    size_t used = 0;
    int highest = -1;
    for (int i = 0; i < module->layer_count; i++) {
        dtrain__module_layer *layer = &module->layers[i];
        layer->desc = layers[i];
        layer->desc.name = dtrain__module_keep(module, layers[i].name);
        layer->desc.params = NULL;
        layer->first_use = used;
        layer->unit = -1;
        for (size_t k = 0; k < layers[i].param_count; k++) {
            dtrain_status status =
                dtrain__module_resolve(module, i, layers[i].params[k], highest, &module->uses[used++]);
            if (status != DTRAIN_OK)
                return status;
        }
        highest = layer->unit > highest ? layer->unit : highest;
    }
    for (int i = 0; i < module->layer_count; i++) {
        dtrain__module_layer *layer = &module->layers[i];
        layer->first = layer->last = i;
        for (int k = 0; k < module->layer_count; k++) {
            if (module->layers[k].unit == layer->unit) {
                layer->first = k < layer->first ? k : layer->first;
                layer->last = k > layer->last ? k : layer->last;
            }
        }
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__module_check(const dtrain_layer *layers, size_t count, const dtrain_param *table,
                                          size_t table_count, int micro_batches)
{
    if (layers == NULL || count == 0 || count >= INT_MAX || micro_batches < 0 || micro_batches > 1 << 20)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: %zu layers at %p, micro_batches is %d: expected at least one layer, "
                            "and 0 to %d micro-batches",
                            count, (const void *)layers, micro_batches, 1 << 20);
    for (size_t i = 0; i < count; i++)
        if (layers[i].name == NULL || layers[i].name[0] == 0 || layers[i].forward == NULL ||
            layers[i].backward == NULL || (layers[i].param_count > 0 && layers[i].params == NULL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "dtrain_module_create: layer %zu (%s) needs a name, forward, backward, and as many "
                                "params as it counts",
                                i, layers[i].name != NULL ? layers[i].name : "NULL");
    dtrain_status status = dtrain__params_check_for(table, table_count, 1);
    for (size_t i = 0; status == DTRAIN_OK && i < table_count; i++)
        if (table[i].dtype != DTRAIN_F32)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "dtrain_module_create: parameter %s is %s: list F32 parameters alone", table[i].name,
                                dtrain_dtype_name(table[i].dtype));
    return status;
}

/* Every array; sizes were counted before. */
static dtrain_status dtrain__module_allocate(dtrain_module *module)
{
    dtrain_allocator *memory = module->allocator;
    size_t layers = (size_t)module->layer_count, places = (size_t)module->place_count;
    module->layers = (dtrain__module_layer *)dtrain__alloc(memory, layers * sizeof *module->layers);
    module->table = (dtrain_param *)dtrain__alloc(memory, module->table_count * sizeof *module->table);
    module->text = (char *)dtrain__alloc(memory, module->text_bytes);
    module->uses = (dtrain__module_use *)dtrain__alloc(memory, module->use_count * sizeof *module->uses);
    module->addresses = (float **)dtrain__alloc(memory, 2 * module->use_count * sizeof *module->addresses);
    module->places = (dtrain__module_place *)dtrain__alloc(memory, places * sizeof *module->places);
    module->values = (dtrain__module_value *)dtrain__alloc(memory, places * (layers + 1) * sizeof *module->values);
    if (module->layers == NULL || module->table == NULL || module->text == NULL || module->uses == NULL ||
        module->addresses == NULL || module->places == NULL || module->values == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_module_create: no memory for %zu layers", layers);
    for (size_t i = 0; i < places; i++)
        module->places[i].values = module->values + i * (layers + 1);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_module_create(dtrain_module **module, const dtrain_layer *layers, size_t count,
                                              const dtrain_param *table, size_t table_count,
                                              const dtrain_module_desc *desc)
{
    dtrain_allocator own = {NULL, NULL, 0, 0};
    int micro_batches = desc != NULL ? desc->micro_batches : 0;
    if (module == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_module_create: module is NULL: nowhere to put it");
    *module = NULL;
    dtrain_status status = dtrain__module_check(layers, count, table, table_count, micro_batches);
    if (status != DTRAIN_OK)
        return status;
    dtrain_allocator *memory = desc != NULL && desc->allocator != NULL ? desc->allocator : &own;
    dtrain_module *made = (dtrain_module *)dtrain__alloc(memory, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_module_create: no memory for %zu bytes", sizeof *made);
    made->own = own;
    made->allocator = memory == &own ? &made->own : memory;
    made->layer_count = (int)count;
    made->place_count = (micro_batches > 0 ? micro_batches : 1) + 1;
    made->table_count = table_count;
    for (size_t i = 0; i < count; i++) {
        made->use_count += layers[i].param_count;
        made->text_bytes += strlen(layers[i].name) + 1;
    }
    for (size_t i = 0; i < table_count; i++)
        made->text_bytes += strlen(table[i].name) + 1;
    status = dtrain__module_allocate(made);
    for (size_t i = 0; status == DTRAIN_OK && i < table_count; i++) {
        made->table[i] = table[i];
        made->table[i].name = dtrain__module_keep(made, table[i].name);
        made->table[i].part = NULL; /* the caller's, and not needed */
    }
    if (status == DTRAIN_OK)
        status = dtrain__module_link(made, layers);
    if (status == DTRAIN_OK)
        *module = made;
    else
        dtrain_module_destroy(made);
    return status;
}

DTRAIN_API void dtrain_module_destroy(dtrain_module *module)
{
    if (module == NULL)
        return;
    dtrain_allocator *memory = module->allocator, last;
    size_t layers = (size_t)module->layer_count, places = (size_t)module->place_count;
    for (size_t i = 0; module->places != NULL && i < places; i++)
        dtrain__free(memory, module->places[i].block, module->places[i].bytes);
    dtrain__free(memory, module->gradients, module->gradient_bytes);
    dtrain__free(memory, module->layers, layers * sizeof *module->layers);
    dtrain__free(memory, module->table, module->table_count * sizeof *module->table);
    dtrain__free(memory, module->text, module->text_bytes);
    dtrain__free(memory, module->uses, module->use_count * sizeof *module->uses);
    dtrain__free(memory, module->addresses, 2 * module->use_count * sizeof *module->addresses);
    dtrain__free(memory, module->places, places * sizeof *module->places);
    dtrain__free(memory, module->values, places * (layers + 1) * sizeof *module->values);
    last = module->own;
    dtrain__free(memory == &module->own ? &last : memory, module, sizeof *module);
}

DTRAIN_API const char *dtrain_module_error(const dtrain_module *module)
{
    return module != NULL ? module->error.text : "";
}

/* ---- memory of a micro-batch ---- */

/* Adds bytes, rounded up to whole cache lines; 0: they overflow. */
static int dtrain__module_add(size_t *total, size_t bytes)
{
    size_t rounded;
    return dtrain__add_size(bytes, DTRAIN__CACHE_LINE - 1, &rounded) &&
           dtrain__add_size(*total, rounded / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE, total);
}

/* Sees to it that a block has as many bytes; what it holds is lost when it grows, but kept when it cannot: other places
 * may count on it. */
static int dtrain__module_room(dtrain_module *module, unsigned char **block, size_t *have, size_t need)
{
    if (*block != NULL && need <= *have)
        return 1;
    unsigned char *more = (unsigned char *)dtrain__alloc(module->allocator, need);
    if (more == NULL)
        return 0;
    dtrain__free(module->allocator, *block, *have);
    *block = more;
    *have = need;
    return 1;
}

/* This rank leaves the callbacks out from here on. Where a step follows, it ends for all; else the caller is told. */
static void dtrain__module_give_up(dtrain__module_run *run, dtrain_status status, const char *why)
{
    int steps = run->fsdp != NULL && run->context.micro_batch != DTRAIN_EVALUATE;
    run->place->failed = status;
    dtrain__fail(&run->module->error, status, "%s on rank %d: %s%s", run->call,
                 run->fsdp != NULL ? dtrain__fsdp_rank(run->fsdp) : 0, why,
                 steps ? ": the step will be dropped on all ranks" : "");
    if (steps)
        dtrain_fsdp_fail(run->fsdp, why);
}

/* A layer's callback has returned. */
static void dtrain__module_returned(dtrain__module_run *run, int index, const char *what, dtrain_status status)
{
    char why[DTRAIN__FSDP_WHY];
    if (status == DTRAIN_OK)
        return;
    snprintf(why, sizeof why, "layer %.48s: %s returned %s (%d)", run->module->layers[index].desc.name, what,
             dtrain_status_name(status), (int)status);
    dtrain__module_give_up(run, status, why);
}

/* Asks each layer for its output's shape. */
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
            dtrain__module_returned(run, i, "shape, whose output is no tensor,", status);
    }
}

/* Counts what a place needs: *need, of it *most for one value where values take turns. 0: more than memory. */
static int dtrain__module_count(dtrain__module_run *run, size_t *need, size_t *most)
{
    int layers = run->module->layer_count, evaluates = run->context.micro_batch == DTRAIN_EVALUATE, fits = 1;
    size_t largest = 0, all = 0, saved = 0;
    for (int i = 0; i <= layers; i++) {
        const dtrain__module_value *value = &run->place->values[i];
        largest = i > 0 && value->tensor.bytes > largest ? value->tensor.bytes : largest;
        saved = value->saved_bytes > saved ? value->saved_bytes : saved;
        fits = fits && dtrain__module_add(&all, value->tensor.bytes) && dtrain__module_add(&all, value->saved_bytes);
    }
    *most = 0;
    fits = fits && dtrain__module_add(most, largest) && dtrain__mul_size(*most, 2, need);
    if (!evaluates)
        *need = all;
    return fits && (!evaluates || dtrain__module_add(need, saved));
}

/* Gives values and what is saved their addresses in the block. */
static void dtrain__module_lay_out(dtrain__module_run *run, const dtrain_tensor *input, size_t most)
{
    dtrain__module_place *place = run->place;
    int evaluates = run->context.micro_batch == DTRAIN_EVALUATE;
    size_t at = 0;
    for (int i = 0; i <= run->module->layer_count; i++) {
        dtrain__module_value *value = &place->values[i];
        value->tensor.data = place->block + (evaluates ? (size_t)(i & 1) * most : at);
        dtrain__module_add(&at, value->tensor.bytes);
        value->saved = place->block + (evaluates ? 2 * most : at);
        dtrain__module_add(&at, value->saved_bytes);
    }
    if (evaluates)
        place->values[0].tensor.data = input->data;
    else if (input->bytes > 0)
        memcpy(place->values[0].tensor.data, input->data, input->bytes);
    place->half = most;
    place->sized = 1;
}

/* Makes a place ready for an input. */
static void dtrain__module_prepare(dtrain__module_run *run, const dtrain_tensor *input)
{
    dtrain_module *module = run->module;
    dtrain__module_place *place = run->place;
    int evaluates = run->context.micro_batch == DTRAIN_EVALUATE;
    size_t need, most;
    place->failed = DTRAIN_OK;
    place->sized = place->live = 0;
    place->batch = run->context.batch;
    place->values[0].tensor = *input;
    dtrain__module_shapes(run);
    if (place->failed != DTRAIN_OK)
        return;
    if (!dtrain__module_count(run, &need, &most) || !dtrain__module_room(module, &place->block, &place->bytes, need) ||
        (!evaluates && !dtrain__module_room(module, &module->gradients, &module->gradient_bytes, 2 * most)))
        dtrain__module_give_up(run, DTRAIN_ERR_MEMORY, "no memory for activations");
    else
        dtrain__module_lay_out(run, input, most);
}

/* ---- passes ---- */

/* Looks the addresses of parameters up: another object of FSDP may have come since. */
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
        module->addresses[i] = (float *)param->data + use->offset;
        module->addresses[module->use_count + i] =
            param->frozen || param->grad == NULL ? NULL : (float *)param->grad + use->offset;
    }
    return DTRAIN_OK;
}

/* Begins a public call. */
static dtrain_status dtrain__module_enter(dtrain__module_run *run, const char *call, dtrain_fsdp *fsdp,
                                          dtrain_module *module, int micro_batch)
{
    int lowest = run->backward ? 0 : DTRAIN_EVALUATE;
    if (module == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: module is NULL: create it first", call);
    if (micro_batch < lowest || micro_batch >= module->place_count - 1)
        return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                            "%s: micro_batch is %d, expected 0 to %d%s: the module's desc says how many are in flight",
                            call, micro_batch, module->place_count - 2, lowest < 0 ? ", or DTRAIN_EVALUATE" : "");
    run->call = call;
    run->fsdp = fsdp;
    run->module = module;
    run->place = &module->places[micro_batch >= 0 ? micro_batch : module->place_count - 1];
    run->context.micro_batch = micro_batch;
    return dtrain__module_bind(run);
}

/* Makes the unit of a tied parameter readable, beside those that rotate: it was gathered by an earlier layer, so that
 * nothing is on its way here in most passes, and the direction of the pass is not disturbed. */
static dtrain_status dtrain__module_attend(dtrain_fsdp *fsdp, int unit, int backward)
{
    dtrain_status status = dtrain__fsdp_advance(fsdp, unit);
    if (status == DTRAIN_OK && backward)
        dtrain__fsdp_page_grads(fsdp, unit, 1);
    if (status == DTRAIN_OK && !fsdp->layout.resident && fsdp->units[unit].state == DTRAIN__ABSENT)
        status = dtrain__fsdp_gather_start(fsdp, unit);
    if (status == DTRAIN_OK && fsdp->units[unit].state == DTRAIN__COMING)
        status = dtrain__fsdp_gather_finish(fsdp, unit);
    return status;
}

/* Makes a layer's parameters readable, and fills its context in. */
static dtrain_status dtrain__module_open(dtrain__module_run *run, int index)
{
    dtrain_module *module = run->module;
    const dtrain__module_layer *layer = &module->layers[index];
    dtrain_status status = DTRAIN_OK;
    for (size_t k = 0; run->fsdp != NULL && status == DTRAIN_OK && k < layer->desc.param_count; k++)
        if (module->uses[layer->first_use + k].unit != layer->unit)
            status = dtrain__module_attend(run->fsdp, module->uses[layer->first_use + k].unit, run->backward);
    if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 &&
        index == (run->backward ? layer->last : layer->first))
        status = dtrain_fsdp_gather(run->fsdp, layer->unit);
    if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 && run->backward)
        dtrain__fsdp_page_grads(run->fsdp, layer->unit, 1); /* FSDP may take this for another forward pass */
    run->context.layer = index;
    run->context.params = module->addresses + layer->first_use;
    run->context.grads = module->addresses + module->use_count + layer->first_use;
    run->context.input = run->place->values[index].tensor;
    run->context.output = run->place->values[index + 1].tensor;
    run->context.saved = run->place->values[index].saved;
    return status;
}

/* Whether a layer's callbacks are to be called, and the pass goes on. */
static int dtrain__module_goes_on(const dtrain__module_run *run, dtrain_status status)
{
    return status == DTRAIN_OK && (run->fsdp != NULL || run->place->failed == DTRAIN_OK);
}

/* Ends a public call: what broke FSDP, or a callback where no step follows that could tell. */
static dtrain_status dtrain__module_leave(dtrain__module_run *run, dtrain_status status)
{
    if (status != DTRAIN_OK)
        run->module->error = dtrain__thread_error;
    else if (run->place->failed != DTRAIN_OK && (run->fsdp == NULL || run->context.micro_batch == DTRAIN_EVALUATE))
        return dtrain__report(&run->module->error);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_forward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                             const dtrain_tensor *input, void *batch, dtrain_tensor *output)
{
    dtrain__module_run run;
    dtrain_tensor checked;
    memset(&run, 0, sizeof run);
    dtrain_status status = dtrain__module_enter(&run, "dtrain_fsdp_forward", fsdp, module, micro_batch);
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
    for (int i = 0; dtrain__module_goes_on(&run, status) && i < module->layer_count; i++) {
        const dtrain__module_layer *layer = &module->layers[i];
        status = dtrain__module_open(&run, i);
        if (status == DTRAIN_OK && run.place->failed == DTRAIN_OK)
            dtrain__module_returned(&run, i, "forward", layer->desc.forward(layer->desc.user, &run.context));
        if (status == DTRAIN_OK && fsdp != NULL && layer->unit >= 0 && i == layer->last)
            status = dtrain_fsdp_release(fsdp, layer->unit);
    }
    run.place->live = micro_batch >= 0 && dtrain__module_goes_on(&run, status);
    memset(output, 0, sizeof *output);
    if (run.place->sized)
        *output = run.place->values[module->layer_count].tensor;
    if (run.place->failed != DTRAIN_OK && output->bytes > 0)
        memset(output->data, 0, output->bytes);
    return dtrain__module_leave(&run, status);
}

/* Says whether a gradient that the caller gives fits the value it belongs to. */
static dtrain_status dtrain__module_check_gradient(dtrain__module_run *run, const char *name,
                                                   const dtrain_tensor *gradient, const dtrain_tensor *value)
{
    dtrain_tensor checked;
    if (gradient == NULL || !run->place->sized)
        return DTRAIN_OK;
    dtrain_status status =
        dtrain_tensor_view(&checked, gradient->dtype, gradient->ndim, gradient->shape, gradient->data);
    if (status == DTRAIN_OK && checked.dtype == value->dtype && checked.ndim == value->ndim &&
        memcmp(checked.shape, value->shape, sizeof checked.shape) == 0)
        return DTRAIN_OK;
    return dtrain__fail(&run->module->error, DTRAIN_ERR_INVALID,
                        "dtrain_fsdp_backward: %s is %s%s, expected %s as the forward pass had it", name,
                        dtrain__tensor_text(gradient).text, gradient->data == NULL ? " without data" : "",
                        dtrain__tensor_text(value).text);
}

static dtrain_status dtrain__module_check_backward(dtrain__module_run *run, const dtrain_tensor *d_output,
                                                   const dtrain_tensor *d_input)
{
    const dtrain__module_value *values = run->place->values;
    if (!run->place->live)
        return dtrain__fail(&run->module->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_backward: micro_batch %d has had no forward since its last backward: run "
                            "dtrain_fsdp_forward in this place first",
                            run->context.micro_batch);
    dtrain_status status =
        dtrain__module_check_gradient(run, "d_output", d_output, &values[run->module->layer_count].tensor);
    if (status == DTRAIN_OK)
        status = dtrain__module_check_gradient(run, "d_input", d_input, &values[0].tensor);
    for (int i = 0; status == DTRAIN_OK && run->fsdp != NULL && i < run->module->layer_count; i++) {
        int unit = run->module->layers[i].unit;
        if (unit >= 0 && run->fsdp->layout.units[unit].trained > 0)
            status = dtrain__fsdp_check_missing(run->fsdp, unit, run->call);
        if (status != DTRAIN_OK)
            run->module->error = dtrain__thread_error;
    }
    return status;
}

/* Calls a layer's backward; values of odd and even numbers have their gradients in halves of one block. */
static void dtrain__module_backward(dtrain__module_run *run, int index, const dtrain_tensor *d_output,
                                    const dtrain_tensor *d_input)
{
    dtrain_module *module = run->module;
    const dtrain_layer *layer = &module->layers[index].desc;
    dtrain_layer_context *context = &run->context;
    context->d_output = context->output;
    context->d_output.data = module->gradients + (size_t)((index + 1) & 1) * run->place->half;
    if (index == module->layer_count - 1)
        context->d_output.data = d_output != NULL ? d_output->data : NULL;
    context->d_input = context->input;
    context->d_input.data = module->gradients + (size_t)(index & 1) * run->place->half;
    if (index == 0)
        context->d_input.data = d_input != NULL ? d_input->data : NULL;
    if (context->d_input.data != NULL || layer->backward_weights == NULL)
        dtrain__module_returned(run, index, "backward", layer->backward(layer->user, context));
    if (run->place->failed == DTRAIN_OK && layer->backward_weights != NULL)
        dtrain__module_returned(run, index, "backward_weights", layer->backward_weights(layer->user, context));
}

DTRAIN_API dtrain_status dtrain_fsdp_backward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                              const dtrain_tensor *d_output, const dtrain_tensor *d_input)
{
    dtrain__module_run run;
    memset(&run, 0, sizeof run);
    run.backward = 1;
    dtrain_status status = dtrain__module_enter(&run, "dtrain_fsdp_backward", fsdp, module, micro_batch);
    if (status == DTRAIN_OK)
        status = dtrain__module_check_backward(&run, d_output, d_input);
    if (status != DTRAIN_OK)
        return status;
    run.place->live = 0;
    run.context.batch = run.place->batch;
    for (int i = module->layer_count - 1; dtrain__module_goes_on(&run, status) && i >= 0; i--) {
        const dtrain__module_layer *layer = &module->layers[i];
        status = dtrain__module_open(&run, i);
        if (status == DTRAIN_OK && run.place->failed == DTRAIN_OK)
            dtrain__module_backward(&run, i, d_output, d_input);
        if (status == DTRAIN_OK && fsdp != NULL && layer->unit >= 0 && i == layer->first)
            status = dtrain_fsdp_reduce(fsdp, layer->unit);
    }
    return dtrain__module_leave(&run, status);
}

#endif
