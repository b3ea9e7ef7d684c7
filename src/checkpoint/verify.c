/* ---- >>verify ----
 * Reading files whose blocks carry hashes. What is read is whole blocks, a window of them at a time, each checked
 * before a byte of it is given out; ranges that come in the order of the file read no block twice. Hashes come from a
 * file that is read in the same way, and whose own are in the index. */
#ifndef DTRAIN__VERIFY
#define DTRAIN__VERIFY
#include "save.c"
#include "../format/safetensors_read.c"

#define DTRAIN__VERIFY_WINDOW 16 /* blocks at a time: 1 MiB */

typedef struct dtrain__verify_file {
    const char *name; /* for texts */
    int fd;
    dtrain_safetensors *file;
    uint64_t data_begin, data_bytes;
    unsigned char *window;
    size_t window_bytes;
    uint64_t first, blocks;           /* blocks in the window: first to first + blocks */
    const uint64_t *hashes;           /* of the blocks; NULL: they are in `from` */
    struct dtrain__verify_file *from; /* NULL too: nothing is checked */
    uint64_t *bytes_read;
} dtrain__verify_file;

static void dtrain__verify_file_close(dtrain__verify_file *open, dtrain_allocator *allocator)
{
    dtrain_safetensors_close(open->file);
    dtrain__file_close(open->fd);
    dtrain__free(allocator, open->window);
    memset(open, 0, sizeof *open);
    open->fd = -1;
}

/* Compares a header with its hash. */
static dtrain_status dtrain__verify_file_header(dtrain__verify_file *open, const dtrain__index_hashed *entry)
{
    unsigned char some[16384];
    dtrain__xxh64 hash;
    dtrain_status status = DTRAIN_OK;
    dtrain__xxh64_begin(&hash, 0);
    for (uint64_t at = 0; at < entry->header_bytes && status == DTRAIN_OK; at += sizeof some) {
        size_t n = entry->header_bytes - at < sizeof some ? (size_t)(entry->header_bytes - at) : sizeof some;
        status = dtrain__file_read_at(open->fd, some, n, at, open->name, "checkpoint");
        dtrain__xxh64_add(&hash, some, n);
        *open->bytes_read += n;
    }
    if (status == DTRAIN_OK && dtrain__xxh64_end(&hash) != entry->header_hash)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\": its header has not the hash that was saved: it was damaged",
                              open->name);
    return status;
}

/* Opens a file of an index. A failed one is closed. */
static dtrain_status dtrain__verify_file_open(dtrain__verify_file *open, int directory, const char *name,
                                              const dtrain__index_hashed *entry, int verify, size_t window_blocks,
                                              dtrain_allocator *allocator, uint64_t *bytes_read)
{
    dtrain_safetensors_desc desc;
    uint64_t bytes = 0;
    memset(open, 0, sizeof *open);
    memset(&desc, 0, sizeof desc);
    desc.allocator = allocator;
    open->name = name;
    open->bytes_read = bytes_read;
    open->data_begin = entry->header_bytes;
    open->data_bytes = entry->data_bytes;
    dtrain_status status = dtrain__file_open(&open->fd, &bytes, directory, name, "checkpoint");
    if (status != DTRAIN_OK)
        return status;
    if (bytes < entry->header_bytes || bytes - entry->header_bytes != entry->data_bytes)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\" has %llu bytes, where the index says %llu and %llu: it was cut",
                              name, (unsigned long long)bytes, (unsigned long long)entry->header_bytes,
                              (unsigned long long)entry->data_bytes);
    if (status == DTRAIN_OK && verify)
        status = dtrain__verify_file_header(open, entry);
    if (status == DTRAIN_OK)
        status = dtrain__safetensors_open_fd(&open->file, open->fd, &desc);
    if (status == DTRAIN_OK && dtrain__safetensors_header_bytes(open->file) != entry->header_bytes)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\": its header has another length than the "
                              "index says",
                              name);
    *bytes_read += entry->header_bytes;
    open->window_bytes = window_blocks * DTRAIN__INDEX_BLOCK;
    if (status == DTRAIN_OK && (open->window = (unsigned char *)dtrain__alloc(allocator, open->window_bytes)) == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu bytes", open->window_bytes);
    if (status != DTRAIN_OK) {
        open->window_bytes = open->window != NULL ? open->window_bytes : 0;
        dtrain__verify_file_close(open, allocator);
    }
    return status;
}

static dtrain_status dtrain__verify_file_get(dtrain__verify_file *open, uint64_t offset, uint64_t want,
                                             const unsigned char **data, size_t *have);

/* The hash that a block should have. */
static dtrain_status dtrain__verify_file_hash(dtrain__verify_file *open, uint64_t block, uint64_t *hash)
{
    const unsigned char *data;
    size_t have;
    if (open->hashes != NULL) {
        *hash = open->hashes[block];
        return DTRAIN_OK;
    }
    dtrain_status status = dtrain__verify_file_get(open->from, 8 * block, 8, &data, &have);
    if (status == DTRAIN_OK)
        *hash = dtrain__load_le64(data);
    return status;
}

/* Checks blocks that were read to `data`, bytes of them. */
static dtrain_status dtrain__verify_file_check(dtrain__verify_file *open, const unsigned char *data, uint64_t first,
                                               uint64_t blocks, uint64_t bytes)
{
    for (uint64_t i = 0; i < blocks && (open->hashes != NULL || open->from != NULL); i++) {
        uint64_t expected = 0, begin = i * DTRAIN__INDEX_BLOCK;
        uint64_t n = bytes - begin < DTRAIN__INDEX_BLOCK ? bytes - begin : DTRAIN__INDEX_BLOCK;
        dtrain_status status = dtrain__verify_file_hash(open, first + i, &expected);
        if (status != DTRAIN_OK)
            return status;
        if (dtrain__xxh64_of(data + begin, (size_t)n, 0) != expected)
            return dtrain__fail(
                NULL, DTRAIN_ERR_CORRUPT,
                "checkpoint file \"%s\": bytes %llu to %llu have not the hash that was saved: they were "
                "damaged",
                open->name, (unsigned long long)(open->data_begin + begin + first * DTRAIN__INDEX_BLOCK),
                (unsigned long long)(open->data_begin + begin + first * DTRAIN__INDEX_BLOCK + n - 1));
    }
    return DTRAIN_OK;
}

/* Gives the address of the data at an offset, and how many of the `want` bytes from there on are with it, at least one.
 * The range is inside the data. */
static dtrain_status dtrain__verify_file_get(dtrain__verify_file *open, uint64_t offset, uint64_t want,
                                             const unsigned char **data, size_t *have)
{
    uint64_t block = offset / DTRAIN__INDEX_BLOCK, end = (offset + want - 1) / DTRAIN__INDEX_BLOCK + 1;
    if (block < open->first || block >= open->first + open->blocks) {
        uint64_t most = open->window_bytes / DTRAIN__INDEX_BLOCK, n = end - block < most ? end - block : most;
        uint64_t begin = block * DTRAIN__INDEX_BLOCK, bytes = n * DTRAIN__INDEX_BLOCK;
        bytes = bytes < open->data_bytes - begin ? bytes : open->data_bytes - begin;
        open->blocks = 0;
        dtrain_status status =
            dtrain__file_read_at(open->fd, open->window, bytes, open->data_begin + begin, open->name, "checkpoint");
        *open->bytes_read += bytes;
        if (status == DTRAIN_OK)
            status = dtrain__verify_file_check(open, open->window, block, n, bytes);
        if (status != DTRAIN_OK)
            return status;
        open->first = block;
        open->blocks = n;
    }
    uint64_t left = (open->first + open->blocks) * DTRAIN__INDEX_BLOCK - offset;
    *data = open->window + (offset - open->first * DTRAIN__INDEX_BLOCK);
    *have = (size_t)(want < left ? want : left);
    return DTRAIN_OK;
}

/* Reads whole blocks straight to where they go: *bytes of the `want` from an offset on, 0 where a block does not begin
 * there, or is in the window, or is not wanted whole. */
static dtrain_status dtrain__verify_file_direct(dtrain__verify_file *open, uint64_t offset, uint64_t want,
                                                unsigned char *out, size_t *bytes)
{
    uint64_t block = offset / DTRAIN__INDEX_BLOCK, blocks = want / DTRAIN__INDEX_BLOCK;
    *bytes = 0;
    if (offset % DTRAIN__INDEX_BLOCK != 0 || blocks == 0 ||
        (block >= open->first && block < open->first + open->blocks))
        return DTRAIN_OK;
    blocks = blocks < DTRAIN__VERIFY_WINDOW ? blocks : DTRAIN__VERIFY_WINDOW; /* checked while in a cache */
    *bytes = (size_t)(blocks * DTRAIN__INDEX_BLOCK);
    dtrain_status status =
        dtrain__file_read_at(open->fd, out, *bytes, open->data_begin + offset, open->name, "checkpoint");
    *open->bytes_read += *bytes;
    return status == DTRAIN_OK ? dtrain__verify_file_check(open, out, block, blocks, *bytes) : status;
}

/* ---- files of an index ---- */

/* The file of an index that is open, with its hashes; one at a time. */
typedef struct dtrain__verify_reader {
    dtrain_allocator *allocator;
    const dtrain__index *index;
    int verify;
    size_t open; /* which; NONE */
    dtrain__verify_file data, hashes;
    dtrain__staging way; /* to devices that are read into */
    uint64_t bytes_read;
} dtrain__verify_reader;

static void dtrain__verify_begin(dtrain__verify_reader *reader, const dtrain__index *index, int verify,
                                 dtrain_allocator *allocator)
{
    memset(reader, 0, sizeof *reader);
    reader->allocator = allocator;
    reader->index = index;
    reader->verify = verify;
    reader->open = DTRAIN__INDEX_NONE;
    reader->data.fd = reader->hashes.fd = -1;
}

static void dtrain__verify_close(dtrain__verify_reader *reader)
{
    if (reader->open == DTRAIN__INDEX_NONE)
        return;
    dtrain__verify_file_close(&reader->data, reader->allocator);
    if (reader->hashes.file != NULL)
        dtrain__verify_file_close(&reader->hashes, reader->allocator);
    reader->open = DTRAIN__INDEX_NONE;
}

static dtrain_status dtrain__verify_open_hashes(dtrain__verify_reader *reader, int directory,
                                                const dtrain__index_file *file)
{
    const dtrain__index *index = reader->index;
    dtrain_status status = dtrain__verify_file_open(&reader->hashes, directory, index->texts + file->hashes.name,
                                                    &file->hashes, 1, 1, reader->allocator, &reader->bytes_read);
    if (status != DTRAIN_OK)
        return status;
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(reader->hashes.file, "xxh64", 5);
    reader->hashes.hashes = index->numbers + file->blocks;
    reader->data.from = &reader->hashes;
    if (tensor != NULL && tensor->dtype == DTRAIN_U64 && tensor->begin == file->hashes.header_bytes &&
        tensor->end - tensor->begin == file->hashes.data_bytes)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint file \"%s\" is no file of hashes",
                        index->texts + file->hashes.name);
}

/* Opens file `number` of the index in a directory. */
static dtrain_status dtrain__verify_open(dtrain__verify_reader *reader, int directory, size_t number)
{
    const dtrain__index_file *file = &reader->index->files[number];
    if (reader->open == number)
        return DTRAIN_OK;
    dtrain__verify_close(reader);
    dtrain_status status =
        dtrain__verify_file_open(&reader->data, directory, reader->index->texts + file->data.name, &file->data,
                                 reader->verify, DTRAIN__VERIFY_WINDOW, reader->allocator, &reader->bytes_read);
    if (status != DTRAIN_OK)
        return status;
    reader->open = number;
    memset(&reader->hashes, 0, sizeof reader->hashes);
    reader->hashes.fd = -1;
    if (reader->verify && file->data.data_bytes > 0)
        status = dtrain__verify_open_hashes(reader, directory, file);
    if (status != DTRAIN_OK)
        dtrain__verify_close(reader);
    return status;
}

/* Finds a piece in the open file; *begin: where its data begins in the file's. */
static dtrain_status dtrain__verify_find(dtrain__verify_reader *reader, const dtrain__index_tensor *tensor,
                                         const dtrain__index_piece *piece, uint64_t *begin)
{
    const char *base = dtrain__index_name(reader->index, tensor);
    char number[24] = "", *name;
    size_t room, length;
    if (piece->number != DTRAIN__INDEX_NONE)
        snprintf(number, sizeof number, "#%zu", piece->number);
    length = tensor->name_length + strlen(number);
    room = length + 1;
    name = (char *)dtrain__alloc(reader->allocator, room);
    if (name == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a name");
    memcpy(name, base, tensor->name_length);
    memcpy(name + tensor->name_length, number, strlen(number));
    const dtrain_safetensors_tensor *found = dtrain_safetensors_find(reader->data.file, name, length);
    dtrain_status status = DTRAIN_OK;
    if (found == NULL || found->dtype != tensor->dtype || found->count != piece->count ||
        (found->begin - reader->data.data_begin) % (dtrain_dtype_bits(tensor->dtype) / 8) != 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\" has no tensor \"%.200s\" of %zu %s, which the index says it has",
                              reader->data.name, name, piece->count, dtrain_dtype_name(tensor->dtype));
    else
        *begin = found->begin - reader->data.data_begin;
    dtrain__free(reader->allocator, name);
    return status;
}

/* Copies `count` elements of the open file's data from a byte on, and converts them. */
static dtrain_status dtrain__verify_copy(dtrain__verify_reader *reader, uint64_t offset, size_t count,
                                         dtrain_dtype from, void *out, dtrain_dtype to)
{
    size_t from_bytes = dtrain_dtype_bits(from) / 8, to_bytes = dtrain_dtype_bits(to) / 8;
    unsigned char *into = (unsigned char *)out, turned[4096];
    while (count > 0) {
        const unsigned char *data;
        size_t have = 0, n;
        dtrain_status status = DTRAIN_OK;
        if (from == to && !DTRAIN__FILE_SWAP)
            status = dtrain__verify_file_direct(&reader->data, offset, (uint64_t)count * from_bytes, into, &have);
        if (status != DTRAIN_OK)
            return status;
        if (have > 0) {
            into += have;
            offset += have;
            count -= have / from_bytes;
            continue;
        }
        status = dtrain__verify_file_get(&reader->data, offset, (uint64_t)count * from_bytes, &data, &have);
        if (status != DTRAIN_OK)
            return status;
        n = have / from_bytes;
        if (DTRAIN__FILE_SWAP) { /* the window stays as it is read */
            n = n < sizeof turned / from_bytes ? n : sizeof turned / from_bytes;
            memcpy(turned, data, n * from_bytes);
            dtrain__safetensors_swap(turned, n * from_bytes, from);
            data = turned;
        }
        if (from == to)
            memcpy(into, data, n * from_bytes);
        else
            status = dtrain_convert(data, from, into, to, n);
        if (status != DTRAIN_OK)
            return status;
        into += n * to_bytes;
        offset += n * from_bytes;
        count -= n;
    }
    return DTRAIN_OK;
}

/* The same into memory of a device, NULL for the CPU's; a device's is there after dtrain__staging_wait. */
static dtrain_status dtrain__verify_put(dtrain__verify_reader *reader, uint64_t offset, size_t count, dtrain_dtype from,
                                        void *out, dtrain_dtype to, dtrain_device *device)
{
    size_t from_bytes = dtrain_dtype_bits(from) / 8, to_bytes = dtrain_dtype_bits(to) / 8, have = 0;
    unsigned char *into = (unsigned char *)out;
    dtrain_status status = DTRAIN_OK;
    if (device == NULL)
        return dtrain__verify_copy(reader, offset, count, from, out, to);
    while (count > 0 && status == DTRAIN_OK) {
        void *at;
        status = dtrain__staging_room(&reader->way, device, count * to_bytes, &at, &have);
        size_t n = have / to_bytes;
        if (status == DTRAIN_OK)
            status = dtrain__verify_copy(reader, offset, n, from, at, to);
        if (status == DTRAIN_OK)
            status = dtrain__staging_send(&reader->way, into, n * to_bytes);
        into += n * to_bytes;
        offset += (uint64_t)n * from_bytes;
        count -= n;
    }
    return status;
}

/* Reads what a stored piece, in the open file, and a wanted region share; out is memory of device. */
static dtrain_status dtrain__verify_read(dtrain__verify_reader *reader, const dtrain__index_tensor *tensor,
                                         const dtrain__index_piece *piece, const dtrain__region *want, void *out,
                                         dtrain_dtype to, dtrain_device *device, uint64_t *bytes)
{
    size_t from_bytes = dtrain_dtype_bits(tensor->dtype) / 8, to_bytes = dtrain_dtype_bits(to) / 8;
    dtrain__region have;
    dtrain__region_overlap overlap;
    dtrain__region_overlap_run run;
    uint64_t begin = 0;
    dtrain__index_region(reader->index, tensor, piece, &have);
    if (!dtrain__region_overlap_begin(&overlap, &have, want))
        return DTRAIN_OK;
    dtrain_status status = dtrain__verify_find(reader, tensor, piece, &begin);
    while (status == DTRAIN_OK && dtrain__region_overlap_next(&overlap, &run)) {
        status = dtrain__verify_put(reader, begin + (uint64_t)run.from_begin * from_bytes, run.count, tensor->dtype,
                                    (unsigned char *)out + run.to_begin * to_bytes, to, device);
        *bytes += (uint64_t)run.count * from_bytes;
    }
    return status;
}

#endif
