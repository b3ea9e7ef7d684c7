/* Pipelines against the whole model on one rank, bit for bit: every schedule, 1 to 8 ranks as threads and as processes,
 * 1 to 9 micro-batches, with FSDP over several pipelines; that model against float64; evaluation; memory. */
#include "dtrain.h"
#include "test.h"
#include "worlds.h"
#include "pipeline_model.h"

/* ---- the reference against float64 ---- */

typedef struct layer_f64 {
    double x[ROWS * WIDEST], y[ROWS * WIDEST];
} layer_f64;

/* Adds micro-batch `number` to the gradients; returns its loss. */
static double micro_batch_f64(int number, double *grads)
{
    static layer_f64 layers[PAIRS];
    size_t rows = rows_of(number), last = width(PAIRS);
    double d[ROWS * WIDEST], loss = 0;
    batch b;
    batch_init(&b, number);
    for (size_t i = 0; i < rows * width(0); i++)
        layers[0].x[i] = (double)b.x[i];
    for (int p = 0; p < PAIRS; p++)
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < width(p + 1); j++) {
                double sum = (double)weight(p, WIDEST * WIDEST + j);
                for (size_t i = 0; i < width(p); i++)
                    sum += layers[p].x[r * width(p) + i] * (double)weight(p, i * width(p + 1) + j);
                layers[p].y[r * width(p + 1) + j] = tanh(sum);
                if (p + 1 < PAIRS)
                    layers[p + 1].x[r * width(p + 1) + j] = tanh(sum);
            }
    for (size_t i = 0; i < rows * last; i++) {
        d[i] = layers[PAIRS - 1].y[i] - (double)b.target[i];
        loss += d[i] * d[i] / 2;
    }
    for (int p = PAIRS - 1; p >= 0; p--) {
        size_t in = width(p), out = width(p + 1);
        double dx[ROWS * WIDEST] = {0}, *g = grads + p * PAIR_FLOATS;
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < out; j++) {
                double y = layers[p].y[r * out + j], dz = d[r * out + j] * (1 - y * y);
                g[WIDEST * WIDEST + j] += dz;
                for (size_t i = 0; i < in; i++) {
                    g[i * out + j] += dz * layers[p].x[r * in + i];
                    dx[r * in + i] += dz * (double)weight(p, i * out + j);
                }
            }
        memcpy(d, dx, sizeof d);
    }
    return loss;
}

TEST(the_model_on_one_rank_is_that_of_float64)
{
    static double grads[PAIRS * PAIR_FLOATS];
    const reference *r = reference_of(MICRO);
    double largest = 0, off = 0;
    for (int i = 0; i < MICRO; i++) {
        double loss = micro_batch_f64(i, grads);
        CHECK(fabs((double)r->loss[i] - loss) < 1e-5 * loss);
    }
    for (size_t e = 0; e < PAIRS * PAIR_FLOATS; e++) {
        largest = fabs(grads[e]) > largest ? fabs(grads[e]) : largest;
        off = fabs(grads[e] - (double)r->grads[e]) > off ? fabs(grads[e] - (double)r->grads[e]) : off;
    }
    CHECK(largest > 1);
    if (!(off < 2e-5 * largest))
        TEST_FAIL("gradients up to %g are off by %g", largest, off);
}

/* ---- every schedule ---- */

static dtrain_status steps(dtrain_comm *world, void *user)
{
    const setting *s = (const setting *)user;
    rank_of_pipeline *r = rank_create(world, s, NULL, NULL, 0, 1);
    if (r->pipeline == NULL || rank_agree(r) != DTRAIN_OK) {
        TEST_FAIL("rank %d: %s", r->rank, dtrain_last_error());
        return DTRAIN_ERR_ABORTED;
    }
    for (int step = 0; step < 2; step++) {
        rank_clear(r);
        if (rank_step(r) != DTRAIN_OK)
            TEST_FAIL("rank %d: %s", r->rank, dtrain_last_error());
        rank_check(r, reference_of(r->micro));
        dtrain_pipeline_stats stats = dtrain_pipeline_get_stats(r->pipeline);
        CHECK_EQ(stats.peak, dtrain_pipeline_get_plan(r->pipeline)->peak[r->rank]);
        CHECK(stats.step_ns > 0 && stats.computed_ns > 0 && stats.computed_ns <= stats.step_ns);
        CHECK(stats.bubble >= 0 && stats.bubble < 1);
    }
    rank_destroy(r);
    return DTRAIN_OK;
}

static int steps_of_a_process(dtrain_comm *world, scene *s)
{
    return steps(world, s->user) != DTRAIN_OK;
}

static const setting schedules[] = {{DTRAIN_PIPELINE_GPIPE, 0, 0, 0},       {DTRAIN_PIPELINE_1F1B, 0, 0, 0},
                                    {DTRAIN_PIPELINE_ZB_H1, 1, 0, 1},       {DTRAIN_PIPELINE_INTERLEAVED, 0, 0, 1},
                                    {DTRAIN_PIPELINE_INTERLEAVED, 3, 0, 0}, {DTRAIN_PIPELINE_DEFAULT, 0, 0, 1}};

static void run_schedules(int ranks, int micro, int threads)
{
    for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++) {
        int before = test_failures;
        setting s = schedules[i];
        s.micro = micro;
        reference_of(1);
        if (threads) {
            CHECK_EQ(dtrain_run_threads(ranks, steps, &s, NULL), DTRAIN_OK);
        } else {
            scene processes;
            scene_begin(&processes, ranks, ranks % 2);
            processes.user = &s;
            run_ranks(&processes, steps_of_a_process);
        }
        if (test_failures != before)
            TEST_FAIL("schedule %d, %d chunks, %d ranks, %d micro-batches", (int)s.schedule, s.chunks, ranks, micro);
    }
}

TEST(every_schedule_on_1_to_8_threads_gives_the_bits_of_one_rank)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        for (int micro = 1; micro <= MICRO; micro++)
            run_schedules(ranks, micro, 1);
}

TEST(every_schedule_on_processes_gives_the_bits_of_one_rank)
{
    run_schedules(1, 4, 0);
    run_schedules(2, 5, 0);
    run_schedules(3, 3, 0);
    run_schedules(4, 9, 0);
    run_schedules(8, 5, 0);
}

/* Micro-batches 2 and 3 have one and two rows, 0 and 1 three and four. */
static dtrain_status grows(dtrain_comm *world, void *user)
{
    const setting *s = (const setting *)user;
    rank_of_pipeline *r = rank_create(world, s, NULL, NULL, 2, 1);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    CHECK_EQ(rank_step(r), DTRAIN_OK);
    for (int i = 0; i < r->micro; i++) {
        batch_init(&r->batches[i], i);
        r->inputs[i] = r->batches[i].input;
    }
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    rank_clear(r);
    CHECK_EQ(rank_step(r), DTRAIN_OK);
    rank_check(r, reference_of(r->micro));
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(micro_batches_may_grow_when_their_shapes_are_agreed_on_again)
{
    for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++)
        for (int ranks = 1; ranks <= 3; ranks++) {
            setting s = schedules[i];
            s.micro = 2;
            CHECK_EQ(dtrain_run_threads(ranks, grows, &s, NULL), DTRAIN_OK);
        }
}

/* ---- with FSDP: several pipelines ---- */

typedef struct mesh {
    setting s;
    int replicas;
    dtrain_fsdp_desc desc;
    const float *expected;
} mesh;

static float tree(const float *x, int n)
{
    int left = 1;
    if (n == 1)
        return x[0];
    while (2 * left < n)
        left *= 2;
    return tree(x, left) + tree(x + left, n - left);
}

/* The tree over micro-batches of the trees over replicas, divided by their number. */
static void expected_gradient(int replicas, int micro, float *expected)
{
    static reference all[MICRO][4];
    for (int i = 0; i < micro; i++)
        for (int d = 0; d < replicas; d++)
            reference_run(&all[i][d], i * replicas + d, 1, 1);
    for (size_t e = 0; e < PAIRS * PAIR_FLOATS; e++) {
        float sums[MICRO], x[4];
        for (int i = 0; i < micro; i++) {
            for (int d = 0; d < replicas; d++)
                x[d] = all[i][d].grads[e];
            sums[i] = tree(x, replicas);
        }
        expected[e] = tree(sums, micro) / (float)(replicas * micro);
    }
}

static void check_slices(const stage *s, const float *expected)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    CHECK_EQ(dtrain_fsdp_finish(s->fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(s->fsdp, &slices, &count), DTRAIN_OK);
    CHECK_EQ(count, 2 * s->pairs);
    for (size_t i = 0; i < count; i++) {
        size_t at = (size_t)atoi(slices[i].name + 1) * PAIR_FLOATS + (slices[i].name[0] == 'b' ? WIDEST * WIDEST : 0);
        if (memcmp(slices[i].grads, expected + at + slices[i].begin, slices[i].count * sizeof(float)) != 0)
            TEST_FAIL("the gradient of %s differs", slices[i].name);
    }
}

static dtrain_status sharded(dtrain_comm *world, void *user)
{
    const mesh *m = (const mesh *)user;
    dtrain_comm *group = NULL, *same = NULL;
    int rank = dtrain_comm_rank(world), replica = rank % m->replicas;
    CHECK_EQ(dtrain_comm_split(world, replica, rank, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank / m->replicas, rank, &same), DTRAIN_OK);
    rank_of_pipeline *r = rank_create(group, &m->s, same, &m->desc, replica, m->replicas);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    for (int step = 0; step < 2; step++) {
        for (int c = 0; c < r->chunks; c++)
            CHECK_EQ(dtrain_fsdp_begin(r->fsdps[c], r->micro, r->micro), DTRAIN_OK);
        if (rank_step(r) != DTRAIN_OK)
            TEST_FAIL("rank %d: %s", r->rank, dtrain_last_error());
        for (int c = 0; c < r->chunks; c++) {
            check_slices(r->stages[c], m->expected);
            CHECK_EQ(dtrain_fsdp_drop(r->fsdps[c]), DTRAIN_OK);
        }
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    rank_destroy(r);
    dtrain_comm_destroy(same);
    dtrain_comm_destroy(group);
    return DTRAIN_OK;
}

TEST(pipelines_that_shard_their_stages_reduce_the_tree_of_all_micro_batches)
{
    static float expected[PAIRS * PAIR_FLOATS];
    for (int replicas = 1; replicas <= 2; replicas++)
        for (int ranks = 1; ranks <= 4; ranks++)
            for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++)
                for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_DDP; strategy++) {
                    mesh m;
                    int before = test_failures, micro = 1 + (ranks * 3 + (int)i) % 7;
                    memset(&m, 0, sizeof m);
                    m.s = schedules[i];
                    m.s.micro = micro;
                    m.replicas = replicas;
                    m.desc.strategy = (dtrain_strategy)strategy;
                    m.expected = expected;
                    expected_gradient(replicas, micro, expected);
                    CHECK_EQ(dtrain_run_threads(replicas * ranks, sharded, &m, NULL), DTRAIN_OK);
                    if (test_failures != before)
                        TEST_FAIL("schedule %d, %d chunks, %d ranks, %d replicas, %d micro-batches, strategy %d",
                                  (int)m.s.schedule, m.s.chunks, ranks, replicas, micro, strategy);
                }
}

/* ---- evaluation ---- */

static dtrain_status evaluates(dtrain_comm *world, void *user)
{
    const setting *s = (const setting *)user;
    rank_of_pipeline *r = rank_create(world, s, NULL, NULL, 0, 1);
    int last = r->rank == dtrain_comm_size(world) - 1;
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    rank_clear(r);
    for (int i = 0; i < MICRO; i += 4) {
        dtrain_tensor output;
        batch b;
        batch_init(&b, i);
        CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, r->rank == 0 ? &b.input : NULL, &b, last ? &output : NULL),
                 DTRAIN_OK);
        if (last) {
            CHECK_EQ(output.ndim, 0);
            CHECK(((float *)output.data)[0] == reference_of(MICRO)->loss[i]);
        }
        CHECK_EQ(b.losses, last);
    }
    CHECK_EQ(rank_step(r), DTRAIN_OK);
    rank_check(r, reference_of(r->micro));
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(an_evaluation_goes_through_all_stages_and_disturbs_no_step)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++) {
            setting s = schedules[i];
            s.micro = 3;
            CHECK_EQ(dtrain_run_threads(ranks, evaluates, &s, NULL), DTRAIN_OK);
        }
}

/* ---- progress, memory ---- */

static setting everywhere_setting;

static void steps_of_a_world(dtrain_comm *world)
{
    CHECK_EQ(steps(world, &everywhere_setting), DTRAIN_OK);
}

TEST(a_pipeline_needs_no_service_thread_and_no_transport_that_has_more_than_send_and_recv)
{
    static const setting some[] = {{DTRAIN_PIPELINE_INTERLEAVED, 2, 4, 0}, {DTRAIN_PIPELINE_ZB_H1, 0, 5, 0}};
    reference_of(1);
    for (int i = 0; i < 2; i++)
        for (int ranks = 2; ranks <= 3; ranks++) {
            everywhere_setting = some[i];
            everywhere(ranks, steps_of_a_world);
        }
}

typedef struct counted {
    uint64_t calls;
    dtrain_allocator allocator;
} counted;

static void *count(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    __atomic_add_fetch(&((counted *)user)->calls, 1, __ATOMIC_RELAXED);
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (pointer != NULL && new_bytes > 0)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

static dtrain_status steady(dtrain_comm *world, void *user)
{
    counted *c = (counted *)user;
    setting s = {DTRAIN_PIPELINE_ZB_H1, 1, 6, 0};
    rank_of_pipeline *r = rank_create(world, &s, NULL, NULL, 0, 1);
    dtrain_pipeline *own = NULL;
    dtrain_pipeline_desc desc;
    uint64_t warm = 0;
    pipeline_desc(&s, r, &desc);
    desc.allocator = &c->allocator;
    CHECK_EQ(dtrain_pipeline_create(&own, world, &desc), DTRAIN_OK);
    dtrain_pipeline_destroy(r->pipeline);
    r->pipeline = own;
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    for (int step = 0; step < 8; step++) {
        if (step == 4) {
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            warm = __atomic_load_n(&c->calls, __ATOMIC_RELAXED);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
        CHECK_EQ(rank_agree(r), DTRAIN_OK);
        CHECK_EQ(rank_step(r), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(__atomic_load_n(&c->calls, __ATOMIC_RELAXED), warm);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(steps_allocate_nothing_and_a_pipeline_frees_what_it_took)
{
    counted c;
    memset(&c, 0, sizeof c);
    c.allocator.resize = count;
    c.allocator.user = &c;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &c.allocator;
    CHECK_EQ(dtrain_run_threads(4, steady, &c, &desc), DTRAIN_OK);
    CHECK_EQ(c.allocator.bytes, 0);
}
