/* ---- >>tree ----
 * Plans that move whole vectors in a logarithmic number of steps: up and down a binomial tree, recursive doubling, and
 * node by node. Every sum is one of the balanced tree's, except if the number of ranks in a node is no power of two.
 * Here is also the double binary tree, which has an order of its own. Sources: see dtrain_algorithm. */
#ifndef DTRAIN__TREE
#define DTRAIN__TREE
#include "step.c"

/* One level of the binomial tree over a line, rotated so that root comes first: pairs at a distance of 2^level. */
static void dtrain__tree_level(const dtrain_comm *comm, const dtrain__op *op, const dtrain__line *line, int root,
                               int level, int down, dtrain__step *step)
{
    size_t width = dtrain__step_width(op);
    int index = (line->index - root + line->size) % line->size, distance = 1 << level;
    int low = index % (2 * distance) == 0 && index + distance < line->size;
    int high = index % (2 * distance) == distance;
    int other = ((low ? index + distance : index - distance) + root) % line->size;
    int peer = dtrain__line_rank(line, other);
    unsigned char *held = op->kind == DTRAIN__BROADCAST ? (unsigned char *)op->out : dtrain__step_held(comm, op);
    if ((down && low) || (!down && high))
        dtrain__step_send(step, peer, held, op->count * width);
    else if (down && high)
        dtrain__step_recv(step, peer, held, op->count * width);
    else if (low)
        dtrain__step_fold(step, peer, dtrain__step_received(comm, op), held, op->count, width);
    step->fold_early = step->fold != NULL;
}

static void dtrain__tree_double(const dtrain_comm *comm, const dtrain__op *op, const dtrain__line *line, int level,
                                dtrain__step *step)
{
    int peer = dtrain__line_rank(line, line->index ^ (1 << level));
    unsigned char *held = dtrain__step_held(comm, op);
    dtrain__step_send(step, peer, held, op->count * dtrain__step_width(op));
    dtrain__step_fold(step, peer, dtrain__step_received(comm, op), held, op->count, dtrain__step_width(op));
    step->send_first = comm->rank < peer;
}

/* Whether ranks lie behind this one's block of 2^level ranks. They need its total. */
static int dtrain__tree_continues(const dtrain_comm *comm, int level)
{
    return ((comm->rank >> level) + 1) << level < comm->size;
}

/* to = from op to: `from` is of lower ranks. */
static void dtrain__tree_precede(const dtrain__op *op, const unsigned char *from, unsigned char *to)
{
    uint64_t tile[256];
    size_t bytes = op->count * dtrain__step_width(op);
    for (size_t at = 0; at < bytes; at += sizeof tile) {
        size_t n = bytes - at < sizeof tile ? bytes - at : sizeof tile;
        memcpy(tile, from + at, n);
        dtrain__fold_pair(dtrain__step_dtype(op), op->op, tile, to + at, n / dtrain__step_width(op));
        memcpy(to + at, tile, n);
    }
}

/* Folds the block that step k - 1 has received. */
static void dtrain__tree_scan_fold(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    int distance = 1 << (k - 1), first = op->kind == DTRAIN__EXSCAN && comm->rank % distance == 0;
    unsigned char *total = dtrain__step_held(comm, op), *received = dtrain__step_received(comm, op);
    unsigned char *result = dtrain__step_scanned(comm, op);
    if ((comm->rank & distance) == 0) {
        dtrain__fold_pair(dtrain__step_dtype(op), op->op, total, received, op->count);
        return;
    }
    if (first && op->count > 0)
        memcpy(result, received, op->count * dtrain__step_width(op));
    else
        dtrain__tree_precede(op, received, result);
    if (dtrain__tree_continues(comm, (int)k))
        dtrain__tree_precede(op, received, total);
}

/* Blocks of 2^k ranks exchange totals, rank by rank. A block folds that of its left neighbour into its results. Nobody
 * needs the total of the last block. Source: Hillis and Steele, Data Parallel Algorithms, CACM 29(12), 1986. */
static int dtrain__tree_scan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int levels = dtrain__step_levels(comm->size), peer = comm->rank ^ (1 << k);
    int before = k > 0 ? comm->rank ^ (1 << (k - 1)) : comm->size;
    size_t bytes = op->count * dtrain__step_width(op);
    if (before < comm->size && (before < comm->rank || dtrain__tree_continues(comm, k)))
        step->prepare = dtrain__tree_scan_fold;
    if (k >= levels || peer >= comm->size)
        return k <= levels;
    if (comm->rank < peer || dtrain__tree_continues(comm, k + 1))
        dtrain__step_send(step, peer, dtrain__step_held(comm, op), bytes);
    if (comm->rank > peer || dtrain__tree_continues(comm, k + 1))
        dtrain__step_recv(step, peer, dtrain__step_received(comm, op), bytes);
    step->send_first = comm->rank < peer;
    return 1;
}

/* Recursive doubling, or up to rank 0 and down again. A broadcast only goes down from its root. A reduce only goes up,
 * then from rank 0 to its root. If any order will do, it goes up to its root. */
static int dtrain__tree_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__line line = {comm->rank, comm->size, 0, 1};
    int levels = dtrain__step_levels(comm->size), any = comm->desc.order == DTRAIN_ORDER_ANY;
    if (dtrain__op_scans(op))
        return dtrain__tree_scan(comm, op, k, step);
    if (op->algorithm == DTRAIN_ALGORITHM_RECURSIVE_DOUBLING) {
        if (k < levels)
            dtrain__tree_double(comm, op, &line, k, step);
        return k < levels;
    }
    if (op->kind == DTRAIN__BROADCAST) {
        if (k < levels)
            dtrain__tree_level(comm, op, &line, op->root, levels - 1 - k, 1, step);
        return k < levels;
    }
    if (op->kind == DTRAIN__REDUCE) {
        if (k < levels)
            dtrain__tree_level(comm, op, &line, any ? op->root : 0, k, 0, step);
        else if (k == levels && !any && op->root != 0 && comm->rank == 0)
            dtrain__step_send(step, op->root, dtrain__step_held(comm, op), op->count * dtrain__step_width(op));
        else if (k == levels && !any && op->root != 0 && comm->rank == op->root)
            dtrain__step_recv(step, 0, dtrain__step_held(comm, op), op->count * dtrain__step_width(op));
        return k <= levels;
    }
    if (k < 2 * levels)
        dtrain__tree_level(comm, op, &line, 0, k < levels ? k : 2 * levels - 1 - k, k >= levels, step);
    return k < 2 * levels;
}

/* To the first rank of each node, then between these, and back. */
static int dtrain__tree_nodes(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int ranks = comm->node_ranks, first = comm->rank - comm->rank % ranks, nodes = (comm->size + ranks - 1) / ranks;
    int here = comm->size - first < ranks ? comm->size - first : ranks;
    dtrain__line inner = {comm->rank - first, here, first, 1}, outer = {comm->rank / ranks, nodes, 0, ranks};
    int in = dtrain__step_levels(ranks), out = dtrain__step_levels(nodes);
    int doubles = dtrain__step_power_of_two(nodes), between = doubles ? out : 2 * out;
    if (k >= 2 * in + between)
        return 0;
    if (k < in)
        dtrain__tree_level(comm, op, &inner, 0, k, 0, step);
    else if (k >= in + between)
        dtrain__tree_level(comm, op, &inner, 0, 2 * in + between - 1 - k, 1, step);
    else if (comm->rank == first && doubles)
        dtrain__tree_double(comm, op, &outer, k - in, step);
    else if (comm->rank == first)
        dtrain__tree_level(comm, op, &outer, 0, k - in < out ? k - in : 2 * out - 1 - (k - in), k - in >= out, step);
    return 1;
}

/* A rank's neighbours in the binary tree whose in-order walk is the ranks; -1: none. */
typedef struct dtrain__branch {
    int parent, child[2];
} dtrain__branch;

static dtrain__branch dtrain__tree_branch(int index, int size)
{
    dtrain__branch branch = {-1, {-1, -1}};
    int bit = 1, below;
    while (bit < size && (index & bit) == 0)
        bit *= 2;
    if (index > 0) {
        branch.parent = (index ^ bit) | (2 * bit);
        if (branch.parent >= size)
            branch.parent = index ^ bit;
        branch.child[0] = bit > 1 ? index - bit / 2 : -1;
    }
    for (below = bit / 2; below > 0 && index + below >= size;)
        below /= 2;
    if (below > 0)
        branch.child[1] = index + below;
    return branch;
}

/* Pieces alternate between two trees, up and down. An inner rank of one tree is a leaf of the other, or nearly. */
static int dtrain__tree_two(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__step_width(op), most = dtrain__step_block(comm) / width, begin, n;
    size_t pieces = op->count / most + 1, index = (size_t)k / 3 % pieces;
    int down = (size_t)k >= 3 * pieces, mirror = index % 2 == 1, turn = k % 3, size = comm->size, peer;
    if ((size_t)k >= 6 * pieces)
        return 0;
    dtrain__branch branch = dtrain__tree_branch(mirror ? size - 1 - comm->rank : comm->rank, size);
    begin = index * most;
    n = op->count - begin < most ? op->count - begin : most;
    unsigned char *held = dtrain__step_held(comm, op) + begin * width;
    peer = (down ? turn == 0 : turn == 2) ? branch.parent : branch.child[down ? turn - 1 : turn];
    if (peer < 0)
        return 1;
    peer = mirror ? size - 1 - peer : peer;
    if (down ? turn > 0 : turn == 2)
        dtrain__step_send(step, peer, held, n * width);
    else if (down)
        dtrain__step_recv(step, peer, held, n * width);
    else
        dtrain__step_fold(step, peer, dtrain__step_received(comm, op), held, n, width);
    step->fold_early = step->fold != NULL;
    step->tag_out = step->tag_in = index << 1 | (uint64_t)down;
    return 1;
}

#endif
