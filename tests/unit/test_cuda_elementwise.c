/* Conversions, scale, axpy and overflow of dtrain_cuda.h give the bits of the CPU's. CUDA_EVERY_F32=1 converts all 2^32
 * float32 patterns to BF16 and F16, which a GPU does in seconds. */
#include "dtrain.h"
#include "cuda_buffers.h"

enum { FORMATS = 6, FLOATS = 4, LARGE = 270001 };

static const dtrain_dtype formats[FORMATS] = {DTRAIN_F32, DTRAIN_BF16,    DTRAIN_F16,
                                              DTRAIN_F64, DTRAIN_F8_E4M3, DTRAIN_F8_E5M2};

static buffer in, out;
static unsigned char *host_in, *host_out;

static void create(size_t room)
{
    buffers_create(2, room);
    host_in = (unsigned char *)malloc(room);
    host_out = (unsigned char *)malloc(room);
    CHECK(host_in != NULL && host_out != NULL);
}

static void destroy(void)
{
    buffers_destroy();
    free(host_in);
    free(host_out);
}

static size_t width_of(dtrain_dtype dtype)
{
    return dtrain_dtype_bits(dtype) / 8;
}

/* ---- conversions ---- */

/* Converts what is in host_in. Conversions give the very bits, those of a NaN included. */
static int convert_same(dtrain_dtype from, dtrain_dtype to, size_t count, size_t from_offset, size_t to_offset)
{
    size_t bytes = count * width_of(to);
    void *device_in = buffer_put(&in, from_offset, host_in, count * width_of(from));
    void *device_out = buffer_put(&out, to_offset, NULL, bytes);
    const unsigned char *got;
    buffers_send();
    CHECK_EQ(dtrain_device_convert(test_device(), device_in, from, device_out, to, count), DTRAIN_OK);
    CHECK_EQ(dtrain_convert(host_in, from, host_out, to, count), DTRAIN_OK);
    buffers_fetch();
    got = buffer_get(&out);
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != host_out[i]) {
            size_t at = i / width_of(to);
            uint64_t bits = 0;
            memcpy(&bits, host_in + at * width_of(from), width_of(from));
            TEST_FAIL("%s %llx to %s, element %zu of %zu, offsets %zu and %zu: byte %zu is %x, expected %x",
                      dtrain_dtype_name(from), (unsigned long long)bits, dtrain_dtype_name(to), at, count, from_offset,
                      to_offset, i % width_of(to), got[i], host_out[i]);
            return 0;
        }
    return 1;
}

TEST(all_patterns_of_8_and_16_bits)
{
    create(65536 * 8);
    for (int f = 0; f < FORMATS; f++)
        for (int t = 0; t < FORMATS && width_of(formats[f]) < 4; t++) {
            size_t patterns = (size_t)1 << dtrain_dtype_bits(formats[f]);
            for (size_t i = 0; i < patterns; i++)
                memcpy(host_in + i * width_of(formats[f]), &i, width_of(formats[f]));
            convert_same(formats[f], formats[t], patterns, 0, 0);
        }
    destroy();
}

/* Every sign and exponent of float32 with the fractions around each place where a narrower format rounds. */
static size_t edges(uint32_t *to)
{
    size_t count = 0;
    for (uint32_t top = 0; top < 512; top++)
        for (uint32_t bit = 0; bit < 24; bit++)
            for (uint32_t near = 0; near < 6; near++) {
                uint32_t half = bit == 23 ? 0 : (uint32_t)1 << bit, odd = near < 3 ? 0 : half << 1;
                to[count++] = top << 23 | ((odd + half + near % 3 - 1) & 0x7fffffu);
            }
    return count;
}

TEST(float32_at_the_edges_and_by_sampling)
{
    size_t count;
    create(512 * 24 * 6 * 8);
    count = edges((uint32_t *)host_in);
    for (int t = 0; t < FORMATS; t++)
        convert_same(DTRAIN_F32, formats[t], count, 0, 0);
    for (uint32_t i = 0; i < count; i++) { /* an odd stride comes to every pattern, if it goes on */
        uint32_t bits = i * 58237u * 997u;
        memcpy(host_in + (size_t)i * 4, &bits, 4);
    }
    for (int t = 0; t < FORMATS; t++)
        convert_same(DTRAIN_F32, formats[t], count, 0, 0);
    destroy();
}

TEST(every_float32_where_asked)
{
    const size_t chunk = (size_t)1 << 22;
    int same = 1;
    if (getenv("CUDA_EVERY_F32") == NULL) {
        printf("skipped: CUDA_EVERY_F32=1 converts all 2^32 float32\n");
        return;
    }
    create(chunk * 4);
    for (uint64_t from = 0; from < (uint64_t)1 << 32 && same; from += chunk) {
        for (size_t i = 0; i < chunk; i++) {
            uint32_t bits = (uint32_t)(from + i);
            memcpy(host_in + i * 4, &bits, 4);
        }
        same = convert_same(DTRAIN_F32, DTRAIN_BF16, chunk, 0, 0) && convert_same(DTRAIN_F32, DTRAIN_F16, chunk, 0, 0);
    }
    destroy();
}

/* What a float64 rounds to in a narrower format depends on every one of its bits. */
TEST(float64_near_ties)
{
    size_t count = 0;
    create(8 * 40000);
    for (int f = 0; f < FORMATS; f++)
        for (uint64_t seed = 0; seed < 6000; seed++) {
            uint64_t bits = value_bits(formats[f], seed), wide;
            memcpy(host_in, &bits, width_of(formats[f]));
            CHECK_EQ(dtrain_convert(host_in, formats[f], &wide, DTRAIN_F64, 1), DTRAIN_OK);
            bits = mix(seed);
            wide ^= bits % 3 == 0 ? 1 : bits % 3 == 1 ? (uint64_t)1 << (bits >> 8) % 52 : 0;
            memcpy(host_out + 8 * count++, &wide, 8);
        }
    memcpy(host_in, host_out, 8 * count);
    for (int t = 0; t < FORMATS; t++)
        convert_same(DTRAIN_F64, formats[t], count, 0, 0);
    destroy();
}

TEST(conversions_of_every_count_to_1000)
{
    create(8 * 1000);
    for (size_t count = 0; count <= 1000; count++)
        for (int f = 0; f < FORMATS; f++)
            for (int t = 0; t < FORMATS; t++) {
                if (f > 2 && count % 16 != (size_t)t) /* those that share one loop */
                    continue;
                fill_values(formats[f], count, host_in, count);
                convert_same(formats[f], formats[t], count, count % 16, (count * 5 + count / 16) % 16);
            }
    destroy();
}

TEST(conversions_at_every_alignment)
{
    create(8 * 200);
    for (int f = 0; f < FORMATS; f++)
        for (int t = 0; t < FORMATS; t++)
            for (size_t offset = 0; offset < 256; offset++) {
                fill_values(formats[f], offset, host_in, 200);
                convert_same(formats[f], formats[t], 200 - offset / 16, offset % 16, offset / 16);
            }
    destroy();
}

TEST(conversions_of_large_counts)
{
    create((size_t)8 * LARGE);
    for (int f = 0; f < 3; f++)
        for (int t = 0; t < 3; t++) {
            fill_values(formats[f], 9, host_in, LARGE);
            convert_same(formats[f], formats[t], LARGE, 0, 0);
            convert_same(formats[f], formats[t], LARGE - 1, 4, 0);
        }
    destroy();
}

/* ---- scale and axpy ---- */

static const double factors[] = {0.1, -3, 1, 0, 0x1p-130, 1e300, 1.0 + 0x1p-40, 0x1p-20};

/* y = factor * y, or, where x_offset is not negative, y + factor * x. */
static void axpy_same(dtrain_dtype dtype, double factor, size_t count, size_t y_offset, int x_offset)
{
    size_t bytes = count * width_of(dtype);
    void *device_y, *device_x = NULL;
    char what[96];
    snprintf(what, sizeof what, "factor %g, offsets %zu and %d", factor, y_offset, x_offset);
    fill_values(dtype, count + 1, host_in, count);
    fill_values(dtype, count + 2, host_out, count);
    device_y = buffer_put(&out, y_offset, host_out, bytes);
    if (x_offset >= 0)
        device_x = buffer_put(&in, (size_t)x_offset, host_in, bytes);
    buffers_send();
    if (x_offset < 0) {
        CHECK_EQ(dtrain_device_scale(test_device(), dtype, device_y, factor, count), DTRAIN_OK);
        CHECK_EQ(dtrain_device_scale(NULL, dtype, host_out, factor, count), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_device_axpy(test_device(), dtype, device_y, factor, device_x, count), DTRAIN_OK);
        CHECK_EQ(dtrain_device_axpy(NULL, dtype, host_out, factor, host_in, count), DTRAIN_OK);
    }
    buffers_fetch();
    if (x_offset >= 0)
        same_values("x after axpy", dtype, buffer_get(&in), host_in, count);
    same_values(what, dtype, buffer_get(&out), host_out, count);
}

TEST(scale_and_axpy_of_every_count_to_1000)
{
    create(8 * 1000);
    for (size_t count = 0; count <= 1000; count++)
        for (int d = 0; d < FLOATS; d++) {
            axpy_same(formats[d], factors[count % 8], count, count % 16, -1);
            axpy_same(formats[d], factors[count % 8], count, count / 3 % 16, (int)(count / 3 % 16 + count % 2));
        }
    destroy();
}

TEST(scale_and_axpy_at_every_alignment)
{
    create(8 * 200);
    for (int d = 0; d < FLOATS; d++)
        for (size_t offset = 0; offset < 256; offset++) {
            axpy_same(formats[d], 0.3, 190, offset % 16, (int)offset / 16);
            axpy_same(formats[d], 0.3, 190, offset % 16, -1);
        }
    destroy();
}

TEST(scale_and_axpy_of_large_counts)
{
    create((size_t)8 * LARGE);
    for (int d = 0; d < FLOATS; d++)
        for (int f = 0; f < 8; f++) {
            axpy_same(formats[d], factors[f], LARGE, 0, f % 2 ? 0 : -1);
            axpy_same(formats[d], factors[f], LARGE - 3, 8, f % 2 ? 0 : 8);
        }
    destroy();
}

/* ---- overflow ---- */

/* What *found is after a search of the first `count` elements of host_in, where it was `before`. */
static uint32_t overflow_after(dtrain_dtype dtype, size_t count, size_t offset, uint32_t before)
{
    void *x = buffer_put(&in, offset, host_in, count * width_of(dtype));
    uint32_t *found = (uint32_t *)buffer_put(&out, 0, &before, sizeof before), after;
    buffers_send();
    CHECK_EQ(dtrain_device_overflow(test_device(), dtype, x, count, found), DTRAIN_OK);
    buffers_fetch();
    memcpy(&after, buffer_get(&out), sizeof after);
    return after;
}

/* The largest finite numbers of either sign. */
static void fill_finite(dtrain_dtype dtype, size_t count)
{
    int bits = (int)dtrain_dtype_bits(dtype), f = bits - 1 - exponent_bits(dtype);
    uint64_t largest = ((((uint64_t)1 << exponent_bits(dtype)) - 1) << f) - 1;
    for (size_t i = 0; i < count; i++) {
        uint64_t value = largest | (uint64_t)(i & 1) << (bits - 1);
        memcpy(host_in + i * width_of(dtype), &value, width_of(dtype));
    }
}

TEST(overflow_finds_one_among_finite_wherever_it_is)
{
    create(8 * 1000);
    for (int d = 0; d < FLOATS; d++)
        for (size_t count = 0; count <= 1000; count += count < 70 ? 1 : 31)
            for (size_t at = 0; at <= count; at += count < 70 ? 1 : 13) {
                dtrain_dtype dtype = formats[d];
                int f = (int)dtrain_dtype_bits(dtype) - 1 - exponent_bits(dtype);
                uint64_t bad = (((uint64_t)1 << exponent_bits(dtype)) - 1) << f;
                bad |= at % 3 == 0 ? 0 : at % 3 == 1 ? 1 : (uint64_t)1 << (dtrain_dtype_bits(dtype) - 1);
                fill_finite(dtype, count);
                CHECK_EQ(overflow_after(dtype, count, at % 16, 0), 0);
                CHECK_EQ(overflow_after(dtype, count, at % 16, 7), 7);
                if (at == count)
                    break;
                memcpy(host_in + at * width_of(dtype), &bad, width_of(dtype));
                CHECK_EQ(overflow_after(dtype, count, at * 5 % 16, 0), 1);
                CHECK_EQ(overflow_after(dtype, count, at * 5 % 16, 7), 1);
                CHECK_EQ(overflow_after(dtype, count, at * 5 % 16, 1), 1);
            }
    destroy();
}

TEST(overflow_wherever_in_much)
{
    static const size_t places[] = {LARGE - 1, LARGE - 20, LARGE - 3000, 140000, 5000, 0};
    create((size_t)8 * LARGE);
    for (int d = 0; d < FLOATS; d++) {
        fill_finite(formats[d], LARGE);
        CHECK_EQ(overflow_after(formats[d], LARGE, 0, 0), 0);
        for (int i = 0; i < 6; i++) {
            unsigned char *at = host_in + places[i] * width_of(formats[d]), kept[8];
            memcpy(kept, at, width_of(formats[d]));
            memset(at, 0xff, width_of(formats[d]));
            CHECK_EQ(overflow_after(formats[d], LARGE, 0, 0), 1);
            memcpy(at, kept, width_of(formats[d]));
        }
    }
    destroy();
}
