/* train_gpt --aggregator: FSDP adds a rank's micro-batches up in a world of that rank alone, and the sums of a step go
 * through one of dtrain's aggregators. Include dtrain.h first. */
#ifndef GPT_AGGREGATE_H
#define GPT_AGGREGATE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct gpt_aggregate {
    const char *kind;                     /* "all-reduce" or "ps" */
    const dtrain_compress_desc *compress; /* NULL: gradients travel as they are */
    dtrain_comm *world, *alone;
    dtrain_param *table; /* what FSDP keeps, layer by layer */
    char (*names)[48];
    float *place; /* of gradients, when there are none yet: the table must have some; never touched */
    size_t count;
    dtrain_server *server;
    dtrain_aggregator aggregator;
} gpt_aggregate;

static inline dtrain_status gpt_aggregate_open(gpt_aggregate *a, dtrain_comm *world, const char *kind,
                                               const dtrain_compress_desc *compress)
{
    dtrain_comm_desc alone;
    memset(a, 0, sizeof *a);
    memset(&alone, 0, sizeof alone);
    alone.progress = DTRAIN_PROGRESS_POLL; /* there is nobody to hear from */
    a->kind = kind;
    a->compress = compress;
    a->world = world;
    return dtrain_threads_create(&a->alone, 1, &alone);
}

/* Makes the aggregator, where it is not there. Collective: every rank of the world. */
static inline dtrain_status gpt_aggregate_start(gpt_aggregate *a, dtrain_fsdp *fsdp)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0, floats = 0;
    dtrain_server_desc desc;
    dtrain_status status = a->table == NULL ? dtrain_fsdp_local(fsdp, &slices, &count) : DTRAIN_OK;
    if (status != DTRAIN_OK || a->table != NULL)
        return status;
    memset(&desc, 0, sizeof desc);
    desc.compress = a->compress;
    a->table = (dtrain_param *)calloc(count, sizeof *a->table);
    a->names = (char(*)[48])calloc(count, sizeof *a->names);
    for (size_t i = 0; i < count; i++)
        floats += slices[i].count;
    a->place = (float *)calloc(floats, sizeof *a->place);
    if (a->table == NULL || a->names == NULL || a->place == NULL)
        return DTRAIN_ERR_MEMORY;
    floats = 0;
    for (size_t i = 0; i < count; i++) {
        snprintf(a->names[i], sizeof a->names[i], "%.30s.%d", slices[i].name, slices[i].layer);
        a->table[i].name = a->names[i];
        a->table[i].dtype = DTRAIN_F32;
        a->table[i].shape[0] = slices[i].count;
        a->table[i].ndim = 1;
        a->table[i].data = slices[i].weights;
        a->table[i].grad = a->place + floats; /* each step says where its gradients are */
        floats += slices[i].count;
    }
    a->count = count;
    if (strcmp(a->kind, "ps") == 0) {
        status = dtrain_server_create(&a->server, a->world, a->table, count, &desc);
        a->aggregator = dtrain_aggregator_server(a->server);
    } else if (a->compress != NULL) {
        status = dtrain_aggregator_compressed(&a->aggregator, a->world, a->table, count, a->compress);
    } else {
        a->aggregator = dtrain_aggregator_all_reduce(a->world);
    }
    return status;
}

/* A step of a rank that has no micro-batch: one of zeros. */
static inline dtrain_status gpt_aggregate_nothing(dtrain_fsdp *fsdp, int units)
{
    dtrain_status status = dtrain_fsdp_begin(fsdp, 1, 1.0);
    for (int unit = units - 1; unit >= 0 && status == DTRAIN_OK; unit--) {
        status = dtrain_fsdp_gather(fsdp, unit);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, unit);
    }
    return status;
}

/* Turns the sums of this rank's micro-batches into the mean over all ranks. Collective: every rank of the world. */
static inline dtrain_status gpt_aggregate_step(gpt_aggregate *a, dtrain_fsdp *fsdp, double weight)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    double total = 0;
    struct timespec began;
    dtrain_status status = dtrain_fsdp_finish(fsdp, NULL);
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_local(fsdp, &slices, &count);
    if (status == DTRAIN_OK)
        status = gpt_aggregate_start(a, fsdp);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < count; i++)
        a->table[i].grad = slices[i].grads;
    dtrain_compressed_stats before = dtrain_aggregator_get_stats(&a->aggregator), after;
    clock_gettime(CLOCK_MONOTONIC, &began);
    status = a->aggregator.aggregate(a->aggregator.self, a->table, count, weight, &total);
    after = dtrain_aggregator_get_stats(&a->aggregator);
    if (status == DTRAIN_OK && after.steps > before.steps)
        status = dtrain_fsdp_add_sent(fsdp, (int64_t)began.tv_sec * 1000000000 + began.tv_nsec,
                                      after.dense_bytes - before.dense_bytes, after.sent_bytes - before.sent_bytes);
    return status;
}

static inline void gpt_aggregate_close(gpt_aggregate *a)
{
    dtrain_aggregator_destroy(&a->aggregator);
    dtrain_server_destroy(a->server);
    dtrain_comm_destroy(a->alone);
    free(a->table);
    free(a->place);
    free(a->names);
    memset(a, 0, sizeof *a);
}

#endif
