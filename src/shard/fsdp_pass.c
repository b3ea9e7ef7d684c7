/* ---- >>fsdp-pass ----
 * Passes of a caller that names only the unit it comes to: forward_to releases the unit that it leaves, backward_to
 * reduces it. Also the calls that end or join a micro-batch, and those of modules and pipelines. */
#ifndef DTRAIN__FSDP_PASS
#define DTRAIN__FSDP_PASS
#include "fsdp_reduce.c"

/* Leaves the unit that the pass is at, if the caller has not left it already. */
static dtrain_status dtrain__fsdp_arrive(dtrain_fsdp *fsdp, const char *call)
{
    int unit = fsdp->schedule.at;
    fsdp->schedule.at = -1;
    if (unit < 0 || !fsdp->state.units[unit].held)
        return DTRAIN_OK;
    return fsdp->schedule.at_backward ? dtrain__fsdp_reduce_now(fsdp, unit, call)
                                      : dtrain__fsdp_release_now(fsdp, unit);
}

static dtrain_status dtrain__fsdp_go_to(dtrain_fsdp *fsdp, int unit, int backward, const char *call)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, unit);
    if (status != DTRAIN_OK)
        return status;
    int turns =
        backward && !fsdp->schedule.at_backward && fsdp->schedule.at == unit; /* at the top: its parameters stay */
    if (!turns)
        status = dtrain__fsdp_arrive(fsdp, call);
    if (status == DTRAIN_OK) /* with the direction given, going to a unit twice is no turn */
        status = dtrain__fsdp_gather_now(fsdp, unit, backward ? -1 : 1);
    if (status == DTRAIN_OK) {
        fsdp->schedule.at = unit;
        fsdp->schedule.at_backward = backward;
    }
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API dtrain_status dtrain_fsdp_forward_to(dtrain_fsdp *fsdp, int unit)
{
    return dtrain__fsdp_go_to(fsdp, unit, 0, "dtrain_fsdp_forward_to");
}

DTRAIN_API dtrain_status dtrain_fsdp_backward_to(dtrain_fsdp *fsdp, int unit)
{
    return dtrain__fsdp_go_to(fsdp, unit, 1, "dtrain_fsdp_backward_to");
}

static dtrain_status dtrain__fsdp_next(dtrain_fsdp *fsdp, const char *call)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, 0);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__fsdp_arrive(fsdp, call);
    if (status == DTRAIN_OK && !fsdp->schedule.just_ended) {
        status = dtrain__fsdp_check_open(fsdp, call);
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_check_left(fsdp, call);
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_end_micro_batch(fsdp);
    }
    fsdp->schedule.just_ended = 0;
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API dtrain_status dtrain_fsdp_next(dtrain_fsdp *fsdp)
{
    return dtrain__fsdp_next(fsdp, "dtrain_fsdp_next");
}

/* Joins a micro-batch. adds: 1 also takes part in its reductions; with keep_full_grads these come once a step. */
static dtrain_status dtrain__fsdp_join_now(dtrain_fsdp *fsdp, int adds)
{
    dtrain_status status = DTRAIN_OK;
    int units = fsdp->layout.unit_count;
    for (int i = 0; status == DTRAIN_OK && i < 2 * units; i++) {
        int unit = i < units ? i : 2 * units - 1 - i;
        status = dtrain__fsdp_gather_now(fsdp, unit, 0);
        if (status == DTRAIN_OK && i >= units && adds && fsdp->layout.units[unit].trained > 0)
            status = dtrain__fsdp_take(fsdp, unit, 1);
        fsdp->state.units[unit].fresh = fsdp->state.units[unit].backward = 0;
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_release_now(fsdp, unit);
    }
    if (status == DTRAIN_OK && adds) {
        fsdp->schedule.joined++;
        dtrain__fsdp_micro_batch_over(fsdp);
    }
    if (status == DTRAIN_OK)
        fsdp->schedule.just_ended = 0;
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_join(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_join", 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_arrive(fsdp, "dtrain_fsdp_join");
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_open(fsdp, "dtrain_fsdp_join");
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->schedule.reduced_units > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_join: rank %d has reduced %d of %d units of this micro-batch: go on with it, "
                            "or end it with dtrain_fsdp_next",
                            dtrain__fsdp_rank(fsdp), fsdp->schedule.reduced_units, fsdp->schedule.trained_units);
    int folded;
    status = dtrain__fsdp_folded(fsdp, &folded);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_join_now(fsdp,
                                       !fsdp->desc.keep_full_grads || fsdp->schedule.ended < (folded > 1 ? folded : 1));
    return dtrain__fsdp_leave(fsdp, status);
}

/* ---- for modules and pipelines, which order the passes ---- */

/* Makes the unit of a tied parameter readable, without a change to the direction of the pass. An earlier layer has
 * gathered it in most passes, so nothing is sent. adds: 1 also opens its gradients. */
static dtrain_status dtrain__fsdp_attend(dtrain_fsdp *fsdp, int unit, int adds)
{
    dtrain_status status = dtrain__fsdp_advance(fsdp, unit);
    if (status == DTRAIN_OK && adds)
        dtrain__fsdp_page_grads(fsdp, unit, 1);
    return status == DTRAIN_OK ? dtrain__fsdp_gather_whole(fsdp, unit) : status;
}

/* Leaves a unit in backward whose gradients come later. It does not count as left out. */
static dtrain_status dtrain__fsdp_put_off(dtrain_fsdp *fsdp, int unit)
{
    fsdp->state.units[unit].fresh = fsdp->state.units[unit].backward = 0;
    dtrain__fsdp_page_grads(fsdp, unit, 0);
    return dtrain_fsdp_release(fsdp, unit);
}

/* Reports the failure that broke the object, if any; NULL is not broken. */
static dtrain_status dtrain__fsdp_broken(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL && fsdp->broken.status != DTRAIN_OK ? dtrain__report(&fsdp->broken) : DTRAIN_OK;
}

/* Breaks the object with the failure of its pipeline, unless it is broken already. */
static void dtrain__fsdp_break_with(dtrain_fsdp *fsdp, const char *call, const dtrain__error *cause)
{
    if (fsdp == NULL || fsdp->broken.status != DTRAIN_OK)
        return;
    dtrain__fail(&fsdp->broken, dtrain__fsdp_told(cause->status), "%s on rank %d: its pipeline has broken off: %s",
                 call, dtrain__fsdp_rank(fsdp), dtrain__status_cause(cause));
    dtrain__fsdp_break_groups(fsdp);
}

#endif
