/* ---- >>bits ----
 * Prints two hashes: of the outputs of casts, folds, vector operations, norms, compressors, a server, softmax and
 * random numbers, which must be one under any flags, compiler and instruction set; and of matrix products, which may
 * differ only between instruction sets that round a term once and those that round it twice. Argument ftz: with
 * subnormals flushed by the caller. Inputs are made of bits, so that this file's own flags change nothing. NaN payloads
 * and signs that arithmetic gives are nobody's; those that casts give are hashed. */
#define DTRAIN_API static /* what is not called costs no time to compile */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#define ROOM 70000
static unsigned char inputs[9][ROOM] __attribute__((aligned(64))), work[9][ROOM], output[9][ROOM];
static uint64_t hash = UINT64_C(14695981039346656037), state = 1;

static uint64_t draw(void)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) ^ (state << 31);
}

static void add_bits(uint64_t bits)
{
    hash = (hash ^ bits) * UINT64_C(1099511628211);
    hash ^= hash >> 29;
}

/* The NaN threshold of a dtype with its sign bit cleared; 0 for integers. */
static uint64_t infinity_of(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F64    ? UINT64_C(0x7ff0000000000000)
           : dtype == DTRAIN_F32  ? 0x7f800000u
           : dtype == DTRAIN_F16  ? 0x7c00u
           : dtype == DTRAIN_BF16 ? 0x7f80u
                                  : 0;
}

static void add_values(const void *data, dtrain_dtype dtype, size_t count)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    uint64_t infinity = infinity_of(dtype), top = (uint64_t)1 << (8 * width - 1);
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = 0;
        memcpy(&bits, (const unsigned char *)data + i * width, width);
        add_bits(infinity != 0 && (bits & (top - 1)) > infinity ? infinity + 1 : bits);
    }
}

static void add_memory(const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        add_bits(((const unsigned char *)data)[i]);
}

/* Mostly numbers near 1, so that sums round; one in eight any bits at all, one in eight a subnormal, then zeros,
 * infinities and NaN. ordinary: the first kind and subnormals only. */
static void fill(unsigned char *to, dtrain_dtype dtype, size_t count, int ordinary)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    uint64_t infinity = infinity_of(dtype), one = dtype == DTRAIN_F64   ? UINT64_C(0x3ff0000000000000)
                                                  : dtype == DTRAIN_F32 ? 0x3f800000u
                                                  : dtype == DTRAIN_F16 ? 0x3c00u
                                                                        : 0x3f80u;
    uint64_t top = (uint64_t)1 << (8 * width - 1), step = infinity & (~infinity + 1);
    for (size_t i = 0; i < count; i++) {
        uint64_t raw = draw() ^ draw() << 40, kind = draw() % 32, bits = raw;
        if (infinity != 0 && (kind >= 8 || (ordinary && kind >= 4)))
            bits = (raw & top) | (one - 3 * step + (raw >> 1) % (6 * step));
        else if (infinity != 0 && (kind >= 4 || ordinary))
            bits = raw & (top | (step - 1));
        else if (infinity != 0 && kind < 3)
            bits = (raw & top) | (kind == 0 ? 0 : kind == 1 ? infinity : infinity | step >> 1);
        memcpy(to + i * width, &bits, width);
    }
}

static const size_t counts[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130, 500, 1025, 2063};
enum { COUNTS = sizeof counts / sizeof counts[0] };

static void casts(void)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F64,  DTRAIN_F32,     DTRAIN_F16,
                                          DTRAIN_BF16, DTRAIN_F8_E4M3, DTRAIN_F8_E5M2};
    for (int from = 0; from < 6; from++)
        for (int to = 0; to < 6; to++)
            for (int c = 0; c < COUNTS; c++) {
                size_t shift = (size_t)(draw() % 9);
                fill(inputs[0] + shift, dtypes[from], counts[c], 0);
                DTRAIN_CHECK(
                    dtrain_convert(inputs[0] + shift, dtypes[from], output[0] + shift % 5, dtypes[to], counts[c]));
                add_memory(output[0] + shift % 5, counts[c] * (dtrain_dtype_bits(dtypes[to]) / 8));
            }
}

static void fold_once(dtrain_dtype dtype, dtrain_op op, int n, int m, size_t count)
{
    const void *in[9];
    void *out[9];
    size_t shift = (size_t)(draw() % 9), begin = (size_t)(draw() % 4), width = dtrain_dtype_bits(dtype) / 8;
    int alias = (int)(draw() & 1);
    for (int k = 0; k < n; k++) {
        fill(inputs[k] + shift, dtype, begin + count, 0);
        memcpy(work[k] + shift, inputs[k] + shift, (begin + count) * width);
        in[k] = work[k] + shift;
        out[k] = alias ? work[k] + shift : output[k] + shift / 2;
    }
    dtrain__fold(dtype, op, op == DTRAIN_MEAN && draw() % 2 ? 2.6 : n, in, n, out, m, begin, count);
    for (int k = 0; k < m; k++)
        add_values((unsigned char *)out[k] + begin * width, dtype, count);
}

static void folds(void)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F64, DTRAIN_F32, DTRAIN_F16, DTRAIN_BF16, DTRAIN_I8,
                                          DTRAIN_U8,  DTRAIN_I32, DTRAIN_U32, DTRAIN_I64,  DTRAIN_U64};
    for (int t = 0; t < 10; t++)
        for (int op = DTRAIN_SUM; op <= DTRAIN_MAX; op++)
            for (int n = 1; n <= 9 && dtrain__fold_supported(dtypes[t], (dtrain_op)op); n++)
                for (int c = n % 2; c < COUNTS; c += 2)
                    fold_once(dtypes[t], (dtrain_op)op, n, draw() % 2 ? n : 1, counts[c]);
}

static void partial_folds(void)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F64, DTRAIN_F32, DTRAIN_F16, DTRAIN_BF16};
    for (int t = 0; t < 4; t++)
        for (int op = DTRAIN_SUM; op <= DTRAIN_MAX; op++)
            for (int c = 0; c < COUNTS; c++) {
                dtrain_dtype wide = dtrain__fold_partial(dtypes[t]);
                fill(inputs[0], wide, counts[c], 0);
                fill(inputs[1] + 1, wide, counts[c], 0);
                dtrain__fold_pair(wide, (dtrain_op)op, inputs[0], inputs[1] + 1, counts[c]);
                add_values(inputs[0], wide, counts[c]);
                dtrain__fold_finish(dtypes[t], (dtrain_op)op, 3, inputs[0], output[0] + 1, counts[c]);
                add_values(output[0] + 1, dtypes[t], counts[c]);
            }
}

static void vectors(void)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F64, DTRAIN_F32, DTRAIN_F16, DTRAIN_BF16};
    for (int t = 0; t < 4; t++)
        for (int c = 0; c < COUNTS; c++)
            for (size_t shift = 0; shift < 3; shift++) {
                void *x = inputs[0] + shift, *y = inputs[1];
                fill(inputs[0] + shift, dtypes[t], counts[c], shift == 2);
                fill(inputs[1], dtypes[t], counts[c], shift == 2);
                DTRAIN_CHECK(dtrain_device_axpy(NULL, dtypes[t], y, 0.3, x, counts[c]));
                add_values(y, dtypes[t], counts[c]);
                DTRAIN_CHECK(dtrain_device_scale(NULL, dtypes[t], x, -1.7, counts[c]));
                add_values(x, dtypes[t], counts[c]);
                if (dtypes[t] == DTRAIN_F32) {
                    double squares = dtrain__vector_sum_squares((const float *)y, counts[c]);
                    add_values(&squares, DTRAIN_F64, 1);
                }
            }
}

static void norms(void)
{
    for (int c = 0; c < COUNTS; c++)
        for (size_t shift = 0; shift < 6; shift++) {
            dtrain__norm sum;
            double value;
            memset(&sum, 0, sizeof sum);
            fill(inputs[0] + shift, DTRAIN_F32, counts[c], shift != 2);
            dtrain__norm_add_squares(&sum, (const float *)(void *)(inputs[0] + shift), counts[c]);
            value = dtrain__norm_value(&sum);
            add_memory(&sum, sizeof sum);
            add_memory(&value, sizeof value);
        }
}

static void selections(void)
{
    dtrain__sparse sparse;
    memset(&sparse, 0, sizeof sparse);
    for (int c = 1; c < COUNTS; c++)
        for (size_t k = 1; k <= counts[c]; k = k * 3) {
            float *sum = (float *)(void *)inputs[0];
            fill(inputs[0], DTRAIN_F32, counts[c], 0);
            fill(inputs[1], DTRAIN_F32, counts[c], 1);
            DTRAIN_CHECK(dtrain__topk_add(sum, (const float *)(void *)inputs[1], counts[c], k, &sparse));
            add_values(sum, DTRAIN_F32, counts[c]);
            add_memory(sparse.indices, k * sizeof *sparse.indices);
        }
    dtrain__sparse_destroy(&sparse);
}

static void compressors(void)
{
    const dtrain_compressor all[] = {
        dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 64), dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 64),
        dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 64), dtrain_compressor_of(DTRAIN_COMPRESS_BF16, 0)};
    for (int k = 0; k < 4; k++)
        for (int c = 0; c < COUNTS; c++)
            for (int ordinary = 0; ordinary < 2; ordinary++) {
                float *values = (float *)(void *)inputs[0], *back = (float *)(void *)output[1];
                fill(inputs[0], DTRAIN_F32, counts[c], ordinary);
                all[k].pack(&all[k], values, counts[c], output[0] + 1);
                add_memory(output[0] + 1, all[k].bytes(&all[k], counts[c]));
                all[k].unpack(&all[k], output[0] + 1, back, counts[c]);
                add_values(back, DTRAIN_F32, counts[c]);
                uint64_t mode = dtrain__fpmode_enter();
                dtrain__feedback_left(values, back, counts[c]);
                add_values(values, DTRAIN_F32, counts[c]);
                dtrain__feedback_velocity(back, values, 0.9f, 0.3f, counts[c]);
                add_values(back, DTRAIN_F32, counts[c]);
                dtrain__fpmode_restore(mode);
            }
}

/* One step of a group of one. */
static void thin_matrices(void)
{
    dtrain_comm *alone = NULL;
    DTRAIN_CHECK(dtrain_threads_create(&alone, 1, NULL));
    for (size_t columns = 5; columns < 60; columns += 9) {
        dtrain_compressor compressor;
        dtrain_compressed *compressed = NULL;
        size_t n = 40 * columns;
        fill(inputs[0], DTRAIN_F32, n, 1);
        DTRAIN_CHECK(dtrain_compressor_powersgd(&compressor, 40, columns, 3, 1, NULL));
        DTRAIN_CHECK(dtrain_compressed_create(&compressed, alone, n, &compressor, NULL));
        for (int step = 0; step < 2; step++) {
            DTRAIN_CHECK(dtrain_compressed_all_reduce(compressed, (const float *)(void *)inputs[0],
                                                      (float *)(void *)output[0], DTRAIN_SUM));
            add_values(output[0], DTRAIN_F32, n);
        }
        dtrain_compressed_destroy(compressed);
    }
    dtrain_comm_destroy(alone);
}

/* A parameter server with one worker, whose rows of work hold parameters and gradients: in step, then asynchronous. */
enum { SERVED = 700 };

static dtrain_status serve(dtrain_comm *world, void *user)
{
    int async = *(const int *)user, rank = dtrain_comm_rank(world);
    dtrain_param table;
    dtrain_server *server = NULL;
    dtrain_server_desc desc;
    dtrain_compress_desc compress;
    dtrain_serve_desc run;
    double total;
    memset(&table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    memset(&compress, 0, sizeof compress);
    memset(&run, 0, sizeof run);
    table.name = "x";
    table.dtype = DTRAIN_F32;
    table.shape[0] = SERVED;
    table.data = work[rank];
    table.grad = work[2 + rank];
    compress.kind = DTRAIN_COMPRESS_INT8;
    compress.least_count = 1;
    desc.async = async;
    desc.compress = &compress;
    dtrain_status status = dtrain_server_create(&server, world, &table, 1, &desc);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    if (status == DTRAIN_OK && async && rank == 0) {
        run.schedule.lr = 0.03f;
        status = dtrain_optimizer_create(&run.optimizer, &table, 1, NULL, NULL);
        status = status == DTRAIN_OK ? dtrain_server_run(server, &run) : status;
        dtrain_optimizer_destroy(run.optimizer);
    }
    for (int step = 0; step < 3 && status == DTRAIN_OK && !(async && rank == 0); step++)
        status = aggregator.aggregate(aggregator.self, &table, 1, rank + 1.5, &total);
    if (status == DTRAIN_OK && async && rank == 1)
        status = dtrain_server_leave(server);
    dtrain_server_destroy(server);
    return status;
}

static void servers(void)
{
    for (int async = 0; async < 2; async++) {
        for (int row = 0; row < 4; row++)
            fill(work[row], DTRAIN_F32, SERVED, 1);
        if (dtrain_run_threads(2, serve, &async, NULL) != DTRAIN_OK)
            printf("%s: ", dtrain_last_error()); /* and then no hash where one is looked for */
        for (int row = 0; row < 4; row++)
            add_values(work[row], DTRAIN_F32, SERVED);
    }
}

static void randoms(void)
{
    for (uint64_t i = 0; i < 5000; i++) {
        uint32_t words[4];
        float uniform = dtrain_random_uniform(i % 7, i), normal = dtrain_random_normal(i % 5, i);
        dtrain__random_u32x4(i * 77, i, words);
        add_memory(words, sizeof words);
        add_bits(dtrain_random_u64(i, i * i));
        add_memory(&uniform, sizeof uniform);
        add_memory(&normal, sizeof normal);
    }
}

/* Rows that are split, and of any length: without a group they are whole. */
static void entropies(void)
{
    static int32_t targets[4] = {0, -1, 0, 0};
    static float logits[4 * 300];
    for (size_t vocab = 1; vocab < 300; vocab += vocab < 40 ? 1 : 13) {
        double loss = 0;
        targets[0] = (int32_t)vocab - 1;
        fill((unsigned char *)work[0], DTRAIN_F32, 4 * vocab, vocab % 3 > 0);
        memcpy(logits, work[0], 4 * vocab * sizeof logits[0]);
        for (size_t i = 0; vocab % 3 == 1 && i < 4 * vocab; i++)
            logits[i] *= 64.0f; /* a power of two: exact, whatever the flags */
        if (dtrain_vocab_parallel_cross_entropy(NULL, logits, targets, 4, vocab, &loss) != DTRAIN_OK)
            printf("%s: ", dtrain_last_error());
        add_values(&loss, DTRAIN_F64, 1);
        add_values(logits, DTRAIN_F32, 4 * vocab);
    }
}

/* Their products are those of the instruction set. */
static void attentions(void)
{
    dtrain_attention a = {1, 70, 2, 9, 0};
    static float qkv[70 * 54], d_qkv[70 * 54], out[70 * 18], kept[2 * 70 * 70];
    for (a.causal = 0; a.causal < 2; a.causal++) {
        fill((unsigned char *)work[0], DTRAIN_F32, 70 * 54, 1);
        memcpy(qkv, work[0], sizeof qkv);
        if (dtrain_attention_forward(&a, qkv, kept, out) != DTRAIN_OK)
            printf("%s: ", dtrain_last_error());
        add_values(out, DTRAIN_F32, 70 * 18);
        if (dtrain_attention_backward(&a, qkv, kept, out, d_qkv) != DTRAIN_OK)
            printf("%s: ", dtrain_last_error());
        add_values(d_qkv, DTRAIN_F32, 70 * 54);
    }
}

static void products(void)
{
    static const size_t shapes[][3] = {{1, 1, 1},    {3, 5, 7},     {8, 32, 16},   {9, 33, 17},
                                       {13, 47, 64}, {17, 129, 31}, {37, 70, 120}, {5, 20, 300}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int form = 0; form < 16; form++) {
            size_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2], pad = form & 4 ? 3 : 0;
            int ta = form & 1, tb = form >> 1 & 1;
            static float c[ROOM / 4];
            fill((unsigned char *)work[0], DTRAIN_F32, m * (n + pad), 1);
            memcpy(c, work[0], m * (n + pad) * sizeof c[0]);
            fill(inputs[0], DTRAIN_F32, (m + 3) * (k + 3), 1);
            fill(inputs[1], DTRAIN_F32, (n + 3) * (k + 3), 1);
            dtrain_sgemm(ta, tb, m, n, k, form & 8 ? 0.7f : 1.0f, (const float *)(void *)inputs[0], (ta ? m : k) + pad,
                         (const float *)(void *)inputs[1], (tb ? k : n) + pad, form & 8 ? -0.3f : 0.0f, c, n + pad);
            add_values(c, DTRAIN_F32, m * (n + pad));
        }
}

int main(int argc, char **argv)
{
    int flush = argc > 1 && strcmp(argv[1], "ftz") == 0;
#if defined(__x86_64__)
    _mm_setcsr(flush ? 0x9fc0 : 0x1f80); /* -Ofast starts programs with subnormals flushed */
#endif
    (void)flush;
    casts();
    folds();
    partial_folds();
    vectors();
    norms();
    selections();
    compressors();
    thin_matrices();
    servers();
    randoms();
    entropies();
    printf("%s %016llx", dtrain_isa_name(), (unsigned long long)hash);
    products();
    attentions();
    printf(" %016llx\n", (unsigned long long)hash);
    return 0;
}
