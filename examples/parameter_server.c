/* Trains a small network through a parameter server, synchronously and asynchronously, with and without compression.
 * Rank 0 is the server, the others are workers. The network tells two spirals of points apart.
 *
 * cc -O2 -ffp-contract=off -I. examples/parameter_server.c -o build/parameter_server -lpthread -lm
 * build/parameter_server
 *
 * As processes: build/dtrun -n 4 build/parameter_server. In the synchronous form rank 0 trains too, and all ranks make
 * each step together. In the asynchronous form rank 0 only holds the parameters and the optimizer. The last rank is
 * slow there, and the others go on until they are 4 steps ahead of it. One rank alone trains synchronously only. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "nn.h"

enum { RANKS = 4, SAMPLES = 480, HIDDEN = 64, STEPS = 600, PARAMS = 4, COUNT = 5 * HIDDEN + 2 };
enum { W1 = 0, B1 = 2 * HIDDEN, W2 = 3 * HIDDEN, B2 = 5 * HIDDEN };

typedef struct form {
    const char *name;
    int async;
    dtrain_compression compression; /* 0: none */
    float lr;
} form;

static const form forms[] = {{"synchronous", 0, DTRAIN_COMPRESS_DEFAULT, 0.01f},
                             {"synchronous, int8", 0, DTRAIN_COMPRESS_INT8, 0.01f},
                             {"asynchronous", 1, DTRAIN_COMPRESS_DEFAULT, 0.02f},
                             {"asynchronous, int8", 1, DTRAIN_COMPRESS_INT8, 0.02f}};

/* A network of two layers, and this rank's share of the points. */
typedef struct net {
    dtrain_param table[PARAMS];
    float params[COUNT], grads[COUNT];
    float inputs[SAMPLES * 2], hidden[SAMPLES * HIDDEN], active[SAMPLES * HIDDEN], dhidden[SAMPLES * HIDDEN];
    float logits[SAMPLES * 2], dinputs[SAMPLES * 2];
    int32_t labels[SAMPLES];
    size_t first, count; /* of the share */
    int slow;
} net;

static void net_open(net *n, uint64_t seed)
{
    static const char *const names[PARAMS] = {"w1", "b1", "w2", "b2"};
    static const size_t shapes[PARAMS][2] = {{HIDDEN, 2}, {HIDDEN, 0}, {2, HIDDEN}, {2, 0}};
    static const size_t begins[PARAMS] = {W1, B1, W2, B2};
    memset(n, 0, sizeof *n);
    for (int i = 0; i < PARAMS; i++) {
        n->table[i].name = names[i];
        n->table[i].dtype = DTRAIN_F32;
        memcpy(n->table[i].shape, shapes[i], sizeof shapes[i]);
        n->table[i].data = n->params + begins[i];
        n->table[i].grad = n->grads + begins[i];
        n->table[i].no_decay = i % 2;
    }
    for (size_t i = 0; i < COUNT; i++)
        n->params[i] = i < B1 || (i >= W2 && i < B2) ? 0.5f * dtrain_random_normal(seed, i) : 0;
    for (uint64_t i = 0; i < SAMPLES; i++) { /* in an order that gives each rank some of every part of the spirals */
        uint64_t point = i * 77 % SAMPLES, arm = point % 2;
        float along = (float)point / SAMPLES, angle = 9 * along + 3.14159265f * (float)arm;
        n->inputs[2 * i] = along * cosf(angle) + 0.02f * dtrain_random_normal(7, 2 * i);
        n->inputs[2 * i + 1] = along * sinf(angle) + 0.02f * dtrain_random_normal(7, 2 * i + 1);
        n->labels[i] = (int32_t)arm;
    }
}

/* The sum of the losses of points first .. first + count - 1; logits become their gradient. */
static double forward(net *n, size_t first, size_t count)
{
    const float *w = n->params;
    nn_linear_forward(n->hidden, n->inputs + 2 * first, w + W1, w + B1, count, 2, HIDDEN);
    nn_gelu_forward(n->active, n->hidden, count * HIDDEN);
    nn_linear_forward(n->logits, n->active, w + W2, w + B2, count, HIDDEN, 2);
    return nn_cross_entropy(n->logits, n->labels + first, count, 2);
}

/* dtrain_train_step calls it: adds this rank's gradients, and says of how many points they are. */
static dtrain_status compute(void *user, double *weight)
{
    net *n = (net *)user;
    const float *w = n->params;
    float *g = n->grads;
    forward(n, n->first, n->count);
    nn_linear_backward(n->dhidden, g + W2, g + B2, n->logits, n->active, w + W2, n->count, HIDDEN, 2);
    nn_gelu_backward(n->dhidden, n->dhidden, n->hidden, n->count * HIDDEN);
    nn_linear_backward(n->dinputs, g + W1, g + B1, n->dhidden, n->inputs + 2 * n->first, w + W1, n->count, 2, HIDDEN);
    *weight = (double)n->count;
    if (n->slow) {
        struct timespec pause = {0, 500000};
        nanosleep(&pause, NULL);
    }
    return DTRAIN_OK;
}

/* The asynchronous server: holds parameters and optimizer until the workers have ended. */
static void serve(dtrain_server *server, dtrain_optimizer *optimizer, float lr, int workers)
{
    dtrain_serve_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.optimizer = optimizer;
    desc.schedule.kind = DTRAIN_SCHEDULE_LINEAR; /* late gradients then do less harm at the end */
    desc.schedule.lr = lr;
    desc.schedule.total_steps = (uint64_t)workers * STEPS;
    DTRAIN_CHECK(dtrain_server_run(server, &desc));
}

/* A rank that trains. */
static void work(dtrain_server *server, dtrain_optimizer *optimizer, net *n, const form *f)
{
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    dtrain_step_desc step;
    memset(&step, 0, sizeof step);
    step.table = n->table;
    step.count = PARAMS;
    step.compute = compute;
    step.user = n;
    step.aggregator = &aggregator;
    step.optimizer = optimizer; /* the asynchronous form uses the server's instead */
    step.lr = f->lr;
    for (int i = 0; i < STEPS; i++)
        DTRAIN_CHECK(dtrain_train_step(&step, NULL));
    if (f->async)
        DTRAIN_CHECK(dtrain_server_leave(server));
}

static void report(const form *f, net *n, const dtrain_server_stats *stats)
{
    double mib = (double)(stats->sent_bytes + stats->received_bytes) / (1 << 20);
    printf("%-20s  %5d  %7.4f  %9d  %6.2f\n", f->name, (int)stats->steps, forward(n, 0, SAMPLES) / SAMPLES,
           (int)stats->largest_staleness, mib);
}

static void run_form(dtrain_comm *world, const form *f, net *n)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_server *server;
    dtrain_server_desc desc;
    dtrain_compress_desc compress;
    dtrain_optimizer *optimizer;
    memset(&desc, 0, sizeof desc);
    memset(&compress, 0, sizeof compress);
    compress.kind = f->compression;
    compress.least_count = 64;
    desc.async = f->async;
    desc.compress = f->compression != DTRAIN_COMPRESS_DEFAULT ? &compress : NULL;
    net_open(n, (uint64_t)rank); /* dtrain_server_create gives all ranks the server's parameters */
    if (rank >= f->async) {      /* this worker's share of the points */
        int workers = ranks - f->async, worker = rank - f->async;
        n->first = (size_t)(SAMPLES * worker / workers);
        n->count = (size_t)(SAMPLES * (worker + 1) / workers) - n->first;
    }
    n->slow = f->async && rank == ranks - 1;
    DTRAIN_CHECK(dtrain_server_create(&server, world, n->table, PARAMS, &desc));
    DTRAIN_CHECK(dtrain_optimizer_create(&optimizer, n->table, PARAMS, NULL, NULL));
    if (f->async && rank == 0)
        serve(server, optimizer, f->lr, ranks - 1);
    else
        work(server, optimizer, n, f);
    dtrain_server_stats stats = dtrain_server_get_stats(server);
    if (rank == 0)
        report(f, n, &stats);
    dtrain_optimizer_destroy(optimizer);
    dtrain_server_destroy(server);
}

static dtrain_status train(dtrain_comm *world, void *user)
{
    net *n = (net *)malloc(sizeof *n);
    (void)user;
    if (n == NULL)
        return DTRAIN_ERR_MEMORY;
    if (dtrain_comm_rank(world) == 0)
        printf("a server and %d workers train a network to tell two spirals apart\n"
               "form                  steps     loss  staleness     MiB\n",
               dtrain_comm_size(world) - 1);
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
        if (!forms[i].async || dtrain_comm_size(world) > 1) /* a server and a worker */
            run_form(world, &forms[i], n);
    free(n);
    return DTRAIN_OK;
}

int main(void)
{
    dtrain_comm *world;
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL)); /* the processes of dtrun, or this one alone */
    if (dtrain_comm_size(world) > 1)
        DTRAIN_CHECK(train(world, NULL));
    else
        DTRAIN_CHECK(dtrain_run_threads(RANKS, train, NULL, NULL));
    dtrain_comm_destroy(world);
    return 0;
}

/* What it prints; asynchronous losses differ a little from run to run:
 *
 * a server and 3 workers train a network to tell two spirals apart
 * form                  steps     loss  staleness     MiB
 * synchronous             600   0.0508          0    4.45
 * synchronous, int8       600   0.0496          0    1.28
 * asynchronous           1800   0.0354          4    4.42
 * asynchronous, int8     1800   0.0505          4    1.17
 */
