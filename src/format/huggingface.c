/* ---- >>huggingface ----
 * Models of Hugging Face: one file, or several and an index that maps each tensor's name to its file. Index and files
 * are checked against each other in both directions (S6). Loaders without such a check may load tensors that the index
 * does not name. Texts number the rules of the layout S1 to S6. */
#ifndef DTRAIN__HUGGINGFACE
#define DTRAIN__HUGGINGFACE
#include "safetensors_write.c"

#define DTRAIN__HUGGINGFACE_FILE "model.safetensors"
#define DTRAIN__HUGGINGFACE_INDEX "model.safetensors.index.json"
#define DTRAIN__HUGGINGFACE_MOST 5000000000u /* bytes of tensors per file */

/* One line of an index's weight_map. The name comes first, as the table of names requires. */
typedef struct dtrain__huggingface_line {
    dtrain__names_text name, file;
    size_t shard;
} dtrain__huggingface_line;

typedef struct dtrain__huggingface_shard {
    dtrain__names_text name;
    dtrain_safetensors *file;
    size_t first; /* the number of its first tensor in the model */
    size_t lines; /* how many lines of the map name this file */
} dtrain__huggingface_shard;

struct dtrain_safetensors_model {
    dtrain_allocator *allocator, own;
    char label[256];
    void *index; /* the index, with its texts unescaped; NULL: one file and no index */
    size_t index_bytes;
    dtrain__huggingface_line *lines;
    size_t line_count;
    dtrain_safetensors_pair *pairs; /* of the index */
    size_t pair_count;
    dtrain__huggingface_shard *shards; /* sorted by name */
    size_t shard_count, count;
    dtrain__names names, keys;
    uint64_t total_size;
    int has_total;
};

DTRAIN__PRINTF(4, 5)
static dtrain_status dtrain__huggingface_broken(const dtrain_safetensors_model *model, const char *rule,
                                                const dtrain__names_text *name, const char *format, ...)
{
    char text[300], quoted[64];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (name == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "%s breaks %s: %s", model->label, rule, text);
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "%s breaks %s: \"%s\" %s", model->label, rule,
                        dtrain__safetensors_quote(quoted, name->text, name->length), text);
}

static dtrain_status dtrain__huggingface_memory(const dtrain_safetensors_model *model)
{
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for an index of %zu bytes", model->label,
                        model->index_bytes);
}

/* ---- the index ---- */

typedef struct dtrain__huggingface_parser {
    dtrain_safetensors_model *model;
    dtrain__json_reader json;
    dtrain_status status; /* the first error, which ends the parsing */
} dtrain__huggingface_parser;

/* Reads the next token. After an error of any kind it returns ERROR. */
static dtrain__json_kind dtrain__huggingface_next(dtrain__huggingface_parser *parser, dtrain__json_token *token)
{
    if (parser->status != DTRAIN_OK)
        memset(token, 0, sizeof *token); /* an ERROR */
    else if (dtrain__json_next(&parser->json, token) == DTRAIN__JSON_ERROR)
        parser->status = dtrain__huggingface_broken(parser->model, "S1", NULL, "at byte %zu: %s", parser->json.offset,
                                                    parser->json.error);
    return token->kind;
}

static dtrain__names_text dtrain__huggingface_text(dtrain__huggingface_parser *parser, const dtrain__json_token *token)
{
    return dtrain__safetensors_text(&parser->json, (unsigned char *)parser->model->index, token);
}

/* Reads a line of the weight_map, after its key. */
static dtrain_status dtrain__huggingface_line_read(dtrain__huggingface_parser *parser, const dtrain__json_token *key)
{
    dtrain_safetensors_model *model = parser->model;
    dtrain__json_token value;
    if (!DTRAIN__SAFETENSORS_ROOM(model->allocator, &parser->json, model->lines, model->line_count))
        return dtrain__huggingface_memory(model);
    dtrain__huggingface_line *line = &model->lines[model->line_count++];
    memset(line, 0, sizeof *line);
    line->name = dtrain__huggingface_text(parser, key);
    if (dtrain__huggingface_next(parser, &value) == DTRAIN__JSON_ERROR)
        return parser->status;
    if (value.kind != DTRAIN__JSON_STRING)
        return dtrain__huggingface_broken(model, "S1", &line->name, "at byte %zu: its file is not a string",
                                          value.begin);
    line->file = dtrain__huggingface_text(parser, &value);
    if (line->file.length <= 12 || memcmp(line->file.text + line->file.length - 12, ".safetensors", 12) != 0 ||
        !dtrain__file_plain_name(line->file.text, line->file.length))
        return dtrain__huggingface_broken(model, "S5", &line->file,
                                          "at byte %zu: expected the plain name of a .safetensors file", value.begin);
    return DTRAIN_OK;
}

/* Reads a pair of the metadata, after its key. It keeps texts, and uses no number but total_size. */
static dtrain_status dtrain__huggingface_pair_read(dtrain__huggingface_parser *parser, const dtrain__json_token *key)
{
    dtrain_safetensors_model *model = parser->model;
    dtrain__json_token token;
    dtrain__names_text name = dtrain__huggingface_text(parser, key);
    dtrain__json_kind kind = dtrain__huggingface_next(parser, &token);
    if (name.length == 10 && memcmp(name.text, "total_size", 10) == 0)
        model->has_total = dtrain__json_u64(&parser->json, &token, &model->total_size);
    if (kind != DTRAIN__JSON_STRING) {
        dtrain__json_skip(&parser->json, &token); /* the next token reports an error */
        return parser->status;
    }
    if (!DTRAIN__SAFETENSORS_ROOM(model->allocator, &parser->json, model->pairs, model->pair_count))
        return dtrain__huggingface_memory(model);
    dtrain__names_text value = dtrain__huggingface_text(parser, &token);
    dtrain_safetensors_pair pair = {name.text, name.length, value.text, value.length};
    model->pairs[model->pair_count++] = pair;
    return DTRAIN_OK;
}

/* Reads one value of the index's object, after its key. */
static dtrain_status dtrain__huggingface_part(dtrain__huggingface_parser *parser, const dtrain__json_token *key,
                                              int *has)
{
    dtrain_safetensors_model *model = parser->model;
    dtrain__json_token value, token;
    int part = dtrain__json_is(&parser->json, key, "metadata")     ? 1
               : dtrain__json_is(&parser->json, key, "weight_map") ? 2
                                                                   : 0;
    if ((*has & part) != 0)
        return dtrain__huggingface_broken(model, "S6", NULL, "at byte %zu: the key \"%s\" comes twice", key->begin,
                                          part == 1 ? "metadata" : "weight_map");
    *has |= part;
    if (dtrain__huggingface_next(parser, &value) == DTRAIN__JSON_ERROR)
        return parser->status;
    if (part == 0 || (part == 1 && value.kind == DTRAIN__JSON_NULL)) {
        dtrain__json_skip(&parser->json, &value);
        return DTRAIN_OK;
    }
    if (value.kind != DTRAIN__JSON_OBJECT)
        return dtrain__huggingface_broken(model, "S1", NULL, "at byte %zu: %s is not an object", value.begin,
                                          part == 1 ? "metadata" : "weight_map");
    while (dtrain__huggingface_next(parser, &token) == DTRAIN__JSON_KEY)
        parser->status =
            part == 1 ? dtrain__huggingface_pair_read(parser, &token) : dtrain__huggingface_line_read(parser, &token);
    return parser->status;
}

/* Builds a table over an array of the index. A duplicate is an error. where: the array's name. */
static dtrain_status dtrain__huggingface_unique(dtrain_safetensors_model *model, dtrain__names *names,
                                                const void *array, size_t stride, size_t count, const char *where)
{
    size_t twice;
    if (!dtrain__names_build(names, model->allocator, array, stride, count, &twice))
        return dtrain__huggingface_memory(model);
    if (twice == count)
        return DTRAIN_OK;
    dtrain__names_text name = dtrain__names_at(names, twice);
    return dtrain__huggingface_broken(model, "S6", &name, "comes twice in its %s", where);
}

static dtrain_status dtrain__huggingface_index(dtrain_safetensors_model *model)
{
    dtrain__huggingface_parser parser;
    dtrain__json_token token;
    int has = 0;
    memset(&parser, 0, sizeof parser);
    parser.model = model;
    dtrain__json_open(&parser.json, model->index, model->index_bytes);
    if (dtrain__huggingface_next(&parser, &token) != DTRAIN__JSON_OBJECT && parser.status == DTRAIN_OK)
        return dtrain__huggingface_broken(model, "S1", NULL, "at byte %zu: the index is not an object", token.begin);
    while (dtrain__huggingface_next(&parser, &token) == DTRAIN__JSON_KEY)
        parser.status = dtrain__huggingface_part(&parser, &token, &has);
    dtrain__huggingface_next(&parser, &token); /* END, or an error if more follows */
    if (parser.status != DTRAIN_OK)
        return parser.status;
    if (model->line_count == 0)
        return dtrain__huggingface_broken(model, "S6", NULL, "its weight_map is %s",
                                          (has & 2) == 0 ? "missing" : "empty");
    dtrain_status status = dtrain__huggingface_unique(model, &model->names, model->lines, sizeof *model->lines,
                                                      model->line_count, "weight_map");
    return status == DTRAIN_OK ? dtrain__huggingface_unique(model, &model->keys, model->pairs, sizeof *model->pairs,
                                                            model->pair_count, "metadata")
                               : status;
}

/* ---- the files ---- */

static int dtrain__huggingface_compare_lines(const void *left, const void *right)
{
    const dtrain__huggingface_line *const *a = (const dtrain__huggingface_line *const *)left;
    const dtrain__huggingface_line *const *b = (const dtrain__huggingface_line *const *)right;
    return dtrain__safetensors_compare_text((*a)->file.text, (*a)->file.length, (*b)->file.text, (*b)->file.length);
}

/* Numbers the files in the order of their names, and gives each line of the map the number of its file. */
static dtrain_status dtrain__huggingface_number(dtrain_safetensors_model *model)
{
    size_t bytes = model->line_count * sizeof(dtrain__huggingface_line *), files = 1;
    dtrain__huggingface_line **sorted = (dtrain__huggingface_line **)dtrain__alloc(model->allocator, bytes);
    if (sorted == NULL)
        return dtrain__huggingface_memory(model);
    for (size_t i = 0; i < model->line_count; i++)
        sorted[i] = &model->lines[i];
    qsort(sorted, model->line_count, sizeof *sorted, dtrain__huggingface_compare_lines);
    for (size_t i = 1; i < model->line_count; i++)
        files += dtrain__huggingface_compare_lines(&sorted[i - 1], &sorted[i]) != 0;
    model->shards = (dtrain__huggingface_shard *)dtrain__alloc(model->allocator, files * sizeof *model->shards);
    for (size_t i = 0; i < model->line_count && model->shards != NULL; i++) {
        model->shard_count += i == 0 || dtrain__huggingface_compare_lines(&sorted[i - 1], &sorted[i]) != 0;
        sorted[i]->shard = model->shard_count - 1;
        model->shards[model->shard_count - 1].name = sorted[i]->file;
        model->shards[model->shard_count - 1].lines++;
    }
    dtrain__free(model->allocator, sorted);
    return model->shards != NULL ? DTRAIN_OK : dtrain__huggingface_memory(model);
}

/* Reports a tensor that a file holds and the index does not put there. */
static dtrain_status dtrain__huggingface_stray(const dtrain_safetensors_model *model, size_t shard)
{
    const dtrain_safetensors *file = model->shards[shard].file;
    size_t line;
    for (size_t i = 0; i < file->count; i++) {
        dtrain__names_text name = dtrain__names_at(&file->names, i);
        if (!dtrain__names_find(&model->names, name.text, name.length, &line))
            return dtrain__huggingface_broken(model, "S6", &name, "is in %.*s, but not in the index",
                                              (int)model->shards[shard].name.length, model->shards[shard].name.text);
        if (model->lines[line].shard != shard)
            return dtrain__huggingface_broken(model, "S6", &name, "is in %.*s, but the index says %.*s",
                                              (int)model->shards[shard].name.length, model->shards[shard].name.text,
                                              (int)model->lines[line].file.length, model->lines[line].file.text);
    }
    return DTRAIN_OK;
}

/* Checks the files against the map. */
static dtrain_status dtrain__huggingface_agree(dtrain_safetensors_model *model)
{
    uint64_t total = 0;
    for (size_t i = 0; i < model->line_count; i++) {
        const dtrain__huggingface_line *line = &model->lines[i];
        if (dtrain_safetensors_find(model->shards[line->shard].file, line->name.text, line->name.length) == NULL)
            return dtrain__huggingface_broken(model, "S6", &line->name, "is not in %.*s, where the index puts it",
                                              (int)line->file.length, line->file.text);
    }
    for (size_t i = 0; i < model->shard_count; i++) {
        const dtrain__huggingface_shard *shard = &model->shards[i];
        dtrain_status status = shard->file->count != shard->lines ? dtrain__huggingface_stray(model, i) : DTRAIN_OK;
        if (status != DTRAIN_OK)
            return status;
        total += shard->file->file_bytes - shard->file->header_bytes;
    }
    if (model->has_total && model->total_size != total)
        dtrain__log(DTRAIN_LOG_WARN, "%s: total_size is %llu, but the files hold %llu bytes of tensors (S3)",
                    model->label, (unsigned long long)model->total_size, (unsigned long long)total);
    return DTRAIN_OK;
}

static dtrain_status dtrain__huggingface_open_shards(dtrain_safetensors_model *model, int directory,
                                                     const dtrain_safetensors_desc *desc)
{
    for (size_t i = 0; i < model->shard_count; i++) {
        dtrain__huggingface_shard *shard = &model->shards[i];
        dtrain_status status =
            dtrain__safetensors_open_at(&shard->file, directory, shard->name.text, desc, shard->name.text);
        if (status != DTRAIN_OK)
            return status;
        shard->first = model->count;
        model->count += shard->file->count;
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__huggingface_open_index(dtrain_safetensors_model *model, int directory, const char *name,
                                                    const dtrain_safetensors_desc *desc)
{
    dtrain_status status = dtrain__file_read_all(directory, name, DTRAIN__SAFETENSORS_HEADER_MOST, model->allocator,
                                                 &model->index, &model->index_bytes, "safetensors_model_open");
    if (status == DTRAIN_OK)
        status = dtrain__huggingface_index(model);
    if (status == DTRAIN_OK)
        status = dtrain__huggingface_number(model);
    if (status == DTRAIN_OK)
        status = dtrain__huggingface_open_shards(model, directory, desc);
    return status == DTRAIN_OK ? dtrain__huggingface_agree(model) : status;
}

static dtrain_status dtrain__huggingface_open_one(dtrain_safetensors_model *model, int directory, const char *name,
                                                  const dtrain_safetensors_desc *desc)
{
    model->shards = (dtrain__huggingface_shard *)dtrain__alloc(model->allocator, sizeof *model->shards);
    if (model->shards == NULL)
        return dtrain__huggingface_memory(model);
    model->shard_count = 1;
    dtrain_status status = dtrain__safetensors_open_at(&model->shards[0].file, directory, name, desc, model->label);
    model->count = status == DTRAIN_OK ? model->shards[0].file->count : 0;
    return status;
}

static dtrain_status dtrain__huggingface_open_path(dtrain_safetensors_model *model, const char *path,
                                                   const dtrain_safetensors_desc *desc)
{
    const char *name, *what = "safetensors_model_open";
    size_t length = strlen(path);
    dtrain_status status;
    int directory = dtrain__file_sys_open(DTRAIN__FILE_HERE, path, DTRAIN__OS_DIRECTORY);
    if (directory >= 0 && dtrain__file_is_there(directory, DTRAIN__HUGGINGFACE_FILE))
        status = dtrain__huggingface_open_one(model, directory, DTRAIN__HUGGINGFACE_FILE, desc);
    else if (directory >= 0 && dtrain__file_is_there(directory, DTRAIN__HUGGINGFACE_INDEX))
        status = dtrain__huggingface_open_index(model, directory, DTRAIN__HUGGINGFACE_INDEX, desc);
    else if (directory >= 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_IO, "%s: directory \"%s\" has neither %s nor %s, expected one of them",
                              what, path, DTRAIN__HUGGINGFACE_FILE, DTRAIN__HUGGINGFACE_INDEX);
    else if (length <= 5 || strcmp(path + length - 5, ".json") != 0)
        return dtrain__huggingface_open_one(model, DTRAIN__FILE_HERE, path, desc);
    else {
        status = dtrain__file_open_parent(&directory, &name, path, what);
        if (status == DTRAIN_OK)
            status = dtrain__huggingface_open_index(model, directory, name, desc);
    }
    dtrain__file_close(directory);
    return status;
}

DTRAIN_API dtrain_status dtrain_safetensors_model_open(dtrain_safetensors_model **model, const char *path,
                                                       const dtrain_safetensors_desc *desc)
{
    dtrain_allocator *allocator = desc != NULL ? desc->allocator : NULL;
    dtrain_safetensors_model *made;
    if (model == NULL || path == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_model_open: %s is NULL, expected %s",
                            model == NULL ? "model" : "path",
                            model == NULL ? "a pointer to set" : "the path of a file or directory");
    *model = NULL;
    made = (dtrain_safetensors_model *)dtrain__memory_owner(allocator, sizeof *made,
                                                            offsetof(dtrain_safetensors_model, own), &allocator);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_model_open: no memory to open \"%s\"", path);
    made->allocator = allocator;
    snprintf(made->label, sizeof made->label, "%.255s", path);
    dtrain_status status = dtrain__huggingface_open_path(made, path, desc);
    if (status == DTRAIN_OK)
        *model = made;
    else
        dtrain_safetensors_model_close(made);
    return status;
}

DTRAIN_API void dtrain_safetensors_model_close(dtrain_safetensors_model *model)
{
    if (model == NULL)
        return;
    dtrain_allocator *allocator = model->allocator;
    for (size_t i = 0; i < model->shard_count; i++)
        dtrain_safetensors_close(model->shards[i].file);
    dtrain__names_free(&model->names, allocator);
    dtrain__names_free(&model->keys, allocator);
    dtrain__free(allocator, model->shards);
    dtrain__free(allocator, model->pairs);
    dtrain__free(allocator, model->lines);
    dtrain__free(allocator, model->index);
    dtrain__free(allocator, model);
}

/* ---- lookup ---- */

DTRAIN_API size_t dtrain_safetensors_model_files(const dtrain_safetensors_model *model)
{
    return model != NULL ? model->shard_count : 0;
}

static dtrain_safetensors *dtrain__huggingface_file(const dtrain_safetensors_model *model, size_t i)
{
    return model != NULL && i < model->shard_count ? model->shards[i].file : NULL;
}

DTRAIN_API size_t dtrain_safetensors_model_count(const dtrain_safetensors_model *model)
{
    return model != NULL ? model->count : 0;
}

DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_model_tensor(const dtrain_safetensors_model *model,
                                                                            size_t i, dtrain_safetensors **file)
{
    size_t low = 0, high = model != NULL ? model->shard_count : 0;
    if (file != NULL)
        *file = NULL;
    if (model == NULL || i >= model->count)
        return NULL;
    while (high - low > 1) { /* the last file that starts at or before i; empty ones start where the next does */
        size_t middle = low + (high - low) / 2;
        if (model->shards[middle].first <= i)
            low = middle;
        else
            high = middle;
    }
    if (file != NULL)
        *file = model->shards[low].file;
    return dtrain_safetensors_tensor_at(model->shards[low].file, i - model->shards[low].first);
}

static const dtrain_safetensors_tensor *dtrain__huggingface_find(const dtrain_safetensors_model *model,
                                                                 const char *name, size_t length,
                                                                 dtrain_safetensors **file)
{
    size_t line, shard = 0;
    if (model->index != NULL) {
        if (!dtrain__names_find(&model->names, name, length, &line))
            return NULL;
        shard = model->lines[line].shard;
    }
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(model->shards[shard].file, name, length);
    if (file != NULL)
        *file = tensor != NULL ? model->shards[shard].file : NULL;
    return tensor;
}

static const dtrain_safetensors_pair *dtrain__huggingface_pair(const dtrain_safetensors_model *model, const char *key,
                                                               size_t length)
{
    size_t pair;
    if (model->index == NULL)
        return dtrain__safetensors_metadata_find(model->shards[0].file, key, length);
    return dtrain__names_find(&model->keys, key, length, &pair) ? &model->pairs[pair] : NULL;
}

DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_model_find(const dtrain_safetensors_model *model,
                                                                          const char *name, size_t length,
                                                                          dtrain_safetensors **file)
{
    if (file != NULL)
        *file = NULL;
    if (model == NULL || name == NULL)
        return NULL;
    const dtrain_safetensors_tensor *tensor = dtrain__huggingface_find(model, name, length, file);
    const dtrain_safetensors_pair *tied = tensor == NULL ? dtrain__huggingface_pair(model, name, length) : NULL;
    return tied != NULL ? dtrain__huggingface_find(model, tied->value, tied->value_length, file) : tensor;
}

DTRAIN_API size_t dtrain_safetensors_model_metadata_count(const dtrain_safetensors_model *model)
{
    if (model == NULL)
        return 0;
    return model->index != NULL ? model->pair_count : dtrain__safetensors_metadata_count(model->shards[0].file);
}

DTRAIN_API const dtrain_safetensors_pair *dtrain_safetensors_model_metadata(const dtrain_safetensors_model *model,
                                                                            size_t i)
{
    if (model == NULL || i >= dtrain_safetensors_model_metadata_count(model))
        return NULL;
    return model->index != NULL ? &model->pairs[i] : dtrain__safetensors_metadata(model->shards[0].file, i);
}

#endif
