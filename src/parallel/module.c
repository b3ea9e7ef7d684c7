/* ---- >>module-create ----
 * The data of a module, and its creation. Parameters are found by name, and each layer gets the unit that is gathered
 * for it. Memory of micro-batches is in >>module-memory, the passes over layers are in >>module-run. */
#ifndef DTRAIN__MODULE
#define DTRAIN__MODULE
#include "module.h"
#include "../shard/fsdp_create.c"
#include "../tensor/dtype.c"

/* A layer uses a parameter. */
typedef struct dtrain__module_use {
    size_t param, offset; /* index in the table; where the layer's part of a stacked parameter begins, in elements */
    size_t count;         /* elements of that part */
    size_t twin;          /* index of the first use of the same part */
    int unit, layer;
} dtrain__module_use;

typedef struct dtrain__module_layer {
    dtrain_layer desc; /* its params are not kept */
    size_t first_use;
    int unit;        /* gathered for it; -1: none */
    int first, last; /* layers of that unit */
    int defers;      /* if backward comes in halves, the second half computes its weights' gradients */
} dtrain__module_layer;

/* The input of a layer, and what the layer saves. */
typedef struct dtrain__module_value {
    dtrain_tensor tensor;
    size_t saved_bytes;
    void *saved;
    void *gradient; /* of the tensor, kept between the halves of a backward pass; NULL: not kept */
} dtrain__module_value;

enum { DTRAIN__MODULE_FREE, DTRAIN__MODULE_FORWARD, DTRAIN__MODULE_HALF }; /* state of a place's micro-batch */

typedef struct dtrain__module_place {
    unsigned char *block, *kept;  /* values and what layers saved; what is kept between the halves of a backward pass */
    size_t half;                  /* bytes for one gradient: half of module->gradients */
    dtrain__module_value *values; /* one a layer; the last is the output */
    void *batch;
    int sized, state;     /* sized: values have shapes and memory */
    int seeded;           /* the first half of a backward pass got a d_output */
    dtrain_status failed; /* not DTRAIN_OK: callbacks are skipped for this reason */
} dtrain__module_place;

struct dtrain_module {
    dtrain_allocator own; /* used if the caller gives none */
    dtrain_allocator *allocator;
    dtrain__module_layer *layers;
    int layer_count, place_count; /* the last place is for DTRAIN_EVALUATE */
    dtrain_param *table;
    size_t table_count, use_count, text_bytes, text_used;
    char *text; /* names */
    dtrain__module_use *uses;
    float **addresses; /* three lists, one address a use: parameters; gradients; what a first half adds to these */
    dtrain__module_place *places;
    dtrain__module_value *values; /* of all places */
    unsigned char *gradients;     /* of activations: two halves, used in turn */
    unsigned char *again;         /* what recomputing layers save */
    dtrain__error error;
};

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

/* Finds one parameter of a layer. The layers before it are resolved; `highest` is their highest unit. */
static dtrain_status dtrain__module_resolve(dtrain_module *module, int index, const char *name, int highest,
                                            dtrain__module_use *use)
{
    dtrain__module_layer *layer = &module->layers[index];
    size_t i = 0;
    while (name != NULL && i < module->table_count && strcmp(module->table[i].name, name) != 0)
        i++;
    if (name == NULL || i == module->table_count)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_module_create: layer %s lists parameter %s, which the table does not have: add it there, or "
            "correct the name",
            layer->desc.name, name != NULL ? name : "NULL");
    const dtrain_param *param = &module->table[i];
    int steps = layer->desc.unit - param->unit, layers = (int)dtrain__params_layers(param);
    use->param = i;
    use->layer = index;
    use->count = dtrain_param_elements(param) / (size_t)layers;
    use->unit = param->stacked ? layer->desc.unit : param->unit;
    if (param->stacked && (steps < 0 || steps >= layers))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: layer %s has unit %d, but its parameter %s is stacked over units "
                            "%d to %d: give it one of these",
                            layer->desc.name, layer->desc.unit, name, param->unit, param->unit + layers - 1);
    if (param->stacked)
        use->offset = use->count * (size_t)steps;
    if (use->unit == layer->desc.unit && use->unit >= highest)
        layer->unit = use->unit;
    else if (!param->tied || !dtrain__module_has_unit(module, index, use->unit))
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_module_create: layer %s of unit %d, after unit %d, uses parameter %s of unit %d: "
            "order layers by unit; if an earlier layer has unit %d, set tied for the parameter in the table",
            layer->desc.name, layer->desc.unit, highest, name, use->unit, use->unit);
    return DTRAIN_OK;
}

/* Decides which layers compute gradients of weights in the second half of a backward pass: those with backward_weights.
 * But layers that share a parameter must add to its gradient in one order, so that they defer all or none. */
static void dtrain__module_defer(dtrain_module *module)
{
    int changes = 1;
    for (int i = 0; i < module->layer_count; i++)
        module->layers[i].defers = module->layers[i].desc.backward_weights != NULL;
    for (size_t i = 0; i < module->use_count; i++) {
        dtrain__module_use *use = &module->uses[i];
        while (module->uses[use->twin].param != use->param || module->uses[use->twin].offset != use->offset)
            use->twin++;
    }
    while (changes) {
        changes = 0;
        for (size_t i = 0; i < module->use_count; i++) {
            int *mine = &module->layers[module->uses[i].layer].defers;
            int *first = &module->layers[module->uses[module->uses[i].twin].layer].defers;
            if (*mine == *first || module->table[module->uses[i].param].frozen)
                continue;
            *mine = *first = 0;
            changes = 1;
        }
    }
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
        layer->first = layer->last = i;
        for (int k = i - 1; k >= 0; k--)
            if (module->layers[k].unit == layer->unit) {
                module->layers[k].last = i;
                layer->first = k;
            }
    }
    dtrain__module_defer(module);
    return DTRAIN_OK;
}

static dtrain_status dtrain__module_check(const dtrain_layer *layers, size_t count, const dtrain_param *table,
                                          size_t table_count, int micro_batches)
{
    if (layers == NULL || count == 0 || count >= INT_MAX || micro_batches < 0 || micro_batches > 1 << 20)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: %zu layers%s, micro_batches is %d; expected at least one layer, "
                            "and micro_batches from 0 to %d",
                            count, layers == NULL ? " at NULL" : "", micro_batches, 1 << 20);
    for (size_t i = 0; i < count; i++)
        if (layers[i].name == NULL || layers[i].name[0] == 0 || layers[i].forward == NULL ||
            layers[i].backward == NULL || (layers[i].param_count > 0 && layers[i].params == NULL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "dtrain_module_create: layer %zu (%s) needs a name, forward, backward, and params if "
                                "param_count is above 0; %s is missing",
                                i, layers[i].name != NULL ? layers[i].name : "NULL",
                                layers[i].name == NULL || layers[i].name[0] == 0 ? "the name"
                                : layers[i].forward == NULL                      ? "forward"
                                : layers[i].backward == NULL                     ? "backward"
                                                                                 : "params");
    dtrain_status status = dtrain__params_check_for(table, table_count, 1);
    if (status == DTRAIN_OK)
        status = dtrain__params_on_cpu(table, table_count, "dtrain_module_create");
    for (size_t i = 0; status == DTRAIN_OK && i < table_count; i++)
        if (table[i].dtype != DTRAIN_F32)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "dtrain_module_create: parameter %s is %s, expected F32: a module has no other "
                                "parameters",
                                table[i].name, dtrain_dtype_name(table[i].dtype));
    return status;
}

/* Allocates every array; the counts are set already. */
static dtrain_status dtrain__module_allocate(dtrain_module *module)
{
    dtrain_allocator *memory = module->allocator;
    size_t layers = (size_t)module->layer_count, places = (size_t)module->place_count;
    module->layers = (dtrain__module_layer *)dtrain__alloc(memory, layers * sizeof *module->layers);
    module->table = (dtrain_param *)dtrain__alloc(memory, module->table_count * sizeof *module->table);
    module->text = (char *)dtrain__alloc(memory, module->text_bytes);
    module->uses = (dtrain__module_use *)dtrain__alloc(memory, module->use_count * sizeof *module->uses);
    module->addresses = (float **)dtrain__alloc(memory, 3 * module->use_count * sizeof *module->addresses);
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
    dtrain_allocator *memory = desc != NULL ? desc->allocator : NULL;
    int micro_batches = desc != NULL ? desc->micro_batches : 0;
    if (module == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_module_create: module is NULL: nowhere to put it");
    *module = NULL;
    dtrain_status status = dtrain__module_check(layers, count, table, table_count, micro_batches);
    if (status != DTRAIN_OK)
        return status;
    dtrain_module *made =
        (dtrain_module *)dtrain__memory_owner(memory, sizeof *made, offsetof(dtrain_module, own), &memory);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_module_create: no memory for %zu bytes", sizeof *made);
    made->allocator = memory;
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
        made->table[i].part = NULL; /* it is the caller's, and modules do not need it */
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
    dtrain_allocator *memory = module->allocator;
    for (int i = 0; module->places != NULL && i < module->place_count; i++) {
        dtrain__free(memory, module->places[i].block);
        dtrain__free(memory, module->places[i].kept);
    }
    dtrain__free(memory, module->gradients);
    dtrain__free(memory, module->again);
    dtrain__free(memory, module->layers);
    dtrain__free(memory, module->table);
    dtrain__free(memory, module->text);
    dtrain__free(memory, module->uses);
    dtrain__free(memory, module->addresses);
    dtrain__free(memory, module->places);
    dtrain__free(memory, module->values);
    dtrain__free(memory, module);
}

#endif
