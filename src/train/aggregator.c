/* ---- >>aggregator ----
 * Gradient clipping; one training step in three parts: compute, aggregate, apply; and the aggregators that work alone
 * or all-reduce. A program with a loop of its own uses >>ddp instead. */
#ifndef DTRAIN__AGGREGATOR
#define DTRAIN__AGGREGATOR
#include "train.h"
#include "train_kernels.c"
#include "params.c"
#include "../tensor/norm.c"

/* Clips gradients. `memory` is where the gradients are, and holds the limbs of the sum and the norm. Each parameter
 * finds the same factor there. */
static dtrain_status dtrain__aggregator_clip(dtrain_device *device, const dtrain_param *table, size_t count,
                                             float max_norm, void *memory, double *norm)
{
    int64_t *limbs = (int64_t *)memory;
    double *length = (double *)(void *)(limbs + DTRAIN_SQUARES_LIMBS);
    const uint64_t zero = 0;
    dtrain_status status = dtrain_device_fill(device, memory, &zero, sizeof zero, DTRAIN_SQUARES_LIMBS + 1);
    for (size_t i = 0; i < count && status == DTRAIN_OK; i++)
        status =
            dtrain_device_squares(device, (const float *)table[i].grad, dtrain__params_gradients(&table[i]), limbs);
    for (size_t i = 0; i < count && status == DTRAIN_OK; i++) {
        size_t elements = dtrain__params_gradients(&table[i]);
        if (elements > 0)
            status = dtrain_device_clip(device, limbs, max_norm, length, (float *)table[i].grad, elements);
        if (elements > 0 && max_norm == 0.0f) /* the first call has measured all of them */
            break;
    }
    double found = 0.0; /* a copy to norm itself would not wait if norm is pinned */
    if (status == DTRAIN_OK && norm != NULL)
        status = dtrain_device_copy(device, &found, length, sizeof found);
    if (status == DTRAIN_OK && norm != NULL)
        *norm = found;
    return status;
}

DTRAIN_API dtrain_status dtrain_clip_grad_norm(const dtrain_param *table, size_t count, float max_norm, double *norm)
{
    uint64_t own[DTRAIN_SQUARES_LIMBS + 1];
    void *memory = own;
    if (!dtrain__train_finite((double)max_norm) || max_norm < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_clip_grad_norm: max_norm is %g, expected a number of at least 0", (double)max_norm);
    dtrain_device *device;
    dtrain_status status = dtrain__params_check_grads(table, count, "dtrain_clip_grad_norm");
    if (status == DTRAIN_OK)
        status = dtrain__params_device(table, count, "dtrain_clip_grad_norm", &device);
    if (status == DTRAIN_OK && device != NULL)
        status = dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, sizeof own, &memory);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__aggregator_clip(device, table, count, max_norm, memory, norm);
    if (device != NULL)
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, memory);
    return status;
}

static void dtrain__aggregator_divide(const dtrain_param *table, size_t count, double total_weight)
{
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; total_weight > 0.0 && i < count; i++)
        dtrain__fold_divide_f32(table[i].grad, total_weight, dtrain__params_gradients(&table[i]));
    dtrain__fpmode_restore(mode);
}

static dtrain_status dtrain__aggregator_check(const dtrain_param *table, size_t count, double weight)
{
    if (!dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "aggregate: weight is %g, expected a number of at least 0",
                            weight);
    return dtrain__params_check_cpu_grads(table, count, "aggregate");
}

/* Does the same for an aggregator that was made for `made` parameters, with `elements` trained elements each. */
static dtrain_status dtrain__aggregator_check_made(const dtrain_param *table, size_t count, double weight, size_t made,
                                                   const size_t *elements)
{
    dtrain_status status = dtrain__aggregator_check(table, count, weight);
    if (status == DTRAIN_OK && (table == NULL || count != made))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "aggregate: a table of %zu parameters, the aggregator was made for %zu parameters: give "
                            "the table that it was made from",
                            table != NULL ? count : 0, made);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++) {
        size_t trained = dtrain__params_gradients(&table[i]);
        if (trained != elements[i])
            status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                  "aggregate: parameter %s has %zu trained elements, the aggregator was made for %zu: "
                                  "give the table that it was made from",
                                  table[i].name, trained, elements[i]);
    }
    return status;
}

static dtrain_status dtrain__aggregator_run_local(void *self, const dtrain_param *table, size_t count, double weight,
                                                  double *total_weight)
{
    dtrain_status status = dtrain__aggregator_check(table, count, weight);
    (void)self;
    if (status != DTRAIN_OK)
        return status;
    *total_weight = weight;
    dtrain__aggregator_divide(table, count, weight);
    return DTRAIN_OK;
}

static dtrain_status dtrain__aggregator_run_all_reduce(void *self, const dtrain_param *table, size_t count,
                                                       double weight, double *total_weight)
{
    dtrain_comm *comm = (dtrain_comm *)self;
    dtrain_status status = dtrain__aggregator_check(table, count, weight);
    if (status == DTRAIN_OK)
        status = dtrain__group_whole(comm, "aggregate");
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(comm, &weight, total_weight, 1, DTRAIN_F64, DTRAIN_SUM);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++) {
        if (dtrain__params_trained(&table[i]))
            status = dtrain_all_reduce(comm, table[i].grad, table[i].grad, dtrain_param_elements(&table[i]), DTRAIN_F32,
                                       DTRAIN_SUM);
    }
    if (status == DTRAIN_OK)
        dtrain__aggregator_divide(table, count, *total_weight);
    return status;
}

static dtrain_aggregator dtrain__aggregator_local(void)
{
    dtrain_aggregator aggregator = {NULL, dtrain__aggregator_run_local, NULL, NULL, NULL, NULL};
    return aggregator;
}

DTRAIN_API dtrain_aggregator dtrain_aggregator_all_reduce(dtrain_comm *comm)
{
    dtrain_aggregator aggregator = {comm, dtrain__aggregator_run_all_reduce, NULL, NULL, NULL, NULL};
    return aggregator;
}

DTRAIN_API dtrain_pieces dtrain_aggregator_pieces(const dtrain_aggregator *aggregator)
{
    dtrain_pieces none;
    memset(&none, 0, sizeof none);
    return aggregator != NULL && aggregator->get_pieces != NULL ? aggregator->get_pieces(aggregator->self) : none;
}

DTRAIN_API dtrain_compressed_stats dtrain_aggregator_get_stats(const dtrain_aggregator *aggregator)
{
    dtrain_compressed_stats none = {0, 0, 0};
    return aggregator != NULL && aggregator->get_stats != NULL ? aggregator->get_stats(aggregator->self) : none;
}

DTRAIN_API void dtrain_aggregator_destroy(dtrain_aggregator *aggregator)
{
    if (aggregator == NULL)
        return;
    if (aggregator->destroy != NULL)
        aggregator->destroy(aggregator->self);
    memset(aggregator, 0, sizeof *aggregator);
}

static dtrain_status dtrain__aggregator_check_step(const dtrain_step_desc *desc)
{
    if (desc == NULL || desc->table == NULL || desc->compute == NULL || desc->optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_train_step: table, compute and optimizer are needed, %s is NULL",
                            desc == NULL            ? "the desc"
                            : desc->table == NULL   ? "table"
                            : desc->compute == NULL ? "compute"
                                                    : "optimizer");
    return dtrain__params_check_cpu_grads(desc->table, desc->count, "dtrain_train_step");
}

DTRAIN_API dtrain_status dtrain_train_step(const dtrain_step_desc *desc, dtrain_step_result *result)
{
    dtrain_step_result own = {0.0, 0.0};
    double weight = 0.0;
    dtrain_status status = dtrain__aggregator_check_step(desc);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < desc->count; i++) {
        size_t elements = dtrain__params_gradients(&desc->table[i]);
        if (elements > 0)
            memset(desc->table[i].grad, 0, elements * sizeof(float));
    }
    dtrain_aggregator local = dtrain__aggregator_local();
    const dtrain_aggregator *aggregator = desc->aggregator != NULL ? desc->aggregator : &local;
    status = desc->compute(desc->user, &weight);
    if (status == DTRAIN_OK)
        status = aggregator->aggregate(aggregator->self, desc->table, desc->count, weight, &own.total_weight);
    int drops = status == DTRAIN_OK && aggregator->drop != NULL;
    if (status == DTRAIN_OK && own.total_weight > 0.0 && desc->max_norm != 0.0f)
        status = dtrain_clip_grad_norm(desc->table, desc->count, desc->max_norm, &own.norm);
    if (status == DTRAIN_OK && own.total_weight > 0.0)
        status = dtrain_optimizer_step(desc->optimizer, desc->lr);
    if (status != DTRAIN_OK && drops)
        aggregator->drop(aggregator->self);
    if (result != NULL)
        *result = own;
    return status;
}

#endif
