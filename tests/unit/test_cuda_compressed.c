/* Compressed all-reduces of vectors on a GPU, which ranks share as threads, beside those of the CPU: the same results,
 * residuals and velocities to the bit, of every compressor, in place and apart, wherever a vector begins. */
#include "dtrain.h"
#include "cuda_device.h"
#include "piece_at.h"

enum { MOST = 30011, STEPS = 4 };
enum { TOPK, TOPK_BF16, TOPK_SPLIT, TOPK_MOMENTUM, INT8, FP8, BF16, F16, KINDS };

typedef struct run {
    int kind, specials, failures;
} run;

static dtrain_compressor compressor_of(int kind)
{
    dtrain_compressor made;
    dtrain_topk_desc topk;
    memset(&topk, 0, sizeof topk);
    topk.schedule.ratio = 0.01;
    topk.schedule.stage_steps = kind == TOPK ? 1 : 0;
    topk.values = kind == TOPK_BF16 ? DTRAIN_BF16 : DTRAIN_F32;
    topk.exchange = kind == TOPK_SPLIT ? DTRAIN_EXCHANGE_SPLIT : DTRAIN_EXCHANGE_GATHER;
    switch (kind) {
    case INT8: return dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);
    case FP8: return dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 64);
    case BF16: return dtrain_compressor_of(DTRAIN_COMPRESS_BF16, 0);
    case F16: return dtrain_compressor_of(DTRAIN_COMPRESS_F16, 0);
    default: CHECK_OK(dtrain_compressor_topk(&made, &topk, NULL)); return made;
    }
}

static float gradient(int specials, int rank, size_t i, int step)
{
    static const uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x80000000u, 0x00000001u, 0x7f7fffffu};
    uint64_t index = (uint64_t)i + (uint64_t)step * 100000, random = dtrain_random_u64((uint64_t)rank + 1, index);
    float noise = dtrain_random_normal((uint64_t)rank + 1, index);
    if (specials && random % 997 == 0)
        return from_bits(special[random / 997 % 6]);
    return noise * noise * noise;
}

/* Whether a device's numbers are the CPU's; what a NaN holds is nobody's. */
static int same(dtrain_device *device, const float *there, const float *here, size_t count)
{
    float *back = (float *)malloc((count + 1) * sizeof(float));
    size_t i = 0;
    CHECK_OK(dtrain_device_copy(device, back, there, count * sizeof(float)));
    while (i < count && (to_bits(back[i]) == to_bits(here[i]) || (back[i] != back[i] && here[i] != here[i])))
        i++;
    free(back);
    return i == count;
}

static int step_of(run *r, dtrain_device *device, dtrain_compressed *const *states, float *there, float *here,
                   size_t count, int rank, int step)
{
    float *out = step % 2 == 0 ? here + count : here, *out_there = step % 2 == 0 ? there + count : there;
    dtrain_op op = step < 2 ? DTRAIN_SUM : DTRAIN_MEAN;
    int good;
    for (size_t i = 0; i < count; i++)
        here[i] = gradient(r->specials, rank, i, step);
    CHECK_OK(dtrain_device_copy(device, there, here, count * sizeof(float)));
    CHECK_OK(dtrain_compressed_all_reduce(states[0], here, out, op));
    CHECK_OK(dtrain_compressed_all_reduce(states[1], there, out_there, op));
    good = same(device, out_there, out, count);
    good =
        good && dtrain_compressed_get_stats(states[0]).sent_bytes == dtrain_compressed_get_stats(states[1]).sent_bytes;
    const dtrain_piece *p;
    for (int i = 0; (p = piece_at(dtrain_compressed_pieces(states[0]), i)) != NULL; i++) {
        const dtrain_piece *q = piece_at(dtrain_compressed_pieces(states[1]), i);
        CHECK(q->device == (strcmp(q->name, "step") != 0 ? device : NULL));
        good = good && same(q->device, (float *)q->data, (float *)p->data, p->count);
    }
    return good;
}

static dtrain_status one_rank(dtrain_comm *world, void *user)
{
    static const size_t counts[] = {0, 1, 65, 4099, MOST};
    run *r = (run *)user;
    int rank = dtrain_comm_rank(world), wrong = 0;
    dtrain_device *device = cuda_device(0);
    float *here = (float *)malloc(2 * MOST * sizeof(float)), *there;
    there = (float *)device_put(device, NULL, (2 * MOST + 4) * sizeof(float));
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        dtrain_compressed *states[2];
        dtrain_compressed_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.momentum = r->kind == TOPK_MOMENTUM ? 0.5f : 0.0f;
        for (int i = 0; i < 2; i++) {
            dtrain_compressor compressor = compressor_of(r->kind);
            desc.device = i == 0 ? NULL : device;
            CHECK_OK(dtrain_compressed_create(&states[i], world, counts[c], &compressor, &desc));
        }
        for (int step = 0; step < STEPS; step++)
            if (!step_of(r, device, states, there + c % 4, here, counts[c], rank, step)) {
                TEST_FAIL("rank %d: %zu elements differ in step %d, kind %d", rank, counts[c], step, r->kind);
                wrong++;
            }
        dtrain_compressed_destroy(states[0]);
        dtrain_compressed_destroy(states[1]);
    }
    device_drop(device, there);
    free(here);
    dtrain_cuda_destroy(device);
    __atomic_add_fetch(&r->failures, wrong, __ATOMIC_SEQ_CST);
    return DTRAIN_OK;
}

TEST(vectors_on_a_gpu_that_travel_compressed_give_the_cpus_bits)
{
    dtrain_cuda_destroy(cuda_device(0)); /* ends here without a GPU */
    for (int kind = 0; kind < KINDS; kind++)
        for (int ranks = 1; ranks <= 3; ranks += 2) {
            run r = {kind, (kind + ranks) % 2, 0};
            CHECK_OK(dtrain_run_threads(ranks, one_rank, &r, NULL));
            CHECK_EQ(r.failures, 0);
        }
}
