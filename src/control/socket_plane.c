/* ---- >>socket_plane ----
 * The control plane of ranks of several processes: a channel of the hub (see >>hub). */
#ifndef DTRAIN__SOCKET_PLANE
#define DTRAIN__SOCKET_PLANE
#include "../transport/socket.c"

static const dtrain__plane *dtrain__socket_plane_table(void);

static void dtrain__socket_plane_end(dtrain__end *end, dtrain__channel *channel)
{
    memset(end, 0, sizeof *end);
    dtrain__socket_transport(&end->transport, channel);
    end->plane = dtrain__socket_plane_table();
    end->origin = &channel->hub->origin;
    end->members = &channel->members;
    end->allocator = channel->hub->allocator;
}

/* Makes this process's end of a new world, which is still to form. */
static dtrain_status dtrain__socket_plane_create(dtrain__end *end, const dtrain__keys *keys,
                                                 const dtrain__hub_desc *desc, dtrain_allocator *allocator)
{
    dtrain__channel *channel;
    dtrain_status status = dtrain__socket_create(&channel, keys, desc, allocator);
    if (status == DTRAIN_OK)
        dtrain__socket_plane_end(end, channel);
    return status;
}

static dtrain_status dtrain__socket_plane_group(void *self, const dtrain__group_desc *desc, dtrain__end *end)
{
    dtrain__hub *hub = ((dtrain__channel *)self)->hub;
    dtrain__channel *channel = NULL;
    pthread_mutex_lock(&hub->mutex);
    dtrain_status status = dtrain__channel_create(&channel, hub, desc->id, desc->worlds, desc->size, desc->rank);
    pthread_mutex_unlock(&hub->mutex);
    if (status == DTRAIN_OK)
        dtrain__socket_plane_end(end, channel);
    return status;
}

static int dtrain__socket_plane_world(void *self, int rank)
{
    return ((dtrain__channel *)self)->peers[rank].world;
}

static uint64_t dtrain__socket_plane_host(void *self, int rank)
{
    const dtrain__channel *channel = (dtrain__channel *)self;
    return channel->hub->members[channel->peers[rank].world].host;
}

static int dtrain__socket_plane_node_ranks(void *self)
{
    const dtrain__channel *channel = (dtrain__channel *)self;
    int n = 1;
    while (n < channel->size && dtrain__socket_plane_host(self, n) == dtrain__socket_plane_host(self, 0))
        n++;
    for (int rank = 0; rank < channel->size; rank++) {
        uint64_t host = dtrain__socket_plane_host(self, rank);
        if (host != dtrain__socket_plane_host(self, rank - rank % n) ||
            (rank >= n && rank % n == 0 && host == dtrain__socket_plane_host(self, rank - 1)))
            return 0;
    }
    return n;
}

static int dtrain__socket_plane_bound(void *self, int *worlds)
{
    const dtrain__channel *channel = (dtrain__channel *)self;
    int count = 0;
    if (worlds == NULL)
        return channel->hub->size;
    for (int rank = 0; channel->bound != NULL && rank < channel->hub->size; rank++)
        if (channel->bound[rank])
            worlds[count++] = rank;
    return count;
}

static int dtrain__socket_plane_bind(void *self, const int *worlds, int count)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    pthread_mutex_lock(&channel->hub->mutex);
    int good = dtrain__channel_bind(channel, worlds, count);
    pthread_mutex_unlock(&channel->hub->mutex);
    return good;
}

static void dtrain__socket_plane_follow(void *self, void *leader)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    pthread_mutex_lock(&channel->hub->mutex);
    dtrain__channel_follow(channel, (dtrain__channel *)leader);
    pthread_mutex_unlock(&channel->hub->mutex);
}

static dtrain_status dtrain__socket_plane_form(void *self, int *formed, int64_t started_ns, int64_t deadline_ns,
                                               int wait)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    for (;;) {
        uint64_t seen = __atomic_load_n(&channel->hub->news, __ATOMIC_SEQ_CST);
        struct pollfd none[1];
        dtrain_status status = dtrain__socket_formed(channel, formed, started_ns, deadline_ns);
        if (*formed || status != DTRAIN_OK || !wait)
            return status;
        dtrain__hub_wait(channel, none, 0, deadline_ns, seen);
    }
}

static void dtrain__socket_plane_lost(void *self, int rank)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    pthread_mutex_lock(&channel->hub->mutex);
    dtrain__socket_left(channel, rank);
    pthread_mutex_unlock(&channel->hub->mutex);
}

static void dtrain__socket_plane_skipped(void *self, int rank, uint64_t calls)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    pthread_mutex_lock(&channel->hub->mutex);
    dtrain__channel_left(channel, rank, "", calls);
    pthread_mutex_unlock(&channel->hub->mutex);
}

static int dtrain__socket_plane_agree(void *self, dtrain__agreement *agreement, int64_t deadline_ns)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    struct pollfd none[1];
    int good = 1, done, late = 0;
    pthread_mutex_lock(&hub->mutex);
    if (!agreement->voted)
        good = dtrain__consent_vote(&hub->council, channel->id, &channel->members, agreement);
    pthread_mutex_unlock(&hub->mutex);
    dtrain__hub_kick(hub);
    agreement->starved = !good;
    while (good) {
        uint64_t seen = __atomic_load_n(&hub->news, __ATOMIC_SEQ_CST);
        pthread_mutex_lock(&hub->mutex);
        done = dtrain__consent_decided(&hub->council, channel->id, agreement, hub->given_up);
        pthread_mutex_unlock(&hub->mutex);
        if (done || late)
            return done;
        dtrain__hub_wait(channel, none, 0, deadline_ns, seen); /* once at least, so that a short call gets on */
        late = dtrain__os_now_ns() >= deadline_ns;
    }
    return 0;
}

static dtrain_status dtrain__socket_plane_store(void *self, dtrain__store_call *call, int64_t deadline_ns)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    struct pollfd none[1];
    pthread_mutex_lock(&hub->mutex);
    dtrain_status status = dtrain__council_ask(&hub->council, channel->id, channel->rank, call);
    if (status == DTRAIN_OK && hub->rank != 0)
        dtrain__hub_flush(hub, 0);
    pthread_mutex_unlock(&hub->mutex);
    dtrain__hub_kick(hub);
    for (int ended = status != DTRAIN_OK; !ended;) {
        uint64_t seen = __atomic_load_n(&hub->news, __ATOMIC_SEQ_CST);
        pthread_mutex_lock(&hub->mutex);
        ended = dtrain__council_ended(&hub->council, channel->id, channel->rank, &channel->members,
                                      dtrain__os_now_ns() >= deadline_ns, &status);
        pthread_mutex_unlock(&hub->mutex);
        if (!ended)
            dtrain__hub_wait(channel, none, 0, deadline_ns, seen);
    }
    return status;
}

/* Heartbeats carry what `tell` writes, which is called with the hub's mutex held. */
static void dtrain__socket_plane_publish(void *self, dtrain__tell tell, void *record)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    pthread_mutex_lock(&channel->hub->mutex);
    channel->last_user = record;
    channel->last = tell;
    pthread_mutex_unlock(&channel->hub->mutex);
}

static size_t dtrain__socket_plane_last(void *self, int rank, int64_t after_ns, void *out, size_t capacity,
                                        int64_t *age_ns)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    const dtrain__last_heard *last = &channel->hub->members[channel->peers[rank].world].last;
    size_t bytes = 0;
    pthread_mutex_lock(&channel->hub->mutex);
    if (last->bytes <= capacity && last->heard_ns > after_ns) {
        bytes = last->bytes;
        memcpy(out, last->data, bytes);
        *age_ns = dtrain__os_now_ns() - last->heard_ns;
    }
    pthread_mutex_unlock(&channel->hub->mutex);
    return bytes;
}

/* This rank cannot connect to it, as behind a firewall; or which rank has been silent for longest, if one has:
 * "; rank 3 has been silent for 2.1 s". */
static void dtrain__socket_plane_suspect(void *self, int awaited, char *text, size_t capacity)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    const dtrain__member *member = awaited >= 0 ? &hub->members[channel->peers[awaited].world] : NULL;
    pthread_mutex_lock(&hub->mutex);
    int silent = hub->suspect >= 0 ? dtrain__channel_rank(channel, hub->suspect) : -1;
    if (member != NULL && member->trouble[0] != 0)
        snprintf(text, capacity, "; no connection to it: %s", member->trouble);
    else if (silent >= 0)
        snprintf(text, capacity, "; rank %d has been silent for %.1f s", silent, (double)hub->suspect_ns * 1e-9);
    pthread_mutex_unlock(&hub->mutex);
}

/* What it could not move before is not awaited now. */
static void dtrain__socket_plane_rest(void *self)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    pthread_mutex_lock(&channel->hub->mutex);
    for (int rank = 0; channel->awaiting && rank < channel->size; rank++)
        channel->peers[rank].awaits = 0;
    channel->awaiting = 0;
    pthread_mutex_unlock(&channel->hub->mutex);
}

static void dtrain__socket_plane_leaving(void *self, int forked, const dtrain__error *why, uint64_t calls)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    (void)why; /* dtrain_transport.leave tells */
    channel->forked = forked;
    channel->calls = calls;
}

static const dtrain__plane *dtrain__socket_plane_table(void)
{
    static const dtrain__plane table = {
        0,
        0,
        0,
        dtrain__socket_plane_group,
        dtrain__socket_plane_world,
        dtrain__socket_plane_host,
        dtrain__socket_plane_node_ranks,
        dtrain__socket_plane_bound,
        dtrain__socket_plane_bind,
        dtrain__socket_plane_follow,
        dtrain__socket_plane_form,
        dtrain__socket_plane_lost,
        dtrain__socket_plane_skipped,
        dtrain__socket_plane_agree,
        dtrain__socket_plane_store,
        dtrain__socket_plane_publish,
        dtrain__socket_plane_last,
        dtrain__socket_plane_suspect,
        dtrain__socket_plane_rest,
        dtrain__socket_plane_leaving,
    };
    return &table;
}

#endif
