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
#define DTRAIN__MESSAGE_BYTES (96 + DTRAIN__MESSAGE_SMALL)

typedef enum dtrain__kind {
    DTRAIN__ALL_REDUCE = 1,
    DTRAIN__REDUCE_SCATTER,
    DTRAIN__ALL_GATHER,
    DTRAIN__BROADCAST,
    DTRAIN__BARRIER,
    DTRAIN__SEND,
    DTRAIN__RECV
} dtrain__kind;

/* What two ranks must agree on, in 64-bit words; the first DTRAIN__POST_WORDS of a message header. */
typedef struct dtrain__call {
    uint64_t kind; /* a message is a DTRAIN__SEND on both sides */
    uint64_t number;
    uint64_t dtype;
    uint64_t op;
    uint64_t count;
    uint64_t root;
    uint64_t algorithm;
    uint64_t ranks;
} dtrain__call;

typedef struct dtrain__op {
    dtrain__kind kind;
    dtrain_dtype dtype;
    dtrain_op op;
    int root; /* of a broadcast; the peer of a send or recv */
    size_t count;
    const void *in;
    void *out;
    dtrain_algorithm algorithm;
    uint64_t number;
    int64_t started_ns, deadline_ns;
    int phase;
    int warned;            /* the log has said whom this operation awaits */
    int awaited;           /* the peer it awaits, or -1 */
    int touched;           /* peers may be inside this rank's buffers, or bytes have moved */
    size_t at;             /* progress inside the phase */
    size_t entered, send_at; /* steps that have been prepared; the step whose message goes out */
    size_t sent, received; /* bytes of it that have moved, headers included; SIZE_MAX: all */
    dtrain__error error;
} dtrain__op;

struct dtrain_work {
    dtrain_comm *comm;
    dtrain_work *next;
    uint32_t done;
    dtrain__op op;
};

typedef struct dtrain__service dtrain__service;

struct dtrain_comm {
    int rank, size;
    dtrain_transport transport;
    dtrain__channel *socket; /* of a group of processes; NULL: another transport */
    int forming;            /* such a group is not complete yet */
    int64_t started_ns, form_deadline_ns;
    int64_t poll_until_ns; /* the end of the budget that dtrain_comm_poll was given */
    pid_t process; /* that made it */
    dtrain_comm_desc desc;
    dtrain_allocator *allocator, own;
    dtrain__bell *bell, own_bell;
    dtrain__error error;
    dtrain__error broken;      /* by a message operation; the board keeps its own */
    uint64_t number;           /* of the last collective */
    uint64_t *sent, *received; /* numbers of the last messages to and from each rank */
    const void **ins;          /* size pointers each, for folds */
    void **outs;
    unsigned char message_out[DTRAIN__MESSAGE_BYTES], message_in[DTRAIN__MESSAGE_BYTES]; /* header and small payload */
    unsigned char *scratch;
    size_t scratch_bytes;
    int64_t blocked_ns;
    pthread_mutex_t queue_mutex; /* head, tail, spare; held for a few instructions */
    pthread_mutex_t drive_mutex; /* held by the thread that advances queued work */
    dtrain_work *head, *tail, *spare;
    uint32_t pending; /* queued and not done */
    dtrain__service *service;
    dtrain_comm *next_served; /* by the same service */
};

static size_t dtrain__op_bytes(const dtrain__op *op)
{
    return op->count * (dtrain_dtype_bits(op->dtype) / 8);
}

static const char *dtrain__kind_name(uint64_t kind)
{
    static const char *const names[] = {"no call",   "all_reduce", "reduce_scatter", "all_gather",
                                        "broadcast", "barrier",    "send",           "recv"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : "an unknown call";
}

static const char *dtrain__op_name(uint64_t op)
{
    return op == DTRAIN_SUM    ? "sum"
           : op == DTRAIN_MEAN ? "mean"
           : op == DTRAIN_PROD ? "product"
           : op == DTRAIN_MIN  ? "min"
           : op == DTRAIN_MAX  ? "max"
                               : "no operation";
}

static dtrain__call dtrain__op_call(const dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__call call;
    int message = op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV;
    call.kind = message ? (uint64_t)DTRAIN__SEND : (uint64_t)op->kind;
    call.number = op->number;
    call.dtype = (uint64_t)op->dtype;
    call.op = (uint64_t)op->op;
    call.count = op->count;
    call.root = message ? 0 : (uint64_t)op->root;
    call.algorithm = (uint64_t)op->algorithm;
    call.ranks = (uint64_t)comm->size;
    return call;
}

typedef struct dtrain__text {
    char text[128];
} dtrain__text;

/* "all_reduce #412 (sum, f32 x 1048576)" */
static dtrain__text dtrain__call_text(const dtrain__call *call)
{
    dtrain__text out;
    const char *name = dtrain_dtype_name(call->dtype < 64 ? (dtrain_dtype)call->dtype : (dtrain_dtype)0);
    char dtype[16], detail[32] = "", ring[8] = "";
    size_t n = 0;
    for (; name[n] != 0 && n < sizeof dtype - 1; n++)
        dtype[n] = (char)(name[n] >= 'A' && name[n] <= 'Z' ? name[n] + ('a' - 'A') : name[n]);
    dtype[n] = 0;
    if (call->kind == DTRAIN__ALL_REDUCE || call->kind == DTRAIN__REDUCE_SCATTER)
        snprintf(detail, sizeof detail, "%s, ", dtrain__op_name(call->op));
    if (call->algorithm == DTRAIN_ALGORITHM_RING)
        snprintf(ring, sizeof ring, ", ring");
    if (call->kind == DTRAIN__BARRIER)
        snprintf(out.text, sizeof out.text, "barrier #%llu", (unsigned long long)call->number);
    else if (call->kind == DTRAIN__BROADCAST)
        snprintf(out.text, sizeof out.text, "broadcast #%llu (%s x %llu, root %llu)", (unsigned long long)call->number,
                 dtype, (unsigned long long)call->count, (unsigned long long)call->root);
    else
        snprintf(out.text, sizeof out.text, "%s #%llu (%s%s x %llu%s)", dtrain__kind_name(call->kind),
                 (unsigned long long)call->number, detail, dtype, (unsigned long long)call->count, ring);
    return out;
}

static dtrain__text dtrain__op_text(const dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__call call = dtrain__op_call(comm, op);
    call.kind = (uint64_t)op->kind;
    return dtrain__call_text(&call);
}

static dtrain_status dtrain__op_mismatch(const dtrain_comm *comm, dtrain__op *op, int peer, const dtrain__call *theirs)
{
    dtrain__text mine = dtrain__op_text(comm, op), other = dtrain__call_text(theirs);
    if (theirs->ranks != (uint64_t)comm->size)
        return dtrain__fail(
            &op->error, DTRAIN_ERR_MISMATCH,
            "%s: rank %d is in a group of %llu ranks, this rank %d in one of %d; give both the same size", mine.text,
            peer, (unsigned long long)theirs->ranks, comm->rank, comm->size);
    return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                        "%s: rank %d called %s, this rank %d %s; both must make the same calls in the same order",
                        mine.text, peer, other.text, comm->rank, mine.text);
}

/* The operation ends because of something that broke the group; quotes the first cause. */
static dtrain_status dtrain__op_blame(const dtrain_comm *comm, dtrain__op *op, const dtrain__error *cause)
{
    dtrain__text mine = dtrain__op_text(comm, op);
    dtrain__error first = *cause;
    return dtrain__fail(&op->error, first.status, "%s on rank %d: %.480s", mine.text, comm->rank, first.text);
}

static dtrain_status dtrain__op_expire(const dtrain_comm *comm, dtrain__op *op)
{
    dtrain__text mine = dtrain__op_text(comm, op);
    double seconds = (double)(dtrain__os_now_ns() - op->started_ns) * 1e-9;
    char silent[64] = "";
    if (comm->socket != NULL)
        dtrain__socket_suspect(comm->socket, silent, sizeof silent);
    return dtrain__fail(&op->error, DTRAIN_ERR_TIMEOUT, "%s: rank %d waited %.3f s for rank %d%s; %s", mine.text,
                        comm->rank, seconds, op->awaited, silent,
                        op->touched ? "data had moved, so the group is broken"
                                    : "nothing had moved, so the call can be made again");
}

/* Says whether the deadline has passed; a quarter of it gone, tells the log who is awaited. */
static int dtrain__op_late(const dtrain_comm *comm, dtrain__op *op)
{
    int64_t now;
    if (op->deadline_ns == INT64_MAX)
        return 0;
    now = dtrain__os_now_ns();
    if (!op->warned && op->awaited >= 0 && now - op->started_ns > (op->deadline_ns - op->started_ns) / 4 &&
        op->deadline_ns - op->started_ns >= 1000000000) {
        dtrain__text mine = dtrain__op_text(comm, op);
        op->warned = 1;
        dtrain__log(DTRAIN_LOG_WARN, "%s: rank %d has waited %.1f s for rank %d", mine.text, comm->rank,
                    (double)(now - op->started_ns) * 1e-9, op->awaited);
    }
    return now >= op->deadline_ns;
}

static dtrain_status dtrain__op_check_buffers(dtrain_comm *comm, const dtrain__op *op, size_t in_bytes,
                                              size_t out_bytes, size_t offset)
{
    uintptr_t in = (uintptr_t)op->in, out = (uintptr_t)op->out;
    if ((in_bytes > 0 && op->in == NULL) || (out_bytes > 0 && op->out == NULL))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s of %zu elements on rank %d: %s is NULL",
                            dtrain__kind_name((uint64_t)op->kind), op->count, comm->rank,
                            op->in == NULL && in_bytes > 0 ? "in" : "out");
    int in_place = in_bytes >= out_bytes ? out == in + offset : in == out + offset;
    if (in_bytes > 0 && out_bytes > 0 && !in_place && in < out + out_bytes && out < in + in_bytes)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s of %zu elements on rank %d: in and out overlap; give the same buffer, with this "
                            "rank's part at its offset, or two that are apart",
                            dtrain__kind_name((uint64_t)op->kind), op->count, comm->rank);
    return DTRAIN_OK;
}

/* Checks a call's arguments before anything of it is seen by a peer. */
static dtrain_status dtrain__op_check(dtrain_comm *comm, const dtrain__op *op)
{
    unsigned bits = dtrain_dtype_bits(op->dtype);
    size_t bytes, begin, shard;
    const char *kind = dtrain__kind_name((uint64_t)op->kind);
    int reduces = op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__REDUCE_SCATTER;
    if (bits == 0 || bits % 8 != 0 || (reduces && !dtrain__fold_supported(op->dtype, op->op)))
        return dtrain__fail(
            &comm->error, DTRAIN_ERR_INVALID,
            "%s on rank %d: dtype %d (%s) with operation %d (%s) is not supported; are the two swapped?", kind,
            comm->rank, (int)op->dtype, dtrain_dtype_name(op->dtype), (int)op->op, dtrain__op_name((uint64_t)op->op));
    if (!dtrain__mul_size(op->count, bits / 8, &bytes) || bytes > SIZE_MAX / 4)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: %zu elements of %u bits overflow a size",
                            kind, comm->rank, op->count, bits);
    if (op->root < 0 || op->root >= comm->size)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: rank %d is not among the %d ranks", kind,
                            comm->rank, op->root, comm->size);
    if ((op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV) && op->root == comm->rank)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: the peer is this rank itself", kind,
                            comm->rank);
    shard = dtrain_split(op->count, comm->size, comm->rank, &begin) * (bits / 8);
    begin *= bits / 8;
    switch (op->kind) {
    case DTRAIN__REDUCE_SCATTER: return dtrain__op_check_buffers(comm, op, bytes, shard, begin);
    case DTRAIN__ALL_GATHER: return dtrain__op_check_buffers(comm, op, shard, bytes, begin);
    case DTRAIN__SEND: return dtrain__op_check_buffers(comm, op, bytes, 0, 0);
    case DTRAIN__RECV: return dtrain__op_check_buffers(comm, op, 0, bytes, 0);
    default: return dtrain__op_check_buffers(comm, op, bytes, bytes, 0);
    }
}

#endif
