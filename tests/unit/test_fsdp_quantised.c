/* ---- >>test_fsdp_quantised ----
 * FSDP whose parameters and gradients travel as int8: what is gathered against the compressor on each part, sums
 * against float64 within the quantiser's bound, the same bits on every rank and transport; training ends where it does
 * without. */
#include "dtrain.h"
#include "test.h"
#include "worlds.h"
#include <math.h>

enum { ROWS = 120, COLUMNS = 151, MATRIX = ROWS * COLUMNS, BIAS = 151, UNITS = 3, BLOCK = 64 };
enum { UNIT = MATRIX + 2 * BIAS, FLAT = UNITS * UNIT };

static struct {
    dtrain_fsdp_desc desc;
    int trained;           /* the reference is there */
    float reference[FLAT]; /* of trained weights */
} plan;

static dtrain_param table[3];

static void plan_of(dtrain_strategy strategy, size_t gather, size_t reduce)
{
    const char *const names[] = {"matrix", "bias", "scale"};
    memset(&plan, 0, sizeof plan);
    memset(table, 0, sizeof table);
    plan.desc.strategy = strategy;
    plan.desc.shard_size = 2;
    plan.desc.quantise_gather = gather;
    plan.desc.quantise_reduce = reduce;
    plan.desc.optimizer.kind = DTRAIN_SGD;
    for (int i = 0; i < 3; i++) {
        table[i].name = names[i];
        table[i].dtype = DTRAIN_F32;
        table[i].stacked = 1;
        table[i].shape[0] = UNITS;
        table[i].shape[1] = i == 0 ? ROWS : BIAS;
        table[i].shape[2] = i == 0 ? COLUMNS : 0;
    }
}

/* Where a parameter's layer is in a flat model. */
static size_t place(int param, int unit)
{
    return (size_t)unit * UNIT + (param == 0 ? 0 : MATRIX + (size_t)(param - 1) * BIAS);
}

static size_t length(int param)
{
    return param == 0 ? MATRIX : BIAS;
}

static float first_value(size_t at)
{
    float x = dtrain_random_normal(5, at);
    return x * x * x;
}

/* Every rank's own, from a small table of normal numbers. */
static float target(int rank, size_t at)
{
    static __thread float normal[4096];
    if (normal[0] == 0)
        for (size_t i = 0; i < 4096; i++)
            normal[i] = dtrain_random_normal(6, i);
    return normal[at % 4096] + 0.3f * normal[(at * 7 + (size_t)rank * 1000) % 4096];
}

static float *layer(const dtrain_fsdp *fsdp, int param, int unit, int grad)
{
    float *all = grad ? dtrain_fsdp_grad(fsdp, table[param].name) : dtrain_fsdp_param(fsdp, table[param].name);
    return all + (size_t)unit * length(param);
}

static dtrain_fsdp *make(dtrain_comm *world)
{
    dtrain_fsdp *fsdp = NULL;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 3, &plan.desc), DTRAIN_OK);
    for (int unit = 0; unit < UNITS; unit++) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
        for (int p = 0; p < 3; p++)
            for (size_t i = 0; i < length(p); i++)
                layer(fsdp, p, unit, 0)[i] = first_value(place(p, unit) + i);
        CHECK_EQ(dtrain_fsdp_put(fsdp, unit), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_release(fsdp, unit), DTRAIN_OK);
    }
    return fsdp;
}

/* The part of a unit's matrix that a shard has: the unit is cut into equal parts, of which the matrix comes first. */
static size_t matrix_part(int shards, int shard, size_t *begin)
{
    size_t count = cut_of(UNIT, shards, shard, begin);
    return *begin >= MATRIX ? 0 : *begin + count > MATRIX ? MATRIX - *begin : count;
}

static void gathers(dtrain_comm *world)
{
    dtrain_compressor int8 = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, BLOCK);
    dtrain_fsdp *fsdp = make(world);
    int shards = dtrain_fsdp_shard_size(fsdp);
    float *expected = (float *)malloc(MATRIX * sizeof(float));
    unsigned char *packed = (unsigned char *)malloc(2 * MATRIX);
    for (int pass = 0; pass < 2 * UNITS; pass++) {
        int unit = pass < UNITS ? pass : 2 * UNITS - 1 - pass;
        CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
        const float *got = layer(fsdp, 0, unit, 0);
        size_t begin, far = 0;
        for (int shard = 0; shard < shards; shard++) {
            size_t count = matrix_part(shards, shard, &begin);
            for (size_t i = begin; i < begin + count; i++)
                expected[i] = first_value(place(0, unit) + i);
            int8.pack(&int8, expected + begin, count, packed);
            for (size_t i = begin; i < begin + count; i++) {
                size_t block = begin + (i - begin) / BLOCK * BLOCK;
                double largest = 0;
                for (size_t k = block; k < block + BLOCK && k < begin + count; k++)
                    largest = fmax(largest, fabs((double)expected[k]));
                far += fabs((double)got[i] - (double)expected[i]) > largest / 254 * 1.000001;
            }
            int8.unpack(&int8, packed, expected + begin, count);
        }
        CHECK_EQ(far, 0);
        CHECK(memcmp(got, expected, MATRIX * sizeof(float)) == 0);
        for (size_t i = 0; i < BIAS; i++)
            CHECK(layer(fsdp, 2, unit, 0)[i] == first_value(place(2, unit) + i)); /* small: as it is */
        CHECK_EQ(dtrain_fsdp_release(fsdp, unit), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_get(fsdp, "matrix", NULL, 99) != DTRAIN_OK, 1);
    float *whole = (float *)malloc(UNITS * MATRIX * sizeof(float));
    CHECK_EQ(dtrain_fsdp_get(fsdp, "matrix", whole, -1), DTRAIN_OK);
    CHECK(whole[MATRIX + 3] == first_value(place(0, 1) + 3)); /* the masters are not rounded */
    free(whole);
    free(expected);
    free(packed);
    dtrain_fsdp_destroy(fsdp);
}

TEST(what_is_gathered_is_the_masters_packed_by_parts)
{
    plan_of(DTRAIN_FULL_SHARD, BLOCK, 0);
    on_threads(3, gathers, NULL);
    on_processes(5, gathers, NULL);
    on_cables(2, gathers, NULL);
    plan_of(DTRAIN_HYBRID_SHARD, BLOCK, 0);
    plan.desc.no_reshard_after_forward = 1;
    on_threads(4, gathers, NULL);
}

/* One backward pass: gradients are W - target. */
static dtrain_status backward(dtrain_fsdp *fsdp, int rank)
{
    dtrain_status status = DTRAIN_OK;
    for (int unit = UNITS - 1; unit >= 0 && status == DTRAIN_OK; unit--) {
        status = dtrain_fsdp_gather(fsdp, unit);
        for (int p = 0; p < 3 && status == DTRAIN_OK; p++)
            for (size_t i = 0; i < length(p); i++)
                layer(fsdp, p, unit, 1)[i] += layer(fsdp, p, unit, 0)[i] - target(rank, place(p, unit) + i);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, unit);
    }
    return status;
}

/* The tree over four or fewer ranks. */
static float tree(float (*x)[MATRIX], int ranks, size_t i)
{
    float low = x[0][i] + x[1][i];
    return ranks == 2 ? low : low + (ranks == 3 ? x[2][i] : x[2][i] + x[3][i]);
}

/* Packs what each rank has of a slice by the compressor, and adds it up: the bits must be those. */
static void check_bits(const dtrain_slice *slice, int ranks, size_t at)
{
    dtrain_compressor int8 = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, BLOCK);
    float(*parts)[MATRIX] = (float(*)[MATRIX])malloc((size_t)ranks * sizeof *parts);
    unsigned char *packed = (unsigned char *)malloc(2 * MATRIX);
    size_t others = 0;
    for (int r = 0; r < ranks; r++) {
        for (size_t i = 0; i < slice->count; i++)
            parts[r][i] = first_value(at + i) - target(r, at + i);
        int8.pack(&int8, parts[r], slice->count, packed);
        int8.unpack(&int8, packed, parts[r], slice->count);
    }
    for (size_t i = 0; i < slice->count; i++)
        others += slice->grads[i] != tree(parts, ranks, i) / (float)ranks;
    CHECK_EQ(others, 0);
    free(parts);
    free(packed);
}

static void reduces(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    const dtrain_slice *slices = NULL;
    size_t count = 0, far = 0, exact = 0, all = 0;
    dtrain_fsdp *fsdp = make(world);
    CHECK_EQ(backward(fsdp, rank), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    for (size_t s = 0; s < count; s++) {
        int p = strcmp(slices[s].name, "matrix") == 0 ? 0 : strcmp(slices[s].name, "bias") == 0 ? 1 : 2;
        size_t at = place(p, slices[s].unit) + slices[s].begin;
        if (p == 0)
            check_bits(&slices[s], ranks, at);
        double bound = 0;
        for (size_t i = 0; i < slices[s].count; i++) {
            double sum = 0;
            bound = i % BLOCK == 0 ? 1e-5 : bound;
            for (int r = 0; r < ranks && p == 0 && i % BLOCK == 0; r++) {
                double largest = 0;
                for (size_t k = i; k < i + BLOCK && k < slices[s].count; k++)
                    largest = fmax(largest, fabs((double)first_value(at + k) - (double)target(r, at + k)));
                bound += largest / 254 / ranks * 1.0001;
            }
            for (int r = 0; r < ranks; r++)
                sum += ((double)first_value(at + i) - (double)target(r, at + i)) / ranks;
            far += fabs((double)slices[s].grads[i] - sum) > bound;
            exact += fabs((double)slices[s].grads[i] - sum) < 1e-7;
            all++;
        }
    }
    CHECK_EQ(far, 0);
    CHECK(exact < all / 10); /* it was rounded */
    dtrain_fsdp_destroy(fsdp);
}

TEST(sums_are_within_the_quantisers_bound_of_float64)
{
    const dtrain_strategy strategies[] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP};
    for (int s = 0; s < 2; s++) {
        plan_of(strategies[s], 0, BLOCK);
        on_threads(3, reduces, NULL);
        on_processes(4, reduces, NULL);
        on_cables(2, reduces, NULL);
    }
}

static void trains(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_fsdp *fsdp = make(world);
    dtrain_fsdp_plan_result planned;
    float *whole = (float *)malloc(FLAT * sizeof(float));
    double furthest = 0;
    CHECK_EQ(dtrain_fsdp_plan(table, 3, &plan.desc, ranks, rank, &planned), DTRAIN_OK);
    for (int step = 0; step < 16; step++) {
        CHECK_EQ(backward(fsdp, rank), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 0.5f), DTRAIN_OK);
    }
    dtrain_fsdp_stats stats = dtrain_fsdp_get_stats(fsdp);
    if (plan.desc.strategy != DTRAIN_HYBRID_SHARD)
        CHECK_EQ(stats.sent_bytes, 16 * planned.sent_reduce);
    if (!plan.desc.no_overlap && stats.peak_bytes > planned.peak + 65536) /* without, all gradients wait in full */
        TEST_FAIL("%zu bytes in use, %zu planned", stats.peak_bytes, planned.peak);
    if (plan.desc.quantise_reduce > 0 && plan.desc.strategy != DTRAIN_HYBRID_SHARD)
        CHECK(stats.sent_bytes * 3 < stats.dense_bytes);
    for (int p = 0; p < 3; p++) {
        float *value = (float *)malloc(UNITS * length(p) * sizeof(float));
        CHECK_EQ(dtrain_fsdp_get(fsdp, table[p].name, value, -1), DTRAIN_OK);
        for (int unit = 0; unit < UNITS; unit++)
            memcpy(whole + place(p, unit), value + (size_t)unit * length(p), length(p) * sizeof(float));
        free(value);
    }
    CHECK_EQ(dtrain_comm_check_equal(world, whole, FLAT, DTRAIN_F32), DTRAIN_OK);
    for (size_t i = 0; i < FLAT; i++) {
        double mean = 0;
        for (int r = 0; r < ranks; r++)
            mean += (double)target(r, i) / ranks;
        furthest = fmax(furthest, fabs((double)whole[i] - mean));
    }
    CHECK(furthest < (plan.desc.quantise_gather + plan.desc.quantise_reduce > 0 ? 0.05 : 0.002));
    CHECK(plan.desc.quantise_gather + plan.desc.quantise_reduce == 0 || furthest > 0.001);
    if (rank == 0 && !plan.trained)
        memcpy(plan.reference, whole, sizeof plan.reference);
    else if (plan.trained)
        CHECK(memcmp(plan.reference, whole, sizeof plan.reference) == 0);
    free(whole);
    dtrain_fsdp_destroy(fsdp);
}

TEST(training_ends_where_it_does_dense_with_the_same_bits_on_all_transports)
{
    for (int kind = 0; kind < 4; kind++) {
        plan_of(kind == 2 ? DTRAIN_HYBRID_SHARD : DTRAIN_FULL_SHARD, kind > 0 ? BLOCK : 0, kind > 1 ? 256 : 0);
        plan.desc.gather_dtype = kind == 3 ? DTRAIN_BF16 : DTRAIN_F32; /* of the small ranges */
        on_threads(4, trains, NULL);
        plan.trained = 1;
        on_processes(4, trains, NULL);
        plan.desc.no_prefetch = plan.desc.no_overlap = 1;
        on_threads(4, trains, NULL);
        if (kind != 2)
            on_cables(4, trains, NULL);
    }
}

static void alone(dtrain_comm *world)
{
    dtrain_fsdp *fsdp = make(world);
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 2), DTRAIN_OK);
    CHECK(layer(fsdp, 0, 2, 0)[77] == first_value(place(0, 2) + 77));
    dtrain_fsdp_destroy(fsdp);
}

TEST(a_world_of_one_rounds_nothing)
{
    plan_of(DTRAIN_FULL_SHARD, BLOCK, BLOCK);
    on_threads(1, alone, NULL);
}

TEST(what_cannot_be_quantised_is_refused)
{
    dtrain_fsdp_plan_result result, dense;
    plan_of(DTRAIN_DDP, 0, 256);
    CHECK_EQ(dtrain_fsdp_plan(table, 3, &plan.desc, 4, 1, &result), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "needs sharded gradients");
    plan_of(DTRAIN_SHARD_GRAD_OP, 256, 0);
    CHECK_EQ(dtrain_fsdp_plan(table, 3, &plan.desc, 4, 1, &result), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "use DTRAIN_FULL_SHARD or DTRAIN_HYBRID_SHARD");
    plan_of(DTRAIN_FULL_SHARD, 100, 0);
    CHECK_EQ(dtrain_fsdp_plan(table, 3, &plan.desc, 4, 1, &result), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "quantise_gather is 100");
    plan_of(DTRAIN_FULL_SHARD, 256, 256);
    plan.desc.reduce_dtype = DTRAIN_BF16;
    CHECK_EQ(dtrain_fsdp_plan(table, 3, &plan.desc, 4, 1, &result), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "gradients are added as float32");
    plan_of(DTRAIN_FULL_SHARD, 256, 256);
    CHECK_EQ(dtrain_fsdp_plan(table, 3, &plan.desc, 4, 1, &result), DTRAIN_OK);
    plan_of(DTRAIN_FULL_SHARD, 0, 0);
    CHECK_EQ(dtrain_fsdp_plan(table, 3, &plan.desc, 4, 1, &dense), DTRAIN_OK);
    CHECK(result.sent_gather * 3 < dense.sent_gather && result.sent_reduce * 3 < dense.sent_reduce);
    CHECK(result.bookkeeping > dense.bookkeeping);
}
