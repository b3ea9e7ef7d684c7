/* ---- >>channel ----
 * Making and destroying channels and hubs. Every member makes its channel for itself, under a name that the members
 * have agreed on. Connections that a peer makes for it earlier wait as handshakes. The last channel takes the hub with
 * it, which tells the others that this process has left for good. */
#ifndef DTRAIN__CHANNEL
#define DTRAIN__CHANNEL
#include "rendezvous.c"

#define DTRAIN__PARTING_NS 1000000000 /* that a rank which leaves waits for peers that are still sending to it */

static void dtrain__channel_hang_up(dtrain__stream *stream, int forked)
{
    if (forked)
        dtrain__stream_cut(stream);
    else
        dtrain__stream_hang_up(stream);
}

/* Ends the channel's connections. Waits where a peer still sends and has not confirmed all that was sent to it. */
static void dtrain__channel_part(dtrain__channel *channel)
{
    dtrain__hub *hub = channel->hub;
    int count = channel->lanes != NULL ? channel->seat.size * hub->connections : 0, waits = count > 0;
    int64_t until_ns = dtrain__os_now_ns() + DTRAIN__PARTING_NS;
    for (int first = 1; waits; first = 0) {
        waits = 0;
        dtrain__os_lock(&hub->mutex);
        for (int i = 0; i < count; i++) {
            dtrain__stream *stream = &channel->lanes[i].stream;
            if (stream->fd < 0)
                continue;
            if (first)
                dtrain__stream_end(stream);
            waits |= dtrain__stream_drain(stream);
        }
        dtrain__os_unlock(&hub->mutex);
        waits = waits && dtrain__os_now_ns() < until_ns;
        if (waits)
            dtrain__os_sleep(1000000);
    }
}

static void dtrain__channel_free(dtrain__channel *channel)
{
    dtrain__hub *hub = channel->hub;
    int count = channel->lanes != NULL ? channel->seat.size * hub->connections : 0;
    for (int i = 0; i < count; i++) {
        dtrain__lane *lane = &channel->lanes[i];
        dtrain__channel_hang_up(&lane->stream, channel->seat.forked);
        dtrain__hub_free_handshake(hub, &lane->handshake);
        dtrain__stream_free(hub->allocator, &lane->stream);
    }
    dtrain__free(hub->allocator, channel->lanes);
    dtrain__free(hub->allocator, channel->peers);
    if (channel->arena_free != NULL)
        channel->arena_free(channel->arena);
    dtrain__seat_free(&channel->seat);
    dtrain__os_pipe_close(channel->wake);
    dtrain__free(hub->allocator, channel);
}

/* Adds a channel of `size` members and applies what is known of them. worlds[i] is member i's rank in the world; NULL:
 * i itself. The caller holds the mutex. */
static dtrain_status dtrain__channel_create(dtrain__channel **out, dtrain__hub *hub, uint64_t id, const int *worlds,
                                            int size, int rank)
{
    dtrain_status status = hub->formed ? dtrain__council_check(&hub->council, id, rank, size) : DTRAIN_OK;
    if (status != DTRAIN_OK)
        return status;
    dtrain__channel *channel = (dtrain__channel *)dtrain__alloc(hub->allocator, sizeof *channel);
    int error = ENOMEM;
    if (channel != NULL) {
        channel->hub = hub;
        channel->wake[0] = channel->wake[1] = -1;
        channel->peers = (dtrain__peer *)dtrain__alloc(hub->allocator, (size_t)size * sizeof(dtrain__peer));
        if (dtrain__seat_open(&channel->seat, &hub->council, id, NULL, worlds, size, rank) && channel->peers != NULL &&
            (!hub->formed || dtrain__channel_lay(channel)))
            error = dtrain__os_pipe(channel->wake);
    }
    if (error != 0) {
        char why[DTRAIN__FILES_TEXT];
        if (channel != NULL)
            dtrain__channel_free(channel);
        return dtrain__fail(NULL, error == ENOMEM ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_IO,
                            "rank %d cannot make its end of a group of %d ranks: %s", rank, size,
                            dtrain__net_refused(error, why));
    }
    channel->seat.next = hub->council.seats;
    hub->council.seats = &channel->seat;
    for (int i = 0; i < size; i++)
        if (hub->members[dtrain__seat_world(&channel->seat, i)].gone != DTRAIN__PRESENT)
            dtrain__hub_marks(&channel->seat, dtrain__seat_world(&channel->seat, i));
    dtrain__hub_kick(hub); /* connections may be waiting for it */
    *out = channel;
    return DTRAIN_OK;
}

/* Frees what is kept of a member. */
static void dtrain__hub_forget(dtrain__hub *hub, dtrain__member *member)
{
    char **texts[] = {&member->address, &member->name, &member->job, &member->why, &member->trouble};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        dtrain__hub_unsay(hub, texts[i]);
    if (member->last < hub->heard || member->last >= hub->heard + DTRAIN__HEARD)
        dtrain__free(hub->allocator, member->last);
    dtrain__bytes_free(hub->allocator, &member->in);
    dtrain__bytes_free(hub->allocator, &member->out);
}

static void dtrain__hub_free_members(dtrain__hub *hub, int forked)
{
    for (int rank = 0; hub->members != NULL && rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        dtrain__channel_hang_up(&member->control, forked);
        dtrain__hub_free_handshake(hub, &member->handshake);
        dtrain__stream_free(hub->allocator, &member->control);
        dtrain__hub_forget(hub, member);
    }
    dtrain__free(hub->allocator, hub->members);
    dtrain__bytes_free(hub->allocator, &hub->table);
}

static void dtrain__hub_free(dtrain__hub *hub, int forked)
{
    dtrain_allocator *allocator = hub->allocator;
    if (hub->listener_count > 0 && dtrain__net_is_unix(&hub->listening) && !dtrain__net_is_abstract(&hub->listening) &&
        !forked) /* no other process can listen there yet */
        dtrain__os_unlink(DTRAIN__OS_HERE, hub->listening.at.local.sun_path, 0);
    dtrain__hub_stop_listening(hub);
    if (hub->look_up != NULL)
        dtrain__look_up_release(hub->look_up);
    while (hub->handshakes != NULL) {
        dtrain__handshake *handshake = hub->handshakes;
        hub->handshakes = handshake->next;
        dtrain__hub_free_handshake(hub, &handshake);
    }
    dtrain__hub_free_members(hub, forked);
    dtrain__os_pipe_close(hub->kick);
    dtrain__council_free(&hub->council);
    dtrain__free(allocator, hub->fds);
    memset(&hub->keys, 0, sizeof hub->keys);
    dtrain__os_mutex_free(&hub->mutex);
    dtrain__os_mutex_free(&hub->step_mutex);
    dtrain__os_mutex_free(&hub->origin.mutex);
    dtrain__free(allocator, hub);
}

/* Takes the channel from its hub and frees it; the last one also frees the hub. A forked child touches no lock: its
 * parent's threads may have held them. */
static void dtrain__channel_destroy(void *self)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    int forked = channel->seat.forked, last;
    if (!forked) {
        dtrain__channel_part(channel);
        dtrain__os_lock(&hub->mutex);
    }
    dtrain__seat_unlink(&channel->seat);
    dtrain__consent_left(&hub->council, channel->seat.id, hub->rank);
    for (dtrain__handshake *handshake = hub->handshakes; handshake != NULL; handshake = handshake->next)
        if (handshake->purpose == DTRAIN__PURPOSE_DATA && handshake->channel == channel->seat.id)
            dtrain__handshake_close(handshake);
    last = hub->council.seats == NULL;
    if (!last)
        dtrain__channel_free(channel);
    if (!forked)
        dtrain__os_unlock(&hub->mutex);
    if (!last)
        return;
    if (!forked)
        dtrain__origin_stop(&hub->origin);
    dtrain__channel_free(channel);
    dtrain__hub_free(hub, forked);
}

/* Waits for one of fds, for news, for the doorbell, or for until_ns. fds has room for one more. If nobody else runs the
 * hub, this call does. `seen` is the value of `news` before the caller last looked. Without a service thread, whoever
 * runs the hub may stop at any time. */
static void dtrain__hub_wait(dtrain__channel *channel, struct pollfd *fds, int count, int64_t until_ns, uint64_t seen)
{
    dtrain__hub *hub = channel->hub;
    int serviced = DTRAIN__ATOMIC_LOAD(&hub->serviced, ACQUIRE) != 0;
    int64_t soon = dtrain__os_now_ns() + (serviced ? 200000000 : 10000000);
    if (!serviced && dtrain__os_try_lock(&hub->step_mutex)) {
        dtrain__net_watch(fds, &count, channel->wake[0], POLLIN);
        if (DTRAIN__ATOMIC_LOAD(&hub->council.news, SEQ_CST) == seen)
            dtrain__hub_step(hub, fds, count, until_ns);
        dtrain__os_unlock(&hub->step_mutex);
        if (channel->arena != NULL)
            dtrain__channel_awake(channel, 0);
        return;
    }
    DTRAIN__ATOMIC_STORE(&channel->waiting, 1, SEQ_CST);
    if (DTRAIN__ATOMIC_LOAD(&hub->council.news, SEQ_CST) == seen) {
        dtrain__net_watch(fds, &count, channel->wake[0], POLLIN);
        dtrain__hub_poll(fds, count, until_ns < soon ? until_ns : soon);
        if (fds[count - 1].revents != 0)
            dtrain__channel_awake(channel, 0);
    }
    DTRAIN__ATOMIC_STORE(&channel->waiting, 0, SEQ_CST);
}

static void dtrain__hub_await(dtrain__seat *seat, unsigned turn, int64_t until_ns, uint64_t seen)
{
    struct pollfd none[1];
    (void)turn;
    dtrain__hub_wait((dtrain__channel *)(void *)seat, none, 0, until_ns, seen);
}

/* Returns 0 if there is no memory. */
static int dtrain__hub_convene(dtrain__hub *hub)
{
    dtrain__council *council = &hub->council;
    council->serial = dtrain__council_number();
    council->self = hub;
    council->allocator = hub->allocator;
    council->origin = &hub->origin;
    council->rank = hub->rank;
    council->send = dtrain__hub_send;
    council->tell = dtrain__hub_news;
    council->gone = dtrain__hub_fate;
    council->dead = dtrain__hub_dead;
    council->beside = dtrain__hub_beside;
    council->mutex = &hub->mutex;
    council->lost = dtrain__hub_marks;
    council->ended = dtrain__hub_end;
    council->wait = dtrain__hub_await;
    return dtrain__council_open(council, hub->size);
}

#endif
