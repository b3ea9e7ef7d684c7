/* A ring all-reduce as a user would write it over dtrain_exchange. The vector is cut into chunks, and each chunk into
 * one part for each rank. A rank receives a whole message before it adds it. The tree order is measured against
 * this. */
#ifndef BENCH_RING_H
#define BENCH_RING_H

static void bench_ring(bench *b, dtrain_comm *world)
{
    static __thread float *scratch;
    int rank = dtrain_comm_rank(world), n = b->ranks, right = (rank + 1) % n, left = (rank + n - 1) % n;
    float *data = b->buffers[rank];
    if (scratch == NULL)
        scratch = bench_memory(b->chunk, 0);
    for (size_t at = 0; at < b->count && n > 1; at += b->chunk / sizeof(float)) {
        size_t whole = b->count - at < b->chunk / sizeof(float) ? b->count - at : b->chunk / sizeof(float);
        for (int k = 0; k < 2 * (n - 1); k++) {
            int adds = k < n - 1, out = (rank - k + 2 * n) % n, in = (out + n - 1) % n;
            size_t from, to, out_count, in_count;
            out_count = dtrain_shard(world, whole, out, &from);
            in_count = dtrain_shard(world, whole, in, &to);
            DTRAIN_CHECK(dtrain_exchange(world, data + at + from, out_count, right, adds ? scratch : data + at + to,
                                         in_count, left, DTRAIN_F32));
            if (adds)
                bench_add(data + at + to, scratch, in_count);
        }
    }
}

#endif
