/* ---- >>isa ----
 * The instruction set, which is chosen once at run time, and the floating-point mode. A kernel is written once, as
 * plain loops in an always-inlined body. DTRAIN__KERNEL compiles it for each instruction set. Each does the same
 * operations in the same order, so only the speed differs. Kernels run in the default floating-point mode: they round
 * to nearest and keep subnormals. */
#ifndef DTRAIN__ISA
#define DTRAIN__ISA
#include "tensor.h"
#include "../base/os_files.c"

#if defined(__x86_64__) && defined(__GNUC__)
#define DTRAIN__X86 1
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define DTRAIN__NEON 1
#include <arm_neon.h>
#endif

/* NEON_BF16 differs from NEON by instructions that round to bfloat16. */
enum {
    DTRAIN__ISA_SCALAR = 1,
    DTRAIN__ISA_SSE2,
    DTRAIN__ISA_NEON,
    DTRAIN__ISA_NEON_BF16,
    DTRAIN__ISA_AVX2,
    DTRAIN__ISA_AVX512
};

static int dtrain__isa_widest(void)
{
#if defined(DTRAIN__X86)
    __builtin_cpu_init(); /* the first call may come from a constructor of the program */
    if (dtrain__without("avx2") || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return DTRAIN__ISA_SSE2;
    if (dtrain__without("avx512") || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return DTRAIN__ISA_AVX2;
    return DTRAIN__ISA_AVX512;
#elif defined(DTRAIN__NEON) && defined(__linux__)
    const unsigned long bf16 = 1ul << 14; /* HWCAP2_BF16, which older headers lack */
    return getauxval(AT_HWCAP2) & bf16 && !dtrain__without("bf16") ? DTRAIN__ISA_NEON_BF16 : DTRAIN__ISA_NEON;
#elif defined(DTRAIN__NEON)
    return DTRAIN__ISA_NEON;
#else
    return DTRAIN__ISA_SCALAR;
#endif
}

static int dtrain__isa_is_neon(int isa)
{
    return isa == DTRAIN__ISA_NEON || isa == DTRAIN__ISA_NEON_BF16;
}

/* Returns whether this processor has an instruction set. */
static int dtrain__isa_has(int isa)
{
    int widest = dtrain__isa_widest();
    return isa == DTRAIN__ISA_SCALAR ||
           (isa > 0 && isa <= widest && dtrain__isa_is_neon(isa) == dtrain__isa_is_neon(widest));
}

static const char *dtrain__isa_text(int isa)
{
    static const char *const names[] = {"?", "scalar", "sse2", "neon", "neon-bf16", "avx2", "avx512"};
    return names[isa];
}

DTRAIN__OF_PROCESS(int, dtrain__isa_chosen)

static DTRAIN__NOINLINE int dtrain__isa(void)
{
    int isa = DTRAIN__TUNED(isa, DTRAIN__ATOMIC_LOAD(dtrain__isa_chosen(), RELAXED));
    if (isa != 0)
        return isa;
    const char *asked = dtrain__os_getenv("DTRAIN_ISA");
    isa = dtrain__isa_widest();
    for (int i = DTRAIN__ISA_SCALAR; asked != NULL && i <= DTRAIN__ISA_AVX512; i++)
        if (strcmp(asked, dtrain__isa_text(i)) == 0 && dtrain__isa_has(i))
            isa = i;
    DTRAIN__ATOMIC_STORE(dtrain__isa_chosen(), isa, RELAXED);
    return isa;
}

DTRAIN_API const char *dtrain_isa_name(void)
{
    return dtrain__isa_text(dtrain__isa());
}

#define DTRAIN__FPMODE_ARM 0x07f70000u /* rounding, flushed subnormals, default NaNs, half formats, short vectors */

/* Sets the default floating-point mode. Returns the caller's mode, for dtrain__fpmode_restore. */
static DTRAIN__NOINLINE uint64_t dtrain__fpmode_enter(void)
{
#if defined(DTRAIN__X86) || defined(__SSE2_MATH__)
    uint32_t mode = __builtin_ia32_stmxcsr();
    if ((mode & 0xffc0u) != 0x1f80u)
        __builtin_ia32_ldmxcsr(0x1f80u);
    return mode;
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    if (mode != 0)
        __asm__ __volatile__("msr fpcr, %0" : : "r"((uint64_t)0));
    return mode;
#elif defined(__arm__) && defined(__ARM_FP)
    uint32_t mode;
    __asm__ __volatile__("vmrs %0, fpscr" : "=r"(mode));
    if ((mode & DTRAIN__FPMODE_ARM) != 0)
        __asm__ __volatile__("vmsr fpscr, %0" : : "r"(mode & ~DTRAIN__FPMODE_ARM));
    return mode;
#else
    int mode = fegetround();
    if (mode != FE_TONEAREST)
        fesetround(FE_TONEAREST);
    return (uint64_t)mode;
#endif
}

static void dtrain__fpmode_restore(uint64_t mode)
{
#if defined(DTRAIN__X86) || defined(__SSE2_MATH__)
    if ((mode & 0xffc0u) != 0x1f80u)
        __builtin_ia32_ldmxcsr((uint32_t)mode);
#elif defined(__aarch64__)
    if (mode != 0)
        __asm__ __volatile__("msr fpcr, %0" : : "r"(mode));
#elif defined(__arm__) && defined(__ARM_FP)
    if ((mode & DTRAIN__FPMODE_ARM) != 0)
        __asm__ __volatile__("vmsr fpscr, %0" : : "r"((uint32_t)mode));
#else
    if (mode != FE_TONEAREST)
        fesetround((int)mode);
#endif
}

/* Element types for memory of any alignment and any declared type. */
#if defined(__GNUC__)
typedef float dtrain__f32 __attribute__((aligned(1), may_alias));
typedef double dtrain__f64 __attribute__((aligned(1), may_alias));
typedef uint16_t dtrain__u16 __attribute__((aligned(1), may_alias));
typedef int32_t dtrain__i32 __attribute__((aligned(1), may_alias));
typedef uint32_t dtrain__u32 __attribute__((aligned(1), may_alias));
typedef int64_t dtrain__i64 __attribute__((aligned(1), may_alias));
typedef uint64_t dtrain__u64 __attribute__((aligned(1), may_alias));
#endif

/* Promises that iterations do not depend on each other, even if the buffers are the same. */
#if defined(__clang__) && defined(__arm__) /* clang would take NEON, which flushes subnormals, because it is asked */
#define DTRAIN__INDEPENDENT
#elif defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* at -O0 and -O1 clang would warn of each scalar loop */
#define DTRAIN__INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DTRAIN__INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Elements per block. Kernels get whole blocks, so compilers need not write loops for a rest. */
#define DTRAIN__ISA_BLOCK 16

#define DTRAIN__INLINE static inline __attribute__((always_inline))

/* DTRAIN__DISPATCH defines name(...), which calls the form of name for the instruction set in use: name_avx512,
 * name_avx2, name_neon or name_base. DTRAIN__KERNEL also defines these forms, from name_body(...). */
#define DTRAIN__ISA_FORM(name, isa, target, parameters, arguments) \
    static __attribute__((noinline)) target void name##_##isa parameters \
    { \
        name##_body arguments; \
    }
#if defined(DTRAIN__X86)
#define DTRAIN__DISPATCH(name, parameters, arguments) \
    static void name parameters \
    { \
        int isa = dtrain__isa(); \
        if (isa == DTRAIN__ISA_AVX512) \
            name##_avx512 arguments; \
        else if (isa == DTRAIN__ISA_AVX2) \
            name##_avx2 arguments; \
        else \
            name##_base arguments; \
    }
#define DTRAIN__KERNEL(name, parameters, arguments) \
    DTRAIN__ISA_FORM(name, avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))), parameters, \
                     arguments) \
    DTRAIN__ISA_FORM(name, avx2, __attribute__((target("avx2,fma"))), parameters, arguments) \
    DTRAIN__ISA_FORM(name, base, , parameters, arguments) \
    DTRAIN__DISPATCH(name, parameters, arguments)
#elif defined(DTRAIN__NEON)
#if defined(__clang__)
#define DTRAIN__ISA_PLAIN /* a compiler that vectorises base too */
#else
#define DTRAIN__ISA_PLAIN __attribute__((optimize("no-tree-vectorize")))
#endif
#define DTRAIN__DISPATCH(name, parameters, arguments) \
    static void name parameters \
    { \
        if (dtrain__isa() == DTRAIN__ISA_SCALAR) \
            name##_base arguments; \
        else \
            name##_neon arguments; \
    }
#define DTRAIN__KERNEL(name, parameters, arguments) \
    DTRAIN__ISA_FORM(name, neon, , parameters, arguments) \
    DTRAIN__ISA_FORM(name, base, DTRAIN__ISA_PLAIN, parameters, arguments) \
    DTRAIN__DISPATCH(name, parameters, arguments)
#else
#define DTRAIN__DISPATCH(name, parameters, arguments) \
    static void name parameters \
    { \
        name##_base arguments; \
    }
#define DTRAIN__KERNEL(name, parameters, arguments) \
    static __attribute__((noinline)) void name parameters \
    { \
        name##_body arguments; \
    }
#endif

/* Defines name(...), one of whose parameters is count. It runs `opening`, then `statement` for each i < count.
 * Iterations must not depend on each other. Whole blocks use the instruction set; the last elements follow singly. */
#define DTRAIN__LOOP(name, parameters, arguments, opening, statement) \
    DTRAIN__INLINE void name##_blocks_body parameters \
    { \
        opening; \
        count -= count % DTRAIN__ISA_BLOCK; \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) statement; \
    } \
    DTRAIN__KERNEL(name##_blocks, parameters, arguments) \
    static void name parameters \
    { \
        opening; \
        name##_blocks arguments; \
        for (size_t i = count; i-- % DTRAIN__ISA_BLOCK != 0;) \
            statement; \
    }

/* Prevents the contraction of a product with the sum that follows it. Under -ffp-contract=fast clang's back end
 * contracts in spite of the pragmas. It does not contract across an operation on bits that it cannot predict: an
 * exclusive or with `zero`. That is 0, which each kernel reads from dtrain__isa_zero once. */
static volatile uint32_t dtrain__isa_zero __attribute__((unused));

#if defined(__clang__)
#define DTRAIN__ISA_ROUNDED(name, type, word) \
    DTRAIN__INLINE type name(type x, uint32_t zero) \
    { \
        word bits; \
        memcpy(&bits, &x, sizeof bits); \
        bits ^= zero; \
        memcpy(&x, &bits, sizeof bits); \
        return x; \
    }
#else
#define DTRAIN__ISA_ROUNDED(name, type, word) \
    DTRAIN__INLINE type name(type x, uint32_t zero) \
    { \
        (void)zero; \
        return x; \
    }
#endif
DTRAIN__ISA_ROUNDED(dtrain__isa_rounded_f32, float, uint32_t)
DTRAIN__ISA_ROUNDED(dtrain__isa_rounded_f64, double, uint64_t)

/* Four floats in the compiler's own vectors: SSE2, NEON or others. Kernels that are written in vectors take a prefix
 * of function names: dtrain__x4 for these, _mm256 or _mm512 for wider ones, dtrain__x1 for one float. */
typedef float dtrain__x4 __attribute__((vector_size(16)));
typedef float dtrain__x1;
typedef uint32_t dtrain__u32x4 __attribute__((vector_size(16)));

DTRAIN__INLINE dtrain__x4 dtrain__x4_set1_ps(float value)
{
    dtrain__x4 x = {value, value, value, value};
    return x;
}

DTRAIN__INLINE dtrain__x1 dtrain__x1_set1_ps(float value)
{
    return value;
}

#define DTRAIN__ISA_MOVES(vector) \
    DTRAIN__INLINE vector vector##_loadu_ps(const float *from) \
    { \
        vector x; \
        memcpy(&x, from, sizeof x); \
        return x; \
    } \
    DTRAIN__INLINE void vector##_storeu_ps(float *to, vector x) \
    { \
        memcpy(to, &x, sizeof x); \
    }
DTRAIN__ISA_MOVES(dtrain__x4)
DTRAIN__ISA_MOVES(dtrain__x1)

#endif
