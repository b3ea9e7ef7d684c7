/* ---- >>quantise ----
 * Fewer bits a number: casts, int8 and fp8 with a scale for each block, one bit. A packed vector is the scales of all
 * blocks, then the codes. A code is one product, rounded once by adding a constant whose last place is that of the
 * code. A scale is computed from integers, or from sums in a fixed order. So all instruction sets give the same bytes.
 */
#ifndef DTRAIN__QUANTISE
#define DTRAIN__QUANTISE
#include "compress.h"
#include "../base/memory.c"
#include "../tensor/dtype.c"
#include "../tensor/isa.c"

#define DTRAIN__QUANTISE_LANES 16
#define DTRAIN__QUANTISE_TINY \
    0x0d800000u /* 2^-100: 448 divided by less may be infinite, so that smaller blocks are multiplied by 2^100 first \
                 */

static DTRAIN__NOINLINE size_t dtrain__quantise_blocks(size_t count, size_t block)
{
    return count / block + (count % block != 0);
}

DTRAIN__EXACT_BEGIN

/* The scale of a block. Its numbers are multiplied by grow, then by inverse. */
typedef struct dtrain__quantise_scale {
    float scale, grow, inverse;
    int bad; /* the block has a NaN or infinity */
} dtrain__quantise_scale;

DTRAIN__INLINE dtrain__quantise_scale dtrain__quantise_scale_of(uint32_t largest, float top)
{
    dtrain__quantise_scale s = {0.0f, 1.0f, 0.0f, 0};
    const uint32_t nan = 0x7fc00000u;
    float value;
    memcpy(&value, &largest, sizeof value);
    if (largest >= 0x7f800000u) {
        memcpy(&s.scale, &nan, sizeof nan);
        s.bad = 1;
    } else if (largest > 0) {
        s.grow = largest < DTRAIN__QUANTISE_TINY ? 1.2676506002282294e30f : 1.0f;
        s.scale = value / top;
        s.inverse = top / (value * s.grow);
    }
    return s;
}

DTRAIN__INLINE uint32_t dtrain__quantise_largest(const dtrain__u32 *bits, size_t count)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t size = bits[i] & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    return largest;
}

DTRAIN__INLINE uint32_t dtrain__quantise_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

DTRAIN__INLINE unsigned char dtrain__quantise_int8(float x)
{
    return (unsigned char)dtrain__quantise_float_bits(x + 12582912.0f); /* 1.5 * 2^23: its last place is 1 */
}

/* x is at most 448. */
DTRAIN__INLINE unsigned char dtrain__quantise_fp8(float x)
{
    uint32_t bits = dtrain__quantise_float_bits(x), size = bits & 0x7fffffffu;
    uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
    float magnitude;
    memcpy(&magnitude, &size, sizeof size);
    uint32_t small = dtrain__quantise_float_bits(magnitude + 24576.0f); /* 1.5 * 2^14: its last place is 2^-9 */
    uint32_t is_small = 0u - (uint32_t)(size < 121u << 23); /* not every compiler vectorises a conditional */
    return (unsigned char)((bits >> 24 & 0x80u) | ((normal ^ ((normal ^ small) & is_small)) & 0x7fu));
}

DTRAIN__INLINE float dtrain__quantise_from_fp8(unsigned char code)
{
    uint32_t size = code & 0x7fu, bits = (size << 20) + (120u << 23);
    uint32_t small = dtrain__quantise_float_bits((float)(int32_t)size * 0.001953125f);
    bits = (bits ^ ((bits ^ small) & (0u - (uint32_t)(size < 8)))) | (uint32_t)(code & 0x80u) << 24;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define DTRAIN__QUANTISE_BYTES(name, top, encode, decode) \
    DTRAIN__INLINE void name##_pack_body(const void *in, size_t count, size_t block, unsigned char *out) \
    { \
        const dtrain__f32 *x = (const dtrain__f32 *)in; \
        unsigned char *codes = out + 4 * dtrain__quantise_blocks(count, block); \
        uint32_t zero = dtrain__isa_zero; \
        for (size_t at = 0; at < count; at += block, out += 4) { \
            size_t n = count - at < block ? count - at : block; \
            dtrain__quantise_scale s = \
                dtrain__quantise_scale_of(dtrain__quantise_largest((const dtrain__u32 *)in + at, n), top); \
            memcpy(out, &s.scale, 4); \
            if (s.bad) \
                memset(codes + at, 0, n); \
            else \
                DTRAIN__INDEPENDENT for (size_t i = 0; i < n; i++) codes[at + i] = encode( \
                    dtrain__isa_rounded_f32(dtrain__isa_rounded_f32(x[at + i] * s.grow, zero) * s.inverse, zero)); \
        } \
    } \
    DTRAIN__KERNEL(name##_pack, (const void *in, size_t count, size_t block, unsigned char *out), \
                   (in, count, block, out)) \
    DTRAIN__INLINE void name##_unpack_body(const unsigned char *in, void *out, size_t count, size_t block) \
    { \
        const unsigned char *codes = in + 4 * dtrain__quantise_blocks(count, block); \
        dtrain__f32 *x = (dtrain__f32 *)out; \
        for (size_t at = 0; at < count; at += block, in += 4) { \
            size_t n = count - at < block ? count - at : block; \
            float scale; \
            memcpy(&scale, in, 4); \
            DTRAIN__INDEPENDENT for (size_t i = 0; i < n; i++) x[at + i] = decode(codes[at + i]) * scale; \
        } \
    } \
    DTRAIN__KERNEL(name##_unpack, (const unsigned char *in, void *out, size_t count, size_t block), \
                   (in, out, count, block))

#define DTRAIN__QUANTISE_FROM_INT8(code) ((float)(int32_t)(int8_t)(code))
DTRAIN__QUANTISE_BYTES(dtrain__quantise_int8, 127.0f, dtrain__quantise_int8, DTRAIN__QUANTISE_FROM_INT8)
DTRAIN__QUANTISE_BYTES(dtrain__quantise_fp8, 448.0f, dtrain__quantise_fp8, dtrain__quantise_from_fp8)

/* The mean of magnitudes times `share`: lane i % 16 adds element i; lanes are added as a tree. */
DTRAIN__INLINE float dtrain__quantise_mean(const dtrain__u32 *bits, size_t count, float share)
{
    float lanes[DTRAIN__QUANTISE_LANES] = {0}, magnitude;
    uint32_t zero = dtrain__isa_zero;
    size_t i = 0;
    for (; i + DTRAIN__QUANTISE_LANES <= count; i += DTRAIN__QUANTISE_LANES)
        for (int k = 0; k < DTRAIN__QUANTISE_LANES; k++) {
            uint32_t size = bits[i + (size_t)k] & 0x7fffffffu;
            memcpy(&magnitude, &size, sizeof size);
            lanes[k] = lanes[k] + dtrain__isa_rounded_f32(magnitude * share, zero);
        }
    for (int k = 0; i < count; i++, k++) {
        uint32_t size = bits[i] & 0x7fffffffu;
        memcpy(&magnitude, &size, sizeof size);
        lanes[k] = lanes[k] + dtrain__isa_rounded_f32(magnitude * share, zero);
    }
    for (int half = DTRAIN__QUANTISE_LANES / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++)
            lanes[k] = lanes[k] + lanes[k + half];
    return lanes[0] / (float)count;
}

/* The mean magnitude. Where the sum of finite ones overflows, it adds them up at 2^-16 of their size. */
DTRAIN__INLINE float dtrain__quantise_sign_scale(const dtrain__u32 *bits, size_t count)
{
    float mean = dtrain__quantise_mean(bits, count, 1.0f);
    const float most = 3.40282347e38f;
    if (mean <= most)
        return mean;
    mean = dtrain__quantise_mean(bits, count, 1.52587890625e-5f);
    if (!(mean <= most))
        return mean;
    return mean < most * 1.52587890625e-5f ? mean * 65536.0f : most;
}

DTRAIN__INLINE void dtrain__quantise_sign_pack_body(const void *in, size_t count, size_t block, unsigned char *out)
{
    const dtrain__u32 *bits = (const dtrain__u32 *)in;
    unsigned char *codes = out + 4 * dtrain__quantise_blocks(count, block);
    for (size_t at = 0; at < count; at += block, out += 4) {
        size_t n = count - at < block ? count - at : block;
        uint32_t scale = dtrain__quantise_float_bits(dtrain__quantise_sign_scale(bits + at, n));
        int bad = (scale & 0x7fffffffu) >= 0x7f800000u;
        scale = bad ? 0x7fc00000u : scale;
        memcpy(out, &scale, 4);
        for (size_t i = 0; i < n; i += 8) {
            uint32_t code = 0;
            if (n - i >= 8)
                for (uint32_t k = 0; k < 8; k++)
                    code |= bits[at + i + k] >> 31 << k;
            else
                for (uint32_t k = 0; i + k < n; k++)
                    code |= bits[at + i + k] >> 31 << k;
            codes[(at + i) / 8] = (unsigned char)(bad ? 0 : code);
        }
    }
}

DTRAIN__INLINE void dtrain__quantise_sign_unpack_body(const unsigned char *in, void *out, size_t count, size_t block)
{
    const unsigned char *codes = in + 4 * dtrain__quantise_blocks(count, block);
    const dtrain__u32x4 zero = {0}, low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    unsigned char *x = (unsigned char *)out;
    for (size_t at = 0; at < count; at += block, in += 4) {
        size_t n = count - at < block ? count - at : block;
        uint32_t scale;
        memcpy(&scale, in, 4);
        for (size_t i = 0; i < n; i += 8) {
            dtrain__u32x4 code = zero + codes[(at + i) / 8], eight[2];
            eight[0] = (dtrain__u32x4)((code & low) == low) << 31 ^ scale;
            eight[1] = (dtrain__u32x4)((code & high) == high) << 31 ^ scale;
            if (n - i >= 8)
                memcpy(x + 4 * (at + i), eight, sizeof eight);
            else
                memcpy(x + 4 * (at + i), eight, 4 * (n - i));
        }
    }
}

DTRAIN__KERNEL(dtrain__quantise_sign_pack, (const void *in, size_t count, size_t block, unsigned char *out),
               (in, count, block, out))
DTRAIN__KERNEL(dtrain__quantise_sign_unpack, (const unsigned char *in, void *out, size_t count, size_t block),
               (in, out, count, block))

DTRAIN__EXACT_END

static size_t dtrain__quantise_cast_bytes(const dtrain_compressor *compressor, size_t count)
{
    (void)compressor;
    return 2 * count;
}

static size_t dtrain__quantise_byte_bytes(const dtrain_compressor *compressor, size_t count)
{
    return 4 * dtrain__quantise_blocks(count, compressor->block) + count;
}

static size_t dtrain__quantise_sign_bytes(const dtrain_compressor *compressor, size_t count)
{
    return 4 * dtrain__quantise_blocks(count, compressor->block) + count / 8 + (count % 8 != 0);
}

/* The functions of a compressor: the kernels in the default floating-point mode. */
#define DTRAIN__QUANTISE_TABLE(name) \
    static void name##_pack_now(const dtrain_compressor *compressor, const float *in, size_t count, void *out) \
    { \
        uint64_t mode = dtrain__fpmode_enter(); \
        name##_pack(in, count, compressor->block, (unsigned char *)out); \
        dtrain__fpmode_restore(mode); \
    } \
    static void name##_unpack_now(const dtrain_compressor *compressor, const void *in, float *out, size_t count) \
    { \
        uint64_t mode = dtrain__fpmode_enter(); \
        name##_unpack((const unsigned char *)in, out, count, compressor->block); \
        dtrain__fpmode_restore(mode); \
    }

DTRAIN__QUANTISE_TABLE(dtrain__quantise_int8)
DTRAIN__QUANTISE_TABLE(dtrain__quantise_fp8)
DTRAIN__QUANTISE_TABLE(dtrain__quantise_sign)

/* A cast has its dtype in block. */
static void dtrain__quantise_cast_pack_now(const dtrain_compressor *compressor, const float *in, size_t count,
                                           void *out)
{
    DTRAIN_IGNORE(dtrain_convert(in, DTRAIN_F32, out, (dtrain_dtype)compressor->block, count));
}

static void dtrain__quantise_cast_unpack_now(const dtrain_compressor *compressor, const void *in, float *out,
                                             size_t count)
{
    DTRAIN_IGNORE(dtrain_convert(in, (dtrain_dtype)compressor->block, out, DTRAIN_F32, count));
}

/* In the order of dtrain_compression. */
static const dtrain_compressor dtrain__quantise_tables[] = {
    {"bf16", NULL, DTRAIN_BF16, dtrain__quantise_cast_bytes, dtrain__quantise_cast_pack_now,
     dtrain__quantise_cast_unpack_now, NULL, NULL},
    {"f16", NULL, DTRAIN_F16, dtrain__quantise_cast_bytes, dtrain__quantise_cast_pack_now,
     dtrain__quantise_cast_unpack_now, NULL, NULL},
    {"int8", NULL, 256, dtrain__quantise_byte_bytes, dtrain__quantise_int8_pack_now, dtrain__quantise_int8_unpack_now,
     NULL, NULL},
    {"fp8", NULL, 256, dtrain__quantise_byte_bytes, dtrain__quantise_fp8_pack_now, dtrain__quantise_fp8_unpack_now,
     NULL, NULL},
    {"sign", NULL, 1024, dtrain__quantise_sign_bytes, dtrain__quantise_sign_pack_now, dtrain__quantise_sign_unpack_now,
     NULL, NULL}};

DTRAIN_API dtrain_compressor dtrain_compressor_of(dtrain_compression kind, size_t block)
{
    dtrain_compressor made;
    memset(&made, 0, sizeof made);
    if (kind >= DTRAIN_COMPRESS_BF16 && kind <= DTRAIN_COMPRESS_SIGN)
        made = dtrain__quantise_tables[kind - DTRAIN_COMPRESS_BF16];
    if (block > 0 && made.bytes != NULL && made.bytes != dtrain__quantise_cast_bytes)
        made.block = block;
    return made;
}

/* Frees what a compressor owns. */
static void dtrain__quantise_destroy(dtrain_compressor *compressor)
{
    if (compressor->destroy != NULL)
        compressor->destroy(compressor->self);
    memset(compressor, 0, sizeof *compressor);
}

/* Checks that a compressor, the library's or the program's, can be used. */
static dtrain_status dtrain__quantise_check_compressor(const dtrain_compressor *compressor, const char *call)
{
    int blocks = compressor->bytes == dtrain__quantise_byte_bytes || compressor->bytes == dtrain__quantise_sign_bytes;
    if (compressor->reduce == NULL &&
        (compressor->bytes == NULL || compressor->pack == NULL || compressor->unpack == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: the compressor %s lacks %s; it needs bytes, pack and unpack, or reduce", call,
                            compressor->name != NULL ? compressor->name : "(no name)",
                            compressor->bytes == NULL  ? "bytes"
                            : compressor->pack == NULL ? "pack"
                                                       : "unpack");
    if (blocks && (compressor->block == 0 || compressor->block % 8 != 0 || compressor->block > 65536))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "%s: a block of %s has %zu elements, expected a multiple of 8 up to 65536", call,
                            compressor->name, compressor->block);
    return DTRAIN_OK;
}

#endif
