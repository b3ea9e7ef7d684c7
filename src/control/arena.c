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
#include "channel.c"

#define DTRAIN__ARENA_RANKS 64 /* each has a descriptor for the doorbell of each other one */
#define DTRAIN__ARENA_INLINE_BYTES ((size_t)8192)
#define DTRAIN__ARENA_KEY_BYTES 16

/* Where the fields of an offer are. */
enum {
    DTRAIN__OFFER_PROCESS = 0,
    DTRAIN__OFFER_DOORBELL = 8, /* a descriptor of that process */
    DTRAIN__OFFER_MEMORY = 12,  /* the same; rank 0's counts */
    DTRAIN__OFFER_PIPE = 16,    /* the doorbell's inode */
    DTRAIN__OFFER_KEY = 24,     /* what the memory begins with */
    DTRAIN__OFFER_MADE = 40,    /* 1: this rank takes part */
    DTRAIN__OFFER_SECRET = 41,  /* 8 bytes of the process, and their address */
    DTRAIN__OFFER_SECRET_AT = 49
};

struct dtrain__arena {
    dtrain__shared shared;
    unsigned char *memory; /* the key; the slots from the next cache line on; then small inputs */
    size_t bytes;
    int fd; /* of the memory, on rank 0 until all have opened it; -1: none */
    int *doorbells;
    uint64_t secret;
    dtrain__shared_process *processes; /* one block with the doorbells */
    int peeks;                         /* this rank can read the memory of all others */
};

static void dtrain__arena_close(dtrain__arena *arena)
{
    if (arena->fd >= 0)
        close(arena->fd);
    arena->fd = -1;
}

static void dtrain__arena_free(dtrain__channel *channel)
{
    dtrain__arena *arena = channel->arena;
    channel->arena = NULL;
    if (arena == NULL)
        return;
    dtrain__arena_close(arena);
    for (int rank = 0; arena->doorbells != NULL && rank < channel->seat.size; rank++)
        if (arena->doorbells[rank] >= 0)
            close(arena->doorbells[rank]);
    if (arena->memory != NULL)
        dtrain__os_unreserve(arena->memory, arena->bytes);
    dtrain__free(channel->hub->allocator, arena->doorbells);
    dtrain__free(channel->hub->allocator, arena);
}

/* Makes an arena without memory to share. Returns 0 if there is none even for that. */
static int dtrain__arena_new(dtrain__channel *channel)
{
    size_t size = (size_t)channel->seat.size;
    dtrain_allocator *allocator = channel->hub->allocator;
    dtrain__arena *arena = channel->arena = (dtrain__arena *)dtrain__alloc(allocator, sizeof *arena);
    if (arena == NULL)
        return 0;
    arena->fd = -1;
    arena->bytes = DTRAIN__CACHE_LINE + size * (sizeof(dtrain__slot) + 2 * DTRAIN__ARENA_INLINE_BYTES);
    arena->doorbells = (int *)dtrain__alloc(allocator, size * (sizeof(int) + sizeof(dtrain__shared_process) + 8));
    for (size_t rank = 0; arena->doorbells != NULL && rank < size; rank++)
        arena->doorbells[rank] = -1;
    if (arena->doorbells == NULL)
        dtrain__arena_free(channel);
    else /* after the doorbells, at a multiple of 8 bytes */
        arena->processes = (dtrain__shared_process *)(void *)(arena->doorbells + (size + 1) / 2 * 2);
    return channel->arena != NULL;
}

/* Writes this rank's offer. Returns 0 if all ranks know that there will be no arena: none is exchanged then. */
static int dtrain__arena_offer(void *self, unsigned char offer[DTRAIN__SHARING_BYTES])
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__hub *hub = channel->hub;
    int size = channel->seat.size, good = !dtrain__without("shm");
    struct stat pipe;
    memset(offer, 0, DTRAIN__SHARING_BYTES);
    for (int rank = 0; rank < size; rank++) {
        if (hub->members[channel->seat.worlds[rank]].host != hub->members[hub->rank].host)
            return 0;
        good = good && dtrain__hub_shares(hub, channel->seat.worlds[rank]);
    }
    if (size < 2 || size > DTRAIN__ARENA_RANKS)
        return 0;
    dtrain__arena_free(channel);
    if (!good || fstat(channel->wake[1], &pipe) != 0 || !dtrain__arena_new(channel))
        return 1;
    dtrain__arena *arena = channel->arena;
    if (channel->seat.rank == 0) {
        arena->memory = (unsigned char *)dtrain__os_share(arena->bytes, &arena->fd);
        if (arena->memory == NULL || dtrain__os_random(arena->memory, DTRAIN__ARENA_KEY_BYTES) != 0)
            return 1;
        dtrain__put_le(offer + DTRAIN__OFFER_MEMORY, (uint64_t)arena->fd, 4);
        memcpy(offer + DTRAIN__OFFER_KEY, arena->memory, DTRAIN__ARENA_KEY_BYTES);
    }
    dtrain__put_le(offer + DTRAIN__OFFER_PROCESS, (uint64_t)getpid(), 8);
    dtrain__put_le(offer + DTRAIN__OFFER_DOORBELL, (uint64_t)channel->wake[1], 4);
    dtrain__put_le(offer + DTRAIN__OFFER_PIPE, (uint64_t)pipe.st_ino, 8);
    if (dtrain__os_random(&arena->secret, sizeof arena->secret) != 0)
        return 1;
    dtrain__put_le(offer + DTRAIN__OFFER_SECRET, arena->secret, 8);
    dtrain__put_le(offer + DTRAIN__OFFER_SECRET_AT, (uint64_t)(uintptr_t)&arena->secret, 8);
    offer[DTRAIN__OFFER_MADE] = 1;
    return 1;
}

/* Whether this rank can read the memory of the process of an offer. */
static int dtrain__arena_peeks(dtrain__shared_process *process, const unsigned char *offer)
{
    uint64_t seen = 0;
    process->process = (pid_t)dtrain__get_le(offer + DTRAIN__OFFER_PROCESS, 8);
    process->secret = dtrain__get_le(offer + DTRAIN__OFFER_SECRET, 8);
    process->secret_at = dtrain__get_le(offer + DTRAIN__OFFER_SECRET_AT, 8);
    return !dtrain__without("peek") && dtrain__os_peek(process->process, process->secret_at, &seen, sizeof seen) &&
           seen == process->secret;
}

/* Opens what all ranks have offered. Writes this rank's verdict over its offer: 1; 2 if it can also
 * read the memory of all others; or 0 and why not. */
static void dtrain__arena_open(void *self, unsigned char *records)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__arena *arena = channel->arena;
    unsigned char *mine = records + (size_t)channel->seat.rank * DTRAIN__SHARING_BYTES;
    char why[DTRAIN__SHARING_BYTES] = "";
    if (arena != NULL)
        arena->peeks = 1;
    for (int rank = 0; rank < channel->seat.size && why[0] == 0; rank++) {
        const unsigned char *offer = records + (size_t)rank * DTRAIN__SHARING_BYTES;
        long process = (long)dtrain__get_le(offer + DTRAIN__OFFER_PROCESS, 8);
        if (offer[DTRAIN__OFFER_MADE] != 1 || process <= 0 || process > INT_MAX || arena == NULL) {
            snprintf(why, sizeof why, "rank %d offers none", rank);
        } else if (rank == 0 && arena->memory == NULL) {
            arena->memory = (unsigned char *)dtrain__os_share_open(
                (pid_t)process, (int)dtrain__get_le(offer + DTRAIN__OFFER_MEMORY, 4), arena->bytes);
            if (arena->memory == NULL || memcmp(arena->memory, offer + DTRAIN__OFFER_KEY, DTRAIN__ARENA_KEY_BYTES) != 0)
                snprintf(why, sizeof why, "rank %d cannot open rank 0's memory", channel->seat.rank);
        }
        if (why[0] == 0)
            arena->peeks &= dtrain__arena_peeks(&arena->processes[rank], offer);
        if (rank == channel->seat.rank || why[0] != 0)
            continue;
        arena->doorbells[rank] =
            dtrain__net_pipe_open((pid_t)process, (int)dtrain__get_le(offer + DTRAIN__OFFER_DOORBELL, 4),
                                  dtrain__get_le(offer + DTRAIN__OFFER_PIPE, 8));
        if (arena->doorbells[rank] < 0)
            snprintf(why, sizeof why, "rank %d cannot open rank %d's pipe", channel->seat.rank, rank);
    }
    memset(mine, 0, DTRAIN__SHARING_BYTES);
    mine[0] = why[0] != 0 ? 0 : arena->peeks ? 2 : 1;
    memcpy(mine + 1, why, sizeof why - 1);
}

/* Takes the verdicts of all ranks. Returns the arena if all have opened it, else forgets it and returns NULL. */
static dtrain__shared *dtrain__arena_keep(void *self, const unsigned char *verdicts)
{
    dtrain__channel *channel = (dtrain__channel *)self;
    dtrain__arena *arena = channel->arena;
    int good = arena != NULL, peeks = 1;
    for (int rank = 0; rank < channel->seat.size; rank++) {
        int verdict = verdicts[(size_t)rank * DTRAIN__SHARING_BYTES];
        good = good && verdict > 0;
        peeks = peeks && verdict == 2;
    }
    if (!good) {
        dtrain__arena_free(channel);
        return NULL;
    }
    dtrain__arena_close(arena);
    arena->shared.members = channel->seat.members;
    arena->shared.slots = (dtrain__slot *)(void *)(arena->memory + DTRAIN__CACHE_LINE);
    arena->shared.inputs = (unsigned char *)(arena->shared.slots + channel->seat.size);
    arena->shared.inline_bytes = DTRAIN__ARENA_INLINE_BYTES;
    arena->shared.doorbells = arena->doorbells;
    arena->shared.processes = peeks ? arena->processes : NULL;
    arena->shared.crowded = channel->hub->crowded;
    return &arena->shared;
}

/* The service thread will sleep; the doorbell is to wake it. */
static void dtrain__arena_doze(void *self)
{
    __atomic_store_n(&((dtrain__channel *)self)->dozing, 1, __ATOMIC_SEQ_CST);
}

static const dtrain__sharing dtrain__arena_sharing = {dtrain__arena_offer, dtrain__arena_open, dtrain__arena_keep,
                                                      dtrain__arena_doze};

#endif
