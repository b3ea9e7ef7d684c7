/* ---- >>threads ----
 * Ranks of one address space. A board holds one slot a rank, on which the rank posts what it is about
 * to do, and lazily one ring of bytes for each ordered pair that exchanges messages. All waiting is on
 * the board's one bell: whoever changes something that a peer may wait for rings it.
 *
 * Invariants: a slot is written by its rank alone. A rank that reads a peer's buffers holds its `inside`
 * flag, which it raises before it looks at `broken`; a rank that fails raises `broken` before it looks at
 * the flags, and so takes its buffers back only when nobody is inside them. May call base only. */
#ifndef DTRAIN__THREADS
#define DTRAIN__THREADS
#include "../base/base.h"
#include "../base/os.c"
#include "../base/status.c"
#include "../base/memory.c"
#include "../base/wait.c"
#include "transport.h"
#include "store.c"

#define DTRAIN__POST_WORDS 13
#define DTRAIN__POST_INLINE_BYTES 1024
#define DTRAIN__RING_BYTES ((size_t)1 << 16)

/* What a rank posts for one collective; read by peers between its post and theirs two operations later. */
typedef struct dtrain__post {
    uint64_t call[DTRAIN__POST_WORDS]; /* the call's description, compared between ranks */
    const void *in;
    void *out;
    const size_t *counts, *offsets; /* of an uneven all-to-all: what the rank gives to each */
    unsigned char data[DTRAIN__POST_INLINE_BYTES] __attribute__((aligned(DTRAIN__CACHE_LINE))); /* small inputs */
} dtrain__post;

typedef struct dtrain__slot {
    uint64_t arrived;  /* 2 x turn of the posted operation, + 1 when it was withdrawn at its deadline */
    uint64_t finished; /* turn of the last operation whose buffers this rank has left */
    uint32_t inside;
    uint32_t left; /* set when the rank's end is destroyed */
    char pad[DTRAIN__CACHE_LINE - 24];
    dtrain__error why;     /* it left; readable once left is set */
    void *recorder;        /* the rank's, which peers read until the board is freed */
    size_t recorder_bytes; /* 0: none */
    dtrain__post posts[2] __attribute__((
        aligned(DTRAIN__CACHE_LINE))); /* by parity: a peer may still read turn s while s + 1 is posted */
} dtrain__slot;

typedef struct dtrain__ring {
    uint64_t written;
    char pad[DTRAIN__CACHE_LINE - 8];
    uint64_t read;
    char pad2[DTRAIN__CACHE_LINE - 8];
    unsigned char bytes[DTRAIN__RING_BYTES];
} dtrain__ring;

typedef struct dtrain__board_end {
    dtrain__board *board;
    int rank;
} dtrain__board_end;

struct dtrain__board {
    dtrain__bell bell;
    uint32_t broken; /* 0 whole, 1 the cause is being written, 2 broken, cause readable */
    uint32_t ends;   /* ranks that have not left */
    int size;
    dtrain__error cause;
    dtrain_allocator own;
    dtrain_allocator *allocator;
    dtrain__slot *slots;
    dtrain__ring **rings; /* size x size, [from * size + to]; made by the sender */
    dtrain__board_end *board_ends;
    void (*last_gone)(dtrain__board *board); /* stops the service before the board is freed */
    void *service;
    pthread_mutex_t mutex; /* guards the service's list of ranks, and the store */
    dtrain__store store;
};

static int dtrain__board_broken(dtrain__board *board)
{
    return __atomic_load_n(&board->broken, __ATOMIC_SEQ_CST) != 0;
}

/* The cause for whoever finds the board broken; the first one to break it wins. */
static const dtrain__error *dtrain__board_cause(dtrain__board *board)
{
    while (__atomic_load_n(&board->broken, __ATOMIC_ACQUIRE) != 2)
        sched_yield();
    return &board->cause;
}

static void dtrain__board_break(dtrain__board *board, const dtrain__error *cause)
{
    uint32_t whole = 0;
    if (__atomic_compare_exchange_n(&board->broken, &whole, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        board->cause = *cause;
        __atomic_store_n(&board->broken, 2, __ATOMIC_SEQ_CST);
    }
    dtrain__bell_ring(&board->bell);
}

/* Enters the peers' buffers; 0 when the board is broken and they may be gone. */
static int dtrain__board_enter(dtrain__board *board, int rank)
{
    __atomic_store_n(&board->slots[rank].inside, 1, __ATOMIC_SEQ_CST);
    if (!dtrain__board_broken(board))
        return 1;
    __atomic_store_n(&board->slots[rank].inside, 0, __ATOMIC_SEQ_CST);
    return 0;
}

static void dtrain__board_leave(dtrain__board *board, int rank)
{
    __atomic_store_n(&board->slots[rank].inside, 0, __ATOMIC_RELEASE);
}

/* Waits until no peer is inside this rank's buffers; the board is broken, so none enters again. */
static void dtrain__board_revoke(dtrain__board *board, int rank)
{
    for (int peer = 0; peer < board->size; peer++)
        while (peer != rank && __atomic_load_n(&board->slots[peer].inside, __ATOMIC_SEQ_CST))
            sched_yield();
}

static dtrain__ring *dtrain__threads_ring(dtrain__board *board, int from, int to)
{
    size_t index = (size_t)from * (size_t)board->size + (size_t)to;
    return __atomic_load_n(&board->rings[index], __ATOMIC_ACQUIRE);
}

static size_t dtrain__ring_put(dtrain__ring *ring, const unsigned char *data, size_t bytes)
{
    uint64_t written = ring->written, read = __atomic_load_n(&ring->read, __ATOMIC_SEQ_CST);
    size_t room = DTRAIN__RING_BYTES - (size_t)(written - read), n = bytes < room ? bytes : room;
    size_t at = (size_t)written % DTRAIN__RING_BYTES, first = DTRAIN__RING_BYTES - at;
    if (n == 0)
        return 0;
    first = first < n ? first : n;
    memcpy(ring->bytes + at, data, first);
    memcpy(ring->bytes, data + first, n - first);
    __atomic_store_n(&ring->written, written + n, __ATOMIC_SEQ_CST);
    return n;
}

static size_t dtrain__ring_take(dtrain__ring *ring, unsigned char *data, size_t bytes)
{
    uint64_t read = ring->read, written = __atomic_load_n(&ring->written, __ATOMIC_SEQ_CST);
    size_t held = (size_t)(written - read), n = bytes < held ? bytes : held;
    size_t at = (size_t)read % DTRAIN__RING_BYTES, first = DTRAIN__RING_BYTES - at;
    if (n == 0)
        return 0;
    first = first < n ? first : n;
    memcpy(data, ring->bytes + at, first);
    memcpy(data + first, ring->bytes, n - first);
    __atomic_store_n(&ring->read, read + n, __ATOMIC_SEQ_CST);
    return n;
}

/* Breaks the board because `peer` left before an operation that needs it. */
static dtrain_status dtrain__board_lost(dtrain__board *board, int peer)
{
    dtrain__error lost;
    const char *why = board->slots[peer].why.text;
    dtrain_status status = dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d has left the group%s%.400s", peer,
                                        why[0] != 0 ? ": " : "", why);
    dtrain__board_break(board, &lost);
    return status;
}

typedef struct dtrain__ring_wait {
    dtrain__board *board;
    int from, to, peer;
    int to_write;
} dtrain__ring_wait;

static int dtrain__ring_ready(void *pointer)
{
    dtrain__ring_wait *wait = (dtrain__ring_wait *)pointer;
    dtrain__ring *ring = dtrain__threads_ring(wait->board, wait->from, wait->to);
    if (dtrain__board_broken(wait->board) || __atomic_load_n(&wait->board->slots[wait->peer].left, __ATOMIC_SEQ_CST))
        return 1;
    if (ring == NULL)
        return 0;
    uint64_t held = __atomic_load_n(&ring->written, __ATOMIC_SEQ_CST) - __atomic_load_n(&ring->read, __ATOMIC_SEQ_CST);
    return wait->to_write ? held < DTRAIN__RING_BYTES : held > 0;
}

/* Moves bytes through one ring until all went, the deadline passed, or the peer left. What a peer wrote before
 * it left is still received. */
static dtrain_status dtrain__threads_move(dtrain__ring_wait *wait, unsigned char *out, const unsigned char *in,
                                          size_t bytes, int64_t deadline_ns, size_t *moved)
{
    dtrain__board *board = wait->board;
    *moved = 0;
    for (unsigned turn = 0;; turn++) {
        int left = (int)__atomic_load_n(&board->slots[wait->peer].left, __ATOMIC_SEQ_CST);
        dtrain__ring *ring = dtrain__threads_ring(board, wait->from, wait->to);
        size_t n = 0;
        if (ring != NULL && !(wait->to_write && left))
            n = wait->to_write ? dtrain__ring_put(ring, in + *moved, bytes - *moved)
                               : dtrain__ring_take(ring, out + *moved, bytes - *moved);
        *moved += n;
        if (n > 0) {
            dtrain__bell_ring(&board->bell);
            turn = 0;
        }
        if (*moved == bytes)
            return DTRAIN_OK;
        if (dtrain__board_broken(board))
            return dtrain__report(dtrain__board_cause(board));
        if (left && n == 0)
            return dtrain__board_lost(board, wait->peer);
        if (n == 0 && (deadline_ns == 0 || dtrain__os_now_ns() >= deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
        dtrain__bell_wait(&board->bell, turn, deadline_ns, dtrain__ring_ready, wait);
    }
}

static dtrain_status dtrain__threads_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__board_end *end = (dtrain__board_end *)self;
    dtrain__board *board = end->board;
    dtrain__ring_wait wait = {board, end->rank, peer, peer, 1};
    size_t index = (size_t)end->rank * (size_t)board->size + (size_t)peer;
    *moved = 0;
    if (board->rings[index] == NULL) {
        dtrain__ring *ring = (dtrain__ring *)dtrain__alloc(board->allocator, sizeof *ring);
        if (ring == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes of messages from rank %d to rank %d",
                                sizeof *ring, end->rank, peer);
        __atomic_store_n(&board->rings[index], ring, __ATOMIC_RELEASE);
    }
    return dtrain__threads_move(&wait, NULL, (const unsigned char *)data, bytes, deadline_ns, moved);
}

static dtrain_status dtrain__threads_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__board_end *end = (dtrain__board_end *)self;
    dtrain__ring_wait wait = {end->board, peer, end->rank, peer, 0};
    return dtrain__threads_move(&wait, (unsigned char *)data, NULL, bytes, deadline_ns, moved);
}

static void dtrain__board_free(dtrain__board *board)
{
    size_t size = (size_t)board->size;
    dtrain_allocator *allocator = board->allocator, own;
    if (board->rings != NULL)
        for (size_t i = 0; i < size * size; i++)
            dtrain__free(allocator, board->rings[i], sizeof(dtrain__ring));
    for (size_t rank = 0; board->slots != NULL && rank < size; rank++)
        dtrain__free(allocator, board->slots[rank].recorder, board->slots[rank].recorder_bytes);
    dtrain__store_free(&board->store, allocator);
    dtrain__free(allocator, board->rings, size * size * sizeof(dtrain__ring *));
    dtrain__free(allocator, board->slots, size * sizeof(dtrain__slot));
    dtrain__free(allocator, board->board_ends, size * sizeof(dtrain__board_end));
    pthread_mutex_destroy(&board->mutex);
    own = board->own;
    dtrain__free(allocator == &board->own ? &own : allocator, board, sizeof *board);
}

static void dtrain__threads_destroy(void *self)
{
    dtrain__board_end *end = (dtrain__board_end *)self;
    dtrain__board *board = end->board;
    __atomic_store_n(&board->slots[end->rank].left, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(&board->bell);
    if (__atomic_sub_fetch(&board->ends, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    if (board->last_gone != NULL)
        board->last_gone(board);
    dtrain__board_free(board);
}

/* Makes a board for `size` ranks; the transport of each is had from dtrain__threads_transport. */
static dtrain_status dtrain__board_create(dtrain__board **out, int size, dtrain_allocator *allocator)
{
    size_t ranks = (size_t)size;
    dtrain_allocator first = {NULL, NULL, 0, 0};
    dtrain__board *board = (dtrain__board *)dtrain__alloc(allocator != NULL ? allocator : &first, sizeof *board);
    if (board == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", size);
    board->own = first;
    board->allocator = allocator != NULL ? allocator : &board->own;
    board->size = size;
    board->ends = (uint32_t)size;
    board->bell.spins = size <= dtrain__os_processors() ? 100 : 0; /* some 5 us; other programs want to run too */
    pthread_mutex_init(&board->mutex, NULL);
    board->slots = (dtrain__slot *)dtrain__alloc(board->allocator, ranks * sizeof(dtrain__slot));
    board->rings = (dtrain__ring **)dtrain__alloc(board->allocator, ranks * ranks * sizeof(dtrain__ring *));
    board->board_ends = (dtrain__board_end *)dtrain__alloc(board->allocator, ranks * sizeof(dtrain__board_end));
    if (board->slots == NULL || board->rings == NULL || board->board_ends == NULL) {
        dtrain__board_free(board);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", size);
    }
    *out = board;
    return DTRAIN_OK;
}

static void dtrain__threads_transport(dtrain_transport *transport, dtrain__board *board, int rank)
{
    memset(transport, 0, sizeof *transport);
    board->board_ends[rank].board = board;
    board->board_ends[rank].rank = rank;
    transport->self = &board->board_ends[rank];
    transport->rank = rank;
    transport->size = board->size;
    transport->send = dtrain__threads_send;
    transport->recv = dtrain__threads_recv;
    transport->destroy = dtrain__threads_destroy;
    transport->board = board;
}

#endif
