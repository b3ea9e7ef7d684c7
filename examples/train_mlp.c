/* A trainer with flat arrays and its own loop. One broadcast and one all-reduce make it data-parallel. A network of two
 * layers learns to tell two spirals of points apart.
 *
 * cc -O3 -march=native -fno-math-errno -ffp-contract=off -I. examples/train_mlp.c -o build/train_mlp -lpthread -lm
 * build/train_mlp 2
 */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <string.h>

#include "nn.h"

enum {
    SAMPLES = 512,
    HIDDEN = 64,
    STEPS = 600,
    W1 = 0,
    B1 = 2 * HIDDEN,
    W2 = 3 * HIDDEN,
    B2 = 5 * HIDDEN,
    COUNT = B2 + 2
};

typedef struct mlp {
    float params[COUNT], grads[COUNT], m[COUNT], v[COUNT];
    float hidden[SAMPLES * HIDDEN], active[SAMPLES * HIDDEN], dhidden[SAMPLES * HIDDEN];
    float logits[SAMPLES * 256], din[SAMPLES * 2];
    float inputs[SAMPLES * 2];
    int32_t labels[SAMPLES];
} mlp;

/* Point i lies on arm i % 2, a little off it. */
static void make_points(mlp *net)
{
    for (uint64_t i = 0; i < SAMPLES; i++) {
        float along = (float)i / SAMPLES, angle = 9 * along + 3.14159265f * (float)(i % 2);
        net->inputs[2 * i] = along * cosf(angle) + 0.02f * dtrain_random_normal(7, 2 * i);
        net->inputs[2 * i + 1] = along * sinf(angle) + 0.02f * dtrain_random_normal(7, 2 * i + 1);
        net->labels[i] = (int32_t)(i % 2);
    }
}

/* Adds the gradients of points first .. first + n - 1 and returns the sum of their losses. */
static double forward_backward(mlp *net, size_t first, size_t n, int *right)
{
    float *w = net->params, *g = net->grads;
    const float *x = net->inputs + 2 * first;
    double loss;
    nn_linear_forward(net->hidden, x, w + W1, w + B1, n, 2, HIDDEN);
    nn_gelu_forward(net->active, net->hidden, n * HIDDEN);
    nn_linear_forward(net->logits, net->active, w + W2, w + B2, n, HIDDEN, 2);
    for (size_t i = 0; i < n; i++)
        *right += (net->logits[2 * i + 1] > net->logits[2 * i]) == net->labels[first + i];
    loss = nn_cross_entropy(net->logits, net->labels + first, n, 2);
    nn_linear_backward(net->dhidden, g + W2, g + B2, net->logits, net->active, w + W2, n, HIDDEN, 2);
    nn_gelu_backward(net->dhidden, net->dhidden, net->hidden, n * HIDDEN);
    nn_linear_backward(net->din, g + W1, g + B1, net->dhidden, x, w + W1, n, 2, HIDDEN);
    return loss;
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    mlp *net = (mlp *)calloc(1, sizeof *net);
    int rank = dtrain_comm_rank(world);
    size_t first, n = dtrain_shard(world, SAMPLES, rank, &first); /* my share of the points */
    (void)user;
    if (net == NULL)
        return DTRAIN_ERR_MEMORY;
    make_points(net);
    for (size_t i = 0; i < COUNT; i++)
        net->params[i] = i < B1 || (i >= W2 && i < B2) ? dtrain_random_normal((uint64_t)rank, i) * 0.5f : 0;
    DTRAIN_CHECK(dtrain_broadcast(world, net->params, COUNT, DTRAIN_F32, 0)); /* rank 0's weights */
    if (rank == 0)
        printf("%d ranks train a network of two layers to tell two spirals apart\n", dtrain_comm_size(world));
    for (int step = 1; step <= STEPS; step++) {
        int right = 0;
        float sums[2];
        memset(net->grads, 0, sizeof net->grads);
        sums[0] = (float)forward_backward(net, first, n, &right);
        sums[1] = (float)right;
        DTRAIN_CHECK(dtrain_all_reduce(world, net->grads, net->grads, COUNT, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = 0; i < COUNT; i++)
            net->grads[i] /= SAMPLES;
        dtrain_adamw(net->params, net->grads, net->m, net->v, COUNT, NULL, 0.01f, (uint64_t)step);
        if (step % 100 != 0)
            continue;
        DTRAIN_CHECK(dtrain_all_reduce(world, sums, sums, 2, DTRAIN_F32, DTRAIN_SUM));
        if (rank == 0)
            printf("step %d loss %.4f right %.1f%%\n", step, (double)sums[0] / SAMPLES,
                   100 * (double)sums[1] / SAMPLES);
    }
    DTRAIN_CHECK(dtrain_comm_check_equal(world, net->params, COUNT, DTRAIN_F32));
    free(net);
    return DTRAIN_OK;
}

int main(int argc, char **argv)
{
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    dtrain_comm *world;
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL)); /* the processes of dtrun, or this one alone */
    if (dtrain_comm_size(world) > 1)
        DTRAIN_CHECK(train(world, NULL));
    else
        DTRAIN_CHECK(dtrain_run_threads(ranks, train, NULL, NULL));
    dtrain_comm_destroy(world);
    return 0;
}

/* What it prints:
 *
 * 2 ranks train a network of two layers to tell two spirals apart
 * step 100 loss 0.6219 right 50.8%
 * step 200 loss 0.5119 right 68.9%
 * step 300 loss 0.3745 right 77.9%
 * step 400 loss 0.1757 right 91.8%
 * step 500 loss 0.0883 right 97.5%
 * step 600 loss 0.0562 right 98.2%
 */
