#ifndef DTRAIN_TEST_SAFETENSORS_MEMORY_H
#define DTRAIN_TEST_SAFETENSORS_MEMORY_H

/* Where a file's bytes go, and how many have come. */
typedef struct written {
    unsigned char *out;
    size_t capacity, bytes;
} written;

static dtrain_status write_more(void *user, const void *data, size_t bytes)
{
    written *w = (written *)user;
    if (bytes > w->capacity - w->bytes)
        return DTRAIN_ERR_IO;
    memcpy(w->out + w->bytes, data, bytes);
    w->bytes += bytes;
    return DTRAIN_OK;
}

/* Writes a file to memory. */
static dtrain_status write_memory(void *out, size_t capacity, size_t *bytes, const dtrain_safetensors_source *sources,
                                  size_t count, const dtrain_safetensors_write_desc *desc)
{
    written w = {(unsigned char *)out, capacity, 0};
    dtrain_status status = dtrain_safetensors_write(write_more, &w, sources, count, desc);
    *bytes = w.bytes;
    return status;
}

#endif
