/* ---- >>fsdp-gather ----
 * Units in full: gathered, kept while there is room, dropped. The caller's gathers and releases alone decide which
 * operation starts when. So all ranks start the same operations in the same order. */
#ifndef DTRAIN__FSDP_GATHER
#define DTRAIN__FSDP_GATHER
#include "fsdp_debug.c"
#include "fsdp_device.c"
#include "fsdp_quantise.c"

static dtrain_status dtrain__fsdp_advance(dtrain_fsdp *fsdp, int unit);
static dtrain_status dtrain__fsdp_left_out(dtrain_fsdp *fsdp, int unit);

/* Starts to gather one range. */
static dtrain_status dtrain__fsdp_gather_cut(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = fsdp->state.counts + index * (size_t)fsdp->layout.shards;
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    float *full = cut->data;
    unsigned char *half = dtrain__fsdp_half(full, cut->count);
    if (cut->count == 0)
        return DTRAIN_OK;
    if (cut->codes)
        return dtrain__fsdp_code_gather(fsdp, index);
    if (dtype == DTRAIN_F32)
        return dtrain__all_gather_v(fsdp->gathers, dtrain__fsdp_own(fsdp, cut), full, counts, NULL, DTRAIN_F32,
                                    &fsdp->schedule.gathering[index]);
    dtrain__fsdp_convert(fsdp, fsdp->state.masters + cut->weight, DTRAIN_F32, half + 2 * cut->own, dtype,
                         cut->own_count);
    if (fsdp->gathers == NULL)
        return DTRAIN_OK;
    return dtrain__all_gather_v(fsdp->gathers, half + 2 * cut->own, half, counts, NULL, dtype,
                                &fsdp->schedule.gathering[index]);
}

static dtrain_status dtrain__fsdp_gather_finish(dtrain_fsdp *fsdp, int number);

/* Takes the stage of a unit. If another unit is being gathered by way of it, that gather ends first. */
static dtrain_status dtrain__fsdp_gather_stage(dtrain_fsdp *fsdp, int number)
{
    int other = fsdp->schedule.staged[number % 2];
    dtrain_status status = DTRAIN_OK;
    if ((fsdp->layout.units[number].packed == 0 || fsdp->layout.stage == 0) && fsdp->layout.code_stage == 0)
        return DTRAIN_OK;
    if (other >= 0 && other != number && fsdp->state.units[other].state == DTRAIN__FSDP_WEIGHTS_GATHERING)
        status = dtrain__fsdp_gather_finish(fsdp, other);
    fsdp->schedule.staged[number % 2] = number;
    return status;
}

/* Says whether a unit is gathered straight into place: on a device, if it is one piece and travels as float32. */
static int dtrain__fsdp_gathers_straight(const dtrain_fsdp *fsdp, int number)
{
    return fsdp->layout.units[number].whole[0] && fsdp->desc.gather_dtype == DTRAIN_F32;
}

/* Starts to gather the small ranges of a unit together, on a device all ranges. */
static dtrain_status dtrain__fsdp_gather_packed(dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    size_t width = dtype == DTRAIN_F32 ? 4 : 2, begin, first = unit->end;
    const size_t *counts = dtrain__fsdp_packed(fsdp, number, 0, &begin);
    int straight = dtrain__fsdp_gathers_straight(fsdp, number);
    unsigned char *all =
        straight ? (unsigned char *)(fsdp->device.blocks[0] + unit->place[0]) : dtrain__fsdp_stage(fsdp, number % 2);
    if (unit->packed == 0)
        return DTRAIN_OK;
    const void *mine = straight && fsdp->layout.apart ? fsdp->state.masters + fsdp->layout.cuts[unit->first].weight
                                                      : (const void *)(all + begin * width);
    for (size_t i = unit->end; i-- > unit->first && !straight;) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (!cut->packed)
            continue;
        first = i;
        dtrain__fsdp_convert(fsdp, dtrain__fsdp_own(fsdp, cut), DTRAIN_F32, all + (cut->stage + cut->own) * width,
                             dtype, cut->own_count);
    }
    if (fsdp->gathers == NULL)
        return DTRAIN_OK;
    return fsdp->device.queue != NULL
               ? dtrain__async_start_v(fsdp->device.groups[DTRAIN__FSDP_GATHERS], DTRAIN__ALL_GATHER, mine, all, counts,
                                       dtype, (dtrain_op)0, &fsdp->device.works[DTRAIN__FSDP_GATHERS][number])
               : dtrain__all_gather_v(fsdp->gathers, mine, all, counts, NULL, dtype, &fsdp->schedule.gathering[first]);
}

static dtrain_status dtrain__fsdp_gather_start(dtrain_fsdp *fsdp, int number)
{
    dtrain__fsdp_debug_set(fsdp, number, 0, 1);
    dtrain__fsdp_page_weights(fsdp, number, 1);
    fsdp->state.units[number].state = DTRAIN__FSDP_WEIGHTS_GATHERING;
    dtrain_status status = dtrain__fsdp_gather_stage(fsdp, number);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_gather_packed(fsdp, number);
    for (size_t i = fsdp->layout.units[number].first; status == DTRAIN_OK && i < fsdp->layout.units[number].end; i++)
        if (!fsdp->layout.cuts[i].packed)
            status = dtrain__fsdp_gather_cut(fsdp, i);
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, "starting to gather", number);
}

static dtrain_status dtrain__fsdp_gather_finish(dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout_unit *unit = &fsdp->layout.units[number];
    const unsigned char *stage = dtrain__fsdp_stage(fsdp, number % 2);
    dtrain_dtype dtype = fsdp->desc.gather_dtype;
    size_t width = dtype == DTRAIN_F32 ? 4 : 2;
    dtrain_status status =
        fsdp->device.queue != NULL
            ? dtrain__fsdp_device_wait(fsdp, DTRAIN__FSDP_GATHERS, number, number)
            : dtrain__fsdp_wait_all(fsdp, fsdp->schedule.gathering, DTRAIN__FSDP_LANE_GATHER, number);
    if (status != DTRAIN_OK)
        return status;
    for (size_t i = unit->first; i < unit->end && !dtrain__fsdp_gathers_straight(fsdp, number); i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (cut->packed)
            dtrain__fsdp_convert(fsdp, stage + cut->stage * width, dtype, cut->data, DTRAIN_F32, cut->count);
        else if (cut->codes)
            dtrain__fsdp_code_gathered(fsdp, i);
        else if (dtype != DTRAIN_F32)
            dtrain__fsdp_widen(cut->data, cut->count, dtype);
    }
    fsdp->state.units[number].state = DTRAIN__FSDP_WEIGHTS_READY;
    fsdp->state.units[number].stale = 0;
    if (!fsdp->state.units[number].held && !dtrain__fsdp_debug_stays(fsdp))
        dtrain__fsdp_debug_set(fsdp, number, 0, 0);
    return DTRAIN_OK;
}

/* Starts to gather a unit if it is absent, ends the gather, and makes the unit readable. */
static dtrain_status dtrain__fsdp_gather_whole(dtrain_fsdp *fsdp, int number)
{
    dtrain_status status = DTRAIN_OK;
    if (!fsdp->layout.resident && fsdp->state.units[number].state == DTRAIN__FSDP_WEIGHTS_ABSENT)
        status = dtrain__fsdp_gather_start(fsdp, number);
    if (status == DTRAIN_OK && fsdp->state.units[number].state == DTRAIN__FSDP_WEIGHTS_GATHERING)
        status = dtrain__fsdp_gather_finish(fsdp, number);
    if (status == DTRAIN_OK)
        dtrain__fsdp_debug_set(fsdp, number, 0, 1);
    return status;
}

/* Ends all gathers under way. They read slices, which the caller is about to write. */
static dtrain_status dtrain__fsdp_gather_end(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; status == DTRAIN_OK && i < fsdp->layout.unit_count; i++)
        if (fsdp->state.units[i].state == DTRAIN__FSDP_WEIGHTS_GATHERING)
            status = dtrain__fsdp_gather_finish(fsdp, i);
    return status;
}

/* Drops a unit's gathered parameters. */
static dtrain_status dtrain__fsdp_gather_drop(dtrain_fsdp *fsdp, int number)
{
    dtrain_status status = DTRAIN_OK;
    if (fsdp->state.units[number].state == DTRAIN__FSDP_WEIGHTS_GATHERING)
        status = dtrain__fsdp_gather_finish(fsdp, number);
    if (status == DTRAIN_OK) {
        fsdp->state.units[number].state = DTRAIN__FSDP_WEIGHTS_ABSENT;
        fsdp->state.units[number].stale = 0;
        dtrain__fsdp_debug_set(fsdp, number, 0, 1);
        dtrain__fsdp_page_weights(fsdp, number, 0);
        dtrain__fsdp_debug_set(fsdp, number, 0, 0);
    }
    return status;
}

/* Drops the unit that is in the place of `number`. Sets *room to 0 if that unit is held. */
static dtrain_status dtrain__fsdp_device_make_room(dtrain_fsdp *fsdp, int number, int *room)
{
    dtrain_status status = DTRAIN_OK;
    *room = 1;
    for (int i = 0; i < fsdp->layout.unit_count && status == DTRAIN_OK; i++) {
        if (i == number || !dtrain__fsdp_share_place(fsdp, i, number, 0) ||
            fsdp->state.units[i].state == DTRAIN__FSDP_WEIGHTS_ABSENT)
            continue;
        if (!fsdp->state.units[i].held)
            status = dtrain__fsdp_gather_drop(fsdp, i);
        else
            *room = 0;
    }
    return status;
}

/* Drops the units used longest ago until there is room for `number`. Sets *room to 0 if held units leave none. */
static dtrain_status dtrain__fsdp_make_room(dtrain_fsdp *fsdp, int number, int *room)
{
    if (fsdp->device.queue != NULL)
        return dtrain__fsdp_device_make_room(fsdp, number, room);
    *room = 1;
    if (fsdp->schedule.keeps || fsdp->desc.no_reshard_after_forward || fsdp->layout.units[number].tied)
        return DTRAIN_OK;
    for (;;) {
        int rotating = 0, oldest = -1;
        for (int i = 0; i < fsdp->layout.unit_count; i++) {
            const dtrain__fsdp_unit *unit = &fsdp->state.units[i];
            if (i == number || unit->state == DTRAIN__FSDP_WEIGHTS_ABSENT || fsdp->layout.units[i].tied)
                continue;
            rotating++;
            if (!unit->held && i != fsdp->schedule.last && (oldest < 0 || unit->used < fsdp->state.units[oldest].used))
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

/* Starts to gather the unit that comes next, if there is room for it. */
static dtrain_status dtrain__fsdp_gather_ahead(dtrain_fsdp *fsdp, int number)
{
    int room;
    if (number < 0 || number >= fsdp->layout.unit_count ||
        fsdp->state.units[number].state != DTRAIN__FSDP_WEIGHTS_ABSENT || fsdp->desc.debug)
        return DTRAIN_OK;
    dtrain_status status = dtrain__fsdp_make_room(fsdp, number, &room);
    if (status != DTRAIN_OK || !room)
        return status;
    fsdp->state.units[number].used = ++fsdp->schedule.clock;
    return dtrain__fsdp_gather_start(fsdp, number);
}

/* Returns the direction of a pass, by the unit before this one: 1 up, -1 down. The same unit again is the turn at the
 * top, unless the pass was on its way down. Unit 0 after a unit on its way up begins another pass. */
static int dtrain__fsdp_direction(const dtrain_fsdp *fsdp, int unit)
{
    int last = fsdp->schedule.last;
    if (last < 0 || unit > last)
        return 1;
    int rising = fsdp->state.units[last].fresh && !fsdp->state.units[last].backward;
    return unit == last ? (rising ? -1 : 1) : (unit == 0 && rising ? 1 : -1);
}

/* Notes that a unit is used, and where the pass is. On the way down gradients are computed.
 *
 *   toward    the direction, if the caller gave it; else 0
 *   returns   the direction; 0 for a tied unit that is used beside the held one, which is no turn of the pass */
static int dtrain__fsdp_use(dtrain_fsdp *fsdp, int number, int toward)
{
    dtrain__fsdp_unit *unit = &fsdp->state.units[number];
    int beside = toward == 0 && fsdp->layout.units[number].tied && fsdp->schedule.last >= 0 &&
                 fsdp->schedule.last != number && fsdp->state.units[fsdp->schedule.last].held;
    int direction = beside ? 0 : toward != 0 ? toward : dtrain__fsdp_direction(fsdp, number);
    if (direction > 0 && fsdp->schedule.last >= 0 && number > fsdp->schedule.last && fsdp->schedule.reduced_units == 0)
        fsdp->state.units[fsdp->schedule.last].backward = 0; /* it was gathered twice on the way up: that was no turn */
    unit->held = unit->fresh = 1;
    unit->used = ++fsdp->schedule.clock;
    fsdp->schedule.last = beside ? fsdp->schedule.last : number;
    if (direction != 0)
        unit->backward = direction < 0;
    /* tied parameters get a gradient from the head, before the pass has come back to their own layer */
    if (direction < 0 || fsdp->layout.units[number].tied)
        dtrain__fsdp_page_grads(fsdp, number, 1);
    dtrain__fsdp_debug_set(fsdp, number, 1, 1);
    return direction;
}

/* Checks that no held unit has the place of this one. */
static dtrain_status dtrain__fsdp_check_place(dtrain_fsdp *fsdp, int number)
{
    const dtrain__layout_unit *units = fsdp->layout.units;
    for (int i = 0; units[number].floats[0] > 0 && i < fsdp->layout.unit_count; i++)
        if (i != number && dtrain__fsdp_share_place(fsdp, i, number, 0) && units[i].floats[0] > 0 &&
            fsdp->state.units[i].held && fsdp->state.units[i].state != DTRAIN__FSDP_WEIGHTS_ABSENT)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "%s: unit %d lies where unit %d does, which rank %d holds: release that first, or set "
                                "no_reshard_after_forward",
                                fsdp->call, number, i, dtrain__fsdp_rank(fsdp));
    return DTRAIN_OK;
}

/* Gathers a unit, and starts the next one; toward: as in dtrain__fsdp_use. */
static dtrain_status dtrain__fsdp_gather_now(dtrain_fsdp *fsdp, int number, int toward)
{
    dtrain__fsdp_unit *unit = &fsdp->state.units[number];
    int room;
    dtrain_status status = dtrain__fsdp_check_place(fsdp, number);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__fsdp_advance(fsdp, number);
    /* in a program that opens steps, a pass outside of them computes no gradients */
    int computes =
        fsdp->schedule.reduced_units > 0 || !fsdp->exchange.begins || fsdp->exchange.announced > fsdp->schedule.ended;
    if (status == DTRAIN_OK && computes)
        status = dtrain__fsdp_left_out(fsdp, number);
    int direction = dtrain__fsdp_use(fsdp, number, toward);
    if (computes && direction > 0) /* a pass on its way down may still come to units without gradients */
        fsdp->schedule.just_ended = 0;
    if (status != DTRAIN_OK || fsdp->layout.resident)
        return status;
    if (unit->stale)
        status = dtrain__fsdp_gather_drop(fsdp, number);
    if (status == DTRAIN_OK && unit->state == DTRAIN__FSDP_WEIGHTS_ABSENT)
        status = dtrain__fsdp_make_room(fsdp, number, &room);
    if (status == DTRAIN_OK && unit->state == DTRAIN__FSDP_WEIGHTS_ABSENT)
        status = dtrain__fsdp_gather_start(fsdp, number);
    if (status == DTRAIN_OK && !fsdp->desc.no_prefetch && direction != 0)
        status = dtrain__fsdp_gather_ahead(fsdp, number + direction);
    return status == DTRAIN_OK ? dtrain__fsdp_gather_whole(fsdp, number) : status;
}

DTRAIN_API dtrain_status dtrain_fsdp_gather(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_gather", unit);
    return status == DTRAIN_OK ? dtrain__fsdp_leave(fsdp, dtrain__fsdp_gather_now(fsdp, unit, 0)) : status;
}

static dtrain_status dtrain__fsdp_release_now(dtrain_fsdp *fsdp, int unit)
{
    fsdp->state.units[unit].held = 0;
    if (!dtrain__fsdp_debug_stays(fsdp))
        dtrain__fsdp_debug_set(fsdp, unit, 0, 0);
    return fsdp->state.units[unit].stale ? dtrain__fsdp_gather_drop(fsdp, unit) : DTRAIN_OK;
}

/* Begins a public call on a unit that must be held. `before` ends the error text: what to do after gathering. */
static dtrain_status dtrain__fsdp_enter_held(dtrain_fsdp *fsdp, const char *call, int unit, const char *before)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, unit);
    if (status != DTRAIN_OK || fsdp->state.units[unit].held)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: unit %d is not gathered on rank %d: gather it%s", call, unit,
                        dtrain__fsdp_rank(fsdp), before);
}

DTRAIN_API dtrain_status dtrain_fsdp_release(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter_held(fsdp, "dtrain_fsdp_release", unit, " before each release");
    return status == DTRAIN_OK ? dtrain__fsdp_leave(fsdp, dtrain__fsdp_release_now(fsdp, unit)) : status;
}

#endif
