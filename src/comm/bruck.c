/* ---- >>bruck ----
 * Plans of ceil(log2 n) steps for any number of ranks, for small vectors: after step k a rank holds what 2^(k+1)
 * ranks had, in slots of scratch that begin with its own. At the end it holds all, and copies them to their places
 * (all-gather) or folds them itself in the tree order (all-reduce). Without data it is a barrier.
 *
 * Source: Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 8(11), 1997; barrier: Hensgen, Finkel, Manber, Int. J.
 * Parallel Programming 17(1), 1988. */
#ifndef DTRAIN__BRUCK
#define DTRAIN__BRUCK
#include "step.c"

/* Elements before slot number `slot`. */
static DTRAIN__NOINLINE size_t dtrain__bruck_slot(const dtrain_comm *comm, const dtrain__op *op, int slot)
{
    size_t begin = 0;
    if (op->kind == DTRAIN__BARRIER)
        return 0;
    if (op->kind == DTRAIN__ALL_REDUCE)
        return (size_t)slot * op->count;
    for (int i = 0; i < slot; i++)
        begin += comm->parts[(comm->rank + i) % comm->size].count;
    return begin;
}

static size_t dtrain__bruck_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    return dtrain__bruck_slot(comm, op, comm->size) * dtrain__step_out_width(op);
}

static void dtrain__bruck_begin(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t bytes = dtrain__bruck_slot(comm, op, 1) * dtrain__step_out_width(op);
    (void)k;
    if (bytes > 0)
        memcpy(comm->scratch, op->in, bytes);
}

static void dtrain__bruck_end(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t width = dtrain__step_out_width(op);
    if (k == 0)
        dtrain__bruck_begin(comm, op, k);
    for (int i = 0; i < comm->size; i++) {
        int rank = (comm->rank + i) % comm->size;
        const unsigned char *slot = comm->scratch + dtrain__bruck_slot(comm, op, i) * width;
        comm->ins[rank] = slot;
        if (op->kind == DTRAIN__ALL_GATHER && comm->parts[rank].count > 0)
            memcpy((unsigned char *)op->out + comm->parts[rank].begin * width, slot, comm->parts[rank].count * width);
    }
    if (op->kind == DTRAIN__ALL_REDUCE && op->count > 0)
        dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, &op->out, 1, 0, op->count);
}

static int dtrain__bruck_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int n = comm->size, levels = dtrain__step_levels(n), distance = 1 << k;
    size_t width = dtrain__step_out_width(op);
    if (k >= levels) {
        step->prepare = op->kind == DTRAIN__BARRIER ? NULL : dtrain__bruck_end;
        return k == levels;
    }
    int slots = distance < n - distance ? distance : n - distance;
    size_t begin = dtrain__bruck_slot(comm, op, distance), end = dtrain__bruck_slot(comm, op, distance + slots);
    dtrain__step_send(step, (comm->rank + n - distance) % n, comm->scratch,
                      dtrain__bruck_slot(comm, op, slots) * width);
    dtrain__step_recv(step, (comm->rank + distance) % n, comm->scratch + begin * width, (end - begin) * width);
    step->send_first = comm->rank / distance % 2 == 0;
    step->prepare = k == 0 && op->kind != DTRAIN__BARRIER ? dtrain__bruck_begin : NULL;
    return 1;
}

#endif
