/* ---- >>os windows files ----
 * Files, directories and locks of Windows. Names are UTF-8 outside and UTF-16 in calls of the system. Files are opened
 * so that others may rename and remove them meanwhile, as POSIX has it. */
#ifndef DTRAIN__OS_WINDOWS_FILES
#define DTRAIN__OS_WINDOWS_FILES
#include "os_windows.c"
#ifdef _WIN32

#define DTRAIN__OS_HERE (-100) /* stands for the current directory */
#define DTRAIN__OS_WIDE 4096   /* characters of a path */
#define DTRAIN__OS_SHARE (FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE)

static HANDLE dtrain__os_handle(int fd)
{
    return fd >= 0 ? (HANDLE)_get_osfhandle(fd) : INVALID_HANDLE_VALUE;
}

/* Writes the whole path of a name in a directory, in the form that may have more than 260 characters. Returns 0 or -1
 * with errno. */
static int dtrain__os_path(int directory, const char *name, wchar_t out[DTRAIN__OS_WIDE])
{
    wchar_t wide[DTRAIN__OS_WIDE], full[DTRAIN__OS_WIDE];
    DWORD length = 0;
    if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, name, -1, wide, DTRAIN__OS_WIDE - 8) <= 0) {
        errno = GetLastError() == ERROR_INSUFFICIENT_BUFFER ? ENAMETOOLONG : ENOENT;
        return -1;
    }
    for (wchar_t *at = wide; *at != 0; at++)
        *at = *at == L'/' ? L'\\' : *at;
    if (directory == DTRAIN__OS_HERE) {
        length = GetFullPathNameW(wide, DTRAIN__OS_WIDE - 8, full, NULL);
    } else {
        length = GetFinalPathNameByHandleW(dtrain__os_handle(directory), full, DTRAIN__OS_WIDE - 8, 0);
        if (length > 0 && length + wcslen(wide) < DTRAIN__OS_WIDE - 8 && wcscmp(wide, L".") != 0) {
            wcscat(full, full[length - 1] == L'\\' ? L"" : L"\\");
            wcscat(full, wide);
        }
    }
    if (length == 0)
        return dtrain__os_failed();
    if (length >= DTRAIN__OS_WIDE - 8) {
        errno = ENAMETOOLONG;
        return -1;
    }
    out[0] = 0;
    if (full[1] == L':')
        wcscpy(out, L"\\\\?\\");
    wcscat(out, full);
    return 0;
}

static int dtrain__os_is_link(DWORD attributes)
{
    return (attributes & FILE_ATTRIBUTE_REPARSE_POINT) != 0;
}

/* Checks what was opened. Returns 0 or an errno. */
static int dtrain__os_check(HANDLE file, int flags)
{
    BY_HANDLE_FILE_INFORMATION about;
    if (GetFileType(file) != FILE_TYPE_DISK || !GetFileInformationByHandle(file, &about))
        return flags & DTRAIN__OS_DIRECTORY ? ENOTDIR : 0;
    int directory = (about.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
    if ((flags & DTRAIN__OS_NO_LINK) && dtrain__os_is_link(about.dwFileAttributes))
        return ELOOP;
    if ((flags & DTRAIN__OS_DIRECTORY) && !directory)
        return ENOTDIR;
    return directory && (flags & 3) != DTRAIN__OS_READ ? EISDIR : 0;
}

/* Opens a file, with the flags of DTRAIN__OS_READ and its like. Returns a descriptor, or -1 with errno. */
static int dtrain__os_open(int directory, const char *name, int flags)
{
    const DWORD modes[] = {GENERIC_READ, GENERIC_WRITE, GENERIC_READ | GENERIC_WRITE};
    DWORD access = modes[flags & 3];
    DWORD how = flags & DTRAIN__OS_NEW ? CREATE_NEW : flags & DTRAIN__OS_CREATE ? OPEN_ALWAYS : OPEN_EXISTING;
    DWORD kind = FILE_FLAG_BACKUP_SEMANTICS | (flags & DTRAIN__OS_NO_LINK ? FILE_FLAG_OPEN_REPARSE_POINT : 0);
    wchar_t path[DTRAIN__OS_WIDE];
    HANDLE file = INVALID_HANDLE_VALUE;
    if (dtrain__os_path(directory, name, path) != 0)
        return -1;
    if (flags & DTRAIN__OS_DIRECTORY) /* to sync it takes the right to change it */
        file = CreateFileW(path, access | FILE_ADD_FILE, DTRAIN__OS_SHARE, NULL, how, kind, NULL);
    if (file == INVALID_HANDLE_VALUE)
        file = CreateFileW(path, access, DTRAIN__OS_SHARE, NULL, how, kind, NULL);
    if (file == INVALID_HANDLE_VALUE)
        return dtrain__os_failed();
    int error = dtrain__os_check(file, flags);
    int fd = error == 0 ? _open_osfhandle((intptr_t)file, _O_BINARY | _O_NOINHERIT) : -1;
    error = error == 0 && fd < 0 ? EMFILE : error;
    if (fd >= 0)
        return fd;
    CloseHandle(file);
    errno = error;
    return -1;
}

static int dtrain__os_close(int fd)
{
    return _close(fd);
}

static int dtrain__os_tell(HANDLE file, dtrain__os_facts *facts, int follow)
{
    BY_HANDLE_FILE_INFORMATION about;
    memset(facts, 0, sizeof *facts);
    facts->kind = DTRAIN__OS_IS_OTHER;
    if (GetFileType(file) != FILE_TYPE_DISK)
        return file != INVALID_HANDLE_VALUE ? 0 : dtrain__os_failed();
    if (!GetFileInformationByHandle(file, &about))
        return dtrain__os_failed();
    facts->kind = !follow && dtrain__os_is_link(about.dwFileAttributes)      ? DTRAIN__OS_IS_LINK
                  : (about.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) != 0 ? DTRAIN__OS_IS_DIRECTORY
                                                                             : DTRAIN__OS_IS_FILE;
    facts->bytes = (uint64_t)about.nFileSizeHigh << 32 | about.nFileSizeLow;
    facts->changed_s = dtrain__os_file_time(about.ftLastWriteTime) / 10000000;
    return 0;
}

static int dtrain__os_look(int fd, dtrain__os_facts *facts)
{
    return dtrain__os_tell(dtrain__os_handle(fd), facts, 1);
}

/* follow 0: gives the facts of a link itself. */
static int dtrain__os_look_at(int directory, const char *name, dtrain__os_facts *facts, int follow)
{
    DWORD kind = FILE_FLAG_BACKUP_SEMANTICS | (follow ? 0 : FILE_FLAG_OPEN_REPARSE_POINT);
    wchar_t path[DTRAIN__OS_WIDE];
    if (dtrain__os_path(directory, name, path) != 0)
        return -1;
    HANDLE file = CreateFileW(path, FILE_READ_ATTRIBUTES, DTRAIN__OS_SHARE, NULL, OPEN_EXISTING, kind, NULL);
    if (file == INVALID_HANDLE_VALUE)
        return dtrain__os_failed();
    int result = dtrain__os_tell(file, facts, follow), error = errno;
    CloseHandle(file);
    errno = error;
    return result;
}

static ssize_t dtrain__os_read(int fd, void *out, size_t bytes)
{
    DWORD moved = 0;
    if (ReadFile(dtrain__os_handle(fd), out, (DWORD)bytes, &moved, NULL) || GetLastError() == ERROR_HANDLE_EOF ||
        GetLastError() == ERROR_BROKEN_PIPE)
        return (ssize_t)moved;
    return dtrain__os_failed();
}

/* Windows moves the file's offset: it is put back. */
static ssize_t dtrain__os_pread(int fd, void *out, size_t bytes, uint64_t offset)
{
    HANDLE file = dtrain__os_handle(fd);
    OVERLAPPED at;
    LARGE_INTEGER zero, before;
    DWORD moved = 0;
    memset(&at, 0, sizeof at);
    at.Offset = (DWORD)offset;
    at.OffsetHigh = (DWORD)(offset >> 32);
    zero.QuadPart = 0;
    int known = SetFilePointerEx(file, zero, &before, FILE_CURRENT);
    int good = ReadFile(file, out, (DWORD)bytes, &moved, &at) || GetLastError() == ERROR_HANDLE_EOF;
    ssize_t result = good ? (ssize_t)moved : dtrain__os_failed();
    if (known)
        SetFilePointerEx(file, before, NULL, FILE_BEGIN);
    return result;
}

static ssize_t dtrain__os_write(int fd, const void *data, size_t bytes)
{
    DWORD moved = 0;
    return WriteFile(dtrain__os_handle(fd), data, (DWORD)bytes, &moved, NULL) ? (ssize_t)moved : dtrain__os_failed();
}

/* Syncs to the disk itself. Not every file system syncs directories; they write their entries by themselves. */
static int dtrain__os_sync(int fd)
{
    dtrain__os_facts facts;
    if (FlushFileBuffers(dtrain__os_handle(fd)) ||
        (dtrain__os_look(fd, &facts) == 0 && facts.kind == DTRAIN__OS_IS_DIRECTORY))
        return 0;
    return dtrain__os_failed();
}

/* FILE_RENAME_INFO of FileRenameInfoEx, which older headers lack. */
typedef struct dtrain__os_rename_info {
    DWORD flags; /* 1: replaces a file; 2: also one that is open, as POSIX does, since Windows 10 1607 */
    HANDLE directory;
    DWORD bytes;
    wchar_t name[DTRAIN__OS_WIDE];
} dtrain__os_rename_info;

static int dtrain__os_rename_posix(const wchar_t *from, const wchar_t *to)
{
    dtrain__os_rename_info info;
    HANDLE file = CreateFileW(from, DELETE | SYNCHRONIZE, DTRAIN__OS_SHARE, NULL, OPEN_EXISTING,
                              FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT, NULL);
    if (file == INVALID_HANDLE_VALUE)
        return 0;
    info.flags = 1 | 2;
    info.directory = NULL;
    info.bytes = (DWORD)(wcslen(to) * sizeof(wchar_t));
    wcscpy(info.name, to);
    int good = SetFileInformationByHandle(file, (FILE_INFO_BY_HANDLE_CLASS)22, &info, sizeof info); /* RenameInfoEx */
    CloseHandle(file);
    return good;
}

/* Replaces what has the name, in one step; an empty directory in two. */
static int dtrain__os_rename(int from_directory, const char *from, int to_directory, const char *to)
{
    wchar_t source[DTRAIN__OS_WIDE], target[DTRAIN__OS_WIDE];
    if (dtrain__os_path(from_directory, from, source) != 0 || dtrain__os_path(to_directory, to, target) != 0)
        return -1;
    DWORD attributes = GetFileAttributesW(target), own = GetFileAttributesW(source);
    int both = attributes != INVALID_FILE_ATTRIBUTES && own != INVALID_FILE_ATTRIBUTES;
    if (both && (attributes & own & FILE_ATTRIBUTE_DIRECTORY) != 0 && !RemoveDirectoryW(target))
        return dtrain__os_failed();
    if (both && ((attributes ^ own) & FILE_ATTRIBUTE_DIRECTORY) != 0) {
        errno = own & FILE_ATTRIBUTE_DIRECTORY ? ENOTDIR : EISDIR;
        return -1;
    }
    if (dtrain__os_rename_posix(source, target) ||
        MoveFileExW(source, target, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH))
        return 0;
    return dtrain__os_failed();
}

static int dtrain__os_unlink(int directory, const char *name, int is_directory)
{
    wchar_t path[DTRAIN__OS_WIDE];
    DWORD flags = 1 | 2 | 16; /* delete, as POSIX does although it is open, also if it may not be written */
    BOOLEAN plainly = TRUE;
    if (dtrain__os_path(directory, name, path) != 0)
        return -1;
    HANDLE file = CreateFileW(path, DELETE | FILE_READ_ATTRIBUTES, DTRAIN__OS_SHARE, NULL, OPEN_EXISTING,
                              FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT, NULL);
    if (file == INVALID_HANDLE_VALUE)
        return dtrain__os_failed();
    int error = dtrain__os_check(file, is_directory ? DTRAIN__OS_DIRECTORY : DTRAIN__OS_WRITE);
    if (error == 0 && !SetFileInformationByHandle(file, (FILE_INFO_BY_HANDLE_CLASS)21, &flags, sizeof flags) &&
        !SetFileInformationByHandle(file, FileDispositionInfo, &plainly, sizeof plainly))
        error = dtrain__os_errno((int)GetLastError());
    CloseHandle(file);
    errno = error;
    return error == 0 ? 0 : -1;
}

static int dtrain__os_mkdir(int directory, const char *name)
{
    wchar_t path[DTRAIN__OS_WIDE];
    if (dtrain__os_path(directory, name, path) != 0)
        return -1;
    return CreateDirectoryW(path, NULL) ? 0 : dtrain__os_failed();
}

typedef struct dtrain__os_list {
    HANDLE find;
    int fd, first; /* first: found has the next entry already */
    WIN32_FIND_DATAW found;
    char name[3 * MAX_PATH + 1];
} dtrain__os_list;

/* Lists a directory. Takes ownership of the descriptor unless it returns NULL. */
static dtrain__os_list *dtrain__os_list_begin(int fd)
{
    wchar_t path[DTRAIN__OS_WIDE];
    dtrain__os_list *list = (dtrain__os_list *)malloc(sizeof *list);
    if (list == NULL || dtrain__os_path(fd, "*", path) != 0) {
        free(list);
        return NULL;
    }
    list->fd = fd;
    list->first = 1;
    list->find = FindFirstFileW(path, &list->found);
    if (list->find != INVALID_HANDLE_VALUE)
        return list;
    dtrain__os_failed();
    free(list);
    return NULL;
}

/* Returns the next name, or NULL: with errno unchanged after the last. */
static const char *dtrain__os_list_next(dtrain__os_list *list)
{
    if (!list->first && !FindNextFileW(list->find, &list->found)) {
        if (GetLastError() != ERROR_NO_MORE_FILES)
            dtrain__os_failed();
        return NULL;
    }
    list->first = 0;
    return dtrain__os_narrow(list->found.cFileName, list->name, sizeof list->name) ? list->name : "?";
}

static void dtrain__os_list_end(dtrain__os_list *list)
{
    FindClose(list->find);
    _close(list->fd);
    free(list);
}

/* Maps a file for reading. Returns NULL with errno if that is not possible. */
static void *dtrain__os_map(int fd, size_t bytes)
{
    HANDLE section = CreateFileMappingW(dtrain__os_handle(fd), NULL, PAGE_READONLY, 0, 0, NULL);
    void *memory = section != NULL ? MapViewOfFile(section, FILE_MAP_READ, 0, 0, bytes) : NULL;
    if (memory == NULL)
        dtrain__os_failed();
    if (section != NULL)
        CloseHandle(section);
    return memory;
}

static void dtrain__os_unmap(void *memory, size_t bytes)
{
    (void)bytes;
    UnmapViewOfFile(memory);
}

/* Writes the path without links, "." and "..", with slashes. Returns 0 if that is not possible. */
static int dtrain__os_real_path(const char *path, char real[DTRAIN__OS_PATH_BYTES])
{
    wchar_t wide[DTRAIN__OS_WIDE];
    int fd = dtrain__os_open(DTRAIN__OS_HERE, path, DTRAIN__OS_READ);
    DWORD length = GetFinalPathNameByHandleW(dtrain__os_handle(fd), wide, DTRAIN__OS_WIDE, 0);
    int good = fd >= 0 && length > 4 && length < DTRAIN__OS_WIDE &&
               dtrain__os_narrow(wide + 4, real, DTRAIN__OS_PATH_BYTES); /* after "\\?\" */
    for (char *at = real; good && *at != 0; at++)
        *at = *at == '\\' ? '/' : *at;
    if (fd >= 0)
        _close(fd);
    return good;
}

/* ---- locks ----
 * A lock of the process is made of the system's locks, which belong to an open file. Each process has a byte, at
 * DTRAIN__OS_LOCKS + its id. Every open file of the process that holds the lock has locked that byte for reading.
 * Whoever wants the lock first locks the byte before all those, the door. Then it looks whether another process's byte
 * is locked. These bytes lie beyond the file's end, since a locked byte cannot be read. The range's own place does not
 * count: a file has one such lock. */

#define DTRAIN__OS_LOCKS ((uint64_t)1 << 40)

/* Locks or unlocks bytes. Returns 0 or an errno, EAGAIN if it does not wait and another holds them. */
static int dtrain__os_lock_bytes(int fd, int lock, DWORD how, uint64_t begin, uint64_t bytes)
{
    OVERLAPPED at;
    memset(&at, 0, sizeof at);
    at.Offset = (DWORD)begin;
    at.OffsetHigh = (DWORD)(begin >> 32);
    DWORD low = (DWORD)bytes, high = (DWORD)(bytes >> 32);
    int good = lock ? LockFileEx(dtrain__os_handle(fd), how, 0, low, high, &at)
                    : UnlockFileEx(dtrain__os_handle(fd), 0, low, high, &at);
    return good ? 0 : dtrain__os_errno((int)GetLastError());
}

/* Returns EAGAIN if another process holds one of the bytes. */
static int dtrain__os_lock_try(int fd, uint64_t begin, uint64_t bytes)
{
    int error = bytes == 0
                    ? 0
                    : dtrain__os_lock_bytes(fd, 1, LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY, begin, bytes);
    if (error == 0 && bytes > 0)
        dtrain__os_lock_bytes(fd, 0, 0, begin, bytes);
    return error;
}

/* Handles a lock without waiting for its holder. Returns 0, or -1 with errno: EAGAIN if another holds it. */
static int dtrain__os_lock_range(int fd, dtrain__os_locking what, dtrain__os_range *range)
{
    uint64_t self = (uint64_t)dtrain__os_self(), own = DTRAIN__OS_LOCKS + self;
    if (what >= DTRAIN__OS_LOCK_OPEN) {
        errno = ENOTSUP;
        return -1;
    }
    int error = dtrain__os_lock_bytes(fd, 1, LOCKFILE_EXCLUSIVE_LOCK, DTRAIN__OS_LOCKS - 1, 1);
    if (error == 0) {
        error = dtrain__os_lock_try(fd, DTRAIN__OS_LOCKS, self);
        if (error == 0)
            error = dtrain__os_lock_try(fd, own + 1, (uint64_t)1 << 32);
        if (error == 0 && what == DTRAIN__OS_LOCK) {
            dtrain__os_lock_bytes(fd, 0, 0, own, 1);
            error = dtrain__os_lock_bytes(fd, 1, LOCKFILE_FAIL_IMMEDIATELY, own, 1);
        }
        dtrain__os_lock_bytes(fd, 0, 0, DTRAIN__OS_LOCKS - 1, 1);
    }
    if (what == DTRAIN__OS_LOOK && (error == 0 || error == EAGAIN)) {
        range->access = error == 0 ? DTRAIN__OS_UNLOCKED : DTRAIN__OS_FOR_WRITING;
        return 0;
    }
    errno = error;
    return error == 0 ? 0 : -1;
}

/* ---- signals: a write raises none ---- */

typedef struct dtrain__os_signals {
    int none;
} dtrain__os_signals;

static void dtrain__os_hold_signals(dtrain__os_signals *signals)
{
    signals->none = 0;
}

static void dtrain__os_release_signals(dtrain__os_signals *signals, int error)
{
    (void)signals;
    (void)error;
}

#endif
#endif
