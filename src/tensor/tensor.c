/* ---- >>tensor_core ----
 * dtrain_tensor: shapes checked once, when a tensor is made, so that the arithmetic on them cannot
 * overflow later; owning and viewing; cutting along a dimension and joining again; operations that check
 * shapes, dtypes and devices and hand over to kernels, or to the device. */
#ifndef DTRAIN__TENSOR
#define DTRAIN__TENSOR
#include "tensor.h"
#include "../base/memory.c"
#include "isa.c"
#include "dtype.c"
#include "vector.c"
#include "gemm.c"
#include "device.c"

/* "F32 [3, 4]" */
typedef struct dtrain__shape_text {
    char text[256];
} dtrain__shape_text;

static dtrain__shape_text dtrain__tensor_text(const dtrain_tensor *tensor)
{
    dtrain__shape_text out;
    size_t used = (size_t)snprintf(out.text, sizeof out.text, "%s [", dtrain_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->ndim && i < DTRAIN_MAX_DIMS; i++)
        used += (size_t)snprintf(out.text + used, sizeof out.text - used, i > 0 ? ", %zu" : "%zu", tensor->shape[i]);
    snprintf(out.text + used, sizeof out.text - used, "]");
    return out;
}

/* Refuses a tensor that the CPU cannot touch. */
static dtrain_status dtrain__tensor_on_cpu(const char *call, const dtrain_tensor *tensor, const char *cure)
{
    if (tensor->device == NULL)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "%s: %s is on %s, expected one on the cpu: %s", call,
                        dtrain__tensor_text(tensor).text, dtrain_device_name(tensor->device), cure);
}

#define DTRAIN__TENSOR_COPY_FIRST "copy it with dtrain_tensor_copy first"

static dtrain_status dtrain__tensor_one_device(const char *call, const dtrain_tensor *a, const dtrain_tensor *b)
{
    if (a->device == b->device)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "%s: %s is on %s, %s on %s, expected one device: bring them together with dtrain_tensor_copy",
                        call, dtrain__tensor_text(a).text, dtrain_device_name(a->device), dtrain__tensor_text(b).text,
                        dtrain_device_name(b->device));
}

static int dtrain__tensor_same_shape(const dtrain_tensor *a, const dtrain_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0;
}

/* Fills everything but data, allocator and device. Sizes multiply left to right with checks, in bits. */
static dtrain_status dtrain__tensor_shape(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape)
{
    size_t bits = dtrain_dtype_bits(dtype), total = 1;
    if (tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: nowhere to put it (tensor is NULL)");
    memset(tensor, 0, sizeof *tensor);
    if (bits == 0 || ndim < 0 || ndim > DTRAIN_MAX_DIMS || (ndim > 0 && shape == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: dtype %d (%s) with %d dimensions; 0 to %d are possible",
                            (int)dtype, dtrain_dtype_name(dtype), ndim, DTRAIN_MAX_DIMS);
    tensor->dtype = dtype;
    tensor->ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        tensor->shape[i] = shape[i];
        if (!dtrain__mul_size(total, shape[i], &total))
            total = SIZE_MAX;
        if (total == SIZE_MAX)
            break;
    }
    if (total == SIZE_MAX || !dtrain__mul_size(total, bits, &bits)) {
        memset(tensor, 0, sizeof *tensor);
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: its %d sizes multiply to more than a size_t of bits",
                            ndim);
    }
    if (bits % 8 != 0) {
        memset(tensor, 0, sizeof *tensor);
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: %zu elements of %s are no whole number of bytes", total,
                            dtrain_dtype_name(dtype));
    }
    tensor->count = total;
    tensor->bytes = bits / 8;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_create(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                              dtrain_allocator *allocator)
{
    dtrain_status status = dtrain__tensor_shape(tensor, dtype, ndim, shape);
    if (status != DTRAIN_OK)
        return status;
    if (allocator == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_create: needs an allocator; a zeroed one will do");
    tensor->data = dtrain__alloc(allocator, tensor->bytes);
    if (tensor->data == NULL) {
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "tensor_create: no memory for %s, %zu bytes",
                              dtrain__tensor_text(tensor).text, tensor->bytes);
        memset(tensor, 0, sizeof *tensor);
        return status;
    }
    tensor->allocator = allocator;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_view(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                            void *data)
{
    dtrain_status status = dtrain__tensor_shape(tensor, dtype, ndim, shape);
    if (status != DTRAIN_OK)
        return status;
    if (data == NULL && tensor->bytes > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_view: %s needs %zu bytes, data is NULL",
                            dtrain__tensor_text(tensor).text, tensor->bytes);
    tensor->data = data;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_create_on(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim,
                                                 const size_t *shape, dtrain_device *device)
{
    const unsigned char zero = 0;
    dtrain_status status = dtrain__tensor_shape(tensor, dtype, ndim, shape);
    if (status != DTRAIN_OK)
        return status;
    tensor->device = device;
    tensor->device_owned = 1;
    status = dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, tensor->bytes, &tensor->data);
    if (status == DTRAIN_OK)
        status = dtrain_device_fill(device, tensor->data, &zero, 1, tensor->bytes);
    if (status != DTRAIN_OK)
        dtrain_tensor_destroy(tensor);
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_view_on(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                               void *data, dtrain_device *device)
{
    dtrain_status status = dtrain_tensor_view(tensor, dtype, ndim, shape, data);
    if (status == DTRAIN_OK)
        tensor->device = device;
    return status;
}

DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor)
{
    if (tensor == NULL)
        return;
    if (tensor->device_owned)
        dtrain_device_free(tensor->device, DTRAIN_MEMORY_DEVICE, tensor->data);
    if (tensor->allocator != NULL)
        dtrain__free(tensor->allocator, tensor->data, tensor->bytes);
    memset(tensor, 0, sizeof *tensor);
}

/* A tensor as rows before dim, its size along dim, and bytes of one step along dim. */
static size_t dtrain__tensor_outer(const dtrain_tensor *tensor, int dim, size_t *step_bytes)
{
    size_t outer = 1, inner = dtrain_dtype_bits(tensor->dtype) / 8;
    for (int i = 0; i < dim; i++)
        outer *= tensor->shape[i];
    for (int i = dim + 1; i < tensor->ndim; i++)
        inner *= tensor->shape[i];
    *step_bytes = inner;
    return outer;
}

static dtrain_status dtrain__tensor_check_dim(const char *call, const dtrain_tensor *tensor, int dim, int parts)
{
    if (dim < 0 || dim >= tensor->ndim || parts < 1 || dtrain_dtype_bits(tensor->dtype) % 8 != 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "%s: dimension %d of %s into %d parts; needs a dimension that it has, at least one part, and "
            "elements of whole bytes",
            call, dim, dtrain__tensor_text(tensor).text, parts);
    return DTRAIN_OK;
}

/* A new tensor of another shape, on the same device. */
static dtrain_status dtrain__tensor_create_beside(dtrain_tensor *made, const dtrain_tensor *beside, const size_t *shape,
                                                  dtrain_allocator *allocator)
{
    return beside->device != NULL ? dtrain_tensor_create_on(made, beside->dtype, beside->ndim, shape, beside->device)
                                  : dtrain_tensor_create(made, beside->dtype, beside->ndim, shape, allocator);
}

DTRAIN_API dtrain_status dtrain_tensor_shard(dtrain_tensor *shard, const dtrain_tensor *whole, int dim, int parts,
                                             int part, dtrain_allocator *allocator)
{
    size_t shape[DTRAIN_MAX_DIMS], begin, step, outer;
    dtrain_status status;
    if (shard == NULL || whole == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_shard: a tensor is NULL");
    memset(shard, 0, sizeof *shard);
    status = dtrain__tensor_check_dim("tensor_shard", whole, dim, parts);
    if (status == DTRAIN_OK && (part < 0 || part >= parts))
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_shard: part %d of %d; parts count from 0", part, parts);
    if (status != DTRAIN_OK)
        return status;
    memcpy(shape, whole->shape, sizeof shape);
    shape[dim] = dtrain_split(whole->shape[dim], parts, part, &begin);
    status = dtrain__tensor_create_beside(shard, whole, shape, allocator);
    if (status != DTRAIN_OK || shard->count == 0)
        return status;
    outer = dtrain__tensor_outer(whole, dim, &step);
    for (size_t i = 0; i < outer && status == DTRAIN_OK; i++)
        status = dtrain_device_copy(whole->device, (unsigned char *)shard->data + i * shape[dim] * step,
                                    (const unsigned char *)whole->data + (i * whole->shape[dim] + begin) * step,
                                    shape[dim] * step);
    if (status != DTRAIN_OK)
        dtrain_tensor_destroy(shard);
    return status;
}

/* Adds up the sizes of shards along dim. */
static dtrain_status dtrain__tensor_check_shards(const dtrain_tensor *shards, int parts, int dim, size_t *size)
{
    *size = 0;
    for (int p = 0; p < parts; p++) {
        int fits = shards[p].dtype == shards[0].dtype && shards[p].ndim == shards[0].ndim;
        for (int i = 0; fits && i < shards[0].ndim; i++)
            fits = i == dim || shards[p].shape[i] == shards[0].shape[i];
        if (!fits || !dtrain__add_size(*size, shards[p].shape[dim], size))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "tensor_unshard: shard %d is %s, which does not join %s along "
                                "dimension %d",
                                p, dtrain__tensor_text(&shards[p]).text, dtrain__tensor_text(&shards[0]).text, dim);
        if (dtrain__tensor_one_device("tensor_unshard", &shards[0], &shards[p]) != DTRAIN_OK)
            return DTRAIN_ERR_INVALID;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_unshard(dtrain_tensor *whole, const dtrain_tensor *shards, int parts, int dim,
                                               dtrain_allocator *allocator)
{
    size_t shape[DTRAIN_MAX_DIMS], begin = 0, step, outer;
    dtrain_status status;
    if (whole == NULL || shards == NULL || parts < 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_unshard: needs a tensor and at least one shard");
    memset(whole, 0, sizeof *whole);
    status = dtrain__tensor_check_dim("tensor_unshard", &shards[0], dim, parts);
    if (status != DTRAIN_OK)
        return status;
    memcpy(shape, shards[0].shape, sizeof shape);
    status = dtrain__tensor_check_shards(shards, parts, dim, &shape[dim]);
    if (status == DTRAIN_OK)
        status = dtrain__tensor_create_beside(whole, &shards[0], shape, allocator);
    if (status != DTRAIN_OK)
        return status;
    outer = dtrain__tensor_outer(whole, dim, &step);
    for (int p = 0; p < parts; p++) {
        size_t n = shards[p].shape[dim];
        for (size_t i = 0; n * step > 0 && i < outer && status == DTRAIN_OK; i++)
            status = dtrain_device_copy(whole->device, (unsigned char *)whole->data + (i * shape[dim] + begin) * step,
                                        (const unsigned char *)shards[p].data + i * n * step, n * step);
        begin += n;
    }
    if (status != DTRAIN_OK)
        dtrain_tensor_destroy(whole);
    return status;
}

static dtrain_status dtrain__tensor_check_pair(const char *call, const dtrain_tensor *a, const dtrain_tensor *b)
{
    if (a == NULL || b == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: a tensor is NULL", call);
    if (!dtrain__device_is_float(a->dtype))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "%s of %s: F64, F32, F16 and BF16 are possible", call,
                            dtrain__tensor_text(a).text);
    if (a->dtype != b->dtype || !dtrain__tensor_same_shape(a, b))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s meets %s; both must be equal in dtype and shape", call,
                            dtrain__tensor_text(a).text, dtrain__tensor_text(b).text);
    return dtrain__tensor_one_device(call, a, b);
}

DTRAIN_API dtrain_status dtrain_tensor_add(dtrain_tensor *out, const dtrain_tensor *a, const dtrain_tensor *b)
{
    const void *in[2];
    void *to[1];
    dtrain_status status = dtrain__tensor_check_pair("tensor_add", a, b);
    if (status == DTRAIN_OK)
        status = dtrain__tensor_check_pair("tensor_add", a, out);
    if (status != DTRAIN_OK || a->count == 0)
        return status;
    in[0] = a->data;
    in[1] = b->data;
    to[0] = out->data;
    return dtrain_device_reduce(a->device, a->dtype, DTRAIN_SUM, in, 2, to, 1, 0, a->count);
}

DTRAIN_API dtrain_status dtrain_tensor_scale(dtrain_tensor *x, double factor)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_scale", x, x);
    return status == DTRAIN_OK ? dtrain_device_scale(x->device, x->dtype, x->data, factor, x->count) : status;
}

DTRAIN_API dtrain_status dtrain_tensor_axpy(dtrain_tensor *y, double alpha, const dtrain_tensor *x)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_axpy", y, x);
    return status == DTRAIN_OK ? dtrain_device_axpy(y->device, y->dtype, y->data, alpha, x->data, y->count) : status;
}

DTRAIN_API dtrain_status dtrain_tensor_add_bias(dtrain_tensor *x, const dtrain_tensor *bias)
{
    if (x == NULL || bias == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_add_bias: a tensor is NULL");
    if (x->dtype != DTRAIN_F32 || bias->dtype != DTRAIN_F32)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "tensor_add_bias: %s and %s; both must be F32",
                            dtrain__tensor_text(x).text, dtrain__tensor_text(bias).text);
    if (x->ndim < 1 || bias->ndim != 1 || bias->shape[0] != x->shape[x->ndim - 1])
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_add_bias: %s does not fit the rows of %s",
                            dtrain__tensor_text(bias).text, dtrain__tensor_text(x).text);
    dtrain_status status = dtrain__tensor_on_cpu("tensor_add_bias", x, DTRAIN__TENSOR_COPY_FIRST);
    if (status == DTRAIN_OK)
        status = dtrain__tensor_on_cpu("tensor_add_bias", bias, DTRAIN__TENSOR_COPY_FIRST);
    for (size_t i = 0; status == DTRAIN_OK && i < x->count; i += bias->count)
        dtrain__vector(DTRAIN__VECTOR_ADD, DTRAIN_F32, (float *)x->data + i, 1, bias->data, bias->count);
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_sum_squares(double *sum, const dtrain_tensor *x)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_sum_squares", x, x);
    if (status == DTRAIN_OK)
        status = dtrain__tensor_on_cpu("tensor_sum_squares", x,
                                       "use dtrain_device_squares, or copy it with dtrain_tensor_copy first");
    if (status == DTRAIN_OK) {
        uint64_t mode = dtrain__fpmode_enter();
        *sum = dtrain__sum_squares(x->dtype, x->data, x->count);
        dtrain__fpmode_restore(mode);
    }
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_matmul(dtrain_tensor *out, const dtrain_tensor *a, int transpose_a,
                                              const dtrain_tensor *b, int transpose_b, int accumulate)
{
    size_t m, n, k, inner;
    if (out == NULL || a == NULL || b == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_matmul: a tensor is NULL");
    if (out->dtype != DTRAIN_F32 || a->dtype != DTRAIN_F32 || b->dtype != DTRAIN_F32)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "tensor_matmul: %s = %s x %s; all must be F32",
                            dtrain__tensor_text(out).text, dtrain__tensor_text(a).text, dtrain__tensor_text(b).text);
    if (dtrain__tensor_on_cpu("tensor_matmul", out, DTRAIN__TENSOR_COPY_FIRST) != DTRAIN_OK ||
        dtrain__tensor_on_cpu("tensor_matmul", a, DTRAIN__TENSOR_COPY_FIRST) != DTRAIN_OK ||
        dtrain__tensor_on_cpu("tensor_matmul", b, DTRAIN__TENSOR_COPY_FIRST) != DTRAIN_OK)
        return DTRAIN_ERR_UNSUPPORTED;
    m = a->shape[transpose_a ? 1 : 0];
    k = a->shape[transpose_a ? 0 : 1];
    inner = b->shape[transpose_b ? 1 : 0];
    n = b->shape[transpose_b ? 0 : 1];
    if (out->ndim != 2 || a->ndim != 2 || b->ndim != 2 || k != inner || out->shape[0] != m || out->shape[1] != n)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_matmul: %s = %s%s x %s%s; the sizes do not meet",
                            dtrain__tensor_text(out).text, dtrain__tensor_text(a).text,
                            transpose_a ? " transposed" : "", dtrain__tensor_text(b).text,
                            transpose_b ? " transposed" : "");
    dtrain_sgemm(transpose_a, transpose_b, m, n, k, 1, (const float *)a->data, a->shape[1], (const float *)b->data,
                 b->shape[1], accumulate ? 1.0f : 0.0f, (float *)out->data, n);
    return DTRAIN_OK;
}

#define DTRAIN__TENSOR_CHUNK ((size_t)4 << 20) /* bytes that go between two devices at once */

/* Copies between two devices by way of one that can see both memories, which those of one kind can, or of the CPU. */
static dtrain_status dtrain__tensor_copy_across(dtrain_tensor *to, const dtrain_tensor *from)
{
    dtrain_device *device = to->device;
    size_t chunk = from->bytes < DTRAIN__TENSOR_CHUNK ? from->bytes : DTRAIN__TENSOR_CHUNK;
    void *pinned = NULL;
    dtrain_status status = dtrain_device_wait(from->device);
    if (status == DTRAIN_OK && device->ops == from->device->ops) {
        status = dtrain_device_copy(device, to->data, from->data, from->bytes);
        return status == DTRAIN_OK ? dtrain_device_wait(device) : status;
    }
    if (status == DTRAIN_OK)
        status = dtrain_device_alloc(device, DTRAIN_MEMORY_PINNED, chunk, &pinned);
    for (size_t at = 0; at < from->bytes && status == DTRAIN_OK; at += chunk) {
        size_t bytes = from->bytes - at < chunk ? from->bytes - at : chunk;
        status = dtrain_device_copy(from->device, pinned, (const unsigned char *)from->data + at, bytes);
        if (status == DTRAIN_OK)
            status = dtrain_device_wait(from->device); /* to which the other's pinned memory may be pinned, too */
        if (status == DTRAIN_OK)
            status = dtrain_device_copy(device, (unsigned char *)to->data + at, pinned, bytes);
        if (status == DTRAIN_OK)
            status = dtrain_device_wait(device);
    }
    dtrain_device_free(device, DTRAIN_MEMORY_PINNED, pinned);
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_copy(dtrain_tensor *to, const dtrain_tensor *from)
{
    if (to == NULL || from == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_copy: a tensor is NULL");
    if (to->dtype != from->dtype || !dtrain__tensor_same_shape(to, from))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "tensor_copy: %s to %s, expected equal dtypes and shapes: dtrain_tensor_cast converts",
                            dtrain__tensor_text(from).text, dtrain__tensor_text(to).text);
    if (from->bytes == 0)
        return DTRAIN_OK;
    if (to->device != NULL && from->device != NULL && to->device != from->device)
        return dtrain__tensor_copy_across(to, from);
    return dtrain_device_copy(to->device != NULL ? to->device : from->device, to->data, from->data, from->bytes);
}

/* Makes an integer of `bits` bits of a value. Returns 0 where there is none. */
static int dtrain__tensor_integer(double value, unsigned bits, int is_signed, uint64_t *out)
{
    double top = (double)((uint64_t)1 << (bits - 1)), whole;
    uint64_t pattern;
    memcpy(&pattern, &value, sizeof pattern);
    if ((pattern >> 52 & 0x7FF) == 0x7FF || value < (is_signed ? -top : 0.0) || value >= (is_signed ? top : 2 * top))
        return 0;
    *out = value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
    whole = value < 0 ? (double)(int64_t)*out : (double)*out;
    return whole == value;
}

/* Makes an element of a value, in the first bytes of out. */
static dtrain_status dtrain__tensor_element(dtrain_dtype dtype, double value, unsigned char out[8])
{
    unsigned bits = dtrain_dtype_bits(dtype);
    dtrain__format format;
    uint64_t whole = 0;
    int is_signed = dtype == DTRAIN_I8 || dtype == DTRAIN_I16 || dtype == DTRAIN_I32 || dtype == DTRAIN_I64;
    int is_unsigned = dtype == DTRAIN_U8 || dtype == DTRAIN_U16 || dtype == DTRAIN_U32 || dtype == DTRAIN_U64;
    if (dtrain__format_of(dtype, &format))
        return dtrain_convert(&value, DTRAIN_F64, out, dtype, 1);
    if (!is_signed && !is_unsigned && dtype != DTRAIN_BOOL)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "tensor_fill of %s: integers, BOOL, F64, F32, F16, BF16, F8_E4M3 and F8_E5M2 are possible",
                            dtrain_dtype_name(dtype));
    if (!dtrain__tensor_integer(value, bits, is_signed, &whole) || (dtype == DTRAIN_BOOL && whole > 1))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_fill: %g is no value of %s", value,
                            dtrain_dtype_name(dtype));
    dtrain__store_bits(out, whole, (int)bits / 8);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_fill(dtrain_tensor *tensor, double value)
{
    unsigned char element[8] = {0};
    if (tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_fill: the tensor is NULL");
    dtrain_status status = dtrain__tensor_element(tensor->dtype, value, element);
    return status == DTRAIN_OK ? dtrain_device_fill(tensor->device, tensor->data, element,
                                                    dtrain_dtype_bits(tensor->dtype) / 8, tensor->count)
                               : status;
}

DTRAIN_API dtrain_status dtrain_tensor_cast(dtrain_tensor *to, const dtrain_tensor *from)
{
    if (to == NULL || from == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_cast: a tensor is NULL");
    if (!dtrain__tensor_same_shape(to, from))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_cast: %s to %s, expected equal shapes",
                            dtrain__tensor_text(from).text, dtrain__tensor_text(to).text);
    dtrain_status status = dtrain__tensor_one_device("tensor_cast", from, to);
    return status == DTRAIN_OK
               ? dtrain_device_convert(from->device, from->data, from->dtype, to->data, to->dtype, from->count)
               : status;
}

#endif
