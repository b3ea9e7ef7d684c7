/* ---- >>tensor_core ----
 * dtrain_tensor: shapes checked once, when a tensor is made, so that the arithmetic on them cannot
 * overflow later; owning and viewing; cutting along a dimension and joining again; operations that check
 * shapes and dtypes and hand over to kernels. */
#ifndef DTRAIN__TENSOR
#define DTRAIN__TENSOR
#include "tensor.h"
#include "../base/memory.c"
#include "isa.c"
#include "dtype.c"
#include "vector.c"
#include "gemm.c"

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

/* Fills everything but data and allocator. Sizes multiply left to right with checks, in bits. */
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

DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor)
{
    if (tensor == NULL)
        return;
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
    status = dtrain_tensor_create(shard, whole->dtype, whole->ndim, shape, allocator);
    if (status != DTRAIN_OK || shard->count == 0)
        return status;
    outer = dtrain__tensor_outer(whole, dim, &step);
    for (size_t i = 0; i < outer; i++)
        memcpy((unsigned char *)shard->data + i * shape[dim] * step,
               (const unsigned char *)whole->data + (i * whole->shape[dim] + begin) * step, shape[dim] * step);
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
    shape[dim] = 0;
    for (int p = 0; p < parts; p++) {
        int fits = shards[p].dtype == shards[0].dtype && shards[p].ndim == shards[0].ndim;
        for (int i = 0; fits && i < shards[0].ndim; i++)
            fits = i == dim || shards[p].shape[i] == shards[0].shape[i];
        if (!fits || !dtrain__add_size(shape[dim], shards[p].shape[dim], &shape[dim]))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "tensor_unshard: shard %d is %s, which does not join %s along "
                                "dimension %d",
                                p, dtrain__tensor_text(&shards[p]).text, dtrain__tensor_text(&shards[0]).text, dim);
    }
    status = dtrain_tensor_create(whole, shards[0].dtype, shards[0].ndim, shape, allocator);
    if (status != DTRAIN_OK)
        return status;
    outer = dtrain__tensor_outer(whole, dim, &step);
    for (int p = 0; p < parts; p++) {
        size_t n = shards[p].shape[dim];
        for (size_t i = 0; n * step > 0 && i < outer; i++)
            memcpy((unsigned char *)whole->data + (i * shape[dim] + begin) * step,
                   (const unsigned char *)shards[p].data + i * n * step, n * step);
        begin += n;
    }
    return DTRAIN_OK;
}

static int dtrain__tensor_is_float(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16;
}

static dtrain_status dtrain__tensor_check_pair(const char *call, const dtrain_tensor *a, const dtrain_tensor *b)
{
    if (a == NULL || b == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: a tensor is NULL", call);
    if (!dtrain__tensor_is_float(a->dtype))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "%s of %s: F64, F32, F16 and BF16 are possible", call,
                            dtrain__tensor_text(a).text);
    if (a->dtype != b->dtype || a->ndim != b->ndim ||
        memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s meets %s; both must be equal in dtype and shape", call,
                            dtrain__tensor_text(a).text, dtrain__tensor_text(b).text);
    return DTRAIN_OK;
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
    dtrain__fold(a->dtype, DTRAIN_SUM, 1, in, 2, to, 1, 0, a->count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_scale(dtrain_tensor *x, double factor)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_scale", x, x);
    if (status == DTRAIN_OK)
        dtrain__vector(DTRAIN__VECTOR_SCALE, x->dtype, x->data, factor, NULL, x->count);
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_axpy(dtrain_tensor *y, double alpha, const dtrain_tensor *x)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_axpy", y, x);
    if (status == DTRAIN_OK)
        dtrain__vector(DTRAIN__VECTOR_AXPY, y->dtype, y->data, alpha, x->data, y->count);
    return status;
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
    for (size_t i = 0; i < x->count; i += bias->count)
        dtrain__vector(DTRAIN__VECTOR_ADD, DTRAIN_F32, (float *)x->data + i, 1, bias->data, bias->count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_sum_squares(double *sum, const dtrain_tensor *x)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_sum_squares", x, x);
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

#endif
