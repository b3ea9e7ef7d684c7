/* ---- >>fsdp-norm ----
 * The length of gradients, of one object or of a whole model that many hold, and shortening them. Parts of a model tell
 * each other by the same sum whether one of them has dropped its step. */
#ifndef DTRAIN__FSDP_NORM
#define DTRAIN__FSDP_NORM
#include "fsdp_step.c"

static dtrain_status dtrain__fsdp_check_norm(const char *call, float max_norm)
{
    if (max_norm >= 0.0f)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: max_norm is %g, expected a number of at least 0", call,
                        (double)max_norm);
}

/* Ends the step's reductions and sums up its gradients anew: they may have been changed since. */
static dtrain_status dtrain__fsdp_measure(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_finish_now(fsdp, 0);
    fsdp->summed = 0;
    return status == DTRAIN_OK ? dtrain__fsdp_sum_squares(fsdp) : status;
}

/* Shortens gradients to max_norm where their length, by the sum, is more; returns it. */
static double dtrain__fsdp_shorten(dtrain_fsdp *fsdp, float max_norm)
{
    double length = dtrain__device_length(&fsdp->sum);
    if (max_norm > 0.0f && dtrain__norm_finite(&fsdp->sum) && length > (double)max_norm) {
        uint64_t mode = dtrain__fpmode_enter();
        float factor = dtrain__device_ratio((double)max_norm, length);
        dtrain__fpmode_restore(mode);
        dtrain__fsdp_queued(
            fsdp, dtrain_device_scale(fsdp->device.queue, DTRAIN_F32, fsdp->grads, (double)factor, fsdp->layout.grads));
    }
    return length;
}

/* Shortens gradients on a device without the CPU's hearing how long they are. */
static dtrain_status dtrain__fsdp_shorten_unseen(dtrain_fsdp *fsdp, float max_norm)
{
    dtrain_status status = dtrain__fsdp_finish_now(fsdp, 0);
    if (status != DTRAIN_OK)
        return status;
    fsdp->summed = 0;
    status = dtrain__fsdp_queue_squares(fsdp, fsdp->device.limbs);
    if (status == DTRAIN_OK)
        status = dtrain_device_clip(fsdp->device.queue, fsdp->device.limbs, max_norm,
                                    (double *)(void *)(fsdp->device.limbs + DTRAIN__NORM_LIMBS), fsdp->grads,
                                    fsdp->layout.grads);
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, "measuring gradients", -1);
}

/* What the ranks of a model add up: the exact sum, and how many of their objects have dropped the step. */
typedef struct dtrain__fsdp_total {
    dtrain__norm sum;
    int64_t dropped;
} dtrain__fsdp_total;

/* Measures every object of this rank; the first failure is returned, and told in the total. */
static dtrain_status dtrain__fsdp_measure_all(dtrain_fsdp *const *fsdps, int count, dtrain__fsdp_total *total,
                                              const char *call)
{
    dtrain_status first = DTRAIN_OK;
    dtrain__error why;
    memset(total, 0, sizeof *total);
    for (int i = 0; i < count; i++) {
        fsdps[i]->call = call;
        dtrain_status status = fsdps[i]->broken.status != DTRAIN_OK
                                   ? dtrain__report(&fsdps[i]->broken)
                                   : dtrain__fsdp_leave(fsdps[i], dtrain__fsdp_measure(fsdps[i]));
        total->dropped += status != DTRAIN_OK;
        for (int k = 0; status == DTRAIN_OK && k < DTRAIN__NORM_LIMBS; k++)
            total->sum.limbs[k] += fsdps[i]->sum.limbs[k];
        if (status != DTRAIN_OK && first == DTRAIN_OK) {
            first = status;
            why = dtrain__thread_error;
        }
    }
    dtrain__norm_carry(&total->sum);
    return first == DTRAIN_OK ? first : dtrain__report(&why);
}

/* Another part of the model has dropped the step: so do the objects here that have not. */
static dtrain_status dtrain__fsdp_drop_all(dtrain_fsdp *const *fsdps, int count, int64_t dropped, const char *call)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; status == DTRAIN_OK && i < count; i++)
        if (fsdps[i]->broken.status == DTRAIN_OK && fsdps[i]->grads != NULL)
            status = dtrain_fsdp_drop(fsdps[i]);
    if (status != DTRAIN_OK)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_ABORTED,
                        "%s: %lld parts of the model have dropped the step, whose ranks say why: it is dropped on all, "
                        "the objects can be used",
                        call, (long long)dropped);
}

/* Measures and shortens the gradients of good objects as one vector. */
static dtrain_status dtrain__fsdp_clip(dtrain_fsdp *const *fsdps, int count, dtrain_comm *model, float max_norm,
                                       double *norm, const char *call)
{
    dtrain__fsdp_total total;
    dtrain_status status = DTRAIN_OK, mine = dtrain__fsdp_measure_all(fsdps, count, &total, call);
    dtrain__error why = dtrain__thread_error;
    if (model != NULL)
        status = dtrain_all_reduce(model, &total, &total, sizeof total / sizeof(int64_t), DTRAIN_I64, DTRAIN_SUM);
    if (status == DTRAIN_OK && total.dropped > 0)
        status = dtrain__fsdp_drop_all(fsdps, count, total.dropped, call);
    if (mine != DTRAIN_OK)
        return dtrain__report(&why);
    for (int i = 0; status == DTRAIN_OK && i < count; i++) {
        fsdps[i]->sum = total.sum;
        double length = dtrain__fsdp_shorten(fsdps[i], max_norm);
        if (norm != NULL)
            *norm = length;
        status = dtrain__fsdp_leave(fsdps[i], status);
    }
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_clip_grad_norm(dtrain_fsdp *fsdp, float max_norm, double *norm)
{
    const char *call = "dtrain_fsdp_clip_grad_norm";
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_norm(call, max_norm);
    if (status != DTRAIN_OK)
        return status;
    return norm == NULL && fsdp->device.queue != NULL
               ? dtrain__fsdp_leave(fsdp, dtrain__fsdp_shorten_unseen(fsdp, max_norm))
               : dtrain__fsdp_clip(&fsdp, 1, NULL, max_norm, norm, call);
}

DTRAIN_API dtrain_status dtrain_fsdp_clip_model_grad_norm(dtrain_fsdp *const *fsdps, int count, dtrain_comm *model,
                                                          float max_norm, double *norm)
{
    const char *call = "dtrain_fsdp_clip_model_grad_norm";
    if (fsdps == NULL || count < 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: expected at least one object, got %d at %p", call, count,
                            (const void *)fsdps);
    for (int i = 0; i < count; i++) {
        if (fsdps[i] == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: object %d of %d is NULL", call, i, count);
        for (int k = 0; k < i; k++)
            if (fsdps[k] == fsdps[i])
                return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                    "%s: objects %d and %d of %d are the same: give each once", call, k, i, count);
    }
    dtrain_status status = dtrain__fsdp_check_norm(call, max_norm);
    if (status != DTRAIN_OK)
        return status;
    if (model != NULL && dtrain__group_whole(model, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    return dtrain__fsdp_clip(fsdps, count, model, max_norm, norm, call);
}

#endif
