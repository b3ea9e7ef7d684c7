/* ---- >>os posix ----
 * What >>os asks of a POSIX system: threads, clock, memory, processes, and the signals of a fault. Threads that start
 * here block all signals except those of a fault, so the program's handlers run on the program's own threads. */
#ifndef DTRAIN__OS_POSIX
#define DTRAIN__OS_POSIX
#include "os.c"
#ifndef _WIN32

static const char *dtrain__os_getenv(const char *name)
{
    return getenv(name);
}

/* ---- time ---- */

static DTRAIN__NOINLINE int64_t dtrain__os_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Returns the time of day, in nanoseconds since 1970. */
static int64_t dtrain__os_wall_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static struct timespec dtrain__os_timespec(int64_t ns)
{
    struct timespec span;
    span.tv_sec = (time_t)(ns / 1000000000);
    span.tv_nsec = (long)(ns % 1000000000);
    return span;
}

/* Sleeps for about ns. A signal may end it early. */
static void dtrain__os_sleep(int64_t ns)
{
    struct timespec span = dtrain__os_timespec(ns);
    nanosleep(&span, NULL);
}

static void dtrain__os_yield(void)
{
    sched_yield();
}

/* ---- processes and threads ---- */

static long dtrain__os_self(void)
{
    return (long)getpid();
}

static long dtrain__os_parent(void)
{
    return (long)getppid();
}

static long dtrain__os_known_pid;     /* 0: unknown, as after a fork */
static uint32_t dtrain__os_pid_state; /* 0: nobody has asked; 2: a fork makes it unknown */

static void dtrain__os_forget_pid(void)
{
    DTRAIN__ATOMIC_STORE(&dtrain__os_known_pid, 0, RELAXED);
}

/* Returns this process, and a forked child itself, without a call of the system where one costs more than 100 ns. */
static long dtrain__os_pid(void)
{
    uint32_t nobody = 0;
    long pid = DTRAIN__ATOMIC_LOAD(&dtrain__os_known_pid, RELAXED);
    if (pid != 0)
        return pid;
    pid = dtrain__os_self();
#ifdef __linux__
    if (DTRAIN__ATOMIC_COMPARE_EXCHANGE(&dtrain__os_pid_state, &nobody, 1u, SEQ_CST) &&
        pthread_atfork(NULL, NULL, dtrain__os_forget_pid) == 0)
        DTRAIN__ATOMIC_STORE(&dtrain__os_pid_state, 2u, SEQ_CST);
    if (DTRAIN__ATOMIC_LOAD(&dtrain__os_pid_state, SEQ_CST) == 2)
        DTRAIN__ATOMIC_STORE(&dtrain__os_known_pid, pid, RELAXED);
#else
    (void)nobody;
    (void)dtrain__os_forget_pid;
#endif
    return pid;
}

#define DTRAIN__OS_MUTEX PTHREAD_MUTEX_INITIALIZER
typedef pthread_mutex_t dtrain__os_mutex;

static void dtrain__os_mutex_init(dtrain__os_mutex *mutex)
{
    pthread_mutex_init(mutex, NULL);
}

static void dtrain__os_mutex_free(dtrain__os_mutex *mutex)
{
    pthread_mutex_destroy(mutex);
}

static void dtrain__os_lock(dtrain__os_mutex *mutex)
{
    pthread_mutex_lock(mutex);
}

/* Returns whether the mutex was free and is now held. */
static int dtrain__os_try_lock(dtrain__os_mutex *mutex)
{
    return pthread_mutex_trylock(mutex) == 0;
}

static void dtrain__os_unlock(dtrain__os_mutex *mutex)
{
    pthread_mutex_unlock(mutex);
}

typedef struct dtrain__os_thread {
    pthread_t id;
    void (*body)(void *);
    void *argument;
} dtrain__os_thread;

static void *dtrain__os_thread_main(void *pointer)
{
    dtrain__os_thread *thread = (dtrain__os_thread *)pointer;
    thread->body(thread->argument);
    return NULL;
}

/* Starts body(argument). The struct must stay in place until the join. Returns 0 or an errno. */
static int dtrain__os_thread_start(dtrain__os_thread *thread, void (*body)(void *), void *argument, size_t stack_bytes)
{
    pthread_attr_t attributes;
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL}; /* if blocked, they end the process without a handler */
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    if (stack_bytes > 0)
        error = pthread_attr_setstacksize(&attributes, stack_bytes);
    if (error == 0) {
        thread->body = body;
        thread->argument = argument;
        sigfillset(&all);
        for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
            sigdelset(&all, faults[i]);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&thread->id, &attributes, dtrain__os_thread_main, thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    return error;
}

/* Lets a thread end by itself, instead of the join. */
static void dtrain__os_thread_leave(dtrain__os_thread *thread)
{
    pthread_detach(thread->id);
}

static void dtrain__os_thread_join(dtrain__os_thread *thread)
{
    pthread_join(thread->id, NULL);
}

/* ---- memory ---- */

/* Allocates a block; align is a power of two. Returns NULL without memory. */
static void *dtrain__os_alloc(size_t bytes, size_t align)
{
    void *block = NULL;
    return posix_memalign(&block, align, bytes) == 0 ? block : NULL;
}

static void dtrain__os_free(void *block)
{
    free(block);
}

/* Returns the size of a memory page. */
static DTRAIN__NOINLINE size_t dtrain__os_page_bytes(void)
{
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

/* Reserves a range of addresses in whole pages. They read as zeros, and a page takes memory when it is first written.
 * Returns NULL if the system refuses. */
static void *dtrain__os_reserve(size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANON;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void *range = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return range != MAP_FAILED ? range : NULL;
}

static void dtrain__os_unreserve(void *range, size_t bytes)
{
    munmap(range, bytes);
}

/* Returns the memory of whole pages to the system; they read as zeros again. Returns 0 or an errno. */
static int dtrain__os_discard(void *pages, size_t bytes)
{
#ifdef __linux__
    return madvise(pages, bytes, MADV_DONTNEED) == 0 ? 0 : errno;
#else
    /* elsewhere this advice does not promise zeros, so new pages replace them */
    void *range = mmap(pages, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0);
    return range != MAP_FAILED ? 0 : errno;
#endif
}

/* Gets the memory of whole pages at once, which is cheaper than at each page's first write. Without such a call of the
 * system, the pages come at their first write. */
static void dtrain__os_populate(void *pages, size_t bytes)
{
#ifdef __linux__
    if (!dtrain__without("populate"))
        madvise(pages, bytes, 23); /* MADV_POPULATE_WRITE, since Linux 5.14; a refusal changes nothing */
#else
    (void)pages;
    (void)bytes;
#endif
}

/* Calls mremap with a fixed target. Returns 0 or an errno. Programs of 32 bits do not try: under qemu, others then get
 * the pages that were left. */
static int dtrain__os_remap(void *from, size_t old_bytes, void *to, size_t bytes, int flags)
{
#if defined(__linux__) && defined(__NR_mremap) && UINTPTR_MAX > UINT32_MAX
    if (dtrain__without("mremap"))
        return ENOSYS;
    if (syscall(__NR_mremap, from, old_bytes, bytes, flags, to) != -1)
        return 0;
    int error = errno;
    /* The failed call may have unmapped the target. 0x100000, MAP_FIXED_NOREPLACE, maps it again only if it has. Linux
     * before 4.17 does not know the flag and may map elsewhere. */
    void *back = mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE | 0x100000, -1, 0);
    if (back != MAP_FAILED && back != to)
        munmap(back, bytes);
    return error;
#else
    (void)from;
    (void)old_bytes;
    (void)to;
    (void)bytes;
    (void)flags;
    return ENOSYS;
#endif
}

/* Moves whole pages of a reserved range, with their contents, to the place of others. The others' contents are lost,
 * and the pages that are left read as zeros. All pages of a range must have come from one mapping or move. Returns 0,
 * or an errno and moves nothing. */
static int dtrain__os_move(void *from, void *to, size_t bytes)
{
    return dtrain__os_remap(from, bytes, to, bytes, 7); /* MREMAP_MAYMOVE, FIXED, DONTUNMAP: since Linux 5.7 */
}

/* Maps shared pages at a second place, over what was there. Returns 0 or an errno. */
static int dtrain__os_alias(void *pages, void *to, size_t bytes)
{
    return dtrain__os_remap(pages, 0, to, bytes, 3);
}

/* Returns whether the system can move pages, and discard them at both places. An emulator of a processor may move pages
 * and then lose the ones that they left. */
static int dtrain__os_moves(void)
{
    size_t page = dtrain__os_page_bytes();
    unsigned char *from = (unsigned char *)dtrain__os_reserve(2 * page), *to = from + page;
    int moves = 0;
    if (from == NULL)
        return 0;
    *from = 1;
    if (dtrain__os_move(from, to, page) == 0 && *from == 0 && *to == 1) {
        *from = 2;
        moves = dtrain__os_discard(from, page) == 0 && *from == 0 && dtrain__os_discard(to, page) == 0 && *to == 0;
    }
    dtrain__os_unreserve(from, 2 * page);
    return moves;
}

/* Returns whether whole pages were neither read nor written since they were mapped or discarded; 0 if the system does
 * not say. */
static int dtrain__os_untouched(const void *pages, size_t bytes)
{
    int untouched = 0;
#ifdef __linux__
    uint64_t entries[512];
    size_t page = dtrain__os_page_bytes(), count = bytes / page;
    int fd = dtrain__without("pagemap") ? -1 : open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    untouched = fd >= 0;
    for (size_t at = 0; at < count && untouched; at += sizeof entries / sizeof entries[0]) {
        size_t n = count - at < sizeof entries / sizeof entries[0] ? count - at : sizeof entries / sizeof entries[0];
        off_t offset = (off_t)(((uintptr_t)pages / page + at) * sizeof entries[0]);
        untouched = pread(fd, entries, n * sizeof entries[0], offset) == (ssize_t)(n * sizeof entries[0]);
        for (size_t i = 0; i < n && untouched; i++)
            untouched = entries[i] >> 62 == 0; /* neither present nor swapped out */
    }
    if (fd >= 0)
        close(fd);
#else
    (void)pages;
    (void)bytes;
#endif
    return untouched;
}

/* Sets the access to whole pages: 0 none, 1 reading, 2 reading and writing. Returns 0 or an errno. */
static int dtrain__os_protect(void *pages, size_t bytes, int access)
{
    int kinds[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE};
    if (dtrain__without("mprotect"))
        return ENOSYS;
    return mprotect(pages, bytes, kinds[access]) == 0 ? 0 : errno;
}

/* ---- faults ----
 * A handler of SIGSEGV and SIGBUS reports a fault, then calls the handler that was there before, or lets the fault
 * happen again and end the process. */

static const int dtrain__os_fault_signals[2] = {SIGSEGV, SIGBUS};
static struct sigaction dtrain__os_fault_before[2];
static int dtrain__os_fault_installed[2];
static dtrain__os_fault_fn dtrain__os_fault_report;

/* Returns whether a fault was a write (1) or a read (0), from the context of its signal handler; -1 if unknown. */
static int dtrain__os_fault_writes(const void *context)
{
#if defined(__linux__) && defined(__x86_64__) && defined(__LP64__)
    int64_t code; /* the processor's error code, whose bit 1 says so: the 20th saved register, after 40 bytes */
    memcpy(&code, (const char *)context + 40 + 19 * sizeof code, sizeof code);
    return (int)(code >> 1 & 1);
#else
    (void)context;
    return -1;
#endif
}

/* Treats a signal as it would be treated without this handler. */
static void dtrain__os_fault_pass_on(int number, siginfo_t *info, void *context)
{
    const struct sigaction *before = &dtrain__os_fault_before[number == dtrain__os_fault_signals[1]];
    struct sigaction normal;
    int sent = info->si_code <= 0; /* by kill(). A fault would happen again */
    int none = !(before->sa_flags & SA_SIGINFO) && (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN);
    if (none && sent && before->sa_handler == SIG_IGN)
        return;
    if (none || (before->sa_flags & (int)SA_RESETHAND)) {
        memset(&normal, 0, sizeof normal);
        normal.sa_handler = SIG_DFL;
        sigaction(number, &normal, NULL);
    }
    if (none && sent)
        raise(number);
    else if (!none && (before->sa_flags & SA_SIGINFO))
        before->sa_sigaction(number, info, context);
    else if (!none)
        before->sa_handler(number);
}

static void dtrain__os_fault_handle(int number, siginfo_t *info, void *context)
{
    int kept = errno;
    if (info->si_code > 0)
        dtrain__os_fault_report((uintptr_t)info->si_addr, dtrain__os_fault_writes(context));
    errno = kept;
    dtrain__os_fault_pass_on(number, info, context);
}

/* Installs the handler once. If the program has replaced it, the program's handler may call it. A second one would then
 * call itself through that. */
static void dtrain__os_fault_install(int index)
{
    const int as_before = (int)SA_ONSTACK | (int)SA_RESTART | (int)SA_NODEFER;
    struct sigaction now, ours;
    if (dtrain__os_fault_installed[index] || sigaction(dtrain__os_fault_signals[index], NULL, &now) != 0)
        return;
    ours = now;
    ours.sa_sigaction = dtrain__os_fault_handle;
    ours.sa_flags = (int)SA_SIGINFO | (now.sa_flags & as_before);
    if (!(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN))
        ours.sa_flags = (int)SA_SIGINFO | (int)SA_ONSTACK;
    dtrain__os_fault_before[index] = now;
    dtrain__os_fault_installed[index] = sigaction(dtrain__os_fault_signals[index], &ours, NULL) == 0;
}

static void dtrain__os_fault_uninstall(int index)
{
    struct sigaction now;
    if (!dtrain__os_fault_installed[index] || sigaction(dtrain__os_fault_signals[index], NULL, &now) != 0 ||
        !(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != dtrain__os_fault_handle)
        return;
    dtrain__os_fault_installed[index] =
        sigaction(dtrain__os_fault_signals[index], &dtrain__os_fault_before[index], NULL) != 0;
}

/* Reports each fault. Calls may repeat. */
static void dtrain__os_watch_faults(dtrain__os_fault_fn report)
{
    dtrain__os_fault_report = report;
    for (int i = 0; i < 2; i++)
        dtrain__os_fault_install(i);
}

/* Removes the handlers, unless the program has replaced them. */
static void dtrain__os_unwatch_faults(void)
{
    for (int i = 0; i < 2; i++)
        dtrain__os_fault_uninstall(i);
}

#endif
#endif
