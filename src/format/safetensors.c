/* ---- >>safetensors header ----
 * A file's header: read into memory of our own, parsed in one pass, sorted by place, and checked by every
 * rule of the format before the file is given out. The rules are numbered R1 to R20 as in the error texts below:
 * R1-R3 frame the header, R4-R15 are its JSON, R16-R20 the layout of the data. Stricter than the reference in what it
 * leaves to chance: a name, key or field that comes twice is refused (R12), as are entries that are not objects.
 *
 * Nothing is allocated from a number in the file before it was compared with the file's size; what is allocated grows
 * with entries that were parsed. Texts are unescaped where they lie, behind the reader, and get a zero byte in place
 * of their closing quote. */
#ifndef DTRAIN__SAFETENSORS
#define DTRAIN__SAFETENSORS
#include "safetensors.h"
#include "file.c"
#include "names.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__SAFETENSORS_HEADER_MOST 100000000u /* R2 */
#define DTRAIN__SAFETENSORS_METADATA "__metadata__"

/* A tensor and what only its checks need. The name comes first, as the table of names wants it. */
typedef struct dtrain__safetensors_entry {
    dtrain_safetensors_tensor tensor;
    uint32_t at;       /* of its key in the header */
    uint32_t shape_at; /* of the bracket that begins its shape */
    int overflow;      /* its sizes multiply to more than 64 bits */
} dtrain__safetensors_entry;

struct dtrain_safetensors {
    dtrain_allocator *allocator, own;
    char label[256];             /* for texts */
    int fd;                      /* -1: memory alone */
    const unsigned char *memory; /* the whole file: the mapping, or the caller's; NULL: neither */
    void *mapping;
    uint64_t file_bytes, header_bytes;
    unsigned char *header; /* header_have bytes, texts unescaped */
    size_t header_have;    /* have: header_bytes - 8, or up to a zero byte that ends it early */
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
    const dtrain__safetensors_entry *entry; /* under way; NULL: none */
    dtrain__names_text *fields;             /* keys of the objects under way that are ignored, and of the entry's own */
    size_t field_count;
    int has_metadata;
} dtrain__safetensors_parser;

/* ---- errors ---- */

/* Makes a name from a file fit for a line of text: at most 60 bytes, nothing that is no character. */
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

/* Reports a broken rule: where (a byte of the file), of which tensor (NULL: none), and what is wrong. */
__attribute__((format(printf, 5, 6))) static dtrain_status
dtrain__safetensors_broken(const dtrain_safetensors *file, int rule, uint64_t at,
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

/* Reports a rule of the JSON, at an offset of the header. */
static DTRAIN__NOINLINE dtrain_status dtrain__safetensors_bad(const dtrain__safetensors_parser *parser, int rule,
                                                              size_t offset, const char *text)
{
    return dtrain__safetensors_broken(parser->file, rule, offset + 8,
                                      parser->entry != NULL ? &parser->entry->tensor : NULL, "%s", text);
}

/* Reports what the JSON reader found. */
static dtrain_status dtrain__safetensors_json(const dtrain__safetensors_parser *parser)
{
    static const int rules[] = {5, 6, 4, 8};
    return dtrain__safetensors_bad(parser, rules[parser->json.fault], parser->json.offset, parser->json.error);
}

/* ---- JSON ---- */

/* Makes room for one more element of a growing array. Headers are even: how much room there will be need of is told by
 * how much of the header has made how many, once that is many. Three in a hundred more spare the copy at the end. */
static int dtrain__safetensors_grow(dtrain_allocator *allocator, const dtrain__json_reader *json, void **array,
                                    size_t count, size_t bytes)
{
    if ((count + 1) * bytes <= dtrain__memory_bytes(*array))
        return 1;
    size_t more = count + count / 4 + 16;
    size_t told = (size_t)((double)count * (double)json->length / (double)(json->offset + 1) * 1.03);
    more = told > more && count > 1000 ? told : more;
    void *grown = dtrain__resize(allocator, *array, more * bytes);
    if (grown == NULL)
        return 0;
    *array = grown;
    return 1;
}

/* Unescapes a STRING or KEY where it lies, in the text that the reader reads, and ends it with a zero byte, in the
 * place of its quote or before. */
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

/* Remembers a key of an object, to find duplicates by. */
static dtrain_status dtrain__safetensors_field(dtrain__safetensors_parser *parser, const dtrain__json_token *token)
{
    void *fields = parser->fields;
    int grown = dtrain__safetensors_grow(parser->file->allocator, &parser->json, &fields, parser->field_count,
                                         sizeof(dtrain__names_text));
    parser->fields = (dtrain__names_text *)fields;
    if (!grown)
        return dtrain__safetensors_memory(parser->file);
    parser->fields[parser->field_count++] = dtrain__safetensors_text(&parser->json, parser->file->header, token);
    return DTRAIN_OK;
}

static dtrain_status dtrain__safetensors_twice(const dtrain__safetensors_parser *parser, dtrain__names_text name)
{
    char quoted[64];
    size_t offset = (size_t)((const unsigned char *)name.text - parser->file->header);
    return dtrain__safetensors_broken(
        parser->file, 12, offset + 7, parser->entry != NULL ? &parser->entry->tensor : NULL,
        "the key \"%s\" comes twice", dtrain__safetensors_quote(quoted, name.text, name.length));
}

/* Ends an object whose keys are those from `base` on: refuses duplicates, and forgets the keys. Objects are small, but
 * for those that mean harm. */
static dtrain_status dtrain__safetensors_fields_end(dtrain__safetensors_parser *parser, size_t base)
{
    size_t count = parser->field_count - base, twice = count;
    parser->field_count = base;
    if (count < 2)
        return DTRAIN_OK;
    const dtrain__names_text *fields = parser->fields + base;
    if (count > 8) {
        dtrain__names names;
        int built = dtrain__names_build(&names, parser->file->allocator, fields, sizeof *fields, count, &twice);
        dtrain__names_free(&names, parser->file->allocator);
        if (!built)
            return dtrain__safetensors_memory(parser->file);
    }
    for (size_t i = 1; i < count && count <= 8; i++)
        for (size_t k = 0; k < i && twice == count; k++)
            if (dtrain__names_same(&fields[i], &fields[k]))
                twice = i;
    return twice < count ? dtrain__safetensors_twice(parser, fields[twice]) : DTRAIN_OK;
}

/* Reads to the end of a value that nobody wants; its syntax and its keys are checked all the same. */
static dtrain_status dtrain__safetensors_ignore(dtrain__safetensors_parser *parser, const dtrain__json_token *value)
{
    size_t base[DTRAIN__JSON_DEPTH + 1];
    int outside = parser->json.depth - 1;
    dtrain_status status = DTRAIN_OK;
    if (value->kind != DTRAIN__JSON_OBJECT && value->kind != DTRAIN__JSON_ARRAY)
        return DTRAIN_OK;
    base[parser->json.depth] = parser->field_count;
    while (parser->json.depth > outside && status == DTRAIN_OK) {
        dtrain__json_token token;
        switch (dtrain__json_next(&parser->json, &token)) {
        case DTRAIN__JSON_ERROR: return dtrain__safetensors_json(parser);
        case DTRAIN__JSON_OBJECT: base[parser->json.depth] = parser->field_count; break;
        case DTRAIN__JSON_KEY: status = dtrain__safetensors_field(parser, &token); break;
        case DTRAIN__JSON_OBJECT_END:
            status = dtrain__safetensors_fields_end(parser, base[parser->json.depth + 1]);
            break;
        default: break;
        }
    }
    return status;
}

static dtrain_status dtrain__safetensors_dtype(dtrain__safetensors_parser *parser, const dtrain__json_token *value,
                                               dtrain_dtype *dtype)
{
    char name[16] = {0}, quoted[64], text[128];
    if (value->kind != DTRAIN__JSON_STRING)
        return dtrain__safetensors_bad(parser, 11, value->begin, "its dtype is no string");
    size_t length = dtrain__json_string(&parser->json, value, name, sizeof name);
    for (int i = 1; i <= (int)DTRAIN_U64; i++) {
        const char *known = dtrain_dtype_name((dtrain_dtype)i);
        if (strlen(known) == length && memcmp(known, name, length) == 0) {
            *dtype = (dtrain_dtype)i;
            return DTRAIN_OK;
        }
    }
    snprintf(text, sizeof text, "the format has no dtype \"%s\"",
             dtrain__safetensors_quote(quoted, name, length < sizeof name ? length : sizeof name));
    return dtrain__safetensors_bad(parser, 13, value->begin, text);
}

/* Counts the sizes and multiplies them from left to right (R17); they are stored later, when their number is known. */
static dtrain_status dtrain__safetensors_shape(dtrain__safetensors_parser *parser, const dtrain__json_token *value,
                                               dtrain__safetensors_entry *entry)
{
    uint64_t count = 1, size;
    dtrain__json_token token;
    if (value->kind != DTRAIN__JSON_ARRAY)
        return dtrain__safetensors_bad(parser, 14, value->begin, "its shape is no list of sizes");
    entry->shape_at = (uint32_t)value->begin;
    while (dtrain__json_next(&parser->json, &token) != DTRAIN__JSON_ARRAY_END) {
        if (token.kind == DTRAIN__JSON_ERROR)
            return dtrain__safetensors_json(parser);
        if (!dtrain__json_u64(&parser->json, &token, &size))
            return dtrain__safetensors_bad(parser, token.kind == DTRAIN__JSON_NUMBER ? 7 : 14, token.begin,
                                           "a size is no whole number from 0 to 2^64 - 1");
        if (size > SIZE_MAX)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "%s: at byte %zu: a size of %llu, and this machine counts "
                                "to %zu",
                                parser->file->label, token.begin + 8, (unsigned long long)size, SIZE_MAX);
        if ((count | size) > UINT32_MAX) /* division takes long */
            entry->overflow |= size != 0 && count > UINT64_MAX / size;
        count *= size;
        entry->tensor.ndim++;
    }
    entry->tensor.count = (size_t)count;
    entry->overflow |= count > SIZE_MAX;
    parser->file->shape_count += (size_t)entry->tensor.ndim;
    return DTRAIN_OK;
}

static dtrain_status dtrain__safetensors_offsets(dtrain__safetensors_parser *parser, const dtrain__json_token *value,
                                                 uint64_t offsets[2])
{
    dtrain__json_token token;
    int count = 0;
    if (value->kind != DTRAIN__JSON_ARRAY)
        return dtrain__safetensors_bad(parser, 15, value->begin, "its data_offsets are no list of two numbers");
    while (dtrain__json_next(&parser->json, &token) != DTRAIN__JSON_ARRAY_END) {
        if (token.kind == DTRAIN__JSON_ERROR)
            return dtrain__safetensors_json(parser);
        if (count == 2)
            return dtrain__safetensors_bad(parser, 15, token.begin, "its data_offsets are more than two");
        if (!dtrain__json_u64(&parser->json, &token, &offsets[count++]))
            return dtrain__safetensors_bad(parser, token.kind == DTRAIN__JSON_NUMBER ? 7 : 15, token.begin,
                                           "an offset is no whole number from 0 to 2^64 - 1");
    }
    return count == 2 ? DTRAIN_OK
                      : dtrain__safetensors_bad(parser, 15, value->begin, "its data_offsets are fewer than two");
}

/* Reads one field of an entry, whose key was read last; `has` gets its bit. */
static dtrain_status dtrain__safetensors_entry_field(dtrain__safetensors_parser *parser, const dtrain__json_token *key,
                                                     dtrain__safetensors_entry *entry, int *has)
{
    dtrain__json_token value;
    uint64_t offsets[2] = {0, 0};
    int field = dtrain__json_is(&parser->json, key, "dtype")          ? 1
                : dtrain__json_is(&parser->json, key, "shape")        ? 2
                : dtrain__json_is(&parser->json, key, "data_offsets") ? 4
                                                                      : 0;
    if ((*has & field) != 0)
        return dtrain__safetensors_bad(parser, 12, key->begin - 1, "one of its fields comes twice");
    dtrain_status status = field == 0 ? dtrain__safetensors_field(parser, key) : DTRAIN_OK;
    *has |= field;
    if (status != DTRAIN_OK)
        return status;
    if (dtrain__json_next(&parser->json, &value) == DTRAIN__JSON_ERROR)
        return dtrain__safetensors_json(parser);
    if (field == 1)
        return dtrain__safetensors_dtype(parser, &value, &entry->tensor.dtype);
    if (field == 2)
        return dtrain__safetensors_shape(parser, &value, entry);
    if (field == 0)
        return dtrain__safetensors_ignore(parser, &value);
    status = dtrain__safetensors_offsets(parser, &value, offsets);
    entry->tensor.begin = offsets[0];
    entry->tensor.end = offsets[1];
    return status;
}

/* Reads a tensor's entry, whose key is given. */
static dtrain_status dtrain__safetensors_entry_read(dtrain__safetensors_parser *parser, const dtrain__names_text *name,
                                                    size_t at)
{
    dtrain_safetensors *file = parser->file;
    dtrain__json_token token;
    dtrain_status status = DTRAIN_OK;
    void *entries = file->entries;
    int has = 0, grown = dtrain__safetensors_grow(parser->file->allocator, &parser->json, &entries, file->count,
                                                  sizeof *file->entries);
    file->entries = (dtrain__safetensors_entry *)entries;
    if (!grown)
        return dtrain__safetensors_memory(file);
    dtrain__safetensors_entry *entry = &file->entries[file->count++];
    memset(entry, 0, sizeof *entry);
    entry->tensor.name = name->text;
    entry->tensor.name_length = name->length;
    entry->at = (uint32_t)at;
    parser->entry = entry;
    if (dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_ERROR)
        return dtrain__safetensors_json(parser);
    if (token.kind != DTRAIN__JSON_OBJECT)
        return dtrain__safetensors_bad(parser, 11, token.begin, "its entry is no object");
    while (status == DTRAIN_OK && dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_KEY)
        status = dtrain__safetensors_entry_field(parser, &token, entry, &has);
    if (status != DTRAIN_OK)
        return status;
    if (token.kind == DTRAIN__JSON_ERROR)
        return dtrain__safetensors_json(parser);
    if (has != 7)
        return dtrain__safetensors_bad(parser, 11, at,
                                       (has & 1) == 0   ? "its dtype is missing"
                                       : (has & 2) == 0 ? "its shape is missing"
                                                        : "its data_offsets are missing");
    status = dtrain__safetensors_fields_end(parser, 0);
    parser->entry = NULL;
    return status;
}

/* Reads the map of metadata, whose key was read last. */
static dtrain_status dtrain__safetensors_metadata_read(dtrain__safetensors_parser *parser, size_t at)
{
    dtrain_safetensors *file = parser->file;
    dtrain__json_token token;
    if (parser->has_metadata)
        return dtrain__safetensors_bad(parser, 12, at, "\"" DTRAIN__SAFETENSORS_METADATA "\" comes twice");
    parser->has_metadata = 1;
    if (dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_NULL) /* as MLX writes it where there is none */
        return DTRAIN_OK;
    if (token.kind != DTRAIN__JSON_OBJECT && token.kind != DTRAIN__JSON_ERROR)
        return dtrain__safetensors_bad(parser, 10, token.begin, "the metadata is no object");
    while (token.kind != DTRAIN__JSON_ERROR && dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_KEY) {
        void *pairs = file->pairs;
        int grown = dtrain__safetensors_grow(parser->file->allocator, &parser->json, &pairs, file->pair_count,
                                             sizeof *file->pairs);
        file->pairs = (dtrain_safetensors_pair *)pairs;
        if (!grown)
            return dtrain__safetensors_memory(file);
        dtrain_safetensors_pair *pair = &file->pairs[file->pair_count++];
        dtrain__names_text text = dtrain__safetensors_text(&parser->json, file->header, &token);
        pair->key = text.text;
        pair->key_length = text.length;
        if (dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_ERROR)
            break;
        if (token.kind != DTRAIN__JSON_STRING)
            return dtrain__safetensors_bad(parser, 10, token.begin, "a value of the metadata is no string");
        text = dtrain__safetensors_text(&parser->json, file->header, &token);
        pair->value = text.text;
        pair->value_length = text.length;
    }
    return token.kind == DTRAIN__JSON_ERROR ? dtrain__safetensors_json(parser) : DTRAIN_OK;
}

/* Reads the header's one object. */
static dtrain_status dtrain__safetensors_top(dtrain__safetensors_parser *parser)
{
    dtrain__json_token token;
    dtrain_status status = DTRAIN_OK;
    if (dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_ERROR)
        return dtrain__safetensors_json(parser);
    if (token.kind != DTRAIN__JSON_OBJECT)
        return dtrain__safetensors_bad(parser, 9, token.begin, "the header is no object");
    while (status == DTRAIN_OK && dtrain__json_next(&parser->json, &token) == DTRAIN__JSON_KEY) {
        size_t at = token.begin - 1;
        dtrain__names_text name = dtrain__safetensors_text(&parser->json, parser->file->header, &token);
        if (name.length == strlen(DTRAIN__SAFETENSORS_METADATA) &&
            memcmp(name.text, DTRAIN__SAFETENSORS_METADATA, name.length) == 0)
            status = dtrain__safetensors_metadata_read(parser, at);
        else
            status = dtrain__safetensors_entry_read(parser, &name, at);
    }
    if (status != DTRAIN_OK)
        return status;
    if (token.kind == DTRAIN__JSON_ERROR || dtrain__json_next(&parser->json, &token) != DTRAIN__JSON_END)
        return dtrain__safetensors_json(parser);
    return DTRAIN_OK;
}

static dtrain_status dtrain__safetensors_parse(dtrain_safetensors *file)
{
    dtrain__safetensors_parser parser;
    dtrain_status status;
    size_t twice = 0;
    memset(&parser, 0, sizeof parser);
    parser.file = file;
    dtrain__json_open(&parser.json, file->header, file->header_have);
    status = dtrain__safetensors_top(&parser);
    dtrain__free(file->allocator, parser.fields);
    if (status != DTRAIN_OK || file->pair_count == 0)
        return status;
    if (!dtrain__names_build(&file->keys, file->allocator, file->pairs, sizeof *file->pairs, file->pair_count, &twice))
        return dtrain__safetensors_memory(file);
    return twice == file->pair_count ? DTRAIN_OK
                                     : dtrain__safetensors_twice(&parser, dtrain__names_at(&file->keys, twice));
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

/* Sorts by merging, stable, whatever the order was: the C library promises neither. Gives which of the two arrays holds
 * the result. */
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

/* Brings the entries into the order of their data; of empty ones at one place, into that of the header. */
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
    if (places != NULL && entries != NULL) {
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
    return entries == NULL && places != NULL ? DTRAIN_OK : dtrain__safetensors_memory(file);
}

/* Checks one tensor's place and size; `from` is where the one before it ended. Texts give bytes of the data, as the
 * header does. */
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
        return dtrain__safetensors_broken(file, 17, at, tensor, "its sizes multiply to more than 64 bits");
    if (tensor->count * bits % 8 != 0)
        return dtrain__safetensors_broken(file, 18, at, tensor, "%zu elements of %u bits end inside a byte",
                                          tensor->count, (unsigned)bits);
    if (tensor->end - tensor->begin != tensor->count * bits / 8)
        return dtrain__safetensors_broken(file, 19, at, tensor, "%llu bytes of data, and %zu elements of %s take %llu",
                                          (unsigned long long)(tensor->end - tensor->begin), tensor->count,
                                          dtrain_dtype_name(tensor->dtype),
                                          (unsigned long long)(tensor->count * bits / 8));
    return DTRAIN_OK;
}

/* Checks all places, then counts them from the file's beginning. */
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
        file->entries[i].tensor.begin += file->header_bytes;
        file->entries[i].tensor.end += file->header_bytes;
    }
    return DTRAIN_OK;
}

/* Stores the sizes that the parser has checked. */
static dtrain_status dtrain__safetensors_store_shapes(dtrain_safetensors *file)
{
    size_t *next;
    if (file->shape_count > 0) /* each has a byte or more of the header: the product does not overflow */
        file->shapes = (size_t *)dtrain__resize(file->allocator, NULL, file->shape_count * sizeof *file->shapes);
    if (file->shape_count > 0 && file->shapes == NULL)
        return dtrain__safetensors_memory(file);
    next = file->shapes;
    for (size_t i = 0; i < file->count; i++) {
        const unsigned char *text = file->header + file->entries[i].shape_at;
        file->entries[i].tensor.shape = next;
        for (int k = 0; k < file->entries[i].tensor.ndim; k++, next++) {
            while (!dtrain__json_in(*text, '0', '9'))
                text++;
            size_t size = 0;
            for (; dtrain__json_in(*text, '0', '9'); text++)
                size = size * 10 + (size_t)(*text - '0');
            *next = size;
        }
    }
    return DTRAIN_OK;
}

DTRAIN__FAST_END
#endif
