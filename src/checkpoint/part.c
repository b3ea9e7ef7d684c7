/* ---- >>part ----
 * One rank's part of a save: which pieces it writes, their copies, and three files. They are the data, the hashes of
 * its blocks, and last the mark, which says that the other two are on the disk and what they hold. File names have the
 * number of the save. So files of an earlier save, or of a rank taken for dead that still writes, are never taken for
 * this one's. */
#ifndef DTRAIN__PART
#define DTRAIN__PART
#include "index_text.c"
#include "piece.c"
#include "staging.c"
#include "../format/safetensors_write.c"
#include "../tensor/streaming.c"

#define DTRAIN__PART_GRAIN 4096 /* fewest elements of a copied piece that one rank writes */
#define DTRAIN__PART_NAME 112   /* bytes of a file's name */

/* One piece on its way to the file. */
typedef struct dtrain__part_item {
    size_t name; /* its name in the file, among the texts of the part */
    dtrain_dtype dtype;
    int ndim;
    size_t shape[DTRAIN_MAX_DIMS];
    const void *data;
    size_t bytes;
    dtrain_device *device; /* that has the data; NULL: the CPU */
    dtrain__staging *way;  /* from the device, while the file is written */
} dtrain__part_item;

typedef struct dtrain__part_writer {
    dtrain_allocator *allocator;
    int rank, local, no_sync;
    dtrain__index index; /* of this part alone */
    dtrain__piece_list list;
    dtrain__part_item *items;
    dtrain_safetensors_source *sources;
    unsigned char *staging;
    uint64_t *blocks; /* their hashes */
    char *text;
    size_t item_count;
} dtrain__part_writer;

static void dtrain__part_free(dtrain__part_writer *part)
{
    dtrain_allocator *allocator = part->allocator;
    dtrain__index_free(&part->index);
    dtrain__piece_free(&part->list);
    dtrain__free(allocator, part->items);
    dtrain__free(allocator, part->sources);
    dtrain__free(allocator, part->staging);
    dtrain__free(allocator, part->blocks);
    dtrain__free(allocator, part->text);
}

/* ---- names ---- */

/* Writes a name as rank-00003.0123456789abcdef-7.done: rank 3, save 7 of the checkpointer 0123456789abcdef. */
static void dtrain__part_name(char out[DTRAIN__PART_NAME], int rank, const dtrain__index_save_id *id, const char *tail)
{
    snprintf(out, DTRAIN__PART_NAME, "rank-%05d.%016llx-%llu.%s", rank, (unsigned long long)id->nonce,
             (unsigned long long)id->counter, tail);
}

/* Reads a whole number of at most 20 digits. Returns what follows it, or NULL. */
static const char *dtrain__part_digits(const char *text, uint64_t *value)
{
    int digits = 0;
    for (*value = 0; *text >= '0' && *text <= '9'; text++) {
        uint64_t digit = (uint64_t)(*text - '0');
        if (*value > (UINT64_MAX - digit) / 10 || ++digits > 20)
            return NULL;
        *value = *value * 10 + digit;
    }
    return digits > 0 ? text : NULL;
}

/* Takes a name apart, without the dot of a temporary file. Returns the tail, or NULL for a name of another form. */
static const char *dtrain__part_parse(const char *name, int *rank, dtrain__index_save_id *id)
{
    uint64_t number;
    name += *name == '.';
    if (strncmp(name, "rank-", 5) != 0)
        return NULL;
    name = dtrain__part_digits(name + 5, &number);
    if (name == NULL || number > INT_MAX || *name++ != '.')
        return NULL;
    *rank = (int)number;
    id->nonce = 0;
    for (int i = 0; i < 16; i++, name++) {
        int digit = *name >= '0' && *name <= '9' ? *name - '0' : *name >= 'a' && *name <= 'f' ? *name - 'a' + 10 : -1;
        if (digit < 0)
            return NULL;
        id->nonce = id->nonce << 4 | (uint64_t)digit;
    }
    if (*name++ != '-')
        return NULL;
    name = dtrain__part_digits(name, &id->counter);
    return name != NULL && *name == '.' ? name + 1 : NULL;
}

static void dtrain__part_step_name(char out[32], uint64_t step)
{
    snprintf(out, 32, "step-%llu", (unsigned long long)step);
}

/* Returns whether a name is that of a step's directory. */
static int dtrain__part_is_step(const char *name, uint64_t *step)
{
    char again[32];
    const char *end = strncmp(name, "step-", 5) == 0 ? dtrain__part_digits(name + 5, step) : NULL;
    if (end == NULL || *end != '\0')
        return 0;
    dtrain__part_step_name(again, *step); /* refuses leading zeros */
    return strcmp(again, name) == 0;
}

/* ---- what is written ---- */

/* Gives the range of a piece that this rank writes. Copies are dealt in grains; a tensor of one grain is dealt by its
 * name. */
static size_t dtrain__part_share(const dtrain__part_writer *part, const dtrain_piece *piece, size_t *begin)
{
    int copies = piece->copies > 0 ? piece->copies : 1;
    *begin = 0;
    if (piece->unsaved)
        return 0;
    if (part->local || copies == 1)
        return piece->count;
    dtrain__xxh64 hash;
    dtrain__xxh64_begin(&hash, 0);
    dtrain__xxh64_add(&hash, piece->name, strlen(piece->name));
    if (piece->suffix != NULL)
        dtrain__xxh64_add(&hash, piece->suffix, strlen(piece->suffix));
    uint64_t turn = (dtrain__xxh64_end(&hash) % (uint64_t)copies + (uint64_t)piece->copy) % (uint64_t)copies;
    size_t grains = piece->count / DTRAIN__PART_GRAIN + (piece->count % DTRAIN__PART_GRAIN != 0), first;
    size_t end = dtrain__split(grains, copies, (int)turn, &first) + first;
    *begin = first * DTRAIN__PART_GRAIN;
    end = end == grains ? piece->count : end * DTRAIN__PART_GRAIN;
    *begin = *begin < end ? *begin : end;
    return end - *begin;
}

/* Enters a tensor into the index, and gives the place of its name. */
static dtrain_status dtrain__part_tensor(dtrain__part_writer *part, const dtrain_piece *piece)
{
    dtrain__index *index = &part->index;
    dtrain__index_tensor tensor;
    size_t name = strlen(piece->name), suffix = piece->suffix != NULL ? strlen(piece->suffix) : 0;
    memset(&tensor, 0, sizeof tensor);
    if (!DTRAIN__INDEX_ROOM(index->allocator, index->texts, index->text_bytes, name + suffix + 1))
        return DTRAIN_ERR_MEMORY;
    tensor.name = index->text_bytes;
    tensor.name_length = name + suffix;
    tensor.dtype = piece->dtype;
    tensor.ndim = piece->ndim;
    memcpy(tensor.shape, piece->shape, (size_t)piece->ndim * sizeof piece->shape[0]);
    memcpy(index->texts + tensor.name, piece->name, name);
    if (suffix > 0)
        memcpy(index->texts + tensor.name + name, piece->suffix, suffix);
    index->texts[tensor.name + name + suffix] = '\0';
    index->text_bytes += name + suffix + 1;
    return DTRAIN__INDEX_ADD(index->allocator, index->tensors, index->tensor_count, tensor);
}

/* Names a piece in the file: as the tensor if it is whole there, else NAME#number. A whole one whose name has a # gets
 * a number too, so that two names never meet. */
static dtrain_status dtrain__part_item_name(dtrain__part_writer *part, const dtrain__region *region, size_t number,
                                            dtrain__part_item *item, dtrain__index_piece *entry)
{
    dtrain__index *index = &part->index;
    const dtrain__index_tensor *tensor = &index->tensors[entry->tensor];
    size_t all = dtrain__pieces_product(region->shape, 0, region->ndim);
    if (entry->count == all && strchr(dtrain__index_name(index, tensor), '#') == NULL) {
        item->name = tensor->name;
        return DTRAIN_OK;
    }
    entry->number = number;
    if (!DTRAIN__INDEX_ROOM(index->allocator, index->texts, index->text_bytes, tensor->name_length + 24))
        return DTRAIN_ERR_MEMORY;
    item->name = index->text_bytes;
    memcpy(index->texts + item->name, dtrain__index_name(index, tensor), tensor->name_length);
    int more = snprintf(index->texts + item->name + tensor->name_length, 24, "#%zu", number);
    index->text_bytes += tensor->name_length + (size_t)more + 1;
    return DTRAIN_OK;
}

/* Fills in elements [begin, begin + count) of a piece's data. If they are all of it, the item has the shape of its box.
 */
static void dtrain__part_data(dtrain__part_item *item, const dtrain_piece *piece, const dtrain__region *region,
                              size_t begin, size_t count)
{
    item->dtype = piece->dtype;
    item->device = piece->device;
    item->ndim = count == dtrain__pieces_product(region->size, 0, region->ndim) ? region->ndim : 1;
    memcpy(item->shape, region->size, sizeof item->shape);
    if (item->ndim == 1)
        item->shape[0] = count;
    item->bytes = count * (dtrain_dtype_bits(piece->dtype) / 8);
    item->data = (const unsigned char *)piece->data + begin * (dtrain_dtype_bits(piece->dtype) / 8);
}

/* Enters what this rank writes of a piece. */
static dtrain_status dtrain__part_take(dtrain__part_writer *part, const dtrain_piece *piece)
{
    dtrain__index *index = &part->index;
    dtrain__index_piece entry;
    dtrain__part_item item;
    dtrain__region region;
    size_t begin, count = dtrain__part_share(part, piece, &begin);
    dtrain_status status = dtrain__part_tensor(part, piece);
    if (status != DTRAIN_OK || count == 0)
        return status;
    dtrain__region_of(&region, piece);
    memset(&item, 0, sizeof item);
    memset(&entry, 0, sizeof entry);
    entry.tensor = index->tensor_count - 1;
    entry.number = entry.box = DTRAIN__INDEX_NONE;
    entry.at = piece->begin + begin;
    entry.count = count;
    entry.copy = part->local ? (size_t)piece->copy : 0;
    if (piece->boxed) {
        entry.box = index->number_count;
        status = dtrain__index_add_sizes(index, region.begin, region.ndim);
        if (status == DTRAIN_OK)
            status = dtrain__index_add_sizes(index, region.size, region.ndim);
    }
    if (status == DTRAIN_OK)
        status = dtrain__part_item_name(part, &region, part->item_count, &item, &entry);
    if (status == DTRAIN_OK)
        status = DTRAIN__INDEX_ADD(index->allocator, index->pieces, index->piece_count, entry);
    if (status != DTRAIN_OK)
        return status;
    dtrain__part_data(&item, piece, &region, begin, count);
    return DTRAIN__INDEX_ADD(part->allocator, part->items, part->item_count, item);
}

/* Checks that no key comes twice among the values. */
static dtrain_status dtrain__part_values_once(dtrain__part_writer *part)
{
    dtrain__index *index = &part->index;
    size_t bytes = index->value_count * sizeof(dtrain__names_text), twice = index->value_count;
    dtrain__names_text *keys = (dtrain__names_text *)dtrain__alloc(part->allocator, bytes);
    dtrain__names names;
    int built = 0;
    for (size_t i = 0; i < index->value_count && keys != NULL; i++) {
        keys[i].text = index->texts + index->values[i].key;
        keys[i].length = index->values[i].key_length;
    }
    if (keys != NULL) {
        built = dtrain__names_build(&names, part->allocator, keys, sizeof *keys, index->value_count, &twice);
        dtrain__names_free(&names, part->allocator);
    }
    dtrain__free(part->allocator, keys);
    if (!built)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu values", index->value_count);
    return twice == index->value_count
               ? DTRAIN_OK
               : dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                              "checkpoint: the key \"%.200s\" of value %zu comes twice: give each key once",
                              index->texts + index->values[twice].key, twice);
}

static dtrain_status dtrain__part_values(dtrain__part_writer *part, const dtrain_checkpoint_state *state)
{
    dtrain__index *index = &part->index;
    if (state->value_count > 0 && state->values == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "checkpoint: value_count is %zu and values is NULL: give the values, or 0",
                            state->value_count);
    for (size_t i = 0; i < state->value_count; i++) {
        const dtrain_safetensors_pair *pair = &state->values[i];
        dtrain__index_value value;
        if (pair->key == NULL || pair->value == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "checkpoint: the key or value of value %zu is NULL: give both", i);
        size_t key_length = pair->key_length > 0 ? pair->key_length : strlen(pair->key);
        size_t value_length = pair->value_length > 0 ? pair->value_length : strlen(pair->value);
        if (key_length == 0 || memchr(pair->key, 0, key_length) != NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "checkpoint: the key of value %zu is empty or has a zero byte: give it another", i);
        if (dtrain__index_pair(index, pair->key, key_length, pair->value, value_length, &value) != DTRAIN_OK ||
            DTRAIN__INDEX_ADD(index->allocator, index->values, index->value_count, value) != DTRAIN_OK)
            return DTRAIN_ERR_MEMORY;
    }
    return index->value_count > 1 ? dtrain__part_values_once(part) : DTRAIN_OK;
}

static dtrain_status dtrain__part_set(void *owner, const char *key, const char *value, int fixed)
{
    (void)fixed;
    return dtrain__index_set(&((dtrain__part_writer *)owner)->index, key, value);
}

/* Lists what this rank writes of a state; the data stays where it is. */
static dtrain_status dtrain__part_prepare(dtrain__part_writer *part, const dtrain_checkpoint_state *state,
                                          const dtrain__index_save_id *id, int ranks)
{
    dtrain__index_clear(&part->index);
    part->item_count = 0;
    part->index.facts.id = *id;
    part->index.facts.step = state->step;
    part->index.facts.seed = state->seed;
    part->index.facts.random_index = state->random_index;
    part->index.facts.world_size = (uint64_t)ranks;
    const dtrain__lister lister = {ranks, part->rank,       NULL, 0,    DTRAIN_OK, NULL, part,
                                   NULL,  dtrain__part_set, NULL, NULL, 0};
    dtrain_status status = dtrain__piece_collect(&part->list, lister, state, state->step, part->allocator);
    for (size_t i = 0; i < part->list.count && status == DTRAIN_OK; i++)
        status = dtrain__part_take(part, &part->list.pieces[i]);
    return status == DTRAIN_OK ? dtrain__part_values(part, state) : status;
}

/* Copies every item to the staging buffer, which has room. */
static dtrain_status dtrain__part_stage_items(dtrain__part_writer *part)
{
    dtrain__staging way = {NULL, NULL, 0};
    dtrain_status status = DTRAIN_OK;
    size_t all = 0;
    for (size_t i = 0; i < part->item_count && status == DTRAIN_OK; i++) {
        dtrain__part_item *item = &part->items[i];
        if (item->device != NULL)
            status = dtrain__staging_read(&way, item->device, part->staging + all, item->data, item->bytes);
        else
            dtrain__streaming_copy(part->staging + all, (const unsigned char *)item->data, item->bytes);
        item->data = part->staging + all;
        item->device = NULL;
        all += (item->bytes + 63) / 64 * 64;
    }
    dtrain__staging_free(&way);
    return status;
}

/* Copies the items to the staging buffer, so that the program may change its data. */
static dtrain_status dtrain__part_stage(dtrain__part_writer *part)
{
    size_t all = 0;
    for (size_t i = 0; i < part->item_count; i++)
        all += (part->items[i].bytes + 63) / 64 * 64;
    if (all > dtrain__memory_bytes(part->staging)) { /* the old buffer's contents are not needed */
        dtrain__free(part->allocator, part->staging);
        part->staging = (unsigned char *)dtrain__alloc(part->allocator, all);
        if (part->staging == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                                "checkpoint: rank %d has no memory for a copy of the %zu bytes that it writes: save "
                                "without _async, which needs none",
                                part->rank, all);
    }
    return dtrain__part_stage_items(part);
}

/* ---- hashed files ---- */

/* Hashes a file's header and data blocks while they are written. */
typedef struct dtrain__part_sink {
    dtrain__file_temp temp;
    dtrain__xxh64 hash;
    unsigned char frame[8];
    uint64_t seen, header_bytes, header_hash;
    uint64_t *blocks;
    size_t block_count;
} dtrain__part_sink;

/* Returns the bytes up to the end of the range being hashed: the header's length, the rest of the header, or a block.
 */
static uint64_t dtrain__part_left(const dtrain__part_sink *sink)
{
    if (sink->seen < 8)
        return 8 - sink->seen;
    if (sink->seen < sink->header_bytes)
        return sink->header_bytes - sink->seen;
    return DTRAIN__INDEX_BLOCK - (sink->seen - sink->header_bytes) % DTRAIN__INDEX_BLOCK;
}

static dtrain_status dtrain__part_to_file(void *user, const void *data, size_t bytes)
{
    dtrain__part_sink *sink = (dtrain__part_sink *)user;
    const unsigned char *from = (const unsigned char *)data;
    for (size_t left = bytes; left > 0;) {
        uint64_t most = dtrain__part_left(sink);
        size_t n = left < most ? left : (size_t)most;
        dtrain__xxh64_add(&sink->hash, from, n);
        if (sink->seen < 8)
            memcpy(sink->frame + sink->seen, from, n);
        sink->seen += n;
        from += n;
        left -= n;
        if (n < most)
            continue;
        if (sink->seen == 8)
            sink->header_bytes = 8 + dtrain__load_le64(sink->frame);
        else if (sink->seen == sink->header_bytes)
            sink->header_hash = dtrain__xxh64_end(&sink->hash);
        else
            sink->blocks[sink->block_count++] = dtrain__xxh64_end(&sink->hash);
        if (sink->seen >= sink->header_bytes)
            dtrain__xxh64_begin(&sink->hash, 0);
    }
    return dtrain__file_temp_write(&sink->temp, data, bytes);
}

/* Writes a file and gives its hashes. `blocks` has room for them. */
static dtrain_status dtrain__part_put(dtrain__part_writer *part, int directory, const char *name, size_t count,
                                      dtrain__index_hashed *file, uint64_t *blocks)
{
    dtrain_safetensors_write_desc desc = {NULL, 0, 0, part->allocator};
    dtrain__part_sink sink;
    memset(&sink, 0, sizeof sink);
    sink.blocks = blocks;
    dtrain__xxh64_begin(&sink.hash, 0);
    dtrain_status status = dtrain__file_temp_begin(&sink.temp, directory, name, "checkpoint");
    if (status != DTRAIN_OK)
        return status;
    status = dtrain_safetensors_write(dtrain__part_to_file, &sink, part->sources, count, &desc);
    if (sink.seen > sink.header_bytes && (sink.seen - sink.header_bytes) % DTRAIN__INDEX_BLOCK != 0)
        sink.blocks[sink.block_count++] = dtrain__xxh64_end(&sink.hash);
    file->header_bytes = sink.header_bytes;
    file->header_hash = sink.header_hash;
    file->data_bytes = sink.seen - sink.header_bytes;
    return dtrain__file_temp_end(&sink.temp, status, part->no_sync);
}

/* Supplies a range of an item that is on a device. */
static dtrain_status dtrain__part_fill(void *user, uint64_t offset, void *out, size_t bytes)
{
    const dtrain__part_item *item = (const dtrain__part_item *)user;
    return dtrain__staging_read(item->way, item->device, out, (const unsigned char *)item->data + offset, bytes);
}

/* Writes the data file, and leaves its hashes in part->blocks. */
static dtrain_status dtrain__part_put_data(dtrain__part_writer *part, int directory, const char *name,
                                           dtrain__index_hashed *file)
{
    dtrain_safetensors_write_desc desc = {NULL, 0, 0, part->allocator};
    dtrain__staging way = {NULL, NULL, 0};
    uint64_t bytes = 0;
    if (!DTRAIN__INDEX_ROOM(part->allocator, part->sources, 0, part->item_count + 1))
        return DTRAIN_ERR_MEMORY;
    for (size_t i = 0; i < part->item_count; i++) {
        dtrain_safetensors_source *source = &part->sources[i];
        memset(source, 0, sizeof *source);
        source->name = part->index.texts + part->items[i].name;
        source->dtype = part->items[i].dtype;
        source->ndim = part->items[i].ndim;
        source->shape = part->items[i].shape;
        part->items[i].way = &way;
        source->data = part->items[i].device == NULL ? part->items[i].data : NULL;
        source->fill = dtrain__part_fill;
        source->user = &part->items[i];
    }
    dtrain_status status = dtrain_safetensors_size(&bytes, part->sources, part->item_count, &desc);
    if (status != DTRAIN_OK)
        return status;
    if (!DTRAIN__INDEX_ROOM(part->allocator, part->blocks, 0, (size_t)dtrain__index_blocks(bytes) + 1))
        return DTRAIN_ERR_MEMORY;
    status = dtrain__part_put(part, directory, name, part->item_count, file, part->blocks);
    dtrain__staging_free(&way);
    return status;
}

/* Writes the file of hashes; the hashes of its own blocks go to the index. */
static dtrain_status dtrain__part_put_hashes(dtrain__part_writer *part, int directory, const char *name,
                                             dtrain__index_file *file)
{
    dtrain__index *index = &part->index;
    size_t count = (size_t)dtrain__index_blocks(file->data.data_bytes);
    file->block_count = (size_t)dtrain__index_blocks(8 * (uint64_t)count);
    if (!DTRAIN__INDEX_ROOM(index->allocator, index->numbers, index->number_count, file->block_count + 1))
        return DTRAIN_ERR_MEMORY;
    file->blocks = index->number_count;
    index->number_count += file->block_count;
    memset(part->sources, 0, sizeof part->sources[0]);
    part->sources[0].name = "xxh64";
    part->sources[0].dtype = DTRAIN_U64;
    part->sources[0].ndim = 1;
    part->sources[0].shape = &count;
    part->sources[0].data = part->blocks;
    return dtrain__part_put(part, directory, name, 1, &file->hashes, index->numbers + file->blocks);
}

/* Writes data and hashes, enters them into the part's index, and prints that to part->text. */
static dtrain_status dtrain__part_write(dtrain__part_writer *part, int directory, size_t *bytes)
{
    dtrain__index *index = &part->index;
    char names[2][DTRAIN__PART_NAME];
    dtrain__index_file file;
    memset(&file, 0, sizeof file);
    file.rank = part->rank;
    file.holder = -1;
    dtrain__part_name(names[0], part->rank, &index->facts.id, "safetensors");
    dtrain__part_name(names[1], part->rank, &index->facts.id, "hashes.safetensors");
    dtrain_status status = dtrain__part_put_data(part, directory, names[0], &file.data);
    if (status == DTRAIN_OK)
        status = dtrain__part_put_hashes(part, directory, names[1], &file);
    if (status != DTRAIN_OK)
        return status;
    file.data.name = dtrain__index_text(index, names[0], strlen(names[0]));
    file.hashes.name = dtrain__index_text(index, names[1], strlen(names[1]));
    if (file.data.name == DTRAIN__INDEX_NONE || file.hashes.name == DTRAIN__INDEX_NONE ||
        DTRAIN__INDEX_ADD(index->allocator, index->files, index->file_count, file) != DTRAIN_OK)
        return DTRAIN_ERR_MEMORY;
    status = dtrain__index_settle(index, 0);
    return status == DTRAIN_OK ? dtrain__index_print(index, &part->text, bytes) : status;
}

#endif
