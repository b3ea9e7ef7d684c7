/* ---- >>rings ----
 * Memory that several ranks have. A ring carries bytes from one rank to another. In its slot each rank posts its next
 * collective, see >>fused. */
#ifndef DTRAIN__RINGS
#define DTRAIN__RINGS
#include "../base/os_files.c"
DTRAIN__FAST_BEGIN

/* ---- rings ---- */

#define DTRAIN__RING_BYTES ((size_t)1 << 16)
#define DTRAIN__RING_POLLED_BYTES ((size_t)1 << 20) /* of a ring of ranks that poll, as each looks once a frame */
#define DTRAIN__RING_POLLED_ALL ((size_t)8 << 20)   /* of all rings of such a rank, but for the least size */

/* Where the two sides of a ring are. Its bytes lie elsewhere. */
typedef struct dtrain__ring {
    uint64_t written;
    char pad[DTRAIN__CACHE_LINE - 8];
    uint64_t read;
    char pad2[DTRAIN__CACHE_LINE - 8];
} dtrain__ring;

DTRAIN__PLACED(dtrain__ring, read, 64);

/* The size of a ring: a power of two. A message should fit, as what does not fit waits for the next poll. */
static size_t dtrain__ring_bytes(int ranks, int polls)
{
    size_t bytes = polls ? DTRAIN__RING_POLLED_BYTES : DTRAIN__RING_BYTES;
    while (bytes > DTRAIN__RING_BYTES && bytes * (size_t)ranks > DTRAIN__RING_POLLED_ALL)
        bytes /= 2;
    return bytes;
}

/* Returns the bytes in a ring. */
static uint64_t dtrain__ring_held(const dtrain__ring *ring)
{
    uint64_t read = DTRAIN__ATOMIC_LOAD(&ring->read, SEQ_CST);
    return DTRAIN__ATOMIC_LOAD(&ring->written, SEQ_CST) - read;
}

/* Moves bytes into the ring, whose `size` bytes are at `held`, or out of it. Returns how many. None if the counters
 * cannot be right: they may lie in memory of another process (see >>shm). */
static size_t dtrain__ring_move(dtrain__ring *ring, unsigned char *held, size_t size, int put, unsigned char *data,
                                size_t bytes)
{
    uint64_t *mine = put ? &ring->written : &ring->read, *theirs = put ? &ring->read : &ring->written;
    uint64_t moved = DTRAIN__ATOMIC_LOAD(mine, RELAXED);
    uint64_t ahead = moved - DTRAIN__ATOMIC_LOAD(theirs, SEQ_CST);
    uint64_t room = put ? size - ahead : 0 - ahead; /* 64 bits: the peer's counter may be false */
    size_t n = bytes < room ? bytes : (size_t)room;
    size_t at = (size_t)moved % size, first = size - at;
    if (n == 0 || room > size)
        return 0;
    first = first < n ? first : n;
    memcpy(put ? held + at : data, put ? data : held + at, first);
    memcpy(put ? held : data + first, put ? data + first : held, n - first);
    DTRAIN__ATOMIC_STORE(mine, moved + n, SEQ_CST);
    return n;
}

/* ---- posts ---- */

#define DTRAIN__POST_WORDS 13
#define DTRAIN__POST_INLINE_BYTES 1024
#define DTRAIN__POST_LINE_BYTES 32 /* of those, in the cache line that says that they are there */

/* Where a rank's buffers are, for peers in one address space. */
typedef struct dtrain__post_own {
    const void *in;
    void *out;
    const size_t *counts, *offsets; /* for an uneven all-to-all: what the rank sends to each */
} dtrain__post_own;

/* What a rank posts for one collective. Peers read it until they post the next one. Between processes it lies in shared
 * memory, so its layout is the same whatever the width of a pointer. */
typedef struct dtrain__post {
    uint64_t call[DTRAIN__POST_WORDS]; /* the call's description, compared between ranks */
    union {
        dtrain__post_own own;
        uint64_t room[4];
    } at;
    uint64_t places[2]; /* between processes: where in and out lie in their windows */
    /* 2 x turn of the operation, + 1 if it was withdrawn at its deadline; peers read what follows in the same line */
    uint64_t arrived __attribute__((aligned(DTRAIN__CACHE_LINE)));
    uint64_t check;                                /* of call; if equal, peers need not read call */
    uint64_t windows[2];                           /* between processes: of in and out (see >>window); 0: in none */
    unsigned char data[DTRAIN__POST_INLINE_BYTES]; /* small inputs */
} dtrain__post;

/* What a rank's device does with its peers' memory: see >>device_events. */
typedef struct dtrain__device_word {
    uint64_t turn;   /* the number of calls whose whole work the device has been given */
    uint32_t inside; /* 2: the device may use peers' memory; 1: this rank may still use peers' events; 0: neither */
} dtrain__device_word;

typedef struct dtrain__slot {
    uint64_t finished; /* turn of the last operation whose buffers this rank no longer reads */
    uint64_t put;      /* rounds that this rank has put into bounce buffers, of all operations (see >>bounce) */
    uint64_t taken;    /* those of which it has taken its cells */
    uint32_t inside;
    uint32_t closed; /* between processes: the group is broken, and nobody enters this rank's buffers any more */
    /* rank 0's: counts 2 for each try to withdraw a post; odd while a rank does it. Peers read it in each call */
    uint64_t withdrawn __attribute__((aligned(DTRAIN__CACHE_LINE)));
    uint32_t asleep; /* between processes: this rank waits for its doorbell */
    dtrain__device_word device __attribute__((aligned(DTRAIN__CACHE_LINE)));
    dtrain__post posts[2] __attribute__((
        aligned(DTRAIN__CACHE_LINE))); /* by parity of the turn: peers may still read turn s while s + 1 is posted */
} dtrain__slot;

/* Processes with words of 32 bits and of 64 share these. */
DTRAIN__PLACED(dtrain__post, places, 136);
DTRAIN__PLACED(dtrain__post, data, 224);
DTRAIN__PLACED(dtrain__slot, closed, 28);
DTRAIN__PLACED(dtrain__slot, asleep, 72);
DTRAIN__PLACED(dtrain__slot, posts, 192);
DTRAIN__PLACED(dtrain__slot, posts[1], 192 + 1280);

DTRAIN__FAST_END
#endif
