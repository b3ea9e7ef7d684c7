/* Compressed gradients: the same DDP run with and without compression. What is not sent is added to the gradients of
 * the next step (error feedback). dtrain_ddp_buckets says what a rank has sent in a step.
 *
 * cc -O2 -ffp-contract=off -I. examples/compress.c -o build/compress -lpthread -lm && build/compress */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { WIDTH = 32, LAYER = WIDTH * WIDTH, LAYERS = 2, COUNT = LAYERS * LAYER, EXAMPLES = 32, STEPS = 300 };

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

static const char *const names[] = {"float32", "int8", "signs", "top 5%", "PowerSGD"};
static const dtrain_compress_desc ways[] = {
    {.kind = DTRAIN_COMPRESS_INT8}, {.kind = DTRAIN_COMPRESS_SIGN},
    {.kind = DTRAIN_COMPRESS_TOPK, .topk = {.schedule = {.ratio = 0.05}}}, {.kind = DTRAIN_COMPRESS_POWERSGD}};

static dtrain_status train(dtrain_comm *world, void *user)
{
    float w[COUNT], g[COUNT];
    int rank = dtrain_comm_rank(world);
    size_t first, mine = dtrain_shard(world, EXAMPLES, rank, &first); /* this rank's examples of a step */
    dtrain_param table = {.name = "w", .dtype = DTRAIN_F32, .shape = {LAYERS, WIDTH, WIDTH}, .data = w, .grad = g};
    const dtrain_bucket *buckets;
    dtrain_ddp *ddp;
    (void)user;
    table.stacked = 1;
    if (rank == 0)
        printf("%d ranks train %d layers to find the larger of two neighbours\n", dtrain_comm_size(world), LAYERS);
    for (int way = 0; way < 5; way++) {
        dtrain_ddp_desc desc = {.compress = way == 0 ? NULL : &ways[way - 1]};
        uint64_t sent = 0;
        double loss = 0;
        for (uint64_t i = 0; i < COUNT; i++)
            w[i] = 0.2f * dtrain_random_normal(2, i);
        DTRAIN_CHECK(dtrain_ddp_create(&ddp, world, &table, 1, &desc));
        for (uint64_t step = 0; step < STEPS; step++) {
            loss = 0;
            DTRAIN_CHECK(dtrain_ddp_begin(ddp, 1, (double)mine));
            for (uint64_t example = first; example < first + mine; example++)
                loss += forward_backward(w, g, step * EXAMPLES + example) / EXAMPLES;
            for (int l = LAYERS - 1; l >= 0; l--)
                DTRAIN_CHECK(dtrain_ddp_reduce(ddp, l));
            DTRAIN_CHECK(dtrain_ddp_finish(ddp, NULL));
            for (int i = 0; i < COUNT; i++)
                w[i] -= 0.2f * g[i];
        }
        for (size_t n = dtrain_ddp_buckets(ddp, &buckets); n > 0; n--)
            sent += buckets[n - 1].sent_bytes;
        dtrain_ddp_destroy(ddp);
        DTRAIN_CHECK(dtrain_all_reduce(world, &loss, &loss, 1, DTRAIN_F64, DTRAIN_SUM));
        if (rank == 0)
            printf("%-9s %5d bytes a step, loss %.4f\n", names[way], (int)sent, loss);
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

/* 4 ranks train 2 layers to find the larger of two neighbours
 * float32   12288 bytes a step, loss 0.0167
 * int8       3120 bytes a step, loss 0.0169
 * signs       408 bytes a step, loss 0.0176
 * top 5%     1671 bytes a step, loss 0.0139
 * PowerSGD   3072 bytes a step, loss 0.0189 */
