/* ---- >>admission ----
 * Who may come in. Every connection opens with four messages of fixed size, whatever the peer sends:
 *
 *   hello      initiator  who it is, whom it wants, what for, a nonce
 *   challenge  acceptor   who it is, the run, a nonce
 *   proof      initiator  its position in the stream, its job, its process, memory that it offers to share;
 *                         HMAC-SHA256 of "initiator", hello, challenge and these
 *   verdict    acceptor   yes or no, whether it shares that memory, its position, HMAC-SHA256 of "acceptor" and all
 * that came before
 *
 * Only these fixed fields are read before the proof holds. Both proofs cover direction, run, both ranks, version, both
 * nonces, and what each side wants of sealing. So a recording, a reflection or a relay to another rank proves nothing,
 * and no relay can turn sealing off. An unproved peer costs one dtrain__handshake for a few seconds. That is a state
 * machine over its two buffers. handshake_take() handles one whole message and moves no byte itself, so the fuzzer can
 * drive it.
 *
 * Source: challenge and response of ISO/IEC 9798-4; HMAC of RFC 2104; keys of a sealed connection by RFC 5869. */
#ifndef DTRAIN__ADMISSION
#define DTRAIN__ADMISSION
#include "../base/os_files.c"
#include "../base/status.c"
#include "chacha.c"
#include "shm.c"
#include "keys.c"

#define DTRAIN__WIRE_VERSION 11u
#define DTRAIN__HELLO_BYTES \
    128 /* this and the next are the same in every version, so that each side can name both \
         * versions */
#define DTRAIN__CHALLENGE_BYTES 80
#define DTRAIN__PROOF_OFFER (40 + DTRAIN__JOB_BYTES + DTRAIN__NAME_BYTES) /* where the offer stands */
#define DTRAIN__PROOF_BYTES (DTRAIN__PROOF_OFFER + DTRAIN__SHM_OFFER_BYTES)
#define DTRAIN__VERDICT_BYTES 304
#define DTRAIN__VERDICT_TEXT 256
#define DTRAIN__NONCE_BYTES 32

enum { DTRAIN__PURPOSE_CONTROL = 1, DTRAIN__PURPOSE_DATA };
enum { DTRAIN__SECURE_LEAVES = 1, DTRAIN__SECURE_ON = 2, DTRAIN__SECURE_OFF = 4 }; /* one side's view, in one byte */
enum { DTRAIN__HELLO_SECURE = 28, DTRAIN__CHALLENGE_SECURE = 11 };                 /* its place in the message */

typedef enum dtrain__handshake_state {
    DTRAIN__HANDSHAKE_CONNECTING = 0, /* initiator: the system is still connecting */
    DTRAIN__HANDSHAKE_HELLO,          /* acceptor awaits a hello */
    DTRAIN__HANDSHAKE_CHALLENGE,      /* initiator awaits a challenge */
    DTRAIN__HANDSHAKE_PROOF,          /* acceptor awaits a proof */
    DTRAIN__HANDSHAKE_PROVED,         /* acceptor: the owner must now call dtrain__handshake_answer */
    DTRAIN__HANDSHAKE_VERDICT,        /* initiator awaits the verdict */
    DTRAIN__HANDSHAKE_OPEN,           /* both have proved themselves; what is left in `out` must go first */
    DTRAIN__HANDSHAKE_CLOSED          /* error says why */
} dtrain__handshake_state;

typedef struct dtrain__handshake {
    struct dtrain__handshake *next;
    int fd, initiator, purpose, lane;
    uint64_t from;    /* acceptor: the peer's host, by its address */
    uint64_t channel; /* the group that a connection for data belongs to */
    int peer;         /* the rank that an initiator wants, or that an acceptor's peer says it is */
    int peer_world;   /* the world size of an acceptor's peer */
    dtrain__handshake_state state;
    int64_t expires_ns;
    uint64_t received, peer_received; /* positions in the stream, for a resumed one */
    uint64_t links, peer_links;       /* how many connections the stream has had, as each side counts */
    unsigned char hello[DTRAIN__HELLO_BYTES], challenge[DTRAIN__CHALLENGE_BYTES], proof[DTRAIN__PROOF_BYTES];
    unsigned char in[DTRAIN__VERDICT_BYTES], out[DTRAIN__VERDICT_BYTES];
    size_t in_bytes, out_bytes, out_done;
    char peer_name[DTRAIN__ADDRESS_BYTES];
    char job[DTRAIN__JOB_BYTES], name[DTRAIN__NAME_BYTES]; /* of the process that has proved itself to an acceptor */
    dtrain__shm_page *page;                                /* shared with the peer; NULL: none */
    size_t ring_bytes, filled;                             /* of page: see shm_fill */
    int page_fd;                                           /* initiator: of page while it is offered */
    unsigned char offer[DTRAIN__SHM_OFFER_BYTES];          /* initiator: of page */
    dtrain__error error;
    int verdict;      /* initiator: a proved no, as a dtrain_status */
    int system_error; /* why the connection ended, as an errno */
} dtrain__handshake;

static const unsigned char dtrain__handshake_magic[8] = {'d', 't', 'r', 'a', 'i', 'n', '\r', '\n'};

/* 1 on little-endian machines, 2 on big-endian ones: data travel in the byte order of memory. */
static unsigned char dtrain__byte_order(void)
{
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first == 1 ? 1 : 2;
}

/* What this side says of sealing: its wish, and whether the connection's addresses lead to another host. */
static unsigned char dtrain__handshake_secure(const dtrain__handshake *handshake, const dtrain__keys *keys)
{
    int wish = keys->secure > 0 ? DTRAIN__SECURE_ON : keys->secure < 0 ? DTRAIN__SECURE_OFF : 0;
    return (unsigned char)(wish | (dtrain__net_leaves_host(handshake->fd) ? DTRAIN__SECURE_LEAVES : 0));
}

/* Whether one side demands sealing and the other forbids it; the owner then refuses the connection. */
static int dtrain__handshake_disagrees(const dtrain__handshake *handshake)
{
    int both = handshake->hello[DTRAIN__HELLO_SECURE] | handshake->challenge[DTRAIN__CHALLENGE_SECURE];
    return (both & DTRAIN__SECURE_ON) != 0 && (both & DTRAIN__SECURE_OFF) != 0;
}

/* Whether the connection is sealed: one side demands it, or sees it leave the host and does not forbid it. Both sides
 * find the same. */
static int dtrain__handshake_sealed(const dtrain__handshake *handshake, const dtrain__keys *keys)
{
    int a = handshake->hello[DTRAIN__HELLO_SECURE], b = handshake->challenge[DTRAIN__CHALLENGE_SECURE];
    int by_itself = DTRAIN__SECURE_LEAVES, no = DTRAIN__SECURE_LEAVES | DTRAIN__SECURE_OFF;
    return keys->token_bytes > 0 &&
           (((a | b) & DTRAIN__SECURE_ON) != 0 || (a & no) == by_itself || (b & no) == by_itself);
}

/* Derives the keys of both directions. */
static void dtrain__handshake_derive(const dtrain__handshake *handshake, const dtrain__keys *keys,
                                     unsigned char out[DTRAIN__KEY_BYTES], unsigned char in[DTRAIN__KEY_BYTES])
{
    static const char from_initiator[] = "dtrain seal initiator", from_acceptor[] = "dtrain seal acceptor";
    unsigned char said[DTRAIN__HELLO_BYTES + DTRAIN__CHALLENGE_BYTES], salt[32];
    memcpy(said, handshake->hello, DTRAIN__HELLO_BYTES);
    memcpy(said + DTRAIN__HELLO_BYTES, handshake->challenge, DTRAIN__CHALLENGE_BYTES);
    dtrain_sha256(said, sizeof said, salt);
    dtrain__hkdf(keys->token, keys->token_bytes, salt, sizeof salt, from_initiator, sizeof from_initiator,
                 handshake->initiator ? out : in, DTRAIN__KEY_BYTES);
    dtrain__hkdf(keys->token, keys->token_bytes, salt, sizeof salt, from_acceptor, sizeof from_acceptor,
                 handshake->initiator ? in : out, DTRAIN__KEY_BYTES);
}

/* The HMAC of the speaker's name and everything said so far. extra: the speaker's message up to its MAC. */
static void dtrain__handshake_mac(const dtrain__keys *keys, const dtrain__handshake *handshake, const char *who,
                                  size_t proof_bytes, const unsigned char *extra, size_t extra_bytes,
                                  unsigned char mac[32])
{
    dtrain__sha256_hmac hmac;
    dtrain__sha256_hmac_start(&hmac, keys->token, keys->token_bytes);
    dtrain__sha256_hmac_add(&hmac, who, strlen(who) + 1);
    dtrain__sha256_hmac_add(&hmac, handshake->hello, sizeof handshake->hello);
    dtrain__sha256_hmac_add(&hmac, handshake->challenge, sizeof handshake->challenge);
    dtrain__sha256_hmac_add(&hmac, handshake->proof, proof_bytes);
    dtrain__sha256_hmac_add(&hmac, extra, extra_bytes);
    dtrain__sha256_hmac_finish(&hmac, mac);
}

static DTRAIN__NOINLINE void dtrain__handshake_say(dtrain__handshake *handshake, const unsigned char *message,
                                                   size_t bytes)
{
    memcpy(handshake->out, message, bytes);
    handshake->out_bytes = bytes;
    handshake->out_done = 0;
    handshake->in_bytes = 0;
}

static DTRAIN__NOINLINE void dtrain__handshake_close(dtrain__handshake *handshake)
{
    if (handshake->fd >= 0)
        dtrain__os_hang_up(handshake->fd);
    handshake->fd = -1;
    handshake->state = DTRAIN__HANDSHAKE_CLOSED;
}

/* The size of the message that the handshake awaits; 0: it awaits none. */
static size_t dtrain__handshake_wants(const dtrain__handshake *handshake)
{
    switch (handshake->state) {
    case DTRAIN__HANDSHAKE_HELLO: return DTRAIN__HELLO_BYTES;
    case DTRAIN__HANDSHAKE_CHALLENGE: return DTRAIN__CHALLENGE_BYTES;
    case DTRAIN__HANDSHAKE_PROOF: return DTRAIN__PROOF_BYTES;
    case DTRAIN__HANDSHAKE_VERDICT: return DTRAIN__VERDICT_BYTES;
    default: return 0;
    }
}

/* Opens the initiator's side. The caller has set purpose, channel, lane, peer and received. Returns 0 or an errno. */
static int dtrain__handshake_begin(dtrain__handshake *handshake, const dtrain__keys *keys)
{
    unsigned char *hello = handshake->hello;
    memset(hello, 0, sizeof handshake->hello);
    memcpy(hello, dtrain__handshake_magic, 8);
    dtrain__put_le(hello + 8, DTRAIN__WIRE_VERSION, 2);
    hello[10] = dtrain__byte_order();
    hello[11] = (unsigned char)handshake->purpose;
    dtrain__put_le(hello + 12, (uint64_t)keys->rank, 4);
    dtrain__put_le(hello + 16, (uint64_t)handshake->peer, 4);
    dtrain__put_le(hello + 20, (uint64_t)keys->world_size, 4);
    dtrain__put_le(hello + 24, (uint64_t)handshake->lane, 4);
    hello[DTRAIN__HELLO_SECURE] = dtrain__handshake_secure(handshake, keys);
    dtrain__put_le(hello + 80, handshake->channel, 8);
    dtrain__put_le(hello + 112, handshake->links, 8);
    memcpy(hello + 32, keys->run, DTRAIN__RUN_BYTES);
    handshake->initiator = 1;
    handshake->state = DTRAIN__HANDSHAKE_CHALLENGE;
    int error = dtrain__os_random(hello + 48, DTRAIN__NONCE_BYTES);
    dtrain__handshake_say(handshake, hello, sizeof handshake->hello);
    return error;
}

/* Compares the opening bytes of a hello or challenge with this build's. */
static dtrain_status dtrain__handshake_same_build(dtrain__handshake *handshake, const unsigned char *message)
{
    unsigned version = (unsigned)dtrain__get_le(message + 8, 2);
    if (memcmp(message, dtrain__handshake_magic, 8) != 0)
        return dtrain__fail(&handshake->error, DTRAIN_ERR_DENIED, "%s does not speak dtrain: dropped",
                            handshake->peer_name);
    if (version != DTRAIN__WIRE_VERSION)
        return dtrain__fail(&handshake->error, DTRAIN_ERR_MISMATCH,
                            "%s speaks wire version %u, this rank %u: build both from one dtrain.h",
                            handshake->peer_name, version, DTRAIN__WIRE_VERSION);
    if (message[10] != dtrain__byte_order())
        return dtrain__fail(&handshake->error, DTRAIN_ERR_MISMATCH,
                            "%s stores %s bytes first, this rank %s: ranks of one group need one byte order",
                            handshake->peer_name, message[10] == 1 ? "low" : "high", message[10] == 1 ? "high" : "low");
    return DTRAIN_OK;
}

/* Acceptor: the hello is whole. A peer of another version hears this side's version, and no more. */
static void dtrain__handshake_take_hello(dtrain__handshake *handshake, const dtrain__keys *keys)
{
    unsigned char *challenge = handshake->challenge;
    memcpy(handshake->hello, handshake->in, sizeof handshake->hello);
    memset(challenge, 0, sizeof handshake->challenge);
    memcpy(challenge, dtrain__handshake_magic, 8);
    dtrain__put_le(challenge + 8, DTRAIN__WIRE_VERSION, 2);
    challenge[10] = dtrain__byte_order();
    challenge[DTRAIN__CHALLENGE_SECURE] = dtrain__handshake_secure(handshake, keys);
    dtrain__put_le(challenge + 12, (uint64_t)keys->rank, 4);
    memcpy(challenge + 16, keys->run, DTRAIN__RUN_BYTES);
    if (memcmp(handshake->hello, dtrain__handshake_magic, 8) != 0 ||
        dtrain__os_random(challenge + 32, DTRAIN__NONCE_BYTES) != 0) {
        dtrain__fail(&handshake->error, DTRAIN_ERR_DENIED, "%s does not speak dtrain: dropped", handshake->peer_name);
        dtrain__handshake_close(handshake);
        return;
    }
    dtrain__handshake_say(handshake, challenge, sizeof handshake->challenge);
    if (dtrain__handshake_same_build(handshake, handshake->hello) != DTRAIN_OK) {
        handshake->state =
            DTRAIN__HANDSHAKE_OPEN; /* until the challenge is sent; error tells the owner to close it then */
        return;
    }
    uint64_t peer = dtrain__get_le(handshake->hello + 12, 4), world = dtrain__get_le(handshake->hello + 20, 4);
    uint64_t lane = dtrain__get_le(handshake->hello + 24, 4);
    handshake->channel = dtrain__get_le(handshake->hello + 80, 8);
    handshake->peer_links = dtrain__get_le(handshake->hello + 112, 8);
    handshake->purpose = handshake->hello[11];
    handshake->peer = peer < INT_MAX ? (int)peer : -1;
    handshake->peer_world = world < INT_MAX ? (int)world : -1;
    handshake->lane = lane < INT_MAX ? (int)lane : -1;
    handshake->state = DTRAIN__HANDSHAKE_PROOF;
}

/* Initiator: the challenge is whole. Answers with the proof. */
static void dtrain__handshake_take_challenge(dtrain__handshake *handshake, const dtrain__keys *keys)
{
    static const unsigned char none[DTRAIN__RUN_BYTES] = {0};
    unsigned char *proof = handshake->proof;
    memcpy(handshake->challenge, handshake->in, sizeof handshake->challenge);
    if (dtrain__handshake_same_build(handshake, handshake->challenge) != DTRAIN_OK) {
        dtrain__handshake_close(handshake);
        return;
    }
    if (dtrain__get_le(handshake->challenge + 12, 4) != (uint64_t)handshake->peer) {
        dtrain__fail(&handshake->error, DTRAIN_ERR_MISMATCH,
                     "rank %d was expected at %s, but rank %u answers; check the address and the ranks",
                     handshake->peer, handshake->peer_name, (unsigned)dtrain__get_le(handshake->challenge + 12, 4));
        dtrain__handshake_close(handshake);
        return;
    }
    if (memcmp(keys->run, none, DTRAIN__RUN_BYTES) != 0 &&
        memcmp(keys->run, handshake->challenge + 16, DTRAIN__RUN_BYTES) != 0) {
        dtrain__fail(&handshake->error, DTRAIN_ERR_DENIED, "rank %d of another group answers at %s", handshake->peer,
                     handshake->peer_name);
        dtrain__handshake_close(handshake);
        return;
    }
    dtrain__put_le(proof + 32, handshake->received, 8);
    snprintf((char *)proof + 40, DTRAIN__JOB_BYTES, "%s", keys->job);
    snprintf((char *)proof + 40 + DTRAIN__JOB_BYTES, DTRAIN__NAME_BYTES, "%s", keys->name);
    memcpy(proof + DTRAIN__PROOF_OFFER, handshake->offer, DTRAIN__SHM_OFFER_BYTES);
    dtrain__handshake_mac(keys, handshake, "dtrain initiator", 0, proof + 32, DTRAIN__PROOF_BYTES - 32, proof);
    dtrain__handshake_say(handshake, proof, sizeof handshake->proof);
    handshake->state = DTRAIN__HANDSHAKE_VERDICT;
}

/* Acceptor: the proof is whole. A wrong one gets a refusal without a text. */
static void dtrain__handshake_take_proof(dtrain__handshake *handshake, const dtrain__keys *keys)
{
    unsigned char mac[32], no[DTRAIN__VERDICT_BYTES];
    dtrain__handshake_mac(keys, handshake, "dtrain initiator", 0, handshake->in + 32, DTRAIN__PROOF_BYTES - 32, mac);
    if (!dtrain__memory_equal_secret(mac, handshake->in, sizeof mac)) {
        memset(no, 0, sizeof no);
        no[0] = DTRAIN_ERR_DENIED;
        dtrain__handshake_say(handshake, no, sizeof no);
        dtrain__fail(&handshake->error, DTRAIN_ERR_DENIED,
                     "%s, which says it is rank %d, does not hold this group's token: dropped", handshake->peer_name,
                     handshake->peer);
        handshake->state = DTRAIN__HANDSHAKE_OPEN;
        return;
    }
    memcpy(handshake->proof, handshake->in, sizeof handshake->proof);
    handshake->peer_received = dtrain__get_le(handshake->proof + 32, 8);
    memcpy(handshake->job, handshake->proof + 40, DTRAIN__JOB_BYTES - 1);
    memcpy(handshake->name, handshake->proof + 40 + DTRAIN__JOB_BYTES, DTRAIN__NAME_BYTES - 1);
    handshake->state = DTRAIN__HANDSHAKE_PROVED;
}

/* Acceptor: admits the proved peer (DTRAIN_OK) with this side's position, or refuses it with a text. */
static void dtrain__handshake_answer(dtrain__handshake *handshake, const dtrain__keys *keys, dtrain_status status,
                                     const char *text)
{
    unsigned char verdict[DTRAIN__VERDICT_BYTES];
    memset(verdict, 0, sizeof verdict);
    verdict[0] = (unsigned char)status;
    verdict[1] = handshake->page != NULL;
    dtrain__put_le(verdict + 8, handshake->received, 8);
    snprintf((char *)verdict + 16, DTRAIN__VERDICT_TEXT, "%s", text);
    dtrain__handshake_mac(keys, handshake, "dtrain acceptor", sizeof handshake->proof, verdict,
                          16 + DTRAIN__VERDICT_TEXT, verdict + 16 + DTRAIN__VERDICT_TEXT);
    dtrain__handshake_say(handshake, verdict, sizeof verdict);
    if (status != DTRAIN_OK)
        dtrain__fail(&handshake->error, status, "%s (rank %d) was sent away: %.300s", handshake->peer_name,
                     handshake->peer, text);
    handshake->state = DTRAIN__HANDSHAKE_OPEN;
}

/* Initiator: the verdict is whole. It counts only if the acceptor has proved itself in it. */
static void dtrain__handshake_take_verdict(dtrain__handshake *handshake, const dtrain__keys *keys)
{
    unsigned char mac[32];
    const unsigned char *verdict = handshake->in;
    char text[DTRAIN__VERDICT_TEXT];
    dtrain__handshake_mac(keys, handshake, "dtrain acceptor", sizeof handshake->proof, verdict,
                          16 + DTRAIN__VERDICT_TEXT, mac);
    if (!dtrain__memory_equal_secret(mac, verdict + 16 + DTRAIN__VERDICT_TEXT, sizeof mac)) {
        dtrain__fail(&handshake->error, DTRAIN_ERR_DENIED,
                     "rank %d at %s and this rank do not hold the same token (this rank's has %zu bytes), or a "
                     "stranger answers there or changes bytes on the way: give every rank the same DTRAIN_TOKEN",
                     handshake->peer, handshake->peer_name, keys->token_bytes);
        dtrain__handshake_close(handshake);
        return;
    }
    if (verdict[1] == 0)
        dtrain__shm_close(&handshake->page, handshake->ring_bytes);
    handshake->peer_received = dtrain__get_le(verdict + 8, 8);
    memcpy(text, verdict + 16, sizeof text);
    text[sizeof text - 1] = 0;
    handshake->state = DTRAIN__HANDSHAKE_OPEN;
    if (verdict[0] != DTRAIN_OK) {
        handshake->verdict = verdict[0];
        dtrain__fail(&handshake->error,
                     dtrain__status_known(verdict[0]) ? (dtrain_status)verdict[0] : DTRAIN_ERR_DENIED,
                     "rank %d at %s sent this rank away: %s", handshake->peer, handshake->peer_name, text);
        dtrain__handshake_close(handshake);
    }
}

/* Handles the whole message in handshake->in, handshake_wants() bytes long. */
static void dtrain__handshake_take(dtrain__handshake *handshake, const dtrain__keys *keys)
{
    dtrain__handshake_state state = handshake->state;
    handshake->in_bytes = 0;
    if (state == DTRAIN__HANDSHAKE_HELLO)
        dtrain__handshake_take_hello(handshake, keys);
    else if (state == DTRAIN__HANDSHAKE_CHALLENGE)
        dtrain__handshake_take_challenge(handshake, keys);
    else if (state == DTRAIN__HANDSHAKE_PROOF)
        dtrain__handshake_take_proof(handshake, keys);
    else if (state == DTRAIN__HANDSHAKE_VERDICT)
        dtrain__handshake_take_verdict(handshake, keys);
}

/* The events to poll its descriptor for. */
static int dtrain__handshake_events(const dtrain__handshake *handshake)
{
    int writes = handshake->state == DTRAIN__HANDSHAKE_CONNECTING || handshake->out_done < handshake->out_bytes;
    return writes ? POLLOUT : POLLIN;
}

static void dtrain__handshake_lost(dtrain__handshake *handshake, int error)
{
    dtrain__fail(&handshake->error, DTRAIN_ERR_PEER_LOST, "%s: the connection to %s ended during the handshake (%s)",
                 handshake->initiator ? "connect" : "accept", handshake->peer_name, dtrain__net_why(error));
    handshake->system_error = error;
    dtrain__handshake_close(handshake);
}

/* Advances it without waiting. The owner handles PROVED, CLOSED, and OPEN with nothing left to send. */
static void dtrain__handshake_step(dtrain__handshake *handshake, const dtrain__keys *keys)
{
    ssize_t n;
    if (handshake->state == DTRAIN__HANDSHAKE_CONNECTING) {
        int error = dtrain__net_connected(handshake->fd);
        if (error == 0)
            error = dtrain__handshake_begin(handshake, keys);
        if (error == EINPROGRESS)
            return;
        if (error != 0) {
            dtrain__handshake_lost(handshake, error);
            return;
        }
    }
    for (;;) {
        while (handshake->out_done < handshake->out_bytes) {
            n = dtrain__os_send(handshake->fd, handshake->out + handshake->out_done,
                                handshake->out_bytes - handshake->out_done, 0);
            if (n < 0)
                dtrain__handshake_lost(handshake, errno);
            if (n <= 0)
                return;
            handshake->out_done += (size_t)n;
        }
        size_t wants = dtrain__handshake_wants(handshake);
        if (wants == 0)
            return;
        n = dtrain__os_recv(handshake->fd, handshake->in + handshake->in_bytes, wants - handshake->in_bytes);
        if (n < 0)
            dtrain__handshake_lost(handshake, errno);
        if (n <= 0)
            return;
        handshake->in_bytes += (size_t)n;
        if (handshake->in_bytes == wants)
            dtrain__handshake_take(handshake, keys);
    }
}

#endif
