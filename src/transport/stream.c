/* ---- >>stream ----
 * One direction-pair of bytes between two ranks that can outlive its connection: each side counts what it
 * has sent and received, and a side that may reconnect keeps its last bytes, so that a new connection goes
 * on where the old one was cut. Positions count plain bytes, whether or not the connection is sealed. Never waits.
 * Frames of the control plane are built on it too. */
#ifndef DTRAIN__STREAM
#define DTRAIN__STREAM
#include "../base/memory.c"
#include "../control/admission.c"
#include "chacha.c"
#include "net.c"
DTRAIN__FAST_BEGIN

/* ---- records, which carry the bytes of a sealed connection ----
 *
 * A record is 4 bytes of length and kind, the ciphertext, and the tag of both. Its nonce is its number on this
 * connection in this direction; each direction has its own key. So a record that is changed, injected, left out, moved
 * or played again has a wrong tag. A record of kind END closes the stream: a connection that ends without it was cut.
 * Nothing is handed on before its tag is right. */

#define DTRAIN__RECORD_BYTES ((size_t)1 << 14) /* of plaintext, at most */
#define DTRAIN__RECORD_HEAD 4u
#define DTRAIN__RECORD_EXTRA (DTRAIN__RECORD_HEAD + DTRAIN__TAG_BYTES)
#define DTRAIN__SEAL_BYTES (8 * (DTRAIN__RECORD_BYTES + DTRAIN__RECORD_EXTRA)) /* moved by one call of the system */
#define DTRAIN__SEAL_LITTLE ((size_t)4096) /* sealed without looking whether the system takes it */

enum { DTRAIN__RECORD_DATA = 0, DTRAIN__RECORD_END };

typedef struct dtrain__seal {
    unsigned char out_key[DTRAIN__KEY_BYTES], in_key[DTRAIN__KEY_BYTES];
    uint64_t out_records, in_records;
    size_t out_at, out_end;     /* of out: sealed, and not gone */
    size_t in_at, in_end;       /* of in: received, and not opened */
    size_t plain_at, plain_end; /* of in: opened, and not handed on */
    int ended;                  /* nothing follows, for the reason `error`; 0 is the peer's orderly close */
    int error;
    unsigned char out[DTRAIN__SEAL_BYTES], in[DTRAIN__SEAL_BYTES];
} dtrain__seal;

static void dtrain__seal_nonce(unsigned char nonce[12], uint64_t records)
{
    memset(nonce, 0, 4);
    dtrain__store_le32(nonce + 4, (uint32_t)(records & 0xffffffffu));
    dtrain__store_le32(nonce + 8, (uint32_t)(records >> 32));
}

/* Appends one record to what goes out; there is room. */
static void dtrain__seal_record(dtrain__seal *seal, int kind, const unsigned char *data, size_t bytes)
{
    unsigned char nonce[12], *head = seal->out + seal->out_end, *body = head + DTRAIN__RECORD_HEAD;
    dtrain__store_le32(head, (uint32_t)bytes | (uint32_t)kind << 24);
    dtrain__seal_nonce(nonce, seal->out_records++);
    dtrain__aead_seal(dtrain__chacha_choose(dtrain__isa()), seal->out_key, nonce, head, DTRAIN__RECORD_HEAD, data, body,
                      bytes, body + bytes);
    seal->out_end += bytes + DTRAIN__RECORD_EXTRA;
}

/* Seals as much as the empty buffer takes; returns how much. */
static size_t dtrain__seal_put(dtrain__seal *seal, const unsigned char *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes && sizeof seal->out - seal->out_end >= DTRAIN__RECORD_BYTES + DTRAIN__RECORD_EXTRA) {
        size_t part = bytes - done < DTRAIN__RECORD_BYTES ? bytes - done : DTRAIN__RECORD_BYTES;
        dtrain__seal_record(seal, DTRAIN__RECORD_DATA, data + done, part);
        done += part;
    }
    return done;
}

/* Sends what is sealed: 1 when all has gone, 0 when not now, -1 when the connection is broken (errno). */
static int dtrain__seal_flush(dtrain__seal *seal, int fd, int more)
{
    while (seal->out_at < seal->out_end) {
        ssize_t n = dtrain__net_send(fd, seal->out + seal->out_at, seal->out_end - seal->out_at, more);
        if (n <= 0)
            return (int)n;
        seal->out_at += (size_t)n;
    }
    seal->out_at = seal->out_end = 0;
    return 1;
}

/* The first record that is not opened, once it is whole: 0 for not yet, -1 for what cannot be one. */
static int dtrain__seal_whole(const dtrain__seal *seal, size_t *bytes)
{
    uint32_t head;
    if (seal->in_end - seal->in_at < DTRAIN__RECORD_EXTRA)
        return 0;
    head = dtrain__load_le32(seal->in + seal->in_at);
    *bytes = head & 0xffffffu;
    if (*bytes > DTRAIN__RECORD_BYTES || head >> 24 > DTRAIN__RECORD_END)
        return -1;
    return seal->in_end - seal->in_at - DTRAIN__RECORD_EXTRA >= *bytes;
}

/* Opens the next record into data, where it fits into room, else in its place. Returns 0 when there is none. */
static int dtrain__seal_open(dtrain__seal *seal, unsigned char *data, size_t room, size_t *done)
{
    unsigned char nonce[12], *head = seal->in + seal->in_at, *body = head + DTRAIN__RECORD_HEAD;
    size_t bytes;
    int whole = dtrain__seal_whole(seal, &bytes);
    if (whole == 0 || seal->ended)
        return 0;
    dtrain__seal_nonce(nonce, seal->in_records++);
    if (whole < 0 || !dtrain__aead_open(dtrain__chacha_choose(dtrain__isa()), seal->in_key, nonce, head,
                                        DTRAIN__RECORD_HEAD, body, bytes <= room ? data : body, bytes, body + bytes)) {
        seal->ended = 1;
        seal->error = EBADMSG;
        return 0;
    }
    if (head[3] == DTRAIN__RECORD_END) {
        seal->ended = 1;
        seal->error = 0;
    } else if (bytes <= room) {
        *done += bytes;
    } else {
        seal->plain_at = seal->in_at + DTRAIN__RECORD_HEAD;
        seal->plain_end = seal->plain_at + bytes;
    }
    seal->in_at += bytes + DTRAIN__RECORD_EXTRA;
    return 1;
}

/* Hands on what was opened before and did not fit. */
static void dtrain__seal_rest(dtrain__seal *seal, unsigned char *data, size_t bytes, size_t *done)
{
    size_t part = seal->plain_end - seal->plain_at;
    part = part < bytes - *done ? part : bytes - *done;
    memcpy(data + *done, seal->in + seal->plain_at, part);
    seal->plain_at += part;
    *done += part;
}

/* Receives what is there, as dtrain__net_recv does. */
static ssize_t dtrain__seal_recv(dtrain__seal *seal, int fd, unsigned char *data, size_t bytes)
{
    size_t done = 0;
    for (;;) {
        dtrain__seal_rest(seal, data, bytes, &done);
        if (done == bytes)
            return (ssize_t)done;
        if (dtrain__seal_open(seal, data + done, bytes - done, &done))
            continue;
        if (seal->ended)
            break;
        seal->in_end -= seal->in_at;
        if (seal->in_at > 0)
            memmove(seal->in, seal->in + seal->in_at, seal->in_end);
        seal->in_at = seal->plain_at = seal->plain_end = 0;
        ssize_t n = dtrain__net_recv(fd, seal->in + seal->in_end, sizeof seal->in - seal->in_end);
        if (n == 0)
            return (ssize_t)done;
        if (n > 0) {
            seal->in_end += (size_t)n;
            continue;
        }
        seal->ended = 1;
        seal->error = errno != 0 ? errno : EPROTO;
        break;
    }
    errno = seal->error;
    return done > 0 ? (ssize_t)done : -1;
}

/* ---- streams ---- */

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
    const dtrain__seal *seal = stream->seal;
    size_t bytes;
    return stream->fd >= 0 && seal != NULL &&
           (seal->ended || seal->plain_at < seal->plain_end || dtrain__seal_whole(seal, &bytes) != 0);
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
