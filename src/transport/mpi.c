/* ---- >>mpi ----
 * The transport over messages of MPI. A lane is a stream of bytes to each member of a group, with two tags of its own:
 * one for the bytes, one for offers. A sender copies short runs into a ring of slots. For a long run it waits until the
 * receiver offers memory, and sends from the caller's memory, so that MPI copies straight into the receiver's. If no
 * offer comes for a while, it copies a slot of the run. With DTRAIN_MPI_STAGED=1, and for frames of the mux, everything
 * goes through slots.
 *
 * MPI cannot cancel a send. A call may be given up while MPI sends from its memory, or receives into it. MPI may use
 * that memory later. A later call on the stream fails and says so. */
#ifndef DTRAIN__MPI
#define DTRAIN__MPI
#include "mpi_api.c"
#include "../wire/transport.h"
#include "../control/plane.c"
#include "../base/memory.c"

#define DTRAIN__MPI_SLOTS 8
#define DTRAIN__MPI_SLOT ((size_t)60 << 10)  /* MPIs over TCP send so much without asking the receiver first */
#define DTRAIN__MPI_LONG ((size_t)512 << 10) /* runs from here on wait for an offer; at most dtrain__step_chunk */
#define DTRAIN__MPI_MOST ((size_t)1 << 30)   /* of a message, as counts are ints */
#define DTRAIN__MPI_PATIENCE_NS 1000000      /* for an offer */
#define DTRAIN__MPI_HASTE 2000u              /* looks before a caller rests between two */
#define DTRAIN__MPI_LAST_NS 1000000000       /* for what is under way when a lane ends */

/* A message under way. */
typedef struct dtrain__mpi_flight {
    dtrain__mpi_request request;
    unsigned char *memory;
    size_t bytes; /* 0: none */
} dtrain__mpi_flight;

typedef struct dtrain__mpi_stream {
    unsigned char *slots; /* NULL: nothing was sent this way */
    dtrain__mpi_flight slot[DTRAIN__MPI_SLOTS], straight, arriving, offering;
    int turn;                      /* the next slot */
    uint64_t sent, received;       /* bytes of the stream */
    uint64_t offer[2];             /* from the peer: the place in the stream, and the bytes that it waits for */
    uint64_t own[2];               /* this rank's last offer */
    int64_t waits_ns;              /* since when a long run waits for one; 0: none does */
    unsigned char *stage;          /* a message that is longer than what was asked for */
    size_t stage_at, stage_filled; /* filled: bytes of it that have come */
    int64_t heard_ns, told_ns;     /* of the first lane: when a sign of life came last, and when one went */
} dtrain__mpi_stream;

typedef struct dtrain__mpi_lane {
    dtrain__mpi_comm comm;
    int tag, size, staged;
    int groups; /* of the first lane: groups with a lower number have tags */
    int *ranks; /* each member's in comm; the streams follow */
    dtrain__mpi_stream *streams;
    dtrain_allocator heap;
    int64_t heartbeat_ns; /* of the first lane: a rank that is silent for so long is lost; 0: none ever is */
    uint64_t *hosts;      /* of the first lane: each rank's */
    long process;
} dtrain__mpi_lane;

/* Makes a lane. ranks NULL: all of comm. */
static dtrain__mpi_lane *dtrain__mpi_lane_new(dtrain__mpi_comm comm, int tag, int staged, const int *ranks, int size)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    size_t n = (size_t)size;
    dtrain__mpi_lane *lane =
        (dtrain__mpi_lane *)dtrain__alloc(&heap, sizeof *lane + n * (sizeof(dtrain__mpi_stream) + sizeof(int)));
    if (lane == NULL) {
        dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "MPI: no memory for streams to %d ranks", size);
        return NULL;
    }
    lane->process = dtrain__os_pid();
    lane->comm = comm;
    lane->tag = tag;
    lane->size = size;
    lane->staged = staged;
    lane->streams = (dtrain__mpi_stream *)(void *)(lane + 1);
    lane->ranks = (int *)(void *)(lane->streams + n);
    for (int rank = 0; rank < size; rank++)
        lane->ranks[rank] = ranks != NULL ? ranks[rank] : rank;
    return lane;
}

/* Looks whether a message has ended. Returns 1 if it has or there is none, 0 if not, -1 on an error. */
static int dtrain__mpi_ended(dtrain__mpi_flight *flight)
{
    int flag = 0, code;
    if (flight->bytes == 0)
        return 1;
    code = dtrain__mpi()->call.Test(&flight->request, &flag, DTRAIN__MPI_NO_STATUS);
    if (code != 0) {
        dtrain__mpi_error("Test", code);
        return -1;
    }
    if (flag)
        flight->bytes = 0;
    return flag;
}

static dtrain_status dtrain__mpi_fly(dtrain__mpi_lane *lane, int peer, int tag, unsigned char *memory, size_t bytes,
                                     dtrain__mpi_flight *flight)
{
    int code = dtrain__mpi()->call.Isend(memory, (int)bytes, DTRAIN__MPI_BYTE, lane->ranks[peer], tag, lane->comm,
                                         &flight->request);
    if (code != 0)
        return dtrain__mpi_error("Isend", code);
    flight->memory = memory;
    flight->bytes = bytes;
    return DTRAIN_OK;
}

/* Takes a message of the tag, if one has come, into memory of at least *bytes; longer ones into the stage. *bytes: what
 * it has; 0: there is none. */
static dtrain_status dtrain__mpi_take(dtrain__mpi_lane *lane, int peer, int tag, unsigned char *memory, size_t *bytes,
                                      dtrain__mpi_flight *flight)
{
    dtrain__mpi_stream *stream = &lane->streams[peer];
    dtrain__mpi_message message;
    dtrain__mpi_status status;
    size_t room = *bytes;
    int flag = 0, count = 0;
    int code = dtrain__mpi()->call.Improbe(lane->ranks[peer], tag, lane->comm, &flag, &message, &status);
    *bytes = 0;
    if (code != 0)
        return dtrain__mpi_error("Improbe", code);
    if (!flag)
        return DTRAIN_OK;
    if (dtrain__mpi()->call.Get_count(&status, DTRAIN__MPI_BYTE, &count) != 0 || count <= 0)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "MPI: a message of rank %d has %d bytes", peer, count);
    if ((size_t)count > room && tag != lane->tag)
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "MPI: an offer of rank %d has %d bytes, expected at most %zu",
                            peer, count, room);
    if ((size_t)count > room) {
        memory = (unsigned char *)dtrain__memory_room(&lane->heap, stream->stage, (size_t)count);
        if (memory == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "MPI: no memory for a message of %d bytes from rank %d", count,
                                peer);
        stream->stage = memory;
    }
    code = dtrain__mpi()->call.Imrecv(memory, count, DTRAIN__MPI_BYTE, &message, &flight->request);
    if (code != 0)
        return dtrain__mpi_error("Imrecv", code);
    flight->memory = memory;
    *bytes = flight->bytes = (size_t)count;
    return DTRAIN_OK;
}

/* A call was given up while MPI used its memory. */
static dtrain_status dtrain__mpi_given_up(int peer, const dtrain__mpi_flight *flight, const char *way)
{
    dtrain__mpi()->failed = 1;
    return dtrain__fail(NULL, DTRAIN_ERR_IO,
                        "MPI still %s %zu bytes at %p that a call which was given up had named; keep that memory "
                        "until the process ends (peer %d)",
                        way, flight->bytes, (void *)flight->memory, peer);
}

/* Finds what the peer has offered for the bytes that come next; *room 0: nothing yet. */
static dtrain_status dtrain__mpi_heed(dtrain__mpi_lane *lane, int peer, uint64_t *room)
{
    dtrain__mpi_stream *stream = &lane->streams[peer];
    dtrain__mpi_flight coming;
    size_t bytes = sizeof stream->offer;
    memset(&coming, 0, sizeof coming);
    *room = 0;
    if (stream->offer[1] == 0 || stream->offer[0] != stream->sent) {
        dtrain_status status =
            dtrain__mpi_take(lane, peer, lane->tag + 1, (unsigned char *)stream->offer, &bytes, &coming);
        if (status != DTRAIN_OK)
            return status;
        while (coming.bytes > 0) /* it is 16 bytes, and has come */
            if (dtrain__mpi_ended(&coming) < 0)
                return DTRAIN_ERR_IO;
    }
    if (stream->offer[0] == stream->sent)
        *room = stream->offer[1];
    return DTRAIN_OK;
}

/* Sends through a slot, if one is free. */
static dtrain_status dtrain__mpi_push_copy(dtrain__mpi_lane *lane, int peer, const unsigned char *data, size_t bytes,
                                           size_t *moved)
{
    dtrain__mpi_stream *stream = &lane->streams[peer];
    dtrain__mpi_flight *slot = &stream->slot[stream->turn];
    if (stream->slots == NULL)
        stream->slots = (unsigned char *)dtrain__alloc(&lane->heap, DTRAIN__MPI_SLOTS * DTRAIN__MPI_SLOT);
    if (stream->slots == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "MPI: no memory to send to rank %d", peer);
    int ended = dtrain__mpi_ended(slot);
    if (ended <= 0)
        return ended < 0 ? DTRAIN_ERR_IO : DTRAIN_OK;
    unsigned char *memory = stream->slots + (size_t)stream->turn * DTRAIN__MPI_SLOT;
    bytes = bytes < DTRAIN__MPI_SLOT ? bytes : DTRAIN__MPI_SLOT;
    memcpy(memory, data, bytes);
    dtrain_status status = dtrain__mpi_fly(lane, peer, lane->tag, memory, bytes, slot);
    *moved = status == DTRAIN_OK ? bytes : 0;
    stream->sent += *moved;
    stream->turn = (stream->turn + 1) % DTRAIN__MPI_SLOTS;
    return status;
}

/* Sends what can be sent now. */
static dtrain_status dtrain__mpi_push(dtrain__mpi_lane *lane, int peer, const unsigned char *data, size_t bytes,
                                      size_t *moved)
{
    dtrain__mpi_stream *stream = &lane->streams[peer];
    dtrain__mpi_flight *straight = &stream->straight;
    size_t sending = straight->bytes;
    uint64_t room;
    unsigned char *memory;
    *moved = 0;
    if (sending > 0 && straight->memory != data)
        return dtrain__mpi_given_up(peer, straight, "sends");
    if (sending > 0) {
        int ended = dtrain__mpi_ended(straight);
        *moved = ended > 0 ? sending : 0;
        stream->sent += *moved;
        return ended < 0 ? DTRAIN_ERR_IO : DTRAIN_OK;
    }
    if (lane->staged || bytes < DTRAIN__MPI_LONG)
        return dtrain__mpi_push_copy(lane, peer, data, bytes, moved);
    dtrain_status status = dtrain__mpi_heed(lane, peer, &room);
    if (status != DTRAIN_OK)
        return status;
    if (room == 0) {
        int64_t now = dtrain__os_now_ns();
        stream->waits_ns = stream->waits_ns == 0 ? now : stream->waits_ns;
        if (now - stream->waits_ns < DTRAIN__MPI_PATIENCE_NS)
            return DTRAIN_OK;
        stream->waits_ns = 0;
        return dtrain__mpi_push_copy(lane, peer, data, bytes, moved);
    }
    stream->waits_ns = 0;
    room = room < DTRAIN__MPI_MOST ? room : DTRAIN__MPI_MOST;
    memcpy(&memory, &data, sizeof memory);
    return dtrain__mpi_fly(lane, peer, lane->tag, memory, bytes < room ? bytes : (size_t)room, straight);
}

/* Tells the peer that this rank waits for bytes, once for each place in the stream. */
static dtrain_status dtrain__mpi_offer(dtrain__mpi_lane *lane, int peer, size_t bytes)
{
    dtrain__mpi_stream *stream = &lane->streams[peer];
    int ended = dtrain__mpi_ended(&stream->offering);
    if (ended <= 0)
        return ended < 0 ? DTRAIN_ERR_IO : DTRAIN_OK;
    if (stream->own[1] > 0 && stream->own[0] == stream->received)
        return DTRAIN_OK;
    stream->own[0] = stream->received;
    stream->own[1] = bytes;
    return dtrain__mpi_fly(lane, peer, lane->tag + 1, (unsigned char *)stream->own, sizeof stream->own,
                           &stream->offering);
}

/* Takes bytes from the stage. */
static size_t dtrain__mpi_unstage(dtrain__mpi_stream *stream, unsigned char *data, size_t bytes)
{
    size_t left = stream->stage_filled - stream->stage_at, n = left < bytes ? left : bytes;
    memcpy(data, stream->stage + stream->stage_at, n);
    stream->stage_at += n;
    return n;
}

/* Receives what has come. If nothing has, it offers long memory. */
static dtrain_status dtrain__mpi_pull(dtrain__mpi_lane *lane, int peer, unsigned char *data, size_t bytes,
                                      size_t *moved)
{
    dtrain__mpi_stream *stream = &lane->streams[peer];
    dtrain__mpi_flight *arriving = &stream->arriving;
    size_t coming = arriving->bytes;
    *moved = 0;
    if (coming == 0 && stream->stage_at == stream->stage_filled) {
        coming = bytes;
        dtrain_status status = dtrain__mpi_take(lane, peer, lane->tag, data, &coming, arriving);
        if (status == DTRAIN_OK && coming == 0 && !lane->staged && bytes >= DTRAIN__MPI_LONG)
            return dtrain__mpi_offer(lane, peer, bytes);
        if (status != DTRAIN_OK || coming == 0)
            return status;
    }
    if (coming > 0) {
        int ended = dtrain__mpi_ended(arriving), staged = arriving->memory == stream->stage;
        if (!staged && arriving->memory != data)
            return dtrain__mpi_given_up(peer, arriving, "receives");
        if (ended <= 0)
            return ended < 0 ? DTRAIN_ERR_IO : DTRAIN_OK;
        stream->stage_at = 0;
        stream->stage_filled = staged ? coming : 0;
        *moved = staged ? 0 : coming;
    }
    if (*moved == 0)
        *moved = dtrain__mpi_unstage(stream, data, bytes);
    stream->received += *moved;
    return DTRAIN_OK;
}

/* Between two looks that found nothing. */
static void dtrain__mpi_rest(unsigned turn)
{
    if (turn > DTRAIN__MPI_HASTE)
        dtrain__os_sleep(turn < 2 * DTRAIN__MPI_HASTE ? 20000 : 200000);
    else if (turn > 50)
        dtrain__os_yield();
}

/* Moves both ways until one is complete, or until the deadline. out or in may be NULL. */
static dtrain_status dtrain__mpi_exchange(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns)
{
    dtrain__mpi_lane *lane = (dtrain__mpi_lane *)self;
    for (unsigned turn = 0;; turn++) {
        size_t sent = 0, received = 0;
        dtrain__os_lock(dtrain__mpi_mutex());
        dtrain_status status = dtrain__mpi_usable();
        if (status == DTRAIN_OK && in != NULL)
            status = dtrain__mpi_pull(lane, in->peer, in->data + in->moved, in->bytes - in->moved, &received);
        if (status == DTRAIN_OK && out != NULL)
            status = dtrain__mpi_push(lane, out->peer, out->data + out->moved, out->bytes - out->moved, &sent);
        dtrain__os_unlock(dtrain__mpi_mutex());
        if (in != NULL)
            in->moved += received;
        if (out != NULL)
            out->moved += sent;
        if (status != DTRAIN_OK || (in != NULL && in->moved == in->bytes) || (out != NULL && out->moved == out->bytes))
            return status;
        turn = sent > 0 || received > 0 ? 0 : turn;
        if (turn % 16 == 0 && dtrain__os_now_ns() >= deadline_ns) /* also of a transfer that moves: a frame waits */
            return DTRAIN_ERR_TIMEOUT;
        dtrain__mpi_rest(turn);
    }
}

static dtrain_status dtrain__mpi_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                      size_t *moved)
{
    dtrain_transfer out = {peer, NULL, bytes, 0, 0};
    memcpy(&out.data, &data, sizeof data);
    dtrain_status status = bytes > 0 ? dtrain__mpi_exchange(self, &out, NULL, deadline_ns) : DTRAIN_OK;
    *moved = out.moved;
    return status;
}

static dtrain_status dtrain__mpi_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                      size_t *moved)
{
    dtrain_transfer in = {peer, (unsigned char *)data, bytes, 0, 0};
    dtrain_status status = bytes > 0 ? dtrain__mpi_exchange(self, NULL, &in, deadline_ns) : DTRAIN_OK;
    *moved = in.moved;
    return status;
}

/* Ends what is under way. Messages that do not end keep their memory, as MPI may still use it. */
static void dtrain__mpi_lane_destroy(void *self)
{
    dtrain__mpi_lane *lane = (dtrain__mpi_lane *)self;
    int64_t until = dtrain__os_now_ns() + DTRAIN__MPI_LAST_NS;
    int left = 1;
    if (lane->process != dtrain__os_pid())
        return; /* MPI is its parent's */
    dtrain__os_lock(dtrain__mpi_mutex());
    dtrain__mpi()->worlds -= lane->groups > 0;
    dtrain__os_unlock(dtrain__mpi_mutex());
    while (left) {
        left = 0;
        dtrain__os_lock(dtrain__mpi_mutex());
        int dead = dtrain__mpi()->failed || dtrain__mpi()->over;
        for (int peer = 0; peer < lane->size && !dead; peer++) {
            dtrain__mpi_stream *stream = &lane->streams[peer];
            for (int i = 0; i < DTRAIN__MPI_SLOTS; i++)
                left += dtrain__mpi_ended(&stream->slot[i]) == 0;
            left += dtrain__mpi_ended(&stream->straight) == 0;
            left += dtrain__mpi_ended(&stream->arriving) == 0;
            left += dtrain__mpi_ended(&stream->offering) == 0;
        }
        int stuck = left > 0 && dtrain__os_now_ns() >= until;
        dtrain__mpi()->failed |= stuck;
        left = dtrain__mpi()->failed || dead ? -1 : left;
        dtrain__os_unlock(dtrain__mpi_mutex());
        if (stuck)
            dtrain__log(DTRAIN_LOG_WARN,
                        "MPI: messages of a group that was destroyed never ended, so MPI_Finalize would "
                        "hang: end the process without it");
        if (left < 0)
            return; /* MPI may use the memory of the lane */
        if (left > 0)
            dtrain__os_yield();
    }
    for (int peer = 0; peer < lane->size; peer++) {
        dtrain__free(&lane->heap, lane->streams[peer].slots);
        dtrain__free(&lane->heap, lane->streams[peer].stage);
    }
    dtrain_allocator heap = lane->heap;
    dtrain__free(&heap, lane->hosts);
    dtrain__free(&heap, lane);
}

static void dtrain__mpi_table(dtrain_transport *table, dtrain__mpi_lane *lane, int rank)
{
    memset(table, 0, sizeof *table);
    table->self = lane;
    table->rank = rank;
    table->size = lane->size;
    table->send = dtrain__mpi_send;
    table->recv = dtrain__mpi_recv;
    table->exchange = dtrain__mpi_exchange;
    table->destroy = dtrain__mpi_lane_destroy;
}

/* Gives a group streams of its own, if MPI has tags for it. */
static dtrain_status dtrain__mpi_lanes(void *self, uint64_t group, const int *ranks, int size, dtrain_transport *lane)
{
    const dtrain__mpi_lane *all = (const dtrain__mpi_lane *)self;
    const char *staged = dtrain__os_getenv("DTRAIN_MPI_STAGED");
    if (group >= (uint64_t)all->groups)
        return DTRAIN_OK;
    dtrain__mpi_lane *made =
        dtrain__mpi_lane_new(all->comm, 2 * (int)group + 2, staged != NULL && strcmp(staged, "1") == 0, ranks, size);
    if (made == NULL)
        return DTRAIN_ERR_MEMORY;
    dtrain__mpi_table(lane, made, 0);
    return DTRAIN_OK;
}

/* Says whether a rank still gives signs of life, and gives it one. MPI itself does not tell of deaths. The first lane
 * makes no offers, so its second tag carries the signs. */
static int dtrain__mpi_alive(void *self, int peer)
{
    dtrain__mpi_lane *lane = (dtrain__mpi_lane *)self;
    dtrain__mpi_stream *stream = &lane->streams[peer];
    int64_t now = dtrain__os_now_ns();
    int lost = 0;
    if (lane->heartbeat_ns == 0)
        return -1;
    dtrain__os_lock(dtrain__mpi_mutex());
    int over = dtrain__mpi()->over; /* a call that needs the peer says it better */
    for (size_t bytes = 1; bytes > 0 && !lost && !over;) {
        dtrain__mpi_flight coming;
        memset(&coming, 0, sizeof coming);
        bytes = sizeof stream->offer;
        lost =
            dtrain__mpi_take(lane, peer, lane->tag + 1, (unsigned char *)stream->offer, &bytes, &coming) != DTRAIN_OK;
        while (coming.bytes > 0 && !lost) /* one byte, and it has come */
            lost = dtrain__mpi_ended(&coming) < 0;
        stream->heard_ns = bytes > 0 || stream->heard_ns == 0 ? now : stream->heard_ns;
    }
    if (!lost && !over && now - stream->told_ns > lane->heartbeat_ns / 4 && dtrain__mpi_ended(&stream->offering) > 0) {
        lost =
            dtrain__mpi_fly(lane, peer, lane->tag + 1, (unsigned char *)stream->own, 1, &stream->offering) != DTRAIN_OK;
        stream->told_ns = now;
    }
    lost = lost || (!over && now - stream->heard_ns > lane->heartbeat_ns);
    dtrain__mpi()->failed |= lost;
    dtrain__os_unlock(dtrain__mpi_mutex());
    return lost ? -2 : 1;
}

static uint64_t dtrain__mpi_host(void *self, int rank)
{
    return ((dtrain__mpi_lane *)self)->hosts[rank];
}

/* Sends the number of this rank's host round the ranks, and receives theirs. With DTRAIN_MPI_SHM=0 it is 0, so that
 * MPI moves all bytes. */
static dtrain_status dtrain__mpi_learn_hosts(dtrain__mpi_lane *lane, int rank, int64_t deadline_ns)
{
    const char *shm = dtrain__os_getenv("DTRAIN_MPI_SHM");
    int n = lane->size;
    lane->hosts = (uint64_t *)dtrain__alloc(&lane->heap, (size_t)n * sizeof *lane->hosts);
    if (lane->hosts == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "MPI: no memory for the hosts of %d ranks", n);
    lane->hosts[rank] = shm != NULL && strcmp(shm, "0") == 0 ? 0 : dtrain__plane_host();
    for (int k = 0; k < n - 1; k++) {
        dtrain_transfer out = {(rank + 1) % n, (unsigned char *)&lane->hosts[(rank + n - k) % n], 8, 0, 0};
        dtrain_transfer in = {(rank + n - 1) % n, (unsigned char *)&lane->hosts[(rank + n - k - 1) % n], 8, 0, 0};
        while (out.moved < out.bytes || in.moved < in.bytes) {
            dtrain_status status = dtrain__mpi_exchange(lane, out.moved < out.bytes ? &out : NULL,
                                                        in.moved < in.bytes ? &in : NULL, deadline_ns);
            if (status == DTRAIN_ERR_TIMEOUT)
                return dtrain__fail(NULL, status, "MPI: rank %d did not say which host it is on", in.peer);
            if (status != DTRAIN_OK)
                return status;
        }
    }
    return DTRAIN_OK;
}

/* A copy of a communicator on its way; it stays if the call that makes it is given up. */
typedef struct dtrain__mpi_copy {
    dtrain__mpi_comm comm;
    dtrain__mpi_flight flight;
} dtrain__mpi_copy;

static dtrain_status dtrain__mpi_copy_begin(dtrain__mpi_copy *copy, dtrain__mpi_comm given)
{
    int inter = 0;
    dtrain_status status = dtrain__mpi_usable();
    if (status != DTRAIN_OK)
        return status;
    int code = given != DTRAIN__MPI_NULL ? dtrain__mpi()->call.Comm_test_inter(given, &inter) : 0;
    if (given == DTRAIN__MPI_NULL || inter)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "comm_from_mpi: the communicator is %s; give one of which this rank is a member",
                            inter ? "between two groups" : "MPI_COMM_NULL, as MPI_Comm_split gives for MPI_UNDEFINED");
    if (code == 0)
        code = dtrain__mpi()->call.Comm_idup(given, &copy->comm, &copy->flight.request);
    copy->flight.bytes = 1;
    return code == 0 ? DTRAIN_OK : dtrain__mpi_error("Comm_idup", code);
}

/* Waits until all ranks have come to make the copy. Returns 0 with an error. */
static int dtrain__mpi_copied(dtrain__mpi_copy *copy, dtrain__mpi_comm given, int64_t timeout_ms, int64_t until)
{
    dtrain__os_lock(dtrain__mpi_mutex());
    int ended = dtrain__mpi_copy_begin(copy, given) == DTRAIN_OK ? 0 : -1;
    while (ended == 0 && dtrain__os_now_ns() < until) {
        ended = dtrain__mpi_usable() == DTRAIN_OK ? dtrain__mpi_ended(&copy->flight) : -1;
        dtrain__os_unlock(dtrain__mpi_mutex()); /* others may have to move for a rank to come here */
        if (ended == 0)
            dtrain__os_sleep(50000);
        dtrain__os_lock(dtrain__mpi_mutex());
    }
    dtrain__mpi()->failed |= ended == 0;
    dtrain__os_unlock(dtrain__mpi_mutex());
    if (ended == 0)
        dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                     "MPI: not all ranks of the communicator have come to make the group within %lld ms",
                     (long long)timeout_ms);
    return ended > 0;
}

/* Makes the table of this rank over a copy of a communicator. */
static dtrain_status dtrain__mpi_describe(dtrain_transport *table, dtrain__mpi_comm comm, int64_t until_ns,
                                          int64_t heartbeat_ns)
{
    int rank = 0, size = 0, flag = 0, *most = NULL;
    dtrain__os_lock(dtrain__mpi_mutex());
    dtrain_status status = dtrain__mpi_usable();
    int code = status == DTRAIN_OK ? dtrain__mpi()->call.Comm_set_errhandler(comm, DTRAIN__MPI_RETURN) : -1;
    if (code == 0)
        code = dtrain__mpi()->call.Comm_rank(comm, &rank);
    if (code == 0)
        code = dtrain__mpi()->call.Comm_size(comm, &size);
    if (code == 0)
        code = dtrain__mpi()->call.Comm_get_attr(comm, DTRAIN__MPI_TAG_UB, (void *)&most, &flag);
    if (code != 0 && status == DTRAIN_OK)
        status = dtrain__mpi_error("Comm_get_attr", code);
    dtrain__os_unlock(dtrain__mpi_mutex());
    if (status != DTRAIN_OK)
        return status;
    dtrain__mpi_lane *lane = dtrain__mpi_lane_new(comm, 0, 1, NULL, size);
    if (lane == NULL)
        return DTRAIN_ERR_MEMORY;
    lane->groups = (flag ? *most : 32767) / 2 - 1;
    lane->heartbeat_ns = heartbeat_ns;
    dtrain__os_lock(dtrain__mpi_mutex());
    dtrain__mpi()->worlds++;
    dtrain__os_unlock(dtrain__mpi_mutex());
    dtrain__mpi_table(table, lane, rank);
    table->lanes = dtrain__mpi_lanes;
    table->alive = dtrain__mpi_alive;
    table->host = dtrain__mpi_host;
    status = dtrain__mpi_learn_hosts(lane, rank, until_ns);
    if (status != DTRAIN_OK)
        dtrain__mpi_lane_destroy(lane);
    return status;
}

/* Makes this rank's end of a copy of an MPI communicator. All of its ranks call this. */
static dtrain_status dtrain__mpi_open(dtrain_transport *table, dtrain__mpi_comm given, int64_t timeout_ms,
                                      int64_t heartbeat_ms)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    dtrain__mpi_copy *copy = (dtrain__mpi_copy *)dtrain__alloc(&heap, sizeof *copy);
    if (copy == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "MPI: no memory for a copy of the communicator");
    timeout_ms = timeout_ms != 0 ? timeout_ms : 60000;
    int64_t until_ns = timeout_ms < 0 ? INT64_MAX : dtrain__os_now_ns() + dtrain__os_ms_to_ns(timeout_ms);
    if (!dtrain__mpi_copied(copy, given, timeout_ms, until_ns)) {
        if (copy->flight.bytes == 0) /* else MPI may still write to the copy */
            dtrain__free(&heap, copy);
        return dtrain__thread_error.status;
    }
    dtrain_status status =
        dtrain__mpi_describe(table, copy->comm, until_ns, heartbeat_ms > 0 ? heartbeat_ms * 1000000 : 0);
    dtrain__free(&heap, copy);
    return status;
}

#endif
