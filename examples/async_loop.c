/* Communication beside computation: dtrain_all_reduce_async starts to sum a layer's gradients over the ranks, the
 * program computes on, and dtrain_work_wait waits for the sum.
 *
 * cc -O2 -ffp-contract=off -I. examples/async_loop.c -o build/async_loop -lpthread -lm && build/async_loop */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { WIDTH = 16, LAYER = WIDTH * WIDTH, LAYERS = 3, COUNT = LAYERS * LAYER, EXAMPLES = 32, STEPS = 300 };

/* A layer of the model: out = in + relu(w in) */
static void forward(const float *w, const float *in, float *out)
{
    for (int o = 0; o < WIDTH; o++) {
        float sum = 0;
        for (int i = 0; i < WIDTH; i++)
            sum += w[o * WIDTH + i] * in[i];
        out[o] = in[o] + (sum > 0 ? sum : 0);
    }
}

/* From d, the gradient of out: adds to g, the gradient of w, and sets d_in, that of in. */
static void backward(const float *w, float *g, const float *in, const float *out, const float *d, float *d_in)
{
    for (int i = 0; i < WIDTH; i++) {
        d_in[i] = d[i];
        for (int o = 0; o < WIDTH; o++)
            if (out[o] > in[o]) {
                g[o * WIDTH + i] += d[o] * in[i];
                d_in[i] += d[o] * w[o * WIDTH + i];
            }
    }
}

/* The model learns the larger of each number and its right neighbour. Returns the loss; d is its gradient. */
static double compare(const float *x, const float *out, float *d)
{
    double loss = 0;
    for (int i = 0; i < WIDTH; i++) {
        float right = x[(i + 1) % WIDTH];
        d[i] = out[i] - (right > x[i] ? right : x[i]);
        loss += 0.5 * (double)d[i] * (double)d[i];
    }
    return loss;
}

/* Reads a rank's examples of a step: n from number `first` on. */
static void load(float (*h)[LAYERS + 1][WIDTH], uint64_t step, size_t first, size_t n)
{
    for (uint64_t i = 0; i < n * WIDTH; i++)
        h[i / WIDTH][0][i % WIDTH] = dtrain_random_normal(step, first * WIDTH + i);
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    float w[COUNT], h[EXAMPLES][LAYERS + 1][WIDTH], d[EXAMPLES][LAYERS + 1][WIDTH];
    size_t first, mine = dtrain_shard(world, EXAMPLES, dtrain_comm_rank(world), &first); /* this rank's examples */
    dtrain_work *sums[LAYERS];
    (void)user;
    for (uint64_t i = 0; i < COUNT; i++)
        w[i] = 0.2f * dtrain_random_normal(2, i);
    if (dtrain_comm_rank(world) == 0)
        printf("%d ranks train %d layers to find the larger of two neighbours\n", dtrain_comm_size(world), LAYERS);
    load(h, 1, first, mine);
    for (uint64_t step = 1; step <= STEPS; step++) {
        float g[COUNT] = {0};
        double loss = 0;
        for (size_t e = 0; e < mine; e++) {
            for (int l = 0; l < LAYERS; l++)
                forward(w + l * LAYER, h[e][l], h[e][l + 1]);
            loss += compare(h[e][0], h[e][LAYERS], d[e][LAYERS]) / EXAMPLES;
        }
        for (int l = LAYERS - 1; l >= 0; l--) { /* the sum of layer l travels while layer l - 1 is computed */
            float *wl = w + l * LAYER, *gl = g + l * LAYER;
            for (size_t e = 0; e < mine; e++)
                backward(wl, gl, h[e][l], h[e][l + 1], d[e][l + 1], d[e][l]);
            DTRAIN_CHECK(dtrain_all_reduce_async(world, gl, gl, LAYER, DTRAIN_F32, DTRAIN_SUM, &sums[l]));
        }
        load(h, step + 1, first, mine); /* the last sums travel meanwhile */
        for (int l = 0; l < LAYERS; l++)
            DTRAIN_CHECK(dtrain_work_wait(sums[l]));
        for (int i = 0; i < COUNT; i++)
            w[i] -= 0.2f / EXAMPLES * g[i];
        DTRAIN_CHECK(dtrain_all_reduce(world, &loss, &loss, 1, DTRAIN_F64, DTRAIN_SUM));
        if (dtrain_comm_rank(world) == 0 && step % 150 == 0)
            printf("step %d loss %.4f\n", (int)step, loss);
    }
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
 * step 150 loss 0.1141
 * step 300 loss 0.0277 */
