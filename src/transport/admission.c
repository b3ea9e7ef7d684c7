/* ---- >>admission ----
 * Who may come in. Every connection opens with four messages of fixed size, whatever the peer sends:
 *
 *   hello      initiator  who it is, whom it wants, what for, a nonce
 *   challenge  acceptor   who it is, the run, a nonce
 *   proof      initiator  HMAC-SHA256 of "initiator", hello, challenge and its position in the stream
 *   verdict    acceptor   yes or no, its position, HMAC-SHA256 of "acceptor" and all that came before
 *
 * Nothing but these fixed fields is looked at before the proof holds; direction, run, both ranks, version and
 * both nonces are bound into both proofs, so that a recording, a reflection or a relay to another rank proves
 * nothing. An unproved peer costs one dtrain__door for a few seconds. A door is a state machine over its two
 * buffers: door_take() handles one whole message and moves no byte itself, which is what the fuzzer drives.
 *
 * Source: challenge and response of ISO/IEC 9798-4; HMAC of RFC 2104. */
#ifndef DTRAIN__ADMISSION
#define DTRAIN__ADMISSION
#include "../base/os.c"
#include "../base/status.c"
#include "../base/sha256.c"
#include "net.c"

#define DTRAIN__WIRE_VERSION 2u
#define DTRAIN__HELLO_BYTES 128
#define DTRAIN__CHALLENGE_BYTES 80
#define DTRAIN__PROOF_BYTES 40
#define DTRAIN__VERDICT_BYTES 304
#define DTRAIN__VERDICT_TEXT 256
#define DTRAIN__NONCE_BYTES 32
#define DTRAIN__RUN_BYTES 16

/* What both sides of every door of one rank share. */
typedef struct dtrain__keys {
    unsigned char token[256];
    size_t token_bytes;                   /* 0: the proof is made with an empty key */
    unsigned char run[DTRAIN__RUN_BYTES]; /* made by rank 0; zero on others until it told them */
    int rank, world_size;
} dtrain__keys;

enum { DTRAIN__PURPOSE_CONTROL = 1, DTRAIN__PURPOSE_DATA };

typedef enum dtrain__door_state {
    DTRAIN__DOOR_CONNECTING = 0, /* initiator: the system is still connecting */
    DTRAIN__DOOR_HELLO,          /* acceptor awaits a hello */
    DTRAIN__DOOR_CHALLENGE,      /* initiator awaits a challenge */
    DTRAIN__DOOR_PROOF,          /* acceptor awaits a proof */
    DTRAIN__DOOR_PROVED,         /* acceptor: the owner must call door_answer */
    DTRAIN__DOOR_VERDICT,        /* initiator awaits the verdict */
    DTRAIN__DOOR_OPEN,           /* both have proved themselves; what out still holds must go first */
    DTRAIN__DOOR_CLOSED          /* error says why */
} dtrain__door_state;

typedef struct dtrain__door {
    struct dtrain__door *next;
    int fd, initiator, purpose, lane;
    uint64_t channel; /* the group that a connection for data belongs to */
    int peer;         /* rank: whom an initiator wants, who an acceptor's hello says it is */
    int peer_world;   /* the world size that an acceptor's peer believes in */
    dtrain__door_state state;
    int64_t expires_ns;
    uint64_t received, peer_received; /* positions in the stream, for one that is resumed */
    uint64_t links, peer_links;       /* connections that the stream has had, as each side counts */
    unsigned char hello[DTRAIN__HELLO_BYTES], challenge[DTRAIN__CHALLENGE_BYTES], proof[DTRAIN__PROOF_BYTES];
    unsigned char in[DTRAIN__VERDICT_BYTES], out[DTRAIN__VERDICT_BYTES];
    size_t in_bytes, out_bytes, out_done;
    char peer_name[DTRAIN__ADDRESS_BYTES];
    dtrain__error error;
    int verdict;      /* initiator: a proved no, as a dtrain_status */
    int system_error; /* why the connection ended, as an errno */
} dtrain__door;

static const unsigned char dtrain__door_magic[8] = {'d', 't', 'r', 'a', 'i', 'n', '\r', '\n'};

static void dtrain__put_le(unsigned char *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        out[i] = (unsigned char)(value >> (8 * i) & 255);
}

static uint64_t dtrain__get_le(const unsigned char *in, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;)
        value = value << 8 | in[i];
    return value;
}

/* 1 on little-endian machines, 2 on big-endian ones: data travel as they lie in memory. */
static unsigned char dtrain__byte_order(void)
{
    const uint16_t one = 1;
    unsigned char first;
    memcpy(&first, &one, 1);
    return first == 1 ? 1 : 2;
}

/* HMAC of who speaks and all that was said; extra is the speaker's message up to its MAC. */
static void dtrain__door_mac(const dtrain__keys *keys, const dtrain__door *door, const char *who, size_t proof_bytes,
                             const unsigned char *extra, size_t extra_bytes, unsigned char mac[32])
{
    dtrain__hmac hmac;
    dtrain__hmac_start(&hmac, keys->token, keys->token_bytes);
    dtrain__hmac_add(&hmac, who, strlen(who) + 1);
    dtrain__hmac_add(&hmac, door->hello, sizeof door->hello);
    dtrain__hmac_add(&hmac, door->challenge, sizeof door->challenge);
    dtrain__hmac_add(&hmac, door->proof, proof_bytes);
    dtrain__hmac_add(&hmac, extra, extra_bytes);
    dtrain__hmac_finish(&hmac, mac);
}

static void dtrain__door_say(dtrain__door *door, const unsigned char *message, size_t bytes)
{
    memcpy(door->out, message, bytes);
    door->out_bytes = bytes;
    door->out_done = 0;
    door->in_bytes = 0;
}

static void dtrain__door_close(dtrain__door *door)
{
    if (door->fd >= 0)
        close(door->fd);
    door->fd = -1;
    door->state = DTRAIN__DOOR_CLOSED;
}

/* How many bytes the message has that the door awaits; 0: none. */
static size_t dtrain__door_wants(const dtrain__door *door)
{
    switch (door->state) {
    case DTRAIN__DOOR_HELLO: return DTRAIN__HELLO_BYTES;
    case DTRAIN__DOOR_CHALLENGE: return DTRAIN__CHALLENGE_BYTES;
    case DTRAIN__DOOR_PROOF: return DTRAIN__PROOF_BYTES;
    case DTRAIN__DOOR_VERDICT: return DTRAIN__VERDICT_BYTES;
    default: return 0;
    }
}

/* Opens the initiator's side; purpose, channel, lane, peer and received are set. Returns 0 or an errno. */
static int dtrain__door_knock(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char *hello = door->hello;
    memset(hello, 0, sizeof door->hello);
    memcpy(hello, dtrain__door_magic, 8);
    dtrain__put_le(hello + 8, DTRAIN__WIRE_VERSION, 2);
    hello[10] = dtrain__byte_order();
    hello[11] = (unsigned char)door->purpose;
    dtrain__put_le(hello + 12, (uint64_t)keys->rank, 4);
    dtrain__put_le(hello + 16, (uint64_t)door->peer, 4);
    dtrain__put_le(hello + 20, (uint64_t)keys->world_size, 4);
    dtrain__put_le(hello + 24, (uint64_t)door->lane, 4);
    dtrain__put_le(hello + 80, door->channel, 8);
    dtrain__put_le(hello + 112, door->links, 8);
    memcpy(hello + 32, keys->run, DTRAIN__RUN_BYTES);
    door->initiator = 1;
    door->state = DTRAIN__DOOR_CHALLENGE;
    int error = dtrain__os_random(hello + 48, DTRAIN__NONCE_BYTES);
    dtrain__door_say(door, hello, sizeof door->hello);
    return error;
}

/* Compares the opening bytes of a hello or challenge with this build's. */
static dtrain_status dtrain__door_same_build(dtrain__door *door, const unsigned char *message)
{
    unsigned version = (unsigned)dtrain__get_le(message + 8, 2);
    if (memcmp(message, dtrain__door_magic, 8) != 0)
        return dtrain__fail(&door->error, DTRAIN_ERR_DENIED, "%s does not speak dtrain: dropped", door->peer_name);
    if (version != DTRAIN__WIRE_VERSION)
        return dtrain__fail(&door->error, DTRAIN_ERR_MISMATCH,
                            "%s speaks wire version %u, this rank %u: build both from one dtrain.h", door->peer_name,
                            version, DTRAIN__WIRE_VERSION);
    if (message[10] != dtrain__byte_order())
        return dtrain__fail(&door->error, DTRAIN_ERR_MISMATCH,
                            "%s has %s bytes first, this rank %s: ranks of one group need one byte order",
                            door->peer_name, message[10] == 1 ? "low" : "high", message[10] == 1 ? "high" : "low");
    return DTRAIN_OK;
}

/* Acceptor: the hello is whole. Anyone who speaks another version hears ours, and no more. */
static void dtrain__door_take_hello(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char *challenge = door->challenge;
    memcpy(door->hello, door->in, sizeof door->hello);
    memset(challenge, 0, sizeof door->challenge);
    memcpy(challenge, dtrain__door_magic, 8);
    dtrain__put_le(challenge + 8, DTRAIN__WIRE_VERSION, 2);
    challenge[10] = dtrain__byte_order();
    dtrain__put_le(challenge + 12, (uint64_t)keys->rank, 4);
    memcpy(challenge + 16, keys->run, DTRAIN__RUN_BYTES);
    if (memcmp(door->hello, dtrain__door_magic, 8) != 0 ||
        dtrain__os_random(challenge + 32, DTRAIN__NONCE_BYTES) != 0) {
        dtrain__fail(&door->error, DTRAIN_ERR_DENIED, "%s does not speak dtrain: dropped", door->peer_name);
        dtrain__door_close(door);
        return;
    }
    dtrain__door_say(door, challenge, sizeof door->challenge);
    if (dtrain__door_same_build(door, door->hello) != DTRAIN_OK) {
        door->state = DTRAIN__DOOR_OPEN; /* until the challenge is out; error says that it must be closed then */
        return;
    }
    uint64_t peer = dtrain__get_le(door->hello + 12, 4), world = dtrain__get_le(door->hello + 20, 4);
    uint64_t lane = dtrain__get_le(door->hello + 24, 4);
    door->channel = dtrain__get_le(door->hello + 80, 8);
    door->peer_links = dtrain__get_le(door->hello + 112, 8);
    door->purpose = door->hello[11];
    door->peer = peer < INT_MAX ? (int)peer : -1;
    door->peer_world = world < INT_MAX ? (int)world : -1;
    door->lane = lane < INT_MAX ? (int)lane : -1;
    door->state = DTRAIN__DOOR_PROOF;
}

/* Initiator: the challenge is whole; answers with the proof. */
static void dtrain__door_take_challenge(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char *proof = door->proof;
    memcpy(door->challenge, door->in, sizeof door->challenge);
    if (dtrain__door_same_build(door, door->challenge) != DTRAIN_OK) {
        dtrain__door_close(door);
        return;
    }
    if (dtrain__get_le(door->challenge + 12, 4) != (uint64_t)door->peer) {
        dtrain__fail(&door->error, DTRAIN_ERR_MISMATCH, "rank %d was expected at %s, and rank %u answers", door->peer,
                     door->peer_name, (unsigned)dtrain__get_le(door->challenge + 12, 4));
        dtrain__door_close(door);
        return;
    }
    dtrain__put_le(proof + 32, door->received, 8);
    dtrain__door_mac(keys, door, "dtrain initiator", 0, proof + 32, 8, proof);
    dtrain__door_say(door, proof, sizeof door->proof);
    door->state = DTRAIN__DOOR_VERDICT;
}

/* Acceptor: the proof is whole. A wrong one is answered by a no without a word. */
static void dtrain__door_take_proof(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char mac[32], no[DTRAIN__VERDICT_BYTES];
    dtrain__door_mac(keys, door, "dtrain initiator", 0, door->in + 32, 8, mac);
    if (!dtrain__equal_secret(mac, door->in, sizeof mac)) {
        memset(no, 0, sizeof no);
        no[0] = DTRAIN_ERR_DENIED;
        dtrain__door_say(door, no, sizeof no);
        dtrain__fail(&door->error, DTRAIN_ERR_DENIED,
                     "%s, which says it is rank %d, does not hold this group's token: dropped", door->peer_name,
                     door->peer);
        door->state = DTRAIN__DOOR_OPEN;
        return;
    }
    memcpy(door->proof, door->in, sizeof door->proof);
    door->peer_received = dtrain__get_le(door->proof + 32, 8);
    door->state = DTRAIN__DOOR_PROVED;
}

/* Acceptor: lets the proved peer in (DTRAIN_OK), with this side's position, or sends it away with a text. */
static void dtrain__door_answer(dtrain__door *door, const dtrain__keys *keys, dtrain_status status, const char *text)
{
    unsigned char verdict[DTRAIN__VERDICT_BYTES];
    memset(verdict, 0, sizeof verdict);
    verdict[0] = (unsigned char)status;
    dtrain__put_le(verdict + 8, door->received, 8);
    snprintf((char *)verdict + 16, DTRAIN__VERDICT_TEXT, "%s", text);
    dtrain__door_mac(keys, door, "dtrain acceptor", sizeof door->proof, verdict, 16 + DTRAIN__VERDICT_TEXT,
                     verdict + 16 + DTRAIN__VERDICT_TEXT);
    dtrain__door_say(door, verdict, sizeof verdict);
    if (status != DTRAIN_OK)
        dtrain__fail(&door->error, status, "%s (rank %d) was sent away: %.300s", door->peer_name, door->peer, text);
    door->state = DTRAIN__DOOR_OPEN;
}

/* Initiator: the verdict is whole; believed only when it is proved itself. */
static void dtrain__door_take_verdict(dtrain__door *door, const dtrain__keys *keys)
{
    unsigned char mac[32];
    const unsigned char *verdict = door->in;
    char text[DTRAIN__VERDICT_TEXT];
    dtrain__door_mac(keys, door, "dtrain acceptor", sizeof door->proof, verdict, 16 + DTRAIN__VERDICT_TEXT, mac);
    if (!dtrain__equal_secret(mac, verdict + 16 + DTRAIN__VERDICT_TEXT, sizeof mac)) {
        dtrain__fail(&door->error, DTRAIN_ERR_DENIED,
                     "rank %d at %s and this rank do not hold the same token (this rank's has %zu bytes): give every "
                     "rank the same DTRAIN_TOKEN",
                     door->peer, door->peer_name, keys->token_bytes);
        dtrain__door_close(door);
        return;
    }
    door->peer_received = dtrain__get_le(verdict + 8, 8);
    memcpy(text, verdict + 16, sizeof text);
    text[sizeof text - 1] = 0;
    door->state = DTRAIN__DOOR_OPEN;
    if (verdict[0] != DTRAIN_OK) {
        door->verdict = verdict[0];
        dtrain__fail(&door->error, verdict[0] <= DTRAIN_ERR_ABORTED ? (dtrain_status)verdict[0] : DTRAIN_ERR_DENIED,
                     "rank %d at %s sent this rank away: %s", door->peer, door->peer_name, text);
        dtrain__door_close(door);
    }
}

/* Handles the message that fills door->in, door_wants() bytes long. */
static void dtrain__door_take(dtrain__door *door, const dtrain__keys *keys)
{
    dtrain__door_state state = door->state;
    door->in_bytes = 0;
    if (state == DTRAIN__DOOR_HELLO)
        dtrain__door_take_hello(door, keys);
    else if (state == DTRAIN__DOOR_CHALLENGE)
        dtrain__door_take_challenge(door, keys);
    else if (state == DTRAIN__DOOR_PROOF)
        dtrain__door_take_proof(door, keys);
    else if (state == DTRAIN__DOOR_VERDICT)
        dtrain__door_take_verdict(door, keys);
}

/* Whether the door's descriptor has bytes to go out. */
static int dtrain__door_writes(const dtrain__door *door)
{
    return door->state == DTRAIN__DOOR_CONNECTING || door->out_done < door->out_bytes;
}

static void dtrain__door_lost(dtrain__door *door, int error)
{
    dtrain__fail(&door->error, DTRAIN_ERR_PEER_LOST,
                 "%s: the connection to %s ended while both were introducing "
                 "themselves (%s)",
                 door->initiator ? "connect" : "accept", door->peer_name, dtrain__net_why(error));
    door->system_error = error;
    dtrain__door_close(door);
}

/* Moves what goes without waiting. PROVED, OPEN with nothing left to send, and CLOSED are the owner's business. */
static void dtrain__door_step(dtrain__door *door, const dtrain__keys *keys)
{
    ssize_t n;
    if (door->state == DTRAIN__DOOR_CONNECTING) {
        int error = dtrain__net_connected(door->fd);
        if (error == 0)
            error = dtrain__door_knock(door, keys);
        if (error == EINPROGRESS)
            return;
        if (error != 0) {
            dtrain__door_lost(door, error);
            return;
        }
    }
    for (;;) {
        while (door->out_done < door->out_bytes) {
            n = dtrain__net_send(door->fd, door->out + door->out_done, door->out_bytes - door->out_done, 0);
            if (n < 0)
                dtrain__door_lost(door, errno);
            if (n <= 0)
                return;
            door->out_done += (size_t)n;
        }
        size_t wants = dtrain__door_wants(door);
        if (wants == 0)
            return;
        n = dtrain__net_recv(door->fd, door->in + door->in_bytes, wants - door->in_bytes);
        if (n < 0)
            dtrain__door_lost(door, errno);
        if (n <= 0)
            return;
        door->in_bytes += (size_t)n;
        if (door->in_bytes == wants)
            dtrain__door_take(door, keys);
    }
}

#endif
