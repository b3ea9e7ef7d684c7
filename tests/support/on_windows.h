/* What tests need of POSIX on Windows: tests/interop/windows.sh includes it before each. Ranks that are processes
 * elsewhere are threads here, as there is no fork; see processes.h. What a test needs beyond this, such as a killed
 * process, keeps it off Windows. */
#ifndef DTRAIN_TEST_ON_WINDOWS_H
#define DTRAIN_TEST_ON_WINDOWS_H
#define _WIN32_WINNT 0x0A00
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#define __USE_MINGW_ANSI_STDIO 1
#include <winsock2.h>
#include <ws2tcpip.h>
#include <windows.h>
/* these need the ones above */
#include <afunix.h>
#include <direct.h>
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <malloc.h>
#include <process.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SIGKILL 9
#define SIGCONT 18
#define SIGSTOP 19
#define SIGPIPE 13
#define WNOHANG 1
#define O_CLOEXEC 0
#define O_NONBLOCK 0x4000
#define F_SETFL 4
#define F_GETFL 3
#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_SHARED 1
#define MAP_ANONYMOUS 0x20
#define MAP_FAILED ((void *)-1)
#define MSG_DONTWAIT 0
#define MSG_NOSIGNAL 0
#define _SC_PAGESIZE 30
#define _SC_NPROCESSORS_ONLN 84

__attribute__((constructor(101))) static void windows_begin(void)
{
    WSADATA about;
    WSAStartup(MAKEWORD(2, 2), &about);
    _fmode = _O_BINARY; /* of files that fopen opens */
}

/* Blocks that posix_memalign gives are freed as others are. */
static inline void *windows_calloc(size_t count, size_t bytes)
{
    void *block = count == 0 || bytes <= SIZE_MAX / count ? _aligned_malloc(count * bytes + 1, 64) : NULL;
    if (block != NULL)
        memset(block, 0, count * bytes);
    return block;
}

static inline int posix_memalign(void **block, size_t align, size_t bytes)
{
    *block = _aligned_malloc(bytes, align > 64 ? align : 64);
    return *block != NULL ? 0 : ENOMEM;
}

#define malloc(bytes) _aligned_malloc((bytes) + 1, 64)
#define calloc(count, bytes) windows_calloc(count, bytes)
#define realloc(block, bytes) _aligned_realloc(block, (bytes) + 1, 64)
#define free(block) _aligned_free(block)

static inline int setenv(const char *name, const char *value, int overwrite)
{
    return overwrite || getenv(name) == NULL ? _putenv_s(name, value) : 0;
}

static inline int unsetenv(const char *name)
{
    return _putenv_s(name, "");
}

static inline long sysconf(int what)
{
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return what == _SC_PAGESIZE ? (long)info.dwPageSize : (long)info.dwNumberOfProcessors;
}

/* The tests' directories are in /tmp, which is on the drive of the current directory. */
static inline char *mkdtemp(char *path)
{
    static int serial;
    _mkdir("/tmp");
    snprintf(path + strlen(path) - 6, 7, "%02d%04x", serial++ % 100, (unsigned)GetCurrentProcessId() & 0xffff);
    return _mkdir(path) == 0 ? path : NULL;
}

#define mkdir(path, mode) _mkdir(path)

static inline void *mmap(void *at, size_t bytes, int access, int flags, int fd, int64_t offset)
{
    (void)at, (void)access, (void)flags, (void)fd, (void)offset;
    return VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

static inline int munmap(void *at, size_t bytes)
{
    (void)bytes;
    return VirtualFree(at, 0, MEM_RELEASE) ? 0 : -1;
}

/* The commands of tests are: rm -rf 'PATH', or without quotes. */
static inline int windows_system(const char *command)
{
    char line[1100] = "rmdir /s /q \"";
    size_t used = strlen(line);
    if (strncmp(command, "rm -rf ", 7) != 0)
        return system(command);
    for (const char *at = command + 7; *at != 0 && used + 3 < sizeof line; at++)
        if (*at != '\'')
            line[used++] = *at == '/' ? '\\' : *at;
    memcpy(line + used, "\"", 2);
    system(line);
    return 0;
}

#define system(command) windows_system(command)

/* A descriptor may be a socket. */
static inline int windows_close(int fd)
{
    return closesocket((SOCKET)fd) == 0 ? 0 : _close(fd);
}

#define close(fd) windows_close(fd)

static inline int fcntl(int fd, int command, ...)
{
    u_long yes = 1;
    return command == F_SETFL ? ioctlsocket((SOCKET)fd, (long)FIONBIO, &yes) : 0;
}

static inline int poll(struct pollfd *fds, unsigned long count, int ms)
{
    return WSAPoll(fds, count, ms);
}

/* Over TCP on loopback. */
static inline int socketpair(int family, int type, int protocol, int two[2])
{
    struct sockaddr_in at;
    int bytes = sizeof at;
    SOCKET listener = socket(AF_INET, SOCK_STREAM, 0);
    (void)family, (void)type, (void)protocol;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&at, bytes) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&at, &bytes) != 0)
        return -1;
    two[0] = (int)socket(AF_INET, SOCK_STREAM, 0);
    int good = connect((SOCKET)two[0], (struct sockaddr *)&at, bytes) == 0;
    two[1] = (int)accept(listener, NULL, NULL);
    closesocket(listener);
    return good && two[1] >= 0 ? 0 : -1;
}

#endif
