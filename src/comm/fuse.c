/* ---- >>fuse ----
 * Runs many small calls as few operations. Calls between fuse_begin and fuse_end are noted. Then all messages run as
 * one set, and the collectives in the order of their calls, neighbours of one kind as one operation. Over messages
 * their buffers are packed into one. Between ranks of one address space the operation gets a list of the buffers. What
 * becomes one operation depends on the calls alone, so ranks that made the same calls make the same sets. */
#ifndef DTRAIN__FUSE
#define DTRAIN__FUSE
#include "work.c"

#define DTRAIN__FUSE_CALL ((size_t)1 << 20) /* larger buffers are not worth a copy */
#define DTRAIN__FUSE_SET ((size_t)4 << 20)

static dtrain_status dtrain__fuse_check(dtrain_comm *comm, int open, const char *call)
{
    if (dtrain__group_alive(comm, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (comm->fuse.open == open)
        return DTRAIN_OK;
    return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: %s", call, comm->rank,
                        open ? "there was no fuse_begin; call it first"
                             : "a fuse is open already; call fuse_end first");
}

DTRAIN_API dtrain_status dtrain_fuse_begin(dtrain_comm *comm)
{
    if (dtrain__fuse_check(comm, 0, "fuse_begin") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    comm->fuse.open = 1;
    comm->fuse.noted = 0;
    return DTRAIN_OK;
}

/* Whether a call may join the set of the first one, which has `bytes` so far. An all_reduce may not if its order of
 * addition depends on the place of an element. */
static int dtrain__fuse_fits(const dtrain_comm *comm, const dtrain__op *first, const dtrain__op *next, size_t bytes)
{
    int placed = comm->desc.order != DTRAIN_ORDER_TREE || next->algorithm == DTRAIN_ALGORITHM_RING ||
                 next->algorithm == DTRAIN_ALGORITHM_DOUBLE_TREE || next->algorithm == DTRAIN_ALGORITHM_NODES;
    int fusible = next->kind == DTRAIN__BROADCAST || (next->kind == DTRAIN__ALL_REDUCE && !placed);
    return fusible && next->kind == first->kind && next->dtype == first->dtype && next->op == first->op &&
           next->root == first->root && dtrain__op_bytes(next) <= DTRAIN__FUSE_CALL &&
           bytes + dtrain__op_bytes(next) <= DTRAIN__FUSE_SET;
}

/* Makes one operation of the set that begins with a noted collective. Returns the note after the set. */
static size_t dtrain__fuse_set(const dtrain_comm *comm, size_t at, dtrain__op *packed)
{
    size_t end = at, width = dtrain_dtype_bits(comm->fuse.notes[at].op.dtype) / 8;
    memcpy(packed, &comm->fuse.notes[at].op, offsetof(dtrain__op, error));
    packed->error.status = DTRAIN_OK;
    packed->first = packed->count;
    packed->count = 0;
    for (; end < comm->fuse.noted; end++) {
        const dtrain__op *next = &comm->fuse.notes[end].op;
        if (dtrain__op_is_one_way(next))
            continue;
        if (!dtrain__fuse_fits(comm, &comm->fuse.notes[at].op, next, packed->count * width))
            break;
        packed->count += next->count;
        packed->digest = dtrain_random_u64(packed->digest, next->count);
        packed->form++;
    }
    return end;
}

/* Copies the buffers of a set into the packed buffer; back: copies the results out of it. A scattered set lists its
 * buffers there instead. */
static void dtrain__fuse_copy(dtrain_comm *comm, size_t at, size_t end, const dtrain__op *set, int back)
{
    unsigned char *packed = comm->fuse.packed;
    for (; at < end; at++) {
        const dtrain__op *op = &comm->fuse.notes[at].op;
        dtrain__segment segment = {op->in, op->out, op->count};
        size_t bytes = set->scattered ? sizeof segment : dtrain__op_bytes(op);
        int reduces = op->kind == DTRAIN__ALL_REDUCE, root = op->root == comm->rank;
        if (dtrain__op_is_one_way(op))
            continue;
        if (set->scattered)
            memcpy(packed, &segment, bytes);
        else if (bytes > 0 && !back && (reduces || root))
            memcpy(packed, op->in, bytes);
        else if (bytes > 0 && back && (reduces || !root))
            memcpy(op->out, packed, bytes);
        packed += bytes;
    }
}

static DTRAIN__NOINLINE void dtrain__fuse_keep(dtrain__error *first, dtrain_status status)
{
    if (status != DTRAIN_OK && first->status == DTRAIN_OK)
        *first = dtrain__thread_error;
}

/* Runs the set that begins with a noted collective. Returns the note after the set. */
static size_t dtrain__fuse_run(dtrain_comm *comm, size_t at, dtrain__error *first)
{
    dtrain__op op;
    dtrain_status status = DTRAIN_ERR_MEMORY;
    size_t end = dtrain__fuse_set(comm, at, &op);
    if (op.form < 2) {
        dtrain__fuse_keep(first, dtrain__work_call(comm, &comm->fuse.notes[at].op, NULL));
        return at + 1;
    }
    /* between ranks of one address space a copy pays only if it fits into the post */
    op.scattered =
        comm->plane->in_process && dtrain__op_is_fused(&op) && dtrain__op_bytes(&op) > DTRAIN__POST_INLINE_BYTES;
    if (dtrain__op_reserve(comm, &op, &comm->fuse.packed,
                           op.scattered ? (size_t)op.form * sizeof(dtrain__segment) : dtrain__op_bytes(&op))) {
        op.in = op.out = comm->fuse.packed;
        dtrain__fuse_copy(comm, at, end, &op, 0);
        status = dtrain__work_call(comm, &op, NULL);
        if (status == DTRAIN_OK && !op.scattered)
            dtrain__fuse_copy(comm, at, end, &op, 1);
    }
    dtrain__fuse_keep(first, status);
    return end;
}

/* Queues the noted messages and waits for all of them. Round k has the messages to the rank k above and from the rank k
 * below: what two ranks do at the same time belongs together. */
static void dtrain__fuse_mail(dtrain_comm *comm, dtrain__error *first)
{
    int messages = 0;
    for (size_t i = 0; i < comm->fuse.noted; i++)
        messages |= dtrain__op_is_one_way(&comm->fuse.notes[i].op);
    for (int k = 1; k < comm->size && messages && first->status == DTRAIN_OK; k++)
        for (size_t i = 0; i < comm->fuse.noted && first->status == DTRAIN_OK; i++) {
            dtrain__op *op = &comm->fuse.notes[i].op;
            int distance = op->kind == DTRAIN__SEND ? op->root - comm->rank : comm->rank - op->root;
            if (!dtrain__op_is_one_way(op) || (distance + comm->size) % comm->size != k)
                continue;
            dtrain__fuse_keep(first, dtrain__work_begin(comm, op));
            dtrain__op_clock(comm, op);
            comm->fuse.notes[i].work = first->status == DTRAIN_OK ? dtrain__work_add(comm, op) : NULL;
            if (comm->fuse.notes[i].work == NULL)
                dtrain__fuse_keep(first, dtrain__thread_error.status);
        }
    for (size_t i = 0; i < comm->fuse.noted; i++)
        if (comm->fuse.notes[i].work != NULL)
            dtrain__fuse_keep(first, dtrain_work_wait(comm->fuse.notes[i].work));
}

DTRAIN_API dtrain_status dtrain_fuse_end(dtrain_comm *comm)
{
    dtrain__error first;
    if (dtrain__fuse_check(comm, 1, "fuse_end") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    first.status = DTRAIN_OK;
    comm->fuse.open = 0;
    dtrain__fuse_mail(comm, &first);
    for (size_t at = 0; at < comm->fuse.noted;)
        at = dtrain__op_is_one_way(&comm->fuse.notes[at].op) ? at + 1 : dtrain__fuse_run(comm, at, &first);
    comm->fuse.noted = 0;
    if (first.status != DTRAIN_OK)
        comm->error = first;
    return dtrain__report(&first);
}

#endif
