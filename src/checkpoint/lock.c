/* ---- >>lock ----
 * The lock of a directory that a job saves into. While a job holds it, what killed saves have left belongs to no job.
 * It is a POSIX record lock on the first byte of the file .lock. Unlike flock and locks of an open file, it belongs to
 * the process that took it. It ends with that process, even if forked children keep the descriptor.
 *
 * So it cannot tell two checkpointers of one process apart, and ends when either closes the file. Each takes it anew
 * before every save. Each also locks the open file, if the system can, on a byte that tells its process. A checkpointer
 * that finds such a lock of a living process is not alone. The file's text names the holder for people, and outlives
 * the lock. */
#ifndef DTRAIN__LOCK
#define DTRAIN__LOCK
#include "../format/file.c"
#include "../base/xxh64.c"

#define DTRAIN__LOCK_NAME ".lock"
enum { DTRAIN__LOCK_TEXT = 100 };    /* bytes of the file: a name padded with spaces */
enum { DTRAIN__LOCK_PID_BITS = 22 }; /* of a process number, on systems with locks of open files */

typedef struct dtrain__lock {
    int fd;       /* -1: not held */
    int is_alone; /* no other checkpointer was there when the lock was taken */
} dtrain__lock;

/* Sets or looks for a lock of `bytes` bytes; 0: of all that follow. Returns 0 or an errno, EAGAIN if another holds it.
 * Then *found, unless NULL, is the other's lock. */
static int dtrain__lock_range(int fd, dtrain__os_locking what, dtrain__os_access access, int64_t begin, int64_t bytes,
                              dtrain__os_range *found)
{
    dtrain__os_range range = {access, begin, bytes, 0};
    int result;
    do
        result = dtrain__file_sys_lock(fd, what, &range);
    while (result != 0 && errno == EINTR);
    if (found != NULL)
        *found = range;
    if (result != 0)
        return errno;
    return (what == DTRAIN__OS_LOOK || what == DTRAIN__OS_LOOK_OPEN) && range.access != DTRAIN__OS_UNLOCKED ? EAGAIN
                                                                                                            : 0;
}

/* Opens the lock file; only to look at it if another user owns it. Returns 0 or an errno. */
static int dtrain__lock_open(dtrain__lock *lock, int directory)
{
    int flags = DTRAIN__OS_READ_WRITE | DTRAIN__OS_CREATE;
    while (lock->fd < 0) {
        lock->fd = dtrain__file_sys_open(directory, DTRAIN__LOCK_NAME, flags | DTRAIN__OS_NO_LINK);
        if (lock->fd < 0 && flags != DTRAIN__OS_READ && (errno == EACCES || errno == EPERM || errno == EROFS))
            flags = DTRAIN__OS_READ;
        else if (lock->fd < 0)
            return errno;
    }
    return 0;
}

static void dtrain__lock_release(dtrain__lock *lock)
{
    if (lock->fd >= 0)
        dtrain__lock_range(lock->fd, DTRAIN__OS_LOCK_OPEN, DTRAIN__OS_UNLOCKED, 1, 0,
                           NULL); /* a forked child may hold the file too */
    dtrain__file_close(lock->fd);
    lock->fd = -1;
}

/* Reads the name of whoever wrote the file last, up to the first byte that no name has. */
static void dtrain__lock_read(int fd, char name[DTRAIN__LOCK_TEXT + 1])
{
    ssize_t bytes = dtrain__file_sys_pread(fd, name, DTRAIN__LOCK_TEXT, 0);
    size_t length = 0, end = 0;
    for (; bytes > 0 && length < (size_t)bytes && name[length] >= ' ' && name[length] <= '~'; length++)
        if (name[length] != ' ')
            end = length + 1;
    name[end] = '\0';
}

/* Looks for another checkpointer's lock of the open file. Skips that of a process of this host that has ended and whose
 * forked child holds it. Of several such it skips one; that delays removals and costs no files. Returns 0, EAGAIN or
 * another errno. */
static int dtrain__lock_others(int fd, int64_t host)
{
    dtrain__os_range found;
    int error = dtrain__lock_range(fd, DTRAIN__OS_LOOK_OPEN, DTRAIN__OS_FOR_WRITING, 1, 0, &found);
    int64_t holder = found.begin - 1;
    long pid = (long)(holder & (((int64_t)1 << DTRAIN__LOCK_PID_BITS) - 1));
    if (error != EAGAIN || holder < 0 || holder >> DTRAIN__LOCK_PID_BITS != host || pid <= 0 ||
        dtrain__os_is_running(pid))
        return error;
    error = dtrain__lock_range(fd, DTRAIN__OS_LOOK_OPEN, DTRAIN__OS_FOR_WRITING, 1, found.begin - 1, NULL);
    return error != 0 ? error
                      : dtrain__lock_range(fd, DTRAIN__OS_LOOK_OPEN, DTRAIN__OS_FOR_WRITING, found.begin + 1, 0, NULL);
}

/* Writes the holder's name, and finds out whether another checkpointer may save. Without locks of open files, the text
 * tells about those of this process. */
static void dtrain__lock_sign(dtrain__lock *lock)
{
    char host[64] = "?", name[DTRAIN__LOCK_TEXT + 1], before[DTRAIN__LOCK_TEXT + 1];
    dtrain__os_host_name(host, sizeof host);
    snprintf(name, sizeof name, "pid %ld on %.60s", dtrain__os_self(), host);
    int64_t number = (int64_t)(dtrain__xxh64_of(host, strlen(host), 0) >> 33);
    int64_t own = 1 + (number << DTRAIN__LOCK_PID_BITS | dtrain__os_self());
    dtrain__lock_range(lock->fd, DTRAIN__OS_LOCK_OPEN, DTRAIN__OS_FOR_READING, own, 1,
                       NULL); /* this process may hold several */
    int others = dtrain__lock_others(lock->fd, number);
    dtrain__lock_read(lock->fd, before);
    int differs = strcmp(before, name) != 0;
    size_t length = strlen(name);
    memset(name + length, ' ', DTRAIN__LOCK_TEXT - length);
    name[DTRAIN__LOCK_TEXT - 1] = '\n';
    int error = dtrain__file_write_all(lock->fd, name, DTRAIN__LOCK_TEXT); /* or a text lacks the name */
    lock->is_alone = others == 0 || (others != EAGAIN && differs && error == 0);
}

static dtrain_status dtrain__lock_refused(dtrain__lock *lock, const char *path)
{
    char holder[DTRAIN__LOCK_TEXT + 1], pid[32];
    dtrain__os_range range;
    dtrain__lock_read(lock->fd, holder);
    if (dtrain__lock_range(lock->fd, DTRAIN__OS_LOOK, DTRAIN__OS_FOR_WRITING, 0, 1, &range) == EAGAIN &&
        range.process > 0) {
        snprintf(pid, sizeof pid, "pid %ld", range.process); /* a holder on this host that could not sign */
        size_t length = strlen(pid);
        if (strncmp(holder, pid, length) != 0 || holder[length] != ' ')
            snprintf(holder, sizeof holder, "%s", pid);
    }
    dtrain__lock_release(lock);
    return dtrain__fail(NULL, DTRAIN_ERR_IO,
                        "checkpoint: another job saves into the directory \"%.200s\": %s holds the lock of the file "
                        "%s there: end that job, or give this one another directory",
                        path, holder[0] != '\0' ? holder : "an unknown process", DTRAIN__LOCK_NAME);
}

/* Takes the lock of an open directory, or checks that it is still held; never waits for it. Returns DTRAIN_OK without a
 * lock if the file system has none, or the file may not be written. */
static dtrain_status dtrain__lock_take(dtrain__lock *lock, int directory, const char *path)
{
    int fresh = lock->fd < 0, error = dtrain__lock_open(lock, directory);
    dtrain__os_facts facts;
    if (error == EACCES || error == EPERM || error == EROFS || error == ENOENT)
        return DTRAIN_OK;
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO,
                            "checkpoint: opening the lock file \"%.200s/%s\": %s: let this process write it", path,
                            DTRAIN__LOCK_NAME, dtrain__os_error_text(error));
    if (fresh && (dtrain__file_sys_stat(lock->fd, &facts) != 0 || facts.kind != DTRAIN__OS_IS_FILE)) {
        dtrain__lock_release(lock);
        return dtrain__fail(
            NULL, DTRAIN_ERR_IO,
            "checkpoint: \"%.200s/%s\" is no regular file, as the lock of saving jobs must be: remove it", path,
            DTRAIN__LOCK_NAME);
    }
    error = dtrain__lock_range(lock->fd, DTRAIN__OS_LOCK, DTRAIN__OS_FOR_WRITING, 0, 1,
                               NULL); /* of the process, for all its descriptors */
    if (error == EBADF) {             /* open for reading only: a read lock keeps writers out */
        error = dtrain__lock_range(lock->fd, DTRAIN__OS_LOOK, DTRAIN__OS_FOR_WRITING, 0, 1, NULL);
        error = error == 0 ? dtrain__lock_range(lock->fd, DTRAIN__OS_LOCK, DTRAIN__OS_FOR_READING, 0, 1, NULL) : error;
    }
    if (error == EACCES || error == EAGAIN)
        return dtrain__lock_refused(lock, path);
    if (error != 0) { /* any other error: there are no locks here */
        dtrain__lock_release(lock);
        return DTRAIN_OK;
    }
    if (fresh)
        dtrain__lock_sign(lock);
    return DTRAIN_OK;
}

#endif
