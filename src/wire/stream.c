/* ---- >>stream ----
 * Two directions of bytes between two ranks. A stream can outlive its connection: each side counts the bytes that it
 * has sent and received. A side that may reconnect keeps its last bytes, so a new connection continues where the old
 * one was cut. Positions count plain bytes, also on sealed connections. No call waits. The frames of the control plane
 * are built on it too. */
#ifndef DTRAIN__STREAM
#define DTRAIN__STREAM
#include "../base/memory.c"
#include "admission.c"
#include "chacha.c"
#include "shm.c"
DTRAIN__FAST_BEGIN

/* ---- records, which carry the bytes of a sealed connection ----
 *
 * A record is 4 bytes of length and kind, the ciphertext, and the tag of both. Its nonce is its number on this
 * connection in this direction; each direction has its own key. So a record that is changed, injected, left out, moved
 * or replayed has a wrong tag. A record of kind END closes the stream; a connection that ends without it was cut.
 * Callers get bytes only after their tag has been checked. */

#define DTRAIN__RECORD_BYTES ((size_t)1 << 14) /* the most plaintext */
#define DTRAIN__RECORD_HEAD 4u
#define DTRAIN__RECORD_EXTRA (DTRAIN__RECORD_HEAD + DTRAIN__TAG_BYTES)
#define DTRAIN__SEAL_BYTES (8 * (DTRAIN__RECORD_BYTES + DTRAIN__RECORD_EXTRA)) /* per system call */
#define DTRAIN__SEAL_LITTLE ((size_t)4096) /* sealed without first asking the system whether it takes more */

enum { DTRAIN__RECORD_DATA = 0, DTRAIN__RECORD_END };

typedef struct dtrain__seal {
    unsigned char out_key[DTRAIN__KEY_BYTES], in_key[DTRAIN__KEY_BYTES];
    uint64_t out_records, in_records;
    size_t out_at, out_end;     /* the range of out that is sealed and not sent */
    size_t in_at, in_end;       /* the range of in that is received and not opened */
    size_t plain_at, plain_end; /* the range of in that is opened and that no caller has */
    int ended;                  /* 1: nothing follows */
    int error;                  /* why it ended, an errno; 0: the peer has closed in order */
    unsigned char out[DTRAIN__SEAL_BYTES], in[DTRAIN__SEAL_BYTES];
} dtrain__seal;

static void dtrain__seal_nonce(unsigned char nonce[12], uint64_t records)
{
    memset(nonce, 0, 4);
    dtrain__store_le32(nonce + 4, (uint32_t)(records & 0xffffffffu));
    dtrain__store_le32(nonce + 8, (uint32_t)(records >> 32));
}

/* Appends one record to the output. There must be room. */
static void dtrain__seal_record(dtrain__seal *seal, int kind, const unsigned char *data, size_t bytes)
{
    unsigned char nonce[12], *head = seal->out + seal->out_end, *body = head + DTRAIN__RECORD_HEAD;
    dtrain__store_le32(head, (uint32_t)bytes | (uint32_t)kind << 24);
    dtrain__seal_nonce(nonce, seal->out_records++);
    dtrain__aead_seal(dtrain__chacha_choose(dtrain__isa()), seal->out_key, nonce, head, DTRAIN__RECORD_HEAD, data, body,
                      bytes, body + bytes);
    seal->out_end += bytes + DTRAIN__RECORD_EXTRA;
}

/* Seals as many bytes as the empty buffer takes. Returns their number. */
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

/* Sends the sealed bytes. Returns 1 if all are sent, 0 if not yet, -1 if the connection is broken (errno). */
static int dtrain__seal_flush(dtrain__seal *seal, int fd, int more)
{
    while (seal->out_at < seal->out_end) {
        ssize_t n = dtrain__os_send(fd, seal->out + seal->out_at, seal->out_end - seal->out_at, more);
        if (n <= 0)
            return (int)n;
        seal->out_at += (size_t)n;
    }
    seal->out_at = seal->out_end = 0;
    return 1;
}

/* Returns 1 if the next record is whole, 0 if not yet, -1 if it cannot be a record. bytes: out, its plaintext. */
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

/* Opens the next record into data, or in place if it does not fit into room. Returns 0 if there is none. */
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

/* Copies bytes to the caller that were opened before and did not fit. */
static void dtrain__seal_rest(dtrain__seal *seal, unsigned char *data, size_t bytes, size_t *done)
{
    size_t part = seal->plain_end - seal->plain_at;
    part = part < bytes - *done ? part : bytes - *done;
    memcpy(data + *done, seal->in + seal->plain_at, part);
    seal->plain_at += part;
    *done += part;
}

/* Receives without waiting, as dtrain__net_recv does. */
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
        ssize_t n = dtrain__os_recv(fd, seal->in + seal->in_end, sizeof seal->in - seal->in_end);
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

#define DTRAIN__SOCKET_BUFFER ((size_t)1 << 20)          /* of a connection that can resume; Linux doubles it */
#define DTRAIN__REPLAY_BYTES (4 * DTRAIN__SOCKET_BUFFER) /* the doubled buffers at both ends */

typedef struct dtrain__stream {
    int fd;        /* -1: no connection now */
    uint64_t sent; /* bytes taken from the owner */
    uint64_t received;
    uint64_t again;        /* the last `again` bytes of `sent` must be sent once more */
    unsigned char *replay; /* the last DTRAIN__REPLAY_BYTES sent; NULL: the stream ends with its connection */
    dtrain__seal *seal;    /* NULL: bytes are not sealed */
    dtrain__shm shm;
    int mute;     /* 1: sending has failed; what the peer sent before can still be received */
    int crossed;  /* bytes have come after this end has sent its last */
    int withheld; /* 1: the owner is told that the last byte of `sent` is not sent yet, as sealed bytes wait */
} dtrain__stream;

static DTRAIN__NOINLINE void dtrain__stream_cut(dtrain__stream *stream)
{
    if (stream->fd >= 0)
        dtrain__os_hang_up(stream->fd);
    stream->fd = -1;
    stream->mute = stream->crossed = 0;
    dtrain__shm_close(&stream->shm.page, stream->shm.ring_bytes);
}

/* Continues over fd, whose other end has received peer_received bytes. Returns 0 if too many bytes were lost. */
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

/* Sets up the sealing of a new connection with its keys, if it is sealed. Returns 0 if there is no memory. */
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

/* Returns whether bytes that were taken from the owner must still be sent over this connection. */
static int dtrain__stream_owes(const dtrain__stream *stream)
{
    return !stream->mute &&
           (stream->again > 0 || (stream->seal != NULL && stream->seal->out_at < stream->seal->out_end));
}

/* Returns whether dtrain__stream_recv has something to return even if poll() does not report the descriptor. */
static int dtrain__stream_holds(const dtrain__stream *stream)
{
    const dtrain__seal *seal = stream->seal;
    size_t bytes;
    return stream->fd >= 0 && seal != NULL &&
           (seal->ended || seal->plain_at < seal->plain_end || dtrain__seal_whole(seal, &bytes) != 0);
}

/* Prepares to wait in poll() until the stream may send or receive. Returns 1 if it may do so now. *events: what to poll
 * its descriptor for. */
static int dtrain__stream_arm(dtrain__stream *stream, int sending, int *events)
{
    *events = sending && stream->shm.page == NULL ? POLLOUT : POLLIN;
    if (stream->fd >= 0 && stream->shm.page != NULL)
        return dtrain__shm_arm(&stream->shm, sending);
    return !sending && dtrain__stream_holds(stream);
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

/* Sends in records, otherwise as dtrain__stream_send. Sealed bytes cannot be taken back, so they count as taken from
 * the owner. But their last byte counts as sent only when the system has all of them. So an owner that waits until its
 * bytes are sent waits for the system. */
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
    if (gone <= 0 && seal->out_at == 0) { /* nothing has left: take it back, the owner may still change its mind */
        seal->out_end = 0;
        seal->out_records = records;
        return told > 0 || gone == 0 ? (ssize_t)told : -1;
    }
    stream->sent += n;
    dtrain__stream_keep(stream, data + told, n);
    stream->withheld = gone <= 0;
    return (ssize_t)(told + n) - stream->withheld;
}

static ssize_t dtrain__stream_put(dtrain__stream *stream, const void *data, size_t bytes, int more)
{
    return stream->shm.page != NULL ? dtrain__shm_send(&stream->shm, stream->fd, data, bytes)
                                    : dtrain__os_send(stream->fd, data, bytes, more);
}

/* Sends without waiting. Returns the number of bytes sent; 0: none now; -1: the connection is broken (errno). */
static ssize_t dtrain__stream_send(dtrain__stream *stream, const void *data, size_t bytes, int more)
{
    ssize_t n;
    if (stream->seal != NULL)
        return dtrain__stream_send_sealed(stream, (const unsigned char *)data, bytes, more);
    while (stream->again > 0) {
        size_t at = (size_t)((stream->sent - stream->again) % DTRAIN__REPLAY_BYTES), room = DTRAIN__REPLAY_BYTES - at;
        n = dtrain__stream_put(stream, stream->replay + at, stream->again < room ? (size_t)stream->again : room, 0);
        if (n <= 0)
            return n;
        stream->again -= (uint64_t)n;
    }
    if (bytes == 0)
        return 0;
    if (stream->withheld) { /* from a sealed connection before: that byte has been sent again with the others */
        stream->withheld = 0;
        return 1;
    }
    n = dtrain__stream_put(stream, data, bytes, more);
    if (n > 0) {
        stream->sent += (uint64_t)n;
        dtrain__stream_keep(stream, (const unsigned char *)data, (size_t)n);
    }
    return n;
}

static ssize_t dtrain__stream_recv(dtrain__stream *stream, void *data, size_t bytes)
{
    ssize_t n = stream->seal != NULL       ? dtrain__seal_recv(stream->seal, stream->fd, (unsigned char *)data, bytes)
                : stream->shm.page != NULL ? dtrain__shm_recv(&stream->shm, stream->fd, data, bytes)
                                           : dtrain__os_recv(stream->fd, data, bytes);
    if (n > 0)
        stream->received += (uint64_t)n;
    return n;
}

/* Tells the peer that nothing follows, if that can be sent at once. */
static void dtrain__stream_end(dtrain__stream *stream)
{
    if (stream->seal != NULL && dtrain__seal_flush(stream->seal, stream->fd, 0) > 0) {
        dtrain__seal_record(stream->seal, DTRAIN__RECORD_END, NULL, 0);
        dtrain__seal_flush(stream->seal, stream->fd, 0);
    }
    dtrain__os_end_sending(stream->fd);
}

/* Drops what has come, after the end. If the connection were closed with bytes unread, or if bytes came to it later,
 * the system would reset it and drop what the peer has not confirmed. Returns whether to wait because the peer still
 * sends.
 */
static int dtrain__stream_drain(dtrain__stream *stream)
{
    unsigned char waste[4096];
    dtrain__address end;
    ssize_t n = 1;
    for (int i = 0; i < 4096 && n > 0; i++) {
        n = dtrain__os_recv(stream->fd, waste, sizeof waste);
        stream->crossed |= n > 0;
    }
    return n >= 0 && stream->crossed && dtrain__net_end(stream->fd, 0, &end) == 0 && !dtrain__net_is_unix(&end) &&
           dtrain__os_unconfirmed(stream->fd) > 0;
}

/* Closes a connection so that sent data still arrive. */
static void dtrain__stream_hang_up(dtrain__stream *stream)
{
    if (stream->fd >= 0) {
        dtrain__stream_end(stream);
        dtrain__stream_drain(stream);
    }
    dtrain__stream_cut(stream);
}

static void dtrain__stream_free(dtrain_allocator *allocator, dtrain__stream *stream)
{
    dtrain__free(allocator, stream->replay);
    dtrain__stream_unseal(allocator, stream);
}

/* A growing block of bytes. */
typedef struct dtrain__bytes {
    unsigned char *data;
    size_t bytes; /* in use */
    int short_of; /* 1: something is missing here, as there was no memory */
} dtrain__bytes;

/* Makes room for `more` bytes after those in use. Returns 0 if there is no memory. */
static int dtrain__bytes_room(dtrain_allocator *allocator, dtrain__bytes *block, size_t more)
{
    /* the first room holds the largest heartbeat, so the heartbeats of a warm loop never allocate */
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
