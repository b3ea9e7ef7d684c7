/* Sums of gradients that travel in 16 bits: each gradient is rounded once, when it leaves its rank; its owner adds in
 * float32, over ranks and micro-batches. The reference adds the rounded numbers in float64. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "worlds.h"

#include <math.h>

#define MOST_BATCHES 8

/* Small ranges that travel together, of which one rank may hold all; one that is alone; and one that no world divides.
 */
enum { ONE, SEVEN, MANY_SMALL, LARGE, PARAMS };
static const size_t sizes[PARAMS] = {1, 7, 300, 20011};

static struct {
    dtrain_strategy strategy;
    int shard_size, micro_batches, keep;
    dtrain_dtype dtype;
    float *means; /* of rank 0's own; NULL: not wanted */
} now;

static float gradient(int batch, size_t element)
{
    uint64_t key = (uint64_t)batch * 1000003 + element * 7919 + 17;
    key = (key ^ key >> 31) * 0x7fb5d329728ea185u;
    key = (key ^ key >> 27) * 0x81dadef4bc2dd44du;
    return (float)((int64_t)(key >> 40) - 8388608) * 0x1p-22f;
}

static float rounded(float x, dtrain_dtype dtype)
{
    uint16_t narrow;
    CHECK_EQ(dtrain_convert(&x, DTRAIN_F32, &narrow, dtype, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_convert(&narrow, dtype, &x, DTRAIN_F32, 1), DTRAIN_OK);
    return x;
}

static dtrain_fsdp *create(dtrain_comm *world, dtrain_param *table)
{
    static const char *const names[PARAMS] = {"one", "seven", "many", "large"};
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    memset(table, 0, PARAMS * sizeof *table);
    memset(&desc, 0, sizeof desc);
    for (int p = 0; p < PARAMS; p++) {
        table[p].name = names[p];
        table[p].dtype = DTRAIN_F32;
        table[p].shape[0] = sizes[p];
        table[p].unit = p == LARGE;
    }
    desc.strategy = now.strategy;
    desc.shard_size = now.shard_size;
    desc.reduce_dtype = now.dtype;
    desc.keep_full_grads = now.keep;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &desc), DTRAIN_OK);
    return fsdp;
}

/* Micro-batch j of a rank is number j * ranks + rank of the step. */
static void compute(dtrain_comm *world, dtrain_fsdp *fsdp, const dtrain_param *table)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    CHECK_EQ(dtrain_fsdp_begin(fsdp, now.micro_batches, now.micro_batches), DTRAIN_OK);
    for (int j = 0; j < now.micro_batches; j++)
        for (int unit = 1; unit >= 0; unit--) {
            CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
            size_t element = 0;
            for (int p = 0; p < PARAMS; element += sizes[p++]) {
                float *grad = dtrain_fsdp_grad(fsdp, table[p].name);
                for (size_t i = 0; table[p].unit == unit && i < sizes[p]; i++)
                    grad[i] += gradient(j * ranks + rank, element + i);
            }
            CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
        }
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
}

/* The mean of one element in float64, and what float32 may lose of it: a few times its last bit. */
static double mean_of(int ranks, size_t element, double *bound)
{
    double sum = 0, most = 0;
    for (int rank = 0; rank < ranks; rank++) {
        float kept = 0;
        for (int j = 0; j < now.micro_batches; j++) {
            float g = gradient(j * ranks + rank, element);
            kept += g;
            sum += now.keep ? 0 : (double)rounded(g, now.dtype);
            most += fabs((double)g);
        }
        sum += now.keep ? (double)rounded(kept, now.dtype) : 0;
    }
    *bound = 5e-7 * most / (ranks * now.micro_batches);
    return sum / (ranks * now.micro_batches);
}

static void sums_are_float32(dtrain_comm *world)
{
    dtrain_param table[PARAMS];
    const dtrain_slice *slices = NULL;
    size_t count = 0, element = 0, bad = 0;
    dtrain_fsdp *fsdp = create(world, table);
    compute(world, fsdp, table);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    CHECK_EQ(count, PARAMS);
    for (size_t p = 0; p < count; element += sizes[p++])
        for (size_t i = 0; i < slices[p].count; i++) {
            double bound, mean = mean_of(dtrain_comm_size(world), element + slices[p].begin + i, &bound);
            if (!(fabs((double)slices[p].grads[i] - mean) <= bound) && bad++ == 0)
                TEST_FAIL("strategy %d, %d ranks: %s[%zu] is %.9g, expected %.9g within %.2g", (int)now.strategy,
                          dtrain_comm_size(world), slices[p].name, slices[p].begin + i, (double)slices[p].grads[i],
                          mean, bound);
            if (now.means != NULL)
                now.means[element + slices[p].begin + i] = slices[p].grads[i];
        }
    dtrain_fsdp_destroy(fsdp);
}

static void set_up(dtrain_strategy strategy, int shard_size, int micro_batches, dtrain_dtype dtype, int keep)
{
    now.strategy = strategy;
    now.shard_size = shard_size;
    now.micro_batches = micro_batches;
    now.dtype = dtype;
    now.keep = keep;
    now.means = NULL;
}

TEST(gradients_of_16_bits_are_summed_in_float32)
{
    const int worlds[] = {1, 2, 3, 5};
    for (int w = 0; w < 4; w++)
        for (int micro = 1; micro <= 4; micro += 3) {
            set_up(DTRAIN_FULL_SHARD, 0, micro, DTRAIN_BF16, 0);
            on_threads(worlds[w], sums_are_float32, NULL);
            set_up(DTRAIN_SHARD_GRAD_OP, 0, micro, DTRAIN_F16, 0);
            on_threads(worlds[w], sums_are_float32, NULL);
            set_up(DTRAIN_HYBRID_SHARD, worlds[w], micro, DTRAIN_BF16, 0);
            on_threads(worlds[w], sums_are_float32, NULL);
        }
}

TEST(so_they_are_over_messages)
{
    dtrain_comm_desc polled;
    memset(&polled, 0, sizeof polled);
    polled.progress = DTRAIN_PROGRESS_POLL;
    set_up(DTRAIN_FULL_SHARD, 0, 3, DTRAIN_BF16, 0);
    on_processes(3, sums_are_float32, NULL);
    on_processes(2, sums_are_float32, &polled);
    on_cables(3, sums_are_float32, NULL);
    set_up(DTRAIN_SHARD_GRAD_OP, 0, 3, DTRAIN_F16, 0);
    on_processes(3, sums_are_float32, NULL);
}

TEST(what_is_folded_on_its_rank_first_is_rounded_once)
{
    set_up(DTRAIN_FULL_SHARD, 0, 3, DTRAIN_BF16, 1);
    on_threads(3, sums_are_float32, NULL);
}

TEST(a_fixed_number_of_micro_batches_has_one_sum_on_any_power_of_two)
{
    static float one[20319], other[20319];
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_SHARD_GRAD_OP; strategy++)
        for (int ranks = 1; ranks <= MOST_BATCHES; ranks *= 2) {
            set_up((dtrain_strategy)strategy, 0, MOST_BATCHES / ranks, DTRAIN_BF16, 0);
            now.means = ranks == 1 ? one : other;
            on_threads(ranks, sums_are_float32, NULL);
            CHECK(ranks == 1 || memcmp(one, other, sizeof one) == 0);
        }
}

/* 257 is no number of bfloat16: 256 and 258 are its neighbours. Four micro-batches have 256 + 1 each. */
static void mean_by_hand(dtrain_comm *world)
{
    dtrain_param table;
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    memset(&table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    table.name = "weight";
    table.dtype = DTRAIN_F32;
    table.shape[0] = 3;
    desc.reduce_dtype = DTRAIN_BF16;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, &table, 1, &desc), DTRAIN_OK);
    for (int j = 0; j < 4; j++) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
        for (int i = 0; i < 3; i++)
            dtrain_fsdp_grad(fsdp, "weight")[i] = dtrain_comm_rank(world) == 0 ? 256.0f : 1.0f;
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, 0), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    for (size_t i = 0; i < slices[0].count; i++)
        CHECK(slices[0].grads[i] == 4 * 257 / 2.0f);
    dtrain_fsdp_destroy(fsdp);
}

TEST(four_times_256_and_1_are_1028)
{
    on_threads(2, mean_by_hand, NULL);
}
