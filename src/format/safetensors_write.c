/* ---- >>safetensors writing ----
 * Plans a file (order, places, header), then passes its bytes to a sink, from the first to the last. All checks come
 * before the first byte. The bytes equal those of the reference implementation:
 *
 *   tensors   sorted by dtype, the widest first, then by the bytes of their names
 *   header    compact JSON, padded with spaces to a multiple of 8 bytes
 *
 * There are exceptions. The reference writes metadata in a random order; here it is sorted. It writes no valid JSON for
 * empty metadata without tensors. A tensor with the name "__metadata__" and a duplicate name are errors here. */
#ifndef DTRAIN__SAFETENSORS_WRITE
#define DTRAIN__SAFETENSORS_WRITE
#include "safetensors_read.c"

#define DTRAIN__SAFETENSORS_CHUNK ((size_t)8 << 20)   /* bytes per call of the sink */
#define DTRAIN__SAFETENSORS_FILL ((size_t)24 * 43690) /* bytes per call of a fill: whole elements of every dtype */

/* A tensor to write. The name comes first, as the table of names requires. */
typedef struct dtrain__safetensors_item {
    dtrain__names_text name;
    const dtrain_safetensors_source *source;
    uint64_t bytes;
} dtrain__safetensors_item;

typedef struct dtrain__safetensors_plan {
    dtrain_allocator *allocator, own;
    dtrain__safetensors_item *items; /* in the order of their data */
    size_t count;
    dtrain_safetensors_pair *pairs; /* sorted; lengths filled in */
    size_t pair_count;
    int has_metadata;
    unsigned char *header; /* begins with the 8 bytes of its length */
    size_t header_bytes;
    uint64_t data_bytes;
} dtrain__safetensors_plan;

static int dtrain__safetensors_is_utf8(const char *text, size_t length)
{
    size_t step;
    for (size_t at = 0; at < length; at += step)
        if ((step = dtrain__utf8((const unsigned char *)text + at, length - at)) == 0)
            return 0;
    return 1;
}

static int dtrain__safetensors_compare_text(const char *a, size_t a_length, const char *b, size_t b_length)
{
    size_t shorter = a_length < b_length ? a_length : b_length;
    int order = shorter > 0 ? memcmp(a, b, shorter) : 0;
    return order != 0 ? order : a_length < b_length ? -1 : a_length > b_length;
}

static int dtrain__safetensors_compare_items(const void *left, const void *right)
{
    const dtrain__safetensors_item *a = (const dtrain__safetensors_item *)left;
    const dtrain__safetensors_item *b = (const dtrain__safetensors_item *)right;
    if (a->source->dtype != b->source->dtype)
        return (int)a->source->dtype > (int)b->source->dtype ? -1 : 1;
    return dtrain__safetensors_compare_text(a->name.text, a->name.length, b->name.text, b->name.length);
}

static int dtrain__safetensors_compare_pairs(const void *left, const void *right)
{
    const dtrain_safetensors_pair *a = (const dtrain_safetensors_pair *)left;
    const dtrain_safetensors_pair *b = (const dtrain_safetensors_pair *)right;
    return dtrain__safetensors_compare_text(a->key, a->key_length, b->key, b->key_length);
}

static dtrain_status dtrain__safetensors_refuse(const dtrain__safetensors_item *item, const char *why)
{
    char quoted[64];
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_write: tensor \"%s\" %s",
                        dtrain__safetensors_quote(quoted, item->name.text, item->name.length), why);
}

/* Checks one source and counts its bytes. */
static dtrain_status dtrain__safetensors_take(dtrain__safetensors_item *item, const dtrain_safetensors_source *source,
                                              size_t index)
{
    uint64_t count = 1, bits = dtrain_dtype_bits(source->dtype);
    if (source->name == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_write: tensor %zu has no name: give it one", index);
    item->source = source;
    item->name.text = source->name;
    item->name.length = source->name_length > 0 ? source->name_length : strlen(source->name);
    if (!dtrain__safetensors_is_utf8(item->name.text, item->name.length))
        return dtrain__safetensors_refuse(item, "has a name that is not UTF-8 (R4)");
    if (item->name.length == 12 && memcmp(item->name.text, DTRAIN__SAFETENSORS_METADATA, 12) == 0)
        return dtrain__safetensors_refuse(item, "has the name of the metadata (R10): give it another");
    if (bits == 0)
        return dtrain__safetensors_refuse(item, "has no dtype of the format (R13): use one of dtrain_dtype");
    if (source->ndim < 0 || (source->ndim > 0 && source->shape == NULL))
        return dtrain__safetensors_refuse(item, "has no shape: give ndim sizes, or an ndim of 0");
    for (int d = 0; d < source->ndim; d++) {
        if (source->shape[d] != 0 && count > UINT64_MAX / source->shape[d])
            return dtrain__safetensors_refuse(item, "has sizes that give more than 2^64 - 1 bits (R17)");
        count *= source->shape[d];
    }
    if (count > UINT64_MAX / bits)
        return dtrain__safetensors_refuse(item, "has sizes that give more than 2^64 - 1 bits (R17)");
    if (count * bits % 8 != 0)
        return dtrain__safetensors_refuse(item, "ends inside a byte (R18): its elements must fill whole bytes");
    item->bytes = count * bits / 8;
    if (item->bytes > 0 && source->data == NULL && source->fill == NULL)
        return dtrain__safetensors_refuse(item, "has neither data nor fill: give it one of the two");
    return DTRAIN_OK;
}

static dtrain_status dtrain__safetensors_plan_tensors(dtrain__safetensors_plan *plan,
                                                      const dtrain_safetensors_source *sources)
{
    dtrain__names names;
    size_t twice = plan->count;
    for (size_t i = 0; i < plan->count; i++) {
        dtrain_status status = dtrain__safetensors_take(&plan->items[i], &sources[i], i);
        if (status != DTRAIN_OK)
            return status;
        if (plan->items[i].bytes > (uint64_t)INT64_MAX - plan->data_bytes)
            return dtrain__safetensors_refuse(&plan->items[i],
                                              "makes the file longer than 2^63 - 1 bytes: write several files");
        plan->data_bytes += plan->items[i].bytes;
    }
    if (plan->count > 1)
        qsort(plan->items, plan->count, sizeof *plan->items, dtrain__safetensors_compare_items);
    int built = dtrain__names_build(&names, plan->allocator, plan->items, sizeof *plan->items, plan->count, &twice);
    dtrain__names_free(&names, plan->allocator);
    if (!built)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_write: no memory for %zu names", plan->count);
    if (twice < plan->count)
        return dtrain__safetensors_refuse(&plan->items[twice], "comes twice (R12): give each tensor its own name");
    return DTRAIN_OK;
}

static dtrain_status dtrain__safetensors_plan_pairs(dtrain__safetensors_plan *plan, const dtrain_safetensors_pair *from)
{
    char quoted[64];
    for (size_t i = 0; i < plan->pair_count; i++) {
        dtrain_safetensors_pair *pair = &plan->pairs[i];
        *pair = from[i];
        if (pair->key == NULL || pair->value == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "safetensors_write: pair %zu of %zu of the metadata has no %s, expected a text", i,
                                plan->pair_count, pair->key == NULL ? "key" : "value");
        pair->key_length = pair->key_length > 0 ? pair->key_length : strlen(pair->key);
        pair->value_length = pair->value_length > 0 ? pair->value_length : strlen(pair->value);
        if (!dtrain__safetensors_is_utf8(pair->key, pair->key_length) ||
            !dtrain__safetensors_is_utf8(pair->value, pair->value_length))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_write: metadata \"%s\" is not UTF-8 (R4)",
                                dtrain__safetensors_quote(quoted, pair->key, pair->key_length));
    }
    if (plan->pair_count > 1)
        qsort(plan->pairs, plan->pair_count, sizeof *plan->pairs, dtrain__safetensors_compare_pairs);
    for (size_t i = 1; i < plan->pair_count; i++)
        if (dtrain__safetensors_compare_pairs(&plan->pairs[i - 1], &plan->pairs[i]) == 0)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_write: metadata \"%s\" comes twice (R12)",
                                dtrain__safetensors_quote(quoted, plan->pairs[i].key, plan->pairs[i].key_length));
    return DTRAIN_OK;
}

static void dtrain__safetensors_print_item(dtrain__json_writer *json, const dtrain__safetensors_item *item,
                                           uint64_t begin)
{
    dtrain__json_write_key(json, item->name.text, item->name.length);
    dtrain__json_begin(json, 1);
    dtrain__json_member_text(json, "dtype", dtrain_dtype_name(item->source->dtype));
    dtrain__json_member(json, "shape");
    dtrain__json_write_sizes(json, item->source->shape, (size_t)item->source->ndim);
    dtrain__json_member(json, "data_offsets");
    dtrain__json_begin(json, 0);
    dtrain__json_write_u64(json, begin);
    dtrain__json_write_u64(json, begin + item->bytes);
    dtrain__json_end(json);
    dtrain__json_end(json);
}

/* Prints the header into `capacity` bytes. Returns the number of bytes that it needs. */
static size_t dtrain__safetensors_print(const dtrain__safetensors_plan *plan, void *out, size_t capacity)
{
    dtrain__json_writer json;
    uint64_t begin = 0;
    dtrain__json_write_start(&json, out, capacity);
    dtrain__json_begin(&json, 1);
    if (plan->has_metadata) {
        dtrain__json_member(&json, DTRAIN__SAFETENSORS_METADATA);
        dtrain__json_begin(&json, 1);
        for (size_t i = 0; i < plan->pair_count; i++) {
            dtrain__json_write_key(&json, plan->pairs[i].key, plan->pairs[i].key_length);
            dtrain__json_write_string(&json, plan->pairs[i].value, plan->pairs[i].value_length);
        }
        dtrain__json_end(&json);
    }
    for (size_t i = 0; i < plan->count; i++) {
        dtrain__safetensors_print_item(&json, &plan->items[i], begin);
        begin += plan->items[i].bytes;
    }
    dtrain__json_end(&json);
    return json.bytes;
}

static dtrain_status dtrain__safetensors_plan_header(dtrain__safetensors_plan *plan)
{
    size_t length = dtrain__safetensors_print(plan, NULL, 0), padded = length + (8 - length % 8) % 8;
    if (length > DTRAIN__SAFETENSORS_HEADER_MOST || padded > DTRAIN__SAFETENSORS_HEADER_MOST)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "safetensors_write: the header has %zu bytes for %zu tensors, expected at most 100000000 (R2): "
            "write several files",
            length, plan->count);
    plan->header = (unsigned char *)dtrain__alloc(plan->allocator, padded + 8);
    if (plan->header == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_write: no memory for a header of %zu bytes", padded);
    plan->header_bytes = padded + 8;
    for (int i = 0; i < 8; i++)
        plan->header[i] = (unsigned char)((uint64_t)padded >> (8 * i));
    memset(plan->header + 8, ' ', padded);
    dtrain__safetensors_print(plan, plan->header + 8, length);
    return DTRAIN_OK;
}

static void dtrain__safetensors_plan_end(dtrain__safetensors_plan *plan)
{
    dtrain__free(plan->allocator, plan->header);
    dtrain__free(plan->allocator, plan->pairs);
    dtrain__free(plan->allocator, plan->items);
}

/* Checks everything and makes the header. If it succeeds, end the plan with dtrain__safetensors_plan_end. */
static dtrain_status dtrain__safetensors_plan_begin(dtrain__safetensors_plan *plan,
                                                    const dtrain_safetensors_source *sources, size_t count,
                                                    const dtrain_safetensors_write_desc *desc)
{
    size_t item_bytes, pair_bytes;
    dtrain_status status = DTRAIN_OK;
    memset(plan, 0, sizeof *plan);
    plan->allocator = desc != NULL && desc->allocator != NULL ? desc->allocator : &plan->own;
    plan->count = count;
    plan->pair_count = desc != NULL ? desc->metadata_count : 0;
    plan->has_metadata = desc != NULL && desc->metadata != NULL;
    if ((count > 0 && sources == NULL) || (plan->pair_count > 0 && !plan->has_metadata))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_write: %s is NULL, expected %zu %s",
                            count > 0 && sources == NULL ? "sources" : "metadata",
                            count > 0 && sources == NULL ? count : plan->pair_count,
                            count > 0 && sources == NULL ? "tensors" : "pairs");
    if (!dtrain__mul_size(count, sizeof *plan->items, &item_bytes) ||
        !dtrain__mul_size(plan->pair_count, sizeof *plan->pairs, &pair_bytes) || count > INT_MAX)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "safetensors_write: %zu tensors and %zu pairs of metadata are too many for a header (R2): "
                            "write several files",
                            count, plan->pair_count);
    plan->items = (dtrain__safetensors_item *)dtrain__alloc(plan->allocator, item_bytes);
    plan->pairs = (dtrain_safetensors_pair *)dtrain__alloc(plan->allocator, pair_bytes);
    if (plan->items == NULL || plan->pairs == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_write: no memory to sort %zu tensors", count);
    if (status == DTRAIN_OK)
        status = dtrain__safetensors_plan_tensors(plan, sources);
    if (status == DTRAIN_OK)
        status = dtrain__safetensors_plan_pairs(plan, desc != NULL ? desc->metadata : NULL);
    if (status == DTRAIN_OK)
        status = dtrain__safetensors_plan_header(plan);
    if (status != DTRAIN_OK)
        dtrain__safetensors_plan_end(plan);
    return status;
}

/* Reports which callback ended the writing, unless the callback has set an error text itself. */
static dtrain_status dtrain__safetensors_ended(const dtrain__safetensors_item *item, const char *callback,
                                               dtrain_status status)
{
    char quoted[64];
    if (dtrain__thread_error.text[0] != '\0')
        return status;
    return dtrain__fail(NULL, status, "safetensors_write: %s returned %s%s%s%s", callback, dtrain_status_name(status),
                        item != NULL ? " at tensor \"" : "",
                        item != NULL ? dtrain__safetensors_quote(quoted, item->name.text, item->name.length) : "",
                        item != NULL ? "\"" : "");
}

/* Passes one tensor's bytes to the sink. stage: DTRAIN__SAFETENSORS_FILL bytes, if fill or the byte order need it. */
static dtrain_status dtrain__safetensors_emit_tensor(const dtrain__safetensors_item *item, unsigned char *stage,
                                                     dtrain_safetensors_sink sink, void *user)
{
    const dtrain_safetensors_source *source = item->source;
    int direct = source->data != NULL && !DTRAIN__FILE_SWAP;
    size_t most = direct ? DTRAIN__SAFETENSORS_CHUNK : DTRAIN__SAFETENSORS_FILL;
    dtrain_status status = DTRAIN_OK;
    for (uint64_t at = 0; at < item->bytes && status == DTRAIN_OK;) {
        size_t some = item->bytes - at < most ? (size_t)(item->bytes - at) : most;
        const unsigned char *data = stage;
        if (direct)
            data = (const unsigned char *)source->data + at;
        else if (source->data != NULL)
            memcpy(stage, (const unsigned char *)source->data + at, some);
        else
            status = source->fill(source->user, at, stage, some);
        if (status != DTRAIN_OK)
            return dtrain__safetensors_ended(item, "fill", status);
        if (!direct)
            dtrain__safetensors_swap(stage, some, source->dtype);
        status = sink(user, data, some);
        at += some;
    }
    return status == DTRAIN_OK ? status : dtrain__safetensors_ended(item, "sink", status);
}

/* Passes all bytes of a planned file to a sink. */
static dtrain_status dtrain__safetensors_emit(dtrain__safetensors_plan *plan, dtrain_safetensors_sink sink, void *user)
{
    unsigned char *stage = NULL;
    int staged = DTRAIN__FILE_SWAP;
    for (size_t i = 0; i < plan->count; i++)
        staged = staged || (plan->items[i].bytes > 0 && plan->items[i].source->data == NULL);
    if (staged && (stage = (unsigned char *)dtrain__alloc(plan->allocator, DTRAIN__SAFETENSORS_FILL)) == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_write: no memory for %zu bytes of data",
                            DTRAIN__SAFETENSORS_FILL);
    dtrain_status status = DTRAIN_OK;
    dtrain__error before = dtrain__thread_error;
    dtrain__thread_error.text[0] = '\0'; /* so a text after an error comes from a callback */
    for (size_t at = 0; at < plan->header_bytes && status == DTRAIN_OK; at += DTRAIN__SAFETENSORS_CHUNK) {
        size_t left = plan->header_bytes - at;
        status = sink(user, plan->header + at, left < DTRAIN__SAFETENSORS_CHUNK ? left : DTRAIN__SAFETENSORS_CHUNK);
        if (status != DTRAIN_OK)
            status = dtrain__safetensors_ended(NULL, "sink", status);
    }
    for (size_t i = 0; i < plan->count && status == DTRAIN_OK; i++)
        status = dtrain__safetensors_emit_tensor(&plan->items[i], stage, sink, user);
    dtrain__free(plan->allocator, stage);
    if (status == DTRAIN_OK)
        dtrain__thread_error = before;
    return status;
}

DTRAIN_API dtrain_status dtrain_safetensors_write(dtrain_safetensors_sink sink, void *user,
                                                  const dtrain_safetensors_source *sources, size_t count,
                                                  const dtrain_safetensors_write_desc *desc)
{
    dtrain__safetensors_plan plan;
    if (sink == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_write: sink is NULL, expected a function");
    dtrain_status status = dtrain__safetensors_plan_begin(&plan, sources, count, desc);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__safetensors_emit(&plan, sink, user);
    dtrain__safetensors_plan_end(&plan);
    return status;
}

DTRAIN_API dtrain_status dtrain_safetensors_size(uint64_t *bytes, const dtrain_safetensors_source *sources,
                                                 size_t count, const dtrain_safetensors_write_desc *desc)
{
    dtrain__safetensors_plan plan;
    if (bytes == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_size: bytes is NULL, expected a number to set");
    *bytes = 0;
    dtrain_status status = dtrain__safetensors_plan_begin(&plan, sources, count, desc);
    if (status != DTRAIN_OK)
        return status;
    *bytes = plan.header_bytes + plan.data_bytes;
    dtrain__safetensors_plan_end(&plan);
    return DTRAIN_OK;
}

/* Saves a file in an open directory. */
static dtrain_status dtrain__safetensors_save_at(int directory, const char *name,
                                                 const dtrain_safetensors_source *sources, size_t count,
                                                 const dtrain_safetensors_write_desc *desc)
{
    dtrain__safetensors_plan plan;
    dtrain__file_temp temp;
    dtrain_status status = dtrain__safetensors_plan_begin(&plan, sources, count, desc);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__file_place(directory, name, "safetensors_save");
    if (status == DTRAIN_OK)
        status = dtrain__file_temp_begin(&temp, directory, name, "safetensors_save");
    if (status == DTRAIN_OK)
        status = dtrain__file_temp_end(&temp, dtrain__safetensors_emit(&plan, dtrain__file_temp_write, &temp),
                                       desc != NULL && desc->no_sync);
    dtrain__safetensors_plan_end(&plan);
    return status;
}

DTRAIN_API dtrain_status dtrain_safetensors_save(const char *path, const dtrain_safetensors_source *sources,
                                                 size_t count, const dtrain_safetensors_write_desc *desc)
{
    const char *name;
    int directory;
    if (path == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_save: path is NULL, expected the path of a file");
    dtrain_status status = dtrain__file_open_parent(&directory, &name, path, "safetensors_save");
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__safetensors_save_at(directory, name, sources, count, desc);
    dtrain__file_close(directory);
    return status;
}

#endif
