/* ---- >>ddp ----
 * Data-parallel training for a program with an optimizer of its own. It is an object of >>fsdp with strategy DDP, whose
 * sums go back to the table. Each rank folds its micro-batches in full and communicates once a step; >>reducer sends
 * compressed sums. */
#ifndef DTRAIN__DDP
#define DTRAIN__DDP
#include "ddp.h"
#include "fsdp_create.c"
#include "../tensor/pieces.c"

/* A dtrain_ddp is a dtrain_fsdp. */
static dtrain_fsdp *dtrain__ddp_fsdp(const dtrain_ddp *ddp)
{
    return (dtrain_fsdp *)(uintptr_t)ddp;
}

/* Begins a call between begin and finish. */
static dtrain_status dtrain__ddp_enter(dtrain_fsdp *fsdp, const char *call, int unit)
{
    if (fsdp != NULL && fsdp->exchange.announced < 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: no step is open: call dtrain_ddp_begin first", call);
    return dtrain__fsdp_enter(fsdp, call, unit);
}

DTRAIN_API dtrain_status dtrain_ddp_begin(dtrain_ddp *ddp, int micro_batches, double weight)
{
    return dtrain__fsdp_begin(dtrain__ddp_fsdp(ddp), micro_batches, weight, "dtrain_ddp_begin");
}

DTRAIN_API dtrain_status dtrain_ddp_reduce(dtrain_ddp *ddp, int unit)
{
    dtrain_fsdp *fsdp = dtrain__ddp_fsdp(ddp);
    dtrain_status status = dtrain__ddp_enter(fsdp, "dtrain_ddp_reduce", unit);
    if (status != DTRAIN_OK)
        return status;
    fsdp->state.units[unit].fresh = 1; /* DDP's parameters are always there */
    int last = fsdp->schedule.ended + 1 >= fsdp->exchange.announced;
    status = dtrain__fsdp_reduce_now(fsdp, unit, "dtrain_ddp_reduce");
    if (status == DTRAIN_OK && last)
        dtrain__fsdp_debug_note(fsdp, unit);
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API dtrain_status dtrain_ddp_next(dtrain_ddp *ddp)
{
    dtrain_status status = dtrain__ddp_enter(dtrain__ddp_fsdp(ddp), "dtrain_ddp_next", 0);
    return status == DTRAIN_OK ? dtrain__fsdp_next(dtrain__ddp_fsdp(ddp), "dtrain_ddp_next") : status;
}

DTRAIN_API dtrain_status dtrain_ddp_finish(dtrain_ddp *ddp, double *total_weight)
{
    dtrain_fsdp *fsdp = dtrain__ddp_fsdp(ddp);
    dtrain_status status = dtrain__ddp_enter(fsdp, "dtrain_ddp_finish", 0);
    if (fsdp == NULL || fsdp->exchange.announced < 0)
        return status;
    int begun = fsdp->schedule.ended + (fsdp->schedule.reduced_units > 0);
    if (status == DTRAIN_OK && fsdp->schedule.trained_units > 0 && begun < fsdp->exchange.announced)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_finish: %d of %d micro-batches were reduced on rank %d: reduce the rest, or "
                            "call dtrain_ddp_next for those that used no unit",
                            begun, fsdp->exchange.announced, dtrain__fsdp_rank(fsdp));
    dtrain__fsdp_debug_compare_all(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_finish_now(fsdp, 1);
    if (total_weight != NULL)
        *total_weight = fsdp->exchange.total_weight;
    for (size_t i = 0; status == DTRAIN_OK && fsdp->state.grads != NULL && i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (cut->trained && cut->count > 0)
            dtrain__fsdp_copy(fsdp, cut->grads, fsdp->state.slices[i].grads, cut->count);
    }
    if (status == DTRAIN_OK)
        dtrain__fsdp_reset(fsdp, 1);
    fsdp->exchange.announced = -1; /* the step is closed, also after an error */
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API dtrain_status dtrain_ddp_drop(dtrain_ddp *ddp)
{
    dtrain_fsdp *fsdp = dtrain__ddp_fsdp(ddp);
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_ddp_drop", 0);
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->exchange.announced >= 0)
        return dtrain__fsdp_abandon(fsdp, 0, "dtrain_ddp_drop");
    dtrain__reducer_undo(fsdp->reducer);
    return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
}

DTRAIN_API dtrain_status dtrain_ddp_create(dtrain_ddp **ddp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                           const dtrain_ddp_desc *desc)
{
    dtrain_fsdp *made = NULL;
    dtrain_fsdp_desc full;
    memset(&full, 0, sizeof full);
    full.strategy = DTRAIN_DDP;
    full.optimizer.kind = DTRAIN_OPTIMIZER_NONE;
    full.keep_full_grads = 1;
    if (desc != NULL) {
        full.no_broadcast = desc->no_broadcast;
        full.no_overlap = desc->no_overlap;
        full.bucket_bytes = desc->bucket_bytes;
        full.compress = desc->compress;
        full.check_every = desc->check_every;
        full.debug = desc->debug != 0;
    }
    dtrain_status status = dtrain__params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_grads(table, count, "dtrain_ddp_create");
    status = dtrain__fsdp_make(ddp != NULL ? &made : NULL, comm, table, count, &full, DTRAIN__FSDP_OF_DDP,
                               "dtrain_ddp_create", status);
    if (ddp != NULL)
        *ddp = (dtrain_ddp *)(void *)made;
    return status;
}

DTRAIN_API void dtrain_ddp_destroy(dtrain_ddp *ddp)
{
    dtrain_fsdp_destroy(dtrain__ddp_fsdp(ddp));
}

DTRAIN_API size_t dtrain_ddp_buckets(const dtrain_ddp *ddp, const dtrain_bucket **buckets)
{
    return dtrain_fsdp_buckets(dtrain__ddp_fsdp(ddp), buckets);
}

static dtrain_status dtrain__ddp_list(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_fsdp *fsdp = (const dtrain_fsdp *)list->object;
    dtrain__reducer_list(fsdp->reducer, &fsdp->layout, dtrain__fsdp_rank(fsdp), lister);
    return DTRAIN_OK;
}

/* Begins a load: an open step is given up. */
static dtrain_status dtrain__ddp_loading(const dtrain_pieces *list, int turn)
{
    dtrain_fsdp *fsdp = (dtrain_fsdp *)list->object;
    dtrain_status status = turn == 0 ? dtrain__fsdp_abandon(fsdp, 0, "dtrain_checkpoint_load") : DTRAIN_OK;
    if (status == DTRAIN_OK)
        dtrain__reducer_loading(fsdp->reducer);
    return status;
}

static dtrain_status dtrain__ddp_loaded(const dtrain_pieces *list, const dtrain__lister *lister)
{
    return dtrain__reducer_loaded(((dtrain_fsdp *)list->object)->reducer, lister);
}

DTRAIN_API dtrain_pieces dtrain_ddp_pieces(dtrain_ddp *ddp)
{
    dtrain_pieces made = dtrain__pieces_make(ddp, dtrain__ddp_list, dtrain__ddp_loaded);
    made.loading = dtrain__ddp_loading;
    return made;
}

#endif
