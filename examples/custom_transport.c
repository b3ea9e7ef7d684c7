/* A transport of one's own: ranks are processes, joined by pipes, and the whole of it is send and recv. Four processes
 * make a mesh over it: each pair of "model" holds the two weights of one model, a weight each, and the pairs of "data"
 * average the gradients of what their models have seen.
 *
 * cc -O2 -ffp-contract=off -I. examples/custom_transport.c -o build/custom_transport -lpthread -lm
 * build/custom_transport */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 4, MODEL = RANKS % 2 == 0 ? 2 : 1, STEPS = 300 };

typedef struct pipes {
    int rank;
    int out[RANKS], in[RANKS]; /* to and from each rank */
} pipes;

/* Waits until fd is ready; 0 when the deadline came first. A deadline in the past only looks. */
static int wait_ready(int fd, short events, int64_t deadline_ns)
{
    struct pollfd entry = {fd, events, 0};
    for (;;) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        int64_t left = deadline_ns / 1000000 - ((int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000);
        int ready = poll(&entry, 1, left <= 0 ? 0 : left > 1000 ? 1000 : (int)left);
        if (ready > 0)
            return 1;
        if (ready == 0 && left <= 0)
            return 0;
    }
}

static dtrain_status pipes_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    int fd = ((pipes *)self)->out[peer];
    for (*moved = 0; *moved < bytes;) {
        ssize_t n = write(fd, (const char *)data + *moved, bytes - *moved);
        if (n > 0)
            *moved += (size_t)n;
        else if (n < 0 && errno == EAGAIN && !wait_ready(fd, POLLOUT, deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            return errno == EPIPE ? DTRAIN_ERR_PEER_LOST : DTRAIN_ERR_IO;
    }
    return DTRAIN_OK;
}

static dtrain_status pipes_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    int fd = ((pipes *)self)->in[peer];
    for (*moved = 0; *moved < bytes;) {
        ssize_t n = read(fd, (char *)data + *moved, bytes - *moved);
        if (n > 0)
            *moved += (size_t)n;
        else if (n == 0)
            return DTRAIN_ERR_PEER_LOST;
        else if (errno == EAGAIN && !wait_ready(fd, POLLIN, deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
        else if (errno != EAGAIN && errno != EINTR)
            return DTRAIN_ERR_IO;
    }
    return DTRAIN_OK;
}

static int train(pipes *mine)
{
    const dtrain_mesh_dim dims[] = {{"data", 0}, {"model", MODEL}};
    dtrain_transport transport = {0};
    dtrain_comm *world, *data, *model;
    dtrain_mesh *mesh;
    float weights[2] = {0, 0};
    transport.self = mine;
    transport.rank = mine->rank;
    transport.size = RANKS;
    transport.send = pipes_send;
    transport.recv = pipes_recv;
    DTRAIN_CHECK(dtrain_comm_from_transport(&world, &transport, NULL));
    DTRAIN_CHECK(dtrain_mesh_create(&mesh, world, dims, 2));
    data = dtrain_mesh_group(mesh, "data");
    model = dtrain_mesh_group(mesh, "model");
    /* the weights that are this rank's */
    size_t first, count = dtrain_shard(model, 2, dtrain_comm_rank(model), &first);
    for (int step = 0; step < STEPS; step++) {
        size_t example = (size_t)(step * dtrain_comm_size(data) + dtrain_comm_rank(data));
        float x[2] = {dtrain_random_uniform(1, 2 * example), dtrain_random_uniform(1, 2 * example + 1)};
        float y = 0, grads[2];
        for (size_t i = first; i < first + count; i++)
            y += weights[i] * x[i];
        DTRAIN_CHECK(dtrain_all_reduce(model, &y, &y, 1, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = first; i < first + count; i++)
            grads[i] = (y - (3 * x[0] - x[1])) * x[i];
        DTRAIN_CHECK(dtrain_all_reduce(data, grads + first, grads + first, count, DTRAIN_F32, DTRAIN_MEAN));
        for (size_t i = first; i < first + count; i++)
            weights[i] -= grads[i];
    }
    DTRAIN_CHECK(dtrain_all_gather(model, weights + first, weights, 2, DTRAIN_F32));
    DTRAIN_CHECK(dtrain_comm_check_equal(world, weights, 2, DTRAIN_F32));
    if (mine->rank == 0)
        printf("%d processes, %d to a model, agree: y = %.3f a + %.3f b\n", RANKS, MODEL, (double)weights[0],
               (double)weights[1]);
    dtrain_mesh_destroy(mesh);
    dtrain_comm_destroy(world);
    return 0;
}

/* Keeps the ends that are this rank's and closes the others, so that a rank's death is seen as the end of its pipes. */
static void keep_mine(pipes *mine, int fds[RANKS][RANKS][2])
{
    for (int from = 0; from < RANKS; from++)
        for (int to = 0; to < RANKS; to++) {
            if (from == mine->rank)
                mine->out[to] = fds[from][to][1];
            else
                close(fds[from][to][1]);
            if (to == mine->rank)
                mine->in[from] = fds[from][to][0];
            else
                close(fds[from][to][0]);
        }
}

int main(void)
{
    int fds[RANKS][RANKS][2], status, bad = 0;
    pipes mine;
    signal(SIGPIPE, SIG_IGN); /* a peer that is gone shall be an error of write() */
    for (int i = 0; i < RANKS * RANKS; i++) {
        int *ends = fds[i / RANKS][i % RANKS];
        if (pipe(ends) != 0 || fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0 || fcntl(ends[1], F_SETFL, O_NONBLOCK) != 0)
            return 1;
    }
    for (mine.rank = 0; mine.rank < RANKS - 1; mine.rank++)
        if (fork() == 0)
            break;
    keep_mine(&mine, fds);
    bad = train(&mine);
    while (wait(&status) > 0)
        bad |= status != 0;
    return bad;
}

/* 4 processes, 2 to a model, agree: y = 3.000 a + -1.000 b */
