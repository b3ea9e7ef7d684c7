/* The kernel of FLAGS for 4 ranks that are blocks of one cooperative grid. It shows the kernel's cost when no link is
 * slower than memory. Each run has arguments of its own epoch, which are copied to the GPU before it. */
#ifndef BENCH_CUDA_FLAGS_H
#define BENCH_CUDA_FLAGS_H

#define FLAGS_RANKS 4

/* The grid: blocks of rank 0, then of rank 1, and so on. */
typedef struct flags_parts {
    const dtrain__cuda_fold_flags *rank;
    size_t blocks; /* of a rank */
} flags_parts;

DTRAIN__CUDA_FN void flags_grid_body(const flags_parts *g, dtrain__cuda_at at, dtrain__cuda_flags_block *shared,
                                     dtrain__cuda_sum_f32_4_kept *own, int phase)
{
    dtrain__cuda_at mine = {at.block % g->blocks, g->blocks, at.thread, at.threads};
    dtrain__cuda_sum_f32_4_flags_body(g->rank + at.block / g->blocks, mine, shared, own, phase);
}
DTRAIN__CUDA_TOGETHER(flags_grid, flags_parts, dtrain__cuda_flags_block, dtrain__cuda_sum_f32_4_kept,
                      DTRAIN__CUDA_THREADS, DTRAIN__CUDA_FOLD_PHASES)

typedef struct flags_bench {
    dtrain__cuda_fold_flags *args, *staged; /* [FLAGS_RANKS] on the GPU; [slots, FLAGS_RANKS] pinned */
    uint32_t *words[FLAGS_RANKS];
    uint64_t *errors[FLAGS_RANKS];
    uint32_t epoch; /* of the last run */
    int blocks;     /* of a rank; the blocks of all ranks are resident, one on each processor */
} flags_bench;

static flags_bench flags_state;

static void *flags_room(dtrain_device *device, dtrain_memory memory, size_t bytes)
{
    void *made = NULL;
    DTRAIN_CHECK(dtrain_device_alloc(device, memory, bytes, &made));
    return made;
}

/* Allocates what the kernel needs; slots is how many runs may be queued at once. */
static void flags_open(dtrain_device *device, size_t slots)
{
    flags_bench *f = &flags_state;
    const uint32_t zero = 0;
    size_t bytes = FLAGS_RANKS * sizeof(dtrain__cuda_fold_flags);
    f->blocks = dtrain__cuda_queue_of(device)->processors / FLAGS_RANKS;
    f->args = (dtrain__cuda_fold_flags *)flags_room(device, DTRAIN_MEMORY_DEVICE, bytes);
    f->staged = (dtrain__cuda_fold_flags *)flags_room(device, DTRAIN_MEMORY_PINNED, slots * bytes);
    for (int k = 0; k < FLAGS_RANKS; k++) {
        size_t count = 2 * FLAGS_RANKS * (size_t)f->blocks;
        f->words[k] = (uint32_t *)flags_room(device, DTRAIN_MEMORY_DEVICE, count * sizeof zero);
        f->errors[k] = (uint64_t *)flags_room(device, DTRAIN_MEMORY_PINNED, sizeof(uint64_t));
        *f->errors[k] = 0;
        DTRAIN_CHECK(dtrain_device_fill(device, f->words[k], &zero, sizeof zero, count));
    }
}

static void flags_close(dtrain_device *device)
{
    flags_bench *f = &flags_state;
    if (f->args == NULL)
        return;
    for (int k = 0; k < FLAGS_RANKS; k++) {
        if (*f->errors[k] != 0)
            printf("op=flags_4 FAILED: rank %d waited a second for another\n", k);
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, f->words[k]);
        dtrain_device_free(device, DTRAIN_MEMORY_PINNED, f->errors[k]);
    }
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, f->args);
    dtrain_device_free(device, DTRAIN_MEMORY_PINNED, f->staged);
}

/* Queues an all-reduce of x[0] ... x[3] into x[4] ... x[7]. */
static dtrain_status flags_run(dtrain_device *device, float **x, size_t count, size_t slots)
{
    flags_bench *f = &flags_state;
    dtrain__cuda_flags_launch which;
    if (f->args == NULL)
        flags_open(device, slots);
    dtrain__cuda_fold_flags *args = f->staged + f->epoch % slots * FLAGS_RANKS;
    flags_parts parts = {f->args, (size_t)f->blocks};
    const void *in[FLAGS_RANKS] = {x[0], x[1], x[2], x[3]};
    void *out[FLAGS_RANKS] = {x[4], x[5], x[6], x[7]};
    f->epoch++;
    dtrain_status status = DTRAIN_OK;
    for (int k = 0; k < FLAGS_RANKS && status == DTRAIN_OK; k++) {
        dtrain_device_flags part;
        memset(&part, 0, sizeof part);
        part.words = f->words;
        part.errors = f->errors;
        part.deadline_ns = 1000000000;
        part.epoch = f->epoch;
        part.rank = k;
        part.ranks = FLAGS_RANKS;
        part.blocks = f->blocks;
        part.dtype = DTRAIN_F32;
        part.op = DTRAIN_SUM;
        part.in = in;
        part.out = out;
        part.n = part.m = FLAGS_RANKS;
        part.begin = count * (size_t)k / FLAGS_RANKS;
        part.count = count * (size_t)(k + 1) / FLAGS_RANKS - part.begin;
        status = dtrain__cuda_flags_make(device, &part, &args[k], &which);
    }
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(device, f->args, args, FLAGS_RANKS * sizeof *args);
    if (status == DTRAIN_OK)
        status = flags_grid_launch(device, "flags_4", (size_t)(FLAGS_RANKS * f->blocks), &parts);
    return status;
}

#endif
