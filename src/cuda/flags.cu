/* ---- >>cuda-flags ----
 * Collectives of several GPUs in one kernel a rank: the folds of >>cuda-fold between two rounds of flags. A flag is a
 * word in memory of the rank that waits for it, one for every block, round and peer, written by the same block of the
 * peer's kernel: so all blocks of all ranks' kernels must run at the same time, and each rank's on a GPU of its own.
 * Thread p of a block sees to peer p; the barriers between phases carry what it releases and acquires to the others. */
#ifndef DTRAIN__CUDA_FLAGS
#define DTRAIN__CUDA_FLAGS
#include "fold.cu"
#ifdef DTRAIN_CUDA_EMULATE
#include <sched.h>
#include <time.h>
#endif

#define DTRAIN__CUDA_FLAGS_GLANCE 100000 /* ns between looks at the error word, which lies in the CPU's memory */

typedef struct dtrain__cuda_flags {
    dtrain__cuda_fold fold;
    uint32_t *words[DTRAIN__CUDA_FOLD_MOST];
    uint64_t *errors[DTRAIN__CUDA_FOLD_MOST];
    uint64_t deadline_ns;
    uint32_t epoch;
    int rank, ranks, at_once;
} dtrain__cuda_flags;

typedef struct dtrain__cuda_flags_block {
    int stop; /* 1: the block leaves its work undone */
} dtrain__cuda_flags_block;

/* ---- memory that several GPUs and the CPU share ---- */

DTRAIN__CUDA_FN void dtrain__cuda_release_u32(uint32_t *to, uint32_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
#else
    asm volatile("st.release.sys.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
#endif
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_acquire_u32(const uint32_t *from)
{
#ifdef DTRAIN_CUDA_EMULATE
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#else
    uint32_t value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
#endif
}

DTRAIN__CUDA_FN void dtrain__cuda_error_store(uint64_t *to, uint64_t value)
{
#ifdef DTRAIN_CUDA_EMULATE
    __atomic_store_n(to, value, __ATOMIC_RELAXED);
#else
    asm volatile("st.relaxed.sys.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
#endif
}

DTRAIN__CUDA_FN uint64_t dtrain__cuda_error_load(const uint64_t *from)
{
#ifdef DTRAIN_CUDA_EMULATE
    return __atomic_load_n(from, __ATOMIC_RELAXED);
#else
    uint64_t value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
#endif
}

/* The device's clock, in ns. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_clock(void)
{
#ifdef DTRAIN_CUDA_EMULATE
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#else
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#endif
}

/* ---- rounds ---- */

DTRAIN__CUDA_FN int dtrain__cuda_flags_is_peer(const dtrain__cuda_flags *args, dtrain__cuda_at at)
{
    return (int)at.thread < args->ranks && (int)at.thread != args->rank;
}

DTRAIN__CUDA_FN void dtrain__cuda_flags_signal(const dtrain__cuda_flags *args, dtrain__cuda_at at, int round)
{
    size_t word = (at.block * 2 + (size_t)round) * (size_t)args->ranks + (size_t)args->rank;
    if (dtrain__cuda_flags_is_peer(args, at))
        dtrain__cuda_release_u32(args->words[at.thread] + word, args->epoch);
}

DTRAIN__CUDA_FN void dtrain__cuda_flags_report(const dtrain__cuda_flags *args, uint32_t peer)
{
    uint64_t error = (uint64_t)args->epoch << 32 | (uint64_t)(uint32_t)(args->rank + 1) << 16 | (peer + 1);
    for (int rank = 0; rank < args->ranks; rank++)
        if (dtrain__cuda_error_load(args->errors[rank]) == 0)
            dtrain__cuda_error_store(args->errors[rank], error);
}

/* Waits for the peer of this thread; sets *stop where it is not to be waited for any longer. */
DTRAIN__CUDA_FN void dtrain__cuda_flags_await(const dtrain__cuda_flags *args, dtrain__cuda_at at, int round, int *stop)
{
    const uint32_t *word;
    uint64_t begin, glance, now;
    if (!dtrain__cuda_flags_is_peer(args, at))
        return;
    word = args->words[args->rank] + (at.block * 2 + (size_t)round) * (size_t)args->ranks + at.thread;
    begin = glance = dtrain__cuda_clock();
    while ((int32_t)(dtrain__cuda_acquire_u32(word) - args->epoch) < 0) {
#ifdef DTRAIN_CUDA_EMULATE
        sched_yield();
#endif
        now = dtrain__cuda_clock();
        if (now - glance < DTRAIN__CUDA_FLAGS_GLANCE)
            continue;
        glance = now;
        if (dtrain__cuda_error_load(args->errors[args->rank]) != 0) {
            *stop = 1;
            return;
        }
        if (args->deadline_ns > 0 && now - begin > args->deadline_ns) {
            dtrain__cuda_flags_report(args, at.thread);
            *stop = 1;
            return;
        }
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_flags_begin(const dtrain__cuda_flags *args, dtrain__cuda_at at, int *stop)
{
    if (at.thread == 0)
        *stop = dtrain__cuda_error_load(args->errors[args->rank]) != 0;
    dtrain__cuda_flags_signal(args, at, 0);
}

/* ---- kernels ---- */

#define DTRAIN__CUDA_FLAGS_PHASES 6

/* The kernel name_flags about the fold `name`, whose threads hold held_type of a group of `lanes` elements. */
#define DTRAIN__CUDA_FLAGS_KERNEL(name, held_type, lanes)                                                              \
    typedef struct name##_kept {                                                                                       \
        held_type group, single;                                                                                       \
    } name##_kept;                                                                                                     \
    DTRAIN__CUDA_FN void name##_flags_body(const dtrain__cuda_flags *args, dtrain__cuda_at at,                         \
                                           dtrain__cuda_flags_block *shared, name##_kept *own, int phase)              \
    {                                                                                                                  \
        const dtrain__cuda_fold *fold = &args->fold;                                                                   \
        size_t i = at.block * at.threads + at.thread, groups = fold->walk.groups, head = fold->walk.head;              \
        size_t element = head + i * (lanes), alone = i < head ? i : i + groups * (lanes);                              \
        if (phase == 0)                                                                                                \
            dtrain__cuda_flags_begin(args, at, &shared->stop);                                                         \
        else if (shared->stop)                                                                                         \
            return;                                                                                                    \
        else if (phase == 1 || phase == 4)                                                                             \
            dtrain__cuda_flags_await(args, at, phase == 4, &shared->stop);                                             \
        else if (phase == 3)                                                                                           \
            dtrain__cuda_flags_signal(args, at, 1);                                                                    \
        else if (phase == 2 && !args->at_once)                                                                         \
            name##_body(fold, at, NULL, NULL, 0);                                                                      \
        else if (phase == 2) {                                                                                         \
            if (i < groups)                                                                                            \
                own->group = name##_load(fold, element, 1);                                                            \
            if (i < fold->walk.singles)                                                                                \
                own->single = name##_load(fold, alone, 0);                                                             \
        } else if (args->at_once) {                                                                                    \
            if (i < groups)                                                                                            \
                name##_store(fold, element, 1, &own->group);                                                           \
            if (i < fold->walk.singles)                                                                                \
                name##_store(fold, alone, 0, &own->single);                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    DTRAIN__CUDA_TOGETHER(name##_flags, dtrain__cuda_flags, dtrain__cuda_flags_block, name##_kept,                     \
                          DTRAIN__CUDA_THREADS, DTRAIN__CUDA_FLAGS_PHASES)

/* What is done with every fold: each(name, held_type, lanes). */
#define DTRAIN__CUDA_FLAGS_EACH(each)                                                                                  \
    each(dtrain__cuda_sum_f32_1, dtrain__cuda_sum_f32_1_held, 4)                                                       \
        each(dtrain__cuda_sum_f32_2, dtrain__cuda_sum_f32_2_held, 4) each(dtrain__cuda_sum_f32_4,                      \
                                                                          dtrain__cuda_sum_f32_4_held, 4)              \
            each(dtrain__cuda_sum_f32_8, dtrain__cuda_sum_f32_8_held, 4) each(dtrain__cuda_sum_f16_1,                  \
                                                                              dtrain__cuda_sum_f16_1_held, 8)          \
                each(dtrain__cuda_sum_f16_2, dtrain__cuda_sum_f16_2_held, 8) each(dtrain__cuda_sum_f16_4,              \
                                                                                  dtrain__cuda_sum_f16_4_held, 8)      \
                    each(dtrain__cuda_sum_f16_8, dtrain__cuda_sum_f16_8_held, 8) each(dtrain__cuda_sum_bf16_1,         \
                                                                                      dtrain__cuda_sum_bf16_1_held, 8) \
                        each(dtrain__cuda_sum_bf16_2, dtrain__cuda_sum_bf16_2_held, 8)                                 \
                            each(dtrain__cuda_sum_bf16_4, dtrain__cuda_sum_bf16_4_held, 8)                             \
                                each(dtrain__cuda_sum_bf16_8, dtrain__cuda_sum_bf16_8_held, 8)                         \
                                    each(dtrain__cuda_tree_f64, dtrain__cuda_vector, 2) each(dtrain__cuda_tree_f32,    \
                                                                                             dtrain__cuda_vector, 4)   \
                                        each(dtrain__cuda_tree_f16, dtrain__cuda_wide, 8) each(dtrain__cuda_tree_bf16, \
                                                                                               dtrain__cuda_wide, 8)   \
                                            each(dtrain__cuda_row_f64, dtrain__cuda_vector, 2)                         \
                                                each(dtrain__cuda_row_f32, dtrain__cuda_vector, 4)                     \
                                                    each(dtrain__cuda_row_f16, dtrain__cuda_wide, 8)                   \
                                                        each(dtrain__cuda_row_bf16, dtrain__cuda_wide, 8)              \
                                                            each(dtrain__cuda_row_u8, dtrain__cuda_vector, 16)         \
                                                                each(dtrain__cuda_row_u32, dtrain__cuda_vector, 4)     \
                                                                    each(dtrain__cuda_row_u64, dtrain__cuda_vector, 2)

DTRAIN__CUDA_FLAGS_EACH(DTRAIN__CUDA_FLAGS_KERNEL)

/* ---- the operation ---- */

typedef cudaError_t (*dtrain__cuda_flags_launch)(cudaStream_t stream, size_t blocks, const dtrain__cuda_flags *args);

/* The kernel that goes by a fold. */
static dtrain__cuda_flags_launch dtrain__cuda_flags_of(dtrain__cuda_fold_launch fold)
{
#define DTRAIN__CUDA_FLAGS_FIND(name, held_type, lanes)                                                                \
    if (fold == name##_launch)                                                                                         \
        return name##_flags_launch;
    DTRAIN__CUDA_FLAGS_EACH(DTRAIN__CUDA_FLAGS_FIND)
#undef DTRAIN__CUDA_FLAGS_FIND
    return NULL;
}

/* A block a processor is resident whatever the kernel, as these take 256 threads and next to no shared memory. */
static dtrain_status dtrain__cuda_flag_traits(dtrain_device *device, dtrain_device_flag_traits *traits)
{
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    int domain = 0, bus = 0, slot = 0;
    cudaError_t error = cudaDeviceGetAttribute(&domain, cudaDevAttrPciDomainId, queue->index);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, queue->index);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&slot, cudaDevAttrPciDeviceId, queue->index);
    traits->identity = (uint64_t)(uint32_t)domain << 32 | (uint64_t)(uint32_t)bus << 8 | (uint64_t)(uint32_t)slot;
    traits->blocks = queue->processors;
    traits->block_bytes = DTRAIN__CUDA_THREADS * sizeof(dtrain__cuda_vector);
    return dtrain__cuda_status(device, "device_flag_traits", error);
}

/* The kernel's arguments, and which it is. */
static dtrain_status dtrain__cuda_flags_make(dtrain_device *device, const dtrain_device_flags *part,
                                             dtrain__cuda_flags *args, dtrain__cuda_flags_launch *launch)
{
    dtrain__cuda_fold_launch fold;
    size_t unroll;
    memset(args, 0, sizeof *args);
    args->fold.n = part->n;
    args->fold.m = part->m;
    args->deadline_ns = part->deadline_ns;
    args->epoch = part->epoch;
    args->rank = part->rank;
    args->ranks = part->ranks;
    args->at_once = part->at_once;
    for (int rank = 0; rank < part->ranks; rank++) {
        args->words[rank] = part->words[rank];
        args->errors[rank] = part->errors[rank];
    }
    dtrain_status status = dtrain__cuda_fold_make(device, &args->fold, part->dtype, part->op, (double)part->n, part->in,
                                                  part->out, part->begin, part->count, &fold, &unroll);
    *launch = dtrain__cuda_flags_of(fold);
    return status;
}

static dtrain_status dtrain__cuda_flags_run(dtrain_device *device, const dtrain_device_flags *part)
{
    dtrain__cuda_flags_launch launch;
    dtrain__cuda_flags args;
    dtrain_status status = DTRAIN_OK;
    for (int rank = 0; rank < part->ranks && status == DTRAIN_OK; rank++)
        status = dtrain__cuda_reach(device, "device_flags", "the words of a rank", part->words[rank], sizeof(uint32_t));
    if (status == DTRAIN_OK)
        status = dtrain__cuda_flags_make(device, part, &args, &launch);
    if (status != DTRAIN_OK)
        return status;
    return dtrain__cuda_status(device, "device_flags",
                               launch(dtrain__cuda_queue_of(device)->stream, (size_t)part->blocks, &args));
}

#endif
