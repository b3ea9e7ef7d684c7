/* ---- >>fsdp-drift ----
 * Replicas that drift apart. The note that ranks send at the end of every step holds a hash of a part of their weights.
 * The part is the same on all ranks and another one each step: see check_every. If two hashes differ, all ranks know
 * it, and together look for the first parameter that differs.
 *
 * On a device the exact sum of the part's squares stands for the hash. The CPU does not wait for it. Ranks compare it
 * at the end of the first step when every rank has its own sum. Then the next part begins. */
#ifndef DTRAIN__FSDP_DRIFT
#define DTRAIN__FSDP_DRIFT
#include "fsdp_reduce.c"
#include "../base/xxh64.c"
#include "../comm/alike.c"

#define DTRAIN__FSDP_DRIFT_LEAST 1024 /* elements a step, at least, if there are as many */
#define DTRAIN__FSDP_DRIFT_ROUND 1000

/* Returns a hash that is never 0, which means none. */
static uint64_t dtrain__fsdp_drift_finish(const dtrain__xxh64 *hash)
{
    uint64_t end = dtrain__xxh64_end(hash);
    return end != 0 ? end : 1;
}

static dtrain_status dtrain__fsdp_drift_add(dtrain_fsdp *fsdp, dtrain__xxh64 *hash, const float *from, size_t count)
{
    float chunk[DTRAIN__FSDP_CHUNK];
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; status == DTRAIN_OK && i < count; i += DTRAIN__FSDP_CHUNK) {
        size_t n = count - i < DTRAIN__FSDP_CHUNK ? count - i : DTRAIN__FSDP_CHUNK;
        status = dtrain_device_copy(fsdp->device.queue, chunk, from + i, n * sizeof(float));
        dtrain__xxh64_add(hash, chunk, n * sizeof(float));
    }
    return status;
}

/* Walks this step's part of this rank's trained weights, which are as many as its gradients. */
static dtrain_status dtrain__fsdp_drift_walk(dtrain_fsdp *fsdp, dtrain__xxh64 *hash)
{
    size_t all = fsdp->layout.grads, most = (all + DTRAIN__FSDP_DRIFT_LEAST - 1) / DTRAIN__FSDP_DRIFT_LEAST, begin;
    size_t parts = fsdp->desc.check_every > 0 ? (size_t)fsdp->desc.check_every : DTRAIN__FSDP_DRIFT_ROUND;
    dtrain_status status = DTRAIN_OK;
    if (all == 0) /* other ranks of this copy have all trained weights */
        return DTRAIN_OK;
    parts = parts < most ? parts : most;
    size_t part = dtrain__split(all, (int)parts, (int)(fsdp->checks % parts), &begin);
    for (size_t i = 0; status == DTRAIN_OK && i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        size_t low, n = dtrain__layout_overlap(cut->grad, cut->own_count, begin, part, &low);
        if (!cut->trained || n == 0)
            continue;
        const float *from = fsdp->state.slices[i].weights + (low - cut->grad);
        status = hash != NULL ? dtrain__fsdp_drift_add(fsdp, hash, from, n)
                              : dtrain_device_squares(fsdp->device.queue, from, n, fsdp->device.drift);
    }
    return status;
}

/* ---- on a device ---- */

/* Queues the sum of the next part; the CPU reads it later. A device that cannot sum squares has no check. */
static void dtrain__fsdp_drift_queue(dtrain_fsdp *fsdp)
{
    dtrain__fsdp_device *d = &fsdp->device;
    const int64_t zero = 0;
    if (d->drift_event == NULL)
        return;
    dtrain_status status = dtrain_device_fill(d->queue, d->drift, &zero, sizeof zero, DTRAIN__NORM_LIMBS);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_drift_walk(fsdp, NULL);
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(d->queue, d->drift_heard, d->drift, sizeof d->drift_sum.limbs);
    if (status == DTRAIN_OK)
        status = dtrain__device_event_record(d->queue, d->drift_event);
    if (status != DTRAIN_ERR_UNSUPPORTED)
        dtrain__fsdp_queued(fsdp, status);
    d->drift_queued = status == DTRAIN_OK ? 1 : -1;
}

/* Returns the hash of this step's part. On a device it is that of the queued part, or 0 while the sum is under way. */
static uint64_t dtrain__fsdp_drift_hash(dtrain_fsdp *fsdp)
{
    dtrain__fsdp_device *d = &fsdp->device;
    dtrain__xxh64 hash;
    int done = 0;
    dtrain__xxh64_begin(&hash, 0);
    if (d->queue == NULL) {
        (void)dtrain__fsdp_drift_walk(fsdp, &hash);
        return dtrain__fsdp_drift_finish(&hash);
    }
    if (d->drift_queued == 0)
        dtrain__fsdp_drift_queue(fsdp);
    if (d->drift_queued > 0)
        dtrain__fsdp_queued(fsdp, dtrain__device_event_done(d->queue, d->drift_event, &done));
    if (!done)
        return 0;
    memcpy(d->drift_sum.limbs, d->drift_heard, sizeof d->drift_sum.limbs);
    dtrain__norm_carry(&d->drift_sum);
    dtrain__xxh64_add(&hash, d->drift_sum.limbs, sizeof d->drift_sum.limbs);
    return dtrain__fsdp_drift_finish(&hash);
}

/* ---- the check ---- */

/* Returns the hash of this rank's part of a parameter; 0 beyond the last parameter. */
static uint64_t dtrain__fsdp_drift_param_hash(const void *given, size_t index)
{
    dtrain_fsdp *fsdp = (dtrain_fsdp *)(uintptr_t)given;
    dtrain__xxh64 hash;
    if (index >= fsdp->layout.table_count)
        return 0;
    dtrain__xxh64_begin(&hash, 0);
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (cut->param == index && cut->trained)
            dtrain__fsdp_queued(fsdp,
                                dtrain__fsdp_drift_add(fsdp, &hash, fsdp->state.slices[i].weights, cut->own_count));
    }
    return dtrain__fsdp_drift_finish(&hash);
}

/* Finds the ranks whose weights differ from most ranks with the same part. Of two halves, the one without the lowest
 * rank differs. Returns a rank that has what most have. */
static int dtrain__fsdp_drift_outliers(dtrain_fsdp *fsdp, dtrain__alike_ranks *others)
{
    dtrain__fsdp_note *notes = fsdp->exchange.notes;
    int ranks = dtrain_comm_size(fsdp->comm), shards = fsdp->layout.shards, first = -1, like;
    for (int slot = 0; slot < shards; slot++) {
        int best = 0;
        for (int rank = slot; rank < ranks; rank += shards) {
            int count = 0;
            for (int other = slot; other < ranks; other += shards)
                count += notes[other].weights == notes[rank].weights;
            if (count > best) {
                best = count;
                notes[slot].rounds = notes[rank].weights; /* reused: the step has no further need of rounds */
            }
        }
    }
    memset(others, 0, sizeof *others);
    for (int rank = 0; rank < ranks; rank++) {
        if (notes[rank].weights == notes[rank % shards].rounds)
            continue;
        first = first < 0 ? rank : first;
        dtrain__alike_add(others, rank);
    }
    dtrain__alike_flush(others);
    for (like = first % shards; notes[like].weights != notes[first % shards].rounds; like += shards)
        continue;
    return like;
}

/* Finds the first parameter that differs, together with all ranks. If none does by then, the step is good. */
static dtrain_status dtrain__fsdp_drift_find(dtrain_fsdp *fsdp)
{
    dtrain__alike_ranks others;
    size_t index;
    dtrain_status status = dtrain__alike_first(fsdp->copies, fsdp->world, dtrain__fsdp_drift_param_hash, fsdp, &index);
    if (status == DTRAIN_OK && index >= fsdp->layout.table_count)
        return DTRAIN_OK;
    if (status != DTRAIN_OK)
        return dtrain__fsdp_break(fsdp, status, "looking for weights that differ", -1);
    fsdp->exchange.note.weights = dtrain__fsdp_drift_param_hash(fsdp, index);
    status = dtrain__fsdp_send_note(fsdp, 0);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_recv_notes(fsdp);
    if (status != DTRAIN_OK)
        return status;
    int like = dtrain__fsdp_drift_outliers(fsdp, &others);
    return dtrain__fail(NULL, DTRAIN_ERR_MISMATCH,
                        "%s: replicas have drifted apart: parameter %zu \"%.80s\" of rank%s %s is not that of rank %d: "
                        "give all ranks the same first weights, steps and learning rates, and an optimizer without "
                        "approximate instructions; the step is dropped on all ranks, the object can be used",
                        fsdp->call, index, fsdp->layout.table[index].name, others.count > 1 ? "s" : "", others.text,
                        like);
}

/* Compares the hashes of all ranks. The result is the same on every rank. */
static dtrain_status dtrain__fsdp_drift_verdict(dtrain_fsdp *fsdp)
{
    int differ = 0, shards = fsdp->layout.shards;
    for (int rank = 0; rank < dtrain_comm_size(fsdp->comm); rank++) {
        if (fsdp->exchange.notes[rank].weights == 0)
            return DTRAIN_OK;
        differ |= fsdp->exchange.notes[rank].weights != fsdp->exchange.notes[rank % shards].weights;
    }
    fsdp->device.drift_queued = 0;
    if (differ)
        return dtrain__fsdp_drift_find(fsdp);
    fsdp->checks++;
    dtrain__fsdp_drift_queue(fsdp);
    return DTRAIN_OK;
}

#endif
