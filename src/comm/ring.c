/* ---- >>ring ----
 * Plans in which every rank sends to its right neighbour and receives from its left one only, at full bandwidth:
 * reductions in an order of their own, all-gather, and broadcast in pieces.
 *
 * Source: Patarasuk, Yuan, J. Parallel Distrib. Comput. 69(2), 2009. */
#ifndef DTRAIN__RING
#define DTRAIN__RING
#include "step.c"

/* Step k: block rank - k - 1 goes to the right, the one before it comes from the left and is folded, until this
 * rank's own is complete; then complete blocks go round. An all-gather does the second half, a reduce-scatter the
 * first. */
static int dtrain__ring_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int n = comm->size, reduces = dtrain__op_reduces(op), gathers = !reduces || k >= n - 1;
    int turn = gathers && reduces ? k - (n - 1) : k, shift = gathers ? 0 : 1;
    size_t width = dtrain__step_width(op);
    unsigned char *held = reduces ? dtrain__step_held(comm, op) : (unsigned char *)op->out;
    if (k >= (op->kind == DTRAIN__ALL_REDUCE ? 2 : 1) * (n - 1))
        return 0;
    const dtrain__extent *out = &comm->parts[(comm->rank - shift - turn + 2 * n) % n];
    const dtrain__extent *in = &comm->parts[(comm->rank - shift - turn - 1 + 2 * n) % n];
    int left = (comm->rank + n - 1) % n;
    dtrain__step_send(step, (comm->rank + 1) % n, held + out->begin * width, out->count * width);
    if (gathers)
        dtrain__step_recv(step, left, held + in->begin * width, in->count * width);
    else
        dtrain__step_fold(step, left, dtrain__step_received(comm, op), held + in->begin * width, in->count, width);
    step->fold_early = !gathers;
    step->send_first = comm->rank % 2 == 0;
    return 1;
}

/* A broadcast in pieces from rank to rank: step k takes in piece k and sends on the one before it. */
static int dtrain__ring_broadcast(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__step_out_width(op), most = DTRAIN__BLOCK_BYTES / width, at = (size_t)k;
    size_t pieces = op->count > 0 ? (op->count - 1) / most + 1 : 1;
    int index = (comm->rank - op->root + comm->size) % comm->size;
    unsigned char *data = (unsigned char *)op->out;
    step->send_first = 1;
    if (at < pieces && index > 0) {
        size_t n = op->count - at * most < most ? op->count - at * most : most;
        dtrain__step_recv(step, (comm->rank + comm->size - 1) % comm->size, data + at * most * width, n * width);
        step->tag_in = at;
    }
    if (at > 0 && at <= pieces && index < comm->size - 1) {
        size_t n = op->count - (at - 1) * most < most ? op->count - (at - 1) * most : most;
        dtrain__step_send(step, (comm->rank + 1) % comm->size, data + (at - 1) * most * width, n * width);
        step->tag_out = at - 1;
    }
    return at <= pieces;
}

#endif
