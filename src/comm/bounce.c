/* ---- >>bounce ----
 * Collectives between processes through bounce buffers: two of each rank, in the memory that the group shares (see
 * >>arena). They serve buffers that are in no window. A collective goes in rounds. In each a rank puts a piece of its
 * input into one of its buffers, where the cell of each receiver has its place. It takes its cells from the buffers of
 * all ranks. Of a sum it folds them, puts the result into its own cell, and copies the results of the others.
 *
 * A piece is small enough to stay in the processors' caches between two copies. So this is faster than one copy by the
 * system (process_vm_readv), which looks up the pages of each piece, and it asks for no right to read a process.
 *
 * Invariants: round r of an operation uses buffer (turn + r) % 2. A rank puts round r once all have taken r - 2, and
 * never before it has ended r - 2 itself. So whoever sees that all have put r knows that nobody reads results of r - 2.
 * The cells keep their places, as a rank may put r while others read its result of r - 2. A rank ends an operation of
 * several rounds only when all have ended it. Counters of peers are compared, never followed. */
#ifndef DTRAIN__BOUNCE
#define DTRAIN__BOUNCE
#include "op.c"
#include "../tensor/streaming.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__BOUNCE_LARGE (2 * DTRAIN__STREAMING_BLOCK) /* the least that streaming stores are used for */
#define DTRAIN__BOUNCE_TIMED 16u                           /* of so many large copies one is timed */

/* What a rank has for another one in a round: where it lies in the bounce buffer, in bytes, and in elements of the
 * sender's input and the receiver's output. */
typedef struct dtrain__bounce_cell {
    size_t at, given, target, count;
} dtrain__bounce_cell;

/* Whether the operation can go this way. */
static int dtrain__bounce_may(const dtrain_comm *comm, const dtrain__op *op)
{
    return comm->shared->bounce != NULL && op->kind != DTRAIN__BARRIER && !dtrain__op_scans(op) &&
           (op->kind != DTRAIN__ALL_TO_ALL || op->counts == NULL);
}

/* Bytes of the cell that each receiver has in a buffer. */
static size_t dtrain__bounce_cell_bytes(const dtrain_comm *comm)
{
    return comm->shared->bounce_bytes / (size_t)comm->size / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE;
}

/* Whether the operation is on a whole vector, not on parts. */
static int dtrain__bounce_whole(const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE || op->kind == DTRAIN__BROADCAST;
}

static int dtrain__bounce_gathers(const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_GATHER || op->kind == DTRAIN__GATHER;
}

/* Elements of a piece: of one receiver's part, or of what is for all. */
static size_t dtrain__bounce_room(const dtrain_comm *comm, const dtrain__op *op)
{
    int apart = !dtrain__bounce_whole(op) && !dtrain__bounce_gathers(op);
    return dtrain__bounce_cell_bytes(comm) * (apart ? 1 : (size_t)comm->size) / dtrain__op_width(op);
}

static size_t dtrain__bounce_rounds(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t room = dtrain__bounce_room(comm, op), most = dtrain__bounce_whole(op) ? op->count : 0;
    for (int rank = 0; !dtrain__bounce_whole(op) && rank < comm->size; rank++)
        most = comm->parts[rank].count > most ? comm->parts[rank].count : most;
    return most / room + (most % room != 0);
}

/* A rank's share of n elements. Shares are cut at cache lines, so no two ranks write to one line. */
static size_t dtrain__bounce_share(const dtrain_comm *comm, const dtrain__op *op, size_t n, int rank, size_t *begin)
{
    size_t line = DTRAIN__CACHE_LINE / dtrain__op_width(op);
    size_t part = dtrain__split((n + line - 1) / line, comm->size, rank, begin), end = (*begin + part) * line;
    *begin *= line;
    end = end < n ? end : n;
    return end > *begin ? end - *begin : 0;
}

static dtrain__bounce_cell dtrain__bounce_cell_of(const dtrain_comm *comm, const dtrain__op *op, int from, int to,
                                                  size_t round)
{
    dtrain__bounce_cell cell = {0, 0, 0, 0};
    size_t room = dtrain__bounce_room(comm, op), first = round * room, most = op->count, begin;
    int whole = dtrain__bounce_whole(op), gathers = dtrain__bounce_gathers(op);
    if ((op->kind == DTRAIN__GATHER && to != op->root) || (op->kind == DTRAIN__SCATTER && from != op->root) ||
        (op->kind == DTRAIN__BROADCAST && (from != op->root || to == op->root)))
        return cell;
    if (!whole)
        most = comm->parts[gathers ? from : to].count;
    if (first >= most)
        return cell;
    cell.count = most - first < room ? most - first : room;
    cell.given = cell.target = first;
    if (!gathers && op->kind != DTRAIN__BROADCAST) /* else one cell is for all */
        cell.at = (size_t)to * dtrain__bounce_cell_bytes(comm);
    if (gathers)
        cell.target += comm->parts[from].begin;
    else if (!whole)
        cell.given += comm->parts[to].begin;
    if (op->kind == DTRAIN__ALL_TO_ALL)
        cell.target += comm->others[from].begin;
    if (whole && op->kind != DTRAIN__BROADCAST) {
        cell.count = dtrain__bounce_share(comm, op, cell.count, to, &begin);
        cell.given = cell.target = first + begin;
    }
    return cell;
}

static unsigned char *dtrain__bounce_buffer(const dtrain_comm *comm, const dtrain__op *op, int rank, size_t round)
{
    return comm->shared->bounce + (2 * (size_t)rank + (size_t)((op->turn + round) & 1)) * comm->shared->bounce_stride;
}

/* Copies to this rank's own cell. Its lines may be in the caches of the last reader. If these are far, taking the lines
 * from there takes many times as long as a streaming store, although peers then read from memory. So both ways are
 * timed now and then, never at the first use of the memory. Large copies go the way that was chosen last. */
static void dtrain__bounce_copy(dtrain_comm *comm, unsigned char *cell, const unsigned char *from, size_t bytes)
{
    int large = bytes >= DTRAIN__BOUNCE_LARGE;
    if (large && comm->copies++ % DTRAIN__BOUNCE_TIMED == DTRAIN__BOUNCE_TIMED / 2) {
        int64_t began = dtrain__os_now_ns();
        memcpy(cell, from, DTRAIN__STREAMING_BLOCK);
        int64_t ordinary = dtrain__os_now_ns() - began;
        dtrain__streaming_copy(cell + DTRAIN__STREAMING_BLOCK, from + DTRAIN__STREAMING_BLOCK, DTRAIN__STREAMING_BLOCK);
        int64_t streaming = dtrain__os_now_ns() - began - ordinary;
        comm->streams = 2 * ordinary > 5 * streaming;
        cell += 2 * DTRAIN__STREAMING_BLOCK;
        from += 2 * DTRAIN__STREAMING_BLOCK;
        bytes -= 2 * DTRAIN__STREAMING_BLOCK;
    }
    if (large && comm->streams)
        dtrain__streaming_copy(cell, from, bytes);
    else
        memcpy(cell, from, bytes);
}

/* Puts the next piece of this rank's input. The caller publishes op->put. */
static void dtrain__bounce_put(dtrain_comm *comm, dtrain__op *op)
{
    size_t width = dtrain__op_width(op), last = SIZE_MAX;
    unsigned char *buffer = dtrain__bounce_buffer(comm, op, comm->rank, op->put);
    for (int to = 0; to < comm->size; to++) {
        dtrain__bounce_cell cell = dtrain__bounce_cell_of(comm, op, comm->rank, to, op->put);
        if (to == comm->rank || cell.count == 0 || cell.at == last) /* one cell serves all */
            continue;
        dtrain__bounce_copy(comm, buffer + cell.at, (const unsigned char *)op->in + cell.given * width,
                            cell.count * width);
        last = cell.at;
    }
    op->put++;
}

/* Folds comm->ins into this rank's output, or its cell, or both. Streaming stores go block by block, while the output
 * is in the cache. */
static void dtrain__bounce_fold(dtrain_comm *comm, const dtrain__op *op, size_t round, dtrain__bounce_cell cell)
{
    size_t width = dtrain__op_width(op), to_width = dtrain__op_result_width(op);
    unsigned char *own = dtrain__bounce_buffer(comm, op, comm->rank, round) + cell.at;
    int keeps = op->kind != DTRAIN__REDUCE || op->root == comm->rank, gives = op->kind != DTRAIN__REDUCE_SCATTER;
    unsigned char *out = keeps ? (unsigned char *)op->out + cell.target * to_width : own;
    int streams = keeps && gives && comm->streams && cell.count * width >= DTRAIN__BOUNCE_LARGE;
    size_t most = streams ? DTRAIN__STREAMING_BLOCK / width : cell.count;
    for (size_t at = 0, n; at < cell.count; at += n) {
        n = cell.count - at < most ? cell.count - at : most;
        comm->outs[0] = out + at * to_width;
        comm->outs[1] = own + at * width;
        dtrain__op_fold(comm, op, comm->outs, keeps && gives && !streams ? 2 : 1, n);
        if (streams)
            dtrain__streaming_copy(own + at * width, out + at * width, n * width);
        for (int rank = 0; rank < comm->size; rank++)
            comm->ins[rank] = (const unsigned char *)comm->ins[rank] + n * width;
    }
}

/* Takes this rank's cells of a round. */
static void dtrain__bounce_take(dtrain_comm *comm, const dtrain__op *op, size_t round)
{
    size_t width = dtrain__op_width(op);
    dtrain__bounce_cell cell = {0, 0, 0, 0};
    for (int rank = 0; rank < comm->size; rank++) {
        cell = dtrain__bounce_cell_of(comm, op, rank, comm->rank, round);
        const unsigned char *from = rank == comm->rank ? (const unsigned char *)op->in + cell.given * width
                                                       : dtrain__bounce_buffer(comm, op, rank, round) + cell.at;
        comm->ins[rank] = from;
        if (!dtrain__op_reduces(op) && cell.count > 0 && (unsigned char *)op->out + cell.target * width != from)
            memcpy((unsigned char *)op->out + cell.target * width, from, cell.count * width);
    }
    if (dtrain__op_reduces(op))
        dtrain__bounce_fold(comm, op, round, cell);
}

/* Whether this rank copies what the others have folded. */
static int dtrain__bounce_spreads(const dtrain_comm *comm, const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_REDUCE || (op->kind == DTRAIN__REDUCE && op->root == comm->rank);
}

static void dtrain__bounce_spread(const dtrain_comm *comm, const dtrain__op *op, size_t round)
{
    size_t width = dtrain__op_width(op);
    for (int k = 1; k < comm->size; k++) {
        int rank = (comm->rank + k) % comm->size;
        dtrain__bounce_cell cell = dtrain__bounce_cell_of(comm, op, rank, rank, round);
        if (cell.count > 0)
            memcpy((unsigned char *)op->out + cell.target * width,
                   dtrain__bounce_buffer(comm, op, rank, round) + cell.at, cell.count * width);
    }
}

/* Whether this rank must wait until the other one has taken, or put, a round. */
static int dtrain__bounce_needs(const dtrain_comm *comm, const dtrain__op *op, int rank, int taken)
{
    int mine = comm->rank == op->root, theirs = rank == op->root;
    if (op->kind == DTRAIN__BROADCAST || op->kind == DTRAIN__SCATTER)
        return taken ? mine : theirs;
    return op->kind != DTRAIN__GATHER || (taken ? theirs : mine);
}

/* Whether the ranks have taken, or put, so many rounds; else op->awaited has not. */
static int dtrain__bounce_all(const dtrain_comm *comm, dtrain__op *op, int taken, size_t rounds)
{
    for (int rank = 0; rank < comm->size; rank++) {
        const dtrain__slot *slot = &comm->shared->slots[rank];
        if (DTRAIN__ATOMIC_LOAD(taken ? &slot->taken : &slot->put, SEQ_CST) >= comm->rounds + rounds ||
            !dtrain__bounce_needs(comm, op, rank, taken))
            continue;
        op->awaited = rank;
        return 0;
    }
    return 1;
}

/* Says how far this rank is, and wakes who waits for that. */
static void dtrain__bounce_tell(const dtrain_comm *comm, uint64_t *word, size_t rounds)
{
    DTRAIN__ATOMIC_STORE(word, comm->rounds + rounds, SEQ_CST);
    dtrain__shared_ring(comm->shared, comm->rank);
}

/* Does one step of a round. Returns 0 if it must wait for op->awaited. */
static int dtrain__bounce_step(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__slot *slot = &comm->shared->slots[comm->rank];
    if (op->put < op->rounds && op->put < op->at + 2 && (op->put < 2 || dtrain__bounce_all(comm, op, 1, op->put - 1))) {
        dtrain__bounce_put(comm, op);
        dtrain__bounce_tell(comm, &slot->put, op->put);
    } else if (op->taken == op->at && op->taken < op->put && dtrain__bounce_all(comm, op, 0, op->at + 1)) {
        dtrain__bounce_take(comm, op, op->at);
        op->taken++;
        dtrain__bounce_tell(comm, &slot->taken, op->taken);
    } else if (op->taken > op->at &&
               (!dtrain__bounce_spreads(comm, op) || dtrain__bounce_all(comm, op, 1, op->taken))) {
        if (dtrain__bounce_spreads(comm, op))
            dtrain__bounce_spread(comm, op, op->at);
        op->at++;
    } else {
        return 0;
    }
    return 1;
}

/* Advances the rounds, and not much beyond until_ns. Returns 1 once this rank has done all; else it waits for
 * op->awaited, or -1 for its turn. */
static int dtrain__bounce_advance(dtrain_comm *comm, dtrain__op *op, int64_t until_ns)
{
    while (op->at < op->rounds) {
        if (!dtrain__bounce_step(comm, op))
            return 0;
        op->awaited = -1;
        if (until_ns != INT64_MAX && op->at < op->rounds && dtrain__os_now_ns() >= until_ns)
            return 0;
    }
    comm->rounds += op->rounds;
    return 1;
}

DTRAIN__FAST_END
#endif
