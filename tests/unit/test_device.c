/* The core's side of devices: the same bytes with and without one, no touch of a device's memory but by its own
 * functions, every error passed on, nothing left behind. */
#include "hooks.h"
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "fake_device.h"

static long resizes, fail_resize; /* the failing one, counted from 1; 0: none */
static size_t resized_bytes;      /* in use */

void *hook_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    if (new_bytes > 0 && ++resizes == fail_resize)
        return NULL;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (block != NULL && pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    resized_bytes += new_bytes - old_bytes;
    return block;
}

enum { MANY = 70001 };
static const size_t sizes[] = {0, 1, 7, 255, 256, 1000, MANY};
#define SIZES (sizeof sizes / sizeof sizes[0])

/* Numbers with signs, ties of magnitude, subnormals and large ones. */
static void draw(float *x, size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = dtrain_random_u64(seed, i);
        x[i] = dtrain_random_normal(seed, i);
        if (bits % 97 == 0)
            x[i] *= bits % 2 ? 1e-41f : 1e15f;
    }
}

static fake main_fake;

TEST(a_fill_repeats_its_element_and_touches_nothing_behind)
{
    static const unsigned char element[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const size_t counts[] = {0, 1, 2, 3, 1000, 20001};
    unsigned char *to = (unsigned char *)malloc(8 * 20001 + 1);
    for (size_t bytes = 1; bytes <= 8; bytes *= 2)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            size_t all = bytes * counts[c], wrong = 0;
            memset(to, 99, all + 1);
            CHECK_EQ(dtrain_device_fill(NULL, to, element, bytes, counts[c]), DTRAIN_OK);
            for (size_t i = 0; i < all; i++)
                wrong += to[i] != element[i % bytes];
            CHECK_EQ(wrong, 0);
            CHECK_EQ(to[all], 99);
        }
    free(to);
}

TEST(memory_of_a_null_device_is_the_cpus)
{
    void *pointer = &main_fake;
    dtrain_device_event *event = NULL;
    int done = 0;
    const uint16_t two = 0x1234;
    uint16_t to[5] = {0, 0, 0, 0, 0}, from[5] = {1, 2, 3, 4, 5};
    size_t before = resized_bytes;
    CHECK(strcmp(dtrain_device_name(NULL), "cpu") == 0);
    CHECK_EQ(dtrain_device_alloc(NULL, DTRAIN_MEMORY_PINNED, 0, &pointer), DTRAIN_OK);
    CHECK(pointer == NULL);
    CHECK_EQ(dtrain_device_alloc(NULL, DTRAIN_MEMORY_DEVICE, 1000, &pointer), DTRAIN_OK);
    CHECK_EQ((uintptr_t)pointer % 64, 0);
    memset(pointer, 1, 1000);
    dtrain_device_free(NULL, DTRAIN_MEMORY_DEVICE, pointer);
    CHECK_EQ(resized_bytes, before);
    CHECK_EQ(dtrain_device_alloc(NULL, DTRAIN_MEMORY_DEVICE, SIZE_MAX - 3, &pointer), DTRAIN_ERR_MEMORY);
    CHECK_EQ(dtrain_device_alloc(NULL, (dtrain_memory)7, 8, &pointer), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_alloc(NULL, DTRAIN_MEMORY_DEVICE, 8, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_copy(NULL, to, from, sizeof to), DTRAIN_OK);
    CHECK(memcmp(to, from, sizeof to) == 0);
    CHECK_EQ(dtrain_device_fill(NULL, to, &two, 2, 4), DTRAIN_OK);
    CHECK(to[0] == two && to[3] == two && to[4] == 5);
    CHECK_EQ(dtrain_device_fill(NULL, to, &two, 3, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain__device_event_create(NULL, &event), DTRAIN_OK);
    CHECK(event != NULL);
    CHECK_EQ(dtrain__device_event_record(NULL, event), DTRAIN_OK);
    CHECK_EQ(dtrain__device_event_await(NULL, event), DTRAIN_OK);
    CHECK_EQ(dtrain__device_event_done(NULL, event, &done), DTRAIN_OK);
    CHECK_EQ(done, 1);
    CHECK_EQ(dtrain_device_wait(NULL), DTRAIN_OK);
    dtrain__device_event_destroy(NULL, event);
    dtrain_device_free(NULL, DTRAIN_MEMORY_DEVICE, NULL);
}

TEST(conversions_and_sums_have_the_cpus_bytes)
{
    dtrain_device *device = fake_begin(&main_fake, "fake:0");
    float *x = (float *)malloc(MANY * 4), *y = (float *)malloc(MANY * 4), *sum = (float *)malloc(MANY * 4);
    uint16_t *half = (uint16_t *)malloc(MANY * 2);
    draw(x, MANY, 1);
    draw(y, MANY, 2);
    for (size_t s = 0; s < SIZES; s++) {
        size_t n = sizes[s];
        const float zero = 0;
        void *on[2] = {fake_upload(device, x, 4 * n), fake_upload(device, y, 4 * n)}, *out = NULL;
        for (int cpu = 0; cpu < 2; cpu++) { /* a NULL device, too, does what the older calls do */
            void *made[2] = {cpu ? x : on[0], cpu ? y : on[1]};
            dtrain_device *where = cpu ? NULL : device;
            CHECK_EQ(dtrain_device_alloc(where, DTRAIN_MEMORY_DEVICE, 4 * n, &out), DTRAIN_OK);
            CHECK_EQ(dtrain_device_convert(where, made[0], DTRAIN_F32, out, DTRAIN_BF16, n), DTRAIN_OK);
            CHECK_EQ(dtrain_convert(x, DTRAIN_F32, half, DTRAIN_BF16, n), DTRAIN_OK);
            CHECK(n == 0 || fake_holds(where, out, half, 2 * n));
            CHECK_EQ(dtrain_device_reduce(where, DTRAIN_F32, DTRAIN_MEAN, (const void *const *)made, 2, &out, 1, 0, n),
                     DTRAIN_OK);
            for (size_t i = 0; i < n; i++)
                sum[i] = (x[i] + y[i]) / 2;
            CHECK(n == 0 || fake_holds(where, out, sum, 4 * n));
            CHECK_EQ(dtrain_device_fill(where, out, &zero, 4, n), DTRAIN_OK);
            CHECK_EQ(dtrain_device_axpy(where, DTRAIN_F32, out, 3, made[0], n), DTRAIN_OK);
            CHECK_EQ(dtrain_device_scale(where, DTRAIN_F32, out, 0.25, n), DTRAIN_OK);
            for (size_t i = 0; i < n; i++)
                sum[i] = (0.0f + 3.0f * x[i]) * 0.25f;
            CHECK(n == 0 || fake_holds(where, out, sum, 4 * n));
            dtrain_device_free(where, DTRAIN_MEMORY_DEVICE, out);
        }
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, on[0]);
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, on[1]);
    }
    free(x), free(y), free(sum), free(half);
    fake_end(&main_fake);
}

TEST(an_overflow_is_found_in_every_float_and_kept)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F64, DTRAIN_F32, DTRAIN_F16, DTRAIN_BF16};
    static const float bad[] = {0x1p127f * 2, -0x1p127f * 2, 0};
    dtrain_device *device = fake_begin(&main_fake, "fake:0");
    for (int d = 0; d < 4; d++)
        for (int b = 0; b < 3; b++) {
            float x[9] = {1, -2, 3, 60000, -60000, 1e-40f, 0, 8, 9};
            double wide[9];
            uint32_t found[2] = {0, 0}, expected = b < 2;
            x[8] = b < 2 ? bad[b] : x[8];
            CHECK_EQ(dtrain_convert(x, DTRAIN_F32, wide, dtypes[d], 9), DTRAIN_OK);
            void *on = fake_upload(device, wide, 9 * dtrain_dtype_bits(dtypes[d]) / 8);
            void *flag = fake_upload(device, &found[0], 4);
            CHECK_EQ(dtrain_device_overflow(device, dtypes[d], on, 9, (uint32_t *)flag), DTRAIN_OK);
            CHECK(fake_holds(device, flag, &expected, 4));
            CHECK_EQ(dtrain_device_overflow(device, dtypes[d], on, 8, (uint32_t *)flag), DTRAIN_OK);
            CHECK(fake_holds(device, flag, &expected, 4));
            CHECK_EQ(dtrain_device_overflow(NULL, dtypes[d], wide, 9, &found[1]), DTRAIN_OK);
            CHECK_EQ(found[1], expected);
            dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, on);
            dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, flag);
        }
    CHECK_EQ(dtrain_device_overflow(device, DTRAIN_I32, &device, 1, (uint32_t *)&device), DTRAIN_ERR_UNSUPPORTED);
    fake_end(&main_fake);
}

TEST(steps_of_optimizers_have_the_cpus_bytes_and_a_bf16_copy)
{
    enum { N = 1003 };
    static float cpu[4][N], null[4][N];
    static uint16_t copy[N], null_copy[N];
    dtrain_device *device = fake_begin(&main_fake, "fake:0");
    void *on[5];
    for (int adamw = 0; adamw < 2; adamw++) {
        dtrain_optimizer_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.weight_decay = 0.1f;
        desc.momentum = 0.9f;
        memset(cpu, 0, sizeof cpu);
        draw(cpu[0], N, 3);
        draw(cpu[1], N, 4);
        memcpy(null, cpu, sizeof null);
        for (int i = 0; i < 5; i++)
            on[i] = fake_upload(device, i < 4 ? cpu[i] : cpu[3], i < 4 ? 4 * N : 2 * N);
        float *p = (float *)on[0], *g = (float *)on[1], *m = (float *)on[2], *v = (float *)on[3];
        for (uint64_t step = 1; step < 4; step++) {
            if (adamw) {
                dtrain_adamw(cpu[0], cpu[1], cpu[2], cpu[3], N, &desc, 0.01f, step);
                CHECK_EQ(
                    dtrain_device_adamw(NULL, null[0], null[1], null[2], null[3], N, &desc, 0.01f, step, null_copy),
                    DTRAIN_OK);
                CHECK_EQ(dtrain_device_adamw(device, p, g, m, v, N, &desc, 0.01f, step, (uint16_t *)on[4]), DTRAIN_OK);
            } else {
                CHECK_EQ(dtrain_device_sgd(NULL, cpu[0], cpu[1], cpu[2], N, &desc, 0.01f, NULL), DTRAIN_OK);
                CHECK_EQ(dtrain_device_sgd(NULL, null[0], null[1], null[2], N, &desc, 0.01f, null_copy), DTRAIN_OK);
                CHECK_EQ(dtrain_device_sgd(device, p, g, m, N, &desc, 0.01f, (uint16_t *)on[4]), DTRAIN_OK);
            }
        }
        CHECK_EQ(dtrain_convert(cpu[0], DTRAIN_F32, copy, DTRAIN_BF16, N), DTRAIN_OK);
        CHECK(memcmp(null, cpu, sizeof cpu) == 0 && memcmp(copy, null_copy, sizeof copy) == 0);
        for (int i = 0; i < 4; i++)
            CHECK(fake_holds(device, on[i], cpu[i], 4 * N));
        CHECK(fake_holds(device, on[4], copy, 2 * N));
        CHECK_EQ(dtrain_device_adamw(device, p, g, m, v, N, &desc, 0.01f, 0, NULL), DTRAIN_ERR_INVALID);
        CHECK_EQ(dtrain_device_adamw(device, p, g, m, NULL, N, &desc, 0.01f, 1, NULL), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "device_adamw on fake:0: v is NULL");
        CHECK_EQ(dtrain_device_sgd(device, p, g, NULL, N, &desc, 0.01f, NULL), DTRAIN_ERR_INVALID);
        CHECK_EQ(dtrain_device_sgd(device, p, g, m, N, &desc, -1, NULL), DTRAIN_ERR_INVALID);
        desc.momentum = 2;
        CHECK_EQ(dtrain_device_sgd(device, p, g, m, N, &desc, 1, NULL), DTRAIN_ERR_INVALID);
        desc.momentum = 0;
        CHECK_EQ(dtrain_device_sgd(device, p, g, NULL, N, &desc, 1, NULL), DTRAIN_OK);
        for (int i = 0; i < 5; i++)
            dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, on[i]);
    }
    fake_end(&main_fake);
}

/* Selects k of count elements of sum + add (NULL: of sum), on device or with NULL on the CPU, and compares. */
static void compare_selection(dtrain_device *device, const float *sum, const float *add, size_t count, size_t k)
{
    dtrain_device_selection *selection = NULL;
    dtrain__sparse expected;
    float *whole = (float *)malloc(4 * count + 4);
    memset(&expected, 0, sizeof expected);
    memcpy(whole, sum, 4 * count);
    CHECK_EQ(dtrain_device_selection_create(device, count, k, &selection), DTRAIN_OK);
    void *data = fake_upload(device, sum, 4 * count), *more = fake_upload(device, add, 4 * count);
    void *indices = fake_upload(device, sum, 4 * k), *values = fake_upload(device, sum, 4 * k);
    for (int pass = 0; pass < 2; pass++) {
        CHECK_EQ(pass > 0 ? dtrain__topk_add(whole, add, count, k, &expected) : dtrain__topk_pick(whole, count, k, &expected),
                 DTRAIN_OK);
        CHECK_EQ(dtrain_device_select(device, selection, (float *)data, pass > 0 ? (const float *)more : NULL,
                                      (uint32_t *)indices, (float *)values),
                 DTRAIN_OK);
        CHECK(fake_holds(device, data, whole, 4 * count));
        CHECK(fake_holds(device, indices, expected.indices, 4 * k));
        CHECK(fake_holds(device, values, expected.values, 4 * k));
    }
    for (size_t i = 0; i < k; i++)
        whole[expected.indices[i]] += expected.values[i];
    CHECK_EQ(
        dtrain_device_sparse_add(device, (const uint32_t *)indices, (const float *)values, k, (float *)data, count),
        DTRAIN_OK);
    CHECK(fake_holds(device, data, whole, 4 * count));
    dtrain_device_selection_destroy(device, selection);
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, data);
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, more);
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, indices);
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, values);
    dtrain__sparse_destroy(&expected);
    free(whole);
}

TEST(selections_are_those_of_topk)
{
    dtrain_device *device = fake_begin(&main_fake, "fake:0");
    dtrain_device_selection *selection = NULL;
    float *x = (float *)malloc(MANY * 4), *y = (float *)malloc(MANY * 4);
    draw(x, MANY, 5);
    draw(y, MANY, 6);
    for (size_t s = 1; s < SIZES; s++) {
        compare_selection(device, x, y, sizes[s], (sizes[s] + 99) / 100);
        compare_selection(NULL, x, y, sizes[s], sizes[s]);
    }
    CHECK_EQ(dtrain_device_selection_create(device, 5, 6, &selection), DTRAIN_ERR_INVALID);
    if (sizeof(size_t) == 8) /* indices have 32 bits */
        CHECK_EQ(dtrain_device_selection_create(device, SIZE_MAX / 2, 6, &selection), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(dtrain_device_selection_create(device, 5, 1, &selection), DTRAIN_OK);
    CHECK_EQ(dtrain_device_select(NULL, selection, x, NULL, (uint32_t *)x, x), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "device_select on cpu: the selection is of fake:0");
    CHECK_EQ(dtrain_device_select(device, selection, x, NULL, NULL, x), DTRAIN_ERR_INVALID);
    dtrain_device_selection_destroy(device, selection);
    dtrain_device_selection_destroy(device, NULL);
    const uint32_t wild[3] = {1, 4, 0xffffffffu};
    float sums[4] = {1, 2, 3, 4};
    const float ones[3] = {1, 1, 1}, expected[4] = {1, 3, 3, 4};
    CHECK_EQ(dtrain_device_sparse_add(NULL, wild, ones, 3, sums, 4), DTRAIN_OK);
    CHECK(memcmp(sums, expected, sizeof sums) == 0);
    free(x), free(y);
    fake_end(&main_fake);
}

TEST(packing_is_that_of_the_compressors)
{
    static const size_t blocks[] = {0, 8, 1032, 65536};
    dtrain_device *device = fake_begin(&main_fake, "fake:0");
    float *x = (float *)malloc(MANY * 4), *y = (float *)malloc(MANY * 4);
    unsigned char *packed = (unsigned char *)malloc(MANY * 2);
    draw(x, MANY, 7);
    for (int round = 0; round < 8; round++) {
        dtrain_dtype code = round % 2 ? DTRAIN_I8 : DTRAIN_F8_E4M3;
        size_t block = blocks[round / 2];
        dtrain_compressor c = round % 2 ? dtrain_compressor_of(DTRAIN_COMPRESS_INT8, block) : dtrain_compressor_of(DTRAIN_COMPRESS_FP8, block);
        for (size_t s = 1; s < SIZES; s++) {
            size_t n = sizes[s], bytes = c.bytes(&c, n);
            void *in = fake_upload(device, x, 4 * n), *out = fake_upload(device, x, bytes);
            c.pack(&c, x, n, packed);
            CHECK_EQ(dtrain_device_pack(device, code, block, (const float *)in, n, out), DTRAIN_OK);
            CHECK(fake_holds(device, out, packed, bytes));
            c.unpack(&c, packed, y, n);
            CHECK_EQ(dtrain_device_unpack(device, code, block, out, (float *)in, n, 0), DTRAIN_OK);
            CHECK(fake_holds(device, in, y, 4 * n));
            CHECK_EQ(dtrain_device_copy(device, in, x, 4 * n), DTRAIN_OK);
            CHECK_EQ(dtrain_device_unpack(device, code, block, out, (float *)in, n, 1), DTRAIN_OK);
            for (size_t i = 0; i < n; i++)
                y[i] += x[i];
            CHECK(fake_holds(device, in, y, 4 * n));
            dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, in);
            dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, out);
        }
    }
    CHECK_EQ(dtrain_device_pack(device, DTRAIN_I8, 12, x, 1, packed), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_pack(device, DTRAIN_U8, 16, x, 1, packed), DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(dtrain_device_unpack(device, DTRAIN_I8, 16, NULL, x, 1, 0), DTRAIN_ERR_INVALID);
    free(x), free(y), free(packed);
    fake_end(&main_fake);
}

TEST(a_table_that_lacks_functions_says_so)
{
    static const dtrain_device_ops none;
    dtrain_device device = {&none, "bare", NULL};
    const float number = 1;
    float x[2] = {1, 2};
    void *made, *list[1] = {x};
    dtrain_device_event *event, *other = (dtrain_device_event *)x;
    int64_t limbs[DTRAIN_SQUARES_LIMBS] = {0};
    dtrain_device_selection *selection;
    uint32_t found = 0;
    double norm;
    int done;
    const dtrain_status got[] = {
        dtrain_device_alloc(&device, DTRAIN_MEMORY_DEVICE, 8, &made),
        dtrain_device_copy(&device, x, &number, 4),
        dtrain_device_fill(&device, x, &number, 4, 2),
        dtrain_device_wait(&device),
        dtrain__device_event_create(&device, &event),
        dtrain__device_event_record(&device, other),
        dtrain__device_event_await(&device, other),
        dtrain__device_event_done(&device, other, &done),
        dtrain_device_convert(&device, x, DTRAIN_F32, limbs, DTRAIN_F64, 2),
        dtrain_device_reduce(&device, DTRAIN_F32, DTRAIN_SUM, (const void *const *)list, 1, list, 1, 0, 2),
        dtrain_device_scale(&device, DTRAIN_F32, x, 2, 2),
        dtrain_device_axpy(&device, DTRAIN_F32, x, 2, limbs, 2),
        dtrain_device_overflow(&device, DTRAIN_F32, x, 2, &found),
        dtrain_device_squares(&device, x, 2, limbs),
        dtrain_device_adamw(&device, x, x, x, x, 2, NULL, 1, 1, NULL),
        dtrain_device_sgd(&device, x, x, x, 2, NULL, 1, NULL),
        dtrain_device_selection_create(&device, 2, 1, &selection),
        dtrain_device_sparse_add(&device, &found, x, 1, x, 2),
        dtrain_device_pack(&device, DTRAIN_I8, 8, x, 2, limbs),
        dtrain_device_unpack(&device, DTRAIN_I8, 8, limbs, x, 2, 0),
        dtrain_device_clip(&device, limbs, 1, &norm, x, 2),
    };
    for (size_t i = 0; i < sizeof got / sizeof got[0]; i++)
        CHECK_EQ(got[i], DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "device_clip on bare");
    CHECK_CONTAINS(dtrain_last_error(), "device NULL");
    CHECK(made == NULL && event == NULL && selection == NULL);
    dtrain_device_free(&device, DTRAIN_MEMORY_DEVICE, x);
    dtrain__device_event_destroy(&device, other);
}

TEST(a_selection_is_freed_where_it_was_made)
{
    dtrain_device *device = fake_begin(&main_fake, "fake:0");
    dtrain_device_selection *selection;
    CHECK_EQ(dtrain_device_selection_create(device, 100, 3, &selection), DTRAIN_OK);
    CHECK_EQ(main_fake.selections, 1);
    dtrain_device_selection_destroy(NULL, selection);
    CHECK_EQ(main_fake.selections, 0);
    fake_end(&main_fake);
}

TEST(bad_arguments_are_named)
{
    dtrain_device *device = fake_begin(&main_fake, "fake:0");
    float x[2] = {1, 2};
    void *list[1] = {NULL};
    double norm;
    int64_t limbs[DTRAIN_SQUARES_LIMBS] = {0};
    CHECK_EQ(dtrain_device_copy(device, x, NULL, 4), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "device_copy on fake:0: from is NULL");
    CHECK_EQ(dtrain_device_copy(device, NULL, NULL, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_device_reduce(device, DTRAIN_F32, DTRAIN_SUM, (const void *const *)list, 65, list, 1, 0, 1),
             DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_reduce(device, DTRAIN_F32, DTRAIN_SUM, (const void *const *)list, 1, list, 1, 0, 1),
             DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "in[0]");
    list[0] = x;
    CHECK_EQ(dtrain_device_reduce(device, DTRAIN_F32, DTRAIN_AND, (const void *const *)list, 1, list, 1, 0, 1),
             DTRAIN_ERR_UNSUPPORTED);
    CHECK_EQ(dtrain_device_reduce(device, DTRAIN_F32, DTRAIN_SUM, (const void *const *)list, 1, list, 1, 2, SIZE_MAX),
             DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_convert(device, x, DTRAIN_I32, x, DTRAIN_F32, 1), DTRAIN_ERR_UNSUPPORTED);
    for (int i = 0; i < 2; i++) { /* times 4 both are 4 bytes */
        size_t wraps = SIZE_MAX / 4 + 2;
        dtrain_device *on = i == 0 ? device : NULL;
        CHECK_EQ(dtrain_device_reduce(on, DTRAIN_F32, DTRAIN_SUM, (const void *const *)list, 1, list, 1, wraps - 1, 1),
                 DTRAIN_ERR_INVALID);
        CHECK_EQ(dtrain_device_scale(on, DTRAIN_F32, x, 2, wraps), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "more than memory holds");
        CHECK_EQ(dtrain_device_squares(on, x, wraps, limbs), DTRAIN_ERR_INVALID);
    }
    CHECK_EQ(dtrain_device_clip(device, limbs, from_bits(0x7fc00000u), &norm, x, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_clip(device, limbs, -1, &norm, x, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_clip(device, limbs, 1, NULL, x, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_device_scale(device, DTRAIN_F32, x, 2, 2), DTRAIN_ERR_INVALID); /* the device says so */
    CHECK_CONTAINS(dtrain_last_error(), "not the device's");
    fake_end(&main_fake);
}
