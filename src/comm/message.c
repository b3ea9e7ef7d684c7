/* ---- >>message ----
 * Collectives over send and recv alone. An operation is a sequence of steps, each at most one message out
 * and one in, of which the second may be folded into what this rank holds. plan() computes step k of an
 * operation from nothing but the call, so that an operation can stop anywhere and go on later.
 *
 * Every message carries the call it belongs to; one that does not fit is a mismatch before a byte of its
 * payload is taken. Of two ranks that exchange, one sends first, so that blocked sends form no cycle. */
#ifndef DTRAIN__MESSAGE
#define DTRAIN__MESSAGE
#include "op.c"

#define DTRAIN__MESSAGE_MAGIC 0x3147534d4e525444u /* "DTRNMSG1" */
#define DTRAIN__MESSAGE_SLICE_NS 20000000

typedef struct dtrain__message_header {
    uint64_t magic;
    dtrain__call call;
    uint64_t step;
    uint64_t bytes;
} dtrain__message_header;

typedef struct dtrain__step {
    int to, from;     /* -1: none */
    int send_first;
    const unsigned char *send;
    size_t send_bytes;
    unsigned char *recv;
    size_t recv_bytes;
    void *fold;       /* what the received partial sums are folded into; NULL: nothing */
    size_t fold_count;
} dtrain__step;

/* Where partial sums are kept, all of them in the partial dtype. */
static dtrain_dtype dtrain__message_dtype(const dtrain__op *op)
{
    int reduces = op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE_SCATTER;
    return reduces ? dtrain__fold_partial(op->dtype) : op->dtype;
}

static size_t dtrain__message_width(const dtrain__op *op)
{
    return dtrain_dtype_bits(dtrain__message_dtype(op)) / 8;
}

/* scratch = [this rank's partial sums | what was received]; both begin on a cache line. */
static size_t dtrain__message_half(const dtrain__op *op)
{
    return (op->count * dtrain__message_width(op) + DTRAIN__CACHE_LINE - 1) / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE;
}

static int dtrain__message_levels(int size)
{
    int levels = 0;
    while ((1 << levels) < size)
        levels++;
    return levels;
}

/* Up the binomial tree, whose sums are those of the balanced tree, then down again. */
static int dtrain__plan_tree(const dtrain_comm *comm, const dtrain__op *op, int k, int root, int up,
                             unsigned char *held, unsigned char *recv, dtrain__step *step)
{
    int levels = dtrain__message_levels(comm->size);
    int rank = (comm->rank - root + comm->size) % comm->size, down = !up || k >= levels;
    int level = !down ? k : (up ? 2 * levels : levels) - 1 - k;
    size_t bytes = op->count * dtrain__message_width(op);
    if (level < 0)
        return 0;
    int distance = 1 << level, low = rank % (2 * distance) == 0 && rank + distance < comm->size;
    int high = rank % (2 * distance) == distance;
    int peer = ((low ? rank + distance : rank - distance) + root) % comm->size;
    if ((down && low) || (!down && high)) {
        step->to = peer;
        step->send = held;
        step->send_bytes = bytes;
    }
    if ((down && high) || (!down && low)) {
        step->from = peer;
        step->recv = down ? held : recv;
        step->recv_bytes = bytes;
        step->fold = down ? NULL : held;
        step->fold_count = op->count;
    }
    return 1;
}

static int dtrain__plan_doubling(const dtrain_comm *comm, const dtrain__op *op, int k, unsigned char *held,
                                 unsigned char *recv, dtrain__step *step)
{
    if (k >= dtrain__message_levels(comm->size))
        return 0;
    step->to = step->from = comm->rank ^ (1 << k);
    step->send_first = comm->rank < step->to;
    step->send = held;
    step->recv = recv;
    step->send_bytes = step->recv_bytes = op->count * dtrain__message_width(op);
    step->fold = held;
    step->fold_count = op->count;
    return 1;
}

/* Step k of a ring: sends block rank + shift - k to the right and receives the one before it from the left. */
static int dtrain__plan_ring(const dtrain_comm *comm, const dtrain__op *op, int k, int reduce, unsigned char *held,
                             unsigned char *recv, dtrain__step *step)
{
    int n = comm->size, steps = n - 1, gather = !reduce || k >= steps;
    int shift = reduce && gather ? 1 : 0, turn = reduce && gather ? k - steps : k;
    size_t width = dtrain__message_width(op), out, in, out_count, in_count;
    if (k >= (reduce ? 2 * steps : steps))
        return 0;
    out_count = dtrain_split(op->count, n, (comm->rank + shift - turn + 2 * n) % n, &out);
    in_count = dtrain_split(op->count, n, (comm->rank + shift - turn - 1 + 2 * n) % n, &in);
    step->to = (comm->rank + 1) % n;
    step->from = (comm->rank + n - 1) % n;
    step->send_first = comm->rank % 2 == 0;
    step->send = held + out * width;
    step->send_bytes = out_count * width;
    step->recv = gather ? held + in * width : recv;
    step->recv_bytes = in_count * width;
    step->fold = gather ? NULL : held + in * width;
    step->fold_count = in_count;
    return 1;
}

static int dtrain__message_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    unsigned char *held = comm->scratch, *recv = comm->scratch + dtrain__message_half(op);
    memset(step, 0, sizeof *step);
    step->to = step->from = -1;
    switch (op->kind) {
    case DTRAIN__SEND:
    case DTRAIN__RECV:
        step->to = op->kind == DTRAIN__SEND ? op->root : -1;
        step->from = op->kind == DTRAIN__RECV ? op->root : -1;
        step->send = (const unsigned char *)op->in;
        step->recv = (unsigned char *)op->out;
        step->send_bytes = step->recv_bytes = dtrain__op_bytes(op);
        return k == 0;
    case DTRAIN__BROADCAST:
        return dtrain__plan_tree(comm, op, k, op->root, 0, (unsigned char *)op->out, NULL, step);
    case DTRAIN__ALL_GATHER: return dtrain__plan_ring(comm, op, k, 0, (unsigned char *)op->out, NULL, step);
    case DTRAIN__BARRIER: return dtrain__plan_tree(comm, op, k, 0, 1, held, recv, step);
    default: break;
    }
    if (op->algorithm == DTRAIN_ALGORITHM_RING)
        return dtrain__plan_ring(comm, op, k, 1, held, recv, step);
    if (op->algorithm == DTRAIN_ALGORITHM_RECURSIVE_DOUBLING)
        return dtrain__plan_doubling(comm, op, k, held, recv, step);
    return dtrain__plan_tree(comm, op, k, 0, 1, held, recv, step);
}

/* This rank's input as partial sums. */
static void dtrain__message_widen(const dtrain__op *op, void *out)
{
    dtrain_dtype partial = dtrain__message_dtype(op);
    if (partial == op->dtype)
        memcpy(out, op->in, dtrain__op_bytes(op));
    else
        dtrain_convert(op->in, op->dtype, out, partial, op->count);
}

static int dtrain__message_fail(dtrain_comm *comm, dtrain__op *op)
{
    if (op->error.status != DTRAIN_ERR_TIMEOUT || op->touched)
        comm->broken = op->error;
    return 1;
}

/* Returns 1 when the operation has ended already. */
static int dtrain__message_start(dtrain_comm *comm, dtrain__op *op)
{
    size_t half = dtrain__message_half(op), width = dtrain__message_width(op), begin, shard;
    int point_to_point = op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV;
    if (point_to_point)
        op->number = 1 + (op->kind == DTRAIN__SEND ? comm->sent : comm->received)[op->root];
    else
        op->number = comm->number + 1;
    if (comm->broken.status != DTRAIN_OK) {
        dtrain__op_blame(comm, op, &comm->broken);
        return 1;
    }
    if (comm->scratch == NULL || comm->scratch_bytes < 2 * half) {
        unsigned char *scratch = (unsigned char *)dtrain__alloc(comm->allocator, 2 * half);
        if (scratch == NULL) {
            dtrain__fail(&op->error, DTRAIN_ERR_MEMORY, "%s on rank %d: no memory for %zu bytes of partial sums",
                         dtrain__op_text(comm, op).text, comm->rank, 2 * half);
            return 1;
        }
        dtrain__free(comm->allocator, comm->scratch, comm->scratch_bytes);
        comm->scratch = scratch;
        comm->scratch_bytes = 2 * half;
    }
    if ((op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE_SCATTER) && op->count > 0)
        dtrain__message_widen(op, comm->scratch);
    if (op->kind == DTRAIN__ALL_GATHER) {
        shard = dtrain_split(op->count, comm->size, comm->rank, &begin);
        if (shard > 0)
            memmove((unsigned char *)op->out + begin * width, op->in, shard * width);
    }
    op->phase = 1;
    return 0;
}

static int dtrain__message_end(dtrain_comm *comm, dtrain__op *op)
{
    size_t begin = 0, n = op->count, width = dtrain__message_width(op);
    if (op->kind == DTRAIN__REDUCE_SCATTER)
        n = dtrain_split(op->count, comm->size, comm->rank, &begin);
    if ((op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE_SCATTER) && n > 0)
        dtrain__fold_finish(op->dtype, op->op, comm->size, comm->scratch + begin * width, op->out, n);
    if (op->kind == DTRAIN__SEND)
        comm->sent[op->root] = op->number;
    else if (op->kind == DTRAIN__RECV)
        comm->received[op->root] = op->number;
    else
        comm->number = op->number;
    return 1;
}

/* Moves one direction of a step; *done counts header and payload. Returns what the transport returned. */
static dtrain_status dtrain__message_move(dtrain_comm *comm, dtrain__op *op, dtrain__step *step, int sending,
                                          int64_t deadline_ns)
{
    size_t *done = sending ? &op->sent : &op->received, moved, want, offset;
    int peer = sending ? step->to : step->from;
    size_t payload = sending ? step->send_bytes : step->recv_bytes;
    unsigned char *header = sending ? comm->header_out : comm->header_in;
    dtrain_status status = DTRAIN_OK;
    while (status == DTRAIN_OK && *done < sizeof(dtrain__message_header) + payload) {
        int in_header = *done < sizeof(dtrain__message_header);
        offset = in_header ? *done : *done - sizeof(dtrain__message_header);
        want = (in_header ? sizeof(dtrain__message_header) : payload) - offset;
        moved = 0;
        if (sending)
            status = comm->transport.send(comm->transport.self, peer, (in_header ? header : step->send) + offset, want,
                                          deadline_ns, &moved);
        else
            status = comm->transport.recv(comm->transport.self, peer, (in_header ? header : step->recv) + offset, want,
                                          deadline_ns, &moved);
        *done += moved;
        op->touched |= moved > 0;
        if (!sending && in_header && *done == sizeof(dtrain__message_header)) {
            dtrain__message_header came;
            dtrain__call mine = dtrain__op_call(comm, op);
            memcpy(&came, header, sizeof came);
            if (came.magic != DTRAIN__MESSAGE_MAGIC)
                return dtrain__fail(&op->error, DTRAIN_ERR_CORRUPT, "%s: what came from rank %d is no message of dtrain",
                                    dtrain__op_text(comm, op).text, peer);
            if (memcmp(&came.call, &mine, sizeof mine) != 0 || came.step != op->at || came.bytes != payload)
                return dtrain__op_mismatch(comm, op, peer, &came.call);
        }
    }
    return status;
}

/* Records why a step failed; the transport's text, where it has one, says more than ours. */
static int dtrain__message_failed(dtrain_comm *comm, dtrain__op *op, dtrain_status status, int peer)
{
    if (op->error.status == DTRAIN_OK) {
        dtrain__error cause;
        if (dtrain__thread_error.status == status)
            cause = dtrain__thread_error;
        else
            dtrain__fail(&cause, status, "rank %d: the transport said %s", peer, dtrain_status_name(status));
        dtrain__op_blame(comm, op, &cause);
    }
    return dtrain__message_fail(comm, op);
}

/* Does both directions of a step: in a safe order when it may wait, else whatever moves. 1: ended by an error. */
static int dtrain__message_step(dtrain_comm *comm, dtrain__op *op, dtrain__step *step, int64_t deadline_ns)
{
    dtrain__message_header header;
    for (int turn = 0; turn < 2; turn++) {
        int sending = (turn == 0) == (step->send_first || step->from < 0), peer = sending ? step->to : step->from;
        size_t *done = sending ? &op->sent : &op->received;
        if (peer < 0 || *done == SIZE_MAX)
            continue;
        if (sending && *done == 0) {
            header.magic = DTRAIN__MESSAGE_MAGIC;
            header.call = dtrain__op_call(comm, op);
            header.step = op->at;
            header.bytes = step->send_bytes;
            memcpy(comm->header_out, &header, sizeof header);
        }
        dtrain__thread_error.status = DTRAIN_OK;
        dtrain_status status = dtrain__message_move(comm, op, step, sending, deadline_ns);
        if (status == DTRAIN_ERR_TIMEOUT) {
            op->awaited = peer;
            if (deadline_ns != 0)
                return 0;
            continue;
        }
        if (status != DTRAIN_OK)
            return dtrain__message_failed(comm, op, status, peer);
        *done = SIZE_MAX;
    }
    return 0;
}

/* Takes the operation as far as it goes without waiting beyond wait_ns (0: not at all); returns 1 at its end. */
static int dtrain__message_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    dtrain__step step;
    if (op->phase == 0 && dtrain__message_start(comm, op))
        return 1;
    while (dtrain__message_plan(comm, op, (int)op->at, &step)) {
        if (dtrain__message_step(comm, op, &step, wait_ns))
            return 1;
        if ((step.to >= 0 && op->sent != SIZE_MAX) || (step.from >= 0 && op->received != SIZE_MAX))
            return 0;
        if (step.fold != NULL && step.fold_count > 0)
            dtrain__fold_pair(dtrain__message_dtype(op), op->op, step.fold, step.recv, step.fold_count);
        op->sent = op->received = 0;
        op->at++;
    }
    return dtrain__message_end(comm, op);
}

static int dtrain__message_expire(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__op_expire(comm, op);
    return dtrain__message_fail(comm, op);
}

#endif
