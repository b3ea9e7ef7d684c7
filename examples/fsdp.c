/* Fully sharded training (FSDP). A rank keeps a slice of each layer: weights, gradients and optimizer state. It gathers
 * a whole layer only to compute it. dtrain_fsdp_plan says what a rank will need before anything is allocated.
 *
 * cc -O2 -ffp-contract=off -I. examples/fsdp.c -o build/fsdp -lpthread -lm && build/fsdp */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { WIDTH = 64, LAYER = WIDTH * WIDTH, LAYERS = 4, COUNT = LAYERS * LAYER, EXAMPLES = 12, STEPS = 100 };

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

/* The model learns to double positive numbers. Returns the loss; d is its gradient. */
static double compare(const float *x, const float *out, float *d)
{
    double loss = 0;
    for (int i = 0; i < WIDTH; i++) {
        d[i] = out[i] - (x[i] > 0 ? 2 * x[i] : x[i]);
        loss += 0.5 * (double)d[i] * (double)d[i];
    }
    return loss;
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    float h[LAYERS + 1][WIDTH], d[LAYERS + 1][WIDTH], first[COUNT]; /* h[l] goes into layer l */
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    int mine = EXAMPLES / ranks + (rank < EXAMPLES % ranks); /* this rank's examples of a step */
    dtrain_param table = {.name = "w", .dtype = DTRAIN_F32, .shape = {LAYERS, WIDTH, WIDTH}, .stacked = 1};
    dtrain_fsdp_desc desc = {.optimizer = {.kind = DTRAIN_ADAMW}};
    dtrain_fsdp_plan_result plan, alone;
    dtrain_fsdp *fsdp;
    (void)user;
    DTRAIN_CHECK(dtrain_fsdp_plan(&table, 1, &desc, ranks, rank, &plan));
    DTRAIN_CHECK(dtrain_fsdp_plan(&table, 1, &desc, 1, 0, &alone));
    if (rank == 0)
        printf("%d ranks train %d layers to double positive numbers: at most %zu KiB a rank, one alone %zu\n", ranks,
               LAYERS, plan.peak >> 10, alone.peak >> 10);
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, &table, 1, &desc));
    float *w = dtrain_fsdp_param(fsdp, "w"), *g = dtrain_fsdp_grad(fsdp, "w"); /* addresses: gather brings memory */
    for (uint64_t i = 0; i < COUNT; i++)
        first[i] = 0.01f * dtrain_random_normal(2, i);
    DTRAIN_CHECK(dtrain_fsdp_set(fsdp, "w", first, 0)); /* from rank 0; or load a checkpoint */
    for (int step = 1; step <= STEPS; step++) {
        double loss = 0;
        DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, mine, mine)); /* gradients: the mean over the examples of all ranks */
        for (int example = rank; example < EXAMPLES; example += ranks) {
            for (int i = 0; i < WIDTH; i++)
                h[0][i] = dtrain_random_normal((uint64_t)step, (uint64_t)(example * WIDTH + i));
            for (int l = 0; l < LAYERS; l++) {
                DTRAIN_CHECK(dtrain_fsdp_forward_to(fsdp, l)); /* releases layer l - 1, and starts to gather l + 1 */
                forward(w + l * LAYER, h[l], h[l + 1]);
            }
            loss += compare(h[0], h[LAYERS], d[LAYERS]) / EXAMPLES;
            for (int l = LAYERS - 1; l >= 0; l--) {
                DTRAIN_CHECK(dtrain_fsdp_backward_to(fsdp, l)); /* reduces the gradients of layer l + 1 */
                backward(w + l * LAYER, g + l * LAYER, h[l], h[l + 1], d[l + 1], d[l]);
            }
        }
        if (mine * ranks < EXAMPLES) /* other ranks have one more, and gather */
            DTRAIN_CHECK(dtrain_fsdp_join(fsdp));
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, 0.01f));
        DTRAIN_CHECK(dtrain_all_reduce(world, &loss, &loss, 1, DTRAIN_F64, DTRAIN_SUM));
        if (rank == 0 && step == STEPS)
            printf("step %d loss %.6f\n", step, loss);
    }
    dtrain_fsdp_destroy(fsdp);
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

/* 4 ranks train 4 layers to double positive numbers: at most 138 KiB a rank, one alone 298
 * step 100 loss 2.449474 */
