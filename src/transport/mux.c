/* ---- >>mux ----
 * Many groups over one transport of send and recv. A group's share is a lane, named by the group's id. A lane sends
 * frames that carry its name. What comes goes to the memory of the call that waits for it, or is kept for its lane.
 * Control messages travel between frames, each in one piece.
 *
 *   dtrain__mux_post     copies a control message that goes to a peer when the mux is driven; any thread
 *   dtrain__mux_move     sends, receives or both for a lane, see >>mux_lanes
 *   dtrain__mux_drive    moves what can be moved until something has, or until a time
 *   dtrain__mux_attach   makes a lane; dtrain__mux_detach ends it, the last one the mux
 *
 * Invariants:
 *   - `turn` is held around every call of the table's send, recv and exchange, a slice at a time, so that threads of
 *     several groups make progress
 *   - `mutex` is held for a few instructions and taken last
 *   - a frame that has begun to go is finished before anything else goes to that peer, by whoever is next
 *   - a call that waits also receives from every other peer, so ranks that wait for each other in several groups at
 *     once all make progress
 *
 * Peers are ranks of the world. */
#ifndef DTRAIN__MUX
#define DTRAIN__MUX
#include "../base/xxh64.c"
#include "arena.c"
#include "../control/consent.c"

#define DTRAIN__MUX_HEADER 24
#define DTRAIN__MUX_FRAME ((size_t)64 << 10)           /* payload of a frame of data */
#define DTRAIN__MUX_CONTROL (DTRAIN__MUX_FRAME + 1024) /* of a control message, and 16 for each rank */
#define DTRAIN__MUX_SMALL ((size_t)8192)               /* largest payload that moves in one piece with its header */
#define DTRAIN__MUX_EARLY ((size_t)256 << 10)          /* kept of a peer's bytes before a call waits for them */
#ifndef DTRAIN__MUX_KEPT
#define DTRAIN__MUX_KEPT ((size_t)64 << 20) /* and at most */
#endif
#define DTRAIN__MUX_SLICE_NS 10000000         /* longest wait for one peer */
#define DTRAIN__MUX_SHORT_NS 1000000          /* the same if other threads or peers want a turn */
#define DTRAIN__MUX_CROWDED_NS 50000000       /* after they last wanted one */
#define DTRAIN__MUX_DRAIN ((size_t)1 << 20)   /* received from a peer before others get their turn */
#define DTRAIN__MUX_POSTED ((size_t)16 << 20) /* of the council's messages to a peer that does not receive them */
#define DTRAIN__MUX_AHEAD 1024                /* most lanes still to be made that a peer may send to */
#define DTRAIN__MUX_PATIENCE_NS 10000000      /* without progress, until up to DTRAIN__MUX_KEPT is kept */
#define DTRAIN__MUX_FULL_NS 1000000000        /* until a call fails that cannot continue because so much is kept */
#define DTRAIN__MUX_BYE_NS 1000000000         /* for the last messages of a rank that leaves */
#define DTRAIN__MUX_ALIVE_NS 50000000         /* between two questions whether a peer is there */

/* LEAVE: a lane ends. BYE: the last lane ends. */
enum { DTRAIN__MUX_DATA = 0, DTRAIN__MUX_LEAVE, DTRAIN__MUX_FAIL, DTRAIN__MUX_BYE, DTRAIN__MUX_OTHERS };

typedef struct dtrain__mux dtrain__mux;
typedef struct dtrain__mux_lane dtrain__mux_lane;

/* A block of what is kept of a peer's bytes for a lane. */
typedef struct dtrain__mux_block {
    struct dtrain__mux_block *next;
    size_t begin, end;
    unsigned char data[DTRAIN__MUX_FRAME];
} dtrain__mux_block;

typedef struct dtrain__mux_inbox {
    struct dtrain__mux_inbox *next;
    uint64_t lane;
    dtrain__mux_block *first, *last;
    size_t bytes;
    int closed; /* the lane has ended here, not at the peer: what comes is dropped */
    int ended;  /* the peer's end has said that it leaves: nothing more comes */
} dtrain__mux_inbox;

/* A control message on its way to a peer, or for a lane that is still to be made. */
typedef struct dtrain__mux_message {
    struct dtrain__mux_message *next;
    uint64_t lane;
    int peer, kind;
    size_t begin, bytes; /* bytes sent, and bytes in all, of the frame that follows */
} dtrain__mux_message;

typedef struct dtrain__mux_peer {
    unsigned char *stage;        /* the frame being sent: all of it, or what precedes direct; NULL: none was sent yet */
    size_t frame, at, filled;    /* its bytes; sent; in stage; frame 0: there is none */
    const unsigned char *direct; /* its payload in the caller's memory, during a turn */
    dtrain__mux_lane *owner;     /* the lane it belongs to; NULL: that has ended */
    int to;                      /* this peer's rank in that lane */
    size_t counted;              /* bytes of it that its lane was told of */
    dtrain__mux_message *first, *last;
    size_t posted;                            /* bytes of these; mutex guards it */
    unsigned char header[DTRAIN__MUX_HEADER]; /* of the incoming frame */
    size_t got, left;                         /* bytes of its header that have come; bytes of its payload that are still
                                               * to come */
    uint64_t lane;
    int kind;
    dtrain__mux_inbox *inbox, *inboxes; /* of that frame; all of them */
    unsigned char *control;             /* the incoming control message; NULL: none has come yet */
    unsigned char *ahead;               /* bytes that came with a header; NULL: none were ever asked for */
    size_t ahead_at, ahead_end;
    size_t control_bytes, kept;
    int64_t full_ns, asked_ns; /* since when too much is kept; when `alive` was asked */
    dtrain_status gone;        /* not DTRAIN_OK: nothing moves any more */
    int bye;                   /* it left of its own will */
    long process;              /* of this host, once a group has shared memory with it; 0: not known */
    int dead;                  /* `alive` has said so since it is gone */
} dtrain__mux_peer;

struct dtrain__mux_lane {
    dtrain__seat seat; /* first */
    dtrain__mux *mux;
    dtrain__mux_inbox **inboxes; /* of each rank */
    size_t *done;                /* bytes sent to each rank that its calls are still to be told of */
    int64_t waits_ns;     /* since when calls wait for a peer's goodbye, or for what it sent before; 0: they do not */
    int64_t stalled_ns;   /* since when its calls make no progress; 0: they do */
    dtrain_transport own; /* its own streams; send NULL: it has none */
    dtrain__arena *arena; /* NULL: its ranks share no memory */
    uint32_t shares;      /* they do, as all have found */
};

struct dtrain__mux {
    dtrain__origin origin;
    dtrain_transport table;
    dtrain_allocator own, *allocator;
    dtrain__os_mutex turn, mutex; /* mutex guards posts and, with turn, the list of seats */
    uint64_t turns;
    uint32_t waiting;   /* threads that wait for turn */
    int64_t crowded_ns; /* until then other threads are expected to want turn */
    dtrain__bell bell;
    int doorbell[2];  /* a pipe that ranks of this host write to, and this rank while its threads rest there */
    uint32_t resting; /* those threads */
    dtrain__mux_message *early; /* for lanes that are still to be made */
    dtrain__mux_peer *peers;
    dtrain__mux_block *spare;
    unsigned char waste[4096];
    dtrain__council council;       /* gets control messages of kinds from DTRAIN__MUX_OTHERS on; see >>mux_plane */
    char why[DTRAIN__ERROR_BYTES]; /* why the lane that left last has left */
    int64_t idle_ns;               /* pause of the service thread between two looks */
};

static void dtrain__mux_enter(dtrain__mux *mux)
{
    if (!dtrain__os_try_lock(&mux->turn)) {
        DTRAIN__ATOMIC_ADD(&mux->waiting, 1, SEQ_CST);
        dtrain__os_lock(&mux->turn);
        DTRAIN__ATOMIC_SUB(&mux->waiting, 1, SEQ_CST);
        mux->crowded_ns = dtrain__os_now_ns() + DTRAIN__MUX_CROWDED_NS;
    }
    DTRAIN__ATOMIC_STORE(&mux->turns, mux->turns + 1, SEQ_CST);
}

/* Gives the next turn to a thread that waits: a mutex is not fair. */
static void dtrain__mux_exit(dtrain__mux *mux)
{
    uint64_t turns = DTRAIN__ATOMIC_LOAD(&mux->turns, SEQ_CST);
    dtrain__os_unlock(&mux->turn);
    for (int i = 0; i < 200 && DTRAIN__ATOMIC_LOAD(&mux->waiting, SEQ_CST) > 0 &&
                    DTRAIN__ATOMIC_LOAD(&mux->turns, SEQ_CST) == turns;
         i++)
        dtrain__os_yield();
}

/* ---- control messages out ---- */

static void dtrain__mux_frame(unsigned char *out, uint64_t lane, int kind, const void *payload, size_t bytes)
{
    dtrain__put_le(out, lane, 8);
    dtrain__put_le(out + 8, (uint64_t)kind, 4);
    dtrain__put_le(out + 12, bytes, 4);
    uint64_t check = dtrain__xxh64_of(out, 16, 0);
    dtrain__put_le(out + 16, kind == DTRAIN__MUX_DATA ? check : dtrain__xxh64_of(payload, bytes, check), 8);
}

/* Wakes the threads of this rank that rest. */
static void dtrain__mux_ring(dtrain__mux *mux)
{
    dtrain__bell_ring(&mux->bell);
    if (DTRAIN__ATOMIC_LOAD(&mux->resting, SEQ_CST) > 0)
        dtrain__os_poke(mux->doorbell[1]);
}

/* Wakes whoever drives the mux: there is something to send. */
static void dtrain__mux_wake(dtrain__mux *mux)
{
    dtrain__mux_ring(mux);
    if (mux->table.wake != NULL)
        mux->table.wake(mux->table.self);
}

static dtrain__mux_message *dtrain__mux_post_new(dtrain__mux *mux, int peer, uint64_t lane, int kind, const void *head,
                                                 size_t head_bytes, const void *data, size_t bytes)
{
    size_t all = DTRAIN__MUX_HEADER + head_bytes + bytes;
    dtrain__mux_message *post = (dtrain__mux_message *)dtrain__alloc(mux->allocator, sizeof *post + all);
    unsigned char *payload = (unsigned char *)(post + 1) + DTRAIN__MUX_HEADER;
    if (post == NULL)
        return NULL;
    post->lane = lane;
    post->peer = peer;
    post->kind = kind;
    post->bytes = all;
    if (head_bytes > 0)
        memcpy(payload, head, head_bytes);
    if (bytes > 0)
        memcpy(payload + head_bytes, data, bytes);
    dtrain__mux_frame((unsigned char *)(post + 1), lane, kind, payload, head_bytes + bytes);
    return post;
}

/* The most bytes of a control message. Some list all ranks. */
static size_t dtrain__mux_control(const dtrain__mux *mux)
{
    return DTRAIN__MUX_CONTROL + 16 * (size_t)mux->table.size;
}

/* Copies a control message, a head and data of at most dtrain__mux_control() bytes. It is sent when the mux is driven.
 * Any thread; never blocks. Returns 0 if there is no memory, or the peer does not receive. */
static int dtrain__mux_post(dtrain__mux *mux, int peer, uint64_t lane, int kind, const void *head, size_t head_bytes,
                            const void *data, size_t bytes)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    dtrain__os_lock(&mux->mutex);
    int full = kind >= DTRAIN__MUX_OTHERS && p->posted > DTRAIN__MUX_POSTED; /* before anything is copied */
    dtrain__os_unlock(&mux->mutex);
    dtrain__mux_message *post =
        full ? NULL : dtrain__mux_post_new(mux, peer, lane, kind, head, head_bytes, data, bytes);
    if (post == NULL)
        return 0;
    dtrain__os_lock(&mux->mutex);
    if (p->last != NULL)
        p->last->next = post;
    else
        p->first = post;
    p->last = post;
    p->posted += post->bytes;
    dtrain__os_unlock(&mux->mutex);
    dtrain__mux_wake(mux);
    return 1;
}

/* Posts to all other members that are there. Without memory they find out by themselves. */
static void dtrain__mux_tell(dtrain__mux_lane *lane, int kind, uint64_t number, const char *text)
{
    unsigned char head[8];
    size_t bytes = strlen(text) < DTRAIN__ERROR_BYTES - 1 ? strlen(text) : DTRAIN__ERROR_BYTES - 1;
    dtrain__put_le(head, number, 8);
    for (int rank = 0; rank < lane->seat.size; rank++)
        if (rank != lane->seat.rank && !dtrain__membership_left(lane->seat.members, rank))
            dtrain__mux_post(lane->mux, dtrain__seat_world(&lane->seat, rank), lane->seat.id, kind, head, sizeof head,
                             text, bytes);
}

/* Counts `sent` bytes of a peer's first post, then returns the first post that is left. */
static dtrain__mux_message *dtrain__mux_posted(dtrain__mux *mux, dtrain__mux_peer *p, size_t sent)
{
    dtrain__mux_message *post;
    dtrain__os_lock(&mux->mutex);
    post = p->first;
    if (post != NULL && (post->begin += sent) == post->bytes) {
        p->first = post->next;
        p->last = p->first != NULL ? p->last : NULL;
        p->posted -= post->bytes;
        dtrain__free(mux->allocator, post);
        post = p->first;
    }
    dtrain__os_unlock(&mux->mutex);
    return post;
}

/* ---- who is there ---- */

static dtrain__mux_lane *dtrain__mux_lane_of(const dtrain__mux *mux, uint64_t id)
{
    return (dtrain__mux_lane *)(void *)dtrain__council_seat(&mux->council, id);
}

static void dtrain__mux_end(dtrain__seat *seat, int about, const dtrain__error *cause)
{
    (void)about;
    dtrain__mux_tell((dtrain__mux_lane *)(void *)seat, DTRAIN__MUX_FAIL, (uint64_t)cause->status, cause->text);
}

/* The lane's peer is gone. If it did not say so, that ends the lane if it has the peer or is bound to it. */
static void dtrain__mux_lost(dtrain__mux_lane *lane, int peer, dtrain_status status, const char *why)
{
    int rank = dtrain__seat_rank(&lane->seat, peer);
    if (lane->mux->peers[peer].bye && rank >= 0)
        dtrain__seat_left(&lane->seat, rank, why, UINT64_MAX);
    else if (!lane->mux->peers[peer].bye && dtrain__seat_lost(&lane->seat, peer, status, "", why))
        dtrain__mux_end(&lane->seat, peer, &lane->seat.members->cause);
}

/* The same for a lane that is made or bound after the peer has gone. */
static void dtrain__mux_marks(dtrain__seat *seat, int world)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)(void *)seat;
    dtrain__mux_lost(lane, world, lane->mux->peers[world].gone, "its end of the transport is closed");
}

/* The transport says that the peer is lost, or that it is of no more use. The caller holds turn. */
static void dtrain__mux_gone(dtrain__mux *mux, int peer, dtrain_status status)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    char why[DTRAIN__ERROR_BYTES];
    dtrain__error kept = dtrain__thread_error;
    if (p->gone != DTRAIN_OK)
        return;
    p->gone = status;
    p->frame = 0;
    if (kept.status == status)
        snprintf(why, sizeof why, "%s", kept.text);
    else if (status == DTRAIN_ERR_PEER_LOST)
        snprintf(why, sizeof why, "its end of the transport is closed");
    else
        snprintf(why, sizeof why, "the transport returned %s", dtrain_status_name(status));
    for (dtrain__mux_message *post = dtrain__mux_posted(mux, p, 0); post != NULL;)
        post = dtrain__mux_posted(mux, p, post->bytes - post->begin);
    for (dtrain__seat *seat = mux->council.seats; seat != NULL; seat = seat->next)
        dtrain__mux_lost((dtrain__mux_lane *)(void *)seat, peer, status, why);
    dtrain__council_lost(&mux->council, peer);
    dtrain__thread_error = kept;
}

/* ---- what comes ---- */

static dtrain__mux_inbox *dtrain__mux_inbox_find(dtrain__mux *mux, int peer, uint64_t lane)
{
    dtrain__mux_inbox **at = &mux->peers[peer].inboxes;
    while (*at != NULL && (*at)->lane != lane)
        at = &(*at)->next;
    if (*at == NULL && (*at = (dtrain__mux_inbox *)dtrain__alloc(mux->allocator, sizeof **at)) != NULL)
        (*at)->lane = lane;
    return *at;
}

static void dtrain__mux_inbox_empty(dtrain__mux *mux, dtrain__mux_peer *p, dtrain__mux_inbox *inbox)
{
    while (inbox->first != NULL) {
        dtrain__mux_block *block = inbox->first;
        inbox->first = block->next;
        dtrain__free(mux->allocator, block);
    }
    inbox->last = NULL;
    p->kept -= inbox->bytes;
    p->full_ns = 0;
    inbox->bytes = 0;
}

static void dtrain__mux_inbox_drop(dtrain__mux *mux, int peer, dtrain__mux_inbox *inbox)
{
    dtrain__mux_inbox **at = &mux->peers[peer].inboxes;
    dtrain__mux_inbox_empty(mux, &mux->peers[peer], inbox);
    while (*at != inbox)
        at = &(*at)->next;
    *at = inbox->next;
    if (mux->peers[peer].inbox == inbox)
        mux->peers[peer].inbox = NULL;
    dtrain__free(mux->allocator, inbox);
}

static void dtrain__mux_inbox_take(dtrain__mux *mux, dtrain__mux_peer *p, dtrain__mux_inbox *inbox, dtrain_transfer *in)
{
    while (inbox->first != NULL && in->moved < in->bytes) {
        dtrain__mux_block *block = inbox->first;
        size_t n = block->end - block->begin, most = in->bytes - in->moved;
        n = n < most ? n : most;
        memcpy(in->data + in->moved, block->data + block->begin, n);
        in->moved += n;
        block->begin += n;
        inbox->bytes -= n;
        p->kept -= n;
        p->full_ns = 0;
        if (block->begin < block->end)
            return;
        inbox->first = block->next;
        inbox->last = inbox->first != NULL ? inbox->last : NULL;
        if (mux->spare == NULL)
            mux->spare = block; /* so that a warm loop allocates nothing */
        else
            dtrain__free(mux->allocator, block);
    }
}

/* Returns a block with room for more of the inbox; NULL: no memory. */
static dtrain__mux_block *dtrain__mux_inbox_room(dtrain__mux *mux, dtrain__mux_inbox *inbox)
{
    dtrain__mux_block *block = inbox->last;
    if (block != NULL && block->end < sizeof block->data)
        return block;
    block = mux->spare;
    mux->spare = NULL;
    if (block == NULL)
        block = (dtrain__mux_block *)dtrain__resize(mux->allocator, NULL, sizeof *block);
    if (block == NULL)
        return NULL;
    block->next = NULL;
    block->begin = block->end = 0;
    if (inbox->last != NULL)
        inbox->last->next = block;
    else
        inbox->first = block;
    return inbox->last = block;
}

/* Takes a peer's LEAVE or FAIL for a lane that exists here. */
static void dtrain__mux_hear(dtrain__mux_lane *lane, int peer, int kind, const unsigned char *data, size_t bytes)
{
    int rank = dtrain__seat_rank(&lane->seat, peer);
    dtrain__error cause;
    if (rank < 0 || bytes < 8)
        return;
    cause.status = dtrain__status_told(dtrain__get_le(data, 8));
    snprintf(cause.text, sizeof cause.text, "%.*s", (int)(bytes - 8), (const char *)data + 8);
    dtrain__status_clean(cause.text);
    if (kind == DTRAIN__MUX_LEAVE) {
        lane->inboxes[rank]->ended = 1;
        dtrain__seat_left(&lane->seat, rank, cause.text, dtrain__get_le(data, 8));
    } else {
        dtrain__seat_break(&lane->seat, &cause);
    }
}

/* Counts the lanes still to be made that a peer has sent to, before it sends to one more. Members make a group
 * together, so no peer is far ahead. Returns 0 for a peer that sends to lanes that never were. */
static int dtrain__mux_may_be(dtrain__mux *mux, int peer)
{
    int ahead = 0;
    for (const dtrain__mux_message *post = mux->early; post != NULL; post = post->next)
        ahead += post->peer == peer;
    for (const dtrain__mux_inbox *inbox = mux->peers[peer].inboxes; inbox != NULL; inbox = inbox->next)
        ahead += !inbox->closed && dtrain__mux_lane_of(mux, inbox->lane) == NULL;
    if (ahead < DTRAIN__MUX_AHEAD)
        return 1;
    dtrain__mux_gone(
        mux, peer,
        dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                     "rank %d sends to %d groups that this rank has not made; make the same groups on every rank", peer,
                     ahead));
    return 0;
}

/* A whole control message has come. One for a lane that is still to be made waits for it. */
static void dtrain__mux_deliver(dtrain__mux *mux, int peer)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    dtrain__mux_lane *lane = dtrain__mux_lane_of(mux, p->lane);
    dtrain__mux_inbox *inbox = p->inboxes;
    size_t bytes = p->control_bytes;
    p->control_bytes = 0;
    if (dtrain__get_le(p->header + 16, 8) != dtrain__xxh64_of(p->control, bytes, dtrain__xxh64_of(p->header, 16, 0))) {
        dtrain__mux_gone(mux, peer, dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "a control message came damaged"));
        return;
    }
    if (p->kind >= DTRAIN__MUX_OTHERS) {
        dtrain__reader reader = {p->control, bytes};
        if (!dtrain__council_take(&mux->council, peer, p->kind - DTRAIN__MUX_OTHERS, &reader))
            dtrain__mux_gone(mux, peer, dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "it sent a malformed control message"));
        return;
    }
    if (p->kind == DTRAIN__MUX_BYE) {
        p->bye = 1;
        dtrain__mux_gone(mux, peer, DTRAIN_ERR_PEER_LOST);
        return;
    }
    if (p->kind == DTRAIN__MUX_LEAVE)
        dtrain__council_left(&mux->council, p->lane, peer);
    while (inbox != NULL && inbox->lane != p->lane)
        inbox = inbox->next;
    if (lane != NULL) {
        dtrain__mux_hear(lane, peer, p->kind, p->control, bytes);
    } else if (inbox == NULL || !inbox->closed) {
        if (!dtrain__mux_may_be(mux, peer))
            return;
        dtrain__mux_message **at = &mux->early;
        while (*at != NULL)
            at = &(*at)->next;
        *at = dtrain__mux_post_new(mux, peer, p->lane, p->kind, p->control, bytes, NULL, 0);
    } else if (p->kind == DTRAIN__MUX_LEAVE) {
        dtrain__mux_inbox_drop(mux, peer, inbox);
    }
}

/* A whole header has come. Prepares for what follows. */
static void dtrain__mux_open(dtrain__mux *mux, int peer)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    uint64_t check = dtrain__get_le(p->header + 16, 8), kind = dtrain__get_le(p->header + 8, 4);
    p->lane = dtrain__get_le(p->header, 8);
    p->kind = (int)(kind & 255);
    p->left = (size_t)dtrain__get_le(p->header + 12, 4);
    p->got = 0;
    if (kind > 255 || p->left > (kind == DTRAIN__MUX_DATA ? DTRAIN__MUX_FRAME : dtrain__mux_control(mux)) ||
        (kind == DTRAIN__MUX_DATA && check != dtrain__xxh64_of(p->header, 16, 0))) {
        p->left = 0;
        dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                     "what came from rank %d is damaged, or no frame of dtrain: use one dtrain.h on every rank", peer);
        dtrain__mux_gone(mux, peer, DTRAIN_ERR_CORRUPT);
        return;
    }
    for (p->inbox = p->inboxes; p->inbox != NULL && p->inbox->lane != p->lane;)
        p->inbox = p->inbox->next;
    if (kind == DTRAIN__MUX_DATA && p->left > 0 && p->inbox == NULL && dtrain__mux_may_be(mux, peer))
        p->inbox = dtrain__mux_inbox_find(mux, peer, p->lane);
    if (kind != DTRAIN__MUX_DATA && p->left == 0)
        dtrain__mux_deliver(mux, peer);
}

/* Finds where a peer's next bytes go; at most `limit` are kept. Returns 0 if they cannot be taken now. */
static int dtrain__mux_next_in(dtrain__mux_lane *lane, dtrain__mux *mux, int peer, dtrain_transfer *in, size_t limit,
                               dtrain_transfer *raw)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    raw->peer = peer;
    raw->moved = 0;
    raw->more = 0;
    raw->bytes = p->left;
    if (p->gone != DTRAIN_OK)
        return 0;
    if (p->left == 0) {
        raw->data = p->header + p->got;
        raw->bytes = DTRAIN__MUX_HEADER - p->got;
        if (in != NULL && p->got == 0 && p->inbox == lane->inboxes[in->peer] &&
            in->bytes - in->moved <= DTRAIN__MUX_SMALL) /* the next frame is likely to be for this call alone */
            raw->more = (int)(in->bytes - in->moved);
    } else if (p->kind != DTRAIN__MUX_DATA) {
        if (p->control == NULL)
            p->control = (unsigned char *)dtrain__alloc(mux->allocator, dtrain__mux_control(mux));
        raw->data = p->control != NULL ? p->control + p->control_bytes : NULL;
    } else if (p->inbox == NULL) { /* there was no memory for it before */
        p->inbox = dtrain__mux_inbox_find(mux, peer, p->lane);
        return p->inbox != NULL && dtrain__mux_next_in(lane, mux, peer, in, limit, raw);
    } else if (p->inbox->closed) {
        raw->data = mux->waste;
        raw->bytes = p->left < sizeof mux->waste ? p->left : sizeof mux->waste;
    } else if (in != NULL && p->inbox == lane->inboxes[in->peer] && p->inbox->bytes == 0) {
        raw->data = in->data + in->moved;
        raw->bytes = p->left < in->bytes - in->moved ? p->left : in->bytes - in->moved;
    } else if (p->kept >= limit) {
        if (p->full_ns == 0 && limit >= DTRAIN__MUX_KEPT)
            p->full_ns = dtrain__os_now_ns();
        return 0;
    } else {
        dtrain__mux_block *block = dtrain__mux_inbox_room(mux, p->inbox);
        raw->data = block != NULL ? block->data + block->end : NULL;
        if (block != NULL && sizeof block->data - block->end < p->left)
            raw->bytes = sizeof block->data - block->end;
    }
    return raw->data != NULL;
}

static void dtrain__mux_took_in(dtrain__mux *mux, const dtrain_transfer *raw, dtrain_transfer *in)
{
    dtrain__mux_peer *p = &mux->peers[raw->peer];
    if (raw->moved == 0)
        return;
    if (p->left == 0) {
        p->got += raw->moved;
        if (p->got == DTRAIN__MUX_HEADER)
            dtrain__mux_open(mux, raw->peer);
        return;
    }
    p->left -= raw->moved;
    if (p->kind != DTRAIN__MUX_DATA) {
        p->control_bytes += raw->moved;
        if (p->left == 0)
            dtrain__mux_deliver(mux, raw->peer);
    } else if (in != NULL && raw->data == in->data + in->moved) {
        in->moved += raw->moved;
    } else if (!p->inbox->closed) {
        p->inbox->last->end += raw->moved;
        p->inbox->bytes += raw->moved;
        p->kept += raw->moved;
    }
}

/* ---- what goes ---- */

/* Finds the next bytes to a peer: of the frame under way, of a control message, or of a new frame of out. Returns 0 if
 * there are none. */
static int dtrain__mux_next_out(dtrain__mux_lane *lane, dtrain__mux *mux, int peer, const dtrain_transfer *out,
                                dtrain_transfer *raw)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    dtrain__mux_message *post = NULL;
    const unsigned char *data;
    if (p->gone != DTRAIN_OK)
        return 0;
    if (p->frame == 0 && (post = dtrain__mux_posted(mux, p, 0)) == NULL && out != NULL && out->moved < out->bytes) {
        size_t n = out->bytes - out->moved < DTRAIN__MUX_FRAME ? out->bytes - out->moved : DTRAIN__MUX_FRAME;
        p->direct = out->data + out->moved;
        p->frame = DTRAIN__MUX_HEADER + n;
        p->filled = DTRAIN__MUX_HEADER + (n <= DTRAIN__MUX_SMALL ? n : 0);
        p->at = p->counted = 0;
        p->owner = lane;
        p->to = out->peer;
        dtrain__mux_frame(p->stage, lane->seat.id, DTRAIN__MUX_DATA, NULL, n);
        memcpy(p->stage + DTRAIN__MUX_HEADER, p->direct, p->filled - DTRAIN__MUX_HEADER);
    }
    if (p->frame == 0 && post == NULL)
        return 0;
    data = post != NULL        ? (const unsigned char *)(post + 1) + post->begin
           : p->at < p->filled ? p->stage + p->at
                               : p->direct + (p->at - DTRAIN__MUX_HEADER);
    raw->peer = peer;
    memcpy(&raw->data, &data, sizeof data); /* it is only read */
    raw->bytes = post != NULL ? post->bytes - post->begin : (p->at < p->filled ? p->filled : p->frame) - p->at;
    raw->moved = 0;
    raw->more = post == NULL && p->at < p->filled && p->filled < p->frame;
    return 1;
}

static void dtrain__mux_took_out(dtrain__mux *mux, const dtrain_transfer *raw)
{
    dtrain__mux_peer *p = &mux->peers[raw->peer];
    if (p->frame == 0) {
        dtrain__mux_posted(mux, p, raw->moved);
        return;
    }
    p->at += raw->moved;
    if (p->at < p->frame)
        return;
    if (p->owner != NULL)
        p->owner->done[p->to] += p->frame - DTRAIN__MUX_HEADER - p->counted;
    p->frame = 0;
}

static void dtrain__mux_collect(dtrain__mux_lane *lane, dtrain_transfer *out)
{
    size_t *done = &lane->done[out->peer], n = out->bytes - out->moved;
    n = *done < n ? *done : n;
    *done -= n;
    out->moved += n;
}

/* The caller gets its memory back. A frame of which nothing is sent yet is withdrawn. The rest of one that has begun is
 * copied. Its owner is told of its first byte, so that it knows the frame has begun. It is told of the others when all
 * are sent. */
static void dtrain__mux_park(dtrain__mux *mux, int peer)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    if (p->frame == 0)
        return;
    if (p->at == 0) {
        p->frame = 0;
        return;
    }
    if (p->filled < p->frame)
        memcpy(p->stage + p->filled, p->direct + (p->filled - DTRAIN__MUX_HEADER), p->frame - p->filled);
    p->filled = p->frame;
    if (p->counted == 0 && p->frame - DTRAIN__MUX_HEADER > 1 && p->owner != NULL) {
        p->counted = 1;
        p->owner->done[p->to]++;
    }
}

#endif
