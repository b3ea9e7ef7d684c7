/* Steps of a sharded stack of layers, beside the same steps with DDP, in turns in one process.
 *
 * A layer has the twelve parameters of a transformer block of `width` channels; eight of them are vectors. A layer
 * computes a loop of a fixed number of turns that stays in the registers: once forward, twice backward. The number of
 * turns is fixed so that a processor that is taken away shows in the time. A layer also reads one number of each page
 * of its weights, and writes one number of each page of its gradients.
 *
 * work is the computation of all ranks together in % of the communication alone. The communication is one all_reduce
 * for each layer. With transport=slow it is what the strategy itself sends, over links so slow that the processors idle
 * (tools/bench_link.h).
 *
 * Three objects take turns: the strategy, DDP, and the strategy over memory of the caller. The third one commits and
 * drops no page. The figures:
 *
 *   pages   the share of a step by which the first object is slower than the third
 *   cpu_    the same, by the processor time of the process, which other programs disturb less
 *   least   the same, by the fastest run of each */
#ifndef BENCH_FSDP_H
#define BENCH_FSDP_H

#define FSDP_PARAMS 12
#define FSDP_SLOW_NS 4 /* for a byte */
enum { FSDP_IT, FSDP_DDP, FSDP_PLAIN, FSDP_OBJECTS };

typedef struct fsdp_model {
    dtrain_fsdp *fsdp;
    dtrain_param table[FSDP_PARAMS];
    float *weights[FSDP_PARAMS], *grads[FSDP_PARAMS];
    size_t counts[FSDP_PARAMS]; /* elements of one layer */
} fsdp_model;

static const dtrain_strategy fsdp_strategies[] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP,
                                                  DTRAIN_HYBRID_SHARD};
static const char *const fsdp_strategy_names[] = {"full", "grad", "ddp", "hybrid"};

/* Computes for `turns` turns; with sleeps it sleeps `turns` nanoseconds, as if a device computed. */
static void fsdp_spin(uint64_t turns, int sleeps)
{
    struct timespec pause = {(time_t)(turns / 1000000000), (long)(turns % 1000000000)};
    if (sleeps) {
        nanosleep(&pause, NULL);
        return;
    }
    double a = 1.0, b = 0.5;
    for (uint64_t i = 0; i < turns; i++) {
        a = a * 0.999999 + 1e-9;
        b = b * 0.999998 + 1e-9;
    }
    volatile double kept = a + b; /* so that the compiler keeps the loop */
    (void)kept;
}

static size_t fsdp_describe(const bench *b, dtrain_param *table)
{
    static const char *const names[FSDP_PARAMS] = {"ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb",
                                                   "ln2w", "ln2b", "fcw",  "fcb",  "fcprojw",  "fcprojb"};
    size_t c = b->width, all = 0;
    const size_t rows[FSDP_PARAMS] = {c, c, 3 * c, 3 * c, c, c, c, c, 4 * c, 4 * c, c, c};
    const size_t columns[FSDP_PARAMS] = {0, 0, c, 0, c, 0, 0, 0, c, 0, 4 * c, 0};
    memset(table, 0, FSDP_PARAMS * sizeof *table);
    for (int i = 0; i < FSDP_PARAMS; i++) {
        table[i].name = names[i];
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = b->layers;
        table[i].shape[1] = rows[i];
        table[i].shape[2] = columns[i];
        table[i].stacked = 1;
        all += b->layers * rows[i] * (columns[i] > 0 ? columns[i] : 1);
    }
    return all;
}

/* Makes one of the three objects; kind is FSDP_IT, FSDP_DDP or FSDP_PLAIN. */
static void fsdp_open(const bench *b, dtrain_comm *world, int kind, fsdp_model *model)
{
    dtrain_fsdp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.strategy = kind == FSDP_DDP ? DTRAIN_DDP : fsdp_strategies[b->strategy];
    desc.shard_size = b->ranks % 2 == 0 ? b->ranks / 2 : 1;
    desc.optimizer.kind = DTRAIN_SGD;
    fsdp_describe(b, model->table);
    for (int i = 0; i < FSDP_PARAMS; i++) {
        size_t count = dtrain_param_elements(&model->table[i]);
        model->counts[i] = count / b->layers;
        if (kind == FSDP_PLAIN) {
            model->table[i].data = bench_memory(count * sizeof(float), 0);
            model->table[i].grad = bench_memory(count * sizeof(float), 0);
        }
    }
    DTRAIN_CHECK(dtrain_fsdp_create(&model->fsdp, world, model->table, FSDP_PARAMS, &desc));
    for (int i = 0; i < FSDP_PARAMS; i++) {
        model->weights[i] = dtrain_fsdp_param(model->fsdp, model->table[i].name);
        model->grads[i] = dtrain_fsdp_grad(model->fsdp, model->table[i].name);
    }
}

static void fsdp_close(fsdp_model *model)
{
    dtrain_fsdp_destroy(model->fsdp);
    for (int i = 0; i < FSDP_PARAMS; i++) {
        free(model->table[i].data);
        free(model->table[i].grad);
    }
}

static void fsdp_layer(const bench *b, const fsdp_model *model, size_t layer, int backward, uint64_t turns)
{
    volatile float seen;
    for (int i = 0; i < FSDP_PARAMS; i++) {
        const float *weights = model->weights[i] + layer * model->counts[i];
        float *grads = model->grads[i] + layer * model->counts[i];
        for (size_t k = 0; k < model->counts[i]; k += 1024) {
            seen = weights[k];
            if (backward)
                grads[k] += 1e-3f * seen;
        }
    }
    fsdp_spin(backward ? 2 * turns : turns, b->sleep);
}

static void fsdp_step(const bench *b, fsdp_model *model, uint64_t turns)
{
    for (size_t l = 0; l < b->layers; l++) {
        DTRAIN_CHECK(dtrain_fsdp_gather(model->fsdp, (int)l));
        fsdp_layer(b, model, l, 0, turns);
        DTRAIN_CHECK(dtrain_fsdp_release(model->fsdp, (int)l));
    }
    for (size_t l = b->layers; l-- > 0;) {
        DTRAIN_CHECK(dtrain_fsdp_gather(model->fsdp, (int)l));
        fsdp_layer(b, model, l, 1, turns);
        DTRAIN_CHECK(dtrain_fsdp_reduce(model->fsdp, (int)l));
    }
    DTRAIN_CHECK(dtrain_fsdp_step(model->fsdp, 1e-3f));
}

/* Returns the processor time of this process, in microseconds. */
static double fsdp_processors(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* Returns the microseconds of a step of all ranks, and its processor time. */
static double fsdp_time(const bench *b, dtrain_comm *world, fsdp_model *model, uint64_t turns, double *processors)
{
    DTRAIN_CHECK(dtrain_barrier(world));
    int64_t begin = bench_now_ns();
    *processors = fsdp_processors();
    for (size_t i = 0; i < b->steps; i++)
        fsdp_step(b, model, turns);
    DTRAIN_CHECK(dtrain_barrier(world));
    *processors = (fsdp_processors() - *processors) / (double)b->steps;
    return (double)(bench_now_ns() - begin) * 1e-3 / (double)b->steps;
}

/* Returns the microseconds of a step's communication alone. */
static double fsdp_communication(bench *b, dtrain_comm *world, fsdp_model *model, size_t elements)
{
    size_t count = elements / b->layers;
    double us[BENCH_RUNS], median;
    float *data = bench_memory(elements * sizeof(float), 0);
    for (int run = -1; run < b->runs; run++) {
        int64_t before = dtrain_fsdp_get_stats(model->fsdp).communicated_ns;
        if (dtrain_comm_rank(world) == 0)
            bench_progress(b, ", communication alone", run, b->runs);
        DTRAIN_CHECK(dtrain_barrier(world));
        int64_t begin = bench_now_ns();
        for (size_t l = 0; l < b->layers && b->transport != SLOW; l++)
            DTRAIN_CHECK(dtrain_all_reduce(world, data + l * count, data + l * count, count, DTRAIN_F32, DTRAIN_SUM));
        int64_t end = bench_now_ns();
        if (b->transport == SLOW) {
            fsdp_step(b, model, 0);
            begin = before;
            end = dtrain_fsdp_get_stats(model->fsdp).communicated_ns;
        }
        us[run < 0 ? 0 : run] = (double)(end - begin) * 1e-3;
    }
    free(data);
    median = bench_median(us, b->runs);
    DTRAIN_CHECK(dtrain_broadcast(world, &median, 1, DTRAIN_F64, 0));
    return median;
}

/* Returns the turns of a layer's forward loop with which all ranks together compute `us` microseconds in a step. */
static uint64_t fsdp_calibrate(const bench *b, dtrain_comm *world, double us)
{
    double per[BENCH_RUNS], turns;
    for (int run = -1; run < b->runs; run++) {
        if (dtrain_comm_rank(world) == 0)
            bench_progress(b, ", computation alone", run, b->runs);
        DTRAIN_CHECK(dtrain_barrier(world));
        int64_t begin = bench_now_ns();
        fsdp_spin(3000000, b->sleep);
        DTRAIN_CHECK(dtrain_barrier(world));
        per[run < 0 ? 0 : run] = (double)(bench_now_ns() - begin) * 1e-3 / 3000000.0;
    }
    turns = us / bench_median(per, b->runs) / (3.0 * (double)b->layers);
    DTRAIN_CHECK(dtrain_broadcast(world, &turns, 1, DTRAIN_F64, 0));
    return (uint64_t)turns;
}

static dtrain_status fsdp_rank(dtrain_comm *world, bench *b)
{
    fsdp_model models[FSDP_OBJECTS];
    int rank = dtrain_comm_rank(world);
    dtrain_fsdp_stats before, after;
    size_t elements;
    double processors;
    memset(models, 0, sizeof models);
    for (int kind = 0; kind < FSDP_OBJECTS; kind++)
        fsdp_open(b, world, kind, &models[kind]);
    elements = fsdp_describe(b, models[FSDP_IT].table);
    double comm_us = fsdp_communication(b, world, &models[FSDP_IT], elements);
    uint64_t turns = fsdp_calibrate(b, world, comm_us * (double)b->work / 100.0);
    for (int kind = 0; kind < FSDP_OBJECTS; kind++)
        fsdp_time(b, world, &models[kind], turns, &processors);
    before = dtrain_fsdp_get_stats(models[FSDP_IT].fsdp);
    for (int run = 0; run < b->runs; run++)
        for (int i = 0; i < FSDP_OBJECTS; i++) {
            int kind = (run + i) % FSDP_OBJECTS;
            if (rank == 0 && i == 0)
                bench_progress(b, "", run, b->runs);
            double us = fsdp_time(b, world, &models[kind], turns, &processors);
            if (rank == 0) {
                b->step_us[kind][run] = us;
                b->step_cpu[kind][run] = processors;
            }
        }
    after = dtrain_fsdp_get_stats(models[FSDP_IT].fsdp);
    if (rank == 0) {
        b->bytes = elements * sizeof(float);
        b->comm_us = comm_us;
        b->hidden = fmax(0, 1.0 - (double)(after.waited_ns - before.waited_ns) /
                                      (double)(after.communicated_ns - before.communicated_ns));
    }
    for (int kind = 0; kind < FSDP_OBJECTS; kind++)
        fsdp_close(&models[kind]);
    return DTRAIN_OK;
}

static double fsdp_least(const double *values, int n)
{
    double least = values[0];
    for (int i = 1; i < n; i++)
        least = values[i] < least ? values[i] : least;
    return least;
}

static void fsdp_print(const bench *b)
{
    double of_ddp[BENCH_RUNS], pages[BENCH_RUNS], cpu_of_ddp[BENCH_RUNS], cpu_pages[BENCH_RUNS];
    const double *it = b->step_us[FSDP_IT], *ddp = b->step_us[FSDP_DDP], *plain = b->step_us[FSDP_PLAIN];
    for (int i = 0; i < b->runs; i++) {
        of_ddp[i] = it[i] / ddp[i];
        pages[i] = 1.0 - plain[i] / it[i];
        cpu_of_ddp[i] = b->step_cpu[FSDP_IT][i] / b->step_cpu[FSDP_DDP][i];
        cpu_pages[i] = 1.0 - b->step_cpu[FSDP_PLAIN][i] / b->step_cpu[FSDP_IT][i];
    }
    progress_end();
    printf("op=fsdp transport=%s ranks=%d bytes=%zu strategy=%s work=%zu us=%.0f ddp_us=%.0f comm_us=%.0f of_ddp=%.3f "
           "of_ddp_least=%.3f cpu_of_ddp=%.3f hidden=%.3f pages=%.3f pages_least=%.3f cpu_pages=%.3f\n",
           bench_transports[b->transport], b->ranks, b->bytes, fsdp_strategy_names[b->strategy], b->work,
           bench_median(it, b->runs), bench_median(ddp, b->runs), b->comm_us, bench_median(of_ddp, b->runs),
           fsdp_least(it, b->runs) / fsdp_least(ddp, b->runs), bench_median(cpu_of_ddp, b->runs), b->hidden,
           bench_median(pages, b->runs), 1.0 - fsdp_least(plain, b->runs) / fsdp_least(it, b->runs),
           bench_median(cpu_pages, b->runs));
}

static void fsdp_slow_rank(dtrain_comm *world, bench *b)
{
    DTRAIN_CHECK(fsdp_rank(world, b));
}

static int fsdp_slow_threads(bench *b)
{
    if (bench_links(b, FSDP_SLOW_NS, fsdp_slow_rank) != 0)
        return 1;
    fsdp_print(b);
    return 0;
}

#endif
