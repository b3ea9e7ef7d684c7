/* ---- >>os ----
 * What differs between systems is in base/ alone. The modules of >>os posix and those of >>os windows define the same
 * functions, of which one set is compiled. This file has what both share. Errors are those of errno.
 *
 * Some features are not on every machine. The library tries them and has another way without each. The environment
 * variable DTRAIN_WITHOUT names features not to try, so tests can take the other ways on any machine.
 *
 * Waiting is on a 32-bit word: by a call of the system, or on a condition variable. A wake-up may be spurious, so
 * callers check again. */
#ifndef DTRAIN__OS
#define DTRAIN__OS
#include "base.h"
#include "status.c"

#define DTRAIN__CACHE_LINE 64

/* Atomic accesses of any integer or pointer. The last argument is the order: SEQ_CST, ACQUIRE, RELEASE, RELAXED. ADD
 * and SUB return the new value, the others the old one. COMPARE_EXCHANGE returns whether *at was *expected and is
 * `value` now; else it sets *expected. */
#define DTRAIN__ATOMIC_LOAD(at, order) __atomic_load_n(at, __ATOMIC_##order)
#define DTRAIN__ATOMIC_STORE(at, value, order) __atomic_store_n(at, value, __ATOMIC_##order)
#define DTRAIN__ATOMIC_ADD(at, value, order) __atomic_add_fetch(at, value, __ATOMIC_##order)
#define DTRAIN__ATOMIC_SUB(at, value, order) __atomic_sub_fetch(at, value, __ATOMIC_##order)
#define DTRAIN__ATOMIC_EXCHANGE(at, value, order) __atomic_exchange_n(at, value, __ATOMIC_##order)
#define DTRAIN__ATOMIC_FETCH_OR(at, value, order) __atomic_fetch_or(at, value, __ATOMIC_##order)
#define DTRAIN__ATOMIC_FETCH_AND(at, value, order) __atomic_fetch_and(at, value, __ATOMIC_##order)
#define DTRAIN__ATOMIC_COMPARE_EXCHANGE(at, expected, value, order) \
    __atomic_compare_exchange_n(at, expected, value, 0, __ATOMIC_##order, __ATOMIC_##order)
#define DTRAIN__ATOMIC_FENCE() __sync_synchronize()

#ifndef DTRAIN__TUNED
#define DTRAIN__TUNED(name, value) (value) /* a size or time that tests may set by its name */
#endif

/* Returns a variable of the environment, or NULL. */
static const char *dtrain__os_getenv(const char *name);

/* ---- features that not every machine has ---- */

#define DTRAIN__OS_WITHOUT_READ 0x80000000u /* the environment has been read */

static uint32_t dtrain__os_without_mask; /* bit i: row i of this table */
static const char *const dtrain__os_without_names[] = {"pkeys",    "avx512", "avx2",  "populate", "mremap", "pagemap",
                                                       "memfd",    "unix",   "ipv6",  "mprotect", "shm",    "huge",
                                                       "abstract", "bf16",   "futex", "proc"};

static size_t dtrain__os_without_find(const char *name, size_t bytes)
{
    size_t i = 0, count = sizeof dtrain__os_without_names / sizeof dtrain__os_without_names[0];
    while (i < count &&
           (strlen(dtrain__os_without_names[i]) != bytes || memcmp(dtrain__os_without_names[i], name, bytes) != 0))
        i++;
    return i;
}

static uint32_t dtrain__os_without_read(void)
{
    const char *text = dtrain__os_getenv("DTRAIN_WITHOUT");
    uint32_t mask = DTRAIN__OS_WITHOUT_READ;
    for (size_t bytes; text != NULL && *text != 0; text += bytes + (text[bytes] == ',')) {
        bytes = strcspn(text, ",");
        size_t i = dtrain__os_without_find(text, bytes);
        if (i < sizeof dtrain__os_without_names / sizeof dtrain__os_without_names[0])
            mask |= (uint32_t)1 << i;
        else if (bytes == 3 && memcmp(text, "all", 3) == 0)
            mask = UINT32_MAX;
        else
            dtrain__log(DTRAIN_LOG_WARN, "DTRAIN_WITHOUT: \"%.*s\" names nothing that can be left out: it is ignored",
                        (int)(bytes < 40 ? bytes : 40), text);
    }
    return mask;
}

/* Returns whether DTRAIN_WITHOUT names `what`, a thing that not every machine has. */
static int dtrain__without(const char *what)
{
    uint32_t mask = DTRAIN__ATOMIC_LOAD(&dtrain__os_without_mask, RELAXED);
    if (mask == 0) {
        mask = dtrain__os_without_read();
        DTRAIN__ATOMIC_STORE(&dtrain__os_without_mask, mask, RELAXED);
    }
    if (mask == DTRAIN__OS_WITHOUT_READ)
        return 0;
    return (mask >> dtrain__os_without_find(what, strlen(what)) & 1) != 0;
}

/* Converts a caller's milliseconds to nanoseconds, limited so that adding them to any time cannot overflow. */
static int64_t dtrain__os_ms_to_ns(int64_t ms)
{
    return ms < INT64_MAX / 4 / 1000000 ? ms * 1000000 : INT64_MAX / 4;
}

static void dtrain__os_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Receives the address of a fault, and whether it was a write: 1, 0, or -1 for unknown. */
typedef void (*dtrain__os_fault_fn)(uintptr_t address, int writes);

/* ---- files ---- */

#define DTRAIN__OS_PATH_BYTES 4096

/* How to open a file. A pipe without a writer does not block. A forked child's program does not inherit it. */
enum {
    DTRAIN__OS_READ = 0,
    DTRAIN__OS_WRITE = 1,
    DTRAIN__OS_READ_WRITE = 2,
    DTRAIN__OS_CREATE = 4,
    DTRAIN__OS_NEW = 8, /* makes the file; an error if it exists */
    DTRAIN__OS_DIRECTORY = 16,
    DTRAIN__OS_NO_LINK = 32 /* an error if the last part of the name is a link */
};

typedef enum dtrain__os_kind {
    DTRAIN__OS_IS_FILE = 1,
    DTRAIN__OS_IS_DIRECTORY,
    DTRAIN__OS_IS_LINK,
    DTRAIN__OS_IS_OTHER
} dtrain__os_kind;

typedef struct dtrain__os_facts {
    dtrain__os_kind kind;
    int removed;        /* it is open, and has no name any more */
    int open_to_others; /* than its owner, for reading or writing; 0 where the system does not say */
    uint64_t bytes;
    int64_t changed_s; /* when it changed last, since 1970 */
} dtrain__os_facts;

/* Ranks, some of them on this host. */
typedef struct dtrain__os_crowd {
    long (*process)(const void *group, int rank); /* -1: on another host; 0: not known, taken to be limited as we are */
    const void *group;
    int size;
} dtrain__os_crowd;

/* What to do with a lock of a range of a file. The first two are of the process, whichever descriptor it uses. The last
 * two are of the open file, where the system has such locks. */
typedef enum dtrain__os_locking {
    DTRAIN__OS_LOCK,
    DTRAIN__OS_LOOK,
    DTRAIN__OS_LOCK_OPEN,
    DTRAIN__OS_LOOK_OPEN
} dtrain__os_locking;

typedef enum dtrain__os_access {
    DTRAIN__OS_UNLOCKED,
    DTRAIN__OS_FOR_READING,
    DTRAIN__OS_FOR_WRITING
} dtrain__os_access;

typedef struct dtrain__os_range {
    dtrain__os_access access; /* of a look, also out: the lock that is in the way */
    int64_t begin, bytes;     /* bytes 0: all that follow */
    long process;             /* out, of a look */
} dtrain__os_range;

#endif
