/* ---- >>lock ----
 * The lock of a directory that a job saves into. Its holder is alone there, so what a killed save has left belongs to
 * nobody. It is a POSIX record lock on the first byte of the file .lock. Unlike flock and locks of an open file, it
 * belongs to the process that took it, and ends with that process, even if forked children keep the descriptor.
 *
 * So it cannot tell two checkpointers of one process apart, and ends when either closes the file: each takes it anew
 * before every save. Each also locks the open file, where the system can, on a byte that tells its process. Who finds
 * such a lock of a living process is not alone. The file's text names the holder, for people, and outlives the lock. */
#ifndef DTRAIN__LOCK
#define DTRAIN__LOCK
#include "../format/file.c"
#include "../base/xxh64.c"

#define DTRAIN__LOCK_NAME ".lock"
#ifdef __linux__
#define DTRAIN__LOCK_OWN 37   /* F_OFD_SETLK, which headers show with _GNU_SOURCE alone */
#define DTRAIN__LOCK_OTHER 36 /* F_OFD_GETLK */
#else
#define DTRAIN__LOCK_OWN -1
#define DTRAIN__LOCK_OTHER -2
#endif
enum { DTRAIN__LOCK_TEXT = 100 };    /* bytes of the file: a name and spaces */
enum { DTRAIN__LOCK_PID_BITS = 22 }; /* of a process' number, where there are locks of open files */

typedef struct dtrain__lock {
    int fd;       /* -1: not held */
    int is_alone; /* no other checkpointer was there when it was taken */
} dtrain__lock;

/* A lock of `bytes` bytes, 0 for all that follow. Returns 0 or an errno; EAGAIN where another holds it, also of
 * commands that only look: *found, unless that is NULL, is then the other's. */
static int dtrain__lock_fcntl(int fd, int command, short type, off_t begin, off_t bytes, struct flock *found)
{
    struct flock range;
    int result;
    memset(&range, 0, sizeof range);
    range.l_type = type;
    range.l_whence = SEEK_SET;
    range.l_start = begin;
    range.l_len = bytes;
    do
        result = dtrain__file_sys_lock(fd, command, &range);
    while (result != 0 && errno == EINTR);
    if (found != NULL)
        *found = range;
    if (result != 0)
        return errno;
    return (command == F_GETLK || command == DTRAIN__LOCK_OTHER) && range.l_type != F_UNLCK ? EAGAIN : 0;
}

/* Opens the file to be locked, or where another user's may not be written, to be looked at. Returns 0 or an errno. */
static int dtrain__lock_open(dtrain__lock *lock, int directory)
{
    int flags = O_RDWR | O_CREAT;
    while (lock->fd < 0) {
        lock->fd = dtrain__file_sys_open(directory, DTRAIN__LOCK_NAME, flags | O_NOFOLLOW | O_NONBLOCK);
        if (lock->fd < 0 && flags != O_RDONLY && (errno == EACCES || errno == EPERM || errno == EROFS))
            flags = O_RDONLY;
        else if (lock->fd < 0)
            return errno;
    }
    return 0;
}

/* Locks of the open file, which this process' other descriptors do not share. */
static int dtrain__lock_own(int fd, int command, short type, off_t begin, off_t bytes, struct flock *found)
{
    return command > 0 && sizeof(off_t) == 8 ? dtrain__lock_fcntl(fd, command, type, begin, bytes, found) : ENOTSUP;
}

static void dtrain__lock_release(dtrain__lock *lock)
{
    if (lock->fd >= 0)
        dtrain__lock_own(lock->fd, DTRAIN__LOCK_OWN, F_UNLCK, 1, 0, NULL); /* a forked child may hold it too */
    dtrain__file_close(lock->fd);
    lock->fd = -1;
}

/* Reads who wrote the file last, up to what no name has. */
static void dtrain__lock_read(int fd, char name[DTRAIN__LOCK_TEXT + 1])
{
    ssize_t bytes = dtrain__file_sys_pread(fd, name, DTRAIN__LOCK_TEXT, 0);
    size_t length = 0, end = 0;
    for (; bytes > 0 && length < (size_t)bytes && name[length] >= ' ' && name[length] <= '~'; length++)
        if (name[length] != ' ')
            end = length + 1;
    name[end] = '\0';
}

/* Looks for another's lock of the open file. One of a process of this host that has ended, whose forked child has it,
 * is passed over; of several such one counts, which costs time and no files. Returns 0, EAGAIN or another errno. */
static int dtrain__lock_others(int fd, int64_t host)
{
    struct flock found;
    memset(&found, 0, sizeof found);
    int error = dtrain__lock_own(fd, DTRAIN__LOCK_OTHER, F_WRLCK, 1, 0, &found);
    int64_t holder = (int64_t)found.l_start - 1;
    pid_t pid = (pid_t)(holder & (((int64_t)1 << DTRAIN__LOCK_PID_BITS) - 1));
    if (error != EAGAIN || holder < 0 || holder >> DTRAIN__LOCK_PID_BITS != host || pid <= 0 || kill(pid, 0) == 0 ||
        errno != ESRCH)
        return error;
    error = dtrain__lock_own(fd, DTRAIN__LOCK_OTHER, F_WRLCK, 1, found.l_start - 1, NULL);
    return error != 0 ? error : dtrain__lock_own(fd, DTRAIN__LOCK_OTHER, F_WRLCK, found.l_start + 1, 0, NULL);
}

/* Writes who holds it, and finds out who else may save: of this process, where there are no locks of open files, the
 * text tells. */
static void dtrain__lock_sign(dtrain__lock *lock)
{
    char host[64] = "?", name[DTRAIN__LOCK_TEXT + 1], before[DTRAIN__LOCK_TEXT + 1];
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "pid %ld on %.60s", (long)getpid(), host);
    int64_t number = (int64_t)(dtrain__xxh64_of(host, strlen(host), 0) >> 33);
    off_t own = (off_t)(1 + (number << DTRAIN__LOCK_PID_BITS | (int64_t)getpid()));
    dtrain__lock_own(lock->fd, DTRAIN__LOCK_OWN, F_RDLCK, own, 1, NULL); /* others of this process have the same */
    int others = dtrain__lock_others(lock->fd, number);
    dtrain__lock_read(lock->fd, before);
    int differs = strcmp(before, name) != 0;
    size_t length = strlen(name);
    memset(name + length, ' ', DTRAIN__LOCK_TEXT - length);
    name[DTRAIN__LOCK_TEXT - 1] = '\n';
    int error = dtrain__file_write_all(lock->fd, name, DTRAIN__LOCK_TEXT); /* costs a name in a text */
    lock->is_alone = others == 0 || (others != EAGAIN && differs && error == 0);
}

static dtrain_status dtrain__lock_refused(dtrain__lock *lock, const char *path)
{
    char holder[DTRAIN__LOCK_TEXT + 1], pid[32];
    struct flock range;
    dtrain__lock_read(lock->fd, holder);
    if (dtrain__lock_fcntl(lock->fd, F_GETLK, F_WRLCK, 0, 1, &range) == EAGAIN && range.l_pid > 0) {
        snprintf(pid, sizeof pid, "pid %ld", (long)range.l_pid); /* who could not sign, and is of this host */
        size_t length = strlen(pid);
        if (strncmp(holder, pid, length) != 0 || holder[length] != ' ')
            snprintf(holder, sizeof holder, "%s", pid);
    }
    dtrain__lock_release(lock);
    return dtrain__fail(NULL, DTRAIN_ERR_IO,
                        "checkpoint: another job saves into the directory \"%.200s\": %s holds the lock of the file "
                        "%s there: end that job, or give this one another directory",
                        path, holder[0] != '\0' ? holder : "somebody who has not signed", DTRAIN__LOCK_NAME);
}

/* Takes the lock of an open directory, or makes sure that it is still held; never waits for it. DTRAIN_OK without a
 * lock: there are none here, or the file is not to be written. */
static dtrain_status dtrain__lock_take(dtrain__lock *lock, int directory, const char *path)
{
    int fresh = lock->fd < 0, error = dtrain__lock_open(lock, directory);
    struct stat status;
    if (error == EACCES || error == EPERM || error == EROFS || error == ENOENT)
        return DTRAIN_OK;
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "checkpoint: opening \"%.200s/%s\", the lock of those who save: %s",
                            path, DTRAIN__LOCK_NAME, strerror(error));
    if (fresh && (dtrain__file_sys_stat(lock->fd, &status) != 0 || !S_ISREG(status.st_mode))) {
        dtrain__lock_release(lock);
        return dtrain__fail(NULL, DTRAIN_ERR_IO,
                            "checkpoint: \"%.200s/%s\" is no regular file: remove it, it is for the lock of those who "
                            "save",
                            path, DTRAIN__LOCK_NAME);
    }
    error = dtrain__lock_fcntl(lock->fd, F_SETLK, F_WRLCK, 0, 1, NULL); /* the process', for all its descriptors */
    if (error == EBADF) { /* it is open to be looked at: a lock for readers keeps writers out */
        error = dtrain__lock_fcntl(lock->fd, F_GETLK, F_WRLCK, 0, 1, NULL);
        error = error == 0 ? dtrain__lock_fcntl(lock->fd, F_SETLK, F_RDLCK, 0, 1, NULL) : error;
    }
    if (error == EACCES || error == EAGAIN)
        return dtrain__lock_refused(lock, path);
    if (error != 0) { /* of all kinds, where there are no locks */
        dtrain__lock_release(lock);
        return DTRAIN_OK;
    }
    if (fresh)
        dtrain__lock_sign(lock);
    return DTRAIN_OK;
}

#endif
