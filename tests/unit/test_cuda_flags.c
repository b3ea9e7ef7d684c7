/* Collectives in one kernel a rank. Ranks that are blocks of one cooperative kernel, or, emulated, threads with a
 * kernel each, give the bits of the CPU's; groups in FLAGS do on several GPUs, and refuse what cannot be. */
#ifndef __CUDACC__
#define DTRAIN__CUDA_EMULATED_GPUS 8
#endif
#include "dtrain.h"
#include "cuda_device.h"
#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, MOST = 20011, ROOM = (MOST + 64) * 4, BLOCKS = 4, THREADS = 256 };

static size_t room = ROOM; /* bytes of a rank's array */

/* ---- ranks of one device ----
 * Every rank has flags, an error word and two arrays on one device; a call is made of a part for each. */

typedef struct ranks {
    dtrain_device *device;
    int n;
    uint32_t epoch;
    uint32_t *words[RANKS];
    uint64_t *errors[RANKS];
    unsigned char *in[RANKS], *out[RANKS];
} ranks;

static dtrain_device *the_device(void)
{
    static dtrain_device *device;
    if (device == NULL)
        device = cuda_device(0);
    if (device == NULL)
        exit(1);
    return device;
}

/* Begins before epoch `first`. */
static void ranks_begin(ranks *r, int n, uint32_t first)
{
    const uint32_t before = first - 1;
    memset(r, 0, sizeof *r);
    r->device = the_device();
    r->n = n;
    r->epoch = before;
    for (int k = 0; k < n; k++) {
        void *pinned = NULL;
        r->words[k] = (uint32_t *)device_put(r->device, NULL, 2 * BLOCKS * (size_t)n * sizeof before);
        CHECK_OK(dtrain_device_fill(r->device, r->words[k], &before, sizeof before, 2 * BLOCKS * (size_t)n));
        CHECK_OK(dtrain_device_alloc(r->device, DTRAIN_MEMORY_PINNED, sizeof(uint64_t), &pinned));
        r->errors[k] = (uint64_t *)pinned;
        *r->errors[k] = 0;
        r->in[k] = (unsigned char *)device_put(r->device, NULL, room);
        r->out[k] = (unsigned char *)device_put(r->device, NULL, room);
    }
    CHECK_OK(dtrain_device_wait(r->device));
}

static void ranks_end(ranks *r)
{
    CHECK_OK(dtrain_device_wait(r->device));
    for (int k = 0; k < r->n; k++) {
        device_drop(r->device, r->words[k]);
        device_drop(r->device, r->in[k]);
        device_drop(r->device, r->out[k]);
        dtrain_device_free(r->device, DTRAIN_MEMORY_PINNED, r->errors[k]);
    }
}

/* A rank's part of a reduction, or of a copy of its own input, and where its pointers are. */
typedef struct part {
    dtrain_device_flags flags;
    const void *in[RANKS];
    void *out[RANKS];
} part;

enum { ALL_REDUCE, AT_ONCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, KINDS };

typedef struct call {
    int kind, in_place;
    dtrain_dtype dtype;
    dtrain_op op;
    size_t count, offset; /* offset: bytes, by which the k-th rank's arrays begin k times later, modulo 16 */
    uint64_t deadline_ns;
    int blocks;
} call;

static size_t width_of(const call *c)
{
    return dtrain_dtype_bits(c->dtype) / 8;
}

static unsigned char *in_of(const ranks *r, const call *c, int k)
{
    return r->in[k] + c->offset * (size_t)k % 16;
}

static unsigned char *out_of(const ranks *r, const call *c, int k)
{
    return c->in_place ? in_of(r, c, k) : r->out[k] + c->offset * (size_t)(k + 1) % 16;
}

static part part_of(ranks *r, const call *c, int k)
{
    part p;
    size_t begin, mine = cut_of(c->count, r->n, k, &begin), width = width_of(c);
    int copies = c->kind == ALL_GATHER || c->kind == BROADCAST;
    memset(&p, 0, sizeof p);
    p.flags.words = r->words;
    p.flags.errors = r->errors;
    p.flags.deadline_ns = c->deadline_ns;
    p.flags.epoch = r->epoch;
    p.flags.rank = k;
    p.flags.ranks = r->n;
    p.flags.blocks = c->blocks;
    p.flags.at_once = c->kind == AT_ONCE;
    p.flags.dtype = copies ? DTRAIN_U8 : c->dtype;
    p.flags.op = copies ? DTRAIN_OR : c->op;
    p.flags.begin = c->kind == ALL_REDUCE || c->kind == REDUCE_SCATTER ? begin : 0;
    p.flags.count = c->kind == AT_ONCE ? c->count : copies ? mine * width : mine;
    for (int j = 0; j < r->n; j++) {
        p.in[j] = in_of(r, c, j);
        p.out[j] = out_of(r, c, j);
        if (copies) /* rank k sends elements from `begin` on, of its own input or of the last rank's */
            p.out[j] = (unsigned char *)p.out[j] + begin * width;
    }
    p.flags.n = r->n;
    p.flags.m = r->n;
    if (c->kind == AT_ONCE || c->kind == REDUCE_SCATTER) {
        p.flags.m = 1;
        p.out[0] = out_of(r, c, k);
    }
    if (copies) {
        p.flags.n = 1;
        p.in[0] = in_of(r, c, c->kind == BROADCAST ? r->n - 1 : k) + begin * width;
    }
    if (p.flags.count == 0)
        p.flags.n = p.flags.m = 0;
    return p;
}

/* ---- two ways to run all ranks' parts ---- */

/* As one kernel, of a rank's blocks after another's. */
typedef struct grid {
    const dtrain__cuda_fold_flags *rank;
    size_t blocks;
} grid;

#define GRID_KERNEL(name, dtype, inputs) \
    DTRAIN__CUDA_FN void grid_##name##_body(const grid *g, dtrain__cuda_at at, dtrain__cuda_flags_block *shared, \
                                            name##_kept *own, int phase) \
    { \
        dtrain__cuda_at mine = {at.block % g->blocks, g->blocks, at.thread, at.threads}; \
        name##_flags_body(g->rank + at.block / g->blocks, mine, shared, own, phase); \
    } \
    DTRAIN__CUDA_TOGETHER(grid_##name, grid, dtrain__cuda_flags_block, name##_kept, THREADS, DTRAIN__CUDA_FOLD_PHASES)

DTRAIN__CUDA_FOLD_EACH(GRID_KERNEL)

static dtrain_status grid_launch(dtrain__cuda_flags_launch which, dtrain_device *device, size_t blocks, const grid *g)
{
#define GRID_FIND(name, dtype, inputs) \
    if (which == name##_flags_launch) \
        return grid_##name##_launch(device, "grid", blocks, g);
    DTRAIN__CUDA_FOLD_EACH(GRID_FIND)
    return DTRAIN_ERR_INVALID;
}

/* The CPU's memory is as good as the device's to an emulated kernel's arguments. */
static void run_grid(ranks *r, const call *c)
{
    dtrain__cuda_fold_flags args[RANKS];
    dtrain__cuda_flags_launch which[RANKS];
    grid g;
    g.blocks = (size_t)c->blocks;
    int same = 1;
    for (int k = 0; k < r->n; k++) {
        part p = part_of(r, c, k);
        p.flags.in = p.in;
        p.flags.out = p.out;
        CHECK_OK(dtrain__cuda_flags_make(r->device, &p.flags, &args[k], &which[k]));
        same &= which[k] == which[0];
    }
    if (!same) { /* ranks without a share have another kernel: all have that which is for any number */
        for (int k = 0; k < r->n; k++)
            if (args[k].fold.n > 0)
                which[0] = which[k];
    }
    g.rank = (const dtrain__cuda_fold_flags *)device_put(r->device, args, sizeof args);
    CHECK_OK(grid_launch(which[0], r->device, (size_t)(r->n * c->blocks), &g));
    CHECK_OK(dtrain_device_wait(r->device));
    device_drop(r->device, (void *)(uintptr_t)g.rank);
}

#ifndef __CUDACC__
/* As a thread and a queue for each rank. */
typedef struct runner {
    ranks *r;
    const call *c;
    dtrain_device *device;
    int rank, late_us;
} runner;

static void *run_rank(void *user)
{
    runner *w = (runner *)user;
    part p = part_of(w->r, w->c, w->rank);
    p.flags.in = p.in;
    p.flags.out = p.out;
    if (w->late_us > 0)
        usleep((useconds_t)w->late_us);
    CHECK_OK(w->device->ops->flags(w->device, &p.flags));
    return NULL;
}

/* All ranks but `without`; how late each comes is the seed's. */
static void run_threads(ranks *r, const call *c, int without, uint64_t seed)
{
    runner all[RANKS];
    pthread_t threads[RANKS];
    for (int k = 0; k < r->n; k++) {
        int late = seed > 0 ? (int)(dtrain_random_u64(seed, (uint64_t)k) % 64) - 48 : 0;
        runner one = {r, c, cuda_device(0), k, late};
        all[k] = one;
    }
    for (int k = 0; k < r->n; k++)
        if (k != without)
            CHECK_EQ(pthread_create(&threads[k], NULL, run_rank, &all[k]), 0);
    for (int k = 0; k < r->n; k++) {
        if (k != without)
            pthread_join(threads[k], NULL);
        dtrain_cuda_destroy(all[k].device);
    }
}
#endif

/* ---- what is due ---- */

static void value(dtrain_dtype dtype, int rank, size_t i, unsigned char *to)
{
    double x = dtrain_random_normal((uint64_t)rank + 1, i);
    uint64_t bits = dtrain_random_u64((uint64_t)rank + 7, i);
    if (dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16)
        CHECK_EQ(dtrain_convert(&x, DTRAIN_F64, to, dtype, 1), DTRAIN_OK);
    else
        memcpy(to, &bits, dtrain_dtype_bits(dtype) / 8);
}

/* The CPU's collective on the same numbers: `whole` is what an all-reduce gives. Copies need no arithmetic. */
typedef struct due {
    const call *c;
    unsigned char *in[RANKS], *whole;
} due;

static dtrain_status reduce_on_cpu(dtrain_comm *world, void *user)
{
    due *d = (due *)user;
    int rank = dtrain_comm_rank(world);
    unsigned char *out = rank == 0 ? d->whole : (unsigned char *)malloc(room);
    dtrain_status status = dtrain_all_reduce(world, d->in[rank], out, d->c->count, d->c->dtype, d->c->op);
    if (rank != 0)
        free(out);
    return status;
}

/* A rank's numbers, which repeat after a prime number of them. */
static void values(const call *c, int rank, unsigned char *to)
{
    static const size_t period = 65521;
    size_t width = width_of(c);
    for (size_t i = 0; i < c->count && i < period; i++)
        value(c->dtype, rank, i, to + i * width);
    for (size_t i = period; i < c->count; i += period)
        memcpy(to + i * width, to, (c->count - i < period ? c->count - i : period) * width);
}

/* Runs a call one way and compares every byte of every rank's output, the room around it included. */
static void compare(ranks *r, const call *c, int threads, uint64_t seed)
{
    unsigned char *got = (unsigned char *)malloc(3 * room), *expected = got + room, *send = expected + room;
    size_t width = width_of(c), bytes = c->count * width;
    due d;
    memset(&d, 0, sizeof d);
    d.c = c;
    d.whole = (unsigned char *)calloc(1, room);
    for (int k = 0; k < r->n; k++) {
        d.in[k] = (unsigned char *)calloc(1, room);
        values(c, k, d.in[k]);
        memset(send, 0x5a, room);
        CHECK_OK(dtrain_device_copy(r->device, r->out[k], send, room));
        memcpy(send + (in_of(r, c, k) - r->in[k]), d.in[k], bytes);
        CHECK_OK(dtrain_device_copy(r->device, r->in[k], send, room));
    }
    r->epoch++;
#ifndef __CUDACC__
    if (threads)
        run_threads(r, c, -1, seed);
    else
#endif
        run_grid(r, c);
    (void)threads, (void)seed;
    if (c->kind == BROADCAST)
        memcpy(d.whole, d.in[r->n - 1], bytes);
    else if (c->kind != ALL_GATHER)
        CHECK_OK(dtrain_run_threads(r->n, reduce_on_cpu, &d, NULL));
    for (int k = 0; k < r->n; k++) {
        unsigned char *to = c->in_place ? r->in[k] : r->out[k];
        size_t begin, mine = cut_of(c->count, r->n, k, &begin) * width, at = (size_t)(out_of(r, c, k) - to);
        memset(expected, 0x5a, room);
        if (c->in_place)
            memcpy(expected + at, d.in[k], bytes);
        if (c->kind == REDUCE_SCATTER)
            memcpy(expected + at + begin * width, d.whole + begin * width, mine);
        for (int j = 0; j < r->n && c->kind == ALL_GATHER; j++) {
            mine = cut_of(c->count, r->n, j, &begin) * width;
            memcpy(expected + at + begin * width, d.in[j] + begin * width, mine);
        }
        if (c->kind != REDUCE_SCATTER && c->kind != ALL_GATHER)
            memcpy(expected + at, d.whole, bytes);
        CHECK_OK(dtrain_device_copy(r->device, got, to, room));
        if (memcmp(got, expected, room) != 0)
            TEST_FAIL("kind %d, %s, op %d, %zu elements, rank %d of %d, in place %d, offset %zu, epoch %x: other bits",
                      c->kind, dtrain_dtype_name(c->dtype), (int)c->op, c->count, k, r->n, c->in_place, c->offset,
                      r->epoch);
        CHECK_EQ(*r->errors[k], 0);
    }
    for (int k = 0; k < r->n; k++)
        free(d.in[k]);
    free(d.whole);
    free(got);
}

/* Calls of every kind, odd counts, at any alignment and in place; the epochs wrap in the midst of them. */
static void every_call(int threads)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 1000, 4093, MOST};
    static const int sizes[] = {1, 2, 3, 4, 8};
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_I8, DTRAIN_F16, DTRAIN_U32};
    the_device();
    for (int s = 0; s < 5; s++) {
        ranks r;
        ranks_begin(&r, sizes[s], 0xfffffff0u);
        for (int kind = 0; kind < KINDS; kind++)
            for (int i = 0; i < 9; i++) {
                call c = {kind, i % 2, dtypes[(i + s) % 5], DTRAIN_SUM, counts[i], 0, 0, 1 + (kind + i) % BLOCKS};
                if (dtypes[(i + s) % 5] == DTRAIN_F32 && kind != AT_ONCE)
                    c.op = DTRAIN_MEAN;
                c.offset = i % 3 == 0 ? 0 : i % 3 == 1 ? 4 : 1;
                if (kind == AT_ONCE) { /* arrays at one offset, and no more than blocks hold */
                    size_t most = (size_t)BLOCKS * THREADS * 16 / width_of(&c);
                    c.offset = 0;
                    c.count = c.count < most ? c.count : most;
                    c.blocks = BLOCKS;
                }
                compare(&r, &c, threads, 0);
            }
        CHECK(r.epoch < 0x80000000u); /* has wrapped */
        ranks_end(&r);
    }
}

TEST(ranks_of_one_cooperative_grid_give_the_cpus_bits)
{
    every_call(0);
}

TEST(every_dtype_and_op_gives_the_cpus_bits)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16, DTRAIN_F64, DTRAIN_U8,
                                          DTRAIN_I8,  DTRAIN_I32,  DTRAIN_U32, DTRAIN_I64, DTRAIN_U64};
    static const dtrain_op ops[] = {DTRAIN_SUM, DTRAIN_PROD, DTRAIN_MIN, DTRAIN_MAX};
    static const int sizes[] = {2, 3, 8};
    for (int s = 0; s < 3; s++) {
        ranks r;
        ranks_begin(&r, sizes[s], 1);
        for (int d = 0; d < 10; d++)
            for (int o = 0; o < 4; o++)
                for (int kind = ALL_REDUCE; kind <= AT_ONCE; kind++) {
                    call c = {kind, kind, dtypes[d], ops[o], 801, 0, 0, 2};
                    compare(&r, &c, 0, 0);
                }
        ranks_end(&r);
    }
}

TEST(large_vectors_give_the_cpus_bits)
{
    static const int sizes[] = {2, 4, 8};
    size_t most = cuda_large();
    for (int s = 0; s < 3 && most > 0; s++) {
        ranks r;
        room = (most + 64) * 4;
        ranks_begin(&r, sizes[s], 1);
        for (int kind = ALL_REDUCE; kind <= BROADCAST; kind++) {
            call c = {kind, kind % 2, DTRAIN_F32, DTRAIN_SUM, most - (size_t)(kind % 2), 4, 0, BLOCKS};
            if (kind != AT_ONCE)
                compare(&r, &c, 0, 0);
        }
        ranks_end(&r);
        room = ROOM;
    }
}

#ifndef __CUDACC__
TEST(ranks_with_a_kernel_each_give_the_cpus_bits)
{
    every_call(1);
}

/* Who comes when is drawn; a call's inputs are the outputs of those before it where it is in place. */
TEST(kernels_that_begin_at_any_time_give_the_cpus_bits)
{
    const char *text = getenv("DTRAIN_TEST_INTERLEAVINGS");
    int rounds = text != NULL ? atoi(text) : 100;
    static const int sizes[] = {2, 3, 4, 8};
    for (int s = 0; s < 4; s++) {
        ranks r;
        ranks_begin(&r, sizes[s], 0u - (uint32_t)(rounds / 8));
        for (int i = 0; i < rounds / 4; i++) {
            call c = {i % KINDS, i % 2, DTRAIN_F32, DTRAIN_SUM, 1 + (size_t)i * 7 % 900, 0, 0, 1 + i % BLOCKS};
            c.offset = c.kind != AT_ONCE && i % 3 == 0 ? 4 : 0;
            compare(&r, &c, 1, (uint64_t)i + 1);
        }
        ranks_end(&r);
    }
}

TEST(a_rank_that_never_comes_is_an_error_at_the_deadline_on_all_others)
{
    for (int kind = ALL_REDUCE; kind <= AT_ONCE; kind++) {
        ranks r;
        struct timespec begin, end;
        call c = {kind, 0, DTRAIN_F32, DTRAIN_SUM, 1000, 0, 1000000000, BLOCKS};
        ranks_begin(&r, 4, 0xffffffffu);
        r.epoch++;
        for (int k = 0; k < 4; k++)
            CHECK_OK(dtrain_device_fill(r.device, r.out[k], "x", 1, ROOM));
        clock_gettime(CLOCK_MONOTONIC, &begin);
        run_threads(&r, &c, 2, 0);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double ms = (double)(end.tv_sec - begin.tv_sec) * 1e3 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-6;
        CHECK(ms >= 1000 && ms < 30000);
        for (int k = 0; k < 4; k++) {
            unsigned char got[4000];
            CHECK_EQ(*r.errors[k] >> 32, 0xffffffffu);
            CHECK_EQ(*r.errors[k] & 0xffff, 2 + 1); /* who was waited for */
            CHECK_OK(dtrain_device_copy(r.device, got, r.out[k], sizeof got));
            for (size_t i = 0; i < sizeof got; i++)
                if (got[i] != 'x') {
                    TEST_FAIL("rank %d has written byte %zu", k, i);
                    break;
                }
        }
        ranks_end(&r);
    }
}

TEST(a_rank_that_comes_after_an_error_leaves_at_once)
{
    ranks r;
    call c = {ALL_REDUCE, 0, DTRAIN_F32, DTRAIN_SUM, 1000, 0, 0, BLOCKS}; /* no deadline */
    ranks_begin(&r, 3, 5);
    r.epoch++;
    for (int k = 0; k < 3; k++)
        *r.errors[k] = 1;
    run_threads(&r, &c, 1, 0);
    CHECK_EQ(*r.errors[0], 1);
    ranks_end(&r);
}
#endif

/* ---- groups ---- */

typedef struct world {
    dtrain_device_mode asked, due;
    dtrain_status status; /* of the creation */
    const char *text;
    int one_gpu; /* 1: all ranks have queues on GPU 0 */
    int wrong;
} world;

static int gpus(void)
{
    int count = 0;
    the_device(); /* ends here without a GPU */
    CHECK_OK(dtrain_cuda_count(&count));
    return count < RANKS ? count : RANKS;
}

static int differ(const float *got, const float *expected, size_t count)
{
    return count > 0 && memcmp(got, expected, count * sizeof *got) != 0;
}

/* A call of each kind on count numbers at `at`, which are `there` on the device; returns how many are wrong. */
static int calls(dtrain_comm *comm, dtrain_device *device, dtrain_device_group *group, float *at, size_t count)
{
    int rank = dtrain_comm_rank(comm), size = dtrain_comm_size(comm), wrong = 0;
    size_t begin, mine = dtrain_shard(comm, count, rank, &begin);
    float *in = (float *)calloc(3 * (size_t)MOST, sizeof *in), *out = in + MOST, *got = out + MOST;
    for (size_t i = 0; i < count; i++)
        in[i] = dtrain_random_normal((uint64_t)rank + 1, i);
    CHECK_OK(dtrain_device_copy(device, at, in, count * sizeof *in));
    CHECK_OK(dtrain_device_group_all_reduce(group, at, at, count, DTRAIN_F32, DTRAIN_MEAN));
    CHECK_OK(dtrain_device_copy(device, got, at, count * sizeof *got));
    CHECK_OK(dtrain_all_reduce(comm, in, out, count, DTRAIN_F32, DTRAIN_MEAN));
    wrong += differ(got, out, count);
    CHECK_OK(dtrain_device_copy(device, at, in, count * sizeof *in));
    CHECK_OK(dtrain_device_group_reduce_scatter(group, at, at + begin, count, DTRAIN_F32, DTRAIN_SUM));
    CHECK_OK(dtrain_device_group_all_gather(group, at + begin, at, count, DTRAIN_F32));
    CHECK_OK(dtrain_device_group_wait(group));
    CHECK_OK(dtrain_device_copy(device, got, at, count * sizeof *got));
    CHECK_OK(dtrain_all_reduce(comm, in, out, count, DTRAIN_F32, DTRAIN_SUM));
    wrong += differ(got, out, count) + (mine > count);
    CHECK_OK(dtrain_device_copy(device, at, in, count * sizeof *in));
    CHECK_OK(dtrain_device_group_broadcast(group, at, count, DTRAIN_F32, size - 1));
    CHECK_OK(dtrain_device_copy(device, got, at, count * sizeof *got));
    for (size_t i = 0; i < count; i++)
        in[i] = dtrain_random_normal((uint64_t)size, i);
    wrong += differ(got, in, count);
    free(in);
    return wrong;
}

static dtrain_status one_rank(dtrain_comm *comm, void *user)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 1000, 4097, MOST - 4};
    world *w = (world *)user;
    dtrain_device *device = cuda_device(w->one_gpu ? 0 : dtrain_comm_rank(comm));
    dtrain_device_group *group = NULL;
    dtrain_device_group_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = w->asked;
    dtrain_status status = dtrain_device_group_create(&group, comm, device, &desc);
    CHECK_EQ(status, w->status);
    if (status == DTRAIN_OK) {
        float *there = (float *)device_put(device, NULL, ROOM);
        CHECK_EQ(dtrain_device_group_mode(group), w->due);
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
            __atomic_add_fetch(&w->wrong, calls(comm, device, group, there + i % 4, counts[i]), __ATOMIC_SEQ_CST);
        dtrain_device_group_destroy(group);
        device_drop(device, there);
    } else {
        CHECK_CONTAINS(dtrain_last_error(), w->text);
    }
    dtrain_cuda_destroy(device);
    return DTRAIN_OK;
}

/* Groups of 2, 3, 4 and 8 ranks, as many as there are GPUs for. */
static void groups_of(world w)
{
    static const int sizes[] = {1, 2, 3, 4, 8};
    for (int i = w.status == DTRAIN_OK ? 0 : 1; i < 5; i++) {
        if (sizes[i] > gpus() && !w.one_gpu) {
            printf("skipped: %d ranks, as there are %d GPUs\n", sizes[i], gpus());
            continue;
        }
        w.wrong = 0;
        CHECK_OK(dtrain_run_threads(sizes[i], one_rank, &w, NULL));
        CHECK_EQ(w.wrong, 0);
    }
}

TEST(a_gpu_each_goes_by_flags_where_asked_and_gives_the_cpus_bits)
{
    world w = {DTRAIN_DEVICE_FLAGS, DTRAIN_DEVICE_FLAGS, DTRAIN_OK, NULL, 0, 0};
    groups_of(w);
}

TEST(a_gpu_each_goes_by_events_where_nothing_is_asked)
{
    world w = {DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_EVENTS, DTRAIN_OK, NULL, 0, 0};
    groups_of(w);
}

TEST(two_ranks_on_one_gpu_are_refused_flags)
{
    world w = {DTRAIN_DEVICE_FLAGS, DTRAIN_DEVICE_FLAGS, DTRAIN_ERR_UNSUPPORTED, "the same physical device", 1, 0};
    groups_of(w);
}

#ifndef __CUDACC__
TEST(gpus_that_cannot_reach_each_other_go_staged)
{
    world w = {DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_STAGED, DTRAIN_OK, NULL, 0, 0};
    world asked = {DTRAIN_DEVICE_FLAGS, DTRAIN_DEVICE_FLAGS, DTRAIN_ERR_UNSUPPORTED, "this GPU cannot reach", 0, 0};
    dtrain__cuda_emulated.apart = 1;
    CHECK_OK(dtrain_run_threads(2, one_rank, &w, NULL));
    CHECK_EQ(w.wrong, 0);
    CHECK_OK(dtrain_run_threads(3, one_rank, &asked, NULL));
    dtrain__cuda_emulated.apart = 0;
}

/* Memory of a peer is opened once, and the program's own last error stays what it was: none. */
TEST(a_reduction_opens_a_peers_memory)
{
    dtrain_device *one = cuda_device(6), *other = cuda_device(7), *again = cuda_device(6);
    const float x = 3;
    float got = 0;
    void *mine = device_put(one, NULL, 4), *theirs = device_put(other, &x, 4);
    const void *in[1] = {theirs};
    memset(dtrain__cuda_emulated.peers, 0, sizeof dtrain__cuda_emulated.peers);
    dtrain__cuda_emulated.apart = 1;
    CHECK_ERROR(dtrain_device_reduce(one, DTRAIN_F32, DTRAIN_SUM, in, 1, &mine, 1, 0, 1), DTRAIN_ERR_INVALID,
                "memory of cuda:7, which this GPU cannot reach");
    dtrain__cuda_emulated.apart = 0;
    CHECK_OK(dtrain_device_reduce(one, DTRAIN_F32, DTRAIN_SUM, in, 1, &mine, 1, 0, 1));
    CHECK_OK(dtrain_device_copy(one, &got, mine, 4));
    CHECK_EQ(got, 3);
    CHECK_EQ(dtrain__cuda_emulated.peers[6][7], 1);
    CHECK_EQ(dtrain__cuda_emulated.peers[7][6], 0);
    CHECK_OK(dtrain_device_reduce(again, DTRAIN_F32, DTRAIN_SUM, in, 1, &mine, 1, 0, 1));
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    device_drop(one, mine);
    device_drop(other, theirs);
    dtrain_cuda_destroy(one);
    dtrain_cuda_destroy(other);
    dtrain_cuda_destroy(again);
}

/* ---- groups that go wrong: rank 1 of 4 has been told of a call that its device does not get to, or fails at ---- */

static dtrain_device_ops faulty;
static int fault; /* 1: the call is lost in the queue; 2: an error */

static dtrain_status faulty_flags(dtrain_device *device, const dtrain_device_flags *flags)
{
    if (flags->rank == 1 && fault == 1)
        return DTRAIN_OK;
    if (flags->rank == 1 && fault == 2)
        return dtrain_error_set(DTRAIN_ERR_IO, "the device broke");
    return dtrain__cuda_ops.flags(device, flags);
}

typedef struct victim {
    dtrain_status status;
    const char *text[4];
    int destroys; /* 1: nobody asks how the call went */
} victim;

static dtrain_status one_is_not_there(dtrain_comm *comm, void *user)
{
    const victim *v = (const victim *)user;
    int rank = dtrain_comm_rank(comm);
    dtrain_device *device = cuda_device(rank);
    dtrain_device_group *group = NULL;
    dtrain_device_group_desc desc;
    float *x = (float *)device_put(device, NULL, ROOM);
    memset(&desc, 0, sizeof desc);
    desc.mode = DTRAIN_DEVICE_FLAGS;
    device->ops = &faulty;
    CHECK_OK(dtrain_device_group_create(&group, comm, device, &desc));
    dtrain_status status = dtrain_device_group_all_reduce(group, x, x, 5000, DTRAIN_F32, DTRAIN_SUM);
    if (fault == 1 && rank == 1)
        usleep(3500000); /* its own device waits for nobody: the others' have to give up first */
    if (status == DTRAIN_OK && !v->destroys)
        status = dtrain_device_group_wait(group);
    if (!v->destroys) {
        CHECK_EQ(status, v->status);
        CHECK_CONTAINS(dtrain_last_error(), v->text[rank]);
    }
    dtrain_device_group_destroy(group);
    device->ops = &dtrain__cuda_ops;
    device_drop(device, x);
    dtrain_cuda_destroy(device);
    return DTRAIN_OK;
}

static void go_wrong(int which, int64_t timeout_ms, const victim *v)
{
    world w = {DTRAIN_DEVICE_FLAGS, DTRAIN_DEVICE_FLAGS, DTRAIN_OK, NULL, 0, 0};
    dtrain_comm_desc desc;
    victim copy = *v;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = timeout_ms;
    faulty = dtrain__cuda_ops;
    faulty.flags = faulty_flags;
    fault = which;
    CHECK_OK(dtrain_run_threads(4, one_is_not_there, &copy, &desc));
    CHECK_OK(dtrain_run_threads(4, one_rank, &w, NULL)); /* the next group works */
    CHECK_EQ(w.wrong, 0);
}

TEST(a_device_that_does_not_come_is_a_timeout_that_names_it_on_every_rank)
{
    victim v = {DTRAIN_ERR_TIMEOUT, {"rank 1, whose queue", "rank 1, whose queue", "rank 1, whose queue", ""}, 0};
    v.text[3] = v.text[0];
    go_wrong(1, 1500, &v);
    v.destroys = 1;
    go_wrong(1, 1500, &v);
}

TEST(a_device_that_fails_ends_the_call_of_the_others_long_before_the_deadline)
{
    victim v = {DTRAIN_ERR_IO, {"rank 1", "the device broke", "rank 1", "rank 1"}, 0};
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    go_wrong(2, 60000, &v);
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK(end.tv_sec - begin.tv_sec < 30);
}
#endif
