/* ---- >>op ----
 * One operation on one rank: how it is described, checked and laid out, and all texts about it. Posts and message
 * headers describe calls by the same words, so a rank can quote what another one called. */
#ifndef DTRAIN__OP
#define DTRAIN__OP
#include "group.c"
DTRAIN__FAST_BEGIN

/* Bytes of one of the caller's elements. */
static size_t dtrain__op_width(const dtrain__op *op)
{
    return dtrain__dtype_width(op->dtype);
}

static size_t dtrain__op_bytes(const dtrain__op *op)
{
    return op->count * dtrain__op_width(op);
}

/* Whether it is one message in one direction; several of these may be under way at once. */
static int dtrain__op_is_one_way(const dtrain__op *op)
{
    return op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV;
}

static int dtrain__op_is_fused(const dtrain__op *op)
{
    return op->algorithm == DTRAIN_ALGORITHM_FUSED;
}

static int dtrain__op_kind_reduces(uint64_t kind)
{
    return kind == DTRAIN__ALL_REDUCE || kind == DTRAIN__REDUCE_SCATTER || kind == DTRAIN__REDUCE ||
           kind == DTRAIN__SCAN || kind == DTRAIN__EXSCAN;
}

static int dtrain__op_scans(const dtrain__op *op)
{
    return op->kind == DTRAIN__SCAN || op->kind == DTRAIN__EXSCAN;
}

/* The ranks that this one's result of a scan is of: those from 0 on. */
static int dtrain__op_scanned(const dtrain_comm *comm, const dtrain__op *op)
{
    return comm->rank + (op->kind == DTRAIN__SCAN);
}

static int dtrain__op_reduces(const dtrain__op *op)
{
    return dtrain__op_kind_reduces(op->kind);
}

static size_t dtrain__op_result_width(const dtrain__op *op)
{
    return dtrain__dtype_width(op->partial ? dtrain__fold_partial(op->dtype) : op->dtype);
}

static int dtrain__op_kind_is_message(uint64_t kind)
{
    return kind == DTRAIN__SEND || kind == DTRAIN__RECV || kind == DTRAIN__EXCHANGE;
}

static int dtrain__op_is_message(const dtrain__op *op)
{
    return dtrain__op_kind_is_message(op->kind);
}

static DTRAIN__NOINLINE const char *dtrain__op_kind_name(uint64_t kind)
{
    static const char *const names[] = {"no call", "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "reduce",  "gather",     "scatter",        "all_to_all", "scan",
                                        "exscan",  "barrier",    "send",           "recv",       "exchange"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : "an unknown call";
}

static const char *dtrain__op_name(uint64_t op)
{
    static const char *const names[] = {"sum", "mean", "product", "min", "max", "and", "or", "xor"};
    return op - DTRAIN_SUM < sizeof names / sizeof names[0] ? names[op - DTRAIN_SUM] : "no operation";
}

static const char *dtrain__op_algorithm_name(uint64_t algorithm)
{
    static const char *const names[] = {
        "fused", "recursive_doubling", "tree", "ring", "halving_doubling", "direct", "bruck", "nodes", "double_tree"};
    algorithm %= DTRAIN__WAY_ANY;
    size_t index = (size_t)(algorithm - DTRAIN_ALGORITHM_FUSED);
    return algorithm == DTRAIN_ALGORITHM_AUTO       ? "auto"
           : index < sizeof names / sizeof names[0] ? names[index]
                                                    : "no algorithm";
}

/* A hash of the parts that the caller gave; 0 if it gave none. Source: FNV-1a, RFC 9923. */
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

/* What an operation's steps depend on besides its arguments. */
static uint64_t dtrain__op_way(const dtrain_comm *comm, const dtrain__op *op)
{
    uint64_t way = (uint64_t)op->algorithm;
    if (op->algorithm == DTRAIN_ALGORITHM_NODES)
        way |= (uint64_t)comm->node_ranks << DTRAIN__WAY_NODE;
    return dtrain__op_reduces(op) && comm->desc.order == DTRAIN_ORDER_ANY ? way | DTRAIN__WAY_ANY : way;
}

/* Writes what the peer of one direction must have called as well. Only an exchange has two directions that differ. It
 * is read soon in words of 64 bits, as it is written; processors wait where a copy reads more at once. */
static void dtrain__op_call(const dtrain_comm *comm, const dtrain__op *op, int receiving, dtrain__call *call)
{
    int message = dtrain__op_is_message(op), other = receiving && op->kind == DTRAIN__EXCHANGE;
    call->kind = message ? DTRAIN__SEND : op->kind;
    call->number = other ? op->in_number : op->number;
    call->dtype = (uint64_t)op->dtype;
    call->op = (uint64_t)op->op;
    call->count = other ? op->in_count : op->count;
    if (op->kind == DTRAIN__ALL_TO_ALL && op->counts != NULL)
        call->count = 0; /* every rank has a count of its own */
    call->root = message ? comm->number : (uint64_t)op->root;
    call->algorithm = message ? 0 : dtrain__op_way(comm, op);
    call->ranks = (uint64_t)comm->size;
    call->parts = message ? 0 : dtrain__op_parts_hash(comm, op);
    if (op->whole_parts != 0) /* they may equal the counts of the step */
        call->parts = call->parts * 0x100000001b3u ^ op->whole_parts;
    call->group = comm->group;
    call->form = op->form;
    call->first = op->first;
    call->digest = op->digest;
}

typedef struct dtrain__text {
    char text[160];
} dtrain__text;

/* Packs the call that a step belongs to, and the step's number: see dtrain__op_call_whole. */
static uint64_t dtrain__op_pack(const dtrain__op *whole, int step)
{
    return (uint64_t)whole->kind | (uint64_t)(whole->counts != NULL) << 7 | (uint64_t)whole->op << 8 |
           (uint64_t)whole->root << 16 | (uint64_t)whole->dtype << 40 | (uint64_t)step << 56;
}

/* What the caller called. A step of a call on memory of devices keeps the whole call in its digest. So does what ranks
 * say to each other before their first collective. */
static dtrain__call dtrain__op_call_whole(const dtrain__call *call)
{
    dtrain__call whole = *call;
    if (call->form < DTRAIN__ON_DEVICE)
        return whole;
    whole.kind = call->digest & 0x7f;
    whole.op = call->digest >> 8 & 0xff;
    whole.root = call->digest >> 16 & (DTRAIN__MAX_RANKS - 1);
    whole.dtype = call->digest >> 40 & 0xffff;
    whole.count = call->first;
    whole.form = 0;
    whole.parts = (call->digest >> 7 & 1) << 63;
    return whole;
}

/* A dtype's name in small letters. A handler of signals may call it. */
static void dtrain__op_dtype_name(dtrain_dtype dtype, char text[16])
{
    const char *name = dtrain_dtype_name(dtype);
    size_t n = 0;
    for (; name[n] != 0 && n < 15; n++)
        text[n] = (char)(name[n] >= 'A' && name[n] <= 'Z' ? name[n] + ('a' - 'A') : name[n]);
    text[n] = 0;
}

/* "all_reduce #412 (sum, f32 x 1048576)"; for fused calls the first one, and their number. */
static dtrain__text dtrain__op_call_text(const dtrain__call *given)
{
    dtrain__text out;
    dtrain__call whole = dtrain__op_call_whole(given);
    const dtrain__call *call = &whole;
    const char *prefix = given->form == DTRAIN__ON_DEVICE ? "device_group_" : "";
    uint64_t count = call->form != 0 ? call->first : call->count;
    char dtype[16], detail[32] = "", root[28] = "", fused[29] = "", elements[24] = "";
    int reduces = dtrain__op_kind_reduces(call->kind);
    dtrain__op_dtype_name(call->dtype < 64 ? (dtrain_dtype)call->dtype : (dtrain_dtype)0, dtype);
    if (reduces)
        snprintf(detail, sizeof detail, "%s, ", dtrain__op_name(call->op));
    if (call->kind >= DTRAIN__BROADCAST && call->kind <= DTRAIN__SCATTER)
        snprintf(root, sizeof root, ", root %llu", (unsigned long long)call->root);
    if (call->form > 1)
        snprintf(fused, sizeof fused, ", %llu fused", (unsigned long long)call->form);
    if (call->parts != 1 || count > 0) /* in an uneven all-to-all every rank has a count of its own */
        snprintf(elements, sizeof elements, " x %llu", (unsigned long long)count);
    if (call->kind == DTRAIN__BARRIER)
        snprintf(out.text, sizeof out.text, "barrier #%llu", (unsigned long long)call->number);
    else
        snprintf(out.text, sizeof out.text, "%s%s%s #%llu (%s%s%s%s%s%s)", prefix, dtrain__op_kind_name(call->kind),
                 call->parts == 1 || call->parts >> 63 != 0 ? "_v" : "", (unsigned long long)call->number, detail,
                 dtype, elements, root,
                 call->algorithm % DTRAIN__WAY_ANY == DTRAIN_ALGORITHM_RING && reduces ? ", ring" : "", fused);
    return out;
}

/* The call as it was made, for texts: messages keep their direction and peer. */
static void dtrain__op_called(const dtrain_comm *comm, const dtrain__op *op, dtrain__call *call)
{
    dtrain__op_call(comm, op, op->root < 0, call);
    call->kind = op->kind;
    call->root = (uint64_t)(op->root < 0 ? op->from : op->root);
}

static dtrain__text dtrain__op_text(const dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__call call;
    dtrain__op_called(comm, op, &call);
    return dtrain__op_call_text(&call);
}

/* "nodes of 4 ranks", "tree in any order" */
static dtrain__text dtrain__op_way_text(uint64_t way)
{
    dtrain__text out;
    char node[40] = "";
    if (way >> DTRAIN__WAY_NODE != 0)
        snprintf(node, sizeof node, " of %u ranks", (unsigned)(way >> DTRAIN__WAY_NODE));
    snprintf(out.text, sizeof out.text, "%s%s%s", dtrain__op_algorithm_name(way), node,
             (way & DTRAIN__WAY_ANY) != 0 ? " in any order" : "");
    return out;
}

#define DTRAIN__SENT_BEFORE " (receive a message before the next collective)"
/* A frequent mistake: a collective call under a condition that holds on some ranks only. */
#define DTRAIN__ONE_RANK_ALONE " (is one of them inside an if (rank == 0)?)"

/* Another rank's call does not fit. Quotes both calls or, if they look the same, says what differs. */
static dtrain_status dtrain__op_mismatch(const dtrain_comm *comm, dtrain__op *op, int peer, const dtrain__call *theirs)
{
    dtrain__text mine = dtrain__op_text(comm, op), other = dtrain__op_call_text(theirs);
    dtrain__call call;
    dtrain__op_call(comm, op, 0, &call);
    int message = dtrain__op_is_message(op), sent = theirs->kind == DTRAIN__SEND;
    int alike = theirs->kind == call.kind && theirs->number == call.number && theirs->dtype == call.dtype &&
                theirs->op == call.op && theirs->root == call.root &&
                (theirs->count == call.count || call.form >= DTRAIN__ON_DEVICE) && theirs->form == call.form &&
                theirs->first == call.first && theirs->digest == call.digest;
    if (theirs->ranks != (uint64_t)comm->size)
        return dtrain__fail(
            &op->error, DTRAIN_ERR_MISMATCH,
            "%s: rank %d is in a group of %llu ranks, this rank %d in one of %d; make the call on the same group",
            mine.text, peer, (unsigned long long)theirs->ranks, comm->rank, comm->size);
    if (theirs->group != comm->group)
        return dtrain__fail(
            &op->error, DTRAIN_ERR_MISMATCH,
            "%s: rank %d called %s in group %llx, this rank %d %s in group %llx; make the call on the same group",
            mine.text, peer, other.text, (unsigned long long)theirs->group, comm->rank, mine.text,
            (unsigned long long)comm->group);
    if (message && sent && theirs->root != comm->number)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s after %llu collectives of the group, this rank %d %s after %llu%s",
                            mine.text, peer, other.text, (unsigned long long)theirs->root, comm->rank, mine.text,
                            (unsigned long long)comm->number, DTRAIN__SENT_BEFORE);
    if (alike && theirs->parts != call.parts)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s with other per-rank counts or offsets than this rank %d; give every "
                            "rank the same arrays",
                            mine.text, peer, other.text, comm->rank);
    if (alike && theirs->algorithm != call.algorithm)
        return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                            "%s: rank %d called %s by %s, this rank %d by %s; give every rank the same desc.algorithm, "
                            "order, node_ranks and DTRAIN_ALGORITHM",
                            mine.text, peer, other.text, dtrain__op_way_text(theirs->algorithm).text, comm->rank,
                            dtrain__op_way_text(call.algorithm).text);
    return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                        "%s: rank %d called %s, this rank %d %s; both must make the same calls in the same order%s",
                        mine.text, peer, other.text, comm->rank, mine.text,
                        message ? ""
                        : sent  ? DTRAIN__SENT_BEFORE
                        : dtrain__op_call_whole(theirs).kind != dtrain__op_call_whole(&call).kind
                            ? DTRAIN__ONE_RANK_ALONE
                            : "");
}

/* Both made the same call, but the sender gives another number of bytes than the receiver expects. */
static dtrain_status dtrain__op_uneven(const dtrain_comm *comm, dtrain__op *op, int from, int to, size_t gives,
                                       size_t awaits)
{
    size_t width = dtrain__op_width(op);
    return dtrain__fail(&op->error, DTRAIN_ERR_MISMATCH,
                        "%s on rank %d: rank %d gives %zu elements to rank %d, which expects %zu; give both the same "
                        "count",
                        dtrain__op_text(comm, op).text, comm->rank, from, gives / width, to, awaits / width);
}

/* The operation ends because the group is broken; quotes the first cause. */
static dtrain_status dtrain__op_blame(const dtrain_comm *comm, dtrain__op *op, const dtrain__error *cause)
{
    dtrain__text mine = dtrain__op_text(comm, op);
    dtrain__error first = *cause;
    return dtrain__fail(&op->error, first.status, "%s on rank %d: %s", mine.text, comm->rank,
                        dtrain__status_cause(&first));
}

/* Ends an operation that needs a rank which has left. */
static dtrain_status dtrain__op_needs_left(const dtrain_comm *comm, dtrain__op *op, int rank)
{
    dtrain__seat_needed(comm->seat, rank);
    return dtrain__op_blame(comm, op, &dtrain__thread_error);
}

/* Starts the clock of a call's deadline. */
static void dtrain__op_clock(const dtrain_comm *comm, dtrain__op *op)
{
    op->started_ns = dtrain__os_now_ns();
    op->deadline_ns = dtrain__group_deadline(comm, op->started_ns);
}

/* Makes a buffer of the group large enough for an operation. The group keeps it for later ones. */
static int dtrain__op_reserve(dtrain_comm *comm, dtrain__op *op, unsigned char **buffer, size_t bytes)
{
    void *room = dtrain__memory_room(comm->allocator, *buffer, bytes);
    if (room != NULL)
        *buffer = (unsigned char *)room;
    else
        dtrain__fail(&op->error, DTRAIN_ERR_MEMORY,
                     "%s on rank %d: no memory for %zu bytes beside the caller's buffers",
                     dtrain__op_text(comm, op).text, comm->rank, bytes);
    return room != NULL;
}

/* Makes the tables that have an entry for each rank, at the first operation. Returns 0 if there is no memory. */
static int dtrain__op_tables(dtrain_comm *comm, dtrain__op *op)
{
    size_t size = (size_t)comm->size;
    unsigned char *room = NULL;
    if (comm->parts != NULL)
        return 1;
    if (!dtrain__op_reserve(comm, op, &room, size * (2 * sizeof *comm->parts + 4 * sizeof(void *))))
        return 0;
    comm->parts = (dtrain_extent *)(void *)room;
    comm->others = comm->parts + size;
    comm->ins = (const void **)(void *)(comm->others + size);
    comm->outs = (void **)(void *)(comm->ins + size);
    comm->buffers = (unsigned char **)(void *)(comm->outs + size);
    return 1;
}

/* Folds n elements of all of comm->ins into `count` outs. */
static void dtrain__op_fold(dtrain_comm *comm, const dtrain__op *op, void *const *outs, int count, size_t n)
{
    if (n > 0 && op->partial)
        dtrain__fold_partials(op->dtype, comm->ins, comm->size, outs[0], n);
    else if (n > 0)
        dtrain__fold(op->dtype, op->op, comm->size, comm->ins, comm->size, outs, count, 0, n);
}

/* A rank's shard of the operation's elements, in whole rows. */
static size_t dtrain__op_shard(const dtrain_comm *comm, const dtrain__op *op, int rank, size_t *begin)
{
    size_t row = op->row > 0 ? op->row : 1, rows = dtrain__split(op->count / row, comm->size, rank, begin);
    *begin *= row;
    return rows * row;
}

/* Fills in every rank's part: as given, else its shard. */
static void dtrain__op_extents(const dtrain_comm *comm, const dtrain__op *op, const size_t *counts,
                               const size_t *offsets, dtrain_extent *parts)
{
    size_t next = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        dtrain_extent *part = &parts[rank];
        if (counts == NULL) {
            part->count = dtrain__op_shard(comm, op, rank, &part->begin);
        } else {
            part->count = counts[rank];
            part->begin = offsets != NULL ? offsets[rank] : next;
            next += counts[rank];
        }
    }
}

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
    return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                        "%s on rank %d: %zu elements of %u bits overflow a size; split the call",
                        dtrain__op_kind_name(op->kind), comm->rank, count, dtrain_dtype_bits(op->dtype));
}

/* *bytes: from a vector's start to the end of its last part. */
static dtrain_status dtrain__op_reach(dtrain_comm *comm, const dtrain__op *op, const size_t *counts,
                                      const size_t *offsets, size_t *bytes)
{
    size_t width = dtrain__op_width(op), most = SIZE_MAX / 4 / width, next = 0;
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

/* The bytes of this rank's buffers, *in and *out. *offset: where the shorter begins in the longer if they are one
 * buffer. */
static dtrain_status dtrain__op_sizes(dtrain_comm *comm, const dtrain__op *op, size_t *in, size_t *out, size_t *offset)
{
    size_t width = dtrain__op_width(op), whole = op->count * width, begin = 0, part;
    dtrain_status status = DTRAIN_OK;
    int root = comm->rank == op->root;
    *offset = 0;
    *in = *out = whole;
    if (op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__BROADCAST)
        return DTRAIN_OK;
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
        part = dtrain__op_shard(comm, op, comm->rank, &begin);
    }
    switch (op->kind) {
    case DTRAIN__REDUCE_SCATTER: *in = whole, *out = part * dtrain__op_result_width(op), *offset = begin * width; break;
    case DTRAIN__ALL_GATHER: *in = part * width, *out = whole, *offset = begin * width; break;
    case DTRAIN__GATHER: *in = part * width, *out = root ? whole : 0, *offset = begin * width; break;
    case DTRAIN__SCATTER: *in = root ? whole : 0, *out = part * width, *offset = begin * width; break;
    case DTRAIN__REDUCE: *out = root ? whole : 0; break;
    case DTRAIN__EXSCAN: *out = comm->rank > 0 ? whole : 0; break;
    case DTRAIN__ALL_TO_ALL: *out = (size_t)comm->size * part * width; break;
    case DTRAIN__SEND: *out = 0; break;
    case DTRAIN__RECV: *in = 0; break;
    case DTRAIN__EXCHANGE: *in = op->root >= 0 ? whole : 0, *out = op->from >= 0 ? op->in_count * width : 0; break;
    default: break;
    }
    return status;
}

/* Checks that the buffers are one, with the shorter at its place in the longer, or do not overlap. */
static dtrain_status dtrain__op_check_buffers(dtrain_comm *comm, const dtrain__op *op)
{
    uintptr_t in = (uintptr_t)op->in, out = (uintptr_t)op->out;
    size_t in_bytes, out_bytes, offset;
    dtrain_status status = dtrain__op_sizes(comm, op, &in_bytes, &out_bytes, &offset);
    if (status != DTRAIN_OK)
        return status;
    if ((in_bytes > 0 && op->in == NULL) || (out_bytes > 0 && op->out == NULL))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s of %zu elements on rank %d: %s is NULL; give a buffer", dtrain__op_kind_name(op->kind),
                            op->count, comm->rank, op->in == NULL && in_bytes > 0 ? "in" : "out");
    int in_place = in_bytes >= out_bytes ? out == in + offset : in == out + offset;
    if (op->kind == DTRAIN__EXCHANGE || op->partial)
        in_place = 0;
    else if (op->kind == DTRAIN__ALL_TO_ALL && in_place && in_bytes > 0)
        in_place = in_bytes == out_bytes &&
                   (op->counts == NULL || (op->counts == op->out_counts && op->offsets == op->out_offsets));
    if (in_bytes > 0 && out_bytes > 0 && !in_place && in < out + out_bytes && out < in + in_bytes)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s of %zu elements on rank %d: in and out overlap; give the same buffer, with this "
                            "rank's part at its offset, or two that are apart",
                            dtrain__op_kind_name(op->kind), op->count, comm->rank);
    return DTRAIN_OK;
}

static dtrain_status dtrain__op_check_peer(dtrain_comm *comm, const dtrain__op *op, int peer)
{
    if (peer == -1 && op->kind == DTRAIN__EXCHANGE)
        return DTRAIN_OK;
    if (peer < 0 || peer >= comm->size)
        return dtrain__fail(
            &comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: rank %d is not among the %d ranks of the group%s",
            dtrain__op_kind_name(op->kind), comm->rank, peer, comm->size,
            op->kind != DTRAIN__EXCHANGE && op->counts == NULL && op->count < (size_t)comm->size
                ? dtrain__op_is_message(op) ? "; are count and the rank swapped?" : "; are count and root swapped?"
                : "");
    if (dtrain__op_is_message(op) && peer == comm->rank)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s on rank %d: the peer is this rank itself; give another rank",
                            dtrain__op_kind_name(op->kind), comm->rank);
    return DTRAIN_OK;
}

/* Returns what to do about a dtype and an operation that do not fit. */
static const char *dtrain__op_advice(const dtrain__op *op)
{
    unsigned bits = dtrain_dtype_bits(op->dtype);
    if (bits == 0 && (int)op->dtype >= DTRAIN_SUM && (int)op->dtype <= DTRAIN_XOR)
        return "are the two swapped?";
    if (bits == 0 || bits % 8 != 0)
        return bits == 0 ? "give a DTRAIN_ constant of dtrain_dtype" : "send it as bytes, DTRAIN_U8";
    if (op->op < DTRAIN_SUM || op->op > DTRAIN_XOR)
        return "give a DTRAIN_ constant of dtrain_op";
    if (op->op >= DTRAIN_AND)
        return "AND, OR and XOR are for integers";
    return op->op == DTRAIN_MEAN ? "a mean is for floats: sum, and divide" : "convert it to a dtype that is added";
}

/* Whether the bytes of all buffers of so many elements can be computed. Most counts are so small that no division is
 * needed. */
static int dtrain__op_fits(const dtrain_comm *comm, const dtrain__op *op, size_t count)
{
    size_t parts = op->kind == DTRAIN__ALL_TO_ALL ? (size_t)comm->size : 1;
    return count <= SIZE_MAX / 32 / DTRAIN__MAX_RANKS || count <= SIZE_MAX / 4 / dtrain__op_width(op) / parts;
}

/* Checks a call's arguments before a peer sees anything of it. */
static dtrain_status dtrain__op_check(dtrain_comm *comm, const dtrain__op *op)
{
    unsigned bits = (unsigned)dtrain__dtype_find(op->dtype)->bits;
    dtrain_status status;
    if (bits == 0 || bits % 8 != 0 || (dtrain__op_reduces(op) && !dtrain__fold_supported(op->dtype, op->op)))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "%s on rank %d: dtype %d (%s) with operation %d (%s) is not supported; %s",
                            dtrain__op_kind_name(op->kind), comm->rank, (int)op->dtype, dtrain_dtype_name(op->dtype),
                            (int)op->op, dtrain__op_name((uint64_t)op->op), dtrain__op_advice(op));
    if (!dtrain__op_fits(comm, op, op->count))
        return dtrain__op_too_large(comm, op, op->count);
    if (!dtrain__op_fits(comm, op, op->in_count))
        return dtrain__op_too_large(comm, op, op->in_count);
    status = dtrain__op_check_peer(comm, op, op->root);
    if (status == DTRAIN_OK && op->kind == DTRAIN__EXCHANGE)
        status = dtrain__op_check_peer(comm, op, op->from);
    if (status == DTRAIN_OK)
        status = dtrain__op_check_buffers(comm, op);
    if (status != DTRAIN_OK || !dtrain__op_is_message(op))
        return status;
    int room = (op->root < 0 || dtrain__group_acquaint(comm, op->root)) &&
               (op->kind != DTRAIN__EXCHANGE || op->from < 0 || dtrain__group_acquaint(comm, op->from));
    return room ? DTRAIN_OK
                : dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "%s on rank %d: no memory to count messages",
                               dtrain__op_kind_name(op->kind), comm->rank);
}

DTRAIN__FAST_END
#endif
