/* ---- >>fsdp-gather ----
 * Units in full: gathered, kept while there is room, dropped. What is started when depends on the caller's gathers and
 * releases alone, so that all ranks start the same operations in the same order. */
#ifndef DTRAIN__FSDP_GATHER
#define DTRAIN__FSDP_GATHER
#include "fsdp.c"

static dtrain_status dtrain__fsdp_advance(dtrain_fsdp *fsdp, int unit);
static dtrain_status dtrain__fsdp_left_out(dtrain_fsdp *fsdp, int unit);

/* Starts to gather one range. */
static dtrain_status dtrain__fsdp_gather_cut(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = fsdp->counts + index * (size_t)fsdp->layout.shards;
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    float *full = dtrain__fsdp_full(fsdp, cut);
    unsigned char *half = dtrain__fsdp_half(full, cut->count);
    if (cut->count == 0)
        return DTRAIN_OK;
    if (dtype == DTRAIN_F32)
        return dtrain_all_gather_v_async(fsdp->gathers, dtrain__fsdp_own(fsdp, cut), full, counts, NULL, DTRAIN_F32,
                                         &fsdp->gathering[index]);
    dtrain__fsdp_narrow(fsdp->masters + cut->weight, half + 2 * cut->own, cut->own_count, dtype);
    if (fsdp->gathers == NULL)
        return DTRAIN_OK;
    return dtrain_all_gather_v_async(fsdp->gathers, half + 2 * cut->own, half, counts, NULL, dtype,
                                     &fsdp->gathering[index]);
}

static dtrain_status dtrain__fsdp_gather_start(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->units[number];
    dtrain__fsdp_page_weights(fsdp, number, 1);
    unit->state = DTRAIN__COMING;
    for (size_t i = fsdp->layout.units[number].first; i < fsdp->layout.units[number].end; i++) {
        dtrain_status status = dtrain__fsdp_gather_cut(fsdp, i);
        if (status != DTRAIN_OK) {
            fsdp->gathering[i] = NULL;
            return dtrain__fsdp_break(fsdp, status, "starting to gather", number);
        }
    }
    return DTRAIN_OK;
}

static dtrain_status dtrain__fsdp_gather_finish(dtrain_fsdp *fsdp, int number)
{
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    dtrain_status status = dtrain__fsdp_wait_all(fsdp, fsdp->gathering, DTRAIN__LANE_GATHER, number);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = fsdp->layout.units[number].first; dtype != DTRAIN_F32 && i < fsdp->layout.units[number].end; i++)
        dtrain__fsdp_widen(dtrain__fsdp_full(fsdp, &fsdp->layout.cuts[i]), fsdp->layout.cuts[i].count, dtype);
    fsdp->units[number].state = DTRAIN__READY;
    fsdp->units[number].stale = 0;
    return DTRAIN_OK;
}

/* Forgets what was gathered of a unit. */
static dtrain_status dtrain__fsdp_gather_drop(dtrain_fsdp *fsdp, int number)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->units[number].state == DTRAIN__COMING)
        status = dtrain__fsdp_gather_finish(fsdp, number);
    if (status == DTRAIN_OK) {
        fsdp->units[number].state = DTRAIN__ABSENT;
        fsdp->units[number].stale = 0;
        dtrain__fsdp_page_weights(fsdp, number, 0);
    }
    return status;
}

/* Drops what was used longest ago until `number` has room among the units that rotate. *room: it has. */
static dtrain_status dtrain__fsdp_make_room(dtrain_fsdp *fsdp, int number, int *room)
{
    *room = 1;
    if (fsdp->keeps || fsdp->desc.no_reshard_after_forward || fsdp->layout.units[number].tied)
        return DTRAIN_OK;
    for (;;) {
        int rotating = 0, oldest = -1;
        for (int i = 0; i < fsdp->layout.unit_count; i++) {
            const dtrain__fsdp_unit *unit = &fsdp->units[i];
            if (i == number || unit->state == DTRAIN__ABSENT || fsdp->layout.units[i].tied)
                continue;
            rotating++;
            if (!unit->held && i != fsdp->last && (oldest < 0 || unit->used < fsdp->units[oldest].used))
                oldest = i;
        }
        *room = rotating < DTRAIN__FSDP_ROTATING;
        if (*room || oldest < 0)
            return DTRAIN_OK;
        dtrain_status status = dtrain__fsdp_gather_drop(fsdp, oldest);
        if (status != DTRAIN_OK)
            return status;
    }
}

/* Starts the unit that comes next, where there is room for it. */
static dtrain_status dtrain__fsdp_gather_ahead(dtrain_fsdp *fsdp, int number)
{
    int room;
    if (number < 0 || number >= fsdp->layout.unit_count || fsdp->units[number].state != DTRAIN__ABSENT)
        return DTRAIN_OK;
    dtrain_status status = dtrain__fsdp_make_room(fsdp, number, &room);
    if (status != DTRAIN_OK || !room)
        return status;
    fsdp->units[number].used = ++fsdp->clock;
    return dtrain__fsdp_gather_start(fsdp, number);
}

/* The direction in which a pass goes, by the unit before this one. */
static int dtrain__fsdp_direction(const dtrain_fsdp *fsdp, int unit)
{
    if (fsdp->last < 0 || unit > fsdp->last || (unit == 0 && fsdp->last > 1))
        return 1;
    return -1;
}

/* Notes that a unit is used, and where the pass is: on its way down gradients are computed. Returns the direction; 0: a
 * tied unit is used beside the one that is held, which is no turn of the pass. */
static int dtrain__fsdp_use(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->units[number];
    int beside =
        fsdp->layout.units[number].tied && fsdp->last >= 0 && fsdp->last != number && fsdp->units[fsdp->last].held;
    int direction = beside ? 0 : dtrain__fsdp_direction(fsdp, number);
    unit->held = unit->fresh = 1;
    unit->used = ++fsdp->clock;
    fsdp->last = beside ? fsdp->last : number;
    fsdp->prefetched = 0;
    if (direction < 0) {
        unit->backward = 1;
        dtrain__fsdp_page_grads(fsdp, number, 1);
    }
    return direction;
}

static dtrain_status dtrain__fsdp_gather_now(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_unit *unit = &fsdp->units[number];
    int room;
    dtrain_status status = dtrain__fsdp_advance(fsdp, number);
    if (status == DTRAIN_OK && (fsdp->reduced_units > 0 || fsdp->announced > fsdp->ended))
        status = dtrain__fsdp_left_out(fsdp, number);
    int direction = dtrain__fsdp_use(fsdp, number);
    if (status != DTRAIN_OK || fsdp->layout.resident)
        return status;
    if (unit->stale)
        status = dtrain__fsdp_gather_drop(fsdp, number);
    if (status == DTRAIN_OK && unit->state == DTRAIN__ABSENT)
        status = dtrain__fsdp_make_room(fsdp, number, &room);
    if (status == DTRAIN_OK && unit->state == DTRAIN__ABSENT)
        status = dtrain__fsdp_gather_start(fsdp, number);
    if (status == DTRAIN_OK && !fsdp->desc.no_prefetch && direction != 0)
        status = dtrain__fsdp_gather_ahead(fsdp, number + direction);
    if (status == DTRAIN_OK && unit->state == DTRAIN__COMING)
        status = dtrain__fsdp_gather_finish(fsdp, number);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_gather(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_gather", unit);
    return status == DTRAIN_OK ? dtrain__fsdp_leave(fsdp, dtrain__fsdp_gather_now(fsdp, unit)) : status;
}

static dtrain_status dtrain__fsdp_release_now(dtrain_fsdp *fsdp, int unit)
{
    fsdp->units[unit].held = 0;
    return fsdp->units[unit].stale ? dtrain__fsdp_gather_drop(fsdp, unit) : DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_release(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_release", unit);
    if (status != DTRAIN_OK)
        return status;
    if (!fsdp->units[unit].held)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_release: unit %d is not gathered on rank %d: gather it before each release",
                            unit, dtrain__fsdp_rank(fsdp));
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_release_now(fsdp, unit));
}

DTRAIN_API dtrain_status dtrain_fsdp_prefetch(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_prefetch", 0);
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->layout.resident)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_prefetch: this strategy keeps full parameters on rank %d and gathers nothing: "
                            "leave the call out",
                            dtrain__fsdp_rank(fsdp));
    if (fsdp->prefetched)
        return dtrain__fail(&fsdp->error, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_prefetch: called twice on rank %d without a forward pass in between: call it "
                            "once before each",
                            dtrain__fsdp_rank(fsdp));
    fsdp->prefetched = 1;
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_gather_ahead(fsdp, 0));
}

DTRAIN_API int dtrain_fsdp_prefetch_pending(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL && fsdp->prefetched;
}

#endif
