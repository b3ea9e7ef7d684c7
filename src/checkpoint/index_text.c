/* ---- >>index-text ----
 * The JSON of an index: written, and read from whoever wrote it. Members come in any order, those that are not known
 * and are no settings are passed over; a member that comes twice, or is missing where it is needed, is an error.
 * Numbers are whole and below 2^64 but for settings. */
#ifndef DTRAIN__INDEX_TEXT
#define DTRAIN__INDEX_TEXT
#include "index.c"

#define DTRAIN__INDEX_FORMAT "dtrain checkpoint"
#define DTRAIN__INDEX_VERSION 1

/* ---- writing ---- */

static void dtrain__index_key(dtrain__json_writer *json, const char *key)
{
    dtrain__json_write_key(json, key, strlen(key));
}

static DTRAIN__NOINLINE void dtrain__index_put(dtrain__json_writer *json, const char *key, uint64_t value)
{
    dtrain__index_key(json, key);
    dtrain__json_write_u64(json, value);
}

static void dtrain__index_put_text(dtrain__json_writer *json, const char *key, const char *text)
{
    dtrain__index_key(json, key);
    dtrain__json_write_string(json, text, strlen(text));
}

static void dtrain__index_put_sizes(dtrain__json_writer *json, const size_t *sizes, size_t count)
{
    dtrain__json_begin(json, 0);
    for (size_t i = 0; i < count; i++)
        dtrain__json_write_u64(json, sizes[i]);
    dtrain__json_end(json);
}

/* Prints settings: those of a group, which are told one after the other, as members of an object of its name. */
static void dtrain__index_print_settings(dtrain__json_writer *json, const dtrain__index *index)
{
    const char *last = ""; /* the group that is open, and its point */
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
    dtrain__index_put_text(json, "format", DTRAIN__INDEX_FORMAT);
    dtrain__index_put(json, "version", DTRAIN__INDEX_VERSION);
    dtrain__index_put(json, "nonce", facts->id.nonce);
    dtrain__index_put(json, "counter", facts->id.counter);
    dtrain__index_put(json, "step", facts->step);
    dtrain__index_put(json, "world_size", facts->world_size);
    dtrain__index_put(json, "seed", facts->seed);
    dtrain__index_put(json, "random_index", facts->random_index);
}

static void dtrain__index_print_hashed(dtrain__json_writer *json, const dtrain__index *index,
                                       const dtrain__index_hashed *file)
{
    dtrain__index_put_text(json, "name", index->texts + file->name);
    dtrain__index_put(json, "header_bytes", file->header_bytes);
    dtrain__index_put(json, "header_hash", file->header_hash);
    dtrain__index_put(json, "data_bytes", file->data_bytes);
}

static void dtrain__index_print_files(dtrain__json_writer *json, const dtrain__index *index)
{
    dtrain__index_key(json, "files");
    dtrain__json_begin(json, 0);
    for (size_t i = 0; i < index->file_count; i++) {
        const dtrain__index_file *file = &index->files[i];
        dtrain__json_begin(json, 1);
        dtrain__index_put(json, "rank", (uint64_t)file->rank);
        dtrain__index_print_hashed(json, index, &file->data);
        dtrain__index_key(json, "hashes");
        dtrain__json_begin(json, 1);
        dtrain__index_print_hashed(json, index, &file->hashes);
        dtrain__index_key(json, "blocks");
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
    dtrain__index_put(json, "file", piece->file);
    if (piece->number != DTRAIN__INDEX_NONE)
        dtrain__index_put(json, "number", piece->number);
    if (piece->box != DTRAIN__INDEX_NONE) {
        dtrain__index_key(json, "begin");
        dtrain__index_put_sizes(json, region.begin, ndim);
        dtrain__index_key(json, "size");
        dtrain__index_put_sizes(json, region.size, ndim);
    }
    if (piece->at > 0 || piece->count < dtrain__pieces_product(region.size, 0, region.ndim)) {
        dtrain__index_put(json, "at", piece->at);
        dtrain__index_put(json, "count", piece->count);
    }
    if (piece->copy > 0)
        dtrain__index_put(json, "copy", piece->copy);
    dtrain__json_end(json);
}

static void dtrain__index_print_tensors(dtrain__json_writer *json, const dtrain__index *index)
{
    dtrain__index_key(json, "tensors");
    dtrain__json_begin(json, 1);
    for (size_t i = 0; i < index->tensor_count; i++) {
        const dtrain__index_tensor *tensor = &index->tensors[i];
        dtrain__json_write_key(json, dtrain__index_name(index, tensor), tensor->name_length);
        dtrain__json_begin(json, 1);
        dtrain__index_put_text(json, "dtype", dtrain_dtype_name(tensor->dtype));
        dtrain__index_key(json, "shape");
        dtrain__index_put_sizes(json, tensor->shape, (size_t)tensor->ndim);
        dtrain__index_key(json, "pieces");
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
    dtrain__index_key(json, "values");
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

/* Prints a settled index into memory of its allocator, *text, which grows. */
static dtrain_status dtrain__index_print(const dtrain__index *index, char **text, size_t *bytes)
{
    dtrain__json_writer json;
    dtrain__json_write_start(&json, NULL, 0);
    dtrain__index_print_now(&json, index);
    if (json.broken)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "checkpoint: a name, key or value is not UTF-8");
    *bytes = json.bytes - 1 + DTRAIN__INDEX_TAIL; /* the tail takes the place of the last brace */
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

/* ---- reading ---- */

typedef struct dtrain__index_parser {
    dtrain__index *index;
    dtrain__json_reader json;
    size_t base_file; /* files of this text are numbered from here on */
} dtrain__index_parser;

static DTRAIN__NOINLINE dtrain_status dtrain__index_bad(const dtrain__index_parser *parser, size_t offset,
                                                        const char *what)
{
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint index \"%s\", byte %zu: %s", parser->index->where, offset,
                        what);
}

/* Reads the next token, which must be of a kind; `what` says what is expected. */
static DTRAIN__NOINLINE dtrain_status dtrain__index_expect(dtrain__index_parser *parser, dtrain__json_token *token,
                                                           dtrain__json_kind kind, const char *what)
{
    if (dtrain__json_next(&parser->json, token) == kind)
        return DTRAIN_OK;
    return dtrain__index_bad(parser, parser->json.offset, parser->json.error != NULL ? parser->json.error : what);
}

/* Reads a whole number of at most `most`. */
static dtrain_status dtrain__index_u64(dtrain__index_parser *parser, uint64_t most, uint64_t *value)
{
    dtrain__json_token token;
    dtrain_status status = dtrain__index_expect(parser, &token, DTRAIN__JSON_NUMBER, "a number was expected");
    if (status == DTRAIN_OK && (!dtrain__json_u64(&parser->json, &token, value) || *value > most))
        status = dtrain__index_bad(parser, token.begin, "not a whole number, or too large a one");
    return status;
}

static dtrain_status dtrain__index_size(dtrain__index_parser *parser, size_t *value)
{
    uint64_t number = 0;
    dtrain_status status = dtrain__index_u64(parser, SIZE_MAX - 1, &number);
    *value = (size_t)number;
    return status;
}

/* Keeps the text of a STRING or KEY; zero bytes are refused where it is a name. */
static dtrain_status dtrain__index_keep(dtrain__index_parser *parser, const dtrain__json_token *token, int is_name,
                                        size_t *at, size_t *length)
{
    dtrain__index *index = parser->index;
    size_t most = token->end - token->begin; /* unescaped, a text is no longer */
    if (!DTRAIN__INDEX_ROOM(index, texts, text_bytes, most + 1))
        return DTRAIN_ERR_MEMORY;
    *at = index->text_bytes;
    *length = dtrain__json_string(&parser->json, token, index->texts + *at, most);
    index->texts[*at + *length] = '\0';
    index->text_bytes += *length + 1;
    if (is_name && (*length == 0 || memchr(index->texts + *at, 0, *length) != NULL))
        return dtrain__index_bad(parser, token->begin, "an empty name, or one with a zero byte");
    return DTRAIN_OK;
}

/* Reads a string and keeps it. */
static dtrain_status dtrain__index_string(dtrain__index_parser *parser, int is_name, size_t *at, size_t *length)
{
    dtrain__json_token token;
    dtrain_status status = dtrain__index_expect(parser, &token, DTRAIN__JSON_STRING, "a text was expected");
    return status == DTRAIN_OK ? dtrain__index_keep(parser, &token, is_name, at, length) : status;
}

/* What an object's end says: whether the text itself is at fault. */
static dtrain_status dtrain__index_ended(dtrain__index_parser *parser, dtrain_status status)
{
    int bad = status == DTRAIN_OK && parser->json.error != NULL;
    return bad ? dtrain__index_bad(parser, parser->json.offset, parser->json.error) : status;
}

/* Calls `member` for each member of the object that comes next; the bits of `seen` are the members that it knows, so
 * that none comes twice. which: -1 for one that it has not taken, -2 for one that it has, and may take again. */
typedef dtrain_status (*dtrain__index_member)(dtrain__index_parser *parser, const dtrain__json_token *key, void *out,
                                              int *which);

static dtrain_status dtrain__index_object(dtrain__index_parser *parser, dtrain__index_member member, void *out,
                                          uint32_t *seen)
{
    dtrain__json_token token;
    *seen = 0;
    dtrain_status status = dtrain__index_expect(parser, &token, DTRAIN__JSON_OBJECT, "an object was expected");
    while (status == DTRAIN_OK && dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_KEY) {
        size_t begin = token.begin;
        int which = -1;
        status = member(parser, &token, out, &which);
        if (status == DTRAIN_OK && which == -1) { /* not known: passed over */
            dtrain__json_next(&parser->json, &token);
            dtrain__json_skip(&parser->json, &token);
        } else if (status == DTRAIN_OK && which >= 0 && (*seen >> which & 1)) {
            status = dtrain__index_bad(parser, begin, "a member that comes twice");
        } else if (status == DTRAIN_OK && which >= 0) {
            *seen |= (uint32_t)1 << which;
        }
    }
    return dtrain__index_ended(parser, status);
}

/* Finds a key among names; -1: none. */
static int dtrain__index_which(const dtrain__index_parser *parser, const dtrain__json_token *key,
                               const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (dtrain__json_is(&parser->json, key, names[i]))
            return i;
    return -1;
}

/* Calls `element` for each value of the array that comes next, with its first token. */
typedef dtrain_status (*dtrain__index_element)(dtrain__index_parser *parser, void *out);

static dtrain_status dtrain__index_array(dtrain__index_parser *parser, dtrain__index_element element, void *out)
{
    dtrain__json_token token;
    dtrain_status status = dtrain__index_expect(parser, &token, DTRAIN__JSON_ARRAY, "a list was expected");
    while (status == DTRAIN_OK) {
        dtrain__json_reader before = parser->json;
        dtrain__json_kind kind = dtrain__json_next(&parser->json, &token);
        if (kind == DTRAIN__JSON_ARRAY_END)
            break;
        if (kind == DTRAIN__JSON_ERROR)
            return dtrain__index_bad(parser, parser->json.offset, parser->json.error);
        parser->json = before;
        status = element(parser, out);
    }
    return status;
}

/* A list of at most DTRAIN_MAX_DIMS sizes. */
typedef struct dtrain__index_sizes {
    size_t sizes[DTRAIN_MAX_DIMS];
    int count;
} dtrain__index_sizes;

static dtrain_status dtrain__index_one_size(dtrain__index_parser *parser, void *out)
{
    dtrain__index_sizes *sizes = (dtrain__index_sizes *)out;
    if (sizes->count == DTRAIN_MAX_DIMS)
        return dtrain__index_bad(parser, parser->json.offset, "more than 8 dimensions");
    return dtrain__index_size(parser, &sizes->sizes[sizes->count++]);
}

static dtrain_status dtrain__index_one_number(dtrain__index_parser *parser, void *out)
{
    uint64_t number;
    dtrain_status status = dtrain__index_u64(parser, UINT64_MAX, &number);
    if (status == DTRAIN_OK && dtrain__index_number(parser->index, number) == DTRAIN__INDEX_NONE)
        return DTRAIN_ERR_MEMORY;
    ++*(size_t *)out;
    return status;
}

/* ---- pieces and tensors ---- */

typedef struct dtrain__index_piece_read {
    dtrain__index_piece piece;
    dtrain__index_sizes begin, size;
} dtrain__index_piece_read;

static dtrain_status dtrain__index_piece_member(dtrain__index_parser *parser, const dtrain__json_token *key, void *out,
                                                int *which)
{
    static const char *const names[] = {"file", "number", "begin", "size", "at", "count", "copy"};
    dtrain__index_piece_read *read = (dtrain__index_piece_read *)out;
    size_t *numbers[] = {&read->piece.file,  &read->piece.number, NULL, NULL, &read->piece.at,
                         &read->piece.count, &read->piece.copy};
    *which = dtrain__index_which(parser, key, names, 7);
    if (*which < 0)
        return DTRAIN_OK;
    if (*which == 2 || *which == 3) {
        dtrain__index_sizes *sizes = *which == 2 ? &read->begin : &read->size;
        sizes->count = 0;
        return dtrain__index_array(parser, dtrain__index_one_size, sizes);
    }
    return dtrain__index_size(parser, numbers[*which]);
}

/* Checks a piece against its tensor and keeps it. */
static dtrain_status dtrain__index_take_piece(dtrain__index_parser *parser, const dtrain__index_tensor *tensor,
                                              dtrain__index_piece_read *read, uint32_t seen)
{
    dtrain__index *index = parser->index;
    size_t offset = parser->json.offset, elements = 1;
    int boxed = (seen >> 2 & 3) == 3;
    if (!(seen & 1))
        return dtrain__index_bad(parser, offset, "a piece without its file");
    if ((seen >> 2 & 3) == 1 || (seen >> 2 & 3) == 2 || (seen >> 4 & 3) == 1 || (seen >> 4 & 3) == 2)
        return dtrain__index_bad(parser, offset, "a piece with half of a box or range");
    if (boxed && (read->begin.count != tensor->ndim || read->size.count != tensor->ndim))
        return dtrain__index_bad(parser, offset, "a box of other dimensions than its tensor");
    for (int d = 0; d < tensor->ndim; d++) {
        size_t begin = boxed ? read->begin.sizes[d] : 0, size = boxed ? read->size.sizes[d] : tensor->shape[d];
        if (begin > tensor->shape[d] || size > tensor->shape[d] - begin)
            return dtrain__index_bad(parser, offset, "a box that reaches beyond its tensor");
        elements *= size; /* at most the tensor's, which were checked */
    }
    if (!(seen >> 4 & 1))
        read->piece.count = elements;
    if (read->piece.at > elements || read->piece.count > elements - read->piece.at)
        return dtrain__index_bad(parser, offset, "a range that reaches beyond its box");
    if (read->piece.file > SIZE_MAX - 1 - parser->base_file || read->piece.copy > INT_MAX)
        return dtrain__index_bad(parser, offset, "a number too large");
    read->piece.file += parser->base_file;
    read->piece.box = boxed ? index->number_count : DTRAIN__INDEX_NONE;
    for (int d = 0; d < 2 * tensor->ndim && boxed; d++)
        if (dtrain__index_number(index, d < tensor->ndim ? read->begin.sizes[d] : read->size.sizes[d - tensor->ndim]) ==
            DTRAIN__INDEX_NONE)
            return DTRAIN_ERR_MEMORY;
    if (!DTRAIN__INDEX_ROOM(index, pieces, piece_count, 1))
        return DTRAIN_ERR_MEMORY;
    index->pieces[index->piece_count++] = read->piece;
    return DTRAIN_OK;
}

static dtrain_status dtrain__index_one_piece(dtrain__index_parser *parser, void *out)
{
    const dtrain__index_tensor *tensor = (const dtrain__index_tensor *)out;
    dtrain__index_piece_read read;
    uint32_t seen;
    memset(&read, 0, sizeof read);
    read.piece.tensor = parser->index->tensor_count;
    read.piece.number = DTRAIN__INDEX_NONE;
    dtrain_status status = dtrain__index_object(parser, dtrain__index_piece_member, &read, &seen);
    return status == DTRAIN_OK ? dtrain__index_take_piece(parser, tensor, &read, seen) : status;
}

/* dtype and shape stand before pieces, as they are written. */
static dtrain_status dtrain__index_tensor_member(dtrain__index_parser *parser, const dtrain__json_token *key, void *out,
                                                 int *which)
{
    static const char *const names[] = {"dtype", "shape", "pieces"};
    dtrain__index_tensor *tensor = (dtrain__index_tensor *)out;
    dtrain__index_sizes shape;
    dtrain__json_token token;
    dtrain_status status = DTRAIN_OK;
    size_t elements = 1;
    *which = dtrain__index_which(parser, key, names, 3);
    if (*which == 0) {
        status = dtrain__index_expect(parser, &token, DTRAIN__JSON_STRING, "the name of a dtype was expected");
        if (status == DTRAIN_OK &&
            (dtrain_dtype_from_name(&tensor->dtype, (const char *)parser->json.text + token.begin,
                                    token.end - token.begin) != DTRAIN_OK ||
             dtrain_dtype_bits(tensor->dtype) < 8))
            status = dtrain__index_bad(parser, token.begin, "no dtype of a byte or more");
    } else if (*which == 1) {
        shape.count = 0;
        status = dtrain__index_array(parser, dtrain__index_one_size, &shape);
        tensor->ndim = shape.count;
        memcpy(tensor->shape, shape.sizes, (size_t)shape.count * sizeof shape.sizes[0]);
        for (int d = 0; d < shape.count && status == DTRAIN_OK; d++)
            if (!dtrain__mul_size(elements, shape.sizes[d], &elements) || elements > SIZE_MAX / 64)
                status = dtrain__index_bad(parser, parser->json.offset, "a shape that multiplies to more than memory");
    } else if (*which == 2) {
        if (tensor->dtype == (dtrain_dtype)0 || tensor->ndim < 0)
            return dtrain__index_bad(parser, key->begin, "pieces before dtype and shape");
        status = dtrain__index_array(parser, dtrain__index_one_piece, tensor);
    }
    return status;
}

static dtrain_status dtrain__index_read_tensors(dtrain__index_parser *parser)
{
    dtrain__index *index = parser->index;
    dtrain__json_token token;
    dtrain_status status = dtrain__index_expect(parser, &token, DTRAIN__JSON_OBJECT, "an object was expected");
    while (status == DTRAIN_OK && dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_KEY) {
        dtrain__index_tensor tensor;
        uint32_t seen = 0;
        memset(&tensor, 0, sizeof tensor);
        tensor.ndim = -1;
        status = dtrain__index_keep(parser, &token, 1, &tensor.name, &tensor.name_length);
        if (status == DTRAIN_OK)
            status = dtrain__index_object(parser, dtrain__index_tensor_member, &tensor, &seen);
        if (status == DTRAIN_OK && seen != 7)
            status = dtrain__index_bad(parser, parser->json.offset, "a tensor without dtype, shape or pieces");
        if (status == DTRAIN_OK && !DTRAIN__INDEX_ROOM(index, tensors, tensor_count, 1))
            return DTRAIN_ERR_MEMORY;
        if (status == DTRAIN_OK)
            index->tensors[index->tensor_count++] = tensor;
    }
    return dtrain__index_ended(parser, status);
}

/* ---- files and values ---- */

static dtrain_status dtrain__index_hashed_member(dtrain__index_parser *parser, const dtrain__json_token *key,
                                                 dtrain__index_hashed *file, int *which)
{
    static const char *const names[] = {"name", "header_bytes", "header_hash", "data_bytes"};
    uint64_t *numbers[] = {NULL, &file->header_bytes, &file->header_hash, &file->data_bytes};
    size_t offset = parser->json.offset, length = 0;
    *which = dtrain__index_which(parser, key, names, 4);
    if (*which > 0)
        return dtrain__index_u64(parser, UINT64_MAX, numbers[*which]);
    if (*which < 0)
        return DTRAIN_OK;
    dtrain_status status = dtrain__index_string(parser, 1, &file->name, &length);
    if (status == DTRAIN_OK && !dtrain__file_plain_name(parser->index->texts + file->name, length))
        status = dtrain__index_bad(parser, offset, "a file's name that is no plain one");
    return status;
}

static dtrain_status dtrain__index_hashes_member(dtrain__index_parser *parser, const dtrain__json_token *key, void *out,
                                                 int *which)
{
    dtrain__index_file *file = (dtrain__index_file *)out;
    dtrain_status status = dtrain__index_hashed_member(parser, key, &file->hashes, which);
    if (*which >= 0 || !dtrain__json_is(&parser->json, key, "blocks"))
        return status;
    *which = 4;
    file->blocks = parser->index->number_count;
    return dtrain__index_array(parser, dtrain__index_one_number, &file->block_count);
}

static dtrain_status dtrain__index_file_member(dtrain__index_parser *parser, const dtrain__json_token *key, void *out,
                                               int *which)
{
    dtrain__index_file *file = (dtrain__index_file *)out;
    uint64_t rank;
    uint32_t seen = 0;
    dtrain_status status = dtrain__index_hashed_member(parser, key, &file->data, which);
    if (*which >= 0)
        return status;
    if (dtrain__json_is(&parser->json, key, "rank")) {
        *which = 4;
        status = dtrain__index_u64(parser, INT_MAX, &rank);
        file->rank = status == DTRAIN_OK ? (int)rank : 0;
    } else if (dtrain__json_is(&parser->json, key, "hashes")) {
        *which = 5;
        status = dtrain__index_object(parser, dtrain__index_hashes_member, file, &seen);
        if (status == DTRAIN_OK && seen != 31)
            status = dtrain__index_bad(parser, parser->json.offset, "hashes without one of their members");
    }
    return status;
}

/* The blocks that hold this many bytes. */
static uint64_t dtrain__index_blocks(uint64_t bytes)
{
    return bytes / DTRAIN__INDEX_BLOCK + (bytes % DTRAIN__INDEX_BLOCK != 0);
}

static dtrain_status dtrain__index_one_file(dtrain__index_parser *parser, void *out)
{
    dtrain__index *index = parser->index;
    dtrain__index_file file;
    uint32_t seen = 0;
    (void)out;
    memset(&file, 0, sizeof file);
    file.holder = -1;
    dtrain_status status = dtrain__index_object(parser, dtrain__index_file_member, &file, &seen);
    if (status == DTRAIN_OK && seen != 63)
        status = dtrain__index_bad(parser, parser->json.offset, "a file without one of its members");
    if (status == DTRAIN_OK && (file.data.data_bytes > UINT64_MAX / 2 ||
                                file.hashes.data_bytes != 8 * dtrain__index_blocks(file.data.data_bytes) ||
                                file.block_count != dtrain__index_blocks(file.hashes.data_bytes)))
        status = dtrain__index_bad(parser, parser->json.offset, "a file with other numbers of hashes than of blocks");
    if (status == DTRAIN_OK && !DTRAIN__INDEX_ROOM(index, files, file_count, 1))
        return DTRAIN_ERR_MEMORY;
    if (status == DTRAIN_OK)
        index->files[index->file_count++] = file;
    return status;
}

static dtrain_status dtrain__index_read_values(dtrain__index_parser *parser)
{
    dtrain__index *index = parser->index;
    dtrain__json_token token;
    dtrain_status status = dtrain__index_expect(parser, &token, DTRAIN__JSON_OBJECT, "an object was expected");
    while (status == DTRAIN_OK && dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_KEY) {
        dtrain__index_value value;
        status = dtrain__index_keep(parser, &token, 1, &value.key, &value.key_length);
        if (status == DTRAIN_OK)
            status = dtrain__index_string(parser, 0, &value.value, &value.value_length);
        if (status == DTRAIN_OK && !DTRAIN__INDEX_ROOM(index, values, value_count, 1))
            return DTRAIN_ERR_MEMORY;
        if (status == DTRAIN_OK && index->parts == 0) /* of the first part, as all facts */
            index->values[index->value_count++] = value;
    }
    return dtrain__index_ended(parser, status);
}

/* ---- facts and settings ---- */

/* Takes a member that nobody else knows: a number or a plain text is a setting, an object is a group of them. Others,
 * and what is longer than settings are, are passed over. out: the group's name, at the top of the text an empty one. */
static dtrain_status dtrain__index_setting_member(dtrain__index_parser *parser, const dtrain__json_token *key,
                                                  void *out, int *which)
{
    char name[2 * DTRAIN__INDEX_SETTING] = "", value[DTRAIN__INDEX_SETTING];
    const char *group = (const char *)out;
    dtrain__json_reader before = parser->json;
    dtrain__json_token token;
    uint32_t seen;
    int length = snprintf(name, sizeof name, "%s%s", group, group[0] != '\0' ? "." : "");
    dtrain__json_kind kind = dtrain__json_next(&parser->json, &token);
    size_t bytes = token.end - token.begin;
    int fits = key->end - key->begin < DTRAIN__INDEX_SETTING && !key->escaped;
    if (fits)
        memcpy(name + length, before.text + key->begin, key->end - key->begin);
    if (fits && kind == DTRAIN__JSON_OBJECT && group[0] == '\0') {
        parser->json = before;
        *which = -2;
        return dtrain__index_object(parser, dtrain__index_setting_member, name, &seen);
    }
    if (fits && bytes < sizeof value && !token.escaped &&
        (kind == DTRAIN__JSON_NUMBER || kind == DTRAIN__JSON_STRING)) {
        memcpy(value, before.text + token.begin, bytes);
        value[bytes] = '\0';
        *which = dtrain__index_is_number(value) == (kind == DTRAIN__JSON_NUMBER) ? -2 : -1;
    }
    if (*which == -2)
        return dtrain__index_set(parser->index, name, value);
    parser->json = before;
    return DTRAIN_OK;
}

static dtrain_status dtrain__index_format(dtrain__index_parser *parser)
{
    dtrain__json_token token;
    dtrain_status status = dtrain__index_expect(parser, &token, DTRAIN__JSON_STRING, "a text was expected");
    if (status == DTRAIN_OK && !dtrain__json_is(&parser->json, &token, DTRAIN__INDEX_FORMAT))
        status = dtrain__index_bad(parser, token.begin, "not the format \"" DTRAIN__INDEX_FORMAT "\"");
    return status;
}

static dtrain_status dtrain__index_version(dtrain__index_parser *parser)
{
    uint64_t version = 0;
    dtrain_status status = dtrain__index_u64(parser, UINT64_MAX, &version);
    if (status != DTRAIN_OK || version == DTRAIN__INDEX_VERSION)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "checkpoint index \"%s\" is of version %llu, and this dtrain knows %d: read it with that which "
                        "wrote it",
                        parser->index->where, (unsigned long long)version, DTRAIN__INDEX_VERSION);
}

enum { DTRAIN__INDEX_SEEN_NEEDED = 0x3f | 7 << 9 };

static dtrain_status dtrain__index_top_member(dtrain__index_parser *parser, const dtrain__json_token *key, void *out,
                                              int *which)
{
    static const char *const names[] = {"format", "version",      "nonce", "counter", "step",  "world_size",
                                        "seed",   "random_index", "hash",  "values",  "files", "tensors"};
    dtrain__index_facts *facts = (dtrain__index_facts *)out;
    uint64_t *numbers[] = {NULL,
                           NULL,
                           &facts->id.nonce,
                           &facts->id.counter,
                           &facts->step,
                           &facts->world_size,
                           &facts->seed,
                           &facts->random_index};
    char top[1] = "";
    *which = dtrain__index_which(parser, key, names, 12);
    switch (*which) {
    case 0: return dtrain__index_format(parser);
    case 1: return dtrain__index_version(parser);
    case 8: *which = -1; return DTRAIN_OK; /* checked before */
    case 9: return dtrain__index_read_values(parser);
    case 10: return dtrain__index_array(parser, dtrain__index_one_file, NULL);
    case 11: return dtrain__index_read_tensors(parser);
    case -1: return dtrain__index_setting_member(parser, key, top, which);
    default: return dtrain__index_u64(parser, *which == 5 ? INT_MAX : UINT64_MAX, numbers[*which]);
    }
}

/* The text's last member is the hash of what comes before it. */
static dtrain_status dtrain__index_check_hash(const char *where, const char *text, size_t bytes)
{
    char tail[DTRAIN__INDEX_TAIL + 1];
    if (bytes <= DTRAIN__INDEX_TAIL)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint index \"%s\" has %zu bytes: it was cut", where,
                            bytes);
    snprintf(tail, sizeof tail, ",\"hash\":\"%016llx\"}",
             (unsigned long long)dtrain__xxh64_of(text, bytes - DTRAIN__INDEX_TAIL, 0));
    if (memcmp(tail, text + bytes - DTRAIN__INDEX_TAIL, DTRAIN__INDEX_TAIL) == 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                        "checkpoint index \"%s\": its %zu bytes have not the hash that ends it: it was damaged or cut",
                        where, bytes);
}

/* Adds a text, of a part or of a whole, to an index; `where` names it for error texts. A second part must be of the
 * same save. */
static dtrain_status dtrain__index_read(dtrain__index *index, const char *where, const char *text, size_t bytes)
{
    dtrain__index_parser parser;
    dtrain__index_facts facts;
    dtrain__json_token token;
    uint32_t seen = 0;
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
    status = dtrain__index_object(&parser, dtrain__index_top_member, &facts, &seen);
    if (status == DTRAIN_OK)
        status = dtrain__index_expect(&parser, &token, DTRAIN__JSON_END, "more text after the index");
    if (status == DTRAIN_OK && (seen & DTRAIN__INDEX_SEEN_NEEDED) != DTRAIN__INDEX_SEEN_NEEDED)
        status = dtrain__index_bad(&parser, bytes, "the index lacks one of its members");
    for (size_t i = first_piece; i < index->piece_count && status == DTRAIN_OK; i++)
        if (index->pieces[i].file >= index->file_count)
            status = dtrain__index_bad(&parser, bytes, "a piece in a file that is not listed");
    if (status == DTRAIN_OK && index->parts > 0 &&
        (facts.id.nonce != index->facts.id.nonce || facts.id.counter != index->facts.id.counter ||
         facts.step != index->facts.step || facts.world_size != index->facts.world_size))
        status =
            dtrain__fail(NULL, DTRAIN_ERR_MISMATCH,
                         "checkpoint: part \"%s\" is of step %llu on %llu ranks, the first one of step %llu on %llu: "
                         "save the same step on every rank",
                         where, (unsigned long long)facts.step, (unsigned long long)facts.world_size,
                         (unsigned long long)index->facts.step, (unsigned long long)index->facts.world_size);
    if (status == DTRAIN_OK && index->parts++ == 0)
        index->facts = facts;
    return status;
}

#endif
