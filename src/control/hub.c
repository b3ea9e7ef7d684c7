/* ---- >>hub ----
 * The control plane of one process, shared by the groups of one world. Every rank keeps one connection to the leader,
 * at first rank 0. Over it the world forms, and ranks learn that members live, and who is lost and why. Data
 * connections are accepted and made here, then handed to the lanes of their channel. A channel is one group's share:
 * its members, its lanes to them, and its own end. The leader relays what concerns a channel to the channel's members,
 * so all hear the same first cause. A lost member ends every channel that has it, and no other.
 *
 * Ranks are the world's. A channel counts its own ranks in two places: `about` in frames, and the index of its peers.
 *
 * Whoever holds step_mutex may run the hub. That is the service thread. Without one it is a caller that waits for data
 * and adds its descriptors to the same poll(). `mutex` guards everything shared, and nobody holds it while waiting. */
#ifndef DTRAIN__HUB
#define DTRAIN__HUB
#include "../base/memory.c"
#include "../wire/admission.c"
#include "../wire/stream.c"
#include "consent.c"

#define DTRAIN__HANDSHAKES 64 /* strangers' connections for which there is room beside those of all ranks */
/* of polling, for a peer to prove itself */
#define DTRAIN__HANDSHAKE_NS DTRAIN__TUNED(handshake_ns, (int64_t)5000000000)
#define DTRAIN__STRIPE ((size_t)1 << 18) /* bytes of a stream that each of several lanes carries in turn */
#define DTRAIN__HANDOVER_NS 1000000000   /* that the next leader waits after a leader has left */
#define DTRAIN__CALL_NS 300000000        /* for a new leader to call the others; then they call it */
#define DTRAIN__FRAME_BYTES ((size_t)1 << 18)
#define DTRAIN__FRAME_MEMBER ((size_t)512)    /* and for each rank of the world, as some frames list all */
#define DTRAIN__QUEUE_BYTES ((size_t)1 << 20) /* waiting for a member: up to here the leader reads its requests */
#define DTRAIN__QUEUE_MOST (8 * DTRAIN__QUEUE_BYTES) /* from here on, what others say to it is dropped */
#define DTRAIN__WHY_BYTES 480
#define DTRAIN__LAST_BYTES 192
#define DTRAIN__HEARD (2 * DTRAIN__LAST_CHAIN) /* ranks of which one that does not lead keeps what they do */

/* One connection's worth of data to and from a peer. */
typedef struct dtrain__lane {
    dtrain__stream stream;
    dtrain__handshake *handshake;       /* a connection that this rank is making */
    int wanted;                         /* somebody waits for it */
    uint64_t links;                     /* how many connections it has had */
    int why;                            /* why the last one ended, as an errno; 0: it was closed */
    int64_t retry_ns, wait_ns, down_ns; /* it is tried again at retry_ns; the last wait for that was wait_ns */
} dtrain__lane;

/* One rank of a channel, as this rank sees it. */
typedef struct dtrain__peer {
    int awaits;              /* POLLIN, POLLOUT: what the service thread waits to move */
    uint64_t sent, received; /* bytes of data to and from it, over all lanes */
    dtrain__lane *lanes;     /* hub->connections of them; NULL until the world has formed */
} dtrain__peer;

typedef struct dtrain__hub dtrain__hub;

typedef struct dtrain__channel {
    dtrain__seat seat; /* first; written with the hub's mutex held */
    dtrain__hub *hub;
    dtrain__peer *peers; /* one for each member */
    dtrain__lane *lanes; /* of all peers */
    int attend;          /* some lane needs a step */
    int wake[2];         /* a pipe that wakes the waiting caller */
    uint32_t waiting;
    uint32_t dozing;             /* the service thread waits for the doorbell, which is `wake` */
    int awaiting;                /* some peer has a nonzero awaits */
    struct dtrain__arena *arena; /* NULL: the members share no memory */
    void (*arena_free)(struct dtrain__arena *arena);
    dtrain__tell last; /* writes what this rank does; may be NULL */
    void *last_user;
} dtrain__channel;

/* Lines for the log, which may block: whoever steps writes them after unlocking the mutex. */
typedef struct dtrain__notes {
    int count, sealed, joined, address; /* log that traffic is sealed, and who came; tell where rank 0 listens */
    char text[4][DTRAIN__ERROR_BYTES];
} dtrain__notes;

/* What a rank was doing when it was last heard. Only the owners of the ends understand the bytes. */
typedef struct dtrain__last_heard {
    unsigned char data[DTRAIN__LAST_BYTES];
    size_t bytes;
    int awaits; /* the rank that it waits for, or -1 */
    int64_t heard_ns;
    int rank;
} dtrain__last_heard;

typedef struct dtrain__member {
    /* texts, made when there is something to say: see hub_say() */
    char *address; /* "host:port", "unix:/path", or ":port" on the host of rank 0; empty: it is rank 0, or never listens
                    */
    char *name;    /* "pid 4711 (train) on alpha" */
    char *job;     /* on rank 0: the job that it came with */
    char *why;     /* why it left or is lost; may be empty */
    char *trouble; /* why the last try to connect to it for data failed */
    uint64_t host; /* the same number on all ranks of a host */
    uint64_t process, began; /* its number in its system, and when it began, by that system's count */
    int known;               /* this system knows the process by these */
    int joined, expected;    /* expected: its control connection may come back */
    int gone;                /* DTRAIN__PRESENT, DTRAIN__LEFT or DTRAIN__LOST */
    int closed;              /* it is lost, and a unix socket of its was closed, as only its own process can */
    int doubted;             /* it has left, unless its network says so in its place */
    int held;                /* a frame of it waits in `in`: see hub_hears() */
    dtrain__stream control;  /* the leader has one to each rank, the others one to the leader */
    dtrain__bytes in, out;
    size_t table_at;  /* bytes of `out` that go before what is due of hub->table */
    size_t table_due; /* bytes of hub->table to send */
    int64_t heard_ns, down_ns;
    int64_t told_ns;            /* when the system took the last bytes for it */
    int64_t wants_ns, every_ns; /* its heartbeat_ms, 0: none, and how often its heartbeats come; before the first, 0 */
    dtrain__handshake *handshake; /* a control connection that this rank is making */
    int64_t call_ns, wait_ns;     /* it is tried again at call_ns; the last wait for that was wait_ns */
    int poll_index;
    dtrain__last_heard *last; /* NULL: never heard of */
} dtrain__member;

struct dtrain__hub {
    dtrain__origin origin; /* first: see socket_step() */
    dtrain__council council;
    dtrain_allocator *allocator, own;
    dtrain__keys keys;
    int rank, size, connections, insecure, formed;
    int transport;     /* DTRAIN__TRANSPORT_ANY ... */
    int polls;         /* progress is by poll */
    int crowded;       /* the ranks of this host outnumber its processors */
    int leader;        /* the lowest rank that is not gone */
    int elected;       /* the leader is new */
    int handed;        /* the leader before it has left of its own will */
    int told_sealed;   /* the log says so already */
    int elsewhere;     /* this is rank 0, and no address of the root is of this host */
    int leaving;       /* this process has said goodbye */
    uint32_t serviced; /* a service thread runs it */
    char root[DTRAIN__ADDRESS_BYTES], listen_on[64], fingerprint[DTRAIN__FINGERPRINT_BYTES], believed[400];
    int64_t heartbeat_ns, reconnect_ns;
    int64_t period_ns;   /* how often members are looked at */
    int64_t rest_ns;     /* without other frames, how often this rank's heartbeats go; to some members more often */
    int64_t patience_ns; /* the largest of the group's limits, for the answer of a member that may not poll */
    dtrain__address root_addresses[DTRAIN__MAX_ADDRESSES], reached, listening;
    int root_count, root_turn,
        root_named;           /* root_turn: tries since the look-up; root_named: it may be looked up again */
    dtrain__look_up *look_up; /* under way; NULL: none */
    int listen_fd;            /* rank 0: what the launcher left; -1: nothing */
    void (*on_address)(void *user, const char *address);
    void *on_address_user;
    int64_t look_ns;                                      /* when the next may begin */
    int listeners[DTRAIN__MAX_ADDRESSES], listener_count; /* the first is at `listening` */
    dtrain__error root_error; /* why a try to reach rank 0 failed: the last that was refused, else the last */
    int64_t complete_ns;      /* since when every answer of rank 0 is that its group is complete; 0: it is not */
    dtrain__os_mutex step_mutex, mutex;
    int kick[2]; /* a pipe that wakes whoever steps */
    uint32_t stepping, kicked;
    dtrain__handshake *handshakes; /* of connections that come in */
    dtrain__member *members;
    dtrain__bytes table; /* on rank 0: the frame that tells each rank where all are */
    char nothing[1];     /* all empty texts of members */
    dtrain__last_heard heard[DTRAIN__HEARD];
    struct pollfd *fds;
    int64_t late_ns, late_at_ns;                              /* by how much a heartbeat was late, and when */
    int64_t beat_ns, stepped_ns, accept_ns, told_ns, full_ns; /* full_ns: when the log last told of descriptors */
    int64_t polled_ns;                                        /* a clock that runs only while this rank polls */
    int64_t made_ns;                                          /* the look that has made memory for a connection */
    int suspect;                     /* the rank that rank 0 has not heard for longest; -1: none */
    int64_t suspect_ns;              /* for how long, when that was last heard */
    char refused[DTRAIN__WHY_BYTES]; /* the last process that was refused while the group formed */
    dtrain__notes notes;
};

/* The hub's channels, one after the other; NULL at the end. */
static dtrain__channel *dtrain__channel_first(const dtrain__hub *hub)
{
    return (dtrain__channel *)(void *)hub->council.seats;
}

static dtrain__channel *dtrain__channel_next(const dtrain__channel *channel)
{
    return (dtrain__channel *)(void *)channel->seat.next;
}

static dtrain__channel *dtrain__hub_channel(const dtrain__hub *hub, uint64_t id)
{
    return (dtrain__channel *)(void *)dtrain__council_seat(&hub->council, id);
}

/* Tells callers that something has come that they may wait for. The caller holds the mutex. */
static void dtrain__hub_tell(dtrain__hub *hub)
{
    DTRAIN__ATOMIC_ADD(&hub->council.news, 1, SEQ_CST);
    for (dtrain__channel *channel = dtrain__channel_first(hub); channel != NULL;
         channel = dtrain__channel_next(channel))
        if (DTRAIN__ATOMIC_LOAD(&channel->waiting, SEQ_CST))
            dtrain__os_poke(channel->wake[1]);
}

/* Asks whoever steps to look again. A thread that is about to step will look anyway. */
static DTRAIN__NOINLINE void dtrain__hub_kick(dtrain__hub *hub)
{
    DTRAIN__ATOMIC_STORE(&hub->kicked, 1, SEQ_CST);
    if (DTRAIN__ATOMIC_LOAD(&hub->stepping, SEQ_CST))
        dtrain__os_poke(hub->kick[1]);
}

/* Empties the pipe that wakes a caller, and, if it is awaited, the service thread. Each leaves the other a byte. */
static void dtrain__channel_awake(dtrain__channel *channel, int service)
{
    dtrain__os_drain(channel->wake[0]);
    if (service && DTRAIN__ATOMIC_LOAD(&channel->waiting, SEQ_CST))
        dtrain__os_poke(channel->wake[1]);
    if (!service && DTRAIN__ATOMIC_LOAD(&channel->dozing, SEQ_CST))
        dtrain__hub_kick(channel->hub);
}

/* Queues a warning for the log; the caller holds the mutex. The last of many at once are dropped. */
DTRAIN__PRINTF(2, 3) static void dtrain__hub_note(dtrain__hub *hub, const char *format, ...)
{
    va_list arguments;
    if (hub->notes.count == (int)(sizeof hub->notes.text / sizeof hub->notes.text[0]))
        return;
    va_start(arguments, format);
    vsnprintf(hub->notes.text[hub->notes.count++], DTRAIN__ERROR_BYTES, format, arguments);
    va_end(arguments);
}

/* This rank has no memory to continue. It says so rather than fall silent. */
static void dtrain__hub_short_of_memory(dtrain__hub *hub)
{
    dtrain__error cause;
    dtrain__membership_because(&cause, DTRAIN_ERR_MEMORY, "rank %d has no memory for its control messages", hub->rank);
    for (dtrain__seat *seat = hub->council.seats; seat != NULL; seat = seat->next)
        dtrain__seat_end(seat, seat->rank, &cause);
}

static void dtrain__hub_unsay(dtrain__hub *hub, char **text)
{
    if (*text != hub->nothing)
        dtrain__free(hub->allocator, *text);
    *text = hub->nothing;
}

/* Begins with a member of whom nothing is known. */
static void dtrain__hub_expect(dtrain__hub *hub, dtrain__member *member)
{
    member->control.fd = -1;
    member->address = member->name = member->job = member->why = member->trouble = hub->nothing;
}

/* Replaces a text of a member. An empty one takes no memory. Returns 0 if there is no memory: then it is empty. */
static int dtrain__hub_say(dtrain__hub *hub, char **text, const char *said)
{
    size_t bytes = strlen(said) + 1;
    char *own = bytes > 1 ? (char *)dtrain__alloc(hub->allocator, bytes) : NULL;
    if (own != NULL)
        memcpy(own, said, bytes);
    dtrain__hub_unsay(hub, text);
    *text = own != NULL ? own : hub->nothing;
    return own != NULL || bytes == 1;
}

/* Takes a text of a member, of less than `capacity` bytes. */
static int dtrain__take_said(dtrain__hub *hub, dtrain__reader *reader, char **text, size_t capacity)
{
    char said[DTRAIN__ADDRESS_BYTES];
    if (!dtrain__take_text(reader, 1, said, capacity))
        return 0;
    if (!dtrain__hub_say(hub, text, said))
        dtrain__hub_short_of_memory(hub);
    return 1;
}

/* Takes a member's address: numeric, as no name is looked up here, ":port", a unix socket's path, or nothing. */
static int dtrain__take_address(dtrain__hub *hub, dtrain__reader *reader, dtrain__member *member)
{
    dtrain__address address;
    return dtrain__take_said(hub, reader, &member->address, DTRAIN__ADDRESS_BYTES / 2) &&
           (member->address[0] == 0 || dtrain__net_parse(member->address, &address) == DTRAIN_OK);
}

/* What a rank was last heard to do. A leader keeps that of all, others that of the few of which they heard last. So a
 * warm loop allocates nothing. */
static dtrain__last_heard *dtrain__hub_heard(dtrain__hub *hub, int rank)
{
    dtrain__last_heard *oldest = hub->heard;
    if (hub->members[rank].last != NULL)
        return hub->members[rank].last;
    for (int i = 1; i < DTRAIN__HEARD; i++)
        if (hub->heard[i].heard_ns < oldest->heard_ns)
            oldest = &hub->heard[i];
    if (hub->members[oldest->rank].last == oldest)
        hub->members[oldest->rank].last = NULL;
    memset(oldest, 0, sizeof *oldest);
    oldest->rank = rank;
    oldest->awaits = -1;
    return hub->members[rank].last = oldest;
}

/* This rank leads: makes room for what each other one does, and for heartbeats to it. */
static void dtrain__hub_hear_all(dtrain__hub *hub)
{
    int short_of = 0;
    for (int rank = 0; rank < hub->size; rank++) {
        dtrain__last_heard **last = &hub->members[rank].last;
        if (*last == NULL && (*last = (dtrain__last_heard *)dtrain__alloc(hub->allocator, sizeof **last)) != NULL)
            (*last)->awaits = -1;
        short_of |= *last == NULL || !dtrain__bytes_room(hub->allocator, &hub->members[rank].out, 1);
    }
    if (short_of)
        dtrain__hub_short_of_memory(hub);
}

/* The bytes that wait to be sent to a member. */
static size_t dtrain__hub_due(const dtrain__member *member)
{
    return member->table_due + member->out.bytes;
}

/* Whether a rank never listens, as its listen_on says. */
static int dtrain__hub_is_deaf(const dtrain__hub *hub, int rank)
{
    return rank != 0 && hub->members[rank].address[0] == 0;
}

/* Appends to a frame. Once memory is short nothing more goes in, and frame_close tells. */
static void dtrain__give_bytes(dtrain__hub *hub, dtrain__bytes *frame, const void *data, size_t bytes)
{
    if (bytes == 0 || frame->short_of || !dtrain__bytes_room(hub->allocator, frame, bytes))
        return;
    memcpy(frame->data + frame->bytes, data, bytes);
    frame->bytes += bytes;
}

static void dtrain__give(dtrain__hub *hub, dtrain__bytes *frame, uint64_t value, int bytes)
{
    unsigned char raw[8];
    dtrain__put_le(raw, value, bytes);
    dtrain__give_bytes(hub, frame, raw, (size_t)bytes);
}

static DTRAIN__NOINLINE void dtrain__give_text(dtrain__hub *hub, dtrain__bytes *frame, int length_bytes,
                                               const char *text)
{
    dtrain__give(hub, frame, strlen(text), length_bytes);
    dtrain__give_bytes(hub, frame, text, strlen(text));
}

/* Opens a frame at the end of a member's output and returns where it begins. A member that does not read gets no more
 * than DTRAIN__QUEUE_MOST. News of ranks that are gone always fits: each rank goes once. */
static size_t dtrain__frame_open(dtrain__hub *hub, dtrain__member *to, int type)
{
    size_t begin = to->out.bytes;
    to->out.short_of = begin > DTRAIN__QUEUE_MOST && type != DTRAIN__FRAME_LOST && type != DTRAIN__FRAME_GONE;
    dtrain__give(hub, &to->out, 0, 4);
    dtrain__give(hub, &to->out, (uint64_t)type, 2);
    return begin;
}

/* Returns 0 if there was no room. Then nothing of the frame stays, as a part of one would be malformed. */
static DTRAIN__NOINLINE int dtrain__frame_close(dtrain__member *to, size_t begin)
{
    if (to->out.short_of) {
        to->out.bytes = begin;
        return 0;
    }
    dtrain__put_le(to->out.data + begin, to->out.bytes - begin - 6, 4);
    return 1;
}

/* What happened to a rank, and to which channel. `about` is a rank of the channel. In frames LOST and GONE, which have
 * no channel, it is a rank of the world. */
typedef struct dtrain__reason {
    int type;
    uint64_t channel;
    int about;
    dtrain_status status;
    const char *text;
    uint64_t calls; /* in frames BYE */
} dtrain__reason;

/* Whether whoever answers at the root's address has refused this rank, or what it said was wrong. */
static int dtrain__hub_root_denied(const dtrain__hub *hub)
{
    return hub->root_error.status == DTRAIN_ERR_DENIED || hub->root_error.status == DTRAIN_ERR_MISMATCH;
}

static int dtrain__hub_leads(const dtrain__hub *hub)
{
    return hub->rank == hub->leader;
}

/* Whether this rank keeps a control connection to `rank`: the leader to all ranks, the others to the leader. */
static int dtrain__hub_linked(const dtrain__hub *hub, int rank)
{
    return rank != hub->rank && (dtrain__hub_leads(hub) || rank == hub->leader);
}

/* Sends a reason to `to`, with the channel's members if `to` is to relay it. */
static void dtrain__frame_reason(dtrain__hub *hub, int to, const dtrain__reason *reason, const dtrain__channel *channel)
{
    dtrain__member *member = &hub->members[to];
    int count = channel != NULL && channel->seat.id != 0 ? channel->seat.size : 0;
    if (!dtrain__hub_linked(hub, to) || !member->joined || member->gone != DTRAIN__PRESENT)
        return;
    size_t begin = dtrain__frame_open(hub, member, reason->type);
    dtrain__give(hub, &member->out, reason->channel, 8);
    dtrain__give(hub, &member->out, (uint64_t)reason->about, 4);
    dtrain__give(hub, &member->out, (uint64_t)reason->status, 2);
    dtrain__give_text(hub, &member->out, 2, reason->text);
    dtrain__give(hub, &member->out, reason->calls, 8);
    dtrain__give(hub, &member->out, (uint64_t)count, 4);
    for (int i = 0; i < count; i++)
        dtrain__give(hub, &member->out, (uint64_t)dtrain__seat_world(&channel->seat, i), 4);
    dtrain__frame_close(member, begin);
}

/* Tells all ranks but `except`, through the leader. */
static DTRAIN__NOINLINE void dtrain__hub_relay(dtrain__hub *hub, int except, const dtrain__reason *reason)
{
    for (int peer = 0; peer < hub->size; peer++)
        if (peer != except)
            dtrain__frame_reason(hub, peer, reason, NULL);
}

/* Tells the channel's members, through the leader. */
static void dtrain__channel_relay(const dtrain__channel *channel, const dtrain__reason *reason)
{
    dtrain__hub *hub = channel->hub;
    if (!dtrain__hub_leads(hub))
        dtrain__frame_reason(hub, hub->leader, reason, channel);
    for (int i = 0; dtrain__hub_leads(hub) && i < channel->seat.size; i++)
        dtrain__frame_reason(hub, dtrain__seat_world(&channel->seat, i), reason, NULL);
}

/* The lane for the next bytes to or from a peer, and how many bytes it takes. */
static dtrain__lane *dtrain__channel_lane(dtrain__channel *channel, int rank, int sending, size_t *room)
{
    dtrain__peer *peer = &channel->peers[rank];
    uint64_t at = sending ? peer->sent : peer->received;
    int lanes = channel->hub->connections;
    *room = lanes == 1 ? SIZE_MAX : DTRAIN__STRIPE - (size_t)(at % DTRAIN__STRIPE);
    return &peer->lanes[at / DTRAIN__STRIPE % (uint64_t)lanes];
}

/* A connection for a lane that this rank has admitted but not taken: its verdict is still to be sent. */
static dtrain__handshake *dtrain__channel_admitted(const dtrain__channel *channel, int world, int lane)
{
    dtrain__handshake *handshake = channel->hub->handshakes;
    while (handshake != NULL && (handshake->state != DTRAIN__HANDSHAKE_OPEN || handshake->error.status != DTRAIN_OK ||
                                 handshake->purpose != DTRAIN__PURPOSE_DATA || handshake->channel != channel->seat.id ||
                                 handshake->peer != world || handshake->lane != lane))
        handshake = handshake->next;
    return handshake;
}

/* Finds the leader: the lowest rank that is not gone. The successor of a rank that left waits a while before it takes
 * over, as the others may be about to leave as well. */
static void dtrain__hub_elect(dtrain__hub *hub, int gone)
{
    int64_t now = dtrain__os_now_ns(), begin = now + (gone == DTRAIN__LEFT ? DTRAIN__HANDOVER_NS : 0);
    int leader = dtrain__council_leader(&hub->council);
    if (leader == hub->leader)
        return;
    hub->leader = leader;
    hub->elected = 1;
    hub->handed = gone == DTRAIN__LEFT;
    for (int rank = 0; rank < hub->size; rank++) {
        hub->members[rank].heard_ns = begin;
        hub->members[rank].call_ns = dtrain__hub_leads(hub) ? begin : begin + DTRAIN__CALL_NS;
        hub->members[rank].held = 0;
    }
    if (dtrain__hub_leads(hub))
        dtrain__hub_hear_all(hub);
    dtrain__hub_kick(hub); /* for frames that were held */
    for (int rank = 0; dtrain__hub_leads(hub) && rank < hub->size; rank++) {
        const dtrain__member *member = &hub->members[rank];
        dtrain_status status = member->closed ? DTRAIN_ERR_PEER_LOST : DTRAIN_ERR_TIMEOUT;
        dtrain__reason reason = {DTRAIN__FRAME_LOST, 0, rank, status, member->why, 0};
        if (member->gone == DTRAIN__LOST) /* before anything else: nobody may blame a rank that left because of this
                                           * loss */
            dtrain__hub_relay(hub, -1, &reason);
    }
}

static void dtrain__hub_marks(dtrain__seat *seat, int world)
{
    const dtrain__member *member = &((dtrain__hub *)seat->council->self)->members[world];
    int rank = dtrain__seat_rank(seat, world);
    if (member->gone == DTRAIN__LOST)
        dtrain__seat_lost(seat, world, DTRAIN_ERR_PEER_LOST, member->name[0] != 0 ? member->name : "unknown process",
                          member->why);
    else if (rank >= 0)
        dtrain__seat_left(seat, rank, member->why, member->why[0] != 0 ? UINT64_MAX : 0);
}

/* A member is gone, of its own will or not. Tells every channel that has it. A rank that left without a reason has said
 * so in each of its channels before. */
static void dtrain__hub_gone(dtrain__hub *hub, int rank, int gone, const char *why)
{
    dtrain__member *member = &hub->members[rank];
    if (member->gone != DTRAIN__PRESENT)
        return;
    member->gone = gone;
    member->expected = 0;
    dtrain__hub_say(hub, &member->why, why);
    for (dtrain__seat *seat = hub->council.seats; seat != NULL; seat = seat->next)
        dtrain__hub_marks(seat, rank);
    if (hub->formed && rank == hub->leader)
        dtrain__hub_elect(hub, gone);
    dtrain__hub_tell(hub);
}

/* A member is gone without a word. It is told so in case it was only stopped or cut off, or it would blame this rank.
 */
static void dtrain__hub_lost(dtrain__hub *hub, int rank, const char *how)
{
    dtrain__member *member = &hub->members[rank];
    dtrain_status status = member->closed ? DTRAIN_ERR_PEER_LOST : DTRAIN_ERR_TIMEOUT; /* whether that proves a death */
    dtrain__reason reason = {DTRAIN__FRAME_LOST, 0, rank, status, how, 0};
    if (hub->leaving) { /* ranks that heard that say nothing when they leave themselves */
        dtrain__stream_cut(&member->control);
        return;
    }
    dtrain__frame_reason(hub, rank, &reason, NULL);
    if (dtrain__hub_leads(hub))
        dtrain__hub_relay(hub, rank, &reason);
    if (member->control.fd >= 0 && member->table_due == 0)
        dtrain__stream_send(&member->control, member->out.data, member->out.bytes, 0);
    dtrain__stream_hang_up(&member->control);
    dtrain__hub_gone(hub, rank, DTRAIN__LOST, how);
}

/* A rank refuses connections, so its process is gone, or its network answers for it. If the previous leader left, this
 * rank may have left as well, with nobody there to hear it. Then calls that need it fail, and others continue. */
static void dtrain__hub_refused(dtrain__hub *hub, int rank, int by_unix)
{
    static const char why[] = "it refuses connections, and the rank that would have reported its end has left";
    dtrain__reason gone = {DTRAIN__FRAME_GONE, 0, rank, by_unix ? DTRAIN_OK : DTRAIN_ERR_TIMEOUT, why, 0};
    if (!hub->handed) {
        hub->members[rank].closed = by_unix;
        dtrain__hub_lost(hub, rank, "it refuses connections; its process has died or was cut off");
        return;
    }
    hub->members[rank].doubted = !by_unix;
    if (dtrain__hub_leads(hub))
        dtrain__hub_relay(hub, rank, &gone);
    dtrain__hub_gone(hub, rank, DTRAIN__LEFT, why);
}

/* Cuts a member's control connection. If it may come back, its clock starts. A leader that knows of a loss which this
 * rank has not heard of is not judged: it may have left because of that loss. */
static void dtrain__hub_control_down(dtrain__hub *hub, int rank, int error)
{
    dtrain__member *member = &hub->members[rank];
    char how[224];
    dtrain__address end;
    member->closed = (error == 0 || error == ECONNRESET || error == EPIPE) && /* by the other side */
                     dtrain__net_end(member->control.fd, 0, &end) == 0 && dtrain__net_is_unix(&end);
    dtrain__stream_cut(&member->control);
    if (member->gone != DTRAIN__PRESENT || !dtrain__hub_linked(hub, rank))
        return;
    member->down_ns = dtrain__os_now_ns();
    member->expected = hub->reconnect_ns > 0 && hub->formed;
    if (member->expected)
        return;
    if (!hub->formed && hub->rank == 0) {
        /* the rank may start again and join anew */
        member->joined = 0;
        member->in.bytes = member->out.bytes = member->table_at = member->table_due = 0;
        return;
    }
    snprintf(how, sizeof how, "its connection to rank %d ended (%s); its process has died or was cut off", hub->rank,
             dtrain__net_why(error));
    dtrain__hub_lost(hub, rank, how);
}

/* Returns why a member's connection ended, as an errno. Corruption is logged, as the connection may come back. */
static int dtrain__hub_ended(dtrain__hub *hub, int rank, int error)
{
    if (dtrain__net_is_corrupt(error))
        dtrain__hub_note(hub, "rank %d: its connection to rank %d (%s) ends: %s", hub->rank, rank,
                         hub->members[rank].name, dtrain__net_why(error));
    return error;
}

/* Whether a lane moves bytes one way. Over a connection that takes no more, those that have come are still received, as
 * the peer may have left. But not while a new one is being made: its handshake has told the peer how many have come. */
static int dtrain__lane_open(const dtrain__lane *lane, int sending)
{
    return lane->stream.fd >= 0 && !(lane->stream.mute && (sending || lane->handshake != NULL));
}

/* A lane's connection takes no more bytes, or none are left on it. */
static void dtrain__lane_down(dtrain__hub *hub, dtrain__lane *lane, int world, int sending, int error)
{
    lane->why = dtrain__hub_ended(hub, world, error);
    lane->down_ns = lane->stream.mute ? lane->down_ns : dtrain__os_now_ns();
    if (sending)
        lane->stream.mute = 1;
    else
        dtrain__stream_cut(&lane->stream);
}

/* Names a lane's connection over TCP: "10.0.0.1:2950 to 10.0.0.2:4711". Empty: there is none. */
static void dtrain__lane_ends(const dtrain__lane *lane, char *text, size_t capacity)
{
    dtrain__address here, there;
    text[0] = 0;
    if (lane->stream.fd >= 0 && dtrain__net_end(lane->stream.fd, 0, &here) == 0 && !dtrain__net_is_unix(&here) &&
        dtrain__net_end(lane->stream.fd, 1, &there) == 0)
        snprintf(text, capacity, "%.60s to %.60s", dtrain__net_text(&here).text, dtrain__net_text(&there).text);
}

/* Continues the stream over a connection that was just admitted. Errors: DTRAIN_ERR_MEMORY, no memory for its records;
 * DTRAIN_ERR_PEER_LOST, more was lost than can be sent again. */
static dtrain_status dtrain__hub_resume(dtrain__hub *hub, dtrain__stream *stream, dtrain__handshake *handshake,
                                        int same_host)
{
    if (hub->reconnect_ns > 0 && stream->replay == NULL && stream->sent == 0) /* it must hold everything */
        stream->replay = (unsigned char *)dtrain__alloc(hub->allocator, DTRAIN__REPLAY_BYTES);
    dtrain__stream_cut(stream);
    if (!dtrain__stream_seal(stream, hub->allocator, handshake, &hub->keys))
        return DTRAIN_ERR_MEMORY;
    if (!dtrain__stream_resume(stream, handshake->fd, handshake->peer_received))
        return DTRAIN_ERR_PEER_LOST;
    stream->shm.page = handshake->page;
    stream->shm.ring_bytes = handshake->ring_bytes;
    stream->shm.side = !handshake->initiator;
    stream->shm.look = 0;
    handshake->page = NULL;
    dtrain__net_tune(handshake->fd, same_host, hub->reconnect_ns > 0 ? DTRAIN__SOCKET_BUFFER : 0, hub->patience_ns);
    handshake->fd = -1;
    hub->notes.sealed |= stream->seal != NULL && !hub->told_sealed;
    hub->told_sealed |= stream->seal != NULL;
    return DTRAIN_OK;
}

#endif
