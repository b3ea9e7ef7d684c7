/* ---- >>recorder ----
 * The last operations of one rank's end of a group, and what others say of a rank that they wait for. The thread that
 * runs an operation records it, one at a time. Any thread reads without a lock, also a peer in the same process. A
 * record is whole if its version is the same before and after the copy. If peers read the recorder, the transport owns
 * it: they may read it after the rank has left.
 *
 * Source: Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012. */
#ifndef DTRAIN__RECORDER
#define DTRAIN__RECORDER
#include "op.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__RECORDS 256
#define DTRAIN__TRACE_PATH_BYTES DTRAIN__OS_PATH_BYTES
#define DTRAIN__TRACE_TEXT_BYTES 4096

typedef struct dtrain__record {
    dtrain__call call; /* its kind is what was called, its root the peer of a message */
    uint64_t awaited;  /* the last peer that it waited for, + 1 */
    uint64_t status;
    uint64_t async;
    uint64_t called_ns, started_ns, moved_ns, ended_ns; /* 0: not yet */
} dtrain__record;

#define DTRAIN__RECORD_WORDS (sizeof(dtrain__record) / sizeof(uint64_t))

typedef struct dtrain__record_place {
    uint64_t version; /* record s: 4 s + 2 under way, 4 s + 4 ended; one less while it is written */
    uint64_t words[DTRAIN__RECORD_WORDS];
} dtrain__record_place;

struct dtrain__recorder {
    uint64_t begun;                    /* records so far, counted from 1; record s is at s % DTRAIN__RECORDS */
    uint32_t awaited;                  /* by the operation under way, + 1 */
    int64_t monotonic_ns, realtime_ns; /* one moment on both clocks */
    dtrain__os_mutex error_mutex;      /* guards error and failed; held for a few instructions */
    dtrain__error error;               /* the first of the latest failures in a row */
    uint64_t failed;                   /* that failure's record; 0: none */
    uint64_t good;                     /* the last record that ended well; only the recording thread uses it */
    int64_t told_ns;                   /* when the log was last told who is awaited; 0: never */
    dtrain__os_mutex mutex;            /* held while a file's text is made; guards shown, shown_failed and text */
    dtrain__error shown;               /* error and failed, as the file has them */
    uint64_t shown_failed;
    uint32_t written;                /* the file of trace_on_failure is written, or was tried */
    struct dtrain__trace_file *file; /* that one; NULL: none */
    char prefix[DTRAIN__TRACE_PATH_BYTES];
    unsigned char text[DTRAIN__TRACE_TEXT_BYTES];
    dtrain__record_place places[DTRAIN__RECORDS];
};

/* What a rank does, as others are told; in words, for a heartbeat to carry. */
typedef struct dtrain__last {
    dtrain__call call;
    uint64_t state; /* a DTRAIN__LAST constant */
    uint64_t awaited;
    uint64_t moved;    /* bytes of it have moved */
    uint64_t status;   /* it ended with */
    uint64_t since_ms; /* it started, or ended */
} dtrain__last;

enum { DTRAIN__LAST_NONE = 0, DTRAIN__LAST_UNDER_WAY, DTRAIN__LAST_ENDED };

static int dtrain__recorder_create(dtrain_comm *comm)
{
    dtrain__recorder *recorder = (dtrain__recorder *)dtrain__alloc(comm->allocator, sizeof *recorder);
    if (recorder == NULL)
        return 0;
    recorder->monotonic_ns = dtrain__os_now_ns();
    recorder->realtime_ns = dtrain__os_wall_ns();
    dtrain__os_mutex_init(&recorder->error_mutex);
    dtrain__os_mutex_init(&recorder->mutex);
    comm->recorder = recorder;
    return 1;
}

static void dtrain__recorder_free(dtrain_comm *comm)
{
    if (comm->recorder == NULL)
        return;
    dtrain__os_mutex_free(&comm->recorder->error_mutex);
    dtrain__os_mutex_free(&comm->recorder->mutex);
    if (!comm->published)
        dtrain__free(comm->allocator, comm->recorder);
}

/* Writes a record from its word `first` on. */
static void dtrain__recorder_write(dtrain__recorder *recorder, uint64_t serial, const dtrain__record *record,
                                   size_t first)
{
    dtrain__record_place *place = &recorder->places[serial % DTRAIN__RECORDS];
    const uint64_t *words = (const uint64_t *)record; /* not copied: see dtrain__op_call */
    uint64_t version = 4 * serial + (record->ended_ns != 0 ? 4 : 2);
    DTRAIN__ATOMIC_STORE(&place->version, version - 1, RELAXED);
    for (size_t i = first; i < DTRAIN__RECORD_WORDS; i++)
        DTRAIN__ATOMIC_STORE(&place->words[i], words[i], RELEASE);
    DTRAIN__ATOMIC_STORE(&place->version, version, RELEASE);
}

/* Copies record `serial`. Returns 0 if it is overwritten, or its writer was stopped in the middle. */
static int dtrain__recorder_read(dtrain__recorder *recorder, uint64_t serial, dtrain__record *out)
{
    dtrain__record_place *place = &recorder->places[serial % DTRAIN__RECORDS];
    uint64_t words[DTRAIN__RECORD_WORDS];
    for (int turn = 0; turn < 1000; turn++) {
        uint64_t version = DTRAIN__ATOMIC_LOAD(&place->version, ACQUIRE);
        if (version > 4 * serial + 4)
            return 0;
        for (size_t i = 0; i < DTRAIN__RECORD_WORDS; i++)
            words[i] = DTRAIN__ATOMIC_LOAD(&place->words[i], ACQUIRE);
        if (version > 4 * serial && version % 2 == 0 && DTRAIN__ATOMIC_LOAD(&place->version, RELAXED) == version) {
            memcpy(out, words, sizeof words);
            return 1;
        }
        dtrain__os_yield();
    }
    return 0;
}

static void dtrain__recorder_note(dtrain_comm *comm, dtrain__op *op, int64_t ended_ns)
{
    dtrain__recorder *recorder = comm->recorder;
    uint32_t awaited = op->awaited >= 0 ? (uint32_t)(op->awaited + 1) : 0;
    int known = op->serial != 0 && op->noted == op->algorithm; /* the call is in the record */
    dtrain__record record;
    if (op->serial == 0) {
        op->serial = recorder->begun + 1;
        DTRAIN__ATOMIC_STORE(&recorder->begun, op->serial, RELEASE);
    }
    if (recorder->begun - op->serial >= DTRAIN__RECORDS)
        return; /* later records have overwritten a message that they overtook */
    if (!known)
        dtrain__op_called(comm, op, &record.call);
    op->noted = op->algorithm;
    record.awaited = awaited > 0 ? awaited : DTRAIN__ATOMIC_LOAD(&recorder->awaited, RELAXED);
    record.status = (uint64_t)op->error.status;
    record.async = (uint64_t)op->async;
    record.called_ns = (uint64_t)op->started_ns;
    record.started_ns = (uint64_t)op->run_ns;
    record.moved_ns = (uint64_t)op->moved_ns;
    record.ended_ns = (uint64_t)ended_ns;
    dtrain__recorder_write(recorder, op->serial, &record,
                           known ? offsetof(dtrain__record, awaited) / sizeof(uint64_t) : 0);
}

/* Records that the operation has its number and may wait. */
static void dtrain__recorder_start(dtrain_comm *comm, dtrain__op *op)
{
    if (op->serial != 0)
        return;
    op->run_ns = op->queued ? dtrain__os_now_ns() : op->started_ns;
    DTRAIN__ATOMIC_STORE(&comm->recorder->awaited, 0, RELAXED);
    dtrain__recorder_note(comm, op, 0);
}

/* Records that the operation moves its first bytes. For a message peers hear of it at once: see
 * dtrain__recorder_contradicts. */
static void dtrain__recorder_moved(dtrain_comm *comm, dtrain__op *op)
{
    if (op->moved_ns != 0)
        return;
    op->moved_ns = dtrain__os_now_ns();
    if (op->serial == 0)
        dtrain__recorder_start(comm, op);
    else if (op->algorithm != DTRAIN_ALGORITHM_FUSED)
        dtrain__recorder_note(comm, op, 0);
}

static void dtrain__recorder_end(dtrain_comm *comm, dtrain__op *op, int64_t now)
{
    dtrain__recorder *recorder = comm->recorder;
    if (op->run_ns == 0)
        op->run_ns = op->queued ? now : op->started_ns;
    dtrain__recorder_note(comm, op, now);
    DTRAIN__ATOMIC_STORE(&recorder->awaited, 0, RELAXED);
    if (op->error.status == DTRAIN_OK) {
        recorder->good = op->serial;
        return;
    }
    dtrain__os_lock(&recorder->error_mutex);
    if (recorder->failed <= recorder->good) {
        recorder->failed = op->serial;
        recorder->error = op->error;
    }
    dtrain__os_unlock(&recorder->error_mutex);
}

/* Reads what the rank of this recorder does now; 0: it cannot be read. */
static int dtrain__recorder_last(dtrain__recorder *recorder, dtrain__last *out)
{
    dtrain__record record;
    uint64_t serial = DTRAIN__ATOMIC_LOAD(&recorder->begun, ACQUIRE);
    memset(out, 0, sizeof *out);
    if (serial == 0)
        return 1;
    if (!dtrain__recorder_read(recorder, serial, &record))
        return 0;
    out->call = record.call;
    out->state = record.ended_ns != 0 ? DTRAIN__LAST_ENDED : DTRAIN__LAST_UNDER_WAY;
    out->awaited = record.ended_ns == 0 ? DTRAIN__ATOMIC_LOAD(&recorder->awaited, RELAXED) : record.awaited;
    out->moved = record.moved_ns != 0;
    out->status = record.status;
    out->since_ms = record.ended_ns != 0 ? record.ended_ns : record.started_ns;
    out->since_ms = ((uint64_t)dtrain__os_now_ns() - out->since_ms) / 1000000;
    return 1;
}

/* The rank that a rank waits for, or was waiting for at its deadline; -1: none. */
static int dtrain__recorder_awaits(const dtrain__last *last)
{
    int gave_up = last->state == DTRAIN__LAST_ENDED && last->status == DTRAIN_ERR_TIMEOUT;
    return last->state == DTRAIN__LAST_UNDER_WAY || gave_up ? (int)last->awaited - 1 : -1;
}

/* Writes what this rank's peers are told of it; user: its recorder. */
static size_t dtrain__recorder_tell(void *user, unsigned char *out, size_t capacity, int *awaits)
{
    dtrain__last last;
    if (sizeof last > capacity || !dtrain__recorder_last((dtrain__recorder *)user, &last))
        return 0;
    *awaits = dtrain__recorder_awaits(&last);
    memcpy(out, &last, sizeof last);
    return sizeof last;
}

/* Reads what `rank` does, if known. News of a process counts only if it came after since_ns, when the wait began. */
static int dtrain__recorder_peer(const dtrain_comm *comm, int rank, int64_t since_ns, dtrain__last *out)
{
    int64_t age_ns = 0;
    if (comm->plane->last == NULL ||
        comm->plane->last(comm->transport.self, rank, since_ns, out, sizeof *out, &age_ns) != sizeof *out)
        return 0;
    out->since_ms += (uint64_t)(age_ns / 1000000);
    return out->state <= DTRAIN__LAST_ENDED && out->awaited <= (uint64_t)comm->size;
}

/* "; rank 0 is in barrier #6 since 1.7 s, waiting for rank 2" */
static void dtrain__recorder_does(const dtrain_comm *comm, int rank, const dtrain__last *last, int awaits, char *text,
                                  size_t capacity)
{
    dtrain__text call = dtrain__op_call_text(&last->call);
    const char *where = last->call.group == comm->group ? "" : " of another group";
    double seconds = (double)last->since_ms * 1e-3;
    int ended = last->state == DTRAIN__LAST_ENDED;
    char then[48] = "";
    if (awaits >= 0)
        snprintf(then, sizeof then, ", %s for rank %d", ended ? "having waited" : "waiting", awaits);
    if (last->state == DTRAIN__LAST_NONE)
        snprintf(text, capacity, "; rank %d has called nothing yet", rank);
    else if (ended)
        snprintf(text, capacity, "; rank %d %s %s%s %.1f s ago and has called nothing since%s", rank,
                 last->status == DTRAIN_OK ? "ended" : "gave up", call.text, where, seconds, then);
    else
        snprintf(text, capacity, "; rank %d is in %s%s since %.1f s%s", rank, call.text, where, seconds, then);
}

/* Whether the awaited rank is in a call that can never meet this one, or has given such a call up at its own deadline.
 * That is another call of the same number. Or one is a message and the other a collective, each waits for the other,
 * and nothing of either has moved. */
static int dtrain__recorder_contradicts(const dtrain_comm *comm, const dtrain__op *op, const dtrain__last *theirs)
{
    dtrain__call mine;
    dtrain__op_called(comm, op, &mine);
    int message = dtrain__op_is_message(op);
    if (theirs->state == DTRAIN__LAST_NONE || theirs->call.group != comm->group ||
        (theirs->state == DTRAIN__LAST_ENDED && theirs->status != DTRAIN_ERR_TIMEOUT &&
         theirs->status != DTRAIN_ERR_MISMATCH))
        return 0;
    if (message != dtrain__op_kind_is_message(theirs->call.kind))
        return theirs->awaited == (uint64_t)comm->rank + 1 && !theirs->moved && !op->touched;
    return !message && theirs->call.number == mine.number && memcmp(&theirs->call, &mine, sizeof mine) != 0;
}

/* Whether a rank is in this call as well, or has given it up at its own deadline. A message's other rank waits for this
 * one. */
static int dtrain__recorder_meets(const dtrain_comm *comm, const dtrain__op *op, const dtrain__last *theirs)
{
    dtrain__call mine;
    dtrain__op_called(comm, op, &mine);
    if (theirs->state == DTRAIN__LAST_NONE || theirs->call.group != comm->group ||
        (theirs->state == DTRAIN__LAST_ENDED && theirs->status != DTRAIN_ERR_TIMEOUT))
        return 0;
    if (dtrain__op_is_message(op))
        return dtrain__op_kind_is_message(theirs->call.kind) && theirs->awaited == (uint64_t)comm->rank + 1;
    return memcmp(&theirs->call, &mine, sizeof mine) == 0;
}

/* Follows the ranks that wait for each other, beginning with the awaited one, and writes what each does while the text
 * has room. If all send, or all receive, and the last one waits for this rank, it says so, unless this
 * rank also does what the last one waits for. Returns the first rank whose
 * call contradicts this one, with what it does in *last; -1: none. *meet: all of them are in this call. */
static int dtrain__recorder_chain(const dtrain_comm *comm, const dtrain__op *op, char *text, size_t capacity,
                                  dtrain__last *last, int *meet)
{
    int rank = op->awaited, before = -1, culprit = -1, full = 0,
        circle = op->kind == DTRAIN__SEND || op->kind == DTRAIN__RECV;
    dtrain__last at;
    size_t used = 0;
    text[0] = 0;
    *meet = rank >= 0;
    for (int i = 0; i < DTRAIN__LAST_CHAIN && rank >= 0 && rank != comm->rank; i++) {
        char does[320];
        if (!dtrain__recorder_peer(comm, rank, op->started_ns, &at)) {
            *meet = 0;
            break;
        }
        *meet = *meet && dtrain__recorder_meets(comm, op, &at);
        circle = circle && at.state != DTRAIN__LAST_NONE && at.call.kind == (uint64_t)op->kind;
        if (culprit < 0 && dtrain__recorder_contradicts(comm, op, &at)) {
            culprit = rank;
            *last = at;
        }
        int next = at.call.group == comm->group ? dtrain__recorder_awaits(&at) : -1;
        dtrain__recorder_does(comm, rank, &at, next, does, sizeof does);
        full |= strlen(does) >= capacity - used;
        if (!full)
            used += (size_t)snprintf(text + used, capacity - used, "%s", does);
        before = rank;
        rank = next;
    }
    const dtrain__direction *other =
        before >= 0 ? dtrain__group_direction(comm, before, op->kind == DTRAIN__RECV) : NULL;
    if (circle && rank == comm->rank && before >= 0 && (other == NULL || other->first == NULL))
        snprintf(text + used, capacity - used,
                 op->kind == DTRAIN__SEND ? "; they all send first, and nobody receives: call dtrain_exchange, or let "
                                            "one rank receive first"
                                          : "; they all receive first, and nobody sends: call dtrain_exchange, or let "
                                            "one rank send first");
    return culprit;
}

/* When an operation's turn came. Before that it waited in this rank's own queue, for no peer. */
static int64_t dtrain__recorder_turn(const dtrain__op *op)
{
    return op->run_ns > op->started_ns ? op->run_ns : op->started_ns;
}

/* Ends an operation at its deadline: as a mismatch if ranks contradict each other, else with what the awaited rank
 * does. */
static dtrain_status dtrain__recorder_expire(const dtrain_comm *comm, dtrain__op *op)
{
    dtrain__text mine = dtrain__op_text(comm, op);
    int64_t turn = dtrain__recorder_turn(op);
    double seconds = (double)(dtrain__os_now_ns() - turn) * 1e-9;
    char reason[224] = "", does[520] = "", queued[64] = "";
    dtrain__last last;
    int meet, culprit = dtrain__recorder_chain(comm, op, does, sizeof does, &last, &meet);
    if (culprit >= 0)
        return dtrain__op_mismatch(comm, op, culprit, &last.call);
    if (comm->plane->suspect != NULL)
        comm->plane->suspect(comm->transport.self, op->awaited, reason, sizeof reason);
    if (turn - op->started_ns >= 1000000)
        snprintf(queued, sizeof queued, ", after %.3f s behind its own earlier calls",
                 (double)(turn - op->started_ns) * 1e-9);
    return dtrain__fail(
        &op->error, DTRAIN_ERR_TIMEOUT, "%s: rank %d waited %.3f s for rank %d%s%s%s; %s%s", mine.text, comm->rank,
        seconds, op->awaited, queued, does, reason,
        op->touched ? "data had moved, so the group is broken" : "nothing had moved, so the call can be made again",
        meet ? " (all these ranks are in it: the network may be slow or cut, or a firewall may have forgotten the "
               "connection; reconnect_ms makes one again)"
        : dtrain__op_is_message(op) ? ""
                                    : " (every rank must call it, not one inside an if (rank == 0))");
}

/* Returns whether the deadline has passed. When a peer was awaited for a quarter of it, the log says so, once in such a
 * time for all operations of the group. */
static int dtrain__recorder_late(const dtrain_comm *comm, dtrain__op *op)
{
    int64_t now;
    if (op->awaited >= 0)
        DTRAIN__ATOMIC_STORE(&comm->recorder->awaited, (uint32_t)(op->awaited + 1), RELAXED);
    if (op->deadline_ns == INT64_MAX)
        return 0;
    now = dtrain__os_now_ns();
    int64_t span = op->deadline_ns - op->started_ns, turn = dtrain__recorder_turn(op);
    if (!op->warned && op->awaited >= 0 && now - turn > span / 4 && span >= 1000000000 &&
        (comm->recorder->told_ns == 0 || now - comm->recorder->told_ns > span / 4)) {
        dtrain__text mine = dtrain__op_text(comm, op);
        dtrain__last last;
        char does[520];
        int meet;
        op->warned = 1;
        comm->recorder->told_ns = now;
        dtrain__recorder_chain(comm, op, does, sizeof does, &last, &meet);
        dtrain__log(DTRAIN_LOG_WARN, "%s: rank %d has waited %.1f s for rank %d%s", mine.text, comm->rank,
                    (double)(now - turn) * 1e-9, op->awaited, does);
    }
    return now >= op->deadline_ns;
}

DTRAIN__FAST_END
#endif
