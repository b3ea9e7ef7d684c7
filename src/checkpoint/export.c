/* ---- >>export ----
 * Checks a checkpoint from end to end, or writes it as one file, without the program that saved it. */
#ifndef DTRAIN__EXPORT
#define DTRAIN__EXPORT
#include "checkpoint.c"

typedef struct dtrain__export {
    dtrain_allocator memory;
    dtrain__index index;
    dtrain__verify_reader reader;
    int directory;
    dtrain_safetensors_source *sources;
    struct dtrain__export_tensor *tensors; /* one for each source */
    size_t count;
    void (*tell)(uint64_t bytes); /* is told how many bytes were read; may be NULL */
} dtrain__export;

/* What the fill function of a source gets. */
typedef struct dtrain__export_tensor {
    dtrain__export *whole;
    const dtrain__index_tensor *tensor;
} dtrain__export_tensor;

static void dtrain__export_end(dtrain__export *all)
{
    dtrain__verify_close(&all->reader);
    dtrain__file_close(all->directory);
    dtrain__free(&all->memory, all->sources);
    dtrain__free(&all->memory, all->tensors);
    dtrain__index_free(&all->index);
}

/* Gives the last part of a directory's path. If that names no step ("." or a link), gives that of the resolved path. */
static void dtrain__export_name(const char *path, char name[32])
{
    char real[DTRAIN__OS_PATH_BYTES];
    for (int turn = 0; turn < 2 && path != NULL; turn++, path = dtrain__os_real_path(path, real) ? real : NULL) {
        size_t end = strlen(path), begin;
        while (end > 0 && path[end - 1] == '/')
            end--;
        for (begin = end; begin > 0 && path[begin - 1] != '/';)
            begin--;
        memset(name, 0, 32);
        memcpy(name, path + begin, end - begin < 31 ? end - begin : 31);
        if (strncmp(name, "step-", 5) == 0)
            return;
    }
}

/* Opens a step's directory, or the newest in a directory of steps, and reads its index. */
static dtrain_status dtrain__export_begin(dtrain__export *all, const char *path)
{
    dtrain_checkpoint finder; /* finds the newest */
    char name[32];
    int base = -1;
    memset(all, 0, sizeof *all);
    memset(&finder, 0, sizeof finder);
    all->directory = -1;
    finder.allocator = &all->memory;
    dtrain__index_begin(&all->index, &all->memory);
    dtrain__verify_begin(&all->reader, &all->index, 1, &all->memory);
    if (path == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "checkpoint: path is NULL, expected a directory");
    dtrain_status status = dtrain__file_open_directory(&all->directory, DTRAIN__FILE_HERE, path, "checkpoint");
    if (status != DTRAIN_OK)
        return status;
    dtrain__export_name(path, name);
    if (!dtrain__save_opens(all->directory, DTRAIN__SAVE_INDEX)) {
        base = all->directory;
        all->directory = -1;
        status = dtrain__load_newest(&finder, base, path, name);
        if (status == DTRAIN_OK)
            status = dtrain__file_open_directory(&all->directory, base, name, "checkpoint");
        dtrain__file_close(base);
        dtrain__free(&all->memory, finder.steps);
    }
    return status == DTRAIN_OK ? dtrain__load_index(&all->index, all->directory, name, &all->reader.bytes_read)
                               : status;
}

/* Checks every block of one file, and that the file holds its pieces. */
static dtrain_status dtrain__export_check_file(dtrain__export *all, size_t file)
{
    const dtrain__index *index = &all->index;
    dtrain_status status = dtrain__verify_open(&all->reader, all->directory, file);
    for (uint64_t at = 0; status == DTRAIN_OK && at < all->reader.data.data_bytes;) {
        const unsigned char *data;
        size_t have = 0;
        status = dtrain__verify_file_get(&all->reader.data, at, all->reader.data.data_bytes - at, 1, &data, &have);
        at += have;
        if (all->tell != NULL)
            all->tell(have);
    }
    for (size_t i = 0; status == DTRAIN_OK && i < index->tensor_count; i++)
        for (size_t k = index->tensors[i].first;
             status == DTRAIN_OK && k < index->tensors[i].first + index->tensors[i].count; k++) {
            uint64_t begin;
            if (index->pieces[k].file == file)
                status = dtrain__verify_find(&all->reader, &index->pieces[k], &begin);
        }
    return status;
}

DTRAIN_API dtrain_status dtrain_checkpoint_verify(const char *path)
{
    dtrain__export all;
    dtrain_status status = dtrain__export_begin(&all, path);
    for (size_t file = 0; status == DTRAIN_OK && file < all.index.file_count; file++)
        status = dtrain__export_check_file(&all, file);
    dtrain__export_end(&all);
    return status;
}

/* Supplies a range of a tensor from the pieces that hold it. */
static dtrain_status dtrain__export_fill(void *user, uint64_t offset, void *out, size_t bytes)
{
    const dtrain__export_tensor *from = (const dtrain__export_tensor *)user;
    dtrain__export *all = from->whole;
    const dtrain__index_tensor *tensor = from->tensor;
    size_t each = dtrain_dtype_bits(tensor->dtype) / 8;
    uint64_t ignored = 0;
    dtrain__verify_target to = {out, tensor->dtype, NULL, NULL};
    dtrain__region region, have;
    dtrain__region_overlap overlap;
    dtrain_status status = DTRAIN_OK;
    dtrain__index_region(&all->index, tensor, NULL, &region);
    region.at = (size_t)(offset / each);
    region.count = bytes / each;
    for (size_t k = tensor->first; k < tensor->first + tensor->count && status == DTRAIN_OK; k++) {
        const dtrain__index_piece *piece = &all->index.pieces[k];
        dtrain__index_region(&all->index, tensor, piece, &have);
        if (!dtrain__region_overlap_begin(&overlap, &have, &region))
            continue;
        status = dtrain__verify_open(&all->reader, all->directory, piece->file);
        if (status == DTRAIN_OK)
            status = dtrain__verify_read(&all->reader, piece, &region, &to, &ignored);
    }
    if (all->tell != NULL)
        all->tell(bytes);
    return status;
}

static dtrain_status dtrain__export_list(dtrain__export *all, int with_optimizer)
{
    const dtrain__index *index = &all->index;
    all->sources = (dtrain_safetensors_source *)dtrain__alloc(&all->memory, index->tensor_count * sizeof *all->sources);
    all->tensors = (dtrain__export_tensor *)dtrain__alloc(&all->memory, index->tensor_count * sizeof *all->tensors);
    if (all->sources == NULL || all->tensors == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu tensors", index->tensor_count);
    for (size_t i = 0; i < index->tensor_count; i++) {
        const dtrain__index_tensor *tensor = &index->tensors[i];
        dtrain_safetensors_source *source = &all->sources[all->count];
        if (!with_optimizer && dtrain__piece_is_state(dtrain__index_name(index, tensor), tensor->name_length))
            continue;
        all->tensors[all->count].whole = all;
        all->tensors[all->count].tensor = tensor;
        source->name = dtrain__index_name(index, tensor);
        source->name_length = tensor->name_length;
        source->dtype = tensor->dtype;
        source->ndim = tensor->ndim;
        source->shape = tensor->shape;
        source->fill = dtrain__export_fill;
        source->user = &all->tensors[all->count++];
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_checkpoint_export(const char *path, const char *file, int with_optimizer)
{
    dtrain__export all;
    dtrain_status status = dtrain__export_begin(&all, path);
    if (status == DTRAIN_OK)
        status = dtrain__export_list(&all, with_optimizer);
    if (status == DTRAIN_OK)
        status = dtrain_safetensors_save(file, all.sources, all.count, NULL);
    dtrain__export_end(&all);
    return status;
}

#endif
