/* FSDP and DDP over memory of GPUs, of one that all ranks share, give the weights of the same training on the CPU, bit
 * for bit, and their checkpoints go from one to the other. */
#include "dtrain.h"
#include "cuda_device.h"
#define TRAINING_SEEDS 1 /* streams of the emulation run at once */
#include "device_training.h"

static dtrain_device *training_device(int rank, uint64_t seed)
{
    (void)rank;
    (void)seed;
    return cuda_device(0);
}

static void training_device_end(dtrain_device *device)
{
    dtrain_cuda_destroy(device);
}

/* Ends here without a GPU. */
static void need_device(void)
{
    dtrain_cuda_destroy(cuda_device(0));
}

/* Opening and closing the emulation's memory takes nine tenths of the time of a run. */
static void leave_open(int open)
{
#ifndef __CUDACC__
    (open ? dtrain_cuda_emulated_open : dtrain_cuda_emulated_close)();
#endif
    (void)open;
}

TEST(sharded_training_gives_the_cpus_bits)
{
    need_device();
    run r = plain(DTRAIN_FULL_SHARD);
    r.ranks = 2;
    check_run(r, "full shard on 2 ranks");
}

TEST(every_strategy_gives_the_cpus_bits)
{
    need_device();
    leave_open(1);
    for (int i = 0; i < 4; i++) {
        run r = plain(strategies[i]);
        check_run(r, "the library's memory");
        r.own_memory = 1;
        r.gather = r.reduce = DTRAIN_BF16;
        r.micro_batches = 3;
        check_run(r, "the caller's memory, bf16");
    }
    leave_open(0);
}

TEST(ddp_gives_the_cpus_bits_however_its_sums_travel)
{
    static const dtrain_compression kinds[] = {(dtrain_compression)0, DTRAIN_COMPRESS_TOPK, DTRAIN_COMPRESS_INT8,
                                               DTRAIN_COMPRESS_FP8, DTRAIN_COMPRESS_BF16};
    need_device();
    leave_open(1);
    for (int i = 0; i < 5; i++) {
        run r = plain(DTRAIN_DDP);
        r.ddp = 1;
        r.ranks = 3;
        r.micro_batches = 2;
        r.packs = kinds[i];
        check_run(r, "DDP");
    }
    leave_open(0);
}

static void same_parameters(rank_state *s, rank_state *t)
{
    static float a[RANKS][MOST], b[RANKS][MOST];
    int rank = dtrain_comm_rank(s->comm);
    for (int p = 0; p < PARAMS; p++) {
        CHECK_OK(dtrain_fsdp_get(s->fsdp, names[p], a[rank], -1));
        CHECK_OK(dtrain_fsdp_get(t->fsdp, names[p], b[rank], -1));
        if (memcmp(a[rank], b[rank], sizes[p] * sizeof(float)) != 0)
            TEST_FAIL("rank %d: %s differs between the GPU and the CPU", rank, names[p]);
    }
}

/* Two steps by one, a checkpoint that the other loads, and a step of both. */
static dtrain_status hand_over(dtrain_comm *comm, void *user)
{
    run r = plain(DTRAIN_FULL_SHARD);
    rank_state on_gpu, on_cpu;
    dtrain_checkpoint *checkpoint = NULL;
    dtrain_checkpoint_desc desc;
    r.ranks = dtrain_comm_size(comm);
    r.micro_batches = 1;
    memset(&on_gpu, 0, sizeof on_gpu);
    memset(&on_cpu, 0, sizeof on_cpu);
    memset(&desc, 0, sizeof desc);
    desc.directory = (const char *)user;
    on_gpu.r = on_cpu.r = &r;
    on_gpu.comm = on_cpu.comm = comm;
    on_gpu.device = training_device(0, 1);
    make(&on_gpu);
    make(&on_cpu);
    CHECK_OK(dtrain_checkpoint_create(&checkpoint, comm, &desc));
    for (int turn = 0; turn < 2; turn++) {
        rank_state *first = turn == 0 ? &on_gpu : &on_cpu, *second = turn == 0 ? &on_cpu : &on_gpu;
        dtrain_checkpoint_state state;
        fsdp_step(first, 2 * turn);
        fsdp_step(first, 2 * turn + 1);
        memset(&state, 0, sizeof state);
        dtrain_pieces list = dtrain_fsdp_pieces(first->fsdp);
        state.lists = &list;
        state.list_count = 1;
        state.step = (uint64_t)turn + 1;
        CHECK_OK(dtrain_checkpoint_save(checkpoint, &state));
        list = dtrain_fsdp_pieces(second->fsdp);
        CHECK_OK(dtrain_checkpoint_load(checkpoint, &state, NULL, NULL));
        CHECK_EQ(state.step, turn + 1);
        same_parameters(first, second);
        fsdp_step(first, 7);
        fsdp_step(second, 7);
        same_parameters(first, second);
    }
    dtrain_checkpoint_destroy(checkpoint);
    unmake(&on_gpu);
    unmake(&on_cpu);
    training_device_end(on_gpu.device);
    return DTRAIN_OK;
}

TEST(checkpoints_go_from_the_gpu_to_the_cpu_and_back)
{
    char directory[] = "/tmp/dtrain_cuda_train_XXXXXX", command[64];
    need_device();
    CHECK(mkdtemp(directory) != NULL);
    CHECK_OK(dtrain_run_threads(3, hand_over, directory, NULL));
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    CHECK_EQ(system(command), 0);
}
