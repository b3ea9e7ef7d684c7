/* ---- >>faults ----
 * What the library knows of a fault of memory, for DTRAIN_DEBUG=1. FSDP's guards know memory that may not be used now.
 * Groups know the program's buffers that their operations use.
 *
 * A handler of faults prints one line of whoever knows the address first, and passes the fault on. It takes no lock and
 * calls only write(). It may read the lists of those who know at any time. So removing something from a list waits
 * until no handler reads. The first one who watches installs the handler, the last one removes it. */
#ifndef DTRAIN__FAULTS
#define DTRAIN__FAULTS
#include "os_files.c"

typedef struct dtrain__faults_line {
    char text[512];
    size_t bytes; /* 0: nothing is known of the address */
} dtrain__faults_line;

/* Writes a line about an address, if it knows the address. It runs in the handler. writes: 1: the access was a write,
 * 0: a read, -1: unknown. */
typedef void (*dtrain__faults_fn)(dtrain__faults_line *line, uintptr_t address, int writes);

enum { DTRAIN__FAULTS_GUARDS = 0, DTRAIN__FAULTS_GROUPS, DTRAIN__FAULTS_WATCHERS };

typedef struct dtrain__faults_state {
    dtrain__faults_fn watchers[DTRAIN__FAULTS_WATCHERS];
    uint32_t readers; /* handlers that read the lists */
    uint32_t owner;   /* the process that is changing a list; 0: none. A child may inherit it */
} dtrain__faults_state;

DTRAIN__OF_PROCESS(dtrain__faults_state, dtrain__faults)

/* Whether the environment asks for checks that help to find mistakes. */
static int dtrain__faults_asked(void)
{
    const char *text = dtrain__os_getenv("DTRAIN_DEBUG");
    return text != NULL && text[0] != 0 && strcmp(text, "0") != 0;
}

/* ---- the line ---- */

static DTRAIN__NOINLINE void dtrain__faults_put(dtrain__faults_line *line, const char *text)
{
    for (; *text != 0 && line->bytes < sizeof line->text - 1; text++) /* a name may hold anything */
        line->text[line->bytes++] = (unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text;
}

static void dtrain__faults_put_digits(dtrain__faults_line *line, uint64_t number, unsigned base)
{
    char digits[24];
    size_t at = sizeof digits - 1;
    digits[at] = 0;
    do
        digits[--at] = "0123456789abcdef"[number % base];
    while ((number /= base) > 0);
    dtrain__faults_put(line, digits + at);
}

static void dtrain__faults_put_number(dtrain__faults_line *line, int number)
{
    dtrain__faults_put_digits(line, (uint64_t)number, 10);
}

/* ---- the handler ---- */

static void dtrain__faults_report(uintptr_t address, int writes)
{
    dtrain__faults_line line;
    line.bytes = 0;
    DTRAIN__ATOMIC_ADD(&dtrain__faults()->readers, 1, SEQ_CST);
    for (int i = 0; i < DTRAIN__FAULTS_WATCHERS && line.bytes == 0; i++) {
        dtrain__faults_fn watcher = DTRAIN__ATOMIC_LOAD(&dtrain__faults()->watchers[i], SEQ_CST);
        if (watcher != NULL)
            watcher(&line, address, writes);
    }
    DTRAIN__ATOMIC_SUB(&dtrain__faults()->readers, 1, SEQ_CST);
    if (line.bytes > 0) {
        line.text[line.bytes++] = '\n';
        ssize_t ignored = dtrain__os_write(2, line.text, line.bytes);
        (void)ignored;
    }
}

/* ---- the lists ---- */

/* Guards all lists. */
static void dtrain__faults_lock(void)
{
    uint32_t mine = (uint32_t)dtrain__os_self(), owner = 0;
    while (!DTRAIN__ATOMIC_COMPARE_EXCHANGE(&dtrain__faults()->owner, &owner, mine, SEQ_CST)) {
        if (owner == mine) { /* else the parent was changing a list when it forked this process */
            dtrain__os_yield();
            owner = 0;
        }
    }
}

static void dtrain__faults_unlock(void)
{
    DTRAIN__ATOMIC_STORE(&dtrain__faults()->owner, 0u, SEQ_CST);
}

/* Begins to ask one who knows, or ends that (NULL). Calls may repeat. The caller holds the lock. */
static void dtrain__faults_watch(int who, dtrain__faults_fn watcher)
{
    int watched = 0;
    DTRAIN__ATOMIC_STORE(&dtrain__faults()->watchers[who], watcher, SEQ_CST);
    for (int i = 0; i < DTRAIN__FAULTS_WATCHERS; i++)
        watched |= dtrain__faults()->watchers[i] != NULL;
    if (watched)
        dtrain__os_watch_faults(dtrain__faults_report);
    else
        dtrain__os_unwatch_faults();
}

/* Waits until no handler reads what was removed from a list. A handler takes little time. Or it ran in the parent, and
 * its count will never fall. */
static void dtrain__faults_settle(void)
{
    int64_t until_ns = dtrain__os_now_ns() + 1000000000;
    while (DTRAIN__ATOMIC_LOAD(&dtrain__faults()->readers, SEQ_CST) != 0 && dtrain__os_now_ns() < until_ns)
        dtrain__os_yield();
}

#endif
