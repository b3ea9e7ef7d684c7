/* For tests of kernels: memory of a device with guards around what a kernel may write, and values that hit every case
 * of a float format. Include dtrain.h first. */
#ifndef DTRAIN_TEST_CUDA_BUFFERS_H
#define DTRAIN_TEST_CUDA_BUFFERS_H

#include "cuda_device.h"

/* ---- buffers ----
 * All are parts of one allocation, which goes to the device and comes back whole: a test runs many small cases. */

enum { GUARD = 64, POISON = 0xa5 };

static unsigned char *buffers_device, *buffers_host;
static size_t buffers_room, buffers_used;

typedef struct buffer {
    size_t begin, bytes, end; /* the data, and where the guard behind it ends; that before it is GUARD bytes or more */
} buffer;

/* One processor, so that the blocks of a large array come around more than once. */
static dtrain_device *test_device(void)
{
    return device_of(1);
}

/* Room for so many buffers of so many bytes. */
static void buffers_create(size_t count, size_t bytes)
{
    dtrain_device *device = test_device();
    void *pointer = NULL;
    buffers_room = count * (bytes + 4 * GUARD);
    buffers_host = (unsigned char *)malloc(buffers_room);
    CHECK(buffers_host != NULL);
    CHECK_OK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, buffers_room, &pointer));
    buffers_device = (unsigned char *)pointer;
}

static void buffers_destroy(void)
{
    dtrain_device *device = test_device();
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, buffers_device);
    free(buffers_host);
}

/* Takes room for `bytes` bytes, `offset` bytes after a multiple of 64, between guards; poison where data is NULL.
 * Returns where they will be on the device. */
static void *buffer_put(buffer *b, size_t offset, const void *data, size_t bytes)
{
    b->begin = buffers_used + GUARD + offset;
    b->bytes = bytes;
    b->end = (b->begin + bytes + 2 * GUARD - 1) / GUARD * GUARD;
    if (b->end > buffers_room) {
        printf("a test has room for %zu bytes, and puts %zu\n", buffers_room, b->end);
        exit(1);
    }
    memset(buffers_host + buffers_used, POISON, b->end - buffers_used);
    if (data != NULL && bytes > 0)
        memcpy(buffers_host + b->begin, data, bytes);
    buffers_used = b->end;
    return buffers_device + b->begin;
}

/* Sends what was put to the device. */
static void buffers_send(void)
{
    dtrain_device *device = test_device();
    CHECK_OK(dtrain_device_copy(device, buffers_device, buffers_host, buffers_used));
}

/* Fetches it back; what is put next begins anew. */
static void buffers_fetch(void)
{
    dtrain_device *device = test_device();
    memset(buffers_host, 0, buffers_used);
    CHECK_OK(dtrain_device_copy(device, buffers_host, buffers_device, buffers_used));
    buffers_used = 0;
}

/* Checks that nothing around the data has changed, and returns the data, as fetched. */
static const unsigned char *buffer_get(const buffer *b)
{
    int whole = 1;
    for (size_t i = b->begin - GUARD; i < b->begin; i++)
        whole &= buffers_host[i] == POISON;
    for (size_t i = b->begin + b->bytes; i < b->end; i++)
        whole &= buffers_host[i] == POISON;
    CHECK(whole);
    return buffers_host + b->begin;
}

/* ---- values ---- */

/* Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Bits of the exponent; 0 for integers. */
static int exponent_bits(dtrain_dtype dtype)
{
    switch (dtype) {
    case DTRAIN_F64: return 11;
    case DTRAIN_F32:
    case DTRAIN_BF16: return 8;
    case DTRAIN_F16:
    case DTRAIN_F8_E5M2: return 5;
    case DTRAIN_F8_E4M3: return 4;
    default: return 0;
    }
}

/* Numbers of like size; among 16, one zero, subnormal, largest, 1 or any bits, which may be a NaN or an infinity. */
static uint64_t value_bits(dtrain_dtype dtype, uint64_t seed)
{
    int bits = (int)dtrain_dtype_bits(dtype), e = exponent_bits(dtype), f = bits - 1 - e;
    uint64_t h = mix(seed), sign = (h & 1) << (bits - 1), fraction = (uint64_t)1 << f;
    uint64_t one = (((uint64_t)1 << (e - (e > 0))) - 1) << f, top = (((uint64_t)1 << e) - 1) << f;
    const uint64_t special[8] = {0, 1, fraction - 1, fraction, top - 1, one, top, h >> 8 & (top | (fraction - 1))};
    if (e == 0)
        return h;
    if ((h >> 1) % 16 == 0)
        return sign | special[(h >> 5) % 8];
    return sign | (one + (((h >> 8) % 5) << f) - 2 * fraction + (h >> 11 & (fraction - 1)));
}

static void fill_values(dtrain_dtype dtype, uint64_t seed, void *to, size_t count)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = value_bits(dtype, seed * 1000003 + i);
        memcpy((unsigned char *)to + i * width, &bits, width); /* of a little-endian CPU, as GPUs have */
    }
}

static int is_nan(dtrain_dtype dtype, uint64_t bits)
{
    int width = (int)dtrain_dtype_bits(dtype), e = exponent_bits(dtype), f = width - 1 - e;
    uint64_t size = bits & (((uint64_t)1 << (width - 1)) - 1), top = (((uint64_t)1 << e) - 1) << f;
    if (dtype == DTRAIN_F8_E4M3)
        return size == 0x7f;
    return e > 0 && size > top;
}

/* Whether two arrays have the same bits, or a NaN each; says where they first differ. */
static int same_values(const char *what, dtrain_dtype dtype, const void *got, const void *expected, size_t count)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    for (size_t i = 0; i < count; i++) {
        uint64_t a = 0, b = 0;
        memcpy(&a, (const unsigned char *)got + i * width, width);
        memcpy(&b, (const unsigned char *)expected + i * width, width);
        if (a != b && !(is_nan(dtype, a) && is_nan(dtype, b))) {
            TEST_FAIL("%s: element %zu of %zu %s is %llx, expected %llx", what, i, count, dtrain_dtype_name(dtype),
                      (unsigned long long)a, (unsigned long long)b);
            return 0;
        }
    }
    return 1;
}

#endif
