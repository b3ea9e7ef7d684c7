/* ---- >>test_compressed ----
 * Compressed all-reduces against plain ones: every rank makes the vectors of all, packs and adds them one after the
 * other, and compares bits; on threads, over sockets and over cables. Nothing is lost but rounding, at every step. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "worlds.h"
#include <math.h>

enum { MOST = 4099, STEPS = 3, MOST_RANKS = 9 };

/* What a world's ranks shall do, set before they start. */
static struct {
    size_t count;
    int kind;
    dtrain_topk_desc topk;
    dtrain_compressed_desc desc;
} plan;

enum { INT8, FP8, SIGN, BF16, OF_OWN, TOPK, POWERSGD, KINDS };

static float gradient(int rank, size_t i, int step)
{
    uint64_t index = (uint64_t)i + (uint64_t)step * 100000;
    float own = dtrain_random_normal((uint64_t)rank + 1, index), common = dtrain_random_normal(99, index);
    return own * own * own + common;
}

/* A page of one's own: the upper halves of the numbers. */
static size_t own_bytes(const dtrain_compressor *compressor, size_t count)
{
    (void)compressor;
    return 2 * count;
}

static void own_pack(const dtrain_compressor *compressor, const float *in, size_t count, void *out)
{
    (void)compressor;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &in[i], sizeof bits);
        const uint16_t upper = (uint16_t)(bits >> 16);
        memcpy((unsigned char *)out + 2 * i, &upper, sizeof upper);
    }
}

static void own_unpack(const dtrain_compressor *compressor, const void *in, float *out, size_t count)
{
    (void)compressor;
    for (size_t i = 0; i < count; i++) {
        uint16_t upper;
        memcpy(&upper, (const unsigned char *)in + 2 * i, sizeof upper);
        const uint32_t bits = (uint32_t)upper << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

static dtrain_compressor compressor_of(int kind)
{
    dtrain_compressor made;
    memset(&made, 0, sizeof made);
    switch (kind) {
    case INT8: return dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 64);
    case FP8: return dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 64);
    case SIGN: return dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 64);
    case BF16: return dtrain_compressor_of(DTRAIN_COMPRESS_BF16, 0);
    case TOPK: CHECK_EQ(dtrain_compressor_topk(&made, &plan.topk, NULL), DTRAIN_OK); break;
    case POWERSGD: CHECK_EQ(dtrain_compressor_powersgd(&made, plan.count / 50, 50, 2, 7, NULL), DTRAIN_OK); break;
    default:
        made.name = "own";
        made.bytes = own_bytes;
        made.pack = own_pack;
        made.unpack = own_unpack;
    }
    return made;
}

static dtrain_compressed *open_plan(dtrain_comm *world)
{
    dtrain_compressed *made = NULL;
    dtrain_compressor compressor = compressor_of(plan.kind);
    CHECK_EQ(dtrain_compressed_create(&made, world, plan.count, &compressor, &plan.desc), DTRAIN_OK);
    return made;
}

DTRAIN__EXACT_BEGIN

/* The tree over values[first .. first + n - 1][i], by its definition. */
static float tree(float (*values)[MOST], int first, int n, size_t i)
{
    int left = 1;
    if (n == 1)
        return values[first][i];
    while (left * 2 < n)
        left *= 2;
    return tree(values, first, left, i) + tree(values, first + left, n - left, i);
}

typedef struct reference {
    float residual[MOST_RANKS][MOST], sent[MOST_RANKS][MOST], out[MOST];
} reference;

static void reference_round(const dtrain_compressor *q, const float *in, float *out, size_t n)
{
    static __thread unsigned char bytes[8 * MOST];
    q->pack(q, in, n, bytes);
    q->unpack(q, bytes, out, n);
}

static void reference_add(reference *ref, int ranks, int step)
{
    for (int r = 0; r < ranks; r++)
        for (size_t i = 0; i < plan.count; i++)
            ref->residual[r][i] = (plan.desc.no_feedback ? 0.0f : ref->residual[r][i]) + gradient(r, i, step);
}

static void reference_dense(reference *ref, int ranks, int step)
{
    dtrain_compressor q = compressor_of(plan.kind);
    reference_add(ref, ranks, step);
    for (int owner = 0; owner < ranks; owner++) {
        size_t begin, n = cut_of(plan.count, ranks, owner, &begin);
        for (int r = 0; r < ranks; r++) {
            reference_round(&q, ref->residual[r] + begin, ref->sent[r] + begin, n);
            for (size_t i = begin; i < begin + n; i++)
                ref->residual[r][i] = ref->residual[r][i] - ref->sent[r][i];
        }
        static __thread float sum[MOST];
        for (size_t i = 0; i < n; i++)
            sum[i] = tree(ref->sent, 0, ranks, begin + i);
        reference_round(&q, sum, ref->out + begin, n);
        for (size_t i = 0; i < n; i++)
            ref->residual[owner][begin + i] = ref->residual[owner][begin + i] + (sum[i] - ref->out[begin + i]);
    }
}

/* The selection is that of tests/unit/test_topk.c; rounding is a conversion of the whole vector. */
static void reference_topk(reference *ref, int ranks, int step)
{
    static __thread uint16_t half[MOST];
    dtrain__sparse chosen;
    memset(&chosen, 0, sizeof chosen);
    reference_add(ref, ranks, step);
    for (int r = 0; r < ranks; r++) {
        size_t k = dtrain_topk_count(plan.count, plan.topk.schedule.ratio);
        CHECK_EQ(dtrain__topk_pick(ref->residual[r], plan.count, k, &chosen), DTRAIN_OK);
        dtrain__sparse_write(&chosen, ref->sent[r]);
        if (plan.topk.values == DTRAIN_BF16) {
            CHECK_EQ(dtrain_convert(ref->sent[r], DTRAIN_F32, half, DTRAIN_BF16, plan.count), DTRAIN_OK);
            CHECK_EQ(dtrain_convert(half, DTRAIN_BF16, ref->sent[r], DTRAIN_F32, plan.count), DTRAIN_OK);
        }
        for (size_t i = 0; i < plan.count; i++)
            ref->residual[r][i] = ref->residual[r][i] - ref->sent[r][i];
    }
    for (size_t i = 0; i < plan.count; i++)
        ref->out[i] = tree(ref->sent, 0, ranks, i);
    if (plan.topk.values == DTRAIN_BF16 && plan.topk.exchange == DTRAIN_EXCHANGE_SPLIT) {
        static __thread float rounded[MOST];
        CHECK_EQ(dtrain_convert(ref->out, DTRAIN_F32, half, DTRAIN_BF16, plan.count), DTRAIN_OK);
        CHECK_EQ(dtrain_convert(half, DTRAIN_BF16, rounded, DTRAIN_F32, plan.count), DTRAIN_OK);
        for (int r = 0; r < ranks; r++) {
            size_t begin, n = cut_of(plan.count, ranks, r, &begin);
            for (size_t i = begin; i < begin + n; i++)
                ref->residual[r][i] = ref->residual[r][i] + (ref->out[i] - rounded[i]);
        }
        memcpy(ref->out, rounded, plan.count * sizeof(float));
    }
    dtrain__sparse_destroy(&chosen);
}

DTRAIN__EXACT_END

static float *residual_of(dtrain_compressed *c)
{
    const dtrain_piece *piece = piece_at(dtrain_compressed_pieces(c), 0);
    CHECK(strcmp(piece->name, "residual") == 0);
    CHECK_EQ(piece->count, plan.count);
    return (float *)piece->data;
}

static void equals_the_reference(dtrain_comm *world)
{
    int ranks = dtrain_comm_size(world), rank = dtrain_comm_rank(world);
    reference *ref = (reference *)calloc(1, sizeof *ref);
    float *data = (float *)malloc((plan.count + 1) * sizeof(float));
    dtrain_compressed *c = open_plan(world);
    for (int step = 0; c != NULL && step < STEPS; step++) {
        for (size_t i = 0; i < plan.count; i++)
            data[i] = gradient(rank, i, step);
        CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
        if (plan.kind == TOPK)
            reference_topk(ref, ranks, step);
        else
            reference_dense(ref, ranks, step);
        if (memcmp(data, ref->out, plan.count * sizeof(float)) != 0)
            TEST_FAIL("rank %d of %d: another sum in step %d, kind %d", rank, ranks, step, plan.kind);
        if (!plan.desc.no_feedback)
            CHECK(memcmp(residual_of(c), ref->residual[rank], plan.count * sizeof(float)) == 0);
    }
    dtrain_compressed_destroy(c);
    free(data);
    free(ref);
}

static void plan_of(int kind, size_t count)
{
    memset(&plan, 0, sizeof plan);
    plan.kind = kind;
    plan.count = count;
    plan.topk.schedule.ratio = 0.02;
}

TEST(packed_sums_are_the_tree_of_what_was_packed)
{
    const size_t counts[] = {1, 3, 1000, 4099};
    for (int kind = INT8; kind <= OF_OWN; kind++)
        for (int ranks = 1; ranks <= 5; ranks++) {
            plan_of(kind, counts[(ranks + kind) % 4]);
            plan.desc.no_feedback = ranks == 4 && kind != SIGN;
            on_threads(ranks, equals_the_reference, NULL);
        }
    plan_of(INT8, 4099);
    on_processes(3, equals_the_reference, NULL);
    on_cables(4, equals_the_reference, NULL);
    plan_of(OF_OWN, 1000);
    on_processes(4, equals_the_reference, NULL);
}

TEST(selections_sum_up_as_the_dense_tree)
{
    const dtrain_sparse_exchange ways[] = {DTRAIN_EXCHANGE_AUTO, DTRAIN_EXCHANGE_GATHER, DTRAIN_EXCHANGE_SPLIT};
    for (int way = 0; way < 3; way++)
        for (int ranks = 1; ranks <= 9; ranks += ranks == 5 ? 4 : 1)
            for (int wire = 0; wire < 2; wire++) {
                const size_t counts[] = {1, 2, 999, 4099};
                plan_of(TOPK, counts[(way + ranks) % 4]);
                plan.topk.exchange = way == 0 && ranks > 8 ? DTRAIN_EXCHANGE_SPLIT : ways[way];
                plan.topk.values = wire == 0 ? DTRAIN_F32 : DTRAIN_BF16;
                plan.topk.schedule.ratio = ranks == 3 ? 0.3 : 0.02;
                plan.desc.no_feedback = ranks == 2;
                on_threads(ranks, equals_the_reference, NULL);
                if (ranks == 4 || ranks == 3)
                    on_processes(ranks, equals_the_reference, NULL);
            }
    plan_of(TOPK, 4099);
    plan.topk.exchange = DTRAIN_EXCHANGE_SPLIT;
    on_cables(5, equals_the_reference, NULL);
}

static void goes_dense(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    uint64_t ranks = (uint64_t)dtrain_comm_size(world);
    float *data = (float *)malloc(plan.count * sizeof(float));
    dtrain_compressed *c = open_plan(world);
    for (size_t i = 0; i < plan.count; i++)
        data[i] = gradient(rank, i, 0);
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
    dtrain_compressed_stats stats = dtrain_compressed_get_stats(c);
    CHECK_EQ(stats.dense_bytes, 8 * plan.count / ranks * (ranks - 1));
    CHECK_EQ(stats.sent_bytes, stats.dense_bytes + 8 * (ranks - 1)); /* and the sizes */
    CHECK_EQ(stats.steps, 1);
    dtrain_compressed_destroy(c);
    free(data);
}

TEST(long_selections_go_dense_with_the_same_sum)
{
    plan_of(TOPK, 4000);
    plan.topk.schedule.ratio = 0.9;
    plan.topk.exchange = DTRAIN_EXCHANGE_GATHER;
    on_threads(4, equals_the_reference, NULL);
    on_threads(4, goes_dense, NULL);
    plan.topk.exchange = DTRAIN_EXCHANGE_SPLIT; /* parts without indices */
    on_threads(4, equals_the_reference, NULL);
}

/* The sum of what all got and of all residuals is that of all inputs, and of the residuals before. */
static void loses_nothing(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    size_t n = plan.count;
    float *data = (float *)malloc(n * sizeof(float)), *out = (float *)malloc(n * sizeof(float));
    double *in_sum = (double *)calloc(n, sizeof(double)), *out_sum = (double *)calloc(n, sizeof(double));
    double *left = (double *)calloc(n, sizeof(double)), worst = 0;
    dtrain_compressed *c = open_plan(world);
    for (int step = 0; step < 6; step++) {
        for (size_t i = 0; i < n; i++)
            data[i] = gradient(rank, i, step);
        CHECK_EQ(dtrain_compressed_all_reduce(c, data, out, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_check_equal(world, out, n, DTRAIN_F32), DTRAIN_OK);
        for (size_t i = 0; i < n; i++) {
            in_sum[i] += (double)data[i];
            out_sum[i] += (double)out[i];
            left[i] = in_sum[i] - (double)residual_of(c)[i];
        }
        CHECK_EQ(dtrain_all_reduce(world, left, left, n, DTRAIN_F64, DTRAIN_SUM), DTRAIN_OK);
        for (size_t i = 0; i < n; i++)
            worst = fabs(left[i] - out_sum[i]) > worst ? fabs(left[i] - out_sum[i]) : worst;
        CHECK(worst < 2e-4); /* numbers reach a few hundred */
    }
    dtrain_compressed_stats stats = dtrain_compressed_get_stats(c);
    CHECK_EQ(stats.steps, 6);
    CHECK(dtrain_comm_size(world) == 1 || stats.sent_bytes > 0);
    CHECK(stats.sent_bytes <= stats.dense_bytes);
    dtrain_compressed_destroy(c);
    free(data);
    free(out);
    free(in_sum);
    free(out_sum);
    free(left);
}

TEST(what_is_sent_and_what_is_left_are_all_there_was)
{
    for (int kind = 0; kind < KINDS; kind++)
        for (int ranks = 1; ranks <= 5; ranks++) {
            plan_of(kind, 4000);
            plan.topk.exchange = ranks % 2 ? DTRAIN_EXCHANGE_SPLIT : DTRAIN_EXCHANGE_AUTO;
            plan.topk.values = ranks > 3 ? DTRAIN_F16 : DTRAIN_F32;
            plan.topk.schedule.stage_steps = ranks == 2 ? 2 : 0;
            on_threads(ranks, loses_nothing, NULL);
        }
    plan_of(TOPK, 3000);
    plan.topk.exchange = DTRAIN_EXCHANGE_SPLIT;
    on_processes(4, loses_nothing, NULL);
    plan_of(POWERSGD, 3000);
    on_processes(3, loses_nothing, NULL);
}

/* A matrix of rank 1 on each rank, with one row space: the sum is of rank 1 as well. */
static void finds_a_thin_matrix(dtrain_comm *world)
{
    enum { ROWS = 60, COLUMNS = 50 };
    static const float zero = 0.0f;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    float data[ROWS * COLUMNS], sums[ROWS * COLUMNS] = {zero}, worst = 0;
    dtrain_compressed *c = open_plan(world);
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        float column = (float)(i % COLUMNS) - 20.0f;
        for (int r = 0; r < ranks; r++) {
            float value = (float)((i / COLUMNS * 7 + r * 3) % 11) * column;
            sums[i] += value;
            data[i] = r == rank ? value : data[i];
        }
    }
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        worst = fabsf(data[i] - sums[i]) > worst ? fabsf(data[i] - sums[i]) : worst;
    CHECK(worst < 0.01f);         /* of at most 1,200 */
    memset(data, 0, sizeof data); /* nothing is left, and nothing comes back of nothing */
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_all_reduce(c, sums, data, DTRAIN_SUM), DTRAIN_OK);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        CHECK(fabsf(data[i] - sums[i] * (float)ranks) < 0.05f);
    dtrain_compressed_stats stats = dtrain_compressed_get_stats(c);
    CHECK_EQ(stats.sent_bytes, 3 * (8 * 2 * (60 + 50) / (uint64_t)ranks * (uint64_t)(ranks - 1)));
    dtrain_compressed_destroy(c);
}

TEST(powersgd_finds_a_thin_matrix)
{
    plan_of(POWERSGD, 3000);
    for (int ranks = 1; ranks <= 5; ranks++)
        on_threads(ranks, finds_a_thin_matrix, NULL);
}

static void sends_the_whole(dtrain_comm *world)
{
    float data[6] = {1, 2, 3, 4, 5, 6};
    dtrain_compressor compressor;
    dtrain_compressed *c = NULL;
    CHECK_EQ(dtrain_compressor_powersgd(&compressor, 6, 1, 4, 0, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&c, world, 6, &compressor, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_MEAN), DTRAIN_OK);
    for (int i = 0; i < 6; i++)
        CHECK(data[i] == (float)(i + 1));
    dtrain_compressed_destroy(c);
}

TEST(powersgd_sends_small_matrices_as_they_are)
{
    on_threads(3, sends_the_whole, NULL);
}

/* Momentum 0.5, one of four elements a step; all numbers are exact. Velocity before residual, masked where sent. */
static void corrects_momentum(dtrain_comm *world)
{
    static const float in[3][4] = {{8, 4, 2, 0}, {0, 4, 2, 1}, {0, 0, 2, 1}};
    static const float masked[3][4] = {{8, 0, 0, 0}, {0, 10, 0, 0}, {0, 0, 8.5f, 0}};
    /* velocities {8,4,2,0}, sent 8 -> {0,4,2,0}; {0,6,3,1}, residual {0,10,5,1}, sent 10 -> {0,0,3,1};
     * {0,0,3.5,1.5}, residual {0,0,8.5,2.5} */
    static const float kept[3][4] = {{8, 0, 0, 0}, {0, 10, 0, 0}, {0, 0, 8.5f, 0}};
    for (int masks = 0; masks < 2; masks++) {
        float out[4], *velocity = NULL;
        plan.desc.no_masking = !masks;
        dtrain_compressed *c = open_plan(world);
        for (int step = 0; step < 3; step++) {
            CHECK_EQ(dtrain_compressed_all_reduce(c, in[step], out, DTRAIN_SUM), DTRAIN_OK);
            CHECK(memcmp(out, (masks ? masked : kept)[step], sizeof out) == 0);
        }
        const dtrain_piece *piece = piece_at(dtrain_compressed_pieces(c), 1);
        CHECK(strcmp(piece->name, "velocity") == 0 && piece->count == 4);
        velocity = (float *)piece->data;
        /* unmasked {8,4,2,0}, {4,6,3,1}, {2,3,3.5,1.5} */
        CHECK(velocity[0] == (masks ? 0.0f : 2.0f) && velocity[1] == (masks ? 0.0f : 3.0f));
        CHECK(velocity[2] == (masks ? 0.0f : 3.5f) && velocity[3] == 1.5f);
        piece = piece_at(dtrain_compressed_pieces(c), 2);
        velocity = (float *)piece->data;
        CHECK(strcmp(piece->name, "step") == 0 && piece->count == 2 && velocity[0] == 3.0f && velocity[1] == 0.0f);
        CHECK(piece_at(dtrain_compressed_pieces(c), 3) == NULL);
        dtrain_compressed_destroy(c);
    }
}

TEST(momentum_is_corrected_and_masked)
{
    plan_of(TOPK, 4);
    plan.desc.momentum = 0.5f;
    plan.topk.schedule.ratio = 0.25;
    on_threads(1, corrects_momentum, NULL);
}

/* Two steps of velocities as they are, and then one of four elements. */
static void corrects_momentum_before_it_starts(dtrain_comm *world)
{
    static const float in[3][4] = {{8, 4, 2, 0}, {0, 4, 2, 1}, {0, 0, 2, 1}};
    static const float expected[3][4] = {{8, 4, 2, 0}, {4, 6, 3, 1}, {0, 0, 3.5f, 0}};
    float out[4];
    dtrain_compressed *c = open_plan(world);
    for (int step = 0; step < 3; step++) {
        CHECK_EQ(dtrain_compressed_all_reduce(c, in[step], out, DTRAIN_SUM), DTRAIN_OK);
        CHECK(memcmp(out, expected[step], sizeof out) == 0);
    }
    dtrain_compressed_destroy(c);
}

TEST(momentum_is_corrected_before_the_start_step_too)
{
    plan_of(TOPK, 4);
    plan.desc.momentum = 0.5f;
    plan.desc.start_step = 2;
    plan.topk.schedule.ratio = 0.25;
    on_threads(1, corrects_momentum_before_it_starts, NULL);
}

/* The first steps are plain all-reduces, which leave nothing; after them it is as a new state. */
static void starts_later(dtrain_comm *world)
{
    enum { START = 3 };
    float *data = (float *)malloc(plan.count * sizeof(float)), *expected = (float *)malloc(plan.count * sizeof(float));
    dtrain_op op = plan.kind % 2 ? DTRAIN_MEAN : DTRAIN_SUM;
    dtrain_compressed *fresh = open_plan(world), *c = NULL;
    dtrain_compressor compressor = compressor_of(plan.kind);
    dtrain_compressed_desc desc = plan.desc;
    desc.start_step = START;
    CHECK_EQ(dtrain_compressed_create(&c, world, plan.count, &compressor, &desc), DTRAIN_OK);
    for (int step = 0; step < START + 2; step++) {
        for (size_t i = 0; i < plan.count; i++)
            data[i] = expected[i] = gradient(dtrain_comm_rank(world), i, step);
        CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, op), DTRAIN_OK);
        if (step < START)
            CHECK_EQ(dtrain_all_reduce(world, expected, expected, plan.count, DTRAIN_F32, op), DTRAIN_OK);
        else
            CHECK_EQ(dtrain_compressed_all_reduce(fresh, expected, expected, op), DTRAIN_OK);
        CHECK(memcmp(data, expected, plan.count * sizeof(float)) == 0);
        dtrain_compressed_stats stats = dtrain_compressed_get_stats(c);
        CHECK((stats.sent_bytes == stats.dense_bytes) == (step < START));
        const float *residual = residual_of(c);
        for (size_t i = 0; step < START && i < plan.count; i++)
            CHECK(residual[i] == 0.0f);
    }
    dtrain_compressed_destroy(c);
    dtrain_compressed_destroy(fresh);
    free(data);
    free(expected);
}

TEST(steps_before_the_start_step_are_sent_as_they_are)
{
    for (int kind = 0; kind < KINDS; kind++) {
        plan_of(kind, 3000);
        on_threads(3, starts_later, NULL);
        if (kind == POWERSGD)
            on_processes(3, starts_later, NULL);
    }
}

/* A NaN reaches everyone and is gone after it. */
static void shows_a_nan(dtrain_comm *world)
{
    const uint32_t nan = 0x7fc00000u;
    float *data = (float *)calloc(plan.count, sizeof(float));
    dtrain_compressed *c = open_plan(world);
    for (int step = 0; step < 2; step++) {
        uint32_t bits, bad = 0;
        for (size_t i = 0; i < plan.count; i++)
            data[i] = gradient(dtrain_comm_rank(world), i, step);
        if (step == 0 && dtrain_comm_rank(world) == 1)
            memcpy(&data[77], &nan, sizeof nan);
        CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
        for (size_t i = 0; i < plan.count; i++) {
            memcpy(&bits, &data[i], sizeof bits);
            bad += (bits & 0x7fffffffu) > 0x7f800000u;
        }
        CHECK(step == 0 ? bad > 0 : bad == 0);
    }
    dtrain_compressed_destroy(c);
    free(data);
}

TEST(a_nan_is_seen_once_by_all)
{
    for (int kind = 0; kind < KINDS; kind++) {
        plan_of(kind, 3000);
        on_threads(3, shows_a_nan, NULL);
    }
}

static void resumes(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float *data = (float *)malloc(plan.count * sizeof(float)), *again = (float *)malloc(plan.count * sizeof(float));
    dtrain_compressed *c = open_plan(world), *resumed = open_plan(world);
    for (int step = 0; step < 6; step++) {
        for (size_t i = 0; i < plan.count; i++)
            data[i] = again[i] = gradient(rank, i, step);
        CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
        for (int i = 0; step == 2; i++) {
            const dtrain_piece *from = piece_at(dtrain_compressed_pieces(c), i);
            const dtrain_piece *to = piece_at(dtrain_compressed_pieces(resumed), i);
            CHECK((from == NULL) == (to == NULL));
            if (from == NULL || to == NULL)
                break;
            CHECK(strcmp(from->name, to->name) == 0 && from->count == to->count);
            memcpy(to->data, from->data, from->count * sizeof(float));
        }
        if (step < 3)
            continue;
        CHECK_EQ(dtrain_compressed_all_reduce(resumed, again, again, DTRAIN_SUM), DTRAIN_OK);
        CHECK(memcmp(data, again, plan.count * sizeof(float)) == 0);
    }
    dtrain_compressed_destroy(c);
    dtrain_compressed_destroy(resumed);
    free(data);
    free(again);
}

TEST(a_run_that_goes_on_from_its_state_is_the_same)
{
    for (int kind = 0; kind < KINDS; kind++) {
        plan_of(kind, 2000);
        plan.topk.schedule.stage_steps = 2;
        plan.desc.momentum = kind == TOPK ? 0.9f : 0.0f;
        plan.desc.start_step = kind % 2 ? 0 : 4; /* one after that of the state */
        on_threads(3, resumes, NULL);
    }
}

static size_t blocks_made, blocks_refused; /* the number of the one that is refused; 0: none */

static void *counted(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    if (new_bytes > 0) {
        if (__atomic_add_fetch(&blocks_made, 1, __ATOMIC_SEQ_CST) == blocks_refused)
            return NULL;
        if (posix_memalign(&block, align, new_bytes) != 0)
            return NULL;
        if (pointer != NULL)
            memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    }
    free(pointer);
    return block;
}

static void stays_warm(dtrain_comm *world)
{
    dtrain_compressor compressor = compressor_of(plan.kind == TOPK ? INT8 : plan.kind);
    dtrain_compressed *c = NULL;
    float *data = (float *)malloc(plan.count * sizeof(float));
    size_t before = 0;
    if (plan.kind == TOPK)
        CHECK_EQ(dtrain_compressor_topk(&compressor, &plan.topk, dtrain_comm_allocator(world)), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&c, world, plan.count, &compressor, NULL), DTRAIN_OK);
    for (int step = 0; step < 40; step++) {
        for (size_t i = 0; i < plan.count; i++)
            data[i] = gradient(dtrain_comm_rank(world), i, step);
        if (step == 10) {
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            before = __atomic_load_n(&blocks_made, __ATOMIC_SEQ_CST);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(__atomic_load_n(&blocks_made, __ATOMIC_SEQ_CST), before);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_compressed_destroy(c);
    free(data);
}

TEST(nothing_is_allocated_once_warm)
{
    const int kinds[] = {INT8, SIGN, POWERSGD, TOPK, TOPK};
    for (int k = 0; k < 5; k++) {
        dtrain_allocator allocator = {counted, NULL, 0, 0};
        dtrain_comm_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.allocator = &allocator;
        plan_of(kinds[k], 4000);
        plan.topk.exchange = k > 3 ? DTRAIN_EXCHANGE_SPLIT : DTRAIN_EXCHANGE_GATHER;
        on_threads(4, stays_warm, &desc);
        CHECK_EQ(allocator.bytes, 0);
    }
}

static int steps_refused;

static void is_short_of_memory(dtrain_comm *world)
{
    dtrain_compressor compressor = compressor_of(plan.kind == TOPK ? INT8 : plan.kind);
    dtrain_compressed *c = NULL;
    float data[4000] = {1};
    if (plan.kind == TOPK)
        CHECK_EQ(dtrain_compressor_topk(&compressor, &plan.topk, dtrain_comm_allocator(world)), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&c, world, plan.count, &compressor, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0)
        __atomic_store_n(&blocks_made, 0, __ATOMIC_SEQ_CST);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_status status = dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM);
    CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_MEMORY || status == DTRAIN_ERR_ABORTED);
    __atomic_add_fetch(&steps_refused, status == DTRAIN_ERR_MEMORY, __ATOMIC_SEQ_CST);
    dtrain_compressed_destroy(c);
}

TEST(nobody_waits_for_a_rank_that_has_no_memory)
{
    for (int k = 0; k < 3; k++) {
        size_t nth = 1;
        for (;; nth++) {
            dtrain_allocator allocator = {counted, NULL, 0, 0};
            dtrain_comm_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.allocator = &allocator;
            plan_of(k == 0 ? INT8 : TOPK, 4000);
            plan.topk.exchange = k == 1 ? DTRAIN_EXCHANGE_GATHER : DTRAIN_EXCHANGE_SPLIT;
            steps_refused = 0;
            blocks_made = SIZE_MAX / 2;
            blocks_refused = nth;
            on_threads(3, is_short_of_memory, &desc);
            blocks_refused = 0;
            CHECK_EQ(allocator.bytes, 0);
            if (steps_refused == 0)
                break;
            CHECK_EQ(steps_refused, 1);
        }
        CHECK(nth > 6);
    }
}

/* Rank 1 announces and sends what it likes. */
static uint64_t bad_size;
static unsigned char bad_bytes[256];

static void meets_corruption(dtrain_comm *world)
{
    float data[100];
    for (int i = 0; i < 100; i++)
        data[i] = 7.0f;
    if (dtrain_comm_rank(world) == 1) {
        uint64_t sizes[2];
        size_t counts[2], offsets[2];
        unsigned char all[4096];
        CHECK_EQ(dtrain_all_gather(world, &bad_size, sizes, 2, DTRAIN_U64), DTRAIN_OK);
        counts[0] = (size_t)sizes[0];
        counts[1] = (size_t)sizes[1];
        offsets[0] = 0;
        offsets[1] = counts[0];
        if (bad_size > 1000)
            return; /* nobody will ask for so much */
        memcpy(all + counts[0], bad_bytes, counts[1]);
        DTRAIN_IGNORE(dtrain_all_gather_v(world, all + counts[0], all, counts, offsets, DTRAIN_U8));
        CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_ABORTED);
        return;
    }
    dtrain_compressed *c = open_plan(world);
    float out[100];
    memset(out, 0x55, sizeof out);
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, out, DTRAIN_SUM), DTRAIN_ERR_CORRUPT);
    CHECK_CONTAINS(dtrain_last_error(), "on rank 0, data of rank 1");
    for (size_t i = 0; i < sizeof out; i++)
        CHECK(((unsigned char *)out)[i] == 0x55);
    dtrain_compressed_destroy(c);
}

TEST(corrupt_pieces_break_the_group_and_write_nothing)
{
    uint32_t indices[] = {5, 99}, far = 100;
    float values[] = {1, 2};
    dtrain__sparse sparse;
    memset(&sparse, 0, sizeof sparse);
    sparse.indices = indices;
    sparse.values = values;
    sparse.count = 2;
    sparse.original_count = 100;
    plan_of(TOPK, 100);
    dtrain_set_log(quiet, NULL);
    dtrain_index_form form = DTRAIN_INDEX_U32;
    size_t bytes = dtrain__sparse_size(&sparse, DTRAIN_F32, &form);
    dtrain__sparse_pack(&sparse, DTRAIN_F32, form, bad_bytes);
    memcpy(bad_bytes + 32 + 4, &far, 4); /* an index out of range */
    bad_size = bytes;
    on_threads(2, meets_corruption, NULL);
    memcpy(bad_bytes + 32 + 4, indices, 4); /* twice the same */
    on_threads(2, meets_corruption, NULL);
    bad_size = bytes - 1; /* another length */
    on_threads(2, meets_corruption, NULL);
    bad_size = 0;
    on_threads(2, meets_corruption, NULL);
    bad_size = (uint64_t)1 << 40;
    on_threads(2, meets_corruption, NULL);
    dtrain_set_log(NULL, NULL);
}

static void refuses(dtrain_comm *world)
{
    dtrain_compressed *c = NULL;
    dtrain_compressed_desc desc;
    dtrain_compressor compressor = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);
    memset(&desc, 0, sizeof desc);
    desc.momentum = 0.9f;
    CHECK_EQ(dtrain_compressed_create(&c, world, 10, &compressor, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "momentum 0.9 needs top-k with feedback");
    desc.momentum = 1.0f;
    CHECK_EQ(dtrain_compressed_create(&c, world, 10, &compressor, &desc), DTRAIN_ERR_INVALID);
    desc.momentum = 0.0f;
    compressor.block = 12;
    CHECK_EQ(dtrain_compressed_create(&c, world, 10, &compressor, NULL), DTRAIN_ERR_INVALID);
    CHECK(c == NULL);
    CHECK_EQ(dtrain_compressor_topk(&compressor, &plan.topk, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(NULL, world, 10, &compressor, NULL), DTRAIN_ERR_INVALID); /* leaks nothing */
    CHECK_EQ(dtrain_compressor_powersgd(&compressor, 3, 4, 65, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_compressor_powersgd(&compressor, 3, 4, 2, 0, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&c, world, 13, &compressor, NULL), DTRAIN_OK);
    float data[13] = {0};
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "a vector of 13 elements, the matrix has 3 x 4");
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_MAX), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_compressed_all_reduce(c, NULL, data, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_compressed_all_reduce(NULL, data, data, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    dtrain_compressed_destroy(c);
    dtrain_compressed_destroy(NULL);
    CHECK_EQ(dtrain_compressed_get_stats(NULL).steps, 0);
    plan.topk.schedule.ratio = 0.0;
    CHECK_EQ(dtrain_compressor_topk(&compressor, &plan.topk, NULL), DTRAIN_ERR_INVALID);
    plan.topk.schedule.ratio = 0.5;
    plan.topk.indices = DTRAIN_INDEX_U16;
    CHECK_EQ(dtrain_compressor_topk(&compressor, &plan.topk, NULL), DTRAIN_ERR_INVALID);
    plan.topk.indices = DTRAIN_INDEX_AUTO;
    plan.topk.exchange = (dtrain_sparse_exchange)(DTRAIN_EXCHANGE_SPLIT + 1);
    CHECK_EQ(dtrain_compressor_topk(&compressor, &plan.topk, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "one of dtrain_sparse_exchange");
}

TEST(what_cannot_be_is_refused)
{
    plan_of(TOPK, 10);
    on_threads(1, refuses, NULL);
}

static void counts_bytes(dtrain_comm *world)
{
    float data[1000] = {0};
    dtrain_compressed *c = open_plan(world);
    CHECK_EQ(dtrain_compressed_all_reduce(c, data, data, DTRAIN_SUM), DTRAIN_OK);
    /* parts of 250 numbers with 4 scales: 266 bytes to each of three ranks, twice */
    CHECK_EQ(dtrain_compressed_get_stats(c).sent_bytes, 6 * 266);
    CHECK_EQ(dtrain_compressed_get_stats(c).dense_bytes, 6 * 1000);
    dtrain_compressed_destroy(c);
}

TEST(sent_bytes_are_counted)
{
    plan_of(INT8, 1000);
    on_threads(4, counts_bytes, NULL);
}
