/* ---- >>os posix share ----
 * Memory that processes of one host and user share. A peer knows it by its maker's process and a number. On Linux it is
 * a file without a name, and the number is its descriptor, which the peer opens in /proc. Elsewhere it is a segment,
 * whose name ends with the number. Its maker removes the name once the peers have opened it. If the maker dies before,
 * a later process removes the name when it needs one. */
#ifndef DTRAIN__OS_POSIX_SHARE
#define DTRAIN__OS_POSIX_SHARE
#include "os_posix_limits.c"
#ifndef _WIN32

#define DTRAIN__OS_HUGE_BYTES ((size_t)2 << 20) /* of a huge page on x86-64, and on ARM with pages of 4 KiB */

/* Maps a file whole, a large one so that huge pages fit. huge: makes them now, which may take milliseconds. Returns
 * MAP_FAILED if the system refuses. */
static void *dtrain__os_map_file(int fd, size_t bytes, int huge)
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
        madvise(memory, bytes, 14); /* MADV_HUGEPAGE */
        if (huge)
            madvise(memory, bytes / slack * slack, 25); /* MADV_COLLAPSE, since Linux 6.1 */
    }
#else
    (void)huge;
#endif
    return memory;
}

#if defined(__linux__) || defined(__NetBSD__)
/* Gives a part of a file its room, so that no later write finds the disk full. Returns 0 or an errno. Before Linux 6.4
 * a signal ends the call in memory, and what it had allocated is undone: a periodic timer would never let a long one
 * end. So a piece is allocated with signals blocked, which come between two. */
static int dtrain__os_allocate(int fd, size_t begin, size_t bytes)
{
    const size_t piece = (size_t)16 << 20;
    sigset_t all, old;
    int error = 0;
    sigfillset(&all);
    for (size_t at = 0; at < bytes && error == 0; at += piece) {
        pthread_sigmask(SIG_SETMASK, &all, &old);
        do /* a stopped process cannot block the signal that did it */
            error = posix_fallocate(fd, (off_t)(begin + at), (off_t)(bytes - at < piece ? bytes - at : piece));
        while (error == EINTR);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
    }
    return error;
}
#endif

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

/* Makes a file without a name, which ends with its last mapping, however the processes end. empty: it gets its memory
 * later. Returns MAP_FAILED if that is not possible. */
static void *dtrain__os_nameless(size_t bytes, int empty, int *fd)
{
    void *memory = MAP_FAILED;
    *fd = dtrain__os_memfd();
    if (*fd < 0)
        *fd = open("/dev/shm", DTRAIN__OS_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (*fd < 0)
        *fd = open("/tmp", DTRAIN__OS_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (*fd >= 0 && bytes < dtrain__os_memory_left() &&
        (empty ? ftruncate(*fd, (off_t)bytes) : dtrain__os_allocate(*fd, 0, bytes)) == 0)
        memory = dtrain__os_map_file(*fd, bytes, !empty);
    if (memory != MAP_FAILED) {
        fcntl(*fd, 1033, DTRAIN__OS_SEALS); /* F_ADD_SEALS; who opens it looks whether they are there */
    } else if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    return memory;
}

/* Maps the file of a process. Returns MAP_FAILED if the descriptor now belongs to something else. */
static void *dtrain__os_nameless_open(long process, int fd, size_t bytes, int huge)
{
    char path[64];
    struct stat what;
    void *memory = MAP_FAILED;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", process, fd);
    if (stat(path, &what) != 0 || !S_ISREG(what.st_mode) || what.st_nlink != 0 || what.st_size != (off_t)bytes)
        return memory;
    int own = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (own < 0)
        return memory;
    if (dtrain__os_is_safe(own, bytes))
        memory = dtrain__os_map_file(own, bytes, huge);
    close(own);
    return memory;
}
#else

static void *dtrain__os_nameless(size_t bytes, int empty, int *fd)
{
    (void)bytes;
    (void)empty;
    *fd = -1;
    return MAP_FAILED;
}

static void *dtrain__os_nameless_open(long process, int fd, size_t bytes, int huge)
{
    (void)process;
    (void)fd;
    (void)bytes;
    (void)huge;
    return MAP_FAILED;
}
#endif

/* ---- segments ----
 * A page follows the memory of a segment. It holds the process of the maker. */

enum { DTRAIN__OS_SEGMENTS = 256 }; /* names of one user */

#ifdef __NetBSD__
#define DTRAIN__OS_SEGMENT_PLACE "/var/shm"
#else
#define DTRAIN__OS_SEGMENT_PLACE "/dev/shm"
#endif

/* Opens the segment of this user with a number, or with flags 0 removes its name. Returns -1 with errno if that fails.
 * The C library of Linux had the calls in another library, and NetBSD still has. */
static int dtrain__os_segment(int number, int flags)
{
    char name[64];
#if defined(__linux__) || defined(__NetBSD__)
    snprintf(name, sizeof name, DTRAIN__OS_SEGMENT_PLACE "/dtrain-%lu-%d", (unsigned long)geteuid(), number);
    return flags == 0 ? unlink(name) : open(name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
#else
    snprintf(name, sizeof name, "/dtrain-%lu-%d", (unsigned long)geteuid(), number);
    return flags == 0 ? shm_unlink(name) : shm_open(name, flags, 0600);
#endif
}

/* Returns where the page lies that follows the memory. */
static size_t dtrain__os_segment_end(size_t bytes)
{
    size_t page = dtrain__os_page_bytes();
    return (bytes + page - 1) / page * page;
}

/* Returns the maker of a segment whose last page begins at `at`, after it has written maker there unless that is 0.
 * Returns 0 if the segment is none, and UINT64_MAX if that cannot be told. */
static uint64_t dtrain__os_segment_maker(int fd, size_t at, uint64_t maker)
{
    struct stat what;
    size_t page = dtrain__os_page_bytes();
    if (fstat(fd, &what) != 0)
        return UINT64_MAX;
    if (what.st_uid != geteuid() || what.st_size != (off_t)(at + page))
        return 0;
    void *last = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)at);
    if (last == MAP_FAILED)
        return UINT64_MAX;
    if (maker != 0)
        memcpy(last, &maker, sizeof maker);
    else
        memcpy(&maker, last, sizeof maker);
    munmap(last, page);
    return maker;
}

/* Removes a name whose maker has died: a segment without a maker is being made, but not for a minute. If another
 * process has just done the same and taken the name again, the peers of that process do not find its memory and use
 * their connections. */
static void dtrain__os_segment_sweep(int number)
{
    enum { MAKING_S = 60 };
    struct stat what;
    size_t page = dtrain__os_page_bytes();
    int fd = dtrain__os_segment(number, O_RDWR);
    if (fd < 0)
        return;
    int known = fstat(fd, &what) == 0;
    uint64_t maker =
        known && (uint64_t)what.st_size > page ? dtrain__os_segment_maker(fd, (size_t)what.st_size - page, 0) : 0;
    close(fd);
    int died = maker != 0 && maker <= INT_MAX && kill((pid_t)maker, 0) != 0 && errno == ESRCH;
    int left = maker == 0 && known && what.st_mtime > 0 && time(NULL) - what.st_mtime > MAKING_S;
    if (died || left)
        dtrain__os_segment(number, 0);
}

/* Gives a new segment its size. Returns 0 or an errno. */
static int dtrain__os_segment_grow(int fd, size_t bytes)
{
    if (ftruncate(fd, (off_t)bytes) != 0)
        return errno;
    int error = 0;
#if defined(__linux__) || defined(__NetBSD__)
    error = dtrain__os_allocate(fd, 0, bytes);
#endif
    return error != EINVAL && error != EOPNOTSUPP ? error : 0;
}

/* Makes a segment. Returns MAP_FAILED if that is not possible. */
static void *dtrain__os_segment_make(size_t bytes, int *number)
{
    const int flags = O_RDWR | O_CREAT | O_EXCL;
    void *memory = MAP_FAILED;
    size_t end = dtrain__os_segment_end(bytes);
    int fd = -1;
    *number = -1;
    for (int i = 0; fd < 0 && i < DTRAIN__OS_SEGMENTS; i++) {
        if ((fd = dtrain__os_segment(i, flags)) < 0 && errno == EEXIST) {
            dtrain__os_segment_sweep(i);
            fd = dtrain__os_segment(i, flags);
        }
        *number = fd >= 0 ? i : -1;
    }
    if (fd < 0)
        return memory;
    if (bytes < dtrain__os_memory_left() && dtrain__os_segment_grow(fd, end + dtrain__os_page_bytes()) == 0 &&
        dtrain__os_segment_maker(fd, end, (uint64_t)getpid()) == (uint64_t)getpid())
        memory = dtrain__os_map_file(fd, bytes, 1);
    close(fd);
    if (memory == MAP_FAILED) {
        dtrain__os_segment(*number, 0);
        *number = -1;
    }
    return memory;
}

/* Maps the segment of a process. Returns MAP_FAILED if the number now belongs to something else. */
static void *dtrain__os_segment_open(long process, int number, size_t bytes, int huge)
{
    void *memory = MAP_FAILED;
    int fd = number >= 0 && number < DTRAIN__OS_SEGMENTS ? dtrain__os_segment(number, O_RDWR) : -1;
    if (fd < 0)
        return memory;
    if (process > 0 && dtrain__os_segment_maker(fd, dtrain__os_segment_end(bytes), 0) == (uint64_t)process)
        memory = dtrain__os_map_file(fd, bytes, huge);
    close(fd);
    return memory;
}

/* ---- either ---- */

/* As dtrain__os_share. empty: dtrain__os_share_fill gives the memory its pages, and others cannot open it before that.
 * It has no huge ones then. */
static void *dtrain__os_share_as(size_t bytes, int empty, int *number)
{
    struct rlimit most;
    size_t whole = dtrain__os_segment_end(bytes) + dtrain__os_page_bytes();
    *number = -1;
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur != RLIM_INFINITY && (uint64_t)most.rlim_cur < whole)
        return NULL; /* the system would raise SIGXFSZ */
    void *memory =
        dtrain__os_shows_files() ? dtrain__os_nameless(bytes, empty, number) : dtrain__os_segment_make(bytes, number);
    return memory != MAP_FAILED ? memory : NULL;
}

/* Makes memory that other processes of the host can map; NULL if that is not possible. Others find it by its number
 * until share_close. */
static void *dtrain__os_share(size_t bytes, int *number)
{
    return dtrain__os_share_as(bytes, 0, number);
}

/* Gives a part of empty memory its pages. Segments have theirs already. Returns 0 or an errno. */
static int dtrain__os_share_fill(int number, size_t begin, size_t bytes)
{
#ifdef __linux__
    if (dtrain__os_shows_files())
        return dtrain__os_allocate(number, begin, bytes);
#endif
    (void)number;
    (void)begin;
    (void)bytes;
    return 0;
}

/* Ends the number; the memory stays mapped. */
static void dtrain__os_share_close(int number)
{
    if (dtrain__os_shows_files())
        close(number);
    else
        dtrain__os_segment(number, 0);
}

/* Maps the memory that a process shares. huge: with huge pages at once, as the maker has them, which may take
 * milliseconds. Returns NULL if its number now belongs to something else. */
static void *dtrain__os_share_open(long process, int number, size_t bytes, int huge)
{
    void *memory = dtrain__os_shows_files() ? dtrain__os_nameless_open(process, number, bytes, huge)
                                            : dtrain__os_segment_open(process, number, bytes, huge);
    return memory != MAP_FAILED ? memory : NULL;
}

#endif
#endif
