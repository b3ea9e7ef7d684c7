/* ---- >>net ----
 * Sockets: non-blocking, close-on-exec, without SIGPIPE, and with names for texts. An address is "host:port",
 * "[address]:port", "unix:/path" or "unix:@name". A name is Linux's: it is no file, and ends with its listener. Only
 * two functions wait: dtrain__net_look_up asks the system's resolver for a host name, and dtrain__os_lock_beside waits
 * for a lock. */
#ifndef DTRAIN__NET
#define DTRAIN__NET
#include "../base/memory.c"
#include "../base/os_sockets.c"
#include "../base/os_files.c"
#include "../base/status.c"
#include "keys.c"

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
        size_t bytes = (size_t)address->bytes - offsetof(struct sockaddr_un, sun_path);
        int named = address->bytes > (socklen_t)offsetof(struct sockaddr_un, sun_path),
            abstract = named && path[0] == 0;
        int most = abstract ? (int)bytes - 1 : 200;
        snprintf(out.text, sizeof out.text, "%s%.*s",
                 !named     ? "a unix socket"
                 : abstract ? "unix:@"
                            : "unix:",
                 most, named ? path + abstract : "");
    } else if (address->bytes == 0 || !dtrain__os_spell(&address->at.any, address->bytes, host, port)) {
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
    return dtrain__os_end(fd, peers, &out->at.any, &out->bytes);
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

/* Gives a number for an address's host: the same for all addresses that a host can choose among, which are those of one
 * IPv6 prefix of 64 bits. 0: this host, over a unix socket. */
static uint64_t dtrain__net_host(const dtrain__address *address)
{
    const unsigned char *v6 = address->at.v6.sin6_addr.s6_addr;
    if (address->at.any.sa_family == AF_INET)
        return ntohl(address->at.v4.sin_addr.s_addr);
    if (address->at.any.sa_family != AF_INET6)
        return 0;
    return IN6_IS_ADDR_V4MAPPED(&address->at.v6.sin6_addr) ? dtrain__get_le(v6 + 12, 4) : dtrain__get_le(v6, 8);
}

/* Whether an address is valid on one link alone. Its zone says which, and each host counts its links itself. */
static int dtrain__net_is_zoned(const dtrain__address *address)
{
    return address->at.any.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address->at.v6.sin6_addr);
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
    else if (address->at.any.sa_family == AF_INET6) {
        address->at.v6.sin6_addr = in6addr_any;
        address->at.v6.sin6_scope_id = 0;
    }
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

static int dtrain__net_socket(int family, int *fd)
{
    *fd = -1;
    if ((family == AF_UNIX && dtrain__without("unix")) || (family == AF_INET6 && dtrain__without("ipv6")))
        return EAFNOSUPPORT;
    return dtrain__os_socket(family, fd);
}

/* Returns whether this machine has sockets of a family. */
static int dtrain__net_has(int family)
{
    int fd, error = dtrain__net_socket(family, &fd);
    if (error == 0)
        dtrain__os_hang_up(fd);
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
    good = dtrain__os_bind(fd, &any.at.any, any.bytes) == 0;
    dtrain__os_hang_up(fd);
    return good;
#else
    return 0;
#endif
}

static dtrain_status dtrain__net_make_directory(void)
{
    char directory[80];
    dtrain__os_socket_directory(directory, sizeof directory);
    if (dtrain__os_mkdir_private(directory) != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "comm_create: cannot make the directory %s: %s", directory,
                            dtrain__os_error_text(errno));
    if (dtrain__os_is_private(directory))
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
    dtrain__os_socket_directory(directory, sizeof directory);
    snprintf(out, capacity, "unix:%s%s/%s", named ? "@" : "", directory, last);
    return named ? DTRAIN_OK : dtrain__net_make_directory();
}

/* Gives the path with the text of a name that dtrain__net_private wrote. Returns 0 for any other address. */
static int dtrain__net_private_path(const dtrain__address *name, dtrain__address *path)
{
    char directory[80];
    const char *text = name->at.local.sun_path + 1;
    dtrain__os_socket_directory(directory, sizeof directory);
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
 *   numbers   0: a name may wait for the system's resolver; 1: numbers only, never waits
 *   out       DTRAIN__MAX_ADDRESSES
 *   count     out: how many it has found */
static dtrain_status dtrain__net_look_up(const char *text, int numbers, dtrain__address *out, int *count)
{
    char host[DTRAIN__ADDRESS_BYTES], port[8];
    dtrain__os_found *list = NULL;
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
    const char *why = dtrain__os_resolve(host, port, numbers, &list);
    if (why != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_IO,
                            "%.200s: the name cannot be looked up (%s): correct it, or give the address in numbers",
                            text, why);
    for (const dtrain__os_found *at = list; at != NULL && *count < DTRAIN__MAX_ADDRESSES; at = at->ai_next) {
        if ((at->ai_family != AF_INET && at->ai_family != AF_INET6) || at->ai_addrlen > sizeof out->at.storage ||
            (!numbers && !dtrain__net_has(at->ai_family))) /* an address in numbers has no alternative */
            continue;
        memset(&out[*count], 0, sizeof *out);
        memcpy(&out[*count].at.storage, at->ai_addr, at->ai_addrlen);
        out[(*count)++].bytes = (socklen_t)at->ai_addrlen;
    }
    dtrain__os_resolved(list);
    return *count > 0 ? DTRAIN_OK
                      : dtrain__fail(NULL, DTRAIN_ERR_IO,
                                     "%.200s: no IPv4 or IPv6 address that this host can use: give another", text);
}

/* Reads an address in numbers, or the path of a unix socket. */
static dtrain_status dtrain__net_parse(const char *text, dtrain__address *out)
{
    dtrain__address found[DTRAIN__MAX_ADDRESSES];
    int count;
    dtrain_status status = dtrain__net_look_up(text, 1, found, &count);
    if (status == DTRAIN_OK)
        *out = found[0];
    return status;
}

/* A look-up on a thread of its own, as the system's resolver may block for minutes. Whoever holds it last frees it: the
 * thread, or its starter, who need not wait for it. */
typedef struct dtrain__look_up {
    char text[DTRAIN__ADDRESS_BYTES];
    dtrain__address found[DTRAIN__MAX_ADDRESSES];
    int count; /* 0: error says why */
    dtrain__error error;
    uint32_t done, holders;
    dtrain__os_thread thread;
} dtrain__look_up;

static void dtrain__look_up_release(dtrain__look_up *look_up)
{
    if (DTRAIN__ATOMIC_SUB(&look_up->holders, 1u, SEQ_CST) == 0)
        dtrain__os_free(look_up);
}

static void dtrain__look_up_body(void *argument)
{
    dtrain__look_up *look_up = (dtrain__look_up *)argument;
    if (dtrain__net_look_up(look_up->text, 0, look_up->found, &look_up->count) != DTRAIN_OK)
        look_up->error = dtrain__thread_error;
    DTRAIN__ATOMIC_STORE(&look_up->done, 1u, SEQ_CST);
    dtrain__look_up_release(look_up);
}

/* Returns NULL if the system has no memory or thread for it. The program's allocator may end before the thread. */
static dtrain__look_up *dtrain__look_up_start(const char *text)
{
    dtrain__look_up *look_up = (dtrain__look_up *)dtrain__os_alloc(sizeof *look_up, 64);
    if (look_up == NULL)
        return NULL;
    memset(look_up, 0, sizeof *look_up);
    snprintf(look_up->text, sizeof look_up->text, "%s", text);
    look_up->holders = 2;
    if (dtrain__os_thread_start(&look_up->thread, dtrain__look_up_body, look_up, (size_t)8 << 20) != 0) {
        dtrain__os_free(look_up);
        return NULL;
    }
    dtrain__os_thread_leave(&look_up->thread);
    return look_up;
}

/* Gives the address of the interface `name`, or the address that `name` spells. If it can, it gives one of `family`. */
static dtrain_status dtrain__net_interface(const char *name, int family, dtrain__address *out)
{
    char spelled[DTRAIN__ADDRESS_BYTES];
    memset(out, 0, sizeof *out);
    out->bytes = dtrain__os_interface(name, family, &out->at.storage);
    if (out->bytes > 0)
        return DTRAIN_OK;
    snprintf(spelled, sizeof spelled, strchr(name, ':') != NULL ? "[%.200s]:0" : "%.200s:0", name);
    if (dtrain__net_parse(spelled, out) != DTRAIN_OK)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "\"%.100s\" is neither an interface of this host nor an address, expected one of them",
                            name);
    return DTRAIN_OK;
}

/* Sets the system's default congestion control, for a connection to another host. */
static void dtrain__net_unplain(int fd)
{
    int fresh;
    if (dtrain__net_socket(AF_INET, &fresh) != 0)
        return;
    dtrain__os_congestion(fd, fresh);
    dtrain__os_hang_up(fresh);
}

/* Sets up a connection. patience_ns: how long its other host may answer nothing while it is idle. */
static void dtrain__net_tune(int fd, int same_host, size_t buffer_bytes, int64_t patience_ns)
{
    const int64_t most_ns = 7200000000000;
    dtrain__os_no_delay(fd);
    if (!same_host)
        dtrain__net_unplain(fd);
    dtrain__os_keep_alive(fd, (int)((patience_ns < most_ns ? patience_ns : most_ns) / 1000000000));
    if (buffer_bytes > 0)
        dtrain__os_buffers(fd, (int)buffer_bytes);
}

/* Removes a unix socket on which nobody listens. */
static void dtrain__net_remove_stale(const dtrain__address *address)
{
    const char *path = address->at.local.sun_path;
    int fd;
    if (!dtrain__os_is_socket(path) || dtrain__net_socket(AF_UNIX, &fd) != 0)
        return;
    if (dtrain__os_connect(fd, &address->at.any, address->bytes) == ECONNREFUSED)
        dtrain__os_unlink(DTRAIN__OS_HERE, path, 0);
    dtrain__os_hang_up(fd);
}

/* Binds and listens. *address: also out, the bound address. apart: an IPv6 address takes no IPv4 connections, so that
 * IPv4 may have the same port. Returns 0 or an errno. */
static int dtrain__net_listen(dtrain__address *address, int apart, int *fd)
{
    struct sockaddr *any = &address->at.any;
    int error = dtrain__net_socket(any->sa_family, fd);
    if (error != 0)
        return error;
    if (any->sa_family == AF_INET6)
        dtrain__os_apart(*fd, apart);
    dtrain__os_plain(*fd); /* accepted connections inherit it */
    if (any->sa_family == AF_UNIX && !dtrain__net_is_abstract(address))
        dtrain__net_remove_stale(address);
    else
        dtrain__os_reuse(*fd);
    error = dtrain__os_bind(*fd, any, address->bytes);
    if (error == 0)
        error = dtrain__os_listen(*fd);
    if (error == 0)
        error = dtrain__net_end(*fd, 0, address);
    if (error != 0) {
        dtrain__os_hang_up(*fd);
        *fd = -1;
    }
    return error;
}

/* Returns whether this host has the address. */
static int dtrain__net_is_here(const dtrain__address *address)
{
    dtrain__address at = *address;
    int fd, error = dtrain__net_socket(at.at.any.sa_family, &fd);
    if (error != 0)
        return error != EAFNOSUPPORT;
    dtrain__net_set_port(&at, 0);
    error = dtrain__os_bind(fd, &at.at.any, at.bytes);
    dtrain__os_hang_up(fd);
    return error != EADDRNOTAVAIL;
}

/* Writes which addresses of this host another one may connect to, with a port. */
static void dtrain__net_own_addresses(int port, char *text, size_t room)
{
    dtrain__address at;
    size_t used = 0;
    memset(&at, 0, sizeof at);
    snprintf(text, room, "no address but loopback");
    for (int i = 0; (at.bytes = dtrain__os_host_address(i, &at.at.storage)) > 0 && used + 64 < room; i++) {
        if (dtrain__net_is_local(&at) ||
            (at.at.any.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&at.at.v6.sin6_addr)))
            continue;
        dtrain__net_set_port(&at, port);
        used += (size_t)snprintf(text + used, room - used, "%s%.60s", used > 0 ? ", " : "", dtrain__net_text(&at).text);
    }
}

/* Starts a connection. Once the descriptor is writable, it has been made or has failed. Returns 0 or an errno. */
static int dtrain__net_connect(const dtrain__address *address, int *fd)
{
    const struct sockaddr *any = &address->at.any;
    int error = dtrain__net_socket(any->sa_family, fd);
    if (error != 0)
        return error;
    dtrain__os_plain(*fd);
    error = dtrain__os_connect(*fd, any, address->bytes);
    if (error == 0)
        return 0;
    dtrain__os_hang_up(*fd);
    *fd = -1;
    return error;
}

/* Returns whether a process of this user listens at a unix socket. */
static int dtrain__net_is_held(const dtrain__address *address)
{
    int fd, held = dtrain__net_connect(address, &fd) == 0;
    if (!held)
        return 0;
    held = dtrain__os_same_user(fd);
    dtrain__os_hang_up(fd);
    return held;
}

/* Returns whether a socket is connected to itself. TCP allows that if nobody listens and the system happens to choose
 * the destination's port for this end. */
static int dtrain__net_is_mirror(int fd)
{
    dtrain__address here, there;
    return dtrain__net_end(fd, 0, &here) == 0 && dtrain__net_end(fd, 1, &there) == 0 && !dtrain__net_is_unix(&here) &&
           here.bytes == there.bytes && memcmp(&here.at, &there.at, (size_t)here.bytes) == 0;
}

static void dtrain__net_watch(struct pollfd *fds, int *count, int fd, int events)
{
    fds[*count].fd = DTRAIN__OS_SOCKET(fd);
    fds[*count].events = (short)events;
    fds[(*count)++].revents = 0;
}

/* Returns whether the system takes more bytes to send now. */
static int dtrain__net_writable(int fd)
{
    struct pollfd one;
    int count = 0;
    dtrain__net_watch(&one, &count, fd, POLLOUT);
    return dtrain__os_poll(&one, 1, 0) > 0;
}

/* Returns 0 if the connection has been made, EINPROGRESS if not yet, else the errno with which it failed. */
static int dtrain__net_connected(int fd)
{
    if (!dtrain__net_writable(fd))
        return EINPROGRESS;
    int error = dtrain__os_connected(fd);
    return error == 0 && dtrain__net_is_mirror(fd) ? ECONNREFUSED : error;
}

/* Accepts one connection. Returns 0, EAGAIN if there is none, or another errno. */
static int dtrain__net_accept(int listener, int *fd, dtrain__address *peer)
{
    memset(peer, 0, sizeof *peer);
    peer->bytes = (socklen_t)sizeof peer->at.storage;
    return dtrain__os_accept(listener, fd, &peer->at.any, &peer->bytes);
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
    default: return dtrain__os_error_text(error);
    }
}

/* Whether a connection ended because of what came over it. */
static int dtrain__net_is_corrupt(int error)
{
    return error == EBADMSG || error == ERANGE;
}

#define DTRAIN__FILES_TEXT 240

/* Whether the system refuses because too many descriptors are open. */
static int dtrain__net_is_full(int error)
{
    return error == EMFILE || error == ENFILE;
}

/* Returns an error's text; if too many descriptors are open, it says which limit to raise. */
static const char *dtrain__net_refused(int error, char text[DTRAIN__FILES_TEXT])
{
    if (error == EMFILE)
        snprintf(text, DTRAIN__FILES_TEXT,
                 "%.60s; this process may have %ld descriptors open (RLIMIT_NOFILE): raise that with ulimit -n, or "
                 "destroy groups and close files that are not needed",
                 dtrain__os_error_text(error), dtrain__os_most_files());
    else if (error == ENFILE)
        snprintf(text, DTRAIN__FILES_TEXT,
                 "%.60s; this is the limit of the whole system (on Linux fs.file-max): raise it",
                 dtrain__os_error_text(error));
    else
        snprintf(text, DTRAIN__FILES_TEXT, "%.200s", dtrain__os_error_text(error));
    return text;
}

#endif
