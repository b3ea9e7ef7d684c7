/* Fuzz target: control frames of members, and handshakes that they open, in a world that has formed and works: groups
 * in it and apart from it, agreements under way and decided, ranks that wait for keys. The first byte says who
 * receives: the leader, another member, the leader that follows one that died, one that heard of that, or either while
 * the world forms. Then come frames: a byte for the sender and the kind (of high senders as it is, else with lists that
 * fit), two for the length, the body; kind 15 is a handshake.
 *
 * make fuzz MINUTES=n; FUZZ_KIND=n makes all frames of one kind */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { SIZE = 5, PAIR = 1 << 10, THREE = 2 << 10 | 1, DOOR = 15 };

typedef struct world {
    dtrain_allocator heap;
    dtrain__hub hub;
    dtrain__member members[SIZE];
    dtrain__store_call calls[SIZE]; /* of a group in which this is that rank */
} world;

static void quiet(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
}

static void must(int fact)
{
    if (!fact)
        abort();
}

/* This rank votes to shrink the channel. */
static void vote_in(dtrain__channel *channel)
{
    dtrain__agreement vote;
    memset(&vote, 0, sizeof vote);
    vote.number = 1;
    vote.kind = DTRAIN__CONSENT_SHRINK;
    vote.flags = 5;
    must(dtrain__consent_vote(&channel->seat, &vote));
}

/* Makes the channel and has this rank vote in it, where it is a member. */
static void join(world *w, uint64_t id, const int *worlds, int size, int vote)
{
    dtrain__channel *channel;
    int rank = 0;
    while (rank < size && worlds[rank] != w->hub.rank)
        rank++;
    if (rank == size)
        return;
    must(dtrain__channel_create(&channel, &w->hub, id, worlds, size, rank) == DTRAIN_OK);
    static char value[8];
    static size_t bytes;
    w->calls[rank].what = DTRAIN__STORE_WAIT;
    w->calls[rank].value = value;
    w->calls[rank].capacity = sizeof value;
    w->calls[rank].bytes = &bytes;
    w->calls[rank].id = 7;
    channel->seat.asks = &w->calls[rank];
    if (id == 0 && vote)
        dtrain__hub_formed(&w->hub);
    if (vote)
        vote_in(channel);
}

static void begin(world *w, int role)
{
    static const int all[] = {0, 1, 2, 3, 4}, pair[] = {2, 0}, three[] = {1, 3, 4};
    static const int ranks[] = {0, 2, 1, 3, 0, 2};
    dtrain__hub *hub = &w->hub;
    int forms = role >= 4;
    memset(w, 0, sizeof *w);
    hub->allocator = &w->heap;
    hub->rank = hub->keys.rank = ranks[role];
    hub->size = hub->keys.world_size = SIZE;
    hub->keys.job[0] = 'y';
    hub->connections = 2;
    must(dtrain__hub_convene(hub));
    hub->members = w->members;
    hub->heartbeat_ns = 1000000000;
    hub->kick[0] = hub->kick[1] = -1;
    hub->listening.at.any.sa_family = AF_UNIX;
    hub->suspect = -1;
    for (int rank = 0; rank < SIZE; rank++) {
        char name[32];
        snprintf(name, sizeof name, "pid %d on alpha", rank);
        dtrain__hub_expect(hub, &w->members[rank]);
        must(dtrain__hub_say(hub, &w->members[rank].name, name));
        w->members[rank].joined = !forms;
    }
    join(w, 0, all, SIZE, !forms);
    if (forms)
        return;
    join(w, PAIR, pair, 2, 1);
    join(w, THREE, three, 3, 1);
    if (hub->rank == 0) {
        must(dtrain__store_put(&hub->council.store, hub->allocator, "key", 3, "value", 5) == DTRAIN_OK);
        dtrain__asker asker = {NULL, 3, THREE, 9, 5, "other"};
        dtrain__council_serve(&hub->council, &asker, DTRAIN__STORE_WAIT, NULL, 0);
    }
    if (role == 2 || role == 3)
        dtrain__hub_gone(hub, 0, DTRAIN__LOST, "its process has died");
}

/* A handshake of `from`, as its hello and proof may be. */
static void open_handshake(world *w, int from, const uint8_t *data, size_t bytes)
{
    dtrain__handshake *handshake;
    if (bytes < 24 || (handshake = dtrain__hub_new_handshake(&w->hub, &w->hub.listening)) == NULL)
        return;
    handshake->state = DTRAIN__HANDSHAKE_PROVED;
    handshake->peer = data[0] % 8 == 7 ? (int)data[1] - 1 : from;
    handshake->peer_world = data[0] % 16 == 15 ? data[1] : SIZE;
    handshake->purpose = data[2] % 4;
    handshake->lane = data[3] % 4 - 1;
    handshake->channel = data[4] % 4 == 0 ? 0 : data[4] % 4 == 1 ? PAIR : data[4] % 4 == 2 ? THREE : data[5];
    handshake->peer_links = dtrain__get_le(data + 6, 8);
    handshake->peer_received = dtrain__get_le(data + 14, 8);
    dtrain__put_le(handshake->hello + 16, data[22] % 8 == 7 ? data[23] : (uint64_t)w->hub.rank, 4);
    handshake->hello[32] = data[22] >= 0xf0; /* another run */
    handshake->job[0] = data[1] >= 0xf0 ? 'x' : 0;
    if (handshake->purpose != DTRAIN__PURPOSE_DATA ||
        (w->hub.formed && dtrain__hub_channel(&w->hub, handshake->channel) != NULL)) {
        dtrain__hub_admit(&w->hub, handshake);
        if (handshake->state == DTRAIN__HANDSHAKE_OPEN && handshake->error.status == DTRAIN_OK)
            dtrain__hub_adopt(&w->hub, handshake);
    }
    dtrain__hub_free_handshake(&w->hub, &handshake);
}

/* Makes the count of a list that ends a frame that of what is there, so that more is reached; returns the frame's
 * bytes. */
static size_t mend(uint8_t *frame, size_t bytes, int kind)
{
    size_t each = kind == DTRAIN__FRAME_CONSENT ? DTRAIN__CONSENT_FRAME_BYTES : 4,
           list = kind == DTRAIN__FRAME_CONSENT ? 40 : 28;
    if (kind != DTRAIN__FRAME_CONSENT && kind != DTRAIN__FRAME_END && kind != DTRAIN__FRAME_BYE)
        return bytes;
    if (kind != DTRAIN__FRAME_CONSENT && bytes >= list)
        list += dtrain__get_le(frame + 14, 2) % 64;
    if (bytes < list)
        return bytes;
    if (kind != DTRAIN__FRAME_CONSENT)
        dtrain__put_le(frame + 14, list - 28, 2);
    dtrain__put_le(frame + list - 4, (bytes - list) / each, 4);
    return bytes - (bytes - list) % each;
}

/* Hands a frame to the hub as if it had come; a member that is lost for it sends no more. */
static void hear(world *w, int from, int kind, const uint8_t *data, size_t bytes, int as_is)
{
    dtrain__member *member = &w->members[from];
    unsigned char head[6];
    size_t at = member->in.bytes + sizeof head;
    if (from == w->hub.rank || member->gone != DTRAIN__PRESENT)
        return;
    if (kind == DOOR) {
        open_handshake(w, from, data, bytes);
        return;
    }
    dtrain__put_le(head, bytes, 4);
    dtrain__put_le(head + 4, (uint64_t)kind, 2);
    dtrain__give_bytes(&w->hub, &member->in, head, sizeof head);
    dtrain__give_bytes(&w->hub, &member->in, data, bytes);
    if (!as_is) {
        size_t fits = mend(member->in.data + at, bytes, kind);
        member->in.bytes = at + fits;
        dtrain__put_le(member->in.data + at - sizeof head, fits, 4);
    }
    if (!dtrain__hub_frames(&w->hub, from))
        dtrain__hub_lost(&w->hub, from, "it sent a malformed control message");
    for (int rank = 0; rank < SIZE; rank++) /* what waited for another leader */
        if (w->members[rank].in.bytes > 0 && !w->members[rank].held && !dtrain__hub_frames(&w->hub, rank))
            dtrain__hub_lost(&w->hub, rank, "it sent a malformed control message");
    must(member->out.bytes <= DTRAIN__QUEUE_MOST + DTRAIN__FRAME_BYTES);
}

/* Takes an agreement over, as comm_shrink does, and makes the channel of those who go on. */
static void go_on(dtrain__channel *channel)
{
    dtrain__hub *hub = channel->hub;
    vote_in(channel);
    for (uint64_t number = 1; number < 3; number++) {
        dtrain__agreement vote;
        dtrain__channel *rest = NULL;
        uint64_t goes_on[SIZE];
        int worlds[SIZE], count = 0, rank = -1;
        memset(&vote, 0, sizeof vote);
        vote.number = number;
        vote.goes_on = goes_on;
        if (!dtrain__consent_decided(&channel->seat, &vote) || vote.status != DTRAIN_OK)
            continue;
        for (int i = 0; i < channel->seat.size; i++) {
            rank = goes_on[i] && i == channel->seat.rank ? count : rank;
            worlds[count] = dtrain__seat_world(&channel->seat, i);
            count += goes_on[i] != 0;
        }
        if (rank >= 0 && dtrain__channel_create(&rest, hub, vote.id, worlds, count, rank) == DTRAIN_OK)
            must(dtrain__seat_rank(&rest->seat, hub->rank) == rest->seat.rank);
    }
}

/* What this rank does with what it has heard. */
static void act(world *w)
{
    dtrain__hub *hub = &w->hub;
    int64_t now = dtrain__os_now_ns();
    if (!hub->formed)
        return;
    for (dtrain__channel *channel = dtrain__channel_first(hub), *next; channel != NULL; channel = next) {
        next = dtrain__channel_next(channel);
        go_on(channel);
    }
    dtrain__consent_step(&hub->council);
    dtrain__consent_resend(&hub->council);
    for (int rank = 0; rank < SIZE; rank++) {
        const dtrain__last_heard *last = w->members[rank].last;
        dtrain__last theirs;
        if (rank != hub->rank)
            dtrain__hub_beat(hub, rank, hub->suspect, hub->suspect_ns, now);
        if (last != NULL && last->bytes == sizeof theirs) {
            memcpy(&theirs, last->data, sizeof theirs);
            must(strlen(dtrain__op_call_text(&theirs.call).text) < sizeof(dtrain__text));
        }
    }
}

static void end(world *w)
{
    dtrain__hub *hub = &w->hub;
    while (hub->council.seats != NULL) {
        dtrain__channel *channel = dtrain__channel_first(hub);
        dtrain__seat_unlink(&channel->seat);
        dtrain__channel_free(channel);
    }
    for (int rank = 0; rank < SIZE; rank++)
        dtrain__hub_forget(hub, &w->members[rank]);
    dtrain__bytes_free(hub->allocator, &hub->table);
    dtrain__council_free(&hub->council);
    must(w->heap.bytes == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static world w;
    const char *only = getenv("FUZZ_KIND");
    if (bytes == 0)
        return 0;
    dtrain_set_log(quiet, NULL);
    begin(&w, data[0] % 6);
    for (data++, bytes--; bytes >= 3;) {
        int from = (data[0] >> 4) % SIZE, kind = only != NULL ? atoi(only) : data[0] & 15;
        size_t length = (size_t)dtrain__get_le(data + 1, 2);
        data += 3;
        bytes -= 3;
        length = length < bytes ? length : bytes;
        hear(&w, from, kind, data, length, data[-3] >> 4 >= 2 * SIZE);
        data += length;
        bytes -= length;
    }
    act(&w);
    end(&w);
    return 0;
}
