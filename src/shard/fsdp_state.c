/* ---- >>fsdp-state ----
 * Lists of an FSDP's state: weights, optimizer state, and what compression keeps. */
#ifndef DTRAIN__FSDP_STATE
#define DTRAIN__FSDP_STATE
#include "fsdp_create.c"
#include "../train/state.c"

/* Weights, or with which 0 or 1 the state, of an FSDP's slices. */
static void dtrain__fsdp_state_put(const dtrain_fsdp *fsdp, int which, dtrain__lister *lister)
{
    const dtrain__layout *layout = &fsdp->layout;
    for (size_t i = 0; i < layout->cut_count; i++) {
        const dtrain_slice *slice = &fsdp->slices[i];
        const dtrain_param *param = &layout->table[layout->cuts[i].param];
        if (slice->dtype != DTRAIN_F32 || (which >= 0 && !layout->cuts[i].trained))
            continue;
        dtrain_piece piece = dtrain__state_of(param, DTRAIN_F32, slice->layer);
        piece.suffix = which >= 0 ? dtrain__state_suffix(&fsdp->optimizer, which) : NULL;
        piece.begin = slice->begin;
        piece.count = slice->count;
        dtrain__state_copies(&piece, param, layout->copies, dtrain__fsdp_rank(fsdp) / layout->shards);
        if (layout->shards > 1 && piece.copies > layout->copies) {
            /* Slices of a unit depend on the sizes of all its ranges, which differ between these copies. */
            piece.copies = layout->copies;
            piece.copy = dtrain__fsdp_rank(fsdp) / layout->shards;
            piece.unsaved = param->part->copy > 0;
        }
        piece.data = which >= 0 ? slice->state[which] : slice->weights;
        dtrain__state_put_range(lister, param, &piece);
    }
    for (size_t i = 0; i < layout->table_count && which < 0; i++) {
        const dtrain_param *param = &layout->table[i];
        if (param->dtype == DTRAIN_F32) /* others are frozen, and in full on every rank */
            continue;
        dtrain_piece piece = dtrain__state_of(param, param->dtype, -1);
        dtrain__state_copies(&piece, param, dtrain_comm_size(fsdp->comm), dtrain__fsdp_rank(fsdp));
        piece.data = param->data;
        dtrain__state_put_range(lister, param, &piece);
    }
}

static dtrain_status dtrain__fsdp_state_list(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_fsdp *fsdp = (const dtrain_fsdp *)list->object;
    int floats = (int)dtrain__fsdp_plan_state_floats(&fsdp->optimizer);
    for (int which = -1; which < floats; which++)
        dtrain__fsdp_state_put(fsdp, which, lister);
    dtrain__reducer_list(fsdp->reducer, &fsdp->layout, dtrain__fsdp_rank(fsdp), lister);
    dtrain__state_tell(lister, &fsdp->optimizer, fsdp->step);
    if (fsdp->desc.loss_scale > 0.0f) {
        dtrain__pieces_tell_f64(lister, "loss_scale", (double)fsdp->loss_scale, 0);
        dtrain__pieces_tell_u64(lister, "good_steps", (uint64_t)fsdp->good_steps, 0);
    }
    return DTRAIN_OK;
}

/* Publishes new weights, which drops gradients, and sets counters. */
static dtrain_status dtrain__fsdp_state_loaded(const dtrain_pieces *list, const dtrain__lister *lister)
{
    dtrain_fsdp *fsdp = (dtrain_fsdp *)list->object;
    uint64_t step = fsdp->step, good_steps = (uint64_t)fsdp->good_steps;
    double scale = (double)fsdp->loss_scale;
    dtrain_status status = dtrain_fsdp_publish(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__pieces_ask(lister, "optimizer.step", UINT64_MAX, &step, NULL);
    if (status == DTRAIN_OK)
        status = dtrain__pieces_ask(lister, "good_steps", INT_MAX, &good_steps, NULL);
    if (status == DTRAIN_OK)
        status = dtrain__pieces_ask(lister, "loss_scale", 0, NULL, &scale);
    if (status != DTRAIN_OK)
        return status;
    fsdp->step = step;
    if (fsdp->desc.loss_scale > 0.0f && !(scale > 0.0 && dtrain__train_finite((double)(float)scale)))
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "checkpoint: loss_scale is %g, expected a number above 0", scale);
    if (fsdp->desc.loss_scale > 0.0f) {
        fsdp->loss_scale = (float)scale;
        fsdp->good_steps = (int)good_steps;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_pieces dtrain_fsdp_pieces(dtrain_fsdp *fsdp)
{
    return dtrain__pieces_make(fsdp, dtrain__fsdp_state_list, dtrain__fsdp_state_loaded);
}

#endif
