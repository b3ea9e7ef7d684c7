/* Slow links: a transport of the user's own around the threads transport, whose sends take a given time for each byte.
 * The sender sleeps for that time, so that the processors are free. */
#ifndef BENCH_LINK_H
#define BENCH_LINK_H

#define BENCH_LINK_CHUNK ((size_t)16 << 10)

typedef struct bench_link {
    dtrain_transport inner;
    dtrain__threads_group *board;
    bench *b;
    void (*body)(dtrain_comm *world, bench *b);
    int rank;
    double byte_ns;
    int64_t next_ns; /* when the link is free */
    int64_t late_ns; /* how much lost time a sender may catch up, as if a socket's buffer had been full */
} bench_link;

static bench_link bench_link_of[BENCH_RANKS]; /* each rank's */

static dtrain_status bench_link_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                     size_t *moved)
{
    bench_link *link = (bench_link *)self;
    for (*moved = 0; *moved < bytes;) {
        size_t n = bytes - *moved < BENCH_LINK_CHUNK ? bytes - *moved : BENCH_LINK_CHUNK, sent;
        int64_t now = bench_now_ns(), until = link->next_ns < deadline_ns ? link->next_ns : deadline_ns;
        if (now < until) {
            struct timespec pause = {(until - now) / 1000000000, (until - now) % 1000000000};
            nanosleep(&pause, NULL);
            now = bench_now_ns();
        }
        if (now < link->next_ns)
            return DTRAIN_ERR_TIMEOUT;
        dtrain_status status =
            link->inner.send(link->inner.self, peer, (const char *)data + *moved, n, deadline_ns, &sent);
        if (link->next_ns < now - link->late_ns) /* the link was idle */
            link->next_ns = now;
        link->next_ns += (int64_t)((double)sent * link->byte_ns);
        *moved += sent;
        if (status != DTRAIN_OK)
            return status;
    }
    return DTRAIN_OK;
}

static dtrain_status bench_link_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    bench_link *link = (bench_link *)self;
    return link->inner.recv(link->inner.self, peer, data, bytes, deadline_ns, moved);
}

static void bench_link_destroy(void *self)
{
    bench_link *link = (bench_link *)self;
    link->inner.destroy(link->inner.self);
}

static void *bench_link_rank(void *pointer)
{
    bench_link *link = (bench_link *)pointer;
    dtrain_transport transport;
    dtrain_comm_desc desc;
    dtrain_comm *world;
    dtrain__end end;
    dtrain__threads_end(&end, link->board, link->rank);
    link->inner = end.transport;
    memset(&transport, 0, sizeof transport);
    transport.self = link;
    transport.rank = link->rank;
    transport.size = link->b->ranks;
    transport.send = bench_link_send;
    transport.recv = bench_link_recv;
    transport.destroy = bench_link_destroy;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = -1;
    DTRAIN_CHECK(dtrain_comm_from_transport(&world, &transport, &desc));
    link->body(world, link->b);
    dtrain_comm_destroy(world);
    return NULL;
}

/* Runs body on every rank over slow links. */
static int bench_links(bench *b, double byte_ns, void (*body)(dtrain_comm *world, bench *b))
{
    pthread_t threads[BENCH_RANKS];
    dtrain__threads_group *board;
    DTRAIN_CHECK(dtrain__threads_create(&board, b->ranks, NULL));
    for (int r = 0; r < b->ranks; r++) {
        bench_link_of[r].board = board;
        bench_link_of[r].b = b;
        bench_link_of[r].body = body;
        bench_link_of[r].rank = r;
        bench_link_of[r].byte_ns = byte_ns;
        bench_link_of[r].late_ns = 1000000;
        if (pthread_create(&threads[r], NULL, bench_link_rank, &bench_link_of[r]) != 0)
            return 1;
    }
    for (int r = 0; r < b->ranks; r++)
        pthread_join(threads[r], NULL);
    return 0;
}

#endif
