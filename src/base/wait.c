/* ---- >>wait ----
 * Waiting for another thread: spin briefly, yield, then sleep. A bell is rung by whoever changes
 * something that others may wait for; it costs one load while nobody sleeps. A sleeper registers,
 * looks once more, and sleeps only if the bell has not rung since. */
#ifndef DTRAIN__WAIT
#define DTRAIN__WAIT
#include "os.c"

#define DTRAIN__WAIT_YIELDS 200u

typedef struct dtrain__bell {
    uint32_t rings; /* counts while somebody sleeps */
    uint32_t sleepers;
    uint32_t spins;            /* busy looks before yielding: none where threads outnumber processors */
    struct dtrain__bell *also; /* rung with it: of one who listens to many; NULL: none */
} dtrain__bell;

static void dtrain__bell_ring(dtrain__bell *bell)
{
    for (; bell != NULL; bell = bell->also)
        if (__atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST) > 0) {
            __atomic_add_fetch(&bell->rings, 1, __ATOMIC_SEQ_CST);
            dtrain__os_wake_word(&bell->rings);
        }
}

/* One turn of waiting, the turn'th since something last moved; sleeps for at most a tenth of a second. */
static void dtrain__bell_wait(dtrain__bell *bell, unsigned turn, int64_t deadline_ns, int (*ready)(void *),
                              void *context)
{
    if (turn < bell->spins) {
        dtrain__os_pause();
        return;
    }
    if (turn < bell->spins + DTRAIN__WAIT_YIELDS) {
        sched_yield();
        return;
    }
    int64_t now = dtrain__os_now_ns();
    int64_t span = deadline_ns > now ? deadline_ns - now : 0;
    if (span > 100000000)
        span = 100000000;
    __atomic_add_fetch(&bell->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t rings = __atomic_load_n(&bell->rings, __ATOMIC_SEQ_CST);
    if (span > 0 && !ready(context))
        dtrain__os_wait_word(&bell->rings, rings, span);
    __atomic_sub_fetch(&bell->sleepers, 1, __ATOMIC_SEQ_CST);
}

#endif
