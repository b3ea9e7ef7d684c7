/* ---- >>op ----
 * One operation on one rank: what was called, how far it is, how it ended; and the end of a group that
 * runs it. Calls are described by the same words on the board and in message headers, so that a rank can
 * quote what another one called. Checks of arguments and all texts about calls are here. */
#ifndef DTRAIN__OP
#define DTRAIN__OP
#include "../base/os.c"
#include "../base/status.c"
#include "../base/memory.c"
#include "../base/wait.c"
#include "../tensor/fold.c"
#include "../transport/threads.c"
#include "../transport/socket.c"
#include "comm.h"

#define DTRAIN__MAX_RANKS 1024
#define DTRAIN__MESSAGE_SMALL ((size_t)4096) /* payload that travels in one piece with its header */

typedef enum dtrain__kind {
    DTRAIN__ALL_REDUCE = 1,
    DTRAIN__REDUCE_SCATTER,
    DTRAIN__ALL_GATHER,
    DTRAIN__BROADCAST,
    DTRAIN__REDUCE,
    DTRAIN__GATHER,
    DTRAIN__SCATTER,
    DTRAIN__ALL_TO_ALL,
    DTRAIN__BARRIER,
    DTRAIN__SEND,
    DTRAIN__RECV,
    DTRAIN__EXCHANGE,
    DTRAIN__KINDS
} dtrain__kind;

#define DTRAIN__WEIGHTED 1u
#define DTRAIN__ON_DEVICE ((uint64_t)1 << 32)
#define DTRAIN__WAY_ANY ((uint64_t)1 << 16) /* in a call's algorithm: in any order */
#define DTRAIN__WAY_NODE 32                 /* from this bit on: the ranks of a node */

/* What two ranks must agree on, in 64-bit words; the first DTRAIN__POST_WORDS of a message header. */
typedef struct dtrain__call {
    uint64_t kind; /* a message is a DTRAIN__SEND on both sides */
    uint64_t number;
    uint64_t dtype;
    uint64_t op;
    uint64_t count;
    uint64_t root;
    uint64_t algorithm; /* and what else its steps depend on: see dtrain__op_way */
    uint64_t ranks;
    uint64_t parts; /* a hash of per-rank counts and offsets, or the elements of a row; 0: parts as dtrain_shard says */
    uint64_t group;
    uint64_t form;   /* 0: one call; DTRAIN__WEIGHTED, DTRAIN__ON_DEVICE; else the number of calls that were fused */
    uint64_t first;  /* the count of the first of these, or of the call that this is a step of */
    uint64_t digest; /* of the counts of all of them; the dtype of a weighted mean; see dtrain__call_whole */
} dtrain__call;

typedef struct dtrain__message_header {
    uint64_t magic;
    dtrain__call call;
    uint64_t tag;
    uint64_t bytes;
    uint64_t data_check; /* of what follows; 0: not checked */
    uint64_t check;      /* of everything above */
} dtrain__message_header;

/* Where a rank's part of a vector is, in elements. */
typedef struct dtrain__extent {
    size_t begin, count;
} dtrain__extent;

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
    size_t row;                                                /* parts are cut between rows of so many elements */
    const size_t *counts, *offsets, *out_counts, *out_offsets; /* the caller's, a rank; out: an all-to-all's */
    const void *in;
    void *out;
    int scattered; /* in is an array of dtrain__segment, which count elements in all */
    dtrain_algorithm algorithm;
    uint64_t number, in_number;
    uint64_t check, check_due;       /* of the data that come in: so far, and what their header says; 0: not checked */
    uint64_t turn;                   /* among the operations that went over the board */
    int64_t started_ns, deadline_ns; /* of the call */
    int64_t run_ns, moved_ns;        /* its turn came; its first byte moved; 0: not yet */
    int64_t ended_ns;
    uint64_t serial;              /* of its record; 0: none yet */
    int async, queued;            /* has a handle of the caller's; waited for its turn */
    uint64_t form, first, digest; /* as in the call */
    uint64_t whole_parts;         /* a hash of the counts of the call that this is a step of; 0: it had none */
    unsigned char *letter;        /* header and small payload of a queued message; NULL: the group's are used */
    uint32_t cancelled;           /* set by any thread, seen by the one that drives */
    int phase;
    int warned;              /* the log has said whom this operation awaits */
    int awaited;             /* the peer it awaits, or -1 */
    int touched;             /* peers may be inside this rank's buffers, or bytes have moved */
    size_t at;               /* progress inside the phase */
    size_t entered, send_at; /* steps that have been prepared; the step whose message goes out */
    size_t sent, received;   /* bytes of it that have moved, headers included; SIZE_MAX: all */
    dtrain__error error;
} dtrain__op;

#define DTRAIN__MESSAGE_BYTES (sizeof(dtrain__message_header) + DTRAIN__MESSAGE_SMALL)

struct dtrain_work {
    dtrain_comm *comm;
    dtrain_work *next;
    dtrain_work *older; /* of all handles that the group has made */
    uint32_t done;
    int ended; /* done once it is the queue's head */
    dtrain__op op;
    unsigned char letter[DTRAIN__MESSAGE_BYTES];
};

/* Calls between fuse_begin and fuse_end. */
typedef struct dtrain__note {
    dtrain_work *work;
    dtrain__op op;
} dtrain__note;

typedef struct dtrain__service dtrain__service;
typedef struct dtrain__recorder dtrain__recorder;

struct dtrain_comm {
    int rank, size;
    dtrain_transport transport;
    dtrain__channel *socket; /* of a group of processes; NULL: another transport */
    int forming;             /* such a group is not complete yet */
    int checks;              /* messages carry a checksum of their data */
    int node_ranks;          /* ranks r with equal r / node_ranks share a host; 0: not so regular */
    int64_t started_ns, form_deadline_ns;
    int64_t poll_until_ns; /* the end of the budget that dtrain_comm_poll was given */
    pid_t process;         /* that made it */
    dtrain_comm_desc desc;
    dtrain_allocator *allocator, own;
    dtrain__bell *bell, own_bell;
    dtrain__error error;
    dtrain__error broken;      /* by a message operation; the board keeps its own */
    dtrain__error abort_cause; /* on a transport of the user's own; readable once aborted is 2 */
    uint32_t aborted;
    uint64_t number; /* of the last collective */
    uint64_t turn;   /* of the last one over the board */
    dtrain__recorder *recorder;
    uint64_t *sent, *received; /* numbers of the last messages to and from each rank */
    const void **ins;          /* size pointers each, for folds */
    void **outs;
    uint64_t group;                        /* names it among the groups of these ranks; 0: the first */
    dtrain__extent *parts, *others;        /* of the operation under way; others: of what an all-to-all receives */
    dtrain_algorithm asked[DTRAIN__KINDS]; /* by desc or environment, for each kind */
    unsigned char message_out[DTRAIN__MESSAGE_BYTES], message_in[DTRAIN__MESSAGE_BYTES]; /* header and small payload */
    unsigned char *scratch;
    size_t scratch_bytes;
    int64_t blocked_ns;
    int64_t waited_ns[2];        /* when the operation waited for last had its turn, and ended */
    pthread_mutex_t queue_mutex; /* head, tail, spare; held for a few instructions */
    pthread_mutex_t drive_mutex; /* held by the thread that advances queued work */
    dtrain_work *head, *tail, *spare, *newest;
    uint32_t pending;       /* queued and not done */
    uint64_t *lanes, sweep; /* the last sweep that met a message under way to and from each rank, and its number */
    int fusing;             /* between fuse_begin and fuse_end */
    dtrain__note *notes;
    size_t noted, notes_capacity;
    unsigned char *packed; /* buffers of fused calls, one after another */
    size_t packed_bytes;
    dtrain__service *service;
    dtrain_comm *next_served; /* by the same service */
    uint64_t consents;        /* that this end has taken part in */
};

static size_t dtrain__op_bytes(const dtrain__op *op)
{
    return op->count * (dtrain_dtype_bits(op->dtype) / 8);
}

/* One message in one direction; of these, several may be under way at once. */
static int dtrain__op_is_letter(const dtrain__op *op)
{
    return op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV;
}

static int dtrain__op_reduces(const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE_SCATTER || op->kind == DTRAIN__REDUCE;
}

static int dtrain__op_is_message(const dtrain__op *op)
{
    return op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV || op->kind == DTRAIN__EXCHANGE;
}

static const char *dtrain__kind_name(uint64_t kind)
{
    static const char *const names[] = {"no call", "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "reduce",  "gather",     "scatter",        "all_to_all", "barrier",
                                        "send",    "recv",       "exchange"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : "an unknown call";
}

static const char *dtrain__op_name(uint64_t op)
{
    static const char *const names[] = {"sum", "mean", "product", "min", "max", "and", "or", "xor"};
    return op - DTRAIN_SUM < sizeof names / sizeof names[0] ? names[op - DTRAIN_SUM] : "no operation";
}

static const char *dtrain__algorithm_name(uint64_t algorithm)
{
    static const char *const names[] = {
        "fused", "recursive_doubling", "tree", "ring", "halving_doubling", "direct", "bruck", "nodes", "double_tree"};
    algorithm %= DTRAIN__WAY_ANY;
    size_t index = (size_t)(algorithm - DTRAIN_ALGORITHM_FUSED);
    return algorithm == DTRAIN_ALGORITHM_AUTO       ? "auto"
           : index < sizeof names / sizeof names[0] ? names[index]
                                                    : "no algorithm";
}

/* A hash of what a rank was told of the parts; never 0 where it was told anything.
 * Source: FNV-1a, RFC 9923. */
static uint64_t dtrain__op_parts_hash(const dtrain_comm *comm, const dtrain__op *op)
{
    uint64_t hash = 0xcbf29ce484222325u;
    if (op->kind == DTRAIN__ALL_TO_ALL || op->counts == NULL)
        return op->row > 1 ? op->row : op->counts != NULL;
    for (int rank = 0; rank < comm->size; rank++) {
        hash = (hash ^ op->counts[rank]) * 0x100000001b3u;
        hash = (hash ^ (op->offsets != NULL ? op->offsets[rank] : 0)) * 0x100000001b3u;
    }
    return hash | (uint64_t)1 << 63;
}

/* Which steps an operation takes, beside its arguments. */
static uint64_t dtrain__op_way(const dtrain_comm *comm, const dtrain__op *op)
{
    uint64_t way = (uint64_t)op->algorithm;
    if (op->algorithm == DTRAIN_ALGORITHM_NODES)
        way |= (uint64_t)comm->node_ranks << DTRAIN__WAY_NODE;
    return dtrain__op_reduces(op) && comm->desc.order == DTRAIN_ORDER_ANY ? way | DTRAIN__WAY_ANY : way;
}

/* What the peer of one direction must have called as well; only an exchange has two. */
static dtrain__call dtrain__op_call(const dtrain_comm *comm, const dtrain__op *op, int receiving)
{
    dtrain__call call;
    int message = dtrain__op_is_message(op), other = receiving && op->kind == DTRAIN__EXCHANGE;
    call.kind = message ? (uint64_t)DTRAIN__SEND : (uint64_t)op->kind;
    call.number = other ? op->in_number : op->number;
    call.dtype = (uint64_t)op->dtype;
    call.op = (uint64_t)op->op;
    call.count = other ? op->in_count : op->count;
    if (op->kind == DTRAIN__ALL_TO_ALL && op->counts != NULL)
        call.count = 0; /* every rank has a count of its own */
    call.root = message ? 0 : (uint64_t)op->root;
    call.algorithm = message ? 0 : dtrain__op_way(comm, op);
    call.ranks = (uint64_t)comm->size;
    call.parts = message ? 0 : dtrain__op_parts_hash(comm, op);
    if (op->whole_parts != 0) /* which may be the very counts of the step */
        call.parts = call.parts * 0x100000001b3u ^ op->whole_parts;
    call.group = comm->group;
    call.form = op->form;
    call.first = op->first;
    call.digest = op->digest;
    return call;
}

typedef struct dtrain__text {
    char text[160];
} dtrain__text;

/* What the caller called: of a step of a call on memory of devices the whole, which is in the digest. */
static dtrain__call dtrain__call_whole(const dtrain__call *call)
{
    dtrain__call whole = *call;
    if (call->form != DTRAIN__ON_DEVICE)
        return whole;
    whole.kind = call->digest & 0x7f;
    whole.op = call->digest >> 8 & 0xffff;
    whole.root = call->digest >> 24 & 0xffff;
    whole.dtype = call->digest >> 40 & 0xffff;
    whole.count = call->first;
    whole.form = 0;
    whole.parts = (call->digest >> 7 & 1) << 63;
    return whole;
}

/* "all_reduce #412 (sum, f32 x 1048576)"; of fused calls the first, and how many they are. */
static dtrain__text dtrain__call_text(const dtrain__call *given)
{
    dtrain__text out;
    dtrain__call whole = dtrain__call_whole(given);
    const dtrain__call *call = &whole;
    const char *prefix = given->form == DTRAIN__ON_DEVICE ? "device_group_" : "";
    int weighted = call->form == DTRAIN__WEIGHTED;
    uint64_t type = weighted ? call->digest : call->dtype, count = call->form != 0 ? call->first : call->count;
    const char *name = dtrain_dtype_name(type < 64 ? (dtrain_dtype)type : (dtrain_dtype)0);
    char dtype[16], detail[32] = "", root[28] = "", fused[29] = "", elements[24] = "";
    size_t n = 0;
    int reduces =
        call->kind == DTRAIN__ALL_REDUCE || call->kind == DTRAIN__REDUCE_SCATTER || call->kind == DTRAIN__REDUCE;
    for (; name[n] != 0 && n < sizeof dtype - 1; n++)
        dtype[n] = (char)(name[n] >= 'A' && name[n] <= 'Z' ? name[n] + ('a' - 'A') : name[n]);
    dtype[n] = 0;
    if (reduces)
        snprintf(detail, sizeof detail, "%s, ", weighted ? "weighted mean" : dtrain__op_name(call->op));
    if (call->kind >= DTRAIN__BROADCAST && call->kind <= DTRAIN__SCATTER)
        snprintf(root, sizeof root, ", root %llu", (unsigned long long)call->root);
    if (call->form > DTRAIN__WEIGHTED)
        snprintf(fused, sizeof fused, ", %llu fused", (unsigned long long)call->form);
    if (call->parts != 1 || count > 0) /* of an uneven all-to-all every rank has a count of its own */
        snprintf(elements, sizeof elements, " x %llu", (unsigned long long)count);
    if (call->kind == DTRAIN__BARRIER)
        snprintf(out.text, sizeof out.text, "barrier #%llu", (unsigned long long)call->number);
    else
        snprintf(out.text, sizeof out.text, "%s%s%s #%llu (%s%s%s%s%s%s)", prefix, dtrain__kind_name(call->kind),
                 call->parts == 1 || call->parts >> 63 != 0 ? "_v" : "", (unsigned long long)call->number, detail,
                 dtype, elements, root,
                 call->algorithm % DTRAIN__WAY_ANY == DTRAIN_ALGORITHM_RING && reduces ? ", ring" : "", fused);
    return out;
}

static dtrain__text dtrain__op_text(const dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__call call = dtrain__op_call(comm, op, 0);
    call.kind = (uint64_t)op->kind;
    call.count = op->kind == DTRAIN__EXCHANGE && op->root < 0 ? op->in_count : op->count;
    return dtrain__call_text(&call);
}

/* "nodes of 4 ranks", "tree in any order" */
static dtrain__text dtrain__way_text(uint64_t way)
{
    dtrain__text out;
    char node[40] = "";
    if (way >> DTRAIN__WAY_NODE != 0)
        snprintf(node, sizeof node, " of %u ranks", (unsigned)(way >> DTRAIN__WAY_NODE));
    snprintf(out.text, sizeof out.text, "%s%s%s", dtrain__algorithm_name(way), node,
             (way & DTRAIN__WAY_ANY) != 0 ? " in any order" : "");
    return out;
}

/* What another rank called does not fit; says what it was, or, where the calls look the same, what differs. */
static dtrain_status dtrain__op_mismatch(const dtrain_comm *comm, dtrain__op *op, int peer, const dtrain__call *theirs)
{
    dtrain__text mine = dtrain__op_text(comm, op), other = dtrain__call_text(theirs);
    dtrain__call call = dtrain__op_call(comm, op, 0);
    int alike = theirs->kind == call.kind && theirs->number == call.number && theirs->dtype == call.dtype &&
                theirs->op == call.op && theirs->root == call.root &&
                (theirs->count == call.count || call.form == DTRAIN__ON_DEVICE) && theirs->form == call.form &&
                theirs->first == call.first && theirs->digest == call.digest;
    if (theirs->ranks != (uint64_t)comm->size)
        return dtrain__fail(
            &op->error, DTRAIN_ERR_MISMATCH,
            "%s: rank %d is in a group of %llu ranks, this rank %d in one of %d; give both the same size", mine.text,
            peer, (unsigned long long)theirs->ranks, comm->rank, comm->size);
    if (theirs->group != comm->group)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s in group %llx, this rank %d %s in group %llx", mine.text, peer,
                            other.text, (unsigned long long)theirs->group, comm->rank, mine.text,
                            (unsigned long long)comm->group);
    if (alike && theirs->parts != call.parts)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s with other per-rank counts or offsets than this rank %d; give every "
                            "rank the same arrays",
                            mine.text, peer, other.text, comm->rank);
    if (alike && theirs->algorithm != call.algorithm)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s by %s, this rank %d by %s; give every rank the same desc.algorithm, "
                            "order, node_ranks and DTRAIN_ALGORITHM",
                            mine.text, peer, other.text, dtrain__way_text(theirs->algorithm).text, comm->rank,
                            dtrain__way_text(call.algorithm).text);
    return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                        "%s: rank %d called %s, this rank %d %s; both must make the same calls in the same order",
                        mine.text, peer, other.text, comm->rank, mine.text);
}

/* Both called the same, but the sender gives another number of bytes than the receiver awaits. */
static dtrain_status dtrain__op_uneven(const dtrain_comm *comm, dtrain__op *op, int from, int to, size_t gives,
                                       size_t awaits)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8;
    return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                        "%s on rank %d: rank %d gives %zu elements to rank %d, which awaits %zu; the counts of the two "
                        "must fit",
                        dtrain__op_text(comm, op).text, comm->rank, from, gives / width, to, awaits / width);
}

/* The operation ends because of something that broke the group; quotes the first cause. */
static dtrain_status dtrain__op_blame(const dtrain_comm *comm, dtrain__op *op, const dtrain__error *cause)
{
    dtrain__text mine = dtrain__op_text(comm, op);
    dtrain__error first = *cause;
    return dtrain__fail(&op->error, first.status, "%s on rank %d: %s", mine.text, comm->rank, dtrain__cause(&first));
}

/* Why the group was aborted; NULL: it was not. */
static const dtrain__error *dtrain__comm_aborted(dtrain_comm *comm)
{
    const dtrain__error *cause = NULL;
    if (comm->transport.board != NULL)
        cause = dtrain__board_broken(comm->transport.board) ? dtrain__board_cause(comm->transport.board) : NULL;
    else if (comm->socket != NULL)
        cause = __atomic_load_n(&comm->socket->broken, __ATOMIC_SEQ_CST) ? &comm->socket->cause : NULL;
    else
        cause = __atomic_load_n(&comm->aborted, __ATOMIC_SEQ_CST) == 2 ? &comm->abort_cause : NULL;
    return cause != NULL && cause->status == DTRAIN_ERR_ABORTED ? cause : NULL;
}

/* Whether a rank's end of the group is known to be gone, whatever became of its process; any thread. */
static int dtrain__comm_has_left(const dtrain_comm *comm, int rank)
{
    int left = 0;
    if (comm->transport.board != NULL)
        return __atomic_load_n(&comm->transport.board->slots[rank].left, __ATOMIC_SEQ_CST) != 0;
    if (comm->socket != NULL) {
        pthread_mutex_lock(&comm->socket->hub->mutex);
        left = comm->socket->peers[rank].left;
        pthread_mutex_unlock(&comm->socket->hub->mutex);
    }
    return left;
}

/* Breaks the group on purpose, for all its ranks; any thread. The first cause stays. */
static void dtrain__comm_break(dtrain_comm *comm, const dtrain__error *cause)
{
    uint32_t whole = 0;
    if (comm->transport.board != NULL) {
        dtrain__board_break(comm->transport.board, cause);
        return;
    }
    if (__atomic_compare_exchange_n(&comm->aborted, &whole, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        comm->abort_cause = *cause;
        __atomic_store_n(&comm->aborted, 2, __ATOMIC_SEQ_CST);
    }
    if (comm->transport.fail != NULL)
        comm->transport.fail(comm->transport.self, cause->status, cause->text);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    dtrain__bell_ring(comm->bell);
}

/* Scratch memory for an operation, kept for the next ones. */
static int dtrain__comm_reserve(dtrain_comm *comm, dtrain__op *op, size_t bytes)
{
    unsigned char *scratch;
    if (comm->scratch_bytes >= bytes)
        return 1;
    scratch = (unsigned char *)dtrain__alloc(comm->allocator, bytes);
    if (scratch == NULL) {
        dtrain__fail(&op->error, DTRAIN_ERR_MEMORY,
                     "%s on rank %d: no memory for %zu bytes beside the caller's buffers",
                     dtrain__op_text(comm, op).text, comm->rank, bytes);
        return 0;
    }
    dtrain__free(comm->allocator, comm->scratch, comm->scratch_bytes);
    comm->scratch = scratch;
    comm->scratch_bytes = bytes;
    return 1;
}

/* Where every rank's part is: as given, else counted from the start, rows whole. */
static void dtrain__op_extents(const dtrain_comm *comm, const dtrain__op *op, const size_t *counts,
                               const size_t *offsets, dtrain__extent *parts)
{
    size_t row = op->row > 0 ? op->row : 1, next = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        dtrain__extent *part = &parts[rank];
        if (counts == NULL) {
            part->count = dtrain_split(op->count / row, comm->size, rank, &part->begin) * row;
            part->begin *= row;
        } else {
            part->count = counts[rank];
            part->begin = offsets != NULL ? offsets[rank] : next;
            next += counts[rank];
        }
    }
}

/* Lays out the operation that starts now. */
static void dtrain__op_layout(dtrain_comm *comm, const dtrain__op *op)
{
    size_t mine;
    int whole = op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE;
    if (op->kind > DTRAIN__ALL_TO_ALL || op->kind == DTRAIN__BROADCAST ||
        (whole && op->algorithm != DTRAIN_ALGORITHM_RING && op->algorithm != DTRAIN_ALGORITHM_DIRECT))
        return; /* it has no parts */
    dtrain__op_extents(comm, op, op->counts, op->offsets, comm->parts);
    if (op->kind != DTRAIN__ALL_TO_ALL)
        return;
    mine = comm->parts[comm->rank].count;
    if (op->counts != NULL)
        dtrain__op_extents(comm, op, op->out_counts, op->out_offsets, comm->others);
    else
        for (int rank = 0; rank < comm->size; rank++) {
            comm->others[rank].begin = (size_t)rank * mine;
            comm->others[rank].count = mine;
        }
}

static dtrain_status dtrain__op_too_large(dtrain_comm *comm, const dtrain__op *op, size_t count)
{
    return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: %zu elements of %u bits overflow a size",
                        dtrain__kind_name((uint64_t)op->kind), comm->rank, count, dtrain_dtype_bits(op->dtype));
}

/* Bytes from a vector's start to the end of its last part, in *bytes. */
static dtrain_status dtrain__op_reach(dtrain_comm *comm, const dtrain__op *op, const size_t *counts,
                                      const size_t *offsets, size_t *bytes)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8, most = SIZE_MAX / 4 / width, next = 0;
    *bytes = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        size_t begin = offsets != NULL ? offsets[rank] : next;
        if (counts[rank] > most || begin > most - counts[rank])
            return dtrain__op_too_large(comm, op, counts[rank]);
        next = begin + counts[rank];
        if (counts[rank] > 0 && next * width > *bytes)
            *bytes = next * width;
    }
    return DTRAIN_OK;
}

/* Bytes of the operation's vectors: *in and *out as this rank's buffers have them, and how far into the longer one
 * the shorter begins when they are one. */
static dtrain_status dtrain__op_sizes(dtrain_comm *comm, const dtrain__op *op, size_t *in, size_t *out, size_t *offset)
{
    size_t width = dtrain_dtype_bits(op->dtype) / 8, whole = op->count * width, begin = 0, part, row;
    dtrain_status status = DTRAIN_OK;
    int root = comm->rank == op->root;
    *offset = 0;
    *in = *out = whole;
    if (op->kind == DTRAIN__ALL_TO_ALL && op->counts != NULL) {
        status = dtrain__op_reach(comm, op, op->counts, op->offsets, in);
        return status == DTRAIN_OK ? dtrain__op_reach(comm, op, op->out_counts, op->out_offsets, out) : status;
    }
    if (op->counts != NULL) {
        status = dtrain__op_reach(comm, op, op->counts, op->offsets, &whole);
        part = op->counts[comm->rank];
        for (int rank = 0; op->offsets == NULL && rank < comm->rank; rank++)
            begin += op->counts[rank];
        begin = op->offsets != NULL ? op->offsets[comm->rank] : begin;
    } else {
        row = op->row > 0 ? op->row : 1;
        part = dtrain_split(op->count / row, comm->size, comm->rank, &begin) * row;
        begin *= row;
    }
    switch (op->kind) {
    case DTRAIN__REDUCE_SCATTER: *in = whole, *out = part * width, *offset = begin * width; break;
    case DTRAIN__ALL_GATHER: *in = part * width, *out = whole, *offset = begin * width; break;
    case DTRAIN__GATHER: *in = part * width, *out = root ? whole : 0, *offset = begin * width; break;
    case DTRAIN__SCATTER: *in = root ? whole : 0, *out = part * width, *offset = begin * width; break;
    case DTRAIN__REDUCE: *out = root ? whole : 0; break;
    case DTRAIN__ALL_TO_ALL: *out = (size_t)comm->size * part * width; break;
    case DTRAIN__SEND: *out = 0; break;
    case DTRAIN__RECV: *in = 0; break;
    case DTRAIN__EXCHANGE: *in = op->root >= 0 ? whole : 0, *out = op->from >= 0 ? op->in_count * width : 0; break;
    default: break;
    }
    return status;
}

/* Buffers are one, with the shorter at its place in the longer, or apart. */
static dtrain_status dtrain__op_check_buffers(dtrain_comm *comm, const dtrain__op *op)
{
    uintptr_t in = (uintptr_t)op->in, out = (uintptr_t)op->out;
    size_t in_bytes, out_bytes, offset;
    dtrain_status status = dtrain__op_sizes(comm, op, &in_bytes, &out_bytes, &offset);
    if (status != DTRAIN_OK)
        return status;
    if ((in_bytes > 0 && op->in == NULL) || (out_bytes > 0 && op->out == NULL))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s of %zu elements on rank %d: %s is NULL",
                            dtrain__kind_name((uint64_t)op->kind), op->count, comm->rank,
                            op->in == NULL && in_bytes > 0 ? "in" : "out");
    int in_place = in_bytes >= out_bytes ? out == in + offset : in == out + offset;
    if (op->kind == DTRAIN__EXCHANGE)
        in_place = 0;
    else if (op->kind == DTRAIN__ALL_TO_ALL && in_place && in_bytes > 0)
        in_place = in_bytes == out_bytes &&
                   (op->counts == NULL || (op->counts == op->out_counts && op->offsets == op->out_offsets));
    if (in_bytes > 0 && out_bytes > 0 && !in_place && in < out + out_bytes && out < in + in_bytes)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s of %zu elements on rank %d: in and out overlap; give the same buffer, with this "
                            "rank's part at its offset, or two that are apart",
                            dtrain__kind_name((uint64_t)op->kind), op->count, comm->rank);
    return DTRAIN_OK;
}

static dtrain_status dtrain__op_check_peer(dtrain_comm *comm, const dtrain__op *op, int peer)
{
    const char *kind = dtrain__kind_name((uint64_t)op->kind);
    if (peer == -1 && op->kind == DTRAIN__EXCHANGE)
        return DTRAIN_OK;
    if (peer < 0 || peer >= comm->size)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: rank %d is not among the %d ranks", kind,
                            comm->rank, peer, comm->size);
    if (dtrain__op_is_message(op) && peer == comm->rank)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: the peer is this rank itself", kind,
                            comm->rank);
    return DTRAIN_OK;
}

/* Checks a call's arguments before anything of it is seen by a peer. */
static dtrain_status dtrain__op_check(dtrain_comm *comm, const dtrain__op *op)
{
    unsigned bits = dtrain_dtype_bits(op->dtype);
    dtrain_status status;
    if (bits == 0 || bits % 8 != 0 || (dtrain__op_reduces(op) && !dtrain__fold_supported(op->dtype, op->op)))
        return dtrain__fail(
            &comm->error, DTRAIN_ERR_INVALID,
            "%s on rank %d: dtype %d (%s) with operation %d (%s) is not supported; are the two swapped?",
            dtrain__kind_name((uint64_t)op->kind), comm->rank, (int)op->dtype, dtrain_dtype_name(op->dtype),
            (int)op->op, dtrain__op_name((uint64_t)op->op));
    if (op->count > SIZE_MAX / 4 / (bits / 8) / (op->kind == DTRAIN__ALL_TO_ALL ? (size_t)comm->size : 1))
        return dtrain__op_too_large(comm, op, op->count);
    if (op->in_count > SIZE_MAX / 4 / (bits / 8))
        return dtrain__op_too_large(comm, op, op->in_count);
    status = dtrain__op_check_peer(comm, op, op->root);
    if (status == DTRAIN_OK && op->kind == DTRAIN__EXCHANGE)
        status = dtrain__op_check_peer(comm, op, op->from);
    return status == DTRAIN_OK ? dtrain__op_check_buffers(comm, op) : status;
}

#endif
