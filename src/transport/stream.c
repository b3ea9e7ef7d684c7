/* ---- >>stream ----
 * One direction-pair of bytes between two ranks that can outlive its connection: each side counts what it
 * has sent and received, and a side that may reconnect keeps its last bytes, so that a new connection goes
 * on where the old one was cut. Never waits. Frames of the control plane are built on it too. */
#ifndef DTRAIN__STREAM
#define DTRAIN__STREAM
#include "../base/memory.c"
#include "net.c"

#define DTRAIN__SOCKET_BUFFER ((size_t)1 << 20)          /* of a resumable connection; Linux doubles it */
#define DTRAIN__REPLAY_BYTES (4 * DTRAIN__SOCKET_BUFFER) /* two such buffers at either end and what is between */

typedef struct dtrain__stream {
    int fd;        /* -1: no connection now */
    uint64_t sent; /* bytes that the owner has handed over; of them the last `again` go out once more */
    uint64_t received;
    uint64_t again;
    unsigned char *replay; /* the last DTRAIN__REPLAY_BYTES sent; NULL: this stream dies with its connection */
} dtrain__stream;

static void dtrain__stream_cut(dtrain__stream *stream)
{
    if (stream->fd >= 0)
        close(stream->fd);
    stream->fd = -1;
}

/* Goes on over fd, whose other end has received peer_received bytes. Returns 0 when too much was lost for that. */
static int dtrain__stream_resume(dtrain__stream *stream, int fd, uint64_t peer_received)
{
    uint64_t lost = stream->sent - peer_received;
    if (peer_received > stream->sent || lost > (stream->replay != NULL ? DTRAIN__REPLAY_BYTES : 0))
        return 0;
    stream->fd = fd;
    stream->again = lost;
    return 1;
}

static void dtrain__stream_keep(dtrain__stream *stream, const unsigned char *data, size_t bytes)
{
    size_t at, first;
    if (stream->replay == NULL)
        return;
    if (bytes > DTRAIN__REPLAY_BYTES) {
        data += bytes - DTRAIN__REPLAY_BYTES;
        bytes = DTRAIN__REPLAY_BYTES;
    }
    at = (size_t)((stream->sent - bytes) % DTRAIN__REPLAY_BYTES);
    first = DTRAIN__REPLAY_BYTES - at < bytes ? DTRAIN__REPLAY_BYTES - at : bytes;
    memcpy(stream->replay + at, data, first);
    memcpy(stream->replay, data + first, bytes - first);
}

/* Sends what goes at once: bytes gone, 0 for none now, -1 when the connection is broken (errno). */
static ssize_t dtrain__stream_send(dtrain__stream *stream, const void *data, size_t bytes, int more)
{
    ssize_t n;
    while (stream->again > 0) {
        size_t at = (size_t)((stream->sent - stream->again) % DTRAIN__REPLAY_BYTES), room = DTRAIN__REPLAY_BYTES - at;
        n = dtrain__net_send(stream->fd, stream->replay + at, stream->again < room ? (size_t)stream->again : room, 0);
        if (n <= 0)
            return n;
        stream->again -= (uint64_t)n;
    }
    if (bytes == 0)
        return 0;
    n = dtrain__net_send(stream->fd, data, bytes, more);
    if (n > 0) {
        stream->sent += (uint64_t)n;
        dtrain__stream_keep(stream, (const unsigned char *)data, (size_t)n);
    }
    return n;
}

static ssize_t dtrain__stream_recv(dtrain__stream *stream, void *data, size_t bytes)
{
    ssize_t n = dtrain__net_recv(stream->fd, data, bytes);
    if (n > 0)
        stream->received += (uint64_t)n;
    return n;
}

/* A growing block of bytes; bytes of it are in use. */
typedef struct dtrain__bytes {
    unsigned char *data;
    size_t bytes, capacity;
    int short_of; /* memory: there was none for something that belongs here */
} dtrain__bytes;

/* Makes room for `more` bytes behind those in use. Returns 0 when there is no memory. */
static int dtrain__bytes_room(dtrain_allocator *allocator, dtrain__bytes *block, size_t more)
{
    /* a heartbeat with all that it may tell of others fits, so that a warm loop's never allocates */
    size_t capacity = block->capacity > 0 ? block->capacity : 1024;
    unsigned char *data;
    if (more <= block->capacity - block->bytes)
        return 1;
    while (capacity - block->bytes < more)
        capacity *= 2;
    data = (unsigned char *)dtrain__resize(allocator, block->data, block->capacity, capacity);
    if (data == NULL) {
        block->short_of = 1;
        return 0;
    }
    block->data = data;
    block->capacity = capacity;
    return 1;
}

static void dtrain__bytes_drop(dtrain__bytes *block, size_t bytes)
{
    block->bytes -= bytes;
    memmove(block->data, block->data + bytes, block->bytes);
}

static void dtrain__bytes_free(dtrain_allocator *allocator, dtrain__bytes *block)
{
    if (block->data != NULL)
        dtrain__resize(allocator, block->data, block->capacity, 0);
    memset(block, 0, sizeof *block);
}

#endif
