/* ---- >>hub ----
 * The control plane of a group of processes. Every rank keeps one connection to rank 0, over which the group
 * forms, hears that its members live, and learns who is lost and why; connections for data are accepted and
 * made here and handed to the lanes of their peer. Rank 0 relays: the first cause it hears is the group's.
 *
 * Whoever holds step_mutex may run the hub: the group's service thread, or a caller that waits for data and
 * adds its descriptors to the same poll(). Everything shared is guarded by `mutex`, which nobody holds while it
 * waits. `news` counts what a waiting caller should look at. */
#ifndef DTRAIN__HUB
#define DTRAIN__HUB
#include "../base/memory.c"
#include "admission.c"
#include "stream.c"
#include "store.c"

#define DTRAIN__DOORS 64 /* unproved peers at once; the oldest is shut out for the next */
#define DTRAIN__DOOR_NS 5000000000
#define DTRAIN__MAX_LANES 8
#define DTRAIN__FRAME_BYTES ((size_t)1 << 18)
#define DTRAIN__NAME_BYTES 96
#define DTRAIN__WHY_BYTES 480
#define DTRAIN__FINGERPRINT_BYTES 128
#define DTRAIN__LAST_BYTES 192
#define DTRAIN__LAST_CHAIN 4 /* ranks that one heartbeat tells of */

/* One connection's worth of data to and from a peer. */
typedef struct dtrain__lane {
    dtrain__stream stream;
    dtrain__door *door; /* a connection that this rank is making */
    int wanted;         /* somebody waits for it */
    uint64_t links;     /* connections that it has had */
    int64_t retry_ns, down_ns;
} dtrain__lane;

/* What a rank was doing when it was last heard of: bytes that only the owners of the ends understand. */
typedef struct dtrain__last_heard {
    unsigned char data[DTRAIN__LAST_BYTES];
    size_t bytes; /* 0: never heard of */
    int awaits;   /* the rank that it waits for, or -1 */
    int64_t heard_ns;
} dtrain__last_heard;

typedef struct dtrain__member {
    dtrain__lane *lanes;                     /* hub->connections of them */
    char address[DTRAIN__ADDRESS_BYTES / 2]; /* "host:port", "unix:/path", or ":port" on the host of rank 0 */
    char name[DTRAIN__NAME_BYTES];           /* "pid 4711 on alpha" */
    char why[DTRAIN__WHY_BYTES];             /* it left; may be empty */
    char trouble[160];                       /* of the last try to connect to it for data */
    uint64_t host;                           /* equal on ranks of one host */
    int joined, left, expected;              /* expected: the control connection may come back */
    dtrain__stream control;                  /* rank 0 has one to each; the others one, to rank 0 */
    dtrain__bytes in, out;
    int64_t heard_ns, down_ns;
    int poll_index;
    dtrain__last_heard last;
} dtrain__member;

/* A get that waits at rank 0 for its key. */
typedef struct dtrain__asker {
    struct dtrain__asker *next;
    int rank;
    uint32_t id;
    size_t key_bytes;
    char key[DTRAIN__STORE_KEY_BYTES];
} dtrain__asker;

typedef struct dtrain__hub_desc {
    const char *root, *listen_on, *fingerprint, *believed;
    int insecure, listen_fd, connections;
    int64_t heartbeat_ms, reconnect_ms;
    void (*on_address)(void *user, const char *address);
    void *on_address_user;
} dtrain__hub_desc;

typedef struct dtrain__hub {
    dtrain_allocator *allocator;
    dtrain__keys keys;
    int rank, size, connections, insecure, formed;
    char root[DTRAIN__ADDRESS_BYTES], listen_on[64], fingerprint[DTRAIN__FINGERPRINT_BYTES], believed[400];
    int64_t heartbeat_ns, reconnect_ns, period_ns;
    dtrain__address root_addresses[DTRAIN__MAX_ADDRESSES], reached, listening;
    int root_count, root_turn, listener, listener_index;
    dtrain__door *root_door;
    int64_t root_retry_ns, root_wait_ns;
    dtrain__error root_error; /* of the last try to reach rank 0 */
    pthread_mutex_t step_mutex, mutex;
    int kick[2], wake[2]; /* pipes: to whoever steps, to a caller that waits */
    uint32_t stepping, waiting, kicked;
    uint64_t news;
    dtrain__door *doors;
    int inbound;
    dtrain__member *members;
    uint32_t broken;
    dtrain__error cause;
    struct pollfd *fds;
    int64_t beat_ns, stepped_ns, accept_ns, told_ns;
    int suspect;                     /* the rank that rank 0 has not heard for longest, or -1 */
    int64_t suspect_ns;              /* for how long, when it was last said */
    char refused[DTRAIN__WHY_BYTES]; /* the last one sent away while the group formed */
    size_t (*last)(void *user, unsigned char *out, size_t capacity, int *awaits); /* what this rank does; may be NULL */
    void *last_user;
    dtrain__store store;
    dtrain__asker *askers;
    uint32_t store_id, store_answered; /* of this rank's last request, and the last one answered */
    dtrain_status store_status;
    int store_found;
    dtrain__bytes store_value;
} dtrain__hub;

enum {
    DTRAIN__FRAME_JOIN = 1,
    DTRAIN__FRAME_TABLE,
    DTRAIN__FRAME_REFUSE,
    DTRAIN__FRAME_BEAT,
    DTRAIN__FRAME_END,
    DTRAIN__FRAME_BYE,
    DTRAIN__FRAME_ASK,
    DTRAIN__FRAME_ANSWER
};

/* Something happened that a caller may wait for. */
static void dtrain__hub_tell(dtrain__hub *hub)
{
    __atomic_add_fetch(&hub->news, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&hub->waiting, __ATOMIC_SEQ_CST))
        dtrain__net_poke(hub->wake[1]);
}

/* Somebody asks for something that whoever steps must do; one who is about to step has not looked for it yet. */
static void dtrain__hub_kick(dtrain__hub *hub)
{
    __atomic_store_n(&hub->kicked, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&hub->stepping, __ATOMIC_SEQ_CST))
        dtrain__net_poke(hub->kick[1]);
}

/* Reading a frame: each take says whether there was enough. */
typedef struct dtrain__reader {
    const unsigned char *at;
    size_t left;
} dtrain__reader;

static int dtrain__take(dtrain__reader *reader, uint64_t *value, int bytes)
{
    if (reader->left < (size_t)bytes)
        return 0;
    *value = dtrain__get_le(reader->at, bytes);
    reader->at += bytes;
    reader->left -= (size_t)bytes;
    return 1;
}

/* A text of one length byte or two; what does not fit into out, or holds a zero, is refused. */
static int dtrain__take_text(dtrain__reader *reader, int length_bytes, char *out, size_t capacity)
{
    uint64_t bytes;
    if (!dtrain__take(reader, &bytes, length_bytes) || bytes > reader->left || bytes >= capacity ||
        memchr(reader->at, 0, (size_t)bytes) != NULL)
        return 0;
    memcpy(out, reader->at, (size_t)bytes);
    out[bytes] = 0;
    reader->at += bytes;
    reader->left -= (size_t)bytes;
    return 1;
}

/* Appends to a frame under way; once memory is short nothing more of it goes in, and frame_close tells. */
static void dtrain__give(dtrain__hub *hub, dtrain__bytes *frame, uint64_t value, int bytes)
{
    if (frame->short_of || !dtrain__bytes_room(hub->allocator, frame, (size_t)bytes))
        return;
    dtrain__put_le(frame->data + frame->bytes, value, bytes);
    frame->bytes += (size_t)bytes;
}

static void dtrain__give_bytes(dtrain__hub *hub, dtrain__bytes *frame, const void *data, size_t bytes)
{
    if (bytes == 0 || frame->short_of || !dtrain__bytes_room(hub->allocator, frame, bytes))
        return;
    memcpy(frame->data + frame->bytes, data, bytes);
    frame->bytes += bytes;
}

static void dtrain__give_text(dtrain__hub *hub, dtrain__bytes *frame, int length_bytes, const char *text)
{
    dtrain__give(hub, frame, strlen(text), length_bytes);
    dtrain__give_bytes(hub, frame, text, strlen(text));
}

/* Opens a frame at the end of a member's output; returns where it begins. */
static size_t dtrain__frame_open(dtrain__hub *hub, dtrain__member *to, int type)
{
    size_t begin = to->out.bytes;
    to->out.short_of = 0;
    dtrain__give(hub, &to->out, 0, 4);
    dtrain__give(hub, &to->out, (uint64_t)type, 2);
    return begin;
}

/* Returns 0 when memory was short: then nothing of the frame is left, as a part of one would accuse its sender. */
static int dtrain__frame_close(dtrain__member *to, size_t begin)
{
    if (to->out.short_of) {
        to->out.bytes = begin;
        return 0;
    }
    dtrain__put_le(to->out.data + begin, to->out.bytes - begin - 6, 4);
    return 1;
}

static void dtrain__frame_reason(dtrain__hub *hub, dtrain__member *to, int type, int rank, dtrain_status status,
                                 const char *text)
{
    size_t begin = dtrain__frame_open(hub, to, type);
    dtrain__give(hub, &to->out, (uint64_t)rank, 4);
    dtrain__give(hub, &to->out, (uint64_t)status, 2);
    dtrain__give_text(hub, &to->out, 2, text);
    dtrain__frame_close(to, begin);
}

/* The other ends of this rank's control connections: all ranks for rank 0, rank 0 for the others. */
static int dtrain__hub_links(const dtrain__hub *hub)
{
    return hub->rank == 0 ? hub->size : 1;
}

static void dtrain__hub_relay(dtrain__hub *hub, int except, int type, int rank, dtrain_status status, const char *text)
{
    for (int peer = 0; peer < dtrain__hub_links(hub); peer++) {
        dtrain__member *member = &hub->members[peer];
        if (peer != hub->rank && peer != except && member->joined && !member->left)
            dtrain__frame_reason(hub, member, type, rank, status, text);
    }
}

/* Ends the group for the first cause; `from` is the rank that said so, or this one. */
static void dtrain__hub_end(dtrain__hub *hub, int from, int rank, dtrain_status status, const char *text)
{
    if (hub->broken)
        return;
    hub->cause.status = status;
    snprintf(hub->cause.text, sizeof hub->cause.text, "%s", text);
    __atomic_store_n(&hub->broken, 1, __ATOMIC_SEQ_CST);
    dtrain__hub_relay(hub, from, DTRAIN__FRAME_END, rank, status, text);
    dtrain__hub_tell(hub);
    dtrain__hub_kick(hub);
}

/* A member is gone without a word. It is told so, should it only have been stopped: else it would blame this rank. */
static void dtrain__hub_lost(dtrain__hub *hub, int rank, const char *how)
{
    dtrain__error lost;
    dtrain__error kept = dtrain__thread_error;
    dtrain__member *member = &hub->members[rank];
    dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d (%s) is lost: %s", rank,
                 member->name[0] != 0 ? member->name : "unknown process", how);
    dtrain__thread_error = kept;
    dtrain__hub_end(hub, hub->rank, rank, lost.status, lost.text);
    if (member->control.fd >= 0)
        dtrain__stream_send(&member->control, member->out.data, member->out.bytes, 0);
    dtrain__stream_cut(&member->control);
    member->left = 1;
    member->expected = 0;
}

/* Stops a member's control connection; where it may come back, the clock runs. */
static void dtrain__hub_control_down(dtrain__hub *hub, int rank, int error)
{
    dtrain__member *member = &hub->members[rank];
    char how[160];
    dtrain__stream_cut(&member->control);
    if (member->left)
        return;
    member->down_ns = dtrain__os_now_ns();
    member->expected = hub->reconnect_ns > 0 && hub->formed;
    if (member->expected)
        return;
    if (!hub->formed && hub->rank == 0) {
        /* The rank may start again and join anew. */
        member->joined = 0;
        member->in.bytes = member->out.bytes = 0;
        return;
    }
    snprintf(how, sizeof how, "its connection to rank %d ended (%s); its process has died or was cut off",
             hub->rank == 0 ? 0 : hub->rank, dtrain__net_why(error));
    dtrain__hub_lost(hub, rank, how);
}

/* Keeps the answer to this rank's own request. */
static void dtrain__store_keep(dtrain__hub *hub, uint32_t id, dtrain_status status, int found, const void *data,
                               size_t bytes)
{
    hub->store_value.bytes = 0;
    hub->store_value.short_of = 0;
    dtrain__give_bytes(hub, &hub->store_value, data, bytes);
    hub->store_status = hub->store_value.short_of ? DTRAIN_ERR_MEMORY : status;
    hub->store_found = found;
    hub->store_answered = id;
    dtrain__hub_tell(hub);
}

/* Answers a store request: rank 0's own at once, another's by a frame. */
static void dtrain__store_answer(dtrain__hub *hub, int rank, uint32_t id, dtrain_status status, int found,
                                 const void *data, size_t bytes)
{
    dtrain__member *member = &hub->members[rank];
    size_t begin;
    if (rank == hub->rank) {
        dtrain__store_keep(hub, id, status, found, data, bytes);
        return;
    }
    begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_ANSWER);
    dtrain__give(hub, &member->out, id, 4);
    dtrain__give(hub, &member->out, (uint64_t)status, 2);
    dtrain__give(hub, &member->out, (uint64_t)found, 1);
    dtrain__give_bytes(hub, &member->out, data, bytes);
    if (!dtrain__frame_close(member, begin) && bytes > 0)
        dtrain__store_answer(hub, rank, id, DTRAIN_ERR_MEMORY, 0, NULL, 0);
}

/* Answers every get that waited for a key which is there now. */
static void dtrain__store_wake(dtrain__hub *hub, const char *key, size_t key_bytes)
{
    dtrain__entry *entry = *dtrain__store_place(&hub->store, key, key_bytes);
    for (dtrain__asker **at = &hub->askers, *asker; entry != NULL && (asker = *at) != NULL;) {
        if (asker->key_bytes != key_bytes || memcmp(asker->key, key, key_bytes) != 0) {
            at = &asker->next;
            continue;
        }
        *at = asker->next;
        dtrain__store_answer(hub, asker->rank, asker->id, DTRAIN_OK, 1, dtrain__entry_value(entry), entry->bytes);
        dtrain__free(hub->allocator, asker, sizeof *asker);
    }
}

/* Forgets what a rank waits for: it asks anew, or has left. */
static void dtrain__store_forget(dtrain__hub *hub, int rank)
{
    for (dtrain__asker **at = &hub->askers, *asker; (asker = *at) != NULL;) {
        if (asker->rank != rank) {
            at = &asker->next;
            continue;
        }
        *at = asker->next;
        dtrain__free(hub->allocator, asker, sizeof *asker);
    }
}

enum { DTRAIN__STORE_SET = 0, DTRAIN__STORE_GET, DTRAIN__STORE_WAIT };

/* Rank 0: one request of `rank`. */
static void dtrain__store_serve(dtrain__hub *hub, int rank, uint32_t id, int what, const char *key, const void *value,
                                size_t bytes)
{
    size_t key_bytes = strlen(key);
    dtrain__entry *entry;
    dtrain__asker *asker;
    if (what == DTRAIN__STORE_SET) {
        dtrain_status status = dtrain__store_put(&hub->store, hub->allocator, key, key_bytes, value, bytes);
        const char *text = status == DTRAIN_OK ? "" : dtrain__thread_error.text;
        dtrain__store_answer(hub, rank, id, status, 0, text, strlen(text));
        dtrain__store_wake(hub, key, key_bytes);
        return;
    }
    entry = *dtrain__store_place(&hub->store, key, key_bytes);
    if (entry != NULL || what == DTRAIN__STORE_GET) {
        dtrain__store_answer(hub, rank, id, DTRAIN_OK, entry != NULL, entry != NULL ? dtrain__entry_value(entry) : NULL,
                             entry != NULL ? entry->bytes : 0);
        return;
    }
    dtrain__store_forget(hub, rank);
    asker = (dtrain__asker *)dtrain__alloc(hub->allocator, sizeof *asker);
    if (asker == NULL) {
        dtrain__store_answer(hub, rank, id, DTRAIN_ERR_MEMORY, 0, NULL, 0);
        return;
    }
    asker->rank = rank;
    asker->id = id;
    asker->key_bytes = key_bytes;
    memcpy(asker->key, key, key_bytes);
    asker->next = hub->askers;
    hub->askers = asker;
}

static int dtrain__take_ask(dtrain__hub *hub, int rank, dtrain__reader *reader)
{
    uint64_t id, what;
    char key[DTRAIN__STORE_KEY_BYTES];
    if (hub->rank != 0 || !dtrain__take(reader, &id, 4) || !dtrain__take(reader, &what, 1) ||
        what > DTRAIN__STORE_WAIT || !dtrain__take_text(reader, 2, key, sizeof key) ||
        reader->left > DTRAIN__STORE_VALUE_BYTES)
        return 0;
    dtrain__store_serve(hub, rank, (uint32_t)id, (int)what, key, reader->at, reader->left);
    return 1;
}

static int dtrain__take_answer(dtrain__hub *hub, dtrain__reader *reader)
{
    uint64_t id, status, found;
    if (hub->rank == 0 || !dtrain__take(reader, &id, 4) || !dtrain__take(reader, &status, 2) ||
        !dtrain__take(reader, &found, 1) || status > DTRAIN_ERR_ABORTED)
        return 0;
    if (id != hub->store_id)
        return 1; /* of a request that was given up */
    dtrain__store_keep(hub, (uint32_t)id, (dtrain_status)status, found != 0, reader->at, reader->left);
    return 1;
}

/* What a rank tells of itself when it joins; rank 0 refuses who does not fit. */
static int dtrain__take_join(dtrain__hub *hub, int rank, dtrain__reader *reader)
{
    dtrain__member *member = &hub->members[rank];
    char fingerprint[DTRAIN__FINGERPRINT_BYTES], believed[400], text[DTRAIN__WHY_BYTES];
    if (hub->rank != 0 || hub->formed || member->joined ||
        !dtrain__take_text(reader, 1, member->address, sizeof member->address) ||
        !dtrain__take(reader, &member->host, 8) || !dtrain__take_text(reader, 1, member->name, sizeof member->name) ||
        !dtrain__take_text(reader, 2, fingerprint, sizeof fingerprint) ||
        !dtrain__take_text(reader, 2, believed, sizeof believed))
        return 0;
    if (strcmp(fingerprint, hub->fingerprint) != 0) {
        snprintf(text, sizeof text,
                 "rank %d (%.60s) has the fingerprint \"%.120s\", rank 0 \"%.120s\": run the same "
                 "program and model on every rank",
                 rank, member->name, fingerprint, hub->fingerprint);
        dtrain__frame_reason(hub, member, DTRAIN__FRAME_REFUSE, rank, DTRAIN_ERR_MISMATCH, text);
        snprintf(hub->refused, sizeof hub->refused, "%s", text);
        dtrain__log(DTRAIN_LOG_WARN, "rank 0 sent away %s", text);
        return 1;
    }
    member->joined = 1;
    return 1;
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
        if (!dtrain__take_text(reader, 1, member->address, sizeof member->address) ||
            !dtrain__take(reader, &member->host, 8) || !dtrain__take_text(reader, 1, member->name, sizeof member->name))
            return 0;
    }
    hub->formed = 1;
    dtrain__hub_tell(hub);
    return 1;
}

/* A rank that broke the group, that left, or that was refused, and why. */
static int dtrain__take_reason(dtrain__hub *hub, int from, int type, dtrain__reader *reader)
{
    uint64_t about, status;
    char text[DTRAIN__ERROR_BYTES];
    if (!dtrain__take(reader, &about, 4) || about >= (uint64_t)hub->size || !dtrain__take(reader, &status, 2) ||
        status > DTRAIN_ERR_ABORTED || !dtrain__take_text(reader, 2, text, sizeof text))
        return 0;
    dtrain__member *member = &hub->members[about];
    if (type == DTRAIN__FRAME_BYE) {
        if ((hub->rank == 0 && (int)about != from) || (int)about == hub->rank)
            return 0;
        if (!hub->formed && hub->rank == 0) {
            member->joined = 0; /* it gave up waiting for others, and may start again; its connection ends next */
            return 1;
        }
        member->left = 1;
        snprintf(member->why, sizeof member->why, "%.*s", (int)sizeof member->why - 1, text);
        dtrain__store_forget(hub, (int)about);
        dtrain__hub_tell(hub);
        if (hub->rank == 0)
            dtrain__hub_relay(hub, from, type, (int)about, (dtrain_status)status, member->why);
        return 1;
    }
    if (status == DTRAIN_OK)
        return 0;
    if (type == DTRAIN__FRAME_REFUSE && !hub->formed) {
        dtrain__fail(&hub->root_error, (dtrain_status)status, "%s", text);
        hub->cause = hub->root_error;
        hub->broken = 1;
        dtrain__hub_tell(hub);
        return 1;
    }
    if (type != DTRAIN__FRAME_END)
        return 0;
    dtrain__hub_end(hub, from, (int)about, (dtrain_status)status, text);
    return 1;
}

/* Asks this rank's owner what it does now. */
static void dtrain__hub_look(dtrain__hub *hub, int64_t now)
{
    dtrain__last_heard *own = &hub->members[hub->rank].last;
    own->awaits = -1;
    own->bytes = hub->last != NULL ? hub->last(hub->last_user, own->data, sizeof own->data, &own->awaits) : 0;
    own->heard_ns = now;
}

/* Adds to a heartbeat what is known of a rank; returns the rank that it waits for, or -1. */
static int dtrain__give_last(dtrain__hub *hub, dtrain__member *to, int about, int64_t now)
{
    const dtrain__last_heard *last = &hub->members[about].last;
    if (last->bytes == 0)
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
        bytes > DTRAIN__LAST_BYTES || bytes > reader->left || (hub->rank == 0 && (int)about != from) ||
        (int)about == hub->rank)
        return 0;
    dtrain__last_heard *last = &hub->members[about].last;
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
    uint64_t suspect, ms;
    if (!dtrain__take(reader, &suspect, 4) || !dtrain__take(reader, &ms, 4) || suspect > (uint64_t)hub->size)
        return 0;
    if (hub->rank != 0) {
        hub->suspect = (int)suspect - 1;
        hub->suspect_ns = (int64_t)ms * 1000000;
    }
    while (reader->left > 0)
        if (!dtrain__take_last(hub, from, reader))
            return 0;
    return 1;
}

/* One whole frame from `rank`; returns 0 when it is malformed or out of place. */
static int dtrain__hub_frame(dtrain__hub *hub, int rank, int type, const unsigned char *data, size_t bytes)
{
    dtrain__reader reader = {data, bytes};
    switch (type) {
    case DTRAIN__FRAME_JOIN: return dtrain__take_join(hub, rank, &reader);
    case DTRAIN__FRAME_TABLE: return dtrain__take_table(hub, &reader);
    case DTRAIN__FRAME_BEAT: return dtrain__take_beat(hub, rank, &reader);
    case DTRAIN__FRAME_ASK: return dtrain__take_ask(hub, rank, &reader);
    case DTRAIN__FRAME_ANSWER: return dtrain__take_answer(hub, &reader);
    default: return dtrain__take_reason(hub, rank, type, &reader);
    }
}

/* Handles the whole frames of a member's input; returns 0 when one of them is malformed. */
static int dtrain__hub_frames(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    size_t at = 0;
    int good = 1;
    while (good && member->in.bytes - at >= 6) {
        uint64_t bytes = dtrain__get_le(member->in.data + at, 4);
        int type = (int)dtrain__get_le(member->in.data + at + 4, 2);
        if (bytes > DTRAIN__FRAME_BYTES)
            good = 0;
        else if (member->in.bytes - at - 6 < bytes)
            break;
        else
            good = dtrain__hub_frame(hub, rank, type, member->in.data + at + 6, (size_t)bytes);
        at += good ? 6 + (size_t)bytes : 0;
    }
    dtrain__bytes_drop(&member->in, at < member->in.bytes ? at : member->in.bytes);
    return good;
}

/* This rank cannot go on for want of memory, and says so rather than fall silent. */
static void dtrain__hub_short_of_memory(dtrain__hub *hub)
{
    dtrain__error cause;
    dtrain__error kept = dtrain__thread_error;
    dtrain__fail(&cause, DTRAIN_ERR_MEMORY, "rank %d has no memory for its control messages", hub->rank);
    dtrain__thread_error = kept;
    dtrain__hub_end(hub, hub->rank, hub->rank, cause.status, cause.text);
}

/* Reads what a member's control connection holds. */
static void dtrain__hub_listen_to(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    while (member->control.fd >= 0) {
        if (!dtrain__bytes_room(hub->allocator, &member->in, 4096)) {
            dtrain__hub_short_of_memory(hub);
            return;
        }
        ssize_t n = dtrain__stream_recv(&member->control, member->in.data + member->in.bytes,
                                        member->in.capacity - member->in.bytes);
        if (n < 0)
            dtrain__hub_control_down(hub, rank, errno);
        if (n <= 0)
            return;
        member->in.bytes += (size_t)n;
        member->heard_ns = dtrain__os_now_ns();
        if (!dtrain__hub_frames(hub, rank)) {
            dtrain__hub_lost(hub, rank, "it sent what is no control message of dtrain");
            return;
        }
    }
}

static void dtrain__hub_flush(dtrain__hub *hub, int rank)
{
    dtrain__member *member = &hub->members[rank];
    while (member->control.fd >= 0 && (member->out.bytes > 0 || member->control.again > 0)) {
        ssize_t n = dtrain__stream_send(&member->control, member->out.data, member->out.bytes, 0);
        if (n < 0) {
            int error = errno;
            dtrain__hub_listen_to(hub, rank); /* its last words may say why */
            if (member->control.fd >= 0)
                dtrain__hub_control_down(hub, rank, error);
        }
        if (n <= 0)
            return;
        dtrain__bytes_drop(&member->out, (size_t)n);
    }
}

#endif
