/* Checkpoints: 4 ranks save every 10 steps and are killed in step 25. 2 ranks go on from step 20, and end with the bits
 * of 4 ranks that nobody kills. For other numbers of ranks: "build/checkpoint 1 4".
 *
 * cc -O2 -ffp-contract=off -I. examples/checkpoint.c -o build/checkpoint -lpthread -lm && build/checkpoint */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 50, EXAMPLES = 12, STEPS = 40, RESUME = 0, NEVER = 1000 };
static const char *directory = "build/checkpoint-run";

/* The trainer: adds one example's gradients to g. The model learns w[i] = 1. */
static double forward_backward(const float *w, float *g, uint64_t example)
{
    float x[COUNT], error = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        x[i] = dtrain_random_normal(1, example * COUNT + i);
        error += (w[i] - 1) * x[i];
    }
    for (int i = 0; i < COUNT; i++)
        g[i] += error * x[i];
    return 0.5 * (double)error * (double)error;
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    uint64_t killed_in = *(const uint64_t *)user; /* this step */
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), first;
    dtrain_param table = {.name = "w", .dtype = DTRAIN_F32, .shape = {COUNT}};
    dtrain_fsdp_desc desc = {.optimizer = {.kind = DTRAIN_ADAMW}};
    dtrain_sampler_desc deal = {.count = EXAMPLES * STEPS, .seed = 7, .micro_batches = EXAMPLES, .strided = 1};
    dtrain_schedule lr = {.kind = DTRAIN_SCHEDULE_COSINE, .lr = 0.2f, .total_steps = STEPS};
    dtrain_checkpoint_desc where = {.directory = directory, .keep_last = 2};
    dtrain_checkpoint_report report = {.step = 0};
    dtrain_checkpoint *ckpt;
    dtrain_sampler data;
    dtrain_fsdp *fsdp;
    float w[COUNT];
    unsigned char hash[32];
    uint64_t example;
    double loss = 0;
    DTRAIN_CHECK(dtrain_sampler_init(&data, &deal));
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, &table, 1, &desc));
    dtrain_pieces lists[] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&data), dtrain_schedule_pieces(&lr)};
    dtrain_checkpoint_state state = {.lists = lists, .list_count = 3};
    DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &where));
    if (killed_in == RESUME)
        DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, &report)); /* sets state.step */
    while (state.step < STEPS) {
        int mine = dtrain_sampler_share(&data, state.step, rank, ranks, &first);
        DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, mine, mine)); /* gradients are divided by the examples of all ranks */
        for (loss = 0; mine > 0; mine--, first += ranks) {
            dtrain_sampler_batch(&data, state.step, first, &example);
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
            loss += forward_backward(dtrain_fsdp_param(fsdp, "w"), dtrain_fsdp_grad(fsdp, "w"), example) / EXAMPLES;
            DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, 0));
        }
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, dtrain_schedule_lr(&lr, state.step)));
        state.step++;
        if (state.step == killed_in)
            kill(getpid(), SIGKILL);
        if (state.step % 10 == 0)
            DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));
    }
    DTRAIN_CHECK(dtrain_all_reduce(world, &loss, &loss, 1, DTRAIN_F64, DTRAIN_SUM));
    DTRAIN_CHECK(dtrain_fsdp_get(fsdp, "w", w, 0));
    dtrain_sha256(w, sizeof w, hash);
    if (rank == 0)
        printf("%d ranks train from step %d: loss %.6f, weights %02x%02x%02x%02x\n", ranks, (int)report.step, loss,
               hash[0], hash[1], hash[2], hash[3]);
    dtrain_checkpoint_destroy(ckpt);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

static int run(int ranks, uint64_t killed_in)
{
    int status;
    if (fork() == 0)
        exit(dtrain_run_threads(ranks, train, &killed_in, NULL) != DTRAIN_OK);
    return wait(&status) > 0 ? status : -1;
}

int main(int argc, char **argv)
{
    int before = argc > 1 ? atoi(argv[1]) : 4, after = argc > 2 ? atoi(argv[2]) : 2, status, end;
    directory = argc > 3 ? argv[3] : directory;
    status = run(before, NEVER);
    end = run(before, 25);
    dprintf(1, "%d ranks ended by signal %d\n", before, WTERMSIG(end));
    status |= run(after, RESUME);
    DTRAIN_CHECK(dtrain_checkpoint_verify(directory));
    return status != 0;
}

/* 4 ranks train from step 0: loss 1.810982, weights 1f8fc35f
 * 4 ranks ended by signal 9
 * 2 ranks train from step 20: loss 1.810982, weights 1f8fc35f */
