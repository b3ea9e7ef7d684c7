/* ---- >>direct ----
 * Plans in which every pair of ranks exchanges once, in rounds of disjoint pairs: all-to-all and all-gather; and
 * reductions in which each rank receives its part of everybody's input and folds all of them in one pass, in the
 * tree order, in the dtype they came in. Gather and scatter are one message for each rank but the root.
 *
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005. */
#ifndef DTRAIN__DIRECT_PLAN
#define DTRAIN__DIRECT_PLAN
#include "step.c"

static int dtrain__direct_rounds(const dtrain_comm *comm)
{
    return dtrain__step_power_of_two(comm->size) ? comm->size - 1 : comm->size;
}

/* Whom this rank meets in a round: it meets this rank in the same one. May be the rank itself. */
static int dtrain__direct_peer(const dtrain_comm *comm, int round)
{
    if (dtrain__step_power_of_two(comm->size))
        return comm->rank ^ (round + 1);
    return (round - comm->rank + comm->size) % comm->size;
}

/* Reductions go block by block: the same elements of every part. */
typedef struct dtrain__direct {
    size_t most, blocks; /* elements of each part in a block; blocks */
    size_t block;        /* this one */
    int turn, turns;     /* step in the block, and how many it has */
} dtrain__direct;

/* Elements of `rank`'s part in the block. */
static size_t dtrain__direct_count(const dtrain_comm *comm, const dtrain__direct *at, int rank)
{
    size_t begin = at->block * at->most, count = comm->parts[rank].count;
    return count <= begin ? 0 : count - begin < at->most ? count - begin : at->most;
}

static size_t dtrain__direct_most(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t all = DTRAIN__BLOCK_MOST / (size_t)comm->size, most = DTRAIN__BLOCK_BYTES, longest = 0;
    most = (most < all ? most : all) / dtrain__step_out_width(op) / 64 * 64;
    for (int rank = 0; rank < comm->size; rank++)
        longest = comm->parts[rank].count > longest ? comm->parts[rank].count : longest;
    most = most > 0 ? most : 64;
    return longest < most ? longest : most;
}

static size_t dtrain__direct_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t width = dtrain__step_out_width(op), longest = 0;
    if (dtrain__op_reduces(op))
        return (size_t)comm->size * dtrain__step_line(dtrain__direct_most(comm, op) * width);
    for (int rank = 0; op->kind == DTRAIN__ALL_TO_ALL && op->in == op->out && rank < comm->size; rank++)
        longest = comm->others[rank].count > longest ? comm->others[rank].count : longest;
    return longest * width;
}

static unsigned char *dtrain__direct_slot(const dtrain_comm *comm, const dtrain__op *op, const dtrain__direct *at,
                                          int rank)
{
    return comm->scratch + (size_t)rank * dtrain__step_line(at->most * dtrain__step_out_width(op));
}

/* Where the block of this rank's part of the result goes. */
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
    size_t longest = 0;
    int rounds = dtrain__direct_rounds(comm), root = comm->rank == op->root;
    at.most = dtrain__direct_most(comm, op);
    for (int rank = 0; rank < comm->size; rank++)
        longest = comm->parts[rank].count > longest ? comm->parts[rank].count : longest;
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

/* Folds the block of this rank's part of everybody's input. */
static void dtrain__direct_fold(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    dtrain__direct at = dtrain__direct_where(comm, op, k);
    size_t begin = comm->parts[comm->rank].begin + at.block * at.most, n = dtrain__direct_count(comm, &at, comm->rank);
    void *result = dtrain__direct_result(comm, op, &at);
    for (int rank = 0; rank < comm->size; rank++)
        comm->ins[rank] = dtrain__direct_slot(comm, op, &at, rank);
    comm->ins[comm->rank] = (const unsigned char *)op->in + begin * dtrain__step_out_width(op);
    if (n > 0 && op->partial)
        dtrain__fold_partials(op->dtype, comm->ins, comm->size, result, n);
    else if (n > 0)
        dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, &result, 1, 0, n);
}

static int dtrain__direct_reduce(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    dtrain__direct at = dtrain__direct_where(comm, op, (size_t)k);
    int rounds = dtrain__direct_rounds(comm), gathers = at.turn > rounds, round = at.turn - (gathers ? rounds + 1 : 0);
    size_t width = dtrain__step_out_width(op), mine = dtrain__direct_count(comm, &at, comm->rank) * width, theirs;
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

/* In place, a block that has come lies in scratch until the one that went is gone. */
static void dtrain__direct_place(dtrain_comm *comm, dtrain__op *op, size_t k)
{
    size_t width = dtrain__step_out_width(op);
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
    size_t width = dtrain__step_out_width(op);
    const dtrain__extent *out = all_to_all ? &comm->parts[peer] : &comm->parts[comm->rank];
    const dtrain__extent *in = all_to_all ? &comm->others[peer] : &comm->parts[peer];
    const unsigned char *from = (const unsigned char *)(all_to_all ? op->in : op->out);
    if (in_place && k > 0)
        step->prepare = dtrain__direct_place;
    if (k >= rounds || peer == comm->rank)
        return k < rounds + in_place;
    dtrain__step_send(step, peer, from + out->begin * width, out->count * width);
    dtrain__step_recv(step, peer, in_place ? comm->scratch : (unsigned char *)op->out + in->begin * width,
                      in->count * width);
    step->send_first = comm->rank < peer;
    return 1;
}

/* One message between the root and each other rank. */
static int dtrain__direct_root(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__step_out_width(op);
    int root = comm->rank == op->root, rank = root ? k : comm->rank, gather = op->kind == DTRAIN__GATHER;
    const dtrain__extent *part = &comm->parts[rank < comm->size ? rank : 0];
    size_t begin = root ? part->begin * width : 0;
    if (k >= (root ? comm->size : 1))
        return 0;
    step->tag_out = step->tag_in = 0;
    if (root && k == comm->rank)
        return 1;
    if (gather != root)
        dtrain__step_send(step, root ? rank : op->root, (const unsigned char *)op->in + begin, part->count * width);
    else
        dtrain__step_recv(step, root ? rank : op->root, (unsigned char *)op->out + begin, part->count * width);
    return 1;
}

#endif
