/* ---- >>rendezvous ----
 * How a group forms and how its connections are made. Rank 0 listens at the root address; every other rank
 * reaches it, proves itself, listens on the way that led there, and tells its own address; when all have come,
 * rank 0 sends the table of all. Later connections for data are made by whoever needs them first; of two made
 * at once, the lower rank's stays. hub_step() is all of it: one poll(), then whatever can be done now. */
#ifndef DTRAIN__RENDEZVOUS
#define DTRAIN__RENDEZVOUS
#include "control.c"

static void dtrain__hub_free_door(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__door_close(door);
    dtrain__free(hub->allocator, door, sizeof *door);
}

static dtrain__door *dtrain__hub_new_door(dtrain__hub *hub, const dtrain__address *peer)
{
    dtrain__door *door = (dtrain__door *)dtrain__alloc(hub->allocator, sizeof *door);
    if (door == NULL)
        return NULL;
    door->fd = -1;
    door->expires_ns = dtrain__os_now_ns() + DTRAIN__DOOR_NS;
    snprintf(door->peer_name, sizeof door->peer_name, "%s", dtrain__net_text(peer).text);
    return door;
}

/* Starts a connection to `peer`; NULL when the system or the peer refuses at once (errno). */
static dtrain__door *dtrain__hub_connect(dtrain__hub *hub, int peer, int purpose, const dtrain__address *address)
{
    dtrain__door *door = dtrain__hub_new_door(hub, address);
    int error = ENOMEM;
    if (door != NULL)
        error = dtrain__net_connect(address, &door->fd);
    if (error != 0) {
        if (door != NULL)
            dtrain__hub_free_door(hub, door);
        errno = error;
        return NULL;
    }
    door->initiator = 1;
    door->peer = peer;
    door->purpose = purpose;
    return door;
}

/* Where `peer` listens for data. */
static int dtrain__hub_peer_address(dtrain__hub *hub, int peer, dtrain__address *out)
{
    dtrain__member *member = &hub->members[peer];
    dtrain__address found[DTRAIN__MAX_ADDRESSES];
    int count;
    if (peer == 0) {
        *out = hub->reached;
        return 1;
    }
    if (member->address[0] != ':') {
        if (dtrain__net_resolve(member->address, found, &count) != DTRAIN_OK)
            return 0;
        *out = found[0];
        return 1;
    }
    *out = hub->reached;
    if (hub->rank == 0) {
        out->bytes = (socklen_t)sizeof out->at.storage;
        if (getpeername(member->control.fd, &out->at.any, &out->bytes) != 0)
            return 0;
    }
    dtrain__net_set_port(out, atoi(member->address + 1));
    return 1;
}

static size_t dtrain__hub_buffer(const dtrain__hub *hub)
{
    return hub->reconnect_ns > 0 ? DTRAIN__SOCKET_BUFFER : 0;
}

static int dtrain__hub_same_host(const dtrain__hub *hub, int peer)
{
    return hub->members[peer].host == hub->members[hub->rank].host;
}

/* Takes a connection that was just admitted for data. */
static void dtrain__hub_adopt_data(dtrain__channel *channel, int rank, dtrain__door *door)
{
    dtrain__hub *hub = channel->hub;
    dtrain__lane *lane = &channel->peers[rank].lanes[door->lane];
    char text[DTRAIN__WHY_BYTES];
    if (hub->reconnect_ns > 0 && lane->stream.replay == NULL && lane->stream.sent == 0) /* it must hold all */
        lane->stream.replay = (unsigned char *)dtrain__alloc(hub->allocator, DTRAIN__REPLAY_BYTES);
    if (!dtrain__stream_resume(&lane->stream, door->fd, door->peer_received)) {
        snprintf(text, sizeof text,
                 "rank %d (%s) is lost: its connection came back, but more was lost than can be sent again", rank,
                 hub->members[door->peer].name);
        dtrain__channel_end(channel, rank, DTRAIN_ERR_PEER_LOST, text);
        return;
    }
    dtrain__net_tune(door->fd, dtrain__hub_same_host(hub, door->peer), dtrain__hub_buffer(hub));
    door->fd = -1;
    channel->attend |= lane->stream.again > 0;
    lane->links = (door->peer_links > lane->links ? door->peer_links : lane->links) + 1;
    lane->wanted = 0;
    lane->down_ns = 0;
    hub->members[door->peer].trouble[0] = 0;
}

static void dtrain__hub_adopt_control(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__member *member = &hub->members[door->peer];
    if (hub->reconnect_ns > 0 && member->control.replay == NULL && member->control.sent == 0)
        member->control.replay = (unsigned char *)dtrain__alloc(hub->allocator, DTRAIN__REPLAY_BYTES);
    if (!dtrain__stream_resume(&member->control, door->fd, door->peer_received)) {
        dtrain__hub_lost(hub, door->peer, 0, "its connection came back, but more was lost than can be sent again");
        return;
    }
    dtrain__net_tune(door->fd, 0, dtrain__hub_buffer(hub));
    door->fd = -1;
    member->expected = 0;
    member->heard_ns = dtrain__os_now_ns();
}

/* Whether a name for the root means loopback on this host alone, as a host's own name often does, so that others are
 * expected from elsewhere; where only this host may come, it does not matter. */
static int dtrain__hub_more_than_loopback(const dtrain__hub *hub, const dtrain__address *address)
{
    return dtrain__net_is_local(address) && !dtrain__net_is_unix(address) &&
           (hub->keys.token_bytes > 0 || hub->insecure) && strncmp(hub->root, "127.", 4) != 0 &&
           strncmp(hub->root, "[::1]", 5) != 0 && strncmp(hub->root, "localhost:", 10) != 0;
}

/* Where this rank listens: on the way that its control connection went out, at a port of its own. *local: only
 * ranks that reach rank 0 as this one does can come there. */
static dtrain_status dtrain__hub_own_address(dtrain__hub *hub, int *local)
{
    dtrain__address *here = &hub->listening;
    char path[DTRAIN__ADDRESS_BYTES];
    here->bytes = (socklen_t)sizeof here->at.storage;
    if (getsockname(hub->members[0].control.fd, &here->at.any, &here->bytes) != 0)
        return dtrain__fail(&hub->root_error, DTRAIN_ERR_IO, "rank %d: %s", hub->rank, strerror(errno));
    *local = dtrain__net_is_local(here);
    if (dtrain__net_is_unix(&hub->reached)) {
        *local = 0;
        snprintf(path, sizeof path, "%.200s.%d", hub->root + 5, hub->rank);
        return dtrain__net_unix_address(here, path);
    }
    if (hub->listen_on[0] != 0) {
        int family = here->at.any.sa_family;
        *local = 0;
        dtrain_status status = dtrain__net_interface(hub->listen_on, family, here);
        if (status != DTRAIN_OK)
            return status;
    } else if (dtrain__hub_more_than_loopback(hub, here)) {
        dtrain__net_set_any(here);
    }
    dtrain__net_set_port(here, 0);
    return DTRAIN_OK;
}

/* Opens this rank's own listener, and says to rank 0 where it is. */
static dtrain_status dtrain__hub_join(dtrain__hub *hub)
{
    dtrain__member *root = &hub->members[0], *self = &hub->members[hub->rank];
    int local, error;
    dtrain_status status = dtrain__hub_own_address(hub, &local);
    if (status != DTRAIN_OK)
        return status;
    error = dtrain__net_listen(&hub->listening, &hub->listener);
    if (error != 0)
        return dtrain__fail(&hub->root_error, DTRAIN_ERR_IO, "rank %d cannot listen on %s: %s", hub->rank,
                            dtrain__net_text(&hub->listening).text, strerror(error));
    if (local)
        snprintf(self->address, sizeof self->address, ":%d", dtrain__net_port(&hub->listening));
    else
        snprintf(self->address, sizeof self->address, "%.120s", dtrain__net_text(&hub->listening).text);
    root->joined = 1;
    size_t begin = dtrain__frame_open(hub, root, DTRAIN__FRAME_JOIN);
    dtrain__give_text(hub, &root->out, 1, self->address);
    dtrain__give(hub, &root->out, self->host, 8);
    dtrain__give_text(hub, &root->out, 1, self->name);
    dtrain__give_text(hub, &root->out, 2, hub->fingerprint);
    dtrain__give_text(hub, &root->out, 2, hub->believed);
    return dtrain__frame_close(root, begin)
               ? DTRAIN_OK
               : dtrain__fail(&hub->root_error, DTRAIN_ERR_MEMORY, "rank %d has no memory to join", hub->rank);
}

/* Rank 0: when all have joined, tells everyone where everyone is. */
static void dtrain__hub_complete(dtrain__hub *hub)
{
    for (int rank = 0; rank < hub->size; rank++)
        if (!hub->members[rank].joined)
            return;
    for (int to = 1; to < hub->size; to++) {
        dtrain__member *member = &hub->members[to];
        size_t begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_TABLE);
        dtrain__give(hub, &member->out, (uint64_t)hub->size, 4);
        dtrain__give(hub, &member->out, (uint64_t)hub->connections, 1);
        for (int rank = 0; rank < hub->size; rank++) {
            dtrain__give_text(hub, &member->out, 1, hub->members[rank].address);
            dtrain__give(hub, &member->out, hub->members[rank].host, 8);
            dtrain__give_text(hub, &member->out, 1, hub->members[rank].name);
        }
        if (!dtrain__frame_close(member, begin)) {
            dtrain__hub_short_of_memory(hub);
            return;
        }
    }
    dtrain__hub_formed(hub);
}

static void dtrain__hub_refuse(dtrain__hub *hub, dtrain__door *door, dtrain_status status, const char *text)
{
    dtrain__door_answer(door, &hub->keys, status, text);
    if (!hub->formed) {
        snprintf(hub->refused, sizeof hub->refused, "%.440s", door->error.text);
        dtrain__log(DTRAIN_LOG_WARN, "rank %d: %s", hub->rank, door->error.text);
    }
}

/* A proved peer wants its control connection: to join, or to go on. */
static void dtrain__hub_admit_control(dtrain__hub *hub, dtrain__door *door)
{
    char text[DTRAIN__VERDICT_TEXT];
    dtrain__member *member = &hub->members[door->peer];
    int ours = hub->formed && memcmp(door->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) == 0;
    int again = ours && member->expected;
    if (ours && hub->reconnect_ns > 0 && member->gone == DTRAIN__PRESENT && member->control.fd >= 0) {
        dtrain__stream_cut(&member->control); /* the peer saw the reset first */
        member->down_ns = dtrain__os_now_ns();
        member->expected = again = 1;
    }
    if (again) {
        door->received = member->control.received;
        dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
        return;
    }
    if (hub->formed) {
        /* perhaps the last one, about to end: the peer may try again */
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_ABORTED, "its group is complete and runs");
        return;
    }
    if (member->control.fd >= 0) {
        snprintf(text, sizeof text,
                 "two processes say they are rank %d: %.60s came first, now %.60s; give each process "
                 "a rank of its own",
                 door->peer, member->name[0] != 0 ? member->name : "another process", door->peer_name);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, text);
        return;
    }
    member->control.sent = member->control.received = 0;
    door->received = 0;
    door->peer_received = 0;
    dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
}

/* A proved peer wants a control connection, as one of the two leads now that rank 0 is gone. */
static void dtrain__hub_admit_call(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__member *member = &hub->members[door->peer];
    if (memcmp(door->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) != 0) {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_DENIED, "this is another run's group");
        return;
    }
    if ((member->control.fd >= 0 && hub->reconnect_ns == 0) || (member->door != NULL && hub->rank < door->peer)) {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_ABORTED, "the connection is there already");
        return;
    }
    if (member->door != NULL)
        dtrain__hub_free_door(hub, member->door);
    member->door = NULL;
    dtrain__stream_cut(&member->control);
    door->received = member->control.received;
    dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
}

/* A proved peer wants to send and receive data. */
static void dtrain__hub_admit_data(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__channel *channel = dtrain__hub_channel(hub, door->channel);
    int rank = dtrain__channel_rank(channel, door->peer);
    dtrain__lane *lane;
    if (memcmp(door->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) != 0 || door->lane < 0 ||
        door->lane >= hub->connections || rank < 0 || channel->lanes == NULL) {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_DENIED, "this is another run's group");
        return;
    }
    lane = &channel->peers[rank].lanes[door->lane];
    if ((lane->door != NULL && hub->rank < door->peer) || (lane->links > 0 && hub->reconnect_ns == 0) ||
        door->peer_links < lane->links) { /* it was on its way when another one was made; its count may be behind */
        door->received = lane->links;
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_ABORTED, "the connection is there already");
        return;
    }
    dtrain__door *before = dtrain__channel_admitted(channel, door->peer, door->lane);
    if (before != NULL) /* the peer has given up on it */
        dtrain__door_close(before);
    if (lane->door != NULL)
        dtrain__hub_free_door(hub, lane->door);
    lane->door = NULL;
    if (lane->stream.fd >= 0) /* the peer saw the reset first; from here on the position is what it is told */
        lane->down_ns = dtrain__os_now_ns();
    lane->wanted |= lane->links > 0;
    channel->attend = 1;
    dtrain__stream_cut(&lane->stream);
    door->received = lane->stream.received;
    dtrain__door_answer(door, &hub->keys, DTRAIN_OK, "");
}

/* The peer has proved that it holds the token; what it said in its hello is looked at now. */
static void dtrain__hub_admit(dtrain__hub *hub, dtrain__door *door)
{
    char text[DTRAIN__VERDICT_TEXT];
    if (door->peer_world != hub->size) {
        snprintf(text, sizeof text,
                 "rank %d at %.80s believes in a world of %d ranks, rank %d in one of %d; give "
                 "every process the same world size",
                 door->peer, door->peer_name, door->peer_world, hub->rank, hub->size);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, text);
    } else if (door->peer < 0 || door->peer >= hub->size || door->peer == hub->rank ||
               dtrain__get_le(door->hello + 16, 4) != (uint64_t)hub->rank) {
        snprintf(text, sizeof text, "rank %d at %.80s wants rank %u, and this is rank %d of %d", door->peer,
                 door->peer_name, (unsigned)dtrain__get_le(door->hello + 16, 4), hub->rank, hub->size);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, text);
    } else if (hub->formed && hub->members[door->peer].gone == DTRAIN__LOST) {
        snprintf(text, sizeof text, "%.240s", hub->members[door->peer].why);
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_PEER_LOST, text);
    } else if (door->purpose == DTRAIN__PURPOSE_CONTROL && hub->rank == 0) {
        dtrain__hub_admit_control(hub, door);
    } else if (door->purpose == DTRAIN__PURPOSE_CONTROL && hub->formed) {
        dtrain__hub_admit_call(hub, door);
    } else if (door->purpose == DTRAIN__PURPOSE_DATA) {
        dtrain__hub_admit_data(hub, door);
    } else {
        dtrain__hub_refuse(hub, door, DTRAIN_ERR_MISMATCH, "only rank 0 takes control connections");
    }
}

/* The inbound connection is open: takes it, unless its channel has left meanwhile. */
static void dtrain__hub_adopt(dtrain__hub *hub, dtrain__door *door)
{
    dtrain__channel *channel = dtrain__hub_channel(hub, door->channel);
    int rank = channel != NULL ? dtrain__channel_rank(channel, door->peer) : -1;
    if (door->purpose == DTRAIN__PURPOSE_CONTROL)
        dtrain__hub_adopt_control(hub, door);
    else if (rank >= 0)
        dtrain__hub_adopt_data(channel, rank, door);
}

/* Advances one inbound connection; returns 0 when it is done with. */
static int dtrain__hub_step_door(dtrain__hub *hub, dtrain__door *door, int64_t now)
{
    unsigned char last;
    dtrain__door_step(door, &hub->keys);
    if (door->state == DTRAIN__DOOR_PROVED && door->purpose == DTRAIN__PURPOSE_DATA &&
        (!hub->formed || dtrain__hub_channel(hub, door->channel) == NULL))
        /* a peer that has the table, or the group, already may come before this rank has it: its door waits until
         * the peer gives up; it says nothing before that */
        return now < door->expires_ns && dtrain__net_recv(door->fd, &last, 1) == 0;
    if (door->state == DTRAIN__DOOR_PROVED) {
        dtrain__hub_admit(hub, door);
        dtrain__door_step(door, &hub->keys);
    }
    if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes) {
        if (door->error.status == DTRAIN_OK)
            dtrain__hub_adopt(hub, door);
        else if (door->error.status == DTRAIN_ERR_DENIED && now - hub->told_ns > 1000000000) {
            hub->told_ns = now; /* a flood of strangers writes one line a second */
            snprintf(hub->refused, sizeof hub->refused, "%.440s", door->error.text);
            dtrain__log(DTRAIN_LOG_WARN, "rank %d: %s", hub->rank, door->error.text);
        } else if (!hub->formed && door->error.status == DTRAIN_ERR_MISMATCH)
            snprintf(hub->refused, sizeof hub->refused, "%.440s", door->error.text);
        if (door->error.status == DTRAIN_OK)
            dtrain__hub_tell(hub);
        return 0;
    }
    return door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns;
}

static void dtrain__hub_step_doors(dtrain__hub *hub, int64_t now)
{
    for (dtrain__door **at = &hub->doors, *door; (door = *at) != NULL;) {
        if (dtrain__hub_step_door(hub, door, now)) {
            at = &door->next;
            continue;
        }
        *at = door->next;
        hub->inbound--;
        dtrain__hub_free_door(hub, door);
    }
}

/* Takes waiting connections. A stranger holds one door for a few seconds; when all are held, the oldest goes. */
static void dtrain__hub_accept(dtrain__hub *hub, int64_t now)
{
    for (int i = 0; hub->listener >= 0 && now >= hub->accept_ns && i < DTRAIN__DOORS; i++) {
        dtrain__address peer;
        dtrain__door *door, **last = &hub->doors;
        int fd, error = dtrain__net_accept(hub->listener, &fd, &peer);
        if (error == EAGAIN)
            return;
        if (error != 0) {
            hub->accept_ns = now + 100000000; /* out of descriptors, most often: look again in a while */
            dtrain__log(DTRAIN_LOG_WARN,
                        "rank %d cannot accept a connection (%s); this process may open more "
                        "descriptors after \"ulimit -n\" with a higher number",
                        hub->rank, strerror(error));
            return;
        }
        door = dtrain__hub_new_door(hub, &peer);
        if (door == NULL) {
            close(fd);
            snprintf(hub->refused, sizeof hub->refused, "%s, as there is no memory", dtrain__net_text(&peer).text);
            return;
        }
        door->fd = fd;
        door->state = DTRAIN__DOOR_HELLO;
        while (*last != NULL)
            last = &(*last)->next;
        *last = door;
        if (++hub->inbound > DTRAIN__DOORS) {
            door = hub->doors;
            hub->doors = door->next;
            hub->inbound--;
            dtrain__hub_free_door(hub, door);
        }
    }
}

/* Other ranks than 0: reaches rank 0, as often as it takes. */
static void dtrain__hub_step_root(dtrain__hub *hub, int64_t now)
{
    dtrain__member *root = &hub->members[0];
    dtrain__door *door = hub->root_door;
    if (hub->rank == 0 || root->control.fd >= 0 || root->gone != DTRAIN__PRESENT ||
        (!hub->formed && (hub->world == NULL || hub->world->broken)))
        return;
    if (door == NULL && now >= hub->root_retry_ns) {
        dtrain__address *address = &hub->root_addresses[hub->root_turn++ % hub->root_count];
        hub->root_wait_ns = hub->root_wait_ns < 250000000 ? hub->root_wait_ns * 2 : 500000000;
        hub->root_retry_ns = now + hub->root_wait_ns;
        door = hub->root_door = dtrain__hub_connect(hub, 0, DTRAIN__PURPOSE_CONTROL, address);
        if (door == NULL)
            dtrain__fail(&hub->root_error, DTRAIN_ERR_PEER_LOST, "%s: %s", dtrain__net_text(address).text,
                         strerror(errno));
        else
            door->received = root->control.received, hub->reached = *address;
    }
    if (door == NULL)
        return;
    dtrain__door_step(door, &hub->keys);
    if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes) {
        if (!hub->formed)
            memcpy(hub->keys.run, door->challenge + 16, DTRAIN__RUN_BYTES);
        dtrain__hub_adopt_control(hub, door);
        if (!hub->formed && root->control.fd >= 0 && dtrain__hub_join(hub) != DTRAIN_OK)
            dtrain__channel_end(hub->world, hub->rank, dtrain__thread_error.status, dtrain__thread_error.text);
    } else if (door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns) {
        return;
    } else {
        if (door->state != DTRAIN__DOOR_CLOSED)
            dtrain__fail(&door->error, DTRAIN_ERR_PEER_LOST, "%s: no answer", door->peer_name);
        hub->root_error = door->error;
        if (hub->formed && door->error.status != DTRAIN_ERR_PEER_LOST)
            dtrain__hub_lost(hub, 0, 0, door->error.text);
        else if (!hub->formed && door->error.status != DTRAIN_ERR_PEER_LOST && door->error.status != DTRAIN_ERR_ABORTED)
            dtrain__channel_break(hub->world, door->error.status, door->error.text);
    }
    dtrain__hub_free_door(hub, door);
    hub->root_door = NULL;
    dtrain__hub_tell(hub);
}

static void dtrain__hub_step_lane(dtrain__channel *channel, int rank, int index, int64_t now)
{
    dtrain__hub *hub = channel->hub;
    dtrain__peer *peer = &channel->peers[rank];
    dtrain__member *member = &hub->members[peer->world];
    dtrain__lane *lane = &peer->lanes[index];
    dtrain__door *door = lane->door;
    dtrain__address address;
    if (door == NULL && lane->wanted && lane->stream.fd < 0 && now >= lane->retry_ns && !peer->left &&
        dtrain__channel_admitted(channel, peer->world, index) == NULL) { /* or each would drop the other's choice */
        lane->retry_ns = now + 50000000;
        if (!dtrain__hub_peer_address(hub, peer->world, &address))
            return;
        door = lane->door = dtrain__hub_connect(hub, peer->world, DTRAIN__PURPOSE_DATA, &address);
        if (door != NULL) {
            door->channel = channel->id;
            door->lane = index;
            door->received = lane->stream.received;
            door->links = lane->links;
        } else
            snprintf(member->trouble, sizeof member->trouble, "%.100s: %.50s", dtrain__net_text(&address).text,
                     strerror(errno));
    }
    if (door == NULL)
        return;
    dtrain__door_step(door, &hub->keys);
    if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes)
        dtrain__hub_adopt_data(channel, rank, door);
    else if (door->verdict == DTRAIN_ERR_PEER_LOST)
        dtrain__hub_given_up(hub, door->error.text);
    else if (door->error.status == DTRAIN_ERR_ABORTED && door->peer_received > lane->links)
        lane->links = door->peer_received;
    else if (door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns)
        return;
    else
        snprintf(member->trouble, sizeof member->trouble, "%.140s%s",
                 door->state == DTRAIN__DOOR_CLOSED ? door->error.text : door->peer_name,
                 door->state == DTRAIN__DOOR_CLOSED ? "" : ": no answer");
    lane->door = NULL;
    dtrain__hub_free_door(hub, door);
    dtrain__hub_tell(hub);
}

static int dtrain__lane_busy(const dtrain__lane *lane)
{
    return lane->door != NULL || (lane->wanted && lane->stream.fd < 0) ||
           (lane->stream.fd >= 0 && lane->stream.again > 0);
}

/* Calls a rank to which this one has no control connection, after rank 0 is gone. */
static void dtrain__hub_call(dtrain__hub *hub, int rank, int64_t now)
{
    dtrain__member *member = &hub->members[rank];
    dtrain__address address;
    int error = 0;
    if (member->door == NULL) {
        if (now < member->call_ns || !dtrain__hub_peer_address(hub, rank, &address))
            return;
        member->call_ns = now + DTRAIN__CALL_NS / 3;
        member->door = dtrain__hub_connect(hub, rank, DTRAIN__PURPOSE_CONTROL, &address);
        error = member->door == NULL ? errno : 0;
        if (member->door != NULL)
            member->door->received = member->control.received;
    }
    dtrain__door *door = member->door;
    if (door != NULL) {
        dtrain__door_step(door, &hub->keys);
        if (door->state == DTRAIN__DOOR_OPEN && door->out_done == door->out_bytes)
            dtrain__hub_adopt_control(hub, door);
        else if (door->state != DTRAIN__DOOR_CLOSED && now < door->expires_ns)
            return;
        error = door->system_error;
        if (door->verdict == DTRAIN_ERR_PEER_LOST)
            dtrain__hub_given_up(hub, door->error.text);
        dtrain__hub_free_door(hub, door);
        member->door = NULL;
    }
    if (error == ECONNREFUSED || error == ENOENT)
        dtrain__hub_lost(hub, rank, 0, "it takes no connection; its process has died");
}

/* After rank 0 is gone the leader calls the others, who call it when they have waited for that. */
static void dtrain__hub_step_calls(dtrain__hub *hub, int64_t now)
{
    if (hub->elected)
        dtrain__consent_resend(hub);
    hub->elected = 0;
    for (int rank = 0; hub->leader != 0 && !hub->leaving && !hub->given_up && rank < hub->size; rank++)
        if (dtrain__hub_linked(hub, rank) && hub->members[rank].gone == DTRAIN__PRESENT &&
            hub->members[rank].control.fd < 0)
            dtrain__hub_call(hub, rank, now);
    dtrain__consent_step(hub);
}

/* Sends once more what a broken connection has lost, whether or not this rank has more to send. */
static void dtrain__hub_step_again(dtrain__lane *lane, int64_t now)
{
    if (lane->stream.fd < 0 || lane->stream.again == 0 || dtrain__stream_send(&lane->stream, NULL, 0, 0) >= 0)
        return;
    dtrain__stream_cut(&lane->stream);
    lane->down_ns = now;
    lane->wanted = 1;
}

/* One heartbeat: who is silent, and what this rank does; rank 0 tells a rank what the one does that it waits for, and
 * the one that that one waits for. */
static void dtrain__hub_beat(dtrain__hub *hub, int to, int suspect, int64_t silent_ns, int64_t now)
{
    int leads = dtrain__hub_leads(hub);
    dtrain__member *member = &hub->members[to];
    size_t begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_BEAT);
    dtrain__give(hub, &member->out, leads ? (uint64_t)(suspect + 1) : 0, 4);
    dtrain__give(hub, &member->out, (uint64_t)(silent_ns / 1000000), 4);
    if (!leads)
        dtrain__give_last(hub, member, hub->rank, now);
    for (int i = 0, about = member->last.awaits; leads && i < DTRAIN__LAST_CHAIN; i++)
        if (about < 0 || about == to)
            break;
        else
            about = dtrain__give_last(hub, member, about, now);
    dtrain__frame_close(member, begin);
}

/* Heartbeats: sends this rank's, and judges the silence of others. */
static void dtrain__hub_step_hearts(dtrain__hub *hub, int64_t now)
{
    int64_t longest = 1200000000;
    int suspect = -1;
    int slept = hub->stepped_ns > 0 && hub->heartbeat_ns > 0 && now - hub->stepped_ns > hub->heartbeat_ns / 2;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        int64_t silent = now - member->heard_ns;
        char how[96];
        if (!dtrain__hub_linked(hub, rank) || member->gone != DTRAIN__PRESENT || member->heard_ns == 0)
            continue;
        if (slept) /* this process was stopped, and cannot tell */
            member->heard_ns = now;
        else if (member->expected && now - member->down_ns > hub->reconnect_ns)
            dtrain__hub_lost(hub, rank, 1, "its connection was reset and has not come back within reconnect_ms");
        else if (hub->formed && hub->heartbeat_ns > 0 && silent > hub->heartbeat_ns) {
            snprintf(how, sizeof how, "not heard for %.1f s (heartbeat_ms); stopped, or its host is gone",
                     (double)silent * 1e-9);
            dtrain__hub_lost(hub, rank, 1, how);
        } else if (hub->formed && silent > longest) {
            longest = silent;
            suspect = rank;
        }
    }
    if (dtrain__hub_leads(hub) || suspect == hub->leader) {
        hub->suspect = suspect;
        hub->suspect_ns = longest;
    }
    hub->stepped_ns = now;
    if (now < hub->beat_ns)
        return;
    hub->beat_ns = now + hub->period_ns;
    dtrain__hub_look(hub, now);
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        if (dtrain__hub_linked(hub, rank) && member->joined && member->gone == DTRAIN__PRESENT &&
            member->control.fd >= 0 && member->out.bytes <= DTRAIN__FRAME_BYTES)
            dtrain__hub_beat(hub, rank, suspect, longest, now);
    }
}

/* Makes the connections that the channel wants. */
static void dtrain__hub_step_channel(dtrain__channel *channel, int64_t now)
{
    int busy = 0;
    for (int rank = 0; rank < channel->size; rank++)
        for (int i = 0; i < channel->hub->connections; i++) {
            dtrain__lane *lane = &channel->peers[rank].lanes[i];
            dtrain__hub_step_lane(channel, rank, i, now);
            dtrain__hub_step_again(lane, now);
            busy |= dtrain__lane_busy(lane);
        }
    channel->attend = busy;
}

/* Everything that can be done without waiting; the caller holds both mutexes. */
static void dtrain__hub_work(dtrain__hub *hub)
{
    int64_t now = dtrain__os_now_ns();
    dtrain__hub_accept(hub, now);
    dtrain__hub_step_doors(hub, now);
    dtrain__hub_step_root(hub, now);
    for (int rank = 0; rank < hub->size; rank++)
        if (hub->members[rank].poll_index > 0 && hub->fds[hub->members[rank].poll_index].revents != 0)
            dtrain__hub_listen_to(hub, rank);
    if (hub->rank == 0 && !hub->formed && hub->world != NULL && !hub->world->broken)
        dtrain__hub_complete(hub);
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next)
        if (channel->attend)
            dtrain__hub_step_channel(channel, now);
    dtrain__hub_step_calls(hub, now);
    dtrain__hub_step_hearts(hub, now);
    dtrain__hub_flush_all(hub, 1);
}

/* Adds to the poll list; what finds no memory there is looked at when something else is due. */
static void dtrain__hub_watch(dtrain__hub *hub, int *count, int fd, int events)
{
    size_t bytes = (size_t)hub->fds_room * sizeof(struct pollfd);
    if (*count == hub->fds_room) {
        void *larger = dtrain__resize(hub->allocator, hub->fds, bytes, bytes > 0 ? 2 * bytes : 4096);
        if (larger == NULL)
            return;
        hub->fds = (struct pollfd *)larger;
        hub->fds_room = bytes > 0 ? 2 * hub->fds_room : (int)(4096 / sizeof(struct pollfd));
    }
    hub->fds[*count].fd = fd;
    hub->fds[*count].events = (short)events;
    hub->fds[(*count)++].revents = 0;
}

/* Adds the channel's connections that are being made or made good. */
static int64_t dtrain__hub_watch_channel(dtrain__channel *channel, int *count, int64_t due)
{
    for (int i = 0; i < channel->size * channel->hub->connections; i++) {
        dtrain__lane *lane = &channel->lanes[i];
        if (lane->door != NULL)
            dtrain__hub_watch(channel->hub, count, lane->door->fd, dtrain__door_writes(lane->door) ? POLLOUT : POLLIN);
        else if (lane->wanted && lane->stream.fd < 0 && lane->retry_ns < due)
            due = lane->retry_ns;
        if (lane->stream.fd >= 0 && lane->stream.again > 0)
            dtrain__hub_watch(channel->hub, count, lane->stream.fd, POLLOUT);
    }
    return due;
}

/* Fills the poll list; returns when something is due without any event. */
static int64_t dtrain__hub_prepare(dtrain__hub *hub, int *count)
{
    int64_t due = hub->beat_ns, now = dtrain__os_now_ns();
    *count = 0;
    dtrain__hub_watch(hub, count, hub->kick[0], POLLIN);
    if (hub->listener >= 0 && now >= hub->accept_ns)
        dtrain__hub_watch(hub, count, hub->listener, POLLIN);
    for (dtrain__door *door = hub->doors; door != NULL; door = door->next) {
        dtrain__hub_watch(hub, count, door->fd, dtrain__door_writes(door) ? POLLOUT : POLLIN);
        due = door->expires_ns < due ? door->expires_ns : due;
    }
    if (hub->root_door != NULL)
        dtrain__hub_watch(hub, count, hub->root_door->fd, dtrain__door_writes(hub->root_door) ? POLLOUT : POLLIN);
    else if (hub->rank != 0 && hub->members[0].control.fd < 0 && hub->members[0].gone == DTRAIN__PRESENT &&
             hub->root_retry_ns < due)
        due = hub->root_retry_ns;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        member->poll_index = 0;
        if (member->door != NULL)
            dtrain__hub_watch(hub, count, member->door->fd, dtrain__door_writes(member->door) ? POLLOUT : POLLIN);
        else if (hub->leader != 0 && dtrain__hub_linked(hub, rank) && member->gone == DTRAIN__PRESENT &&
                 member->control.fd < 0 && member->call_ns < due)
            due = member->call_ns;
        if (rank == hub->rank || member->control.fd < 0)
            continue;
        member->poll_index = *count;
        dtrain__hub_watch(hub, count, member->control.fd,
                          POLLIN | (member->out.bytes > 0 || member->control.again > 0 ? POLLOUT : 0));
        if (member->poll_index == *count)
            member->poll_index = 0;
    }
    for (dtrain__channel *channel = hub->channels; channel != NULL; channel = channel->next)
        if (channel->attend)
            due = dtrain__hub_watch_channel(channel, count, due);
    return due;
}

/* Adds what the service thread could not move in the channel. */
static void dtrain__hub_watch_awaited(dtrain__channel *channel, int *count)
{
    size_t room;
    for (int rank = 0; channel->awaiting && rank < channel->size; rank++)
        for (int sending = 0; sending < 2; sending++) {
            int event = sending ? POLLOUT : POLLIN;
            if ((channel->peers[rank].awaits & event) == 0)
                continue;
            dtrain__lane *lane = dtrain__channel_lane(channel, rank, sending, &room);
            if (lane->stream.fd >= 0)
                dtrain__hub_watch(channel->hub, count, lane->stream.fd, event);
        }
}

/* poll() until an event or until_ns; restarted signals and rounding are harmless, callers look again. */
static void dtrain__hub_poll(struct pollfd *fds, int count, int64_t until_ns)
{
    int64_t span = until_ns - dtrain__os_now_ns();
    int ms = span <= 0 ? 0 : span > 60000000000 ? 60000 : (int)((span + 999999) / 1000000);
    poll(fds, (nfds_t)count, ms);
}

/* One turn of the control plane; waits until until_ns at most, or until one of extra is ready. The caller holds
 * step_mutex. */
static void dtrain__hub_step(dtrain__hub *hub, const struct pollfd *extra, int extra_count, int64_t until_ns)
{
    int count;
    pthread_mutex_lock(&hub->mutex);
    int64_t due = dtrain__hub_prepare(hub, &count);
    for (int i = 0; i < extra_count; i++)
        dtrain__hub_watch(hub, &count, extra[i].fd, extra[i].events);
    int serviced = __atomic_load_n(&hub->serviced, __ATOMIC_ACQUIRE) != 0;
    for (dtrain__channel *channel = hub->channels; serviced && channel != NULL; channel = channel->next)
        dtrain__hub_watch_awaited(channel, &count);
    __atomic_store_n(&hub->stepping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&hub->mutex);
    if (__atomic_load_n(&hub->kicked, __ATOMIC_SEQ_CST))
        until_ns = 0;
    dtrain__hub_poll(hub->fds, count, due < until_ns ? due : until_ns);
    __atomic_store_n(&hub->stepping, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&hub->kicked, 0, __ATOMIC_SEQ_CST);
    if (hub->fds[0].revents != 0)
        dtrain__net_drain(hub->kick[0]);
    pthread_mutex_lock(&hub->mutex);
    dtrain__hub_work(hub);
    pthread_mutex_unlock(&hub->mutex);
}

#endif
