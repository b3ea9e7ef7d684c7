/* ---- >>fsdp-step ----
 * From sums to new weights: announcements, the division, the norm, the update of this rank's slices, and publishing
 * them. The sum for a model's norm also tells all its parts whether one of them has dropped its step. */
#ifndef DTRAIN__FSDP_STEP
#define DTRAIN__FSDP_STEP
#include "fsdp_pass.c"
#include "fsdp_drift.c"

/* Sets gradients in the caller's memory to zero. Reserved pages are zeros already. */
static void dtrain__fsdp_zero_grads(dtrain_fsdp *fsdp)
{
    for (size_t i = 0; i < fsdp->layout.table_count; i++) {
        const dtrain_param *param = &fsdp->layout.table[i];
        const float zero = 0.0f;
        if (param->grad != NULL && !(fsdp->state.reserved[i] & 2))
            dtrain__fsdp_queued(fsdp, dtrain_device_fill(fsdp->device.queue, param->grad, &zero, sizeof zero,
                                                         dtrain_param_elements(param)));
    }
}

static dtrain_status dtrain__fsdp_begin(dtrain_fsdp *fsdp, int micro_batches, double weight, const char *call)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, 0);
    if (status != DTRAIN_OK)
        return status;
    int rank = dtrain__fsdp_rank(fsdp), ranks = dtrain_comm_size(fsdp->comm);
    if (fsdp->exchange.announced >= 0 || fsdp->schedule.ended > 0 || fsdp->schedule.reduced_units > 0 ||
        fsdp->state.grads != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: a step is open on rank %d: end it with %s first", call, rank,
                            fsdp->ddp ? "dtrain_ddp_finish"
                                      : "dtrain_fsdp_step, dtrain_fsdp_publish or dtrain_fsdp_drop");
    dtrain__reducer_end_step(fsdp->reducer, 0); /* the step before can no longer be taken back */
    if (micro_batches < 0 || !dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: micro_batches is %d and weight %g on rank %d: expected finite numbers of at least 0",
                            call, micro_batches, weight, rank);
    if (fsdp->ddp)
        dtrain__fsdp_zero_grads(fsdp);
    fsdp->exchange.begins = 1;
    fsdp->exchange.announced = micro_batches;
    fsdp->exchange.announcement[0] = (double)micro_batches;
    fsdp->exchange.announcement[1] = weight;
    if (fsdp->world != NULL)
        status = dtrain_all_gather_async(fsdp->world, fsdp->exchange.announcement, fsdp->exchange.announcements,
                                         2 * (size_t)ranks, DTRAIN_F64, &fsdp->exchange.announcing);
    if (status != DTRAIN_OK) {
        fsdp->exchange.announcing = NULL;
        status = dtrain__fsdp_break(fsdp, status, "announcing a step", -1);
    }
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API dtrain_status dtrain_fsdp_begin(dtrain_fsdp *fsdp, int micro_batches, double weight)
{
    return dtrain__fsdp_begin(fsdp, micro_batches, weight, "dtrain_fsdp_begin");
}

/* Ends the micro-batches of one round. This rank adds nothing for units that it has not reduced. */
static dtrain_status dtrain__fsdp_end_round(dtrain_fsdp *fsdp)
{
    int folded;
    dtrain_status status = dtrain__fsdp_folded(fsdp, &folded);
    int end = !fsdp->desc.keep_full_grads ? fsdp->schedule.ended + 1 : folded > 1 ? folded : 1;
    while (status == DTRAIN_OK && fsdp->schedule.ended < end)
        status = dtrain__fsdp_end_micro_batch(fsdp);
    return status;
}

/* Forgets the step's gradients. applied: they have gone into the weights; else it is as if the step had never been. */
static void dtrain__fsdp_reset(dtrain_fsdp *fsdp, int applied)
{
    dtrain__reducer_end_step(fsdp->reducer, applied);
    for (int i = 0; i < fsdp->layout.unit_count; i++) {
        dtrain__fsdp_page_grads(fsdp, i, 0);
        fsdp->state.units[i].reduced = fsdp->state.units[i].backward = 0;
    }
    for (size_t i = 0; i < fsdp->layout.cut_count; i++)
        fsdp->state.slices[i].grads = NULL;
    memset(&fsdp->exchange.note, 0, sizeof fsdp->exchange.note);
    fsdp->state.grads = NULL;
    fsdp->figures.buckets_old = 1;
    fsdp->exchange.announced = fsdp->schedule.last = -1;
    fsdp->schedule.ended = fsdp->schedule.round = fsdp->exchange.called = fsdp->schedule.joined = 0;
    fsdp->schedule.reduced_units = fsdp->schedule.just_ended = fsdp->scaling.summed = fsdp->scaling.agreed = 0;
    fsdp->schedule.turn = fsdp->layout.unit_count - 1;
    dtrain__fsdp_between(fsdp);
}

/* Forgets gradients before a step is complete, also those that were computed and never reduced, of units that may still
 * be held. It goes unit by unit, because units share places on a device. */
static void dtrain__fsdp_wipe(dtrain_fsdp *fsdp)
{
    for (int i = 0; i < fsdp->layout.unit_count; i++)
        dtrain__fsdp_page_grads(fsdp, i, 0);
    for (int i = 0; i < fsdp->layout.unit_count; i++) {
        if (fsdp->state.units[i].fresh)
            dtrain__fsdp_page_grads(fsdp, i, 1);
        dtrain__fsdp_page_grads(fsdp, i, 0);
    }
    dtrain__fsdp_reset(fsdp, 0);
}

/* Ends all rounds of a step. A rank adds nothing to rounds that only others have begun. Sets *most to the most
 * micro-batches that one rank has begun. */
static dtrain_status dtrain__fsdp_complete(dtrain_fsdp *fsdp, int *most)
{
    int ranks = dtrain_comm_size(fsdp->comm);
    dtrain_status status = dtrain__fsdp_arrive(fsdp, "dtrain_fsdp_finish");
    int begins = fsdp->schedule.reduced_units > 0;
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_announced(fsdp);
    fsdp->exchange.note.begun = (uint64_t)fsdp->schedule.ended + (uint64_t)begins;
    begins |= fsdp->desc.keep_full_grads && fsdp->schedule.ended > 0;
    for (int goes_on = 1; status == DTRAIN_OK && goes_on; begins = goes_on) {
        status = begins ? dtrain__fsdp_end_round(fsdp) : DTRAIN_OK;
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_send_note(fsdp, 0);
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_settle_and_recv(fsdp);
        goes_on = 0;
        for (int rank = 0; rank < ranks; rank++)
            goes_on |= fsdp->exchange.notes[rank].rounds > (uint64_t)fsdp->schedule.round;
    }
    *most = 0;
    for (int rank = 0; rank < ranks; rank++)
        if (fsdp->exchange.notes[rank].begun > (uint64_t)*most)
            *most = fsdp->exchange.notes[rank].begun < INT_MAX ? (int)fsdp->exchange.notes[rank].begun : INT_MAX;
    return status == DTRAIN_OK ? dtrain__fsdp_settle_all(fsdp) : status;
}

/* Checks that a step can be applied. The result is the same on every rank. */
static dtrain_status dtrain__fsdp_verdict(dtrain_fsdp *fsdp, int most)
{
    for (int rank = 0; rank < dtrain_comm_size(fsdp->comm); rank++) {
        const dtrain__fsdp_note *note = &fsdp->exchange.notes[rank];
        if (note->failed)
            return dtrain__fail(NULL, DTRAIN_ERR_ABORTED,
                                "%s: rank %d could not go on%s%.*s: its gradients are dropped on all ranks, the object "
                                "can be used",
                                fsdp->call, rank, note->why[0] != 0 ? ": " : "", DTRAIN__FSDP_WHY - 1, note->why);
    }
    if (fsdp->freezes && !(fsdp->exchange.total_weight > 0.0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: the weights of all ranks are 0, and with compress.adam m is averaged by them: give "
                            "dtrain_fsdp_begin the number of examples",
                            fsdp->call);
    int trains = fsdp->schedule.trained_units > 0; /* trained parameters may have no elements, such as an empty part */
    for (size_t i = 0; i < fsdp->layout.table_count && fsdp->schedule.trained_units == 0; i++)
        trains |= !fsdp->layout.table[i].frozen;
    if (trains && (most > 0 || fsdp->schedule.trained_units == 0))
        return DTRAIN_OK;
    return dtrain__fail(
        NULL, DTRAIN_ERR_INVALID,
        "%s: no rank has reduced a gradient: call dtrain_fsdp_reduce for each unit first; the object can be "
        "used",
        fsdp->call);
}

/* Adds up the levels and divides once. */
static void dtrain__fsdp_divide(dtrain_fsdp *fsdp)
{
    double divisor =
        (fsdp->exchange.total_weight > 0.0 ? fsdp->exchange.total_weight : 1.0) * (double)fsdp->scaling.loss_scale;
    uint64_t mode = dtrain__fpmode_enter();
    unsigned left = (unsigned)fsdp->schedule.round, low = left & (~left + 1u);
    float *sum = fsdp->state.parts.levels[low > 0 ? dtrain__terms_level(low - 1) : 0]; /* no round: an empty sum */
    dtrain__fsdp_queued(
        fsdp, dtrain__terms_add(&fsdp->state.parts, left & ~low, 0, sum, sum, fsdp->layout.grads, fsdp->device.queue));
    if (!fsdp->in_place)
        dtrain__fsdp_divide_by(fsdp, sum, divisor, fsdp->layout.grads);
    fsdp->state.grads = sum;
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (cut->trained && fsdp->in_place)
            dtrain__fsdp_divide_by(fsdp, cut->grads, divisor, cut->count);
        if (cut->trained)
            fsdp->state.slices[i].grads = fsdp->in_place ? cut->grads : sum + cut->grad;
    }
    dtrain__fpmode_restore(mode);
}

/* Finishes a step, after which slices may be written. idle: a step without micro-batches on any rank is no error, and
 * leaves no sums. */
static dtrain_status dtrain__fsdp_finish_now(dtrain_fsdp *fsdp, int idle)
{
    int most = 0;
    if (fsdp->state.grads != NULL)
        return dtrain__fsdp_gather_end(fsdp);
    fsdp->exchange.note.weights =
        fsdp->desc.check_every < 0 || fsdp->copies == NULL ? 0 : dtrain__fsdp_drift_hash(fsdp);
    dtrain_status status = dtrain__fsdp_complete(fsdp, &most);
    if (status == DTRAIN_OK && idle && (most == 0 || fsdp->schedule.trained_units == 0))
        return DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_gather_end(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_verdict(fsdp, most);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_drift_verdict(fsdp);
    if (status == DTRAIN_OK)
        dtrain__fsdp_divide(fsdp);
    else if (fsdp->broken.status == DTRAIN_OK)
        dtrain__fsdp_wipe(fsdp);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_finish(dtrain_fsdp *fsdp, double *total_weight)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_finish", 0);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__fsdp_finish_now(fsdp, 0);
    if (total_weight != NULL)
        *total_weight = fsdp->exchange.total_weight;
    return dtrain__fsdp_leave(fsdp, status);
}

/* Updates this rank's slices. */
static void dtrain__fsdp_update(dtrain_fsdp *fsdp, float lr)
{
    fsdp->step++;
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        const dtrain_slice *slice = &fsdp->state.slices[i];
        dtrain_optimizer_desc desc = fsdp->optimizer;
        float rate = lr * fsdp->state.lr_factors[cut->param];
        if (!cut->trained || cut->own_count == 0)
            continue;
        desc.weight_decay = fsdp->state.decays[cut->param];
        if (fsdp->freezes && fsdp->step > fsdp->freeze_step && !fsdp->layout.table[cut->param].dense) {
            dtrain__optimizer_adamw_frozen(slice->weights, slice->grads, slice->state[0], slice->state[1],
                                           cut->own_count, &desc, rate, fsdp->step, fsdp->freeze_step);
            continue;
        }
        dtrain__fsdp_queued(fsdp,
                            desc.kind == DTRAIN_ADAMW
                                ? dtrain_device_adamw(fsdp->device.queue, slice->weights, slice->grads, slice->state[0],
                                                      slice->state[1], cut->own_count, &desc, rate, fsdp->step, NULL)
                                : dtrain_device_sgd(fsdp->device.queue, slice->weights, slice->grads, slice->state[0],
                                                    cut->own_count, &desc, rate, NULL));
    }
}

/* Drops gathered parameters of the older weights; under strategies that keep full parameters, gathers the new ones. */
static dtrain_status dtrain__fsdp_publish_now(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    int units = fsdp->layout.unit_count,
        gathers = fsdp->layout.resident && (fsdp->gathers != NULL || fsdp->layout.apart);
    fsdp->schedule.keeps = 0;
    for (int i = 0; status == DTRAIN_OK && i < units && !fsdp->layout.resident; i++) {
        fsdp->state.units[i].held = fsdp->state.units[i].fresh = 0;
        if (fsdp->state.units[i].state != DTRAIN__FSDP_WEIGHTS_ABSENT)
            status = dtrain__fsdp_gather_drop(fsdp, i);
    }
    for (int i = 0; status == DTRAIN_OK && i < units && gathers; i++)
        status = dtrain__fsdp_gather_start(fsdp, i);
    for (int i = 0; status == DTRAIN_OK && i < units && gathers; i++)
        if (fsdp->state.units[i].state == DTRAIN__FSDP_WEIGHTS_GATHERING)
            status = dtrain__fsdp_gather_finish(fsdp, i);
    return status;
}

/* With a loss scale: says whether to skip the step, and sets the next scale. */
static int dtrain__fsdp_overflows(dtrain_fsdp *fsdp)
{
    int steps = fsdp->desc.loss_scale_steps > 0 ? fsdp->desc.loss_scale_steps : 2000;
    if (!dtrain__norm_finite(&fsdp->scaling.sum)) {
        fsdp->scaling.loss_scale =
            fsdp->scaling.loss_scale > 1e-30f ? fsdp->scaling.loss_scale / 2.0f : fsdp->scaling.loss_scale;
        fsdp->scaling.good_steps = 0;
        return 1;
    }
    if (++fsdp->scaling.good_steps == steps) {
        fsdp->scaling.loss_scale =
            fsdp->scaling.loss_scale < 1e30f ? fsdp->scaling.loss_scale * 2.0f : fsdp->scaling.loss_scale;
        fsdp->scaling.good_steps = 0;
    }
    return 0;
}

DTRAIN_API dtrain_status dtrain_fsdp_step(dtrain_fsdp *fsdp, float lr)
{
    int skip = 0;
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_step", 0);
    if (status != DTRAIN_OK)
        return status;
    if (!dtrain__train_finite((double)lr) || lr < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_step: lr is %g on rank %d, expected a number of at least 0", (double)lr,
                            dtrain__fsdp_rank(fsdp));
    if (fsdp->optimizer.kind == DTRAIN_OPTIMIZER_NONE)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_step: the optimizer is DTRAIN_OPTIMIZER_NONE: update the slices of "
                            "dtrain_fsdp_local, then call dtrain_fsdp_publish");
    status = dtrain__fsdp_finish_now(fsdp, 0);
    if (status == DTRAIN_OK && fsdp->desc.loss_scale > 0.0f && !fsdp->scaling.agreed && fsdp->comm->part)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_fsdp_step: with a loss scale all parts of a model skip a step or none does, and this "
            "object's group was split from a larger one: call dtrain_fsdp_clip_model_grad_norm before, with the "
            "ranks of the whole model, or with NULL if no other rank has a part of it; then call this again");
    if (status == DTRAIN_OK && fsdp->desc.loss_scale > 0.0f) {
        status = dtrain__fsdp_sum_squares(fsdp);
        skip = status == DTRAIN_OK && dtrain__fsdp_overflows(fsdp);
    }
    if (status != DTRAIN_OK)
        return dtrain__fsdp_leave(fsdp, status);
    fsdp->figures.stats.skipped += (uint64_t)skip;
    fsdp->figures.stats.steps += (uint64_t)!skip;
    if (skip) {
        dtrain__fsdp_reset(fsdp, 0);
        return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
    }
    dtrain__fsdp_update(fsdp, lr);
    dtrain__fsdp_reset(fsdp, 1);
    return dtrain__fsdp_leave(fsdp, dtrain__fsdp_publish_now(fsdp));
}

/* Ends a step without an update. publishes: 1 also makes the contents of the slices count, in which the caller has
 * applied gradients that were finished. */
static dtrain_status dtrain__fsdp_abandon(dtrain_fsdp *fsdp, int publishes, const char *call)
{
    int most = 0;
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, 0);
    if (status == DTRAIN_OK && fsdp->state.grads == NULL)
        status = dtrain__fsdp_complete(fsdp, &most);
    if (status != DTRAIN_OK)
        return status;
    if (publishes)
        dtrain__reducer_end_step(fsdp->reducer, fsdp->state.grads != NULL);
    dtrain__fsdp_wipe(fsdp);
    return dtrain__fsdp_leave(fsdp, publishes ? dtrain__fsdp_publish_now(fsdp) : DTRAIN_OK);
}

DTRAIN_API dtrain_status dtrain_fsdp_drop(dtrain_fsdp *fsdp)
{
    return dtrain__fsdp_abandon(fsdp, 0, "dtrain_fsdp_drop");
}

DTRAIN_API dtrain_status dtrain_fsdp_publish(dtrain_fsdp *fsdp)
{
    return dtrain__fsdp_abandon(fsdp, 1, "dtrain_fsdp_publish");
}

DTRAIN_API dtrain_status dtrain_fsdp_local(dtrain_fsdp *fsdp, const dtrain_slice **slices, size_t *count)
{
    if (fsdp == NULL || slices == NULL || count == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_local: fsdp, slices and count are needed, got NULL");
    *slices = fsdp->state.slices;
    *count = fsdp->layout.cut_count;
    return DTRAIN_OK;
}

DTRAIN_API uint64_t dtrain_fsdp_get_step(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? fsdp->step : 0;
}

DTRAIN_API dtrain_status dtrain_fsdp_set_step(dtrain_fsdp *fsdp, uint64_t step)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_set_step", 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_open(fsdp, "dtrain_fsdp_set_step");
    if (status != DTRAIN_OK)
        return status;
    fsdp->step = step;
    return dtrain__fsdp_leave(fsdp, DTRAIN_OK);
}

DTRAIN_API int dtrain_fsdp_shard_size(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? fsdp->layout.shards : 0;
}

DTRAIN_API float dtrain_fsdp_loss_scale(const dtrain_fsdp *fsdp)
{
    return fsdp != NULL ? fsdp->scaling.loss_scale : 1.0f;
}

DTRAIN_API dtrain_fsdp_stats dtrain_fsdp_get_stats(const dtrain_fsdp *fsdp)
{
    dtrain_fsdp_stats stats;
    memset(&stats, 0, sizeof stats);
    if (fsdp == NULL)
        return stats;
    stats = fsdp->figures.stats;
    stats.bytes = fsdp->memory.bytes;
    stats.peak_bytes = fsdp->memory.peak_bytes;
    return stats;
}

DTRAIN_API size_t dtrain_fsdp_buckets(const dtrain_fsdp *fsdp, const dtrain_bucket **buckets)
{
    if (buckets != NULL)
        *buckets = fsdp != NULL ? fsdp->figures.buckets : NULL;
    return fsdp != NULL ? fsdp->figures.bucket_count : 0;
}

/* ---- the length of gradients ---- */

static dtrain_status dtrain__fsdp_check_norm(const char *call, float max_norm)
{
    if (max_norm >= 0.0f)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: max_norm is %g, expected a number of at least 0", call,
                        (double)max_norm);
}

/* Ends the step's reductions, and sums up the squares again, because gradients may have changed. */
static dtrain_status dtrain__fsdp_measure(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_finish_now(fsdp, 0);
    fsdp->scaling.summed = fsdp->scaling.agreed = 0;
    return status == DTRAIN_OK ? dtrain__fsdp_sum_squares(fsdp) : status;
}

/* Shortens gradients to max_norm if they are longer; returns their length, by the sum of squares. */
static double dtrain__fsdp_shorten(dtrain_fsdp *fsdp, float max_norm)
{
    double length = dtrain__device_length(&fsdp->scaling.sum);
    if (max_norm > 0.0f && dtrain__norm_finite(&fsdp->scaling.sum) && length > (double)max_norm) {
        uint64_t mode = dtrain__fpmode_enter();
        float factor = dtrain__device_ratio((double)max_norm, length);
        dtrain__fpmode_restore(mode);
        dtrain__fsdp_queued(fsdp, dtrain_device_scale(fsdp->device.queue, DTRAIN_F32, fsdp->state.grads, (double)factor,
                                                      fsdp->layout.grads));
    }
    return length;
}

/* Shortens gradients on a device without telling the CPU their length, so that it does not wait. */
static dtrain_status dtrain__fsdp_shorten_unseen(dtrain_fsdp *fsdp, float max_norm)
{
    dtrain_status status = dtrain__fsdp_finish_now(fsdp, 0);
    if (status != DTRAIN_OK)
        return status;
    fsdp->scaling.summed = fsdp->scaling.agreed = 0;
    status = dtrain__fsdp_queue_squares(fsdp, fsdp->device.limbs);
    if (status == DTRAIN_OK)
        status = dtrain_device_clip(fsdp->device.queue, fsdp->device.limbs, max_norm,
                                    (double *)(void *)(fsdp->device.limbs + DTRAIN__NORM_LIMBS), fsdp->state.grads,
                                    fsdp->layout.grads);
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, "measuring gradients", -1);
}

/* The ranks of a model add these up: exact sums, and how many of their objects have dropped the step. */
typedef struct dtrain__fsdp_total {
    dtrain__norm sum;
    int64_t dropped;
} dtrain__fsdp_total;

/* Measures every object of this rank. Returns the first failure, and counts failures in the total. */
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
            total->sum.limbs[k] += fsdps[i]->scaling.sum.limbs[k];
        if (status != DTRAIN_OK && first == DTRAIN_OK) {
            first = status;
            why = dtrain__thread_error;
        }
    }
    dtrain__norm_carry(&total->sum);
    return first == DTRAIN_OK ? first : dtrain__report(&why);
}

/* Drops the step on the objects of this rank, because another part of the model has dropped it. */
static dtrain_status dtrain__fsdp_drop_all(dtrain_fsdp *const *fsdps, int count, int64_t dropped, const char *call)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; status == DTRAIN_OK && i < count; i++)
        if (fsdps[i]->broken.status == DTRAIN_OK && fsdps[i]->state.grads != NULL)
            status = dtrain_fsdp_drop(fsdps[i]);
    if (status != DTRAIN_OK)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_ABORTED,
                        "%s: %lld parts of the model have dropped the step, so all parts do: see the errors of their "
                        "ranks; the objects can be used",
                        call, (long long)dropped);
}

/* Measures and shortens the gradients of all objects as one vector. The arguments are checked. */
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
        fsdps[i]->scaling.sum = total.sum;
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
    status = dtrain__fsdp_clip(fsdps, count, model, max_norm, norm, call);
    for (int i = 0; status == DTRAIN_OK && i < count; i++)
        fsdps[i]->scaling.agreed = 1;
    return status;
}

#endif
