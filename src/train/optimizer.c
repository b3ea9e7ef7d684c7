/* ---- >>optimizer ----
 * AdamW and SGD: one pass over memory, whose loops are in >>train-kernels. The constants of a step depend on the
 * desc, the learning rate and the number of the step alone, so that a slice, a whole table, and a resumed run agree. */
#ifndef DTRAIN__OPTIMIZER
#define DTRAIN__OPTIMIZER
#include "train.h"
#include "kernels.c"
#include "params.c"

struct dtrain_optimizer {
    dtrain_allocator own; /* used when the caller gives none */
    dtrain_allocator *allocator;
    dtrain__params params;
    dtrain_optimizer_desc desc;
    float *state; /* m of all ranges, then v of all; or the velocity */
    size_t state_count, count;
    uint64_t step;
};

static dtrain_optimizer_desc dtrain__optimizer_defaults(const dtrain_optimizer_desc *given)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    if (given != NULL)
        desc = *given;
    desc.kind = desc.kind == DTRAIN_OPTIMIZER_DEFAULT ? DTRAIN_ADAMW : desc.kind;
    desc.beta1 = desc.beta1 == 0.0f ? 0.9f : desc.beta1;
    desc.beta2 = desc.beta2 == 0.0f ? 0.999f : desc.beta2;
    desc.eps = desc.eps == 0.0f ? 1e-8f : desc.eps;
    return desc;
}

DTRAIN__EXACT_BEGIN

/* By squaring, from the lowest bit of the exponent up. */
static double dtrain__optimizer_power(double base, uint64_t exponent)
{
    double power = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1)
            power = power * base;
        base = base * base;
    }
    return power;
}

static dtrain__adamw_constants dtrain__optimizer_adamw_constants(const dtrain_optimizer_desc *desc, float lr,
                                                                 uint64_t step)
{
    dtrain__adamw_constants c;
    double beta1 = (double)desc->beta1, beta2 = (double)desc->beta2;
    double decay = (double)lr * (double)desc->weight_decay;
    uint32_t zero = dtrain__opaque_zero;
    double rest1 = 1.0 - dtrain__rounded_f64(dtrain__optimizer_power(beta1, step), zero);
    double rest2 = 1.0 - dtrain__rounded_f64(dtrain__optimizer_power(beta2, step), zero);
    c.beta1 = desc->beta1;
    c.rest1 = (float)(1.0 - beta1);
    c.beta2 = desc->beta2;
    c.rest2 = (float)(1.0 - beta2);
    c.root = (float)(1.0 / dtrain__sqrt_f64(rest2));
    c.eps = desc->eps;
    c.rate = (float)((double)lr / rest1);
    c.keep = (float)(1.0 - dtrain__rounded_f64(decay, dtrain__opaque_zero));
    return c;
}

static dtrain__sgd_constants dtrain__optimizer_sgd_constants(const dtrain_optimizer_desc *desc, float lr)
{
    dtrain__sgd_constants c;
    double decay = desc->decoupled_decay ? (double)lr * (double)desc->weight_decay : 0.0;
    c.momentum = desc->momentum;
    c.lr = lr;
    c.keep = (float)(1.0 - dtrain__rounded_f64(decay, dtrain__opaque_zero));
    c.coupled = desc->decoupled_decay ? 0.0f : desc->weight_decay;
    c.nesterov = desc->nesterov;
    return c;
}

DTRAIN__EXACT_END

DTRAIN_API void dtrain_adamw(float *params, const float *grads, float *m, float *v, size_t count,
                             const dtrain_optimizer_desc *desc, float lr, uint64_t step)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    dtrain__adamw_constants c = dtrain__optimizer_adamw_constants(&full, lr, step);
    dtrain__train_kernels_get()->adamw(params, grads, m, v, count, &c);
    dtrain__fpmode_restore(mode);
}

DTRAIN_API void dtrain_sgd(float *params, const float *grads, float *velocity, size_t count,
                           const dtrain_optimizer_desc *desc, float lr)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    dtrain__sgd_constants c = dtrain__optimizer_sgd_constants(&full, lr);
    dtrain__train_kernels_get()->sgd(params, grads, full.momentum == 0.0f ? NULL : velocity, count, &c);
    dtrain__fpmode_restore(mode);
}

/* Returns the name of the first constant out of range, or NULL. */
static const char *dtrain__optimizer_bad(const dtrain_optimizer_desc *desc, int may_be_none)
{
    if (!dtrain__train_finite((double)desc->beta1) || desc->beta1 < 0.0f || desc->beta1 >= 1.0f)
        return "beta1, expected 0 to below 1";
    if (!dtrain__train_finite((double)desc->beta2) || desc->beta2 < 0.0f || desc->beta2 >= 1.0f)
        return "beta2, expected 0 to below 1";
    if (!dtrain__train_finite((double)desc->eps) || desc->eps < 0.0f)
        return "eps, expected 0 or more";
    if (!dtrain__train_finite((double)desc->weight_decay) || desc->weight_decay < 0.0f)
        return "weight_decay, expected 0 or more";
    if (!dtrain__train_finite((double)desc->momentum) || desc->momentum < 0.0f || desc->momentum >= 1.0f)
        return "momentum, expected 0 to below 1";
    if (desc->kind != DTRAIN_SGD && desc->kind != DTRAIN_ADAMW && !(may_be_none && desc->kind == DTRAIN_OPTIMIZER_NONE))
        return "kind, expected DTRAIN_SGD or DTRAIN_ADAMW";
    return NULL;
}

static dtrain_status dtrain__optimizer_init(dtrain_optimizer *optimizer, const dtrain_param *table, size_t count)
{
    dtrain_status status = dtrain__params_create(&optimizer->params, table, count, optimizer->allocator);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = 0; i < optimizer->params.range_count; i++)
        optimizer->count += optimizer->params.ranges[i].count;
    size_t copies = optimizer->desc.kind == DTRAIN_ADAMW ? 2 : optimizer->desc.momentum != 0.0f;
    size_t bytes;
    /* The gradients are in memory, so their elements add up; twice as many need not fit. */
    if (dtrain__mul_size(optimizer->count, copies * sizeof(float), &bytes))
        optimizer->state = (float *)dtrain__alloc(optimizer->allocator, bytes);
    if (optimizer->state == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "optimizer: no memory for the state of %zu elements, %zu floats each", optimizer->count,
                            copies);
    optimizer->state_count = optimizer->count * copies;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_optimizer_create(dtrain_optimizer **optimizer, const dtrain_param *table, size_t count,
                                                 const dtrain_optimizer_desc *desc, dtrain_allocator *allocator)
{
    dtrain_allocator own = {NULL, NULL, 0, 0};
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    const char *bad = dtrain__optimizer_bad(&full, 0);
    if (optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_optimizer_create: optimizer is NULL, expected a pointer");
    *optimizer = NULL;
    if (bad != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "optimizer: the desc has a bad %s", bad);
    dtrain_optimizer *made = (dtrain_optimizer *)dtrain__alloc(allocator != NULL ? allocator : &own, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "optimizer: no memory for %zu bytes", sizeof *made);
    made->own = own;
    made->allocator = allocator != NULL ? allocator : &made->own;
    made->desc = full;
    dtrain_status status = dtrain__optimizer_init(made, table, count);
    if (status != DTRAIN_OK) {
        dtrain_optimizer_destroy(made);
        return status;
    }
    *optimizer = made;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr)
{
    if (optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_optimizer_step: the optimizer is NULL: create it first");
    if (!dtrain__train_finite((double)lr) || lr < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_optimizer_step: lr is %g, expected a number of at least 0", (double)lr);
    dtrain_optimizer_desc desc = optimizer->desc;
    size_t done = 0;
    optimizer->step++;
    for (size_t i = 0; i < optimizer->params.range_count; i++) {
        const dtrain__range *range = &optimizer->params.ranges[i];
        float *state = optimizer->state + (optimizer->state_count > 0 ? done : 0);
        desc.weight_decay = range->no_decay ? 0.0f : optimizer->desc.weight_decay;
        if (desc.kind == DTRAIN_ADAMW)
            dtrain_adamw(range->data, range->grad, state, state + optimizer->count, range->count, &desc, lr,
                         optimizer->step);
        else
            dtrain_sgd(range->data, range->grad, state, range->count, &desc, lr);
        done += range->count;
    }
    return DTRAIN_OK;
}

DTRAIN_API uint64_t dtrain_optimizer_get_step(const dtrain_optimizer *optimizer)
{
    return optimizer != NULL ? optimizer->step : 0;
}

DTRAIN_API void dtrain_optimizer_set_step(dtrain_optimizer *optimizer, uint64_t step)
{
    if (optimizer != NULL)
        optimizer->step = step;
}

DTRAIN_API float *dtrain_optimizer_state(const dtrain_optimizer *optimizer, const void *data, int which)
{
    size_t done = 0;
    if (optimizer == NULL || data == NULL || which < 0 || (size_t)which * optimizer->count >= optimizer->state_count)
        return NULL;
    for (size_t i = 0; i < optimizer->params.range_count; i++) {
        if (optimizer->params.ranges[i].data == data && optimizer->params.ranges[i].count > 0)
            return optimizer->state + (size_t)which * optimizer->count + done;
        done += optimizer->params.ranges[i].count;
    }
    return NULL;
}

DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer)
{
    if (optimizer == NULL)
        return;
    dtrain_allocator own = optimizer->own;
    dtrain_allocator *allocator = optimizer->allocator == &optimizer->own ? &own : optimizer->allocator;
    dtrain__params_destroy(&optimizer->params, allocator);
    dtrain__free(allocator, optimizer->state, optimizer->state_count * sizeof(float));
    dtrain__free(allocator, optimizer, sizeof *optimizer);
}

#endif
