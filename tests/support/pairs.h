/* A transport of the user's own between processes, or threads: send and recv over pairs of sockets, and nothing else.
 * With `asked`, an end that is closed shows in `alive` alone. */
#ifndef DTRAIN_TEST_PAIRS_H
#define DTRAIN_TEST_PAIRS_H
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_PAIRS 8

typedef struct pairs {
    int ranks, asked, hosts;       /* hosts: so many, each with a share of the ranks; 0: not told */
    int fds[MAX_PAIRS][MAX_PAIRS]; /* of each rank to each other one */
} pairs;

typedef struct pairs_end {
    pairs *all;
    int rank;
} pairs_end;

static pairs *pairs_new(int ranks, int asked)
{
    pairs *p = (pairs *)calloc(1, sizeof *p);
    p->ranks = ranks;
    p->asked = asked;
    for (int a = 0; a < ranks; a++)
        for (int b = 0; b <= a; b++) {
            int two[2] = {-1, -1};
            if (a != b && socketpair(AF_UNIX, SOCK_STREAM, 0, two) != 0)
                abort();
            p->fds[a][b] = two[0];
            p->fds[b][a] = two[1];
        }
    return p;
}

/* Closes a rank's ends, or with others those of all others: a process keeps its own alone. */
static void pairs_close(pairs *p, int rank, int others)
{
    for (int a = 0; a < p->ranks; a++)
        for (int b = 0; b < p->ranks; b++)
            if ((a == rank) != others && p->fds[a][b] >= 0) {
                close(p->fds[a][b]);
                p->fds[a][b] = -1;
            }
}

/* This process dies in its send after so many others, which is cut off in the middle where pairs_torn; -1: it does not.
 * Nothing goes to the rank pairs_shut any more. */
static int pairs_sends_left = -1, pairs_torn, pairs_shut = -1;

static void pairs_die_in_send(int fd, const unsigned char *data, size_t bytes)
{
    if (pairs_sends_left < 0 || pairs_sends_left-- > 0)
        return;
    if (send(fd, data, pairs_torn ? bytes / 2 : bytes, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        raise(SIGKILL);
}

/* Moves bytes until all have gone or the deadline. */
static dtrain_status pairs_move(pairs_end *end, int peer, int sending, unsigned char *data, size_t bytes,
                                int64_t deadline_ns, size_t *moved)
{
    struct pollfd fd = {end->all->fds[end->rank][peer], (short)(sending ? POLLOUT : POLLIN), 0};
    *moved = 0;
    if (sending && peer == pairs_shut)
        return DTRAIN_ERR_TIMEOUT;
    if (sending)
        pairs_die_in_send(fd.fd, data, bytes);
    while (*moved < bytes) {
        ssize_t n = sending ? send(fd.fd, data + *moved, bytes - *moved, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : recv(fd.fd, data + *moved, bytes - *moved, MSG_DONTWAIT);
        int closed = n < 0 ? errno != EAGAIN && errno != EINTR : n == 0;
        struct timespec now;
        if (closed && !end->all->asked)
            return DTRAIN_ERR_PEER_LOST;
        if (n > 0) {
            *moved += (size_t)n;
            continue;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        int64_t left_ns = deadline_ns - ((int64_t)now.tv_sec * 1000000000 + now.tv_nsec);
        if (left_ns <= 0)
            return DTRAIN_ERR_TIMEOUT;
        if (closed)
            usleep(1000);
        else
            poll(&fd, 1, left_ns > 100000000 ? 100 : (int)((left_ns + 999999) / 1000000));
    }
    return DTRAIN_OK;
}

static dtrain_status pairs_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    unsigned char *at;
    memcpy(&at, &data, sizeof at);
    return pairs_move((pairs_end *)self, peer, 1, at, bytes, deadline_ns, moved);
}

static dtrain_status pairs_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    return pairs_move((pairs_end *)self, peer, 0, (unsigned char *)data, bytes, deadline_ns, moved);
}

static int pairs_alive(void *self, int peer)
{
    pairs_end *end = (pairs_end *)self;
    char byte;
    ssize_t n = recv(end->all->fds[end->rank][peer], &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return n > 0 ? -1 : n < 0 && (errno == EAGAIN || errno == EINTR);
}

static uint64_t pairs_host(void *self, int peer)
{
    const pairs *all = ((pairs_end *)self)->all;
    return 1 + (uint64_t)(peer * all->hosts / all->ranks);
}

static void pairs_destroy(void *self)
{
    pairs_end *end = (pairs_end *)self;
    pairs_close(end->all, end->rank, 0);
    free(end);
}

/* One rank's end; desc may be NULL. */
__attribute__((unused)) static dtrain_status pairs_join(dtrain_comm **comm, pairs *p, int rank,
                                                        const dtrain_comm_desc *desc)
{
    dtrain_transport transport;
    pairs_end *end = (pairs_end *)malloc(sizeof *end);
    end->all = p;
    end->rank = rank;
    memset(&transport, 0, sizeof transport);
    transport.self = end;
    transport.rank = rank;
    transport.size = p->ranks;
    transport.send = pairs_send;
    transport.recv = pairs_recv;
    transport.destroy = pairs_destroy;
    if (p->asked)
        transport.alive = pairs_alive;
    if (p->hosts)
        transport.host = pairs_host;
    return dtrain_comm_from_transport(comm, &transport, desc);
}

#endif
