/* ---- >>mover ----
 * Moves pieces between ranks, whoever holds them. In a turn each rank may ask one other for at most `most` bytes. All
 * ranks hear all requests, so that they go on or stop together, and one all-to-all carries the replies. A rank replies
 * to as many as fit into a few times `most`; who is not served asks again. So memory does not grow with the bytes that
 * move. */
#ifndef DTRAIN__MOVER
#define DTRAIN__MOVER
#include "alike.c"

#define DTRAIN__MOVER_REPLIES ((size_t)4) /* so many times `most` are what a rank replies in a turn */

/* Begins each request. What else a request says is its owner's. */
typedef struct dtrain__move {
    uint64_t holder, bytes; /* bytes 0: no request */
} dtrain__move;

typedef struct dtrain__mover {
    dtrain_comm *comm;
    dtrain_allocator *allocator;
    const char *call; /* in texts */
    size_t most, request_bytes;
    void *user;
    void (*ask)(void *user, dtrain__move *mine);         /* fills in its next request, if it has one, in zeros */
    int (*known)(void *user, const dtrain__move *asked); /* whether all ranks can serve or refuse it alike */
    dtrain_status (*give)(void *user, const dtrain__move *asked, int rank, unsigned char *out); /* fills in its bytes */
    dtrain_status (*take)(void *user, const dtrain__move *mine, unsigned char *in);
    dtrain__error failed;               /* the first error of this rank, which then asks no more and gives on */
    unsigned char *requests, *out, *in; /* requests: of all ranks; each reply begins with 1 if it is not good */
    size_t *counts[2];
    size_t turn;
} dtrain__mover;

static dtrain__move *dtrain__mover_request(const dtrain__mover *mover, size_t rank)
{
    return (dtrain__move *)(void *)(mover->requests + rank * mover->request_bytes);
}

/* Keeps the first error. */
static void dtrain__mover_check(dtrain__mover *mover, dtrain_status status)
{
    if (status != DTRAIN_OK && mover->failed.status == DTRAIN_OK)
        mover->failed = dtrain__thread_error;
}

/* Tells every rank what all ask for. *more: some rank asks. */
static dtrain_status dtrain__mover_hear(dtrain__mover *mover, int *more)
{
    size_t ranks = (size_t)dtrain_comm_size(mover->comm);
    dtrain__move *mine = dtrain__mover_request(mover, (size_t)dtrain_comm_rank(mover->comm));
    dtrain_status status =
        dtrain_all_gather(mover->comm, mine, mover->requests, ranks * mover->request_bytes, DTRAIN_U8);
    *more = 0;
    for (size_t rank = 0; rank < ranks && status == DTRAIN_OK; rank++) {
        const dtrain__move *asked = dtrain__mover_request(mover, rank);
        if (asked->bytes > 0 &&
            (asked->bytes > mover->most || asked->holder >= ranks || !mover->known(mover->user, asked)))
            status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                                  "%s: rank %zu asks rank %llu for %llu bytes of a piece that nobody has", mover->call,
                                  rank, (unsigned long long)asked->holder, (unsigned long long)asked->bytes);
        *more |= asked->bytes > 0;
    }
    return status;
}

/* Chooses the requests of this turn, the first of them another rank's in each turn, and fills in the bytes that go from
 * and to this rank. Returns whether its own request is among them. */
static int dtrain__mover_choose(dtrain__mover *mover)
{
    size_t ranks = (size_t)dtrain_comm_size(mover->comm), self = (size_t)dtrain_comm_rank(mover->comm);
    const dtrain__move *mine = dtrain__mover_request(mover, self);
    size_t served = 0, room = DTRAIN__MOVER_REPLIES * mover->most; /* served: by the holder that this rank asks */
    memset(mover->counts[0], 0, 2 * ranks * sizeof(size_t));
    for (size_t i = 0, out = 0; i < ranks; i++) {
        size_t rank = (i + mover->turn) % ranks;
        const dtrain__move *asked = dtrain__mover_request(mover, rank);
        if (asked->bytes > 0 && asked->holder == self && asked->bytes <= room - out) {
            out += (size_t)asked->bytes;
            mover->counts[0][rank] = (size_t)asked->bytes + 1;
        }
        if (mine->bytes > 0 && asked->bytes > 0 && asked->holder == mine->holder && asked->bytes <= room - served) {
            served += (size_t)asked->bytes;
            if (rank == self)
                mover->counts[1][mine->holder] = (size_t)mine->bytes + 1;
        }
    }
    mover->turn++;
    return mine->bytes > 0 && mover->counts[1][mine->holder] > 0;
}

/* Reads what this rank replies, exchanges the replies, and takes the one for this rank if it comes. */
static dtrain_status dtrain__mover_exchange(dtrain__mover *mover, int comes)
{
    size_t ranks = (size_t)dtrain_comm_size(mover->comm);
    dtrain__move *mine = dtrain__mover_request(mover, (size_t)dtrain_comm_rank(mover->comm));
    unsigned char *out = mover->out;
    for (size_t rank = 0; rank < ranks; out += mover->counts[0][rank++]) {
        if (mover->counts[0][rank] == 0)
            continue;
        dtrain_status given = mover->give(mover->user, dtrain__mover_request(mover, rank), (int)rank, out + 1);
        *out = given != DTRAIN_OK;
        if (given != DTRAIN_OK) /* what was in memory before is nobody's business */
            memset(out + 1, 0, mover->counts[0][rank] - 1);
        dtrain__mover_check(mover, given);
    }
    dtrain_status status = dtrain_all_to_all_v(mover->comm, mover->out, mover->counts[0], NULL, mover->in,
                                               mover->counts[1], NULL, DTRAIN_U8);
    if (status != DTRAIN_OK || !comes)
        return status;
    if (*mover->in != 0)
        dtrain__mover_check(mover,
                            dtrain__fail(NULL, DTRAIN_ERR_IO,
                                         "%s: rank %llu could not read its part for rank %d: that rank's error "
                                         "says why",
                                         mover->call, (unsigned long long)mine->holder, dtrain_comm_rank(mover->comm)));
    else
        dtrain__mover_check(mover, mover->take(mover->user, mine, mover->in + 1));
    mine->bytes = 0;
    return status;
}

/* Makes memory for replies, at the first turn in which some rank asks. */
static dtrain_status dtrain__mover_room(dtrain__mover *mover)
{
    dtrain_status status = DTRAIN_OK;
    size_t ranks = (size_t)dtrain_comm_size(mover->comm);
    if (mover->turn > 0)
        return DTRAIN_OK;
    mover->in = (unsigned char *)dtrain__alloc(mover->allocator, mover->most + 1);
    mover->out = (unsigned char *)dtrain__alloc(mover->allocator, DTRAIN__MOVER_REPLIES * mover->most + ranks);
    if (mover->in == NULL || mover->out == NULL)
        status =
            dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for pieces of %zu bytes", mover->call, mover->most);
    return dtrain__alike_agree(mover->comm, mover->call, 1, status);
}

/* Runs turns until no rank asks any more. */
static dtrain_status dtrain__mover_turns(dtrain__mover *mover)
{
    dtrain__move *mine = dtrain__mover_request(mover, (size_t)dtrain_comm_rank(mover->comm));
    dtrain_status status = DTRAIN_OK;
    for (int more = 1; status == DTRAIN_OK && more;) {
        if (mine->bytes == 0) { /* the last one was served */
            memset(mine, 0, mover->request_bytes);
            if (mover->failed.status == DTRAIN_OK)
                mover->ask(mover->user, mine);
        }
        status = dtrain__mover_hear(mover, &more);
        if (status == DTRAIN_OK && more)
            status = dtrain__mover_room(mover);
        if (status == DTRAIN_OK && more)
            status = dtrain__mover_exchange(mover, dtrain__mover_choose(mover));
    }
    return status;
}

/* Moves what the ranks ask each other for. Every rank calls it. Returns the first error of this rank or of one that it
 * asked; the others still get what they ask for. DTRAIN_ERR_CORRUPT: a request that no rank may make. Others are those
 * of the collectives. */
static dtrain_status dtrain__mover_run(dtrain__mover *mover)
{
    size_t ranks = (size_t)dtrain_comm_size(mover->comm);
    mover->requests = (unsigned char *)dtrain__alloc(mover->allocator, ranks * mover->request_bytes);
    mover->counts[0] = (size_t *)dtrain__alloc(mover->allocator, 2 * ranks * sizeof(size_t));
    dtrain_status status = DTRAIN_OK;
    if (mover->requests == NULL || mover->counts[0] == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for requests of %zu ranks", mover->call, ranks);
    status = dtrain__alike_agree(mover->comm, mover->call, 1, status);
    if (status == DTRAIN_OK) {
        mover->counts[1] = mover->counts[0] + ranks;
        status = dtrain__mover_turns(mover);
    }
    dtrain__free(mover->allocator, mover->requests);
    dtrain__free(mover->allocator, mover->in);
    dtrain__free(mover->allocator, mover->out);
    dtrain__free(mover->allocator, mover->counts[0]);
    return mover->failed.status != DTRAIN_OK ? dtrain__report(&mover->failed) : status;
}

#endif
