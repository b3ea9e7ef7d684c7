/* ---- >>rendezvous ----
 * How a group forms, and what there is to do afterwards. Rank 0 listens at the root address. Every other rank reaches
 * it, proves itself, listens on the interface that led there, and tells its own address. When all have come, rank 0
 * sends the table of all ranks. A rank that first needs a data connection makes it. hub_step() does all of this: one
 * poll(), then whatever can be done at once. */
#ifndef DTRAIN__RENDEZVOUS
#define DTRAIN__RENDEZVOUS
#include "root.c"

/* Chooses this rank's own address: on the interface of its control connection, at a port of its own. *local: only ranks
 * of the same host can reach it there. */
static dtrain_status dtrain__hub_own_address(dtrain__hub *hub, int *local)
{
    dtrain__address *here = &hub->listening;
    char path[DTRAIN__ADDRESS_BYTES];
    if (dtrain__net_end(hub->members[0].control.fd, 0, here) != 0)
        return dtrain__fail(&hub->root_error, DTRAIN_ERR_IO, "rank %d cannot read its own address: %s", hub->rank,
                            dtrain__os_error_text(errno));
    *local = dtrain__net_is_local(here);
    if (dtrain__net_is_unix(&hub->reached)) {
        *local = 0;
        if (dtrain__net_is_abstract(&hub->reached)) {
            dtrain__net_any_name(here);
            return DTRAIN_OK;
        }
        snprintf(path, sizeof path, "%.200s.%d", hub->reached.at.local.sun_path, hub->rank);
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

/* Opens this rank's own listener, and writes where it is. */
static dtrain_status dtrain__hub_open_door(dtrain__hub *hub)
{
    dtrain__member *self = &hub->members[hub->rank];
    char why[DTRAIN__FILES_TEXT], address[DTRAIN__ADDRESS_BYTES / 2];
    dtrain__address told;
    int local, error;
    dtrain_status status = dtrain__hub_own_address(hub, &local);
    if (status != DTRAIN_OK)
        return status;
    error = dtrain__hub_listen(hub, &hub->listening, 0);
    if (error != 0)
        return dtrain__fail(&hub->root_error, DTRAIN_ERR_IO, "rank %d cannot listen on %s: %s", hub->rank,
                            dtrain__net_text(&hub->listening).text, dtrain__net_refused(error, why));
    told = hub->listening;
    if (dtrain__net_is_zoned(&told))
        told.at.v6.sin6_scope_id = 0; /* a peer puts in its own */
    if (local)
        snprintf(address, sizeof address, ":%d", dtrain__net_port(&hub->listening));
    else
        snprintf(address, sizeof address, "%.120s", dtrain__net_text(&told).text);
    return dtrain__hub_say(hub, &self->address, address)
               ? DTRAIN_OK
               : dtrain__fail(&hub->root_error, DTRAIN_ERR_MEMORY, "rank %d has no memory to join", hub->rank);
}

/* Listens, unless this rank never does, and joins at rank 0. */
static dtrain_status dtrain__hub_join(dtrain__hub *hub)
{
    dtrain__member *root = &hub->members[0], *self = &hub->members[hub->rank];
    dtrain_status status = dtrain__hub_never_listens(hub) ? DTRAIN_OK : dtrain__hub_open_door(hub);
    if (status != DTRAIN_OK)
        return status;
    root->joined = 1;
    size_t begin = dtrain__frame_open(hub, root, DTRAIN__FRAME_JOIN);
    dtrain__give_text(hub, &root->out, 1, self->address);
    dtrain__give(hub, &root->out, self->host, 8);
    dtrain__give(hub, &root->out, self->process, 8);
    dtrain__give(hub, &root->out, self->began, 8);
    dtrain__give_text(hub, &root->out, 1, self->name);
    dtrain__give_text(hub, &root->out, 2, hub->fingerprint);
    dtrain__give_text(hub, &root->out, 2, hub->believed);
    return dtrain__frame_close(root, begin)
               ? DTRAIN_OK
               : dtrain__fail(&hub->root_error, DTRAIN_ERR_MEMORY, "rank %d has no memory to join", hub->rank);
}

/* Rank 0: once all have joined, tells every rank where all ranks are. */
static void dtrain__hub_complete(dtrain__hub *hub)
{
    for (int rank = 0; rank < hub->size; rank++)
        if (!hub->members[rank].joined)
            return;
    dtrain__member *own = &hub->members[0]; /* it sends nothing to itself, so its output is free */
    size_t begin = dtrain__frame_open(hub, own, DTRAIN__FRAME_TABLE);
    dtrain__give(hub, &own->out, (uint64_t)hub->size, 4);
    dtrain__give(hub, &own->out, (uint64_t)hub->connections, 1);
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__give_text(hub, &own->out, 1, hub->members[rank].address);
        dtrain__give(hub, &own->out, hub->members[rank].host, 8);
        dtrain__give(hub, &own->out, hub->members[rank].process, 8);
        dtrain__give(hub, &own->out, hub->members[rank].began, 8);
        dtrain__give_text(hub, &own->out, 1, hub->members[rank].name);
    }
    if (!dtrain__frame_close(own, begin)) {
        dtrain__hub_short_of_memory(hub);
        return;
    }
    hub->table = own->out;
    memset(&own->out, 0, sizeof own->out);
    for (int to = 1; to < hub->size; to++) {
        hub->members[to].table_at = hub->members[to].out.bytes;
        hub->members[to].table_due = hub->table.bytes;
    }
    dtrain__hub_formed(hub);
    hub->notes.joined = 1;
}

/* that a complete group at the root may take to end: perhaps the run before's */
#define DTRAIN__COMPLETE_NS 5000000000
/* that a group which has lost this rank may take: it is in the middle of a step */
#define DTRAIN__GIVEN_UP_NS 60000000000

/* A try to reach rank 0 has failed. Only a no that rank 0 has proved ends anything: anybody may answer at its address,
 * and bytes may be changed on the way. A group that is not this one may be about to end. */
static void dtrain__hub_root_refuses(dtrain__hub *hub, const dtrain__handshake *handshake, int64_t now)
{
    dtrain__error cause = handshake->error;
    int passing = cause.status == DTRAIN_ERR_PEER_LOST || cause.status == DTRAIN_ERR_ABORTED;
    int proved = handshake->verdict != DTRAIN_OK, complete = proved && passing && !hub->formed;
    int64_t limit_ns = handshake->verdict == DTRAIN_ERR_PEER_LOST ? DTRAIN__GIVEN_UP_NS : DTRAIN__COMPLETE_NS;
    hub->complete_ns = !complete ? 0 : hub->complete_ns != 0 ? hub->complete_ns : now;
    if (hub->formed && handshake->verdict == DTRAIN_ERR_PEER_LOST)
        dtrain__hub_given_up(hub, cause.text);
    else if (hub->formed && proved)
        dtrain__hub_lost(hub, 0, cause.text);
    else if (complete && now - hub->complete_ns >= limit_ns)
        dtrain__membership_because(&cause, DTRAIN_ERR_MISMATCH,
                                   "%.300s; it has said so for %d s; or this process says a rank that another one has",
                                   handshake->error.text, (int)(limit_ns / 1000000000));
    else if (!proved && !passing && strcmp(hub->root_error.text, cause.text) != 0)
        dtrain__hub_note(hub, "rank %d tries again until its deadline: %.600s", hub->rank, cause.text);
    if (!hub->formed && proved && (!passing || cause.status == DTRAIN_ERR_MISMATCH))
        dtrain__seat_break(dtrain__council_seat(&hub->council, 0), &cause);
    if (!passing || !dtrain__hub_root_denied(hub)) /* a refusal says more than an address where nobody is */
        hub->root_error = cause;
}

/* The system refuses a connection to rank 0's address. */
static void dtrain__hub_root_unreached(dtrain__hub *hub, const dtrain__address *address, int error)
{
    char why[DTRAIN__FILES_TEXT];
    int full = dtrain__net_is_full(error);
    if (full || !dtrain__hub_root_denied(hub))
        dtrain__fail(&hub->root_error, full ? DTRAIN_ERR_IO : DTRAIN_ERR_PEER_LOST, "%s: %s",
                     dtrain__net_text(address).text, dtrain__net_refused(error, why));
    hub->complete_ns = 0;
    if (full && !hub->formed)
        dtrain__seat_break(dtrain__council_seat(&hub->council, 0), &hub->root_error);
}

/* Looks up rank 0's name. Other ranks than 0 try to reach it, as often as it takes. */
static void dtrain__hub_step_root(dtrain__hub *hub, int64_t now)
{
    dtrain__member *root = &hub->members[0];
    dtrain__handshake *handshake = root->handshake;
    dtrain__seat *world = dtrain__council_seat(&hub->council, 0);
    if (root->control.fd >= 0 || root->gone != DTRAIN__PRESENT ||
        (!hub->formed && (world == NULL || dtrain__membership_broken(world->members))))
        return;
    if (!hub->formed)
        dtrain__root_step(hub, now);
    if (hub->rank == 0)
        return;
    if (handshake == NULL && hub->root_count > 0 && now >= root->call_ns) {
        dtrain__address *address = &hub->root_addresses[hub->root_turn++ % hub->root_count];
        handshake = root->handshake = dtrain__hub_connect(hub, 0, DTRAIN__PURPOSE_CONTROL, address);
        if (handshake != NULL) {
            hub->reached = *address;
        } else {
            dtrain__hub_root_unreached(hub, address, errno);
            root->call_ns = dtrain__hub_again_ns(&root->wait_ns, now);
        }
    }
    int open = handshake != NULL ? dtrain__hub_advance(hub, handshake, now) : 0;
    if (open == 0)
        return;
    if (open > 0) {
        if (!hub->formed)
            memcpy(hub->keys.run, handshake->challenge + 16, DTRAIN__RUN_BYTES);
        dtrain__hub_adopt_control(hub, handshake);
        if (!hub->formed && root->control.fd >= 0 && dtrain__hub_join(hub) != DTRAIN_OK)
            dtrain__seat_end(world, hub->rank, &dtrain__thread_error);
    } else {
        root->call_ns = dtrain__hub_again_ns(&root->wait_ns, now);
        dtrain__hub_root_refuses(hub, handshake, now);
    }
    dtrain__hub_free_handshake(hub, &root->handshake);
    dtrain__hub_tell(hub);
}

static void dtrain__hub_step_lane(dtrain__channel *channel, int rank, int index, int64_t now)
{
    dtrain__hub *hub = channel->hub;
    dtrain__peer *peer = &channel->peers[rank];
    dtrain__member *member = &hub->members[dtrain__seat_world(&channel->seat, rank)];
    dtrain__lane *lane = &peer->lanes[index];
    dtrain__handshake *handshake = lane->handshake;
    dtrain__address address;
    if (handshake == NULL && lane->wanted && !dtrain__lane_open(lane, 1) && now >= lane->retry_ns &&
        !(hub->polls && hub->made_ns == now) && !dtrain__membership_left(channel->seat.members, rank) &&
        dtrain__channel_admitted(channel, dtrain__seat_world(&channel->seat, rank), index) ==
            NULL) { /* else each side would drop the other's choice */
        if (!dtrain__hub_peer_address(hub, dtrain__seat_world(&channel->seat, rank), &address)) {
            dtrain__hub_say(hub, &member->trouble,
                            "it never listens (its listen_on is \"none\"), and has not connected to this rank");
            lane->retry_ns = dtrain__hub_again_ns(&lane->wait_ns, now);
            return;
        }
        handshake = lane->handshake =
            dtrain__hub_connect(hub, dtrain__seat_world(&channel->seat, rank), DTRAIN__PURPOSE_DATA, &address);
        if (handshake != NULL) {
            hub->made_ns = handshake->page != NULL ? now : hub->made_ns;
            handshake->channel = channel->seat.id;
            handshake->lane = index;
            handshake->received = lane->stream.received;
            handshake->links = lane->links;
        } else if (dtrain__net_is_full(errno)) { /* the peers wait for this rank, so they hear of it */
            char why[DTRAIN__FILES_TEXT];
            dtrain__error cause;
            dtrain__net_refused(errno, why);
            dtrain__membership_because(&cause, DTRAIN_ERR_IO, "rank %d cannot connect to rank %d: %s",
                                       channel->seat.rank, rank, why);
            dtrain__seat_end(&channel->seat, channel->seat.rank, &cause);
        } else {
            char trouble[160];
            snprintf(trouble, sizeof trouble, "%.100s: %.50s", dtrain__net_text(&address).text,
                     dtrain__os_error_text(errno));
            dtrain__hub_say(hub, &member->trouble, trouble);
            lane->retry_ns = dtrain__hub_again_ns(&lane->wait_ns, now);
        }
    }
    int open = handshake != NULL ? dtrain__hub_advance(hub, handshake, now) : 0;
    if (open == 0)
        return;
    int64_t later = open < 0 ? dtrain__hub_again_ns(&lane->wait_ns, now) : 0;
    if (open > 0)
        dtrain__hub_adopt_data(channel, rank, handshake);
    else if (handshake->verdict == DTRAIN_ERR_PEER_LOST &&
             dtrain__hub_believes(hub, handshake->peer, (uint64_t)hub->rank))
        dtrain__hub_given_up(hub, handshake->error.text);
    else if (handshake->error.status == DTRAIN_ERR_ABORTED && handshake->peer_received > lane->links)
        lane->links = handshake->peer_received;
    else
        dtrain__hub_say(hub, &member->trouble, handshake->error.text);
    lane->retry_ns = now + 50000000; /* until then what is left on the connection before can be received */
    if (lane->retry_ns < later)
        lane->retry_ns = later;
    dtrain__hub_free_handshake(hub, &lane->handshake);
    dtrain__hub_tell(hub);
}

/* Calls a rank to which this one has no control connection, after rank 0 is gone. */
static void dtrain__hub_call(dtrain__hub *hub, int rank, int64_t now)
{
    dtrain__member *member = &hub->members[rank];
    dtrain__address address;
    int error = 0;
    if (member->handshake == NULL) {
        if (now < member->call_ns)
            return;
        if (dtrain__hub_peer_address(hub, rank, &address)) {
            member->handshake = dtrain__hub_connect(hub, rank, DTRAIN__PURPOSE_CONTROL, &address);
            error = member->handshake == NULL ? errno : 0;
        }
        if (member->handshake == NULL)
            member->call_ns = dtrain__hub_again_ns(&member->wait_ns, now);
    }
    dtrain__handshake *handshake = member->handshake;
    if (handshake != NULL) {
        int open = dtrain__hub_advance(hub, handshake, now);
        if (open == 0)
            return;
        if (open > 0)
            dtrain__hub_adopt_control(hub, handshake);
        else
            member->call_ns = dtrain__hub_again_ns(&member->wait_ns, now);
        error = handshake->system_error;
        if (handshake->verdict == DTRAIN_ERR_PEER_LOST)
            dtrain__hub_given_up(hub, handshake->error.text);
        dtrain__hub_free_handshake(hub, &member->handshake);
    }
    if (error == ECONNREFUSED || error == ENOENT)
        dtrain__hub_refused(hub, rank, dtrain__hub_peer_address(hub, rank, &address) && dtrain__net_is_unix(&address));
}

/* After rank 0 is gone the leader calls the others. After a while they call the leader. */
static void dtrain__hub_step_calls(dtrain__hub *hub, int64_t now)
{
    if (hub->elected)
        dtrain__consent_resend(&hub->council);
    hub->elected = 0;
    for (int rank = 0; hub->leader != 0 && !hub->leaving && !hub->council.given_up && rank < hub->size; rank++)
        if (dtrain__hub_linked(hub, rank) && hub->members[rank].gone == DTRAIN__PRESENT &&
            hub->members[rank].control.fd < 0)
            dtrain__hub_call(hub, rank, now);
    dtrain__consent_step(&hub->council);
}

/* Sends again what a broken connection has lost, whether or not this rank has more to send. */
static void dtrain__hub_step_again(dtrain__channel *channel, int rank, dtrain__lane *lane)
{
    if (lane->stream.fd < 0 || !dtrain__stream_owes(&lane->stream) ||
        dtrain__stream_send(&lane->stream, NULL, 0, 0) >= 0)
        return;
    dtrain__lane_down(channel->hub, lane, dtrain__seat_world(&channel->seat, rank), 1, errno);
    lane->wanted = channel->hub->reconnect_ns > 0;
}

#define DTRAIN__BEAT_LEAST_NS 10000000 /* whatever a member asks for */

/* How often to send heartbeats to a member. A rank is lost at the other's heartbeat_ms, which may be shorter than its
 * own: it is not known before the member's first one. */
static int64_t dtrain__hub_beat_every(const dtrain__hub *hub, const dtrain__member *member)
{
    int64_t every = member->every_ns > 0 ? hub->rest_ns : hub->period_ns;
    if (member->wants_ns > 0 && member->wants_ns / 4 < every)
        every = member->wants_ns / 4 > DTRAIN__BEAT_LEAST_NS ? member->wants_ns / 4 : DTRAIN__BEAT_LEAST_NS;
    return every;
}

static uint64_t dtrain__hub_ms(int64_t ns)
{
    return ns / 1000000 < UINT32_MAX ? (uint64_t)(ns / 1000000) : UINT32_MAX;
}

/* Sends one heartbeat: who is silent, this rank's heartbeat_ms, how soon the next one goes, and what this rank does.
 * The leader adds what the rank does that the receiver waits for, then the rank that this one waits for, and so on. */
static void dtrain__hub_beat(dtrain__hub *hub, int to, int suspect, int64_t silent_ns, int64_t now)
{
    int leads = dtrain__hub_leads(hub);
    dtrain__member *member = &hub->members[to];
    size_t begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_BEAT);
    dtrain__give(hub, &member->out, leads ? (uint64_t)(suspect + 1) : 0, 4);
    dtrain__give(hub, &member->out, dtrain__hub_ms(silent_ns), 4);
    dtrain__give(hub, &member->out, dtrain__hub_ms(hub->heartbeat_ns), 4);
    dtrain__give(hub, &member->out, dtrain__hub_ms(dtrain__hub_beat_every(hub, member)), 4);
    if (!leads)
        dtrain__give_last(hub, member, hub->rank, now);
    for (int i = 0, about = member->last != NULL ? member->last->awaits : -1; leads && i < DTRAIN__LAST_CHAIN; i++)
        if (about < 0 || about == to)
            break;
        else
            about = dtrain__give_last(hub, member, about, now);
    dtrain__frame_close(member, begin);
}

/* A firewall may have forgotten the connection, or the network is cut: the system would send its bytes again for many
 * minutes. Makes it again, or ends the group. */
static void dtrain__hub_unanswered(dtrain__channel *channel, int rank, dtrain__lane *lane)
{
    dtrain__hub *hub = channel->hub;
    dtrain__error lost;
    char ends[128];
    if (hub->reconnect_ns > 0) {
        dtrain__lane_down(hub, lane, dtrain__seat_world(&channel->seat, rank), 1, ETIMEDOUT);
        lane->wanted = channel->attend = 1;
        dtrain__hub_tell(hub);
        return;
    }
    dtrain__lane_ends(lane, ends, sizeof ends);
    dtrain__membership_because(
        &lost, DTRAIN_ERR_PEER_LOST,
        "rank %d (%s) is lost: the other host has answered nothing on its connection to rank %d (%s) for heartbeat_ms; "
        "a firewall may have forgotten it, or the network is cut: reconnect_ms makes one again",
        rank, hub->members[dtrain__seat_world(&channel->seat, rank)].name, channel->seat.rank, ends);
    dtrain__seat_end(&channel->seat, rank, &lost);
}

static void dtrain__hub_step_unanswered(dtrain__channel *channel)
{
    const dtrain__hub *hub = channel->hub;
    for (int i = 0; channel->lanes != NULL && hub->heartbeat_ns > 0 && i < channel->seat.size * hub->connections; i++) {
        dtrain__lane *lane = &channel->lanes[i];
        if (dtrain__lane_open(lane, 1) && lane->stream.shm.page == NULL &&
            dtrain__os_unanswered_ms(lane->stream.fd) > hub->heartbeat_ns / 1000000 + 1000) /* idle, one a second */
            dtrain__hub_unanswered(channel, i / hub->connections, lane);
    }
}

#define DTRAIN__SILENT_NS 1200000000 /* until the system is asked whether a member's process runs */

/* Until a member is suspected: it has missed two heartbeats. */
static int64_t dtrain__hub_suspicious(const dtrain__member *member)
{
    int64_t missed = member->every_ns / 10 * 24;
    return missed > DTRAIN__SILENT_NS ? missed : DTRAIN__SILENT_NS;
}

#define DTRAIN__LATE_NS 250000000 /* from here on this rank's own heartbeats show an overloaded host */

/* Judges a member's silence. Returns whether it is lost. On one machine the system is asked whether its process runs: a
 * process that it started may still hold its connections. */
static int dtrain__hub_judge(dtrain__hub *hub, int rank, int64_t silent, int64_t now)
{
    dtrain__member *member = &hub->members[rank];
    char how[256], own[128] = "";
    if (member->expected && now - member->down_ns > hub->reconnect_ns) {
        snprintf(how, sizeof how, "its connection was reset and has not come back within reconnect_ms");
    } else if (hub->formed && silent > DTRAIN__SILENT_NS && now >= hub->beat_ns && member->control.fd >= 0 &&
               !member->held && dtrain__hub_dead(hub, rank)) {
        member->closed = 1;
        snprintf(how, sizeof how, "its process has ended; one that it started may still hold its connections");
    } else if (hub->formed && hub->heartbeat_ns > 0 && silent > hub->heartbeat_ns) {
        if (hub->late_ns > DTRAIN__LATE_NS)
            snprintf(own, sizeof own,
                     "; this rank's own heartbeats were up to %.1f s late: its host is overloaded, or it polls seldom",
                     (double)hub->late_ns * 1e-9);
        snprintf(how, sizeof how,
                 "not heard for %.1f s (heartbeat_ms); stopped, or overloaded, or its host is gone%s%s",
                 (double)silent * 1e-9, member->held ? "; it does not read either" : "", own);
    } else {
        return 0;
    }
    dtrain__hub_lost(hub, rank, how);
    return 1;
}

/* Sends this rank's heartbeats and judges the silence of others. */
static void dtrain__hub_step_hearts(dtrain__hub *hub, int64_t now)
{
    int64_t longest = DTRAIN__SILENT_NS, next;
    int suspect = -1;
    int64_t late = hub->beat_ns > 0 ? now - hub->beat_ns : 0;
    if (late > hub->late_ns || now - hub->late_at_ns > hub->heartbeat_ns) { /* the most in the last heartbeat_ms */
        hub->late_ns = late;
        hub->late_at_ns = now;
    }
    int slept = hub->stepped_ns > 0 && hub->heartbeat_ns > 0 && now - hub->stepped_ns > hub->heartbeat_ns / 2;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        int64_t silent = now - member->heard_ns;
        if (!dtrain__hub_linked(hub, rank) || member->gone != DTRAIN__PRESENT || member->heard_ns == 0)
            continue;
        if (slept) /* this process was stopped, so it cannot judge */
            member->heard_ns = now;
        else if (!dtrain__hub_judge(hub, rank, silent, now) && hub->formed && silent > longest &&
                 silent > dtrain__hub_suspicious(member)) {
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
    next = now + hub->period_ns;
    dtrain__hub_look(hub, now);
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        if (dtrain__hub_linked(hub, rank) && member->joined && member->gone == DTRAIN__PRESENT &&
            member->control.fd >= 0 && dtrain__hub_due(member) == 0) { /* output that waits is a sign of life as well */
            int64_t every = dtrain__hub_beat_every(hub, member), due = member->told_ns + every;
            if (now >= due) {
                dtrain__hub_beat(hub, rank, suspect, longest, now);
                due = now + every;
            }
            next = due < next ? due : next;
        }
    }
    hub->beat_ns = next;
}

static void dtrain__hub_step_channel(dtrain__channel *channel, int64_t now)
{
    int busy = 0;
    for (int rank = 0; rank < channel->seat.size; rank++)
        for (int i = 0; i < channel->hub->connections; i++) {
            dtrain__lane *lane = &channel->peers[rank].lanes[i];
            dtrain__hub_step_lane(channel, rank, i, now);
            dtrain__hub_step_again(channel, rank, lane);
            busy |= lane->handshake != NULL ||
                    (dtrain__lane_open(lane, 1) ? dtrain__stream_owes(&lane->stream) : lane->wanted);
        }
    channel->attend = busy;
}

/* Does everything that needs no waiting; the caller holds both mutexes. */
static void dtrain__hub_work(dtrain__hub *hub)
{
    int64_t now = dtrain__os_now_ns(), most = DTRAIN__HANDSHAKE_NS / 5;
    int64_t away = hub->stepped_ns > 0 ? now - hub->stepped_ns : 0;
    hub->polled_ns += away < most ? away : most;
    dtrain__hub_step_handshakes(hub, now); /* first: what has come may move some on before others make room */
    for (int i = 0; i < hub->listener_count; i++)
        dtrain__hub_accept(hub, hub->listeners[i], now);
    dtrain__hub_step_root(hub, now);
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        int ready = member->poll_index > 0 && hub->fds[member->poll_index].revents != 0;
        if (!member->held && (ready || member->in.bytes > 0)) /* frames that were held, too */
            dtrain__hub_listen_to(hub, rank);
    }
    const dtrain__seat *world = hub->formed ? NULL : dtrain__council_seat(&hub->council, 0);
    if (hub->rank == 0 && world != NULL && !dtrain__membership_broken(world->members))
        dtrain__hub_complete(hub);
    for (dtrain__channel *channel = dtrain__channel_first(hub); channel != NULL;
         channel = dtrain__channel_next(channel)) {
        if (now >= hub->beat_ns)
            dtrain__hub_step_unanswered(channel);
        if (channel->attend)
            dtrain__hub_step_channel(channel, now);
    }
    dtrain__hub_step_calls(hub, now);
    dtrain__hub_step_hearts(hub, now);
    dtrain__hub_flush_all(hub, 1);
}

/* Adds to the poll list. Without memory the descriptor is looked at when something else is due. */
static void dtrain__hub_watch(dtrain__hub *hub, int *count, int fd, int events)
{
    void *larger = dtrain__memory_grow(hub->allocator, hub->fds, sizeof *hub->fds, (size_t)*count, 1);
    if (larger == NULL)
        return;
    hub->fds = (struct pollfd *)larger;
    dtrain__net_watch(hub->fds, count, fd, events);
}

/* Adds the channel's connections that are being made, or that have to send again. */
static int64_t dtrain__hub_watch_channel(dtrain__channel *channel, int *count, int64_t due)
{
    for (int i = 0, events; i < channel->seat.size * channel->hub->connections; i++) {
        dtrain__lane *lane = &channel->lanes[i];
        if (lane->handshake != NULL)
            dtrain__hub_watch(channel->hub, count, lane->handshake->fd, dtrain__handshake_events(lane->handshake));
        else if (lane->wanted && !dtrain__lane_open(lane, 1) && lane->retry_ns < due)
            due = lane->retry_ns;
        if (lane->stream.fd >= 0 && dtrain__stream_owes(&lane->stream)) {
            due = dtrain__stream_arm(&lane->stream, 1, &events) ? 0 : due;
            dtrain__hub_watch(channel->hub, count, lane->stream.fd, events);
        }
    }
    return due;
}

/* Fills the poll list. Returns the time at which something is due without an event. */
static int64_t dtrain__hub_prepare(dtrain__hub *hub, int *count)
{
    int64_t due = hub->beat_ns, now = dtrain__os_now_ns(), look = hub->council.look_ns;
    due = look != 0 && look < due ? look : due;
    look = dtrain__root_due(hub, now);
    due = look < due ? look : due;
    *count = 0;
    dtrain__hub_watch(hub, count, hub->kick[0], POLLIN);
    for (int i = 0; i < hub->listener_count && now >= hub->accept_ns; i++)
        dtrain__hub_watch(hub, count, hub->listeners[i], POLLIN);
    for (dtrain__handshake *handshake = hub->handshakes; handshake != NULL; handshake = handshake->next) {
        dtrain__hub_watch(hub, count, handshake->fd, dtrain__handshake_events(handshake));
        int64_t late = now + handshake->expires_ns - hub->polled_ns;
        due = late < due && handshake->state != DTRAIN__HANDSHAKE_PROVED ? late : due;
    }
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        member->poll_index = 0;
        if (member->handshake != NULL)
            dtrain__hub_watch(hub, count, member->handshake->fd, dtrain__handshake_events(member->handshake));
        else if (hub->rank != 0 && dtrain__hub_linked(hub, rank) && member->gone == DTRAIN__PRESENT &&
                 member->control.fd < 0 && member->call_ns < due && hub->root_count > 0)
            due = member->call_ns;
        int writes = dtrain__hub_due(member) > 0 || dtrain__stream_owes(&member->control);
        if (rank == hub->rank || member->control.fd < 0 || (member->held && !writes))
            continue;
        member->poll_index = *count;
        dtrain__hub_watch(hub, count, member->control.fd, (member->held ? 0 : POLLIN) | (writes ? POLLOUT : 0));
        if (member->poll_index == *count)
            member->poll_index = 0;
    }
    for (dtrain__channel *channel = dtrain__channel_first(hub); channel != NULL;
         channel = dtrain__channel_next(channel))
        if (channel->attend)
            due = dtrain__hub_watch_channel(channel, count, due);
    return due;
}

/* Adds what the service thread could not move in the channel. Returns whether some of it is here already. */
static int dtrain__hub_watch_awaited(dtrain__channel *channel, int *count)
{
    size_t room;
    int here = 0;
    for (int rank = 0; channel->awaiting && rank < channel->seat.size; rank++)
        for (int sending = 0; sending < 2; sending++) {
            int events;
            if ((channel->peers[rank].awaits & (sending ? POLLOUT : POLLIN)) == 0)
                continue;
            dtrain__lane *lane = dtrain__channel_lane(channel, rank, sending, &room);
            if (!dtrain__lane_open(lane, sending))
                continue;
            here |= dtrain__stream_arm(&lane->stream, sending, &events);
            dtrain__hub_watch(channel->hub, count, lane->stream.fd, events);
        }
    return here;
}

/* Calls poll() until an event or until_ns. Signals and rounding may end it early: callers look again. */
static void dtrain__hub_poll(struct pollfd *fds, int count, int64_t until_ns)
{
    int64_t span = until_ns - dtrain__os_now_ns();
    int ms = span <= 0 ? 0 : span > 60000000000 ? 60000 : (int)((span + 999999) / 1000000);
    dtrain__os_poll(fds, count, ms);
}

/* Rank 0: logs who has joined, if not both sides had a job's id to compare. */
static void dtrain__hub_log_joined(const dtrain__hub *hub)
{
    const char *own = hub->keys.job;
    for (int rank = 1; rank < hub->size; rank++) {
        const dtrain__member *member = &hub->members[rank];
        if (own[0] == 0 && member->job[0] == 0)
            dtrain__log(DTRAIN_LOG_INFO, "rank 0: rank %d is %s; no launcher's job was compared (see DTRAIN_JOB)", rank,
                        member->name);
        else if (own[0] == 0 || member->job[0] == 0)
            dtrain__log(DTRAIN_LOG_WARN,
                        "rank 0: rank %d is %s, of %s%s, and rank 0 of %s%s; is it of this job? DTRAIN_JOB, the same "
                        "on every rank, keeps other jobs' ranks out",
                        rank, member->name, member->job[0] != 0 ? "job " : "no launcher's job", member->job,
                        own[0] != 0 ? "job " : "none", own);
    }
}

/* One turn of the control plane. Waits until until_ns at most, or until one of extra is ready. The caller holds
 * step_mutex. */
static void dtrain__hub_step(dtrain__hub *hub, const struct pollfd *extra, int extra_count, int64_t until_ns)
{
    int count;
    dtrain__notes notes;
    notes.count = notes.sealed = notes.joined = notes.address = 0;
    dtrain__os_lock(&hub->mutex);
    int64_t due = dtrain__hub_prepare(hub, &count);
    for (int i = 0; i < extra_count; i++)
        dtrain__hub_watch(hub, &count, (int)extra[i].fd, extra[i].events);
    int serviced = DTRAIN__ATOMIC_LOAD(&hub->serviced, ACQUIRE) != 0;
    for (dtrain__channel *channel = dtrain__channel_first(hub); serviced && channel != NULL;
         channel = dtrain__channel_next(channel)) {
        if (dtrain__hub_watch_awaited(channel, &count))
            until_ns = 0;
        if (DTRAIN__ATOMIC_LOAD(&channel->dozing, SEQ_CST))
            dtrain__hub_watch(hub, &count, channel->wake[0], POLLIN);
    }
    DTRAIN__ATOMIC_STORE(&hub->stepping, 1, SEQ_CST);
    dtrain__os_unlock(&hub->mutex);
    if (DTRAIN__ATOMIC_LOAD(&hub->kicked, SEQ_CST))
        until_ns = 0;
    dtrain__hub_poll(hub->fds, count, due < until_ns ? due : until_ns);
    DTRAIN__ATOMIC_STORE(&hub->stepping, 0, SEQ_CST);
    DTRAIN__ATOMIC_STORE(&hub->kicked, 0, SEQ_CST);
    if (hub->fds[0].revents != 0)
        dtrain__os_drain(hub->kick[0]);
    dtrain__os_lock(&hub->mutex);
    for (dtrain__channel *channel = dtrain__channel_first(hub); channel != NULL;
         channel = dtrain__channel_next(channel))
        if (DTRAIN__ATOMIC_EXCHANGE(&channel->dozing, 0u, SEQ_CST) != 0)
            dtrain__channel_awake(channel, 1);
    dtrain__hub_work(hub);
    if (hub->notes.count > 0 || hub->notes.sealed || hub->notes.joined || hub->notes.address)
        notes = hub->notes;
    hub->notes.count = hub->notes.sealed = hub->notes.joined = hub->notes.address = 0;
    dtrain__os_unlock(&hub->mutex);
    for (int i = 0; i < notes.count; i++)
        dtrain__log(DTRAIN_LOG_WARN, "%s", notes.text[i]);
    if (notes.address && hub->on_address != NULL)
        hub->on_address(hub->on_address_user, hub->root);
    if (notes.joined)
        dtrain__hub_log_joined(hub);
    if (notes.sealed) /* a warning once a job, unless sealing was asked for */
        dtrain__log(hub->rank == 0 && hub->keys.secure == 0 ? DTRAIN_LOG_WARN : DTRAIN_LOG_INFO,
                    "rank %d: connections are sealed (ChaCha20-Poly1305), as %s; on a network that is yours alone, "
                    "DTRAIN_SECURE=0 or desc.secure = -1 on every rank turns that off",
                    hub->rank, hub->keys.secure > 0 ? "was asked for" : "they leave the host");
}

#endif
