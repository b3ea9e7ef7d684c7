/* ---- >>device ----
 * A dtrain_device is memory that the CPU does not touch, and a queue of work on it. Calls put work into the queue and
 * return. The device does the work in the order of the calls. Call dtrain_device_wait before the CPU reads a result.
 *
 * A NULL device is the CPU: memory is the CPU's, and each call does its work before it returns. Results have the same
 * bits on the CPU and on any device. dtrain_cuda.h makes devices of NVIDIA GPUs. For other hardware, write a table of
 * functions: dtrain_device_ops.
 *
 * The functions below check their arguments, but not in which memory a pointer is. They return errors of a device with
 * the device's own text. All of those that return a status have these errors:
 *
 *   DTRAIN_ERR_INVALID       a NULL pointer to elements, or a count beyond what memory can hold
 *   DTRAIN_ERR_UNSUPPORTED   the device's table lacks the function
 *   DTRAIN_ERR_IO            the device has failed, in this or in earlier work */
#ifndef DTRAIN__DEVICE_H
#define DTRAIN__DEVICE_H
#include "../base/base.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dtrain_memory {
    DTRAIN_MEMORY_DEVICE = 1201, /* the device's own; the CPU must not touch it */
    DTRAIN_MEMORY_PINNED         /* the CPU's; the device copies from and to it while the CPU goes on */
} dtrain_memory;

/* The length of an exact sum of squares: see dtrain_device_squares. */
#define DTRAIN_SQUARES_LIMBS 22

/* A step of AdamW with the bits of dtrain_adamw, each operation rounded to float32:
 *
 *     m = m * beta1 + g * rest1;  v = v * beta2 + (g * g) * rest2
 *     p = p * keep - m / (sqrt(v) * root + eps) * rate */
typedef struct dtrain_device_adamw_step {
    float *params, *m, *v;
    const float *grads;
    uint16_t *copy; /* the new parameters as BF16; NULL: none */
    size_t count;
    float beta1, rest1, beta2, rest2, root, eps, rate, keep;
} dtrain_device_adamw_step;

/* A step of SGD with the bits of dtrain_device_sgd, each operation rounded to float32:
 *
 *     if coupled is not 0:   g = g + p * coupled
 *     with velocity:         v = v * momentum + g;    g = nesterov ? g + v * momentum : v
 *     p = p * keep - g * lr */
typedef struct dtrain_device_sgd_step {
    float *params, *velocity; /* velocity NULL: no momentum */
    const float *grads;
    uint16_t *copy; /* the new parameters as BF16; NULL: none */
    size_t count;
    float momentum, lr, keep, coupled;
    int nesterov;
} dtrain_device_sgd_step;

/* A place in a queue, which the library records and other queues wait for. Each table defines its own. */
typedef struct dtrain_device_event dtrain_device_event;

/* The state of a search for the k largest elements of a vector: see dtrain_device_selection_create. Each table defines
 * its own. */
typedef struct dtrain_device_selection dtrain_device_selection;

/* Memory of a device, described so that another process of the host can open it. */
#define DTRAIN_DEVICE_HANDLE_BYTES 64

typedef struct dtrain_device_shared {
    unsigned char handle[DTRAIN_DEVICE_HANDLE_BYTES]; /* of the whole allocation */
    uint64_t base;   /* the allocation's address in the process that owns it */
    uint64_t id;     /* differs from those of earlier allocations at that address */
    uint64_t bytes;  /* of the allocation */
    uint64_t offset; /* of the memory, from base */
} dtrain_device_shared;

/* What DTRAIN_DEVICE_FLAGS must know of a device. */
typedef struct dtrain_device_flag_traits {
    uint64_t identity;  /* of the physical device: the same for all of its queues, different on others of the host */
    int blocks;         /* how many blocks of any kernel run at the same time */
    size_t block_bytes; /* how much of one array a block holds at a time */
} dtrain_device_flag_traits;

/* One rank's part of a collective that one kernel per device does (DTRAIN_DEVICE_FLAGS).
 *
 * Each block does this, where p stands for every other rank:
 *
 *     1  writes epoch to words[p][(block * 2) * ranks + rank], after all earlier work of the queue is visible there
 *     2  waits for epoch in words[rank][(block * 2) * ranks + p]
 *     3  reduces in to out, as dtrain_device_reduce
 *     4  repeats 1 and 2 with the words at (block * 2 + 1) * ranks
 *
 * Epochs count up and wrap: the wait for a word ends when word - epoch, as a signed number, is 0 or more.
 *
 * With at_once, outputs may be inputs of other ranks. A block reads all of its inputs in step 3 and writes its outputs
 * after step 4. Then blocks * block_bytes covers count elements, and all pointers are equal modulo 16 and multiples of
 * the dtype's width.
 *
 * A block looks at errors[rank] before it begins and while it waits. If that is not 0, or a wait takes longer than
 * deadline_ns, the block stops and leaves its work undone. After a wait for rank p that took too long, it also writes
 * epoch << 32 | (rank + 1) << 16 | (p + 1) to every rank's error that is 0. */
typedef struct dtrain_device_flags {
    uint32_t *const *words;  /* one array per rank, in its device's memory, at the address that this device uses */
    uint64_t *const *errors; /* one per rank, in pinned memory or in a page; the CPUs write them too */
    uint64_t deadline_ns;    /* 0: none */
    uint32_t epoch;
    int rank, ranks, blocks, at_once;
    dtrain_dtype dtype;
    dtrain_op op;
    const void *const *in;
    void *const *out;
    int n, m; /* numbers of inputs and outputs; 0 if count is 0 */
    size_t begin, count;
} dtrain_device_flags;

/* The functions of a device. Any may be NULL: the calls that need it return DTRAIN_ERR_UNSUPPORTED. A function without
 * a comment does what dtrain_device_NAME does. The library has checked the arguments, but not in which memory they are.
 * All work is queued: the device reads inputs and writes outputs in the order of the calls. */
typedef struct dtrain_device_ops {
    dtrain_status (*allocate)(dtrain_device *device, dtrain_memory memory, size_t bytes, void **pointer);
    void (*release)(dtrain_device *device, dtrain_memory memory, void *pointer); /* after all earlier queued work */
    dtrain_status (*copy)(dtrain_device *device, void *to, const void *from, size_t bytes); /* from and to any memory */
    dtrain_status (*fill)(dtrain_device *device, void *to, const void *element, size_t element_bytes, size_t count);
    dtrain_status (*wait)(dtrain_device *device);
    /* Events are made once and recorded often. await and done refer to the last record before them.
     *
     *   event     never NULL
     *   record    marks the end of the work that is queued now
     *   await     later work of `device` starts only after the event; the CPU does not wait
     *   done      sets *done to 1 if the event has passed or was never recorded, else to 0; never blocks
     *   destroy   may come while other queues still wait for the event; their waits end as if it lived on */
    dtrain_status (*event_create)(dtrain_device *device, dtrain_device_event **event);
    void (*event_destroy)(dtrain_device *device, dtrain_device_event *event);
    dtrain_status (*event_record)(dtrain_device *device, dtrain_device_event *event);
    dtrain_status (*event_await)(dtrain_device *device, dtrain_device_event *event);
    dtrain_status (*event_done)(dtrain_device *device, dtrain_device_event *event, int *done);
    dtrain_status (*convert)(dtrain_device *device, const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                             size_t count);
    dtrain_status (*reduce)(dtrain_device *device, dtrain_dtype dtype, dtrain_op op, double divisor, /* of a mean */
                            const void *const *in, int n, void *const *out, int m, size_t begin, size_t count);
    dtrain_status (*scale)(dtrain_device *device, dtrain_dtype dtype, void *x, double factor, size_t count);
    dtrain_status (*axpy)(dtrain_device *device, dtrain_dtype dtype, void *y, double alpha, const void *x,
                          size_t count);
    dtrain_status (*adamw)(dtrain_device *device, const dtrain_device_adamw_step *step);
    dtrain_status (*sgd)(dtrain_device *device, const dtrain_device_sgd_step *step);
    dtrain_status (*overflow)(dtrain_device *device, dtrain_dtype dtype, const void *x, size_t count, uint32_t *found);
    dtrain_status (*squares)(dtrain_device *device, const float *x, size_t count, int64_t *limbs);
    dtrain_status (*clip)(dtrain_device *device, const int64_t *limbs, float max_norm, double *norm, float *x,
                          size_t count);
    dtrain_status (*selection_create)(dtrain_device *device, size_t count, size_t k, dtrain_device_selection **made);
    void (*selection_destroy)(dtrain_device *device, dtrain_device_selection *selection);
    dtrain_status (*select)(dtrain_device *device, dtrain_device_selection *selection, float *sum, const float *add,
                            uint32_t *indices, float *values);
    dtrain_status (*sparse_add)(dtrain_device *device, const uint32_t *indices, const float *values, size_t k,
                                float *data, size_t count);
    dtrain_status (*pack)(dtrain_device *device, dtrain_dtype code, size_t block, const float *in, size_t count,
                          void *out);
    dtrain_status (*unpack)(dtrain_device *device, dtrain_dtype code, size_t block, const void *in, float *out,
                            size_t count, int add);
    /* Another queue on the same device, with the same table, name and memory. destroy waits for the work in the queue.
     * It comes before the end of the device. */
    dtrain_status (*queue_create)(dtrain_device *device, dtrain_device **made);
    void (*queue_destroy)(dtrain_device *made);
    /* For processes of one host; a table has all of these or none. If this memory, process or device cannot do it, they
     * return DTRAIN_ERR_UNSUPPORTED with a text that says why.
     *
     *   memory_open   opens memory of another process, never of the caller's. Each open has a close of its own
     *   page_open     opens a page: the CPU's memory, mapped in several processes. Each process opens it once. All of
     *                 its queues reach it at *queues. It is closed when they have finished with it
     *   word_write    the queue writes a word of the page when all earlier work is done and visible to all
     *   word_await    the queue goes on when word - value, as a signed number, is 0 or more. Other queues and the CPU
     *                 write the word */
    const char *handles; /* the kind of handles: tables with equal names open each other's; NULL: none */
    dtrain_status (*memory_share)(dtrain_device *device, const void *pointer, dtrain_device_shared *shared);
    dtrain_status (*memory_open)(dtrain_device *device, const dtrain_device_shared *shared, void **base);
    void (*memory_close)(dtrain_device *device, void *base);
    dtrain_status (*page_open)(dtrain_device *device, void *page, size_t bytes, void **queues);
    void (*page_close)(dtrain_device *device, void *page);
    dtrain_status (*word_write)(dtrain_device *device, uint32_t *word, uint32_t value);
    dtrain_status (*word_await)(dtrain_device *device, uint32_t *word, uint32_t value);
    /* For DTRAIN_DEVICE_FLAGS, both or none. flags queues one rank's part of a collective. */
    dtrain_status (*flag_traits)(dtrain_device *device, dtrain_device_flag_traits *traits);
    dtrain_status (*flags)(dtrain_device *device, const dtrain_device_flags *part);
} dtrain_device_ops;

struct dtrain_device {
    const dtrain_device_ops *ops;
    const char *name; /* for error texts, such as "cuda:0" */
    void *self;       /* for the functions of the table */
};

/* Returns the name of a device; "cpu" for NULL.
 *
 * any thread */
DTRAIN_API const char *dtrain_device_name(const dtrain_device *device);

/* Allocates memory of a device, or pinned memory of the CPU. It is not zeroed.
 *
 *   pointer   out: aligned to 256 bytes, for a NULL device to 64; NULL for 0 bytes and on an error
 *   errors    DTRAIN_ERR_MEMORY   the device's text says how much is free
 *             DTRAIN_ERR_INVALID  pointer is NULL; memory is not one of dtrain_memory
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_alloc(dtrain_device *device, dtrain_memory memory, size_t bytes,
                                                  void **pointer);

/* Frees memory of dtrain_device_alloc after all earlier queued work; NULL is legal.
 *
 *   memory   as in the call that allocated it
 *
 * one thread per object */
DTRAIN_API void dtrain_device_free(dtrain_device *device, dtrain_memory memory, void *pointer);

/* Copies bytes between any two memories: the device's, pinned, or the CPU's. The buffers must not overlap.
 *
 * With memory of the device and pinned memory the call returns at once. Call dtrain_device_wait before the CPU uses
 * the buffers again. With other memory of the CPU it returns when the CPU may use the buffers.
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_copy(dtrain_device *device, void *to, const void *from, size_t bytes);

/* Writes count copies of one element.
 *
 *   element   element_bytes bytes in the CPU's memory: 1, 2, 4 or 8. The call reads them before it returns
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_fill(dtrain_device *device, void *to, const void *element,
                                                 size_t element_bytes, size_t count);

/* Blocks until all queued work has ended.
 *
 *   errors   DTRAIN_ERR_IO  some of it has failed, with the device's text
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_wait(dtrain_device *device);

/* Converts elements on a device, as dtrain_convert does.
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_convert(dtrain_device *device, const void *in, dtrain_dtype from, void *out,
                                                    dtrain_dtype to, size_t count);

/* Reduces n inputs to one result, element by element, and writes it to m outputs.
 *
 * out[k][i] = the binary tree over in[0][i], ..., in[n - 1][i], for begin <= i < begin + count and every k < m.
 *
 *   dtype, op   as dtrain_all_reduce; DTRAIN_MEAN divides by n
 *   in          1 to 64 pointers to memory of the device, any alignment; the list is in the CPU's memory
 *   out         1 to 64 such pointers; an output may be an input, but may not overlap one in another way
 *   order       the binary tree over inputs, see >>order
 *   errors      DTRAIN_ERR_UNSUPPORTED  the dtype has no such op
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op,
                                                   const void *const *in, int n, void *const *out, int m, size_t begin,
                                                   size_t count);

/* Computes x[i] *= factor, and y[i] += alpha * x[i]; rounds the product and the sum.
 *
 *   dtype   F64, F32, F16 or BF16. 16-bit floats are computed in float32 and rounded once
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_scale(dtrain_device *device, dtrain_dtype dtype, void *x, double factor,
                                                  size_t count);
DTRAIN_API_MUST dtrain_status dtrain_device_axpy(dtrain_device *device, dtrain_dtype dtype, void *y, double alpha,
                                                 const void *x, size_t count);

/* Sets *found to 1 if a NaN or an infinity is among count elements. Otherwise *found does not change.
 *
 *   dtype   F64, F32, F16 or BF16
 *   found   in the device's memory; set it to 0 first
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_overflow(dtrain_device *device, dtrain_dtype dtype, const void *x,
                                                     size_t count, uint32_t *found);

/* Adds the squares of count float32 to an exact sum.
 *
 * The sum has no rounding error, so it does not depend on the order, or on how the elements are divided among calls,
 * devices and ranks. To add the sums of ranks, all-reduce the limbs with DTRAIN_I64 and DTRAIN_SUM.
 *
 *   limbs    DTRAIN_SQUARES_LIMBS integers in the device's memory; set them to 0 before the first call. They hold up to
 *            2^48 squares. Equal sums may have different limbs: read them only with dtrain_device_clip
 *   source   Neal, Fast exact summation using small and large superaccumulators, arXiv:1505.05571, 2015
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_squares(dtrain_device *device, const float *x, size_t count,
                                                    int64_t *limbs);

/* Clips x by its norm, as dtrain_clip_grad_norm does: if norm > max_norm, x[i] *= max_norm / norm.
 *
 * The CPU does not wait for the norm. If the norm is not finite, x does not change.
 *
 *   limbs      the sum of squares: see dtrain_device_squares
 *   max_norm   0: x does not change, and norm is still measured
 *   norm       out: the root of the sum, in the device's memory, also if count is 0. NaN if any element was NaN, else
 *              infinity if any was infinite
 *   errors     DTRAIN_ERR_INVALID  max_norm is negative or not finite
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_clip(dtrain_device *device, const int64_t *limbs, float max_norm,
                                                 double *norm, float *x, size_t count);

#ifdef __cplusplus
}
#endif

#endif
