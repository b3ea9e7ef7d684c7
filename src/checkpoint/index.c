/* ---- >>index ----
 * What a checkpoint consists of: files, tensors and their pieces, and numbers and texts beside them. One JSON form
 * serves for both a rank's part, which is an index with one file, and the whole. Parts are read one after the other
 * into one index, which is then settled: tensors are sorted, those of one name are joined, and their pieces must tile
 * them. The text ends with the hash of all that comes before.
 *
 * A text may be hostile. Memory grows with what was read of it, and is a small multiple of that. */
#ifndef DTRAIN__INDEX
#define DTRAIN__INDEX
#include "checkpoint.h"
#include "../format/safetensors_write.c"
#include "../tensor/region.c"
#include "../base/json.c"

#define DTRAIN__INDEX_BYTES ((uint64_t)1 << 32) /* the longest text that is read */
#define DTRAIN__INDEX_NONE ((size_t)-1)
#define DTRAIN__INDEX_TAIL 27 /* bytes of ,"hash":"0123456789abcdef"} */
#define DTRAIN__INDEX_BLOCK 65536

/* The number of a save: the checkpointer's own number, and how many saves it has begun. */
typedef struct dtrain__index_save_id {
    uint64_t nonce, counter;
} dtrain__index_save_id;

static int dtrain__index_same_save(const dtrain__index_save_id *a, const dtrain__index_save_id *b)
{
    return a->nonce == b->nonce && a->counter == b->counter;
}

/* One file of an index, with the hashes that check it. */
typedef struct dtrain__index_hashed {
    size_t name; /* place among the texts; NONE: no file */
    uint64_t header_bytes, header_hash, data_bytes;
} dtrain__index_hashed;

typedef struct dtrain__index_file {
    dtrain__index_hashed data, hashes;
    size_t blocks, block_count; /* hashes of the blocks of the hashes file, among the numbers */
    int rank;
    int holder; /* the rank that has the file, if files are not shared; -1: this rank */
} dtrain__index_file;

typedef struct dtrain__index_tensor {
    size_t name, name_length;
    dtrain_dtype dtype;
    int ndim;
    size_t shape[DTRAIN_MAX_DIMS];
    size_t first, count; /* its pieces, once settled */
    size_t spares;       /* copies of some pieces, which follow them */
} dtrain__index_tensor;

typedef struct dtrain__index_piece {
    size_t tensor, file;
    size_t number; /* its name in the file is NAME#number; NONE: NAME */
    size_t box;    /* place of ndim begins and ndim sizes among the numbers; NONE: the whole tensor */
    size_t at, count;
    size_t copy; /* which of several copies; settling leaves out all but the first */
} dtrain__index_piece;

typedef struct dtrain__index_value {
    size_t key, key_length, value, value_length;
} dtrain__index_value;

/* What is not about tensors. The whole index takes the facts of its first part. */
typedef struct dtrain__index_facts {
    dtrain__index_save_id id;
    uint64_t step, world_size;
    uint64_t seed, random_index;
    uint64_t branch; /* of two saves the one of a higher branch is newer, then that of a higher step: see >>save */
} dtrain__index_facts;

enum { DTRAIN__INDEX_SETTING = 80, DTRAIN__INDEX_SETTINGS = 64 }; /* most bytes of a key or value; most settings */

typedef struct dtrain__index {
    dtrain_allocator *allocator;
    const char *where; /* names the text being read, for error texts */
    int parts;         /* number of parts read */
    dtrain__index_facts facts;
    char *texts; /* each ends with a zero byte */
    uint64_t *numbers;
    dtrain__index_file *files;
    dtrain__index_tensor *tensors;
    dtrain__index_piece *pieces;
    dtrain__index_value *values;
    dtrain__index_value *settings; /* what lists tell beside their pieces (see >>pieces); numbers as they are written */
    size_t text_bytes, number_count, file_count, tensor_count, piece_count, value_count, setting_count;
} dtrain__index;

static void dtrain__index_free(dtrain__index *index)
{
    dtrain__free(index->allocator, index->texts);
    dtrain__free(index->allocator, index->numbers);
    dtrain__free(index->allocator, index->files);
    dtrain__free(index->allocator, index->tensors);
    dtrain__free(index->allocator, index->pieces);
    dtrain__free(index->allocator, index->values);
    dtrain__free(index->allocator, index->settings);
}

static void dtrain__index_begin(dtrain__index *index, dtrain_allocator *allocator)
{
    memset(index, 0, sizeof *index);
    index->allocator = allocator;
}

/* Empties an index and keeps its memory. */
static void dtrain__index_clear(dtrain__index *index)
{
    index->text_bytes = index->number_count = index->file_count = index->tensor_count = index->piece_count =
        index->value_count = index->setting_count = 0;
    index->parts = 0;
    memset(&index->facts, 0, sizeof index->facts);
}

/* Makes room for `more` elements after `count` in an array that grows. Returns 0 if there is no memory, and reports it.
 */
#define DTRAIN__INDEX_ROOM(allocator, array, count, more) \
    dtrain__index_room((allocator), (void *)&(array), sizeof *(array), (count), (more))

/* Appends an item to such an array. */
#define DTRAIN__INDEX_ADD(allocator, array, count, item) \
    dtrain__index_add((allocator), (void *)&(array), sizeof *(array), &(count), &(item))

static DTRAIN__NOINLINE int dtrain__index_room(dtrain_allocator *allocator, void *array, size_t size, size_t count,
                                               size_t more)
{
    void *old, *larger;
    memcpy(&old, array, sizeof old);
    larger = dtrain__memory_grow(allocator, old, size, count, more);
    if (larger == NULL) {
        dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a list of %zu entries of %zu bytes",
                     count + more, size);
        return 0;
    }
    memcpy(array, &larger, sizeof larger);
    return 1;
}

static DTRAIN__NOINLINE dtrain_status dtrain__index_add(dtrain_allocator *allocator, void *array, size_t size,
                                                        size_t *count, const void *item)
{
    unsigned char *items;
    if (!dtrain__index_room(allocator, array, size, *count, 1))
        return DTRAIN_ERR_MEMORY;
    memcpy(&items, array, sizeof items);
    memcpy(items + (*count)++ * size, item, size);
    return DTRAIN_OK;
}

/* Keeps a text; returns its place, or NONE. */
static size_t dtrain__index_text(dtrain__index *index, const char *text, size_t length)
{
    size_t at = index->text_bytes;
    if (!DTRAIN__INDEX_ROOM(index->allocator, index->texts, at, length + 1))
        return DTRAIN__INDEX_NONE;
    if (length > 0)
        memcpy(index->texts + at, text, length);
    index->texts[at + length] = '\0';
    index->text_bytes += length + 1;
    return at;
}

/* Keeps sizes among the numbers. */
static dtrain_status dtrain__index_add_sizes(dtrain__index *index, const size_t *sizes, int count)
{
    dtrain_status status = DTRAIN_OK;
    for (int d = 0; d < count && status == DTRAIN_OK; d++) {
        uint64_t size = sizes[d];
        status = DTRAIN__INDEX_ADD(index->allocator, index->numbers, index->number_count, size);
    }
    return status;
}

/* Keeps a key and its value. */
static dtrain_status dtrain__index_pair(dtrain__index *index, const char *key, size_t key_length, const char *value,
                                        size_t value_length, dtrain__index_value *pair)
{
    pair->key_length = key_length;
    pair->value_length = value_length;
    pair->key = dtrain__index_text(index, key, key_length);
    pair->value = dtrain__index_text(index, value, value_length);
    return pair->key == DTRAIN__INDEX_NONE || pair->value == DTRAIN__INDEX_NONE ? DTRAIN_ERR_MEMORY : DTRAIN_OK;
}

static int dtrain__index_is_number(const char *text)
{
    return *text == '-' || (*text >= '0' && *text <= '9');
}

/* Returns the value of a setting, or NULL. */
static const char *dtrain__index_setting(const dtrain__index *index, const char *key)
{
    for (size_t i = 0; i < index->setting_count; i++)
        if (strcmp(index->texts + index->settings[i].key, key) == 0)
            return index->texts + index->settings[i].value;
    return NULL;
}

/* Enters a setting. If an earlier list or part has entered it, the value must be the same. */
static dtrain_status dtrain__index_set(dtrain__index *index, const char *key, const char *value)
{
    const char *before = dtrain__index_setting(index, key);
    dtrain__index_value setting;
    if (before != NULL && strcmp(before, value) != 0)
        return dtrain__fail(NULL, index->where != NULL ? DTRAIN_ERR_MISMATCH : DTRAIN_ERR_INVALID,
                            "checkpoint: %.200s has %s %s, and an earlier list or part has %s; a checkpoint keeps one "
                            "value: make and step all alike, or give each a checkpointer",
                            index->where != NULL ? index->where : "a list of this rank", key, value, before);
    if (before != NULL || index->setting_count == DTRAIN__INDEX_SETTINGS)
        return DTRAIN_OK;
    dtrain_status status = dtrain__index_pair(index, key, strlen(key), value, strlen(value), &setting);
    return status == DTRAIN_OK ? DTRAIN__INDEX_ADD(index->allocator, index->settings, index->setting_count, setting)
                               : status;
}

static void dtrain__index_region(const dtrain__index *index, const dtrain__index_tensor *tensor,
                                 const dtrain__index_piece *piece, dtrain__region *region)
{
    memset(region, 0, sizeof *region);
    region->ndim = tensor->ndim;
    for (int d = 0; d < tensor->ndim; d++) {
        int boxed = piece != NULL && piece->box != DTRAIN__INDEX_NONE;
        region->shape[d] = tensor->shape[d];
        region->begin[d] = boxed ? (size_t)index->numbers[piece->box + (size_t)d] : 0;
        region->size[d] = boxed ? (size_t)index->numbers[piece->box + (size_t)(tensor->ndim + d)] : tensor->shape[d];
    }
    region->at = piece != NULL ? piece->at : 0;
    region->count = piece != NULL ? piece->count : dtrain__pieces_product(region->shape, 0, region->ndim);
    dtrain__region_settle(region);
}

/* ---- settling ---- */

static DTRAIN__NOINLINE const char *dtrain__index_name(const dtrain__index *index, const dtrain__index_tensor *tensor)
{
    return index->texts + tensor->name;
}

/* qsort passes no context: the sorted items carry what they are compared by. */
typedef struct dtrain__index_order {
    const char *name;
    size_t length, old;
} dtrain__index_order;

static int dtrain__index_by_name(const void *left, const void *right)
{
    const dtrain__index_order *a = (const dtrain__index_order *)left, *b = (const dtrain__index_order *)right;
    int order = dtrain__safetensors_compare_text(a->name, a->length, b->name, b->length);
    return order != 0 ? order : a->old < b->old ? -1 : a->old > b->old;
}

/* Writes dtype and shape as "F32 {2, 3}", for texts. */
static const char *dtrain__index_form(char out[200], dtrain_dtype dtype, const size_t *shape, int ndim)
{
    int used = snprintf(out, 200, "%s {", dtrain_dtype_name(dtype));
    for (int d = 0; d < ndim; d++)
        used += snprintf(out + used, 200 - (size_t)used, "%s%zu", d > 0 ? ", " : "", shape[d]);
    snprintf(out + used, 200 - (size_t)used, "}");
    return out;
}

/* Joins tensors of one name. Writes the joined ones to `joined`, and the new number of each old one to `moved`. */
static dtrain_status dtrain__index_join(dtrain__index *index, const dtrain__index_order *order,
                                        dtrain__index_tensor *joined, size_t *moved, size_t *count)
{
    *count = 0;
    for (size_t i = 0; i < index->tensor_count; i++) {
        const dtrain__index_tensor *tensor = &index->tensors[order[i].old];
        dtrain__index_tensor *last = *count > 0 ? &joined[*count - 1] : NULL;
        if (last == NULL || last->name_length != tensor->name_length ||
            memcmp(order[i].name, dtrain__index_name(index, last), tensor->name_length) != 0) {
            joined[(*count)++] = *tensor;
        } else if (last->dtype != tensor->dtype || last->ndim != tensor->ndim ||
                   memcmp(last->shape, tensor->shape, (size_t)last->ndim * sizeof(size_t)) != 0) {
            char one[200], other[200];
            return dtrain__fail(
                NULL, DTRAIN_ERR_MISMATCH,
                "checkpoint: tensor \"%.200s\" is %s in one part and %s in another: give every rank and "
                "list the same dtype and full shape",
                dtrain__index_name(index, tensor), dtrain__index_form(one, last->dtype, last->shape, last->ndim),
                dtrain__index_form(other, tensor->dtype, tensor->shape, tensor->ndim));
        }
        moved[order[i].old] = *count - 1;
    }
    return DTRAIN_OK;
}

/* Sorts pieces by tensor, and within a tensor in the order of reading (counting sort). */
static void dtrain__index_deal(dtrain__index *index, dtrain__index_piece *dealt, const size_t *moved)
{
    size_t at = 0;
    for (size_t i = 0; i < index->tensor_count; i++)
        index->tensors[i].count = 0;
    for (size_t i = 0; i < index->piece_count; i++)
        index->tensors[index->pieces[i].tensor = moved[index->pieces[i].tensor]].count++;
    for (size_t i = 0; i < index->tensor_count; i++) {
        index->tensors[i].first = at;
        at += index->tensors[i].count;
        index->tensors[i].count = 0;
    }
    for (size_t i = 0; i < index->piece_count; i++) {
        dtrain__index_tensor *tensor = &index->tensors[index->pieces[i].tensor];
        dealt[tensor->first + tensor->count++] = index->pieces[i];
    }
    if (index->piece_count > 0)
        memcpy(index->pieces, dealt, index->piece_count * sizeof *dealt);
}

typedef struct dtrain__index_copy {
    dtrain__region region;
    dtrain__index_piece piece;
} dtrain__index_copy;

static int dtrain__index_by_region(const void *left, const void *right)
{
    const dtrain__index_copy *a = (const dtrain__index_copy *)left, *b = (const dtrain__index_copy *)right;
    int order = dtrain__region_compare(&a->region, &b->region);
    if (order != 0)
        return order;
    return a->piece.copy != b->piece.copy  ? (a->piece.copy < b->piece.copy ? -1 : 1)
           : a->piece.file < b->piece.file ? -1
                                           : a->piece.file > b->piece.file;
}

/* Puts the first of each set of copies in front, and the others behind them, if any piece of the tensor has copies. */
static dtrain_status dtrain__index_part_copies(dtrain__index *index, dtrain__index_tensor *tensor)
{
    dtrain__index_piece *pieces = index->pieces + tensor->first;
    size_t marked = 0, kept = 0;
    for (size_t i = 0; i < tensor->count; i++)
        marked += pieces[i].copy != 0;
    if (marked == 0)
        return DTRAIN_OK;
    dtrain__index_copy *copies = (dtrain__index_copy *)dtrain__alloc(index->allocator, tensor->count * sizeof *copies);
    if (copies == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu pieces", tensor->count);
    for (size_t i = 0; i < tensor->count; i++) {
        dtrain__index_region(index, tensor, &pieces[i], &copies[i].region);
        copies[i].piece = pieces[i];
    }
    qsort(copies, tensor->count, sizeof *copies, dtrain__index_by_region);
    for (int spare = 0; spare < 2; spare++)
        for (size_t i = 0; i < tensor->count; i++) {
            int again = i > 0 && copies[i].piece.copy != copies[i - 1].piece.copy &&
                        dtrain__region_compare(&copies[i].region, &copies[i - 1].region) == 0;
            if (again == spare)
                pieces[kept++] = copies[i].piece;
            tensor->spares += (size_t)(again && spare);
        }
    dtrain__free(index->allocator, copies);
    tensor->count -= tensor->spares;
    return DTRAIN_OK;
}

/* Checks that pieces tile their tensor. */
static dtrain_status dtrain__index_check_tensor(dtrain__index *index, dtrain__index_tensor *tensor)
{
    dtrain__region region, whole;
    dtrain__region_tiling tiling;
    dtrain_status status = dtrain__index_part_copies(index, tensor);
    if (status != DTRAIN_OK)
        return status;
    dtrain__index_region(index, tensor, NULL, &whole);
    dtrain__region_tiling_begin(&tiling, &whole);
    for (size_t i = 0; i < tensor->count; i++) {
        dtrain__index_region(index, tensor, &index->pieces[tensor->first + i], &region);
        dtrain__region_tiling_add(&tiling, &region);
    }
    if (dtrain__region_tiling_whole(&tiling))
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                        "checkpoint: the pieces of tensor \"%.200s\" have %zu elements, the tensor %zu: pieces must "
                        "hold each element once%s",
                        dtrain__index_name(index, tensor), tiling.count, whole.count,
                        tiling.count == whole.count ? ", but some overlap and leave others out" : "");
}

/* Joins what was read, and checks it. tiled = 0: this is one part, whose pieces need not tile. */
static dtrain_status dtrain__index_settle(dtrain__index *index, int tiled)
{
    size_t tensors = index->tensor_count, pieces = index->piece_count, count;
    dtrain_allocator *allocator = index->allocator;
    dtrain__index_order *order = (dtrain__index_order *)dtrain__alloc(allocator, tensors * sizeof *order);
    dtrain__index_tensor *joined = (dtrain__index_tensor *)dtrain__alloc(allocator, tensors * sizeof *joined);
    size_t *moved = (size_t *)dtrain__alloc(allocator, tensors * sizeof *moved);
    dtrain__index_piece *dealt = (dtrain__index_piece *)dtrain__alloc(allocator, pieces * sizeof *dealt);
    dtrain_status status = DTRAIN_OK;
    if (order == NULL || joined == NULL || moved == NULL || dealt == NULL) {
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                              "checkpoint: no memory to sort an index of %zu tensors and %zu pieces", tensors, pieces);
        goto done;
    }
    for (size_t i = 0; i < tensors; i++) {
        order[i].name = dtrain__index_name(index, &index->tensors[i]);
        order[i].length = index->tensors[i].name_length;
        order[i].old = i;
    }
    qsort(order, tensors, sizeof *order, dtrain__index_by_name);
    status = dtrain__index_join(index, order, joined, moved, &count);
    if (status != DTRAIN_OK)
        goto done;
    index->tensor_count = count;
    if (count > 0)
        memcpy(index->tensors, joined, count * sizeof *joined);
    dtrain__index_deal(index, dealt, moved);
done:
    dtrain__free(allocator, order);
    dtrain__free(allocator, joined);
    dtrain__free(allocator, moved);
    dtrain__free(allocator, dealt);
    for (size_t i = 0; status == DTRAIN_OK && tiled && i < index->tensor_count; i++)
        status = dtrain__index_check_tensor(index, &index->tensors[i]);
    return status;
}

/* Returns the tensor of a name, or NULL. The index must be settled. */
static dtrain__index_tensor *dtrain__index_find(const dtrain__index *index, const char *name, const char *suffix)
{
    dtrain_piece key, here;
    size_t low = 0, high = index->tensor_count;
    memset(&key, 0, sizeof key);
    memset(&here, 0, sizeof here);
    key.name = name;
    key.suffix = suffix;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        here.name = dtrain__index_name(index, &index->tensors[middle]);
        int order = dtrain__region_compare_names(&here, &key);
        if (order == 0)
            return &index->tensors[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

#endif
