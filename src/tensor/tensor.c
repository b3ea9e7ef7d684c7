/* ---- >>tensor_core ----
 * dtrain_tensor: shapes checked once, when a tensor is made, so that arithmetic on them cannot
 * overflow later; owning and viewing. */
#ifndef DTRAIN__TENSOR
#define DTRAIN__TENSOR
#include "tensor.h"
#include "../base/memory.c"
#include "dtype.c"

/* "F32 [3, 4]" */
typedef struct dtrain__tensor_shape_text {
    char text[256];
} dtrain__tensor_shape_text;

static dtrain__tensor_shape_text dtrain__tensor_text(const dtrain_tensor *tensor)
{
    dtrain__tensor_shape_text out;
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
        dtrain__free(tensor->allocator, tensor->data);
    memset(tensor, 0, sizeof *tensor);
}

#endif
