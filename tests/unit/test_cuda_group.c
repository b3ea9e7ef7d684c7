/* Ranks that are threads with a queue each on one GPU: collectives on its memory give the bits of the CPU's. */
#include "dtrain.h"
#include "cuda_device.h"

enum { MOST = 70001 };

typedef struct run {
    dtrain_device_mode mode;
    int async; /* the group has a queue and a thread of its own */
    const size_t *counts;
    int counts_n;
    size_t most; /* of them */
    int failures;
} run;

static int differ(const float *got, const float *expected, size_t count)
{
    return count > 0 && memcmp(got, expected, count * sizeof *got) != 0;
}

/* One call of each kind on count numbers, `offset` floats beyond a multiple of 16 bytes; returns how many are wrong. */
static int calls(dtrain_comm *world, dtrain_device *device, dtrain_device_group *group, float *there, size_t count,
                 size_t offset)
{
    int rank = dtrain_comm_rank(world), wrong = 0;
    size_t begin, mine = dtrain_shard(world, count, rank, &begin);
    float *in = (float *)malloc((3 * count + 1) * sizeof *in), *out = in + count, *got = out + count;
    float *at = there + offset;
    cuda_numbers(in, rank, count);
    CHECK_OK(dtrain_device_copy(device, at, in, count * sizeof *in));
    CHECK_OK(dtrain_device_group_all_reduce(group, at, at, count, DTRAIN_F32, DTRAIN_MEAN));
    CHECK_OK(dtrain_device_copy(device, got, at, count * sizeof *got));
    CHECK_OK(dtrain_all_reduce(world, in, out, count, DTRAIN_F32, DTRAIN_MEAN));
    wrong += differ(got, out, count);
    CHECK_OK(dtrain_device_copy(device, at, in, count * sizeof *in));
    CHECK_OK(dtrain_device_group_reduce_scatter(group, at, at + begin, count, DTRAIN_F32, DTRAIN_SUM));
    CHECK_OK(dtrain_device_group_all_gather(group, at + begin, at, count, DTRAIN_F32));
    CHECK_OK(dtrain_device_copy(device, got, at, count * sizeof *got));
    CHECK_OK(dtrain_all_reduce(world, in, out, count, DTRAIN_F32, DTRAIN_SUM));
    wrong += differ(got, out, count) + (mine > count);
    CHECK_OK(dtrain_device_copy(device, at, in, count * sizeof *in));
    CHECK_OK(dtrain_device_group_broadcast(group, at, count, DTRAIN_F32, dtrain_comm_size(world) - 1));
    CHECK_OK(dtrain_device_copy(device, got, at, count * sizeof *got));
    cuda_numbers(out, dtrain_comm_size(world) - 1, count);
    wrong += differ(got, out, count);
    free(in);
    return wrong;
}

static dtrain_status one_rank(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    dtrain_device *device = cuda_device(0);
    dtrain_device_group *group = NULL;
    dtrain_device_group_desc desc;
    void *there = NULL;
    int wrong = 0;
    memset(&desc, 0, sizeof desc);
    desc.mode = r->mode;
    desc.async = r->async;
    CHECK_OK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, (r->most + 4) * sizeof(float), &there));
    CHECK_OK(dtrain_device_group_create(&group, world, device, &desc));
    CHECK_EQ(dtrain_device_group_mode(group), r->mode == DTRAIN_DEVICE_STAGED ? r->mode : DTRAIN_DEVICE_EVENTS);
    for (int i = 0; i < r->counts_n; i++)
        wrong += calls(world, device, group, (float *)there, r->counts[i], (size_t)i % 4);
    __atomic_add_fetch(&r->failures, wrong, __ATOMIC_SEQ_CST);
    dtrain_device_group_destroy(group);
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, there);
    dtrain_cuda_destroy(device);
    return DTRAIN_OK;
}

static void ranks_of(dtrain_device_mode mode, int async)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 1000, 4097, MOST};
    static const int sizes[] = {1, 2, 3, 4, 8};
    dtrain_cuda_destroy(cuda_device(0)); /* ends here without a GPU */
    for (int i = 0; i < 5; i++) {
        run r = {mode, async, counts, sizeof counts / sizeof counts[0], MOST, 0};
        CHECK_OK(dtrain_run_threads(sizes[i], one_rank, &r, NULL));
        CHECK_EQ(r.failures, 0);
    }
}

TEST(threads_on_one_gpu_go_by_events_and_give_the_cpus_bits)
{
    ranks_of(DTRAIN_DEVICE_MODE_AUTO, 0);
}

TEST(threads_on_one_gpu_give_the_cpus_bits_staged)
{
    ranks_of(DTRAIN_DEVICE_STAGED, 0);
}

TEST(groups_with_a_queue_and_a_thread_of_their_own_give_the_cpus_bits)
{
    ranks_of(DTRAIN_DEVICE_MODE_AUTO, 1);
    ranks_of(DTRAIN_DEVICE_STAGED, 1);
}

/* The last one begins at an odd offset, as one in four does. */
TEST(large_vectors_give_the_cpus_bits)
{
    static const int sizes[] = {1, 2, 4, 8};
    size_t most = cuda_large();
    const size_t counts[] = {(most >> 8) + 1, (most >> 4) + 3, most, most - 1};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 300000;
    for (int i = 0; i < 8 && most > 0; i++) {
        run r = {i < 4 ? DTRAIN_DEVICE_MODE_AUTO : DTRAIN_DEVICE_STAGED, 0, counts, 4, most, 0};
        dtrain_cuda_destroy(cuda_device(0)); /* ends here without a GPU */
        CHECK_OK(dtrain_run_threads(sizes[i % 4], one_rank, &r, &desc));
        CHECK_EQ(r.failures, 0);
    }
}
