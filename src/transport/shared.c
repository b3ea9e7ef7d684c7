/* ---- >>shared ----
 * What the ranks of a group share in memory: a slot for each rank, and what wakes those that wait.
 *
 * Invariants: only its own rank writes a slot. A rank sets its `inside` flag, then checks that the group is not broken,
 * and then reads a peer's buffers. A rank that fails breaks the group first and looks at the flags then. So it takes
 * its buffers back only when nobody is inside them. */
#ifndef DTRAIN__SHARED
#define DTRAIN__SHARED
#include "../base/worker.c"
#include "../control/plane.c"
#include "../wire/rings.c"
DTRAIN__FAST_BEGIN

typedef struct dtrain__shared {
    dtrain__bell bell; /* unused between processes */
    dtrain__membership *members;
    dtrain__slot *slots;   /* one for each rank */
    size_t inline_bytes;   /* up to here a rank's input lies in its post */
    unsigned char *bounce; /* between processes: two buffers for each rank, bounce_stride apart; small inputs, too */
    size_t bounce_bytes, bounce_stride;
    const int *doorbells; /* between processes: what wakes each rank */
    int crowded;          /* between processes: the ranks of the host outnumber its processors */
} dtrain__shared;

/* Wakes the ranks that wait for this one. */
static void dtrain__shared_ring(dtrain__shared *shared, int rank)
{
    if (shared->doorbells == NULL) {
        dtrain__bell_ring(&shared->bell);
        return;
    }
    for (int peer = 0; peer < shared->members->size; peer++) {
        uint32_t *asleep = &shared->slots[peer].asleep;
        if (peer != rank && DTRAIN__ATOMIC_LOAD(asleep, SEQ_CST) != 0 &&
            DTRAIN__ATOMIC_EXCHANGE(asleep, 0u, SEQ_CST) != 0)
            dtrain__os_poke(shared->doorbells[peer]);
    }
}

/* Whether a rank has closed its buffers. Between threads the broken group says so. */
static int dtrain__shared_closed(const dtrain__shared *shared)
{
    int closed = dtrain__membership_broken(shared->members);
    for (int rank = 0; shared->doorbells != NULL && rank < shared->members->size; rank++)
        closed |= DTRAIN__ATOMIC_LOAD(&shared->slots[rank].closed, SEQ_CST) != 0;
    return closed;
}

/* Enters the peers' buffers. Returns 0 if the group is broken, and they may be gone. */
static int dtrain__shared_enter(dtrain__shared *shared, int rank)
{
    DTRAIN__ATOMIC_STORE(&shared->slots[rank].inside, 1, SEQ_CST);
    if (!dtrain__shared_closed(shared))
        return 1;
    DTRAIN__ATOMIC_STORE(&shared->slots[rank].inside, 0, SEQ_CST);
    return 0;
}

static void dtrain__shared_leave(dtrain__shared *shared, int rank)
{
    DTRAIN__ATOMIC_STORE(&shared->slots[rank].inside, 0, RELEASE);
}

DTRAIN__FAST_END
#endif
