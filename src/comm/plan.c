/* ---- >>plan ----
 * What a collective over messages consists of: step k of an operation, computed from nothing but the call, so
 * that an operation can stop anywhere and go on later. A step is at most one message out and one in. */
#ifndef DTRAIN__PLAN
#define DTRAIN__PLAN
#include "op.c"

#ifndef DTRAIN__BLOCK_BYTES
#define DTRAIN__BLOCK_BYTES ((size_t)256 << 10) /* of partial sums, for each rank */
#endif
#define DTRAIN__BLOCK_MOST ((size_t)8 << 20)
#ifndef DTRAIN__MESSAGE_CHUNK
#define DTRAIN__MESSAGE_CHUNK ((size_t)64 << 10) /* received and folded at once; a multiple of every element */
#endif

typedef struct dtrain__step {
    int to, from; /* -1: none */
    int send_first;
    const unsigned char *send;
    size_t send_bytes;
    unsigned char *recv;
    size_t recv_bytes;
    void *fold; /* what the received partial sums are folded into; NULL: nothing */
    size_t fold_count;
    int fold_early; /* nothing of it is still to be sent: folds while more arrives */
    int ahead;      /* may be sent before the step before it has been received */
    uint64_t tag;   /* the same at both ends of a message */
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

/* scratch = [this rank's partial sums, unless they are in out | what was received]; both begin on a cache line. */
static size_t dtrain__message_half(const dtrain__op *op)
{
    return (op->count * dtrain__message_width(op) + DTRAIN__CACHE_LINE - 1) / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE;
}

/* Where this rank's partial sums of the whole vector are: in out itself, where they fit. */
static unsigned char *dtrain__message_held(const dtrain_comm *comm, const dtrain__op *op)
{
    int fits = op->kind == DTRAIN__ALL_REDUCE && dtrain__message_dtype(op) == op->dtype;
    return fits ? (unsigned char *)op->out : comm->scratch;
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

/* Rank's place in the binary blocks of a world: powers of two, largest first, as the tree order splits it. */
typedef struct dtrain__blocks {
    int first, size, levels; /* of this rank's block */
    int index;               /* of the rank in it */
    int next_size;           /* of the block after it; 0: none */
    int previous_size;       /* of the one before; 0: none */
} dtrain__blocks;

static dtrain__blocks dtrain__plan_blocks(int rank, int ranks)
{
    dtrain__blocks blocks = {0, 1, 0, 0, 0, 0};
    for (;;) {
        int left = ranks - blocks.first;
        for (blocks.size = 1; 2 * blocks.size <= left;)
            blocks.size *= 2;
        if (rank < blocks.first + blocks.size)
            break;
        blocks.previous_size = blocks.size;
        blocks.first += blocks.size;
    }
    int after = ranks - blocks.first - blocks.size;
    while (after > 0 && 2 * blocks.next_size <= after)
        blocks.next_size = blocks.next_size > 0 ? 2 * blocks.next_size : 1;
    blocks.index = rank - blocks.first;
    while ((1 << blocks.levels) < blocks.size)
        blocks.levels++;
    return blocks;
}

typedef struct dtrain__part {
    size_t begin, end;
} dtrain__part;

/* What is left to the index-th of a block's ranks after `halvings` halvings of n elements. Cuts lie on cache
 * lines of the output, whatever the partial sums are. */
static dtrain__part dtrain__plan_half(int index, int halvings, size_t n)
{
    dtrain__part range = {0, n};
    for (int level = 0; level < halvings; level++) {
        size_t middle = range.begin + (range.end - range.begin + 1) / 2;
        middle = (middle + 63) / 64 * 64;
        middle = middle < range.end ? middle : range.end;
        if (index >> level & 1)
            range.begin = middle;
        else
            range.end = middle;
    }
    return range;
}

/* Where step k of a halving-doubling stands. */
typedef struct dtrain__halving {
    dtrain__blocks blocks;
    size_t begin, n;     /* elements of the whole that this piece of work covers */
    unsigned char *held; /* its partial sums, n of them */
    unsigned char *out;  /* its results */
    unsigned char *recv;
    int step, up, down, doubling, steps; /* this step; where the phases begin; steps of one piece */
    int paired;                          /* another piece is under way in turn with this one */
} dtrain__halving;

/* Elements of one piece: an even number of pieces about as large as each other, of which two are under way at once. */
static size_t dtrain__plan_piece(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t bytes = DTRAIN__BLOCK_BYTES * (size_t)comm->size, most, pairs;
    most = (bytes < DTRAIN__BLOCK_MOST ? bytes : DTRAIN__BLOCK_MOST) / dtrain__message_width(op);
    pairs = (op->count > 0 ? op->count - 1 : 0) / (2 * most) + 1;
    return (op->count / (2 * pairs) / 64 + 1) * 64;
}

/* Returns 0 when there is no such step. Steps of the two pieces of a pair alternate, so that each step waits for
 * nothing later than the one before the last. */
static int dtrain__plan_where(const dtrain_comm *comm, const dtrain__op *op, size_t k, dtrain__halving *at)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8, piece = dtrain__plan_piece(comm, op), pair, turn, index;
    int peers;
    at->blocks = dtrain__plan_blocks(comm->rank, comm->size);
    peers = at->blocks.previous_size / at->blocks.size;
    at->up = at->blocks.levels + (at->blocks.next_size > 0);
    at->down = at->up + peers;
    at->doubling = at->down + peers + (at->blocks.next_size > 0);
    at->steps = at->doubling + at->blocks.levels;
    pair = k / (size_t)(2 * at->steps);
    turn = k % (size_t)(2 * at->steps);
    at->paired = (2 * pair + 1) * piece < op->count;
    index = 2 * pair + (at->paired ? turn % 2 : 0);
    at->step = (int)(at->paired ? turn / 2 : turn);
    at->begin = index * piece;
    if (at->begin >= op->count || at->step >= at->steps)
        return 0;
    at->n = op->count - at->begin < piece ? op->count - at->begin : piece;
    at->out = (unsigned char *)op->out + at->begin * width;
    at->recv = comm->scratch;
    at->held = dtrain__message_dtype(op) == op->dtype
                   ? at->out
                   : comm->scratch + DTRAIN__MESSAGE_CHUNK + index % 2 * piece * dtrain__message_width(op);
    return 1;
}

static void dtrain__plan_send(dtrain__step *step, int to, unsigned char *base, dtrain__part range, size_t width)
{
    step->to = to;
    step->send = base + range.begin * width;
    step->send_bytes = (range.end - range.begin) * width;
}

static void dtrain__plan_recv(dtrain__step *step, int from, unsigned char *base, dtrain__part range, size_t width)
{
    step->from = from;
    step->recv = base + range.begin * width;
    step->recv_bytes = (range.end - range.begin) * width;
}

static void dtrain__plan_fold(dtrain__step *step, int from, const dtrain__halving *at, dtrain__part range, size_t width)
{
    dtrain__part all = {0, range.end - range.begin};
    dtrain__plan_recv(step, from, at->recv, all, width);
    step->fold = at->held + range.begin * width;
    step->fold_count = all.end;
    step->fold_early = 1;
}

/* Between binary blocks: the smaller one's partial sums go up to the larger one, the results come down again. */
static void dtrain__plan_between(const dtrain__op *op, const dtrain__halving *at, dtrain__step *step)
{
    const dtrain__blocks *b = &at->blocks;
    size_t wide = dtrain__message_width(op), width = dtrain_dtype_bits(op->dtype) / 8;
    dtrain__part mine = dtrain__plan_half(b->index, b->levels, at->n);
    int next = b->next_size > 0 ? b->first + b->size + b->index % b->next_size : -1;
    int turn = at->step < at->down ? at->step - at->up : at->step - at->down;
    int index = b->index + turn * b->size, levels = 0, previous = b->first - b->previous_size + index;
    while ((1 << levels) < b->previous_size)
        levels++;
    if (at->step < at->up)
        dtrain__plan_fold(step, next, at, mine, wide);
    else if (at->step < at->down)
        dtrain__plan_send(step, previous, at->held, dtrain__plan_half(index, levels, at->n), wide);
    else if (index < b->previous_size)
        dtrain__plan_recv(step, previous, at->out, dtrain__plan_half(index, levels, at->n), width);
    else
        dtrain__plan_send(step, next, at->out, mine, width);
}

/* Recursive halving, then doubling, at distances 1, 2, 4, ..., in pieces that stay in the cache. Neighbours fold
 * first and the lower block of ranks is the left operand, so the sums are the tree's. Where the world is no power
 * of two, binary blocks each do so and hand their partial sums to the next larger one.
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; binary blocks: Rabenseifner, ICCS 2004. */
static int dtrain__plan_halving(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__halving at;
    size_t wide = dtrain__message_width(op), width = dtrain_dtype_bits(op->dtype) / 8;
    if (!dtrain__plan_where(comm, op, (size_t)k, &at))
        return 0;
    int level = at.step < at.blocks.levels ? at.step : at.steps - 1 - at.step;
    int peer_index = at.blocks.index ^ (1 << level), peer = at.blocks.first + peer_index;
    step->tag = at.begin << 8 | (uint64_t)(at.step < at.blocks.levels ? at.step : 128 + level);
    step->send_first = comm->rank < peer;
    step->ahead = at.paired;
    if (at.step < at.blocks.levels) {
        dtrain__plan_send(step, peer, at.held, dtrain__plan_half(peer_index, level + 1, at.n), wide);
        dtrain__plan_fold(step, peer, &at, dtrain__plan_half(at.blocks.index, level + 1, at.n), wide);
    } else if (at.step >= at.doubling) {
        dtrain__plan_send(step, peer, at.out, dtrain__plan_half(at.blocks.index, level + 1, at.n), width);
        dtrain__plan_recv(step, peer, at.out, dtrain__plan_half(peer_index, level + 1, at.n), width);
    } else {
        step->tag = at.begin << 8 | 64;
        dtrain__plan_between(op, &at, step);
    }
    return 1;
}

static int dtrain__message_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    unsigned char *held = dtrain__message_held(comm, op);
    unsigned char *recv = comm->scratch + (held == comm->scratch ? dtrain__message_half(op) : 0);
    memset(step, 0, sizeof *step);
    step->to = step->from = -1;
    step->tag = (uint64_t)k;
    switch (op->kind) {
    case DTRAIN__SEND:
    case DTRAIN__RECV:
        step->to = op->kind == DTRAIN__SEND ? op->root : -1;
        step->from = op->kind == DTRAIN__RECV ? op->root : -1;
        step->send = (const unsigned char *)op->in;
        step->recv = (unsigned char *)op->out;
        step->send_bytes = step->recv_bytes = dtrain__op_bytes(op);
        return k == 0;
    case DTRAIN__BROADCAST: return dtrain__plan_tree(comm, op, k, op->root, 0, (unsigned char *)op->out, NULL, step);
    case DTRAIN__ALL_GATHER: return dtrain__plan_ring(comm, op, k, 0, (unsigned char *)op->out, NULL, step);
    case DTRAIN__BARRIER: return dtrain__plan_tree(comm, op, k, 0, 1, held, recv, step);
    default: break;
    }
    if (op->algorithm == DTRAIN_ALGORITHM_HALVING_DOUBLING)
        return dtrain__plan_halving(comm, op, k, step);
    if (op->algorithm == DTRAIN_ALGORITHM_RING)
        return dtrain__plan_ring(comm, op, k, 1, held, recv, step);
    if (op->algorithm == DTRAIN_ALGORITHM_RECURSIVE_DOUBLING)
        return dtrain__plan_doubling(comm, op, k, held, recv, step);
    return dtrain__plan_tree(comm, op, k, 0, 1, held, recv, step);
}

#endif
