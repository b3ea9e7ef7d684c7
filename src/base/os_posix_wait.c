/* ---- >>os posix wait ----
 * Waiting for a 32-bit word of this process to change. Linux and OpenBSD have futex for it, FreeBSD _umtx_op, and macOS
 * from 14.4 on os_sync_wait_on_address. Where there is none, a thread sleeps a little. */
#ifndef DTRAIN__OS_POSIX_WAIT
#define DTRAIN__OS_POSIX_WAIT
#include "os_posix.c"
#ifndef _WIN32

#define DTRAIN__OS_NAP_NS 200000 /* where nothing wakes a thread that waits */

#ifdef __APPLE__
#define DTRAIN__OS_MACH_CLOCK 32u /* OS_CLOCK_MACH_ABSOLUTE_TIME: it stands while the machine sleeps */

typedef int (*dtrain__os_mac_wait)(void *word, uint64_t value, size_t bytes, uint32_t flags, uint32_t clock,
                                   uint64_t ns);
typedef int (*dtrain__os_mac_wake)(void *word, size_t bytes, uint32_t flags);

/* Finds a function of the system that its older versions lack; NULL: it is not there. An old SDK does not declare it.
 */
static void *dtrain__os_mac_find(const char *name)
{
    return dlsym((void *)(intptr_t)-2, name); /* RTLD_DEFAULT */
}
#endif

/* Sleeps while *word == value, for at most ns, by the system's call. Returns 0 if there is none. */
static int dtrain__os_wait_on(uint32_t *word, uint32_t value, int64_t ns)
{
#if defined(__linux__)
    long span[2] = {(long)(ns / 1000000000), (long)(ns % 1000000000)}; /* as the call has it; time_t may be wider */
    return syscall(__NR_futex, word, FUTEX_WAIT_PRIVATE, value, span, NULL, 0) == 0 || errno != ENOSYS;
#elif defined(__APPLE__)
    dtrain__os_mac_wait wait;
    void *found = dtrain__os_mac_find("os_sync_wait_on_address_with_timeout");
    memcpy(&wait, &found, sizeof wait);
    if (found != NULL && ns > 0)
        wait(word, value, sizeof *word, 0, DTRAIN__OS_MACH_CLOCK, (uint64_t)ns);
    return found != NULL;
#elif defined(__FreeBSD__)
    struct timespec span = dtrain__os_timespec(ns);
    _umtx_op(word, UMTX_OP_WAIT_UINT_PRIVATE, value, (void *)sizeof span, &span);
    return 1;
#elif defined(__OpenBSD__)
    struct timespec span = dtrain__os_timespec(ns);
    futex(word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, (int)value, &span, NULL);
    return 1;
#else
    (void)word;
    (void)value;
    (void)ns;
    return 0;
#endif
}

/* Sleeps while *word == value, for at most ns. It may return early. */
static void dtrain__os_wait_word(uint32_t *word, uint32_t value, int64_t ns)
{
    ns = ns < 3600000000000 ? ns : 3600000000000;
    if (dtrain__without("futex") || !dtrain__os_wait_on(word, value, ns))
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
            dtrain__os_sleep(ns < DTRAIN__OS_NAP_NS ? ns : DTRAIN__OS_NAP_NS);
}

/* Wakes the threads that wait for the word. */
static void dtrain__os_wake_word(uint32_t *word)
{
#if defined(__linux__)
    syscall(__NR_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#elif defined(__APPLE__)
    dtrain__os_mac_wake wake;
    void *found = dtrain__os_mac_find("os_sync_wake_by_address_all");
    memcpy(&wake, &found, sizeof wake);
    if (found != NULL)
        wake(word, sizeof *word, 0);
#elif defined(__FreeBSD__)
    _umtx_op(word, UMTX_OP_WAKE_PRIVATE, INT_MAX, NULL, NULL);
#elif defined(__OpenBSD__)
    futex(word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL);
#else
    (void)word;
#endif
}

#endif
#endif
