/* ---- >>device_vector ----
 * A vector on a device (on the CPU if device is NULL), what compression does to it, and the memory between device and
 * CPU. All work is queued on the device. The CPU waits before it reads what it sends: once a step for a selection. Each
 * step waits before it writes pinned memory, so that copies from there that the step before queued have ended.
 *
 * A device has no kernels that set single elements to zero, or that drop NaN and infinity. Instead, elements are
 * multiplied as integers by 1 or 0. That keeps their bits, or makes them zero, whatever they are. */
#ifndef DTRAIN__DEVICE_VECTOR
#define DTRAIN__DEVICE_VECTOR
#include "compress.h"
#include "../tensor/device.c"
#include "../comm/collectives.c"
#include "device_selection.c"
#include "feedback.c"

/* Memory that grows by half more than needed. It loses its contents when it grows. */
typedef struct dtrain__device_buffer {
    unsigned char *data;
    size_t bytes;
} dtrain__device_buffer;

/* The buffers of a vector. */
enum {
    DTRAIN__DEVICE_OUT,       /* pinned: packed parts to all ranks */
    DTRAIN__DEVICE_IN,        /* pinned: packed parts from all ranks */
    DTRAIN__DEVICE_WHOLE,     /* pinned: all elements */
    DTRAIN__DEVICE_OUT_THERE, /* on the device from here on: OUT and IN there, which a vector on the CPU does not use */
    DTRAIN__DEVICE_IN_THERE,
    DTRAIN__DEVICE_WIDE,   /* unpacked parts */
    DTRAIN__DEVICE_SPREAD, /* a constant */
    DTRAIN__DEVICE_BUFFERS
};

/* Some elements of a vector on a device: indices, then values, in pinned memory and as they are on the device. */
typedef struct dtrain__device_elements {
    dtrain__device_buffer here, there;
    uint32_t *indices, *indices_there;
    float *values, *values_there;
    size_t capacity, count;
} dtrain__device_elements;

typedef struct dtrain__device_vector {
    dtrain_device *device; /* NULL: the CPU */
    dtrain_comm *comm;
    dtrain_allocator *allocator; /* of the CPU's memory */
    size_t count;
    float *residual, *velocity; /* the owner's; NULL: none */
    float *out;                 /* of this call: the result at its end, temporary room before */
    int masks;                  /* 1: the velocity of elements that were sent starts again from 0 */
    dtrain_device_selection *selection;
    size_t k; /* of the selection */
    dtrain__device_elements chosen, left, kept, sums;
    dtrain__device_buffer buffers[DTRAIN__DEVICE_BUFFERS];
} dtrain__device_vector;

/* Breaks the group if a device failed in the middle of a step, or has no memory for it, so that no rank waits for this
 * one. */
static DTRAIN__NOINLINE dtrain_status dtrain__device_vector_broken(dtrain_comm *comm, const dtrain_device *device,
                                                                   dtrain_status status)
{
    return status == DTRAIN_OK ? status : dtrain__feedback_abort(comm, status, dtrain_device_name(device));
}

/* ---- memory ---- */

static void dtrain__device_vector_free(dtrain__device_vector *v, dtrain_memory memory, void *pointer)
{
    if (v->device != NULL)
        dtrain_device_free(v->device, memory, pointer);
    else
        dtrain__free(v->allocator, pointer);
}

static dtrain_status dtrain__device_buffer_reserve(dtrain__device_vector *v, dtrain_memory memory,
                                                   dtrain__device_buffer *buffer, size_t bytes)
{
    void *made = NULL;
    size_t whole;
    if (buffer->data != NULL && buffer->bytes >= bytes)
        return DTRAIN_OK;
    if (v->device == NULL) {
        dtrain_status status = dtrain__feedback_reserve(&buffer->data, v->allocator, bytes);
        buffer->bytes = dtrain__memory_bytes(buffer->data);
        return status;
    }
    if (!dtrain__add_size(bytes, bytes / 2 + 4096, &whole))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", bytes);
    dtrain_device_free(v->device, memory, buffer->data);
    buffer->data = NULL;
    dtrain_status status = dtrain_device_alloc(v->device, memory, whole, &made);
    buffer->data = (unsigned char *)made;
    buffer->bytes = whole;
    return status;
}

/* Makes one of a vector's buffers at least `bytes` long. */
static dtrain_status dtrain__device_vector_reserve(dtrain__device_vector *v, int which, size_t bytes)
{
    dtrain_memory memory = which <= DTRAIN__DEVICE_WHOLE ? DTRAIN_MEMORY_PINNED : DTRAIN_MEMORY_DEVICE;
    return dtrain__device_buffer_reserve(v, memory, &v->buffers[which], bytes);
}

static float *dtrain__device_vector_floats(const dtrain__device_vector *v, int which)
{
    return (float *)(void *)v->buffers[which].data;
}

/* Makes room for count elements in a list, which loses its contents. */
static dtrain_status dtrain__device_elements_reserve(dtrain__device_vector *v, dtrain__device_elements *list,
                                                     size_t count)
{
    size_t capacity, bytes;
    list->count = 0;
    if (list->capacity >= count && list->capacity > 0)
        return DTRAIN_OK;
    list->capacity = 0;
    if (!dtrain__add_size(count, count / 2 + 64, &capacity) || !dtrain__mul_size(capacity, 8, &bytes))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a list of %zu elements", count);
    capacity -= capacity % 16; /* so that values are aligned as indices are */
    dtrain_status status = dtrain__device_buffer_reserve(v, DTRAIN_MEMORY_PINNED, &list->here, bytes);
    if (status == DTRAIN_OK)
        status = dtrain__device_buffer_reserve(v, DTRAIN_MEMORY_DEVICE, &list->there, bytes);
    if (status != DTRAIN_OK)
        return status;
    list->capacity = capacity;
    list->indices = (uint32_t *)(void *)list->here.data;
    list->values = (float *)(void *)(list->here.data + 4 * capacity);
    list->indices_there = (uint32_t *)(void *)list->there.data;
    list->values_there = (float *)(void *)(list->there.data + 4 * capacity);
    return DTRAIN_OK;
}

/* Allocates the vector's number of elements, all zeros. */
static dtrain_status dtrain__device_vector_zeros(dtrain__device_vector *v, float **made)
{
    const uint32_t zero = 0;
    size_t bytes;
    void *memory = NULL;
    int good = dtrain__mul_size(v->count, sizeof(float), &bytes);
    if (good && v->device == NULL)
        *made = (float *)dtrain__alloc(v->allocator, bytes);
    if (!good || (v->device == NULL && *made == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu elements", v->count);
    if (v->device == NULL)
        return DTRAIN_OK;
    /* also for 0 elements: a state in a checkpoint's list has an address */
    dtrain_status status = dtrain_device_alloc(v->device, DTRAIN_MEMORY_DEVICE, bytes > 0 ? bytes : 1, &memory);
    *made = (float *)memory;
    return status == DTRAIN_OK ? dtrain_device_fill(v->device, memory, &zero, 4, v->count) : status;
}

static void dtrain__device_vector_destroy(dtrain__device_vector *v)
{
    dtrain__device_elements *lists[4] = {&v->chosen, &v->left, &v->kept, &v->sums};
    dtrain_device_selection_destroy(v->device, v->selection);
    for (int i = 0; i < 4; i++) {
        dtrain__device_vector_free(v, DTRAIN_MEMORY_PINNED, lists[i]->here.data);
        dtrain__device_vector_free(v, DTRAIN_MEMORY_DEVICE, lists[i]->there.data);
    }
    for (int i = 0; i < DTRAIN__DEVICE_BUFFERS; i++)
        dtrain__device_vector_free(v, i <= DTRAIN__DEVICE_WHOLE ? DTRAIN_MEMORY_PINNED : DTRAIN_MEMORY_DEVICE,
                                   v->buffers[i].data);
}

/* ---- arithmetic ---- */

/* a = a op b, element by element; with an integer dtype on the bits. */
static dtrain_status dtrain__device_vector_pair(dtrain__device_vector *v, dtrain_dtype dtype, dtrain_op op, void *a,
                                                const void *b, size_t count)
{
    const void *in[2];
    void *out[1];
    in[0] = out[0] = a;
    in[1] = b;
    return dtrain_device_reduce(v->device, dtype, op, in, 2, out, 1, 0, count);
}

/* Replaces infinities and NaN in data by zero. a and b: temporary room for count numbers each. */
static dtrain_status dtrain__device_vector_finite(dtrain__device_vector *v, float *data, float *a, float *b,
                                                  size_t count)
{
    static const struct {
        uint32_t constant;
        dtrain_dtype dtype;
        dtrain_op op;
    } steps[] = {{0x7f800000u, DTRAIN_U32, DTRAIN_AND}, /* the exponent: all ones for NaN and infinity */
                 {0x00800000u, DTRAIN_U32, DTRAIN_SUM}, /* carries those into the sign bit: the least integer */
                 {1, DTRAIN_I32, DTRAIN_MIN},
                 {1, DTRAIN_U32, DTRAIN_AND}}; /* 0 for NaN and infinity, 1 for numbers */
    dtrain_status status = dtrain_device_copy(v->device, a, data, count * sizeof(float));
    for (size_t i = 0; status == DTRAIN_OK && i < sizeof steps / sizeof steps[0]; i++) {
        status = dtrain_device_fill(v->device, b, &steps[i].constant, 4, count);
        if (status == DTRAIN_OK)
            status = dtrain__device_vector_pair(v, steps[i].dtype, steps[i].op, a, b, count);
    }
    return status == DTRAIN_OK ? dtrain__device_vector_pair(v, DTRAIN_U32, DTRAIN_PROD, data, a, count) : status;
}

/* Sets `count` elements of data to zero. It overwrites values and v->out. v->out gets integer ones, each the bits of
 * the least positive float. Adding minus that float makes zeros of the chosen ones. Then data is multiplied by v->out.
 */
static dtrain_status dtrain__device_vector_drop(dtrain__device_vector *v, float *data, const uint32_t *indices,
                                                float *values, size_t count)
{
    const uint32_t one = 1, minus = 0x80000001u;
    dtrain_status status = dtrain_device_fill(v->device, v->out, &one, 4, v->count);
    if (status == DTRAIN_OK)
        status = dtrain_device_fill(v->device, values, &minus, 4, count);
    if (status == DTRAIN_OK)
        status = dtrain_device_sparse_add(v->device, indices, values, count, v->out, v->count);
    return status == DTRAIN_OK ? dtrain__device_vector_pair(v, DTRAIN_U32, DTRAIN_PROD, data, v->out, v->count)
                               : status;
}

/* velocity = velocity * momentum + in */
static dtrain_status dtrain__device_vector_gain(dtrain__device_vector *v, const float *in, float momentum)
{
    if (v->device == NULL) {
        dtrain__feedback_velocity(v->velocity, in, momentum, 1.0f, v->count);
        return DTRAIN_OK;
    }
    dtrain_status status = dtrain_device_scale(v->device, DTRAIN_F32, v->velocity, (double)momentum, v->count);
    if (status == DTRAIN_OK)
        status = dtrain_device_axpy(v->device, DTRAIN_F32, v->velocity, 1.0, in, v->count);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

static dtrain_status dtrain__device_vector_can_divide(const dtrain__device_vector *v, int ranks)
{
    if (v->device == NULL || (ranks & (ranks - 1)) == 0 || ranks <= DTRAIN__DEVICE_MOST)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                        "compressed all_reduce on rank %d, %s: DTRAIN_MEAN over %d ranks; a device divides by powers "
                        "of two and by up to %d: use DTRAIN_SUM, and scale the optimizer's rate",
                        dtrain_comm_rank(v->comm), dtrain_device_name(v->device), ranks, DTRAIN__DEVICE_MOST);
}

/* out = out / ranks. A device multiplies if ranks is a power of two. Otherwise it takes the mean of out and ranks - 1
 * times -0, which changes no sum. */
static dtrain_status dtrain__device_vector_divide(dtrain__device_vector *v, int ranks)
{
    const uint32_t minus = 0x80000000u;
    const void *in[DTRAIN__DEVICE_MOST];
    void *out[1];
    if (v->device == NULL) {
        dtrain__fold_divide_f32(v->out, (double)ranks, v->count);
        return DTRAIN_OK;
    }
    if ((ranks & (ranks - 1)) == 0)
        return dtrain__device_vector_broken(
            v->comm, v->device, dtrain_device_scale(v->device, DTRAIN_F32, v->out, 1.0 / (double)ranks, v->count));
    dtrain_status status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_SPREAD, v->count * sizeof(float));
    void *spread = v->buffers[DTRAIN__DEVICE_SPREAD].data;
    if (status == DTRAIN_OK)
        status = dtrain_device_fill(v->device, spread, &minus, 4, v->count);
    for (int r = 0; r < ranks; r++)
        in[r] = spread;
    in[0] = out[0] = v->out;
    if (status == DTRAIN_OK)
        status = dtrain_device_reduce(v->device, DTRAIN_F32, DTRAIN_MEAN, in, ranks, out, 1, 0, v->count);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* ---- selections ---- */

/* Makes the selection of k elements, unless it exists from the step before. */
static dtrain_status dtrain__device_vector_aim(dtrain__device_vector *v, size_t k)
{
    if (v->count == 0 || (v->selection != NULL && v->k == k))
        return DTRAIN_OK;
    dtrain_device_selection_destroy(v->device, v->selection);
    v->selection = NULL;
    v->k = k;
    dtrain_status status = dtrain_device_selection_create(v->device, v->count, k, &v->selection);
    return status == DTRAIN_OK ? dtrain__device_elements_reserve(v, &v->chosen, k) : status;
}

/* Adds `in` to the residual if there is one, selects k elements, and copies them to the CPU. */
static dtrain_status dtrain__device_vector_select(dtrain__device_vector *v, const float *in, size_t k)
{
    dtrain__device_elements *list = &v->chosen;
    dtrain_status status = dtrain__device_vector_aim(v, k);
    list->count = k;
    if (status != DTRAIN_OK || k == 0)
        return dtrain__device_vector_broken(v->comm, v->device, status);
    float *from = v->residual != NULL ? v->residual : (float *)(uintptr_t)in; /* without add, select only reads it */
    status = dtrain_device_select(v->device, v->selection, from, v->residual != NULL ? in : NULL, list->indices_there,
                                  list->values_there);
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(v->device, list->indices, list->indices_there, 4 * k);
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(v->device, list->values, list->values_there, 4 * k);
    if (status == DTRAIN_OK)
        status = dtrain_device_wait(v->device);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Writes to v->left what is added to the residual: the sent values, negated. Returns whether that leaves a NaN or
 * infinity, among the chosen elements or others. */
static int dtrain__device_vector_negate(dtrain__device_vector *v, const float *sent)
{
    int bad = 0;
    for (size_t i = 0; i < v->chosen.count; i++) {
        float left = v->chosen.values[i] - sent[i];
        v->left.values[i] = -sent[i];
        bad |= dtrain__device_unbounded(DTRAIN_F32, &left, 1);
    }
    return bad;
}

/* Replaces infinities and NaN in the residual and the velocity by zero. It overwrites v->out. */
static dtrain_status dtrain__device_vector_clean(dtrain__device_vector *v)
{
    dtrain_status status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_SPREAD, v->count * sizeof(float));
    float *spread = dtrain__device_vector_floats(v, DTRAIN__DEVICE_SPREAD);
    if (status == DTRAIN_OK)
        status = dtrain__device_vector_finite(v, v->residual, v->out, spread, v->count);
    if (status == DTRAIN_OK && v->velocity != NULL)
        status = dtrain__device_vector_finite(v, v->velocity, v->out, spread, v->count);
    return status;
}

/* Subtracts the sent values of chosen elements from the residual, and sets their velocity to zero. */
static dtrain_status dtrain__device_vector_leave(dtrain__device_vector *v, const float *sent)
{
    dtrain__device_elements *left = &v->left;
    size_t k = v->chosen.count;
    dtrain_status status = DTRAIN_OK;
    int bad = 0;
    if (v->residual == NULL || k == 0)
        return DTRAIN_OK;
    status = dtrain__device_elements_reserve(v, left, k);
    if (status == DTRAIN_OK) {
        bad = dtrain__device_vector_negate(v, sent);
        status = dtrain_device_copy(v->device, left->values_there, left->values, 4 * k);
    }
    if (status == DTRAIN_OK)
        status =
            dtrain_device_sparse_add(v->device, v->chosen.indices_there, left->values_there, k, v->residual, v->count);
    if (status == DTRAIN_OK && bad)
        status = dtrain__device_vector_clean(v);
    if (status == DTRAIN_OK && v->velocity != NULL && v->masks)
        status = dtrain__device_vector_drop(v, v->velocity, v->chosen.indices_there, left->values_there, k);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Makes room for up to count elements in a list that the CPU fills. */
static dtrain_status dtrain__device_vector_begin(dtrain__device_vector *v, dtrain__device_elements *list, size_t count)
{
    return dtrain__device_vector_broken(v->comm, v->device, dtrain__device_elements_reserve(v, list, count));
}

/* Adds a list that the CPU has filled to data. */
static dtrain_status dtrain__device_vector_add(dtrain__device_vector *v, dtrain__device_elements *list, float *data)
{
    size_t n = list->count;
    if (n == 0)
        return DTRAIN_OK;
    dtrain_status status = dtrain_device_copy(v->device, list->indices_there, list->indices, 4 * n);
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(v->device, list->values_there, list->values, 4 * n);
    if (status == DTRAIN_OK)
        status = dtrain_device_sparse_add(v->device, list->indices_there, list->values_there, n, data, v->count);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Adds v->kept to the residual, which stays finite. Only a number of at least 2^103 can make a sum infinite: that is
 * half the last bit of the largest number. It overwrites v->out. */
static dtrain_status dtrain__device_vector_keep(dtrain__device_vector *v)
{
    int bad = 0;
    dtrain_status status = dtrain__device_vector_add(v, &v->kept, v->residual);
    for (size_t i = 0; i < v->kept.count; i++)
        bad |= v->kept.values[i] > 1e31f || v->kept.values[i] < -1e31f;
    return status == DTRAIN_OK && bad ? dtrain__device_vector_broken(v->comm, v->device, dtrain__device_vector_clean(v))
                                      : status;
}

/* Writes the result: v->sums added to zeros, so that no element is -0. */
static dtrain_status dtrain__device_vector_end(dtrain__device_vector *v)
{
    const uint32_t zero = 0;
    dtrain_status status = dtrain_device_fill(v->device, v->out, &zero, 4, v->count);
    if (status != DTRAIN_OK)
        return dtrain__device_vector_broken(v->comm, v->device, status);
    return dtrain__device_vector_add(v, &v->sums, v->out);
}

#endif
