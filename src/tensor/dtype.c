/* ---- >>dtype ----
 * Names and widths of element types; conversions; the one rule that splits counts into parts; and dtrain_tensor. The
 * shape of a tensor is checked when it is made, so later arithmetic on it cannot overflow.
 *
 * Float64 holds every value of every convertible type. So any pair converts by widening to the bits of float64 and
 * rounding once. The pairs that training uses have loops of their own. Nearly all of it is integer arithmetic, which no
 * compiler flag or floating-point mode changes. */
#ifndef DTRAIN__DTYPE
#define DTRAIN__DTYPE
#include "tensor.h"
#include "../base/memory.c"
#include "isa.c"

/* An element type. Convertible ones are binary floating-point formats: a sign, exponent bits and mantissa bits. */
typedef struct dtrain__dtype_row {
    const char *name;
    int bits, exponent, mantissa; /* exponent 0: not convertible */
    int finite;                   /* 1: as E4M3, without infinity; the all-ones exponent has one NaN, else numbers */
} dtrain__dtype_row;

static const dtrain__dtype_row dtrain__dtype_rows[] = {
    {"?", 0, 0, 0, 0},       {"BOOL", 8, 0, 0, 0},    {"F4", 4, 0, 0, 0},          {"F6_E2M3", 6, 0, 0, 0},
    {"F6_E3M2", 6, 0, 0, 0}, {"U8", 8, 0, 0, 0},      {"I8", 8, 0, 0, 0},          {"F8_E5M2", 8, 5, 2, 0},
    {"F8_E4M3", 8, 4, 3, 1}, {"F8_E8M0", 8, 0, 0, 0}, {"F8_E4M3FNUZ", 8, 0, 0, 0}, {"F8_E5M2FNUZ", 8, 0, 0, 0},
    {"I16", 16, 0, 0, 0},    {"U16", 16, 0, 0, 0},    {"F16", 16, 5, 10, 0},       {"BF16", 16, 8, 7, 0},
    {"I32", 32, 0, 0, 0},    {"U32", 32, 0, 0, 0},    {"F32", 32, 8, 23, 0},       {"C64", 64, 0, 0, 0},
    {"F64", 64, 11, 52, 0},  {"I64", 64, 0, 0, 0},    {"U64", 64, 0, 0, 0}};

static const dtrain__dtype_row *dtrain__dtype_find(dtrain_dtype dtype)
{
    size_t index = (size_t)(int)dtype;
    return &dtrain__dtype_rows[index < sizeof dtrain__dtype_rows / sizeof dtrain__dtype_rows[0] ? index : 0];
}

/* Bytes of an element, of a dtype that has whole bytes. */
DTRAIN__INLINE size_t dtrain__dtype_width(dtrain_dtype dtype)
{
    return (unsigned)dtrain__dtype_find(dtype)->bits / 8;
}

DTRAIN_API DTRAIN__NOINLINE unsigned dtrain_dtype_bits(dtrain_dtype dtype)
{
    return (unsigned)dtrain__dtype_find(dtype)->bits;
}

DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype)
{
    return dtrain__dtype_find(dtype)->name;
}

DTRAIN_API dtrain_status dtrain_dtype_from_name(dtrain_dtype *dtype, const char *name, size_t length)
{
    for (int i = 1; name != NULL && length > 0 && i <= (int)DTRAIN_U64; i++) {
        const char *own = dtrain__dtype_rows[i].name;
        if (own[0] == name[0] && strlen(own) == length && memcmp(own, name, length) == 0) {
            *dtype = (dtrain_dtype)i;
            return DTRAIN_OK;
        }
    }
    return dtrain__fail(
        NULL, DTRAIN_ERR_INVALID,
        "dtype_from_name: no dtype has the name \"%.*s\", expected one of safetensors: \"F32\", \"BF16\", \"I64\" ...",
        name != NULL && length < 64 ? (int)length : 0, name != NULL ? name : "");
}

/* Splits count elements into parts; the first ones hold one more: see dtrain_shard. Returns 0 for a bad part. */
static DTRAIN__NOINLINE size_t dtrain__split(size_t count, int parts, int part, size_t *begin)
{
    if (begin != NULL)
        *begin = 0;
    if (parts < 1 || part < 0 || part >= parts)
        return 0;
    size_t p = (size_t)part, each = count / (size_t)parts, longer = count % (size_t)parts;
    if (begin != NULL)
        *begin = p * each + (p < longer ? p : longer);
    return each + (p < longer ? 1 : 0);
}

/* Returns whether both dtypes are convertible. */
static int dtrain__dtype_converts(dtrain_dtype from, dtrain_dtype to)
{
    return dtrain__dtype_find(from)->exponent > 0 && dtrain__dtype_find(to)->exponent > 0;
}

/* Returns the float64 bits of a value of format f. */
static uint64_t dtrain__dtype_widen(uint64_t bits, dtrain__dtype_row f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    uint64_t sign = (bits >> (f.exponent + f.mantissa)) << 63;
    uint64_t mantissa = bits & (((uint64_t)1 << f.mantissa) - 1);
    int exponent = (int)(bits >> f.mantissa) & top;
    int nan = exponent == top && (f.finite ? mantissa == ((uint64_t)1 << f.mantissa) - 1 : mantissa != 0);
    if (f.exponent == 11)
        return bits;
    if (nan)
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
static uint64_t dtrain__dtype_narrow(uint64_t bits, dtrain__dtype_row f)
{
    int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    int exponent = (int)(bits >> 52 & 0x7ff) - 1023 + bias, shift = 52 - f.mantissa;
    uint64_t sign = (bits >> 63) << (f.exponent + f.mantissa), mantissa = bits & 0xfffffffffffffu;
    uint64_t ones = ((uint64_t)1 << f.mantissa) - 1, infinity = (uint64_t)top << f.mantissa, rounded;
    if (f.exponent == 11)
        return bits;
    if ((bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u)
        return sign | infinity | (f.finite ? ones : mantissa >> shift | (uint64_t)1 << (f.mantissa - 1));
    mantissa |= (uint64_t)1 << 52; /* wrong for float64 subnormals, but they round to zero in all narrower formats */
    if (exponent < 1)
        shift = 1 - exponent < 54 - shift ? shift + 1 - exponent : 54;
    rounded = (mantissa + ((uint64_t)1 << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    if (exponent > 0)
        rounded += (uint64_t)(exponent - 1) << f.mantissa; /* the hidden bit adds the missing 1; a carry adds another */
    if (exponent > top || rounded >= (f.finite ? infinity | ones : infinity))
        rounded = f.finite ? infinity | ones : infinity;
    return sign | rounded;
}

static uint64_t dtrain__dtype_load(const unsigned char *from, int bytes)
{
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64 = 0;
    switch (bytes) {
    case 1: memcpy(&u8, from, 1); return u8;
    case 2: memcpy(&u16, from, 2); return u16;
    case 4: memcpy(&u32, from, 4); return u32;
    default: memcpy(&u64, from, 8); return u64;
    }
}

static void dtrain__dtype_store(unsigned char *to, uint64_t bits, int bytes)
{
    uint8_t u8 = (uint8_t)bits;
    uint16_t u16 = (uint16_t)bits;
    uint32_t u32 = (uint32_t)bits;
    switch (bytes) {
    case 1: memcpy(to, &u8, 1); break;
    case 2: memcpy(to, &u16, 2); break;
    case 4: memcpy(to, &u32, 4); break;
    default: memcpy(to, &bits, 8);
    }
}

DTRAIN__EXACT_BEGIN

DTRAIN__INLINE uint16_t dtrain__dtype_f32_to_bf16(uint32_t x)
{
    uint32_t rounded = (x + 0x7fffu + (x >> 16 & 1)) >> 16, nan = x >> 16 | 0x40;
    return (uint16_t)((x & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

DTRAIN__INLINE uint16_t dtrain__dtype_f32_to_f16(uint32_t x)
{
    uint32_t sign = x >> 16 & 0x8000u, size = x & 0x7fffffffu, exponent = size >> 23;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
    uint32_t mantissa = (size & 0x7fffffu) | 0x800000u, shift = exponent < 113 ? 126 - exponent : 1;
    shift = shift > 31 ? 31 : shift;
    uint32_t small = (mantissa + ((1u << (shift - 1)) - 1) + (mantissa >> shift & 1)) >> shift;
    uint32_t nan = 0x7e00u | (size >> 13 & 0x3ffu);
    normal = normal > 0x7c00u ? 0x7c00u : normal;
    uint32_t value = exponent < 113 ? small : normal;
    return (uint16_t)(sign | (size > 0x7f800000u ? nan : value));
}

DTRAIN__INLINE uint32_t dtrain__dtype_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, size = x & 0x7fffu, exponent = size >> 10;
    uint32_t normal = (size << 13) + 0x38000000u, special = (size << 13) + 0x70000000u;
    /* a subnormal is a multiple of 2^-24: put its bits into the mantissa of 0.5, then subtract 0.5 */
    float small, half = 0.5f;
    uint32_t bits = 0x3f000000u | size;
    memcpy(&small, &bits, 4);
    small -= half;
    memcpy(&bits, &small, 4);
    return sign | (exponent == 0 ? bits : exponent == 31 ? special | (size > 0x7c00u ? 0x400000u : 0) : normal);
}

/* to[i] = expression of from[i]; the buffers do not overlap. */
#define DTRAIN__DTYPE_CONVERT(name, input, output, expression) \
    DTRAIN__LOOP(name, (const void *in, void *out, size_t count), (in, out, count), \
                 const input *from = (const input *)in; \
                 output *to = (output *)out, to[i] = expression)

DTRAIN__DTYPE_CONVERT(dtrain__dtype_narrow_bf16, dtrain__u32, dtrain__u16, dtrain__dtype_f32_to_bf16(from[i]))
DTRAIN__DTYPE_CONVERT(dtrain__dtype_widen_bf16, dtrain__u16, dtrain__u32, (uint32_t)from[i] << 16)
DTRAIN__DTYPE_CONVERT(dtrain__dtype_narrow_f16, dtrain__u32, dtrain__u16, dtrain__dtype_f32_to_f16(from[i]))
DTRAIN__DTYPE_CONVERT(dtrain__dtype_widen_f16, dtrain__u16, dtrain__u32, dtrain__dtype_f16_to_f32(from[i]))

#if defined(DTRAIN__NEON)
DTRAIN__INLINE float32x4_t dtrain__dtype_four(const unsigned char *from)
{
    return vreinterpretq_f32_u8(vld1q_u8(from));
}

DTRAIN__INLINE void dtrain__dtype_narrow_f16_eight(const unsigned char *from, unsigned char *to)
{
    float16x4_t low = vcvt_f16_f32(dtrain__dtype_four(from));
    vst1q_u8(to, vreinterpretq_u8_f16(vcvt_high_f16_f32(low, dtrain__dtype_four(from + 16))));
}

DTRAIN__INLINE void dtrain__dtype_widen_f16_eight(const unsigned char *from, unsigned char *to)
{
    float16x8_t x = vreinterpretq_f16_u8(vld1q_u8(from));
    vst1q_u8(to, vreinterpretq_u8_f32(vcvt_f32_f16(vget_low_f16(x))));
    vst1q_u8(to + 16, vreinterpretq_u8_f32(vcvt_high_f32_f16(x)));
}

/* The numbers are bfcvtn v0.4h, v0.4s and bfcvtn2 v0.8h, v1.4s, which older assemblers do not know. */
DTRAIN__INLINE void dtrain__dtype_narrow_bf16_eight(const unsigned char *from, unsigned char *to)
{
    register float32x4_t low __asm__("v0") = dtrain__dtype_four(from),
                             high __asm__("v1") = dtrain__dtype_four(from + 16);
    __asm__(".inst 0x0ea16800\n\t.inst 0x4ea16820" : "+w"(low) : "w"(high));
    vst1q_u8(to, vreinterpretq_u8_f32(low));
}

/* Converts eight at a time by instructions of the processor, which give the same bits; the rest by name. */
#define DTRAIN__DTYPE_EIGHTS(name, isa, from_bytes, to_bytes) \
    static void name##_eights(const void *in, void *out, size_t count) \
    { \
        const unsigned char *from = (const unsigned char *)in; \
        unsigned char *to = (unsigned char *)out; \
        size_t i = 0, end = dtrain__isa() >= isa ? count - count % 8 : 0; \
        for (; i < end; i += 8) \
            name##_eight(from + i * from_bytes, to + i * to_bytes); \
        name(from + i * from_bytes, to + i * to_bytes, count - i); \
    }
DTRAIN__DTYPE_EIGHTS(dtrain__dtype_narrow_f16, DTRAIN__ISA_NEON, 4, 2)
DTRAIN__DTYPE_EIGHTS(dtrain__dtype_widen_f16, DTRAIN__ISA_NEON, 2, 4)
DTRAIN__DTYPE_EIGHTS(dtrain__dtype_narrow_bf16, DTRAIN__ISA_NEON_BF16, 4, 2)
#define DTRAIN__DTYPE_BEST(name) name##_eights
#else
#define DTRAIN__DTYPE_BEST(name) name
#endif

DTRAIN__EXACT_END

/* Converts by way of float64. A magnitude above `largest`, infinity too, becomes that; NaN stays. */
static void dtrain__dtype_convert_any(const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count,
                                      uint64_t largest)
{
    const dtrain__dtype_row f = *dtrain__dtype_find(from), t = *dtrain__dtype_find(to);
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = dtrain__dtype_load((const unsigned char *)in + i * (size_t)f.bits / 8, f.bits / 8);
        uint64_t wide = dtrain__dtype_widen(bits, f), size = wide & 0x7fffffffffffffffu;
        if (size > largest && size <= 0x7ff0000000000000u)
            wide += largest - size;
        dtrain__dtype_store((unsigned char *)out + i * (size_t)t.bits / 8, dtrain__dtype_narrow(wide, t), t.bits / 8);
    }
}

/* Converts. The caller has set the floating-point mode and checked the dtypes. */
static void dtrain__dtype_convert(const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count)
{
    if (count == 0)
        return;
    if (from == to) {
        memcpy(out, in, count * (dtrain_dtype_bits(from) / 8));
    } else if (from == DTRAIN_F32 && to == DTRAIN_BF16) {
        DTRAIN__DTYPE_BEST(dtrain__dtype_narrow_bf16)(in, out, count);
    } else if (from == DTRAIN_F32 && to == DTRAIN_F16) {
        DTRAIN__DTYPE_BEST(dtrain__dtype_narrow_f16)(in, out, count);
    } else if (from == DTRAIN_BF16 && to == DTRAIN_F32) {
        dtrain__dtype_widen_bf16(in, out, count);
    } else if (from == DTRAIN_F16 && to == DTRAIN_F32) {
        DTRAIN__DTYPE_BEST(dtrain__dtype_widen_f16)(in, out, count);
    } else {
        dtrain__dtype_convert_any(in, from, out, to, count, UINT64_MAX);
    }
}

DTRAIN_API dtrain_status dtrain_convert(const void *in, dtrain_dtype from, void *out, dtrain_dtype to, size_t count)
{
    uint64_t mode;
    if (!dtrain__dtype_converts(from, to))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "convert %s to %s: both must be among F64, F32, F16, BF16, F8_E4M3 and F8_E5M2",
                            dtrain_dtype_name(from), dtrain_dtype_name(to));
    if (count > 0 && (in == NULL || out == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "convert: %s is NULL, expected memory of %zu elements",
                            in == NULL ? "in" : "out", count);
    mode = dtrain__fpmode_enter();
    dtrain__dtype_convert(in, from, out, to, count);
    dtrain__fpmode_restore(mode);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_convert_saturating(const void *in, dtrain_dtype from, void *out, dtrain_dtype to,
                                                   size_t count)
{
    if (!dtrain__dtype_converts(from, to) || dtrain_dtype_bits(to) != 8)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "convert_saturating %s to %s: from must be F64, F32, F16, BF16, F8_E4M3 or F8_E5M2, to "
                            "F8_E4M3 or F8_E5M2",
                            dtrain_dtype_name(from), dtrain_dtype_name(to));
    if (count > 0 && (in == NULL || out == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "convert_saturating: %s is NULL, expected memory of %zu elements",
                            in == NULL ? "in" : "out", count);
    const uint64_t largest = dtrain__dtype_widen(to == DTRAIN_F8_E4M3 ? 0x7e : 0x7b, *dtrain__dtype_find(to));
    dtrain__dtype_convert_any(in, from, out, to, count, largest);
    return DTRAIN_OK;
}

/* ---- tensors ---- */

/* A text such as "F32 [3, 4]". */
typedef struct dtrain__tensor_shape_text {
    char text[256];
} dtrain__tensor_shape_text;

static dtrain__tensor_shape_text dtrain__tensor_text(const dtrain_tensor *tensor)
{
    dtrain__tensor_shape_text out;
    size_t used = (size_t)snprintf(out.text, sizeof out.text, "%s [", dtrain_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->ndim && i < DTRAIN_MAX_DIMS; i++)
        used += (size_t)snprintf(out.text + used, sizeof out.text - used, i > 0 ? ", %zu" : "%zu", tensor->shape[i]);
    snprintf(out.text + used, sizeof out.text - used, "]");
    return out;
}

/* Fills all fields but data and allocator. On an error it zeroes the whole tensor. */
static dtrain_status dtrain__tensor_shape(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape)
{
    size_t bits = dtrain_dtype_bits(dtype), count = 1;
    int fits = 1;
    if (tensor == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor: tensor is NULL, expected a dtrain_tensor to fill");
    memset(tensor, 0, sizeof *tensor);
    if (bits == 0 || ndim < 0 || ndim > DTRAIN_MAX_DIMS || (ndim > 0 && shape == NULL))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "tensor: dtype is %d (%s), ndim %d and shape %s; expected one of dtrain_dtype, 0 to %d "
                            "dimensions, and as many sizes",
                            (int)dtype, dtrain_dtype_name(dtype), ndim, shape != NULL ? "given" : "NULL",
                            DTRAIN_MAX_DIMS);
    for (int i = 0; i < ndim; i++)
        fits = dtrain__mul_size(count, shape[i], &count) && fits;
    if (!fits || !dtrain__mul_size(count, bits, &bits))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "tensor: its %d sizes give more than %zu bits of %s, the most that can be counted: make "
                            "them smaller",
                            ndim, SIZE_MAX, dtrain_dtype_name(dtype));
    if (bits % 8 != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "tensor: %zu elements of %s end inside a byte: choose sizes that fill whole bytes", count,
                            dtrain_dtype_name(dtype));
    tensor->dtype = dtype;
    tensor->ndim = ndim;
    for (int i = 0; i < ndim; i++)
        tensor->shape[i] = shape[i];
    tensor->count = count;
    tensor->bytes = bits / 8;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_create(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                              dtrain_allocator *allocator)
{
    dtrain_status status = dtrain__tensor_shape(tensor, dtype, ndim, shape);
    if (status != DTRAIN_OK)
        return status;
    if (allocator == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "tensor_create: allocator is NULL, expected one; a zeroed one is the C library");
    tensor->data = dtrain__alloc(allocator, tensor->bytes);
    if (tensor->data == NULL) {
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "tensor_create: no memory for %s, %zu bytes",
                              dtrain__tensor_text(tensor).text, tensor->bytes);
        memset(tensor, 0, sizeof *tensor);
        return status;
    }
    tensor->allocator = allocator;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_tensor_view(dtrain_tensor *tensor, dtrain_dtype dtype, int ndim, const size_t *shape,
                                            void *data)
{
    dtrain_status status = dtrain__tensor_shape(tensor, dtype, ndim, shape);
    if (status != DTRAIN_OK)
        return status;
    if (data == NULL && tensor->bytes > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "tensor_view: data is NULL, expected %zu bytes for %s",
                            tensor->bytes, dtrain__tensor_text(tensor).text);
    tensor->data = data;
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_tensor_destroy(dtrain_tensor *tensor)
{
    if (tensor == NULL)
        return;
    if (tensor->allocator != NULL)
        dtrain__free(tensor->allocator, tensor->data);
    memset(tensor, 0, sizeof *tensor);
}

#endif
