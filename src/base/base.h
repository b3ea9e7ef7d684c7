/* ---- >>base ----
 * What all other parts of dtrain share. It calls nothing but the C library.
 *
 *   DTRAIN_API      and other macros that a program may set
 *   exact regions   pragmas that keep arithmetic to IEEE 754 whatever flags the program uses
 *   errors          status codes, error texts and the log callback
 *   memory          the allocator hook
 *   numbers         counter-based random numbers and SHA-256 */
#ifndef DTRAIN__BASE_H
#define DTRAIN__BASE_H

#ifdef DTRAIN_IMPLEMENTATION /* these macros must be set before the first system header */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#ifdef _WIN32 /* of Windows 10 */
#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0A00
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef __USE_MINGW_ANSI_STDIO
#define __USE_MINGW_ANSI_STDIO 1
#endif
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE 1
#endif
#ifndef _FILE_OFFSET_BITS /* a system of 32 bits else refuses files of 2 GiB, and files with large inode numbers */
#define _FILE_OFFSET_BITS 64
#endif
#if !defined(_TIME_BITS) && _FILE_OFFSET_BITS == 64 /* and times after 2038 */
#define _TIME_BITS 64
#endif
#include <limits.h>
#if defined(__GLIBC__) && !(defined(__USE_MISC) && defined(__USE_XOPEN2K8))
#error "dtrain.h: include it before any system header in the file that defines DTRAIN_IMPLEMENTATION, or compile that file with -D_DEFAULT_SOURCE"
#endif
#if defined(__GLIBC__) && ULONG_MAX == 0xffffffff && !defined(__USE_FILE_OFFSET64)
#error "dtrain.h: include it before any system header in the file that defines DTRAIN_IMPLEMENTATION, or compile that file with -D_FILE_OFFSET_BITS=64"
#endif
#endif

#if !defined(DTRAIN_MPI) && !defined(DTRAIN_NO_MPI) /* the one part that has to be asked for */
#define DTRAIN_NO_MPI
#endif

/* For small functions that many places call and whose cycles do not count: a single copy keeps the program smaller. */
#if defined(__GNUC__)
#define DTRAIN__NOINLINE __attribute__((noinline))
#else
#define DTRAIN__NOINLINE
#endif

/* Marks a function that takes a format and arguments, as printf does. On Windows gcc would take another printf's. */
#if defined(__MINGW32__) && !defined(__clang__)
#define DTRAIN__PRINTF(text, first) __attribute__((format(gnu_printf, text, first)))
#elif defined(__GNUC__)
#define DTRAIN__PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define DTRAIN__PRINTF(text, first)
#endif

/* Refuses to compile if a field of a struct in shared memory is not at its place: ranks of a host may have words of 32
 * and of 64 bits. */
#define DTRAIN__PLACED(type, field, at) extern char dtrain__placed[offsetof(type, field) == (at) ? 1 : -1]

/* Between these two, compilers neither contract nor reorder sums and products. clang's back end has two exceptions:
 *
 *   -ffp-contract=fast   it still contracts; dtrain__isa_rounded_f32 prevents that
 *   -ffast-math          it still approximates square roots; DTRAIN__TRAIN_ROOT_base prevents that
 *
 * The program's own code after them keeps its flags. gcc's pragma also redefines the macros that stand for flags, and
 * its end does not restore them: DTRAIN__EXACT_MACROS does. Without that, a <math.h> that the program includes later
 * would not declare the SIMD functions that -Ofast uses. */
#if defined(__clang__) && \
    (defined(__x86_64__) || defined(__i386__) || defined(__s390x__) || defined(__powerpc__) || \
     (defined(__aarch64__) && __clang_major__ >= 15) || \
     (defined(__riscv) && __clang_major__ >= 17)) /* for others it ignores the pragma, and warns */
#define DTRAIN__EXACT_BEGIN _Pragma("float_control(precise, on, push)") _Pragma("clang fp contract(off)")
#define DTRAIN__EXACT_END _Pragma("float_control(pop)")
#elif defined(__GNUC__) && !defined(__clang__)
#define DTRAIN__EXACT_GCC \
    _Pragma("GCC push_options") \
        _Pragma("GCC optimize(\"O3\", \"no-fast-math\", \"no-unsafe-math-optimizations\", \"fp-contract=off\")")
#ifdef __CUDACC__ /* nvcc passes the pragma on, but warns that it is unknown; its macros are expanded before */
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
#if defined(__clang__)
#define DTRAIN__EXACT_BEGIN _Pragma("STDC FP_CONTRACT OFF")
#define DTRAIN__EXACT_END _Pragma("STDC FP_CONTRACT DEFAULT")
#else
#define DTRAIN__EXACT_BEGIN
#define DTRAIN__EXACT_END
#endif
#if defined(__FAST_MATH__) && defined(DTRAIN_IMPLEMENTATION)
#error "dtrain.h: this compiler's fast-math cannot be held to IEEE 754 on this processor; put #define DTRAIN_IMPLEMENTATION and #include \"dtrain.h\" into a file of their own and compile that one with -O2"
#endif
#endif

/* Two units round in their own way: the x87 of 32-bit x86, which is gcc's default, and the NEON of 32-bit ARM, which
 * flushes subnormals and which clang takes. DTRAIN__UNIT_BEGIN and DTRAIN__UNIT_END enclose the implementation. */
#if defined(__i386__) && defined(__GNUC__) && !defined(__clang__)
#define DTRAIN__UNIT_BEGIN _Pragma("GCC push_options") _Pragma("GCC target(\"sse2,fpmath=sse\")")
#define DTRAIN__UNIT_END _Pragma("GCC pop_options")
#elif defined(__arm__) && defined(__ARM_NEON) && defined(__clang__)
#define DTRAIN__UNIT_BEGIN _Pragma("clang attribute push(__attribute__((target(\"no-neon\"))), apply_to = function)")
#define DTRAIN__UNIT_END _Pragma("clang attribute pop")
#else
#define DTRAIN__UNIT_BEGIN
#define DTRAIN__UNIT_END
#endif

/* After the tensor kernels gcc compiles for size, since no step waits for that code. DTRAIN__FAST_BEGIN and
 * DTRAIN__FAST_END enclose the exceptions. Other compilers have no pragma for it. On 32-bit x86 it would end the use of
 * SSE2. gcc saves macros ahead of its pragmas, so a declaration must stand between DTRAIN__SMALL_BEGIN and the next of
 * these macros. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && defined(__OPTIMIZE__) && !defined(__i386__)
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

/* The version of this header. Packages read it here.
 *
 *   patch   programs run with the new library as they are
 *   minor   sources compile as they are, but compile them again: structs may have new fields
 *   major   sources may need changes; while major is 0, a new minor may too
 *
 * The linker refuses a file whose header has another major or minor than the implementation has. It names
 * dtrain__all_files_need_dtrain_h_ and the version that the file needs: compile all files with one dtrain.h.
 *
 * What ranks send to each other and what files hold have versions of their own, which their readers check. */
#define DTRAIN_VERSION_MAJOR 0
#define DTRAIN_VERSION_MINOR 2
#define DTRAIN_VERSION_PATCH 0
#define DTRAIN_VERSION (10000 * DTRAIN_VERSION_MAJOR + 100 * DTRAIN_VERSION_MINOR + DTRAIN_VERSION_PATCH)

#ifndef DTRAIN_API
#define DTRAIN_API extern
#endif

/* Opens the declaration of every function that returns dtrain_status. Compilers warn if a call's result is ignored. */
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

/* Returns the DTRAIN_VERSION that the library was compiled with. A program that loads a shared library at run time
 * compares dtrain_version() / 100 with the number that its structs were written for.
 *
 * any thread */
DTRAIN_API int dtrain_version(void);

/* Ties every file that includes this header to an implementation of the same major and minor version, whose structs are
 * the same. The implementation defines a function that has the version in its name. Other files keep its address, one
 * pointer each, which nothing reads. Microsoft's linker compares the text of the pragma. */
#define DTRAIN__TIE_NAME(major, minor) dtrain__all_files_need_dtrain_h_##major##_##minor
#define DTRAIN__TIE_EXPANDED(major, minor) DTRAIN__TIE_NAME(major, minor)
#define DTRAIN__TIE DTRAIN__TIE_EXPANDED(DTRAIN_VERSION_MAJOR, DTRAIN_VERSION_MINOR)
DTRAIN_API void DTRAIN__TIE(void);
#if defined(_MSC_VER)
#define DTRAIN__TIE_TEXT_OF(name) #name
#define DTRAIN__TIE_TEXT(name) DTRAIN__TIE_TEXT_OF(name)
#pragma detect_mismatch("dtrain.h", DTRAIN__TIE_TEXT(DTRAIN__TIE))
#elif defined(__GNUC__) && !defined(DTRAIN_IMPLEMENTATION) && !defined(DTRAIN_DECLARATIONS_ONLY)
__attribute__((__used__)) static void (*const dtrain__tie)(void) = DTRAIN__TIE;
#endif

/* The result of every call that can fail. There are few codes, one for each thing that a caller can do about an error.
 * No two enums share a constant except 0, so the library detects swapped arguments. */
typedef enum dtrain_status {
    DTRAIN_OK = 0,
    DTRAIN_ERR_INVALID = 31, /* an argument is wrong: correct the call */
    DTRAIN_ERR_MEMORY,       /* the allocator is out of memory */
    DTRAIN_ERR_IO,           /* the system refused a file, thread or socket */
    DTRAIN_ERR_TIMEOUT,      /* the deadline passed; the text says which rank the call waited for */
    DTRAIN_ERR_PEER_LOST,    /* another rank has left or died */
    DTRAIN_ERR_MISMATCH,     /* ranks made different calls; the text quotes both */
    DTRAIN_ERR_CORRUPT,      /* data from a file or a peer breaks its format */
    DTRAIN_ERR_UNSUPPORTED,  /* legal, but not on this build, system or transport */
    DTRAIN_ERR_DENIED,       /* a peer did not prove that it belongs here */
    DTRAIN_ERR_ABORTED       /* a rank cancelled the work on purpose */
} dtrain_status;

/* Returns the constant's name without its prefix, such as "OK" or "ERR_TIMEOUT"; never NULL.
 *
 * any thread */
DTRAIN_API const char *dtrain_status_name(dtrain_status status);

/* Returns the text of the last error that a call reported to the calling thread; never NULL.
 *
 * The text stays valid until the next failing call of this thread. It is empty before the first error.
 *
 * any thread */
DTRAIN_API const char *dtrain_last_error(void);

/* Sets the calling thread's last error and returns `status`.
 *
 * Use it in transports, devices and callbacks of your own: `return dtrain_error_set(DTRAIN_ERR_IO, "...");`
 *
 *   format    as for printf, one line; the arguments may include dtrain_last_error(). Texts are cut at 639 bytes.
 *             Bytes that are not printable UTF-8 become '?'
 *
 * any thread */
DTRAIN__PRINTF(2, 3)
DTRAIN_API_MUST dtrain_status dtrain_error_set(dtrain_status status, const char *format, ...);

/* Evaluates a call. If it fails, prints its error to stderr and ends the process with status 1.
 * The macro expands in the program's own code; the library itself never exits. */
#define DTRAIN_CHECK(call) \
    do { \
        dtrain_status dtrain_check_status_ = (call); \
        if (dtrain_check_status_ != DTRAIN_OK) { \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, dtrain_status_name(dtrain_check_status_), \
                    dtrain_last_error()); \
            exit(1); \
        } \
    } while (0)

/* Evaluates a call and ignores its result on purpose, without a compiler's warning. It is an expression of type void.
 * A cast to void alone does not silence gcc. */
#define DTRAIN_IGNORE(call) ((void)((call) == DTRAIN_OK))

typedef enum dtrain_log_level { DTRAIN_LOG_INFO = 1401, DTRAIN_LOG_WARN, DTRAIN_LOG_ERROR } dtrain_log_level;

/* Receives one line of text without a newline.
 *
 * A thread of the library's own calls it, one line at a time, so a callback that blocks holds no rank. That thread
 * starts when there is a line and ends with the last one. It blocks all signals. The thread that logged waits up to
 * 100 ms for the callback, unless an earlier line is still late. 32 lines wait at most; others are counted, and a line
 * tells the count. If the system refuses a thread, the one that logs makes the call.
 *
 * It must not call into the group that the line is about. */
typedef void (*dtrain_log_fn)(void *user, dtrain_log_level level, const char *text);

/* Sets the log callback of the process. Without it, warnings and errors go to stderr in the same way. A full pipe or
 * a file system that hangs then delays lines, not ranks. Late lines get up to 100 ms in dtrain_comm_destroy, and up
 * to 500 ms in exit() and in this call. This call also waits until the old callback has returned.
 *
 *   log    NULL silences the library; must stay valid until it is replaced
 *   user   passed to log; must stay valid as long
 *
 * one thread per object: no other call may be running; call it before other threads use the library */
DTRAIN_API void dtrain_set_log(dtrain_log_fn log, void *user);

/* Allocates, resizes or frees a block.
 *
 *   pointer     the block; NULL allocates a new one
 *   old_bytes   its size; 0 if pointer is NULL
 *   new_bytes   0 frees the block and returns NULL
 *   align       a power of two, at most 4096; kept across a resize
 *   returns     the block with its first min(old_bytes, new_bytes) bytes kept; NULL if there is no memory, and the old
 *               block stays unchanged
 *
 * any thread */
typedef void *(*dtrain_resize_fn)(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align);

/* The source of an object's memory, and a count of how much is in use.
 *
 * Set resize and user and zero the rest. The allocator must outlive its objects. Objects that share one add to the
 * same counters. The library asks resize for 64 bytes more per block, to keep the block's size; the counters leave
 * them out. To replace the default for allocators whose resize is NULL, define the macro DTRAIN_RESIZE(user, pointer,
 * old_bytes, new_bytes, align) before the implementation. */
typedef struct dtrain_allocator {
    dtrain_resize_fn resize; /* NULL: the C library */
    void *user;
    size_t bytes;      /* in use now; the library writes it */
    size_t peak_bytes; /* the most in use at once; the library writes it */
} dtrain_allocator;

/* Returns 64 random bits: value `index` of stream `seed`.
 *
 * The two arguments alone decide the value, so any rank or thread can compute any part of a stream.
 *
 *   source   Philox4x32-10: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011
 *
 * any thread */
DTRAIN_API uint64_t dtrain_random_u64(uint64_t seed, uint64_t index);

/* Returns a float of the uniform distribution over [0, 1), a multiple of 2^-24: value `index` of stream `seed`.
 *
 * any thread */
DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t index);

/* Returns a float of the normal distribution with mean 0 and standard deviation 1: value `index` of stream `seed`.
 *
 * Every machine computes the same bits.
 *
 *   source   Box, Muller, Annals of Mathematical Statistics 29(2), 1958
 *
 * any thread */
DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t index);

/* Writes the SHA-256 of `bytes` bytes at data to digest.
 *
 *   source   FIPS 180-4
 *
 * any thread */
DTRAIN_API void dtrain_sha256(const void *data, size_t bytes, unsigned char digest[32]);

#ifdef __cplusplus
}
#endif

#endif
