/* ---- >>admit ----
 * Connections that come in and go out, until they are handed to their owner: a member's control plane, or a lane of a
 * channel. Only this module decides whether to speak to a peer at all, by its address and by its connection. If two
 * ranks connect to each other at the same time, the first connection whose proof comes stays, and of two the lower
 * rank's. */
#ifndef DTRAIN__ADMIT
#define DTRAIN__ADMIT
#include "control.c"

/* Ends a handshake, if there is one. */
static DTRAIN__NOINLINE void dtrain__hub_free_handshake(dtrain__hub *hub, dtrain__handshake **handshake)
{
    if (*handshake == NULL)
        return;
    dtrain__handshake_close(*handshake);
    dtrain__shm_close(&(*handshake)->page, (*handshake)->ring_bytes);
    if ((*handshake)->page_fd >= 0)
        dtrain__os_share_close((*handshake)->page_fd);
    dtrain__free(hub->allocator, *handshake);
    *handshake = NULL;
}

static dtrain__handshake *dtrain__hub_new_handshake(dtrain__hub *hub, const dtrain__address *peer)
{
    dtrain__handshake *handshake = (dtrain__handshake *)dtrain__alloc(hub->allocator, sizeof *handshake);
    if (handshake == NULL)
        return NULL;
    handshake->fd = handshake->page_fd = -1;
    snprintf(handshake->peer_name, sizeof handshake->peer_name, "%s", dtrain__net_text(peer).text);
    return handshake;
}

/* A number below `below`, by chance. */
static unsigned dtrain__hub_dice(unsigned below)
{
    uint32_t dice = 0;
    (void)dtrain__os_random(&dice, sizeof dice);
    return dice % below;
}

/* When to try again after a try has failed. The wait doubles up to half a second. Chance makes it shorter or longer by
 * half, so that ranks that failed together do not all come back together. */
static int64_t dtrain__hub_again_ns(int64_t *wait_ns, int64_t now)
{
    *wait_ns = *wait_ns == 0 ? 4000000 : *wait_ns < 250000000 ? *wait_ns * 2 : 500000000;
    return now + *wait_ns / 2 + *wait_ns / 1000 * (int64_t)dtrain__hub_dice(1001);
}

/* Whether two connections that come in compete for the same room: both at one stage of the handshake. from: NULL, or
 * the host that the other must come from too. */
static int dtrain__hub_competes(const dtrain__handshake *one, const dtrain__handshake *other, const uint64_t *from)
{
    return one->state == other->state && (from == NULL || one->from == *from);
}

static int dtrain__hub_competing(const dtrain__hub *hub, const dtrain__handshake *newcomer, const uint64_t *from)
{
    int count = 0;
    for (const dtrain__handshake *at = hub->handshakes; at != NULL; at = at->next)
        count += dtrain__hub_competes(at, newcomer, from);
    return count;
}

/* Draws one of those that compete with the newcomer, which may be the newcomer itself. */
static dtrain__handshake *dtrain__hub_draw(const dtrain__hub *hub, const dtrain__handshake *newcomer,
                                           const uint64_t *from)
{
    unsigned turn = dtrain__hub_dice((unsigned)dtrain__hub_competing(hub, newcomer, from));
    dtrain__handshake *at = hub->handshakes;
    while (!dtrain__hub_competes(at, newcomer, from) || turn-- > 0)
        at = at->next;
    return at;
}

/* A connection that came in has reached a stage of its handshake. Each stage has room for the connections of all ranks
 * and some more. So silent connections never drive out a rank that has said hello, and neither drives out one that has
 * proved itself. If there are too many, one is closed. Of two hosts, the newcomer's and that of one drawn by chance, it
 * is one of the host that has more there, again drawn by chance. So a host with many drives out its own, and nobody can
 * time whom they drive out. */
static void dtrain__hub_make_room(const dtrain__hub *hub, const dtrain__handshake *newcomer)
{
    if (dtrain__hub_competing(hub, newcomer, NULL) <= DTRAIN__HANDSHAKES + hub->size * hub->connections)
        return;
    uint64_t own = newcomer->from, other = dtrain__hub_draw(hub, newcomer, NULL)->from;
    int fewer = dtrain__hub_competing(hub, newcomer, &own) < dtrain__hub_competing(hub, newcomer, &other);
    dtrain__handshake_close(dtrain__hub_draw(hub, newcomer, fewer ? &other : &own));
}

/* Without a token ranks use unix sockets alone: only these tell whose process the other one is. */
static int dtrain__hub_allows(const dtrain__hub *hub, const dtrain__address *address)
{
    return hub->keys.token_bytes > 0 || hub->insecure || dtrain__net_is_unix(address);
}

/* Whether to trust the process at the other end of a connection to or from `address`. A name is open to all users of
 * this host, so insecure does not count there. A name of the library's own holds the user's number. */
static int dtrain__hub_trusts(const dtrain__hub *hub, int fd, const dtrain__address *address)
{
    int named = dtrain__net_is_abstract(address), same = dtrain__net_is_unix(address) && dtrain__os_same_user(fd);
    if (same || (named && hub->root_count > 1))
        return same;
    return hub->keys.token_bytes > 0 || (hub->insecure && !named);
}

/* Opens a listener. *address: also out, where it is. apart: see dtrain__net_listen. Returns 0 or an errno. */
static int dtrain__hub_listen(dtrain__hub *hub, dtrain__address *address, int apart)
{
    int fd, error = dtrain__hub_allows(hub, address) ? dtrain__net_listen(address, apart, &fd) : EACCES;
    if (error != 0)
        return error;
    if (hub->listener_count == 0)
        hub->listening = *address;
    hub->listeners[hub->listener_count++] = fd;
    return 0;
}

static void dtrain__hub_stop_listening(dtrain__hub *hub)
{
    while (hub->listener_count > 0)
        dtrain__os_hang_up(hub->listeners[--hub->listener_count]);
}

/* Whether a connection that is being made has taken too long. Incoming ones are judged by this rank's polling, outgoing
 * ones by the clock. A member that the system has reached, or that has proved itself here, gets more time. It may not
 * poll, or may not have the group yet, for as long as the group's limits allow. */
static DTRAIN__NOINLINE int dtrain__hub_late(const dtrain__hub *hub, const dtrain__handshake *handshake, int64_t now)
{
    int waits = handshake->initiator ? handshake->state != DTRAIN__HANDSHAKE_CONNECTING
                                     : handshake->state == DTRAIN__HANDSHAKE_PROVED;
    return (handshake->initiator ? now : hub->polled_ns) - (waits ? hub->patience_ns : 0) >= handshake->expires_ns;
}

/* Whether the memory that a connection offers is whole, after the next part was made. Without memory it offers none.
 * One look makes one part, whatever the number of connections: a poll has little time. */
static int dtrain__hub_filled(dtrain__hub *hub, dtrain__handshake *handshake, int64_t now)
{
    if (!handshake->initiator || handshake->page == NULL ||
        handshake->filled == dtrain__shm_bytes(handshake->ring_bytes))
        return 1;
    handshake->expires_ns = now + DTRAIN__HANDSHAKE_NS; /* the peer's time begins after that */
    if (hub->made_ns == now)
        return 0;
    hub->made_ns = now;
    int error = dtrain__shm_fill(handshake->page_fd, handshake->ring_bytes, &handshake->filled);
    if (error == 0)
        return handshake->filled == dtrain__shm_bytes(handshake->ring_bytes);
    memset(handshake->offer, 0, sizeof handshake->offer);
    dtrain__shm_close(&handshake->page, handshake->ring_bytes);
    return 1;
}

/* Advances a connection that is being made. Returns 1 when it is open, 0 while it is under way, -1 when it has failed:
 * its error says why. */
static int dtrain__hub_advance(dtrain__hub *hub, dtrain__handshake *handshake, int64_t now)
{
    if (!dtrain__hub_filled(hub, handshake, now))
        return 0;
    dtrain__handshake_step(handshake, &hub->keys);
    if (handshake->state == DTRAIN__HANDSHAKE_OPEN && handshake->out_done == handshake->out_bytes)
        return 1;
    if (handshake->state == DTRAIN__HANDSHAKE_CLOSED)
        return -1;
    if (!dtrain__hub_late(hub, handshake, now))
        return 0;
    dtrain__fail(&handshake->error, DTRAIN_ERR_PEER_LOST, "%s does not answer", handshake->peer_name);
    return -1;
}

/* Whether to try to share memory with a peer: with each process of this host, unless bytes are to be sealed. */
static int dtrain__hub_shares(const dtrain__hub *hub, int peer)
{
    int asked = hub->transport == DTRAIN__TRANSPORT_ANY || hub->transport == DTRAIN__TRANSPORT_SHM;
    return asked && hub->keys.secure <= 0 && hub->members[peer].host == hub->members[hub->rank].host;
}

/* Starts a connection to `peer`; NULL with errno if the system or the peer refuses at once. */
static dtrain__handshake *dtrain__hub_connect(dtrain__hub *hub, int peer, int purpose, const dtrain__address *address)
{
    dtrain__handshake *handshake = dtrain__hub_new_handshake(hub, address);
    int error = ENOMEM;
    if (handshake != NULL)
        error = dtrain__hub_allows(hub, address) ? dtrain__net_connect(address, &handshake->fd) : EACCES;
    if (error != 0) {
        dtrain__hub_free_handshake(hub, &handshake);
        errno = error;
        return NULL;
    }
    handshake->expires_ns = dtrain__os_now_ns() + DTRAIN__HANDSHAKE_NS;
    handshake->initiator = 1;
    handshake->peer = peer;
    handshake->purpose = purpose;
    if (purpose == DTRAIN__PURPOSE_CONTROL)
        handshake->received = hub->members[peer].control.received;
    else if (dtrain__hub_shares(hub, peer)) {
        handshake->ring_bytes = dtrain__ring_bytes(hub->size, hub->polls);
        handshake->filled =
            dtrain__shm_offer(handshake->offer, handshake->ring_bytes, &handshake->page, &handshake->page_fd);
    }
    if (!dtrain__hub_trusts(hub, handshake->fd, address)) {
        int retreats = dtrain__net_is_abstract(address) && hub->root_count > 1; /* the root may be at its path */
        dtrain__fail(&handshake->error, retreats ? DTRAIN_ERR_PEER_LOST : DTRAIN_ERR_DENIED,
                     "%s belongs to another user%s", handshake->peer_name,
                     retreats ? "" : ", and there is no token: give every rank the same DTRAIN_TOKEN");
        dtrain__handshake_close(handshake);
    }
    return handshake;
}

/* Puts this rank's own zone into the address of a peer: that of the link on which it listens, reached rank 0, or was
 * reached by the peer. */
static void dtrain__hub_set_zone(const dtrain__hub *hub, const dtrain__member *peer, dtrain__address *address)
{
    dtrain__address links[3];
    links[0] = hub->listening;
    links[1] = hub->reached;
    if (peer->control.fd < 0 || dtrain__net_end(peer->control.fd, 0, &links[2]) != 0)
        memset(&links[2], 0, sizeof links[2]);
    for (int i = 2; dtrain__net_is_zoned(address) && i >= 0; i--)
        if (dtrain__net_is_zoned(&links[i]))
            address->at.v6.sin6_scope_id = links[i].at.v6.sin6_scope_id;
}

/* Finds the address at which `peer` listens for data. Returns 0 if it never listens. */
static int dtrain__hub_peer_address(dtrain__hub *hub, int peer, dtrain__address *out)
{
    const dtrain__member *member = &hub->members[peer];
    *out = hub->reached;
    if (peer == 0)
        return 1;
    if (member->address[0] == 0)
        return 0;
    if (member->address[0] != ':') {
        int good = dtrain__net_parse(member->address, out) == DTRAIN_OK;
        dtrain__hub_set_zone(hub, member, out);
        return good;
    }
    if (hub->rank == 0 && dtrain__net_end(member->control.fd, 1, out) != 0)
        return 0;
    dtrain__net_set_port(out, atoi(member->address + 1));
    return 1;
}

/* Says what carries a connection's bytes to a peer, and if that is no shared memory, why. */
static void dtrain__hub_way(const dtrain__hub *hub, int peer, const dtrain__stream *stream, char *text, size_t capacity)
{
    dtrain__address end;
    if (stream->shm.page != NULL) {
        snprintf(text, capacity, "shared memory");
        return;
    }
    int local = dtrain__net_end(stream->fd, 0, &end) == 0 && dtrain__net_is_unix(&end);
    const char *why = "the system lets neither process open the other's memory, or has none to share";
    if (hub->members[peer].host != hub->members[hub->rank].host)
        why = "two hosts";
    else if (stream->seal != NULL)
        why = "the connection is sealed";
    else if (!dtrain__hub_shares(hub, peer))
        why = "the chosen transport asks for none";
    else if (dtrain__without("shm"))
        why = "DTRAIN_WITHOUT names shm";
    snprintf(text, capacity, "%s, no shared memory: %s", local ? "unix socket" : "TCP", why);
}

static void dtrain__hub_adopt_data(dtrain__channel *channel, int rank, dtrain__handshake *handshake)
{
    dtrain__hub *hub = channel->hub;
    dtrain__lane *lane = &channel->peers[rank].lanes[handshake->lane];
    dtrain__error cause;
    dtrain_status status = dtrain__hub_resume(hub, &lane->stream, handshake,
                                              hub->members[handshake->peer].host == hub->members[hub->rank].host);
    if (status == DTRAIN_ERR_MEMORY)
        dtrain__membership_because(&cause, status, "rank %d has no memory to seal its connection to rank %d",
                                   channel->seat.rank, rank);
    else if (status != DTRAIN_OK)
        dtrain__membership_because(&cause, status,
                                   "rank %d (%s) is lost: its connection came back, but more data was lost than can be "
                                   "sent again",
                                   rank, hub->members[handshake->peer].name);
    if (status != DTRAIN_OK) {
        dtrain__seat_end(&channel->seat, status == DTRAIN_ERR_MEMORY ? channel->seat.rank : rank, &cause);
        return;
    }
    if (hub->transport == DTRAIN__TRANSPORT_SHM && lane->stream.shm.page == NULL) {
        char way[160];
        dtrain__hub_way(hub, handshake->peer, &lane->stream, way, sizeof way);
        dtrain__hub_note(hub, "the transport is shm, but between rank %d and rank %d (%s) there is %s", hub->rank,
                         handshake->peer, hub->members[handshake->peer].name, way);
    }
    channel->attend |= lane->stream.again > 0;
    lane->links = (handshake->peer_links > lane->links ? handshake->peer_links : lane->links) + 1;
    lane->wanted = 0;
    lane->down_ns = lane->wait_ns = 0;
    dtrain__hub_unsay(hub, &hub->members[handshake->peer].trouble);
}

static void dtrain__hub_adopt_control(dtrain__hub *hub, dtrain__handshake *handshake)
{
    dtrain__member *member = &hub->members[handshake->peer];
    dtrain_status status = dtrain__hub_resume(hub, &member->control, handshake, 0);
    if (status == DTRAIN_ERR_MEMORY)
        dtrain__hub_short_of_memory(hub);
    if (status != DTRAIN_OK) {
        dtrain__hub_lost(hub, handshake->peer,
                         status == DTRAIN_ERR_MEMORY
                             ? "there is no memory to seal the connection to it"
                             : "its connection came back, but more data was lost than can be sent again");
        return;
    }
    member->expected = member->closed = 0;
    member->wait_ns = 0;
    member->heard_ns = dtrain__os_now_ns();
    dtrain__hub_say(hub, &member->job, handshake->job);
    if (!hub->formed && !handshake->initiator)
        dtrain__hub_say(hub, &member->name, handshake->name);
}

/* Admits a proved peer, or refuses it with a text. */
DTRAIN__PRINTF(4, 5)
static void dtrain__hub_answer(const dtrain__hub *hub, dtrain__handshake *handshake, dtrain_status status,
                               const char *format, ...)
{
    char text[DTRAIN__VERDICT_TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__handshake_answer(handshake, &hub->keys, status, text);
}

/* A proved peer wants its control connection, to join or to resume. */
static void dtrain__hub_admit_control(dtrain__hub *hub, dtrain__handshake *handshake)
{
    dtrain__member *member = &hub->members[handshake->peer];
    int ours = hub->formed && memcmp(handshake->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) == 0;
    int again = ours && member->expected;
    if (ours && hub->reconnect_ns > 0 && member->gone == DTRAIN__PRESENT && member->control.fd >= 0) {
        dtrain__stream_cut(&member->control); /* the peer noticed the reset first */
        member->down_ns = dtrain__os_now_ns();
        member->expected = again = 1;
    }
    if (again) {
        handshake->received = member->control.received;
        dtrain__hub_answer(hub, handshake, DTRAIN_OK, "%s", "");
    } else if (hub->formed) { /* perhaps the previous group, about to end: the peer may try again */
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_ABORTED,
                           "its group is complete and runs; give each job a root of its own");
    } else if (member->control.fd >= 0 && member->joined) {
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_MISMATCH,
                           "two processes say they are rank %d: %.60s came first, now %.60s; give each process a rank "
                           "of its own",
                           handshake->peer, member->name, handshake->peer_name);
    } else if (member->control.fd >= 0 && strcmp(member->name, handshake->name) != 0) {
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_ABORTED, "another process is joining as rank %d",
                           handshake->peer);
    } else { /* if that process was admitted before, it has not heard of that, and tries again */
        dtrain__stream_cut(&member->control);
        member->in.bytes = 0;
        member->control.sent = member->control.received = handshake->received = handshake->peer_received = 0;
        dtrain__hub_answer(hub, handshake, DTRAIN_OK, "%s", "");
    }
}

/* Whether this rank keeps to its own connection when the peer's comes, as the lower one of the two. It does once its
 * proof is on the way, which the peer admits in any case. Until then its connection may never come about, as behind a
 * firewall: the peer's stays, and the peer cannot have admitted this one. */
static int dtrain__hub_keeps_own(const dtrain__hub *hub, const dtrain__handshake *own, int peer)
{
    return own != NULL && own->state == DTRAIN__HANDSHAKE_VERDICT && hub->rank < peer;
}

/* A proved peer wants a control connection because one of the two leads, now that rank 0 is gone. */
static void dtrain__hub_admit_call(dtrain__hub *hub, dtrain__handshake *handshake)
{
    dtrain__member *member = &hub->members[handshake->peer];
    if (memcmp(handshake->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) != 0) {
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_DENIED, "this is another run's group");
        return;
    }
    if ((member->control.fd >= 0 && hub->reconnect_ns == 0) ||
        dtrain__hub_keeps_own(hub, member->handshake, handshake->peer)) {
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_ABORTED, "the connection is there already");
        return;
    }
    dtrain__hub_free_handshake(hub, &member->handshake);
    dtrain__stream_cut(&member->control);
    handshake->received = member->control.received;
    dtrain__hub_answer(hub, handshake, DTRAIN_OK, "%s", "");
}

static void dtrain__hub_admit_data(dtrain__hub *hub, dtrain__handshake *handshake)
{
    dtrain__channel *channel = dtrain__hub_channel(hub, handshake->channel);
    int rank = dtrain__seat_rank(&channel->seat, handshake->peer);
    dtrain__lane *lane;
    if (memcmp(handshake->hello + 32, hub->keys.run, DTRAIN__RUN_BYTES) != 0 || handshake->lane < 0 ||
        handshake->lane >= hub->connections || rank < 0 || channel->lanes == NULL) {
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_DENIED, "this is another run's group");
        return;
    }
    lane = &channel->peers[rank].lanes[handshake->lane];
    if (dtrain__hub_keeps_own(hub, lane->handshake, handshake->peer) || (lane->links > 0 && hub->reconnect_ns == 0) ||
        handshake->peer_links <
            lane->links) { /* another connection was made meanwhile; the peer may count one too few */
        handshake->received = lane->links;
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_ABORTED, "the connection is there already");
        return;
    }
    dtrain__handshake *before = dtrain__channel_admitted(channel, handshake->peer, handshake->lane);
    if (before != NULL) /* the peer has given that one up */
        dtrain__handshake_close(before);
    dtrain__hub_free_handshake(hub, &lane->handshake);
    if (lane->stream.fd >= 0) /* the peer noticed the reset first; the position that it is told must not change from
                               * here on */
        lane->down_ns = dtrain__os_now_ns();
    lane->wanted |= lane->links > 0;
    channel->attend = 1;
    dtrain__stream_cut(&lane->stream);
    handshake->received = lane->stream.received;
    if (dtrain__hub_shares(hub, handshake->peer) && !dtrain__handshake_sealed(handshake, &hub->keys))
        handshake->page = dtrain__shm_open(handshake->proof + DTRAIN__PROOF_OFFER, &handshake->ring_bytes);
    dtrain__hub_answer(hub, handshake, DTRAIN_OK, "%s", "");
}

/* Whether the peer wants to join, and its launcher and this rank's name different jobs. */
static int dtrain__hub_other_job(const dtrain__hub *hub, const dtrain__handshake *handshake)
{
    return hub->rank == 0 && handshake->purpose == DTRAIN__PURPOSE_CONTROL && handshake->job[0] != 0 &&
           hub->keys.job[0] != 0 && strcmp(handshake->job, hub->keys.job) != 0;
}

/* The part of a job's id that fits into a verdict: its end, which differs between jobs of one host and launcher. */
static const char *dtrain__hub_job_text(const char *job)
{
    size_t length = strlen(job);
    return length > 36 ? job + length - 36 : job;
}

/* The peer has proved that it holds the token. Only now its hello is looked at. */
static void dtrain__hub_admit(dtrain__hub *hub, dtrain__handshake *handshake)
{
    int peer = handshake->peer;
    unsigned wanted = (unsigned)dtrain__get_le(handshake->hello + 16, 4);
    if (dtrain__hub_other_job(hub, handshake))
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_DENIED,
                           "rank %d (%.40s) is of job %.36s, rank 0 (%.40s) of job %.36s: give each job a root of its "
                           "own, such as another port",
                           peer, handshake->name, dtrain__hub_job_text(handshake->job), hub->keys.name,
                           dtrain__hub_job_text(hub->keys.job));
    else if (handshake->peer_world != hub->size)
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_MISMATCH,
                           "rank %d at %.80s expects a world of %d ranks, rank %d one of %d; give every process "
                           "the same world size",
                           peer, handshake->peer_name, handshake->peer_world, hub->rank, hub->size);
    else if (peer < 0 || peer >= hub->size || peer == hub->rank || wanted != (unsigned)hub->rank)
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_MISMATCH,
                           "rank %d at %.80s wants rank %u, but this is rank %d of %d; check the addresses", peer,
                           handshake->peer_name, wanted, hub->rank, hub->size);
    else if (dtrain__handshake_disagrees(handshake))
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_MISMATCH,
                           "rank %d at %.80s has DTRAIN_SECURE or desc.secure %s, rank %d has it %s; give every rank "
                           "the same",
                           peer, handshake->peer_name, hub->keys.secure > 0 ? "off" : "on", hub->rank,
                           hub->keys.secure > 0 ? "on" : "off");
    else if (hub->formed && hub->members[peer].gone == DTRAIN__LOST)
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_PEER_LOST, "%.240s", hub->members[peer].why);
    else if (handshake->purpose == DTRAIN__PURPOSE_CONTROL && hub->rank == 0)
        dtrain__hub_admit_control(hub, handshake);
    else if (handshake->purpose == DTRAIN__PURPOSE_CONTROL && hub->formed)
        dtrain__hub_admit_call(hub, handshake);
    else if (handshake->purpose == DTRAIN__PURPOSE_DATA)
        dtrain__hub_admit_data(hub, handshake);
    else
        dtrain__hub_answer(hub, handshake, DTRAIN_ERR_MISMATCH, "only rank 0 takes control connections");
}

/* An incoming connection is open: takes it, unless its channel has left meanwhile. */
static void dtrain__hub_adopt(dtrain__hub *hub, dtrain__handshake *handshake)
{
    dtrain__channel *channel = dtrain__hub_channel(hub, handshake->channel);
    int rank = channel != NULL ? dtrain__seat_rank(&channel->seat, handshake->peer) : -1;
    if (handshake->purpose == DTRAIN__PURPOSE_CONTROL)
        dtrain__hub_adopt_control(hub, handshake);
    else if (rank >= 0)
        dtrain__hub_adopt_data(channel, rank, handshake);
}

/* Logs whom this rank refused, at most one line a second. */
static void dtrain__hub_turned_away(dtrain__hub *hub, dtrain_status status, const char *text, int64_t now)
{
    if (hub->formed && status != DTRAIN_ERR_DENIED)
        return;
    snprintf(hub->refused, sizeof hub->refused, "%.440s", text);
    if (now - hub->told_ns > 1000000000) {
        hub->told_ns = now;
        dtrain__hub_note(hub, "rank %d: %s", hub->rank, text);
    }
}

/* Advances one incoming connection. Returns 0 when it is finished. */
static int dtrain__hub_step_handshake(dtrain__hub *hub, dtrain__handshake *handshake, int64_t now)
{
    unsigned char last;
    dtrain__handshake_state before = handshake->state;
    dtrain__handshake_step(handshake, &hub->keys);
    if (handshake->state != before && handshake->state != DTRAIN__HANDSHAKE_CLOSED)
        dtrain__hub_make_room(hub, handshake);
    if (handshake->state == DTRAIN__HANDSHAKE_PROVED && handshake->purpose == DTRAIN__PURPOSE_DATA &&
        (!hub->formed || dtrain__hub_channel(hub, handshake->channel) == NULL))
        /* a peer may have the table or the group before this rank does. Its handshake then waits until the peer gives
         * up; it sends nothing before that */
        return !dtrain__hub_late(hub, handshake, now) && dtrain__os_recv(handshake->fd, &last, 1) == 0;
    if (handshake->state == DTRAIN__HANDSHAKE_PROVED)
        dtrain__hub_admit(hub, handshake);
    int open = dtrain__hub_advance(hub, handshake, now);
    if (open > 0 && handshake->error.status == DTRAIN_OK) {
        dtrain__hub_adopt(hub, handshake);
        dtrain__hub_tell(hub);
    } else if (open > 0) {
        dtrain__hub_turned_away(hub, handshake->error.status, handshake->error.text, now);
    }
    return open == 0;
}

static void dtrain__hub_step_handshakes(dtrain__hub *hub, int64_t now)
{
    for (dtrain__handshake **at = &hub->handshakes, *handshake; (handshake = *at) != NULL;) {
        if (dtrain__hub_step_handshake(hub, handshake, now)) {
            at = &handshake->next;
            continue;
        }
        *at = handshake->next;
        dtrain__hub_free_handshake(hub, &handshake);
    }
}

/* Takes a listener's waiting connections, and reads what has come over them already. A stranger holds one handshake for
 * a few seconds. */
static void dtrain__hub_accept(dtrain__hub *hub, int listener, int64_t now)
{
    for (int i = 0; now >= hub->accept_ns && i < DTRAIN__HANDSHAKES; i++) {
        dtrain__address peer;
        dtrain__handshake *handshake, **last = &hub->handshakes;
        int fd, error = dtrain__net_accept(listener, &fd, &peer);
        if (error == EAGAIN)
            return;
        if (error != 0) {
            hub->accept_ns = now + 100000000; /* most often out of descriptors: look again in a while */
            if (hub->full_ns == 0 || now - hub->full_ns > 60000000000) {
                char why[DTRAIN__FILES_TEXT];
                hub->full_ns = now;
                dtrain__hub_note(hub, "rank %d cannot accept a connection: %s", hub->rank,
                                 dtrain__net_refused(error, why));
            }
            return;
        }
        if (!dtrain__hub_trusts(hub, fd, &hub->listening)) {
            dtrain__os_hang_up(fd);
            dtrain__hub_turned_away(
                hub, DTRAIN_ERR_DENIED,
                "another user's process came, and there is no token: give every rank the same DTRAIN_TOKEN", now);
            continue;
        }
        handshake = dtrain__hub_new_handshake(hub, &peer);
        if (handshake == NULL) {
            dtrain__os_hang_up(fd);
            snprintf(hub->refused, sizeof hub->refused, "%s: no memory for its connection",
                     dtrain__net_text(&peer).text);
            return;
        }
        handshake->fd = fd;
        handshake->from = dtrain__net_host(&peer);
        handshake->expires_ns = hub->polled_ns + DTRAIN__HANDSHAKE_NS;
        handshake->state = DTRAIN__HANDSHAKE_HELLO;
        while (*last != NULL)
            last = &(*last)->next;
        *last = handshake;
        dtrain__handshake_step(handshake, &hub->keys);
        if (handshake->state != DTRAIN__HANDSHAKE_CLOSED)
            dtrain__hub_make_room(hub, handshake);
        dtrain__hub_kick(hub); /* the next turn deals with what has been read */
    }
}

#endif
