/* ---- >>verify ----
 * Reads files whose blocks carry hashes. It reads whole blocks, a window of them at a time, and checks each before it
 * gives out a byte of it. Ranges in the order of the file read no block twice. The hashes come from a file that is read
 * in the same way; its own hashes are in the index. Of files without hashes, such as a model's, it reads what is
 * wanted; short ranges are read with the rest of their page. */
#ifndef DTRAIN__VERIFY
#define DTRAIN__VERIFY
#include "save.c"
#include "../format/safetensors_read.c"

#define DTRAIN__VERIFY_WINDOW ((size_t)16 * DTRAIN__INDEX_BLOCK) /* bytes read at a time; they stay in a cache */
#define DTRAIN__VERIFY_PAGE 4096

typedef struct dtrain__verify_file {
    const char *name; /* for texts */
    int fd;           /* of `file` */
    int borrowed;     /* 1: its owner closes the file */
    dtrain_safetensors *file;
    uint64_t data_begin, data_bytes;
    unsigned char *window;
    size_t window_bytes;
    uint64_t begin, end;              /* range of the data that is in the window */
    const uint64_t *hashes;           /* of the blocks; NULL: `from` has them */
    struct dtrain__verify_file *from; /* NULL, and hashes NULL: nothing is checked */
    uint64_t *bytes_read;
} dtrain__verify_file;

static void dtrain__verify_file_close(dtrain__verify_file *open, dtrain_allocator *allocator)
{
    if (open->file == NULL)
        dtrain__file_close(open->fd);
    if (!open->borrowed)
        dtrain_safetensors_close(open->file);
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
                              "checkpoint file \"%s\": its header does not have the hash that was saved: it was "
                              "damaged; restore it, or load another step",
                              open->name);
    return status;
}

static dtrain_status dtrain__verify_file_window(dtrain__verify_file *open, size_t bytes, dtrain_allocator *allocator)
{
    open->window_bytes = bytes;
    open->window = (unsigned char *)dtrain__alloc(allocator, bytes);
    return open->window != NULL ? DTRAIN_OK
                                : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu bytes", bytes);
}

/* Opens a file of an index. Close it even after an error. */
static dtrain_status dtrain__verify_file_open(dtrain__verify_file *open, int directory, const char *name,
                                              const dtrain__index_hashed *entry, int verify, size_t window_bytes,
                                              dtrain_allocator *allocator, uint64_t *bytes_read)
{
    dtrain_safetensors_desc desc = {0, allocator};
    uint64_t bytes = 0;
    open->name = name;
    open->bytes_read = bytes_read;
    open->data_begin = entry->header_bytes;
    open->data_bytes = entry->data_bytes;
    dtrain_status status = dtrain__file_open(&open->fd, &bytes, directory, name, "checkpoint");
    if (status == DTRAIN_OK && (bytes < entry->header_bytes || bytes - entry->header_bytes != entry->data_bytes))
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\" has %llu bytes, expected a header of %llu and data of %llu: it "
                              "was cut; restore it, or load another step",
                              name, (unsigned long long)bytes, (unsigned long long)entry->header_bytes,
                              (unsigned long long)entry->data_bytes);
    if (status == DTRAIN_OK && verify)
        status = dtrain__verify_file_header(open, entry);
    if (status != DTRAIN_OK)
        return status;
    *bytes_read += entry->header_bytes;
    status = dtrain__safetensors_make(&open->file, open->fd, NULL, bytes, &desc, name);
    if (status != DTRAIN_OK)
        open->fd = -1; /* closed */
    if (status == DTRAIN_OK && dtrain__safetensors_header_bytes(open->file) != entry->header_bytes)
        status = dtrain__fail(
            NULL, DTRAIN_ERR_CORRUPT,
            "checkpoint file \"%s\": its header has %llu bytes, expected %llu: restore it, or load another step", name,
            (unsigned long long)dtrain__safetensors_header_bytes(open->file), (unsigned long long)entry->header_bytes);
    return status == DTRAIN_OK ? dtrain__verify_file_window(open, window_bytes, allocator) : status;
}

static dtrain_status dtrain__verify_file_get(dtrain__verify_file *open, uint64_t offset, uint64_t want, size_t each,
                                             const unsigned char **data, size_t *have);

/* Gives the hash that a block should have. */
static dtrain_status dtrain__verify_file_hash(dtrain__verify_file *open, uint64_t block, uint64_t *hash)
{
    const unsigned char *data;
    size_t have;
    if (open->hashes != NULL) {
        *hash = open->hashes[block];
        return DTRAIN_OK;
    }
    dtrain_status status = dtrain__verify_file_get(open->from, 8 * block, 8, 8, &data, &have);
    if (status == DTRAIN_OK)
        *hash = dtrain__load_le64(data);
    return status;
}

static int dtrain__verify_file_hashed(const dtrain__verify_file *open)
{
    return open->hashes != NULL || open->from != NULL;
}

/* Reads `bytes` bytes of the data and checks them; whole blocks if they are hashed. */
static dtrain_status dtrain__verify_file_read(dtrain__verify_file *open, uint64_t offset, uint64_t bytes,
                                              unsigned char *out)
{
    dtrain_status status =
        dtrain__file_read_at(open->fd, out, bytes, open->data_begin + offset, open->name, "checkpoint");
    *open->bytes_read += bytes;
    for (uint64_t at = 0; status == DTRAIN_OK && at < bytes && dtrain__verify_file_hashed(open);
         at += DTRAIN__INDEX_BLOCK) {
        uint64_t expected = 0, n = bytes - at < DTRAIN__INDEX_BLOCK ? bytes - at : DTRAIN__INDEX_BLOCK;
        status = dtrain__verify_file_hash(open, (offset + at) / DTRAIN__INDEX_BLOCK, &expected);
        if (status == DTRAIN_OK && dtrain__xxh64_of(out + at, (size_t)n, 0) != expected)
            status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                                  "checkpoint file \"%s\": bytes %llu to %llu do not have the hash that was saved: "
                                  "they were damaged; restore it, or load another step",
                                  open->name, (unsigned long long)(open->data_begin + offset + at),
                                  (unsigned long long)(open->data_begin + offset + at + n - 1));
    }
    return status;
}

static uint64_t dtrain__verify_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Gives the address of the data at an offset. *have: how many of the `want` bytes are there, at least `each`, which is
 * at most 8. The range must be inside the data; in hashed data, offset must be a multiple of `each`. */
static dtrain_status dtrain__verify_file_get(dtrain__verify_file *open, uint64_t offset, uint64_t want, size_t each,
                                             const unsigned char **data, size_t *have)
{
    if (offset < open->begin || open->end < offset + each) {
        int hashed = dtrain__verify_file_hashed(open);
        uint64_t begin = hashed ? offset - offset % DTRAIN__INDEX_BLOCK : offset;
        uint64_t unit = hashed ? DTRAIN__INDEX_BLOCK : DTRAIN__VERIFY_PAGE;
        uint64_t bytes = (offset + want - begin + unit - 1) / unit * unit;
        bytes = dtrain__verify_least(dtrain__verify_least(bytes, open->window_bytes), open->data_bytes - begin);
        open->begin = open->end = 0;
        dtrain_status status = dtrain__verify_file_read(open, begin, bytes, open->window);
        if (status != DTRAIN_OK)
            return status;
        open->begin = begin;
        open->end = begin + bytes;
    }
    *data = open->window + (offset - open->begin);
    *have = (size_t)dtrain__verify_least(want, open->end - offset);
    return DTRAIN_OK;
}

/* Reads straight to `out`. *bytes: how many of the `want` bytes it read, whole blocks if they are hashed. It reads none
 * if they are in the window or too few. */
static dtrain_status dtrain__verify_file_direct(dtrain__verify_file *open, uint64_t offset, uint64_t want,
                                                unsigned char *out, size_t *bytes)
{
    uint64_t unit = dtrain__verify_file_hashed(open) ? DTRAIN__INDEX_BLOCK : 1, some = want - want % unit;
    *bytes = 0;
    if (some < DTRAIN__VERIFY_PAGE || offset % unit != 0 || (offset >= open->begin && offset < open->end))
        return DTRAIN_OK;
    *bytes = (size_t)dtrain__verify_least(some, DTRAIN__VERIFY_WINDOW);
    return dtrain__verify_file_read(open, offset, *bytes, out);
}

/* ---- files of an index ---- */

/* The one open file of an index, with its hashes. */
typedef struct dtrain__verify_reader {
    dtrain_allocator *allocator;
    const dtrain__index *index;
    int verify;
    size_t open; /* its number; NONE: none is open */
    dtrain__verify_file data, hashes;
    dtrain__staging way; /* to the devices that are loaded */
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
    dtrain__verify_file_close(&reader->data, reader->allocator);
    dtrain__verify_file_close(&reader->hashes, reader->allocator);
    reader->open = DTRAIN__INDEX_NONE;
}

/* Opens the file that holds a file's hashes. */
static dtrain_status dtrain__verify_open_hashes(dtrain__verify_reader *reader, int directory,
                                                const dtrain__index_file *file)
{
    const dtrain__index *index = reader->index;
    dtrain_status status =
        dtrain__verify_file_open(&reader->hashes, directory, index->texts + file->hashes.name, &file->hashes, 1,
                                 DTRAIN__INDEX_BLOCK, reader->allocator, &reader->bytes_read);
    if (status != DTRAIN_OK)
        return status;
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(reader->hashes.file, "xxh64", 5);
    reader->hashes.hashes = index->numbers + file->blocks;
    reader->data.from = &reader->hashes;
    if (tensor != NULL && tensor->dtype == DTRAIN_U64 && tensor->begin == file->hashes.header_bytes &&
        tensor->end - tensor->begin == file->hashes.data_bytes)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                        "checkpoint file \"%s\" does not hold the hashes that the index expects in it",
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
    if (status == DTRAIN_OK && reader->verify && file->data.data_bytes > 0)
        status = dtrain__verify_open_hashes(reader, directory, file);
    if (status == DTRAIN_OK)
        reader->open = number;
    else
        dtrain__verify_close(reader);
    return status;
}

/* Does the same for an open file of a model, which has no hashes. */
static dtrain_status dtrain__verify_open_model(dtrain__verify_reader *reader, dtrain_safetensors *file, size_t number)
{
    dtrain__verify_file *open = &reader->data;
    if (reader->open == number)
        return DTRAIN_OK;
    dtrain__verify_close(reader);
    open->borrowed = 1;
    open->file = file;
    open->name = dtrain__safetensors_data(file, &open->fd, &open->data_begin, &open->data_bytes);
    open->bytes_read = &reader->bytes_read;
    reader->open = number;
    return dtrain__verify_file_window(open, DTRAIN__VERIFY_WINDOW, reader->allocator);
}

/* Finds a piece in the open file. *begin: where its data begins, in the file's data. */
static dtrain_status dtrain__verify_find(dtrain__verify_reader *reader, const dtrain__index_piece *piece,
                                         uint64_t *begin)
{
    const dtrain__index_tensor *tensor = &reader->index->tensors[piece->tensor];
    size_t length = tensor->name_length, room = length + 24;
    char *name = (char *)dtrain__alloc(reader->allocator, room);
    if (name == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for a name");
    memcpy(name, dtrain__index_name(reader->index, tensor), length);
    if (piece->number != DTRAIN__INDEX_NONE)
        length += (size_t)snprintf(name + length, 24, "#%zu", piece->number);
    const dtrain_safetensors_tensor *found = dtrain_safetensors_find(reader->data.file, name, length);
    dtrain_status status = DTRAIN_OK;
    if (found == NULL || found->dtype != tensor->dtype || found->count != piece->count ||
        (dtrain__verify_file_hashed(&reader->data) &&
         (found->begin - reader->data.data_begin) % (dtrain_dtype_bits(tensor->dtype) / 8) != 0))
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "checkpoint file \"%s\" lacks tensor \"%.200s\" of %zu %s, which the index expects in it",
                              reader->data.name, name, piece->count, dtrain_dtype_name(tensor->dtype));
    else
        *begin = found->begin - reader->data.data_begin;
    dtrain__free(reader->allocator, name);
    return status;
}

/* Copies and converts `count` elements of a file's data, from a byte on. */
static dtrain_status dtrain__verify_copy(dtrain__verify_file *file, uint64_t offset, size_t count, dtrain_dtype from,
                                         void *out, dtrain_dtype to)
{
    size_t from_bytes = dtrain_dtype_bits(from) / 8, to_bytes = dtrain_dtype_bits(to) / 8;
    unsigned char *into = (unsigned char *)out, turned[4096];
    dtrain_status status = DTRAIN_OK;
    while (count > 0 && status == DTRAIN_OK) {
        uint64_t want = (uint64_t)count * from_bytes;
        const unsigned char *data = NULL;
        size_t have = 0;
        if (from == to && !DTRAIN__FILE_SWAP)
            status = dtrain__verify_file_direct(file, offset, want, into, &have);
        int direct = have > 0;
        if (status == DTRAIN_OK && !direct)
            status = dtrain__verify_file_get(file, offset, want, from_bytes, &data, &have);
        if (status != DTRAIN_OK)
            return status;
        size_t n = have / from_bytes;
        if (DTRAIN__FILE_SWAP) { /* the window stays as it was read */
            n = n < sizeof turned / from_bytes ? n : sizeof turned / from_bytes;
            memcpy(turned, data, n * from_bytes);
            dtrain__safetensors_swap(turned, n * from_bytes, from);
            data = turned;
        }
        if (from != to)
            status = dtrain_convert(data, from, into, to, n);
        else if (!direct)
            memcpy(into, data, n * from_bytes);
        into += n * to_bytes;
        offset += n * from_bytes;
        count -= n;
    }
    return status;
}

/* Where data goes: memory of a device, or of the CPU for NULL. On a device it is complete after dtrain__staging_wait.
 */
typedef struct dtrain__verify_target {
    void *data;
    dtrain_dtype dtype;
    dtrain_device *device;
    dtrain__staging *way;
} dtrain__verify_target;

/* Does the same, to elements `at` to at + count of a target. */
static dtrain_status dtrain__verify_put(dtrain__verify_file *file, uint64_t offset, size_t count, dtrain_dtype from,
                                        const dtrain__verify_target *to, size_t at)
{
    size_t from_bytes = dtrain_dtype_bits(from) / 8, to_bytes = dtrain_dtype_bits(to->dtype) / 8, have = 0;
    unsigned char *into = (unsigned char *)to->data + at * to_bytes;
    dtrain_status status = DTRAIN_OK;
    if (to->device == NULL)
        return dtrain__verify_copy(file, offset, count, from, into, to->dtype);
    while (count > 0 && status == DTRAIN_OK) {
        void *room;
        status = dtrain__staging_room(to->way, to->device, count * to_bytes, &room, &have);
        size_t n = have / to_bytes;
        if (status == DTRAIN_OK)
            status = dtrain__verify_copy(file, offset, n, from, room, to->dtype);
        if (status == DTRAIN_OK)
            status = dtrain__staging_send(to->way, into, n * to_bytes);
        into += n * to_bytes;
        offset += (uint64_t)n * from_bytes;
        count -= n;
    }
    return status;
}

/* Puts what a stored piece and a target share into the target. `begin` is where the piece's data begins in the file.
 * packed: the file holds only what they share, from there on. */
static dtrain_status dtrain__verify_share(dtrain__verify_file *file, uint64_t begin, int packed,
                                          const dtrain__region *have, dtrain_dtype dtype, const dtrain__region *want,
                                          const dtrain__verify_target *to, uint64_t *bytes)
{
    size_t each = dtrain_dtype_bits(dtype) / 8, done = 0;
    dtrain__region_overlap overlap;
    dtrain__region_overlap_run run;
    dtrain_status status = DTRAIN_OK;
    if (!dtrain__region_overlap_begin(&overlap, have, want))
        return DTRAIN_OK;
    while (status == DTRAIN_OK && dtrain__region_overlap_next(&overlap, &run)) {
        status = dtrain__verify_put(file, begin + (uint64_t)(packed ? done : run.from_begin) * each, run.count, dtype,
                                    to, run.to_begin);
        done += run.count;
    }
    *bytes += (uint64_t)done * each;
    return status;
}

/* Reads what a stored piece of the open file and a target share. */
static dtrain_status dtrain__verify_read(dtrain__verify_reader *reader, const dtrain__index_piece *piece,
                                         const dtrain__region *want, const dtrain__verify_target *to, uint64_t *bytes)
{
    const dtrain__index_tensor *tensor = &reader->index->tensors[piece->tensor];
    dtrain__region have;
    uint64_t begin = 0;
    dtrain_status status = dtrain__verify_find(reader, piece, &begin);
    dtrain__index_region(reader->index, tensor, piece, &have);
    return status == DTRAIN_OK ? dtrain__verify_share(&reader->data, begin, 0, &have, tensor->dtype, want, to, bytes)
                               : status;
}

#endif
