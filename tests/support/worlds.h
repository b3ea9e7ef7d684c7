/* One body on threads, on processes over TCP, and over cables: a transport that has nothing but send and recv. */
#ifndef DTRAIN_TEST_WORLDS_H
#define DTRAIN_TEST_WORLDS_H
#include "processes.h"

#include <pthread.h>

#define CABLE_BYTES 8192
#define MANY 9

/* Bytes from one rank to another. */
typedef struct cable {
    pthread_mutex_t mutex;
    size_t written, read;
    unsigned char bytes[CABLE_BYTES];
} cable;

typedef struct cable_end {
    cable *cables; /* [from * size + to] */
    int rank, size;
    int told; /* fail was called */
} cable_end;

static dtrain_status cable_move(cable *c, int sending, unsigned char *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    for (*moved = 0;;) {
        size_t before = *moved;
        pthread_mutex_lock(&c->mutex);
        while (*moved < bytes && (sending ? c->written - c->read < CABLE_BYTES : c->written > c->read)) {
            if (sending)
                c->bytes[c->written++ % CABLE_BYTES] = data[(*moved)++];
            else
                data[(*moved)++] = c->bytes[c->read++ % CABLE_BYTES];
        }
        pthread_mutex_unlock(&c->mutex);
        if (*moved == bytes)
            return DTRAIN_OK;
        if (*moved == before && now_s() * 1e9 >= (double)deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (*moved == before)
            usleep(100);
    }
}

static dtrain_status cable_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    cable_end *end = (cable_end *)self;
    unsigned char *at;
    memcpy(&at, &data, sizeof at);
    return cable_move(&end->cables[end->rank * end->size + peer], 1, at, bytes, deadline_ns, moved);
}

static dtrain_status cable_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    cable_end *end = (cable_end *)self;
    return cable_move(&end->cables[peer * end->size + end->rank], 0, (unsigned char *)data, bytes, deadline_ns, moved);
}

static void cable_fail(void *self, dtrain_status why, const char *text)
{
    cable_end *end = (cable_end *)self;
    (void)why;
    (void)text;
    __atomic_store_n(&end->told, 1, __ATOMIC_SEQ_CST);
}

typedef void (*world_body)(dtrain_comm *world);

typedef struct own_rank {
    pthread_t thread;
    cable_end end;
    dtrain_comm *comm;
    world_body body;
} own_rank;

static void *own_main(void *pointer)
{
    own_rank *rank = (own_rank *)pointer;
    rank->body(rank->comm);
    dtrain_comm_destroy(rank->comm);
    return NULL;
}

static cable *cables_new(int ranks)
{
    cable *cables = (cable *)calloc((size_t)(ranks * ranks), sizeof(cable));
    for (int i = 0; i < ranks * ranks; i++)
        pthread_mutex_init(&cables[i].mutex, NULL);
    return cables;
}

static dtrain_comm *cable_comm(cable *cables, cable_end *end, int rank, int ranks, const dtrain_comm_desc *desc)
{
    dtrain_transport transport;
    dtrain_comm *comm = NULL;
    memset(&transport, 0, sizeof transport);
    end->cables = cables;
    end->rank = rank;
    end->size = ranks;
    end->told = 0;
    transport.self = end;
    transport.rank = rank;
    transport.size = ranks;
    transport.send = cable_send;
    transport.recv = cable_recv;
    transport.fail = cable_fail;
    CHECK_EQ(dtrain_comm_from_transport(&comm, &transport, desc), DTRAIN_OK);
    return comm;
}

static world_body current; /* these two are set before any thread or process of a world exists */
static int polling;

static void world_begin(world_body body, const dtrain_comm_desc *desc)
{
    current = body;
    polling = desc != NULL && desc->progress == DTRAIN_PROGRESS_POLL;
}

static void on_cables(int ranks, world_body body, const dtrain_comm_desc *desc)
{
    cable *cables = cables_new(ranks);
    own_rank own[16];
    pthread_attr_t roomy; /* musl gives 128 KiB of stack, and products take 280 */
    CHECK_EQ(pthread_attr_init(&roomy), 0);
    CHECK_EQ(pthread_attr_setstacksize(&roomy, (size_t)1 << 20), 0);
    world_begin(body, desc);
    for (int rank = 0; rank < ranks; rank++) {
        own[rank].body = body;
        own[rank].comm = cable_comm(cables, &own[rank].end, rank, ranks, desc);
    }
    for (int rank = 0; rank < ranks; rank++)
        CHECK_EQ(pthread_create(&own[rank].thread, &roomy, own_main, &own[rank]), 0);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(own[rank].thread, NULL);
    pthread_attr_destroy(&roomy);
    free(cables);
}

static dtrain_status on_a_thread(dtrain_comm *world, void *user)
{
    (void)user;
    current(world);
    return DTRAIN_OK;
}

static int in_a_process(dtrain_comm *world, scene *s)
{
    (void)s;
    current(world);
    return 0;
}

static void on_threads(int ranks, world_body body, const dtrain_comm_desc *desc)
{
    world_begin(body, desc);
    CHECK_EQ(dtrain_run_threads(ranks, on_a_thread, NULL, desc), DTRAIN_OK);
}

static void on_processes(int ranks, world_body body, const dtrain_comm_desc *desc)
{
    scene s;
    scene_begin(&s, ranks, 1);
    if (desc != NULL)
        s.desc = *desc;
    if (s.desc.timeout_ms == 0)
        s.desc.timeout_ms = test_ms(20000);
    world_begin(body, desc);
    run_ranks(&s, in_a_process);
}

__attribute__((unused)) static void everywhere(int ranks, world_body body)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int poll = 0; poll < 2; poll++) {
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        on_threads(ranks, body, &desc);
        on_processes(ranks, body, &desc);
        on_cables(ranks, body, &desc);
    }
}

static float value(int rank, size_t i)
{
    return (float)((int)((size_t)rank * 7919 + i * 31) % 1000) * 0.37f - 100.0f;
}

__attribute__((unused)) static float *values(int rank, size_t count)
{
    float *data = (float *)malloc((count + 1) * sizeof(float));
    for (size_t i = 0; i < count; i++)
        data[i] = value(rank, i);
    return data;
}

__attribute__((unused)) static int holds(const float *data, int rank, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (data[i] != value(rank, i))
            return 0;
    return 1;
}

#endif
