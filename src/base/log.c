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
    dtrain__os_mutex mutex; /* made at its first use in each process, see log_lock */
    int chosen, at_exit;    /* the program has set a callback; exit() waits for late lines */
    dtrain_log_fn call;     /* the program's */
    void *user;
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

DTRAIN__OF_PROCESS(dtrain__log_state, dtrain__log_now)

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

static dtrain_log_fn dtrain__log_target(const dtrain__log_state *log)
{
    return log->chosen ? log->call : dtrain__log_stderr;
}

/* Takes the mutex. In a forked child it makes it anew first: a thread of the parent may hold it. */
static void dtrain__log_lock(void)
{
    dtrain__log_state *log = dtrain__log_now();
    long self = dtrain__os_pid(), before = DTRAIN__ATOMIC_LOAD(&log->process, ACQUIRE);
    if (before != self && before >= 0 && DTRAIN__ATOMIC_COMPARE_EXCHANGE(&log->process, &before, -1, SEQ_CST)) {
        dtrain__os_mutex_init(&log->mutex);
        log->calling = NULL;
        log->started = 0;
        log->running = log->late = 0;
        dtrain__thread_self()->logs = 0;
        log->put = log->written = log->lost = 0;
        DTRAIN__ATOMIC_STORE(&log->process, self, RELEASE);
    }
    while (DTRAIN__ATOMIC_LOAD(&log->process, ACQUIRE) != self)
        dtrain__os_yield();
    dtrain__os_lock(&log->mutex);
}

/* Gives one line to the callback. The caller holds the mutex, which is free meanwhile. */
static void dtrain__log_give(const dtrain__log_line *line)
{
    dtrain__log_state *log = dtrain__log_now();
    dtrain_log_fn call = log->calling = dtrain__log_target(log);
    void *user = log->user;
    log->calls++;
    dtrain__os_unlock(&log->mutex);
    if (call != NULL)
        call(user, line->level, line->text);
    dtrain__os_lock(&log->mutex);
    log->calling = NULL;
}

static void dtrain__log_body(void *unused)
{
    dtrain__log_state *log = dtrain__log_now();
    int inside = dtrain__thread_self()->logs;
    (void)unused;
    dtrain__thread_self()->logs = 1;
    dtrain__os_lock(&log->mutex);
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
            DTRAIN__ATOMIC_ADD(&log->written, 1, SEQ_CST);
    }
    DTRAIN__ATOMIC_STORE(&log->late, 0u, SEQ_CST);
    DTRAIN__ATOMIC_STORE(&log->running, 0u, SEQ_CST);
    dtrain__os_unlock(&log->mutex);
    dtrain__thread_self()->logs = inside;
}

/* Waits until `line` lines are written, for at most ns. Returns whether they are. */
static int dtrain__log_wait(uint64_t line, int64_t ns)
{
    const dtrain__log_state *log = dtrain__log_now();
    int64_t until = dtrain__os_now_ns() + ns;
    for (int64_t span = 20000; DTRAIN__ATOMIC_LOAD(&log->written, SEQ_CST) < line; span *= 2) {
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
    dtrain__log_state *log = dtrain__log_now();
    dtrain__log_lock();
    uint64_t put = log->put;
    dtrain__os_unlock(&log->mutex);
    if (dtrain__thread_self()->logs || !dtrain__log_wait(put, ns))
        return;
    for (int i = 0; i < 100 && DTRAIN__ATOMIC_LOAD(&log->running, SEQ_CST); i++)
        dtrain__os_sleep(1000000);
    dtrain__log_lock();
    if (log->started && !log->running) {
        dtrain__os_thread_join(&log->thread);
        log->started = 0;
    }
    dtrain__os_unlock(&log->mutex);
}

static void dtrain__log_at_exit(void)
{
    dtrain__log_flush(DTRAIN__LOG_EXIT_NS);
}

/* Starts the thread. Without one, this thread writes the lines. */
static void dtrain__log_start(void)
{
    dtrain__log_state *log = dtrain__log_now();
    if (log->started)
        dtrain__os_thread_join(&log->thread);
    if (!log->at_exit)
        log->at_exit = atexit(dtrain__log_at_exit) == 0;
    log->running = 1;
    log->started = dtrain__os_thread_start(&log->thread, dtrain__log_body, NULL, (size_t)8 << 20) == 0;
    if (log->started)
        return;
    dtrain__os_unlock(&log->mutex);
    dtrain__log_body(NULL);
    dtrain__os_lock(&log->mutex);
}

DTRAIN__PRINTF(2, 3) static void dtrain__log(dtrain_log_level level, const char *format, ...)
{
    dtrain__log_state *log = dtrain__log_now();
    int error = errno;
    va_list arguments;
    dtrain_log_fn target = dtrain__log_target(log);
    if (target == NULL || (target == dtrain__log_stderr && level < DTRAIN_LOG_WARN))
        return;
    dtrain__log_lock();
    int full = log->put - log->written == DTRAIN__LOG_LINES,
        waits = !full && !log->late && !dtrain__thread_self()->logs;
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
    dtrain__os_unlock(&log->mutex);
    if (waits && !dtrain__log_wait(mine, DTRAIN__LOG_WAIT_NS))
        DTRAIN__ATOMIC_STORE(&log->late, 1u, SEQ_CST);
    errno = error;
}

DTRAIN_API void dtrain_set_log(dtrain_log_fn call, void *user)
{
    dtrain__log_state *log = dtrain__log_now();
    dtrain__log_flush(DTRAIN__LOG_EXIT_NS);
    dtrain__log_lock();
    log->chosen = 1;
    log->call = call;
    log->user = user;
    uint64_t last = log->calls;
    while (log->calls == last && log->calling != NULL && log->calling != dtrain__log_stderr &&
           !dtrain__thread_self()->logs) {
        dtrain__os_unlock(&log->mutex); /* the callback may use `user` of before */
        dtrain__os_sleep(1000000);
        dtrain__os_lock(&log->mutex);
    }
    dtrain__os_unlock(&log->mutex);
}

#endif
