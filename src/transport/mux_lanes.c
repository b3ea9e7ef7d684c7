/* ---- >>mux_lanes ----
 * The lanes of a mux. Their calls take turns at the table, and a call that waits for its own bytes moves those of
 * others as well. The last lane that ends takes the mux with it. */
#ifndef DTRAIN__MUX_LANES
#define DTRAIN__MUX_LANES
#include "mux.c"

static void dtrain__mux_drain(dtrain__mux *mux, int peer, size_t limit, size_t most, int *moved);
static int dtrain__mux_convene(dtrain__mux *mux);

/* The table's send or recv has failed. What the peer sent before is received before it counts as gone. */
static void dtrain__mux_failed(dtrain__mux *mux, dtrain_transfer *out, const dtrain_transfer *in, dtrain_status status)
{
    dtrain__error kept = dtrain__thread_error;
    int peer = in != NULL ? in->peer : out->peer, moved;
    if (out != NULL)
        dtrain__mux_drain(mux, peer, DTRAIN__MUX_KEPT, 2 * DTRAIN__MUX_KEPT, &moved);
    if (out != NULL && in != NULL && mux->peers[peer].gone == DTRAIN_OK) { /* the sender is not the one that failed */
        peer = out->peer;
        dtrain__mux_drain(mux, peer, DTRAIN__MUX_KEPT, 2 * DTRAIN__MUX_KEPT, &moved);
    }
    dtrain__thread_error = kept;
    dtrain__mux_gone(mux, peer, status);
}

/* Returns whether the table reports more bytes than were asked for. Then the peer counts as gone. */
static int dtrain__mux_lied(dtrain__mux *mux, dtrain_transfer *raw)
{
    if (raw == NULL || raw->moved <= raw->bytes)
        return 0;
    dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                 "the transport reports %zu of %zu bytes moved to or from rank %d; expected no more than asked for",
                 raw->moved, raw->bytes, raw->peer);
    raw->moved = 0;
    dtrain__mux_gone(mux, raw->peer, DTRAIN_ERR_INVALID);
    return 1;
}

/* Receives. raw->more bytes are likely to follow a header: they are asked for with it, and kept ahead. */
static dtrain_status dtrain__mux_recv(dtrain__mux *mux, dtrain_transfer *raw, int64_t until_ns)
{
    const dtrain_transport *table = &mux->table;
    dtrain__mux_peer *p = &mux->peers[raw->peer];
    if (p->ahead == NULL && raw->more > 0)
        p->ahead = (unsigned char *)dtrain__alloc(mux->allocator, DTRAIN__MUX_HEADER + DTRAIN__MUX_SMALL);
    if (p->ahead_at == p->ahead_end && (p->ahead == NULL || raw->more == 0))
        return table->recv(table->self, raw->peer, raw->data, raw->bytes, until_ns, &raw->moved);
    if (p->ahead_at == p->ahead_end) {
        p->ahead_at = p->ahead_end = 0;
        dtrain_status status =
            table->recv(table->self, raw->peer, p->ahead, raw->bytes + (size_t)raw->more, until_ns, &p->ahead_end);
        raw->moved = p->ahead_end;
        if (p->ahead_end > raw->bytes + (size_t)raw->more) /* a false report */
            p->ahead_end = 0;
        if (p->ahead_end == 0) /* else the failure is found again when these bytes are used up */
            return status;
    }
    raw->moved = p->ahead_end - p->ahead_at < raw->bytes ? p->ahead_end - p->ahead_at : raw->bytes;
    memcpy(raw->data, p->ahead + p->ahead_at, raw->moved);
    p->ahead_at += raw->moved;
    return raw->moved == raw->bytes ? DTRAIN_OK : DTRAIN_ERR_TIMEOUT;
}

/* Moves both ways until one is complete or either has moved, or until until_ns. Without an exchange it tries to send,
 * and waits for the peer in between, so that two ranks whose streams are full do not wait for each other. */
static dtrain_status dtrain__mux_both(const dtrain_transport *table, dtrain_transfer *out, dtrain_transfer *in,
                                      int64_t until_ns)
{
    if (table->exchange != NULL)
        return table->exchange(table->self, out, in, until_ns);
    for (int64_t span = 20000;; span = span < DTRAIN__MUX_SHORT_NS ? 2 * span : span) {
        size_t sent = 0, received = 0;
        dtrain_status status =
            table->send(table->self, out->peer, out->data + out->moved, out->bytes - out->moved, 0, &sent);
        out->moved += sent;
        if (status != DTRAIN_ERR_TIMEOUT)
            return status;
        int64_t now = dtrain__os_now_ns(), soon = now + span < until_ns ? now + span : until_ns;
        status = table->recv(table->self, in->peer, in->data + in->moved, in->bytes - in->moved, sent > 0 ? 0 : soon,
                             &received);
        in->moved += received;
        if (status != DTRAIN_ERR_TIMEOUT || sent > 0 || received > 0 || now >= until_ns)
            return status;
    }
}

/* Makes one call of the table, one way or both, until until_ns, and counts what moved. in: a lane's call, whose memory
 * raw_in may point into. Returns whether all of one way has moved. */
static int dtrain__mux_call(dtrain__mux *mux, dtrain_transfer *raw_out, dtrain_transfer *raw_in, dtrain_transfer *in,
                            int64_t until_ns)
{
    const dtrain_transport *table = &mux->table;
    dtrain_status status;
    if (raw_in != NULL && mux->peers[raw_in->peer].ahead_at < mux->peers[raw_in->peer].ahead_end)
        raw_out = NULL; /* bytes that are here already come first */
    dtrain__thread_error.status = DTRAIN_OK;
    if (raw_out != NULL && raw_in != NULL) {
        raw_in->more = 0;
        status = dtrain__mux_both(table, raw_out, raw_in, until_ns);
    } else if (raw_in == NULL)
        status = table->send(table->self, raw_out->peer, raw_out->data, raw_out->bytes, until_ns, &raw_out->moved);
    else
        status = dtrain__mux_recv(mux, raw_in, until_ns);
    int lied = dtrain__mux_lied(mux, raw_out) | dtrain__mux_lied(mux, raw_in);
    if (raw_out != NULL)
        dtrain__mux_took_out(mux, raw_out);
    if (raw_in != NULL)
        dtrain__mux_took_in(mux, raw_in, in);
    if (lied)
        return 0;
    if (status == DTRAIN_OK) /* which the table may say too early */
        return (raw_out != NULL && raw_out->moved == raw_out->bytes) ||
               (raw_in != NULL && raw_in->moved == raw_in->bytes);
    if (status == DTRAIN_ERR_TIMEOUT) {
        dtrain__thread_error.status = DTRAIN_OK;
        return 0;
    }
    dtrain__mux_failed(mux, raw_out, raw_in, status);
    return 0;
}

/* Receives and keeps what has come from a peer, about `most` bytes at most, as it may send without end. */
static void dtrain__mux_drain(dtrain__mux *mux, int peer, size_t limit, size_t most, int *moved)
{
    dtrain_transfer raw;
    int more = 1;
    while (more && dtrain__mux_next_in(NULL, mux, peer, NULL, limit, &raw)) {
        more = dtrain__mux_call(mux, NULL, &raw, NULL, 0) && raw.moved < most;
        most -= raw.moved < most ? raw.moved : most;
        *moved |= raw.moved > 0;
    }
}

/* Sends what waits for a peer, receives what has come from it, and asks whether it is alive. Returns whether anything
 * moved. */
static int dtrain__mux_tend(dtrain__mux *mux, int peer, size_t limit)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    dtrain_transfer raw;
    int more = 1, moved = 0;
    while (more && dtrain__mux_next_out(NULL, mux, peer, NULL, &raw)) {
        more = dtrain__mux_call(mux, &raw, NULL, NULL, 0);
        moved |= raw.moved > 0;
    }
    dtrain__mux_drain(mux, peer, limit, DTRAIN__MUX_DRAIN, &moved);
    if (mux->table.alive == NULL || p->gone != DTRAIN_OK || moved || p->kept >= limit)
        return moved;
    int64_t now = dtrain__os_now_ns();
    if (now - p->asked_ns < DTRAIN__MUX_ALIVE_NS)
        return 0;
    p->asked_ns = now;
    int alive = mux->table.alive(mux->table.self, peer);
    if (alive == 0 || alive == -2)
        dtrain__mux_gone(mux, peer, DTRAIN_ERR_PEER_LOST);
    return 0;
}

/* Tends all peers; the caller holds turn. Returns whether anything moved. */
static int dtrain__mux_sweep(dtrain__mux *mux, size_t limit)
{
    int moved = 0;
    for (int peer = 0; peer < mux->table.size; peer++)
        if (peer != mux->table.rank)
            moved |= dtrain__mux_tend(mux, peer, limit);
    dtrain__consent_look(&mux->council);
    return moved;
}

static int dtrain__mux_never(void *mux)
{
    (void)mux;
    return 0;
}

/* Sleeps until the bell or the doorbell rings, or span_ns: nobody says when bytes come. */
static void dtrain__mux_rest(dtrain__mux *mux, int64_t span_ns, int64_t until_ns)
{
    int64_t soon = dtrain__os_now_ns() + span_ns;
    if (mux->doorbell[0] >= 0) {
        DTRAIN__ATOMIC_ADD(&mux->resting, 1, SEQ_CST);
        dtrain__os_rest(mux->doorbell[0], soon < until_ns ? span_ns : until_ns - dtrain__os_now_ns());
        DTRAIN__ATOMIC_SUB(&mux->resting, 1, SEQ_CST);
        return;
    }
    dtrain__bell_wait(&mux->bell, DTRAIN__BELL_YIELDS, soon < until_ns ? soon : until_ns, dtrain__mux_never, NULL);
}

/* Moves what can be moved, until something has moved or until until_ns. Returns whether something has. */
static int dtrain__mux_drive(dtrain__mux *mux, int64_t until_ns)
{
    for (int64_t span = 100000;; span = span < DTRAIN__MUX_SHORT_NS ? 2 * span : span) {
        dtrain__mux_enter(mux);
        int moved = dtrain__mux_sweep(mux, DTRAIN__MUX_KEPT);
        dtrain__mux_exit(mux);
        if (moved || dtrain__os_now_ns() >= until_ns)
            return moved;
        dtrain__mux_rest(mux, span, until_ns);
    }
}

/* Moves a call's bytes until one way is complete, nothing moves until until_ns, or other threads should get a turn.
 * Returns whether one way is complete. */
static int dtrain__mux_turn(dtrain__mux_lane *lane, dtrain_transfer *out, dtrain_transfer *in, int64_t until_ns,
                            int *moved)
{
    dtrain__mux *mux = lane->mux;
    for (int64_t end_ns = dtrain__os_now_ns() + DTRAIN__MUX_SHORT_NS;;) {
        dtrain_transfer raw_out, raw_in;
        size_t before = in != NULL ? in->moved : 0;
        int sends, receives, more;
        if (in != NULL)
            dtrain__mux_inbox_take(mux, &mux->peers[dtrain__seat_world(&lane->seat, in->peer)], lane->inboxes[in->peer],
                                   in);
        if (out != NULL)
            dtrain__mux_collect(lane, out);
        if (in != NULL)
            *moved |= in->moved > before;
        if ((out != NULL && out->moved == out->bytes) || (in != NULL && in->moved == in->bytes))
            return 1;
        sends =
            out != NULL && dtrain__mux_next_out(lane, mux, dtrain__seat_world(&lane->seat, out->peer), out, &raw_out);
        receives = in != NULL && dtrain__mux_next_in(lane, mux, dtrain__seat_world(&lane->seat, in->peer), in,
                                                     DTRAIN__MUX_KEPT, &raw_in);
        if (!sends && !receives)
            return 0;
        more = dtrain__mux_call(mux, sends ? &raw_out : NULL, receives ? &raw_in : NULL, in, until_ns);
        *moved |= (sends && raw_out.moved > 0) || (receives && raw_in.moved > 0);
        if (!more || dtrain__os_now_ns() >= end_ns)
            break;
    }
    if (out != NULL)
        dtrain__mux_collect(lane, out);
    return (out != NULL && out->moved == out->bytes) || (in != NULL && in->moved == in->bytes);
}

/* Returns the error of a call that has been stuck because another group's bytes fill what is kept of its peer. */
static dtrain_status dtrain__mux_full(const dtrain__mux_lane *lane, const dtrain_transfer *out,
                                      const dtrain_transfer *in)
{
    const dtrain__mux *mux = lane->mux;
    const dtrain_transfer *ways[] = {out, in};
    int64_t now = dtrain__os_now_ns();
    for (int way = 0; way < 2; way++) {
        int peer = ways[way] != NULL ? dtrain__seat_world(&lane->seat, ways[way]->peer) : mux->table.rank;
        const dtrain__mux_peer *p = &mux->peers[peer];
        if (p->full_ns > 0 && now - p->full_ns > DTRAIN__MUX_FULL_NS && p->lane != lane->seat.id)
            return dtrain__fail(
                NULL, DTRAIN_ERR_MEMORY,
                "group %llx waits on rank %d of the world, but rank %d sends to group %llx, which nobody here "
                "receives; %zu bytes of it are kept, and no more fit: receive from groups in the order in which peers "
                "send, or give the transport `lanes`",
                (unsigned long long)lane->seat.id, mux->table.rank, peer, (unsigned long long)p->lane, p->kept);
    }
    return DTRAIN_ERR_TIMEOUT;
}

/* Returns why a call that does not move ends; DTRAIN_ERR_TIMEOUT: it may go on. */
static dtrain_status dtrain__mux_judge(dtrain__mux_lane *lane, const dtrain_transfer *out, const dtrain_transfer *in,
                                       int moved)
{
    const dtrain__error *cause = dtrain__membership_cause(lane->seat.members);
    if (cause != NULL && (!moved || cause->status == DTRAIN_ERR_ABORTED))
        return dtrain__report(cause);
    if (!moved && in != NULL && dtrain__membership_left(lane->seat.members, in->peer))
        return dtrain__seat_needs(&lane->seat, in->peer);
    if (out != NULL && dtrain__membership_left(lane->seat.members, out->peer))
        return dtrain__seat_needs(&lane->seat, out->peer);
    return moved ? DTRAIN_ERR_TIMEOUT : dtrain__mux_full(lane, out, in);
}

/* Allocates room for frames to a peer, before the first one. */
static dtrain_status dtrain__mux_stage(dtrain__mux *mux, int peer)
{
    dtrain__mux_peer *p = &mux->peers[peer];
    size_t bytes = DTRAIN__MUX_HEADER + DTRAIN__MUX_FRAME;
    if (p->stage == NULL)
        p->stage = (unsigned char *)dtrain__alloc(mux->allocator, bytes);
    return p->stage != NULL
               ? DTRAIN_OK
               : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes of messages to rank %d", bytes, peer);
}

/* One turn of a call until until_ns. *moved: bytes of the call moved; *others: bytes of other lanes moved. */
static dtrain_status dtrain__mux_step(dtrain__mux_lane *lane, dtrain_transfer *out, dtrain_transfer *in, int64_t now,
                                      int64_t until_ns, int *moved, int *others)
{
    dtrain__mux *mux = lane->mux;
    dtrain_status status = DTRAIN_OK;
    *moved = *others = 0;
    if (out != NULL) /* another thread may have sent the rest, and then the peer may leave */
        dtrain__mux_collect(lane, out);
    if (out != NULL && out->moved < out->bytes && dtrain__membership_left(lane->seat.members, out->peer))
        return dtrain__seat_needs(&lane->seat, out->peer);
    if (out != NULL)
        status = dtrain__mux_stage(mux, dtrain__seat_world(&lane->seat, out->peer));
    if (status != DTRAIN_OK)
        return status;
    int complete = dtrain__mux_turn(lane, out, in, until_ns, moved);
    if (out != NULL)
        dtrain__mux_park(mux, dtrain__seat_world(&lane->seat, out->peer));
    lane->stalled_ns = *moved ? 0 : lane->stalled_ns == 0 ? now : lane->stalled_ns;
    if (!complete && !*moved)
        *others = dtrain__mux_sweep(mux, now - lane->stalled_ns < DTRAIN__MUX_PATIENCE_NS ? DTRAIN__MUX_EARLY
                                                                                          : DTRAIN__MUX_KEPT);
    if (out != NULL)
        dtrain__mux_collect(lane, out);
    if (complete || (out != NULL && out->moved == out->bytes))
        return DTRAIN_OK;
    return dtrain__mux_judge(lane, out, in, *moved || *others);
}

/* One call of a lane's own streams. On an error *lost is the peer whose stream has failed. */
static dtrain_status dtrain__mux_own_call(const dtrain__mux_lane *lane, dtrain_transfer *out, dtrain_transfer *in,
                                          int64_t until_ns, int *lost)
{
    const dtrain_transport *own = &lane->own;
    dtrain_transfer *one = in != NULL ? in : out;
    size_t moved = 0;
    dtrain_status status;
    *lost = one->peer;
    dtrain__thread_error.status = DTRAIN_OK;
    if (out != NULL && in != NULL) {
        status = dtrain__mux_both(own, out, in, until_ns);
        if (status == DTRAIN_OK || status == DTRAIN_ERR_TIMEOUT)
            return status;
        if (own->recv(own->self, in->peer, in->data + in->moved, in->bytes - in->moved, 0, &moved) != status)
            *lost = out->peer;
    } else if (in != NULL) {
        status = own->recv(own->self, in->peer, in->data + in->moved, in->bytes - in->moved, until_ns, &moved);
    } else {
        status = own->send(own->self, out->peer, out->data + out->moved, out->bytes - out->moved, until_ns, &moved);
    }
    one->moved += moved;
    return status;
}

/* As dtrain__mux_move, for a lane that has streams of its own. When a peer leaves, its goodbye and the end of its
 * stream come in any order. After the first of them the lane waits a little for the other. */
static dtrain_status dtrain__mux_own_move(dtrain__mux_lane *lane, dtrain_transfer *out, dtrain_transfer *in,
                                          int64_t deadline_ns)
{
    dtrain__mux *mux = lane->mux;
    for (;;) {
        int64_t now = dtrain__os_now_ns(), until_ns = now + DTRAIN__MUX_SLICE_NS;
        size_t before = (out != NULL ? out->moved : 0) + (in != NULL ? in->moved : 0);
        int lost, moved;
        dtrain_status status =
            dtrain__mux_own_call(lane, out, in, deadline_ns < until_ns ? deadline_ns : until_ns, &lost);
        if (status == DTRAIN_OK)
            return status;
        moved = (out != NULL ? out->moved : 0) + (in != NULL ? in->moved : 0) > before;
        dtrain__mux_enter(mux);
        if (status == DTRAIN_ERR_TIMEOUT && !moved) /* before it is looked who has left */
            dtrain__mux_sweep(mux, DTRAIN__MUX_KEPT);
        int left = dtrain__membership_left(lane->seat.members, lost), closed = status == DTRAIN_ERR_PEER_LOST && !left;
        lane->waits_ns = !closed && (moved || !left) ? 0 : lane->waits_ns == 0 ? now : lane->waits_ns;
        int waits = lane->waits_ns > 0 && now - lane->waits_ns < DTRAIN__MUX_BYE_NS;
        if (status != DTRAIN_ERR_TIMEOUT && !left && !waits)
            dtrain__mux_lost(lane, dtrain__seat_world(&lane->seat, lost), status,
                             dtrain__thread_error.status == status ? dtrain__thread_error.text
                                                                   : "its end of the transport is closed");
        else if (status != DTRAIN_ERR_TIMEOUT && !moved)
            dtrain__mux_sweep(mux, DTRAIN__MUX_KEPT);
        waits = waits && (closed || (in != NULL && status == DTRAIN_ERR_TIMEOUT));
        status = waits && !dtrain__membership_broken(lane->seat.members) ? DTRAIN_ERR_TIMEOUT
                                                                         : dtrain__mux_judge(lane, out, in, moved);
        dtrain__mux_exit(mux);
        if (status != DTRAIN_ERR_TIMEOUT || deadline_ns <= now)
            return status;
        if (closed)
            dtrain__mux_rest(mux, DTRAIN__MUX_SHORT_NS, deadline_ns);
    }
}

/* Sends, receives or both for a lane, like the table's exchange. */
static dtrain_status dtrain__mux_move(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux *mux = lane->mux;
    int moved, others = 0; /* bytes of other lanes moved: look again before waiting */
    if (lane->own.send != NULL)
        return dtrain__mux_own_move(lane, out, in, deadline_ns);
    for (;;) {
        dtrain__mux_enter(mux);
        int64_t now = dtrain__os_now_ns();
        int64_t slice = now < mux->crowded_ns ? DTRAIN__MUX_SHORT_NS : DTRAIN__MUX_SLICE_NS;
        int64_t until_ns = deadline_ns <= now || others ? 0 : deadline_ns - now < slice ? deadline_ns : now + slice;
        dtrain_status status = dtrain__mux_step(lane, out, in, now, until_ns, &moved, &others);
        mux->crowded_ns = others ? now + DTRAIN__MUX_CROWDED_NS : mux->crowded_ns;
        dtrain__mux_exit(mux);
        if (status != DTRAIN_ERR_TIMEOUT || deadline_ns <= now)
            return status;
    }
}

/* ---- lanes come and go ---- */

static void dtrain__mux_lane_free(dtrain__mux_lane *lane)
{
    dtrain_allocator *allocator = lane->mux->allocator;
    if (lane->own.destroy != NULL)
        lane->own.destroy(lane->own.self);
    dtrain__arena_free(lane->arena);
    dtrain__seat_free(&lane->seat);
    dtrain__free(allocator, lane->inboxes);
    dtrain__free(allocator, lane->done);
    dtrain__free(allocator, lane);
}

/* Frees a mux without lanes. The caller calls the table's destroy. */
static void dtrain__mux_free(dtrain__mux *mux)
{
    dtrain_allocator *allocator = mux->allocator;
    for (int peer = 0; mux->peers != NULL && peer < mux->table.size; peer++) {
        dtrain__mux_peer *p = &mux->peers[peer];
        while (p->inboxes != NULL)
            dtrain__mux_inbox_drop(mux, peer, p->inboxes);
        for (dtrain__mux_message *post = dtrain__mux_posted(mux, p, 0); post != NULL;)
            post = dtrain__mux_posted(mux, p, post->bytes - post->begin);
        dtrain__free(allocator, p->stage);
        dtrain__free(allocator, p->control);
        dtrain__free(allocator, p->ahead);
    }
    while (mux->early != NULL) {
        dtrain__mux_message *post = mux->early;
        mux->early = post->next;
        dtrain__free(allocator, post);
    }
    dtrain__council_free(&mux->council);
    dtrain__os_pipe_close(mux->doorbell);
    dtrain__free(allocator, mux->spare);
    dtrain__free(allocator, mux->peers);
    dtrain__os_mutex_free(&mux->turn);
    dtrain__os_mutex_free(&mux->mutex);
    dtrain__os_mutex_free(&mux->origin.mutex);
    dtrain__free(allocator, mux);
}

/* Makes a mux without lanes over a copy of the table. */
static dtrain_status dtrain__mux_create(dtrain__mux **out, const dtrain_transport *table, dtrain_allocator *allocator)
{
    dtrain__mux *mux =
        (dtrain__mux *)dtrain__memory_owner(allocator, sizeof *mux, offsetof(dtrain__mux, own), &allocator);
    *out = mux;
    if (mux != NULL) {
        mux->allocator = allocator;
        mux->table = *table;
        mux->doorbell[0] = mux->doorbell[1] = -1;
        if (table->host != NULL && dtrain__os_pipe(mux->doorbell) != 0)
            mux->doorbell[0] = mux->doorbell[1] = -1; /* then it shares no memory */
        dtrain__os_mutex_init(&mux->turn);
        dtrain__os_mutex_init(&mux->mutex);
        dtrain__os_mutex_init(&mux->origin.mutex);
        mux->peers = (dtrain__mux_peer *)dtrain__alloc(mux->allocator, (size_t)table->size * sizeof(dtrain__mux_peer));
        int convened = dtrain__mux_convene(mux);
        if (mux->peers != NULL && convened)
            return DTRAIN_OK;
        dtrain__mux_free(mux);
    }
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "rank %d: no memory for a group over its transport", table->rank);
}

/* Takes what came for the lane before it was made. */
static void dtrain__mux_adopt(dtrain__mux_lane *lane)
{
    dtrain__mux_message **at = &lane->mux->early;
    while (*at != NULL) {
        dtrain__mux_message *post = *at;
        if (post->lane != lane->seat.id) {
            at = &post->next;
            continue;
        }
        *at = post->next;
        dtrain__mux_hear(lane, post->peer, post->kind, (const unsigned char *)(post + 1) + DTRAIN__MUX_HEADER,
                         post->bytes - DTRAIN__MUX_HEADER);
        dtrain__free(lane->mux->allocator, post);
    }
    for (int peer = 0; peer < lane->mux->table.size; peer++)
        if (lane->mux->peers[peer].gone != DTRAIN_OK)
            dtrain__mux_marks(&lane->seat, peer);
}

/* Makes the lane named id. worlds: each member's rank in the world; NULL: the same. */
static dtrain_status dtrain__mux_attach(dtrain__mux_lane **out, dtrain__mux *mux, uint64_t id, const int *worlds,
                                        int size, int rank)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)dtrain__alloc(mux->allocator, sizeof *lane);
    size_t n = (size_t)size;
    dtrain_status status = DTRAIN_OK;
    int good = lane != NULL;
    *out = lane;
    if (good) {
        lane->mux = mux;
        lane->inboxes = (dtrain__mux_inbox **)dtrain__alloc(mux->allocator, n * sizeof(dtrain__mux_inbox *));
        lane->done = (size_t *)dtrain__alloc(mux->allocator, n * sizeof(size_t));
        good = dtrain__seat_open(&lane->seat, &mux->council, id, NULL, worlds, size, rank) && lane->inboxes != NULL &&
               lane->done != NULL;
    }
    dtrain__mux_enter(mux);
    if (mux->council.seats != NULL)
        status = dtrain__council_check(&mux->council, id, rank, size);
    good = good && status == DTRAIN_OK;
    for (int i = 0; good && i < size; i++) {
        lane->inboxes[i] = dtrain__mux_inbox_find(mux, dtrain__seat_world(&lane->seat, i), id);
        good = lane->inboxes[i] != NULL;
    }
    if (good) {
        dtrain__os_lock(&mux->mutex);
        lane->seat.next = mux->council.seats;
        mux->council.seats = &lane->seat;
        dtrain__os_unlock(&mux->mutex);
        dtrain__mux_adopt(lane);
    }
    dtrain__mux_exit(mux);
    if (good)
        return DTRAIN_OK;
    if (lane != NULL)
        dtrain__mux_lane_free(lane);
    return status != DTRAIN_OK ? status
                               : dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                                              "rank %d: no memory for its end of a group of %d ranks", rank, size);
}

/* Takes the lane from its mux. What still comes for it is dropped, until the peer says that it has left, too. */
static void dtrain__mux_release(dtrain__mux_lane *lane)
{
    dtrain__mux *mux = lane->mux;
    dtrain__seat_unlink(&lane->seat);
    for (int rank = 0; rank < lane->seat.size; rank++) {
        int peer = dtrain__seat_world(&lane->seat, rank);
        dtrain__mux_peer *p = &mux->peers[peer];
        p->owner = p->owner == lane ? NULL : p->owner;
        lane->inboxes[rank]->closed = 1;
        if (peer == mux->table.rank || lane->inboxes[rank]->ended || p->gone != DTRAIN_OK)
            dtrain__mux_inbox_drop(mux, peer, lane->inboxes[rank]);
        else
            dtrain__mux_inbox_empty(mux, p, lane->inboxes[rank]);
    }
}

/* The last lane has gone. Tells the peers that its end is no loss, and waits a little for those that have not yet taken
 * what was sent before. The caller holds turn. */
static void dtrain__mux_bye(dtrain__mux *mux)
{
    int64_t until_ns = dtrain__os_now_ns() + DTRAIN__MUX_BYE_NS;
    for (int peer = 0; peer < mux->table.size; peer++)
        if (peer != mux->table.rank && mux->peers[peer].gone == DTRAIN_OK)
            dtrain__mux_post(mux, peer, 0, DTRAIN__MUX_BYE, "", 1, NULL, 0);
    for (int unsent = 1; unsent && dtrain__os_now_ns() < until_ns;) {
        int moved = dtrain__mux_sweep(mux, DTRAIN__MUX_EARLY);
        unsent = 0;
        for (int peer = 0; peer < mux->table.size; peer++)
            unsent |= mux->peers[peer].gone == DTRAIN_OK &&
                      (mux->peers[peer].frame > 0 || dtrain__mux_posted(mux, &mux->peers[peer], 0) != NULL);
        if (unsent && !moved)
            dtrain__mux_rest(mux, 100000, until_ns);
    }
}

/* Ends the lane; the last one also frees the mux and destroys the table. A forked child touches no lock: its parent's
 * threads may have held them. */
static void dtrain__mux_detach(void *self)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux *mux = lane->mux;
    dtrain_transport table = mux->table;
    int forked = lane->seat.forked, last;
    if (!forked) {
        dtrain__mux_enter(mux);
        dtrain__os_lock(&mux->mutex);
    }
    dtrain__mux_release(lane);
    last = mux->council.seats == NULL;
    if (!forked) {
        dtrain__os_unlock(&mux->mutex);
        dtrain__council_left(&mux->council, lane->seat.id, mux->table.rank);
        if (last)
            dtrain__mux_bye(mux);
        else
            dtrain__mux_sweep(mux, DTRAIN__MUX_EARLY);
        dtrain__mux_exit(mux);
    }
    dtrain__mux_lane_free(lane);
    if (!last)
        return;
    if (!forked) {
        dtrain__origin_stop(&mux->origin);
        if (table.leave != NULL)
            table.leave(table.self, mux->why);
    }
    dtrain__mux_free(mux);
    if (table.destroy != NULL)
        table.destroy(table.self);
}

#endif
