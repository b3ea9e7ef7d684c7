/* ---- >>socket_plane ----
 * The control plane of ranks in several processes: each group is a channel of the hub (see >>hub). */
#ifndef DTRAIN__SOCKET_PLANE
#define DTRAIN__SOCKET_PLANE
#include "arena.c"
#include "socket.c"

static void dtrain__socket_plane_end(dtrain__end *end, dtrain__channel *channel)
{
    dtrain__seat_give(&channel->seat, end);
    end->transport.poll = dtrain__socket_poll;
    end->transport.wake = dtrain__socket_wake;
    end->transport.fail = dtrain__socket_fail;
    end->transport.leave = dtrain__socket_leave;
    end->transport.destroy = dtrain__channel_destroy;
}

static dtrain_status dtrain__socket_plane_group(void *self, const dtrain__group_desc *desc, dtrain__end *end)
{
    dtrain__hub *hub = ((dtrain__channel *)self)->hub;
    dtrain__channel *channel = NULL;
    dtrain__os_lock(&hub->mutex);
    dtrain_status status = dtrain__channel_create(&channel, hub, desc->id, desc->worlds, desc->size, desc->rank);
    dtrain__os_unlock(&hub->mutex);
    if (status == DTRAIN_OK)
        dtrain__socket_plane_end(end, channel);
    return status;
}

static uint64_t dtrain__socket_plane_host(void *self, int rank)
{
    const dtrain__channel *channel = (dtrain__channel *)self;
    return channel->hub->members[dtrain__seat_world(&channel->seat, rank)].host;
}

static dtrain_status dtrain__socket_plane_form(void *self, int *formed, int64_t started_ns, int64_t deadline_ns,
                                               int wait)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    for (;;) {
        uint64_t seen = DTRAIN__ATOMIC_LOAD(&channel->hub->council.news, SEQ_CST);
        struct pollfd none[1];
        dtrain_status status = dtrain__world_formed(channel, formed, started_ns, deadline_ns);
        if (*formed || status != DTRAIN_OK || !wait)
            return status;
        dtrain__hub_wait(channel, none, 0, deadline_ns, seen);
    }
}

static void dtrain__socket_plane_way(void *self, int rank, char *text, size_t capacity)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    dtrain__os_lock(&hub->mutex);
    const dtrain__lane *lanes = channel->peers[rank].lanes;
    if (lanes != NULL && lanes->stream.fd >= 0)
        dtrain__hub_way(hub, dtrain__seat_world(&channel->seat, rank), &lanes->stream, text, capacity);
    dtrain__os_unlock(&hub->mutex);
}

/* Heartbeats carry what `tell` writes. It is called with the hub's mutex held. */
static void dtrain__socket_plane_publish(void *self, dtrain__tell tell, void *record)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__os_lock(&channel->hub->mutex);
    channel->last_user = record;
    channel->last = tell;
    dtrain__os_unlock(&channel->hub->mutex);
}

static size_t dtrain__socket_plane_last(void *self, int rank, int64_t after_ns, void *out, size_t capacity,
                                        int64_t *age_ns)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    size_t bytes = 0;
    dtrain__os_lock(&channel->hub->mutex);
    const dtrain__last_heard *last = channel->hub->members[dtrain__seat_world(&channel->seat, rank)].last;
    if (last != NULL && last->bytes <= capacity && last->heard_ns > after_ns) {
        bytes = last->bytes;
        memcpy(out, last->data, bytes);
        *age_ns = dtrain__os_now_ns() - last->heard_ns;
    }
    dtrain__os_unlock(&channel->hub->mutex);
    return bytes;
}

/* Says that this rank cannot connect to the awaited one, as behind a firewall, or which rank has been silent for
 * longest: "; rank 3 has been silent for 2.1 s". Else it names the connection to the awaited rank. */
static void dtrain__socket_plane_suspect(void *self, int awaited, char *text, size_t capacity)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    const dtrain__member *member = awaited >= 0 ? &hub->members[dtrain__seat_world(&channel->seat, awaited)] : NULL;
    dtrain__os_lock(&hub->mutex);
    int silent = hub->suspect >= 0 ? dtrain__seat_rank(&channel->seat, hub->suspect) : -1;
    if (member != NULL && member->trouble[0] != 0)
        snprintf(text, capacity, "; no connection to it: %s", member->trouble);
    else if (silent >= 0)
        snprintf(text, capacity, "; rank %d has been silent for %.1f s", silent, (double)hub->suspect_ns * 1e-9);
    else if (member != NULL && channel->peers[awaited].lanes != NULL) {
        size_t room;
        const dtrain__lane *lane = dtrain__channel_lane(channel, awaited, 1, &room);
        char ends[128], since[64] = "";
        int64_t ms = lane->stream.fd >= 0 ? dtrain__os_unanswered_ms(lane->stream.fd) : 0;
        dtrain__lane_ends(lane, ends, sizeof ends);
        if (ms > 0)
            snprintf(since, sizeof since, ", where nothing has been answered for %.1f s", (double)ms * 1e-3);
        if (ends[0] != 0)
            snprintf(text, capacity, "; its connection is %s%s", ends, since);
    }
    dtrain__os_unlock(&hub->mutex);
}

/* Forgets what it could not move before. */
static void dtrain__socket_plane_rest(void *self)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__os_lock(&channel->hub->mutex);
    for (int rank = 0; channel->awaiting && rank < channel->seat.size; rank++)
        channel->peers[rank].awaits = 0;
    channel->awaiting = 0;
    dtrain__os_unlock(&channel->hub->mutex);
}

static int dtrain__socket_plane_offer(void *self, int polls, unsigned char *offer)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    for (int rank = 0; rank < channel->seat.size; rank++)
        if (hub->members[dtrain__seat_world(&channel->seat, rank)].host != hub->members[hub->rank].host)
            return 0;
    /* where this rank is not to share, it offers none, and all learn it */
    int doorbell = dtrain__hub_shares(hub, hub->rank) ? channel->wake[1] : -1;
    channel->arena_free = dtrain__arena_free;
    return dtrain__arena_offer(&channel->arena, &channel->seat, doorbell, polls, offer);
}

static int dtrain__socket_plane_prepare(void *self, int opened, unsigned char *offer, int64_t until_ns)
{
    const dtrain__channel *channel = (const dtrain__channel *)self;
    return dtrain__arena_prepare(channel->arena, &channel->seat, opened, offer, until_ns);
}

static void dtrain__socket_plane_open(void *self, unsigned char *offers)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__arena_open(channel->arena, &channel->seat, offers);
}

static dtrain__shared *dtrain__socket_plane_keep(void *self, const unsigned char *verdicts)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    return dtrain__arena_keep(&channel->arena, &channel->seat, channel->hub->crowded, verdicts);
}

/* The service thread will sleep; the doorbell is to wake it. */
static void dtrain__socket_plane_doze(void *self)
{
    DTRAIN__ATOMIC_STORE(&((dtrain__channel *)self)->dozing, 1, SEQ_CST);
}

static const dtrain__sharing dtrain__socket_sharing = {dtrain__socket_plane_offer, dtrain__socket_plane_prepare,
                                                       dtrain__socket_plane_open, dtrain__socket_plane_keep,
                                                       dtrain__socket_plane_doze};

static size_t dtrain__socket_plane_untaken(void *self, int rank)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__os_lock(&channel->hub->mutex);
    const dtrain__lane *lanes = channel->peers[rank].lanes;
    const dtrain__shm *shm = lanes != NULL ? &lanes->stream.shm : NULL;
    size_t bytes = shm != NULL && shm->page != NULL ? (size_t)dtrain__shm_held(shm, 1 - shm->side) : 0;
    dtrain__os_unlock(&channel->hub->mutex);
    return bytes;
}

static const dtrain__plane dtrain__socket_plane = {0,
                                                   0,
                                                   dtrain__socket_plane_group,
                                                   dtrain__socket_plane_host,
                                                   dtrain__socket_plane_form,
                                                   dtrain__socket_plane_way,
                                                   dtrain__socket_plane_publish,
                                                   dtrain__socket_plane_last,
                                                   dtrain__socket_plane_suspect,
                                                   dtrain__socket_plane_rest,
                                                   &dtrain__socket_sharing,
                                                   dtrain__socket_plane_untaken};

/* Makes this process's end of a new world, which is still to form. */
static dtrain_status dtrain__socket_plane_create(dtrain__end *end, const dtrain__keys *keys,
                                                 const dtrain__hub_desc *desc, dtrain_allocator *allocator)
{
    dtrain__channel *channel;
    dtrain_status status = dtrain__world_create(&channel, keys, desc, allocator);
    if (status != DTRAIN_OK)
        return status;
    channel->hub->council.exchange = dtrain__socket_exchange;
    channel->hub->council.plane = &dtrain__socket_plane;
    dtrain__socket_plane_end(end, channel);
    return status;
}

#endif
