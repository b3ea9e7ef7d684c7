/* ---- >>step ----
 * What collectives over messages are made of. A step is at most one message out and one in. A plan computes step k of
 * an operation from the call alone, so an operation can stop anywhere and continue later. Here are the step itself and
 * what all plans share. Each plan has a file of its own, and >>plan chooses between them. */
#ifndef DTRAIN__STEP
#define DTRAIN__STEP
#include "op.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__BLOCK_BYTES DTRAIN__TUNED(block_bytes, (size_t)256 << 10) /* of partial sums, for each rank */
#define DTRAIN__BLOCK_MOST ((size_t)8 << 20)
#define DTRAIN__BLOCK_ALONE DTRAIN__TUNED(block_alone, (size_t)1 << 20) /* the same where one piece is under way */
#define DTRAIN__MESSAGE_CHUNK DTRAIN__TUNED(message_chunk, (size_t)128 << 10)

/* Bytes of a piece of a vector. */
static size_t dtrain__step_block(const dtrain_comm *comm)
{
    return comm->long_runs ? 2 * DTRAIN__BLOCK_BYTES : DTRAIN__BLOCK_BYTES;
}

/* Bytes that are received, then folded; at least DTRAIN__MESSAGE_SMALL. Both ends of a message have the same. */
static size_t dtrain__step_chunk(const dtrain_comm *comm)
{
    return comm->long_runs ? 4 * DTRAIN__MESSAGE_CHUNK : DTRAIN__MESSAGE_CHUNK;
}

typedef struct dtrain__step {
    int to, from; /* -1: none */
    int send_first;
    const unsigned char *send;
    size_t send_bytes;
    unsigned char *recv;
    size_t recv_bytes;
    void *fold; /* received partial sums are folded into this; NULL: nothing is */
    size_t fold_count;
    int fold_early;           /* nothing of `fold` is still to be sent: fold while more arrives */
    int ahead;                /* may be sent before the previous step is received */
    uint64_t tag_out, tag_in; /* the same at both ends of a message */
    void (*prepare)(dtrain_comm *comm, dtrain__op *op, size_t k); /* called before any of it moves; may be NULL */
} dtrain__step;

/* A line of ranks: every stride-th one from first on. */
typedef struct dtrain__line {
    int index; /* of this rank in it */
    int size, first, stride;
} dtrain__line;

static int dtrain__line_rank(const dtrain__line *line, int index)
{
    return line->first + index * line->stride;
}

/* The number of bits of the ranks below size. */
static int dtrain__step_levels(int size)
{
    int levels = 0;
    while ((1 << levels) < size)
        levels++;
    return levels;
}

static int dtrain__step_power_of_two(int size)
{
    return (size & (size - 1)) == 0;
}

/* The dtype in which an operation keeps its partial sums. */
static dtrain_dtype dtrain__step_dtype(const dtrain__op *op)
{
    return dtrain__op_reduces(op) ? dtrain__fold_partial(op->dtype) : op->dtype;
}

static size_t dtrain__step_width(const dtrain__op *op)
{
    return dtrain_dtype_bits(dtrain__step_dtype(op)) / 8;
}

static size_t dtrain__step_line(size_t bytes)
{
    return (bytes + DTRAIN__CACHE_LINE - 1) / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE;
}

/* Plans that keep partial sums of the whole vector divide scratch into [partial sums, unless out holds them | what was
 * received]. */
static size_t dtrain__step_half(const dtrain__op *op)
{
    return dtrain__step_line(op->count * dtrain__step_width(op));
}

static int dtrain__step_holds_in_out(const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_REDUCE && dtrain__step_dtype(op) == op->dtype;
}

static unsigned char *dtrain__step_held(const dtrain_comm *comm, const dtrain__op *op)
{
    return dtrain__step_holds_in_out(op) ? (unsigned char *)op->out : comm->scratch;
}

/* Where a scan keeps its result: behind the other two. */
static unsigned char *dtrain__step_scanned(const dtrain_comm *comm, const dtrain__op *op)
{
    return comm->scratch + 2 * dtrain__step_half(op);
}

static unsigned char *dtrain__step_received(const dtrain_comm *comm, const dtrain__op *op)
{
    return comm->scratch + (dtrain__step_holds_in_out(op) ? 0 : dtrain__step_half(op));
}

static void dtrain__step_send(dtrain__step *step, int to, const unsigned char *data, size_t bytes)
{
    step->to = to;
    step->send = data;
    step->send_bytes = bytes;
}

static void dtrain__step_recv(dtrain__step *step, int from, unsigned char *data, size_t bytes)
{
    step->from = from;
    step->recv = data;
    step->recv_bytes = bytes;
}

/* The same for a part of a vector that begins at base. */
static void dtrain__step_send_part(dtrain__step *step, int to, const void *base, dtrain_extent part, size_t width)
{
    dtrain__step_send(step, to, (const unsigned char *)base + part.begin * width, part.count * width);
}

static void dtrain__step_recv_part(dtrain__step *step, int from, void *base, dtrain_extent part, size_t width)
{
    dtrain__step_recv(step, from, (unsigned char *)base + part.begin * width, part.count * width);
}

static void dtrain__step_fold(dtrain__step *step, int from, unsigned char *data, void *held, size_t count, size_t width)
{
    dtrain__step_recv(step, from, data, count * width);
    step->fold = held;
    step->fold_count = count;
}

/* Writes `count` elements of this rank's input, from `begin` on, as partial sums. */
static void dtrain__step_widen(const dtrain__op *op, size_t begin, size_t count, void *out)
{
    dtrain_dtype partial = dtrain__step_dtype(op);
    const unsigned char *in = (const unsigned char *)op->in + begin * dtrain__op_width(op);
    if (partial != op->dtype)
        DTRAIN_IGNORE(dtrain_convert(in, op->dtype, out, partial, count));
    else if (in != out && count > 0)
        memcpy(out, in, count * dtrain__step_width(op));
}

DTRAIN__FAST_END
#endif
