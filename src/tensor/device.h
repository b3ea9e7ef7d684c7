/* ---- >>device ----
 * Memory that the CPU does not touch, and arithmetic on it. A dtrain_device is a queue: what is handed to it happens in
 * the order of the calls, after they have returned; the CPU waits in dtrain_device_wait, and where it reads what a
 * device has written. Every function takes NULL for a device as well: then memory is the CPU's, and the work is done at
 * once. Results are the same bits on either. dtrain_cuda.h makes devices of NVIDIA's; others are a table of functions.
 * An error of a device is passed on with the device's own text; what a table leaves NULL is DTRAIN_ERR_UNSUPPORTED. The
 * functions below check their arguments, but not where memory is: that is the device's to know. */
#ifndef DTRAIN__DEVICE_H
#define DTRAIN__DEVICE_H
#include "../base/base.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dtrain_memory {
    DTRAIN_MEMORY_DEVICE = 1201, /* the device's own, which the CPU must not touch */
    DTRAIN_MEMORY_PINNED         /* the CPU's, which the device copies from and to while the CPU goes on */
} dtrain_memory;

/* 22 integers that sum squares without an error, in any order: see dtrain_device_squares. */
#define DTRAIN_SQUARES_LIMBS 22

/* A step of AdamW as numbers: see dtrain_adamw, whose bits it gives. */
typedef struct dtrain_device_adamw_step {
    float *params, *m, *v;
    const float *grads;
    uint16_t *copy; /* the new parameters as BF16; NULL: none */
    size_t count;
    float beta1, rest1, beta2, rest2, root, eps, rate, keep;
} dtrain_device_adamw_step;

/* A step of SGD as numbers: see dtrain_device_sgd, whose bits it gives. */
typedef struct dtrain_device_sgd_step {
    float *params, *velocity; /* velocity NULL: no momentum */
    const float *grads;
    uint16_t *copy;
    size_t count;
    float momentum, lr, keep, coupled;
    int nesterov;
} dtrain_device_sgd_step;

/* A place in a queue, that the library records and has other queues await: the table maker's own. */
typedef struct dtrain_device_event dtrain_device_event;

/* The k elements of largest magnitude of a device's vector: in a table the maker's own, in calls of the library's what
 * dtrain_device_selection_create made of it. */
typedef struct dtrain_device_selection dtrain_device_selection;

/* Memory of a device as another process of the host can have it: a handle of the whole allocation, and where in that it
 * is. `base` and `id` are of the process that has it: the allocation's address, and what tells it from others that were
 * there before. */
#define DTRAIN_DEVICE_HANDLE_BYTES 64

typedef struct dtrain_device_shared {
    unsigned char handle[DTRAIN_DEVICE_HANDLE_BYTES];
    uint64_t base, id, bytes; /* bytes: of the allocation */
    uint64_t offset;          /* of the memory, from base */
} dtrain_device_shared;
/* What collectives in one kernel a rank (DTRAIN_DEVICE_FLAGS) must know of a device. */
typedef struct dtrain_device_flag_traits {
    uint64_t identity;  /* differs between the physical devices of a host, and is that of every queue on one */
    int blocks;         /* that run at the same time, whatever the kernel */
    size_t block_bytes; /* that a block holds of one array at a time */
} dtrain_device_flag_traits;

/* One rank's part of a collective of several devices, in one go, which waits for the other ranks' on the device:
 *
 *     for every block: words[p][(block * 2) * ranks + rank] = epoch, at all ranks p but this, which releases what the
 *     queue has done so far to all devices; await epoch in words[rank][(block * 2) * ranks + p]; reduce in to out, as
 *     dtrain_device_reduce; the same again in the words at (block * 2 + 1) * ranks, before the block ends
 *
 * Epochs count up and wrap: a word has come when word - epoch, as a number with a sign, is 0 or more. With
 * at_once a block reads all of its inputs before it releases the second words, and writes its outputs after it has
 * awaited them, so that outputs may be other ranks' inputs; blocks * block_bytes bytes are enough for count, and all
 * pointers agree modulo 16 and are multiples of the dtype's width.
 * A block that waits longer than deadline_ns, or finds errors[rank] not 0, which it looks at before it begins and while
 * it waits, leaves its work undone. The one that has waited too long writes epoch << 32 | (rank + 1) << 16 | (p + 1) to
 * all errors that are 0, p the rank it has waited for. */
typedef struct dtrain_device_flags {
    uint32_t *const *words;  /* of every rank, memory of its device, where this one has it */
    uint64_t *const *errors; /* of every rank, pinned memory, or in a page; the CPUs write them too */
    uint64_t deadline_ns;    /* 0: none */
    uint32_t epoch;
    int rank, ranks, blocks, at_once;
    dtrain_dtype dtype;
    dtrain_op op;
    const void *const *in;
    void *const *out;
    int n, m; /* inputs and outputs; 0 where count is */
    size_t begin, count;
} dtrain_device_flags;

/* What a device can do. All work is queued: inputs are read and outputs written in the order of the calls. The
 * arguments have been checked but for where their memory is. */
typedef struct dtrain_device_ops {
    dtrain_status (*allocate)(dtrain_device *device, dtrain_memory memory, size_t bytes, void **pointer);
    void (*release)(dtrain_device *device, dtrain_memory memory, void *pointer); /* after what was queued before it */
    dtrain_status (*copy)(dtrain_device *device, void *to, const void *from, size_t bytes); /* from and to any memory */
    dtrain_status (*fill)(dtrain_device *device, void *to, const void *element, size_t element_bytes, size_t count);
    dtrain_status (*wait)(dtrain_device *device);
    /* Events, never NULL: made once, recorded again and again. Record marks the end of what is queued now. Await: what is
     * queued on `device` after it starts only after the event, and the CPU goes on. Done: *done is 1 when the event has
     * passed, or was never recorded; it never blocks. Both speak of the last record before their call. Destroy comes
     * also while queues of other devices still hold waits for it, which then end as they would have. */
    dtrain_status (*event_create)(dtrain_device *device, dtrain_device_event **event);
    void (*event_destroy)(dtrain_device *device, dtrain_device_event *event);
    dtrain_status (*event_record)(dtrain_device *device, dtrain_device_event *event);
    dtrain_status (*event_await)(dtrain_device *device, dtrain_device_event *event); /* the queue waits, the CPU does not */
    dtrain_status (*event_done)(dtrain_device *device, dtrain_device_event *event, int *done);
    dtrain_status (*convert)(dtrain_device *device, const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                             size_t count);
    dtrain_status (*reduce)(dtrain_device *device, dtrain_dtype dtype, dtrain_op op, double divisor,
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
    /* Another queue on the device, of the same table and name, reaching the same memory. Destroy waits for what it holds,
     * and comes before the end of the device that it was made of. */
    dtrain_status (*queue_create)(dtrain_device *device, dtrain_device **made);
    void (*queue_destroy)(dtrain_device *made);
    /* Between processes of a host, all or none. Nobody opens memory of his own process; what is opened may be opened
     * again, and is closed as often. A page is the CPU's memory, mapped in several processes: opened once in each, at
     * *queues for any of its queues, and closed when those are done with it. A queue writes a word there when all before
     * it is done and seen by all, and goes on at a word that it awaits when word - value, as a number with a sign, is 0
     * or more, whoever wrote it, the CPU too. UNSUPPORTED: this memory, process or device cannot; the text says why. */
    const char *handles; /* whose handles are: tables of one name open each other's; NULL: none */
    dtrain_status (*memory_share)(dtrain_device *device, const void *pointer, dtrain_device_shared *shared);
    dtrain_status (*memory_open)(dtrain_device *device, const dtrain_device_shared *shared, void **base);
    void (*memory_close)(dtrain_device *device, void *base);
    dtrain_status (*page_open)(dtrain_device *device, void *page, size_t bytes, void **queues);
    void (*page_close)(dtrain_device *device, void *page);
    dtrain_status (*word_write)(dtrain_device *device, uint32_t *word, uint32_t value);
    dtrain_status (*word_await)(dtrain_device *device, uint32_t *word, uint32_t value);
    dtrain_status (*flag_traits)(dtrain_device *device, dtrain_device_flag_traits *traits);
    dtrain_status (*flags)(dtrain_device *device, const dtrain_device_flags *part);
} dtrain_device_ops;

struct dtrain_device {
    const dtrain_device_ops *ops;
    const char *name; /* in error texts: "cuda:0" */
    void *self;       /* the maker's */
};

/* Returns the name of a device; "cpu" for NULL.
 *
 * any thread */
DTRAIN_API const char *dtrain_device_name(const dtrain_device *device);

/* Allocates memory of a device, or pinned memory of the CPU, aligned to 256 bytes (64 for a NULL device); not zeroed.
 *
 *   pointer   out: NULL for 0 bytes and on an error
 *   errors    DTRAIN_ERR_MEMORY   the text says how much is free
 *             DTRAIN_ERR_INVALID
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_alloc(dtrain_device *device, dtrain_memory memory, size_t bytes,
                                                  void **pointer);

/* Frees memory of dtrain_device_alloc once what was queued before has ended; NULL is legal.
 *
 *   memory   as when it was allocated
 *
 * one thread per object */
DTRAIN_API void dtrain_device_free(dtrain_device *device, dtrain_memory memory, void *pointer);

/* Copies bytes between any two memories, of the device, of the CPU, pinned or not; the buffers are apart.
 *
 * With memory of the CPU that is not pinned the call returns when the CPU may use it again; with pinned memory it
 * returns at once, and an event or dtrain_device_wait says when.
 *
 *   errors   DTRAIN_ERR_INVALID  a NULL pointer, 0 bytes aside
 *            DTRAIN_ERR_IO       the device has failed, in this or in earlier work
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_copy(dtrain_device *device, void *to, const void *from, size_t bytes);

/* Writes count copies of one element of 1, 2, 4 or 8 bytes, which is read at once from the CPU's memory.
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_fill(dtrain_device *device, void *to, const void *element,
                                                 size_t element_bytes, size_t count);

/* Blocks until all that was queued has ended.
 *
 *   errors   DTRAIN_ERR_IO  some of it has failed; the text says what the device says
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_wait(dtrain_device *device);

/* Converts as dtrain_convert, on a device.
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_convert(dtrain_device *device, const void *in, dtrain_dtype from, void *out,
                                                    dtrain_dtype to, size_t count);

/* out[k][i] = the tree over in[0][i], ..., in[n - 1][i], for i from begin on, count of them, and every k below m.
 *
 *   dtype, op   as dtrain_all_reduce; DTRAIN_MEAN divides by n
 *   in          n pointers, 1 to 64, in the CPU's memory, to memory of the device, any alignment
 *   out         m pointers, 1 to 64; an output may be an input, and overlaps it in no other way
 *   errors      DTRAIN_ERR_INVALID, DTRAIN_ERR_UNSUPPORTED  a dtype that has no such op
 *   source      the order of >>order
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op,
                                                   const void *const *in, int n, void *const *out, int m, size_t begin,
                                                   size_t count);

/* x[i] *= factor and y[i] += alpha * x[i], product and sum each rounded, over F64, F32, F16 or BF16; 16-bit floats are
 * computed as float32 and rounded once.
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_scale(dtrain_device *device, dtrain_dtype dtype, void *x, double factor,
                                                  size_t count);
DTRAIN_API_MUST dtrain_status dtrain_device_axpy(dtrain_device *device, dtrain_dtype dtype, void *y, double alpha,
                                                 const void *x, size_t count);

/* Says whether a NaN or an infinity is among count F64, F32, F16 or BF16: sets *found to 1 where one is, and leaves it
 * as it is where none is.
 *
 *   found   memory of the device
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_overflow(dtrain_device *device, dtrain_dtype dtype, const void *x,
                                                     size_t count, uint32_t *found);

/* Adds the squares of count float32 to limbs, without an error: any order, any cut into calls, devices and ranks gives
 * the same sum. Add limbs of ranks with an all-reduce, DTRAIN_I64 and DTRAIN_SUM.
 *
 *   limbs    DTRAIN_SQUARES_LIMBS in memory of the device, zero before the first call; up to 2^48 squares. Carries may
 *            be left undone, so that equal sums need not be equal limbs: read them through dtrain_device_clip
 *   source   Neal, arXiv:1505.05571, 2015
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_squares(dtrain_device *device, const float *x, size_t count,
                                                    int64_t *limbs);

/* Shortens x by the factor that brings the root of limbs down to max_norm, as dtrain_clip_grad_norm: nothing changes
 * where it is no longer, or not finite. The CPU does not wait for the norm.
 *
 *   max_norm   0: measure only
 *   norm       out: the root, in memory of the device, also where count is 0; NaN when a number had a NaN, else
 *              infinity when one had an infinity
 *   errors     DTRAIN_ERR_INVALID  max_norm negative or not finite; a NULL pointer
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_clip(dtrain_device *device, const int64_t *limbs, float max_norm,
                                                 double *norm, float *x, size_t count);

#ifdef __cplusplus
}
#endif

#endif
