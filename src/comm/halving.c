/* ---- >>halving ----
 * The plan for large all-reduces: recursive halving, then doubling, in pieces that stay in the cache. Sources: see
 * dtrain_algorithm. */
#ifndef DTRAIN__HALVING_PLAN
#define DTRAIN__HALVING_PLAN
#include "step.c"

/* A rank's place in the binary blocks of a world: powers of two, largest first, as the tree order splits it. */
typedef struct dtrain__blocks {
    int first, size, levels; /* of this rank's block */
    int index;               /* of the rank in it */
    int next_size;           /* size of the block after it; 0: none */
    int previous_size;       /* size of the block before it; 0: none */
} dtrain__blocks;

static dtrain__blocks dtrain__halving_blocks(int rank, int ranks)
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
    blocks.levels = dtrain__step_levels(blocks.size);
    return blocks;
}

/* The part that the index-th rank of a block keeps after `halvings` halvings of n elements. Cuts lie on cache lines of
 * the output, whatever the dtype of partial sums. */
static dtrain_extent dtrain__halving_part(int index, int halvings, size_t n)
{
    dtrain_extent part = {0, n};
    for (int level = 0; level < halvings; level++) {
        size_t half = (part.begin + (part.count + 1) / 2 + 63) / 64 * 64 - part.begin;
        half = half < part.count ? half : part.count;
        if (index >> level & 1) {
            part.begin += half;
            part.count -= half;
        } else {
            part.count = half;
        }
    }
    return part;
}

typedef struct dtrain__halving {
    dtrain__blocks blocks;
    size_t begin, n;     /* the elements that this piece of work covers */
    unsigned char *held; /* its partial sums, n of them */
    unsigned char *out;  /* its results */
    unsigned char *recv;
    int step, up, down, doubling, steps; /* this step; where each phase begins; how many steps a piece has */
    int paired;                          /* another piece takes turns with this one */
} dtrain__halving;

/* How many pieces are under way at once. Between hosts, one moves while the other is folded. On one host a second piece
 * would only drive both out of the cache. Long runs wait for their receiver, so none moves while it folds. */
static size_t dtrain__halving_lanes(const dtrain_comm *comm)
{
    return comm->node_ranks == comm->size || comm->long_runs ? 1 : 2;
}

/* The elements of one piece. Pieces are about equally large, and their number is a multiple of the lanes. */
static size_t dtrain__halving_piece(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t bytes = dtrain__step_block(comm) * (size_t)comm->size, lanes = dtrain__halving_lanes(comm), most, turns;
    bytes = bytes < DTRAIN__BLOCK_MOST ? bytes : DTRAIN__BLOCK_MOST;
    bytes = lanes == 1 && !comm->long_runs ? DTRAIN__BLOCK_ALONE : bytes;
    most = bytes / dtrain__step_width(op);
    turns = (op->count > 0 ? op->count - 1 : 0) / (lanes * most) + 1;
    return (op->count / (lanes * turns) / 64 + 1) * 64;
}

/* Finds what step k does; returns 0 if there is no such step. The steps of a pair of pieces alternate, so each step
 * depends on nothing later than the step before the last. */
static int dtrain__halving_where(const dtrain_comm *comm, const dtrain__op *op, size_t k, dtrain__halving *at)
{
    size_t width = dtrain__op_width(op), piece = dtrain__halving_piece(comm, op);
    size_t lanes = dtrain__halving_lanes(comm), group, turn, index;
    int peers;
    at->blocks = dtrain__halving_blocks(comm->rank, comm->size);
    peers = at->blocks.previous_size / at->blocks.size;
    at->up = at->blocks.levels + (at->blocks.next_size > 0);
    at->down = at->up + peers;
    at->doubling = at->down + peers + (at->blocks.next_size > 0);
    at->steps = at->doubling + at->blocks.levels;
    group = k / (lanes * (size_t)at->steps);
    turn = k % (lanes * (size_t)at->steps);
    at->paired = lanes == 2 && (2 * group + 1) * piece < op->count;
    index = lanes * group + (at->paired ? turn % 2 : 0);
    at->step = (int)(at->paired ? turn / 2 : turn);
    at->begin = index * piece;
    if (at->begin >= op->count || at->step >= at->steps)
        return 0;
    at->n = op->count - at->begin < piece ? op->count - at->begin : piece;
    at->out = (unsigned char *)op->out + at->begin * width;
    at->recv = comm->scratch;
    at->held = dtrain__step_dtype(op) == op->dtype
                   ? at->out
                   : comm->scratch + dtrain__step_chunk(comm) + index % lanes * piece * dtrain__step_width(op);
    return 1;
}

static void dtrain__halving_fold(dtrain__step *step, int from, const dtrain__halving *at, dtrain_extent part,
                                 size_t width)
{
    dtrain__step_fold(step, from, at->recv, at->held + part.begin * width, part.count, width);
    step->fold_early = 1;
}

/* Between binary blocks: partial sums go up from the smaller to the larger block, results come down again. */
static void dtrain__halving_between(const dtrain__op *op, const dtrain__halving *at, dtrain__step *step)
{
    const dtrain__blocks *b = &at->blocks;
    size_t wide = dtrain__step_width(op), width = dtrain__op_width(op);
    dtrain_extent mine = dtrain__halving_part(b->index, b->levels, at->n);
    int next = b->next_size > 0 ? b->first + b->size + b->index % b->next_size : -1;
    int turn = at->step < at->down ? at->step - at->up : at->step - at->down;
    int index = b->index + turn * b->size, previous = b->first - b->previous_size + index;
    int levels = dtrain__step_levels(b->previous_size);
    if (at->step < at->up)
        dtrain__halving_fold(step, next, at, mine, wide);
    else if (at->step < at->down)
        dtrain__step_send_part(step, previous, at->held, dtrain__halving_part(index, levels, at->n), wide);
    else if (index < b->previous_size)
        dtrain__step_recv_part(step, previous, at->out, dtrain__halving_part(index, levels, at->n), width);
    else
        dtrain__step_send_part(step, next, at->out, mine, width);
}

/* Loads a piece before its first step. Turns this rank's own sums into results before they are passed on. */
static void dtrain__halving_prepare(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    dtrain__halving at;
    if (!dtrain__halving_where(comm, op, k, &at))
        return;
    if (at.step == 0)
        dtrain__step_widen(op, at.begin, at.n, at.held);
    if (at.step == at.up && at.blocks.previous_size == 0) {
        dtrain_extent mine = dtrain__halving_part(at.blocks.index, at.blocks.levels, at.n);
        dtrain__fold_finish(op->dtype, op->op, comm->size, at.held + mine.begin * dtrain__step_width(op),
                            at.out + mine.begin * dtrain__op_width(op), mine.count);
    }
}

/* Recursive halving, then doubling, at distances 1, 2, 4, ..., in pieces that stay in the cache. Neighbours fold first,
 * and the lower block of ranks is the left operand, so the sums are the tree's. If the world is no power of two, each
 * binary block does this and passes its partial sums to the next larger block. */
static int dtrain__halving_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__halving at;
    size_t wide = dtrain__step_width(op), width = dtrain__op_width(op);
    if (!dtrain__halving_where(comm, op, (size_t)k, &at))
        return 0;
    int level = at.step < at.blocks.levels ? at.step : at.step >= at.doubling ? at.steps - 1 - at.step : 0;
    int peer_index = at.blocks.index ^ (1 << level), peer = at.blocks.first + peer_index;
    step->tag_out = step->tag_in = at.begin << 8 | (uint64_t)(at.step < at.blocks.levels ? at.step : 128 + level);
    step->send_first = comm->rank < peer;
    step->ahead = at.paired;
    step->prepare = dtrain__halving_prepare;
    if (at.step < at.blocks.levels) {
        dtrain__step_send_part(step, peer, at.held, dtrain__halving_part(peer_index, level + 1, at.n), wide);
        dtrain__halving_fold(step, peer, &at, dtrain__halving_part(at.blocks.index, level + 1, at.n), wide);
    } else if (at.step >= at.doubling) {
        dtrain__step_send_part(step, peer, at.out, dtrain__halving_part(at.blocks.index, level + 1, at.n), width);
        dtrain__step_recv_part(step, peer, at.out, dtrain__halving_part(peer_index, level + 1, at.n), width);
    } else {
        step->tag_out = step->tag_in = at.begin << 8 | 64;
        dtrain__halving_between(op, &at, step);
    }
    return 1;
}

static size_t dtrain__halving_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t piece = dtrain__halving_piece(comm, op) * dtrain__step_width(op);
    return dtrain__step_chunk(comm) + (dtrain__step_dtype(op) == op->dtype ? 0 : dtrain__halving_lanes(comm) * piece);
}

#endif
