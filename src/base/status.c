/* ---- >>status ----
 * The start of the implementation: all system headers, so that none follows a DTRAIN__EXACT_BEGIN; then status names,
 * error texts. A program whose API is static uses only some of it. So gcc's warning of unused functions is
 * off up to >>end.
 *
 * dtrain__fail alone makes error texts. It formats one line into the object's error and into the calling thread's last
 * error, and returns the status: a failing function is one `return dtrain__fail(...)`. Errors and log lines are
 * printable UTF-8, whatever they quote of peers and files. */
#ifndef DTRAIN__STATUS
#define DTRAIN__STATUS
#include "base.h"

/* Terms of the implementation that the field has no common name for:
 *
 *   bell      a word that threads sleep on; a thread that changes what others may wait for rings it (an eventcount)
 *   end       one rank's share of a group
 *   plane     a table of a transport's functions beside moving bytes: its control plane
 *   origin    what all groups of one world share in this process, such as their service thread
 *   slot      where a rank posts its current call, for peers that read its buffers in place; see >>threads
 *   work      a call in the queue of its group; its caller may hold a handle of it
 *   hub       one process's control plane, if there are several; the leader's hub relays for the others
 *   channel   a group's share of a hub: a peer for each member, with lanes, which are the connections to it
 *   mux       shares a user's own transport between groups; a group's share of it is also called a lane; see >>mux
 *   council   keeps the store of a world and counts votes, in each process or for all threads; see >>council
 *   seat      a rank's end of one group at its council
 *   consent   a vote of the remaining ranks of a group, and its decision */

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

/* >>isa includes the headers of vector instructions. */
#include <errno.h>
#include <fcntl.h>
#include <fenv.h>
#include <float.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#ifdef _WIN32
#include <winsock2.h>
#include <ws2tcpip.h>
#include <windows.h>
/* these need the ones above */
#include <afunix.h>
#include <io.h>
#include <iptypes.h>
#include <malloc.h>
#include <ntsecapi.h>
#include <process.h>
#include <tlhelp32.h>
#else
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/select.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#endif
#if defined(DTRAIN_MPI_HEADER) && !defined(DTRAIN_NO_MPI)
#include DTRAIN_MPI_HEADER
#elif !defined(DTRAIN_NO_MPI) && !defined(_WIN32)
#include <dlfcn.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <dlfcn.h>
#elif defined(__FreeBSD__)
#include <sys/umtx.h>
#elif defined(__OpenBSD__)
#include <sys/futex.h>
#endif
#if defined(__APPLE__) || defined(__FreeBSD__) || defined(__NetBSD__) || defined(__OpenBSD__)
#define DTRAIN__OS_BSD
#include <sys/sysctl.h>
#endif

DTRAIN__UNIT_BEGIN

#define DTRAIN__ERROR_BYTES 640
#define DTRAIN__STATUS_CAUSE_BYTES 400 /* of those, for a quoted cause */

typedef struct dtrain__error {
    dtrain_status status;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__error;

/* What belongs to a process is declared by the first two of these, and what belongs to a thread by the third. name()
 * returns its address. Nothing above base/ has another variable that changes, so a system may have many processes in
 * one. All begin with zeros, and mutexes free. */
#define DTRAIN__OF_PROCESS(type, name) DTRAIN__OF(type, name, static type state)
#define DTRAIN__MUTEX_OF_PROCESS(name) \
    DTRAIN__OF(dtrain__os_mutex, name, static dtrain__os_mutex state = DTRAIN__OS_MUTEX)
#define DTRAIN__OF_THREAD(type, name) DTRAIN__OF(type, name, static __thread type state)
#define DTRAIN__OF(type, name, declaration) \
    static type *name(void) \
    { \
        declaration; \
        return &state; \
    }

typedef struct dtrain__thread {
    dtrain__error error; /* the last one */
    int logs;            /* it writes lines of the log */
} dtrain__thread;

/* A thread's address is also its name. */
DTRAIN__OF_THREAD(dtrain__thread, dtrain__thread_self)

#define dtrain__thread_error (dtrain__thread_self()->error)

/* Returns the length of the well-formed UTF-8 sequence that starts text, or 0. Source: Unicode 15, table 3-7. */
static size_t dtrain__utf8(const unsigned char *text, size_t length)
{
    int lead = length > 0 ? text[0] : 0xff, low = 0x80, high = 0xbf;
    size_t bytes = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (lead > 0xf4 || (lead >= 0x80 && lead <= 0xc1) || bytes > length)
        return 0;
    if (lead == 0xe0)
        low = 0xa0; /* below: overlong */
    else if (lead == 0xed)
        high = 0x9f; /* above: surrogates */
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f; /* above: beyond U+10FFFF */
    for (size_t i = 1; i < bytes; i++) {
        if (text[i] < low || text[i] > high)
            return 0;
        low = 0x80;
        high = 0xbf;
    }
    return bytes;
}

/* Replaces control characters and bytes that are not UTF-8 by '?', so that a quoted name can neither control a terminal
 * nor start a line. */
static void dtrain__status_clean(char *text)
{
    unsigned char *at = (unsigned char *)text;
    for (size_t left = strlen(text), step; left > 0; at += step, left -= step) {
        int good = (step = dtrain__utf8(at, left)) > 0 && *at >= 0x20 && *at != 0x7f && (*at != 0xc2 || at[1] >= 0xa0);
        step = step > 0 ? step : 1;
        if (!good)
            memset(at, '?', step);
    }
}

DTRAIN__PRINTF(2, 3) static void dtrain__log(dtrain_log_level level, const char *format, ...); /* of >>log */

/* Removes a repeated part: the second a of "a: a: why", and of "a on rank 1: a: why". Texts repeat a call's name when
 * they quote a cause from the same call. */
static void dtrain__status_once(char *text)
{
    for (char *part = text, *next; (next = strstr(part, ": ")) != NULL; part = next + 2) {
        char *again = next + 2, *end;
        while ((end = strstr(again, ": ")) != NULL) {
            size_t length = (size_t)(end - again), first = (size_t)(next - part);
            int same = length > 0 && length <= first && memcmp(part, again, length) == 0 &&
                       (length == first || strncmp(part + length, " on rank ", 9) == 0);
            if (!same)
                break;
            memmove(again, end + 2, strlen(end + 2) + 1);
        }
    }
}

/* Ends the text about a field of a desc that has an impossible value. */
#define DTRAIN__ZERO_FIRST "; a desc that is not zeroed first (= {0}) has such values in fields that were not set"

/* Formats a text into object, unless it is NULL, and into the thread's last error. The arguments may be either text. */
DTRAIN__PRINTF(3, 4)
static dtrain_status dtrain__fail(dtrain__error *object, dtrain_status status, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dtrain__status_clean(text);
    dtrain__status_once(text);
    dtrain__thread_error.status = status;
    memcpy(dtrain__thread_error.text, text, sizeof text);
    if (object != NULL)
        *object = dtrain__thread_error;
    return status;
}

/* Copies an error that is kept elsewhere to the calling thread's last error. */
static DTRAIN__NOINLINE dtrain_status dtrain__report(const dtrain__error *error)
{
    if (error->status != DTRAIN_OK)
        dtrain__thread_error = *error;
    return error->status;
}

/* Returns whether a number from another rank is a status. */
static int dtrain__status_known(uint64_t told)
{
    return told == DTRAIN_OK || (told >= DTRAIN_ERR_INVALID && told <= DTRAIN_ERR_ABORTED);
}

/* Returns the error status that another rank has sent; DTRAIN_ERR_CORRUPT if the number is not one. */
static dtrain_status dtrain__status_told(uint64_t told)
{
    return told != DTRAIN_OK && dtrain__status_known(told) ? (dtrain_status)told : DTRAIN_ERR_CORRUPT;
}

/* Returns the part of an error's text to quote in another: the whole, or the last parts of a text that is too long.
 * The cause stands last. */
static const char *dtrain__status_cause(const dtrain__error *error)
{
    const char *text = error->text, *next;
    while (strlen(text) > DTRAIN__STATUS_CAUSE_BYTES && (next = strstr(text, ": ")) != NULL)
        text = next + 2;
    return text;
}

DTRAIN_API const char *dtrain_last_error(void)
{
    return dtrain__thread_error.text;
}

DTRAIN_API dtrain_status dtrain_error_set(dtrain_status status, const char *format, ...)
{
    char text[DTRAIN__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return dtrain__fail(NULL, status, "%s", text);
}

DTRAIN_API void DTRAIN__TIE(void)
{
}

DTRAIN_API int dtrain_version(void)
{
    return DTRAIN_VERSION;
}

DTRAIN_API const char *dtrain_status_name(dtrain_status status)
{
    static const char *const names[] = {"ERR_INVALID",   "ERR_MEMORY",   "ERR_IO",      "ERR_TIMEOUT",
                                        "ERR_PEER_LOST", "ERR_MISMATCH", "ERR_CORRUPT", "ERR_UNSUPPORTED",
                                        "ERR_DENIED",    "ERR_ABORTED"};
    size_t index = (size_t)status - DTRAIN_ERR_INVALID;
    return status == DTRAIN_OK ? "OK" : index < sizeof names / sizeof names[0] ? names[index] : "not a dtrain_status";
}

#endif
