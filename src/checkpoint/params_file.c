/* ---- >>params file ----
 * A table of parameters as a safetensors file, for programs whose parameters are whole: names and shapes are the
 * table's, and what differs between table and file is listed in one text. */
#ifndef DTRAIN__PARAMS_FILE
#define DTRAIN__PARAMS_FILE
#include "../train/params.c"
#include "../format/huggingface_write.c"

/* A list of names that differ, cut where a line of text ends. */
typedef struct dtrain__params_list {
    char text[400];
    size_t length, count;
} dtrain__params_list;

__attribute__((format(printf, 4, 5))) static void dtrain__params_list_add(dtrain__params_list *list, const char *name,
                                                                          size_t length, const char *format, ...)
{
    char quoted[64];
    va_list arguments;
    size_t room = sizeof list->text - list->length;
    list->count++;
    if (room < 160) /* a name and what follows it */
        return;
    int n = snprintf(list->text + list->length, room, "%s\"%s\"", list->count > 1 ? ", " : "",
                     dtrain__safetensors_quote(quoted, name, length));
    list->length += n > 0 ? (size_t)n : 0;
    va_start(arguments, format);
    n = vsnprintf(list->text + list->length, sizeof list->text - list->length, format, arguments);
    va_end(arguments);
    list->length += n > 0 && (size_t)n < sizeof list->text - list->length ? (size_t)n : 0;
}

static void dtrain__params_print_shape(char out[48], int ndim, const size_t *shape)
{
    size_t at = 0;
    int n = snprintf(out, 48, "[");
    for (int d = 0; d < ndim && n > 0 && at + (size_t)n < 40; d++) {
        at += (size_t)n;
        n = snprintf(out + at, 48 - at, "%s%zu", d > 0 ? "," : "", shape[d]);
    }
    at += n > 0 ? (size_t)n : 0;
    at = at < 46 ? at : 46;
    memcpy(out + at, "]", 2);
}

/* Whether a tensor can be a parameter; a scalar of a file is {1} in a table. Otherwise the list says why not. */
static int dtrain__params_fits(const dtrain_param *param, const dtrain_safetensors_tensor *tensor,
                               dtrain__params_list *list)
{
    char have[48], want[48];
    dtrain__dtype_format format;
    int ndim = dtrain__params_ndim(param), same = tensor != NULL && tensor->ndim == ndim;
    if (tensor == NULL) {
        dtrain__params_list_add(list, param->name, strlen(param->name), " is missing");
        return 0;
    }
    for (int d = 0; d < ndim && same; d++)
        same = tensor->shape[d] == param->shape[d];
    same = same || (tensor->ndim == 0 && ndim == 1 && param->shape[0] == 1);
    if (!same) {
        dtrain__params_print_shape(have, tensor->ndim, tensor->shape);
        dtrain__params_print_shape(want, ndim, param->shape);
        dtrain__params_list_add(list, param->name, strlen(param->name), " is %s, expected %s", have, want);
    } else if (tensor->dtype != param->dtype &&
               (!dtrain__dtype_format_of(tensor->dtype, &format) || !dtrain__dtype_format_of(param->dtype, &format))) {
        dtrain__params_list_add(list, param->name, strlen(param->name), " is %s, expected %s",
                                dtrain_dtype_name(tensor->dtype), dtrain_dtype_name(param->dtype));
        same = 0;
    }
    return same;
}

/* Lists tensors that the table does not name. Returns 0 when there is no memory. */
static int dtrain__params_extra(const dtrain_param *table, size_t count, const dtrain_safetensors_model *model,
                                dtrain__params_list *list)
{
    dtrain_allocator heap;
    dtrain__names names;
    size_t index, twice;
    memset(&heap, 0, sizeof heap);
    memset(&names, 0, sizeof names);
    dtrain__names_text *own = (dtrain__names_text *)dtrain__alloc(&heap, count * sizeof *own);
    for (size_t i = 0; i < count && own != NULL; i++) {
        own[i].text = table[i].name;
        own[i].length = strlen(table[i].name);
    }
    int built = own != NULL && dtrain__names_build(&names, &heap, own, sizeof *own, count, &twice);
    for (size_t i = 0; i < dtrain_safetensors_model_count(model) && built; i++) {
        const dtrain_safetensors_tensor *tensor = dtrain_safetensors_model_tensor(model, i, NULL);
        if (!dtrain__names_find(&names, tensor->name, tensor->name_length, &index))
            dtrain__params_list_add(list, tensor->name, tensor->name_length, " is extra");
    }
    dtrain__names_free(&names, &heap);
    dtrain__free(&heap, own);
    return built;
}

DTRAIN_API dtrain_status dtrain_params_save(const dtrain_param *table, size_t count, const char *path)
{
    dtrain_allocator heap;
    dtrain_status status = dtrain__params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_on_cpu(table, count, "params_save (dtrain_checkpoint_save takes it as it is)");
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < count; i++)
        if (!dtrain__params_is_whole(&table[i]))
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "params_save: parameter %s is a part of a tensor that other ranks hold too: save a "
                                "checkpoint, and export that",
                                table[i].name);
    memset(&heap, 0, sizeof heap);
    dtrain_safetensors_source *sources = (dtrain_safetensors_source *)dtrain__alloc(&heap, count * sizeof *sources);
    if (sources == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "params_save: no memory for %zu names", count);
    for (size_t i = 0; i < count; i++) {
        sources[i].name = table[i].name;
        sources[i].dtype = table[i].dtype;
        sources[i].ndim = dtrain__params_ndim(&table[i]);
        sources[i].shape = table[i].shape;
        sources[i].data = table[i].data;
    }
    status = dtrain_safetensors_save(path, sources, count, NULL);
    dtrain__free(&heap, sources);
    return status;
}

/* Compares the whole table with the model before anything is read. */
static dtrain_status dtrain__params_compare(const dtrain_param *table, size_t count,
                                            const dtrain_safetensors_model *model, const char *path, int strict)
{
    dtrain__params_list list;
    memset(&list, 0, sizeof list);
    for (size_t i = 0; i < count; i++)
        dtrain__params_fits(&table[i], dtrain_safetensors_model_find(model, table[i].name, strlen(table[i].name), NULL),
                            &list);
    if (!dtrain__params_extra(table, count, model, &list))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "params_load: no memory for %zu names", count);
    if (list.count == 0)
        return DTRAIN_OK;
    if (strict)
        return dtrain__fail(NULL, DTRAIN_ERR_MISMATCH, "params_load: %.120s differs from the table in %zu tensors: %s",
                            path, list.count, list.text);
    dtrain__log(DTRAIN_LOG_WARN, "params_load: %.120s differs from the table in %zu tensors, which are left out: %s",
                path, list.count, list.text);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_params_load(const dtrain_param *table, size_t count, const char *path, int strict)
{
    dtrain_safetensors_model *model;
    dtrain__params_list ignored;
    dtrain_status status = dtrain__params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_on_cpu(table, count, "params_load (dtrain_checkpoint_load takes it, and the path)");
    if (status == DTRAIN_OK)
        status = dtrain_safetensors_model_open(&model, path, NULL);
    if (status != DTRAIN_OK)
        return status;
    memset(&ignored, 0, sizeof ignored);
    status = dtrain__params_compare(table, count, model, path, strict);
    for (size_t i = 0; i < count && status == DTRAIN_OK; i++) {
        dtrain_safetensors *file;
        const dtrain_safetensors_tensor *tensor =
            dtrain_safetensors_model_find(model, table[i].name, strlen(table[i].name), &file);
        if (dtrain__params_fits(&table[i], tensor, &ignored))
            status = dtrain_safetensors_read(file, tensor, 0, tensor->count, table[i].data, table[i].dtype);
    }
    dtrain_safetensors_model_close(model);
    return status;
}

#endif
