/* Local SGD (DiLoCo): each rank trains by itself, with any optimizer. Every 20 steps the ranks average how far they
 * have come, and make one outer step with that. So they send much less than DDP, which sends in every step.
 *
 * cc -O2 -ffp-contract=off -I. examples/local_sgd.c -o build/local_sgd -lpthread -lm && build/local_sgd */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { WIDTH = 16, LAYER = WIDTH * WIDTH, LAYERS = 3, COUNT = LAYERS * LAYER, EXAMPLES = 8, STEPS = 400 };

/* The trainer: adds the gradients of one example to g and returns its loss. A layer gives x + relu(w x). The model
 * learns the larger of each number and its right neighbour. */
static double forward_backward(const float *w, float *g, uint64_t example)
{
    float h[LAYERS + 1][WIDTH], d[LAYERS + 1][WIDTH];
    double loss = 0;
    for (uint64_t i = 0; i < WIDTH; i++)
        h[0][i] = dtrain_random_normal(1, example * WIDTH + i);
    for (int l = 0; l < LAYERS; l++)
        for (int o = 0; o < WIDTH; o++) {
            float sum = 0;
            for (int i = 0; i < WIDTH; i++)
                sum += w[l * LAYER + o * WIDTH + i] * h[l][i];
            h[l + 1][o] = h[l][o] + (sum > 0 ? sum : 0);
        }
    for (int i = 0; i < WIDTH; i++) {
        float right = h[0][(i + 1) % WIDTH];
        d[LAYERS][i] = h[LAYERS][i] - (right > h[0][i] ? right : h[0][i]);
        loss += 0.5 * (double)d[LAYERS][i] * (double)d[LAYERS][i];
    }
    for (int l = LAYERS - 1; l >= 0; l--)
        for (int i = 0; i < WIDTH; i++) {
            d[l][i] = d[l + 1][i];
            for (int o = 0; o < WIDTH; o++)
                if (h[l + 1][o] > h[l][o]) {
                    g[l * LAYER + o * WIDTH + i] += d[l + 1][o] * h[l][i];
                    d[l][i] += d[l + 1][o] * w[l * LAYER + o * WIDTH + i];
                }
        }
    return loss;
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    float w[COUNT], g[COUNT];
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_param table = {.name = "w", .dtype = DTRAIN_F32, .shape = {COUNT}, .data = w, .grad = g};
    dtrain_local_sgd_desc desc = {.steps = 20, .outer_momentum = 0.5f, .window_ms = -1, .blocking = 1};
    /* window_ms and blocking: rounds wait for all ranks, so that every run gives the same bits */
    dtrain_local_sgd_stats stats;
    dtrain_local_sgd *local;
    double loss = 0;
    (void)user;
    for (uint64_t i = 0; i < COUNT; i++)
        w[i] = 0.2f * dtrain_random_normal(2, i);
    DTRAIN_CHECK(dtrain_local_sgd_create(&local, world, &table, 1, &desc));
    if (rank == 0)
        printf("%d ranks train %d layers to find the larger of two neighbours\n", ranks, LAYERS);
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < COUNT; i++)
            g[i] = 0;
        for (int i = 0; i < EXAMPLES; i++) /* each rank has its own */
            forward_backward(w, g, (uint64_t)((step * ranks + rank) * EXAMPLES + i));
        for (int i = 0; i < COUNT; i++)
            w[i] -= 0.1f / EXAMPLES * g[i];
        DTRAIN_CHECK(dtrain_local_sgd_step(local, EXAMPLES)); /* every 20th: a round */
    }
    DTRAIN_CHECK(dtrain_local_sgd_finish(local)); /* all ranks have the same weights now */
    DTRAIN_CHECK(dtrain_comm_check_equal(world, w, COUNT, DTRAIN_F32));
    for (uint64_t i = 0; i < 100; i++) /* examples that nobody has seen */
        loss += forward_backward(w, g, 1000000 + i) / 100;
    stats = dtrain_local_sgd_get_stats(local);
    if (rank == 0)
        printf("%d ranks, %d rounds: loss %.4f; %d KiB sent, by DDP %d KiB\n", ranks, (int)stats.rounds, loss,
               (int)(stats.sent_bytes >> 10), (int)(stats.dense_bytes >> 10));
    dtrain_local_sgd_destroy(local);
    return DTRAIN_OK;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 4;
    dtrain_comm *world;
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL)); /* the processes of dtrun, or this one alone */
    DTRAIN_CHECK(dtrain_comm_size(world) > 1 ? train(world, NULL) : dtrain_run_threads(threads, train, NULL, NULL));
    dtrain_comm_destroy(world);
    return 0;
}

/* 4 ranks train 3 layers to find the larger of two neighbours
 * 4 ranks, 21 rounds: loss 0.0467; 92 KiB sent, by DDP 1800 KiB */
