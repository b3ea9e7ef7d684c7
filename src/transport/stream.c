/* ---- >>stream ----
 * One direction-pair of bytes between two ranks that can outlive its connection: each side counts what it
 * has sent and received, and a side that may reconnect keeps its last bytes, so that a new connection goes
 * on where the old one was cut. Positions count plain bytes, whether or not the connection is sealed. Never waits.
 * Frames of the control plane are built on it too. */
#ifndef DTRAIN__STREAM
#define DTRAIN__STREAM
#include "../base/memory.c"
#include "../control/admission.c"
#include "seal.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__SOCKET_BUFFER ((size_t)1 << 20)          /* of a resumable connection; Linux doubles it */
#define DTRAIN__REPLAY_BYTES (4 * DTRAIN__SOCKET_BUFFER) /* two such buffers at either end and what is between */

typedef struct dtrain__stream {
    int fd;        /* -1: no connection now */
    uint64_t sent; /* bytes that the owner has handed over; of them the last `again` go out once more */
    uint64_t received;
    uint64_t again;
    unsigned char *replay; /* the last DTRAIN__REPLAY_BYTES sent; NULL: this stream dies with its connection */
    dtrain__seal *seal;    /* NULL: it goes as it is */
    int withheld;          /* the last byte of `sent` counts as not gone yet: sealed bytes wait for the system */
} dtrain__stream;

static DTRAIN__NOINLINE void dtrain__stream_cut(dtrain__stream *stream)
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
    stream->withheld = stream->withheld && stream->sent > 0;
    return 1;
}

static void dtrain__stream_unseal(dtrain_allocator *allocator, dtrain__stream *stream)
{
    if (stream->seal == NULL)
        return;
    dtrain__wipe(stream->seal, offsetof(dtrain__seal, out_records));
    dtrain__free(allocator, stream->seal);
    stream->seal = NULL;
}

/* Makes the records of the connection that the stream goes on over, with its keys. Returns 0 when there is no memory.
 */
static int dtrain__stream_seal(dtrain__stream *stream, dtrain_allocator *allocator, const dtrain__handshake *handshake,
                               const dtrain__keys *keys)
{
    if (!dtrain__handshake_sealed(handshake, keys)) {
        dtrain__stream_unseal(allocator, stream);
        return 1;
    }
    if (stream->seal == NULL)
        stream->seal = (dtrain__seal *)dtrain__alloc(allocator, sizeof *stream->seal);
    if (stream->seal == NULL)
        return 0;
    memset(stream->seal, 0, offsetof(dtrain__seal, out));
    dtrain__handshake_derive(handshake, keys, stream->seal->out_key, stream->seal->in_key);
    return 1;
}

/* What must still go out though its owner has handed it over. */
static int dtrain__stream_owes(const dtrain__stream *stream)
{
    return stream->again > 0 || (stream->seal != NULL && stream->seal->out_at < stream->seal->out_end);
}

/* Whether dtrain__stream_recv gives something, whatever poll() says of the descriptor. */
static int dtrain__stream_holds(const dtrain__stream *stream)
{
    return stream->fd >= 0 && stream->seal != NULL && dtrain__seal_holds(stream->seal);
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

/* As stream_send, by records. What is sealed has to go as it is, so it counts as handed over. The last byte of it
 * counts as gone when all of it has: whoever waits for its bytes to go waits for the system to have them. */
static ssize_t dtrain__stream_send_sealed(dtrain__stream *stream, const unsigned char *data, size_t bytes, int more)
{
    dtrain__seal *seal = stream->seal;
    int gone = dtrain__seal_flush(seal, stream->fd, 0);
    while (gone > 0 && stream->again > 0) {
        size_t at = (size_t)((stream->sent - stream->again) % DTRAIN__REPLAY_BYTES), room = DTRAIN__REPLAY_BYTES - at;
        stream->again -=
            dtrain__seal_put(seal, stream->replay + at, stream->again < room ? (size_t)stream->again : room);
        gone = dtrain__seal_flush(seal, stream->fd, 0);
    }
    if (gone <= 0 || bytes == 0)
        return gone < 0 ? -1 : 0;
    size_t told = stream->withheld ? 1 : 0, n;
    stream->withheld = 0;
    if (bytes == told || (bytes > DTRAIN__SEAL_LITTLE && !dtrain__net_writable(stream->fd)))
        return (ssize_t)told;
    uint64_t records = seal->out_records;
    n = dtrain__seal_put(seal, data + told, bytes - told);
    gone = dtrain__seal_flush(seal, stream->fd, more && told + n == bytes);
    if (gone <= 0 && seal->out_at == 0) { /* nobody has seen it: the owner may still do without */
        seal->out_end = 0;
        seal->out_records = records;
        return told > 0 || gone == 0 ? (ssize_t)told : -1;
    }
    stream->sent += n;
    dtrain__stream_keep(stream, data + told, n);
    stream->withheld = gone <= 0;
    return (ssize_t)(told + n) - stream->withheld;
}

/* Sends what goes at once: bytes gone, 0 for none now, -1 when the connection is broken (errno). */
static ssize_t dtrain__stream_send(dtrain__stream *stream, const void *data, size_t bytes, int more)
{
    ssize_t n;
    if (stream->seal != NULL)
        return dtrain__stream_send_sealed(stream, (const unsigned char *)data, bytes, more);
    while (stream->again > 0) {
        size_t at = (size_t)((stream->sent - stream->again) % DTRAIN__REPLAY_BYTES), room = DTRAIN__REPLAY_BYTES - at;
        n = dtrain__net_send(stream->fd, stream->replay + at, stream->again < room ? (size_t)stream->again : room, 0);
        if (n <= 0)
            return n;
        stream->again -= (uint64_t)n;
    }
    if (bytes == 0)
        return 0;
    if (stream->withheld) { /* of the connection before, which was sealed: it has gone again with the rest */
        stream->withheld = 0;
        return 1;
    }
    n = dtrain__net_send(stream->fd, data, bytes, more);
    if (n > 0) {
        stream->sent += (uint64_t)n;
        dtrain__stream_keep(stream, (const unsigned char *)data, (size_t)n);
    }
    return n;
}

static ssize_t dtrain__stream_recv(dtrain__stream *stream, void *data, size_t bytes)
{
    ssize_t n = stream->seal != NULL ? dtrain__seal_recv(stream->seal, stream->fd, (unsigned char *)data, bytes)
                                     : dtrain__net_recv(stream->fd, data, bytes);
    if (n > 0)
        stream->received += (uint64_t)n;
    return n;
}

/* Says that nothing follows, where that goes at once. */
static void dtrain__stream_end(dtrain__stream *stream)
{
    if (stream->seal != NULL && dtrain__seal_flush(stream->seal, stream->fd, 0) > 0) {
        dtrain__seal_record(stream->seal, DTRAIN__RECORD_END, NULL, 0);
        dtrain__seal_flush(stream->seal, stream->fd, 0);
    }
    shutdown(stream->fd, SHUT_WR);
}

static void dtrain__stream_free(dtrain_allocator *allocator, dtrain__stream *stream)
{
    dtrain__free(allocator, stream->replay);
    dtrain__stream_unseal(allocator, stream);
}

/* A growing block of bytes; bytes of it are in use. */
typedef struct dtrain__bytes {
    unsigned char *data;
    size_t bytes;
    int short_of; /* memory: there was none for something that belongs here */
} dtrain__bytes;

/* Makes room for `more` bytes behind those in use. Returns 0 when there is no memory. */
static int dtrain__bytes_room(dtrain_allocator *allocator, dtrain__bytes *block, size_t more)
{
    /* a heartbeat with all that it may tell of others fits at first, so that a warm loop's never allocates */
    void *data =
        dtrain__memory_grow(allocator, block->data, 1, block->bytes, block->data == NULL && more < 1024 ? 1024 : more);
    block->short_of |= data == NULL;
    block->data = data != NULL ? (unsigned char *)data : block->data;
    return data != NULL;
}

static void dtrain__bytes_drop(dtrain__bytes *block, size_t bytes)
{
    block->bytes -= bytes;
    if (bytes > 0)
        memmove(block->data, block->data + bytes, block->bytes);
}

static void dtrain__bytes_free(dtrain_allocator *allocator, dtrain__bytes *block)
{
    dtrain__free(allocator, block->data);
    memset(block, 0, sizeof *block);
}

DTRAIN__FAST_END
#endif
