/* ---- >>rounds-server ----
 * The transfers of a round that goes through a server. The server is a member that leads the rounds. It receives the
 * differences of all members, adds them up in the order of ranks, and sends the sum to all. Members talk to the server
 * only. A member without a difference only receives. Every member makes the outer step itself, so that all have the
 * bits of an all-reduce.
 *
 * Data travels in pieces, DTRAIN__ROUNDS_WAYS of them at once in each direction. Packed data is cut as an all-reduce
 * cuts it, so that its blocks are the same. */
#ifndef DTRAIN__ROUNDS_SERVER
#define DTRAIN__ROUNDS_SERVER
#include "rounds_groups.c"

/* The transfer of one fragment. */
typedef struct dtrain__rounds_transfer {
    dtrain_local_sgd *local;
    const dtrain__rounds_fragment *f;
    int packs;
    dtrain__packed packed; /* used if packs */
    const float *in;       /* this rank's difference; NULL: none */
    int n, server;
    size_t pieces;
    uint64_t sent;
} dtrain__rounds_transfer;

/* Returns the elements of a piece. *begin: where it begins. */
static size_t dtrain__rounds_slice(const dtrain__rounds_transfer *t, size_t p, size_t *begin)
{
    if (t->packs)
        return dtrain__split(t->f->count, t->n, (int)p, begin);
    *begin = p * DTRAIN__ROUNDS_PIECE;
    return t->f->count - *begin < DTRAIN__ROUNDS_PIECE ? t->f->count - *begin : DTRAIN__ROUNDS_PIECE;
}

static size_t dtrain__rounds_slice_bytes(const dtrain__rounds_transfer *t, size_t p)
{
    size_t begin;
    return t->packs ? t->packed.counts[p] : dtrain__rounds_slice(t, p, &begin) * sizeof(float);
}

/* Whether another rank has a difference in this round, by its hello. */
static int dtrain__rounds_brings(const dtrain__rounds_transfer *t, int rank)
{
    const uint64_t *said = t->local->hellos + DTRAIN__ROUNDS_WORDS * (rank + 1);
    double weight;
    memcpy(&weight, &said[2], sizeof weight);
    return (said[0] >> 32) != 0 && weight > 0.0;
}

/* Returns where a piece is sent from: this rank's difference or, on the server, the sum. */
static const void *dtrain__rounds_from(const dtrain__rounds_transfer *t, size_t p, const float *values)
{
    size_t begin;
    dtrain__rounds_slice(t, p, &begin);
    return t->packs ? (const void *)(t->packed.out + t->packed.offsets[p]) : values + begin;
}

/* Two handles for a peer and the turn of a piece: of what is received from it, then of what is sent to it. */
static dtrain_work **dtrain__rounds_work(const dtrain__rounds_transfer *t, int peer, size_t p)
{
    size_t turn = p % DTRAIN__ROUNDS_WAYS;
    return t->local->works + t->local->ranks + 2 * ((size_t)peer * DTRAIN__ROUNDS_WAYS + turn);
}

/* Waits for what is under way to and from a peer in a piece's turn. */
static dtrain_status dtrain__rounds_settle(const dtrain__rounds_transfer *t, int peer, size_t p)
{
    dtrain_work **works = dtrain__rounds_work(t, peer, p);
    dtrain_status status = dtrain__work_settle(&works[0]);
    return status == DTRAIN_OK ? dtrain__work_settle(&works[1]) : status;
}

static dtrain_status dtrain__rounds_expect(dtrain__rounds_transfer *t, int peer, size_t p, void *to)
{
    return dtrain_recv_async(t->local->group, to, dtrain__rounds_slice_bytes(t, p), DTRAIN_U8, peer,
                             dtrain__rounds_work(t, peer, p));
}

static dtrain_status dtrain__rounds_give(dtrain__rounds_transfer *t, int peer, size_t p, const float *values)
{
    size_t bytes = dtrain__rounds_slice_bytes(t, p);
    t->sent += bytes;
    return dtrain_send_async(t->local->group, dtrain__rounds_from(t, p, values), bytes, DTRAIN_U8, peer,
                             dtrain__rounds_work(t, peer, p) + 1);
}

/* ---- a worker ---- */

/* Returns where a piece of the sum arrives. */
static unsigned char *dtrain__rounds_answer(const dtrain__rounds_transfer *t, size_t p)
{
    size_t begin;
    dtrain__rounds_slice(t, p, &begin);
    return t->packs ? t->packed.in + t->packed.offsets[p] : (unsigned char *)(t->local->sum + begin);
}

static dtrain_status dtrain__rounds_ask(dtrain__rounds_transfer *t)
{
    dtrain_status status = DTRAIN_OK;
    for (size_t p = 0; p < t->pieces + DTRAIN__ROUNDS_WAYS && status == DTRAIN_OK; p++) {
        status = dtrain__rounds_settle(t, t->server, p);
        if (status == DTRAIN_OK && p >= DTRAIN__ROUNDS_WAYS && t->packs) {
            size_t begin, back = p - DTRAIN__ROUNDS_WAYS, count = dtrain__rounds_slice(t, back, &begin);
            status = dtrain__packed_unpack(&t->packed, dtrain__rounds_answer(t, back), t->local->sum + begin, count);
        }
        if (p >= t->pieces || status != DTRAIN_OK)
            continue;
        status = dtrain__rounds_expect(t, t->server, p, dtrain__rounds_answer(t, p));
        if (status == DTRAIN_OK && t->in != NULL)
            status = dtrain__rounds_give(t, t->server, p, t->in);
    }
    return status;
}

/* ---- the server ---- */

/* Returns where a rank's piece arrives on the server. There is one row a turn, with the pieces of all ranks. */
static unsigned char *dtrain__rounds_inbox(const dtrain__rounds_transfer *t, int rank, size_t p)
{
    size_t longest = dtrain__rounds_slice_bytes(t, 0), row = p % DTRAIN__ROUNDS_WAYS * (size_t)t->n;
    return t->local->rooms[1] + (row + (size_t)rank) * longest;
}

static dtrain_status dtrain__rounds_expect_all(dtrain__rounds_transfer *t, size_t p)
{
    dtrain_status status = DTRAIN_OK;
    for (int r = 0; r < t->n && status == DTRAIN_OK && p < t->pieces; r++)
        if (r != t->server && dtrain__rounds_brings(t, r))
            status = dtrain__rounds_expect(t, r, p, dtrain__rounds_inbox(t, r, p));
    return status;
}

/* Waits for everything that is under way in a piece's turn. */
static dtrain_status dtrain__rounds_wait_turn(dtrain__rounds_transfer *t, size_t p)
{
    dtrain_status status = DTRAIN_OK;
    for (int r = 0; r < t->n && status == DTRAIN_OK; r++)
        status = dtrain__rounds_settle(t, r, p);
    return status;
}

/* Returns a rank's input of a fold: zeros if it has no difference. */
static const float *dtrain__rounds_part(const dtrain__rounds_transfer *t, int rank, size_t p)
{
    size_t begin, count = dtrain__rounds_slice(t, p, &begin);
    int brings = rank == t->server ? t->in != NULL : dtrain__rounds_brings(t, rank);
    const void *from = rank == t->server ? (brings ? dtrain__rounds_from(t, p, t->in) : NULL)
                                         : (const void *)dtrain__rounds_inbox(t, rank, p);
    float *wide = t->packs ? t->packed.wide + (size_t)rank * count : (float *)(void *)dtrain__rounds_inbox(t, rank, p);
    if (!brings)
        memset(wide, 0, count * sizeof(float));
    else if (t->packs)
        DTRAIN_IGNORE(dtrain__packed_unpack(&t->packed, (const unsigned char *)from, wide, count));
    else
        return (const float *)from;
    return wide;
}

/* Adds up a piece over all ranks by the tree. If it packs, the server also replaces its sum by the packed sum unpacked,
 * which is what the members get. */
static dtrain_status dtrain__rounds_fold(dtrain__rounds_transfer *t, size_t p)
{
    size_t begin, count = dtrain__rounds_slice(t, p, &begin);
    float *sum = t->local->sum + begin;
    void *outs[1];
    outs[0] = sum;
    for (int r = 0; r < t->n; r++)
        t->local->parts[r] = dtrain__rounds_part(t, r, p);
    if (count > 0)
        dtrain__fold(DTRAIN_F32, DTRAIN_SUM, 1.0, t->local->parts, t->n, outs, 1, 0, count);
    if (!t->packs)
        return DTRAIN_OK;
    dtrain_status status = dtrain__packed_settle(&t->packed, (int)p);
    return status == DTRAIN_OK ? dtrain__packed_unpack(&t->packed, t->packed.out + t->packed.offsets[p], sum, count)
                               : status;
}

static dtrain_status dtrain__rounds_answer_all(dtrain__rounds_transfer *t)
{
    dtrain_status status = DTRAIN_OK;
    for (size_t p = 0; p < DTRAIN__ROUNDS_WAYS && status == DTRAIN_OK; p++)
        status = dtrain__rounds_expect_all(t, p);
    for (size_t p = 0; p < t->pieces && status == DTRAIN_OK; p++) {
        status = dtrain__rounds_wait_turn(t, p);
        if (status == DTRAIN_OK)
            status = dtrain__rounds_fold(t, p);
        for (int r = 0; r < t->n && status == DTRAIN_OK; r++)
            if (r != t->server)
                status = dtrain__rounds_give(t, r, p, t->local->sum);
        if (status == DTRAIN_OK)
            status = dtrain__rounds_expect_all(t, p + DTRAIN__ROUNDS_WAYS);
    }
    for (size_t p = 0; p < DTRAIN__ROUNDS_WAYS && status == DTRAIN_OK; p++)
        status = dtrain__rounds_wait_turn(t, p);
    return status;
}

/* ---- both ---- */

/* Sums the members' differences into local->sum. in: this rank's difference, or NULL. total: the weight of all. */
static dtrain_status dtrain__rounds_through(dtrain_local_sgd *local, const dtrain__rounds_fragment *f, const float *in,
                                            double total)
{
    dtrain__rounds_transfer t;
    dtrain_status status = DTRAIN_OK;
    t.local = local;
    t.f = f;
    t.packs = f->pack != NULL;
    t.in = in;
    t.n = dtrain_comm_size(local->group);
    t.server = local->server;
    t.pieces = t.packs ? (size_t)t.n : (f->count - 1) / DTRAIN__ROUNDS_PIECE + 1;
    t.sent = 0;
    uint64_t mode = dtrain__fpmode_enter();
    if (t.packs)
        status = dtrain__compressed_begin(f->pack, &t.packed, in, local->sum, total);
    if (status == DTRAIN_OK)
        status = dtrain_comm_rank(local->group) == t.server ? dtrain__rounds_answer_all(&t) : dtrain__rounds_ask(&t);
    dtrain__fpmode_restore(mode);
    if (status != DTRAIN_OK) { /* end all transfers before the buffers are used again */
        dtrain__error cause = dtrain__thread_error;
        DTRAIN_IGNORE(dtrain_comm_abort(local->group, cause.text));
        for (size_t i = (size_t)local->ranks; i < local->sizes.works; i++)
            dtrain__work_settle(&local->works[i]);
        dtrain__report(&cause);
    }
    dtrain__rounds_sent(local, t.sent);
    return status;
}

/* Exchanges the hellos of all members, as an all-gather would. */
static dtrain_status dtrain__rounds_say_through(dtrain_local_sgd *local, const uint64_t *mine, uint64_t *all)
{
    const size_t words = DTRAIN__ROUNDS_WORDS;
    int n = dtrain_comm_size(local->group), serves = dtrain_comm_rank(local->group) == local->server;
    dtrain_status status = DTRAIN_OK;
    if (!serves) {
        dtrain__rounds_sent(local, words * sizeof *mine);
        status = dtrain_send(local->group, mine, words, DTRAIN_U64, local->server);
        return status == DTRAIN_OK ? dtrain_recv(local->group, all, words * (size_t)n, DTRAIN_U64, local->server)
                                   : status;
    }
    memcpy(all + words * (size_t)local->server, mine, words * sizeof *mine);
    for (int r = 0; r < n && status == DTRAIN_OK; r++)
        if (r != local->server)
            status = dtrain_recv(local->group, all + words * (size_t)r, words, DTRAIN_U64, r);
    for (int r = 0; r < n && status == DTRAIN_OK; r++)
        if (r != local->server)
            status = dtrain_send(local->group, all, words * (size_t)n, DTRAIN_U64, r);
    dtrain__rounds_sent(local, words * sizeof *mine * (uint64_t)n * (uint64_t)(n - 1));
    return status;
}

#endif
