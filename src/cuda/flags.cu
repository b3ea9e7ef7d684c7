/* ---- >>cuda-flags ----
 * Collectives of several GPUs in one kernel a rank: the folds of >>cuda-fold between two rounds of flags. A flag is a
 * word in memory of the rank that waits for it. There is one for every block, round and peer, which the same block of
 * the peer's kernel writes. So all blocks of all ranks' kernels must run at the same time, each rank's on a GPU of its
 * own. Thread p of a block waits for peer p. The barriers between phases carry what it releases and acquires to the
 * others. */
#ifndef DTRAIN__CUDA_FLAGS
#define DTRAIN__CUDA_FLAGS
#include "body.h"
#include "emulate_share.h"
#ifdef DTRAIN_CUDA_EMULATE
#include <sched.h>
#include <time.h>
#endif

#define DTRAIN__CUDA_FLAGS_MOST 64      /* most ranks */
#define DTRAIN__CUDA_FLAGS_GLANCE 100000 /* ns between looks at the error word, which is in the CPU's memory */

typedef struct dtrain__cuda_flags {
    uint32_t *words[DTRAIN__CUDA_FLAGS_MOST];
    uint64_t *errors[DTRAIN__CUDA_FLAGS_MOST];
    uint64_t deadline_ns;
    uint32_t epoch;
    int rank, ranks;
} dtrain__cuda_flags;

typedef struct dtrain__cuda_flags_block {
    int stop; /* 1: the block leaves its work undone */
} dtrain__cuda_flags_block;

/* ---- memory that several GPUs and the CPU share ---- */

#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_SYSTEM(load, store, type, letter, acquire, release, load_order, store_order) \
    DTRAIN__CUDA_FN type load(const type *from) \
    { \
        return __atomic_load_n(from, load_order); \
    } \
    DTRAIN__CUDA_FN void store(type *to, type value) \
    { \
        __atomic_store_n(to, value, store_order); \
    }
#else
#define DTRAIN__CUDA_SYSTEM(load, store, type, letter, acquire, release, load_order, store_order) \
    DTRAIN__CUDA_FN type load(const type *from) \
    { \
        type value; \
        asm volatile(acquire " %0, [%1];" : "=" letter(value) : "l"(from) : "memory"); \
        return value; \
    } \
    DTRAIN__CUDA_FN void store(type *to, type value) \
    { \
        asm volatile(release " [%0], %1;" : : "l"(to), letter(value) : "memory"); \
    }
#endif
DTRAIN__CUDA_SYSTEM(dtrain__cuda_acquire_u32, dtrain__cuda_release_u32, uint32_t, "r", "ld.acquire.sys.u32",
                    "st.release.sys.u32", __ATOMIC_ACQUIRE, __ATOMIC_RELEASE)
DTRAIN__CUDA_SYSTEM(dtrain__cuda_error_load, dtrain__cuda_error_store, uint64_t, "l", "ld.relaxed.sys.u64",
                    "st.relaxed.sys.u64", __ATOMIC_RELAXED, __ATOMIC_RELAXED)

/* Returns the device's clock, in ns. */
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

/* Waits for this thread's peer. Sets *stop when it is to wait no longer. */
DTRAIN__CUDA_FN void dtrain__cuda_flags_await(const dtrain__cuda_flags *args, dtrain__cuda_at at, int round, int *stop)
{
    const uint32_t *word;
    uint64_t begin, glance, now;
    if (!dtrain__cuda_flags_is_peer(args, at))
        return;
    word = args->words[args->rank] + (at.block * 2 + (size_t)round) * (size_t)args->ranks + at.thread;
    begin = glance = dtrain__cuda_clock();
    while ((int32_t)(dtrain__cuda_acquire_u32(word) - args->epoch) < 0) {
        now = dtrain__cuda_clock();
#ifdef DTRAIN_CUDA_EMULATE
        dtrain__cuda_emulated_pause((unsigned)((now - begin) / 256)); /* about the ns of a turn */
#endif
        if (now - glance < DTRAIN__CUDA_FLAGS_GLANCE)
            continue;
        glance = now;
        int ended = dtrain__cuda_error_load(args->errors[args->rank]) != 0;
        int late = args->deadline_ns > 0 && now - begin > args->deadline_ns;
        if (late && !ended)
            dtrain__cuda_flags_report(args, at.thread);
        if (late || ended) {
            *stop = 1; /* never set to 0: other threads wait for other peers */
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

#endif
