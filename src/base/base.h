/* ---- >>base ----
 * What every floor shares in public: what the implementation needs of system headers, which is settled before any of
 * them; the pragmas that keep a region's arithmetic to the letter of IEEE 754 whatever flags the program uses; the
 * macros a program may set, status codes and error texts, the log callback, the allocator hook, counter-based random
 * numbers and SHA-256. Calls nothing but the C library. */
#ifndef DTRAIN__BASE_H
#define DTRAIN__BASE_H

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
 * under -ffp-contract=fast and approximate square roots under -ffast-math: see dtrain__isa_rounded_f32 and
 * DTRAIN__TRAIN_ROOT_base. The program's own code after them is compiled as if they were not there. gcc's pragma also
 * redefines the macros that stand for its flags, and its end does not undo that: without DTRAIN__EXACT_MACROS, a
 * <math.h> that the program includes later would not declare the SIMD functions that -Ofast uses. */
#if defined(__clang__)
#define DTRAIN__EXACT_BEGIN _Pragma("float_control(precise, on, push)") _Pragma("clang fp contract(off)")
#define DTRAIN__EXACT_END _Pragma("float_control(pop)")
#elif defined(__GNUC__)
#define DTRAIN__EXACT_GCC \
    _Pragma("GCC push_options") \
        _Pragma("GCC optimize(\"O3\", \"no-fast-math\", \"no-unsafe-math-optimizations\", \"fp-contract=off\")")
#ifdef __CUDACC__ /* nvcc hands the pragma on, and warns that it does not know it; its macros were expanded before */
#define DTRAIN__EXACT_BEGIN \
    _Pragma("nv_diagnostic push") _Pragma("nv_diag_suppress 1675") DTRAIN__EXACT_GCC _Pragma("nv_diagnostic pop")
#define DTRAIN__EXACT_END _Pragma("GCC pop_options")
#else
#define DTRAIN__EXACT_BEGIN DTRAIN__EXACT_MACROS(push) DTRAIN__EXACT_GCC
#define DTRAIN__EXACT_END _Pragma("GCC pop_options") DTRAIN__EXACT_MACROS(pop)
#endif
#define DTRAIN__EXACT_MACROS(way) \
    DTRAIN__EXACT_MACRO(way##_macro("__OPTIMIZE__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__OPTIMIZE_SIZE__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__FAST_MATH__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__FINITE_MATH_ONLY__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__ASSOCIATIVE_MATH__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__RECIPROCAL_MATH__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__NO_SIGNED_ZEROS__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__NO_TRAPPING_MATH__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__NO_MATH_ERRNO__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__ROUNDING_MATH__")) \
    DTRAIN__EXACT_MACRO(way##_macro("__SIGNALING_NANS__"))
#define DTRAIN__EXACT_MACRO(pragma) _Pragma(#pragma)
#else
#define DTRAIN__EXACT_BEGIN
#define DTRAIN__EXACT_END
#ifdef __FAST_MATH__
#error "dtrain.h: this compiler's fast-math cannot be held to IEEE 754; put #define DTRAIN_IMPLEMENTATION and #include \"dtrain.h\" into a file of their own and compile that one with -O2"
#endif
#endif

/* Above tensors, gcc compiles for size what does not stand between DTRAIN__FAST_BEGIN and DTRAIN__FAST_END, as no step
 * waits for it. Other compilers have no pragma for that. A declaration stands between DTRAIN__SMALL_BEGIN and what
 * follows of these, as gcc saves macros ahead of its pragmas. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && defined(__OPTIMIZE__)
#define DTRAIN__SMALL_BEGIN \
    DTRAIN__EXACT_MACROS(push) _Pragma("GCC push_options") _Pragma("GCC optimize(\"Os\")")
#define DTRAIN__SMALL_END _Pragma("GCC pop_options") DTRAIN__EXACT_MACROS(pop)
#define DTRAIN__FAST_BEGIN DTRAIN__EXACT_MACROS(push) _Pragma("GCC push_options") _Pragma("GCC reset_options")
#define DTRAIN__FAST_END DTRAIN__SMALL_END
#else
#define DTRAIN__SMALL_BEGIN
#define DTRAIN__SMALL_END
#define DTRAIN__FAST_BEGIN
#define DTRAIN__FAST_END
#endif

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef DTRAIN_API
#define DTRAIN_API extern
#endif

/* Opens the declaration of every function that returns dtrain_status: compilers warn of a call whose result is left. */
#if defined(__GNUC__) || defined(__clang__)
#define DTRAIN_API_MUST __attribute__((__warn_unused_result__)) DTRAIN_API
#elif (defined(__cplusplus) && __cplusplus >= 201703L) || (defined(__STDC_VERSION__) && __STDC_VERSION__ >= 202311L)
#define DTRAIN_API_MUST [[nodiscard]] DTRAIN_API
#elif defined(_MSC_VER) && defined(_Check_return_)
#define DTRAIN_API_MUST _Check_return_ DTRAIN_API
#else
#define DTRAIN_API_MUST DTRAIN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a fallible call returns. Few codes, one for each thing a caller can do about it. The constants of all enums are
 * disjoint, but for their zeroes, so that arguments that were swapped are refused. */
typedef enum dtrain_status {
    DTRAIN_OK = 0,
    DTRAIN_ERR_INVALID = 31, /* an argument is wrong: correct the call */
    DTRAIN_ERR_MEMORY,       /* the allocator has no more to give */
    DTRAIN_ERR_IO,           /* the system refused a file, thread or socket */
    DTRAIN_ERR_TIMEOUT,      /* the deadline passed; the text says who was awaited */
    DTRAIN_ERR_PEER_LOST,    /* another rank has left or died */
    DTRAIN_ERR_MISMATCH,     /* ranks made different calls; the text quotes both */
    DTRAIN_ERR_CORRUPT,      /* data from outside breaks its format */
    DTRAIN_ERR_UNSUPPORTED,  /* legal, but not on this build, system or transport */
    DTRAIN_ERR_DENIED,       /* a peer did not prove that it belongs here */
    DTRAIN_ERR_ABORTED       /* cancelled by a rank on purpose */
} dtrain_status;

/* Returns the constant's name without its prefix, "OK" or "ERR_TIMEOUT"; never NULL.
 *
 * any thread */
DTRAIN_API const char *dtrain_status_name(dtrain_status status);

/* Returns the text of the last error that a dtrain call reported to the calling thread; never NULL.
 *
 * The text stays valid until the next failing call of this thread. It is empty before the first.
 *
 * any thread */
DTRAIN_API const char *dtrain_last_error(void);

/* Sets the calling thread's last error: for transports, devices and callbacks of your own, which return its result.
 *
 *   format    as printf's, one line; longer texts are cut at 639 bytes. What is not printable UTF-8 becomes '?'. What
 *             it quotes may be dtrain_last_error()
 *   returns   status
 *
 * any thread */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
DTRAIN_API_MUST dtrain_status dtrain_error_set(dtrain_status status, const char *format, ...);

/* Evaluates a call and, when it fails, prints its error and ends the process with status 1.
 * Expands in the program's own code; the library itself never exits. */
#define DTRAIN_CHECK(call) \
    do { \
        dtrain_status dtrain_check_status_ = (call); \
        if (dtrain_check_status_ != DTRAIN_OK) { \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, dtrain_status_name(dtrain_check_status_), \
                    dtrain_last_error()); \
            exit(1); \
        } \
    } while (0)

/* Evaluates a call and leaves its result on purpose, where a compiler warns of a result that nobody reads.
 * An expression of type void. A cast to void alone does not silence gcc. */
#define DTRAIN_IGNORE(call) ((void)((call) == DTRAIN_OK))

typedef enum dtrain_log_level { DTRAIN_LOG_INFO = 1401, DTRAIN_LOG_WARN, DTRAIN_LOG_ERROR } dtrain_log_level;

/* Receives one line of text without a newline; called from any thread, one at a time per thread. It must not call
 * back into the group that it hears of, and should return soon: the thread may have heartbeats to send. */
typedef void (*dtrain_log_fn)(void *user, dtrain_log_level level, const char *text);

/* Sets the process's log callback; NULL silences the library. By default warnings and errors go to stderr.
 *
 *   log, user   must stay valid until replaced, and no call may be running while they are replaced
 *
 * one thread per object: call it before other threads use the library */
DTRAIN_API void dtrain_set_log(dtrain_log_fn log, void *user);

/* Resizes a block: new_bytes of 0 frees it and returns NULL; a NULL pointer allocates.
 *
 *   align     a power of two, at most 4096; kept across a resize
 *   returns   the block, its first min(old_bytes, new_bytes) bytes kept; NULL when there is no memory,
 *             and then the old block is untouched
 *
 * any thread */
typedef void *(*dtrain_resize_fn)(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align);

/* Where an object's memory comes from, and how much of it is in use.
 *
 * A program sets resize and user and zeroes the rest; objects given the same allocator add to the same
 * counters. It must outlive them. The library asks resize for 64 bytes more for each block, where it keeps the block's
 * size; the counters leave them out. The macro DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align),
 * defined before the implementation, replaces the default for allocators whose resize is NULL. */
typedef struct dtrain_allocator {
    dtrain_resize_fn resize; /* NULL: the C library */
    void *user;
    size_t bytes;      /* in use now; written by the library */
    size_t peak_bytes; /* the most that was in use at once; written by the library */
} dtrain_allocator;

/* Returns 64 random bits: value `index` of the stream `seed`.
 *
 * any thread */
DTRAIN_API uint64_t dtrain_random_u64(uint64_t seed, uint64_t index);

/* Returns a float drawn evenly from [0, 1): a multiple of 2^-24.
 *
 * any thread */
DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t index);

/* Returns a float drawn from the normal distribution of mean 0 and deviation 1, the same bits on every machine.
 *
 * any thread */
DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t index);

/* Writes the SHA-256 of `bytes` bytes at data to digest.
 *
 *   source   FIPS 180-4
 *
 * any thread */
DTRAIN_API void dtrain_sha256(const void *data, size_t bytes, unsigned char digest[32]);

/* Whether DTRAIN_WITHOUT names a thing that not every machine has (see >>os): shared with dtrain_cuda.h.
 *
 * any thread */
DTRAIN_API int dtrain__without(const char *what);

#ifdef __cplusplus
}
#endif

#endif
