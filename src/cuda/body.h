/* ---- >>cuda-body ----
 * How kernels are written: once, in C, as a function of where a thread stands, which a device's compiler makes a kernel
 * of, and an emulation (DTRAIN_CUDA_EMULATE) calls thread after thread on the CPU. A body is called once a phase; what
 * threads of a block have written to shared memory in one phase, all of them see in the next. The order in which the
 * threads of a phase and the blocks of a kernel come is open, and the emulation varies it.
 * Arithmetic goes through the functions below, each one rounding to nearest with subnormals kept, whatever the
 * compiler's flags say. */
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

typedef struct dtrain__cuda_none { /* shared memory, or variables, of kernels that have none */
    char none;
} dtrain__cuda_none;

/* 16 bytes of any type, loaded and stored at once; at multiples of 16. */
typedef struct dtrain__cuda_vector {
    uint32_t word[4];
} __attribute__((aligned(16), may_alias)) dtrain__cuda_vector;

#ifdef DTRAIN_CUDA_EMULATE
/* Which way threads and blocks are walked: up and down in turn. */
static __thread unsigned dtrain__cuda_turn;

/* Defines name_launch(stream, blocks, args), which runs name_body(args, at, shared, own, phase) for every thread of
 * blocks, phases 0 to phases - 1. own: a thread's variables, which last over its phases. */
#define DTRAIN__CUDA_KERNEL(name, args_type, shared_type, own_type, thread_count, phases)                              \
    __attribute__((unused)) static cudaError_t name##_launch(cudaStream_t stream, size_t blocks,                       \
                                                             const args_type *args)                                    \
    {                                                                                                                  \
        shared_type *shared = (shared_type *)malloc(sizeof *shared);                                                   \
        own_type *own = (own_type *)malloc((thread_count) * sizeof *own);                                              \
        unsigned turn = dtrain__cuda_turn++;                                                                           \
        dtrain__cuda_emulated_enter();                                                                                 \
        cudaError_t status = dtrain__cuda_emulated_launch(stream, blocks);                                             \
        if (shared == NULL || own == NULL)                                                                             \
            status = cudaErrorMemoryAllocation;                                                                        \
        for (size_t b = 0; status == 0 && b < blocks; b++) {                                                           \
            memset(shared, 0xa5, sizeof *shared);                                                                      \
            memset(own, 0xa5, (thread_count) * sizeof *own);                                                           \
            for (int phase = 0; phase < (phases); phase++)                                                             \
                for (uint32_t t = 0; t < (thread_count); t++) {                                                        \
                    uint32_t thread = (turn + (unsigned)phase) % 2 != 0 ? (thread_count)-1 - t : t;                    \
                    dtrain__cuda_at at = {turn % 4 < 2 ? b : blocks - 1 - b, blocks, thread, (thread_count)};          \
                    name##_body(args, at, shared, own + thread, phase);                                                \
                }                                                                                                      \
        }                                                                                                              \
        dtrain__cuda_emulated_leave();                                                                                 \
        free(shared);                                                                                                  \
        free(own);                                                                                                     \
        return status;                                                                                                 \
    }

/* Defines name_launch(stream, blocks, args) likewise, of a kernel whose blocks all run at the same time, so that one may
 * wait for what others, of any device, do: no block begins a phase before all have ended the one before it. */
#define DTRAIN__CUDA_TOGETHER(name, args_type, shared_type, own_type, thread_count, phases)                            \
    __attribute__((unused)) static cudaError_t name##_launch(cudaStream_t stream, size_t blocks,                       \
                                                             const args_type *args)                                    \
    {                                                                                                                  \
        size_t all = blocks * (thread_count);                                                                          \
        shared_type *shared = (shared_type *)malloc(blocks * sizeof *shared);                                          \
        own_type *own = (own_type *)malloc(all * sizeof *own);                                                         \
        unsigned turn = dtrain__cuda_turn++;                                                                           \
        dtrain__cuda_emulated_enter();                                                                                 \
        cudaError_t status = dtrain__cuda_emulated_launch(stream, blocks);                                             \
        if (shared == NULL || own == NULL)                                                                             \
            status = cudaErrorMemoryAllocation;                                                                        \
        if (status == 0) {                                                                                             \
            memset(shared, 0xa5, blocks * sizeof *shared);                                                             \
            memset(own, 0xa5, all * sizeof *own);                                                                      \
        }                                                                                                              \
        for (int phase = 0; status == 0 && phase < (phases); phase++)                                                  \
            for (size_t i = 0; i < all; i++) {                                                                         \
                size_t at_all = (turn + (unsigned)phase) % 2 != 0 ? all - 1 - i : i;                                   \
                size_t b = at_all / (thread_count), t = at_all % (thread_count);                                       \
                dtrain__cuda_at at = {b, blocks, (uint32_t)t, (thread_count)};                                         \
                name##_body(args, at, shared + b, own + at_all, phase);                                                \
            }                                                                                                          \
        dtrain__cuda_emulated_leave();                                                                                 \
        free(shared);                                                                                                  \
        free(own);                                                                                                     \
        return status;                                                                                                 \
    }
#else
#define DTRAIN__CUDA_KERNEL_BY(launch, bounds, name, args_type, shared_type, own_type, thread_count, phases)           \
    static __global__ void __launch_bounds__ bounds name(const __grid_constant__ args_type args)                       \
    {                                                                                                                  \
        __shared__ shared_type shared;                                                                                 \
        own_type own;                                                                                                  \
        dtrain__cuda_at at = {blockIdx.x, gridDim.x, threadIdx.x, (thread_count)};                                     \
        _Pragma("unroll") for (int phase = 0; phase < (phases); phase++)                                               \
        {                                                                                                              \
            if (phase > 0)                                                                                             \
                __syncthreads();                                                                                       \
            name##_body(&args, at, &shared, &own, phase);                                                              \
        }                                                                                                              \
    }                                                                                                                  \
    static cudaError_t name##_launch(cudaStream_t stream, size_t blocks, const args_type *args)                        \
    {                                                                                                                  \
        void *list[] = {(void *)args}; /* not <<<>>>, whose error may be that of the program's own last call */        \
        if (blocks == 0)                                                                                               \
            return cudaSuccess;                                                                                        \
        if (blocks > 0x7fffffffu)                                                                                      \
            return cudaErrorInvalidConfiguration;                                                                      \
        return launch((const void *)name, dim3((unsigned)blocks), dim3(thread_count), list, 0, stream);                \
    }
#define DTRAIN__CUDA_KERNEL(name, args_type, shared_type, own_type, thread_count, phases)                              \
    DTRAIN__CUDA_KERNEL_BY(cudaLaunchKernel, (thread_count), name, args_type, shared_type, own_type, thread_count,     \
                           phases)
#define DTRAIN__CUDA_TOGETHER(name, args_type, shared_type, own_type, thread_count, phases)                            \
    DTRAIN__CUDA_KERNEL_BY(cudaLaunchCooperativeKernel, (thread_count, 1), name, args_type, shared_type, own_type,     \
                           thread_count, phases)
#endif

/* Each operation on its own, not to be joined with a neighbour, nor to flush subnormals, as the compiler's own
 * operators are under --fmad and --use_fast_math. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign)                                                     \
    DTRAIN__CUDA_FN type name(type a, type b)                                                                          \
    {                                                                                                                  \
        volatile type result = a sign b; /* no contraction */                                                          \
        return result;                                                                                                 \
    }
#define DTRAIN__CUDA_ROOT(name, type, letter, instruction, root)                                                       \
    DTRAIN__CUDA_FN type name(type a)                                                                                  \
    {                                                                                                                  \
        return root(a);                                                                                                \
    }
#else
#define DTRAIN__CUDA_BINARY(name, type, letter, instruction, sign)                                                     \
    DTRAIN__CUDA_FN type name(type a, type b)                                                                          \
    {                                                                                                                  \
        type result;                                                                                                   \
        asm(instruction " %0, %1, %2;" : "=" letter(result) : letter(a), letter(b));                                   \
        return result;                                                                                                 \
    }
#define DTRAIN__CUDA_ROOT(name, type, letter, instruction, root)                                                       \
    DTRAIN__CUDA_FN type name(type a)                                                                                  \
    {                                                                                                                  \
        type result;                                                                                                   \
        asm(instruction " %0, %1;" : "=" letter(result) : letter(a));                                                  \
        return result;                                                                                                 \
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
DTRAIN__CUDA_ROOT(dtrain__cuda_sqrt_f32, float, "f", "sqrt.rn.f32", __builtin_sqrtf)
DTRAIN__CUDA_ROOT(dtrain__cuda_sqrt_f64, double, "d", "sqrt.rn.f64", __builtin_sqrt)

DTRAIN__CUDA_FN uint32_t dtrain__cuda_bits_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

DTRAIN__CUDA_FN float dtrain__cuda_float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Integer atomics, in shared or device memory; each returns what was there before. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_atomic_add_u32(uint32_t *to, uint32_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t before = *to;
    *to += value;
    return before;
#else
    return atomicAdd(to, value);
#endif
}

DTRAIN__CUDA_FN uint64_t dtrain__cuda_atomic_add_u64(uint64_t *to, uint64_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint64_t before = *to;
    *to += value;
    return before;
#else
    return atomicAdd((unsigned long long *)to, (unsigned long long)value);
#endif
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_atomic_max_u32(uint32_t *to, uint32_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t before = *to;
    *to = value > before ? value : before;
    return before;
#else
    return atomicMax(to, value);
#endif
}

/* ---- words at any address ----
 * `align`, the same for all threads, says what the address is a multiple of. 16: a vector is loaded and stored at once;
 * 4: a word is; 1: byte after byte. */

typedef uint32_t dtrain__cuda_any_word __attribute__((may_alias));

static int dtrain__cuda_align_of(const void *pointer)
{
    return (uintptr_t)pointer % 16 == 0 ? 16 : (uintptr_t)pointer % 4 == 0 ? 4 : 1;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_word_load(const unsigned char *from, int align)
{
    uint32_t word;
    if (align >= 4)
        return *(const dtrain__cuda_any_word *)from;
    memcpy(&word, from, sizeof word);
    return word;
}

DTRAIN__CUDA_FN void dtrain__cuda_word_store(unsigned char *to, uint32_t word, int align)
{
    if (align >= 4)
        *(dtrain__cuda_any_word *)to = word;
    else
        memcpy(to, &word, sizeof word);
}

/* The first n words of a vector; zeros beyond. */
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
