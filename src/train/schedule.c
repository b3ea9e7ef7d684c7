/* ---- >>schedule ----
 * Learning rates. Computed in float64 by basic operations only, each rounded, and rounded to float32 once: the same
 * bits on every machine, since the C library's cosine is not. */
#ifndef DTRAIN__SCHEDULE
#define DTRAIN__SCHEDULE
#include "train.h"
#include "../base/platform.h"
#include "../tensor/isa.c"

DTRAIN__EXACT_BEGIN

/* cos(pi t) for 0 <= t <= 1/2: Taylor's series, whose first term left out is below 2^-55. */
static double dtrain__schedule_cos_quarter(double t)
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

static double dtrain__schedule_cos(double t)
{
    return t <= 0.5 ? dtrain__schedule_cos_quarter(t) : -dtrain__schedule_cos_quarter(1.0 - t);
}

DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, uint64_t step)
{
    if (schedule == NULL)
        return 0.0f;
    double lr = (double)schedule->lr, min_lr = (double)schedule->min_lr;
    if (step < schedule->warmup_steps) {
        double risen = lr * (double)(step + 1);
        return (float)(risen / (double)schedule->warmup_steps);
    }
    if (schedule->kind != DTRAIN_SCHEDULE_LINEAR && schedule->kind != DTRAIN_SCHEDULE_COSINE)
        return schedule->lr;
    if (step >= schedule->total_steps)
        return schedule->min_lr;
    double t = (double)(step - schedule->warmup_steps) / (double)(schedule->total_steps - schedule->warmup_steps);
    if (schedule->kind == DTRAIN_SCHEDULE_LINEAR) {
        double fallen = (min_lr - lr) * t;
        return (float)(lr + dtrain__rounded_f64(fallen, dtrain__opaque_zero));
    }
    double height = (1.0 + dtrain__schedule_cos(t)) * 0.5;
    double above = (lr - min_lr) * height;
    return (float)(min_lr + dtrain__rounded_f64(above, dtrain__opaque_zero));
}

DTRAIN__EXACT_END

#endif
