/* ---- >>test_ddp_compressed ----
 * DDP and FSDP whose sums travel compressed: overlapped or not the same bits, those of an aggregator over a table of
 * layers; bytes by hand; a create that fails on one rank, ranks that leave or are killed while buckets are under way.
 */
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "worlds.h"

enum { LAYERS = 4, ROWS = 60, COLUMNS = 50, MATRIX = ROWS * COLUMNS, BIAS = 7, HEAD = 40 * 30 };
enum { FLAT = LAYERS * (MATRIX + BIAS) + HEAD, PARTS = 2 * LAYERS + 1, STEPS = 4 };

/* unit 0: the head; units 1 to LAYERS: a matrix and a bias each, stacked, or in `apart` each by itself. */
typedef struct model {
    float data[FLAT], grad[FLAT];
    dtrain_param table[3], apart[PARTS];
} model;

static dtrain_param param(model *m, const char *name, int unit, size_t at)
{
    dtrain_param made;
    memset(&made, 0, sizeof made);
    made.name = name;
    made.dtype = DTRAIN_F32;
    made.unit = unit;
    made.data = m->data + at;
    made.grad = m->grad + at;
    return made;
}

static model *model_new(int rank)
{
    static const char *const names[PARTS] = {"head", "m1", "b1", "m2", "b2", "m3", "b3", "m4", "b4"};
    model *m = (model *)calloc(1, sizeof *m);
    m->apart[0] = m->table[0] = param(m, "head", 0, 0);
    m->apart[0].shape[0] = m->table[0].shape[0] = 40;
    m->apart[0].shape[1] = m->table[0].shape[1] = 30;
    m->table[1] = param(m, "matrix", 1, HEAD);
    m->table[2] = param(m, "bias", 1, HEAD + LAYERS * MATRIX);
    m->table[1].stacked = m->table[2].stacked = 1;
    m->table[1].shape[0] = m->table[2].shape[0] = LAYERS;
    m->table[1].shape[1] = ROWS;
    m->table[1].shape[2] = COLUMNS;
    m->table[2].shape[1] = BIAS;
    for (int l = 0; l < LAYERS; l++) {
        dtrain_param *p = &m->apart[1 + 2 * l];
        p[0] = param(m, names[1 + 2 * l], 1 + l, HEAD + (size_t)l * MATRIX);
        p[1] = param(m, names[2 + 2 * l], 1 + l, HEAD + LAYERS * MATRIX + (size_t)l * BIAS);
        p[0].shape[0] = ROWS;
        p[0].shape[1] = COLUMNS;
        p[1].shape[0] = BIAS;
    }
    for (int i = 0; i < FLAT; i++)
        m->data[i] = (float)(i % 97) * (float)(rank + 1);
    return m;
}

/* Adds a unit's gradients of one micro-batch. */
static void compute(model *m, int rank, int micro, int step, int unit)
{
    for (int i = 0; i < PARTS; i++) {
        float *grad = (float *)m->apart[i].grad;
        for (size_t k = 0; m->apart[i].unit == unit && k < dtrain_param_elements(&m->apart[i]); k++) {
            uint64_t seed = (uint64_t)(1000 * step + 10 * rank + micro);
            grad[k] += dtrain_random_normal(seed, (uint64_t)(grad - m->grad) + k);
        }
    }
}

/* What a world's ranks shall do, set before they start. */
static struct {
    dtrain_compress_desc compress;
    dtrain_ddp_desc ddp;
    int buckets;
    const int *begins;     /* of a bucket, among the parts */
    float reference[FLAT]; /* of the last step */
} plan;

static void plan_of(dtrain_compression kind)
{
    memset(&plan, 0, sizeof plan);
    plan.compress.kind = kind;
    plan.compress.topk.schedule.ratio = kind == DTRAIN_COMPRESS_TOPK ? 0.05 : 0;
    plan.ddp.compress = &plan.compress;
}

static int micros_of(int rank)
{
    return rank == 0 ? 2 : rank == 1 ? 0 : 1;
}

/* Steps of a DDP, whose ranks come to their units at other times in every step. */
static dtrain_status steps(dtrain_ddp *ddp, model *m, int rank, int first, int end)
{
    dtrain_status status = DTRAIN_OK;
    for (int step = first; step < end && status == DTRAIN_OK; step++) {
        double total = 0;
        int micros = micros_of(rank);
        status = dtrain_ddp_begin(ddp, micros, micros * 1.5);
        for (int micro = 0; micro < micros; micro++)
            for (int unit = LAYERS; unit >= 0 && status == DTRAIN_OK; unit--) {
                compute(m, rank, micro, step, unit);
                if ((step + unit + rank) % 3 == 0)
                    usleep(2000);
                status = dtrain_ddp_reduce(ddp, unit);
            }
        if (status == DTRAIN_OK)
            status = dtrain_ddp_finish(ddp, &total);
        if (status == DTRAIN_OK)
            CHECK(total == 4.5);
    }
    return status;
}

static void as_the_reference(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = model_new(rank);
    dtrain_ddp *ddp = NULL;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &plan.ddp), DTRAIN_OK);
    CHECK(m->data[96] == 96.0f); /* rank 0's */
    CHECK_EQ(steps(ddp, m, rank, 0, STEPS), DTRAIN_OK);
    CHECK(memcmp(m->grad, plan.reference, sizeof m->grad) == 0);
    int states = pieces_named(dtrain_ddp_pieces(ddp), "residual");
    CHECK(states > 0 && states <= 2 * PARTS);
    dtrain_ddp_destroy(ddp);
    free(m);
}

/* Aggregators over the tables of buckets, of sums that are made by hand. */
static void makes_the_reference(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = model_new(rank);
    dtrain_aggregator aggregators[LAYERS + 1];
    for (int b = 0; b < plan.buckets; b++)
        CHECK_EQ(dtrain_aggregator_compressed(&aggregators[b], world, m->apart + plan.begins[b],
                                              (size_t)(plan.begins[b + 1] - plan.begins[b]), &plan.compress),
                 DTRAIN_OK);
    for (int step = 0; step < STEPS; step++) {
        double total = 0;
        memset(m->grad, 0, sizeof m->grad);
        for (int micro = 0; micro < micros_of(rank); micro++)
            for (int unit = LAYERS; unit >= 0; unit--)
                compute(m, rank, micro, step, unit);
        for (int b = 0; b < plan.buckets; b++)
            CHECK_EQ(aggregators[b].aggregate(aggregators[b].self, m->apart + plan.begins[b],
                                              (size_t)(plan.begins[b + 1] - plan.begins[b]), micros_of(rank) * 1.5,
                                              &total),
                     DTRAIN_OK);
    }
    if (rank == 0)
        memcpy(plan.reference, m->grad, sizeof m->grad);
    for (int b = 0; b < plan.buckets; b++)
        dtrain_aggregator_destroy(&aggregators[b]);
    free(m);
}

/* Where buckets of 1 MiB, of 14,000 and of 28,000 bytes and more, and of single units, begin among the parts: a layer
 * has 12,028 bytes. */
static const struct {
    size_t bytes;
    int buckets, begins[LAYERS + 2];
} cuts[] = {
    {0, 1, {0, PARTS}}, {14000, 3, {0, 1, 5, PARTS}}, {28000, 2, {0, 3, PARTS}}, {1, 5, {0, 1, 3, 5, 7, PARTS}}};

TEST(overlapped_or_not_the_bits_are_those_of_an_aggregator_a_bucket)
{
    const dtrain_compression kinds[] = {DTRAIN_COMPRESS_TOPK, DTRAIN_COMPRESS_INT8, DTRAIN_COMPRESS_SIGN,
                                        DTRAIN_COMPRESS_POWERSGD, DTRAIN_COMPRESS_BF16};
    dtrain_comm_desc polled;
    memset(&polled, 0, sizeof polled);
    polled.progress = DTRAIN_PROGRESS_POLL;
    for (int k = 0; k < 20; k++) {
        int before = test_failures;
        plan_of(kinds[k % 5]);
        plan.compress.feedback.momentum = k % 5 == 0 ? 0.9f : 0;
        plan.compress.least_count = k >= 15 ? 1500 : 0; /* alone, the head is too small then */
        plan.buckets = cuts[k / 5].buckets;
        plan.begins = cuts[k / 5].begins;
        plan.ddp.bucket_bytes = cuts[k / 5].bytes;
        on_threads(3, makes_the_reference, NULL);
        on_threads(3, as_the_reference, NULL);
        plan.ddp.no_overlap = 1;
        on_threads(3, as_the_reference, NULL);
        plan.ddp.no_overlap = 0;
        on_threads(3, as_the_reference, &polled);
        on_processes(3, as_the_reference, NULL);
        on_cables(3, as_the_reference, NULL);
        if (test_failures != before)
            TEST_FAIL("kind %d, buckets of %zu bytes", (int)kinds[k % 5], cuts[k / 5].bytes);
    }
}

/* Makes STEPS steps of a DDP, and leaves the last gradients in m. */
static void make_steps(dtrain_comm *world, model *m, const dtrain_ddp_desc *desc)
{
    dtrain_ddp *ddp = NULL;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, desc), DTRAIN_OK);
    CHECK_EQ(steps(ddp, m, dtrain_comm_rank(world), 0, STEPS), DTRAIN_OK);
    dtrain_ddp_destroy(ddp);
}

/* A dense parameter's gradients are those of a DDP that compresses nothing, the others' those of one without it. */
static void leaves_one_dense(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    dtrain_ddp_desc plain = plan.ddp;
    plain.compress = NULL;
    for (int which = 0; which < 3; which += 2) { /* the head, or all biases, between the matrices */
        model *m = model_new(rank), *whole = model_new(rank), *without = model_new(rank);
        m->table[which].dense = 1;
        without->table[which].frozen = 1;
        make_steps(world, m, &plan.ddp);
        make_steps(world, whole, &plain);
        make_steps(world, without, &plan.ddp);
        const float *at = (const float *)m->table[which].grad, *exact = (const float *)whole->table[which].grad;
        CHECK(memcmp(at, exact, dtrain_param_elements(&m->table[which]) * sizeof(float)) == 0);
        CHECK(memcmp(m->grad + HEAD, whole->grad + HEAD, MATRIX * sizeof(float)) != 0);
        if (which == 0 || plan.compress.kind == DTRAIN_COMPRESS_POWERSGD) /* else a vector of four matrices */
            CHECK(memcmp(m->grad + HEAD, without->grad + HEAD, LAYERS * MATRIX * sizeof(float)) == 0);
        free(m);
        free(whole);
        free(without);
    }
}

TEST(dense_parameters_are_sent_as_they_are_beside_others)
{
    const dtrain_compression kinds[] = {DTRAIN_COMPRESS_TOPK, DTRAIN_COMPRESS_INT8, DTRAIN_COMPRESS_POWERSGD};
    for (int k = 0; k < 3; k++) {
        plan_of(kinds[k]);
        plan.compress.feedback.start_step = k == 2 ? 2 : 0;
        on_threads(3, leaves_one_dense, NULL);
        on_processes(3, leaves_one_dense, NULL);
    }
}

static void counts(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = model_new(rank);
    const dtrain_bucket *buckets = NULL;
    dtrain_ddp *ddp = NULL;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &plan.ddp), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_buckets(ddp, &buckets), 0);
    CHECK_EQ(steps(ddp, m, rank, 0, 2), DTRAIN_OK);
    /* 25,000 bytes and more: two layers of 3,000 + 7 floats are 24,056, three 36,084; then one and the head, as the
     * last */
    CHECK_EQ(dtrain_ddp_buckets(ddp, &buckets), 2);
    CHECK(buckets[0].first_unit == 2 && buckets[0].last_unit == LAYERS);
    CHECK(buckets[1].first_unit == 0 && buckets[1].last_unit == 1);
    /* of 3 ranks each sends two parts, and its own sum twice: 9,021 numbers are 3,007 a part, which have 12 scales;
     * 4,207 are 1,403, 1,402 and 1,402, with 6 */
    CHECK_EQ(buckets[0].dense_bytes, 4 * 3007 * 4);
    CHECK_EQ(buckets[0].sent_bytes, 4 * (3007 + 48));
    CHECK_EQ(buckets[1].dense_bytes, 8 * 4207 / 3 * 2);
    CHECK_EQ(buckets[1].sent_bytes, rank == 0 ? 2 * (1402 + 24) + 2 * (1403 + 24) : 3 * (1402 + 24) + 1403 + 24);
    CHECK(buckets[0].ns > 0 && buckets[1].ns > 0);
    CHECK_EQ(dtrain_ddp_buckets(NULL, NULL), 0);
    dtrain_ddp_destroy(ddp);
    free(m);
}

TEST(bytes_are_counted_by_bucket_and_step)
{
    plan_of(DTRAIN_COMPRESS_INT8);
    plan.ddp.bucket_bytes = 25000;
    on_threads(3, counts, NULL);
}

/* The trace has an event a bucket with both numbers. */
static void traces(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    char path[64], text[20000], expected[96];
    model *m = model_new(rank);
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    snprintf(path, sizeof path, "/tmp/dtrain-trace-%ld-%d", (long)getpid(), rank);
    memset(&desc, 0, sizeof desc);
    desc.strategy = DTRAIN_DDP;
    desc.compress = &plan.compress;
    desc.trace_events = 100;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, m->table, 3, &desc), DTRAIN_OK);
    for (int unit = LAYERS; unit >= 0; unit--) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
        compute(m, rank, 0, 0, unit);
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_step(fsdp, 0.1f), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_trace(fsdp, path), DTRAIN_OK);
    FILE *file = fopen(path, "r");
    size_t bytes = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    text[bytes] = 0;
    if (file != NULL)
        fclose(file);
    unlink(path);
    /* 13,228 numbers: parts of 4,410, 4,409 and 4,409, with 18 scales */
    int dense = 8 * 13228 / 3 * 2, own = rank == 0 ? 4410 : 4409;
    int sent = 2 * (own + 72) + 13228 - own + 2 * 72;
    snprintf(expected, sizeof expected, "\"args\":{\"dense_bytes\":%d,\"sent_bytes\":%d}", dense, sent);
    CHECK_CONTAINS(text, expected);
    CHECK_CONTAINS(text, "reduce unit 0");
    dtrain_fsdp_stats stats = dtrain_fsdp_get_stats(fsdp);
    CHECK(stats.sent_bytes == (uint64_t)sent && stats.dense_bytes == (uint64_t)dense);
    CHECK_EQ(dtrain_fsdp_buckets(fsdp, NULL), 1);
    dtrain_fsdp_destroy(fsdp);
    free(m);
}

TEST(the_trace_says_what_a_bucket_sent)
{
    plan_of(DTRAIN_COMPRESS_INT8);
    on_threads(3, traces, NULL);
}

/* Everything is selected: hybrid sharding that compresses between nodes does what the dense one does. */
static void hybrid(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m[2];
    for (int compressed = 0; compressed < 2; compressed++) {
        dtrain_fsdp_desc desc;
        dtrain_fsdp *fsdp = NULL;
        m[compressed] = model_new(0);
        memset(&desc, 0, sizeof desc);
        desc.strategy = DTRAIN_HYBRID_SHARD;
        desc.shard_size = 2;
        desc.optimizer.kind = DTRAIN_SGD;
        desc.compress = compressed ? &plan.compress : NULL;
        CHECK_EQ(dtrain_fsdp_create(&fsdp, world, m[compressed]->table, 3, &desc), DTRAIN_OK);
        for (int step = 0; step < 3; step++) {
            for (int unit = LAYERS; unit >= 0; unit--) {
                CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
                compute(m[compressed], rank, 0, step, unit);
                CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
            }
            CHECK_EQ(dtrain_fsdp_step(fsdp, 0.1f), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_unshard(fsdp), DTRAIN_OK);
        CHECK((pieces_named(dtrain_fsdp_pieces(fsdp), rank % 2 ? "shard-1/residual" : "shard-0/residual") > 0) ==
              compressed);
        dtrain_fsdp_destroy(fsdp);
    }
    CHECK(memcmp(m[0]->data, m[1]->data, sizeof m[0]->data) == 0);
    CHECK(m[0]->data[96] != 96.0f);
    free(m[0]);
    free(m[1]);
}

TEST(hybrid_sharding_compresses_between_nodes)
{
    plan_of(DTRAIN_COMPRESS_TOPK);
    plan.compress.topk.schedule.ratio = 1;
    on_threads(4, hybrid, NULL);
}

static void alone(dtrain_comm *world)
{
    model *m = model_new(0);
    dtrain_ddp *ddp = NULL;
    size_t left = 0;
    const dtrain_bucket *buckets;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &plan.ddp), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_begin(ddp, 1, 1), DTRAIN_OK);
    for (int unit = LAYERS; unit >= 0; unit--) {
        compute(m, 0, 0, 0, unit);
        CHECK_EQ(dtrain_ddp_reduce(ddp, unit), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
    for (int i = 0; i < FLAT; i++)
        left += m->grad[i] != 0;
    CHECK_EQ(left, 827); /* a sixteenth of 13,228, rounded up */
    CHECK_EQ(dtrain_ddp_buckets(ddp, &buckets), 1);
    CHECK_EQ(buckets[0].sent_bytes, 0);
    dtrain_ddp_destroy(ddp);
    free(m);
}

TEST(a_world_of_one_compresses_too)
{
    plan_of(DTRAIN_COMPRESS_TOPK);
    plan.compress.topk.schedule.ratio = 0.0625;
    on_threads(1, alone, NULL);
}

/* Two parameters of 3 and 2 elements, in buckets of their own, both too small to be compressed. */
static void small_ones(dtrain_comm *world)
{
    float data[5] = {0}, grad[5];
    const float expected[3][5] = {{3, 6, 9, 12, 15}, {4.5f, 9, 13.5f, 18, 22.5f}, {5.25f, 10.5f, 15.75f, 21, 26.25f}};
    dtrain_param two[2];
    dtrain_ddp *ddp = NULL;
    memset(two, 0, sizeof two);
    for (int i = 0; i < 2; i++) {
        two[i].name = i == 0 ? "three" : "two";
        two[i].dtype = DTRAIN_F32;
        two[i].unit = i;
        two[i].shape[0] = i == 0 ? 3 : 2;
        two[i].data = data + 3 * i;
        two[i].grad = grad + 3 * i;
    }
    CHECK_EQ(dtrain_ddp_create(&ddp, world, two, 2, &plan.ddp), DTRAIN_OK);
    for (int step = 0; step < 3; step++) {
        CHECK_EQ(dtrain_ddp_begin(ddp, 1, 0.5), DTRAIN_OK); /* of 2 ranks: divided by 1 */
        for (int i = 0; i < 5; i++)
            grad[i] = (float)((i + 1) * (1 + dtrain_comm_rank(world))); /* the sum is 3 (i + 1) */
        CHECK(dtrain_ddp_reduce(ddp, 1) == DTRAIN_OK && dtrain_ddp_reduce(ddp, 0) == DTRAIN_OK);
        CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
        CHECK(memcmp(grad, expected[step], sizeof grad) == 0); /* each is half the last, and the sum */
    }
    dtrain_ddp_destroy(ddp);
}

TEST(what_is_sent_as_it_is_has_a_velocity_too)
{
    plan_of(DTRAIN_COMPRESS_TOPK);
    plan.compress.feedback.momentum = 0.5f;
    plan.ddp.bucket_bytes = 1;
    on_threads(2, small_ones, NULL);
}

/* ---- what goes wrong ---- */

/* Which request for memory is refused to this thread, counted from 1; 0: none. */
static __thread long refused, requests;
static long refuses, told,
    made_parts; /* what rank 1 is refused; how often the others were told why, and all was made */

static void *refusing_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    if (new_bytes > 0 && refused > 0 && ++requests == refused)
        return NULL;
    return test_resize(pointer, old_bytes, new_bytes, align);
}

static void create_on_one_rank_fails(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = model_new(rank);
    dtrain_ddp *ddp = NULL;
    refused = rank == 1 ? refuses : 0;
    requests = 0;
    dtrain_status status = dtrain_ddp_create(&ddp, world, m->table, 3, &plan.ddp);
    refused = 0;
    if (status == DTRAIN_OK)
        __atomic_add_fetch(&made_parts, 1, __ATOMIC_SEQ_CST);
    else if (rank == 1)
        CHECK_EQ(status, DTRAIN_ERR_MEMORY);
    else
        CHECK(status != DTRAIN_ERR_TIMEOUT && strstr(dtrain_last_error(), "rank 1") != NULL);
    if (strstr(dtrain_last_error(), "rank 1 of 3 could not make its part: ") != NULL)
        __atomic_add_fetch(&told, 1, __ATOMIC_SEQ_CST);
    dtrain_ddp_destroy(ddp);
    free(m);
}

TEST(a_create_that_fails_on_one_rank_is_an_error_on_all)
{
    dtrain_allocator allocator = {refusing_resize, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    desc.timeout_ms = test_ms(10000);
    plan_of(DTRAIN_COMPRESS_POWERSGD);
    for (refuses = 1; refuses < 1000; refuses++) {
        int before = test_failures;
        made_parts = 0;
        on_threads(3, create_on_one_rank_fails, &desc);
        CHECK(made_parts == 0 || made_parts == 3);
        if (test_failures != before)
            TEST_FAIL("request %ld", refuses);
        if (made_parts == 3)
            break;
    }
    CHECK(told > 2 * (LAYERS + 20)); /* the states of ranges, and what an object has besides */
}

static void differs(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = model_new(rank);
    dtrain_ddp *ddp = NULL;
    dtrain_compress_desc own = plan.compress;
    dtrain_ddp_desc desc = plan.ddp;
    desc.compress = &own;
    own.block = rank == 2 ? 64 : 128;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_ERR_MISMATCH);
    own.block = 0;
    own.feedback.start_step = rank == 2 ? 1 : 0;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_ERR_MISMATCH);
    own.feedback.start_step = 0;
    m->table[1].dense = rank == 1;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_ERR_MISMATCH);
    m->table[1].dense = 0;
    desc.compress = rank == 0 ? NULL : &plan.compress;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_ERR_MISMATCH);
    desc.compress = &own;
    own.kind = (dtrain_compression)900;
    own.block = 0;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "kind 900 without own");
    CHECK(ddp == NULL);
    free(m);
}

TEST(ranks_that_compress_otherwise_are_refused)
{
    plan_of(DTRAIN_COMPRESS_INT8);
    on_threads(3, differs, NULL);
}

TEST(what_cannot_be_compressed_is_refused)
{
    model *m = model_new(0);
    dtrain_fsdp_plan_result result, dense;
    dtrain_fsdp_desc desc;
    plan_of(DTRAIN_COMPRESS_POWERSGD);
    memset(&desc, 0, sizeof desc);
    desc.compress = &plan.compress;
    CHECK_EQ(dtrain_fsdp_plan(m->table, 3, &desc, 4, 0, &result), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "use DTRAIN_DDP or DTRAIN_HYBRID_SHARD");
    desc.strategy = DTRAIN_HYBRID_SHARD;
    desc.shard_size = 2;
    CHECK_EQ(dtrain_fsdp_plan(m->table, 3, &desc, 4, 0, &result), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "PowerSGD needs whole matrices");
    desc.strategy = DTRAIN_DDP;
    desc.reduce_dtype = DTRAIN_BF16;
    CHECK_EQ(dtrain_fsdp_plan(m->table, 3, &desc, 4, 0, &result), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "unsent gradients are kept in float32");
    desc.reduce_dtype = (dtrain_dtype)0;
    CHECK_EQ(dtrain_fsdp_plan(m->table, 3, &desc, 4, 0, &result), DTRAIN_OK);
    CHECK_EQ(result.compression, 2 * 4 * FLAT); /* a residual, before and after a step */
    desc.compress = NULL;
    CHECK_EQ(dtrain_fsdp_plan(m->table, 3, &desc, 4, 0, &dense), DTRAIN_OK);
    CHECK(dense.compression == 0 && dense.peak + result.compression == result.peak);
    free(m);
}

/* Rank 1 leaves, or is killed, while the others' buckets are under way. */
static int loses_rank_1(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), killed = *(const int *)s->user;
    model *m = model_new(rank);
    dtrain_ddp *ddp = NULL;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &plan.ddp), DTRAIN_OK);
    CHECK_EQ(steps(ddp, m, rank, 0, 1), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 1 && killed)
        kill(getpid(), SIGKILL);
    CHECK_EQ(dtrain_ddp_begin(ddp, 1, 1), DTRAIN_OK);
    if (rank != 1) {
        dtrain_status status = DTRAIN_OK;
        for (int unit = LAYERS; unit >= 0 && status == DTRAIN_OK; unit--) {
            compute(m, rank, 0, 1, unit);
            status = dtrain_ddp_reduce(ddp, unit);
        }
        status = status == DTRAIN_OK ? dtrain_ddp_finish(ddp, NULL) : status;
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank 1");
        CHECK_EQ(dtrain_ddp_finish(ddp, NULL) != DTRAIN_OK, 1);
    } else {
        compute(m, rank, 0, 1, LAYERS); /* its first bucket is on its way, and it goes */
        CHECK_EQ(dtrain_ddp_reduce(ddp, LAYERS), DTRAIN_OK);
    }
    dtrain_ddp_destroy(ddp);
    free(m);
    return 0;
}

TEST(a_rank_that_is_killed_or_leaves_while_buckets_travel_is_named_by_the_others)
{
    for (int killed = 0; killed < 2; killed++) {
        scene s;
        pid_t pids[3];
        plan_of(DTRAIN_COMPRESS_TOPK);
        plan.ddp.bucket_bytes = 1;
        scene_begin(&s, 3, 1);
        s.user = &killed;
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, loses_rank_1);
        for (int rank = 0; rank < 3; rank++)
            if (rank != 1 || !killed)
                CHECK_EQ(end_of(pids[rank], 30), 0);
        if (killed)
            end_of(pids[1], 5);
    }
}

/* One rank's compressor has no memory in the middle of a step: the others, which wait for it, hear so. */
static long packs;

static size_t own_bytes(const dtrain_compressor *compressor, size_t count)
{
    (void)compressor;
    return count > 0 ? 4 * count : 0;
}

static void own_pack(const dtrain_compressor *compressor, const float *in, size_t count, void *out)
{
    (void)compressor;
    __atomic_add_fetch(&packs, 1, __ATOMIC_SEQ_CST);
    memcpy(out, in, count * sizeof(float));
}

static void own_unpack(const dtrain_compressor *compressor, const void *in, float *out, size_t count)
{
    (void)compressor;
    memcpy(out, in, count * sizeof(float));
}

static dtrain_status own_reduce(const dtrain_compressor *compressor, dtrain_comm *comm, const float *in,
                                float *residual, float *out, size_t count, uint64_t *sent)
{
    (void)compressor, (void)in, (void)residual, (void)sent;
    if (dtrain_comm_rank(comm) == 2)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "no room to pack");
    return dtrain_all_reduce(comm, out, out, count, DTRAIN_F32, DTRAIN_SUM);
}

static void fails_inside(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = model_new(rank);
    dtrain_ddp *ddp = NULL;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &plan.ddp), DTRAIN_OK);
    CHECK_EQ(steps(ddp, m, rank, 0, 1), rank == 2 ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), rank == 2 ? "no room to pack" : "rank 2 has broken off");
    dtrain_ddp_destroy(ddp);
    free(m);
}

TEST(a_rank_that_cannot_send_breaks_off_on_all)
{
    dtrain_compressor own;
    memset(&own, 0, sizeof own);
    own.name = "own";
    own.bytes = own_bytes;
    own.pack = own_pack;
    own.unpack = own_unpack;
    own.reduce = own_reduce;
    plan_of(DTRAIN_COMPRESS_OWN);
    plan.compress.own = &own;
    on_threads(3, fails_inside, NULL);
    plan.ddp.no_overlap = 1;
    on_threads(3, fails_inside, NULL);
}

static long allocations;

static void *counting_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
    return test_resize(pointer, old_bytes, new_bytes, align);
}

static void stays_warm(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = model_new(rank);
    dtrain_ddp *ddp = NULL;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &plan.ddp), DTRAIN_OK);
    CHECK_EQ(steps(ddp, m, rank, 0, 4), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    long before = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(steps(ddp, m, rank, 4, 12), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(__atomic_load_n(&allocations, __ATOMIC_SEQ_CST) - before, 0);
    CHECK(before > 0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_ddp_destroy(ddp);
    free(m);
}

TEST(nothing_is_allocated_once_warm)
{
    dtrain_allocator allocator = {counting_resize, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    plan_of(DTRAIN_COMPRESS_INT8);
    on_threads(3, stays_warm, &desc);
    plan_of(DTRAIN_COMPRESS_TOPK);
    on_threads(3, stays_warm, &desc);
}
