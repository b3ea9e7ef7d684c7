/* Compressors beside what they cannot be faster than: a bare loop that reads, or reads and writes, as many bytes on
 * the same thread; and the aggregation of one vector compressed beside the same as it is, over links of 100 Mbit/s:
 * the threads transport as one of the user's own, of which each rank's sends take so long. */
#ifndef BENCH_COMPRESS_H
#define BENCH_COMPRESS_H

#define COMPRESS_LINK_NS 80 /* that a byte takes: 100 Mbit/s */
#define COMPRESS_LINK_CHUNK ((size_t)16 << 10)

typedef struct compress_link {
    dtrain_transport inner;
    int64_t next_ns;
} compress_link;

typedef struct compress_thread {
    bench *b;
    dtrain__board *board;
    int rank;
} compress_thread;

BENCH_INLINE float compress_read_body(const float *restrict x, size_t n)
{
    float lanes[64] = {0};
    for (size_t i = 0; i + 64 <= n; i += 64)
        for (size_t k = 0; k < 64; k++)
            lanes[k] += x[i + k];
    for (size_t k = 1; k < 64; k++)
        lanes[0] += lanes[k];
    return lanes[0];
}

BENCH_INLINE void compress_narrow_body(const float *restrict x, signed char *restrict y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = (signed char)(int)x[i];
}

BENCH_INLINE void compress_widen_body(const signed char *restrict x, float *restrict y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = (float)x[i];
}

static volatile float compress_seen;

BENCH_INLINE void compress_limit_body(const bench *b, const float *x, signed char *codes, float *y)
{
    if (b->op == INT8_PACK)
        compress_narrow_body(x, codes, b->count);
    else if (b->op == INT8_UNPACK)
        compress_widen_body(codes, y, b->count);
    else
        compress_seen = compress_read_body(x, b->count);
}

BENCH_LOOP(compress_limit, (const bench *b, const float *x, signed char *codes, float *y), (b, x, codes, y))

/* One thread: an operation, and its limit. */
static int compress_alone(bench *b)
{
    float *x = bench_memory(b->bytes, b->huge), *y = bench_memory(b->bytes, b->huge);
    signed char *codes = (signed char *)bench_memory(2 * b->count + 4096, b->huge);
    size_t k = dtrain_topk_count(b->count, b->ratio);
    dtrain_compressor int8 = dtrain_compressor_int8(0);
    dtrain_sparse sparse;
    memset(&sparse, 0, sizeof sparse);
    for (size_t i = 0; i < b->count; i++)
        x[i] = dtrain_random_normal(1, i);
    DTRAIN_CHECK(dtrain_topk(x, b->count, k, &sparse));
    for (int run = -1; run < b->runs; run++) {
        int64_t begin = bench_now_ns();
        switch (b->op) {
        case TOPK: DTRAIN_CHECK(dtrain_topk(x, b->count, k, &sparse)); break;
        case TOPK_ADD: DTRAIN_CHECK(dtrain_topk_add(y, x, b->count, k, &sparse)); break;
        case SPARSE_ADD: DTRAIN_CHECK(dtrain_sparse_add(&sparse, y, b->count)); break;
        case INT8_PACK: int8.pack(&int8, x, b->count, codes); break;
        default: int8.unpack(&int8, codes, y, b->count);
        }
        int64_t middle = bench_now_ns();
        compress_limit(b, x, codes, y);
        if (run >= 0) {
            b->us[run] = (double)(middle - begin) * 1e-3;
            b->limit_us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        }
        for (size_t i = 0; b->op == TOPK_ADD && i < sparse.count; i++)
            y[sparse.indices[i]] = 0.0f; /* as feedback does */
    }
    bench_print(b);
    dtrain_sparse_destroy(&sparse);
    free(x);
    free(y);
    free(codes);
    return 0;
}

static dtrain_status compress_link_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                        size_t *moved)
{
    compress_link *link = (compress_link *)self;
    for (*moved = 0; *moved < bytes;) {
        size_t n = bytes - *moved < COMPRESS_LINK_CHUNK ? bytes - *moved : COMPRESS_LINK_CHUNK, sent;
        int64_t now = bench_now_ns(), wait = link->next_ns - now;
        if (link->next_ns > deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (wait > 0) {
            struct timespec pause = {wait / 1000000000, wait % 1000000000};
            nanosleep(&pause, NULL);
        }
        dtrain_status status =
            link->inner.send(link->inner.self, peer, (const char *)data + *moved, n, deadline_ns, &sent);
        *moved += sent;
        if (wait < -1000000)
            link->next_ns = now; /* the link was idle */
        link->next_ns += (int64_t)sent * COMPRESS_LINK_NS;
        if (status != DTRAIN_OK)
            return status;
    }
    return DTRAIN_OK;
}

static dtrain_status compress_link_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                        size_t *moved)
{
    compress_link *link = (compress_link *)self;
    return link->inner.recv(link->inner.self, peer, data, bytes, deadline_ns, moved);
}

static void compress_link_destroy(void *self)
{
    compress_link *link = (compress_link *)self;
    link->inner.destroy(link->inner.self);
    free(link);
}

static void compress_rank(dtrain_comm *world, bench *b)
{
    int rank = dtrain_comm_rank(world);
    float *grad = bench_memory(b->bytes, 0), *out = bench_memory(b->bytes, 0);
    dtrain_topk_desc topk;
    dtrain_compressor compressor = dtrain_compressor_int8(0);
    dtrain_compressed *compressed;
    memset(&topk, 0, sizeof topk);
    topk.schedule.ratio = b->ratio;
    if (b->op == LINK_TOPK)
        DTRAIN_CHECK(dtrain_compressor_topk(&compressor, &topk, NULL));
    DTRAIN_CHECK(dtrain_compressed_create(&compressed, world, b->count, &compressor, NULL));
    for (size_t i = 0; i < b->count; i++)
        grad[i] = dtrain_random_normal((uint64_t)rank, i);
    for (int run = -1; run < b->runs; run++) {
        DTRAIN_CHECK(dtrain_barrier(world));
        int64_t begin = bench_now_ns();
        DTRAIN_CHECK(dtrain_compressed_all_reduce(compressed, grad, out, DTRAIN_SUM));
        DTRAIN_CHECK(dtrain_barrier(world));
        int64_t middle = bench_now_ns();
        DTRAIN_CHECK(dtrain_all_reduce(world, grad, out, b->count, DTRAIN_F32, DTRAIN_SUM));
        DTRAIN_CHECK(dtrain_barrier(world));
        if (rank == 0 && run >= 0) {
            b->us[run] = (double)(middle - begin) * 1e-3;
            b->limit_us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        }
    }
    dtrain_compressed_destroy(compressed);
    free(grad);
    free(out);
}

static void *compress_link_rank(void *pointer)
{
    compress_thread *thread = (compress_thread *)pointer;
    compress_link *link = (compress_link *)calloc(1, sizeof *link);
    dtrain_transport transport;
    dtrain_comm *world;
    if (link == NULL)
        exit(1);
    dtrain__threads_transport(&link->inner, thread->board, thread->rank);
    memset(&transport, 0, sizeof transport);
    transport.self = link;
    transport.rank = thread->rank;
    transport.size = thread->b->ranks;
    transport.send = compress_link_send;
    transport.recv = compress_link_recv;
    transport.destroy = compress_link_destroy;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = -1;
    desc.checksum = -1;
    DTRAIN_CHECK(dtrain_comm_from_transport(&world, &transport, &desc));
    compress_rank(world, thread->b);
    dtrain_comm_destroy(world);
    return NULL;
}

static int compress_links(bench *b)
{
    pthread_t threads[BENCH_RANKS];
    compress_thread ranks[BENCH_RANKS];
    dtrain__board *board;
    DTRAIN_CHECK(dtrain__board_create(&board, b->ranks, NULL));
    for (int r = 0; r < b->ranks; r++) {
        ranks[r].b = b;
        ranks[r].board = board;
        ranks[r].rank = r;
        if (pthread_create(&threads[r], NULL, compress_link_rank, &ranks[r]) != 0)
            return 1;
    }
    for (int r = 0; r < b->ranks; r++)
        pthread_join(threads[r], NULL);
    bench_print(b);
    return 0;
}

#endif
