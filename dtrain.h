/* dtrain.h - distributed training in one C header. Public domain or MIT, at your choice: see LICENSE.
 *
 * A C program that already trains something copies this file, writes
 *
 *     #define DTRAIN_IMPLEMENTATION
 *     #include "dtrain.h"          (first, before any system header)
 *
 * in one source file, includes it without the define in others, links -lpthread -lm, and trains data-parallel on
 * threads, on processes, or on many hosts.
 *
 * CONTENTS (search for the mark)
 *     >>base         status codes, errors, log, allocator, random numbers, SHA-256
 *     >>tensor       element types, conversions, tensors, the matrix product
 *     >>transport    the table to fill for a transport of your own
 *     >>comm         groups of threads and processes, the environment, collectives, asynchronous and fused work, groups
 *                    of groups, survivors, the store
 *     >>order        the order in which a reduction adds
 *     >>train        parameter table, sampler, optimizers, schedules, DDP
 *     >>fsdp         parameters, gradients and optimizer state sharded over ranks; hybrid sharding
 *     >>module       a model as a list of layers that the library gathers, calls and reduces
 *
 * DATA-PARALLEL IN AN EXISTING TRAINER
 *
 *     dtrain_comm *world;
 *     DTRAIN_CHECK(dtrain_comm_create(&world, NULL));
 *     DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0));
 *     ...
 *     DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN));
 *     ...
 *     dtrain_comm_destroy(world);
 *
 * The same as n threads: put it into a function dtrain_status train(dtrain_comm *world, void *user) and call
 * dtrain_run_threads(n, train, user, NULL); or get n connected ends from dtrain_threads_create.
 *
 * PROCESSES AND HOSTS: the first snippet again, under a launcher whose variables dtrain_comm_create knows (see
 * dtrain_comm_desc), or with rank, world_size and root in the desc:
 *
 *     dtrain_comm_desc desc = {0};
 *     desc.rank = 1, desc.world_size = 4, desc.root = "10.0.0.1:29500", desc.token = secret;
 *     DTRAIN_CHECK(dtrain_comm_create(&world, &desc));
 *
 * OPTIMIZER STATE SHARDED: reduce_scatter gradients, update my slice (dtrain_shard), all_gather parameters.
 *
 * FULLY SHARDED: declare parameters once, in a table of dtrain_param; their memory is there only while a layer runs.
 *
 *     DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc));
 *     float *qkvw = dtrain_fsdp_param(fsdp, "qkvw");
 *     ...                                              forward, layer after layer
 *     DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, layer));   also starts the next one
 *     DTRAIN_CHECK(dtrain_fsdp_release(fsdp, layer));
 *     ...                                              backward: gather, compute, dtrain_fsdp_reduce(fsdp, layer)
 *     DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, &norm));
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *
 * CONVENTIONS
 *     Status    Every fallible call returns dtrain_status, 0 for success. dtrain_last_error() is the calling thread's
 *               text: what was expected, what came, which rank, which operation and its number. The library never
 *               exits, aborts or raises a signal. DTRAIN_CHECK prints and exits, in your code only.
 *     Desc      Create calls take a desc struct: zero it, set what differs; zero means the default.
 *     Counts    Elements, and always the total, whatever the number of ranks divides; shards differ by at most one
 *               element, earlier ranks longer. In place means that a rank's part stays at its offset.
 *     Order     A reduction adds by one tree over ranks, the same bits on every rank, transport and algorithm, unless
 *               the desc says DTRAIN_ORDER_ANY or names an algorithm with an order of its own (dtrain_algorithm).
 *     Bits      Kernels, conversions, folds and optimizers give the same bits under any compiler flags and
 *               instruction set; matrix products those of the instruction set, which the environment variable
 *               DTRAIN_ISA (scalar, sse2, avx2, avx512) can narrow.
 *     Threads   One line on each function: any thread; one thread per object; collective. Library threads block all
 *               signals.
 *     Memory    From the desc's allocator, which counts bytes and their peak. A warm training loop allocates nothing.
 *     Groups    dtrain_comm_split, _duplicate, _subgroup and dtrain_mesh_create make groups of a group's ranks. Several
 *               may be used at once, from several threads; what breaks one leaves the others as they are.
 *     Time      Every blocking call has a deadline, 60 seconds unless the desc says otherwise. A call that expires
 *               before anything moved can be made again; after that the group is broken and says why.
 *
 *     Failure   A rank that dies, leaves or is silent for heartbeat_ms ends every later operation of its groups on
 *               every rank, with its number and the first cause; dtrain_comm_abort does so by hand. Rank 0, or the
 *               lowest that is left, tells the others. The survivors may go on: dtrain_comm_shrink makes a group of
 *               them, dtrain_resync brings all to the state of the furthest.
 *     Diagnosis Each rank keeps its last 256 operations (dtrain_comm_trace; DTRAIN_TRACE=PREFIX in the environment
 *               writes PREFIX.rank-N.json on failure), and heartbeats carry the last one: the text of a deadline says
 *               what the awaited rank does, and whom it awaits in turn.
 *     Strangers Connections are admitted by a mutual HMAC-SHA256 challenge over the group's token; without a token only
 *               this host is spoken to. Traffic is neither encrypted nor signed.
 *
 * MACROS, before the implementation
 *     DTRAIN_API static                  nothing of dtrain is visible outside the file
 *     DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align)   another allocator behind everything
 *     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)   your BLAS
 */

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

/* Between these, sums and products are neither contracted nor reordered. clang's back end may still contract
 * under -ffp-contract=fast and approximate square roots under -ffast-math: see DTRAIN__ROUNDED and dtrain__sqrt. */
#if defined(__clang__)
#define DTRAIN__EXACT_BEGIN _Pragma("float_control(precise, on, push)") _Pragma("clang fp contract(off)")
#define DTRAIN__EXACT_END _Pragma("float_control(pop)")
#elif defined(__GNUC__)
#define DTRAIN__EXACT_BEGIN \
    _Pragma("GCC push_options") \
    _Pragma("GCC optimize(\"O3\", \"no-fast-math\", \"no-unsafe-math-optimizations\", \"fp-contract=off\")")
#define DTRAIN__EXACT_END _Pragma("GCC pop_options")
#else
#define DTRAIN__EXACT_BEGIN
#define DTRAIN__EXACT_END
#ifdef __FAST_MATH__
#error "dtrain.h: this compiler's fast-math cannot be held to IEEE 754; put #define DTRAIN_IMPLEMENTATION and #include \"dtrain.h\" into a file of their own and compile that one with -O2"
#endif
#endif

#endif

/* ---- >>base ----
 * What every floor shares in public: the macros a program may set, status codes and error texts,
 * the log callback, the allocator hook, counter-based random numbers and SHA-256.
 * Calls nothing but the C library. */
#ifndef DTRAIN__BASE_H
#define DTRAIN__BASE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef DTRAIN_API
#define DTRAIN_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a fallible call returns. Few codes, one for each thing a caller can do about it. */
typedef enum dtrain_status {
    DTRAIN_OK = 0,
    DTRAIN_ERR_INVALID,     /* an argument is wrong: correct the call */
    DTRAIN_ERR_MEMORY,      /* the allocator has no more to give */
    DTRAIN_ERR_IO,          /* the system refused a file, thread or socket */
    DTRAIN_ERR_TIMEOUT,     /* the deadline passed; the text says who was awaited */
    DTRAIN_ERR_PEER_LOST,   /* another rank has left or died */
    DTRAIN_ERR_MISMATCH,    /* ranks made different calls; the text quotes both */
    DTRAIN_ERR_CORRUPT,     /* data from outside breaks its format */
    DTRAIN_ERR_UNSUPPORTED, /* legal, but not on this build, system or transport */
    DTRAIN_ERR_DENIED,      /* a peer did not prove that it belongs here */
    DTRAIN_ERR_ABORTED      /* cancelled by a rank on purpose */
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

/* Evaluates a call and, when it fails, prints its error and ends the process with status 1.
 * Expands in the program's own code; the library itself never exits. */
#define DTRAIN_CHECK(call)                                                                                             \
    do {                                                                                                               \
        dtrain_status dtrain_check_status_ = (call);                                                                   \
        if (dtrain_check_status_ != DTRAIN_OK) {                                                                       \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, dtrain_status_name(dtrain_check_status_),           \
                    dtrain_last_error());                                                                              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

typedef enum dtrain_log_level { DTRAIN_LOG_INFO = 1, DTRAIN_LOG_WARN, DTRAIN_LOG_ERROR } dtrain_log_level;

/* Receives one line of text without a newline; called from any thread, one at a time per thread. It must not call
 * back into the group that it hears of. */
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
 * counters. It must outlive them. The macro DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align),
 * defined before the implementation, replaces the default for allocators whose resize is NULL. */
typedef struct dtrain_allocator {
    dtrain_resize_fn resize; /* NULL: the C library */
    void *user;
    size_t bytes;      /* in use now; written by the library */
    size_t peak_bytes; /* the most that was in use at once; written by the library */
} dtrain_allocator;

/* Fills out with the four 32-bit words number `index` of the stream `seed`.
 *
 * A value depends on seed and index alone: any thread may compute any part of a stream, in any order.
 *
 *   source   Philox4x32-10: Salmon, Moraes, Dror, Shaw, SC 2011
 *
 * any thread */
DTRAIN_API void dtrain_random_u32x4(uint64_t seed, uint64_t index, uint32_t out[4]);

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

#ifdef __cplusplus
}
#endif

#endif

/* ---- >>tensor ----
 * Element types, conversions between them, and dtrain_tensor: a shape over memory, row-major.
 * Arithmetic here gives the same bits under any compiler flags and instruction set; matrix products
 * give those of the instruction set in use. */
#ifndef DTRAIN__TENSOR_H
#define DTRAIN__TENSOR_H

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
    dtrain_allocator *allocator; /* NULL: a view, which owns nothing */
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

/* Frees what the tensor owns and zeroes it. NULL and views are legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor);

/* Copies part `part` of `parts` of a tensor along dimension dim into a new tensor that owns its memory.
 *
 *   parts     any number of at least 1; earlier parts are one longer, parts beyond the size are empty
 *   errors    DTRAIN_ERR_INVALID  dim, parts or part out of range, or elements narrower than a byte
 *             DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_shard(dtrain_tensor *shard, const dtrain_tensor *whole, int dim, int parts,
                                             int part, dtrain_allocator *allocator);

/* Joins shards along dimension dim into a new tensor: the inverse of dtrain_tensor_shard.
 *
 *   shards    parts tensors in order, equal in dtype and in every size but that of dim
 *   errors    DTRAIN_ERR_INVALID  shards that do not fit together; the text names the first
 *             DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_tensor_unshard(dtrain_tensor *whole, const dtrain_tensor *shards, int parts, int dim,
                                               dtrain_allocator *allocator);

/* out[i] = a[i] + b[i] over F64, F32, F16 or BF16 tensors of one dtype and shape; any of them may be the same.
 * 16-bit floats add as float32 and round once.
 *
 *   errors   DTRAIN_ERR_INVALID  shapes or dtypes differ; DTRAIN_ERR_UNSUPPORTED another dtype
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_tensor_add(dtrain_tensor *out, const dtrain_tensor *a, const dtrain_tensor *b);

/* x[i] *= factor, with the dtypes, rounding and errors of dtrain_tensor_add.
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_tensor_scale(dtrain_tensor *x, double factor);

/* y[i] += alpha * x[i], product and sum each rounded, with the dtypes and errors of dtrain_tensor_add.
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_tensor_axpy(dtrain_tensor *y, double alpha, const dtrain_tensor *x);

/* Adds bias to every row of the last dimension of an F32 tensor.
 *
 *   bias     F32, one dimension, of x's last size
 *   errors   as dtrain_tensor_add
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_tensor_add_bias(dtrain_tensor *x, const dtrain_tensor *bias);

/* Sums the squares of an F64, F32, F16 or BF16 tensor in float64: squares exact for F32 and narrower, blocks of
 * 8 lanes added in index order, the same bits everywhere.
 *
 *   errors   DTRAIN_ERR_UNSUPPORTED  another dtype
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_tensor_sum_squares(double *sum, const dtrain_tensor *x);

/* out = op(a) x op(b), or out += it, over F32 matrices.
 *
 *   a, b         two dimensions; transpose_a and transpose_b of 1 take them transposed
 *   accumulate   1: adds to out
 *   errors       DTRAIN_ERR_INVALID  the sizes do not meet; DTRAIN_ERR_UNSUPPORTED another dtype
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

/* ---- >>transport ----
 * How bytes get from rank to rank. A transport knows nothing of tensors: it is two functions over a
 * reliable, ordered stream of bytes from each rank to each other one. Fill the table, give it to
 * dtrain_comm_from_transport, and every collective runs over it. */
#ifndef DTRAIN__TRANSPORT_H
#define DTRAIN__TRANSPORT_H

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks of one address space; made by the threads transport only. */
typedef struct dtrain__board dtrain__board;

/* A run of bytes on its way to or from one peer. */
typedef struct dtrain_transfer {
    int peer;
    unsigned char *data; /* read when it is sent, written when it is received */
    size_t bytes;
    size_t moved; /* of bytes; the transport adds to it */
    int more;     /* sending: more to the same peer follows at once; a transport may wait for it */
} dtrain_transfer;

/* One rank's end of a transport.
 *
 * send and recv move up to `bytes` bytes of the stream to or from `peer` and set *moved, on every return,
 * to how many went. They return
 *
 *   DTRAIN_OK             all of them went
 *   DTRAIN_ERR_TIMEOUT    the clock CLOCK_MONOTONIC passed deadline_ns with some left. A deadline in the past
 *                         asks for what can be done without waiting; INT64_MAX never comes
 *   DTRAIN_ERR_PEER_LOST  the peer's end is closed
 *   another status        the transport is of no more use
 *
 * The core orders blocking calls so that sends that wait for their receivers never form a cycle. It calls from
 * one thread at a time; in poll mode only with past deadlines. The rest is optional, and NULL where it is missing:
 *
 *   exchange   sends and receives at once (either may be NULL) until one of the two is complete; returns as send does
 *   poll       looks after connections until deadline_ns or until woken; called by the service thread, which then
 *              starts with the group, or by dtrain_comm_poll
 *   wake       cuts a blocked poll short; any thread
 *   fail       tells the peers that the group is broken, and why; any thread
 *   leave      tells the peers that this rank goes, and why (may be empty); right before destroy */
typedef struct dtrain_transport {
    void *self; /* given to every function */
    int rank;
    int size;
    dtrain_status (*send)(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved);
    dtrain_status (*recv)(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved);
    void (*destroy)(void *self); /* may be NULL; called once, by dtrain_comm_destroy */
    dtrain_status (*exchange)(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns);
    void (*poll)(void *self, int64_t deadline_ns);
    void (*wake)(void *self);
    void (*fail)(void *self, dtrain_status why, const char *text);
    void (*leave)(void *self, const char *why);
    dtrain__board *board; /* NULL in transports of your own */
} dtrain_transport;

#ifdef __cplusplus
}
#endif

#endif

/* ---- >>comm ----
 * Groups of ranks and the collectives between them. A dtrain_comm is one rank's end of a group; every
 * rank of the group makes the same collective calls in the same order. Results of reductions follow
 * one order of operations (see >>order), the same bits on every rank and transport.
 *
 * ---- >>order ----
 * The balanced binary tree over ranks whose left part is the largest power of two below their number:
 * two ranks x0 + x1; four (x0 + x1) + (x2 + x3); five ((x0 + x1) + (x2 + x3)) + x4. A mean is the tree's
 * sum divided once. 16-bit floats are summed as float32 and rounded once. */
#ifndef DTRAIN__COMM_H
#define DTRAIN__COMM_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_comm dtrain_comm;
typedef struct dtrain_work dtrain_work;

/* The order in which a reduction combines the ranks' values. */
typedef enum dtrain_order {
    DTRAIN_ORDER_TREE = 0, /* see >>order */
    DTRAIN_ORDER_ANY = 401 /* whatever is fastest; still the same bits on every rank */
} dtrain_order;

/* How a collective moves its data. RING and DOUBLE_TREE add in an order of their own, NODES too where
 * the ranks of a node are no power of two; the others in the tree order. What
 * a collective has no form of, or not for this number of ranks, is chosen for it.
 *
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; RING: Patarasuk, Yuan, J. Parallel Distrib. Comput. 69(2),
 * 2009; BRUCK: Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 8(11), 1997; DOUBLE_TREE: Sanders, Speck, Traeff,
 * Parallel Computing 35(12), 2009; binary blocks of HALVING_DOUBLING: Rabenseifner, ICCS 2004. */
typedef enum dtrain_algorithm {
    DTRAIN_ALGORITHM_AUTO = 0,
    DTRAIN_ALGORITHM_FUSED = 201,        /* one address space: each rank does its share on every rank's buffer */
    DTRAIN_ALGORITHM_RECURSIVE_DOUBLING, /* whole vectors between partners; worlds of a power of two, others TREE */
    DTRAIN_ALGORITHM_TREE,               /* whole vectors up to a rank and down again */
    DTRAIN_ALGORITHM_RING,               /* parts from neighbour to neighbour */
    DTRAIN_ALGORITHM_HALVING_DOUBLING,   /* all_reduce: halves of halves, each rank folds a part */
    DTRAIN_ALGORITHM_DIRECT,             /* every pair of ranks exchanges once */
    DTRAIN_ALGORITHM_BRUCK,              /* everything to everyone in few steps, folded by each */
    DTRAIN_ALGORITHM_NODES,              /* all_reduce: inside nodes, then between their first ranks */
    DTRAIN_ALGORITHM_DOUBLE_TREE         /* all_reduce: pieces in turn over two trees */
} dtrain_algorithm;

typedef enum dtrain_progress {
    DTRAIN_PROGRESS_THREAD = 0, /* a service thread drives async work, and the connections of processes; ranks of one
                                 * process start it with their first async call */
    DTRAIN_PROGRESS_POLL = 301  /* no thread is started; dtrain_comm_poll drives both */
} dtrain_progress;

/* How to make a group. Zero means the default; zero the whole struct, then set what differs.
 *
 * A nonzero world_size means that rank and root are taken from here and the environment is not read. Else they
 * come from the first of these that the environment holds:
 *
 *   dtrain      DTRAIN_RANK, DTRAIN_WORLD_SIZE, DTRAIN_ROOT
 *   torchrun    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
 *   Slurm       SLURM_PROCID, SLURM_NTASKS, unless mpirun has started the rank inside the job
 *   Open MPI    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
 *   PMI         PMI_RANK, PMI_SIZE
 *   Kubernetes  JOB_COMPLETION_INDEX, with DTRAIN_WORLD_SIZE
 *
 * DTRAIN_ROOT, else MASTER_ADDR and MASTER_PORT (the next port, where torchrun's agent has that one), give the root
 * to all of them. DTRAIN_TOKEN or the file named by DTRAIN_TOKEN_FILE, DTRAIN_INTERFACE, DTRAIN_INSECURE=1 and
 * DTRAIN_TIMEOUT_MS stand for the fields of those names where these are 0.
 *
 * Whatever world_size is, and for threads too: DTRAIN_ALGORITHM=ring, or all_reduce=ring,broadcast=tree, overrides
 * algorithm, and DTRAIN_NODE_RANKS stands for node_ranks where this is 0.
 *
 * Ranks prove to each other that they hold the token before anything else is read from a connection. Without a
 * token only the loopback device and unix sockets are used. Traffic itself is neither encrypted nor signed: across
 * a network that others share, put the ranks into a tunnel (WireGuard, IPsec, ssh). */
typedef struct dtrain_comm_desc {
    int rank;                    /* used when world_size is not 0 */
    int world_size;              /* 0: from the environment */
    const char *root;            /* where rank 0 listens: "host:port", "[address]:port" or "unix:/path" */
    const char *token;           /* the group's secret, 16 to 255 bytes; NULL: none beside the environment's */
    const char *fingerprint;     /* of model and program, at most 127 bytes, compared when ranks meet; NULL: "" */
    const char *listen_on;       /* interface or address of this rank; NULL: the one that routes to the root */
    int insecure;                /* 1: without a token listen and connect beyond this host all the same */
    int connections;             /* to each peer, used in turn; 0: 1; at most 8 */
    int64_t timeout_ms;          /* deadline of every blocking or async call; 0: 60,000; negative: none */
    int64_t heartbeat_ms;        /* a rank that was silent for so long is lost; 0: 15,000; negative: never */
    int64_t reconnect_ms;        /* a reset connection may be made again within; 0: it ends the group */
    dtrain_algorithm algorithm;  /* of every collective that has it; 0: chosen by kind, size and transport */
    dtrain_order order;          /* of reductions; 0: the tree's */
    int node_ranks;              /* ranks r with equal r / node_ranks share a host; 0: found out */
    int checksum;                /* 1: messages carry one of their data; -1: none do; 0: over your own transports */
    dtrain_progress progress;    /* 0: a service thread */
    size_t stack_bytes;          /* of dtrain_run_threads' threads; 0: 8 MiB; at least 64 KiB, which calls need */
    dtrain_allocator *allocator; /* NULL: one of the group's own, on the C library */
    void (*on_address)(void *user, const char *address); /* rank 0 listens there; tells the port that port 0 became */
    void *on_address_user;
    const char *trace_on_failure; /* see dtrain_comm_trace; copied; NULL: DTRAIN_TRACE of the environment, else none */
} dtrain_comm_desc;

/* Makes the group of processes that the environment or desc describes; a world of one where they describe none.
 *
 * Rank 0 listens at the root address, the others reach it there, in any order, within timeout_ms. Between processes
 * connections are made when first needed; one service thread looks after those of this group and of all that come of
 * it by dtrain_comm_split and its like, unless progress is DTRAIN_PROGRESS_POLL. A forked child cannot use its
 * parent's group.
 *
 *   comm     out: this rank's end; NULL on an error
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID   a variable or field is missing or malformed; the text names it
 *            DTRAIN_ERR_DENIED    no token where one is needed, or not the same
 *            DTRAIN_ERR_MISMATCH  another world size, wire version, byte order or fingerprint; a rank taken twice
 *            DTRAIN_ERR_TIMEOUT   the text says who came, who did not, and which variables were believed
 *            DTRAIN_ERR_IO        the system refused a socket or a thread, or does not know a name
 *
 * any thread; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_comm_create(dtrain_comm **comm, const dtrain_comm_desc *desc);

/* Starts what dtrain_comm_create does; dtrain_comm_ready says how it went. Numeric addresses never block; a host
 * name is looked up by the system's resolver, which may. Errors in arguments at once.
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_comm_create_async(dtrain_comm **comm, const dtrain_comm_desc *desc);

/* Says whether a group from dtrain_comm_create_async has formed; with DTRAIN_PROGRESS_POLL, dtrain_comm_poll forms it.
 *
 *   ready     out: 1 when the group can be used
 *   returns   DTRAIN_OK while it may still form; else as dtrain_comm_create, and it can only be destroyed
 *
 * one thread per object; never blocks */
DTRAIN_API dtrain_status dtrain_comm_ready(dtrain_comm *comm, int *ready);

/* Makes `ranks` connected ends for a program that brings its own threads: comms[r] is rank r's.
 *
 *   comms    out: ranks pointers, each used by one thread at a time and destroyed by itself
 *   errors   DTRAIN_ERR_INVALID, DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_threads_create(dtrain_comm **comms, int ranks, const dtrain_comm_desc *desc);

/* Runs body once a rank, each on a thread of its own, and returns when all have returned.
 *
 *   body      gets its rank's end, which is destroyed after it returns; when it returns an error, its ends of other
 *             groups count as gone, too, but are still its own to destroy
 *   returns   DTRAIN_OK when every body did; else the status of the rank that failed first, and a text that
 *             begins with its number. Ranks that wait for it get DTRAIN_ERR_PEER_LOST
 *
 * any thread; blocks until the last body returns */
DTRAIN_API dtrain_status dtrain_run_threads(int ranks, dtrain_status (*body)(dtrain_comm *world, void *user),
                                            void *user, const dtrain_comm_desc *desc);

/* Makes a group over a transport of your own; the table is copied, and destroyed with the group.
 *
 *   errors   DTRAIN_ERR_INVALID  a missing function, or a rank outside the size; the table stays yours
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_comm_from_transport(dtrain_comm **comm, const dtrain_transport *transport,
                                                    const dtrain_comm_desc *desc);

/* Returns the name of the algorithm that a call would use: "halving_doubling".
 *
 *   collective   "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
 *                "all_to_all" or "barrier"
 *   count        elements, as the call has them
 *   returns      "?" for another name or a NULL comm
 *
 * any thread */
DTRAIN_API const char *dtrain_comm_algorithm(const dtrain_comm *comm, const char *collective, size_t count,
                                             dtrain_dtype dtype);

/* Leaves the group and frees this end; NULL is legal. Never waits for a peer.
 *
 * Peers that need this rank for an operation get DTRAIN_ERR_PEER_LOST with its number. Work still pending
 * is cancelled, its handles die with the group.
 *
 * one thread per object */
DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm);

/* Makes a group of the ranks that give the same color, in order of key, then of their rank in comm.
 *
 * Groups are used like the one they come of: several at once, also from several threads of a rank; none waits for
 * another. An error or a lost rank ends the groups that contain it, and no other. A group takes over timeout_ms,
 * algorithm, progress and allocator. It may be destroyed before or after comm.
 *
 *   color    0 or more; negative: this rank is in none of the groups
 *   group    out: this rank's end; NULL for a negative color and on an error
 *   errors   the same on every rank, and then none has a group: as dtrain_all_gather; and
 *            DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO  the text says on which rank
 *            DTRAIN_ERR_UNSUPPORTED            a transport of your own, unless each group has one rank
 *            DTRAIN_ERR_INVALID                on this rank alone: a fuse is open
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **group);

/* Makes a group of the same ranks, whose operations do not mix with those of comm; otherwise as dtrain_comm_split.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_comm_duplicate(dtrain_comm *comm, dtrain_comm **group);

/* Makes a group of the ranks listed, of which ranks[i] gets rank i; otherwise as dtrain_comm_split.
 *
 *   ranks    count ranks of comm, the same list on every rank of comm, listed or not
 *   group    out: NULL for a rank that is not listed
 *   errors   DTRAIN_ERR_INVALID   a rank outside comm or listed twice; the text says who gave it
 *            DTRAIN_ERR_MISMATCH  the lists differ
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_comm_subgroup(dtrain_comm *comm, const int *ranks, int count, dtrain_comm **group);

/* Makes a working group of the ranks of comm that are left, in their old order.
 *
 * For a group that is broken as ranks were lost; it may be called on a whole one, too. More ranks may be lost
 * meanwhile, rank 0 included: a survivor that the group still counts breaks it, and the call is made again on that.
 * Who is counted out stays out, even should it come back. A connection that was closed or refused proves a death;
 * where a rank is only silent (for heartbeat_ms, or has not reconnected within reconnect_ms), the larger part of comm
 * goes on, of two halves the one with the lowest rank, so that no two parts ever do.
 *
 *   survivors  out: this rank's end; NULL on an error
 *   errors     DTRAIN_ERR_TIMEOUT    a rank neither called it nor is lost; it can be called again
 *              DTRAIN_ERR_PEER_LOST  this rank is in the smaller part, or was given up; it cannot go on
 *              DTRAIN_ERR_MISMATCH   others called dtrain_comm_agree
 *              DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO; DTRAIN_ERR_UNSUPPORTED  a transport of your own
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_comm_shrink(dtrain_comm *comm, dtrain_comm **survivors);

/* Gives every rank of comm that is left the same answer: the bits that all of them set. Works on a broken group.
 *
 *   flags    in: this rank's; out: the AND of the survivors', unchanged on an error
 *   errors   as dtrain_comm_shrink
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_comm_agree(dtrain_comm *comm, uint64_t *flags);

/* Copies the state of the rank with the highest step, of several the lowest, to all others.
 *
 *   step       of this rank's state
 *   buffers    count of them, buffers[i] of bytes[i] bytes, the same sizes on every rank; overwritten on the others
 *   step_out   out: the highest step; may be NULL
 *   errors     DTRAIN_ERR_MISMATCH  sizes differ; others as dtrain_broadcast
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_resync(dtrain_comm *comm, uint64_t step, void *const *buffers, const size_t *bytes,
                                       int count, uint64_t *step_out);

/* Ranks laid out in named dimensions: a world of 8 as "data" x "tensor" of 4 x 2. */
typedef struct dtrain_mesh dtrain_mesh;

#define DTRAIN_MESH_NAME_BYTES 32

typedef struct dtrain_mesh_dim {
    const char *name; /* 1 to 31 characters, copied */
    int size;         /* 0, in one dimension: what is left of the world */
} dtrain_mesh_dim;

/* Lays the ranks of world out in `count` dimensions, the last varying fastest, and makes the group along each: the
 * ranks that differ in that coordinate alone, in its order (see dtrain_comm_split).
 *
 *   mesh     out; NULL on an error. Independent of world, which may be destroyed before or after it
 *   dims     the same on every rank; the sizes multiply to the size of world
 *   errors   DTRAIN_ERR_INVALID   a name or size cannot be; the text names the dimension, or the rank that gave it
 *            DTRAIN_ERR_MISMATCH  ranks gave different dimensions
 *            others as dtrain_comm_split
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_mesh_create(dtrain_mesh **mesh, dtrain_comm *world, const dtrain_mesh_dim *dims,
                                            int count);

/* Returns the group along a dimension, which the mesh owns; NULL and an error text where there is no such name.
 *
 * any thread */
DTRAIN_API dtrain_comm *dtrain_mesh_group(const dtrain_mesh *mesh, const char *name);

/* Returns this rank's coordinate in a dimension, its rank in the group along it; -1 for an unknown name.
 *
 * any thread */
DTRAIN_API int dtrain_mesh_index(const dtrain_mesh *mesh, const char *name);

/* Returns a dimension's size; 0 for an unknown name.
 *
 * any thread */
DTRAIN_API int dtrain_mesh_size(const dtrain_mesh *mesh, const char *name);

/* Destroys the mesh and its groups; NULL is legal. Never waits for a peer.
 *
 * one thread per object */
DTRAIN_API void dtrain_mesh_destroy(dtrain_mesh *mesh);

/* Returns this end's rank; 0 for NULL.
 *
 * any thread */
DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm);

/* Returns the number of ranks; 1 for NULL.
 *
 * any thread */
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm);

/* Returns the text of the group's last error on this rank; empty before the first, never NULL.
 *
 * one thread per object */
DTRAIN_API const char *dtrain_comm_error(const dtrain_comm *comm);

/* Returns the allocator that the group uses, for its counters and for objects that shall share them.
 *
 * any thread */
DTRAIN_API dtrain_allocator *dtrain_comm_allocator(dtrain_comm *comm);

/* Returns the nanoseconds that this rank's caller has spent inside blocking calls and waits of the group.
 *
 * one thread per object */
DTRAIN_API int64_t dtrain_comm_blocked_ns(const dtrain_comm *comm);

/* Writes the last 256 operations of this rank in the group to a file that chrome://tracing and Perfetto load.
 *
 * One event an operation, the one under way included: pid is the rank, tid the group, args the call, its bytes,
 * whom it awaited last, how it ended, and when it was called, started, moved its first bytes and ended, in
 * nanoseconds of CLOCK_MONOTONIC. tools/dtrace.c merges the files of all ranks and says which rank the others waited
 * for and in which operation they first differ. The path is replaced when the whole file is on disk, else untouched.
 *
 * With desc.trace_on_failure, or DTRAIN_TRACE in the environment, set to a path's beginning, the rank's first
 * operation that fails writes PREFIX.rank-N.json by itself, unless a deadline passed after which the call can be made
 * again. What goes wrong in it is said in the log.
 *
 *   path     at most 1,023 bytes
 *   errors   DTRAIN_ERR_INVALID  no group, no path, or a forked child
 *            DTRAIN_ERR_IO       the system refused; only dtrain_last_error has the text
 *   source   Trace Event Format of the catapult project
 *
 * any thread, also while operations are under way; not after dtrain_comm_destroy */
DTRAIN_API dtrain_status dtrain_comm_trace(dtrain_comm *comm, const char *path);

/* Splits `count` elements over the ranks of `comm` and says which part is `rank`'s.
 *
 * Parts are contiguous, in rank order, and differ by at most one element: the first count % size
 * ranks hold one more. A rank beyond `count` holds none.
 *
 *   rank      0 <= rank < size of comm
 *   begin     out: index of the part's first element; may be NULL
 *   returns   the number of elements in the part; 0 for a bad rank or a NULL comm
 *
 * any thread */
DTRAIN_API size_t dtrain_shard(const dtrain_comm *comm, size_t count, int rank, size_t *begin);

/* Reduces `count` elements over all ranks; every rank gets the whole result.
 *
 *   in, out   count elements of dtype; the same buffer, or apart (overlap is an error); any alignment
 *   dtype     F64, F32, F16, BF16; I8, U8, I32, U32, I64, U64, which wrap around
 *   op        DTRAIN_SUM, PROD, MIN, MAX (a NaN wins); DTRAIN_MEAN for floats divides once by the world size;
 *             DTRAIN_AND, OR, XOR for integers
 *   order     the binary tree over ranks (see >>order), unless the desc frees it
 *   errors    DTRAIN_ERR_MISMATCH   another rank called something else; the text quotes both calls. A rank that only
 *                                   sends in its call (dtrain_send; broadcast, reduce, gather and scatter on some
 *                                   ranks) may have DTRAIN_OK already when its peer, whose call has the error, finds
 *                                   out; then this rank's next operation that receives has it
 *             DTRAIN_ERR_TIMEOUT    the deadline of comm; usable again if nothing had moved
 *             DTRAIN_ERR_PEER_LOST  a rank has left or died; the group is broken (see dtrain_comm_shrink)
 *             on any error the contents of out are undefined, in is unchanged unless in == out
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_all_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype, dtrain_op op);

/* Averages `count` elements over all ranks with a weight a rank: the sum of weight x in over the sum of the weights.
 *
 *   in, out   count elements of dtype; the same buffer, or apart; any alignment
 *   dtype     F64, F32, F16, BF16; products and sums are float64 for F64, float32 for the others, as the weight is,
 *             divided once and rounded once
 *   weight    0 or above, finite; that of this rank alone. With 0 its input does not count, NaNs included
 *   order     as dtrain_all_reduce
 *   errors    DTRAIN_ERR_INVALID  on every rank: all weights are 0, or their sum is too large; on this one: its
 *                                 weight is none, or a fuse is open. Others as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms, twice */
DTRAIN_API dtrain_status dtrain_all_reduce_weighted(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                    dtrain_dtype dtype, double weight);

/* Reduces `count` elements over all ranks; each rank gets its shard of the result (see dtrain_shard).
 *
 *   in       count elements, of which none but those of out change
 *   out      as many elements as this rank's shard has; in place means out == in + begin of the shard
 *   others   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_reduce_scatter(dtrain_comm *comm, const void *in, void *out, size_t count,
                                               dtrain_dtype dtype, dtrain_op op);

/* dtrain_reduce_scatter with parts as the caller says: rank r gets elements [offsets[r], offsets[r] + counts[r]).
 *
 *   counts, offsets   one for each rank, the same on every rank; parts may be empty and leave gaps. offsets NULL:
 *                     one after the other
 *   out               counts[rank] elements; in place means out == in + this rank's offset, and no parts that overlap
 *   others            as dtrain_reduce_scatter
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_reduce_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                 const size_t *offsets, dtrain_dtype dtype, dtrain_op op);

/* Joins every rank's shard of `count` elements; every rank gets them all.
 *
 *   in       this rank's shard (see dtrain_shard); in place means in == out + begin of the shard
 *   out      count elements
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_all_gather(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype);

/* dtrain_all_gather with parts as the caller says: rank r's goes to [offsets[r], offsets[r] + counts[r]).
 *
 *   counts, offsets   as in dtrain_reduce_scatter_v; parts do not overlap, what lies between them is unchanged
 *   in                counts[rank] elements; in place means in == out + this rank's offset
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_all_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                             const size_t *offsets, dtrain_dtype dtype);

/* Copies `count` elements from rank root to every rank, in place.
 *
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype, int root);

/* Reduces `count` elements over all ranks to rank root.
 *
 *   out      count elements on the root, where it may be in; on other ranks not touched, may be NULL
 *   others   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_reduce(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                       dtrain_op op, int root);

/* Joins every rank's shard of `count` elements on rank root.
 *
 *   in       this rank's shard (see dtrain_shard); in place on the root means in == out + begin of the shard
 *   out      count elements on the root; on other ranks not touched, may be NULL
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * The _v form has parts as in dtrain_all_gather_v, the same arrays on every rank.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_gather(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                       int root);
DTRAIN_API dtrain_status dtrain_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                         const size_t *offsets, dtrain_dtype dtype, int root);

/* Hands rank root's `count` elements out, to each rank its shard.
 *
 *   in       count elements on the root; on other ranks not read, may be NULL
 *   out      this rank's shard (see dtrain_shard); in place on the root means out == in + begin of the shard
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * The _v form has parts as in dtrain_all_gather_v, the same arrays on every rank.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_scatter(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                        int root);
DTRAIN_API dtrain_status dtrain_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                          const size_t *offsets, dtrain_dtype dtype, int root);

/* Hands each rank's `count` elements out, to each rank its shard of them.
 *
 *   in       count elements: rank r gets shard r (see dtrain_shard)
 *   out      this rank's shard of rank 0's elements, then of rank 1's, and so on: size times its length. May be in
 *            where count is a multiple of the world size
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_all_to_all(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype);

/* dtrain_all_to_all with parts as the caller says.
 *
 *   in_counts, in_offsets     rank r gets in[in_offsets[r] .. + in_counts[r]); offsets NULL: one after the other
 *   out_counts, out_offsets   what rank r gives goes to out[out_offsets[r] .. + out_counts[r]); parts do not overlap
 *   in place                  in == out with the same arrays for both
 *   errors                    DTRAIN_ERR_MISMATCH  a rank gives another count than its peer awaits; names both
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_all_to_all_v(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                             const size_t *in_offsets, void *out, const size_t *out_counts,
                                             const size_t *out_offsets, dtrain_dtype dtype);

/* Returns when every rank has called it; errors as dtrain_all_reduce.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_barrier(dtrain_comm *comm);

/* Sends `count` elements to rank peer, which calls dtrain_recv with the same count and dtype.
 *
 * Messages between two ranks keep their order. The call may return before the peer has received.
 *
 *   peer     another rank than this one
 *   errors   as dtrain_all_reduce
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_send(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype, int peer);

/* Receives `count` elements that rank peer sends; see dtrain_send.
 *
 *   errors   DTRAIN_ERR_MISMATCH  what came has another count or dtype; out is unchanged
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_recv(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer);

/* Sends to one rank while it receives from another; of use to rings and halos, where sends alone would cross.
 *
 *   to, from   other ranks than this one, the same or two; -1: none. They call dtrain_exchange, or dtrain_send and
 *              dtrain_recv, with the same counts
 *   in, out    apart
 *   errors     as dtrain_recv
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_exchange(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                         size_t out_count, int from, dtrain_dtype dtype);

/* Starts what the function without _async does. Operations of one group finish in the order of their calls.
 *
 * Between two collectives, sends and recvs move together, so that messages of any size may cross; those to one peer,
 * and those from one, keep their order.
 *
 *   work     out: the handle, to be given to dtrain_work_wait once; NULL on an error
 *   buffers  belong to the operation until it is done, and so do arrays of counts and offsets
 *   errors   bad arguments at once; all others from dtrain_work_wait
 *
 * collective: every rank of comm, same order; never blocks */
DTRAIN_API dtrain_status dtrain_all_reduce_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_reduce_scatter_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                     dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_all_gather_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_broadcast_async(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype,
                                                int root, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_reduce_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                             dtrain_dtype dtype, dtrain_op op, int root, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_gather_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                             dtrain_dtype dtype, int root, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_scatter_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                              dtrain_dtype dtype, int root, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_all_to_all_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_barrier_async(dtrain_comm *comm, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_reduce_scatter_v_async(dtrain_comm *comm, const void *in, void *out,
                                                       const size_t *counts, const size_t *offsets, dtrain_dtype dtype,
                                                       dtrain_op op, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_all_gather_v_async(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                   const size_t *offsets, dtrain_dtype dtype, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_gather_v_async(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                               const size_t *offsets, dtrain_dtype dtype, int root, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_scatter_v_async(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                const size_t *offsets, dtrain_dtype dtype, int root,
                                                dtrain_work **work);
DTRAIN_API dtrain_status dtrain_all_to_all_v_async(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                                   const size_t *in_offsets, void *out, const size_t *out_counts,
                                                   const size_t *out_offsets, dtrain_dtype dtype, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_exchange_async(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                               size_t out_count, int from, dtrain_dtype dtype, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_send_async(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype,
                                           int peer, dtrain_work **work);
DTRAIN_API dtrain_status dtrain_recv_async(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer,
                                           dtrain_work **work);

/* Reduces tensors of one shape and dtype over all ranks; in may be out. Otherwise as dtrain_all_reduce.
 *
 *   errors   DTRAIN_ERR_INVALID  shapes or dtypes of in and out differ
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_tensor_all_reduce(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out,
                                                  dtrain_op op);

/* Reduces tensors of one shape over all ranks and splits the result along dimension 0.
 *
 *   out      in's shape but for dimension 0, of which rank r has the rows that dtrain_shard gives it
 *   errors   DTRAIN_ERR_INVALID  out has another shape or dtype; the text says which was expected
 *   others   as dtrain_reduce_scatter
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_tensor_reduce_scatter(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out,
                                                      dtrain_op op);

/* Concatenates the ranks' tensors along dimension 0, in the order of the ranks.
 *
 *   out      of which in has the rows that dtrain_shard gives this rank; otherwise of in's shape
 *   errors   DTRAIN_ERR_INVALID  in has another shape or dtype; the text says which was expected
 *   others   as dtrain_all_gather
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_tensor_all_gather(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out);

/* Copies rank root's tensor to tensors of its dtype and element count on every rank, in place.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_tensor_broadcast(dtrain_comm *comm, dtrain_tensor *tensor, int root);

/* Says whether an operation has ended, well or not; 1 for NULL. Never blocks and drives nothing.
 *
 * any thread */
DTRAIN_API int dtrain_work_done(const dtrain_work *work);

/* Returns an operation's result, once, and frees its handle; waits for its end, which its deadline bounds.
 *
 *   returns   DTRAIN_ERR_INVALID for NULL
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_work_wait(dtrain_work *work);

/* As dtrain_work_wait, but gives up after timeout_ms; the operation goes on, and the handle can be waited for again.
 *
 *   timeout_ms   0: only what can be done at once; negative: no limit but the operation's deadline
 *   returns      DTRAIN_ERR_TIMEOUT with the handle still valid (dtrain_work_done tells this from the operation's own
 *                deadline); else as dtrain_work_wait, and the handle is gone
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_work_wait_for(dtrain_work *work, int64_t timeout_ms);

/* Ends an operation before its time, on every rank. Its handle ends with DTRAIN_ERR_ABORTED and is still waited for,
 * as soon as the operations before it have ended; one that has ended already stays as it is.
 *
 * A collective's other ranks get DTRAIN_ERR_ABORTED with this rank's number and the operation, and the group is
 * broken; so it is by a send or recv of which a byte may have moved. A send or recv that has not begun, because
 * earlier work of the same peer and direction or an earlier collective is under way, ends alone, and so does whatever
 * has not begun in a world of one: the group can be used as though it had never been called, so that the next
 * message between the two takes its place.
 *
 *   returns   DTRAIN_OK; DTRAIN_ERR_INVALID for NULL and in a forked child
 *
 * any thread, before dtrain_work_wait has returned */
DTRAIN_API dtrain_status dtrain_work_cancel(dtrain_work *work);

/* Breaks the group: every pending and later operation on all its ranks ends with DTRAIN_ERR_ABORTED, and a text that
 * has this rank's number and why. Buffers may be freed when the calls that use them have returned.
 *
 * A call that is blocked, on any rank, returns at once; over a transport of your own within 100 ms of its send or recv
 * keeping its deadline, and on the other ranks only where the transport has `fail`. A group that is broken already
 * keeps its first cause.
 *
 *   why       at most 300 characters are kept; NULL: none
 *   returns   DTRAIN_OK; DTRAIN_ERR_INVALID for NULL and in a forked child
 *
 * any thread, before dtrain_comm_destroy; never blocks */
DTRAIN_API dtrain_status dtrain_comm_abort(dtrain_comm *comm, const char *why);

/* Opens a fuse: blocking calls of the group are noted, and run by dtrain_fuse_end, many small ones as one.
 *
 * A noted call returns DTRAIN_OK, or at once what is wrong with its arguments, and then is not noted. Its buffers
 * belong to the fuse until the end; none may overlap another that is written.
 *
 *   messages      sends, recvs and exchanges run first, all of them together: every rank may send to and receive
 *                 from every other, of any size, in any order
 *   collectives   run in the order of their calls. Neighbours, messages aside, become one operation where they are
 *                 all_reduces of one dtype and op in the tree order, or broadcasts of one dtype and root, of up to
 *                 1 MiB each and 4 MiB together; the same bits as alone. Every rank must fuse the same calls
 *   errors        DTRAIN_ERR_INVALID  a fuse is open already. So get calls that cannot wait for its end: asynchronous
 *                                     ones, weighted means, check_equal, and those that make groups
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_fuse_begin(dtrain_comm *comm);

/* Runs the noted calls, all of them, and closes the fuse.
 *
 *   returns   the first error. Texts call operations of several calls by the first one: "all_reduce #4 (sum,
 *             f32 x 1024, 3 fused)"; DTRAIN_ERR_INVALID without dtrain_fuse_begin
 *
 * collective: every rank of comm, same order, where collectives were noted; blocks up to timeout_ms an operation */
DTRAIN_API dtrain_status dtrain_fuse_end(dtrain_comm *comm);

/* Advances the group's async work on the calling thread for about budget_us, less when nothing can move.
 *
 * Between processes it also answers peers and sends heartbeats: call it several times in every heartbeat_ms.
 *
 *   returns   DTRAIN_OK, also when work failed: dtrain_work_wait tells; DTRAIN_ERR_INVALID for a NULL comm or
 *             a group that has a service thread
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_comm_poll(dtrain_comm *comm, int64_t budget_us);

/* Compares `bytes` bytes, elements of dtype, on all ranks.
 *
 *   errors   DTRAIN_ERR_MISMATCH  they differ; the text names the first rank that differs from rank 0 and
 *                                 its first element that does. The same on every rank
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_comm_check_equal(dtrain_comm *comm, const void *data, size_t count, dtrain_dtype dtype);

/* What dtrain_store_get says of a key that nobody has set. */
#define DTRAIN_STORE_ABSENT ((size_t)-1)

/* Sets key to a string of bytes that every rank can get; for a program's own set-up, not for tensors.
 *
 * A world and the groups that come of it share one store, which rank 0 of the world keeps and takes along.
 *
 *   key      1 to 255 characters
 *   value    up to 65,536 bytes; rank 0 keeps 64 MiB of them
 *   errors   DTRAIN_ERR_MEMORY       the store is full
 *            DTRAIN_ERR_UNSUPPORTED  a transport of your own
 *            DTRAIN_ERR_TIMEOUT, DTRAIN_ERR_PEER_LOST as dtrain_all_reduce
 *
 * To hand bytes to every rank at once, dtrain_broadcast them as DTRAIN_U8.
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_store_set(dtrain_comm *comm, const char *key, const void *value, size_t bytes);

/* Gets what key was last set to.
 *
 *   value    out: capacity bytes at most
 *   bytes    out: the value's whole size, also when it is larger than capacity; DTRAIN_STORE_ABSENT: not set
 *   errors   as dtrain_store_set
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_store_get(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                          size_t *bytes);

/* Gets what key is set to, and waits until it is; otherwise as dtrain_store_get.
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_store_wait(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                           size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif

/* ---- >>train ----
 * From gradients to the next weights: the parameter table, the sampler, optimizers, schedules, gradient
 * clipping, aggregators, and DDP, which reduces gradients while the backward pass still runs.
 * Gradients are sums with a weight (usually a number of tokens) and are divided once, by the weight of all
 * ranks, so that uneven batches and ranks with none are right. Micro-batches are folded by the tree of
 * >>order: a fixed number of them gives the same weights, bit for bit, on 1, 2, 4 and 8 ranks. */
#ifndef DTRAIN__TRAIN_H
#define DTRAIN__TRAIN_H

#ifdef __cplusplus
extern "C" {
#endif

/* One tensor of a model. A table of these names every parameter once; zero what does not apply.
 *
 * A unit is what is computed, and so reduced, together: usually one layer. Units are numbered from 0 without
 * gaps, in the order of the forward pass. A stacked tensor, whose first size is the number of layers, gives
 * one layer to each of the units unit, unit + 1, ... */
typedef struct dtrain_param {
    const char *name; /* unique, not empty */
    dtrain_dtype dtype;
    size_t shape[DTRAIN_MAX_DIMS];
    int ndim;     /* 0: the leading nonzero sizes of shape */
    int stacked;  /* 1: the first size counts layers, one unit each */
    int unit;     /* the unit, or the first layer's */
    int no_decay; /* 1: no weight decay (biases, norms) */
    int frozen;   /* 1: no gradient: neither reduced nor updated */
    int tied;     /* 1: also used outside its unit, as an embedding that is the output layer too: FSDP keeps its unit
                     besides the two that rotate */
    void *data;
    void *grad; /* as data; not touched when frozen; NULL: as frozen */
} dtrain_param;

/* Checks a table as every function here that takes one does.
 *
 *   errors   DTRAIN_ERR_INVALID  a name missing or used twice; a bad dtype or shape; sizes that overflow; units with
 *                                a gap; memory missing or shared by two tensors. The text names the parameter
 *            DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_params_check(const dtrain_param *table, size_t count);

/* Returns the number of units of a good table: its highest unit number and one more; 0 for no table.
 *
 * any thread */
DTRAIN_API int dtrain_params_units(const dtrain_param *table, size_t count);

/* Returns the number of elements of one parameter; 0 when they overflow.
 *
 * any thread */
DTRAIN_API size_t dtrain_param_elements(const dtrain_param *param);

/* What to draw from, and how a step is cut. */
typedef struct dtrain_sampler_desc {
    uint64_t count;    /* examples of an epoch; at least 1 */
    uint64_t seed;     /* of the shuffle */
    int no_shuffle;    /* 1: in order */
    size_t batch;      /* examples a micro-batch; 0: 1 */
    int micro_batches; /* micro-batches a step, over all ranks together; 0: 1 */
    int strided;       /* 1: rank r has micro-batches r, r + ranks, ... of a step, as where each is reduced at once */
} dtrain_sampler_desc;

/* Deals every example of an epoch exactly once. Holds no position: any step may be asked for, by any number of
 * ranks, so that resuming is starting at a later step. Copy it freely; it owns nothing. */
typedef struct dtrain_sampler {
    dtrain_sampler_desc desc;
    uint64_t rows, columns; /* of the rectangle that the shuffle permutes */
} dtrain_sampler;

/* Sets a sampler up.
 *
 *   errors   DTRAIN_ERR_INVALID  no examples, or a negative or overflowing cut
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_sampler_init(dtrain_sampler *sampler, const dtrain_sampler_desc *desc);

/* Returns the number of steps of an epoch; the last may be short.
 *
 * any thread */
DTRAIN_API uint64_t dtrain_sampler_steps(const dtrain_sampler *sampler);

/* Returns the example at a position of an epoch's shuffle, which depends on seed, epoch and position alone.
 *
 *   position   below count
 *   source     a Feistel network over a rectangle, walked until it lands inside: Black and Rogaway, CT-RSA 2002
 *
 * any thread */
DTRAIN_API uint64_t dtrain_sampler_index(const dtrain_sampler *sampler, uint64_t epoch, uint64_t position);

/* Says which of a step's micro-batches are a rank's: a contiguous block, so that the sum of what it keeps until the
 * step ends fits the tree. Strided: every ranks-th, so that the i-th of all ranks are a contiguous block.
 *
 *   step      counted over all epochs: epoch step / steps, in it step % steps
 *   first     out: the first of them, 0 to micro_batches - 1; may be NULL. The others are first + 1, first + 2, ...;
 *             strided: first is rank, the others are first + ranks, first + 2 * ranks, ...
 *   returns   how many there are, those without examples left out: 0 for a rank that has none this step, whose first
 *             then means nothing
 *
 * any thread */
DTRAIN_API int dtrain_sampler_share(const dtrain_sampler *sampler, uint64_t step, int rank, int ranks, int *first);

/* Lists the examples of one micro-batch. Micro-batches do not depend on the number of ranks. What is left for an
 * epoch's last step is split over its micro-batches evenly, earlier ones one longer.
 *
 *   micro_batch   0 to micro_batches - 1
 *   examples      out: room for batch of them
 *   returns       how many there are: batch, or fewer in an epoch's last step
 *
 * any thread */
DTRAIN_API size_t dtrain_sampler_batch(const dtrain_sampler *sampler, uint64_t step, int micro_batch,
                                       uint64_t *examples);

typedef enum dtrain_schedule_kind {
    DTRAIN_SCHEDULE_CONSTANT = 0,
    DTRAIN_SCHEDULE_LINEAR = 401, /* falls from lr to min_lr in a line */
    DTRAIN_SCHEDULE_COSINE        /* falls from lr to min_lr along half a cosine */
} dtrain_schedule_kind;

/* A learning rate over time. */
typedef struct dtrain_schedule {
    dtrain_schedule_kind kind;
    float lr;              /* the highest, reached when the warm-up ends */
    float min_lr;          /* the last of a falling schedule */
    uint64_t warmup_steps; /* step s of them has lr * (s + 1) / warmup_steps; 0: none */
    uint64_t total_steps;  /* when a falling schedule has reached min_lr, warm-up included */
} dtrain_schedule;

/* Returns the learning rate of a step, counted from 0; the same bits on every machine. 0 for NULL.
 *
 * After the warm-up, with t = (step - warmup_steps) / (total_steps - warmup_steps), at most 1:
 * linear lr + (min_lr - lr) t, cosine min_lr + (lr - min_lr) (1 + cos(pi t)) / 2.
 *
 *   source   Loshchilov and Hutter, SGDR, ICLR 2017
 *
 * any thread */
DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, uint64_t step);

typedef enum dtrain_optimizer_kind {
    DTRAIN_OPTIMIZER_DEFAULT = 0, /* AdamW */
    DTRAIN_SGD = 501,
    DTRAIN_ADAMW,
    DTRAIN_OPTIMIZER_NONE /* of FSDP: no state, no step; the caller updates its slices */
} dtrain_optimizer_kind;

/* An optimizer's constants. */
typedef struct dtrain_optimizer_desc {
    dtrain_optimizer_kind kind; /* 0: AdamW */
    float beta1;                /* AdamW; 0: 0.9 */
    float beta2;                /* AdamW; 0: 0.999 */
    float eps;                  /* AdamW; 0: 1e-8 */
    float weight_decay;         /* 0: none */
    float momentum;             /* SGD; 0: none, and no memory for it */
    int nesterov;               /* SGD: 1 steps along g + momentum * velocity */
    int decoupled_decay;        /* SGD: 1 decays the weights themselves; 0 adds weight_decay * p to the gradient */
} dtrain_optimizer_desc;

/* One step of AdamW over a slice: what remains of the optimizer when its state is sharded.
 *
 * In float32, each operation rounded, the same bits under any flags and instruction set:
 *   m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g)
 *   p = (1 - lr * weight_decay) * p - (lr / (1 - beta1^step)) * (m / (sqrt(v) * root + eps))
 * where root = 1 / sqrt(1 - beta2^step). Constants are computed in float64, the powers by squaring, and rounded once.
 *
 *   params, grads, m, v   count float32, any alignment, apart from each other; m and v zero before step 1
 *   desc                  NULL: all defaults; kind is not read
 *   step                  counted from 1
 *   source                Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019
 *
 * any thread; allocates nothing */
DTRAIN_API void dtrain_adamw(float *params, const float *grads, float *m, float *v, size_t count,
                             const dtrain_optimizer_desc *desc, float lr, uint64_t step);

/* One step of SGD over a slice.
 *
 * In float32, each operation rounded, the same bits under any flags and instruction set:
 *   coupled decay   g = g + weight_decay * p; decoupled: p = (1 - lr * weight_decay) * p
 *   velocity = momentum * velocity + g;  d = velocity, or with nesterov g + momentum * velocity
 *   p = p - lr * d
 *
 *   velocity   zero before the first step; NULL when desc has no momentum, and then d = g
 *   others     as dtrain_adamw
 *   source     Sutskever, Martens, Dahl, Hinton, ICML 2013, as PyTorch writes it
 *
 * any thread; allocates nothing */
DTRAIN_API void dtrain_sgd(float *params, const float *grads, float *velocity, size_t count,
                           const dtrain_optimizer_desc *desc, float lr);

typedef struct dtrain_optimizer dtrain_optimizer;

/* Makes an optimizer for the parameters of a table that have a gradient.
 *
 *   table       copied; its data and grad are used by every step
 *   desc        NULL: all defaults
 *   allocator   of the state: 2 floats an element for AdamW, 1 for SGD with momentum; must outlive it. NULL: the
 *               C library
 *   errors      DTRAIN_ERR_INVALID      a bad table (see dtrain_params_check), or constants out of range
 *               DTRAIN_ERR_UNSUPPORTED  a parameter that is not F32
 *               DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_optimizer_create(dtrain_optimizer **optimizer, const dtrain_param *table, size_t count,
                                                 const dtrain_optimizer_desc *desc, dtrain_allocator *allocator);

/* Updates every parameter from its gradient, which stays as it is.
 *
 *   errors   DTRAIN_ERR_INVALID  a NULL optimizer, or lr negative or not finite
 *
 * one thread per object; allocates nothing */
DTRAIN_API dtrain_status dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr);

/* Frees an optimizer; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer);

/* Measures the length of all gradients of a table as one vector, and shortens it to max_norm when it is longer.
 *
 * The sum of squares is exact, whatever the order of elements and parameters, and rounded to float64 once; its root
 * is norm. The factor max_norm / norm is rounded to float32 once.
 *
 *   max_norm   0: measure only
 *   norm       out: the length before; may be NULL. NaN when a gradient has a NaN, else infinity when one has an
 *              infinity: then the gradients are left as they are
 *   errors     DTRAIN_ERR_INVALID      max_norm negative or NaN
 *              DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32
 *   source     Neal, Fast exact summation using small and large superaccumulators, arXiv:1505.05571, 2015
 *
 * any thread; allocates nothing */
DTRAIN_API dtrain_status dtrain_clip_grad_norm(const dtrain_param *table, size_t count, float max_norm, double *norm);

/* DDP: every rank holds all parameters; gradients are summed bucket by bucket while backward still runs. */
typedef struct dtrain_ddp dtrain_ddp;

typedef struct dtrain_ddp_desc {
    size_t bucket_bytes; /* units travel together once they are so large; 0: 1 MiB; 1: each by itself */
    int no_broadcast;    /* 1: parameters are the same on all ranks already */
    int no_overlap;      /* 1: nothing is reduced before all units are */
} dtrain_ddp_desc;

/* Makes a DDP over a group, and gives every rank the parameters of rank 0.
 *
 * Memory: the gradients once more, and log2(micro_batches) - 1 times more when gradients accumulate.
 *
 *   comm     must outlive it
 *   table    copied; its data and grad are used until destroyed; the same on every rank but for addresses
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID      a bad table; DTRAIN_ERR_UNSUPPORTED a gradient that is not F32
 *            DTRAIN_ERR_MISMATCH     tables or descs differ between ranks
 *            those of dtrain_broadcast
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_ddp_create(dtrain_ddp **ddp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                           const dtrain_ddp_desc *desc);

/* Opens a step: sets all gradients to zero and says what this rank will bring to it.
 *
 * Until dtrain_ddp_finish the group is the DDP's: no other collective of comm.
 *
 *   micro_batches   of this rank; 0 is legal: then dtrain_ddp_finish comes next
 *   weight          of this rank's examples in the whole step, usually their tokens; may be 0
 *   errors          DTRAIN_ERR_INVALID  a step is open; micro_batches negative; weight negative or not finite
 *                   DTRAIN_ERR_MEMORY   more micro-batches than in any step before
 *                   those of dtrain_all_reduce_async
 *
 * collective: every rank of comm, same order; never blocks */
DTRAIN_API dtrain_status dtrain_ddp_begin(dtrain_ddp *ddp, int micro_batches, double weight);

/* Takes a unit's gradients over: called when a micro-batch's backward pass has finished with the unit.
 *
 * The gradients hold the SUM over the micro-batch's examples. They are added to those of earlier micro-batches by
 * the tree and set to zero for the next; after the last, the unit is on its way as soon as those after it are, and the
 * gradients are the DDP's until dtrain_ddp_finish. Any order of units; the next micro-batch begins
 * when every unit was reduced and one is again, or with dtrain_ddp_next.
 *
 *   errors   DTRAIN_ERR_INVALID  no step is open; no such unit; the unit was reduced in this micro-batch and others
 *                                were not; more micro-batches than announced
 *            those of dtrain_all_reduce_async
 *
 * one thread per object; never blocks */
DTRAIN_API dtrain_status dtrain_ddp_reduce(dtrain_ddp *ddp, int unit);

/* Ends a micro-batch in which some units were not used, and so not reduced; legal after every micro-batch.
 *
 *   errors   DTRAIN_ERR_INVALID  no step is open, or all its micro-batches have ended
 *            those of dtrain_all_reduce_async
 *
 * one thread per object; never blocks */
DTRAIN_API dtrain_status dtrain_ddp_next(dtrain_ddp *ddp);

/* Closes the step: waits for all units, then divides once. Every gradient is now the weighted mean over all ranks,
 * the same bits on each of them.
 *
 * Units that this rank has not reduced in the last micro-batch count as unused in it: they add nothing.
 *
 *   total_weight   out: the sum of all ranks' weights; may be NULL. When it is 0 the gradients are not divided
 *   errors         DTRAIN_ERR_INVALID  no step is open; fewer micro-batches than announced: the step stays open
 *                  those of dtrain_all_reduce: the step is closed, gradients are undefined
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_ddp_finish(dtrain_ddp *ddp, double *total_weight);

/* Returns the text of the DDP's last error; empty before the first, never NULL.
 *
 * one thread per object */
DTRAIN_API const char *dtrain_ddp_error(const dtrain_ddp *ddp);

/* Frees a DDP; NULL is legal. In an open step it first waits for the units on their way, up to timeout_ms.
 *
 * one thread per object */
DTRAIN_API void dtrain_ddp_destroy(dtrain_ddp *ddp);

/* How the gradients of all ranks become one: a table of functions, to be filled by you or by those below. */
typedef struct dtrain_aggregator {
    void *self; /* given to every function */
    /* Turns each gradient of the table, this rank's sum, into the mean over all ranks by weight, and sets
     * *total_weight to the sum of the weights; with a total of 0 it does not divide. */
    dtrain_status (*aggregate)(void *self, const dtrain_param *table, size_t count, double weight,
                               double *total_weight);
    void (*destroy)(void *self); /* may be NULL */
} dtrain_aggregator;

/* Makes the aggregator of a program that is alone: it divides by its own weight.
 *
 * any thread */
DTRAIN_API dtrain_aggregator dtrain_aggregator_local(void);

/* Makes the aggregator that all-reduces each gradient over comm, which must outlive it.
 *
 * any thread; its aggregate is collective, and blocks up to timeout_ms */
DTRAIN_API dtrain_aggregator dtrain_aggregator_all_reduce(dtrain_comm *comm);

/* Frees what an aggregator owns.
 *
 * one thread per object */
DTRAIN_API void dtrain_aggregator_destroy(dtrain_aggregator *aggregator);

/* Adds the gradients of this rank's examples to the table's, which are zero, and sets *weight to their weight. */
typedef dtrain_status (*dtrain_compute_fn)(void *user, double *weight);

/* One training step: what to compute, how to aggregate, how to apply. */
typedef struct dtrain_step_desc {
    const dtrain_param *table;
    size_t count;
    dtrain_compute_fn compute;
    void *user;                          /* given to compute */
    const dtrain_aggregator *aggregator; /* NULL: local */
    dtrain_optimizer *optimizer;         /* made from the same table */
    float lr;
    float max_norm; /* of the gradient; 0: not clipped */
} dtrain_step_desc;

typedef struct dtrain_step_result {
    double total_weight; /* of all ranks; 0: nothing was applied */
    double norm;         /* of the gradient before clipping; 0 when max_norm is */
} dtrain_step_result;

/* Sets gradients to zero, computes, aggregates, clips and applies.
 *
 *   result   out; may be NULL
 *   errors   DTRAIN_ERR_INVALID  a missing table, compute or optimizer
 *            the status of compute, or those of aggregating; nothing was applied. When compute fails on one rank,
 *            the others learn it when this rank leaves the group, or at their deadline
 *
 * collective when its aggregator is */
DTRAIN_API dtrain_status dtrain_train_step(const dtrain_step_desc *desc, dtrain_step_result *result);

#ifdef __cplusplus
}
#endif

#endif

/* ---- >>fsdp ----
 * Fully sharded data parallelism for a program that keeps its own loop. Parameters are declared once, in a table;
 * their addresses never change, but a unit's memory is there only while the unit is gathered. Gradients are reduced
 * to the shards of their owners as soon as a unit's are complete, and the optimizer runs on shards.
 *
 * A unit is the concatenation of its ranges in table order (a stacked tensor gives one layer to each of its units).
 * It is cut into as many slices as ranks shard it, earlier ones one element longer; there is no padding, and a rank
 * may hold nothing of a tensor, or of a unit. The same calls serve every strategy:
 *
 *                  parameters      gradients    optimizer state   sent a step, for P bytes on n ranks
 *   FULL_SHARD     slice           slice        slice             2 or 3 P (n-1)/n
 *   SHARD_GRAD_OP  full            slice        slice             2 P (n-1)/n
 *   NO_SHARD       full            full         full              2 P (n-1)/n
 *   HYBRID_SHARD   slice of a node, replicated over the nodes; as FULL_SHARD in a node of s ranks, and
 *                  2 P/s (m-1)/m between m nodes
 *
 * (PyTorch's SHARD_GRAD_OP shards parameters between steps; here they stay.) Reductions are the tree of >>order, so
 * FULL_SHARD, SHARD_GRAD_OP and NO_SHARD give the same weights, bit for bit, and HYBRID_SHARD does where shard_size is
 * a power of two. Micro-batches are folded by the same tree: with micro-batch i of rank r being number i * ranks + r
 * of the step (dtrain_sampler_desc.strided), a fixed number of them gives the same weights on 1, 2, 4 and 8 ranks.
 *
 * Every rank makes the same gather calls in the same order: gathering is collective, and between two of them each rank
 * lets go of the same units, by dtrain_fsdp_release or dtrain_fsdp_reduce. Reductions may come in any order of units,
 * and a rank may leave some out: a unit that was gathered on the way down and released adds nothing. (Over a transport
 * of the caller's own, which has one group for all, reductions too come in the same order on every rank, and none is
 * left out on some ranks alone.) A group's death ends every call with DTRAIN_ERR_PEER_LOST; the object can then only be
 * asked for its slices and destroyed.
 *
 *   source   Rajbhandari, Rasley, Ruwase, He, ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023 */
#ifndef DTRAIN__FSDP_H
#define DTRAIN__FSDP_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dtrain_strategy {
    DTRAIN_STRATEGY_DEFAULT = 0, /* full shard */
    DTRAIN_FULL_SHARD = 601,
    DTRAIN_SHARD_GRAD_OP,
    DTRAIN_NO_SHARD,
    DTRAIN_HYBRID_SHARD
} dtrain_strategy;

/* What some parameters have of their own. The first group of a desc whose name fits counts. */
typedef struct dtrain_param_group {
    const char *name;   /* of a parameter; with a * at its end, of all that begin so */
    float lr_factor;    /* of the learning rate; 0: 1 */
    float weight_decay; /* 0: the optimizer's */
    int no_decay;       /* 1: none */
} dtrain_param_group;

typedef struct dtrain_fsdp_desc {
    dtrain_strategy strategy;         /* 0: full shard */
    int shard_size;                   /* hybrid: ranks of a node, which divides the world size; others: not read */
    dtrain_dtype gather_dtype;        /* that parameters travel in, F32, BF16 or F16; 0: F32. Masters stay F32 */
    dtrain_dtype reduce_dtype;        /* that gradients travel in, F32, BF16 or F16; 0: F32. They are summed in F32 */
    dtrain_optimizer_desc optimizer;  /* kind DTRAIN_OPTIMIZER_NONE: the caller's own, see dtrain_fsdp_local */
    const dtrain_param_group *groups; /* read by create */
    size_t group_count;
    int no_reshard_after_forward; /* 1: what was gathered stays until the step */
    int no_prefetch;              /* 1: a unit is gathered when it is asked for */
    int no_overlap;               /* 1: nothing is reduced before all units of a micro-batch are */
    int keep_full_grads;          /* 1: micro-batches are folded on each rank in full, and communicated once a step */
    int micro_batches;            /* of a rank in a step, the most, for the plan; 0: 1 */
    float loss_scale;             /* the first, by which the caller multiplies its loss; 0: none is used */
    int loss_scale_steps;         /* good steps after which it doubles; 0: 2,000 */
    size_t bucket_bytes;          /* units are added up between copies (no shard, hybrid) once so much of them waits,
                                     each by itself where gradients travel in 16 bits; 0: 1 MiB; 1: each by itself */
    int no_broadcast;             /* 1: data in the table is the same on all ranks already */
    size_t trace_events;          /* kept for dtrain_fsdp_trace, the last of them; 0: none */
} dtrain_fsdp_desc;

/* What one rank will need and send, in bytes. Peak is what is in use at most at once, in whole pages. */
typedef struct dtrain_fsdp_plan_result {
    size_t weights;       /* this rank's slices; 0 for those that lie in the full parameters */
    size_t gradients;     /* slices of sums, with those of earlier micro-batches */
    size_t optimizer;     /* state */
    size_t full_weights;  /* pages of parameters that are gathered at once, at most, and of slices that lie there */
    size_t full_grads;    /* pages of gradients that are in full at once, at most */
    size_t bookkeeping;   /* tables and page counts */
    size_t peak;          /* the sum of all these */
    uint64_t sent_gather; /* to other ranks in a step of one micro-batch, all parameters used */
    uint64_t sent_reduce; /* and for gradients */
} dtrain_fsdp_plan_result;

/* Says what one rank will need, before anything is allocated. The table needs no memory for it.
 *
 *   desc     NULL: all defaults
 *   rank     of world_size
 *   plan     out
 *   errors   DTRAIN_ERR_INVALID  as dtrain_fsdp_create
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_fsdp_plan(const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc,
                                          int world_size, int rank, dtrain_fsdp_plan_result *plan);

typedef struct dtrain_fsdp dtrain_fsdp;

/* Shards a table's parameters over a group.
 *
 * A parameter whose data is NULL gets a range of addresses from the library, and starts as zeros (see dtrain_fsdp_put
 * and dtrain_fsdp_set); one that has data lies there, takes its first values from it, rank 0's unless no_broadcast,
 * and its pages stay the caller's, as does its gradient's memory. A parameter with frozen set has no gradient, and no
 * optimizer state.
 *
 *   comm     must outlive it; three or four groups of its ranks are made from it
 *   table    copied, names included; the same on every rank but for addresses. F32; a frozen parameter of another
 *            dtype must have data, and stays there in full on every rank
 *   desc     NULL: all defaults; the same on every rank
 *   errors   DTRAIN_ERR_INVALID      a bad table, optimizer or desc; a world that is no multiple of shard_size
 *            DTRAIN_ERR_UNSUPPORTED  a parameter that is neither F32 nor frozen with data
 *            DTRAIN_ERR_MISMATCH     tables or descs differ between ranks
 *            DTRAIN_ERR_MEMORY; those of dtrain_comm_split and dtrain_broadcast
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_create(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table,
                                            size_t count, const dtrain_fsdp_desc *desc);

/* Frees it; NULL is legal. Memory of the caller's is left as it is: after dtrain_fsdp_unshard, full parameters.
 * Operations on their way are given a second to end, then cut short: ranks that go on with theirs get
 * DTRAIN_ERR_ABORTED. (Over a transport of the caller's own, whose one group they share, they are waited for.)
 *
 * one thread per object */
DTRAIN_API void dtrain_fsdp_destroy(dtrain_fsdp *fsdp);

/* Returns the text of the last error; empty before the first, never NULL.
 *
 * one thread per object */
DTRAIN_API const char *dtrain_fsdp_error(const dtrain_fsdp *fsdp);

/* Returns the address of a parameter, of full size, the same for the object's life; NULL for none of that name. It may
 * be read while the parameter's unit is gathered, and written then to be handed to dtrain_fsdp_put.
 *
 * one thread per object */
DTRAIN_API float *dtrain_fsdp_param(const dtrain_fsdp *fsdp, const char *name);

/* Returns the address of a parameter's gradient, of full size, zeros until the caller adds to it; NULL for none of
 * that name, or a frozen one. From dtrain_fsdp_reduce of a unit on, the unit's are zero again.
 *
 * one thread per object */
DTRAIN_API float *dtrain_fsdp_grad(const dtrain_fsdp *fsdp, const char *name);

/* Makes a unit's parameters readable, and starts to gather the next one, in the direction in which calls go.
 *
 * A released unit stays until its room is needed: two units that rotate and those with tied parameters are in memory
 * at most, so that the last of a forward pass is still there for the backward pass. A unit that is gathered already
 * may be gathered again. Under strategies that keep full parameters it only takes note.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit; those of dtrain_all_gather: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_gather(dtrain_fsdp *fsdp, int unit);

/* Says that a unit's parameters are not needed for now.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit, or it is not gathered
 *
 * one thread per object; never blocks */
DTRAIN_API dtrain_status dtrain_fsdp_release(dtrain_fsdp *fsdp, int unit);

/* Starts to gather the first unit, before the first layer needs it.
 *
 *   errors   DTRAIN_ERR_INVALID  called already and no gather since; or a strategy that gathers nothing
 *
 * collective: every rank, same order; never blocks */
DTRAIN_API dtrain_status dtrain_fsdp_prefetch(dtrain_fsdp *fsdp);

/* Says whether a prefetch was called and the gather that takes it has not been.
 *
 * one thread per object */
DTRAIN_API int dtrain_fsdp_prefetch_pending(const dtrain_fsdp *fsdp);

/* Opens a step, for ranks whose batches differ. Without it every rank weighs 1, and the step has as many micro-batches
 * as are reduced.
 *
 *   micro_batches   of this rank; more are an error. With keep_full_grads needed where there is more than one
 *   weight          of this rank's examples in the whole step, usually their tokens; may be 0. Gradients are sums,
 *                   divided once by the weight of all ranks
 *   errors          DTRAIN_ERR_INVALID  gradients of a step are not used yet; a bad weight or number
 *
 * one thread per object; never blocks */
DTRAIN_API dtrain_status dtrain_fsdp_begin(dtrain_fsdp *fsdp, int micro_batches, double weight);

/* Takes a unit's gradients over when backward has finished with the unit, starts to reduce them, and releases the
 * unit's parameters. Gradients are zero, and their memory free, as soon as they are on their way.
 *
 * Units are reduced from the last to the first; one that comes before a later one waits for it in full, unless that one
 * was gathered on the way down and released, which leaves it out. Units without gradients are only released. When all
 * were reduced and one is again, the next micro-batch has begun.
 *
 *   errors   DTRAIN_ERR_INVALID  no such unit; it is not gathered, so that its gradients cannot have been computed;
 *                                reduced twice while others are missing (see dtrain_fsdp_next); more micro-batches
 *                                than announced. The object stays as it was
 *            those of dtrain_reduce_scatter: the object is broken
 *
 * collective: every rank, any order of units; blocks up to timeout_ms for the unit before */
DTRAIN_API dtrain_status dtrain_fsdp_reduce(dtrain_fsdp *fsdp, int unit);

/* Ends a micro-batch in which this rank left units out: they add nothing to the sums.
 *
 *   errors   DTRAIN_ERR_INVALID  more micro-batches than announced; gradients of a step are not used yet
 *
 * one thread per object; blocks up to timeout_ms for a unit that is on its way */
DTRAIN_API dtrain_status dtrain_fsdp_next(dtrain_fsdp *fsdp);

/* Stands in for a micro-batch for which this rank has no examples: gathers and releases every unit from the first to
 * the last and back, as the others do, and adds nothing. Not counted among those that this rank has announced.
 *
 *   errors   DTRAIN_ERR_INVALID  units of a micro-batch were reduced; gradients of a step are not used yet
 *
 * collective: every rank, same order; blocks up to timeout_ms an operation */
DTRAIN_API dtrain_status dtrain_fsdp_join(dtrain_fsdp *fsdp);

/* Says that this rank cannot go on with the step, so that none applies it. The next call of dtrain_fsdp_finish, or one
 * that implies it, ends on every rank with DTRAIN_ERR_ABORTED, this rank's number and why; gradients are dropped, and
 * the object can be used. Gathers and reductions that the others make must still be made, as by dtrain_fsdp_join.
 *
 * one thread per object; never blocks */
DTRAIN_API void dtrain_fsdp_fail(dtrain_fsdp *fsdp, const char *why);

/* Waits for all gradients and divides them once by the weight of all ranks, and by the loss scale. A rank with fewer
 * micro-batches than others adds nothing to those that it lacks. Called by clip_grad_norm, local and step where the
 * caller has not.
 *
 *   total_weight   out: of all ranks; may be NULL. When it is 0 gradients are not divided
 *   errors         DTRAIN_ERR_INVALID  on every rank: no rank has reduced anything. The object can be used
 *                  DTRAIN_ERR_ABORTED  a rank has called dtrain_fsdp_fail
 *                  those of dtrain_reduce_scatter: the object is broken
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_finish(dtrain_fsdp *fsdp, double *total_weight);

/* Measures the length of all gradients as one vector, and shortens it to max_norm when it is longer.
 *
 * The sum of squares is exact, every element once, whatever the sharding, and rounded to float64 once; the factor
 * max_norm / norm is rounded to float32 once. Not finite: gradients are left as they are.
 *
 *   max_norm   0: measure only
 *   norm       out, the same on every rank; may be NULL
 *   errors     as dtrain_fsdp_finish
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_clip_grad_norm(dtrain_fsdp *fsdp, float max_norm, double *norm);

/* Updates the weights from the gradients, which are gone then, and gathers them where full parameters are kept.
 *
 * With a loss scale, a step in which any rank's gradient is not finite changes no weight and halves the scale; see
 * skipped of dtrain_fsdp_get_stats. Without one it is applied as it is.
 *
 *   errors   as dtrain_fsdp_finish; DTRAIN_ERR_INVALID lr negative or not finite, or no optimizer
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_step(dtrain_fsdp *fsdp, float lr);

/* Drops the gradients of a step that is not to be applied; legal at any time but within a micro-batch.
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_drop(dtrain_fsdp *fsdp);

/* The part of one range that this rank holds: what an optimizer of the caller's updates, and a checkpoint saves. */
typedef struct dtrain_slice {
    const char *name; /* of the parameter */
    dtrain_dtype dtype;
    size_t shape[DTRAIN_MAX_DIMS]; /* of the parameter in full */
    int ndim;
    int layer; /* of a stacked parameter: the box [layer, ...]; -1: the box is all of it */
    int unit;
    size_t begin, count; /* elements of the box in row-major order; count may be 0 */
    int no_decay;
    float *weights;  /* count float32 each; NULL where there is none, or none yet */
    float *grads;    /* after dtrain_fsdp_finish, until the step */
    float *state[2]; /* AdamW: m and v; SGD with momentum: the velocity */
} dtrain_slice;

/* Lists this rank's slices, those of no elements included: by unit, in table order. The array is the object's; it stays
 * until the next call that takes the object.
 *
 * After an own update of the weights, call dtrain_fsdp_publish. To resume, write weights and state, then publish, and
 * say with dtrain_fsdp_set_step how old they are. They can be read when the object is broken, too.
 *
 * one thread per object; never blocks */
DTRAIN_API dtrain_status dtrain_fsdp_local(dtrain_fsdp *fsdp, const dtrain_slice **slices, size_t *count);

/* Makes new slices of weights count: what was gathered before is not used again; where full parameters are kept they
 * are gathered. Gradients are dropped.
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_publish(dtrain_fsdp *fsdp);

/* Return and set the number of steps that the optimizer has made, by which AdamW corrects its averages: part of what
 * is saved and resumed. The same on every rank. A step that could not be published is counted.
 *
 *   errors   DTRAIN_ERR_INVALID  gradients of a step are not used yet
 *
 * one thread per object; never blocks */
DTRAIN_API uint64_t dtrain_fsdp_get_step(const dtrain_fsdp *fsdp);
DTRAIN_API dtrain_status dtrain_fsdp_set_step(dtrain_fsdp *fsdp, uint64_t step);

/* Takes this rank's slice of a gathered unit from its full parameters: the caller has written them, the same on every
 * rank, as when it initialises a model that no rank can hold.
 *
 *   errors   DTRAIN_ERR_INVALID  the unit is not gathered
 *
 * one thread per object; never blocks */
DTRAIN_API dtrain_status dtrain_fsdp_put(dtrain_fsdp *fsdp, int unit);

/* Sets a parameter from one rank's full value.
 *
 *   value    all elements on root; on other ranks not read, may be NULL
 *   errors   DTRAIN_ERR_INVALID  no such parameter, or a bad root
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_set(dtrain_fsdp *fsdp, const char *name, const float *value, int root);

/* Copies a parameter's full value, in F32, to one rank, or with root -1 to all.
 *
 *   value    out: all elements; on ranks that get none not touched, may be NULL
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_get(dtrain_fsdp *fsdp, const char *name, float *value, int root);

/* Gathers every parameter and keeps all until the next step: for an evaluation by foreign code, or before destroy,
 * which leaves them in memory of the caller's. Rounded to gather_dtype, as all that is gathered; dtrain_fsdp_get has
 * the masters.
 *
 * collective: every rank, same order; blocks up to timeout_ms */
DTRAIN_API dtrain_status dtrain_fsdp_unshard(dtrain_fsdp *fsdp);

/* Return what was asked for, and the number of ranks that share one copy of the parameters.
 *
 * one thread per object */
DTRAIN_API dtrain_strategy dtrain_fsdp_strategy(const dtrain_fsdp *fsdp);
DTRAIN_API int dtrain_fsdp_shard_size(const dtrain_fsdp *fsdp);

/* Returns the factor by which the caller multiplies its loss now; 1 where none is used.
 *
 * one thread per object */
DTRAIN_API float dtrain_fsdp_loss_scale(const dtrain_fsdp *fsdp);

/* What an object has done since it was made. */
typedef struct dtrain_fsdp_stats {
    uint64_t steps;          /* applied */
    uint64_t skipped;        /* not applied, because a gradient was not finite */
    int64_t communicated_ns; /* that gathers and reductions were under way, each by itself */
    int64_t waited_ns;       /* that the caller waited for them */
    size_t bytes;            /* in use now: memory and pages */
    size_t peak_bytes;       /* the most at once */
} dtrain_fsdp_stats;

/* Returns the counters; hidden communication is 1 - waited_ns / communicated_ns.
 *
 * one thread per object */
DTRAIN_API dtrain_fsdp_stats dtrain_fsdp_get_stats(const dtrain_fsdp *fsdp);

/* Writes the last events as a Chrome trace: a lane of computation, of gathers, of reductions, and of waiting.
 *
 *   errors   DTRAIN_ERR_INVALID  the desc has no trace_events; DTRAIN_ERR_IO
 *
 * one thread per object */
DTRAIN_API dtrain_status dtrain_fsdp_trace(const dtrain_fsdp *fsdp, const char *path);

#ifdef __cplusplus
}
#endif

#endif

/* ---- >>module ----
 * A model as a list of layers with callbacks, for programs in which the library orders the work. The library gathers a
 * layer's parameters, calls it, and releases them; backward goes the other way and reduces gradients as each unit is
 * complete. It owns the activations between layers and what a layer saves for its backward, for each micro-batch that
 * is in flight. A program with a loop of its own needs none of this.
 *
 * Gradients are sums over a micro-batch's examples: callbacks add to them and never divide. The step divides once, by
 * the weight of all ranks (dtrain_fsdp_begin). Without FSDP they stay in the caller's table, as sums.
 *
 *     for (int i = 0; i < micro_batches; i++) {
 *         DTRAIN_CHECK(dtrain_fsdp_forward(fsdp, module, 0, &tokens, &targets, &loss));
 *         DTRAIN_CHECK(dtrain_fsdp_backward(fsdp, module, 0, NULL, NULL));
 *     }
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr)); */
#ifndef DTRAIN__MODULE_H
#define DTRAIN__MODULE_H

#ifdef __cplusplus
extern "C" {
#endif

#define DTRAIN_EVALUATE (-1) /* in place of a micro-batch: a forward pass that no backward follows */

/* What a callback computes from and into; good until it returns. Memory of tensors is aligned to 64 bytes, but for the
 * caller's own. */
typedef struct dtrain_layer_context {
    int layer;              /* its index */
    int micro_batch;        /* as given to dtrain_fsdp_forward; DTRAIN_EVALUATE: no backward follows */
    void *batch;            /* the same */
    float *const *params;   /* an address for each name of the layer; of a stacked one, its own layer's. Read only */
    float *const *grads;    /* in backward: to add to; NULL where the parameter is frozen */
    dtrain_tensor input;    /* read only */
    dtrain_tensor output;   /* forward writes all of it; backward reads it */
    void *saved;            /* forward writes it, backward reads it; as many bytes as shape said */
    dtrain_tensor d_output; /* in backward: of output's shape, read only; data NULL for a last layer that is the loss */
    dtrain_tensor d_input;  /* in backward: of input's shape, to be written in full; data NULL: not wanted */
} dtrain_layer_context;

/* Computes a layer, or its gradients; any status but DTRAIN_OK fails the step (see dtrain_fsdp_forward). */
typedef dtrain_status (*dtrain_layer_fn)(void *user, const dtrain_layer_context *context);

/* Says what a layer makes of an input, by its dtype and shape alone: they have no data.
 *
 *   output        holds input's dtype, ndim and shape; change what differs. Its count and bytes are not read
 *   saved_bytes   holds 0 */
typedef dtrain_status (*dtrain_layer_shape_fn)(void *user, const dtrain_tensor *input, dtrain_tensor *output,
                                               size_t *saved_bytes);

typedef struct dtrain_layer {
    const char *name;            /* for texts */
    const char *const *params;   /* names of the table */
    size_t param_count;          /* 0: none, and unit is not read */
    int unit;                    /* of its parameters; others it may have are tied, and of an earlier layer's unit */
    dtrain_layer_shape_fn shape; /* NULL: output has input's shape, and nothing is saved */
    dtrain_layer_fn forward;
    dtrain_layer_fn backward;         /* gradients of the input, and of the parameters where backward_weights is NULL */
    dtrain_layer_fn backward_weights; /* gradients of the parameters alone, at some time after backward; may be NULL */
    void *user;                       /* handed to all four */
} dtrain_layer;

typedef struct dtrain_module_desc {
    int micro_batches;           /* in flight at once, forward done and backward not; 0: 1 */
    dtrain_allocator *allocator; /* of activations; must outlive the module; NULL: the C library */
} dtrain_module_desc;

typedef struct dtrain_module dtrain_module;

/* Makes a module of layers over the parameters of a table.
 *
 *   layers   in the order of forward; copied, names included. Their units do not descend
 *   table    the one that dtrain_fsdp_create takes, on a pipeline's rank that of its own layers; copied, names
 *            included. Parameters need memory only where the module is used without FSDP
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID      no layers; a layer without name, forward or backward, with a parameter that the
 *                                    table has not, or of another unit and not tied; a bad table
 *            DTRAIN_ERR_UNSUPPORTED  a parameter that is not F32
 *            DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API dtrain_status dtrain_module_create(dtrain_module **module, const dtrain_layer *layers, size_t count,
                                              const dtrain_param *table, size_t table_count,
                                              const dtrain_module_desc *desc);

/* Frees a module and its activations; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_module_destroy(dtrain_module *module);

/* Returns the text of the last error, that of a callback included; empty before the first, never NULL.
 *
 * one thread per object */
DTRAIN_API const char *dtrain_module_error(const dtrain_module *module);

/* Runs all layers over one micro-batch.
 *
 * Memory is allocated when a micro-batch is larger than any before it in its place, and reused. A forward over one that
 * had no backward replaces it. DTRAIN_EVALUATE has a place of its own, keeps nothing, and disturbs none.
 *
 * When a callback fails on this rank, or there is no memory, the rank calls dtrain_fsdp_fail and goes on taking part in
 * what the others gather and reduce, with zeros for output: this call and backward return DTRAIN_OK, so that the step
 * ends with DTRAIN_ERR_ABORTED on every rank, with this rank's number, the layer and its status. Without FSDP, and
 * under DTRAIN_EVALUATE, the callback's status is returned, on this rank alone.
 *
 *   fsdp          made from the module's table; NULL: parameters are in the table's memory
 *   micro_batch   a place below desc.micro_batches, or DTRAIN_EVALUATE
 *   input         copied, unless it is to evaluate
 *   batch         handed to callbacks, in backward too, until when it must stay; may be NULL
 *   output        out: of the last layer, a view that is good until the next forward in this place. Without dtype,
 *                 shape and data where a failure left none
 *   errors        DTRAIN_ERR_INVALID  no such place; no input or output; fsdp is of another table; a parameter without
 *                                     memory. Nothing is changed
 *                 those of dtrain_fsdp_gather, or of the callback
 *
 * collective: every rank, same order; blocks up to timeout_ms a unit */
DTRAIN_API dtrain_status dtrain_fsdp_forward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                             const dtrain_tensor *input, void *batch, dtrain_tensor *output);

/* Runs all layers backward over a micro-batch that was run forward, and reduces each unit's gradients after its first
 * layer. Where a table has units that no layer uses, dtrain_fsdp_next ends the micro-batch, as in a loop of one's own.
 *
 *   d_output   gradient of the output, of its dtype and shape; NULL: the last layer is the loss and begins by itself
 *   d_input    out: memory of the input's dtype and shape for its gradient; NULL: not wanted
 *   errors     DTRAIN_ERR_INVALID  no forward in this place; other shapes; more micro-batches than announced, or
 *                                  gradients that are finished and not used. Nothing is changed
 *              those of dtrain_fsdp_reduce, or of the callback; failures as in dtrain_fsdp_forward
 *
 * collective: every rank, same order; blocks up to timeout_ms a unit */
DTRAIN_API dtrain_status dtrain_fsdp_backward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                              const dtrain_tensor *d_output, const dtrain_tensor *d_input);

#ifdef __cplusplus
}
#endif

#endif

#ifdef DTRAIN_IMPLEMENTATION

/* ---- >>begin ----
 * A program that makes the API static uses some of it: what it leaves unused is no reason to warn. */
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

/* ---- >>os ----
 * The one place for what differs between systems: clock, threads, waiting on a word, processors.
 * Everything above asks here and never the system. Waiting is on a 32-bit word (a futex on Linux,
 * a timed sleep elsewhere); a wake-up may be spurious, so callers re-check what they wait for.
 * Threads started here block all signals, so that handlers run on the program's own. */
#ifndef DTRAIN__OS
#define DTRAIN__OS

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define DTRAIN__CACHE_LINE 64

static int64_t dtrain__os_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Milliseconds that a caller chose, as nanoseconds that can be added to any time. */
static int64_t dtrain__os_ms_to_ns(int64_t ms)
{
    return ms < INT64_MAX / 4 / 1000000 ? ms * 1000000 : INT64_MAX / 4;
}

static struct timespec dtrain__os_timespec(int64_t ns)
{
    struct timespec span;
    span.tv_sec = (time_t)(ns / 1000000000);
    span.tv_nsec = (long)(ns % 1000000000);
    return span;
}

static int dtrain__os_processors(void)
{
#if defined(__linux__) && defined(__NR_sched_getaffinity)
    /* The affinity mask, not the machine: containers and taskset give a process fewer. */
    unsigned long mask[1024 / (8 * sizeof(unsigned long))];
    long bytes = syscall(__NR_sched_getaffinity, 0, sizeof mask, mask);
    int count = 0;
    for (long i = 0; i < bytes / (long)sizeof(unsigned long); i++)
        count += __builtin_popcountl(mask[i]);
    if (count > 0)
        return count;
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 && online < INT_MAX ? (int)online : 1;
}

static void dtrain__os_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Sleeps while *word == value, for at most ns; returns early at any time. */
static void dtrain__os_wait_word(uint32_t *word, uint32_t value, int64_t ns)
{
#ifdef __linux__
    struct timespec span = dtrain__os_timespec(ns);
    syscall(__NR_futex, word, FUTEX_WAIT_PRIVATE, value, &span, NULL, 0);
#else
    struct timespec span = dtrain__os_timespec(ns < 200000 ? ns : 200000);
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
        nanosleep(&span, NULL);
#endif
}

static void dtrain__os_wake_word(uint32_t *word)
{
#ifdef __linux__
    syscall(__NR_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

typedef struct dtrain__os_thread {
    pthread_t id;
    void (*body)(void *);
    void *argument;
} dtrain__os_thread;

static void *dtrain__os_thread_main(void *pointer)
{
    dtrain__os_thread *thread = (dtrain__os_thread *)pointer;
    thread->body(thread->argument);
    return NULL;
}

/* Starts body(argument); the struct stays in place until the join. Returns 0 or an errno. */
static int dtrain__os_thread_start(dtrain__os_thread *thread, void (*body)(void *), void *argument, size_t stack_bytes)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    if (stack_bytes > 0)
        error = pthread_attr_setstacksize(&attributes, stack_bytes);
    if (error == 0) {
        thread->body = body;
        thread->argument = argument;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&thread->id, &attributes, dtrain__os_thread_main, thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    return error;
}

static void dtrain__os_thread_join(dtrain__os_thread *thread)
{
    pthread_join(thread->id, NULL);
}

/* Bytes of a page, the unit in which memory comes and goes. */
static size_t dtrain__os_page_bytes(void)
{
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

/* Reserves a range of addresses, in whole pages, which read as zeros and take memory page by page as they are written.
 * Returns NULL when the system refuses. */
static void *dtrain__os_reserve(size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANON;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void *range = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return range != MAP_FAILED ? range : NULL;
}

/* Gives the memory of whole pages back; they read as zeros again. Returns 0 or an errno. */
static int dtrain__os_discard(void *pages, size_t bytes)
{
#ifdef __linux__
    return madvise(pages, bytes, MADV_DONTNEED) == 0 ? 0 : errno;
#else
    /* elsewhere that advice promises no zeros: new pages take their place */
    void *range = mmap(pages, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0);
    return range != MAP_FAILED ? 0 : errno;
#endif
}

/* Brings the memory of whole pages at once, which is cheaper than page by page as they are written; where the system
 * has no such call they come so. */
static void dtrain__os_populate(void *pages, size_t bytes)
{
#ifdef __linux__
    madvise(pages, bytes, 23); /* MADV_POPULATE_WRITE, since Linux 5.14 */
#else
    (void)pages;
    (void)bytes;
#endif
}

/* Moves whole pages of a reserved range, contents and all, to others, whose own are gone then; what they leave reads
 * as zeros. Both must have been mapped or moved there by one call. Returns 0 or an errno, with nothing moved. */
static int dtrain__os_move(void *from, void *to, size_t bytes)
{
#if defined(__linux__) && defined(__NR_mremap)
    const int flags = 7; /* MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP: the last since Linux 5.7 */
    if (syscall(__NR_mremap, from, bytes, bytes, flags, to) != -1)
        return 0;
    int error = errno;
    /* it may have taken the target away before it failed; 0x100000, MAP_FIXED_NOREPLACE: only then is it mapped */
    mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE | 0x100000, -1, 0);
    return error;
#else
    (void)from;
    (void)to;
    (void)bytes;
    return ENOSYS;
#endif
}

/* Says whether whole pages were neither read nor written since they were mapped or discarded; 0 where the system does
 * not tell. */
static int dtrain__os_untouched(const void *pages, size_t bytes)
{
    int untouched = 0;
#ifdef __linux__
    uint64_t entries[512];
    size_t page = dtrain__os_page_bytes(), count = bytes / page;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    untouched = fd >= 0;
    for (size_t at = 0; at < count && untouched; at += sizeof entries / sizeof entries[0]) {
        size_t n = count - at < sizeof entries / sizeof entries[0] ? count - at : sizeof entries / sizeof entries[0];
        off_t offset = (off_t)(((uintptr_t)pages / page + at) * sizeof entries[0]);
        untouched = pread(fd, entries, n * sizeof entries[0], offset) == (ssize_t)(n * sizeof entries[0]);
        for (size_t i = 0; i < n && untouched; i++)
            untouched = entries[i] >> 62 == 0; /* neither present nor swapped out */
    }
    if (fd >= 0)
        close(fd);
#else
    (void)pages;
    (void)bytes;
#endif
    return untouched;
}

static void dtrain__os_unreserve(void *range, size_t bytes)
{
    munmap(range, bytes);
}

/* Fills out with bytes that nobody can guess. Returns 0 or an errno. */
static int dtrain__os_random(void *out, size_t bytes)
{
    unsigned char *at = (unsigned char *)out;
    ssize_t n = 0;
    int fd, error = 0;
#if defined(__linux__) && defined(__NR_getrandom)
    while (bytes > 0 && ((n = syscall(__NR_getrandom, at, bytes, 0)) > 0 || errno == EINTR)) {
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
#endif
    if (bytes == 0)
        return 0;
    fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    while (bytes > 0 && ((n = read(fd, at, bytes)) > 0 || (n < 0 && errno == EINTR))) {
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    if (bytes > 0)
        error = n < 0 ? errno : EIO;
    close(fd);
    return error;
}

/* What tells this host, since its last start, from others: processes of one host get the same. */
static void dtrain__os_host_id(unsigned char id[128])
{
    int fd;
    memset(id, 0, 128);
    gethostname((char *)id, 63);
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC); /* only on Linux */
    if (fd < 0)
        return;
    ssize_t ignored = read(fd, id + 64, 63);
    (void)ignored;
    close(fd);
}

#endif

/* ---- >>status ----
 * Status names, error texts and the log. dtrain__fail is the only maker of error texts: it formats
 * one line into the object's own error and into the calling thread's last error, and returns the
 * status, so that a failing function is one `return dtrain__fail(...)`. */
#ifndef DTRAIN__STATUS
#define DTRAIN__STATUS

#define DTRAIN__ERROR_BYTES 640

typedef struct dtrain__error {
    dtrain_status status;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__error;

static __thread dtrain__error dtrain__thread_error;
static void dtrain__log_to_stderr(void *user, dtrain_log_level level, const char *text);
static dtrain_log_fn dtrain__log_callback = dtrain__log_to_stderr;
static void *dtrain__log_user;

static void dtrain__log_to_stderr(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    if (level >= DTRAIN_LOG_WARN)
        fprintf(stderr, "dtrain: %s\n", text);
}

DTRAIN_API void dtrain_set_log(dtrain_log_fn log, void *user)
{
    dtrain__log_callback = log;
    dtrain__log_user = user;
}

__attribute__((format(printf, 2, 3))) static void dtrain__log(dtrain_log_level level, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list arguments;
    if (dtrain__log_callback == NULL)
        return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__log_callback(dtrain__log_user, level, text);
}

/* Formats into object (NULL: none) and into the thread's last error. The arguments may quote either text. */
__attribute__((format(printf, 3, 4))) static dtrain_status dtrain__fail(dtrain__error *object, dtrain_status status,
                                                                        const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__thread_error.status = status;
    memcpy(dtrain__thread_error.text, text, sizeof text);
    if (object != NULL)
        *object = dtrain__thread_error;
    return status;
}

/* Makes an error kept elsewhere the calling thread's own. */
static dtrain_status dtrain__report(const dtrain__error *error)
{
    if (error->status != DTRAIN_OK)
        dtrain__thread_error = *error;
    return error->status;
}

DTRAIN_API const char *dtrain_last_error(void)
{
    return dtrain__thread_error.text;
}

DTRAIN_API const char *dtrain_status_name(dtrain_status status)
{
    static const char *const names[] = {
        "OK",           "ERR_INVALID", "ERR_MEMORY",      "ERR_IO",     "ERR_TIMEOUT", "ERR_PEER_LOST",
        "ERR_MISMATCH", "ERR_CORRUPT", "ERR_UNSUPPORTED", "ERR_DENIED", "ERR_ABORTED"};
    size_t index = (size_t)status;
    return index < sizeof names / sizeof names[0] ? names[index] : "not a dtrain_status";
}

#endif

/* ---- >>memory ----
 * The allocator behind every object, its counters, and arithmetic on sizes that notices overflow.
 * Blocks are aligned to a cache line and remembered with their size by whoever owns them.
 * Counters are kept with atomics: one allocator may serve several objects and threads. */
#ifndef DTRAIN__MEMORY
#define DTRAIN__MEMORY

static int dtrain__add_size(size_t a, size_t b, size_t *sum)
{
    *sum = a + b;
    return a <= SIZE_MAX - b;
}

static int dtrain__mul_size(size_t a, size_t b, size_t *product)
{
    *product = a * b;
    return b == 0 || a <= SIZE_MAX / b;
}

#ifndef DTRAIN_RESIZE
#define DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align)                                                      \
    dtrain__resize_default(pointer, old_bytes, new_bytes, align)

static void *dtrain__resize_default(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    if (new_bytes > 0) {
        if (posix_memalign(&block, align < sizeof(void *) ? sizeof(void *) : align, new_bytes) != 0)
            return NULL;
        if (pointer != NULL)
            memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    }
    free(pointer);
    return block;
}
#endif

/* Adds to the bytes in use; less is a number that wraps around. */
static void dtrain__memory_count(dtrain_allocator *allocator, size_t more)
{
    size_t in_use = __atomic_add_fetch(&allocator->bytes, more, __ATOMIC_RELAXED);
    size_t peak = __atomic_load_n(&allocator->peak_bytes, __ATOMIC_RELAXED);
    while (in_use > peak &&
           !__atomic_compare_exchange_n(&allocator->peak_bytes, &peak, in_use, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}

static void *dtrain__resize(dtrain_allocator *allocator, void *pointer, size_t old_bytes, size_t new_bytes)
{
    void *block = allocator->resize != NULL
                      ? allocator->resize(allocator->user, pointer, old_bytes, new_bytes, DTRAIN__CACHE_LINE)
                      : DTRAIN_RESIZE(allocator->user, pointer, old_bytes, new_bytes, DTRAIN__CACHE_LINE);
    if (new_bytes > 0 && block == NULL)
        return NULL;
    dtrain__memory_count(allocator, new_bytes - old_bytes);
    return block;
}

/* Returns zeroed memory, or NULL; bytes of 0 gives one byte's worth, so that NULL always means failure. */
static void *dtrain__alloc(dtrain_allocator *allocator, size_t bytes)
{
    void *block = dtrain__resize(allocator, NULL, 0, bytes > 0 ? bytes : 1);
    if (block != NULL)
        memset(block, 0, bytes);
    return block;
}

static void dtrain__free(dtrain_allocator *allocator, void *pointer, size_t bytes)
{
    if (pointer != NULL)
        dtrain__resize(allocator, pointer, bytes > 0 ? bytes : 1, 0);
}

#endif

/* ---- >>wait ----
 * Waiting for another thread: spin briefly, yield, then sleep. A bell is rung by whoever changes
 * something that others may wait for; it costs one load while nobody sleeps. A sleeper registers,
 * looks once more, and sleeps only if the bell has not rung since. */
#ifndef DTRAIN__WAIT
#define DTRAIN__WAIT

#define DTRAIN__WAIT_YIELDS 200u

typedef struct dtrain__bell {
    uint32_t rings; /* counts while somebody sleeps */
    uint32_t sleepers;
    uint32_t spins;            /* busy looks before yielding: none where threads outnumber processors */
    struct dtrain__bell *also; /* rung with it: of one who listens to many; NULL: none */
} dtrain__bell;

static void dtrain__bell_ring(dtrain__bell *bell)
{
    for (; bell != NULL; bell = bell->also)
        if (__atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST) > 0) {
            __atomic_add_fetch(&bell->rings, 1, __ATOMIC_SEQ_CST);
            dtrain__os_wake_word(&bell->rings);
        }
}

/* One turn of waiting, the turn'th since something last moved; sleeps for at most a tenth of a second. */
static void dtrain__bell_wait(dtrain__bell *bell, unsigned turn, int64_t deadline_ns, int (*ready)(void *),
                              void *context)
{
    if (turn < bell->spins) {
        dtrain__os_pause();
        return;
    }
    if (turn < bell->spins + DTRAIN__WAIT_YIELDS) {
        sched_yield();
        return;
    }
    int64_t now = dtrain__os_now_ns();
    int64_t span = deadline_ns > now ? deadline_ns - now : 0;
    if (span > 100000000)
        span = 100000000;
    __atomic_add_fetch(&bell->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t rings = __atomic_load_n(&bell->rings, __ATOMIC_SEQ_CST);
    if (span > 0 && !ready(context))
        dtrain__os_wait_word(&bell->rings, rings, span);
    __atomic_sub_fetch(&bell->sleepers, 1, __ATOMIC_SEQ_CST);
}

#endif

/* ---- >>random ----
 * Counter-based random numbers: value number `index` of stream `seed` is a function of the two and nothing
 * else, so any rank or thread computes any part. The normal draw is integer arithmetic up to its last step,
 * an exact scaling: no compiler flag, rounding mode or libm can change a bit of it. */
#ifndef DTRAIN__RANDOM
#define DTRAIN__RANDOM

#include <string.h>

/* Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */
static void dtrain__random_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0;
        uint64_t b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

DTRAIN_API void dtrain_random_u32x4(uint64_t seed, uint64_t index, uint32_t out[4])
{
    uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    dtrain__random_philox(counter, key, out);
}

DTRAIN_API uint64_t dtrain_random_u64(uint64_t seed, uint64_t index)
{
    uint32_t word[4];
    dtrain_random_u32x4(seed, index, word);
    return (uint64_t)word[1] << 32 | word[0];
}

DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t index)
{
    uint32_t word[4];
    dtrain_random_u32x4(seed, index, word);
    return (float)(int32_t)(word[0] >> 8) * (1.0f / 16777216.0f);
}

/* Returns -ln(v / 2^64) for v > 0, as a multiple of 2^-57, within 2^-50.
 *
 *   source   multiply by factors 1 + 2^-k until 2 is nearly reached, adding up their logarithms: Knuth, The Art
 *            of Computer Programming 1, exercise 1.2.2-28; what remains, d < 2^-20, by -ln(1-d) = d + d^2/2 */
static uint64_t dtrain__random_minus_log(uint64_t v)
{
    static const uint64_t log_factor[20] = {
        /* ln(1 + 2^-k) for k = 1 ... 20, times 2^57 */
        0x0cf991f65fcc260u, 0x0723fdf1e6a6887u, 0x03c4e0edc55e5ccu, 0x01f0a30c01162a6u, 0x00fc14d873c1980u,
        0x007f02a2c3f00f9u, 0x003fc054d620cf1u, 0x001ff00aa2b10bcu, 0x000ffc0154d5887u, 0x0007ff002aa2ac4u,
        0x0003ffc00554d56u, 0x0001fff000aaa2bu, 0x0000fffc001554du, 0x00007fff0002aaau, 0x00003fffc000555u,
        0x00001ffff0000abu, 0x00000ffffc00015u, 0x000007ffff00003u, 0x000003ffffc0000u, 0x000001fffff0000u};
    const uint64_t log_2 = 0x162e42fefa39ef3u, two = (uint64_t)1 << 63;
    int shift = __builtin_clzll(v);
    uint64_t m = v << shift >> 1; /* 1 <= m < 2, times 2^62 */
    uint64_t sum = (uint64_t)shift * log_2;
    for (int k = 1; k <= 20; k++) {
        uint64_t next = m + (m >> k);
        int fits = next <= two;
        m = fits ? next : m;
        sum += fits ? log_factor[k - 1] : 0;
    }
    uint64_t d = two - m; /* times 2^63 */
    uint64_t high = d >> 12;
    return sum + (d >> 6) + (high * high >> 46);
}

/* Returns the square root of n, 2^62 <= n < 2^64, within 1: Newton's steps from the chord, 3% off. */
static uint64_t dtrain__random_sqrt(uint64_t n)
{
    uint64_t root = n / 3 / ((uint64_t)1 << 31) + 0x5c000000u;
    for (int i = 0; i < 3; i++)
        root = (root + n / root) / 2;
    return root < 0xffffffffu ? root : 0xffffffffu;
}

/* Returns sin(pi/2 * (w + 1/2) / 2^32) as a multiple of 2^-32, within 2^-29: the Taylor series to the 15th power. */
static uint64_t dtrain__random_sine(uint32_t w)
{
    static const uint64_t term[7] = {0xf4u, 0x3c61u, 0xa83c2u, 0x132d2cdu, 0x1466bc67u, 0xa55de731u, 0x1921fb544u};
    uint64_t square = (uint64_t)w * w >> 32, sum = 3;
    for (int i = 0; i < 7; i++)
        sum = term[i] - (sum * square >> 32);
    return (sum >> 2) * (2 * (uint64_t)w + 1) >> 31;
}

/* Returns sign * product * 2^-scale, rounded here to 24 bits so that the conversion and the scaling are exact. */
static float dtrain__random_float(uint64_t product, int scale, int negative)
{
    if (product == 0)
        return 0.0f;
    int shift = 40 - __builtin_clzll(product);
    if (shift > 0) {
        product = (product + ((uint64_t)1 << (shift - 1))) >> shift;
        scale -= shift;
    }
    uint32_t power_bits = (uint32_t)(127 - scale) << 23;
    float power;
    memcpy(&power, &power_bits, sizeof power);
    float magnitude = (float)(int32_t)product;
    return (negative ? -magnitude : magnitude) * power;
}

/* Radius from words 0 and 1, direction from words 2 and 3: sqrt(-2 ln u) sin(angle), up to 9.4 deviations out.
 *
 *   source   Box, Muller, Annals of Mathematical Statistics 29(2), 1958 */
DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t index)
{
    uint32_t word[4];
    dtrain_random_u32x4(seed, index, word);
    uint64_t v = ((uint64_t)word[1] << 32 | word[0]) + 1;       /* 0 stands for 2^64, whose logarithm is none */
    uint64_t square = v != 0 ? dtrain__random_minus_log(v) : 0; /* of the radius, times 2^56 */
    if (square == 0)
        return 0.0f;
    int half_shift = __builtin_clzll(square) / 2;
    uint64_t radius = dtrain__random_sqrt(square << (2 * half_shift)); /* times 2^(28 + half_shift) */
    return dtrain__random_float(radius * dtrain__random_sine(word[2]), 60 + half_shift, (int)(word[3] & 1));
}

#endif

/* ---- >>sha256 ----
 * SHA-256, in one piece or streamed: start, add as often as needed, finish. Lengths count bytes; the
 * standard's limit of 2^64 - 1 bits is beyond any file. Not constant-time in its lengths, only in its data. */
#ifndef DTRAIN__SHA256
#define DTRAIN__SHA256

#include <string.h>

#define DTRAIN__SHA256_BLOCK 64u

typedef struct dtrain__sha256 {
    uint32_t state[8];
    uint64_t bytes; /* added so far; bytes % 64 of them wait in block */
    unsigned char block[DTRAIN__SHA256_BLOCK];
} dtrain__sha256;

static uint32_t dtrain__sha256_rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

/* The message schedule, FIPS 180-4 section 6.2.2 step 1. */
static void dtrain__sha256_schedule(uint32_t w[64], const unsigned char *block)
{
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16 | (uint32_t)block[4 * t + 2] << 8 |
               (uint32_t)block[4 * t + 3];
    for (int t = 16; t < 64; t++) {
        uint32_t a = w[t - 15], b = w[t - 2];
        uint32_t s0 = dtrain__sha256_rotate(a, 7) ^ dtrain__sha256_rotate(a, 18) ^ a >> 3;
        uint32_t s1 = dtrain__sha256_rotate(b, 17) ^ dtrain__sha256_rotate(b, 19) ^ b >> 10;
        w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
}

/* Round t, step 3: instead of moving a ... h down by one, their places in v turn by t. */
static inline void dtrain__sha256_round(uint32_t v[8], int t, uint32_t addend)
{
    uint32_t a = v[(8 - t) & 7], b = v[(9 - t) & 7], c = v[(10 - t) & 7];
    uint32_t e = v[(12 - t) & 7], f = v[(13 - t) & 7], g = v[(14 - t) & 7];
    uint32_t sum1 = dtrain__sha256_rotate(e, 6) ^ dtrain__sha256_rotate(e, 11) ^ dtrain__sha256_rotate(e, 25);
    uint32_t sum0 = dtrain__sha256_rotate(a, 2) ^ dtrain__sha256_rotate(a, 13) ^ dtrain__sha256_rotate(a, 22);
    uint32_t t1 = v[(15 - t) & 7] + sum1 + ((e & f) ^ (~e & g)) + addend;
    v[(11 - t) & 7] += t1;
    v[(15 - t) & 7] = t1 + sum0 + ((a & b) ^ (a & c) ^ (b & c));
}

static void dtrain__sha256_block(uint32_t state[8], const unsigned char *block)
{
    static const uint32_t k[64] = {
        0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
        0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
        0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
        0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
        0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
        0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
        0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
        0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};
    uint32_t w[64], v[8];
    dtrain__sha256_schedule(w, block);
    memcpy(v, state, sizeof v);
    for (int t = 0; t < 64; t += 8) /* after eight rounds every variable is back in its place */
        for (int i = 0; i < 8; i++)
            dtrain__sha256_round(v, i, k[t + i] + w[t + i]);
    for (int i = 0; i < 8; i++)
        state[i] += v[i];
}

static void dtrain__sha256_start(dtrain__sha256 *sha)
{
    static const uint32_t initial[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                        0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    memset(sha, 0, sizeof *sha);
    memcpy(sha->state, initial, sizeof initial);
}

static void dtrain__sha256_add(dtrain__sha256 *sha, const void *data, size_t bytes)
{
    const unsigned char *next = (const unsigned char *)data;
    while (bytes > 0) {
        size_t held = (size_t)(sha->bytes % DTRAIN__SHA256_BLOCK);
        size_t part = DTRAIN__SHA256_BLOCK - held;
        if (held == 0 && bytes >= DTRAIN__SHA256_BLOCK) {
            dtrain__sha256_block(sha->state, next);
        } else {
            part = bytes < part ? bytes : part;
            memcpy(sha->block + held, next, part);
            if (held + part == DTRAIN__SHA256_BLOCK)
                dtrain__sha256_block(sha->state, sha->block);
        }
        sha->bytes += part;
        next += part;
        bytes -= part;
    }
}

/* Pads with 0x80, zeros and the length in bits; sha must be started anew after it. */
static void dtrain__sha256_finish(dtrain__sha256 *sha, unsigned char digest[32])
{
    unsigned char pad[DTRAIN__SHA256_BLOCK + 8] = {0x80};
    uint64_t bits = sha->bytes * 8;
    size_t held = (size_t)(sha->bytes % DTRAIN__SHA256_BLOCK);
    size_t zeros_end = held < 56 ? 56 - held : 120 - held;
    for (int i = 0; i < 8; i++)
        pad[zeros_end + (size_t)i] = (unsigned char)(bits >> (56 - 8 * i) & 255);
    dtrain__sha256_add(sha, pad, zeros_end + 8);
    for (int i = 0; i < 32; i++)
        digest[i] = (unsigned char)(sha->state[i / 4] >> (24 - 8 * (i % 4)) & 255);
}

DTRAIN_API void dtrain_sha256(const void *data, size_t bytes, unsigned char digest[32])
{
    dtrain__sha256 sha;
    dtrain__sha256_start(&sha);
    dtrain__sha256_add(&sha, data, bytes);
    dtrain__sha256_finish(&sha, digest);
}

/* Keyed hash of a message. Source: RFC 2104, FIPS 198-1. */
typedef struct dtrain__hmac {
    dtrain__sha256 inner;
    unsigned char outer_key[DTRAIN__SHA256_BLOCK];
} dtrain__hmac;

static void dtrain__hmac_start(dtrain__hmac *hmac, const void *key, size_t key_bytes)
{
    unsigned char inner_key[DTRAIN__SHA256_BLOCK];
    memset(hmac->outer_key, 0, sizeof hmac->outer_key);
    if (key_bytes > sizeof hmac->outer_key)
        dtrain_sha256(key, key_bytes, hmac->outer_key);
    else if (key_bytes > 0)
        memcpy(hmac->outer_key, key, key_bytes);
    for (size_t i = 0; i < sizeof inner_key; i++) {
        inner_key[i] = hmac->outer_key[i] ^ 0x36;
        hmac->outer_key[i] ^= 0x5c;
    }
    dtrain__sha256_start(&hmac->inner);
    dtrain__sha256_add(&hmac->inner, inner_key, sizeof inner_key);
}

static void dtrain__hmac_add(dtrain__hmac *hmac, const void *data, size_t bytes)
{
    dtrain__sha256_add(&hmac->inner, data, bytes);
}

static void dtrain__hmac_finish(dtrain__hmac *hmac, unsigned char mac[32])
{
    unsigned char digest[32];
    dtrain__sha256_finish(&hmac->inner, digest);
    dtrain__sha256_start(&hmac->inner);
    dtrain__sha256_add(&hmac->inner, hmac->outer_key, sizeof hmac->outer_key);
    dtrain__sha256_add(&hmac->inner, digest, sizeof digest);
    dtrain__sha256_finish(&hmac->inner, mac);
}

/* Compares in a time that does not depend on where the two differ. */
static int dtrain__equal_secret(const void *a, const void *b, size_t bytes)
{
    const volatile unsigned char *x = (const volatile unsigned char *)a, *y = (const volatile unsigned char *)b;
    unsigned char differ = 0;
    for (size_t i = 0; i < bytes; i++)
        differ = (unsigned char)(differ | (x[i] ^ y[i]));
    return differ == 0;
}

#endif

/* ---- >>json ----
 * A strict RFC 8259 reader that pulls one token at a time out of bytes that may be hostile, and a writer into a
 * bounded buffer. Neither allocates nor recurses; the reader never looks past its length and stays at its first
 * error. Strings are checked whole (UTF-8, escapes, surrogate pairs) when they are read, wanted or not; texts
 * carry lengths, because \u0000 is a legal character. Duplicate keys are the caller's to refuse. */
#ifndef DTRAIN__JSON
#define DTRAIN__JSON

#include <string.h>

#define DTRAIN__JSON_DEPTH 32

typedef enum dtrain__json_kind {
    DTRAIN__JSON_ERROR, /* the reader's error and offset say what and where */
    DTRAIN__JSON_END,   /* the one value is complete and nothing but whitespace follows it */
    DTRAIN__JSON_NULL,
    DTRAIN__JSON_FALSE,
    DTRAIN__JSON_TRUE,
    DTRAIN__JSON_NUMBER,
    DTRAIN__JSON_STRING,
    DTRAIN__JSON_KEY, /* an object's; its value is the next token */
    DTRAIN__JSON_OBJECT,
    DTRAIN__JSON_OBJECT_END,
    DTRAIN__JSON_ARRAY,
    DTRAIN__JSON_ARRAY_END
} dtrain__json_kind;

typedef enum dtrain__json_expect {
    DTRAIN__JSON_WANT_VALUE,
    DTRAIN__JSON_WANT_VALUE_OR_END, /* after [ */
    DTRAIN__JSON_WANT_KEY,
    DTRAIN__JSON_WANT_KEY_OR_END, /* after { */
    DTRAIN__JSON_WANT_COMMA_OR_END
} dtrain__json_expect;

typedef struct dtrain__json_reader {
    const unsigned char *text;
    size_t length;
    size_t offset;     /* of the next byte; after an error, of the byte that is wrong */
    const char *error; /* what is wrong, a phrase; NULL while nothing is */
    int depth;
    uint32_t objects; /* bit i: the level i + 1 is an object */
    dtrain__json_expect expect;
} dtrain__json_reader;

typedef struct dtrain__json_token {
    dtrain__json_kind kind;
    size_t begin, end; /* its bytes in the text, without the quotes of a string */
} dtrain__json_token;

static void dtrain__json_open(dtrain__json_reader *reader, const void *text, size_t length)
{
    memset(reader, 0, sizeof *reader);
    reader->text = (const unsigned char *)text;
    reader->length = length;
    reader->expect = DTRAIN__JSON_WANT_VALUE;
}

static dtrain__json_kind dtrain__json_bad(dtrain__json_reader *reader, size_t offset, const char *error)
{
    reader->offset = offset;
    reader->error = error;
    return DTRAIN__JSON_ERROR;
}

/* The byte at offset, or -1 at the end. */
static int dtrain__json_peek(const dtrain__json_reader *reader, size_t offset)
{
    return offset < reader->length ? reader->text[offset] : -1;
}

static int dtrain__json_in(int byte, int low, int high)
{
    return byte >= low && byte <= high;
}

/* Returns the bytes of the well-formed UTF-8 sequence that starts text, or 0. Unicode 15, table 3-7. */
static size_t dtrain__json_utf8(const unsigned char *text, size_t length)
{
    int lead = length > 0 ? text[0] : 0xff, low = 0x80, high = 0xbf;
    size_t bytes = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (lead > 0xf4 || dtrain__json_in(lead, 0x80, 0xc1) || bytes > length)
        return 0;
    if (lead == 0xe0)
        low = 0xa0; /* below: overlong */
    else if (lead == 0xed)
        high = 0x9f; /* above: surrogates */
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f; /* above: beyond U+10FFFF */
    for (size_t i = 1; i < bytes; i++) {
        if (!dtrain__json_in(text[i], low, high))
            return 0;
        low = 0x80;
        high = 0xbf;
    }
    return bytes;
}

/* The value of the four hex digits at offset, or -1. */
static int32_t dtrain__json_hex4(const dtrain__json_reader *reader, size_t offset)
{
    int32_t value = 0;
    if (offset > reader->length || reader->length - offset < 4)
        return -1;
    for (size_t i = 0; i < 4; i++) {
        int byte = reader->text[offset + i];
        int digit = dtrain__json_in(byte, '0', '9')   ? byte - '0'
                    : dtrain__json_in(byte, 'a', 'f') ? byte - 'a' + 10
                    : dtrain__json_in(byte, 'A', 'F') ? byte - 'A' + 10
                                                      : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* Decodes the escape whose backslash is at offset into code; returns its bytes in the text, or 0. */
static size_t dtrain__json_escape(const dtrain__json_reader *reader, size_t offset, uint32_t *code)
{
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    int letter = dtrain__json_peek(reader, offset + 1);
    if (letter != 'u') {
        const char *found = letter > 0 ? strchr(letters, letter) : NULL;
        *code = found != NULL ? (uint32_t)meanings[found - letters] : 0;
        return found != NULL ? 2 : 0;
    }
    int32_t first = dtrain__json_hex4(reader, offset + 2);
    if (first < 0 || dtrain__json_in(first, 0xdc00, 0xdfff))
        return 0;
    *code = (uint32_t)first;
    if (!dtrain__json_in(first, 0xd800, 0xdbff))
        return 6;
    if (dtrain__json_peek(reader, offset + 6) != '\\' || dtrain__json_peek(reader, offset + 7) != 'u')
        return 0;
    int32_t second = dtrain__json_hex4(reader, offset + 8);
    if (!dtrain__json_in(second, 0xdc00, 0xdfff))
        return 0;
    *code = 0x10000u + ((uint32_t)(first - 0xd800) << 10) + (uint32_t)(second - 0xdc00);
    return 12;
}

/* Reads the string whose opening quote is at the reader's offset. */
static dtrain__json_kind dtrain__json_read_string(dtrain__json_reader *reader, dtrain__json_token *token)
{
    size_t at = reader->offset + 1;
    token->begin = at;
    for (;;) {
        int byte = dtrain__json_peek(reader, at);
        size_t step = 0;
        uint32_t code;
        if (byte < 0)
            return dtrain__json_bad(reader, at, "the text ends inside a string");
        if (byte == '"')
            break;
        if (byte < 0x20)
            return dtrain__json_bad(reader, at, "a control character inside a string");
        step = byte == '\\' ? dtrain__json_escape(reader, at, &code)
                            : dtrain__json_utf8(reader->text + at, reader->length - at);
        if (step == 0)
            return dtrain__json_bad(reader, at, byte == '\\' ? "an escape that JSON does not have" : "not UTF-8");
        at += step;
    }
    token->end = at;
    reader->offset = at + 1;
    return DTRAIN__JSON_STRING;
}

static size_t dtrain__json_digits(const dtrain__json_reader *reader, size_t offset)
{
    while (dtrain__json_in(dtrain__json_peek(reader, offset), '0', '9'))
        offset++;
    return offset;
}

static dtrain__json_kind dtrain__json_read_number(dtrain__json_reader *reader, dtrain__json_token *token)
{
    size_t at = reader->offset, begin;
    token->begin = at;
    at += dtrain__json_peek(reader, at) == '-';
    begin = at;
    at = dtrain__json_digits(reader, at);
    if (at == begin)
        return dtrain__json_bad(reader, at, "a number without digits");
    if (reader->text[begin] == '0' && at - begin > 1)
        return dtrain__json_bad(reader, begin, "a number with a leading zero");
    if (dtrain__json_peek(reader, at) == '.') {
        begin = at + 1;
        at = dtrain__json_digits(reader, begin);
        if (at == begin)
            return dtrain__json_bad(reader, at, "a fraction without digits");
    }
    if (dtrain__json_peek(reader, at) == 'e' || dtrain__json_peek(reader, at) == 'E') {
        int sign = dtrain__json_peek(reader, at + 1);
        begin = at + 1 + (sign == '+' || sign == '-');
        at = dtrain__json_digits(reader, begin);
        if (at == begin)
            return dtrain__json_bad(reader, at, "an exponent without digits");
    }
    token->end = reader->offset = at;
    return DTRAIN__JSON_NUMBER;
}

static dtrain__json_kind dtrain__json_read_word(dtrain__json_reader *reader, dtrain__json_token *token,
                                                const char *word, dtrain__json_kind kind)
{
    size_t bytes = strlen(word);
    token->begin = reader->offset;
    if (reader->length - reader->offset < bytes || memcmp(reader->text + reader->offset, word, bytes) != 0)
        return dtrain__json_bad(reader, reader->offset, "a word that JSON does not have");
    token->end = reader->offset += bytes;
    return kind;
}

static dtrain__json_kind dtrain__json_enter(dtrain__json_reader *reader, int is_object)
{
    if (reader->depth == DTRAIN__JSON_DEPTH)
        return dtrain__json_bad(reader, reader->offset, "nested deeper than 32 levels");
    uint32_t bit = (uint32_t)1 << reader->depth++;
    reader->objects = is_object ? reader->objects | bit : reader->objects & ~bit;
    reader->expect = is_object ? DTRAIN__JSON_WANT_KEY_OR_END : DTRAIN__JSON_WANT_VALUE_OR_END;
    reader->offset++;
    return is_object ? DTRAIN__JSON_OBJECT : DTRAIN__JSON_ARRAY;
}

static int dtrain__json_inside_object(const dtrain__json_reader *reader)
{
    return reader->depth > 0 && (reader->objects >> (reader->depth - 1) & 1) != 0;
}

static void dtrain__json_space(dtrain__json_reader *reader)
{
    for (;;) {
        int byte = dtrain__json_peek(reader, reader->offset);
        if (byte != ' ' && byte != '\t' && byte != '\n' && byte != '\r')
            return;
        reader->offset++;
    }
}

static dtrain__json_kind dtrain__json_read_value(dtrain__json_reader *reader, dtrain__json_token *token)
{
    int byte = dtrain__json_peek(reader, reader->offset);
    reader->expect = DTRAIN__JSON_WANT_COMMA_OR_END;
    if (byte == '{' || byte == '[')
        return dtrain__json_enter(reader, byte == '{');
    if (byte == '"')
        return dtrain__json_read_string(reader, token);
    if (byte == '-' || dtrain__json_in(byte, '0', '9'))
        return dtrain__json_read_number(reader, token);
    if (byte == 'n')
        return dtrain__json_read_word(reader, token, "null", DTRAIN__JSON_NULL);
    if (byte == 't')
        return dtrain__json_read_word(reader, token, "true", DTRAIN__JSON_TRUE);
    if (byte == 'f')
        return dtrain__json_read_word(reader, token, "false", DTRAIN__JSON_FALSE);
    return dtrain__json_bad(reader, reader->offset, byte < 0 ? "the text ends before a value" : "not a value");
}

static dtrain__json_kind dtrain__json_read_key(dtrain__json_reader *reader, dtrain__json_token *token)
{
    if (dtrain__json_peek(reader, reader->offset) != '"')
        return dtrain__json_bad(reader, reader->offset, "a key was expected");
    if (dtrain__json_read_string(reader, token) == DTRAIN__JSON_ERROR)
        return DTRAIN__JSON_ERROR;
    dtrain__json_space(reader);
    if (dtrain__json_peek(reader, reader->offset) != ':')
        return dtrain__json_bad(reader, reader->offset, "a colon was expected after a key");
    reader->offset++;
    reader->expect = DTRAIN__JSON_WANT_VALUE;
    return DTRAIN__JSON_KEY;
}

/* The next token, its position included, with nothing checked but what precedes it. */
static dtrain__json_kind dtrain__json_read(dtrain__json_reader *reader, dtrain__json_token *token)
{
    int in_object = dtrain__json_inside_object(reader);
    int after_value = reader->expect == DTRAIN__JSON_WANT_COMMA_OR_END;
    dtrain__json_space(reader);
    int byte = dtrain__json_peek(reader, reader->offset);
    token->begin = token->end = reader->offset;
    if (after_value && reader->depth == 0)
        return byte < 0 ? DTRAIN__JSON_END : dtrain__json_bad(reader, reader->offset, "more text after the value");
    if (byte == (in_object ? '}' : ']') && reader->expect != DTRAIN__JSON_WANT_VALUE &&
        reader->expect != DTRAIN__JSON_WANT_KEY) {
        reader->depth--;
        reader->offset++;
        reader->expect = DTRAIN__JSON_WANT_COMMA_OR_END;
        return in_object ? DTRAIN__JSON_OBJECT_END : DTRAIN__JSON_ARRAY_END;
    }
    if (after_value) {
        if (byte != ',')
            return dtrain__json_bad(reader, reader->offset, "a comma or the end of the list was expected");
        reader->offset++;
        reader->expect = in_object ? DTRAIN__JSON_WANT_KEY : DTRAIN__JSON_WANT_VALUE;
        dtrain__json_space(reader);
        token->begin = token->end = reader->offset;
    }
    if (reader->expect == DTRAIN__JSON_WANT_KEY || reader->expect == DTRAIN__JSON_WANT_KEY_OR_END)
        return dtrain__json_read_key(reader, token);
    return dtrain__json_read_value(reader, token);
}

/* Reads the next token. ERROR and END are given again when asked again. */
static dtrain__json_kind dtrain__json_next(dtrain__json_reader *reader, dtrain__json_token *token)
{
    token->begin = token->end = reader->offset;
    token->kind = reader->error != NULL ? DTRAIN__JSON_ERROR : dtrain__json_read(reader, token);
    if (token->kind == DTRAIN__JSON_OBJECT || token->kind == DTRAIN__JSON_ARRAY)
        token->end = reader->offset;
    return token->kind;
}

/* Reads to the end of the value that token begins; returns 0 on an error. */
static int dtrain__json_skip(dtrain__json_reader *reader, const dtrain__json_token *token)
{
    dtrain__json_token inner;
    if (token->kind == DTRAIN__JSON_OBJECT || token->kind == DTRAIN__JSON_ARRAY) {
        int outside = reader->depth - 1;
        while (reader->depth > outside)
            if (dtrain__json_next(reader, &inner) == DTRAIN__JSON_ERROR)
                return 0;
    }
    return reader->error == NULL;
}

static size_t dtrain__json_encode(uint32_t code, unsigned char out[4])
{
    size_t bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = bytes; i-- > 1; code >>= 6)
        out[i] = (unsigned char)(0x80 | (code & 0x3f));
    out[0] = (unsigned char)(lead[bytes] | code);
    return bytes;
}

/* Unescapes a STRING or KEY into out, without a terminator; returns the bytes it has or would need. Nothing is
 * written past capacity; a result above it means that out holds a part. */
static size_t dtrain__json_string(const dtrain__json_reader *reader, const dtrain__json_token *token, void *out,
                                  size_t capacity)
{
    size_t written = 0;
    for (size_t at = token->begin; at < token->end;) {
        unsigned char piece[4] = {reader->text[at], 0, 0, 0};
        size_t bytes = 1, step = 1;
        if (piece[0] == '\\') {
            uint32_t code = 0;
            step = dtrain__json_escape(reader, at, &code);
            bytes = dtrain__json_encode(code, piece);
        }
        if (written <= capacity && bytes <= capacity - written)
            memcpy((unsigned char *)out + written, piece, bytes);
        written += bytes;
        at += step;
    }
    return written;
}

/* Whether a STRING or KEY, unescaped, is the text, which has at most 64 bytes. */
static int dtrain__json_is(const dtrain__json_reader *reader, const dtrain__json_token *token, const char *text)
{
    unsigned char have[64];
    size_t bytes = strlen(text);
    return bytes <= sizeof have && dtrain__json_string(reader, token, have, sizeof have) == bytes &&
           memcmp(have, text, bytes) == 0;
}

/* Gives a NUMBER that is 0 or [1-9][0-9]* up to 2^64 - 1, exactly; returns 0 for any other token. */
static int dtrain__json_u64(const dtrain__json_reader *reader, const dtrain__json_token *token, uint64_t *value)
{
    *value = 0;
    if (token->kind != DTRAIN__JSON_NUMBER)
        return 0;
    for (size_t at = token->begin; at < token->end; at++) {
        int byte = reader->text[at];
        uint64_t digit = (uint64_t)(byte - '0');
        if (!dtrain__json_in(byte, '0', '9') || *value > (UINT64_MAX - digit) / 10)
            return 0;
        *value = *value * 10 + digit;
    }
    return 1;
}

/* Writes compact JSON. A call out of place (a value without its key, an end without its begin, more than 32
 * levels), a text that is not UTF-8 or a number that is not finite breaks the writer for good. */
typedef struct dtrain__json_writer {
    unsigned char *out; /* may be NULL when capacity is 0: then it counts */
    size_t capacity;
    size_t bytes; /* what the text has or would need; what is beyond capacity is not written */
    int broken;
    int depth;
    uint32_t objects, filled; /* bit i: the level i + 1 is an object; holds something already */
    int after_key, complete;
} dtrain__json_writer;

static void dtrain__json_write_start(dtrain__json_writer *writer, void *out, size_t capacity)
{
    memset(writer, 0, sizeof *writer);
    writer->out = (unsigned char *)out;
    writer->capacity = capacity;
}

/* Returns whether the text is one whole value and fits; its length is writer->bytes, without a terminator. */
static int dtrain__json_write_finish(const dtrain__json_writer *writer)
{
    return !writer->broken && writer->complete && writer->bytes <= writer->capacity;
}

static void dtrain__json_put(dtrain__json_writer *writer, const void *text, size_t bytes)
{
    if (writer->bytes <= writer->capacity && bytes > 0) {
        size_t room = writer->capacity - writer->bytes;
        if (room > 0)
            memcpy(writer->out + writer->bytes, text, bytes < room ? bytes : room);
    }
    writer->bytes = bytes <= SIZE_MAX - writer->bytes ? writer->bytes + bytes : SIZE_MAX;
}

/* Puts the comma that a key, a value or nothing needs here, and checks that it may stand here. */
static int dtrain__json_place(dtrain__json_writer *writer, int is_key)
{
    uint32_t bit = writer->depth > 0 ? (uint32_t)1 << (writer->depth - 1) : 0;
    int in_object = (writer->objects & bit) != 0;
    if (writer->complete || (is_key ? !in_object || writer->after_key : in_object && !writer->after_key))
        writer->broken = 1;
    if (writer->broken)
        return 0;
    if ((writer->filled & bit) != 0 && !writer->after_key)
        dtrain__json_put(writer, ",", 1);
    writer->filled |= bit;
    writer->after_key = is_key;
    writer->complete = writer->depth == 0;
    return 1;
}

/* Opens an object or an array. */
static void dtrain__json_begin(dtrain__json_writer *writer, int is_object)
{
    if (writer->depth == DTRAIN__JSON_DEPTH)
        writer->broken = 1;
    if (!dtrain__json_place(writer, 0))
        return;
    uint32_t bit = (uint32_t)1 << writer->depth++;
    writer->objects = is_object ? writer->objects | bit : writer->objects & ~bit;
    writer->filled &= ~bit;
    writer->complete = 0;
    dtrain__json_put(writer, is_object ? "{" : "[", 1);
}

static void dtrain__json_end(dtrain__json_writer *writer)
{
    if (writer->depth == 0 || writer->after_key)
        writer->broken = 1;
    if (writer->broken)
        return;
    int in_object = (writer->objects >> --writer->depth & 1) != 0;
    dtrain__json_put(writer, in_object ? "}" : "]", 1);
    writer->complete = writer->depth == 0;
}

/* Escapes only " \ and what is below 0x20, as the safetensors writer does. */
static void dtrain__json_put_quoted(dtrain__json_writer *writer, const void *text, size_t length)
{
    static const char letters[] = "btn?fr", digits[] = "0123456789abcdef";
    const unsigned char *next = (const unsigned char *)text;
    size_t step = 0;
    dtrain__json_put(writer, "\"", 1);
    for (size_t at = 0; at < length; at += step) {
        char escape[6] = {'\\', 'u', '0', '0', '0', '0'};
        step = dtrain__json_utf8(next + at, length - at);
        if (step == 0) {
            writer->broken = 1;
            return;
        }
        int byte = next[at];
        int letter = byte == '"' || byte == '\\' ? byte : dtrain__json_in(byte, 8, 13) ? letters[byte - 8] : '?';
        if (byte >= 0x20 && byte != '"' && byte != '\\') {
            dtrain__json_put(writer, next + at, step);
            continue;
        }
        escape[1] = letter == '?' ? 'u' : (char)letter;
        escape[4] = digits[byte >> 4 & 15];
        escape[5] = digits[byte & 15];
        dtrain__json_put(writer, escape, letter == '?' ? 6 : 2);
    }
    dtrain__json_put(writer, "\"", 1);
}

static void dtrain__json_write_key(dtrain__json_writer *writer, const void *text, size_t length)
{
    if (!dtrain__json_place(writer, 1))
        return;
    dtrain__json_put_quoted(writer, text, length);
    dtrain__json_put(writer, ":", 1);
}

static void dtrain__json_write_string(dtrain__json_writer *writer, const void *text, size_t length)
{
    if (dtrain__json_place(writer, 0))
        dtrain__json_put_quoted(writer, text, length);
}

static void dtrain__json_write_word(dtrain__json_writer *writer, const char *word)
{
    if (dtrain__json_place(writer, 0))
        dtrain__json_put(writer, word, strlen(word));
}

static void dtrain__json_write_u64(dtrain__json_writer *writer, uint64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    dtrain__json_write_word(writer, text);
}

static void dtrain__json_write_i64(dtrain__json_writer *writer, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    dtrain__json_write_word(writer, text);
}

/* Writes the fewest digits that read back as the same bits. The locale's decimal point, one byte or more, becomes
 * a full stop; that a value is finite is asked of its bits, since fast-math takes it for granted. */
static void dtrain__json_write_double(dtrain__json_writer *writer, double value)
{
    char text[48];
    uint64_t bits, again_bits;
    size_t from, to = 0;
    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7ff) == 0x7ff) {
        writer->broken = 1;
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        double again = strtod(text, NULL);
        memcpy(&again_bits, &again, sizeof again_bits);
        if (again_bits == bits)
            break;
    }
    for (from = 0; text[from] != '\0'; from++) {
        int plain = dtrain__json_in(text[from], '0', '9') || (text[from] != '\0' && strchr("+-e", text[from]) != NULL);
        if (plain)
            text[to++] = text[from];
        else if (to == 0 || text[to - 1] != '.')
            text[to++] = '.';
    }
    text[to] = '\0';
    dtrain__json_write_word(writer, text);
}

static void dtrain__json_write_bool(dtrain__json_writer *writer, int value)
{
    dtrain__json_write_word(writer, value ? "true" : "false");
}

static void dtrain__json_write_null(dtrain__json_writer *writer)
{
    dtrain__json_write_word(writer, "null");
}

#endif

/* ---- >>isa ----
 * The instruction set, chosen once at run time, and the floating-point mode. A kernel is written once as
 * plain loops in an always-inlined body and compiled per instruction set by DTRAIN__KERNEL; its arithmetic is
 * the same operations in the same order in each, so that only its speed differs. Kernels run in the
 * default floating-point mode: round to nearest, subnormals kept. */
#ifndef DTRAIN__ISA
#define DTRAIN__ISA

#if defined(__x86_64__) && defined(__GNUC__)
#define DTRAIN__X86 1
#include <immintrin.h>
#endif

enum { DTRAIN__ISA_SCALAR = 1, DTRAIN__ISA_SSE2, DTRAIN__ISA_NEON, DTRAIN__ISA_AVX2, DTRAIN__ISA_AVX512 };

static int dtrain__isa_widest(void)
{
#if defined(DTRAIN__X86)
    __builtin_cpu_init(); /* the first call may come from a program's constructor */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return DTRAIN__ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return DTRAIN__ISA_AVX2;
    return DTRAIN__ISA_SSE2;
#elif defined(__aarch64__)
    return DTRAIN__ISA_NEON;
#else
    return DTRAIN__ISA_SCALAR;
#endif
}

static const char *dtrain__isa_text(int isa)
{
    static const char *const names[] = {"?", "scalar", "sse2", "neon", "avx2", "avx512"};
    return names[isa];
}

static int dtrain__isa(void)
{
    static int chosen;
    int isa = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (isa != 0)
        return isa;
    const char *asked = getenv("DTRAIN_ISA");
    int widest = dtrain__isa_widest();
    isa = widest;
    for (int i = DTRAIN__ISA_SCALAR; asked != NULL && i < widest; i++)
        if (strcmp(asked, dtrain__isa_text(i)) == 0 && (i != DTRAIN__ISA_NEON || widest == DTRAIN__ISA_NEON))
            isa = i;
    __atomic_store_n(&chosen, isa, __ATOMIC_RELAXED);
    return isa;
}

DTRAIN_API const char *dtrain_isa_name(void)
{
    return dtrain__isa_text(dtrain__isa());
}

/* Sets the default floating-point mode and returns the caller's, for dtrain__fpmode_restore. */
static uint64_t dtrain__fpmode_enter(void)
{
#if defined(DTRAIN__X86)
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
#else
    return 0;
#endif
}

static void dtrain__fpmode_restore(uint64_t mode)
{
#if defined(DTRAIN__X86)
    if ((mode & 0xffc0u) != 0x1f80u)
        __builtin_ia32_ldmxcsr((uint32_t)mode);
#elif defined(__aarch64__)
    if (mode != 0)
        __asm__ __volatile__("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

/* Elements at any address, of any declared type. */
#if defined(__GNUC__)
typedef float dtrain__f32 __attribute__((aligned(1), may_alias));
typedef double dtrain__f64 __attribute__((aligned(1), may_alias));
typedef uint16_t dtrain__u16 __attribute__((aligned(1), may_alias));
typedef int32_t dtrain__i32 __attribute__((aligned(1), may_alias));
typedef uint32_t dtrain__u32 __attribute__((aligned(1), may_alias));
typedef int64_t dtrain__i64 __attribute__((aligned(1), may_alias));
typedef uint64_t dtrain__u64 __attribute__((aligned(1), may_alias));
#endif

/* Says that iterations do not depend on each other, though the buffers may be the same. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* at -O0 and -O1 the loops stay scalar, and need no warning each */
#define DTRAIN__INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DTRAIN__INDEPENDENT _Pragma("GCC ivdep")
#endif

#define DTRAIN__INLINE static inline __attribute__((always_inline))

/* Defines name(...) from name_body(...), compiled for each instruction set. */
#if defined(DTRAIN__X86)
#define DTRAIN__KERNEL(name, parameters, arguments)                                                           \
    static __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"), noinline)) void name##_avx512 parameters \
    {                                                                                                         \
        name##_body arguments;                                                                                \
    }                                                                                                         \
    static __attribute__((target("avx2,fma"), noinline)) void name##_avx2 parameters                         \
    {                                                                                                         \
        name##_body arguments;                                                                                \
    }                                                                                                         \
    static __attribute__((noinline)) void name##_base parameters                                              \
    {                                                                                                         \
        name##_body arguments;                                                                                \
    }                                                                                                         \
    static void name parameters                                                                               \
    {                                                                                                         \
        int isa = dtrain__isa();                                                                              \
        if (isa == DTRAIN__ISA_AVX512)                                                                        \
            name##_avx512 arguments;                                                                          \
        else if (isa == DTRAIN__ISA_AVX2)                                                                     \
            name##_avx2 arguments;                                                                            \
        else                                                                                                  \
            name##_base arguments;                                                                            \
    }
#else
#define DTRAIN__KERNEL(name, parameters, arguments) \
    static void name parameters                     \
    {                                               \
        name##_body arguments;                      \
    }
#endif

/* Keeps a product from being contracted with the sum that follows. clang's back end contracts whatever the
 * pragmas say under -ffp-contract=fast, but not across a change of bits that it cannot see through:
 * `zero` is 0, read from dtrain__opaque_zero once a kernel. */
static volatile uint32_t dtrain__opaque_zero __attribute__((unused));

DTRAIN__INLINE float dtrain__rounded_f32(float x, uint32_t zero)
{
#if defined(__clang__)
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= zero;
    memcpy(&x, &bits, sizeof bits);
#else
    (void)zero;
#endif
    return x;
}

DTRAIN__INLINE double dtrain__rounded_f64(double x, uint32_t zero)
{
#if defined(__clang__)
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= zero;
    memcpy(&x, &bits, sizeof bits);
#else
    (void)zero;
#endif
    return x;
}

/* The correctly rounded square root of x >= 0; clang's fast-math would approximate its builtin. */
DTRAIN__INLINE float dtrain__sqrt_f32(float x)
{
#if defined(__clang__) && defined(__FAST_MATH__) && defined(DTRAIN__X86)
    __asm__("sqrtss %0, %0" : "+x"(x));
    return x;
#elif defined(__clang__) && defined(__FAST_MATH__) && defined(__aarch64__)
    __asm__("fsqrt %s0, %s0" : "+w"(x));
    return x;
#else
    return __builtin_sqrtf(x);
#endif
}

#endif

/* ---- >>dtype ----
 * Names and widths of element types, conversions, and the one rule by which counts are cut into parts.
 * Every convertible type is exact in float64, so any pair converts by widening to its bits and rounding
 * once; the pairs that training uses have loops of their own. All of it is integer arithmetic, which no
 * compiler flag or floating-point mode changes. */
#ifndef DTRAIN__DTYPE
#define DTRAIN__DTYPE

typedef struct dtrain__dtype_row {
    const char *name;
    unsigned bits;
} dtrain__dtype_row;

static const dtrain__dtype_row dtrain__dtypes[] = {
    {"?", 0},    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},
    {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
    {"I16", 16}, {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},
    {"F32", 32}, {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};

static const dtrain__dtype_row *dtrain__dtype_find(dtrain_dtype dtype)
{
    size_t index = (size_t)(int)dtype;
    return &dtrain__dtypes[index < sizeof dtrain__dtypes / sizeof dtrain__dtypes[0] ? index : 0];
}

DTRAIN_API unsigned dtrain_dtype_bits(dtrain_dtype dtype)
{
    return dtrain__dtype_find(dtype)->bits;
}

DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype)
{
    return dtrain__dtype_find(dtype)->name;
}

DTRAIN_API dtrain_status dtrain_dtype_from_name(dtrain_dtype *dtype, const char *name, size_t length)
{
    for (int i = 1; name != NULL && i <= (int)DTRAIN_U64; i++)
        if (strlen(dtrain__dtypes[i].name) == length && memcmp(dtrain__dtypes[i].name, name, length) == 0) {
            *dtype = (dtrain_dtype)i;
            return DTRAIN_OK;
        }
    return dtrain__fail(
        NULL, DTRAIN_ERR_INVALID,
        "\"%.*s\" names no dtype; the names are those of safetensors: \"F32\", \"BF16\", \"I64\" and so on",
        name != NULL && length < 64 ? (int)length : 0, name != NULL ? name : "");
}

DTRAIN_API size_t dtrain_split(size_t count, int parts, int part, size_t *begin)
{
    size_t n, p, each, longer;
    if (begin != NULL)
        *begin = 0;
    if (parts < 1 || part < 0 || part >= parts)
        return 0;
    n = (size_t)parts;
    p = (size_t)part;
    each = count / n;
    longer = count % n;
    if (begin != NULL)
        *begin = p * each + (p < longer ? p : longer);
    return each + (p < longer ? 1 : 0);
}

/* A binary floating-point format: sign, exponent bits, mantissa bits. finite: E4M3's kind, whose all-ones
 * exponent is ordinary but for the one NaN pattern, and which has no infinity. */
typedef struct dtrain__format {
    int exponent, mantissa, finite, bytes;
} dtrain__format;

static int dtrain__format_of(dtrain_dtype dtype, dtrain__format *format)
{
    static const dtrain__format formats[] = {{11, 52, 0, 8}, {8, 23, 0, 4}, {5, 10, 0, 2},
                                             {8, 7, 0, 2},   {4, 3, 1, 1},  {5, 2, 0, 1}};
    static const dtrain_dtype dtypes[] = {DTRAIN_F64,  DTRAIN_F32,     DTRAIN_F16,
                                          DTRAIN_BF16, DTRAIN_F8_E4M3, DTRAIN_F8_E5M2};
    for (int i = 0; i < 6; i++)
        if (dtypes[i] == dtype) {
            *format = formats[i];
            return 1;
        }
    return 0;
}

/* The float64 bits of a value of format f. */
static uint64_t dtrain__widen(uint64_t bits, dtrain__format f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    uint64_t sign = (bits >> (f.exponent + f.mantissa)) << 63;
    uint64_t mantissa = bits & (((uint64_t)1 << f.mantissa) - 1);
    int exponent = (int)(bits >> f.mantissa) & top;
    int nan = exponent == top && (f.finite ? mantissa == ((uint64_t)1 << f.mantissa) - 1 : mantissa != 0);
    if (f.exponent == 11)
        return bits;
    if (nan)
        return sign | 0x7ff8000000000000u | mantissa << (52 - f.mantissa);
    if (exponent == top && !f.finite)
        return sign | 0x7ff0000000000000u;
    if (exponent == 0) {
        if (mantissa == 0)
            return sign;
        for (exponent = 1; (mantissa >> f.mantissa) == 0; exponent--)
            mantissa <<= 1;
        mantissa &= ((uint64_t)1 << f.mantissa) - 1;
    }
    return sign | (uint64_t)(exponent - bias + 1023) << 52 | mantissa << (52 - f.mantissa);
}

/* Rounds float64 bits to format f, to the nearest, ties to even. */
static uint64_t dtrain__narrow(uint64_t bits, dtrain__format f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    int exponent = (int)(bits >> 52 & 0x7ff) - 1023 + bias, shift = 52 - f.mantissa;
    uint64_t sign = (bits >> 63) << (f.exponent + f.mantissa), mantissa = bits & 0xfffffffffffffu;
    uint64_t ones = ((uint64_t)1 << f.mantissa) - 1, infinity = (uint64_t)top << f.mantissa, rounded;
    if (f.exponent == 11)
        return bits;
    if ((bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u)
        return sign | infinity | (f.finite ? ones : mantissa >> shift | (uint64_t)1 << (f.mantissa - 1));
    mantissa |= (uint64_t)1 << 52; /* a float64 subnormal rounds to zero in every narrower format all the same */
    if (exponent < 1)
        shift = 1 - exponent < 54 - shift ? shift + 1 - exponent : 54;
    rounded = (mantissa + ((uint64_t)1 << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    if (exponent > 0)
        rounded += (uint64_t)(exponent - 1) << f.mantissa; /* the hidden bit adds the last one; so does a carry */
    if (exponent > top || rounded >= (f.finite ? infinity | ones : infinity))
        rounded = f.finite ? infinity | ones : infinity;
    return sign | rounded;
}

static uint64_t dtrain__load_bits(const unsigned char *from, int bytes)
{
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64 = 0;
    switch (bytes) {
    case 1: memcpy(&u8, from, 1); return u8;
    case 2: memcpy(&u16, from, 2); return u16;
    case 4: memcpy(&u32, from, 4); return u32;
    default: memcpy(&u64, from, 8); return u64;
    }
}

static void dtrain__store_bits(unsigned char *to, uint64_t bits, int bytes)
{
    uint8_t u8 = (uint8_t)bits;
    uint16_t u16 = (uint16_t)bits;
    uint32_t u32 = (uint32_t)bits;
    switch (bytes) {
    case 1: memcpy(to, &u8, 1); break;
    case 2: memcpy(to, &u16, 2); break;
    case 4: memcpy(to, &u32, 4); break;
    default: memcpy(to, &bits, 8);
    }
}

DTRAIN__EXACT_BEGIN

DTRAIN__INLINE uint16_t dtrain__f32_to_bf16(uint32_t x)
{
    uint32_t rounded = (x + 0x7fffu + (x >> 16 & 1)) >> 16, nan = x >> 16 | 0x40;
    return (uint16_t)((x & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

DTRAIN__INLINE uint16_t dtrain__f32_to_f16(uint32_t x)
{
    uint32_t sign = x >> 16 & 0x8000u, size = x & 0x7fffffffu, exponent = size >> 23;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
    uint32_t mantissa = (size & 0x7fffffu) | 0x800000u, shift = exponent < 113 ? 126 - exponent : 1;
    shift = shift > 31 ? 31 : shift;
    uint32_t small = (mantissa + ((1u << (shift - 1)) - 1) + (mantissa >> shift & 1)) >> shift;
    uint32_t nan = 0x7e00u | (size >> 13 & 0x3ffu);
    normal = normal > 0x7c00u ? 0x7c00u : normal;
    uint32_t value = exponent < 113 ? small : normal;
    return (uint16_t)(sign | (size > 0x7f800000u ? nan : value));
}

DTRAIN__INLINE uint32_t dtrain__f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, size = x & 0x7fffu, exponent = size >> 10;
    uint32_t normal = (size << 13) + 0x38000000u, special = (size << 13) + 0x70000000u;
    /* A subnormal is a whole number of 2^-24: put it below the leading one of 2^-1 and take that away again. */
    float small, half = 0.5f;
    uint32_t bits = 0x3f000000u | size;
    memcpy(&small, &bits, 4);
    small -= half;
    memcpy(&bits, &small, 4);
    return sign | (exponent == 0 ? bits : exponent == 31 ? special | (size > 0x7c00u ? 0x400000u : 0) : normal);
}

DTRAIN__INLINE void dtrain__narrow_bf16_body(const void *in, void *out, size_t count)
{
    const dtrain__u32 *from = (const dtrain__u32 *)in;
    dtrain__u16 *to = (dtrain__u16 *)out;
    for (size_t i = 0; i < count; i++)
        to[i] = dtrain__f32_to_bf16(from[i]);
}

DTRAIN__INLINE void dtrain__widen_bf16_body(const void *in, void *out, size_t count)
{
    const dtrain__u16 *from = (const dtrain__u16 *)in;
    dtrain__u32 *to = (dtrain__u32 *)out;
    for (size_t i = 0; i < count; i++)
        to[i] = (uint32_t)from[i] << 16;
}

DTRAIN__INLINE void dtrain__narrow_f16_body(const void *in, void *out, size_t count)
{
    const dtrain__u32 *from = (const dtrain__u32 *)in;
    dtrain__u16 *to = (dtrain__u16 *)out;
    for (size_t i = 0; i < count; i++)
        to[i] = dtrain__f32_to_f16(from[i]);
}

DTRAIN__INLINE void dtrain__widen_f16_body(const void *in, void *out, size_t count)
{
    const dtrain__u16 *from = (const dtrain__u16 *)in;
    dtrain__u32 *to = (dtrain__u32 *)out;
    for (size_t i = 0; i < count; i++)
        to[i] = dtrain__f16_to_f32(from[i]);
}

DTRAIN__KERNEL(dtrain__narrow_bf16, (const void *in, void *out, size_t count), (in, out, count))
DTRAIN__KERNEL(dtrain__widen_bf16, (const void *in, void *out, size_t count), (in, out, count))
DTRAIN__KERNEL(dtrain__narrow_f16, (const void *in, void *out, size_t count), (in, out, count))
DTRAIN__KERNEL(dtrain__widen_f16, (const void *in, void *out, size_t count), (in, out, count))

DTRAIN__EXACT_END

/* Converts where the caller has set the floating-point mode and checked the dtypes. */
static void dtrain__convert(const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count)
{
    dtrain__format f = {0, 0, 0, 0}, t = {0, 0, 0, 0};
    if (count == 0)
        return;
    if (from == to) {
        memcpy(out, in, count * (dtrain_dtype_bits(from) / 8));
    } else if (from == DTRAIN_F32 && to == DTRAIN_BF16) {
        dtrain__narrow_bf16(in, out, count);
    } else if (from == DTRAIN_F32 && to == DTRAIN_F16) {
        dtrain__narrow_f16(in, out, count);
    } else if (from == DTRAIN_BF16 && to == DTRAIN_F32) {
        dtrain__widen_bf16(in, out, count);
    } else if (from == DTRAIN_F16 && to == DTRAIN_F32) {
        dtrain__widen_f16(in, out, count);
    } else {
        dtrain__format_of(from, &f);
        dtrain__format_of(to, &t);
        for (size_t i = 0; i < count; i++) {
            uint64_t wide =
                dtrain__widen(dtrain__load_bits((const unsigned char *)in + i * (size_t)f.bytes, f.bytes), f);
            dtrain__store_bits((unsigned char *)out + i * (size_t)t.bytes, dtrain__narrow(wide, t), t.bytes);
        }
    }
}

DTRAIN_API dtrain_status dtrain_convert(const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count)
{
    dtrain__format format;
    uint64_t mode;
    if (!dtrain__format_of(from, &format) || !dtrain__format_of(to, &format))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "convert %s to %s: both must be among F64, F32, F16, BF16, F8_E4M3 and F8_E5M2",
                            dtrain_dtype_name(from), dtrain_dtype_name(to));
    if (count > 0 && (in == NULL || out == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "convert %zu elements: %s is NULL", count,
                            in == NULL ? "in" : "out");
    mode = dtrain__fpmode_enter();
    dtrain__convert(in, from, out, to, count);
    dtrain__fpmode_restore(mode);
    return DTRAIN_OK;
}

#endif

/* ---- >>fold ----
 * The reduction behind every collective: element i of n inputs becomes one value by the tree order (see
 * >>order), stored to m outputs. Inputs at an index are read before any output there is written, so outputs
 * may be inputs. Sums of one, two, four and eight float inputs run in registers; the rest in tiles of 4 KiB,
 * one tile a level of the tree. 16-bit floats are folded as float32 and rounded once. */
#ifndef DTRAIN__FOLD
#define DTRAIN__FOLD

#define DTRAIN__FOLD_TILE_BYTES 4096
#define DTRAIN__FOLD_LEVELS 11 /* 1,024 inputs */

static int dtrain__fold_supported(dtrain_dtype dtype, dtrain_op op)
{
    int bits = op == DTRAIN_AND || op == DTRAIN_OR || op == DTRAIN_XOR;
    if (op < DTRAIN_SUM || op > DTRAIN_XOR)
        return 0;
    switch (dtype) {
    case DTRAIN_F64:
    case DTRAIN_F32:
    case DTRAIN_F16:
    case DTRAIN_BF16: return !bits;
    case DTRAIN_I8:
    case DTRAIN_U8:
    case DTRAIN_I32:
    case DTRAIN_U32:
    case DTRAIN_I64:
    case DTRAIN_U64: return op != DTRAIN_MEAN;
    default: return 0;
    }
}

/* The dtype of partial results. */
static dtrain_dtype dtrain__fold_partial(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F16 || dtype == DTRAIN_BF16 ? DTRAIN_F32 : dtype;
}

static int dtrain__fold_left(int n)
{
    int left = 1;
    while (2 * left < n)
        left *= 2;
    return left;
}

DTRAIN__EXACT_BEGIN

/* a[i] = a[i] op b[i] */
#define DTRAIN__PAIR(name, type, expression)                                                                           \
    DTRAIN__INLINE void name##_body(void *left, const void *right, size_t count)                                       \
    {                                                                                                                  \
        type *a = (type *)left;                                                                                        \
        const type *b = (const type *)right;                                                                           \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) a[i] = expression;                                      \
    }                                                                                                                  \
    DTRAIN__KERNEL(name, (void *left, const void *right, size_t count), (left, right, count))

/* The same for integers, whose loops the base instruction set runs fast enough. */
#define DTRAIN__PAIR_INT(name, type, expression)                                                                       \
    static void name(void *left, const void *right, size_t count)                                                      \
    {                                                                                                                  \
        type *a = (type *)left;                                                                                        \
        const type *b = (const type *)right;                                                                           \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) a[i] = (type)(expression);                              \
    }

/* Float minimum and maximum by the order of their bits: -0 below +0, NaN above all. */
#define DTRAIN__BITS_KEY(x, type, top) ((x) ^ ((x) >> top & (type)(((uint64_t)1 << top) - 1)))
#define DTRAIN__BITS_PICK(type, top, infinity, relation)                                                               \
    ((a[i] & (type)(((uint64_t)1 << top) - 1)) > infinity                           ? a[i]                             \
     : (b[i] & (type)(((uint64_t)1 << top) - 1)) > infinity                         ? b[i]                             \
     : DTRAIN__BITS_KEY(a[i], type, top) relation DTRAIN__BITS_KEY(b[i], type, top) ? a[i]                             \
                                                                                    : b[i])

DTRAIN__PAIR(dtrain__sum_f32, dtrain__f32, a[i] + b[i])
DTRAIN__PAIR(dtrain__sum_f64, dtrain__f64, a[i] + b[i])
DTRAIN__PAIR(dtrain__prod_f32, dtrain__f32, a[i] * b[i])
DTRAIN__PAIR(dtrain__prod_f64, dtrain__f64, a[i] * b[i])
DTRAIN__PAIR(dtrain__min_f32, dtrain__i32, DTRAIN__BITS_PICK(int32_t, 31, 0x7f800000, <))
DTRAIN__PAIR(dtrain__max_f32, dtrain__i32, DTRAIN__BITS_PICK(int32_t, 31, 0x7f800000, >))
DTRAIN__PAIR(dtrain__min_f64, dtrain__i64, DTRAIN__BITS_PICK(int64_t, 63, 0x7ff0000000000000, <))
DTRAIN__PAIR(dtrain__max_f64, dtrain__i64, DTRAIN__BITS_PICK(int64_t, 63, 0x7ff0000000000000, >))
DTRAIN__PAIR_INT(dtrain__sum_u8, uint8_t, (unsigned)a[i] + b[i])
DTRAIN__PAIR_INT(dtrain__sum_u32, dtrain__u32, a[i] + b[i])
DTRAIN__PAIR_INT(dtrain__sum_u64, dtrain__u64, a[i] + b[i])
DTRAIN__PAIR_INT(dtrain__prod_u8, uint8_t, (unsigned)a[i] * b[i])
DTRAIN__PAIR_INT(dtrain__prod_u32, dtrain__u32, a[i] * b[i])
DTRAIN__PAIR_INT(dtrain__prod_u64, dtrain__u64, a[i] * b[i])
DTRAIN__PAIR_INT(dtrain__and_u8, uint8_t, a[i] & b[i])
DTRAIN__PAIR_INT(dtrain__or_u8, uint8_t, a[i] | b[i])
DTRAIN__PAIR_INT(dtrain__xor_u8, uint8_t, a[i] ^ b[i])
DTRAIN__PAIR_INT(dtrain__min_i8, int8_t, a[i] < b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__min_u8, uint8_t, a[i] < b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__min_i32, dtrain__i32, a[i] < b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__min_u32, dtrain__u32, a[i] < b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__min_i64, dtrain__i64, a[i] < b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__min_u64, dtrain__u64, a[i] < b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__max_i8, int8_t, a[i] > b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__max_u8, uint8_t, a[i] > b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__max_i32, dtrain__i32, a[i] > b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__max_u32, dtrain__u32, a[i] > b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__max_i64, dtrain__i64, a[i] > b[i] ? a[i] : b[i])
DTRAIN__PAIR_INT(dtrain__max_u64, dtrain__u64, a[i] > b[i] ? a[i] : b[i])

/* x[i] = x[i] / divisor */
#define DTRAIN__DIVIDE(name, type)                                                                                     \
    DTRAIN__INLINE void name##_body(void *data, double divisor, size_t count)                                          \
    {                                                                                                                  \
        type *x = (type *)data;                                                                                        \
        type by = (type)divisor;                                                                                       \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) x[i] = x[i] / by;                                       \
    }                                                                                                                  \
    DTRAIN__KERNEL(name, (void *data, double divisor, size_t count), (data, divisor, count))

DTRAIN__DIVIDE(dtrain__divide_f32, dtrain__f32)
DTRAIN__DIVIDE(dtrain__divide_f64, dtrain__f64)

/* y[i] = x[i] * factor; y may be x */
#define DTRAIN__WEIGH(name, type)                                                                                      \
    DTRAIN__INLINE void name##_body(const void *in, double factor, void *out, size_t count)                            \
    {                                                                                                                  \
        const type *x = (const type *)in;                                                                              \
        type *y = (type *)out, by = (type)factor;                                                                      \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) y[i] = x[i] * by;                                       \
    }                                                                                                                  \
    DTRAIN__KERNEL(name, (const void *in, double factor, void *out, size_t count), (in, factor, out, count))

DTRAIN__WEIGH(dtrain__weigh_f32, dtrain__f32)
DTRAIN__WEIGH(dtrain__weigh_f64, dtrain__f64)

/* The sum of n inputs and its copies, in registers; n, m and mean are constants where this is inlined. */
#define DTRAIN__DIRECT(name, type)                                                                                     \
    DTRAIN__INLINE void name##_loop(const void *const *in, int n, void *const *out, int m, size_t begin, size_t count, \
                                    double divisor, int mean)                                                          \
    {                                                                                                                  \
        const type *x0 = (const type *)in[0] + begin, *x1 = (const type *)in[n > 1 ? 1 : 0] + begin;                   \
        const type *x2 = (const type *)in[n > 2 ? 2 : 0] + begin, *x3 = (const type *)in[n > 2 ? 3 : 0] + begin;       \
        const type *x4 = (const type *)in[n > 4 ? 4 : 0] + begin, *x5 = (const type *)in[n > 4 ? 5 : 0] + begin;       \
        const type *x6 = (const type *)in[n > 4 ? 6 : 0] + begin, *x7 = (const type *)in[n > 4 ? 7 : 0] + begin;       \
        type *y0 = (type *)out[0] + begin, *y1 = (type *)out[m > 1 ? 1 : 0] + begin;                                   \
        type *y2 = (type *)out[m > 2 ? 2 : 0] + begin, *y3 = (type *)out[m > 2 ? 3 : 0] + begin;                       \
        type *y4 = (type *)out[m > 4 ? 4 : 0] + begin, *y5 = (type *)out[m > 4 ? 5 : 0] + begin;                       \
        type *y6 = (type *)out[m > 4 ? 6 : 0] + begin, *y7 = (type *)out[m > 4 ? 7 : 0] + begin;                       \
        type by = (type)divisor;                                                                                       \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++)                                                         \
        {                                                                                                              \
            type s = x0[i];                                                                                            \
            if (n > 1)                                                                                                 \
                s = s + x1[i];                                                                                         \
            if (n > 2)                                                                                                 \
                s = s + (x2[i] + x3[i]);                                                                               \
            if (n > 4)                                                                                                 \
                s = s + ((x4[i] + x5[i]) + (x6[i] + x7[i]));                                                           \
            if (mean)                                                                                                  \
                s = s / by;                                                                                            \
            y0[i] = s;                                                                                                 \
            if (m > 1)                                                                                                 \
                y1[i] = s;                                                                                             \
            if (m > 2) {                                                                                               \
                y2[i] = s;                                                                                             \
                y3[i] = s;                                                                                             \
            }                                                                                                          \
            if (m > 4) {                                                                                               \
                y4[i] = s;                                                                                             \
                y5[i] = s;                                                                                             \
                y6[i] = s;                                                                                             \
                y7[i] = s;                                                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    DTRAIN__INLINE void name##_body(const void *const *in, int n, void *const *out, int m, size_t begin, size_t count, \
                                    double divisor, int mean)                                                          \
    {                                                                                                                  \
        int copies = m == n;                                                                                           \
        if (n == 2 && copies && !mean)                                                                                 \
            name##_loop(in, 2, out, 2, begin, count, divisor, 0);                                                      \
        else if (n == 2 && copies)                                                                                     \
            name##_loop(in, 2, out, 2, begin, count, divisor, 1);                                                      \
        else if (n == 2)                                                                                               \
            name##_loop(in, 2, out, 1, begin, count, divisor, mean);                                                   \
        else if (n == 4 && copies && !mean)                                                                            \
            name##_loop(in, 4, out, 4, begin, count, divisor, 0);                                                      \
        else if (n == 4 && copies)                                                                                     \
            name##_loop(in, 4, out, 4, begin, count, divisor, 1);                                                      \
        else if (n == 4)                                                                                               \
            name##_loop(in, 4, out, 1, begin, count, divisor, mean);                                                   \
        else if (copies)                                                                                               \
            name##_loop(in, 8, out, 8, begin, count, divisor, mean);                                                   \
        else                                                                                                           \
            name##_loop(in, 8, out, 1, begin, count, divisor, mean);                                                   \
    }                                                                                                                  \
    DTRAIN__KERNEL(                                                                                                    \
        name,                                                                                                          \
        (const void *const *in, int n, void *const *out, int m, size_t begin, size_t count, double divisor, int mean), \
        (in, n, out, m, begin, count, divisor, mean))

DTRAIN__DIRECT(dtrain__direct_f32, dtrain__f32)
DTRAIN__DIRECT(dtrain__direct_f64, dtrain__f64)

DTRAIN__EXACT_END

static void dtrain__pair_ints(dtrain_dtype dtype, dtrain_op op, void *a, const void *b, size_t count)
{
    typedef void (*pair)(void *, const void *, size_t);
    static const pair sums[] = {dtrain__sum_u8, dtrain__sum_u32, dtrain__sum_u64};
    static const pair products[] = {dtrain__prod_u8, dtrain__prod_u32, dtrain__prod_u64};
    static const pair least[] = {dtrain__min_i8,  dtrain__min_u8,  dtrain__min_i32,
                                 dtrain__min_u32, dtrain__min_i64, dtrain__min_u64};
    static const pair most[] = {dtrain__max_i8,  dtrain__max_u8,  dtrain__max_i32,
                                dtrain__max_u32, dtrain__max_i64, dtrain__max_u64};
    int width = dtrain_dtype_bits(dtype) == 8 ? 0 : dtrain_dtype_bits(dtype) == 32 ? 1 : 2;
    int is_unsigned = dtype == DTRAIN_U8 || dtype == DTRAIN_U32 || dtype == DTRAIN_U64;
    if (op >= DTRAIN_AND)
        (op == DTRAIN_AND  ? dtrain__and_u8
         : op == DTRAIN_OR ? dtrain__or_u8
                           : dtrain__xor_u8)(a, b, count * (dtrain_dtype_bits(dtype) / 8));
    else if (op == DTRAIN_SUM)
        sums[width](a, b, count);
    else if (op == DTRAIN_PROD)
        products[width](a, b, count);
    else
        (op == DTRAIN_MIN ? least : most)[2 * width + is_unsigned](a, b, count);
}

/* left[i] = left[i] op right[i], both of a partial dtype; a mean adds. The caller has set the mode. */
static void dtrain__pair(dtrain_dtype dtype, dtrain_op op, void *left, const void *right, size_t count)
{
    int wide = dtype == DTRAIN_F64;
    if (dtype != DTRAIN_F64 && dtype != DTRAIN_F32)
        dtrain__pair_ints(dtype, op, left, right, count);
    else if (op == DTRAIN_PROD)
        (wide ? dtrain__prod_f64 : dtrain__prod_f32)(left, right, count);
    else if (op == DTRAIN_MIN)
        (wide ? dtrain__min_f64 : dtrain__min_f32)(left, right, count);
    else if (op == DTRAIN_MAX)
        (wide ? dtrain__max_f64 : dtrain__max_f32)(left, right, count);
    else
        (wide ? dtrain__sum_f64 : dtrain__sum_f32)(left, right, count);
}

static void dtrain__fold_pair(dtrain_dtype dtype, dtrain_op op, void *left, const void *right, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__pair(dtype, op, left, right, count);
    dtrain__fpmode_restore(mode);
}

static void dtrain__fold_divide(dtrain_dtype dtype, dtrain_op op, double divisor, void *partial, size_t count)
{
    if (op != DTRAIN_MEAN || divisor == 1)
        return;
    if (dtype == DTRAIN_F64)
        dtrain__divide_f64(partial, divisor, count);
    else
        dtrain__divide_f32(partial, divisor, count);
}

/* Turns partial results of dtype's partial dtype into results: divides a mean once, rounds once. partial may be
 * written; out may be partial where both have one dtype. */
static void dtrain__fold_finish(dtrain_dtype dtype, dtrain_op op, double divisor, void *partial, void *out,
                                size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_dtype wide = dtrain__fold_partial(dtype);
    dtrain__fold_divide(wide, op, divisor, partial, count);
    if (partial != out)
        dtrain__convert(partial, wide, out, dtype, count);
    dtrain__fpmode_restore(mode);
}

/* partial[i] = in[i] * weight, in the partial dtype of dtype. A weight of 0 gives -0, which any sum leaves as it is,
 * whatever is in `in`. */
static void dtrain__fold_weigh(dtrain_dtype dtype, double weight, const void *in, void *partial, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    int wide = dtype == DTRAIN_F64;
    if (dtrain__fold_partial(dtype) != dtype && weight != 0) {
        dtrain__convert(in, dtype, partial, DTRAIN_F32, count);
        in = partial;
    }
    if (weight != 0)
        (wide ? dtrain__weigh_f64 : dtrain__weigh_f32)(in, weight, partial, count);
    for (size_t i = 0; weight == 0 && i < count; i++)
        if (wide)
            ((dtrain__u64 *)partial)[i] = (uint64_t)1 << 63;
        else
            ((dtrain__u32 *)partial)[i] = (uint32_t)1 << 31;
    dtrain__fpmode_restore(mode);
}

/* tiles[0] = tree over in[0 .. n-1] at bytes [at, at + count elements); tiles[1 ..] are the levels below. */
static void dtrain__fold_tree(dtrain_dtype dtype, dtrain_op op, const void *const *in, int n, size_t at, size_t count,
                              unsigned char (*tiles)[DTRAIN__FOLD_TILE_BYTES])
{
    dtrain_dtype wide = dtrain__fold_partial(dtype);
    int left = dtrain__fold_left(n);
    if (n == 1) {
        const unsigned char *from = (const unsigned char *)in[0] + at;
        if (wide == dtype)
            memcpy(tiles[0], from, count * (dtrain_dtype_bits(dtype) / 8));
        else
            dtrain__convert(from, dtype, tiles[0], wide, count);
        return;
    }
    dtrain__fold_tree(dtype, op, in, left, at, count, tiles);
    if (n - left == 1 && wide == dtype) {
        dtrain__pair(wide, op, tiles[0], (const unsigned char *)in[left] + at, count);
        return;
    }
    dtrain__fold_tree(dtype, op, in + left, n - left, at, count, tiles + 1);
    dtrain__pair(wide, op, tiles[0], tiles[1], count);
}

static void dtrain__fold_tiles(dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n,
                               void *const *out, int m, size_t begin, size_t count)
{
    unsigned char tiles[DTRAIN__FOLD_LEVELS][DTRAIN__FOLD_TILE_BYTES] __attribute__((aligned(64)));
    dtrain_dtype wide = dtrain__fold_partial(dtype);
    size_t width = dtrain_dtype_bits(dtype) / 8, wide_width = dtrain_dtype_bits(wide) / 8;
    size_t tile = DTRAIN__FOLD_TILE_BYTES / wide_width;
    for (size_t at = begin; at < begin + count; at += tile) {
        size_t step = begin + count - at < tile ? begin + count - at : tile;
        unsigned char *result = tiles[0];
        dtrain__fold_tree(dtype, op, in, n, at * width, step, tiles);
        dtrain__fold_divide(wide, op, divisor, tiles[0], step);
        if (wide != dtype) {
            dtrain__convert(tiles[0], wide, tiles[1], dtype, step);
            result = tiles[1];
        }
        for (int k = 0; k < m; k++)
            memcpy((unsigned char *)out[k] + at * width, result, step * width);
    }
}

/* out[k][i] = tree over in[0 .. n-1][i], for i in [begin, begin + count) and every k below m. */
static void dtrain__fold(dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n,
                         void *const *out, int m, size_t begin, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    int mean = op == DTRAIN_MEAN && divisor != 1, direct = n == 2 || n == 4 || n == 8;
    direct = direct && (m == 1 || m == n) && (op == DTRAIN_SUM || op == DTRAIN_MEAN);
    if (direct && dtype == DTRAIN_F32)
        dtrain__direct_f32(in, n, out, m, begin, count, divisor, mean);
    else if (direct && dtype == DTRAIN_F64)
        dtrain__direct_f64(in, n, out, m, begin, count, divisor, mean);
    else
        dtrain__fold_tiles(dtype, op, divisor, in, n, out, m, begin, count);
    dtrain__fpmode_restore(mode);
}

#endif

/* ---- >>vector ----
 * Elementwise kernels over float32 and float64, and the sum of squares. Products are rounded before they
 * are added to anything. 16-bit tensors go through float32 a tile at a time. */
#ifndef DTRAIN__VECTOR
#define DTRAIN__VECTOR

DTRAIN__EXACT_BEGIN

#define DTRAIN__SCALE(name, type)                                                       \
    DTRAIN__INLINE void name##_body(void *data, double factor, size_t count)            \
    {                                                                                   \
        type *x = (type *)data;                                                         \
        type by = (type)factor;                                                         \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) x[i] = x[i] * by;        \
    }                                                                                   \
    DTRAIN__KERNEL(name, (void *data, double factor, size_t count), (data, factor, count))

#define DTRAIN__AXPY(name, type, rounded)                                                               \
    DTRAIN__INLINE void name##_body(void *to, double factor, const void *from, size_t count)            \
    {                                                                                                   \
        type *y = (type *)to;                                                                           \
        const type *x = (const type *)from;                                                             \
        type by = (type)factor;                                                                         \
        uint32_t zero = dtrain__opaque_zero;                                                            \
        DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) y[i] = y[i] + rounded(by * x[i], zero);  \
    }                                                                                                   \
    DTRAIN__KERNEL(name, (void *to, double factor, const void *from, size_t count), (to, factor, from, count))

/* Lane i % 8 takes element i; lanes are joined as a tree. A float32's square is exact in float64. */
#define DTRAIN__SQUARES(name, type)                                                                           \
    DTRAIN__INLINE void name##_body(const void *data, size_t count, double *lanes)                            \
    {                                                                                                         \
        const type *x = (const type *)data;                                                                   \
        uint32_t zero = dtrain__opaque_zero;                                                                  \
        double l[8];                                                                                          \
        size_t i = 0;                                                                                         \
        for (int k = 0; k < 8; k++)                                                                           \
            l[k] = lanes[k];                                                                                  \
        for (; i + 8 <= count; i += 8)                                                                        \
            for (int k = 0; k < 8; k++)                                                                       \
                l[k] = l[k] + dtrain__rounded_f64((double)x[i + (size_t)k] * (double)x[i + (size_t)k], zero); \
        for (int k = 0; i < count; i++, k++)                                                                  \
            l[k] = l[k] + dtrain__rounded_f64((double)x[i] * (double)x[i], zero);                             \
        for (int k = 0; k < 8; k++)                                                                           \
            lanes[k] = l[k];                                                                                  \
    }                                                                                                         \
    DTRAIN__KERNEL(name, (const void *data, size_t count, double *lanes), (data, count, lanes))

DTRAIN__SCALE(dtrain__scale_f32, dtrain__f32)
DTRAIN__SCALE(dtrain__scale_f64, dtrain__f64)
DTRAIN__AXPY(dtrain__axpy_f32, dtrain__f32, dtrain__rounded_f32)
DTRAIN__AXPY(dtrain__axpy_f64, dtrain__f64, dtrain__rounded_f64)
DTRAIN__SQUARES(dtrain__squares_f32, dtrain__f32)
DTRAIN__SQUARES(dtrain__squares_f64, dtrain__f64)

static double dtrain__squares_total(const double *lanes)
{
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

DTRAIN__EXACT_END

/* The sum of squares of count elements of a float dtype; the caller has set the mode. */
static double dtrain__sum_squares(dtrain_dtype dtype, const void *data, size_t count)
{
    double lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    float tile[512];
    if (dtype == DTRAIN_F64) {
        dtrain__squares_f64(data, count, lanes);
    } else if (dtype == DTRAIN_F32) {
        dtrain__squares_f32(data, count, lanes);
    } else {
        for (size_t at = 0; at < count; at += 512) {
            size_t n = count - at < 512 ? count - at : 512;
            dtrain__convert((const unsigned char *)data + 2 * at, dtype, tile, DTRAIN_F32, n);
            dtrain__squares_f32(tile, n, lanes);
        }
    }
    return dtrain__squares_total(lanes);
}

typedef enum dtrain__vector_op { DTRAIN__VECTOR_ADD, DTRAIN__VECTOR_SCALE, DTRAIN__VECTOR_AXPY } dtrain__vector_op;

/* y op= x on one tile or array of float32 or float64. */
static void dtrain__vector_wide(dtrain__vector_op op, dtrain_dtype dtype, void *y, double factor, const void *x,
                                size_t count)
{
    int wide = dtype == DTRAIN_F64;
    if (op == DTRAIN__VECTOR_ADD)
        (wide ? dtrain__sum_f64 : dtrain__sum_f32)(y, x, count);
    else if (op == DTRAIN__VECTOR_SCALE)
        (wide ? dtrain__scale_f64 : dtrain__scale_f32)(y, factor, count);
    else
        (wide ? dtrain__axpy_f64 : dtrain__axpy_f32)(y, factor, x, count);
}

/* y op= x for 16-bit floats, a tile at a time; x is NULL for a scale. */
static void dtrain__vector_narrow(dtrain__vector_op op, dtrain_dtype dtype, unsigned char *y, double factor,
                                  const unsigned char *x, size_t count)
{
    float a[512], b[512] = {0};
    for (size_t at = 0; at < count; at += 512) {
        size_t n = count - at < 512 ? count - at : 512;
        dtrain__convert(y + 2 * at, dtype, a, DTRAIN_F32, n);
        if (x != NULL)
            dtrain__convert(x + 2 * at, dtype, b, DTRAIN_F32, n);
        dtrain__vector_wide(op, DTRAIN_F32, a, factor, b, n);
        dtrain__convert(a, DTRAIN_F32, y + 2 * at, dtype, n);
    }
}

/* y op= x for any of the four float dtypes. */
static void dtrain__vector(dtrain__vector_op op, dtrain_dtype dtype, void *y, double factor, const void *x,
                           size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    if (dtype == DTRAIN_F64 || dtype == DTRAIN_F32)
        dtrain__vector_wide(op, dtype, y, factor, x, count);
    else
        dtrain__vector_narrow(op, dtype, (unsigned char *)y, factor, (const unsigned char *)x, count);
    dtrain__fpmode_restore(mode);
}

#endif

/* ---- >>gemm ----
 * The float32 matrix product. op(b) is packed in blocks of 256 x 256 on the stack; a kernel per instruction
 * set multiplies a few rows of op(a), read where they lie unless a is transposed, by a packed panel in
 * registers. The stack in use stays below 280 KiB, for threads that have half a megabyte. Each element of c is a sum
 * over k in ascending order, a block of 256 at a time, so the bits depend on shape and instruction set alone. Goto and
 * van de Geijn, ACM TOMS 34(3), 2008; Van Zee and van de Geijn, ACM TOMS 41(3), 2015. */
#ifndef DTRAIN__GEMM
#define DTRAIN__GEMM

#define DTRAIN__GEMM_KC 256
#define DTRAIN__GEMM_NC 256
#define DTRAIN__GEMM_MC 16 /* rows of a transposed a packed together: those of one cache line */

/* c[rows][columns] (+)= a[rows][k] x panel[k][width]: rows and columns up to the kernel's own tile. */
typedef void (*dtrain__gemm_kernel)(size_t k, const float *a, size_t a_row, size_t a_column, const float *panel,
                                    float *c, size_t ldc, size_t rows, size_t columns, int accumulate);

/* A kernel and the tile of c that it makes; width divides DTRAIN__GEMM_NC, rows are at most DTRAIN__GEMM_MC. */
typedef struct dtrain__gemm_shape {
    dtrain__gemm_kernel kernel;
    size_t rows, width;
} dtrain__gemm_shape;

#define DTRAIN__GEMM_PARAMETERS                                                                                        \
    size_t k, const float *a, size_t a_row, size_t a_column, const float *panel, float *c, size_t ldc, size_t rows,    \
        size_t columns, int accumulate

static void dtrain__gemm_store(const float *tile, size_t width, float *c, size_t ldc, size_t rows, size_t columns,
                               int accumulate)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            c[i * ldc + j] = accumulate ? c[i * ldc + j] + tile[i * width + j] : tile[i * width + j];
}

/* A kernel of ROWS rows by VECTORS vectors of LANES floats. Rows beyond the matrix repeat the last one; what they
 * and the padding of the panel give is not stored. */
#define DTRAIN__GEMM_KERNEL(name, attributes, vector, LANES, ROWS, VECTORS, zero, broadcast, load, store, fma, add)    \
    attributes static void name(DTRAIN__GEMM_PARAMETERS)                                                               \
    {                                                                                                                  \
        vector sum[ROWS][VECTORS];                                                                                     \
        const float *row[ROWS];                                                                                        \
        for (size_t i = 0; i < ROWS; i++) {                                                                            \
            row[i] = a + (i < rows ? i : rows - 1) * a_row;                                                            \
            for (size_t v = 0; v < VECTORS; v++)                                                                       \
                sum[i][v] = zero();                                                                                    \
        }                                                                                                              \
        for (size_t p = 0; p < k; p++) {                                                                               \
            vector b[VECTORS];                                                                                         \
            for (size_t v = 0; v < VECTORS; v++)                                                                       \
                b[v] = load(panel + p * (VECTORS * LANES) + v * LANES);                                                \
            for (size_t i = 0; i < ROWS; i++) {                                                                        \
                vector x = broadcast(row[i][p * a_column]);                                                            \
                for (size_t v = 0; v < VECTORS; v++)                                                                   \
                    sum[i][v] = fma(x, b[v], sum[i][v]);                                                               \
            }                                                                                                          \
        }                                                                                                              \
        if (rows == ROWS && columns == VECTORS * LANES) {                                                              \
            for (size_t i = 0; i < ROWS; i++)                                                                          \
                for (size_t v = 0; v < VECTORS; v++) {                                                                 \
                    float *to = c + i * ldc + v * LANES;                                                               \
                    store(to, accumulate ? add(load(to), sum[i][v]) : sum[i][v]);                                      \
                }                                                                                                      \
        } else {                                                                                                       \
            float tile[ROWS * VECTORS * LANES];                                                                        \
            for (size_t i = 0; i < ROWS; i++)                                                                          \
                for (size_t v = 0; v < VECTORS; v++)                                                                   \
                    store(tile + i * (VECTORS * LANES) + v * LANES, sum[i][v]);                                        \
            dtrain__gemm_store(tile, VECTORS *LANES, c, ldc, rows, columns, accumulate);                               \
        }                                                                                                              \
    }

DTRAIN__EXACT_BEGIN

#if defined(DTRAIN__X86)
DTRAIN__GEMM_KERNEL(dtrain__gemm_avx512, __attribute__((target("avx512f"))), __m512, 16, 8, 2, _mm512_setzero_ps,
                    _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps)
DTRAIN__GEMM_KERNEL(dtrain__gemm_avx2, __attribute__((target("avx2,fma"))), __m256, 8, 6, 2, _mm256_setzero_ps,
                    _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps)
#endif

/* Four floats in terms of the compiler's own vectors: SSE2, NEON, or whatever there is. */
typedef float dtrain__f32x4 __attribute__((vector_size(16)));

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_zero(void)
{
    dtrain__f32x4 x = {0, 0, 0, 0};
    return x;
}

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_set(float value)
{
    dtrain__f32x4 x = {value, value, value, value};
    return x;
}

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_load(const float *from)
{
    dtrain__f32x4 x;
    memcpy(&x, from, sizeof x);
    return x;
}

DTRAIN__INLINE void dtrain__x4_store(float *to, dtrain__f32x4 x)
{
    memcpy(to, &x, sizeof x);
}

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_add(dtrain__f32x4 a, dtrain__f32x4 b)
{
    return a + b;
}

/* Two roundings, as on processors without a fused product; NEON always has one. */
DTRAIN__INLINE dtrain__f32x4 dtrain__x4_fma(dtrain__f32x4 a, dtrain__f32x4 b, dtrain__f32x4 c)
{
#if defined(__aarch64__)
    __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
    return c;
#else
    dtrain__f32x4 product = a * b;
#if defined(__clang__) && defined(DTRAIN__X86)
    __asm__("" : "+x"(product)); /* see DTRAIN__EXACT_BEGIN: nothing else keeps clang from contracting */
#endif
    return product + c;
#endif
}

/* 8 accumulators and their operands fill the 16 registers of SSE2, 16 half the 32 of NEON. */
#if defined(__aarch64__)
#define DTRAIN__GEMM_BASE_ROWS 8
#else
#define DTRAIN__GEMM_BASE_ROWS 4
#endif
DTRAIN__GEMM_KERNEL(dtrain__gemm_base, , dtrain__f32x4, 4, DTRAIN__GEMM_BASE_ROWS, 2, dtrain__x4_zero, dtrain__x4_set,
                    dtrain__x4_load, dtrain__x4_store, dtrain__x4_fma, dtrain__x4_add)

DTRAIN__EXACT_END

/* Packs alpha x op(b)[0 .. k)[0 .. n) into panels of `width` columns, zero beyond n. */
static void dtrain__gemm_pack(const float *b, size_t b_row, size_t b_column, size_t k, size_t n, size_t width,
                              float alpha, float *pack)
{
    for (size_t j = 0; j < n; j += width) {
        size_t columns = n - j < width ? n - j : width;
        float *panel = pack + j * k;
        if (columns < width)
            memset(panel, 0, k * width * sizeof(float));
        if (b_column == 1)
            for (size_t p = 0; p < k; p++)
                memcpy(panel + p * width, b + p * b_row + j, columns * sizeof(float));
        else
            for (size_t p = 0; p < k; p += 8) /* a line of each column at a time */
                for (size_t i = 0; i < columns; i++)
                    for (size_t q = p; q < p + 8 && q < k; q++)
                        panel[q * width + i] = b[q * b_row + (j + i) * b_column];
        if (alpha != 1)
            dtrain__scale_f32(panel, (double)alpha, k * width);
    }
}

/* Packs op(a)[0 .. rows)[0 .. k) of a transposed a, whose rows lie a page or so apart: row i of column p to
 * pack[p * DTRAIN__GEMM_MC + i]. */
static void dtrain__gemm_pack_a(const float *a, size_t lda, size_t rows, size_t k, float *pack)
{
    if (rows == DTRAIN__GEMM_MC) /* a constant size is two or four moves, not a call */
        for (size_t p = 0; p < k; p++)
            memcpy(pack + p * DTRAIN__GEMM_MC, a + p * lda, DTRAIN__GEMM_MC * sizeof(float));
    else
        for (size_t p = 0; p < k; p++)
            memcpy(pack + p * DTRAIN__GEMM_MC, a + p * lda, rows * sizeof(float));
}

/* c (+)= op(a) x the packed nc columns of op(b). */
static void dtrain__gemm_block(const dtrain__gemm_shape *shape, const float *a, size_t lda, int transpose_a, size_t m,
                               size_t nc, size_t kc, const float *pack, float *c, size_t ldc, int accumulate)
{
    float pack_a[DTRAIN__GEMM_KC * DTRAIN__GEMM_MC] __attribute__((aligned(64)));
    int packs = transpose_a && nc > 2 * shape->width; /* fewer panels than that read a too seldom to repay it */
    size_t group = packs ? DTRAIN__GEMM_MC / shape->rows * shape->rows : m;
    size_t a_row = transpose_a ? 1 : lda, a_column = packs ? DTRAIN__GEMM_MC : transpose_a ? lda : 1;
    for (size_t low = 0; low < m; low += group) {
        size_t high = m - low < group ? m : low + group;
        const float *rows = a + low * (transpose_a ? 1 : lda);
        if (packs) {
            dtrain__gemm_pack_a(rows, lda, high - low, kc, pack_a);
            rows = pack_a;
        }
        for (size_t i = low; i < high; i += shape->rows)
            for (size_t j = 0; j < nc; j += shape->width)
                shape->kernel(kc, rows + (i - low) * a_row, a_row, a_column, pack + j * kc, c + i * ldc + j, ldc,
                              high - i < shape->rows ? high - i : shape->rows,
                              nc - j < shape->width ? nc - j : shape->width, accumulate);
    }
}

static dtrain__gemm_shape dtrain__gemm_choose(void)
{
    dtrain__gemm_shape shape = {dtrain__gemm_base, DTRAIN__GEMM_BASE_ROWS, 8};
#if defined(DTRAIN__X86)
    int isa = dtrain__isa();
    if (isa == DTRAIN__ISA_AVX512) {
        shape.kernel = dtrain__gemm_avx512;
        shape.rows = 8;
        shape.width = 32;
    } else if (isa == DTRAIN__ISA_AVX2) {
        shape.kernel = dtrain__gemm_avx2;
        shape.rows = 6;
        shape.width = 16;
    }
#endif
    return shape;
}

static void dtrain__gemm_builtin(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                                 const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c,
                                 size_t ldc)
{
    float pack[DTRAIN__GEMM_KC * DTRAIN__GEMM_NC] __attribute__((aligned(64)));
    dtrain__gemm_shape shape = dtrain__gemm_choose();
    size_t b_row = transpose_b ? 1 : ldb, b_column = transpose_b ? ldb : 1;
    if (m == 0 || n == 0)
        return;
    if (alpha == 0)
        k = 0;
    for (size_t i = 0; i < m; i++) {
        if (beta == 0 && k == 0)
            memset(c + i * ldc, 0, n * sizeof(float));
        else if (beta != 0 && beta != 1)
            dtrain__scale_f32(c + i * ldc, (double)beta, n);
    }
    for (size_t jc = 0; jc < n; jc += DTRAIN__GEMM_NC) {
        size_t nc = n - jc < DTRAIN__GEMM_NC ? n - jc : DTRAIN__GEMM_NC;
        for (size_t pc = 0; pc < k; pc += DTRAIN__GEMM_KC) {
            size_t kc = k - pc < DTRAIN__GEMM_KC ? k - pc : DTRAIN__GEMM_KC;
            dtrain__gemm_pack(b + pc * b_row + jc * b_column, b_row, b_column, kc, nc, shape.width, alpha, pack);
            dtrain__gemm_block(&shape, a + pc * (transpose_a ? lda : 1), lda, transpose_a, m, nc, kc, pack, c + jc, ldc,
                               beta != 0 || pc > 0);
        }
    }
}

DTRAIN_API void dtrain_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                             const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
#ifdef DTRAIN_SGEMM
    DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
#else
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__gemm_builtin(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    dtrain__fpmode_restore(mode);
#endif
}

#endif

/* ---- >>tensor_core ----
 * dtrain_tensor: shapes checked once, when a tensor is made, so that the arithmetic on them cannot
 * overflow later; owning and viewing; cutting along a dimension and joining again; operations that check
 * shapes and dtypes and hand over to kernels. */
#ifndef DTRAIN__TENSOR
#define DTRAIN__TENSOR

/* "F32 [3, 4]" */
typedef struct dtrain__shape_text {
    char text[256];
} dtrain__shape_text;

static dtrain__shape_text dtrain__tensor_text(const dtrain_tensor *tensor)
{
    dtrain__shape_text out;
    size_t used = (size_t)snprintf(out.text, sizeof out.text, "%s [", dtrain_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->ndim && i < DTRAIN_MAX_DIMS; i++)
        used += (size_t)snprintf(out.text + used, sizeof out.text - used, i > 0 ? ", %zu" : "%zu", tensor->shape[i]);
    snprintf(out.text + used, sizeof out.text - used, "]");
    return out;
}

/* Fills everything but data and allocator. Sizes multiply left to right with checks, in bits. */
static dtrain_status dtrain__tensor_shape(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape)
{
    size_t bits = dtrain_dtype_bits(dtype), total = 1;
    if (tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: nowhere to put it (tensor is NULL)");
    memset(tensor, 0, sizeof *tensor);
    if (bits == 0 || ndim < 0 || ndim > DTRAIN_MAX_DIMS || (ndim > 0 && shape == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: dtype %d (%s) with %d dimensions; 0 to %d are possible",
                            (int)dtype, dtrain_dtype_name(dtype), ndim, DTRAIN_MAX_DIMS);
    tensor->dtype = dtype;
    tensor->ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        tensor->shape[i] = shape[i];
        if (!dtrain__mul_size(total, shape[i], &total))
            total = SIZE_MAX;
        if (total == SIZE_MAX)
            break;
    }
    if (total == SIZE_MAX || !dtrain__mul_size(total, bits, &bits)) {
        memset(tensor, 0, sizeof *tensor);
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: its %d sizes multiply to more than a size_t of bits",
                            ndim);
    }
    if (bits % 8 != 0) {
        memset(tensor, 0, sizeof *tensor);
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: %zu elements of %s are no whole number of bytes", total,
                            dtrain_dtype_name(dtype));
    }
    tensor->count = total;
    tensor->bytes = bits / 8;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_create(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                              dtrain_allocator *allocator)
{
    dtrain_status status = dtrain__tensor_shape(tensor, dtype, ndim, shape);
    if (status != DTRAIN_OK)
        return status;
    if (allocator == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_create: needs an allocator; a zeroed one will do");
    tensor->data = dtrain__alloc(allocator, tensor->bytes);
    if (tensor->data == NULL) {
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "tensor_create: no memory for %s, %zu bytes",
                              dtrain__tensor_text(tensor).text, tensor->bytes);
        memset(tensor, 0, sizeof *tensor);
        return status;
    }
    tensor->allocator = allocator;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_view(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                            void *data)
{
    dtrain_status status = dtrain__tensor_shape(tensor, dtype, ndim, shape);
    if (status != DTRAIN_OK)
        return status;
    if (data == NULL && tensor->bytes > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_view: %s needs %zu bytes, data is NULL",
                            dtrain__tensor_text(tensor).text, tensor->bytes);
    tensor->data = data;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor)
{
    if (tensor == NULL)
        return;
    if (tensor->allocator != NULL)
        dtrain__free(tensor->allocator, tensor->data, tensor->bytes);
    memset(tensor, 0, sizeof *tensor);
}

/* A tensor as rows before dim, its size along dim, and bytes of one step along dim. */
static size_t dtrain__tensor_outer(const dtrain_tensor *tensor, int dim, size_t *step_bytes)
{
    size_t outer = 1, inner = dtrain_dtype_bits(tensor->dtype) / 8;
    for (int i = 0; i < dim; i++)
        outer *= tensor->shape[i];
    for (int i = dim + 1; i < tensor->ndim; i++)
        inner *= tensor->shape[i];
    *step_bytes = inner;
    return outer;
}

static dtrain_status dtrain__tensor_check_dim(const char *call, const dtrain_tensor *tensor, int dim, int parts)
{
    if (dim < 0 || dim >= tensor->ndim || parts < 1 || dtrain_dtype_bits(tensor->dtype) % 8 != 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "%s: dimension %d of %s into %d parts; needs a dimension that it has, at least one part, and "
            "elements of whole bytes",
            call, dim, dtrain__tensor_text(tensor).text, parts);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_shard(dtrain_tensor *shard, const dtrain_tensor *whole, int dim, int parts,
                                             int part, dtrain_allocator *allocator)
{
    size_t shape[DTRAIN_MAX_DIMS], begin, step, outer;
    dtrain_status status;
    if (shard == NULL || whole == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_shard: a tensor is NULL");
    memset(shard, 0, sizeof *shard);
    status = dtrain__tensor_check_dim("tensor_shard", whole, dim, parts);
    if (status == DTRAIN_OK && (part < 0 || part >= parts))
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_shard: part %d of %d; parts count from 0", part, parts);
    if (status != DTRAIN_OK)
        return status;
    memcpy(shape, whole->shape, sizeof shape);
    shape[dim] = dtrain_split(whole->shape[dim], parts, part, &begin);
    status = dtrain_tensor_create(shard, whole->dtype, whole->ndim, shape, allocator);
    if (status != DTRAIN_OK || shard->count == 0)
        return status;
    outer = dtrain__tensor_outer(whole, dim, &step);
    for (size_t i = 0; i < outer; i++)
        memcpy((unsigned char *)shard->data + i * shape[dim] * step,
               (const unsigned char *)whole->data + (i * whole->shape[dim] + begin) * step, shape[dim] * step);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_unshard(dtrain_tensor *whole, const dtrain_tensor *shards, int parts, int dim,
                                               dtrain_allocator *allocator)
{
    size_t shape[DTRAIN_MAX_DIMS], begin = 0, step, outer;
    dtrain_status status;
    if (whole == NULL || shards == NULL || parts < 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_unshard: needs a tensor and at least one shard");
    memset(whole, 0, sizeof *whole);
    status = dtrain__tensor_check_dim("tensor_unshard", &shards[0], dim, parts);
    if (status != DTRAIN_OK)
        return status;
    memcpy(shape, shards[0].shape, sizeof shape);
    shape[dim] = 0;
    for (int p = 0; p < parts; p++) {
        int fits = shards[p].dtype == shards[0].dtype && shards[p].ndim == shards[0].ndim;
        for (int i = 0; fits && i < shards[0].ndim; i++)
            fits = i == dim || shards[p].shape[i] == shards[0].shape[i];
        if (!fits || !dtrain__add_size(shape[dim], shards[p].shape[dim], &shape[dim]))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "tensor_unshard: shard %d is %s, which does not join %s along "
                                "dimension %d",
                                p, dtrain__tensor_text(&shards[p]).text, dtrain__tensor_text(&shards[0]).text, dim);
    }
    status = dtrain_tensor_create(whole, shards[0].dtype, shards[0].ndim, shape, allocator);
    if (status != DTRAIN_OK)
        return status;
    outer = dtrain__tensor_outer(whole, dim, &step);
    for (int p = 0; p < parts; p++) {
        size_t n = shards[p].shape[dim];
        for (size_t i = 0; n * step > 0 && i < outer; i++)
            memcpy((unsigned char *)whole->data + (i * shape[dim] + begin) * step,
                   (const unsigned char *)shards[p].data + i * n * step, n * step);
        begin += n;
    }
    return DTRAIN_OK;
}

static int dtrain__tensor_is_float(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16;
}

static dtrain_status dtrain__tensor_check_pair(const char *call, const dtrain_tensor *a, const dtrain_tensor *b)
{
    if (a == NULL || b == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: a tensor is NULL", call);
    if (!dtrain__tensor_is_float(a->dtype))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "%s of %s: F64, F32, F16 and BF16 are possible", call,
                            dtrain__tensor_text(a).text);
    if (a->dtype != b->dtype || a->ndim != b->ndim ||
        memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s meets %s; both must be equal in dtype and shape", call,
                            dtrain__tensor_text(a).text, dtrain__tensor_text(b).text);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_add(dtrain_tensor *out, const dtrain_tensor *a, const dtrain_tensor *b)
{
    const void *in[2];
    void *to[1];
    dtrain_status status = dtrain__tensor_check_pair("tensor_add", a, b);
    if (status == DTRAIN_OK)
        status = dtrain__tensor_check_pair("tensor_add", a, out);
    if (status != DTRAIN_OK || a->count == 0)
        return status;
    in[0] = a->data;
    in[1] = b->data;
    to[0] = out->data;
    dtrain__fold(a->dtype, DTRAIN_SUM, 1, in, 2, to, 1, 0, a->count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_scale(dtrain_tensor *x, double factor)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_scale", x, x);
    if (status == DTRAIN_OK)
        dtrain__vector(DTRAIN__VECTOR_SCALE, x->dtype, x->data, factor, NULL, x->count);
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_axpy(dtrain_tensor *y, double alpha, const dtrain_tensor *x)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_axpy", y, x);
    if (status == DTRAIN_OK)
        dtrain__vector(DTRAIN__VECTOR_AXPY, y->dtype, y->data, alpha, x->data, y->count);
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_add_bias(dtrain_tensor *x, const dtrain_tensor *bias)
{
    if (x == NULL || bias == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_add_bias: a tensor is NULL");
    if (x->dtype != DTRAIN_F32 || bias->dtype != DTRAIN_F32)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "tensor_add_bias: %s and %s; both must be F32",
                            dtrain__tensor_text(x).text, dtrain__tensor_text(bias).text);
    if (x->ndim < 1 || bias->ndim != 1 || bias->shape[0] != x->shape[x->ndim - 1])
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_add_bias: %s does not fit the rows of %s",
                            dtrain__tensor_text(bias).text, dtrain__tensor_text(x).text);
    for (size_t i = 0; i < x->count; i += bias->count)
        dtrain__vector(DTRAIN__VECTOR_ADD, DTRAIN_F32, (float *)x->data + i, 1, bias->data, bias->count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_sum_squares(double *sum, const dtrain_tensor *x)
{
    dtrain_status status = dtrain__tensor_check_pair("tensor_sum_squares", x, x);
    if (status == DTRAIN_OK) {
        uint64_t mode = dtrain__fpmode_enter();
        *sum = dtrain__sum_squares(x->dtype, x->data, x->count);
        dtrain__fpmode_restore(mode);
    }
    return status;
}

DTRAIN_API dtrain_status dtrain_tensor_matmul(dtrain_tensor *out, const dtrain_tensor *a, int transpose_a,
                                              const dtrain_tensor *b, int transpose_b, int accumulate)
{
    size_t m, n, k, inner;
    if (out == NULL || a == NULL || b == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_matmul: a tensor is NULL");
    if (out->dtype != DTRAIN_F32 || a->dtype != DTRAIN_F32 || b->dtype != DTRAIN_F32)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "tensor_matmul: %s = %s x %s; all must be F32",
                            dtrain__tensor_text(out).text, dtrain__tensor_text(a).text, dtrain__tensor_text(b).text);
    m = a->shape[transpose_a ? 1 : 0];
    k = a->shape[transpose_a ? 0 : 1];
    inner = b->shape[transpose_b ? 1 : 0];
    n = b->shape[transpose_b ? 0 : 1];
    if (out->ndim != 2 || a->ndim != 2 || b->ndim != 2 || k != inner || out->shape[0] != m || out->shape[1] != n)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_matmul: %s = %s%s x %s%s; the sizes do not meet",
                            dtrain__tensor_text(out).text, dtrain__tensor_text(a).text,
                            transpose_a ? " transposed" : "", dtrain__tensor_text(b).text,
                            transpose_b ? " transposed" : "");
    dtrain_sgemm(transpose_a, transpose_b, m, n, k, 1, (const float *)a->data, a->shape[1], (const float *)b->data,
                 b->shape[1], accumulate ? 1.0f : 0.0f, (float *)out->data, n);
    return DTRAIN_OK;
}

#endif

/* ---- >>store ----
 * Byte strings by name, for a program's own set-up: one store a group, kept by rank 0, or by the board of ranks
 * that share an address space. A list: it is small, and asked seldom. The owner guards it. */
#ifndef DTRAIN__STORE
#define DTRAIN__STORE

#define DTRAIN__STORE_KEY_BYTES 256
#define DTRAIN__STORE_VALUE_BYTES ((size_t)64 << 10)
#define DTRAIN__STORE_TOTAL_BYTES ((size_t)64 << 20)

typedef struct dtrain__entry {
    struct dtrain__entry *next;
    size_t key_bytes, bytes;
    /* key_bytes of key and bytes of value follow */
} dtrain__entry;

typedef struct dtrain__store {
    dtrain__entry *first;
    size_t total;
} dtrain__store;

static unsigned char *dtrain__entry_value(dtrain__entry *entry)
{
    return (unsigned char *)(entry + 1) + entry->key_bytes;
}

static dtrain__entry **dtrain__store_place(dtrain__store *store, const void *key, size_t key_bytes)
{
    dtrain__entry **at = &store->first;
    while (*at != NULL && ((*at)->key_bytes != key_bytes || memcmp(*at + 1, key, key_bytes) != 0))
        at = &(*at)->next;
    return at;
}

static void dtrain__store_remove(dtrain__store *store, dtrain_allocator *allocator, dtrain__entry **at)
{
    dtrain__entry *entry = *at;
    size_t bytes = sizeof *entry + entry->key_bytes + entry->bytes;
    *at = entry->next;
    store->total -= bytes;
    dtrain__free(allocator, entry, bytes);
}

/* Sets key to value; what it was before stays on an error. Sizes are checked by the caller. */
static dtrain_status dtrain__store_put(dtrain__store *store, dtrain_allocator *allocator, const void *key,
                                       size_t key_bytes, const void *value, size_t bytes)
{
    size_t all = sizeof(dtrain__entry) + key_bytes + bytes;
    dtrain__entry **old = dtrain__store_place(store, key, key_bytes), *entry = NULL;
    if (store->total + all <= DTRAIN__STORE_TOTAL_BYTES)
        entry = (dtrain__entry *)dtrain__alloc(allocator, all);
    if (entry == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "store_set: no room for %zu bytes; the store holds %zu of %zu",
                            all, store->total, DTRAIN__STORE_TOTAL_BYTES);
    if (*old != NULL)
        dtrain__store_remove(store, allocator, old);
    entry->key_bytes = key_bytes;
    entry->bytes = bytes;
    memcpy(entry + 1, key, key_bytes);
    if (bytes > 0)
        memcpy(dtrain__entry_value(entry), value, bytes);
    entry->next = store->first;
    store->first = entry;
    store->total += all;
    return DTRAIN_OK;
}

static void dtrain__store_free(dtrain__store *store, dtrain_allocator *allocator)
{
    while (store->first != NULL)
        dtrain__store_remove(store, allocator, &store->first);
}

#endif

/* ---- >>threads ----
 * Ranks of one address space. A board holds one slot a rank, on which the rank posts what it is about
 * to do, and lazily one ring of bytes for each ordered pair that exchanges messages. All waiting is on
 * the board's one bell: whoever changes something that a peer may wait for rings it. The boards of a world
 * and of the groups that come of it are a family, which owns their allocator, their store and their service
 * thread, and lives as long as one of them.
 *
 * Invariants: a slot is written by its rank alone. A rank that reads a peer's buffers holds its `inside`
 * flag, which it raises before it looks at `broken`; a rank that fails raises `broken` before it looks at
 * the flags, and so takes its buffers back only when nobody is inside them. May call base only. */
#ifndef DTRAIN__THREADS
#define DTRAIN__THREADS

#define DTRAIN__POST_WORDS 13
#define DTRAIN__POST_INLINE_BYTES 1024
#define DTRAIN__RING_BYTES ((size_t)1 << 16)

/* What a rank posts for one collective; read by peers between its post and theirs two operations later. */
typedef struct dtrain__post {
    uint64_t call[DTRAIN__POST_WORDS]; /* the call's description, compared between ranks */
    const void *in;
    void *out;
    const size_t *counts, *offsets; /* of an uneven all-to-all: what the rank gives to each */
    uint64_t check __attribute__((aligned(DTRAIN__CACHE_LINE))); /* of call: where it fits, peers read no other line */
    unsigned char data[DTRAIN__POST_INLINE_BYTES];               /* small inputs */
} dtrain__post;

typedef struct dtrain__slot {
    uint64_t arrived;  /* 2 x turn of the posted operation, + 1 when it was withdrawn at its deadline */
    uint64_t finished; /* turn of the last operation whose buffers this rank has left */
    uint32_t inside;
    uint32_t left; /* set when the rank's end is destroyed, or its thread has given up */
    int origin;    /* the rank in the family's first board */
    int vote_kind; /* of its last vote; guarded, as the next three, by the family's mutex */
    uint64_t voted, vote_flags;
    uint64_t goes_on; /* number of the last decision that this rank is part of */
    char pad[DTRAIN__CACHE_LINE - 56];
    dtrain__error why;     /* it left; readable once left is set */
    void *recorder;        /* the rank's, which peers read until the board is freed */
    size_t recorder_bytes; /* 0: none */
    dtrain__post posts[2] __attribute__((
        aligned(DTRAIN__CACHE_LINE))); /* by parity: a peer may still read turn s while s + 1 is posted */
} dtrain__slot;

typedef struct dtrain__ring {
    uint64_t written;
    char pad[DTRAIN__CACHE_LINE - 8];
    uint64_t read;
    char pad2[DTRAIN__CACHE_LINE - 8];
    unsigned char bytes[DTRAIN__RING_BYTES];
} dtrain__ring;

typedef struct dtrain__board_end {
    dtrain__board *board;
    int rank;
} dtrain__board_end;

typedef struct dtrain__family {
    pthread_mutex_t mutex; /* guards boards, their ends, serial, service and store */
    dtrain__board *boards;
    uint64_t serial;   /* counts the groups that were begun */
    dtrain__bell bell; /* the service thread's; rung with that of every board */
    dtrain_allocator own;
    dtrain_allocator *allocator;
    void *service;
    void (*last_gone)(void *service); /* stops the service before the family is freed */
    dtrain__store store;
} dtrain__family;

struct dtrain__board {
    dtrain__bell bell;
    uint32_t broken; /* 0 whole, 1 the cause is being written, 2 broken, cause readable */
    int ends;        /* ranks that have come and not left */
    int size;
    uint64_t id;        /* its name in the family; the first one's is 0 */
    uint64_t withdrawn; /* posts taken back, or tried to; 2 each, odd while a rank is at it */
    dtrain__error cause;
    dtrain__family *family;
    dtrain__board *next;
    dtrain_allocator *allocator; /* the family's */
    dtrain__slot *slots;
    dtrain__ring **rings; /* size x size, [from * size + to]; made by the sender */
    dtrain__board_end *board_ends;
    uint64_t decided, decided_flags, decided_id; /* what its ranks last agreed on; guarded by the family's mutex */
    int decided_mixed;                           /* they called different things */
};

static int dtrain__board_broken(dtrain__board *board)
{
    return __atomic_load_n(&board->broken, __ATOMIC_SEQ_CST) != 0;
}

/* The cause for whoever finds the board broken; the first one to break it wins. */
static const dtrain__error *dtrain__board_cause(dtrain__board *board)
{
    while (__atomic_load_n(&board->broken, __ATOMIC_ACQUIRE) != 2)
        sched_yield();
    return &board->cause;
}

static void dtrain__board_break(dtrain__board *board, const dtrain__error *cause)
{
    uint32_t whole = 0;
    if (__atomic_compare_exchange_n(&board->broken, &whole, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        board->cause = *cause;
        __atomic_store_n(&board->broken, 2, __ATOMIC_SEQ_CST);
    }
    dtrain__bell_ring(&board->bell);
}

/* Enters the peers' buffers; 0 when the board is broken and they may be gone. */
static int dtrain__board_enter(dtrain__board *board, int rank)
{
    __atomic_store_n(&board->slots[rank].inside, 1, __ATOMIC_SEQ_CST);
    if (!dtrain__board_broken(board))
        return 1;
    __atomic_store_n(&board->slots[rank].inside, 0, __ATOMIC_SEQ_CST);
    return 0;
}

static void dtrain__board_leave(dtrain__board *board, int rank)
{
    __atomic_store_n(&board->slots[rank].inside, 0, __ATOMIC_RELEASE);
}

/* Waits until no peer is inside this rank's buffers; the board is broken, so none enters again. */
static void dtrain__board_revoke(dtrain__board *board, int rank)
{
    for (int peer = 0; peer < board->size; peer++)
        while (peer != rank && __atomic_load_n(&board->slots[peer].inside, __ATOMIC_SEQ_CST))
            sched_yield();
}

static dtrain__ring *dtrain__threads_ring(dtrain__board *board, int from, int to)
{
    size_t index = (size_t)from * (size_t)board->size + (size_t)to;
    return __atomic_load_n(&board->rings[index], __ATOMIC_ACQUIRE);
}

static size_t dtrain__ring_put(dtrain__ring *ring, const unsigned char *data, size_t bytes)
{
    uint64_t written = ring->written, read = __atomic_load_n(&ring->read, __ATOMIC_SEQ_CST);
    size_t room = DTRAIN__RING_BYTES - (size_t)(written - read), n = bytes < room ? bytes : room;
    size_t at = (size_t)written % DTRAIN__RING_BYTES, first = DTRAIN__RING_BYTES - at;
    if (n == 0)
        return 0;
    first = first < n ? first : n;
    memcpy(ring->bytes + at, data, first);
    memcpy(ring->bytes, data + first, n - first);
    __atomic_store_n(&ring->written, written + n, __ATOMIC_SEQ_CST);
    return n;
}

static size_t dtrain__ring_take(dtrain__ring *ring, unsigned char *data, size_t bytes)
{
    uint64_t read = ring->read, written = __atomic_load_n(&ring->written, __ATOMIC_SEQ_CST);
    size_t held = (size_t)(written - read), n = bytes < held ? bytes : held;
    size_t at = (size_t)read % DTRAIN__RING_BYTES, first = DTRAIN__RING_BYTES - at;
    if (n == 0)
        return 0;
    first = first < n ? first : n;
    memcpy(data, ring->bytes + at, first);
    memcpy(data + first, ring->bytes, n - first);
    __atomic_store_n(&ring->read, read + n, __ATOMIC_SEQ_CST);
    return n;
}

/* Breaks the board because `peer` left before an operation that needs it. */
static dtrain_status dtrain__board_lost(dtrain__board *board, int peer)
{
    dtrain__error lost;
    const char *why = board->slots[peer].why.text;
    dtrain_status status = dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d has left the group%s%.400s", peer,
                                        why[0] != 0 ? ": " : "", why);
    dtrain__board_break(board, &lost);
    return status;
}

typedef struct dtrain__ring_wait {
    dtrain__board *board;
    int from, to, peer;
    int to_write;
} dtrain__ring_wait;

static int dtrain__ring_ready(void *pointer)
{
    dtrain__ring_wait *wait = (dtrain__ring_wait *)pointer;
    dtrain__ring *ring = dtrain__threads_ring(wait->board, wait->from, wait->to);
    if (dtrain__board_broken(wait->board) || __atomic_load_n(&wait->board->slots[wait->peer].left, __ATOMIC_SEQ_CST))
        return 1;
    if (ring == NULL)
        return 0;
    uint64_t held = __atomic_load_n(&ring->written, __ATOMIC_SEQ_CST) - __atomic_load_n(&ring->read, __ATOMIC_SEQ_CST);
    return wait->to_write ? held < DTRAIN__RING_BYTES : held > 0;
}

/* Moves bytes through one ring until all went, the deadline passed, or the peer left. What a peer wrote before
 * it left is still received. */
static dtrain_status dtrain__threads_move(dtrain__ring_wait *wait, unsigned char *out, const unsigned char *in,
                                          size_t bytes, int64_t deadline_ns, size_t *moved)
{
    dtrain__board *board = wait->board;
    *moved = 0;
    for (unsigned turn = 0;; turn++) {
        int left = (int)__atomic_load_n(&board->slots[wait->peer].left, __ATOMIC_SEQ_CST);
        dtrain__ring *ring = dtrain__threads_ring(board, wait->from, wait->to);
        size_t n = 0;
        if (ring != NULL && !(wait->to_write && left))
            n = wait->to_write ? dtrain__ring_put(ring, in + *moved, bytes - *moved)
                               : dtrain__ring_take(ring, out + *moved, bytes - *moved);
        *moved += n;
        if (n > 0) {
            dtrain__bell_ring(&board->bell);
            turn = 0;
        }
        if (*moved == bytes)
            return DTRAIN_OK;
        if (dtrain__board_broken(board))
            return dtrain__report(dtrain__board_cause(board));
        if (left && n == 0)
            return dtrain__board_lost(board, wait->peer);
        if (n == 0 && (deadline_ns == 0 || dtrain__os_now_ns() >= deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
        dtrain__bell_wait(&board->bell, turn, deadline_ns, dtrain__ring_ready, wait);
    }
}

static dtrain_status dtrain__threads_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__board_end *end = (dtrain__board_end *)self;
    dtrain__board *board = end->board;
    dtrain__ring_wait wait = {board, end->rank, peer, peer, 1};
    size_t index = (size_t)end->rank * (size_t)board->size + (size_t)peer;
    *moved = 0;
    if (board->rings[index] == NULL) {
        dtrain__ring *ring = (dtrain__ring *)dtrain__alloc(board->allocator, sizeof *ring);
        if (ring == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes of messages from rank %d to rank %d",
                                sizeof *ring, end->rank, peer);
        __atomic_store_n(&board->rings[index], ring, __ATOMIC_RELEASE);
    }
    return dtrain__threads_move(&wait, NULL, (const unsigned char *)data, bytes, deadline_ns, moved);
}

static dtrain_status dtrain__threads_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__board_end *end = (dtrain__board_end *)self;
    dtrain__ring_wait wait = {end->board, peer, end->rank, peer, 0};
    return dtrain__threads_move(&wait, (unsigned char *)data, NULL, bytes, deadline_ns, moved);
}

static void dtrain__board_free(dtrain__board *board)
{
    size_t size = (size_t)board->size;
    dtrain_allocator *allocator = board->allocator;
    if (board->rings != NULL)
        for (size_t i = 0; i < size * size; i++)
            dtrain__free(allocator, board->rings[i], sizeof(dtrain__ring));
    for (size_t rank = 0; board->slots != NULL && rank < size; rank++)
        dtrain__free(allocator, board->slots[rank].recorder, board->slots[rank].recorder_bytes);
    dtrain__free(allocator, board->rings, size * size * sizeof(dtrain__ring *));
    dtrain__free(allocator, board->slots, size * sizeof(dtrain__slot));
    dtrain__free(allocator, board->board_ends, size * sizeof(dtrain__board_end));
    dtrain__free(allocator, board, sizeof *board);
}

static void dtrain__family_free(dtrain__family *family)
{
    dtrain_allocator own;
    if (family->last_gone != NULL)
        family->last_gone(family->service);
    dtrain__store_free(&family->store, family->allocator);
    pthread_mutex_destroy(&family->mutex);
    own = family->own;
    dtrain__free(family->allocator == &family->own ? &own : family->allocator, family, sizeof *family);
}

/* Says why a rank's end is about to leave, or that the thread behind it has given up. */
static void dtrain__board_mark(dtrain__board *board, int rank, const dtrain__error *why)
{
    dtrain__slot *slot = &board->slots[rank];
    if (!__atomic_load_n(&slot->left, __ATOMIC_SEQ_CST)) {
        if (why != NULL)
            slot->why = *why;
        __atomic_store_n(&slot->left, 1, __ATOMIC_SEQ_CST);
    }
    dtrain__bell_ring(&board->bell);
}

/* The rank's thread ends with an error: nobody shall wait for it in any group. */
static void dtrain__family_give_up(dtrain__board *of, int rank, const dtrain__error *why)
{
    dtrain__family *family = of->family;
    int origin = of->slots[rank].origin;
    pthread_mutex_lock(&family->mutex);
    for (dtrain__board *board = family->boards; board != NULL; board = board->next)
        for (int other = 0; board != of && other < board->size; other++)
            if (board->slots[other].origin == origin)
                dtrain__board_mark(board, other, why);
    pthread_mutex_unlock(&family->mutex);
}

/* The rank's end leaves; the last of a board frees it, the last of a family the family. */
static void dtrain__board_detach(dtrain__board *board, int rank)
{
    dtrain__family *family = board->family;
    dtrain__board **at = &family->boards;
    int ends, last;
    pthread_mutex_lock(&family->mutex);
    dtrain__board_mark(board, rank, NULL);
    ends = --board->ends;
    while (ends == 0 && *at != board)
        at = &(*at)->next;
    if (ends == 0)
        *at = board->next;
    last = family->boards == NULL;
    pthread_mutex_unlock(&family->mutex);
    if (ends == 0)
        dtrain__board_free(board);
    if (last)
        dtrain__family_free(family);
}

static void dtrain__threads_destroy(void *self)
{
    dtrain__board_end *end = (dtrain__board_end *)self;
    dtrain__board_detach(end->board, end->rank);
}

/* A family without boards, for dtrain__board_attach. */
static dtrain__family *dtrain__family_create(dtrain_allocator *allocator)
{
    dtrain_allocator first = {NULL, NULL, 0, 0};
    dtrain__family *family = (dtrain__family *)dtrain__alloc(allocator != NULL ? allocator : &first, sizeof *family);
    if (family == NULL)
        return NULL;
    family->own = first;
    family->allocator = allocator != NULL ? allocator : &family->own;
    pthread_mutex_init(&family->mutex, NULL);
    return family;
}

/* Adds a board to the family; the caller holds its mutex. NULL when there is no memory. */
static dtrain__board *dtrain__board_make(dtrain__family *family, uint64_t id, const int *origins, int size)
{
    size_t ranks = (size_t)size;
    dtrain__board *board = (dtrain__board *)dtrain__alloc(family->allocator, sizeof *board);
    if (board == NULL)
        return NULL;
    board->family = family;
    board->allocator = family->allocator;
    board->id = id;
    board->size = size;
    board->bell.spins = size <= dtrain__os_processors() ? 100 : 0; /* some 5 us; other programs want to run too */
    board->bell.also = &family->bell;
    board->slots = (dtrain__slot *)dtrain__alloc(board->allocator, ranks * sizeof(dtrain__slot));
    board->rings = (dtrain__ring **)dtrain__alloc(board->allocator, ranks * ranks * sizeof(dtrain__ring *));
    board->board_ends = (dtrain__board_end *)dtrain__alloc(board->allocator, ranks * sizeof(dtrain__board_end));
    if (board->slots == NULL || board->rings == NULL || board->board_ends == NULL) {
        dtrain__board_free(board);
        return NULL;
    }
    for (int rank = 0; rank < size; rank++)
        board->slots[rank].origin = origins != NULL ? origins[rank] : rank;
    board->next = family->boards;
    family->boards = board;
    return board;
}

/* Comes to the board of that name, which the first to come makes; undone by dtrain__board_detach. */
static dtrain_status dtrain__board_attach(dtrain__board **out, dtrain__family *family, uint64_t id, const int *origins,
                                          int size)
{
    pthread_mutex_lock(&family->mutex);
    dtrain__board *board = family->boards;
    while (board != NULL && board->id != id)
        board = board->next;
    if (board == NULL)
        board = dtrain__board_make(family, id, origins, size);
    if (board != NULL)
        board->ends++;
    pthread_mutex_unlock(&family->mutex);
    *out = board;
    return board != NULL ? DTRAIN_OK : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", size);
}

/* Makes a board to which `size` ranks have come, the first of its family. The transport of each is had from
 * dtrain__threads_transport. */
static dtrain_status dtrain__board_create(dtrain__board **out, int size, dtrain_allocator *allocator)
{
    dtrain__family *family = dtrain__family_create(allocator);
    dtrain_status status = DTRAIN_ERR_MEMORY;
    if (family == NULL)
        return dtrain__fail(NULL, status, "no memory for a group of %d ranks", size);
    status = dtrain__board_attach(out, family, 0, NULL, size);
    if (status == DTRAIN_OK)
        (*out)->ends = size;
    else
        dtrain__family_free(family);
    return status;
}

static void dtrain__threads_transport(dtrain_transport *transport, dtrain__board *board, int rank)
{
    memset(transport, 0, sizeof *transport);
    board->board_ends[rank].board = board;
    board->board_ends[rank].rank = rank;
    transport->self = &board->board_ends[rank];
    transport->rank = rank;
    transport->size = board->size;
    transport->send = dtrain__threads_send;
    transport->recv = dtrain__threads_recv;
    transport->destroy = dtrain__threads_destroy;
    transport->board = board;
}

#endif

/* ---- >>net ----
 * Sockets as this library wants them: non-blocking, close-on-exec, silent (no SIGPIPE), named in texts.
 * An address is "host:port", "[address]:port" or "unix:/path". Nothing here waits, except that a host
 * name is looked up by the system's resolver. May call base only. */
#ifndef DTRAIN__NET
#define DTRAIN__NET

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define DTRAIN__ADDRESS_BYTES 256
#define DTRAIN__MAX_ADDRESSES 8 /* that one name may stand for */

typedef struct dtrain__address {
    union { /* one of them, by any.sa_family; a cast between them would let compilers reorder their uses */
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un local;
        struct sockaddr_storage storage;
    } at;
    socklen_t bytes;
} dtrain__address;

typedef struct dtrain__address_text {
    char text[DTRAIN__ADDRESS_BYTES];
} dtrain__address_text;

static dtrain__address_text dtrain__net_text(const dtrain__address *address)
{
    dtrain__address_text out;
    char host[128], port[16];
    int family = address->at.any.sa_family;
    if (address->bytes > 0 && family == AF_UNIX) {
        const char *path = address->at.local.sun_path;
        int named = address->bytes > offsetof(struct sockaddr_un, sun_path) && path[0] != 0;
        snprintf(out.text, sizeof out.text, "%s%.200s", named ? "unix:" : "a unix socket", named ? path : "");
    } else if (address->bytes == 0 || getnameinfo(&address->at.any, address->bytes, host, sizeof host, port,
                                                  sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        snprintf(out.text, sizeof out.text, "an unknown address");
    } else {
        snprintf(out.text, sizeof out.text, family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
    }
    return out;
}

/* Whether only processes of this host can be there. */
static int dtrain__net_is_local(const dtrain__address *address)
{
    int family = address->at.any.sa_family;
    if (family == AF_INET)
        return (ntohl(address->at.v4.sin_addr.s_addr) >> 24) == 127;
    if (family == AF_INET6) {
        const struct in6_addr *v6 = &address->at.v6.sin6_addr;
        return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
    }
    return family == AF_UNIX;
}

static int dtrain__net_is_unix(const dtrain__address *address)
{
    return address->at.any.sa_family == AF_UNIX;
}

static void dtrain__net_set_port(dtrain__address *address, int port)
{
    if (address->at.any.sa_family == AF_INET)
        address->at.v4.sin_port = htons((uint16_t)port);
    else if (address->at.any.sa_family == AF_INET6)
        address->at.v6.sin6_port = htons((uint16_t)port);
}

static int dtrain__net_port(const dtrain__address *address)
{
    int family = address->at.any.sa_family;
    if (family == AF_INET)
        return ntohs(address->at.v4.sin_port);
    return family == AF_INET6 ? ntohs(address->at.v6.sin6_port) : 0;
}

/* The same family with no host: every address of this machine. */
static void dtrain__net_set_any(dtrain__address *address)
{
    if (address->at.any.sa_family == AF_INET)
        address->at.v4.sin_addr.s_addr = htonl(INADDR_ANY);
    else if (address->at.any.sa_family == AF_INET6)
        address->at.v6.sin6_addr = in6addr_any;
}

static dtrain_status dtrain__net_unix_address(dtrain__address *address, const char *path)
{
    struct sockaddr_un *local = &address->at.local;
    size_t bytes = strlen(path);
    memset(address, 0, sizeof *address);
    if (bytes == 0 || bytes >= sizeof local->sun_path)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "unix:%.120s: a path of 1 to %zu bytes is possible, this has %zu",
                            path, sizeof local->sun_path - 1, bytes);
    local->sun_family = AF_UNIX;
    memcpy(local->sun_path, path, bytes + 1);
    address->bytes = (socklen_t)sizeof *local;
    return DTRAIN_OK;
}

/* Cuts "host:port" or "[host]:port" in two. Returns 0 when it is neither. */
static int dtrain__net_split(const char *text, char host[DTRAIN__ADDRESS_BYTES], char port[8])
{
    const char *colon = strrchr(text, ':'), *first = text, *last = colon;
    if (colon == NULL || strlen(colon + 1) > 5 || colon[1] == 0)
        return 0;
    if (*text == '[' && colon > text && colon[-1] == ']') {
        first++;
        last--;
    }
    if ((size_t)(last - first) >= DTRAIN__ADDRESS_BYTES ||
        (first == text && memchr(first, ':', (size_t)(last - first))))
        return 0;
    memcpy(host, first, (size_t)(last - first));
    host[last - first] = 0;
    memcpy(port, colon + 1, strlen(colon + 1) + 1);
    for (const char *digit = port; *digit != 0; digit++)
        if (*digit < '0' || *digit > '9')
            return 0;
    return 1;
}

/* Finds the addresses that text stands for; *count is how many, at most DTRAIN__MAX_ADDRESSES. */
static dtrain_status dtrain__net_resolve(const char *text, dtrain__address *out, int *count)
{
    char host[DTRAIN__ADDRESS_BYTES], port[8];
    struct addrinfo hints, *list = NULL;
    int error;
    *count = 0;
    if (strncmp(text, "unix:", 5) == 0) {
        *count = 1;
        return dtrain__net_unix_address(out, text + 5);
    }
    if (!dtrain__net_split(text, host, port))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "\"%.200s\" is no address: host:port, [address]:port or unix:/path is expected", text);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = host[0] == 0 ? AI_PASSIVE : 0;
    error = getaddrinfo(host[0] != 0 ? host : NULL, port, &hints, &list);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "%.200s: the name cannot be looked up (%s)", text,
                            gai_strerror(error));
    for (struct addrinfo *at = list; at != NULL && *count < DTRAIN__MAX_ADDRESSES; at = at->ai_next) {
        if ((at->ai_family != AF_INET && at->ai_family != AF_INET6) || at->ai_addrlen > sizeof out->at.storage)
            continue;
        memset(&out[*count], 0, sizeof *out);
        memcpy(&out[*count].at.storage, at->ai_addr, at->ai_addrlen);
        out[(*count)++].bytes = at->ai_addrlen;
    }
    freeaddrinfo(list);
    return *count > 0 ? DTRAIN_OK : dtrain__fail(NULL, DTRAIN_ERR_IO, "%.200s: no IPv4 or IPv6 address", text);
}

/* The address of interface `name`, or the address that name spells, of `family` where it has one. */
static dtrain_status dtrain__net_interface(const char *name, int family, dtrain__address *out)
{
    struct ifaddrs *list = NULL;
    char spelled[DTRAIN__ADDRESS_BYTES];
    dtrain__address found[DTRAIN__MAX_ADDRESSES];
    int count = 0, best = 0;
    if (getifaddrs(&list) == 0) {
        for (struct ifaddrs *at = list; at != NULL; at = at->ifa_next) {
            int kind = at->ifa_addr != NULL && strcmp(at->ifa_name, name) == 0 ? at->ifa_addr->sa_family : 0;
            int rank = kind == family ? 2 : 1;
            if ((kind != AF_INET && kind != AF_INET6) || rank <= best)
                continue;
            memset(out, 0, sizeof *out);
            out->bytes = (socklen_t)(kind == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
            memcpy(&out->at.storage, at->ifa_addr, out->bytes);
            best = rank;
        }
        freeifaddrs(list);
    }
    if (best > 0)
        return DTRAIN_OK;
    snprintf(spelled, sizeof spelled, strchr(name, ':') != NULL ? "[%.200s]:0" : "%.200s:0", name);
    if (dtrain__net_resolve(spelled, found, &count) != DTRAIN_OK)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "\"%.100s\" is neither an interface of this host nor an address",
                            name);
    *out = found[0];
    return DTRAIN_OK;
}

/* Gives a descriptor the manners that every one has here. Returns 0 or an errno. */
static int dtrain__net_manners(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return errno;
#ifdef SO_NOSIGPIPE
    int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
    return 0;
}

static int dtrain__net_socket(int family, int *fd)
{
    int error;
#ifdef SOCK_CLOEXEC
    *fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
#else
    *fd = socket(family, SOCK_STREAM, 0);
#endif
    if (*fd < 0)
        return errno;
    error = dtrain__net_manners(*fd);
    if (error != 0) {
        close(*fd);
        *fd = -1;
    }
    return error;
}

/* Gives a socket that is not connected yet a plain congestion control, which costs least on one host. Once bbr has
 * seen a connection, the system paces it for good. */
static void dtrain__net_plain(int fd)
{
#ifdef TCP_CONGESTION
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
#else
    (void)fd;
#endif
}

/* Gives a socket the congestion control of the system's choice, for the way to another host. */
static void dtrain__net_unplain(int fd)
{
#ifdef TCP_CONGESTION
    char name[16];
    socklen_t bytes = sizeof name;
    int fresh;
    if (dtrain__net_socket(AF_INET, &fresh) != 0)
        return;
    if (getsockopt(fresh, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) == 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, bytes);
    close(fresh);
#else
    (void)fd;
#endif
}

/* Settings of a connected socket. */
static void dtrain__net_tune(int fd, int same_host, size_t buffer_bytes)
{
    int one = 1, buffer = (int)buffer_bytes;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!same_host)
        dtrain__net_unplain(fd);
    if (buffer > 0) {
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    }
}

/* Removes a unix socket that nobody listens on any more. */
static void dtrain__net_remove_stale(const dtrain__address *address)
{
    const char *path = address->at.local.sun_path;
    struct stat what;
    int fd;
    if (lstat(path, &what) != 0 || !S_ISSOCK(what.st_mode) || dtrain__net_socket(AF_UNIX, &fd) != 0)
        return;
    if (connect(fd, &address->at.any, address->bytes) != 0 && errno == ECONNREFUSED)
        unlink(path);
    close(fd);
}

/* Binds and listens; *address becomes what it is bound to. Returns 0 or an errno. */
static int dtrain__net_listen(dtrain__address *address, int *fd)
{
    struct sockaddr *any = &address->at.any;
    int one = 1, error = dtrain__net_socket(any->sa_family, fd);
    if (error != 0)
        return error;
    dtrain__net_plain(*fd); /* for the connections that come by it */
    if (any->sa_family == AF_UNIX)
        dtrain__net_remove_stale(address);
    else
        setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(*fd, any, address->bytes) == 0 && listen(*fd, 1024) == 0) {
        address->bytes = (socklen_t)sizeof address->at.storage;
        if (getsockname(*fd, any, &address->bytes) == 0)
            return 0;
    }
    error = errno;
    close(*fd);
    *fd = -1;
    return error;
}

/* Starts a connection; it is made, or has failed, when the descriptor is writable. Returns 0 or an errno. */
static int dtrain__net_connect(const dtrain__address *address, int *fd)
{
    const struct sockaddr *any = &address->at.any;
    int error = dtrain__net_socket(any->sa_family, fd);
    if (error != 0)
        return error;
    dtrain__net_plain(*fd);
    if (connect(*fd, any, address->bytes) == 0 || errno == EINPROGRESS || errno == EINTR)
        return 0;
    error = errno;
    close(*fd);
    *fd = -1;
    return error;
}

/* Whether a connection has met itself: TCP allows it where nobody listens and the port that the system chose for this
 * end is the very one that is asked for. */
static int dtrain__net_is_mirror(int fd)
{
    dtrain__address here, there;
    memset(&here, 0, sizeof here);
    memset(&there, 0, sizeof there);
    here.bytes = there.bytes = (socklen_t)sizeof here.at.storage;
    return getsockname(fd, &here.at.any, &here.bytes) == 0 && getpeername(fd, &there.at.any, &there.bytes) == 0 &&
           !dtrain__net_is_unix(&here) && here.bytes == there.bytes && memcmp(&here.at, &there.at, here.bytes) == 0;
}

/* Returns 0 when the connection has been made, EINPROGRESS while it is under way, else why it failed. */
static int dtrain__net_connected(int fd)
{
    struct pollfd one;
    int error = 0;
    socklen_t bytes = sizeof error;
    one.fd = fd;
    one.events = POLLOUT;
    one.revents = 0;
    if (poll(&one, 1, 0) <= 0)
        return EINPROGRESS;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0)
        return errno;
    return error == 0 && dtrain__net_is_mirror(fd) ? ECONNREFUSED : error;
}

/* Takes one connection from a listener. Returns 0, EAGAIN when there is none, or another errno. */
static int dtrain__net_accept(int listener, int *fd, dtrain__address *peer)
{
    int error;
    memset(peer, 0, sizeof *peer);
    peer->bytes = (socklen_t)sizeof peer->at.storage;
#if defined(__linux__) && defined(__NR_accept4) /* the C library hides accept4 from standard C */
    *fd = (int)syscall(__NR_accept4, listener, &peer->at.any, &peer->bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
#else
    *fd = accept(listener, &peer->at.any, &peer->bytes);
#endif
    if (*fd < 0)
        return errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED ? EAGAIN : errno;
    error = dtrain__net_manners(*fd);
    if (error != 0)
        close(*fd);
    return error;
}

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif
#ifndef MSG_MORE
#define MSG_MORE 0
#endif

/* Sends what goes at once: returns the bytes gone, 0 for none now, -1 when the connection is of no more use (errno).
 * more: the system may hold it back until the next call. */
static ssize_t dtrain__net_send(int fd, const void *data, size_t bytes, int more)
{
    ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS))
        return 0;
    return n;
}

/* Receives what is there: as dtrain__net_send; the peer's orderly close is -1 with errno 0. */
static ssize_t dtrain__net_recv(int fd, void *data, size_t bytes)
{
    ssize_t n = recv(fd, data, bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (n == 0) {
        errno = 0;
        return -1;
    }
    return n;
}

static const char *dtrain__net_why(int error)
{
    return error == 0 ? "it was closed" : strerror(error);
}

/* A pipe that wakes a poll(): both ends non-blocking. Returns 0 or an errno. */
static int dtrain__net_pipe(int ends[2])
{
    int error;
#if defined(__linux__) && defined(__NR_pipe2)
    if (syscall(__NR_pipe2, ends, O_CLOEXEC | O_NONBLOCK) != 0)
        return errno;
#else
    if (pipe(ends) != 0)
        return errno;
#endif
    error = dtrain__net_manners(ends[0]);
    if (error == 0)
        error = dtrain__net_manners(ends[1]);
    return error;
}

static void dtrain__net_poke(int fd)
{
    ssize_t ignored = write(fd, "", 1);
    (void)ignored; /* a full pipe wakes as well */
}

static void dtrain__net_drain(int fd)
{
    char bytes[64];
    while (read(fd, bytes, sizeof bytes) == (ssize_t)sizeof bytes)
        continue;
}

#endif

/* ---- >>admission ----
 * Who may come in. Every connection opens with four messages of fixed size, whatever the peer sends:
 *
 *   hello      initiator  who it is, whom it wants, what for, a nonce
 *   challenge  acceptor   who it is, the run, a nonce
 *   proof      initiator  HMAC-SHA256 of "initiator", hello, challenge and its position in the stream
 *   verdict    acceptor   yes or no, its position, HMAC-SHA256 of "acceptor" and all that came before
 *
 * Nothing but these fixed fields is looked at before the proof holds; direction, run, both ranks, version and
 * both nonces are bound into both proofs, so that a recording, a reflection or a relay to another rank proves
 * nothing. An unproved peer costs one dtrain__door for a few seconds. A door is a state machine over its two
 * buffers: door_take() handles one whole message and moves no byte itself, which is what the fuzzer drives.
 *
 * Source: challenge and response of ISO/IEC 9798-4; HMAC of RFC 2104. */
#ifndef DTRAIN__ADMISSION
#define DTRAIN__ADMISSION

#define DTRAIN__WIRE_VERSION 2u
#define DTRAIN__HELLO_BYTES 128
#define DTRAIN__CHALLENGE_BYTES 80
#define DTRAIN__PROOF_BYTES 40
#define DTRAIN__VERDICT_BYTES 304
#define DTRAIN__VERDICT_TEXT 256
#define DTRAIN__NONCE_BYTES 32
#define DTRAIN__RUN_BYTES 16

/* What both sides of every door of one rank share. */
typedef struct dtrain__keys {
    unsigned char token[256];
    size_t token_bytes;                   /* 0: the proof is made with an empty key */
    unsigned char run[DTRAIN__RUN_BYTES]; /* made by rank 0; zero on others until it told them */
    int rank, world_size;
} dtrain__keys;

enum { DTRAIN__PURPOSE_CONTROL = 1, DTRAIN__PURPOSE_DATA };

typedef enum dtrain__door_state {
    DTRAIN__DOOR_CONNECTING = 0, /* initiator: the system is still connecting */
    DTRAIN__DOOR_HELLO,          /* acceptor awaits a hello */
    DTRAIN__DOOR_CHALLENGE,      /* initiator awaits a challenge */
    DTRAIN__DOOR_PROOF,          /* acceptor awaits a proof */
    DTRAIN__DOOR_PROVED,         /* acceptor: the owner must call door_answer */
    DTRAIN__DOOR_VERDICT,        /* initiator awaits the verdict */
    DTRAIN__DOOR_OPEN,           /* both have proved themselves; what out still holds must go first */
    DTRAIN__DOOR_CLOSED          /* error says why */
} dtrain__door_state;

typedef struct dtrain__door {
    struct dtrain__door *next;
    int fd, initiator, purpose, lane;
    uint64_t channel; /* the group that a connection for data belongs to */
    int peer;         /* rank: whom an initiator wants, who an acceptor's hello says it is */
    int peer_world;   /* the world size that an acceptor's peer believes in */
    dtrain__door_state state;
    int64_t expires_ns;
    uint64_t received, peer_received; /* positions in the stream, for one that is resumed */
    uint64_t links, peer_links;       /* connections that the stream has had, as each side counts */
    unsigned char hello[DTRAIN__HELLO_BYTES], challenge[DTRAIN__CHALLENGE_BYTES], proof[DTRAIN__PROOF_BYTES];
    unsigned char in[DTRAIN__VERDICT_BYTES], out[DTRAIN__VERDICT_BYTES];
    size_t in_bytes, out_bytes, out_done;
    char peer_name[DTRAIN__ADDRESS_BYTES];
    dtrain__error error;
    int verdict;      /* initiator: a proved no, as a dtrain_status */
    int system_error; /* why the connection ended, as an errno */
} dtrain__door;

static const unsigned char dtrain__door_magic[8] = {'d', 't', 'r', 'a', 'i', 'n', '\r', '\n'};

static void dtrain__put_le(unsigned char *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        out[i] = (unsigned char)(value >> (8 * i) & 255);
}

static uint64_t dtrain__get_le(const unsigned char *in, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;)
        value = value << 8 | in[i];
    return value;
}

/* 1 on little-endian machines, 2 on big-endian ones: data travel as they lie in memory. */
static unsigned char dtrain__byte_order(void)
{
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first == 1 ? 1 : 2;
}

/* HMAC of who speaks and all that was said; extra is the speaker's message up to its MAC. */
static void dtrain__door_mac(const dtrain__keys *keys, const dtrain__door *door, const char *who, size_t proof_bytes,
                             const unsigned char *extra, size_t extra_bytes, unsigned char mac[32])
{
    dtrain__hmac hmac;
    dtrain__hmac_start(&hmac, keys->token, keys->token_bytes);
    dtrain__hmac_add(&hmac, who, strlen(who) + 1);
    dtrain__hmac_add(&hmac, door->hello, sizeof door->hello);
    dtrain__hmac_add(&hmac, door->challenge, sizeof door->challenge);
    dtrain__hmac_add(&hmac, door->proof, proof_bytes);
    dtrain__hmac_add(&hmac, extra, extra_bytes);
    dtrain__hmac_finish(&hmac, mac);
}

static void dtrain__door_say(dtrain__door *door, const unsigned char *message, size_t bytes)
{
    memcpy(door->out, message, bytes);
    door->out_bytes = bytes;
    door->out_done = 0;
    door->in_bytes = 0;
}

static void dtrain__door_close(dtrain__door *door)
{
    if (door->fd >= 0)
        close(door->fd);
    door->fd = -1;
    door->state = DTRAIN__DOOR_CLOSED;
}

/* How many bytes the message has that the door awaits; 0: none. */
static size_t dtrain__door_wants(const dtrain__door *door)
{
    switch (door->state) {
    case DTRAIN__DOOR_HELLO: return DTRAIN__HELLO_BYTES;
    case DTRAIN__DOOR_CHALLENGE: return DTRAIN__CHALLENGE_BYTES;
    case DTRAIN__DOOR_PROOF: return DTRAIN__PROOF_BYTES;
    case DTRAIN__DOOR_VERDICT: return DTRAIN__VERDICT_BYTES;
    default: return 0;
    }
}

/* Opens the initiator's side; purpose, channel, lane, peer and received are set. Returns 0 or an errno. */
static int dtrain__door_knock(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char *hello = door->hello;
    memset(hello, 0, sizeof door->hello);
    memcpy(hello, dtrain__door_magic, 8);
    dtrain__put_le(hello + 8, DTRAIN__WIRE_VERSION, 2);
    hello[10] = dtrain__byte_order();
    hello[11] = (unsigned char)door->purpose;
    dtrain__put_le(hello + 12, (uint64_t)keys->rank, 4);
    dtrain__put_le(hello + 16, (uint64_t)door->peer, 4);
    dtrain__put_le(hello + 20, (uint64_t)keys->world_size, 4);
    dtrain__put_le(hello + 24, (uint64_t)door->lane, 4);
    dtrain__put_le(hello + 80, door->channel, 8);
    dtrain__put_le(hello + 112, door->links, 8);
    memcpy(hello + 32, keys->run, DTRAIN__RUN_BYTES);
    door->initiator = 1;
    door->state = DTRAIN__DOOR_CHALLENGE;
    int error = dtrain__os_random(hello + 48, DTRAIN__NONCE_BYTES);
    dtrain__door_say(door, hello, sizeof door->hello);
    return error;
}

/* Compares the opening bytes of a hello or challenge with this build's. */
static dtrain_status dtrain__door_same_build(dtrain__door *door, const unsigned char *message)
{
    unsigned version = (unsigned)dtrain__get_le(message + 8, 2);
    if (memcmp(message, dtrain__door_magic, 8) != 0)
        return dtrain__fail(&door->error, DTRAIN_ERR_DENIED, "%s does not speak dtrain: dropped", door->peer_name);
    if (version != DTRAIN__WIRE_VERSION)
        return dtrain__fail(&door->error, DTRAIN_ERR_MISMATCH,
                            "%s speaks wire version %u, this rank %u: build both from one dtrain.h", door->peer_name,
                            version, DTRAIN__WIRE_VERSION);
    if (message[10] != dtrain__byte_order())
        return dtrain__fail(&door->error, DTRAIN_ERR_MISMATCH,
                            "%s has %s bytes first, this rank %s: ranks of one group need one byte order",
                            door->peer_name, message[10] == 1 ? "low" : "high", message[10] == 1 ? "high" : "low");
    return DTRAIN_OK;
}

/* Acceptor: the hello is whole. Anyone who speaks another version hears ours, and no more. */
static void dtrain__door_take_hello(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char *challenge = door->challenge;
    memcpy(door->hello, door->in, sizeof door->hello);
    memset(challenge, 0, sizeof door->challenge);
    memcpy(challenge, dtrain__door_magic, 8);
    dtrain__put_le(challenge + 8, DTRAIN__WIRE_VERSION, 2);
    challenge[10] = dtrain__byte_order();
    dtrain__put_le(challenge + 12, (uint64_t)keys->rank, 4);
    memcpy(challenge + 16, keys->run, DTRAIN__RUN_BYTES);
    if (memcmp(door->hello, dtrain__door_magic, 8) != 0 ||
        dtrain__os_random(challenge + 32, DTRAIN__NONCE_BYTES) != 0) {
        dtrain__fail(&door->error, DTRAIN_ERR_DENIED, "%s does not speak dtrain: dropped", door->peer_name);
        dtrain__door_close(door);
        return;
    }
    dtrain__door_say(door, challenge, sizeof door->challenge);
    if (dtrain__door_same_build(door, door->hello) != DTRAIN_OK) {
        door->state = DTRAIN__DOOR_OPEN; /* until the challenge is out; error says that it must be closed then */
        return;
    }
    uint64_t peer = dtrain__get_le(door->hello + 12, 4), world = dtrain__get_le(door->hello + 20, 4);
    uint64_t lane = dtrain__get_le(door->hello + 24, 4);
    door->channel = dtrain__get_le(door->hello + 80, 8);
    door->peer_links = dtrain__get_le(door->hello + 112, 8);
    door->purpose = door->hello[11];
    door->peer = peer < INT_MAX ? (int)peer : -1;
    door->peer_world = world < INT_MAX ? (int)world : -1;
    door->lane = lane < INT_MAX ? (int)lane : -1;
    door->state = DTRAIN__DOOR_PROOF;
}

/* Initiator: the challenge is whole; answers with the proof. */
static void dtrain__door_take_challenge(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char *proof = door->proof;
    memcpy(door->challenge, door->in, sizeof door->challenge);
    if (dtrain__door_same_build(door, door->challenge) != DTRAIN_OK) {
        dtrain__door_close(door);
        return;
    }
    if (dtrain__get_le(door->challenge + 12, 4) != (uint64_t)door->peer) {
        dtrain__fail(&door->error, DTRAIN_ERR_MISMATCH, "rank %d was expected at %s, and rank %u answers", door->peer,
                     door->peer_name, (unsigned)dtrain__get_le(door->challenge + 12, 4));
        dtrain__door_close(door);
        return;
    }
    dtrain__put_le(proof + 32, door->received, 8);
    dtrain__door_mac(keys, door, "dtrain initiator", 0, proof + 32, 8, proof);
    dtrain__door_say(door, proof, sizeof door->proof);
    door->state = DTRAIN__DOOR_VERDICT;
}

/* Acceptor: the proof is whole. A wrong one is answered by a no without a word. */
static void dtrain__door_take_proof(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char mac[32], no[DTRAIN__VERDICT_BYTES];
    dtrain__door_mac(keys, door, "dtrain initiator", 0, door->in + 32, 8, mac);
    if (!dtrain__equal_secret(mac, door->in, sizeof mac)) {
        memset(no, 0, sizeof no);
        no[0] = DTRAIN_ERR_DENIED;
        dtrain__door_say(door, no, sizeof no);
        dtrain__fail(&door->error, DTRAIN_ERR_DENIED,
                     "%s, which says it is rank %d, does not hold this group's token: dropped", door->peer_name,
                     door->peer);
        door->state = DTRAIN__DOOR_OPEN;
        return;
    }
    memcpy(door->proof, door->in, sizeof door->proof);
    door->peer_received = dtrain__get_le(door->proof + 32, 8);
    door->state = DTRAIN__DOOR_PROVED;
}

/* Acceptor: lets the proved peer in (DTRAIN_OK), with this side's position, or sends it away with a text. */
static void dtrain__door_answer(dtrain__door *door, const dtrain__keys *keys, dtrain_status status, const char *text)
{
    unsigned char verdict[DTRAIN__VERDICT_BYTES];
    memset(verdict, 0, sizeof verdict);
    verdict[0] = (unsigned char)status;
    dtrain__put_le(verdict + 8, door->received, 8);
    snprintf((char *)verdict + 16, DTRAIN__VERDICT_TEXT, "%s", text);
    dtrain__door_mac(keys, door, "dtrain acceptor", sizeof door->proof, verdict, 16 + DTRAIN__VERDICT_TEXT,
                     verdict + 16 + DTRAIN__VERDICT_TEXT);
    dtrain__door_say(door, verdict, sizeof verdict);
    if (status != DTRAIN_OK)
        dtrain__fail(&door->error, status, "%s (rank %d) was sent away: %.300s", door->peer_name, door->peer, text);
    door->state = DTRAIN__DOOR_OPEN;
}

/* Initiator: the verdict is whole; believed only when it is proved itself. */
static void dtrain__door_take_verdict(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char mac[32];
    const unsigned char *verdict = door->in;
    char text[DTRAIN__VERDICT_TEXT];
    dtrain__door_mac(keys, door, "dtrain acceptor", sizeof door->proof, verdict, 16 + DTRAIN__VERDICT_TEXT, mac);
    if (!dtrain__equal_secret(mac, verdict + 16 + DTRAIN__VERDICT_TEXT, sizeof mac)) {
        dtrain__fail(&door->error, DTRAIN_ERR_DENIED,
                     "rank %d at %s and this rank do not hold the same token (this rank's has %zu bytes): give every "
                     "rank the same DTRAIN_TOKEN",
                     door->peer, door->peer_name, keys->token_bytes);
        dtrain__door_close(door);
        return;
    }
    door->peer_received = dtrain__get_le(verdict + 8, 8);
    memcpy(text, verdict + 16, sizeof text);
    text[sizeof text - 1] = 0;
    door->state = DTRAIN__DOOR_OPEN;
    if (verdict[0] != DTRAIN_OK) {
        door->verdict = verdict[0];
        dtrain__fail(&door->error, verdict[0] <= DTRAIN_ERR_ABORTED ? (dtrain_status)verdict[0] : DTRAIN_ERR_DENIED,
                     "rank %d at %s sent this rank away: %s", door->peer, door->peer_name, text);
        dtrain__door_close(door);
    }
}

/* Handles the message that fills door->in, door_wants() bytes long. */
static void dtrain__door_take(dtrain__door *door, const dtrain__keys *keys)
{
    dtrain__door_state state = door->state;
    door->in_bytes = 0;
    if (state == DTRAIN__DOOR_HELLO)
        dtrain__door_take_hello(door, keys);
    else if (state == DTRAIN__DOOR_CHALLENGE)
        dtrain__door_take_challenge(door, keys);
    else if (state == DTRAIN__DOOR_PROOF)
        dtrain__door_take_proof(door, keys);
    else if (state == DTRAIN__DOOR_VERDICT)
        dtrain__door_take_verdict(door, keys);
}

/* Whether the door's descriptor has bytes to go out. */
static int dtrain__door_writes(const dtrain__door *door)
{
    return door->state == DTRAIN__DOOR_CONNECTING || door->out_done < door->out_bytes;
}

static void dtrain__door_lost(dtrain__door *door, int error)
{
    dtrain__fail(&door->error, DTRAIN_ERR_PEER_LOST,
                 "%s: the connection to %s ended while both were introducing "
                 "themselves (%s)",
                 door->initiator ? "connect" : "accept", door->peer_name, dtrain__net_why(error));
    door->system_error = error;
    dtrain__door_close(door);
}

/* Moves what goes without waiting. PROVED, OPEN with nothing left to send, and CLOSED are the owner's business. */
static void dtrain__door_step(dtrain__door *door, const dtrain__keys *keys)
{
    ssize_t n;
    if (door->state == DTRAIN__DOOR_CONNECTING) {
        int error = dtrain__net_connected(door->fd);
        if (error == 0)
            error = dtrain__door_knock(door, keys);
        if (error == EINPROGRESS)
            return;
        if (error != 0) {
            dtrain__door_lost(door, error);
            return;
        }
    }
    for (;;) {
        while (door->out_done < door->out_bytes) {
            n = dtrain__net_send(door->fd, door->out + door->out_done, door->out_bytes - door->out_done, 0);
            if (n < 0)
                dtrain__door_lost(door, errno);
            if (n <= 0)
                return;
            door->out_done += (size_t)n;
        }
        size_t wants = dtrain__door_wants(door);
        if (wants == 0)
            return;
        n = dtrain__net_recv(door->fd, door->in + door->in_bytes, wants - door->in_bytes);
        if (n < 0)
            dtrain__door_lost(door, errno);
        if (n <= 0)
            return;
        door->in_bytes += (size_t)n;
        if (door->in_bytes == wants)
            dtrain__door_take(door, keys);
    }
}

#endif

/* ---- >>stream ----
 * One direction-pair of bytes between two ranks that can outlive its connection: each side counts what it
 * has sent and received, and a side that may reconnect keeps its last bytes, so that a new connection goes
 * on where the old one was cut. Never waits. Frames of the control plane are built on it too. */
#ifndef DTRAIN__STREAM
#define DTRAIN__STREAM

#define DTRAIN__SOCKET_BUFFER ((size_t)1 << 20)          /* of a resumable connection; Linux doubles it */
#define DTRAIN__REPLAY_BYTES (4 * DTRAIN__SOCKET_BUFFER) /* two such buffers at either end and what is between */

typedef struct dtrain__stream {
    int fd;        /* -1: no connection now */
    uint64_t sent; /* bytes that the owner has handed over; of them the last `again` go out once more */
    uint64_t received;
    uint64_t again;
    unsigned char *replay; /* the last DTRAIN__REPLAY_BYTES sent; NULL: this stream dies with its connection */
} dtrain__stream;

static void dtrain__stream_cut(dtrain__stream *stream)
{
    if (stream->fd >= 0)
        close(stream->fd);
    stream->fd = -1;
}

/* Goes on over fd, whose other end has received peer_received bytes. Returns 0 when too much was lost for that. */
static int dtrain__stream_resume(dtrain__stream *stream, int fd, uint64_t peer_received)
{
    uint64_t lost = stream->sent - peer_received;
    if (peer_received > stream->sent || lost > (stream->replay != NULL ? DTRAIN__REPLAY_BYTES : 0))
        return 0;
    stream->fd = fd;
    stream->again = lost;
    return 1;
}

static void dtrain__stream_keep(dtrain__stream *stream, const unsigned char *data, size_t bytes)
{
    size_t at, first;
    if (stream->replay == NULL)
        return;
    if (bytes > DTRAIN__REPLAY_BYTES) {
        data += bytes - DTRAIN__REPLAY_BYTES;
        bytes = DTRAIN__REPLAY_BYTES;
    }
    at = (size_t)((stream->sent - bytes) % DTRAIN__REPLAY_BYTES);
    first = DTRAIN__REPLAY_BYTES - at < bytes ? DTRAIN__REPLAY_BYTES - at : bytes;
    memcpy(stream->replay + at, data, first);
    memcpy(stream->replay, data + first, bytes - first);
}

/* Sends what goes at once: bytes gone, 0 for none now, -1 when the connection is broken (errno). */
static ssize_t dtrain__stream_send(dtrain__stream *stream, const void *data, size_t bytes, int more)
{
    ssize_t n;
    while (stream->again > 0) {
        size_t at = (size_t)((stream->sent - stream->again) % DTRAIN__REPLAY_BYTES), room = DTRAIN__REPLAY_BYTES - at;
        n = dtrain__net_send(stream->fd, stream->replay + at, stream->again < room ? (size_t)stream->again : room, 0);
        if (n <= 0)
            return n;
        stream->again -= (uint64_t)n;
    }
    if (bytes == 0)
        return 0;
    n = dtrain__net_send(stream->fd, data, bytes, more);
    if (n > 0) {
        stream->sent += (uint64_t)n;
        dtrain__stream_keep(stream, (const unsigned char *)data, (size_t)n);
    }
    return n;
}

static ssize_t dtrain__stream_recv(dtrain__stream *stream, void *data, size_t bytes)
{
    ssize_t n = dtrain__net_recv(stream->fd, data, bytes);
    if (n > 0)
        stream->received += (uint64_t)n;
    return n;
}

/* A growing block of bytes; bytes of it are in use. */
typedef struct dtrain__bytes {
    unsigned char *data;
    size_t bytes, capacity;
    int short_of; /* memory: there was none for something that belongs here */
} dtrain__bytes;

/* Makes room for `more` bytes behind those in use. Returns 0 when there is no memory. */
static int dtrain__bytes_room(dtrain_allocator *allocator, dtrain__bytes *block, size_t more)
{
    /* a heartbeat with all that it may tell of others fits, so that a warm loop's never allocates */
    size_t capacity = block->capacity > 0 ? block->capacity : 1024;
    unsigned char *data;
    if (more <= block->capacity - block->bytes)
        return 1;
    while (capacity - block->bytes < more)
        capacity *= 2;
    data = (unsigned char *)dtrain__resize(allocator, block->data, block->capacity, capacity);
    if (data == NULL) {
        block->short_of = 1;
        return 0;
    }
    block->data = data;
    block->capacity = capacity;
    return 1;
}

static void dtrain__bytes_drop(dtrain__bytes *block, size_t bytes)
{
    block->bytes -= bytes;
    memmove(block->data, block->data + bytes, block->bytes);
}

static void dtrain__bytes_free(dtrain_allocator *allocator, dtrain__bytes *block)
{
    if (block->data != NULL)
        dtrain__resize(allocator, block->data, block->capacity, 0);
    memset(block, 0, sizeof *block);
}

#endif

/* ---- >>hub ----
 * The control plane of one process, shared by the groups that come of one world. Every rank keeps one connection
 * to the leader, rank 0, over which the world forms, hears that its members live, and learns who is lost and why;
 * connections for data are accepted and made here and handed to the lanes of their channel. A channel is one
 * group's share: its members, its lanes to them, and its own end. The leader relays what concerns a channel to the
 * channel's members: the first cause they hear is its own. A lost member ends every channel that has it, no other.
 *
 * Ranks are the world's, except where a channel counts its own: `about` in frames, the index of its peers.
 *
 * Whoever holds step_mutex may run the hub: the service thread, or where there is none a caller that waits for data
 * and adds its descriptors to the same poll(). Everything shared is guarded by `mutex`, which nobody holds while it
 * waits. `news` counts what a waiting caller should look at. */
#ifndef DTRAIN__HUB
#define DTRAIN__HUB

#define DTRAIN__DOORS 64 /* unproved peers at once; the oldest is shut out for the next */
#define DTRAIN__DOOR_NS 5000000000
#define DTRAIN__MAX_LANES 8
#define DTRAIN__STRIPE ((size_t)1 << 18) /* of a stream that goes over several lanes, in turn */
#define DTRAIN__HANDOVER_NS 1000000000   /* after a leader that left */
#define DTRAIN__CALL_NS 300000000        /* a new leader has to call the others; then they call it */
#define DTRAIN__FRAME_BYTES ((size_t)1 << 18)
#define DTRAIN__NAME_BYTES 96
#define DTRAIN__WHY_BYTES 480
#define DTRAIN__FINGERPRINT_BYTES 128
#define DTRAIN__LAST_BYTES 192
#define DTRAIN__LAST_CHAIN 4 /* ranks that one heartbeat tells of */

/* One connection's worth of data to and from a peer. */
typedef struct dtrain__lane {
    dtrain__stream stream;
    dtrain__door *door; /* a connection that this rank is making */
    int wanted;         /* somebody waits for it */
    uint64_t links;     /* connections that it has had */
    int64_t retry_ns, down_ns;
} dtrain__lane;

/* One rank of a channel, as this rank sees it. */
typedef struct dtrain__peer {
    int world;               /* its rank there */
    int left;                /* its end of the group is gone */
    int awaits;              /* POLLIN, POLLOUT: what the service thread could not move */
    char *why;               /* it left; NULL: nothing was said */
    uint64_t sent, received; /* bytes of data to and from it, over all lanes */
    dtrain__lane *lanes;     /* hub->connections of them; NULL until the world has formed */
} dtrain__peer;

typedef struct dtrain__hub dtrain__hub;
typedef struct dtrain__consent dtrain__consent;

typedef struct dtrain__channel {
    struct dtrain__channel *next;
    dtrain__hub *hub;
    uint64_t id; /* the same on all members; 0: the world */
    int rank, size;
    dtrain__peer *peers;
    dtrain__lane *lanes; /* of all peers */
    int attend;          /* some lane has work for whoever steps */
    uint32_t broken;
    dtrain__error cause;
    int wake[2]; /* a pipe to the caller that waits */
    uint32_t waiting;
    int awaiting;                      /* some peer has awaits */
    int forked;                        /* the end of a child's copy: touches nothing that the parent still uses */
    uint32_t store_id, store_answered; /* of this group's last request, and the last one answered */
    dtrain_status store_status;
    int store_found;
    dtrain__bytes store_value;
    size_t (*last)(void *user, unsigned char *out, size_t capacity, int *awaits); /* what this rank does; may be NULL */
    void *last_user;
} dtrain__channel;

enum { DTRAIN__PRESENT = 0, DTRAIN__LEFT, DTRAIN__LOST };

/* What a rank was doing when it was last heard of: bytes that only the owners of the ends understand. */
typedef struct dtrain__last_heard {
    unsigned char data[DTRAIN__LAST_BYTES];
    size_t bytes; /* 0: never heard of */
    int awaits;   /* the rank that it waits for, or -1 */
    int64_t heard_ns;
} dtrain__last_heard;

typedef struct dtrain__member {
    char address[DTRAIN__ADDRESS_BYTES / 2]; /* "host:port", "unix:/path", or ":port" on the host of rank 0 */
    char name[DTRAIN__NAME_BYTES];           /* "pid 4711 on alpha" */
    char why[DTRAIN__WHY_BYTES];             /* it left or is lost; may be empty */
    char trouble[160];                       /* of the last try to connect to it for data */
    uint64_t host;                           /* equal on ranks of one host */
    int joined, expected;                    /* expected: the control connection may come back */
    int gone;                                /* DTRAIN__LEFT, of its own will; DTRAIN__LOST */
    int silent;                              /* it is lost, but nothing proves that it is dead */
    dtrain__stream control;                  /* the leader has one to each; the others one, to the leader */
    dtrain__bytes in, out;
    int64_t heard_ns, down_ns;
    dtrain__door *door; /* a control connection that this rank is making, after rank 0 is gone */
    int64_t call_ns;    /* when it tries again */
    int poll_index;
    dtrain__last_heard last;
} dtrain__member;

/* A get that waits at rank 0 for its key. */
typedef struct dtrain__asker {
    struct dtrain__asker *next;
    int rank;
    uint64_t channel;
    uint32_t id;
    size_t key_bytes;
    char key[DTRAIN__STORE_KEY_BYTES];
} dtrain__asker;

typedef struct dtrain__hub_desc {
    const char *root, *listen_on, *fingerprint, *believed;
    int insecure, listen_fd, connections;
    int64_t heartbeat_ms, reconnect_ms;
    void (*on_address)(void *user, const char *address);
    void *on_address_user;
} dtrain__hub_desc;

struct dtrain__hub {
    dtrain_allocator *allocator, own;
    dtrain__keys keys;
    int rank, size, connections, insecure, formed;
    int crowded;               /* more ranks on this host than processors */
    int leader;                /* the lowest rank that is not gone, whom this rank keeps its control connection to */
    int elected;               /* it is new */
    int given_up;              /* the others say that this rank is lost */
    dtrain__consent *consents; /* the latest first */
    uint64_t serial;           /* counts the groups that were begun */
    dtrain__channel *channels, *world; /* world is NULL once its end has left */
    int leaving;                       /* this process has said goodbye */
    void *service;
    void (*last_gone)(void *service); /* stops the service thread before the hub is freed */
    uint32_t serviced;                /* a service thread steps */
    char root[DTRAIN__ADDRESS_BYTES], listen_on[64], fingerprint[DTRAIN__FINGERPRINT_BYTES], believed[400];
    int64_t heartbeat_ns, reconnect_ns, period_ns;
    dtrain__address root_addresses[DTRAIN__MAX_ADDRESSES], reached, listening;
    int root_count, root_turn, listener, listener_index;
    dtrain__door *root_door;
    int64_t root_retry_ns, root_wait_ns;
    dtrain__error root_error; /* of the last try to reach rank 0 */
    pthread_mutex_t step_mutex, mutex;
    int kick[2]; /* a pipe to whoever steps */
    uint32_t stepping, kicked;
    uint64_t news;
    dtrain__door *doors;
    int inbound;
    dtrain__member *members;
    struct pollfd *fds;
    int fds_room;
    int64_t beat_ns, stepped_ns, accept_ns, told_ns;
    int suspect;                     /* the rank that rank 0 has not heard for longest, or -1 */
    int64_t suspect_ns;              /* for how long, when it was last said */
    char refused[DTRAIN__WHY_BYTES]; /* the last one sent away while the group formed */
    dtrain__store store;
    dtrain__asker *askers;
    uint32_t asked; /* requests to the store */
};

enum {
    DTRAIN__FRAME_JOIN = 1,
    DTRAIN__FRAME_TABLE,
    DTRAIN__FRAME_REFUSE,
    DTRAIN__FRAME_BEAT,
    DTRAIN__FRAME_END,
    DTRAIN__FRAME_BYE,
    DTRAIN__FRAME_ASK,
    DTRAIN__FRAME_ANSWER,
    DTRAIN__FRAME_LOST,
    DTRAIN__FRAME_GONE,
    DTRAIN__FRAME_CONSENT
};

/* Something happened that a caller may wait for; the caller of this holds the mutex. */
static void dtrain__hub_tell(dtrain__hub *hub)
{
    __atomic_add_fetch(&hub->news, 1, __ATOMIC_SEQ_CST);
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next)
        if (__atomic_load_n(&channel->waiting, __ATOMIC_SEQ_CST))
            dtrain__net_poke(channel->wake[1]);
}

/* Somebody asks for something that whoever steps must do; one who is about to step has not looked for it yet. */
static void dtrain__hub_kick(dtrain__hub *hub)
{
    __atomic_store_n(&hub->kicked, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&hub->stepping, __ATOMIC_SEQ_CST))
        dtrain__net_poke(hub->kick[1]);
}

/* Reading a frame: each take says whether there was enough. */
typedef struct dtrain__reader {
    const unsigned char *at;
    size_t left;
} dtrain__reader;

static int dtrain__take(dtrain__reader *reader, uint64_t *value, int bytes)
{
    if (reader->left < (size_t)bytes)
        return 0;
    *value = dtrain__get_le(reader->at, bytes);
    reader->at += bytes;
    reader->left -= (size_t)bytes;
    return 1;
}

/* A text of one length byte or two; what does not fit into out, or holds a zero, is refused. */
static int dtrain__take_text(dtrain__reader *reader, int length_bytes, char *out, size_t capacity)
{
    uint64_t bytes;
    if (!dtrain__take(reader, &bytes, length_bytes) || bytes > reader->left || bytes >= capacity ||
        memchr(reader->at, 0, (size_t)bytes) != NULL)
        return 0;
    memcpy(out, reader->at, (size_t)bytes);
    out[bytes] = 0;
    reader->at += bytes;
    reader->left -= (size_t)bytes;
    return 1;
}

/* Appends to a frame under way; once memory is short nothing more of it goes in, and frame_close tells. */
static void dtrain__give(dtrain__hub *hub, dtrain__bytes *frame, uint64_t value, int bytes)
{
    if (frame->short_of || !dtrain__bytes_room(hub->allocator, frame, (size_t)bytes))
        return;
    dtrain__put_le(frame->data + frame->bytes, value, bytes);
    frame->bytes += (size_t)bytes;
}

static void dtrain__give_bytes(dtrain__hub *hub, dtrain__bytes *frame, const void *data, size_t bytes)
{
    if (bytes == 0 || frame->short_of || !dtrain__bytes_room(hub->allocator, frame, bytes))
        return;
    memcpy(frame->data + frame->bytes, data, bytes);
    frame->bytes += bytes;
}

static void dtrain__give_text(dtrain__hub *hub, dtrain__bytes *frame, int length_bytes, const char *text)
{
    dtrain__give(hub, frame, strlen(text), length_bytes);
    dtrain__give_bytes(hub, frame, text, strlen(text));
}

/* Opens a frame at the end of a member's output; returns where it begins. */
static size_t dtrain__frame_open(dtrain__hub *hub, dtrain__member *to, int type)
{
    size_t begin = to->out.bytes;
    to->out.short_of = 0;
    dtrain__give(hub, &to->out, 0, 4);
    dtrain__give(hub, &to->out, (uint64_t)type, 2);
    return begin;
}

/* Returns 0 when memory was short: then nothing of the frame is left, as a part of one would accuse its sender. */
static int dtrain__frame_close(dtrain__member *to, size_t begin)
{
    if (to->out.short_of) {
        to->out.bytes = begin;
        return 0;
    }
    dtrain__put_le(to->out.data + begin, to->out.bytes - begin - 6, 4);
    return 1;
}

/* What happened to a rank, and to which channel. `about` counts as the channel does; as the world in frames LOST
 * and GONE, which have no channel. */
typedef struct dtrain__reason {
    int type;
    uint64_t channel;
    int about;
    dtrain_status status;
    const char *text;
} dtrain__reason;

static int dtrain__hub_leads(const dtrain__hub *hub)
{
    return hub->rank == hub->leader;
}

/* The name of a group, unlike any other's: a count that `rank` keeps, and rank itself. */
static uint64_t dtrain__hub_group_id(uint64_t serial, int rank)
{
    return serial << 10 | (uint64_t)rank;
}

/* Whether this rank keeps a control connection to `rank`: the leader to all, the others to the leader. */
static int dtrain__hub_linked(const dtrain__hub *hub, int rank)
{
    return rank != hub->rank && (dtrain__hub_leads(hub) || rank == hub->leader);
}

/* Sends a reason to `to`; with the channel's members, where `to` is to relay it. */
static void dtrain__frame_reason(dtrain__hub *hub, int to, const dtrain__reason *reason, const dtrain__channel *channel)
{
    dtrain__member *member = &hub->members[to];
    int count = channel != NULL && channel->id != 0 ? channel->size : 0;
    if (!dtrain__hub_linked(hub, to) || !member->joined || member->gone != DTRAIN__PRESENT)
        return;
    size_t begin = dtrain__frame_open(hub, member, reason->type);
    dtrain__give(hub, &member->out, reason->channel, 8);
    dtrain__give(hub, &member->out, (uint64_t)reason->about, 4);
    dtrain__give(hub, &member->out, (uint64_t)reason->status, 2);
    dtrain__give_text(hub, &member->out, 2, reason->text);
    dtrain__give(hub, &member->out, (uint64_t)count, 4);
    for (int i = 0; i < count; i++)
        dtrain__give(hub, &member->out, (uint64_t)channel->peers[i].world, 4);
    dtrain__frame_close(member, begin);
}

/* Tells all ranks, by way of the leader. */
static void dtrain__hub_relay(dtrain__hub *hub, int except, const dtrain__reason *reason)
{
    for (int peer = 0; peer < hub->size; peer++)
        if (peer != except)
            dtrain__frame_reason(hub, peer, reason, NULL);
}

/* Tells the channel's members, by way of the leader. */
static void dtrain__channel_relay(const dtrain__channel *channel, int except, const dtrain__reason *reason)
{
    dtrain__hub *hub = channel->hub;
    if (!dtrain__hub_leads(hub) && hub->leader != except)
        dtrain__frame_reason(hub, hub->leader, reason, channel);
    for (int i = 0; dtrain__hub_leads(hub) && i < channel->size; i++)
        if (channel->peers[i].world != except)
            dtrain__frame_reason(hub, channel->peers[i].world, reason, NULL);
}

static dtrain__channel *dtrain__hub_channel(const dtrain__hub *hub, uint64_t id)
{
    dtrain__channel *channel = hub->channels;
    while (channel != NULL && channel->id != id)
        channel = channel->next;
    return channel;
}

/* The lane that the next bytes to or from a peer take, and how many of them. */
static dtrain__lane *dtrain__channel_lane(dtrain__channel *channel, int rank, int sending, size_t *room)
{
    dtrain__peer *peer = &channel->peers[rank];
    uint64_t at = sending ? peer->sent : peer->received;
    int lanes = channel->hub->connections;
    *room = lanes == 1 ? SIZE_MAX : DTRAIN__STRIPE - (size_t)(at % DTRAIN__STRIPE);
    return &peer->lanes[at / DTRAIN__STRIPE % (uint64_t)lanes];
}

/* The channel's rank of the world's `world`; -1: not a member. */
static int dtrain__channel_rank(const dtrain__channel *channel, int world)
{
    if (channel->id == 0)
        return world;
    for (int i = 0; i < channel->size; i++)
        if (channel->peers[i].world == world)
            return i;
    return -1;
}

/* Ends the channel here; the first cause stays. Returns 0 when it had ended before. */
static int dtrain__channel_break(dtrain__channel *channel, dtrain_status status, const char *text)
{
    if (channel->broken)
        return 0;
    channel->cause.status = status;
    snprintf(channel->cause.text, sizeof channel->cause.text, "%s", text);
    __atomic_store_n(&channel->broken, 1, __ATOMIC_SEQ_CST);
    dtrain__hub_tell(channel->hub);
    dtrain__hub_kick(channel->hub);
    return 1;
}

/* Ends the channel on all its members. */
static void dtrain__channel_end(dtrain__channel *channel, int about, dtrain_status status, const char *text)
{
    dtrain__reason reason = {DTRAIN__FRAME_END, channel->id, about, status, text};
    if (dtrain__channel_break(channel, status, text))
        dtrain__channel_relay(channel, -1, &reason);
}

/* A member's end of the channel is gone; operations that need it will fail, others need not. */
static void dtrain__channel_left(dtrain__channel *channel, int rank, const char *why)
{
    dtrain__peer *peer = &channel->peers[rank];
    size_t bytes = strlen(why) + 1;
    if (peer->left)
        return;
    peer->left = 1;
    if (bytes > 1)
        peer->why = (char *)dtrain__alloc(channel->hub->allocator, bytes);
    if (peer->why != NULL)
        memcpy(peer->why, why, bytes);
    dtrain__hub_tell(channel->hub);
}

/* The channel ends because a member of it is lost. */
static void dtrain__channel_lost(dtrain__channel *channel, int rank)
{
    dtrain__peer *peer = &channel->peers[rank];
    dtrain__member *member = &channel->hub->members[peer->world];
    dtrain__error lost, kept = dtrain__thread_error;
    const char *name = member->name[0] != 0 ? member->name : "unknown process";
    peer->left = 1;
    if (channel->id == 0)
        dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d (%s) is lost: %s", rank, name, member->why);
    else
        dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d (rank %d of the world, %s) is lost: %s", rank, peer->world,
                     name, member->why);
    dtrain__thread_error = kept;
    dtrain__channel_break(channel, lost.status, lost.text);
}

/* The lowest rank that is not gone leads. Who comes after a rank that left waits a while before it takes over, as the
 * others may be about to leave as well. */
static void dtrain__hub_elect(dtrain__hub *hub, int gone)
{
    int64_t now = dtrain__os_now_ns(), begin = now + (gone == DTRAIN__LEFT ? DTRAIN__HANDOVER_NS : 0);
    int leader = 0;
    while (leader < hub->rank && hub->members[leader].gone != DTRAIN__PRESENT)
        leader++;
    if (leader == hub->leader)
        return;
    hub->leader = leader;
    hub->elected = 1;
    for (int rank = 0; rank < hub->size; rank++) {
        hub->members[rank].heard_ns = begin;
        hub->members[rank].call_ns = dtrain__hub_leads(hub) ? begin : begin + DTRAIN__CALL_NS;
    }
    for (int rank = 0; dtrain__hub_leads(hub) && rank < hub->size; rank++) {
        const dtrain__member *member = &hub->members[rank];
        dtrain_status status = member->silent ? DTRAIN_ERR_TIMEOUT : DTRAIN_ERR_PEER_LOST;
        dtrain__reason reason = {DTRAIN__FRAME_LOST, 0, rank, status, member->why};
        if (member->gone == DTRAIN__LOST) /* before anything else: nobody shall blame a rank that left because of it */
            dtrain__hub_relay(hub, -1, &reason);
    }
}

/* A member is gone, of its own will or not: every channel that has it hears of it. */
static void dtrain__hub_gone(dtrain__hub *hub, int rank, int gone, const char *why)
{
    dtrain__member *member = &hub->members[rank];
    if (member->gone != DTRAIN__PRESENT)
        return;
    member->gone = gone;
    member->expected = 0;
    snprintf(member->why, sizeof member->why, "%.*s", (int)sizeof member->why - 1, why);
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next) {
        int at = dtrain__channel_rank(channel, rank);
        if (at >= 0 && gone == DTRAIN__LOST)
            dtrain__channel_lost(channel, at);
        else if (at >= 0)
            dtrain__channel_left(channel, at, why);
    }
    if (hub->formed && rank == hub->leader)
        dtrain__hub_elect(hub, gone);
    dtrain__hub_tell(hub);
}

/* A member is gone without a word; silent: and without a proof. It is told so, should it only have been stopped: else
 * it would blame this rank. */
static void dtrain__hub_lost(dtrain__hub *hub, int rank, int silent, const char *how)
{
    dtrain__reason reason = {DTRAIN__FRAME_LOST, 0, rank, silent ? DTRAIN_ERR_TIMEOUT : DTRAIN_ERR_PEER_LOST, how};
    dtrain__member *member = &hub->members[rank];
    if (hub->leaving) { /* who heard of that says nothing when it goes itself */
        dtrain__stream_cut(&member->control);
        return;
    }
    dtrain__frame_reason(hub, rank, &reason, NULL);
    if (dtrain__hub_leads(hub))
        dtrain__hub_relay(hub, rank, &reason);
    if (member->control.fd >= 0)
        dtrain__stream_send(&member->control, member->out.data, member->out.bytes, 0);
    dtrain__stream_cut(&member->control);
    member->silent = silent;
    dtrain__hub_gone(hub, rank, DTRAIN__LOST, how);
}

/* Stops a member's control connection; where it may come back, the clock runs. */
static void dtrain__hub_control_down(dtrain__hub *hub, int rank, int error)
{
    dtrain__member *member = &hub->members[rank];
    char how[160];
    dtrain__stream_cut(&member->control);
    if (member->gone != DTRAIN__PRESENT)
        return;
    member->down_ns = dtrain__os_now_ns();
    member->expected = hub->reconnect_ns > 0 && hub->formed;
    if (member->expected)
        return;
    if (!hub->formed && hub->rank == 0) {
        /* The rank may start again and join anew. */
        member->joined = 0;
        member->in.bytes = member->out.bytes = 0;
        return;
    }
    snprintf(how, sizeof how, "its connection to rank %d ended (%s); its process has died or was cut off", hub->rank,
             dtrain__net_why(error));
    dtrain__hub_lost(hub, rank, 0, how);
}

#endif

/* ---- >>consent ----
 * What the members of a channel agree on although some of them are lost: the AND of their flags, who is still there,
 * and a name for the group of those. Each member votes; the leader decides when every member has voted, has left or is
 * lost, and tells those that voted.
 *
 * Every rank keeps its own votes and the decisions that it has heard. When the leader is lost, the lowest rank left
 * leads: all send it what they keep, so that a decision that any survivor knows stands; it decides anew only when
 * every survivor has been heard, that is, when none of them knows of one.
 *
 * A closed or refused connection proves a death. Silence proves nothing: where some members are only silent, those that
 * voted go on if they are more, or as many and hold the lowest rank; so two parts of a torn network never both do. */
#ifndef DTRAIN__CONSENT
#define DTRAIN__CONSENT

#define DTRAIN__CONSENTS 128 /* that a rank keeps, the latest */

enum { DTRAIN__VOTE_NONE = 0, DTRAIN__VOTE_YES, DTRAIN__VOTE_OUT };

typedef struct dtrain__vote {
    uint64_t flags;
    int world;
    int vote;
} dtrain__vote;

struct dtrain__consent {
    dtrain__consent *next;
    uint64_t channel, number; /* the number'th of the channel */
    int kind, mixed;          /* mixed: members called different things */
    int count, decided;
    dtrain_status status; /* of the decision */
    uint64_t flags, id;
    dtrain__vote votes[1]; /* count of them, in the channel's order */
};

static size_t dtrain__consent_bytes(int count)
{
    return sizeof(dtrain__consent) + (size_t)count * sizeof(dtrain__vote);
}

static void dtrain__consent_drop(dtrain__hub *hub, dtrain__consent **at)
{
    dtrain__consent *consent = *at;
    *at = consent->next;
    dtrain__free(hub->allocator, consent, dtrain__consent_bytes(consent->count));
}

static dtrain__consent *dtrain__consent_find(const dtrain__hub *hub, uint64_t channel, uint64_t number)
{
    dtrain__consent *consent = hub->consents;
    while (consent != NULL && (consent->channel != channel || consent->number != number))
        consent = consent->next;
    return consent;
}

/* A new one without votes; the oldest makes room for it. NULL when there is no memory. */
static dtrain__consent *dtrain__consent_open(dtrain__hub *hub, uint64_t channel, uint64_t number, int kind, int count)
{
    dtrain__consent *consent = (dtrain__consent *)dtrain__alloc(hub->allocator, dtrain__consent_bytes(count));
    dtrain__consent **at = &hub->consents;
    if (consent == NULL)
        return NULL;
    consent->channel = channel;
    consent->number = number;
    consent->kind = kind;
    consent->count = count;
    consent->flags = UINT64_MAX;
    consent->next = hub->consents;
    hub->consents = consent;
    for (int kept = 0; *at != NULL; kept++)
        if (kept < DTRAIN__CONSENTS)
            at = &(*at)->next;
        else
            dtrain__consent_drop(hub, at);
    return consent;
}

static void dtrain__consent_send(dtrain__hub *hub, int to, const dtrain__consent *consent)
{
    dtrain__member *member = &hub->members[to];
    if (member->gone != DTRAIN__PRESENT)
        return;
    size_t begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_CONSENT);
    dtrain__give(hub, &member->out, consent->channel, 8);
    dtrain__give(hub, &member->out, consent->number, 8);
    dtrain__give(hub, &member->out, (uint64_t)consent->kind, 1);
    dtrain__give(hub, &member->out, (uint64_t)consent->decided, 1);
    dtrain__give(hub, &member->out, (uint64_t)consent->status, 2);
    dtrain__give(hub, &member->out, consent->flags, 8);
    dtrain__give(hub, &member->out, consent->id, 8);
    dtrain__give(hub, &member->out, (uint64_t)consent->count, 4);
    for (int i = 0; i < consent->count; i++) {
        dtrain__give(hub, &member->out, consent->votes[i].flags, 8);
        dtrain__give(hub, &member->out, (uint64_t)consent->votes[i].world, 4);
        dtrain__give(hub, &member->out, (uint64_t)consent->votes[i].vote, 1);
    }
    if (!dtrain__frame_close(member, begin))
        dtrain__log(DTRAIN_LOG_WARN, "rank %d has no memory to tell rank %d of an agreement", hub->rank, to);
}

/* Who does not go on, as far as the leader knows. Returns the first that is awaited, or -1. */
static int dtrain__consent_awaits(const dtrain__hub *hub, dtrain__consent *consent)
{
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        if (hub->members[vote->world].gone != DTRAIN__PRESENT)
            vote->vote = DTRAIN__VOTE_OUT;
        if (vote->vote == DTRAIN__VOTE_NONE)
            return i;
    }
    return -1;
}

/* Whether those that voted may go on without those that are only silent. */
static int dtrain__consent_majority(const dtrain__hub *hub, const dtrain__consent *consent)
{
    int here = 0, silent = 0, lowest = 0; /* lowest: the first of both is here */
    for (int i = 0; i < consent->count; i++) {
        int yes = consent->votes[i].vote == DTRAIN__VOTE_YES, mute = hub->members[consent->votes[i].world].silent;
        lowest |= here + silent == 0 && yes;
        here += yes;
        silent += !yes && mute;
    }
    return here > silent || (here == silent && lowest);
}

/* Decides what can be decided, and tells those that voted. */
static void dtrain__consent_step(dtrain__hub *hub)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next) {
        if (consent->decided || !dtrain__hub_leads(hub) || dtrain__consent_awaits(hub, consent) >= 0)
            continue;
        consent->decided = 1;
        consent->flags = UINT64_MAX;
        for (int i = 0; i < consent->count; i++)
            consent->flags &= consent->votes[i].vote == DTRAIN__VOTE_YES ? consent->votes[i].flags : UINT64_MAX;
        consent->id = dtrain__hub_group_id(++hub->serial, hub->rank);
        consent->status = consent->mixed                           ? DTRAIN_ERR_MISMATCH
                          : dtrain__consent_majority(hub, consent) ? DTRAIN_OK
                                                                   : DTRAIN_ERR_PEER_LOST;
        for (int i = 0; i < consent->count; i++)
            if (consent->votes[i].vote == DTRAIN__VOTE_YES && consent->votes[i].world != hub->rank)
                dtrain__consent_send(hub, consent->votes[i].world, consent);
        dtrain__hub_tell(hub);
    }
}

/* Notes a member's vote. Returns 0 when it is none. */
static int dtrain__consent_note(dtrain__consent *consent, int world, int kind, uint64_t flags)
{
    for (int i = 0; i < consent->count; i++) {
        if (consent->votes[i].world != world)
            continue;
        consent->votes[i].vote = DTRAIN__VOTE_YES;
        consent->votes[i].flags = flags;
        consent->mixed |= kind != consent->kind;
        return 1;
    }
    return 0;
}

/* This rank votes in its channel; voting again changes the flags, unless it is decided. Returns 0 when there is no
 * memory. */
static int dtrain__consent_vote(dtrain__channel *channel, uint64_t number, int kind, uint64_t flags)
{
    dtrain__hub *hub = channel->hub;
    dtrain__consent *consent = dtrain__consent_find(hub, channel->id, number);
    if (consent == NULL) {
        consent = dtrain__consent_open(hub, channel->id, number, kind, channel->size);
        if (consent == NULL)
            return 0;
        for (int i = 0; i < channel->size; i++)
            consent->votes[i].world = channel->peers[i].world;
    }
    if (consent->decided)
        return 1;
    for (int i = 0; i < channel->size; i++)
        if (channel->peers[i].left && i != channel->rank)
            consent->votes[i].vote = DTRAIN__VOTE_OUT;
    dtrain__consent_note(consent, hub->rank, kind, flags);
    if (!dtrain__hub_leads(hub))
        dtrain__consent_send(hub, hub->leader, consent);
    dtrain__consent_step(hub);
    dtrain__hub_kick(hub);
    return 1;
}

/* A member's end of the channel is gone, or its process: it votes no more. */
static void dtrain__consent_left(dtrain__hub *hub, uint64_t channel, int rank)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next)
        if (consent->channel == channel && !consent->decided && rank < consent->count)
            consent->votes[rank].vote = DTRAIN__VOTE_OUT;
}

/* There is another leader: it gets all that this rank keeps. */
static void dtrain__consent_resend(dtrain__hub *hub)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next)
        if (!dtrain__hub_leads(hub))
            dtrain__consent_send(hub, hub->leader, consent);
}

/* Reads the members of a consent into one that may have them already. Returns 0 when they do not fit it. */
static int dtrain__consent_read(dtrain__hub *hub, dtrain__consent *consent, int from, int kind, int fresh, int decided,
                                dtrain__reader *reader)
{
    uint64_t flags, world, vote;
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *mine = &consent->votes[i];
        if (!dtrain__take(reader, &flags, 8) || !dtrain__take(reader, &world, 4) || !dtrain__take(reader, &vote, 1) ||
            world >= (uint64_t)hub->size || vote > DTRAIN__VOTE_OUT || (!fresh && (int)world != mine->world))
            return 0;
        mine->world = (int)world;
        if (decided)
            mine->vote = (int)vote;
        else if (vote == DTRAIN__VOTE_OUT && mine->vote == DTRAIN__VOTE_NONE)
            mine->vote = DTRAIN__VOTE_OUT;
        else if (mine->world == from && vote == DTRAIN__VOTE_YES)
            dtrain__consent_note(consent, from, kind, flags);
    }
    return 1;
}

/* A vote, or a decision: from the leader, or from a rank that had heard of one before this rank led. */
static int dtrain__take_consent(dtrain__hub *hub, int from, dtrain__reader *reader)
{
    uint64_t channel, number, kind, decided, status, flags, id, count;
    dtrain__consent *consent;
    int fresh;
    if (!dtrain__take(reader, &channel, 8) || !dtrain__take(reader, &number, 8) || !dtrain__take(reader, &kind, 1) ||
        !dtrain__take(reader, &decided, 1) || !dtrain__take(reader, &status, 2) || status > DTRAIN_ERR_ABORTED ||
        !dtrain__take(reader, &flags, 8) || !dtrain__take(reader, &id, 8) || !dtrain__take(reader, &count, 4) ||
        count == 0 || count > (uint64_t)hub->size || reader->left != 13 * (size_t)count)
        return 0;
    consent = dtrain__consent_find(hub, channel, number);
    if (consent != NULL && consent->decided) {
        if (!decided) /* it asks for what it has missed */
            dtrain__consent_send(hub, from, consent);
        return 1;
    }
    fresh = consent == NULL;
    if (fresh)
        consent = dtrain__consent_open(hub, channel, number, (int)kind, (int)count);
    if (consent == NULL)
        return 1; /* no memory: the call ends at its deadline */
    if (consent->count != (int)count ||
        !dtrain__consent_read(hub, consent, from, (int)kind, fresh, decided != 0, reader)) {
        if (fresh)
            dtrain__consent_drop(hub, &hub->consents);
        return 0;
    }
    if (decided) {
        consent->decided = 1;
        consent->status = (dtrain_status)status;
        consent->flags = flags;
        consent->id = id;
        for (int i = 0; dtrain__hub_leads(hub) && i < consent->count; i++)
            if (consent->votes[i].vote == DTRAIN__VOTE_YES && consent->votes[i].world != hub->rank)
                dtrain__consent_send(hub, consent->votes[i].world, consent);
        dtrain__hub_tell(hub);
    }
    return 1;
}

#endif

/* ---- >>control ----
 * What comes over the control connections: who joins, where everyone is, who is lost and why, what ranks do, and
 * requests to the store. Frames come from ranks that have proved themselves, and are checked all the same. */
#ifndef DTRAIN__CONTROL
#define DTRAIN__CONTROL

/* Keeps the answer to a group's own request. */
static void dtrain__store_keep(dtrain__channel *channel, dtrain_status status, int found, const void *data,
                               size_t bytes)
{
    channel->store_value.bytes = 0;
    channel->store_value.short_of = 0;
    dtrain__give_bytes(channel->hub, &channel->store_value, data, bytes);
    channel->store_status = channel->store_value.short_of ? DTRAIN_ERR_MEMORY : status;
    channel->store_found = found;
    channel->store_answered = channel->store_id;
    dtrain__hub_tell(channel->hub);
}

/* Answers a store request: rank 0's own at once, another's by a frame. */
static void dtrain__store_answer(dtrain__hub *hub, const dtrain__asker *asker, dtrain_status status, int found,
                                 const void *data, size_t bytes)
{
    dtrain__member *member = &hub->members[asker->rank];
    dtrain__channel *channel;
    size_t begin;
    if (asker->rank == hub->rank) {
        channel = dtrain__hub_channel(hub, asker->channel);
        if (channel != NULL && channel->store_id == asker->id)
            dtrain__store_keep(channel, status, found, data, bytes);
        return;
    }
    begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_ANSWER);
    dtrain__give(hub, &member->out, asker->channel, 8);
    dtrain__give(hub, &member->out, asker->id, 4);
    dtrain__give(hub, &member->out, (uint64_t)status, 2);
    dtrain__give(hub, &member->out, (uint64_t)found, 1);
    dtrain__give_bytes(hub, &member->out, data, bytes);
    if (!dtrain__frame_close(member, begin) && bytes > 0)
        dtrain__store_answer(hub, asker, DTRAIN_ERR_MEMORY, 0, NULL, 0);
}

/* Answers every get that waited for a key which is there now. */
static void dtrain__store_wake(dtrain__hub *hub, const char *key, size_t key_bytes)
{
    dtrain__entry *entry = *dtrain__store_place(&hub->store, key, key_bytes);
    for (dtrain__asker **at = &hub->askers, *asker; entry != NULL && (asker = *at) != NULL;) {
        if (asker->key_bytes != key_bytes || memcmp(asker->key, key, key_bytes) != 0) {
            at = &asker->next;
            continue;
        }
        *at = asker->next;
        dtrain__store_answer(hub, asker, DTRAIN_OK, 1, dtrain__entry_value(entry), entry->bytes);
        dtrain__free(hub->allocator, asker, sizeof *asker);
    }
}

#define DTRAIN__EVERY_CHANNEL UINT64_MAX

/* Forgets what a group of a rank waits for: it asks anew, or has left. */
static void dtrain__store_forget(dtrain__hub *hub, int rank, uint64_t channel)
{
    for (dtrain__asker **at = &hub->askers, *asker; (asker = *at) != NULL;) {
        if (asker->rank != rank || (channel != DTRAIN__EVERY_CHANNEL && asker->channel != channel)) {
            at = &asker->next;
            continue;
        }
        *at = asker->next;
        dtrain__free(hub->allocator, asker, sizeof *asker);
    }
}

enum { DTRAIN__STORE_SET = 0, DTRAIN__STORE_GET, DTRAIN__STORE_WAIT };

/* Rank 0: one request. */
static void dtrain__store_serve(dtrain__hub *hub, const dtrain__asker *from, int what, const void *value, size_t bytes)
{
    dtrain__entry *entry;
    dtrain__asker *asker;
    dtrain__store_forget(hub, from->rank, from->channel);
    if (what == DTRAIN__STORE_SET) {
        dtrain_status status = dtrain__store_put(&hub->store, hub->allocator, from->key, from->key_bytes, value, bytes);
        const char *text = status == DTRAIN_OK ? "" : dtrain__thread_error.text;
        dtrain__store_answer(hub, from, status, 0, text, strlen(text));
        dtrain__store_wake(hub, from->key, from->key_bytes);
        return;
    }
    entry = *dtrain__store_place(&hub->store, from->key, from->key_bytes);
    if (entry != NULL || what == DTRAIN__STORE_GET) {
        dtrain__store_answer(hub, from, DTRAIN_OK, entry != NULL, entry != NULL ? dtrain__entry_value(entry) : NULL,
                             entry != NULL ? entry->bytes : 0);
        return;
    }
    asker = (dtrain__asker *)dtrain__alloc(hub->allocator, sizeof *asker);
    if (asker == NULL) {
        dtrain__store_answer(hub, from, DTRAIN_ERR_MEMORY, 0, NULL, 0);
        return;
    }
    *asker = *from;
    asker->next = hub->askers;
    hub->askers = asker;
}

static int dtrain__take_ask(dtrain__hub *hub, int rank, dtrain__reader *reader)
{
    uint64_t id, what;
    dtrain__asker asker;
    if (hub->rank != 0 || !dtrain__take(reader, &asker.channel, 8) || !dtrain__take(reader, &id, 4) ||
        !dtrain__take(reader, &what, 1) || what > DTRAIN__STORE_WAIT ||
        !dtrain__take_text(reader, 2, asker.key, sizeof asker.key) || reader->left > DTRAIN__STORE_VALUE_BYTES)
        return 0;
    asker.rank = rank;
    asker.id = (uint32_t)id;
    asker.key_bytes = strlen(asker.key);
    dtrain__store_serve(hub, &asker, (int)what, reader->at, reader->left);
    return 1;
}

static int dtrain__take_answer(dtrain__hub *hub, dtrain__reader *reader)
{
    uint64_t group, id, status, found;
    dtrain__channel *channel;
    if (hub->rank == 0 || !dtrain__take(reader, &group, 8) || !dtrain__take(reader, &id, 4) ||
        !dtrain__take(reader, &status, 2) || !dtrain__take(reader, &found, 1) || status > DTRAIN_ERR_ABORTED)
        return 0;
    channel = dtrain__hub_channel(hub, group);
    if (channel != NULL && id == channel->store_id) /* else of a request that was given up */
        dtrain__store_keep(channel, (dtrain_status)status, found != 0, reader->at, reader->left);
    return 1;
}

/* What a rank tells of itself when it joins; rank 0 refuses who does not fit. */
static int dtrain__take_join(dtrain__hub *hub, int rank, dtrain__reader *reader)
{
    dtrain__member *member = &hub->members[rank];
    char fingerprint[DTRAIN__FINGERPRINT_BYTES], believed[400], text[DTRAIN__WHY_BYTES];
    dtrain__reason refusal = {DTRAIN__FRAME_REFUSE, 0, rank, DTRAIN_ERR_MISMATCH, text};
    if (hub->rank != 0 || hub->formed || member->joined ||
        !dtrain__take_text(reader, 1, member->address, sizeof member->address) ||
        !dtrain__take(reader, &member->host, 8) || !dtrain__take_text(reader, 1, member->name, sizeof member->name) ||
        !dtrain__take_text(reader, 2, fingerprint, sizeof fingerprint) ||
        !dtrain__take_text(reader, 2, believed, sizeof believed))
        return 0;
    if (strcmp(fingerprint, hub->fingerprint) != 0) {
        snprintf(text, sizeof text,
                 "rank %d (%.60s) has the fingerprint \"%.120s\", rank 0 \"%.120s\": run the same "
                 "program and model on every rank",
                 rank, member->name, fingerprint, hub->fingerprint);
        member->joined = 1; /* until it has been told */
        dtrain__frame_reason(hub, rank, &refusal, NULL);
        member->joined = 0;
        snprintf(hub->refused, sizeof hub->refused, "%s", text);
        dtrain__log(DTRAIN_LOG_WARN, "rank 0 sent away %s", text);
        return 1;
    }
    member->joined = 1;
    return 1;
}

/* Gives the channel its lanes, as many as the world has connections. Returns 0 when there is no memory. */
static int dtrain__channel_lay(dtrain__channel *channel)
{
    size_t each = (size_t)channel->hub->connections, count = (size_t)channel->size * each;
    channel->lanes = (dtrain__lane *)dtrain__alloc(channel->hub->allocator, count * sizeof(dtrain__lane));
    if (channel->lanes == NULL)
        return 0;
    for (size_t i = 0; i < count; i++)
        channel->lanes[i].stream.fd = -1;
    for (int rank = 0; rank < channel->size; rank++)
        channel->peers[rank].lanes = channel->lanes + (size_t)rank * each;
    return 1;
}

/* All have joined, and this rank knows where they are. */
static void dtrain__hub_formed(dtrain__hub *hub)
{
    int neighbours = 0;
    hub->formed = 1;
    for (int rank = 0; rank < hub->size; rank++)
        hub->members[rank].joined = 1;
    for (int rank = 0; rank < hub->size; rank++)
        neighbours += hub->members[rank].host == hub->members[hub->rank].host;
    hub->crowded = neighbours > dtrain__os_processors();
    if (hub->world != NULL && !dtrain__channel_lay(hub->world))
        dtrain__channel_end(hub->world, hub->rank, DTRAIN_ERR_MEMORY, "no memory for connections");
    dtrain__hub_tell(hub);
}

static int dtrain__take_table(dtrain__hub *hub, dtrain__reader *reader)
{
    uint64_t size, connections;
    if (hub->rank == 0 || hub->formed || !dtrain__take(reader, &size, 4) || size != (uint64_t)hub->size ||
        !dtrain__take(reader, &connections, 1) || connections < 1 || connections > DTRAIN__MAX_LANES)
        return 0;
    hub->connections = (int)connections;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        if (!dtrain__take_text(reader, 1, member->address, sizeof member->address) ||
            !dtrain__take(reader, &member->host, 8) || !dtrain__take_text(reader, 1, member->name, sizeof member->name))
            return 0;
    }
    dtrain__hub_formed(hub);
    return 1;
}

/* The leader: sends on what concerns a channel to those whom the sender lists, to all where it lists none. */
static void dtrain__hub_forward(dtrain__hub *hub, int from, const dtrain__reason *reason, dtrain__reader list)
{
    uint64_t rank;
    if (!dtrain__hub_leads(hub))
        return;
    if (reason->channel == 0)
        dtrain__hub_relay(hub, from, reason);
    while (dtrain__take(&list, &rank, 4))
        if (rank < (uint64_t)hub->size && (int)rank != from)
            dtrain__frame_reason(hub, (int)rank, reason, NULL);
}

/* While the world forms: rank 0 does not want this rank, or fares badly itself. */
static int dtrain__take_refusal(dtrain__hub *hub, const dtrain__reason *reason)
{
    if (hub->formed || hub->world == NULL)
        return 0;
    dtrain__fail(&hub->root_error, reason->status, "%s", reason->text);
    dtrain__channel_break(hub->world, reason->status, hub->root_error.text);
    return 1;
}

/* A channel that has ended, or whose member has left. */
static int dtrain__take_channel_reason(dtrain__hub *hub, int from, const dtrain__reason *reason,
                                       const dtrain__reader *list)
{
    dtrain__channel *channel = dtrain__hub_channel(hub, reason->channel);
    if (channel != NULL &&
        (reason->about >= channel->size ||
         (reason->type == DTRAIN__FRAME_BYE && dtrain__hub_leads(hub) && channel->peers[reason->about].world != from)))
        return 0;
    if (reason->type == DTRAIN__FRAME_BYE) {
        if (channel != NULL && reason->about != channel->rank)
            dtrain__channel_left(channel, reason->about, reason->text);
        dtrain__store_forget(hub, from, reason->channel);
        dtrain__consent_left(hub, reason->channel, reason->about);
        dtrain__hub_forward(hub, from, reason, *list);
    } else if (channel == NULL || dtrain__channel_break(channel, reason->status, reason->text)) {
        dtrain__hub_forward(hub, from, reason, *list);
    }
    return 1;
}

/* The others have given this rank up, which was stopped perhaps: it is in no group any more. */
static int dtrain__hub_given_up(dtrain__hub *hub, const char *how)
{
    hub->given_up = 1;
    snprintf(hub->members[hub->rank].why, sizeof hub->members[hub->rank].why, "%.*s", DTRAIN__WHY_BYTES - 1, how);
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next)
        dtrain__channel_lost(channel, channel->rank);
    dtrain__hub_tell(hub);
    return 1;
}

/* A member that has left with all its groups, or that is lost. */
static int dtrain__take_gone(dtrain__hub *hub, int from, const dtrain__reason *reason, const dtrain__reader *list)
{
    int leads = dtrain__hub_leads(hub);
    if (reason->about == hub->rank && reason->type == DTRAIN__FRAME_LOST)
        return dtrain__hub_given_up(hub, reason->text);
    if (reason->about >= hub->size || reason->about == hub->rank ||
        (leads && (reason->type == DTRAIN__FRAME_LOST || reason->about != from)))
        return 0;
    if (leads && !hub->formed) {
        hub->members[from].joined =
            0; /* it gave up waiting for others, and may start again; its connection ends next */
        return 1;
    }
    dtrain__store_forget(hub, reason->about, DTRAIN__EVERY_CHANNEL);
    hub->members[reason->about].silent = reason->type == DTRAIN__FRAME_LOST && reason->status == DTRAIN_ERR_TIMEOUT;
    dtrain__hub_gone(hub, reason->about, reason->type == DTRAIN__FRAME_LOST ? DTRAIN__LOST : DTRAIN__LEFT,
                     reason->text);
    dtrain__hub_forward(hub, from, reason, *list);
    return 1;
}

/* Something that happened to a rank, and why. */
static int dtrain__take_reason(dtrain__hub *hub, int from, int type, dtrain__reader *reader)
{
    uint64_t about, status, count;
    char text[DTRAIN__ERROR_BYTES];
    dtrain__reason reason;
    if (!dtrain__take(reader, &reason.channel, 8) || !dtrain__take(reader, &about, 4) || about > INT_MAX ||
        !dtrain__take(reader, &status, 2) || status > DTRAIN_ERR_ABORTED ||
        !dtrain__take_text(reader, 2, text, sizeof text) || !dtrain__take(reader, &count, 4) ||
        count > (uint64_t)hub->size || reader->left != 4 * (size_t)count)
        return 0;
    reason.type = type;
    reason.about = (int)about;
    reason.status = (dtrain_status)status;
    reason.text = text;
    if (reason.status == DTRAIN_OK && (type == DTRAIN__FRAME_END || type == DTRAIN__FRAME_REFUSE))
        return 0;
    switch (type) {
    case DTRAIN__FRAME_REFUSE: return dtrain__take_refusal(hub, &reason);
    case DTRAIN__FRAME_BYE:
    case DTRAIN__FRAME_END: return dtrain__take_channel_reason(hub, from, &reason, reader);
    case DTRAIN__FRAME_LOST:
    case DTRAIN__FRAME_GONE: return dtrain__take_gone(hub, from, &reason, reader);
    default: return 0;
    }
}

/* Asks what this rank does now: in the first group that waits for a peer, else in the oldest. */
static void dtrain__hub_look(dtrain__hub *hub, int64_t now)
{
    dtrain__last_heard *own = &hub->members[hub->rank].last;
    own->awaits = -1;
    own->bytes = 0;
    own->heard_ns = now;
    for (dtrain__channel *channel = hub->channels; channel != NULL && own->awaits < 0; channel = channel->next) {
        if (channel->last != NULL)
            own->bytes = channel->last(channel->last_user, own->data, sizeof own->data, &own->awaits);
        if (own->awaits >= 0)
            own->awaits = channel->peers[own->awaits].world;
    }
}

/* Adds to a heartbeat what is known of a rank; returns the rank that it waits for, or -1. */
static int dtrain__give_last(dtrain__hub *hub, dtrain__member *to, int about, int64_t now)
{
    const dtrain__last_heard *last = &hub->members[about].last;
    if (last->bytes == 0)
        return -1;
    dtrain__give(hub, &to->out, (uint64_t)about, 4);
    dtrain__give(hub, &to->out, (uint64_t)(last->awaits + 1), 4);
    dtrain__give(hub, &to->out, (uint64_t)((now - last->heard_ns) / 1000000), 4);
    dtrain__give(hub, &to->out, last->bytes, 2);
    dtrain__give_bytes(hub, &to->out, last->data, last->bytes);
    return last->awaits;
}

static int dtrain__take_last(dtrain__hub *hub, int from, dtrain__reader *reader)
{
    uint64_t about, awaits, age_ms, bytes;
    if (!dtrain__take(reader, &about, 4) || !dtrain__take(reader, &awaits, 4) || !dtrain__take(reader, &age_ms, 4) ||
        !dtrain__take(reader, &bytes, 2) || about >= (uint64_t)hub->size || awaits > (uint64_t)hub->size ||
        bytes > DTRAIN__LAST_BYTES || bytes > reader->left || (dtrain__hub_leads(hub) && (int)about != from) ||
        (int)about == hub->rank)
        return 0;
    dtrain__last_heard *last = &hub->members[about].last;
    memcpy(last->data, reader->at, (size_t)bytes);
    last->bytes = (size_t)bytes;
    last->awaits = (int)awaits - 1;
    last->heard_ns = dtrain__os_now_ns() - (int64_t)age_ms * 1000000;
    reader->at += bytes;
    reader->left -= (size_t)bytes;
    return 1;
}

static int dtrain__take_beat(dtrain__hub *hub, int from, dtrain__reader *reader)
{
    uint64_t suspect, ms;
    if (!dtrain__take(reader, &suspect, 4) || !dtrain__take(reader, &ms, 4) || suspect > (uint64_t)hub->size)
        return 0;
    if (!dtrain__hub_leads(hub)) {
        hub->suspect = (int)suspect - 1;
        hub->suspect_ns = (int64_t)ms * 1000000;
    }
    while (reader->left > 0)
        if (!dtrain__take_last(hub, from, reader))
            return 0;
    return 1;
}

/* One whole frame from `rank`; returns 0 when it is malformed or out of place. */
static int dtrain__hub_frame(dtrain__hub *hub, int rank, int type, const unsigned char *data, size_t bytes)
{
    dtrain__reader reader = {data, bytes};
    switch (type) {
    case DTRAIN__FRAME_JOIN: return dtrain__take_join(hub, rank, &reader);
    case DTRAIN__FRAME_TABLE: return dtrain__take_table(hub, &reader);
    case DTRAIN__FRAME_BEAT: return dtrain__take_beat(hub, rank, &reader);
    case DTRAIN__FRAME_ASK: return dtrain__take_ask(hub, rank, &reader);
    case DTRAIN__FRAME_ANSWER: return dtrain__take_answer(hub, &reader);
    case DTRAIN__FRAME_CONSENT: return dtrain__take_consent(hub, rank, &reader);
    default: return dtrain__take_reason(hub, rank, type, &reader);
    }
}

/* Handles the whole frames of a member's input; returns 0 when one of them is malformed. */
static int dtrain__hub_frames(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    size_t at = 0;
    int good = 1;
    while (good && member->in.bytes - at >= 6) {
        uint64_t bytes = dtrain__get_le(member->in.data + at, 4);
        int type = (int)dtrain__get_le(member->in.data + at + 4, 2);
        if (bytes > DTRAIN__FRAME_BYTES)
            good = 0;
        else if (member->in.bytes - at - 6 < bytes)
            break;
        else
            good = dtrain__hub_frame(hub, rank, type, member->in.data + at + 6, (size_t)bytes);
        at += good ? 6 + (size_t)bytes : 0;
    }
    dtrain__bytes_drop(&member->in, at < member->in.bytes ? at : member->in.bytes);
    return good;
}

/* This rank cannot go on for want of memory, and says so rather than fall silent. */
static void dtrain__hub_short_of_memory(dtrain__hub *hub)
{
    dtrain__error cause;
    dtrain__error kept = dtrain__thread_error;
    dtrain__fail(&cause, DTRAIN_ERR_MEMORY, "rank %d has no memory for its control messages", hub->rank);
    dtrain__thread_error = kept;
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next)
        dtrain__channel_end(channel, channel->rank, cause.status, cause.text);
}

/* Reads what a member's control connection holds. */
static void dtrain__hub_listen_to(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    while (member->control.fd >= 0) {
        if (!dtrain__bytes_room(hub->allocator, &member->in, 4096)) {
            dtrain__hub_short_of_memory(hub);
            return;
        }
        ssize_t n = dtrain__stream_recv(&member->control, member->in.data + member->in.bytes,
                                        member->in.capacity - member->in.bytes);
        if (n < 0)
            dtrain__hub_control_down(hub, rank, errno);
        if (n <= 0)
            return;
        member->in.bytes += (size_t)n;
        member->heard_ns = dtrain__os_now_ns();
        if (!dtrain__hub_frames(hub, rank)) {
            dtrain__hub_lost(hub, rank, 0, "it sent what is no control message of dtrain");
            return;
        }
    }
}

/* A connection that takes no more may still hold its peer's last words, which say whether it left or died: whoever reads
 * them finds its end, too, now or when poll() tells of it. */
static void dtrain__hub_flush(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    while (member->control.fd >= 0 && (member->out.bytes > 0 || member->control.again > 0)) {
        ssize_t n = dtrain__stream_send(&member->control, member->out.data, member->out.bytes, 0);
        if (n < 0)
            dtrain__hub_listen_to(hub, rank);
        if (n <= 0)
            return;
        dtrain__bytes_drop(&member->out, (size_t)n);
    }
}

/* Sends what is to be said, without waiting. Who says it last asks more than once, as the system may refuse a call for
 * no lasting reason. */
static void dtrain__hub_flush_all(dtrain__hub *hub, int tries)
{
    for (int rank = 0; rank < hub->size; rank++)
        for (int turn = 0; turn < tries && rank != hub->rank && hub->members[rank].control.fd >= 0 &&
                           (turn == 0 || hub->members[rank].out.bytes > 0);
             turn++)
            dtrain__hub_flush(hub, rank);
}

#endif

/* ---- >>rendezvous ----
 * How a group forms and how its connections are made. Rank 0 listens at the root address; every other rank
 * reaches it, proves itself, listens on the way that led there, and tells its own address; when all have come,
 * rank 0 sends the table of all. Later connections for data are made by whoever needs them first; of two made
 * at once, the lower rank's stays. hub_step() is all of it: one poll(), then whatever can be done now. */
#ifndef DTRAIN__RENDEZVOUS
#define DTRAIN__RENDEZVOUS

static void dtrain__hub_free_door(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__door_close(door);
    dtrain__free(hub->allocator, door, sizeof *door);
}

static dtrain__door *dtrain__hub_new_door(dtrain__hub *hub, const dtrain__address *peer)
{
    dtrain__door *door = (dtrain__door *)dtrain__alloc(hub->allocator, sizeof *door);
    if (door == NULL)
        return NULL;
    door->fd = -1;
    door->expires_ns = dtrain__os_now_ns() + DTRAIN__DOOR_NS;
    snprintf(door->peer_name, sizeof door->peer_name, "%s", dtrain__net_text(peer).text);
    return door;
}

/* Starts a connection to `peer`; NULL when the system or the peer refuses at once (errno). */
static dtrain__door *dtrain__hub_connect(dtrain__hub *hub, int peer, int purpose, const dtrain__address *address)
{
    dtrain__door *door = dtrain__hub_new_door(hub, address);
    int error = ENOMEM;
    if (door != NULL)
        error = dtrain__net_connect(address, &door->fd);
    if (error != 0) {
        if (door != NULL)
            dtrain__hub_free_door(hub, door);
        errno = error;
        return NULL;
    }
    door->initiator = 1;
    door->peer = peer;
    door->purpose = purpose;
    return door;
}

/* Where `peer` listens for data. */
static int dtrain__hub_peer_address(dtrain__hub *hub, int peer, dtrain__address *out)
{
    dtrain__member *member = &hub->members[peer];
    dtrain__address found[DTRAIN__MAX_ADDRESSES];
    int count;
    if (peer == 0) {
        *out = hub->reached;
        return 1;
    }
    if (member->address[0] != ':') {
        if (dtrain__net_resolve(member->address, found, &count) != DTRAIN_OK)
            return 0;
        *out = found[0];
        return 1;
    }
    *out = hub->reached;
    if (hub->rank == 0) {
        out->bytes = (socklen_t)sizeof out->at.storage;
        if (getpeername(member->control.fd, &out->at.any, &out->bytes) != 0)
            return 0;
    }
    dtrain__net_set_port(out, atoi(member->address + 1));
    return 1;
}

static size_t dtrain__hub_buffer(const dtrain__hub *hub)
{
    return hub->reconnect_ns > 0 ? DTRAIN__SOCKET_BUFFER : 0;
}

static int dtrain__hub_same_host(const dtrain__hub *hub, int peer)
{
    return hub->members[peer].host == hub->members[hub->rank].host;
}

/* Takes a connection that was just admitted for data. */
static void dtrain__hub_adopt_data(dtrain__channel *channel, int rank, dtrain__door *door)
{
    dtrain__hub *hub = channel->hub;
    dtrain__lane *lane = &channel->peers[rank].lanes[door->lane];
    char text[DTRAIN__WHY_BYTES];
    if (hub->reconnect_ns > 0 && lane->stream.replay == NULL && lane->stream.sent == 0) /* it must hold all */
        lane->stream.replay = (unsigned char *)dtrain__alloc(hub->allocator, DTRAIN__REPLAY_BYTES);
    if (!dtrain__stream_resume(&lane->stream, door->fd, door->peer_received)) {
        snprintf(text, sizeof text,
                 "rank %d (%s) is lost: its connection came back, but more was lost than can be sent again", rank,
                 hub->members[door->peer].name);
        dtrain__channel_end(channel, rank, DTRAIN_ERR_PEER_LOST, text);
        return;
    }
    dtrain__net_tune(door->fd, dtrain__hub_same_host(hub, door->peer), dtrain__hub_buffer(hub));
    door->fd = -1;
    channel->attend |= lane->stream.again > 0;
    lane->links = (door->peer_links > lane->links ? door->peer_links : lane->links) + 1;
    lane->wanted = 0;
    lane->down_ns = 0;
    hub->members[door->peer].trouble[0] = 0;
}

static void dtrain__hub_adopt_control(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__member *member = &hub->members[door->peer];
    if (hub->reconnect_ns > 0 && member->control.replay == NULL && member->control.sent == 0)
        member->control.replay = (unsigned char *)dtrain__alloc(hub->allocator, DTRAIN__REPLAY_BYTES);
    if (!dtrain__stream_resume(&member->control, door->fd, door->peer_received)) {
        dtrain__hub_lost(hub, door->peer, 0, "its connection came back, but more was lost than can be sent again");
        return;
    }
    dtrain__net_tune(door->fd, 0, dtrain__hub_buffer(hub));
    door->fd = -1;
    member->expected = 0;
    member->heard_ns = dtrain__os_now_ns();
}

/* Whether a name for the root means loopback on this host alone, as a host's own name often does, so that others are
 * expected from elsewhere; where only this host may come, it does not matter. */
static int dtrain__hub_more_than_loopback(const dtrain__hub *hub, const dtrain__address *address)
{
    return dtrain__net_is_local(address) && !dtrain__net_is_unix(address) &&
           (hub->keys.token_bytes > 0 || hub->insecure) && strncmp(hub->root, "127.", 4) != 0 &&
           strncmp(hub->root, "[::1]", 5) != 0 && strncmp(hub->root, "localhost:", 10) != 0;
}

/* Where this rank listens: on the way that its control connection went out, at a port of its own. *local: only
 * ranks that reach rank 0 as this one does can come there. */
static dtrain_status dtrain__hub_own_address(dtrain__hub *hub, int *local)
{
    dtrain__address *here = &hub->listening;
    char path[DTRAIN__ADDRESS_BYTES];
    here->bytes = (socklen_t)sizeof here->at.storage;
    if (getsockname(hub->members[0].control.fd, &here->at.any, &here->bytes) != 0)
        return dtrain__fail(&hub->root_error, DTRAIN_ERR_IO, "rank %d: %s", hub->rank, strerror(errno));
    *local = dtrain__net_is_local(here);
    if (dtrain__net_is_unix(&hub->reached)) {
        *local = 0;
        snprintf(path, sizeof path, "%.200s.%d", hub->root + 5, hub->rank);
        return dtrain__net_unix_address(here, path);
    }
    if (hub->listen_on[0] != 0) {
        int family = here->at.any.sa_family;
        *local = 0;
        dtrain_status status = dtrain__net_interface(hub->listen_on, family, here);
        if (status != DTRAIN_OK)
            return status;
    } else if (dtrain__hub_more_than_loopback(hub, here)) {
        dtrain__net_set_any(here);
    }
    dtrain__net_set_port(here, 0);
    return DTRAIN_OK;
}

/* Opens this rank's own listener, and says to rank 0 where it is. */
static dtrain_status dtrain__hub_join(dtrain__hub *hub)
{
    dtrain__member *root = &hub->members[0], *self = &hub->members[hub->rank];
    int local, error;
    dtrain_status status = dtrain__hub_own_address(hub, &local);
    if (status != DTRAIN_OK)
        return status;
    error = dtrain__net_listen(&hub->listening, &hub->listener);
    if (error != 0)
        return dtrain__fail(&hub->root_error, DTRAIN_ERR_IO, "rank %d cannot listen on %s: %s", hub->rank,
                            dtrain__net_text(&hub->listening).text, strerror(error));
    if (local)
        snprintf(self->address, sizeof self->address, ":%d", dtrain__net_port(&hub->listening));
    else
        snprintf(self->address, sizeof self->address, "%.120s", dtrain__net_text(&hub->listening).text);
    root->joined = 1;
    size_t begin = dtrain__frame_open(hub, root, DTRAIN__FRAME_JOIN);
    dtrain__give_text(hub, &root->out, 1, self->address);
    dtrain__give(hub, &root->out, self->host, 8);
    dtrain__give_text(hub, &root->out, 1, self->name);
    dtrain__give_text(hub, &root->out, 2, hub->fingerprint);
    dtrain__give_text(hub, &root->out, 2, hub->believed);
    return dtrain__frame_close(root, begin)
               ? DTRAIN_OK
               : dtrain__fail(&hub->root_error, DTRAIN_ERR_MEMORY, "rank %d has no memory to join", hub->rank);
}

/* Rank 0: when all have joined, tells everyone where everyone is. */
static void dtrain__hub_complete(dtrain__hub *hub)
{
    for (int rank = 0; rank < hub->size; rank++)
        if (!hub->members[rank].joined)
            return;
    for (int to = 1; to < hub->size; to++) {
        dtrain__member *member = &hub->members[to];
        size_t begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_TABLE);
        dtrain__give(hub, &member->out, (uint64_t)hub->size, 4);
        dtrain__give(hub, &member->out, (uint64_t)hub->connections, 1);
        for (int rank = 0; rank < hub->size; rank++) {
            dtrain__give_text(hub, &member->out, 1, hub->members[rank].address);
            dtrain__give(hub, &member->out, hub->members[rank].host, 8);
            dtrain__give_text(hub, &member->out, 1, hub->members[rank].name);
        }
        if (!dtrain__frame_close(member, begin)) {
            dtrain__hub_short_of_memory(hub);
            return;
        }
    }
    dtrain__hub_formed(hub);
}

static void dtrain__hub_refuse(dtrain__hub *hub, dtrain__door *door, dtrain_status status, const char *text)
{
    dtrain__door_answer(door, &hub->keys, status, text);
    if (!hub->formed) {
        snprintf(hub->refused, sizeof hub->refused, "%.440s", door->error.text);
        dtrain__log(DTRAIN_LOG_WARN, "rank %d: %s", hub->rank, door->error.text);
    }
}

/* A proved peer wants its control connection: to join, or to go on. */
static void dtrain__hub_admit_control(dtrain__hub *hub, dtrain__door *door)
{
    char text[DTRAIN__VERDICT_TEXT];
    dtrain__member *member = &hub->members[door->peer];
    int ours = hub->formed && memcmp(door->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) == 0;
    int again = ours && member->expected;
    if (ours && hub->reconnect_ns > 0 && member->gone == DTRAIN__PRESENT && member->control.fd >= 0) {
        dtrain__stream_cut(&member->control); /* the peer saw the reset first */
        member->down_ns = dtrain__os_now_ns();
        member->expected = again = 1;
    }
    if (again) {
        door->received = member->control.received;
        dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
        return;
    }
    if (hub->formed) {
        /* perhaps the last one, about to end: the peer may try again */
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_ABORTED, "its group is complete and runs");
        return;
    }
    if (member->control.fd >= 0) {
        snprintf(text, sizeof text,
                 "two processes say they are rank %d: %.60s came first, now %.60s; give each process "
                 "a rank of its own",
                 door->peer, member->name[0] != 0 ? member->name : "another process", door->peer_name);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, text);
        return;
    }
    member->control.sent = member->control.received = 0;
    door->received = 0;
    door->peer_received = 0;
    dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
}

/* A proved peer wants a control connection, as one of the two leads now that rank 0 is gone. */
static void dtrain__hub_admit_call(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__member *member = &hub->members[door->peer];
    if (memcmp(door->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) != 0) {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_DENIED, "this is another run's group");
        return;
    }
    if ((member->control.fd >= 0 && hub->reconnect_ns == 0) || (member->door != NULL && hub->rank < door->peer)) {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_ABORTED, "the connection is there already");
        return;
    }
    if (member->door != NULL)
        dtrain__hub_free_door(hub, member->door);
    member->door = NULL;
    dtrain__stream_cut(&member->control);
    door->received = member->control.received;
    dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
}

/* A proved peer wants to send and receive data. */
static void dtrain__hub_admit_data(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__channel *channel = dtrain__hub_channel(hub, door->channel);
    int rank = dtrain__channel_rank(channel, door->peer);
    dtrain__lane *lane;
    if (memcmp(door->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) != 0 || door->lane < 0 ||
        door->lane >= hub->connections || rank < 0 || channel->lanes == NULL) {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_DENIED, "this is another run's group");
        return;
    }
    lane = &channel->peers[rank].lanes[door->lane];
    if ((lane->door != NULL && hub->rank < door->peer) || (lane->links > 0 && hub->reconnect_ns == 0) ||
        door->peer_links < lane->links) { /* it was on its way when another one was made; its count may be behind */
        door->received = lane->links;
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_ABORTED, "the connection is there already");
        return;
    }
    if (lane->door != NULL)
        dtrain__hub_free_door(hub, lane->door);
    lane->door = NULL;
    if (lane->stream.fd >= 0) /* the peer saw the reset first; from here on the position is what it is told */
        lane->down_ns = dtrain__os_now_ns();
    lane->wanted |= lane->links > 0;
    channel->attend = 1;
    dtrain__stream_cut(&lane->stream);
    door->received = lane->stream.received;
    dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
}

/* The peer has proved that it holds the token; what it said in its hello is looked at now. */
static void dtrain__hub_admit(dtrain__hub *hub, dtrain__door *door)
{
    char text[DTRAIN__VERDICT_TEXT];
    if (door->peer_world != hub->size) {
        snprintf(text, sizeof text,
                 "rank %d at %.80s believes in a world of %d ranks, rank %d in one of %d; give "
                 "every process the same world size",
                 door->peer, door->peer_name, door->peer_world, hub->rank, hub->size);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, text);
    } else if (door->peer < 0 || door->peer >= hub->size || door->peer == hub->rank ||
               dtrain__get_le(door->hello + 16, 4) != (uint64_t)hub->rank) {
        snprintf(text, sizeof text, "rank %d at %.80s wants rank %u, and this is rank %d of %d", door->peer,
                 door->peer_name, (unsigned)dtrain__get_le(door->hello + 16, 4), hub->rank, hub->size);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, text);
    } else if (hub->formed && hub->members[door->peer].gone == DTRAIN__LOST) {
        snprintf(text, sizeof text, "%.240s", hub->members[door->peer].why);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_PEER_LOST, text);
    } else if (door->purpose == DTRAIN__PURPOSE_CONTROL && hub->rank == 0) {
        dtrain__hub_admit_control(hub, door);
    } else if (door->purpose == DTRAIN__PURPOSE_CONTROL && hub->formed) {
        dtrain__hub_admit_call(hub, door);
    } else if (door->purpose == DTRAIN__PURPOSE_DATA) {
        dtrain__hub_admit_data(hub, door);
    } else {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, "only rank 0 takes control connections");
    }
}

/* The inbound connection is open: takes it, unless its channel has left meanwhile. */
static void dtrain__hub_adopt(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__channel *channel = dtrain__hub_channel(hub, door->channel);
    int rank = channel != NULL ? dtrain__channel_rank(channel, door->peer) : -1;
    if (door->purpose == DTRAIN__PURPOSE_CONTROL)
        dtrain__hub_adopt_control(hub, door);
    else if (rank >= 0)
        dtrain__hub_adopt_data(channel, rank, door);
}

/* Advances one inbound connection; returns 0 when it is done with. */
static int dtrain__hub_step_door(dtrain__hub *hub, dtrain__door *door, int64_t now)
{
    unsigned char last;
    dtrain__door_step(door, &hub->keys);
    if (door->state == DTRAIN__DOOR_PROVED && door->purpose == DTRAIN__PURPOSE_DATA &&
        (!hub->formed || dtrain__hub_channel(hub, door->channel) == NULL))
        /* a peer that has the table, or the group, already may come before this rank has it: its door waits until
         * the peer gives up; it says nothing before that */
        return now < door->expires_ns && dtrain__net_recv(door->fd, &last, 1) == 0;
    if (door->state == DTRAIN__DOOR_PROVED) {
        dtrain__hub_admit(hub, door);
        dtrain__door_step(door, &hub->keys);
    }
    if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes) {
        if (door->error.status == DTRAIN_OK)
            dtrain__hub_adopt(hub, door);
        else if (door->error.status == DTRAIN_ERR_DENIED && now - hub->told_ns > 1000000000) {
            hub->told_ns = now; /* a flood of strangers writes one line a second */
            snprintf(hub->refused, sizeof hub->refused, "%.440s", door->error.text);
            dtrain__log(DTRAIN_LOG_WARN, "rank %d: %s", hub->rank, door->error.text);
        } else if (!hub->formed && door->error.status == DTRAIN_ERR_MISMATCH)
            snprintf(hub->refused, sizeof hub->refused, "%.440s", door->error.text);
        if (door->error.status == DTRAIN_OK)
            dtrain__hub_tell(hub);
        return 0;
    }
    return door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns;
}

static void dtrain__hub_step_doors(dtrain__hub *hub, int64_t now)
{
    for (dtrain__door **at = &hub->doors, *door; (door = *at) != NULL;) {
        if (dtrain__hub_step_door(hub, door, now)) {
            at = &door->next;
            continue;
        }
        *at = door->next;
        hub->inbound--;
        dtrain__hub_free_door(hub, door);
    }
}

/* Takes waiting connections. A stranger holds one door for a few seconds; when all are held, the oldest goes. */
static void dtrain__hub_accept(dtrain__hub *hub, int64_t now)
{
    for (int i = 0; hub->listener >= 0 && now >= hub->accept_ns && i < DTRAIN__DOORS; i++) {
        dtrain__address peer;
        dtrain__door *door, **last = &hub->doors;
        int fd, error = dtrain__net_accept(hub->listener, &fd, &peer);
        if (error == EAGAIN)
            return;
        if (error != 0) {
            hub->accept_ns = now + 100000000; /* out of descriptors, most often: look again in a while */
            dtrain__log(DTRAIN_LOG_WARN,
                        "rank %d cannot accept a connection (%s); this process may open more "
                        "descriptors after \"ulimit -n\" with a higher number",
                        hub->rank, strerror(error));
            return;
        }
        door = dtrain__hub_new_door(hub, &peer);
        if (door == NULL) {
            close(fd);
            snprintf(hub->refused, sizeof hub->refused, "%s, as there is no memory", dtrain__net_text(&peer).text);
            return;
        }
        door->fd = fd;
        door->state = DTRAIN__DOOR_HELLO;
        while (*last != NULL)
            last = &(*last)->next;
        *last = door;
        if (++hub->inbound > DTRAIN__DOORS) {
            door = hub->doors;
            hub->doors = door->next;
            hub->inbound--;
            dtrain__hub_free_door(hub, door);
        }
    }
}

/* Other ranks than 0: reaches rank 0, as often as it takes. */
static void dtrain__hub_step_root(dtrain__hub *hub, int64_t now)
{
    dtrain__member *root = &hub->members[0];
    dtrain__door *door = hub->root_door;
    if (hub->rank == 0 || root->control.fd >= 0 || root->gone != DTRAIN__PRESENT ||
        (!hub->formed && (hub->world == NULL || hub->world->broken)))
        return;
    if (door == NULL && now >= hub->root_retry_ns) {
        dtrain__address *address = &hub->root_addresses[hub->root_turn++ % hub->root_count];
        hub->root_wait_ns = hub->root_wait_ns < 250000000 ? hub->root_wait_ns * 2 : 500000000;
        hub->root_retry_ns = now + hub->root_wait_ns;
        door = hub->root_door = dtrain__hub_connect(hub, 0, DTRAIN__PURPOSE_CONTROL, address);
        if (door == NULL)
            dtrain__fail(&hub->root_error, DTRAIN_ERR_PEER_LOST, "%s: %s", dtrain__net_text(address).text,
                         strerror(errno));
        else
            door->received = root->control.received, hub->reached = *address;
    }
    if (door == NULL)
        return;
    dtrain__door_step(door, &hub->keys);
    if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes) {
        if (!hub->formed)
            memcpy(hub->keys.run, door->challenge + 16, DTRAIN__RUN_BYTES);
        dtrain__hub_adopt_control(hub, door);
        if (!hub->formed && root->control.fd >= 0 && dtrain__hub_join(hub) != DTRAIN_OK)
            dtrain__channel_end(hub->world, hub->rank, dtrain__thread_error.status, dtrain__thread_error.text);
    } else if (door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns) {
        return;
    } else {
        if (door->state != DTRAIN__DOOR_CLOSED)
            dtrain__fail(&door->error, DTRAIN_ERR_PEER_LOST, "%s: no answer", door->peer_name);
        hub->root_error = door->error;
        if (hub->formed && door->error.status != DTRAIN_ERR_PEER_LOST)
            dtrain__hub_lost(hub, 0, 0, door->error.text);
        else if (!hub->formed && door->error.status != DTRAIN_ERR_PEER_LOST && door->error.status != DTRAIN_ERR_ABORTED)
            dtrain__channel_break(hub->world, door->error.status, door->error.text);
    }
    dtrain__hub_free_door(hub, door);
    hub->root_door = NULL;
    dtrain__hub_tell(hub);
}

static void dtrain__hub_step_lane(dtrain__channel *channel, int rank, int index, int64_t now)
{
    dtrain__hub *hub = channel->hub;
    dtrain__peer *peer = &channel->peers[rank];
    dtrain__member *member = &hub->members[peer->world];
    dtrain__lane *lane = &peer->lanes[index];
    dtrain__door *door = lane->door;
    dtrain__address address;
    if (door == NULL && lane->wanted && lane->stream.fd < 0 && now >= lane->retry_ns && !peer->left) {
        lane->retry_ns = now + 50000000;
        if (!dtrain__hub_peer_address(hub, peer->world, &address))
            return;
        door = lane->door = dtrain__hub_connect(hub, peer->world, DTRAIN__PURPOSE_DATA, &address);
        if (door != NULL) {
            door->channel = channel->id;
            door->lane = index;
            door->received = lane->stream.received;
            door->links = lane->links;
        } else
            snprintf(member->trouble, sizeof member->trouble, "%.100s: %.50s", dtrain__net_text(&address).text,
                     strerror(errno));
    }
    if (door == NULL)
        return;
    dtrain__door_step(door, &hub->keys);
    if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes)
        dtrain__hub_adopt_data(channel, rank, door);
    else if (door->verdict == DTRAIN_ERR_PEER_LOST)
        dtrain__hub_given_up(hub, door->error.text);
    else if (door->error.status == DTRAIN_ERR_ABORTED && door->peer_received > lane->links)
        lane->links = door->peer_received;
    else if (door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns)
        return;
    else
        snprintf(member->trouble, sizeof member->trouble, "%.140s%s",
                 door->state == DTRAIN__DOOR_CLOSED ? door->error.text : door->peer_name,
                 door->state == DTRAIN__DOOR_CLOSED ? "" : ": no answer");
    lane->door = NULL;
    dtrain__hub_free_door(hub, door);
    dtrain__hub_tell(hub);
}

static int dtrain__lane_busy(const dtrain__lane *lane)
{
    return lane->door != NULL || (lane->wanted && lane->stream.fd < 0) ||
           (lane->stream.fd >= 0 && lane->stream.again > 0);
}

/* Calls a rank to which this one has no control connection, after rank 0 is gone. */
static void dtrain__hub_call(dtrain__hub *hub, int rank, int64_t now)
{
    dtrain__member *member = &hub->members[rank];
    dtrain__address address;
    int error = 0;
    if (member->door == NULL) {
        if (now < member->call_ns || !dtrain__hub_peer_address(hub, rank, &address))
            return;
        member->call_ns = now + DTRAIN__CALL_NS / 3;
        member->door = dtrain__hub_connect(hub, rank, DTRAIN__PURPOSE_CONTROL, &address);
        error = member->door == NULL ? errno : 0;
        if (member->door != NULL)
            member->door->received = member->control.received;
    }
    dtrain__door *door = member->door;
    if (door != NULL) {
        dtrain__door_step(door, &hub->keys);
        if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes)
            dtrain__hub_adopt_control(hub, door);
        else if (door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns)
            return;
        error = door->system_error;
        if (door->verdict == DTRAIN_ERR_PEER_LOST)
            dtrain__hub_given_up(hub, door->error.text);
        dtrain__hub_free_door(hub, door);
        member->door = NULL;
    }
    if (error == ECONNREFUSED || error == ENOENT)
        dtrain__hub_lost(hub, rank, 0, "it takes no connection; its process has died");
}

/* After rank 0 is gone the leader calls the others, who call it when they have waited for that. */
static void dtrain__hub_step_calls(dtrain__hub *hub, int64_t now)
{
    if (hub->elected)
        dtrain__consent_resend(hub);
    hub->elected = 0;
    for (int rank = 0; hub->leader != 0 && !hub->leaving && !hub->given_up && rank < hub->size; rank++)
        if (dtrain__hub_linked(hub, rank) && hub->members[rank].gone == DTRAIN__PRESENT &&
            hub->members[rank].control.fd < 0)
            dtrain__hub_call(hub, rank, now);
    dtrain__consent_step(hub);
}

/* Sends once more what a broken connection has lost, whether or not this rank has more to send. */
static void dtrain__hub_step_again(dtrain__lane *lane, int64_t now)
{
    if (lane->stream.fd < 0 || lane->stream.again == 0 || dtrain__stream_send(&lane->stream, NULL, 0, 0) >= 0)
        return;
    dtrain__stream_cut(&lane->stream);
    lane->down_ns = now;
    lane->wanted = 1;
}

/* One heartbeat: who is silent, and what this rank does; rank 0 tells a rank what the one does that it waits for, and
 * the one that that one waits for. */
static void dtrain__hub_beat(dtrain__hub *hub, int to, int suspect, int64_t silent_ns, int64_t now)
{
    int leads = dtrain__hub_leads(hub);
    dtrain__member *member = &hub->members[to];
    size_t begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_BEAT);
    dtrain__give(hub, &member->out, leads ? (uint64_t)(suspect + 1) : 0, 4);
    dtrain__give(hub, &member->out, (uint64_t)(silent_ns / 1000000), 4);
    if (!leads)
        dtrain__give_last(hub, member, hub->rank, now);
    for (int i = 0, about = member->last.awaits; leads && i < DTRAIN__LAST_CHAIN; i++)
        if (about < 0 || about == to)
            break;
        else
            about = dtrain__give_last(hub, member, about, now);
    dtrain__frame_close(member, begin);
}

/* Heartbeats: sends this rank's, and judges the silence of others. */
static void dtrain__hub_step_hearts(dtrain__hub *hub, int64_t now)
{
    int64_t longest = 1200000000;
    int suspect = -1;
    int slept = hub->stepped_ns > 0 && hub->heartbeat_ns > 0 && now - hub->stepped_ns > hub->heartbeat_ns / 2;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        int64_t silent = now - member->heard_ns;
        char how[96];
        if (!dtrain__hub_linked(hub, rank) || member->gone != DTRAIN__PRESENT || member->heard_ns == 0)
            continue;
        if (slept) /* this process was stopped, and cannot tell */
            member->heard_ns = now;
        else if (member->expected && now - member->down_ns > hub->reconnect_ns)
            dtrain__hub_lost(hub, rank, 1, "its connection was reset and has not come back within reconnect_ms");
        else if (hub->formed && hub->heartbeat_ns > 0 && silent > hub->heartbeat_ns) {
            snprintf(how, sizeof how, "not heard for %.1f s (heartbeat_ms); stopped, or its host is gone",
                     (double)silent * 1e-9);
            dtrain__hub_lost(hub, rank, 1, how);
        } else if (hub->formed && silent > longest) {
            longest = silent;
            suspect = rank;
        }
    }
    if (dtrain__hub_leads(hub) || suspect == hub->leader) {
        hub->suspect = suspect;
        hub->suspect_ns = longest;
    }
    hub->stepped_ns = now;
    if (now < hub->beat_ns)
        return;
    hub->beat_ns = now + hub->period_ns;
    dtrain__hub_look(hub, now);
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        if (dtrain__hub_linked(hub, rank) && member->joined && member->gone == DTRAIN__PRESENT &&
            member->control.fd >= 0 && member->out.bytes <= DTRAIN__FRAME_BYTES)
            dtrain__hub_beat(hub, rank, suspect, longest, now);
    }
}

/* Makes the connections that the channel wants. */
static void dtrain__hub_step_channel(dtrain__channel *channel, int64_t now)
{
    int busy = 0;
    for (int rank = 0; rank < channel->size; rank++)
        for (int i = 0; i < channel->hub->connections; i++) {
            dtrain__lane *lane = &channel->peers[rank].lanes[i];
            dtrain__hub_step_lane(channel, rank, i, now);
            dtrain__hub_step_again(lane, now);
            busy |= dtrain__lane_busy(lane);
        }
    channel->attend = busy;
}

/* Everything that can be done without waiting; the caller holds both mutexes. */
static void dtrain__hub_work(dtrain__hub *hub)
{
    int64_t now = dtrain__os_now_ns();
    dtrain__hub_accept(hub, now);
    dtrain__hub_step_doors(hub, now);
    dtrain__hub_step_root(hub, now);
    for (int rank = 0; rank < hub->size; rank++)
        if (hub->members[rank].poll_index > 0 && hub->fds[hub->members[rank].poll_index].revents != 0)
            dtrain__hub_listen_to(hub, rank);
    if (hub->rank == 0 && !hub->formed && hub->world != NULL && !hub->world->broken)
        dtrain__hub_complete(hub);
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next)
        if (channel->attend)
            dtrain__hub_step_channel(channel, now);
    dtrain__hub_step_calls(hub, now);
    dtrain__hub_step_hearts(hub, now);
    dtrain__hub_flush_all(hub, 1);
}

/* Adds to the poll list; what finds no memory there is looked at when something else is due. */
static void dtrain__hub_watch(dtrain__hub *hub, int *count, int fd, int events)
{
    size_t bytes = (size_t)hub->fds_room * sizeof(struct pollfd);
    if (*count == hub->fds_room) {
        void *larger = dtrain__resize(hub->allocator, hub->fds, bytes, bytes > 0 ? 2 * bytes : 4096);
        if (larger == NULL)
            return;
        hub->fds = (struct pollfd *)larger;
        hub->fds_room = bytes > 0 ? 2 * hub->fds_room : (int)(4096 / sizeof(struct pollfd));
    }
    hub->fds[*count].fd = fd;
    hub->fds[*count].events = (short)events;
    hub->fds[(*count)++].revents = 0;
}

/* Adds the channel's connections that are being made or made good. */
static int64_t dtrain__hub_watch_channel(dtrain__channel *channel, int *count, int64_t due)
{
    for (int i = 0; i < channel->size * channel->hub->connections; i++) {
        dtrain__lane *lane = &channel->lanes[i];
        if (lane->door != NULL)
            dtrain__hub_watch(channel->hub, count, lane->door->fd, dtrain__door_writes(lane->door) ? POLLOUT : POLLIN);
        else if (lane->wanted && lane->stream.fd < 0 && lane->retry_ns < due)
            due = lane->retry_ns;
        if (lane->stream.fd >= 0 && lane->stream.again > 0)
            dtrain__hub_watch(channel->hub, count, lane->stream.fd, POLLOUT);
    }
    return due;
}

/* Fills the poll list; returns when something is due without any event. */
static int64_t dtrain__hub_prepare(dtrain__hub *hub, int *count)
{
    int64_t due = hub->beat_ns, now = dtrain__os_now_ns();
    *count = 0;
    dtrain__hub_watch(hub, count, hub->kick[0], POLLIN);
    if (hub->listener >= 0 && now >= hub->accept_ns)
        dtrain__hub_watch(hub, count, hub->listener, POLLIN);
    for (dtrain__door *door = hub->doors; door != NULL; door = door->next) {
        dtrain__hub_watch(hub, count, door->fd, dtrain__door_writes(door) ? POLLOUT : POLLIN);
        due = door->expires_ns < due ? door->expires_ns : due;
    }
    if (hub->root_door != NULL)
        dtrain__hub_watch(hub, count, hub->root_door->fd, dtrain__door_writes(hub->root_door) ? POLLOUT : POLLIN);
    else if (hub->rank != 0 && hub->members[0].control.fd < 0 && hub->members[0].gone == DTRAIN__PRESENT &&
             hub->root_retry_ns < due)
        due = hub->root_retry_ns;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        member->poll_index = 0;
        if (member->door != NULL)
            dtrain__hub_watch(hub, count, member->door->fd, dtrain__door_writes(member->door) ? POLLOUT : POLLIN);
        else if (hub->leader != 0 && dtrain__hub_linked(hub, rank) && member->gone == DTRAIN__PRESENT &&
                 member->control.fd < 0 && member->call_ns < due)
            due = member->call_ns;
        if (rank == hub->rank || member->control.fd < 0)
            continue;
        member->poll_index = *count;
        dtrain__hub_watch(hub, count, member->control.fd,
                          POLLIN | (member->out.bytes > 0 || member->control.again > 0 ? POLLOUT : 0));
        if (member->poll_index == *count)
            member->poll_index = 0;
    }
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next)
        if (channel->attend)
            due = dtrain__hub_watch_channel(channel, count, due);
    return due;
}

/* Adds what the service thread could not move in the channel. */
static void dtrain__hub_watch_awaited(dtrain__channel *channel, int *count)
{
    size_t room;
    for (int rank = 0; channel->awaiting && rank < channel->size; rank++)
        for (int sending = 0; sending < 2; sending++) {
            int event = sending ? POLLOUT : POLLIN;
            if ((channel->peers[rank].awaits & event) == 0)
                continue;
            dtrain__lane *lane = dtrain__channel_lane(channel, rank, sending, &room);
            if (lane->stream.fd >= 0)
                dtrain__hub_watch(channel->hub, count, lane->stream.fd, event);
        }
}

/* poll() until an event or until_ns; restarted signals and rounding are harmless, callers look again. */
static void dtrain__hub_poll(struct pollfd *fds, int count, int64_t until_ns)
{
    int64_t span = until_ns - dtrain__os_now_ns();
    int ms = span <= 0 ? 0 : span > 60000000000 ? 60000 : (int)((span + 999999) / 1000000);
    poll(fds, (nfds_t)count, ms);
}

/* One turn of the control plane; waits until until_ns at most, or until one of extra is ready. The caller holds
 * step_mutex. */
static void dtrain__hub_step(dtrain__hub *hub, const struct pollfd *extra, int extra_count, int64_t until_ns)
{
    int count;
    pthread_mutex_lock(&hub->mutex);
    int64_t due = dtrain__hub_prepare(hub, &count);
    for (int i = 0; i < extra_count; i++)
        dtrain__hub_watch(hub, &count, extra[i].fd, extra[i].events);
    int serviced = __atomic_load_n(&hub->serviced, __ATOMIC_ACQUIRE) != 0;
    for (dtrain__channel *channel = hub->channels; serviced && channel != NULL; channel = channel->next)
        dtrain__hub_watch_awaited(channel, &count);
    __atomic_store_n(&hub->stepping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&hub->mutex);
    if (__atomic_load_n(&hub->kicked, __ATOMIC_SEQ_CST))
        until_ns = 0;
    dtrain__hub_poll(hub->fds, count, due < until_ns ? due : until_ns);
    __atomic_store_n(&hub->stepping, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&hub->kicked, 0, __ATOMIC_SEQ_CST);
    if (hub->fds[0].revents != 0)
        dtrain__net_drain(hub->kick[0]);
    pthread_mutex_lock(&hub->mutex);
    dtrain__hub_work(hub);
    pthread_mutex_unlock(&hub->mutex);
}

#endif

/* ---- >>channel ----
 * Channels and hubs come and go. A channel is made by every member for itself, under a name that they have agreed
 * on; connections that a peer makes for it before that wait at the door. The hub goes with its last channel, and
 * that tells the others that this process has left for good. */
#ifndef DTRAIN__CHANNEL
#define DTRAIN__CHANNEL

/* Closes so that what was sent still arrives: an unread byte would make the system drop it. */
static void dtrain__channel_hang_up(dtrain__stream *stream, int forked)
{
    unsigned char waste[4096];
    if (stream->fd < 0 || forked) {
        dtrain__stream_cut(stream);
        return;
    }
    shutdown(stream->fd, SHUT_WR);
    for (int i = 0; i < 256 && dtrain__net_recv(stream->fd, waste, sizeof waste) > 0; i++)
        continue;
    dtrain__stream_cut(stream);
}

static void dtrain__channel_free(dtrain__channel *channel)
{
    dtrain__hub *hub = channel->hub;
    int count = channel->lanes != NULL ? channel->size * hub->connections : 0;
    for (int i = 0; i < count; i++) {
        dtrain__lane *lane = &channel->lanes[i];
        dtrain__channel_hang_up(&lane->stream, channel->forked);
        if (lane->door != NULL)
            dtrain__hub_free_door(hub, lane->door);
        if (lane->stream.replay != NULL)
            dtrain__free(hub->allocator, lane->stream.replay, DTRAIN__REPLAY_BYTES);
    }
    dtrain__free(hub->allocator, channel->lanes, (size_t)count * sizeof(dtrain__lane));
    for (int rank = 0; channel->peers != NULL && rank < channel->size; rank++)
        if (channel->peers[rank].why != NULL)
            dtrain__free(hub->allocator, channel->peers[rank].why, strlen(channel->peers[rank].why) + 1);
    dtrain__free(hub->allocator, channel->peers, (size_t)channel->size * sizeof(dtrain__peer));
    for (int i = 0; i < 2; i++)
        if (channel->wake[i] >= 0)
            close(channel->wake[i]);
    dtrain__bytes_free(hub->allocator, &channel->store_value);
    dtrain__free(hub->allocator, channel, sizeof *channel);
}

/* Adds a channel of `size` members, of which worlds[i] is the rank in the world (NULL: i itself); the caller holds the
 * mutex. What is known of its members already counts. */
static dtrain_status dtrain__channel_create(dtrain__channel **out, dtrain__hub *hub, uint64_t id, const int *worlds,
                                            int size, int rank)
{
    dtrain__channel *channel = (dtrain__channel *)dtrain__alloc(hub->allocator, sizeof *channel);
    int error = ENOMEM;
    if (channel != NULL) {
        channel->hub = hub;
        channel->id = id;
        channel->rank = rank;
        channel->size = size;
        channel->wake[0] = channel->wake[1] = -1;
        channel->peers = (dtrain__peer *)dtrain__alloc(hub->allocator, (size_t)size * sizeof(dtrain__peer));
        if (channel->peers != NULL && (!hub->formed || dtrain__channel_lay(channel)))
            error = dtrain__net_pipe(channel->wake);
    }
    if (error != 0) {
        if (channel != NULL)
            dtrain__channel_free(channel);
        return dtrain__fail(NULL, error == ENOMEM ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_IO,
                            "rank %d cannot make its end of a group of %d ranks: %s", rank, size, strerror(error));
    }
    channel->next = hub->channels;
    hub->channels = channel;
    for (int i = 0; i < size; i++) {
        dtrain__peer *peer = &channel->peers[i];
        peer->world = worlds != NULL ? worlds[i] : i;
        if (hub->members[peer->world].gone == DTRAIN__LOST)
            dtrain__channel_lost(channel, i);
        else if (hub->members[peer->world].gone == DTRAIN__LEFT)
            dtrain__channel_left(channel, i, hub->members[peer->world].why);
    }
    dtrain__hub_kick(hub); /* connections may wait for it */
    *out = channel;
    return DTRAIN_OK;
}

static void dtrain__hub_free_members(dtrain__hub *hub, int forked)
{
    for (int rank = 0; hub->members != NULL && rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        dtrain__channel_hang_up(&member->control, forked);
        if (member->door != NULL)
            dtrain__hub_free_door(hub, member->door);
        if (member->control.replay != NULL)
            dtrain__free(hub->allocator, member->control.replay, DTRAIN__REPLAY_BYTES);
        dtrain__bytes_free(hub->allocator, &member->in);
        dtrain__bytes_free(hub->allocator, &member->out);
    }
    dtrain__free(hub->allocator, hub->members, (size_t)hub->size * sizeof(dtrain__member));
}

/* Frees a hub that has no channel any more. */
static void dtrain__hub_free(dtrain__hub *hub, int forked)
{
    dtrain_allocator *allocator = hub->allocator, own;
    if (hub->listener >= 0) {
        close(hub->listener);
        if (dtrain__net_is_unix(&hub->listening) && !forked)
            unlink(hub->listening.at.local.sun_path);
    }
    while (hub->doors != NULL) {
        dtrain__door *door = hub->doors;
        hub->doors = door->next;
        dtrain__hub_free_door(hub, door);
    }
    if (hub->root_door != NULL)
        dtrain__hub_free_door(hub, hub->root_door);
    dtrain__hub_free_members(hub, forked);
    for (int i = 0; i < 2; i++)
        if (hub->kick[i] >= 0)
            close(hub->kick[i]);
    for (int rank = 0; rank < hub->size; rank++)
        dtrain__store_forget(hub, rank, DTRAIN__EVERY_CHANNEL);
    while (hub->consents != NULL)
        dtrain__consent_drop(hub, &hub->consents);
    dtrain__store_free(&hub->store, allocator);
    dtrain__free(allocator, hub->fds, (size_t)hub->fds_room * sizeof(struct pollfd));
    memset(&hub->keys, 0, sizeof hub->keys);
    pthread_mutex_destroy(&hub->mutex);
    pthread_mutex_destroy(&hub->step_mutex);
    own = hub->own;
    dtrain__free(allocator == &hub->own ? &own : allocator, hub, sizeof *hub);
}

/* Takes the channel from its hub and frees it; the last one takes the hub along. A forked child touches no lock: its
 * parent's threads may have held them. */
static void dtrain__channel_destroy(dtrain__channel *channel)
{
    dtrain__hub *hub = channel->hub;
    dtrain__channel **at = &hub->channels;
    int forked = channel->forked, last;
    if (!forked)
        pthread_mutex_lock(&hub->mutex);
    while (*at != channel)
        at = &(*at)->next;
    *at = channel->next;
    dtrain__consent_left(hub, channel->id, channel->rank);
    for (dtrain__door *door = hub->doors; door != NULL; door = door->next)
        if (door->purpose == DTRAIN__PURPOSE_DATA && door->channel == channel->id)
            dtrain__door_close(door);
    hub->world = hub->world == channel ? NULL : hub->world;
    last = hub->channels == NULL;
    if (!last)
        dtrain__channel_free(channel);
    if (!forked)
        pthread_mutex_unlock(&hub->mutex);
    if (!last)
        return;
    if (!forked && hub->last_gone != NULL)
        hub->last_gone(hub->service);
    dtrain__channel_free(channel);
    dtrain__hub_free(hub, forked);
}

/* Waits for one of fds, for news, or for until_ns; runs the hub meanwhile when nobody else does. `seen` is what
 * hub->news was before the caller last looked. Where no service thread steps, whoever does may stop at any time. */
static void dtrain__hub_wait(dtrain__channel *channel, struct pollfd *fds, int count, int64_t until_ns, uint64_t seen)
{
    dtrain__hub *hub = channel->hub;
    int serviced = __atomic_load_n(&hub->serviced, __ATOMIC_ACQUIRE) != 0;
    int64_t soon = dtrain__os_now_ns() + (serviced ? 200000000 : 10000000);
    if (!serviced && pthread_mutex_trylock(&hub->step_mutex) == 0) {
        if (__atomic_load_n(&hub->news, __ATOMIC_SEQ_CST) == seen)
            dtrain__hub_step(hub, fds, count, until_ns);
        pthread_mutex_unlock(&hub->step_mutex);
        return;
    }
    __atomic_store_n(&channel->waiting, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&hub->news, __ATOMIC_SEQ_CST) == seen) {
        fds[count].fd = channel->wake[0];
        fds[count].events = POLLIN;
        fds[count].revents = 0;
        dtrain__hub_poll(fds, count + 1, until_ns < soon ? until_ns : soon);
        if (fds[count].revents != 0)
            dtrain__net_drain(channel->wake[0]);
    }
    __atomic_store_n(&channel->waiting, 0, __ATOMIC_SEQ_CST);
}

#endif

/* ---- >>socket ----
 * The transport over TCP and unix sockets: one end of it is a channel of the hub. A lane is made when its peer is
 * first needed; with several to a peer the stream goes over them in turn. A caller tries, looks again for a while,
 * then sleeps in poll(). Bytes are moved under hub->mutex, waited for without it. */
#ifndef DTRAIN__SOCKET
#define DTRAIN__SOCKET

#ifndef DTRAIN__TURN_BYTES
#define DTRAIN__TURN_BYTES ((size_t)1 << 19) /* moved at once one way before the other: what waits stays cached */
#endif
#define DTRAIN__POLL_BYTES ((size_t)1 << 16) /* moved at once for a caller with a budget */
#define DTRAIN__PATIENCE_NS 50000            /* of looking again before sleeping */
#define DTRAIN__GRACE_NS 1000000000          /* for the reason of a closed connection to arrive by way of rank 0 */

/* The lane has no connection: asks for one, or finds that there will be none. */
static dtrain_status dtrain__socket_missing(dtrain__channel *channel, dtrain__lane *lane, int rank)
{
    dtrain__hub *hub = channel->hub;
    dtrain__peer *peer = &channel->peers[rank];
    dtrain__error lost;
    int64_t now = dtrain__os_now_ns();
    if (peer->left)
        dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d has left the group%s%.400s", rank,
                     peer->why != NULL ? ": " : "", peer->why != NULL ? peer->why : "");
    else if (lane->links > 0 && now - lane->down_ns > (hub->reconnect_ns > 0 ? hub->reconnect_ns : DTRAIN__GRACE_NS))
        dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d (%s) is lost: its connection to rank %d was closed%s", rank,
                     hub->members[peer->world].name, channel->rank,
                     hub->reconnect_ns > 0 ? " and has not come back within reconnect_ms" : "");
    else {
        if (!lane->wanted && (lane->links == 0 || hub->reconnect_ns > 0)) {
            lane->wanted = channel->attend = 1;
            dtrain__hub_kick(hub);
        }
        return DTRAIN_OK;
    }
    dtrain__channel_end(channel, rank, lost.status, lost.text);
    return lost.status;
}

/* Moves what goes at once, about `most` bytes; sets *moved when something did. */
static dtrain_status dtrain__socket_try(dtrain__channel *channel, dtrain_transfer *transfer, int sending, size_t most,
                                        int *moved)
{
    dtrain__peer *peer = &channel->peers[transfer->peer];
    uint64_t *total = sending ? &peer->sent : &peer->received;
    while (transfer->moved < transfer->bytes) {
        size_t room, bytes = transfer->bytes - transfer->moved;
        dtrain__lane *lane = dtrain__channel_lane(channel, transfer->peer, sending, &room);
        unsigned char *data = transfer->data + transfer->moved;
        ssize_t n;
        if (lane->stream.fd < 0)
            return dtrain__socket_missing(channel, lane, transfer->peer);
        bytes = bytes < room ? bytes : room;
        bytes = bytes < most ? bytes : most;
        /* a header may wait for its payload only where both go the same way */
        n = sending ? dtrain__stream_send(&lane->stream, data, bytes, transfer->more && bytes < room)
                    : dtrain__stream_recv(&lane->stream, data, bytes);
        if (n < 0) {
            dtrain__stream_cut(&lane->stream);
            lane->down_ns = dtrain__os_now_ns();
            continue;
        }
        if (n == 0)
            return DTRAIN_OK;
        transfer->moved += (size_t)n;
        *total += (uint64_t)n;
        *moved = 1;
        if ((size_t)n < bytes || bytes == most)
            return DTRAIN_OK; /* the other direction may go on meanwhile */
    }
    return DTRAIN_OK;
}

/* Notes that this direction could go on when its peer moves. */
static void dtrain__socket_await(dtrain__channel *channel, const dtrain_transfer *transfer, int sending)
{
    if (transfer == NULL || transfer->moved == transfer->bytes)
        return;
    channel->peers[transfer->peer].awaits |= sending ? POLLOUT : POLLIN;
    channel->awaiting = 1;
}

/* Tries both directions once; asked: for a caller that will not wait here. A broken group ends every operation with the
 * group's cause, once nothing more moves: what a peer sent before it failed still completes what it was sent for. An
 * aborted one ends them at once. */
static dtrain_status dtrain__socket_turn(dtrain__channel *channel, dtrain_transfer *out, dtrain_transfer *in, int asked,
                                         int *moved)
{
    dtrain_status status = DTRAIN_OK;
    size_t most = asked ? DTRAIN__POLL_BYTES : DTRAIN__TURN_BYTES;
    pthread_mutex_lock(&channel->hub->mutex);
    if (in != NULL)
        status = dtrain__socket_try(channel, in, 0, most, moved);
    if (status == DTRAIN_OK && out != NULL)
        status = dtrain__socket_try(channel, out, 1, most, moved);
    if (channel->broken && (status != DTRAIN_OK || !*moved || channel->cause.status == DTRAIN_ERR_ABORTED))
        status = dtrain__report(&channel->cause);
    if (asked) {
        dtrain__socket_await(channel, in, 0);
        dtrain__socket_await(channel, out, 1);
    }
    pthread_mutex_unlock(&channel->hub->mutex);
    return status;
}

static void dtrain__socket_watch(dtrain__channel *channel, dtrain_transfer *transfer, int sending, struct pollfd *fds,
                                 int *count)
{
    size_t room;
    dtrain__lane *lane;
    if (transfer == NULL)
        return;
    lane = dtrain__channel_lane(channel, transfer->peer, sending, &room);
    if (lane->stream.fd < 0)
        return;
    fds[*count].fd = lane->stream.fd;
    fds[*count].events = sending ? POLLOUT : POLLIN;
    fds[(*count)++].revents = 0;
}

/* Sleeps until one of the directions may go on, the control plane has news, or until_ns. */
static void dtrain__socket_sleep(dtrain__channel *channel, dtrain_transfer *out, dtrain_transfer *in, int64_t until_ns,
                                 uint64_t seen)
{
    struct pollfd fds[3];
    int count = 0, missing;
    pthread_mutex_lock(&channel->hub->mutex);
    dtrain__socket_watch(channel, out, 1, fds, &count);
    dtrain__socket_watch(channel, in, 0, fds, &count);
    missing = count < (out != NULL) + (in != NULL);
    pthread_mutex_unlock(&channel->hub->mutex);
    if (missing) { /* a lost peer is judged by the clock as well */
        int64_t soon = dtrain__os_now_ns() + 50000000;
        until_ns = soon < until_ns ? soon : until_ns;
    }
    dtrain__hub_wait(channel, fds, count, until_ns, seen);
}

static dtrain_status dtrain__socket_exchange(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    int64_t sleep_ns = 0, now;
    for (;;) {
        uint64_t seen = __atomic_load_n(&channel->hub->news, __ATOMIC_SEQ_CST);
        int moved = 0;
        dtrain_status status = dtrain__socket_turn(channel, out, in, deadline_ns == 0, &moved);
        if (status != DTRAIN_OK || (out != NULL && out->moved == out->bytes) || (in != NULL && in->moved == in->bytes))
            return status;
        if (moved && deadline_ns != 0) {
            sleep_ns = 0;
            continue;
        }
        if (deadline_ns == 0 || (now = dtrain__os_now_ns()) >= deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (sleep_ns == 0)
            sleep_ns = now + DTRAIN__PATIENCE_NS;
        if (now < sleep_ns) {
            if (channel->hub->crowded)
                sched_yield();
            continue;
        }
        dtrain__socket_sleep(channel, out, in, deadline_ns, seen);
    }
}

static dtrain_status dtrain__socket_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                         size_t *moved)
{
    dtrain_transfer out = {peer, NULL, bytes, 0, 0};
    dtrain_status status = DTRAIN_OK;
    memcpy(&out.data, &data, sizeof data); /* it is only read */
    if (bytes > 0)
        status = dtrain__socket_exchange(self, &out, NULL, deadline_ns);
    *moved = out.moved;
    return status;
}

static dtrain_status dtrain__socket_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                         size_t *moved)
{
    dtrain_transfer in = {peer, (unsigned char *)data, bytes, 0, 0};
    dtrain_status status = DTRAIN_OK;
    if (bytes > 0)
        status = dtrain__socket_exchange(self, NULL, &in, deadline_ns);
    *moved = in.moved;
    return status;
}

/* A turn of the hub on its service thread; from the first on nobody else steps. */
static void dtrain__socket_step(dtrain__hub *hub, int64_t deadline_ns)
{
    __atomic_store_n(&hub->serviced, 1, __ATOMIC_RELEASE);
    if (pthread_mutex_trylock(&hub->step_mutex) != 0) {
        dtrain__hub_kick(hub);
        pthread_mutex_lock(&hub->step_mutex);
    }
    dtrain__hub_step(hub, NULL, 0, deadline_ns);
    pthread_mutex_unlock(&hub->step_mutex);
}

/* A turn of the hub on a thread that will not wait. */
static void dtrain__socket_poll(void *self, int64_t deadline_ns)
{
    dtrain__hub *hub = ((dtrain__channel *)self)->hub;
    (void)deadline_ns;
    if (pthread_mutex_trylock(&hub->step_mutex) != 0)
        return;
    dtrain__hub_step(hub, NULL, 0, 0);
    pthread_mutex_unlock(&hub->step_mutex);
}

/* The service thread is about to look at this channel's work: what it could not move before is not awaited now. */
static void dtrain__socket_rest(dtrain__channel *channel)
{
    pthread_mutex_lock(&channel->hub->mutex);
    for (int rank = 0; channel->awaiting && rank < channel->size; rank++)
        channel->peers[rank].awaits = 0;
    channel->awaiting = 0;
    pthread_mutex_unlock(&channel->hub->mutex);
}

static void dtrain__socket_wake(void *self)
{
    dtrain__hub_kick(((dtrain__channel *)self)->hub);
}

static void dtrain__socket_fail(void *self, dtrain_status why, const char *text)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    pthread_mutex_lock(&channel->hub->mutex);
    dtrain__channel_end(channel, channel->rank, why, text);
    dtrain__hub_flush_all(channel->hub, 100);
    pthread_mutex_unlock(&channel->hub->mutex);
}

static void dtrain__socket_leave(void *self, const char *why)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    dtrain__reason bye = {DTRAIN__FRAME_BYE, channel->id, channel->rank, DTRAIN_OK, why};
    dtrain__reason gone = {DTRAIN__FRAME_GONE, 0, hub->rank, DTRAIN_OK, why};
    if (channel->forked)
        return;
    pthread_mutex_lock(&hub->mutex);
    hub->leaving = hub->channels == channel && channel->next == NULL;
    if (hub->leaving)
        dtrain__hub_relay(hub, -1, &gone);
    else
        dtrain__channel_relay(channel, -1, &bye);
    dtrain__hub_flush_all(hub, 100);
    pthread_mutex_unlock(&hub->mutex);
}

static void dtrain__socket_destroy(void *self)
{
    dtrain__channel_destroy((dtrain__channel *)self);
}

/* Says why the awaited rank may not answer: this rank cannot connect to it, as behind a firewall; or which rank has
 * been silent for longest, if one has: "; rank 3 has been silent for 2.1 s". */
static void dtrain__socket_suspect(dtrain__channel *channel, int awaited, char *text, size_t capacity)
{
    dtrain__hub *hub = channel->hub;
    const dtrain__member *member = awaited >= 0 ? &hub->members[channel->peers[awaited].world] : NULL;
    pthread_mutex_lock(&hub->mutex);
    int silent = hub->suspect >= 0 ? dtrain__channel_rank(channel, hub->suspect) : -1;
    if (member != NULL && member->trouble[0] != 0)
        snprintf(text, capacity, "; no connection to it: %s", member->trouble);
    else if (silent >= 0)
        snprintf(text, capacity, "; rank %d has been silent for %.1f s", silent, (double)hub->suspect_ns * 1e-9);
    pthread_mutex_unlock(&hub->mutex);
}

/* Copies what `rank` was last heard to do, when that was after after_ns; returns its bytes, and how old it is. */
static size_t dtrain__socket_last(dtrain__channel *channel, int rank, int64_t after_ns, void *out, size_t capacity,
                                  int64_t *age_ns)
{
    const dtrain__last_heard *last = &channel->hub->members[channel->peers[rank].world].last;
    size_t bytes = 0;
    pthread_mutex_lock(&channel->hub->mutex);
    if (last->bytes <= capacity && last->heard_ns > after_ns) {
        bytes = last->bytes;
        memcpy(out, last->data, bytes);
        *age_ns = dtrain__os_now_ns() - last->heard_ns;
    }
    pthread_mutex_unlock(&channel->hub->mutex);
    return bytes;
}

/* Has heartbeats tell what this rank does in the group: `last` writes it, and is called with hub->mutex held. NULL: no
 * more. */
static void dtrain__socket_tell_last(dtrain__channel *channel,
                                     size_t (*last)(void *user, unsigned char *out, size_t capacity, int *awaits),
                                     void *user)
{
    pthread_mutex_lock(&channel->hub->mutex);
    channel->last_user = user;
    channel->last = last;
    pthread_mutex_unlock(&channel->hub->mutex);
}

/* Whether this address may be used: beyond this host only with a token, or where that is waived. */
static int dtrain__socket_allowed(const dtrain__hub *hub, const dtrain__address *address)
{
    return hub->keys.token_bytes > 0 || hub->insecure || dtrain__net_is_local(address);
}

static dtrain_status dtrain__socket_closed(dtrain__hub *hub)
{
    return dtrain__fail(
        NULL, DTRAIN_ERR_DENIED,
        "comm_create: rank %d: %.200s is beyond this host and there is no token: set DTRAIN_TOKEN to one "
        "secret of 16 bytes or more on every rank (or DTRAIN_INSECURE=1, on a network that is yours "
        "alone)",
        hub->rank, hub->root);
}

/* Uses a copy of the listening socket that the launcher left open, so that the next group can use it as well.
 * Returns 0 when the descriptor is no such thing, or no more. */
static int dtrain__socket_inherit(dtrain__hub *hub, int inherited, int port)
{
    int listens = 0, fd;
    socklen_t bytes = sizeof listens;
    hub->listening.bytes = (socklen_t)sizeof hub->listening.at.storage;
    if (getsockopt(inherited, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || !listens ||
        getsockname(inherited, &hub->listening.at.any, &hub->listening.bytes) != 0 ||
        dtrain__net_port(&hub->listening) != port || dtrain__net_manners(inherited) != 0)
        return 0;
    fd = fcntl(inherited, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    dtrain__net_plain(fd);
    hub->listener = fd;
    return 1;
}

/* Rank 0: opens the listener that everyone comes to. */
static dtrain_status dtrain__socket_listen(dtrain__hub *hub, int inherited)
{
    dtrain__address chosen = hub->root_addresses[0];
    char text[DTRAIN__ADDRESS_BYTES + 8];
    int error = 0, port = dtrain__net_port(&chosen);
    if (inherited >= 0 && dtrain__socket_inherit(hub, inherited, port))
        return DTRAIN_OK;
    if (hub->listen_on[0] != 0 && !dtrain__net_is_unix(&chosen)) {
        dtrain_status status = dtrain__net_interface(hub->listen_on, chosen.at.any.sa_family, &chosen);
        if (status != DTRAIN_OK)
            return status;
        dtrain__net_set_port(&chosen, port);
    } else if (dtrain__hub_more_than_loopback(hub, &chosen)) {
        dtrain__net_set_any(&chosen);
    }
    if (!dtrain__socket_allowed(hub, &chosen))
        return dtrain__socket_closed(hub);
    hub->listening = chosen;
    error = dtrain__net_listen(&hub->listening, &hub->listener);
    if (error == EADDRNOTAVAIL) { /* a name for this host that its interfaces do not have */
        hub->listening = chosen;
        dtrain__net_set_any(&hub->listening);
        error =
            dtrain__socket_allowed(hub, &hub->listening) ? dtrain__net_listen(&hub->listening, &hub->listener) : error;
    }
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: rank 0 cannot listen on %.200s: %s%s", hub->root,
                            strerror(error), error == EADDRINUSE ? "; another group, or the last one, is there" : "");
    snprintf(text, sizeof text, "%.200s", hub->root);
    if (port == 0 && !dtrain__net_is_unix(&hub->listening))
        snprintf(strrchr(text, ':'), 8, ":%d", dtrain__net_port(&hub->listening));
    snprintf(hub->root, sizeof hub->root, "%.255s", text);
    return DTRAIN_OK;
}

/* Looks the root up; where no token is, only what is on this host counts. */
static dtrain_status dtrain__socket_find_root(dtrain__hub *hub)
{
    dtrain__error cause;
    int kept = 0;
    dtrain_status status = dtrain__net_resolve(hub->root, hub->root_addresses, &hub->root_count);
    if (status != DTRAIN_OK) {
        cause = dtrain__thread_error;
        return dtrain__fail(NULL, status, "comm_create: rank %d: the root %.400s", hub->rank, cause.text);
    }
    for (int i = 0; i < hub->root_count; i++)
        if (dtrain__socket_allowed(hub, &hub->root_addresses[i]))
            hub->root_addresses[kept++] = hub->root_addresses[i];
    hub->root_count = kept;
    return kept > 0 ? DTRAIN_OK : dtrain__socket_closed(hub);
}

/* Copies what the desc says, with its defaults. */
static void dtrain__socket_describe(dtrain__hub *hub, const dtrain__keys *keys, const dtrain__hub_desc *desc)
{
    hub->keys = *keys;
    hub->rank = keys->rank;
    hub->size = keys->world_size;
    hub->insecure = desc->insecure;
    hub->connections = desc->connections > 0 ? desc->connections : 1;
    hub->heartbeat_ns =
        desc->heartbeat_ms < 0 ? 0 : dtrain__os_ms_to_ns(desc->heartbeat_ms > 0 ? desc->heartbeat_ms : 15000);
    hub->reconnect_ns = desc->reconnect_ms > 0 ? dtrain__os_ms_to_ns(desc->reconnect_ms) : 0;
    hub->period_ns = hub->heartbeat_ns > 0 && hub->heartbeat_ns / 8 < 500000000 ? hub->heartbeat_ns / 8 : 500000000;
    hub->listener = hub->kick[0] = hub->kick[1] = -1;
    hub->suspect = -1;
    hub->root_wait_ns = 2000000;
    snprintf(hub->root, sizeof hub->root, "%s", desc->root);
    snprintf(hub->listen_on, sizeof hub->listen_on, "%s", desc->listen_on);
    snprintf(hub->fingerprint, sizeof hub->fingerprint, "%s", desc->fingerprint);
    snprintf(hub->believed, sizeof hub->believed, "%s", desc->believed);
}

/* Says who this process is. */
static void dtrain__socket_introduce(dtrain__hub *hub)
{
    dtrain__member *self = &hub->members[hub->rank];
    unsigned char id[128], digest[32];
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    snprintf(self->name, sizeof self->name, "pid %ld on %.60s", (long)getpid(), host);
    dtrain__os_host_id(id);
    dtrain_sha256(id, sizeof id, digest);
    self->host = dtrain__get_le(digest, 8);
    self->joined = 1;
}

/* Pipes, the run's name, the root's addresses, and on rank 0 the listener. */
static dtrain_status dtrain__socket_open(dtrain__hub *hub, const dtrain__hub_desc *desc)
{
    dtrain_status status;
    int error = dtrain__net_pipe(hub->kick);
    if (error == 0 && hub->rank == 0)
        error = dtrain__os_random(hub->keys.run, DTRAIN__RUN_BYTES);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: rank %d: %s", hub->rank, strerror(error));
    status = dtrain__socket_find_root(hub);
    if (status == DTRAIN_OK && hub->rank == 0)
        status = dtrain__socket_listen(hub, desc->listen_fd);
    if (status == DTRAIN_OK && hub->rank == 0 && desc->on_address != NULL)
        desc->on_address(desc->on_address_user, hub->root);
    return status;
}

/* Fills a new hub and makes the world's channel. */
static dtrain_status dtrain__socket_start(dtrain__hub *hub, dtrain__channel **out, const dtrain__keys *keys,
                                          const dtrain__hub_desc *desc)
{
    dtrain__socket_describe(hub, keys, desc);
    size_t size = (size_t)hub->size;
    hub->fds = (struct pollfd *)dtrain__alloc(hub->allocator, 64 * sizeof(struct pollfd));
    hub->fds_room = hub->fds != NULL ? 64 : 0;
    hub->members = (dtrain__member *)dtrain__alloc(hub->allocator, size * sizeof(dtrain__member));
    if (hub->members == NULL || hub->fds == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "comm_create: no memory for rank %d of %zu", hub->rank, size);
    for (int rank = 0; rank < hub->size; rank++)
        hub->members[rank].control.fd = hub->members[rank].last.awaits = -1;
    dtrain__socket_introduce(hub);
    dtrain_status status = dtrain__channel_create(out, hub, 0, NULL, hub->size, hub->rank);
    hub->world = *out;
    return status == DTRAIN_OK ? dtrain__socket_open(hub, desc) : status;
}

/* Makes one rank's end, listening or about to reach rank 0; hub_step() does the rest. */
static dtrain_status dtrain__socket_create(dtrain__channel **out, const dtrain__keys *keys,
                                           const dtrain__hub_desc *desc, dtrain_allocator *allocator)
{
    dtrain_allocator first = {NULL, NULL, 0, 0};
    dtrain__hub *hub = (dtrain__hub *)dtrain__alloc(allocator != NULL ? allocator : &first, sizeof *hub);
    *out = NULL;
    if (hub == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "comm_create: no memory for rank %d", keys->rank);
    hub->own = first;
    hub->allocator = allocator != NULL ? allocator : &hub->own;
    pthread_mutex_init(&hub->mutex, NULL);
    pthread_mutex_init(&hub->step_mutex, NULL);
    dtrain_status status = dtrain__socket_start(hub, out, keys, desc);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    dtrain__error kept = dtrain__thread_error;
    if (*out != NULL)
        dtrain__channel_destroy(*out);
    else
        dtrain__hub_free(hub, 0);
    *out = NULL;
    return dtrain__report(&kept);
}

/* Says why a group has not formed: who came, who did not, who was sent away. */
static dtrain_status dtrain__socket_unformed(dtrain__hub *hub, double seconds)
{
    char missing[160] = "";
    size_t used = 0;
    for (int rank = 0; rank < hub->size && hub->rank == 0; rank++)
        if (!hub->members[rank].joined && used < sizeof missing - 32)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%d%s", used > 0 ? ", " : "", rank,
                                     hub->members[rank].name[0] != 0 ? " (came and left)" : "");
    if (hub->rank == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                            "comm_create: rank 0 of %d waited %.1f s at %.120s for rank %s; believed: %.180s%s%.200s",
                            hub->size, seconds, hub->root, missing, hub->believed,
                            hub->refused[0] != 0 ? "; came and was refused: " : "", hub->refused);
    if (hub->members[0].control.fd >= 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_TIMEOUT,
            "comm_create: rank %d of %d has met rank 0 at %.120s and waited %.1f s for other ranks, which "
            "have not come; believed: %.200s",
            hub->rank, hub->size, hub->root, seconds, hub->believed);
    return dtrain__fail(
        NULL, DTRAIN_ERR_TIMEOUT,
        "comm_create: rank %d of %d waited %.1f s for rank 0 at %.120s (%.160s); believed: %.180s; is rank "
        "0 started, and can it be reached from here?",
        hub->rank, hub->size, seconds, hub->root, hub->root_error.text[0] != 0 ? hub->root_error.text : "no answer",
        hub->believed);
}

/* Looks whether the group has formed, or never will. */
static dtrain_status dtrain__socket_formed(dtrain__channel *world, int *formed, int64_t started_ns, int64_t deadline_ns)
{
    dtrain__hub *hub = world->hub;
    dtrain_status status = DTRAIN_OK;
    pthread_mutex_lock(&hub->mutex);
    *formed = hub->formed && !world->broken;
    if (world->broken)
        status = dtrain__fail(NULL, world->cause.status, "comm_create: rank %d of %d: %.400s; believed: %.180s",
                              hub->rank, hub->size, world->cause.text, hub->believed);
    else if (!hub->formed && hub->rank != 0 && hub->members[0].gone != DTRAIN__PRESENT)
        status = dtrain__fail(NULL, DTRAIN_ERR_PEER_LOST, "comm_create: rank %d of %d: rank 0 has left%s%.300s",
                              hub->rank, hub->size, hub->members[0].why[0] != 0 ? ": " : "", hub->members[0].why);
    else if (!hub->formed && dtrain__os_now_ns() >= deadline_ns)
        status = dtrain__socket_unformed(hub, (double)(dtrain__os_now_ns() - started_ns) * 1e-9);
    pthread_mutex_unlock(&hub->mutex);
    return status;
}

/* Ranks r with equal r / n share a host, for the n returned; 0 where hosts are not that regular. */
static int dtrain__socket_node_ranks(dtrain__channel *channel)
{
    const dtrain__member *members = channel->hub->members;
    const dtrain__peer *peers = channel->peers;
    int n = 1;
    while (n < channel->size && members[peers[n].world].host == members[peers[0].world].host)
        n++;
    for (int rank = 0; rank < channel->size; rank++)
        if (members[peers[rank].world].host != members[peers[rank - rank % n].world].host ||
            (rank >= n && rank % n == 0 && members[peers[rank].world].host == members[peers[rank - 1].world].host))
            return 0;
    return n;
}

static void dtrain__socket_transport(dtrain_transport *transport, dtrain__channel *channel)
{
    memset(transport, 0, sizeof *transport);
    transport->self = channel;
    transport->rank = channel->rank;
    transport->size = channel->size;
    transport->send = dtrain__socket_send;
    transport->recv = dtrain__socket_recv;
    transport->exchange = dtrain__socket_exchange;
    transport->poll = dtrain__socket_poll;
    transport->wake = dtrain__socket_wake;
    transport->fail = dtrain__socket_fail;
    transport->leave = dtrain__socket_leave;
    transport->destroy = dtrain__socket_destroy;
}

#endif

/* ---- >>op ----
 * One operation on one rank: what was called, how far it is, how it ended; and the end of a group that
 * runs it. Calls are described by the same words on the board and in message headers, so that a rank can
 * quote what another one called. Checks of arguments and all texts about calls are here. */
#ifndef DTRAIN__OP
#define DTRAIN__OP

#define DTRAIN__MAX_RANKS 1024
#define DTRAIN__MESSAGE_SMALL ((size_t)4096) /* payload that travels in one piece with its header */

typedef enum dtrain__kind {
    DTRAIN__ALL_REDUCE = 1,
    DTRAIN__REDUCE_SCATTER,
    DTRAIN__ALL_GATHER,
    DTRAIN__BROADCAST,
    DTRAIN__REDUCE,
    DTRAIN__GATHER,
    DTRAIN__SCATTER,
    DTRAIN__ALL_TO_ALL,
    DTRAIN__BARRIER,
    DTRAIN__SEND,
    DTRAIN__RECV,
    DTRAIN__EXCHANGE,
    DTRAIN__KINDS
} dtrain__kind;

#define DTRAIN__WEIGHTED 1u
#define DTRAIN__WAY_ANY ((uint64_t)1 << 16) /* in a call's algorithm: in any order */
#define DTRAIN__WAY_NODE 32                 /* from this bit on: the ranks of a node */

/* What two ranks must agree on, in 64-bit words; the first DTRAIN__POST_WORDS of a message header. */
typedef struct dtrain__call {
    uint64_t kind; /* a message is a DTRAIN__SEND on both sides */
    uint64_t number;
    uint64_t dtype;
    uint64_t op;
    uint64_t count;
    uint64_t root;
    uint64_t algorithm; /* and what else its steps depend on: see dtrain__op_way */
    uint64_t ranks;
    uint64_t parts; /* a hash of per-rank counts and offsets, or the elements of a row; 0: parts as dtrain_shard says */
    uint64_t group;
    uint64_t form;   /* 0: one call; DTRAIN__WEIGHTED; else the number of calls that were fused */
    uint64_t first;  /* the count of the first of these */
    uint64_t digest; /* of the counts of all of them; the dtype of a weighted mean */
} dtrain__call;

typedef struct dtrain__message_header {
    uint64_t magic;
    dtrain__call call;
    uint64_t tag;
    uint64_t bytes;
    uint64_t data_check; /* of what follows; 0: not checked */
    uint64_t check;      /* of everything above */
} dtrain__message_header;

/* Where a rank's part of a vector is, in elements. */
typedef struct dtrain__extent {
    size_t begin, count;
} dtrain__extent;

/* The buffers of one of several fused calls. */
typedef struct dtrain__segment {
    const void *in;
    void *out;
    size_t count;
} dtrain__segment;

typedef struct dtrain__op {
    dtrain__kind kind;
    dtrain_dtype dtype;
    dtrain_op op;
    int root; /* or the peer: of a send, of a recv, of an exchange's message out; -1: none */
    int from; /* of an exchange's message in; -1: none */
    size_t count;
    size_t in_count;                                           /* of an exchange's message in */
    size_t row;                                                /* parts are cut between rows of so many elements */
    const size_t *counts, *offsets, *out_counts, *out_offsets; /* the caller's, a rank; out: an all-to-all's */
    const void *in;
    void *out;
    int scattered; /* in is an array of dtrain__segment, which count elements in all */
    dtrain_algorithm algorithm;
    uint64_t number, in_number;
    uint64_t check, check_due;       /* of the data that come in: so far, and what their header says; 0: not checked */
    uint64_t turn;                   /* among the operations that went over the board */
    int64_t started_ns, deadline_ns; /* of the call */
    int64_t run_ns, moved_ns;        /* its turn came; its first byte moved; 0: not yet */
    int64_t ended_ns;
    uint64_t serial;                 /* of its record; 0: none yet */
    int async, queued;               /* has a handle of the caller's; waited for its turn */
    uint64_t form, first, digest;    /* as in the call */
    unsigned char *letter;           /* header and small payload of a queued message; NULL: the group's are used */
    uint32_t cancelled;              /* set by any thread, seen by the one that drives */
    int phase;
    int warned;              /* the log has said whom this operation awaits */
    int awaited;             /* the peer it awaits, or -1 */
    int touched;             /* peers may be inside this rank's buffers, or bytes have moved */
    size_t at;               /* progress inside the phase */
    size_t entered, send_at; /* steps that have been prepared; the step whose message goes out */
    size_t sent, received;   /* bytes of it that have moved, headers included; SIZE_MAX: all */
    dtrain__error error;
} dtrain__op;

#define DTRAIN__MESSAGE_BYTES (sizeof(dtrain__message_header) + DTRAIN__MESSAGE_SMALL)

struct dtrain_work {
    dtrain_comm *comm;
    dtrain_work *next;
    dtrain_work *older; /* of all handles that the group has made */
    uint32_t done;
    int ended; /* done once it is the queue's head */
    dtrain__op op;
    unsigned char letter[DTRAIN__MESSAGE_BYTES];
};

/* Calls between fuse_begin and fuse_end. */
typedef struct dtrain__note {
    dtrain_work *work;
    dtrain__op op;
} dtrain__note;

typedef struct dtrain__service dtrain__service;
typedef struct dtrain__recorder dtrain__recorder;

struct dtrain_comm {
    int rank, size;
    dtrain_transport transport;
    dtrain__channel *socket; /* of a group of processes; NULL: another transport */
    int forming;             /* such a group is not complete yet */
    int checks;              /* messages carry a checksum of their data */
    int node_ranks;          /* ranks r with equal r / node_ranks share a host; 0: not so regular */
    int64_t started_ns, form_deadline_ns;
    int64_t poll_until_ns; /* the end of the budget that dtrain_comm_poll was given */
    pid_t process;         /* that made it */
    dtrain_comm_desc desc;
    dtrain_allocator *allocator, own;
    dtrain__bell *bell, own_bell;
    dtrain__error error;
    dtrain__error broken;      /* by a message operation; the board keeps its own */
    dtrain__error abort_cause; /* on a transport of the user's own; readable once aborted is 2 */
    uint32_t aborted;
    uint64_t number; /* of the last collective */
    uint64_t turn;   /* of the last one over the board */
    dtrain__recorder *recorder;
    uint64_t *sent, *received; /* numbers of the last messages to and from each rank */
    const void **ins;          /* size pointers each, for folds */
    void **outs;
    uint64_t group;                        /* names it among the groups of these ranks; 0: the first */
    dtrain__extent *parts, *others;        /* of the operation under way; others: of what an all-to-all receives */
    dtrain_algorithm asked[DTRAIN__KINDS]; /* by desc or environment, for each kind */
    unsigned char message_out[DTRAIN__MESSAGE_BYTES], message_in[DTRAIN__MESSAGE_BYTES]; /* header and small payload */
    unsigned char *scratch;
    size_t scratch_bytes;
    int64_t blocked_ns;
    int64_t waited_ns[2]; /* when the operation waited for last had its turn, and ended */
    pthread_mutex_t queue_mutex; /* head, tail, spare; held for a few instructions */
    pthread_mutex_t drive_mutex; /* held by the thread that advances queued work */
    dtrain_work *head, *tail, *spare, *newest;
    uint32_t pending;       /* queued and not done */
    uint64_t *lanes, sweep; /* the last sweep that met a message under way to and from each rank, and its number */
    int fusing;             /* between fuse_begin and fuse_end */
    dtrain__note *notes;
    size_t noted, notes_capacity;
    unsigned char *packed; /* buffers of fused calls, one after another */
    size_t packed_bytes;
    dtrain__service *service;
    dtrain_comm *next_served; /* by the same service */
    uint64_t consents;        /* that this end has taken part in */
};

static size_t dtrain__op_bytes(const dtrain__op *op)
{
    return op->count * (dtrain_dtype_bits(op->dtype) / 8);
}

/* One message in one direction; of these, several may be under way at once. */
static int dtrain__op_is_letter(const dtrain__op *op)
{
    return op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV;
}

static int dtrain__op_reduces(const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE_SCATTER || op->kind == DTRAIN__REDUCE;
}

static int dtrain__op_is_message(const dtrain__op *op)
{
    return op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV || op->kind == DTRAIN__EXCHANGE;
}

static const char *dtrain__kind_name(uint64_t kind)
{
    static const char *const names[] = {"no call", "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "reduce",  "gather",     "scatter",        "all_to_all", "barrier",
                                        "send",    "recv",       "exchange"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : "an unknown call";
}

static const char *dtrain__op_name(uint64_t op)
{
    static const char *const names[] = {"sum", "mean", "product", "min", "max", "and", "or", "xor"};
    return op - DTRAIN_SUM < sizeof names / sizeof names[0] ? names[op - DTRAIN_SUM] : "no operation";
}

static const char *dtrain__algorithm_name(uint64_t algorithm)
{
    static const char *const names[] = {
        "fused", "recursive_doubling", "tree", "ring", "halving_doubling", "direct", "bruck", "nodes", "double_tree"};
    algorithm %= DTRAIN__WAY_ANY;
    size_t index = (size_t)(algorithm - DTRAIN_ALGORITHM_FUSED);
    return algorithm == DTRAIN_ALGORITHM_AUTO       ? "auto"
           : index < sizeof names / sizeof names[0] ? names[index]
                                                    : "no algorithm";
}

/* A hash of what a rank was told of the parts; never 0 where it was told anything.
 * Source: FNV-1a, RFC 9923. */
static uint64_t dtrain__op_parts_hash(const dtrain_comm *comm, const dtrain__op *op)
{
    uint64_t hash = 0xcbf29ce484222325u;
    if (op->kind == DTRAIN__ALL_TO_ALL || op->counts == NULL)
        return op->row > 1 ? op->row : op->counts != NULL;
    for (int rank = 0; rank < comm->size; rank++) {
        hash = (hash ^ op->counts[rank]) * 0x100000001b3u;
        hash = (hash ^ (op->offsets != NULL ? op->offsets[rank] : 0)) * 0x100000001b3u;
    }
    return hash | (uint64_t)1 << 63;
}

/* Which steps an operation takes, beside its arguments. */
static uint64_t dtrain__op_way(const dtrain_comm *comm, const dtrain__op *op)
{
    uint64_t way = (uint64_t)op->algorithm;
    if (op->algorithm == DTRAIN_ALGORITHM_NODES)
        way |= (uint64_t)comm->node_ranks << DTRAIN__WAY_NODE;
    return dtrain__op_reduces(op) && comm->desc.order == DTRAIN_ORDER_ANY ? way | DTRAIN__WAY_ANY : way;
}

/* What the peer of one direction must have called as well; only an exchange has two. */
static dtrain__call dtrain__op_call(const dtrain_comm *comm, const dtrain__op *op, int receiving)
{
    dtrain__call call;
    int message = dtrain__op_is_message(op), other = receiving && op->kind == DTRAIN__EXCHANGE;
    call.kind = message ? (uint64_t)DTRAIN__SEND : (uint64_t)op->kind;
    call.number = other ? op->in_number : op->number;
    call.dtype = (uint64_t)op->dtype;
    call.op = (uint64_t)op->op;
    call.count = other ? op->in_count : op->count;
    if (op->kind == DTRAIN__ALL_TO_ALL && op->counts != NULL)
        call.count = 0; /* every rank has a count of its own */
    call.root = message ? 0 : (uint64_t)op->root;
    call.algorithm = message ? 0 : dtrain__op_way(comm, op);
    call.ranks = (uint64_t)comm->size;
    call.parts = message ? 0 : dtrain__op_parts_hash(comm, op);
    call.group = comm->group;
    call.form = op->form;
    call.first = op->first;
    call.digest = op->digest;
    return call;
}

typedef struct dtrain__text {
    char text[160];
} dtrain__text;

/* "all_reduce #412 (sum, f32 x 1048576)"; of fused calls the first, and how many they are. */
static dtrain__text dtrain__call_text(const dtrain__call *call)
{
    dtrain__text out;
    int weighted = call->form == DTRAIN__WEIGHTED;
    uint64_t type = weighted ? call->digest : call->dtype, count = call->form != 0 ? call->first : call->count;
    const char *name = dtrain_dtype_name(type < 64 ? (dtrain_dtype)type : (dtrain_dtype)0);
    char dtype[16], detail[32] = "", root[32] = "", fused[32] = "", elements[24] = "";
    size_t n = 0;
    int reduces =
        call->kind == DTRAIN__ALL_REDUCE || call->kind == DTRAIN__REDUCE_SCATTER || call->kind == DTRAIN__REDUCE;
    for (; name[n] != 0 && n < sizeof dtype - 1; n++)
        dtype[n] = (char)(name[n] >= 'A' && name[n] <= 'Z' ? name[n] + ('a' - 'A') : name[n]);
    dtype[n] = 0;
    if (reduces)
        snprintf(detail, sizeof detail, "%s, ", weighted ? "weighted mean" : dtrain__op_name(call->op));
    if (call->kind >= DTRAIN__BROADCAST && call->kind <= DTRAIN__SCATTER)
        snprintf(root, sizeof root, ", root %llu", (unsigned long long)call->root);
    if (call->form > DTRAIN__WEIGHTED)
        snprintf(fused, sizeof fused, ", %llu fused", (unsigned long long)call->form);
    if (call->parts != 1 || count > 0) /* of an uneven all-to-all every rank has a count of its own */
        snprintf(elements, sizeof elements, " x %llu", (unsigned long long)count);
    if (call->kind == DTRAIN__BARRIER)
        snprintf(out.text, sizeof out.text, "barrier #%llu", (unsigned long long)call->number);
    else
        snprintf(out.text, sizeof out.text, "%s%s #%llu (%s%s%s%s%s%s)", dtrain__kind_name(call->kind),
                 call->parts == 1 || call->parts >> 63 != 0 ? "_v" : "", (unsigned long long)call->number, detail,
                 dtype, elements, root,
                 call->algorithm % DTRAIN__WAY_ANY == DTRAIN_ALGORITHM_RING && reduces ? ", ring" : "", fused);
    return out;
}

static dtrain__text dtrain__op_text(const dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__call call = dtrain__op_call(comm, op, 0);
    call.kind = (uint64_t)op->kind;
    call.count = op->kind == DTRAIN__EXCHANGE && op->root < 0 ? op->in_count : op->count;
    return dtrain__call_text(&call);
}

/* "nodes of 4 ranks", "tree in any order" */
static dtrain__text dtrain__way_text(uint64_t way)
{
    dtrain__text out;
    char node[40] = "";
    if (way >> DTRAIN__WAY_NODE != 0)
        snprintf(node, sizeof node, " of %u ranks", (unsigned)(way >> DTRAIN__WAY_NODE));
    snprintf(out.text, sizeof out.text, "%s%s%s", dtrain__algorithm_name(way), node,
             (way & DTRAIN__WAY_ANY) != 0 ? " in any order" : "");
    return out;
}

/* What another rank called does not fit; says what it was, or, where the calls look the same, what differs. */
static dtrain_status dtrain__op_mismatch(const dtrain_comm *comm, dtrain__op *op, int peer, const dtrain__call *theirs)
{
    dtrain__text mine = dtrain__op_text(comm, op), other = dtrain__call_text(theirs);
    dtrain__call call = dtrain__op_call(comm, op, 0);
    int alike = theirs->kind == call.kind && theirs->number == call.number && theirs->dtype == call.dtype &&
                theirs->op == call.op && theirs->count == call.count && theirs->root == call.root;
    if (theirs->ranks != (uint64_t)comm->size)
        return dtrain__fail(
            &op->error, DTRAIN_ERR_MISMATCH,
            "%s: rank %d is in a group of %llu ranks, this rank %d in one of %d; give both the same size", mine.text,
            peer, (unsigned long long)theirs->ranks, comm->rank, comm->size);
    if (theirs->group != comm->group)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s in group %llx, this rank %d %s in group %llx", mine.text, peer,
                            other.text, (unsigned long long)theirs->group, comm->rank, mine.text,
                            (unsigned long long)comm->group);
    if (alike && theirs->parts != call.parts)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s with other per-rank counts or offsets than this rank %d; give every "
                            "rank the same arrays",
                            mine.text, peer, other.text, comm->rank);
    if (alike && theirs->algorithm != call.algorithm)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s by %s, this rank %d by %s; give every rank the same desc.algorithm, "
                            "order, node_ranks and DTRAIN_ALGORITHM",
                            mine.text, peer, other.text, dtrain__way_text(theirs->algorithm).text, comm->rank,
                            dtrain__way_text(call.algorithm).text);
    return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                        "%s: rank %d called %s, this rank %d %s; both must make the same calls in the same order",
                        mine.text, peer, other.text, comm->rank, mine.text);
}

/* Both called the same, but the sender gives another number of bytes than the receiver awaits. */
static dtrain_status dtrain__op_uneven(const dtrain_comm *comm, dtrain__op *op, int from, int to, size_t gives,
                                       size_t awaits)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8;
    return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                        "%s on rank %d: rank %d gives %zu elements to rank %d, which awaits %zu; the counts of the two "
                        "must fit",
                        dtrain__op_text(comm, op).text, comm->rank, from, gives / width, to, awaits / width);
}

/* The operation ends because of something that broke the group; quotes the first cause. */
static dtrain_status dtrain__op_blame(const dtrain_comm *comm, dtrain__op *op, const dtrain__error *cause)
{
    dtrain__text mine = dtrain__op_text(comm, op);
    dtrain__error first = *cause;
    return dtrain__fail(&op->error, first.status, "%s on rank %d: %.480s", mine.text, comm->rank, first.text);
}

/* Why the group was aborted; NULL: it was not. */
static const dtrain__error *dtrain__comm_aborted(dtrain_comm *comm)
{
    const dtrain__error *cause = NULL;
    if (comm->transport.board != NULL)
        cause = dtrain__board_broken(comm->transport.board) ? dtrain__board_cause(comm->transport.board) : NULL;
    else if (comm->socket != NULL)
        cause = __atomic_load_n(&comm->socket->broken, __ATOMIC_SEQ_CST) ? &comm->socket->cause : NULL;
    else
        cause = __atomic_load_n(&comm->aborted, __ATOMIC_SEQ_CST) == 2 ? &comm->abort_cause : NULL;
    return cause != NULL && cause->status == DTRAIN_ERR_ABORTED ? cause : NULL;
}

/* Breaks the group on purpose, for all its ranks; any thread. The first cause stays. */
static void dtrain__comm_break(dtrain_comm *comm, const dtrain__error *cause)
{
    uint32_t whole = 0;
    if (comm->transport.board != NULL) {
        dtrain__board_break(comm->transport.board, cause);
        return;
    }
    if (__atomic_compare_exchange_n(&comm->aborted, &whole, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        comm->abort_cause = *cause;
        __atomic_store_n(&comm->aborted, 2, __ATOMIC_SEQ_CST);
    }
    if (comm->transport.fail != NULL)
        comm->transport.fail(comm->transport.self, cause->status, cause->text);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    dtrain__bell_ring(comm->bell);
}

/* Scratch memory for an operation, kept for the next ones. */
static int dtrain__comm_reserve(dtrain_comm *comm, dtrain__op *op, size_t bytes)
{
    unsigned char *scratch;
    if (comm->scratch_bytes >= bytes)
        return 1;
    scratch = (unsigned char *)dtrain__alloc(comm->allocator, bytes);
    if (scratch == NULL) {
        dtrain__fail(&op->error, DTRAIN_ERR_MEMORY,
                     "%s on rank %d: no memory for %zu bytes beside the caller's buffers",
                     dtrain__op_text(comm, op).text, comm->rank, bytes);
        return 0;
    }
    dtrain__free(comm->allocator, comm->scratch, comm->scratch_bytes);
    comm->scratch = scratch;
    comm->scratch_bytes = bytes;
    return 1;
}

/* Where every rank's part is: as given, else counted from the start, rows whole. */
static void dtrain__op_extents(const dtrain_comm *comm, const dtrain__op *op, const size_t *counts,
                               const size_t *offsets, dtrain__extent *parts)
{
    size_t row = op->row > 0 ? op->row : 1, next = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        dtrain__extent *part = &parts[rank];
        if (counts == NULL) {
            part->count = dtrain_split(op->count / row, comm->size, rank, &part->begin) * row;
            part->begin *= row;
        } else {
            part->count = counts[rank];
            part->begin = offsets != NULL ? offsets[rank] : next;
            next += counts[rank];
        }
    }
}

/* Lays out the operation that starts now. */
static void dtrain__op_layout(dtrain_comm *comm, const dtrain__op *op)
{
    size_t mine;
    int whole = op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE;
    if (op->kind > DTRAIN__ALL_TO_ALL || op->kind == DTRAIN__BROADCAST ||
        (whole && op->algorithm != DTRAIN_ALGORITHM_RING && op->algorithm != DTRAIN_ALGORITHM_DIRECT))
        return; /* it has no parts */
    dtrain__op_extents(comm, op, op->counts, op->offsets, comm->parts);
    if (op->kind != DTRAIN__ALL_TO_ALL)
        return;
    mine = comm->parts[comm->rank].count;
    if (op->counts != NULL)
        dtrain__op_extents(comm, op, op->out_counts, op->out_offsets, comm->others);
    else
        for (int rank = 0; rank < comm->size; rank++) {
            comm->others[rank].begin = (size_t)rank * mine;
            comm->others[rank].count = mine;
        }
}

static dtrain_status dtrain__op_too_large(dtrain_comm *comm, const dtrain__op *op, size_t count)
{
    return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: %zu elements of %u bits overflow a size",
                        dtrain__kind_name((uint64_t)op->kind), comm->rank, count, dtrain_dtype_bits(op->dtype));
}

/* Bytes from a vector's start to the end of its last part, in *bytes. */
static dtrain_status dtrain__op_reach(dtrain_comm *comm, const dtrain__op *op, const size_t *counts,
                                      const size_t *offsets, size_t *bytes)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8, most = SIZE_MAX / 4 / width, next = 0;
    *bytes = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        size_t begin = offsets != NULL ? offsets[rank] : next;
        if (counts[rank] > most || begin > most - counts[rank])
            return dtrain__op_too_large(comm, op, counts[rank]);
        next = begin + counts[rank];
        if (counts[rank] > 0 && next * width > *bytes)
            *bytes = next * width;
    }
    return DTRAIN_OK;
}

/* Bytes of the operation's vectors: *in and *out as this rank's buffers have them, and how far into the longer one
 * the shorter begins when they are one. */
static dtrain_status dtrain__op_sizes(dtrain_comm *comm, const dtrain__op *op, size_t *in, size_t *out, size_t *offset)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8, whole = op->count * width, begin = 0, part, row;
    dtrain_status status = DTRAIN_OK;
    int root = comm->rank == op->root;
    *offset = 0;
    *in = *out = whole;
    if (op->kind == DTRAIN__ALL_TO_ALL && op->counts != NULL) {
        status = dtrain__op_reach(comm, op, op->counts, op->offsets, in);
        return status == DTRAIN_OK ? dtrain__op_reach(comm, op, op->out_counts, op->out_offsets, out) : status;
    }
    if (op->counts != NULL) {
        status = dtrain__op_reach(comm, op, op->counts, op->offsets, &whole);
        part = op->counts[comm->rank];
        for (int rank = 0; op->offsets == NULL && rank < comm->rank; rank++)
            begin += op->counts[rank];
        begin = op->offsets != NULL ? op->offsets[comm->rank] : begin;
    } else {
        row = op->row > 0 ? op->row : 1;
        part = dtrain_split(op->count / row, comm->size, comm->rank, &begin) * row;
        begin *= row;
    }
    switch (op->kind) {
    case DTRAIN__REDUCE_SCATTER: *in = whole, *out = part * width, *offset = begin * width; break;
    case DTRAIN__ALL_GATHER: *in = part * width, *out = whole, *offset = begin * width; break;
    case DTRAIN__GATHER: *in = part * width, *out = root ? whole : 0, *offset = begin * width; break;
    case DTRAIN__SCATTER: *in = root ? whole : 0, *out = part * width, *offset = begin * width; break;
    case DTRAIN__REDUCE: *out = root ? whole : 0; break;
    case DTRAIN__ALL_TO_ALL: *out = (size_t)comm->size * part * width; break;
    case DTRAIN__SEND: *out = 0; break;
    case DTRAIN__RECV: *in = 0; break;
    case DTRAIN__EXCHANGE: *in = op->root >= 0 ? whole : 0, *out = op->from >= 0 ? op->in_count * width : 0; break;
    default: break;
    }
    return status;
}

/* Buffers are one, with the shorter at its place in the longer, or apart. */
static dtrain_status dtrain__op_check_buffers(dtrain_comm *comm, const dtrain__op *op)
{
    uintptr_t in = (uintptr_t)op->in, out = (uintptr_t)op->out;
    size_t in_bytes, out_bytes, offset;
    dtrain_status status = dtrain__op_sizes(comm, op, &in_bytes, &out_bytes, &offset);
    if (status != DTRAIN_OK)
        return status;
    if ((in_bytes > 0 && op->in == NULL) || (out_bytes > 0 && op->out == NULL))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s of %zu elements on rank %d: %s is NULL",
                            dtrain__kind_name((uint64_t)op->kind), op->count, comm->rank,
                            op->in == NULL && in_bytes > 0 ? "in" : "out");
    int in_place = in_bytes >= out_bytes ? out == in + offset : in == out + offset;
    if (op->kind == DTRAIN__EXCHANGE)
        in_place = 0;
    else if (op->kind == DTRAIN__ALL_TO_ALL && in_place && in_bytes > 0)
        in_place = in_bytes == out_bytes &&
                   (op->counts == NULL || (op->counts == op->out_counts && op->offsets == op->out_offsets));
    if (in_bytes > 0 && out_bytes > 0 && !in_place && in < out + out_bytes && out < in + in_bytes)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s of %zu elements on rank %d: in and out overlap; give the same buffer, with this "
                            "rank's part at its offset, or two that are apart",
                            dtrain__kind_name((uint64_t)op->kind), op->count, comm->rank);
    return DTRAIN_OK;
}

static dtrain_status dtrain__op_check_peer(dtrain_comm *comm, const dtrain__op *op, int peer)
{
    const char *kind = dtrain__kind_name((uint64_t)op->kind);
    if (peer == -1 && op->kind == DTRAIN__EXCHANGE)
        return DTRAIN_OK;
    if (peer < 0 || peer >= comm->size)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: rank %d is not among the %d ranks", kind,
                            comm->rank, peer, comm->size);
    if (dtrain__op_is_message(op) && peer == comm->rank)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: the peer is this rank itself", kind,
                            comm->rank);
    return DTRAIN_OK;
}

/* Checks a call's arguments before anything of it is seen by a peer. */
static dtrain_status dtrain__op_check(dtrain_comm *comm, const dtrain__op *op)
{
    unsigned bits = dtrain_dtype_bits(op->dtype);
    dtrain_status status;
    if (bits == 0 || bits % 8 != 0 || (dtrain__op_reduces(op) && !dtrain__fold_supported(op->dtype, op->op)))
        return dtrain__fail(
            &comm->error, DTRAIN_ERR_INVALID,
            "%s on rank %d: dtype %d (%s) with operation %d (%s) is not supported; are the two swapped?",
            dtrain__kind_name((uint64_t)op->kind), comm->rank, (int)op->dtype, dtrain_dtype_name(op->dtype),
            (int)op->op, dtrain__op_name((uint64_t)op->op));
    if (op->count > SIZE_MAX / 4 / (bits / 8) / (op->kind == DTRAIN__ALL_TO_ALL ? (size_t)comm->size : 1))
        return dtrain__op_too_large(comm, op, op->count);
    if (op->in_count > SIZE_MAX / 4 / (bits / 8))
        return dtrain__op_too_large(comm, op, op->in_count);
    status = dtrain__op_check_peer(comm, op, op->root);
    if (status == DTRAIN_OK && op->kind == DTRAIN__EXCHANGE)
        status = dtrain__op_check_peer(comm, op, op->from);
    return status == DTRAIN_OK ? dtrain__op_check_buffers(comm, op) : status;
}

#endif

/* ---- >>recorder ----
 * The last operations of one rank's end of a group, and what is said of a rank that others wait for. The thread that
 * runs an operation records it, one at a time; any thread reads, peers on the same board included, without a lock: a
 * record is whole when its version is the same before and after it was copied. Source: Boehm, "Can seqlocks get along
 * with programming language memory models?", MSPC 2012. The recorder of a rank on a board belongs to the board, so
 * that peers may read it after the rank has left. Nothing here allocates but the recorder itself. */
#ifndef DTRAIN__RECORDER
#define DTRAIN__RECORDER

#define DTRAIN__RECORDS 256
#define DTRAIN__TRACE_PATH_BYTES 1024
#define DTRAIN__TRACE_TEXT_BYTES 4096

/* One operation, in 64-bit words. */
typedef struct dtrain__record {
    dtrain__call call; /* its kind is the one called, its root the peer of a message */
    uint64_t awaited;  /* the last peer that it waited for, + 1 */
    uint64_t status;
    uint64_t async;
    uint64_t called_ns, started_ns, moved_ns, ended_ns; /* 0: not yet */
} dtrain__record;

#define DTRAIN__RECORD_WORDS (sizeof(dtrain__record) / sizeof(uint64_t))

typedef struct dtrain__record_place {
    uint64_t version; /* of record s: 4 s + 2 under way, 4 s + 4 ended, one less while it is written */
    uint64_t words[DTRAIN__RECORD_WORDS];
} dtrain__record_place;

struct dtrain__recorder {
    uint64_t begun;                    /* records so far; record s is at s % DTRAIN__RECORDS, the first is 1 */
    uint32_t awaited;                  /* by the operation under way, + 1 */
    int64_t monotonic_ns, realtime_ns; /* one moment on both clocks */
    pthread_mutex_t error_mutex;       /* guards error and failed; held for a few instructions */
    dtrain__error error;               /* of the first of the last failures in a row */
    uint64_t failed;                   /* its record; 0: none */
    uint64_t good;                     /* the last record that ended well; of whoever records */
    pthread_mutex_t mutex;             /* held while a file is written; guards what follows */
    dtrain__error shown;               /* error and failed, as the file has them */
    uint64_t shown_failed;
    int written; /* the file of trace_on_failure, or its writing was tried */
    char prefix[DTRAIN__TRACE_PATH_BYTES], path[DTRAIN__TRACE_PATH_BYTES + 64], beside[DTRAIN__TRACE_PATH_BYTES + 128];
    unsigned char text[DTRAIN__TRACE_TEXT_BYTES];
    dtrain__record_place places[DTRAIN__RECORDS];
};

/* What a rank does, as others are told; words, as a heartbeat carries them. */
typedef struct dtrain__last {
    dtrain__call call;
    uint64_t state; /* a DTRAIN__LAST constant */
    uint64_t awaited;
    uint64_t moved;    /* bytes of it have moved */
    uint64_t status;   /* it ended with */
    uint64_t since_ms; /* it started, or ended */
} dtrain__last;

enum { DTRAIN__LAST_NONE = 0, DTRAIN__LAST_UNDER_WAY, DTRAIN__LAST_ENDED };

static int dtrain__recorder_create(dtrain_comm *comm)
{
    struct timespec now;
    dtrain__recorder *recorder = (dtrain__recorder *)dtrain__alloc(comm->allocator, sizeof *recorder);
    if (recorder == NULL)
        return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    recorder->monotonic_ns = dtrain__os_now_ns();
    recorder->realtime_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    pthread_mutex_init(&recorder->error_mutex, NULL);
    pthread_mutex_init(&recorder->mutex, NULL);
    comm->recorder = recorder;
    if (comm->transport.board != NULL) {
        comm->transport.board->slots[comm->rank].recorder_bytes = sizeof *recorder;
        __atomic_store_n(&comm->transport.board->slots[comm->rank].recorder, (void *)recorder, __ATOMIC_RELEASE);
    }
    return 1;
}

static void dtrain__recorder_free(dtrain_comm *comm)
{
    if (comm->recorder == NULL)
        return;
    pthread_mutex_destroy(&comm->recorder->error_mutex);
    pthread_mutex_destroy(&comm->recorder->mutex);
    if (comm->transport.board == NULL)
        dtrain__free(comm->allocator, comm->recorder, sizeof *comm->recorder);
}

static void dtrain__record_write(dtrain__recorder *recorder, uint64_t serial, const dtrain__record *record)
{
    dtrain__record_place *place = &recorder->places[serial % DTRAIN__RECORDS];
    uint64_t words[DTRAIN__RECORD_WORDS], version = 4 * serial + (record->ended_ns != 0 ? 4 : 2);
    memcpy(words, record, sizeof words);
    __atomic_store_n(&place->version, version - 1, __ATOMIC_RELAXED);
    for (size_t i = 0; i < DTRAIN__RECORD_WORDS; i++)
        __atomic_store_n(&place->words[i], words[i], __ATOMIC_RELEASE);
    __atomic_store_n(&place->version, version, __ATOMIC_RELEASE);
}

/* Copies record `serial`; 0 when it is no more, or its writer was stopped in the middle. */
static int dtrain__record_read(dtrain__recorder *recorder, uint64_t serial, dtrain__record *out)
{
    dtrain__record_place *place = &recorder->places[serial % DTRAIN__RECORDS];
    uint64_t words[DTRAIN__RECORD_WORDS];
    for (int turn = 0; turn < 1000; turn++) {
        uint64_t version = __atomic_load_n(&place->version, __ATOMIC_ACQUIRE);
        if (version > 4 * serial + 4)
            return 0;
        for (size_t i = 0; i < DTRAIN__RECORD_WORDS; i++)
            words[i] = __atomic_load_n(&place->words[i], __ATOMIC_ACQUIRE);
        if (version > 4 * serial && version % 2 == 0 && __atomic_load_n(&place->version, __ATOMIC_RELAXED) == version) {
            memcpy(out, words, sizeof words);
            return 1;
        }
        sched_yield();
    }
    return 0;
}

static int dtrain__call_is_message(const dtrain__call *call)
{
    return call->kind == DTRAIN__SEND || call->kind == DTRAIN__RECV || call->kind == DTRAIN__EXCHANGE;
}

/* The call as it was made, for people: messages keep their direction and peer. */
static dtrain__call dtrain__recorder_call(const dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__call call = dtrain__op_call(comm, op, 0);
    call.kind = (uint64_t)op->kind;
    call.root = (uint64_t)op->root;
    return call;
}

static void dtrain__recorder_note(dtrain_comm *comm, dtrain__op *op, int64_t ended_ns)
{
    dtrain__recorder *recorder = comm->recorder;
    uint32_t awaited = op->awaited >= 0 ? (uint32_t)(op->awaited + 1) : 0;
    dtrain__record record;
    if (op->serial == 0) {
        op->serial = recorder->begun + 1;
        __atomic_store_n(&recorder->begun, op->serial, __ATOMIC_RELEASE);
    }
    if (recorder->begun - op->serial >= DTRAIN__RECORDS)
        return; /* a message that others overtook: its place is theirs */
    record.call = dtrain__recorder_call(comm, op);
    record.awaited = awaited > 0 ? awaited : __atomic_load_n(&recorder->awaited, __ATOMIC_RELAXED);
    record.status = (uint64_t)op->error.status;
    record.async = (uint64_t)op->async;
    record.called_ns = (uint64_t)op->started_ns;
    record.started_ns = (uint64_t)op->run_ns;
    record.moved_ns = (uint64_t)op->moved_ns;
    record.ended_ns = (uint64_t)ended_ns;
    dtrain__record_write(recorder, op->serial, &record);
}

/* The operation has its number and may have to wait. */
static void dtrain__recorder_start(dtrain_comm *comm, dtrain__op *op)
{
    if (op->serial != 0)
        return;
    op->run_ns = op->queued ? dtrain__os_now_ns() : op->started_ns;
    __atomic_store_n(&comm->recorder->awaited, 0, __ATOMIC_RELAXED);
    dtrain__recorder_note(comm, op, 0);
}

/* The first bytes of the operation move. Of messages peers are told so at once: see dtrain__recorder_contradicts. */
static void dtrain__recorder_moved(dtrain_comm *comm, dtrain__op *op)
{
    if (op->moved_ns != 0)
        return;
    op->moved_ns = dtrain__os_now_ns();
    if (op->serial == 0)
        dtrain__recorder_start(comm, op);
    else if (op->algorithm != DTRAIN_ALGORITHM_FUSED)
        dtrain__recorder_note(comm, op, 0);
}

static void dtrain__recorder_end(dtrain_comm *comm, dtrain__op *op, int64_t now)
{
    dtrain__recorder *recorder = comm->recorder;
    if (op->run_ns == 0)
        op->run_ns = op->queued ? now : op->started_ns;
    dtrain__recorder_note(comm, op, now);
    __atomic_store_n(&recorder->awaited, 0, __ATOMIC_RELAXED);
    if (op->error.status == DTRAIN_OK) {
        recorder->good = op->serial;
        return;
    }
    pthread_mutex_lock(&recorder->error_mutex);
    if (recorder->failed <= recorder->good) {
        recorder->failed = op->serial;
        recorder->error = op->error;
    }
    pthread_mutex_unlock(&recorder->error_mutex);
}

/* What the rank of this recorder does now; 0 when it cannot be read. */
static int dtrain__recorder_last(dtrain__recorder *recorder, dtrain__last *out)
{
    dtrain__record record;
    uint64_t serial = __atomic_load_n(&recorder->begun, __ATOMIC_ACQUIRE);
    memset(out, 0, sizeof *out);
    if (serial == 0)
        return 1;
    if (!dtrain__record_read(recorder, serial, &record))
        return 0;
    out->call = record.call;
    out->state = record.ended_ns != 0 ? DTRAIN__LAST_ENDED : DTRAIN__LAST_UNDER_WAY;
    out->awaited = record.ended_ns == 0 ? __atomic_load_n(&recorder->awaited, __ATOMIC_RELAXED) : record.awaited;
    out->moved = record.moved_ns != 0;
    out->status = record.status;
    out->since_ms = record.ended_ns != 0 ? record.ended_ns : record.started_ns;
    out->since_ms = ((uint64_t)dtrain__os_now_ns() - out->since_ms) / 1000000;
    return 1;
}

/* The rank that a rank waits for, or waited for when it gave up at its deadline; or -1. */
static int dtrain__last_awaits(const dtrain__last *last)
{
    int gave_up = last->state == DTRAIN__LAST_ENDED && last->status == DTRAIN_ERR_TIMEOUT;
    return last->state == DTRAIN__LAST_UNDER_WAY || gave_up ? (int)last->awaited - 1 : -1;
}

/* What this rank's heartbeats carry. */
static size_t dtrain__recorder_tell(void *user, unsigned char *out, size_t capacity, int *awaits)
{
    dtrain_comm *comm = (dtrain_comm *)user;
    dtrain__last last;
    if (sizeof last > capacity || !dtrain__recorder_last(comm->recorder, &last))
        return 0;
    *awaits = dtrain__last_awaits(&last);
    memcpy(out, &last, sizeof last);
    return sizeof last;
}

/* What `rank` does, where that is known; of processes no older than the wait that began at since_ns. */
static int dtrain__recorder_peer(const dtrain_comm *comm, int rank, int64_t since_ns, dtrain__last *out)
{
    dtrain__board *board = comm->transport.board;
    int64_t age_ns = 0;
    if (board != NULL) {
        void *recorder = __atomic_load_n(&board->slots[rank].recorder, __ATOMIC_ACQUIRE);
        return recorder != NULL && dtrain__recorder_last((dtrain__recorder *)recorder, out);
    }
    if (comm->socket == NULL ||
        dtrain__socket_last(comm->socket, rank, since_ns, out, sizeof *out, &age_ns) != sizeof *out)
        return 0;
    out->since_ms += (uint64_t)(age_ns / 1000000);
    return out->state <= DTRAIN__LAST_ENDED && out->awaited <= (uint64_t)comm->size;
}

/* "; rank 0 is in barrier #6 since 1.7 s, waiting for rank 2" */
static void dtrain__recorder_does(const dtrain_comm *comm, int rank, const dtrain__last *last, int awaits, char *text,
                                  size_t capacity)
{
    dtrain__text call = dtrain__call_text(&last->call);
    const char *where = last->call.group == comm->group ? "" : " of another group";
    double seconds = (double)last->since_ms * 1e-3;
    int ended = last->state == DTRAIN__LAST_ENDED;
    char then[48] = "";
    if (awaits >= 0)
        snprintf(then, sizeof then, ", %s for rank %d", ended ? "having waited" : "waiting", awaits);
    if (last->state == DTRAIN__LAST_NONE)
        snprintf(text, capacity, "; rank %d has called nothing yet", rank);
    else if (ended)
        snprintf(text, capacity, "; rank %d %s %s%s %.1f s ago and has called nothing since%s", rank,
                 last->status == DTRAIN_OK ? "ended" : "gave up", call.text, where, seconds, then);
    else
        snprintf(text, capacity, "; rank %d is in %s%s since %.1f s%s", rank, call.text, where, seconds, then);
}

/* What the awaited rank does, and so on along the ranks that wait for each other, as far as the text has room. */
static void dtrain__recorder_chain(const dtrain_comm *comm, const dtrain__op *op, char *text, size_t capacity)
{
    size_t used = 0;
    int rank = op->awaited;
    dtrain__last last;
    text[0] = 0;
    for (int i = 0; i < DTRAIN__LAST_CHAIN && rank >= 0 && rank != comm->rank; i++) {
        char does[320];
        if (!dtrain__recorder_peer(comm, rank, op->started_ns, &last))
            return;
        int next = last.call.group == comm->group ? dtrain__last_awaits(&last) : -1;
        dtrain__recorder_does(comm, rank, &last, next, does, sizeof does);
        if (strlen(does) >= capacity - used)
            return;
        memcpy(text + used, does, strlen(does) + 1);
        used += strlen(does);
        rank = next;
    }
}

/* Whether the awaited rank is in a call, or gave one up at its own deadline, that can never meet this one: another one
 * of the same number, or a message where this is a collective (or the other way round), each waiting for the other and
 * nothing of either moved. */
static int dtrain__recorder_contradicts(const dtrain_comm *comm, const dtrain__op *op, const dtrain__last *theirs)
{
    dtrain__call mine = dtrain__recorder_call(comm, op);
    int message = dtrain__call_is_message(&mine);
    if (theirs->state == DTRAIN__LAST_NONE || theirs->call.group != comm->group ||
        (theirs->state == DTRAIN__LAST_ENDED && theirs->status != DTRAIN_ERR_TIMEOUT &&
         theirs->status != DTRAIN_ERR_MISMATCH))
        return 0;
    if (message != dtrain__call_is_message(&theirs->call))
        return theirs->awaited == (uint64_t)comm->rank + 1 && !theirs->moved && !op->touched;
    return !message && theirs->call.number == mine.number && memcmp(&theirs->call, &mine, sizeof mine) != 0;
}

/* The rank along those that wait for each other whose call contradicts this one, with its call; or -1. */
static int dtrain__recorder_culprit(const dtrain_comm *comm, const dtrain__op *op, dtrain__last *out)
{
    int rank = op->awaited;
    for (int i = 0; i < DTRAIN__LAST_CHAIN && rank >= 0 && rank != comm->rank; i++) {
        if (!dtrain__recorder_peer(comm, rank, op->started_ns, out))
            return -1;
        if (dtrain__recorder_contradicts(comm, op, out))
            return rank;
        rank = out->call.group == comm->group ? dtrain__last_awaits(out) : -1;
    }
    return -1;
}

/* Ends an operation at its deadline: with what the awaited rank does, or as a mismatch where that says why. */
static dtrain_status dtrain__op_expire(const dtrain_comm *comm, dtrain__op *op)
{
    dtrain__text mine = dtrain__op_text(comm, op);
    double seconds = (double)(dtrain__os_now_ns() - op->started_ns) * 1e-9;
    char reason[200] = "", does[400] = "";
    dtrain__last last;
    int culprit = dtrain__recorder_culprit(comm, op, &last);
    if (culprit >= 0)
        return dtrain__op_mismatch(comm, op, culprit, &last.call);
    if (comm->socket != NULL)
        dtrain__socket_suspect(comm->socket, op->awaited, reason, sizeof reason);
    dtrain__recorder_chain(comm, op, does, sizeof does);
    return dtrain__fail(&op->error, DTRAIN_ERR_TIMEOUT, "%s: rank %d waited %.3f s for rank %d%s%s; %s", mine.text,
                        comm->rank, seconds, op->awaited, does, reason,
                        op->touched ? "data had moved, so the group is broken"
                                    : "nothing had moved, so the call can be made again");
}

/* Says whether the deadline has passed; a quarter of it gone, tells the log who is awaited. */
static int dtrain__op_late(const dtrain_comm *comm, dtrain__op *op)
{
    int64_t now;
    if (op->awaited >= 0)
        __atomic_store_n(&comm->recorder->awaited, (uint32_t)(op->awaited + 1), __ATOMIC_RELAXED);
    if (op->deadline_ns == INT64_MAX)
        return 0;
    now = dtrain__os_now_ns();
    if (!op->warned && op->awaited >= 0 && now - op->started_ns > (op->deadline_ns - op->started_ns) / 4 &&
        op->deadline_ns - op->started_ns >= 1000000000) {
        dtrain__text mine = dtrain__op_text(comm, op);
        char does[400];
        op->warned = 1;
        dtrain__recorder_chain(comm, op, does, sizeof does);
        dtrain__log(DTRAIN_LOG_WARN, "%s: rank %d has waited %.1f s for rank %d%s", mine.text, comm->rank,
                    (double)(now - op->started_ns) * 1e-9, op->awaited, does);
    }
    return now >= op->deadline_ns;
}

#endif

/* ---- >>trace ----
 * The recorder as a file that chrome://tracing and Perfetto load and tools/dtrace.c merges: one process a rank, one
 * thread a group, one event an operation. Times are of CLOCK_MONOTONIC; otherData names a moment on it and on
 * CLOCK_REALTIME, by which hosts are put side by side. Written beside the target and renamed when it is whole.
 * Source: Trace Event Format, catapult project, JSON object format. */
#ifndef DTRAIN__TRACE
#define DTRAIN__TRACE

#define DTRAIN__TRACE_FORMAT 1

typedef struct dtrain__trace {
    dtrain_comm *comm;
    dtrain__json_writer json; /* of the event under way, in the recorder's text */
    int fd;
    int error; /* errno of the first write that went wrong; 0: none */
    int64_t now;
} dtrain__trace;

static void dtrain__trace_put(dtrain__trace *trace, const void *data, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)data;
    while (bytes > 0 && trace->error == 0) {
        ssize_t n = write(trace->fd, at, bytes);
        if (n < 0 && errno != EINTR)
            trace->error = errno;
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
}

static void dtrain__trace_begin(dtrain__trace *trace)
{
    dtrain__json_write_start(&trace->json, trace->comm->recorder->text, DTRAIN__TRACE_TEXT_BYTES);
    dtrain__json_begin(&trace->json, 1);
}

/* Writes the object that dtrain__trace_begin began, and what stands after it. */
static void dtrain__trace_end(dtrain__trace *trace, const char *after)
{
    dtrain__json_end(&trace->json);
    if (!dtrain__json_write_finish(&trace->json) && trace->error == 0)
        trace->error = EOVERFLOW;
    if (trace->error == 0)
        dtrain__trace_put(trace, trace->comm->recorder->text, trace->json.bytes);
    dtrain__trace_put(trace, after, strlen(after));
}

static void dtrain__trace_key(dtrain__trace *trace, const char *key)
{
    dtrain__json_write_key(&trace->json, key, strlen(key));
}

/* Error texts quote what users and systems call things: what is no UTF-8, or no character, becomes a question mark. */
static void dtrain__trace_text(dtrain__trace *trace, const char *key, const char *text)
{
    char clean[DTRAIN__ERROR_BYTES];
    size_t length = strlen(text), at = 0;
    length = length < sizeof clean ? length : sizeof clean - 1;
    while (at < length) {
        size_t step = dtrain__json_utf8((const unsigned char *)text + at, length - at);
        int plain = step > 0 && (unsigned char)text[at] >= 0x20 && text[at] != 0x7f;
        memcpy(clean + at, text + at, step > 0 ? step : 1);
        if (!plain)
            clean[at] = '?';
        at += step > 0 ? step : 1;
    }
    dtrain__trace_key(trace, key);
    dtrain__json_write_string(&trace->json, clean, length);
}

static void dtrain__trace_u64(dtrain__trace *trace, const char *key, uint64_t value)
{
    dtrain__trace_key(trace, key);
    dtrain__json_write_u64(&trace->json, value);
}

/* A value that may be missing. */
static void dtrain__trace_maybe(dtrain__trace *trace, const char *key, int is, uint64_t value)
{
    dtrain__trace_key(trace, key);
    if (is)
        dtrain__json_write_u64(&trace->json, value);
    else
        dtrain__json_write_null(&trace->json);
}

/* Nanoseconds as microseconds, exactly. */
static void dtrain__trace_us(dtrain__trace *trace, const char *key, uint64_t ns)
{
    char text[32];
    snprintf(text, sizeof text, "%llu.%03u", (unsigned long long)(ns / 1000), (unsigned)(ns % 1000));
    dtrain__trace_key(trace, key);
    dtrain__json_write_word(&trace->json, text);
}

/* What every event has; the caller goes on with its args. */
static void dtrain__trace_event(dtrain__trace *trace, const char *name, const char *phase)
{
    dtrain__trace_begin(trace);
    dtrain__trace_text(trace, "name", name);
    dtrain__trace_text(trace, "ph", phase);
    dtrain__trace_u64(trace, "pid", (uint64_t)trace->comm->rank);
    dtrain__trace_u64(trace, "tid", trace->comm->group);
}

static void dtrain__trace_args(dtrain__trace *trace)
{
    dtrain__trace_key(trace, "args");
    dtrain__json_begin(&trace->json, 1);
}

static void dtrain__trace_title(dtrain__trace *trace, const char *what, const char *title)
{
    dtrain__trace_event(trace, what, "M");
    dtrain__trace_args(trace);
    dtrain__trace_text(trace, "name", title);
    dtrain__json_end(&trace->json);
    dtrain__trace_end(trace, ",\n");
}

/* Whose file it is, and by which clocks. */
static void dtrain__trace_head(dtrain__trace *trace)
{
    static const char open[] = "{\"displayTimeUnit\":\"ms\",\"otherData\":", events[] = ",\n\"traceEvents\":[\n";
    dtrain_comm *comm = trace->comm;
    dtrain__recorder *recorder = comm->recorder;
    char host[64] = "?", title[128];
    gethostname(host, sizeof host - 1);
    dtrain__trace_put(trace, open, sizeof open - 1);
    dtrain__trace_begin(trace);
    dtrain__trace_u64(trace, "dtrain_trace", DTRAIN__TRACE_FORMAT);
    dtrain__trace_u64(trace, "rank", (uint64_t)comm->rank);
    dtrain__trace_u64(trace, "world_size", (uint64_t)comm->size);
    dtrain__trace_u64(trace, "group", comm->group);
    dtrain__trace_text(trace, "host", host);
    dtrain__trace_u64(trace, "process", (uint64_t)comm->process);
    dtrain__trace_u64(trace, "monotonic_ns", (uint64_t)recorder->monotonic_ns);
    dtrain__trace_u64(trace, "realtime_ns", (uint64_t)recorder->realtime_ns);
    dtrain__trace_u64(trace, "written_ns", (uint64_t)trace->now);
    dtrain__trace_u64(trace, "operations", __atomic_load_n(&recorder->begun, __ATOMIC_ACQUIRE));
    dtrain__trace_u64(trace, "queued", __atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST));
    dtrain__trace_end(trace, events);
    snprintf(title, sizeof title, "rank %d of %d (pid %ld on %s)", comm->rank, comm->size, (long)comm->process, host);
    dtrain__trace_title(trace, "process_name", title);
    snprintf(title, sizeof title, "group %llu", (unsigned long long)comm->group);
    dtrain__trace_title(trace, "thread_name", title);
}

/* The call of an operation, and how it went. */
static void dtrain__trace_call(dtrain__trace *trace, uint64_t serial, const dtrain__record *record)
{
    const dtrain__call *call = &record->call;
    int message = dtrain__call_is_message(call), typed = call->kind != DTRAIN__BARRIER;
    unsigned bits = dtrain_dtype_bits((dtrain_dtype)call->dtype);
    dtrain__trace_args(trace);
    dtrain__trace_text(trace, "call", dtrain__kind_name(call->kind));
    dtrain__trace_u64(trace, "number", call->number);
    dtrain__trace_text(trace, "text", dtrain__call_text(call).text);
    dtrain__trace_text(trace, "dtype", typed ? dtrain_dtype_name((dtrain_dtype)call->dtype) : "");
    dtrain__trace_u64(trace, "count", call->count);
    dtrain__trace_u64(trace, "bytes", call->count * (bits / 8));
    dtrain__trace_text(trace, "op", call->op != 0 ? dtrain__op_name(call->op) : "");
    dtrain__trace_maybe(trace, "root", !message, call->root);
    dtrain__trace_maybe(trace, "peer", message, call->root);
    dtrain__trace_text(trace, "algorithm", dtrain__algorithm_name(call->algorithm));
    dtrain__trace_key(trace, "async");
    dtrain__json_write_bool(&trace->json, record->async != 0);
    dtrain__trace_maybe(trace, "awaited", record->awaited > 0, record->awaited - 1);
    dtrain__trace_u64(trace, "serial", serial);
    dtrain__trace_u64(trace, "called_ns", record->called_ns);
    dtrain__trace_u64(trace, "started_ns", record->started_ns);
    dtrain__trace_maybe(trace, "moved_ns", record->moved_ns != 0, record->moved_ns);
    dtrain__trace_maybe(trace, "ended_ns", record->ended_ns != 0, record->ended_ns);
    dtrain__trace_text(trace, "status",
                       record->ended_ns != 0 ? dtrain_status_name((dtrain_status)record->status) : "under way");
    if (serial == trace->comm->recorder->shown_failed)
        dtrain__trace_text(trace, "error", trace->comm->recorder->shown.text);
    dtrain__json_end(&trace->json);
}

static void dtrain__trace_operations(dtrain__trace *trace)
{
    dtrain__recorder *recorder = trace->comm->recorder;
    uint64_t last = __atomic_load_n(&recorder->begun, __ATOMIC_ACQUIRE);
    uint64_t serial = last > DTRAIN__RECORDS ? last - DTRAIN__RECORDS + 1 : 1;
    for (; serial <= last; serial++) {
        dtrain__record record;
        char name[64];
        if (!dtrain__record_read(recorder, serial, &record))
            continue;
        if (record.ended_ns == 0 && serial == last)
            record.awaited = __atomic_load_n(&recorder->awaited, __ATOMIC_RELAXED);
        uint64_t ended = record.ended_ns != 0 ? record.ended_ns : (uint64_t)trace->now;
        snprintf(name, sizeof name, "%s #%llu", dtrain__kind_name(record.call.kind),
                 (unsigned long long)record.call.number);
        dtrain__trace_event(trace, name, "X");
        dtrain__trace_text(trace, "cat", dtrain__call_is_message(&record.call) ? "message" : "collective");
        dtrain__trace_us(trace, "ts", record.started_ns);
        dtrain__trace_us(trace, "dur", ended > record.started_ns ? ended - record.started_ns : 0);
        dtrain__trace_call(trace, serial, &record);
        dtrain__trace_end(trace, ",\n");
    }
    dtrain__trace_event(trace, "written", "i");
    dtrain__trace_us(trace, "ts", (uint64_t)trace->now);
    dtrain__trace_end(trace, "\n]}\n");
}

/* Writes the file; the caller holds the recorder's mutex, and the path is not too long. */
static dtrain_status dtrain__trace_write(dtrain_comm *comm, const char *path)
{
    dtrain__recorder *recorder = comm->recorder;
    dtrain__trace trace;
    memset(&trace, 0, sizeof trace);
    trace.comm = comm;
    trace.now = dtrain__os_now_ns();
    snprintf(recorder->beside, sizeof recorder->beside, "%s.%ld-%llu-%d.part", path, (long)getpid(),
             (unsigned long long)comm->group, comm->rank);
    unlink(recorder->beside); /* of a process that had this number before */
    trace.fd = open(recorder->beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (trace.fd < 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_trace on rank %d: cannot write %.400s: %s", comm->rank, path,
                            strerror(errno));
    pthread_mutex_lock(&recorder->error_mutex);
    recorder->shown = recorder->error;
    recorder->shown_failed = recorder->failed;
    pthread_mutex_unlock(&recorder->error_mutex);
    dtrain__trace_head(&trace);
    dtrain__trace_operations(&trace);
    if (trace.error == 0 && fsync(trace.fd) != 0 && errno != EINVAL) /* EINVAL: nothing that can be synchronized */
        trace.error = errno;
    if (close(trace.fd) != 0 && trace.error == 0)
        trace.error = errno;
    if (trace.error == 0 && rename(recorder->beside, path) != 0)
        trace.error = errno;
    if (trace.error == 0)
        return DTRAIN_OK;
    unlink(recorder->beside);
    return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_trace on rank %d: cannot write %.400s: %s; what was there is still",
                        comm->rank, path, strerror(trace.error));
}

DTRAIN_API dtrain_status dtrain_comm_trace(dtrain_comm *comm, const char *path)
{
    size_t bytes = path != NULL ? strlen(path) : 0;
    dtrain_status status;
    if (comm == NULL || bytes == 0 || bytes >= DTRAIN__TRACE_PATH_BYTES)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_trace: needs a group and a path of 1 to %d bytes (got %zu)",
                            DTRAIN__TRACE_PATH_BYTES - 1, bytes);
    if (comm->process != getpid())
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_trace: process %ld made this group, and this is its forked child %ld; call it there",
                            (long)comm->process, (long)getpid());
    pthread_mutex_lock(&comm->recorder->mutex);
    status = dtrain__trace_write(comm, path);
    pthread_mutex_unlock(&comm->recorder->mutex);
    return status;
}

/* Keeps the prefix of the failure file, the desc's or the environment's. */
static dtrain_status dtrain__trace_prefix(dtrain_comm *comm, const char *prefix)
{
    const char *from = prefix != NULL ? "desc.trace_on_failure" : "DTRAIN_TRACE";
    if (prefix == NULL)
        prefix = getenv("DTRAIN_TRACE");
    if (prefix == NULL)
        prefix = "";
    if (strlen(prefix) >= sizeof comm->recorder->prefix)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "rank %d: %s has %zu bytes; at most %d are possible", comm->rank,
                            from, strlen(prefix), DTRAIN__TRACE_PATH_BYTES - 1);
    snprintf(comm->recorder->prefix, sizeof comm->recorder->prefix, "%s", prefix);
    comm->desc.trace_on_failure = comm->recorder->prefix;
    return DTRAIN_OK;
}

/* Writes the failure file when the operation's error is more than a deadline after which it can be called again. */
static void dtrain__trace_failure(dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__recorder *recorder = comm->recorder;
    dtrain__error kept = dtrain__thread_error;
    if (recorder->prefix[0] == 0 || (op->error.status == DTRAIN_ERR_TIMEOUT && !op->touched))
        return;
    pthread_mutex_lock(&recorder->mutex);
    if (!recorder->written) {
        char group[40] = "";
        recorder->written = 1;
        if (comm->group != 0)
            snprintf(group, sizeof group, ".group-%llu", (unsigned long long)comm->group);
        snprintf(recorder->path, sizeof recorder->path, "%s%s.rank-%d.json", recorder->prefix, group, comm->rank);
        if (dtrain__trace_write(comm, recorder->path) != DTRAIN_OK)
            dtrain__log(DTRAIN_LOG_WARN, "%s", dtrain__thread_error.text);
        else
            dtrain__log(DTRAIN_LOG_INFO, "rank %d: its last operations are in %s", comm->rank, recorder->path);
    }
    pthread_mutex_unlock(&recorder->mutex);
    dtrain__thread_error = kept;
}

#endif

/* ---- >>place ----
 * Where this process stands: its rank, the world's size, the root and the token, from a desc or from the
 * environment of one of the known launchers, and what was believed, for the texts of errors. Reads, and
 * connects to nothing. */
#ifndef DTRAIN__PLACE
#define DTRAIN__PLACE

typedef struct dtrain__place {
    int rank, world_size;
    char root[DTRAIN__ADDRESS_BYTES]; /* empty in a world of one */
    unsigned char token[256];
    size_t token_bytes; /* 0: none */
    char listen_on[64]; /* empty: the interface that routes to the root */
    int insecure;
    int listen_fd;      /* a listening socket that rank 0 inherits, or -1 */
    int64_t timeout_ms; /* negative: none */
    char believed[400]; /* the variables or fields, with their values; of the token its length only */
} dtrain__place;

/* The value of a variable; an empty one counts as unset. */
static const char *dtrain__place_get(const char *name)
{
    const char *value = name != NULL ? getenv(name) : NULL;
    return value != NULL && value[0] != 0 ? value : NULL;
}

__attribute__((format(printf, 2, 3))) static void dtrain__place_believe(dtrain__place *place, const char *format, ...)
{
    size_t used = strlen(place->believed);
    va_list arguments;
    va_start(arguments, format);
    if (used > 0 && used < sizeof place->believed - 2)
        place->believed[used++] = ' ';
    vsnprintf(place->believed + used, sizeof place->believed - used, format, arguments);
    va_end(arguments);
}

static dtrain_status dtrain__place_number(const char *name, int64_t low, int64_t high, int64_t *out)
{
    const char *text = dtrain__place_get(name);
    char *end = NULL;
    long long value;
    errno = 0;
    value = text != NULL ? strtoll(text, &end, 10) : 0;
    if (text == NULL || *end != 0 || errno != 0 || value < low || value > high)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: %s=%.40s: a number from %lld to %lld is expected",
                            name, text != NULL ? text : "(unset)", (long long)low, (long long)high);
    *out = value;
    return DTRAIN_OK;
}

/* Reads rank and size from two variables. */
static dtrain_status dtrain__place_pair(dtrain__place *place, const char *rank, const char *size)
{
    int64_t r = 0, n = 0;
    dtrain_status status;
    if (dtrain__place_get(size) == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: %s=%s is set and %s is not; set both", rank,
                            dtrain__place_get(rank), size);
    status = dtrain__place_number(size, 1, DTRAIN__MAX_RANKS, &n);
    if (status == DTRAIN_OK)
        status = dtrain__place_number(rank, 0, n - 1, &r);
    place->rank = (int)r;
    place->world_size = (int)n;
    dtrain__place_believe(place, "%s=%d %s=%d", rank, place->rank, size, place->world_size);
    return status;
}

enum {
    DTRAIN__LAUNCHER_NONE,
    DTRAIN__LAUNCHER_OWN,
    DTRAIN__LAUNCHER_TORCH,
    DTRAIN__LAUNCHER_SLURM,
    DTRAIN__LAUNCHER_OPENMPI,
    DTRAIN__LAUNCHER_PMI,
    DTRAIN__LAUNCHER_KUBERNETES
};

/* Finds the launcher whose variables are there, and reads rank and size from them. */
static dtrain_status dtrain__place_launcher(dtrain__place *place, int *launcher)
{
    const char *tasks = dtrain__place_get("SLURM_NTASKS") != NULL ? "SLURM_NTASKS" : "SLURM_STEP_NUM_TASKS";
    const char *size = dtrain__place_get("DTRAIN_WORLD_SIZE");
    /* In a Slurm job mpirun hands on the variables of the task that it runs in itself, the same to all its ranks; srun
     * sets neither of these two. */
    int inner = dtrain__place_get("OMPI_COMM_WORLD_RANK") != NULL ||
                (dtrain__place_get("PMI_RANK") != NULL && dtrain__place_get("MPI_LOCALNRANKS") != NULL);
    place->world_size = 1;
    *launcher = DTRAIN__LAUNCHER_OWN;
    if (dtrain__place_get("DTRAIN_RANK") != NULL)
        return dtrain__place_pair(place, "DTRAIN_RANK", "DTRAIN_WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_TORCH; /* names so common that one alone means nothing */
    if (dtrain__place_get("RANK") != NULL && dtrain__place_get("WORLD_SIZE") != NULL)
        return dtrain__place_pair(place, "RANK", "WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_SLURM;
    if (!inner && dtrain__place_get("SLURM_PROCID") != NULL)
        return dtrain__place_pair(place, "SLURM_PROCID", tasks);
    *launcher = DTRAIN__LAUNCHER_OPENMPI;
    if (dtrain__place_get("OMPI_COMM_WORLD_RANK") != NULL)
        return dtrain__place_pair(place, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_PMI;
    if (dtrain__place_get("PMI_RANK") != NULL)
        return dtrain__place_pair(place, "PMI_RANK", "PMI_SIZE");
    *launcher = DTRAIN__LAUNCHER_KUBERNETES;
    if (dtrain__place_get("JOB_COMPLETION_INDEX") != NULL && size == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_create: JOB_COMPLETION_INDEX=%.20s says that this is a pod of an indexed job; set "
                            "DTRAIN_WORLD_SIZE and DTRAIN_ROOT (host:port of pod 0), or DTRAIN_WORLD_SIZE=1 for a pod "
                            "of its own",
                            dtrain__place_get("JOB_COMPLETION_INDEX"));
    if (dtrain__place_get("JOB_COMPLETION_INDEX") != NULL && strcmp(size, "1") != 0)
        return dtrain__place_pair(place, "JOB_COMPLETION_INDEX", "DTRAIN_WORLD_SIZE");
    *launcher = DTRAIN__LAUNCHER_NONE;
    if (size != NULL && strcmp(size, "1") != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_create: DTRAIN_WORLD_SIZE=%.20s is set and no rank is; set DTRAIN_RANK", size);
    return DTRAIN_OK;
}

/* The first host of a Slurm node list: "gpu[007-009,12]-x,b" begins with gpu007-x. */
static int dtrain__place_first_node(const char *list, char *out, size_t capacity)
{
    size_t n = 0;
    int inside = 0, skip = 0;
    for (; *list != 0 && (inside || *list != ','); list++) {
        if (*list == '[')
            inside = 1;
        else if (*list == ']')
            inside = skip = 0;
        else if (inside && (*list == '-' || *list == ','))
            skip = 1;
        else if (!skip && n + 1 < capacity)
            out[n++] = *list;
    }
    out[n] = 0;
    return n > 0;
}

/* Makes the private directory in which ranks of one host meet. */
static dtrain_status dtrain__place_directory(char *out, size_t capacity)
{
    const char *base = dtrain__place_get("TMPDIR");
    struct stat what;
    if (base == NULL || strlen(base) > 44) /* a socket's path is short */
        base = "/tmp";
    snprintf(out, capacity, "%s/dtrain-%lu", base, (unsigned long)getuid());
    if (mkdir(out, 0700) != 0 && errno != EEXIST)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: cannot make the directory %s: %s", out, strerror(errno));
    if (lstat(out, &what) != 0 || !S_ISDIR(what.st_mode) || what.st_uid != getuid() || (what.st_mode & 077) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_DENIED,
                            "comm_create: %s must be a directory of this user that nobody else may enter", out);
    return DTRAIN_OK;
}

/* Where all ranks are on this host, says the launcher, they meet at a unix socket that its job names. */
static dtrain_status dtrain__place_local(dtrain__place *place, const char *local_size, const char *job)
{
    char directory[128], name[32];
    int64_t local = 0;
    size_t n = 0;
    if (dtrain__place_get(local_size) == NULL || dtrain__place_number(local_size, 1, INT_MAX, &local) != DTRAIN_OK ||
        local != place->world_size)
        return DTRAIN_OK;
    if (job != NULL && strlen(job) >= sizeof name) /* its end tells jobs of one host apart */
        job += strlen(job) - (sizeof name - 1);
    for (; job != NULL && job[n] != 0 && n + 1 < sizeof name; n++)
        name[n] =
            (job[n] >= '0' && job[n] <= '9') || (job[n] >= 'a' && job[n] <= 'z') || (job[n] >= 'A' && job[n] <= 'Z')
                ? job[n]
                : '_';
    name[n] = 0;
    if (n == 0) /* the local ranks have one parent */
        snprintf(name, sizeof name, "p%ld", (long)getppid());
    dtrain_status status = dtrain__place_directory(directory, sizeof directory);
    if (status != DTRAIN_OK)
        return status;
    snprintf(place->root, sizeof place->root, "unix:%s/%s", directory, name);
    dtrain__place_believe(place, "%s=%d (all on this host)", local_size, (int)local);
    return DTRAIN_OK;
}

/* Finds the root from the environment. */
static dtrain_status dtrain__place_root(dtrain__place *place, int launcher)
{
    const char *root = dtrain__place_get("DTRAIN_ROOT"), *host = dtrain__place_get("MASTER_ADDR");
    const char *port = dtrain__place_get("MASTER_PORT"), *nodes = dtrain__place_get("SLURM_STEP_NODELIST");
    const char *job = dtrain__place_get("PMIX_NAMESPACE");
    char node[128];
    int64_t number = 0;
    dtrain_status status = DTRAIN_OK;
    if (root != NULL) {
        snprintf(place->root, sizeof place->root, "%s", root);
        dtrain__place_believe(place, "DTRAIN_ROOT=%.120s", root);
        return strlen(root) < sizeof place->root
                   ? DTRAIN_OK
                   : dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: DTRAIN_ROOT is too long");
    }
    if (host != NULL && port != NULL) {
        /* torchrun's own agent listens at MASTER_PORT then */
        const char *agent = dtrain__place_get("TORCHELASTIC_USE_AGENT_STORE");
        int taken = agent != NULL && strcmp(agent, "True") == 0;
        status = dtrain__place_number("MASTER_PORT", 0, 65535 - taken, &number);
        snprintf(place->root, sizeof place->root, strchr(host, ':') != NULL ? "[%.200s]:%d" : "%.200s:%d", host,
                 (int)number + taken);
        dtrain__place_believe(place, "MASTER_ADDR=%.100s MASTER_PORT=%.8s%s", host, port,
                              taken ? " + 1 (torchrun has the first)" : "");
        return status;
    }
    nodes = nodes != NULL ? nodes : dtrain__place_get("SLURM_JOB_NODELIST");
    if (launcher == DTRAIN__LAUNCHER_SLURM && nodes != NULL && dtrain__place_get("SLURM_JOB_ID") != NULL &&
        dtrain__place_first_node(nodes, node, sizeof node)) {
        status = dtrain__place_number("SLURM_JOB_ID", 0, INT64_MAX, &number);
        snprintf(place->root, sizeof place->root, "%s:%d", node, 15000 + (int)(number % 10000));
        dtrain__place_believe(place, "SLURM_JOB_NODELIST=%.80s SLURM_JOB_ID=%lld", nodes, (long long)number);
    } else if (launcher == DTRAIN__LAUNCHER_OPENMPI) {
        status = dtrain__place_local(place, "OMPI_COMM_WORLD_LOCAL_SIZE",
                                     job != NULL ? job : dtrain__place_get("OMPI_MCA_ess_base_jobid"));
    } else if (launcher == DTRAIN__LAUNCHER_PMI) {
        status = dtrain__place_local(place, "MPI_LOCALNRANKS", job);
    }
    if (status != DTRAIN_OK || place->root[0] != 0)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "comm_create: rank %d of %d (%s) does not know where rank 0 is: set %s", place->rank,
                        place->world_size, place->believed,
                        host != NULL   ? "MASTER_PORT, or DTRAIN_ROOT=host:port"
                        : port != NULL ? "MASTER_ADDR, or DTRAIN_ROOT=host:port"
                                       : "DTRAIN_ROOT=host:port, the same on every rank");
}

static dtrain_status dtrain__place_set_token(dtrain__place *place, const char *token, size_t bytes, const char *from)
{
    if (bytes > sizeof place->token - 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: %s has %zu bytes; 16 to 255 are possible", from,
                            bytes);
    if (bytes < 16)
        return dtrain__fail(NULL, DTRAIN_ERR_DENIED,
                            "comm_create: %s has %zu bytes; a token needs at least 16, which nobody can guess", from,
                            bytes);
    memcpy(place->token, token, bytes);
    place->token_bytes = bytes;
    dtrain__place_believe(place, "%s (%zu bytes)", from, bytes);
    return DTRAIN_OK;
}

/* Takes the first line of a file. */
static dtrain_status dtrain__place_token_file(dtrain__place *place, const char *path)
{
    char text[512];
    size_t bytes = 0;
    ssize_t n = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0)
        while (bytes < sizeof text &&
               ((n = read(fd, text + bytes, sizeof text - bytes)) > 0 || (n < 0 && errno == EINTR)))
            bytes += n > 0 ? (size_t)n : 0;
    if (fd < 0 || n < 0) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: DTRAIN_TOKEN_FILE=%.200s cannot be read: %s", path,
                            strerror(error));
    }
    close(fd);
    for (size_t i = 0; i < bytes; i++)
        if (text[i] == '\n' || text[i] == '\r')
            bytes = i;
    dtrain_status status = dtrain__place_set_token(place, text, bytes, "DTRAIN_TOKEN_FILE");
    memset(text, 0, sizeof text);
    return status;
}

/* Reads what stands beside rank, size and root. */
static dtrain_status dtrain__place_rest(dtrain__place *place, const dtrain_comm_desc *desc, int environment)
{
    const char *token = desc->token, *listen_on = desc->listen_on, *file = NULL;
    const char *from = desc->token != NULL ? "desc.token" : "DTRAIN_TOKEN";
    int64_t number = 0;
    dtrain_status status = DTRAIN_OK;
    if (environment && token == NULL) {
        token = dtrain__place_get("DTRAIN_TOKEN");
        file = token == NULL ? dtrain__place_get("DTRAIN_TOKEN_FILE") : NULL;
    }
    if (environment && listen_on == NULL)
        listen_on = dtrain__place_get("DTRAIN_INTERFACE");
    snprintf(place->listen_on, sizeof place->listen_on, "%s", listen_on != NULL ? listen_on : "");
    place->insecure = desc->insecure;
    if (environment && !place->insecure && dtrain__place_get("DTRAIN_INSECURE") != NULL) {
        status = dtrain__place_number("DTRAIN_INSECURE", 0, 1, &number);
        place->insecure = (int)number;
    }
    place->timeout_ms = desc->timeout_ms;
    if (status == DTRAIN_OK && environment && place->timeout_ms == 0 && dtrain__place_get("DTRAIN_TIMEOUT_MS") != NULL)
        status = dtrain__place_number("DTRAIN_TIMEOUT_MS", -1, INT_MAX, &place->timeout_ms);
    if (place->timeout_ms == 0)
        place->timeout_ms = 60000;
    place->listen_fd = -1;
    if (status == DTRAIN_OK && environment && place->rank == 0 && dtrain__place_get("DTRAIN_LISTEN_FD") != NULL &&
        dtrain__place_get("DTRAIN_ROOT") != NULL) {
        status = dtrain__place_number("DTRAIN_LISTEN_FD", 0, INT_MAX, &number);
        place->listen_fd = (int)number;
    }
    if (status == DTRAIN_OK && token != NULL)
        status = dtrain__place_set_token(place, token, strlen(token), from);
    else if (status == DTRAIN_OK && file != NULL)
        status = dtrain__place_token_file(place, file);
    return status;
}

static dtrain_status dtrain__place_check_root(const dtrain__place *place)
{
    char host[DTRAIN__ADDRESS_BYTES], port[8];
    if (strncmp(place->root, "unix:", 5) == 0 && place->root[5] != 0 && strlen(place->root) <= 100)
        return DTRAIN_OK;
    if (strncmp(place->root, "unix:", 5) != 0 && dtrain__net_split(place->root, host, port) && atoi(port) <= 65535 &&
        host[0] != 0 && (place->rank == 0 || atoi(port) > 0))
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "comm_create: the root \"%.120s\" of rank %d: host:port, [address]:port or unix:/path is "
                        "expected, a port of 1 to 65535 (0, any free one, on rank 0 only), a path of at most 95 bytes",
                        place->root, place->rank);
}

/* Finds out where this process stands; desc may not be NULL. */
static dtrain_status dtrain__place_read(dtrain__place *place, const dtrain_comm_desc *desc)
{
    int launcher = DTRAIN__LAUNCHER_NONE, environment = desc->world_size == 0;
    dtrain_status status = DTRAIN_OK;
    memset(place, 0, sizeof *place);
    if (environment) {
        status = dtrain__place_launcher(place, &launcher);
    } else {
        place->rank = desc->rank;
        place->world_size = desc->world_size;
        if (desc->world_size < 0 || desc->world_size > DTRAIN__MAX_RANKS || desc->rank < 0 ||
            desc->rank >= desc->world_size)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "comm_create: rank %d of %d ranks; ranks count from 0, and 1 to %d are possible",
                                desc->rank, desc->world_size, DTRAIN__MAX_RANKS);
        dtrain__place_believe(place, "desc.rank=%d desc.world_size=%d", desc->rank, desc->world_size);
    }
    if (status == DTRAIN_OK)
        status = dtrain__place_rest(place, desc, environment);
    if (status != DTRAIN_OK || place->world_size == 1)
        return status;
    if (desc->root != NULL) {
        snprintf(place->root, sizeof place->root, "%s", desc->root);
        dtrain__place_believe(place, "desc.root=%.120s", desc->root);
        status = strlen(desc->root) < sizeof place->root
                     ? DTRAIN_OK
                     : dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: desc.root is too long");
    } else if (environment) {
        status = dtrain__place_root(place, launcher);
    } else {
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                              "comm_create: rank %d of %d: desc.root is needed, host:port or "
                              "unix:/path where rank 0 listens",
                              place->rank, place->world_size);
    }
    return status == DTRAIN_OK ? dtrain__place_check_root(place) : status;
}

#endif

/* ---- >>fused ----
 * Collectives between ranks of one address space. Each rank posts its call and buffers; when every
 * rank has posted, each does its part straight on all ranks' buffers, and returns when all have done
 * theirs. Small inputs travel on the board itself and need no second round. No step waits: fused_advance
 * does what can be done now, so that blocking calls, the service thread and poll share it.
 *
 * A rank takes its post back at its deadline by marking it, and looks whether every peer has posted: then it
 * unmarks it and goes on. Ranks do so one after another, and peers commit only after they have seen every post
 * present while nobody did so, so that either all ranks commit or none. */
#ifndef DTRAIN__FUSED
#define DTRAIN__FUSED

#define DTRAIN__FUSED_INLINE_TOTAL 16384 /* bytes that one rank reads of inline inputs */

enum { DTRAIN__FUSED_POST = 0, DTRAIN__FUSED_GATHER, DTRAIN__FUSED_BODY, DTRAIN__FUSED_FINISH };

static int dtrain__fused_inline(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t bytes = dtrain__op_bytes(op);
    if (op->kind == DTRAIN__BARRIER)
        return 1;
    return (op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__BROADCAST || op->kind == DTRAIN__REDUCE) &&
           bytes <= DTRAIN__POST_INLINE_BYTES && bytes * (size_t)comm->size <= DTRAIN__FUSED_INLINE_TOTAL;
}

static dtrain__post *dtrain__fused_post_of(const dtrain_comm *comm, const dtrain__op *op, int rank)
{
    return &comm->transport.board->slots[rank].posts[op->turn & 1];
}

/* An all-to-all in place lends a copy of its input, as peers read it while this rank writes. */
static int dtrain__fused_lend(dtrain_comm *comm, dtrain__op *op)
{
    size_t bytes = 0;
    if (op->kind != DTRAIN__ALL_TO_ALL || op->in != op->out)
        return 1;
    for (int rank = 0; rank < comm->size; rank++) {
        size_t end = (comm->parts[rank].begin + comm->parts[rank].count) * (dtrain_dtype_bits(op->dtype) / 8);
        bytes = comm->parts[rank].count > 0 && end > bytes ? end : bytes;
    }
    if (!dtrain__comm_reserve(comm, op, bytes))
        return 0;
    if (bytes > 0)
        memcpy(comm->scratch, op->in, bytes);
    return 1;
}

/* Any two calls that differ have other checks, but for one pair in 2^64. */
static uint64_t dtrain__fused_check(const uint64_t *words)
{
    static const uint64_t odd = 0x9e3779b97f4a7c15u;
    uint64_t lane[2] = {1, 2};
    for (int i = 0; i < DTRAIN__POST_WORDS; i++) {
        lane[i % 2] = (lane[i % 2] ^ words[i]) * odd;
        lane[i % 2] ^= lane[i % 2] >> 32;
    }
    return (lane[0] ^ lane[1] >> 29) * odd ^ lane[1];
}

static void dtrain__fused_post(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__slot *slot = &comm->transport.board->slots[comm->rank];
    dtrain__post *post = dtrain__fused_post_of(comm, op, comm->rank);
    dtrain__call call = dtrain__op_call(comm, op, 0);
    memcpy(post->call, &call, sizeof post->call);
    post->check = dtrain__fused_check(post->call);
    post->in = op->kind == DTRAIN__ALL_TO_ALL && op->in == op->out ? comm->scratch : op->in;
    post->out = op->out;
    post->counts = op->counts;
    post->offsets = op->offsets;
    if (dtrain__fused_inline(comm, op) && (op->kind != DTRAIN__BROADCAST || op->root == comm->rank) && op->count > 0)
        memcpy(post->data, op->in, dtrain__op_bytes(op));
    __atomic_store_n(&slot->arrived, 2 * op->turn, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(comm->bell);
    op->phase = DTRAIN__FUSED_GATHER;
    op->at = 0;
}

static int dtrain__fused_arrived(const dtrain_comm *comm, const dtrain__op *op, int peer)
{
    uint64_t word = __atomic_load_n(&comm->transport.board->slots[peer].arrived, __ATOMIC_SEQ_CST);
    return word == 2 * op->turn || word / 2 > op->turn;
}

/* Ends the operation with the board broken: first makes sure that no peer is inside its buffers. */
static int dtrain__fused_end_broken(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__board *board = comm->transport.board;
    dtrain__op_blame(comm, op, dtrain__board_cause(board));
    dtrain__board_revoke(board, comm->rank);
    return 1;
}

/* Compares all posts, so that every rank comes to the same verdict and none touches a buffer on a mismatch. */
static int dtrain__fused_agree(dtrain_comm *comm, dtrain__op *op)
{
    const dtrain__post *first = dtrain__fused_post_of(comm, op, 0);
    dtrain__call other, mine;
    int differs = 1;
    while (differs < comm->size && dtrain__fused_post_of(comm, op, differs)->check == first->check)
        differs++;
    if (differs >= comm->size)
        return 1;
    mine = dtrain__op_call(comm, op, 0);
    if (memcmp(&mine, first->call, sizeof mine) != 0)
        differs = 0;
    memcpy(&other, dtrain__fused_post_of(comm, op, differs)->call, sizeof other);
    dtrain__op_mismatch(comm, op, differs, &other);
    return 0;
}

/* Where in `rank`'s input the elements for this rank begin, and how many it gives. */
static dtrain__extent dtrain__fused_given(const dtrain_comm *comm, const dtrain__op *op, int rank)
{
    const dtrain__post *post = dtrain__fused_post_of(comm, op, rank);
    dtrain__extent given = comm->parts[comm->rank];
    if (op->kind == DTRAIN__ALL_GATHER)
        given.begin = 0;
    if (op->kind != DTRAIN__ALL_TO_ALL || op->counts == NULL)
        return given;
    given.begin = post->offsets != NULL ? post->offsets[comm->rank] : 0;
    for (int to = 0; post->offsets == NULL && to < comm->rank; to++)
        given.begin += post->counts[to];
    given.count = post->counts[comm->rank];
    return given;
}

/* Says whether each two ranks of an uneven all-to-all agree on what goes between them, as far as this rank is one
 * of them. The rest will go on, so that the group ends where not. */
static int dtrain__fused_even(dtrain_comm *comm, dtrain__op *op)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8;
    for (int peer = 0; op->kind == DTRAIN__ALL_TO_ALL && op->counts != NULL && peer < comm->size; peer++) {
        size_t gives = dtrain__fused_given(comm, op, peer).count, awaits = comm->others[peer].count;
        if (gives == awaits)
            continue;
        dtrain__op_uneven(comm, op, peer, comm->rank, gives * width, awaits * width);
        dtrain__board_break(comm->transport.board, &op->error);
        dtrain__board_revoke(comm->transport.board, comm->rank);
        return 0;
    }
    return 1;
}

static void dtrain__fused_small(dtrain_comm *comm, dtrain__op *op)
{
    int folds = op->kind == DTRAIN__ALL_REDUCE || (op->kind == DTRAIN__REDUCE && comm->rank == op->root);
    if (op->kind == DTRAIN__BROADCAST && op->root != comm->rank && op->count > 0)
        memcpy(op->out, dtrain__fused_post_of(comm, op, op->root)->data, dtrain__op_bytes(op));
    if (!folds || op->count == 0)
        return;
    for (int rank = 0; rank < comm->size; rank++)
        comm->ins[rank] = dtrain__fused_post_of(comm, op, rank)->data;
    dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, &op->out, 1, 0, op->count);
}

/* Marks this rank's post as taken back, unless every peer has posted; the peer that has not, or -1. */
static int dtrain__fused_mark(dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__slot *slot = &comm->transport.board->slots[comm->rank];
    int missing = -1;
    __atomic_store_n(&slot->arrived, 2 * op->turn + 1, __ATOMIC_SEQ_CST);
    for (int peer = 0; peer < comm->size && missing < 0; peer++)
        if (peer != comm->rank && !dtrain__fused_arrived(comm, op, peer))
            missing = peer;
    if (missing < 0)
        __atomic_store_n(&slot->arrived, 2 * op->turn, __ATOMIC_SEQ_CST);
    return missing;
}

/* Takes this rank's post back at its deadline; 0 when every peer had posted by then and it must go through. */
static int dtrain__fused_withdraw(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__board *board = comm->transport.board;
    uint64_t withdrawn = __atomic_load_n(&board->withdrawn, __ATOMIC_SEQ_CST) & ~(uint64_t)1;
    while (!__atomic_compare_exchange_n(&board->withdrawn, &withdrawn, withdrawn + 1, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
        withdrawn &= ~(uint64_t)1;
        sched_yield();
    }
    int missing = dtrain__fused_mark(comm, op);
    __atomic_store_n(&board->withdrawn, withdrawn + 2, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(comm->bell);
    if (missing < 0)
        return 0;
    /* the one awaited all along, rather than one that has just taken its post back */
    if (op->awaited < 0 || dtrain__fused_arrived(comm, op, op->awaited))
        op->awaited = missing;
    dtrain__op_expire(comm, op);
    return 1;
}

/* Returns 1 when the operation has ended; else op->phase says whether all ranks have posted. */
static int dtrain__fused_gather(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__board *board = comm->transport.board;
    int peer = (int)op->at;
    for (; peer < comm->size; peer++) {
        int left = (int)__atomic_load_n(&board->slots[peer].left, __ATOMIC_SEQ_CST);
        if (dtrain__fused_arrived(comm, op, peer))
            continue;
        op->at = (size_t)peer;
        op->awaited = peer;
        if (left)
            dtrain__board_lost(board, peer);
        return dtrain__board_broken(board) ? dtrain__fused_end_broken(comm, op) : 0;
    }
    op->at = 0;
    uint64_t withdrawn = __atomic_load_n(&board->withdrawn, __ATOMIC_SEQ_CST);
    for (peer = 0; peer < comm->size; peer++)
        if (!dtrain__fused_arrived(comm, op, peer))
            return 0;
    if (withdrawn % 2 != 0 || __atomic_load_n(&board->withdrawn, __ATOMIC_SEQ_CST) != withdrawn)
        return 0; /* who is at it rings the bell */
    op->awaited = -1;
    comm->number = op->number;
    comm->turn = op->turn;
    if (!dtrain__fused_agree(comm, op) || !dtrain__fused_even(comm, op))
        return 1;
    if (dtrain__fused_inline(comm, op)) {
        dtrain__fused_small(comm, op);
        return 1;
    }
    op->touched = 1;
    dtrain__recorder_moved(comm, op);
    op->phase = DTRAIN__FUSED_BODY;
    return 0;
}

/* Folds elements [begin, begin + n) of all inputs: into every rank's output, the root's, or this rank's. */
static void dtrain__fused_reduce(dtrain_comm *comm, dtrain__op *op, size_t begin, size_t n)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8;
    size_t offset = op->kind == DTRAIN__REDUCE_SCATTER ? begin - comm->parts[comm->rank].begin : begin;
    int outs = op->kind == DTRAIN__ALL_REDUCE ? comm->size : 1;
    for (int rank = 0; rank < comm->size; rank++) {
        dtrain__post *post = dtrain__fused_post_of(comm, op, rank);
        comm->ins[rank] = (const unsigned char *)post->in + begin * width;
        if (op->kind == DTRAIN__ALL_REDUCE)
            comm->outs[rank] = (unsigned char *)post->out + offset * width;
    }
    if (outs == 1)
        comm->outs[0] =
            (unsigned char *)dtrain__fused_post_of(comm, op, op->kind == DTRAIN__REDUCE ? op->root : comm->rank)->out +
            offset * width;
    dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, comm->outs, outs, 0, n);
}

/* Copies elements [from, from + n) of what all ranks have for this one, laid end to end. */
static void dtrain__fused_collect(dtrain_comm *comm, dtrain__op *op, size_t from, size_t n)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8, before = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        const dtrain__extent *part = &(op->kind == DTRAIN__ALL_TO_ALL ? comm->others : comm->parts)[rank];
        size_t low = from > before ? from : before, end = before + part->count;
        end = end < from + n ? end : from + n;
        if (low < end) {
            size_t given = dtrain__fused_given(comm, op, rank).begin + low - before;
            const unsigned char *source =
                (const unsigned char *)dtrain__fused_post_of(comm, op, rank)->in + given * width;
            unsigned char *target = (unsigned char *)op->out + (part->begin + low - before) * width;
            if (source != target)
                memcpy(target, source, (end - low) * width);
        }
        before += part->count;
    }
}

/* Reduces or copies elements [begin, begin + n) of the buffers of fused calls, as though they were one. */
static void dtrain__fused_segments(dtrain_comm *comm, dtrain__op *op, size_t begin, size_t n)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8;
    const dtrain__segment *mine = (const dtrain__segment *)op->in;
    for (size_t k = 0, low = 0; n > 0; low += mine[k++].count) {
        if (begin >= low + mine[k].count)
            continue;
        size_t at = (begin - low) * width, left = low + mine[k].count - begin, part = n < left ? n : left;
        for (int rank = 0; rank < comm->size; rank++) {
            const dtrain__segment *theirs = (const dtrain__segment *)dtrain__fused_post_of(comm, op, rank)->in;
            comm->ins[rank] = (const unsigned char *)theirs[k].in + at;
            comm->outs[rank] = (unsigned char *)theirs[k].out + at;
        }
        if (op->kind == DTRAIN__BROADCAST)
            memcpy(comm->outs[comm->rank], comm->ins[op->root], part * width);
        else
            dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, comm->outs, comm->size, 0, part);
        begin += part;
        n -= part;
    }
}

/* Copies elements [from, from + n) of one buffer: the root's, or this rank's part to or from the root. */
static void dtrain__fused_copy(dtrain_comm *comm, dtrain__op *op, size_t from, size_t n)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8, part = comm->parts[comm->rank].begin;
    const dtrain__post *root = dtrain__fused_post_of(comm, op, op->root);
    const unsigned char *source = (const unsigned char *)(op->kind == DTRAIN__GATHER ? op->in : root->in);
    unsigned char *target = (unsigned char *)(op->kind == DTRAIN__GATHER ? root->out : op->out);
    if (op->kind == DTRAIN__SCATTER)
        source += part * width;
    else if (op->kind == DTRAIN__GATHER)
        target += part * width;
    if (source != target)
        memcpy(target + from * width, source + from * width, n * width);
}

/* This rank's part of the work, in elements. Reductions to whole vectors are cut at cache lines, so that no two
 * ranks write one line. */
static size_t dtrain__fused_share(const dtrain_comm *comm, const dtrain__op *op, size_t *begin)
{
    size_t line = DTRAIN__CACHE_LINE / (dtrain_dtype_bits(op->dtype) / 8), end, n, total = 0;
    *begin = 0;
    switch (op->kind) {
    case DTRAIN__REDUCE_SCATTER: *begin = comm->parts[comm->rank].begin; return comm->parts[comm->rank].count;
    case DTRAIN__GATHER:
    case DTRAIN__SCATTER: return comm->parts[comm->rank].count;
    case DTRAIN__BROADCAST: return op->root == comm->rank ? 0 : op->count;
    case DTRAIN__ALL_GATHER: return op->count;
    case DTRAIN__ALL_TO_ALL:
        for (int rank = 0; rank < comm->size; rank++)
            total += comm->others[rank].count;
        return total;
    default: break;
    }
    n = dtrain_split(op->count / line + 1, comm->size, comm->rank, begin);
    end = (*begin + n) * line;
    *begin *= line;
    end = end < op->count ? end : op->count;
    return end > *begin ? end - *begin : 0;
}

/* Does this rank's part until `until_ns`; returns 1 when the operation has ended. */
static int dtrain__fused_body(dtrain_comm *comm, dtrain__op *op, int64_t until_ns)
{
    dtrain__board *board = comm->transport.board;
    size_t begin, share = dtrain__fused_share(comm, op, &begin);
    size_t width = dtrain_dtype_bits(op->dtype) / 8;
    size_t chunk = (until_ns == INT64_MAX ? (size_t)4 << 20 : (size_t)64 << 10) / width;
    while (op->at < share) {
        size_t n = share - op->at < chunk ? share - op->at : chunk, from = begin + op->at;
        if (!dtrain__board_enter(board, comm->rank))
            return dtrain__fused_end_broken(comm, op);
        if (op->scattered)
            dtrain__fused_segments(comm, op, from, n);
        else if (dtrain__op_reduces(op))
            dtrain__fused_reduce(comm, op, from, n);
        else if (op->kind == DTRAIN__ALL_GATHER || op->kind == DTRAIN__ALL_TO_ALL)
            dtrain__fused_collect(comm, op, from, n);
        else
            dtrain__fused_copy(comm, op, from, n);
        dtrain__board_leave(board, comm->rank);
        op->at += n;
        if (until_ns != INT64_MAX && op->at < share && dtrain__os_now_ns() >= until_ns)
            return 0;
    }
    __atomic_store_n(&board->slots[comm->rank].finished, op->turn, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(comm->bell);
    op->at = 0;
    op->phase = DTRAIN__FUSED_FINISH;
    return 0;
}

static int dtrain__fused_finish(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__board *board = comm->transport.board;
    for (int peer = (int)op->at; peer < comm->size; peer++) {
        int left = (int)__atomic_load_n(&board->slots[peer].left, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&board->slots[peer].finished, __ATOMIC_SEQ_CST) >= op->turn)
            continue;
        op->at = (size_t)peer;
        op->awaited = peer;
        if (left)
            dtrain__board_lost(board, peer);
        return dtrain__board_broken(board) ? dtrain__fused_end_broken(comm, op) : 0;
    }
    return 1;
}

/* Takes the operation as far as it goes without waiting, and not much beyond until_ns; returns 1 at its end. */
static int dtrain__fused_advance(dtrain_comm *comm, dtrain__op *op, int64_t until_ns)
{
    if (op->phase == DTRAIN__FUSED_POST) {
        op->number = comm->number + 1;
        op->turn = comm->turn + 1;
        if (dtrain__board_broken(comm->transport.board))
            return dtrain__fused_end_broken(comm, op);
        dtrain__op_layout(comm, op);
        if (!dtrain__fused_lend(comm, op))
            return 1;
        dtrain__fused_post(comm, op);
    }
    if (op->phase == DTRAIN__FUSED_GATHER && dtrain__fused_gather(comm, op))
        return 1;
    if (op->phase == DTRAIN__FUSED_BODY && dtrain__fused_body(comm, op, until_ns))
        return 1;
    return op->phase == DTRAIN__FUSED_FINISH && dtrain__fused_finish(comm, op);
}

/* Ends an operation whose deadline has passed; 0 when it goes on after all. */
static int dtrain__fused_expire(dtrain_comm *comm, dtrain__op *op)
{
    if (op->phase == DTRAIN__FUSED_GATHER)
        return dtrain__fused_withdraw(comm, op);
    dtrain__op_expire(comm, op);
    dtrain__board_break(comm->transport.board, &op->error);
    dtrain__board_revoke(comm->transport.board, comm->rank);
    return 1;
}

#endif

/* ---- >>step ----
 * What collectives over messages are made of: a step is at most one message out and one in. A plan computes step k
 * of an operation from nothing but the call, so that an operation can stop anywhere and go on later. Here are the
 * step itself and what all plans share; each plan has a file of its own and >>plan chooses between them. */
#ifndef DTRAIN__STEP
#define DTRAIN__STEP

#ifndef DTRAIN__BLOCK_BYTES
#define DTRAIN__BLOCK_BYTES ((size_t)256 << 10) /* of partial sums, for each rank */
#endif
#define DTRAIN__BLOCK_MOST ((size_t)8 << 20)
#ifndef DTRAIN__BLOCK_ALONE
#define DTRAIN__BLOCK_ALONE ((size_t)1 << 20) /* of partial sums, where one piece at a time is under way */
#endif
#ifndef DTRAIN__MESSAGE_CHUNK
#define DTRAIN__MESSAGE_CHUNK ((size_t)128 << 10) /* received and folded at once; at least DTRAIN__MESSAGE_SMALL */
#endif

typedef struct dtrain__step {
    int to, from; /* -1: none */
    int send_first;
    const unsigned char *send;
    size_t send_bytes;
    unsigned char *recv;
    size_t recv_bytes;
    void *fold; /* what the received partial sums are folded into; NULL: nothing */
    size_t fold_count;
    int fold_early;           /* nothing of it is still to be sent: folds while more arrives */
    int ahead;                /* may be sent before the step before it has been received */
    uint64_t tag_out, tag_in; /* the same at both ends of a message */
    void (*prepare)(dtrain_comm *comm, dtrain__op *op, size_t k); /* done before any of it moves; may be NULL */
} dtrain__step;

/* Ranks in a row of their own: every stride-th from first on. */
typedef struct dtrain__line {
    int index; /* of this rank in it */
    int size, first, stride;
} dtrain__line;

static int dtrain__line_rank(const dtrain__line *line, int index)
{
    return line->first + index * line->stride;
}

static dtrain__line dtrain__line_of(const dtrain_comm *comm)
{
    dtrain__line line = {comm->rank, comm->size, 0, 1};
    return line;
}

/* The number of bits that ranks below size have. */
static int dtrain__step_levels(int size)
{
    int levels = 0;
    while ((1 << levels) < size)
        levels++;
    return levels;
}

static int dtrain__step_power_of_two(int size)
{
    return (size & (size - 1)) == 0;
}

/* Where partial sums are kept, all of them in the partial dtype. */
static dtrain_dtype dtrain__step_dtype(const dtrain__op *op)
{
    return dtrain__op_reduces(op) ? dtrain__fold_partial(op->dtype) : op->dtype;
}

static size_t dtrain__step_width(const dtrain__op *op)
{
    return dtrain_dtype_bits(dtrain__step_dtype(op)) / 8;
}

/* Of elements as the caller has them. */
static size_t dtrain__step_out_width(const dtrain__op *op)
{
    return dtrain_dtype_bits(op->dtype) / 8;
}

static size_t dtrain__step_line(size_t bytes)
{
    return (bytes + DTRAIN__CACHE_LINE - 1) / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE;
}

/* Plans that keep partial sums of the whole vector have scratch = [these, unless they are in out | what was received].
 */
static size_t dtrain__step_half(const dtrain__op *op)
{
    return dtrain__step_line(op->count * dtrain__step_width(op));
}

static int dtrain__step_holds_in_out(const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_REDUCE && dtrain__step_dtype(op) == op->dtype;
}

static unsigned char *dtrain__step_held(const dtrain_comm *comm, const dtrain__op *op)
{
    return dtrain__step_holds_in_out(op) ? (unsigned char *)op->out : comm->scratch;
}

static unsigned char *dtrain__step_received(const dtrain_comm *comm, const dtrain__op *op)
{
    return comm->scratch + (dtrain__step_holds_in_out(op) ? 0 : dtrain__step_half(op));
}

static size_t dtrain__step_whole_scratch(const dtrain__op *op)
{
    return (dtrain__step_holds_in_out(op) ? 1 : 2) * dtrain__step_half(op);
}

static void dtrain__step_send(dtrain__step *step, int to, const unsigned char *data, size_t bytes)
{
    step->to = to;
    step->send = data;
    step->send_bytes = bytes;
}

static void dtrain__step_recv(dtrain__step *step, int from, unsigned char *data, size_t bytes)
{
    step->from = from;
    step->recv = data;
    step->recv_bytes = bytes;
}

/* Receives partial sums of `count` elements and folds them into held. */
static void dtrain__step_fold(dtrain__step *step, int from, unsigned char *data, void *held, size_t count, size_t width)
{
    dtrain__step_recv(step, from, data, count * width);
    step->fold = held;
    step->fold_count = count;
}

/* `count` elements of this rank's input, from `begin` on, as partial sums. */
static void dtrain__step_widen(const dtrain__op *op, size_t begin, size_t count, void *out)
{
    dtrain_dtype partial = dtrain__step_dtype(op);
    const unsigned char *in = (const unsigned char *)op->in + begin * dtrain__step_out_width(op);
    if (partial != op->dtype)
        dtrain_convert(in, op->dtype, out, partial, count);
    else if (in != out && count > 0)
        memcpy(out, in, count * dtrain__step_width(op));
}

#endif

/* ---- >>tree ----
 * Plans that move whole vectors in a logarithmic number of steps: up and down a binomial tree, recursive doubling,
 * node by node. Every sum is one of the balanced tree's, except where ranks of a node are no power of two. And the
 * double binary tree, which has an order of its own.
 *
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; double tree: Sanders, Speck, Traeff, Parallel Computing
 * 35(12), 2009. */
#ifndef DTRAIN__TREE
#define DTRAIN__TREE

/* One level of the binomial tree over a line rotated so that root comes first: pairs at a distance of 2^level. */
static void dtrain__tree_level(const dtrain_comm *comm, const dtrain__op *op, const dtrain__line *line, int root,
                               int level, int down, dtrain__step *step)
{
    size_t width = dtrain__step_width(op);
    int index = (line->index - root + line->size) % line->size, distance = 1 << level;
    int low = index % (2 * distance) == 0 && index + distance < line->size;
    int high = index % (2 * distance) == distance;
    int other = ((low ? index + distance : index - distance) + root) % line->size;
    int peer = dtrain__line_rank(line, other);
    unsigned char *held = op->kind == DTRAIN__BROADCAST ? (unsigned char *)op->out : dtrain__step_held(comm, op);
    if ((down && low) || (!down && high))
        dtrain__step_send(step, peer, held, op->count * width);
    else if (down && high)
        dtrain__step_recv(step, peer, held, op->count * width);
    else if (low)
        dtrain__step_fold(step, peer, dtrain__step_received(comm, op), held, op->count, width);
    step->fold_early = step->fold != NULL;
}

static void dtrain__tree_double(const dtrain_comm *comm, const dtrain__op *op, const dtrain__line *line, int level,
                                dtrain__step *step)
{
    int peer = dtrain__line_rank(line, line->index ^ (1 << level));
    unsigned char *held = dtrain__step_held(comm, op);
    dtrain__step_send(step, peer, held, op->count * dtrain__step_width(op));
    dtrain__step_fold(step, peer, dtrain__step_received(comm, op), held, op->count, dtrain__step_width(op));
    step->send_first = comm->rank < peer;
}

/* Up to rank 0 and down again; a broadcast only down, from its root; a reduce only up, and from rank 0 to its root
 * unless any order will do. */
static int dtrain__tree_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__line line = dtrain__line_of(comm);
    int levels = dtrain__step_levels(comm->size), any = comm->desc.order == DTRAIN_ORDER_ANY;
    if (op->kind == DTRAIN__BROADCAST) {
        if (k < levels)
            dtrain__tree_level(comm, op, &line, op->root, levels - 1 - k, 1, step);
        return k < levels;
    }
    if (op->kind == DTRAIN__REDUCE) {
        if (k < levels)
            dtrain__tree_level(comm, op, &line, any ? op->root : 0, k, 0, step);
        else if (k == levels && !any && op->root != 0 && comm->rank == 0)
            dtrain__step_send(step, op->root, dtrain__step_held(comm, op), op->count * dtrain__step_width(op));
        else if (k == levels && !any && op->root != 0 && comm->rank == op->root)
            dtrain__step_recv(step, 0, dtrain__step_held(comm, op), op->count * dtrain__step_width(op));
        return k <= levels;
    }
    if (k < 2 * levels)
        dtrain__tree_level(comm, op, &line, 0, k < levels ? k : 2 * levels - 1 - k, k >= levels, step);
    return k < 2 * levels;
}

static int dtrain__tree_doubling(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__line line = dtrain__line_of(comm);
    if (k >= dtrain__step_levels(comm->size))
        return 0;
    dtrain__tree_double(comm, op, &line, k, step);
    return 1;
}

/* To the first rank of each node, between these, and back. */
static int dtrain__tree_nodes(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int ranks = comm->node_ranks, first = comm->rank - comm->rank % ranks, nodes = (comm->size + ranks - 1) / ranks;
    int here = comm->size - first < ranks ? comm->size - first : ranks;
    dtrain__line inner = {comm->rank - first, here, first, 1}, outer = {comm->rank / ranks, nodes, 0, ranks};
    int in = dtrain__step_levels(ranks), out = dtrain__step_levels(nodes);
    int doubles = dtrain__step_power_of_two(nodes), between = doubles ? out : 2 * out;
    if (k >= 2 * in + between)
        return 0;
    if (k < in)
        dtrain__tree_level(comm, op, &inner, 0, k, 0, step);
    else if (k >= in + between)
        dtrain__tree_level(comm, op, &inner, 0, 2 * in + between - 1 - k, 1, step);
    else if (comm->rank == first && doubles)
        dtrain__tree_double(comm, op, &outer, k - in, step);
    else if (comm->rank == first)
        dtrain__tree_level(comm, op, &outer, 0, k - in < out ? k - in : 2 * out - 1 - (k - in), k - in >= out, step);
    return 1;
}

/* A rank's neighbours in the binary tree whose in-order walk is the ranks; -1: none. */
typedef struct dtrain__branch {
    int parent, child[2];
} dtrain__branch;

static dtrain__branch dtrain__tree_branch(int index, int size)
{
    dtrain__branch branch = {-1, {-1, -1}};
    int bit = 1, below;
    while (bit < size && (index & bit) == 0)
        bit *= 2;
    if (index > 0) {
        branch.parent = (index ^ bit) | (2 * bit);
        if (branch.parent >= size)
            branch.parent = index ^ bit;
        branch.child[0] = bit > 1 ? index - bit / 2 : -1;
    }
    for (below = bit / 2; below > 0 && index + below >= size;)
        below /= 2;
    if (below > 0)
        branch.child[1] = index + below;
    return branch;
}

/* Pieces go alternately up and down two trees; who is inside one is a leaf of the other, or nearly. */
static int dtrain__tree_two(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__step_width(op), most = DTRAIN__BLOCK_BYTES / width, begin, n;
    size_t pieces = op->count / most + 1, index = (size_t)k / 3 % pieces;
    int down = (size_t)k >= 3 * pieces, mirror = index % 2 == 1, turn = k % 3, size = comm->size, peer;
    if ((size_t)k >= 6 * pieces)
        return 0;
    dtrain__branch branch = dtrain__tree_branch(mirror ? size - 1 - comm->rank : comm->rank, size);
    begin = index * most;
    n = op->count - begin < most ? op->count - begin : most;
    unsigned char *held = dtrain__step_held(comm, op) + begin * width;
    peer = (down ? turn == 0 : turn == 2) ? branch.parent : branch.child[down ? turn - 1 : turn];
    if (peer < 0)
        return 1;
    peer = mirror ? size - 1 - peer : peer;
    if (down ? turn > 0 : turn == 2)
        dtrain__step_send(step, peer, held, n * width);
    else if (down)
        dtrain__step_recv(step, peer, held, n * width);
    else
        dtrain__step_fold(step, peer, dtrain__step_received(comm, op), held, n, width);
    step->fold_early = step->fold != NULL;
    step->tag_out = step->tag_in = index << 1 | (uint64_t)down;
    return 1;
}

#endif

/* ---- >>ring ----
 * Plans in which every rank sends to its right neighbour and receives from its left one only, at full bandwidth:
 * reductions in an order of their own, all-gather, and broadcast in pieces.
 *
 * Source: Patarasuk, Yuan, J. Parallel Distrib. Comput. 69(2), 2009. */
#ifndef DTRAIN__RING
#define DTRAIN__RING

/* Step k: block rank - k - 1 goes to the right, the one before it comes from the left and is folded, until this
 * rank's own is complete; then complete blocks go round. An all-gather does the second half, a reduce-scatter the
 * first. */
static int dtrain__ring_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int n = comm->size, reduces = dtrain__op_reduces(op), gathers = !reduces || k >= n - 1;
    int turn = gathers && reduces ? k - (n - 1) : k, shift = gathers ? 0 : 1;
    size_t width = dtrain__step_width(op);
    unsigned char *held = reduces ? dtrain__step_held(comm, op) : (unsigned char *)op->out;
    if (k >= (op->kind == DTRAIN__ALL_REDUCE ? 2 : 1) * (n - 1))
        return 0;
    const dtrain__extent *out = &comm->parts[(comm->rank - shift - turn + 2 * n) % n];
    const dtrain__extent *in = &comm->parts[(comm->rank - shift - turn - 1 + 2 * n) % n];
    int left = (comm->rank + n - 1) % n;
    dtrain__step_send(step, (comm->rank + 1) % n, held + out->begin * width, out->count * width);
    if (gathers)
        dtrain__step_recv(step, left, held + in->begin * width, in->count * width);
    else
        dtrain__step_fold(step, left, dtrain__step_received(comm, op), held + in->begin * width, in->count, width);
    step->fold_early = !gathers;
    step->send_first = comm->rank % 2 == 0;
    return 1;
}

/* A broadcast in pieces from rank to rank: step k takes in piece k and sends on the one before it. */
static int dtrain__ring_broadcast(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__step_out_width(op), most = DTRAIN__BLOCK_BYTES / width, at = (size_t)k;
    size_t pieces = op->count > 0 ? (op->count - 1) / most + 1 : 1;
    int index = (comm->rank - op->root + comm->size) % comm->size;
    unsigned char *data = (unsigned char *)op->out;
    step->send_first = 1;
    if (at < pieces && index > 0) {
        size_t n = op->count - at * most < most ? op->count - at * most : most;
        dtrain__step_recv(step, (comm->rank + comm->size - 1) % comm->size, data + at * most * width, n * width);
        step->tag_in = at;
    }
    if (at > 0 && at <= pieces && index < comm->size - 1) {
        size_t n = op->count - (at - 1) * most < most ? op->count - (at - 1) * most : most;
        dtrain__step_send(step, (comm->rank + 1) % comm->size, data + (at - 1) * most * width, n * width);
        step->tag_out = at - 1;
    }
    return at <= pieces;
}

#endif

/* ---- >>halving ----
 * The plan for large all-reduces: recursive halving, then doubling, in pieces that stay in the cache.
 *
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; binary blocks: Rabenseifner, ICCS 2004. */
#ifndef DTRAIN__HALVING_PLAN
#define DTRAIN__HALVING_PLAN

/* Rank's place in the binary blocks of a world: powers of two, largest first, as the tree order splits it. */
typedef struct dtrain__blocks {
    int first, size, levels; /* of this rank's block */
    int index;               /* of the rank in it */
    int next_size;           /* of the block after it; 0: none */
    int previous_size;       /* of the one before; 0: none */
} dtrain__blocks;

static dtrain__blocks dtrain__halving_blocks(int rank, int ranks)
{
    dtrain__blocks blocks = {0, 1, 0, 0, 0, 0};
    for (;;) {
        int left = ranks - blocks.first;
        for (blocks.size = 1; 2 * blocks.size <= left;)
            blocks.size *= 2;
        if (rank < blocks.first + blocks.size)
            break;
        blocks.previous_size = blocks.size;
        blocks.first += blocks.size;
    }
    int after = ranks - blocks.first - blocks.size;
    while (after > 0 && 2 * blocks.next_size <= after)
        blocks.next_size = blocks.next_size > 0 ? 2 * blocks.next_size : 1;
    blocks.index = rank - blocks.first;
    while ((1 << blocks.levels) < blocks.size)
        blocks.levels++;
    return blocks;
}

typedef struct dtrain__part {
    size_t begin, end;
} dtrain__part;

/* What is left to the index-th of a block's ranks after `halvings` halvings of n elements. Cuts lie on cache
 * lines of the output, whatever the partial sums are. */
static dtrain__part dtrain__halving_part(int index, int halvings, size_t n)
{
    dtrain__part range = {0, n};
    for (int level = 0; level < halvings; level++) {
        size_t middle = range.begin + (range.end - range.begin + 1) / 2;
        middle = (middle + 63) / 64 * 64;
        middle = middle < range.end ? middle : range.end;
        if (index >> level & 1)
            range.begin = middle;
        else
            range.end = middle;
    }
    return range;
}

/* Where step k of a halving-doubling stands. */
typedef struct dtrain__halving {
    dtrain__blocks blocks;
    size_t begin, n;     /* elements of the whole that this piece of work covers */
    unsigned char *held; /* its partial sums, n of them */
    unsigned char *out;  /* its results */
    unsigned char *recv;
    int step, up, down, doubling, steps; /* this step; where the phases begin; steps of one piece */
    int paired;                          /* another piece is under way in turn with this one */
} dtrain__halving;

/* Pieces under way at once. Between hosts one moves while the other is folded or on its way; on one host that would
 * only drive both out of the cache. */
static size_t dtrain__halving_lanes(const dtrain_comm *comm)
{
    return comm->node_ranks == comm->size ? 1 : 2;
}

/* Elements of one piece: as many pieces as lanes take turns at, about as large as each other. */
static size_t dtrain__halving_piece(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t bytes = DTRAIN__BLOCK_BYTES * (size_t)comm->size, lanes = dtrain__halving_lanes(comm), most, turns;
    bytes = lanes == 1 ? DTRAIN__BLOCK_ALONE : bytes < DTRAIN__BLOCK_MOST ? bytes : DTRAIN__BLOCK_MOST;
    most = bytes / dtrain__step_width(op);
    turns = (op->count > 0 ? op->count - 1 : 0) / (lanes * most) + 1;
    return (op->count / (lanes * turns) / 64 + 1) * 64;
}

/* Returns 0 when there is no such step. Steps of the two pieces of a pair alternate, so that each step waits for
 * nothing later than the one before the last. */
static int dtrain__halving_where(const dtrain_comm *comm, const dtrain__op *op, size_t k, dtrain__halving *at)
{
    size_t width = dtrain__step_out_width(op), piece = dtrain__halving_piece(comm, op);
    size_t lanes = dtrain__halving_lanes(comm), group, turn, index;
    int peers;
    at->blocks = dtrain__halving_blocks(comm->rank, comm->size);
    peers = at->blocks.previous_size / at->blocks.size;
    at->up = at->blocks.levels + (at->blocks.next_size > 0);
    at->down = at->up + peers;
    at->doubling = at->down + peers + (at->blocks.next_size > 0);
    at->steps = at->doubling + at->blocks.levels;
    group = k / (lanes * (size_t)at->steps);
    turn = k % (lanes * (size_t)at->steps);
    at->paired = lanes == 2 && (2 * group + 1) * piece < op->count;
    index = lanes * group + (at->paired ? turn % 2 : 0);
    at->step = (int)(at->paired ? turn / 2 : turn);
    at->begin = index * piece;
    if (at->begin >= op->count || at->step >= at->steps)
        return 0;
    at->n = op->count - at->begin < piece ? op->count - at->begin : piece;
    at->out = (unsigned char *)op->out + at->begin * width;
    at->recv = comm->scratch;
    at->held = dtrain__step_dtype(op) == op->dtype
                   ? at->out
                   : comm->scratch + DTRAIN__MESSAGE_CHUNK + index % lanes * piece * dtrain__step_width(op);
    return 1;
}

static void dtrain__halving_send(dtrain__step *step, int to, unsigned char *base, dtrain__part range, size_t width)
{
    dtrain__step_send(step, to, base + range.begin * width, (range.end - range.begin) * width);
}

static void dtrain__halving_recv(dtrain__step *step, int from, unsigned char *base, dtrain__part range, size_t width)
{
    dtrain__step_recv(step, from, base + range.begin * width, (range.end - range.begin) * width);
}

static void dtrain__halving_fold(dtrain__step *step, int from, const dtrain__halving *at, dtrain__part range,
                                 size_t width)
{
    dtrain__part all = {0, range.end - range.begin};
    dtrain__halving_recv(step, from, at->recv, all, width);
    step->fold = at->held + range.begin * width;
    step->fold_count = all.end;
    step->fold_early = 1;
}

/* Between binary blocks: the smaller one's partial sums go up to the larger one, the results come down again. */
static void dtrain__halving_between(const dtrain__op *op, const dtrain__halving *at, dtrain__step *step)
{
    const dtrain__blocks *b = &at->blocks;
    size_t wide = dtrain__step_width(op), width = dtrain__step_out_width(op);
    dtrain__part mine = dtrain__halving_part(b->index, b->levels, at->n);
    int next = b->next_size > 0 ? b->first + b->size + b->index % b->next_size : -1;
    int turn = at->step < at->down ? at->step - at->up : at->step - at->down;
    int index = b->index + turn * b->size, levels = 0, previous = b->first - b->previous_size + index;
    while ((1 << levels) < b->previous_size)
        levels++;
    if (at->step < at->up)
        dtrain__halving_fold(step, next, at, mine, wide);
    else if (at->step < at->down)
        dtrain__halving_send(step, previous, at->held, dtrain__halving_part(index, levels, at->n), wide);
    else if (index < b->previous_size)
        dtrain__halving_recv(step, previous, at->out, dtrain__halving_part(index, levels, at->n), width);
    else
        dtrain__halving_send(step, next, at->out, mine, width);
}

/* Loads a piece before its first step, and turns this rank's own sums into results before they are passed on. */
static void dtrain__halving_prepare(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    dtrain__halving at;
    if (!dtrain__halving_where(comm, op, k, &at))
        return;
    if (at.step == 0)
        dtrain__step_widen(op, at.begin, at.n, at.held);
    if (at.step == at.up && at.blocks.previous_size == 0) {
        dtrain__part mine = dtrain__halving_part(at.blocks.index, at.blocks.levels, at.n);
        dtrain__fold_finish(op->dtype, op->op, comm->size, at.held + mine.begin * dtrain__step_width(op),
                            at.out + mine.begin * dtrain__step_out_width(op), mine.end - mine.begin);
    }
}

/* Recursive halving, then doubling, at distances 1, 2, 4, ..., in pieces that stay in the cache. Neighbours fold
 * first and the lower block of ranks is the left operand, so the sums are the tree's. Where the world is no power
 * of two, binary blocks each do so and hand their partial sums to the next larger one. */
static int dtrain__halving_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__halving at;
    size_t wide = dtrain__step_width(op), width = dtrain__step_out_width(op);
    if (!dtrain__halving_where(comm, op, (size_t)k, &at))
        return 0;
    int level = at.step < at.blocks.levels ? at.step : at.step >= at.doubling ? at.steps - 1 - at.step : 0;
    int peer_index = at.blocks.index ^ (1 << level), peer = at.blocks.first + peer_index;
    step->tag_out = step->tag_in = at.begin << 8 | (uint64_t)(at.step < at.blocks.levels ? at.step : 128 + level);
    step->send_first = comm->rank < peer;
    step->ahead = at.paired;
    step->prepare = dtrain__halving_prepare;
    if (at.step < at.blocks.levels) {
        dtrain__halving_send(step, peer, at.held, dtrain__halving_part(peer_index, level + 1, at.n), wide);
        dtrain__halving_fold(step, peer, &at, dtrain__halving_part(at.blocks.index, level + 1, at.n), wide);
    } else if (at.step >= at.doubling) {
        dtrain__halving_send(step, peer, at.out, dtrain__halving_part(at.blocks.index, level + 1, at.n), width);
        dtrain__halving_recv(step, peer, at.out, dtrain__halving_part(peer_index, level + 1, at.n), width);
    } else {
        step->tag_out = step->tag_in = at.begin << 8 | 64;
        dtrain__halving_between(op, &at, step);
    }
    return 1;
}

static size_t dtrain__halving_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t piece = dtrain__halving_piece(comm, op) * dtrain__step_width(op);
    return DTRAIN__MESSAGE_CHUNK + (dtrain__step_dtype(op) == op->dtype ? 0 : dtrain__halving_lanes(comm) * piece);
}

#endif

/* ---- >>bruck ----
 * Plans of ceil(log2 n) steps for any number of ranks, for small vectors: after step k a rank holds what 2^(k+1)
 * ranks had, in slots of scratch that begin with its own. At the end it holds all, and copies them to their places
 * (all-gather) or folds them itself in the tree order (all-reduce). Without data it is a barrier.
 *
 * Source: Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 8(11), 1997; barrier: Hensgen, Finkel, Manber, Int. J.
 * Parallel Programming 17(1), 1988. */
#ifndef DTRAIN__BRUCK
#define DTRAIN__BRUCK

/* Elements before slot number `slot`. */
static size_t dtrain__bruck_slot(const dtrain_comm *comm, const dtrain__op *op, int slot)
{
    size_t begin = 0;
    if (op->kind == DTRAIN__BARRIER)
        return 0;
    if (op->kind == DTRAIN__ALL_REDUCE)
        return (size_t)slot * op->count;
    for (int i = 0; i < slot; i++)
        begin += comm->parts[(comm->rank + i) % comm->size].count;
    return begin;
}

static size_t dtrain__bruck_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    return dtrain__bruck_slot(comm, op, comm->size) * dtrain__step_out_width(op);
}

static void dtrain__bruck_begin(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t bytes = dtrain__bruck_slot(comm, op, 1) * dtrain__step_out_width(op);
    (void)k;
    if (bytes > 0)
        memcpy(comm->scratch, op->in, bytes);
}

static void dtrain__bruck_end(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t width = dtrain__step_out_width(op);
    if (k == 0)
        dtrain__bruck_begin(comm, op, k);
    for (int i = 0; i < comm->size; i++) {
        int rank = (comm->rank + i) % comm->size;
        const unsigned char *slot = comm->scratch + dtrain__bruck_slot(comm, op, i) * width;
        comm->ins[rank] = slot;
        if (op->kind == DTRAIN__ALL_GATHER && comm->parts[rank].count > 0)
            memcpy((unsigned char *)op->out + comm->parts[rank].begin * width, slot, comm->parts[rank].count * width);
    }
    if (op->kind == DTRAIN__ALL_REDUCE && op->count > 0)
        dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, &op->out, 1, 0, op->count);
}

static int dtrain__bruck_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int n = comm->size, levels = dtrain__step_levels(n), distance = 1 << k;
    size_t width = dtrain__step_out_width(op);
    if (k >= levels) {
        step->prepare = op->kind == DTRAIN__BARRIER ? NULL : dtrain__bruck_end;
        return k == levels;
    }
    int slots = distance < n - distance ? distance : n - distance;
    size_t begin = dtrain__bruck_slot(comm, op, distance), end = dtrain__bruck_slot(comm, op, distance + slots);
    dtrain__step_send(step, (comm->rank + n - distance) % n, comm->scratch,
                      dtrain__bruck_slot(comm, op, slots) * width);
    dtrain__step_recv(step, (comm->rank + distance) % n, comm->scratch + begin * width, (end - begin) * width);
    step->send_first = comm->rank / distance % 2 == 0;
    step->prepare = k == 0 && op->kind != DTRAIN__BARRIER ? dtrain__bruck_begin : NULL;
    return 1;
}

#endif

/* ---- >>direct ----
 * Plans in which every pair of ranks exchanges once, in rounds of disjoint pairs: all-to-all and all-gather; and
 * reductions in which each rank receives its part of everybody's input and folds all of them in one pass, in the
 * tree order, in the dtype they came in. Gather and scatter are one message for each rank but the root.
 *
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005. */
#ifndef DTRAIN__DIRECT_PLAN
#define DTRAIN__DIRECT_PLAN

static int dtrain__direct_rounds(const dtrain_comm *comm)
{
    return dtrain__step_power_of_two(comm->size) ? comm->size - 1 : comm->size;
}

/* Whom this rank meets in a round: it meets this rank in the same one. May be the rank itself. */
static int dtrain__direct_peer(const dtrain_comm *comm, int round)
{
    if (dtrain__step_power_of_two(comm->size))
        return comm->rank ^ (round + 1);
    return (round - comm->rank + comm->size) % comm->size;
}

/* Reductions go block by block: the same elements of every part. */
typedef struct dtrain__direct {
    size_t most, blocks; /* elements of each part in a block; blocks */
    size_t block;        /* this one */
    int turn, turns;     /* step in the block, and how many it has */
} dtrain__direct;

/* Elements of `rank`'s part in the block. */
static size_t dtrain__direct_count(const dtrain_comm *comm, const dtrain__direct *at, int rank)
{
    size_t begin = at->block * at->most, count = comm->parts[rank].count;
    return count <= begin ? 0 : count - begin < at->most ? count - begin : at->most;
}

static size_t dtrain__direct_most(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t all = DTRAIN__BLOCK_MOST / (size_t)comm->size, most = DTRAIN__BLOCK_BYTES, longest = 0;
    most = (most < all ? most : all) / dtrain__step_out_width(op) / 64 * 64;
    for (int rank = 0; rank < comm->size; rank++)
        longest = comm->parts[rank].count > longest ? comm->parts[rank].count : longest;
    most = most > 0 ? most : 64;
    return longest < most ? longest : most;
}

static size_t dtrain__direct_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t width = dtrain__step_out_width(op), longest = 0;
    if (dtrain__op_reduces(op))
        return (size_t)comm->size * dtrain__step_line(dtrain__direct_most(comm, op) * width);
    for (int rank = 0; op->kind == DTRAIN__ALL_TO_ALL && op->in == op->out && rank < comm->size; rank++)
        longest = comm->others[rank].count > longest ? comm->others[rank].count : longest;
    return longest * width;
}

static unsigned char *dtrain__direct_slot(const dtrain_comm *comm, const dtrain__op *op, const dtrain__direct *at,
                                          int rank)
{
    return comm->scratch + (size_t)rank * dtrain__step_line(at->most * dtrain__step_out_width(op));
}

/* Where the block of this rank's part of the result goes. */
static unsigned char *dtrain__direct_result(const dtrain_comm *comm, const dtrain__op *op, const dtrain__direct *at)
{
    size_t begin = op->kind == DTRAIN__REDUCE_SCATTER ? 0 : comm->parts[comm->rank].begin;
    if (op->kind == DTRAIN__REDUCE && comm->rank != op->root)
        return dtrain__direct_slot(comm, op, at, comm->rank);
    return (unsigned char *)op->out + (begin + at->block * at->most) * dtrain__step_out_width(op);
}

static dtrain__direct dtrain__direct_where(const dtrain_comm *comm, const dtrain__op *op, size_t k)
{
    dtrain__direct at;
    size_t longest = 0;
    int rounds = dtrain__direct_rounds(comm), root = comm->rank == op->root;
    at.most = dtrain__direct_most(comm, op);
    for (int rank = 0; rank < comm->size; rank++)
        longest = comm->parts[rank].count > longest ? comm->parts[rank].count : longest;
    at.blocks = longest > 0 ? (longest - 1) / at.most + 1 : 1;
    at.turns = rounds + 1;
    if (op->kind == DTRAIN__ALL_REDUCE)
        at.turns += rounds;
    else if (op->kind == DTRAIN__REDUCE)
        at.turns += root ? comm->size : 1;
    at.block = k / (size_t)at.turns;
    at.turn = (int)(k % (size_t)at.turns);
    return at;
}

/* Folds the block of this rank's part of everybody's input. */
static void dtrain__direct_fold(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    dtrain__direct at = dtrain__direct_where(comm, op, k);
    size_t begin = comm->parts[comm->rank].begin + at.block * at.most, n = dtrain__direct_count(comm, &at, comm->rank);
    void *result = dtrain__direct_result(comm, op, &at);
    for (int rank = 0; rank < comm->size; rank++)
        comm->ins[rank] = dtrain__direct_slot(comm, op, &at, rank);
    comm->ins[comm->rank] = (const unsigned char *)op->in + begin * dtrain__step_out_width(op);
    if (n > 0)
        dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, &result, 1, 0, n);
}

static int dtrain__direct_reduce(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__direct at = dtrain__direct_where(comm, op, (size_t)k);
    int rounds = dtrain__direct_rounds(comm), gathers = at.turn > rounds, round = at.turn - (gathers ? rounds + 1 : 0);
    size_t width = dtrain__step_out_width(op), mine = dtrain__direct_count(comm, &at, comm->rank) * width, theirs;
    if (at.block >= at.blocks)
        return 0;
    step->tag_out = step->tag_in = at.block << 12 | (uint64_t)(op->kind == DTRAIN__REDUCE && gathers ? 4095 : at.turn);
    if (at.turn == rounds) {
        step->prepare = dtrain__direct_fold;
        return 1;
    }
    int root = op->kind == DTRAIN__REDUCE && gathers;
    int peer = !root ? dtrain__direct_peer(comm, round) : comm->rank == op->root ? round : op->root;
    if (peer == comm->rank)
        return 1;
    theirs = dtrain__direct_count(comm, &at, peer) * width;
    unsigned char *place = (unsigned char *)op->out + (comm->parts[peer].begin + at.block * at.most) * width;
    const unsigned char *given = (const unsigned char *)op->in + (comm->parts[peer].begin + at.block * at.most) * width;
    step->send_first = comm->rank < peer;
    if (!gathers || comm->rank != op->root || op->kind == DTRAIN__ALL_REDUCE)
        dtrain__step_send(step, peer, gathers ? dtrain__direct_result(comm, op, &at) : given, gathers ? mine : theirs);
    if (!gathers)
        dtrain__step_recv(step, peer, dtrain__direct_slot(comm, op, &at, peer), mine);
    else if (op->kind == DTRAIN__ALL_REDUCE || comm->rank == op->root)
        dtrain__step_recv(step, peer, place, theirs);
    return 1;
}

/* In place, a block that has come lies in scratch until the one that went is gone. */
static void dtrain__direct_place(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t width = dtrain__step_out_width(op);
    int peer = dtrain__direct_peer(comm, (int)k - 1);
    if (peer != comm->rank && comm->others[peer].count > 0)
        memcpy((unsigned char *)op->out + comm->others[peer].begin * width, comm->scratch,
               comm->others[peer].count * width);
}

static int dtrain__direct_pairs(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int rounds = dtrain__direct_rounds(comm), all_to_all = op->kind == DTRAIN__ALL_TO_ALL;
    int in_place = all_to_all && op->in == op->out;
    int peer = k < rounds ? dtrain__direct_peer(comm, k) : comm->rank;
    size_t width = dtrain__step_out_width(op);
    const dtrain__extent *out = all_to_all ? &comm->parts[peer] : &comm->parts[comm->rank];
    const dtrain__extent *in = all_to_all ? &comm->others[peer] : &comm->parts[peer];
    const unsigned char *from = (const unsigned char *)(all_to_all ? op->in : op->out);
    if (in_place && k > 0)
        step->prepare = dtrain__direct_place;
    if (k >= rounds || peer == comm->rank)
        return k < rounds + in_place;
    dtrain__step_send(step, peer, from + out->begin * width, out->count * width);
    dtrain__step_recv(step, peer, in_place ? comm->scratch : (unsigned char *)op->out + in->begin * width,
                      in->count * width);
    step->send_first = comm->rank < peer;
    return 1;
}

/* One message between the root and each other rank. */
static int dtrain__direct_root(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__step_out_width(op);
    int root = comm->rank == op->root, rank = root ? k : comm->rank, gather = op->kind == DTRAIN__GATHER;
    const dtrain__extent *part = &comm->parts[rank < comm->size ? rank : 0];
    size_t begin = root ? part->begin * width : 0;
    if (k >= (root ? comm->size : 1))
        return 0;
    step->tag_out = step->tag_in = 0;
    if (root && k == comm->rank)
        return 1;
    if (gather != root)
        dtrain__step_send(step, root ? rank : op->root, (const unsigned char *)op->in + begin, part->count * width);
    else
        dtrain__step_recv(step, root ? rank : op->root, (unsigned char *)op->out + begin, part->count * width);
    return 1;
}

#endif

/* ---- >>plan ----
 * Which plan an operation follows: asked for by name, or selected by kind, size and number of ranks, so that all
 * ranks come to the same. */
#ifndef DTRAIN__PLAN
#define DTRAIN__PLAN

#define DTRAIN__PLAN_BRUCK ((size_t)64 << 10) /* bytes that a rank may hold of everybody's */
#define DTRAIN__PLAN_WHOLE ((size_t)32 << 10) /* bytes that are reduced in few whole messages */
#define DTRAIN__PLAN_PIPE ((size_t)2 << 20)   /* bytes above which a broadcast goes from rank to rank */

/* Keeps partial sums of the whole vector: loaded before the first step, finished after the last. */
static int dtrain__plan_whole(const dtrain__op *op)
{
    return dtrain__op_reduces(op) && op->algorithm != DTRAIN_ALGORITHM_HALVING_DOUBLING &&
           op->algorithm != DTRAIN_ALGORITHM_DIRECT && op->algorithm != DTRAIN_ALGORITHM_BRUCK;
}

static size_t dtrain__plan_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    switch (op->algorithm) {
    case DTRAIN_ALGORITHM_HALVING_DOUBLING: return dtrain__halving_scratch(comm, op);
    case DTRAIN_ALGORITHM_DIRECT: return dtrain__direct_scratch(comm, op);
    case DTRAIN_ALGORITHM_BRUCK: return dtrain__bruck_scratch(comm, op);
    default: return dtrain__plan_whole(op) ? dtrain__step_whole_scratch(op) : 0;
    }
}

/* A message of the caller's own, or two that cross. */
static int dtrain__plan_message(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__step_out_width(op);
    if (op->kind != DTRAIN__RECV && op->root >= 0)
        dtrain__step_send(step, op->root, (const unsigned char *)op->in, op->count * width);
    if (op->kind == DTRAIN__RECV)
        dtrain__step_recv(step, op->root, (unsigned char *)op->out, op->count * width);
    else if (op->kind == DTRAIN__EXCHANGE && op->from >= 0)
        dtrain__step_recv(step, op->from, (unsigned char *)op->out, op->in_count * width);
    step->send_first = comm->rank < op->root;
    step->tag_out = step->tag_in = 0;
    return k == 0;
}

/* Fills in step k of an operation; returns 0 when there is none. */
static int dtrain__plan_step(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    memset(step, 0, sizeof *step);
    step->to = step->from = -1;
    step->tag_out = step->tag_in = (uint64_t)k;
    if (dtrain__op_is_message(op))
        return dtrain__plan_message(comm, op, k, step);
    switch (op->algorithm) {
    case DTRAIN_ALGORITHM_RECURSIVE_DOUBLING: return dtrain__tree_doubling(comm, op, k, step);
    case DTRAIN_ALGORITHM_HALVING_DOUBLING: return dtrain__halving_plan(comm, op, k, step);
    case DTRAIN_ALGORITHM_NODES: return dtrain__tree_nodes(comm, op, k, step);
    case DTRAIN_ALGORITHM_DOUBLE_TREE: return dtrain__tree_two(comm, op, k, step);
    case DTRAIN_ALGORITHM_BRUCK: return dtrain__bruck_plan(comm, op, k, step);
    case DTRAIN_ALGORITHM_RING:
        return op->kind == DTRAIN__BROADCAST ? dtrain__ring_broadcast(comm, op, k, step)
                                             : dtrain__ring_plan(comm, op, k, step);
    case DTRAIN_ALGORITHM_DIRECT:
        return dtrain__op_reduces(op)                                      ? dtrain__direct_reduce(comm, op, k, step)
               : op->kind == DTRAIN__GATHER || op->kind == DTRAIN__SCATTER ? dtrain__direct_root(comm, op, k, step)
                                                                           : dtrain__direct_pairs(comm, op, k, step);
    default: return dtrain__tree_plan(comm, op, k, step);
    }
}

/* Whether a kind of operation over messages has a form by this name. */
static int dtrain__plan_exists(const dtrain_comm *comm, dtrain__kind kind, dtrain_algorithm algorithm)
{
    int power_of_two = dtrain__step_power_of_two(comm->size);
    switch (algorithm) {
    case DTRAIN_ALGORITHM_TREE:
        return kind == DTRAIN__ALL_REDUCE || kind == DTRAIN__REDUCE_SCATTER || kind == DTRAIN__REDUCE ||
               kind == DTRAIN__BROADCAST;
    case DTRAIN_ALGORITHM_RECURSIVE_DOUBLING:
        return power_of_two && (kind == DTRAIN__ALL_REDUCE || kind == DTRAIN__REDUCE_SCATTER);
    case DTRAIN_ALGORITHM_RING:
        return kind == DTRAIN__ALL_REDUCE || kind == DTRAIN__REDUCE_SCATTER || kind == DTRAIN__ALL_GATHER ||
               kind == DTRAIN__BROADCAST;
    case DTRAIN_ALGORITHM_HALVING_DOUBLING:
    case DTRAIN_ALGORITHM_DOUBLE_TREE: return kind == DTRAIN__ALL_REDUCE && comm->size > 1;
    case DTRAIN_ALGORITHM_NODES: return kind == DTRAIN__ALL_REDUCE && comm->node_ranks > 0;
    case DTRAIN_ALGORITHM_BRUCK:
        return kind == DTRAIN__ALL_REDUCE || kind == DTRAIN__ALL_GATHER || kind == DTRAIN__BARRIER;
    case DTRAIN_ALGORITHM_DIRECT: return kind != DTRAIN__BROADCAST && kind != DTRAIN__BARRIER;
    default: return 0;
    }
}

/* The largest all-reduce over messages that is faster in few whole steps than in many halves. */
static size_t dtrain__plan_small(int ranks)
{
    size_t kib = !dtrain__step_power_of_two(ranks) ? 32 : ranks == 2 ? 256 : ranks == 4 ? 64 : 128;
    return kib << 10;
}

static dtrain_algorithm dtrain__plan_all_reduce(const dtrain_comm *comm, size_t bytes)
{
    if (comm->size > 1 && bytes > dtrain__plan_small(comm->size))
        return DTRAIN_ALGORITHM_HALVING_DOUBLING;
    if (dtrain__step_power_of_two(comm->size))
        return DTRAIN_ALGORITHM_RECURSIVE_DOUBLING;
    /* fewer steps between hosts, fewer messages on one */
    return comm->node_ranks != comm->size && bytes * (size_t)comm->size <= DTRAIN__PLAN_BRUCK ? DTRAIN_ALGORITHM_BRUCK
                                                                                              : DTRAIN_ALGORITHM_TREE;
}

static dtrain_algorithm dtrain__plan_select(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t bytes = dtrain__op_bytes(op);
    dtrain_algorithm asked = comm->asked[op->kind];
    if (dtrain__op_is_message(op))
        return DTRAIN_ALGORITHM_AUTO;
    if (comm->transport.board != NULL && (asked == DTRAIN_ALGORITHM_AUTO || asked == DTRAIN_ALGORITHM_FUSED))
        return DTRAIN_ALGORITHM_FUSED;
    if (op->counts != NULL && dtrain__op_reduces(op))
        return DTRAIN_ALGORITHM_DIRECT; /* its vector may have gaps */
    if (asked == DTRAIN_ALGORITHM_RECURSIVE_DOUBLING && dtrain__plan_exists(comm, op->kind, DTRAIN_ALGORITHM_TREE) &&
        !dtrain__step_power_of_two(comm->size))
        asked = DTRAIN_ALGORITHM_TREE;
    if (dtrain__plan_exists(comm, op->kind, asked))
        return asked;
    if (comm->transport.board != NULL && !dtrain__op_reduces(op))
        return DTRAIN_ALGORITHM_FUSED;
    switch (op->kind) {
    case DTRAIN__ALL_REDUCE: return dtrain__plan_all_reduce(comm, bytes);
    case DTRAIN__REDUCE_SCATTER:
        if (bytes > (comm->size == 2 ? DTRAIN__MESSAGE_SMALL : DTRAIN__PLAN_WHOLE))
            return DTRAIN_ALGORITHM_DIRECT;
        return dtrain__step_power_of_two(comm->size) ? DTRAIN_ALGORITHM_RECURSIVE_DOUBLING : DTRAIN_ALGORITHM_TREE;
    case DTRAIN__ALL_GATHER:
        return comm->size > 3 && bytes <= DTRAIN__PLAN_BRUCK ? DTRAIN_ALGORITHM_BRUCK : DTRAIN_ALGORITHM_RING;
    case DTRAIN__BROADCAST:
        return bytes <= DTRAIN__PLAN_PIPE || comm->size == 2 ? DTRAIN_ALGORITHM_TREE : DTRAIN_ALGORITHM_RING;
    case DTRAIN__REDUCE: return bytes <= 4 * DTRAIN__PLAN_WHOLE ? DTRAIN_ALGORITHM_TREE : DTRAIN_ALGORITHM_DIRECT;
    case DTRAIN__BARRIER: return DTRAIN_ALGORITHM_BRUCK;
    default: return DTRAIN_ALGORITHM_DIRECT;
    }
}

/* An algorithm's constant from its name; 0 when there is none of that name. */
static int dtrain__plan_named(const char *name, size_t bytes, dtrain_algorithm *algorithm)
{
    for (int value = DTRAIN_ALGORITHM_FUSED - 1; value <= DTRAIN_ALGORITHM_DOUBLE_TREE; value++) {
        dtrain_algorithm one = value < DTRAIN_ALGORITHM_FUSED ? DTRAIN_ALGORITHM_AUTO : (dtrain_algorithm)value;
        const char *text = dtrain__algorithm_name((uint64_t)one);
        if (strlen(text) == bytes && memcmp(text, name, bytes) == 0) {
            *algorithm = one;
            return 1;
        }
    }
    return 0;
}

static dtrain__kind dtrain__plan_kind(const char *name, size_t bytes)
{
    for (int kind = DTRAIN__ALL_REDUCE; kind <= DTRAIN__BARRIER; kind++) {
        const char *text = dtrain__kind_name((uint64_t)kind);
        if (strlen(text) == bytes && memcmp(text, name, bytes) == 0)
            return (dtrain__kind)kind;
    }
    return DTRAIN__KINDS;
}

/* Reads "ring" or "all_reduce=ring,broadcast=tree" into what is asked for. */
static dtrain_status dtrain__plan_ask(dtrain_comm *comm, const char *text)
{
    while (text != NULL && *text != 0) {
        size_t bytes = strcspn(text, ","), kind_bytes = strcspn(text, "=,");
        int every = kind_bytes == bytes;
        dtrain__kind kind = every ? DTRAIN__ALL_REDUCE : dtrain__plan_kind(text, kind_bytes);
        dtrain_algorithm algorithm = DTRAIN_ALGORITHM_AUTO;
        const char *name = every ? text : text + kind_bytes + 1;
        if (kind == DTRAIN__KINDS || !dtrain__plan_named(name, bytes - (size_t)(name - text), &algorithm))
            return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                                "DTRAIN_ALGORITHM: \"%.*s\" is neither an algorithm (auto, fused, recursive_doubling, "
                                "tree, ring, halving_doubling, direct, bruck, nodes, double_tree) nor "
                                "COLLECTIVE=ALGORITHM as in all_reduce=ring,broadcast=tree",
                                (int)(bytes < 60 ? bytes : 60), text);
        for (int k = (int)kind; k <= (every ? DTRAIN__BARRIER : (int)kind); k++)
            if (algorithm != DTRAIN_ALGORITHM_FUSED || comm->transport.board != NULL)
                comm->asked[k] = algorithm;
        text += bytes + (text[bytes] == ',');
    }
    return DTRAIN_OK;
}

#endif

/* ---- >>message ----
 * Collectives over messages. Runs the steps of a plan: what goes out and what comes in move together where the
 * transport can, else in an order of which blocked sends form no cycle; sums are folded while more arrives.
 *
 * Every message carries the call it belongs to; one that does not fit is a mismatch before a byte of its
 * payload is taken. Small payloads travel with their header in one piece. */
#ifndef DTRAIN__MESSAGE
#define DTRAIN__MESSAGE

#define DTRAIN__MESSAGE_MAGIC 0x3147534d4e525444u /* "DTRNMSG1" */
#define DTRAIN__MESSAGE_SLICE_NS 20000000

static int dtrain__message_fail(dtrain_comm *comm, dtrain__op *op)
{
    if (op->error.status != DTRAIN_ERR_TIMEOUT || op->touched) {
        comm->broken = op->error;
        if (comm->transport.board != NULL)
            dtrain__board_break(comm->transport.board, &op->error);
        else if (comm->transport.fail != NULL)
            comm->transport.fail(comm->transport.self, op->error.status, op->error.text);
    }
    return 1;
}

/* Puts what this rank already has of its result in its place. */
static void dtrain__message_own(dtrain_comm *comm, const dtrain__op *op)
{
    size_t width = dtrain__step_out_width(op), count = comm->parts[comm->rank].count;
    size_t begin = comm->parts[comm->rank].begin, from = 0, to = begin;
    int wanted = comm->rank == op->root;
    switch (op->kind) {
    case DTRAIN__ALL_GATHER: wanted = op->algorithm != DTRAIN_ALGORITHM_BRUCK; break;
    case DTRAIN__GATHER: break;
    case DTRAIN__SCATTER: from = begin, to = 0; break;
    case DTRAIN__ALL_TO_ALL: from = begin, to = comm->others[comm->rank].begin, wanted = 1; break;
    default: return;
    }
    if (!wanted || count == 0)
        return;
    unsigned char *target = (unsigned char *)op->out + to * width;
    const unsigned char *source = (const unsigned char *)op->in + from * width;
    if (target != source)
        memmove(target, source, count * width);
}

static void dtrain__message_number(const dtrain_comm *comm, dtrain__op *op)
{
    if (!dtrain__op_is_message(op)) {
        op->number = comm->number + 1;
        return;
    }
    if (op->root >= 0)
        op->number = 1 + (op->kind == DTRAIN__RECV ? comm->received : comm->sent)[op->root];
    if (op->kind == DTRAIN__EXCHANGE && op->from >= 0)
        op->in_number = 1 + comm->received[op->from];
}

/* Returns 1 when the operation has ended already. */
static int dtrain__message_start(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__message_number(comm, op);
    if (comm->broken.status != DTRAIN_OK) {
        dtrain__op_blame(comm, op, &comm->broken);
        return 1;
    }
    dtrain__recorder_start(comm, op);
    dtrain__op_layout(comm, op);
    if (!dtrain__comm_reserve(comm, op, dtrain__plan_scratch(comm, op)))
        return 1;
    if (dtrain__plan_whole(op))
        dtrain__step_widen(op, 0, op->count, dtrain__step_held(comm, op));
    else if (!dtrain__op_is_message(op))
        dtrain__message_own(comm, op);
    op->phase = 1;
    return 0;
}

static int dtrain__message_end(dtrain_comm *comm, dtrain__op *op)
{
    size_t begin = op->kind == DTRAIN__REDUCE_SCATTER ? comm->parts[comm->rank].begin : 0;
    size_t n = op->kind == DTRAIN__REDUCE_SCATTER ? comm->parts[comm->rank].count : op->count;
    if (dtrain__plan_whole(op) && n > 0 && (op->kind != DTRAIN__REDUCE || comm->rank == op->root))
        dtrain__fold_finish(op->dtype, op->op, comm->size, dtrain__step_held(comm, op) + begin * dtrain__step_width(op),
                            op->out, n);
    if (!dtrain__op_is_message(op))
        comm->number = op->number;
    else if (op->root >= 0)
        (op->kind == DTRAIN__RECV ? comm->received : comm->sent)[op->root] = op->number;
    if (op->kind == DTRAIN__EXCHANGE && op->from >= 0)
        comm->received[op->from] = op->in_number;
    return 1;
}

/* Where header and small payload of one direction are; messages of a queue move together and have their own. */
static unsigned char *dtrain__message_letter(dtrain_comm *comm, const dtrain__op *op, int sending)
{
    return op->letter != NULL ? op->letter : sending ? comm->message_out : comm->message_in;
}

/* Goes on with a checksum over more data; changes when any 8 bytes in line do. */
static uint64_t dtrain__message_sum(uint64_t sum, const unsigned char *data, size_t bytes)
{
    static const uint64_t odd = 0x9e3779b97f4a7c15u;
    uint64_t lane[4] = {sum + 1, sum + 2, sum + 3, sum + 4}, word[4];
    sum = (sum + bytes) * odd;
    while (bytes > 0) {
        size_t n = bytes < sizeof word ? bytes : sizeof word;
        if (n < sizeof word)
            memset(word, 0, sizeof word);
        memcpy(word, data, n);
        for (int i = 0; i < 4; i++) {
            lane[i] = (lane[i] ^ word[i]) * odd;
            lane[i] ^= lane[i] >> 29;
        }
        data += n;
        bytes -= n;
    }
    for (int i = 0; i < 4; i++) {
        sum = (sum ^ lane[i]) * odd;
        sum ^= sum >> 32;
    }
    return sum;
}

/* Of a whole message's data, in the pieces that a receiver may have of them. Never 0. */
static uint64_t dtrain__message_sum_all(const unsigned char *data, size_t bytes)
{
    uint64_t sum = 0;
    for (size_t at = 0; at < bytes; at += DTRAIN__MESSAGE_CHUNK)
        sum = dtrain__message_sum(sum, data + at,
                                  bytes - at < DTRAIN__MESSAGE_CHUNK ? bytes - at : DTRAIN__MESSAGE_CHUNK);
    return sum | 1;
}

static uint64_t dtrain__message_header_sum(const dtrain__message_header *header)
{
    return dtrain__message_sum(0, (const unsigned char *)header, offsetof(dtrain__message_header, check));
}

static void dtrain__message_write_header(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    dtrain__message_header header;
    header.magic = DTRAIN__MESSAGE_MAGIC;
    header.call = dtrain__op_call(comm, op, 0);
    header.tag = step->tag_out;
    header.bytes = step->send_bytes;
    header.data_check = comm->checks ? dtrain__message_sum_all(step->send, step->send_bytes) : 0;
    header.check = dtrain__message_header_sum(&header);
    unsigned char *letter = dtrain__message_letter(comm, op, 1);
    memcpy(letter, &header, sizeof header);
    if (step->send_bytes > 0 && step->send_bytes <= DTRAIN__MESSAGE_SMALL)
        memcpy(letter + sizeof header, step->send, step->send_bytes);
}

/* Before anything of a step moves. */
static void dtrain__message_enter(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, size_t k)
{
    if (step->prepare != NULL)
        step->prepare(comm, op, k);
    if (step->to >= 0)
        dtrain__message_write_header(comm, op, step);
}

/* The next run of bytes of one direction of a step. */
static dtrain_transfer dtrain__message_next(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, int sending)
{
    size_t done = sending ? op->sent : op->received, payload = sending ? step->send_bytes : step->recv_bytes;
    size_t header = sizeof(dtrain__message_header), offset = done - header, run;
    unsigned char *small = dtrain__message_letter(comm, op, sending);
    dtrain_transfer next = {sending ? step->to : step->from, small + done, 0, 0, 0};
    if (payload <= DTRAIN__MESSAGE_SMALL) {
        next.bytes = header + payload - done;
    } else if (done < header) {
        next.bytes = header - done;
        next.more = 1;
    } else if (sending) {
        memcpy(&next.data, &step->send, sizeof next.data);
        next.data += offset;
        next.bytes = payload - offset;
    } else {
        run = step->fold_early ? DTRAIN__MESSAGE_CHUNK - offset % DTRAIN__MESSAGE_CHUNK : payload - offset;
        next.data = step->recv + (step->fold_early ? offset % DTRAIN__MESSAGE_CHUNK : offset);
        next.bytes = run < payload - offset ? run : payload - offset;
    }
    return next;
}

static dtrain_status dtrain__message_damaged(const dtrain_comm *comm, dtrain__op *op, int peer, const char *what)
{
    return dtrain__fail(&op->error, DTRAIN_ERR_CORRUPT,
                        "%s on rank %d: %s of a message from rank %d came damaged; the connection "
                        "between the two cannot be trusted",
                        dtrain__op_text(comm, op).text, comm->rank, what, peer);
}

/* Compares the header that has come with the call that this rank made. */
static dtrain_status dtrain__message_check(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    dtrain__message_header came;
    dtrain__call mine = dtrain__op_call(comm, op, 1);
    memcpy(&came, dtrain__message_letter(comm, op, 0), sizeof came);
    if (came.magic != DTRAIN__MESSAGE_MAGIC)
        return dtrain__fail(&op->error, DTRAIN_ERR_CORRUPT, "%s: what came from rank %d is no message of dtrain",
                            dtrain__op_text(comm, op).text, step->from);
    if (came.check != dtrain__message_header_sum(&came))
        return dtrain__message_damaged(comm, op, step->from, "the header");
    if (memcmp(&came.call, &mine, sizeof mine) != 0 || came.tag != step->tag_in)
        return dtrain__op_mismatch(comm, op, step->from, &came.call);
    if (came.bytes != step->recv_bytes)
        return dtrain__op_uneven(comm, op, step->from, comm->rank, (size_t)came.bytes, step->recv_bytes);
    op->check_due = came.data_check;
    op->check = 0;
    return DTRAIN_OK;
}

/* Says whether the data that have come are those that were sent, as far as they were checked. */
static dtrain_status dtrain__message_whole(const dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    if (op->check_due == 0)
        return DTRAIN_OK;
    if (!step->fold_early || step->recv_bytes <= DTRAIN__MESSAGE_SMALL)
        op->check = dtrain__message_sum_all(step->recv, step->recv_bytes);
    return (op->check | 1) == op->check_due ? DTRAIN_OK : dtrain__message_damaged(comm, op, step->from, "the data");
}

/* Counts what moved in one direction; checks a header that is whole now, folds a chunk that is. */
static dtrain_status dtrain__message_took(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, int sending,
                                          size_t moved)
{
    size_t *done = sending ? &op->sent : &op->received, before = *done, header = sizeof(dtrain__message_header);
    size_t payload = sending ? step->send_bytes : step->recv_bytes;
    if (moved == 0)
        return DTRAIN_OK; /* what is complete so far has been handled */
    *done += moved;
    op->touched = 1;
    dtrain__recorder_moved(comm, op);
    if (!sending && before < header && *done >= header && dtrain__message_check(comm, op, step) != DTRAIN_OK)
        return op->error.status;
    if (!sending && payload > DTRAIN__MESSAGE_SMALL && step->fold_early && *done > header &&
        ((*done - header) % DTRAIN__MESSAGE_CHUNK == 0 || *done == header + payload)) {
        size_t end = *done - header, begin = (end - 1) / DTRAIN__MESSAGE_CHUNK * DTRAIN__MESSAGE_CHUNK;
        if (op->check_due != 0)
            op->check = dtrain__message_sum(op->check, step->recv, end - begin);
        dtrain__fold_pair(dtrain__step_dtype(op), op->op, (unsigned char *)step->fold + begin, step->recv,
                          (end - begin) / dtrain__step_width(op));
    }
    if (*done < header + payload)
        return DTRAIN_OK;
    if (!sending && payload <= DTRAIN__MESSAGE_SMALL && payload > 0)
        memcpy(step->recv, dtrain__message_letter(comm, op, 0) + header, payload);
    *done = SIZE_MAX; /* this direction is complete */
    return sending ? DTRAIN_OK : dtrain__message_whole(comm, op, step);
}

/* Records why a step failed; the transport's text, where it has one, says more than ours. */
static int dtrain__message_failed(dtrain_comm *comm, dtrain__op *op, dtrain_status status, int peer)
{
    if (op->error.status == DTRAIN_OK) {
        dtrain__error cause;
        if (dtrain__thread_error.status == status)
            cause = dtrain__thread_error;
        else
            dtrain__fail(&cause, status, "rank %d: the transport said %s", peer, dtrain_status_name(status));
        dtrain__op_blame(comm, op, &cause);
    }
    return dtrain__message_fail(comm, op);
}

/* Folds a step whose message has come, unless that was done while it came. */
static void dtrain__message_fold(dtrain__op *op, const dtrain__step *step)
{
    if (step->fold != NULL && step->fold_count > 0 && !(step->fold_early && step->recv_bytes > DTRAIN__MESSAGE_SMALL))
        dtrain__fold_pair(dtrain__step_dtype(op), op->op, step->fold, step->recv, step->fold_count);
}

/* Moves sending and receiving on past every step that is complete. Sending may be one step ahead, where the plan has
 * two pieces under way. Returns 0 when both are past the last step. */
static int dtrain__message_settle(dtrain_comm *comm, dtrain__op *op, dtrain__step *out, dtrain__step *in, int *sends,
                                  int *receives)
{
    for (;;) {
        int more_in = dtrain__plan_step(comm, op, (int)op->at, in), ahead = op->send_at > op->at;
        int more_out = dtrain__plan_step(comm, op, (int)op->send_at, out);
        if (more_out && op->entered == op->send_at && (!ahead || (out->ahead && op->send_at == op->at + 1))) {
            dtrain__message_enter(comm, op, out, op->send_at);
            op->entered++;
        }
        *sends = more_out && op->entered > op->send_at;
        *receives = more_in && op->entered > op->at;
        if (*sends && (out->to < 0 || op->sent == SIZE_MAX)) {
            op->sent = 0;
            op->send_at++;
        } else if (*receives && (in->from < 0 || op->received == SIZE_MAX) &&
                   (in->fold == NULL || in->fold_early || ahead)) {
            dtrain__message_fold(op, in);
            op->received = 0;
            op->at++;
        } else {
            *receives = *receives && in->from >= 0 && op->received != SIZE_MAX;
            return more_in || more_out;
        }
    }
}

/* Moves both directions together until the operation is done or wait_ns. Returns as dtrain_transport.exchange. */
static dtrain_status dtrain__message_exchange(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    dtrain__step out, in;
    int sends, receives;
    while (dtrain__message_settle(comm, op, &out, &in, &sends, &receives)) {
        dtrain_transfer sending = {-1, NULL, 0, 0, 0}, receiving = {-1, NULL, 0, 0, 0};
        dtrain_status status, taken = DTRAIN_OK;
        if (sends)
            sending = dtrain__message_next(comm, op, &out, 1);
        if (receives)
            receiving = dtrain__message_next(comm, op, &in, 0);
        status = comm->transport.exchange(comm->transport.self, sends ? &sending : NULL, receives ? &receiving : NULL,
                                          wait_ns);
        if (sends)
            dtrain__message_took(comm, op, &out, 1, sending.moved);
        if (receives)
            taken = dtrain__message_took(comm, op, &in, 0, receiving.moved);
        op->awaited = receives && op->received != SIZE_MAX ? in.from : out.to;
        if (taken == DTRAIN_OK && status == DTRAIN_OK && wait_ns == 0 && dtrain__os_now_ns() >= comm->poll_until_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (taken != DTRAIN_OK || status != DTRAIN_OK)
            return taken != DTRAIN_OK ? taken : status;
    }
    return DTRAIN_OK;
}

/* Moves one direction by send or recv alone. Returns what the transport returned. */
static dtrain_status dtrain__message_move(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, int sending,
                                          int64_t wait_ns)
{
    size_t *done = sending ? &op->sent : &op->received;
    dtrain_transport *transport = &comm->transport;
    while (*done != SIZE_MAX) {
        dtrain_transfer next = dtrain__message_next(comm, op, step, sending);
        dtrain_status status =
            sending ? transport->send(transport->self, next.peer, next.data, next.bytes, wait_ns, &next.moved)
                    : transport->recv(transport->self, next.peer, next.data, next.bytes, wait_ns, &next.moved);
        dtrain_status taken = dtrain__message_took(comm, op, step, sending, next.moved);
        if (taken != DTRAIN_OK || status != DTRAIN_OK)
            return taken != DTRAIN_OK ? taken : status;
    }
    return DTRAIN_OK;
}

/* Does both directions of a step by send and recv: in a safe order when it may wait, else whatever moves. */
static dtrain_status dtrain__message_both(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, int64_t wait_ns)
{
    dtrain_status status, result = DTRAIN_OK;
    for (int turn = 0; turn < 2; turn++) {
        int sending = (turn == 0) == (step->send_first || step->from < 0);
        int peer = sending ? step->to : step->from;
        if (peer < 0)
            continue;
        status = dtrain__message_move(comm, op, step, sending, wait_ns);
        if (status == DTRAIN_OK)
            continue;
        op->awaited = peer;
        result = status;
        if (status != DTRAIN_ERR_TIMEOUT || wait_ns != 0)
            break;
    }
    return result;
}

/* Goes through the steps one by one, for a transport that has send and recv alone. */
static dtrain_status dtrain__message_in_turn(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    dtrain__step step;
    while (dtrain__plan_step(comm, op, (int)op->at, &step)) {
        if (op->entered == op->at) {
            dtrain__message_enter(comm, op, &step, op->at);
            op->entered++;
        }
        dtrain_status status = dtrain__message_both(comm, op, &step, wait_ns);
        if (status != DTRAIN_OK)
            return status;
        dtrain__message_fold(op, &step);
        op->sent = op->received = 0;
        op->at++;
    }
    return DTRAIN_OK;
}

/* Takes the operation as far as it goes without waiting beyond wait_ns (0: not at all); returns 1 at its end. */
static int dtrain__message_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    dtrain_status status;
    const dtrain__error *aborted = dtrain__comm_aborted(comm);
    if (aborted != NULL)
        comm->broken = *aborted;
    if (op->phase == 0 && dtrain__message_start(comm, op))
        return 1;
    if (aborted != NULL) {
        dtrain__op_blame(comm, op, aborted);
        return 1;
    }
    dtrain__thread_error.status = DTRAIN_OK;
    status = comm->transport.exchange != NULL ? dtrain__message_exchange(comm, op, wait_ns)
                                              : dtrain__message_in_turn(comm, op, wait_ns);
    if (status == DTRAIN_ERR_TIMEOUT && op->error.status == DTRAIN_OK)
        return 0;
    return status != DTRAIN_OK ? dtrain__message_failed(comm, op, status, op->awaited) : dtrain__message_end(comm, op);
}

/* Moves the message of one operation out and that of another in, together, until one is complete or wait_ns; either
 * may be NULL. Both have begun. What fails here is met again, and told, by the operation's own turn; but what came
 * and does not fit is told at once: returns 1 when that ended the incoming one. */
static int dtrain__message_pair(dtrain_comm *comm, dtrain__op *out, dtrain__op *in, int64_t wait_ns)
{
    dtrain__step sends, receives;
    dtrain_transfer sending = {-1, NULL, 0, 0, 0}, receiving = {-1, NULL, 0, 0, 0};
    dtrain_status taken = DTRAIN_OK;
    if ((out != NULL && out->sent == SIZE_MAX) || (in != NULL && in->received == SIZE_MAX))
        return 0; /* complete: it ends at its own turn */
    if (out != NULL && dtrain__plan_step(comm, out, 0, &sends))
        sending = dtrain__message_next(comm, out, &sends, 1);
    if (in != NULL && dtrain__plan_step(comm, in, 0, &receives))
        receiving = dtrain__message_next(comm, in, &receives, 0);
    comm->transport.exchange(comm->transport.self, out != NULL ? &sending : NULL, in != NULL ? &receiving : NULL,
                             wait_ns);
    if (out != NULL)
        dtrain__message_took(comm, out, &sends, 1, sending.moved);
    if (in != NULL)
        taken = dtrain__message_took(comm, in, &receives, 0, receiving.moved);
    return taken != DTRAIN_OK && dtrain__message_failed(comm, in, taken, in->root);
}

static int dtrain__message_expire(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__op_expire(comm, op);
    return dtrain__message_fail(comm, op);
}

#endif

/* ---- >>comm_core ----
 * Making and leaving groups, the queue of asynchronous work, and the threads that drive it. A call runs on
 * its own thread when nothing is queued; otherwise it queues and waits, so that operations of one group run
 * one after another in the order of their calls. Whoever drives a queue holds the group's drive_mutex.
 * One service thread serves all groups of a world that this process has: those of its family of boards, those of
 * its hub; a transport of the user's own has one of its own. */
#ifndef DTRAIN__COMM
#define DTRAIN__COMM

#define DTRAIN__SERVICE_SLICE_NS 1000000 /* of one group, before the next one's turn */

struct dtrain__service {
    dtrain__os_thread thread;
    dtrain__hub *hub;            /* of groups of processes; else NULL */
    dtrain_transport *transport; /* of the user's own that wants to be polled; else NULL */
    dtrain__bell *bell;          /* of whatever has no hub */
    dtrain_allocator *allocator;
    pthread_mutex_t mutex; /* guards comms; taken before a drive_mutex */
    dtrain_comm *comms;
    uint32_t stop;
};

static int dtrain__comm_fused(const dtrain__op *op)
{
    return op->algorithm == DTRAIN_ALGORITHM_FUSED;
}

/* Ends a cancelled operation. A message that has not begun ends alone: nobody knows of it, and the next one takes its
 * place. All else breaks the group. */
static int dtrain__comm_give_up(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__error cause;
    int message = dtrain__op_is_letter(op);
    if (op->phase == 0)
        dtrain__message_number(comm, op);
    dtrain__fail(&cause, DTRAIN_ERR_ABORTED, "rank %d cancelled %s", comm->rank, dtrain__op_text(comm, op).text);
    if (op->phase == 0 && (message || comm->size == 1)) {
        dtrain__fail(&op->error, DTRAIN_ERR_ABORTED, "%.600s before it began", cause.text);
        return 1;
    }
    dtrain__comm_break(comm, &cause);
    if (dtrain__comm_fused(op))
        return dtrain__fused_end_broken(comm, op);
    comm->broken = comm->broken.status == DTRAIN_OK ? cause : comm->broken;
    dtrain__op_blame(comm, op, &cause);
    return 1;
}

/* Advances one operation; returns 1 at its end. wait_ns: INT64_MAX, the caller does nothing else until the end;
 * 0, what goes at once; else until about then. */
static int dtrain__comm_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    if (__atomic_load_n(&op->cancelled, __ATOMIC_SEQ_CST))
        return dtrain__comm_give_up(comm, op);
    if (dtrain__comm_fused(op)) {
        int ended = dtrain__fused_advance(comm, op, wait_ns);
        if (!ended)
            dtrain__recorder_start(comm, op);
        return ended;
    }
    if (comm->transport.board != NULL && wait_ns != INT64_MAX) {
        wait_ns = 0; /* other ranks' queues are driven on this thread as well */
    } else if (wait_ns != 0) {
        /* In slices, so that the log can say who is awaited long before the deadline, and an abort is seen. */
        int64_t slice = dtrain__os_now_ns() + 100000000;
        slice = slice < op->deadline_ns ? slice : op->deadline_ns;
        wait_ns = wait_ns < slice ? wait_ns : slice;
    }
    return dtrain__message_advance(comm, op, wait_ns);
}

static int dtrain__comm_expire(dtrain_comm *comm, dtrain__op *op)
{
    return dtrain__comm_fused(op) ? dtrain__fused_expire(comm, op) : dtrain__message_expire(comm, op);
}

/* Keeps what became of an operation; a failure is written to its file by the thread that met it. */
static void dtrain__comm_ended(dtrain_comm *comm, dtrain__op *op, int64_t now)
{
    op->ended_ns = now;
    dtrain__recorder_end(comm, op, now);
    if (op->error.status != DTRAIN_OK)
        dtrain__trace_failure(comm, op);
}

/* A number that changes whenever the operation gets on. */
static size_t dtrain__op_progress(const dtrain__op *op)
{
    return (size_t)op->phase + op->at + op->send_at + op->sent + op->received;
}

/* Advances one operation and judges its deadline; returns 1 at its end. Sets *moved when it got on. */
static int dtrain__comm_turn(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns, int *moved)
{
    size_t before = dtrain__op_progress(op);
    int ended = dtrain__comm_advance(comm, op, wait_ns);
    if (!ended && dtrain__op_late(comm, op))
        ended = dtrain__comm_expire(comm, op);
    *moved |= ended || dtrain__op_progress(op) != before;
    return ended;
}

/* The messages of a queue that are under way together. */
typedef struct dtrain__sweep {
    dtrain__op *out; /* the first one that goes out; NULL: none */
    dtrain_work *in; /* the first one that comes in */
    int others;      /* how many more there are */
    int moved;
} dtrain__sweep;

/* Advances, without waiting, the messages from head to the next collective: of those to one peer the first, of those
 * from one peer the first. Crossing messages so get past each other, whatever was queued first. Stops at until_ns once
 * one has moved. */
static dtrain__sweep dtrain__queue_sweep(dtrain_comm *comm, dtrain_work *head, int64_t until_ns)
{
    dtrain__sweep sweep = {NULL, NULL, 0, 0};
    int taken = 0, lanes = 2 * (comm->size - 1);
    comm->sweep++;
    for (dtrain_work *work = head; work != NULL && dtrain__op_is_letter(&work->op) && taken < lanes;
         work = __atomic_load_n(&work->next, __ATOMIC_ACQUIRE)) {
        int sends = work->op.kind == DTRAIN__SEND;
        uint64_t *lane = &comm->lanes[2 * work->op.root + sends];
        if (work->ended || *lane == comm->sweep)
            continue;
        if (sweep.moved && until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            break;
        work->ended = dtrain__comm_turn(comm, &work->op, 0, &sweep.moved);
        if (work->ended)
            continue;
        *lane = comm->sweep;
        taken++;
        if (sends && sweep.out == NULL)
            sweep.out = &work->op;
        else if (!sends && sweep.in == NULL)
            sweep.in = work;
        else
            sweep.others++;
    }
    return sweep;
}

/* Waits until slice_ns for the first messages out and in; the others get their turn after that. */
static void dtrain__queue_wait(dtrain_comm *comm, dtrain_work *head, const dtrain__sweep *sweep, int64_t slice_ns)
{
    int moved = 0;
    if (comm->transport.exchange == NULL)
        head->ended = dtrain__comm_turn(comm, &head->op, slice_ns, &moved);
    else if (dtrain__message_pair(comm, sweep->out, sweep->in != NULL ? &sweep->in->op : NULL, slice_ns))
        sweep->in->ended = 1;
}

/* Advances the queue whose head is a message until that has ended, or until_ns (0: what goes at once). Where ranks
 * share an address space, it never waits: the caller does, for the bell. */
static int dtrain__queue_mail(dtrain_comm *comm, dtrain_work *head, int64_t until_ns, int *moved)
{
    for (;;) {
        dtrain__sweep sweep = dtrain__queue_sweep(comm, head, until_ns != 0 ? until_ns : comm->poll_until_ns);
        int64_t now, slice;
        int crowded;
        *moved |= sweep.moved;
        if (head->ended || comm->transport.board != NULL || until_ns == 0 || (now = dtrain__os_now_ns()) >= until_ns)
            return head->ended;
        /* more than one call of the transport can wait for */
        crowded = sweep.others > 0 || (comm->transport.exchange == NULL && sweep.out != NULL && sweep.in != NULL);
        if (sweep.moved && crowded)
            continue;
        slice = now + (crowded ? 1000000 : 100000000);
        dtrain__queue_wait(comm, head, &sweep, slice < until_ns ? slice : until_ns);
    }
}

typedef struct dtrain__comm_wait {
    dtrain_comm *comm;
    dtrain__op *op;
    dtrain_work *mail; /* the queue's head, where that is a message */
    int64_t until_ns;
    int ended, moved;
} dtrain__comm_wait;

static int dtrain__comm_ready(void *pointer)
{
    dtrain__comm_wait *wait = (dtrain__comm_wait *)pointer;
    wait->moved = 0;
    wait->ended = wait->mail != NULL ? dtrain__queue_mail(wait->comm, wait->mail, wait->until_ns, &wait->moved)
                                     : dtrain__comm_advance(wait->comm, wait->op, wait->until_ns);
    return wait->ended;
}

/* Runs one operation on the calling thread, to its end or until until_ns (INT64_MAX: no limit), which returns 0.
 * mail: as in dtrain__comm_wait. */
static int dtrain__comm_run(dtrain_comm *comm, dtrain__op *op, dtrain_work *mail, int64_t until_ns)
{
    dtrain__comm_wait wait = {comm, op, mail, until_ns, 0, 0};
    int64_t limit = until_ns < op->deadline_ns ? until_ns : op->deadline_ns;
    int bell = dtrain__comm_fused(op) || (mail != NULL && comm->transport.board != NULL);
    int phase = op->phase;
    size_t at = op->at;
    for (unsigned turn = 0; !dtrain__comm_ready(&wait); turn++) {
        if (wait.moved || op->phase != phase || op->at != at)
            turn = 0;
        phase = op->phase;
        at = op->at;
        if (turn > comm->bell->spins || !bell) {
            if (mail == NULL && dtrain__op_late(comm, op) && dtrain__comm_expire(comm, op))
                return 1;
            if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
                return 0;
        }
        if (bell)
            dtrain__bell_wait(comm->bell, turn, limit, dtrain__comm_ready, &wait);
        if (wait.ended)
            return 1;
    }
    return 1;
}

static dtrain_work *dtrain__queue_head(dtrain_comm *comm)
{
    pthread_mutex_lock(&comm->queue_mutex);
    dtrain_work *work = comm->head;
    pthread_mutex_unlock(&comm->queue_mutex);
    return work;
}

/* Takes the head off the queue and makes its result visible; the handle may be gone right after. */
static void dtrain__queue_finish(dtrain_comm *comm, dtrain_work *work)
{
    dtrain__comm_ended(comm, &work->op, dtrain__os_now_ns());
    pthread_mutex_lock(&comm->queue_mutex);
    comm->head = work->next;
    if (comm->head == NULL)
        comm->tail = NULL;
    pthread_mutex_unlock(&comm->queue_mutex);
    __atomic_sub_fetch(&comm->pending, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&work->done, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(comm->bell);
}

/* Advances queued work until until_ns or nothing moves; the caller holds drive_mutex. Returns whether anything did. */
static int dtrain__comm_drive(dtrain_comm *comm, int64_t until_ns)
{
    int moved = 0;
    dtrain_work *work;
    while ((work = dtrain__queue_head(comm)) != NULL) {
        if (!work->ended && dtrain__op_is_letter(&work->op))
            dtrain__queue_mail(comm, work, until_ns, &moved);
        else if (!work->ended)
            /* where ranks share an address space, this thread drives other ranks' queues as well */
            work->ended = dtrain__comm_turn(
                comm, &work->op, comm->transport.board != NULL && !dtrain__comm_fused(&work->op) ? 0 : until_ns,
                &moved);
        if (!work->ended)
            break;
        dtrain__queue_finish(comm, work);
        if (until_ns != 0 && until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            break;
        if (until_ns == 0 && comm->poll_until_ns > 0 && dtrain__os_now_ns() >= comm->poll_until_ns)
            break;
    }
    return moved;
}

/* Advances queued work until until_ns without waiting for a peer; the caller holds drive_mutex. */
static int dtrain__comm_drive_within(dtrain_comm *comm, int64_t until_ns)
{
    int moved = 0;
    comm->poll_until_ns = until_ns;
    while (dtrain__comm_drive(comm, comm->transport.board != NULL ? until_ns : 0)) {
        moved = 1;
        if (dtrain__os_now_ns() >= until_ns)
            break;
    }
    return moved;
}

/* One round over the groups that nobody else is driving. */
static int dtrain__service_round(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    int moved = __atomic_load_n(&service->stop, __ATOMIC_SEQ_CST) != 0;
    pthread_mutex_lock(&service->mutex);
    for (dtrain_comm *comm = service->comms; comm != NULL; comm = comm->next_served) {
        if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) == 0 || pthread_mutex_trylock(&comm->drive_mutex) != 0)
            continue;
        int messages = comm->transport.board == NULL;
        moved |= dtrain__comm_drive(comm, dtrain__os_now_ns() + (messages ? DTRAIN__MESSAGE_SLICE_NS : 1000000));
        moved |= messages && __atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0;
        pthread_mutex_unlock(&comm->drive_mutex);
    }
    pthread_mutex_unlock(&service->mutex);
    return moved;
}

/* Advances all groups of the hub without waiting for a peer. Returns for how long there is nothing to do unless
 * something comes. */
static int64_t dtrain__service_drive(dtrain__service *service)
{
    int64_t span = 1000000000;
    pthread_mutex_lock(&service->mutex);
    for (dtrain_comm *comm = service->comms; comm != NULL; comm = comm->next_served) {
        int64_t most = 50000000; /* deadlines are looked at */
        dtrain__socket_rest(comm->socket);
        if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) == 0)
            continue;
        if (pthread_mutex_trylock(&comm->drive_mutex) != 0) {
            most = 1000000; /* whoever drives it may leave work behind */
        } else {
            if (dtrain__comm_drive_within(comm, dtrain__os_now_ns() + DTRAIN__SERVICE_SLICE_NS))
                most = 0;
            pthread_mutex_unlock(&comm->drive_mutex);
        }
        span = most < span ? most : span;
    }
    pthread_mutex_unlock(&service->mutex);
    return span;
}

/* Looks after the connections of a group over a transport of the user's own, and drives its queue. */
static void dtrain__service_tend(dtrain__service *service)
{
    dtrain_transport *transport = service->transport;
    while (!__atomic_load_n(&service->stop, __ATOMIC_SEQ_CST)) {
        dtrain_comm *comm = __atomic_load_n(&service->comms, __ATOMIC_SEQ_CST);
        int pending = comm != NULL && __atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0;
        int driven = pending && pthread_mutex_trylock(&comm->drive_mutex) == 0;
        if (driven) {
            dtrain__comm_drive(comm, dtrain__os_now_ns() + DTRAIN__MESSAGE_SLICE_NS);
            pthread_mutex_unlock(&comm->drive_mutex);
        }
        transport->poll(transport->self, driven ? 0 : dtrain__os_now_ns() + (pending ? 1000000 : 1000000000));
    }
}

static void dtrain__service_main(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    while (service->hub != NULL && !__atomic_load_n(&service->stop, __ATOMIC_SEQ_CST)) {
        int64_t span = dtrain__service_drive(service);
        dtrain__socket_step(service->hub, span > 0 ? dtrain__os_now_ns() + span : 0);
    }
    if (service->hub != NULL)
        return;
    if (service->transport != NULL) {
        dtrain__service_tend(service);
        return;
    }
    unsigned first = service->bell->spins + DTRAIN__WAIT_YIELDS - 10; /* yield a little, then sleep */
    for (unsigned turn = first; !__atomic_load_n(&service->stop, __ATOMIC_SEQ_CST); turn++) {
        if (dtrain__service_round(service))
            turn = first;
        dtrain__bell_wait(service->bell, turn, INT64_MAX, dtrain__service_round, service);
    }
}

static void dtrain__service_stop(void *pointer)
{
    dtrain__service *service = (dtrain__service *)pointer;
    __atomic_store_n(&service->stop, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(service->bell);
    if (service->hub != NULL)
        dtrain__hub_kick(service->hub);
    if (service->transport != NULL && service->transport->wake != NULL)
        service->transport->wake(service->transport->self);
    dtrain__os_thread_join(&service->thread);
    pthread_mutex_destroy(&service->mutex);
    dtrain__free(service->allocator, service, sizeof *service);
}

static dtrain_status dtrain__service_start(dtrain_comm *comm, dtrain__service **out)
{
    dtrain_allocator *allocator = comm->allocator;
    dtrain__board *board = comm->transport.board;
    dtrain__service *service = (dtrain__service *)dtrain__alloc(allocator, sizeof *service);
    if (service == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for a service thread", comm->rank);
    service->allocator = allocator;
    service->hub = comm->socket != NULL ? comm->socket->hub : NULL;
    service->bell = board != NULL ? &board->family->bell : service->hub == NULL ? comm->bell : NULL;
    service->transport = service->hub == NULL && comm->transport.poll != NULL ? &comm->transport : NULL;
    pthread_mutex_init(&service->mutex, NULL);
    int error = dtrain__os_thread_start(&service->thread, dtrain__service_main, service, (size_t)1 << 20);
    if (error == 0) {
        *out = service;
        return DTRAIN_OK;
    }
    pthread_mutex_destroy(&service->mutex);
    dtrain__free(allocator, service, sizeof *service);
    return dtrain__fail(&comm->error, DTRAIN_ERR_IO,
                        "rank %d: the system refused a service thread (%s); set progress to DTRAIN_PROGRESS_POLL to do "
                        "without",
                        comm->rank, strerror(error));
}

/* The service thread of the group's origin, started where there is none yet. */
static dtrain_status dtrain__service_find(dtrain_comm *comm, dtrain__service **out)
{
    dtrain__family *family = comm->transport.board != NULL ? comm->transport.board->family : NULL;
    dtrain__hub *hub = comm->socket != NULL ? comm->socket->hub : NULL;
    pthread_mutex_t *mutex;
    void **place;
    dtrain_status status = DTRAIN_OK;
    if (family == NULL && hub == NULL)
        return dtrain__service_start(comm, out);
    mutex = family != NULL ? &family->mutex : &hub->mutex;
    place = family != NULL ? &family->service : &hub->service;
    pthread_mutex_lock(mutex);
    if (*place == NULL)
        status = dtrain__service_start(comm, out);
    else
        *out = (dtrain__service *)*place;
    if (status == DTRAIN_OK) {
        *place = *out;
        *(family != NULL ? &family->last_gone : &hub->last_gone) = dtrain__service_stop;
    }
    pthread_mutex_unlock(mutex);
    return status;
}

/* Puts the group under a service thread, at the first asynchronous call. */
static dtrain_status dtrain__service_join(dtrain_comm *comm)
{
    dtrain__service *service;
    dtrain_status status = dtrain__service_find(comm, &service);
    if (status != DTRAIN_OK)
        return status;
    pthread_mutex_lock(&service->mutex);
    comm->next_served = service->comms;
    __atomic_store_n(&service->comms, comm, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&service->mutex);
    comm->service = service;
    return DTRAIN_OK;
}

static void dtrain__service_leave(dtrain_comm *comm)
{
    dtrain__service *service = comm->service;
    dtrain_comm **at;
    if (service == NULL)
        return;
    pthread_mutex_lock(&service->mutex);
    for (at = &service->comms; *at != comm;)
        at = &(*at)->next_served;
    __atomic_store_n(at, comm->next_served, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&service->mutex);
    if (comm->transport.board == NULL && comm->socket == NULL)
        dtrain__service_stop(service);
}

/* Groups of processes are not for a forked child, nor for a caller that has not waited for all ranks. */
static dtrain_status dtrain__comm_usable(dtrain_comm *comm, const char *call)
{
    int ready = 1;
    if (comm->process != getpid())
        return dtrain__fail(
            &comm->error, DTRAIN_ERR_INVALID,
            "%s: process %ld made this group, and this is its forked child %ld; make one after the fork", call,
            (long)comm->process, (long)getpid());
    if (comm->forming && dtrain_comm_ready(comm, &ready) != DTRAIN_OK)
        return comm->error.status;
    if (!ready)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s: the group is still forming; call it when dtrain_comm_ready says 1", call);
    return DTRAIN_OK;
}

static dtrain_status dtrain__comm_begin(dtrain_comm *comm, dtrain__op *op)
{
    dtrain_status status = dtrain__op_check(comm, op);
    if (status == DTRAIN_OK && comm->transport.board == NULL)
        status = dtrain__comm_usable(comm, dtrain__kind_name((uint64_t)op->kind));
    if (status != DTRAIN_OK)
        return status;
    op->algorithm = dtrain__plan_select(comm, op);
    op->awaited = -1;
    return DTRAIN_OK;
}

/* The time allowed to a call begins. */
static void dtrain__comm_clock(dtrain_comm *comm, dtrain__op *op)
{
    op->started_ns = dtrain__os_now_ns();
    op->deadline_ns =
        comm->desc.timeout_ms < 0 ? INT64_MAX : op->started_ns + dtrain__os_ms_to_ns(comm->desc.timeout_ms);
}

/* Puts an operation at the end of the queue; NULL: no memory. */
static dtrain_work *dtrain__queue_add(dtrain_comm *comm, const dtrain__op *op)
{
    pthread_mutex_lock(&comm->queue_mutex);
    dtrain_work *work = comm->spare;
    if (work != NULL)
        comm->spare = work->next;
    else
        work = (dtrain_work *)dtrain__alloc(comm->allocator, sizeof *work);
    if (work != NULL && work->comm == NULL) {
        work->comm = comm;
        work->older = comm->newest;
        comm->newest = work;
    }
    if (work != NULL) {
        work->next = NULL;
        work->done = 0;
        work->ended = 0;
        work->op = *op;
        work->op.letter = dtrain__op_is_letter(op) ? work->letter : NULL;
        work->op.queued = 1;
        if (comm->tail != NULL)
            __atomic_store_n(&comm->tail->next, work, __ATOMIC_RELEASE); /* a sweep may stand there */
        else
            comm->head = work;
        comm->tail = work;
        __atomic_add_fetch(&comm->pending, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&comm->queue_mutex);
    if (work == NULL)
        dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for a work handle", comm->rank);
    return work;
}

static dtrain_status dtrain__comm_enqueue(dtrain_comm *comm, const dtrain__op *op, dtrain_work **out)
{
    dtrain_status status = DTRAIN_OK;
    if (comm->service == NULL && comm->desc.progress == DTRAIN_PROGRESS_THREAD)
        status = dtrain__service_join(comm);
    if (status != DTRAIN_OK)
        return status;
    *out = dtrain__queue_add(comm, op);
    if (*out == NULL)
        return DTRAIN_ERR_MEMORY;
    dtrain__bell_ring(comm->bell);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    return DTRAIN_OK;
}

DTRAIN_API int dtrain_work_done(const dtrain_work *work)
{
    return work == NULL || __atomic_load_n(&work->done, __ATOMIC_SEQ_CST) != 0;
}

static int dtrain__work_ready(void *pointer)
{
    return dtrain_work_done((const dtrain_work *)pointer);
}

/* Drives the queue on the calling thread, or looks on while another thread does, until work has ended or until_ns. */
static void dtrain__work_help(dtrain_work *work, int64_t until_ns)
{
    dtrain_comm *comm = work->comm;
    for (unsigned turn = 0; !dtrain_work_done(work); turn++) {
        if (pthread_mutex_trylock(&comm->drive_mutex) == 0) {
            dtrain_work *head;
            while (!dtrain_work_done(work) && (head = dtrain__queue_head(comm)) != NULL) {
                dtrain_work *mail = dtrain__op_is_letter(&head->op) ? head : NULL;
                if (!head->ended && !dtrain__comm_run(comm, &head->op, mail, until_ns))
                    break;
                dtrain__queue_finish(comm, head);
            }
            pthread_mutex_unlock(&comm->drive_mutex);
            if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0)
                dtrain__bell_ring(comm->bell); /* the service goes on with the rest */
        } else {
            dtrain__bell_wait(comm->bell, turn, dtrain__os_now_ns() + 1000000, dtrain__work_ready, work);
        }
        if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            return;
    }
}

/* Waits for work until until_ns. Returns its result and frees it; 0 in *ended: it goes on. */
static dtrain_status dtrain__work_end(dtrain_work *work, int64_t until_ns, int *ended)
{
    dtrain_status status;
    dtrain_comm *comm = work->comm;
    int64_t started;
    *ended = 1;
    if (comm->transport.board == NULL && (status = dtrain__comm_usable(comm, "work_wait")) != DTRAIN_OK)
        return status;
    started = dtrain__os_now_ns();
    dtrain__work_help(work, until_ns);
    comm->blocked_ns += dtrain__os_now_ns() - started;
    *ended = dtrain_work_done(work);
    if (!*ended)
        return DTRAIN_OK;
    status = dtrain__report(&work->op.error);
    if (status != DTRAIN_OK)
        comm->error = work->op.error;
    comm->waited_ns[0] = work->op.run_ns;
    comm->waited_ns[1] = work->op.ended_ns;
    pthread_mutex_lock(&comm->queue_mutex);
    work->next = comm->spare;
    comm->spare = work;
    pthread_mutex_unlock(&comm->queue_mutex);
    return status;
}

DTRAIN_API dtrain_status dtrain_work_wait(dtrain_work *work)
{
    int ended;
    if (work == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "work_wait: the handle is NULL; was its call checked?");
    return dtrain__work_end(work, INT64_MAX, &ended);
}

DTRAIN_API dtrain_status dtrain_work_wait_for(dtrain_work *work, int64_t timeout_ms)
{
    int64_t now = dtrain__os_now_ns();
    int ended;
    dtrain_status status;
    if (work == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "work_wait_for: the handle is NULL; was its call checked?");
    status = dtrain__work_end(
        work, timeout_ms < 0 || timeout_ms > (INT64_MAX - now) / 1000000 ? INT64_MAX : now + timeout_ms * 1000000,
        &ended);
    if (ended)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                        "work_wait_for on rank %d: %s of %zu elements is still under way after %lld ms; it goes on, "
                        "and its handle can be waited for again",
                        work->comm->rank, dtrain__kind_name((uint64_t)work->op.kind), work->op.count,
                        (long long)timeout_ms);
}

DTRAIN_API dtrain_status dtrain_comm_poll(dtrain_comm *comm, int64_t budget_us)
{
    int64_t until;
    if (comm == NULL || comm->desc.progress != DTRAIN_PROGRESS_POLL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_poll: the group needs progress = DTRAIN_PROGRESS_POLL in its desc");
    if (comm->process != getpid())
        return dtrain__comm_usable(comm, "comm_poll");
    until = dtrain__os_now_ns() + (budget_us < 0 ? 0 : budget_us < INT64_MAX / 4000 ? budget_us * 1000 : INT64_MAX / 4);
    if (comm->transport.poll != NULL)
        comm->transport.poll(comm->transport.self, 0);
    pthread_mutex_lock(&comm->drive_mutex);
    dtrain__comm_drive_within(comm, until);
    pthread_mutex_unlock(&comm->drive_mutex);
    return DTRAIN_OK;
}

/* Keeps a call for fuse_end; its buffers and arrays stay the caller's until then. */
static dtrain_status dtrain__comm_note(dtrain_comm *comm, const dtrain__op *op)
{
    if (comm->noted + 2 > comm->notes_capacity) {
        size_t more = comm->notes_capacity > 0 ? 2 * comm->notes_capacity : 16;
        dtrain__note *notes = (dtrain__note *)dtrain__resize(
            comm->allocator, comm->notes, comm->notes_capacity * sizeof(dtrain__note), more * sizeof(dtrain__note));
        if (notes == NULL)
            return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory to fuse %zu calls", comm->rank,
                                comm->noted + 1);
        comm->notes = notes;
        comm->notes_capacity = more;
    }
    for (int receives = 0; receives < 2; receives++) { /* an exchange is a send and a recv */
        dtrain__note *note = &comm->notes[comm->noted];
        int splits = op->kind == DTRAIN__EXCHANGE, peer = receives ? op->from : op->root;
        if (splits ? peer < 0 : receives)
            continue;
        memcpy(&note->op, op, offsetof(dtrain__op, error));
        note->op.error.status = DTRAIN_OK;
        note->op.kind = !splits ? op->kind : receives ? DTRAIN__RECV : DTRAIN__SEND;
        note->op.root = peer;
        note->op.count = splits && receives ? op->in_count : op->count;
        note->op.in_count = 0;
        note->work = NULL;
        comm->noted++;
    }
    return DTRAIN_OK;
}

/* Runs a call to its end (work NULL), or starts it; inside a fuse notes it. */
static dtrain_status dtrain__comm_call(dtrain_comm *comm, dtrain__op *op, dtrain_work **work)
{
    dtrain_status status;
    dtrain_work *queued = NULL;
    int64_t now;
    if (work != NULL)
        *work = NULL;
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the group is NULL; was its creation checked?",
                            dtrain__kind_name((uint64_t)op->kind));
    status = dtrain__comm_begin(comm, op);
    if (status != DTRAIN_OK)
        return status;
    op->async = work != NULL;
    if (comm->fusing && work != NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s_async on rank %d: calls between fuse_begin and fuse_end cannot be asynchronous; call "
                            "fuse_end first",
                            dtrain__kind_name((uint64_t)op->kind), comm->rank);
    if (comm->fusing)
        return dtrain__comm_note(comm, op);
    dtrain__comm_clock(comm, op);
    if (work != NULL)
        return dtrain__comm_enqueue(comm, op, work);
    if (__atomic_load_n(&comm->pending, __ATOMIC_SEQ_CST) > 0) {
        status = dtrain__comm_enqueue(comm, op, &queued);
        return status != DTRAIN_OK ? status : dtrain_work_wait(queued);
    }
    dtrain__comm_run(comm, op, NULL, INT64_MAX);
    now = dtrain__os_now_ns();
    dtrain__comm_ended(comm, op, now);
    comm->blocked_ns += now - op->started_ns;
    if (op->error.status != DTRAIN_OK)
        comm->error = op->error;
    return dtrain__report(&op->error);
}

#endif

/* ---- >>group ----
 * Groups come and go: a world of one, the ranks of one process, a transport of the user's own. Leaving
 * never waits for a peer; what was pending is cancelled, and whoever needs the leaver is told. */
#ifndef DTRAIN__GROUP
#define DTRAIN__GROUP

static void dtrain__comm_free(dtrain_comm *comm)
{
    size_t size = (size_t)comm->size;
    dtrain_allocator *allocator = comm->allocator, own;
    while (comm->newest != NULL) {
        dtrain_work *work = comm->newest;
        comm->newest = work->older;
        dtrain__free(allocator, work, sizeof *work);
    }
    dtrain__free(allocator, comm->sent, size * sizeof(uint64_t));
    dtrain__free(allocator, comm->received, size * sizeof(uint64_t));
    dtrain__free(allocator, comm->ins, size * sizeof(void *));
    dtrain__free(allocator, comm->outs, size * sizeof(void *));
    dtrain__free(allocator, comm->parts, 2 * size * sizeof(dtrain__extent));
    dtrain__free(allocator, comm->lanes, 2 * size * sizeof(uint64_t));
    dtrain__free(allocator, comm->scratch, comm->scratch_bytes);
    dtrain__free(allocator, comm->notes, comm->notes_capacity * sizeof(dtrain__note));
    dtrain__free(allocator, comm->packed, comm->packed_bytes);
    dtrain__recorder_free(comm);
    pthread_mutex_destroy(&comm->queue_mutex);
    pthread_mutex_destroy(&comm->drive_mutex);
    own = comm->own;
    dtrain__free(allocator == &comm->own ? &own : allocator, comm, sizeof *comm);
}

/* The algorithms that desc and environment ask for; where nodes are said to be. */
static dtrain_status dtrain__comm_choose(dtrain_comm *comm)
{
    int64_t ranks = 0;
    dtrain_status status = DTRAIN_OK;
    int own = comm->transport.send != NULL && comm->transport.send != dtrain__threads_send &&
              comm->transport.send != dtrain__socket_send;
    comm->checks = comm->desc.checksum > 0 || (comm->desc.checksum == 0 && own);
    for (int kind = 0; kind < DTRAIN__KINDS; kind++)
        comm->asked[kind] = comm->desc.algorithm;
    if (comm->desc.node_ranks < 0)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "comm desc: %d ranks of a node; 1 or more are possible",
                            comm->desc.node_ranks);
    if (comm->desc.node_ranks == 0 && dtrain__place_get("DTRAIN_NODE_RANKS") != NULL)
        status = dtrain__place_number("DTRAIN_NODE_RANKS", 0, INT_MAX, &ranks);
    comm->node_ranks = comm->desc.node_ranks > 0 ? comm->desc.node_ranks : (int)ranks;
    comm->node_ranks = comm->node_ranks < comm->size ? comm->node_ranks : comm->size;
    return status == DTRAIN_OK ? dtrain__plan_ask(comm, getenv("DTRAIN_ALGORITHM")) : status;
}

/* Makes one rank's end; on an error the transport stays the caller's. allocator: NULL, one of its own. */
static dtrain_status dtrain__comm_new(dtrain_comm **out, const dtrain_transport *transport,
                                      const dtrain_comm_desc *desc, dtrain_allocator *allocator)
{
    size_t size = (size_t)transport->size;
    dtrain_status status = DTRAIN_OK;
    dtrain_allocator first = {NULL, NULL, 0, 0};
    dtrain_comm *comm = (dtrain_comm *)dtrain__alloc(allocator != NULL ? allocator : &first, sizeof *comm);
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "rank %d: no memory for its end of a group", transport->rank);
    comm->own = first;
    comm->allocator = allocator != NULL ? allocator : &comm->own;
    comm->rank = transport->rank;
    comm->size = transport->size;
    comm->transport = *transport;
    comm->process = getpid();
    comm->desc = *desc;
    if (comm->desc.timeout_ms == 0)
        comm->desc.timeout_ms = 60000;
    comm->bell = transport->board != NULL ? &transport->board->bell : &comm->own_bell;
    pthread_mutex_init(&comm->queue_mutex, NULL);
    pthread_mutex_init(&comm->drive_mutex, NULL);
    comm->sent = (uint64_t *)dtrain__alloc(comm->allocator, size * sizeof(uint64_t));
    comm->received = (uint64_t *)dtrain__alloc(comm->allocator, size * sizeof(uint64_t));
    comm->ins = (const void **)dtrain__alloc(comm->allocator, size * sizeof(void *));
    comm->outs = (void **)dtrain__alloc(comm->allocator, size * sizeof(void *));
    comm->lanes = (uint64_t *)dtrain__alloc(comm->allocator, 2 * size * sizeof(uint64_t));
    comm->parts = (dtrain__extent *)dtrain__alloc(comm->allocator, 2 * size * sizeof(dtrain__extent));
    if (comm->sent == NULL || comm->received == NULL || comm->ins == NULL || comm->outs == NULL ||
        comm->parts == NULL || comm->lanes == NULL || !dtrain__recorder_create(comm))
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "rank %d: no memory for its end of a group", transport->rank);
    else
        status = dtrain__trace_prefix(comm, desc->trace_on_failure);
    if (status == DTRAIN_OK) {
        comm->others = comm->parts + size;
        status = dtrain__comm_choose(comm);
    }
    if (status == DTRAIN_OK)
        *out = comm;
    else
        dtrain__comm_free(comm);
    return status;
}

static dtrain_status dtrain__comm_check_desc(const dtrain_comm_desc *desc)
{
    int algorithm = (int)desc->algorithm, progress = (int)desc->progress;
    if (algorithm != DTRAIN_ALGORITHM_AUTO &&
        (algorithm < DTRAIN_ALGORITHM_FUSED || algorithm > DTRAIN_ALGORITHM_DOUBLE_TREE))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm desc: algorithm %d is not a DTRAIN_ALGORITHM constant",
                            algorithm);
    if (progress != DTRAIN_PROGRESS_THREAD && progress != DTRAIN_PROGRESS_POLL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm desc: progress %d is not a DTRAIN_PROGRESS constant",
                            progress);
    if (desc->order != DTRAIN_ORDER_TREE && desc->order != DTRAIN_ORDER_ANY)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm desc: order %d is not a DTRAIN_ORDER constant",
                            (int)desc->order);
    if (desc->connections < 0 || desc->connections > DTRAIN__MAX_LANES)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm desc: %d connections to a peer; 1 to %d are possible",
                            desc->connections, DTRAIN__MAX_LANES);
    if (desc->fingerprint != NULL && strlen(desc->fingerprint) > DTRAIN__FINGERPRINT_BYTES - 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm desc: a fingerprint of %zu bytes; at most %d are possible",
                            strlen(desc->fingerprint), DTRAIN__FINGERPRINT_BYTES - 1);
    return DTRAIN_OK;
}

/* One rank's end of a board to which it has come; on an error it leaves. */
static dtrain_status dtrain__comm_on_board(dtrain_comm **out, dtrain__board *board, int rank,
                                           const dtrain_comm_desc *desc)
{
    dtrain_transport transport;
    dtrain__threads_transport(&transport, board, rank);
    dtrain_status status = dtrain__comm_new(out, &transport, desc, board->allocator);
    if (status != DTRAIN_OK)
        dtrain__board_detach(board, rank);
    return status;
}

DTRAIN_API dtrain_status dtrain_threads_create(dtrain_comm **comms, int ranks, const dtrain_comm_desc *desc)
{
    dtrain_comm_desc defaults;
    dtrain__board *board = NULL;
    dtrain_status status;
    memset(&defaults, 0, sizeof defaults);
    if (desc == NULL)
        desc = &defaults;
    if (comms == NULL || ranks < 1 || ranks > DTRAIN__MAX_RANKS)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "threads_create: %d ranks (1 to %d are possible) into %s array",
                            ranks, DTRAIN__MAX_RANKS, comms == NULL ? "no" : "an");
    for (int rank = 0; rank < ranks; rank++)
        comms[rank] = NULL;
    status = dtrain__comm_check_desc(desc);
    if (status == DTRAIN_OK)
        status = dtrain__board_create(&board, ranks, desc->allocator);
    if (status != DTRAIN_OK)
        return status;
    for (int rank = 0; rank < ranks; rank++) {
        if (status == DTRAIN_OK)
            status = dtrain__comm_on_board(&comms[rank], board, rank, desc);
        else
            dtrain__board_detach(board, rank);
    }
    for (int rank = 0; status != DTRAIN_OK && rank < ranks; rank++) {
        dtrain_comm_destroy(comms[rank]);
        comms[rank] = NULL;
    }
    return status;
}

/* Makes the transport of a group of processes. */
static dtrain_status dtrain__comm_open(dtrain__channel **out, const dtrain__place *place, const dtrain_comm_desc *desc)
{
    dtrain__keys keys;
    dtrain__hub_desc hub;
    dtrain_status status;
    memset(&keys, 0, sizeof keys);
    keys.rank = place->rank;
    keys.world_size = place->world_size;
    memcpy(keys.token, place->token, sizeof keys.token);
    keys.token_bytes = place->token_bytes;
    hub.root = place->root;
    hub.listen_on = place->listen_on;
    hub.fingerprint = desc->fingerprint != NULL ? desc->fingerprint : "";
    hub.believed = place->believed;
    hub.insecure = place->insecure;
    hub.listen_fd = place->listen_fd;
    hub.connections = desc->connections;
    hub.heartbeat_ms = desc->heartbeat_ms;
    hub.reconnect_ms = desc->reconnect_ms;
    hub.on_address = desc->on_address;
    hub.on_address_user = desc->on_address_user;
    status = dtrain__socket_create(out, &keys, &hub, desc->allocator);
    memset(&keys, 0, sizeof keys);
    return status;
}

/* One rank's end of a group of processes; the channel stays the caller's on an error. */
static dtrain_status dtrain__comm_on_channel(dtrain_comm **out, dtrain__channel *channel, const dtrain_comm_desc *desc)
{
    dtrain_transport transport;
    dtrain_comm *comm;
    dtrain__socket_transport(&transport, channel);
    dtrain_status status = dtrain__comm_new(&comm, &transport, desc, channel->hub->allocator);
    if (status != DTRAIN_OK)
        return status;
    comm->socket = channel;
    if (desc->progress == DTRAIN_PROGRESS_THREAD)
        status = dtrain__service_join(comm);
    if (status != DTRAIN_OK) {
        dtrain__comm_free(comm);
        return status;
    }
    dtrain__socket_tell_last(channel, dtrain__recorder_tell, comm);
    *out = comm;
    return DTRAIN_OK;
}

/* Makes this process's end of a group of processes, which then forms under the service thread or by polling. */
static dtrain_status dtrain__comm_connect(dtrain_comm **out, const dtrain__place *place, const dtrain_comm_desc *desc)
{
    dtrain_comm_desc placed = *desc;
    dtrain__channel *channel;
    dtrain_comm *comm;
    int64_t now = dtrain__os_now_ns();
    dtrain_status status = dtrain__comm_open(&channel, place, desc);
    if (status != DTRAIN_OK)
        return status;
    placed.timeout_ms = place->timeout_ms;
    status = dtrain__comm_on_channel(&comm, channel, &placed);
    if (status != DTRAIN_OK) {
        dtrain__error kept = dtrain__thread_error;
        dtrain__channel_destroy(channel);
        return dtrain__report(&kept);
    }
    comm->forming = 1;
    comm->started_ns = now;
    comm->form_deadline_ns = place->timeout_ms < 0 ? INT64_MAX : now + dtrain__os_ms_to_ns(place->timeout_ms);
    *out = comm;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_comm_create_async(dtrain_comm **comm, const dtrain_comm_desc *desc)
{
    dtrain_comm_desc defaults;
    dtrain__place place;
    dtrain_status status;
    memset(&defaults, 0, sizeof defaults);
    if (desc == NULL)
        desc = &defaults;
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_create: nowhere to put the group (comm is NULL)");
    *comm = NULL;
    status = dtrain__comm_check_desc(desc);
    if (status == DTRAIN_OK)
        status = dtrain__place_read(&place, desc);
    if (status != DTRAIN_OK)
        return status;
    if (place.world_size == 1)
        return dtrain_threads_create(comm, 1, desc);
    if (desc->algorithm == DTRAIN_ALGORITHM_FUSED)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_create: DTRAIN_ALGORITHM_FUSED is for ranks that share an "
                            "address space; choose another for %d processes",
                            place.world_size);
    status = dtrain__comm_connect(comm, &place, desc);
    memset(&place, 0, sizeof place);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_ready(dtrain_comm *comm, int *ready)
{
    dtrain_status status = DTRAIN_OK;
    int formed = 1;
    if (comm == NULL || ready == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_ready: needs a group and a place for the answer");
    if (comm->forming)
        status = dtrain__socket_formed(comm->socket, &formed, comm->started_ns, comm->form_deadline_ns);
    if (status != DTRAIN_OK)
        comm->error = dtrain__thread_error;
    else if (formed) {
        comm->forming = 0;
        if (comm->socket != NULL && comm->node_ranks == 0)
            comm->node_ranks = dtrain__socket_node_ranks(comm->socket);
    }
    *ready = status == DTRAIN_OK && formed;
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_create(dtrain_comm **comm, const dtrain_comm_desc *desc)
{
    dtrain_status status = dtrain_comm_create_async(comm, desc);
    int ready = 0;
    while (status == DTRAIN_OK) {
        dtrain__channel *channel = (*comm)->socket;
        uint64_t seen = channel != NULL ? __atomic_load_n(&channel->hub->news, __ATOMIC_SEQ_CST) : 0;
        struct pollfd none[1];
        status = dtrain_comm_ready(*comm, &ready);
        if (ready || status != DTRAIN_OK)
            break;
        dtrain__hub_wait(channel, none, 0, (*comm)->form_deadline_ns, seen);
    }
    if (status != DTRAIN_OK && comm != NULL && *comm != NULL) {
        dtrain__error kept = dtrain__thread_error;
        dtrain_comm_destroy(*comm);
        *comm = NULL;
        dtrain__report(&kept);
    }
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_from_transport(dtrain_comm **comm, const dtrain_transport *transport,
                                                    const dtrain_comm_desc *desc)
{
    dtrain_comm_desc defaults;
    dtrain_status status;
    memset(&defaults, 0, sizeof defaults);
    if (comm == NULL || transport == NULL || transport->send == NULL || transport->recv == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_from_transport: needs a place for the group and a table with send and recv");
    *comm = NULL;
    if (transport->size < 1 || transport->size > DTRAIN__MAX_RANKS || transport->rank < 0 ||
        transport->rank >= transport->size)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "comm_from_transport: rank %d of %d ranks; 1 to %d are possible",
                            transport->rank, transport->size, DTRAIN__MAX_RANKS);
    if (transport->board != NULL || (desc != NULL && desc->algorithm == DTRAIN_ALGORITHM_FUSED))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_from_transport: only dtrain_threads_create makes ranks that share an address space; "
                            "leave board NULL and choose another algorithm than FUSED");
    status = dtrain__comm_check_desc(desc != NULL ? desc : &defaults);
    if (status == DTRAIN_OK)
        status =
            dtrain__comm_new(comm, transport, desc != NULL ? desc : &defaults, desc != NULL ? desc->allocator : NULL);
    if (status == DTRAIN_OK && transport->poll != NULL && (*comm)->desc.progress == DTRAIN_PROGRESS_THREAD) {
        status = dtrain__service_join(*comm);
        if (status != DTRAIN_OK) {
            dtrain__comm_free(*comm);
            *comm = NULL;
        }
    }
    return status;
}

/* Cancels what is queued, so that peers hear of it and no buffer is used after the handles are gone. */
static void dtrain__comm_cancel(dtrain_comm *comm)
{
    dtrain__error cause;
    dtrain__error kept = dtrain__thread_error;
    dtrain_work *work = dtrain__queue_head(comm);
    if (work == NULL || comm->transport.board == NULL)
        return;
    dtrain__fail(&cause, DTRAIN_ERR_PEER_LOST, "rank %d has left the group with %s under way", comm->rank,
                 dtrain__op_text(comm, &work->op).text);
    dtrain__board_break(comm->transport.board, &cause);
    dtrain__board_revoke(comm->transport.board, comm->rank);
    dtrain__thread_error = kept;
}

/* Leaves with a reason that peers will read; NULL: none. */
static void dtrain__comm_leave(dtrain_comm *comm, const dtrain__error *why)
{
    dtrain_transport transport = comm->transport;
    int forked = comm->process != getpid();
    if (comm->socket != NULL)
        comm->socket->forked = forked;
    if (!forked) { /* a child has neither the service thread nor a right to its locks */
        dtrain__service_leave(comm);
        if (comm->socket != NULL)
            dtrain__socket_tell_last(comm->socket, NULL, NULL);
        dtrain__comm_cancel(comm);
    }
    if (why != NULL && transport.board != NULL)
        transport.board->slots[comm->rank].why = *why;
    if (transport.leave != NULL)
        transport.leave(transport.self, why != NULL ? why->text : "");
    int shared = transport.board != NULL || comm->socket != NULL; /* the transport owns the allocator of its ranks */
    if (shared)
        dtrain__comm_free(comm);
    if (transport.destroy != NULL)
        transport.destroy(transport.self);
    if (!shared)
        dtrain__comm_free(comm);
}

DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm)
{
    if (comm != NULL)
        dtrain__comm_leave(comm, comm->error.status != DTRAIN_OK ? &comm->error : NULL);
}

DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm)
{
    return comm != NULL ? comm->rank : 0;
}

DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm)
{
    return comm != NULL ? comm->size : 1;
}

DTRAIN_API const char *dtrain_comm_error(const dtrain_comm *comm)
{
    return comm != NULL ? comm->error.text : "";
}

DTRAIN_API dtrain_allocator *dtrain_comm_allocator(dtrain_comm *comm)
{
    return comm != NULL ? comm->allocator : NULL;
}

DTRAIN_API int64_t dtrain_comm_blocked_ns(const dtrain_comm *comm)
{
    return comm != NULL ? comm->blocked_ns : 0;
}

#define DTRAIN__LEAST_STACK 65536

typedef struct dtrain__runner {
    dtrain__os_thread thread;
    dtrain_comm *comm;
    dtrain_status (*body)(dtrain_comm *, void *);
    void *user;
    uint32_t *failures; /* counts up, so that the first failure is known */
    uint32_t place;
    dtrain__error error;
} dtrain__runner;

static void dtrain__runner_main(void *pointer)
{
    dtrain__runner *runner = (dtrain__runner *)pointer;
    int rank = runner->comm->rank;
    dtrain__thread_error.text[0] = 0;
    dtrain_status status = runner->body(runner->comm, runner->user);
    if (status != DTRAIN_OK) {
        dtrain__error last = dtrain__thread_error;
        dtrain__fail(&runner->error, status, "rank %d: %.600s", rank,
                     last.text[0] != 0 ? last.text : dtrain_status_name(status));
        runner->place = __atomic_add_fetch(runner->failures, 1, __ATOMIC_SEQ_CST);
    }
    if (status != DTRAIN_OK)
        dtrain__family_give_up(runner->comm->transport.board, rank, &runner->error);
    dtrain__comm_leave(runner->comm, status != DTRAIN_OK ? &runner->error : NULL);
}

/* Starts a thread for each rank; returns how many, fewer than `ranks` when *status says why. */
static int dtrain__runners_start(dtrain__runner *runners, dtrain_comm **comms, int ranks, size_t stack,
                                 dtrain_status *status)
{
    for (int rank = 0; rank < ranks; rank++) {
        runners[rank].comm = comms[rank];
        int error = dtrain__os_thread_start(&runners[rank].thread, dtrain__runner_main, &runners[rank], stack);
        if (error == 0)
            continue;
        *status = dtrain__fail(NULL, DTRAIN_ERR_IO, "run_threads: the system refused thread %d of %d (%s)", rank, ranks,
                               strerror(error));
        for (int left = rank; left < ranks; left++)
            dtrain_comm_destroy(comms[left]);
        return rank;
    }
    return ranks;
}

/* Waits for the ranks; the error of the one that failed first is the call's. */
static dtrain_status dtrain__runners_join(dtrain__runner *runners, int started, dtrain_status status)
{
    dtrain__error first = dtrain__thread_error;
    for (int rank = 0; rank < started; rank++) {
        dtrain__os_thread_join(&runners[rank].thread);
        if (status == DTRAIN_OK && runners[rank].place == 1)
            first = runners[rank].error;
    }
    for (int rank = 0; status == DTRAIN_OK && rank < started; rank++)
        if (runners[rank].place == 1)
            status = first.status;
    if (status != DTRAIN_OK)
        dtrain__thread_error = first;
    return status;
}

DTRAIN_API dtrain_status dtrain_run_threads(int ranks, dtrain_status (*body)(dtrain_comm *world, void *user),
                                            void *user, const dtrain_comm_desc *desc)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    size_t n = ranks > 0 && ranks <= DTRAIN__MAX_RANKS ? (size_t)ranks : 0;
    size_t stack = desc != NULL && desc->stack_bytes > 0 ? desc->stack_bytes : (size_t)8 << 20;
    uint32_t failures = 0;
    dtrain_status status = DTRAIN_OK;
    if (n == 0 || body == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "run_threads: %d ranks (1 to %d are possible) of %s body", ranks,
                            DTRAIN__MAX_RANKS, body == NULL ? "no" : "a");
    if (stack < DTRAIN__LEAST_STACK)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "run_threads: desc.stack_bytes is %zu; calls need %d, and body what it needs beside", stack,
                            DTRAIN__LEAST_STACK);
    dtrain__runner *runners = (dtrain__runner *)dtrain__alloc(&heap, n * sizeof(dtrain__runner));
    dtrain_comm **comms = (dtrain_comm **)dtrain__alloc(&heap, n * sizeof(dtrain_comm *));
    for (size_t rank = 0; runners != NULL && rank < n; rank++) {
        runners[rank].body = body;
        runners[rank].user = user;
        runners[rank].failures = &failures;
    }
    if (runners == NULL || comms == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "run_threads: no memory for %d ranks", ranks);
    else
        status = dtrain_threads_create(comms, ranks, desc);
    if (status == DTRAIN_OK) {
        int started = dtrain__runners_start(runners, comms, ranks, stack, &status);
        status = dtrain__runners_join(runners, started, status);
    }
    dtrain__free(&heap, comms, n * sizeof(dtrain_comm *));
    dtrain__free(&heap, runners, n * sizeof(dtrain__runner));
    return status;
}

#endif

/* ---- >>collectives ----
 * The public calls: each describes itself as an operation and hands it to the core, blocking or not. */
#ifndef DTRAIN__COLLECTIVES
#define DTRAIN__COLLECTIVES

static dtrain__op dtrain__op_of(dtrain__kind kind, const void *in, void *out, size_t count, dtrain_dtype dtype)
{
    dtrain__op op;
    memset(&op, 0, offsetof(dtrain__op, error));
    op.error.status = DTRAIN_OK;
    op.kind = kind;
    op.in = in;
    op.out = out;
    op.count = count;
    op.dtype = dtype;
    op.from = -1;
    return op;
}

/* The same with parts as the caller says; comm may be NULL, which is found later. */
static dtrain__op dtrain__op_of_parts(const dtrain_comm *comm, dtrain__kind kind, const void *in, void *out,
                                      const size_t *counts, const size_t *offsets, dtrain_dtype dtype)
{
    dtrain__op op = dtrain__op_of(kind, in, out, 0, dtype);
    op.counts = counts;
    op.offsets = offsets;
    for (int rank = 0; comm != NULL && counts != NULL && rank < comm->size; rank++) {
        size_t sum = op.count + counts[rank];
        op.count = sum >= op.count ? sum : SIZE_MAX; /* refused as too large */
    }
    return op;
}

/* Runs a call to its end, or starts it when there is a place for its handle. */
static dtrain_status dtrain__collective(dtrain_comm *comm, dtrain__kind kind, const void *in, void *out, size_t count,
                                        dtrain_dtype dtype, dtrain_op reduction, int root, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of(kind, in, out, count, dtype);
    op.op = reduction;
    op.root = root;
    return dtrain__comm_call(comm, &op, work);
}

static dtrain_status dtrain__collective_v(dtrain_comm *comm, dtrain__kind kind, const void *in, void *out,
                                          const size_t *counts, const size_t *offsets, dtrain_dtype dtype,
                                          dtrain_op reduction, int root, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of_parts(comm, kind, in, out, counts, offsets, dtype);
    op.op = reduction;
    op.root = root;
    if (counts == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "%s_v: the array of counts, one for each rank, is NULL", dtrain__kind_name((uint64_t)kind));
    return dtrain__comm_call(comm, &op, work);
}

static dtrain_status dtrain__no_work(dtrain_comm *comm, dtrain__kind kind)
{
    return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                        "%s_async: nowhere to put the handle (work is NULL)", dtrain__kind_name((uint64_t)kind));
}

DTRAIN_API size_t dtrain_shard(const dtrain_comm *comm, size_t count, int rank, size_t *begin)
{
    if (comm != NULL)
        return dtrain_split(count, comm->size, rank, begin);
    if (begin != NULL)
        *begin = 0;
    return 0;
}

DTRAIN_API dtrain_status dtrain_all_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__collective(comm, DTRAIN__ALL_REDUCE, in, out, count, dtype, op, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_all_reduce_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_op op, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__ALL_REDUCE);
    return dtrain__collective(comm, DTRAIN__ALL_REDUCE, in, out, count, dtype, op, 0, work);
}

DTRAIN_API dtrain_status dtrain_reduce(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                       dtrain_op op, int root)
{
    return dtrain__collective(comm, DTRAIN__REDUCE, in, out, count, dtype, op, root, NULL);
}

DTRAIN_API dtrain_status dtrain_reduce_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                             dtrain_dtype dtype, dtrain_op op, int root, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__REDUCE);
    return dtrain__collective(comm, DTRAIN__REDUCE, in, out, count, dtype, op, root, work);
}

DTRAIN_API dtrain_status dtrain_reduce_scatter(dtrain_comm *comm, const void *in, void *out, size_t count,
                                               dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__collective(comm, DTRAIN__REDUCE_SCATTER, in, out, count, dtype, op, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_reduce_scatter_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                     dtrain_dtype dtype, dtrain_op op, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__REDUCE_SCATTER);
    return dtrain__collective(comm, DTRAIN__REDUCE_SCATTER, in, out, count, dtype, op, 0, work);
}

DTRAIN_API dtrain_status dtrain_reduce_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                 const size_t *offsets, dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__collective_v(comm, DTRAIN__REDUCE_SCATTER, in, out, counts, offsets, dtype, op, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_reduce_scatter_v_async(dtrain_comm *comm, const void *in, void *out,
                                                       const size_t *counts, const size_t *offsets, dtrain_dtype dtype,
                                                       dtrain_op op, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__REDUCE_SCATTER);
    return dtrain__collective_v(comm, DTRAIN__REDUCE_SCATTER, in, out, counts, offsets, dtype, op, 0, work);
}

DTRAIN_API dtrain_status dtrain_all_gather(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype)
{
    return dtrain__collective(comm, DTRAIN__ALL_GATHER, in, out, count, dtype, (dtrain_op)0, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_all_gather_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__ALL_GATHER);
    return dtrain__collective(comm, DTRAIN__ALL_GATHER, in, out, count, dtype, (dtrain_op)0, 0, work);
}

DTRAIN_API dtrain_status dtrain_all_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                             const size_t *offsets, dtrain_dtype dtype)
{
    return dtrain__collective_v(comm, DTRAIN__ALL_GATHER, in, out, counts, offsets, dtype, (dtrain_op)0, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_all_gather_v_async(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                   const size_t *offsets, dtrain_dtype dtype, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__ALL_GATHER);
    return dtrain__collective_v(comm, DTRAIN__ALL_GATHER, in, out, counts, offsets, dtype, (dtrain_op)0, 0, work);
}

DTRAIN_API dtrain_status dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype, int root)
{
    return dtrain__collective(comm, DTRAIN__BROADCAST, buffer, buffer, count, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_broadcast_async(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype,
                                                int root, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__BROADCAST);
    return dtrain__collective(comm, DTRAIN__BROADCAST, buffer, buffer, count, dtype, (dtrain_op)0, root, work);
}

DTRAIN_API dtrain_status dtrain_gather(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                       int root)
{
    return dtrain__collective(comm, DTRAIN__GATHER, in, out, count, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_gather_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                             dtrain_dtype dtype, int root, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__GATHER);
    return dtrain__collective(comm, DTRAIN__GATHER, in, out, count, dtype, (dtrain_op)0, root, work);
}

DTRAIN_API dtrain_status dtrain_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                         const size_t *offsets, dtrain_dtype dtype, int root)
{
    return dtrain__collective_v(comm, DTRAIN__GATHER, in, out, counts, offsets, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_gather_v_async(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                               const size_t *offsets, dtrain_dtype dtype, int root, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__GATHER);
    return dtrain__collective_v(comm, DTRAIN__GATHER, in, out, counts, offsets, dtype, (dtrain_op)0, root, work);
}

DTRAIN_API dtrain_status dtrain_scatter(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                        int root)
{
    return dtrain__collective(comm, DTRAIN__SCATTER, in, out, count, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_scatter_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                              dtrain_dtype dtype, int root, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__SCATTER);
    return dtrain__collective(comm, DTRAIN__SCATTER, in, out, count, dtype, (dtrain_op)0, root, work);
}

DTRAIN_API dtrain_status dtrain_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                          const size_t *offsets, dtrain_dtype dtype, int root)
{
    return dtrain__collective_v(comm, DTRAIN__SCATTER, in, out, counts, offsets, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_scatter_v_async(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                const size_t *offsets, dtrain_dtype dtype, int root, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__SCATTER);
    return dtrain__collective_v(comm, DTRAIN__SCATTER, in, out, counts, offsets, dtype, (dtrain_op)0, root, work);
}

DTRAIN_API dtrain_status dtrain_all_to_all(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype)
{
    return dtrain__collective(comm, DTRAIN__ALL_TO_ALL, in, out, count, dtype, (dtrain_op)0, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_all_to_all_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__ALL_TO_ALL);
    return dtrain__collective(comm, DTRAIN__ALL_TO_ALL, in, out, count, dtype, (dtrain_op)0, 0, work);
}

static dtrain_status dtrain__all_to_all_v(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                          const size_t *in_offsets, void *out, const size_t *out_counts,
                                          const size_t *out_offsets, dtrain_dtype dtype, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of_parts(comm, DTRAIN__ALL_TO_ALL, in, out, in_counts, in_offsets, dtype);
    op.out_counts = out_counts;
    op.out_offsets = out_offsets;
    if (in_counts == NULL || out_counts == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "all_to_all_v: an array of counts, one for each rank, is NULL");
    return dtrain__comm_call(comm, &op, work);
}

DTRAIN_API dtrain_status dtrain_all_to_all_v(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                             const size_t *in_offsets, void *out, const size_t *out_counts,
                                             const size_t *out_offsets, dtrain_dtype dtype)
{
    return dtrain__all_to_all_v(comm, in, in_counts, in_offsets, out, out_counts, out_offsets, dtype, NULL);
}

DTRAIN_API dtrain_status dtrain_all_to_all_v_async(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                                   const size_t *in_offsets, void *out, const size_t *out_counts,
                                                   const size_t *out_offsets, dtrain_dtype dtype, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__ALL_TO_ALL);
    return dtrain__all_to_all_v(comm, in, in_counts, in_offsets, out, out_counts, out_offsets, dtype, work);
}

DTRAIN_API dtrain_status dtrain_barrier(dtrain_comm *comm)
{
    return dtrain__collective(comm, DTRAIN__BARRIER, NULL, NULL, 0, DTRAIN_U8, (dtrain_op)0, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_barrier_async(dtrain_comm *comm, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__BARRIER);
    return dtrain__collective(comm, DTRAIN__BARRIER, NULL, NULL, 0, DTRAIN_U8, (dtrain_op)0, 0, work);
}

DTRAIN_API dtrain_status dtrain_send(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype, int peer)
{
    return dtrain__collective(comm, DTRAIN__SEND, in, NULL, count, dtype, (dtrain_op)0, peer, NULL);
}

DTRAIN_API dtrain_status dtrain_send_async(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype,
                                           int peer, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__SEND);
    return dtrain__collective(comm, DTRAIN__SEND, in, NULL, count, dtype, (dtrain_op)0, peer, work);
}

DTRAIN_API dtrain_status dtrain_recv(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer)
{
    return dtrain__collective(comm, DTRAIN__RECV, NULL, out, count, dtype, (dtrain_op)0, peer, NULL);
}

DTRAIN_API dtrain_status dtrain_recv_async(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer,
                                           dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__RECV);
    return dtrain__collective(comm, DTRAIN__RECV, NULL, out, count, dtype, (dtrain_op)0, peer, work);
}

static dtrain_status dtrain__exchange(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                      size_t out_count, int from, dtrain_dtype dtype, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of(DTRAIN__EXCHANGE, in, out, in_count, dtype);
    op.in_count = out_count;
    op.root = to;
    op.from = from;
    return dtrain__comm_call(comm, &op, work);
}

DTRAIN_API dtrain_status dtrain_exchange(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                         size_t out_count, int from, dtrain_dtype dtype)
{
    return dtrain__exchange(comm, in, in_count, to, out, out_count, from, dtype, NULL);
}

DTRAIN_API dtrain_status dtrain_exchange_async(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                               size_t out_count, int from, dtrain_dtype dtype, dtrain_work **work)
{
    if (work == NULL)
        return dtrain__no_work(comm, DTRAIN__EXCHANGE);
    return dtrain__exchange(comm, in, in_count, to, out, out_count, from, dtype, work);
}

DTRAIN_API const char *dtrain_comm_algorithm(const dtrain_comm *comm, const char *collective, size_t count,
                                             dtrain_dtype dtype)
{
    dtrain__kind kind = collective != NULL ? dtrain__plan_kind(collective, strlen(collective)) : DTRAIN__KINDS;
    dtrain__op op = dtrain__op_of(kind, NULL, NULL, count, dtype);
    if (comm == NULL || kind == DTRAIN__KINDS)
        return "?";
    return dtrain__algorithm_name((uint64_t)dtrain__plan_select(comm, &op));
}

/* Index of the first element in which a and b differ; count when none does. */
static size_t dtrain__first_difference(const unsigned char *a, const unsigned char *b, size_t count, size_t width)
{
    if (count == 0 || memcmp(a, b, count * width) == 0)
        return count;
    for (size_t i = 0; i < count; i++)
        if (memcmp(a + i * width, b + i * width, width) != 0)
            return i;
    return count;
}

/* Compares with rank 0's data in pieces; *first is the first differing element, or count. */
static dtrain_status dtrain__compare_with_root(dtrain_comm *comm, const unsigned char *data, size_t count,
                                               dtrain_dtype dtype, unsigned char *piece, size_t piece_count,
                                               size_t *first)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    dtrain_status status = DTRAIN_OK;
    *first = count;
    for (size_t at = 0; status == DTRAIN_OK && at < count; at += piece_count) {
        size_t n = count - at < piece_count ? count - at : piece_count;
        if (comm->rank == 0)
            memcpy(piece, data + at * width, n * width);
        status = dtrain_broadcast(comm, piece, n, dtype, 0);
        if (status == DTRAIN_OK && *first == count) {
            size_t found = dtrain__first_difference(piece, data + at * width, n, width);
            *first = found < n ? at + found : count;
        }
    }
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_check_equal(dtrain_comm *comm, const void *data, size_t count, dtrain_dtype dtype)
{
    size_t width = dtrain_dtype_bits(dtype) / 8, piece_bytes = (size_t)256 << 10, first;
    if (comm == NULL || width == 0 || dtrain_dtype_bits(dtype) % 8 != 0 || (data == NULL && count > 0))
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "check_equal: needs a group, data, and a dtype of whole bytes (got %d)", (int)dtype);
    if (comm->fusing)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "check_equal on rank %d: it cannot be fused; call fuse_end first", comm->rank);
    size_t table_bytes = (size_t)comm->size * sizeof(uint64_t);
    unsigned char *piece = (unsigned char *)dtrain__alloc(comm->allocator, piece_bytes + table_bytes);
    if (piece == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "check_equal on rank %d: no memory for %zu bytes",
                            comm->rank, piece_bytes + table_bytes);
    uint64_t *table = (uint64_t *)(void *)(piece + piece_bytes), mine;
    dtrain_status status =
        dtrain__compare_with_root(comm, (const unsigned char *)data, count, dtype, piece, piece_bytes / width, &first);
    mine = first;
    if (status == DTRAIN_OK)
        status = dtrain_all_gather(comm, &mine, table, (size_t)comm->size, DTRAIN_U64);
    for (int rank = 0; status == DTRAIN_OK && rank < comm->size; rank++)
        if (table[rank] != count)
            status = dtrain__fail(&comm->error, DTRAIN_ERR_MISMATCH,
                                  "check_equal (%s x %zu): rank %d differs from rank 0, first in element %llu; their "
                                  "replicas took different steps",
                                  dtrain_dtype_name(dtype), count, rank, (unsigned long long)table[rank]);
    dtrain__free(comm->allocator, piece, piece_bytes + table_bytes);
    return status;
}

#endif

/* ---- >>tensor_calls ----
 * Collectives over tensors: the same calls, with shapes compared first. */
#ifndef DTRAIN__TENSOR_CALLS
#define DTRAIN__TENSOR_CALLS

static size_t dtrain__tensor_rows(const dtrain_tensor *tensor)
{
    return tensor->ndim > 0 ? tensor->shape[0] : 1;
}

/* Elements of one row. */
static size_t dtrain__tensor_row(const dtrain_tensor *tensor)
{
    size_t row = 1;
    for (int i = 1; i < tensor->ndim; i++)
        row *= tensor->shape[i];
    return row;
}

/* Checks that part is whole but for its first size, which must be rows. */
static dtrain_status dtrain__tensor_fits(dtrain_comm *comm, const char *call, const dtrain_tensor *whole,
                                         const dtrain_tensor *part, size_t rows)
{
    int fits = comm != NULL && whole != NULL && part != NULL;
    if (!fits)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID, "%s: the group or a tensor is NULL",
                            call);
    fits = whole->dtype == part->dtype && whole->ndim == part->ndim && dtrain__tensor_rows(part) == rows;
    for (int i = 1; fits && i < whole->ndim; i++)
        fits = whole->shape[i] == part->shape[i];
    if (fits)
        return DTRAIN_OK;
    dtrain_tensor expected = *whole;
    expected.shape[0] = rows;
    return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: %s was expected beside %s, %s came", call,
                        comm->rank, dtrain__tensor_text(&expected).text, dtrain__tensor_text(whole).text,
                        dtrain__tensor_text(part).text);
}

/* The same, where the part is this rank's share of the rows. */
static dtrain_status dtrain__tensor_splits(dtrain_comm *comm, const char *call, const dtrain_tensor *whole,
                                           const dtrain_tensor *part)
{
    size_t rows = comm != NULL && whole != NULL ? dtrain_shard(comm, dtrain__tensor_rows(whole), comm->rank, NULL) : 0;
    if (comm != NULL && whole != NULL && whole->ndim == 0)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: a scalar has no dimension 0 to split",
                            call, comm->rank);
    return dtrain__tensor_fits(comm, call, whole, part, rows);
}

DTRAIN_API dtrain_status dtrain_tensor_all_reduce(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out,
                                                  dtrain_op op)
{
    dtrain_status status =
        dtrain__tensor_fits(comm, "tensor_all_reduce", in, out, in != NULL ? dtrain__tensor_rows(in) : 0);
    return status != DTRAIN_OK ? status : dtrain_all_reduce(comm, in->data, out->data, in->count, in->dtype, op);
}

DTRAIN_API dtrain_status dtrain_tensor_reduce_scatter(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out,
                                                      dtrain_op op)
{
    dtrain_status status = dtrain__tensor_splits(comm, "tensor_reduce_scatter", in, out);
    if (status != DTRAIN_OK)
        return status;
    dtrain__op call = dtrain__op_of(DTRAIN__REDUCE_SCATTER, in->data, out->data, in->count, in->dtype);
    call.op = op;
    call.row = dtrain__tensor_row(in);
    return dtrain__comm_call(comm, &call, NULL);
}

DTRAIN_API dtrain_status dtrain_tensor_all_gather(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out)
{
    dtrain_status status = dtrain__tensor_splits(comm, "tensor_all_gather", out, in);
    if (status != DTRAIN_OK)
        return status;
    dtrain__op call = dtrain__op_of(DTRAIN__ALL_GATHER, in->data, out->data, out->count, out->dtype);
    call.row = dtrain__tensor_row(out);
    return dtrain__comm_call(comm, &call, NULL);
}

DTRAIN_API dtrain_status dtrain_tensor_broadcast(dtrain_comm *comm, dtrain_tensor *tensor, int root)
{
    if (tensor == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "tensor_broadcast: the tensor is NULL");
    return dtrain_broadcast(comm, tensor->data, tensor->count, tensor->dtype, root);
}

#endif

/* ---- >>fuse ----
 * Many small calls as few operations. Between fuse_begin and fuse_end calls are noted; fuse_end runs the messages
 * among them as one set, then the collectives in the order of their calls, neighbours of one kind as one operation:
 * over messages packed into one buffer, between ranks of one address space as a list of the buffers. What becomes one
 * depends on nothing but the calls, so ranks that made the same calls make the same sets. */
#ifndef DTRAIN__FUSE
#define DTRAIN__FUSE

#define DTRAIN__FUSE_CALL ((size_t)1 << 20) /* larger buffers are not worth a copy */
#define DTRAIN__FUSE_SET ((size_t)4 << 20)

DTRAIN_API dtrain_status dtrain_fuse_begin(dtrain_comm *comm)
{
    if (comm == NULL || comm->fusing)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            comm != NULL ? "fuse_begin on rank %d: it was called before; call fuse_end first"
                                         : "fuse_begin: the group is NULL; was its creation checked?",
                            dtrain_comm_rank(comm));
    comm->fusing = 1;
    comm->noted = 0;
    return DTRAIN_OK;
}

/* Whether an all_reduce adds in an order that depends on where an element stands. */
static int dtrain__fuse_has_order(const dtrain_comm *comm, const dtrain__op *op)
{
    return comm->desc.order != DTRAIN_ORDER_TREE || op->algorithm == DTRAIN_ALGORITHM_RING ||
           op->algorithm == DTRAIN_ALGORITHM_DOUBLE_TREE || op->algorithm == DTRAIN_ALGORITHM_NODES;
}

/* Whether a call may join the set of the first one, which has `bytes` so far. */
static int dtrain__fuse_fits(const dtrain_comm *comm, const dtrain__op *first, const dtrain__op *next, size_t bytes)
{
    int fusible =
        next->kind == DTRAIN__BROADCAST || (next->kind == DTRAIN__ALL_REDUCE && !dtrain__fuse_has_order(comm, next));
    return fusible && next->kind == first->kind && next->dtype == first->dtype && next->op == first->op &&
           next->root == first->root && dtrain__op_bytes(next) <= DTRAIN__FUSE_CALL &&
           bytes + dtrain__op_bytes(next) <= DTRAIN__FUSE_SET;
}

/* The set that begins with a noted collective: its calls as one operation; returns the note after it. */
static size_t dtrain__fuse_set(const dtrain_comm *comm, size_t at, dtrain__op *packed)
{
    size_t end = at, width = dtrain_dtype_bits(comm->notes[at].op.dtype) / 8;
    memcpy(packed, &comm->notes[at].op, offsetof(dtrain__op, error));
    packed->error.status = DTRAIN_OK;
    packed->first = packed->count;
    packed->count = 0;
    for (; end < comm->noted; end++) {
        const dtrain__op *next = &comm->notes[end].op;
        if (dtrain__op_is_letter(next))
            continue;
        if (!dtrain__fuse_fits(comm, &comm->notes[at].op, next, packed->count * width))
            break;
        packed->count += next->count;
        packed->digest = dtrain_random_u64(packed->digest, next->count);
        packed->form++;
    }
    return end;
}

/* Copies the buffers of a set into the packed one, or the results back. */
static void dtrain__fuse_copy(dtrain_comm *comm, size_t at, size_t end, int back)
{
    unsigned char *packed = comm->packed;
    for (; at < end; at++) {
        const dtrain__op *op = &comm->notes[at].op;
        size_t bytes = dtrain__op_bytes(op);
        int reads = op->kind == DTRAIN__ALL_REDUCE || op->root == comm->rank;
        int writes = op->kind == DTRAIN__ALL_REDUCE || op->root != comm->rank;
        if (dtrain__op_is_letter(op))
            continue;
        if (bytes > 0 && !back && reads)
            memcpy(packed, op->in, bytes);
        if (bytes > 0 && back && writes)
            memcpy(op->out, packed, bytes);
        packed += bytes;
    }
}

/* Lists the buffers of a set in the packed one. */
static void dtrain__fuse_list(dtrain_comm *comm, size_t at, size_t end)
{
    dtrain__segment *segment = (dtrain__segment *)(void *)comm->packed;
    for (; at < end; at++) {
        const dtrain__op *op = &comm->notes[at].op;
        if (dtrain__op_is_letter(op))
            continue;
        segment->in = op->in;
        segment->out = op->out;
        segment++->count = op->count;
    }
}

static dtrain_status dtrain__fuse_reserve(dtrain_comm *comm, size_t bytes)
{
    unsigned char *packed;
    if (comm->packed_bytes >= bytes)
        return DTRAIN_OK;
    packed = (unsigned char *)dtrain__alloc(comm->allocator, bytes);
    if (packed == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "rank %d: no memory for a buffer of %zu bytes", comm->rank,
                            bytes);
    dtrain__free(comm->allocator, comm->packed, comm->packed_bytes);
    comm->packed = packed;
    comm->packed_bytes = bytes;
    return DTRAIN_OK;
}

static void dtrain__fuse_keep(dtrain__error *first, dtrain_status status)
{
    if (status != DTRAIN_OK && first->status == DTRAIN_OK)
        *first = dtrain__thread_error;
}

/* Runs the set that begins with a noted collective; returns the note after it. */
static size_t dtrain__fuse_run(dtrain_comm *comm, size_t at, dtrain__error *first)
{
    dtrain__op op;
    dtrain_status status;
    size_t end = dtrain__fuse_set(comm, at, &op);
    if (op.form < 2) {
        dtrain__fuse_keep(first, dtrain__comm_call(comm, &comm->notes[at].op, NULL));
        return at + 1;
    }
    /* where ranks share an address space, only what is small enough to be posted is worth a copy */
    op.scattered = dtrain__comm_fused(&op) && dtrain__op_bytes(&op) > DTRAIN__POST_INLINE_BYTES;
    status =
        dtrain__fuse_reserve(comm, op.scattered ? (size_t)op.form * sizeof(dtrain__segment) : dtrain__op_bytes(&op));
    if (status == DTRAIN_OK) {
        op.in = op.out = comm->packed;
        if (op.scattered)
            dtrain__fuse_list(comm, at, end);
        else
            dtrain__fuse_copy(comm, at, end, 0);
        status = dtrain__comm_call(comm, &op, NULL);
    }
    if (status == DTRAIN_OK && !op.scattered)
        dtrain__fuse_copy(comm, at, end, 1);
    dtrain__fuse_keep(first, status);
    return end;
}

/* Queues the noted messages and waits for all of them. Round k has those to the rank k above and from the rank k
 * below, so that what two ranks do at one time belongs together. */
static void dtrain__fuse_mail(dtrain_comm *comm, dtrain__error *first)
{
    int messages = 0;
    for (size_t i = 0; i < comm->noted; i++)
        messages |= dtrain__op_is_letter(&comm->notes[i].op);
    for (int k = 1; k < comm->size && messages && first->status == DTRAIN_OK; k++)
        for (size_t i = 0; i < comm->noted && first->status == DTRAIN_OK; i++) {
            dtrain__op *op = &comm->notes[i].op;
            int distance = op->kind == DTRAIN__SEND ? op->root - comm->rank : comm->rank - op->root;
            if (!dtrain__op_is_letter(op) || (distance + comm->size) % comm->size != k)
                continue;
            dtrain__fuse_keep(first, dtrain__comm_begin(comm, op));
            dtrain__comm_clock(comm, op);
            comm->notes[i].work = first->status == DTRAIN_OK ? dtrain__queue_add(comm, op) : NULL;
            if (comm->notes[i].work == NULL)
                dtrain__fuse_keep(first, dtrain__thread_error.status);
        }
    for (size_t i = 0; i < comm->noted; i++)
        if (comm->notes[i].work != NULL)
            dtrain__fuse_keep(first, dtrain_work_wait(comm->notes[i].work));
}

DTRAIN_API dtrain_status dtrain_fuse_end(dtrain_comm *comm)
{
    dtrain__error first;
    if (comm == NULL || !comm->fusing)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            comm != NULL ? "fuse_end on rank %d: there was no fuse_begin"
                                         : "fuse_end: the group is NULL; was its creation checked?",
                            dtrain_comm_rank(comm));
    first.status = DTRAIN_OK;
    comm->fusing = 0;
    dtrain__fuse_mail(comm, &first);
    for (size_t at = 0; at < comm->noted;)
        at = dtrain__op_is_letter(&comm->notes[at].op) ? at + 1 : dtrain__fuse_run(comm, at, &first);
    comm->noted = 0;
    if (first.status != DTRAIN_OK)
        comm->error = first;
    return dtrain__report(&first);
}

#endif

/* ---- >>cancel ----
 * Ending what is under way on purpose, from any thread: one operation, or the group. Nothing of a group that its
 * own thread writes is touched here but through atomics; the thread that drives finds out at its next turn. */
#ifndef DTRAIN__CANCEL
#define DTRAIN__CANCEL

/* These may be called beside another call of the group, whose error text so stays as it is. */
static dtrain_status dtrain__cancel_check(const dtrain_comm *comm, const char *call)
{
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: needs a group or handle (got NULL)", call);
    if (comm->process != getpid())
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: process %ld made this group, and this is its forked child",
                            call, (long)comm->process);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_work_cancel(dtrain_work *work)
{
    dtrain_comm *comm = work != NULL ? work->comm : NULL;
    dtrain_status status = dtrain__cancel_check(comm, "work_cancel");
    if (status != DTRAIN_OK)
        return status;
    __atomic_store_n(&work->op.cancelled, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(comm->bell);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_comm_abort(dtrain_comm *comm, const char *why)
{
    dtrain__error cause, kept = dtrain__thread_error;
    dtrain_status status = dtrain__cancel_check(comm, "comm_abort");
    if (status != DTRAIN_OK)
        return status;
    dtrain__fail(&cause, DTRAIN_ERR_ABORTED, "rank %d aborted the group: %.300s", comm->rank,
                 why != NULL && why[0] != 0 ? why : "it gave no reason");
    dtrain__thread_error = kept;
    dtrain__comm_break(comm, &cause);
    return DTRAIN_OK;
}

#endif

/* ---- >>weighted ----
 * The mean with a weight a rank: the sum of the weights first, so that all ranks agree on whether there is a mean,
 * then the sum of the weighted inputs, divided once. Both are all-reduces in the tree order that say in their
 * headers what they are part of. 16-bit inputs are weighted as float32, piece by piece. */
#ifndef DTRAIN__WEIGHTED_MEAN
#define DTRAIN__WEIGHTED_MEAN

#include <float.h>

#define DTRAIN__WEIGHTED_PIECE ((size_t)1 << 18) /* elements, where they cannot be weighted in place */

/* Whether a weight is a number that the partial dtype of dtype can hold; by its bits, whatever the compiler assumes
 * of infinities. *positive: and above 0. */
static int dtrain__weighted_number(dtrain_dtype dtype, double weight, int *positive)
{
    uint64_t bits;
    memcpy(&bits, &weight, sizeof bits);
    *positive = bits != 0 && bits >> 63 == 0;
    return bits >> 52 < 0x7ff ? dtype == DTRAIN_F64 || weight <= (double)FLT_MAX : bits << 1 == 0;
}

/* One all-reduce of partial sums, in place. */
static dtrain_status dtrain__weighted_sum(dtrain_comm *comm, void *sums, size_t count, dtrain_dtype dtype,
                                          const dtrain__op *whole)
{
    dtrain__op op;
    memcpy(&op, whole, offsetof(dtrain__op, error));
    op.error.status = DTRAIN_OK;
    op.in = op.out = sums;
    op.count = count;
    op.dtype = dtype;
    op.op = DTRAIN_SUM;
    op.form = DTRAIN__WEIGHTED;
    op.first = whole->count;
    op.digest = (uint64_t)whole->dtype;
    return dtrain__comm_call(comm, &op, NULL);
}

static dtrain_status dtrain__weighted_check(dtrain_comm *comm, const dtrain__op *op, double weight)
{
    dtrain_status status;
    int positive;
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted: the group is NULL; was its creation "
                            "checked?");
    status = dtrain__op_check(comm, op);
    if (status != DTRAIN_OK)
        return status;
    if (comm->fusing)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted on rank %d: it cannot be fused; call fuse_end first", comm->rank);
    if (!dtrain__weighted_number(op->dtype, weight, &positive))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted of %zu elements on rank %d: the weight is %g; a number of at least 0 "
                            "is expected that %s can hold",
                            op->count, comm->rank, weight, op->dtype == DTRAIN_F64 ? "a double" : "a float");
    return DTRAIN_OK;
}

/* Sums the weights; every rank comes to the same verdict. */
static dtrain_status dtrain__weighted_total(dtrain_comm *comm, const dtrain__op *op, double weight, double *total)
{
    dtrain_status status;
    int positive;
    *total = weight;
    status = dtrain__weighted_sum(comm, total, 1, DTRAIN_F64, op);
    if (status == DTRAIN_OK && !(dtrain__weighted_number(op->dtype, *total, &positive) && positive))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted of %zu elements: the weights of all %d ranks add up to %g, which "
                            "nothing can be divided by; one at least must be above 0",
                            op->count, comm->size, *total);
    return status;
}

DTRAIN_API dtrain_status dtrain_all_reduce_weighted(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                    dtrain_dtype dtype, double weight)
{
    dtrain__op op = dtrain__op_of(DTRAIN__ALL_REDUCE, in, out, count, dtype);
    dtrain_status status;
    double total;
    size_t width = dtrain_dtype_bits(dtype) / 8;
    dtrain_dtype partial = dtrain__fold_partial(dtype);
    op.op = DTRAIN_MEAN;
    status = dtrain__weighted_check(comm, &op, weight);
    if (status != DTRAIN_OK)
        return status;
    weight = dtype == DTRAIN_F64 ? weight : (double)(float)weight;
    status = dtrain__weighted_total(comm, &op, weight, &total);
    size_t piece = partial == dtype ? count : DTRAIN__WEIGHTED_PIECE;
    if (status == DTRAIN_OK && partial != dtype)
        status = dtrain__fuse_reserve(comm, (count < piece ? count : piece) * sizeof(float));
    for (size_t at = 0; status == DTRAIN_OK && at < count; at += piece) {
        size_t n = count - at < piece ? count - at : piece;
        void *sums = partial == dtype ? out : comm->packed;
        dtrain__fold_weigh(dtype, weight, (const unsigned char *)in + at * width, sums, n);
        status = dtrain__weighted_sum(comm, sums, n, partial, &op);
        if (status == DTRAIN_OK)
            dtrain__fold_finish(dtype, DTRAIN_MEAN, total, sums, (unsigned char *)out + at * width, n);
    }
    return status;
}

#endif

/* ---- >>store_calls ----
 * The store's public calls. Rank 0 serves itself; the others ask it over their control connection and wait for
 * the answer. Ranks of one address space share the store of their family of boards. */
#ifndef DTRAIN__STORE_CALLS
#define DTRAIN__STORE_CALLS

static const char *const dtrain__store_names[] = {"store_set", "store_get", "store_wait"};

static void dtrain__store_copy(void *value, size_t capacity, size_t *bytes, const void *data, size_t n)
{
    if (n > 0 && capacity > 0)
        memcpy(value, data, n < capacity ? n : capacity);
    *bytes = n;
}

typedef struct dtrain__store_wait {
    dtrain_comm *comm;
    const char *key;
    void *value;
    size_t capacity, *bytes;
} dtrain__store_wait;

static int dtrain__store_look(void *pointer)
{
    dtrain__store_wait *wait = (dtrain__store_wait *)pointer;
    dtrain__board *board = wait->comm->transport.board;
    pthread_mutex_lock(&board->family->mutex);
    dtrain__entry *entry = *dtrain__store_place(&board->family->store, wait->key, strlen(wait->key));
    if (entry != NULL)
        dtrain__store_copy(wait->value, wait->capacity, wait->bytes, dtrain__entry_value(entry), entry->bytes);
    pthread_mutex_unlock(&board->family->mutex);
    return entry != NULL || dtrain__board_broken(board);
}

static dtrain_status dtrain__store_on_board(dtrain_comm *comm, int what, const char *key, void *value, size_t capacity,
                                            size_t *bytes, int64_t deadline_ns)
{
    dtrain__board *board = comm->transport.board;
    dtrain__store_wait wait = {comm, key, value, capacity, bytes};
    dtrain_status status;
    if (what == DTRAIN__STORE_SET) {
        pthread_mutex_lock(&board->family->mutex);
        status = dtrain__store_put(&board->family->store, board->allocator, key, strlen(key), value, capacity);
        for (dtrain__board *other = board->family->boards; other != NULL; other = other->next)
            dtrain__bell_ring(&other->bell);
        pthread_mutex_unlock(&board->family->mutex);
        return status;
    }
    *bytes = DTRAIN_STORE_ABSENT;
    for (unsigned turn = 0; !dtrain__store_look(&wait) && what == DTRAIN__STORE_WAIT; turn++) {
        if (dtrain__os_now_ns() >= deadline_ns)
            return dtrain__fail(&comm->error, DTRAIN_ERR_TIMEOUT, "store_wait on rank %d: nobody has set \"%s\"",
                                comm->rank, key);
        dtrain__bell_wait(comm->bell, turn, deadline_ns, dtrain__store_look, &wait);
    }
    if (*bytes == DTRAIN_STORE_ABSENT && what == DTRAIN__STORE_WAIT)
        return dtrain__report(dtrain__board_cause(board));
    return DTRAIN_OK;
}

/* Sends the request, or on rank 0 serves it; 0 when there is no memory. The caller holds the hub's mutex. */
static uint32_t dtrain__store_ask(dtrain__channel *channel, int what, const char *key, const void *value, size_t bytes)
{
    dtrain__hub *hub = channel->hub;
    dtrain__member *root = &hub->members[0];
    uint32_t id = channel->store_id = ++hub->asked != 0 ? hub->asked : ++hub->asked;
    dtrain__asker asker;
    if (hub->rank == 0) {
        asker.next = NULL;
        asker.rank = 0;
        asker.channel = channel->id;
        asker.id = id;
        asker.key_bytes = strlen(key);
        snprintf(asker.key, sizeof asker.key, "%s", key);
        dtrain__store_serve(hub, &asker, what, value, bytes);
        return id;
    }
    size_t begin = dtrain__frame_open(hub, root, DTRAIN__FRAME_ASK);
    dtrain__give(hub, &root->out, channel->id, 8);
    dtrain__give(hub, &root->out, id, 4);
    dtrain__give(hub, &root->out, (uint64_t)what, 1);
    dtrain__give_text(hub, &root->out, 2, key);
    dtrain__give_bytes(hub, &root->out, value, bytes);
    if (!dtrain__frame_close(root, begin))
        return 0;
    dtrain__hub_flush(hub, 0);
    return id;
}

/* Looks for the answer to `id`; 0 while there is none. */
static int dtrain__store_answered(dtrain_comm *comm, uint32_t id, int what, void *value, size_t capacity, size_t *bytes,
                                  dtrain_status *status)
{
    dtrain__channel *channel = comm->socket;
    dtrain__hub *hub = channel->hub;
    int done = 1;
    pthread_mutex_lock(&hub->mutex);
    if (channel->store_answered == id) {
        *status = channel->store_status;
        if (*status != DTRAIN_OK && channel->store_value.bytes == 0)
            dtrain__fail(&comm->error, *status, "%s on rank %d: no memory for the answer, here or on rank 0",
                         dtrain__store_names[what], comm->rank);
        else if (*status != DTRAIN_OK)
            dtrain__fail(&comm->error, *status, "%s on rank %d: rank 0 says: %.*s", dtrain__store_names[what],
                         comm->rank, (int)(channel->store_value.bytes < 300 ? channel->store_value.bytes : 300),
                         (const char *)channel->store_value.data);
        else if (what != DTRAIN__STORE_SET)
            dtrain__store_copy(value, capacity, bytes, channel->store_value.data, channel->store_value.bytes);
        if (*status == DTRAIN_OK && what == DTRAIN__STORE_GET && !channel->store_found)
            *bytes = DTRAIN_STORE_ABSENT;
    } else if (channel->broken) {
        dtrain__error cause = channel->cause;
        *status = dtrain__fail(&comm->error, cause.status, "%s on rank %d: %.480s", dtrain__store_names[what],
                               comm->rank, cause.text);
    } else if (hub->rank != 0 && hub->members[0].gone != DTRAIN__PRESENT) {
        *status = dtrain__fail(&comm->error, DTRAIN_ERR_PEER_LOST,
                               "%s on rank %d: rank 0, which keeps the store, has left the group",
                               dtrain__store_names[what], comm->rank);
    } else
        done = 0;
    pthread_mutex_unlock(&hub->mutex);
    return done;
}

static dtrain_status dtrain__store_over_sockets(dtrain_comm *comm, int what, const char *key, void *value,
                                                size_t capacity, size_t *bytes, int64_t deadline_ns)
{
    dtrain__hub *hub = comm->socket->hub;
    struct pollfd none[1];
    dtrain_status status = dtrain__comm_usable(comm, dtrain__store_names[what]);
    if (status != DTRAIN_OK)
        return status;
    pthread_mutex_lock(&hub->mutex);
    uint32_t id = dtrain__store_ask(comm->socket, what, key, value, what == DTRAIN__STORE_SET ? capacity : 0);
    pthread_mutex_unlock(&hub->mutex);
    if (id == 0)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "%s on rank %d (\"%s\"): no memory for the request",
                            dtrain__store_names[what], comm->rank, key);
    dtrain__hub_kick(hub);
    for (;;) {
        uint64_t seen = __atomic_load_n(&hub->news, __ATOMIC_SEQ_CST);
        if (dtrain__store_answered(comm, id, what, value, capacity, bytes, &status))
            return status;
        if (dtrain__os_now_ns() >= deadline_ns)
            break;
        dtrain__hub_wait(comm->socket, none, 0, deadline_ns, seen);
    }
    return dtrain__fail(&comm->error, DTRAIN_ERR_TIMEOUT,
                        what == DTRAIN__STORE_WAIT
                            ? "%s on rank %d: nobody has set \"%s\" within timeout_ms"
                            : "%s on rank %d (\"%s\"): rank 0 has not answered within timeout_ms",
                        dtrain__store_names[what], comm->rank, key);
}

static dtrain_status dtrain__store_call(dtrain_comm *comm, int what, const char *key, void *value, size_t capacity,
                                        size_t *bytes)
{
    size_t length = key != NULL ? strlen(key) : 0;
    int64_t deadline_ns;
    if (comm == NULL || length == 0 || length >= DTRAIN__STORE_KEY_BYTES || (value == NULL && capacity > 0) ||
        (bytes == NULL && what != DTRAIN__STORE_SET) ||
        (what == DTRAIN__STORE_SET && capacity > DTRAIN__STORE_VALUE_BYTES))
        return dtrain__fail(
            comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
            "%s: needs a group, a key of 1 to 255 characters (got %zu), a value of at most %zu bytes and "
            "places for what comes back",
            dtrain__store_names[what], length, DTRAIN__STORE_VALUE_BYTES);
    deadline_ns =
        comm->desc.timeout_ms < 0 ? INT64_MAX : dtrain__os_now_ns() + dtrain__os_ms_to_ns(comm->desc.timeout_ms);
    if (comm->transport.board != NULL)
        return dtrain__store_on_board(comm, what, key, value, capacity, bytes, deadline_ns);
    if (comm->socket != NULL)
        return dtrain__store_over_sockets(comm, what, key, value, capacity, bytes, deadline_ns);
    return dtrain__fail(&comm->error, DTRAIN_ERR_UNSUPPORTED, "%s: a transport of your own has no store",
                        dtrain__store_names[what]);
}

DTRAIN_API dtrain_status dtrain_store_set(dtrain_comm *comm, const char *key, const void *value, size_t bytes)
{
    void *data;
    memcpy(&data, &value, sizeof data); /* it is only read */
    return dtrain__store_call(comm, DTRAIN__STORE_SET, key, data, bytes, NULL);
}

DTRAIN_API dtrain_status dtrain_store_get(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                          size_t *bytes)
{
    return dtrain__store_call(comm, DTRAIN__STORE_GET, key, value, capacity, bytes);
}

DTRAIN_API dtrain_status dtrain_store_wait(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                           size_t *bytes)
{
    return dtrain__store_call(comm, DTRAIN__STORE_WAIT, key, value, capacity, bytes);
}

#endif

/* ---- >>split ----
 * Groups out of groups. The ranks of the parent exchange who wants to be where, each makes its own end, and a second
 * exchange tells whether all could: either every rank has its group or every rank has the error. A group's name is
 * the lowest member's rank in the world and a count that this member keeps, so that no two are ever the same. */
#ifndef DTRAIN__SPLIT
#define DTRAIN__SPLIT

/* What a rank tells the others before a group is made. */
typedef struct dtrain__seat {
    uint64_t color;  /* ranks of one color make a group; DTRAIN__NO_SEAT: of none */
    int64_t key;     /* their order in it */
    uint64_t origin; /* the rank in the world */
    uint64_t serial; /* for the name, if this is the lowest member */
} dtrain__seat;

#define DTRAIN__NO_SEAT UINT64_MAX
#define DTRAIN__SEAT_WORDS (sizeof(dtrain__seat) / sizeof(uint64_t))

/* A group that is being made. */
typedef struct dtrain__draft {
    const char *call;
    dtrain_comm *parent;
    dtrain__seat *seats; /* of all ranks of the parent */
    uint64_t *states;    /* how each of them fared */
    int *members;        /* ranks of the parent, in the new order */
    int *origins;        /* the same in the world */
    int size, rank;      /* of the new group; rank -1: this rank is none of it */
    uint64_t id;         /* its name */
    size_t bytes;        /* of the one block that all this is in, with seats at its start */
} dtrain__draft;

static dtrain_status dtrain__draft_begin(dtrain__draft *draft, dtrain_comm *parent, const char *call)
{
    size_t size = (size_t)parent->size;
    memset(draft, 0, sizeof *draft);
    if (parent->fusing)
        return dtrain__fail(&parent->error, DTRAIN_ERR_INVALID,
                            "%s on rank %d: it cannot be fused; call fuse_end first", call, parent->rank);
    draft->call = call;
    draft->parent = parent;
    draft->rank = -1;
    draft->bytes = size * (sizeof(dtrain__seat) + sizeof(uint64_t) + 2 * sizeof(int));
    draft->seats = (dtrain__seat *)dtrain__alloc(parent->allocator, draft->bytes);
    if (draft->seats == NULL)
        return dtrain__fail(&parent->error, DTRAIN_ERR_MEMORY, "%s on rank %d: no memory for %zu bytes", call,
                            parent->rank, draft->bytes);
    draft->states = (uint64_t *)(void *)(draft->seats + size);
    draft->members = (int *)(void *)(draft->states + size);
    draft->origins = draft->members + size;
    return DTRAIN_OK;
}

static void dtrain__draft_end(dtrain__draft *draft)
{
    dtrain__free(draft->parent->allocator, draft->seats, draft->bytes);
}

/* A number that this rank gives to no other group; 0 over a transport of the user's own, which has no groups. */
static uint64_t dtrain__draft_serial(dtrain_comm *parent)
{
    dtrain__board *board = parent->transport.board;
    pthread_mutex_t *mutex;
    uint64_t *count, serial;
    if (board == NULL && parent->socket == NULL)
        return 0;
    mutex = board != NULL ? &board->family->mutex : &parent->socket->hub->mutex;
    count = board != NULL ? &board->family->serial : &parent->socket->hub->serial;
    pthread_mutex_lock(mutex);
    serial = ++*count;
    pthread_mutex_unlock(mutex);
    return serial;
}

static int dtrain__comm_origin(const dtrain_comm *comm, int rank)
{
    if (comm->transport.board != NULL)
        return comm->transport.board->slots[rank].origin;
    return comm->socket != NULL ? comm->socket->peers[rank].world : rank;
}

/* Gathers what every rank of the parent says: `words` 64-bit words of each. */
static dtrain_status dtrain__draft_gather(dtrain__draft *draft, const void *mine, void *all, size_t words)
{
    dtrain_comm *parent = draft->parent;
    dtrain_status status = dtrain_all_gather(parent, mine, all, words * (size_t)parent->size, DTRAIN_U64);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    dtrain__error cause = parent->error;
    return dtrain__fail(&parent->error, status, "%s: %.560s", draft->call, cause.text);
}

static dtrain_status dtrain__draft_meet(dtrain__draft *draft, uint64_t color, int64_t key)
{
    dtrain_comm *parent = draft->parent;
    dtrain__seat mine = {color, key, (uint64_t)dtrain__comm_origin(parent, parent->rank), 0};
    mine.serial = dtrain__draft_serial(parent);
    return dtrain__draft_gather(draft, &mine, draft->seats, DTRAIN__SEAT_WORDS);
}

static void dtrain__draft_add(dtrain__draft *draft, int member, int origin)
{
    if (member == draft->parent->rank)
        draft->rank = draft->size;
    draft->origins[draft->size] = origin;
    draft->members[draft->size++] = member;
}

static uint64_t dtrain__draft_name(const dtrain__draft *draft)
{
    int lowest = 0;
    for (int i = 1; i < draft->size; i++)
        if (draft->origins[i] < draft->origins[lowest])
            lowest = i;
    return dtrain__hub_group_id(draft->seats[draft->members[lowest]].serial, draft->origins[lowest]);
}

/* As the parent has it, or the hosts of processes. */
static int dtrain__draft_node_ranks(const dtrain__draft *draft, const dtrain_comm *group)
{
    const int *members = draft->members;
    int each = draft->parent->node_ranks, n = 1;
    if (each == 0)
        return group->socket != NULL ? dtrain__socket_node_ranks(group->socket) : 0;
    while (n < draft->size && members[n] / each == members[0] / each)
        n++;
    for (int i = 0; i < draft->size; i++)
        if (members[i] / each != members[i - i % n] / each ||
            (i >= n && i % n == 0 && members[i] / each == members[i - 1] / each))
            return 0;
    return n;
}

static dtrain_status dtrain__draft_on_channel(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain__hub *hub = draft->parent->socket->hub;
    dtrain__channel *channel = NULL;
    pthread_mutex_lock(&hub->mutex);
    dtrain_status status = dtrain__channel_create(&channel, hub, draft->id, draft->origins, draft->size, draft->rank);
    pthread_mutex_unlock(&hub->mutex);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__comm_on_channel(group, channel, &draft->parent->desc);
    if (status != DTRAIN_OK)
        dtrain__channel_destroy(channel);
    return status;
}

/* Makes this rank's end over the parent's transport. */
static dtrain_status dtrain__draft_place(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain_comm *parent = draft->parent;
    dtrain__board *board = parent->transport.board;
    dtrain_status status = DTRAIN_OK;
    if (parent->socket != NULL)
        return dtrain__draft_on_channel(draft, group);
    if (board == NULL && draft->size > 1)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "a transport of your own has no groups of its ranks, except of one; make one for each");
    status = board != NULL ? dtrain__board_attach(&board, board->family, draft->id, draft->origins, draft->size)
                           : dtrain__board_create(&board, 1, parent->desc.allocator);
    return status == DTRAIN_OK ? dtrain__comm_on_board(group, board, draft->rank, &parent->desc) : status;
}

static dtrain_status dtrain__draft_make(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain_status status = dtrain__draft_place(draft, group);
    if (status != DTRAIN_OK)
        return status;
    (*group)->group = draft->id;
    (*group)->node_ranks = dtrain__draft_node_ranks(draft, *group);
    return DTRAIN_OK;
}

/* Makes this rank's end and hears how the others fared; one that could not undoes it for all. */
static dtrain_status dtrain__draft_settle(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain_comm *parent = draft->parent;
    dtrain_status made = DTRAIN_OK, status;
    dtrain__error cause;
    uint64_t mine;
    if (draft->rank >= 0) {
        draft->id = dtrain__draft_name(draft);
        made = dtrain__draft_make(draft, group);
    }
    cause = dtrain__thread_error;
    mine = (uint64_t)made;
    status = dtrain__draft_gather(draft, &mine, draft->states, 1);
    if (made != DTRAIN_OK)
        status = dtrain__fail(&parent->error, made, "%s on rank %d: %.560s", draft->call, parent->rank, cause.text);
    for (int rank = 0; status == DTRAIN_OK && rank < parent->size; rank++)
        if (draft->states[rank] != DTRAIN_OK)
            status = dtrain__fail(&parent->error, (dtrain_status)draft->states[rank],
                                  "%s on rank %d: rank %d could not make its end of a group (%s)", draft->call,
                                  parent->rank, rank, dtrain_status_name((dtrain_status)draft->states[rank]));
    if (status == DTRAIN_OK || *group == NULL)
        return status;
    cause = dtrain__thread_error;
    dtrain_comm_destroy(*group);
    *group = NULL;
    return dtrain__report(&cause);
}

/* Where the call can begin: there is a group and a place for the new one. */
static dtrain_status dtrain__draft_check(dtrain_comm *comm, dtrain_comm **group, const char *call)
{
    if (group != NULL)
        *group = NULL;
    if (comm != NULL && group != NULL)
        return DTRAIN_OK;
    return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                        "%s: needs a group and a place for the new one (%s is NULL)", call,
                        comm == NULL ? "comm" : "group");
}

static dtrain_status dtrain__split(dtrain_comm *comm, int color, int key, dtrain_comm **group, const char *call)
{
    dtrain__draft draft;
    dtrain_status status = dtrain__draft_check(comm, group, call);
    uint64_t mine = color < 0 ? DTRAIN__NO_SEAT : (uint64_t)color;
    if (status == DTRAIN_OK)
        status = dtrain__draft_begin(&draft, comm, call);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__draft_meet(&draft, mine, key);
    for (int taken = 0; status == DTRAIN_OK && mine != DTRAIN__NO_SEAT; taken++) {
        /* the next in order of key and rank: the lowest key of those that are not in yet */
        int next = -1;
        for (int rank = 0; rank < comm->size; rank++)
            if (draft.seats[rank].color == mine && draft.states[rank] == 0 &&
                (next < 0 || draft.seats[rank].key < draft.seats[next].key))
                next = rank;
        if (next < 0)
            break;
        draft.states[next] = 1;
        dtrain__draft_add(&draft, next, (int)draft.seats[next].origin);
    }
    if (status == DTRAIN_OK)
        status = dtrain__draft_settle(&draft, group);
    dtrain__draft_end(&draft);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **group)
{
    return dtrain__split(comm, color, key, group, "comm_split");
}

DTRAIN_API dtrain_status dtrain_comm_duplicate(dtrain_comm *comm, dtrain_comm **group)
{
    return dtrain__split(comm, 0, 0, group, "comm_duplicate");
}

enum { DTRAIN__LIST_GOOD = 0, DTRAIN__LIST_NULL, DTRAIN__LIST_BAD, DTRAIN__LIST_TWICE };

/* What is wrong with a list of ranks, and with which of its entries. */
static int dtrain__subgroup_flaw(const dtrain_comm *comm, const int *ranks, int count, int *which)
{
    *which = 0;
    if (count < 0 || (ranks == NULL && count > 0))
        return DTRAIN__LIST_NULL;
    for (; *which < count; ++*which) {
        if (ranks[*which] < 0 || ranks[*which] >= comm->size)
            return DTRAIN__LIST_BAD;
        for (int i = 0; i < *which; i++)
            if (ranks[i] == ranks[*which])
                return DTRAIN__LIST_TWICE;
    }
    return DTRAIN__LIST_GOOD;
}

/* Compares what all ranks gave: a seat's color is the list's digest, its key the flaw and the length. */
static dtrain_status dtrain__subgroup_compare(dtrain__draft *draft)
{
    static const char *const flaws[] = {"", "no list", "a rank that is not in the group", "a rank twice"};
    dtrain_comm *comm = draft->parent;
    const dtrain__seat *first = &draft->seats[0];
    for (int rank = 0; rank < comm->size; rank++) {
        uint64_t flaw = (uint64_t)draft->seats[rank].key & 3;
        if (flaw != DTRAIN__LIST_GOOD)
            return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                                "%s on rank %d: rank %d gave %s; list each rank of 0 "
                                "to %d at most once",
                                draft->call, comm->rank, rank, flaws[flaw], comm->size - 1);
    }
    for (int rank = 1; rank < comm->size; rank++) {
        const dtrain__seat *other = &draft->seats[rank];
        if (other->color != first->color || other->key != first->key)
            return dtrain__fail(&comm->error, DTRAIN_ERR_MISMATCH,
                                "%s on rank %d: rank %d gave a list of %lld ranks, rank 0 another one of %lld; every "
                                "rank, listed or not, must give the same",
                                draft->call, comm->rank, rank, (long long)(other->key >> 2),
                                (long long)(first->key >> 2));
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_comm_subgroup(dtrain_comm *comm, const int *ranks, int count, dtrain_comm **group)
{
    dtrain__draft draft;
    unsigned char digest[32];
    int which, flaw;
    dtrain_status status = dtrain__draft_check(comm, group, "comm_subgroup");
    if (status == DTRAIN_OK)
        status = dtrain__draft_begin(&draft, comm, "comm_subgroup");
    if (status != DTRAIN_OK)
        return status;
    flaw = dtrain__subgroup_flaw(comm, ranks, count, &which);
    dtrain_sha256(ranks, flaw == DTRAIN__LIST_GOOD ? (size_t)count * sizeof *ranks : 0, digest);
    status = dtrain__draft_meet(&draft, dtrain__get_le(digest, 8), (int64_t)count * 4 + flaw);
    if (status == DTRAIN_OK)
        status = dtrain__subgroup_compare(&draft);
    if (status == DTRAIN_OK) {
        for (int i = 0; i < count; i++)
            dtrain__draft_add(&draft, ranks[i], (int)draft.seats[ranks[i]].origin);
        status = dtrain__draft_settle(&draft, group);
    }
    dtrain__draft_end(&draft);
    return status;
}

#endif

/* ---- >>mesh ----
 * The ranks of a world laid out in named dimensions, and the group along each: the ranks that differ in that
 * coordinate alone. Arithmetic over dtrain_comm_split. */
#ifndef DTRAIN__MESH
#define DTRAIN__MESH

typedef struct dtrain__axis {
    char name[DTRAIN_MESH_NAME_BYTES];
    int size, index; /* this rank's coordinate */
    dtrain_comm *group;
} dtrain__axis;

struct dtrain_mesh {
    dtrain_allocator *allocator, own;
    int count;
    dtrain__axis *axes;
};

static dtrain_status dtrain__mesh_flaw(dtrain_comm *world, const char *what, const dtrain_mesh_dim *dims, int i)
{
    return dtrain__fail(&world->error, DTRAIN_ERR_INVALID, "mesh_create on rank %d: dimension %d (%.60s, size %d) %s",
                        world->rank, i, dims[i].name != NULL ? dims[i].name : "NULL", dims[i].size, what);
}

/* Checks the dimensions; *rest is the size of one that says 0. */
static dtrain_status dtrain__mesh_check(dtrain_comm *world, const dtrain_mesh_dim *dims, int count, int *rest)
{
    int product = 1, open = -1;
    if (count < 1 || dims == NULL)
        return dtrain__fail(&world->error, DTRAIN_ERR_INVALID,
                            "mesh_create on rank %d: %d dimensions; give at least one", world->rank, count);
    for (int i = 0; i < count; i++) {
        if (dims[i].name == NULL || dims[i].name[0] == 0 || strlen(dims[i].name) >= DTRAIN_MESH_NAME_BYTES)
            return dtrain__mesh_flaw(world, "needs a name of 1 to 31 characters", dims, i);
        for (int k = 0; k < i; k++)
            if (strcmp(dims[k].name, dims[i].name) == 0)
                return dtrain__mesh_flaw(world, "has a name that is taken", dims, i);
        if (dims[i].size < 0 || (dims[i].size == 0 && open >= 0))
            return dtrain__mesh_flaw(world, "needs a size of 1 or more; one dimension alone may have 0", dims, i);
        open = dims[i].size == 0 ? i : open;
        if (dims[i].size > 0 && product > world->size / dims[i].size)
            return dtrain__mesh_flaw(world, "makes the mesh larger than the world", dims, i);
        product *= dims[i].size > 0 ? dims[i].size : 1;
    }
    *rest = world->size / product;
    if (world->size % product != 0 || (open < 0 && *rest != 1))
        return dtrain__fail(&world->error, DTRAIN_ERR_INVALID,
                            "mesh_create on rank %d: the sizes multiply to %d, and the world has %d ranks%s",
                            world->rank, product, world->size, open >= 0 ? ", which that does not divide" : "");
    return DTRAIN_OK;
}

/* Says to all whether this rank's dimensions are good, and compares them. */
static dtrain_status dtrain__mesh_agree(dtrain_comm *world, const dtrain_mesh *mesh, dtrain_status mine)
{
    dtrain__draft draft;
    dtrain__error flaw = dtrain__thread_error;
    dtrain__sha256 sha;
    unsigned char digest[32];
    dtrain_status status = dtrain__draft_begin(&draft, world, "mesh_create");
    if (status != DTRAIN_OK)
        return status;
    dtrain__sha256_start(&sha);
    for (int i = 0; mine == DTRAIN_OK && i < mesh->count; i++) {
        dtrain__sha256_add(&sha, mesh->axes[i].name, sizeof mesh->axes[i].name);
        dtrain__sha256_add(&sha, &mesh->axes[i].size, sizeof mesh->axes[i].size);
    }
    dtrain__sha256_finish(&sha, digest);
    status = dtrain__draft_meet(&draft, dtrain__get_le(digest, 8), mine);
    for (int rank = 0; status == DTRAIN_OK && mine == DTRAIN_OK && rank < world->size; rank++) {
        if (draft.seats[rank].key != DTRAIN_OK)
            status = dtrain__fail(&world->error, (dtrain_status)draft.seats[rank].key,
                                  "mesh_create on rank %d: rank %d gave dimensions that cannot be (%s)", world->rank,
                                  rank, dtrain_status_name((dtrain_status)draft.seats[rank].key));
        else if (draft.seats[rank].color != draft.seats[0].color)
            status = dtrain__fail(&world->error, DTRAIN_ERR_MISMATCH,
                                  "mesh_create on rank %d: rank %d gave other dimensions than rank 0; every rank must "
                                  "give the same names and sizes in the same order",
                                  world->rank, rank);
    }
    dtrain__draft_end(&draft);
    return mine != DTRAIN_OK ? dtrain__report(&flaw) : status;
}

/* Memory for the mesh, and this rank's place in it. */
static dtrain_mesh *dtrain__mesh_place(dtrain_comm *world, const dtrain_mesh_dim *dims, int count, int rest)
{
    dtrain_allocator *allocator = world->desc.allocator, first = {NULL, NULL, 0, 0};
    size_t bytes = sizeof(dtrain_mesh) + (size_t)count * sizeof(dtrain__axis);
    dtrain_mesh *mesh = (dtrain_mesh *)dtrain__alloc(allocator != NULL ? allocator : &first, bytes);
    int rank = world->rank;
    if (mesh == NULL)
        return NULL;
    mesh->own = first;
    mesh->allocator = allocator != NULL ? allocator : &mesh->own;
    mesh->count = count;
    mesh->axes = (dtrain__axis *)(void *)(mesh + 1);
    for (int i = count; i-- > 0;) {
        dtrain__axis *axis = &mesh->axes[i];
        snprintf(axis->name, sizeof axis->name, "%s", dims[i].name);
        axis->size = dims[i].size > 0 ? dims[i].size : rest;
        axis->index = rank % axis->size;
        rank /= axis->size;
    }
    return mesh;
}

DTRAIN_API dtrain_status dtrain_mesh_create(dtrain_mesh **out, dtrain_comm *world, const dtrain_mesh_dim *dims,
                                            int count)
{
    dtrain_mesh *mesh = NULL;
    dtrain_status status;
    int rest = 1, stride = 1;
    if (out != NULL)
        *out = NULL;
    if (out == NULL || world == NULL)
        return dtrain__fail(world != NULL ? &world->error : NULL, DTRAIN_ERR_INVALID,
                            "mesh_create: needs a world and a place for the mesh (%s is NULL)",
                            world == NULL ? "world" : "mesh");
    status = dtrain__mesh_check(world, dims, count, &rest);
    if (status == DTRAIN_OK && (mesh = dtrain__mesh_place(world, dims, count, rest)) == NULL)
        status = dtrain__fail(&world->error, DTRAIN_ERR_MEMORY, "mesh_create on rank %d: no memory", world->rank);
    status = dtrain__mesh_agree(world, mesh, status);
    for (int i = count; status == DTRAIN_OK && i-- > 0;) {
        dtrain__axis *axis = &mesh->axes[i]; /* its group: the rank with this coordinate taken out */
        status = dtrain_comm_split(world, world->rank - axis->index * stride, axis->index, &axis->group);
        stride *= axis->size;
    }
    if (status == DTRAIN_OK) {
        *out = mesh;
        return DTRAIN_OK;
    }
    dtrain__error kept = dtrain__thread_error;
    dtrain_mesh_destroy(mesh);
    return dtrain__report(&kept);
}

static dtrain__axis *dtrain__mesh_axis(const dtrain_mesh *mesh, const char *name, const char *call)
{
    char names[160] = "";
    size_t used = 0;
    for (int i = 0; mesh != NULL && name != NULL && i < mesh->count; i++) {
        if (strcmp(mesh->axes[i].name, name) == 0)
            return &mesh->axes[i];
        if (used < sizeof names - 40)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "", mesh->axes[i].name);
    }
    dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s has no dimension \"%.60s\"; it has %s", call,
                 mesh != NULL ? "the mesh" : "no mesh (NULL)", name != NULL ? name : "NULL",
                 names[0] != 0 ? names : "none");
    return NULL;
}

DTRAIN_API dtrain_comm *dtrain_mesh_group(const dtrain_mesh *mesh, const char *name)
{
    dtrain__axis *axis = dtrain__mesh_axis(mesh, name, "mesh_group");
    return axis != NULL ? axis->group : NULL;
}

DTRAIN_API int dtrain_mesh_index(const dtrain_mesh *mesh, const char *name)
{
    dtrain__axis *axis = dtrain__mesh_axis(mesh, name, "mesh_index");
    return axis != NULL ? axis->index : -1;
}

DTRAIN_API int dtrain_mesh_size(const dtrain_mesh *mesh, const char *name)
{
    dtrain__axis *axis = dtrain__mesh_axis(mesh, name, "mesh_size");
    return axis != NULL ? axis->size : 0;
}

DTRAIN_API void dtrain_mesh_destroy(dtrain_mesh *mesh)
{
    dtrain_allocator own;
    if (mesh == NULL)
        return;
    for (int i = 0; i < mesh->count; i++)
        dtrain_comm_destroy(mesh->axes[i].group);
    own = mesh->own;
    dtrain__free(mesh->allocator == &mesh->own ? &own : mesh->allocator, mesh,
                 sizeof *mesh + (size_t)mesh->count * sizeof(dtrain__axis));
}

#endif

/* ---- >>survive ----
 * Going on when ranks are lost: the survivors agree (see >>consent; on a board its mutex is the leader), make a group
 * of those that are left, and copy the state of the furthest to the rest. Works on a broken group: nothing here uses
 * its operations, but dtrain_resync, which is for the new one. */
#ifndef DTRAIN__SURVIVE
#define DTRAIN__SURVIVE

enum { DTRAIN__CONSENT_SHRINK = 1, DTRAIN__CONSENT_AGREE };

/* A rank's part in an agreement, and what came of it. */
typedef struct dtrain__accord {
    dtrain_comm *comm;
    const char *call;
    int kind;
    uint64_t flags, id, number;
    dtrain_status status;
    int awaited;
    int given_up;        /* by the others */
    dtrain__draft draft; /* who goes on */
} dtrain__accord;

/* Looks whether all that have not left the board have voted, and decides; the caller holds the family's mutex. */
static void dtrain__accord_count(dtrain__board *board, uint64_t number)
{
    uint64_t flags = UINT64_MAX;
    int kind = 0, mixed = 0;
    for (int rank = 0; rank < board->size; rank++) {
        dtrain__slot *slot = &board->slots[rank];
        if (__atomic_load_n(&slot->left, __ATOMIC_SEQ_CST))
            continue;
        if (slot->voted < number)
            return;
        mixed |= kind != 0 && kind != slot->vote_kind;
        kind = slot->vote_kind;
        flags &= slot->vote_flags;
    }
    for (int rank = 0; rank < board->size; rank++)
        if (!__atomic_load_n(&board->slots[rank].left, __ATOMIC_SEQ_CST))
            board->slots[rank].goes_on = number;
    board->decided = number;
    board->decided_flags = flags;
    board->decided_mixed = mixed;
    board->decided_id = dtrain__hub_group_id(++board->family->serial, 0);
    dtrain__bell_ring(&board->bell);
}

/* Whether the board has decided; then takes the decision over. */
static int dtrain__accord_on_board(void *pointer)
{
    dtrain__accord *accord = (dtrain__accord *)pointer;
    dtrain__board *board = accord->comm->transport.board;
    int done;
    pthread_mutex_lock(&board->family->mutex);
    if (board->decided < accord->number)
        dtrain__accord_count(board, accord->number);
    done = board->decided >= accord->number;
    accord->status = board->decided_mixed ? DTRAIN_ERR_MISMATCH : DTRAIN_OK;
    accord->flags = board->decided_flags;
    accord->id = board->decided_id;
    accord->awaited = -1;
    accord->draft.size = 0;
    for (int rank = 0; rank < board->size; rank++) {
        if (done && board->slots[rank].goes_on == accord->number)
            dtrain__draft_add(&accord->draft, rank, board->slots[rank].origin);
        else if (!done && accord->awaited < 0 && board->slots[rank].voted < accord->number &&
                 !__atomic_load_n(&board->slots[rank].left, __ATOMIC_SEQ_CST))
            accord->awaited = rank;
    }
    pthread_mutex_unlock(&board->family->mutex);
    return done;
}

static int dtrain__accord_vote_on_board(dtrain__accord *accord, int64_t deadline_ns)
{
    dtrain__board *board = accord->comm->transport.board;
    dtrain__slot *slot = &board->slots[accord->comm->rank];
    pthread_mutex_lock(&board->family->mutex);
    slot->voted = accord->number;
    slot->vote_kind = accord->kind;
    slot->vote_flags = accord->flags;
    pthread_mutex_unlock(&board->family->mutex);
    dtrain__bell_ring(&board->bell);
    for (unsigned turn = 0; !dtrain__accord_on_board(accord); turn++) {
        if (dtrain__os_now_ns() >= deadline_ns)
            return 0;
        dtrain__bell_wait(&board->bell, turn, deadline_ns, dtrain__accord_on_board, accord);
    }
    return 1;
}

/* Whether the hub has heard of the decision; then takes it over. */
static int dtrain__accord_on_hub(dtrain__accord *accord)
{
    dtrain__channel *channel = accord->comm->socket;
    dtrain__hub *hub = channel->hub;
    dtrain__consent *consent;
    int done;
    pthread_mutex_lock(&hub->mutex);
    consent = dtrain__consent_find(hub, channel->id, accord->number);
    if (consent != NULL && !consent->decided)
        accord->awaited = dtrain__hub_leads(hub) ? dtrain__consent_awaits(hub, consent) : -1;
    accord->given_up = hub->given_up;
    done = (consent != NULL && consent->decided) || hub->given_up;
    accord->status = hub->given_up || consent == NULL ? DTRAIN_ERR_PEER_LOST : consent->status;
    accord->draft.size = 0;
    if (done && consent != NULL) {
        accord->flags = consent->flags;
        accord->id = consent->id;
        for (int i = 0; i < consent->count; i++)
            if (consent->votes[i].vote == DTRAIN__VOTE_YES)
                dtrain__draft_add(&accord->draft, i, consent->votes[i].world);
    }
    pthread_mutex_unlock(&hub->mutex);
    return done;
}

static int dtrain__accord_vote_on_hub(dtrain__accord *accord, int64_t deadline_ns)
{
    dtrain__channel *channel = accord->comm->socket;
    dtrain__hub *hub = channel->hub;
    struct pollfd none[1];
    pthread_mutex_lock(&hub->mutex);
    int good = dtrain__consent_vote(channel, accord->number, accord->kind, accord->flags);
    pthread_mutex_unlock(&hub->mutex);
    while (good) {
        uint64_t seen = __atomic_load_n(&hub->news, __ATOMIC_SEQ_CST);
        if (dtrain__accord_on_hub(accord))
            return 1;
        if (dtrain__os_now_ns() >= deadline_ns)
            break;
        dtrain__hub_wait(channel, none, 0, deadline_ns, seen);
    }
    return 0;
}

/* Says why there is no agreement, or that this rank is none of it. */
static dtrain_status dtrain__accord_check(dtrain__accord *accord)
{
    dtrain_comm *comm = accord->comm;
    dtrain__error *error = &comm->error;
    if (accord->given_up)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST, "%s on rank %d: the others have given this rank up: %.400s",
                            accord->call, comm->rank, comm->socket->cause.text);
    if (accord->status == DTRAIN_ERR_MISMATCH)
        return dtrain__fail(error, DTRAIN_ERR_MISMATCH,
                            "%s on rank %d: ranks called comm_shrink and comm_agree at once; all must make the same "
                            "calls in the same order",
                            accord->call, comm->rank);
    if (accord->status != DTRAIN_OK)
        return dtrain__fail(error, accord->status,
                            "%s on rank %d: %d of %d ranks are here, and that others are silent is no proof that they "
                            "are gone: only the larger part goes on",
                            accord->call, comm->rank, accord->draft.size, comm->size);
    if (accord->draft.rank < 0)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST, "%s on rank %d: the others have gone on without this rank",
                            accord->call, comm->rank);
    return DTRAIN_OK;
}

static dtrain_status dtrain__accord_late(dtrain__accord *accord, int64_t started_ns)
{
    char whom[48] = "the others";
    if (accord->awaited >= 0)
        snprintf(whom, sizeof whom, "rank %d", accord->awaited);
    return dtrain__fail(&accord->comm->error, DTRAIN_ERR_TIMEOUT,
                        "%s on rank %d waited %.3f s for %s to call it as well or to be lost; it can be called again",
                        accord->call, accord->comm->rank, (double)(dtrain__os_now_ns() - started_ns) * 1e-9, whom);
}

/* Comes to an agreement with the ranks that are left. On success and on failure the draft is to be ended. */
static dtrain_status dtrain__accord_reach(dtrain__accord *accord)
{
    dtrain_comm *comm = accord->comm;
    int64_t now = dtrain__os_now_ns(), span = comm->desc.timeout_ms;
    int64_t deadline_ns = span < 0 ? INT64_MAX : now + dtrain__os_ms_to_ns(span);
    int done;
    accord->number = comm->consents + 1;
    accord->awaited = -1;
    if (comm->transport.board != NULL)
        done = dtrain__accord_vote_on_board(accord, deadline_ns);
    else if (comm->socket != NULL)
        done = dtrain__accord_vote_on_hub(accord, deadline_ns);
    else if (comm->size == 1) {
        dtrain__draft_add(&accord->draft, 0, 0);
        return DTRAIN_OK;
    } else
        return dtrain__fail(&comm->error, DTRAIN_ERR_UNSUPPORTED,
                            "%s on rank %d: a transport of your own does not tell who is lost", accord->call,
                            comm->rank);
    if (!done)
        return dtrain__accord_late(accord, now);
    comm->consents++;
    return dtrain__accord_check(accord);
}

static dtrain_status dtrain__accord_begin(dtrain__accord *accord, dtrain_comm *comm, int kind, const char *call,
                                          uint64_t flags)
{
    dtrain_status status = dtrain__comm_usable(comm, call);
    memset(accord, 0, sizeof *accord);
    accord->comm = comm;
    accord->call = call;
    accord->kind = kind;
    accord->flags = flags;
    return status == DTRAIN_OK ? dtrain__draft_begin(&accord->draft, comm, call) : status;
}

DTRAIN_API dtrain_status dtrain_comm_shrink(dtrain_comm *comm, dtrain_comm **survivors)
{
    dtrain__accord accord;
    dtrain_status status = dtrain__draft_check(comm, survivors, "comm_shrink");
    if (status == DTRAIN_OK)
        status = dtrain__accord_begin(&accord, comm, DTRAIN__CONSENT_SHRINK, "comm_shrink", 0);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__accord_reach(&accord);
    if (status == DTRAIN_OK) {
        accord.draft.id = accord.id;
        status = dtrain__draft_make(&accord.draft, survivors);
        if (status != DTRAIN_OK) {
            dtrain__error cause = dtrain__thread_error;
            dtrain__fail(&comm->error, status, "comm_shrink on rank %d: %.560s", comm->rank, cause.text);
        }
    }
    dtrain__draft_end(&accord.draft);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_agree(dtrain_comm *comm, uint64_t *flags)
{
    dtrain__accord accord;
    dtrain_status status;
    if (comm == NULL || flags == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_agree: needs a group and flags (%s is NULL)", comm == NULL ? "comm" : "flags");
    status = dtrain__accord_begin(&accord, comm, DTRAIN__CONSENT_AGREE, "comm_agree", *flags);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__accord_reach(&accord);
    if (status == DTRAIN_OK)
        *flags = accord.flags;
    dtrain__draft_end(&accord.draft);
    return status;
}

/* What a rank has to offer, or to receive. */
typedef struct dtrain__progress {
    uint64_t step;
    uint64_t shape; /* a digest of the buffers' sizes */
} dtrain__progress;

/* The rank with the highest step, or an error where sizes differ. */
static dtrain_status dtrain__resync_source(dtrain_comm *comm, const dtrain__progress *all, int *source)
{
    *source = 0;
    for (int rank = 1; rank < comm->size; rank++) {
        if (all[rank].shape != all[0].shape)
            return dtrain__fail(&comm->error, DTRAIN_ERR_MISMATCH,
                                "resync on rank %d: rank %d gave buffers of other sizes than rank 0", comm->rank, rank);
        *source = all[rank].step > all[*source].step ? rank : *source;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_resync(dtrain_comm *comm, uint64_t step, void *const *buffers, const size_t *bytes,
                                       int count, uint64_t *step_out)
{
    dtrain__draft draft;
    dtrain__progress mine, *all;
    unsigned char digest[32];
    dtrain_status status;
    int source = 0, flaw = count < 0 || (count > 0 && (buffers == NULL || bytes == NULL));
    for (int i = 0; !flaw && i < count; i++)
        flaw = buffers[i] == NULL && bytes[i] > 0;
    if (comm == NULL || flaw)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "resync: needs a group and %d buffers with their sizes", count);
    status = dtrain__draft_begin(&draft, comm, "resync");
    if (status != DTRAIN_OK)
        return status;
    dtrain_sha256(count > 0 ? (const void *)bytes : "", (size_t)count * sizeof(size_t), digest);
    mine.step = step;
    mine.shape = dtrain__get_le(digest, 8);
    all = (dtrain__progress *)(void *)draft.seats; /* a seat is larger */
    status = dtrain__draft_gather(&draft, &mine, all, sizeof mine / sizeof(uint64_t));
    if (status == DTRAIN_OK)
        status = dtrain__resync_source(comm, all, &source);
    if (status == DTRAIN_OK && step_out != NULL)
        *step_out = all[source].step;
    for (int i = 0; status == DTRAIN_OK && i < count; i++)
        status = dtrain_broadcast(comm, buffers[i], bytes[i], DTRAIN_U8, source);
    dtrain__draft_end(&draft);
    return status;
}

#endif

/* ---- >>train-kernels ----
 * The loops over elements of this floor, once for each instruction set. Every operation is rounded by itself and no
 * order is left open, so that all of them give the same bits; ends shorter than a vector go through a padded one.
 * Nothing here allocates or fails, and any alignment will do. */
#ifndef DTRAIN__TRAIN_KERNELS
#define DTRAIN__TRAIN_KERNELS
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef struct dtrain__adamw_constants {
    float beta1, rest1; /* rest: 1 - beta */
    float beta2, rest2;
    float root;         /* 1 / sqrt(1 - beta2^step) */
    float eps;
    float rate;         /* lr / (1 - beta1^step) */
    float keep;         /* 1 - lr * weight_decay */
} dtrain__adamw_constants;

typedef struct dtrain__sgd_constants {
    float momentum, lr, keep, coupled;
    int nesterov;
} dtrain__sgd_constants;

typedef struct dtrain__train_kernels {
    void (*adamw)(float *p, const float *g, float *m, float *v, size_t count, const dtrain__adamw_constants *c);
    void (*sgd)(float *p, const float *g, float *velocity, size_t count, const dtrain__sgd_constants *c);
    void (*add)(float *out, const float *a, const float *b, size_t count);       /* out = a + b; out may be a or b */
    void (*divide)(float *out, const float *a, float divisor, size_t count);
    void (*multiply)(float *out, const float *a, float factor, size_t count);
} dtrain__train_kernels;

DTRAIN__EXACT_BEGIN

/* A compiler's back end may contract a product with the sum that follows, or approximate a root, whatever the
 * pragmas say. It does not look into these: the first is no instruction, the second is the one it should be. */
#if defined(DTRAIN__X86)
#ifdef __AVX__
#define DTRAIN__ROOT_sse2(x) __asm__("vsqrtps %0, %0" : "+x"(x))
#else
#define DTRAIN__ROOT_sse2(x) __asm__("sqrtps %0, %0" : "+x"(x))
#endif
#define DTRAIN__ROOT_avx2(x) __asm__("vsqrtps %0, %0" : "+x"(x))
#define DTRAIN__ROOT_avx512(x) __asm__("vsqrtps %0, %0" : "+v"(x))
#define DTRAIN__ROUNDED_scalar(x) __asm__("" : "+x"(x))
#define DTRAIN__ROUNDED_sse2(x) __asm__("" : "+x"(x))
#define DTRAIN__ROUNDED_avx2(x) __asm__("" : "+x"(x))
#define DTRAIN__ROUNDED_avx512(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define DTRAIN__ROUNDED_scalar(x) __asm__("" : "+w"(x))
#define DTRAIN__ROUNDED_neon(x) __asm__("" : "+w"(x))
#else
#define DTRAIN__ROUNDED_scalar(x) (x = dtrain__rounded_f32(x, dtrain__opaque_zero))
#endif

#define DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op)                                                           \
    target static void dtrain__train_adamw_##isa(float *p, const float *g, float *m, float *v, size_t count,          \
                                                 const dtrain__adamw_constants *c)                                    \
    {                                                                                                                 \
        vector beta1 = op##_set1_ps(c->beta1), rest1 = op##_set1_ps(c->rest1), beta2 = op##_set1_ps(c->beta2);        \
        vector rest2 = op##_set1_ps(c->rest2), root = op##_set1_ps(c->root), eps = op##_set1_ps(c->eps);              \
        vector rate = op##_set1_ps(c->rate), keep = op##_set1_ps(c->keep);                                            \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector gi = op##_loadu_ps(g + i), grown = gi * rest1, square = gi * gi;                                   \
            vector mi = op##_loadu_ps(m + i) * beta1, vi = op##_loadu_ps(v + i) * beta2;                              \
            vector kept = op##_loadu_ps(p + i) * keep, spread, change;                                                \
            square = square * rest2;                                                                                  \
            DTRAIN__ROUNDED_##isa(grown);                                                                             \
            DTRAIN__ROUNDED_##isa(square);                                                                            \
            DTRAIN__ROUNDED_##isa(mi);                                                                                \
            DTRAIN__ROUNDED_##isa(vi);                                                                                \
            DTRAIN__ROUNDED_##isa(kept);                                                                              \
            mi = mi + grown;                                                                                          \
            vi = vi + square;                                                                                         \
            spread = vi;                                                                                              \
            DTRAIN__ROOT_##isa(spread);                                                                               \
            spread = spread * root;                                                                                   \
            DTRAIN__ROUNDED_##isa(spread);                                                                            \
            change = mi / (spread + eps) * rate;                                                                      \
            DTRAIN__ROUNDED_##isa(change);                                                                            \
            op##_storeu_ps(m + i, mi);                                                                                \
            op##_storeu_ps(v + i, vi);                                                                                \
            op##_storeu_ps(p + i, kept - change);                                                                     \
        }                                                                                                             \
        if (i < count) {                                                                                              \
            float end[4][width] = {{0}};                                                                              \
            size_t bytes = (count - i) * sizeof(float);                                                               \
            memcpy(end[0], p + i, bytes);                                                                             \
            memcpy(end[1], g + i, bytes);                                                                             \
            memcpy(end[2], m + i, bytes);                                                                             \
            memcpy(end[3], v + i, bytes);                                                                             \
            dtrain__train_adamw_##isa(end[0], end[1], end[2], end[3], width, c);                                      \
            memcpy(p + i, end[0], bytes);                                                                             \
            memcpy(m + i, end[2], bytes);                                                                             \
            memcpy(v + i, end[3], bytes);                                                                             \
        }                                                                                                             \
    }

/* Without momentum the velocity is the gradient and is not kept. */
#define DTRAIN__TRAIN_SGD(isa, target, vector, width, op)                                                             \
    target static void dtrain__train_sgd_##isa(float *p, const float *g, float *velocity, size_t count,               \
                                               const dtrain__sgd_constants *c)                                        \
    {                                                                                                                 \
        vector momentum = op##_set1_ps(c->momentum), lr = op##_set1_ps(c->lr), keep = op##_set1_ps(c->keep);          \
        vector coupled = op##_set1_ps(c->coupled);                                                                    \
        int decays = c->coupled != 0.0f;                                                                              \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector pi = op##_loadu_ps(p + i), gi = op##_loadu_ps(g + i), product, kept;                               \
            if (decays) {                                                                                             \
                product = pi * coupled;                                                                               \
                DTRAIN__ROUNDED_##isa(product);                                                                       \
                gi = gi + product;                                                                                    \
            }                                                                                                         \
            if (velocity != NULL) {                                                                                   \
                product = op##_loadu_ps(velocity + i) * momentum;                                                     \
                DTRAIN__ROUNDED_##isa(product);                                                                       \
                vector vi = product + gi;                                                                             \
                op##_storeu_ps(velocity + i, vi);                                                                     \
                product = vi * momentum;                                                                              \
                DTRAIN__ROUNDED_##isa(product);                                                                       \
                if (c->nesterov)                                                                                      \
                    gi = gi + product;                                                                                \
                else                                                                                                  \
                    gi = vi;                                                                                          \
            }                                                                                                         \
            product = gi * lr;                                                                                        \
            kept = pi * keep;                                                                                         \
            DTRAIN__ROUNDED_##isa(product);                                                                           \
            DTRAIN__ROUNDED_##isa(kept);                                                                              \
            op##_storeu_ps(p + i, kept - product);                                                                    \
        }                                                                                                             \
        if (i < count) {                                                                                              \
            float end[3][width] = {{0}};                                                                              \
            size_t bytes = (count - i) * sizeof(float);                                                               \
            memcpy(end[0], p + i, bytes);                                                                             \
            memcpy(end[1], g + i, bytes);                                                                             \
            if (velocity != NULL)                                                                                     \
                memcpy(end[2], velocity + i, bytes);                                                                  \
            dtrain__train_sgd_##isa(end[0], end[1], velocity != NULL ? end[2] : NULL, width, c);                      \
            memcpy(p + i, end[0], bytes);                                                                             \
            if (velocity != NULL)                                                                                     \
                memcpy(velocity + i, end[2], bytes);                                                                  \
        }                                                                                                             \
    }

/* out = a operation b, where b may be one number for all. */
#define DTRAIN__TRAIN_MAP(name, isa, target, vector, width, op, b_parameter, b_vector, b_end, operation)              \
    target static void dtrain__train_##name##_##isa(float *out, const float *a, b_parameter, size_t count)            \
    {                                                                                                                 \
        size_t i = 0;                                                                                                 \
        for (; count - i >= width; i += width) {                                                                      \
            vector x = op##_loadu_ps(a + i), y = b_vector;                                                            \
            op##_storeu_ps(out + i, x operation y);                                                                   \
        }                                                                                                             \
        if (i < count) {                                                                                              \
            float left[width] = {0}, right[width] = {0};                                                              \
            size_t bytes = (count - i) * sizeof(float);                                                               \
            memcpy(left, a + i, bytes);                                                                               \
            (void)right;                                                                                              \
            b_end;                                                                                                    \
            memcpy(out + i, left, bytes);                                                                             \
        }                                                                                                             \
    }

#define DTRAIN__TRAIN_KERNELS_FOR(isa, target, vector, width, op)                                                     \
    DTRAIN__TRAIN_ADAMW(isa, target, vector, width, op)                                                               \
    DTRAIN__TRAIN_SGD(isa, target, vector, width, op)                                                                 \
    DTRAIN__TRAIN_MAP(add, isa, target, vector, width, op, const float *b, op##_loadu_ps(b + i),                      \
                      (memcpy(right, b + i, bytes), dtrain__train_add_##isa(left, left, right, width)), +)            \
    DTRAIN__TRAIN_MAP(divide, isa, target, vector, width, op, float b, op##_set1_ps(b),                               \
                      dtrain__train_divide_##isa(left, left, b, width), /)                                            \
    DTRAIN__TRAIN_MAP(multiply, isa, target, vector, width, op, float b, op##_set1_ps(b),                             \
                      dtrain__train_multiply_##isa(left, left, b, width), *)                                          \
    static const dtrain__train_kernels dtrain__train_kernels_##isa = {                                                \
        dtrain__train_adamw_##isa, dtrain__train_sgd_##isa, dtrain__train_add_##isa, dtrain__train_divide_##isa,      \
        dtrain__train_multiply_##isa};

static double dtrain__train_root(double square)
{
#if defined(DTRAIN__X86)
    __m128d both = _mm_set_sd(square); /* one instruction: the C library's may set errno */
    return _mm_cvtsd_f64(_mm_sqrt_sd(both, both));
#else
    return __builtin_sqrt(square);
#endif
}

static float dtrain__train_ratio(double over, double under)
{
    return (float)(over / under);
}

static float dtrain__one_loadu_ps(const float *from)
{
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void dtrain__one_storeu_ps(float *to, float value)
{
    memcpy(to, &value, sizeof value);
}

#define dtrain__one_set1_ps(a) (a)
#define DTRAIN__ROOT_scalar(x) (x = dtrain__sqrt_f32(x))
DTRAIN__TRAIN_KERNELS_FOR(scalar, , float, 1, dtrain__one)

#if defined(DTRAIN__X86)
DTRAIN__TRAIN_KERNELS_FOR(sse2, , __m128, 4, _mm)
DTRAIN__TRAIN_KERNELS_FOR(avx2, __attribute__((target("avx2"))), __m256, 8, _mm256)
DTRAIN__TRAIN_KERNELS_FOR(avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512)
#elif defined(__aarch64__)
#define dtrain__neon_loadu_ps(from) vld1q_f32(from)
#define dtrain__neon_storeu_ps(to, value) vst1q_f32(to, value)
#define dtrain__neon_set1_ps(a) vdupq_n_f32(a)
#define DTRAIN__ROOT_neon(x) __asm__("fsqrt %0.4s, %0.4s" : "+w"(x))
DTRAIN__TRAIN_KERNELS_FOR(neon, , float32x4_t, 4, dtrain__neon)
#endif

DTRAIN__EXACT_END

static const dtrain__train_kernels *dtrain__train_kernels_get(void)
{
    switch (dtrain__isa()) {
#if defined(DTRAIN__X86)
    case DTRAIN__ISA_SSE2: return &dtrain__train_kernels_sse2;
    case DTRAIN__ISA_AVX2: return &dtrain__train_kernels_avx2;
    case DTRAIN__ISA_AVX512: return &dtrain__train_kernels_avx512;
#elif defined(__aarch64__)
    case DTRAIN__ISA_NEON: return &dtrain__train_kernels_neon;
#endif
    default: return &dtrain__train_kernels_scalar;
    }
}

/* Numbers are judged by their bits: under -Ofast a compiler takes every number for finite. */
static int dtrain__train_finite(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7FF) != 0x7FF;
}

#endif

/* ---- >>params ----
 * The parameter table: its checks, and its cut into ranges. A range is what one parameter has in one unit: all of
 * it, or one layer of a stacked tensor. Ranges are ordered by unit and, inside a unit, by their place in the table.
 * Every object of this floor that keeps a table keeps it as ranges. */
#ifndef DTRAIN__PARAMS
#define DTRAIN__PARAMS

typedef struct dtrain__range {
    float *data;
    float *grad;
    size_t count;
    int no_decay;
} dtrain__range;

/* The ranges of all parameters with a gradient; those of unit u are unit_begin[u] up to unit_begin[u + 1]. */
typedef struct dtrain__params {
    dtrain__range *ranges;
    size_t *unit_begin;
    size_t range_count;
    int units;
} dtrain__params;

/* Something that must not overlap another of its kind: bytes in memory, or unit numbers. */
typedef struct dtrain__span {
    uintptr_t begin, end;
    const dtrain_param *param;
} dtrain__span;

/* Says whether there is a gradient to reduce and to apply. */
static int dtrain__params_trained(const dtrain_param *param)
{
    return param->grad != NULL && !param->frozen;
}

static int dtrain__params_ndim(const dtrain_param *param)
{
    int ndim = param->ndim;
    while (param->ndim == 0 && ndim < DTRAIN_MAX_DIMS && param->shape[ndim] > 0)
        ndim++;
    return ndim;
}

/* Sets *count and *bytes; returns 0 when they overflow. */
static int dtrain__params_size(const dtrain_param *param, size_t *count, size_t *bytes)
{
    int ndim = dtrain__params_ndim(param), fits = 1;
    *count = 1;
    for (int i = 0; i < ndim && i < DTRAIN_MAX_DIMS; i++)
        fits = dtrain__mul_size(*count, param->shape[i], count) && fits;
    return dtrain__mul_size(*count, dtrain_dtype_bits(param->dtype) / 8, bytes) && fits;
}

DTRAIN_API size_t dtrain_param_elements(const dtrain_param *param)
{
    size_t count, bytes;
    return param != NULL && dtrain__params_size(param, &count, &bytes) ? count : 0;
}

static size_t dtrain__params_layers(const dtrain_param *param)
{
    return param->stacked ? param->shape[0] : 1;
}

DTRAIN_API int dtrain_params_units(const dtrain_param *table, size_t count)
{
    size_t units = 0;
    for (size_t i = 0; table != NULL && i < count; i++) {
        size_t end = (size_t)table[i].unit + dtrain__params_layers(&table[i]);
        units = end > units ? end : units;
    }
    return units <= INT_MAX ? (int)units : 0;
}

static dtrain_status dtrain__params_check_one(const dtrain_param *param, size_t index, int reserves)
{
    size_t count, bytes;
    const char *name = param->name;
    if (name == NULL || name[0] == '\0')
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %zu of the table has no name: give it one", index);
    unsigned bits = dtrain_dtype_bits(param->dtype);
    if (bits == 0 || bits % 8 != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: dtype %d is none of whole bytes: use DTRAIN_F32",
                            name, (int)param->dtype);
    if (param->ndim < 0 || param->ndim > DTRAIN_MAX_DIMS)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: ndim is %d, expected 0 to %d", name, param->ndim,
                            DTRAIN_MAX_DIMS);
    if (dtrain__params_ndim(param) == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s has no shape: give its sizes, {1} for a scalar",
                            name);
    if (!dtrain__params_size(param, &count, &bytes))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: its sizes multiply to more than memory", name);
    if (param->unit < 0 || dtrain__params_layers(param) > (size_t)(INT_MAX - param->unit))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: unit %d and %zu layers, expected 0 to %d", name,
                            param->unit, dtrain__params_layers(param), INT_MAX);
    if (param->data == NULL && bytes > 0 && !reserves)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "parameter %s: data is NULL, expected %zu bytes", name, bytes);
    return DTRAIN_OK;
}

static int dtrain__params_compare_spans(const void *left, const void *right)
{
    const dtrain__span *a = (const dtrain__span *)left, *b = (const dtrain__span *)right;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

static int dtrain__params_compare_names(const void *left, const void *right)
{
    const dtrain__span *a = (const dtrain__span *)left, *b = (const dtrain__span *)right;
    return strcmp(a->param->name, b->param->name);
}

static dtrain_status dtrain__params_check_names(const dtrain_param *table, size_t count, dtrain__span *spans)
{
    for (size_t i = 0; i < count; i++)
        spans[i].param = &table[i];
    qsort(spans, count, sizeof *spans, dtrain__params_compare_names);
    for (size_t i = 1; i < count; i++) {
        if (dtrain__params_compare_names(&spans[i - 1], &spans[i]) == 0)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "two parameters are named %s: names must be unique",
                                spans[i].param->name);
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__params_check_units(const dtrain_param *table, size_t count, dtrain__span *spans)
{
    uintptr_t covered = 0;
    for (size_t i = 0; i < count; i++) {
        spans[i].begin = (uintptr_t)table[i].unit;
        spans[i].end = spans[i].begin + dtrain__params_layers(&table[i]);
        spans[i].param = &table[i];
    }
    qsort(spans, count, sizeof *spans, dtrain__params_compare_spans);
    for (size_t i = 0; i < count; i++) {
        if (spans[i].begin > covered)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "parameter %s has unit %d but none has unit %zu: number units without gaps",
                                spans[i].param->name, spans[i].param->unit, (size_t)covered);
        covered = spans[i].end > covered ? spans[i].end : covered;
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__params_check_memory(const dtrain_param *table, size_t count, dtrain__span *spans)
{
    size_t used = 0, elements, bytes;
    for (size_t i = 0; i < 2 * count; i++) {
        const dtrain_param *param = &table[i / 2];
        void *memory = i % 2 == 0 ? param->data : dtrain__params_trained(param) ? param->grad : NULL;
        if (!dtrain__params_size(param, &elements, &bytes) || bytes == 0 || memory == NULL)
            continue;
        spans[used].begin = (uintptr_t)memory;
        spans[used].end = (uintptr_t)memory + bytes;
        spans[used++].param = param;
    }
    qsort(spans, used, sizeof *spans, dtrain__params_compare_spans);
    for (size_t i = 1; i < used; i++) {
        if (spans[i].begin < spans[i - 1].end)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "parameters %s and %s overlap in memory: list a shared tensor once, and keep data and "
                                "grad apart",
                                spans[i - 1].param->name, spans[i].param->name);
    }
    return DTRAIN_OK;
}

/* Checks a table; reserves = 1: data and grad may be NULL, the library reserves them. */
static dtrain_status dtrain__params_check_for(const dtrain_param *table, size_t count, int reserves)
{
    dtrain_allocator allocator = {NULL, NULL, 0, 0};
    size_t bytes;
    if (table == NULL || count == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "the parameter table is empty: list at least one parameter");
    if (!dtrain__mul_size(count, 2 * sizeof(dtrain__span), &bytes))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "a table of %zu parameters is longer than memory", count);
    for (size_t i = 0; i < count; i++) {
        if (dtrain__params_check_one(&table[i], i, reserves) != DTRAIN_OK)
            return DTRAIN_ERR_INVALID;
    }
    dtrain__span *spans = (dtrain__span *)dtrain__alloc(&allocator, bytes);
    if (spans == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes to check the parameter table", bytes);
    dtrain_status status = dtrain__params_check_names(table, count, spans);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_units(table, count, spans);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_memory(table, count, spans);
    dtrain__free(&allocator, spans, bytes);
    return status;
}

DTRAIN_API dtrain_status dtrain_params_check(const dtrain_param *table, size_t count)
{
    return dtrain__params_check_for(table, count, 0);
}

typedef struct dtrain__params_print {
    unsigned char before[32], name[32];
    uint64_t fields[8 + DTRAIN_MAX_DIMS];
} dtrain__params_print;

/* Adds a good table, but for its addresses, to the hash that digest holds. */
static void dtrain__params_digest(const dtrain_param *table, size_t count, unsigned char digest[32])
{
    for (size_t i = 0; i < count; i++) {
        dtrain__params_print print;
        memset(&print, 0, sizeof print);
        memcpy(print.before, digest, sizeof print.before);
        dtrain_sha256(table[i].name, strlen(table[i].name), print.name);
        print.fields[0] = (uint64_t)table[i].dtype;
        print.fields[1] = (uint64_t)dtrain__params_ndim(&table[i]);
        print.fields[2] = table[i].stacked != 0;
        print.fields[3] = (uint64_t)table[i].unit;
        print.fields[4] = table[i].grad != NULL;
        print.fields[5] = table[i].frozen != 0;
        print.fields[6] = table[i].tied != 0;
        print.fields[7] = table[i].no_decay != 0;
        for (size_t d = 0; d < DTRAIN_MAX_DIMS; d++)
            print.fields[8 + d] = table[i].shape[d];
        dtrain_sha256(&print, sizeof print, digest);
    }
}

/* Checks that what has a gradient is F32. */
static dtrain_status dtrain__params_check_f32(const dtrain_param *table, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (dtrain__params_trained(&table[i]) && table[i].dtype != DTRAIN_F32)
            return dtrain__fail(
                NULL, DTRAIN_ERR_UNSUPPORTED,
                "parameter %s is %s, gradients are reduced and applied in F32 only: keep F32 weights, or "
                "set frozen",
                table[i].name, dtrain_dtype_name(table[i].dtype));
    }
    return DTRAIN_OK;
}

static void dtrain__params_destroy(dtrain__params *params, dtrain_allocator *allocator)
{
    dtrain__free(allocator, params->ranges, params->range_count * sizeof *params->ranges);
    dtrain__free(allocator, params->unit_begin, ((size_t)params->units + 1) * sizeof *params->unit_begin);
    memset(params, 0, sizeof *params);
}

/* Writes ranges in place by unit; unit_begin[u + 1] moves from the begin of unit u to its end. */
static void dtrain__params_fill(dtrain__params *params, const dtrain_param *table, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t layers = dtrain__params_layers(&table[i]);
        size_t each = layers > 0 ? dtrain_param_elements(&table[i]) / layers : 0;
        for (size_t layer = 0; dtrain__params_trained(&table[i]) && layer < layers; layer++) {
            dtrain__range *range = &params->ranges[params->unit_begin[(size_t)table[i].unit + layer + 1]++];
            range->data = (float *)table[i].data + layer * each;
            range->grad = (float *)table[i].grad + layer * each;
            range->count = each;
            range->no_decay = table[i].no_decay;
        }
    }
}

/* Cuts a table, which is checked first, into ranges. */
static dtrain_status dtrain__params_create(dtrain__params *params, const dtrain_param *table, size_t count,
                                           dtrain_allocator *allocator)
{
    memset(params, 0, sizeof *params);
    dtrain_status status = dtrain_params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_f32(table, count);
    if (status != DTRAIN_OK)
        return status;
    params->units = dtrain_params_units(table, count);
    for (size_t i = 0; i < count; i++)
        params->range_count += dtrain__params_trained(&table[i]) ? dtrain__params_layers(&table[i]) : 0;
    params->unit_begin = (size_t *)dtrain__alloc(allocator, ((size_t)params->units + 1) * sizeof(size_t));
    params->ranges = (dtrain__range *)dtrain__alloc(allocator, params->range_count * sizeof(dtrain__range));
    if (params->unit_begin == NULL || params->ranges == NULL) {
        dtrain__params_destroy(params, allocator);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a table of %zu parameters", count);
    }
    /* Counts of unit u go to u + 2, so that summing leaves the begin of u at u + 1, and filling its end. */
    for (size_t i = 0; i < count; i++) {
        size_t layers = dtrain__params_trained(&table[i]) ? dtrain__params_layers(&table[i]) : 0;
        for (size_t unit = (size_t)table[i].unit; unit < (size_t)table[i].unit + layers; unit++)
            params->unit_begin[unit + 2 <= (size_t)params->units ? unit + 2 : 0] += 1;
    }
    params->unit_begin[0] = 0;
    for (int unit = 1; unit <= params->units; unit++)
        params->unit_begin[unit] += params->unit_begin[unit - 1];
    dtrain__params_fill(params, table, count);
    return DTRAIN_OK;
}

#endif

/* ---- >>norm ----
 * The sum of squares of float32, without an error: any order and any partition of the elements, over calls and over
 * ranks, gives the same integer, which is rounded once at the end. The square of a float32 is an integer of 48 bits
 * times a power of two. Long slices add such integers up by their exponent first, in 64 bits, and these sums go to a
 * fixed-point number of 32-bit limbs that carry late. Everything is integers: flags that relax floating point and
 * modes that flush subnormals change nothing.
 *
 *   source   Neal, Fast exact summation using small and large superaccumulators, arXiv:1505.05571, 2015 */
#ifndef DTRAIN__NORM
#define DTRAIN__NORM

#include <string.h>

/* Bit 0 of limb 0 is 2^-298, the square of the smallest float32, and the largest square is below 2^256. With 2^58 of
 * them, over all ranks, the sum has 612 bits, of which limbs keep 32 each between calls. */
#define DTRAIN__EXACT_DIGITS 20
#define DTRAIN__EXACT_INFINITIES 20 /* the limb that counts them */
#define DTRAIN__EXACT_NANS 21
#define DTRAIN__EXACT_LIMBS 22
#define DTRAIN__EXACT_LOWEST (-298)

#define DTRAIN__EXACT_BLOCK 65536u /* as many squares of 48 bits fit 64 */
#define DTRAIN__EXACT_FEW 128u     /* below it, clearing and reading the bins costs more than they save */
#define DTRAIN__EXACT_SETS 4u      /* so that neighbours of one exponent need not wait for each other's store */

/* Zero before the first element; all-reduced as I64 with DTRAIN_SUM, by up to 1024 ranks. */
typedef struct dtrain__exact {
    int64_t limbs[DTRAIN__EXACT_LIMBS];
} dtrain__exact;

static uint32_t dtrain__exact_load(const unsigned char *from)
{
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}

/* Subnormals, of exponent field 0, lack the leading bit. */
static uint64_t dtrain__exact_square(uint32_t bits)
{
    uint32_t exponent = bits >> 23 & 255, leading = (0u - exponent) & 0x800000u;
    uint32_t mantissa = (bits & 0x7FFFFFu) | leading;
    return (uint64_t)mantissa * mantissa;
}

/* Adds squares of one exponent field. A limb grows by less than 2^33. */
static void dtrain__exact_put(dtrain__exact *sum, uint64_t squares, uint32_t exponent)
{
    uint32_t position = exponent > 0 ? 2 * exponent - 2 : 0, shift = position % 32;
    int64_t *limb = sum->limbs + position / 32;
    uint64_t low = (squares & 0xFFFFFFFFu) << shift, high = (squares >> 32) << shift;
    limb[0] += (int64_t)(low & 0xFFFFFFFFu);
    limb[1] += (int64_t)(low >> 32) + (int64_t)(high & 0xFFFFFFFFu);
    limb[2] += (int64_t)(high >> 32);
}

static void dtrain__exact_carry(dtrain__exact *sum)
{
    for (int i = 0; i + 1 < DTRAIN__EXACT_DIGITS; i++) {
        sum->limbs[i + 1] += sum->limbs[i] >> 32;
        sum->limbs[i] &= 0xFFFFFFFF;
    }
}

static void dtrain__exact_add_few(dtrain__exact *sum, const unsigned char *from, size_t count)
{
    for (size_t i = 0; i < count; i++, from += sizeof(float)) {
        uint32_t bits = dtrain__exact_load(from), exponent = bits >> 23 & 255;
        if (exponent < 255)
            dtrain__exact_put(sum, dtrain__exact_square(bits), exponent);
        else
            sum->limbs[bits & 0x7FFFFFu ? DTRAIN__EXACT_NANS : DTRAIN__EXACT_INFINITIES]++;
    }
}

static void dtrain__exact_add_block(dtrain__exact *sum, const unsigned char *from, size_t count)
{
    uint64_t bins[256][DTRAIN__EXACT_SETS];
    size_t whole = count - count % DTRAIN__EXACT_SETS;
    memset(bins, 0, sizeof bins);
    for (size_t i = 0; i < whole; i += DTRAIN__EXACT_SETS, from += DTRAIN__EXACT_SETS * sizeof(float)) {
        uint32_t a = dtrain__exact_load(from), b = dtrain__exact_load(from + 4);
        uint32_t c = dtrain__exact_load(from + 8), d = dtrain__exact_load(from + 12);
        bins[a >> 23 & 255][0] += dtrain__exact_square(a);
        bins[b >> 23 & 255][1] += dtrain__exact_square(b);
        bins[c >> 23 & 255][2] += dtrain__exact_square(c);
        bins[d >> 23 & 255][3] += dtrain__exact_square(d);
    }
    for (uint32_t exponent = 0; exponent < 255; exponent++) {
        const uint64_t *bin = bins[exponent];
        uint64_t squares = bin[0] + bin[1] + bin[2] + bin[3];
        if (squares != 0)
            dtrain__exact_put(sum, squares, exponent);
    }
    dtrain__exact_add_few(sum, from, count - whole);
    if ((bins[255][0] | bins[255][1] | bins[255][2] | bins[255][3]) == 0)
        return;
    from -= whole * sizeof(float);
    for (size_t i = 0; i < whole; i++, from += sizeof(float)) {
        if ((dtrain__exact_load(from) >> 23 & 255) == 255)
            dtrain__exact_add_few(sum, from, 1);
    }
}

/* Adds count squares, from any alignment; up to 2^48 over all calls. */
static void dtrain__exact_add_squares(dtrain__exact *sum, const float *x, size_t count)
{
    const unsigned char *from = (const unsigned char *)x;
    while (count >= DTRAIN__EXACT_FEW) {
        size_t block = count < DTRAIN__EXACT_BLOCK ? count : DTRAIN__EXACT_BLOCK;
        dtrain__exact_add_block(sum, from, block);
        dtrain__exact_carry(sum);
        from += block * sizeof(float);
        count -= block;
    }
    dtrain__exact_add_few(sum, from, count);
    dtrain__exact_carry(sum);
}

/* Says whether every element added, on any rank, was finite. */
static int dtrain__exact_finite(const dtrain__exact *sum)
{
    return sum->limbs[DTRAIN__EXACT_INFINITIES] == 0 && sum->limbs[DTRAIN__EXACT_NANS] == 0;
}

/* Returns the sum, rounded once to the nearest float64, ties to even; NaN when an element was, else infinity when
 * one was. */
static double dtrain__exact_value(const dtrain__exact *sum)
{
    dtrain__exact carried = *sum;
    int top = DTRAIN__EXACT_DIGITS - 1, zeros = 0;
    uint64_t bits = 0, rest = 0;
    double value;
    dtrain__exact_carry(&carried);
    while (top > 0 && carried.limbs[top] == 0)
        top--;
    for (int i = top; i >= 0; i--) {
        uint64_t limb = (uint64_t)carried.limbs[i];
        if (i > top - 2)
            bits |= limb << (i == top ? 32 : 0);
        else
            rest |= i == top - 2 ? limb << 32 : (uint64_t)(limb != 0);
    }
    while (bits != 0 && bits >> 63 == 0) {
        bits = bits << 1 | rest >> 63;
        rest = rest << 1; /* by at most 31: what stands for lower limbs stays below its limb */
        zeros++;
    }
    if (bits != 0) {
        uint64_t exponent = (uint64_t)(32 * top + 31 - zeros + DTRAIN__EXACT_LOWEST + 1023);
        uint64_t below = (bits & 0x7FF) | (uint64_t)(rest != 0), half = 0x400;
        bits = (exponent << 52) + (bits << 1 >> 12);           /* the leading bit is not stored */
        bits += below > half || (below == half && (bits & 1)); /* a carry goes on into the exponent, as it should */
    }
    if (!dtrain__exact_finite(sum))
        bits = sum->limbs[DTRAIN__EXACT_NANS] != 0 ? UINT64_C(0x7FF8000000000000) : UINT64_C(0x7FF0000000000000);
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif

/* ---- >>sampler ----
 * Which examples a micro-batch has. Everything is computed from seed, step and index when it is asked for: there is
 * no state to keep, to share between ranks, or to save. An epoch is shuffled by a permutation of a rectangle just
 * larger than it; what lands outside is permuted again until it lands inside. */
#ifndef DTRAIN__SAMPLER
#define DTRAIN__SAMPLER

/* Fewer leave the orders of short epochs uneven. */
#define DTRAIN__SAMPLER_ROUNDS 8

static uint64_t dtrain__sampler_root(uint64_t square)
{
    uint64_t root = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint64_t next = root | (uint64_t)1 << bit;
        if (next * next <= square)
            root = next;
    }
    return root;
}

DTRAIN_API dtrain_status dtrain_sampler_init(dtrain_sampler *sampler, const dtrain_sampler_desc *desc)
{
    if (sampler == NULL || desc == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_sampler_init: a sampler and a desc are needed, got NULL");
    memset(sampler, 0, sizeof *sampler);
    if (desc->count == 0 || desc->count > (uint64_t)1 << 62)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sampler: count is %llu, expected 1 to 2^62 examples",
                            (unsigned long long)desc->count);
    if (desc->micro_batches < 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sampler: micro_batches is %d, expected 0 or more",
                            desc->micro_batches);
    if (desc->batch > (size_t)1 << 30)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sampler: batch is %zu, expected at most 2^30 examples",
                            desc->batch);
    sampler->desc = *desc;
    if (desc->batch == 0)
        sampler->desc.batch = 1;
    if (desc->micro_batches == 0)
        sampler->desc.micro_batches = 1;
    sampler->rows = dtrain__sampler_root(desc->count);
    sampler->columns = (desc->count + sampler->rows - 1) / sampler->rows;
    return DTRAIN_OK;
}

static uint64_t dtrain__sampler_per_step(const dtrain_sampler *sampler)
{
    return (uint64_t)sampler->desc.batch * (uint64_t)sampler->desc.micro_batches;
}

DTRAIN_API uint64_t dtrain_sampler_steps(const dtrain_sampler *sampler)
{
    uint64_t each = dtrain__sampler_per_step(sampler);
    return (sampler->desc.count + each - 1) / each;
}

/* Each round adds to one coordinate what depends on the other alone, so that it can be undone. */
static uint64_t dtrain__sampler_permute(const dtrain_sampler *sampler, uint64_t key, uint64_t value)
{
    uint64_t row = value / sampler->columns, column = value % sampler->columns;
    for (uint64_t round = 0; round < DTRAIN__SAMPLER_ROUNDS; round += 2) {
        row = (row + dtrain_random_u64(key, round << 40 | column) % sampler->rows) % sampler->rows;
        column = (column + dtrain_random_u64(key, (round + 1) << 40 | row) % sampler->columns) % sampler->columns;
    }
    return row * sampler->columns + column;
}

DTRAIN_API uint64_t dtrain_sampler_index(const dtrain_sampler *sampler, uint64_t epoch, uint64_t position)
{
    if (sampler->desc.no_shuffle || position >= sampler->desc.count)
        return position;
    uint64_t key = dtrain_random_u64(sampler->desc.seed, epoch);
    do
        position = dtrain__sampler_permute(sampler, key, position);
    while (position >= sampler->desc.count);
    return position;
}

/* The examples that a step of an epoch has: all its micro-batches can hold, or what is left for the last. */
static uint64_t dtrain__sampler_left(const dtrain_sampler *sampler, uint64_t step_of_epoch)
{
    uint64_t each = dtrain__sampler_per_step(sampler);
    uint64_t left = sampler->desc.count - step_of_epoch * each;
    return left < each ? left : each;
}

DTRAIN_API int dtrain_sampler_share(const dtrain_sampler *sampler, uint64_t step, int rank, int ranks, int *first)
{
    size_t begin = 0, micro_batches = (size_t)sampler->desc.micro_batches;
    size_t share = dtrain_split(micro_batches, ranks, rank, &begin), stride = 1;
    uint64_t filled = dtrain__sampler_left(sampler, step % dtrain_sampler_steps(sampler));
    if (sampler->desc.strided && ranks > 0 && rank >= 0 && rank < ranks) {
        begin = (size_t)rank; /* the share is the same: earlier ranks have one more here too */
        stride = (size_t)ranks;
    }
    if (first != NULL)
        *first = (int)begin;
    if (filled <= begin)
        return 0;
    uint64_t most = (filled - begin - 1) / stride + 1;
    return (int)(share < most ? share : most);
}

DTRAIN_API size_t dtrain_sampler_batch(const dtrain_sampler *sampler, uint64_t step, int micro_batch,
                                       uint64_t *examples)
{
    if (micro_batch < 0 || micro_batch >= sampler->desc.micro_batches)
        return 0;
    uint64_t steps = dtrain_sampler_steps(sampler), parts = (uint64_t)sampler->desc.micro_batches;
    uint64_t left = dtrain__sampler_left(sampler, step % steps), part = (uint64_t)micro_batch;
    uint64_t longer = left % parts, count = left / parts + (part < longer);
    uint64_t begin =
        step % steps * dtrain__sampler_per_step(sampler) + left / parts * part + (part < longer ? part : longer);
    for (uint64_t i = 0; i < count; i++)
        examples[i] = dtrain_sampler_index(sampler, step / steps, begin + i);
    return (size_t)count;
}

#endif

/* ---- >>schedule ----
 * Learning rates. Computed in float64 by basic operations only, each rounded, and rounded to float32 once: the same
 * bits on every machine, since the C library's cosine is not. */
#ifndef DTRAIN__SCHEDULE
#define DTRAIN__SCHEDULE

DTRAIN__EXACT_BEGIN

/* cos(pi t) for 0 <= t <= 1/2: Taylor's series, whose first term left out is below 2^-55. */
static double dtrain__schedule_cos_quarter(double t)
{
    static const double factorials[] = {2.0,   12.0,  30.0,  56.0,  90.0,
                                        132.0, 182.0, 240.0, 306.0, 380.0}; /* (2k - 1) 2k */
    double x = 3.14159265358979323846 * t, square = x * x, sum = 1.0;
    for (int k = 9; k >= 0; k--) {
        double term = square * sum;
        term = term / factorials[k];
        sum = 1.0 - term;
    }
    return sum;
}

static double dtrain__schedule_cos(double t)
{
    return t <= 0.5 ? dtrain__schedule_cos_quarter(t) : -dtrain__schedule_cos_quarter(1.0 - t);
}

DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, uint64_t step)
{
    if (schedule == NULL)
        return 0.0f;
    double lr = (double)schedule->lr, min_lr = (double)schedule->min_lr;
    if (step < schedule->warmup_steps) {
        double risen = lr * (double)(step + 1);
        return (float)(risen / (double)schedule->warmup_steps);
    }
    if (schedule->kind != DTRAIN_SCHEDULE_LINEAR && schedule->kind != DTRAIN_SCHEDULE_COSINE)
        return schedule->lr;
    if (step >= schedule->total_steps)
        return schedule->min_lr;
    double t = (double)(step - schedule->warmup_steps) / (double)(schedule->total_steps - schedule->warmup_steps);
    if (schedule->kind == DTRAIN_SCHEDULE_LINEAR) {
        double fallen = (min_lr - lr) * t;
        return (float)(lr + dtrain__rounded_f64(fallen, dtrain__opaque_zero));
    }
    double height = (1.0 + dtrain__schedule_cos(t)) * 0.5;
    double above = (lr - min_lr) * height;
    return (float)(min_lr + dtrain__rounded_f64(above, dtrain__opaque_zero));
}

DTRAIN__EXACT_END

#endif

/* ---- >>optimizer ----
 * AdamW and SGD: one pass over memory, whose loops are in >>train-kernels. The constants of a step depend on the
 * desc, the learning rate and the number of the step alone, so that a slice, a whole table, and a resumed run agree. */
#ifndef DTRAIN__OPTIMIZER
#define DTRAIN__OPTIMIZER

struct dtrain_optimizer {
    dtrain_allocator own; /* used when the caller gives none */
    dtrain_allocator *allocator;
    dtrain__params params;
    dtrain_optimizer_desc desc;
    float *state; /* m of all ranges, then v of all; or the velocity */
    size_t state_count, count;
    uint64_t step;
};

static dtrain_optimizer_desc dtrain__optimizer_defaults(const dtrain_optimizer_desc *given)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    if (given != NULL)
        desc = *given;
    desc.kind = desc.kind == DTRAIN_OPTIMIZER_DEFAULT ? DTRAIN_ADAMW : desc.kind;
    desc.beta1 = desc.beta1 == 0.0f ? 0.9f : desc.beta1;
    desc.beta2 = desc.beta2 == 0.0f ? 0.999f : desc.beta2;
    desc.eps = desc.eps == 0.0f ? 1e-8f : desc.eps;
    return desc;
}

DTRAIN__EXACT_BEGIN

/* By squaring, from the lowest bit of the exponent up. */
static double dtrain__optimizer_power(double base, uint64_t exponent)
{
    double power = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1)
            power = power * base;
        base = base * base;
    }
    return power;
}

static dtrain__adamw_constants dtrain__optimizer_adamw_constants(const dtrain_optimizer_desc *desc, float lr,
                                                                 uint64_t step)
{
    dtrain__adamw_constants c;
    double beta1 = (double)desc->beta1, beta2 = (double)desc->beta2;
    double decay = (double)lr * (double)desc->weight_decay;
    uint32_t zero = dtrain__opaque_zero;
    double rest1 = 1.0 - dtrain__rounded_f64(dtrain__optimizer_power(beta1, step), zero);
    double rest2 = 1.0 - dtrain__rounded_f64(dtrain__optimizer_power(beta2, step), zero);
    c.beta1 = desc->beta1;
    c.rest1 = (float)(1.0 - beta1);
    c.beta2 = desc->beta2;
    c.rest2 = (float)(1.0 - beta2);
    c.root = (float)(1.0 / dtrain__train_root(rest2));
    c.eps = desc->eps;
    c.rate = (float)((double)lr / rest1);
    c.keep = (float)(1.0 - dtrain__rounded_f64(decay, dtrain__opaque_zero));
    return c;
}

static dtrain__sgd_constants dtrain__optimizer_sgd_constants(const dtrain_optimizer_desc *desc, float lr)
{
    dtrain__sgd_constants c;
    double decay = desc->decoupled_decay ? (double)lr * (double)desc->weight_decay : 0.0;
    c.momentum = desc->momentum;
    c.lr = lr;
    c.keep = (float)(1.0 - dtrain__rounded_f64(decay, dtrain__opaque_zero));
    c.coupled = desc->decoupled_decay ? 0.0f : desc->weight_decay;
    c.nesterov = desc->nesterov;
    return c;
}

DTRAIN__EXACT_END

DTRAIN_API void dtrain_adamw(float *params, const float *grads, float *m, float *v, size_t count,
                             const dtrain_optimizer_desc *desc, float lr, uint64_t step)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    dtrain__adamw_constants c = dtrain__optimizer_adamw_constants(&full, lr, step);
    dtrain__train_kernels_get()->adamw(params, grads, m, v, count, &c);
    dtrain__fpmode_restore(mode);
}

DTRAIN_API void dtrain_sgd(float *params, const float *grads, float *velocity, size_t count,
                           const dtrain_optimizer_desc *desc, float lr)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    dtrain__sgd_constants c = dtrain__optimizer_sgd_constants(&full, lr);
    dtrain__train_kernels_get()->sgd(params, grads, full.momentum == 0.0f ? NULL : velocity, count, &c);
    dtrain__fpmode_restore(mode);
}

/* Returns the name of the first constant out of range, or NULL. */
static const char *dtrain__optimizer_bad(const dtrain_optimizer_desc *desc, int may_be_none)
{
    if (!dtrain__train_finite((double)desc->beta1) || desc->beta1 < 0.0f || desc->beta1 >= 1.0f)
        return "beta1, expected 0 to below 1";
    if (!dtrain__train_finite((double)desc->beta2) || desc->beta2 < 0.0f || desc->beta2 >= 1.0f)
        return "beta2, expected 0 to below 1";
    if (!dtrain__train_finite((double)desc->eps) || desc->eps < 0.0f)
        return "eps, expected 0 or more";
    if (!dtrain__train_finite((double)desc->weight_decay) || desc->weight_decay < 0.0f)
        return "weight_decay, expected 0 or more";
    if (!dtrain__train_finite((double)desc->momentum) || desc->momentum < 0.0f || desc->momentum >= 1.0f)
        return "momentum, expected 0 to below 1";
    if (desc->kind != DTRAIN_SGD && desc->kind != DTRAIN_ADAMW && !(may_be_none && desc->kind == DTRAIN_OPTIMIZER_NONE))
        return "kind, expected DTRAIN_SGD or DTRAIN_ADAMW";
    return NULL;
}

static dtrain_status dtrain__optimizer_init(dtrain_optimizer *optimizer, const dtrain_param *table, size_t count)
{
    dtrain_status status = dtrain__params_create(&optimizer->params, table, count, optimizer->allocator);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < optimizer->params.range_count; i++)
        optimizer->count += optimizer->params.ranges[i].count;
    size_t copies = optimizer->desc.kind == DTRAIN_ADAMW ? 2 : optimizer->desc.momentum != 0.0f;
    size_t bytes;
    /* The gradients are in memory, so their elements add up; twice as many need not fit. */
    if (dtrain__mul_size(optimizer->count, copies * sizeof(float), &bytes))
        optimizer->state = (float *)dtrain__alloc(optimizer->allocator, bytes);
    if (optimizer->state == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "optimizer: no memory for the state of %zu elements, %zu floats each", optimizer->count,
                            copies);
    optimizer->state_count = optimizer->count * copies;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_optimizer_create(dtrain_optimizer **optimizer, const dtrain_param *table, size_t count,
                                                 const dtrain_optimizer_desc *desc, dtrain_allocator *allocator)
{
    dtrain_allocator own = {NULL, NULL, 0, 0};
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    const char *bad = dtrain__optimizer_bad(&full, 0);
    if (optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_optimizer_create: optimizer is NULL, expected a pointer");
    *optimizer = NULL;
    if (bad != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "optimizer: the desc has a bad %s", bad);
    dtrain_optimizer *made = (dtrain_optimizer *)dtrain__alloc(allocator != NULL ? allocator : &own, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "optimizer: no memory for %zu bytes", sizeof *made);
    made->own = own;
    made->allocator = allocator != NULL ? allocator : &made->own;
    made->desc = full;
    dtrain_status status = dtrain__optimizer_init(made, table, count);
    if (status != DTRAIN_OK) {
        dtrain_optimizer_destroy(made);
        return status;
    }
    *optimizer = made;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr)
{
    if (optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_optimizer_step: the optimizer is NULL: create it first");
    if (!dtrain__train_finite((double)lr) || lr < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_optimizer_step: lr is %g, expected a number of at least 0", (double)lr);
    dtrain_optimizer_desc desc = optimizer->desc;
    size_t done = 0;
    optimizer->step++;
    for (size_t i = 0; i < optimizer->params.range_count; i++) {
        const dtrain__range *range = &optimizer->params.ranges[i];
        float *state = optimizer->state + (optimizer->state_count > 0 ? done : 0);
        desc.weight_decay = range->no_decay ? 0.0f : optimizer->desc.weight_decay;
        if (desc.kind == DTRAIN_ADAMW)
            dtrain_adamw(range->data, range->grad, state, state + optimizer->count, range->count, &desc, lr,
                         optimizer->step);
        else
            dtrain_sgd(range->data, range->grad, state, range->count, &desc, lr);
        done += range->count;
    }
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer)
{
    if (optimizer == NULL)
        return;
    dtrain_allocator own = optimizer->own;
    dtrain_allocator *allocator = optimizer->allocator == &optimizer->own ? &own : optimizer->allocator;
    dtrain__params_destroy(&optimizer->params, allocator);
    dtrain__free(allocator, optimizer->state, optimizer->state_count * sizeof(float));
    dtrain__free(allocator, optimizer, sizeof *optimizer);
}

#endif

/* ---- >>layout ----
 * How a parameter table is cut over ranks: ranges of units, this rank's part of each, and where all of it lies.
 * A range is what one parameter has in one unit. Parts are contiguous slices of a unit's concatenation, so that a rank
 * may have nothing of a range. Arithmetic alone: the plan of >>fsdp and the object itself agree because both ask here.
 */
#ifndef DTRAIN__LAYOUT
#define DTRAIN__LAYOUT

#ifndef DTRAIN__LAYOUT_SMALL
#define DTRAIN__LAYOUT_SMALL ((size_t)16 << 10) /* elements of a range that travels with others */
#endif
#define DTRAIN__LAYOUT_STAGE ((size_t)64 << 10) /* of all that do so in a unit, at most */
#define DTRAIN__LAYOUT_LITTLE 32                /* part of two units that all small ranges of a table may be */
#ifndef DTRAIN__LAYOUT_HOME
#define DTRAIN__LAYOUT_HOME ((size_t)64 << 10) /* elements of a part that is worth whole pages of its own */
#endif

typedef struct dtrain__cut {
    size_t param; /* of the table */
    int layer;    /* of a stacked parameter; else -1 */
    int unit, trained;
    int packed;               /* travels with the other small ranges of its unit */
    size_t stage, grad_stage; /* where it is among these, and among those that are trained */
    size_t element, count;    /* of the parameter */
    size_t begin;             /* in the unit's concatenation */
    size_t own, own_count;    /* this rank's part of the range */
    int home;                 /* that part stays at its addresses in full; others are kept apart */
    size_t weight;            /* where it is among this rank's weights that are kept apart */
    int stays;                /* small: its pages, and its gradient's, are never dropped */
    size_t grad;              /* and in its gradients and optimizer state; trained ranges alone are there */
    size_t full_grad;         /* where the range is among all that are trained */
} dtrain__cut;

typedef struct dtrain__cut_unit {
    size_t first, end;       /* its cuts */
    size_t count;            /* elements */
    size_t trained;          /* of them, with a gradient */
    size_t grad, grad_count; /* this rank's gradients */
    size_t full_grad;
    size_t packed, packed_grads; /* elements of small ranges, and of those trained */
    int tied;
} dtrain__cut_unit;

typedef struct dtrain__layout {
    dtrain_param *table; /* a copy, with names of its own */
    size_t table_count, names_bytes;
    char *names;
    dtrain__cut *cuts;
    size_t cut_count;
    dtrain__cut_unit *units;
    int unit_count, shards, copies, shard; /* ranks of one copy; copies; this rank's place in its copy */
    int resident;                          /* full parameters are kept */
    int apart;                             /* this rank's weights are kept apart from them */
    size_t stage;                          /* the most elements that one unit's small ranges have */
    size_t weights, grads, trained; /* elements: of this rank's parts kept apart, of those trained; of all trained */
    size_t *offsets;                /* bytes at which a parameter begins in reserved addresses, a parameter */
    size_t reserved;
} dtrain__layout;

static dtrain_strategy dtrain__layout_strategy(const dtrain_fsdp_desc *desc)
{
    return desc->strategy == DTRAIN_STRATEGY_DEFAULT ? DTRAIN_FULL_SHARD : desc->strategy;
}

static int dtrain__layout_is_16_bit(dtrain_dtype dtype)
{
    return dtype == DTRAIN_BF16 || dtype == DTRAIN_F16;
}

static dtrain_status dtrain__layout_check_desc(const dtrain_fsdp_desc *desc, int world)
{
    dtrain_strategy strategy = dtrain__layout_strategy(desc);
    dtrain_dtype dtypes[2] = {desc->gather_dtype, desc->reduce_dtype};
    if (strategy < DTRAIN_FULL_SHARD || strategy > DTRAIN_HYBRID_SHARD)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: strategy is %d, expected DTRAIN_FULL_SHARD, "
                            "DTRAIN_SHARD_GRAD_OP, DTRAIN_NO_SHARD or DTRAIN_HYBRID_SHARD",
                            (int)strategy);
    if (strategy == DTRAIN_HYBRID_SHARD && (desc->shard_size < 1 || world % desc->shard_size != 0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: shard_size is %d on %d ranks: hybrid sharding needs one "
                            "that divides the number of ranks",
                            desc->shard_size, world);
    for (int i = 0; i < 2; i++)
        if (dtypes[i] != 0 && dtypes[i] != DTRAIN_F32 && !dtrain__layout_is_16_bit(dtypes[i]))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "fsdp: %s is %d, expected DTRAIN_F32, DTRAIN_BF16 or "
                                "DTRAIN_F16",
                                i == 0 ? "gather_dtype" : "reduce_dtype", (int)dtypes[i]);
    if (desc->micro_batches < 0 || desc->loss_scale_steps < 0 || !dtrain__train_finite((double)desc->loss_scale) ||
        desc->loss_scale < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: micro_batches is %d, loss_scale %g, loss_scale_steps %d: "
                            "expected none below 0",
                            desc->micro_batches, (double)desc->loss_scale, desc->loss_scale_steps);
    return DTRAIN_OK;
}

static dtrain_status dtrain__layout_check_table(const dtrain_param *table, size_t count)
{
    dtrain_status status = dtrain__params_check_for(table, count, 1);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++)
        if (table[i].dtype != DTRAIN_F32 && !(table[i].frozen && table[i].data != NULL))
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "fsdp: parameter %s is %s: list F32 parameters, or freeze it and give its data",
                                table[i].name, dtrain_dtype_name(table[i].dtype));
    return status;
}

static void dtrain__layout_destroy(dtrain__layout *layout, dtrain_allocator *allocator)
{
    dtrain__free(allocator, layout->table, layout->table_count * sizeof(dtrain_param));
    dtrain__free(allocator, layout->names, layout->names_bytes);
    dtrain__free(allocator, layout->cuts, layout->cut_count * sizeof(dtrain__cut));
    dtrain__free(allocator, layout->units, (size_t)layout->unit_count * sizeof(dtrain__cut_unit));
    dtrain__free(allocator, layout->offsets, layout->table_count * sizeof(size_t));
    memset(layout, 0, sizeof *layout);
}

static dtrain_status dtrain__layout_copy(dtrain__layout *layout, const dtrain_param *table, size_t count,
                                         dtrain_allocator *allocator)
{
    size_t used = 0;
    layout->table_count = count;
    layout->unit_count = dtrain_params_units(table, count);
    for (size_t i = 0; i < count; i++) {
        layout->names_bytes += strlen(table[i].name) + 1;
        layout->cut_count += dtrain__params_layers(&table[i]);
    }
    layout->table = (dtrain_param *)dtrain__alloc(allocator, count * sizeof(dtrain_param));
    layout->names = (char *)dtrain__alloc(allocator, layout->names_bytes);
    layout->offsets = (size_t *)dtrain__alloc(allocator, count * sizeof(size_t));
    layout->cuts = (dtrain__cut *)dtrain__alloc(allocator, layout->cut_count * sizeof(dtrain__cut));
    layout->units = (dtrain__cut_unit *)dtrain__alloc(allocator, (size_t)layout->unit_count * sizeof(dtrain__cut_unit));
    if (layout->table == NULL || layout->names == NULL || layout->offsets == NULL || layout->cuts == NULL ||
        layout->units == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "fsdp: no memory for a table of %zu parameters", count);
    memcpy(layout->table, table, count * sizeof(dtrain_param));
    for (size_t i = 0; i < count; i++) {
        size_t bytes = strlen(table[i].name) + 1;
        memcpy(layout->names + used, table[i].name, bytes);
        layout->table[i].name = layout->names + used;
        used += bytes;
        layout->offsets[i] = layout->reserved;
        if (table[i].dtype == DTRAIN_F32)
            layout->reserved += (dtrain_param_elements(&table[i]) * sizeof(float) + 63) / 64 * 64;
    }
    return DTRAIN_OK;
}

/* Writes the cuts of one unit, in table order. */
static size_t dtrain__layout_fill(dtrain__layout *layout, int number, size_t at)
{
    dtrain__cut_unit *unit = &layout->units[number];
    unit->first = at;
    for (size_t i = 0; i < layout->table_count; i++) {
        const dtrain_param *param = &layout->table[i];
        size_t layers = dtrain__params_layers(param);
        if (number < param->unit || (size_t)number >= (size_t)param->unit + layers)
            continue;
        dtrain__cut *cut = &layout->cuts[at++];
        cut->param = i;
        cut->unit = number;
        cut->layer = param->stacked ? number - param->unit : -1;
        cut->trained = !param->frozen;
        cut->count = param->dtype == DTRAIN_F32 ? dtrain_param_elements(param) / layers : 0;
        cut->element = (size_t)(number - param->unit) * cut->count;
        cut->begin = unit->count;
        unit->count += cut->count;
        unit->trained += cut->trained ? cut->count : 0;
        unit->tied |= param->tied;
    }
    unit->end = at;
    return at;
}

/* Says which ranges of a unit travel together: small ones, where there are several. What a rank has of them is in one
 * piece among them, as its slice is in the unit. */
static void dtrain__layout_pack(dtrain__layout *layout, int number)
{
    dtrain__cut_unit *unit = &layout->units[number];
    size_t small = 0, elements = 0;
    for (size_t i = unit->first; i < unit->end && layout->shards > 1; i++) {
        dtrain__cut *cut = &layout->cuts[i];
        cut->packed =
            cut->count > 0 && cut->count <= DTRAIN__LAYOUT_SMALL && elements + cut->count <= DTRAIN__LAYOUT_STAGE;
        elements += cut->packed ? cut->count : 0;
        small += (size_t)cut->packed;
    }
    for (size_t i = unit->first; i < unit->end; i++) {
        dtrain__cut *cut = &layout->cuts[i];
        cut->packed = cut->packed && small > 1;
        cut->stage = unit->packed;
        cut->grad_stage = unit->packed_grads;
        unit->packed += cut->packed ? cut->count : 0;
        unit->packed_grads += cut->packed && cut->trained ? cut->count : 0;
    }
    layout->stage = unit->packed > layout->stage ? unit->packed : layout->stage;
}

/* The part of a range that a rank of the copy has; *own is where it begins in the range. */
static size_t dtrain__layout_part(const dtrain__layout *layout, const dtrain__cut *cut, int shard, size_t *own)
{
    size_t low, high, begin = cut->begin, end = cut->begin + cut->count;
    high = dtrain_split(layout->units[cut->unit].count, layout->shards, shard, &low);
    high += low;
    low = low > begin ? low : begin;
    high = high < end ? high : end;
    *own = low < high ? low - begin : 0;
    return low < high ? high - low : 0;
}

/* Says whose pages are never dropped: the system takes longer for the pages of a small range than it is worth, as long
 * as all of them are little beside the units that come and go. */
static void dtrain__layout_stay(dtrain__layout *layout)
{
    size_t small = 0, two[2] = {0, 0};
    for (size_t i = 0; i < layout->cut_count; i++)
        small += layout->cuts[i].count <= DTRAIN__LAYOUT_SMALL ? layout->cuts[i].count : 0;
    for (int i = 0; i < layout->unit_count; i++) {
        size_t count = layout->units[i].count;
        two[1] = count > two[0] ? two[0] : count > two[1] ? count : two[1];
        two[0] = count > two[0] ? count : two[0];
    }
    for (size_t i = 0; i < layout->cut_count && small <= (two[0] + two[1]) / DTRAIN__LAYOUT_LITTLE; i++)
        layout->cuts[i].stays = layout->cuts[i].count > 0 && layout->cuts[i].count <= DTRAIN__LAYOUT_SMALL;
}

/* The part of a range that is in memory for good, or of its gradient: *at is where it begins. */
static size_t dtrain__layout_staying(const dtrain__cut *cut, int grads, size_t *at)
{
    *at = cut->stays || grads ? 0 : cut->own;
    return cut->stays ? cut->count : cut->home && !grads ? cut->own_count : 0;
}

/* Cuts a table for rank `rank` of `world`. The table and desc are checked first. */
static dtrain_status dtrain__layout_create(dtrain__layout *layout, const dtrain_param *table, size_t count,
                                           const dtrain_fsdp_desc *desc, int world, int rank,
                                           dtrain_allocator *allocator)
{
    dtrain_strategy strategy = dtrain__layout_strategy(desc);
    memset(layout, 0, sizeof *layout);
    dtrain_status status = dtrain__layout_check_desc(desc, world);
    if (status == DTRAIN_OK)
        status = dtrain__layout_check_table(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__layout_copy(layout, table, count, allocator);
    if (status != DTRAIN_OK) {
        dtrain__layout_destroy(layout, allocator);
        return status;
    }
    layout->shards = strategy == DTRAIN_NO_SHARD ? 1 : strategy == DTRAIN_HYBRID_SHARD ? desc->shard_size : world;
    layout->copies = world / layout->shards;
    layout->shard = rank % layout->shards;
    layout->resident = strategy == DTRAIN_SHARD_GRAD_OP || layout->shards == 1;
    layout->apart = !layout->resident || dtrain__layout_is_16_bit(desc->gather_dtype);
    for (size_t at = 0, number = 0; number < (size_t)layout->unit_count; number++) {
        dtrain__cut_unit *unit = &layout->units[number];
        unit->grad = layout->grads;
        unit->full_grad = layout->trained;
        at = dtrain__layout_fill(layout, (int)number, at);
        dtrain__layout_pack(layout, (int)number);
        for (size_t i = unit->first; i < unit->end; i++) {
            dtrain__cut *cut = &layout->cuts[i];
            cut->own_count = dtrain__layout_part(layout, cut, layout->shard, &cut->own);
            cut->home = !layout->resident && !dtrain__layout_is_16_bit(desc->gather_dtype) && !cut->packed &&
                        cut->own_count >= DTRAIN__LAYOUT_HOME;
            cut->weight = layout->weights;
            cut->grad = layout->grads;
            cut->full_grad = layout->trained;
            layout->weights += cut->home ? 0 : cut->own_count;
            layout->grads += cut->trained ? cut->own_count : 0;
            layout->trained += cut->trained ? cut->count : 0;
        }
        unit->grad_count = layout->grads - unit->grad;
    }
    dtrain__layout_stay(layout);
    return DTRAIN_OK;
}

/* Levels of the counter that folds this many micro-batches. */
static int dtrain__layout_levels(int micro_batches)
{
    int levels = 1;
    while (micro_batches >> levels != 0)
        levels++;
    return levels;
}

#endif

/* ---- >>pages ----
 * A reserved range of addresses whose pages come when they are taken and go when nobody uses them. Users take and drop
 * stretches of bytes; stretches may share a page, which stays while any of them is in use.
 *
 * To bring a page costs the system more than to copy what it will hold. So pages that go are parked where they are, and
 * moved under the next stretch that is taken; parked pages and those in use are never more than `most`. Where stretches
 * are to be zeros, parked pages are, and their owner says from when on a user may write to a stretch before it takes
 * it: then they are put away, at the same place in a second range of as many addresses. One move takes only pages that
 * came by one, so seams between moves are marked, and few pages are not worth a move. Nothing is lost by moving under a
 * stretch: the contents of one that has no user are nobody's, and where users may write before they take, the system is
 * asked whether anything is there. */
#ifndef DTRAIN__PAGES
#define DTRAIN__PAGES

#define DTRAIN__PAGES_SEAM 0x8000u /* in users: a move has begun here, or ended before */
#define DTRAIN__PAGES_PARKED 64    /* stretches, at most */
#define DTRAIN__PAGES_FEW 16       /* are not worth a move */

typedef struct dtrain__parked {
    size_t first, count;
    int away; /* in the second range */
} dtrain__parked;

typedef struct dtrain__pages {
    unsigned char *base; /* NULL: nothing was reserved */
    size_t bytes, reserved, page;
    size_t most, held; /* pages */
    int zeros;         /* a stretch is zeros when it is taken, but for what users have written */
    size_t few;        /* fewer are not parked */
    dtrain__parked parked[DTRAIN__PAGES_PARKED];
    int parked_count;
    uint16_t *users; /* of each page */
    dtrain_allocator *allocator;
} dtrain__pages;

/* most: bytes that are held at once where parking is what holds them. */
static dtrain_status dtrain__pages_create(dtrain__pages *pages, size_t bytes, size_t most, int zeros,
                                          dtrain_allocator *allocator)
{
    pages->page = dtrain__os_page_bytes();
    pages->allocator = allocator;
    pages->bytes = (bytes + pages->page - 1) / pages->page * pages->page;
    pages->most = most / pages->page;
    pages->zeros = zeros;
    pages->few = pages->bytes / pages->page / 4096; /* a process has some 65,000 mappings */
    pages->few = pages->few > DTRAIN__PAGES_FEW ? pages->few : DTRAIN__PAGES_FEW;
    if (bytes == 0)
        return DTRAIN_OK;
    pages->users = (uint16_t *)dtrain__alloc(allocator, pages->bytes / pages->page * sizeof(uint16_t));
    pages->reserved = zeros ? 2 * pages->bytes : pages->bytes;
    pages->base = (unsigned char *)dtrain__os_reserve(pages->reserved);
    if (pages->users == NULL || pages->base == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "the system does not reserve %zu bytes of addresses: %s",
                            pages->reserved, strerror(errno));
    return DTRAIN_OK;
}

/* Pages come (a number that wraps around: they go). */
static void dtrain__pages_hold(dtrain__pages *pages, size_t more)
{
    pages->held += more;
    dtrain__memory_count(pages->allocator, more * pages->page);
}

static unsigned char *dtrain__pages_at(const dtrain__pages *pages, size_t first, int away)
{
    return pages->base + (away ? pages->bytes : 0) + first * pages->page;
}

/* Frees whole pages; where the system does not, as when they are locked, they are still set to zero. */
static void dtrain__pages_discard(const dtrain__pages *pages, size_t first, size_t count, int away)
{
    unsigned char *begin = dtrain__pages_at(pages, first, away);
    if (count > 0 && dtrain__os_discard(begin, count * pages->page) != 0)
        memset(begin, 0, count * pages->page);
}

/* Takes pages off what is parked in one place; too few that are left are discarded. */
static void dtrain__pages_unpark(dtrain__pages *pages, int index, size_t first, size_t count)
{
    dtrain__parked whole = pages->parked[index];
    dtrain__parked left[2] = {{whole.first, first - whole.first, whole.away},
                              {first + count, whole.first + whole.count - first - count, whole.away}};
    pages->parked[index] = pages->parked[--pages->parked_count];
    for (int i = 0; i < 2; i++) {
        if (left[i].count >= pages->few && pages->parked_count < DTRAIN__PAGES_PARKED) {
            pages->parked[pages->parked_count++] = left[i];
        } else {
            dtrain__pages_discard(pages, left[i].first, left[i].count, whole.away);
            dtrain__pages_hold(pages, (size_t)0 - left[i].count);
        }
    }
}

/* Discards what is parked in one place. */
static void dtrain__pages_unpark_all(dtrain__pages *pages, int index)
{
    dtrain__parked whole = pages->parked[index];
    dtrain__pages_unpark(pages, index, whole.first, whole.count);
    dtrain__pages_discard(pages, whole.first, whole.count, whole.away);
    dtrain__pages_hold(pages, (size_t)0 - whole.count);
}

/* Marks that pages have been moved. */
static void dtrain__pages_seams(dtrain__pages *pages, size_t first, size_t count)
{
    for (size_t at = first + 1; at < first + count; at++)
        pages->users[at] &= (uint16_t)~DTRAIN__PAGES_SEAM;
    pages->users[first] |= DTRAIN__PAGES_SEAM;
    if (first + count < pages->bytes / pages->page)
        pages->users[first + count] |= DTRAIN__PAGES_SEAM;
}

/* Moves parked pages, from `from` on, under a stretch; 0: they have not moved. */
static int dtrain__pages_move(dtrain__pages *pages, int index, size_t from, size_t to, size_t count)
{
    size_t bytes = count * pages->page;
    unsigned char *source = dtrain__pages_at(pages, from, pages->parked[index].away);
    unsigned char *target = dtrain__pages_at(pages, to, 0);
    if (source != target) {
        if ((pages->zeros && !dtrain__os_untouched(target, bytes)) || dtrain__os_move(source, target, bytes) != 0)
            return 0;
        dtrain__pages_seams(pages, to, count);
    }
    dtrain__pages_unpark(pages, index, from, count);
    return 1;
}

/* What is parked at the place of page `at`, or -1; *end: where such places end that have something, or have nothing. */
static int dtrain__pages_parked_at(const dtrain__pages *pages, size_t at, size_t *end)
{
    for (int i = 0; i < pages->parked_count; i++) {
        const dtrain__parked *parked = &pages->parked[i];
        if (at >= parked->first && at < parked->first + parked->count) {
            *end = parked->first + parked->count < *end ? parked->first + parked->count : *end;
            return i;
        }
        if (at < parked->first && parked->first < *end)
            *end = parked->first;
    }
    return -1;
}

/* The parked stretch that fits a number of pages best; -1: none. */
static int dtrain__pages_fitting(const dtrain__pages *pages, size_t count)
{
    int best = -1;
    for (int i = 0; i < pages->parked_count; i++) {
        size_t has = pages->parked[i].count, most = best >= 0 ? pages->parked[best].count : 0;
        if (best < 0 || (most < count ? has > most : has >= count && has < most))
            best = i;
    }
    return best;
}

/* Brings pages for a stretch that has none: parked ones, then new ones. */
static void dtrain__pages_bring(dtrain__pages *pages, size_t first, size_t count)
{
    int index;
    while (count >= pages->few && (index = dtrain__pages_fitting(pages, count)) >= 0) {
        size_t has = pages->parked[index].count, n = has < count ? has : count;
        if (!dtrain__pages_move(pages, index, pages->parked[index].first, first, n))
            break;
        first += n;
        count -= n;
    }
    while (pages->parked_count > 0 && pages->held + count > pages->most)
        dtrain__pages_unpark_all(pages, 0);
    dtrain__pages_hold(pages, count);
    if (count > 0)
        dtrain__os_populate(pages->base + first * pages->page, count * pages->page);
}

/* Pages [first, end) get their first user. What is parked at their own place goes back there, so that the place is free
 * when they are parked again. */
static void dtrain__pages_fill(dtrain__pages *pages, size_t first, size_t end)
{
    while (first < end) {
        size_t to = end;
        int index = dtrain__pages_parked_at(pages, first, &to);
        if (index >= 0 && dtrain__pages_move(pages, index, first, first, to - first)) {
            first = to;
            continue;
        }
        if (index >= 0)
            dtrain__pages_unpark_all(pages, index);
        dtrain__pages_bring(pages, first, to - first);
        first = to;
    }
}

/* Notes a user of `bytes` bytes from `begin` on. */
static void dtrain__pages_take(dtrain__pages *pages, size_t begin, size_t bytes)
{
    size_t at = begin / pages->page, end = bytes > 0 ? (begin + bytes - 1) / pages->page + 1 : at, fresh = at;
    for (; at < end; at++) {
        if ((pages->users[at]++ & ~DTRAIN__PAGES_SEAM) == 0)
            continue;
        dtrain__pages_fill(pages, fresh, at);
        fresh = at + 1;
    }
    dtrain__pages_fill(pages, fresh, end);
}

/* Pages [first, end) have lost their last user: parks them, seam by seam, or lets them go. What is to be zeros is set
 * to zero now, while the caches still have it. */
static void dtrain__pages_leave(dtrain__pages *pages, size_t first, size_t end)
{
    while (first < end) {
        size_t to = first + 1, n;
        while (to < end && !(pages->users[to] & DTRAIN__PAGES_SEAM))
            to++;
        n = to - first;
        if (n >= pages->few && pages->held <= pages->most && pages->parked_count < DTRAIN__PAGES_PARKED) {
            dtrain__parked parked = {first, n, 0};
            pages->parked[pages->parked_count++] = parked;
            if (pages->zeros)
                memset(dtrain__pages_at(pages, first, 0), 0, n * pages->page);
        } else {
            dtrain__pages_discard(pages, first, n, 0);
            dtrain__pages_hold(pages, (size_t)0 - n);
        }
        first = to;
    }
}

/* From now on users may write to stretches that they have not taken: puts what is parked there away. */
static void dtrain__pages_put_away(dtrain__pages *pages)
{
    for (int i = pages->parked_count - 1; i >= 0; i--) {
        dtrain__parked *parked = &pages->parked[i];
        unsigned char *here = dtrain__pages_at(pages, parked->first, 0);
        if (parked->away)
            continue;
        parked->away = dtrain__os_move(here, here + pages->bytes, parked->count * pages->page) == 0;
        if (!parked->away)
            dtrain__pages_unpark_all(pages, i);
    }
}

static int dtrain__pages_are_zero(const unsigned char *at, size_t bytes)
{
    return bytes == 0 || (*at == 0 && memcmp(at, at + 1, bytes - 1) == 0);
}

/* Ends a use: pages without users go; what lies in others is set to zero where they are to be zeros. Then a page at
 * either end stays, too, while a neighbour has written there without being noted as its user. */
static void dtrain__pages_drop(dtrain__pages *pages, size_t begin, size_t bytes)
{
    size_t page = pages->page, at = begin / page, gone = at;
    size_t end = bytes > 0 ? (begin + bytes - 1) / page + 1 : at;
    for (; at < end; at++) {
        size_t low = at * page > begin ? at * page : begin;
        size_t high = (at + 1) * page < begin + bytes ? (at + 1) * page : begin + bytes;
        int last = (--pages->users[at] & ~DTRAIN__PAGES_SEAM) == 0;
        if (last && (!pages->zeros || high - low == page))
            continue;
        if (pages->zeros)
            memset(pages->base + low, 0, high - low);
        if (last && dtrain__pages_are_zero(pages->base + at * page, page))
            continue;
        dtrain__pages_leave(pages, gone, at);
        dtrain__pages_hold(pages, (size_t)0 - (size_t)last);
        gone = at + 1;
    }
    dtrain__pages_leave(pages, gone, end);
}

static void dtrain__pages_destroy(dtrain__pages *pages)
{
    if (pages->held > 0)
        dtrain__pages_hold(pages, (size_t)0 - pages->held);
    if (pages->base != NULL)
        dtrain__os_unreserve(pages->base, pages->reserved);
    if (pages->users != NULL)
        dtrain__free(pages->allocator, pages->users, pages->bytes / pages->page * sizeof(uint16_t));
    memset(pages, 0, sizeof *pages);
}

#endif

/* ---- >>fsdp-core ----
 * What an object of >>fsdp holds, how it fails, waits and keeps account. Units come and go in >>fsdp-gather, gradients
 * are reduced in >>fsdp-reduce, steps are made in >>fsdp-step, objects in >>fsdp-create.
 *
 * Three groups of the same ranks keep gathers, reductions and small agreements from waiting for each other; over a
 * transport that has no groups, all three are the caller's. What fails breaks the object for good: the first cause is
 * kept, and buffers stay until destroy has waited for whatever may still be inside them. */
#ifndef DTRAIN__FSDP
#define DTRAIN__FSDP

#define DTRAIN__FSDP_LEVELS 32
#define DTRAIN__FSDP_CHUNK 2048 /* elements at a time, in the first cache */
#define DTRAIN__FSDP_WHY 104
#define DTRAIN__FSDP_ROTATING 2 /* units that are gathered at once, tied ones apart */
#define DTRAIN__FSDP_BUCKET ((size_t)1 << 20)
#define DTRAIN__FSDP_GRACE_NS 1000000000 /* for what is under way when an object is destroyed */
#define DTRAIN__FSDP_STAGES 3            /* of small ranges: of units with even numbers, with odd ones, of gradients */

enum { DTRAIN__ABSENT, DTRAIN__COMING, DTRAIN__READY };                 /* a unit's parameters */
enum { DTRAIN__IDLE, DTRAIN__WAITS, DTRAIN__SCATTERS, DTRAIN__COPIES }; /* its gradients */
enum { DTRAIN__LANE_COMPUTE, DTRAIN__LANE_GATHER, DTRAIN__LANE_REDUCE, DTRAIN__LANE_WAIT, DTRAIN__LANES };

typedef struct dtrain__fsdp_unit {
    int state;
    int held;     /* gathered, and neither released nor reduced since */
    int fresh;    /* gathered since it was last reduced */
    int stale;    /* what is in memory is not what a gather would bring */
    int backward; /* gathered on the way down, and its gradients not taken over since */
    int has_pages, has_grads;
    uint64_t used; /* when it was gathered last */
    int reduced;   /* in this micro-batch */
    int stage, level;
    int carrier; /* the unit by which the operation goes that adds it over the copies */
} dtrain__fsdp_unit;

typedef struct dtrain__fsdp_event {
    int lane, unit;
    int64_t begin_ns, end_ns;
} dtrain__fsdp_event;

/* What ranks tell each other at the end of a step. */
typedef struct dtrain__fsdp_note {
    uint64_t begun; /* micro-batches of which it has reduced something */
    uint64_t failed;
    char why[DTRAIN__FSDP_WHY];
    double unused;
} dtrain__fsdp_note;

struct dtrain_fsdp {
    dtrain_comm *comm;              /* the caller's */
    dtrain_comm *gathers, *reduces; /* of the ranks of one copy; NULL: one rank */
    dtrain_comm *copies;            /* of the ranks with the same slices; NULL: one rank */
    dtrain_comm *world;             /* of all; NULL: one rank */
    int shares_comm;                /* these are the caller's own */
    dtrain_allocator memory;
    dtrain_fsdp_desc desc;
    dtrain_optimizer_desc optimizer;
    dtrain__layout layout;
    dtrain__pages weight_pages, grad_pages;
    dtrain__fsdp_unit *units;
    unsigned char *reserved;             /* of a parameter: 1: its data, 2: its gradient lies in pages */
    float *lr_factors, *decays;          /* of a parameter */
    size_t *counts;                      /* of a cut: every rank's part */
    size_t *packed_counts;               /* of a unit: every rank's part of its small ranges, then of those trained */
    float *stages;                       /* where small ranges are packed */
    int staged[2];                       /* the units whose parameters are there; -1: none */
    dtrain_work **gathering, **reducing; /* of a cut */
    dtrain_work **copying;               /* of a unit */
    dtrain_slice *slices;                /* of a cut */
    float *masters, *state;
    float *levels[DTRAIN__FSDP_LEVELS];      /* sums of 2^l micro-batches, this rank's parts */
    float *full_levels[DTRAIN__FSDP_LEVELS]; /* in full, where they are kept */
    float *grads;                            /* after finish; NULL: not finished */
    uint64_t clock, step;
    int last;                                /* the unit gathered last; -1: none in this step */
    int keeps;                               /* nothing is dropped until the step */
    int prefetched;                          /* a prefetch has been called and not been taken */
    int trained_units, reduced_units, ended; /* units with gradients; of them reduced; micro-batches that are over */
    int just_ended;                          /* no unit has been reduced since the last one was over */
    int turn;                                /* the unit whose reduction is next */
    int scattering;                          /* the unit whose full gradients are being reduced; -1: none */
    int bucket;                              /* the highest unit that waits to be added over the copies; -1: none */
    int round;                               /* reductions of every unit that have begun and ended */
    int joined;                              /* of those that are over, without data of this rank */
    int announced;                           /* micro-batches; -1: begin was not called */
    int begins;                              /* begin was called once */
    int most;                                /* that one of the ranks has announced */
    double announcement[2], *announcements, total_weight;
    dtrain_work *announcing;
    dtrain__fsdp_note note, *notes;
    dtrain__exact sum; /* of squares, where summed says so */
    int summed;
    float loss_scale;
    int good_steps;
    dtrain_fsdp_stats stats;
    dtrain__fsdp_event *events;
    size_t event_count;
    int64_t left_ns; /* when the caller was given control back */
    dtrain__error broken, error;
};

static int dtrain__fsdp_rank(const dtrain_fsdp *fsdp)
{
    return dtrain_comm_rank(fsdp->comm);
}

static void dtrain__fsdp_record(dtrain_fsdp *fsdp, int lane, int unit, int64_t begin_ns, int64_t end_ns)
{
    if (fsdp->desc.trace_events == 0 || end_ns <= begin_ns)
        return;
    dtrain__fsdp_event *event = &fsdp->events[fsdp->event_count++ % fsdp->desc.trace_events];
    event->lane = lane;
    event->unit = unit;
    event->begin_ns = begin_ns;
    event->end_ns = end_ns;
}

/* Tells the ranks that may wait for this one in a group whose members are all there: where a rank is lost, only those
 * of its own groups learn it from the system. What is this rank's own trouble is no status of theirs. */
static void dtrain__fsdp_tell(dtrain_fsdp *fsdp)
{
    dtrain_comm *groups[] = {fsdp->gathers, fsdp->reduces, fsdp->copies, fsdp->world};
    dtrain_status status = fsdp->broken.status;
    dtrain__error cause, kept = dtrain__thread_error;
    if (status == DTRAIN_ERR_MEMORY || status == DTRAIN_ERR_IO || status == DTRAIN_ERR_INVALID)
        status = DTRAIN_ERR_ABORTED;
    dtrain__fail(&cause, status, "rank %d has broken off: %.560s", dtrain__fsdp_rank(fsdp), fsdp->broken.text);
    for (size_t i = 0; i < sizeof groups / sizeof groups[0] && !fsdp->shares_comm; i++)
        if (groups[i] != NULL)
            dtrain__comm_break(groups[i], &cause);
    dtrain__thread_error = kept;
}

/* The first failure is kept: buffers may still be in use, so nothing goes on. */
static dtrain_status dtrain__fsdp_break(dtrain_fsdp *fsdp, dtrain_status status, const char *what, int unit)
{
    if (fsdp->broken.status == DTRAIN_OK) {
        dtrain__error cause = dtrain__thread_error;
        dtrain__fail(&fsdp->broken, status, "fsdp on rank %d, %s of unit %d: %.560s", dtrain__fsdp_rank(fsdp), what,
                     unit, cause.text);
        dtrain__fsdp_tell(fsdp);
    }
    fsdp->error = fsdp->broken;
    return dtrain__report(&fsdp->broken);
}

/* Begins a public call: says whether the object can be used, and ends the caller's computation in the trace. */
static dtrain_status dtrain__fsdp_enter(dtrain_fsdp *fsdp, const char *call, int unit)
{
    if (fsdp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the object is NULL: create it first", call);
    if (fsdp->broken.status != DTRAIN_OK)
        return dtrain__report(&fsdp->broken);
    if (unit < 0 || unit >= fsdp->layout.unit_count)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID, "%s: there is no unit %d: the table has units 0 to %d",
                            call, unit, fsdp->layout.unit_count - 1);
    if (fsdp->left_ns != 0)
        dtrain__fsdp_record(fsdp, DTRAIN__LANE_COMPUTE, fsdp->last, fsdp->left_ns, dtrain__os_now_ns());
    return DTRAIN_OK;
}

/* Ends a public call. */
static dtrain_status dtrain__fsdp_leave(dtrain_fsdp *fsdp, dtrain_status status)
{
    if (fsdp->desc.trace_events > 0)
        fsdp->left_ns = dtrain__os_now_ns();
    return status;
}

/* Waits for one operation and counts the time of both sides. */
static dtrain_status dtrain__fsdp_wait(dtrain_fsdp *fsdp, dtrain_work **work, int lane, int unit)
{
    dtrain_work *waited = *work;
    if (waited == NULL)
        return DTRAIN_OK;
    dtrain_comm *comm = waited->comm;
    int64_t begin = dtrain__os_now_ns(), end;
    *work = NULL;
    dtrain_status status = dtrain_work_wait(waited);
    end = dtrain__os_now_ns();
    fsdp->stats.waited_ns += end - begin;
    dtrain__fsdp_record(fsdp, DTRAIN__LANE_WAIT, unit, begin, end);
    if (comm->waited_ns[0] > 0 && comm->waited_ns[1] > comm->waited_ns[0]) {
        fsdp->stats.communicated_ns += comm->waited_ns[1] - comm->waited_ns[0];
        dtrain__fsdp_record(fsdp, lane, unit, comm->waited_ns[0], comm->waited_ns[1]);
    }
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, lane == DTRAIN__LANE_GATHER ? "gathering" : "reducing", unit);
    return DTRAIN_OK;
}

/* Waits for all operations of a unit, also after one has failed: their buffers must be free. */
static dtrain_status dtrain__fsdp_wait_all(dtrain_fsdp *fsdp, dtrain_work **works, int lane, int unit)
{
    dtrain_status first = DTRAIN_OK, status;
    for (size_t i = fsdp->layout.units[unit].first; i < fsdp->layout.units[unit].end; i++) {
        status = dtrain__fsdp_wait(fsdp, &works[i], lane, unit);
        first = first == DTRAIN_OK ? status : first;
    }
    return first;
}

static int dtrain__fsdp_all_done(const dtrain_fsdp *fsdp, dtrain_work *const *works, int unit)
{
    for (size_t i = fsdp->layout.units[unit].first; i < fsdp->layout.units[unit].end; i++)
        if (!dtrain_work_done(works[i]))
            return 0;
    return 1;
}

/* The addresses of a range in full. */
static float *dtrain__fsdp_full(const dtrain_fsdp *fsdp, const dtrain__cut *cut)
{
    return (float *)fsdp->layout.table[cut->param].data + cut->element;
}

static float *dtrain__fsdp_full_grad(const dtrain_fsdp *fsdp, const dtrain__cut *cut)
{
    return (float *)fsdp->layout.table[cut->param].grad + cut->element;
}

/* This rank's part of a range. */
static float *dtrain__fsdp_own(const dtrain_fsdp *fsdp, const dtrain__cut *cut)
{
    return fsdp->layout.apart && !cut->home ? fsdp->masters + cut->weight : dtrain__fsdp_full(fsdp, cut) + cut->own;
}

/* Narrows count floats to 16 bits, from the first on, so that `to` may be where they are. */
static void dtrain__fsdp_narrow(const float *from, unsigned char *to, size_t count, dtrain_dtype dtype)
{
    uint16_t chunk[DTRAIN__FSDP_CHUNK];
    for (size_t i = 0; i < count; i += DTRAIN__FSDP_CHUNK) {
        size_t n = count - i < DTRAIN__FSDP_CHUNK ? count - i : DTRAIN__FSDP_CHUNK;
        dtrain_convert(from + i, DTRAIN_F32, chunk, dtype, n);
        memcpy(to + 2 * i, chunk, 2 * n);
    }
}

/* Where count numbers of 16 bits wait to be widened: the upper half of the memory of as many floats. */
static unsigned char *dtrain__fsdp_half(float *floats, size_t count)
{
    return (unsigned char *)floats + 2 * count;
}

/* Widens what waits in the upper half of `floats`. */
static void dtrain__fsdp_widen(float *floats, size_t count, dtrain_dtype dtype)
{
    const unsigned char *from = dtrain__fsdp_half(floats, count);
    uint16_t chunk[DTRAIN__FSDP_CHUNK];
    for (size_t i = 0; i < count; i += DTRAIN__FSDP_CHUNK) {
        size_t n = count - i < DTRAIN__FSDP_CHUNK ? count - i : DTRAIN__FSDP_CHUNK;
        memcpy(chunk, from + 2 * i, 2 * n);
        dtrain_convert(chunk, dtype, floats + i, DTRAIN_F32, n);
    }
}

static unsigned char *dtrain__fsdp_stage(const dtrain_fsdp *fsdp, int number)
{
    return (unsigned char *)(fsdp->stages + (size_t)number * fsdp->layout.stage);
}

/* Every rank's part of a unit's small ranges, or of their gradients; *begin: where this rank's begins among them. */
static const size_t *dtrain__fsdp_packed(const dtrain_fsdp *fsdp, int number, int grads, size_t *begin)
{
    const size_t *counts = fsdp->packed_counts + (2 * (size_t)number + (size_t)grads) * (size_t)fsdp->layout.shards;
    *begin = 0;
    for (int shard = 0; shard < fsdp->layout.shard; shard++)
        *begin += counts[shard];
    return counts;
}

/* Takes or drops the reserved pages of a unit's parameters. */
static void dtrain__fsdp_page_weights(dtrain_fsdp *fsdp, int number, int take)
{
    const dtrain__layout *layout = &fsdp->layout;
    if (fsdp->units[number].has_pages == take)
        return;
    fsdp->units[number].has_pages = take;
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        size_t begin = layout->offsets[cut->param] + cut->element * sizeof(float);
        if (!(fsdp->reserved[cut->param] & 1))
            continue;
        if (take)
            dtrain__pages_take(&fsdp->weight_pages, begin, cut->count * sizeof(float));
        else
            dtrain__pages_drop(&fsdp->weight_pages, begin, cut->count * sizeof(float));
    }
}

/* Takes the reserved pages of a unit's gradients; or sets its gradients to zero, and drops them. */
static void dtrain__fsdp_page_grads(dtrain_fsdp *fsdp, int number, int take)
{
    const dtrain__layout *layout = &fsdp->layout;
    if (fsdp->units[number].has_grads == take)
        return;
    fsdp->units[number].has_grads = take;
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        size_t begin = layout->offsets[cut->param] + cut->element * sizeof(float);
        if (!cut->trained || cut->count == 0)
            continue;
        if (!(fsdp->reserved[cut->param] & 2)) {
            if (!take)
                memset(dtrain__fsdp_full_grad(fsdp, cut), 0, cut->count * sizeof(float));
        } else if (take) {
            dtrain__pages_take(&fsdp->grad_pages, begin, cut->count * sizeof(float));
        } else {
            dtrain__pages_drop(&fsdp->grad_pages, begin, cut->count * sizeof(float));
        }
    }
}

#endif

/* ---- >>fsdp-gather ----
 * Units in full: gathered, kept while there is room, dropped. What is started when depends on the caller's gathers and
 * releases alone, so that all ranks start the same operations in the same order. */
#ifndef DTRAIN__FSDP_GATHER
#define DTRAIN__FSDP_GATHER

static dtrain_status dtrain__fsdp_advance(dtrain_fsdp *fsdp, int unit);
static dtrain_status dtrain__fsdp_left_out(dtrain_fsdp *fsdp, int unit);

/* Starts to gather one range. */
static dtrain_status dtrain__fsdp_gather_cut(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = fsdp->counts + index * (size_t)fsdp->layout.shards;
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    float *full = dtrain__fsdp_full(fsdp, cut);
    unsigned char *half = dtrain__fsdp_half(full, cut->count);
    if (cut->count == 0)
        return DTRAIN_OK;
    if (dtype == DTRAIN_F32)
        return dtrain_all_gather_v_async(fsdp->gathers, dtrain__fsdp_own(fsdp, cut), full, counts, NULL, DTRAIN_F32,
                                         &fsdp->gathering[index]);
    dtrain__fsdp_narrow(fsdp->masters + cut->weight, half + 2 * cut->own, cut->own_count, dtype);
    if (fsdp->gathers == NULL)
        return DTRAIN_OK;
    return dtrain_all_gather_v_async(fsdp->gathers, half + 2 * cut->own, half, counts, NULL, dtype,
                                     &fsdp->gathering[index]);
}

static dtrain_status dtrain__fsdp_gather_finish(dtrain_fsdp *fsdp, int number);

/* Starts to gather the small ranges of a unit as one. Their stage may be that of another unit, which is ended first. */
static dtrain_status dtrain__fsdp_gather_packed(dtrain_fsdp *fsdp, int number)
{
    const dtrain__cut_unit *unit = &fsdp->layout.units[number];
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    size_t width = dtype == DTRAIN_F32 ? 4 : 2, begin, first = unit->end;
    const size_t *counts = dtrain__fsdp_packed(fsdp, number, 0, &begin);
    unsigned char *stage = dtrain__fsdp_stage(fsdp, number % 2);
    int other = fsdp->staged[number % 2];
    dtrain_status status = DTRAIN_OK;
    if (unit->packed == 0)
        return DTRAIN_OK;
    if (other >= 0 && other != number && fsdp->units[other].state == DTRAIN__COMING)
        status = dtrain__fsdp_gather_finish(fsdp, other);
    fsdp->staged[number % 2] = number;
    for (size_t i = unit->end; i-- > unit->first && status == DTRAIN_OK;) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        first = cut->packed ? i : first;
        if (cut->packed && cut->own_count > 0)
            dtrain_convert(dtrain__fsdp_own(fsdp, cut), DTRAIN_F32, stage + (cut->stage + cut->own) * width, dtype,
                           cut->own_count);
    }
    if (status != DTRAIN_OK)
        return status;
    return dtrain_all_gather_v_async(fsdp->gathers, stage + begin * width, stage, counts, NULL, dtype,
                                     &fsdp->gathering[first]);
}

static dtrain_status dtrain__fsdp_gather_start(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->units[number];
    size_t first = fsdp->layout.units[number].first, end = fsdp->layout.units[number].end;
    dtrain__fsdp_page_weights(fsdp, number, 1);
    unit->state = DTRAIN__COMING;
    dtrain_status status = dtrain__fsdp_gather_packed(fsdp, number);
    for (size_t i = first; status == DTRAIN_OK && i < end; i++)
        if (!fsdp->layout.cuts[i].packed)
            status = dtrain__fsdp_gather_cut(fsdp, i);
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, "starting to gather", number);
}

static dtrain_status dtrain__fsdp_gather_finish(dtrain_fsdp *fsdp, int number)
{
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    dtrain_status status = dtrain__fsdp_wait_all(fsdp, fsdp->gathering, DTRAIN__LANE_GATHER, number);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = fsdp->layout.units[number].first; i < fsdp->layout.units[number].end; i++) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        const unsigned char *stage = dtrain__fsdp_stage(fsdp, number % 2);
        if (cut->packed)
            dtrain_convert(stage + cut->stage * (dtype == DTRAIN_F32 ? 4 : 2), dtype, dtrain__fsdp_full(fsdp, cut),
                           DTRAIN_F32, cut->count);
        else if (dtype != DTRAIN_F32)
            dtrain__fsdp_widen(dtrain__fsdp_full(fsdp, cut), cut->count, dtype);
    }
    fsdp->units[number].state = DTRAIN__READY;
    fsdp->units[number].stale = 0;
    return DTRAIN_OK;
}

/* Forgets what was gathered of a unit. */
static dtrain_status dtrain__fsdp_gather_drop(dtrain_fsdp *fsdp, int number)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->units[number].state == DTRAIN__COMING)
        status = dtrain__fsdp_gather_finish(fsdp, number);
    if (status == DTRAIN_OK) {
        fsdp->units[number].state = DTRAIN__ABSENT;
        fsdp->units[number].stale = 0;
        dtrain__fsdp_page_weights(fsdp, number, 0);
    }
    return status;
}

/* Drops what was used longest ago until `number` has room among the units that rotate. *room: it has. */
static dtrain_status dtrain__fsdp_make_room(dtrain_fsdp *fsdp, int number, int *room)
{
    *room = 1;
    if (fsdp->keeps || fsdp->desc.no_reshard_after_forward || fsdp->layout.units[number].tied)
        return DTRAIN_OK;
    for (;;) {
        int rotating = 0, oldest = -1;
        for (int i = 0; i < fsdp->layout.unit_count; i++) {
            const dtrain__fsdp_unit *unit = &fsdp->units[i];
            if (i == number || unit->state == DTRAIN__ABSENT || fsdp->layout.units[i].tied)
                continue;
            rotating++;
            if (!unit->held && i != fsdp->last && (oldest < 0 || unit->used < fsdp->units[oldest].used))
                oldest = i;
        }
        *room = rotating < DTRAIN__FSDP_ROTATING;
        if (*room || oldest < 0)
            return DTRAIN_OK;
        dtrain_status status = dtrain__fsdp_gather_drop(fsdp, oldest);
        if (status != DTRAIN_OK)
            return status;
    }
}

/* Starts the unit that comes next, where there is room for it. */
static dtrain_status dtrain__fsdp_gather_ahead(dtrain_fsdp *fsdp, int number)
{
    int room;
    if (number < 0 || number >= fsdp->layout.unit_count || fsdp->units[number].state != DTRAIN__ABSENT)
        return DTRAIN_OK;
    dtrain_status status = dtrain__fsdp_make_room(fsdp, number, &room);
    if (status != DTRAIN_OK || !room)
        return status;
    fsdp->units[number].used = ++fsdp->clock;
    return dtrain__fsdp_gather_start(fsdp, number);
}

/* The direction in which a pass goes, by the unit before this one. The same again is the turn at the top, unless it was
 * on its way down already; the first one after one that was on its way up begins another pass. */
static int dtrain__fsdp_direction(const dtrain_fsdp *fsdp, int unit)
{
    int last = fsdp->last;
    if (last < 0 || unit > last)
        return 1;
    int rising = fsdp->units[last].fresh && !fsdp->units[last].backward;
    return unit == last ? (rising ? -1 : 1) : (unit == 0 && rising ? 1 : -1);
}

/* Notes that a unit is used, and where the pass is: on its way down gradients are computed. Returns the direction; 0: a
 * tied unit is used beside the one that is held, which is no turn of the pass. */
static int dtrain__fsdp_use(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->units[number];
    int beside =
        fsdp->layout.units[number].tied && fsdp->last >= 0 && fsdp->last != number && fsdp->units[fsdp->last].held;
    int direction = beside ? 0 : dtrain__fsdp_direction(fsdp, number);
    unit->held = unit->fresh = 1;
    unit->used = ++fsdp->clock;
    fsdp->last = beside ? fsdp->last : number;
    fsdp->prefetched = 0;
    if (direction != 0)
        unit->backward = direction < 0;
    /* tied parameters have a gradient from the head on, which comes before the pass turns back to their own layer */
    if (direction < 0 || fsdp->layout.units[number].tied)
        dtrain__fsdp_page_grads(fsdp, number, 1);
    return direction;
}

static dtrain_status dtrain__fsdp_gather_now(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->units[number];
    int room;
    dtrain_status status = dtrain__fsdp_advance(fsdp, number);
    /* where steps are opened, a pass outside of them computes no gradients, whichever way it goes */
    if (status == DTRAIN_OK && (fsdp->reduced_units > 0 || !fsdp->begins || fsdp->announced > fsdp->ended))
        status = dtrain__fsdp_left_out(fsdp, number);
    int direction = dtrain__fsdp_use(fsdp, number);
    if (status != DTRAIN_OK || fsdp->layout.resident)
        return status;
    if (unit->stale)
        status = dtrain__fsdp_gather_drop(fsdp, number);
    if (status == DTRAIN_OK && unit->state == DTRAIN__ABSENT)
        status = dtrain__fsdp_make_room(fsdp, number, &room);
    if (status == DTRAIN_OK && unit->state == DTRAIN__ABSENT)
        status = dtrain__fsdp_gather_start(fsdp, number);
    if (status == DTRAIN_OK && !fsdp->desc.no_prefetch && direction != 0)
        status = dtrain__fsdp_gather_ahead(fsdp, number + direction);
    if (status == DTRAIN_OK && unit->state == DTRAIN__COMING)
        status = dtrain__fsdp_gather_finish(fsdp, number);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_gather(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_gather", unit);
    return status == DTRAIN_OK ? dtrain__fsdp_leave(fsdp, dtrain__fsdp_gather_now(fsdp, unit)) : status;
}

static dtrain_status dtrain__fsdp_release_now(dtrain_fsdp *fsdp, int unit)
{
    fsdp->units[unit].held = 0;
    return fsdp->units[unit].stale ? dtrain__fsdp_gather_drop(fsdp, unit) : DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_release(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_release", unit);
    if (status != DTRAIN_OK)
        return status;
    if (!fsdp->units[unit].held)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_release: unit %d is not gathered on rank %d: gather it before each release",
                            unit, dtrain__fsdp_rank(fsdp));
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_release_now(fsdp, unit));
}

DTRAIN_API dtrain_status dtrain_fsdp_prefetch(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_prefetch", 0);
    if (status != DTRAIN_OK)
        return status;
    dtrain_strategy strategy = dtrain__layout_strategy(&fsdp->desc);
    if (strategy == DTRAIN_SHARD_GRAD_OP || strategy == DTRAIN_NO_SHARD)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_prefetch: this strategy keeps full parameters on rank %d and gathers nothing: "
                            "leave the call out",
                            dtrain__fsdp_rank(fsdp));
    if (fsdp->prefetched)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_prefetch: called twice on rank %d without a forward pass in between: call it "
                            "once before each",
                            dtrain__fsdp_rank(fsdp));
    fsdp->prefetched = 1;
    return dtrain__fsdp_leave(fsdp, fsdp->layout.resident ? DTRAIN_OK : dtrain__fsdp_gather_ahead(fsdp, 0));
}

DTRAIN_API int dtrain_fsdp_prefetch_pending(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL && fsdp->prefetched;
}

#endif

/* ---- >>fsdp-reduce ----
 * Gradients, from a unit's in full to this rank's part of the sum. All ranks start units from the last to the first,
 * in every micro-batch, whatever the order of the caller's; one that a rank leaves out adds -0, the one number that
 * changes no other. A unit's full gradients are free when they have been scattered; between copies only parts travel.
 *
 * Micro-batches are folded by a binary counter: reduction k goes to the level of k's trailing ones, which is free, and
 * takes in the lower levels, lowest first; the end collapses what there is. That is the balanced tree whose left part
 * is the largest power of two. */
#ifndef DTRAIN__FSDP_REDUCE
#define DTRAIN__FSDP_REDUCE

static int dtrain__trailing_ones(unsigned number)
{
    int ones = 0;
    while (number >> ones & 1)
        ones++;
    return ones;
}

static int dtrain__fsdp_narrows_grads(const dtrain_fsdp *fsdp)
{
    return fsdp->desc.reduce_dtype != DTRAIN_F32;
}

/* Where a unit's part of the reduction goes that is under way. */
static float *dtrain__fsdp_target(const dtrain_fsdp *fsdp, int number)
{
    return fsdp->levels[fsdp->units[number].level] + fsdp->layout.units[number].grad;
}

static dtrain_status dtrain__fsdp_level(dtrain_fsdp *fsdp, float **level, size_t count)
{
    if (*level == NULL)
        *level = (float *)dtrain__alloc(&fsdp->memory, count * sizeof(float));
    if (*level != NULL)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes of gradient sums: use fewer micro-batches",
                        count * sizeof(float));
}

/* The sum of a unit is there: folds it with those of earlier micro-batches. */
static void dtrain__fsdp_fold(dtrain_fsdp *fsdp, int number)
{
    const dtrain__cut_unit *cuts = &fsdp->layout.units[number];
    float *sum = dtrain__fsdp_target(fsdp, number);
    uint64_t mode = dtrain__fpmode_enter();
    if (dtrain__fsdp_narrows_grads(fsdp))
        dtrain__fsdp_widen(sum, cuts->grad_count, fsdp->desc.reduce_dtype);
    for (int level = 0; level < fsdp->units[number].level; level++)
        dtrain__train_kernels_get()->add(sum, fsdp->levels[level] + cuts->grad, sum, cuts->grad_count);
    dtrain__fpmode_restore(mode);
    fsdp->units[number].stage = DTRAIN__IDLE;
}

/* Where a range's part of its unit's sum is received, of which `sum` has room for all. */
static unsigned char *dtrain__fsdp_receives(const dtrain_fsdp *fsdp, const dtrain__cut *cut, float *sum)
{
    const dtrain__cut_unit *unit = &fsdp->layout.units[cut->unit];
    size_t at = cut->grad - unit->grad;
    return dtrain__fsdp_narrows_grads(fsdp) ? dtrain__fsdp_half(sum, unit->grad_count) + 2 * at
                                            : (unsigned char *)(sum + at);
}

/* Starts to reduce the small ranges of a unit as one. */
static dtrain_status dtrain__fsdp_reduce_packed(dtrain_fsdp *fsdp, int number)
{
    const dtrain__cut_unit *unit = &fsdp->layout.units[number];
    dtrain_dtype dtype = fsdp->desc.reduce_dtype;
    size_t width = dtrain__fsdp_narrows_grads(fsdp) ? 2 : 4, begin, first = unit->end;
    const size_t *counts = dtrain__fsdp_packed(fsdp, number, 1, &begin);
    unsigned char *stage = dtrain__fsdp_stage(fsdp, DTRAIN__FSDP_STAGES - 1);
    if (unit->packed_grads == 0)
        return DTRAIN_OK;
    for (size_t i = unit->end; i-- > unit->first;) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        if (!cut->packed || !cut->trained)
            continue;
        first = i;
        dtrain_convert(dtrain__fsdp_full_grad(fsdp, cut), DTRAIN_F32, stage + cut->grad_stage * width, dtype,
                       cut->count);
    }
    return dtrain_reduce_scatter_v_async(fsdp->reduces, stage, stage + begin * width, counts, NULL, dtype, DTRAIN_SUM,
                                         &fsdp->reducing[first]);
}

/* Puts this rank's part of the small ranges' sums where those of the others are. */
static void dtrain__fsdp_unpack_grads(dtrain_fsdp *fsdp, int number)
{
    size_t width = dtrain__fsdp_narrows_grads(fsdp) ? 2 : 4;
    const unsigned char *stage = dtrain__fsdp_stage(fsdp, DTRAIN__FSDP_STAGES - 1);
    for (size_t i = fsdp->layout.units[number].first; i < fsdp->layout.units[number].end; i++) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        if (cut->packed && cut->trained && cut->own_count > 0)
            memcpy(dtrain__fsdp_receives(fsdp, cut, dtrain__fsdp_target(fsdp, number)),
                   stage + (cut->grad_stage + cut->own) * width, cut->own_count * width);
    }
}

/* Starts to add the bucket's parts, which lie side by side, over the copies. */
static dtrain_status dtrain__fsdp_send_bucket(dtrain_fsdp *fsdp, int lowest)
{
    const dtrain__cut_unit *units = fsdp->layout.units;
    size_t count = units[fsdp->bucket].grad + units[fsdp->bucket].grad_count - units[lowest].grad;
    float *sum = dtrain__fsdp_target(fsdp, lowest);
    void *data = dtrain__fsdp_narrows_grads(fsdp) ? (void *)dtrain__fsdp_half(sum, count) : (void *)sum;
    for (int i = lowest; i <= fsdp->bucket; i++)
        fsdp->units[i].carrier = lowest;
    fsdp->bucket = -1;
    dtrain_status status = dtrain_all_reduce_async(fsdp->copies, data, data, count, fsdp->desc.reduce_dtype, DTRAIN_SUM,
                                                   &fsdp->copying[lowest]);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    fsdp->copying[lowest] = NULL;
    return dtrain__fsdp_break(fsdp, status, "starting to reduce", lowest);
}

/* Adds a unit to the bucket, which goes when it is large enough or nothing comes after. Numbers of 16 bits wait each
 * unit's in a place of its own, and go alone. */
static dtrain_status dtrain__fsdp_join_bucket(dtrain_fsdp *fsdp, int number)
{
    const dtrain__cut_unit *units = fsdp->layout.units;
    int last = number;
    while (last > 0 && units[last - 1].trained == 0)
        last--;
    fsdp->bucket = fsdp->bucket < 0 ? number : fsdp->bucket;
    size_t count = units[fsdp->bucket].grad + units[fsdp->bucket].grad_count - units[number].grad;
    if (last > 0 && !dtrain__fsdp_narrows_grads(fsdp) && count * sizeof(float) < fsdp->desc.bucket_bytes)
        return DTRAIN_OK;
    return dtrain__fsdp_send_bucket(fsdp, number);
}

/* Between micro-batches a gradient may be added to before its unit is gathered for it. */
static void dtrain__fsdp_between(dtrain_fsdp *fsdp)
{
    if (fsdp->reduced_units == 0)
        dtrain__pages_put_away(&fsdp->grad_pages);
}

/* Full gradients have been scattered: they are free, and parts go on to the other copies. */
static dtrain_status dtrain__fsdp_scattered(dtrain_fsdp *fsdp, int number)
{
    dtrain_status status = dtrain__fsdp_wait_all(fsdp, fsdp->reducing, DTRAIN__LANE_REDUCE, number);
    fsdp->scattering = -1;
    if (status != DTRAIN_OK)
        return status;
    dtrain__fsdp_unpack_grads(fsdp, number);
    dtrain__fsdp_page_grads(fsdp, number, 0);
    dtrain__fsdp_between(fsdp);
    if (fsdp->copies == NULL) {
        dtrain__fsdp_fold(fsdp, number);
        return DTRAIN_OK;
    }
    fsdp->units[number].stage = DTRAIN__COPIES;
    return dtrain__fsdp_join_bucket(fsdp, number);
}

/* Ends what is under way of a unit's reduction. */
static dtrain_status dtrain__fsdp_settle(dtrain_fsdp *fsdp, int number)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->units[number].stage == DTRAIN__SCATTERS)
        status = dtrain__fsdp_scattered(fsdp, number);
    /* in the next micro-batch: the last unit of this one takes the bucket along */
    if (status == DTRAIN_OK && fsdp->bucket >= number && fsdp->scattering >= 0)
        status = dtrain__fsdp_scattered(fsdp, fsdp->scattering);
    if (status == DTRAIN_OK && fsdp->units[number].stage == DTRAIN__COPIES) {
        status = dtrain__fsdp_wait(fsdp, &fsdp->copying[fsdp->units[number].carrier], DTRAIN__LANE_REDUCE, number);
        if (status == DTRAIN_OK)
            dtrain__fsdp_fold(fsdp, number);
    }
    return status;
}

/* Goes on with reductions whose operations have ended, and ends scattering `unit`, which is needed again. */
static dtrain_status dtrain__fsdp_advance(dtrain_fsdp *fsdp, int unit)
{
    int now = fsdp->scattering;
    if (now >= 0 && (now == unit || dtrain__fsdp_all_done(fsdp, fsdp->reducing, now)))
        return dtrain__fsdp_scattered(fsdp, now);
    return DTRAIN_OK;
}

/* Starts to reduce one range; `sum` is where this rank's part of its unit goes. */
static dtrain_status dtrain__fsdp_reduce_cut(dtrain_fsdp *fsdp, size_t index, float *sum)
{
    const dtrain__cut *cut = &fsdp->layout.cuts[index];
    dtrain_dtype dtype = fsdp->desc.reduce_dtype;
    float *full = dtrain__fsdp_full_grad(fsdp, cut);
    unsigned char *out = dtrain__fsdp_receives(fsdp, cut, sum);
    if (fsdp->reduces == NULL && dtrain__fsdp_narrows_grads(fsdp))
        dtrain__fsdp_narrow(full, out, cut->count, dtype);
    else if (fsdp->reduces == NULL)
        memcpy(out, full, cut->count * sizeof(float));
    if (fsdp->reduces == NULL)
        return DTRAIN_OK;
    if (dtrain__fsdp_narrows_grads(fsdp))
        dtrain__fsdp_narrow(full, (unsigned char *)full, cut->count, dtype);
    return dtrain_reduce_scatter_v_async(fsdp->reduces, full, out, fsdp->counts + index * (size_t)fsdp->layout.shards,
                                         NULL, dtype, DTRAIN_SUM, &fsdp->reducing[index]);
}

static dtrain_status dtrain__fsdp_reduce_start(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->units[number];
    dtrain_status status = fsdp->scattering >= 0 ? dtrain__fsdp_scattered(fsdp, fsdp->scattering) : DTRAIN_OK;
    if (status != DTRAIN_OK)
        return status;
    unit->level = dtrain__trailing_ones((unsigned)fsdp->round);
    unit->stage = DTRAIN__SCATTERS;
    fsdp->scattering = number;
    status = dtrain__fsdp_level(fsdp, &fsdp->levels[unit->level], fsdp->layout.grads);
    float *sum = status == DTRAIN_OK ? dtrain__fsdp_target(fsdp, number) : NULL;
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_reduce_packed(fsdp, number);
    for (size_t i = fsdp->layout.units[number].first; i < fsdp->layout.units[number].end; i++) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        if (status == DTRAIN_OK && cut->trained && cut->count > 0 && !cut->packed)
            status = dtrain__fsdp_reduce_cut(fsdp, i, sum);
    }
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "starting to reduce", number);
    return fsdp->reduces == NULL ? dtrain__fsdp_scattered(fsdp, number) : DTRAIN_OK;
}

/* Starts every unit whose turn it is. */
static dtrain_status dtrain__fsdp_reduce_turns(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->desc.no_overlap && fsdp->reduced_units < fsdp->trained_units)
        return DTRAIN_OK;
    for (; status == DTRAIN_OK && fsdp->turn >= 0; fsdp->turn--) {
        if (fsdp->layout.units[fsdp->turn].trained == 0)
            continue;
        if (fsdp->units[fsdp->turn].stage != DTRAIN__WAITS)
            return DTRAIN_OK;
        status = dtrain__fsdp_reduce_start(fsdp, fsdp->turn);
    }
    return status;
}

static void dtrain__fsdp_fill_nothing(float *to, size_t count)
{
    const uint32_t negative_zero = 0x80000000u; /* by its bits: -Ofast knows no sign of zero */
    for (size_t i = 0; i < count; i++)
        memcpy(to + i, &negative_zero, sizeof negative_zero);
}

/* Folds one range's gradients with those of this rank's earlier micro-batches; the last leaves the sum in place. */
static void dtrain__fsdp_keep_cut(dtrain_fsdp *fsdp, const dtrain__cut *cut, int last)
{
    const dtrain__train_kernels *kernels = dtrain__train_kernels_get();
    int ones = dtrain__trailing_ones((unsigned)fsdp->ended);
    unsigned taken = last ? (unsigned)fsdp->ended : (1u << ones) - 1;
    float *grad = dtrain__fsdp_full_grad(fsdp, cut), *out = last ? grad : fsdp->full_levels[ones] + cut->full_grad;
    for (size_t i = 0; i < cut->count; i += DTRAIN__FSDP_CHUNK) {
        size_t n = cut->count - i < DTRAIN__FSDP_CHUNK ? cut->count - i : DTRAIN__FSDP_CHUNK;
        float sums[DTRAIN__FSDP_CHUNK];
        const float *sum = grad + i;
        for (int level = 0; taken >> level != 0; level++) {
            if (taken >> level & 1) {
                kernels->add(sums, fsdp->full_levels[level] + cut->full_grad + i, sum, n);
                sum = sums;
            }
        }
        if (sum != out + i)
            memcpy(out + i, sum, n * sizeof(float));
    }
}

/* Learns the weight of all ranks, and the most micro-batches of one, where they announced them. */
static dtrain_status dtrain__fsdp_announced(dtrain_fsdp *fsdp)
{
    int ranks = dtrain_comm_size(fsdp->comm);
    fsdp->total_weight = (double)ranks;
    fsdp->most = 1;
    if (fsdp->announced < 0)
        return DTRAIN_OK;
    const double *all = fsdp->world != NULL ? fsdp->announcements : fsdp->announcement;
    dtrain_status status = dtrain__fsdp_wait(fsdp, &fsdp->announcing, DTRAIN__LANE_REDUCE, 0);
    fsdp->total_weight = 0.0;
    for (int rank = 0; rank < ranks; rank++) {
        fsdp->most = all[2 * rank] > (double)fsdp->most ? (int)all[2 * rank] : fsdp->most;
        fsdp->total_weight += all[2 * rank + 1];
    }
    return status;
}

/* Micro-batches that are folded in full, this one included, before they are reduced. Where ranks gather together they
 * reduce together, in the pass that is the last for all: else some would wait in a reduction, others in a gather. */
static dtrain_status dtrain__fsdp_folded(dtrain_fsdp *fsdp, int *count)
{
    dtrain_status status = DTRAIN_OK;
    *count = 1;
    if (!fsdp->desc.keep_full_grads)
        return DTRAIN_OK;
    if (!fsdp->layout.resident)
        status = dtrain__fsdp_announced(fsdp);
    *count = fsdp->layout.resident ? fsdp->announced : fsdp->most;
    return status;
}

/* Takes a unit's gradients over, or -0 where this rank has none; whether they are reduced now is its caller's. */
static dtrain_status dtrain__fsdp_take(dtrain_fsdp *fsdp, int number, int unused)
{
    const dtrain__layout *layout = &fsdp->layout;
    int folded;
    dtrain_status status = dtrain__fsdp_folded(fsdp, &folded);
    int keeps = folded > 1, last = fsdp->ended >= folded - 1;
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_settle(fsdp, number);
    if (status == DTRAIN_OK && keeps && !last)
        status =
            dtrain__fsdp_level(fsdp, &fsdp->full_levels[dtrain__trailing_ones((unsigned)fsdp->ended)], layout->trained);
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "taking the gradients", number);
    dtrain__fsdp_page_grads(fsdp, number, 1);
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        if (cut->trained && unused)
            dtrain__fsdp_fill_nothing(dtrain__fsdp_full_grad(fsdp, cut), cut->count);
        if (cut->trained && keeps)
            dtrain__fsdp_keep_cut(fsdp, cut, last);
    }
    dtrain__fpmode_restore(mode);
    fsdp->units[number].reduced = 1;
    fsdp->units[number].backward = 0;
    fsdp->reduced_units++;
    if (keeps && !last)
        dtrain__fsdp_page_grads(fsdp, number, 0);
    else
        fsdp->units[number].stage = DTRAIN__WAITS;
    return dtrain__fsdp_reduce_turns(fsdp);
}

/* A unit that was gathered on the way down and let go again is not used once the pass is below it. Others wait for its
 * reduction, maybe with a gather that this rank needs, so that it cannot wait for the end of the micro-batch. */
static dtrain_status dtrain__fsdp_left_out(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = fsdp->layout.unit_count - 1; status == DTRAIN_OK && i > unit; i--)
        if (fsdp->units[i].backward && !fsdp->units[i].held && fsdp->layout.units[i].trained > 0)
            status = dtrain__fsdp_take(fsdp, i, 1);
    return status;
}

/* All units of a micro-batch have been taken over. */
static void dtrain__fsdp_micro_batch_over(dtrain_fsdp *fsdp)
{
    for (int i = 0; i < fsdp->layout.unit_count; i++)
        fsdp->units[i].reduced = 0;
    fsdp->reduced_units = 0;
    dtrain__fsdp_between(fsdp);
    fsdp->ended++;
    fsdp->just_ended = 1;
    if (fsdp->turn < 0) {
        fsdp->round++;
        fsdp->turn = fsdp->layout.unit_count - 1;
    }
}

/* Ends a micro-batch: units that were not reduced were not used. */
static dtrain_status dtrain__fsdp_end_micro_batch(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = fsdp->layout.unit_count - 1; status == DTRAIN_OK && i >= 0; i--)
        if (fsdp->layout.units[i].trained > 0 && !fsdp->units[i].reduced)
            status = dtrain__fsdp_take(fsdp, i, 1);
    if (status == DTRAIN_OK)
        dtrain__fsdp_micro_batch_over(fsdp);
    return status;
}

static dtrain_status dtrain__fsdp_check_open(dtrain_fsdp *fsdp, const char *call)
{
    if (fsdp->grads == NULL)
        return DTRAIN_OK;
    return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                        "%s: the gradients of the last step are finished but not used on rank %d: call "
                        "dtrain_fsdp_step, dtrain_fsdp_publish or dtrain_fsdp_drop first",
                        call, dtrain__fsdp_rank(fsdp));
}

/* Says whether this rank has a micro-batch left that it has announced; those that it joined do not count. */
static dtrain_status dtrain__fsdp_check_left(dtrain_fsdp *fsdp, const char *call)
{
    int computed = fsdp->ended - fsdp->joined;
    if (computed < (fsdp->announced >= 0 ? fsdp->announced : fsdp->desc.keep_full_grads ? 1 : INT_MAX))
        return DTRAIN_OK;
    return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                        "%s: all %d micro-batches of this step are over on rank %d: announce as many as you compute "
                        "when it begins",
                        call, computed, dtrain__fsdp_rank(fsdp));
}

/* Says whether a unit's gradients are still missing in this micro-batch, so that they may be computed. */
static dtrain_status dtrain__fsdp_check_missing(dtrain_fsdp *fsdp, int number, const char *call)
{
    dtrain_status status = dtrain__fsdp_check_open(fsdp, call);
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->units[number].reduced)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "%s: unit %d was reduced twice in micro-batch %d on rank %d, of whose %d units %d are "
                            "missing: when these are unused, end the micro-batch first",
                            call, number, fsdp->ended, dtrain__fsdp_rank(fsdp), fsdp->trained_units,
                            fsdp->trained_units - fsdp->reduced_units);
    return dtrain__fsdp_check_left(fsdp, call);
}

static dtrain_status dtrain__fsdp_check_reduce(dtrain_fsdp *fsdp, int number, const char *call)
{
    if (!fsdp->units[number].fresh)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "%s: unit %d has not been gathered on rank %d since it was reduced last: gather it, "
                            "compute, then reduce",
                            call, number, dtrain__fsdp_rank(fsdp));
    return dtrain__fsdp_check_missing(fsdp, number, call);
}

static dtrain_status dtrain__fsdp_reduce_now(dtrain_fsdp *fsdp, int unit, const char *call)
{
    if (fsdp->layout.units[unit].trained == 0)
        return dtrain__fsdp_release_now(fsdp, unit);
    dtrain_status status = dtrain__fsdp_check_reduce(fsdp, unit, call);
    if (status != DTRAIN_OK)
        return status;
    fsdp->units[unit].fresh = 0;
    fsdp->just_ended = 0;
    status = dtrain__fsdp_left_out(fsdp, unit);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_take(fsdp, unit, 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_release_now(fsdp, unit);
    if (status == DTRAIN_OK && fsdp->reduced_units == fsdp->trained_units)
        dtrain__fsdp_micro_batch_over(fsdp);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_reduce(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_reduce", unit);
    if (status != DTRAIN_OK)
        return status;
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_reduce_now(fsdp, unit, "dtrain_fsdp_reduce"));
}

DTRAIN_API dtrain_status dtrain_fsdp_next(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_next", 0);
    if (status != DTRAIN_OK)
        return status;
    if (!fsdp->just_ended) {
        status = dtrain__fsdp_check_open(fsdp, "dtrain_fsdp_next");
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_check_left(fsdp, "dtrain_fsdp_next");
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_end_micro_batch(fsdp);
    }
    fsdp->just_ended = 0;
    return dtrain__fsdp_leave(fsdp, status);
}

/* Where gradients are kept until the step, one reduction stands for all micro-batches: adds: this one counts. */
static dtrain_status dtrain__fsdp_join_now(dtrain_fsdp *fsdp, int adds)
{
    dtrain_status status = DTRAIN_OK;
    int units = fsdp->layout.unit_count;
    for (int i = 0; status == DTRAIN_OK && i < 2 * units; i++) {
        int unit = i < units ? i : 2 * units - 1 - i;
        status = dtrain__fsdp_gather_now(fsdp, unit);
        if (status == DTRAIN_OK && i >= units && adds && fsdp->layout.units[unit].trained > 0)
            status = dtrain__fsdp_take(fsdp, unit, 1);
        fsdp->units[unit].fresh = fsdp->units[unit].backward = 0;
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_release_now(fsdp, unit);
    }
    if (status == DTRAIN_OK && adds) {
        fsdp->joined++;
        dtrain__fsdp_micro_batch_over(fsdp);
    }
    if (status == DTRAIN_OK)
        fsdp->just_ended = 0;
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_join(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_join", 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_open(fsdp, "dtrain_fsdp_join");
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->reduced_units > 0)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_join: rank %d has reduced %d of %d units of this micro-batch: go on with it, "
                            "or end it with dtrain_fsdp_next",
                            dtrain__fsdp_rank(fsdp), fsdp->reduced_units, fsdp->trained_units);
    int folded;
    status = dtrain__fsdp_folded(fsdp, &folded);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_join_now(fsdp, !fsdp->desc.keep_full_grads || fsdp->ended < (folded > 1 ? folded : 1));
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API void dtrain_fsdp_fail(dtrain_fsdp *fsdp, const char *why)
{
    if (fsdp == NULL || fsdp->note.failed)
        return;
    fsdp->note.failed = 1;
    snprintf(fsdp->note.why, sizeof fsdp->note.why, "%s", why != NULL ? why : "");
}

#endif

/* ---- >>fsdp-step ----
 * From sums to new weights: what ranks announce and agree on, the division, the norm, the update of this rank's slices,
 * and making them count. */
#ifndef DTRAIN__FSDP_STEP
#define DTRAIN__FSDP_STEP

DTRAIN_API dtrain_status dtrain_fsdp_begin(dtrain_fsdp *fsdp, int micro_batches, double weight)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_begin", 0);
    if (status != DTRAIN_OK)
        return status;
    int rank = dtrain__fsdp_rank(fsdp), ranks = dtrain_comm_size(fsdp->comm);
    if (fsdp->announced >= 0 || fsdp->ended > 0 || fsdp->reduced_units > 0 || fsdp->grads != NULL)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_begin: a step is open on rank %d: end it with dtrain_fsdp_step, "
                            "dtrain_fsdp_publish or dtrain_fsdp_drop first",
                            rank);
    if (micro_batches < 0 || !dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_begin: micro_batches is %d and weight %g on rank %d: expected none below 0",
                            micro_batches, weight, rank);
    fsdp->begins = 1;
    fsdp->announced = micro_batches;
    fsdp->announcement[0] = (double)micro_batches;
    fsdp->announcement[1] = weight;
    if (fsdp->world == NULL)
        return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
    status = dtrain_all_gather_async(fsdp->world, fsdp->announcement, fsdp->announcements, 2 * (size_t)ranks,
                                     DTRAIN_F64, &fsdp->announcing);
    if (status != DTRAIN_OK) {
        fsdp->announcing = NULL;
        return dtrain__fsdp_break(fsdp, status, "announcing a step, instead", 0);
    }
    return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
}

/* Adds nothing to the reductions that others make and this rank does not. */
static dtrain_status dtrain__fsdp_catch_up(dtrain_fsdp *fsdp, int most)
{
    int any = most > 0;
    dtrain_status status = DTRAIN_OK;
    if (fsdp->reduced_units > 0)
        status = dtrain__fsdp_end_micro_batch(fsdp);
    if (fsdp->desc.keep_full_grads && most > 0 && status == DTRAIN_OK)
        status = dtrain__fsdp_folded(fsdp, &most);
    if (fsdp->desc.keep_full_grads && most < 1 && any)
        most = 1;
    while (status == DTRAIN_OK && fsdp->ended < most)
        status = dtrain__fsdp_end_micro_batch(fsdp);
    for (int i = 0; status == DTRAIN_OK && i < fsdp->layout.unit_count; i++)
        status = dtrain__fsdp_settle(fsdp, i);
    return status;
}

/* Forgets the step's gradients. */
static void dtrain__fsdp_reset(dtrain_fsdp *fsdp)
{
    for (int i = 0; i < fsdp->layout.unit_count; i++) {
        dtrain__fsdp_page_grads(fsdp, i, 0);
        fsdp->units[i].reduced = fsdp->units[i].backward = 0;
    }
    for (size_t i = 0; i < fsdp->layout.cut_count; i++)
        fsdp->slices[i].grads = NULL;
    memset(&fsdp->note, 0, sizeof fsdp->note);
    fsdp->grads = NULL;
    fsdp->announced = fsdp->last = -1;
    fsdp->ended = fsdp->round = fsdp->reduced_units = fsdp->just_ended = fsdp->summed = fsdp->joined = 0;
    fsdp->turn = fsdp->layout.unit_count - 1;
    dtrain__fsdp_between(fsdp);
}

/* Forgets them before a step is complete: also what was computed and never handed over. */
static void dtrain__fsdp_wipe(dtrain_fsdp *fsdp)
{
    for (int i = 0; i < fsdp->layout.unit_count; i++)
        if (fsdp->units[i].fresh)
            dtrain__fsdp_page_grads(fsdp, i, 1);
    dtrain__fsdp_reset(fsdp);
}

/* Learns what all ranks say of the step; *most: the micro-batches that one of them has begun, at most. */
static dtrain_status dtrain__fsdp_hear(dtrain_fsdp *fsdp, int *most)
{
    int ranks = dtrain_comm_size(fsdp->comm);
    dtrain_status status = DTRAIN_OK;
    fsdp->note.begun = (uint64_t)fsdp->ended + (fsdp->reduced_units > 0);
    if (fsdp->world != NULL)
        status = dtrain_all_gather(fsdp->world, &fsdp->note, fsdp->notes, sizeof fsdp->note * (size_t)ranks, DTRAIN_U8);
    else
        fsdp->notes[0] = fsdp->note;
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "ending a step, instead", 0);
    *most = 0;
    for (int rank = 0; rank < ranks; rank++)
        *most = fsdp->notes[rank].begun > (uint64_t)*most ? (int)fsdp->notes[rank].begun : *most;
    return DTRAIN_OK;
}

/* Ends all reductions of a step, in which each rank adds nothing to those that others alone have made. */
static dtrain_status dtrain__fsdp_complete(dtrain_fsdp *fsdp, int *most)
{
    dtrain_status status = dtrain__fsdp_announced(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_hear(fsdp, most);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_catch_up(fsdp, *most);
    return status;
}

/* Says whether a step can be applied; the same verdict on every rank. */
static dtrain_status dtrain__fsdp_verdict(dtrain_fsdp *fsdp, int most)
{
    for (int rank = 0; rank < dtrain_comm_size(fsdp->comm); rank++) {
        const dtrain__fsdp_note *note = &fsdp->notes[rank];
        if (note->failed)
            return dtrain__fail(&fsdp->error, DTRAIN_ERR_ABORTED,
                                "fsdp, finishing a step: rank %d could not go on%s%.*s: its gradients are dropped on "
                                "all ranks, the object can be used",
                                rank, note->why[0] != 0 ? ": " : "", DTRAIN__FSDP_WHY - 1, note->why);
    }
    if (most > 0 && fsdp->trained_units > 0)
        return DTRAIN_OK;
    return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                        "fsdp, finishing a step: no rank has reduced a gradient: call dtrain_fsdp_reduce for each unit "
                        "first; the object can be used");
}

/* Collapses the levels and divides once. */
static void dtrain__fsdp_divide(dtrain_fsdp *fsdp)
{
    const dtrain__train_kernels *kernels = dtrain__train_kernels_get();
    double divisor = (fsdp->total_weight > 0.0 ? fsdp->total_weight : 1.0) * (double)fsdp->loss_scale;
    uint64_t mode = dtrain__fpmode_enter();
    float *sum = NULL;
    for (int level = 0; fsdp->round >> level != 0; level++) {
        if (!(fsdp->round >> level & 1))
            continue;
        if (sum != NULL)
            kernels->add(fsdp->levels[level], fsdp->levels[level], sum, fsdp->layout.grads);
        sum = fsdp->levels[level];
    }
    kernels->divide(sum, sum, (float)divisor, fsdp->layout.grads);
    dtrain__fpmode_restore(mode);
    fsdp->grads = sum;
    for (size_t i = 0; i < fsdp->layout.cut_count; i++)
        if (fsdp->layout.cuts[i].trained)
            fsdp->slices[i].grads = sum + fsdp->layout.cuts[i].grad;
}

/* idle: that no rank has a micro-batch is no error, and leaves no sums. */
static dtrain_status dtrain__fsdp_finish_now(dtrain_fsdp *fsdp, int idle)
{
    int most = 0;
    if (fsdp->grads != NULL)
        return DTRAIN_OK;
    dtrain_status status = dtrain__fsdp_complete(fsdp, &most);
    if (status == DTRAIN_OK && idle && (most == 0 || fsdp->trained_units == 0))
        return DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_verdict(fsdp, most);
    if (status == DTRAIN_OK)
        dtrain__fsdp_divide(fsdp);
    else if (fsdp->broken.status == DTRAIN_OK)
        dtrain__fsdp_wipe(fsdp);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_finish(dtrain_fsdp *fsdp, double *total_weight)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_finish", 0);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__fsdp_finish_now(fsdp, 0);
    if (total_weight != NULL)
        *total_weight = fsdp->total_weight;
    return dtrain__fsdp_leave(fsdp, status);
}

/* Sums the squares of all gradients, over the ranks of one copy: each element once. */
static dtrain_status dtrain__fsdp_sum_squares(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->summed)
        return DTRAIN_OK;
    memset(&fsdp->sum, 0, sizeof fsdp->sum);
    dtrain__exact_add_squares(&fsdp->sum, fsdp->grads, fsdp->layout.grads);
    if (fsdp->reduces != NULL)
        status = dtrain_all_reduce(fsdp->reduces, fsdp->sum.limbs, fsdp->sum.limbs, DTRAIN__EXACT_LIMBS, DTRAIN_I64,
                                   DTRAIN_SUM);
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "measuring gradients, instead", 0);
    fsdp->summed = 1;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_clip_grad_norm(dtrain_fsdp *fsdp, float max_norm, double *norm)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_clip_grad_norm", 0);
    if (status != DTRAIN_OK)
        return status;
    if (!(max_norm >= 0.0f))
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_clip_grad_norm: max_norm is %g, expected a number of at least 0",
                            (double)max_norm);
    status = dtrain__fsdp_finish_now(fsdp, 0);
    fsdp->summed = 0; /* they may have been shortened or changed since */
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_sum_squares(fsdp);
    if (status != DTRAIN_OK)
        return dtrain__fsdp_leave(fsdp, status);
    double length = dtrain__train_root(dtrain__exact_value(&fsdp->sum));
    if (max_norm > 0.0f && dtrain__exact_finite(&fsdp->sum) && length > (double)max_norm) {
        uint64_t mode = dtrain__fpmode_enter();
        dtrain__train_kernels_get()->multiply(fsdp->grads, fsdp->grads, dtrain__train_ratio((double)max_norm, length),
                                              fsdp->layout.grads);
        dtrain__fpmode_restore(mode);
    }
    if (norm != NULL)
        *norm = length;
    return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
}

/* Updates this rank's slices. */
static void dtrain__fsdp_update(dtrain_fsdp *fsdp, float lr)
{
    fsdp->step++;
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        const dtrain_slice *slice = &fsdp->slices[i];
        dtrain_optimizer_desc desc = fsdp->optimizer;
        float rate = lr * fsdp->lr_factors[cut->param];
        if (!cut->trained || cut->own_count == 0)
            continue;
        desc.weight_decay = fsdp->decays[cut->param];
        if (desc.kind == DTRAIN_ADAMW)
            dtrain_adamw(slice->weights, slice->grads, slice->state[0], slice->state[1], cut->own_count, &desc, rate,
                         fsdp->step);
        else
            dtrain_sgd(slice->weights, slice->grads, slice->state[0], cut->own_count, &desc, rate);
    }
}

/* Drops, or where full parameters are kept gathers, what older weights have left. */
static dtrain_status dtrain__fsdp_publish_now(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    int units = fsdp->layout.unit_count,
        gathers = fsdp->layout.resident && (fsdp->gathers != NULL || fsdp->layout.apart);
    fsdp->keeps = fsdp->prefetched = 0;
    for (int i = 0; status == DTRAIN_OK && i < units && !fsdp->layout.resident; i++) {
        fsdp->units[i].held = fsdp->units[i].fresh = 0;
        if (fsdp->units[i].state != DTRAIN__ABSENT)
            status = dtrain__fsdp_gather_drop(fsdp, i);
    }
    for (int i = 0; status == DTRAIN_OK && i < units && gathers; i++)
        status = dtrain__fsdp_gather_start(fsdp, i);
    for (int i = 0; status == DTRAIN_OK && i < units && gathers; i++)
        if (fsdp->units[i].state == DTRAIN__COMING)
            status = dtrain__fsdp_gather_finish(fsdp, i);
    return status;
}

static dtrain_status dtrain__fsdp_new_weights(dtrain_fsdp *fsdp)
{
    dtrain__fsdp_reset(fsdp);
    return dtrain__fsdp_publish_now(fsdp);
}

/* With a loss scale: says whether the step is to be skipped, and sets the next scale. */
static int dtrain__fsdp_overflows(dtrain_fsdp *fsdp)
{
    int steps = fsdp->desc.loss_scale_steps > 0 ? fsdp->desc.loss_scale_steps : 2000;
    if (!dtrain__exact_finite(&fsdp->sum)) {
        fsdp->loss_scale = fsdp->loss_scale > 1e-30f ? fsdp->loss_scale / 2.0f : fsdp->loss_scale;
        fsdp->good_steps = 0;
        return 1;
    }
    if (++fsdp->good_steps == steps) {
        fsdp->loss_scale = fsdp->loss_scale < 1e30f ? fsdp->loss_scale * 2.0f : fsdp->loss_scale;
        fsdp->good_steps = 0;
    }
    return 0;
}

DTRAIN_API dtrain_status dtrain_fsdp_step(dtrain_fsdp *fsdp, float lr)
{
    int skip = 0;
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_step", 0);
    if (status != DTRAIN_OK)
        return status;
    if (!dtrain__train_finite((double)lr) || lr < 0.0f)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_step: lr is %g on rank %d, expected a number of at least 0", (double)lr,
                            dtrain__fsdp_rank(fsdp));
    if (fsdp->optimizer.kind == DTRAIN_OPTIMIZER_NONE)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_step: the optimizer is DTRAIN_OPTIMIZER_NONE: update the slices of "
                            "dtrain_fsdp_local, then call dtrain_fsdp_publish");
    status = dtrain__fsdp_finish_now(fsdp, 0);
    if (status == DTRAIN_OK && fsdp->desc.loss_scale > 0.0f) {
        status = dtrain__fsdp_sum_squares(fsdp);
        skip = status == DTRAIN_OK && dtrain__fsdp_overflows(fsdp);
    }
    if (status != DTRAIN_OK)
        return dtrain__fsdp_leave(fsdp, status);
    fsdp->stats.skipped += (uint64_t)skip;
    fsdp->stats.steps += (uint64_t)!skip;
    if (skip) {
        dtrain__fsdp_reset(fsdp);
        return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
    }
    dtrain__fsdp_update(fsdp, lr);
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_new_weights(fsdp));
}

DTRAIN_API dtrain_status dtrain_fsdp_drop(dtrain_fsdp *fsdp)
{
    int most = 0;
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_drop", 0);
    if (status == DTRAIN_OK && fsdp->grads == NULL)
        status = dtrain__fsdp_complete(fsdp, &most);
    if (status != DTRAIN_OK)
        return status;
    dtrain__fsdp_wipe(fsdp);
    return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
}

DTRAIN_API dtrain_status dtrain_fsdp_local(dtrain_fsdp *fsdp, const dtrain_slice **slices, size_t *count)
{
    if (fsdp == NULL || slices == NULL || count == NULL)
        return dtrain__fail(fsdp != NULL ? &fsdp->error : NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_local: fsdp, slices and count are needed, got NULL");
    *slices = fsdp->slices;
    *count = fsdp->layout.cut_count;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_publish(dtrain_fsdp *fsdp)
{
    int most = 0;
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_publish", 0);
    if (status == DTRAIN_OK && fsdp->grads == NULL)
        status = dtrain__fsdp_complete(fsdp, &most);
    if (status != DTRAIN_OK)
        return status;
    dtrain__fsdp_wipe(fsdp);
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_publish_now(fsdp));
}

DTRAIN_API uint64_t dtrain_fsdp_get_step(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? fsdp->step : 0;
}

DTRAIN_API dtrain_status dtrain_fsdp_set_step(dtrain_fsdp *fsdp, uint64_t step)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_set_step", 0);
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->grads != NULL)
        return dtrain__fail(
            &fsdp->error, DTRAIN_ERR_INVALID,
            "dtrain_fsdp_set_step: gradients of a step are not used yet on rank %d: end it with dtrain_fsdp_step, "
            "dtrain_fsdp_publish or dtrain_fsdp_drop first",
            dtrain__fsdp_rank(fsdp));
    fsdp->step = step;
    return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
}

DTRAIN_API dtrain_strategy dtrain_fsdp_strategy(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? dtrain__layout_strategy(&fsdp->desc) : DTRAIN_STRATEGY_DEFAULT;
}

DTRAIN_API int dtrain_fsdp_shard_size(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? fsdp->layout.shards : 0;
}

DTRAIN_API float dtrain_fsdp_loss_scale(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? fsdp->loss_scale : 1.0f;
}

DTRAIN_API dtrain_fsdp_stats dtrain_fsdp_get_stats(const dtrain_fsdp *fsdp)
{
    dtrain_fsdp_stats stats;
    memset(&stats, 0, sizeof stats);
    if (fsdp == NULL)
        return stats;
    stats = fsdp->stats;
    stats.bytes = fsdp->memory.bytes;
    stats.peak_bytes = fsdp->memory.peak_bytes;
    return stats;
}

DTRAIN_API const char *dtrain_fsdp_error(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? fsdp->error.text : "";
}

#endif

/* ---- >>fsdp-access ----
 * Parameters by name: addresses, full values in and out, all of them at once; and the trace file. */
#ifndef DTRAIN__FSDP_ACCESS
#define DTRAIN__FSDP_ACCESS

#define DTRAIN__FSDP_STAGE ((size_t)1 << 13) /* elements that are broadcast at once: 32 KiB, beyond the plan */

static size_t dtrain__fsdp_find(const dtrain_fsdp *fsdp, const char *name)
{
    size_t i = 0;
    while (i < fsdp->layout.table_count && strcmp(fsdp->layout.table[i].name, name) != 0)
        i++;
    return i;
}

DTRAIN_API float *dtrain_fsdp_param(const dtrain_fsdp *fsdp, const char *name)
{
    size_t i = fsdp != NULL && name != NULL ? dtrain__fsdp_find(fsdp, name) : 0;
    return fsdp != NULL && name != NULL && i < fsdp->layout.table_count ? (float *)fsdp->layout.table[i].data : NULL;
}

DTRAIN_API float *dtrain_fsdp_grad(const dtrain_fsdp *fsdp, const char *name)
{
    size_t i = fsdp != NULL && name != NULL ? dtrain__fsdp_find(fsdp, name) : 0;
    return fsdp != NULL && name != NULL && i < fsdp->layout.table_count ? (float *)fsdp->layout.table[i].grad : NULL;
}

/* What is in memory of a unit is what the caller wrote: keeps this rank's part of it. */
static void dtrain__fsdp_put_now(dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout *layout = &fsdp->layout;
    for (size_t i = layout->units[number].first; layout->apart && i < layout->units[number].end; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        if (cut->own_count > 0 && !cut->home)
            memcpy(fsdp->masters + cut->weight, dtrain__fsdp_full(fsdp, cut) + cut->own,
                   cut->own_count * sizeof(float));
    }
}

/* As a gather would bring it, from full values that are the same on every rank. */
static void dtrain__fsdp_round(dtrain_fsdp *fsdp, float *full, size_t count)
{
    uint16_t chunk[DTRAIN__FSDP_CHUNK];
    for (size_t i = 0; fsdp->desc.gather_dtype != DTRAIN_F32 && i < count; i += DTRAIN__FSDP_CHUNK) {
        size_t n = count - i < DTRAIN__FSDP_CHUNK ? count - i : DTRAIN__FSDP_CHUNK;
        dtrain_convert(full + i, DTRAIN_F32, chunk, fsdp->desc.gather_dtype, n);
        dtrain_convert(chunk, fsdp->desc.gather_dtype, full + i, DTRAIN_F32, n);
    }
}

static void dtrain__fsdp_round_unit(dtrain_fsdp *fsdp, int number)
{
    for (size_t i = fsdp->layout.units[number].first; i < fsdp->layout.units[number].end; i++)
        dtrain__fsdp_round(fsdp, dtrain__fsdp_full(fsdp, &fsdp->layout.cuts[i]), fsdp->layout.cuts[i].count);
}

DTRAIN_API dtrain_status dtrain_fsdp_put(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_put", unit);
    if (status != DTRAIN_OK)
        return status;
    if (!fsdp->units[unit].held)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_put: unit %d is not gathered on rank %d: gather it, write its parameters, "
                            "then put",
                            unit, dtrain__fsdp_rank(fsdp));
    dtrain__fsdp_put_now(fsdp, unit);
    dtrain__fsdp_round_unit(fsdp, unit);
    return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
}

/* Keeps elements [at, at + count) of a parameter, whose values all ranks have. */
static void dtrain__fsdp_keep(dtrain_fsdp *fsdp, size_t param, size_t at, const float *values, size_t count)
{
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        size_t low = cut->element + cut->own, high = low + cut->own_count;
        if (cut->param != param || !fsdp->layout.apart)
            continue;
        low = low > at ? low : at;
        high = high < at + count ? high : at + count;
        if (low < high)
            memcpy(dtrain__fsdp_own(fsdp, cut) + (low - cut->element - cut->own), values + (low - at),
                   (high - low) * sizeof(float));
    }
    if (fsdp->layout.resident && count > 0) {
        float *full = (float *)fsdp->layout.table[param].data + at;
        memcpy(full, values, count * sizeof(float));
        dtrain__fsdp_round(fsdp, full, count);
    }
}

/* Forgets what was gathered before one of its parameters was set. */
static dtrain_status dtrain__fsdp_forget(dtrain_fsdp *fsdp, size_t param)
{
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < fsdp->layout.cut_count && !fsdp->layout.resident && status == DTRAIN_OK; i++) {
        dtrain__fsdp_unit *unit = &fsdp->units[fsdp->layout.cuts[i].unit];
        if (fsdp->layout.cuts[i].param != param || unit->state == DTRAIN__ABSENT)
            continue;
        unit->stale = 1;
        if (!unit->held)
            status = dtrain__fsdp_gather_drop(fsdp, fsdp->layout.cuts[i].unit);
    }
    return status;
}

static dtrain_status dtrain__fsdp_set_now(dtrain_fsdp *fsdp, size_t param, const float *value, int root)
{
    size_t count = dtrain_param_elements(&fsdp->layout.table[param]);
    size_t most = count < DTRAIN__FSDP_STAGE ? count : DTRAIN__FSDP_STAGE;
    int is_root = dtrain__fsdp_rank(fsdp) == root;
    float *stage = (float *)dtrain__alloc(&fsdp->memory, most * sizeof(float));
    dtrain_status status = stage != NULL
                               ? dtrain__fsdp_forget(fsdp, param)
                               : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", most * sizeof(float));
    for (size_t at = 0; status == DTRAIN_OK && at < count; at += most) {
        size_t n = count - at < most ? count - at : most;
        if (is_root)
            memcpy(stage, value + at, n * sizeof(float));
        if (fsdp->world != NULL)
            status = dtrain_broadcast(fsdp->world, stage, n, DTRAIN_F32, root);
        if (status == DTRAIN_OK)
            dtrain__fsdp_keep(fsdp, param, at, stage, n);
    }
    dtrain__free(&fsdp->memory, stage, most * sizeof(float));
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, "setting a parameter, instead", 0);
}

/* Finds a parameter for a call that takes its name and a rank. */
static dtrain_status dtrain__fsdp_named(dtrain_fsdp *fsdp, const char *call, const char *name, int root, int lowest,
                                        size_t *param)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, 0);
    if (status != DTRAIN_OK)
        return status;
    *param = name != NULL ? dtrain__fsdp_find(fsdp, name) : fsdp->layout.table_count;
    if (*param == fsdp->layout.table_count)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID, "%s: the table has no parameter named %s", call,
                            name != NULL ? name : "NULL");
    if (fsdp->layout.table[*param].dtype != DTRAIN_F32)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_UNSUPPORTED, "%s: %s is not F32: it lies in memory of yours", call,
                            name);
    if (root < lowest || root >= dtrain_comm_size(fsdp->comm))
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID, "%s: root is %d, expected %d to %d", call, root, lowest,
                            dtrain_comm_size(fsdp->comm) - 1);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_set(dtrain_fsdp *fsdp, const char *name, const float *value, int root)
{
    size_t param;
    dtrain_status status = dtrain__fsdp_named(fsdp, "dtrain_fsdp_set", name, root, 0, &param);
    if (status != DTRAIN_OK)
        return status;
    if (value == NULL && dtrain__fsdp_rank(fsdp) == root)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_set: value of %s is NULL on rank %d, its root", name, root);
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_set_now(fsdp, param, value, root));
}

static dtrain_status dtrain__fsdp_get_cut(dtrain_fsdp *fsdp, size_t index, float *value, int root)
{
    const dtrain__cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = fsdp->counts + index * (size_t)fsdp->layout.shards;
    int rank = dtrain__fsdp_rank(fsdp), shards = fsdp->layout.shards;
    const float *own = dtrain__fsdp_own(fsdp, cut);
    float *out = value != NULL ? value + cut->element : NULL;
    if (cut->count == 0 || (root >= 0 && root / shards != rank / shards))
        return DTRAIN_OK;
    if (fsdp->gathers == NULL) {
        if (root < 0 || root == rank)
            memcpy(out, own, cut->count * sizeof(float));
        return DTRAIN_OK;
    }
    return root < 0 ? dtrain_all_gather_v(fsdp->gathers, own, out, counts, NULL, DTRAIN_F32)
                    : dtrain_gather_v(fsdp->gathers, own, out, counts, NULL, DTRAIN_F32, root % shards);
}

DTRAIN_API dtrain_status dtrain_fsdp_get(dtrain_fsdp *fsdp, const char *name, float *value, int root)
{
    size_t param;
    dtrain_status status = dtrain__fsdp_named(fsdp, "dtrain_fsdp_get", name, root, -1, &param);
    if (status != DTRAIN_OK)
        return status;
    if (value == NULL && (root < 0 || root == dtrain__fsdp_rank(fsdp)))
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_get: value is NULL on rank %d, which gets %s", dtrain__fsdp_rank(fsdp), name);
    for (size_t i = 0; status == DTRAIN_OK && i < fsdp->layout.cut_count; i++)
        if (fsdp->layout.cuts[i].param == param)
            status = dtrain__fsdp_get_cut(fsdp, i, value, root);
    if (status != DTRAIN_OK)
        status = dtrain__fsdp_break(fsdp, status, "getting a parameter, instead", 0);
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API dtrain_status dtrain_fsdp_unshard(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_unshard", 0);
    if (status != DTRAIN_OK)
        return status;
    fsdp->keeps = !fsdp->layout.resident;
    for (int i = 0; status == DTRAIN_OK && i < fsdp->layout.unit_count && fsdp->keeps; i++) {
        if (fsdp->units[i].stale)
            status = dtrain__fsdp_gather_drop(fsdp, i);
        if (status == DTRAIN_OK && fsdp->units[i].state == DTRAIN__ABSENT)
            status = dtrain__fsdp_gather_start(fsdp, i);
        if (status == DTRAIN_OK && fsdp->units[i].state == DTRAIN__COMING)
            status = dtrain__fsdp_gather_finish(fsdp, i);
    }
    return dtrain__fsdp_leave(fsdp, status);
}

static void dtrain__fsdp_write_events(const dtrain_fsdp *fsdp, FILE *file)
{
    static const char *const lanes[DTRAIN__LANES] = {"compute", "gather", "reduce", "wait"};
    size_t most = fsdp->desc.trace_events;
    size_t first = fsdp->event_count > most ? fsdp->event_count - most : 0;
    int rank = dtrain__fsdp_rank(fsdp);
    fprintf(file,
            "{\"traceEvents\":[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}",
            rank, rank);
    for (int lane = 0; lane < DTRAIN__LANES; lane++)
        fprintf(file, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
                rank, lane, lanes[lane]);
    for (size_t i = first; i < fsdp->event_count; i++) {
        const dtrain__fsdp_event *event = &fsdp->events[i % most];
        fprintf(file,
                ",\n{\"name\":\"%s unit %d\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d,\"dur\":%lld.%03d}",
                lanes[event->lane], event->unit, rank, event->lane, (long long)(event->begin_ns / 1000),
                (int)(event->begin_ns % 1000), (long long)((event->end_ns - event->begin_ns) / 1000),
                (int)((event->end_ns - event->begin_ns) % 1000));
    }
    fprintf(file, "\n]}\n");
}

DTRAIN_API dtrain_status dtrain_fsdp_trace(const dtrain_fsdp *fsdp, const char *path)
{
    char beside[1100];
    if (fsdp == NULL || path == NULL || fsdp->desc.trace_events == 0 || strlen(path) > 1024)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_fsdp_trace: needs an object whose desc has trace_events, and a path of at most 1024 "
            "bytes");
    snprintf(beside, sizeof beside, "%s.%ld.new", path, (long)getpid());
    FILE *file = fopen(beside, "w");
    int bad = file == NULL;
    if (!bad) {
        dtrain__fsdp_write_events(fsdp, file);
        bad = ferror(file) != 0;
        bad |= fclose(file) != 0;
        bad = bad || rename(beside, path) != 0;
    }
    if (!bad)
        return DTRAIN_OK;
    int error = errno;
    unlink(beside);
    return dtrain__fail(NULL, DTRAIN_ERR_IO, "dtrain_fsdp_trace: rank %d cannot write %s: %s", dtrain__fsdp_rank(fsdp),
                        path, strerror(error));
}

#endif

/* ---- >>fsdp-plan ----
 * What an object will need, from its layout alone, before anything of it is allocated. */
#ifndef DTRAIN__FSDP_PLAN
#define DTRAIN__FSDP_PLAN

typedef struct dtrain__page_span {
    size_t begin, end;
} dtrain__page_span;

static int dtrain__page_span_compare(const void *left, const void *right)
{
    const dtrain__page_span *a = (const dtrain__page_span *)left, *b = (const dtrain__page_span *)right;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* Adds the pages of a unit's reserved ranges; staying: of those parts alone that are never dropped. */
static size_t dtrain__plan_add(const dtrain__layout *layout, int unit, int grads, int staying, dtrain__page_span *spans,
                               size_t used)
{
    size_t page = dtrain__os_page_bytes();
    for (size_t i = layout->units[unit].first; i < layout->units[unit].end; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        const dtrain_param *param = &layout->table[cut->param];
        size_t at = 0, count = staying ? dtrain__layout_staying(cut, grads, &at) : cut->count;
        size_t begin = layout->offsets[cut->param] + (cut->element + at) * sizeof(float);
        if (count == 0 || (grads ? !cut->trained || param->grad != NULL : param->data != NULL))
            continue;
        spans[used].begin = begin / page;
        spans[used++].end = (begin + count * sizeof(float) - 1) / page + 1;
    }
    return used;
}

/* Bytes of the pages that spans cover together. */
static size_t dtrain__plan_cover(dtrain__page_span *spans, size_t used)
{
    size_t pages = 0, covered = 0;
    qsort(spans, used, sizeof *spans, dtrain__page_span_compare);
    for (size_t i = 0; i < used; i++) {
        size_t begin = spans[i].begin > covered ? spans[i].begin : covered;
        pages += spans[i].end > begin ? spans[i].end - begin : 0;
        covered = spans[i].end > covered ? spans[i].end : covered;
    }
    return pages * dtrain__os_page_bytes();
}

/* Bytes of the pages of some units: from `first` to `end`, tied ones only where `tied`. */
static size_t dtrain__plan_units(const dtrain__layout *layout, int first, int end, int tied, int grads, int staying,
                                 dtrain__page_span *spans)
{
    size_t used = 0;
    for (int unit = first; unit < end; unit++)
        if (!tied || layout->units[unit].tied)
            used = dtrain__plan_add(layout, unit, grads, staying, spans, used);
    return dtrain__plan_cover(spans, used);
}

/* Of them what is not always there. */
static size_t dtrain__plan_come(const dtrain__layout *layout, int first, int end, int tied, int grads,
                                dtrain__page_span *spans)
{
    return dtrain__plan_units(layout, first, end, tied, grads, 0, spans) -
           dtrain__plan_units(layout, first, end, tied, grads, 1, spans);
}

/* The most bytes in pages at once: those that are always there, and of others those of all units, or of those that are
 * tied and the two largest others. Any two may meet, as the last and the first where a pass ends and the next begins.
 */
static size_t dtrain__plan_pages(const dtrain__layout *layout, int grads, int all, dtrain__page_span *spans)
{
    int units = layout->unit_count;
    size_t stay = dtrain__plan_units(layout, 0, units, 0, grads, 1, spans), two[2] = {0, 0};
    if (all)
        return stay + dtrain__plan_come(layout, 0, units, 0, grads, spans);
    for (int unit = 0; unit < units; unit++) {
        size_t bytes = layout->units[unit].tied ? 0 : dtrain__plan_come(layout, unit, unit + 1, 0, grads, spans);
        two[1] = bytes > two[0] ? two[0] : bytes > two[1] ? bytes : two[1];
        two[0] = bytes > two[0] ? bytes : two[0];
    }
    return stay + dtrain__plan_come(layout, 0, units, 1, grads, spans) + two[0] + two[1];
}

/* Bytes of this rank's weights that are kept apart. */
static size_t dtrain__plan_apart(const dtrain__layout *layout)
{
    return layout->apart ? layout->weights * sizeof(float) : 0;
}

static size_t dtrain__plan_state_floats(const dtrain_optimizer_desc *optimizer)
{
    return optimizer->kind == DTRAIN_ADAMW ? 2 : optimizer->kind == DTRAIN_SGD && optimizer->momentum != 0.0f;
}

/* Of tables and page counts. */
static size_t dtrain__plan_bookkeeping(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int world)
{
    size_t a_param = sizeof(dtrain_param) + sizeof(size_t) + 2 * sizeof(float) + 1;
    size_t a_cut = sizeof(dtrain__cut) + sizeof(dtrain_slice) + 2 * sizeof(dtrain_work *) +
                   (size_t)layout->shards * sizeof(size_t);
    size_t a_unit = sizeof(dtrain__cut_unit) + sizeof(dtrain__fsdp_unit) + sizeof(dtrain_work *) +
                    2 * (size_t)layout->shards * sizeof(size_t);
    return sizeof(struct dtrain_fsdp) + layout->table_count * a_param + layout->names_bytes +
           layout->cut_count * a_cut + (size_t)layout->unit_count * a_unit +
           (size_t)world * (sizeof(dtrain__fsdp_note) + 2 * sizeof(double)) +
           2 * (layout->reserved / dtrain__os_page_bytes() + 1) * sizeof(uint16_t) +
           desc->trace_events * sizeof(dtrain__fsdp_event) + DTRAIN__FSDP_STAGES * layout->stage * sizeof(float);
}

/* What other ranks are sent: each unit is gathered in both passes, but for the two that are still there. */
static void dtrain__plan_traffic(const dtrain__layout *layout, const dtrain_fsdp_desc *desc,
                                 dtrain_fsdp_plan_result *plan)
{
    uint64_t gather_bytes = dtrain__layout_is_16_bit(desc->gather_dtype) ? 2 : 4;
    uint64_t reduce_bytes = dtrain__layout_is_16_bit(desc->reduce_dtype) ? 2 : 4, copies = (uint64_t)layout->copies;
    for (int i = 0; i < layout->unit_count; i++) {
        uint64_t own = 0, own_trained = layout->units[i].grad_count;
        uint64_t passes = layout->resident || desc->no_reshard_after_forward ||
                                  i + DTRAIN__FSDP_ROTATING >= layout->unit_count || layout->units[i].tied
                              ? 1
                              : 2;
        for (size_t k = layout->units[i].first; k < layout->units[i].end; k++)
            own += layout->cuts[k].own_count;
        if (layout->shards > 1) {
            plan->sent_gather += passes * (layout->units[i].count - own) * gather_bytes;
            plan->sent_reduce += (layout->units[i].trained - own_trained) * reduce_bytes;
        }
        plan->sent_reduce += copies > 1 ? 2 * own_trained * (copies - 1) / copies * reduce_bytes : 0;
    }
}

static dtrain_status dtrain__plan_fill(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int world,
                                       dtrain_allocator *allocator, dtrain_fsdp_plan_result *plan)
{
    dtrain_optimizer_desc optimizer = dtrain__optimizer_defaults(&desc->optimizer);
    int micro = desc->micro_batches > 1 ? desc->micro_batches : 1;
    int all = layout->resident || desc->no_reshard_after_forward;
    size_t bytes = (layout->cut_count + 1) * sizeof(dtrain__page_span);
    dtrain__page_span *spans = (dtrain__page_span *)dtrain__alloc(allocator, bytes);
    if (spans == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_fsdp_plan: no memory for %zu bytes", bytes);
    plan->weights = dtrain__plan_apart(layout);
    plan->gradients = layout->grads * sizeof(float);
    if (desc->keep_full_grads)
        plan->gradients += micro > 1 ? layout->trained * sizeof(float) * (size_t)dtrain__layout_levels(micro - 1) : 0;
    else
        plan->gradients *= (size_t)dtrain__layout_levels(micro);
    plan->optimizer = layout->grads * sizeof(float) * dtrain__plan_state_floats(&optimizer);
    plan->full_weights = dtrain__plan_pages(layout, 0, all, spans);
    plan->full_grads = dtrain__plan_pages(layout, 1, 0, spans);
    plan->bookkeeping = dtrain__plan_bookkeeping(layout, desc, world);
    plan->peak =
        plan->weights + plan->gradients + plan->optimizer + plan->full_weights + plan->full_grads + plan->bookkeeping;
    dtrain__plan_traffic(layout, desc, plan);
    dtrain__free(allocator, spans, bytes);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_plan(const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc,
                                          int world_size, int rank, dtrain_fsdp_plan_result *plan)
{
    dtrain_allocator allocator = {NULL, NULL, 0, 0};
    dtrain_fsdp_desc full;
    dtrain__layout layout;
    memset(&full, 0, sizeof full);
    if (plan == NULL || rank < 0 || rank >= world_size || world_size > DTRAIN__MAX_RANKS)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_plan: rank %d of %d, and a plan to fill in: expected a rank below the number "
                            "of ranks, at most %d, and no NULL",
                            rank, world_size, DTRAIN__MAX_RANKS);
    if (desc != NULL)
        full = *desc;
    memset(plan, 0, sizeof *plan);
    dtrain_status status = dtrain__layout_create(&layout, table, count, &full, world_size, rank, &allocator);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__plan_fill(&layout, &full, world_size, &allocator, plan);
    dtrain__layout_destroy(&layout, &allocator);
    return status;
}

#endif

/* ---- >>fsdp-create ----
 * Makes and frees an object: its groups, its memory, the first values. */
#ifndef DTRAIN__FSDP_CREATE
#define DTRAIN__FSDP_CREATE

/* Hashes what must be the same on every rank. */
static void dtrain__fsdp_digest(const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc,
                                unsigned char digest[32])
{
    const dtrain_optimizer_desc *o = &desc->optimizer;
    double fields[] = {(double)desc->strategy,
                       (double)desc->shard_size,
                       (double)desc->gather_dtype,
                       (double)desc->reduce_dtype,
                       (double)o->kind,
                       (double)o->beta1,
                       (double)o->beta2,
                       (double)o->eps,
                       (double)o->weight_decay,
                       (double)o->momentum,
                       (double)o->nesterov,
                       (double)o->decoupled_decay,
                       (double)desc->no_reshard_after_forward,
                       (double)desc->no_prefetch,
                       (double)desc->keep_full_grads,
                       (double)desc->loss_scale,
                       (double)desc->loss_scale_steps,
                       (double)desc->no_broadcast,
                       (double)desc->no_overlap,
                       (double)desc->bucket_bytes};
    struct {
        unsigned char before[32];
        char name[128];
        float numbers[4];
    } group;
    dtrain_sha256(fields, sizeof fields, digest);
    for (size_t i = 0; i < desc->group_count; i++) {
        memset(&group, 0, sizeof group);
        memcpy(group.before, digest, 32);
        snprintf(group.name, sizeof group.name, "%s", desc->groups[i].name);
        group.numbers[0] = desc->groups[i].lr_factor;
        group.numbers[1] = desc->groups[i].weight_decay;
        group.numbers[2] = (float)desc->groups[i].no_decay;
        dtrain_sha256(&group, sizeof group, digest);
    }
    dtrain__params_digest(table, count, digest);
    for (size_t i = 0; i < count; i++) {
        memset(&group, 0, sizeof group);
        memcpy(group.before, digest, 32);
        group.numbers[0] = (float)(table[i].data != NULL);
        dtrain_sha256(&group, sizeof group, digest);
    }
}

/* Compares tables and descs on all ranks; a rank whose own is bad takes part, so that the others learn it. */
static dtrain_status dtrain__fsdp_compare(dtrain_fsdp *fsdp, const dtrain_param *table, size_t count,
                                          dtrain_status mine)
{
    unsigned char digest[32];
    dtrain__error cause = dtrain__thread_error;
    memset(digest, 0, sizeof digest);
    if (mine == DTRAIN_OK)
        dtrain__fsdp_digest(table, count, &fsdp->desc, digest);
    dtrain_status status = dtrain_comm_check_equal(fsdp->comm, digest, sizeof digest, DTRAIN_U8);
    if (mine != DTRAIN_OK)
        return dtrain__report(&cause);
    if (status != DTRAIN_ERR_MISMATCH)
        return status;
    cause = dtrain__thread_error;
    return dtrain__fail(NULL, status,
                        "dtrain_fsdp_create: rank %d of %d has another parameter table or desc than others, or one of "
                        "them is refused: build them alike on every rank (by hash: %.300s)",
                        dtrain__fsdp_rank(fsdp), dtrain_comm_size(fsdp->comm), cause.text);
}

/* Makes the groups; where a transport has none, and all ranks are one group, the caller's serves for all. */
static dtrain_status dtrain__fsdp_groups(dtrain_fsdp *fsdp)
{
    int rank = dtrain__fsdp_rank(fsdp), shards = fsdp->layout.shards, copies = fsdp->layout.copies;
    if (shards * copies == 1)
        return DTRAIN_OK;
    dtrain_status status = dtrain_comm_duplicate(fsdp->comm, &fsdp->world);
    if (status == DTRAIN_ERR_UNSUPPORTED && (shards == 1 || copies == 1)) {
        fsdp->shares_comm = 1;
        fsdp->world = fsdp->comm;
        fsdp->gathers = fsdp->reduces = shards > 1 ? fsdp->comm : NULL;
        fsdp->copies = copies > 1 ? fsdp->comm : NULL;
        return DTRAIN_OK;
    }
    if (status == DTRAIN_OK && shards > 1)
        status = dtrain_comm_split(fsdp->comm, rank / shards, rank, &fsdp->gathers);
    if (status == DTRAIN_OK && shards > 1)
        status = dtrain_comm_split(fsdp->comm, rank / shards, rank, &fsdp->reduces);
    if (status == DTRAIN_OK && copies > 1)
        status = dtrain_comm_split(fsdp->comm, rank % shards, rank, &fsdp->copies);
    return status;
}

/* Says whether a group's name fits a parameter's. */
static int dtrain__fsdp_fits(const char *pattern, const char *name)
{
    size_t bytes = strlen(pattern);
    if (bytes > 0 && pattern[bytes - 1] == '*')
        return strncmp(pattern, name, bytes - 1) == 0;
    return strcmp(pattern, name) == 0;
}

static dtrain_status dtrain__fsdp_check_groups(const dtrain_fsdp_desc *desc)
{
    if (desc->group_count > 0 && desc->groups == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_create: groups is NULL, expected %zu of them",
                            desc->group_count);
    for (size_t i = 0; i < desc->group_count; i++) {
        const dtrain_param_group *group = &desc->groups[i];
        if (group->name == NULL || strlen(group->name) > 127 || !dtrain__train_finite((double)group->lr_factor) ||
            !dtrain__train_finite((double)group->weight_decay) || group->lr_factor < 0.0f || group->weight_decay < 0.0f)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "dtrain_fsdp_create: group %zu needs a name of at most 127 characters, and lr_factor and "
                "weight_decay of at least 0",
                i);
    }
    return DTRAIN_OK;
}

static void dtrain__fsdp_group_params(dtrain_fsdp *fsdp)
{
    for (size_t i = 0; i < fsdp->layout.table_count; i++) {
        const dtrain_param *param = &fsdp->layout.table[i];
        const dtrain_param_group *group = NULL;
        for (size_t k = fsdp->desc.group_count; k-- > 0;)
            group = dtrain__fsdp_fits(fsdp->desc.groups[k].name, param->name) ? &fsdp->desc.groups[k] : group;
        fsdp->lr_factors[i] = group != NULL && group->lr_factor > 0.0f ? group->lr_factor : 1.0f;
        fsdp->decays[i] = fsdp->optimizer.weight_decay;
        if (group != NULL && group->weight_decay > 0.0f)
            fsdp->decays[i] = group->weight_decay;
        if (param->no_decay || (group != NULL && group->no_decay))
            fsdp->decays[i] = 0.0f;
    }
}

/* Fills in what a cut's slice says, once the memory is there. */
static void dtrain__fsdp_describe(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__cut *cut = &fsdp->layout.cuts[index];
    const dtrain_param *param = &fsdp->layout.table[cut->param];
    dtrain_slice *slice = &fsdp->slices[index];
    size_t floats = dtrain__plan_state_floats(&fsdp->optimizer);
    slice->name = param->name;
    slice->dtype = param->dtype;
    slice->ndim = dtrain__params_ndim(param);
    memcpy(slice->shape, param->shape, sizeof slice->shape);
    slice->layer = cut->layer;
    slice->unit = cut->unit;
    slice->begin = cut->own;
    slice->count = cut->own_count;
    slice->no_decay = fsdp->decays[cut->param] == 0.0f;
    slice->weights = dtrain__fsdp_own(fsdp, cut);
    for (size_t k = 0; cut->trained && k < floats; k++)
        slice->state[k] = fsdp->state + k * fsdp->layout.grads + cut->grad;
    for (int shard = 0; shard < fsdp->layout.shards; shard++) {
        size_t own;
        fsdp->counts[index * (size_t)fsdp->layout.shards + (size_t)shard] =
            dtrain__layout_part(&fsdp->layout, cut, shard, &own);
        for (int grads = 0; grads <= cut->trained && cut->packed; grads++)
            fsdp->packed_counts[(2 * (size_t)cut->unit + (size_t)grads) * (size_t)fsdp->layout.shards +
                                (size_t)shard] += dtrain__layout_part(&fsdp->layout, cut, shard, &own);
    }
}

/* Takes the pages of a range that are never dropped. */
static void dtrain__fsdp_settle_in(dtrain_fsdp *fsdp, const dtrain__cut *cut)
{
    for (int grads = 0; grads <= cut->trained; grads++) {
        size_t at, count = dtrain__layout_staying(cut, grads, &at);
        size_t begin = fsdp->layout.offsets[cut->param] + (cut->element + at) * sizeof(float);
        if (fsdp->reserved[cut->param] & (1 << grads))
            dtrain__pages_take(grads ? &fsdp->grad_pages : &fsdp->weight_pages, begin, count * sizeof(float));
    }
}

/* Gives parameters without memory their addresses. */
static dtrain_status dtrain__fsdp_reserve(dtrain_fsdp *fsdp)
{
    dtrain__layout *layout = &fsdp->layout;
    dtrain_fsdp_plan_result plan;
    int any = 0;
    for (size_t i = 0; i < layout->table_count; i++) {
        fsdp->reserved[i] = (unsigned char)(layout->table[i].data == NULL);
        if (!layout->table[i].frozen && layout->table[i].grad == NULL)
            fsdp->reserved[i] |= 2;
        any |= fsdp->reserved[i];
    }
    memset(&plan, 0, sizeof plan);
    dtrain_status status = dtrain__plan_fill(layout, &fsdp->desc, dtrain_comm_size(fsdp->comm), &fsdp->memory, &plan);
    if (status == DTRAIN_OK)
        status = dtrain__pages_create(&fsdp->weight_pages, any & 1 ? layout->reserved : 0, plan.full_weights, 0,
                                      &fsdp->memory);
    if (status == DTRAIN_OK)
        status =
            dtrain__pages_create(&fsdp->grad_pages, any & 2 ? layout->reserved : 0, plan.full_grads, 1, &fsdp->memory);
    for (size_t i = 0; status == DTRAIN_OK && i < layout->table_count; i++) {
        if (fsdp->reserved[i] & 1)
            layout->table[i].data = fsdp->weight_pages.base + layout->offsets[i];
        if (fsdp->reserved[i] & 2)
            layout->table[i].grad = fsdp->grad_pages.base + layout->offsets[i];
        if (layout->table[i].frozen)
            layout->table[i].grad = NULL;
    }
    for (size_t i = 0; status == DTRAIN_OK && i < layout->cut_count; i++)
        dtrain__fsdp_settle_in(fsdp, &layout->cuts[i]);
    return status;
}

static dtrain_status dtrain__fsdp_allocate(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    dtrain_allocator *memory = &fsdp->memory;
    size_t cuts = layout->cut_count, params = layout->table_count, units = (size_t)layout->unit_count;
    size_t world = (size_t)dtrain_comm_size(fsdp->comm), floats = dtrain__plan_state_floats(&fsdp->optimizer);
    fsdp->units = (dtrain__fsdp_unit *)dtrain__alloc(memory, units * sizeof *fsdp->units);
    fsdp->copying = (dtrain_work **)dtrain__alloc(memory, units * sizeof *fsdp->copying);
    fsdp->reserved = (unsigned char *)dtrain__alloc(memory, params);
    fsdp->lr_factors = (float *)dtrain__alloc(memory, 2 * params * sizeof(float));
    fsdp->counts = (size_t *)dtrain__alloc(memory, cuts * (size_t)layout->shards * sizeof(size_t));
    fsdp->packed_counts = (size_t *)dtrain__alloc(memory, 2 * units * (size_t)layout->shards * sizeof(size_t));
    fsdp->stages = (float *)dtrain__alloc(memory, DTRAIN__FSDP_STAGES * layout->stage * sizeof(float));
    fsdp->staged[0] = fsdp->staged[1] = -1;
    fsdp->gathering = (dtrain_work **)dtrain__alloc(memory, cuts * sizeof *fsdp->gathering);
    fsdp->reducing = (dtrain_work **)dtrain__alloc(memory, cuts * sizeof *fsdp->reducing);
    fsdp->slices = (dtrain_slice *)dtrain__alloc(memory, cuts * sizeof *fsdp->slices);
    fsdp->notes = (dtrain__fsdp_note *)dtrain__alloc(memory, world * sizeof *fsdp->notes);
    fsdp->announcements = (double *)dtrain__alloc(memory, 2 * world * sizeof(double));
    fsdp->events = (dtrain__fsdp_event *)dtrain__alloc(memory, fsdp->desc.trace_events * sizeof *fsdp->events);
    fsdp->state = (float *)dtrain__alloc(memory, floats * layout->grads * sizeof(float));
    fsdp->masters = (float *)dtrain__alloc(memory, dtrain__plan_apart(layout));
    fsdp->levels[0] = (float *)dtrain__alloc(memory, layout->grads * sizeof(float));
    if (fsdp->units == NULL || fsdp->copying == NULL || fsdp->reserved == NULL || fsdp->lr_factors == NULL ||
        fsdp->counts == NULL || fsdp->gathering == NULL || fsdp->reducing == NULL || fsdp->slices == NULL ||
        fsdp->notes == NULL || fsdp->announcements == NULL || fsdp->events == NULL || fsdp->state == NULL ||
        fsdp->masters == NULL || fsdp->levels[0] == NULL || fsdp->packed_counts == NULL || fsdp->stages == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "dtrain_fsdp_create: no memory on rank %d for slices of %zu weights and %zu gradients",
                            dtrain__fsdp_rank(fsdp), layout->weights, layout->grads);
    fsdp->decays = fsdp->lr_factors + params;
    return dtrain__fsdp_reserve(fsdp);
}

/* Gives every rank the first values of parameters that have memory of the caller's. */
static dtrain_status dtrain__fsdp_first_values(dtrain_fsdp *fsdp)
{
    dtrain__layout *layout = &fsdp->layout;
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < layout->table_count && fsdp->world != NULL && !fsdp->desc.no_broadcast; i++)
        if (status == DTRAIN_OK && !(fsdp->reserved[i] & 1))
            status = dtrain_broadcast(fsdp->world, layout->table[i].data, dtrain_param_elements(&layout->table[i]),
                                      layout->table[i].dtype, 0);
    for (size_t i = 0; status == DTRAIN_OK && i < layout->cut_count; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        if ((fsdp->reserved[cut->param] & 1) || cut->count == 0)
            continue;
        if (layout->apart && cut->own_count > 0 && !cut->home)
            memcpy(fsdp->masters + cut->weight, dtrain__fsdp_full(fsdp, cut) + cut->own,
                   cut->own_count * sizeof(float));
        dtrain__fsdp_round(fsdp, dtrain__fsdp_full(fsdp, cut), cut->count);
    }
    for (int i = 0; i < layout->unit_count; i++) {
        fsdp->trained_units += layout->units[i].trained > 0;
        if (layout->resident)
            dtrain__fsdp_page_weights(fsdp, i, 1);
    }
    return status;
}

/* Memory for gradients of the caller's may hold anything; reserved pages are zeros. */
static void dtrain__fsdp_zero_grads(dtrain_fsdp *fsdp)
{
    for (size_t i = 0; i < fsdp->layout.table_count; i++) {
        const dtrain_param *param = &fsdp->layout.table[i];
        if (param->grad != NULL && !(fsdp->reserved[i] & 2))
            memset(param->grad, 0, dtrain_param_elements(param) * sizeof(float));
    }
}

static dtrain_status dtrain__fsdp_init(dtrain_fsdp *fsdp, const dtrain_param *table, size_t count, dtrain_status status)
{
    const char *bad = dtrain__optimizer_bad(&fsdp->optimizer, 1);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_groups(&fsdp->desc);
    if (status == DTRAIN_OK && bad != NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_create: the optimizer's desc has a bad %s", bad);
    if (status == DTRAIN_OK)
        status = dtrain__layout_create(&fsdp->layout, table, count, &fsdp->desc, dtrain_comm_size(fsdp->comm),
                                       dtrain__fsdp_rank(fsdp), &fsdp->memory);
    if (dtrain_comm_size(fsdp->comm) > 1)
        status = dtrain__fsdp_compare(fsdp, table, count, status);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_groups(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_allocate(fsdp);
    if (status != DTRAIN_OK)
        return status;
    dtrain__fsdp_group_params(fsdp);
    for (size_t i = 0; i < fsdp->layout.cut_count; i++)
        dtrain__fsdp_describe(fsdp, i);
    fsdp->desc.groups = NULL;
    fsdp->scattering = fsdp->bucket = -1;
    dtrain__fsdp_zero_grads(fsdp);
    dtrain__fsdp_reset(fsdp);
    return dtrain__fsdp_first_values(fsdp);
}

/* checked: what the caller found wrong, which the other ranks are to learn. */
static dtrain_status dtrain__fsdp_make(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                       const dtrain_fsdp_desc *desc, dtrain_status checked)
{
    if (fsdp == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_create: fsdp and comm are needed, got NULL");
    *fsdp = NULL;
    dtrain_allocator memory = {NULL, NULL, 0, 0};
    memory.resize = dtrain_comm_allocator(comm)->resize;
    memory.user = dtrain_comm_allocator(comm)->user;
    dtrain_fsdp *made = (dtrain_fsdp *)dtrain__alloc(&memory, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_fsdp_create: no memory for %zu bytes", sizeof *made);
    made->memory = memory;
    made->comm = comm;
    if (desc != NULL)
        made->desc = *desc;
    made->desc.gather_dtype = made->desc.gather_dtype == 0 ? DTRAIN_F32 : made->desc.gather_dtype;
    made->desc.reduce_dtype = made->desc.reduce_dtype == 0 ? DTRAIN_F32 : made->desc.reduce_dtype;
    made->desc.bucket_bytes = made->desc.bucket_bytes == 0 ? DTRAIN__FSDP_BUCKET : made->desc.bucket_bytes;
    made->optimizer = dtrain__optimizer_defaults(&made->desc.optimizer);
    made->loss_scale = made->desc.loss_scale > 0.0f ? made->desc.loss_scale : 1.0f;
    dtrain_status status = dtrain__fsdp_init(made, table, count, checked);
    if (status != DTRAIN_OK) {
        dtrain__error cause = dtrain__thread_error;
        dtrain_fsdp_destroy(made);
        return dtrain__report(&cause);
    }
    *fsdp = made;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_create(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table,
                                            size_t count, const dtrain_fsdp_desc *desc)
{
    return dtrain__fsdp_make(fsdp, comm, table, count, desc, DTRAIN_OK);
}

/* Gives what is under way until then to end; after that, where groups are the object's own, breaks them off. */
static void dtrain__fsdp_let_go(dtrain_fsdp *fsdp, dtrain_work **work, int64_t until_ns)
{
    dtrain_comm *groups[] = {fsdp->gathers, fsdp->reduces, fsdp->copies, fsdp->world};
    int ended;
    if (*work == NULL)
        return;
    dtrain__work_end(*work, fsdp->shares_comm ? INT64_MAX : until_ns, &ended);
    for (size_t i = 0; !ended && i < sizeof groups / sizeof groups[0]; i++)
        if (groups[i] != NULL)
            dtrain_comm_abort(groups[i], "it has destroyed its dtrain_fsdp while this was under way");
    if (!ended)
        dtrain_work_wait(*work);
    *work = NULL;
}

static void dtrain__fsdp_quiesce(dtrain_fsdp *fsdp)
{
    int64_t until_ns = dtrain__os_now_ns() + DTRAIN__FSDP_GRACE_NS;
    dtrain__fsdp_let_go(fsdp, &fsdp->announcing, until_ns);
    for (size_t i = 0; fsdp->gathering != NULL && fsdp->reducing != NULL && i < fsdp->layout.cut_count; i++) {
        dtrain__fsdp_let_go(fsdp, &fsdp->gathering[i], until_ns);
        dtrain__fsdp_let_go(fsdp, &fsdp->reducing[i], until_ns);
    }
    for (int i = 0; fsdp->copying != NULL && i < fsdp->layout.unit_count; i++)
        dtrain__fsdp_let_go(fsdp, &fsdp->copying[i], until_ns);
}

static void dtrain__fsdp_free(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    dtrain_allocator *memory = &fsdp->memory, last;
    size_t cuts = layout->cut_count, params = layout->table_count, units = (size_t)layout->unit_count;
    size_t world = (size_t)dtrain_comm_size(fsdp->comm), floats = dtrain__plan_state_floats(&fsdp->optimizer);
    dtrain__free(memory, fsdp->units, units * sizeof *fsdp->units);
    dtrain__free(memory, fsdp->copying, units * sizeof *fsdp->copying);
    dtrain__free(memory, fsdp->reserved, params);
    dtrain__free(memory, fsdp->lr_factors, 2 * params * sizeof(float));
    dtrain__free(memory, fsdp->counts, cuts * (size_t)layout->shards * sizeof(size_t));
    dtrain__free(memory, fsdp->packed_counts, 2 * units * (size_t)layout->shards * sizeof(size_t));
    dtrain__free(memory, fsdp->stages, DTRAIN__FSDP_STAGES * layout->stage * sizeof(float));
    dtrain__free(memory, fsdp->gathering, cuts * sizeof *fsdp->gathering);
    dtrain__free(memory, fsdp->reducing, cuts * sizeof *fsdp->reducing);
    dtrain__free(memory, fsdp->slices, cuts * sizeof *fsdp->slices);
    dtrain__free(memory, fsdp->notes, world * sizeof *fsdp->notes);
    dtrain__free(memory, fsdp->announcements, 2 * world * sizeof(double));
    dtrain__free(memory, fsdp->events, fsdp->desc.trace_events * sizeof *fsdp->events);
    dtrain__free(memory, fsdp->state, floats * layout->grads * sizeof(float));
    dtrain__free(memory, fsdp->masters, dtrain__plan_apart(layout));
    for (int i = 0; i < DTRAIN__FSDP_LEVELS; i++) {
        dtrain__free(memory, fsdp->levels[i], layout->grads * sizeof(float));
        dtrain__free(memory, fsdp->full_levels[i], layout->trained * sizeof(float));
    }
    dtrain__pages_destroy(&fsdp->weight_pages);
    dtrain__pages_destroy(&fsdp->grad_pages);
    dtrain__layout_destroy(&fsdp->layout, memory);
    last = *memory;
    dtrain__free(&last, fsdp, sizeof *fsdp);
}

DTRAIN_API void dtrain_fsdp_destroy(dtrain_fsdp *fsdp)
{
    if (fsdp == NULL)
        return;
    dtrain__fsdp_quiesce(fsdp);
    if (!fsdp->shares_comm) {
        dtrain_comm_destroy(fsdp->gathers);
        dtrain_comm_destroy(fsdp->reduces);
        dtrain_comm_destroy(fsdp->copies);
        dtrain_comm_destroy(fsdp->world);
    }
    dtrain__fsdp_free(fsdp);
}

#endif

/* ---- >>module-run ----
 * Makes modules and drives them. Parameters come and go by the public calls of >>fsdp; here are the memory of each
 * micro-batch in flight, and the order of calls. A place holds the input, and each layer's output and what it saved; to
 * evaluate, two outputs take turns. Gradients of activations take turns in two halves of a block that all places share:
 * a backward pass runs to its end before the next begins.
 *
 * What fails on one rank must not keep others waiting: from then on callbacks are left out, gathers and reductions are
 * not. */
#ifndef DTRAIN__MODULE
#define DTRAIN__MODULE

typedef struct dtrain__module_use {
    size_t param, offset; /* of the table; elements to the layer's part of a stacked one */
    int unit;
} dtrain__module_use;

typedef struct dtrain__module_layer {
    dtrain_layer desc; /* its params are not kept */
    size_t first_use;
    int unit;        /* that is gathered for it; -1: none */
    int first, last; /* layers of that unit */
} dtrain__module_layer;

/* A layer's input, and what the layer saves. */
typedef struct dtrain__module_value {
    dtrain_tensor tensor;
    size_t saved_bytes;
    void *saved;
} dtrain__module_value;

typedef struct dtrain__module_place {
    unsigned char *block;
    size_t bytes, half;           /* of the block; of the room for one gradient */
    dtrain__module_value *values; /* of each layer; the last is the output */
    void *batch;
    int sized, live;      /* values have shapes and memory; a forward was run, and no backward since */
    dtrain_status failed; /* why callbacks are left out */
} dtrain__module_place;

struct dtrain_module {
    dtrain_allocator own; /* used when the caller gives none */
    dtrain_allocator *allocator;
    dtrain__module_layer *layers;
    int layer_count, place_count; /* the last place is to evaluate */
    dtrain_param *table;
    size_t table_count, use_count, text_bytes, text_used, gradient_bytes;
    char *text; /* names */
    dtrain__module_use *uses;
    float **addresses; /* of parameters, then of their gradients, a use */
    dtrain__module_place *places;
    dtrain__module_value *values; /* of all places */
    unsigned char *gradients;
    dtrain__error error;
};

/* One pass over the layers. */
typedef struct dtrain__module_run {
    dtrain_fsdp *fsdp;
    dtrain_module *module;
    dtrain__module_place *place;
    const char *call;
    int backward;
    dtrain_layer_context context;
} dtrain__module_run;

/* ---- making one ---- */

static const char *dtrain__module_keep(dtrain_module *module, const char *name)
{
    size_t bytes = strlen(name) + 1;
    char *kept = module->text + module->text_used;
    memcpy(kept, name, bytes);
    module->text_used += bytes;
    return kept;
}

static int dtrain__module_has_unit(const dtrain_module *module, int layers, int unit)
{
    for (int i = 0; i < layers; i++)
        if (module->layers[i].unit == unit)
            return 1;
    return 0;
}

/* Finds one parameter of a layer. Layers before it are known; `highest` is the last unit of theirs. */
static dtrain_status dtrain__module_resolve(dtrain_module *module, int index, const char *name, int highest,
                                            dtrain__module_use *use)
{
    dtrain__module_layer *layer = &module->layers[index];
    size_t i = 0;
    while (name != NULL && i < module->table_count && strcmp(module->table[i].name, name) != 0)
        i++;
    if (name == NULL || i == module->table_count)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: layer %s lists parameter %s, which the table does not have",
                            layer->desc.name, name != NULL ? name : "NULL");
    const dtrain_param *param = &module->table[i];
    int steps = layer->desc.unit - param->unit, layers = (int)dtrain__params_layers(param);
    use->param = i;
    use->unit = param->stacked ? layer->desc.unit : param->unit;
    if (param->stacked && (steps < 0 || steps >= layers))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: layer %s has unit %d, but its parameter %s is stacked over units "
                            "%d to %d: give it one of these",
                            layer->desc.name, layer->desc.unit, name, param->unit, param->unit + layers - 1);
    if (param->stacked)
        use->offset = dtrain_param_elements(param) / (size_t)layers * (size_t)steps;
    if (use->unit == layer->desc.unit && use->unit >= highest)
        layer->unit = use->unit;
    else if (!param->tied || !dtrain__module_has_unit(module, index, use->unit))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: layer %s of unit %d, after unit %d, uses parameter %s of unit %d: "
                            "order layers by unit, or where an earlier layer has that unit too, set tied in the table",
                            layer->desc.name, layer->desc.unit, highest, name, use->unit);
    return DTRAIN_OK;
}

static dtrain_status dtrain__module_link(dtrain_module *module, const dtrain_layer *layers)
{
    size_t used = 0;
    int highest = -1;
    for (int i = 0; i < module->layer_count; i++) {
        dtrain__module_layer *layer = &module->layers[i];
        layer->desc = layers[i];
        layer->desc.name = dtrain__module_keep(module, layers[i].name);
        layer->desc.params = NULL;
        layer->first_use = used;
        layer->unit = -1;
        for (size_t k = 0; k < layers[i].param_count; k++) {
            dtrain_status status =
                dtrain__module_resolve(module, i, layers[i].params[k], highest, &module->uses[used++]);
            if (status != DTRAIN_OK)
                return status;
        }
        highest = layer->unit > highest ? layer->unit : highest;
    }
    for (int i = 0; i < module->layer_count; i++) {
        dtrain__module_layer *layer = &module->layers[i];
        layer->first = layer->last = i;
        for (int k = 0; k < module->layer_count; k++) {
            if (module->layers[k].unit == layer->unit) {
                layer->first = k < layer->first ? k : layer->first;
                layer->last = k > layer->last ? k : layer->last;
            }
        }
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__module_check(const dtrain_layer *layers, size_t count, const dtrain_param *table,
                                          size_t table_count, int micro_batches)
{
    if (layers == NULL || count == 0 || count >= INT_MAX || micro_batches < 0 || micro_batches > 1 << 20)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_module_create: %zu layers at %p, micro_batches is %d: expected at least one layer, "
                            "and 0 to %d micro-batches",
                            count, (const void *)layers, micro_batches, 1 << 20);
    for (size_t i = 0; i < count; i++)
        if (layers[i].name == NULL || layers[i].name[0] == 0 || layers[i].forward == NULL ||
            layers[i].backward == NULL || (layers[i].param_count > 0 && layers[i].params == NULL))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "dtrain_module_create: layer %zu (%s) needs a name, forward, backward, and as many "
                                "params as it counts",
                                i, layers[i].name != NULL ? layers[i].name : "NULL");
    dtrain_status status = dtrain__params_check_for(table, table_count, 1);
    for (size_t i = 0; status == DTRAIN_OK && i < table_count; i++)
        if (table[i].dtype != DTRAIN_F32)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "dtrain_module_create: parameter %s is %s: list F32 parameters alone", table[i].name,
                                dtrain_dtype_name(table[i].dtype));
    return status;
}

/* Every array; sizes were counted before. */
static dtrain_status dtrain__module_allocate(dtrain_module *module)
{
    dtrain_allocator *memory = module->allocator;
    size_t layers = (size_t)module->layer_count, places = (size_t)module->place_count;
    module->layers = (dtrain__module_layer *)dtrain__alloc(memory, layers * sizeof *module->layers);
    module->table = (dtrain_param *)dtrain__alloc(memory, module->table_count * sizeof *module->table);
    module->text = (char *)dtrain__alloc(memory, module->text_bytes);
    module->uses = (dtrain__module_use *)dtrain__alloc(memory, module->use_count * sizeof *module->uses);
    module->addresses = (float **)dtrain__alloc(memory, 2 * module->use_count * sizeof *module->addresses);
    module->places = (dtrain__module_place *)dtrain__alloc(memory, places * sizeof *module->places);
    module->values = (dtrain__module_value *)dtrain__alloc(memory, places * (layers + 1) * sizeof *module->values);
    if (module->layers == NULL || module->table == NULL || module->text == NULL || module->uses == NULL ||
        module->addresses == NULL || module->places == NULL || module->values == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_module_create: no memory for %zu layers", layers);
    for (size_t i = 0; i < places; i++)
        module->places[i].values = module->values + i * (layers + 1);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_module_create(dtrain_module **module, const dtrain_layer *layers, size_t count,
                                              const dtrain_param *table, size_t table_count,
                                              const dtrain_module_desc *desc)
{
    dtrain_allocator own = {NULL, NULL, 0, 0};
    int micro_batches = desc != NULL ? desc->micro_batches : 0;
    if (module == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_module_create: module is NULL: nowhere to put it");
    *module = NULL;
    dtrain_status status = dtrain__module_check(layers, count, table, table_count, micro_batches);
    if (status != DTRAIN_OK)
        return status;
    dtrain_allocator *memory = desc != NULL && desc->allocator != NULL ? desc->allocator : &own;
    dtrain_module *made = (dtrain_module *)dtrain__alloc(memory, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_module_create: no memory for %zu bytes", sizeof *made);
    made->own = own;
    made->allocator = memory == &own ? &made->own : memory;
    made->layer_count = (int)count;
    made->place_count = (micro_batches > 0 ? micro_batches : 1) + 1;
    made->table_count = table_count;
    for (size_t i = 0; i < count; i++) {
        made->use_count += layers[i].param_count;
        made->text_bytes += strlen(layers[i].name) + 1;
    }
    for (size_t i = 0; i < table_count; i++)
        made->text_bytes += strlen(table[i].name) + 1;
    status = dtrain__module_allocate(made);
    for (size_t i = 0; status == DTRAIN_OK && i < table_count; i++) {
        made->table[i] = table[i];
        made->table[i].name = dtrain__module_keep(made, table[i].name);
    }
    if (status == DTRAIN_OK)
        status = dtrain__module_link(made, layers);
    if (status == DTRAIN_OK)
        *module = made;
    else
        dtrain_module_destroy(made);
    return status;
}

DTRAIN_API void dtrain_module_destroy(dtrain_module *module)
{
    if (module == NULL)
        return;
    dtrain_allocator *memory = module->allocator, last;
    size_t layers = (size_t)module->layer_count, places = (size_t)module->place_count;
    for (size_t i = 0; module->places != NULL && i < places; i++)
        dtrain__free(memory, module->places[i].block, module->places[i].bytes);
    dtrain__free(memory, module->gradients, module->gradient_bytes);
    dtrain__free(memory, module->layers, layers * sizeof *module->layers);
    dtrain__free(memory, module->table, module->table_count * sizeof *module->table);
    dtrain__free(memory, module->text, module->text_bytes);
    dtrain__free(memory, module->uses, module->use_count * sizeof *module->uses);
    dtrain__free(memory, module->addresses, 2 * module->use_count * sizeof *module->addresses);
    dtrain__free(memory, module->places, places * sizeof *module->places);
    dtrain__free(memory, module->values, places * (layers + 1) * sizeof *module->values);
    last = module->own;
    dtrain__free(memory == &module->own ? &last : memory, module, sizeof *module);
}

DTRAIN_API const char *dtrain_module_error(const dtrain_module *module)
{
    return module != NULL ? module->error.text : "";
}

/* ---- memory of a micro-batch ---- */

/* Adds bytes, rounded up to whole cache lines; 0: they overflow. */
static int dtrain__module_add(size_t *total, size_t bytes)
{
    size_t rounded;
    return dtrain__add_size(bytes, DTRAIN__CACHE_LINE - 1, &rounded) &&
           dtrain__add_size(*total, rounded / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE, total);
}

/* Sees to it that a block has as many bytes; what it holds is lost when it grows, but kept when it cannot: other places
 * may count on it. */
static int dtrain__module_room(dtrain_module *module, unsigned char **block, size_t *have, size_t need)
{
    if (*block != NULL && need <= *have)
        return 1;
    unsigned char *more = (unsigned char *)dtrain__alloc(module->allocator, need);
    if (more == NULL)
        return 0;
    dtrain__free(module->allocator, *block, *have);
    *block = more;
    *have = need;
    return 1;
}

/* This rank leaves the callbacks out from here on. Where a step follows, it ends for all; else the caller is told. */
static void dtrain__module_give_up(dtrain__module_run *run, dtrain_status status, const char *why)
{
    int steps = run->fsdp != NULL && run->context.micro_batch != DTRAIN_EVALUATE;
    run->place->failed = status;
    dtrain__fail(&run->module->error, status, "%s on rank %d: %s%s", run->call,
                 run->fsdp != NULL ? dtrain__fsdp_rank(run->fsdp) : 0, why,
                 steps ? ": the step will be dropped on all ranks" : "");
    if (steps)
        dtrain_fsdp_fail(run->fsdp, why);
}

/* A layer's callback has returned. */
static void dtrain__module_returned(dtrain__module_run *run, int index, const char *what, dtrain_status status)
{
    char why[DTRAIN__FSDP_WHY];
    if (status == DTRAIN_OK)
        return;
    snprintf(why, sizeof why, "layer %.48s: %s returned %s (%d)", run->module->layers[index].desc.name, what,
             dtrain_status_name(status), (int)status);
    dtrain__module_give_up(run, status, why);
}

/* Asks each layer for its output's shape. */
static void dtrain__module_shapes(dtrain__module_run *run)
{
    dtrain__module_place *place = run->place;
    for (int i = 0; place->failed == DTRAIN_OK && i < run->module->layer_count; i++) {
        const dtrain_layer *layer = &run->module->layers[i].desc;
        dtrain_tensor input = place->values[i].tensor, output = input;
        dtrain_status status = DTRAIN_OK;
        place->values[i].saved_bytes = 0;
        input.data = output.data = NULL;
        if (layer->shape != NULL)
            status = layer->shape(layer->user, &input, &output, &place->values[i].saved_bytes);
        dtrain__module_returned(run, i, "shape", status);
        if (status == DTRAIN_OK)
            status = dtrain__tensor_shape(&place->values[i + 1].tensor, output.dtype, output.ndim, output.shape);
        if (place->failed == DTRAIN_OK)
            dtrain__module_returned(run, i, "shape, whose output is no tensor,", status);
    }
}

/* Counts what a place needs: *need, of it *most for one value where values take turns. 0: more than memory. */
static int dtrain__module_count(dtrain__module_run *run, size_t *need, size_t *most)
{
    int layers = run->module->layer_count, evaluates = run->context.micro_batch == DTRAIN_EVALUATE, fits = 1;
    size_t largest = 0, all = 0, saved = 0;
    for (int i = 0; i <= layers; i++) {
        const dtrain__module_value *value = &run->place->values[i];
        largest = i > 0 && value->tensor.bytes > largest ? value->tensor.bytes : largest;
        saved = value->saved_bytes > saved ? value->saved_bytes : saved;
        fits = fits && dtrain__module_add(&all, value->tensor.bytes) && dtrain__module_add(&all, value->saved_bytes);
    }
    *most = 0;
    fits = fits && dtrain__module_add(most, largest) && dtrain__mul_size(*most, 2, need);
    if (!evaluates)
        *need = all;
    return fits && (!evaluates || dtrain__module_add(need, saved));
}

/* Gives values and what is saved their addresses in the block. */
static void dtrain__module_lay_out(dtrain__module_run *run, const dtrain_tensor *input, size_t most)
{
    dtrain__module_place *place = run->place;
    int evaluates = run->context.micro_batch == DTRAIN_EVALUATE;
    size_t at = 0;
    for (int i = 0; i <= run->module->layer_count; i++) {
        dtrain__module_value *value = &place->values[i];
        value->tensor.data = place->block + (evaluates ? (size_t)(i & 1) * most : at);
        dtrain__module_add(&at, value->tensor.bytes);
        value->saved = place->block + (evaluates ? 2 * most : at);
        dtrain__module_add(&at, value->saved_bytes);
    }
    if (evaluates)
        place->values[0].tensor.data = input->data;
    else if (input->bytes > 0)
        memcpy(place->values[0].tensor.data, input->data, input->bytes);
    place->half = most;
    place->sized = 1;
}

/* Makes a place ready for an input. */
static void dtrain__module_prepare(dtrain__module_run *run, const dtrain_tensor *input)
{
    dtrain_module *module = run->module;
    dtrain__module_place *place = run->place;
    int evaluates = run->context.micro_batch == DTRAIN_EVALUATE;
    size_t need, most;
    place->failed = DTRAIN_OK;
    place->sized = place->live = 0;
    place->batch = run->context.batch;
    place->values[0].tensor = *input;
    dtrain__module_shapes(run);
    if (place->failed != DTRAIN_OK)
        return;
    if (!dtrain__module_count(run, &need, &most) || !dtrain__module_room(module, &place->block, &place->bytes, need) ||
        (!evaluates && !dtrain__module_room(module, &module->gradients, &module->gradient_bytes, 2 * most)))
        dtrain__module_give_up(run, DTRAIN_ERR_MEMORY, "no memory for activations");
    else
        dtrain__module_lay_out(run, input, most);
}

/* ---- passes ---- */

/* Looks the addresses of parameters up: another object of FSDP may have come since. */
static dtrain_status dtrain__module_bind(dtrain__module_run *run)
{
    dtrain_module *module = run->module;
    const dtrain_param *table = run->fsdp != NULL ? run->fsdp->layout.table : module->table;
    int fits = run->fsdp == NULL || run->fsdp->layout.table_count == module->table_count;
    for (size_t i = 0; i < module->use_count; i++) {
        const dtrain__module_use *use = &module->uses[i];
        const dtrain_param *mine = &module->table[use->param], *param = fits ? &table[use->param] : mine;
        if (!fits || strcmp(mine->name, param->name) != 0 || mine->unit != param->unit ||
            mine->stacked != param->stacked || dtrain_param_elements(mine) != dtrain_param_elements(param))
            return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                                "%s: fsdp was made from another table than the module (see parameter %s): give both "
                                "the same",
                                run->call, mine->name);
        if (param->data == NULL)
            return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                                "%s: parameter %s has no memory: give an fsdp, or set data in the module's table",
                                run->call, mine->name);
        module->addresses[i] = (float *)param->data + use->offset;
        module->addresses[module->use_count + i] =
            param->frozen || param->grad == NULL ? NULL : (float *)param->grad + use->offset;
    }
    return DTRAIN_OK;
}

/* Begins a public call. */
static dtrain_status dtrain__module_enter(dtrain__module_run *run, const char *call, dtrain_fsdp *fsdp,
                                          dtrain_module *module, int micro_batch)
{
    int lowest = run->backward ? 0 : DTRAIN_EVALUATE;
    if (module == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: module is NULL: create it first", call);
    if (micro_batch < lowest || micro_batch >= module->place_count - 1)
        return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                            "%s: micro_batch is %d, expected 0 to %d%s: the module's desc says how many are in flight",
                            call, micro_batch, module->place_count - 2, lowest < 0 ? ", or DTRAIN_EVALUATE" : "");
    run->call = call;
    run->fsdp = fsdp;
    run->module = module;
    run->place = &module->places[micro_batch >= 0 ? micro_batch : module->place_count - 1];
    run->context.micro_batch = micro_batch;
    return dtrain__module_bind(run);
}

/* Makes the unit of a tied parameter readable, beside those that rotate: it was gathered by an earlier layer, so that
 * nothing is on its way here in most passes, and the direction of the pass is not disturbed. */
static dtrain_status dtrain__module_attend(dtrain_fsdp *fsdp, int unit, int backward)
{
    dtrain_status status = dtrain__fsdp_advance(fsdp, unit);
    if (status == DTRAIN_OK && backward)
        dtrain__fsdp_page_grads(fsdp, unit, 1);
    if (status == DTRAIN_OK && !fsdp->layout.resident && fsdp->units[unit].state == DTRAIN__ABSENT)
        status = dtrain__fsdp_gather_start(fsdp, unit);
    if (status == DTRAIN_OK && fsdp->units[unit].state == DTRAIN__COMING)
        status = dtrain__fsdp_gather_finish(fsdp, unit);
    return status;
}

/* Makes a layer's parameters readable, and fills its context in. */
static dtrain_status dtrain__module_open(dtrain__module_run *run, int index)
{
    dtrain_module *module = run->module;
    const dtrain__module_layer *layer = &module->layers[index];
    dtrain_status status = DTRAIN_OK;
    for (size_t k = 0; run->fsdp != NULL && status == DTRAIN_OK && k < layer->desc.param_count; k++)
        if (module->uses[layer->first_use + k].unit != layer->unit)
            status = dtrain__module_attend(run->fsdp, module->uses[layer->first_use + k].unit, run->backward);
    if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 &&
        index == (run->backward ? layer->last : layer->first))
        status = dtrain_fsdp_gather(run->fsdp, layer->unit);
    if (status == DTRAIN_OK && run->fsdp != NULL && layer->unit >= 0 && run->backward)
        dtrain__fsdp_page_grads(run->fsdp, layer->unit, 1); /* FSDP may take this for another forward pass */
    run->context.layer = index;
    run->context.params = module->addresses + layer->first_use;
    run->context.grads = module->addresses + module->use_count + layer->first_use;
    run->context.input = run->place->values[index].tensor;
    run->context.output = run->place->values[index + 1].tensor;
    run->context.saved = run->place->values[index].saved;
    return status;
}

/* Whether a layer's callbacks are to be called, and the pass goes on. */
static int dtrain__module_goes_on(const dtrain__module_run *run, dtrain_status status)
{
    return status == DTRAIN_OK && (run->fsdp != NULL || run->place->failed == DTRAIN_OK);
}

/* Ends a public call: what broke FSDP, or a callback where no step follows that could tell. */
static dtrain_status dtrain__module_leave(dtrain__module_run *run, dtrain_status status)
{
    if (status != DTRAIN_OK)
        run->module->error = dtrain__thread_error;
    else if (run->place->failed != DTRAIN_OK && (run->fsdp == NULL || run->context.micro_batch == DTRAIN_EVALUATE))
        return dtrain__report(&run->module->error);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_forward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                             const dtrain_tensor *input, void *batch, dtrain_tensor *output)
{
    dtrain__module_run run;
    dtrain_tensor checked;
    memset(&run, 0, sizeof run);
    dtrain_status status = dtrain__module_enter(&run, "dtrain_fsdp_forward", fsdp, module, micro_batch);
    if (status != DTRAIN_OK)
        return status;
    if (input == NULL || output == NULL ||
        dtrain_tensor_view(&checked, input->dtype, input->ndim, input->shape, input->data) != DTRAIN_OK)
        return dtrain__fail(&module->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_forward: expected a tensor with data as input, and room for output's view: %s",
                            input == NULL    ? "input is NULL"
                            : output == NULL ? "output is NULL"
                                             : dtrain_last_error());
    run.context.batch = batch;
    dtrain__module_prepare(&run, &checked);
    for (int i = 0; dtrain__module_goes_on(&run, status) && i < module->layer_count; i++) {
        const dtrain__module_layer *layer = &module->layers[i];
        status = dtrain__module_open(&run, i);
        if (status == DTRAIN_OK && run.place->failed == DTRAIN_OK)
            dtrain__module_returned(&run, i, "forward", layer->desc.forward(layer->desc.user, &run.context));
        if (status == DTRAIN_OK && fsdp != NULL && layer->unit >= 0 && i == layer->last)
            status = dtrain_fsdp_release(fsdp, layer->unit);
    }
    run.place->live = micro_batch >= 0 && dtrain__module_goes_on(&run, status);
    memset(output, 0, sizeof *output);
    if (run.place->sized)
        *output = run.place->values[module->layer_count].tensor;
    if (run.place->failed != DTRAIN_OK && output->bytes > 0)
        memset(output->data, 0, output->bytes);
    return dtrain__module_leave(&run, status);
}

/* Says whether a gradient that the caller gives fits the value it belongs to. */
static dtrain_status dtrain__module_check_gradient(dtrain__module_run *run, const char *name,
                                                   const dtrain_tensor *gradient, const dtrain_tensor *value)
{
    dtrain_tensor checked;
    if (gradient == NULL || !run->place->sized)
        return DTRAIN_OK;
    dtrain_status status =
        dtrain_tensor_view(&checked, gradient->dtype, gradient->ndim, gradient->shape, gradient->data);
    if (status == DTRAIN_OK && checked.dtype == value->dtype && checked.ndim == value->ndim &&
        memcmp(checked.shape, value->shape, sizeof checked.shape) == 0)
        return DTRAIN_OK;
    return dtrain__fail(&run->module->error, DTRAIN_ERR_INVALID,
                        "dtrain_fsdp_backward: %s is %s%s, expected %s as the forward pass had it", name,
                        dtrain__tensor_text(gradient).text, gradient->data == NULL ? " without data" : "",
                        dtrain__tensor_text(value).text);
}

static dtrain_status dtrain__module_check_backward(dtrain__module_run *run, const dtrain_tensor *d_output,
                                                   const dtrain_tensor *d_input)
{
    const dtrain__module_value *values = run->place->values;
    if (!run->place->live)
        return dtrain__fail(&run->module->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_backward: micro_batch %d has had no forward since its last backward: run "
                            "dtrain_fsdp_forward in this place first",
                            run->context.micro_batch);
    dtrain_status status =
        dtrain__module_check_gradient(run, "d_output", d_output, &values[run->module->layer_count].tensor);
    if (status == DTRAIN_OK)
        status = dtrain__module_check_gradient(run, "d_input", d_input, &values[0].tensor);
    for (int i = 0; status == DTRAIN_OK && run->fsdp != NULL && i < run->module->layer_count; i++) {
        int unit = run->module->layers[i].unit;
        if (unit >= 0 && run->fsdp->layout.units[unit].trained > 0)
            status = dtrain__fsdp_check_missing(run->fsdp, unit, run->call);
        if (status != DTRAIN_OK)
            run->module->error = dtrain__thread_error;
    }
    return status;
}

/* Calls a layer's backward; values of odd and even numbers have their gradients in halves of one block. */
static void dtrain__module_backward(dtrain__module_run *run, int index, const dtrain_tensor *d_output,
                                    const dtrain_tensor *d_input)
{
    dtrain_module *module = run->module;
    const dtrain_layer *layer = &module->layers[index].desc;
    dtrain_layer_context *context = &run->context;
    context->d_output = context->output;
    context->d_output.data = module->gradients + (size_t)((index + 1) & 1) * run->place->half;
    if (index == module->layer_count - 1)
        context->d_output.data = d_output != NULL ? d_output->data : NULL;
    context->d_input = context->input;
    context->d_input.data = module->gradients + (size_t)(index & 1) * run->place->half;
    if (index == 0)
        context->d_input.data = d_input != NULL ? d_input->data : NULL;
    if (context->d_input.data != NULL || layer->backward_weights == NULL)
        dtrain__module_returned(run, index, "backward", layer->backward(layer->user, context));
    if (run->place->failed == DTRAIN_OK && layer->backward_weights != NULL)
        dtrain__module_returned(run, index, "backward_weights", layer->backward_weights(layer->user, context));
}

DTRAIN_API dtrain_status dtrain_fsdp_backward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                              const dtrain_tensor *d_output, const dtrain_tensor *d_input)
{
    dtrain__module_run run;
    memset(&run, 0, sizeof run);
    run.backward = 1;
    dtrain_status status = dtrain__module_enter(&run, "dtrain_fsdp_backward", fsdp, module, micro_batch);
    if (status == DTRAIN_OK)
        status = dtrain__module_check_backward(&run, d_output, d_input);
    if (status != DTRAIN_OK)
        return status;
    run.place->live = 0;
    run.context.batch = run.place->batch;
    for (int i = module->layer_count - 1; dtrain__module_goes_on(&run, status) && i >= 0; i--) {
        const dtrain__module_layer *layer = &module->layers[i];
        status = dtrain__module_open(&run, i);
        if (status == DTRAIN_OK && run.place->failed == DTRAIN_OK)
            dtrain__module_backward(&run, i, d_output, d_input);
        if (status == DTRAIN_OK && fsdp != NULL && layer->unit >= 0 && i == layer->first)
            status = dtrain_fsdp_reduce(fsdp, layer->unit);
    }
    return dtrain__module_leave(&run, status);
}

#endif

/* ---- >>ddp ----
 * Data-parallel training for a program with an optimizer of its own: FSDP's no-shard, whose sums go back to the table.
 * A rank's micro-batches are folded in full and communicated once. */
#ifndef DTRAIN__DDP
#define DTRAIN__DDP

struct dtrain_ddp {
    dtrain_fsdp *fsdp;
    dtrain_allocator *allocator;
    int open;
    dtrain__error error;
};

/* Keeps the text of a call's error, whoever wrote it. */
static dtrain_status dtrain__ddp_note(dtrain_ddp *ddp, dtrain_status status)
{
    if (status != DTRAIN_OK && ddp != NULL)
        ddp->error = dtrain__thread_error;
    return status;
}

static dtrain_status dtrain__ddp_check_begin(const dtrain_ddp *ddp, int micro_batches, double weight)
{
    if (ddp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_begin: the ddp is NULL: create it first");
    if (ddp->open)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_begin: a step is open: call dtrain_ddp_finish before the next");
    if (micro_batches < 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_begin: micro_batches is %d, expected 0 or more",
                            micro_batches);
    if (!dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_begin: weight is %g, expected a number of at least 0",
                            weight);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_ddp_begin(dtrain_ddp *ddp, int micro_batches, double weight)
{
    dtrain_status status = dtrain__ddp_check_begin(ddp, micro_batches, weight);
    if (status != DTRAIN_OK)
        return dtrain__ddp_note(ddp, status);
    dtrain__fsdp_zero_grads(ddp->fsdp);
    ddp->open = 1;
    return dtrain__ddp_note(ddp, dtrain_fsdp_begin(ddp->fsdp, micro_batches, weight));
}

/* Says whether a call between begin and finish may go on. */
static dtrain_status dtrain__ddp_check_open(const dtrain_ddp *ddp, const char *call)
{
    if (ddp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the ddp is NULL: create it first", call);
    if (!ddp->open)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: no step is open: call dtrain_ddp_begin first", call);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_ddp_reduce(dtrain_ddp *ddp, int unit)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_reduce");
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_enter(ddp->fsdp, "dtrain_ddp_reduce", unit);
    if (status != DTRAIN_OK)
        return dtrain__ddp_note(ddp, status);
    ddp->fsdp->units[unit].fresh = 1; /* it always lies there in full */
    return dtrain__ddp_note(ddp, dtrain__fsdp_reduce_now(ddp->fsdp, unit, "dtrain_ddp_reduce"));
}

DTRAIN_API dtrain_status dtrain_ddp_next(dtrain_ddp *ddp)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_next");
    if (status == DTRAIN_OK && !ddp->fsdp->just_ended && ddp->fsdp->ended >= ddp->fsdp->announced)
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                              "dtrain_ddp_next: all %d micro-batches announced to dtrain_ddp_begin are over: announce "
                              "as many as you compute",
                              ddp->fsdp->announced);
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_next(ddp->fsdp);
    return dtrain__ddp_note(ddp, status);
}

/* Copies the sums back. */
static void dtrain__ddp_unpack(dtrain_fsdp *fsdp)
{
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__cut *cut = &fsdp->layout.cuts[i];
        if (cut->trained && cut->count > 0)
            memcpy(dtrain__fsdp_full_grad(fsdp, cut), fsdp->grads + cut->grad, cut->count * sizeof(float));
    }
}

DTRAIN_API dtrain_status dtrain_ddp_finish(dtrain_ddp *ddp, double *total_weight)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_finish");
    if (status != DTRAIN_OK)
        return dtrain__ddp_note(ddp, status);
    dtrain_fsdp *fsdp = ddp->fsdp;
    int begun = fsdp->ended + (fsdp->reduced_units > 0);
    if (fsdp->broken.status == DTRAIN_OK && fsdp->trained_units > 0 && begun < fsdp->announced)
        return dtrain__ddp_note(ddp, dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                                  "dtrain_ddp_finish: %d of %d micro-batches were reduced: reduce the "
                                                  "rest, or call dtrain_ddp_next for those that used no unit",
                                                  begun, fsdp->announced));
    ddp->open = 0;
    status = dtrain__fsdp_enter(fsdp, "dtrain_ddp_finish", 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_finish_now(fsdp, 1);
    if (total_weight != NULL)
        *total_weight = fsdp->total_weight;
    if (status == DTRAIN_OK && fsdp->grads != NULL)
        dtrain__ddp_unpack(fsdp);
    if (status == DTRAIN_OK)
        dtrain__fsdp_reset(fsdp);
    return dtrain__ddp_note(ddp, status);
}

DTRAIN_API const char *dtrain_ddp_error(const dtrain_ddp *ddp)
{
    return ddp != NULL ? ddp->error.text : "";
}

static dtrain_status dtrain__ddp_init(dtrain_ddp *ddp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                      const dtrain_ddp_desc *desc)
{
    dtrain_fsdp_desc full;
    size_t bytes;
    dtrain_status status = dtrain_params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_f32(table, count);
    dtrain_param *copy = NULL;
    if (status == DTRAIN_OK && dtrain__mul_size(count, sizeof *copy, &bytes))
        copy = (dtrain_param *)dtrain__alloc(ddp->allocator, bytes);
    if (status == DTRAIN_OK && copy == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_ddp_create: no memory for %zu parameters", count);
    for (size_t i = 0; copy != NULL && i < count; i++) {
        copy[i] = table[i];
        copy[i].frozen = !dtrain__params_trained(&table[i]);
    }
    memset(&full, 0, sizeof full);
    full.strategy = DTRAIN_NO_SHARD;
    full.optimizer.kind = DTRAIN_OPTIMIZER_NONE;
    full.keep_full_grads = 1;
    full.no_broadcast = desc->no_broadcast;
    full.no_overlap = desc->no_overlap;
    full.bucket_bytes = desc->bucket_bytes;
    dtrain_status made = dtrain__fsdp_make(&ddp->fsdp, comm, copy != NULL ? copy : table, count, &full, status);
    dtrain__free(ddp->allocator, copy, count * sizeof *copy);
    return made;
}

DTRAIN_API dtrain_status dtrain_ddp_create(dtrain_ddp **ddp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                           const dtrain_ddp_desc *desc)
{
    dtrain_ddp_desc full = {0, 0, 0};
    if (ddp == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_create: ddp and comm are needed, got NULL");
    *ddp = NULL;
    if (desc != NULL)
        full = *desc;
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain_ddp *made = (dtrain_ddp *)dtrain__alloc(allocator, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_ddp_create: no memory for %zu bytes", sizeof *made);
    made->allocator = allocator;
    dtrain_status status = dtrain__ddp_init(made, comm, table, count, &full);
    if (status == DTRAIN_OK)
        *ddp = made;
    else
        dtrain__free(allocator, made, sizeof *made);
    return status;
}

DTRAIN_API void dtrain_ddp_destroy(dtrain_ddp *ddp)
{
    if (ddp == NULL)
        return;
    dtrain_fsdp_destroy(ddp->fsdp);
    dtrain__free(ddp->allocator, ddp, sizeof *ddp);
}

#endif

/* ---- >>aggregator ----
 * One training step in three parts: compute, aggregate, apply; and the two aggregators that come with the library.
 * For programs that want the order of a step kept for them; those with a loop of their own use >>ddp. */
#ifndef DTRAIN__AGGREGATOR
#define DTRAIN__AGGREGATOR

static void dtrain__aggregator_shorten(const dtrain_param *table, size_t count, double max_norm, double norm)
{
    uint64_t mode = dtrain__fpmode_enter();
    float factor = dtrain__train_ratio(max_norm, norm);
    for (size_t i = 0; i < count; i++) {
        float *grad = (float *)table[i].grad;
        if (dtrain__params_trained(&table[i]))
            dtrain__train_kernels_get()->multiply(grad, grad, factor, dtrain_param_elements(&table[i]));
    }
    dtrain__fpmode_restore(mode);
}

DTRAIN_API dtrain_status dtrain_clip_grad_norm(const dtrain_param *table, size_t count, float max_norm, double *norm)
{
    dtrain__exact sum;
    if (!dtrain__train_finite((double)max_norm) || max_norm < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_clip_grad_norm: max_norm is %g, expected a number of at least 0", (double)max_norm);
    dtrain_status status = dtrain__params_check_f32(table, count);
    if (status != DTRAIN_OK)
        return status;
    memset(&sum, 0, sizeof sum);
    for (size_t i = 0; i < count; i++) {
        if (dtrain__params_trained(&table[i]))
            dtrain__exact_add_squares(&sum, (const float *)table[i].grad, dtrain_param_elements(&table[i]));
    }
    double length = dtrain__train_root(dtrain__exact_value(&sum));
    if (norm != NULL)
        *norm = length;
    if (max_norm != 0.0f && dtrain__exact_finite(&sum) && length > (double)max_norm)
        dtrain__aggregator_shorten(table, count, (double)max_norm, length);
    return DTRAIN_OK;
}

static void dtrain__aggregator_divide(const dtrain_param *table, size_t count, double total_weight)
{
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; total_weight > 0.0 && i < count; i++) {
        float *grad = (float *)table[i].grad;
        if (dtrain__params_trained(&table[i]))
            dtrain__train_kernels_get()->divide(grad, grad, (float)total_weight, dtrain_param_elements(&table[i]));
    }
    dtrain__fpmode_restore(mode);
}

static dtrain_status dtrain__aggregator_check(const dtrain_param *table, size_t count, double weight)
{
    if (!dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "aggregate: weight is %g, expected a number of at least 0",
                            weight);
    return dtrain__params_check_f32(table, count);
}

static dtrain_status dtrain__aggregator_run_local(void *self, const dtrain_param *table, size_t count, double weight,
                                                  double *total_weight)
{
    dtrain_status status = dtrain__aggregator_check(table, count, weight);
    (void)self;
    if (status != DTRAIN_OK)
        return status;
    *total_weight = weight;
    dtrain__aggregator_divide(table, count, weight);
    return DTRAIN_OK;
}

static dtrain_status dtrain__aggregator_run_all_reduce(void *self, const dtrain_param *table, size_t count,
                                                       double weight, double *total_weight)
{
    dtrain_comm *comm = (dtrain_comm *)self;
    dtrain_status status = dtrain__aggregator_check(table, count, weight);
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(comm, &weight, total_weight, 1, DTRAIN_F64, DTRAIN_SUM);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++) {
        if (dtrain__params_trained(&table[i]))
            status = dtrain_all_reduce(comm, table[i].grad, table[i].grad, dtrain_param_elements(&table[i]), DTRAIN_F32,
                                       DTRAIN_SUM);
    }
    if (status == DTRAIN_OK)
        dtrain__aggregator_divide(table, count, *total_weight);
    return status;
}

DTRAIN_API dtrain_aggregator dtrain_aggregator_local(void)
{
    dtrain_aggregator aggregator = {NULL, dtrain__aggregator_run_local, NULL};
    return aggregator;
}

DTRAIN_API dtrain_aggregator dtrain_aggregator_all_reduce(dtrain_comm *comm)
{
    dtrain_aggregator aggregator = {comm, dtrain__aggregator_run_all_reduce, NULL};
    return aggregator;
}

DTRAIN_API void dtrain_aggregator_destroy(dtrain_aggregator *aggregator)
{
    if (aggregator == NULL)
        return;
    if (aggregator->destroy != NULL)
        aggregator->destroy(aggregator->self);
    memset(aggregator, 0, sizeof *aggregator);
}

static dtrain_status dtrain__train_step_check(const dtrain_step_desc *desc)
{
    if (desc == NULL || desc->table == NULL || desc->compute == NULL || desc->optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_train_step: table, compute and optimizer are needed, %s is NULL",
                            desc == NULL            ? "the desc"
                            : desc->table == NULL   ? "table"
                            : desc->compute == NULL ? "compute"
                                                    : "optimizer");
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_train_step(const dtrain_step_desc *desc, dtrain_step_result *result)
{
    dtrain_step_result own = {0.0, 0.0};
    double weight = 0.0;
    dtrain_status status = dtrain__train_step_check(desc);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < desc->count; i++) {
        if (dtrain__params_trained(&desc->table[i]) && dtrain_param_elements(&desc->table[i]) > 0)
            memset(desc->table[i].grad, 0, dtrain_param_elements(&desc->table[i]) * sizeof(float));
    }
    dtrain_aggregator local = dtrain_aggregator_local();
    const dtrain_aggregator *aggregator = desc->aggregator != NULL ? desc->aggregator : &local;
    status = desc->compute(desc->user, &weight);
    if (status == DTRAIN_OK)
        status = aggregator->aggregate(aggregator->self, desc->table, desc->count, weight, &own.total_weight);
    if (status == DTRAIN_OK && own.total_weight > 0.0 && desc->max_norm != 0.0f)
        status = dtrain_clip_grad_norm(desc->table, desc->count, desc->max_norm, &own.norm);
    if (status == DTRAIN_OK && own.total_weight > 0.0)
        status = dtrain_optimizer_step(desc->optimizer, desc->lr);
    if (result != NULL)
        *result = own;
    return status;
}

#endif

/* ---- >>end ---- */
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif
