/* The reduction of dtrain_cuda.h gives the bits of the CPU's. CUDA_LARGE=1 reduces more than 2^32 elements, too, in 8
 * GiB of the device. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "cuda_buffers.h"

enum { MOST = 64, DTYPES = 10 };

static const dtrain_dtype dtypes[DTYPES] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16, DTRAIN_F64, DTRAIN_U8,
                                            DTRAIN_I8,  DTRAIN_I32,  DTRAIN_U32, DTRAIN_I64, DTRAIN_U64};

typedef struct reduction {
    dtrain_dtype dtype;
    dtrain_op op;
    double divisor;
    int n, m;
    size_t begin, count;
    size_t step;  /* bytes by which the alignment of the k-th buffer differs from the one before it */
    int in_place; /* the k-th output is the k-th input */
    int any_order;
} reduction;

static buffer ins[MOST], outs[MOST];
static unsigned char *host_in[MOST], *host_out[MOST];

static void create(size_t count, size_t bytes)
{
    buffers_create(2 * count, bytes);
    for (size_t k = 0; k < MOST; k++) {
        host_in[k] = (unsigned char *)malloc(k < count ? bytes : 1);
        host_out[k] = (unsigned char *)malloc(k < count ? bytes : 1);
        CHECK(host_in[k] != NULL && host_out[k] != NULL);
    }
}

static void destroy(void)
{
    buffers_destroy();
    for (int k = 0; k < MOST; k++) {
        free(host_in[k]);
        free(host_out[k]);
    }
}

/* Runs r on the device and on the CPU, and compares all outputs, what is outside [begin, begin + count) included. */
static void compare(const reduction *r)
{
    const void *in[MOST], *cpu_in[MOST];
    void *out[MOST], *cpu_out[MOST];
    size_t all = r->begin + r->count, bytes = all * (dtrain_dtype_bits(r->dtype) / 8);
    char what[128];
    snprintf(what, sizeof what, "op %d of %d to %d, begin %zu, step %zu, in place %d, divisor %g", (int)r->op, r->n,
             r->m, r->begin, r->step, r->in_place, r->divisor);
    for (int k = 0; k < r->n; k++) {
        fill_values(r->dtype, (uint64_t)k * 7 + r->count, host_in[k], all);
        cpu_in[k] = host_in[k];
        in[k] = buffer_put(&ins[k], (size_t)k * r->step % 16, host_in[k], bytes);
    }
    for (int k = 0; k < r->m; k++) {
        int same = r->in_place && k < r->n;
        memset(host_out[k], 0x5a, bytes);
        cpu_out[k] = same ? host_in[k] : host_out[k];
        out[k] = same ? (void *)(buffers_device + ins[k].begin)
                      : buffer_put(&outs[k], (size_t)(k + 3) * r->step % 16, host_out[k], bytes);
    }
    buffers_send();
    CHECK_EQ(dtrain__cuda_reduce(test_device(), r->dtype, r->op, r->divisor, in, r->n, out, r->m, r->begin, r->count),
             DTRAIN_OK);
    buffers_fetch();
    dtrain__fold(r->dtype, r->op, r->divisor, cpu_in, r->n, cpu_out, r->m, r->begin, r->count);
    for (int k = 0; k < r->m; k++)
        if (!same_values(what, r->dtype, buffer_get(r->in_place && k < r->n ? &ins[k] : &outs[k]), cpu_out[k], all))
            return;
}

static reduction reduction_of(dtrain_dtype dtype, dtrain_op op, int n, int m, size_t count)
{
    reduction r;
    memset(&r, 0, sizeof r);
    r.dtype = dtype;
    r.op = op;
    r.n = n;
    r.m = m;
    r.count = count;
    r.divisor = op == DTRAIN_MEAN ? n : 1;
    return r;
}

TEST(every_dtype_op_and_number_of_inputs)
{
    create(MOST, 8 * 80);
    for (int d = 0; d < DTYPES; d++)
        for (int op = DTRAIN_SUM; op <= DTRAIN_XOR; op++)
            for (int n = 1; n <= MOST && dtrain__fold_supported(dtypes[d], (dtrain_op)op); n++) {
                reduction r = reduction_of(dtypes[d], (dtrain_op)op, n, 1 + n % 3, 67);
                r.in_place = n % 2;
                compare(&r);
            }
    destroy();
}

TEST(every_count_to_1000)
{
    static const int inputs[] = {2, 8, 1, 4, 3, 7, 13};
    create(13, 8 * 1008);
    for (size_t count = 0; count <= 1000; count++)
        for (int d = 0; d < DTYPES; d++)
            for (int op = d < 4 ? DTRAIN_SUM : DTRAIN_SUM + (int)(count % 2) * 2; op <= DTRAIN_MEAN + 2; op += 3) {
                reduction r = reduction_of(dtypes[d], (dtrain_op)op, inputs[(count + (size_t)d) % 7], 1, count);
                r.begin = count % 3 * (16 / (dtrain_dtype_bits(r.dtype) / 8)) % 7;
                r.m = count % 5 == 0 ? r.n : 1;
                r.in_place = count % 2 != 0;
                compare(&r);
            }
    destroy();
}

TEST(every_alignment)
{
    static const int inputs[] = {1, 2, 4, 5, 8};
    create(8, 8 * 128);
    for (int d = 0; d < DTYPES; d++)
        for (size_t step = 0; step < 16; step++)
            for (size_t begin = 0; begin < 17; begin++)
                for (int i = 0; i < 5; i++) {
                    reduction r = reduction_of(dtypes[d], DTRAIN_SUM, inputs[i], 2, 100);
                    r.begin = begin;
                    r.step = step;
                    compare(&r);
                }
    destroy();
}

TEST(a_mean_divides_by_any_number)
{
    static const double divisors[] = {1,   2,    3,        5,       64,       0.25,      1e-30,
                                      7.5, 1e30, 0x1p-126, 0x1p127, 0x1p-140, 0x1p-1030, -2};
    create(3, 8 * 600);
    for (int d = 0; d < 4; d++)
        for (int i = 0; i < 14; i++)
            for (int n = 2; n <= 3; n++) {
                reduction r = reduction_of(dtypes[d], DTRAIN_MEAN, n, 1, 600);
                r.divisor = divisors[i];
                compare(&r);
            }
    destroy();
}

TEST(sixty_four_inputs_to_sixty_four_outputs_in_place)
{
    create(MOST, 8 * 300);
    for (int d = 0; d < DTYPES; d++) {
        reduction r = reduction_of(dtypes[d], d < 4 ? DTRAIN_MEAN : DTRAIN_SUM, MOST, MOST, 300);
        r.in_place = 1;
        compare(&r);
    }
    destroy();
}

TEST(large_counts)
{
    static const int inputs[] = {1, 2, 3, 4, 8};
    static const size_t counts[] = {8192, 65535, 300001};
    create(8, 4 * 300016);
    for (int d = 0; d < 5; d++)
        for (int i = 0; i < 5; i++)
            for (int c = 0; c < 3; c++) {
                reduction r = reduction_of(dtypes[d == 3 ? 6 : d], DTRAIN_SUM, inputs[i], 1, counts[c]);
                r.begin = (size_t)c;
                r.step = i == 2 ? 4 : 0;
                compare(&r);
            }
    destroy();
}

TEST(a_walk_of_more_than_32_bits_count)
{
    uint32_t heads = dtrain__cuda_heads((const void *)(uintptr_t)0x1004, 4, 4);
    dtrain__cuda_walk walk = dtrain__cuda_walk_make(heads, 4, ((size_t)1 << 36) + 5);
    CHECK_EQ(walk.head, 3);
    CHECK_EQ(walk.groups, (size_t)1 << 34);
    CHECK_EQ(walk.singles, 5);
    walk = dtrain__cuda_walk_make(0, 4, ((size_t)1 << 36) + 5);
    CHECK_EQ(walk.groups, 0);
    CHECK_EQ(walk.singles, ((size_t)1 << 36) + 5);
}

/* Every chunk of both inputs is the same but for its first bytes, which number it. */
static void fill_chunk(size_t bytes, uint64_t number)
{
    memcpy(host_in[0], &number, sizeof number);
    memcpy(host_in[1], &bytes, sizeof bytes);
}

TEST(more_elements_than_32_bits_count_where_asked)
{
    const size_t chunk = (size_t)1 << 24, all = ((size_t)1 << 32) + chunk + 5;
    dtrain_device *device = test_device();
    void *out[1];
    const void *in[2];
    if (getenv("CUDA_LARGE") == NULL) {
        printf("skipped: CUDA_LARGE=1 reduces more than 2^32 elements\n");
        return;
    }
    create(2, chunk);
    fill_values(DTRAIN_U8, 1, host_in[0], chunk);
    fill_values(DTRAIN_U8, 2, host_in[1], chunk);
    for (int k = 0; k < 2; k++) {
        void *pointer = NULL;
        CHECK_OK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, all, &pointer));
        for (size_t at = 0; at < all; at += chunk) {
            fill_chunk(chunk, at);
            CHECK_OK(dtrain_device_copy(device, (unsigned char *)pointer + at, host_in[k],
                                        all - at < chunk ? all - at : chunk));
        }
        in[k] = pointer;
    }
    out[0] = (void *)(uintptr_t)in[0];
    CHECK_EQ(dtrain__cuda_reduce(device, DTRAIN_U8, DTRAIN_SUM, 1, in, 2, out, 1, 0, all), DTRAIN_OK);
    for (size_t at = 0; at < all; at += chunk) {
        size_t bytes = all - at < chunk ? all - at : chunk;
        fill_chunk(chunk, at);
        for (size_t i = 0; i < bytes; i++)
            host_out[1][i] = (unsigned char)(host_in[0][i] + host_in[1][i]);
        CHECK_OK(dtrain_device_copy(device, host_out[0], (const unsigned char *)in[0] + at, bytes));
        if (!same_values("large", DTRAIN_U8, host_out[0], host_out[1], bytes))
            break;
    }
    for (int k = 0; k < 2; k++)
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, (void *)(uintptr_t)in[k]);
    destroy();
}
