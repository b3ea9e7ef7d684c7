/* ---- >>huggingface writing ----
 * Writes a model as one file, or as several and an index. They are written to a directory beside its place, the index
 * last. When all of them are on the disk, the directory is renamed. */
#ifndef DTRAIN__HUGGINGFACE_WRITE
#define DTRAIN__HUGGINGFACE_WRITE
#include "huggingface.c"

/* A model to write. */
typedef struct dtrain__huggingface_plan {
    dtrain_allocator *allocator, own;
    dtrain_safetensors_source *sources; /* the stored ones, in the caller's order */
    size_t *first;                      /* for each file its first source; then their number */
    size_t count, kept, files;
    dtrain_safetensors_pair *pairs;
    size_t pair_count;
    uint64_t total;
} dtrain__huggingface_plan;

static DTRAIN__NOINLINE size_t dtrain__huggingface_length(const dtrain_safetensors_source *source)
{
    return source->name_length > 0 ? source->name_length : strlen(source->name);
}

static uint64_t dtrain__huggingface_bytes(const dtrain_safetensors_source *source)
{
    uint64_t count = 1; /* sizes have been checked: nothing overflows */
    for (int d = 0; d < source->ndim; d++)
        count *= source->shape[d];
    return count * dtrain_dtype_bits(source->dtype) / 8;
}

static int dtrain__huggingface_compare_names(const void *left, const void *right)
{
    const dtrain_safetensors_source *a = *(const dtrain_safetensors_source *const *)left;
    const dtrain_safetensors_source *b = *(const dtrain_safetensors_source *const *)right;
    return dtrain__safetensors_compare_text(a->name, dtrain__huggingface_length(a), b->name,
                                            dtrain__huggingface_length(b));
}

/* Compares what makes two sources the same tensor: data, dtype and shape. */
static int dtrain__huggingface_compare_data(const dtrain_safetensors_source *a, const dtrain_safetensors_source *b)
{
    if (a->data != b->data)
        return (uintptr_t)a->data < (uintptr_t)b->data ? -1 : 1;
    if (a->dtype != b->dtype)
        return (int)a->dtype < (int)b->dtype ? -1 : 1;
    if (a->ndim != b->ndim)
        return a->ndim < b->ndim ? -1 : 1;
    return a->ndim > 0 ? memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) : 0;
}

static int dtrain__huggingface_compare_sources(const void *left, const void *right)
{
    const dtrain_safetensors_source *a = *(const dtrain_safetensors_source *const *)left;
    const dtrain_safetensors_source *b = *(const dtrain_safetensors_source *const *)right;
    int order = dtrain__huggingface_compare_data(a, b);
    return order != 0 ? order : dtrain__huggingface_compare_names(left, right);
}

/* Returns whether a name is already a key of the metadata, so the metadata cannot map it to a tensor. */
static int dtrain__huggingface_taken(const dtrain__names *keys, const dtrain_safetensors_source *source)
{
    size_t length = dtrain__huggingface_length(source), index;
    return (length == 10 && memcmp(source->name, "total_size", 10) == 0) ||
           dtrain__names_find(keys, source->name, length, &index);
}

/* Copies the sources to store, and maps the names of the others to them: metadata[dropped] = kept. */
static dtrain_status dtrain__huggingface_untie(dtrain__huggingface_plan *plan, const dtrain_safetensors_source *sources,
                                               const dtrain__names *keys)
{
    size_t bytes = plan->count * sizeof(dtrain_safetensors_source *);
    const dtrain_safetensors_source **sorted =
        (const dtrain_safetensors_source **)dtrain__alloc(plan->allocator, bytes);
    unsigned char *dropped = (unsigned char *)dtrain__alloc(plan->allocator, plan->count);
    if (sorted != NULL && dropped != NULL) {
        size_t first = 0;
        for (size_t i = 0; i < plan->count; i++)
            sorted[i] = &sources[i];
        if (plan->count > 1)
            qsort(sorted, plan->count, sizeof *sorted, dtrain__huggingface_compare_sources);
        for (size_t i = 1; i < plan->count; i++) {
            int tied = sorted[i]->data != NULL && dtrain__huggingface_bytes(sorted[i]) > 0 &&
                       dtrain__huggingface_compare_data(sorted[first], sorted[i]) == 0;
            first = tied ? first : i;
            if (!tied || dtrain__huggingface_taken(keys, sorted[i]))
                continue;
            dropped[sorted[i] - sources] = 1;
            dtrain_safetensors_pair *pair = &plan->pairs[plan->pair_count++];
            pair->key = sorted[i]->name;
            pair->key_length = dtrain__huggingface_length(sorted[i]);
            pair->value = sorted[first]->name;
            pair->value_length = dtrain__huggingface_length(sorted[first]);
        }
        for (size_t i = 0; i < plan->count; i++)
            if (!dropped[i])
                plan->sources[plan->kept++] = sources[i];
    }
    int out = sorted == NULL || dropped == NULL;
    dtrain__free(plan->allocator, dropped);
    dtrain__free(plan->allocator, sorted);
    return !out ? DTRAIN_OK
                : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_model_save: no memory to sort %zu tensors",
                               plan->count);
}

static dtrain_status dtrain__huggingface_map(dtrain__huggingface_plan *plan, const dtrain_safetensors_source *sources)
{
    dtrain__names keys;
    size_t twice;
    if (!dtrain__names_build(&keys, plan->allocator, plan->pairs, sizeof *plan->pairs, plan->pair_count, &twice))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_model_save: no memory for %zu pairs of metadata",
                            plan->pair_count);
    dtrain_status status = dtrain__huggingface_untie(plan, sources, &keys);
    dtrain__names_free(&keys, plan->allocator);
    return status;
}

/* Assigns the tensors to files in their order. If a tensor does not fit, it starts a new file. */
static void dtrain__huggingface_deal(dtrain__huggingface_plan *plan, uint64_t most)
{
    uint64_t held = 0;
    plan->files = 1;
    for (size_t i = 0; i < plan->kept; i++) {
        uint64_t bytes = dtrain__huggingface_bytes(&plan->sources[i]);
        if (i > plan->first[plan->files - 1] && (held > most || bytes > most - held)) {
            plan->first[plan->files++] = i;
            held = 0;
        }
        held += bytes;
        plan->total += bytes;
    }
    plan->first[plan->files] = plan->kept;
}

static void dtrain__huggingface_plan_end(dtrain__huggingface_plan *plan)
{
    dtrain__free(plan->allocator, plan->pairs);
    dtrain__free(plan->allocator, plan->first);
    dtrain__free(plan->allocator, plan->sources);
}

/* Returns whether a pair has the key. Its lengths are filled in; its key need not end with a zero byte. */
static int dtrain__huggingface_is(const dtrain_safetensors_pair *pair, const char *key)
{
    return pair->key_length == strlen(key) && memcmp(pair->key, key, pair->key_length) == 0;
}

/* Copies the caller's metadata, and adds "format" if it has none. All pairs have been checked. Fills in lengths. */
static void dtrain__huggingface_metadata(dtrain__huggingface_plan *plan, const dtrain_safetensors_write_desc *desc)
{
    static const dtrain_safetensors_pair format = {"format", 6, "pt", 2};
    int given = 0;
    for (size_t i = 0; desc != NULL && i < desc->metadata_count; i++) {
        dtrain_safetensors_pair *pair = &plan->pairs[plan->pair_count++];
        *pair = desc->metadata[i];
        pair->key_length = pair->key_length > 0 ? pair->key_length : strlen(pair->key);
        pair->value_length = pair->value_length > 0 ? pair->value_length : strlen(pair->value);
        given |= dtrain__huggingface_is(pair, "format");
    }
    if (!given)
        plan->pairs[plan->pair_count++] = format;
}

static dtrain_status dtrain__huggingface_plan_begin(dtrain__huggingface_plan *plan,
                                                    const dtrain_safetensors_source *sources, size_t count,
                                                    uint64_t most, const dtrain_safetensors_write_desc *desc)
{
    size_t pairs = count + (desc != NULL ? desc->metadata_count : 0) + 1;
    uint64_t bytes;
    dtrain_status status = dtrain_safetensors_size(&bytes, sources, count, desc); /* checks all arguments */
    memset(plan, 0, sizeof *plan);
    if (status != DTRAIN_OK)
        return status;
    plan->allocator = desc != NULL && desc->allocator != NULL ? desc->allocator : &plan->own;
    plan->count = count;
    plan->sources = (dtrain_safetensors_source *)dtrain__alloc(plan->allocator, count * sizeof *plan->sources);
    plan->first = (size_t *)dtrain__alloc(plan->allocator, (count + 2) * sizeof *plan->first);
    plan->pairs = (dtrain_safetensors_pair *)dtrain__alloc(plan->allocator, pairs * sizeof *plan->pairs);
    if (plan->sources == NULL || plan->first == NULL || plan->pairs == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_model_save: no memory to plan %zu tensors", count);
    if (status == DTRAIN_OK) {
        dtrain__huggingface_metadata(plan, desc);
        status = dtrain__huggingface_map(plan, sources);
    }
    if (status == DTRAIN_OK)
        dtrain__huggingface_deal(plan, most > 0 ? most : DTRAIN__HUGGINGFACE_MOST);
    else
        dtrain__huggingface_plan_end(plan);
    return status;
}

static void dtrain__huggingface_file_name(char out[64], size_t index, size_t files)
{
    if (files == 1)
        snprintf(out, 64, "%s", DTRAIN__HUGGINGFACE_FILE);
    else
        snprintf(out, 64, "model-%05zu-of-%05zu.safetensors", index + 1, files);
}

/* Prints the index. names: the stored sources, sorted by name. */
static size_t dtrain__huggingface_print(const dtrain__huggingface_plan *plan,
                                        const dtrain_safetensors_source *const *names, void *out, size_t capacity)
{
    dtrain__json_writer json;
    char file[64];
    dtrain__json_write_start(&json, out, capacity);
    json.indent = 2;
    dtrain__json_begin(&json, 1);
    dtrain__json_member(&json, "metadata");
    dtrain__json_begin(&json, 1);
    for (size_t i = 0; i < plan->pair_count; i++) {
        const dtrain_safetensors_pair *pair = &plan->pairs[i];
        if (dtrain__huggingface_is(pair, "total_size")) /* written below */
            continue;
        dtrain__json_write_key(&json, pair->key, pair->key_length);
        dtrain__json_write_string(&json, pair->value, pair->value_length);
    }
    dtrain__json_member_u64(&json, "total_size", plan->total);
    dtrain__json_end(&json);
    dtrain__json_member(&json, "weight_map");
    dtrain__json_begin(&json, 1);
    for (size_t i = 0; i < plan->kept; i++) {
        size_t index = (size_t)(names[i] - plan->sources), low = 0;
        while (low + 1 < plan->files && plan->first[low + 1] <= index)
            low++;
        dtrain__huggingface_file_name(file, low, plan->files);
        dtrain__json_write_key(&json, names[i]->name, dtrain__huggingface_length(names[i]));
        dtrain__json_write_string(&json, file, strlen(file));
    }
    dtrain__json_end(&json);
    dtrain__json_end(&json);
    dtrain__json_put(&json, "\n", 1);
    return json.bytes;
}

static dtrain_status dtrain__huggingface_write_index(const dtrain__huggingface_plan *plan, int directory, int no_sync)
{
    size_t bytes = plan->kept * sizeof(dtrain_safetensors_source *), text_bytes = 0;
    const dtrain_safetensors_source **names = (const dtrain_safetensors_source **)dtrain__alloc(plan->allocator, bytes);
    void *text = NULL;
    for (size_t i = 0; i < plan->kept && names != NULL; i++)
        names[i] = &plan->sources[i];
    if (names != NULL && plan->kept > 1)
        qsort(names, plan->kept, sizeof *names, dtrain__huggingface_compare_names);
    if (names != NULL) {
        text_bytes = dtrain__huggingface_print(plan, names, NULL, 0);
        text = dtrain__alloc(plan->allocator, text_bytes);
    }
    if (text != NULL)
        dtrain__huggingface_print(plan, names, text, text_bytes);
    dtrain__free(plan->allocator, names);
    if (text == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_model_save: no memory for an index of %zu tensors",
                            plan->kept);
    dtrain_status status =
        dtrain__file_put(directory, DTRAIN__HUGGINGFACE_INDEX, text, text_bytes, no_sync, "safetensors_model_save");
    dtrain__free(plan->allocator, text);
    return status;
}

/* Writes all files into a directory. */
static dtrain_status dtrain__huggingface_write_files(const dtrain__huggingface_plan *plan, int directory,
                                                     const dtrain_safetensors_write_desc *desc)
{
    static const dtrain_safetensors_pair format = {"format", 6, "pt", 2};
    const dtrain_safetensors_write_desc each = {plan->files == 1 ? plan->pairs : &format,
                                                plan->files == 1 ? plan->pair_count : 1, desc != NULL && desc->no_sync,
                                                desc != NULL ? desc->allocator : NULL};
    dtrain_status status = DTRAIN_OK;
    char name[64];
    for (size_t i = 0; i < plan->files && status == DTRAIN_OK; i++) {
        dtrain__huggingface_file_name(name, i, plan->files);
        status = dtrain__safetensors_save_at(directory, name, plan->sources + plan->first[i],
                                             plan->first[i + 1] - plan->first[i], &each);
    }
    if (status == DTRAIN_OK && plan->files > 1)
        status = dtrain__huggingface_write_index(plan, directory, each.no_sync);
    return status;
}

static int dtrain__huggingface_not_empty(void *user, const char *name)
{
    (void)user, (void)name;
    return ENOTEMPTY;
}

/* Refuses a place that is in use, before gigabytes are written. */
static dtrain_status dtrain__huggingface_free_place(int parent, const char *name)
{
    int fd = dtrain__file_sys_open(parent, name, DTRAIN__OS_DIRECTORY | DTRAIN__OS_NO_LINK);
    int error = fd < 0 ? errno : 0;
    if (fd < 0 && error == ENOENT)
        return DTRAIN_OK;
    if (fd >= 0)
        error = dtrain__file_list(fd, dtrain__huggingface_not_empty, NULL);
    dtrain__file_close(fd);
    if (error == ENOTDIR || error == ELOOP || error == ENOTEMPTY) /* the rename would not follow a link */
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "safetensors_model_save: \"%s\" exists and is %s: choose another name, or move it away",
                            name, error == ENOTEMPTY ? "not empty" : "not a directory");
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "safetensors_model_save: cannot look into \"%s\": %s", name,
                            dtrain__os_error_text(error));
    return DTRAIN_OK;
}

/* Writes the model beside its place, then moves it there. Writing a file syncs it and its entry in the directory. */
static dtrain_status dtrain__huggingface_save_in(const dtrain__huggingface_plan *plan, int parent, const char *name,
                                                 const dtrain_safetensors_write_desc *desc)
{
    char temporary[256];
    int directory = -1, error;
    dtrain_status status = dtrain__huggingface_free_place(parent, name);
    if (status != DTRAIN_OK)
        return status;
    if (!dtrain__os_name_beside(temporary, sizeof temporary, name) || dtrain__file_sys_mkdir(parent, temporary) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "safetensors_model_save: cannot make a directory beside \"%s\": %s",
                            name, dtrain__os_error_text(errno));
    status = dtrain__file_open_directory(&directory, parent, temporary, "safetensors_model_save");
    if (status == DTRAIN_OK)
        status = dtrain__huggingface_write_files(plan, directory, desc);
    if (status == DTRAIN_OK && dtrain__file_sys_rename(parent, temporary, parent, name) != 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_IO, "safetensors_model_save: cannot put \"%s\" in place: %s", name,
                              dtrain__os_error_text(errno));
    dtrain__file_close(directory);
    if (status != DTRAIN_OK) {
        dtrain__file_remove_directory(parent, temporary);
        return status;
    }
    error = desc != NULL && desc->no_sync ? 0 : dtrain__file_sync_directory(parent);
    return error == 0 ? DTRAIN_OK
                      : dtrain__fail(NULL, DTRAIN_ERR_IO,
                                     "safetensors_model_save: \"%s\" is in place, but its directory did not reach the "
                                     "disk: %s",
                                     name, dtrain__os_error_text(error));
}

DTRAIN_API dtrain_status dtrain_safetensors_model_save(const char *directory, const dtrain_safetensors_source *sources,
                                                       size_t count, uint64_t max_file_bytes,
                                                       const dtrain_safetensors_write_desc *desc)
{
    dtrain__huggingface_plan plan;
    char path[4096];
    const char *name;
    size_t length = directory != NULL ? strlen(directory) : 0;
    int parent;
    while (length > 1 && directory[length - 1] == '/')
        length--;
    if (length == 0 || length >= sizeof path)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "safetensors_model_save: directory is %s, expected a path of 1 to %zu bytes",
                            length == 0 ? "missing" : "longer", sizeof path - 1);
    memcpy(path, directory, length);
    path[length] = '\0';
    dtrain_status status = dtrain__huggingface_plan_begin(&plan, sources, count, max_file_bytes, desc);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__file_open_parent(&parent, &name, path, "safetensors_model_save");
    if (status == DTRAIN_OK) {
        status = dtrain__huggingface_save_in(&plan, parent, name, desc);
        dtrain__file_close(parent);
    }
    dtrain__huggingface_plan_end(&plan);
    return status;
}

#endif
