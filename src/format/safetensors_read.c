/* ---- >>safetensors reading ----
 * Reading whole tensors and ranges of an open file. Without conversion, elements are read straight to their place.
 * Others go through a buffer on the stack. Reading does not change the open file, so any number of threads may read. */
#ifndef DTRAIN__SAFETENSORS_READ
#define DTRAIN__SAFETENSORS_READ
#include "../tensor/dtype.c"
#include "safetensors_open.c"

#define DTRAIN__SAFETENSORS_STAGE 32768 /* bytes on the stack */

/* A call that reads. */
typedef struct dtrain__safetensors_reading {
    dtrain_safetensors *file;
    const dtrain_safetensors_tensor *tensor;
    dtrain_dtype dtype;
    uint64_t bits;      /* of an element in the file */
    unsigned char *out; /* the place of the next element */
} dtrain__safetensors_reading;

/* Reverses the bytes of each number, on big-endian machines. A complex number is two numbers. */
static void dtrain__safetensors_swap(void *data, uint64_t bytes, dtrain_dtype dtype)
{
    unsigned char *at = (unsigned char *)data;
    size_t width = dtype == DTRAIN_C64 ? 4 : dtrain_dtype_bits(dtype) / 8;
    if (width < 2)
        return;
    for (; DTRAIN__FILE_SWAP && bytes >= width; bytes -= width, at += width)
        for (size_t i = 0; i < width / 2; i++) {
            unsigned char swap = at[i];
            at[i] = at[width - 1 - i];
            at[width - 1 - i] = swap;
        }
}

static dtrain_status dtrain__safetensors_bytes(dtrain__safetensors_reading *reading, uint64_t offset, void *out,
                                               uint64_t bytes)
{
    dtrain_safetensors *file = reading->file;
    dtrain_status status = DTRAIN_OK;
    char quoted[64];
    if (file->fd < 0)
        memcpy(out, file->memory + offset, (size_t)bytes);
    else
        status = dtrain__file_read_at(file->fd, out, bytes, offset, file->label, "safetensors_read");
    if (status == DTRAIN_OK)
        return status;
    return dtrain__fail(NULL, status, "%s; tensor \"%s\"", dtrain_last_error(),
                        dtrain__safetensors_quote(quoted, reading->tensor->name, reading->tensor->name_length));
}

/* Reads `count` elements from element `begin` on. */
static dtrain_status dtrain__safetensors_run(dtrain__safetensors_reading *reading, size_t begin, size_t count)
{
    /* an array of uint64_t, so that the kernels that convert find it aligned */
    uint64_t stage[DTRAIN__SAFETENSORS_STAGE / sizeof(uint64_t)];
    uint64_t offset = reading->tensor->begin + (uint64_t)begin / 8 * reading->bits + begin % 8 * reading->bits / 8;
    dtrain_status status = DTRAIN_OK;
    if (reading->dtype == reading->tensor->dtype) {
        uint64_t bytes = (uint64_t)count / 8 * reading->bits + count % 8 * reading->bits / 8;
        status = dtrain__safetensors_bytes(reading, offset, reading->out, bytes);
        if (status == DTRAIN_OK)
            dtrain__safetensors_swap(reading->out, bytes, reading->dtype);
        return status;
    }
    while (count > 0 && status == DTRAIN_OK) {
        size_t some = (size_t)(sizeof stage * 8 / reading->bits);
        some = some < count ? some : count;
        uint64_t bytes = (uint64_t)some * reading->bits / 8;
        status = dtrain__safetensors_bytes(reading, offset, stage, bytes);
        if (status != DTRAIN_OK)
            return status;
        dtrain__safetensors_swap(stage, bytes, reading->tensor->dtype);
        dtrain__dtype_convert(stage, reading->tensor->dtype, reading->out, reading->dtype, some);
        reading->out += (uint64_t)some * dtrain_dtype_bits(reading->dtype) / 8;
        offset += bytes;
        count -= some;
    }
    return status;
}

/* Begins a reading call: checks the arguments that all of them have. */
static dtrain_status dtrain__safetensors_reading_begin(dtrain__safetensors_reading *reading, dtrain_safetensors *file,
                                                       const dtrain_safetensors_tensor *tensor, void *out,
                                                       dtrain_dtype dtype)
{ /* callers check out themselves: it may be NULL if they read nothing */
    char quoted[64];
    if (file == NULL || tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_read: %s is NULL, expected %s",
                            file == NULL ? "file" : "tensor", file == NULL ? "an open file" : "one of its tensors");
    dtrain__safetensors_quote(quoted, tensor->name, tensor->name_length);
    reading->file = file;
    reading->tensor = tensor;
    reading->dtype = (int)dtype == 0 ? tensor->dtype : dtype;
    reading->bits = dtrain_dtype_bits(tensor->dtype);
    reading->out = (unsigned char *)out;
    if (tensor->end > file->file_bytes)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "safetensors_read: %s: tensor \"%s\" is of another file: pass the file that it comes from",
                            file->label, quoted);
    if (reading->dtype != tensor->dtype && !dtrain__dtype_converts(tensor->dtype, reading->dtype))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "safetensors_read: %s: tensor \"%s\" is %s and asked for as %s: both must be among F64, "
                            "F32, F16, BF16, F8_E4M3 and F8_E5M2, or the same",
                            file->label, quoted, dtrain_dtype_name(tensor->dtype), dtrain_dtype_name(reading->dtype));
    return DTRAIN_OK;
}

static dtrain_status dtrain__safetensors_reading_bad(const dtrain__safetensors_reading *reading, const char *what,
                                                     size_t begin, size_t count, size_t limit)
{
    char quoted[64];
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "safetensors_read: %s: tensor \"%s\" (%s): %s: %zu elements from element %zu on, of %zu",
                        reading->file->label,
                        dtrain__safetensors_quote(quoted, reading->tensor->name, reading->tensor->name_length),
                        dtrain_dtype_name(reading->tensor->dtype), what, count, begin, limit);
}

DTRAIN_API dtrain_status dtrain_safetensors_read(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor,
                                                 size_t begin, size_t count, void *out, dtrain_dtype dtype)
{
    dtrain__safetensors_reading reading;
    dtrain_status status = dtrain__safetensors_reading_begin(&reading, file, tensor, out, dtype);
    uint64_t mode;
    if (status != DTRAIN_OK)
        return status;
    if (out == NULL && count > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "safetensors_read: %s: out is NULL, expected memory of %zu elements", file->label, count);
    if (begin > tensor->count || count > tensor->count - begin)
        return dtrain__safetensors_reading_bad(&reading, "a range beyond its elements", begin, count, tensor->count);
    if (begin % 8 * reading.bits % 8 != 0 || count % 8 * reading.bits % 8 != 0)
        return dtrain__safetensors_reading_bad(&reading, "a range that begins or ends inside a byte", begin, count,
                                               tensor->count);
    mode = dtrain__fpmode_enter();
    status = dtrain__safetensors_run(&reading, begin, count);
    dtrain__fpmode_restore(mode);
    return status;
}

DTRAIN_API dtrain_status dtrain_safetensors_load(dtrain_safetensors *file, const char *name, void *out, size_t count,
                                                 dtrain_dtype dtype)
{
    if (file == NULL || name == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_load: %s is NULL, expected %s",
                            file == NULL ? "file" : "name", file == NULL ? "an open file" : "the name of a tensor");
    const dtrain_safetensors_tensor *tensor = dtrain_safetensors_find(file, name, strlen(name));
    char quoted[64];
    dtrain__safetensors_quote(quoted, name, strlen(name));
    if (tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MISMATCH, "safetensors_load: %s has no tensor \"%s\" among its %zu",
                            file->label, quoted, file->count);
    if (tensor->count != count)
        return dtrain__fail(NULL, DTRAIN_ERR_MISMATCH,
                            "safetensors_load: %s: tensor \"%s\" has %zu elements, expected %zu", file->label, quoted,
                            tensor->count, count);
    return dtrain_safetensors_read(file, tensor, 0, tensor->count, out, dtype);
}

DTRAIN_API dtrain_status dtrain_safetensors_view(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor,
                                                 const void **data)
{
    dtrain__safetensors_reading reading;
    char quoted[64];
    if (data == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_view: data is NULL, expected a pointer to set");
    *data = NULL;
    dtrain_status status = dtrain__safetensors_reading_begin(&reading, file, tensor, NULL, (dtrain_dtype)0);
    if (status != DTRAIN_OK || tensor->count == 0)
        return status;
    dtrain__safetensors_quote(quoted, tensor->name, tensor->name_length);
    size_t bits = dtrain_dtype_bits(tensor->dtype), align = tensor->dtype == DTRAIN_C64 ? 4 : bits < 8 ? 1 : bits / 8;
    if (file->memory == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "safetensors_view: %s is not mapped: open it with map = 1, or read the tensor",
                            file->label);
    const unsigned char *at = file->memory + tensor->begin;
    if ((uintptr_t)at % align != 0 || (DTRAIN__FILE_SWAP && align > 1))
        return dtrain__fail(
            NULL, DTRAIN_ERR_UNSUPPORTED, "safetensors_view: %s: tensor \"%s\" (%s) %s at byte %llu: read it instead",
            file->label, quoted, dtrain_dtype_name(tensor->dtype),
            DTRAIN__FILE_SWAP ? "is little-endian" : "is not aligned", (unsigned long long)tensor->begin);
    *data = at;
    return DTRAIN_OK;
}

#endif
