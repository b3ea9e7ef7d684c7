/* ---- >>council ----
 * What the processes of one world do for each other by messages, whatever carries these: they vote (see >>consent), and
 * rank 0 keeps the store for all. The owner of a council guards it, hands it what comes, and says who is gone. Messages
 * come from ranks of the world, and are checked all the same. */
#ifndef DTRAIN__COUNCIL
#define DTRAIN__COUNCIL
#include "plane.c"

#define DTRAIN__EVERY_GROUP UINT64_MAX
#define DTRAIN__ASKERS 1024 /* of one rank, a group each */

/* Control messages; those of a council are ASK, ANSWER, CONSENT, and BYE where its owner has none. */
enum {
    DTRAIN__FRAME_JOIN = 1,
    DTRAIN__FRAME_TABLE,
    DTRAIN__FRAME_REFUSE,
    DTRAIN__FRAME_BEAT,
    DTRAIN__FRAME_END,
    DTRAIN__FRAME_BYE,
    DTRAIN__FRAME_ASK,
    DTRAIN__FRAME_ANSWER,
    DTRAIN__FRAME_LOST,
    DTRAIN__FRAME_GONE,
    DTRAIN__FRAME_CONSENT
};

/* What became of a rank. It left of its own will; or it is lost, SILENT: without a proof that it is dead. */
enum { DTRAIN__PRESENT = 0, DTRAIN__LEFT, DTRAIN__LOST, DTRAIN__SILENT };

/* A call that waits at rank 0 for its key. */
typedef struct dtrain__asker {
    struct dtrain__asker *next;
    int rank;
    uint64_t group;
    uint32_t id;
    size_t key_bytes;
    char key[DTRAIN__STORE_KEY_BYTES];
} dtrain__asker;

typedef struct dtrain__consent dtrain__consent;

typedef struct dtrain__council {
    void *self; /* the owner, given to every function */
    dtrain_allocator *allocator;
    dtrain__origin *origin;
    int rank, size; /* of the world */
    dtrain__store store;
    dtrain__asker *askers;
    uint32_t asked;                             /* requests to the store */
    dtrain__consent *consents, *spare_consents; /* the latest first */
    int listed, list[DTRAIN__MAX_RANKS];        /* the ranks of a group that is looked at */
    unsigned char lists[DTRAIN__MAX_RANKS];     /* of each rank, whether it is in there */
    /* Has a message of a head and data sent. 0: there is no room, or `to` is gone. */
    int (*send)(void *self, int to, int type, const void *head, size_t head_bytes, const void *data, size_t bytes);
    void (*tell)(void *self);          /* something has come that a caller may wait for */
    int (*gone)(void *self, int rank); /* DTRAIN__PRESENT ... */
    /* The rank in the world of the group's rank i; -1: it has fewer; -2: this process has no such group. */
    int (*member)(void *self, uint64_t group, int i);
    /* Where the group keeps its call that waits for an answer; NULL: this process has no such group. */
    dtrain__store_call **(*call)(void *self, uint64_t group);
} dtrain__council;

/* Reading a message: each take says whether there was enough. */
typedef struct dtrain__reader {
    const unsigned char *at;
    size_t left;
} dtrain__reader;

static DTRAIN__NOINLINE int dtrain__take(dtrain__reader *reader, uint64_t *value, int bytes)
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

/* Reads a list of ranks of the world: begin, then add each. */
static void dtrain__council_list(dtrain__council *council)
{
    council->listed = 0;
    memset(council->lists, 0, (size_t)council->size);
}

/* Returns 0 for what is no rank, or is in the list already. */
static int dtrain__council_list_add(dtrain__council *council, uint64_t rank)
{
    if (rank >= (uint64_t)council->size || council->lists[rank])
        return 0;
    council->lists[rank] = 1;
    council->list[council->listed++] = (int)rank;
    return 1;
}

/* The lowest rank that is not gone leads. */
static int dtrain__council_leader(const dtrain__council *council)
{
    int leader = 0;
    while (leader < council->rank && council->gone(council->self, leader) != DTRAIN__PRESENT)
        leader++;
    return leader;
}

/* ---- the store ---- */

/* Gives a group's own call its answer. */
static void dtrain__council_answered(dtrain__council *council, uint64_t group, uint32_t id, dtrain_status status,
                                     int found, const void *data, size_t bytes)
{
    dtrain__store_call **at = council->call(council->self, group), *call = at != NULL ? *at : NULL;
    if (call == NULL || call->id != id)
        return; /* it was given up */
    call->status = status;
    if (status != DTRAIN_OK)
        snprintf(call->why, sizeof call->why, "%.*s", (int)(bytes < 300 ? bytes : 300), (const char *)data);
    else if (call->what == DTRAIN__STORE_GET && !found)
        *call->bytes = DTRAIN_STORE_ABSENT;
    else if (call->what != DTRAIN__STORE_SET)
        dtrain__store_copy(call, data, bytes);
    call->answered = 1;
    council->tell(council->self);
}

/* Answers a store request: rank 0's own at once, another's by a message. */
static void dtrain__council_answer(dtrain__council *council, const dtrain__asker *asker, dtrain_status status,
                                   int found, const void *data, size_t bytes)
{
    unsigned char head[15];
    if (asker->rank == council->rank) {
        dtrain__council_answered(council, asker->group, asker->id, status, found, data, bytes);
        return;
    }
    dtrain__put_le(head, asker->group, 8);
    dtrain__put_le(head + 8, asker->id, 4);
    dtrain__put_le(head + 12, (uint64_t)status, 2);
    head[14] = (unsigned char)found;
    if (!council->send(council->self, asker->rank, DTRAIN__FRAME_ANSWER, head, sizeof head, data, bytes) && bytes > 0)
        dtrain__council_answer(council, asker, DTRAIN_ERR_MEMORY, 0, "", 0);
}

/* Answers every get that waited for a key which is there now. */
static void dtrain__council_wake(dtrain__council *council, const char *key, size_t key_bytes)
{
    dtrain__entry *entry = *dtrain__store_place(&council->store, key, key_bytes);
    for (dtrain__asker **at = &council->askers, *asker; entry != NULL && (asker = *at) != NULL;) {
        if (asker->key_bytes != key_bytes || memcmp(asker->key, key, key_bytes) != 0) {
            at = &asker->next;
            continue;
        }
        *at = asker->next;
        dtrain__council_answer(council, asker, DTRAIN_OK, 1, dtrain__entry_value(entry), entry->bytes);
        dtrain__free(council->allocator, asker);
    }
}

/* Forgets what a group of a rank waits for: it asks anew, or has left. */
static void dtrain__council_forget(dtrain__council *council, int rank, uint64_t group)
{
    for (dtrain__asker **at = &council->askers, *asker; (asker = *at) != NULL;) {
        if (asker->rank != rank || (group != DTRAIN__EVERY_GROUP && asker->group != group)) {
            at = &asker->next;
            continue;
        }
        *at = asker->next;
        dtrain__free(council->allocator, asker);
    }
}

/* Rank 0: one request. */
static void dtrain__council_serve(dtrain__council *council, const dtrain__asker *from, int what, const void *value,
                                  size_t bytes)
{
    dtrain__entry *entry;
    dtrain__asker *asker;
    dtrain__council_forget(council, from->rank, from->group);
    if (what == DTRAIN__STORE_SET) {
        dtrain_status status =
            dtrain__store_put(&council->store, council->allocator, from->key, from->key_bytes, value, bytes);
        const char *text = status == DTRAIN_OK ? "" : dtrain__thread_error.text;
        dtrain__council_answer(council, from, status, 0, text, strlen(text));
        dtrain__council_wake(council, from->key, from->key_bytes);
        return;
    }
    entry = *dtrain__store_place(&council->store, from->key, from->key_bytes);
    if (entry != NULL || what == DTRAIN__STORE_GET) {
        dtrain__council_answer(council, from, DTRAIN_OK, entry != NULL,
                               entry != NULL ? dtrain__entry_value(entry) : NULL, entry != NULL ? entry->bytes : 0);
        return;
    }
    int waits = 0;
    for (asker = council->askers; asker != NULL; asker = asker->next)
        waits += asker->rank == from->rank;
    if (waits < DTRAIN__ASKERS)
        asker = (dtrain__asker *)dtrain__alloc(council->allocator, sizeof *asker);
    if (asker == NULL) {
        dtrain__council_answer(council, from, DTRAIN_ERR_MEMORY, 0, "", 0);
        return;
    }
    *asker = *from;
    asker->next = council->askers;
    council->askers = asker;
}

static int dtrain__council_take_ask(dtrain__council *council, int rank, dtrain__reader *reader)
{
    uint64_t id, what;
    dtrain__asker asker;
    if (council->rank != 0 || !dtrain__take(reader, &asker.group, 8) || !dtrain__take(reader, &id, 4) ||
        !dtrain__take(reader, &what, 1) || what > DTRAIN__STORE_WAIT ||
        !dtrain__take_text(reader, 2, asker.key, sizeof asker.key) || asker.key[0] == 0 ||
        reader->left > (what == DTRAIN__STORE_SET ? DTRAIN__STORE_VALUE_BYTES : 0))
        return 0;
    asker.rank = rank;
    asker.id = (uint32_t)id;
    asker.key_bytes = strlen(asker.key);
    dtrain__council_serve(council, &asker, (int)what, reader->at, reader->left);
    return 1;
}

static int dtrain__council_take_answer(dtrain__council *council, int from, dtrain__reader *reader)
{
    uint64_t group, id, status, found;
    if (council->rank == 0 || from != 0 || !dtrain__take(reader, &group, 8) || !dtrain__take(reader, &id, 4) ||
        !dtrain__take(reader, &status, 2) || !dtrain__take(reader, &found, 1) || !dtrain__status_known(status) ||
        found > 1 || reader->left > DTRAIN__STORE_VALUE_BYTES)
        return 0;
    dtrain__council_answered(council, group, (uint32_t)id, (dtrain_status)status, found != 0, reader->at, reader->left);
    return 1;
}

/* Begins a call of the group's: sends the request, or on rank 0 serves it. */
static dtrain_status dtrain__council_ask(dtrain__council *council, uint64_t group, int rank, dtrain__store_call *call)
{
    unsigned char head[15 + DTRAIN__STORE_KEY_BYTES];
    size_t bytes = call->what == DTRAIN__STORE_SET ? call->capacity : 0;
    dtrain__asker asker;
    asker.next = NULL;
    asker.rank = 0;
    asker.group = group;
    asker.id = call->id = ++council->asked != 0 ? council->asked : ++council->asked;
    asker.key_bytes = strlen(call->key);
    snprintf(asker.key, sizeof asker.key, "%s", call->key);
    call->answered = 0;
    *council->call(council->self, group) = call;
    if (council->rank == 0) {
        dtrain__council_serve(council, &asker, call->what, call->value, bytes);
        return DTRAIN_OK;
    }
    dtrain__put_le(head, group, 8);
    dtrain__put_le(head + 8, asker.id, 4);
    head[12] = (unsigned char)call->what;
    dtrain__put_le(head + 13, asker.key_bytes, 2);
    memcpy(head + 15, asker.key, asker.key_bytes);
    if (council->send(council->self, 0, DTRAIN__FRAME_ASK, head, 15 + asker.key_bytes, call->value, bytes) ||
        council->gone(council->self, 0) != DTRAIN__PRESENT) /* which the wait for the answer tells */
        return DTRAIN_OK;
    *council->call(council->self, group) = NULL;
    return dtrain__fail(call->error, DTRAIN_ERR_MEMORY,
                        "%s on rank %d (\"%s\"): no memory for the request, or rank 0 does not read them",
                        dtrain__store_names[call->what], rank, call->key);
}

/* Looks how the group's call has ended; 0 while it has not. late: it ends now. Then the group has it no more. */
static int dtrain__council_ended(dtrain__council *council, uint64_t group, int rank, const dtrain__membership *members,
                                 int late, dtrain_status *status)
{
    dtrain__store_call **at = council->call(council->self, group), *call = *at;
    const dtrain__error *cause = dtrain__membership_cause(members);
    const char *name = dtrain__store_names[call->what];
    *status = call->status;
    if (call->answered && *status != DTRAIN_OK && call->why[0] == 0)
        dtrain__fail(call->error, *status, "%s on rank %d: no memory for the answer on rank 0", name, rank);
    else if (call->answered && *status != DTRAIN_OK)
        dtrain__fail(call->error, *status, "%s on rank %d: rank 0 says: %s", name, rank, call->why);
    else if (call->answered)
        *status = DTRAIN_OK;
    else if (cause != NULL)
        *status = dtrain__fail(call->error, cause->status, "%s on rank %d: %.480s", name, rank, cause->text);
    else if (council->rank != 0 && council->gone(council->self, 0) != DTRAIN__PRESENT)
        *status = dtrain__fail(call->error, DTRAIN_ERR_PEER_LOST,
                               "%s on rank %d: rank 0, which keeps the store, has left the group", name, rank);
    else if (late)
        *status = dtrain__fail(call->error, DTRAIN_ERR_TIMEOUT,
                               call->what == DTRAIN__STORE_WAIT
                                   ? "%s on rank %d: nobody has set \"%s\" within timeout_ms"
                                   : "%s on rank %d (\"%s\"): rank 0 has not answered within timeout_ms",
                               name, rank, call->key);
    else
        return 0;
    *at = NULL;
    return 1;
}

#endif
