/* ---- >>params ----
 * The parameter table: its checks, its comparison between ranks, and its cut into ranges. A range is what one parameter
 * has in one unit: all of it, or one layer of a stacked tensor. Ranges are in order of units, and within a unit in
 * table order. */
#ifndef DTRAIN__PARAMS
#define DTRAIN__PARAMS
#include "train.h"
#include "../base/memory.c"
#include "../tensor/device.c"
#include "../comm/alike.c"

typedef struct dtrain__params_range {
    float *data;
    float *grad;
    size_t count;
    int unit, no_decay;
} dtrain__params_range;

/* The ranges of all parameters with a gradient. */
typedef struct dtrain__params {
    dtrain__params_range *ranges;
    size_t range_count;
    int units;
} dtrain__params;

/* A span that must not overlap another of its kind: bytes in memory, or unit numbers. */
typedef struct dtrain__params_span {
    uintptr_t begin, end, place; /* place: the device */
    const dtrain_param *param;
} dtrain__params_span;

/* Says whether a parameter has a gradient to reduce and to apply. */
static DTRAIN__NOINLINE int dtrain__params_trained(const dtrain_param *param)
{
    return param->grad != NULL && !param->frozen;
}

static DTRAIN__NOINLINE int dtrain__params_ndim(const dtrain_param *param)
{
    int ndim = param->ndim;
    while (param->ndim == 0 && ndim < DTRAIN_MAX_DIMS && param->shape[ndim] > 0)
        ndim++;
    return ndim;
}

/* Sets *count and *bytes; returns 0 if they overflow. */
static int dtrain__params_size(const dtrain_param *param, size_t *count, size_t *bytes)
{
    int ndim = dtrain__params_ndim(param), fits = 1;
    *count = 1;
    for (int i = 0; i < ndim && i < DTRAIN_MAX_DIMS; i++)
        fits = dtrain__mul_size(*count, param->shape[i], count) && fits;
    return dtrain__mul_size(*count, dtrain_dtype_bits(param->dtype) / 8, bytes) && fits;
}

DTRAIN_API DTRAIN__NOINLINE size_t dtrain_param_elements(const dtrain_param *param)
{
    size_t count, bytes;
    return param != NULL && dtrain__params_size(param, &count, &bytes) ? count : 0;
}

/* Returns the elements of a parameter's gradient; 0 if it has none. */
static size_t dtrain__params_gradients(const dtrain_param *param)
{
    return dtrain__params_trained(param) ? dtrain_param_elements(param) : 0;
}

static DTRAIN__NOINLINE size_t dtrain__params_layers(const dtrain_param *param)
{
    return param->stacked ? param->shape[0] : 1;
}

DTRAIN_API int dtrain_params_units(const dtrain_param *table, size_t count)
{
    size_t units = 0;
    for (size_t i = 0; table != NULL && i < count; i++) {
        size_t end = (size_t)table[i].unit + dtrain__params_layers(&table[i]);
        units = end > units ? end : units;
    }
    return units <= INT_MAX ? (int)units : 0;
}

/* Returns the dimension that a part is cut along; -1 for a stacked one whose layers are whole. */
static int dtrain__params_cut_dim(const dtrain_param *param)
{
    return param->stacked && param->part->dim == 0 ? -1 : param->part->dim;
}

static size_t dtrain__params_blocks(const dtrain_param *param)
{
    return param->part->blocks > 0 ? param->part->blocks : 1;
}

/* Returns what is wrong with the place of a part's blocks, or NULL. */
static const char *dtrain__params_bad_blocks(const dtrain_param *param)
{
    size_t blocks = dtrain__params_blocks(param), begin = param->part->begin;
    int cut = dtrain__params_cut_dim(param);
    if (cut < 0)
        return begin > 0 || blocks > 1 ? "dim is 0, which counts layers, but begin or blocks is given" : NULL;
    size_t whole = param->part->shape[cut], mine = param->shape[cut];
    if (whole % blocks != 0 || mine % blocks != 0)
        return "a cut dimension does not divide by blocks";
    if (begin > whole / blocks || mine / blocks > whole / blocks - begin)
        return "begin and its size reach beyond a block of the whole tensor";
    return NULL;
}

/* Returns what is wrong with a parameter's part, or NULL. */
static const char *dtrain__params_bad_part(const dtrain_param *param)
{
    const dtrain_param_part *part = param->part;
    int ndim = dtrain__params_ndim(param);
    size_t bytes = dtrain_dtype_bits(param->dtype) / 8;
    if (part->copies < 0 || part->copy < 0 || part->copy >= (part->copies > 0 ? part->copies : 1))
        return "copy is not from 0 to copies - 1";
    if (part->dim < 0 || part->dim >= ndim)
        return "dim is none of its dimensions";
    for (int d = 0; d < ndim; d++)
        if (!dtrain__mul_size(bytes, part->shape[d], &bytes))
            return "the whole tensor's sizes multiply to more than memory";
    if (!param->stacked && part->first_layer > 0)
        return "first_layer is given, but it is not stacked";
    if (param->stacked && (part->first_layer > part->shape[0] || param->shape[0] > part->shape[0] - part->first_layer))
        return "its layers reach beyond those of the whole tensor";
    for (int d = param->stacked != 0; d < ndim; d++)
        if (d != dtrain__params_cut_dim(param) && part->shape[d] != param->shape[d])
            return "its size differs from the whole tensor's in a dimension that is not cut";
    return dtrain__params_bad_blocks(param);
}

static dtrain_status dtrain__params_check_one(const dtrain_param *param, size_t index, int reserves)
{
    size_t count, bytes;
    const char *name = param->name;
    if (name == NULL || name[0] == '\0')
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %zu of the table has no name: give it one", index);
    unsigned bits = dtrain_dtype_bits(param->dtype);
    if (bits == 0 || bits % 8 != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: dtype %d has no whole bytes: use DTRAIN_F32", name,
                            (int)param->dtype);
    if (param->ndim < 0 || param->ndim > DTRAIN_MAX_DIMS)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: ndim is %d, expected 0 to %d", name, param->ndim,
                            DTRAIN_MAX_DIMS);
    if (dtrain__params_ndim(param) == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s has no shape: give its sizes, {1} for a scalar",
                            name);
    if (!dtrain__params_size(param, &count, &bytes))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: its sizes multiply to more than memory", name);
    if (param->unit < 0 || dtrain__params_layers(param) > (size_t)(INT_MAX - param->unit))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: unit %d and %zu layers, expected 0 to %d", name,
                            param->unit, dtrain__params_layers(param), INT_MAX);
    const char *bad = param->part != NULL ? dtrain__params_bad_part(param) : NULL;
    if (bad != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: its part: %s: see dtrain_param_cut", name, bad);
    if (param->data == NULL && bytes > 0 && !reserves)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: data is NULL, expected %zu bytes", name, bytes);
    return DTRAIN_OK;
}

static int dtrain__params_compare_spans(const void *left, const void *right)
{
    const dtrain__params_span *a = (const dtrain__params_span *)left, *b = (const dtrain__params_span *)right;
    if (a->place != b->place)
        return a->place < b->place ? -1 : 1;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

static int dtrain__params_compare_names(const void *left, const void *right)
{
    const dtrain__params_span *a = (const dtrain__params_span *)left, *b = (const dtrain__params_span *)right;
    return strcmp(a->param->name, b->param->name);
}

static dtrain_status dtrain__params_check_names(const dtrain_param *table, size_t count, dtrain__params_span *spans)
{
    for (size_t i = 0; i < count; i++)
        spans[i].param = &table[i];
    qsort(spans, count, sizeof *spans, dtrain__params_compare_names);
    for (size_t i = 1; i < count; i++) {
        if (dtrain__params_compare_names(&spans[i - 1], &spans[i]) == 0)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "two parameters are named %s: names must be unique",
                                spans[i].param->name);
    }
    return DTRAIN_OK;
}

/* Checks that units have no gaps. Each span has its parameter already. */
static dtrain_status dtrain__params_check_units(dtrain__params_span *spans, size_t count)
{
    uintptr_t covered = 0;
    for (size_t i = 0; i < count; i++) {
        spans[i].begin = (uintptr_t)spans[i].param->unit;
        spans[i].end = spans[i].begin + dtrain__params_layers(spans[i].param);
    }
    qsort(spans, count, sizeof *spans, dtrain__params_compare_spans);
    for (size_t i = 0; i < count; i++) {
        if (spans[i].begin > covered)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "parameter %s has unit %d but none has unit %zu: number units without gaps",
                                spans[i].param->name, spans[i].param->unit, (size_t)covered);
        covered = spans[i].end > covered ? spans[i].end : covered;
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__params_check_memory(const dtrain_param *table, size_t count, dtrain__params_span *spans)
{
    size_t used = 0, elements, bytes;
    for (size_t i = 0; i < 2 * count; i++) {
        const dtrain_param *param = &table[i / 2];
        void *memory = i % 2 == 0 ? param->data : dtrain__params_trained(param) ? param->grad : NULL;
        if (!dtrain__params_size(param, &elements, &bytes) || bytes == 0 || memory == NULL)
            continue;
        spans[used].place = (uintptr_t)param->device;
        spans[used].begin = (uintptr_t)memory;
        spans[used].end = (uintptr_t)memory + bytes;
        spans[used++].param = param;
    }
    qsort(spans, used, sizeof *spans, dtrain__params_compare_spans);
    for (size_t i = 1; i < used; i++) {
        if (spans[i].place == spans[i - 1].place && spans[i].begin < spans[i - 1].end)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "parameters %s and %s overlap in memory: list a shared tensor once, and keep data and "
                                "grad apart",
                                spans[i - 1].param->name, spans[i].param->name);
    }
    return DTRAIN_OK;
}

/* Checks a table; reserves: 1 allows data and grad of NULL, which the library reserves. */
static dtrain_status dtrain__params_check_for(const dtrain_param *table, size_t count, int reserves)
{
    dtrain_allocator allocator = {NULL, NULL, 0, 0};
    size_t bytes;
    if (table == NULL || count == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "the parameter table is empty: list at least one parameter");
    if (!dtrain__mul_size(count, 2 * sizeof(dtrain__params_span), &bytes))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "a table of %zu parameters is longer than memory", count);
    for (size_t i = 0; i < count; i++) {
        if (dtrain__params_check_one(&table[i], i, reserves) != DTRAIN_OK)
            return DTRAIN_ERR_INVALID;
    }
    dtrain__params_span *spans = (dtrain__params_span *)dtrain__alloc(&allocator, bytes);
    if (spans == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes to check the parameter table", bytes);
    dtrain_status status = dtrain__params_check_names(table, count, spans);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_units(spans, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_memory(table, count, spans);
    dtrain__free(&allocator, spans);
    return status;
}

static dtrain_status dtrain__params_check(const dtrain_param *table, size_t count)
{
    return dtrain__params_check_for(table, count, 0);
}

static const char *dtrain__params_compression(int kind)
{
    static const char *const names[] = {"TOPK", "BF16", "F16", "INT8", "FP8", "SIGN", "POWERSGD", "OWN"};
    int index = kind == DTRAIN_COMPRESS_DEFAULT ? 0 : kind - DTRAIN_COMPRESS_TOPK;
    return index >= 0 && index < 8 ? names[index] : NULL;
}

/* Refuses 1-bit Adam for a call that has no AdamW of the library's. */
static dtrain_status dtrain__params_no_adam(const dtrain_compress_desc *desc, const char *call)
{
    if (!desc->adam)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "%s: compress.adam is 1, which needs the m and v of an AdamW: use a dtrain_fsdp with "
                        "DTRAIN_DDP and that optimizer, or leave it 0",
                        call);
}

/* The fields of a dtrain_compress_desc. */
static const dtrain__alike_field dtrain__params_compress_fields[] = {
    DTRAIN__ALIKE_CONSTANT(dtrain_compress_desc, kind, dtrain__params_compression),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, topk.schedule.ratio, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, topk.schedule.stage_steps, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, topk.schedule.first_ratio, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, topk.schedule.factor, FLOAT),
    DTRAIN__ALIKE_CONSTANT(dtrain_compress_desc, topk.values, dtrain__alike_dtype),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, topk.indices, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, topk.exchange, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, block, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, rank, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, own, GIVEN),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, feedback.no_feedback, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, feedback.momentum, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, feedback.no_masking, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, feedback.start_step, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, feedback.device, OWN), /* NULL here */
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, least_count, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_compress_desc, adam, FLAG)};

enum { DTRAIN__PARAMS_COMPRESS = sizeof dtrain__params_compress_fields / sizeof dtrain__params_compress_fields[0] };

/* The fields of a parameter that are the same on all ranks, besides its name and its shape. The last two are compared
 * only with `places`: see dtrain__params_line. */
static const dtrain__alike_field dtrain__params_fields[] = {
    DTRAIN__ALIKE_CONSTANT(dtrain_param, dtype, dtrain__alike_dtype),
    DTRAIN__ALIKE_FIELD(dtrain_param, stacked, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_param, unit, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_param, tied, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_param, no_decay, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_param, dense, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_param, grad, GIVEN),
    DTRAIN__ALIKE_FIELD(dtrain_param, frozen, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_param, data, GIVEN),
    DTRAIN__ALIKE_FIELD(dtrain_param, device, GIVEN)};

static const dtrain__alike_field dtrain__params_part_fields[] = {
    DTRAIN__ALIKE_FIELD(dtrain_param_part, first_layer, NUMBER), DTRAIN__ALIKE_FIELD(dtrain_param_part, dim, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_param_part, blocks, NUMBER),      DTRAIN__ALIKE_FIELD(dtrain_param_part, begin, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_param_part, copies, NUMBER),      DTRAIN__ALIKE_FIELD(dtrain_param_part, copy, NUMBER)};

/* The lines of a parameter in a comparison between ranks. */
enum {
    DTRAIN__PARAMS_NAME,
    DTRAIN__PARAMS_SHAPE,
    DTRAIN__PARAMS_FIELD,
    DTRAIN__PARAMS_PART = DTRAIN__PARAMS_FIELD + sizeof dtrain__params_fields / sizeof dtrain__params_fields[0],
    DTRAIN__PARAMS_PART_SHAPE =
        DTRAIN__PARAMS_PART + sizeof dtrain__params_part_fields / sizeof dtrain__params_part_fields[0],
    DTRAIN__PARAMS_LINES
};

static int dtrain__params_shape_line(dtrain__alike_line *line, const char *prefix, const size_t *shape, int ndim)
{
    char text[24 * DTRAIN_MAX_DIMS + 3] = "{", what[sizeof line->what];
    for (int d = 0; d < ndim; d++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%zu", d > 0 ? ", " : "", shape[d]);
    snprintf(text + strlen(text), sizeof text - strlen(text), "}");
    snprintf(what, sizeof what, "%sshape", prefix);
    return dtrain__alike_text(line, what, text);
}

static size_t dtrain__params_lines(size_t count)
{
    return 1 + count * DTRAIN__PARAMS_LINES;
}

/* Writes one line of a good table that must be the same on all ranks, which is everything except addresses. Returns 0
 * beyond the last line. places: 1 also compares whether there is data, and whether it is on a device. */
static int dtrain__params_line(const dtrain_param *table, size_t count, int places, size_t index,
                               dtrain__alike_line *line)
{
    size_t at = (index - 1) / DTRAIN__PARAMS_LINES, field = (index - 1) % DTRAIN__PARAMS_LINES;
    char prefix[120];
    if (index == 0)
        return dtrain__alike_number(line, "the number of parameters is", (double)count, 0);
    if (at >= count)
        return 0;
    const dtrain_param *param = &table[at];
    snprintf(prefix, sizeof prefix, "parameter %zu: name", at);
    if (field == DTRAIN__PARAMS_NAME)
        return dtrain__alike_name(line, prefix, param->name);
    snprintf(prefix, sizeof prefix, "parameter %zu \"%.60s\": %s", at, param->name,
             field >= DTRAIN__PARAMS_PART ? "part." : "");
    if (field == DTRAIN__PARAMS_SHAPE)
        return dtrain__params_shape_line(line, prefix, param->shape, dtrain__params_ndim(param));
    if (field < DTRAIN__PARAMS_PART)
        return dtrain__alike_field_line(line, prefix, &dtrain__params_fields[field - DTRAIN__PARAMS_FIELD],
                                        places || field + 2 < DTRAIN__PARAMS_PART ? param : NULL);
    if (param->part == NULL)
        return dtrain__alike_text(line, prefix, "none");
    if (field == DTRAIN__PARAMS_PART_SHAPE)
        return dtrain__params_shape_line(line, prefix, param->part->shape, dtrain__params_ndim(param));
    dtrain_param_part part = *param->part;
    part.blocks = dtrain__params_blocks(param);
    part.copies = part.copies > 0 ? part.copies : 1;
    return dtrain__alike_field_line(line, prefix, &dtrain__params_part_fields[field - DTRAIN__PARAMS_PART], &part);
}

/* The arguments of a create call that must be the same on all ranks: a table, a desc, and its compression. */
typedef struct dtrain__params_given {
    const dtrain_param *table;
    size_t count;
    int places; /* see dtrain__params_line */
    const void *desc;
    const dtrain__alike_field *fields; /* of desc */
    size_t field_count;
    const dtrain_compress_desc *compress; /* NULL: no compression */
} dtrain__params_given;

static int dtrain__params_given_line(const void *pointer, size_t index, dtrain__alike_line *line)
{
    const dtrain__params_given *given = (const dtrain__params_given *)pointer;
    size_t lines = dtrain__params_lines(given->count);
    if (index < lines)
        return dtrain__params_line(given->table, given->count, given->places, index, line);
    index -= lines;
    if (index < given->field_count)
        return dtrain__alike_field_line(line, "desc.", &given->fields[index], given->desc);
    index -= given->field_count;
    return index < DTRAIN__PARAMS_COMPRESS &&
           dtrain__alike_field_line(line, "desc.compress.", &dtrain__params_compress_fields[index], given->compress);
}

/* Checks that there is a table, and that each parameter that is not frozen has a gradient, which is F32. */
static dtrain_status dtrain__params_check_grads(const dtrain_param *table, size_t count, const char *call)
{
    if (table == NULL && count > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: a table of %zu parameters is NULL: give its address", call,
                            count);
    for (size_t i = 0; i < count; i++) {
        size_t elements = table[i].frozen ? 0 : dtrain_param_elements(&table[i]);
        if (elements > 0 && table[i].grad == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "%s: parameter %s is not frozen, and its grad is NULL, expected memory for %zu "
                                "elements: set grad, or set frozen to leave the parameter as it is",
                                call, table[i].name, elements);
        if (dtrain__params_trained(&table[i]) && table[i].dtype != DTRAIN_F32)
            return dtrain__fail(
                NULL, DTRAIN_ERR_UNSUPPORTED,
                "%s: parameter %s is %s, gradients are reduced and applied in F32 only: keep F32 weights, or "
                "set frozen",
                call, table[i].name, dtrain_dtype_name(table[i].dtype));
    }
    return DTRAIN_OK;
}

/* Refuses parameters on a device, for calls that work only in the CPU's memory. */
static dtrain_status dtrain__params_on_cpu(const dtrain_param *table, size_t count, const char *call)
{
    for (size_t i = 0; i < count; i++) {
        if (table[i].device != NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "%s: parameter %s is on %s, expected all on the cpu: list parameters of the cpu's "
                                "memory here, and copy between the two with dtrain_device_copy",
                                call, table[i].name, dtrain_device_name(table[i].device));
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__params_check_cpu_grads(const dtrain_param *table, size_t count, const char *call)
{
    dtrain_status status = dtrain__params_check_grads(table, count, call);
    return status == DTRAIN_OK ? dtrain__params_on_cpu(table, count, call) : status;
}

/* Finds the device of all parameters with a gradient. It is NULL for the CPU, and for a table without gradients. */
static dtrain_status dtrain__params_device(const dtrain_param *table, size_t count, const char *call,
                                           dtrain_device **device)
{
    const dtrain_param *first = NULL;
    *device = NULL;
    for (size_t i = 0; i < count; i++) {
        if (!dtrain__params_trained(&table[i]))
            continue;
        if (first == NULL)
            first = &table[i];
        if (table[i].device != first->device)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "%s: parameter %s is on %s, %s on %s, expected one device: call it for each with a "
                                "table of its own",
                                call, first->name, dtrain_device_name(first->device), table[i].name,
                                dtrain_device_name(table[i].device));
    }
    *device = first != NULL ? first->device : NULL;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_params_of_arrays(dtrain_param *table, size_t count, const char *const *names,
                                                 const size_t *sizes, const int *layers, float *data, float *grad)
{
    size_t at = 0, bytes;
    if (count > 0 && (table == NULL || names == NULL || sizes == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "params_of_arrays: %s is NULL, expected %zu of them",
                            table == NULL   ? "table"
                            : names == NULL ? "names"
                                            : "sizes",
                            count);
    for (size_t i = 0; i < count; i++) {
        int stacked = layers != NULL && layers[i] != 0;
        size_t deep = stacked && layers[i] > 0 ? (size_t)layers[i] : 1;
        if (stacked && (layers[i] < 0 || sizes[i] % deep != 0))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "params_of_arrays: array %zu (\"%.100s\") has %zu elements in %d layers, expected a "
                                "multiple of a positive number",
                                i, names[i] != NULL ? names[i] : "", sizes[i], layers[i]);
        memset(&table[i], 0, sizeof table[i]);
        table[i].name = names[i];
        table[i].dtype = DTRAIN_F32;
        table[i].ndim = 1 + stacked;
        table[i].shape[0] = stacked ? deep : sizes[i];
        table[i].shape[1] = stacked ? sizes[i] / deep : 0;
        table[i].stacked = table[i].unit = stacked;
        table[i].tied = !stacked;
        table[i].data = data != NULL ? data + at : NULL;
        table[i].grad = grad != NULL ? grad + at : NULL;
        if (sizes[i] > SIZE_MAX - at || !dtrain__mul_size(at += sizes[i], sizeof(float), &bytes))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "params_of_arrays: %zu arrays of more bytes than size_t has",
                                count);
    }
    return DTRAIN_OK;
}

/* Cuts a table into ranges, unit by unit, in the order of the table inside a unit. Returns 0 if there is no memory. */
static int dtrain__params_cut(dtrain__params *params, const dtrain_param *table, size_t count,
                              dtrain_allocator *allocator)
{
    /* next[u]: where unit u's next range goes; at first, how many ranges unit u - 1 has */
    size_t *next = (size_t *)dtrain__alloc(allocator, ((size_t)params->units + 1) * sizeof *next);
    if (next == NULL)
        return 0;
    for (size_t i = 0; i < count; i++)
        for (size_t layer = 0; dtrain__params_trained(&table[i]) && layer < dtrain__params_layers(&table[i]); layer++)
            next[(size_t)table[i].unit + layer + 1]++;
    for (int unit = 0; unit < params->units; unit++)
        next[unit + 1] += next[unit];
    for (size_t i = 0; i < count; i++) {
        const dtrain_param *param = &table[i];
        size_t layers = dtrain__params_trained(param) ? dtrain__params_layers(param) : 0;
        for (size_t layer = 0; layer < layers; layer++) {
            dtrain__params_range *range = &params->ranges[next[(size_t)param->unit + layer]++];
            range->count = dtrain_param_elements(param) / layers;
            range->data = (float *)param->data + layer * range->count;
            range->grad = (float *)param->grad + layer * range->count;
            range->unit = param->unit + (int)layer;
            range->no_decay = param->no_decay;
        }
    }
    dtrain__free(allocator, next);
    return 1;
}

/* Checks a table and cuts it into ranges. The caller frees params->ranges, also after an error. */
static dtrain_status dtrain__params_create(dtrain__params *params, const dtrain_param *table, size_t count,
                                           dtrain_allocator *allocator, const char *call)
{
    memset(params, 0, sizeof *params);
    dtrain_status status = dtrain__params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_grads(table, count, call);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < count; i++)
        params->range_count += dtrain__params_trained(&table[i]) ? dtrain__params_layers(&table[i]) : 0;
    params->units = dtrain_params_units(table, count);
    params->ranges =
        (dtrain__params_range *)dtrain__alloc(allocator, params->range_count * sizeof(dtrain__params_range));
    if (params->ranges == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a table of %zu parameters", count);
    if (!dtrain__params_cut(params, table, count, allocator))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a list of %d units", params->units);
    return DTRAIN_OK;
}

#endif
