/* The backward pass of a layer split by outputs, with overlap and without, in turns. The links are slow
 * (tools/bench_link.h). Summing the input's gradient takes as long as the product of the weights' gradient, beside
 * which it runs.
 *
 * The layer has 32 x width outputs, `width` inputs and `width` rows. With so many outputs the links run at about
 * 100 Mbit/s and sleep for longer than it takes to wake up. The figures:
 *
 *   hidden      the time that overlap saves in a pass, over the time of the communication alone
 *   unblocked   the share by which the caller waits less */
#ifndef BENCH_TP_H
#define BENCH_TP_H

typedef struct tp_model {
    dtrain_parallel_linear layer;
    float *x, *dy, *dx, *weight, *d_weight;
    size_t count; /* of dx */
} tp_model;

static float *tp_numbers(size_t count)
{
    float *data = bench_memory(count * sizeof(float), 0);
    for (size_t i = 0; i < count; i++)
        data[i] = dtrain_random_uniform(1, i) - 0.5f;
    return data;
}

static void tp_open(const bench *b, dtrain_comm *world, tp_model *m)
{
    size_t width = b->width, part = dtrain_shard(world, 32 * width, dtrain_comm_rank(world), NULL);
    memset(m, 0, sizeof *m);
    m->count = width * width;
    m->x = tp_numbers(m->count);
    m->dx = tp_numbers(m->count);
    m->dy = tp_numbers(width * part);
    m->weight = tp_numbers(part * width);
    m->d_weight = tp_numbers(part * width);
    m->layer.group = world;
    m->layer.rows = m->layer.inputs = width;
    m->layer.outputs = 32 * width;
    m->layer.weight = m->weight;
    m->layer.d_weight = m->d_weight;
}

static void tp_close(tp_model *m)
{
    free(m->x);
    free(m->dx);
    free(m->dy);
    free(m->weight);
    free(m->d_weight);
}

enum { TP_PRODUCT, TP_COMMUNICATION, TP_HIDDEN, TP_BARE };

/* Returns the microseconds of one of these on this rank; all ranks begin together. *blocked is the time that the caller
 * waits. */
static double tp_time(dtrain_comm *world, tp_model *m, int what, double *blocked)
{
    DTRAIN_CHECK(dtrain_barrier(world));
    int64_t begin = bench_now_ns(), waited = dtrain_comm_blocked_ns(world);
    m->layer.no_overlap = what == TP_BARE;
    if (what == TP_PRODUCT)
        DTRAIN_CHECK(dtrain_column_parallel_linear_backward(&m->layer, m->x, m->dy, NULL));
    else if (what == TP_COMMUNICATION)
        DTRAIN_CHECK(dtrain_all_reduce(world, m->dx, m->dx, m->count, DTRAIN_F32, DTRAIN_SUM));
    else
        DTRAIN_CHECK(dtrain_column_parallel_linear_backward(&m->layer, m->x, m->dy, m->dx));
    *blocked = (double)(dtrain_comm_blocked_ns(world) - waited) * 1e-3;
    return (double)(bench_now_ns() - begin) * 1e-3;
}

/* Returns rank 0's median of b->runs runs on every rank. */
static double tp_median(bench *b, dtrain_comm *world, tp_model *m, int what)
{
    double us[BENCH_RUNS], blocked, median;
    for (int run = -1; run < b->runs; run++) {
        if (dtrain_comm_rank(world) == 0)
            bench_progress(b, what == TP_PRODUCT ? ", the product alone" : ", communication alone", run, b->runs);
        us[run < 0 ? 0 : run] = tp_time(world, m, what, &blocked);
    }
    median = bench_median(us, b->runs);
    DTRAIN_CHECK(dtrain_broadcast(world, &median, 1, DTRAIN_F64, 0));
    return median;
}

static void tp_rank(dtrain_comm *world, bench *b)
{
    tp_model m;
    bench_link *link = &bench_link_of[dtrain_comm_rank(world)];
    double product, communication = 0, bare, waited;
    if (!b->sleep)
        link->late_ns = 20000000; /* 256 KiB at 100 Mbit/s: a busy processor sends late */
    tp_open(b, world, &m);
    product = tp_median(b, world, &m, TP_PRODUCT);
    for (int i = 0; i < 3; i++) { /* costs that do not grow with bytes make the first guess too slow */
        communication = tp_median(b, world, &m, TP_COMMUNICATION);
        if (i < 2)
            link->byte_ns *= product / communication;
    }
    for (int run = -1; run < b->runs; run++) {
        int at = run < 0 ? 0 : run;
        if (dtrain_comm_rank(world) == 0)
            bench_progress(b, "", run, b->runs);
        bare = tp_time(world, &m, TP_BARE, &waited);
        if (dtrain_comm_rank(world) == 0) {
            b->step_us[1][at] = bare;
            b->step_cpu[1][at] = waited;
        }
        bare = tp_time(world, &m, TP_HIDDEN, &waited);
        if (dtrain_comm_rank(world) == 0) {
            b->step_us[0][at] = bare;
            b->step_cpu[0][at] = waited;
        }
    }
    if (dtrain_comm_rank(world) == 0) {
        b->us[0] = product;
        b->comm_us = communication;
    }
    tp_close(&m);
}

static int tp_overlap(bench *b)
{
    double hidden[BENCH_RUNS], unblocked[BENCH_RUNS];
    bench_sleeps = b->sleep;
    if (bench_links(b, 80, tp_rank) != 0)
        return 1;
    for (int i = 0; i < b->runs; i++) {
        hidden[i] = (b->step_us[1][i] - b->step_us[0][i]) / b->comm_us;
        unblocked[i] = 1.0 - b->step_cpu[0][i] / b->step_cpu[1][i];
    }
    progress_end();
    printf("op=tp_overlap transport=slow ranks=%d bytes=%zu sleep=%d us=%.0f bare_us=%.0f product_us=%.0f comm_us=%.0f "
           "hidden=%.3f "
           "unblocked=%.3f\n",
           b->ranks, b->width * b->width * sizeof(float), b->sleep, bench_median(b->step_us[0], b->runs),
           bench_median(b->step_us[1], b->runs), b->us[0], b->comm_us, bench_median(hidden, b->runs),
           bench_median(unblocked, b->runs));
    return 0;
}

#endif
