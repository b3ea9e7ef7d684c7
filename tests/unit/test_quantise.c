/* ---- >>test_quantise ----
 * Packed numbers against hand-written bytes, against conversions made another way, and against the bounds that the
 * formats promise; one result on every instruction set. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include <math.h>

enum { N = 5000 };
static float data[N + 4], back[N + 4], other[N + 4];
static unsigned char packed[8 * N], again[8 * N];

/* Numbers of both signs over many powers of two; small: below 2^-100, subnormals among them. */
static void fill(size_t n, uint64_t seed, int small)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = dtrain_random_u64(seed, i);
        data[i] = dtrain_random_normal(seed, i) * (float)(1 << (bits & 7));
        if (small)
            data[i] = from_bits((uint32_t)bits % (0x0d800000u - 1) | ((uint32_t)(bits >> 33) & 0x80000000u));
    }
}

static float largest(const float *x, size_t n)
{
    float most = 0;
    for (size_t i = 0; i < n; i++)
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

static float scale_at(size_t block)
{
    float scale;
    memcpy(&scale, packed + 4 * block, 4);
    return scale;
}

TEST(int8_is_the_nearest_multiple_of_the_scale)
{
    for (size_t block = 8; block <= 1024; block *= 4)
        for (size_t n = 1; n < N; n = n * 2 + 3)
            for (int small = 0; small < 2; small++) {
                dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, block);
                size_t blocks = (n + block - 1) / block, wrong = 0;
                fill(n, n + block, small);
                CHECK_EQ(c.bytes(&c, n), 4 * blocks + n);
                c.pack(&c, data, n, packed);
                c.unpack(&c, packed, back, n);
                for (size_t i = 0; i < n; i++) {
                    size_t b = i / block, in = n - b * block < block ? n - b * block : block;
                    float most = largest(data + b * block, in);
                    double code = (double)(signed char)packed[4 * blocks + i];
                    wrong += scale_at(b) != most / 127.0f;
                    wrong += fabs(code - (double)data[i] * 127.0 / (double)most) > 0.50001;
                    wrong += back[i] != (float)code * scale_at(b);
                }
                CHECK_EQ(wrong, 0);
            }
}

TEST(int8_bytes_are_as_documented)
{
    const float in[] = {127.0f, -63.5f, 0.5f, 1.5f, -2.4f, 0.0f, -127.0f, 2.6f, 12.0f};
    unsigned char expected[] = {0,   0,    0x80, 0x3f, 0x06, 0x83, 0xc1, 0x3d, /* 1, and 12 / 127 = 0x3dc18306 */
                                127, 0xc0, 0,    2,    0xfe, 0,    0x81, 3,
                                127}; /* halves to even: -64, 0, 2 */
    dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 8);
    little_endian(expected, 2, 4);
    CHECK_EQ(c.bytes(&c, 9), sizeof expected);
    c.pack(&c, in, 9, packed);
    CHECK(memcmp(packed, expected, sizeof expected) == 0);
    c = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);
    CHECK_EQ(c.bytes(&c, 257), 8 + 257);
    CHECK_EQ(c.bytes(&c, 0), 0);
}

TEST(fp8_codes_are_those_of_a_conversion)
{
    for (size_t n = 1; n < N; n = n * 2 + 3)
        for (int small = 0; small < 2; small++) {
            dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 64);
            size_t blocks = (n + 63) / 64;
            fill(n, n, small);
            for (size_t i = 0; i < n && i % 64 < 8; i += 9)
                data[i] *= 1e-3f; /* some become subnormal codes */
            c.pack(&c, data, n, packed);
            for (size_t i = 0; i < n; i++) {
                size_t b = i / 64, in = n - b * 64 < 64 ? n - b * 64 : 64;
                float most = largest(data + b * 64, in), grow = small ? 0x1p100f : 1.0f;
                other[i] = data[i] * grow * (448.0f / (most * grow));
            }
            CHECK_EQ(dtrain_convert(other, DTRAIN_F32, again, DTRAIN_F8_E4M3, n), DTRAIN_OK);
            CHECK(memcmp(packed + 4 * blocks, again, n) == 0);
        }
}

TEST(every_fp8_code_unpacks_to_its_number)
{
    dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 256);
    unsigned char codes[4 + 256] = {0, 0, 0x80, 0x3f};
    size_t wrong = 0;
    little_endian(codes, 1, 4);
    for (int i = 0; i < 256; i++)
        codes[4 + i] = (unsigned char)i;
    c.unpack(&c, codes, back, 256);
    CHECK_EQ(dtrain_convert(codes + 4, DTRAIN_F8_E4M3, other, DTRAIN_F32, 256), DTRAIN_OK);
    for (int i = 0; i < 256; i++)
        wrong += (i & 127) != 127 && memcmp(&back[i], &other[i], 4) != 0;
    CHECK_EQ(wrong, 0);
    CHECK(back[0x7e] == 448.0f && back[1] == 0x1p-9f && back[0x81] == -0x1p-9f);
}

TEST(signs_carry_the_mean_magnitude)
{
    const float in[] = {1.0f, -2.0f, 3.0f, -0.0f, 5.0f, -6.0f, 7.0f, 8.0f, -4.0f, 2.0f};
    unsigned char expected[] = {0, 0, 0x80, 0x40, 0, 0, 0x40, 0x40, 0x2a, 0x01}; /* 32 / 8 = 4 and 6 / 2 = 3 */
    dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 8);
    little_endian(expected, 2, 4);
    CHECK_EQ(c.bytes(&c, 10), sizeof expected);
    c.pack(&c, in, 10, packed);
    CHECK(memcmp(packed, expected, sizeof expected) == 0);
    c.unpack(&c, packed, back, 10);
    CHECK(back[0] == 4 && back[1] == -4 && back[3] == -4 && back[7] == 4 && back[8] == -3 && back[9] == 3);
    c = dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 0);
    for (size_t n = 1; n < N; n = n * 2 + 3) {
        double sum = 0;
        size_t first = n < 1024 ? n : 1024;
        fill(n, n, 0);
        c.pack(&c, data, n, packed);
        for (size_t i = 0; i < first; i++)
            sum += fabs((double)data[i]);
        CHECK(fabs((double)scale_at(0) - sum / (double)first) <= 1e-6 * sum / (double)first);
    }
}

TEST(casts_are_conversions)
{
    const dtrain_dtype dtypes[] = {DTRAIN_BF16, DTRAIN_F16};
    for (int d = 0; d < 2; d++) {
        dtrain_compressor c = dtrain_compressor_of(d == 0 ? DTRAIN_COMPRESS_BF16 : DTRAIN_COMPRESS_F16, 0);
        fill(N, 5, 0);
        CHECK_EQ(c.bytes(&c, N), 2 * N);
        c.pack(&c, data, N, packed);
        CHECK_EQ(dtrain_convert(data, DTRAIN_F32, again, dtypes[d], N), DTRAIN_OK);
        CHECK(memcmp(packed, again, 2 * N) == 0);
        c.unpack(&c, packed, back, N);
        CHECK_EQ(dtrain_convert(again, dtypes[d], other, DTRAIN_F32, N), DTRAIN_OK);
        CHECK(memcmp(back, other, N * sizeof(float)) == 0);
        dtrain__quantise_destroy(&c);
        CHECK(c.pack == NULL);
    }
}

/* A NaN or infinity shows in its whole block and in no other; zeros stay zeros. */
TEST(bad_numbers_are_not_hidden)
{
    const dtrain_compressor all[] = {dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 64), dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 64), dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 64)};
    const uint32_t bad[] = {0x7fc00000u, 0xff800001u, 0x7f800000u, 0xff800000u};
    for (int k = 0; k < 3; k++)
        for (int b = 0; b < 4; b++) {
            size_t nans = 0, zeros = 0;
            fill(256, 3, 0);
            data[70] = from_bits(bad[b]);
            for (size_t i = 128; i < 192; i++)
                data[i] = 0.0f;
            all[k].pack(&all[k], data, 256, packed);
            all[k].unpack(&all[k], packed, back, 256);
            for (size_t i = 0; i < 256; i++) {
                uint32_t bits;
                memcpy(&bits, &back[i], 4);
                nans += (bits & 0x7fffffffu) > 0x7f800000u && i >= 64 && i < 128;
                nans += (size_t)((bits & 0x7fffffffu) > 0x7f800000u && (i < 64 || i >= 128)) * 1000;
                zeros += i >= 128 && i < 192 && back[i] == 0.0f;
            }
            CHECK_EQ(nans, 64);
            CHECK_EQ(zeros, 64);
        }
}

TEST(no_length_writes_beyond_its_bytes)
{
    const dtrain_compressor all[] = {dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 16), dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 16), dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 16),
                                     dtrain_compressor_of(DTRAIN_COMPRESS_F16, 0)};
    fill(200, 8, 0);
    for (int k = 0; k < 4; k++)
        for (size_t n = 0; n < 200; n++) {
            size_t bytes = all[k].bytes(&all[k], n);
            memset(packed, 0xa5, sizeof packed);
            all[k].pack(&all[k], data, n, packed + 1);
            CHECK(packed[0] == 0xa5 && packed[1 + bytes] == 0xa5);
            back[n] = 77.0f;
            all[k].unpack(&all[k], packed + 1, back, n);
            CHECK(back[n] == 77.0f);
            all[k].pack(&all[k], back, n, again); /* what has been rounded stays as it is */
            all[k].unpack(&all[k], again, other, n);
            size_t apart = 0;
            for (size_t i = 0; i < n; i++)
                apart += fabsf(other[i] - back[i]) > 1e-6f * fabsf(back[i]);
            CHECK_EQ(apart, 0);
        }
}

#if defined(__x86_64__)
typedef void (*pack_kernel)(const void *in, size_t count, size_t block, unsigned char *out);
typedef void (*unpack_kernel)(const unsigned char *in, void *out, size_t count, size_t block);

TEST(every_instruction_set_packs_the_same)
{
    static const pack_kernel packs[3][3] = {
        {dtrain__quantise_int8_pack_base, dtrain__quantise_int8_pack_avx2, dtrain__quantise_int8_pack_avx512},
        {dtrain__quantise_fp8_pack_base, dtrain__quantise_fp8_pack_avx2, dtrain__quantise_fp8_pack_avx512},
        {dtrain__quantise_sign_pack_base, dtrain__quantise_sign_pack_avx2, dtrain__quantise_sign_pack_avx512}};
    static const unpack_kernel unpacks[3][3] = {
        {dtrain__quantise_int8_unpack_base, dtrain__quantise_int8_unpack_avx2, dtrain__quantise_int8_unpack_avx512},
        {dtrain__quantise_fp8_unpack_base, dtrain__quantise_fp8_unpack_avx2, dtrain__quantise_fp8_unpack_avx512},
        {dtrain__quantise_sign_unpack_base, dtrain__quantise_sign_unpack_avx2, dtrain__quantise_sign_unpack_avx512}};
    int sets = dtrain__isa_widest() == DTRAIN__ISA_AVX512 ? 3 : dtrain__isa_widest() == DTRAIN__ISA_AVX2 ? 2 : 1;
    for (int kind = 0; kind < 3; kind++)
        for (int set = 1; set < sets; set++)
            for (size_t n = 0; n < N; n = n * 3 / 2 + 1)
                for (int small = 0; small < 2; small++) {
                    fill(n, n, small);
                    memset(packed, 0, sizeof packed);
                    memset(again, 0, sizeof again);
                    packs[kind][0](data, n, 256, packed);
                    packs[kind][set](data, n, 256, again);
                    CHECK(memcmp(packed, again, sizeof packed) == 0);
                    unpacks[kind][0](packed, back, n, 256);
                    unpacks[kind][set](packed, other, n, 256);
                    CHECK(memcmp(back, other, n * sizeof(float)) == 0);
                }
}
#endif

TEST(tables_that_cannot_be_are_refused)
{
    dtrain_compressor c = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 12);
    CHECK_EQ(dtrain__quantise_check_compressor(&c, "test"), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "a block of int8 has 12 elements, expected a multiple of 8 up to 65536");
    c = dtrain_compressor_of(DTRAIN_COMPRESS_POWERSGD, 0);
    CHECK_EQ(dtrain__quantise_check_compressor(&c, "test"), DTRAIN_ERR_INVALID);
    c = dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 65536);
    CHECK_EQ(dtrain__quantise_check_compressor(&c, "test"), DTRAIN_OK);
}
