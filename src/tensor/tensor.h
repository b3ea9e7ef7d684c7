/* ---- >>tensor ----
 * Element types, conversions between them, and dtrain_tensor: a shape over memory, row-major.
 * Arithmetic here gives the same bits under any compiler flags and instruction set; matrix products
 * give those of the instruction set in use. */
#ifndef DTRAIN__TENSOR_H
#define DTRAIN__TENSOR_H
#include "../base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Element types: those of safetensors, narrowest first. Values are disjoint from every other enum here. */
typedef enum dtrain_dtype {
    DTRAIN_BOOL = 1,
    DTRAIN_F4,
    DTRAIN_F6_E2M3,
    DTRAIN_F6_E3M2,
    DTRAIN_U8,
    DTRAIN_I8,
    DTRAIN_F8_E5M2,
    DTRAIN_F8_E4M3, /* the "fn" kind: no infinity, 0x7F and 0xFF are NaN */
    DTRAIN_F8_E8M0,
    DTRAIN_F8_E4M3FNUZ,
    DTRAIN_F8_E5M2FNUZ,
    DTRAIN_I16,
    DTRAIN_U16,
    DTRAIN_F16,
    DTRAIN_BF16,
    DTRAIN_I32,
    DTRAIN_U32,
    DTRAIN_F32,
    DTRAIN_C64,
    DTRAIN_F64,
    DTRAIN_I64,
    DTRAIN_U64
} dtrain_dtype;

/* How values of several ranks become one. Values are disjoint from every other enum here. */
typedef enum dtrain_op {
    DTRAIN_SUM = 101,
    DTRAIN_MEAN, /* the sum divided once; floats only */
    DTRAIN_PROD,
    DTRAIN_MIN, /* a NaN wins; -0 is below +0 */
    DTRAIN_MAX,
    DTRAIN_AND, /* bit by bit; integers only, as are the next two */
    DTRAIN_OR,
    DTRAIN_XOR
} dtrain_op;

#define DTRAIN_MAX_DIMS 8

/* Memory and a queue of work beside the CPU's: see >>device. Where one is asked for, NULL is the CPU. */
typedef struct dtrain_device dtrain_device;

/* Returns the width of one element in bits, 4 to 64; 0 for what is no dtype.
 *
 * any thread */
DTRAIN_API unsigned dtrain_dtype_bits(dtrain_dtype dtype);

/* Returns the safetensors name, "F32"; "?" for what is no dtype.
 *
 * any thread */
DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype);

/* Finds the dtype of a safetensors name.
 *
 *   name     length bytes, case sensitive, not terminated
 *   errors   DTRAIN_ERR_INVALID  no dtype has this name
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_dtype_from_name(dtrain_dtype *dtype, const char *name, size_t length);

/* Converts count elements, rounding to the nearest, ties to even.
 *
 *   from, to   any two of F64, F32, F16, BF16, F8_E4M3, F8_E5M2; the buffers are apart, any alignment
 *   overflow   becomes infinity; in F8_E4M3, which has none, NaN. NaN stays NaN with its sign
 *   subnormals are kept on both sides, whatever the caller's floating-point mode
 *   errors     DTRAIN_ERR_UNSUPPORTED  another dtype
 *   source     OCP 8-bit Floating Point Specification 1.0; IEEE 754-2019
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_convert(const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count);

/* The part of `count` elements that part number `part` of `parts` holds: earlier parts one longer.
 *
 *   begin     out: index of its first element; may be NULL
 *   returns   the number of elements; 0 for a bad part
 *
 * any thread */
DTRAIN_API size_t dtrain_split(size_t count, int parts, int part, size_t *begin);

/* A shape over memory, row-major. Fields are read freely and written by the functions below only. */
typedef struct dtrain_tensor {
    dtrain_dtype dtype;
    int ndim; /* 0: a scalar */
    size_t shape[DTRAIN_MAX_DIMS];
    size_t count; /* elements */
    size_t bytes;
    void *data;
    dtrain_allocator *allocator; /* that its memory is of; NULL: a view, or memory of a device */
    dtrain_device *device;       /* whose memory data is; NULL: the CPU's */
    int device_owned;            /* 1: data was made by dtrain_tensor_create_on, and is freed with the tensor */
} dtrain_tensor;

/* Makes a zeroed tensor that owns its memory, aligned to 64 bytes.
 *
 *   shape       ndim sizes, 0 <= ndim <= 8; zero sizes are legal
 *   allocator   must outlive the tensor
 *   errors      DTRAIN_ERR_INVALID  a bad dtype, ndim, or a size that overflows or is no whole number of bytes
 *               DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_create(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                              dtrain_allocator *allocator);

/* Makes a view of memory that the caller keeps.
 *
 *   data     bytes of the shape, any alignment that the dtype's operations accept; may be NULL for no elements
 *   errors   as dtrain_tensor_create, less memory
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_view(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                            void *data);

/* Make a zeroed tensor in a device's memory, and a view of such memory.
 *
 * Tensors of devices are copied, filled, cast, cut, joined, added and scaled by the functions below, in the order of
 * the device's queue; the others return DTRAIN_ERR_UNSUPPORTED for them. Tensors of one call are of one device, but for
 * dtrain_tensor_copy.
 *
 *   device   must outlive the tensor; NULL: the CPU
 *   others   as dtrain_tensor_create and dtrain_tensor_view
 *   errors   also those of dtrain_device_alloc and dtrain_device_fill
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_create_on(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim,
                                                 const size_t *shape, dtrain_device *device);
DTRAIN_API dtrain_status dtrain_tensor_view_on(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                               void *data, dtrain_device *device);

/* Copies the elements of a tensor to another, wherever both are. Between a device and the CPU it returns when the CPU
 * may use its memory again, unless that is pinned (see dtrain_device_copy); between two devices it waits for both.
 *
 *   to, from   equal in dtype and shape, and apart
 *   errors     DTRAIN_ERR_INVALID  they differ; others as dtrain_device_copy
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_copy(dtrain_tensor *to, const dtrain_tensor *from);

/* Sets every element to value: floats rounded as by dtrain_convert; integers, and DTRAIN_BOOL as 0 or 1, exactly.
 *
 *   errors   DTRAIN_ERR_INVALID      an integer dtype has no such value
 *            DTRAIN_ERR_UNSUPPORTED  a dtype that is none of dtrain_convert, no integer and not DTRAIN_BOOL
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_fill(dtrain_tensor *tensor, double value);

/* Converts the elements of a tensor into another, as dtrain_convert.
 *
 *   to, from   equal in shape, of one device, and apart
 *   errors     DTRAIN_ERR_INVALID  shapes or devices differ; others as dtrain_device_convert
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_cast(dtrain_tensor *to, const dtrain_tensor *from);

/* Frees what the tensor owns, of a device after what was queued before, and zeroes it. NULL and views are legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor);

/* Copies part `part` of `parts` of a tensor along dimension dim into a new tensor that owns its memory, of the same
 * device.
 *
 *   allocator   not used for a device's tensor
 *   parts     any number of at least 1; earlier parts are one longer, parts beyond the size are empty
 *   errors    DTRAIN_ERR_INVALID  dim, parts or part out of range, or elements narrower than a byte
 *             DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_shard(dtrain_tensor *shard, const dtrain_tensor *whole, int dim, int parts,
                                             int part, dtrain_allocator *allocator);

/* Joins shards along dimension dim into a new tensor: the inverse of dtrain_tensor_shard.
 *
 *   shards    parts tensors in order, equal in dtype, device and in every size but that of dim
 *   errors    DTRAIN_ERR_INVALID  shards that do not fit together; the text names the first
 *             DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_unshard(dtrain_tensor *whole, const dtrain_tensor *shards, int parts, int dim,
                                               dtrain_allocator *allocator);

/* out[i] = a[i] + b[i] over F64, F32, F16 or BF16 tensors of one dtype and shape; any of them may be the same.
 * 16-bit floats add as float32 and round once.
 *
 *   errors   DTRAIN_ERR_INVALID  shapes, dtypes or devices differ; DTRAIN_ERR_UNSUPPORTED another dtype; those of the
 *            device
 *
 * any thread, on a device one */
DTRAIN_API dtrain_status dtrain_tensor_add(dtrain_tensor *out, const dtrain_tensor *a, const dtrain_tensor *b);

/* x[i] *= factor, with the dtypes, rounding and errors of dtrain_tensor_add.
 *
 * any thread, on a device one */
DTRAIN_API dtrain_status dtrain_tensor_scale(dtrain_tensor *x, double factor);

/* y[i] += alpha * x[i], product and sum each rounded, with the dtypes and errors of dtrain_tensor_add.
 *
 * any thread, on a device one */
DTRAIN_API dtrain_status dtrain_tensor_axpy(dtrain_tensor *y, double alpha, const dtrain_tensor *x);

/* Adds bias to every row of the last dimension of an F32 tensor.
 *
 *   bias     F32, one dimension, of x's last size
 *   errors   as dtrain_tensor_add; DTRAIN_ERR_UNSUPPORTED also a device's tensor
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_tensor_add_bias(dtrain_tensor *x, const dtrain_tensor *bias);

/* Sums the squares of an F64, F32, F16 or BF16 tensor in float64: squares exact for F32 and narrower, blocks of
 * 8 lanes added in index order, the same bits everywhere.
 *
 *   errors   DTRAIN_ERR_UNSUPPORTED  another dtype, or a device's tensor: see dtrain_device_squares
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_tensor_sum_squares(double *sum, const dtrain_tensor *x);

/* out = op(a) x op(b), or out += it, over F32 matrices.
 *
 *   a, b         two dimensions; transpose_a and transpose_b of 1 take them transposed
 *   accumulate   1: adds to out
 *   errors       DTRAIN_ERR_INVALID  the sizes do not meet; DTRAIN_ERR_UNSUPPORTED another dtype, or a device's tensor
 *
 * any thread; out overlaps neither a nor b */
DTRAIN_API dtrain_status dtrain_tensor_matmul(dtrain_tensor *out, const dtrain_tensor *a, int transpose_a,
                                              const dtrain_tensor *b, int transpose_b, int accumulate);

/* c = alpha op(a) x op(b) + beta c over row-major float32 matrices of any leading dimension.
 *
 *   m, n, k      op(a) is m x k, op(b) is k x n, c is m x n; zero is legal
 *   lda, ldb, ldc   elements from one row to the next, as stored
 *   alpha        0 leaves a and b unread
 *   beta         0 overwrites c without reading it
 *   override     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), defined
 *                before the implementation, takes the place of the built-in product
 *   bits         those of the instruction set; the same for one shape on every call
 *   source       Goto and van de Geijn, ACM TOMS 34(3), 2008
 *
 * any thread; c overlaps neither a nor b; allocates nothing */
DTRAIN_API void dtrain_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                             const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc);

/* Returns the name of the instruction set in use: "scalar", "sse2", "avx2", "avx512" or "neon".
 *
 * Chosen at the first use, the widest that the processor has; the environment variable DTRAIN_ISA names a
 * narrower one.
 *
 * any thread */
DTRAIN_API const char *dtrain_isa_name(void);

#ifdef __cplusplus
}
#endif

#endif
