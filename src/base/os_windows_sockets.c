/* ---- >>os windows sockets ----
 * Sockets of Windows, and what wakes a poll(): a datagram to a socket on loopback, since only sockets can be polled.
 * Sockets are non-blocking, and child processes do not inherit them. There are no unix sockets. */
#ifndef DTRAIN__OS_WINDOWS_SOCKETS
#define DTRAIN__OS_WINDOWS_SOCKETS
#include "os_windows.c"
#ifdef _WIN32

#define DTRAIN__OS_SOCKET(fd) ((SOCKET)(fd)) /* as the system takes it */

/* Starts the system's sockets. May be called again. */
static void dtrain__os_sockets(void)
{
    static uint32_t started;
    WSADATA about;
    if (DTRAIN__ATOMIC_LOAD(&started, ACQUIRE))
        return;
    WSAStartup(MAKEWORD(2, 2), &about);
    DTRAIN__ATOMIC_STORE(&started, 1u, RELEASE);
}

/* Returns why the last call of a socket failed, as an errno. */
static int dtrain__os_socket_error(void)
{
    return dtrain__os_errno(WSAGetLastError());
}

static void dtrain__os_hang_up(int fd)
{
    closesocket((SOCKET)fd);
}

static void dtrain__os_end_sending(int fd)
{
    shutdown((SOCKET)fd, SD_SEND);
}

static void dtrain__os_orphan(int on)
{
    (void)on; /* no process is forked */
}

static int dtrain__os_unconfirmed(int fd)
{
    (void)fd;
    return 0;
}

/* Makes a socket non-blocking. Returns 0 or an errno. */
static int dtrain__os_manners(int fd)
{
    u_long yes = 1;
    return ioctlsocket((SOCKET)fd, (long)FIONBIO, &yes) == 0 ? 0 : dtrain__os_socket_error();
}

/* Takes a new socket. Returns 0 or an errno. */
static int dtrain__os_socket_take(SOCKET made, int *fd)
{
    *fd = -1;
    if (made == INVALID_SOCKET)
        return dtrain__os_socket_error();
    int error = dtrain__os_manners((int)made);
    if (error == 0)
        *fd = (int)made;
    else
        closesocket(made);
    return error;
}

static int dtrain__os_socket_of(int family, int type, int *fd)
{
    dtrain__os_sockets();
    return dtrain__os_socket_take(
        WSASocketW(family, type, 0, NULL, 0, WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT), fd);
}

/* Makes a stream socket. Returns 0 or an errno. */
static int dtrain__os_socket(int family, int *fd)
{
    return family == AF_UNIX ? EAFNOSUPPORT : dtrain__os_socket_of(family, SOCK_STREAM, fd);
}

/* Starts a connection. Returns 0 or an errno. */
static int dtrain__os_connect(int fd, const struct sockaddr *to, socklen_t bytes)
{
    int error = connect((SOCKET)fd, to, bytes) == 0 ? 0 : dtrain__os_socket_error();
    return error == EWOULDBLOCK ? 0 : error;
}

/* Keeps others off the address. SO_REUSEADDR would let them take it; an old connection's address is free without. */
static void dtrain__os_reuse(int fd)
{
    BOOL yes = TRUE;
    setsockopt((SOCKET)fd, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, (const char *)&yes, sizeof yes);
}

static void dtrain__os_plain(int fd)
{
    (void)fd;
}

static void dtrain__os_congestion(int fd, int of)
{
    (void)fd;
    (void)of;
}

/* As on POSIX. The system asks ten times. */
static void dtrain__os_keep_alive(int fd, int seconds)
{
    ULONG settings[3] = {1, 1000, seconds > 10 ? (ULONG)seconds * 100 : 1000}; /* struct tcp_keepalive */
    DWORD bytes = 0;
    WSAIoctl((SOCKET)fd, _WSAIOW(IOC_VENDOR, 4), settings, sizeof settings, NULL, 0, &bytes, NULL, NULL);
}

static int64_t dtrain__os_unanswered_ms(int fd)
{
    (void)fd;
    return 0;
}

/* Accepts one connection. Returns 0, EAGAIN if there is none, or another errno. */
static int dtrain__os_accept(int listener, int *fd, struct sockaddr *peer, socklen_t *bytes)
{
    SOCKET made = accept((SOCKET)listener, peer, bytes);
    if (made != INVALID_SOCKET)
        SetHandleInformation((HANDLE)made, HANDLE_FLAG_INHERIT, 0);
    int error = dtrain__os_socket_take(made, fd);
    return error == EWOULDBLOCK || error == EINTR || error == ECONNABORTED || error == ECONNRESET ? EAGAIN : error;
}

/* Copies a listening socket that was inherited. Returns -1 if the number is not such a socket. Wine knows only the copy
 * as a socket. */
static int dtrain__os_inherit(int fd)
{
    int listens = 0, own = -1;
    socklen_t bytes = sizeof listens;
    WSAPROTOCOL_INFOW about;
    dtrain__os_sockets();
    if (WSADuplicateSocketW((SOCKET)fd, GetCurrentProcessId(), &about) != 0 ||
        dtrain__os_socket_take(WSASocketW(FROM_PROTOCOL_INFO, FROM_PROTOCOL_INFO, FROM_PROTOCOL_INFO, &about, 0,
                                          WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT),
                               &own) != 0)
        return -1;
    if (getsockopt((SOCKET)own, SOL_SOCKET, SO_ACCEPTCONN, (char *)&listens, &bytes) == 0 && listens)
        return own;
    dtrain__os_hang_up(own);
    return -1;
}

/* Sends without waiting. Returns the number of bytes sent; 0: none now; -1: the connection is broken (errno). */
static ssize_t dtrain__os_send(int fd, const void *data, size_t bytes, int more)
{
    int n = send((SOCKET)fd, (const char *)data, bytes < INT_MAX ? (int)bytes : INT_MAX, 0);
    (void)more;
    if (n >= 0)
        return n;
    errno = dtrain__os_socket_error();
    return errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS ? 0 : -1;
}

/* Receives without waiting. Returns as dtrain__os_send does; if the peer has closed in order, -1 with errno 0. */
static ssize_t dtrain__os_recv(int fd, void *data, size_t bytes)
{
    int n = recv((SOCKET)fd, (char *)data, bytes < INT_MAX ? (int)bytes : INT_MAX, 0);
    if (n > 0)
        return n;
    errno = n == 0 ? 0 : dtrain__os_socket_error();
    return errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

/* Waits until one of the sockets is ready, at most ms. Returns how many are. */
static int dtrain__os_poll(struct pollfd *fds, int count, int ms)
{
    int ready = count > 0 ? WSAPoll(fds, (ULONG)count, ms) : SOCKET_ERROR;
    if (ready == SOCKET_ERROR)
        Sleep(count > 0 && ms > 10 ? 10 : (DWORD)(ms > 0 ? ms : 0));
    return ready;
}

/* ---- what wakes a poll ---- */

/* Makes a socket that sends to a port of loopback, without waiting. Returns 0 or an errno. */
static int dtrain__os_pipe_end(int port, int *fd)
{
    struct sockaddr_in to;
    int error = dtrain__os_socket_of(AF_INET, SOCK_DGRAM, fd);
    memset(&to, 0, sizeof to);
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons((uint16_t)port);
    if (error == 0 && connect((SOCKET)*fd, (struct sockaddr *)&to, sizeof to) != 0) {
        error = dtrain__os_socket_error();
        dtrain__os_hang_up(*fd);
        *fd = -1;
    }
    return error;
}

static int dtrain__os_port(int fd, int peers)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    memset(&at, 0, sizeof at);
    if ((peers ? getpeername((SOCKET)fd, (struct sockaddr *)&at, &bytes)
               : getsockname((SOCKET)fd, (struct sockaddr *)&at, &bytes)) != 0)
        return 0;
    return ntohs(at.sin_port);
}

/* Returns how many descriptors this process may have open; 0: unknown. */
static long dtrain__os_most_files(void)
{
    return 0;
}

/* Makes what a pipe is elsewhere: a socket to poll, and one that wakes it. A stranger's datagram may wake it too, and
 * whoever waits looks again. Returns 0 or an errno. */
static int dtrain__os_pipe(int ends[2])
{
    struct sockaddr_in any;
    memset(&any, 0, sizeof any);
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ends[1] = -1;
    int error = dtrain__os_socket_of(AF_INET, SOCK_DGRAM, &ends[0]);
    if (error == 0 && bind((SOCKET)ends[0], (struct sockaddr *)&any, sizeof any) != 0)
        error = dtrain__os_socket_error();
    if (error == 0)
        error = dtrain__os_pipe_end(dtrain__os_port(ends[0], 0), &ends[1]);
    if (error != 0 && ends[0] >= 0) {
        dtrain__os_hang_up(ends[0]);
        ends[0] = -1;
    }
    return error;
}

/* Gives the number by which dtrain__os_pipe_open knows a pipe. Returns 0 if it has none. */
static int dtrain__os_pipe_number(int fd, uint64_t *number)
{
    *number = (uint64_t)dtrain__os_port(fd, 1);
    return *number != 0;
}

/* Opens a pipe of another process, to write to it. Returns -1 if that is not possible. */
static int dtrain__os_pipe_open(long process, int fd, uint64_t number)
{
    int own = -1;
    (void)process;
    (void)fd;
    if (number > 0 && number < 65536)
        dtrain__os_pipe_end((int)number, &own);
    return own;
}

/* Wakes whoever polls the pipe. */
static void dtrain__os_poke(int fd)
{
    send((SOCKET)fd, "", 1, 0);
}

static void dtrain__os_drain(int fd)
{
    char byte[4];
    for (int i = 0; i < 64 && recv((SOCKET)fd, byte, sizeof byte, 0) >= 0; i++)
        continue;
}

/* Sleeps until a pipe is written to, or ns have passed, and empties it. */
static void dtrain__os_rest(int fd, int64_t ns)
{
    struct pollfd watched = {(SOCKET)fd, POLLIN, 0};
    int ms = ns > 60000000000 ? 60000 : (int)((ns + 999999) / 1000000);
    if (dtrain__os_poll(&watched, 1, ms) > 0)
        dtrain__os_drain(fd);
}

/* Returns the system's adapters; free them. NULL: there are none. The library is loaded here, so that a program need
 * not link with it. */
static IP_ADAPTER_ADDRESSES *dtrain__os_adapters(void)
{
    ULONG(WINAPI * get)(ULONG family, ULONG flags, PVOID reserved, IP_ADAPTER_ADDRESSES * list, ULONG * room);
    ULONG room = 65536;
    HMODULE library = LoadLibraryW(L"iphlpapi.dll");
    FARPROC found = library != NULL ? GetProcAddress(library, "GetAdaptersAddresses") : NULL;
    IP_ADAPTER_ADDRESSES *list = (IP_ADAPTER_ADDRESSES *)malloc(room);
    memcpy(&get, &found, sizeof get);
    if (list != NULL && (get == NULL || get(AF_UNSPEC, 0, NULL, list, &room) != NO_ERROR)) {
        free(list);
        list = NULL;
    }
    if (library != NULL)
        FreeLibrary(library);
    return list;
}

/* Gives the address of the interface `name`, one of `family` if it can. Returns its bytes; 0: there is none. */
static socklen_t dtrain__os_interface(const char *name, int family, struct sockaddr_storage *out)
{
    IP_ADAPTER_ADDRESSES *list = dtrain__os_adapters();
    socklen_t bytes = 0;
    char own[256];
    int best = 0;
    for (IP_ADAPTER_ADDRESSES *at = list; at != NULL; at = at->Next) {
        if (!dtrain__os_narrow(at->FriendlyName, own, sizeof own) || strcmp(own, name) != 0)
            continue;
        for (IP_ADAPTER_UNICAST_ADDRESS *one = at->FirstUnicastAddress; one != NULL; one = one->Next) {
            int kind = one->Address.lpSockaddr->sa_family, rank = kind == family ? 2 : 1;
            if ((kind != AF_INET && kind != AF_INET6) || rank <= best)
                continue;
            bytes = one->Address.iSockaddrLength;
            memset(out, 0, sizeof *out);
            memcpy(out, one->Address.lpSockaddr, (size_t)bytes);
            best = rank;
        }
    }
    free(list);
    return bytes;
}

/* Gives one of this host's IP addresses, counted from 0. Returns its bytes; 0: there are no more. */
static socklen_t dtrain__os_host_address(int index, struct sockaddr_storage *out)
{
    IP_ADAPTER_ADDRESSES *list = dtrain__os_adapters();
    socklen_t bytes = 0;
    memset(out, 0, sizeof *out);
    for (IP_ADAPTER_ADDRESSES *at = list; at != NULL; at = at->Next)
        for (IP_ADAPTER_UNICAST_ADDRESS *one = at->FirstUnicastAddress; one != NULL && bytes == 0; one = one->Next) {
            int kind = one->Address.lpSockaddr->sa_family;
            if ((kind == AF_INET || kind == AF_INET6) && index-- == 0) {
                bytes = one->Address.iSockaddrLength;
                memcpy(out, one->Address.lpSockaddr, (size_t)bytes);
            }
        }
    free(list);
    return bytes;
}

/* ---- unix sockets: there are none ---- */

static int dtrain__os_same_user(int fd)
{
    (void)fd;
    return 0;
}

static void dtrain__os_socket_directory(char *out, size_t capacity)
{
    snprintf(out, capacity, "/dtrain");
}

static int dtrain__os_mkdir_private(const char *path)
{
    (void)path;
    errno = ENOTSUP;
    return -1;
}

static int dtrain__os_is_private(const char *path)
{
    (void)path;
    return 0;
}

static int dtrain__os_is_socket(const char *path)
{
    (void)path;
    return 0;
}

static int dtrain__os_lock_beside(const char *path)
{
    (void)path;
    return -1;
}

#endif
#endif
