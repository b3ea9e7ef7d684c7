/* The limit of collectives between processes, without dtrain: bare sockets between the same processes. Each process
 * sends to its right neighbour as many bytes as the operation must send, while it receives as many from its left
 * neighbour. A reduction adds what it receives. The sockets are made before the processes. */
#ifndef BENCH_WIRE_H
#define BENCH_WIRE_H
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define WIRE_VARIANTS 6 /* chunks of 64 KiB, 256 KiB, 1 MiB; two processes also try one connection for both ways */

static const size_t wire_chunks[3] = {(size_t)64 << 10, (size_t)256 << 10, (size_t)1 << 20};
static int wire_right[BENCH_RANKS], wire_left[BENCH_RANKS]; /* descriptors of each rank */

/* Returns whether the limit goes over sockets. */
static int bench_is_wired(const bench *b)
{
    return b->transport != THREADS && (b->transport != SHM || !bench_is_small(b));
}

static void wire_pair(int ends[2], int tcp)
{
    struct sockaddr_in address;
    socklen_t bytes = sizeof address;
    int one = 1, listener;
    if (!tcp) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
            bench_fail("socketpair");
    } else {
        memset(&address, 0, sizeof address);
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        listener = socket(AF_INET, SOCK_STREAM, 0);
        ends[0] = socket(AF_INET, SOCK_STREAM, 0);
        /* before the sockets connect: a default of bbr would pace them for good */
        setsockopt(listener, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
        setsockopt(ends[0], IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
        if (bind(listener, (struct sockaddr *)&address, bytes) != 0 || listen(listener, 1) != 0 ||
            getsockname(listener, (struct sockaddr *)&address, &bytes) != 0 ||
            connect(ends[0], (struct sockaddr *)&address, bytes) != 0 || (ends[1] = accept(listener, NULL, NULL)) < 0)
            bench_fail("loopback");
        close(listener);
    }
    for (int i = 0; i < 2; i++) {
        fcntl(ends[i], F_SETFL, O_NONBLOCK);
        if (tcp)
            setsockopt(ends[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
}

static void wire_open(int ranks, int tcp)
{
    for (int r = 0; r < ranks; r++) {
        int ends[2];
        wire_pair(ends, tcp);
        wire_right[r] = ends[0];
        wire_left[(r + 1) % ranks] = ends[1];
    }
}

/* Sends `bytes` bytes of data to the right while as many come from the left. The first `add` bytes that come are added
 * to data, chunk by chunk; the others overwrite it. */
static void wire_exchange(bench *b, int rank, float *data, float *scratch, size_t bytes, size_t add, int variant)
{
    size_t chunk = wire_chunks[variant % 3], sent = 0, got = 0;
    int shared = variant >= 3 && b->ranks == 2, out = shared && rank == 1 ? wire_left[1] : wire_right[rank];
    int in = shared && rank == 0 ? wire_right[0] : wire_left[rank];
    while (sent < bytes || got < bytes) {
        size_t from = got / chunk * chunk, end = from + chunk < bytes ? from + chunk : bytes;
        ssize_t n = 0, m = 0;
        unsigned char *place = from < add ? (unsigned char *)scratch + (got - from) : (unsigned char *)data + got;
        if (sent < bytes)
            n = send(out, (unsigned char *)data + sent, bytes - sent < chunk ? bytes - sent : chunk, MSG_NOSIGNAL);
        if (got < bytes)
            m = recv(in, place, end - got, 0);
        sent += n > 0 ? (size_t)n : 0;
        got += m > 0 ? (size_t)m : 0;
        if (m > 0 && got == end && from < add)
            bench_add(data + from / sizeof(float), scratch, (end - from) / sizeof(float));
        if (m == 0 && got < bytes)
            bench_fail("a process has gone");
        if (n <= 0 && m <= 0 && b->ranks > b->threads)
            sched_yield();
    }
}

/* Moves as many bytes as the operation must. An all-reduce moves 2 (n - 1) / n of its bytes and adds half of those.
 * Small buffers take log2 n exchanges of all bytes. */
static void wire_limit(bench *b, int rank, int variant)
{
    static float *scratch;
    float *data = b->buffers[rank];
    if (scratch == NULL)
        scratch = bench_memory(wire_chunks[2], 0);
    if (bench_is_small(b)) {
        for (int distance = 1; distance < b->ranks; distance *= 2)
            wire_exchange(b, rank, data, scratch, b->bytes, b->bytes, variant);
        return;
    }
    size_t part = b->bytes / sizeof(float) / (size_t)b->ranks * (size_t)(b->ranks - 1) * sizeof(float);
    if (b->op == ALL_REDUCE || b->op == REDUCE_SCATTER || b->op == REDUCE || b->op == SCAN)
        wire_exchange(b, rank, data, scratch, part, part, variant);
    if (b->op == ALL_REDUCE || b->op == ALL_GATHER || b->op == ALL_TO_ALL || b->op == SCAN)
        wire_exchange(b, rank, data, scratch, part, 0, variant);
    if (b->op == BROADCAST) /* n - 1 ranks get all bytes: (n - 1) / n a rank if all ranks send alike */
        wire_exchange(b, rank, data, scratch, part, 0, variant);
}

#endif
