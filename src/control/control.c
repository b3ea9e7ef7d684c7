/* ---- >>control ----
 * What comes over the control connections: who joins, where every rank is, who is lost and why, what ranks do, and
 * requests to the store. Frames come from ranks that have proved themselves. They are checked all the same. */
#ifndef DTRAIN__CONTROL
#define DTRAIN__CONTROL
#include "hub.c"

/* ---- what the council asks of the hub ---- */

static int dtrain__hub_send(void *self, int to, int type, const void *head, size_t head_bytes, const void *data,
                            size_t bytes)
{
    dtrain__hub *hub = (dtrain__hub *)self;
    dtrain__member *member = &hub->members[to];
    if (member->gone != DTRAIN__PRESENT)
        return 0;
    size_t begin = dtrain__frame_open(hub, member, type);
    dtrain__give_bytes(hub, &member->out, head, head_bytes);
    dtrain__give_bytes(hub, &member->out, data, bytes);
    int good = dtrain__frame_close(member, begin);
    dtrain__hub_kick(hub);
    if (!good && type == DTRAIN__FRAME_CONSENT)
        dtrain__hub_note(hub, "rank %d has no memory to send rank %d a vote or decision", hub->rank, to);
    return good;
}

static void dtrain__hub_news(void *self)
{
    dtrain__hub_tell((dtrain__hub *)self);
    dtrain__hub_kick((dtrain__hub *)self);
}

static void dtrain__hub_end(dtrain__seat *seat, int about, const dtrain__error *cause)
{
    dtrain__reason reason = {DTRAIN__FRAME_END, seat->id, about, cause->status, cause->text, 0};
    dtrain__channel_relay((dtrain__channel *)(void *)seat, &reason);
}

static int dtrain__hub_fate(void *self, int rank)
{
    const dtrain__member *member = &((dtrain__hub *)self)->members[rank];
    return member->doubted ? DTRAIN__LOST : member->gone;
}

/* The system of this machine says that the process has ended, or, where it does not know it, a unix socket of its was
 * closed. */
static int dtrain__hub_dead(void *self, int rank)
{
    const dtrain__member *member = &((dtrain__hub *)self)->members[rank];
    return member->known ? dtrain__os_process_ended((long)member->process, member->began) : member->closed;
}

static int dtrain__hub_beside(void *self, int a, int b)
{
    const dtrain__member *members = ((dtrain__hub *)self)->members;
    return members[a].host == members[b].host;
}

/* Takes what a rank tells of itself when it joins. Rank 0 refuses a rank that does not fit. */
static int dtrain__take_join(dtrain__hub *hub, int rank, dtrain__reader *reader)
{
    dtrain__member *member = &hub->members[rank];
    char fingerprint[DTRAIN__FINGERPRINT_BYTES], believed[400], text[DTRAIN__WHY_BYTES];
    dtrain__reason refusal = {DTRAIN__FRAME_REFUSE, 0, rank, DTRAIN_ERR_MISMATCH, text, 0};
    if (hub->rank != 0 || hub->formed || member->joined || !dtrain__take_address(hub, reader, member) ||
        !dtrain__take(reader, &member->host, 8) || !dtrain__take(reader, &member->process, 8) ||
        !dtrain__take(reader, &member->began, 8) ||
        !dtrain__take_said(hub, reader, &member->name, DTRAIN__NAME_BYTES) ||
        !dtrain__take_text(reader, 2, fingerprint, sizeof fingerprint) ||
        !dtrain__take_text(reader, 2, believed, sizeof believed) || reader->left > 0)
        return 0;
    if (strcmp(fingerprint, hub->fingerprint) != 0) {
        snprintf(text, sizeof text,
                 "rank %d (%.60s) has the fingerprint \"%.120s\", rank 0 \"%.120s\": run the same "
                 "program and model on every rank",
                 rank, member->name, fingerprint, hub->fingerprint);
        member->joined = 1; /* so that it gets the reason */
        dtrain__frame_reason(hub, rank, &refusal, NULL);
        member->joined = 0;
        snprintf(hub->refused, sizeof hub->refused, "%s", text);
        dtrain__hub_note(hub, "rank 0 sent away %s", text);
        return 1;
    }
    member->joined = 1;
    return 1;
}

/* Gives the channel its lanes, one for each of the world's connections. Returns 0 if there is no memory. */
static int dtrain__channel_lay(dtrain__channel *channel)
{
    size_t each = (size_t)channel->hub->connections, count = (size_t)channel->seat.size * each;
    channel->lanes = (dtrain__lane *)dtrain__alloc(channel->hub->allocator, count * sizeof(dtrain__lane));
    if (channel->lanes == NULL)
        return 0;
    for (size_t i = 0; i < count; i++)
        channel->lanes[i].stream.fd = -1;
    for (int rank = 0; rank < channel->seat.size; rank++)
        channel->peers[rank].lanes = channel->lanes + (size_t)rank * each;
    return 1;
}

static long dtrain__hub_process(const void *self, int rank)
{
    const dtrain__hub *hub = (const dtrain__hub *)self;
    const dtrain__member *member = &hub->members[rank];
    return member->host != hub->members[hub->rank].host ? -1 : member->known ? (long)member->process : 0;
}

/* All ranks have joined, and this rank knows where they are. */
static void dtrain__hub_formed(dtrain__hub *hub)
{
    dtrain__channel *world = dtrain__hub_channel(hub, 0);
    dtrain__error cause;
    dtrain__os_crowd crowd = {dtrain__hub_process, hub, hub->size};
    uint64_t space = dtrain__os_process_space();
    hub->formed = 1;
    for (int rank = 0; rank < hub->size; rank++)
        hub->members[rank].joined = 1;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        int same = member->host == hub->members[hub->rank].host, told = 0;
        member->began ^= space << 40; /* if its ids are not this process's, it began never */
        member->known = same && member->began != 0 && member->process > 0 && member->process <= LONG_MAX &&
                        dtrain__os_process_began((long)member->process, &told) == member->began && told;
    }
    hub->crowded = dtrain__os_crowded(&crowd);
    if (dtrain__hub_leads(hub))
        dtrain__hub_hear_all(hub);
    if (world != NULL && !dtrain__channel_lay(world)) {
        dtrain__membership_because(&cause, DTRAIN_ERR_MEMORY, "rank %d has no memory for its connections", hub->rank);
        dtrain__seat_end(&world->seat, hub->rank, &cause);
    }
    dtrain__hub_tell(hub);
}

static int dtrain__take_table(dtrain__hub *hub, dtrain__reader *reader)
{
    uint64_t size, connections;
    if (hub->rank == 0 || hub->formed || !dtrain__take(reader, &size, 4) || size != (uint64_t)hub->size ||
        !dtrain__take(reader, &connections, 1) || connections < 1 || connections > DTRAIN__MAX_LANES)
        return 0;
    hub->connections = (int)connections;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__member *member = &hub->members[rank];
        if ((rank == 0 ? !dtrain__take_said(hub, reader, &member->address, 1)
                       : !dtrain__take_address(hub, reader, member)) ||
            !dtrain__take(reader, &member->host, 8) || !dtrain__take(reader, &member->process, 8) ||
            !dtrain__take(reader, &member->began, 8) ||
            !dtrain__take_said(hub, reader, &member->name, DTRAIN__NAME_BYTES))
            return 0;
    }
    if (reader->left > 0)
        return 0;
    dtrain__hub_formed(hub);
    return 1;
}

/* The leader: whether `from` may say this of the channel. It must be a member and list all members. Only a rank itself
 * says that its end has left. */
static int dtrain__reason_fits(dtrain__hub *hub, int from, const dtrain__reason *reason, dtrain__reader list)
{
    const dtrain__seat *seat = dtrain__council_seat(&hub->council, reason->channel);
    size_t count = list.left / 4;
    int among = reason->channel == 0;
    uint64_t rank, about = (uint64_t)reason->about;
    if (reason->channel == 0 ? count > 0 : !hub->formed || (seat != NULL && count != (size_t)seat->size))
        return 0;
    dtrain__council_list(&hub->council);
    for (size_t i = 0; dtrain__take(&list, &rank, 4); i++) {
        if (!dtrain__council_list_add(&hub->council, rank) ||
            (seat != NULL && rank != (uint64_t)dtrain__seat_world(seat, (int)i)))
            return 0;
        among |= (int)rank == from;
        about = i == (size_t)reason->about ? rank : about;
    }
    return among && (size_t)reason->about < (reason->channel == 0 ? (size_t)hub->size : count) &&
           (reason->type != DTRAIN__FRAME_BYE || about == (uint64_t)from);
}

/* The leader: passes on what concerns a channel to the ranks that the sender lists, or to all if it lists none. */
static void dtrain__hub_forward(dtrain__hub *hub, int from, const dtrain__reason *reason, dtrain__reader list)
{
    uint64_t rank;
    if (!dtrain__hub_leads(hub))
        return;
    if (reason->channel == 0)
        dtrain__hub_relay(hub, from, reason);
    while (dtrain__take(&list, &rank, 4))
        if ((int)rank != from)
            dtrain__frame_reason(hub, (int)rank, reason, NULL);
}

/* While the world forms: rank 0 refuses this rank, or has an error itself. */
static int dtrain__take_refusal(dtrain__hub *hub, const dtrain__reason *reason)
{
    dtrain__seat *world = dtrain__council_seat(&hub->council, 0);
    if (hub->rank == 0 || hub->formed || world == NULL)
        return 0;
    dtrain__fail(&hub->root_error, reason->status, "%s", reason->text);
    dtrain__seat_break(world, &hub->root_error);
    return 1;
}

/* A channel has ended, or a member of it has left. */
static int dtrain__take_channel_reason(dtrain__hub *hub, int from, const dtrain__reason *reason,
                                       const dtrain__reader *list)
{
    dtrain__seat *seat = dtrain__council_seat(&hub->council, reason->channel);
    dtrain__error cause;
    if (dtrain__hub_leads(hub) ? !dtrain__reason_fits(hub, from, reason, *list)
                               : list->left > 0 || (seat != NULL && reason->about >= seat->size))
        return 0;
    if (reason->type == DTRAIN__FRAME_BYE) {
        if (seat != NULL && reason->about != seat->rank)
            dtrain__seat_left(seat, reason->about, reason->text, reason->calls);
        dtrain__council_left(&hub->council, reason->channel,
                             seat != NULL ? dtrain__seat_world(seat, reason->about) : from);
    } else if (seat != NULL) {
        dtrain__membership_because(&cause, reason->status, "%s", reason->text);
        if (!dtrain__seat_break(seat, &cause))
            return 1;
    }
    dtrain__hub_forward(hub, from, reason, *list);
    return 1;
}

/* The others have given this rank up, perhaps because it was stopped. It is in no group any more. */
static int dtrain__hub_given_up(dtrain__hub *hub, const char *how)
{
    dtrain__member *self = &hub->members[hub->rank];
    hub->council.given_up = 1;
    dtrain__hub_say(hub, &self->why, how);
    for (dtrain__seat *seat = hub->council.seats; seat != NULL; seat = seat->next)
        dtrain__seat_lost(seat, hub->rank, DTRAIN_ERR_PEER_LOST, self->name, self->why);
    dtrain__hub_tell(hub);
    return 1;
}

/* A member has left with all its groups, or is lost. */
static int dtrain__take_gone(dtrain__hub *hub, int from, const dtrain__reason *reason, const dtrain__reader *list)
{
    int leads = dtrain__hub_leads(hub), lost = reason->type == DTRAIN__FRAME_LOST;
    if (reason->channel != 0 || list->left > 0)
        return 0;
    if (reason->about == hub->rank && lost)
        return dtrain__hub_given_up(hub, reason->text);
    if (reason->about >= hub->size || reason->about == hub->rank || (leads && (lost || reason->about != from)))
        return 0;
    if (leads && !hub->formed) {
        hub->members[from].joined = 0; /* it gave up waiting for others and may start again; its connection ends next */
        return 1;
    }
    dtrain__council_forget(&hub->council, reason->about, DTRAIN__EVERY_GROUP);
    if (hub->members[reason->about].gone == DTRAIN__PRESENT) {
        hub->members[reason->about].closed = lost && reason->status == DTRAIN_ERR_PEER_LOST;
        hub->members[reason->about].doubted = !lost && reason->status == DTRAIN_ERR_TIMEOUT;
    }
    dtrain__hub_gone(hub, reason->about, lost ? DTRAIN__LOST : DTRAIN__LEFT, reason->text);
    dtrain__hub_forward(hub, from, reason, *list);
    return 1;
}

/* Takes what happened to a rank, and why. */
static int dtrain__take_reason(dtrain__hub *hub, int from, int type, dtrain__reader *reader)
{
    uint64_t about, status, count;
    char text[DTRAIN__ERROR_BYTES];
    dtrain__reason reason;
    if (!dtrain__take(reader, &reason.channel, 8) || !dtrain__take(reader, &about, 4) || about > INT_MAX ||
        !dtrain__take(reader, &status, 2) || !dtrain__status_known(status) ||
        !dtrain__take_text(reader, 2, text, sizeof text) || !dtrain__take(reader, &reason.calls, 8) ||
        !dtrain__take(reader, &count, 4) || count > (uint64_t)hub->size || reader->left != 4 * (size_t)count)
        return 0;
    reason.type = type;
    reason.about = (int)about;
    reason.status = (dtrain_status)status;
    reason.text = text;
    if (reason.status == DTRAIN_OK && (type == DTRAIN__FRAME_END || type == DTRAIN__FRAME_REFUSE))
        return 0;
    switch (type) {
    case DTRAIN__FRAME_REFUSE: return dtrain__take_refusal(hub, &reason);
    case DTRAIN__FRAME_BYE:
    case DTRAIN__FRAME_END: return dtrain__take_channel_reason(hub, from, &reason, reader);
    case DTRAIN__FRAME_LOST:
    case DTRAIN__FRAME_GONE: return dtrain__take_gone(hub, from, &reason, reader);
    default: return 0;
    }
}

/* Finds out what this rank does now: in the first group that waits for a peer, else in the oldest. */
static void dtrain__hub_look(dtrain__hub *hub, int64_t now)
{
    dtrain__last_heard *own = dtrain__hub_heard(hub, hub->rank);
    own->awaits = -1;
    own->bytes = 0;
    own->heard_ns = now;
    for (dtrain__channel *channel = dtrain__channel_first(hub); channel != NULL && own->awaits < 0;
         channel = dtrain__channel_next(channel)) {
        if (channel->last != NULL)
            own->bytes = channel->last(channel->last_user, own->data, sizeof own->data, &own->awaits);
        if (own->awaits >= 0)
            own->awaits = dtrain__seat_world(&channel->seat, own->awaits);
    }
}

/* Adds what is known of a rank to a heartbeat. Returns the rank that it waits for, or -1. */
static int dtrain__give_last(dtrain__hub *hub, dtrain__member *to, int about, int64_t now)
{
    const dtrain__last_heard *last = hub->members[about].last;
    if (last == NULL || last->bytes == 0)
        return -1;
    dtrain__give(hub, &to->out, (uint64_t)about, 4);
    dtrain__give(hub, &to->out, (uint64_t)(last->awaits + 1), 4);
    dtrain__give(hub, &to->out, (uint64_t)((now - last->heard_ns) / 1000000), 4);
    dtrain__give(hub, &to->out, last->bytes, 2);
    dtrain__give_bytes(hub, &to->out, last->data, last->bytes);
    return last->awaits;
}

static int dtrain__take_last(dtrain__hub *hub, int from, dtrain__reader *reader)
{
    uint64_t about, awaits, age_ms, bytes;
    if (!dtrain__take(reader, &about, 4) || !dtrain__take(reader, &awaits, 4) || !dtrain__take(reader, &age_ms, 4) ||
        !dtrain__take(reader, &bytes, 2) || about >= (uint64_t)hub->size || awaits > (uint64_t)hub->size ||
        bytes > DTRAIN__LAST_BYTES || bytes > reader->left || (dtrain__hub_leads(hub) && (int)about != from) ||
        (int)about == hub->rank)
        return 0;
    dtrain__last_heard *last = dtrain__hub_heard(hub, (int)about);
    memcpy(last->data, reader->at, (size_t)bytes);
    last->bytes = (size_t)bytes;
    last->awaits = (int)awaits - 1;
    last->heard_ns = dtrain__os_now_ns() - (int64_t)age_ms * 1000000;
    reader->at += bytes;
    reader->left -= (size_t)bytes;
    return 1;
}

static int dtrain__take_beat(dtrain__hub *hub, int from, dtrain__reader *reader)
{
    uint64_t suspect, ms, wants_ms, every_ms;
    if (!dtrain__take(reader, &suspect, 4) || !dtrain__take(reader, &ms, 4) || !dtrain__take(reader, &wants_ms, 4) ||
        !dtrain__take(reader, &every_ms, 4) || suspect > (uint64_t)hub->size)
        return 0;
    if (hub->members[from].wants_ns != (int64_t)wants_ms * 1000000)
        hub->beat_ns = 0; /* the member may need one sooner than it was due */
    hub->members[from].wants_ns = (int64_t)wants_ms * 1000000;
    hub->members[from].every_ns = (int64_t)every_ms * 1000000;
    if (!dtrain__hub_leads(hub)) {
        hub->suspect = (int)suspect - 1;
        hub->suspect_ns = (int64_t)ms * 1000000;
    }
    while (reader->left > 0)
        if (!dtrain__take_last(hub, from, reader))
            return 0;
    return 1;
}

/* Takes one whole frame from `rank`. Returns 0 if it is malformed or out of place. */
static int dtrain__hub_frame(dtrain__hub *hub, int rank, int type, const unsigned char *data, size_t bytes)
{
    dtrain__reader reader = {data, bytes};
    switch (type) {
    case DTRAIN__FRAME_JOIN: return dtrain__take_join(hub, rank, &reader);
    case DTRAIN__FRAME_TABLE: return dtrain__take_table(hub, &reader);
    case DTRAIN__FRAME_BEAT: return dtrain__take_beat(hub, rank, &reader);
    case DTRAIN__FRAME_ASK:
    case DTRAIN__FRAME_ANSWER:
    case DTRAIN__FRAME_CONSENT: return hub->formed && dtrain__council_take(&hub->council, rank, type, &reader);
    default: return dtrain__take_reason(hub, rank, type, &reader);
    }
}

/* Whether to believe `from` that `about` is lost. Besides the leader, a rank may say so of those that would lead before
 * it: that explains why it leads. Of any other it could only make the loss up. */
static int dtrain__hub_believes(const dtrain__hub *hub, int from, uint64_t about)
{
    return from == hub->leader || about < (uint64_t)from;
}

/* Whether a frame from `rank` is handled now. The leader handles no frame of a rank that has much to read: its requests
 * would only add to that. A rank that knows of another leader may send frames that this one has no part in. Of these
 * only losses are handled, which explain the other leader. The rest waits until both agree. */
static int dtrain__hub_hears(const dtrain__hub *hub, int rank, int type, dtrain__reader frame)
{
    uint64_t channel, about;
    if (!dtrain__hub_linked(hub, rank))
        return type == DTRAIN__FRAME_LOST && rank < hub->rank && dtrain__take(&frame, &channel, 8) &&
               dtrain__take(&frame, &about, 4) && dtrain__hub_believes(hub, rank, about);
    return !dtrain__hub_leads(hub) || hub->members[rank].out.bytes <= DTRAIN__QUEUE_BYTES;
}

/* Handles the whole frames in a member's input, or holds them. Returns 0 if one is malformed. Frames of a rank that is
 * gone are dropped. */
static int dtrain__hub_frames(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    size_t at = 0;
    int good = 1;
    member->held = 0;
    while (good && member->in.bytes - at >= 6) {
        uint64_t bytes = dtrain__get_le(member->in.data + at, 4);
        int type = (int)dtrain__get_le(member->in.data + at + 4, 2), gone = member->gone != DTRAIN__PRESENT;
        dtrain__reader frame = {member->in.data + at + 6, (size_t)bytes};
        if (bytes > DTRAIN__FRAME_BYTES + DTRAIN__FRAME_MEMBER * (size_t)hub->size)
            good = 0;
        else if (member->in.bytes - at - 6 < bytes)
            break;
        else if (!gone && !dtrain__hub_hears(hub, rank, type, frame)) {
            member->held = 1;
            break;
        } else
            good = gone || dtrain__hub_frame(hub, rank, type, member->in.data + at + 6, (size_t)bytes);
        at += good ? 6 + (size_t)bytes : 0;
    }
    dtrain__bytes_drop(&member->in, at < member->in.bytes ? at : member->in.bytes);
    return good;
}

/* Handles what has come from a member, until frames are held or nothing more is there. */
static void dtrain__hub_listen_to(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    while (member->control.fd >= 0) {
        if (!dtrain__hub_frames(hub, rank)) {
            dtrain__hub_lost(hub, rank, "it sent a malformed control message");
            return;
        }
        if (member->held || member->control.fd < 0)
            return;
        if (!dtrain__bytes_room(hub->allocator, &member->in, 4096)) {
            dtrain__hub_short_of_memory(hub);
            return;
        }
        ssize_t n = dtrain__stream_recv(&member->control, member->in.data + member->in.bytes,
                                        dtrain__memory_bytes(member->in.data) - member->in.bytes);
        if (n < 0)
            dtrain__hub_control_down(hub, rank, dtrain__hub_ended(hub, rank, errno));
        if (n <= 0)
            return;
        member->in.bytes += (size_t)n;
        member->heard_ns = dtrain__os_now_ns();
    }
}

/* Sends what waits for a member. A connection that takes no more may still hold its peer's last words, which say
 * whether it left or died. Whoever reads them also finds the end of the connection, now or when poll() reports it.
 * Output to a member whose frames are held is dropped then, as nobody will read it, unless the connection may come
 * back. */
static void dtrain__hub_flush(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    while (member->control.fd >= 0 && (dtrain__hub_due(member) > 0 || dtrain__stream_owes(&member->control))) {
        int table = member->table_at == 0 && member->table_due > 0;
        size_t before = member->table_due > 0 ? member->table_at : member->out.bytes;
        ssize_t n = dtrain__stream_send(
            &member->control, table ? hub->table.data + (hub->table.bytes - member->table_due) : member->out.data,
            table ? member->table_due : before, 0);
        if (n < 0 && member->held && hub->reconnect_ns > 0) {
            dtrain__hub_control_down(hub, rank, errno);
        } else if (n < 0) {
            if (member->held)
                member->out.bytes = member->table_at = 0;
            dtrain__hub_listen_to(hub, rank);
        }
        if (n <= 0)
            return;
        member->told_ns = dtrain__os_now_ns();
        if (table) {
            member->table_due -= (size_t)n;
        } else {
            member->table_at -= member->table_due > 0 ? (size_t)n : 0;
            dtrain__bytes_drop(&member->out, (size_t)n);
        }
        if (member->held && member->out.bytes <= DTRAIN__QUEUE_BYTES) {
            member->held = 0;
            dtrain__hub_kick(hub); /* its input may hold frames */
        }
    }
}

/* Sends everything that waits, without waiting. A rank that says its last words tries more than once: the system may
 * refuse a call for a passing reason. */
static void dtrain__hub_flush_all(dtrain__hub *hub, int tries)
{
    for (int rank = 0; rank < hub->size; rank++)
        for (int turn = 0; turn < tries && rank != hub->rank && hub->members[rank].control.fd >= 0 &&
                           (turn == 0 || dtrain__hub_due(&hub->members[rank]) > 0);
             turn++)
            dtrain__hub_flush(hub, rank);
}

#endif
