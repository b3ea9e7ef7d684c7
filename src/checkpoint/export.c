/* ---- >>export ----
 * Checks a checkpoint from end to end, or writes it as one file, without the program that saved it. */
#ifndef DTRAIN__EXPORT
#define DTRAIN__EXPORT
#include "checkpoint.c"

/* Bytes of the new file that are read at a time. To open a file costs time with its number of tensors, so each file is
 * opened once for all that the stage takes of it. */
#define DTRAIN__EXPORT_STAGE ((size_t)16 << 20)

/* A piece to read or to check. */
typedef struct dtrain__export_job {
    size_t file, piece;
    struct dtrain__export_tensor *to;
} dtrain__export_job;

typedef struct dtrain__export {
    dtrain_allocator memory;
    dtrain__index index;
    dtrain__verify_reader reader;
    int directory;
    dtrain_safetensors_source *sources;
    struct dtrain__export_tensor *tensors; /* one for each source, in the order of the new file */
    size_t count;
    dtrain__export_job *jobs;
    size_t job_count;
    unsigned char *stage;
    size_t staged, staged_end;    /* the tensors in the stage */
    void (*tell)(uint64_t bytes); /* is told how many bytes were read; may be NULL */
} dtrain__export;

/* What the fill function of a source gets. */
typedef struct dtrain__export_tensor {
    dtrain__export *whole;
    const dtrain__index_tensor *tensor;
    size_t begin, end, place; /* elements that are in the stage, and where there */
} dtrain__export_tensor;

static void dtrain__export_end(dtrain__export *all)
{
    dtrain__verify_close(&all->reader);
    dtrain__file_close(all->directory);
    dtrain__free(&all->memory, all->sources);
    dtrain__free(&all->memory, all->tensors);
    dtrain__free(&all->memory, all->jobs);
    dtrain__free(&all->memory, all->stage);
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

static int dtrain__export_by_file(const void *left, const void *right)
{
    const dtrain__export_job *a = (const dtrain__export_job *)left, *b = (const dtrain__export_job *)right;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return a->piece < b->piece ? -1 : a->piece > b->piece;
}

/* Notes the pieces of a tensor that share elements with a region of it, or all of them if that is NULL. */
static dtrain_status dtrain__export_note(dtrain__export *all, const dtrain__index_tensor *tensor,
                                         const dtrain__region *region, dtrain__export_tensor *to)
{
    dtrain__region have;
    dtrain__region_overlap overlap;
    for (size_t k = tensor->first; k < tensor->first + tensor->count; k++) {
        dtrain__export_job job = {all->index.pieces[k].file, k, to};
        dtrain__index_region(&all->index, tensor, &all->index.pieces[k], &have);
        if (region != NULL && !dtrain__region_overlap_begin(&overlap, &have, region))
            continue;
        if (DTRAIN__INDEX_ADD(&all->memory, all->jobs, all->job_count, job) != DTRAIN_OK)
            return DTRAIN_ERR_MEMORY;
    }
    return DTRAIN_OK;
}

static void dtrain__export_sort(dtrain__export *all)
{
    if (all->job_count > 0)
        qsort(all->jobs, all->job_count, sizeof *all->jobs, dtrain__export_by_file);
}

/* Checks every block of one file, and that the file holds its pieces, which are the jobs from *job on. */
static dtrain_status dtrain__export_check_file(dtrain__export *all, size_t file, size_t *job)
{
    dtrain_status status = dtrain__verify_open(&all->reader, all->directory, file);
    for (uint64_t at = 0; status == DTRAIN_OK && at < all->reader.data.data_bytes;) {
        const unsigned char *data;
        size_t have = 0;
        status = dtrain__verify_file_get(&all->reader.data, at, all->reader.data.data_bytes - at, 1, &data, &have);
        at += have;
        if (all->tell != NULL)
            all->tell(have);
    }
    for (; status == DTRAIN_OK && *job < all->job_count && all->jobs[*job].file == file; (*job)++) {
        uint64_t begin;
        status = dtrain__verify_find(&all->reader, &all->index.pieces[all->jobs[*job].piece], &begin);
    }
    return status;
}

/* Checks every file of the index. */
static dtrain_status dtrain__export_check(dtrain__export *all)
{
    dtrain_status status = DTRAIN_OK;
    size_t job = 0;
    for (size_t i = 0; status == DTRAIN_OK && i < all->index.tensor_count; i++)
        status = dtrain__export_note(all, &all->index.tensors[i], NULL, NULL);
    dtrain__export_sort(all);
    for (size_t file = 0; status == DTRAIN_OK && file < all->index.file_count; file++)
        status = dtrain__export_check_file(all, file, &job);
    return status;
}

DTRAIN_API dtrain_status dtrain_checkpoint_verify(const char *path)
{
    dtrain__export all;
    dtrain_status status = dtrain__export_begin(&all, path);
    if (status == DTRAIN_OK)
        status = dtrain__export_check(&all);
    dtrain__export_end(&all);
    return status;
}

/* Reads the pieces that the jobs name, file after file. */
static dtrain_status dtrain__export_read(dtrain__export *all)
{
    dtrain_status status = DTRAIN_OK;
    uint64_t ignored = 0;
    dtrain__export_sort(all);
    for (size_t i = 0; i < all->job_count && status == DTRAIN_OK; i++) {
        const dtrain__export_tensor *tensor = all->jobs[i].to;
        dtrain__verify_target to = {all->stage + tensor->place, tensor->tensor->dtype, NULL, NULL};
        dtrain__region region;
        dtrain__index_region(&all->index, tensor->tensor, NULL, &region);
        region.at = tensor->begin;
        region.count = tensor->end - tensor->begin;
        status = dtrain__verify_open(&all->reader, all->directory, all->jobs[i].file);
        if (status == DTRAIN_OK)
            status = dtrain__verify_read(&all->reader, &all->index.pieces[all->jobs[i].piece], &region, &to, &ignored);
    }
    return status;
}

/* Fills the stage with what the new file has from element `at` of a tensor on. */
static dtrain_status dtrain__export_stage(dtrain__export *all, size_t first, size_t at)
{
    size_t room = DTRAIN__EXPORT_STAGE;
    dtrain_status status = DTRAIN_OK;
    int whole = 1;
    if (all->stage == NULL && (all->stage = (unsigned char *)dtrain__resize(&all->memory, NULL, room)) == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "checkpoint: no memory for %zu bytes", room);
    for (; all->staged < all->staged_end; all->staged++)
        all->tensors[all->staged].end = 0;
    all->job_count = 0;
    all->staged = all->staged_end = first;
    for (; all->staged_end < all->count && whole && status == DTRAIN_OK; all->staged_end++, at = 0) {
        dtrain__export_tensor *tensor = &all->tensors[all->staged_end];
        size_t each = dtrain_dtype_bits(tensor->tensor->dtype) / 8;
        dtrain__region region;
        dtrain__index_region(&all->index, tensor->tensor, NULL, &region);
        whole = region.count - at <= room / each;
        region.at = at;
        region.count = whole ? region.count - at : room / each;
        tensor->begin = at;
        tensor->end = at + region.count;
        tensor->place = DTRAIN__EXPORT_STAGE - room;
        room -= region.count * each;
        status = dtrain__export_note(all, tensor->tensor, &region, tensor);
    }
    return status == DTRAIN_OK ? dtrain__export_read(all) : status;
}

/* Supplies a range of a tensor. */
static dtrain_status dtrain__export_fill(void *user, uint64_t offset, void *out, size_t bytes)
{
    const dtrain__export_tensor *from = (const dtrain__export_tensor *)user;
    dtrain__export *all = from->whole;
    unsigned char *into = (unsigned char *)out;
    size_t each = dtrain_dtype_bits(from->tensor->dtype) / 8, at = (size_t)(offset / each), left = bytes / each;
    dtrain_status status = DTRAIN_OK;
    while (left > 0 && status == DTRAIN_OK) {
        if (at < from->begin || at >= from->end)
            status = dtrain__export_stage(all, (size_t)(from - all->tensors), at);
        if (status != DTRAIN_OK)
            return status;
        size_t n = from->end - at < left ? from->end - at : left;
        memcpy(into, all->stage + from->place + (at - from->begin) * each, n * each);
        into += n * each;
        at += n;
        left -= n;
    }
    if (all->tell != NULL)
        all->tell(bytes);
    return status;
}

/* Compares by the order that a file of safetensors has; tensors of an index are sorted by name. */
static int dtrain__export_by_place(const void *left, const void *right)
{
    const dtrain__export_tensor *a = (const dtrain__export_tensor *)left, *b = (const dtrain__export_tensor *)right;
    if (a->tensor->dtype != b->tensor->dtype)
        return (int)a->tensor->dtype > (int)b->tensor->dtype ? -1 : 1;
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
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
        if (!with_optimizer && dtrain__piece_is_state(dtrain__index_name(index, tensor), tensor->name_length))
            continue;
        all->tensors[all->count].whole = all;
        all->tensors[all->count++].tensor = tensor;
    }
    if (all->count > 0)
        qsort(all->tensors, all->count, sizeof *all->tensors, dtrain__export_by_place);
    for (size_t i = 0; i < all->count; i++) {
        const dtrain__index_tensor *tensor = all->tensors[i].tensor;
        dtrain_safetensors_source *source = &all->sources[i];
        source->name = dtrain__index_name(index, tensor);
        source->name_length = tensor->name_length;
        source->dtype = tensor->dtype;
        source->ndim = tensor->ndim;
        source->shape = tensor->shape;
        source->fill = dtrain__export_fill;
        source->user = &all->tensors[i];
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
