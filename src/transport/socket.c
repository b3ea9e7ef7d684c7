/* ---- >>socket ----
 * The transport over TCP and unix sockets. One end of it is a channel of the hub. A lane is made when its peer is first
 * needed. If a peer has several lanes, its stream uses them in turn. A caller tries, looks again for a while, then
 * sleeps in poll(). It holds hub->mutex while it moves bytes, and not while it waits. */
#ifndef DTRAIN__SOCKET
#define DTRAIN__SOCKET
#include "../wire/transport.h"
#include "../control/world.c"
DTRAIN__FAST_BEGIN

#ifndef DTRAIN__TURN_BYTES
#define DTRAIN__TURN_BYTES ((size_t)1 << 19) /* moved one way before the other has its turn, so they stay in cache */
#endif
#define DTRAIN__POLL_BYTES ((size_t)1 << 16) /* the same for a caller that does not wait */
#define DTRAIN__PATIENCE_NS 50000            /* how long to look again before sleeping */
#define DTRAIN__GRACE_NS 1000000000          /* for the reason of a closed connection to arrive through rank 0 */

/* Deals with a lane without a connection: asks for one, or reports that there will be none. */
static dtrain_status dtrain__socket_missing(dtrain__channel *channel, dtrain__lane *lane, int rank)
{
    dtrain__hub *hub = channel->hub;
    dtrain__peer *peer = &channel->peers[rank];
    dtrain__error lost;
    int64_t now = dtrain__os_now_ns();
    int left = dtrain__membership_left(channel->seat.members, rank),
        coming = lane->handshake != NULL || dtrain__channel_admitted(channel, dtrain__seat_world(&channel->seat, rank),
                                                                     (int)(lane - peer->lanes)) != NULL;
    if (left && coming) /* the peer may have connected, sent all of its bytes, and left */
        return DTRAIN_OK;
    if (left)
        return dtrain__seat_needs(&channel->seat, rank);
    if (dtrain__hub_is_deaf(hub, hub->rank) && dtrain__hub_is_deaf(hub, dtrain__seat_world(&channel->seat, rank)))
        dtrain__fail(&lost, DTRAIN_ERR_UNSUPPORTED,
                     "rank %d (%s) and rank %d cannot connect to each other, as neither listens (listen_on is \"none\" "
                     "on both): let one of them listen, or send by way of a rank that listens",
                     rank, hub->members[dtrain__seat_world(&channel->seat, rank)].name, channel->seat.rank);
    else if (dtrain__net_is_corrupt(lane->why) && hub->reconnect_ns == 0)
        dtrain__fail(&lost, DTRAIN_ERR_CORRUPT, "rank %d (%s) and rank %d cannot trust their connection: %s", rank,
                     hub->members[dtrain__seat_world(&channel->seat, rank)].name, channel->seat.rank,
                     dtrain__net_why(lane->why));
    else if (lane->links > 0 && now - lane->down_ns > (hub->reconnect_ns > 0 ? hub->reconnect_ns : DTRAIN__GRACE_NS))
        dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d (%s) is lost: its connection to rank %d was closed%s%s",
                     rank, hub->members[dtrain__seat_world(&channel->seat, rank)].name, channel->seat.rank,
                     lane->why == EPROTO      ? " without its sealed end"
                     : lane->why == ETIMEDOUT ? ", as its other host answered nothing"
                                              : "",
                     hub->reconnect_ns > 0 ? " and has not come back within reconnect_ms" : "");
    else {
        if (!lane->wanted && (lane->links == 0 || hub->reconnect_ns > 0)) {
            lane->wanted = channel->attend = 1;
            dtrain__hub_kick(hub);
        }
        return DTRAIN_OK;
    }
    dtrain__seat_end(&channel->seat, rank, &lost);
    return lost.status;
}

/* Moves bytes without waiting, about `most` at once. Sets *moved to 1 if it moves any. */
static dtrain_status dtrain__socket_try(dtrain__channel *channel, dtrain_transfer *transfer, int sending, size_t most,
                                        int *moved)
{
    dtrain__peer *peer = &channel->peers[transfer->peer];
    uint64_t *total = sending ? &peer->sent : &peer->received;
    while (transfer->moved < transfer->bytes) {
        size_t room, bytes = transfer->bytes - transfer->moved;
        dtrain__lane *lane = dtrain__channel_lane(channel, transfer->peer, sending, &room);
        unsigned char *data = transfer->data + transfer->moved;
        ssize_t n;
        if (!dtrain__lane_open(lane, sending))
            return dtrain__socket_missing(channel, lane, transfer->peer);
        bytes = bytes < room ? bytes : room;
        bytes = bytes < most ? bytes : most;
        /* a header may wait for its payload only if both use the same lane */
        n = sending ? dtrain__stream_send(&lane->stream, data, bytes, transfer->more && bytes < room)
                    : dtrain__stream_recv(&lane->stream, data, bytes);
        if (n < 0 && errno == EFAULT)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "rank %d: the program's memory for what goes %s rank %d is not there at %p: it was "
                                "freed, unmapped or protected while the operation was under way, or the buffer is "
                                "smaller than its count; keep it until the call, or dtrain_work_wait, has returned",
                                channel->seat.rank, sending ? "to" : "in from", transfer->peer, (void *)data);
        if (n < 0) {
            dtrain__lane_down(channel->hub, lane, dtrain__seat_world(&channel->seat, transfer->peer), sending, errno);
            continue;
        }
        if (n == 0)
            return DTRAIN_OK;
        transfer->moved += (size_t)n;
        *total += (uint64_t)n;
        *moved = 1;
        if ((size_t)n < bytes || bytes == most)
            return DTRAIN_OK; /* let the other direction move */
    }
    return DTRAIN_OK;
}

/* Notes that this direction waits for its peer. */
static void dtrain__socket_await(dtrain__channel *channel, const dtrain_transfer *transfer, int sending)
{
    if (transfer == NULL || transfer->moved == transfer->bytes)
        return;
    channel->peers[transfer->peer].awaits |= sending ? POLLOUT : POLLIN;
    channel->awaiting = 1;
}

/* Tries both directions once. asked: 1 for a caller that will not wait here. In a broken group every operation ends
 * with the group's cause, but only when no more bytes move: bytes that a peer sent before it failed still arrive. In an
 * aborted group operations end at once. */
static dtrain_status dtrain__socket_turn(dtrain__channel *channel, dtrain_transfer *out, dtrain_transfer *in, int asked,
                                         int *moved)
{
    dtrain_status status = DTRAIN_OK;
    size_t most = asked ? DTRAIN__POLL_BYTES : DTRAIN__TURN_BYTES;
    const dtrain__error *cause;
    dtrain__os_lock(&channel->hub->mutex);
    if (in != NULL)
        status = dtrain__socket_try(channel, in, 0, most, moved);
    if (status == DTRAIN_OK && out != NULL)
        status = dtrain__socket_try(channel, out, 1, most, moved);
    cause = dtrain__membership_cause(channel->seat.members);
    if (cause != NULL && (status != DTRAIN_OK || !*moved || cause->status == DTRAIN_ERR_ABORTED))
        status = dtrain__report(cause);
    if (asked) {
        dtrain__socket_await(channel, in, 0);
        dtrain__socket_await(channel, out, 1);
    }
    dtrain__os_unlock(&channel->hub->mutex);
    return status;
}

/* Adds what a direction waits for. Returns 1 if it need not wait. */
static int dtrain__socket_watch(dtrain__channel *channel, dtrain_transfer *transfer, int sending, struct pollfd *fds,
                                int *count)
{
    size_t room;
    int events;
    if (transfer == NULL)
        return 0;
    dtrain__lane *lane = dtrain__channel_lane(channel, transfer->peer, sending, &room);
    if (!dtrain__lane_open(lane, sending))
        return 0;
    int here = dtrain__stream_arm(&lane->stream, sending, &events);
    dtrain__net_watch(fds, count, lane->stream.fd, events);
    return here;
}

/* Sleeps until a direction may move bytes, the control plane has news, or until_ns. */
static void dtrain__socket_sleep(dtrain__channel *channel, dtrain_transfer *out, dtrain_transfer *in, int64_t until_ns,
                                 uint64_t seen)
{
    struct pollfd fds[3];
    int count = 0, missing;
    dtrain__os_lock(&channel->hub->mutex);
    int here = dtrain__socket_watch(channel, out, 1, fds, &count);
    here |= dtrain__socket_watch(channel, in, 0, fds, &count);
    missing = count < (out != NULL) + (in != NULL);
    dtrain__os_unlock(&channel->hub->mutex);
    if (here)
        return;
    if (missing) { /* a missing connection also ends by the clock */
        int64_t soon = dtrain__os_now_ns() + 50000000;
        until_ns = soon < until_ns ? soon : until_ns;
    }
    dtrain__hub_wait(channel, fds, count, until_ns, seen);
}

static dtrain_status dtrain__socket_exchange(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    int64_t sleep_ns = 0, now;
    for (;;) {
        uint64_t seen = DTRAIN__ATOMIC_LOAD(&channel->hub->council.news, SEQ_CST);
        int moved = 0;
        dtrain_status status = dtrain__socket_turn(channel, out, in, deadline_ns == 0, &moved);
        if (status != DTRAIN_OK || (out != NULL && out->moved == out->bytes) || (in != NULL && in->moved == in->bytes))
            return status;
        if (moved && deadline_ns != 0) {
            sleep_ns = 0;
            continue;
        }
        if (deadline_ns == 0 || (now = dtrain__os_now_ns()) >= deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (sleep_ns == 0)
            sleep_ns = now + DTRAIN__PATIENCE_NS;
        if (now < sleep_ns) {
            if (channel->hub->crowded)
                dtrain__os_yield();
            continue;
        }
        dtrain__socket_sleep(channel, out, in, deadline_ns, seen);
    }
}

/* A turn of the hub on a thread that does not wait. */
static void dtrain__socket_poll(void *self, int64_t deadline_ns)
{
    dtrain__hub *hub = ((dtrain__channel *)self)->hub;
    (void)deadline_ns;
    if (!dtrain__os_try_lock(&hub->step_mutex))
        return;
    dtrain__hub_step(hub, NULL, 0, 0);
    dtrain__os_unlock(&hub->step_mutex);
}

static void dtrain__socket_wake(void *self)
{
    dtrain__hub_kick(((dtrain__channel *)self)->hub);
}

static void dtrain__socket_fail(void *self, dtrain_status why, const char *text)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__error cause;
    dtrain__membership_because(&cause, why, "%s", text);
    dtrain__os_lock(&channel->hub->mutex);
    dtrain__seat_end(&channel->seat, channel->seat.rank, &cause);
    dtrain__hub_flush_all(channel->hub, 100);
    dtrain__os_unlock(&channel->hub->mutex);
}

static void dtrain__socket_leave(void *self, const char *why)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    dtrain__reason bye = {DTRAIN__FRAME_BYE, channel->seat.id, channel->seat.rank, DTRAIN_OK, why, channel->seat.calls};
    dtrain__reason gone = {DTRAIN__FRAME_GONE, 0, hub->rank, DTRAIN_OK, why, 0};
    if (channel->seat.forked)
        return;
    dtrain__os_lock(&hub->mutex);
    hub->leaving = hub->council.seats == &channel->seat && channel->seat.next == NULL;
    if (!hub->leaving || hub->formed)
        dtrain__channel_relay(channel, &bye);
    if (hub->leaving)
        dtrain__hub_relay(hub, -1, &gone);
    dtrain__hub_flush_all(hub, 100);
    dtrain__os_unlock(&hub->mutex);
}

DTRAIN__FAST_END
#endif
