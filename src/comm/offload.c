/* ---- >>offload ----
 * Collectives that the transport runs by its own means, if DTRAIN_ALGORITHM_MPI asks for it. The ranks first meet:
 * their messages carry the call as always, and no data. So calls that differ are found, and a missing rank is a
 * timeout, before the transport gets a buffer. Then each rank hands the call over and waits.
 *
 * An all-reduce is a reduce-scatter and an all-gather. One rank reduces an element for all, so all get the same bits.
 */
#ifndef DTRAIN__OFFLOAD
#define DTRAIN__OFFLOAD
#include "step.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__OFFLOAD_MOST ((size_t)INT_MAX) /* elements of a vector, as MPI counts them */

enum { DTRAIN__OFFLOAD_BEGUN = 2 }; /* phases from here on: the transport runs part phase - DTRAIN__OFFLOAD_BEGUN */

/* Whether the transport has this reduction. MPI leaves open what becomes of a NaN in a minimum, and of an integer that
 * overflows: Open MPI 4.1 saturates those of 8 bits. */
static int dtrain__offload_reduces(const dtrain__op *op)
{
    int is_float = op->dtype == DTRAIN_F32 || op->dtype == DTRAIN_F64;
    return dtrain_dtype_bits(op->dtype) >= 32 && !op->partial &&
           !(is_float && (op->op == DTRAIN_MIN || op->op == DTRAIN_MAX));
}

/* Whether the call can be handed over. All ranks answer alike: it depends on nothing but what they compare. Only in an
 * uneven all-to-all every rank has sizes of its own, and the transport judges them. */
static int dtrain__offload_fits(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t next = 0, count = op->count;
    if (op->kind == DTRAIN__ALL_TO_ALL)
        return op->counts != NULL || count / (size_t)comm->size < DTRAIN__OFFLOAD_MOST / (size_t)comm->size;
    if (op->kind != DTRAIN__ALL_REDUCE && op->kind != DTRAIN__REDUCE_SCATTER && op->kind != DTRAIN__ALL_GATHER &&
        op->kind != DTRAIN__BROADCAST)
        return 0;
    if (dtrain__op_reduces(op) && (comm->desc.order != DTRAIN_ORDER_ANY || !dtrain__offload_reduces(op)))
        return 0;
    for (int rank = 0; op->counts != NULL && op->offsets != NULL && rank < comm->size; rank++) {
        size_t end = op->offsets[rank] + op->counts[rank];
        if (dtrain__op_reduces(op) && op->offsets[rank] != next)
            return 0;
        next += op->counts[rank];
        count = end > count ? end : count;
    }
    return count <= DTRAIN__OFFLOAD_MOST;
}

/* Whether the transport has the call's buffers. */
static int dtrain__offload_begun(const dtrain__op *op)
{
    return op->algorithm == DTRAIN_ALGORITHM_MPI && op->phase >= DTRAIN__OFFLOAD_BEGUN;
}

/* Where this rank's part of a reduction's result is. */
static unsigned char *dtrain__offload_own(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t begin = op->kind == DTRAIN__ALL_REDUCE ? comm->parts[comm->rank].begin : 0;
    return (unsigned char *)op->out + begin * dtrain__op_width(op);
}

/* Fills in part k of an operation; returns 0 if there is no such part. */
static int dtrain__offload_part(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain_offload *part)
{
    int sums = dtrain__op_reduces(op) && k == 0;
    memset(part, 0, sizeof *part);
    part->kind = sums                             ? DTRAIN_OFFLOAD_REDUCE_SCATTER
                 : op->kind == DTRAIN__BROADCAST  ? DTRAIN_OFFLOAD_BROADCAST
                 : op->kind == DTRAIN__ALL_TO_ALL ? DTRAIN_OFFLOAD_ALL_TO_ALL
                                                  : DTRAIN_OFFLOAD_ALL_GATHER;
    part->dtype = op->dtype;
    part->op = op->op == DTRAIN_MEAN ? DTRAIN_SUM : op->op;
    part->rank = comm->rank;
    part->root = op->root;
    part->count = op->count;
    part->in = op->in;
    part->out = sums ? dtrain__offload_own(comm, op) : op->out;
    part->parts = comm->parts;
    part->others = comm->others;
    return k <= (op->kind == DTRAIN__ALL_REDUCE);
}

/* Hands the operation over once all ranks have met, and waits for it. Returns as dtrain_transport.offload. */
static dtrain_status dtrain__offload_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    dtrain_offload part;
    op->phase = op->phase < DTRAIN__OFFLOAD_BEGUN ? DTRAIN__OFFLOAD_BEGUN : op->phase;
    op->awaited = -1;
    while (dtrain__offload_part(comm, op, op->phase - DTRAIN__OFFLOAD_BEGUN, &part)) {
        dtrain_status status = comm->transport.offload(comm->transport.self, &part, wait_ns);
        if (status != DTRAIN_OK)
            return status;
        if (part.kind == DTRAIN_OFFLOAD_REDUCE_SCATTER)
            dtrain__fold_finish(op->dtype, op->op, comm->size, part.out, part.out, comm->parts[comm->rank].count);
        op->phase++;
    }
    return DTRAIN_OK;
}

/* The deadline has passed while the transport runs the call. */
static void dtrain__offload_expire(const dtrain_comm *comm, dtrain__op *op)
{
    dtrain__fail(&op->error, DTRAIN_ERR_TIMEOUT,
                 "%s: rank %d waited %.3f s for the transport, which has run it since all ranks were there; it may "
                 "still use the buffers: keep them until the process ends; the group is broken",
                 dtrain__op_text(comm, op).text, comm->rank, (double)(dtrain__os_now_ns() - op->started_ns) * 1e-9);
}

DTRAIN__FAST_END
#endif
