/* ---- >>platform ----
 * What must be settled before any system header: the features that the implementation needs of it; and
 * the pragmas that keep a region's arithmetic to the letter of IEEE 754 whatever flags the program uses. */
#ifndef DTRAIN__PLATFORM
#define DTRAIN__PLATFORM

#ifdef DTRAIN_IMPLEMENTATION
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE 1
#endif
#include <limits.h>
#if defined(__GLIBC__) && !(defined(__USE_MISC) && defined(__USE_XOPEN2K8))
#error "dtrain.h: include it before any system header in the file that defines DTRAIN_IMPLEMENTATION, or compile that file with -D_DEFAULT_SOURCE"
#endif
#endif

/* Small, called from many places, and never where a few cycles count: one copy keeps the program smaller. */
#if defined(__GNUC__)
#define DTRAIN__NOINLINE __attribute__((noinline))
#else
#define DTRAIN__NOINLINE
#endif

/* Between these, sums and products are neither contracted nor reordered. clang's back end may still contract
 * under -ffp-contract=fast and approximate square roots under -ffast-math: see dtrain__isa_rounded_f32 and DTRAIN__TRAIN_ROOT_base.
 * The program's own code after them is compiled as if they were not there. gcc's pragma also redefines the macros that
 * stand for its flags, and its end does not undo that: without DTRAIN__EXACT_MACROS, a <math.h> that the program
 * includes later would not declare the SIMD functions that -Ofast uses. */
#if defined(__clang__)
#define DTRAIN__EXACT_BEGIN _Pragma("float_control(precise, on, push)") _Pragma("clang fp contract(off)")
#define DTRAIN__EXACT_END _Pragma("float_control(pop)")
#elif defined(__GNUC__)
#define DTRAIN__EXACT_GCC                                                                                              \
    _Pragma("GCC push_options")                                                                                        \
        _Pragma("GCC optimize(\"O3\", \"no-fast-math\", \"no-unsafe-math-optimizations\", \"fp-contract=off\")")
#ifdef __CUDACC__ /* nvcc hands the pragma on, and warns that it does not know it; its macros were expanded before */
#define DTRAIN__EXACT_BEGIN                                                                                            \
    _Pragma("nv_diagnostic push") _Pragma("nv_diag_suppress 1675") DTRAIN__EXACT_GCC _Pragma("nv_diagnostic pop")
#define DTRAIN__EXACT_END _Pragma("GCC pop_options")
#else
#define DTRAIN__EXACT_BEGIN DTRAIN__EXACT_MACROS(push) DTRAIN__EXACT_GCC
#define DTRAIN__EXACT_END _Pragma("GCC pop_options") DTRAIN__EXACT_MACROS(pop)
#endif
#define DTRAIN__EXACT_MACROS(way)                                                                                      \
    DTRAIN__EXACT_MACRO(way##_macro("__OPTIMIZE__"))                                                                   \
    DTRAIN__EXACT_MACRO(way##_macro("__OPTIMIZE_SIZE__"))                                                              \
    DTRAIN__EXACT_MACRO(way##_macro("__FAST_MATH__"))                                                                  \
    DTRAIN__EXACT_MACRO(way##_macro("__FINITE_MATH_ONLY__"))                                                           \
    DTRAIN__EXACT_MACRO(way##_macro("__ASSOCIATIVE_MATH__"))                                                           \
    DTRAIN__EXACT_MACRO(way##_macro("__RECIPROCAL_MATH__"))                                                            \
    DTRAIN__EXACT_MACRO(way##_macro("__NO_SIGNED_ZEROS__"))                                                            \
    DTRAIN__EXACT_MACRO(way##_macro("__NO_TRAPPING_MATH__"))                                                           \
    DTRAIN__EXACT_MACRO(way##_macro("__NO_MATH_ERRNO__"))                                                              \
    DTRAIN__EXACT_MACRO(way##_macro("__ROUNDING_MATH__"))                                                              \
    DTRAIN__EXACT_MACRO(way##_macro("__SIGNALING_NANS__"))
#define DTRAIN__EXACT_MACRO(pragma) _Pragma(#pragma)
#else
#define DTRAIN__EXACT_BEGIN
#define DTRAIN__EXACT_END
#ifdef __FAST_MATH__
#error "dtrain.h: this compiler's fast-math cannot be held to IEEE 754; put #define DTRAIN_IMPLEMENTATION and #include \"dtrain.h\" into a file of their own and compile that one with -O2"
#endif
#endif

#endif
