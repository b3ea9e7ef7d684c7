/* ---- >>cuda-convert ----
 * Conversions between float dtypes, with the bits of >>dtype. They use its integer arithmetic, and the hardware's where
 * that rounds the same. Between float32 and 16 bits a thread holds several groups. All other pairs go element by
 * element through float64's bits; no training step waits for them. */
#ifndef DTRAIN__CUDA_CONVERT
#define DTRAIN__CUDA_CONVERT
#include "copy.cu"
#include "walk.cu"

#define DTRAIN__CUDA_CONVERT_GROUPS 4 /* groups that a thread loads before it stores the first */

DTRAIN__CUDA_FN uint32_t dtrain__cuda_bf16_of(float x)
{
    uint32_t bits = dtrain__cuda_bits_f32(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

/* Returns the nearest float16; some NaN for a NaN. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_f16_of(float x)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t bits = dtrain__cuda_bits_f32(x), size = bits & 0x7fffffffu, exponent = size >> 23;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
    uint32_t mantissa = (size & 0x7fffffu) | 0x800000u, shift = exponent < 113 ? 126 - exponent : 1, small;
    shift = shift > 31 ? 31 : shift;
    small = (mantissa + ((1u << (shift - 1)) - 1) + (mantissa >> shift & 1)) >> shift;
    normal = normal > 0x7c00u ? 0x7c00u : normal;
    if (size > 0x7f800000u)
        return 0x7fffu;
    return (bits >> 16 & 0x8000u) | (exponent < 113 ? small : normal);
#else
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
#endif
}

/* Returns the float16 in the lowest 16 bits, exactly; some NaN for a NaN. */
DTRAIN__CUDA_FN float dtrain__cuda_of_f16(uint32_t half)
{
#ifdef DTRAIN_CUDA_EMULATE
    uint32_t sign = (half & 0x8000u) << 16, size = half & 0x7fffu, exponent = size >> 10;
    float small = dtrain__cuda_float_of(0x3f000000u | size) - 0.5f;
    if (exponent == 31)
        return dtrain__cuda_float_of(size > 0x7c00u ? 0x7fffffffu : sign | 0x7f800000u);
    return dtrain__cuda_float_of(sign | (exponent == 0 ? dtrain__cuda_bits_f32(small) : (size << 13) + 0x38000000u));
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((uint16_t)half));
    return x;
#endif
}

/* Two floats of 16 bits in one word, the first in the low half. */
DTRAIN__CUDA_FN float dtrain__cuda_low_f16(uint32_t word)
{
    return dtrain__cuda_of_f16(word & 0xffffu);
}

DTRAIN__CUDA_FN float dtrain__cuda_high_f16(uint32_t word)
{
    return dtrain__cuda_of_f16(word >> 16);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_both_f16(float low, float high)
{
    return dtrain__cuda_f16_of(low) | dtrain__cuda_f16_of(high) << 16;
}

DTRAIN__CUDA_FN float dtrain__cuda_low_bf16(uint32_t word)
{
    return dtrain__cuda_float_of(word << 16);
}

DTRAIN__CUDA_FN float dtrain__cuda_high_bf16(uint32_t word)
{
    return dtrain__cuda_float_of(word & 0xffff0000u);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_both_bf16(float low, float high)
{
    return dtrain__cuda_bf16_of(low) | dtrain__cuda_bf16_of(high) << 16;
}

/* A format, with the fields of >>dtype. E4M3 is the one without infinities. */
typedef struct dtrain__cuda_format {
    int exponent, mantissa, finite, bytes;
} dtrain__cuda_format;

typedef struct dtrain__cuda_convert_args {
    const void *in;
    void *out;
    dtrain__cuda_walk walk;
    dtrain__cuda_format from, to;
} dtrain__cuda_convert_args;

/* Converts float32 bits to 16 bits and back; a NaN keeps its sign and payload. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_narrow_bf16_one(uint32_t bits)
{
    return dtrain__cuda_bf16_of(dtrain__cuda_float_of(bits));
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_narrow_f16_one(uint32_t bits)
{
    uint32_t nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : dtrain__cuda_f16_of(dtrain__cuda_float_of(bits));
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_widen_bf16_one(uint32_t half)
{
    return half << 16;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_widen_f16_one(uint32_t half)
{
    uint32_t nan = (half & 0x8000u) << 16 | 0x7fc00000u | (half & 0x3ffu) << 13;
    return (half & 0x7fffu) > 0x7c00u ? nan : dtrain__cuda_bits_f32(dtrain__cuda_of_f16(half));
}

#define DTRAIN__CUDA_NARROW(name) \
    DTRAIN__CUDA_FN dtrain__cuda_vector name##_load(const dtrain__cuda_convert_args *args, size_t element, int whole) \
    { \
        return dtrain__cuda_load(args->in, element, 4, whole); \
    } \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_convert_args *args, size_t element, int whole, \
                                      const dtrain__cuda_vector *held) \
    { \
        uint64_t out = 0; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) out |= (uint64_t)name##_one(held->word[i]) << 16 * i; \
        dtrain__cuda_store_half(args->out, element, whole, out); \
    } \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_convert_args, dtrain__cuda_vector, 4, DTRAIN__CUDA_CONVERT_GROUPS)

#define DTRAIN__CUDA_WIDEN(name) \
    DTRAIN__CUDA_FN uint64_t name##_load(const dtrain__cuda_convert_args *args, size_t element, int whole) \
    { \
        return dtrain__cuda_load_half(args->in, element, whole); \
    } \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_convert_args *args, size_t element, int whole, \
                                      const uint64_t *held) \
    { \
        dtrain__cuda_vector out; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) out.word[i] = \
            name##_one((uint32_t)(*held >> 16 * i) & 0xffffu); \
        dtrain__cuda_store(args->out, element, 4, whole, out); \
    } \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_convert_args, uint64_t, 4, DTRAIN__CUDA_CONVERT_GROUPS)

DTRAIN__CUDA_NARROW(dtrain__cuda_narrow_bf16)
DTRAIN__CUDA_NARROW(dtrain__cuda_narrow_f16)
DTRAIN__CUDA_WIDEN(dtrain__cuda_widen_bf16)
DTRAIN__CUDA_WIDEN(dtrain__cuda_widen_f16)

/* The elements of a group, from the lowest bits up. */
typedef struct dtrain__cuda_group {
    uint64_t low, high;
} dtrain__cuda_group;

static dtrain__cuda_format dtrain__cuda_format_of(dtrain_dtype dtype)
{
    const dtrain__cuda_format f64 = {11, 52, 0, 8}, f32 = {8, 23, 0, 4}, f16 = {5, 10, 0, 2};
    const dtrain__cuda_format bf16 = {8, 7, 0, 2}, e4m3 = {4, 3, 1, 1}, e5m2 = {5, 2, 0, 1};
    switch (dtype) {
    case DTRAIN_F64: return f64;
    case DTRAIN_F32: return f32;
    case DTRAIN_F16: return f16;
    case DTRAIN_BF16: return bf16;
    case DTRAIN_F8_E4M3: return e4m3;
    default: return e5m2;
    }
}

/* Returns the float64 bits of a value of format f. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_widen_generic(uint64_t bits, const dtrain__cuda_format f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    uint64_t sign = (bits >> (f.exponent + f.mantissa)) << 63;
    uint64_t mantissa = bits & (((uint64_t)1 << f.mantissa) - 1);
    int exponent = (int)(bits >> f.mantissa) & top;
    if (f.exponent == 11)
        return bits;
    if (exponent == top && (f.finite ? mantissa == ((uint64_t)1 << f.mantissa) - 1 : mantissa != 0))
        return sign | 0x7ff8000000000000u | mantissa << (52 - f.mantissa);
    if (exponent == top && !f.finite)
        return sign | 0x7ff0000000000000u;
    if (exponent == 0) {
        if (mantissa == 0)
            return sign;
        for (exponent = 1; (mantissa >> f.mantissa) == 0; exponent--)
            mantissa <<= 1;
        mantissa &= ((uint64_t)1 << f.mantissa) - 1;
    }
    return sign | (uint64_t)(exponent - bias + 1023) << 52 | mantissa << (52 - f.mantissa);
}

/* Rounds float64 bits to format f, to the nearest, ties to even. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_narrow_generic(uint64_t bits, const dtrain__cuda_format f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    int exponent = (int)(bits >> 52 & 0x7ff) - 1023 + bias, shift = 52 - f.mantissa;
    uint64_t sign = (bits >> 63) << (f.exponent + f.mantissa), mantissa = bits & 0xfffffffffffffu;
    uint64_t ones = ((uint64_t)1 << f.mantissa) - 1, infinity = (uint64_t)top << f.mantissa, rounded;
    if (f.exponent == 11)
        return bits;
    if ((bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u)
        return sign | infinity | (f.finite ? ones : mantissa >> shift | (uint64_t)1 << (f.mantissa - 1));
    mantissa |= (uint64_t)1 << 52; /* a float64 subnormal rounds to zero in every narrower format anyway */
    if (exponent < 1)
        shift = 1 - exponent < 54 - shift ? shift + 1 - exponent : 54;
    rounded = (mantissa + ((uint64_t)1 << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    if (exponent > 0)
        rounded += (uint64_t)(exponent - 1) << f.mantissa; /* the hidden bit adds the last one; so does a carry */
    if (exponent > top || rounded >= (f.finite ? infinity | ones : infinity))
        rounded = f.finite ? infinity | ones : infinity;
    return sign | rounded;
}

DTRAIN__CUDA_FN dtrain__cuda_group dtrain__cuda_generic_load(const dtrain__cuda_convert_args *args, size_t element,
                                                             int whole)
{
    size_t width = (size_t)args->from.bytes, bytes = whole ? args->walk.lanes * width : width;
    const unsigned char *at = (const unsigned char *)args->in + element * width;
    dtrain__cuda_group group = {0, 0};
    if (bytes == 16) {
        dtrain__cuda_vector v = *(const dtrain__cuda_vector *)at;
        group.low = v.word[0] | (uint64_t)v.word[1] << 32;
        group.high = v.word[2] | (uint64_t)v.word[3] << 32;
    } else {
        group.low = dtrain__cuda_element(at, bytes);
    }
    return group;
}

DTRAIN__CUDA_FN void dtrain__cuda_generic_store(const dtrain__cuda_convert_args *args, size_t element, int whole,
                                                const dtrain__cuda_group *held)
{
    uint32_t from = 8 * (uint32_t)args->from.bytes, to = 8 * (uint32_t)args->to.bytes;
    uint32_t lanes = whole ? (uint32_t)args->walk.lanes : 1;
    unsigned char *at = (unsigned char *)args->out + element * (to / 8);
    dtrain__cuda_group group = {0, 0};
    for (uint32_t i = 0; i < lanes; i++) {
        uint32_t bit = i * from, put = i * to;
        uint64_t bits = (bit < 64 ? held->low >> bit : held->high >> (bit - 64)) & ~(uint64_t)0 >> (64 - from);
        bits = dtrain__cuda_narrow_generic(dtrain__cuda_widen_generic(bits, args->from), args->to);
        if (put < 64)
            group.low |= bits << put;
        else
            group.high |= bits << (put - 64);
    }
    if (lanes * to == 128) {
        dtrain__cuda_vector v = {
            {(uint32_t)group.low, (uint32_t)(group.low >> 32), (uint32_t)group.high, (uint32_t)(group.high >> 32)}};
        *(dtrain__cuda_vector *)at = v;
    } else {
        dtrain__cuda_element_store(at, lanes * to / 8, group.low);
    }
}

DTRAIN__CUDA_WALK_KERNEL(dtrain__cuda_generic, dtrain__cuda_convert_args, dtrain__cuda_group, args->walk.lanes, 1)

static dtrain_status dtrain__cuda_convert(dtrain_device *device, const void *in, dtrain_dtype from, void *out,
                                          dtrain_dtype to, size_t count)
{
    const char *call = "device_convert";
    dtrain__cuda_convert_args args = {in, out, {0, 0, 0, 0}, dtrain__cuda_format_of(from), dtrain__cuda_format_of(to)};
    size_t width = (size_t)args.from.bytes;
    const dtrain__cuda_array arrays[] = {
        {"in", in, width, count, 0}, {"out", out, (size_t)args.to.bytes, count, 0}, {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_walk_arrays(device, call, arrays, &args.walk);
    if (status != DTRAIN_OK)
        return status;
    if (from == to)
        return dtrain__cuda_copy(device, out, in, count * width);
    if (from == DTRAIN_F32 && to == DTRAIN_BF16)
        return dtrain__cuda_narrow_bf16_walk(device, call, &args);
    if (from == DTRAIN_F32 && to == DTRAIN_F16)
        return dtrain__cuda_narrow_f16_walk(device, call, &args);
    if (from == DTRAIN_BF16 && to == DTRAIN_F32)
        return dtrain__cuda_widen_bf16_walk(device, call, &args);
    if (from == DTRAIN_F16 && to == DTRAIN_F32)
        return dtrain__cuda_widen_f16_walk(device, call, &args);
    return dtrain__cuda_generic_walk(device, call, &args);
}

#endif
