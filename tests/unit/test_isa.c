/* ---- >>test_isa ----
 * Every kernel on every instruction set of this machine, at all sizes from 0 to 1,000 and at odd addresses, against the
 * scalar one, bit for bit. Inputs hold NaN, infinities, subnormals, zeros and ties. What arithmetic makes of a NaN's
 * sign and payload is nobody's: those bits are not compared. Matrix products are compared with loops of this file. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include <math.h>

int hook_isa;

enum { MOST = 1000, INPUTS = 8, OUTPUTS = 8, TAIL = 16, ROOM = 8 * (MOST + 100) };

typedef struct kernel {
    const char *name;
    void (*run)(const struct kernel *kernel, size_t count);
    dtrain_dtype in, out; /* out 0: bytes, compared as they are */
    int step;             /* of addresses, in bytes */
    int reduces;          /* a NaN would hide all else: three of four sizes have none */
    int outs;             /* how many outputs it has */
    int a, b, c;          /* arguments of run */
} kernel;

static unsigned char pool[2][INPUTS][ROOM], inputs[INPUTS][ROOM], outputs[OUTPUTS][ROOM], expected[OUTPUTS][ROOM];
static const void *in[INPUTS];
static void *out[OUTPUTS];
static float *f[OUTPUTS]; /* the same as out, for kernels of aligned float32 */

/* Mostly numbers near 1; with `mixed`, one in four of any bits. */
static uint64_t draw(dtrain_dtype dtype, uint64_t seed, uint64_t index, int mixed)
{
    unsigned bits = dtrain_dtype_bits(dtype);
    uint64_t raw = dtrain_random_u64(seed, index), kind = dtrain_random_u64(seed + 1, index) % 32;
    uint64_t one = dtype == DTRAIN_F64 ? UINT64_C(0x3ff0000000000000) : dtype == DTRAIN_F32 ? 0x3f800000 : 0x3f80;
    uint64_t infinity = dtype == DTRAIN_F64 ? UINT64_C(0x7ff0000000000000) : dtype == DTRAIN_F32 ? 0x7f800000 : 0x7f80;
    uint64_t sign = raw & (uint64_t)1 << (bits - 1), step = infinity & (~infinity + 1);
    if (dtype == DTRAIN_F16) {
        one = 0x3c00;
        infinity = 0x7c00;
        step = 0x400;
    }
    switch (kind) {
    case 0: return sign;
    case 1: return sign | (raw & (step - 1));                                       /* subnormal */
    case 2: return sign | one;                                                      /* of one magnitude */
    case 3: return sign | ((one + (raw >> 8) % step) & ~(uint64_t)0xffff) | 0x8000; /* ties of bfloat16 */
    case 4: return sign | ((one + (raw >> 8) % step) & ~(uint64_t)0x1fff) | 0x1000; /* and of float16 */
    case 5: return sign | (mixed ? infinity : one);
    case 6: return sign | (mixed ? infinity | (raw >> 8) % step : one);
    default: return mixed && kind < 14 ? raw : sign | (one - 3 * step + (raw >> 1) % (6 * step));
    }
}

static void fill(dtrain_dtype dtype)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    for (int mixed = 0; mixed < 2; mixed++)
        for (uint64_t k = 0; k < INPUTS; k++)
            for (size_t i = 0; i < MOST + TAIL; i++) {
                uint64_t bits = draw(dtype, 10 * (uint64_t)dtype + k, i, mixed);
                unsigned char *to = pool[mixed][k] + i * width;
                uint32_t u32 = (uint32_t)bits;
                uint16_t u16 = (uint16_t)bits;
                memcpy(to, width == 8 ? (void *)&bits : width == 4 ? (void *)&u32 : (void *)&u16, width);
            }
}

/* Replaces every NaN by one. */
static void plain(unsigned char *data, dtrain_dtype dtype, size_t count)
{
    for (size_t i = 0; i < count; i++, data += dtrain_dtype_bits(dtype) / 8) {
        uint64_t f64 = 0;
        uint32_t f32 = 0;
        uint16_t f16 = 0;
        memcpy(dtype == DTRAIN_F64   ? (void *)&f64
               : dtype == DTRAIN_F32 ? (void *)&f32
                                     : (void *)&f16,
               data, dtrain_dtype_bits(dtype) / 8);
        if ((f64 & INT64_MAX) > UINT64_C(0x7ff0000000000000) || (f32 & INT32_MAX) > 0x7f800000u ||
            (f16 & INT16_MAX) > (dtype == DTRAIN_F16 ? 0x7c00 : 0x7f80))
            memset(data, 0xff, dtrain_dtype_bits(dtype) / 8);
    }
}

/* Runs a kernel into `outputs`, which are made again before each run. */
static void run(const kernel *k, size_t count, int isa)
{
    size_t width = dtrain_dtype_bits(k->in) / 8, mixed = !k->reduces || count % 4 == 0;
    for (size_t i = 0; i < INPUTS; i++) { /* as many as outputs */
        size_t at = (count + i) % 7 * (size_t)k->step;
        in[i] = memcpy(inputs[i] + at, pool[mixed][i] + count % TAIL * width, count * width);
        at = (count + 3 * i) % 5 * (size_t)k->step;
        memset(outputs[i], 0xa5, at + 8 * count + 100);
        out[i] = outputs[i] + at;
        f[i] = (float *)out[i];
    }
    hook_isa = isa;
    k->run(k, count);
    hook_isa = 0;
    for (size_t i = 0; i < (size_t)k->outs && k->out != 0; i++)
        plain((unsigned char *)out[i], k->out, count);
}

static size_t first_difference(size_t count, int outs, int *which)
{
    for (*which = 0; *which < outs; ++*which)
        if (memcmp(outputs[*which], expected[*which], 8 * count + 100) != 0)
            for (size_t i = 0;; i++)
                if (outputs[*which][i] != expected[*which][i])
                    return i;
    return SIZE_MAX;
}

static void compare(const kernel *kernels, size_t many)
{
    for (size_t i = 0; i < many; i++) {
        const kernel *k = &kernels[i];
        int failures = 0;
        fill(k->in);
        for (size_t count = 0; count <= MOST && failures < 3; count++) {
            run(k, count, DTRAIN__ISA_SCALAR);
            memcpy(expected, outputs, sizeof outputs[0] * (size_t)k->outs);
            for (int isa = DTRAIN__ISA_SCALAR + 1; isa <= DTRAIN__ISA_AVX512; isa++) {
                int which = 0;
                if (!dtrain__isa_has(isa))
                    continue;
                run(k, count, isa);
                size_t at = first_difference(count, k->outs, &which);
                if (at != SIZE_MAX && ++failures)
                    TEST_FAIL("%s (%d %d %d) of %zu elements on %s: byte %zu of output %d is 0x%02x, 0x%02x on scalar",
                              k->name, k->a, k->b, k->c, count, dtrain__isa_text(isa), at, which, outputs[which][at],
                              expected[which][at]);
            }
        }
    }
}

#define COMPARE(kernels) compare(kernels, sizeof kernels / sizeof kernels[0])

/* ---- folds ---- */

static void pair(const kernel *k, size_t count)
{
    memcpy(out[0], in[0], count * (dtrain_dtype_bits(k->in) / 8));
    dtrain__fold_pair(k->in, (dtrain_op)k->a, out[0], in[1], count);
}

static void fold(const kernel *k, size_t count)
{
    dtrain__fold(k->in, (dtrain_op)k->a, 2.6, in, k->b, out, k->c, 0, count);
}

static void partial(const kernel *k, size_t count)
{
    dtrain__fold_partials(k->in, in, k->a, out[0], count);
}

TEST(folds_are_those_of_scalar)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_F64, DTRAIN_F16, DTRAIN_BF16};
    for (int t = 0; t < 4; t++) {
        const kernel kernels[] = {{"pair", pair, dtypes[t], dtypes[t], 1, 0, 1, DTRAIN_SUM, 0, 0},
                                  {"pair", pair, dtypes[t], dtypes[t], 1, 0, 1, DTRAIN_PROD, 0, 0},
                                  {"pair", pair, dtypes[t], 0, 1, 0, 1, DTRAIN_MIN, 0, 0},
                                  {"pair", pair, dtypes[t], 0, 1, 0, 1, DTRAIN_MAX, 0, 0}};
        const kernel all[] = {{"fold", fold, dtypes[t], dtypes[t], 1, 0, 2, DTRAIN_SUM, 2, 2},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 2, DTRAIN_MEAN, 2, 2},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 1, DTRAIN_SUM, 2, 1},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 2, DTRAIN_SUM, 3, 2},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 4, DTRAIN_MEAN, 4, 4},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 1, DTRAIN_SUM, 4, 1},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 8, DTRAIN_SUM, 8, 8},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 1, DTRAIN_MEAN, 8, 1},
                              {"fold", fold, dtypes[t], dtypes[t], 1, 0, 1, DTRAIN_MAX, 2, 1}};
        if (t < 2)
            COMPARE(kernels);
        COMPARE(all);
    }
    const kernel partials[] = {{"partials", partial, DTRAIN_BF16, DTRAIN_F32, 1, 0, 1, 5, 0, 0}};
    COMPARE(partials);
}

/* ---- elementwise ---- */

static void convert(const kernel *k, size_t count)
{
    DTRAIN_CHECK(dtrain_convert(in[0], k->in, out[0], (dtrain_dtype)k->a, count));
}

static void vector(const kernel *k, size_t count)
{
    memcpy(out[0], in[0], count * (dtrain_dtype_bits(k->in) / 8));
    dtrain__vector(k->in, out[0], 0.3, k->a ? in[1] : NULL, count);
}

static void squares(const kernel *k, size_t count)
{
    dtrain__norm sum;
    double rounded = dtrain__vector_sum_squares((const float *)in[0], count), exact;
    memset(&sum, 0, sizeof sum);
    dtrain__norm_add_squares(&sum, (const float *)in[0], count);
    exact = dtrain__norm_value(&sum);
    memcpy(out[0], &rounded, sizeof rounded);
    memcpy(out[1], &exact, sizeof exact);
    plain((unsigned char *)out[0], DTRAIN_F64, 1);
    (void)k;
}

TEST(conversions_and_vectors_are_those_of_scalar)
{
    static const kernel kernels[] = {{"convert", convert, DTRAIN_F32, 0, 1, 0, 1, DTRAIN_BF16, 0, 0},
                                     {"convert", convert, DTRAIN_BF16, 0, 1, 0, 1, DTRAIN_F32, 0, 0},
                                     {"convert", convert, DTRAIN_F32, 0, 1, 0, 1, DTRAIN_F16, 0, 0},
                                     {"convert", convert, DTRAIN_F16, 0, 1, 0, 1, DTRAIN_F32, 0, 0},
                                     {"vector", vector, DTRAIN_F32, DTRAIN_F32, 1, 0, 1, 0, 0, 0},
                                     {"vector", vector, DTRAIN_F32, DTRAIN_F32, 1, 0, 1, 1, 0, 0},
                                     {"vector", vector, DTRAIN_F64, DTRAIN_F64, 1, 0, 1, 0, 0, 0},
                                     {"vector", vector, DTRAIN_F64, DTRAIN_F64, 1, 0, 1, 1, 0, 0},
                                     {"vector", vector, DTRAIN_F16, DTRAIN_F16, 1, 0, 1, 1, 0, 0},
                                     {"squares", squares, DTRAIN_F32, 0, 4, 1, 2, 0, 0, 0}};
    COMPARE(kernels);
}

/* All float32 with these lower bits, as 16-bit floats. */
static void narrow(int isa, uint32_t low, dtrain_dtype to, uint16_t *narrowed)
{
    static uint32_t wide[65536];
    for (uint32_t i = 0; i < 65536; i++)
        wide[i] = i << 16 | low;
    hook_isa = isa;
    DTRAIN_CHECK(dtrain_convert(wide, DTRAIN_F32, narrowed, to, 65536));
}

/* The instructions of ARM64 that convert have rules of their own for NaN, subnormals and ties. ISA_ALL=1 in the
 * environment takes all float32, which is a matter of minutes under qemu. */
TEST(conversions_of_all_16_upper_bits_are_those_of_scalar)
{
    static uint32_t wide[2][65536];
    static uint16_t narrowed[2][65536], all[65536];
    static const uint32_t lows[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x0fff, 0x1000, 0x1001, 0x3000, 0xf000};
    uint32_t many = getenv("ISA_ALL") != NULL ? 65536 : sizeof lows / sizeof lows[0];
    for (uint32_t i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    for (int isa = DTRAIN__ISA_SCALAR + 1; isa <= DTRAIN__ISA_AVX512; isa++) {
        if (!dtrain__isa_has(isa))
            continue;
        for (uint32_t i = 0; i < 2 * many; i++) {
            dtrain_dtype to = i % 2 ? DTRAIN_F16 : DTRAIN_BF16;
            uint32_t low = many == 65536 ? i / 2 : lows[i / 2];
            narrow(DTRAIN__ISA_SCALAR, low, to, narrowed[0]);
            narrow(isa, low, to, narrowed[1]);
            if (memcmp(narrowed[0], narrowed[1], sizeof narrowed[0]) != 0)
                TEST_FAIL("numbers that end in 0x%04x become other %s on %s", low, dtrain_dtype_name(to),
                          dtrain__isa_text(isa));
        }
        for (int row = 0; row < 2; row++) {
            hook_isa = row == 0 ? DTRAIN__ISA_SCALAR : isa;
            DTRAIN_CHECK(dtrain_convert(all, DTRAIN_F16, wide[row], DTRAIN_F32, 65536));
        }
        CHECK(memcmp(wide[0], wide[1], sizeof wide[0]) == 0);
    }
    hook_isa = 0;
}

/* ---- compression ---- */

static void topk(const kernel *k, size_t count)
{
    dtrain__sparse sparse;
    dtrain_status status;
    memset(&sparse, 0, sizeof sparse);
    memcpy(f[0], in[0], count * sizeof(float));
    status = dtrain__topk_add(f[0], (const float *)in[1], count, count / (size_t)k->a, &sparse);
    CHECK_EQ(status, DTRAIN_OK);
    memcpy(out[1], sparse.indices, sparse.count * sizeof sparse.indices[0]);
    memcpy(out[2], sparse.values, sparse.count * sizeof sparse.values[0]);
    dtrain__sparse_destroy(&sparse);
}

static void pack(const kernel *k, size_t count)
{
    dtrain_compressor compressor = dtrain_compressor_of((dtrain_compression)k->a, (size_t)k->b);
    compressor.pack(&compressor, (const float *)in[0], count, out[1]);
    compressor.unpack(&compressor, out[1], f[0], count);
}

static void feedback(const kernel *k, size_t count)
{
    memcpy(f[0], in[0], count * sizeof(float));
    if (k->a)
        dtrain__feedback_left(f[0], (const float *)in[1], count);
    else
        dtrain__feedback_velocity(f[0], (const float *)in[1], 0.9f, 0.3f, count);
}

/* A matrix of three rows, which are the first inputs one after the other, as a product of rank two. */
static void powersgd(const kernel *k, size_t count)
{
    static float m[3 * MOST], right[2 * MOST];
    float *left = f[2];
    for (size_t row = 0; row < 3; row++)
        memcpy(m + row * count, in[row], count * sizeof(float));
    for (size_t row = 0; row < 2; row++)
        memcpy(right + row * count, in[3 + row], count * sizeof(float));
    dtrain__powersgd_left(m, right, left, 3, count, 2);
    plain((unsigned char *)left, DTRAIN_F32, 6);
    if (k->a)
        dtrain__powersgd_right(m, right, left, 3, count, 2);
    else
        dtrain__powersgd_product(m, right, left, 3, count, 2);
    memcpy(f[0], k->a ? right : m, count * sizeof(float));
    memcpy(f[1], (k->a ? right : m) + count, count * sizeof(float));
}

TEST(compression_is_that_of_scalar)
{
    static const kernel kernels[] = {{"topk", topk, DTRAIN_F32, DTRAIN_F32, 4, 0, 3, 1, 0, 0},
                                     {"topk", topk, DTRAIN_F32, DTRAIN_F32, 4, 0, 3, 3, 0, 0},
                                     {"topk", topk, DTRAIN_F32, DTRAIN_F32, 4, 0, 3, 50, 0, 0},
                                     {"int8", pack, DTRAIN_F32, DTRAIN_F32, 4, 1, 2, DTRAIN_COMPRESS_INT8, 64, 0},
                                     {"int8", pack, DTRAIN_F32, DTRAIN_F32, 4, 1, 2, DTRAIN_COMPRESS_INT8, 1024, 0},
                                     {"fp8", pack, DTRAIN_F32, DTRAIN_F32, 4, 1, 2, DTRAIN_COMPRESS_FP8, 64, 0},
                                     {"fp8", pack, DTRAIN_F32, DTRAIN_F32, 4, 1, 2, DTRAIN_COMPRESS_FP8, 1024, 0},
                                     {"sign", pack, DTRAIN_F32, DTRAIN_F32, 4, 1, 2, DTRAIN_COMPRESS_SIGN, 64, 0},
                                     {"sign", pack, DTRAIN_F32, DTRAIN_F32, 4, 1, 2, DTRAIN_COMPRESS_SIGN, 1024, 0},
                                     {"feedback", feedback, DTRAIN_F32, DTRAIN_F32, 4, 0, 1, 0, 0, 0},
                                     {"feedback", feedback, DTRAIN_F32, DTRAIN_F32, 4, 0, 1, 1, 0, 0},
                                     {"powersgd", powersgd, DTRAIN_F32, DTRAIN_F32, 4, 1, 3, 0, 0, 0},
                                     {"powersgd", powersgd, DTRAIN_F32, DTRAIN_F32, 4, 1, 3, 1, 0, 0}};
    COMPARE(kernels);
}

/* ---- training ---- */

static void adamw(const kernel *k, size_t count)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.weight_decay = 0.1f;
    for (int i = 0; i < 3; i++)
        memcpy(f[i], in[1 + i], count * sizeof(float));
    dtrain_adamw(f[0], (const float *)in[0], f[1], f[2], count, &desc, 0.01f, (uint64_t)k->a);
}

static void sgd(const kernel *k, size_t count)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_SGD;
    desc.momentum = k->a ? 0.9f : 0.0f;
    desc.nesterov = k->a == 2;
    desc.weight_decay = 0.1f;
    desc.decoupled_decay = k->b;
    for (int i = 0; i < 2; i++)
        memcpy(f[i], in[1 + i], count * sizeof(float));
    CHECK_EQ(dtrain_device_sgd(NULL, f[0], (const float *)in[0], k->a ? f[1] : NULL, count, &desc, 0.01f, NULL),
             DTRAIN_OK);
}

static void softmax(const kernel *k, size_t count)
{
    double dot;
    (void)k;
    memcpy(f[0], in[0], count * sizeof(float));
    dtrain__tp_softmax_row(f[0], count);
    memcpy(f[1], in[1], count * sizeof(float));
    dtrain__tp_dot((const float *)in[0], f[1], count, &dot);
    dtrain__tp_slope(f[1], (const float *)in[2], count, 0.3f);
    memcpy(out[2], &dot, sizeof dot);
    plain((unsigned char *)out[2], DTRAIN_F64, 1);
}

TEST(optimizers_and_softmax_are_those_of_scalar)
{
    static const kernel kernels[] = {{"adamw", adamw, DTRAIN_F32, DTRAIN_F32, 4, 0, 3, 1, 0, 0},
                                     {"adamw", adamw, DTRAIN_F32, DTRAIN_F32, 4, 0, 3, 500, 0, 0},
                                     {"sgd", sgd, DTRAIN_F32, DTRAIN_F32, 4, 0, 2, 0, 0, 0},
                                     {"sgd", sgd, DTRAIN_F32, DTRAIN_F32, 4, 0, 2, 1, 1, 0},
                                     {"sgd", sgd, DTRAIN_F32, DTRAIN_F32, 4, 0, 2, 2, 0, 0},
                                     {"softmax", softmax, DTRAIN_F32, DTRAIN_F32, 4, 1, 3, 0, 0, 0}};
    COMPARE(kernels);
}

/* ---- bytes ---- */

static void seal(const kernel *k, size_t count)
{
    const dtrain__chacha_way *way = dtrain__chacha_choose(hook_isa);
    static const unsigned char key[DTRAIN__KEY_BYTES] = {1, 2, 3}, nonce[12] = {4};
    (void)k;
    dtrain__aead_seal(way, key, nonce, key, count % 20, (const unsigned char *)in[0], (unsigned char *)out[0],
                      4 * count, (unsigned char *)out[1]);
}

TEST(sealed_bytes_are_those_of_scalar)
{
    static const kernel kernels[] = {{"seal", seal, DTRAIN_F32, (dtrain_dtype)0, 1, 0, 2, 0, 0, 0}};
    COMPARE(kernels);
}

TEST(copies_past_the_caches_are_copies)
{
    static unsigned char from[100000], to[100000] __attribute__((aligned(64)));
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (unsigned char)dtrain_random_u64(7, i);
    for (size_t bytes = 0; bytes < 70000; bytes += 977) {
        memset(to, 0xa5, sizeof to);
        dtrain__streaming_copy(to, from + bytes % 5, bytes);
        CHECK(memcmp(to, from + bytes % 5, bytes) == 0 && to[bytes] == 0xa5);
    }
}

/* ---- matrix products ---- */

/* One element: terms in ascending order, a block of 256 at a time, rounded once each or twice. */
static float product(const float *a, size_t a_step, const float *b, size_t b_step, size_t k, int once)
{
    float all = 0;
    for (size_t block = 0; block < k; block += 256) {
        float sum = 0;
        for (size_t p = block; p < k && p < block + 256; p++) {
            volatile float term = a[p * a_step] * b[p * b_step]; /* not contracted */
            sum = once ? fmaf(a[p * a_step], b[p * b_step], sum) : sum + term;
        }
        all = block == 0 ? sum : all + sum;
    }
    return all;
}

static float left[10 * (MOST + 10)], right[10 * (MOST + 10)];

static void multiply(size_t m, size_t n, size_t k, int form)
{
    static float c[10 * MOST], scalar[10 * MOST], fused[10 * MOST];
    int ta = form & 1, tb = form >> 1 & 1;
    size_t lda = ta ? m : k, ldb = tb ? k : n;
    const float *a = left + m % 7, *b = right + n % 5;
    for (size_t i = 0; i < m * n; i++) {
        const float *row = a + i / n * (ta ? 1 : lda), *column = b + i % n * (tb ? ldb : 1);
        scalar[i] = product(row, ta ? lda : 1, column, tb ? 1 : ldb, k, 0);
        fused[i] = product(row, ta ? lda : 1, column, tb ? 1 : ldb, k, 1);
    }
    for (int isa = DTRAIN__ISA_SCALAR; isa <= DTRAIN__ISA_AVX512; isa++) {
        if (!dtrain__isa_has(isa))
            continue;
        hook_isa = isa;
        dtrain_sgemm(ta, tb, m, n, k, 1.0f, a, lda, b, ldb, 0.0f, c, n);
        hook_isa = 0;
        if (memcmp(c, isa < DTRAIN__ISA_NEON ? scalar : fused, m * n * sizeof c[0]) != 0)
            TEST_FAIL("a product of %zu x %zu x %zu, form %d, on %s", m, n, k, form, dtrain__isa_text(isa));
    }
}

TEST(matrix_products_round_as_they_should)
{
    for (size_t i = 0; i < sizeof left / sizeof left[0]; i++) {
        left[i] = from_bits((uint32_t)draw(DTRAIN_F32, 3, i, 0));
        right[i] = from_bits((uint32_t)draw(DTRAIN_F32, 5, i, 0));
    }
    for (size_t size = 0; size <= MOST; size++) {
        size_t small = 1 + size % 9, other = 1 + size % 5;
        multiply(size, small, other, (int)(size % 4));
        multiply(small, size, other, (int)(size / 2 % 4));
        multiply(small, other, size, (int)(size % 4));
    }
}
