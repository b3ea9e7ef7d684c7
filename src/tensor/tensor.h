/* ---- >>tensor ----
 * Element types, conversions between them, and dtrain_tensor: a shape over memory, row-major.
 * Arithmetic here gives the same bits under any compiler flags and instruction set; of matrix products there are
 * two sets of bits, see dtrain_sgemm.
 *
 *     DTRAIN_CHECK(dtrain_convert(params, DTRAIN_F32, halves, DTRAIN_BF16, count)); */
#ifndef DTRAIN__TENSOR_H
#define DTRAIN__TENSOR_H
#include "../base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Element types: those of safetensors, narrowest first. */
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

/* How values of several ranks become one. */
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
DTRAIN_API_MUST dtrain_status dtrain_dtype_from_name(dtrain_dtype *dtype, const char *name, size_t length);

/* Converts count elements, rounding to the nearest, ties to even.
 *
 *   from, to   any two of F64, F32, F16, BF16, F8_E4M3, F8_E5M2; the buffers are apart, any alignment
 *   overflow   becomes infinity; in F8_E4M3, which has none, NaN (see dtrain_convert_saturating). NaN stays NaN with
 *              its sign
 *   subnormals are kept on both sides, whatever the caller's floating-point mode
 *   errors     DTRAIN_ERR_UNSUPPORTED  another dtype
 *   source     OCP 8-bit Floating Point Specification 1.0; IEEE 754-2019
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_convert(const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                                             size_t count);

/* As dtrain_convert, to a number of 8 bits, with the saturation that its specification has: what is beyond the largest
 * finite number, infinity too, becomes that number with its sign. It is 448 in F8_E4M3 and 57344 in F8_E5M2. NaN stays
 * NaN. The CPU alone has it.
 *
 *   to        F8_E4M3 or F8_E5M2
 *   errors    DTRAIN_ERR_UNSUPPORTED  another dtype
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_convert_saturating(const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                                                        size_t count);

/* A shape over memory, row-major. Fields are read freely and written by the functions below only. */
typedef struct dtrain_tensor {
    dtrain_dtype dtype;
    int ndim; /* 0: a scalar */
    size_t shape[DTRAIN_MAX_DIMS];
    size_t count; /* elements */
    size_t bytes;
    void *data;
    dtrain_allocator *allocator; /* that its memory is of; NULL: a view */
} dtrain_tensor;

/* Makes a zeroed tensor that owns its memory, aligned to 64 bytes.
 *
 *   shape       ndim sizes, 0 <= ndim <= 8; zero sizes are legal
 *   allocator   must outlive the tensor
 *   errors      DTRAIN_ERR_INVALID  a bad dtype, ndim, or a size that overflows or is no whole number of bytes
 *               DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_tensor_create(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim,
                                                   const size_t *shape, dtrain_allocator *allocator);

/* Makes a view of memory that the caller keeps.
 *
 *   data     bytes of the shape, any alignment that the dtype's operations accept; may be NULL for no elements
 *   errors   as dtrain_tensor_create, less memory
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_tensor_view(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim,
                                                 const size_t *shape, void *data);

/* Frees what the tensor owns, and zeroes it. NULL and views are legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor);

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
