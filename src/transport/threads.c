/* ---- >>threads ----
 * Ranks of one address space. A board holds one slot a rank, on which the rank posts what it is about
 * to do, and lazily one ring of bytes for each ordered pair that exchanges messages. All waiting is on
 * the board's one bell: whoever changes something that a peer may wait for rings it. The boards of a world
 * and of the groups that come of it are a family, which owns their allocator, their store and their service
 * thread, and lives as long as one of them.
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
    uint64_t check __attribute__((aligned(DTRAIN__CACHE_LINE))); /* of call: where it fits, peers read no other line */
    unsigned char data[DTRAIN__POST_INLINE_BYTES];               /* small inputs */
} dtrain__post;

/* How far a rank's device is with its peers' memory: see >>device_events. */
typedef struct dtrain__device_word {
    uint64_t turn;   /* calls in which the device has been given all that it has to do */
    uint32_t inside; /* 2: it may be in there; 1: this rank may yet name its peers' events; 0: neither */
} dtrain__device_word;

typedef struct dtrain__slot {
    uint64_t arrived;  /* 2 x turn of the posted operation, + 1 when it was withdrawn at its deadline */
    uint64_t finished; /* turn of the last operation whose buffers this rank has left */
    uint32_t inside;
    uint32_t left; /* set when the rank's end is destroyed, or its thread has given up */
    int origin;    /* the rank in the family's first board */
    int vote_kind; /* of its last vote; guarded, as the next three, by the family's mutex */
    uint64_t voted, vote_flags;
    uint64_t goes_on; /* number of the last decision that this rank is part of */
    char pad[DTRAIN__CACHE_LINE - 56];
    dtrain__error why;      /* it left; readable once left is set */
    void *recorder;         /* the rank's, which peers read until the board is freed */
    size_t recorder_bytes;  /* 0: none */
    dtrain__device_word device;
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

typedef struct dtrain__family {
    pthread_mutex_t mutex; /* guards boards, their ends, serial, service and store */
    dtrain__board *boards;
    uint64_t serial;   /* counts the groups that were begun */
    dtrain__bell bell; /* the service thread's; rung with that of every board */
    dtrain_allocator own;
    dtrain_allocator *allocator;
    void *service;
    void (*last_gone)(void *service); /* stops the service before the family is freed */
    dtrain__store store;
} dtrain__family;

struct dtrain__board {
    dtrain__bell bell;
    uint32_t broken; /* 0 whole, 1 the cause is being written, 2 broken, cause readable */
    int ends;        /* ranks that have come and not left */
    int size;
    uint64_t id;        /* its name in the family; the first one's is 0 */
    uint64_t withdrawn; /* posts taken back, or tried to; 2 each, odd while a rank is at it */
    dtrain__error cause;
    dtrain__family *family;
    dtrain__board *next;
    dtrain_allocator *allocator; /* the family's */
    int *mates; /* ranks of the family whose end with an error breaks it, members or not; NULL: none but members */
    int mate_count;
    dtrain__slot *slots;
    dtrain__ring **rings; /* size x size, [from * size + to]; made by the sender */
    dtrain__board_end *board_ends;
    uint64_t decided, decided_flags, decided_id; /* what its ranks last agreed on; guarded by the family's mutex */
    int decided_mixed;                           /* they called different things */
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
    dtrain_allocator *allocator = board->allocator;
    if (board->rings != NULL)
        for (size_t i = 0; i < size * size; i++)
            dtrain__free(allocator, board->rings[i], sizeof(dtrain__ring));
    for (size_t rank = 0; board->slots != NULL && rank < size; rank++)
        dtrain__free(allocator, board->slots[rank].recorder, board->slots[rank].recorder_bytes);
    dtrain__free(allocator, board->rings, size * size * sizeof(dtrain__ring *));
    dtrain__free(allocator, board->mates, (size_t)board->mate_count * sizeof(int));
    dtrain__free(allocator, board->slots, size * sizeof(dtrain__slot));
    dtrain__free(allocator, board->board_ends, size * sizeof(dtrain__board_end));
    dtrain__free(allocator, board, sizeof *board);
}

static void dtrain__family_free(dtrain__family *family)
{
    dtrain_allocator own;
    if (family->last_gone != NULL)
        family->last_gone(family->service);
    dtrain__store_free(&family->store, family->allocator);
    pthread_mutex_destroy(&family->mutex);
    own = family->own;
    dtrain__free(family->allocator == &family->own ? &own : family->allocator, family, sizeof *family);
}

/* Says why a rank's end is about to leave, or that the thread behind it has given up. */
static void dtrain__board_mark(dtrain__board *board, int rank, const dtrain__error *why)
{
    dtrain__slot *slot = &board->slots[rank];
    if (!__atomic_load_n(&slot->left, __ATOMIC_SEQ_CST)) {
        if (why != NULL)
            slot->why = *why;
        __atomic_store_n(&slot->left, 1, __ATOMIC_SEQ_CST);
    }
    dtrain__bell_ring(&board->bell);
}

/* The thread behind a rank has given up without which the board's ranks cannot go on. */
static void dtrain__board_lost_mate(dtrain__board *board, int origin, const dtrain__error *why)
{
    dtrain__error lost, kept = dtrain__thread_error;
    dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d of the world, of another group of this mesh, has left%s%.400s",
                 origin, why != NULL && why->text[0] != 0 ? ": " : "", why != NULL ? why->text : "");
    dtrain__thread_error = kept;
    dtrain__board_break(board, &lost);
}

/* The rank's thread ends with an error: nobody shall wait for it in any group. */
static void dtrain__family_give_up(dtrain__board *of, int rank, const dtrain__error *why)
{
    dtrain__family *family = of->family;
    int origin = of->slots[rank].origin;
    pthread_mutex_lock(&family->mutex);
    for (dtrain__board *board = family->boards; board != NULL; board = board->next) {
        int member = 0;
        for (int other = 0; board != of && other < board->size; other++)
            if (board->slots[other].origin == origin) {
                dtrain__board_mark(board, other, why);
                member = 1;
            }
        for (int i = 0; !member && i < board->mate_count; i++)
            if (board->mates[i] == origin)
                dtrain__board_lost_mate(board, origin, why);
    }
    pthread_mutex_unlock(&family->mutex);
}

/* The rank's end leaves; the last of a board frees it, the last of a family the family. */
static void dtrain__board_detach(dtrain__board *board, int rank)
{
    dtrain__family *family = board->family;
    dtrain__board **at = &family->boards;
    int ends, last;
    pthread_mutex_lock(&family->mutex);
    dtrain__board_mark(board, rank, NULL);
    ends = --board->ends;
    while (ends == 0 && *at != board)
        at = &(*at)->next;
    if (ends == 0)
        *at = board->next;
    last = family->boards == NULL;
    pthread_mutex_unlock(&family->mutex);
    if (ends == 0)
        dtrain__board_free(board);
    if (last)
        dtrain__family_free(family);
}

static void dtrain__threads_destroy(void *self)
{
    dtrain__board_end *end = (dtrain__board_end *)self;
    dtrain__board_detach(end->board, end->rank);
}

/* A family without boards, for dtrain__board_attach. */
static dtrain__family *dtrain__family_create(dtrain_allocator *allocator)
{
    dtrain_allocator first = {NULL, NULL, 0, 0};
    dtrain__family *family = (dtrain__family *)dtrain__alloc(allocator != NULL ? allocator : &first, sizeof *family);
    if (family == NULL)
        return NULL;
    family->own = first;
    family->allocator = allocator != NULL ? allocator : &family->own;
    pthread_mutex_init(&family->mutex, NULL);
    return family;
}

/* Adds a board to the family; the caller holds its mutex. NULL when there is no memory. */
static dtrain__board *dtrain__board_make(dtrain__family *family, uint64_t id, const int *origins, int size)
{
    size_t ranks = (size_t)size;
    dtrain__board *board = (dtrain__board *)dtrain__alloc(family->allocator, sizeof *board);
    if (board == NULL)
        return NULL;
    board->family = family;
    board->allocator = family->allocator;
    board->id = id;
    board->size = size;
    board->bell.spins = size <= dtrain__os_processors() ? 100 : 0; /* some 5 us; other programs want to run too */
    board->bell.also = &family->bell;
    board->slots = (dtrain__slot *)dtrain__alloc(board->allocator, ranks * sizeof(dtrain__slot));
    board->rings = (dtrain__ring **)dtrain__alloc(board->allocator, ranks * ranks * sizeof(dtrain__ring *));
    board->board_ends = (dtrain__board_end *)dtrain__alloc(board->allocator, ranks * sizeof(dtrain__board_end));
    if (board->slots == NULL || board->rings == NULL || board->board_ends == NULL) {
        dtrain__board_free(board);
        return NULL;
    }
    for (int rank = 0; rank < size; rank++)
        board->slots[rank].origin = origins != NULL ? origins[rank] : rank;
    board->next = family->boards;
    family->boards = board;
    return board;
}

/* Comes to the board of that name, which the first to come makes; undone by dtrain__board_detach. */
static dtrain_status dtrain__board_attach(dtrain__board **out, dtrain__family *family, uint64_t id, const int *origins,
                                          int size)
{
    pthread_mutex_lock(&family->mutex);
    dtrain__board *board = family->boards;
    while (board != NULL && board->id != id)
        board = board->next;
    if (board == NULL)
        board = dtrain__board_make(family, id, origins, size);
    if (board != NULL)
        board->ends++;
    pthread_mutex_unlock(&family->mutex);
    *out = board;
    return board != NULL ? DTRAIN_OK : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", size);
}

/* Breaks the board whenever one of these ranks of the family ends with an error; 0: no memory. */
static int dtrain__board_bind(dtrain__board *board, const int *origins, int count)
{
    int bound;
    pthread_mutex_lock(&board->family->mutex);
    if (board->mates == NULL)
        board->mates = (int *)dtrain__alloc(board->allocator, (size_t)count * sizeof(int));
    bound = board->mates != NULL;
    if (bound && board->mate_count == 0) {
        memcpy(board->mates, origins, (size_t)count * sizeof(int));
        board->mate_count = count;
    }
    pthread_mutex_unlock(&board->family->mutex);
    return bound;
}

/* Makes a board to which `size` ranks have come, the first of its family. The transport of each is had from
 * dtrain__threads_transport. */
static dtrain_status dtrain__board_create(dtrain__board **out, int size, dtrain_allocator *allocator)
{
    dtrain__family *family = dtrain__family_create(allocator);
    dtrain_status status = DTRAIN_ERR_MEMORY;
    if (family == NULL)
        return dtrain__fail(NULL, status, "no memory for a group of %d ranks", size);
    status = dtrain__board_attach(out, family, 0, NULL, size);
    if (status == DTRAIN_OK)
        (*out)->ends = size;
    else
        dtrain__family_free(family);
    return status;
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
