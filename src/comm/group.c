/* ---- >>group ----
 * One rank's end of a group: its parts, the call that is in it, and what it knows of the other ranks. Only the types of
 * operations are here, as a group keeps them; >>op has what is done with one. */
#ifndef DTRAIN__GROUP
#define DTRAIN__GROUP
#include "../base/os_files.c"
#include "../base/status.c"
#include "../base/memory.c"
#include "../base/worker.c"
#include "../tensor/fold.c"
#include "../transport/threads.c"
#include "../transport/socket_plane.c"
#include "groups.h"
DTRAIN__FAST_BEGIN

#define DTRAIN__MESSAGE_SMALL ((size_t)4096) /* payload that travels in one piece with its header */

/* In the order of dtrain_call_kind. */
typedef enum dtrain__kind {
    DTRAIN__ALL_REDUCE = 1,
    DTRAIN__REDUCE_SCATTER,
    DTRAIN__ALL_GATHER,
    DTRAIN__BROADCAST,
    DTRAIN__REDUCE,
    DTRAIN__GATHER,
    DTRAIN__SCATTER,
    DTRAIN__ALL_TO_ALL,
    DTRAIN__SCAN,
    DTRAIN__EXSCAN,
    DTRAIN__BARRIER,
    DTRAIN__SEND,
    DTRAIN__RECV,
    DTRAIN__EXCHANGE,
    DTRAIN__KINDS
} dtrain__kind;

#define DTRAIN__ON_DEVICE ((uint64_t)1 << 32)
#define DTRAIN__MEETING ((uint64_t)2 << 32)
#define DTRAIN__WAY_ANY ((uint64_t)1 << 16) /* in a call's algorithm: the order is free */
#define DTRAIN__WAY_NODE 32                 /* from this bit on: the ranks of a node */

/* What two ranks must agree on, in 64-bit words; the first DTRAIN__POST_WORDS of a message header. */
typedef struct dtrain__call {
    uint64_t kind; /* a message is a DTRAIN__SEND on both sides */
    uint64_t number;
    uint64_t dtype;
    uint64_t op;
    uint64_t count;
    uint64_t root;      /* of a message: the collectives before it */
    uint64_t algorithm; /* and everything else that its steps depend on: see dtrain__op_way */
    uint64_t ranks;
    uint64_t parts; /* a hash of per-rank counts and offsets, or elements of a row; 0: shards as of dtrain_shard */
    uint64_t group;
    uint64_t
        form; /* 0: one call; ON_DEVICE, MEETING: see dtrain__op_call_whole; else the number of calls that were fused */
    uint64_t first;  /* the count of the first fused call, or of the call that this is a step of */
    uint64_t digest; /* of the counts of all of them; see dtrain__op_call_whole */
} dtrain__call;

typedef struct dtrain__message_header {
    uint64_t magic;
    dtrain__call call;
    uint64_t tag;
    uint64_t bytes;
    uint64_t data_check; /* of what follows; 0: not checked */
    uint64_t check;      /* of everything above */
} dtrain__message_header;

/* What has moved in one direction between this rank and a peer. */
typedef struct dtrain__direction {
    uint64_t number;                /* of the last message */
    size_t owed;                    /* bytes of a message that was cut off, still to move */
    dtrain_work *first, *last;      /* the queued messages, in order: the first one moves */
    struct dtrain__direction *next; /* that has messages, too */
} dtrain__direction;

/* The buffers of one of several fused calls. */
typedef struct dtrain__segment {
    const void *in;
    void *out;
    size_t count;
} dtrain__segment;

typedef struct dtrain__op {
    dtrain__kind kind;
    dtrain_dtype dtype;
    dtrain_op op;
    int root; /* or the peer: of a send, of a recv, of an exchange's message out; -1: none */
    int from; /* of an exchange's message in; -1: none */
    size_t count;
    size_t in_count;                                           /* of an exchange's message in */
    size_t row;                                                /* parts consist of whole rows of this many elements */
    const size_t *counts, *offsets, *out_counts, *out_offsets; /* the caller's, one for each rank; out_: of an
                                                                * all-to-all */
    const void *in;
    void *out;
    size_t reach[2]; /* bytes of in and out, in a group that is watched */
    int scattered;   /* in is an array of dtrain__segment with count elements in all */
    int partial;     /* a reduce-scatter with counts, of sums: results are partial sums, which are not rounded */
    dtrain_algorithm algorithm;
    uint64_t number, in_number;
    uint64_t check, check_due;       /* checksum of incoming data: so far, and as the header says; 0: not checked */
    uint64_t turn;                   /* its number among the FUSED operations */
    int64_t started_ns, deadline_ns; /* of the call */
    int64_t run_ns, moved_ns;        /* when its turn came and its first byte moved; 0: not yet */
    int64_t ended_ns;
    uint64_t serial;              /* of its record; 0: none yet */
    dtrain_algorithm noted;       /* the algorithm in its record */
    int async, queued;            /* has a handle of the caller's; has waited for its turn */
    uint64_t form, first, digest; /* as in the call */
    uint64_t whole_parts;         /* a hash of the counts of the call that this is a step of; 0: it has none */
    unsigned char *packet;        /* header and small payload of a queued message; NULL: the group's buffers serve */
    int phase;
    int warned;                /* the log has said whom this operation awaits */
    int awaited;               /* the peer it awaits, or -1 */
    int touched;               /* peers may be inside this rank's buffers, or bytes have moved */
    int inlined;               /* posted: its inputs are so small that they lie in the posts or bounce buffers */
    int posted;                /* all ranks have posted it, and it continues by messages */
    size_t rounds, put, taken; /* through bounce buffers: all, and how many this rank has put and taken */
    int salvages;            /* a recv that began on a broken group: takes a message that has arrived whole, or fails */
    size_t at;               /* progress inside the phase */
    size_t entered, send_at; /* steps that are prepared; the step whose message is being sent */
    size_t sent, received;   /* bytes of it that have moved, headers included; SIZE_MAX: all */
    dtrain__error error;
} dtrain__op;

#define DTRAIN__MESSAGE_BYTES (sizeof(dtrain__message_header) + DTRAIN__MESSAGE_SMALL)

struct dtrain_work {
    dtrain_comm *comm;
    dtrain_work *next;
    dtrain_work *older; /* of all handles that the group has made */
    uint32_t done;
    int ended;     /* the next sweep takes it off the queue */
    uint32_t mark; /* DTRAIN__WORK_MARK until the handle is waited for; DTRAIN__GONE: its group is destroyed */
    dtrain__op op;
    unsigned char packet[DTRAIN__MESSAGE_BYTES];
};

typedef struct dtrain__note {
    dtrain_work *work;
    dtrain__op op;
} dtrain__note;

/* The time that this rank's callers have spent waiting in a group and in those made from it. It outlives its group as
 * long as such groups exist. */
typedef struct dtrain__blocked {
    struct dtrain__blocked *above; /* of the group that this one was made from */
    int64_t ns;
    uint32_t held;
} dtrain__blocked;

typedef struct dtrain__service dtrain__service;
typedef struct dtrain__recorder dtrain__recorder;

/* Words that tell a live object from a freed one, until somebody writes to the memory. */
#define DTRAIN__COMM_MARK 0x6d6d6f63u
#define DTRAIN__WORK_MARK 0x6b726f77u
#define DTRAIN__GONE 0x656e6f67u

/* Where a buffer was found last, so that the next search is short; see >>window. */
typedef struct dtrain__window_found {
    struct dtrain__window *window;
    uint64_t epoch; /* these are its own while nothing has changed since */
    uint64_t id;
    uintptr_t begin; /* of this rank's part, or of pages of it that are mapped again at `place` */
    size_t bytes, place;
} dtrain__window_found;

/* Between two ranks; see >>message. */
typedef struct dtrain__messages {
    dtrain__direction **directions; /* from (way 0) and to (way 1) each rank; made when it has a message with it */
    unsigned char out[DTRAIN__MESSAGE_BYTES], in[DTRAIN__MESSAGE_BYTES]; /* header and small payload */
    unsigned char waste[2][4096];                                        /* where owed bytes go */
    uint64_t missed; /* the last collective that a leaver missed << RANK_BITS, and that rank; 0: none */
    unsigned char held[DTRAIN__MESSAGE_BYTES]; /* of a message from held_from that arrived during a collective; its recv
                                                * takes it */
    int held_from;
    size_t held_bytes, held_at;
} dtrain__messages;

/* Work that waits for its turn; see >>queue. */
typedef struct dtrain__queue {
    dtrain__os_mutex mutex;                    /* head, tail, spare; held for a few instructions */
    dtrain__os_mutex drive;                    /* held by the thread that advances the work; guards busy */
    dtrain_work *head, *tail, *spare, *newest; /* head: less the messages that are in their directions */
    uint32_t pending;                          /* queued and not done */
    dtrain__direction *busy, **busy_end;       /* those that have queued messages */
} dtrain__queue;

typedef struct dtrain__fuse {
    int open; /* between fuse_begin and fuse_end */
    dtrain__note *notes;
    size_t noted;
    unsigned char *packed; /* buffers of fused calls, one after another */
} dtrain__fuse;

/* With DTRAIN_DEBUG=1 a fault in a buffer is told of; see >>watch. */
typedef struct dtrain__watched {
    int on;
    dtrain_comm *next;
    const dtrain__op *running; /* the operation of a call that waits in no queue; NULL: none */
} dtrain__watched;

/* Agreements of those that are left; see >>survive. */
typedef struct dtrain__voted {
    uint64_t count;   /* that this end has taken part in */
    int64_t begun_ns; /* of the one that is pending; 0: none is */
    int kind;
    void *room; /* of the last split of this group; the next one uses it */
} dtrain__voted;

/* Who uses a group, so that misuse is told. */
typedef struct dtrain__use {
    uint32_t mark;    /* DTRAIN__COMM_MARK; DTRAIN__GONE once it is destroyed */
    uintptr_t caller; /* the thread that is in a call of the group; 0: none */
    const char *call; /* that call's name */
    long process;     /* the one that made the group */
} dtrain__use;

struct dtrain_comm {
    int rank, size;
    dtrain_transport transport;
    const dtrain__plane *plane;
    dtrain__seat *seat;
    dtrain__origin *origin;
    dtrain__membership *members;
    dtrain__shared *shared;    /* NULL: the ranks share no posts */
    struct dtrain__meet *meet; /* of processes, while they find out whether they share posts */
    int decided;               /* they know */
    int forming;               /* the group is not complete yet */
    int checks;                /* messages carry a checksum of their data */
    int long_runs;             /* long runs of bytes move best in few large pieces */
    int node_ranks;            /* ranks r with equal r / node_ranks share a host; 0: nodes are uneven or unknown */
    int part; /* made by a split, in one step or several, that left ranks out; the same on every rank */
    int64_t started_ns;
    int64_t poll_until_ns; /* the end of dtrain_comm_poll's budget */
    int alone;             /* a world of one because no launcher has set a rank; 0 once the log says so */
    dtrain_comm_desc desc;
    dtrain_allocator *allocator;
    dtrain__bell *bell, own_bell;
    dtrain__error error;
    dtrain__error broken; /* what a message operation of this rank broke the group with */
    uint64_t number;      /* of the last collective */
    uint64_t turn;        /* of the last fused one */
    uint64_t rounds;      /* of all operations that went through bounce buffers */
    dtrain__recorder *recorder;
    int published;                 /* the transport owns it */
    dtrain_extent *parts, *others; /* size each, of the operation under way; others: what an all-to-all receives.
                                    * One block with the next three, made at the first operation */
    const void **ins;              /* size pointers each, for folds */
    void **outs;
    unsigned copies;                       /* to bounce buffers; some are timed */
    int streams;                           /* these copies bypass the caches */
    unsigned char **buffers;               /* between processes: (2 r) the input and (2 r + 1) the output of rank r */
    uint64_t group;                        /* its name among the groups of these ranks; 0: the first */
    dtrain_algorithm asked[DTRAIN__KINDS]; /* by desc or environment, for each kind */
    unsigned char *scratch;
    dtrain__blocked *blocked;
    int apart;            /* a thread of the library waits in it, not the caller */
    int own;              /* the library made it for itself: no program has its handles */
    int64_t waited_ns[2]; /* when the operation that was waited for last had its turn, and ended */
    dtrain__service *service;
    dtrain_comm *next_served; /* by the same service */
    dtrain__use use;
    dtrain__queue queue;
    dtrain__messages messages;
    dtrain__fuse fuse;
    dtrain__voted vote;
    dtrain__window_found found;
    dtrain__watched watch;
};

/* Refuses NULL and a destroyed group. Best effort: if somebody else has taken the memory, nothing is known of it. */
static DTRAIN__NOINLINE dtrain_status dtrain__group_alive(const dtrain_comm *comm, const char *call)
{
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: the group is NULL; check the status of the call that makes it", call);
    if (DTRAIN__ATOMIC_LOAD(&comm->use.mark, RELAXED) == DTRAIN__COMM_MARK)
        return DTRAIN_OK;
    return dtrain__fail(
        NULL, DTRAIN_ERR_INVALID,
        "%s: this group was destroyed; make no call on it after dtrain_comm_destroy, after the end of its "
        "mesh, or after the body of dtrain_run_threads",
        call);
}

/* Destroys a group that the library made for itself. It may have handles that nobody has waited for. */
static void dtrain__group_close(dtrain_comm *comm)
{
    if (comm != NULL)
        comm->own = 1;
    dtrain_comm_destroy(comm);
}

/* Refuses a group that is destroyed, or inside a fuse. */
static DTRAIN__NOINLINE dtrain_status dtrain__group_whole(dtrain_comm *comm, const char *call)
{
    if (dtrain__group_alive(comm, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (!comm->fuse.open)
        return DTRAIN_OK;
    return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                        "%s on rank %d: it needs results at once and cannot be fused; call fuse_end first", call,
                        comm->rank);
}

/* Refuses a forked child. error: where the error is kept beside the thread; NULL: nowhere. */
static dtrain_status dtrain__group_ours(const dtrain_comm *comm, dtrain__error *error, const char *call)
{
    if (comm->use.process == dtrain__os_pid())
        return DTRAIN_OK;
    return dtrain__fail(error, DTRAIN_ERR_INVALID,
                        "%s: process %ld made this group, and this is its forked child %ld; make one after the fork",
                        call, comm->use.process, dtrain__os_pid());
}

/* What has moved from (sending 0) or to a peer with which a message has been; NULL: none has. */
static dtrain__direction *dtrain__group_direction(const dtrain_comm *comm, int peer, int sending)
{
    dtrain__direction **pairs = DTRAIN__ATOMIC_LOAD(&comm->messages.directions, ACQUIRE);
    dtrain__direction *pair = pairs != NULL ? DTRAIN__ATOMIC_LOAD(&pairs[peer], ACQUIRE) : NULL;
    return pair != NULL ? pair + sending : NULL;
}

/* Makes both directions between this rank and a peer. Any thread. Returns 0 if there is no memory. */
static int dtrain__group_acquaint(dtrain_comm *comm, int peer)
{
    dtrain__direction **pairs, *pair = dtrain__group_direction(comm, peer, 0);
    if (pair != NULL)
        return 1;
    dtrain__os_lock(&comm->queue.mutex);
    pairs = comm->messages.directions;
    if (pairs == NULL) {
        pairs = (dtrain__direction **)dtrain__alloc(comm->allocator, (size_t)comm->size * sizeof *pairs);
        DTRAIN__ATOMIC_STORE(&comm->messages.directions, pairs, RELEASE);
    }
    if (pairs != NULL && pairs[peer] == NULL) {
        pair = (dtrain__direction *)dtrain__alloc(comm->allocator, 2 * sizeof *pair);
        DTRAIN__ATOMIC_STORE(&pairs[peer], pair, RELEASE);
    }
    dtrain__os_unlock(&comm->queue.mutex);
    return dtrain__group_direction(comm, peer, 0) != NULL;
}

/* The deadline of a call of the group that begins at now. */
static int64_t dtrain__group_deadline(const dtrain_comm *comm, int64_t now)
{
    return comm->desc.timeout_ms < 0 ? INT64_MAX : now + dtrain__os_ms_to_ns(comm->desc.timeout_ms);
}

/* Sets the timeout of later calls; -1: no deadline. */
static void dtrain__group_set_timeout(dtrain_comm *comm, int64_t ms)
{
    comm->desc.timeout_ms = ms;
}

/* The calling thread enters a call of the group. *entered: it must leave; a call inside another one need not. */
static dtrain_status dtrain__group_enter(dtrain_comm *comm, const char *call, int *entered)
{
    uintptr_t me = (uintptr_t)dtrain__thread_self(), other = 0;
    const char *calling;
    *entered = 0;
    if (comm == NULL || DTRAIN__ATOMIC_LOAD(&comm->use.mark, RELAXED) != DTRAIN__COMM_MARK)
        return dtrain__group_alive(comm, call);
    if (DTRAIN__ATOMIC_COMPARE_EXCHANGE(&comm->use.caller, &other, me, ACQUIRE)) {
        DTRAIN__ATOMIC_STORE(&comm->use.call, call, RELAXED);
        *entered = 1;
        return DTRAIN_OK;
    }
    if (other == me)
        return DTRAIN_OK;
    calling = DTRAIN__ATOMIC_LOAD(&comm->use.call, RELAXED);
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                        "two threads called dtrain_%s and dtrain_%s on one group at once (rank %d of %d): give each "
                        "thread a group of its own (dtrain_comm_split)",
                        calling != NULL ? calling : call, call, comm->rank, comm->size);
}

static void dtrain__group_exit(dtrain_comm *comm, int entered)
{
    if (entered)
        DTRAIN__ATOMIC_STORE(&comm->use.caller, 0, RELEASE);
}

/* What has broken the group, as its transport knows; NULL: nothing. */
static const dtrain__error *dtrain__group_cause(const dtrain_comm *comm)
{
    return dtrain__membership_cause(comm->members);
}

/* Whether new calls fail: a call of this rank has broken the group, or its transport knows that it is broken. */
static int dtrain__group_is_broken(const dtrain_comm *comm)
{
    return comm->broken.status != DTRAIN_OK || dtrain__group_cause(comm) != NULL;
}

/* Whether a rank's end of the group is known to be gone, for whatever reason; any thread. */
static int dtrain__group_has_left(const dtrain_comm *comm, int rank)
{
    return dtrain__membership_left(comm->members, rank);
}

/* Returns what has broken the group, or that a rank has left it; DTRAIN_OK: neither. */
static dtrain_status dtrain__group_gone(const dtrain_comm *comm)
{
    int gone = 0;
    while (gone < comm->size && !dtrain__group_has_left(comm, gone))
        gone++;
    const dtrain__error *cause = dtrain__group_cause(comm);
    if (cause != NULL)
        return dtrain__report(cause);
    return gone < comm->size ? dtrain__fail(NULL, DTRAIN_ERR_PEER_LOST, "rank %d has left the group", gone) : DTRAIN_OK;
}

/* Breaks the group for all its ranks; any thread. The first cause stays. */
static void dtrain__group_break(dtrain_comm *comm, const dtrain__error *cause)
{
    if (comm->transport.fail != NULL)
        comm->transport.fail(comm->transport.self, cause->status, cause->text);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    dtrain__bell_ring(comm->bell);
}

DTRAIN__FAST_END
#endif
