/* Times each operation of a GPU against the rate at which the GPU copies its own memory, and ranks that share the GPU.
 *
 * nvcc -std=c++17 -O2 -arch=sm_90 -Xcompiler -ffp-contract=off -I. tools/bench_cuda.cu \
 *     -o build/bench_cuda -lpthread -lm
 * build/bench_cuda [OP ...] [key=value ...]
 *
 *   OP               the operations to run; none: all
 *   bytes=268435456  bytes of a float32 vector
 *   runs=31          at least 7; medians are printed
 *
 * The first and the last line are the ceiling: cudaMemcpyAsync from device to device, 8 bytes an element. The lines
 * between them have op us bytes_per_element GBps of_copy reach:
 *
 *   GBps      the bytes that must move / us
 *   of_copy   GBps over the ceiling's
 *   reach     the least that of_copy should be, and ok or MISSED; - if nothing is promised.
 *             top-k's is 1/1.4, and 1/1.3 with the residual
 *
 * `copy` is a copy by a kernel. The vectors rotate through memory of at least four times the L2, which is filled anew
 * for each operation. Runs are queued ahead, so that the GPU never waits for the CPU. Two events time each run.
 * tools/bench_cuda_peers.py prints such lines for PyTorch.
 *
 * Then come collectives of 4 ranks on the GPU (tools/bench_cuda_ranks.h), and staged_2 beside the CPU's all-reduce.
 * flags_4 is the kernel of FLAGS with its ranks as blocks of one grid (tools/bench_cuda_flags.h). Last come steps of
 * build/train_gpt_cuda (tools/bench_cuda_train.h). Without a GPU the program says so and exits with 0. It exits with 1
 * if an operation fails. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#define DTRAIN_CUDA_IMPLEMENTATION
#include "dtrain_cuda.h"

#define BENCH_RUNS 1001 /* at most */
#define BENCH_WARM 5
#define BENCH_ROUND 20 /* the pool has a multiple of these vectors, so that each keeps its role in a rotation */
#define BENCH_POOL 2000
#define BENCH_BLOCK 256 /* elements of a quantiser's block */

typedef struct bench {
    dtrain_device *device;
    cudaStream_t stream;
    float *pool[BENCH_POOL];
    size_t vectors, next; /* in the pool; next: the first vector of the next run */
    size_t count, k;
    uint32_t *indices; /* k of them, and as many values */
    float *values;
    int64_t *limbs;
    dtrain_device_selection *selection;
    uint64_t step;
    double ceiling; /* GB/s */
} bench;

/* Ends a line with the share of what is possible. reach is the least that it should be; 0: nothing is promised. */
static void bench_share(const char *of, double share, double reach)
{
    if (reach > 0)
        printf(" %s=%.3f reach=%.3f %s\n", of, share, reach, share >= reach ? "ok" : "MISSED");
    else
        printf(" %s=%.3f reach=-\n", of, share);
    fflush(stdout);
}

/* Prints the line of an operation without a figure; returns 1 if it failed. */
static int bench_not_run(const char *name, dtrain_status status, const char *why)
{
    if (status == DTRAIN_ERR_UNSUPPORTED)
        printf("op=%s skipped: %s\n", name, why);
    else
        printf("op=%s FAILED: %s: %s\n", name, dtrain_status_name(status), why);
    fflush(stdout);
    return status != DTRAIN_ERR_UNSUPPORTED;
}

#include "bench_cuda_flags.h"
#include "bench_cuda_ranks.h"
#include "bench_cuda_train.h"

typedef struct bench_op {
    const char *name;
    dtrain_status (*run)(bench *b, float **x);
    size_t vectors; /* of a run */
    double bytes;   /* of an element */
    double reach;   /* 0: nothing is promised */
    int positive;   /* 1: the vectors hold squares */
} bench_op;

#define BENCH_CUDA(call) \
    do { \
        cudaError_t bench_error_ = (call); \
        if (bench_error_ != cudaSuccess) { \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(bench_error_)); \
            exit(1); \
        } \
    } while (0)

/* Draws normal numbers, or their squares; each seed gives others. */
static __global__ void bench_fill(float *x, size_t count, uint64_t seed, int positive)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u + seed * 0xd1342543de82ef95u; /* splitmix64's mixing */
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        float radius = sqrtf(-2.0f * logf(((float)(uint32_t)(z >> 32) + 1.0f) / 4294967552.0f));
        float normal = radius * cospif((float)(uint32_t)z / 2147483648.0f);
        x[i] = positive ? normal * normal : normal;
    }
}

static dtrain_status bench_memcpy(bench *b, float **x)
{
    BENCH_CUDA(cudaMemcpyAsync(x[1], x[0], b->count * sizeof(float), cudaMemcpyDeviceToDevice, b->stream));
    return DTRAIN_OK;
}

static dtrain_status bench_reduce(bench *b, float **x, int n)
{
    const void *in[8];
    void *out = x[n];
    for (int i = 0; i < n; i++)
        in[i] = x[i];
    return dtrain_device_reduce(b->device, DTRAIN_F32, DTRAIN_SUM, in, n, &out, 1, 0, b->count);
}

static dtrain_status bench_copy(bench *b, float **x)
{
    return bench_reduce(b, x, 1);
}

static dtrain_status bench_reduce_2(bench *b, float **x)
{
    return bench_reduce(b, x, 2);
}

static dtrain_status bench_reduce_8(bench *b, float **x)
{
    return bench_reduce(b, x, 8);
}

static dtrain_status bench_scale(bench *b, float **x)
{
    return dtrain_device_scale(b->device, DTRAIN_F32, x[0], 1.0001, b->count);
}

static dtrain_status bench_cast(bench *b, float **x)
{
    return dtrain_device_convert(b->device, x[0], DTRAIN_F32, x[1], DTRAIN_BF16, b->count);
}

static dtrain_status bench_squares(bench *b, float **x)
{
    return dtrain_device_squares(b->device, x[0], b->count, b->limbs);
}

static dtrain_status bench_adamw_step(bench *b, float **x, uint16_t *copy)
{
    return dtrain_device_adamw(b->device, x[0], x[1], x[2], x[3], b->count, NULL, 1e-6f, ++b->step, copy);
}

static dtrain_status bench_adamw(bench *b, float **x)
{
    return bench_adamw_step(b, x, NULL);
}

static dtrain_status bench_adamw_bf16(bench *b, float **x)
{
    return bench_adamw_step(b, x, (uint16_t *)x[4]);
}

static dtrain_status bench_topk(bench *b, float **x)
{
    return dtrain_device_select(b->device, b->selection, x[0], NULL, b->indices, b->values);
}

static dtrain_status bench_topk_add(bench *b, float **x)
{
    return dtrain_device_select(b->device, b->selection, x[0], x[1], b->indices, b->values);
}

static dtrain_status bench_sparse_add(bench *b, float **x)
{
    return dtrain_device_sparse_add(b->device, b->indices, b->values, b->k, x[0], b->count);
}

static dtrain_status bench_pack(bench *b, float **x)
{
    return dtrain_device_pack(b->device, DTRAIN_I8, BENCH_BLOCK, x[0], b->count, x[1]);
}

/* Unpacks whatever bytes the buffer holds: any byte is a code. */
static dtrain_status bench_unpack(bench *b, float **x)
{
    return dtrain_device_unpack(b->device, DTRAIN_I8, BENCH_BLOCK, x[0], x[1], b->count, 0);
}

static dtrain_status bench_unpack_add(bench *b, float **x)
{
    return dtrain_device_unpack(b->device, DTRAIN_I8, BENCH_BLOCK, x[0], x[1], b->count, 1);
}

static dtrain_status bench_flags(bench *b, float **x)
{
    return flags_run(b->device, x, b->count, BENCH_RUNS + BENCH_WARM);
}

static const double bench_code_bytes = 1 + 4.0 / BENCH_BLOCK;
static const bench_op bench_ceiling = {"memcpy", bench_memcpy, 2, 8, 0, 0};
static const bench_op bench_ops[] = {{"scale", bench_scale, 1, 8, 0.97, 0},
                                     {"copy", bench_copy, 2, 8, 0.97, 0},
                                     {"reduce_2", bench_reduce_2, 4, 12, 0.97, 0},
                                     {"reduce_8", bench_reduce_8, 10, 36, 0.93, 0},
                                     {"cast_bf16", bench_cast, 2, 6, 0.95, 0},
                                     {"squares", bench_squares, 1, 4, 0.95, 0},
                                     {"adamw", bench_adamw, 4, 28, 0.93, 1},
                                     {"adamw_bf16", bench_adamw_bf16, 5, 30, 0.92, 1},
                                     {"topk", bench_topk, 1, 4.08, 1 / 1.4, 0},
                                     {"topk_add", bench_topk_add, 2, 12.08, 1 / 1.3, 0},
                                     {"flags_4", bench_flags, 10, 32, 0, 0},
                                     {"sparse_add", bench_sparse_add, 1, 0.16, 0, 0},
                                     {"int8_pack", bench_pack, 2, 4 + bench_code_bytes, 0, 0},
                                     {"int8_unpack", bench_unpack, 2, 4 + bench_code_bytes, 0, 0},
                                     {"int8_unpack_add", bench_unpack_add, 2, 8 + bench_code_bytes, 0, 0}};

static int bench_compare(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Queues one run, on the next vectors of the pool. */
static void bench_queue(bench *b, const bench_op *op)
{
    float *x[10];
    for (size_t i = 0; i < op->vectors; i++)
        x[i] = b->pool[(b->next + i) % b->vectors];
    b->next = (b->next + op->vectors) % b->vectors;
    DTRAIN_CHECK(op->run(b, x));
}

static void bench_prepare(bench *b, const bench_op *op)
{
    for (size_t i = 0; i < b->vectors; i++)
        bench_fill<<<4096, 256, 0, b->stream>>>(b->pool[i], b->count, i + 1, op->positive);
    BENCH_CUDA(cudaGetLastError());
    b->next = 0;
    b->step = 0;
    if (op->run != bench_sparse_add)
        return;
    DTRAIN_CHECK(bench_topk(b, b->pool)); /* makes indices as those of gradients */
}

/* Returns the median time of a run in microseconds. */
static double bench_time(bench *b, const bench_op *op, int runs)
{
    static cudaEvent_t begin[BENCH_RUNS], end[BENCH_RUNS];
    static float ms[BENCH_RUNS];
    bench_prepare(b, op);
    for (int r = 0; r < runs; r++) {
        BENCH_CUDA(cudaEventCreate(&begin[r]));
        BENCH_CUDA(cudaEventCreate(&end[r]));
    }
    for (int r = -BENCH_WARM; r < runs; r++) {
        if (r >= 0)
            BENCH_CUDA(cudaEventRecord(begin[r], b->stream));
        bench_queue(b, op);
        if (r >= 0)
            BENCH_CUDA(cudaEventRecord(end[r], b->stream));
    }
    DTRAIN_CHECK(dtrain_device_wait(b->device));
    for (int r = 0; r < runs; r++) {
        BENCH_CUDA(cudaEventElapsedTime(&ms[r], begin[r], end[r]));
        BENCH_CUDA(cudaEventDestroy(begin[r]));
        BENCH_CUDA(cudaEventDestroy(end[r]));
    }
    qsort(ms, (size_t)runs, sizeof ms[0], bench_compare);
    return 1000.0 * (double)ms[runs / 2];
}

static void bench_line(bench *b, const bench_op *op, int runs)
{
    double us = bench_time(b, op, runs), rate = op->bytes * (double)b->count * 1e-3 / us;
    if (b->ceiling <= 0)
        b->ceiling = rate;
    printf("op=%s us=%.2f bytes_per_element=%.4g GBps=%.1f", op->name, us, op->bytes, rate);
    bench_share("of_copy", rate / b->ceiling, op->reach);
}

static void *bench_room(bench *b, size_t bytes)
{
    void *memory;
    DTRAIN_CHECK(dtrain_device_alloc(b->device, DTRAIN_MEMORY_DEVICE, bytes, &memory));
    return memory;
}

static void bench_open(bench *b, size_t bytes)
{
    cudaDeviceProp gpu;
    int version = 0;
    BENCH_CUDA(cudaGetDeviceProperties(&gpu, 0));
    BENCH_CUDA(cudaRuntimeGetVersion(&version));
    b->stream = (cudaStream_t)dtrain_cuda_stream(b->device);
    b->count = bytes / sizeof(float);
    b->k = dtrain_topk_count(b->count, 0.01);
    b->vectors = 4 * (size_t)gpu.l2CacheSize / bytes / BENCH_ROUND * BENCH_ROUND + BENCH_ROUND;
    if (b->vectors > BENCH_POOL)
        b->vectors = BENCH_POOL;
    for (size_t i = 0; i < b->vectors; i++)
        b->pool[i] = (float *)bench_room(b, bytes);
    b->indices = (uint32_t *)bench_room(b, b->k * sizeof(uint32_t));
    b->values = (float *)bench_room(b, b->k * sizeof(float));
    b->limbs = (int64_t *)bench_room(b, DTRAIN_SQUARES_LIMBS * sizeof(int64_t));
    DTRAIN_CHECK(dtrain_device_selection_create(b->device, b->count, b->k, &b->selection));
    const int64_t zero = 0;
    DTRAIN_CHECK(dtrain_device_fill(b->device, b->limbs, &zero, sizeof zero, DTRAIN_SQUARES_LIMBS));
    printf(
        "# %s, compute capability %d.%d, %d multiprocessors, L2 %d MiB, CUDA runtime %d, %zu vectors of %zu float32\n",
        gpu.name, gpu.major, gpu.minor, gpu.multiProcessorCount, gpu.l2CacheSize >> 20, version, b->vectors, b->count);
}

static void bench_close(bench *b)
{
    flags_close(b->device);
    dtrain_device_selection_destroy(b->device, b->selection);
    for (size_t i = 0; i < b->vectors; i++)
        dtrain_device_free(b->device, DTRAIN_MEMORY_DEVICE, b->pool[i]);
    dtrain_device_free(b->device, DTRAIN_MEMORY_DEVICE, b->indices);
    dtrain_device_free(b->device, DTRAIN_MEMORY_DEVICE, b->values);
    dtrain_device_free(b->device, DTRAIN_MEMORY_DEVICE, b->limbs);
    dtrain_cuda_destroy(b->device);
}

static const char *const bench_programs[] = {"ddp_4", "fsdp_4"};

static int bench_known(const char *name)
{
    for (size_t k = 0; k < sizeof bench_ops / sizeof bench_ops[0]; k++)
        if (strcmp(name, bench_ops[k].name) == 0)
            return 1;
    for (int k = 0; k < RANKS_BENCHES; k++)
        if (strcmp(name, ranks_plans[k].name) == 0)
            return 1;
    return strcmp(name, bench_programs[0]) == 0 || strcmp(name, bench_programs[1]) == 0;
}

static int bench_wanted(int argc, char **argv, const char *name)
{
    int named = 0;
    for (int i = 1; i < argc; i++) {
        named += strchr(argv[i], '=') == NULL;
        if (strcmp(argv[i], name) == 0)
            return 1;
    }
    return named == 0;
}

/* Reads the arguments; returns 0 if one is wrong. */
static int bench_arguments(int argc, char **argv, size_t *bytes, int *runs)
{
    for (int i = 1; i < argc; i++) {
        int known;
        if (strncmp(argv[i], "bytes=", 6) == 0)
            known = (*bytes = (size_t)strtoull(argv[i] + 6, NULL, 10) / 4 * 4) > 0;
        else if (strncmp(argv[i], "runs=", 5) == 0)
            known = (*runs = atoi(argv[i] + 5)) > 0;
        else
            known = bench_known(argv[i]);
        if (!known) {
            fprintf(stderr, "bench_cuda: %s is no operation, bytes=N or runs=N; see the top of tools/bench_cuda.cu\n",
                    argv[i]);
            return 0;
        }
    }
    if (*bytes < 1 << 20 || *bytes > (size_t)1 << 33 || *runs < 7 || *runs > BENCH_RUNS) {
        fprintf(stderr, "bench_cuda: bytes=%zu runs=%d; expected 2^20 to 2^33, and 7 to %d\n", *bytes, *runs,
                BENCH_RUNS);
        return 0;
    }
    return 1;
}

/* Runs the wanted benches of ranks: of processes, or of threads. */
static void bench_ranks(int argc, char **argv, ranks_bench *ranks, int processes, int runs)
{
    for (int k = 0; k < RANKS_BENCHES; k++)
        if (ranks[k].plan.processes == processes && bench_wanted(argc, argv, ranks[k].plan.name))
            ranks_run(&ranks[k], runs < 15 ? runs : 15);
}

int main(int argc, char **argv)
{
    static bench b;
    static train_bench train;
    size_t bytes = (size_t)1 << 28;
    int runs = 31, failed = 0;
    if (!bench_arguments(argc, argv, &bytes, &runs))
        return 2;
    train.program = TRAIN_PROGRAM;
    train.model = TRAIN_MODEL;
    train.tokens = TRAIN_TOKENS;
    ranks_bench *ranks = ranks_room();
    if (ranks == NULL)
        return 1;
    bench_ranks(argc, argv, ranks, 1, runs); /* processes are forked before this one uses the GPU */
    dtrain_status status = dtrain_cuda_create(&b.device, NULL);
    if (status == DTRAIN_ERR_UNSUPPORTED) {
        printf("not run: %s\n", dtrain_last_error());
        return 0;
    }
    DTRAIN_CHECK(status);
    bench_open(&b, bytes);
    bench_line(&b, &bench_ceiling, runs);
    for (size_t k = 0; k < sizeof bench_ops / sizeof bench_ops[0]; k++)
        if (bench_wanted(argc, argv, bench_ops[k].name))
            bench_line(&b, &bench_ops[k], runs);
    bench_line(&b, &bench_ceiling, runs);
    bench_close(&b);
    bench_ranks(argc, argv, ranks, 0, runs);
    for (int k = 0; k < RANKS_BENCHES; k++)
        if (bench_wanted(argc, argv, ranks[k].plan.name))
            failed |= ranks_print(&ranks[k], b.ceiling);
    failed |=
        train_lines(&train, bench_wanted(argc, argv, bench_programs[0]), bench_wanted(argc, argv, bench_programs[1]));
    return failed;
}
