/* Measures this machine for tools/plan.c: matrix products and copies of the model's sizes on as many threads as ranks
 * run at once, and a message between two threads. Each result is the median of several runs, because other programs
 * disturb training as they disturb the runs. Include dtrain.h first. */
#ifndef PLAN_MEASURE_H
#define PLAN_MEASURE_H

#include "plan_model.h"
#include "tool.h"

#include <time.h>
#include <unistd.h>

#define PLAN_RUNS 25
#define PLAN_RUN_SECONDS 0.02 /* least time of a run: a processor is faster in a short burst */
#define PLAN_SECONDS 1.0      /* time after which no run begins, after the first three */
#define PLAN_COPIED 1048576   /* least floats of a copy */
#define PLAN_ROWS 512         /* most rows of a product: larger products are no faster */
#define PLAN_MEASURES 6       /* a copy, three products, a small and a large message */
#define PLAN_WIDTH 1024

typedef struct plan_measured {
    size_t rows, width, wide;                   /* a product is [rows, width] x [width, wide] */
    size_t copied;                              /* floats of a copy, more than the cache of a core holds */
    double rate, copy_rate, latency, bandwidth; /* as in plan_input; those of the slowest rank */
} plan_measured;

static inline double plan_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* The memory of one rank: a linear layer's matrices. out has room for two results. */
typedef struct plan_memories {
    float *in, *weight, *out;
} plan_memories;

/* Returns the middle of `count` numbers; sorts them. */
static inline double plan_median(double *numbers, int count)
{
    for (int i = 1; i < count; i++)
        for (int j = i; j > 0 && numbers[j] < numbers[j - 1]; j--) {
            double larger = numbers[j - 1];
            numbers[j - 1] = numbers[j];
            numbers[j] = larger;
        }
    return count > 0 ? numbers[count / 2] : HUGE_VAL;
}

/* The three products of a linear layer: forward, the gradient of its input, the gradient of its weights. Their inputs
 * do not change, so that numbers neither grow nor vanish. */
static inline void plan_product_forward(const plan_measured *m, const plan_memories *a)
{
    dtrain_sgemm(0, 1, m->rows, m->wide, m->width, 1, a->in, m->width, a->weight, m->width, 0, a->out, m->wide);
}

static inline void plan_product_input(const plan_measured *m, const plan_memories *a)
{
    float *d_in = a->out + m->copied;
    dtrain_sgemm(0, 0, m->rows, m->width, m->wide, 1, a->out, m->wide, a->weight, m->width, 0, d_in, m->width);
}

static inline void plan_product_weights(const plan_measured *m, const plan_memories *a)
{
    dtrain_sgemm(1, 0, m->wide, m->width, m->rows, 1e-9f, a->out, m->wide, a->in, m->width, 1, a->weight, m->width);
}

static inline void plan_copies(const plan_measured *m, const plan_memories *a)
{
    volatile float seen;
    memcpy(a->out, a->out + m->copied, m->copied * sizeof(float));
    seen = a->out[0]; /* so that the compiler keeps the copy */
    (void)seen;
}

/* Measures the seconds of one call on the slowest rank while all ranks run; takes the median of the runs. */
static inline dtrain_status plan_measure_loop(dtrain_comm *world, const plan_measured *m, const plan_memories *a,
                                              void (*call)(const plan_measured *, const plan_memories *),
                                              double *seconds)
{
    dtrain_status status = DTRAIN_OK;
    double calls = 1, all = 0, runs[PLAN_RUNS];
    int run = -1;
    for (; run < PLAN_RUNS && status == DTRAIN_OK && (run < 3 || all < PLAN_SECONDS); run++) {
        double took = 0;
        status = dtrain_barrier(world);
        double begin = plan_now();
        for (double i = 0; i < calls; i++)
            call(m, a);
        took = (plan_now() - begin) / calls;
        if (status == DTRAIN_OK)
            status = dtrain_all_reduce(world, &took, &took, 1, DTRAIN_F64, DTRAIN_MAX);
        all += calls * took; /* the same on all ranks */
        if (run < 0)         /* the warm-up decides how many calls a run has */
            calls = took * calls < PLAN_RUN_SECONDS ? 1 + (double)(long)(PLAN_RUN_SECONDS / took) : 1;
        else
            runs[run] = took;
    }
    *seconds = plan_median(runs, run);
    return status;
}

static inline dtrain_status plan_measure_compute(dtrain_comm *world, void *user)
{
    plan_measured *m = (plan_measured *)user;
    size_t in = m->rows * m->width, weight = m->width * m->wide, out = 2 * m->copied;
    void (*const calls[])(const plan_measured *, const plan_memories *) = {plan_copies, plan_product_forward,
                                                                           plan_product_input, plan_product_weights};
    double seconds[4];
    plan_memories a;
    dtrain_status status = DTRAIN_OK;
    a.in = (float *)calloc(in + weight + out, sizeof(float));
    if (a.in == NULL)
        return DTRAIN_ERR_MEMORY;
    for (size_t i = 0; i < in + weight + out; i++) /* touches all pages, with small numbers */
        a.in[i] = 1e-3f;
    a.weight = a.in + in;
    a.out = a.weight + weight;
    for (int i = 0; i < 4 && status == DTRAIN_OK; i++) {
        if (dtrain_comm_rank(world) == 0)
            progress_show(i, PLAN_MEASURES, "measuring %s, %d of %d", i == 0 ? "copies" : "products", i + 1,
                          PLAN_MEASURES);
        status = plan_measure_loop(world, m, &a, calls[i], &seconds[i]);
    }
    if (status == DTRAIN_OK && dtrain_comm_rank(world) == 0) {
        m->rate = 6.0 * (double)m->rows * (double)m->width * (double)m->wide / (seconds[1] + seconds[2] + seconds[3]);
        m->copy_rate = 2.0 * (double)m->copied * (double)sizeof(float) / seconds[0];
    }
    free(a.in);
    return status;
}

/* Measures the seconds of a message of `bytes` between the two ranks: half of a round trip. Takes the median of the
 * runs. */
static inline dtrain_status plan_measure_message(dtrain_comm *world, void *data, size_t bytes, double *seconds)
{
    dtrain_status status = DTRAIN_OK;
    int rank = dtrain_comm_rank(world), turns = bytes < 65536 ? 200 : 8;
    double runs[PLAN_RUNS] = {0};
    for (int run = -1; run < PLAN_RUNS && status == DTRAIN_OK; run++) {
        status = dtrain_barrier(world);
        double begin = plan_now();
        for (int i = 0; i < 2 * turns && status == DTRAIN_OK; i++)
            status = i % 2 == rank ? dtrain_send(world, data, bytes, DTRAIN_U8, 1 - rank)
                                   : dtrain_recv(world, data, bytes, DTRAIN_U8, 1 - rank);
        if (run >= 0)
            runs[run] = (plan_now() - begin) / (2 * turns);
    }
    *seconds = plan_median(runs, PLAN_RUNS);
    return status;
}

static inline dtrain_status plan_measure_link(dtrain_comm *world, void *user)
{
    plan_measured *m = (plan_measured *)user;
    size_t bytes = m->rows * m->width * sizeof(float);
    double small, large, least;
    bytes = bytes < 262144 ? 262144 : bytes;
    void *data = calloc(bytes, 1);
    dtrain_status status = data != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    if (dtrain_comm_rank(world) == 0)
        progress_show(4, PLAN_MEASURES, "measuring messages, 5 of %d", PLAN_MEASURES);
    if (status == DTRAIN_OK)
        status = plan_measure_message(world, data, 4, &small);
    if (status == DTRAIN_OK)
        status = plan_measure_message(world, data, bytes, &large);
    if (status == DTRAIN_OK && dtrain_comm_rank(world) == 0) {
        least = large / 10; /* a small message that was disturbed may seem as slow as the large one */
        m->latency = small;
        m->bandwidth = (double)bytes / (large - small > least ? large - small : least);
    }
    free(data);
    return status;
}

/* Measures those of rate, copy_rate, latency, bandwidth and processors that are 0 in `in`. Ranks are threads.
 *
 *   errors   DTRAIN_ERR_MEMORY; those of dtrain_run_threads */
static inline dtrain_status plan_measure(plan_input *in)
{
    long processors = dtrain__os_processors(), threads;
    plan_measured m;
    memset(&m, 0, sizeof m);
    m.rows = plan_rows(in) < PLAN_ROWS ? (size_t)plan_rows(in) : PLAN_ROWS;
    m.width = in->width < PLAN_WIDTH ? (size_t)in->width : PLAN_WIDTH;
    m.wide = 4 * m.width;
    m.copied = m.rows * m.wide > PLAN_COPIED ? m.rows * m.wide : PLAN_COPIED;
    processors = in->processors > 0 ? in->processors : processors > 0 ? processors : 1;
    threads = processors < in->ranks ? processors : in->ranks;
    dtrain_status status = dtrain_run_threads((int)threads, plan_measure_compute, &m, NULL);
    if (status == DTRAIN_OK)
        status = dtrain_run_threads(2, plan_measure_link, &m, NULL);
    if (status != DTRAIN_OK)
        return status;
    in->processors = processors;
    in->rate = in->rate > 0 ? in->rate : m.rate;
    in->copy_rate = in->copy_rate > 0 ? in->copy_rate : m.copy_rate;
    in->latency = in->latency > 0 ? in->latency : m.latency;
    in->bandwidth = in->bandwidth > 0 ? in->bandwidth : m.bandwidth;
    return DTRAIN_OK;
}

#endif
