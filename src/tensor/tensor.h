/* ---- >>tensor ----
 * Element types, conversions between them, and dtrain_tensor: a shape over row-major memory.
 * Arithmetic gives the same bits under any compiler flags and on every instruction set. Only matrix products have two
 * sets of bits: see dtrain_sgemm.
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

/* How the values of several ranks become one. */
typedef enum dtrain_op {
    DTRAIN_SUM = 101,
    DTRAIN_MEAN, /* the sum, divided once; floats only */
    DTRAIN_PROD,
    DTRAIN_MIN, /* a NaN wins; -0 is below +0 */
    DTRAIN_MAX,
    DTRAIN_AND, /* bit by bit, like OR and XOR; integers only */
    DTRAIN_OR,
    DTRAIN_XOR
} dtrain_op;

#define DTRAIN_MAX_DIMS 8

/* A device: memory of its own and a queue of work on it, see >>device. A NULL device stands for the CPU. */
typedef struct dtrain_device dtrain_device;

/* Returns the width of one element in bits, 4 to 64; 0 if `dtype` is no dtype.
 *
 * any thread */
DTRAIN_API unsigned dtrain_dtype_bits(dtrain_dtype dtype);

/* Returns the safetensors name, such as "F32"; "?" if `dtype` is no dtype.
 *
 * any thread */
DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype);

/* Finds the dtype with a safetensors name.
 *
 *   dtype    out: unchanged on an error
 *   name     length bytes, case-sensitive, no zero byte needed
 *   errors   DTRAIN_ERR_INVALID  no dtype has this name
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_dtype_from_name(dtrain_dtype *dtype, const char *name, size_t length);

/* Converts count elements, rounding to nearest, ties to even.
 *
 *   in, out      count elements each, any alignment; the buffers must not overlap
 *   from, to     each one of F64, F32, F16, BF16, F8_E4M3, F8_E5M2
 *   overflow     gives infinity; NaN in F8_E4M3, which has no infinity (see dtrain_convert_saturating)
 *   NaN          stays NaN and keeps its sign
 *   subnormals   stay, in input and output, whatever the caller's floating-point mode
 *   errors       DTRAIN_ERR_UNSUPPORTED  another dtype
 *                DTRAIN_ERR_INVALID      in or out is NULL
 *   source       OCP 8-bit Floating Point Specification 1.0; IEEE 754-2019
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_convert(const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                                             size_t count);

/* Converts to an 8-bit float with saturation; otherwise as dtrain_convert. Devices have no such call.
 *
 *   to         F8_E4M3 or F8_E5M2
 *   overflow   gives the largest finite number, 448 in F8_E4M3 and 57344 in F8_E5M2, with the input's sign. So does
 *              infinity. NaN stays NaN
 *   errors     as dtrain_convert
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_convert_saturating(const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                                                        size_t count);

/* A shape over row-major memory. Read the fields as you like; only the functions below write them. */
typedef struct dtrain_tensor {
    dtrain_dtype dtype;
    int ndim; /* 0: a scalar */
    size_t shape[DTRAIN_MAX_DIMS];
    size_t count; /* elements */
    size_t bytes;
    void *data;
    dtrain_allocator *allocator; /* the source of data; NULL: the tensor is a view */
} dtrain_tensor;

/* Makes a zeroed tensor that owns its memory, aligned to 64 bytes.
 *
 *   tensor      out: may be destroyed after an error too
 *   shape       ndim sizes, 0 <= ndim <= 8; a size may be 0
 *   allocator   must outlive the tensor; a zeroed one uses the C library
 *   errors      DTRAIN_ERR_INVALID  a bad dtype or ndim; sizes whose product overflows or is no whole number of bytes;
 *                                   a NULL argument
 *               DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_tensor_create(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim,
                                                   const size_t *shape, dtrain_allocator *allocator);

/* Makes a view of memory that you keep.
 *
 *   data     the elements, in any alignment that the operations on them accept; may be NULL if there are none
 *   errors   DTRAIN_ERR_INVALID, as dtrain_tensor_create
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_tensor_view(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim,
                                                 const size_t *shape, void *data);

/* Frees what the tensor owns and zeroes it. NULL and views are legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor);

/* Returns the name of the instruction set in use: "scalar", "sse2", "avx2", "avx512", "neon", or "neon-bf16" for NEON
 * with the instructions of ARM64 that round to bfloat16.
 *
 * The first use chooses the widest that the processor has. The environment variable DTRAIN_ISA can name a narrower
 * one; any other value has no effect.
 *
 * any thread */
DTRAIN_API const char *dtrain_isa_name(void);

#ifdef __cplusplus
}
#endif

#endif
