/* Benchmarks of compressors. Those of one thread run beside a bare loop that reads, or reads and writes, as many bytes.
 * The operations link_topk and link_int8 sum one vector over links of 100 Mbit/s (tools/bench_link.h), beside the same
 * sum without compression. */
#ifndef BENCH_COMPRESS_H
#define BENCH_COMPRESS_H

#define COMPRESS_LINK_NS 80 /* for a byte: 100 Mbit/s */

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

/* Times an operation and its limit on one thread. */
static int compress_alone(bench *b)
{
    float *x = bench_memory(b->bytes, b->huge), *y = bench_memory(b->bytes, b->huge);
    signed char *codes = (signed char *)bench_memory(2 * b->count + 4096, b->huge);
    size_t k = dtrain_topk_count(b->count, b->ratio);
    dtrain_compressor int8 = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);
    uint32_t *indices = (uint32_t *)malloc(k * sizeof *indices);
    float *values = (float *)malloc(k * sizeof *values);
    dtrain_device_selection *selection; /* made on the CPU */
    DTRAIN_CHECK(dtrain_device_selection_create(NULL, b->count, k, &selection));
    for (size_t i = 0; i < b->count; i++)
        x[i] = dtrain_random_normal(1, i);
    DTRAIN_CHECK(dtrain_device_select(NULL, selection, x, NULL, indices, values));
    for (int run = -1; run < b->runs; run++) {
        bench_progress(b, "", run, b->runs);
        int64_t begin = bench_now_ns();
        switch (b->op) {
        case TOPK: DTRAIN_CHECK(dtrain_device_select(NULL, selection, x, NULL, indices, values)); break;
        case TOPK_ADD: DTRAIN_CHECK(dtrain_device_select(NULL, selection, y, x, indices, values)); break;
        case SPARSE_ADD: DTRAIN_CHECK(dtrain_device_sparse_add(NULL, indices, values, k, y, b->count)); break;
        case INT8_PACK: int8.pack(&int8, x, b->count, codes); break;
        default: int8.unpack(&int8, codes, y, b->count);
        }
        int64_t middle = bench_now_ns();
        compress_limit(b, x, codes, y);
        if (run >= 0) {
            b->us[run] = (double)(middle - begin) * 1e-3;
            b->limit_us[run] = (double)(bench_now_ns() - middle) * 1e-3;
        }
        for (size_t i = 0; b->op == TOPK_ADD && i < k; i++)
            y[indices[i]] = 0.0f; /* error feedback does the same */
    }
    bench_print(b);
    dtrain_device_selection_destroy(NULL, selection);
    free(indices);
    free(values);
    free(x);
    free(y);
    free(codes);
    return 0;
}

static void compress_rank(dtrain_comm *world, bench *b)
{
    int rank = dtrain_comm_rank(world);
    float *grad = bench_memory(b->bytes, 0), *out = bench_memory(b->bytes, 0);
    dtrain_topk_desc topk;
    dtrain_compressor compressor = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);
    dtrain_compressed *compressed;
    memset(&topk, 0, sizeof topk);
    topk.schedule.ratio = b->ratio;
    if (b->op == LINK_TOPK)
        DTRAIN_CHECK(dtrain_compressor_topk(&compressor, &topk, NULL));
    DTRAIN_CHECK(dtrain_compressed_create(&compressed, world, b->count, &compressor, NULL));
    for (size_t i = 0; i < b->count; i++)
        grad[i] = dtrain_random_normal((uint64_t)rank, i);
    for (int run = -1; run < b->runs; run++) {
        if (rank == 0)
            bench_progress(b, "", run, b->runs);
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

static int compress_links(bench *b)
{
    if (bench_links(b, COMPRESS_LINK_NS, compress_rank) != 0)
        return 1;
    bench_print(b);
    return 0;
}

#endif
