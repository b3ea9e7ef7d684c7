/* ---- >>os posix sockets ----
 * Sockets of POSIX, and pipes that wake a poll(). Sockets are non-blocking, close-on-exec, and raise no SIGPIPE. */
#ifndef DTRAIN__OS_POSIX_SOCKETS
#define DTRAIN__OS_POSIX_SOCKETS
#include "os_posix_share.c"
#ifndef _WIN32

#define DTRAIN__OS_SOCKET(fd) (fd) /* as the system takes it */

/* Starts the system's sockets. */
static void dtrain__os_sockets(void)
{
}

/* Returns the errno of a number of the sockets' own. */
static int dtrain__os_errno(int error)
{
    return error;
}

/* Returns why the last call of a socket failed, as an errno. */
static int dtrain__os_socket_error(void)
{
    return errno;
}

/* ---- what a forked child closes ----
 * A program may fork a process that does not use the group, such as a data loader. Its copies of the sockets would hide
 * the death of its parent from peers, and hold the port. So it closes sockets and pipes that this table has. */

#define DTRAIN__OS_OWNED ((int)1 << 16) /* descriptors from here on are not in the table */

static uint32_t dtrain__os_owned[DTRAIN__OS_OWNED / 32], dtrain__os_owns; /* owns: a fork looks at the table */
static __thread int dtrain__os_orphaned; /* this thread of a forked child frees what its parent had */

/* In a forked child. */
static void dtrain__os_disown(void)
{
    for (int i = 0; i < DTRAIN__OS_OWNED / 32; i++) {
        uint32_t bits = DTRAIN__ATOMIC_EXCHANGE(&dtrain__os_owned[i], 0u, SEQ_CST);
        for (int k = 0; bits >> k != 0 && k < 32; k++)
            if ((bits >> k & 1) != 0)
                close(32 * i + k);
    }
}

/* Enters a new descriptor, if it is one, and returns it. */
static int dtrain__os_own(int fd)
{
    uint32_t nobody = 0;
    if (fd < 0 || fd >= DTRAIN__OS_OWNED)
        return fd;
    if (DTRAIN__ATOMIC_COMPARE_EXCHANGE(&dtrain__os_owns, &nobody, 1u, SEQ_CST))
        pthread_atfork(NULL, NULL, dtrain__os_disown);
    DTRAIN__ATOMIC_FETCH_OR(&dtrain__os_owned[fd / 32], (uint32_t)1 << fd % 32, SEQ_CST);
    return fd;
}

/* Closes a socket or pipe. In a forked child those of its parent are closed, and their numbers may be others' now. */
static void dtrain__os_hang_up(int fd)
{
    uint32_t bit = (uint32_t)1 << fd % 32;
    if (fd < DTRAIN__OS_OWNED && dtrain__os_orphaned)
        return;
    if (fd >= DTRAIN__OS_OWNED || (DTRAIN__ATOMIC_FETCH_AND(&dtrain__os_owned[fd / 32], ~bit, SEQ_CST) & bit) != 0)
        close(fd);
}

/* Between on 1 and on 0 this thread frees objects of the process that has forked this one. */
static void dtrain__os_orphan(int on)
{
    dtrain__os_orphaned = on;
}

static void dtrain__os_end_sending(int fd)
{
    shutdown(fd, SHUT_WR);
}

/* Returns how many sent bytes the other host has not confirmed; 0 where the system does not say. */
static int dtrain__os_unconfirmed(int fd)
{
    int bytes = 0;
#if defined(TIOCOUTQ)
    if (ioctl(fd, TIOCOUTQ, &bytes) != 0)
        return 0;
#elif defined(SO_NWRITE)
    socklen_t size = sizeof bytes;
    if (getsockopt(fd, SOL_SOCKET, SO_NWRITE, &bytes, &size) != 0)
        return 0;
#else
    (void)fd;
#endif
    return bytes;
}

/* Makes a descriptor non-blocking, close-on-exec and silent. Returns 0 or an errno. */
static int dtrain__os_manners(int fd)
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

/* Makes a stream socket. Returns 0 or an errno. */
static int dtrain__os_socket(int family, int *fd)
{
    int error;
#ifdef SOCK_CLOEXEC
    *fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
#else
    *fd = socket(family, SOCK_STREAM, 0);
#endif
    if (*fd < 0)
        return errno;
    error = dtrain__os_manners(*fd);
    if (error != 0) {
        close(*fd);
        *fd = -1;
    }
    dtrain__os_own(*fd);
    return error;
}

/* Writes the directory for the sockets of one user's processes on this host. */
static void dtrain__os_socket_directory(char *out, size_t capacity)
{
    const char *base = dtrain__os_getenv("TMPDIR");
    if (base == NULL || base[0] != '/' || strlen(base) > 44) /* a socket's path is short */
        base = "/tmp";
    snprintf(out, capacity, "%s/dtrain-%lu", base, (unsigned long)geteuid());
}

/* Starts a connection. Returns 0 or an errno. */
static int dtrain__os_connect(int fd, const struct sockaddr *to, socklen_t bytes)
{
    return connect(fd, to, bytes) == 0 || errno == EINPROGRESS || errno == EINTR ? 0 : errno;
}

/* Makes a directory that nobody else may enter, if there is none. Returns 0, or -1 with errno. */
static int dtrain__os_mkdir_private(const char *path)
{
    return mkdir(path, 0700) == 0 || errno == EEXIST ? 0 : -1;
}

/* Returns whether a path is a directory of this user that nobody else may enter. */
static int dtrain__os_is_private(const char *path)
{
    struct stat what;
    return lstat(path, &what) == 0 && S_ISDIR(what.st_mode) && what.st_uid == geteuid() && (what.st_mode & 077) == 0;
}

static int dtrain__os_is_socket(const char *path)
{
    struct stat what;
    return lstat(path, &what) == 0 && S_ISSOCK(what.st_mode);
}

/* Returns whether the process at the other end of a connected unix socket, which called connect() or listen(), belongs
 * to this user. */
static int dtrain__os_same_user(int fd)
{
#ifdef __linux__
    struct { /* struct ucred of the system, which the C library hides from standard C */
        int32_t pid;
        uint32_t uid, gid;
    } peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && bytes == sizeof peer &&
           peer.uid == (uint32_t)geteuid();
#elif defined(DTRAIN__OS_BSD)
    uid_t user;
    gid_t group;
    return getpeereid(fd, &user, &group) == 0 && user == geteuid();
#else
    (void)fd;
    return 0;
#endif
}

/* Locks the directory of a unix socket. Without it, if two processes find a stale socket, the second could remove the
 * new one of the first. After a second it goes on without the lock. Returns the descriptor to close, or -1. */
static int dtrain__os_lock_beside(const char *path)
{
    char directory[sizeof(((struct sockaddr_un *)0)->sun_path)];
    const char *slash = strrchr(path, '/');
    int bytes = slash != NULL ? (int)(slash - path) + 1 : 1;
    snprintf(directory, sizeof directory, "%.*s", bytes, slash != NULL ? path : ".");
    int fd = open(directory, O_RDONLY | O_CLOEXEC);
    for (int tries = 0; fd >= 0 && tries < 1000 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; tries++)
        dtrain__os_sleep(1000000);
    return fd;
}

/* Lets a listener take the address of connections that have ended. */
static void dtrain__os_reuse(int fd)
{
    int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
}

/* Sets a plain congestion control, which costs least on one host, on a socket that is not connected yet. Later is too
 * late: once bbr has had a connection, the system always paces it. */
static void dtrain__os_plain(int fd)
{
#ifdef TCP_CONGESTION
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
#else
    (void)fd;
#endif
}

/* Gives a socket the congestion control of another one. */
static void dtrain__os_congestion(int fd, int of)
{
#ifdef TCP_CONGESTION
    char name[16];
    socklen_t bytes = sizeof name;
    if (getsockopt(of, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) == 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, bytes);
#else
    (void)fd;
    (void)of;
#endif
}

/* Sends something every second on an idle connection, or a firewall on its path would forget it. The connection ends
 * when that has had no answer for about `seconds`. */
static void dtrain__os_keep_alive(int fd, int seconds)
{
    const int on = 1, probes = 8, apart = seconds > probes ? seconds / probes : 1;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
#if defined(TCP_KEEPIDLE)
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &on, sizeof on);
#elif defined(TCP_KEEPALIVE)
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPALIVE, &on, sizeof on);
#endif
#ifdef TCP_KEEPINTVL
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &apart, sizeof apart);
#endif
#ifdef TCP_KEEPCNT
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
#endif
    (void)apart;
}

/* Returns for how long the other host has answered nothing, in ms, although bytes were sent to it again; 0: it answers,
 * or the system does not say. A limit of the system's (TCP_USER_TIMEOUT) would also end a connection whose peer only
 * does not read. */
static int64_t dtrain__os_unanswered_ms(int fd)
{
#if defined(__linux__) && defined(TCP_INFO)
    uint32_t info[15] = {0}; /* the first of struct tcp_info in linux/tcp.h, which not every C library shows */
    socklen_t bytes = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &bytes) == 0 && ((const unsigned char *)info)[2] > 0)
        return (int64_t)info[14]; /* tcpi_retransmits, tcpi_last_ack_recv */
#else
    (void)fd;
#endif
    return 0;
}

/* Accepts one connection. Returns 0, EAGAIN if there is none, or another errno. */
static int dtrain__os_accept(int listener, int *fd, struct sockaddr *peer, socklen_t *bytes)
{
    int error;
    *fd = -1;
    errno = ENOSYS;
#if defined(__linux__) && defined(__NR_accept4) /* the C library hides accept4 from standard C */
    *fd = (int)syscall(__NR_accept4, listener, peer, bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
#endif
    if (*fd < 0 && errno == ENOSYS)
        *fd = accept(listener, peer, bytes);
    if (*fd < 0)
        return errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED ? EAGAIN : errno;
    error = dtrain__os_manners(*fd);
    if (error != 0)
        close(*fd);
    else
        dtrain__os_own(*fd);
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
static ssize_t dtrain__os_send(int fd, const void *data, size_t bytes, int more)
{
    ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS))
        return 0;
    return n;
}

/* Receives without waiting. Returns as dtrain__os_send does; if the peer has closed in order, -1 with errno 0. */
static ssize_t dtrain__os_recv(int fd, void *data, size_t bytes)
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

/* Waits until one of the sockets or pipes is ready, at most ms. Returns how many are. */
static int dtrain__os_poll(struct pollfd *fds, int count, int ms)
{
    return poll(fds, (nfds_t)count, ms);
}

/* Copies a listening socket that was inherited. Returns -1 if the number is not such a socket. */
static int dtrain__os_inherit(int fd)
{
    int listens = 0;
    socklen_t bytes = sizeof listens;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || !listens)
        return -1;
    dtrain__os_own(fd); /* a forked child closes the launcher's, too */
    return dtrain__os_own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

/* ---- pipes ----
 * A pipe wakes a poll(), also that of a peer. Linux opens a peer's pipe in /proc. Elsewhere a pipe is a pair of
 * datagram sockets on loopback: a peer knows it by its port. */

static int dtrain__os_true_pipe(int ends[2])
{
    int error = ENOSYS;
#if defined(__linux__) && defined(__NR_pipe2)
    error = syscall(__NR_pipe2, ends, O_CLOEXEC | O_NONBLOCK) == 0 ? 0 : errno;
#endif
    if (error == ENOSYS)
        error = pipe(ends) == 0 ? 0 : errno;
    if (error != 0)
        return error;
    for (int i = 0; i < 2 && error == 0; i++)
        error = dtrain__os_manners(dtrain__os_own(ends[i]));
    return error;
}

/* Replaces both ends of a pipe by one descriptor for both, where the system opens one. */
static void dtrain__os_join_ends(int ends[2])
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", ends[0]);
    int both = dtrain__os_shows_files() ? open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK) : -1;
    if (both < 0)
        return;
    dtrain__os_hang_up(ends[0]);
    dtrain__os_hang_up(ends[1]);
    ends[0] = ends[1] = dtrain__os_own(both);
}

/* Makes a datagram socket on loopback that sends to a port, or with port 0 has one. Returns -1 if that fails. */
static int dtrain__os_datagrams(uint16_t port)
{
    struct sockaddr_in at;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_port = htons(port);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd >= 0 && dtrain__os_manners(fd) == 0 &&
        (port != 0 ? connect(fd, (struct sockaddr *)&at, sizeof at) : bind(fd, (struct sockaddr *)&at, sizeof at)) == 0)
        return dtrain__os_own(fd);
    if (fd >= 0)
        close(fd);
    return -1;
}

/* Returns the port of a datagram socket, or the one that it sends to; 0 if it is no such socket. */
static uint16_t dtrain__os_port(int fd, int peers)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    memset(&at, 0, sizeof at);
    if ((peers ? getpeername(fd, (struct sockaddr *)&at, &bytes) : getsockname(fd, (struct sockaddr *)&at, &bytes)) !=
            0 ||
        at.sin_family != AF_INET)
        return 0;
    return ntohs(at.sin_port);
}

/* Makes a pipe. Both ends are non-blocking, and may be one descriptor: dtrain__os_pipe_close closes it. A pipe that no
 * peer can open is better than none. Returns 0 or an errno. */
static int dtrain__os_pipe(int ends[2])
{
    if (dtrain__os_shows_files() || (ends[0] = dtrain__os_datagrams(0)) < 0) {
        int error = dtrain__os_true_pipe(ends);
        if (error == 0)
            dtrain__os_join_ends(ends);
        return error;
    }
    if ((ends[1] = dtrain__os_datagrams(dtrain__os_port(ends[0], 0))) >= 0)
        return 0;
    dtrain__os_hang_up(ends[0]);
    return dtrain__os_true_pipe(ends);
}

/* Gives the number by which dtrain__os_pipe_open knows a pipe. Returns 0 if it has none. */
static int dtrain__os_pipe_number(int fd, uint64_t *number)
{
    struct stat pipe;
    if (fstat(fd, &pipe) != 0)
        return 0;
    *number = dtrain__os_shows_files() ? (uint64_t)pipe.st_ino : dtrain__os_port(fd, 1);
    return dtrain__os_shows_files() || *number != 0;
}

/* Opens a pipe of another process of this user, to write to it. Returns -1 if it is not the pipe with this number. It
 * is open for reading too, so that no signal comes when the other process has died. */
static int dtrain__os_pipe_open(long process, int fd, uint64_t number)
{
    char path[64];
    struct stat what;
    int own = -1;
    if (!dtrain__os_shows_files())
        return number > 0 && number < 65536 ? dtrain__os_datagrams((uint16_t)number) : -1;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", process, fd);
    if (stat(path, &what) == 0 && S_ISFIFO(what.st_mode) && (uint64_t)what.st_ino == number)
        own = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (own >= 0 && (fstat(own, &what) != 0 || !S_ISFIFO(what.st_mode) || (uint64_t)what.st_ino != number)) {
        close(own);
        own = -1;
    }
    return dtrain__os_own(own);
}

/* Empties a pipe. A datagram has one byte. */
static void dtrain__os_drain(int fd)
{
    char bytes[64];
    ssize_t least = dtrain__os_shows_files() ? (ssize_t)sizeof bytes : 1;
    for (int i = 0; i < 1000 && read(fd, bytes, sizeof bytes) >= least; i++)
        continue;
}

/* Sleeps until a pipe is written to, or ns have passed, and empties it. */
static void dtrain__os_rest(int fd, int64_t ns)
{
    struct timespec rest = dtrain__os_timespec(ns > 0 ? ns : 0);
    fd_set watched;
    if (fd >= FD_SETSIZE) {
        nanosleep(&rest, NULL);
        return;
    }
    FD_ZERO(&watched);
    FD_SET((unsigned)fd, &watched);                             /* the macro of musl counts without a sign */
    if (pselect(fd + 1, &watched, NULL, NULL, &rest, NULL) > 0) /* poll() counts in milliseconds */
        dtrain__os_drain(fd);
}

/* Wakes whoever polls the pipe. */
static void dtrain__os_poke(int fd)
{
    ssize_t ignored = write(fd, "", 1);
    (void)ignored; /* a full pipe wakes a poll() too */
}

/* Gives the address of the interface `name`, one of `family` if it can. Returns its bytes; 0: there is none. */
static socklen_t dtrain__os_interface(const char *name, int family, struct sockaddr_storage *out)
{
    struct ifaddrs *list = NULL;
    socklen_t bytes = 0;
    int best = 0;
    if (getifaddrs(&list) != 0)
        return 0;
    for (struct ifaddrs *at = list; at != NULL; at = at->ifa_next) {
        int kind = at->ifa_addr != NULL && strcmp(at->ifa_name, name) == 0 ? at->ifa_addr->sa_family : 0;
        int rank = kind == family ? 2 : 1;
        if ((kind != AF_INET && kind != AF_INET6) || rank <= best)
            continue;
        bytes = (socklen_t)(kind == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
        memset(out, 0, sizeof *out);
        memcpy(out, at->ifa_addr, bytes);
        best = rank;
    }
    freeifaddrs(list);
    return bytes;
}

/* Gives one of this host's IP addresses, counted from 0. Returns its bytes; 0: there are no more. */
static socklen_t dtrain__os_host_address(int index, struct sockaddr_storage *out)
{
    struct ifaddrs *list = NULL;
    socklen_t bytes = 0;
    memset(out, 0, sizeof *out);
    if (getifaddrs(&list) != 0)
        return 0;
    for (struct ifaddrs *at = list; at != NULL && bytes == 0; at = at->ifa_next) {
        int kind = at->ifa_addr != NULL ? at->ifa_addr->sa_family : 0;
        if ((kind == AF_INET || kind == AF_INET6) && index-- == 0)
            bytes = (socklen_t)(kind == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
        if (bytes > 0)
            memcpy(out, at->ifa_addr, bytes);
    }
    freeifaddrs(list);
    return bytes;
}

#endif
#endif
