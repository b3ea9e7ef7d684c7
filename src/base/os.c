/* ---- >>os ----
 * The one place for what differs between systems: clock, threads, waiting on a word, processors.
 * Everything above asks here and never the system. Waiting is on a 32-bit word (a futex on Linux,
 * a timed sleep elsewhere); a wake-up may be spurious, so callers re-check what they wait for.
 * Threads started here block all signals, so that handlers run on the program's own. */
#ifndef DTRAIN__OS
#define DTRAIN__OS
#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define DTRAIN__CACHE_LINE 64

#ifndef DTRAIN__TUNED
#define DTRAIN__TUNED(name, value) (value) /* a size or a time that a test may choose by its name */
#endif

static int64_t dtrain__os_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Milliseconds that a caller chose, as nanoseconds that can be added to any time. */
static int64_t dtrain__os_ms_to_ns(int64_t ms)
{
    return ms < INT64_MAX / 4 / 1000000 ? ms * 1000000 : INT64_MAX / 4;
}

static struct timespec dtrain__os_timespec(int64_t ns)
{
    struct timespec span;
    span.tv_sec = (time_t)(ns / 1000000000);
    span.tv_nsec = (long)(ns % 1000000000);
    return span;
}

static int dtrain__os_processors(void)
{
#if defined(__linux__) && defined(__NR_sched_getaffinity)
    /* The affinity mask, not the machine: containers and taskset give a process fewer. */
    unsigned long mask[1024 / (8 * sizeof(unsigned long))];
    long bytes = syscall(__NR_sched_getaffinity, 0, sizeof mask, mask);
    int count = 0;
    for (long i = 0; i < bytes / (long)sizeof(unsigned long); i++)
        count += __builtin_popcountl(mask[i]);
    if (count > 0)
        return count;
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 && online < INT_MAX ? (int)online : 1;
}

static void dtrain__os_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Sleeps while *word == value, for at most ns; returns early at any time. */
static void dtrain__os_wait_word(uint32_t *word, uint32_t value, int64_t ns)
{
#ifdef __linux__
    struct timespec span = dtrain__os_timespec(ns);
    syscall(__NR_futex, word, FUTEX_WAIT_PRIVATE, value, &span, NULL, 0);
#else
    struct timespec span = dtrain__os_timespec(ns < 200000 ? ns : 200000);
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
        nanosleep(&span, NULL);
#endif
}

static void dtrain__os_wake_word(uint32_t *word)
{
#ifdef __linux__
    syscall(__NR_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
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

/* Starts body(argument); the struct stays in place until the join. Returns 0 or an errno. */
static int dtrain__os_thread_start(dtrain__os_thread *thread, void (*body)(void *), void *argument, size_t stack_bytes)
{
    pthread_attr_t attributes;
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
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&thread->id, &attributes, dtrain__os_thread_main, thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    return error;
}

static void dtrain__os_thread_join(dtrain__os_thread *thread)
{
    pthread_join(thread->id, NULL);
}

/* Bytes of a page, the unit in which memory comes and goes. */
static size_t dtrain__os_page_bytes(void)
{
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

/* Reserves a range of addresses, in whole pages, which read as zeros and take memory page by page as they are written.
 * Returns NULL when the system refuses. */
static void *dtrain__os_reserve(size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANON;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void *range = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return range != MAP_FAILED ? range : NULL;
}

/* Gives the memory of whole pages back; they read as zeros again. Returns 0 or an errno. */
static int dtrain__os_discard(void *pages, size_t bytes)
{
#ifdef __linux__
    return madvise(pages, bytes, MADV_DONTNEED) == 0 ? 0 : errno;
#else
    /* elsewhere that advice promises no zeros: new pages take their place */
    void *range = mmap(pages, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0);
    return range != MAP_FAILED ? 0 : errno;
#endif
}

/* Brings the memory of whole pages at once, which is cheaper than page by page as they are written; where the system
 * has no such call they come so. */
static void dtrain__os_populate(void *pages, size_t bytes)
{
#ifdef __linux__
    madvise(pages, bytes, 23); /* MADV_POPULATE_WRITE, since Linux 5.14 */
#else
    (void)pages;
    (void)bytes;
#endif
}

/* Moves whole pages of a reserved range, contents and all, to others, whose own are gone then; what they leave reads
 * as zeros. Both must have been mapped or moved there by one call. Returns 0 or an errno, with nothing moved. */
static int dtrain__os_move(void *from, void *to, size_t bytes)
{
#if defined(__linux__) && defined(__NR_mremap)
    const int flags = 7; /* MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP: the last since Linux 5.7 */
    if (syscall(__NR_mremap, from, bytes, bytes, flags, to) != -1)
        return 0;
    int error = errno;
    /* it may have taken the target away before it failed; 0x100000, MAP_FIXED_NOREPLACE: only then is it mapped */
    mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE | 0x100000, -1, 0);
    return error;
#else
    (void)from;
    (void)to;
    (void)bytes;
    return ENOSYS;
#endif
}

/* Says whether whole pages were neither read nor written since they were mapped or discarded; 0 where the system does
 * not tell. */
static int dtrain__os_untouched(const void *pages, size_t bytes)
{
    int untouched = 0;
#ifdef __linux__
    uint64_t entries[512];
    size_t page = dtrain__os_page_bytes(), count = bytes / page;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
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

static void dtrain__os_unreserve(void *range, size_t bytes)
{
    munmap(range, bytes);
}

/* Fills out with bytes that nobody can guess. Returns 0 or an errno. */
static int dtrain__os_random(void *out, size_t bytes)
{
    unsigned char *at = (unsigned char *)out;
    ssize_t n = 0;
    int fd, error = 0;
#if defined(__linux__) && defined(__NR_getrandom)
    while (bytes > 0 && ((n = syscall(__NR_getrandom, at, bytes, 0)) > 0 || errno == EINTR)) {
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
#endif
    if (bytes == 0)
        return 0;
    fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    while (bytes > 0 && ((n = read(fd, at, bytes)) > 0 || (n < 0 && errno == EINTR))) {
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    if (bytes > 0)
        error = n < 0 ? errno : EIO;
    close(fd);
    return error;
}

/* What tells this host, since its last start, from others: processes of one host get the same. */
static void dtrain__os_host_id(unsigned char id[128])
{
    int fd;
    memset(id, 0, 128);
    gethostname((char *)id, 63);
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC); /* only on Linux */
    if (fd < 0)
        return;
    ssize_t ignored = read(fd, id + 64, 63);
    (void)ignored;
    close(fd);
}

/* Memory that other processes of the host can map: a file without a name, which ends with the last mapping of it,
 * however its processes end. NULL: there is none. The descriptor is what the others find it by, until it is closed. */
static void *dtrain__os_share(size_t bytes, int *fd)
{
    void *memory = MAP_FAILED;
    *fd = -1;
#if defined(__linux__) && defined(__NR_memfd_create)
    *fd = (int)syscall(__NR_memfd_create, "dtrain", 1u); /* close-on-exec */
    if (*fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0)
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (memory == MAP_FAILED && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
#endif
    return memory != MAP_FAILED ? memory : NULL;
}

/* Maps what a process shares. Whatever else its descriptor may be by now is left alone. */
static void *dtrain__os_share_open(pid_t process, int fd, size_t bytes)
{
    char path[64], name[32];
    void *memory = MAP_FAILED;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)process, fd);
    ssize_t length = readlink(path, name, sizeof name);
    if (length < 13 || memcmp(name, "/memfd:dtrain", 13) != 0)
        return NULL;
    int own = open(path, O_RDWR | O_CLOEXEC);
    if (own < 0)
        return NULL;
    if (lseek(own, 0, SEEK_END) == (off_t)bytes)
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
    close(own);
    return memory != MAP_FAILED ? memory : NULL;
}

/* When a process began, in the system's count: two of one number differ in it. *known: 0 where nobody can tell; else a
 * result of 0 says that it has ended, and that all it held has been taken down. */
static uint64_t dtrain__os_process_began(pid_t process, int *known)
{
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)process);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    *known = fd >= 0 || errno == ENOENT;
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    *known = length > 0 || errno == ESRCH;
    close(fd);
    text[length > 0 ? length : 0] = 0;
    char *at =
        strrchr(text, ')'); /* after the program's name a letter, and numbers: the 17th threads, the 19th the time */
    if (at == NULL || strlen(at) < 4) {
        *known &= length <= 0;
        return 0;
    }
    char state = at[2];
    uint64_t numbers[20] = {0};
    at += 3;
    for (int i = 1; i < 20 && *at != 0; i++)
        numbers[i] = (uint64_t)strtoull(at, &at, 10);
    /* a process is no more than its name once the last of its threads has ended */
    return (state == 'Z' || state == 'X') && numbers[17] <= 1 ? 0 : numbers[19];
}

/* Replaces a file by what write puts into another beside it, when that is whole. Returns 0 or an errno: then the old
 * one is as it was. */
static int dtrain__os_replace_file(const char *path, void (*write)(FILE *file, const void *user), const void *user)
{
    char beside[1100];
    if (strlen(path) > 1024)
        return ENAMETOOLONG;
    snprintf(beside, sizeof beside, "%s.%ld.new", path, (long)getpid());
    FILE *file = fopen(beside, "w");
    int bad = file == NULL;
    if (!bad) {
        write(file, user);
        bad = ferror(file) != 0;
        bad |= fclose(file) != 0;
        bad = bad || rename(beside, path) != 0;
    }
    int error = bad ? errno : 0;
    if (bad)
        unlink(beside);
    return error;
}

#endif
