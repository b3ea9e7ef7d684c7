/* A mesh of ranks: "data" x "tensor". The ranks along "tensor" hold one model together, each a part of both layers. The
 * ranks along "data" hold the same parts and see other examples. 4 ranks are 2 x 2.
 *
 * cc -O2 -ffp-contract=off -I. examples/mesh.c -o build/mesh -lpthread -lm && build/mesh */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include <string.h>

enum { INPUTS = 8, HIDDEN = 31, EXAMPLES = 24, STEPS = 300 };

static dtrain_status train(dtrain_comm *world, void *user)
{
    int ranks = dtrain_comm_size(world);
    dtrain_mesh_dim dims[] = {{"data", 0}, {"tensor", ranks % 2 == 0 ? 2 : 1}}; /* 0: as many as are left */
    dtrain_mesh *mesh;
    DTRAIN_CHECK(dtrain_mesh_create(&mesh, world, dims, 2));
    dtrain_comm *data = dtrain_mesh_group(mesh, "data"), *tensor = dtrain_mesh_group(mesh, "tensor");
    size_t lo, part = dtrain_shard(tensor, HIDDEN, dtrain_comm_rank(tensor), &lo); /* this rank's hidden channels */
    size_t first, rows = dtrain_shard(data, EXAMPLES, dtrain_comm_rank(data), &first); /* its examples of a step */
    float w1[HIDDEN * INPUTS], w2[HIDDEN], g1[HIDDEN * INPUTS], g2[HIDDEN]; /* the first `part` rows of w1 are used */
    float x[EXAMPLES * INPUTS], hidden[EXAMPLES * HIDDEN], y[EXAMPLES], d_y[EXAMPLES], d_hidden[EXAMPLES * HIDDEN];
    dtrain_parallel_linear up = {.group = tensor, .rows = rows, .inputs = INPUTS, .outputs = HIDDEN};
    dtrain_parallel_linear down = {.group = tensor, .rows = rows, .inputs = HIDDEN, .outputs = 1};
    (void)user;
    up.weight = w1, up.d_weight = g1, down.weight = w2, down.d_weight = g2;
    for (uint64_t i = 0; i < part * INPUTS; i++)
        w1[i] = 0.5f * dtrain_random_normal(1, lo * INPUTS + i);
    for (uint64_t i = 0; i < part; i++)
        w2[i] = 0.5f * dtrain_random_normal(2, lo + i);
    for (uint64_t step = 1; step <= STEPS; step++) {
        double loss = 0;
        memset(g1, 0, sizeof g1), memset(g2, 0, sizeof g2);
        for (uint64_t i = 0; i < rows * INPUTS; i++)
            x[i] = dtrain_random_normal(2 + step, first * INPUTS + i);
        DTRAIN_CHECK(dtrain_column_parallel_linear(&up, x, hidden));
        for (size_t i = 0; i < rows * part; i++)
            hidden[i] = hidden[i] > 0 ? hidden[i] : 0;
        DTRAIN_CHECK(dtrain_row_parallel_linear(&down, hidden, y)); /* sums over "tensor" */
        for (size_t i = 0; i < rows; i++) { /* the model learns the larger of the first two inputs */
            const float *in = x + i * INPUTS;
            d_y[i] = y[i] - (in[0] > in[1] ? in[0] : in[1]);
            loss += 0.5 * (double)d_y[i] * (double)d_y[i] / EXAMPLES;
        }
        DTRAIN_CHECK(dtrain_row_parallel_linear_backward(&down, hidden, d_y, d_hidden));
        for (size_t i = 0; i < rows * part; i++)
            d_hidden[i] = hidden[i] > 0 ? d_hidden[i] : 0;
        DTRAIN_CHECK(dtrain_column_parallel_linear_backward(&up, x, d_hidden, NULL));
        DTRAIN_CHECK(dtrain_all_reduce(data, g1, g1, part * INPUTS, DTRAIN_F32, DTRAIN_SUM));
        DTRAIN_CHECK(dtrain_all_reduce(data, g2, g2, part, DTRAIN_F32, DTRAIN_SUM));
        DTRAIN_CHECK(dtrain_all_reduce(data, &loss, &loss, 1, DTRAIN_F64, DTRAIN_SUM));
        for (size_t i = 0; i < part * INPUTS; i++)
            w1[i] -= 0.1f / EXAMPLES * g1[i];
        for (size_t i = 0; i < part; i++)
            w2[i] -= 0.1f / EXAMPLES * g2[i];
        if (dtrain_comm_rank(world) == 0 && step == STEPS)
            printf("%d x %d ranks have learnt the larger of two numbers: loss %.4f\n", dtrain_comm_size(data),
                   dtrain_comm_size(tensor), loss);
    }
    dtrain_mesh_destroy(mesh);
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

/* 2 x 2 ranks have learnt the larger of two numbers: loss 0.0167 */
