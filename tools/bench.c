/* Measures one operation against its limit in the same process, alternating, and prints one line of key=value pairs.
 *
 *   build/bench OP key=value ...
 *   OP    all_reduce, reduce_scatter, all_gather, broadcast, barrier, gemm, adamw
 *   keys  ranks=2 bytes=1048576 runs=11 transport=threads algorithm=auto|fused|recursive_doubling|tree|ring
 *         size=1024 (gemm) count=25000000 (adamw)
 *
 * The limit of all_reduce is the bare loop that adds all ranks' buffers and stores to all of them, each thread its
 * part and no word between them, on as many threads as there are ranks, at most one a processor. Times are medians;
 * bytes are those of one rank's buffer. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_RUNS 1001
#define MAX_BENCH_RANKS 64

typedef struct bench {
    const char *op, *algorithm_name;
    dtrain_algorithm algorithm;
    int ranks, runs, threads;
    size_t bytes, size, count, inner;
    float *buffers[MAX_BENCH_RANKS];
    double *times, *limits; /* [runs] seconds an operation */
} bench;

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, by_size);
    return values[n / 2];
}

static float *pages(size_t bytes)
{
    void *block = NULL;
    size_t whole = (bytes + ((size_t)2 << 20) - 1) >> 21 << 21;
    if (posix_memalign(&block, (size_t)2 << 20, whole > 0 ? whole : (size_t)2 << 20) != 0)
        exit(1);
#ifdef MADV_HUGEPAGE
    madvise(block, whole, MADV_HUGEPAGE);
#endif
    memset(block, 0, whole);
    return (float *)block;
}

#if defined(__x86_64__)
#define LIMIT_TARGETS __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3"), noinline))
#else
#define LIMIT_TARGETS __attribute__((noinline))
#endif
#ifdef __clang__
#undef LIMIT_TARGETS
#define LIMIT_TARGETS __attribute__((noinline))
#endif

LIMIT_TARGETS static void limit_2(float *a, float *b, size_t n)
{
    DTRAIN__INDEPENDENT for (size_t i = 0; i < n; i++)
    {
        float s = a[i] + b[i];
        a[i] = s;
        b[i] = s;
    }
}

LIMIT_TARGETS static void limit_4(float *a, float *b, float *c, float *d, size_t n)
{
    DTRAIN__INDEPENDENT for (size_t i = 0; i < n; i++)
    {
        float s = (a[i] + b[i]) + (c[i] + d[i]);
        a[i] = s;
        b[i] = s;
        c[i] = s;
        d[i] = s;
    }
}

/* This thread's part of the bare loop. */
static void limit_loop(bench *b, int thread)
{
    size_t at, n = dtrain_split(b->bytes / sizeof(float), b->threads, thread, &at);
    if (b->ranks == 2)
        limit_2(b->buffers[0] + at, b->buffers[1] + at, n);
    else
        limit_4(b->buffers[0] + at, b->buffers[1] + at, b->buffers[2] + at, b->buffers[3] + at, n);
}

static dtrain_status one_operation(bench *b, dtrain_comm *world, int rank)
{
    float *buffer = b->buffers[rank];
    size_t count = b->bytes / sizeof(float), at;
    dtrain_shard(world, count, rank, &at);
    if (strcmp(b->op, "all_reduce") == 0)
        return dtrain_all_reduce(world, buffer, buffer, count, DTRAIN_F32, DTRAIN_SUM);
    if (strcmp(b->op, "reduce_scatter") == 0)
        return dtrain_reduce_scatter(world, buffer, buffer + at, count, DTRAIN_F32, DTRAIN_SUM);
    if (strcmp(b->op, "all_gather") == 0)
        return dtrain_all_gather(world, buffer + at, buffer, count, DTRAIN_F32);
    if (strcmp(b->op, "broadcast") == 0)
        return dtrain_broadcast(world, buffer, count, DTRAIN_F32, 0);
    return dtrain_barrier(world);
}

static int has_limit(const bench *b)
{
    return strcmp(b->op, "all_reduce") == 0 && (b->ranks == 2 || b->ranks == 4);
}

/* The limit's time is the mean over its threads: each runs by itself, with no end in common. */
static void time_limit(bench *b, dtrain_comm *world, int rank, int run, double *parts)
{
    double started;
    dtrain_barrier(world);
    if (rank < b->threads) {
        limit_loop(b, rank);
        started = seconds_now();
        for (size_t i = 0; i < b->inner; i++)
            limit_loop(b, rank);
        parts[rank] = (seconds_now() - started) / (double)b->inner;
    }
    dtrain_barrier(world);
    if (rank == 0) {
        b->limits[run] = 0;
        for (int i = 0; i < b->threads; i++)
            b->limits[run] += parts[i] / b->threads;
    }
}

static double limit_parts[MAX_BENCH_RANKS];

static dtrain_status collective_rank(dtrain_comm *world, void *user)
{
    bench *b = (bench *)user;
    int rank = dtrain_comm_rank(world);
    dtrain_status status = DTRAIN_OK;
    for (int run = -1; run < b->runs && status == DTRAIN_OK; run++) { /* run -1 warms up */
        status = dtrain_barrier(world);
        double started = seconds_now();
        for (size_t i = 0; i < b->inner && status == DTRAIN_OK; i++)
            status = one_operation(b, world, rank);
        if (rank == 0 && run >= 0)
            b->times[run] = (seconds_now() - started) / (double)b->inner;
        if (has_limit(b) && run >= 0)
            time_limit(b, world, rank, run, limit_parts);
    }
    return status;
}

static int bench_collective(bench *b)
{
    dtrain_comm_desc desc = {0};
    double us, algbw;
    desc.algorithm = b->algorithm;
    b->threads = b->ranks < (int)sysconf(_SC_NPROCESSORS_ONLN) ? b->ranks : (int)sysconf(_SC_NPROCESSORS_ONLN);
    b->inner = b->bytes < 65536 ? 2000 : b->bytes < ((size_t)4 << 20) ? 50 : 1;
    for (int i = 0; i < b->ranks; i++)
        b->buffers[i] = pages(b->bytes);
    DTRAIN_CHECK(dtrain_run_threads(b->ranks, collective_rank, b, &desc));
    us = median(b->times, b->runs) * 1e6;
    algbw = (double)b->bytes / us * 1e-3;
    printf("op=%s transport=threads ranks=%d bytes=%zu us=%.3f algbw_GBps=%.3f", b->op, b->ranks, b->bytes, us, algbw);
    if (has_limit(b)) {
        double limit = (double)b->bytes / (median(b->limits, b->runs) * 1e9);
        printf(" limit_GBps=%.3f of_limit=%.3f", limit, algbw / limit);
    } else {
        printf(" limit_GBps=nan of_limit=nan");
    }
    printf(" algorithm=%s runs=%d\n", b->algorithm_name, b->runs);
    return 0;
}

static int bench_gemm(bench *b)
{
    size_t n = b->size;
    float *a = pages(n * n * 4), *x = pages(n * n * 4), *y = pages(n * n * 4);
    for (size_t i = 0; i < n * n; i++) {
        a[i] = dtrain_random_uniform(1, i);
        x[i] = dtrain_random_uniform(2, i);
    }
    for (int run = -1; run < b->runs; run++) {
        double started = seconds_now();
        dtrain_sgemm(0, 0, n, n, n, 1, a, n, x, n, 0, y, n);
        if (run >= 0)
            b->times[run] = seconds_now() - started;
    }
    double us = median(b->times, b->runs) * 1e6;
    printf("op=gemm isa=%s size=%zu us=%.1f GFLOPs=%.1f runs=%d\n", dtrain_isa_name(), n, us,
           2e-3 * (double)n * (double)n * (double)n / us, b->runs);
    return 0;
}

/* What a C programmer writes; its compiler vectorises it as it can. */
static void plain_adamw(float *p, const float *g, float *m, float *v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        m[i] = 0.9f * m[i] + 0.1f * g[i];
        v[i] = 0.999f * v[i] + 0.001f * (g[i] * g[i]);
        p[i] -= 1e-3f * (m[i] / (__builtin_sqrtf(v[i]) + 1e-8f) + 0.01f * p[i]);
    }
}

static int bench_adamw(bench *b)
{
    float *p = pages(b->count * 4), *g = pages(b->count * 4), *m = pages(b->count * 4), *v = pages(b->count * 4);
    dtrain_optimizer_desc desc = {0};
    desc.weight_decay = 0.01f;
    for (size_t i = 0; i < b->count; i++)
        g[i] = (float)(i % 1001) * 1e-3f - 0.5f;
    for (int run = -1; run < b->runs; run++) {
        double started = seconds_now(), middle;
        dtrain_adamw(p, g, m, v, b->count, &desc, 1e-3f, (uint64_t)(run + 2));
        middle = seconds_now();
        plain_adamw(p, g, m, v, b->count);
        if (run >= 0) {
            b->times[run] = middle - started;
            b->limits[run] = seconds_now() - middle;
        }
    }
    double us = median(b->times, b->runs) * 1e6, limit = median(b->limits, b->runs) * 1e6;
    printf("op=adamw isa=%s count=%zu us=%.0f plain_loop_us=%.0f of_plain=%.3f runs=%d\n", dtrain_isa_name(), b->count,
           us, limit, us / limit, b->runs);
    return 0;
}

static int complain(const char *what)
{
    fprintf(stderr, "bench: %s: not understood; see the top of tools/bench.c\n", what);
    return 1;
}

static int parse(bench *b, int argc, char **argv)
{
    static const char *const algorithms[] = {"fused", "recursive_doubling", "tree", "ring"};
    for (int i = 2; i < argc; i++) {
        char *value = strchr(argv[i], '='), *end;
        unsigned long long number = value != NULL ? strtoull(value + 1, &end, 10) : 0;
        if (value == NULL)
            return complain(argv[i]);
        if (strncmp(argv[i], "algorithm=", 10) == 0) {
            for (int k = 0; k < 4; k++)
                if (strcmp(value + 1, algorithms[k]) == 0)
                    b->algorithm = (dtrain_algorithm)(DTRAIN_ALGORITHM_FUSED + k);
            b->algorithm_name = value + 1;
            if (b->algorithm == DTRAIN_ALGORITHM_AUTO && strcmp(value + 1, "auto") != 0)
                return complain(argv[i]);
        } else if (strncmp(argv[i], "transport=", 10) == 0) {
            if (strcmp(value + 1, "threads") != 0)
                return complain(argv[i]);
        } else if (*end != 0 || end == value + 1) {
            return complain(argv[i]);
        } else if (strncmp(argv[i], "ranks=", 6) == 0 && number >= 1 && number <= MAX_BENCH_RANKS) {
            b->ranks = (int)number;
        } else if (strncmp(argv[i], "bytes=", 6) == 0 && number >= 4 && number <= (size_t)1 << 36) {
            b->bytes = (size_t)number / 4 * 4;
        } else if (strncmp(argv[i], "runs=", 5) == 0 && number >= 1 && number <= MAX_RUNS) {
            b->runs = (int)number;
        } else if (strncmp(argv[i], "size=", 5) == 0 && number >= 1 && number <= 16384) {
            b->size = (size_t)number;
        } else if (strncmp(argv[i], "count=", 6) == 0 && number >= 1 && number <= (size_t)1 << 32) {
            b->count = (size_t)number;
        } else {
            return complain(argv[i]);
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const char *const collectives[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"};
    static double times[MAX_RUNS], limits[MAX_RUNS];
    bench b;
    memset(&b, 0, sizeof b);
    b.op = argc > 1 ? argv[1] : "";
    b.algorithm_name = "auto";
    b.ranks = 2;
    b.runs = 11;
    b.bytes = (size_t)1 << 20;
    b.size = 1024;
    b.count = 25000000;
    b.times = times;
    b.limits = limits;
    if (parse(&b, argc, argv) != 0)
        return 1;
    if (strcmp(b.op, "gemm") == 0)
        return bench_gemm(&b);
    if (strcmp(b.op, "adamw") == 0)
        return bench_adamw(&b);
    for (int i = 0; i < 5; i++)
        if (strcmp(b.op, collectives[i]) == 0)
            return bench_collective(&b);
    return complain(argc > 1 ? argv[1] : "no operation");
}
