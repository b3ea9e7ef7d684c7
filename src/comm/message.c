/* ---- >>message ----
 * Collectives over messages: runs the steps of a plan. What goes out and what comes in move together if the transport
 * can do that. Otherwise they move in an order in which blocked sends form no cycle. Sums are folded while more
 * arrives.
 *
 * Every message carries the call that it belongs to. A message of another call is a mismatch before a byte of its
 * payload is taken. A small payload travels in one piece with its header.
 *
 * A rank that leaves may end a collective in the middle. Each pair of the other ranks then finishes the message that
 * was under way between them. They drop what belongs to the collective, and tell a rank that is still in it. */
#ifndef DTRAIN__MESSAGE
#define DTRAIN__MESSAGE
#include "op.c"
#include "recorder.c"
#include "plan.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__MESSAGE_MAGIC 0x3147534d4e525444u /* "DTRNMSG1" */

/* Whether one direction of an exchange has stopped in the middle of its message while its peer is still there. */
static int dtrain__message_stuck(const dtrain_comm *comm, int peer, size_t moved)
{
    return peer >= 0 && moved > 0 && moved < SIZE_MAX && !dtrain__group_has_left(comm, peer);
}

/* Counts the whole messages that an operation has moved. first: the one with op->root; in: the incoming one of an
 * exchange. */
static void dtrain__message_count(dtrain_comm *comm, const dtrain__op *op, int first, int in)
{
    if (op->root >= 0 && first)
        dtrain__group_direction(comm, op->root, op->kind != DTRAIN__RECV)->number = op->number;
    if (op->kind == DTRAIN__EXCHANGE && op->from >= 0 && in)
        dtrain__group_direction(comm, op->from, 0)->number = op->in_number;
}

/* Returns where header and small payload of one direction are. Messages of a queue move together and have buffers of
 * their own. */
static unsigned char *dtrain__message_buffer(dtrain_comm *comm, const dtrain__op *op, int sending)
{
    return op->packet != NULL ? op->packet : sending ? comm->messages.out : comm->messages.in;
}

/* A collective ends because a rank has left. The rest of its messages under way is owed: it moves before the next
 * messages of the same two ranks and is dropped. Returns 0 if the size of the rest is unknown, or there is no
 * memory. */
static int dtrain__message_owe(dtrain_comm *comm, const dtrain__op *op)
{
    const size_t header = sizeof(dtrain__message_header);
    dtrain__message_header came;
    dtrain__step step;
    if (op->sent > 0 && op->sent != SIZE_MAX && dtrain__plan_step(comm, op, (int)op->send_at, &step)) {
        if (!dtrain__group_acquaint(comm, step.to))
            return 0;
        dtrain__group_direction(comm, step.to, 1)->owed = header + step.send_bytes - op->sent;
    }
    if (op->received > 0 && op->received != SIZE_MAX && dtrain__plan_step(comm, op, (int)op->at, &step)) {
        if (op->received < header || !dtrain__group_acquaint(comm, step.from))
            return 0;
        memcpy(&came, dtrain__message_buffer(comm, op, 0), sizeof came);
        dtrain__group_direction(comm, step.from, 0)->owed = header + (size_t)came.bytes - op->received;
    }
    return 1;
}

/* Whether messages between other ranks can follow an operation that ended because a rank had left. */
static int dtrain__message_mends(dtrain_comm *comm, const dtrain__op *op)
{
    if (dtrain__op_is_one_way(op))
        return 1;                       /* no third rank has a part of it */
    if (op->kind == DTRAIN__EXCHANGE) { /* unless its other message was cut off; a whole direction counts */
        dtrain__message_count(comm, op, op->sent == SIZE_MAX || op->send_at > 0,
                              op->received == SIZE_MAX || op->at > 0);
        return !dtrain__message_stuck(comm, op->root, op->sent) && !dtrain__message_stuck(comm, op->from, op->received);
    }
    comm->messages.missed =
        op->number << DTRAIN__RANK_BITS | (uint64_t)dtrain__membership_misses(comm->members, op->number);
    return dtrain__message_owe(comm, op);
}

/* The operation has failed. That breaks the group, unless no message was cut off and one of these holds:
 *
 *   - its deadline has passed: it can be called again
 *   - it needs a rank that has left: other ranks may not need it, and the transport knows of all worse cases
 *   - it is a message, and the group was broken before: others may still be received. This holds for a send that was
 *     cut off, too, as it leaves whole what comes */
static int dtrain__message_fail(dtrain_comm *comm, dtrain__op *op)
{
    int broken = dtrain__group_cause(comm) != NULL;
    int left = op->error.status == DTRAIN_ERR_PEER_LOST && !broken;
    int spares = op->error.status == DTRAIN_ERR_TIMEOUT || left || (dtrain__op_is_one_way(op) && broken);
    int cut = op->touched && !(broken && op->kind == DTRAIN__SEND);
    if (!spares || (left ? !dtrain__message_mends(comm, op) : cut)) {
        comm->broken = op->error;
        if (comm->transport.fail != NULL)
            comm->transport.fail(comm->transport.self, op->error.status, op->error.text);
    }
    return 1;
}

/* Puts this rank's own part of the result in its place. */
static void dtrain__message_own(dtrain_comm *comm, const dtrain__op *op)
{
    size_t width = dtrain__op_width(op), count = comm->parts[comm->rank].count;
    size_t begin = comm->parts[comm->rank].begin, from = 0, to = begin;
    int wanted = comm->rank == op->root;
    switch (op->kind) {
    case DTRAIN__ALL_GATHER: wanted = op->algorithm != DTRAIN_ALGORITHM_BRUCK; break;
    case DTRAIN__GATHER: break;
    case DTRAIN__SCATTER: from = begin, to = 0; break;
    case DTRAIN__ALL_TO_ALL: from = begin, to = comm->others[comm->rank].begin, wanted = 1; break;
    default: return;
    }
    if (!wanted || count == 0)
        return;
    unsigned char *target = (unsigned char *)op->out + to * width;
    const unsigned char *source = (const unsigned char *)op->in + from * width;
    if (target != source)
        memmove(target, source, count * width);
}

static void dtrain__message_number(const dtrain_comm *comm, dtrain__op *op)
{
    if (!dtrain__op_is_message(op)) {
        op->number = comm->number + 1;
        return;
    }
    if (op->root >= 0)
        op->number = 1 + dtrain__group_direction(comm, op->root, op->kind != DTRAIN__RECV)->number;
    if (op->kind == DTRAIN__EXCHANGE && op->from >= 0)
        op->in_number = 1 + dtrain__group_direction(comm, op->from, 0)->number;
}

/* Ends a collective that a rank left before, and a message to such a rank that has not begun; returns 1 then. All ranks
 * of the collective find this by themselves. */
static int dtrain__message_needs_left(dtrain_comm *comm, dtrain__op *op)
{
    int rank = -1;
    if (!dtrain__op_is_message(op))
        rank = dtrain__membership_misses(comm->members, op->number);
    else if (op->phase == 0 && op->kind != DTRAIN__RECV && op->root >= 0 && dtrain__group_has_left(comm, op->root))
        rank = op->root;
    if (rank < 0)
        return 0;
    dtrain__op_needs_left(comm, op, rank);
    return dtrain__message_fail(comm, op);
}

/* Starts an operation. Returns 1 if that ended it.
 *
 * cause: what the transport knows to have broken the group, or NULL. A recv may still begin on a broken group, unless a
 * call of this rank other than a send has stopped in the middle of a message. */
static int dtrain__message_start(dtrain_comm *comm, dtrain__op *op, const dtrain__error *cause)
{
    dtrain__message_number(comm, op);
    op->salvages = cause != NULL && op->kind == DTRAIN__RECV && comm->broken.status == DTRAIN_OK;
    if (comm->broken.status != DTRAIN_OK)
        cause = &comm->broken;
    if (cause != NULL && !op->salvages) {
        dtrain__op_blame(comm, op, cause);
        return 1;
    }
    if (dtrain__message_needs_left(comm, op))
        return 1;
    dtrain__recorder_start(comm, op);
    if (!dtrain__op_tables(comm, op))
        return 1;
    dtrain__op_layout(comm, op);
    if (!dtrain__op_reserve(comm, op, &comm->scratch, dtrain__plan_scratch(comm, op)))
        return 1;
    if (dtrain__plan_whole(op))
        dtrain__step_widen(op, 0, op->count, dtrain__step_held(comm, op));
    if (op->kind == DTRAIN__SCAN && op->count > 0)
        memcpy(dtrain__step_scanned(comm, op), dtrain__step_held(comm, op), op->count * dtrain__step_width(op));
    else if (!dtrain__op_is_message(op))
        dtrain__message_own(comm, op);
    op->phase = 1;
    return 0;
}

static int dtrain__message_end(dtrain_comm *comm, dtrain__op *op)
{
    size_t begin = op->kind == DTRAIN__REDUCE_SCATTER ? comm->parts[comm->rank].begin : 0;
    size_t n = op->kind == DTRAIN__REDUCE_SCATTER ? comm->parts[comm->rank].count : op->count;
    int ranks = dtrain__op_scans(op) ? dtrain__op_scanned(comm, op) : comm->size;
    if (dtrain__op_scans(op) && n > 0 && ranks > 0)
        dtrain__fold_finish(op->dtype, op->op, ranks, dtrain__step_scanned(comm, op), op->out, n);
    else if (dtrain__plan_whole(op) && n > 0 && ranks > 0 && (op->kind != DTRAIN__REDUCE || comm->rank == op->root))
        dtrain__fold_finish(op->dtype, op->op, comm->size, dtrain__step_held(comm, op) + begin * dtrain__step_width(op),
                            op->out, n);
    if (dtrain__op_is_message(op))
        dtrain__message_count(comm, op, 1, 1);
    else
        comm->number = op->number;
    return 1;
}

/* Continues a checksum over more data. It changes if any 8 aligned bytes change. */
static uint64_t dtrain__message_sum(uint64_t sum, const unsigned char *data, size_t bytes)
{
    static const uint64_t odd = 0x9e3779b97f4a7c15u;
    uint64_t lane[4] = {sum + 1, sum + 2, sum + 3, sum + 4}, word[4];
    sum = (sum + bytes) * odd;
    while (bytes > 0) {
        size_t n = bytes < sizeof word ? bytes : sizeof word;
        if (n < sizeof word)
            memset(word, 0, sizeof word);
        memcpy(word, data, n);
        for (int i = 0; i < 4; i++) {
            lane[i] = (lane[i] ^ word[i]) * odd;
            lane[i] ^= lane[i] >> 29;
        }
        data += n;
        bytes -= n;
    }
    for (int i = 0; i < 4; i++) {
        sum = (sum ^ lane[i]) * odd;
        sum ^= sum >> 32;
    }
    return sum;
}

/* The checksum of a whole message's data, in the pieces in which a receiver may get them. Never 0. */
static uint64_t dtrain__message_sum_all(const dtrain_comm *comm, const unsigned char *data, size_t bytes)
{
    size_t chunk = dtrain__step_chunk(comm);
    uint64_t sum = 0;
    for (size_t at = 0; at < bytes; at += chunk)
        sum = dtrain__message_sum(sum, data + at, bytes - at < chunk ? bytes - at : chunk);
    return sum | 1;
}

static uint64_t dtrain__message_header_sum(const dtrain__message_header *header)
{
    return dtrain__message_sum(0, (const unsigned char *)header, offsetof(dtrain__message_header, check));
}

static void dtrain__message_write_header(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    dtrain__message_header header;
    header.magic = DTRAIN__MESSAGE_MAGIC;
    dtrain__op_call(comm, op, 0, &header.call);
    header.tag = dtrain__op_is_message(op) ? comm->messages.missed : step->tag_out;
    header.bytes = step->send_bytes;
    header.data_check = comm->checks ? dtrain__message_sum_all(comm, step->send, step->send_bytes) : 0;
    header.check = dtrain__message_header_sum(&header);
    unsigned char *packet = dtrain__message_buffer(comm, op, 1);
    memcpy(packet, &header, sizeof header);
    if (step->send_bytes > 0 && step->send_bytes <= DTRAIN__MESSAGE_SMALL)
        memcpy(packet + sizeof header, step->send, step->send_bytes);
}

/* Returns the next run of bytes of one direction of a step. */
static dtrain_transfer dtrain__message_next(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, int sending)
{
    size_t done = sending ? op->sent : op->received, payload = sending ? step->send_bytes : step->recv_bytes;
    size_t header = sizeof(dtrain__message_header), offset = done - header, chunk = dtrain__step_chunk(comm), run;
    unsigned char *small = dtrain__message_buffer(comm, op, sending);
    dtrain_transfer next = {sending ? step->to : step->from, small + done, 0, 0, 0};
    const dtrain__direction *direction = dtrain__group_direction(comm, next.peer, sending);
    size_t owed = direction != NULL ? direction->owed : 0;
    if (owed > 0) {
        next.data = comm->messages.waste[sending];
        next.bytes = owed < sizeof comm->messages.waste[0] ? owed : sizeof comm->messages.waste[0];
        return next;
    }
    if (payload <= DTRAIN__MESSAGE_SMALL) {
        next.bytes = header + payload - done;
    } else if (done < header) {
        next.bytes = header - done;
        next.more = 1;
    } else if (sending) {
        memcpy(&next.data, &step->send, sizeof next.data);
        next.data += offset;
        next.bytes = payload - offset;
    } else {
        run = step->fold_early ? chunk - offset % chunk : payload - offset;
        next.data = step->recv + (step->fold_early ? offset % chunk : offset);
        next.bytes = run < payload - offset ? run : payload - offset;
    }
    return next;
}

static dtrain_status dtrain__message_damaged(const dtrain_comm *comm, dtrain__op *op, int peer, const char *what)
{
    return dtrain__fail(&op->error, DTRAIN_ERR_CORRUPT,
                        "%s on rank %d: %s of a message from rank %d came damaged, by its checksum; "
                        "check the transport and network between the two",
                        dtrain__op_text(comm, op).text, comm->rank, what, peer);
}

/* Whether it is a whole header of this group. */
static int dtrain__message_is_whole(const dtrain_comm *comm, const dtrain__message_header *came)
{
    return came->magic == DTRAIN__MESSAGE_MAGIC && came->check == dtrain__message_header_sum(came) &&
           came->call.group == comm->group;
}

/* Reads the header that has come. Returns whether it is a whole header of this group. */
static int dtrain__message_read(dtrain_comm *comm, const dtrain__op *op, dtrain__message_header *came)
{
    memcpy(came, dtrain__message_buffer(comm, op, 0), sizeof *came);
    return dtrain__message_is_whole(comm, came);
}

/* Compares the header that has come with the call that this rank made. */
static dtrain_status dtrain__message_check(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    dtrain__message_header came;
    dtrain__call mine;
    dtrain__op_call(comm, op, 1, &mine);
    int whole = dtrain__message_read(comm, op, &came);
    if (came.magic != DTRAIN__MESSAGE_MAGIC)
        return dtrain__fail(&op->error, DTRAIN_ERR_CORRUPT,
                            "%s on rank %d: what came from rank %d is no message of dtrain; check the transport "
                            "between the two",
                            dtrain__op_text(comm, op).text, comm->rank, step->from);
    if (!whole && came.check != dtrain__message_header_sum(&came))
        return dtrain__message_damaged(comm, op, step->from, "the header");
    if (dtrain__op_is_message(op) && (came.tag != 0 || comm->messages.missed != 0 || op->salvages))
        mine.root = came.call.root; /* a rank has left: the last collective may have ended well on one side */
    if (memcmp(&came.call, &mine, sizeof mine) != 0 || (came.tag != step->tag_in && !dtrain__op_is_message(op)))
        return dtrain__op_mismatch(comm, op, step->from, &came.call);
    if (came.bytes != step->recv_bytes)
        return dtrain__op_uneven(comm, op, step->from, comm->rank, (size_t)came.bytes, step->recv_bytes);
    op->check_due = came.data_check;
    op->check = 0;
    return DTRAIN_OK;
}

/* Drops what has come of a collective that a rank had left, in front of the message that a recv awaits. Returns 0 if
 * the header that has come belongs to no such collective. */
static int dtrain__message_skip(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    dtrain__message_header came;
    unsigned char *packet = dtrain__message_buffer(comm, op, 0);
    size_t whole;
    if (!dtrain__op_is_message(op) || !dtrain__message_read(comm, op, &came) || came.call.kind == DTRAIN__SEND ||
        came.bytes > SIZE_MAX / 2 || dtrain__membership_misses(comm->members, came.call.number) < 0)
        return 0;
    whole = sizeof came + (size_t)came.bytes;
    if (op->received >= whole) {
        op->received -= whole;
        memmove(packet, packet + whole, op->received);
    } else {
        dtrain__group_direction(comm, step->from, 0)->owed = whole - op->received;
        op->received = 0;
    }
    op->touched = op->received > 0 || op->sent > 0 || op->send_at > 0;
    return 1;
}

/* Holds what has come of a message for its recv, if its sender has missed a collective because a rank had left, which
 * this one misses, too. */
static int dtrain__message_keep(dtrain_comm *comm, const dtrain__op *op, int from, uint64_t tag, const void *came,
                                size_t bytes)
{
    int rank = (int)(tag & (DTRAIN__MAX_RANKS - 1));
    if (tag >> DTRAIN__RANK_BITS == 0 || rank >= comm->size || rank == comm->rank || rank == from)
        return 0;
    dtrain__seat_skipped(comm->seat, rank, (tag >> DTRAIN__RANK_BITS) - 1);
    if (dtrain__membership_misses(comm->members, op->number) < 0)
        return 0;
    memcpy(comm->messages.held, came, bytes);
    comm->messages.held_from = from;
    comm->messages.held_bytes = bytes;
    return 1;
}

/* Whether the sender has given up this collective because a rank had left: its message says so. */
static int dtrain__message_hold(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    dtrain__message_header came;
    if (dtrain__op_is_message(op) || !dtrain__message_read(comm, op, &came) || came.call.kind != DTRAIN__SEND)
        return 0;
    if (came.tag >> DTRAIN__RANK_BITS != op->number ||
        !dtrain__message_keep(comm, op, step->from, came.tag, dtrain__message_buffer(comm, op, 0), op->received))
        return 0;
    op->received = 0;
    return 1;
}

/* A header has come. Drops what belongs to a collective that a rank had left, then checks what remains. */
static dtrain_status dtrain__message_arrived(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    while (op->received >= sizeof(dtrain__message_header))
        if (dtrain__message_hold(comm, op, step))
            return dtrain__op_needs_left(comm, op, dtrain__membership_misses(comm->members, op->number));
        else if (!dtrain__message_skip(comm, op, step))
            return dtrain__message_check(comm, op, step);
    return DTRAIN_OK;
}

/* Compares the data that have come with their checksum, if they have one. */
static dtrain_status dtrain__message_whole(const dtrain_comm *comm, dtrain__op *op, const dtrain__step *step)
{
    if (op->check_due == 0)
        return DTRAIN_OK;
    if (!step->fold_early || step->recv_bytes <= DTRAIN__MESSAGE_SMALL)
        op->check = dtrain__message_sum_all(comm, step->recv, step->recv_bytes);
    return (op->check | 1) == op->check_due ? DTRAIN_OK : dtrain__message_damaged(comm, op, step->from, "the data");
}

/* Counts what moved in one direction. Checks a header and folds a chunk once they are whole. */
static dtrain_status dtrain__message_took(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, int sending,
                                          size_t moved)
{
    size_t *done = sending ? &op->sent : &op->received, before = *done, header = sizeof(dtrain__message_header);
    size_t payload = sending ? step->send_bytes : step->recv_bytes, chunk = dtrain__step_chunk(comm);
    dtrain__direction *direction = dtrain__group_direction(comm, sending ? step->to : step->from, sending);
    if (moved == 0)
        return DTRAIN_OK; /* everything complete has been handled */
    if (direction != NULL && direction->owed > 0) {
        direction->owed -= moved;
        return DTRAIN_OK;
    }
    *done += moved;
    op->touched = 1;
    dtrain__recorder_moved(comm, op);
    if (!sending && before < header && dtrain__message_arrived(comm, op, step) != DTRAIN_OK)
        return op->error.status;
    if (!sending && payload > DTRAIN__MESSAGE_SMALL && step->fold_early && *done > header &&
        ((*done - header) % chunk == 0 || *done == header + payload)) {
        size_t end = *done - header, begin = (end - 1) / chunk * chunk;
        if (op->check_due != 0)
            op->check = dtrain__message_sum(op->check, step->recv, end - begin);
        dtrain__fold_pair(dtrain__step_dtype(op), op->op, (unsigned char *)step->fold + begin, step->recv,
                          (end - begin) / dtrain__step_width(op));
    }
    if (*done < header + payload)
        return DTRAIN_OK;
    if (!sending && payload <= DTRAIN__MESSAGE_SMALL && payload > 0)
        memcpy(step->recv, dtrain__message_buffer(comm, op, 0) + header, payload);
    *done = SIZE_MAX; /* this direction is complete */
    return sending ? DTRAIN_OK : dtrain__message_whole(comm, op, step);
}

/* Gives a recv what was held of its message; returns 0 if nothing was. */
static int dtrain__message_feed(dtrain_comm *comm, dtrain__op *op, const dtrain__step *step, dtrain_status *taken)
{
    dtrain_transfer next;
    size_t left = comm->messages.held_bytes - comm->messages.held_at;
    if (left == 0 || step->from != comm->messages.held_from)
        return 0;
    next = dtrain__message_next(comm, op, step, 0);
    next.bytes = next.bytes < left ? next.bytes : left;
    memcpy(next.data, comm->messages.held + comm->messages.held_at, next.bytes);
    comm->messages.held_at += next.bytes;
    if (comm->messages.held_at == comm->messages.held_bytes)
        comm->messages.held_at = comm->messages.held_bytes = 0;
    *taken = dtrain__message_took(comm, op, step, 0, next.bytes);
    return 1;
}

/* Records why a step failed. The transport's text, if there is one, says more than this module's. On a broken group a
 * recv may find what others had begun instead of its message. */
static int dtrain__message_failed(dtrain_comm *comm, dtrain__op *op, dtrain_status status, int peer)
{
    if (op->salvages) {
        dtrain__op_blame(comm, op, dtrain__group_cause(comm));
    } else if (op->error.status == DTRAIN_OK) {
        dtrain__error cause;
        if (dtrain__thread_error.status == status)
            cause = dtrain__thread_error;
        else
            dtrain__fail(&cause, status, "rank %d: the transport returned %s", peer, dtrain_status_name(status));
        dtrain__op_blame(comm, op, &cause);
    }
    return dtrain__message_fail(comm, op);
}

/* Advances sending and receiving past every complete step. Sending may be one step ahead if the plan has two pieces
 * under way. Returns 0 when both are past the last step. */
static int dtrain__message_settle(dtrain_comm *comm, dtrain__op *op, dtrain__step *out, dtrain__step *in, int *sends,
                                  int *receives)
{
    for (;;) {
        int more_in = dtrain__plan_step(comm, op, (int)op->at, in), ahead = op->send_at > op->at;
        int more_out = dtrain__plan_step(comm, op, (int)op->send_at, out);
        if (more_out && op->entered == op->send_at && (!ahead || (out->ahead && op->send_at == op->at + 1))) {
            if (out->prepare != NULL) /* before anything of the step moves */
                out->prepare(comm, op, op->send_at);
            if (out->to >= 0)
                dtrain__message_write_header(comm, op, out);
            op->entered++;
        }
        *sends = more_out && op->entered > op->send_at;
        *receives = more_in && op->entered > op->at;
        if (*sends && (out->to < 0 || op->sent == SIZE_MAX)) {
            op->sent = 0;
            op->send_at++;
        } else if (*receives && (in->from < 0 || op->received == SIZE_MAX) &&
                   (in->fold == NULL || in->fold_early || ahead)) {
            if (in->fold != NULL && in->fold_count > 0 && !(in->fold_early && in->recv_bytes > DTRAIN__MESSAGE_SMALL))
                dtrain__fold_pair(dtrain__step_dtype(op), op->op, in->fold, in->recv, in->fold_count);
            op->received = 0;
            op->at++;
        } else {
            *receives = *receives && in->from >= 0 && op->received != SIZE_MAX;
            return more_in || more_out;
        }
    }
}

/* One call of the transport; out or in may be NULL. Without an exchange, both are given only if neither waits. */
static dtrain_status dtrain__message_transfer(dtrain_comm *comm, dtrain_transfer *out, dtrain_transfer *in,
                                              int64_t wait_ns)
{
    const dtrain_transport *transport = &comm->transport;
    dtrain_status sent = DTRAIN_ERR_TIMEOUT, received;
    if (transport->exchange != NULL)
        return transport->exchange(transport->self, out, in, wait_ns);
    if (out != NULL)
        sent = transport->send(transport->self, out->peer, out->data, out->bytes, wait_ns, &out->moved);
    if (in == NULL || (sent != DTRAIN_OK && sent != DTRAIN_ERR_TIMEOUT))
        return sent;
    received = transport->recv(transport->self, in->peer, in->data, in->bytes, wait_ns, &in->moved);
    return received == DTRAIN_ERR_TIMEOUT ? sent : received;
}

/* Moves the next bytes of a step out of one operation and of a step into another, or the same; NULL: none. Returns as
 * dtrain_transport.exchange. *taken says whether what came fits. */
static dtrain_status dtrain__message_swap(dtrain_comm *comm, dtrain__op *sends, const dtrain__step *out,
                                          dtrain__op *receives, const dtrain__step *in, int64_t wait_ns,
                                          dtrain_status *taken)
{
    dtrain_transfer sending = {-1, NULL, 0, 0, 0}, receiving = {-1, NULL, 0, 0, 0};
    *taken = DTRAIN_OK;
    if (in != NULL && dtrain__message_feed(comm, receives, in, taken))
        return *taken;
    if (out != NULL)
        sending = dtrain__message_next(comm, sends, out, 1);
    if (in != NULL)
        receiving = dtrain__message_next(comm, receives, in, 0);
    dtrain_status status =
        dtrain__message_transfer(comm, out != NULL ? &sending : NULL, in != NULL ? &receiving : NULL, wait_ns);
    if (out != NULL)
        dtrain__message_took(comm, sends, out, 1, sending.moved);
    if (in != NULL)
        *taken = dtrain__message_took(comm, receives, in, 0, receiving.moved);
    return *taken != DTRAIN_OK ? *taken : status;
}

/* Moves both directions together until the operation is done, or until wait_ns. Returns as dtrain_transport.exchange.
 */
static dtrain_status dtrain__message_exchange(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    dtrain__step out, in;
    dtrain_status status, taken;
    int sends, receives;
    while (dtrain__message_settle(comm, op, &out, &in, &sends, &receives)) {
        if (sends && receives && comm->transport.exchange == NULL && wait_ns != 0) {
            sends = out.send_first && op->send_at == op->at; /* in this order blocked sends form no cycle */
            receives = !sends;
        }
        status = dtrain__message_swap(comm, op, sends ? &out : NULL, op, receives ? &in : NULL, wait_ns, &taken);
        op->awaited = receives && op->received != SIZE_MAX ? in.from : out.to;
        if (status != DTRAIN_OK)
            return status;
        if (wait_ns == 0 && dtrain__os_now_ns() >= comm->poll_until_ns)
            return DTRAIN_ERR_TIMEOUT;
    }
    return DTRAIN_OK;
}

/* Advances the operation without waiting beyond wait_ns (0: not at all); returns 1 at its end. */
static int dtrain__message_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns)
{
    dtrain_status status;
    const dtrain__error *cause = dtrain__group_cause(comm);
    int aborted = cause != NULL && cause->status == DTRAIN_ERR_ABORTED;
    if (aborted)
        comm->broken = *cause;
    if (op->phase == 0 && dtrain__message_start(comm, op, cause))
        return 1;
    if (aborted) {
        dtrain__op_blame(comm, op, cause);
        return 1;
    }
    dtrain__thread_error.status = DTRAIN_OK;
    status = dtrain__message_exchange(comm, op, wait_ns);
    /* a TIMEOUT with a text is the cause that broke the group, not the end of a wait */
    int late = dtrain__thread_error.status == DTRAIN_ERR_TIMEOUT;
    if (status == DTRAIN_ERR_TIMEOUT && op->error.status == DTRAIN_OK && !late)
        return dtrain__message_needs_left(comm, op);
    return status != DTRAIN_OK ? dtrain__message_failed(comm, op, status, op->awaited) : dtrain__message_end(comm, op);
}

/* Moves the message of one operation out and that of another in, until one is complete, or until wait_ns. Either may be
 * NULL, and both have begun. A failure is found again, and told, in the operation's own turn. Only a message that does
 * not fit is told at once: returns 1 if that ended the incoming operation. */
static int dtrain__message_pair(dtrain_comm *comm, dtrain__op *out, dtrain__op *in, int64_t wait_ns)
{
    dtrain__step sends, receives;
    dtrain_status taken;
    if ((out != NULL && out->sent == SIZE_MAX) || (in != NULL && in->received == SIZE_MAX))
        return 0; /* complete: it ends at its own turn */
    if (out != NULL)
        dtrain__plan_step(comm, out, 0, &sends);
    if (in != NULL)
        dtrain__plan_step(comm, in, 0, &receives);
    dtrain__message_swap(comm, out, out != NULL ? &sends : NULL, in, in != NULL ? &receives : NULL, wait_ns, &taken);
    return taken != DTRAIN_OK && dtrain__message_failed(comm, in, taken, in->root);
}

DTRAIN__FAST_END
#endif
