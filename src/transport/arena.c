/* ---- >>arena ----
 * Memory in which the ranks of a group post their collectives (see >>fused), if all are processes of one host that can
 * open each other's files. Rank 0 makes it. Every rank offers its doorbell, a pipe: a peer writes to it to wake a rank
 * that sleeps. The group's first collective carries the offers, and then what each rank found (see >>meet).
 *
 * Invariants: a rank writes only its own slot, except that a peer clears `asleep`. Whatever a peer may write there, it
 * is compared or copied, never followed. A rank that is killed holds no lock that outlives it: its loss breaks the
 * group, and whoever waits looks for that. */
#ifndef DTRAIN__ARENA
#define DTRAIN__ARENA
#include "../control/council.c"
#include "shared.c"

#define DTRAIN__ARENA_RANKS 64                    /* each has a descriptor for the doorbell of each other one */
#define DTRAIN__ARENA_INLINE_BYTES ((size_t)4096) /* more is faster through the ranks' cells */
#define DTRAIN__ARENA_BOUNCE_BYTES DTRAIN__TUNED(bounce_bytes, (size_t)1 << 20) /* of all ranks, for one round */
#define DTRAIN__ARENA_SKEW ((size_t)17 * DTRAIN__CACHE_LINE) /* so that no two buffers share all sets of a cache */
#define DTRAIN__ARENA_KEY_BYTES 16
#define DTRAIN__ARENA_PIECE ((size_t)1 << 16) /* prepared at once: tens of microseconds */

/* Where the fields of an offer are. */
enum {
    DTRAIN__OFFER_PROCESS = 0,
    DTRAIN__OFFER_DOORBELL = 8, /* a descriptor of that process */
    DTRAIN__OFFER_MEMORY = 12,  /* the same; rank 0's counts */
    DTRAIN__OFFER_PIPE = 16,    /* the doorbell's number */
    DTRAIN__OFFER_KEY = 24,     /* what the memory begins with */
    DTRAIN__OFFER_MADE = 40     /* 1: this rank takes part */
};

typedef struct dtrain__arena {
    dtrain__shared shared;
    unsigned char *memory; /* the key; the slots from the next cache line on; then bounce buffers */
    size_t bytes;
    size_t filled; /* on rank 0: bytes that have their pages */
    size_t mapped; /* of this rank's bounce buffers: bytes whose pages it has looked up */
    int polls;     /* this rank makes it in small steps, as its caller has little time */
    int fd;        /* of the memory, on rank 0 until all have opened it; -1: none */
    int size, *doorbells;
    dtrain_allocator *allocator;
} dtrain__arena;

static void dtrain__arena_close(dtrain__arena *arena)
{
    if (arena->fd >= 0)
        dtrain__os_share_close(arena->fd);
    arena->fd = -1;
}

static void dtrain__arena_free(dtrain__arena *arena)
{
    if (arena == NULL)
        return;
    dtrain__arena_close(arena);
    for (int rank = 0; arena->doorbells != NULL && rank < arena->size; rank++)
        if (arena->doorbells[rank] >= 0)
            dtrain__os_hang_up(arena->doorbells[rank]);
    if (arena->memory != NULL)
        dtrain__os_unreserve(arena->memory, arena->bytes);
    dtrain__free(arena->allocator, arena->doorbells);
    dtrain__free(arena->allocator, arena);
}

/* Makes an arena without memory to share. Returns NULL if there is none even for that. */
static dtrain__arena *dtrain__arena_new(const dtrain__seat *seat)
{
    size_t size = (size_t)seat->size;
    dtrain_allocator *allocator = seat->council->allocator;
    dtrain__arena *arena = (dtrain__arena *)dtrain__alloc(allocator, sizeof *arena);
    if (arena == NULL)
        return NULL;
    arena->fd = -1;
    arena->size = seat->size;
    arena->allocator = allocator;
    size_t bounce = DTRAIN__ARENA_BOUNCE_BYTES / size / 4096 * 4096;
    if (bounce < DTRAIN__ARENA_RANKS * DTRAIN__CACHE_LINE)
        bounce = DTRAIN__ARENA_RANKS * DTRAIN__CACHE_LINE; /* a line for each receiver, and any inline input */
    arena->shared.bounce_bytes = bounce;
    arena->shared.bounce_stride = bounce + DTRAIN__ARENA_SKEW;
    arena->bytes = DTRAIN__CACHE_LINE + size * (sizeof(dtrain__slot) + 2 * arena->shared.bounce_stride);
    arena->doorbells = (int *)dtrain__alloc(allocator, size * sizeof(int));
    if (arena->doorbells == NULL) {
        dtrain__arena_free(arena);
        return NULL;
    }
    for (size_t rank = 0; rank < size; rank++)
        arena->doorbells[rank] = -1;
    return arena;
}

/* Writes this rank's offer, which may be none. doorbell: what a peer writes to. polls: this rank has progress by poll.
 * Returns 0 if all ranks know that there will be no arena: none is exchanged then. */
static int dtrain__arena_offer(dtrain__arena **out, const dtrain__seat *seat, int doorbell, int polls,
                               unsigned char offer[DTRAIN__SHARING_BYTES])
{
    uint64_t pipe;
    memset(offer, 0, DTRAIN__SHARING_BYTES);
    if (seat->size < 2 || seat->size > DTRAIN__ARENA_RANKS)
        return 0;
    dtrain__arena_free(*out);
    *out = NULL;
    if (dtrain__without("shm") || !dtrain__os_pipe_number(doorbell, &pipe) || (*out = dtrain__arena_new(seat)) == NULL)
        return 1;
    dtrain__arena *arena = *out;
    arena->polls = polls;
    if (seat->rank == 0) {
        arena->memory = (unsigned char *)dtrain__os_share_as(arena->bytes, polls, &arena->fd);
        if (arena->memory == NULL || dtrain__os_random(arena->memory, DTRAIN__ARENA_KEY_BYTES) != 0)
            return 1;
        dtrain__put_le(offer + DTRAIN__OFFER_MEMORY, (uint64_t)arena->fd, 4);
        memcpy(offer + DTRAIN__OFFER_KEY, arena->memory, DTRAIN__ARENA_KEY_BYTES);
    }
    dtrain__put_le(offer + DTRAIN__OFFER_PROCESS, (uint64_t)dtrain__os_self(), 8);
    dtrain__put_le(offer + DTRAIN__OFFER_DOORBELL, (uint64_t)doorbell, 4);
    dtrain__put_le(offer + DTRAIN__OFFER_PIPE, pipe, 8);
    offer[DTRAIN__OFFER_MADE] = 1;
    return 1;
}

/* Gives the memory its pages, on rank 0. Without memory the offer is withdrawn. */
static void dtrain__arena_fill(dtrain__arena *arena, unsigned char *offer)
{
    size_t left = arena->bytes - arena->filled, piece = left < DTRAIN__ARENA_PIECE ? left : DTRAIN__ARENA_PIECE;
    if (dtrain__os_share_fill(arena->fd, arena->filled, piece) != 0) {
        memset(offer, 0, DTRAIN__SHARING_BYTES);
        piece = left;
    }
    arena->filled += piece;
}

/* Looks up the pages of this rank's bounce buffers, so that its first copy to them is as fast as the next. */
static void dtrain__arena_map(dtrain__arena *arena, const dtrain__seat *seat)
{
    size_t whole = 2 * arena->shared.bounce_stride, left = whole - arena->mapped;
    size_t piece = left < DTRAIN__ARENA_PIECE ? left : DTRAIN__ARENA_PIECE, page = dtrain__os_page_bytes();
    size_t at = DTRAIN__CACHE_LINE + (size_t)seat->size * sizeof(dtrain__slot) + (size_t)seat->rank * whole;
    size_t begin = (at + arena->mapped) / page * page;
    dtrain__os_populate(arena->memory + begin, at + arena->mapped + piece - begin);
    arena->mapped += piece;
}

/* Prepares memory for the others to open, or after that for this rank's use. With progress by poll it stops soon after
 * until_ns. Returns whether that is done. */
static int dtrain__arena_prepare(dtrain__arena *arena, const dtrain__seat *seat, int opened, unsigned char *offer,
                                 int64_t until_ns)
{
    if (arena == NULL || !arena->polls || arena->memory == NULL)
        return 1;
    for (;;) {
        if (opened ? arena->mapped == 2 * arena->shared.bounce_stride
                   : seat->rank != 0 || arena->filled == arena->bytes)
            return 1;
        if (opened)
            dtrain__arena_map(arena, seat);
        else
            dtrain__arena_fill(arena, offer);
        if (dtrain__os_now_ns() >= until_ns)
            return 0;
    }
}

/* Opens what all ranks have offered. Writes this rank's verdict over its offer: 1, or 0 and why not. */
static void dtrain__arena_open(dtrain__arena *arena, const dtrain__seat *seat, unsigned char *records)
{
    unsigned char *mine = records + (size_t)seat->rank * DTRAIN__SHARING_BYTES;
    char why[DTRAIN__SHARING_BYTES] = "";
    for (int rank = 0; rank < seat->size && why[0] == 0; rank++) {
        const unsigned char *offer = records + (size_t)rank * DTRAIN__SHARING_BYTES;
        long process = (long)dtrain__get_le(offer + DTRAIN__OFFER_PROCESS, 8);
        if (offer[DTRAIN__OFFER_MADE] != 1 || process <= 0 || process > INT_MAX || arena == NULL) {
            snprintf(why, sizeof why, "rank %d offers none", rank);
        } else if (rank == 0 && arena->memory == NULL) {
            arena->memory = (unsigned char *)dtrain__os_share_open(
                (long)process, (int)dtrain__get_le(offer + DTRAIN__OFFER_MEMORY, 4), arena->bytes, !arena->polls);
            if (arena->memory == NULL || memcmp(arena->memory, offer + DTRAIN__OFFER_KEY, DTRAIN__ARENA_KEY_BYTES) != 0)
                snprintf(why, sizeof why, "rank %d cannot open rank 0's memory", seat->rank);
        }
        if (rank == seat->rank || why[0] != 0)
            continue;
        arena->doorbells[rank] =
            dtrain__os_pipe_open((long)process, (int)dtrain__get_le(offer + DTRAIN__OFFER_DOORBELL, 4),
                                 dtrain__get_le(offer + DTRAIN__OFFER_PIPE, 8));
        if (arena->doorbells[rank] < 0)
            snprintf(why, sizeof why, "rank %d cannot open rank %d's pipe", seat->rank, rank);
    }
    memset(mine, 0, DTRAIN__SHARING_BYTES);
    mine[0] = why[0] == 0;
    memcpy(mine + 1, why, sizeof why - 1);
}

/* Takes the verdicts of all ranks. Returns the arena if all have opened it, else frees it and returns NULL. crowded:
 * the ranks of this host outnumber its processors. */
static dtrain__shared *dtrain__arena_keep(dtrain__arena **out, const dtrain__seat *seat, int crowded,
                                          const unsigned char *verdicts)
{
    dtrain__arena *arena = *out;
    int good = arena != NULL;
    for (int rank = 0; rank < seat->size; rank++)
        good = good && verdicts[(size_t)rank * DTRAIN__SHARING_BYTES] == 1;
    if (!good) {
        dtrain__arena_free(arena);
        *out = NULL;
        return NULL;
    }
    dtrain__arena_close(arena);
    arena->shared.members = seat->members;
    arena->shared.slots = (dtrain__slot *)(void *)(arena->memory + DTRAIN__CACHE_LINE);
    arena->shared.bounce = (unsigned char *)(arena->shared.slots + seat->size);
    arena->shared.inline_bytes = DTRAIN__ARENA_INLINE_BYTES;
    arena->shared.doorbells = arena->doorbells;
    arena->shared.crowded = crowded;
    return &arena->shared;
}

#endif
