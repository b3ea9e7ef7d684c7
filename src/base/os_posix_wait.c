/* ---- >>os posix wait ----
 * Waiting on a 32-bit word between the threads of a process. Linux, FreeBSD, OpenBSD, and macOS from 14.4 on have a
 * call for that. Elsewhere threads wait on condition variables. A process uses one of the two ways for all words. */
#ifndef DTRAIN__OS_POSIX_WAIT
#define DTRAIN__OS_POSIX_WAIT
#include "os_posix.c"
#ifndef _WIN32

/* ---- the system's call ---- */

#if defined(__linux__)

/* Operations of linux/futex.h, which not every C library's headers bring; both are for one process's threads. */
enum { DTRAIN__OS_FUTEX_WAIT = 128, DTRAIN__OS_FUTEX_WAKE = 129 };

/* The seconds and nanoseconds of the call, whatever time_t is. x32 has those of x86-64. Of systems with 32 bits, the
 * newer ones have only the call whose time has 64. */
#if defined(__NR_futex) && !(defined(__x86_64__) && defined(__ILP32__))
#define DTRAIN__OS_FUTEX __NR_futex
typedef long dtrain__os_futex_time;
#else
#ifdef __NR_futex
#define DTRAIN__OS_FUTEX __NR_futex
#else
#define DTRAIN__OS_FUTEX __NR_futex_time64
#endif
typedef int64_t dtrain__os_futex_time;
#endif

/* A kernel for 32 bits can lack the older call, and a sandbox can refuse any. */
static int dtrain__os_futex_has(void)
{
    uint32_t word = 0;
    return syscall(DTRAIN__OS_FUTEX, &word, DTRAIN__OS_FUTEX_WAKE, 1, NULL, NULL, 0) == 0;
}

static void dtrain__os_futex_wait(uint32_t *word, uint32_t value, int64_t ns)
{
    dtrain__os_futex_time span[2] = {(dtrain__os_futex_time)(ns / 1000000000),
                                     (dtrain__os_futex_time)(ns % 1000000000)};
    syscall(DTRAIN__OS_FUTEX, word, DTRAIN__OS_FUTEX_WAIT, value, span, NULL, 0);
}

static void dtrain__os_futex_wake(uint32_t *word)
{
    syscall(DTRAIN__OS_FUTEX, word, DTRAIN__OS_FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

#elif defined(__FreeBSD__)

static int dtrain__os_futex_has(void)
{
    return 1;
}

static void dtrain__os_futex_wait(uint32_t *word, uint32_t value, int64_t ns)
{
    struct timespec span = dtrain__os_timespec(ns);
    _umtx_op(word, UMTX_OP_WAIT_UINT_PRIVATE, value, (void *)sizeof span, &span);
}

static void dtrain__os_futex_wake(uint32_t *word)
{
    _umtx_op(word, UMTX_OP_WAKE_PRIVATE, INT_MAX, NULL, NULL);
}

#elif defined(__OpenBSD__)

static int dtrain__os_futex_has(void)
{
    return 1;
}

static void dtrain__os_futex_wait(uint32_t *word, uint32_t value, int64_t ns)
{
    struct timespec span = dtrain__os_timespec(ns);
    futex(word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, (int)value, &span, NULL);
}

static void dtrain__os_futex_wake(uint32_t *word)
{
    futex(word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL);
}

#elif defined(__APPLE__)

#define DTRAIN__OS_MACH_CLOCK 32u /* OS_CLOCK_MACH_ABSOLUTE_TIME, which older headers lack */

static int (*dtrain__os_futex_wait_call)(void *word, uint64_t value, size_t bytes, uint32_t flags, uint32_t clock,
                                         uint64_t ns);
static int (*dtrain__os_futex_wake_call)(void *word, size_t bytes, uint32_t flags);

static int dtrain__os_futex_has(void)
{
    void *wait = dlsym(RTLD_DEFAULT, "os_sync_wait_on_address_with_timeout");
    void *wake = dlsym(RTLD_DEFAULT, "os_sync_wake_by_address_all");
    memcpy(&dtrain__os_futex_wait_call, &wait, sizeof wait);
    memcpy(&dtrain__os_futex_wake_call, &wake, sizeof wake);
    return wait != NULL && wake != NULL;
}

static void dtrain__os_futex_wait(uint32_t *word, uint32_t value, int64_t ns)
{
    dtrain__os_futex_wait_call(word, value, sizeof *word, 0, DTRAIN__OS_MACH_CLOCK, (uint64_t)ns);
}

static void dtrain__os_futex_wake(uint32_t *word)
{
    dtrain__os_futex_wake_call(word, sizeof *word, 0);
}

#else

static int dtrain__os_futex_has(void)
{
    return 0;
}

static void dtrain__os_futex_wait(uint32_t *word, uint32_t value, int64_t ns)
{
    (void)word;
    (void)value;
    (void)ns;
}

static void dtrain__os_futex_wake(uint32_t *word)
{
    (void)word;
}

#endif

/* ---- condition variables ---- */

/* Where threads sleep that wait for a word: those of several words may share a place, and look again. */
typedef struct dtrain__os_place {
    pthread_mutex_t mutex;
    pthread_cond_t woken;
} dtrain__os_place;

enum { DTRAIN__OS_PLACES = 64 };
static dtrain__os_place dtrain__os_places[DTRAIN__OS_PLACES];

/* Makes the places. A forked child makes them again: threads of its parent may have held the mutexes. */
static void dtrain__os_places_make(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#ifndef __APPLE__
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    for (int i = 0; i < DTRAIN__OS_PLACES; i++) {
        pthread_mutex_init(&dtrain__os_places[i].mutex, NULL);
        pthread_cond_init(&dtrain__os_places[i].woken, &attributes);
    }
    pthread_condattr_destroy(&attributes);
}

static dtrain__os_place *dtrain__os_place_of(const uint32_t *word)
{
    return &dtrain__os_places[(uintptr_t)word / DTRAIN__CACHE_LINE % DTRAIN__OS_PLACES];
}

static void dtrain__os_place_wait(const uint32_t *word, uint32_t value, int64_t ns)
{
    dtrain__os_place *place = dtrain__os_place_of(word);
#ifdef __APPLE__
    struct timespec span = dtrain__os_timespec(ns);
#else
    struct timespec until = dtrain__os_timespec(dtrain__os_now_ns() + ns);
#endif
    pthread_mutex_lock(&place->mutex);
    if (DTRAIN__ATOMIC_LOAD(word, SEQ_CST) == value)
#ifdef __APPLE__
        pthread_cond_timedwait_relative_np(&place->woken, &place->mutex, &span);
#else
        pthread_cond_timedwait(&place->woken, &place->mutex, &until);
#endif
    pthread_mutex_unlock(&place->mutex);
}

static void dtrain__os_place_wake(const uint32_t *word)
{
    dtrain__os_place *place = dtrain__os_place_of(word);
    pthread_mutex_lock(&place->mutex); /* else a thread between its look and its sleep would miss this */
    pthread_mutex_unlock(&place->mutex);
    pthread_cond_broadcast(&place->woken);
}

/* ---- the choice ---- */

static pthread_once_t dtrain__os_wait_once = PTHREAD_ONCE_INIT;
static int dtrain__os_wait_by_futex;

static void dtrain__os_wait_choose(void)
{
    dtrain__os_wait_by_futex = dtrain__os_futex_has() && !dtrain__without("futex");
    if (dtrain__os_wait_by_futex)
        return;
    dtrain__os_places_make();
    pthread_atfork(NULL, NULL, dtrain__os_places_make);
}

/* Sleeps while *word == value, for at most ns. It may return early. */
static void dtrain__os_wait_word(uint32_t *word, uint32_t value, int64_t ns)
{
    ns = ns < 3600000000000 ? ns : 3600000000000;
    pthread_once(&dtrain__os_wait_once, dtrain__os_wait_choose);
    if (dtrain__os_wait_by_futex)
        dtrain__os_futex_wait(word, value, ns);
    else
        dtrain__os_place_wait(word, value, ns);
}

static void dtrain__os_wake_word(uint32_t *word)
{
    pthread_once(&dtrain__os_wait_once, dtrain__os_wait_choose);
    if (dtrain__os_wait_by_futex)
        dtrain__os_futex_wake(word);
    else
        dtrain__os_place_wake(word);
}

#endif
#endif
