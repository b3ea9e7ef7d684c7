/* ---- >>cuda-body ----
 * How kernels are written. A kernel's body is a C function of a thread's place. The device's compiler makes a kernel of
 * it. The emulation (DTRAIN_CUDA_EMULATE) calls it thread after thread on the CPU. A body is called once a phase. What
 * threads of a block write to shared memory in one phase, all of them see in the next. The order of threads within a
 * phase, and of blocks, is open; the emulation varies it.
 *
 * Arithmetic goes through the functions below. Each rounds to nearest and keeps subnormals, whatever the compiler's
 * flags. */
#ifndef DTRAIN__CUDA_BODY
#define DTRAIN__CUDA_BODY
#include "cuda.h"
#include "emulate.h"

#if !defined(__CUDACC__) && !defined(DTRAIN_CUDA_EMULATE)
#error "DTRAIN_CUDA_IMPLEMENTATION stands in a .cu file, for nvcc; without a CUDA Toolkit define DTRAIN_CUDA_STUB too"
#endif
#ifndef DTRAIN_CUDA_EMULATE
#include <cuda_runtime.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_FN static inline __attribute__((unused))
#else
#define DTRAIN__CUDA_FN static __device__ __forceinline__
#endif

typedef struct dtrain__cuda_at {
    size_t block, blocks;
    uint32_t thread, threads;
} dtrain__cuda_at;

typedef struct dtrain__cuda_none { /* for kernels without shared memory, or without variables */
    char none;
} dtrain__cuda_none;

/* 16 bytes of any type, loaded and stored at once, at multiples of 16. */
typedef struct dtrain__cuda_vector {
    uint32_t word[4];
} __attribute__((aligned(16), may_alias)) dtrain__cuda_vector;

typedef uint16_t dtrain__cuda_u16 __attribute__((may_alias));
typedef uint32_t dtrain__cuda_u32 __attribute__((may_alias));
typedef uint64_t dtrain__cuda_u64 __attribute__((may_alias));

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_UNROLL
#define DTRAIN__CUDA_ROLLED
#else
#define DTRAIN__CUDA_UNROLL _Pragma("unroll")
#define DTRAIN__CUDA_ROLLED _Pragma("unroll 1")
#endif

/* Defines name_launch(device, caller, blocks, args). It runs name_body(args, at, shared, own, phase) for every thread
 * of the blocks, phases 0 to phases - 1. Errors name the caller. own: a thread's variables, which last over its phases.
 */
#define DTRAIN__CUDA_KERNEL(name, args_type, shared_type, own_type, thread_count, phases) \
    DTRAIN__CUDA_KERNEL_BY(0, (thread_count), name, args_type, shared_type, own_type, thread_count, phases)

/* Does the same for a kernel whose blocks all run at the same time, so that one may wait for others, on any device. No
 * block begins a phase before all have ended the one before it. */
#define DTRAIN__CUDA_TOGETHER(name, args_type, shared_type, own_type, thread_count, phases) \
    DTRAIN__CUDA_KERNEL_BY(1, (thread_count, 1), name, args_type, shared_type, own_type, thread_count, phases)

#ifdef DTRAIN_CUDA_EMULATE
/* The direction of the walk over threads and blocks, which alternates. */
static __thread unsigned dtrain__cuda_turn;

#define DTRAIN__CUDA_KERNEL_BY(together, bounds, name, args_type, shared_type, own_type, thread_count, phases) \
    __attribute__((unused)) static dtrain_status name##_launch(dtrain_device *device, const char *caller, \
                                                               size_t blocks, const args_type *args) \
    { \
        size_t some = (together) ? blocks : 1, all = some * (thread_count); \
        shared_type *shared = (shared_type *)malloc(some * sizeof *shared); \
        own_type *own = (own_type *)malloc(all * sizeof *own); \
        unsigned turn = dtrain__cuda_turn++; \
        dtrain__cuda_emulated_enter(); \
        cudaError_t status = dtrain__cuda_emulated_launch(dtrain__cuda_queue_of(device)->stream, blocks); \
        if (shared == NULL || own == NULL) \
            status = cudaErrorMemoryAllocation; \
        for (size_t first = 0; status == 0 && first < blocks; first += some) { \
            memset(shared, 0xa5, some * sizeof *shared); \
            memset(own, 0xa5, all * sizeof *own); \
            for (int phase = 0; phase < (phases); phase++) \
                for (size_t i = 0; i < all; i++) { \
                    size_t t = (turn + (unsigned)phase) % 2 != 0 ? all - 1 - i : i, b = first + t / (thread_count); \
                    dtrain__cuda_at at = {turn % 4 < 2 ? b : blocks - 1 - b, blocks, (uint32_t)(t % (thread_count)), \
                                          (thread_count)}; \
                    name##_body(args, at, shared + t / (thread_count), own + t, phase); \
                } \
        } \
        dtrain__cuda_emulated_leave(); \
        free(shared); \
        free(own); \
        return dtrain__cuda_status(device, caller, status); \
    }
#else
#define DTRAIN__CUDA_KERNEL_BY(together, bounds, name, args_type, shared_type, own_type, thread_count, phases) \
    static __global__ void __launch_bounds__ bounds name(const __grid_constant__ args_type args) \
    { \
        __shared__ shared_type shared; \
        own_type own; \
        dtrain__cuda_at at = {blockIdx.x, gridDim.x, threadIdx.x, (thread_count)}; \
        _Pragma("unroll") for (int phase = 0; phase < (phases); phase++) \
        { \
            if (phase > 0) \
                __syncthreads(); \
            name##_body(&args, at, &shared, &own, phase); \
        } \
    } \
    static dtrain_status name##_launch(dtrain_device *device, const char *caller, size_t blocks, const args_type *args)\
    { \
        void *list[] = {(void *)args}; /* <<<>>> could report an error of the program's own last call */ \
        cudaStream_t stream = dtrain__cuda_queue_of(device)->stream; \
        const void *kernel = (const void *)name; \
        dim3 grid((unsigned)blocks), block(thread_count); \
        cudaError_t error = blocks > 0x7fffffffu ? cudaErrorInvalidConfiguration \
                            : (together) ? cudaLaunchCooperativeKernel(kernel, grid, block, list, 0, stream) \
                                         : cudaLaunchKernel(kernel, grid, block, list, 0, stream); \
        return dtrain__cuda_status(device, caller, error); \
    }
#endif

/* Each operation stands alone: it is not joined with a neighbour, and keeps subnormals. The compiler's own operators do
 * neither under --fmad and --use_fast_math. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign) \
    DTRAIN__CUDA_FN type name(type a, type b) \
    { \
        volatile type result = a sign b; /* no contraction */ \
        return result; \
    }
#define DTRAIN__CUDA_UNARY(name, to, to_letter, from, from_letter, instruction, expression) \
    DTRAIN__CUDA_FN to name(from a) \
    { \
        return expression; \
    }
#else
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign) \
    DTRAIN__CUDA_FN type name(type a, type b) \
    { \
        type result; \
        asm(instruction " %0, %1, %2;" : "=" letter(result) : letter(a), letter(b)); \
        return result; \
    }
#define DTRAIN__CUDA_UNARY(name, to, to_letter, from, from_letter, instruction, expression) \
    DTRAIN__CUDA_FN to name(from a) \
    { \
        to result; \
        asm(instruction " %0, %1;" : "=" to_letter(result) : from_letter(a)); \
        return result; \
    }
#endif
DTRAIN__CUDA_BINARY(dtrain__cuda_add_f32, float, "f", "add.rn.f32", +)
DTRAIN__CUDA_BINARY(dtrain__cuda_sub_f32, float, "f", "sub.rn.f32", -)
DTRAIN__CUDA_BINARY(dtrain__cuda_mul_f32, float, "f", "mul.rn.f32", *)
DTRAIN__CUDA_BINARY(dtrain__cuda_div_f32, float, "f", "div.rn.f32", /)
DTRAIN__CUDA_BINARY(dtrain__cuda_add_f64, double, "d", "add.rn.f64", +)
DTRAIN__CUDA_BINARY(dtrain__cuda_sub_f64, double, "d", "sub.rn.f64", -)
DTRAIN__CUDA_BINARY(dtrain__cuda_mul_f64, double, "d", "mul.rn.f64", *)
DTRAIN__CUDA_BINARY(dtrain__cuda_div_f64, double, "d", "div.rn.f64", /)
DTRAIN__CUDA_UNARY(dtrain__cuda_sqrt_f32, float, "f", float, "f", "sqrt.rn.f32", __builtin_sqrtf(a))
DTRAIN__CUDA_UNARY(dtrain__cuda_sqrt_f64, double, "d", double, "d", "sqrt.rn.f64", __builtin_sqrt(a))
DTRAIN__CUDA_UNARY(dtrain__cuda_widen_f32, double, "d", float, "f", "cvt.f64.f32", (double)a)
DTRAIN__CUDA_UNARY(dtrain__cuda_narrow_f64, float, "f", double, "d", "cvt.rn.f32.f64", (float)a)

#define DTRAIN__CUDA_SAME_BITS(name, to, from) \
    DTRAIN__CUDA_FN to name(from x) \
    { \
        to same; \
        memcpy(&same, &x, sizeof same); \
        return same; \
    }

DTRAIN__CUDA_SAME_BITS(dtrain__cuda_bits_f32, uint32_t, float)
DTRAIN__CUDA_SAME_BITS(dtrain__cuda_float_of, float, uint32_t)
DTRAIN__CUDA_SAME_BITS(dtrain__cuda_bits_f64, uint64_t, double)
DTRAIN__CUDA_SAME_BITS(dtrain__cuda_double_of, double, uint64_t)

/* Integer atomics in shared or device memory; each returns the old value. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_ATOMIC(name, type, native, instruction, after) \
    DTRAIN__CUDA_FN type name(type *to, type value) \
    { \
        type before = *to; \
        *to = after; \
        return before; \
    }
#else
#define DTRAIN__CUDA_ATOMIC(name, type, native, instruction, after) \
    DTRAIN__CUDA_FN type name(type *to, type value) \
    { \
        return instruction((native *)to, (native)value); \
    }
#endif
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_add_u32, uint32_t, unsigned, atomicAdd, before + value)
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_add_u64, uint64_t, unsigned long long, atomicAdd, before + value)
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_max_u32, uint32_t, unsigned, atomicMax, value > before ? value : before)
DTRAIN__CUDA_ATOMIC(dtrain__cuda_atomic_or_u32, uint32_t, unsigned, atomicOr, before | value)

/* ---- words at any address ----
 * `align`, the same for all threads, says what the address is a multiple of. 16: a vector is loaded and stored at once;
 * 4: word by word; 1: byte by byte. */

static int dtrain__cuda_align_of(const void *pointer)
{
    return (uintptr_t)pointer % 16 == 0 ? 16 : (uintptr_t)pointer % 4 == 0 ? 4 : 1;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_word_load(const unsigned char *from, int align)
{
    uint32_t word;
    if (align >= 4)
        return *(const dtrain__cuda_u32 *)from;
    memcpy(&word, from, sizeof word);
    return word;
}

DTRAIN__CUDA_FN void dtrain__cuda_word_store(unsigned char *to, uint32_t word, int align)
{
    if (align >= 4)
        *(dtrain__cuda_u32 *)to = word;
    else
        memcpy(to, &word, sizeof word);
}

/* Loads the first n words of a vector; the others are zero. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_vector_load(const unsigned char *from, size_t n, int align)
{
    dtrain__cuda_vector x;
    if (align == 16 && n >= 4)
        return *(const dtrain__cuda_vector *)from;
    x.word[0] = n > 0 ? dtrain__cuda_word_load(from, align) : 0;
    x.word[1] = n > 1 ? dtrain__cuda_word_load(from + 4, align) : 0;
    x.word[2] = n > 2 ? dtrain__cuda_word_load(from + 8, align) : 0;
    x.word[3] = n > 3 ? dtrain__cuda_word_load(from + 12, align) : 0;
    return x;
}

DTRAIN__CUDA_FN void dtrain__cuda_vector_store(unsigned char *to, dtrain__cuda_vector x, size_t n, int align)
{
    if (align == 16 && n >= 4) {
        *(dtrain__cuda_vector *)to = x;
        return;
    }
    for (uint32_t k = 0; k < 4; k++)
        if (k < n)
            dtrain__cuda_word_store(to + 4 * k, x.word[k], align);
}

#endif
