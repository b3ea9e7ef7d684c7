/* Two ranks over a transport of their own, of which rank 1 lies: it runs the same calls as rank 0, and what it sends is
 * changed on the way as a list says. Headers and frames stay true, so that all of it is read. For tests that fuzz what
 * comes after admission; include dtrain.h with its implementation first.
 *
 * A change is 12 bytes: which message, how, where (2 bytes), a value (8 bytes). */
#ifndef DTRAIN_TEST_LIARS_H
#define DTRAIN_TEST_LIARS_H

#define LIARS_CHANGE 12
#define LIARS_GROUPS 64

typedef struct liars_pipe {
    unsigned char *bytes;
    size_t count, room, taken;
} liars_pipe;

/* Messages of rank 1 in one group. */
typedef struct liars_stream {
    uint64_t lane;
    int used;
    liars_pipe pipe;
    size_t payload; /* of the message whose header is out; 0: a header is next */
} liars_stream;

typedef struct liars_pair {
    pthread_mutex_t mutex;
    pthread_cond_t news;
    liars_pipe to[2];
    int closed;
    int64_t given_ns; /* when bytes went last */
    const unsigned char *changes;
    size_t change_count;
    unsigned messages; /* that rank 1 has sent */
    liars_pipe raw;    /* what it sends, until a frame is whole */
    liars_stream streams[LIARS_GROUPS];
} liars_pair;

typedef struct liars_end {
    liars_pair *pair;
    int rank;
} liars_end;

__attribute__((unused)) static void liars_quiet(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
}

/* Makes the hash at the end of an index right, so that its members are read. */
static void liars_hash(unsigned char *data, size_t bytes)
{
    if (bytes > DTRAIN__INDEX_TAIL && memcmp(data + bytes - DTRAIN__INDEX_TAIL, ",\"hash\":\"", 9) == 0) {
        char tail[DTRAIN__INDEX_TAIL + 1];
        snprintf(tail, sizeof tail, ",\"hash\":\"%016llx\"}",
                 (unsigned long long)dtrain__xxh64_of(data, bytes - DTRAIN__INDEX_TAIL, 0));
        memcpy(data + bytes - DTRAIN__INDEX_TAIL, tail, DTRAIN__INDEX_TAIL);
    }
}

/* Changes the payload of one message. */
static void liars_change(const liars_pair *pair, unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i < pair->change_count && bytes > 0; i++) {
        const unsigned char *change = pair->changes + i * LIARS_CHANGE;
        size_t where = change[2] | (size_t)change[3] << 8;
        if (change[0] % 64 != pair->messages % 64)
            continue;
        if (change[1] % 2 == 0 && bytes >= 8) /* a word */
            memcpy(data + where % (bytes / 8) * 8, change + 4, 8);
        else
            data[where % bytes] ^= change[4];
        liars_hash(data, bytes);
    }
}

static void liars_give(liars_pipe *pipe, const void *data, size_t bytes)
{
    if (pipe->count + bytes > pipe->room) {
        pipe->room = 2 * (pipe->count + bytes);
        pipe->bytes = (unsigned char *)realloc(pipe->bytes, pipe->room);
        if (pipe->bytes == NULL)
            abort();
    }
    if (bytes > 0)
        memcpy(pipe->bytes + pipe->count, data, bytes);
    pipe->count += bytes;
}

/* Sends a header or a payload in frames of its group. */
static void liars_frames(liars_pair *pair, uint64_t lane, const unsigned char *data, size_t bytes)
{
    for (size_t n; bytes > 0; data += n, bytes -= n) {
        unsigned char header[DTRAIN__MUX_HEADER];
        n = bytes < DTRAIN__MUX_FRAME ? bytes : DTRAIN__MUX_FRAME;
        dtrain__mux_frame(header, lane, DTRAIN__MUX_DATA, NULL, n);
        liars_give(&pair->to[0], header, sizeof header);
        liars_give(&pair->to[0], data, n);
    }
}

/* Takes what has come of a group apart into headers and payloads. */
static void liars_lie(liars_pair *pair, liars_stream *stream)
{
    for (;;) {
        dtrain__message_header header;
        unsigned char *data = stream->pipe.bytes + stream->pipe.taken;
        size_t have = stream->pipe.count - stream->pipe.taken, n = stream->payload;
        if (have < (n > 0 ? n : sizeof header))
            return;
        if (n == 0) {
            memcpy(&header, data, sizeof header);
            stream->payload = (size_t)header.bytes;
            header.data_check = 0;
            header.check = dtrain__message_header_sum(&header);
            liars_frames(pair, stream->lane, (const unsigned char *)&header, sizeof header);
            pair->messages += header.bytes == 0;
            n = sizeof header;
        } else {
            liars_change(pair, data, n);
            liars_frames(pair, stream->lane, data, n);
            pair->messages++;
            stream->payload = 0;
        }
        stream->pipe.taken += n;
    }
}

/* Takes what rank 1 sends apart into frames. */
static void liars_unpack(liars_pair *pair)
{
    for (;;) {
        const unsigned char *frame = pair->raw.bytes + pair->raw.taken;
        size_t have = pair->raw.count - pair->raw.taken, bytes = DTRAIN__MUX_HEADER;
        int group = 0;
        if (have >= bytes)
            bytes += (size_t)dtrain__get_le(frame + 12, 4);
        if (have < bytes)
            return;
        pair->raw.taken += bytes;
        if (dtrain__get_le(frame + 8, 4) != DTRAIN__MUX_DATA) {
            liars_give(&pair->to[0], frame, bytes);
            continue;
        }
        while (pair->streams[group].used && pair->streams[group].lane != dtrain__get_le(frame, 8))
            if (++group == LIARS_GROUPS)
                abort();
        pair->streams[group].used = 1;
        pair->streams[group].lane = dtrain__get_le(frame, 8);
        liars_give(&pair->streams[group].pipe, frame + DTRAIN__MUX_HEADER, bytes - DTRAIN__MUX_HEADER);
        liars_lie(pair, &pair->streams[group]);
    }
}

static dtrain_status liars_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    liars_end *end = (liars_end *)self;
    liars_pair *pair = end->pair;
    (void)deadline_ns;
    pthread_mutex_lock(&pair->mutex);
    if (end->rank == 1 && pair->change_count > 0) {
        liars_give(&pair->raw, data, bytes);
        liars_unpack(pair);
    } else {
        liars_give(&pair->to[peer], data, bytes);
    }
    *moved = bytes;
    pair->given_ns = dtrain__os_now_ns();
    dtrain_status status = pair->closed ? DTRAIN_ERR_PEER_LOST : DTRAIN_OK;
    pthread_cond_broadcast(&pair->news);
    pthread_mutex_unlock(&pair->mutex);
    return status;
}

/* Waits for bytes until somebody is gone. When one of them lies and nothing has gone for a while, both wait. */
static dtrain_status liars_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    liars_end *end = (liars_end *)self;
    liars_pair *pair = end->pair;
    liars_pipe *pipe = &pair->to[end->rank];
    int64_t now;
    (void)peer;
    pthread_mutex_lock(&pair->mutex);
    while (pipe->count == pipe->taken && !pair->closed && deadline_ns > (now = dtrain__os_now_ns())) {
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec += 1000000;
        soon.tv_sec += soon.tv_nsec / 1000000000;
        soon.tv_nsec %= 1000000000;
        pair->closed |= pair->change_count > 0 && now - pair->given_ns > 200000000;
        pthread_cond_timedwait(&pair->news, &pair->mutex, &soon);
    }
    size_t have = pipe->count - pipe->taken;
    *moved = have < bytes ? have : bytes;
    if (*moved > 0)
        memcpy(data, pipe->bytes + pipe->taken, *moved);
    pipe->taken += *moved;
    dtrain_status status = *moved == bytes ? DTRAIN_OK : pair->closed ? DTRAIN_ERR_PEER_LOST : DTRAIN_ERR_TIMEOUT;
    pthread_mutex_unlock(&pair->mutex);
    return status;
}

/* This rank goes: nobody waits for it any more. */
static void liars_close(liars_pair *pair)
{
    pthread_mutex_lock(&pair->mutex);
    pair->closed = 1;
    pthread_cond_broadcast(&pair->news);
    pthread_mutex_unlock(&pair->mutex);
}

typedef void (*liars_body)(dtrain_comm *world, void *user);

typedef struct liars_rank {
    liars_end end;
    liars_body body;
    void *user;
    dtrain_allocator heap;
} liars_rank;

static void *liars_main(void *pointer)
{
    liars_rank *rank = (liars_rank *)pointer;
    dtrain_transport transport;
    dtrain_comm_desc desc;
    dtrain_comm *world = NULL;
    memset(&transport, 0, sizeof transport);
    memset(&desc, 0, sizeof desc);
    transport.self = &rank->end;
    transport.rank = rank->end.rank;
    transport.size = 2;
    transport.send = liars_send;
    transport.recv = liars_recv;
    desc.timeout_ms = 20000;
    desc.progress = DTRAIN_PROGRESS_POLL; /* a thread beside the caller would wait as well */
    desc.allocator = &rank->heap;
    if (dtrain_comm_from_transport(&world, &transport, &desc) != DTRAIN_OK)
        abort();
    rank->body(world, rank->user);
    dtrain_comm_destroy(world);
    liars_close(rank->end.pair);
    return NULL;
}

/* Runs body on both ranks; aborts when rank 0 keeps or takes more memory than `most` bytes. */
static void liars_run(liars_body body, void *user, const unsigned char *changes, size_t bytes, size_t most)
{
    liars_pair pair;
    liars_rank ranks[2];
    pthread_t liar;
    memset(&pair, 0, sizeof pair);
    memset(ranks, 0, sizeof ranks);
    pthread_mutex_init(&pair.mutex, NULL);
    pthread_cond_init(&pair.news, NULL);
    pair.changes = changes;
    pair.change_count = bytes / LIARS_CHANGE;
    pair.given_ns = dtrain__os_now_ns();
    for (int r = 0; r < 2; r++) {
        ranks[r].end.pair = &pair;
        ranks[r].end.rank = r;
        ranks[r].body = body;
        ranks[r].user = user;
    }
    if (pthread_create(&liar, NULL, liars_main, &ranks[1]) != 0)
        abort();
    liars_main(&ranks[0]);
    pthread_join(liar, NULL);
    for (int r = 0; r < 2; r++)
        free(pair.to[r].bytes);
    free(pair.raw.bytes);
    for (int group = 0; group < LIARS_GROUPS; group++)
        free(pair.streams[group].pipe.bytes);
    pthread_cond_destroy(&pair.news);
    pthread_mutex_destroy(&pair.mutex);
    if (ranks[0].heap.bytes != 0 || ranks[0].heap.peak_bytes > most) {
        fprintf(stderr, "rank 0 kept %zu bytes and took %zu, expected 0 and at most %zu\n", ranks[0].heap.bytes,
                ranks[0].heap.peak_bytes, most);
        abort();
    }
}

#endif
