/* ---- >>ddp ----
 * Data-parallel training for a program with an optimizer of its own: FSDP's strategy DDP, whose sums go back to the
 * table. A rank's micro-batches are folded in full and communicated once, compressed where the desc says so: see
 * >>reducer. */
#ifndef DTRAIN__DDP
#define DTRAIN__DDP
#include "ddp.h"
#include "fsdp_create.c"
#include "../tensor/pieces.c"

struct dtrain_ddp {
    dtrain_fsdp *fsdp;
    dtrain_allocator *allocator;
    int open;
};

static dtrain_status dtrain__ddp_check_begin(const dtrain_ddp *ddp, int micro_batches, double weight)
{
    if (ddp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_begin: the ddp is NULL: create it first");
    if (ddp->open)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_begin: a step is open: call dtrain_ddp_finish before the next");
    if (micro_batches < 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_begin: micro_batches is %d, expected 0 or more",
                            micro_batches);
    if (!dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_begin: weight is %g, expected a number of at least 0",
                            weight);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_ddp_begin(dtrain_ddp *ddp, int micro_batches, double weight)
{
    dtrain_status status = dtrain__ddp_check_begin(ddp, micro_batches, weight);
    if (status != DTRAIN_OK)
        return status;
    dtrain__fsdp_zero_grads(ddp->fsdp);
    ddp->open = 1;
    return dtrain_fsdp_begin(ddp->fsdp, micro_batches, weight);
}

/* Says whether a call between begin and finish may go on. */
static dtrain_status dtrain__ddp_check_open(const dtrain_ddp *ddp, const char *call)
{
    if (ddp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the ddp is NULL: create it first", call);
    if (!ddp->open)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: no step is open: call dtrain_ddp_begin first", call);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_ddp_reduce(dtrain_ddp *ddp, int unit)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_reduce");
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_enter(ddp->fsdp, "dtrain_ddp_reduce", unit);
    if (status != DTRAIN_OK)
        return status;
    ddp->fsdp->units[unit].fresh = 1; /* it always lies there in full */
    int last = ddp->fsdp->ended + 1 >= ddp->fsdp->announced;
    status = dtrain__fsdp_reduce_now(ddp->fsdp, unit, "dtrain_ddp_reduce");
    if (status == DTRAIN_OK && last)
        dtrain__fsdp_debug_note(ddp->fsdp, unit);
    return dtrain__fsdp_leave(ddp->fsdp, status);
}

DTRAIN_API dtrain_status dtrain_ddp_next(dtrain_ddp *ddp)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_next");
    if (status == DTRAIN_OK && !ddp->fsdp->just_ended && ddp->fsdp->ended >= ddp->fsdp->announced)
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                              "dtrain_ddp_next: all %d micro-batches announced to dtrain_ddp_begin are over: announce "
                              "as many as you compute",
                              ddp->fsdp->announced);
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_next(ddp->fsdp);
    return status;
}

DTRAIN_API dtrain_status dtrain_ddp_finish(dtrain_ddp *ddp, double *total_weight)
{
    dtrain_status status = dtrain__ddp_check_open(ddp, "dtrain_ddp_finish");
    if (status != DTRAIN_OK)
        return status;
    dtrain_fsdp *fsdp = ddp->fsdp;
    int begun = fsdp->ended + (fsdp->reduced_units > 0);
    if (fsdp->broken.status == DTRAIN_OK && fsdp->trained_units > 0 && begun < fsdp->announced)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_ddp_finish: %d of %d micro-batches were reduced: reduce the rest, or call "
                            "dtrain_ddp_next for those that used no unit",
                            begun, fsdp->announced);
    ddp->open = 0;
    status = dtrain__fsdp_enter(fsdp, "dtrain_ddp_finish", 0);
    dtrain__fsdp_debug_compare_all(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_finish_now(fsdp, 1);
    if (total_weight != NULL)
        *total_weight = fsdp->total_weight;
    for (size_t i = 0; status == DTRAIN_OK && fsdp->grads != NULL && i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (cut->trained && cut->count > 0)
            dtrain__fsdp_copy(fsdp, cut->grads, fsdp->slices[i].grads, cut->count);
    }
    if (status == DTRAIN_OK)
        dtrain__fsdp_reset(fsdp);
    return dtrain__fsdp_leave(fsdp, status);
}

static dtrain_status dtrain__ddp_init(dtrain_ddp *ddp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                      const dtrain_ddp_desc *desc)
{
    dtrain_fsdp_desc full;
    size_t bytes;
    dtrain_status status = dtrain__params_check(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__params_check_f32(table, count);
    dtrain_param *copy = NULL;
    if (status == DTRAIN_OK && dtrain__mul_size(count, sizeof *copy, &bytes))
        copy = (dtrain_param *)dtrain__alloc(ddp->allocator, bytes);
    if (status == DTRAIN_OK && copy == NULL) /* the others are to hear of it */
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_ddp_create: no memory for %zu parameters", count);
    for (size_t i = 0; copy != NULL && i < count; i++) {
        copy[i] = table[i];
        copy[i].frozen = !dtrain__params_trained(&table[i]);
    }
    memset(&full, 0, sizeof full);
    full.strategy = DTRAIN_DDP;
    full.optimizer.kind = DTRAIN_OPTIMIZER_NONE;
    full.keep_full_grads = 1;
    full.no_broadcast = desc->no_broadcast;
    full.no_overlap = desc->no_overlap;
    full.bucket_bytes = desc->bucket_bytes;
    full.compress = desc->compress;
    full.check_every = desc->check_every;
    full.debug = desc->debug != 0;
    status =
        dtrain__fsdp_make(&ddp->fsdp, comm, copy != NULL ? copy : table, count, &full, 1, "dtrain_ddp_create", status);
    dtrain__free(ddp->allocator, copy);
    return status;
}

DTRAIN_API dtrain_status dtrain_ddp_create(dtrain_ddp **ddp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                           const dtrain_ddp_desc *desc)
{
    dtrain_ddp_desc full;
    memset(&full, 0, sizeof full);
    if (ddp == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_ddp_create: ddp and comm are needed, got NULL");
    *ddp = NULL;
    if (desc != NULL)
        full = *desc;
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain_ddp *made = (dtrain_ddp *)dtrain__alloc(allocator, sizeof *made);
    if (made == NULL) {
        dtrain_fsdp *none; /* the others are to hear of it */
        dtrain_status failed =
            dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_ddp_create: no memory for %zu bytes", sizeof *made);
        return dtrain__fsdp_make(&none, comm, table, count, NULL, 1, "dtrain_ddp_create", failed);
    }
    made->allocator = allocator;
    dtrain_status status = dtrain__ddp_init(made, comm, table, count, &full);
    if (status == DTRAIN_OK)
        *ddp = made;
    else
        dtrain__free(allocator, made);
    return status;
}

DTRAIN_API void dtrain_ddp_destroy(dtrain_ddp *ddp)
{
    if (ddp == NULL)
        return;
    dtrain_fsdp_destroy(ddp->fsdp);
    dtrain__free(ddp->allocator, ddp);
}

DTRAIN_API size_t dtrain_ddp_buckets(const dtrain_ddp *ddp, const dtrain_bucket **buckets)
{
    return dtrain_fsdp_buckets(ddp != NULL ? ddp->fsdp : NULL, buckets);
}

static dtrain_status dtrain__ddp_list(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_fsdp *fsdp = ((const dtrain_ddp *)list->object)->fsdp;
    dtrain__reducer_list(fsdp->reducer, &fsdp->layout, dtrain__fsdp_rank(fsdp), lister);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_pieces dtrain_ddp_pieces(dtrain_ddp *ddp)
{
    return dtrain__pieces_make(ddp, dtrain__ddp_list, NULL);
}

#endif
