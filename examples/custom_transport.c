/* A transport of your own is two functions, send and recv. Here two-way pipes join 4 processes, which make a mesh over
 * them: each pair along "model" holds a model of two weights, and the pairs train on other examples.
 *
 * cc -O2 -ffp-contract=off -I. examples/custom_transport.c -o build/custom_transport -lpthread -lm
 * build/custom_transport */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 4, STEPS = 300 };

/* Moves bytes through a pipe until all have gone or the deadline passes; a deadline in the past only looks. */
static dtrain_status transfer(int fd, short event, char *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    for (*moved = 0; *moved < bytes;) {
        ssize_t n = event == POLLIN ? recv(fd, data + *moved, bytes - *moved, MSG_DONTWAIT)
                                    : send(fd, data + *moved, bytes - *moved, MSG_DONTWAIT);
        if (n > 0)
            *moved += (size_t)n;
        else if (n == 0 || errno == EPIPE || errno == ECONNRESET)
            return DTRAIN_ERR_PEER_LOST; /* the peer's end is closed */
        else if (errno != EAGAIN && errno != EINTR)
            return DTRAIN_ERR_IO;
        else {
            struct pollfd ready = {fd, event, 0};
            struct timespec now;
            clock_gettime(CLOCK_MONOTONIC, &now);
            int64_t left_ms = deadline_ns / 1000000 - (int64_t)now.tv_sec * 1000 - now.tv_nsec / 1000000;
            if (poll(&ready, 1, left_ms < 0 ? 0 : left_ms < 1000 ? (int)left_ms : 1000) == 0 && left_ms <= 0)
                return DTRAIN_ERR_TIMEOUT;
        }
    }
    return DTRAIN_OK;
}

static dtrain_status pipes_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline, size_t *moved)
{
    return transfer(((int *)self)[peer], POLLOUT, (char *)data, bytes, deadline, moved);
}

static dtrain_status pipes_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline, size_t *moved)
{
    return transfer(((int *)self)[peer], POLLIN, (char *)data, bytes, deadline, moved);
}

static void train(int *pipes, int rank)
{
    dtrain_mesh_dim dims[] = {{"data", 0}, {"model", RANKS % 2 == 0 ? 2 : 1}};
    dtrain_transport transport = {.self = pipes, .rank = rank, .size = RANKS, .send = pipes_send, .recv = pipes_recv};
    dtrain_comm *world;
    dtrain_mesh *mesh;
    float w[2] = {0, 0};
    DTRAIN_CHECK(dtrain_comm_from_transport(&world, &transport, NULL));
    DTRAIN_CHECK(dtrain_mesh_create(&mesh, world, dims, 2));
    dtrain_comm *data = dtrain_mesh_group(mesh, "data"), *model = dtrain_mesh_group(mesh, "model");
    size_t lo, n = dtrain_shard(model, 2, dtrain_comm_rank(model), &lo); /* this rank's weights */
    for (int step = 0; step < STEPS; step++) {
        uint64_t at = 2 * (uint64_t)(step * dtrain_comm_size(data) + dtrain_comm_rank(data));
        float x[2] = {dtrain_random_uniform(1, at), dtrain_random_uniform(1, at + 1)}, error = 0;
        for (size_t i = lo; i < lo + n; i++)
            error += (w[i] - (i == 0 ? 3 : -1)) * x[i]; /* learns y = 3 a - b */
        DTRAIN_CHECK(dtrain_all_reduce(model, &error, &error, 1, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = lo; i < lo + n; i++)
            w[i] -= error * x[i];
        DTRAIN_CHECK(dtrain_all_reduce(data, w + lo, w + lo, n, DTRAIN_F32, DTRAIN_MEAN));
    }
    DTRAIN_CHECK(dtrain_all_gather(model, w + lo, w, 2, DTRAIN_F32));
    DTRAIN_CHECK(dtrain_comm_check_equal(world, w, 2, DTRAIN_F32));
    if (rank == 0)
        printf("%d processes agree: y = %.3f a + %.3f b\n", RANKS, (double)w[0], (double)w[1]);
    dtrain_mesh_destroy(mesh);
    dtrain_comm_destroy(world);
}

int main(void)
{
    int fds[RANKS][RANKS], ends[2], rank = 0, status, bad = 0; /* fds[a][b]: rank a's end of its pipe to rank b */
    signal(SIGPIPE, SIG_IGN); /* send() says EPIPE instead */
    for (int i = 0; i < RANKS * RANKS; i++)
        if (i / RANKS < i % RANKS && socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0)
            fds[i / RANKS][i % RANKS] = ends[0], fds[i % RANKS][i / RANKS] = ends[1];
    while (rank < RANKS - 1 && fork() != 0)
        rank++;
    for (int i = 0; i < RANKS * RANKS; i++) /* closes the ends of other ranks, so that a rank's death ends its pipes */
        if (i / RANKS != rank && i / RANKS != i % RANKS)
            close(fds[i / RANKS][i % RANKS]);
    train(fds[rank], rank);
    while (wait(&status) > 0)
        bad |= status;
    return bad != 0;
}

/* 4 processes agree: y = 3.000 a + -1.000 b */
