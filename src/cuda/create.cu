/* ---- >>cuda-create ----
 * The table of operations, and making and freeing devices. Stands last, as it names every operation. */
#ifndef DTRAIN__CUDA_CREATE
#define DTRAIN__CUDA_CREATE
#include "emulate_share.h"
#include "queue.cu"
#include "copy.cu"
#include "share.cu"
#include "convert.cu"
#include "fold.cu"
#include "flags.cu"
#include "elementwise.cu"
#include "optimizer.cu"
#include "norm.cu"
#include "topk_select.cu"
#include "quantise.cu"

/* A row of the table: does the operation while the queue's GPU is the calling thread's current one. */
#define DTRAIN__CUDA_ROW(name, parameters, arguments) \
    static dtrain_status dtrain__cuda_row_##name parameters \
    { \
        int before; \
        dtrain_status status = dtrain__cuda_status(device, "device_" #name, dtrain__cuda_switch(device, &before)); \
        if (status != DTRAIN_OK) \
            return status; \
        status = dtrain__cuda_##name arguments; \
        dtrain__cuda_leave(device, before); \
        return status; \
    }
#define DTRAIN__CUDA_VOID_ROW(name, parameters, arguments) \
    static void dtrain__cuda_row_##name parameters \
    { \
        int before; \
        /* Even if the GPU is lost, the CPU's part is freed. */ \
        dtrain__cuda_drop(dtrain__cuda_switch(device, &before)); \
        dtrain__cuda_##name arguments; \
        dtrain__cuda_leave(device, before); \
    }

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_HANDLES "cuda ipc, emulated"
#else
#define DTRAIN__CUDA_HANDLES "cuda ipc"
#endif

/* Makes a queue with a stream of its own on the same GPU. */
static dtrain_status dtrain__cuda_queue_create(dtrain_device *device, dtrain_device **made)
{
    dtrain_cuda_desc desc;
    desc.index = dtrain__cuda_queue_of(device)->index;
    desc.stream = NULL;
    return dtrain_cuda_create(made, &desc);
}

/* The operations in the order of the table: those before the queues, and those after them. */
#define DTRAIN__CUDA_ROWS(ROW, VOID_ROW) \
    ROW(allocate, (dtrain_device * device, dtrain_memory memory, size_t bytes, void **pointer), \
        (device, memory, bytes, pointer)) \
    VOID_ROW(release, (dtrain_device * device, dtrain_memory memory, void *pointer), (device, memory, pointer)) \
    ROW(copy, (dtrain_device * device, void *to, const void *from, size_t bytes), (device, to, from, bytes)) \
    ROW(fill, (dtrain_device * device, void *to, const void *element, size_t element_bytes, size_t count), \
        (device, to, element, element_bytes, count)) \
    ROW(wait, (dtrain_device * device), (device)) \
    ROW(event_create, (dtrain_device * device, dtrain_device_event * *event), (device, event)) \
    VOID_ROW(event_destroy, (dtrain_device * device, dtrain_device_event * event), (device, event)) \
    ROW(event_record, (dtrain_device * device, dtrain_device_event * event), (device, event)) \
    ROW(event_await, (dtrain_device * device, dtrain_device_event * event), (device, event)) \
    ROW(event_done, (dtrain_device * device, dtrain_device_event * event, int *done), (device, event, done)) \
    ROW(convert, \
        (dtrain_device * device, const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count), \
        (device, in, from, out, to, count)) \
    ROW(reduce, \
        (dtrain_device * device, dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n, \
         void *const *out, int m, size_t begin, size_t count), \
        (device, dtype, op, divisor, in, n, out, m, begin, count)) \
    ROW(scale, (dtrain_device * device, dtrain_dtype dtype, void *x, double factor, size_t count), \
        (device, dtype, x, factor, count)) \
    ROW(axpy, (dtrain_device * device, dtrain_dtype dtype, void *y, double alpha, const void *x, size_t count), \
        (device, dtype, y, alpha, x, count)) \
    ROW(adamw, (dtrain_device * device, const dtrain_device_adamw_step *step), (device, step)) \
    ROW(sgd, (dtrain_device * device, const dtrain_device_sgd_step *step), (device, step)) \
    ROW(overflow, (dtrain_device * device, dtrain_dtype dtype, const void *x, size_t count, uint32_t *found), \
        (device, dtype, x, count, found)) \
    ROW(squares, (dtrain_device * device, const float *x, size_t count, int64_t *limbs), (device, x, count, limbs)) \
    ROW(clip, (dtrain_device * device, const int64_t *limbs, float max_norm, double *norm, float *x, size_t count), \
        (device, limbs, max_norm, norm, x, count)) \
    ROW(selection_create, (dtrain_device * device, size_t count, size_t k, dtrain_device_selection * *made), \
        (device, count, k, made)) \
    VOID_ROW(selection_destroy, (dtrain_device * device, dtrain_device_selection * selection), (device, selection)) \
    ROW(select, \
        (dtrain_device * device, dtrain_device_selection * selection, float *sum, const float *add, uint32_t *indices, \
         float *values), \
        (device, selection, sum, add, indices, values)) \
    ROW(sparse_add, \
        (dtrain_device * device, const uint32_t *indices, const float *values, size_t k, float *data, size_t count), \
        (device, indices, values, k, data, count)) \
    ROW(pack, (dtrain_device * device, dtrain_dtype code, size_t block, const float *in, size_t count, void *out), \
        (device, code, block, in, count, out)) \
    ROW(unpack, \
        (dtrain_device * device, dtrain_dtype code, size_t block, const void *in, float *out, size_t count, int add), \
        (device, code, block, in, out, count, add))

#define DTRAIN__CUDA_SHARING_ROWS(ROW, VOID_ROW) \
    ROW(memory_share, (dtrain_device * device, const void *pointer, dtrain_device_shared *shared), \
        (device, pointer, shared)) \
    ROW(memory_open, (dtrain_device * device, const dtrain_device_shared *shared, void **base), \
        (device, shared, base)) \
    VOID_ROW(memory_close, (dtrain_device * device, void *base), (device, base)) \
    ROW(page_open, (dtrain_device * device, void *page, size_t bytes, void **queues), (device, page, bytes, queues)) \
    VOID_ROW(page_close, (dtrain_device * device, void *page), (device, page)) \
    ROW(word_write, (dtrain_device * device, uint32_t * word, uint32_t value), (device, word, value)) \
    ROW(word_await, (dtrain_device * device, uint32_t * word, uint32_t value), (device, word, value)) \
    ROW(flag_traits, (dtrain_device * device, dtrain_device_flag_traits * traits), (device, traits)) \
    ROW(flags_run, (dtrain_device * device, const dtrain_device_flags *part), (device, part))

DTRAIN__CUDA_ROWS(DTRAIN__CUDA_ROW, DTRAIN__CUDA_VOID_ROW)
DTRAIN__CUDA_SHARING_ROWS(DTRAIN__CUDA_ROW, DTRAIN__CUDA_VOID_ROW)

#define DTRAIN__CUDA_ENTRY(name, parameters, arguments) dtrain__cuda_row_##name,
static const dtrain_device_ops dtrain__cuda_ops = {
    DTRAIN__CUDA_ROWS(DTRAIN__CUDA_ENTRY, DTRAIN__CUDA_ENTRY) dtrain__cuda_queue_create, dtrain_cuda_destroy,
    DTRAIN__CUDA_HANDLES, DTRAIN__CUDA_SHARING_ROWS(DTRAIN__CUDA_ENTRY, DTRAIN__CUDA_ENTRY)};

DTRAIN_API dtrain_status dtrain_cuda_count(int *count)
{
    int found = 0;
    if (count == NULL)
        return dtrain_error_set(DTRAIN_ERR_INVALID, "dtrain_cuda_count: count must be an address, it is NULL");
    *count = 0;
    dtrain_status status = dtrain__cuda_status(NULL, "dtrain_cuda_count", cudaGetDeviceCount(&found));
    if (status == DTRAIN_OK)
        *count = found;
    return status;
}

/* The runtime hands out the driver's functions, so that nothing is linked with the driver. NULL: it has none. */
#ifndef DTRAIN_CUDA_EMULATE
static void *dtrain__cuda_driver(const char *name)
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    dtrain__cuda_drop(error);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : NULL;
}
#endif

/* Holds the primary context, which the runtime uses too, until the process ends, as the runtime does. What the program
 * has in it outlives the queue. */
static void dtrain__cuda_find_driver(dtrain__cuda_queue *queue)
{
    typedef int (*get_fn)(int *gpu, int index);
    typedef int (*retain_fn)(void **context, int gpu);
    int gpu = 0;
#ifdef DTRAIN_CUDA_EMULATE
    get_fn get = dtrain__cuda_emulated_get;
    retain_fn retain = dtrain__cuda_emulated_retain;
    queue->push = dtrain__cuda_emulated_push;
    queue->pop = dtrain__cuda_emulated_pop;
    queue->attribute = dtrain__cuda_emulated_attribute;
    queue->word_write = dtrain__cuda_emulated_write;
    queue->word_await = dtrain__cuda_emulated_await;
#else
    get_fn get = (get_fn)dtrain__cuda_driver("cuDeviceGet");
    retain_fn retain = (retain_fn)dtrain__cuda_driver("cuDevicePrimaryCtxRetain");
    queue->push = (dtrain__cuda_push_fn)dtrain__cuda_driver("cuCtxPushCurrent");
    queue->pop = (dtrain__cuda_pop_fn)dtrain__cuda_driver("cuCtxPopCurrent");
    queue->attribute = (dtrain__cuda_attribute_fn)dtrain__cuda_driver("cuPointerGetAttribute");
    queue->word_write = (dtrain__cuda_word_fn)dtrain__cuda_driver("cuStreamWriteValue32");
    queue->word_await = (dtrain__cuda_word_fn)dtrain__cuda_driver("cuStreamWaitValue32");
#endif
    if (get == NULL || retain == NULL || queue->push == NULL || queue->pop == NULL || get(&gpu, queue->index) != 0 ||
        retain(&queue->context, gpu) != 0)
        queue->context = NULL;
}

/* Finds out whether this build has code for the GPU, by asking for one kernel. */
static cudaError_t dtrain__cuda_find_code(void)
{
#ifdef DTRAIN_CUDA_EMULATE
    return cudaSuccess;
#else
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, (const void *)dtrain__cuda_fill_all);
#endif
}

/* Tries the caller's stream with an event. A destroyed stream, or another GPU's, refuses it. */
static cudaError_t dtrain__cuda_try_stream(cudaStream_t stream)
{
    cudaEvent_t event = NULL;
    cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error != cudaSuccess)
        return error;
    error = cudaEventRecord(event, stream);
    (void)cudaEventDestroy(event);
    return error;
}

/* Fills the queue; its GPU is the current one. */
static dtrain_status dtrain__cuda_open(dtrain__cuda_queue *queue, void *stream)
{
    cudaError_t error = cudaDeviceGetAttribute(&queue->processors, cudaDevAttrMultiProcessorCount, queue->index);
    if (error == cudaSuccess)
        error = dtrain__cuda_find_code();
    if (error != cudaSuccess)
        return dtrain__cuda_status(&queue->device, "dtrain_cuda_create", error);
    queue->own_stream = stream == NULL;
    queue->stream = (cudaStream_t)stream;
    if (stream == NULL)
        error = cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking);
    else
        error = dtrain__cuda_try_stream(queue->stream);
    return dtrain__cuda_status(&queue->device, stream == NULL ? "dtrain_cuda_create" : "dtrain_cuda_create: stream",
                               error);
}

static dtrain_status dtrain__cuda_check_create(dtrain_device **device, int index)
{
    int count = 0;
    if (device == NULL)
        return dtrain_error_set(DTRAIN_ERR_INVALID, "dtrain_cuda_create: device must be an address, it is NULL");
    *device = NULL;
    dtrain_status status = dtrain__cuda_status(NULL, "dtrain_cuda_create", cudaGetDeviceCount(&count));
    if (status == DTRAIN_OK && (index < 0 || index >= count))
        return dtrain_error_set(DTRAIN_ERR_INVALID,
                                "dtrain_cuda_create: index must be 0 to %d, as this process sees %d GPUs, it is %d",
                                count - 1, count, index);
    return status;
}

DTRAIN_API dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc)
{
    int index = desc != NULL ? desc->index : 0, before;
    dtrain_status status = dtrain__cuda_check_create(device, index);
    if (status != DTRAIN_OK)
        return status;
    dtrain__cuda_queue *queue = (dtrain__cuda_queue *)calloc(1, sizeof *queue);
    if (queue == NULL)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "dtrain_cuda_create: no memory for %zu bytes", sizeof *queue);
    snprintf(queue->name, sizeof queue->name, "cuda:%d", index);
    queue->index = index;
    queue->device.ops = &dtrain__cuda_ops;
    queue->device.name = queue->name;
    queue->device.self = queue;
    dtrain__cuda_find_driver(queue);
    status = dtrain__cuda_status(&queue->device, "dtrain_cuda_create", dtrain__cuda_switch(&queue->device, &before));
    if (status == DTRAIN_OK) {
        status = dtrain__cuda_open(queue, desc != NULL ? desc->stream : NULL);
        dtrain__cuda_leave(&queue->device, before);
    }
    if (status != DTRAIN_OK)
        free(queue);
    else
        *device = &queue->device;
    return status;
}

DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device)
{
    int before;
    if (device == NULL || device->ops != &dtrain__cuda_ops)
        return;
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    dtrain__cuda_drop(dtrain__cuda_switch(device, &before));
    dtrain__cuda_drop(cudaStreamSynchronize(queue->stream));
    if (queue->own_stream)
        dtrain__cuda_drop(cudaStreamDestroy(queue->stream));
    dtrain__cuda_leave(device, before);
    free(queue);
}

DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device)
{
    if (device == NULL || device->ops != &dtrain__cuda_ops)
        return NULL;
    return (void *)((const dtrain__cuda_queue *)device->self)->stream;
}

#ifdef DTRAIN_CUDA_EMULATE
DTRAIN_API void dtrain_cuda_emulated_open(void)
{
    dtrain__cuda_emulated_enter();
}

DTRAIN_API void dtrain_cuda_emulated_close(void)
{
    dtrain__cuda_emulated_leave();
}
#endif

#endif
