/* ---- >>council ----
 * What the ranks of one world do for each other whatever moves their bytes. They vote (see >>consent), and rank 0 keeps
 * the store for all. A seat is a rank's end of one group: who the members are, what has ended the group, and the call
 * that waits for the council. If ranks are threads, all seats are at one council. A process has a council of its own.
 * These councils send each other messages, which are checked though they come from ranks of the world.
 *
 * The owner of a council guards it, hands it what comes, and says who is gone. */
#ifndef DTRAIN__COUNCIL
#define DTRAIN__COUNCIL
#include "plane.c"
#include "../base/xxh64.c"

#define DTRAIN__EVERY_GROUP UINT64_MAX
#define DTRAIN__STORE_TOTAL_BYTES ((size_t)64 << 20)
#define DTRAIN__ASKERS 1024 /* of one rank, one for each group */

/* Control messages. A council has ASK, ANSWER and CONSENT, and BYE if its owner has none. */
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

/* What became of a rank. LEFT: of its own will. LOST: it has died, or may still run. */
enum { DTRAIN__PRESENT = 0, DTRAIN__LEFT, DTRAIN__LOST };

/* A call that waits at rank 0 for its key to be set. */
typedef struct dtrain__asker {
    struct dtrain__asker *next;
    int rank;
    uint64_t group;
    uint32_t id;
    size_t key_bytes;
    char key[DTRAIN__STORE_KEY_BYTES];
} dtrain__asker;

typedef struct dtrain__entry {
    struct dtrain__entry *next; /* of its chain */
    size_t key_bytes, bytes;
    /* key_bytes of key and bytes of value follow */
} dtrain__entry;

/* A hash table with chains. */
typedef struct dtrain__store {
    dtrain__entry **chains;
    size_t chain_count; /* a power of two; 0: the store is empty */
    size_t count, total;
} dtrain__store;

/* Told the serial of a council that has ended; NULL: nobody asks. */
typedef void (*dtrain__council_close)(uint64_t serial);
DTRAIN__OF_PROCESS(dtrain__council_close, dtrain__council_closing)
DTRAIN__OF_PROCESS(uint64_t, dtrain__council_count)

/* Returns a number that no other council of this process has, for one whose ranks share memory. */
static uint64_t dtrain__council_number(void)
{
    return DTRAIN__ATOMIC_ADD(dtrain__council_count(), 1, SEQ_CST);
}

typedef struct dtrain__consent dtrain__consent;
typedef struct dtrain__council dtrain__council;

/* A rank's end of one group; the first member of what its transport has for the group. */
typedef struct dtrain__seat {
    struct dtrain__seat *next;
    dtrain__council *council;
    uint64_t id; /* the same on all members; 0: the world */
    int rank, size;
    int *worlds;                      /* each member's rank in the world; NULL: the same */
    dtrain__membership own, *members; /* own, or what it shares with the seats of other ranks */
    unsigned char *bound; /* for each rank of the world, 1: its loss ends this group, too; NULL: only members count */
    uint64_t leader;      /* 1 + the id of the group whose end also ends this one; 0: there is none */
    uint64_t calls;       /* collectives that this end has ended when it leaves */
    int forked;           /* the seat of a forked child: touches nothing that the parent still uses */
    dtrain__store_call *asks; /* its calls that wait for the store: one of the program's, and the library's own */
} dtrain__seat;

struct dtrain__council {
    void *self; /* the owner, given to every function */
    dtrain_allocator *allocator;
    dtrain__origin *origin;
    int rank, size;  /* of the world */
    int given_up;    /* the others say that this rank is lost */
    uint64_t news;   /* counts what a waiting caller should look at */
    uint64_t serial; /* unlike any other of this process; 0: its ranks share no memory */
    dtrain__seat *seats;
    dtrain__store store;
    dtrain__asker *askers;
    uint32_t asked;                             /* counts requests to the store */
    dtrain__consent *consents, *spare_consents; /* the latest first */
    int listed, *list;                          /* the ranks of the group being looked at */
    unsigned char *lists;                       /* for each rank, whether it is in list; in the same block */
    /* Sends a message of a head and data. Returns 0 if there is no room, or `to` is gone. NULL: all ranks are here. */
    int (*send)(void *self, int to, int type, const void *head, size_t head_bytes, const void *data, size_t bytes);
    void (*tell)(void *self);                /* tells that something has come that a caller may wait for */
    int (*gone)(void *self, int rank);       /* DTRAIN__PRESENT ... */
    int (*dead)(void *self, int rank);       /* whether it is proved that a rank that is lost has died */
    int (*beside)(void *self, int a, int b); /* whether two ranks are on one machine; NULL: all are */
    uint32_t any_quorum;                     /* whoever is left may go on */
    int64_t look_ns;                         /* when consents are looked at again, although nothing may come */
    dtrain__os_mutex *mutex;                 /* guards the council; NULL: lock does */
    void (*lock)(void *self, int on);
    void (*lost)(dtrain__seat *seat, int world); /* applies what is known of a rank that is gone */
    void (*ended)(dtrain__seat *seat, int about, const dtrain__error *cause); /* tells the members of the end */
    /* Waits until there may be news, or until_ns. `seen`: news so far; turn: how often this call has waited. */
    void (*wait)(dtrain__seat *seat, unsigned turn, int64_t until_ns, uint64_t seen);
    dtrain_status (*exchange)(void *seat, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns);
    const dtrain__plane *plane;
};

/* Reads a message. Each take returns whether there was enough. */
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

/* Takes a text after its length, one byte or two. Refuses a text that does not fit into out, or holds a zero byte. */
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

/* ---- seats ---- */

static DTRAIN__NOINLINE dtrain__seat *dtrain__council_seat(const dtrain__council *council, uint64_t id)
{
    dtrain__seat *seat = council->seats;
    while (seat != NULL && seat->id != id)
        seat = seat->next;
    return seat;
}

/* Checks the name that its members give a group to be made. */
static dtrain_status dtrain__council_check(const dtrain__council *council, uint64_t id, int rank, int size)
{
    if (id != 0 && dtrain__council_seat(council, id) == NULL)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                        "rank %d cannot make its end of a group of %d ranks: its members name it %llx, and another "
                        "group has that name",
                        rank, size, (unsigned long long)id);
}

/* Fills a new seat. Returns 0 if there is no memory.
 *
 *   shared   what it shares with the seats of other ranks, or NULL
 *   worlds   each member's rank in the world; NULL: the same as in the group */
static int dtrain__seat_open(dtrain__seat *seat, dtrain__council *council, uint64_t id, dtrain__membership *shared,
                             const int *worlds, int size, int rank)
{
    seat->council = council;
    seat->id = id;
    seat->rank = rank;
    seat->size = size;
    seat->worlds = worlds != NULL ? (int *)dtrain__alloc(council->allocator, (size_t)size * sizeof(int)) : NULL;
    if (seat->worlds != NULL)
        memcpy(seat->worlds, worlds, (size_t)size * sizeof(int));
    seat->members = shared != NULL ? shared : &seat->own;
    return (seat->worlds != NULL || worlds == NULL) &&
           (shared != NULL || dtrain__membership_open(&seat->own, council->allocator, size));
}

/* Lets whoever is left go on, in all groups of the world. */
static void dtrain__seat_any_quorum(dtrain__seat *seat)
{
    DTRAIN__ATOMIC_STORE(&seat->council->any_quorum, 1u, SEQ_CST);
}

static void dtrain__seat_free(dtrain__seat *seat)
{
    dtrain_allocator *allocator = seat->council->allocator;
    dtrain__membership_free(&seat->own, allocator);
    dtrain__free(allocator, seat->worlds);
    dtrain__free(allocator, seat->bound);
}

static void dtrain__seat_unlink(dtrain__seat *seat)
{
    dtrain__seat **at = &seat->council->seats;
    while (*at != seat)
        at = &(*at)->next;
    *at = seat->next;
}

/* The rank in the world. */
static int dtrain__seat_world(const dtrain__seat *seat, int rank)
{
    return seat->worlds != NULL ? seat->worlds[rank] : rank;
}

/* The rank in the group of the world's rank `world`; -1: not a member. */
static DTRAIN__NOINLINE int dtrain__seat_rank(const dtrain__seat *seat, int world)
{
    if (seat->worlds == NULL)
        return world < seat->size ? world : -1;
    for (int rank = 0; rank < seat->size; rank++)
        if (seat->worlds[rank] == world)
            return rank;
    return -1;
}

/* Ends the group here, and the groups that follow it. The first cause stays. Returns 0 if it had ended before. */
static int dtrain__seat_break(dtrain__seat *seat, const dtrain__error *cause)
{
    dtrain__membership *members = seat->members;
    uint32_t whole = 0;
    if (!DTRAIN__ATOMIC_COMPARE_EXCHANGE(&members->broken, &whole, 1, SEQ_CST))
        return 0;
    members->cause = *cause;
    DTRAIN__ATOMIC_STORE(&members->broken, 2, SEQ_CST);
    for (dtrain__seat *other = seat->council->seats; other != NULL; other = other->next)
        if (DTRAIN__ATOMIC_LOAD(&other->leader, SEQ_CST) == seat->id + 1)
            dtrain__seat_break(other, cause);
    seat->council->tell(seat->council->self);
    return 1;
}

/* Ends the group on all its members. */
static DTRAIN__NOINLINE void dtrain__seat_end(dtrain__seat *seat, int about, const dtrain__error *cause)
{
    if (dtrain__seat_break(seat, cause) && seat->council->send != NULL)
        seat->council->ended(seat, about, cause);
}

/* A member's end of the group is gone, after it had ended `calls` collectives. Operations that need it will fail,
 * others need not. `why` may be empty. */
static void dtrain__seat_left(dtrain__seat *seat, int rank, const char *why, uint64_t calls)
{
    size_t bytes = strlen(why) + 1;
    char *text = NULL;
    if (dtrain__membership_left(seat->members, rank))
        return;
    if (bytes > 1)
        text = (char *)dtrain__alloc(seat->council->allocator, bytes);
    if (text != NULL)
        memcpy(text, why, bytes);
    seat->members->ranks[rank].why = text;
    seat->members->ranks[rank].calls = calls;
    dtrain__membership_leave(seat->members, rank);
    seat->council->tell(seat->council->self);
}

/* A rank of the world is lost. Ends the group if that rank is a member that has not left, or one that the group is
 * bound to. name: of the process, or empty. Returns whether that ended the group. */
static int dtrain__seat_lost(dtrain__seat *seat, int world, dtrain_status status, const char *name, const char *why)
{
    int rank = dtrain__seat_rank(seat, world), named = name[0] != 0, broke;
    dtrain__error cause;
    if (rank < 0 ? seat->bound == NULL || !seat->bound[world] : dtrain__membership_left(seat->members, rank))
        return 0;
    if (rank < 0)
        dtrain__membership_because(&cause, status,
                                   "rank %d of the world%s%s%s, of another group of this mesh, is lost: %.400s", world,
                                   named ? " (" : "", name, named ? ")" : "", why);
    else if (seat->id == 0)
        dtrain__membership_because(&cause, status, "rank %d%s%s%s is lost: %.400s", rank, named ? " (" : "", name,
                                   named ? ")" : "", why);
    else
        dtrain__membership_because(&cause, status, "rank %d (rank %d of the world%s%s) is lost: %.400s", rank, world,
                                   named ? ", " : "", name, why);
    broke = dtrain__seat_break(seat, &cause); /* first: a thread that sees it as left must find the cause */
    if (rank >= 0)
        dtrain__seat_left(seat, rank, why, UINT64_MAX);
    return broke;
}

/* Returns the error for an operation that needs a rank which has left. If that rank left with an error, ends the group.
 */
static dtrain_status dtrain__seat_needs(dtrain__seat *seat, int rank)
{
    const dtrain__error *cause = dtrain__membership_cause(seat->members);
    const char *why = seat->members->ranks[rank].why;
    dtrain__error lost;
    if (cause != NULL)
        return dtrain__report(cause);
    dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d has left the group%s%.400s", rank, why != NULL ? ": " : "",
                 why != NULL ? why : "");
    if (why != NULL)
        dtrain__seat_end(seat, rank, &lost);
    return lost.status;
}

/* ---- what planes share ---- */

static void dtrain__seat_lock(dtrain__seat *seat, int on)
{
    const dtrain__council *council = seat->council;
    if (council->mutex == NULL)
        council->lock(council->self, on);
    else if (on)
        dtrain__os_lock(council->mutex);
    else
        dtrain__os_unlock(council->mutex);
}

static dtrain_status dtrain__seat_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                       size_t *moved)
{
    dtrain_transfer out = {peer, NULL, bytes, 0, 0};
    memcpy(&out.data, &data, sizeof data); /* it is only read */
    dtrain_status status =
        bytes > 0 ? ((dtrain__seat *)self)->council->exchange(self, &out, NULL, deadline_ns) : DTRAIN_OK;
    *moved = out.moved;
    return status;
}

static dtrain_status dtrain__seat_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                       size_t *moved)
{
    dtrain_transfer in = {peer, (unsigned char *)data, bytes, 0, 0};
    dtrain_status status =
        bytes > 0 ? ((dtrain__seat *)self)->council->exchange(self, NULL, &in, deadline_ns) : DTRAIN_OK;
    *moved = in.moved;
    return status;
}

/* Fills in the end of a group; the transport adds what it has beyond this. */
static void dtrain__seat_give(dtrain__seat *seat, dtrain__end *end)
{
    memset(end, 0, sizeof *end);
    end->transport.self = seat;
    end->transport.rank = seat->rank;
    end->transport.size = seat->size;
    end->transport.send = dtrain__seat_send;
    end->transport.recv = dtrain__seat_recv;
    end->transport.exchange = seat->council->exchange;
    end->plane = seat->council->plane;
    end->seat = seat;
    end->origin = seat->council->origin;
    end->members = seat->members;
    end->allocator = seat->council->allocator;
}

/* Lists the ranks of the world whose loss ends the group, members or not. Returns how many; worlds NULL: the most that
 * it may list. */
static int dtrain__seat_bound(const dtrain__seat *seat, int *worlds)
{
    int count = 0;
    if (worlds == NULL)
        return seat->council->size;
    for (int rank = 0; seat->bound != NULL && rank < seat->council->size; rank++)
        if (seat->bound[rank])
            worlds[count++] = rank;
    return count;
}

/* Sets these ranks. Returns 0 if there is no memory. */
static int dtrain__seat_bind(dtrain__seat *seat, const int *worlds, int count)
{
    dtrain__council *council = seat->council;
    unsigned char *bound = (unsigned char *)dtrain__alloc(council->allocator, (size_t)council->size);
    if (bound == NULL)
        return 0;
    for (int i = 0; i < count; i++)
        bound[worlds[i]] = 1;
    dtrain__seat_lock(seat, 1);
    seat->bound = bound;
    for (int i = 0; i < count; i++)
        if (council->gone(council->self, worlds[i]) != DTRAIN__PRESENT)
            council->lost(seat, worlds[i]);
    dtrain__seat_lock(seat, 0);
    return 1;
}

/* Lets whatever ends the leader's group end this one, too. */
static void dtrain__seat_follow(dtrain__seat *seat, const dtrain__seat *leader)
{
    dtrain__seat_lock(seat, 1);
    DTRAIN__ATOMIC_STORE(&seat->leader, leader->id + 1, SEQ_CST); /* before it looks, as the thread that breaks a
                                                                   * group does */
    if (dtrain__membership_broken(leader->members))
        dtrain__seat_break(seat, dtrain__membership_cause(leader->members));
    dtrain__seat_lock(seat, 0);
}

/* As dtrain__seat_needs, for a caller without the lock. */
static dtrain_status dtrain__seat_needed(dtrain__seat *seat, int rank)
{
    dtrain__seat_lock(seat, 1);
    dtrain_status status = dtrain__seat_needs(seat, rank);
    dtrain__seat_lock(seat, 0);
    return status;
}

/* A peer says that `rank` has left after `calls` collectives. */
static void dtrain__seat_skipped(dtrain__seat *seat, int rank, uint64_t calls)
{
    dtrain__seat_lock(seat, 1);
    dtrain__seat_left(seat, rank, "", calls);
    dtrain__seat_lock(seat, 0);
}

/* The end is about to leave, after `calls` collectives. forked: it is a child's copy. */
static void dtrain__seat_leaving(dtrain__seat *seat, int forked, uint64_t calls)
{
    seat->forked = forked;
    seat->calls = calls;
}

/* Gives a council of `size` ranks its memory. Returns 0 if there is none. dtrain__council_free takes it. */
static int dtrain__council_open(dtrain__council *council, int size)
{
    council->list = (int *)dtrain__alloc(council->allocator, (size_t)size * (sizeof(int) + 1));
    if (council->list == NULL)
        return 0;
    council->size = size;
    council->lists = (unsigned char *)(council->list + size);
    return 1;
}

/* Starts a list of ranks of the world; dtrain__council_list_add adds each. */
static void dtrain__council_list(dtrain__council *council)
{
    council->listed = 0;
    memset(council->lists, 0, (size_t)council->size);
}

/* Returns 0 for a number that is no rank, or is in the list already. */
static int dtrain__council_list_add(dtrain__council *council, uint64_t rank)
{
    if (rank >= (uint64_t)council->size || council->lists[rank])
        return 0;
    council->lists[rank] = 1;
    council->list[council->listed++] = (int)rank;
    return 1;
}

/* Whether two ranks are on one machine. */
static int dtrain__council_beside(const dtrain__council *council, int a, int b)
{
    return council->beside == NULL || council->beside(council->self, a, b);
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

/* In the number of a group, of a call of the library's own. Such calls only set and get, so they are not in the way of
 * the group's call that waits. */
#define DTRAIN__STORE_OWN ((uint64_t)1 << 63)

static unsigned char *dtrain__entry_value(dtrain__entry *entry)
{
    return (unsigned char *)(entry + 1) + entry->key_bytes;
}

/* Returns where the entry of a key is linked, or would be. The store must have chains. */
static dtrain__entry **dtrain__store_place(const dtrain__store *store, const void *key, size_t key_bytes)
{
    dtrain__entry **at = &store->chains[dtrain__xxh64_of(key, key_bytes, 0) & (store->chain_count - 1)];
    while (*at != NULL && ((*at)->key_bytes != key_bytes || memcmp(*at + 1, key, key_bytes) != 0))
        at = &(*at)->next;
    return at;
}

/* Returns the entry of a key; NULL: it is not set. */
static dtrain__entry *dtrain__store_find(const dtrain__store *store, const void *key, size_t key_bytes)
{
    return store->chain_count > 0 ? *dtrain__store_place(store, key, key_bytes) : NULL;
}

/* Makes room for one more entry. Returns 0 if there is no memory. */
static int dtrain__store_grow(dtrain__store *store, dtrain_allocator *allocator)
{
    dtrain__store larger = *store;
    if (store->count < store->chain_count)
        return 1;
    larger.chain_count = store->chain_count > 0 ? 2 * store->chain_count : 16;
    larger.chains = (dtrain__entry **)dtrain__alloc(allocator, larger.chain_count * sizeof *larger.chains);
    if (larger.chains == NULL)
        return store->chain_count > 0; /* then chains get longer */
    for (size_t i = 0; i < store->chain_count; i++)
        for (dtrain__entry *entry = store->chains[i], *next; entry != NULL; entry = next) {
            dtrain__entry **at = dtrain__store_place(&larger, entry + 1, entry->key_bytes);
            next = entry->next;
            entry->next = NULL;
            *at = entry;
        }
    dtrain__free(allocator, store->chains);
    *store = larger;
    return 1;
}

/* Frees the entry that is linked at a place. */
static void dtrain__store_drop(dtrain__store *store, dtrain_allocator *allocator, dtrain__entry **at)
{
    dtrain__entry *entry = *at;
    *at = entry->next;
    store->total -= sizeof *entry + entry->key_bytes + entry->bytes;
    store->count--;
    dtrain__free(allocator, entry);
}

/* Removes a key; one that is not set is no error. The last one takes the table with it. */
static void dtrain__store_remove(dtrain__store *store, dtrain_allocator *allocator, const void *key, size_t key_bytes)
{
    if (dtrain__store_find(store, key, key_bytes) == NULL)
        return;
    dtrain__store_drop(store, allocator, dtrain__store_place(store, key, key_bytes));
    if (store->count > 0)
        return;
    dtrain__free(allocator, store->chains);
    store->chains = NULL;
    store->chain_count = 0;
}

static void dtrain__store_free(dtrain__store *store, dtrain_allocator *allocator)
{
    for (size_t i = 0; i < store->chain_count; i++)
        for (dtrain__entry *entry = store->chains[i], *next; entry != NULL; entry = next) {
            next = entry->next;
            dtrain__free(allocator, entry);
        }
    dtrain__free(allocator, store->chains);
}

/* Sets key to value. On an error the old value stays. The caller has checked the sizes. */
static dtrain_status dtrain__store_put(dtrain__store *store, dtrain_allocator *allocator, const void *key,
                                       size_t key_bytes, const void *value, size_t bytes)
{
    size_t all = sizeof(dtrain__entry) + key_bytes + bytes;
    dtrain__entry *entry = NULL, *old = dtrain__store_find(store, key, key_bytes);
    size_t rest = store->total - (old != NULL ? sizeof *old + old->key_bytes + old->bytes : 0); /* stays */
    if (rest + all <= DTRAIN__STORE_TOTAL_BYTES)
        entry = (dtrain__entry *)dtrain__alloc(allocator, all);
    if (entry == NULL || !dtrain__store_grow(store, allocator)) {
        dtrain__free(allocator, entry);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "store_set: no room for %zu bytes; the store holds %zu of %zu bytes; delete keys that are "
                            "no longer needed (dtrain_store_delete)",
                            all, store->total, DTRAIN__STORE_TOTAL_BYTES);
    }
    entry->key_bytes = key_bytes;
    entry->bytes = bytes;
    memcpy(entry + 1, key, key_bytes);
    if (bytes > 0)
        memcpy(dtrain__entry_value(entry), value, bytes);
    dtrain__entry **at = dtrain__store_place(store, key, key_bytes);
    if (*at != NULL)
        dtrain__store_drop(store, allocator, at);
    entry->next = *at;
    *at = entry;
    store->count++;
    store->total += all;
    return DTRAIN_OK;
}

static void dtrain__council_answered(dtrain__council *council, uint64_t group, uint32_t id, dtrain_status status,
                                     int found, const void *data, size_t bytes)
{
    dtrain__store_call *call = NULL;
    for (const dtrain__seat *seat = council->seats; seat != NULL && call == NULL; seat = seat->next)
        for (call = seat->id == (group & ~DTRAIN__STORE_OWN) ? seat->asks : NULL; call != NULL && call->id != id;)
            call = call->next;
    if (call == NULL)
        return; /* it has given up */
    call->status = status;
    if (status != DTRAIN_OK)
        snprintf(call->why, sizeof call->why, "%.*s", (int)(bytes < 300 ? bytes : 300), (const char *)data);
    else if (call->what == DTRAIN__STORE_GET && !found)
        *call->bytes = SIZE_MAX; /* DTRAIN_STORE_ABSENT */
    else if (call->bytes != NULL) {
        if (bytes > 0 && call->capacity > 0)
            memcpy(call->value, data, bytes < call->capacity ? bytes : call->capacity);
        *call->bytes = bytes;
    }
    call->answered = 1;
    council->tell(council->self);
}

/* Answers a store request: rank 0's own at once, another rank's by a message. */
static void dtrain__council_answer(dtrain__council *council, const dtrain__asker *asker, dtrain_status status,
                                   int found, const void *data, size_t bytes)
{
    unsigned char head[15];
    if (council->send == NULL || asker->rank == council->rank) {
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

/* Answers every call that waited for a key, if the key is set. */
static void dtrain__council_wake(dtrain__council *council, const char *key, size_t key_bytes)
{
    dtrain__entry *entry = dtrain__store_find(&council->store, key, key_bytes);
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

/* Forgets what a rank's group waits for: it asks anew, or has left. */
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

/* Rank 0: serves one request. */
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
    if (what == DTRAIN__STORE_DELETE) { /* a call that waits for the key goes on waiting */
        dtrain__store_remove(&council->store, council->allocator, from->key, from->key_bytes);
        dtrain__council_answer(council, from, DTRAIN_OK, 0, NULL, 0);
        return;
    }
    entry = dtrain__store_find(&council->store, from->key, from->key_bytes);
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
        !dtrain__take(reader, &what, 1) || what > DTRAIN__STORE_DELETE ||
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

/* Takes a call off its seat. */
static void dtrain__council_unask(dtrain__seat *seat, const dtrain__store_call *call)
{
    dtrain__store_call **at = &seat->asks;
    while (*at != call)
        at = &(*at)->next;
    *at = call->next;
}

/* Names the rank that keeps the store. In a group that it is no member of, rank 0 is another one. */
static const char *dtrain__council_keeper(const dtrain__seat *seat)
{
    return dtrain__seat_world(seat, 0) == 0 ? "rank 0" : "rank 0 of the first world";
}

/* Begins a store call: sends the request, or serves it on rank 0. */
static dtrain_status dtrain__council_ask(dtrain__seat *seat, dtrain__store_call *call)
{
    dtrain__council *council = seat->council;
    unsigned char head[15 + DTRAIN__STORE_KEY_BYTES];
    size_t bytes = call->what == DTRAIN__STORE_SET ? call->capacity : 0;
    dtrain__asker asker;
    asker.next = NULL;
    asker.rank = dtrain__seat_world(seat, seat->rank);
    asker.group = seat->id | (call->own ? DTRAIN__STORE_OWN : 0);
    asker.id = call->id = ++council->asked != 0 ? council->asked : ++council->asked;
    asker.key_bytes = strlen(call->key);
    snprintf(asker.key, sizeof asker.key, "%s", call->key);
    call->answered = 0;
    call->next = seat->asks;
    seat->asks = call;
    if (council->rank == 0) {
        dtrain__council_serve(council, &asker, call->what, call->value, bytes);
        return DTRAIN_OK;
    }
    dtrain__put_le(head, asker.group, 8);
    dtrain__put_le(head + 8, asker.id, 4);
    head[12] = (unsigned char)call->what;
    dtrain__put_le(head + 13, asker.key_bytes, 2);
    memcpy(head + 15, asker.key, asker.key_bytes);
    if (council->send(council->self, 0, DTRAIN__FRAME_ASK, head, 15 + asker.key_bytes, call->value, bytes) ||
        council->gone(council->self, 0) != DTRAIN__PRESENT) /* then the wait for the answer returns the error */
        return DTRAIN_OK;
    dtrain__council_unask(seat, call);
    return dtrain__fail(call->error, DTRAIN_ERR_MEMORY,
                        "%s on rank %d (\"%s\"): no memory for the request, or %s does not read requests",
                        dtrain__store_names[call->what], seat->rank, call->key, dtrain__council_keeper(seat));
}

/* Returns whether a call has ended, and takes it off the seat then. late: it ends now. */
static int dtrain__council_ended(dtrain__seat *seat, const dtrain__store_call *call, int late, dtrain_status *status)
{
    const dtrain__council *council = seat->council;
    const dtrain__error *cause = dtrain__membership_cause(seat->members);
    const char *name = dtrain__store_names[call->what], *keeper = dtrain__council_keeper(seat);
    int rank = seat->rank;
    *status = call->status;
    if (call->answered && *status != DTRAIN_OK && call->why[0] == 0)
        dtrain__fail(call->error, *status, "%s on rank %d: no memory for the answer on %s", name, rank, keeper);
    else if (call->answered && *status != DTRAIN_OK)
        dtrain__fail(call->error, *status, "%s on rank %d: %s says: %s", name, rank, keeper, call->why);
    else if (call->answered)
        *status = DTRAIN_OK;
    else if (cause != NULL)
        *status = dtrain__fail(call->error, cause->status, "%s on rank %d: %.480s", name, rank, cause->text);
    else if (council->rank != 0 && council->gone(council->self, 0) != DTRAIN__PRESENT)
        *status =
            dtrain__fail(call->error, DTRAIN_ERR_PEER_LOST,
                         "%s on rank %d: %s, which kept the store, is gone, and the store with it; broadcast the bytes "
                         "instead, or let the ranks that are left make a new world",
                         name, rank, keeper);
    else if (late)
        *status = dtrain__fail(call->error, DTRAIN_ERR_TIMEOUT,
                               call->what == DTRAIN__STORE_WAIT
                                   ? "%s on rank %d: nobody has set \"%s\" within timeout_ms"
                                   : "%s on rank %d (\"%s\"): %s has not answered within timeout_ms",
                               name, rank, call->key, keeper);
    else
        return 0;
    dtrain__council_unask(seat, call);
    return 1;
}

#endif
