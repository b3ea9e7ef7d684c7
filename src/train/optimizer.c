/* ---- >>optimizer ----
 * AdamW and SGD in one pass over memory, whose loops are in >>train-kernels; and schedules of learning rates. The
 * constants of a step depend only on the desc, the learning rate and the step's number. So a slice, a whole table and a
 * resumed run agree. */
#ifndef DTRAIN__OPTIMIZER
#define DTRAIN__OPTIMIZER
#include "train.h"
#include "train_kernels.c"
#include "../tensor/device.c"
#include "params.c"

/* Where the state of what begins at data begins. */
typedef struct dtrain__optimizer_spot {
    const void *data;
    size_t begin;
} dtrain__optimizer_spot;

struct dtrain_optimizer {
    dtrain_allocator own; /* used when the caller gives none */
    dtrain_allocator *allocator;
    dtrain__params params;
    dtrain_optimizer_desc desc;
    dtrain_device *device; /* that has the ranges and the state; NULL: the CPU */
    float *state;          /* m of all ranges, then v of all; or the velocity */
    size_t state_count, count;
    dtrain__optimizer_spot *spots; /* of the ranges that are not empty, by address */
    size_t spot_count;
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

/* Computes a power by squaring, from the lowest bit of the exponent up. */
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

static dtrain_device_adamw_step dtrain__optimizer_adamw(float *params, const float *grads, float *m, float *v,
                                                        size_t count, const dtrain_optimizer_desc *desc, float lr,
                                                        uint64_t step)
{
    dtrain_device_adamw_step s = {params, m, v, grads, NULL, count, 0, 0, 0, 0, 0, 0, 0, 0};
    uint64_t mode = dtrain__fpmode_enter();
    double beta1 = (double)desc->beta1, beta2 = (double)desc->beta2;
    double decay = (double)lr * (double)desc->weight_decay;
    uint32_t zero = dtrain__isa_zero;
    double rest1 = 1.0 - dtrain__isa_rounded_f64(dtrain__optimizer_power(beta1, step), zero);
    double rest2 = 1.0 - dtrain__isa_rounded_f64(dtrain__optimizer_power(beta2, step), zero);
    s.beta1 = desc->beta1;
    s.rest1 = (float)(1.0 - beta1);
    s.beta2 = desc->beta2;
    s.rest2 = (float)(1.0 - beta2);
    s.root = (float)(1.0 / dtrain__vector_sqrt_f64(rest2));
    s.eps = desc->eps;
    s.rate = (float)((double)lr / rest1);
    s.keep = (float)(1.0 - dtrain__isa_rounded_f64(decay, zero));
    dtrain__fpmode_restore(mode);
    return s;
}

static dtrain_device_sgd_step dtrain__optimizer_sgd(float *params, const float *grads, float *velocity, size_t count,
                                                    const dtrain_optimizer_desc *desc, float lr)
{
    dtrain_device_sgd_step s = {params, velocity, grads, NULL, count, desc->momentum, lr, 0, 0, desc->nesterov};
    uint64_t mode = dtrain__fpmode_enter();
    double decay = desc->decoupled_decay ? (double)lr * (double)desc->weight_decay : 0.0;
    s.keep = (float)(1.0 - dtrain__isa_rounded_f64(decay, dtrain__isa_zero));
    s.coupled = desc->decoupled_decay ? 0.0f : desc->weight_decay;
    dtrain__fpmode_restore(mode);
    return s;
}

DTRAIN__EXACT_END

DTRAIN_API void dtrain_adamw(float *params, const float *grads, float *m, float *v, size_t count,
                             const dtrain_optimizer_desc *desc, float lr, uint64_t step)
{
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    dtrain_device_adamw_step s = dtrain__optimizer_adamw(params, grads, m, v, count, &full, lr, step);
    DTRAIN_IGNORE(dtrain__train_adamw(&s)); /* without a copy nothing can fail */
}

/* Makes a step of 1-bit Adam: m becomes grads, which hold the momenta, and v stays as after step `frozen`. */
static void dtrain__optimizer_adamw_frozen(float *params, const float *grads, float *m, float *v, size_t count,
                                           const dtrain_optimizer_desc *desc, float lr, uint64_t step, uint64_t frozen)
{
    dtrain_device_adamw_step s = dtrain__optimizer_adamw(params, grads, m, v, count, desc, lr, step);
    s.root = dtrain__optimizer_adamw(params, grads, m, v, count, desc, lr, frozen).root;
    s.beta1 = s.rest2 = 0.0f;
    s.rest1 = s.beta2 = 1.0f;
    DTRAIN_IGNORE(dtrain__train_adamw(&s));
}

/* Fails at the first constant that is out of range. */
static dtrain_status dtrain__optimizer_check(const dtrain_optimizer_desc *desc, int may_be_none, const char *call)
{
    static const char *const names[] = {"beta1", "beta2", "momentum", "eps", "weight_decay"};
    const float values[] = {desc->beta1, desc->beta2, desc->momentum, desc->eps, desc->weight_decay};
    for (int i = 0; i < 5; i++)
        if (!dtrain__train_finite((double)values[i]) || values[i] < 0.0f || (i < 3 && values[i] >= 1.0f))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "%s: the optimizer's %s is %g, expected %s" DTRAIN__ZERO_FIRST, call, names[i],
                                (double)values[i], i < 3 ? "0 to below 1" : "a number of at least 0");
    if (desc->kind != DTRAIN_SGD && desc->kind != DTRAIN_ADAMW && !(may_be_none && desc->kind == DTRAIN_OPTIMIZER_NONE))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: the optimizer's kind is %d, expected DTRAIN_SGD or DTRAIN_ADAMW" DTRAIN__ZERO_FIRST,
                            call, (int)desc->kind);
    return DTRAIN_OK;
}

/* Checks the arguments of a step; count may be 0. */
static dtrain_status dtrain__optimizer_check_step(const dtrain_device *device, const char *call, size_t count,
                                                  const dtrain_optimizer_desc *desc, float lr,
                                                  const dtrain__device_argument *pointers)
{
    dtrain_status status = dtrain__optimizer_check(desc, 1, call);
    if (status != DTRAIN_OK)
        return status;
    if (!dtrain__train_finite((double)lr) || lr < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s on %s: lr is %g, expected a number of at least 0", call,
                            dtrain_device_name(device), (double)lr);
    return dtrain__device_pointers(device, call, count, pointers);
}

DTRAIN_API dtrain_status dtrain_device_adamw(dtrain_device *device, float *params, const float *grads, float *m,
                                             float *v, size_t count, const dtrain_optimizer_desc *desc, float lr,
                                             uint64_t step, uint16_t *copy_bf16)
{
    const dtrain__device_argument pointers[] = {{"params", params}, {"grads", grads}, {"m", m}, {"v", v}, {NULL, NULL}};
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    full.kind = DTRAIN_ADAMW;
    if (step == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "device_adamw on %s: step is 0, steps are counted from 1",
                            dtrain_device_name(device));
    dtrain_status status = dtrain__optimizer_check_step(device, "device_adamw", count, &full, lr, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    dtrain_device_adamw_step s = dtrain__optimizer_adamw(params, grads, m, v, count, &full, lr, step);
    s.copy = copy_bf16;
    return device != NULL ? DTRAIN__DEVICE_CALL(device, "device_adamw", adamw, (device, &s)) : dtrain__train_adamw(&s);
}

DTRAIN_API dtrain_status dtrain_device_sgd(dtrain_device *device, float *params, const float *grads, float *velocity,
                                           size_t count, const dtrain_optimizer_desc *desc, float lr,
                                           uint16_t *copy_bf16)
{
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    const dtrain__device_argument pointers[] = {
        {"params", params}, {"grads", grads}, {full.momentum != 0.0f ? "velocity" : NULL, velocity}, {NULL, NULL}};
    full.kind = DTRAIN_SGD;
    dtrain_status status = dtrain__optimizer_check_step(device, "device_sgd", count, &full, lr, pointers);
    if (status != DTRAIN_OK || count == 0)
        return status;
    velocity = full.momentum != 0.0f ? velocity : NULL;
    dtrain_device_sgd_step s = dtrain__optimizer_sgd(params, grads, velocity, count, &full, lr);
    s.copy = copy_bf16;
    return device != NULL ? DTRAIN__DEVICE_CALL(device, "device_sgd", sgd, (device, &s)) : dtrain__train_sgd(&s);
}

static int dtrain__optimizer_compare_spots(const void *left, const void *right)
{
    uintptr_t a = (uintptr_t)((const dtrain__optimizer_spot *)left)->data;
    uintptr_t b = (uintptr_t)((const dtrain__optimizer_spot *)right)->data;
    return a < b ? -1 : a > b;
}

/* Counts the elements, and sorts the ranges that have some by address. Returns 0 if there is no memory. */
static int dtrain__optimizer_sort(dtrain_optimizer *optimizer)
{
    const dtrain__params *params = &optimizer->params;
    optimizer->spots =
        (dtrain__optimizer_spot *)dtrain__alloc(optimizer->allocator, params->range_count * sizeof *optimizer->spots);
    if (optimizer->spots == NULL)
        return 0;
    for (size_t i = 0; i < params->range_count; i++) {
        dtrain__optimizer_spot spot = {params->ranges[i].data, optimizer->count};
        optimizer->count += params->ranges[i].count;
        if (params->ranges[i].count > 0)
            optimizer->spots[optimizer->spot_count++] = spot;
    }
    if (optimizer->spot_count > 0)
        qsort(optimizer->spots, optimizer->spot_count, sizeof *optimizer->spots, dtrain__optimizer_compare_spots);
    return 1;
}

static dtrain_status dtrain__optimizer_init(dtrain_optimizer *optimizer, const dtrain_param *table, size_t count)
{
    const float zero = 0.0f;
    dtrain_status status =
        dtrain__params_create(&optimizer->params, table, count, optimizer->allocator, "dtrain_optimizer_create");
    if (status == DTRAIN_OK)
        status = dtrain__params_device(table, count, "optimizer", &optimizer->device);
    if (status != DTRAIN_OK)
        return status;
    if (!dtrain__optimizer_sort(optimizer))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "optimizer: no memory for a list of %zu parameters", count);
    size_t copies = optimizer->desc.kind == DTRAIN_ADAMW ? 2 : optimizer->desc.momentum != 0.0f, bytes;
    dtrain_device *device = optimizer->device;
    void *state = NULL;
    /* The gradients are in memory, so their elements add up; twice as many need not fit. */
    int fits = dtrain__mul_size(optimizer->count, copies * sizeof(float), &bytes);
    if (fits && device != NULL)
        status = dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, bytes, &state);
    else if (fits)
        state = dtrain__alloc(optimizer->allocator, bytes);
    if (status == DTRAIN_OK && (!fits || (device == NULL && state == NULL)))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "optimizer: no memory for the state of %zu elements, %zu floats each", optimizer->count,
                            copies);
    optimizer->state = (float *)state;
    optimizer->state_count = optimizer->count * copies;
    return status == DTRAIN_OK && device != NULL
               ? dtrain_device_fill(device, state, &zero, sizeof zero, optimizer->state_count)
               : status;
}

DTRAIN_API dtrain_status dtrain_optimizer_create(dtrain_optimizer **optimizer, const dtrain_param *table, size_t count,
                                                 const dtrain_optimizer_desc *desc, dtrain_allocator *allocator)
{
    dtrain_optimizer_desc full = dtrain__optimizer_defaults(desc);
    if (optimizer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_optimizer_create: optimizer is NULL, expected a pointer");
    *optimizer = NULL;
    dtrain_status status = dtrain__optimizer_check(&full, 0, "dtrain_optimizer_create");
    if (status != DTRAIN_OK)
        return status;
    dtrain_optimizer *made =
        (dtrain_optimizer *)dtrain__memory_owner(allocator, sizeof *made, offsetof(dtrain_optimizer, own), &allocator);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "optimizer: no memory for %zu bytes", sizeof *made);
    made->allocator = allocator;
    made->desc = full;
    status = dtrain__optimizer_init(made, table, count);
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
    dtrain_status status = DTRAIN_OK;
    size_t done = 0;
    optimizer->step++;
    for (size_t i = 0; i < optimizer->params.range_count && status == DTRAIN_OK; i++) {
        const dtrain__params_range *range = &optimizer->params.ranges[i];
        float *state = optimizer->state_count > 0 ? optimizer->state + done : NULL;
        float *second = state != NULL && desc.kind == DTRAIN_ADAMW ? state + optimizer->count : NULL;
        desc.weight_decay = range->no_decay ? 0.0f : optimizer->desc.weight_decay;
        if (desc.kind == DTRAIN_ADAMW)
            status = dtrain_device_adamw(optimizer->device, range->data, range->grad, state, second, range->count,
                                         &desc, lr, optimizer->step, NULL);
        else
            status =
                dtrain_device_sgd(optimizer->device, range->data, range->grad, state, range->count, &desc, lr, NULL);
        done += range->count;
    }
    return status;
}

/* Returns the state of the parameter, or layer of a stacked one, that begins at data; NULL: none. */
static float *dtrain__optimizer_state(const dtrain_optimizer *optimizer, const void *data, int which)
{
    size_t low = 0, high;
    if (optimizer == NULL || data == NULL || which < 0 || (size_t)which * optimizer->count >= optimizer->state_count)
        return NULL;
    for (high = optimizer->spot_count; low < high;) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)optimizer->spots[middle].data < (uintptr_t)data)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == optimizer->spot_count || optimizer->spots[low].data != data)
        return NULL;
    return optimizer->state + (size_t)which * optimizer->count + optimizer->spots[low].begin;
}

DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer)
{
    if (optimizer == NULL)
        return;
    dtrain_allocator *allocator = optimizer->allocator;
    dtrain__free(allocator, optimizer->params.ranges);
    dtrain__free(allocator, optimizer->spots);
    if (optimizer->device != NULL)
        dtrain_device_free(optimizer->device, DTRAIN_MEMORY_DEVICE, optimizer->state);
    else
        dtrain__free(allocator, optimizer->state);
    dtrain__free(allocator, optimizer);
}

/* ---- learning rates ----
 * They use basic operations of float64, each rounded, and one rounding to float32, so the bits are the same on every
 * machine. The C library's cosine differs between machines. */

DTRAIN__EXACT_BEGIN

/* Computes cos(pi t) for 0 <= t <= 1/2 by Taylor's series. The first term that it leaves out is below 2^-55. */
static double dtrain__optimizer_cos_quarter(double t)
{
    static const double factorials[] = {2.0,   12.0,  30.0,  56.0,  90.0,
                                        132.0, 182.0, 240.0, 306.0, 380.0}; /* (2k - 1) 2k */
    double x = 3.14159265358979323846 * t, square = x * x, sum = 1.0;
    for (int k = 9; k >= 0; k--) {
        double term = square * sum;
        term = term / factorials[k];
        sum = 1.0 - term;
    }
    return sum;
}

DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, uint64_t step)
{
    if (schedule == NULL)
        return 0.0f;
    if (schedule->kind != DTRAIN_SCHEDULE_CONSTANT && schedule->kind != DTRAIN_SCHEDULE_LINEAR &&
        schedule->kind != DTRAIN_SCHEDULE_COSINE) {
        dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                     "schedule_lr: kind is %d, expected DTRAIN_SCHEDULE_CONSTANT, _LINEAR or _COSINE",
                     (int)schedule->kind);
        return NAN;
    }
    double lr = (double)schedule->lr, min_lr = (double)schedule->min_lr;
    if (step < schedule->warmup_steps) {
        double risen = lr * (double)(step + 1);
        return (float)(risen / (double)schedule->warmup_steps);
    }
    if (schedule->kind == DTRAIN_SCHEDULE_CONSTANT)
        return schedule->lr;
    if (step >= schedule->total_steps)
        return schedule->min_lr;
    double t = (double)(step - schedule->warmup_steps) / (double)(schedule->total_steps - schedule->warmup_steps);
    if (schedule->kind == DTRAIN_SCHEDULE_LINEAR) {
        double fallen = (min_lr - lr) * t;
        return (float)(lr + dtrain__isa_rounded_f64(fallen, dtrain__isa_zero));
    }
    double cosine = t <= 0.5 ? dtrain__optimizer_cos_quarter(t) : -dtrain__optimizer_cos_quarter(1.0 - t);
    double height = (1.0 + cosine) * 0.5;
    double above = (lr - min_lr) * height;
    return (float)(min_lr + dtrain__isa_rounded_f64(above, dtrain__isa_zero));
}

DTRAIN__EXACT_END

#endif
