/* ---- >>device_calls ----
 * How the library calls devices. A call checks its arguments, then calls the device's table. Without a device, kernels
 * of the CPU do the work at once. Only a table's functions touch a device's memory. */
#ifndef DTRAIN__DEVICE
#define DTRAIN__DEVICE
#include "device.h"
#include "../base/memory.c"
#include "dtype.c"
#include "fold.c"
#include "vector.c"
#include "norm.c"

#if DTRAIN_SQUARES_LIMBS != DTRAIN__NORM_LIMBS
#error "DTRAIN_SQUARES_LIMBS and DTRAIN__NORM_LIMBS differ"
#endif

#define DTRAIN__DEVICE_MOST 64                  /* inputs and outputs of a reduction */
#define DTRAIN__DEVICE_ELEMENTS (SIZE_MAX / 16) /* the most whose bytes can be counted for every dtype */

DTRAIN_API DTRAIN__NOINLINE const char *dtrain_device_name(const dtrain_device *device)
{
    return device == NULL ? "cpu" : device->name != NULL ? device->name : "a device without a name";
}

static DTRAIN__NOINLINE dtrain_status dtrain__device_lacks(const dtrain_device *device, const char *call)
{
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "%s on %s: the device's table lacks this function: copy the data to the CPU's memory and call "
                        "with device NULL",
                        call, dtrain_device_name(device));
}

/* Calls a function of a device's table. */
#define DTRAIN__DEVICE_CALL(device, call, function, arguments) \
    ((device)->ops != NULL && (device)->ops->function != NULL ? (device)->ops->function arguments \
                                                              : dtrain__device_lacks(device, call))

/* Checks one pointer of a call on count elements: NULL is for no elements only. The count is limited, so that a table's
 * functions can multiply it. */
static dtrain_status dtrain__device_pointer(const dtrain_device *device, const char *call, const char *name,
                                            const void *pointer, size_t count)
{
    if (count > DTRAIN__DEVICE_ELEMENTS)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s on %s: count is %zu, more than memory holds", call,
                            dtrain_device_name(device), count);
    if (pointer != NULL || count == 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s on %s: %s is NULL, expected memory of %zu elements", call,
                        dtrain_device_name(device), name, count);
}

/* A call's pointer and its name, for checks. A list of them ends with the name NULL. */
typedef struct dtrain__device_argument {
    const char *name;
    const void *pointer;
} dtrain__device_argument;

static dtrain_status dtrain__device_pointers(const dtrain_device *device, const char *call, size_t count,
                                             const dtrain__device_argument *arguments)
{
    dtrain_status status = DTRAIN_OK;
    for (; arguments->name != NULL && status == DTRAIN_OK; arguments++)
        status = dtrain__device_pointer(device, call, arguments->name, arguments->pointer, count);
    return status;
}

/* Checks a call on count floats of a dtype. */
static dtrain_status dtrain__device_floats(const dtrain_device *device, const char *call, dtrain_dtype dtype,
                                           size_t count, const dtrain__device_argument *arguments)
{
    if (dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16)
        return dtrain__device_pointers(device, call, count, arguments);
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "%s on %s: dtype is %d (%s), expected F64, F32, F16 or BF16",
                        call, dtrain_device_name(device), (int)dtype, dtrain_dtype_name(dtype));
}

/* ---- queues ---- */

/* Makes another queue on the same device, for work beside the first. *made: NULL for a NULL device. */
static dtrain_status dtrain__device_queue_create(dtrain_device *device, dtrain_device **made)
{
    *made = NULL;
    if (device == NULL)
        return DTRAIN_OK;
    if (device->ops == NULL || device->ops->queue_create == NULL || device->ops->queue_destroy == NULL)
        return dtrain__fail(
            NULL, DTRAIN_ERR_UNSUPPORTED,
            "device_queue_create on %s: the device's table makes no other queues: use the one that you have",
            dtrain_device_name(device));
    dtrain_status status = device->ops->queue_create(device, made);
    if (status != DTRAIN_OK)
        *made = NULL;
    return status;
}

static void dtrain__device_queue_destroy(dtrain_device *made)
{
    if (made != NULL && made->ops != NULL && made->ops->queue_destroy != NULL)
        made->ops->queue_destroy(made);
}

/* ---- memory ---- */

DTRAIN_API dtrain_status dtrain_device_alloc(dtrain_device *device, dtrain_memory memory, size_t bytes, void **pointer)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    if (pointer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "device_alloc on %s: pointer is NULL, expected one to set",
                            dtrain_device_name(device));
    *pointer = NULL;
    if (memory != DTRAIN_MEMORY_DEVICE && memory != DTRAIN_MEMORY_PINNED)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "device_alloc on %s: memory is %d, expected DTRAIN_MEMORY_DEVICE or DTRAIN_MEMORY_PINNED",
                            dtrain_device_name(device), (int)memory);
    if (bytes == 0)
        return DTRAIN_OK;
    if (device == NULL) {
        *pointer = dtrain__resize(&heap, NULL, bytes);
        return *pointer != NULL
                   ? DTRAIN_OK
                   : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "device_alloc on cpu: no memory for %zu bytes", bytes);
    }
    dtrain_status status = DTRAIN__DEVICE_CALL(device, "device_alloc", allocate, (device, memory, bytes, pointer));
    if (status != DTRAIN_OK)
        *pointer = NULL;
    return status;
}

DTRAIN_API void dtrain_device_free(dtrain_device *device, dtrain_memory memory, void *pointer)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    if (device == NULL)
        dtrain__free(&heap, pointer);
    else if (pointer != NULL && device->ops != NULL && device->ops->release != NULL)
        device->ops->release(device, memory, pointer);
}

DTRAIN_API dtrain_status dtrain_device_copy(dtrain_device *device, void *to, const void *from, size_t bytes)
{
    const dtrain__device_argument pointers[] = {{"to", to}, {"from", from}, {NULL, NULL}};
    dtrain_status status = dtrain__device_pointers(device, "device_copy", bytes, pointers);
    if (status != DTRAIN_OK || bytes == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_copy", copy, (device, to, from, bytes));
    memcpy(to, from, bytes);
    return DTRAIN_OK;
}

static void dtrain__device_fill_cpu(unsigned char *to, const void *element, size_t bytes, size_t all)
{
    size_t done = bytes;
    if (memcmp(element, (const unsigned char *)element + 1, bytes - 1) == 0) { /* all bytes are equal */
        memset(to, *(const unsigned char *)element, all);
        return;
    }
    for (memcpy(to, element, bytes); done < all;) {
        size_t most = done < ((size_t)16 << 10) ? done : (size_t)16 << 10, n = all - done < most ? all - done : most;
        memcpy(to + done, to, n);
        done += n;
    }
}

DTRAIN_API dtrain_status dtrain_device_fill(dtrain_device *device, void *to, const void *element, size_t element_bytes,
                                            size_t count)
{
    const dtrain__device_argument pointers[] = {{"to", to}, {"element", element}, {NULL, NULL}};
    size_t all;
    if (element_bytes != 1 && element_bytes != 2 && element_bytes != 4 && element_bytes != 8)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "device_fill on %s: element_bytes is %zu, expected 1, 2, 4 or 8",
                            dtrain_device_name(device), element_bytes);
    if (!dtrain__mul_size(count, element_bytes, &all))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "device_fill on %s: count is %zu, more than memory holds",
                            dtrain_device_name(device), count);
    dtrain_status status = dtrain__device_pointers(device, "device_fill", count, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_fill", fill, (device, to, element, element_bytes, count));
    dtrain__device_fill_cpu((unsigned char *)to, element, element_bytes, all);
    return DTRAIN_OK;
}

/* ---- order ---- */

DTRAIN_API dtrain_status dtrain_device_wait(dtrain_device *device)
{
    return device == NULL ? DTRAIN_OK : DTRAIN__DEVICE_CALL(device, "device_wait", wait, (device));
}

/* The event of a NULL device, whose work is done at once. */
static const char dtrain__device_event_cpu = 0;

static dtrain_status dtrain__device_event_create(dtrain_device *device, dtrain_device_event **event)
{
    *event = (dtrain_device_event *)&dtrain__device_event_cpu;
    if (device == NULL)
        return DTRAIN_OK;
    dtrain_status status = DTRAIN__DEVICE_CALL(device, "device_event_create", event_create, (device, event));
    if (status != DTRAIN_OK)
        *event = NULL;
    return status;
}

static void dtrain__device_event_destroy(dtrain_device *device, dtrain_device_event *event)
{
    if (device != NULL && event != NULL && device->ops != NULL && device->ops->event_destroy != NULL)
        device->ops->event_destroy(device, event);
}

static dtrain_status dtrain__device_event_record(dtrain_device *device, dtrain_device_event *event)
{
    return device == NULL ? DTRAIN_OK
                          : DTRAIN__DEVICE_CALL(device, "device_event_record", event_record, (device, event));
}

static dtrain_status dtrain__device_event_await(dtrain_device *device, dtrain_device_event *event)
{
    return device == NULL ? DTRAIN_OK : DTRAIN__DEVICE_CALL(device, "device_event_await", event_await, (device, event));
}

static dtrain_status dtrain__device_event_done(dtrain_device *device, dtrain_device_event *event, int *done)
{
    *done = 1;
    return device == NULL ? DTRAIN_OK
                          : DTRAIN__DEVICE_CALL(device, "device_event_done", event_done, (device, event, done));
}

/* ---- elementwise ---- */

DTRAIN_API dtrain_status dtrain_device_convert(dtrain_device *device, const void *in, dtrain_dtype from, void *out,
                                               dtrain_dtype to, size_t count)
{
    const dtrain__device_argument pointers[] = {{"in", in}, {"out", out}, {NULL, NULL}};
    if (!dtrain__dtype_converts(from, to))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "device_convert on %s: from %s to %s: both must be among F64, F32, F16, BF16, F8_E4M3 and "
                            "F8_E5M2",
                            dtrain_device_name(device), dtrain_dtype_name(from), dtrain_dtype_name(to));
    dtrain_status status = dtrain__device_pointers(device, "device_convert", count, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_convert", convert, (device, in, from, out, to, count));
    return dtrain_convert(in, from, out, to, count);
}

/* Checks a reduction's list of pointers. */
static dtrain_status dtrain__device_list(const dtrain_device *device, const char *name, const void *const *list, int n,
                                         size_t count)
{
    if (n < 1 || n > DTRAIN__DEVICE_MOST || list == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "device_reduce on %s: %s is %s with %d pointers, expected 1 to %d",
                            dtrain_device_name(device), name, list == NULL ? "NULL" : "a list", n, DTRAIN__DEVICE_MOST);
    for (int i = 0; i < n && count > 0; i++)
        if (list[i] == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "device_reduce on %s: %s[%d] of %d is NULL, expected memory of %zu elements",
                                dtrain_device_name(device), name, i, n, count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_device_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op,
                                              const void *const *in, int n, void *const *out, int m, size_t begin,
                                              size_t count)
{
    dtrain_status status = dtrain__device_list(device, "in", in, n, count);
    if (status == DTRAIN_OK)
        status = dtrain__device_list(device, "out", (const void *const *)out, m, count);
    if (status == DTRAIN_OK && (count > SIZE_MAX - begin || begin + count > DTRAIN__DEVICE_ELEMENTS))
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                              "device_reduce on %s: %zu elements from element %zu on are more than memory holds",
                              dtrain_device_name(device), count, begin);
    if (status == DTRAIN_OK && !dtrain__fold_supported(dtype, op))
        status = dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                              "device_reduce on %s: dtype %d (%s) has no op %d; dtrain_op says which dtypes have it",
                              dtrain_device_name(device), (int)dtype, dtrain_dtype_name(dtype), (int)op);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_reduce", reduce,
                                   (device, dtype, op, (double)n, in, n, out, m, begin, count));
    dtrain__fold(dtype, op, (double)n, in, n, out, m, begin, count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_device_scale(dtrain_device *device, dtrain_dtype dtype, void *x, double factor,
                                             size_t count)
{
    const dtrain__device_argument pointers[] = {{"x", x}, {NULL, NULL}};
    dtrain_status status = dtrain__device_floats(device, "device_scale", dtype, count, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_scale", scale, (device, dtype, x, factor, count));
    dtrain__vector(dtype, x, factor, NULL, count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_device_axpy(dtrain_device *device, dtrain_dtype dtype, void *y, double alpha,
                                            const void *x, size_t count)
{
    const dtrain__device_argument pointers[] = {{"y", y}, {"x", x}, {NULL, NULL}};
    dtrain_status status = dtrain__device_floats(device, "device_axpy", dtype, count, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_axpy", axpy, (device, dtype, y, alpha, x, count));
    dtrain__vector(dtype, y, alpha, x, count);
    return DTRAIN_OK;
}

/* ---- measuring ---- */

/* Returns whether any float, at any alignment, is infinite or NaN: all bits of its exponent are set. */
static int dtrain__device_unbounded(dtrain_dtype dtype, const void *x, size_t count)
{
    int found = 0;
    if (dtype == DTRAIN_F64)
        for (size_t i = 0; i < count; i++)
            found |= (((const dtrain__u64 *)x)[i] >> 52 & 0x7FF) == 0x7FF;
    else if (dtype == DTRAIN_F32)
        for (size_t i = 0; i < count; i++)
            found |= (((const dtrain__u32 *)x)[i] & 0x7F800000u) == 0x7F800000u;
    else {
        unsigned exponent = dtype == DTRAIN_F16 ? 0x7C00u : 0x7F80u;
        for (size_t i = 0; i < count; i++)
            found |= (((const dtrain__u16 *)x)[i] & exponent) == exponent;
    }
    return found;
}

DTRAIN_API dtrain_status dtrain_device_overflow(dtrain_device *device, dtrain_dtype dtype, const void *x, size_t count,
                                                uint32_t *found)
{
    const dtrain__device_argument pointers[] = {{"x", x}, {"found", found}, {NULL, NULL}};
    dtrain_status status = dtrain__device_floats(device, "device_overflow", dtype, count, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_overflow", overflow, (device, dtype, x, count, found));
    if (dtrain__device_unbounded(dtype, x, count))
        *found = 1;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_device_squares(dtrain_device *device, const float *x, size_t count, int64_t *limbs)
{
    const dtrain__device_argument pointers[] = {{"x", x}, {"limbs", limbs}, {NULL, NULL}};
    dtrain__norm sum;
    dtrain_status status = dtrain__device_pointers(device, "device_squares", count, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_squares", squares, (device, x, count, limbs));
    memcpy(sum.limbs, limbs, sizeof sum.limbs);
    dtrain__norm_add_squares(&sum, x, count);
    memcpy(limbs, sum.limbs, sizeof sum.limbs);
    return DTRAIN_OK;
}

/* Returns the root of a sum of squares, rounded to nearest in any mode of the caller. volatile: the root is computed
 * before the caller's mode is restored. */
static double dtrain__device_length(const dtrain__norm *sum)
{
    uint64_t mode = dtrain__fpmode_enter();
    volatile double length = dtrain__vector_sqrt_f64(dtrain__norm_value(sum));
    dtrain__fpmode_restore(mode);
    return length;
}

DTRAIN__EXACT_BEGIN

static float dtrain__device_ratio(double over, double under)
{
    return (float)(over / under);
}

DTRAIN__EXACT_END

static void dtrain__device_clip_cpu(const int64_t *limbs, float max_norm, double *norm, float *x, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__norm sum;
    memcpy(sum.limbs, limbs, sizeof sum.limbs);
    double length = dtrain__device_length(&sum);
    memcpy(norm, &length, sizeof length);
    if (max_norm != 0.0f && dtrain__norm_finite(&sum) && length > (double)max_norm)
        dtrain__fold_weigh_f32(x, (double)dtrain__device_ratio((double)max_norm, length), x, count);
    dtrain__fpmode_restore(mode);
}

DTRAIN_API dtrain_status dtrain_device_clip(dtrain_device *device, const int64_t *limbs, float max_norm, double *norm,
                                            float *x, size_t count)
{
    const dtrain__device_argument pointers[] = {{"limbs", limbs}, {"norm", norm}, {NULL, NULL}};
    uint32_t bits;
    memcpy(&bits, &max_norm, sizeof bits);
    if (bits >= 0x7F800000u && bits != 0x80000000u)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "device_clip on %s: max_norm is %g, expected a number of at least 0",
                            dtrain_device_name(device), (double)max_norm);
    dtrain_status status = dtrain__device_pointers(device, "device_clip", 1, pointers);
    if (status == DTRAIN_OK)
        status = dtrain__device_pointer(device, "device_clip", "x", x, count);
    if (status != DTRAIN_OK)
        return status;
    if (device != NULL)
        return DTRAIN__DEVICE_CALL(device, "device_clip", clip, (device, limbs, max_norm, norm, x, count));
    dtrain__device_clip_cpu(limbs, max_norm, norm, x, count);
    return DTRAIN_OK;
}

#endif
