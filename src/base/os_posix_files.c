/* ---- >>os posix files ----
 * Files, directories and locks of POSIX, by names relative to an open directory. */
#ifndef DTRAIN__OS_POSIX_FILES
#define DTRAIN__OS_POSIX_FILES
#include "os_posix.c"
#ifndef _WIN32

#define DTRAIN__OS_HERE AT_FDCWD
typedef DIR dtrain__os_list;

/* Opens a file, with the flags of DTRAIN__OS_READ and its like. Returns a descriptor, or -1 with errno. */
static int dtrain__os_open(int directory, const char *name, int flags)
{
    const int modes[] = {O_RDONLY, O_WRONLY, O_RDWR};
    int all = modes[flags & 3] | O_CLOEXEC | O_NOCTTY;
    all |= (flags & DTRAIN__OS_CREATE ? O_CREAT : 0) | (flags & DTRAIN__OS_NEW ? O_CREAT | O_EXCL : 0);
    all |= (flags & DTRAIN__OS_DIRECTORY ? O_DIRECTORY : O_NONBLOCK) | (flags & DTRAIN__OS_NO_LINK ? O_NOFOLLOW : 0);
    return openat(directory, name, all, 0666);
}

/* Closes a descriptor. Even if close fails, the descriptor is closed. On NFS an error means that earlier writes are
 * lost. */
static int dtrain__os_close(int fd)
{
    return close(fd) == 0 || errno == EINTR ? 0 : -1;
}

static void dtrain__os_tell(const struct stat *status, dtrain__os_facts *facts)
{
    facts->kind = S_ISREG(status->st_mode)   ? DTRAIN__OS_IS_FILE
                  : S_ISDIR(status->st_mode) ? DTRAIN__OS_IS_DIRECTORY
                  : S_ISLNK(status->st_mode) ? DTRAIN__OS_IS_LINK
                                             : DTRAIN__OS_IS_OTHER;
    facts->removed = status->st_nlink == 0;
    facts->open_to_others = (status->st_mode & 077) != 0;
    facts->bytes = (uint64_t)status->st_size;
    facts->changed_s = (int64_t)status->st_mtime;
}

static int dtrain__os_look(int fd, dtrain__os_facts *facts)
{
    struct stat status;
    if (fstat(fd, &status) != 0)
        return -1;
    dtrain__os_tell(&status, facts);
    return 0;
}

/* follow 0: gives the facts of a link itself. */
static int dtrain__os_look_at(int directory, const char *name, dtrain__os_facts *facts, int follow)
{
    struct stat status;
    if (fstatat(directory, name, &status, follow ? 0 : AT_SYMLINK_NOFOLLOW) != 0)
        return -1;
    dtrain__os_tell(&status, facts);
    return 0;
}

static ssize_t dtrain__os_pread(int fd, void *out, size_t bytes, uint64_t offset)
{
    if (offset > (uint64_t)INT64_MAX || (uint64_t)(off_t)offset != offset) {
        errno = EOVERFLOW;
        return -1;
    }
    return pread(fd, out, bytes, (off_t)offset);
}

static ssize_t dtrain__os_read(int fd, void *out, size_t bytes)
{
    return read(fd, out, bytes);
}

static ssize_t dtrain__os_write(int fd, const void *data, size_t bytes)
{
    return write(fd, data, bytes);
}

/* Syncs to the disk itself. On macOS fsync alone leaves data in the drive's cache. */
static int dtrain__os_sync(int fd)
{
#ifdef F_FULLFSYNC
    if (fcntl(fd, F_FULLFSYNC) == 0)
        return 0;
#endif
    return fsync(fd);
}

/* Replaces what has the name, in one step. */
static int dtrain__os_rename(int from_directory, const char *from, int to_directory, const char *to)
{
    return renameat(from_directory, from, to_directory, to);
}

static int dtrain__os_unlink(int directory, const char *name, int is_directory)
{
    return unlinkat(directory, name, is_directory ? AT_REMOVEDIR : 0);
}

static int dtrain__os_mkdir(int directory, const char *name)
{
    return mkdirat(directory, name, 0777);
}

/* Lists a directory. Takes ownership of the descriptor unless it returns NULL. */
static dtrain__os_list *dtrain__os_list_begin(int fd)
{
    return fdopendir(fd);
}

/* Returns the next name, or NULL: with errno unchanged after the last. */
static const char *dtrain__os_list_next(dtrain__os_list *list)
{
    struct dirent *entry = readdir(list);
    return entry != NULL ? entry->d_name : NULL;
}

static void dtrain__os_list_end(dtrain__os_list *list)
{
    closedir(list);
}

/* Maps a file for reading. Returns NULL with errno if that is not possible. */
static void *dtrain__os_map(int fd, size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    return memory != MAP_FAILED ? memory : NULL;
}

static void dtrain__os_unmap(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

/* Writes the path without links, "." and "..". Returns 0 if that is not possible. */
static int dtrain__os_real_path(const char *path, char real[DTRAIN__OS_PATH_BYTES])
{
    char *found = realpath(path, NULL);
    int good = found != NULL && strlen(found) < DTRAIN__OS_PATH_BYTES;
    if (good)
        memcpy(real, found, strlen(found) + 1);
    free(found);
    return good;
}

/* ---- locks ---- */

/* Handles a lock without waiting. Returns 0, or -1 with errno: EAGAIN or EACCES if another holds it. */
static int dtrain__os_lock_range(int fd, dtrain__os_locking what, dtrain__os_range *range)
{
#ifdef __linux__
    const int commands[] = {F_SETLK, F_GETLK, 37, 36}; /* F_OFD_SETLK and F_OFD_GETLK are in _GNU_SOURCE's headers */
#else
    const int commands[] = {F_SETLK, F_GETLK, -1, -1};
#endif
    const short types[] = {F_UNLCK, F_RDLCK, F_WRLCK};
    struct flock lock;
    if (what >= DTRAIN__OS_LOCK_OPEN && (commands[what] < 0 || sizeof(off_t) != 8)) {
        errno = ENOTSUP;
        return -1;
    }
    memset(&lock, 0, sizeof lock);
    lock.l_type = types[range->access];
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)range->begin;
    lock.l_len = (off_t)range->bytes;
    int result = fcntl(fd, commands[what], &lock);
    if (result != 0)
        return result;
    range->access = lock.l_type == F_UNLCK   ? DTRAIN__OS_UNLOCKED
                    : lock.l_type == F_RDLCK ? DTRAIN__OS_FOR_READING
                                             : DTRAIN__OS_FOR_WRITING;
    range->begin = (int64_t)lock.l_start;
    range->process = (long)lock.l_pid;
    return 0;
}

/* Returns whether a process of this host runs; 1 if the system does not say. */
static int dtrain__os_is_running(long process)
{
    return kill((pid_t)process, 0) == 0 || errno != ESRCH;
}

/* ---- signals ---- */

/* The library raises no signals. But a write to a pipe without a reader raises SIGPIPE in the thread, and one beyond
 * the file-size limit raises SIGXFSZ. Both are blocked during a write, and removed afterwards if the write raised
 * them. */
typedef struct dtrain__os_signals {
    sigset_t before, held, pending;
} dtrain__os_signals;

static void dtrain__os_hold_signals(dtrain__os_signals *signals)
{
    sigemptyset(&signals->held);
    sigaddset(&signals->held, SIGPIPE);
    sigaddset(&signals->held, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signals->held, &signals->before);
    sigpending(&signals->pending);
}

static void dtrain__os_release_signals(dtrain__os_signals *signals, int error)
{
    int number = error == EPIPE ? SIGPIPE : error == EFBIG ? SIGXFSZ : 0, taken;
    sigset_t now, one;
    if (number != 0 && !sigismember(&signals->pending, number) && sigpending(&now) == 0 && sigismember(&now, number)) {
        sigemptyset(&one);
        sigaddset(&one, number);
        sigwait(&one, &taken);
    }
    pthread_sigmask(SIG_SETMASK, &signals->before, NULL);
}

#endif
#endif
