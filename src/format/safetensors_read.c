/* ---- >>safetensors reading ----
 * Whole tensors, flat ranges and boxes of an open file, converted on the way where that is asked for. Everything is
 * made of runs, elements that follow each other in the file: what needs no conversion is read to where it belongs, the
 * rest through a buffer on the stack. A file changes only in its counter, so that any number of threads may read. */
#ifndef DTRAIN__SAFETENSORS_READ
#define DTRAIN__SAFETENSORS_READ
#include "../tensor/dtype.c"
#include "safetensors_open.c"

#define DTRAIN__SAFETENSORS_STAGE 32768 /* bytes on the stack */
#define DTRAIN__SAFETENSORS_GAP 4096    /* a page: the system reads it anyway, and a call costs as much */

/* One reading call. */
typedef struct dtrain__safetensors_reading {
    dtrain_safetensors *file;
    const dtrain_safetensors_tensor *tensor;
    dtrain_dtype dtype;
    uint64_t bits, out_bits; /* of an element, in the file and in out */
    unsigned char *out;      /* where the next element goes; only the last may end inside a byte, and none does */
} dtrain__safetensors_reading;

/* Turns the bytes of numbers around, on machines that store them the other way; a complex number is two. */
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

/* The byte of the file where element i begins. */
static uint64_t dtrain__safetensors_place_of(const dtrain__safetensors_reading *reading, size_t i)
{
    return reading->tensor->begin + (uint64_t)i / 8 * reading->bits + i % 8 * reading->bits / 8;
}

static dtrain_status dtrain__safetensors_bytes(dtrain__safetensors_reading *reading, uint64_t offset, void *out,
                                               uint64_t bytes)
{
    dtrain_safetensors *file = reading->file;
    dtrain_status status = DTRAIN_OK;
    char text[DTRAIN__ERROR_BYTES], quoted[64];
    if (file->fd < 0)
        memcpy(out, file->memory + offset, (size_t)bytes);
    else
        status = dtrain__file_read_at(file->fd, out, bytes, offset, file->label, "safetensors_read");
    if (status == DTRAIN_OK)
        __atomic_add_fetch(&file->read_bytes, bytes, __ATOMIC_RELAXED);
    if (status == DTRAIN_OK)
        return status;
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    return dtrain__fail(NULL, status, "%s; tensor \"%s\"", text,
                        dtrain__safetensors_quote(quoted, reading->tensor->name, reading->tensor->name_length));
}

/* Moves elements that were read into a buffer to where they belong. */
static void dtrain__safetensors_deliver(dtrain__safetensors_reading *reading, unsigned char *from, size_t count)
{
    uint64_t bytes = (uint64_t)count * reading->bits / 8;
    dtrain__safetensors_swap(from, bytes, reading->tensor->dtype);
    if (reading->dtype == reading->tensor->dtype) {
        memcpy(reading->out, from, (size_t)bytes);
        reading->out += bytes;
    } else {
        dtrain__dtype_convert(from, reading->tensor->dtype, reading->out, reading->dtype, count);
        reading->out += (uint64_t)count * reading->out_bits / 8;
    }
}

/* Reads elements that follow each other. */
static dtrain_status dtrain__safetensors_run(dtrain__safetensors_reading *reading, size_t begin, size_t count)
{
    /* float64 as large as the stage, and 16 bytes aligned, for the kernels that convert */
    uint64_t stage[DTRAIN__SAFETENSORS_STAGE / sizeof(uint64_t)];
    uint64_t offset = dtrain__safetensors_place_of(reading, begin), bytes;
    dtrain_status status = DTRAIN_OK;
    if (reading->dtype == reading->tensor->dtype) {
        bytes = (uint64_t)count / 8 * reading->bits + count % 8 * reading->bits / 8;
        status = dtrain__safetensors_bytes(reading, offset, reading->out, bytes);
        if (status == DTRAIN_OK)
            dtrain__safetensors_swap(reading->out, bytes, reading->dtype);
        reading->out += bytes;
        return status;
    }
    while (count > 0 && status == DTRAIN_OK) {
        size_t some = (size_t)(sizeof stage * 8 / reading->bits);
        some = some < count ? some : count;
        bytes = (uint64_t)some * reading->bits / 8;
        status = dtrain__safetensors_bytes(reading, offset, stage, bytes);
        if (status == DTRAIN_OK)
            dtrain__safetensors_deliver(reading, (unsigned char *)stage, some);
        offset += bytes;
        count -= some;
    }
    return status;
}

/* Checks what all reading calls have in common. */
static dtrain_status dtrain__safetensors_reading_begin(dtrain__safetensors_reading *reading, dtrain_safetensors *file,
                                                       const dtrain_safetensors_tensor *tensor, void *out,
                                                       dtrain_dtype dtype)
{ /* a missing out is the caller's to refuse: nothing can be read to nowhere */
    dtrain__dtype_format format;
    char quoted[64];
    if (file == NULL || tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_read: %s is NULL", file == NULL ? "file" : "tensor");
    dtrain__safetensors_quote(quoted, tensor->name, tensor->name_length);
    reading->file = file;
    reading->tensor = tensor;
    reading->dtype = (int)dtype == 0 ? tensor->dtype : dtype;
    reading->bits = dtrain_dtype_bits(tensor->dtype);
    reading->out_bits = dtrain_dtype_bits(reading->dtype);
    reading->out = (unsigned char *)out;
    if (tensor->end > file->file_bytes)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_read: %s: tensor \"%s\" is of another file",
                            file->label, quoted);
    if (reading->dtype != tensor->dtype &&
        (!dtrain__dtype_format_of(tensor->dtype, &format) || !dtrain__dtype_format_of(reading->dtype, &format)))
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
                        "safetensors_read: %s: tensor \"%s\" (%s): %s: %zu from %zu on, of %zu", reading->file->label,
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
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_read: %s: out is NULL", file->label);
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

/* A box as runs: `run` elements each, and odometer dimensions 0 to outer - 1 that say where they begin. */
typedef struct dtrain__safetensors_box {
    size_t run, runs;
    int outer;
    size_t step; /* elements from one run to the next along the last of these dimensions; 0: there is one run */
} dtrain__safetensors_box;

/* Checks a box and finds its longest runs. A box of nothing has no runs. */
static dtrain_status dtrain__safetensors_box_runs(const dtrain__safetensors_reading *reading, const size_t *begin,
                                                  const size_t *size, dtrain__safetensors_box *box)
{
    const size_t *shape = reading->tensor->shape;
    size_t inner = 1;
    int whole = 1; /* all dimensions so far, from the last one on, are taken whole */
    box->run = box->runs = 1;
    box->step = 0;
    box->outer = 0;
    for (int d = reading->tensor->ndim - 1; d >= 0; d--) {
        if (begin[d] > shape[d] || size[d] > shape[d] - begin[d])
            return dtrain__safetensors_reading_bad(reading, "a box beyond its shape", begin[d], size[d], shape[d]);
        if (whole)
            box->run *= size[d];
        else
            box->runs *= size[d];
        if (!whole && box->outer == 0 && size[d] > 1) {
            box->outer = d + 1;
            box->step = inner;
        }
        whole = whole && size[d] == shape[d];
        inner *= shape[d];
    }
    box->runs = box->run > 0 ? box->runs : 0;
    return DTRAIN_OK;
}

/* The flat index of run number `run` of a box. */
static size_t dtrain__safetensors_box_at(const dtrain_safetensors_tensor *tensor, const size_t *begin,
                                         const size_t *size, int outer, size_t run)
{
    size_t at = 0, stride = 1;
    for (int d = tensor->ndim - 1; d >= 0; d--) {
        size_t index = begin[d];
        if (d < outer) {
            index += run % size[d];
            run /= size[d];
        }
        at += index * stride;
        stride *= tensor->shape[d];
    }
    return at;
}

/* Reads `runs` short runs at even distances, with the gaps between them. */
static dtrain_status dtrain__safetensors_strided(dtrain__safetensors_reading *reading, size_t begin, size_t run,
                                                 size_t step, size_t runs)
{
    uint64_t stage[DTRAIN__SAFETENSORS_STAGE / sizeof(uint64_t)];
    uint64_t step_bytes = (uint64_t)step * reading->bits / 8, run_bytes = (uint64_t)run * reading->bits / 8;
    dtrain_status status = DTRAIN_OK;
    while (runs > 0 && status == DTRAIN_OK) {
        size_t some = (size_t)((sizeof stage - run_bytes) / step_bytes + 1);
        some = some < runs ? some : runs;
        status = dtrain__safetensors_bytes(reading, dtrain__safetensors_place_of(reading, begin), stage,
                                           (some - 1) * step_bytes + run_bytes);
        for (size_t i = 0; i < some && status == DTRAIN_OK; i++)
            dtrain__safetensors_deliver(reading, (unsigned char *)stage + i * step_bytes, run);
        begin += some * step;
        runs -= some;
    }
    return status;
}

static dtrain_status dtrain__safetensors_box_read(dtrain__safetensors_reading *reading, const size_t *begin,
                                                  const size_t *size, const dtrain__safetensors_box *box)
{
    dtrain_status status = DTRAIN_OK;
    uint64_t run_bytes = (uint64_t)box->run / 8 * reading->bits + box->run % 8 * reading->bits / 8;
    uint64_t step_bytes = (uint64_t)box->step / 8 * reading->bits + box->step % 8 * reading->bits / 8;
    /* runs that stand at even distances: those of the last odometer dimension */
    size_t count = box->outer > 0 ? size[box->outer - 1] : 1;
    int strided = box->outer > 0 && count > 1 && step_bytes - run_bytes <= DTRAIN__SAFETENSORS_GAP &&
                  step_bytes <= DTRAIN__SAFETENSORS_STAGE / 2;
    for (size_t run = 0; run < box->runs && status == DTRAIN_OK; run += strided ? count : 1) {
        size_t at = dtrain__safetensors_box_at(reading->tensor, begin, size, box->outer, run);
        status = strided ? dtrain__safetensors_strided(reading, at, box->run, box->step, count)
                         : dtrain__safetensors_run(reading, at, box->run);
    }
    return status;
}

/* Reads a box of a tensor: along each dimension d, size[d] indices from begin[d] on; out gets them row by row, without
 * gaps; otherwise as dtrain_safetensors_read. Rows that meet in the file are read as one, and so, through a
 * buffer, are those with gaps of up to 4 KiB between them. */
static dtrain_status dtrain__safetensors_read_box(dtrain_safetensors *file, const dtrain_safetensors_tensor *tensor,
                                                  const size_t *begin, const size_t *size, void *out,
                                                  dtrain_dtype dtype)
{
    dtrain__safetensors_reading reading;
    dtrain__safetensors_box box;
    dtrain_status status = dtrain__safetensors_reading_begin(&reading, file, tensor, out, dtype);
    uint64_t mode;
    if (status == DTRAIN_OK && tensor->ndim > 0 && (begin == NULL || size == NULL))
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_read_box: %s is NULL",
                              begin == NULL ? "begin" : "size");
    if (status == DTRAIN_OK)
        status = dtrain__safetensors_box_runs(&reading, begin, size, &box);
    if (status != DTRAIN_OK || box.runs == 0)
        return status;
    if (out == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_read_box: out is NULL");
    size_t at = dtrain__safetensors_box_at(tensor, begin, size, box.outer, 0);
    if (at % 8 * reading.bits % 8 != 0 || box.run % 8 * reading.bits % 8 != 0 || box.step % 8 * reading.bits % 8 != 0)
        return dtrain__safetensors_reading_bad(&reading, "rows that begin or end inside a byte", at, box.run,
                                               tensor->count);
    mode = dtrain__fpmode_enter();
    status = dtrain__safetensors_box_read(&reading, begin, size, &box);
    dtrain__fpmode_restore(mode);
    return status;
}

DTRAIN_API dtrain_status dtrain_safetensors_load(dtrain_safetensors *file, const char *name, void *out, size_t count,
                                                 dtrain_dtype dtype)
{
    if (file == NULL || name == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_load: %s is NULL", file == NULL ? "file" : "name");
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
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "safetensors_view: data is NULL");
    *data = NULL;
    dtrain_status status = dtrain__safetensors_reading_begin(&reading, file, tensor, NULL, (dtrain_dtype)0);
    if (status != DTRAIN_OK || tensor->count == 0)
        return status;
    dtrain__safetensors_quote(quoted, tensor->name, tensor->name_length);
    size_t align = tensor->dtype == DTRAIN_C64 ? 4 : reading.bits < 8 ? 1 : (size_t)reading.bits / 8;
    if (file->memory == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "safetensors_view: %s is not mapped: open it with map, or read", file->label);
    const unsigned char *at = file->memory + tensor->begin;
    if ((uintptr_t)at % align != 0 || (DTRAIN__FILE_SWAP && align > 1))
        return dtrain__fail(
            NULL, DTRAIN_ERR_UNSUPPORTED, "safetensors_view: %s: tensor \"%s\" (%s) %s at byte %llu: read it instead",
            file->label, quoted, dtrain_dtype_name(tensor->dtype),
            DTRAIN__FILE_SWAP ? "is stored the other way round" : "is not aligned", (unsigned long long)tensor->begin);
    *data = at;
    return DTRAIN_OK;
}

#endif
