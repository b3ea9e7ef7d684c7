/* Collectives of ranks that share GPU 0: threads, or processes over TCP.
 *
 * Between two barriers a rank makes `calls` calls and then waits for its queue. Meanwhile the CPU runs ahead of the GPU
 * if the mode allows it. A time is that of one call, on rank 0. If the CPU's all-reduce is the limit, both run in
 * turns. Sums go from one vector into another, so that the inputs do not change.
 *
 * CUDA does not work in a process that was forked after CUDA began. Therefore processes run before anything else, and
 * their figures are printed later, beside the rate of a copy. */
#ifndef BENCH_CUDA_RANKS_H
#define BENCH_CUDA_RANKS_H
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS_RUNS 1001
#define RANKS_VECTOR ((size_t)64 << 20)  /* bytes */
#define RANKS_STAGED ((size_t)256 << 20) /* bytes of a vector that goes through the CPU */

enum { RANKS_ALL_REDUCE, RANKS_REDUCE_SCATTER, RANKS_ALL_GATHER, RANKS_CPU };

typedef struct ranks_plan {
    const char *name;
    int kind, ranks, processes;
    dtrain_device_mode mode;
    size_t bytes;   /* of a float32 vector */
    int calls;      /* in a run */
    int beside_cpu; /* 1: the limit is the CPU's all-reduce, not the copy */
    double reach;   /* 0: nothing is promised */
} ranks_plan;

typedef struct ranks_bench {
    ranks_plan plan;
    int runs;
    double us[RANKS_RUNS], cpu_us[RANKS_RUNS];
    dtrain_status status; /* of the rank that failed first */
    char why[640];
} ranks_bench;

/* The bytes that must move: all inputs are read once and all outputs written once. Nothing is promised of processes,
 * because their contexts take turns on a GPU. */
static const ranks_plan ranks_plans[] = {
    {"all_reduce_4", RANKS_ALL_REDUCE, 4, 0, DTRAIN_DEVICE_EVENTS, RANKS_VECTOR, 20, 0, 0.85},
    {"reduce_scatter_4", RANKS_REDUCE_SCATTER, 4, 0, DTRAIN_DEVICE_EVENTS, RANKS_VECTOR, 20, 0, 0},
    {"all_gather_4", RANKS_ALL_GATHER, 4, 0, DTRAIN_DEVICE_EVENTS, RANKS_VECTOR, 20, 0, 0},
    {"processes_2", RANKS_ALL_REDUCE, 2, 1, DTRAIN_DEVICE_EVENTS, RANKS_VECTOR, 20, 0, 0},
    {"processes_4", RANKS_ALL_REDUCE, 4, 1, DTRAIN_DEVICE_EVENTS, RANKS_VECTOR, 20, 0, 0},
    {"staged_2", RANKS_ALL_REDUCE, 2, 1, DTRAIN_DEVICE_STAGED, RANKS_STAGED, 1, 1, 0.8},
};
enum { RANKS_BENCHES = sizeof ranks_plans / sizeof ranks_plans[0] };

typedef struct ranks_rank {
    dtrain_comm *world;
    dtrain_device *device;
    dtrain_device_group *group;
    float *in, *out, *cpu_in, *cpu_out;
} ranks_rank;

static double ranks_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static dtrain_status ranks_call(const ranks_rank *r, int kind, size_t count)
{
    size_t begin;
    dtrain_shard(r->world, count, dtrain_comm_rank(r->world), &begin);
    switch (kind) {
    case RANKS_ALL_REDUCE:
        return dtrain_device_group_all_reduce(r->group, r->in, r->out, count, DTRAIN_F32, DTRAIN_SUM);
    case RANKS_REDUCE_SCATTER:
        return dtrain_device_group_reduce_scatter(r->group, r->in, r->out, count, DTRAIN_F32, DTRAIN_SUM);
    case RANKS_ALL_GATHER: return dtrain_device_group_all_gather(r->group, r->in + begin, r->out, count, DTRAIN_F32);
    default: return dtrain_all_reduce(r->world, r->cpu_in, r->cpu_out, count, DTRAIN_F32, DTRAIN_SUM);
    }
}

/* Makes one run; *us is the time of one call. */
static dtrain_status ranks_time(const ranks_rank *r, const ranks_bench *b, int kind, double *us)
{
    dtrain_status status = dtrain_barrier(r->world);
    double begin = ranks_now_us();
    for (int i = 0; i < b->plan.calls && status == DTRAIN_OK; i++)
        status = ranks_call(r, kind, b->plan.bytes / sizeof(float));
    if (status == DTRAIN_OK)
        status = dtrain_device_group_wait(r->group);
    if (status == DTRAIN_OK)
        status = dtrain_barrier(r->world);
    *us = (ranks_now_us() - begin) / b->plan.calls;
    return status;
}

static dtrain_status ranks_open(ranks_rank *r, const ranks_bench *b)
{
    dtrain_device_group_desc desc;
    void *in = NULL, *out = NULL, *cpu_in = NULL, *cpu_out = NULL;
    float one = 1;
    memset(&desc, 0, sizeof desc);
    desc.mode = b->plan.mode;
    dtrain_status status = dtrain_device_alloc(r->device, DTRAIN_MEMORY_DEVICE, b->plan.bytes, &in);
    if (status == DTRAIN_OK)
        status = dtrain_device_alloc(r->device, DTRAIN_MEMORY_DEVICE, b->plan.bytes, &out);
    if (status == DTRAIN_OK)
        status = dtrain_device_fill(r->device, in, &one, sizeof one, b->plan.bytes / sizeof one);
    if (status == DTRAIN_OK && b->plan.beside_cpu)
        status = dtrain_device_alloc(NULL, DTRAIN_MEMORY_PINNED, b->plan.bytes, &cpu_in);
    if (status == DTRAIN_OK && b->plan.beside_cpu)
        status = dtrain_device_alloc(NULL, DTRAIN_MEMORY_PINNED, b->plan.bytes, &cpu_out);
    if (status == DTRAIN_OK && b->plan.beside_cpu)
        status = dtrain_device_fill(NULL, cpu_in, &one, sizeof one, b->plan.bytes / sizeof one);
    if (status == DTRAIN_OK)
        status = dtrain_device_group_create(&r->group, r->world, r->device, &desc);
    r->in = (float *)in;
    r->out = (float *)out;
    r->cpu_in = (float *)cpu_in;
    r->cpu_out = (float *)cpu_out;
    return status;
}

static void ranks_close(ranks_rank *r)
{
    dtrain_device_group_destroy(r->group);
    dtrain_device_free(r->device, DTRAIN_MEMORY_DEVICE, r->in);
    dtrain_device_free(r->device, DTRAIN_MEMORY_DEVICE, r->out);
    dtrain_device_free(NULL, DTRAIN_MEMORY_PINNED, r->cpu_in);
    dtrain_device_free(NULL, DTRAIN_MEMORY_PINNED, r->cpu_out);
}

/* Keeps the first failure: the other ranks fail because of it. */
static void ranks_note(ranks_bench *b, dtrain_status status)
{
    dtrain_status none = DTRAIN_OK;
    if (status != DTRAIN_OK &&
        __atomic_compare_exchange_n(&b->status, &none, status, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        snprintf(b->why, sizeof b->why, "%s", dtrain_last_error());
}

/* collective: every rank of world */
static dtrain_status ranks_measure(ranks_bench *b, dtrain_comm *world, dtrain_device *device)
{
    ranks_rank r;
    memset(&r, 0, sizeof r);
    r.world = world;
    r.device = device;
    dtrain_status status = ranks_open(&r, b);
    for (int run = -2; run < b->runs && status == DTRAIN_OK; run++) { /* the first two warm up */
        double us = 0, cpu_us = 0;
        status = ranks_time(&r, b, b->plan.kind, &us);
        if (status == DTRAIN_OK && b->plan.beside_cpu)
            status = ranks_time(&r, b, RANKS_CPU, &cpu_us);
        if (run >= 0 && dtrain_comm_rank(world) == 0) {
            b->us[run] = us;
            b->cpu_us[run] = cpu_us;
        }
    }
    ranks_note(b, status);
    ranks_close(&r);
    return status;
}

static dtrain_status ranks_thread(dtrain_comm *world, void *user)
{
    ranks_bench *b = (ranks_bench *)user;
    dtrain_device *device = NULL;
    dtrain_status status = dtrain_cuda_create(&device, NULL);
    ranks_note(b, status);
    if (status == DTRAIN_OK)
        status = ranks_measure(b, world, device);
    dtrain_cuda_destroy(device);
    return status;
}

static void ranks_process(ranks_bench *b, int rank, const char *root)
{
    dtrain_comm *world = NULL;
    dtrain_comm_desc desc;
    dtrain_device *device = NULL;
    memset(&desc, 0, sizeof desc);
    desc.rank = rank;
    desc.world_size = b->plan.ranks;
    desc.root = root;
    desc.token = "what TCP takes to meet";
    dtrain_status status =
        dtrain_cuda_create(&device, NULL); /* before the ranks meet: without a GPU none goes on */
    if (status == DTRAIN_OK)
        status = dtrain_comm_create(&world, &desc);
    ranks_note(b, status);
    if (status == DTRAIN_OK)
        ranks_measure(b, world, device);
    dtrain_comm_destroy(world);
    dtrain_cuda_destroy(device);
}

/* Runs one of the benches; *b lies in memory that its processes share. */
static void ranks_run(ranks_bench *b, int runs)
{
    pid_t pids[8];
    char root[64];
    b->runs = runs;
    if (!b->plan.processes) {
        ranks_note(b, dtrain_run_threads(b->plan.ranks, ranks_thread, b, NULL));
        return;
    }
    snprintf(root, sizeof root, "127.0.0.1:%d", 10000 + (int)getpid() % 20000);
    fflush(stdout);
    for (int rank = 0; rank < b->plan.ranks; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) {
            ranks_process(b, rank, root);
            _exit(0);
        }
    }
    for (int rank = 0; rank < b->plan.ranks; rank++) {
        int status = 0;
        waitpid(pids[rank], &status, 0);
        if (status != 0 && b->status == DTRAIN_OK) {
            b->status = DTRAIN_ERR_PEER_LOST;
            snprintf(b->why, sizeof b->why, "the process of rank %d ended with %d", rank, status);
        }
    }
}

/* Returns shared memory for all benches; NULL if there is none. */
static ranks_bench *ranks_room(void)
{
    void *room =
        mmap(NULL, RANKS_BENCHES * sizeof(ranks_bench), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ranks_bench *all = (ranks_bench *)room;
    if (room == MAP_FAILED)
        return NULL;
    for (int k = 0; k < RANKS_BENCHES; k++)
        all[k].plan = ranks_plans[k];
    return all;
}

static int ranks_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double ranks_median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, ranks_compare);
    return values[count / 2];
}

/* Prints a bench's line; ceiling is the rate of a copy in GB/s. Returns 1 if the bench failed. */
static int ranks_print(ranks_bench *b, double ceiling)
{
    int n = b->plan.ranks, all = b->plan.kind == RANKS_ALL_REDUCE;
    double bytes = (all ? 2.0 * n : n + 1.0) * sizeof(float), ratios[RANKS_RUNS];
    if (b->status != DTRAIN_OK)
        return bench_not_run(b->plan.name, b->status, b->why);
    for (int i = 0; i < b->runs; i++)
        ratios[i] = b->cpu_us[i] / b->us[i];
    double us = ranks_median(b->us, b->runs), rate = bytes * (double)(b->plan.bytes / sizeof(float)) * 1e-3 / us;
    if (b->plan.beside_cpu) {
        printf("op=%s ranks=%d bytes=%zu us=%.2f cpu_us=%.2f", b->plan.name, n, b->plan.bytes, us,
               ranks_median(b->cpu_us, b->runs));
        bench_share("of_cpu", ranks_median(ratios, b->runs), b->plan.reach);
        return 0;
    }
    printf("op=%s ranks=%d bytes=%zu us=%.2f bytes_per_element=%.4g GBps=%.1f", b->plan.name, n, b->plan.bytes, us,
           bytes, rate);
    bench_share("of_copy", rate / ceiling, b->plan.reach);
    return 0;
}

#endif
