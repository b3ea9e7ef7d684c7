/* ---- >>test_cuda_quantise ----
 * Quantisers and sparse sums of dtrain_cuda.h against the CPU's: the same bytes, NaNs as a class, and nothing written
 * beside them. Compiled as C the device is emulated; as CUDA it is a GPU, and without one all is skipped. */
#include "dtrain.h"
#include "cuda_device.h"

enum { MOST = 300000, SLACK = 64, POISON = 0xa5 };
static float data[MOST], expected[MOST];
static uint32_t indices[MOST];
static unsigned char packed[2 * MOST], got[4 * MOST + 2 * SLACK];

/* The device, and three pieces of its memory. */
typedef struct place {
    dtrain_device *device;
    unsigned char *floats, *bytes, *more;
} place;

/* Makes room for so many floats; 0 on an error. */
static int open_place(place *p, size_t floats)
{
    const size_t room = 4 * floats + 2 * SLACK;
    void *pointer[3] = {NULL, NULL, NULL};
    memset(p, 0, sizeof *p);
    p->device = cuda_device(0);
    if (p->device == NULL)
        return 0;
    for (int i = 0; i < 3; i++)
        CHECK_EQ(dtrain_device_alloc(p->device, DTRAIN_MEMORY_DEVICE, room, &pointer[i]), DTRAIN_OK);
    p->floats = (unsigned char *)pointer[0];
    p->bytes = (unsigned char *)pointer[1];
    p->more = (unsigned char *)pointer[2];
    return pointer[0] != NULL && pointer[1] != NULL && pointer[2] != NULL;
}

static void close_place(place *p)
{
    dtrain_device_free(p->device, DTRAIN_MEMORY_DEVICE, p->floats);
    dtrain_device_free(p->device, DTRAIN_MEMORY_DEVICE, p->bytes);
    dtrain_device_free(p->device, DTRAIN_MEMORY_DEVICE, p->more);
    dtrain_cuda_destroy(p->device);
}

/* Brings `bytes` bytes to the device, with poison on both sides of them. */
static void put(const place *p, unsigned char *to, size_t offset, const void *from, size_t bytes)
{
    memset(got, POISON, bytes + 2 * SLACK);
    if (from != NULL && bytes > 0)
        memcpy(got + SLACK + offset, from, bytes);
    CHECK_EQ(dtrain_device_copy(p->device, to, got, bytes + 2 * SLACK), DTRAIN_OK);
}

/* Fetches them into got, and says how many bytes beside them have changed. */
static size_t get(const place *p, const unsigned char *from, size_t offset, size_t bytes)
{
    size_t changed = 0;
    CHECK_EQ(dtrain_device_copy(p->device, got, from, bytes + 2 * SLACK), DTRAIN_OK);
    for (size_t i = 0; i < SLACK + offset; i++)
        changed += got[i] != POISON;
    for (size_t i = SLACK + offset + bytes; i < bytes + 2 * SLACK; i++)
        changed += got[i] != POISON;
    return changed;
}

/* How many floats in got differ from those expected, NaNs counting as equal. */
static size_t wrong_floats(size_t offset, size_t n)
{
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t a, b = to_bits(expected[i]);
        memcpy(&a, got + SLACK + offset + 4 * i, 4);
        wrong += a != b && ((a & 0x7fffffffu) <= 0x7f800000u || (b & 0x7fffffffu) <= 0x7f800000u);
    }
    return wrong;
}

enum { PLAIN, TINY, HUGE_ONES, TIES, ZEROS, ANY_BITS, KINDS };

/* Floats of a kind; ANY_BITS: NaNs, infinities and subnormals among them, and blocks that have none. */
static void fill(size_t n, uint64_t seed, int kind)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = dtrain_random_u64(seed, i);
        float normal = dtrain_random_normal(seed, i);
        uint32_t sign = (uint32_t)(bits >> 33) & 0x80000000u;
        data[i] = normal * (float)(1 << (bits & 7));
        if (kind == TINY)
            data[i] = from_bits(((uint32_t)bits % 0x0d900000u) | sign);
        if (kind == HUGE_ONES)
            data[i] = from_bits((0x7f7fffffu - (uint32_t)bits % 0x01000000u) | sign);
        if (kind == TIES) /* the largest is 127 or 448 and halves are halves */
            data[i] = i % 8 == 0 ? (seed % 2 != 0 ? 127.0f : 448.0f) : (float)((int)(bits % 897) - 448) / 8.0f;
        if (kind == ZEROS)
            data[i] = from_bits(bits % 5000 == 0 ? (uint32_t)(bits >> 20) % 3 : sign);
        if (kind == ANY_BITS && bits % 1000 == 0)
            data[i] = from_bits((uint32_t)(bits >> 20));
        if (kind == ANY_BITS && bits % 1000 == 1)
            data[i] = from_bits(0x7f800000u | sign);
    }
}

static dtrain_compressor compressor(dtrain_dtype code, size_t block)
{
    return code == DTRAIN_I8 ? dtrain_compressor_of(DTRAIN_COMPRESS_INT8, block) : dtrain_compressor_of(DTRAIN_COMPRESS_FP8, block);
}

/* Packs data, floats and bytes so many bytes off a multiple of 16; returns how many bytes differ from the CPU's. */
static size_t pack_differs(const place *p, dtrain_dtype code, size_t block, size_t n, size_t floats, size_t bytes)
{
    dtrain_compressor c = compressor(code, block);
    size_t size = c.bytes(&c, n), wrong;
    c.pack(&c, data, n, packed);
    put(p, p->floats, floats, data, 4 * n);
    put(p, p->bytes, bytes, NULL, size);
    CHECK_EQ(dtrain_device_pack(p->device, code, block, (const float *)(const void *)(p->floats + SLACK + floats), n,
                                p->bytes + SLACK + bytes),
             DTRAIN_OK);
    wrong = get(p, p->bytes, bytes, size);
    for (size_t i = 0; i < size; i++)
        wrong += got[SLACK + bytes + i] != packed[i];
    return wrong;
}

/* Unpacks what is in packed over, or onto, data; returns how many floats differ from the CPU's. */
static size_t unpack_differs(const place *p, dtrain_dtype code, size_t block, size_t n, size_t floats, size_t bytes,
                             int add)
{
    dtrain_compressor c = compressor(code, block);
    c.unpack(&c, packed, expected, n);
    for (size_t i = 0; i < n && add; i++)
        expected[i] = data[i] + expected[i];
    put(p, p->bytes, bytes, packed, c.bytes(&c, n));
    put(p, p->floats, floats, data, 4 * n);
    CHECK_EQ(dtrain_device_unpack(p->device, code, block, p->bytes + SLACK + bytes,
                                  (float *)(void *)(p->floats + SLACK + floats), n, add),
             DTRAIN_OK);
    return get(p, p->floats, floats, 4 * n) + wrong_floats(floats, n);
}

static const dtrain_dtype codes[2] = {DTRAIN_I8, DTRAIN_F8_E4M3};

TEST(every_length_to_1000_gives_the_cpus_bytes)
{
    static const size_t blocks[] = {8, 24, 64, 256, 4104};
    place p;
    if (!open_place(&p, 1000))
        return;
    for (int c = 0; c < 2; c++)
        for (size_t b = 0; b < 5; b++) {
            size_t wrong = 0;
            for (size_t n = 0; n <= 1000; n++) {
                fill(n, n + b, (int)(n % KINDS));
                wrong += pack_differs(&p, codes[c], blocks[b], n, 0, 0);
                wrong += unpack_differs(&p, codes[c], blocks[b], n, 0, 0, (int)(n / KINDS % 2));
            }
            CHECK_EQ(wrong, 0);
        }
    close_place(&p);
}

TEST(every_block_and_kind_of_number_gives_the_cpus_bytes)
{
    static const size_t blocks[] = {8, 16, 40, 256, 1000, 2048, 2056, 4088, 4096, 4104, 8192, 12296, 65528, 65536};
    static const size_t sizes[] = {4095, 4096, 4097, 20491, 70001};
    place p;
    if (!open_place(&p, MOST))
        return;
    for (size_t b = 0; b < sizeof blocks / sizeof blocks[0]; b++)
        for (int kind = 0; kind < KINDS; kind++) {
            size_t n = sizes[(b + (size_t)kind) % 5], wrong = 0;
            fill(n, b + 7, kind);
            for (int c = 0; c < 2; c++) {
                wrong += pack_differs(&p, codes[c], blocks[b], n, 0, 0);
                wrong += unpack_differs(&p, codes[c], blocks[b], n, 0, 0, 0);
                wrong += unpack_differs(&p, codes[c], blocks[b], n, 0, 0, 1);
            }
            CHECK_EQ(wrong, 0);
        }
    fill(MOST, 3, ANY_BITS);
    CHECK_EQ(pack_differs(&p, DTRAIN_I8, 256, MOST, 0, 0) + unpack_differs(&p, DTRAIN_I8, 256, MOST, 0, 0, 1), 0);
    CHECK_EQ(pack_differs(&p, DTRAIN_I8, 65536, MOST, 0, 0) + unpack_differs(&p, DTRAIN_I8, 65536, MOST, 0, 0, 1), 0);
    close_place(&p);
}

TEST(any_address_gives_the_cpus_bytes)
{
    static const size_t blocks[] = {8, 256, 8192};
    static const size_t sizes[] = {5, 1021, 9000};
    place p;
    if (!open_place(&p, 9000))
        return;
    for (size_t b = 0; b < 3; b++)
        for (size_t floats = 0; floats < 16; floats++)
            for (size_t bytes = 0; bytes < 16; bytes += floats % 4 == 0 ? 1 : 5) {
                size_t n = sizes[(floats + bytes) % 3], wrong;
                int c = (int)(floats + bytes) % 2;
                fill(n, floats, ANY_BITS);
                wrong = pack_differs(&p, codes[c], blocks[b], n, floats, bytes);
                wrong += unpack_differs(&p, codes[c], blocks[b], n, floats, bytes, 0);
                wrong += unpack_differs(&p, codes[c], blocks[b], n, floats, bytes, 1);
                CHECK_EQ(wrong, 0);
            }
    close_place(&p);
}

/* Bytes of another rank's may be anything: every code with scales of every kind. */
TEST(any_bytes_unpack_as_on_the_cpu)
{
    place p;
    if (!open_place(&p, 60000))
        return;
    for (size_t n = 256; n < 60000; n = n * 3 + 1) {
        for (size_t i = 0; i < 2 * n; i++)
            packed[i] = (unsigned char)(dtrain_random_u64(n, i) >> 9);
        fill(n, n, PLAIN);
        for (int c = 0; c < 2; c++)
            for (int add = 0; add < 2; add++)
                CHECK_EQ(unpack_differs(&p, codes[c], 8 * (n % 7 + 1), n, 0, 0, add), 0);
    }
    for (int c = 0; c < 2; c++) {
        for (int i = 0; i < 260; i++)
            packed[i] = (unsigned char)(i < 4 ? "\0\0\x80\x3f"[i] : i - 4); /* 1.0, then every code */
        CHECK_EQ(unpack_differs(&p, codes[c], 256, 256, 0, 0, 0), 0);
        CHECK(expected[1] == (c == 0 ? 1.0f : 0x1p-9f) && expected[129] == (c == 0 ? -127.0f : -0x1p-9f));
    }
    close_place(&p);
}

/* Memory of exactly the size that is due: what reads or writes beyond it shows under a memory checker. */
TEST(nothing_is_read_or_written_beyond_the_end)
{
    place p;
    if (!open_place(&p, 1))
        return;
    for (size_t n = 1; n < 5000; n += n < 40 ? 1 : 991) {
        dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 64);
        size_t size = c.bytes(&c, n), wrong = 0;
        void *floats = NULL, *bytes = NULL;
        CHECK_EQ(dtrain_device_alloc(p.device, DTRAIN_MEMORY_DEVICE, 4 * n, &floats), DTRAIN_OK);
        CHECK_EQ(dtrain_device_alloc(p.device, DTRAIN_MEMORY_DEVICE, size, &bytes), DTRAIN_OK);
        fill(n, n, PLAIN);
        c.pack(&c, data, n, packed);
        c.unpack(&c, packed, expected, n);
        CHECK_EQ(dtrain_device_copy(p.device, floats, data, 4 * n), DTRAIN_OK);
        CHECK_EQ(dtrain_device_pack(p.device, DTRAIN_I8, 64, (const float *)floats, n, bytes), DTRAIN_OK);
        CHECK_EQ(dtrain_device_unpack(p.device, DTRAIN_I8, 64, bytes, (float *)floats, n, 1), DTRAIN_OK);
        CHECK_EQ(dtrain_device_copy(p.device, got, floats, 4 * n), DTRAIN_OK);
        for (size_t i = 0; i < n; i++) {
            float sum = data[i] + expected[i];
            wrong += memcmp(got + 4 * i, &sum, 4) != 0;
        }
        CHECK_EQ(wrong, 0);
        dtrain_device_free(p.device, DTRAIN_MEMORY_DEVICE, floats);
        dtrain_device_free(p.device, DTRAIN_MEMORY_DEVICE, bytes);
    }
    close_place(&p);
}

/* Draws about one index in `gap` below n, ascending, each once; returns how many. */
static size_t draw(size_t n, size_t gap, uint64_t seed)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        if (dtrain_random_u64(seed, i) % gap == 0)
            indices[k++] = (uint32_t)i;
    return k;
}

/* Adds k of n elements and then some whose index is out of range; returns how many floats differ from the CPU's. */
static size_t sum_differs(const place *p, size_t n, size_t k, const size_t *offset)
{
    static const uint32_t out_of_range[] = {0, 1, 77, 0x40000000u, 0x7fffffffu, 0xffffffffu};
    static float values[MOST + 6];
    size_t beyond = n + 6 < MOST ? 6 : 0;
    for (size_t i = 0; i < k + beyond; i++)
        values[i] = i % 97 == 5 ? from_bits((uint32_t)dtrain_random_u64(9, i)) : dtrain_random_normal(n, i);
    for (size_t i = 0; i < beyond; i++)
        indices[k + i] = i < 3 ? (uint32_t)n + out_of_range[i] : out_of_range[i];
    memcpy(expected, data, 4 * n);
    CHECK_EQ(dtrain_device_sparse_add(NULL, indices, values, k, expected, n), DTRAIN_OK);
    put(p, p->bytes, offset[0], indices, 4 * (k + beyond));
    put(p, p->more, offset[1], values, 4 * (k + beyond));
    put(p, p->floats, offset[2], data, 4 * n);
    CHECK_EQ(p->device->ops->sparse_add(p->device, (const uint32_t *)(const void *)(p->bytes + SLACK + offset[0]),
                                        (const float *)(const void *)(p->more + SLACK + offset[1]), k + beyond,
                                        (float *)(void *)(p->floats + SLACK + offset[2]), n),
             DTRAIN_OK);
    return get(p, p->floats, offset[2], 4 * n) + wrong_floats(offset[2], n);
}

TEST(sparse_sums_are_the_cpus_and_indices_out_of_range_add_nothing)
{
    size_t offset[3] = {0, 0, 0}, wrong = 0;
    place p;
    if (!open_place(&p, MOST))
        return;
    for (size_t n = 1; n <= 1000; n++) {
        fill(n, n, ANY_BITS);
        wrong += sum_differs(&p, n, draw(n, n % 9 + 1, n), offset);
    }
    CHECK_EQ(wrong, 0);
    for (size_t gap = 1; gap < 200; gap = gap * 6 + 1) { /* more than the grid holds at once, too */
        fill(MOST - 7, gap, PLAIN);
        CHECK_EQ(sum_differs(&p, MOST - 7, draw(MOST - 7, gap, gap), offset), 0);
    }
    for (size_t i = 0; i < 256; i++) {
        offset[0] = i % 2 == 0 ? 4 * (i % 4) : i % 16;
        offset[1] = i % 2 == 0 ? 4 * (i / 4 % 4) : i / 16;
        offset[2] = i % 3 == 0 ? 4 * (i % 5 % 4) : i * 7 % 16;
        fill(700 + i, i, PLAIN);
        CHECK_EQ(sum_differs(&p, 700 + i, draw(700 + i, 3, i), offset), 0);
    }
    CHECK_EQ(dtrain_device_sparse_add(p.device, NULL, NULL, 0, NULL, 0), DTRAIN_OK);
    close_place(&p);
}

#ifdef DTRAIN_CUDA_EMULATE
/* Tiles cut a vector of more elements than 32 bits count without a gap, and name the block they are in. */
TEST(tiles_follow_each_other_beyond_32_bits)
{
    static const size_t blocks[] = {8, 256, 2056, 4096, 4104, 65536};
    const size_t count = ((size_t)3 << 32) + 12345;
    for (size_t b = 0; b < 6; b++) {
        dtrain__cuda_quantise_args args = dtrain__cuda_quantise_args_of(NULL, NULL, count, blocks[b], packed, packed);
        size_t tiles = dtrain__cuda_quantise_tiles(&args), wrong = 0;
        for (size_t i = 0; i < tiles; i += i + 2000 < tiles && i > 1000 ? 977 : 1) {
            dtrain__cuda_quantise_tile tile = dtrain__cuda_quantise_tile_of(&args, i);
            size_t end = tile.begin + tile.count;
            wrong += tile.count == 0 || tile.block != tile.begin / blocks[b];
            wrong += end != (i + 1 < tiles ? dtrain__cuda_quantise_tile_of(&args, i + 1).begin : count);
            for (uint32_t v = 0; 4 * v < tile.count; v += 61)
                wrong += tile.block + dtrain__cuda_quantise_block_of(&args, v) != (tile.begin + 4 * v) / blocks[b];
        }
        CHECK_EQ(wrong, 0);
    }
}
#else
/* The last elements of more than 32 bits count, packed and unpacked. */
TEST(more_elements_than_32_bits_count)
{
    const size_t count = ((size_t)1 << 32) + 1000, last = ((size_t)1 << 32) - 256, n = count - last;
    dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 256);
    const uint32_t zero = 0;
    void *floats = NULL, *bytes = NULL;
    size_t scales = 4 * (last / 256), codes_at = c.bytes(&c, count) - n, short_scales = c.bytes(&c, n) - n;
    place p;
    if (!open_place(&p, 1000))
        return;
    if (dtrain_device_alloc(p.device, DTRAIN_MEMORY_DEVICE, 4 * count, &floats) != DTRAIN_OK ||
        dtrain_device_alloc(p.device, DTRAIN_MEMORY_DEVICE, c.bytes(&c, count), &bytes) != DTRAIN_OK) {
        printf("skipped: %s\n", dtrain_last_error());
    } else {
        fill(n, 5, PLAIN);
        c.pack(&c, data, n, packed);
        c.unpack(&c, packed, expected, n);
        CHECK_EQ(dtrain_device_fill(p.device, floats, &zero, 4, count), DTRAIN_OK);
        CHECK_EQ(dtrain_device_copy(p.device, (float *)floats + last, data, 4 * n), DTRAIN_OK);
        CHECK_EQ(dtrain_device_pack(p.device, DTRAIN_I8, 256, (float *)floats, count, bytes), DTRAIN_OK);
        CHECK_EQ(dtrain_device_copy(p.device, got, (char *)bytes + scales, short_scales), DTRAIN_OK);
        CHECK_EQ(dtrain_device_copy(p.device, got + short_scales, (char *)bytes + codes_at, n), DTRAIN_OK);
        CHECK(memcmp(got, packed, short_scales + n) == 0);
        CHECK_EQ(dtrain_device_fill(p.device, floats, &zero, 4, count), DTRAIN_OK);
        CHECK_EQ(dtrain_device_unpack(p.device, DTRAIN_I8, 256, bytes, (float *)floats, count, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_device_copy(p.device, got + SLACK, (float *)floats + last, 4 * n), DTRAIN_OK);
        CHECK_EQ(wrong_floats(0, n), 0);
    }
    dtrain_device_free(p.device, DTRAIN_MEMORY_DEVICE, floats);
    dtrain_device_free(p.device, DTRAIN_MEMORY_DEVICE, bytes);
    close_place(&p);
}
#endif
