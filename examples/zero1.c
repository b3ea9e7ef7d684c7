/* Optimizer state sharded over ranks (ZeRO-1). Each rank keeps Adam's m and v of one slice of the weights. It updates
 * that slice, and gets the other slices from the other ranks.
 *
 * cc -O2 -ffp-contract=off -I. examples/zero1.c -o build/zero1 -lpthread -lm && build/zero1 */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include <math.h>
#include <string.h>

enum { WIDTH = 16, LAYER = WIDTH * WIDTH, LAYERS = 3, COUNT = LAYERS * LAYER, EXAMPLES = 32, STEPS = 300 };

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

static void adam(float *w, float g, float *m, float *v)
{
    *m = 0.9f * *m + 0.1f * g;
    *v = 0.99f * *v + 0.01f * g * g;
    *w -= 0.02f * *m / (sqrtf(*v) + 1e-6f);
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    float w[COUNT], g[COUNT];
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t lo, n = dtrain_shard(world, COUNT, rank, &lo); /* this rank's slice: n weights from w[lo] on */
    float *m = (float *)calloc(n + 1, sizeof *m), *v = (float *)calloc(n + 1, sizeof *v);
    (void)user;
    if (m == NULL || v == NULL)
        return DTRAIN_ERR_MEMORY;
    for (uint64_t i = 0; i < COUNT; i++)
        w[i] = 0.2f * dtrain_random_normal(2, i);
    if (rank == 0)
        printf("%d ranks train %d layers to find the larger of two neighbours\n", ranks, LAYERS);
    for (int step = 1; step <= STEPS; step++) {
        double loss = 0;
        memset(g, 0, sizeof g);
        for (int i = rank; i < EXAMPLES; i += ranks)
            loss += forward_backward(w, g, (uint64_t)(step * EXAMPLES + i)) / EXAMPLES;
        DTRAIN_CHECK(dtrain_reduce_scatter(world, g, g + lo, COUNT, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = 0; i < n; i++)
            adam(w + lo + i, g[lo + i] / EXAMPLES, m + i, v + i);
        DTRAIN_CHECK(dtrain_all_gather(world, w + lo, w, COUNT, DTRAIN_F32));
        DTRAIN_CHECK(dtrain_all_reduce(world, &loss, &loss, 1, DTRAIN_F64, DTRAIN_SUM));
        if (rank == 0 && step % 100 == 0)
            printf("step %d loss %.4f\n", step, loss);
    }
    if (rank == 0)
        printf("%d ranks: rank 0 has Adam's state of %d of %d weights\n", ranks, (int)n, COUNT);
    free(m);
    free(v);
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
 * step 100 loss 0.2703
 * step 200 loss 0.0862
 * step 300 loss 0.0064
 * 4 ranks: rank 0 has Adam's state of 192 of 768 weights */
