/* Data-parallel training (DDP): each rank computes some examples of a step, and the gradients of a layer travel while
 * the backward pass is in the layers below. Any number of ranks trains to the same loss.
 *
 * cc -O2 -ffp-contract=off -I. examples/ddp.c -o build/ddp -lpthread -lm && build/ddp */
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

static dtrain_status train(dtrain_comm *world, void *user)
{
    float w[COUNT], g[COUNT], h[LAYERS + 1][WIDTH], d[LAYERS + 1][WIDTH]; /* h[l] goes into layer l */
    dtrain_param table = {.name = "w", .dtype = DTRAIN_F32, .shape = {LAYERS, WIDTH, WIDTH}, .data = w, .grad = g};
    dtrain_ddp_desc desc = {.bucket_bytes = sizeof(float) * LAYER}; /* a bucket is one layer; 0 would be 1 MiB */
    size_t first, mine = dtrain_shard(world, EXAMPLES, dtrain_comm_rank(world), &first); /* this rank's examples */
    dtrain_ddp *ddp;
    (void)user;
    table.stacked = 1; /* the first size counts layers: each is a unit */
    for (uint64_t i = 0; i < COUNT; i++)
        w[i] = 0.2f * dtrain_random_normal(2, i);
    DTRAIN_CHECK(dtrain_ddp_create(&ddp, world, &table, 1, &desc));
    if (dtrain_comm_rank(world) == 0)
        printf("%d ranks train %d layers to find the larger of two neighbours\n", dtrain_comm_size(world), LAYERS);
    for (uint64_t step = 1; step <= STEPS; step++) {
        double loss = 0;
        DTRAIN_CHECK(dtrain_ddp_begin(ddp, (int)mine, (double)mine)); /* a micro-batch is one example here */
        for (uint64_t example = first; example < first + mine; example++) {
            for (uint64_t i = 0; i < WIDTH; i++)
                h[0][i] = dtrain_random_normal(step, example * WIDTH + i);
            for (int l = 0; l < LAYERS; l++)
                forward(w + l * LAYER, h[l], h[l + 1]);
            loss += compare(h[0], h[LAYERS], d[LAYERS]) / EXAMPLES;
            for (int l = LAYERS - 1; l >= 0; l--) {
                backward(w + l * LAYER, g + l * LAYER, h[l], h[l + 1], d[l + 1], d[l]);
                DTRAIN_CHECK(dtrain_ddp_reduce(ddp, l)); /* after the last example the layer is on its way */
            }
        }
        DTRAIN_CHECK(dtrain_ddp_finish(ddp, NULL)); /* g is the mean over the examples of all ranks */
        for (int i = 0; i < COUNT; i++)
            w[i] -= 0.2f * g[i];
        DTRAIN_CHECK(dtrain_all_reduce(world, &loss, &loss, 1, DTRAIN_F64, DTRAIN_SUM));
        if (dtrain_comm_rank(world) == 0 && step % 100 == 0)
            printf("step %d loss %.6f\n", (int)step, loss);
    }
    dtrain_ddp_destroy(ddp);
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
 * step 100 loss 0.135108
 * step 200 loss 0.064356
 * step 300 loss 0.027729 */
