/* Times one operation against its limit, in turns, and prints one line of key=value.
 * `build/bench --help` lists the operations and keys.
 *
 * cc -O2 -fno-math-errno -ffp-contract=off -I. tools/bench.c -o build/bench -lpthread -lm
 * build/bench all_reduce ranks=4 bytes=67108864 transport=tcp
 *
 * What the operations time, and their limits:
 *
 *   operation            file                   the limit that it is compared with
 *   all_reduce ...       here                   threads: a bare loop over the ranks' buffers, see below
 *                        bench_wire.h           processes: bare sockets, in the best of six ways; shm to 64 KiB: here
 *                        bench_seal.h           transport=sealed: the same operation over plain TCP
 *   fused                here                   100 small all_reduces: one all_reduce of all bytes
 *   ddp                  here                   a step of 12 units without computation: the same
 *   ring                 bench_ring.h           an all-reduce as a user would write it by hand: as all_reduce
 *   fsdp                 bench_fsdp.h           a sharded stack of layers: the same layers with DDP
 *   tp_overlap           bench_tp.h             the backward pass of a split layer: the same without overlap
 *   pipeline_bubble      bench_pipeline.h       the share of a step in which ranks idle: what the plan says
 *   gemm                 here                   none: it prints GFLOP/s
 *   adamw                here                   a bare loop over arrays of its own
 *   seal                 bench_seal.h           one copy of as many bytes
 *   topk ... int8_unpack bench_compress.h       a bare loop that reads, or reads and writes, the same bytes
 *   link_topk, link_int8 bench_compress.h       the same sum without compression, over the same slow links
 *   file_open            bench_files.h          2 ms, a fixed time
 *   file_header          bench_files.h          150 ms, a fixed time
 *   file_read, file_save bench_files.h          read() or write() of the same bytes
 *   file_load            bench_files.h          none: it is compared with Python (bench_safetensors.py)
 *   save_async, reload   bench_checkpoint.h     a memcpy of the state; read() of the same bytes
 *
 * The line has op transport ranks bytes us algbw_GBps limit_GBps of_limit. algbw is bytes / us. of_limit is the median
 * of the ratios of neighbouring runs. The limit of a collective between threads loads and stores the least that the
 * operation must. It runs on min(ranks, processors) threads that do not wait for each other. Up to 64 KiB, where ranks
 * mostly wait, the limit is an exchange through one mailbox for each rank, also between processes that share memory.
 * The rank spins on the mailbox's number and then yields. With fill=1 each rank writes its buffer before each call, as
 * a program does. Without that, a rank of threads finds in its own cache what it wrote in the call before.
 * -fno-math-errno lets the compiler vectorise the square root of adamw's limit. */
#define _GNU_SOURCE /* sched_setaffinity */
#include <stddef.h>
static void bench_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha, const float *a,
                        size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc);
#define DTRAIN_SGEMM bench_sgemm
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define BENCH_RANKS 64
#define BENCH_RUNS 1001
#define BENCH_MAILBOX 65536
#define BENCH_FUSED 100
#define BENCH_UNITS 12
#define BENCH_RUN_NS 20000000 /* a run repeats its operation for about this long */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#define BENCH_AVX512 __attribute__((target("avx512f,prefer-vector-width=512")))
#else
#define BENCH_AVX512 __attribute__((target("avx512f")))
#endif
#if defined(__x86_64__)
#define BENCH_AVX2 __attribute__((target("avx2")))
/* Compiles a loop for three instruction sets and calls the best one that the processor has. */
#define BENCH_LOOP(name, parameters, arguments) \
    BENCH_AVX512 static void name##_avx512 parameters \
    { \
        name##_body arguments; \
    } \
    BENCH_AVX2 static void name##_avx2 parameters \
    { \
        name##_body arguments; \
    } \
    static void name parameters \
    { \
        if (__builtin_cpu_supports("avx512f")) \
            name##_avx512 arguments; \
        else if (__builtin_cpu_supports("avx2")) \
            name##_avx2 arguments; \
        else \
            name##_body arguments; \
    }
#else
#define BENCH_LOOP(name, parameters, arguments) \
    static void name parameters \
    { \
        name##_body arguments; \
    }
#endif
#define BENCH_INLINE static inline __attribute__((always_inline))

typedef enum bench_op {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    REDUCE,
    ALL_TO_ALL,
    SCAN,
    FUSED,
    DDP,
    BARRIER,
    RING,
    FSDP,
    TP_OVERLAP,
    PIPELINE_BUBBLE,
    GEMM,
    ADAMW,
    SEAL,
    TOPK,
    TOPK_ADD,
    SPARSE_ADD,
    INT8_PACK,
    INT8_UNPACK,
    LINK_TOPK,
    LINK_INT8,
    FILE_OPEN,
    FILE_HEADER,
    FILE_READ,
    FILE_SAVE,
    FILE_LOAD,
    SAVE_ASYNC,
    RELOAD,
    BENCH_OPS
} bench_op;
static const char *const bench_names[BENCH_OPS] = {
    "all_reduce", "reduce_scatter",  "all_gather", "broadcast",   "reduce",    "all_to_all",
    "scan",       "fused",           "ddp",        "barrier",     "ring",      "fsdp",
    "tp_overlap", "pipeline_bubble", "gemm",       "adamw",       "seal",      "topk",
    "topk_add",   "sparse_add",      "int8_pack",  "int8_unpack", "link_topk", "link_int8",
    "file_open",  "file_header",     "file_read",  "file_save",   "file_load", "save_async",
    "reload"};

typedef struct bench_mailbox {
    uint64_t number;
    char pad[120];
    float data[2][BENCH_MAILBOX / sizeof(float)];
} bench_mailbox;

enum { THREADS, TCP, UNIX, SHM, SLOW, SEALED };
static const char *const bench_transports[] = {"threads", "tcp", "unix", "shm", "slow", "sealed"};

typedef struct bench {
    bench_op op;
    int ranks, runs, huge, alloc, fill, threads; /* threads: min(ranks, processors) */
    int transport, variant;                      /* variant: which of the limits over sockets */
    size_t bytes, size, count, chunk;
    double ratio; /* share of the elements that topk selects */
    int against_ring, pin;
    float *others[BENCH_RANKS]; /* outputs of all_to_all */
    dtrain_algorithm algorithm;
    float *buffers[BENCH_RANKS];
    dtrain_ddp *ddps[BENCH_RANKS];
    bench_mailbox *mailboxes;
    uint64_t repeats[2]; /* calls in a run of the operation, and of its limit */
    int64_t begin_ns[BENCH_RANKS], end_ns[BENCH_RANKS];
    double us[BENCH_RUNS], limit_us[BENCH_RUNS];
    int strategy, sleep; /* from here on for fsdp */
    size_t layers, width, work, steps;
    double step_us[3][BENCH_RUNS], step_cpu[3][BENCH_RUNS], comm_us, hidden;
    int micro, chunks; /* from here on for pipeline_bubble */
    dtrain_pipeline_schedule schedule;
} bench;

static int bench_sleeps; /* 1: products sleep instead, 1 ns for BENCH_SLEEP_FLOPS operations */
#define BENCH_SLEEP_FLOPS 50

static void bench_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha, const float *a,
                        size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    size_t ns = 2 * m * n * k / BENCH_SLEEP_FLOPS;
    struct timespec pause = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    if (bench_sleeps)
        nanosleep(&pause, NULL);
    else
        dtrain__gemm_builtin(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

static int64_t bench_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The bare loops. bench_sum2 and bench_sum4 leave the sum in every array, bench_add in the first one. */
BENCH_INLINE void bench_sum2_body(float *restrict a, float *restrict b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        a[i] = b[i] = a[i] + b[i];
}
BENCH_LOOP(bench_sum2, (float *restrict a, float *restrict b, size_t n), (a, b, n))

BENCH_INLINE void bench_sum4_body(float *restrict a, float *restrict b, float *restrict c, float *restrict d, size_t n)
{
    for (size_t i = 0; i < n; i++)
        a[i] = b[i] = c[i] = d[i] = (a[i] + b[i]) + (c[i] + d[i]);
}
BENCH_LOOP(bench_sum4, (float *restrict a, float *restrict b, float *restrict c, float *restrict d, size_t n),
           (a, b, c, d, n))

BENCH_INLINE void bench_add_body(float *restrict a, const float *restrict b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        a[i] += b[i];
}
BENCH_LOOP(bench_add, (float *restrict a, const float *restrict b, size_t n), (a, b, n))

typedef struct bench_adam {
    float beta1, beta2, rest1, rest2, root, eps, keep, rate;
} bench_adam;

BENCH_INLINE void bench_adamw_body(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                                   size_t n, const bench_adam *k)
{
    bench_adam c = *k;
    for (size_t i = 0; i < n; i++) {
        m[i] = c.beta1 * m[i] + c.rest1 * g[i];
        v[i] = c.beta2 * v[i] + c.rest2 * (g[i] * g[i]);
        p[i] = c.keep * p[i] - c.rate * (m[i] / (__builtin_sqrtf(v[i]) * c.root + c.eps));
    }
}
BENCH_LOOP(bench_adamw,
           (float *restrict p, const float *restrict g, float *restrict m, float *restrict v, size_t n,
            const bench_adam *k),
           (p, g, m, v, n, k))

/* Sums elements [begin, begin + n) of all ranks in place, on every rank or (all 0) on rank 0. With other than 2 or 4
 * ranks it works in tiles of 4 KiB. */
static void bench_fold(bench *b, size_t begin, size_t n, int all)
{
    float **y = b->buffers, tile[1024];
    if (all && b->ranks == 2) {
        bench_sum2(y[0] + begin, y[1] + begin, n);
        return;
    }
    if (all && b->ranks == 4) {
        bench_sum4(y[0] + begin, y[1] + begin, y[2] + begin, y[3] + begin, n);
        return;
    }
    for (size_t at = begin; at < begin + n; at += 1024) {
        size_t step = begin + n - at < 1024 ? begin + n - at : 1024;
        memcpy(tile, y[0] + at, step * sizeof(float));
        for (int r = 1; r < b->ranks; r++)
            bench_add(tile, y[r] + at, step);
        for (int r = 0; r < b->ranks && all; r++)
            memcpy(y[r] + at, tile, step * sizeof(float));
        if (!all)
            memcpy(y[0] + at, tile, step * sizeof(float));
    }
}

/* Returns the size of one part of count elements, cut as dtrain_shard cuts them; *begin is its first element. */
static size_t bench_part(size_t count, int parts, int part, size_t *begin)
{
    size_t all = (size_t)parts, at = (size_t)part, longer = count % all;
    *begin = at * (count / all) + (at < longer ? at : longer);
    return count / all + (at < longer);
}

/* Loads and stores once what thread t of the limit must, without waiting. */
static void bench_limit_large(bench *b, int t)
{
    size_t begin, n = bench_part(b->count, b->threads, t, &begin);
    for (int r = t; r < b->ranks && (b->op == BROADCAST || b->op == ALL_GATHER); r += b->threads)
        for (int from = 0; from < b->ranks; from++) {
            size_t low = 0, shard = b->op == BROADCAST ? b->count : bench_part(b->count, b->ranks, from, &low);
            if (from != r && (b->op == ALL_GATHER || from == 0))
                memcpy(b->buffers[r] + low, b->buffers[from] + low, shard * sizeof(float));
        }
    for (int r = t; r < b->ranks && b->op == ALL_TO_ALL; r += b->threads)
        for (int from = 0; from < b->ranks; from++) {
            size_t low, shard = bench_part(b->count, b->ranks, r, &low);
            memcpy(b->others[r] + (size_t)from * shard, b->buffers[from] + low, shard * sizeof(float));
        }
    if (b->op == ALL_REDUCE || b->op == REDUCE_SCATTER || b->op == REDUCE || b->op == SCAN)
        bench_fold(b, begin, n, b->op == ALL_REDUCE || b->op == SCAN);
}

/* Makes one exchange through the mailboxes: every rank sums all of them. */
static void bench_limit_small(bench *b, int rank, uint64_t number)
{
    bench_mailbox *boxes = b->mailboxes;
    float *mine = b->buffers[rank];
    size_t bytes = b->count * sizeof(float);
    memcpy(boxes[rank].data[number & 1], mine, bytes);
    __atomic_store_n(&boxes[rank].number, number, __ATOMIC_RELEASE);
    for (int r = 0; r < b->ranks; r++)
        for (int turn = 0; __atomic_load_n(&boxes[r].number, __ATOMIC_ACQUIRE) < number; turn++)
            if (b->ranks > b->threads || turn > 2000)
                sched_yield();
    memcpy(mine, boxes[0].data[number & 1], bytes);
    for (int r = 1; r < b->ranks; r++)
        bench_add(mine, boxes[r].data[number & 1], b->count);
}

static dtrain_status bench_fused(bench *b, dtrain_comm *world)
{
    float *data = b->buffers[dtrain_comm_rank(world)];
    dtrain_status status = dtrain_fuse_begin(world);
    for (int k = 0; status == DTRAIN_OK && k < BENCH_FUSED; k++) {
        size_t begin, n = bench_part(b->count, BENCH_FUSED, k, &begin);
        status = dtrain_all_reduce(world, data + begin, data + begin, n, DTRAIN_F32, DTRAIN_SUM);
    }
    return status == DTRAIN_OK ? dtrain_fuse_end(world) : status;
}

/* Makes a table of BENCH_UNITS layers that share the whole buffer. */
static void bench_ddp_open(bench *b, dtrain_comm *world, float *weights)
{
    dtrain_param table[BENCH_UNITS];
    char names[BENCH_UNITS][16];
    int rank = dtrain_comm_rank(world);
    memset(table, 0, sizeof table);
    for (int k = 0; k < BENCH_UNITS; k++) {
        size_t begin;
        snprintf(names[k], sizeof names[k], "layer-%d", k);
        table[k].name = names[k];
        table[k].dtype = DTRAIN_F32;
        table[k].unit = k;
        table[k].shape[0] = bench_part(b->count, BENCH_UNITS, k, &begin);
        table[k].data = weights + begin;
        table[k].grad = b->buffers[rank] + begin;
    }
    DTRAIN_CHECK(dtrain_ddp_create(&b->ddps[rank], world, table, BENCH_UNITS, NULL));
}

/* Runs a step of a model that computes nothing. */
static dtrain_status bench_ddp(dtrain_ddp *ddp)
{
    dtrain_status status = dtrain_ddp_begin(ddp, 1, 1);
    for (int unit = BENCH_UNITS; status == DTRAIN_OK && unit-- > 0;)
        status = dtrain_ddp_reduce(ddp, unit);
    return status == DTRAIN_OK ? dtrain_ddp_finish(ddp, NULL) : status;
}

static dtrain_status bench_call(bench *b, dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float *data = b->buffers[rank];
    size_t begin;
    dtrain_shard(world, b->count, rank, &begin);
    switch (b->op) {
    case ALL_REDUCE: return dtrain_all_reduce(world, data, data, b->count, DTRAIN_F32, DTRAIN_SUM);
    case REDUCE_SCATTER: return dtrain_reduce_scatter(world, data, data + begin, b->count, DTRAIN_F32, DTRAIN_SUM);
    case ALL_GATHER: return dtrain_all_gather(world, data + begin, data, b->count, DTRAIN_F32);
    case BROADCAST: return dtrain_broadcast(world, data, b->count, DTRAIN_F32, 0);
    case REDUCE: return dtrain_reduce(world, data, data, b->count, DTRAIN_F32, DTRAIN_SUM, 0);
    case ALL_TO_ALL: return dtrain_all_to_all(world, data, b->others[rank], b->count, DTRAIN_F32);
    case SCAN: return dtrain_scan(world, data, data, b->count, DTRAIN_F32, DTRAIN_SUM);
    case FUSED: return bench_fused(b, world);
    case DDP: return bench_ddp(b->ddps[rank]);
    default: return dtrain_barrier(world);
    }
}

/* Returns whether the operation sends in parts, so that its limit is one all_reduce of all bytes. */
static int bench_is_many(const bench *b)
{
    return b->op == FUSED || b->op == DDP;
}

static int bench_is_small(const bench *b)
{
    return b->count * sizeof(float) <= BENCH_MAILBOX;
}

/* Returns zeroed memory, rounded up to 2 MiB; ends the program if there is none. */
static float *bench_memory(size_t bytes, int huge)
{
    size_t align = (size_t)2 << 20, whole = (bytes + align - 1) / align * align;
    void *memory = NULL;
    if (posix_memalign(&memory, huge ? align : 4096, whole > 0 ? whole : align) != 0) {
        progress_clear();
        fprintf(stderr, "bench: no memory for %zu bytes; use a smaller bytes=N\n", bytes);
        exit(1);
    }
#ifdef MADV_HUGEPAGE
    if (huge)
        madvise(memory, whole, MADV_HUGEPAGE);
#endif
    memset(memory, 0, whole);
    return (float *)memory;
}

static int bench_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bench_median(const double *values, int n)
{
    double sorted[BENCH_RUNS];
    memcpy(sorted, values, (size_t)n * sizeof(double));
    qsort(sorted, (size_t)n, sizeof(double), bench_compare);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

/* Ends the program after a call of the system that failed. */
static void bench_fail(const char *what)
{
    progress_clear();
    fprintf(stderr, "bench: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Draws the progress line before run `run` of `runs`; runs below 0 warm up. Rank 0 calls it between timed runs. */
static void bench_progress(const bench *b, const char *phase, int run, int runs)
{
    if (run <= 0)
        progress_begin("bench", 0);
    if (run < 0)
        progress_show(0, 0, "%s%s, warm-up", bench_names[b->op], phase);
    else
        progress_show(run, runs, "%s%s, run %d of %d", bench_names[b->op], phase, run + 1, runs);
}

#include "bench_wire.h"
#include "bench_ring.h"
#include "bench_link.h"
#include "bench_fsdp.h"
#include "bench_tp.h"

static void bench_print(const bench *b);
#include "bench_compress.h"
#include "bench_seal.h"

/* Repeats the operation or its limit on every rank; returns the microseconds of one call. */
static double bench_collective_run(bench *b, dtrain_comm *world, int limit, uint64_t *number)
{
    int rank = dtrain_comm_rank(world);
    int rings = limit ? b->against_ring : b->op == RING;
    int takes_part =
        !limit || rings || bench_is_many(b) || b->transport != THREADS || bench_is_small(b) || rank < b->threads;
    int64_t first = INT64_MAX, last = 0;
    DTRAIN_CHECK(dtrain_barrier(world));
    b->begin_ns[rank] = takes_part ? bench_now_ns() : INT64_MAX;
    for (uint64_t k = 0; k < b->repeats[limit] && takes_part; k++) {
        if (b->fill)
            memset(b->buffers[rank], 0, b->bytes);
        if (rings)
            bench_ring(b, world);
        else if (!limit)
            DTRAIN_CHECK(bench_call(b, world));
        else if (bench_is_many(b))
            DTRAIN_CHECK(
                dtrain_all_reduce(world, b->buffers[rank], b->buffers[rank], b->count, DTRAIN_F32, DTRAIN_SUM));
        else if (b->transport == SEALED)
            DTRAIN_CHECK(bench_call(b, bench_plain));
        else if (bench_is_wired(b))
            wire_limit(b, rank, b->variant);
        else if (bench_is_small(b))
            bench_limit_small(b, rank, ++*number);
        else
            bench_limit_large(b, rank);
    }
    b->end_ns[rank] = takes_part ? bench_now_ns() : 0;
    DTRAIN_CHECK(dtrain_barrier(world));
    for (int r = 0; r < b->ranks; r++) {
        first = b->begin_ns[r] < first ? b->begin_ns[r] : first;
        last = b->end_ns[r] > last ? b->end_ns[r] : last;
    }
    return (double)(last - first) * 1e-3 / (double)b->repeats[limit];
}

/* Warms up and finds how many calls a run has. */
static void bench_calibrate(bench *b, dtrain_comm *world, int limit, uint64_t *number)
{
    for (;;) {
        double us = bench_collective_run(b, world, limit, number), total = us * (double)b->repeats[limit];
        uint64_t repeats = b->repeats[limit];
        DTRAIN_CHECK(dtrain_barrier(world)); /* all have read the times */
        DTRAIN_CHECK(dtrain_broadcast(world, &total, 1, DTRAIN_F64, 0));
        if (total * 1e3 >= BENCH_RUN_NS / 2)
            return;
        if (dtrain_comm_rank(world) == 0)
            b->repeats[limit] = repeats * (total * 1e4 < BENCH_RUN_NS ? 8 : 2);
        DTRAIN_CHECK(dtrain_barrier(world));
    }
}

/* Checks the sum of 1, 2, 3, ... over the ranks at both ends and in the middle, before anything is timed. */
static void bench_verify(bench *b, dtrain_comm *world)
{
    float *data = b->buffers[dtrain_comm_rank(world)], expected = (float)(b->ranks * (b->ranks + 1) / 2);
    if ((b->op != ALL_REDUCE && b->op != RING && b->op != FUSED) || b->count == 0)
        return;
    for (size_t i = 0; i < b->count; i++)
        data[i] = (float)(dtrain_comm_rank(world) + 1);
    if (b->op == RING)
        bench_ring(b, world);
    else
        DTRAIN_CHECK(bench_call(b, world));
    if (data[0] != expected || data[b->count / 2] != expected || data[b->count - 1] != expected) {
        progress_clear();
        fprintf(stderr, "bench: %s gave a wrong sum\n", bench_names[b->op]);
        exit(1);
    }
}

/* Finds the fastest way through the bare sockets. */
static void bench_choose(bench *b, dtrain_comm *world, uint64_t *number)
{
    double best = 0;
    int chosen = 0, variants = b->ranks == 2 ? WIRE_VARIANTS : WIRE_VARIANTS / 2;
    if (!bench_is_wired(b) || b->transport == SEALED || b->against_ring || bench_is_many(b))
        variants = 0;
    for (int variant = 0; variant < variants; variant++) {
        double us[3];
        DTRAIN_CHECK(dtrain_barrier(world));
        b->variant = variant;
        DTRAIN_CHECK(dtrain_barrier(world));
        for (int run = 0; run < 3; run++) {
            if (dtrain_comm_rank(world) == 0)
                bench_progress(b, ", choosing the limit", 3 * variant + run, 3 * variants);
            us[run] = bench_collective_run(b, world, 1, number);
        }
        double middle = us[0] > us[1] ? (us[1] > us[2]   ? us[1]
                                         : us[0] < us[2] ? us[0]
                                                         : us[2])
                                      : (us[0] > us[2]   ? us[0]
                                         : us[1] < us[2] ? us[1]
                                                         : us[2]);
        DTRAIN_CHECK(dtrain_broadcast(world, &middle, 1, DTRAIN_F64, 0));
        if (variant == 0 || middle < best) {
            best = middle;
            chosen = variant;
        }
    }
    DTRAIN_CHECK(dtrain_barrier(world));
    b->variant = chosen;
    DTRAIN_CHECK(dtrain_barrier(world));
}

static void bench_pin(int rank)
{
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)(rank % (int)sysconf(_SC_NPROCESSORS_ONLN)), &set);
    if (sched_setaffinity(0, sizeof set, &set) == 0)
        return;
#endif
    fprintf(stderr, "bench: rank %d could not be pinned\n", rank);
}

static dtrain_status bench_rank(dtrain_comm *world, void *user)
{
    bench *b = (bench *)user;
    int rank = dtrain_comm_rank(world);
    uint64_t number = 0;
    if (b->pin)
        bench_pin(rank);
    if (b->op == FSDP)
        return fsdp_rank(world, b);
    if (b->op == ALL_TO_ALL)
        b->others[rank] = bench_memory(b->bytes + (size_t)b->ranks * sizeof(float), b->huge);
    float *weights = b->op == DDP ? bench_memory(b->bytes, b->huge) : NULL;
    if (weights != NULL)
        bench_ddp_open(b, world, weights);
    if (rank == 0)
        bench_progress(b, "", -1, b->runs);
    bench_verify(b, world);
    memset(b->buffers[rank], 0, b->bytes); /* sums of zeros stay zero in every run */
    bench_calibrate(b, world, 0, &number);
    bench_calibrate(b, world, 1, &number);
    bench_choose(b, world, &number);
    for (int run = 0; run < b->runs; run++) {
        if (rank == 0)
            bench_progress(b, "", run, b->runs);
        double us = bench_collective_run(b, world, 0, &number);
        DTRAIN_CHECK(dtrain_barrier(world));
        double limit_us = bench_collective_run(b, world, 1, &number);
        DTRAIN_CHECK(dtrain_barrier(world));
        if (rank == 0) {
            b->us[run] = us;
            b->limit_us[run] = limit_us;
        }
    }
    dtrain_ddp_destroy(b->ddps[rank]);
    free(weights);
    return DTRAIN_OK;
}

static void bench_print(const bench *b)
{
    progress_end();
    if (b->op == FSDP) {
        fsdp_print(b);
        return;
    }
    double us = bench_median(b->us, b->runs), limit_us = bench_median(b->limit_us, b->runs), ratios[BENCH_RUNS];
    for (int i = 0; i < b->runs; i++)
        ratios[i] = b->limit_us[i] / b->us[i];
    printf("op=%s transport=%s ranks=%d bytes=%zu against=%s huge=%d alloc=%d fill=%d us=%.3f algbw_GBps=%.4f "
           "limit_us=%.3f limit_GBps=%.4f of_limit=%.3f\n",
           bench_names[b->op],
           b->op == LINK_TOPK || b->op == LINK_INT8 ? "link"
           : b->op >= ADAMW                         ? "none"
                                                    : bench_transports[b->transport],
           b->ranks, b->bytes,
           b->against_ring          ? "ring"
           : b->transport == SEALED ? "plain"
                                    : "limit",
           b->huge, b->alloc, b->fill, us, (double)b->bytes * 1e-3 / us, limit_us, (double)b->bytes * 1e-3 / limit_us,
           bench_median(ratios, b->runs));
}

static int bench_collective(bench *b)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.algorithm = b->algorithm;
    for (int r = 0; r < b->ranks; r++)
        b->buffers[r] = bench_memory(b->bytes, b->huge);
    b->mailboxes = (bench_mailbox *)(void *)bench_memory((size_t)b->ranks * sizeof(bench_mailbox), 0);
    DTRAIN_CHECK(dtrain_run_threads(b->ranks, bench_rank, b, &desc));
    bench_print(b);
    for (int r = 0; r < b->ranks; r++)
        free(b->buffers[r]);
    free(b->mailboxes);
    return 0;
}

/* Runs each rank in a process of its own; the struct lies in memory that they share. */
static int bench_processes(const bench *plan)
{
    char root[64];
    int status = 0, bad = 0, port = 10000 + (int)getpid() % 20000;
    bench *b = (bench *)mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        return 1;
    *b = *plan;
    b->mailboxes = (bench_mailbox *)mmap(NULL, (size_t)b->ranks * sizeof(bench_mailbox), PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b->mailboxes == MAP_FAILED)
        return 1;
    if (b->transport != UNIX && b->transport != SHM)
        snprintf(root, sizeof root, "127.0.0.1:%d", port);
    else
        snprintf(root, sizeof root, "unix:/tmp/dtrain-bench-%ld", (long)getpid());
    if (b->transport != SEALED)
        setenv("DTRAIN_TRANSPORT", bench_transports[b->transport], 1);
    if (b->transport != SEALED)
        wire_open(b->ranks, b->transport == TCP);
    for (int rank = 0; rank < b->ranks; rank++) {
        dtrain_comm_desc desc;
        dtrain_comm *world;
        if (fork() != 0)
            continue;
        memset(&desc, 0, sizeof desc);
        desc.rank = rank;
        desc.world_size = b->ranks;
        desc.root = root;
        desc.token = "what TCP takes to meet";
        desc.algorithm = b->algorithm;
        if (b->transport == SEALED)
            world = seal_worlds(&desc, port + 1);
        else
            DTRAIN_CHECK(dtrain_comm_create(&world, &desc));
        if (b->alloc)
            DTRAIN_CHECK(dtrain_comm_alloc(world, b->bytes, (void **)&b->buffers[rank]));
        else
            b->buffers[rank] = bench_memory(b->bytes, b->huge);
        DTRAIN_CHECK(bench_rank(world, b));
        progress_end();
        if (b->alloc)
            dtrain_comm_free(b->buffers[rank]);
        dtrain_comm_destroy(bench_plain);
        dtrain_comm_destroy(world);
        _exit(0);
    }
    while (wait(&status) > 0)
        bad |= status;
    if (!bad)
        bench_print(b);
    return bad != 0;
}

static int bench_gemm(bench *b)
{
    size_t n = b->size, bytes = n * n * sizeof(float);
    float *a = bench_memory(bytes, b->huge), *x = bench_memory(bytes, b->huge), *c = bench_memory(bytes, b->huge);
    double us;
    for (size_t i = 0; i < n * n; i++) {
        a[i] = dtrain_random_uniform(1, i) - 0.5f;
        x[i] = dtrain_random_uniform(2, i) - 0.5f;
    }
    for (int run = -1; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        int64_t begin = bench_now_ns();
        dtrain_sgemm(0, 0, n, n, n, 1, a, n, x, n, 0, c, n);
        if (run >= 0)
            b->us[run] = (double)(bench_now_ns() - begin) * 1e-3;
    }
    us = bench_median(b->us, b->runs);
    progress_end();
    printf("op=gemm transport=none ranks=1 bytes=%zu huge=%d us=%.1f size=%zu isa=%s GFLOPs=%.1f\n", 3 * bytes, b->huge,
           us, n, dtrain_isa_name(), 2.0 * (double)n * (double)n * (double)n * 1e-3 / us);
    free(a);
    free(x);
    free(c);
    return 0;
}

/* Both sides take the same steps from the same values, each with four arrays: params, grads, m and v. */
static int bench_adam_run(bench *b)
{
    float *mine[4], *bare[4];
    for (int k = 0; k < 4; k++) {
        mine[k] = bench_memory(b->bytes, b->huge);
        bare[k] = bench_memory(b->bytes, b->huge);
    }
    for (size_t i = 0; i < b->count; i++)
        mine[0][i] = bare[0][i] = mine[1][i] = bare[1][i] = dtrain_random_uniform(3, i) - 0.5f;
    for (int run = -1; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        double step = run + 2, power1 = 1, power2 = 1;
        for (int k = 0; k < run + 2; k++) {
            power1 *= 0.9;
            power2 *= 0.999;
        }
        bench_adam c = {0.9f, 0.999f, 0.1f, 0.001f, 0, 1e-8f, 1 - 1e-3f * 0.1f, 0};
        dtrain_optimizer_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.weight_decay = 0.1f;
        c.root = (float)(1 / __builtin_sqrt(1 - power2));
        c.rate = (float)(1e-3 / (1 - power1));
        int64_t begin = bench_now_ns();
        dtrain_adamw(mine[0], mine[1], mine[2], mine[3], b->count, &desc, 1e-3f, (uint64_t)step);
        int64_t middle = bench_now_ns();
        bench_adamw(bare[0], bare[1], bare[2], bare[3], b->count, &c);
        if (run >= 0) {
            b->us[run] = (double)(middle - begin) * 1e-3;
            b->limit_us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        }
    }
    bench_print(b);
    for (int k = 0; k < 4; k++) {
        free(mine[k]);
        free(bare[k]);
    }
    return 0;
}

#include "bench_files.h"
#include "bench_checkpoint.h"
#include "bench_pipeline.h"
#include "bench_keys.h"

int main(int argc, char **argv)
{
    static bench b;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int op = 0;
    if (argc < 2)
        return tool_wrong("bench", "OPERATION", NULL, "an operation is expected");
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return tool_help(bench_help);
    while (op < BENCH_OPS && strcmp(argv[1], bench_names[op]) != 0)
        op++;
    if (op == BENCH_OPS)
        return tool_wrong("bench", argv[1], NULL, "there is no such operation");
    b.op = (bench_op)op;
    bench_defaults(&b);
    for (int i = 2; i < argc; i++)
        if (bench_key(&b, argv[i]) != 0)
            return TOOL_WRONG;
    if (b.transport == SLOW && op != FSDP)
        return tool_wrong("bench", "transport=slow", NULL, "only fsdp has it");
    b.bytes = op == BARRIER || op == FSDP || op == TP_OVERLAP ? 0 : b.bytes / sizeof(float) * sizeof(float);
    b.count = b.bytes / sizeof(float);
    b.threads = processors > 0 && processors < b.ranks ? (int)processors : b.ranks;
    if (op == TP_OVERLAP)
        return tp_overlap(&b);
    if (op >= SAVE_ASYNC)
        return checkpoint_run(&b);
    if (op >= FILE_OPEN)
        return files_run(&b);
    if (op == GEMM || op == ADAMW)
        return op == GEMM ? bench_gemm(&b) : bench_adam_run(&b);
    if (op == SEAL)
        return seal_alone(&b);
    if (op >= TOPK)
        return op == LINK_TOPK || op == LINK_INT8 ? compress_links(&b) : compress_alone(&b);
    if (op == PIPELINE_BUBBLE)
        return pipeline_run(&b);
    if (b.transport == SLOW)
        return fsdp_slow_threads(&b);
    return b.transport != THREADS && b.ranks > 1 ? bench_processes(&b) : bench_collective(&b);
}
