/* ---- >>os files ----
 * Replacing a file in one step, and closing pipes, on any system. */
#ifndef DTRAIN__OS_FILES
#define DTRAIN__OS_FILES
#include "os_posix_files.c"
#include "os_posix_sockets.c"
#include "os_posix_wait.c"
#include "os_windows_files.c"
#include "os_windows_sockets.c"

/* Closes a pipe of dtrain__os_pipe; a negative end is closed already. */
static void dtrain__os_pipe_close(const int ends[2])
{
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0 && (i == 0 || ends[1] != ends[0]))
            dtrain__os_hang_up(ends[i]);
}

/* Makes a path beside `path` that nobody else uses: hidden, with a random number, ending in .tmp. It is at most 22
 * bytes longer than path. Returns 0 if there is no room. */
static int dtrain__os_name_beside(char *beside, size_t room, const char *path)
{
    const char *slash = strrchr(path, '/'), *last = slash != NULL ? slash + 1 : path;
    size_t keep = strlen(last);
    uint64_t number = 0;
    if (dtrain__os_random(&number, sizeof number) != 0)
        number = (uint64_t)dtrain__os_now_ns() * 1000003u + (uint64_t)dtrain__os_self();
    for (keep = keep < 200 ? keep : 200; keep > 0 && ((unsigned char)last[keep] & 0xc0) == 0x80; keep--)
        continue; /* do not cut inside a character: some file systems refuse names that are not UTF-8 */
    int bytes = snprintf(beside, room, "%.*s.%.*s.%016llx.tmp", (int)(last - path), path, (int)keep, last,
                         (unsigned long long)number);
    return bytes > 0 && (size_t)bytes < room;
}

/* Makes an empty file beside `path`, to replace it later. Others who can write to the directory cannot put a link in
 * its way: they cannot know the name, and an existing file is neither followed nor opened. Returns the descriptor, or
 * -1 with errno. */
static int dtrain__os_open_beside(int directory, const char *path, char *beside, size_t room)
{
    for (int attempt = 0; attempt < 100; attempt++) {
        if (!dtrain__os_name_beside(beside, room, path)) {
            errno = ENAMETOOLONG;
            return -1;
        }
        int fd = dtrain__os_open(directory, beside, DTRAIN__OS_WRITE | DTRAIN__OS_NEW | DTRAIN__OS_NO_LINK);
        if (fd >= 0 || (errno != EEXIST && errno != EINTR))
            return fd;
    }
    return -1;
}

/* Syncs such a file, closes it and moves it into its place. Returns 0 or an errno: then it removes the new file, and
 * the old one is unchanged.
 *
 *   error   an errno from writing it; 0: it is whole */
static int dtrain__os_put_in_place(int fd, const char *beside, const char *path, int error)
{
    if (error == 0 && dtrain__os_sync(fd) != 0 && errno != EINVAL) /* EINVAL: it cannot be synced */
        error = errno;
    if (dtrain__os_close(fd) != 0 && error == 0)
        error = errno;
    if (error == 0 && dtrain__os_rename(DTRAIN__OS_HERE, beside, DTRAIN__OS_HERE, path) != 0)
        error = errno;
    if (error != 0)
        dtrain__os_unlink(DTRAIN__OS_HERE, beside, 0);
    return error;
}

/* Replaces a file by one with these bytes. Returns 0 or an errno: then the old file is unchanged. */
static int dtrain__os_replace_file(const char *path, const void *data, size_t bytes)
{
    char beside[DTRAIN__OS_PATH_BYTES + 32];
    int fd = dtrain__os_open_beside(DTRAIN__OS_HERE, path, beside, sizeof beside), error = 0;
    if (fd < 0)
        return errno;
    for (size_t at = 0; at < bytes && error == 0;) {
        ssize_t n = dtrain__os_write(fd, (const char *)data + at, bytes - at);
        if (n < 0 && errno != EINTR)
            error = errno;
        at += n > 0 ? (size_t)n : 0;
    }
    return dtrain__os_put_in_place(fd, beside, path, error);
}

#endif
