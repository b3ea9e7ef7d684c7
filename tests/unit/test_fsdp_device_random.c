/* FSDP over memory of devices beside the same training on the CPU, for tables, descs and orders of calls that are drawn
 * from a seed: what every rank sees and is left with are the same bits. DTRAIN_TEST_INTERLEAVINGS says how many. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "async_device.h"

#ifndef CHECK_OK
#define CHECK_OK(call) \
    do { \
        if ((call) != DTRAIN_OK) \
            TEST_FAIL("seed %lu: %s: %s", (unsigned long)drawn_seed, #call, dtrain_last_error()); \
    } while (0)
#endif

enum { MOST_PARAMS = 8, MOST_UNITS = 10, MOST_ELEMENTS = 1200, MOST_RANKS = 5, MOST_NUMBERS = 40 };

static uint64_t drawn_seed;

/* ---- what is drawn, the same on every rank ---- */

static unsigned draw(uint64_t *state, unsigned below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*state >> 33) % below;
}

/* One in so many. */
static int one_in(uint64_t *state, unsigned n)
{
    return draw(state, n) == 0;
}

typedef struct drawn_param {
    char name[16];
    size_t elements; /* of a layer */
    int layers;      /* 0: not stacked */
    int unit, frozen, tied, own_data, own_grad;
} drawn_param;

typedef struct drawn {
    uint64_t seed;
    int ranks, params, units, steps, on_device, begins;
    unsigned delay_us;
    drawn_param param[MOST_PARAMS];
    dtrain_progress progress;
    dtrain_fsdp_desc desc;
    unsigned char *results; /* of all ranks */
    size_t result_bytes;
} drawn;

enum { RESULT = MOST_PARAMS * MOST_ELEMENTS * 4 * 3 + MOST_NUMBERS * 8 + 64 };

static void draw_table(drawn *d, uint64_t *s)
{
    int units = 1 + (int)draw(s, 6), owns = (int)draw(s, 3), trains = 0; /* no memory of the caller's, all, mixed */
    d->params = d->units = 0;
    while (d->units < units && d->params < MOST_PARAMS - 2) {
        drawn_param *p = &d->param[d->params];
        int again = d->units > 0 && one_in(s, 3); /* beside others of a unit */
        p->layers = one_in(s, 3) ? 1 + (int)draw(s, 3) : 0;
        p->unit = again ? (int)draw(s, (unsigned)d->units) : d->units;
        p->elements = 1 + draw(s, one_in(s, 3) ? 7 : 300);
        p->frozen = one_in(s, 5);
        p->tied = one_in(s, 6);
        p->own_data = owns == 1 || (owns == 2 && one_in(s, 2));
        p->own_grad = owns == 1 || (owns == 2 && one_in(s, 2));
        snprintf(p->name, sizeof p->name, "p%d", d->params++);
        if (p->unit + (p->layers > 0 ? p->layers : 1) > d->units)
            d->units = p->unit + (p->layers > 0 ? p->layers : 1);
    }
    for (int i = 0; i < d->params; i++)
        trains |= !d->param[i].frozen;
    if (!trains)
        d->param[0].frozen = 0;
}

static void draw_all(drawn *d, uint64_t seed)
{
    static const dtrain_dtype dtypes[4] = {DTRAIN_F32, DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16};
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 7, *s = &state;
    memset(d, 0, sizeof *d);
    for (int i = 0; i < 8; i++)
        draw(s, 2);
    d->seed = seed;
    d->ranks = 1 + (int)draw(s, MOST_RANKS);
    d->steps = 1 + (int)draw(s, 6);
    d->delay_us = one_in(s, 4) ? 400 : 40;
    draw_table(d, s);
    d->desc.strategy = (dtrain_strategy)(DTRAIN_FULL_SHARD + (int)draw(s, 4));
    d->desc.shard_size = d->ranks == 4 ? 1 << draw(s, 3) : one_in(s, 2) ? d->ranks : 1;
    d->desc.gather_dtype = dtypes[draw(s, 4)];
    d->desc.reduce_dtype = dtypes[draw(s, 4)];
    d->desc.keep_full_grads = one_in(s, 3);
    d->desc.no_overlap = one_in(s, 4);
    d->desc.no_prefetch = one_in(s, 4);
    d->desc.no_reshard_after_forward = one_in(s, 4);
    d->desc.no_broadcast = one_in(s, 3);
    d->desc.bucket_bytes = one_in(s, 2) ? 1 + draw(s, 2000) : 0;
    d->desc.loss_scale = one_in(s, 4) ? 8.0f : 0.0f;
    d->desc.loss_scale_steps = 2;
    d->desc.trace_events = one_in(s, 4) ? 5 : 0;
    d->begins = d->desc.keep_full_grads || one_in(s, 2);
    d->desc.micro_batches = 3;
    d->desc.optimizer.kind = one_in(s, 4) ? DTRAIN_OPTIMIZER_NONE : one_in(s, 2) ? DTRAIN_SGD : DTRAIN_ADAMW;
    d->desc.optimizer.momentum = d->desc.optimizer.kind == DTRAIN_SGD && one_in(s, 2) ? 0.5f : 0.0f;
    d->progress = one_in(s, 2) ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
}

/* ---- one rank ---- */

typedef struct rank_state {
    const drawn *d;
    dtrain_comm *comm;
    dtrain_device *device;
    dtrain_fsdp *fsdp;
    dtrain_param table[MOST_PARAMS];
    float *seen[MOST_PARAMS]; /* what was read of a parameter, added up */
    float *numbers, host[MOST_ELEMENTS];
    uint64_t plan, key; /* of draws that all ranks make; of gradients */
    double said[MOST_NUMBERS];
    int told, rank, spoils; /* the next gradient is not finite */
} rank_state;

static void say(rank_state *s, double number)
{
    s->said[s->told++ % MOST_NUMBERS] = number;
}

static size_t elements_of(const drawn_param *p)
{
    return p->elements * (size_t)(p->layers > 0 ? p->layers : 1);
}

static int has_unit(const drawn_param *p, int unit)
{
    return unit >= p->unit && unit < p->unit + (p->layers > 0 ? p->layers : 1);
}

static float *upload(rank_state *s, const float *values, size_t count)
{
    void *made = NULL;
    CHECK_OK(dtrain_device_alloc(s->device, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &made));
    CHECK_OK(dtrain_device_copy(s->device, made, values, count * sizeof(float)));
    return (float *)made;
}

static const float *numbers(rank_state *s, uint64_t key, size_t count)
{
    for (size_t i = 0; i < count; i++)
        s->host[i] = dtrain_random_normal(key, i);
    return s->host;
}

/* Reads a unit's parameters; with a key adds gradients that depend on them. */
static void use(rank_state *s, int unit, uint64_t key)
{
    for (int i = 0; i < s->d->params; i++) {
        const drawn_param *p = &s->d->param[i];
        if (!has_unit(p, unit))
            continue;
        float *weights = dtrain_fsdp_unit_param(s->fsdp, p->name, unit);
        float *grads = dtrain_fsdp_unit_grad(s->fsdp, p->name, unit);
        size_t at = (size_t)(unit - p->unit) * p->elements;
        CHECK_OK(dtrain_device_axpy(s->device, DTRAIN_F32, s->seen[i] + at, 0.5, weights, p->elements));
        CHECK((grads == NULL) == p->frozen);
        if (key == 0 || p->frozen)
            continue;
        (void)numbers(s, key * 64 + (uint64_t)(i * 8 + unit), p->elements);
        if (s->spoils)
            s->host[p->elements / 2] = from_bits(0x7f800000u);
        s->spoils = 0;
        CHECK_OK(dtrain_device_copy(s->device, s->numbers, s->host, p->elements * sizeof(float)));
        CHECK_OK(dtrain_device_axpy(s->device, DTRAIN_F32, grads, 0.25, weights, p->elements));
        CHECK_OK(dtrain_device_axpy(s->device, DTRAIN_F32, grads, 1.0, s->numbers, p->elements));
    }
}

static void pass_up(rank_state *s)
{
    int first_tied = -1;
    for (int i = 0; i < s->d->params; i++)
        first_tied = s->d->param[i].tied && s->d->param[i].unit == 0 ? 0 : first_tied;
    for (int unit = 0; unit < s->d->units; unit++) {
        CHECK_OK(dtrain_fsdp_gather(s->fsdp, unit));
        use(s, unit, 0);
        if (unit == s->d->units - 1 && first_tied == 0 && unit > 0) { /* a head that is tied to the first unit */
            CHECK_OK(dtrain_fsdp_gather(s->fsdp, 0));
            use(s, 0, 0);
            CHECK_OK(dtrain_fsdp_release(s->fsdp, 0));
        }
        CHECK_OK(dtrain_fsdp_release(s->fsdp, unit));
    }
}

/* leaves: this rank leaves some units out, one in so many; 0: none. */
static void pass_down(rank_state *s, uint64_t key, unsigned leaves)
{
    uint64_t mine = key * 31 + 5;
    for (int unit = s->d->units - 1; unit >= 0; unit--) {
        int out = leaves > 0 && draw(&mine, leaves) == 0;
        CHECK_OK(dtrain_fsdp_gather(s->fsdp, unit));
        use(s, unit, out ? 0 : key);
        if (out)
            CHECK_OK(dtrain_fsdp_release(s->fsdp, unit));
        else
            CHECK_OK(dtrain_fsdp_reduce(s->fsdp, unit));
    }
    if (leaves > 0) /* after every one, so that none of which all was left out is missed */
        CHECK_OK(dtrain_fsdp_next(s->fsdp));
}

static void evaluate(rank_state *s)
{
    pass_up(s);
}

/* All ranks write the same into a unit. */
static void put(rank_state *s)
{
    int unit = (int)draw(&s->plan, (unsigned)s->d->units);
    uint64_t key = draw(&s->plan, 1000);
    CHECK_OK(dtrain_fsdp_gather(s->fsdp, unit));
    for (int i = 0; i < s->d->params; i++) {
        const drawn_param *p = &s->d->param[i];
        if (has_unit(p, unit))
            CHECK_OK(dtrain_device_copy(s->device, dtrain_fsdp_unit_param(s->fsdp, p->name, unit),
                                        numbers(s, key + (uint64_t)i, p->elements), p->elements * sizeof(float)));
    }
    CHECK_OK(dtrain_fsdp_put(s->fsdp, unit));
    use(s, unit, 0);
    CHECK_OK(dtrain_fsdp_release(s->fsdp, unit));
    CHECK_OK(dtrain_fsdp_drop(s->fsdp)); /* it was no pass */
}

static void set(rank_state *s)
{
    const drawn_param *p = &s->d->param[draw(&s->plan, (unsigned)s->d->params)];
    int root = (int)draw(&s->plan, (unsigned)s->d->ranks);
    uint64_t key = draw(&s->plan, 1000);
    CHECK_OK(dtrain_fsdp_set(s->fsdp, p->name, s->rank == root ? numbers(s, key, elements_of(p)) : NULL, root));
}

static void get(rank_state *s)
{
    int i = (int)draw(&s->plan, (unsigned)s->d->params), root = (int)draw(&s->plan, (unsigned)s->d->ranks + 1) - 1;
    memset(s->host, 0, sizeof s->host);
    CHECK_OK(dtrain_fsdp_get(s->fsdp, s->d->param[i].name, root < 0 || root == s->rank ? s->host : NULL, root));
    for (size_t k = 0; k < elements_of(&s->d->param[i]); k += 17)
        say(s, (double)s->host[k]);
}

/* Updates slices by hand. */
static void update(rank_state *s)
{
    const dtrain_slice *slices;
    size_t count;
    CHECK_OK(dtrain_fsdp_finish(s->fsdp, NULL));
    CHECK_OK(dtrain_fsdp_local(s->fsdp, &slices, &count));
    for (size_t i = 0; i < count; i++)
        if (slices[i].grads != NULL && slices[i].count > 0)
            CHECK_OK(
                dtrain_device_axpy(s->device, DTRAIN_F32, slices[i].weights, -0.125, slices[i].grads, slices[i].count));
    CHECK_OK(dtrain_fsdp_publish(s->fsdp));
}

static void finish_step(rank_state *s)
{
    double norm = 0, weight = 0;
    unsigned how = draw(&s->plan, 8);
    if (how == 0) {
        if (s->rank == (int)draw(&s->plan, (unsigned)s->d->ranks))
            dtrain__fsdp_fail(s->fsdp, "it has had enough");
        CHECK_EQ(dtrain_fsdp_finish(s->fsdp, NULL), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "it has had enough");
        return;
    }
    if (how == 1) {
        CHECK_OK(dtrain_fsdp_drop(s->fsdp));
        return;
    }
    if (how == 2)
        CHECK_OK(dtrain_fsdp_finish(s->fsdp, &weight));
    if (how == 3 || how == 4)
        CHECK_OK(dtrain_fsdp_clip_grad_norm(s->fsdp, how == 3 ? 0.7f : 0.0f, &norm));
    if (how == 5)
        CHECK_OK(dtrain_fsdp_clip_grad_norm(s->fsdp, 0.6f, NULL));
    if (how == 6)
        CHECK_OK(dtrain_fsdp_clip_model_grad_norm(&s->fsdp, 1, NULL, 0.9f, &norm));
    say(s, norm + weight);
    if (s->d->desc.optimizer.kind == DTRAIN_OPTIMIZER_NONE)
        update(s);
    else
        CHECK_OK(dtrain_fsdp_step(s->fsdp, 0.01f));
}

static void step(rank_state *s)
{
    int micro = 1 + (int)draw(&s->plan, 3), begin = s->d->begins, mine = micro;
    unsigned leaves = one_in(&s->plan, 3) ? 2 + draw(&s->plan, 5) : 0;
    int rests = (int)draw(&s->plan, (unsigned)s->d->ranks * 2), fewer = 1 + (int)draw(&s->plan, 3);
    int overflows = s->d->desc.loss_scale > 0 && one_in(&s->plan, 3) ? (int)draw(&s->plan, (unsigned)s->d->ranks) : -1;
    int skips = s->d->desc.strategy == DTRAIN_DDP && one_in(&s->plan, 2);
    if (begin && rests == s->rank && s->d->ranks > 1)
        mine = micro > fewer ? micro - fewer : 0;
    if (begin)
        CHECK_OK(dtrain_fsdp_begin(s->fsdp, mine, 1.0 + s->rank % 3));
    for (int i = 0; i < micro; i++) {
        uint64_t key = 1 + draw(&s->plan, 1u << 20) + (uint64_t)s->rank * 977;
        if (i >= mine) { /* where nothing is scattered, the end of the step may stand for the last of them */
            if (!skips || i < micro - 1)
                CHECK_OK(dtrain_fsdp_join(s->fsdp));
            continue;
        }
        pass_up(s);
        s->spoils = overflows == s->rank && i == mine / 2;
        pass_down(s, key, leaves);
    }
    finish_step(s);
}

static void make(rank_state *s)
{
    const drawn *d = s->d;
    for (int i = 0; i < d->params; i++) {
        const drawn_param *p = &d->param[i];
        dtrain_param *t = &s->table[i];
        size_t n = elements_of(p);
        t->name = p->name;
        t->dtype = DTRAIN_F32;
        t->shape[0] = p->layers > 0 ? (size_t)p->layers : p->elements;
        t->shape[1] = p->layers > 0 ? p->elements : 0;
        t->stacked = p->layers > 0;
        t->unit = p->unit;
        t->frozen = p->frozen;
        t->tied = p->tied;
        t->device = s->device;
        if (p->own_data)
            t->data = upload(s, numbers(s, 100 + (uint64_t)(d->desc.no_broadcast ? 0 : s->rank), n), n);
        if (p->own_grad && !p->frozen)
            t->grad = upload(s, numbers(s, 3, n), n);
        memset(s->host, 0, sizeof s->host);
        s->seen[i] = upload(s, s->host, n);
    }
    s->numbers = upload(s, s->host, MOST_ELEMENTS);
    CHECK_OK(dtrain_fsdp_create(&s->fsdp, s->comm, s->table, (size_t)d->params, &d->desc));
    for (int i = 0; i < d->params; i++)
        if (!d->param[i].own_data)
            CHECK_OK(dtrain_fsdp_set(s->fsdp, d->param[i].name,
                                     numbers(s, 200 + (uint64_t)i, elements_of(&d->param[i])), d->ranks - 1));
}

static void keep(rank_state *s)
{
    const drawn *d = s->d;
    unsigned char *out = d->results + (size_t)s->rank * RESULT;
    dtrain_fsdp_stats stats = dtrain_fsdp_get_stats(s->fsdp);
    for (int i = 0; i < d->params; i++, out += 2 * MOST_ELEMENTS * sizeof(float)) {
        size_t bytes = elements_of(&d->param[i]) * sizeof(float);
        CHECK_OK(dtrain_fsdp_get(s->fsdp, d->param[i].name, (float *)(void *)out, -1));
        CHECK_OK(dtrain_device_copy(s->device, out + MOST_ELEMENTS * sizeof(float), s->seen[i], bytes));
    }
    say(s, (double)stats.steps + 1000.0 * (double)stats.skipped);
    say(s, (double)dtrain_fsdp_get_step(s->fsdp) + 1000.0 * s->fsdp->scaling.good_steps);
    say(s, (double)dtrain_fsdp_loss_scale(s->fsdp));
    say(s, (double)stats.dense_bytes);
    if (d->desc.reduce_dtype == 0 || d->desc.reduce_dtype == DTRAIN_F32) /* on a device they travel as float32 */
        say(s, (double)stats.sent_bytes);
    memcpy(out, s->said, sizeof s->said);
}

static void unmake(rank_state *s)
{
    dtrain_fsdp_destroy(s->fsdp);
    for (int i = 0; i < s->d->params; i++) {
        dtrain_device_free(s->device, DTRAIN_MEMORY_DEVICE, s->table[i].data);
        dtrain_device_free(s->device, DTRAIN_MEMORY_DEVICE, s->table[i].grad);
        dtrain_device_free(s->device, DTRAIN_MEMORY_DEVICE, s->seen[i]);
    }
    dtrain_device_free(s->device, DTRAIN_MEMORY_DEVICE, s->numbers);
}

static dtrain_status train(dtrain_comm *comm, void *user)
{
    const drawn *d = (const drawn *)user;
    rank_state *s = (rank_state *)calloc(1, sizeof *s);
    async_device *fake = NULL;
    s->d = d;
    s->comm = comm;
    s->rank = dtrain_comm_rank(comm);
    s->plan = d->seed;
    if (d->on_device) {
        fake = (async_device *)malloc(sizeof *fake);
        s->device = async_begin(fake, s->rank, d->seed, d->delay_us);
    }
    make(s);
    for (int i = 0; i < d->steps && s->fsdp != NULL; i++)
        switch (draw(&s->plan, 8)) {
        case 0: evaluate(s); break;
        case 1: put(s); break;
        case 2: set(s); break;
        case 3: get(s); break;
        default: step(s); break;
        }
    if (s->fsdp != NULL)
        keep(s);
    unmake(s);
    if (fake != NULL)
        async_end(fake);
    free(fake);
    free(s);
    return DTRAIN_OK;
}

static void describe(const drawn *d)
{
    fprintf(stderr,
            "seed %lu: %d ranks, %s, strategy %d/%d, gather %d reduce %d, full %d no_overlap %d no_prefetch %d "
            "no_reshard %d, optimizer %d, scale %g, bucket %zu, %d units:",
            (unsigned long)d->seed, d->ranks, d->progress == DTRAIN_PROGRESS_POLL ? "poll" : "thread",
            (int)d->desc.strategy, d->desc.shard_size, (int)d->desc.gather_dtype, (int)d->desc.reduce_dtype,
            d->desc.keep_full_grads, d->desc.no_overlap, d->desc.no_prefetch, d->desc.no_reshard_after_forward,
            (int)d->desc.optimizer.kind, (double)d->desc.loss_scale, d->desc.bucket_bytes, d->units);
    for (int i = 0; i < d->params; i++)
        fprintf(stderr, " %s[%d%s%s x%d %zu%s%s]", d->param[i].name, d->param[i].unit,
                d->param[i].frozen ? " frozen" : "", d->param[i].tied ? " tied" : "", d->param[i].layers,
                d->param[i].elements, d->param[i].own_data ? " data" : "", d->param[i].own_grad ? " grad" : "");
    fprintf(stderr, "\n");
}

static void check_seed(uint64_t seed)
{
    static unsigned char cpu[MOST_RANKS * RESULT], fakes[MOST_RANKS * RESULT];
    dtrain_comm_desc some = {0};
    drawn d;
    int before = test_failures;
    drawn_seed = seed;
    draw_all(&d, seed);
    some.timeout_ms = test_ms(20000);
    some.progress = d.progress;
    memset(cpu, 0, sizeof cpu);
    memset(fakes, 0, sizeof fakes);
    d.results = cpu;
    CHECK_OK(dtrain_run_threads(d.ranks, train, &d, &some));
    int early = test_failures;
    d.on_device = 1;
    d.results = fakes;
    if (early == before)
        CHECK_OK(dtrain_run_threads(d.ranks, train, &d, &some));
    for (size_t i = 0; i < sizeof cpu && early == before; i++)
        if (cpu[i] != fakes[i]) {
            TEST_FAIL("seed %lu: rank %zu: byte %zu differs", (unsigned long)seed, i / RESULT, i % RESULT);
            break;
        }
    if (test_failures != before)
        describe(&d);
}

TEST(tables_and_descs_that_are_drawn_give_the_cpus_bits)
{
    const char *text = getenv("DTRAIN_TEST_INTERLEAVINGS"), *from = getenv("DTRAIN_TEST_SEED");
    uint64_t first = from != NULL ? (uint64_t)atol(from) : 1, count = text != NULL ? (uint64_t)atol(text) : 120;
    for (uint64_t seed = first; seed < first + count && test_failures < 3; seed++)
        check_seed(seed);
}
