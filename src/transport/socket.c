/* ---- >>socket ----
 * The transport over TCP and unix sockets: data lanes on top of the hub. A lane is made when its peer is first
 * needed; with several to a peer the stream goes over them in turn, DTRAIN__STRIPE bytes each. A caller tries,
 * looks again for a while, then sleeps in poll(). Bytes are moved under hub->mutex, waited for without it. */
#ifndef DTRAIN__SOCKET
#define DTRAIN__SOCKET
#include "transport.h"
#include "rendezvous.c"

#define DTRAIN__STRIPE ((size_t)1 << 18)
#define DTRAIN__POLL_BYTES ((size_t)1 << 16) /* moved at once for a caller with a budget */
#define DTRAIN__PATIENCE_NS 50000            /* of looking again before sleeping */
#define DTRAIN__GRACE_NS 1000000000          /* for the reason of a closed connection to arrive by way of rank 0 */

typedef struct dtrain__socket {
    dtrain__hub hub;
    uint64_t *sent, *received; /* bytes of data to and from each rank, over all lanes */
    int crowded;               /* more ranks on this host than processors */
    pthread_t service;         /* the thread that must not look again and again, as others compute */
    int has_service;
    int forked; /* the end of a child's copy: touches nothing that the parent still uses */
} dtrain__socket;

static dtrain__lane *dtrain__socket_lane(dtrain__socket *s, int peer, int sending, size_t *room)
{
    uint64_t at = sending ? s->sent[peer] : s->received[peer];
    *room = s->hub.connections == 1 ? SIZE_MAX : DTRAIN__STRIPE - (size_t)(at % DTRAIN__STRIPE);
    return &s->hub.members[peer].lanes[at / DTRAIN__STRIPE % (uint64_t)s->hub.connections];
}

/* The lane has no connection: asks for one, or finds that there will be none. */
static dtrain_status dtrain__socket_missing(dtrain__socket *s, dtrain__lane *lane, int peer)
{
    dtrain__hub *hub = &s->hub;
    dtrain__member *member = &hub->members[peer];
    dtrain__error lost;
    int64_t now = dtrain__os_now_ns();
    if (member->left)
        dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d has left the group%s%.400s", peer,
                     member->why[0] != 0 ? ": " : "", member->why);
    else if (lane->links > 0 && now - lane->down_ns > (hub->reconnect_ns > 0 ? hub->reconnect_ns : DTRAIN__GRACE_NS))
        dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d (%s) is lost: its connection to rank %d was closed%s", peer,
                     member->name, hub->rank,
                     hub->reconnect_ns > 0 ? " and has not come back within reconnect_ms" : "");
    else {
        if (!lane->wanted && (lane->links == 0 || hub->reconnect_ns > 0)) {
            lane->wanted = 1;
            dtrain__hub_kick(hub);
        }
        return DTRAIN_OK;
    }
    dtrain__hub_end(hub, hub->rank, peer, lost.status, lost.text);
    return lost.status;
}

/* Moves what goes at once, about `most` bytes; sets *moved when something did. */
static dtrain_status dtrain__socket_try(dtrain__socket *s, dtrain_transfer *transfer, int sending, size_t most,
                                        int *moved)
{
    uint64_t *total = sending ? &s->sent[transfer->peer] : &s->received[transfer->peer];
    while (transfer->moved < transfer->bytes) {
        size_t room, bytes = transfer->bytes - transfer->moved;
        dtrain__lane *lane = dtrain__socket_lane(s, transfer->peer, sending, &room);
        unsigned char *data = transfer->data + transfer->moved;
        ssize_t n;
        if (lane->stream.fd < 0)
            return dtrain__socket_missing(s, lane, transfer->peer);
        bytes = bytes < room ? bytes : room;
        bytes = bytes < most ? bytes : most;
        /* a header may wait for its payload only where both go the same way */
        n = sending ? dtrain__stream_send(&lane->stream, data, bytes, transfer->more && bytes < room)
                    : dtrain__stream_recv(&lane->stream, data, bytes);
        if (n < 0) {
            dtrain__stream_cut(&lane->stream);
            lane->down_ns = dtrain__os_now_ns();
            continue;
        }
        if (n == 0)
            return DTRAIN_OK;
        transfer->moved += (size_t)n;
        *total += (uint64_t)n;
        *moved = 1;
        if ((size_t)n < bytes || most < SIZE_MAX)
            return DTRAIN_OK; /* the other direction may go on meanwhile */
    }
    return DTRAIN_OK;
}

/* Tries both directions once. A broken group ends every operation with the group's cause, once nothing more moves:
 * what a peer sent before it failed still completes what it was sent for. An aborted one ends them at once. */
static dtrain_status dtrain__socket_turn(dtrain__socket *s, dtrain_transfer *out, dtrain_transfer *in, size_t most,
                                         int *moved)
{
    dtrain_status status = DTRAIN_OK;
    pthread_mutex_lock(&s->hub.mutex);
    if (in != NULL)
        status = dtrain__socket_try(s, in, 0, most, moved);
    if (status == DTRAIN_OK && out != NULL)
        status = dtrain__socket_try(s, out, 1, most, moved);
    if (s->hub.broken && (status != DTRAIN_OK || !*moved || s->hub.cause.status == DTRAIN_ERR_ABORTED))
        status = dtrain__report(&s->hub.cause);
    pthread_mutex_unlock(&s->hub.mutex);
    return status;
}

static void dtrain__socket_watch(dtrain__socket *s, dtrain_transfer *transfer, int sending, struct pollfd *fds,
                                 int *count)
{
    size_t room;
    dtrain__lane *lane;
    if (transfer == NULL)
        return;
    lane = dtrain__socket_lane(s, transfer->peer, sending, &room);
    if (lane->stream.fd < 0)
        return;
    fds[*count].fd = lane->stream.fd;
    fds[*count].events = sending ? POLLOUT : POLLIN;
    fds[(*count)++].revents = 0;
}

/* Sleeps until one of the directions may go on, the control plane has news, or until_ns. */
static void dtrain__socket_sleep(dtrain__socket *s, dtrain_transfer *out, dtrain_transfer *in, int64_t until_ns,
                                 uint64_t seen)
{
    struct pollfd fds[3];
    int count = 0, missing;
    pthread_mutex_lock(&s->hub.mutex);
    dtrain__socket_watch(s, out, 1, fds, &count);
    dtrain__socket_watch(s, in, 0, fds, &count);
    missing = count < (out != NULL) + (in != NULL);
    pthread_mutex_unlock(&s->hub.mutex);
    if (missing) { /* a lost peer is judged by the clock as well */
        int64_t soon = dtrain__os_now_ns() + 50000000;
        until_ns = soon < until_ns ? soon : until_ns;
    }
    dtrain__hub_wait(&s->hub, fds, count, until_ns, seen);
}

static dtrain_status dtrain__socket_exchange(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns)
{
    dtrain__socket *s = (dtrain__socket *)self;
    int64_t sleep_ns = 0, now;
    int patient = !__atomic_load_n(&s->has_service, __ATOMIC_ACQUIRE) || !pthread_equal(s->service, pthread_self());
    for (;;) {
        uint64_t seen = __atomic_load_n(&s->hub.news, __ATOMIC_SEQ_CST);
        int moved = 0;
        dtrain_status status =
            dtrain__socket_turn(s, out, in, deadline_ns == 0 ? DTRAIN__POLL_BYTES : SIZE_MAX, &moved);
        if (status != DTRAIN_OK || (out != NULL && out->moved == out->bytes) || (in != NULL && in->moved == in->bytes))
            return status;
        if (moved && deadline_ns != 0) {
            sleep_ns = 0;
            continue;
        }
        if (deadline_ns == 0 || (now = dtrain__os_now_ns()) >= deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (sleep_ns == 0)
            sleep_ns = now + (patient ? DTRAIN__PATIENCE_NS : 0);
        if (now < sleep_ns) {
            if (s->crowded)
                sched_yield();
            continue;
        }
        dtrain__socket_sleep(s, out, in, deadline_ns, seen);
    }
}

static dtrain_status dtrain__socket_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                         size_t *moved)
{
    dtrain_transfer out = {peer, NULL, bytes, 0, 0};
    dtrain_status status = DTRAIN_OK;
    memcpy(&out.data, &data, sizeof data); /* it is only read */
    if (bytes > 0)
        status = dtrain__socket_exchange(self, &out, NULL, deadline_ns);
    *moved = out.moved;
    return status;
}

static dtrain_status dtrain__socket_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                         size_t *moved)
{
    dtrain_transfer in = {peer, (unsigned char *)data, bytes, 0, 0};
    dtrain_status status = DTRAIN_OK;
    if (bytes > 0)
        status = dtrain__socket_exchange(self, NULL, &in, deadline_ns);
    *moved = in.moved;
    return status;
}

static void dtrain__socket_poll(void *self, int64_t deadline_ns)
{
    dtrain__socket *s = (dtrain__socket *)self;
    if (deadline_ns != 0 && !s->has_service) { /* only the service thread waits here */
        s->service = pthread_self();
        __atomic_store_n(&s->has_service, 1, __ATOMIC_RELEASE);
    }
    if (deadline_ns != 0)
        pthread_mutex_lock(&s->hub.step_mutex);
    else if (pthread_mutex_trylock(&s->hub.step_mutex) != 0)
        return;
    dtrain__hub_step(&s->hub, NULL, 0, deadline_ns);
    pthread_mutex_unlock(&s->hub.step_mutex);
}

static void dtrain__socket_wake(void *self)
{
    dtrain__hub_kick(&((dtrain__socket *)self)->hub);
}

/* Sends what is to be said right now, without waiting. The system may refuse a call for no lasting reason, and nobody
 * asks again after this. */
static void dtrain__socket_flush(dtrain__hub *hub)
{
    for (int rank = 0; rank < dtrain__hub_links(hub); rank++)
        for (int turn = 0; turn < 100 && rank != hub->rank && hub->members[rank].out.bytes > 0 &&
                           hub->members[rank].control.fd >= 0;
             turn++)
            dtrain__hub_flush(hub, rank);
}

static void dtrain__socket_fail(void *self, dtrain_status why, const char *text)
{
    dtrain__hub *hub = &((dtrain__socket *)self)->hub;
    pthread_mutex_lock(&hub->mutex);
    dtrain__hub_end(hub, hub->rank, hub->rank, why, text);
    dtrain__socket_flush(hub);
    pthread_mutex_unlock(&hub->mutex);
}

static void dtrain__socket_leave(void *self, const char *why)
{
    dtrain__hub *hub = &((dtrain__socket *)self)->hub;
    if (((dtrain__socket *)self)->forked)
        return;
    pthread_mutex_lock(&hub->mutex);
    dtrain__hub_relay(hub, -1, DTRAIN__FRAME_BYE, hub->rank, DTRAIN_OK, why);
    dtrain__socket_flush(hub);
    pthread_mutex_unlock(&hub->mutex);
}

/* Closes so that what was sent still arrives: an unread byte would make the system drop it. */
static void dtrain__socket_hang_up(const dtrain__socket *s, dtrain__stream *stream)
{
    unsigned char waste[4096];
    if (stream->fd < 0 || s->forked) {
        dtrain__stream_cut(stream);
        return;
    }
    shutdown(stream->fd, SHUT_WR);
    for (int i = 0; i < 256 && dtrain__net_recv(stream->fd, waste, sizeof waste) > 0; i++)
        continue;
    dtrain__stream_cut(stream);
}

static void dtrain__socket_free_members(dtrain__socket *s)
{
    dtrain__hub *hub = &s->hub;
    for (int rank = 0; hub->members != NULL && rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        for (int i = 0; member->lanes != NULL && i < DTRAIN__MAX_LANES; i++) {
            dtrain__lane *lane = &member->lanes[i];
            dtrain__socket_hang_up(s, &lane->stream);
            if (lane->door != NULL)
                dtrain__hub_free_door(hub, lane->door);
            if (lane->stream.replay != NULL)
                dtrain__free(hub->allocator, lane->stream.replay, DTRAIN__REPLAY_BYTES);
        }
        dtrain__socket_hang_up(s, &member->control);
        if (member->control.replay != NULL)
            dtrain__free(hub->allocator, member->control.replay, DTRAIN__REPLAY_BYTES);
        dtrain__free(hub->allocator, member->lanes, DTRAIN__MAX_LANES * sizeof(dtrain__lane));
        dtrain__bytes_free(hub->allocator, &member->in);
        dtrain__bytes_free(hub->allocator, &member->out);
    }
    dtrain__free(hub->allocator, hub->members, (size_t)hub->size * sizeof(dtrain__member));
}

static size_t dtrain__socket_fds(int size)
{
    return (size_t)(DTRAIN__DOORS + 16) + (size_t)size * (1 + DTRAIN__MAX_LANES);
}

static void dtrain__socket_destroy(void *self)
{
    dtrain__socket *s = (dtrain__socket *)self;
    dtrain__hub *hub = &s->hub;
    dtrain_allocator *allocator = hub->allocator;
    size_t words = (size_t)hub->size * sizeof(uint64_t);
    if (hub->listener >= 0) {
        close(hub->listener);
        if (dtrain__net_is_unix(&hub->listening) && !s->forked)
            unlink(hub->listening.at.local.sun_path);
    }
    while (hub->doors != NULL) {
        dtrain__door *door = hub->doors;
        hub->doors = door->next;
        dtrain__hub_free_door(hub, door);
    }
    if (hub->root_door != NULL)
        dtrain__hub_free_door(hub, hub->root_door);
    dtrain__socket_free_members(s);
    for (int i = 0; i < 2; i++) {
        if (hub->kick[i] >= 0)
            close(hub->kick[i]);
        if (hub->wake[i] >= 0)
            close(hub->wake[i]);
    }
    for (int rank = 0; rank < hub->size; rank++)
        dtrain__store_forget(hub, rank);
    dtrain__store_free(&hub->store, allocator);
    dtrain__bytes_free(allocator, &hub->store_value);
    dtrain__free(allocator, hub->fds, dtrain__socket_fds(hub->size) * sizeof(struct pollfd));
    dtrain__free(allocator, s->sent, words);
    dtrain__free(allocator, s->received, words);
    memset(&hub->keys, 0, sizeof hub->keys);
    pthread_mutex_destroy(&hub->mutex);
    pthread_mutex_destroy(&hub->step_mutex);
    dtrain__free(allocator, s, sizeof *s);
}

/* Says why the awaited rank may not answer: this rank cannot connect to it, as behind a firewall; or which rank has
 * been silent for longest, if one has: "; rank 3 has been silent for 2.1 s". */
static void dtrain__socket_suspect(dtrain__socket *s, int awaited, char *text, size_t capacity)
{
    const dtrain__member *member = awaited >= 0 ? &s->hub.members[awaited] : NULL;
    pthread_mutex_lock(&s->hub.mutex);
    if (member != NULL && member->trouble[0] != 0)
        snprintf(text, capacity, "; no connection to it: %s", member->trouble);
    else if (s->hub.suspect >= 0)
        snprintf(text, capacity, "; rank %d has been silent for %.1f s", s->hub.suspect,
                 (double)s->hub.suspect_ns * 1e-9);
    pthread_mutex_unlock(&s->hub.mutex);
}

/* Copies what `rank` was last heard to do, when that was after after_ns; returns its bytes, and how old it is. */
static size_t dtrain__socket_last(dtrain__socket *s, int rank, int64_t after_ns, void *out, size_t capacity,
                                  int64_t *age_ns)
{
    const dtrain__last_heard *last = &s->hub.members[rank].last;
    size_t bytes = 0;
    pthread_mutex_lock(&s->hub.mutex);
    if (last->bytes <= capacity && last->heard_ns > after_ns) {
        bytes = last->bytes;
        memcpy(out, last->data, bytes);
        *age_ns = dtrain__os_now_ns() - last->heard_ns;
    }
    pthread_mutex_unlock(&s->hub.mutex);
    return bytes;
}

/* Has heartbeats tell what this rank does: `last` writes it, and is called with hub->mutex held. */
static void dtrain__socket_tell_last(dtrain__socket *s,
                                     size_t (*last)(void *user, unsigned char *out, size_t capacity, int *awaits),
                                     void *user)
{
    pthread_mutex_lock(&s->hub.mutex);
    s->hub.last_user = user;
    s->hub.last = last;
    pthread_mutex_unlock(&s->hub.mutex);
}

/* Whether this address may be used: beyond this host only with a token, or where that is waived. */
static int dtrain__socket_allowed(const dtrain__hub *hub, const dtrain__address *address)
{
    return hub->keys.token_bytes > 0 || hub->insecure || dtrain__net_is_local(address);
}

static dtrain_status dtrain__socket_closed(dtrain__hub *hub)
{
    return dtrain__fail(
        NULL, DTRAIN_ERR_DENIED,
        "comm_create: rank %d: %.200s is beyond this host and there is no token: set DTRAIN_TOKEN to one "
        "secret of 16 bytes or more on every rank (or DTRAIN_INSECURE=1, on a network that is yours "
        "alone)",
        hub->rank, hub->root);
}

/* Uses a copy of the listening socket that the launcher left open, so that the next group can use it as well.
 * Returns 0 when the descriptor is no such thing, or no more. */
static int dtrain__socket_inherit(dtrain__hub *hub, int inherited, int port)
{
    int listens = 0, fd;
    socklen_t bytes = sizeof listens;
    hub->listening.bytes = (socklen_t)sizeof hub->listening.at.storage;
    if (getsockopt(inherited, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || !listens ||
        getsockname(inherited, &hub->listening.at.any, &hub->listening.bytes) != 0 ||
        dtrain__net_port(&hub->listening) != port || dtrain__net_manners(inherited) != 0)
        return 0;
    fd = fcntl(inherited, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    hub->listener = fd;
    return 1;
}

/* Rank 0: opens the listener that everyone comes to. */
static dtrain_status dtrain__socket_listen(dtrain__hub *hub, int inherited)
{
    dtrain__address chosen = hub->root_addresses[0];
    char text[DTRAIN__ADDRESS_BYTES + 8];
    int error = 0, port = dtrain__net_port(&chosen);
    if (inherited >= 0 && dtrain__socket_inherit(hub, inherited, port))
        return DTRAIN_OK;
    if (hub->listen_on[0] != 0 && !dtrain__net_is_unix(&chosen)) {
        dtrain_status status = dtrain__net_interface(hub->listen_on, chosen.at.any.sa_family, &chosen);
        if (status != DTRAIN_OK)
            return status;
        dtrain__net_set_port(&chosen, port);
    } else if (dtrain__hub_more_than_loopback(hub, &chosen)) {
        dtrain__net_set_any(&chosen);
    }
    if (!dtrain__socket_allowed(hub, &chosen))
        return dtrain__socket_closed(hub);
    hub->listening = chosen;
    error = dtrain__net_listen(&hub->listening, &hub->listener);
    if (error == EADDRNOTAVAIL) { /* a name for this host that its interfaces do not have */
        hub->listening = chosen;
        dtrain__net_set_any(&hub->listening);
        error =
            dtrain__socket_allowed(hub, &hub->listening) ? dtrain__net_listen(&hub->listening, &hub->listener) : error;
    }
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: rank 0 cannot listen on %.200s: %s%s", hub->root,
                            strerror(error), error == EADDRINUSE ? "; another group, or the last one, is there" : "");
    snprintf(text, sizeof text, "%.200s", hub->root);
    if (port == 0 && !dtrain__net_is_unix(&hub->listening))
        snprintf(strrchr(text, ':'), 8, ":%d", dtrain__net_port(&hub->listening));
    snprintf(hub->root, sizeof hub->root, "%.255s", text);
    return DTRAIN_OK;
}

/* Looks the root up; where no token is, only what is on this host counts. */
static dtrain_status dtrain__socket_find_root(dtrain__hub *hub)
{
    dtrain__error cause;
    int kept = 0;
    dtrain_status status = dtrain__net_resolve(hub->root, hub->root_addresses, &hub->root_count);
    if (status != DTRAIN_OK) {
        cause = dtrain__thread_error;
        return dtrain__fail(NULL, status, "comm_create: rank %d: the root %.400s", hub->rank, cause.text);
    }
    for (int i = 0; i < hub->root_count; i++)
        if (dtrain__socket_allowed(hub, &hub->root_addresses[i]))
            hub->root_addresses[kept++] = hub->root_addresses[i];
    hub->root_count = kept;
    return kept > 0 ? DTRAIN_OK : dtrain__socket_closed(hub);
}

static int dtrain__socket_make_members(dtrain__hub *hub)
{
    for (int rank = 0; rank < hub->size; rank++)
        hub->members[rank].control.fd = hub->members[rank].last.awaits = -1;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__lane *lanes = (dtrain__lane *)dtrain__alloc(hub->allocator, DTRAIN__MAX_LANES * sizeof(dtrain__lane));
        if (lanes == NULL)
            return 0;
        for (int i = 0; i < DTRAIN__MAX_LANES; i++)
            lanes[i].stream.fd = -1;
        hub->members[rank].lanes = lanes;
    }
    return 1;
}

/* Copies what the desc says, with its defaults. */
static void dtrain__socket_describe(dtrain__hub *hub, const dtrain__keys *keys, const dtrain__hub_desc *desc)
{
    hub->keys = *keys;
    hub->rank = keys->rank;
    hub->size = keys->world_size;
    hub->insecure = desc->insecure;
    hub->connections = desc->connections > 0 ? desc->connections : 1;
    hub->heartbeat_ns =
        desc->heartbeat_ms < 0 ? 0 : dtrain__os_ms_to_ns(desc->heartbeat_ms > 0 ? desc->heartbeat_ms : 15000);
    hub->reconnect_ns = desc->reconnect_ms > 0 ? dtrain__os_ms_to_ns(desc->reconnect_ms) : 0;
    hub->period_ns = hub->heartbeat_ns > 0 && hub->heartbeat_ns / 8 < 500000000 ? hub->heartbeat_ns / 8 : 500000000;
    hub->listener = hub->kick[0] = hub->kick[1] = hub->wake[0] = hub->wake[1] = -1;
    hub->suspect = -1;
    hub->root_wait_ns = 2000000;
    snprintf(hub->root, sizeof hub->root, "%s", desc->root);
    snprintf(hub->listen_on, sizeof hub->listen_on, "%s", desc->listen_on);
    snprintf(hub->fingerprint, sizeof hub->fingerprint, "%s", desc->fingerprint);
    snprintf(hub->believed, sizeof hub->believed, "%s", desc->believed);
}

/* Says who this process is. */
static void dtrain__socket_introduce(dtrain__hub *hub)
{
    dtrain__member *self = &hub->members[hub->rank];
    unsigned char id[128], digest[32];
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    snprintf(self->name, sizeof self->name, "pid %ld on %.60s", (long)getpid(), host);
    dtrain__os_host_id(id);
    dtrain_sha256(id, sizeof id, digest);
    self->host = dtrain__get_le(digest, 8);
    self->joined = 1;
}

/* Pipes, the run's name, the root's addresses, and on rank 0 the listener. */
static dtrain_status dtrain__socket_open(dtrain__hub *hub, const dtrain__hub_desc *desc)
{
    dtrain_status status;
    int error = dtrain__net_pipe(hub->kick);
    if (error == 0)
        error = dtrain__net_pipe(hub->wake);
    if (error == 0 && hub->rank == 0)
        error = dtrain__os_random(hub->keys.run, DTRAIN__RUN_BYTES);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: rank %d: %s", hub->rank, strerror(error));
    status = dtrain__socket_find_root(hub);
    if (status == DTRAIN_OK && hub->rank == 0)
        status = dtrain__socket_listen(hub, desc->listen_fd);
    if (status == DTRAIN_OK && hub->rank == 0 && desc->on_address != NULL)
        desc->on_address(desc->on_address_user, hub->root);
    return status;
}

/* Makes one rank's end, listening or about to reach rank 0; hub_step() does the rest. */
static dtrain_status dtrain__socket_create(dtrain__socket **out, const dtrain__keys *keys, const dtrain__hub_desc *desc,
                                           dtrain_allocator *allocator)
{
    size_t size = (size_t)keys->world_size;
    dtrain_status status = DTRAIN_OK;
    dtrain__socket *s = (dtrain__socket *)dtrain__alloc(allocator, sizeof *s);
    if (s == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "comm_create: no memory for rank %d", keys->rank);
    dtrain__hub *hub = &s->hub;
    hub->allocator = allocator;
    dtrain__socket_describe(hub, keys, desc);
    pthread_mutex_init(&hub->mutex, NULL);
    pthread_mutex_init(&hub->step_mutex, NULL);
    s->sent = (uint64_t *)dtrain__alloc(allocator, size * sizeof(uint64_t));
    s->received = (uint64_t *)dtrain__alloc(allocator, size * sizeof(uint64_t));
    hub->members = (dtrain__member *)dtrain__alloc(allocator, size * sizeof(dtrain__member));
    hub->fds = (struct pollfd *)dtrain__alloc(allocator, dtrain__socket_fds(hub->size) * sizeof(struct pollfd));
    if (hub->members == NULL || !dtrain__socket_make_members(hub) || s->sent == NULL || s->received == NULL ||
        hub->fds == NULL) {
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "comm_create: no memory for rank %d of %zu", keys->rank, size);
    } else {
        dtrain__socket_introduce(hub);
        status = dtrain__socket_open(hub, desc);
    }
    if (status != DTRAIN_OK) {
        dtrain__error kept = dtrain__thread_error;
        dtrain__socket_destroy(s);
        return dtrain__report(&kept);
    }
    *out = s;
    return DTRAIN_OK;
}

/* Says why a group has not formed: who came, who did not, who was sent away. */
static dtrain_status dtrain__socket_unformed(dtrain__socket *s, double seconds)
{
    dtrain__hub *hub = &s->hub;
    char missing[160] = "";
    size_t used = 0;
    for (int rank = 0; rank < hub->size && hub->rank == 0; rank++)
        if (!hub->members[rank].joined && used < sizeof missing - 32)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%d%s", used > 0 ? ", " : "", rank,
                                     hub->members[rank].name[0] != 0 ? " (came and left)" : "");
    if (hub->rank == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                            "comm_create: rank 0 of %d waited %.1f s at %.120s for rank %s; believed: %.180s%s%.200s",
                            hub->size, seconds, hub->root, missing, hub->believed,
                            hub->refused[0] != 0 ? "; came and was refused: " : "", hub->refused);
    if (hub->members[0].control.fd >= 0)
        return dtrain__fail(
            NULL, DTRAIN_ERR_TIMEOUT,
            "comm_create: rank %d of %d has met rank 0 at %.120s and waited %.1f s for other ranks, which "
            "have not come; believed: %.200s",
            hub->rank, hub->size, hub->root, seconds, hub->believed);
    return dtrain__fail(
        NULL, DTRAIN_ERR_TIMEOUT,
        "comm_create: rank %d of %d waited %.1f s for rank 0 at %.120s (%.160s); believed: %.180s; is rank "
        "0 started, and can it be reached from here?",
        hub->rank, hub->size, seconds, hub->root, hub->root_error.text[0] != 0 ? hub->root_error.text : "no answer",
        hub->believed);
}

/* Looks whether the group has formed, or never will. */
static dtrain_status dtrain__socket_formed(dtrain__socket *s, int *formed, int64_t started_ns, int64_t deadline_ns)
{
    dtrain__hub *hub = &s->hub;
    dtrain_status status = DTRAIN_OK;
    int neighbours = 0;
    pthread_mutex_lock(&hub->mutex);
    *formed = hub->formed && !hub->broken;
    if (hub->broken)
        status = dtrain__fail(NULL, hub->cause.status, "comm_create: rank %d of %d: %.400s; believed: %.180s",
                              hub->rank, hub->size, hub->cause.text, hub->believed);
    else if (!hub->formed && hub->rank != 0 && hub->members[0].left)
        status = dtrain__fail(NULL, DTRAIN_ERR_PEER_LOST, "comm_create: rank %d of %d: rank 0 has left%s%.300s",
                              hub->rank, hub->size, hub->members[0].why[0] != 0 ? ": " : "", hub->members[0].why);
    else if (!hub->formed && dtrain__os_now_ns() >= deadline_ns)
        status = dtrain__socket_unformed(s, (double)(dtrain__os_now_ns() - started_ns) * 1e-9);
    for (int rank = 0; *formed && rank < hub->size; rank++)
        neighbours += dtrain__hub_same_host(hub, rank);
    s->crowded = neighbours > dtrain__os_processors();
    pthread_mutex_unlock(&hub->mutex);
    return status;
}

/* Ranks r with equal r / n share a host, for the n returned; 0 where hosts are not that regular. */
static int dtrain__socket_node_ranks(dtrain__socket *s)
{
    const dtrain__member *members = s->hub.members;
    int n = 1;
    while (n < s->hub.size && members[n].host == members[0].host)
        n++;
    for (int rank = 0; rank < s->hub.size; rank++)
        if (members[rank].host != members[rank - rank % n].host ||
            (rank >= n && rank % n == 0 && members[rank].host == members[rank - 1].host))
            return 0;
    return n;
}

static void dtrain__socket_transport(dtrain_transport *transport, dtrain__socket *s)
{
    memset(transport, 0, sizeof *transport);
    transport->self = s;
    transport->rank = s->hub.rank;
    transport->size = s->hub.size;
    transport->send = dtrain__socket_send;
    transport->recv = dtrain__socket_recv;
    transport->exchange = dtrain__socket_exchange;
    transport->poll = dtrain__socket_poll;
    transport->wake = dtrain__socket_wake;
    transport->fail = dtrain__socket_fail;
    transport->leave = dtrain__socket_leave;
    transport->destroy = dtrain__socket_destroy;
}

#endif
