/* ---- >>control_plane ----
 * What a group asks of its transport besides moving bytes. Who is there, votes and the store are the council's, the
 * same for all transports (see >>council). Transports differ in how they make groups, where ranks are, and what they
 * know of a rank that others wait for. Each transport of this library has a table of these functions. Code above asks
 * no other question about the transport.
 *
 * Functions get the transport's `self`. Any thread of the rank that is in a call of the group may call them, except
 * where they say more. */
#ifndef DTRAIN__PLANE
#define DTRAIN__PLANE
#include "../base/memory.c"
#include "../base/sha256.c"
#include "../base/worker.c"
#include "../wire/keys.c"
#include "../wire/transport.h"

#define DTRAIN__RANK_BITS 24 /* of a rank in the name of a group, and beside other numbers */
#define DTRAIN__MAX_RANKS (1 << DTRAIN__RANK_BITS)
#define DTRAIN__FINGERPRINT_BYTES 128
#define DTRAIN__MAX_LANES 8
#define DTRAIN__LAST_CHAIN 4 /* most ranks that one heartbeat tells of */

DTRAIN__FAST_BEGIN

/* ---- membership ----
 * Who has left a group, in which order, after how many collectives and why; and what has broken the group.
 *
 * Invariants: any thread may break the group, and the first cause stays. The owner of the membership marks one rank at
 * a time as left. Any thread reads without a lock: what is said of a rank is whole once its `left` is set. */

typedef struct dtrain__departure {
    uint32_t left;  /* 0: it is there; else its place among the leavers, from 1 */
    uint64_t calls; /* collectives that it had ended by then */
    char *why;      /* NULL: it gave no reason */
} dtrain__departure;

typedef struct dtrain__membership {
    uint32_t broken;  /* 0: whole; 1: the cause is being written; 2: broken, and the cause can be read */
    uint32_t leavers; /* how many ranks have left */
    int size;
    dtrain__departure *ranks; /* size of them; NULL if nobody tells who has left */
    dtrain__error cause;
} dtrain__membership;

/* Returns 0 when there is no memory. */
static int dtrain__membership_open(dtrain__membership *members, dtrain_allocator *allocator, int size)
{
    members->size = size;
    members->ranks = (dtrain__departure *)dtrain__alloc(allocator, (size_t)size * sizeof(dtrain__departure));
    return members->ranks != NULL;
}

static void dtrain__membership_free(dtrain__membership *members, dtrain_allocator *allocator)
{
    for (int rank = 0; members->ranks != NULL && rank < members->size; rank++)
        dtrain__free(allocator, members->ranks[rank].why);
    dtrain__free(allocator, members->ranks);
}

static int dtrain__membership_broken(const dtrain__membership *members)
{
    return DTRAIN__ATOMIC_LOAD(&members->broken, SEQ_CST) != 0;
}

/* Returns what has broken the group; NULL: nothing. */
static DTRAIN__NOINLINE const dtrain__error *dtrain__membership_cause(const dtrain__membership *members)
{
    if (!dtrain__membership_broken(members))
        return NULL;
    while (DTRAIN__ATOMIC_LOAD(&members->broken, ACQUIRE) != 2)
        dtrain__os_yield();
    return &members->cause;
}

static int dtrain__membership_left(const dtrain__membership *members, int rank)
{
    return DTRAIN__ATOMIC_LOAD(&members->leavers, SEQ_CST) > 0 &&
           DTRAIN__ATOMIC_LOAD(&members->ranks[rank].left, SEQ_CST) != 0;
}

static void dtrain__membership_leave(dtrain__membership *members, int rank)
{
    uint32_t turn = DTRAIN__ATOMIC_ADD(&members->leavers, 1, SEQ_CST);
    DTRAIN__ATOMIC_STORE(&members->ranks[rank].left, turn, SEQ_CST);
}

/* Returns the first rank to leave of those that left before collective `number`; -1: none. It looks again if ranks have
 * left meanwhile: it may have seen one of them and not the one before. */
static int dtrain__membership_misses(const dtrain__membership *members, uint64_t number)
{
    uint32_t leavers, seen = 0;
    int missing = -1;
    while ((leavers = DTRAIN__ATOMIC_LOAD(&members->leavers, SEQ_CST)) != seen) {
        uint32_t first = UINT32_MAX;
        seen = leavers;
        missing = -1;
        for (int rank = 0; rank < members->size; rank++) {
            uint32_t left = DTRAIN__ATOMIC_LOAD(&members->ranks[rank].left, SEQ_CST);
            if (left == 0 || left >= first || members->ranks[rank].calls >= number)
                continue;
            first = left;
            missing = rank;
        }
    }
    return missing;
}

DTRAIN__FAST_END

/* Writes what ends a group. The thread's own last error stays. */
DTRAIN__PRINTF(3, 4)
static void dtrain__membership_because(dtrain__error *cause, dtrain_status status, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    dtrain__error kept = dtrain__thread_error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__fail(cause, status, "%s", text);
    dtrain__thread_error = kept;
}

/* ---- the plane ---- */

/* What the groups of one world have in common in this process. */
typedef struct dtrain__origin {
    uint64_t serial;                                               /* counts the groups that were started */
    dtrain__os_mutex mutex;                                        /* guards service */
    void *service;                                                 /* the thread that drives these groups */
    void (*last_gone)(void *service);                              /* stops it before the last group is gone */
    dtrain__bell *bell;                                            /* what it waits for; NULL: it calls step instead */
    void (*step)(struct dtrain__origin *origin, int64_t until_ns); /* looks after connections, only on its thread */
    void (*kick)(struct dtrain__origin *origin);                   /* cuts step short */
} dtrain__origin;

typedef struct dtrain__plane dtrain__plane;

/* One rank's end of a group, as its transport provides it. */
typedef struct dtrain__end {
    dtrain_transport transport;
    const dtrain__plane *plane;
    struct dtrain__seat *seat; /* transport.self */
    dtrain__origin *origin;
    dtrain__membership *members;
    struct dtrain__shared *shared; /* NULL: ranks do not read each other's buffers */
    int long_runs;                 /* long runs of bytes move best in few large pieces */
    dtrain_allocator *allocator;
} dtrain__end;

enum { DTRAIN__STORE_SET = 0, DTRAIN__STORE_GET, DTRAIN__STORE_WAIT, DTRAIN__STORE_DELETE };

#define DTRAIN__STORE_KEY_BYTES 256
#define DTRAIN__STORE_VALUE_BYTES ((size_t)64 << 10)

static const char *const dtrain__store_names[] = {"store_set", "store_get", "store_wait", "store_delete"};

/* A call to the world's store, which keeps byte strings by name. */
typedef struct dtrain__store_call {
    struct dtrain__store_call *next; /* of its seat */
    int what;                        /* DTRAIN__STORE_SET ... */
    const char *key;
    void *value;             /* capacity bytes; for a SET the value itself, which is only read */
    size_t capacity, *bytes; /* bytes: NULL if nothing comes back */
    dtrain__error *error;    /* the group's */
    int own;                 /* 1: a call of the library's own, which another thread makes beside the program's */
    uint32_t id;             /* from here on: the request to rank 0 and its answer */
    int answered;
    dtrain_status status;
    char why[301];
} dtrain__store_call;

/* What moves bytes between processes of one host: desc.transport. ANY: shared memory where it can be had. MPI: those of
 * all hosts. */
enum {
    DTRAIN__TRANSPORT_ANY = 0,
    DTRAIN__TRANSPORT_TCP,
    DTRAIN__TRANSPORT_UNIX,
    DTRAIN__TRANSPORT_SHM,
    DTRAIN__TRANSPORT_MPI
};

/* How a world of processes forms. */
typedef struct dtrain__hub_desc {
    const char *root, *listen_on, *fingerprint, *believed;
    int insecure, listen_fd, connections, transport, polls;
    int64_t heartbeat_ms, reconnect_ms, timeout_ms;
    void (*on_address)(void *user, const char *address);
    void *on_address_user;
} dtrain__hub_desc;

/* A group to be made of ranks of another one. */
typedef struct dtrain__group_desc {
    uint64_t id;       /* its name: the same on all members, and of no other group */
    const int *worlds; /* each member's rank in the world */
    int size, rank;
} dtrain__group_desc;

/* A vote of the ranks that are left, and its result. */
typedef struct dtrain__agreement {
    int kind;  /* of the call that votes */
    int voted; /* in: this rank has voted in an earlier call */
    uint64_t number;
    uint64_t flags;       /* in: this rank's; out: the AND of all */
    uint64_t id;          /* out: the name of the group of those that continue */
    uint64_t *goes_on;    /* out: for each rank, whether it continues */
    dtrain_status status; /* out */
    int awaited;          /* out: a rank that has not voted, or -1 */
    int given_up;         /* out: the others have given this rank up */
    int starved;          /* out: there was no memory for this rank's vote, so it has none */
} dtrain__agreement;

/* Writes what a rank does, in bytes that only its owner understands. *awaits: the rank that it waits for, or -1. */
typedef size_t (*dtrain__tell)(void *record, unsigned char *out, size_t capacity, int *awaits);

#define DTRAIN__SHARING_BYTES 64 /* of an offer, and of a verdict */

/* How processes come to share the memory in which they post collectives: see >>arena. */
typedef struct dtrain__sharing {
    /* Writes this rank's offer. polls: it has progress by poll. Returns 0 if all ranks know that there is nothing to
     * share. */
    int (*offer)(void *self, int polls, unsigned char *offer);
    /* Before the others see the offer, and then before its verdict: makes a part of what was offered, or opened.
     * Returns whether that is done; else it was stopped at until_ns. It may withdraw the offer. */
    int (*prepare)(void *self, int opened, unsigned char *offer, int64_t until_ns);
    /* Opens the offers of all ranks, and writes this rank's verdict over its own. */
    void (*open)(void *self, unsigned char *offers);
    /* Takes the verdicts of all ranks. Returns NULL if one was bad. */
    struct dtrain__shared *(*keep)(void *self, const unsigned char *verdicts);
    void (*doze)(void *self); /* the service thread will sleep, and a peer's post is to wake it */
} dtrain__sharing;

struct dtrain__plane {
    int in_process; /* ranks are threads of one process, which owns what was given to publish, as peers may read it */
    int checks;     /* messages carry a checksum of their data, unless the desc forbids it */
    dtrain_status (*group)(void *self, const dtrain__group_desc *desc, dtrain__end *end); /* makes this rank's end */
    /* From here on a function may be NULL: the transport has nothing to say or do there. */
    uint64_t (*host)(void *self, int rank); /* equal for ranks that share a host; 0: unknown */
    /* Says whether all ranks have come to a new world. wait: waits until they have, or deadline_ns. */
    dtrain_status (*form)(void *self, int *formed, int64_t started_ns, int64_t deadline_ns, int wait);
    /* Says what carries bytes to a rank, and why; leaves text alone if there is no connection. */
    void (*way)(void *self, int rank, char *text, size_t capacity);
    /* Lets peers know what this rank does, as `tell` writes it from the record; tell NULL: no longer. */
    void (*publish)(void *self, dtrain__tell tell, void *record);
    /* Copies what `rank` was last heard to do, if that was after after_ns. Returns its bytes, and its age. */
    size_t (*last)(void *self, int rank, int64_t after_ns, void *out, size_t capacity, int64_t *age_ns);
    void (*suspect)(void *self, int awaited, char *text, size_t capacity); /* why it may not answer, if known */
    void (*rest)(void *self); /* the service thread is about to look at this group's work */
    const dtrain__sharing *sharing;
    /* Returns how many bytes of messages have come from a rank that shares posts, and were not taken. */
    size_t (*untaken)(void *self, int rank);
};

/* Returns a number that this process gives to no other group. */
static uint64_t dtrain__origin_serial(dtrain__origin *origin)
{
    return DTRAIN__ATOMIC_ADD(&origin->serial, 1, SEQ_CST);
}

/* The last group is gone: stops the service. */
static void dtrain__origin_stop(dtrain__origin *origin)
{
    if (origin->last_gone != NULL)
        origin->last_gone(origin->service);
}

/* Makes a group's name, unlike any other: a count that `rank` keeps, and rank itself. */
static uint64_t dtrain__plane_group_id(uint64_t serial, int rank)
{
    return serial << DTRAIN__RANK_BITS | (uint64_t)rank;
}

/* Returns the rank that made the id. */
static int dtrain__plane_group_maker(uint64_t id)
{
    return (int)(id & (DTRAIN__MAX_RANKS - 1));
}

/* Returns the same number in all processes of this host. */
static uint64_t dtrain__plane_host(void)
{
    unsigned char id[128], digest[32];
    dtrain__os_host_id(id);
    dtrain_sha256(id, sizeof id, digest);
    return dtrain__get_le(digest, 8);
}

/* Returns n if exactly the ranks with equal rank / n share a host; 0: there is no such n, or hosts are unknown. */
static int dtrain__plane_node_ranks(const dtrain__plane *plane, void *self, int size)
{
    int n = 1;
    if (plane->host == NULL)
        return 0;
    while (n < size && plane->host(self, n) == plane->host(self, 0))
        n++;
    for (int rank = 0; rank < size; rank++) {
        uint64_t host = plane->host(self, rank);
        if (host == 0 || host != plane->host(self, rank - rank % n) ||
            (rank >= n && rank % n == 0 && host == plane->host(self, rank - 1)))
            return 0;
    }
    return n;
}

#endif
