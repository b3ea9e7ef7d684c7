/* ---- >>rounds ----
 * Plans in which every rank sends and receives in each of a number of rounds. Sources: see dtrain_algorithm.
 *
 * Ring: each rank sends to its right neighbour and receives from its left one, at full bandwidth. Used for reductions
 * in an order of their own, all-gather, and broadcast in pieces.
 *
 * Bruck: ceil(log2 n) rounds for any number of ranks, for small vectors. After round k a rank holds the inputs of
 * 2^(k+1) ranks, in slots of scratch that begin with its own. In the end it holds all of them. An all-gather copies
 * them to their places, an all-reduce folds them in the tree order. Without data it is a barrier: Hensgen, Finkel,
 * Manber, Int. J. Parallel Programming 17(1), 1988.
 *
 * Direct: every pair of ranks exchanges once, in rounds of disjoint pairs. Used for all-to-all and all-gather. In a
 * reduction each rank receives its part of everybody's input. It folds all of them in one pass, in the tree order, in
 * the dtype they came in. Gather and scatter are one message for each rank but the root. */
#ifndef DTRAIN__ROUNDS_PLAN
#define DTRAIN__ROUNDS_PLAN
#include "step.c"

/* In step k block rank - k - 1 goes to the right. The block before it comes from the left and is folded. Once this
 * rank's own block is complete, complete blocks go round. A reduce-scatter does the first half, an all-gather the
 * second. */
static int dtrain__ring_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int n = comm->size, reduces = dtrain__op_reduces(op), gathers = !reduces || k >= n - 1;
    int turn = gathers && reduces ? k - (n - 1) : k, shift = gathers ? 0 : 1;
    size_t width = dtrain__step_width(op);
    unsigned char *held = reduces ? dtrain__step_held(comm, op) : (unsigned char *)op->out;
    if (k >= (op->kind == DTRAIN__ALL_REDUCE ? 2 : 1) * (n - 1))
        return 0;
    dtrain_extent out = comm->parts[(comm->rank - shift - turn + 2 * n) % n];
    dtrain_extent in = comm->parts[(comm->rank - shift - turn - 1 + 2 * n) % n];
    int left = (comm->rank + n - 1) % n;
    dtrain__step_send_part(step, (comm->rank + 1) % n, held, out, width);
    if (gathers)
        dtrain__step_recv_part(step, left, held, in, width);
    else
        dtrain__step_fold(step, left, dtrain__step_received(comm, op), held + in.begin * width, in.count, width);
    step->fold_early = !gathers;
    step->send_first = comm->rank % 2 == 0;
    return 1;
}

/* A broadcast in pieces from rank to rank: step k receives piece k and sends the piece before it. */
static int dtrain__ring_broadcast(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__op_width(op), most = dtrain__step_block(comm) / width, at = (size_t)k;
    size_t pieces = op->count > 0 ? (op->count - 1) / most + 1 : 1, before = at - 1;
    int index = (comm->rank - op->root + comm->size) % comm->size;
    step->send_first = 1;
    if (at < pieces && index > 0) {
        dtrain_extent in = {at * most, op->count - at * most < most ? op->count - at * most : most};
        dtrain__step_recv_part(step, (comm->rank + comm->size - 1) % comm->size, op->out, in, width);
        step->tag_in = at;
    }
    if (at > 0 && at <= pieces && index < comm->size - 1) {
        dtrain_extent out = {before * most, op->count - before * most < most ? op->count - before * most : most};
        dtrain__step_send_part(step, (comm->rank + 1) % comm->size, op->out, out, width);
        step->tag_out = before;
    }
    return at <= pieces;
}

/* The elements before slot number `slot`. */
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
    return dtrain__bruck_slot(comm, op, comm->size) * dtrain__op_width(op);
}

static void dtrain__bruck_begin(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t bytes = dtrain__bruck_slot(comm, op, 1) * dtrain__op_width(op);
    (void)k;
    if (bytes > 0)
        memcpy(comm->scratch, op->in, bytes);
}

static void dtrain__bruck_end(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t width = dtrain__op_width(op);
    if (k == 0)
        dtrain__bruck_begin(comm, op, k);
    for (int i = 0; i < comm->size; i++) {
        int rank = (comm->rank + i) % comm->size;
        const unsigned char *slot = comm->scratch + dtrain__bruck_slot(comm, op, i) * width;
        comm->ins[rank] = slot;
        if (op->kind == DTRAIN__ALL_GATHER && comm->parts[rank].count > 0)
            memcpy((unsigned char *)op->out + comm->parts[rank].begin * width, slot, comm->parts[rank].count * width);
    }
    if (op->kind == DTRAIN__ALL_REDUCE)
        dtrain__op_fold(comm, op, &op->out, 1, op->count);
}

static int dtrain__bruck_plan(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int n = comm->size, levels = dtrain__step_levels(n), distance = 1 << k;
    size_t width = dtrain__op_width(op);
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

static int dtrain__direct_rounds(const dtrain_comm *comm)
{
    return dtrain__step_power_of_two(comm->size) ? comm->size - 1 : comm->size;
}

/* The rank that this one meets in a round, and that meets this one in the same round. It may be the rank itself. */
static int dtrain__direct_peer(const dtrain_comm *comm, int round)
{
    if (dtrain__step_power_of_two(comm->size))
        return comm->rank ^ (round + 1);
    return (round - comm->rank + comm->size) % comm->size;
}

/* Reductions work block by block: the same elements of every part. */
typedef struct dtrain__direct {
    size_t most, blocks; /* elements of each part in a block; how many blocks there are */
    size_t block;        /* this one */
    int turn, turns;     /* step in the block, and how many it has */
} dtrain__direct;

static size_t dtrain__direct_count(const dtrain_comm *comm, const dtrain__direct *at, int rank)
{
    size_t begin = at->block * at->most, count = comm->parts[rank].count;
    return count <= begin ? 0 : count - begin < at->most ? count - begin : at->most;
}

static size_t dtrain__direct_longest(const dtrain_comm *comm, const dtrain_extent *parts)
{
    size_t longest = 0;
    for (int rank = 0; rank < comm->size; rank++)
        longest = parts[rank].count > longest ? parts[rank].count : longest;
    return longest;
}

static size_t dtrain__direct_most(const dtrain_comm *comm, const dtrain__op *op, size_t longest)
{
    size_t all = DTRAIN__BLOCK_MOST / (size_t)comm->size, most = dtrain__step_block(comm);
    most = (most < all ? most : all) / dtrain__op_width(op) / 64 * 64;
    most = most > 0 ? most : 64;
    return longest < most ? longest : most;
}

static size_t dtrain__direct_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t width = dtrain__op_width(op);
    if (dtrain__op_reduces(op))
        return (size_t)comm->size *
               dtrain__step_line(dtrain__direct_most(comm, op, dtrain__direct_longest(comm, comm->parts)) * width);
    return op->kind == DTRAIN__ALL_TO_ALL && op->in == op->out ? dtrain__direct_longest(comm, comm->others) * width : 0;
}

static unsigned char *dtrain__direct_slot(const dtrain_comm *comm, const dtrain__op *op, const dtrain__direct *at,
                                          int rank)
{
    return comm->scratch + (size_t)rank * dtrain__step_line(at->most * dtrain__op_width(op));
}

/* Returns where the block of this rank's part of the result goes. */
static unsigned char *dtrain__direct_result(const dtrain_comm *comm, const dtrain__op *op, const dtrain__direct *at)
{
    size_t begin = op->kind == DTRAIN__REDUCE_SCATTER ? 0 : comm->parts[comm->rank].begin;
    if (op->kind == DTRAIN__REDUCE && comm->rank != op->root)
        return dtrain__direct_slot(comm, op, at, comm->rank);
    return (unsigned char *)op->out + (begin + at->block * at->most) * dtrain__op_result_width(op);
}

static dtrain__direct dtrain__direct_where(const dtrain_comm *comm, const dtrain__op *op, size_t k)
{
    dtrain__direct at;
    size_t longest = dtrain__direct_longest(comm, comm->parts);
    int rounds = dtrain__direct_rounds(comm), root = comm->rank == op->root;
    at.most = dtrain__direct_most(comm, op, longest);
    at.blocks = longest > 0 ? (longest - 1) / at.most + 1 : 1;
    at.turns = rounds + 1;
    if (op->kind == DTRAIN__ALL_REDUCE)
        at.turns += rounds;
    else if (op->kind == DTRAIN__REDUCE)
        at.turns += root ? comm->size : 1;
    at.block = k / (size_t)at.turns;
    at.turn = (int)(k % (size_t)at.turns);
    return at;
}

/* Folds a block of this rank's part of all ranks' inputs. */
static void dtrain__direct_fold(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    dtrain__direct at = dtrain__direct_where(comm, op, k);
    size_t begin = comm->parts[comm->rank].begin + at.block * at.most, n = dtrain__direct_count(comm, &at, comm->rank);
    void *result = dtrain__direct_result(comm, op, &at);
    for (int rank = 0; rank < comm->size; rank++)
        comm->ins[rank] = dtrain__direct_slot(comm, op, &at, rank);
    comm->ins[comm->rank] = (const unsigned char *)op->in + begin * dtrain__op_width(op);
    dtrain__op_fold(comm, op, &result, 1, n);
}

static int dtrain__direct_reduce(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__direct at = dtrain__direct_where(comm, op, (size_t)k);
    int rounds = dtrain__direct_rounds(comm), gathers = at.turn > rounds, round = at.turn - (gathers ? rounds + 1 : 0);
    size_t width = dtrain__op_width(op), mine = dtrain__direct_count(comm, &at, comm->rank) * width, theirs;
    if (at.block >= at.blocks)
        return 0;
    step->tag_out = step->tag_in = at.block << 12 | (uint64_t)(op->kind == DTRAIN__REDUCE && gathers ? 4095 : at.turn);
    if (at.turn == rounds) {
        step->prepare = dtrain__direct_fold;
        return 1;
    }
    int root = op->kind == DTRAIN__REDUCE && gathers;
    int peer = !root ? dtrain__direct_peer(comm, round) : comm->rank == op->root ? round : op->root;
    if (peer == comm->rank)
        return 1;
    theirs = dtrain__direct_count(comm, &at, peer) * width;
    unsigned char *place = (unsigned char *)op->out + (comm->parts[peer].begin + at.block * at.most) * width;
    const unsigned char *given = (const unsigned char *)op->in + (comm->parts[peer].begin + at.block * at.most) * width;
    step->send_first = comm->rank < peer;
    if (!gathers || comm->rank != op->root || op->kind == DTRAIN__ALL_REDUCE)
        dtrain__step_send(step, peer, gathers ? dtrain__direct_result(comm, op, &at) : given, gathers ? mine : theirs);
    if (!gathers)
        dtrain__step_recv(step, peer, dtrain__direct_slot(comm, op, &at, peer), mine);
    else if (op->kind == DTRAIN__ALL_REDUCE || comm->rank == op->root)
        dtrain__step_recv(step, peer, place, theirs);
    return 1;
}

/* In place, a received block lies in scratch until the block that it replaces is sent. */
static void dtrain__direct_place(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t width = dtrain__op_width(op);
    int peer = dtrain__direct_peer(comm, (int)k - 1);
    if (peer != comm->rank && comm->others[peer].count > 0)
        memcpy((unsigned char *)op->out + comm->others[peer].begin * width, comm->scratch,
               comm->others[peer].count * width);
}

static int dtrain__direct_pairs(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    int rounds = dtrain__direct_rounds(comm), all_to_all = op->kind == DTRAIN__ALL_TO_ALL;
    int in_place = all_to_all && op->in == op->out;
    int peer = k < rounds ? dtrain__direct_peer(comm, k) : comm->rank;
    size_t width = dtrain__op_width(op);
    dtrain_extent in = all_to_all ? comm->others[peer] : comm->parts[peer], staged = {0, in.count};
    if (in_place && k > 0)
        step->prepare = dtrain__direct_place;
    if (k >= rounds || peer == comm->rank)
        return k < rounds + in_place;
    dtrain__step_send_part(step, peer, all_to_all ? op->in : op->out, comm->parts[all_to_all ? peer : comm->rank],
                           width);
    dtrain__step_recv_part(step, peer, in_place ? comm->scratch : op->out, in_place ? staged : in, width);
    step->send_first = comm->rank < peer;
    return 1;
}

/* One message between the root and each other rank. */
static int dtrain__direct_root(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__op_width(op);
    int root = comm->rank == op->root, rank = root ? k : comm->rank, gather = op->kind == DTRAIN__GATHER;
    if (k >= (root ? comm->size : 1))
        return 0;
    step->tag_out = step->tag_in = 0;
    if (root && k == comm->rank)
        return 1;
    dtrain_extent part = {root ? comm->parts[rank].begin : 0, comm->parts[rank].count};
    if (gather != root)
        dtrain__step_send_part(step, root ? rank : op->root, op->in, part, width);
    else
        dtrain__step_recv_part(step, root ? rank : op->root, op->out, part, width);
    return 1;
}

#endif
