/* cc -O2 -ffp-contract=off -I. examples/quickstart.c -o build/quickstart -lpthread -lm && build/quickstart */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

static dtrain_status train(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    float weights[2] = {0, 0}, grads[2]; /* y = weights[0] * x + weights[1] */
    size_t first, n = dtrain_shard(world, 64, rank, &first); /* my share of the points of y = 3 x - 1 */
    (void)user;
    for (int step = 0; step < 200; step++) {
        grads[0] = grads[1] = 0;
        for (size_t i = first; i < first + n; i++) {
            float x = (float)i / 32 - 1, error = weights[0] * x + weights[1] - (3 * x - 1);
            grads[0] += error * x / 64;
            grads[1] += error / 64;
        }
        DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, 2, DTRAIN_F32, DTRAIN_SUM));
        for (int k = 0; k < 2; k++)
            weights[k] -= 0.5f * grads[k];
    }
    if (rank == 0)
        printf("%d ranks agree: y = %.3f x + %.3f\n", ranks, (double)weights[0], (double)weights[1]);
    return DTRAIN_OK;
}

int main(void)
{
    DTRAIN_CHECK(dtrain_run_threads(4, train, NULL, NULL));
    return 0;
}

/* 4 ranks agree: y = 3.000 x + -1.000 */
