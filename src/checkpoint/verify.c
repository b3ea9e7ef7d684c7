/* ---- >>verify ----
 * Reading files whose blocks carry hashes. What is read is whole blocks, a window of them at a time, each checked
 * before a byte of it is given out; ranges that come in the order of the file read no block twice. Hashes come from a
 * file that is read in the same way, and whose own are in the index. */
#ifndef DTRAIN__VERIFY
#define DTRAIN__VERIFY
#include "save.c"
#include "safetensors_read.c"

#define DTRAIN__VERIFY_WINDOW 16 /* blocks at a time: 1 MiB */

typedef struct dtrain__verified {
    const char *name; /* for texts */
    int fd;
    dtrain_safetensors *file;
    uint64_t data_begin, data_bytes;
    unsigned char *window;
    size_t window_bytes;
    uint64_t first, blocks;        /* blocks in the window: first to first + blocks */
    const uint64_t *hashes;        /* of the blocks; NULL: they are in `from` */
    struct dtrain__verified *from; /* NULL too: nothing is checked */
    uint64_t *bytes_read;
} dtrain__verified;

static void dtrain__verified_close(dtrain__verified *open, dtrain_allocator *allocator)
{
    dtrain_safetensors_close(open->file);
    dtrain__file_close(open->fd);
    dtrain__free(allocator, open->window, open->window_bytes);
    memset(open, 0, sizeof *open);
    open->fd = -1;
}

/* Compares a header with its hash. */
static dtrain_status dtrain__verified_header(dtrain__verified *open, const dtrain__index_hashed *entry,
                                             dtrain_allocator *allocator)
{
    if (entry->header_bytes > 100000008)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint file \"%s\": a header of %llu bytes is too large",
                            open->name, (unsigned long long)entry->header_bytes);
    size_t bytes = (size_t)entry->header_bytes;
    void *header = dtrain__alloc(allocator, bytes);
    if (header == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a header of %zu bytes", bytes);
    dtrain_status status = dtrain__file_read_at(open->fd, header, bytes, 0, open->name, "checkpoint");
    *open->bytes_read += bytes;
    if (status == DTRAIN_OK && dtrain__xxh64_of(header, bytes, 0) != entry->header_hash)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\": its header has not the hash that was saved: it was damaged",
                              open->name);
    dtrain__free(allocator, header, bytes);
    return status;
}

/* Opens a file of an index. A failed one is closed. */
static dtrain_status dtrain__verified_open(dtrain__verified *open, int directory, const char *name,
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
        status = dtrain__verified_header(open, entry, allocator);
    if (status == DTRAIN_OK)
        status = dtrain_safetensors_open_fd(&open->file, open->fd, &desc);
    if (status == DTRAIN_OK && dtrain_safetensors_header_bytes(open->file) != entry->header_bytes)
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
        dtrain__verified_close(open, allocator);
    }
    return status;
}

static dtrain_status dtrain__verified_get(dtrain__verified *open, uint64_t offset, uint64_t want,
                                          const unsigned char **data, size_t *have);

/* The hash that a block should have. */
static dtrain_status dtrain__verified_hash(dtrain__verified *open, uint64_t block, uint64_t *hash)
{
    const unsigned char *data;
    size_t have;
    if (open->hashes != NULL) {
        *hash = open->hashes[block];
        return DTRAIN_OK;
    }
    dtrain_status status = dtrain__verified_get(open->from, 8 * block, 8, &data, &have);
    if (status == DTRAIN_OK)
        *hash = dtrain__load_le64(data);
    return status;
}

/* Checks blocks that were read to `data`, bytes of them. */
static dtrain_status dtrain__verified_check(dtrain__verified *open, const unsigned char *data, uint64_t first,
                                            uint64_t blocks, uint64_t bytes)
{
    for (uint64_t i = 0; i < blocks && (open->hashes != NULL || open->from != NULL); i++) {
        uint64_t expected = 0, begin = i * DTRAIN__INDEX_BLOCK;
        uint64_t n = bytes - begin < DTRAIN__INDEX_BLOCK ? bytes - begin : DTRAIN__INDEX_BLOCK;
        dtrain_status status = dtrain__verified_hash(open, first + i, &expected);
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
static dtrain_status dtrain__verified_get(dtrain__verified *open, uint64_t offset, uint64_t want,
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
            status = dtrain__verified_check(open, open->window, block, n, bytes);
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
static dtrain_status dtrain__verified_direct(dtrain__verified *open, uint64_t offset, uint64_t want, unsigned char *out,
                                             size_t *bytes)
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
    return status == DTRAIN_OK ? dtrain__verified_check(open, out, block, blocks, *bytes) : status;
}

/* ---- files of an index ---- */

/* The file of an index that is open, with its hashes; one at a time. */
typedef struct dtrain__shelf {
    dtrain_allocator *allocator;
    const dtrain__index *index;
    int verify;
    size_t open; /* which; NONE */
    dtrain__verified data, hashes;
    dtrain__staging way; /* to devices that are read into */
    uint64_t bytes_read;
} dtrain__shelf;

static void dtrain__shelf_begin(dtrain__shelf *shelf, const dtrain__index *index, int verify,
                                dtrain_allocator *allocator)
{
    memset(shelf, 0, sizeof *shelf);
    shelf->allocator = allocator;
    shelf->index = index;
    shelf->verify = verify;
    shelf->open = DTRAIN__INDEX_NONE;
    shelf->data.fd = shelf->hashes.fd = -1;
}

static void dtrain__shelf_close(dtrain__shelf *shelf)
{
    if (shelf->open == DTRAIN__INDEX_NONE)
        return;
    dtrain__verified_close(&shelf->data, shelf->allocator);
    if (shelf->hashes.file != NULL)
        dtrain__verified_close(&shelf->hashes, shelf->allocator);
    shelf->open = DTRAIN__INDEX_NONE;
}

static dtrain_status dtrain__shelf_open_hashes(dtrain__shelf *shelf, int directory, const dtrain__index_file *file)
{
    const dtrain__index *index = shelf->index;
    dtrain_status status = dtrain__verified_open(&shelf->hashes, directory, index->texts + file->hashes.name,
                                                 &file->hashes, 1, 1, shelf->allocator, &shelf->bytes_read);
    if (status != DTRAIN_OK)
        return status;
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(shelf->hashes.file, "xxh64", 5);
    shelf->hashes.hashes = index->numbers + file->blocks;
    shelf->data.from = &shelf->hashes;
    if (tensor != NULL && tensor->dtype == DTRAIN_U64 && tensor->begin == file->hashes.header_bytes &&
        tensor->end - tensor->begin == file->hashes.data_bytes)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint file \"%s\" is no file of hashes",
                        index->texts + file->hashes.name);
}

/* Opens file `number` of the index in a directory. */
static dtrain_status dtrain__shelf_open(dtrain__shelf *shelf, int directory, size_t number)
{
    const dtrain__index_file *file = &shelf->index->files[number];
    if (shelf->open == number)
        return DTRAIN_OK;
    dtrain__shelf_close(shelf);
    dtrain_status status =
        dtrain__verified_open(&shelf->data, directory, shelf->index->texts + file->data.name, &file->data,
                              shelf->verify, DTRAIN__VERIFY_WINDOW, shelf->allocator, &shelf->bytes_read);
    if (status != DTRAIN_OK)
        return status;
    shelf->open = number;
    memset(&shelf->hashes, 0, sizeof shelf->hashes);
    shelf->hashes.fd = -1;
    if (shelf->verify && file->data.data_bytes > 0)
        status = dtrain__shelf_open_hashes(shelf, directory, file);
    if (status != DTRAIN_OK)
        dtrain__shelf_close(shelf);
    return status;
}

/* Finds a piece in the open file; *begin: where its data begins in the file's. */
static dtrain_status dtrain__shelf_find(dtrain__shelf *shelf, const dtrain__index_tensor *tensor,
                                        const dtrain__index_piece *piece, uint64_t *begin)
{
    const char *base = dtrain__index_name(shelf->index, tensor);
    char number[24] = "", *name;
    size_t room, length;
    if (piece->number != DTRAIN__INDEX_NONE)
        snprintf(number, sizeof number, "#%zu", piece->number);
    length = tensor->name_length + strlen(number);
    room = length + 1;
    name = (char *)dtrain__alloc(shelf->allocator, room);
    if (name == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a name");
    memcpy(name, base, tensor->name_length);
    memcpy(name + tensor->name_length, number, strlen(number));
    const dtrain_safetensors_tensor *found = dtrain_safetensors_find(shelf->data.file, name, length);
    dtrain_status status = DTRAIN_OK;
    if (found == NULL || found->dtype != tensor->dtype || found->count != piece->count ||
        (found->begin - shelf->data.data_begin) % (dtrain_dtype_bits(tensor->dtype) / 8) != 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\" has no tensor \"%.200s\" of %zu %s, which the index says it has",
                              shelf->data.name, name, piece->count, dtrain_dtype_name(tensor->dtype));
    else
        *begin = found->begin - shelf->data.data_begin;
    dtrain__free(shelf->allocator, name, room);
    return status;
}

/* Copies `count` elements of the open file's data from a byte on, and converts them. */
static dtrain_status dtrain__shelf_copy(dtrain__shelf *shelf, uint64_t offset, size_t count, dtrain_dtype from,
                                        void *out, dtrain_dtype to)
{
    size_t from_bytes = dtrain_dtype_bits(from) / 8, to_bytes = dtrain_dtype_bits(to) / 8;
    unsigned char *into = (unsigned char *)out, turned[4096];
    while (count > 0) {
        const unsigned char *data;
        size_t have = 0, n;
        dtrain_status status = DTRAIN_OK;
        if (from == to && !DTRAIN__FILE_SWAP)
            status = dtrain__verified_direct(&shelf->data, offset, (uint64_t)count * from_bytes, into, &have);
        if (status != DTRAIN_OK)
            return status;
        if (have > 0) {
            into += have;
            offset += have;
            count -= have / from_bytes;
            continue;
        }
        status = dtrain__verified_get(&shelf->data, offset, (uint64_t)count * from_bytes, &data, &have);
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
static dtrain_status dtrain__shelf_put(dtrain__shelf *shelf, uint64_t offset, size_t count, dtrain_dtype from,
                                       void *out, dtrain_dtype to, dtrain_device *device)
{
    size_t from_bytes = dtrain_dtype_bits(from) / 8, to_bytes = dtrain_dtype_bits(to) / 8, have = 0;
    unsigned char *into = (unsigned char *)out;
    dtrain_status status = DTRAIN_OK;
    if (device == NULL)
        return dtrain__shelf_copy(shelf, offset, count, from, out, to);
    while (count > 0 && status == DTRAIN_OK) {
        void *at;
        status = dtrain__staging_room(&shelf->way, device, count * to_bytes, &at, &have);
        size_t n = have / to_bytes;
        if (status == DTRAIN_OK)
            status = dtrain__shelf_copy(shelf, offset, n, from, at, to);
        if (status == DTRAIN_OK)
            status = dtrain__staging_send(&shelf->way, into, n * to_bytes);
        into += n * to_bytes;
        offset += (uint64_t)n * from_bytes;
        count -= n;
    }
    return status;
}

/* Reads what a stored piece, in the open file, and a wanted region share; out is memory of device. */
static dtrain_status dtrain__shelf_read(dtrain__shelf *shelf, const dtrain__index_tensor *tensor,
                                        const dtrain__index_piece *piece, const dtrain__region *want, void *out,
                                        dtrain_dtype to, dtrain_device *device, uint64_t *bytes)
{
    size_t from_bytes = dtrain_dtype_bits(tensor->dtype) / 8, to_bytes = dtrain_dtype_bits(to) / 8;
    dtrain__region have;
    dtrain__overlap overlap;
    dtrain__overlap_run run;
    uint64_t begin = 0;
    dtrain__index_region(shelf->index, tensor, piece, &have);
    if (!dtrain__overlap_begin(&overlap, &have, want))
        return DTRAIN_OK;
    dtrain_status status = dtrain__shelf_find(shelf, tensor, piece, &begin);
    while (status == DTRAIN_OK && dtrain__overlap_next(&overlap, &run)) {
        status = dtrain__shelf_put(shelf, begin + (uint64_t)run.from_begin * from_bytes, run.count, tensor->dtype,
                                   (unsigned char *)out + run.to_begin * to_bytes, to, device);
        *bytes += (uint64_t)run.count * from_bytes;
    }
    return status;
}

#endif
