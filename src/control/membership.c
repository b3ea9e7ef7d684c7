/* ---- >>membership ----
 * What is known of the ranks of a group: which of them have left, in which order, after how many collectives and why;
 * and what has broken the group. Every transport keeps one for each of its groups.
 *
 * Invariants: any thread breaks the group, and the first cause stays. Whoever keeps the membership marks one rank at a
 * time as left. Any thread reads without a lock: what is said of a rank is whole once its `left` is set. */
#ifndef DTRAIN__MEMBERSHIP
#define DTRAIN__MEMBERSHIP
#include "../base/memory.c"
#include "../base/os.c"
#include "../base/status.c"

typedef struct dtrain__departure {
    uint32_t left;  /* it is gone: 1 of the first rank to leave */
    uint64_t calls; /* collectives that it had ended by then */
    char *why;      /* NULL: all was well */
} dtrain__departure;

typedef struct dtrain__membership {
    uint32_t broken;  /* 0 whole, 1 the cause is being written, 2 broken, cause readable */
    uint32_t leavers; /* ranks that have left */
    int size;
    dtrain__departure *ranks; /* size of them; NULL where nobody tells who has left */
    dtrain__error cause;
} dtrain__membership;

/* Returns 0 when there is no memory. */
static int dtrain__membership_open(dtrain__membership *members, dtrain_allocator *allocator, int size)
{
    members->size = size;
    members->ranks = (dtrain__departure *)dtrain__alloc(allocator, (size_t)size * sizeof(dtrain__departure));
    return members->ranks != NULL;
}

static void dtrain__membership_free(dtrain__membership *members, dtrain_allocator *allocator)
{
    for (int rank = 0; members->ranks != NULL && rank < members->size; rank++)
        dtrain__free(allocator, members->ranks[rank].why);
    dtrain__free(allocator, members->ranks);
}

static int dtrain__membership_broken(const dtrain__membership *members)
{
    return __atomic_load_n(&members->broken, __ATOMIC_SEQ_CST) != 0;
}

/* What has broken the group; NULL: nothing. */
static DTRAIN__NOINLINE const dtrain__error *dtrain__membership_cause(const dtrain__membership *members)
{
    if (!dtrain__membership_broken(members))
        return NULL;
    while (__atomic_load_n(&members->broken, __ATOMIC_ACQUIRE) != 2)
        sched_yield();
    return &members->cause;
}

static DTRAIN__NOINLINE int dtrain__membership_left(const dtrain__membership *members, int rank)
{
    return __atomic_load_n(&members->leavers, __ATOMIC_SEQ_CST) > 0 &&
           __atomic_load_n(&members->ranks[rank].left, __ATOMIC_SEQ_CST) != 0;
}

static void dtrain__membership_leave(dtrain__membership *members, int rank)
{
    uint32_t turn = __atomic_add_fetch(&members->leavers, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&members->ranks[rank].left, turn, __ATOMIC_SEQ_CST);
}

/* Of the ranks that left before they came to collective `number` the first to leave; -1: none. Looks again where ranks
 * have left meanwhile: it may have seen one of them and not the one before. */
static int dtrain__membership_misses(const dtrain__membership *members, uint64_t number)
{
    uint32_t leavers, seen = 0;
    int missing = -1;
    while ((leavers = __atomic_load_n(&members->leavers, __ATOMIC_SEQ_CST)) != seen) {
        uint32_t first = UINT32_MAX;
        seen = leavers;
        missing = -1;
        for (int rank = 0; rank < members->size; rank++) {
            uint32_t left = __atomic_load_n(&members->ranks[rank].left, __ATOMIC_SEQ_CST);
            if (left == 0 || left >= first || members->ranks[rank].calls >= number)
                continue;
            first = left;
            missing = rank;
        }
    }
    return missing;
}

/* Writes what ends a group; the thread's own last error stays. */
__attribute__((format(printf, 3, 4))) static void dtrain__membership_because(dtrain__error *cause, dtrain_status status,
                                                                             const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    dtrain__error kept = dtrain__thread_error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__fail(cause, status, "%s", text);
    dtrain__thread_error = kept;
}

#endif
