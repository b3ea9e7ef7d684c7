/* ---- >>os sockets ----
 * The calls of sockets that POSIX and Windows share. Errors are those of errno. */
#ifndef DTRAIN__OS_SOCKETS
#define DTRAIN__OS_SOCKETS
#include "os_posix_sockets.c"
#include "os_windows_sockets.c"

/* Gives a socket's own address, or with peers 1 its peer's. *bytes: also in, the room. Returns 0 or an errno. */
static int dtrain__os_end(int fd, int peers, struct sockaddr *at, socklen_t *bytes)
{
    return (peers ? getpeername(DTRAIN__OS_SOCKET(fd), at, bytes) : getsockname(DTRAIN__OS_SOCKET(fd), at, bytes)) != 0
               ? dtrain__os_socket_error()
               : 0;
}

static int dtrain__os_bind(int fd, const struct sockaddr *at, socklen_t bytes)
{
    return bind(DTRAIN__OS_SOCKET(fd), at, bytes) == 0 ? 0 : dtrain__os_socket_error();
}

static int dtrain__os_listen(int fd)
{
    return listen(DTRAIN__OS_SOCKET(fd), 1024) == 0 ? 0 : dtrain__os_socket_error();
}

/* Returns the errno with which a connection failed; 0: it has been made. */
static int dtrain__os_connected(int fd)
{
    int error = 0;
    socklen_t bytes = sizeof error;
    if (getsockopt(DTRAIN__OS_SOCKET(fd), SOL_SOCKET, SO_ERROR, (char *)&error, &bytes) != 0)
        return dtrain__os_socket_error();
    return dtrain__os_errno(error);
}

static void dtrain__os_option(int fd, int level, int option, int value)
{
    setsockopt(DTRAIN__OS_SOCKET(fd), level, option, (const char *)&value, sizeof value);
}

/* Sends small messages at once. */
static void dtrain__os_no_delay(int fd)
{
    dtrain__os_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

static void dtrain__os_buffers(int fd, int bytes)
{
    dtrain__os_option(fd, SOL_SOCKET, SO_SNDBUF, bytes);
    dtrain__os_option(fd, SOL_SOCKET, SO_RCVBUF, bytes);
}

/* Whether an IPv6 socket takes no IPv4 connections. */
static void dtrain__os_apart(int fd, int apart)
{
    dtrain__os_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, apart);
}

/* Writes an IP address and its port in numbers. Returns whether it is one. */
static int dtrain__os_spell(const struct sockaddr *at, socklen_t bytes, char host[128], char port[16])
{
    return getnameinfo(at, bytes, host, 128, port, 16, NI_NUMERICHOST | NI_NUMERICSERV) == 0;
}

typedef struct addrinfo dtrain__os_found; /* a list of addresses */

/* Finds the stream addresses of a host, with a port in numbers. An empty host is every address of this one. numbers:
 * the host is in numbers, too, and nobody waits. Returns why there are none, or NULL: then release the list. */
static const char *dtrain__os_resolve(const char *host, const char *port, int numbers, dtrain__os_found **list)
{
    struct addrinfo hints;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = (numbers ? AI_NUMERICHOST : 0) | AI_NUMERICSERV | (host[0] == 0 ? AI_PASSIVE : 0);
    dtrain__os_sockets();
    int error = getaddrinfo(host[0] != 0 ? host : NULL, port, &hints, list);
    return error != 0 ? gai_strerror(error) : NULL;
}

static void dtrain__os_resolved(dtrain__os_found *list)
{
    freeaddrinfo(list);
}

#endif
