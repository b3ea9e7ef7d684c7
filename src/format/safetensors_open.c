/* ---- >>safetensors opening ----
 * Opening a path, a descriptor or memory: the first eight bytes (R1 to R3), then all other checks in order. And looking
 * up tensors and metadata. */
#ifndef DTRAIN__SAFETENSORS_OPEN
#define DTRAIN__SAFETENSORS_OPEN
#include "safetensors.c"

static dtrain_status dtrain__safetensors_frame(dtrain_safetensors *file)
{
    unsigned char first[8];
    if (file->file_bytes < 8)
        return dtrain__safetensors_broken(file, 1, 0, NULL, "it has %llu bytes, expected at least 8",
                                          (unsigned long long)file->file_bytes);
    dtrain_status status =
        file->fd >= 0 ? dtrain__file_read_at(file->fd, first, 8, 0, file->label, "safetensors_open") : DTRAIN_OK;
    if (status != DTRAIN_OK)
        return status;
    uint64_t length = dtrain__load_le64(file->fd >= 0 ? first : file->memory);
    if (length > DTRAIN__SAFETENSORS_HEADER_MOST)
        return dtrain__safetensors_broken(file, 2, 0, NULL, "its header has %llu bytes, expected at most 100000000",
                                          (unsigned long long)length);
    if (length > file->file_bytes - 8)
        return dtrain__safetensors_broken(file, 3, 0, NULL,
                                          "its header has %llu bytes, and the file has %llu: it was cut",
                                          (unsigned long long)length, (unsigned long long)file->file_bytes);
    file->header_bytes = length + 8;
    if (file->fd >= 0) /* it stops at a zero byte, which the parser refuses */
        return dtrain__file_read_text(file->fd, 8, length, file->allocator, &file->header, &file->header_have,
                                      file->label, "safetensors_open");
    file->header = (unsigned char *)dtrain__resize(file->allocator, NULL, length > 0 ? (size_t)length : 1);
    if (file->header == NULL)
        return dtrain__safetensors_memory(file);
    memcpy(file->header, file->memory + 8, (size_t)length);
    file->header_have = (size_t)length;
    return DTRAIN_OK;
}

/* Maps the file, so that dtrain_safetensors_view can give its data in place. */
static dtrain_status dtrain__safetensors_map(dtrain_safetensors *file)
{
    file->mapping = file->file_bytes <= SIZE_MAX ? dtrain__file_sys_map(file->fd, (size_t)file->file_bytes) : NULL;
    if (file->mapping == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "safetensors_open: \"%s\" cannot be mapped: %s; open it without map", file->label,
                            dtrain__os_error_text(errno));
    file->memory = (const unsigned char *)file->mapping;
    return DTRAIN_OK;
}

/* Reads and checks the header of a file.
 *
 *   fd       the call takes ownership of it; -1: the file is in memory
 *   memory   `bytes` bytes, if fd is -1
 *   label    the file's name in texts */
static dtrain_status dtrain__safetensors_make(dtrain_safetensors **out, int fd, const void *memory, uint64_t bytes,
                                              const dtrain_safetensors_desc *desc, const char *label)
{
    dtrain_status (*const steps[])(dtrain_safetensors *) = {dtrain__safetensors_frame, dtrain__safetensors_parse,
                                                            dtrain__safetensors_sort, dtrain__safetensors_names,
                                                            dtrain__safetensors_check};
    dtrain_allocator *allocator = desc != NULL ? desc->allocator : NULL;
    dtrain_safetensors *file = (dtrain_safetensors *)dtrain__memory_owner(
        allocator, sizeof *file, offsetof(dtrain_safetensors, own), &allocator);
    dtrain_status status = DTRAIN_OK;
    *out = NULL;
    if (file == NULL) {
        dtrain__file_close(fd);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "safetensors_open: no memory to open \"%s\"", label);
    }
    file->allocator = allocator;
    file->fd = fd;
    file->memory = (const unsigned char *)memory;
    file->file_bytes = bytes;
    snprintf(file->label, sizeof file->label, "%s", label);
    for (size_t i = 0; i < sizeof steps / sizeof *steps && status == DTRAIN_OK; i++)
        status = steps[i](file);
    if (status == DTRAIN_OK && fd >= 0 && desc != NULL && desc->map)
        status = dtrain__safetensors_map(file);
    if (status == DTRAIN_OK)
        *out = file;
    else
        dtrain_safetensors_close(file);
    return status;
}

/* Opens a file of a directory. label: its name in texts. */
static dtrain_status dtrain__safetensors_open_at(dtrain_safetensors **file, int directory, const char *name,
                                                 const dtrain_safetensors_desc *desc, const char *label)
{
    uint64_t bytes = 0;
    int fd;
    *file = NULL;
    dtrain_status status = dtrain__file_open(&fd, &bytes, directory, name, "safetensors_open");
    return status == DTRAIN_OK ? dtrain__safetensors_make(file, fd, NULL, bytes, desc, label) : status;
}

DTRAIN_API dtrain_status dtrain_safetensors_open(dtrain_safetensors **file, const char *path,
                                                 const dtrain_safetensors_desc *desc)
{
    if (file == NULL || path == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_open: %s is NULL, expected %s",
                            file == NULL ? "file" : "path", file == NULL ? "a pointer to set" : "the path of a file");
    return dtrain__safetensors_open_at(file, DTRAIN__FILE_HERE, path, desc, path);
}

DTRAIN_API dtrain_status dtrain_safetensors_open_memory(dtrain_safetensors **file, const void *data, size_t bytes,
                                                        const dtrain_safetensors_desc *desc)
{
    if (file == NULL || (data == NULL && bytes > 0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_open_memory: %s is NULL, expected %s",
                            file == NULL ? "file" : "data", file == NULL ? "a pointer to set" : "the bytes of a file");
    return dtrain__safetensors_make(file, -1, data, bytes, desc, "memory");
}

DTRAIN_API void dtrain_safetensors_close(dtrain_safetensors *file)
{
    if (file == NULL)
        return;
    dtrain_allocator *allocator = file->allocator;
    if (file->mapping != NULL)
        dtrain__os_unmap(file->mapping, (size_t)file->file_bytes);
    dtrain__file_close(file->fd);
    dtrain__names_free(&file->names, allocator);
    dtrain__names_free(&file->keys, allocator);
    dtrain__free(allocator, file->shapes);
    dtrain__free(allocator, file->pairs);
    dtrain__free(allocator, file->entries);
    dtrain__free(allocator, file->header);
    dtrain__free(allocator, file);
}

/* ---- lookup ---- */

DTRAIN_API size_t dtrain_safetensors_count(const dtrain_safetensors *file)
{
    return file != NULL ? file->count : 0;
}

DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_tensor_at(const dtrain_safetensors *file, size_t i)
{
    return file != NULL && i < file->count ? &file->entries[i].tensor : NULL;
}

DTRAIN_API const dtrain_safetensors_tensor *dtrain_safetensors_find(const dtrain_safetensors *file, const char *name,
                                                                    size_t length)
{
    size_t index;
    if (file == NULL || !dtrain__names_find(&file->names, name, length, &index))
        return NULL;
    return &file->entries[index].tensor;
}

static size_t dtrain__safetensors_metadata_count(const dtrain_safetensors *file)
{
    return file != NULL ? file->pair_count : 0;
}

/* Returns pair i of the metadata, in the order of the header; NULL after the last. Zero bytes end key and value. */
static const dtrain_safetensors_pair *dtrain__safetensors_metadata(const dtrain_safetensors *file, size_t i)
{
    return file != NULL && i < file->pair_count ? &file->pairs[i] : NULL;
}

static const dtrain_safetensors_pair *dtrain__safetensors_metadata_find(const dtrain_safetensors *file, const char *key,
                                                                        size_t length)
{
    size_t index;
    if (file == NULL || !dtrain__names_find(&file->keys, key, length, &index))
        return NULL;
    return &file->pairs[index];
}

/* Returns the number of bytes before the data: 8, and the header with its padding. */
static uint64_t dtrain__safetensors_header_bytes(const dtrain_safetensors *file)
{
    return file != NULL ? file->header_bytes : 0;
}

/* Gives an open file's descriptor and the place of its data, for callers that read the data themselves. Returns the
 * file's name in texts. */
static const char *dtrain__safetensors_data(const dtrain_safetensors *file, int *fd, uint64_t *data_begin,
                                            uint64_t *data_bytes)
{
    *fd = file->fd;
    *data_begin = file->header_bytes;
    *data_bytes = file->file_bytes - file->header_bytes;
    return file->label;
}

#endif
