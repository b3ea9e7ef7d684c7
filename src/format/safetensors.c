/* ---- >>safetensors header ----
 * A file's header. It is copied, parsed in one pass, sorted by place in the file, and checked by every rule of the
 * format before a caller gets the file. Error texts number the rules:
 *
 *   R1 - R3     the frame of the header
 *   R4 - R15    its JSON
 *   R16 - R20   the layout of the data
 *
 * The reference leaves some cases to chance. Here duplicates of names, keys and fields are errors (R12), and so are
 * entries that are not objects.
 *
 * Before a number in the file decides an allocation, it is compared with the file's size. Other memory grows with
 * the entries that are parsed. Texts are unescaped in place, behind the reader. A zero byte follows each. */
#ifndef DTRAIN__SAFETENSORS
#define DTRAIN__SAFETENSORS
#include "safetensors.h"
#include "file.c"
#include "names.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__SAFETENSORS_HEADER_MOST 100000000u /* R2 */
#define DTRAIN__SAFETENSORS_METADATA "__metadata__"

/* A tensor, with fields for its checks. The name comes first, as the table of names requires. */
typedef struct dtrain__safetensors_entry {
    dtrain_safetensors_tensor tensor;
    uint32_t at;       /* the offset of its key in the header */
    uint32_t shape_at; /* the index of its first size in shapes */
    int overflow;      /* 1: the product of its sizes has more than 64 bits */
} dtrain__safetensors_entry;

struct dtrain_safetensors {
    dtrain_allocator *allocator, own;
    char label[256];             /* its name in texts */
    int fd;                      /* -1: the file is in memory */
    const unsigned char *memory; /* the whole file, mapped or the caller's; NULL: neither */
    void *mapping;
    uint64_t file_bytes, header_bytes;
    unsigned char *header; /* its texts are unescaped */
    size_t header_have;    /* bytes of header: header_bytes - 8, or fewer if a zero byte ends it */
    dtrain__safetensors_entry *entries;
    size_t count;
    dtrain_safetensors_pair *pairs;
    size_t pair_count;
    size_t *shapes;
    size_t shape_count;
    dtrain__names names, keys;
};

typedef struct dtrain__safetensors_parser {
    dtrain_safetensors *file;
    dtrain__json_reader json;
    const dtrain__safetensors_entry *entry; /* the current one; NULL: none */
    dtrain__names_text *fields;             /* keys of open objects that are ignored, and unknown keys of the entry */
    size_t field_count;
    int has_metadata;
    dtrain_status status; /* the first error, which ends the parsing */
} dtrain__safetensors_parser;

/* ---- errors ---- */

/* Makes a name from a file fit for an error text: at most 60 bytes, all of them printable. */
static const char *dtrain__safetensors_quote(char out[64], const char *text, size_t length)
{
    size_t at = 0;
    while (at < length && at < 60) {
        size_t step = dtrain__utf8((const unsigned char *)text + at, length - at);
        if (at + step > 60)
            break;
        int plain = step > 0 && (unsigned char)text[at] >= 0x20 && text[at] != 0x7f;
        memcpy(out + at, text + at, step > 0 ? step : 1);
        if (!plain)
            out[at] = '?';
        at += step > 0 ? step : 1;
    }
    memcpy(out + at, "...", at < length ? 4 : 0);
    if (at == length)
        out[at] = '\0';
    return out;
}

/* Reports a broken rule. at: the byte of the file. tensor: NULL if the rule is not about one. */
DTRAIN__PRINTF(5, 6)
static dtrain_status dtrain__safetensors_broken(const dtrain_safetensors *file, int rule, uint64_t at,
                                                const dtrain_safetensors_tensor *tensor, const char *format, ...)
{
    char text[256], name[64];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "%s breaks R%d at byte %llu: %s", file->label, rule,
                            (unsigned long long)at, text);
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "%s breaks R%d at byte %llu: tensor \"%s\": %s", file->label, rule,
                        (unsigned long long)at, dtrain__safetensors_quote(name, tensor->name, tensor->name_length),
                        text);
}

static dtrain_status dtrain__safetensors_memory(const dtrain_safetensors *file)
{
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for its header of %llu bytes", file->label,
                        (unsigned long long)file->header_bytes);
}

/* Reports a broken rule of the JSON at an offset of the header. */
static DTRAIN__NOINLINE void dtrain__safetensors_bad(dtrain__safetensors_parser *parser, int rule, size_t offset,
                                                     const char *text)
{
    if (parser->status == DTRAIN_OK)
        parser->status = dtrain__safetensors_broken(parser->file, rule, offset + 8,
                                                    parser->entry != NULL ? &parser->entry->tensor : NULL, "%s", text);
}

/* Reports a duplicate key: of an entry, or, if entry is NULL, of the header. */
static dtrain_status dtrain__safetensors_twice(const dtrain_safetensors *file, const dtrain__safetensors_entry *entry,
                                               dtrain__names_text name)
{
    char quoted[64];
    size_t offset = (size_t)((const unsigned char *)name.text - file->header);
    return dtrain__safetensors_broken(file, 12, offset + 7, entry != NULL ? &entry->tensor : NULL,
                                      "the key \"%s\" comes twice",
                                      dtrain__safetensors_quote(quoted, name.text, name.length));
}

/* Builds a table of the texts that the structs of an array begin with. A duplicate is an error. */
static dtrain_status dtrain__safetensors_unique(const dtrain_safetensors *file, dtrain__names *names, const void *array,
                                                size_t stride, size_t count)
{
    size_t twice = count;
    if (count > 0 && !dtrain__names_build(names, file->allocator, array, stride, count, &twice))
        return dtrain__safetensors_memory(file);
    return twice == count ? DTRAIN_OK : dtrain__safetensors_twice(file, NULL, dtrain__names_at(names, twice));
}

/* ---- JSON ---- */

/* Reads the next token. After an error of any kind it returns ERROR. */
static dtrain__json_kind dtrain__safetensors_next(dtrain__safetensors_parser *parser, dtrain__json_token *token)
{
    static const int rules[] = {5, 6, 4, 8};
    if (parser->status != DTRAIN_OK)
        memset(token, 0, sizeof *token); /* an ERROR */
    else if (dtrain__json_next(&parser->json, token) == DTRAIN__JSON_ERROR)
        dtrain__safetensors_bad(parser, rules[parser->json.fault], parser->json.offset, parser->json.error);
    return token->kind;
}

/* Makes room for one more element of a growing array. After 1000 elements it estimates the final count from the part of
 * the header that has been read, since entries have similar lengths. It adds 3% to avoid a last copy. */
#define DTRAIN__SAFETENSORS_ROOM(allocator, json, array, count) \
    dtrain__safetensors_room((allocator), (json), (void *)&(array), (count), sizeof *(array))

static int dtrain__safetensors_room(dtrain_allocator *allocator, const dtrain__json_reader *json, void *array,
                                    size_t count, size_t bytes)
{
    void *old;
    memcpy(&old, array, sizeof old);
    if ((count + 1) * bytes <= dtrain__memory_bytes(old))
        return 1;
    size_t more = count + count / 4 + 16;
    size_t told = (size_t)((double)count * (double)json->length / (double)(json->offset + 1) * 1.03);
    more = told > more && count > 1000 ? told : more;
    void *grown = dtrain__resize(allocator, old, more * bytes);
    if (grown != NULL)
        memcpy(array, &grown, sizeof grown);
    return grown != NULL;
}

/* Unescapes a STRING or KEY in place, in the text that the reader reads. A zero byte follows it, at the place of the
 * closing quote or before. */
static dtrain__names_text dtrain__safetensors_text(const dtrain__json_reader *json, unsigned char *all,
                                                   const dtrain__json_token *token)
{
    dtrain__names_text name;
    unsigned char *text = all + token->begin;
    name.text = (const char *)text;
    name.length = token->end - token->begin;
    if (token->escaped)
        name.length = dtrain__json_string(json, token, text, name.length);
    text[name.length] = '\0';
    return name;
}

/* Keeps a key of an object, to find duplicates later. */
static void dtrain__safetensors_field(dtrain__safetensors_parser *parser, const dtrain__json_token *token)
{
    if (!DTRAIN__SAFETENSORS_ROOM(parser->file->allocator, &parser->json, parser->fields, parser->field_count))
        parser->status = dtrain__safetensors_memory(parser->file);
    else
        parser->fields[parser->field_count++] = dtrain__safetensors_text(&parser->json, parser->file->header, token);
}

/* Ends an object whose keys are those from `base` on. Refuses duplicates and forgets the keys. Only hostile files have
 * large objects here. */
static void dtrain__safetensors_fields_end(dtrain__safetensors_parser *parser, size_t base)
{
    size_t count = parser->field_count - base, twice = count;
    parser->field_count = base;
    if (count < 2 || parser->status != DTRAIN_OK)
        return;
    const dtrain__names_text *fields = parser->fields + base;
    if (count > 8) {
        dtrain__names names;
        if (!dtrain__names_build(&names, parser->file->allocator, fields, sizeof *fields, count, &twice))
            parser->status = dtrain__safetensors_memory(parser->file);
        dtrain__names_free(&names, parser->file->allocator);
    }
    for (size_t i = 1; i < count && count <= 8; i++)
        for (size_t k = 0; k < i && twice == count; k++)
            if (dtrain__names_same(&fields[i], &fields[k]))
                twice = i;
    if (twice < count)
        parser->status = dtrain__safetensors_twice(parser->file, parser->entry, fields[twice]);
}

/* Reads to the end of a value that is not used. It still checks the syntax and the keys. */
static void dtrain__safetensors_ignore(dtrain__safetensors_parser *parser, const dtrain__json_token *value)
{
    size_t base[DTRAIN__JSON_DEPTH + 1];
    int outside = parser->json.depth - 1;
    if (value->kind != DTRAIN__JSON_OBJECT && value->kind != DTRAIN__JSON_ARRAY)
        return;
    base[parser->json.depth] = parser->field_count;
    while (parser->json.depth > outside && parser->status == DTRAIN_OK) {
        dtrain__json_token token;
        dtrain__json_kind kind = dtrain__safetensors_next(parser, &token);
        if (kind == DTRAIN__JSON_OBJECT)
            base[parser->json.depth] = parser->field_count;
        else if (kind == DTRAIN__JSON_KEY)
            dtrain__safetensors_field(parser, &token);
        else if (kind == DTRAIN__JSON_OBJECT_END)
            dtrain__safetensors_fields_end(parser, base[parser->json.depth + 1]);
    }
}

static void dtrain__safetensors_dtype(dtrain__safetensors_parser *parser, const dtrain__json_token *value,
                                      dtrain_dtype *dtype)
{
    char name[16] = {0}, quoted[64], text[128];
    if (value->kind != DTRAIN__JSON_STRING) {
        dtrain__safetensors_bad(parser, 11, value->begin, "its dtype is not a string");
        return;
    }
    size_t length = dtrain__json_string(&parser->json, value, name, sizeof name);
    if (length < sizeof name && dtrain_dtype_from_name(dtype, name, length) == DTRAIN_OK)
        return;
    snprintf(text, sizeof text, "the format has no dtype \"%s\"",
             dtrain__safetensors_quote(quoted, name, length < sizeof name ? length : sizeof name));
    dtrain__safetensors_bad(parser, 13, value->begin, text);
}

/* Reads a whole number of a list. rule and what: for the error if it is something else. */
static uint64_t dtrain__safetensors_number(dtrain__safetensors_parser *parser, const dtrain__json_token *token,
                                           int rule, const char *what)
{
    uint64_t value;
    if (!dtrain__json_u64(&parser->json, token, &value))
        dtrain__safetensors_bad(parser, token->kind == DTRAIN__JSON_NUMBER ? 7 : rule, token->begin, what);
    return value;
}

/* Reads the sizes and multiplies them from left to right (R17). */
static void dtrain__safetensors_shape(dtrain__safetensors_parser *parser, const dtrain__json_token *value,
                                      dtrain__safetensors_entry *entry)
{
    dtrain_safetensors *file = parser->file;
    uint64_t count = 1;
    dtrain__json_token token;
    if (value->kind != DTRAIN__JSON_ARRAY)
        dtrain__safetensors_bad(parser, 14, value->begin, "its shape is not a list of sizes");
    entry->shape_at = (uint32_t)file->shape_count;
    while (dtrain__safetensors_next(parser, &token) != DTRAIN__JSON_ARRAY_END && parser->status == DTRAIN_OK) {
        uint64_t size = dtrain__safetensors_number(parser, &token, 14, "a size is not a whole number below 2^64");
        if (parser->status == DTRAIN_OK && size > SIZE_MAX)
            parser->status = dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                          "%s: at byte %zu: a size is %llu, and this machine counts to %zu: use a "
                                          "64-bit program",
                                          file->label, token.begin + 8, (unsigned long long)size, SIZE_MAX);
        if (!DTRAIN__SAFETENSORS_ROOM(file->allocator, &parser->json, file->shapes, file->shape_count)) {
            parser->status = dtrain__safetensors_memory(file);
            return;
        }
        if ((count | size) > UINT32_MAX) /* division is slow */
            entry->overflow |= size != 0 && count > UINT64_MAX / size;
        count *= size;
        file->shapes[file->shape_count++] = (size_t)size;
        entry->tensor.ndim++;
    }
    entry->tensor.count = (size_t)count;
    entry->overflow |= count > SIZE_MAX;
}

static void dtrain__safetensors_offsets(dtrain__safetensors_parser *parser, const dtrain__json_token *value,
                                        dtrain_safetensors_tensor *tensor)
{
    uint64_t *offsets[2] = {&tensor->begin, &tensor->end};
    dtrain__json_token token;
    int count = 0;
    if (value->kind != DTRAIN__JSON_ARRAY)
        dtrain__safetensors_bad(parser, 15, value->begin, "its data_offsets are not a list of two numbers");
    while (dtrain__safetensors_next(parser, &token) != DTRAIN__JSON_ARRAY_END && parser->status == DTRAIN_OK)
        if (count == 2)
            dtrain__safetensors_bad(parser, 15, token.begin, "it has more than two data_offsets");
        else
            *offsets[count++] =
                dtrain__safetensors_number(parser, &token, 15, "an offset is not a whole number below 2^64");
    if (count < 2)
        dtrain__safetensors_bad(parser, 15, value->begin, "it has fewer than two data_offsets");
}

/* Reads the entry of a tensor. name: its key, at offset `at` of the header. */
static void dtrain__safetensors_entry_read(dtrain__safetensors_parser *parser, const dtrain__names_text *name,
                                           size_t at)
{
    static const char *const missing[] = {"its dtype is missing", "its shape is missing",
                                          "its data_offsets are missing"};
    dtrain_safetensors *file = parser->file;
    dtrain__json_token token, value;
    int has = 0, field;
    if (!DTRAIN__SAFETENSORS_ROOM(file->allocator, &parser->json, file->entries, file->count)) {
        parser->status = dtrain__safetensors_memory(file);
        return;
    }
    dtrain__safetensors_entry *entry = &file->entries[file->count++];
    memset(entry, 0, sizeof *entry);
    entry->tensor.name = name->text;
    entry->tensor.name_length = name->length;
    entry->at = (uint32_t)at;
    parser->entry = entry;
    if (dtrain__safetensors_next(parser, &token) != DTRAIN__JSON_OBJECT)
        dtrain__safetensors_bad(parser, 11, token.begin, "its entry is not an object");
    while (dtrain__safetensors_next(parser, &token) == DTRAIN__JSON_KEY) {
        field = dtrain__json_is(&parser->json, &token, "dtype")          ? 0
                : dtrain__json_is(&parser->json, &token, "shape")        ? 1
                : dtrain__json_is(&parser->json, &token, "data_offsets") ? 2
                                                                         : 3;
        if (field == 3)
            dtrain__safetensors_field(parser, &token);
        else if (has >> field & 1)
            dtrain__safetensors_bad(parser, 12, token.begin - 1, "one of its fields comes twice");
        has |= 1 << field;
        dtrain__safetensors_next(parser, &value);
        if (field == 0)
            dtrain__safetensors_dtype(parser, &value, &entry->tensor.dtype);
        else if (field == 1)
            dtrain__safetensors_shape(parser, &value, entry);
        else if (field == 2)
            dtrain__safetensors_offsets(parser, &value, &entry->tensor);
        else
            dtrain__safetensors_ignore(parser, &value);
    }
    for (field = 0; field < 3; field++)
        if (!(has >> field & 1))
            dtrain__safetensors_bad(parser, 11, at, missing[field]);
    dtrain__safetensors_fields_end(parser, 0);
    parser->entry = NULL;
}

/* Reads the metadata, after its key. */
static void dtrain__safetensors_metadata_read(dtrain__safetensors_parser *parser, size_t at)
{
    dtrain_safetensors *file = parser->file;
    dtrain__json_token token;
    if (parser->has_metadata)
        dtrain__safetensors_bad(parser, 12, at, "\"" DTRAIN__SAFETENSORS_METADATA "\" comes twice");
    parser->has_metadata = 1;
    if (dtrain__safetensors_next(parser, &token) == DTRAIN__JSON_NULL) /* MLX writes null for none */
        return;
    if (token.kind != DTRAIN__JSON_OBJECT)
        dtrain__safetensors_bad(parser, 10, token.begin, "the metadata is not an object");
    while (dtrain__safetensors_next(parser, &token) == DTRAIN__JSON_KEY) {
        if (!DTRAIN__SAFETENSORS_ROOM(file->allocator, &parser->json, file->pairs, file->pair_count)) {
            parser->status = dtrain__safetensors_memory(file);
            return;
        }
        dtrain__names_text key = dtrain__safetensors_text(&parser->json, file->header, &token);
        if (dtrain__safetensors_next(parser, &token) != DTRAIN__JSON_STRING) {
            dtrain__safetensors_bad(parser, 10, token.begin, "a value of the metadata is not a string");
            return;
        }
        dtrain__names_text value = dtrain__safetensors_text(&parser->json, file->header, &token);
        dtrain_safetensors_pair pair = {key.text, key.length, value.text, value.length};
        file->pairs[file->pair_count++] = pair;
    }
}

static dtrain_status dtrain__safetensors_parse(dtrain_safetensors *file)
{
    dtrain__safetensors_parser parser;
    dtrain__json_token token;
    memset(&parser, 0, sizeof parser);
    parser.file = file;
    dtrain__json_open(&parser.json, file->header, file->header_have);
    if (dtrain__safetensors_next(&parser, &token) != DTRAIN__JSON_OBJECT)
        dtrain__safetensors_bad(&parser, 9, token.begin, "the header is not an object");
    while (dtrain__safetensors_next(&parser, &token) == DTRAIN__JSON_KEY) {
        size_t at = token.begin - 1;
        dtrain__names_text name = dtrain__safetensors_text(&parser.json, file->header, &token);
        if (name.length == strlen(DTRAIN__SAFETENSORS_METADATA) &&
            memcmp(name.text, DTRAIN__SAFETENSORS_METADATA, name.length) == 0)
            dtrain__safetensors_metadata_read(&parser, at);
        else
            dtrain__safetensors_entry_read(&parser, &name, at);
    }
    dtrain__safetensors_next(&parser, &token); /* END, or an error if more follows */
    dtrain__free(file->allocator, parser.fields);
    return parser.status == DTRAIN_OK
               ? dtrain__safetensors_unique(file, &file->keys, file->pairs, sizeof *file->pairs, file->pair_count)
               : parser.status;
}

static dtrain_status dtrain__safetensors_names(dtrain_safetensors *file)
{
    return dtrain__safetensors_unique(file, &file->names, file->entries, sizeof *file->entries, file->count);
}

/* ---- layout ---- */

typedef struct dtrain__safetensors_place {
    uint64_t begin, end;
    size_t index;
} dtrain__safetensors_place;

static int dtrain__safetensors_before(const dtrain__safetensors_place *a, const dtrain__safetensors_place *b)
{
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
}

/* Sorts by merging. Unlike qsort it is stable, and takes n log n steps for any order. Returns which of the two arrays
 * holds the result. */
static dtrain__safetensors_place *dtrain__safetensors_merge(dtrain__safetensors_place *from,
                                                            dtrain__safetensors_place *to, size_t count)
{
    for (size_t run = 1; run < count; run *= 2) {
        for (size_t low = 0; low < count; low += 2 * run) {
            size_t middle = count - low < run ? count : low + run, high = count - middle < run ? count : middle + run;
            for (size_t a = low, b = middle, out = low; out < high; out++)
                to[out] = b == high || (a < middle && !dtrain__safetensors_before(&from[b], &from[a])) ? from[a++]
                                                                                                       : from[b++];
        }
        dtrain__safetensors_place *swap = from;
        from = to;
        to = swap;
    }
    return from;
}

/* Sorts the entries by the place of their data. Empty ones at the same place keep the order of the header. */
static dtrain_status dtrain__safetensors_sort(dtrain_safetensors *file)
{
    size_t count = file->count, sorted = 1, bytes = count * sizeof(dtrain__safetensors_place);
    for (; sorted < count; sorted++) {
        const dtrain_safetensors_tensor *a = &file->entries[sorted - 1].tensor, *b = &file->entries[sorted].tensor;
        if (a->begin > b->begin || (a->begin == b->begin && a->end > b->end))
            break;
    }
    if (sorted >= count)
        return DTRAIN_OK;
    dtrain__safetensors_place *places = (dtrain__safetensors_place *)dtrain__alloc(file->allocator, 2 * bytes), *order;
    dtrain__safetensors_entry *entries =
        (dtrain__safetensors_entry *)dtrain__alloc(file->allocator, count * sizeof *entries);
    int good = places != NULL && entries != NULL;
    if (good) {
        for (size_t i = 0; i < count; i++) {
            places[i].begin = file->entries[i].tensor.begin;
            places[i].end = file->entries[i].tensor.end;
            places[i].index = i;
        }
        order = dtrain__safetensors_merge(places, places + count, count);
        for (size_t i = 0; i < count; i++)
            entries[i] = file->entries[order[i].index];
        dtrain__free(file->allocator, file->entries);
        file->entries = entries;
        entries = NULL;
    }
    dtrain__free(file->allocator, entries);
    dtrain__free(file->allocator, places);
    return good ? DTRAIN_OK : dtrain__safetensors_memory(file);
}

/* Checks one tensor's place and size. from: where the tensor before it ends. Texts count bytes from the start of the
 * data, as the header does. */
static dtrain_status dtrain__safetensors_check_entry(const dtrain_safetensors *file,
                                                     const dtrain__safetensors_entry *entry, uint64_t from)
{
    const dtrain_safetensors_tensor *tensor = &entry->tensor;
    uint64_t bits = dtrain_dtype_bits(tensor->dtype), at = entry->at + (uint64_t)8;
    if (tensor->begin != from)
        return dtrain__safetensors_broken(file, 16, at, tensor,
                                          "its data begin at %llu, and the data before them end at %llu",
                                          (unsigned long long)tensor->begin, (unsigned long long)from);
    if (tensor->end < tensor->begin)
        return dtrain__safetensors_broken(file, 16, at, tensor, "its data begin at %llu and end before that, at %llu",
                                          (unsigned long long)tensor->begin, (unsigned long long)tensor->end);
    if (entry->overflow || tensor->count > UINT64_MAX / bits)
        return dtrain__safetensors_broken(file, 17, at, tensor, "its %d sizes give more than 2^64 - 1 bits",
                                          tensor->ndim);
    if (tensor->count * bits % 8 != 0)
        return dtrain__safetensors_broken(file, 18, at, tensor, "%zu elements of %u bits end inside a byte",
                                          tensor->count, (unsigned)bits);
    if (tensor->end - tensor->begin != tensor->count * bits / 8)
        return dtrain__safetensors_broken(
            file, 19, at, tensor, "it has %llu bytes of data, and its %zu elements of %s take %llu",
            (unsigned long long)(tensor->end - tensor->begin), tensor->count, dtrain_dtype_name(tensor->dtype),
            (unsigned long long)(tensor->count * bits / 8));
    return DTRAIN_OK;
}

/* Checks all places. Then it makes them relative to the start of the file, and gives entries their shapes. */
static dtrain_status dtrain__safetensors_check(dtrain_safetensors *file)
{
    uint64_t end = 0, data_bytes = file->file_bytes - file->header_bytes;
    for (size_t i = 0; i < file->count; i++) {
        dtrain_status status = dtrain__safetensors_check_entry(file, &file->entries[i], end);
        if (status != DTRAIN_OK)
            return status;
        end = file->entries[i].tensor.end;
    }
    if (end != data_bytes)
        return dtrain__safetensors_broken(file, 20, end < data_bytes ? file->header_bytes + end : file->file_bytes,
                                          NULL, "the tensors have %llu bytes of data, and the file %llu: %s",
                                          (unsigned long long)end, (unsigned long long)data_bytes,
                                          end < data_bytes ? "something else follows them" : "it was cut");
    for (size_t i = 0; i < file->count; i++) {
        dtrain_safetensors_tensor *tensor = &file->entries[i].tensor;
        tensor->begin += file->header_bytes;
        tensor->end += file->header_bytes;
        tensor->shape = tensor->ndim > 0 ? file->shapes + file->entries[i].shape_at : file->shapes;
    }
    return DTRAIN_OK;
}

DTRAIN__FAST_END
#endif
