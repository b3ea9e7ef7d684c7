/* ---- >>log ----
 * Log lines wait in a small buffer, and a thread gives them to the callback, or writes them to stderr. So whatever
 * blocks there holds no other thread: a pipe that nobody reads, a stopped terminal, a file system that hangs. The
 * thread lives only while there are lines.
 *
 * A thread that logs waits briefly for its line. So lines stay in order with what the program writes, and a crash loses
 * none. Once a line is late, no thread waits until all lines are written. Lines that find the buffer full are
 * counted. */
#ifndef DTRAIN__LOG
#define DTRAIN__LOG
#include "os_files.c"

#define DTRAIN__LOG_LINES 32
#define DTRAIN__LOG_WAIT_NS 100000000 /* far below any heartbeat_ms */
#define DTRAIN__LOG_EXIT_NS 500000000 /* what an exit waits for lines that are late */

typedef struct dtrain__log_line {
    dtrain_log_level level;
    char text[DTRAIN__ERROR_BYTES];
} dtrain__log_line;

typedef struct dtrain__log_state {
    dtrain_log_fn calling; /* what the thread has called now; NULL: nothing */
    uint64_t calls;        /* the number of that call */
    long process;          /* the process of the thread; a forked child starts with nothing */
    dtrain__os_thread thread;
    int started;                 /* the thread must be joined */
    uint32_t running;            /* the thread takes lines */
    uint32_t late;               /* a line was not written in time */
    uint64_t put, written, lost; /* lines; lost: since the thread has told */
    dtrain__log_line lines[DTRAIN__LOG_LINES];
} dtrain__log_state;

static void dtrain__log_stderr(void *user, dtrain_log_level level, const char *text);
static dtrain_log_fn dtrain__log_call = dtrain__log_stderr;
static void *dtrain__log_user;
static dtrain__log_state dtrain__log_now;
static dtrain__os_mutex dtrain__log_mutex = DTRAIN__OS_MUTEX;
static __thread int dtrain__log_inside; /* this thread writes lines */

/* Writes without the lock of stderr: exit() takes that, and would wait for a write that blocks. */
static void dtrain__log_stderr(void *user, dtrain_log_level level, const char *text)
{
    char line[DTRAIN__ERROR_BYTES + 16], *at = line;
    int bytes = snprintf(line, sizeof line, "dtrain: %s\n", text);
    (void)user;
    while (level >= DTRAIN_LOG_WARN && bytes > 0) {
        ssize_t n = dtrain__os_write(2, at, (size_t)bytes);
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return;
        if (n < 0)
            dtrain__os_sleep(10000000);
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (int)n : 0;
    }
}

/* Takes the mutex. In a forked child it makes it anew first: a thread of the parent may hold it. */
static void dtrain__log_lock(void)
{
    dtrain__log_state *log = &dtrain__log_now;
    long self = dtrain__os_pid(), before = __atomic_load_n(&log->process, __ATOMIC_ACQUIRE);
    if (before != self && before >= 0 &&
        __atomic_compare_exchange_n(&log->process, &before, -1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        dtrain__os_mutex_init(&dtrain__log_mutex);
        log->calling = NULL;
        log->started = 0;
        log->running = log->late = 0;
        dtrain__log_inside = 0;
        log->put = log->written = log->lost = 0;
        __atomic_store_n(&log->process, self, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(&log->process, __ATOMIC_ACQUIRE) != self)
        dtrain__os_yield();
    dtrain__os_lock(&dtrain__log_mutex);
}

/* Gives one line to the callback. The caller holds the mutex, which is free meanwhile. */
static void dtrain__log_give(const dtrain__log_line *line)
{
    dtrain__log_state *log = &dtrain__log_now;
    dtrain_log_fn call = log->calling = dtrain__log_call;
    void *user = dtrain__log_user;
    log->calls++;
    dtrain__os_unlock(&dtrain__log_mutex);
    if (call != NULL)
        call(user, line->level, line->text);
    dtrain__os_lock(&dtrain__log_mutex);
    log->calling = NULL;
}

static void dtrain__log_body(void *unused)
{
    dtrain__log_state *log = &dtrain__log_now;
    int inside = dtrain__log_inside;
    (void)unused;
    dtrain__log_inside = 1;
    dtrain__os_lock(&dtrain__log_mutex);
    while (log->written < log->put || log->lost > 0) {
        dtrain__log_line note;
        int is_line = log->written < log->put;
        if (!is_line) {
            note.level = DTRAIN_LOG_WARN;
            snprintf(note.text, sizeof note.text, "%llu lines are not shown: the log was blocked",
                     (unsigned long long)log->lost);
            log->lost = 0;
        }
        dtrain__log_give(is_line ? &log->lines[log->written % DTRAIN__LOG_LINES] : &note);
        if (is_line)
            __atomic_add_fetch(&log->written, 1, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&log->late, 0u, __ATOMIC_SEQ_CST);
    __atomic_store_n(&log->running, 0u, __ATOMIC_SEQ_CST);
    dtrain__os_unlock(&dtrain__log_mutex);
    dtrain__log_inside = inside;
}

/* Waits until `line` lines are written, for at most ns. Returns whether they are. */
static int dtrain__log_wait(uint64_t line, int64_t ns)
{
    const dtrain__log_state *log = &dtrain__log_now;
    int64_t until = dtrain__os_now_ns() + ns;
    for (int64_t span = 20000; __atomic_load_n(&log->written, __ATOMIC_SEQ_CST) < line; span *= 2) {
        if (dtrain__os_now_ns() >= until)
            return 0;
        dtrain__os_sleep(span < 2000000 ? span : 2000000);
        span = span < 2000000 ? span : 1000000;
    }
    return 1;
}

/* Waits for lines that are late, for at most ns, and for the end of the thread. */
static void dtrain__log_flush(int64_t ns)
{
    dtrain__log_state *log = &dtrain__log_now;
    dtrain__log_lock();
    uint64_t put = log->put;
    dtrain__os_unlock(&dtrain__log_mutex);
    if (dtrain__log_inside || !dtrain__log_wait(put, ns))
        return;
    for (int i = 0; i < 100 && __atomic_load_n(&log->running, __ATOMIC_SEQ_CST); i++)
        dtrain__os_sleep(1000000);
    dtrain__log_lock();
    if (log->started && !log->running) {
        dtrain__os_thread_join(&log->thread);
        log->started = 0;
    }
    dtrain__os_unlock(&dtrain__log_mutex);
}

static void dtrain__log_at_exit(void)
{
    dtrain__log_flush(DTRAIN__LOG_EXIT_NS);
}

/* Starts the thread. Without one, this thread writes the lines. */
static void dtrain__log_start(void)
{
    static int at_exit;
    dtrain__log_state *log = &dtrain__log_now;
    if (log->started)
        dtrain__os_thread_join(&log->thread);
    if (!at_exit)
        at_exit = atexit(dtrain__log_at_exit) == 0;
    log->running = 1;
    log->started = dtrain__os_thread_start(&log->thread, dtrain__log_body, NULL, (size_t)8 << 20) == 0;
    if (log->started)
        return;
    dtrain__os_unlock(&dtrain__log_mutex);
    dtrain__log_body(NULL);
    dtrain__os_lock(&dtrain__log_mutex);
}

DTRAIN__PRINTF(2, 3) static void dtrain__log(dtrain_log_level level, const char *format, ...)
{
    dtrain__log_state *log = &dtrain__log_now;
    int error = errno;
    va_list arguments;
    if (dtrain__log_call == NULL || (dtrain__log_call == dtrain__log_stderr && level < DTRAIN_LOG_WARN))
        return;
    dtrain__log_lock();
    int full = log->put - log->written == DTRAIN__LOG_LINES, waits = !full && !log->late && !dtrain__log_inside;
    if (full) {
        log->lost++;
    } else {
        dtrain__log_line *line = &log->lines[log->put % DTRAIN__LOG_LINES];
        line->level = level;
        va_start(arguments, format);
        vsnprintf(line->text, sizeof line->text, format, arguments);
        va_end(arguments);
        dtrain__status_clean(line->text);
        log->put++;
    }
    uint64_t mine = log->put;
    if (!log->running)
        dtrain__log_start();
    dtrain__os_unlock(&dtrain__log_mutex);
    if (waits && !dtrain__log_wait(mine, DTRAIN__LOG_WAIT_NS))
        __atomic_store_n(&log->late, 1u, __ATOMIC_SEQ_CST);
    errno = error;
}

DTRAIN_API void dtrain_set_log(dtrain_log_fn log, void *user)
{
    dtrain__log_state *now = &dtrain__log_now;
    dtrain__log_flush(DTRAIN__LOG_EXIT_NS);
    dtrain__log_lock();
    dtrain__log_call = log;
    dtrain__log_user = user;
    uint64_t last = now->calls;
    while (now->calls == last && now->calling != NULL && now->calling != dtrain__log_stderr && !dtrain__log_inside) {
        dtrain__os_unlock(&dtrain__log_mutex); /* the callback may use `user` of before */
        dtrain__os_sleep(1000000);
        dtrain__os_lock(&dtrain__log_mutex);
    }
    dtrain__os_unlock(&dtrain__log_mutex);
}

#endif
