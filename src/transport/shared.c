/* ---- >>shared ----
 * What ranks that read each other's buffers in place share: one slot a rank, on which the rank posts what it is about
 * to do, and one bell, which whoever changes something that a peer may wait for rings. A transport that can publish
 * buffers so offers it to its groups, whose collectives are those of >>fused.
 *
 * Invariants: a slot is written by its rank alone. A rank that reads a peer's buffers holds its `inside` flag, which it
 * raises before it looks whether the group is broken; a rank that fails breaks the group before it looks at the flags,
 * and so takes its buffers back only when nobody is inside them. */
#ifndef DTRAIN__SHARED
#define DTRAIN__SHARED
#include "../base/worker.c"
#include "../control/membership.c"

#define DTRAIN__POST_WORDS 13
#define DTRAIN__POST_INLINE_BYTES 1024

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
    dtrain__device_word device __attribute__((aligned(DTRAIN__CACHE_LINE)));
    dtrain__post posts[2] __attribute__((
        aligned(DTRAIN__CACHE_LINE))); /* by parity: a peer may still read turn s while s + 1 is posted */
} dtrain__slot;

typedef struct dtrain__shared {
    dtrain__bell bell;
    uint64_t withdrawn; /* posts taken back, or tried to; 2 each, odd while a rank is at it */
    dtrain__membership members;
    dtrain__slot *slots; /* one for each rank */
} dtrain__shared;

/* Enters the peers' buffers; 0 when the group is broken and they may be gone. */
static int dtrain__shared_enter(dtrain__shared *shared, int rank)
{
    __atomic_store_n(&shared->slots[rank].inside, 1, __ATOMIC_SEQ_CST);
    if (!dtrain__membership_broken(&shared->members))
        return 1;
    __atomic_store_n(&shared->slots[rank].inside, 0, __ATOMIC_SEQ_CST);
    return 0;
}

static void dtrain__shared_leave(dtrain__shared *shared, int rank)
{
    __atomic_store_n(&shared->slots[rank].inside, 0, __ATOMIC_RELEASE);
}

/* Waits until no peer is inside this rank's buffers; the group is broken, so none enters again. */
static void dtrain__shared_revoke(dtrain__shared *shared, int rank)
{
    for (int peer = 0; peer < shared->members.size; peer++)
        while (peer != rank && __atomic_load_n(&shared->slots[peer].inside, __ATOMIC_SEQ_CST))
            sched_yield();
}

#endif
