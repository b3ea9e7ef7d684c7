/* ---- >>os posix host ----
 * What a process of a POSIX system learns of its host, memory that processes of one host share, and libraries that are
 * loaded at run time. */
#ifndef DTRAIN__OS_POSIX_HOST
#define DTRAIN__OS_POSIX_HOST
#include "os_posix.c"
#ifndef _WIN32

/* ---- the host ---- */

/* Reads the start of a system file as text. Returns its length, or -errno and an empty text. */
static int dtrain__os_read_text(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, room - 1) : -1;
    int error = errno;
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return n >= 0 ? (int)n : -error;
}

/* Returns a number from a text of the system, after a word in it; fallback if there is none. */
static uint64_t dtrain__os_read_number(const char *path, const char *word, uint64_t fallback)
{
    char text[4096];
    unsigned long long value;
    dtrain__os_read_text(path, text, sizeof text);
    const char *at = strstr(text, word);
    return at != NULL && sscanf(at + strlen(word), "%llu", &value) == 1 ? value : fallback;
}

/* Returns what a control group of Linux may still get. The system drops its clean copies of files when it needs room.
 */
static uint64_t dtrain__os_cgroup_left(const char *group)
{
    static const char *const cache[] = {"inactive_file ", "\nactive_file ", "slab_reclaimable "};
    char path[400];
    snprintf(path, sizeof path, "/sys/fs/cgroup%.350s/memory.max", group);
    uint64_t most = dtrain__os_read_number(path, "", UINT64_MAX);
    if (most == UINT64_MAX)
        return most;
    snprintf(path, sizeof path, "/sys/fs/cgroup%.350s/memory.current", group);
    uint64_t used = dtrain__os_read_number(path, "", 0), spare = 0;
    snprintf(path, sizeof path, "/sys/fs/cgroup%.350s/memory.stat", group);
    for (size_t i = 0; i < sizeof cache / sizeof cache[0]; i++)
        spare += dtrain__os_read_number(path, cache[i], 0);
    used -= spare < used ? spare : used;
    return most > used ? most - used : 0;
}

/* Returns the bytes that this process can still get: more, and the system would kill a process. Source: Linux,
 * Documentation/admin-guide/cgroup-v2.rst. */
static uint64_t dtrain__os_memory_left(void)
{
    char text[512];
    uint64_t kib = dtrain__os_read_number("/proc/meminfo", "MemAvailable:", UINT64_MAX >> 10), least = kib << 10;
    dtrain__os_read_text("/proc/self/cgroup", text, sizeof text);
    char *group = strstr(text, "0::/"), *end;
    group = group != NULL ? group + 3 : text + strlen(text);
    group[strcspn(group, "\n")] = 0;
    do { /* the group, and all that it is in */
        uint64_t left = dtrain__os_cgroup_left(group);
        least = left < least ? left : least;
        if ((end = strrchr(group, '/')) != NULL)
            *end = 0;
    } while (end != NULL);
    return least;
}

/* Writes the name of this process's program, such as " (train)"; "" if the system does not say. */
static void dtrain__os_program(char *out, size_t room)
{
#ifdef DTRAIN__OS_BSD
    const char *name = getprogname();
#else
    char name[32];
    dtrain__os_read_text("/proc/self/comm", name, sizeof name);
    name[strcspn(name, "\n")] = 0;
#endif
    snprintf(out, room, name[0] != 0 ? " (%.20s)" : "%s", name);
}

static void dtrain__os_host_name(char *out, size_t room)
{
    gethostname(out, room - 1);
}

static const char *dtrain__os_error_text(int error)
{
    return strerror(error);
}

/* Fills id with bytes that identify this host, and where the system says so its last start. All processes of the host
 * get the same. */
static void dtrain__os_host_id(unsigned char id[128])
{
    memset(id, 0, 128);
    gethostname((char *)id, 63);
#if defined(__linux__)
    dtrain__os_read_text("/proc/sys/kernel/random/boot_id", (char *)id + 64, 64);
#elif defined(__OpenBSD__)
    int name[] = {CTL_HW, HW_UUID};
    size_t bytes = 63;
    sysctl(name, 2, id + 64, &bytes, NULL, 0);
#elif defined(DTRAIN__OS_BSD)
    static const char *const names[] = {"kern.bootsessionuuid", "kern.boot_id", "kern.hostuuid"};
    size_t i = 0, bytes = 63;
    while (i < sizeof names / sizeof names[0] && sysctlbyname(names[i], id + 64, &bytes, NULL, 0) != 0) {
        bytes = 63;
        i++;
    }
#endif
}

#define DTRAIN__OS_HUGE_BYTES ((size_t)2 << 20) /* of a huge page on x86-64, and on ARM with pages of 4 KiB */

/* Maps a file whole, a large one so that huge pages fit. Returns MAP_FAILED if the system refuses. */
static void *dtrain__os_map_file(int fd, size_t bytes)
{
    size_t slack = bytes >= DTRAIN__OS_HUGE_BYTES ? DTRAIN__OS_HUGE_BYTES : 0;
    size_t page = dtrain__os_page_bytes(), whole = (bytes + page - 1) / page * page;
    if (slack == 0)
        return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    unsigned char *range = (unsigned char *)dtrain__os_reserve(whole + slack);
    if (range == NULL)
        return MAP_FAILED;
    size_t before = (size_t)(0 - (uintptr_t)range) % slack;
    void *memory = mmap(range + before, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (memory == MAP_FAILED) {
        munmap(range, whole + slack);
        return memory;
    }
    if (before > 0)
        munmap(range, before);
    munmap(range + before + whole, slack - before);
#ifdef __linux__
    if (!dtrain__without("huge")) {
        madvise(memory, bytes, 14);                 /* MADV_HUGEPAGE */
        madvise(memory, bytes / slack * slack, 25); /* MADV_COLLAPSE, since Linux 6.1 */
    }
#endif
    return memory;
}

/* Replaces shared pages by a private copy at the same place. Returns 0 or an errno. */
static int dtrain__os_privately(void *pages, size_t bytes)
{
#if defined(__linux__) && defined(__NR_mremap)
    void *copy = dtrain__os_reserve(bytes);
    if (copy == NULL)
        return errno;
    memcpy(copy, pages, bytes);
    if ((void *)syscall(__NR_mremap, copy, bytes, bytes, 3, pages) == pages) /* MAYMOVE | FIXED */
        return 0;
    int error = errno;
    munmap(copy, bytes);
    return error;
#else
    (void)pages;
    (void)bytes;
    return ENOSYS;
#endif
}

#ifdef __linux__
#define DTRAIN__OS_TMPFILE (020000000 | O_DIRECTORY) /* O_TMPFILE: a file without a name */
#define DTRAIN__OS_SEALS (1 | 2 | 4) /* no more seals, shrinking or growing: shorter, it would kill all who map it */

/* Makes a file without a name in memory, which can be sealed. Returns its descriptor, or -1. */
static int dtrain__os_memfd(void)
{
#ifdef __NR_memfd_create
    if (!dtrain__without("memfd"))
        return (int)syscall(__NR_memfd_create, "dtrain", 3u); /* close-on-exec, may be sealed */
#endif
    return -1;
}

/* Whether another process cannot shorten the file or leave parts of it without memory. Files that cannot be sealed are
 * taken only where this process could make no other. */
static int dtrain__os_is_safe(int fd, size_t bytes)
{
    struct stat what;
    if (fstat(fd, &what) != 0 || what.st_size != (off_t)bytes || (uint64_t)what.st_blocks * 512 < bytes)
        return 0;
    int seals = fcntl(fd, 1034); /* F_GET_SEALS */
    if (seals >= 0 && (seals & DTRAIN__OS_SEALS) == DTRAIN__OS_SEALS)
        return 1;
    int own = dtrain__os_memfd();
    if (own >= 0)
        close(own);
    return own < 0;
}
#endif

/* Makes memory that other processes of the host can map; NULL if that is not possible. It is a file without a name,
 * which ends with its last mapping, however the processes end. Others find it by the descriptor while that is open.
 * Only Linux has such files where others find them: elsewhere processes of a host talk over sockets. */
static void *dtrain__os_share(size_t bytes, int *fd)
{
    void *memory = MAP_FAILED;
    *fd = -1;
#ifdef __linux__
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur != RLIM_INFINITY && most.rlim_cur < bytes)
        return NULL; /* the system would raise SIGXFSZ */
    *fd = dtrain__os_memfd();
    if (*fd < 0)
        *fd = open("/dev/shm", DTRAIN__OS_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (*fd < 0)
        *fd = open("/tmp", DTRAIN__OS_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    int error = *fd >= 0 && bytes < dtrain__os_memory_left() ? EINTR : ENOMEM;
    while (error == EINTR)
        error = posix_fallocate(*fd, 0, (off_t)bytes); /* so that no later write finds the disk full */
    if (error == 0)
        memory = dtrain__os_map_file(*fd, bytes);
    if (memory != MAP_FAILED) {
        fcntl(*fd, 1033, DTRAIN__OS_SEALS); /* F_ADD_SEALS; who opens it looks whether they are there */
    } else if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
#else
    (void)bytes;
#endif
    return memory != MAP_FAILED ? memory : NULL;
}

/* Closes the descriptor; the memory stays mapped. */
static void dtrain__os_share_close(int fd)
{
    close(fd);
}

/* Maps the memory that a process shares. Returns NULL if its descriptor now belongs to something else. */
static void *dtrain__os_share_open(long process, int fd, size_t bytes)
{
    void *memory = MAP_FAILED;
#ifdef __linux__
    char path[64];
    struct stat what;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", process, fd);
    if (stat(path, &what) != 0 || !S_ISREG(what.st_mode) || what.st_nlink != 0 || what.st_size != (off_t)bytes)
        return NULL;
    int own = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (own < 0)
        return NULL;
    if (dtrain__os_is_safe(own, bytes))
        memory = dtrain__os_map_file(own, bytes);
    close(own);
#else
    (void)process;
    (void)fd;
    (void)bytes;
#endif
    return memory != MAP_FAILED ? memory : NULL;
}

/* Returns when a process began, in the system's count. Two processes with the same id differ in it.
 *
 *   known     out: 0 if the system does not say
 *   returns   if known: 0 means that the process has ended and the system has released all that it held */
static uint64_t dtrain__os_process_began(long process, int *known)
{
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/%ld/stat", process);
    int length = dtrain__os_read_text(path, text, sizeof text);
    /* after the program's name come a letter and numbers: the 17th counts threads, the 19th is the time */
    char *at = strrchr(text, ')');
    int told = at != NULL && strlen(at) >= 4;
    *known = told || length == -ENOENT || length == -ESRCH;
    if (!told)
        return 0;
    char state = at[2];
    uint64_t numbers[20] = {0};
    at += 3;
    for (int i = 1; i < 20 && *at != 0; i++)
        numbers[i] = (uint64_t)strtoull(at, &at, 10);
    /* once its last thread has ended, nothing but the name of a process remains */
    return (state == 'Z' || state == 'X') && numbers[17] <= 1 ? 0 : numbers[19];
}

#if !defined(DTRAIN_NO_MPI) && !defined(DTRAIN_MPI_HEADER)
/* Loads a library whose plugins look for its symbols. Returns NULL if there is none. */
static void *dtrain__os_library(const char *name)
{
    return dlopen(name, RTLD_NOW | RTLD_GLOBAL);
}

/* Returns why a library was not loaded; may be NULL. */
static const char *dtrain__os_library_why(void)
{
    return dlerror();
}

static void *dtrain__os_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}
#endif

#endif
#endif
