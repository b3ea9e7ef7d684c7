/* ---- >>net ----
 * Sockets: non-blocking, close-on-exec, without SIGPIPE, and with names for texts. An address is "host:port",
 * "[address]:port", "unix:/path" or "unix:@name". A name is Linux's: it is no file, and ends with its listener. Only
 * two functions wait: dtrain__net_look_up asks the system's resolver for a host name, and dtrain__net_lock_beside waits
 * for a lock. */
#ifndef DTRAIN__NET
#define DTRAIN__NET
#include "../base/os.c"
#include "../base/status.c"
#include "../control/plane.c"

#define DTRAIN__MAX_ADDRESSES 8 /* per name */

typedef struct dtrain__address {
    union { /* any.sa_family says which; with casts instead, compilers could reorder the accesses */
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un local;
        struct sockaddr_storage storage;
    } at;
    socklen_t bytes;
} dtrain__address;

typedef struct dtrain__address_text {
    char text[DTRAIN__ADDRESS_BYTES];
} dtrain__address_text;

static dtrain__address_text dtrain__net_text(const dtrain__address *address)
{
    dtrain__address_text out;
    char host[128], port[16];
    int family = address->at.any.sa_family;
    if (address->bytes > 0 && family == AF_UNIX) {
        const char *path = address->at.local.sun_path;
        size_t bytes = address->bytes - offsetof(struct sockaddr_un, sun_path);
        int named = address->bytes > offsetof(struct sockaddr_un, sun_path), abstract = named && path[0] == 0;
        int most = abstract ? (int)bytes - 1 : 200;
        snprintf(out.text, sizeof out.text, "%s%.*s",
                 !named     ? "a unix socket"
                 : abstract ? "unix:@"
                            : "unix:",
                 most, named ? path + abstract : "");
    } else if (address->bytes == 0 || getnameinfo(&address->at.any, address->bytes, host, sizeof host, port,
                                                  sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        snprintf(out.text, sizeof out.text, "an unknown address");
    } else {
        snprintf(out.text, sizeof out.text, family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
    }
    return out;
}

/* Returns whether only processes of this host can have the address. */
static int dtrain__net_is_local(const dtrain__address *address)
{
    int family = address->at.any.sa_family;
    if (family == AF_INET)
        return (ntohl(address->at.v4.sin_addr.s_addr) >> 24) == 127;
    if (family == AF_INET6) {
        const struct in6_addr *v6 = &address->at.v6.sin6_addr;
        return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
    }
    return family == AF_UNIX;
}

/* Gives a socket's own address, or with peers 1 its peer's. Returns 0 or an errno. */
static int dtrain__net_end(int fd, int peers, dtrain__address *out)
{
    memset(out, 0, sizeof *out);
    out->bytes = (socklen_t)sizeof out->at.storage;
    return (peers ? getpeername(fd, &out->at.any, &out->bytes) : getsockname(fd, &out->at.any, &out->bytes)) != 0
               ? errno
               : 0;
}

/* Returns whether a connection goes to another host. It compares the connection's two addresses. */
static int dtrain__net_leaves_host(int fd)
{
    dtrain__address here, there;
    if (dtrain__net_end(fd, 0, &here) != 0 || dtrain__net_end(fd, 1, &there) != 0)
        return 1;
    if (here.at.any.sa_family == AF_UNIX || (dtrain__net_is_local(&here) && dtrain__net_is_local(&there)))
        return 0;
    if (here.at.any.sa_family == AF_INET && there.at.any.sa_family == AF_INET)
        return here.at.v4.sin_addr.s_addr != there.at.v4.sin_addr.s_addr;
    return here.at.any.sa_family != there.at.any.sa_family ||
           memcmp(&here.at.v6.sin6_addr, &there.at.v6.sin6_addr, sizeof here.at.v6.sin6_addr) != 0;
}

static int dtrain__net_is_unix(const dtrain__address *address)
{
    return address->at.any.sa_family == AF_UNIX;
}

static void dtrain__net_set_port(dtrain__address *address, int port)
{
    if (address->at.any.sa_family == AF_INET)
        address->at.v4.sin_port = htons((uint16_t)port);
    else if (address->at.any.sa_family == AF_INET6)
        address->at.v6.sin6_port = htons((uint16_t)port);
}

static int dtrain__net_port(const dtrain__address *address)
{
    int family = address->at.any.sa_family;
    return ntohs(family == AF_INET ? address->at.v4.sin_port : family == AF_INET6 ? address->at.v6.sin6_port : 0);
}

/* Replaces the host by every address of this machine, in the same family. */
static void dtrain__net_set_any(dtrain__address *address)
{
    if (address->at.any.sa_family == AF_INET)
        address->at.v4.sin_addr.s_addr = htonl(INADDR_ANY);
    else if (address->at.any.sa_family == AF_INET6)
        address->at.v6.sin6_addr = in6addr_any;
}

/* Reads the path of a unix socket, or @ and a name; "" stands for a name that the system chooses. */
static dtrain_status dtrain__net_unix_address(dtrain__address *address, const char *path)
{
    struct sockaddr_un *local = &address->at.local;
    size_t bytes = strlen(path), abstract = path[0] == '@';
    memset(address, 0, sizeof *address);
    if (bytes >= sizeof local->sun_path || bytes == abstract)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "unix:%.120s: the path has %zu bytes, expected 1 to %zu: choose another", path, bytes,
                            sizeof local->sun_path - 1);
    local->sun_family = AF_UNIX;
    memcpy(local->sun_path + abstract, path + abstract, bytes - abstract);
    address->bytes = (socklen_t)(abstract ? offsetof(struct sockaddr_un, sun_path) + bytes : sizeof *local);
    return DTRAIN_OK;
}

static int dtrain__net_is_abstract(const dtrain__address *address)
{
    return address->at.any.sa_family == AF_UNIX && address->at.local.sun_path[0] == 0;
}

/* Stands for a name that the system chooses, and that nobody else has. */
static void dtrain__net_any_name(dtrain__address *address)
{
    memset(address, 0, sizeof *address);
    address->at.any.sa_family = AF_UNIX;
    address->bytes = (socklen_t)offsetof(struct sockaddr_un, sun_path);
}

/* Makes a descriptor non-blocking, close-on-exec and silent. Returns 0 or an errno. */
static int dtrain__net_manners(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return errno;
#ifdef SO_NOSIGPIPE
    int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
    return 0;
}

static int dtrain__net_socket(int family, int *fd)
{
    int error;
    *fd = -1;
    if ((family == AF_UNIX && dtrain__without("unix")) || (family == AF_INET6 && dtrain__without("ipv6")))
        return EAFNOSUPPORT;
#ifdef SOCK_CLOEXEC
    *fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
#else
    *fd = socket(family, SOCK_STREAM, 0);
#endif
    if (*fd < 0)
        return errno;
    error = dtrain__net_manners(*fd);
    if (error != 0) {
        close(*fd);
        *fd = -1;
    }
    return error;
}

/* Returns whether this machine has sockets of a family. */
static int dtrain__net_has(int family)
{
    int fd, error = dtrain__net_socket(family, &fd);
    if (error == 0)
        close(fd);
    return error != EAFNOSUPPORT;
}

/* Returns whether unix sockets may have names that are no files. */
static int dtrain__net_has_names(void)
{
#ifdef __linux__
    dtrain__address any;
    int fd, good = !dtrain__without("abstract") && dtrain__net_socket(AF_UNIX, &fd) == 0;
    if (!good)
        return 0;
    dtrain__net_any_name(&any);
    good = bind(fd, &any.at.any, any.bytes) == 0;
    close(fd);
    return good;
#else
    return 0;
#endif
}

/* Writes the directory for the sockets of one user's processes on this host. */
static void dtrain__net_directory(char *out, size_t capacity)
{
    const char *base = getenv("TMPDIR");
    if (base == NULL || base[0] != '/' || strlen(base) > 44) /* a socket's path is short */
        base = "/tmp";
    snprintf(out, capacity, "%s/dtrain-%lu", base, (unsigned long)geteuid());
}

static dtrain_status dtrain__net_make_directory(void)
{
    char directory[80];
    struct stat what;
    dtrain__net_directory(directory, sizeof directory);
    if (mkdir(directory, 0700) != 0 && errno != EEXIST)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: cannot make the directory %s: %s", directory,
                            strerror(errno));
    if (lstat(directory, &what) == 0 && S_ISDIR(what.st_mode) && what.st_uid == geteuid() && (what.st_mode & 077) == 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_DENIED,
                        "comm_create: %s must be a directory of this user that nobody else may enter: run chmod "
                        "700 on it, or set TMPDIR to another place",
                        directory);
}

/* Writes the address of a unix socket of this user: "unix:@/tmp/dtrain-UID/last". Without such names it is a path, in a
 * directory that it makes. */
static dtrain_status dtrain__net_private(char *out, size_t capacity, const char *last)
{
    char directory[80];
    int named = dtrain__net_has_names();
    dtrain__net_directory(directory, sizeof directory);
    snprintf(out, capacity, "unix:%s%s/%s", named ? "@" : "", directory, last);
    return named ? DTRAIN_OK : dtrain__net_make_directory();
}

/* Gives the path with the text of a name that dtrain__net_private wrote. Returns 0 for any other address. */
static int dtrain__net_private_path(const dtrain__address *name, dtrain__address *path)
{
    char directory[80];
    const char *text = name->at.local.sun_path + 1;
    dtrain__net_directory(directory, sizeof directory);
    size_t bytes = strlen(directory);
    return dtrain__net_is_abstract(name) && strncmp(text, directory, bytes) == 0 && text[bytes] == '/' &&
           dtrain__net_unix_address(path, text) == DTRAIN_OK;
}

/* Splits "host:port" or "[host]:port". Returns 0 if the text is neither. */
static int dtrain__net_split(const char *text, char host[DTRAIN__ADDRESS_BYTES], char port[8])
{
    const char *colon = strrchr(text, ':'), *first = text, *last = colon;
    if (colon == NULL || strlen(colon + 1) > 5 || colon[1] == 0)
        return 0;
    if (*text == '[' && colon > text && colon[-1] == ']') {
        first++;
        last--;
    }
    if ((size_t)(last - first) >= DTRAIN__ADDRESS_BYTES ||
        (first == text && memchr(first, ':', (size_t)(last - first))))
        return 0;
    memcpy(host, first, (size_t)(last - first));
    host[last - first] = 0;
    memcpy(port, colon + 1, strlen(colon + 1) + 1);
    for (const char *digit = port; *digit != 0; digit++)
        if (*digit < '0' || *digit > '9')
            return 0;
    return 1;
}

/* Finds the addresses of a text.
 *
 *   flags   0: a name may wait for the system's resolver; AI_NUMERICHOST: numbers only, never waits
 *   out     DTRAIN__MAX_ADDRESSES
 *   count   out: how many it has found */
static dtrain_status dtrain__net_look_up(const char *text, int flags, dtrain__address *out, int *count)
{
    char host[DTRAIN__ADDRESS_BYTES], port[8];
    struct addrinfo hints, *list = NULL;
    int error;
    *count = 0;
    if (strncmp(text, "unix:", 5) == 0) {
        *count = 1;
        if (text[5] == '@' && dtrain__net_has(AF_UNIX) && !dtrain__net_has_names())
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "%.120s: this system has no names for unix sockets: give a path, unix:/path", text);
        return dtrain__net_unix_address(out, text + 5);
    }
    if (!dtrain__net_split(text, host, port))
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "\"%.200s\" is not an address, expected host:port, [address]:port, unix:/path or unix:@name", text);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV | (host[0] == 0 ? AI_PASSIVE : 0);
    error = getaddrinfo(host[0] != 0 ? host : NULL, port, &hints, &list);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO,
                            "%.200s: the name cannot be looked up (%s): correct it, or give the address in numbers",
                            text, gai_strerror(error));
    for (struct addrinfo *at = list; at != NULL && *count < DTRAIN__MAX_ADDRESSES; at = at->ai_next) {
        if ((at->ai_family != AF_INET && at->ai_family != AF_INET6) || at->ai_addrlen > sizeof out->at.storage ||
            (flags == 0 && !dtrain__net_has(at->ai_family))) /* an address in numbers has no alternative */
            continue;
        memset(&out[*count], 0, sizeof *out);
        memcpy(&out[*count].at.storage, at->ai_addr, at->ai_addrlen);
        out[(*count)++].bytes = at->ai_addrlen;
    }
    freeaddrinfo(list);
    return *count > 0 ? DTRAIN_OK
                      : dtrain__fail(NULL, DTRAIN_ERR_IO,
                                     "%.200s: no IPv4 or IPv6 address that this host can use: give another", text);
}

/* Reads an address in numbers, or the path of a unix socket. */
static dtrain_status dtrain__net_parse(const char *text, dtrain__address *out)
{
    dtrain__address found[DTRAIN__MAX_ADDRESSES];
    int count;
    dtrain_status status = dtrain__net_look_up(text, AI_NUMERICHOST, found, &count);
    if (status == DTRAIN_OK)
        *out = found[0];
    return status;
}

/* Gives the address of the interface `name`, or the address that `name` spells. If it can, it gives one of `family`. */
static dtrain_status dtrain__net_interface(const char *name, int family, dtrain__address *out)
{
    struct ifaddrs *list = NULL;
    char spelled[DTRAIN__ADDRESS_BYTES];
    int best = 0;
    if (getifaddrs(&list) == 0) {
        for (struct ifaddrs *at = list; at != NULL; at = at->ifa_next) {
            int kind = at->ifa_addr != NULL && strcmp(at->ifa_name, name) == 0 ? at->ifa_addr->sa_family : 0;
            int rank = kind == family ? 2 : 1;
            if ((kind != AF_INET && kind != AF_INET6) || rank <= best)
                continue;
            memset(out, 0, sizeof *out);
            out->bytes = (socklen_t)(kind == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
            memcpy(&out->at.storage, at->ifa_addr, out->bytes);
            best = rank;
        }
        freeifaddrs(list);
    }
    if (best > 0)
        return DTRAIN_OK;
    snprintf(spelled, sizeof spelled, strchr(name, ':') != NULL ? "[%.200s]:0" : "%.200s:0", name);
    if (dtrain__net_parse(spelled, out) != DTRAIN_OK)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "\"%.100s\" is neither an interface of this host nor an address, expected one of them",
                            name);
    return DTRAIN_OK;
}

/* Sets a plain congestion control, which costs least on one host, on a socket that is not connected yet. Later is too
 * late: once bbr has had a connection, the system always paces it. */
static void dtrain__net_plain(int fd)
{
#ifdef TCP_CONGESTION
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
#else
    (void)fd;
#endif
}

/* Sets the system's default congestion control, for a connection to another host. */
static void dtrain__net_unplain(int fd)
{
#ifdef TCP_CONGESTION
    char name[16];
    socklen_t bytes = sizeof name;
    int fresh;
    if (dtrain__net_socket(AF_INET, &fresh) != 0)
        return;
    if (getsockopt(fresh, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) == 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, bytes);
    close(fresh);
#else
    (void)fd;
#endif
}

static void dtrain__net_tune(int fd, int same_host, size_t buffer_bytes)
{
    int one = 1, buffer = (int)buffer_bytes;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!same_host)
        dtrain__net_unplain(fd);
    if (buffer > 0) {
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    }
}

/* Returns whether the process at the other end of a connected unix socket, which called connect() or listen(), belongs
 * to this user. */
static int dtrain__net_same_user(int fd)
{
#ifdef SO_PEERCRED
    struct { /* struct ucred of the system, which the C library hides from standard C */
        int32_t pid;
        uint32_t uid, gid;
    } peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && bytes == sizeof peer &&
           peer.uid == (uint32_t)geteuid();
#else
    uid_t user;
    gid_t group;
    return getpeereid(fd, &user, &group) == 0 && user == geteuid();
#endif
}

/* Locks the directory of a unix socket. Without it, if two processes find a stale socket, the second could remove the
 * new one of the first. After a second it goes on without the lock. Returns the descriptor to close, or -1. */
static int dtrain__net_lock_beside(const char *path)
{
    char directory[sizeof(((struct sockaddr_un *)0)->sun_path)];
    const char *slash = strrchr(path, '/');
    struct timespec pause = dtrain__os_timespec(1000000);
    int bytes = slash != NULL ? (int)(slash - path) + 1 : 1;
    snprintf(directory, sizeof directory, "%.*s", bytes, slash != NULL ? path : ".");
    int fd = open(directory, O_RDONLY | O_CLOEXEC);
    for (int tries = 0; fd >= 0 && tries < 1000 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; tries++)
        nanosleep(&pause, NULL);
    return fd;
}

/* Removes a unix socket on which nobody listens. */
static void dtrain__net_remove_stale(const dtrain__address *address)
{
    const char *path = address->at.local.sun_path;
    struct stat what;
    int fd;
    if (lstat(path, &what) != 0 || !S_ISSOCK(what.st_mode) || dtrain__net_socket(AF_UNIX, &fd) != 0)
        return;
    if (connect(fd, &address->at.any, address->bytes) != 0 && errno == ECONNREFUSED)
        unlink(path);
    close(fd);
}

/* Binds and listens. *address: also out, the bound address. Returns 0 or an errno. */
static int dtrain__net_listen(dtrain__address *address, int *fd)
{
    struct sockaddr *any = &address->at.any;
    int one = 1, error = dtrain__net_socket(any->sa_family, fd);
    if (error != 0)
        return error;
    dtrain__net_plain(*fd); /* accepted connections inherit it */
    if (any->sa_family == AF_UNIX && !dtrain__net_is_abstract(address))
        dtrain__net_remove_stale(address);
    else
        setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    error = bind(*fd, any, address->bytes) == 0 && listen(*fd, 1024) == 0 ? 0 : errno;
    if (error == 0)
        error = dtrain__net_end(*fd, 0, address);
    if (error != 0) {
        close(*fd);
        *fd = -1;
    }
    return error;
}

/* Starts a connection. Once the descriptor is writable, it has been made or has failed. Returns 0 or an errno. */
static int dtrain__net_connect(const dtrain__address *address, int *fd)
{
    const struct sockaddr *any = &address->at.any;
    int error = dtrain__net_socket(any->sa_family, fd);
    if (error != 0)
        return error;
    dtrain__net_plain(*fd);
    if (connect(*fd, any, address->bytes) == 0 || errno == EINPROGRESS || errno == EINTR)
        return 0;
    error = errno;
    close(*fd);
    *fd = -1;
    return error;
}

/* Returns whether a process of this user listens at a unix socket. */
static int dtrain__net_is_held(const dtrain__address *address)
{
    int fd, held = dtrain__net_connect(address, &fd) == 0;
    if (!held)
        return 0;
    held = dtrain__net_same_user(fd);
    close(fd);
    return held;
}

/* Returns whether a socket is connected to itself. TCP allows that if nobody listens and the system happens to choose
 * the destination's port for this end. */
static int dtrain__net_is_mirror(int fd)
{
    dtrain__address here, there;
    return dtrain__net_end(fd, 0, &here) == 0 && dtrain__net_end(fd, 1, &there) == 0 && !dtrain__net_is_unix(&here) &&
           here.bytes == there.bytes && memcmp(&here.at, &there.at, here.bytes) == 0;
}

/* Returns whether the system takes more bytes to send now. */
static int dtrain__net_writable(int fd)
{
    struct pollfd one = {fd, POLLOUT, 0};
    return poll(&one, 1, 0) > 0;
}

/* Returns 0 if the connection has been made, EINPROGRESS if not yet, else the errno with which it failed. */
static int dtrain__net_connected(int fd)
{
    int error = 0;
    socklen_t bytes = sizeof error;
    if (!dtrain__net_writable(fd))
        return EINPROGRESS;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0)
        return errno;
    return error == 0 && dtrain__net_is_mirror(fd) ? ECONNREFUSED : error;
}

/* Accepts one connection. Returns 0, EAGAIN if there is none, or another errno. */
static int dtrain__net_accept(int listener, int *fd, dtrain__address *peer)
{
    int error;
    memset(peer, 0, sizeof *peer);
    peer->bytes = (socklen_t)sizeof peer->at.storage;
    *fd = -1;
    errno = ENOSYS;
#if defined(__linux__) && defined(__NR_accept4) /* the C library hides accept4 from standard C */
    *fd = (int)syscall(__NR_accept4, listener, &peer->at.any, &peer->bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
#endif
    if (*fd < 0 && errno == ENOSYS)
        *fd = accept(listener, &peer->at.any, &peer->bytes);
    if (*fd < 0)
        return errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED ? EAGAIN : errno;
    error = dtrain__net_manners(*fd);
    if (error != 0)
        close(*fd);
    return error;
}

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif
#ifndef MSG_MORE
#define MSG_MORE 0
#endif

/* Sends without waiting. Returns the number of bytes sent; 0: none now; -1: the connection is broken (errno). more: the
 * system may hold the bytes back until the next call. */
static ssize_t dtrain__net_send(int fd, const void *data, size_t bytes, int more)
{
    ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS))
        return 0;
    return n;
}

/* Receives without waiting. Returns as dtrain__net_send does; if the peer has closed in order, -1 with errno 0. */
static ssize_t dtrain__net_recv(int fd, void *data, size_t bytes)
{
    ssize_t n = recv(fd, data, bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (n == 0) {
        errno = 0;
        return -1;
    }
    return n;
}

static const char *dtrain__net_why(int error)
{
    switch (error) {
    case 0: return "it was closed";
    case EBADMSG:
        return "a sealed record on it is wrong: somebody on the path has changed, injected, replayed, reordered or cut "
               "traffic";
    case ERANGE: return "the memory that both processes share holds impossible counters: something has overwritten it";
    case EPROTO: return "it ended without its sealed end";
    default: return strerror(error);
    }
}

/* Whether a connection ended because of what came over it. */
static int dtrain__net_is_corrupt(int error)
{
    return error == EBADMSG || error == ERANGE;
}

static void dtrain__net_watch(struct pollfd *fds, int *count, int fd, int events)
{
    fds[*count].fd = fd;
    fds[*count].events = (short)events;
    fds[(*count)++].revents = 0;
}

/* Makes a pipe that wakes a poll(). Both ends are non-blocking. Returns 0 or an errno. */
static int dtrain__net_pipe(int ends[2])
{
    int error = ENOSYS;
#if defined(__linux__) && defined(__NR_pipe2)
    error = syscall(__NR_pipe2, ends, O_CLOEXEC | O_NONBLOCK) == 0 ? 0 : errno;
#endif
    if (error == ENOSYS)
        error = pipe(ends) == 0 ? 0 : errno;
    if (error != 0)
        return error;
    error = dtrain__net_manners(ends[0]);
    if (error == 0)
        error = dtrain__net_manners(ends[1]);
    return error;
}

/* Opens a pipe of another process of this user, to write to it. Returns -1 if it is not the pipe with this inode. It is
 * open for reading too, so that no signal comes when the other process has died. */
static int dtrain__net_pipe_open(pid_t process, int fd, uint64_t inode)
{
    char path[64];
    struct stat what;
    int own = -1;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)process, fd);
    if (stat(path, &what) == 0 && S_ISFIFO(what.st_mode) && (uint64_t)what.st_ino == inode)
        own = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (own >= 0 && (fstat(own, &what) != 0 || !S_ISFIFO(what.st_mode) || (uint64_t)what.st_ino != inode)) {
        close(own);
        own = -1;
    }
    return own;
}

static void dtrain__net_drain(int fd)
{
    char bytes[64];
    while (read(fd, bytes, sizeof bytes) == (ssize_t)sizeof bytes)
        continue;
}

/* Sleeps until a pipe is written to, or until_ns, and empties it. */
static void dtrain__net_rest(int fd, int64_t until_ns)
{
    int64_t span = until_ns - dtrain__os_now_ns();
    struct timespec rest = dtrain__os_timespec(span > 0 ? span : 0);
    fd_set watched;
    if (fd >= FD_SETSIZE) {
        nanosleep(&rest, NULL);
        return;
    }
    FD_ZERO(&watched);
    FD_SET(fd, &watched);
    if (pselect(fd + 1, &watched, NULL, NULL, &rest, NULL) > 0) /* poll() counts in milliseconds */
        dtrain__net_drain(fd);
}

#endif
