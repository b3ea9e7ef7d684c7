/* ---- >>index-text ----
 * Writes and reads the JSON of an index; a text read may come from anybody. Members come in any order. Unknown members
 * that are no settings are skipped. A member that comes twice, or a needed one that is missing, is an error. Numbers
 * are whole and below 2^64, except in settings. */
#ifndef DTRAIN__INDEX_TEXT
#define DTRAIN__INDEX_TEXT
#include "index.c"

#define DTRAIN__INDEX_FORMAT "dtrain checkpoint"
#define DTRAIN__INDEX_VERSION 1

/* ---- writing ---- */

/* Prints settings. Those of a group follow each other; they are members of an object of the group's name. */
static void dtrain__index_print_settings(dtrain__json_writer *json, const dtrain__index *index)
{
    const char *last = ""; /* the open group with its point */
    size_t open = 0;
    for (size_t i = 0; i < index->setting_count; i++) {
        const char *key = index->texts + index->settings[i].key, *value = index->texts + index->settings[i].value;
        const char *point = strchr(key, '.');
        size_t group = point != NULL ? (size_t)(point - key) + 1 : 0;
        int again = group == open && memcmp(key, last, group) == 0;
        if (!again && open > 0)
            dtrain__json_end(json);
        if (!again && group > 0) {
            dtrain__json_write_key(json, key, group - 1);
            dtrain__json_begin(json, 1);
        }
        last = key;
        open = group;
        dtrain__json_write_key(json, key + group, strlen(key + group));
        if (dtrain__index_is_number(value))
            dtrain__json_write_word(json, value);
        else
            dtrain__json_write_string(json, value, strlen(value));
    }
    if (open > 0)
        dtrain__json_end(json);
}

static void dtrain__index_print_facts(dtrain__json_writer *json, const dtrain__index_facts *facts)
{
    dtrain__json_member_text(json, "format", DTRAIN__INDEX_FORMAT);
    dtrain__json_member_u64(json, "version", DTRAIN__INDEX_VERSION);
    dtrain__json_member_u64(json, "nonce", facts->id.nonce);
    dtrain__json_member_u64(json, "counter", facts->id.counter);
    dtrain__json_member_u64(json, "step", facts->step);
    if (facts->branch > 0)
        dtrain__json_member_u64(json, "branch", facts->branch);
    dtrain__json_member_u64(json, "world_size", facts->world_size);
    dtrain__json_member_u64(json, "seed", facts->seed);
    dtrain__json_member_u64(json, "random_index", facts->random_index);
}

static void dtrain__index_print_hashed(dtrain__json_writer *json, const dtrain__index *index,
                                       const dtrain__index_hashed *file)
{
    dtrain__json_member_text(json, "name", index->texts + file->name);
    dtrain__json_member_u64(json, "header_bytes", file->header_bytes);
    dtrain__json_member_u64(json, "header_hash", file->header_hash);
    dtrain__json_member_u64(json, "data_bytes", file->data_bytes);
}

static void dtrain__index_print_files(dtrain__json_writer *json, const dtrain__index *index)
{
    dtrain__json_member(json, "files");
    dtrain__json_begin(json, 0);
    for (size_t i = 0; i < index->file_count; i++) {
        const dtrain__index_file *file = &index->files[i];
        dtrain__json_begin(json, 1);
        dtrain__json_member_u64(json, "rank", (uint64_t)file->rank);
        dtrain__index_print_hashed(json, index, &file->data);
        dtrain__json_member(json, "hashes");
        dtrain__json_begin(json, 1);
        dtrain__index_print_hashed(json, index, &file->hashes);
        dtrain__json_member(json, "blocks");
        dtrain__json_begin(json, 0);
        for (size_t k = 0; k < file->block_count; k++)
            dtrain__json_write_u64(json, index->numbers[file->blocks + k]);
        dtrain__json_end(json);
        dtrain__json_end(json);
        dtrain__json_end(json);
    }
    dtrain__json_end(json);
}

static void dtrain__index_print_piece(dtrain__json_writer *json, const dtrain__index *index,
                                      const dtrain__index_tensor *tensor, const dtrain__index_piece *piece)
{
    size_t ndim = (size_t)tensor->ndim;
    dtrain__region region;
    dtrain__index_region(index, tensor, piece, &region);
    dtrain__json_begin(json, 1);
    dtrain__json_member_u64(json, "file", piece->file);
    if (piece->number != DTRAIN__INDEX_NONE)
        dtrain__json_member_u64(json, "number", piece->number);
    if (piece->box != DTRAIN__INDEX_NONE) {
        dtrain__json_member(json, "begin");
        dtrain__json_write_sizes(json, region.begin, ndim);
        dtrain__json_member(json, "size");
        dtrain__json_write_sizes(json, region.size, ndim);
    }
    if (piece->at > 0 || piece->count < dtrain__pieces_product(region.size, 0, region.ndim)) {
        dtrain__json_member_u64(json, "at", piece->at);
        dtrain__json_member_u64(json, "count", piece->count);
    }
    if (piece->copy > 0)
        dtrain__json_member_u64(json, "copy", piece->copy);
    dtrain__json_end(json);
}

static void dtrain__index_print_tensors(dtrain__json_writer *json, const dtrain__index *index)
{
    dtrain__json_member(json, "tensors");
    dtrain__json_begin(json, 1);
    for (size_t i = 0; i < index->tensor_count; i++) {
        const dtrain__index_tensor *tensor = &index->tensors[i];
        dtrain__json_write_key(json, dtrain__index_name(index, tensor), tensor->name_length);
        dtrain__json_begin(json, 1);
        dtrain__json_member_text(json, "dtype", dtrain_dtype_name(tensor->dtype));
        dtrain__json_member(json, "shape");
        dtrain__json_write_sizes(json, tensor->shape, (size_t)tensor->ndim);
        dtrain__json_member(json, "pieces");
        dtrain__json_begin(json, 0);
        for (size_t k = tensor->first; k < tensor->first + tensor->count; k++)
            dtrain__index_print_piece(json, index, tensor, &index->pieces[k]);
        dtrain__json_end(json);
        dtrain__json_end(json);
    }
    dtrain__json_end(json);
}

static void dtrain__index_print_now(dtrain__json_writer *json, const dtrain__index *index)
{
    dtrain__json_begin(json, 1);
    dtrain__index_print_facts(json, &index->facts);
    dtrain__index_print_settings(json, index);
    dtrain__json_member(json, "values");
    dtrain__json_begin(json, 1);
    for (size_t i = 0; i < index->value_count; i++) {
        const dtrain__index_value *value = &index->values[i];
        dtrain__json_write_key(json, index->texts + value->key, value->key_length);
        dtrain__json_write_string(json, index->texts + value->value, value->value_length);
    }
    dtrain__json_end(json);
    dtrain__index_print_files(json, index);
    dtrain__index_print_tensors(json, index);
    dtrain__json_end(json);
}

/* Prints a settled index to *text, memory of the index's allocator that grows. */
static dtrain_status dtrain__index_print(const dtrain__index *index, char **text, size_t *bytes)
{
    dtrain__json_writer json;
    dtrain__json_write_start(&json, NULL, 0);
    dtrain__index_print_now(&json, index);
    if (json.broken)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "checkpoint: a name, key or value is not UTF-8: give UTF-8 texts");
    *bytes = json.bytes - 1 + DTRAIN__INDEX_TAIL; /* the tail replaces the last brace */
    char *larger = (char *)dtrain__memory_grow(index->allocator, *text, 1, *bytes, 1);
    if (larger == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for an index of %zu bytes", *bytes);
    *text = larger;
    dtrain__json_write_start(&json, larger, dtrain__memory_bytes(larger));
    dtrain__index_print_now(&json, index);
    snprintf(larger + json.bytes - 1, DTRAIN__INDEX_TAIL + 1, ",\"hash\":\"%016llx\"}",
             (unsigned long long)dtrain__xxh64_of(larger, json.bytes - 1, 0));
    return DTRAIN_OK;
}

/* ---- reading ----
 * Functions that read return a value, or 0 after an error. The first error stays in the parser, and ends reading. */

typedef struct dtrain__index_parser {
    dtrain__index *index;
    dtrain__json_reader json;
    size_t base_file; /* number of the first file of this text */
    dtrain_status status;
} dtrain__index_parser;

static DTRAIN__NOINLINE void dtrain__index_bad(dtrain__index_parser *parser, size_t offset, const char *what)
{
    if (parser->status == DTRAIN_OK)
        parser->status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint index \"%s\", byte %zu: %s",
                                      parser->index->where, offset, what);
}

/* Reads the next token, which must be of a kind; `what` says what was expected. Returns 0 after an error. */
static DTRAIN__NOINLINE int dtrain__index_expect(dtrain__index_parser *parser, dtrain__json_token *token,
                                                 dtrain__json_kind kind, const char *what)
{
    if (parser->status == DTRAIN_OK && dtrain__json_next(&parser->json, token) != kind)
        dtrain__index_bad(parser, parser->json.offset, parser->json.error != NULL ? parser->json.error : what);
    return parser->status == DTRAIN_OK;
}

/* Reads a whole number of at most `most`. */
static uint64_t dtrain__index_u64(dtrain__index_parser *parser, uint64_t most)
{
    dtrain__json_token token;
    uint64_t value = 0;
    if (dtrain__index_expect(parser, &token, DTRAIN__JSON_NUMBER, "expected a number") &&
        (!dtrain__json_u64(&parser->json, &token, &value) || value > most))
        dtrain__index_bad(parser, token.begin, "not a whole number, or too large a one");
    return parser->status == DTRAIN_OK ? value : 0;
}

/* Keeps the text of a STRING or KEY, and returns its place. A name must not be empty or have a zero byte. */
static size_t dtrain__index_keep(dtrain__index_parser *parser, const dtrain__json_token *token, int is_name,
                                 size_t *length)
{
    dtrain__index *index = parser->index;
    size_t at = index->text_bytes, most = token->end - token->begin; /* unescaping never makes a text longer */
    *length = 0;
    if (!DTRAIN__INDEX_ROOM(index->allocator, index->texts, at, most + 1)) {
        parser->status = DTRAIN_ERR_MEMORY;
        return 0;
    }
    *length = dtrain__json_string(&parser->json, token, index->texts + at, most);
    index->texts[at + *length] = '\0';
    index->text_bytes += *length + 1;
    if (is_name && (*length == 0 || memchr(index->texts + at, 0, *length) != NULL))
        dtrain__index_bad(parser, token->begin, "an empty name, or one with a zero byte");
    return at;
}

/* Reads a string and keeps it. */
static size_t dtrain__index_string(dtrain__index_parser *parser, int is_name, size_t *length)
{
    dtrain__json_token token;
    int is_string = dtrain__index_expect(parser, &token, DTRAIN__JSON_STRING, "expected a text");
    return is_string ? dtrain__index_keep(parser, &token, is_name, length) : 0;
}

/* Opens the object or list that comes next. */
static void dtrain__index_open(dtrain__index_parser *parser, int is_object)
{
    dtrain__json_token token;
    dtrain__index_expect(parser, &token, is_object ? DTRAIN__JSON_OBJECT : DTRAIN__JSON_ARRAY,
                         is_object ? "expected an object" : "expected a list");
}

/* Reads the next key of the open object; returns 0 at its end. */
static int dtrain__index_next(dtrain__index_parser *parser, dtrain__json_token *key)
{
    if (parser->status == DTRAIN_OK && dtrain__json_next(&parser->json, key) == DTRAIN__JSON_ERROR)
        dtrain__index_bad(parser, parser->json.offset, parser->json.error);
    return parser->status == DTRAIN_OK && key->kind == DTRAIN__JSON_KEY;
}

/* Returns whether the open list has another value, which is read next. */
static int dtrain__index_more(dtrain__index_parser *parser)
{
    dtrain__json_reader before = parser->json;
    dtrain__json_token token;
    if (parser->status == DTRAIN_OK && dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_ERROR)
        dtrain__index_bad(parser, parser->json.offset, parser->json.error);
    if (parser->status != DTRAIN_OK || token.kind == DTRAIN__JSON_ARRAY_END)
        return 0;
    parser->json = before;
    return 1;
}

/* Takes an unknown member. A number or a text without escapes is a setting, an object is a group of settings. Others,
 * and texts too long for a setting, are skipped. group: the group's name, empty outside of one. */
static void dtrain__index_read_setting(dtrain__index_parser *parser, const dtrain__json_token *key, const char *group)
{
    char name[2 * DTRAIN__INDEX_SETTING] = "", value[DTRAIN__INDEX_SETTING] = "";
    const char *text = (const char *)parser->json.text;
    dtrain__json_token token;
    int length = snprintf(name, sizeof name, "%s%s", group, group[0] != '\0' ? "." : "");
    dtrain__json_kind kind = dtrain__json_next(&parser->json, &token);
    size_t bytes = token.end - token.begin;
    int fits = key->end - key->begin < DTRAIN__INDEX_SETTING && !key->escaped;
    int plain = (kind == DTRAIN__JSON_NUMBER || kind == DTRAIN__JSON_STRING) && bytes < sizeof value && !token.escaped;
    if (fits)
        memcpy(name + length, text + key->begin, key->end - key->begin);
    if (plain)
        memcpy(value, text + token.begin, bytes);
    if (fits && plain && dtrain__index_is_number(value) == (kind == DTRAIN__JSON_NUMBER)) {
        parser->status = dtrain__index_set(parser->index, name, value);
    } else if (fits && kind == DTRAIN__JSON_OBJECT && group[0] == '\0') {
        while (dtrain__index_next(parser, &token))
            dtrain__index_read_setting(parser, &token, name);
    } else {
        dtrain__json_skip(&parser->json, &token); /* the next token reports any error in it */
    }
}

/* Reads the key of the next known member of the open object. Returns its number in names, which a NULL ends, or -1 at
 * the object's end. *seen has a bit for each name, so that none comes twice. Unknown members are settings of the group
 * `settings`; if that is NULL, they are skipped. */
static int dtrain__index_member(dtrain__index_parser *parser, const char *const *names, uint32_t *seen,
                                const char *settings)
{
    dtrain__json_token token;
    while (dtrain__index_next(parser, &token)) {
        int which = 0;
        while (names[which] != NULL && !dtrain__json_is(&parser->json, &token, names[which]))
            which++;
        if (names[which] != NULL) {
            if (*seen >> which & 1)
                dtrain__index_bad(parser, token.begin, "a member that comes twice");
            *seen |= (uint32_t)1 << which;
            return which;
        }
        if (settings != NULL) {
            dtrain__index_read_setting(parser, &token, settings);
        } else {
            dtrain__json_next(&parser->json, &token);
            dtrain__json_skip(&parser->json, &token);
        }
    }
    return -1;
}

/* Reads a list of at most DTRAIN_MAX_DIMS sizes; returns their number. */
static int dtrain__index_sizes(dtrain__index_parser *parser, size_t sizes[DTRAIN_MAX_DIMS])
{
    int count = 0;
    dtrain__index_open(parser, 0);
    while (dtrain__index_more(parser))
        if (count == DTRAIN_MAX_DIMS)
            dtrain__index_bad(parser, parser->json.offset, "more than 8 dimensions");
        else
            sizes[count++] = (size_t)dtrain__index_u64(parser, SIZE_MAX - 1);
    return count;
}

/* ---- pieces and tensors ---- */

typedef struct dtrain__index_piece_read {
    dtrain__index_piece piece;
    size_t box[2][DTRAIN_MAX_DIMS]; /* begins and sizes */
    int ndim[2];
    uint32_t seen;
} dtrain__index_piece_read;

/* Checks a piece against its tensor and keeps it. */
static void dtrain__index_take_piece(dtrain__index_parser *parser, const dtrain__index_tensor *tensor,
                                     dtrain__index_piece_read *read)
{
    dtrain__index *index = parser->index;
    uint32_t seen = read->seen;
    size_t offset = parser->json.offset, elements = 1;
    int boxed = (seen >> 2 & 3) == 3;
    if (!(seen & 1))
        dtrain__index_bad(parser, offset, "a piece without its file");
    if ((seen >> 2 ^ seen >> 3) & 1 || (seen >> 4 ^ seen >> 5) & 1)
        dtrain__index_bad(parser, offset, "a piece with half of a box or range");
    if (boxed && (read->ndim[0] != tensor->ndim || read->ndim[1] != tensor->ndim))
        dtrain__index_bad(parser, offset, "a box of other dimensions than its tensor");
    for (int d = 0; d < tensor->ndim && parser->status == DTRAIN_OK; d++) {
        size_t begin = boxed ? read->box[0][d] : 0, size = boxed ? read->box[1][d] : tensor->shape[d];
        if (begin > tensor->shape[d] || size > tensor->shape[d] - begin)
            dtrain__index_bad(parser, offset, "a box that reaches beyond its tensor");
        elements *= size; /* no overflow: at most the tensor's, which were checked */
    }
    if (!(seen >> 4 & 1))
        read->piece.count = elements;
    if (read->piece.at > elements || read->piece.count > elements - read->piece.at)
        dtrain__index_bad(parser, offset, "a range that reaches beyond its box");
    if (read->piece.file > SIZE_MAX - 1 - parser->base_file || read->piece.copy > INT_MAX)
        dtrain__index_bad(parser, offset, "a number too large");
    read->piece.file += parser->base_file;
    read->piece.box = boxed ? index->number_count : DTRAIN__INDEX_NONE;
    for (int k = 0; k < 2 && boxed && parser->status == DTRAIN_OK; k++)
        parser->status = dtrain__index_add_sizes(index, read->box[k], tensor->ndim);
    if (parser->status == DTRAIN_OK)
        parser->status = DTRAIN__INDEX_ADD(index->allocator, index->pieces, index->piece_count, read->piece);
}

static void dtrain__index_read_piece(dtrain__index_parser *parser, const dtrain__index_tensor *tensor)
{
    static const char *const names[] = {"file", "number", "begin", "size", "at", "count", "copy", NULL};
    dtrain__index_piece_read read;
    size_t *numbers[] = {&read.piece.file,  &read.piece.number, NULL, NULL, &read.piece.at,
                         &read.piece.count, &read.piece.copy};
    int which;
    memset(&read, 0, sizeof read);
    read.piece.tensor = parser->index->tensor_count;
    read.piece.number = DTRAIN__INDEX_NONE;
    dtrain__index_open(parser, 1);
    while ((which = dtrain__index_member(parser, names, &read.seen, NULL)) >= 0)
        if (numbers[which] == NULL)
            read.ndim[which - 2] = dtrain__index_sizes(parser, read.box[which - 2]);
        else
            *numbers[which] = (size_t)dtrain__index_u64(parser, SIZE_MAX - 1);
    if (parser->status == DTRAIN_OK)
        dtrain__index_take_piece(parser, tensor, &read);
}

static dtrain_dtype dtrain__index_dtype(dtrain__index_parser *parser)
{
    dtrain__json_token token;
    dtrain_dtype dtype = (dtrain_dtype)0;
    if (dtrain__index_expect(parser, &token, DTRAIN__JSON_STRING, "the name of a dtype was expected") &&
        (dtrain_dtype_from_name(&dtype, (const char *)parser->json.text + token.begin, token.end - token.begin) !=
             DTRAIN_OK ||
         dtrain_dtype_bits(dtype) < 8))
        dtrain__index_bad(parser, token.begin, "no dtype of a byte or more");
    return dtype;
}

/* Reads a tensor, after its name. dtype and shape must stand before pieces, as the writer puts them. */
static void dtrain__index_read_tensor(dtrain__index_parser *parser, dtrain__index_tensor *tensor)
{
    static const char *const names[] = {"dtype", "shape", "pieces", NULL};
    size_t elements = 1;
    uint32_t seen = 0;
    int which;
    dtrain__index_open(parser, 1);
    while ((which = dtrain__index_member(parser, names, &seen, NULL)) >= 0)
        if (which == 0) {
            tensor->dtype = dtrain__index_dtype(parser);
        } else if (which == 1) {
            tensor->ndim = dtrain__index_sizes(parser, tensor->shape);
            for (int d = 0; d < tensor->ndim; d++)
                if (!dtrain__mul_size(elements, tensor->shape[d], &elements) || elements > SIZE_MAX / 64)
                    dtrain__index_bad(parser, parser->json.offset, "a shape that multiplies to more than memory");
        } else {
            if (seen != 7)
                dtrain__index_bad(parser, parser->json.offset, "pieces before dtype and shape");
            dtrain__index_open(parser, 0);
            while (dtrain__index_more(parser))
                dtrain__index_read_piece(parser, tensor);
        }
    if (seen != 7)
        dtrain__index_bad(parser, parser->json.offset, "a tensor without dtype, shape or pieces");
}

static void dtrain__index_read_tensors(dtrain__index_parser *parser)
{
    dtrain__index *index = parser->index;
    dtrain__json_token token;
    dtrain__index_open(parser, 1);
    while (dtrain__index_next(parser, &token)) {
        dtrain__index_tensor tensor;
        memset(&tensor, 0, sizeof tensor);
        tensor.name = dtrain__index_keep(parser, &token, 1, &tensor.name_length);
        dtrain__index_read_tensor(parser, &tensor);
        if (parser->status == DTRAIN_OK)
            parser->status = DTRAIN__INDEX_ADD(index->allocator, index->tensors, index->tensor_count, tensor);
    }
}

/* ---- files and values ---- */

/* Returns the number of blocks that hold this many bytes. */
static uint64_t dtrain__index_blocks(uint64_t bytes)
{
    return bytes / DTRAIN__INDEX_BLOCK + (bytes % DTRAIN__INDEX_BLOCK != 0);
}

/* Reads the object of a data file. of_hashes: reads the object in it of the file of hashes, whose blocks are hashed
 * here. */
static void dtrain__index_read_hashed(dtrain__index_parser *parser, dtrain__index_file *file, int of_hashes)
{
    static const char *const names[2][7] = {
        {"name", "header_bytes", "header_hash", "data_bytes", "rank", "hashes", NULL},
        {"name", "header_bytes", "header_hash", "data_bytes", "blocks", NULL, NULL}};
    dtrain__index *index = parser->index;
    dtrain__index_hashed *hashed = of_hashes ? &file->hashes : &file->data;
    uint64_t *numbers[] = {NULL, &hashed->header_bytes, &hashed->header_hash, &hashed->data_bytes, NULL, NULL};
    uint32_t seen = 0;
    int which;
    dtrain__index_open(parser, 1);
    while ((which = dtrain__index_member(parser, names[of_hashes], &seen, NULL)) >= 0)
        if (numbers[which] != NULL) {
            *numbers[which] = dtrain__index_u64(parser, UINT64_MAX);
        } else if (which == 0) {
            size_t offset = parser->json.offset, length = 0;
            hashed->name = dtrain__index_string(parser, 1, &length);
            if (parser->status == DTRAIN_OK && !dtrain__file_plain_name(index->texts + hashed->name, length))
                dtrain__index_bad(parser, offset, "a file's name with a directory or of another form");
        } else if (which == 5) {
            dtrain__index_read_hashed(parser, file, 1);
        } else if (!of_hashes) {
            file->rank = (int)dtrain__index_u64(parser, INT_MAX);
        } else {
            file->blocks = index->number_count;
            dtrain__index_open(parser, 0);
            while (dtrain__index_more(parser)) {
                uint64_t hash = dtrain__index_u64(parser, UINT64_MAX);
                if (parser->status == DTRAIN_OK)
                    parser->status = DTRAIN__INDEX_ADD(index->allocator, index->numbers, index->number_count, hash);
            }
            file->block_count = index->number_count - file->blocks;
        }
    if (seen != (of_hashes ? 31 : 63))
        dtrain__index_bad(parser, parser->json.offset,
                          of_hashes ? "hashes without one of their members" : "a file without one of its members");
}

static void dtrain__index_read_files(dtrain__index_parser *parser)
{
    dtrain__index *index = parser->index;
    dtrain__index_open(parser, 0);
    while (dtrain__index_more(parser)) {
        dtrain__index_file file;
        memset(&file, 0, sizeof file);
        file.holder = -1;
        dtrain__index_read_hashed(parser, &file, 0);
        if (file.data.data_bytes > UINT64_MAX / 2 ||
            file.hashes.data_bytes != 8 * dtrain__index_blocks(file.data.data_bytes) ||
            file.block_count != dtrain__index_blocks(file.hashes.data_bytes))
            dtrain__index_bad(parser, parser->json.offset, "a file with more or fewer hashes than blocks");
        if (parser->status == DTRAIN_OK)
            parser->status = DTRAIN__INDEX_ADD(index->allocator, index->files, index->file_count, file);
    }
}

static void dtrain__index_read_values(dtrain__index_parser *parser)
{
    dtrain__index *index = parser->index;
    dtrain__json_token token;
    dtrain__index_open(parser, 1);
    while (dtrain__index_next(parser, &token)) {
        dtrain__index_value value;
        value.key = dtrain__index_keep(parser, &token, 1, &value.key_length);
        value.value = dtrain__index_string(parser, 0, &value.value_length);
        if (parser->status == DTRAIN_OK && index->parts == 0) /* facts and values come from the first part */
            parser->status = DTRAIN__INDEX_ADD(index->allocator, index->values, index->value_count, value);
    }
}

/* ---- the whole ---- */

static void dtrain__index_read_format(dtrain__index_parser *parser)
{
    dtrain__json_token token;
    if (dtrain__index_expect(parser, &token, DTRAIN__JSON_STRING, "expected a text") &&
        !dtrain__json_is(&parser->json, &token, DTRAIN__INDEX_FORMAT))
        dtrain__index_bad(parser, token.begin, "not the format \"" DTRAIN__INDEX_FORMAT "\"");
}

static void dtrain__index_read_version(dtrain__index_parser *parser)
{
    uint64_t version = dtrain__index_u64(parser, UINT64_MAX);
    if (parser->status == DTRAIN_OK && version != DTRAIN__INDEX_VERSION)
        parser->status = dtrain__fail(
            NULL, DTRAIN_ERR_UNSUPPORTED,
            "checkpoint index \"%s\" is of version %llu, expected %d: read it with the dtrain that wrote it",
            parser->index->where, (unsigned long long)version, DTRAIN__INDEX_VERSION);
}

static void dtrain__index_read_top(dtrain__index_parser *parser, dtrain__index_facts *facts)
{
    static const char *const names[] = {"nonce",   "counter", "step",  "world_size", "seed", "random_index", "format",
                                        "version", "values",  "files", "tensors",    "hash", "branch",       NULL};
    uint64_t *numbers[] = {&facts->id.nonce,   &facts->id.counter, &facts->step,
                           &facts->world_size, &facts->seed,       &facts->random_index};
    const uint32_t needed = 0xf | 31 << 6;
    dtrain__json_token token;
    uint32_t seen = 0;
    int which;
    dtrain__index_open(parser, 1);
    while ((which = dtrain__index_member(parser, names, &seen, "")) >= 0)
        switch (which) {
        case 6: dtrain__index_read_format(parser); break;
        case 7: dtrain__index_read_version(parser); break;
        case 8: dtrain__index_read_values(parser); break;
        case 9: dtrain__index_read_files(parser); break;
        case 10: dtrain__index_read_tensors(parser); break;
        case 11: /* hash: checked before */
            dtrain__json_next(&parser->json, &token);
            dtrain__json_skip(&parser->json, &token);
            break;
        case 12: facts->branch = dtrain__index_u64(parser, UINT32_MAX); break;
        default: *numbers[which] = dtrain__index_u64(parser, which == 3 ? INT_MAX : UINT64_MAX);
        }
    dtrain__index_expect(parser, &token, DTRAIN__JSON_END, "more text after the index");
    if ((seen & needed) != needed)
        dtrain__index_bad(parser, parser->json.offset, "the index lacks one of its members");
}

/* Checks that the last member is the hash of what comes before it. */
static dtrain_status dtrain__index_check_hash(const char *where, const char *text, size_t bytes)
{
    char tail[DTRAIN__INDEX_TAIL + 1];
    if (bytes <= DTRAIN__INDEX_TAIL)
        return dtrain__fail(
            NULL, DTRAIN_ERR_CORRUPT,
            "checkpoint index \"%s\" has %zu bytes, too few for an index: it was cut; restore it, or load another step",
            where, bytes);
    snprintf(tail, sizeof tail, ",\"hash\":\"%016llx\"}",
             (unsigned long long)dtrain__xxh64_of(text, bytes - DTRAIN__INDEX_TAIL, 0));
    if (memcmp(tail, text + bytes - DTRAIN__INDEX_TAIL, DTRAIN__INDEX_TAIL) == 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                        "checkpoint index \"%s\": its %zu bytes do not have the hash that ends it: it was damaged or "
                        "cut; restore it, or load another step",
                        where, bytes);
}

/* Adds a text, of a part or of a whole, to an index. `where` names it in error texts. Every part must be of the same
 * save. */
static dtrain_status dtrain__index_read(dtrain__index *index, const char *where, const char *text, size_t bytes)
{
    dtrain__index_parser parser;
    dtrain__index_facts facts;
    size_t first_piece = index->piece_count;
    dtrain_status status = dtrain__index_check_hash(where, text, bytes);
    if (status != DTRAIN_OK)
        return status;
    index->where = where;
    memset(&parser, 0, sizeof parser);
    memset(&facts, 0, sizeof facts);
    parser.index = index;
    parser.base_file = index->file_count;
    dtrain__json_open(&parser.json, text, bytes);
    dtrain__index_read_top(&parser, &facts);
    for (size_t i = first_piece; i < index->piece_count; i++)
        if (index->pieces[i].file >= index->file_count)
            dtrain__index_bad(&parser, bytes, "a piece in a file that is not listed");
    if (parser.status != DTRAIN_OK)
        return parser.status;
    if (index->parts > 0 && (!dtrain__index_same_save(&facts.id, &index->facts.id) || facts.step != index->facts.step ||
                             facts.world_size != index->facts.world_size))
        return dtrain__fail(NULL, DTRAIN_ERR_MISMATCH,
                            "checkpoint: part \"%s\" is of step %llu on %llu ranks, the first part of step %llu on "
                            "%llu: save the same step on every rank",
                            where, (unsigned long long)facts.step, (unsigned long long)facts.world_size,
                            (unsigned long long)index->facts.step, (unsigned long long)index->facts.world_size);
    if (index->parts++ == 0)
        index->facts = facts;
    return DTRAIN_OK;
}

/* Adds the text of a file of at most `most` bytes. */
static dtrain_status dtrain__index_read_file(dtrain__index *index, int directory, const char *name, uint64_t most,
                                             uint64_t *bytes_read)
{
    void *text = NULL;
    size_t bytes = 0;
    dtrain_status status = dtrain__file_read_all(directory, name, most, index->allocator, &text, &bytes, "checkpoint");
    if (status == DTRAIN_OK)
        status = dtrain__index_read(index, name, (const char *)text, bytes);
    dtrain__free(index->allocator, text);
    *bytes_read += bytes;
    return status;
}

/* Reads the branch of an index from its first bytes, where its facts are. *branch: 0 if it has none, or is not there.
 * Returns 0 if the system cannot read it. */
static int dtrain__index_read_branch(int directory, const char *name, uint64_t *branch)
{
    char text[1024];
    dtrain__json_reader json;
    dtrain__json_token key, value;
    int fd = dtrain__file_sys_open(directory, name, DTRAIN__OS_READ), found = 0, absent = fd < 0 && errno == ENOENT;
    ssize_t bytes = fd >= 0 ? dtrain__file_sys_pread(fd, text, sizeof text, 0) : -1;
    dtrain__file_close(fd);
    dtrain__json_open(&json, text, bytes > 0 ? (size_t)bytes : 0);
    *branch = 0;
    int more = dtrain__json_next(&json, &key) == DTRAIN__JSON_OBJECT;
    while (more && !found && dtrain__json_next(&json, &key) == DTRAIN__JSON_KEY) {
        dtrain__json_kind kind = dtrain__json_next(&json, &value);
        more = kind == DTRAIN__JSON_NUMBER || kind == DTRAIN__JSON_STRING;
        found = more && dtrain__json_is(&json, &key, "branch") && dtrain__json_u64(&json, &value, branch);
    }
    return bytes >= 0 || absent;
}

#endif
