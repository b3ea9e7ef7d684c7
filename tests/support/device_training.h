/* Training over memory of a device beside the same training on the CPU, step for step: FSDP or DDP over ranks that are
 * threads. Both runs are one function, as every call takes NULL for a device. A file that includes it makes devices. */
#ifndef DEVICE_TRAINING_H
#define DEVICE_TRAINING_H

static dtrain_device *training_device(int rank, uint64_t seed);
static void training_device_end(dtrain_device *device);

#ifndef TRAINING_SEEDS
#define TRAINING_SEEDS 2 /* runs of each kind on the device */
#endif

#ifndef CHECK_OK
#define CHECK_OK(call) \
    do { \
        if ((call) != DTRAIN_OK) \
            TEST_FAIL("%s: %s", #call, dtrain_last_error()); \
    } while (0)
#endif

enum { RANKS = 4, LAYERS = 5, WIDTH = 37, STEPS = 3, PARAMS = 6, MOST = 4000 };

typedef struct run {
    dtrain_strategy strategy;
    int shard_size;
    dtrain_dtype gather, reduce;
    int micro_batches, keep_full_grads, own_memory, sgd, begin, ddp, ranks, no_overlap, no_reshard,
        polls,                /* no threads of the library's */
        upwards;              /* DDP: units are reduced from the first to the last */
    dtrain_compression packs; /* DDP; 0: sums travel as they are */
    uint64_t seed;
    const char *save; /* where a checkpoint goes, of rank 0's path */
    int on_device;
    unsigned char *result; /* of rank 0 */
    size_t result_bytes;
} run;

static const size_t sizes[PARAMS] = {WIDTH * 11, LAYERS *WIDTH * 7, LAYERS * 3, LAYERS * 5, 129, 2};
static const int units_of[PARAMS] = {0, 1, 1, 1, LAYERS + 1, LAYERS + 1};
static const char *const names[PARAMS] = {"wte", "attn", "bias", "fixed", "head", "gain"};

static void fill_table(dtrain_param table[PARAMS], dtrain_device *device)
{
    memset(table, 0, PARAMS * sizeof *table);
    for (int i = 0; i < PARAMS; i++) {
        int stacked = units_of[i] == 1;
        table[i].name = names[i];
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = stacked ? LAYERS : sizes[i];
        table[i].shape[1] = stacked ? sizes[i] / LAYERS : 0;
        table[i].stacked = stacked;
        table[i].unit = units_of[i];
        table[i].frozen = i == 3;
        table[i].tied = i == 0;
        table[i].device = device;
    }
}

/* Memory of the device that holds these numbers. */
static float *upload(dtrain_device *device, const float *values, size_t count)
{
    void *made = NULL;
    CHECK_OK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &made));
    CHECK_OK(dtrain_device_copy(device, made, values, count * sizeof(float)));
    return (float *)made;
}

static void drop(dtrain_device *device, void *memory)
{
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, memory);
}

static size_t part_of(int param)
{
    return sizes[param] / (units_of[param] == 1 ? LAYERS : 1);
}

static int in_unit(int param, int unit)
{
    return units_of[param] == 1 ? unit >= 1 && unit <= LAYERS : units_of[param] == unit;
}

typedef struct rank_state {
    const run *r;
    dtrain_comm *comm;
    dtrain_device *device;
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp;
    dtrain_ddp *ddp;
    dtrain_optimizer *optimizer;
    float *seen[PARAMS], *noise; /* of the device: what layers saw, added up; numbers */
    double norms;
} rank_state;

static float *address(rank_state *s, int param, int unit, int grad)
{
    size_t layer = units_of[param] == 1 ? (size_t)(unit - 1) * part_of(param) : 0;
    if (s->fsdp == NULL)
        return (float *)(grad ? s->table[param].grad : s->table[param].data) + layer;
    return grad ? dtrain_fsdp_unit_grad(s->fsdp, names[param], unit)
                : dtrain_fsdp_unit_param(s->fsdp, names[param], unit);
}

/* What a layer would do: reads its parameters, and in backward adds a gradient that depends on them. */
static void layer(rank_state *s, int unit, int backward, int step, int micro)
{
    float host[MOST];
    for (int p = 0; p < PARAMS; p++) {
        size_t n = part_of(p), at = units_of[p] == 1 ? (size_t)(unit - 1) * n : 0;
        if (!in_unit(p, unit))
            continue;
        CHECK_OK(dtrain_device_axpy(s->device, DTRAIN_F32, s->seen[p] + at, 0.5, address(s, p, unit, 0), n));
        if (!backward || s->table[p].frozen)
            continue;
        uint64_t key = (uint64_t)((step * 16 + micro) * 64 + p * 8 + unit);
        for (size_t i = 0; i < n; i++)
            host[i] = dtrain_random_normal(key, i);
        CHECK_OK(dtrain_device_copy(s->device, s->noise, host, n * sizeof *host));
        CHECK_OK(dtrain_device_axpy(s->device, DTRAIN_F32, address(s, p, unit, 1), 0.25, address(s, p, unit, 0), n));
        CHECK_OK(dtrain_device_axpy(s->device, DTRAIN_F32, address(s, p, unit, 1), 1.0, s->noise, n));
    }
}

static void fsdp_micro_batch(rank_state *s, int step, int micro)
{
    for (int unit = 0; unit < LAYERS + 2; unit++) {
        CHECK_OK(dtrain_fsdp_gather(s->fsdp, unit));
        layer(s, unit, 0, step, micro);
        CHECK_OK(dtrain_fsdp_release(s->fsdp, unit));
    }
    for (int unit = LAYERS + 1; unit >= 0; unit--) {
        CHECK_OK(dtrain_fsdp_gather(s->fsdp, unit));
        layer(s, unit, 1, step, micro);
        CHECK_OK(dtrain_fsdp_reduce(s->fsdp, unit));
    }
}

static void fsdp_step(rank_state *s, int step)
{
    double norm = 0;
    int rank = dtrain_comm_rank(s->comm);
    /* where steps are opened the last rank has a micro-batch less */
    int mine = s->r->micro_batches - (s->r->begin && rank == s->r->ranks - 1 && s->r->micro_batches > 1);
    if (s->r->begin)
        CHECK_OK(dtrain_fsdp_begin(s->fsdp, mine, 2.0 + rank));
    for (int micro = 0; micro < mine; micro++)
        fsdp_micro_batch(s, step, rank * s->r->micro_batches + micro);
    for (int micro = mine; micro < s->r->micro_batches; micro++)
        CHECK_OK(dtrain_fsdp_join(s->fsdp));
    CHECK_OK(dtrain_fsdp_clip_grad_norm(s->fsdp, 0.7f, step == 1 ? NULL : &norm));
    s->norms += norm;
    CHECK_OK(dtrain_fsdp_step(s->fsdp, 0.01f));
}

static void ddp_step(rank_state *s, int step)
{
    double norm = 0, weight = 0;
    int rank = dtrain_comm_rank(s->comm);
    CHECK_OK(dtrain_ddp_begin(s->ddp, s->r->micro_batches, 1.0 + rank));
    for (int micro = 0; micro < s->r->micro_batches; micro++)
        for (int i = LAYERS + 1; i >= 0; i--) {
            int unit = s->r->upwards ? LAYERS + 1 - i : i;
            layer(s, unit, 1, step, rank * s->r->micro_batches + micro);
            CHECK_OK(dtrain_ddp_reduce(s->ddp, unit));
        }
    CHECK_OK(dtrain_ddp_finish(s->ddp, &weight));
    CHECK_OK(dtrain_clip_grad_norm(s->table, PARAMS, 0.7f, &norm));
    s->norms += norm + weight;
    CHECK_OK(dtrain_optimizer_step(s->optimizer, 0.01f));
}

static void make(rank_state *s)
{
    const run *r = s->r;
    float first[MOST];
    dtrain_fsdp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.strategy = r->strategy;
    desc.shard_size = r->shard_size;
    desc.gather_dtype = r->gather;
    desc.reduce_dtype = r->reduce;
    desc.keep_full_grads = r->keep_full_grads;
    desc.no_overlap = r->no_overlap;
    desc.no_reshard_after_forward = r->no_reshard;
    desc.micro_batches = r->micro_batches;
    desc.optimizer.weight_decay = 0.1f;
    desc.optimizer.kind = r->sgd ? DTRAIN_SGD : DTRAIN_ADAMW;
    desc.optimizer.momentum = r->sgd ? 0.9f : 0.0f;
    fill_table(s->table, s->device);
    for (int p = 0; p < PARAMS; p++) {
        for (size_t i = 0; i < sizes[p]; i++)
            first[i] = dtrain_comm_rank(s->comm) == 0 ? dtrain_random_normal(100 + (uint64_t)p, i) : -1.0f;
        if (r->own_memory || r->ddp) {
            s->table[p].data = upload(s->device, first, sizes[p]);
            s->table[p].grad = s->table[p].frozen ? NULL : upload(s->device, first, sizes[p]);
        }
        memset(first, 0, sizes[p] * sizeof *first);
        s->seen[p] = upload(s->device, first, sizes[p]);
    }
    s->noise = upload(s->device, first, MOST);
    if (r->ddp) {
        dtrain_ddp_desc some;
        dtrain_compress_desc packs;
        memset(&some, 0, sizeof some);
        memset(&packs, 0, sizeof packs);
        packs.kind = r->packs;
        packs.least_count = 200;
        some.compress = r->packs ? &packs : NULL;
        some.no_overlap = r->no_overlap;
        some.bucket_bytes = r->packs ? 1024 : 0;
        CHECK_OK(dtrain_ddp_create(&s->ddp, s->comm, s->table, PARAMS, &some));
        CHECK_OK(dtrain_optimizer_create(&s->optimizer, s->table, PARAMS, &desc.optimizer, NULL));
        return;
    }
    CHECK_OK(dtrain_fsdp_create(&s->fsdp, s->comm, s->table, PARAMS, &desc));
    for (int p = 0; p < PARAMS && !r->own_memory; p++) {
        for (size_t i = 0; i < sizes[p]; i++)
            first[i] = dtrain_random_normal(100 + (uint64_t)p, i);
        CHECK_OK(dtrain_fsdp_set(s->fsdp, names[p], first, 0));
    }
}

/* All that the training has left, into the run's result on rank 0. */
static void keep(rank_state *s, run *r)
{
    float host[MOST];
    size_t at = 0;
    unsigned char *out = dtrain_comm_rank(s->comm) == 0 ? r->result : NULL;
    for (int p = 0; p < PARAMS; p++) {
        if (s->fsdp != NULL)
            CHECK_OK(dtrain_fsdp_get(s->fsdp, names[p], host, -1));
        else
            CHECK_OK(dtrain_device_copy(s->device, host, s->table[p].data, sizes[p] * sizeof *host));
        if (out != NULL)
            memcpy(out + at, host, sizes[p] * sizeof *host);
        at += sizes[p] * sizeof *host;
        CHECK_OK(dtrain_device_copy(s->device, host, s->seen[p], sizes[p] * sizeof *host));
        if (out != NULL)
            memcpy(out + at, host, sizes[p] * sizeof *host);
        at += sizes[p] * sizeof *host;
    }
    if (out != NULL)
        memcpy(out + at, &s->norms, sizeof s->norms);
    if (out != NULL)
        r->result_bytes = at + sizeof s->norms;
}

static void unmake(rank_state *s)
{
    dtrain_fsdp_destroy(s->fsdp);
    dtrain_ddp_destroy(s->ddp);
    dtrain_optimizer_destroy(s->optimizer);
    for (int p = 0; p < PARAMS; p++) {
        drop(s->device, s->table[p].data);
        drop(s->device, s->table[p].grad);
        drop(s->device, s->seen[p]);
    }
    drop(s->device, s->noise);
}

static dtrain_status train(dtrain_comm *comm, void *user)
{
    run *r = (run *)user;
    rank_state s;
    memset(&s, 0, sizeof s);
    s.r = r;
    s.comm = comm;
    if (r->on_device)
        s.device = training_device(dtrain_comm_rank(comm), r->seed);
    make(&s);
    for (int step = 0; step < STEPS; step++)
        (r->ddp ? ddp_step : fsdp_step)(&s, step);
    keep(&s, r);
    unmake(&s);
    if (r->on_device)
        training_device_end(s.device);
    return DTRAIN_OK;
}

static void check_run(run r, const char *what)
{
    static unsigned char cpu[1 << 17], gpu[1 << 17];
    r.ranks = r.ranks > 0 ? r.ranks : RANKS;
    r.micro_batches = r.micro_batches > 0 ? r.micro_batches : 1;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.progress = r.polls ? DTRAIN_PROGRESS_POLL : (dtrain_progress)0;
    r.on_device = 0;
    r.result = cpu;
    CHECK_OK(dtrain_run_threads(r.ranks, train, &r, &desc));
    for (r.seed = 1; r.seed <= TRAINING_SEEDS; r.seed++) {
        r.on_device = 1;
        r.result = gpu;
        CHECK_OK(dtrain_run_threads(r.ranks, train, &r, &desc));
        for (size_t i = 0; i < r.result_bytes; i++)
            if (cpu[i] != gpu[i]) {
                TEST_FAIL("%s on %d ranks, seed %d: byte %zu of %zu differs", what, r.ranks, (int)r.seed, i,
                          r.result_bytes);
                return;
            }
    }
}

static run plain(dtrain_strategy strategy)
{
    run r;
    memset(&r, 0, sizeof r);
    r.strategy = strategy;
    r.shard_size = strategy == DTRAIN_HYBRID_SHARD ? 2 : 0;
    return r;
}

static const dtrain_strategy strategies[] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP,
                                             DTRAIN_HYBRID_SHARD};

#endif
