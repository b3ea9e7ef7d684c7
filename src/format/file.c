/* ---- >>file ----
 * Files and directories for checkpoints: whole reads and writes, names relative to an open directory, syncing, and
 * replacing a file or directory in one step. System calls that can fail go through the few functions at the top. Macros
 * let tests change them:
 *
 *   DTRAIN__FILE_FAULT(call)          an errno to fail with; 0: the call goes on
 *   DTRAIN__FILE_LIMIT(call, bytes)   the most that one read or write moves
 *   DTRAIN__FILE_SWAP                 1: the machine is big-endian; files are little-endian
 *
 * Functions return DTRAIN_OK or a reported error that names the path. `what` is the caller's prefix of its text. */
#ifndef DTRAIN__FILE
#define DTRAIN__FILE
#include "../base/status.c"
#include "../base/os_files.c"
#include "../base/memory.c"
#include "../base/json.c"

#ifndef DTRAIN__FILE_FAULT
#define DTRAIN__FILE_FAULT(call) 0
#endif
#ifndef DTRAIN__FILE_LIMIT
#define DTRAIN__FILE_LIMIT(call, bytes) (bytes)
#endif
#ifndef DTRAIN__FILE_SWAP
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define DTRAIN__FILE_SWAP 1
#else
#define DTRAIN__FILE_SWAP 0
#endif
#endif

#define DTRAIN__FILE_MOST ((size_t)1 << 30) /* bytes per read or write: systems stop at 2 GiB, some with an error */
#define DTRAIN__FILE_HERE DTRAIN__OS_HERE

/* ---- the system's calls ---- */

#define DTRAIN__FILE_TRY(call) \
    do { \
        int dtrain__fault_ = DTRAIN__FILE_FAULT(call); \
        if (dtrain__fault_ != 0) { \
            errno = dtrain__fault_; \
            return -1; \
        } \
    } while (0)

static DTRAIN__NOINLINE int dtrain__file_sys_open(int directory, const char *name, int flags)
{
    int fd;
    do {
        errno = DTRAIN__FILE_FAULT("open");
        fd = errno == 0 ? dtrain__os_open(directory, name, flags) : -1;
    } while (fd < 0 && errno == EINTR);
    return fd;
}

/* Makes an empty file beside one that it will replace. beside: out, its name. */
static int dtrain__file_sys_open_beside(int directory, const char *name, char beside[256])
{
    DTRAIN__FILE_TRY("open");
    return dtrain__os_open_beside(directory, name, beside, 256);
}

static int dtrain__file_sys_stat(int fd, dtrain__os_facts *facts)
{
    DTRAIN__FILE_TRY("stat");
    return dtrain__os_look(fd, facts);
}

/* follow 0: gives the facts of a link itself. */
static int dtrain__file_sys_stat_at(int directory, const char *name, dtrain__os_facts *facts, int follow)
{
    DTRAIN__FILE_TRY("stat");
    return dtrain__os_look_at(directory, name, facts, follow);
}

static ssize_t dtrain__file_sys_pread(int fd, void *out, size_t bytes, uint64_t offset)
{
    DTRAIN__FILE_TRY("read");
    return dtrain__os_pread(fd, out, DTRAIN__FILE_LIMIT("read", bytes), offset);
}

static ssize_t dtrain__file_sys_write(int fd, const void *data, size_t bytes)
{
    DTRAIN__FILE_TRY("write");
    return dtrain__os_write(fd, data, DTRAIN__FILE_LIMIT("write", bytes));
}

static int dtrain__file_sys_sync(int fd)
{
    DTRAIN__FILE_TRY("sync");
    return dtrain__os_sync(fd);
}

static int dtrain__file_sys_rename(int from_directory, const char *from, int to_directory, const char *to)
{
    DTRAIN__FILE_TRY("rename");
    return dtrain__os_rename(from_directory, from, to_directory, to);
}

static DTRAIN__NOINLINE int dtrain__file_sys_unlink(int directory, const char *name, int is_directory)
{
    DTRAIN__FILE_TRY("unlink");
    return dtrain__os_unlink(directory, name, is_directory);
}

static int dtrain__file_sys_mkdir(int directory, const char *name)
{
    DTRAIN__FILE_TRY("mkdir");
    return dtrain__os_mkdir(directory, name);
}

/* Locks or unlocks a range of a file without waiting. */
static int dtrain__file_sys_lock(int fd, dtrain__os_locking what, dtrain__os_range *range)
{
    DTRAIN__FILE_TRY("lock");
    return dtrain__os_lock_range(fd, what, range);
}

static DTRAIN__NOINLINE int dtrain__file_sys_close(int fd)
{
    int result = dtrain__os_close(fd);
    DTRAIN__FILE_TRY("close");
    return result;
}

static dtrain__os_list *dtrain__file_sys_list(int fd)
{
    int fault = DTRAIN__FILE_FAULT("list");
    errno = fault;
    return fault == 0 ? dtrain__os_list_begin(fd) : NULL;
}

/* Maps a file for reading. Returns NULL with errno if that is not possible. */
static void *dtrain__file_sys_map(int fd, size_t bytes)
{
    int fault = DTRAIN__FILE_FAULT("map");
    errno = fault;
    return fault == 0 ? dtrain__os_map(fd, bytes) : NULL;
}

/* ---- reading ---- */

static DTRAIN__NOINLINE void dtrain__file_close(int fd)
{
    if (fd >= 0)
        dtrain__file_sys_close(fd);
}

/* Returns whether a name is there, a link to nothing too. */
static int dtrain__file_is_there(int directory, const char *name)
{
    dtrain__os_facts there;
    return dtrain__file_sys_stat_at(directory, name, &there, 0) == 0 || errno != ENOENT;
}

/* Says why a name could not be opened. */
static const char *dtrain__file_why(int directory, const char *name, int error)
{
    return error == ENOENT && dtrain__file_is_there(directory, name)
               ? "it is a link, and the file that it leads to is missing: fetch that file again, or remove the link"
               : dtrain__os_error_text(error);
}

/* Opens a directory; the name "." opens that of the descriptor again. */
static dtrain_status dtrain__file_open_directory(int *fd, int directory, const char *name, const char *what)
{
    *fd = dtrain__file_sys_open(directory, name, DTRAIN__OS_DIRECTORY);
    if (*fd >= 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_IO, "%s: cannot open the directory \"%s\": %s", what, name,
                        dtrain__file_why(directory, name, errno));
}

/* Gives the size of an open file. The file must be a regular one. */
static dtrain_status dtrain__file_size(int fd, uint64_t *bytes, const char *name, const char *what)
{
    dtrain__os_facts facts;
    if (dtrain__file_sys_stat(fd, &facts) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "%s: cannot look at \"%s\": %s", what, name,
                            dtrain__os_error_text(errno));
    if (facts.kind != DTRAIN__OS_IS_FILE)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "%s: \"%s\" is not a regular file, and others cannot be read at any place: copy it to one",
                            what, name);
    *bytes = facts.bytes;
    return DTRAIN_OK;
}

/* Opens a regular file for reading and gives its size. */
static dtrain_status dtrain__file_open(int *fd, uint64_t *bytes, int directory, const char *name, const char *what)
{
    *fd = dtrain__file_sys_open(directory, name, DTRAIN__OS_READ);
    if (*fd < 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "%s: cannot open \"%s\": %s", what, name,
                            dtrain__file_why(directory, name, errno));
    dtrain_status status = dtrain__file_size(*fd, bytes, name, what);
    if (status != DTRAIN_OK) {
        dtrain__file_close(*fd);
        *fd = -1;
    }
    return status;
}

/* Reads exactly `bytes` bytes from offset on. */
static dtrain_status dtrain__file_read_at(int fd, void *out, uint64_t bytes, uint64_t offset, const char *name,
                                          const char *what)
{
    unsigned char *to = (unsigned char *)out;
    while (bytes > 0) {
        ssize_t n =
            dtrain__file_sys_pread(fd, to, bytes < DTRAIN__FILE_MOST ? (size_t)bytes : DTRAIN__FILE_MOST, offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return dtrain__fail(NULL, DTRAIN_ERR_IO, "%s: cannot read \"%s\" at byte %llu: %s", what, name,
                                (unsigned long long)offset, dtrain__os_error_text(errno));
        if (n == 0)
            return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                                "%s: \"%s\" ends at byte %llu or before, at least %llu bytes short: it was cut after "
                                "it was opened",
                                what, name, (unsigned long long)offset, (unsigned long long)bytes);
        to += n;
        offset += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return DTRAIN_OK;
}

/* Reads a text of `bytes` bytes from an offset on. Memory grows with the bytes read, since a file may claim gigabytes
 * and hold none. A text has no zero byte, but holes read as zeros: reading stops after the first one.
 *
 *   data   out: free it with dtrain__free, also after an error
 *   have   out: the number of bytes read */
static dtrain_status dtrain__file_read_text(int fd, uint64_t offset, uint64_t bytes, dtrain_allocator *allocator,
                                            unsigned char **data, size_t *have, const char *name, const char *what)
{
    const unsigned char *zero = NULL;
    dtrain_status status = DTRAIN_OK;
    *data = NULL;
    *have = 0;
    while (status == DTRAIN_OK && zero == NULL && (*have < bytes || *data == NULL)) {
        uint64_t wanted = *have > 0 ? 2 * (uint64_t)*have : 1 << 18;
        wanted = wanted < bytes ? wanted : bytes > 0 ? bytes : 1;
        void *larger = wanted <= SIZE_MAX ? dtrain__resize(allocator, *data, (size_t)wanted) : NULL;
        if (larger == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for the %llu bytes of \"%s\"", what,
                                (unsigned long long)bytes, name);
        *data = (unsigned char *)larger;
        wanted = wanted < bytes ? wanted : bytes;
        status = dtrain__file_read_at(fd, *data + *have, wanted - *have, offset + *have, name, what);
        zero = status == DTRAIN_OK ? (const unsigned char *)memchr(*data + *have, 0, (size_t)wanted - *have) : NULL;
        *have = zero != NULL ? (size_t)(zero - *data) + 1 : (size_t)wanted;
    }
    return status;
}

/* Reads a whole text file of at most `most` bytes into memory of the allocator. Free *data with dtrain__free. */
static dtrain_status dtrain__file_read_all(int directory, const char *name, uint64_t most, dtrain_allocator *allocator,
                                           void **data, size_t *bytes, const char *what)
{
    uint64_t size = 0;
    size_t have = 0;
    unsigned char *text = NULL;
    int fd;
    *data = NULL;
    *bytes = 0;
    dtrain_status status = dtrain__file_open(&fd, &size, directory, name, what);
    if (status != DTRAIN_OK)
        return status;
    if (size > most)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT, "%s: \"%s\" has %llu bytes, expected at most %llu", what, name,
                              (unsigned long long)size, (unsigned long long)most);
    if (status == DTRAIN_OK)
        status = dtrain__file_read_text(fd, 0, size, allocator, &text, &have, name, what);
    if (status == DTRAIN_OK && have > 0 && text[have - 1] == 0)
        status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                              "%s: \"%s\" is not a text: its byte %zu of %llu is zero; it was damaged, or a part was "
                              "never written",
                              what, name, have - 1, (unsigned long long)size);
    dtrain__file_close(fd);
    if (status != DTRAIN_OK) {
        dtrain__free(allocator, text);
        return status;
    }
    *data = text;
    *bytes = have;
    return DTRAIN_OK;
}

/* ---- writing ---- */

/* Writes all bytes at the descriptor's offset; returns 0 or an errno. */
static int dtrain__file_write_all(int fd, const void *data, size_t bytes)
{
    const unsigned char *from = (const unsigned char *)data;
    dtrain__os_signals signals;
    int error = 0;
    dtrain__os_hold_signals(&signals);
    while (bytes > 0 && error == 0) {
        ssize_t n = dtrain__file_sys_write(fd, from, bytes < DTRAIN__FILE_MOST ? bytes : DTRAIN__FILE_MOST);
        if (n < 0 && errno != EINTR)
            error = errno;
        else if (n == 0)
            error = EIO; /* no system does this, but an endless loop would be worse */
        from += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    dtrain__os_release_signals(&signals, error);
    return error;
}

static int dtrain__file_sync(int fd)
{
    int result;
    do
        result = dtrain__file_sys_sync(fd);
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

/* Syncs a directory. Some file systems return EINVAL, as they sync entries by themselves. */
static int dtrain__file_sync_directory(int fd)
{
    int error = dtrain__file_sync(fd);
    return error == EINVAL || error == ENOTSUP ? 0 : error;
}

/* ---- names ---- */

/* Returns whether a name from a file is plain: on every system it names an entry of the directory itself. It has no
 * separator, drive or control character, is not "." or "..", and has at most 255 bytes. */
static int dtrain__file_plain_name(const char *name, size_t length)
{
    if (length == 0 || length > 255 || (length <= 2 && name[0] == '.' && name[length - 1] == '.'))
        return 0;
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f || name[i] == '/' || name[i] == '\\' || name[i] == ':')
            return 0;
    return 1;
}

/* Opens the directory that holds a path's last part. last: out, points into path. A path must not end in a slash. */
static dtrain_status dtrain__file_open_parent(int *fd, const char **last, const char *path, const char *what)
{
    const char *slash = strrchr(path, '/');
    char parent[4096];
    size_t length = slash == NULL ? 0 : slash == path ? 1 : (size_t)(slash - path);
    *last = slash == NULL ? path : slash + 1;
    if (length >= sizeof parent || **last == '\0')
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the path \"%.400s\" %s", what, path,
                            **last == '\0' ? "ends without a name: add that of the file"
                                           : "is longer than the 4095 bytes that are possible");
    memcpy(parent, path, length);
    parent[length] = '\0';
    return dtrain__file_open_directory(fd, DTRAIN__FILE_HERE, length > 0 ? parent : ".", what);
}

/* ---- replacing ---- */

/* A new file, written beside the place that it will take. */
typedef struct dtrain__file_temp {
    int directory; /* not owned */
    int fd;        /* -1: none */
    const char *what;
    const char *name; /* of the place; not owned */
    char temporary[256];
} dtrain__file_temp;

static dtrain_status dtrain__file_temp_fail(dtrain__file_temp *temp, const char *step, int error)
{
    return dtrain__fail(NULL, error == ENOMEM ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_IO,
                        "%s: cannot %s \"%s\": %s; what was there before is unchanged", temp->what, step, temp->name,
                        dtrain__os_error_text(error));
}

/* Refuses a place that holds something other than a file, before gigabytes are written. The rename would fail, or
 * replace a device or a pipe by a file. */
static dtrain_status dtrain__file_place(int directory, const char *name, const char *what)
{
    dtrain__os_facts facts;
    if (dtrain__file_sys_stat_at(directory, name, &facts, 0) != 0)
        return errno == ENOENT ? DTRAIN_OK
                               : dtrain__fail(NULL, DTRAIN_ERR_IO, "%s: cannot look at \"%s\": %s", what, name,
                                              dtrain__os_error_text(errno));
    if (facts.kind == DTRAIN__OS_IS_FILE)
        return DTRAIN_OK;
    if (facts.kind == DTRAIN__OS_IS_LINK && (dtrain__file_sys_stat_at(directory, name, &facts, 1) != 0 ||
                                             facts.kind == DTRAIN__OS_IS_FILE || facts.kind == DTRAIN__OS_IS_DIRECTORY))
        return DTRAIN_OK; /* only the link is replaced */
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: \"%s\" is %s", what, name,
                        facts.kind == DTRAIN__OS_IS_DIRECTORY
                            ? "a directory: give the name of a file"
                            : "a device or a pipe, which a file would replace: write to its descriptor, or give "
                              "the name of a file");
}

/* Makes an empty file beside `name` in a directory. Both must stay valid until dtrain__file_temp_end. */
static dtrain_status dtrain__file_temp_begin(dtrain__file_temp *temp, int directory, const char *name, const char *what)
{
    temp->directory = directory;
    temp->name = name;
    temp->what = what;
    do
        temp->fd = dtrain__file_sys_open_beside(directory, name, temp->temporary);
    while (temp->fd < 0 && errno == EINTR);
    if (temp->fd >= 0)
        return DTRAIN_OK;
    return dtrain__file_temp_fail(temp, "make a file beside", errno);
}

/* A sink for dtrain_safetensors_write. user is a dtrain__file_temp. */
static dtrain_status dtrain__file_temp_write(void *user, const void *data, size_t bytes)
{
    dtrain__file_temp *temp = (dtrain__file_temp *)user;
    int error = dtrain__file_write_all(temp->fd, data, bytes);
    return error == 0 ? DTRAIN_OK : dtrain__file_temp_fail(temp, "write", error);
}

/* Finishes a new file: syncs it, unless no_sync, and moves it into its place. After an error it removes the file. If
 * the last step, syncing the directory, fails, the new file is in place but may be lost after a power failure.
 *
 *   status   how the writing ended */
static dtrain_status dtrain__file_temp_end(dtrain__file_temp *temp, dtrain_status status, int no_sync)
{
    int error = status == DTRAIN_OK && !no_sync ? dtrain__file_sync(temp->fd) : 0;
    if (error != 0)
        status = dtrain__file_temp_fail(temp, "sync", error);
    int closed = dtrain__file_sys_close(temp->fd);
    if (status == DTRAIN_OK &&
        (closed != 0 || dtrain__file_sys_rename(temp->directory, temp->temporary, temp->directory, temp->name) != 0))
        status = dtrain__file_temp_fail(temp, "move into place", errno);
    if (status != DTRAIN_OK) {
        dtrain__file_sys_unlink(temp->directory, temp->temporary, 0);
        return status;
    }
    error = no_sync ? 0 : dtrain__file_sync_directory(temp->directory);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "%s: \"%s\" is in place, but its directory did not reach the disk: %s",
                            temp->what, temp->name, dtrain__os_error_text(error));
    return DTRAIN_OK;
}

/* Writes a small file in one piece. */
static dtrain_status dtrain__file_put(int directory, const char *name, const void *data, size_t bytes, int no_sync,
                                      const char *what)
{
    dtrain__file_temp temp;
    dtrain_status status = dtrain__file_temp_begin(&temp, directory, name, what);
    return status == DTRAIN_OK ? dtrain__file_temp_end(&temp, dtrain__file_temp_write(&temp, data, bytes), no_sync)
                               : status;
}

/* Calls visit with each name of a directory except . and .., unsorted, until visit returns something other than 0.
 * Returns that, or an errno, or 0. */
static int dtrain__file_list(int directory, int (*visit)(void *user, const char *name), void *user)
{
    int fd = dtrain__file_sys_open(directory, ".", DTRAIN__OS_DIRECTORY), error;
    dtrain__os_list *list = fd >= 0 ? dtrain__file_sys_list(fd) : NULL;
    const char *entry;
    if (list == NULL) {
        error = errno;
        dtrain__file_close(fd);
        return error;
    }
    do {
        errno = 0;
        entry = dtrain__os_list_next(list);
        error = entry == NULL ? errno : 0;
        if (entry != NULL && strcmp(entry, ".") != 0 && strcmp(entry, "..") != 0)
            error = visit(user, entry);
    } while (entry != NULL && error == 0);
    dtrain__os_list_end(list);
    return error;
}

static int dtrain__file_remove_one(void *user, const char *name)
{
    /* errors are ignored: the directory is then not empty, and its removal fails */
    dtrain__file_sys_unlink(*(const int *)user, name, 0);
    return 0;
}

/* Removes a directory that holds only files. Returns 0 or an errno; ENOENT: there is no such directory. */
static int dtrain__file_remove_directory(int directory, const char *name)
{
    int fd = dtrain__file_sys_open(directory, name, DTRAIN__OS_DIRECTORY | DTRAIN__OS_NO_LINK), error = 0;
    if (fd < 0)
        return errno;
    for (int round = 0; round < 4; round++) { /* some systems skip entries if others are removed while they list */
        error = dtrain__file_list(fd, dtrain__file_remove_one, &fd);
        if (error == 0 && dtrain__file_sys_unlink(directory, name, 1) != 0)
            error = errno;
        if (error != ENOTEMPTY && error != EEXIST)
            break;
    }
    dtrain__file_close(fd);
    return error;
}

#endif
