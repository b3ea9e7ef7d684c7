/* ---- >>seal ----
 * Records, which carry the bytes of a sealed connection. A record is 4 bytes of length and kind, the ciphertext, and
 * the tag of both. Its nonce is its number on this connection in this direction; each direction has its own key. So a
 * record that is changed, injected, left out, moved or played again has a wrong tag. A record of kind END closes the
 * stream: a connection that ends without it was cut. Nothing is handed on before its tag is right. Never waits. */
#ifndef DTRAIN__SEAL
#define DTRAIN__SEAL
#include "chacha.c"
#include "net.c"

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

/* Whether there is something for the next call of seal_recv, whatever poll() says of the descriptor. */
static int dtrain__seal_holds(const dtrain__seal *seal)
{
    size_t bytes;
    return seal->ended || seal->plain_at < seal->plain_end || dtrain__seal_whole(seal, &bytes) != 0;
}

#endif
