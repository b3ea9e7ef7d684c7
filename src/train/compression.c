/* ---- >>compression ----
 * The aggregator that compresses: a state a parameter, whose sums are divided once by the weight of all ranks. Sums
 * travel, not means, so that what is left for the next step is in the units of the next step's gradients. */
#ifndef DTRAIN__COMPRESSION
#define DTRAIN__COMPRESSION
#include "train.h"
#include "params.c"
#include "aggregator.c"
#include "../compress/compressed.c"

#define DTRAIN__COMPRESSION_LEAST 1024

typedef struct dtrain__compression {
    dtrain_comm *comm;
    dtrain_allocator *allocator;
    size_t count, *elements;
    dtrain_compressed **parts; /* NULL: as it is */
    dtrain_compressed_stats plain;
} dtrain__compression;

/* A compressor for one parameter; kind NONE of those that are sent as they are is the caller's to know. */
static dtrain_status dtrain__compression_make(const dtrain_compress_desc *desc, size_t rows, size_t columns,
                                              dtrain_allocator *allocator, dtrain_compressor *made)
{
    dtrain_topk_desc topk = desc->topk;
    memset(made, 0, sizeof *made);
    switch (desc->kind) {
    case DTRAIN_COMPRESS_DEFAULT:
    case DTRAIN_COMPRESS_TOPK:
        if (topk.threshold == 0.0f && topk.schedule.ratio == 0.0)
            topk.schedule.ratio = 0.01;
        return dtrain_compressor_topk(made, &topk, allocator);
    case DTRAIN_COMPRESS_POWERSGD: return dtrain_compressor_powersgd(made, rows, columns, desc->rank, 1, allocator);
    case DTRAIN_COMPRESS_BF16: *made = dtrain_compressor_cast(DTRAIN_BF16); return DTRAIN_OK;
    case DTRAIN_COMPRESS_F16: *made = dtrain_compressor_cast(DTRAIN_F16); return DTRAIN_OK;
    case DTRAIN_COMPRESS_INT8: *made = dtrain_compressor_int8(desc->block); return DTRAIN_OK;
    case DTRAIN_COMPRESS_FP8: *made = dtrain_compressor_fp8(desc->block); return DTRAIN_OK;
    case DTRAIN_COMPRESS_SIGN: *made = dtrain_compressor_sign(desc->block); return DTRAIN_OK;
    default: break;
    }
    if (desc->kind != DTRAIN_COMPRESS_OWN || desc->own == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compress: kind %d%s; expected one of dtrain_compression, and own where it is OWN",
                            (int)desc->kind, desc->own == NULL ? " without own" : "");
    *made = *desc->own;
    made->destroy = NULL;
    return DTRAIN_OK;
}

/* Sets up one parameter's state. */
static dtrain_status dtrain__compression_open(dtrain__compression *all, size_t index, const dtrain_param *param,
                                              const dtrain_compress_desc *desc)
{
    size_t elements = dtrain_param_elements(param), rows = param->shape[0] > 0 ? param->shape[0] : 1;
    size_t least = desc->least_count > 0 ? desc->least_count : DTRAIN__COMPRESSION_LEAST;
    dtrain_compressor compressor;
    if (param->stacked && param->shape[1] > 0 && elements > 0)
        rows *= param->shape[1];
    all->elements[index] = dtrain__params_trained(param) ? elements : 0;
    if (all->elements[index] == 0 || elements < least ||
        (desc->kind == DTRAIN_COMPRESS_POWERSGD && elements / rows < 2))
        return DTRAIN_OK;
    dtrain_status status =
        dtrain__compression_make(desc, rows, elements / rows, dtrain_comm_allocator(all->comm), &compressor);
    if (status == DTRAIN_OK)
        status = dtrain_compressed_create(&all->parts[index], all->comm, elements, &compressor, &desc->feedback);
    return status;
}

static void dtrain__compression_destroy(void *self)
{
    dtrain__compression *all = (dtrain__compression *)self;
    dtrain_allocator *allocator = all->allocator;
    for (size_t i = 0; all->parts != NULL && i < all->count; i++)
        dtrain_compressed_destroy(all->parts[i]);
    dtrain__free(allocator, all->parts, all->count * sizeof *all->parts);
    dtrain__free(allocator, all->elements, all->count * sizeof *all->elements);
    dtrain__free(allocator, all, sizeof *all);
}

static dtrain_status dtrain__compression_check(const dtrain__compression *all, const dtrain_param *table, size_t count,
                                               double weight)
{
    dtrain_status status = dtrain__aggregator_check(table, count, weight);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++) {
        size_t elements = dtrain__params_trained(&table[i]) ? dtrain_param_elements(&table[i]) : 0;
        if (count != all->count || elements != all->elements[i])
            status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                  "aggregate: parameter %zu of %zu has %zu trained elements; the aggregator was made "
                                  "for %zu parameters, that one of %zu",
                                  i, count, elements, all->count, i < all->count ? all->elements[i] : 0);
    }
    return status;
}

static dtrain_status dtrain__compression_run(void *self, const dtrain_param *table, size_t count, double weight,
                                             double *total_weight)
{
    dtrain__compression *all = (dtrain__compression *)self;
    dtrain_status status = dtrain__compression_check(all, table, count, weight);
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(all->comm, &weight, total_weight, 1, DTRAIN_F64, DTRAIN_SUM);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++) {
        float *grad = (float *)table[i].grad;
        if (all->parts[i] != NULL) {
            status = dtrain_compressed_all_reduce(all->parts[i], grad, grad, DTRAIN_SUM);
        } else if (all->elements[i] > 0) {
            uint64_t bytes = dtrain__feedback_dense_bytes(all->elements[i], dtrain_comm_size(all->comm));
            all->plain.dense_bytes += bytes;
            all->plain.sent_bytes += bytes;
            status = dtrain_all_reduce(all->comm, grad, grad, all->elements[i], DTRAIN_F32, DTRAIN_SUM);
        }
    }
    if (status == DTRAIN_OK)
        dtrain__aggregator_divide(table, count, *total_weight);
    all->plain.steps += status == DTRAIN_OK;
    return status;
}

DTRAIN_API dtrain_status dtrain_aggregator_compressed(dtrain_aggregator *aggregator, dtrain_comm *comm,
                                                      const dtrain_param *table, size_t count,
                                                      const dtrain_compress_desc *desc)
{
    dtrain_compress_desc full;
    if (aggregator == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "aggregator_compressed: %s is NULL",
                            comm == NULL ? "the group" : "aggregator");
    memset(aggregator, 0, sizeof *aggregator);
    memset(&full, 0, sizeof full);
    if (desc != NULL)
        full = *desc;
    dtrain_status status = dtrain__params_check_f32(table, count);
    if (status != DTRAIN_OK)
        return status;
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain__compression *all = (dtrain__compression *)dtrain__alloc(allocator, sizeof *all);
    if (all != NULL) {
        all->comm = comm;
        all->allocator = allocator;
        all->count = count;
        all->elements = (size_t *)dtrain__alloc(allocator, count * sizeof *all->elements);
        all->parts = (dtrain_compressed **)dtrain__alloc(allocator, count * sizeof *all->parts);
    }
    if (all == NULL || all->elements == NULL || all->parts == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "aggregator_compressed: no memory for %zu parameters", count);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++)
        status = dtrain__compression_open(all, i, &table[i], &full);
    if (status != DTRAIN_OK) {
        if (all != NULL)
            dtrain__compression_destroy(all);
        return status;
    }
    aggregator->self = all;
    aggregator->aggregate = dtrain__compression_run;
    aggregator->destroy = dtrain__compression_destroy;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_compressed *dtrain_aggregator_compression(const dtrain_aggregator *aggregator, size_t param)
{
    if (aggregator == NULL || aggregator->aggregate != dtrain__compression_run)
        return NULL;
    const dtrain__compression *all = (const dtrain__compression *)aggregator->self;
    return param < all->count ? all->parts[param] : NULL;
}

DTRAIN_API dtrain_compressed_stats dtrain_aggregator_counters(const dtrain_aggregator *aggregator)
{
    dtrain_compressed_stats sum = {0, 0, 0};
    if (aggregator == NULL || aggregator->aggregate != dtrain__compression_run)
        return sum;
    const dtrain__compression *all = (const dtrain__compression *)aggregator->self;
    sum = all->plain;
    for (size_t i = 0; i < all->count; i++) {
        dtrain_compressed_stats part = dtrain_compressed_counters(all->parts[i]);
        sum.dense_bytes += part.dense_bytes;
        sum.sent_bytes += part.sent_bytes;
    }
    return sum;
}

#endif
