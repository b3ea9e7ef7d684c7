/* ---- >>shm ----
 * Memory that two processes of a host share, in place of what their connection would carry: a ring for each direction.
 * The side that connects offers the memory in its proof, and the other side says in its verdict whether it could open
 * it (see >>admission). So hosts, users and containers are told apart by trying. The connection itself stays: its end
 * says that the peer has left or died, and a byte on it wakes a peer that sleeps in poll().
 *
 * Invariants: each side writes only its own counters and bytes. A side that will sleep says so first and then looks at
 * the ring once more. A peer can write anything: no value in the memory leads to an access outside the ring. No lock
 * is in the memory, so a process that is killed holds none. */
#ifndef DTRAIN__SHM
#define DTRAIN__SHM
#include "net.c"
#include "../base/memory.c"
#include "rings.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__SHM_OFFER_BYTES 32

typedef struct dtrain__shm_page {
    unsigned char key[16];
    uint32_t asleep[2]; /* whether this side waits for a byte on the connection */
    char pad[DTRAIN__CACHE_LINE - 24];
    dtrain__ring ways[2]; /* by the side that sends; side 0 has connected. Their bytes follow the page */
} dtrain__shm_page;

DTRAIN__PLACED(dtrain__shm_page, ways[1], 64 + 128);

/* One side's end. */
typedef struct dtrain__shm {
    dtrain__shm_page *page; /* NULL: the connection itself carries the bytes */
    size_t ring_bytes;      /* of each way */
    int side;
    int look; /* there may be something on the connection */
} dtrain__shm;

static size_t dtrain__shm_bytes(size_t ring_bytes)
{
    return sizeof(dtrain__shm_page) + 2 * ring_bytes;
}

static void dtrain__shm_close(dtrain__shm_page **page, size_t ring_bytes)
{
    if (*page != NULL)
        dtrain__os_unreserve(*page, dtrain__shm_bytes(ring_bytes));
    *page = NULL;
}

/* Makes memory and an offer of it. *fd stays open until the peer has answered. All zero: there is no memory. Returns
 * the bytes that have their pages: large rings have none yet, see shm_fill. */
static size_t dtrain__shm_offer(unsigned char offer[DTRAIN__SHM_OFFER_BYTES], size_t ring_bytes,
                                dtrain__shm_page **page, int *fd)
{
    int empty = ring_bytes > DTRAIN__RING_BYTES;
    memset(offer, 0, DTRAIN__SHM_OFFER_BYTES);
    *fd = -1;
    *page = dtrain__without("shm") ? NULL
                                   : (dtrain__shm_page *)dtrain__os_share_as(dtrain__shm_bytes(ring_bytes), empty, fd);
    if (*page == NULL)
        return 0;
    if (dtrain__os_random((*page)->key, sizeof(*page)->key) != 0) {
        dtrain__shm_close(page, ring_bytes);
        return 0;
    }
    dtrain__put_le(offer, (uint64_t)dtrain__os_self(), 8);
    dtrain__put_le(offer + 8, (uint64_t)*fd, 4);
    dtrain__put_le(offer + 12, ring_bytes, 4);
    memcpy(offer + 16, (*page)->key, sizeof(*page)->key);
    return empty ? 0 : dtrain__shm_bytes(ring_bytes);
}

/* Gives offered memory the next part of its pages, before the peer may open it: all at once could take milliseconds.
 * *filled: the bytes that have theirs. Returns 0 or an errno. */
static int dtrain__shm_fill(int fd, size_t ring_bytes, size_t *filled)
{
    const size_t step = (size_t)1 << 19;
    size_t left = dtrain__shm_bytes(ring_bytes) - *filled, piece = left < step + step / 2 ? left : step;
    int error = dtrain__os_share_fill(fd, *filled, piece);
    *filled += error == 0 ? piece : 0;
    return error;
}

/* Opens the memory of an offer. Returns NULL if that is not possible, or it is not the memory that was offered. */
static dtrain__shm_page *dtrain__shm_open(const unsigned char offer[DTRAIN__SHM_OFFER_BYTES], size_t *ring_bytes)
{
    uint64_t process = dtrain__get_le(offer, 8), fd = dtrain__get_le(offer + 8, 4),
             bytes = dtrain__get_le(offer + 12, 4);
    if (process == 0 || process > INT_MAX || fd > INT_MAX || bytes < DTRAIN__RING_BYTES ||
        bytes > DTRAIN__RING_POLLED_BYTES || (bytes & (bytes - 1)) != 0 || dtrain__without("shm"))
        return NULL;
    *ring_bytes = (size_t)bytes;
    dtrain__shm_page *page =
        (dtrain__shm_page *)dtrain__os_share_open((long)process, (int)fd, dtrain__shm_bytes(*ring_bytes), 0);
    if (page != NULL && memcmp(page->key, offer + 16, sizeof page->key) != 0)
        dtrain__shm_close(&page, *ring_bytes);
    return page;
}

/* Wakes the peer if it sleeps. A full connection holds bytes that wake it. */
static void dtrain__shm_wake(dtrain__shm *shm, int fd)
{
    uint32_t *asleep = &shm->page->asleep[1 - shm->side];
    if (DTRAIN__ATOMIC_LOAD(asleep, SEQ_CST) != 0 && DTRAIN__ATOMIC_EXCHANGE(asleep, 0u, SEQ_CST) != 0)
        dtrain__os_send(fd, "", 1, 0);
}

/* Where the bytes of the ring that a side fills are. */
static unsigned char *dtrain__shm_ring(const dtrain__shm *shm, int side)
{
    return (unsigned char *)(shm->page + 1) + (size_t)side * shm->ring_bytes;
}

/* Returns the bytes in the ring that a side fills. */
static uint64_t dtrain__shm_held(const dtrain__shm *shm, int side)
{
    return dtrain__ring_held(&shm->page->ways[side]);
}

/* Looks at the connection after nothing could be moved. Returns 0, or -1 with errno if the connection has ended or the
 * memory holds what no peer of ours writes. */
static ssize_t dtrain__shm_look(dtrain__shm *shm, int fd, int side)
{
    unsigned char waste[64];
    ssize_t n = sizeof waste;
    if (dtrain__shm_held(shm, side) > shm->ring_bytes) {
        errno = ERANGE;
        return -1;
    }
    while (shm->look && n == (ssize_t)sizeof waste)
        n = dtrain__os_recv(fd, waste, sizeof waste);
    shm->look = n < 0; /* an end is found again */
    return n < 0 ? -1 : 0;
}

/* Sends through the ring, otherwise as dtrain__net_send. */
static ssize_t dtrain__shm_send(dtrain__shm *shm, int fd, const void *data, size_t bytes)
{
    unsigned char *from;
    memcpy(&from, &data, sizeof data); /* casts const away; sending only reads */
    size_t n = dtrain__ring_move(&shm->page->ways[shm->side], dtrain__shm_ring(shm, shm->side), shm->ring_bytes, 1,
                                 from, bytes);
    if (n == 0)
        return dtrain__shm_look(shm, fd, shm->side);
    dtrain__shm_wake(shm, fd);
    return (ssize_t)n;
}

/* Receives from the ring, otherwise as dtrain__net_recv. What a peer sent before it left is still received. */
static ssize_t dtrain__shm_recv(dtrain__shm *shm, int fd, void *data, size_t bytes)
{
    dtrain__ring *ring = &shm->page->ways[1 - shm->side];
    unsigned char *held = dtrain__shm_ring(shm, 1 - shm->side);
    size_t n = dtrain__ring_move(ring, held, shm->ring_bytes, 0, (unsigned char *)data, bytes);
    if (n == 0 && dtrain__shm_look(shm, fd, 1 - shm->side) < 0) {
        int error = errno;
        n = dtrain__ring_move(ring, held, shm->ring_bytes, 0, (unsigned char *)data, bytes);
        errno = error;
        if (n == 0)
            return -1;
    }
    if (n > 0)
        dtrain__shm_wake(shm, fd);
    return (ssize_t)n;
}

/* Says that this side is about to sleep on the connection. Returns 1 if there is something to move after all. */
static int dtrain__shm_arm(dtrain__shm *shm, int sending)
{
    int side = sending ? shm->side : 1 - shm->side;
    shm->look = 1;
    DTRAIN__ATOMIC_STORE(&shm->page->asleep[shm->side], 1u, SEQ_CST);
    uint64_t held = dtrain__shm_held(shm, side);
    return sending ? held != shm->ring_bytes : held != 0;
}

DTRAIN__FAST_END
#endif
