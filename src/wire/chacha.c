/* ---- >>chacha ----
 * ChaCha20-Poly1305 (RFC 8439) and HKDF-SHA256 (RFC 5869), which seal the records of a connection. A kernel computes
 * one block per lane of its vectors. All kernels give the same bytes. No branch and no index depends on a secret. */
#ifndef DTRAIN__CHACHA
#define DTRAIN__CHACHA
#include "../base/memory.c"
#include "../base/sha256.c"
#include "../tensor/isa.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__CHACHA_BLOCK 64u
#define DTRAIN__CHACHA_LANES 16u /* of the widest kernel */
#define DTRAIN__POLY_BLOCK 16u
#define DTRAIN__POLY_LANES 8u
#define DTRAIN__KEY_BYTES 32
#define DTRAIN__TAG_BYTES 16

static uint32_t dtrain__load_le32(const unsigned char *in)
{
    return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

static void dtrain__store_le32(unsigned char *out, uint32_t value)
{
    out[0] = (unsigned char)(value & 255);
    out[1] = (unsigned char)(value >> 8 & 255);
    out[2] = (unsigned char)(value >> 16 & 255);
    out[3] = (unsigned char)(value >> 24);
}

#define DTRAIN__CHACHA_ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))

#define DTRAIN__CHACHA_QUARTER(turn16, turn8, a, b, c, d) \
    a += b, d ^= a, d = turn16(d); \
    c += d, b ^= c, b = DTRAIN__CHACHA_ROTATE(b, 12); \
    a += b, d ^= a, d = turn8(d); \
    c += d, b ^= c, b = DTRAIN__CHACHA_ROTATE(b, 7)

#define DTRAIN__CHACHA_EACH(one) \
    one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8) one(9) one(10) one(11) one(12) one(13) one(14) \
        one(15)

/* Adds the key stream to whole groups of blocks, one block per lane, and advances the counter. All indices of `v` are
 * constants, so it can stay in registers. */
#define DTRAIN__CHACHA_KERNEL(name, target, vec, lanes, turn16, turn8, write) \
    static target void name(uint32_t state[16], const unsigned char *in, unsigned char *out, size_t groups) \
    { \
        static const uint32_t counting[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; \
        vec first, zero = {0}; \
        memcpy(&first, counting, sizeof first); \
        for (; groups > 0; groups--, state[12] += (lanes), in += (lanes)*64, out += (lanes)*64) { \
            vec v[16], counters = first + state[12]; \
            DTRAIN__CHACHA_EACH(DTRAIN__CHACHA_SPREAD) \
            v[12] = counters; \
            for (int round = 0; round < 10; round++) { \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[0], v[4], v[8], v[12]); \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[1], v[5], v[9], v[13]); \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[2], v[6], v[10], v[14]); \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[3], v[7], v[11], v[15]); \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[0], v[5], v[10], v[15]); \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[1], v[6], v[11], v[12]); \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[2], v[7], v[8], v[13]); \
                DTRAIN__CHACHA_QUARTER(turn16, turn8, v[3], v[4], v[9], v[14]); \
            } \
            counters -= state[12]; /* EACH adds it, as it adds the other words */ \
            v[12] += counters; \
            DTRAIN__CHACHA_EACH(DTRAIN__CHACHA_ADD) \
            write \
        } \
    }

#define DTRAIN__CHACHA_SPREAD(i) v[i] = zero + state[i];
#define DTRAIN__CHACHA_ADD(i) v[i] += zero + state[i];
#define DTRAIN__CHACHA_TURN16(x) DTRAIN__CHACHA_ROTATE(x, 16)
#define DTRAIN__CHACHA_TURN8(x) DTRAIN__CHACHA_ROTATE(x, 8)

/* Writes word by word, for the vectors of any machine. */
#define DTRAIN__CHACHA_KEEP(i) memcpy(words[i], &v[i], sizeof v[i]);
#define DTRAIN__CHACHA_WRITE_WORDS \
    uint32_t words[16][4]; \
    DTRAIN__CHACHA_EACH(DTRAIN__CHACHA_KEEP) \
    for (size_t lane = 0; lane < 4; lane++) \
        for (size_t i = 0; i < 16; i++) \
            dtrain__store_le32(out + 64 * lane + 4 * i, dtrain__load_le32(in + 64 * lane + 4 * i) ^ words[i][lane]);

DTRAIN__EXACT_BEGIN
DTRAIN__CHACHA_KERNEL(dtrain__chacha_base, __attribute__((noinline)), dtrain__u32x4, 4, DTRAIN__CHACHA_TURN16,
                      DTRAIN__CHACHA_TURN8, DTRAIN__CHACHA_WRITE_WORDS)

#if defined(DTRAIN__X86) || defined(DTRAIN__NEON)
/* Transposes four rows of words to four columns, within each 128 bits. */
#define DTRAIN__CHACHA_COLUMNS(wide, vec, integer, i) \
    { \
        integer a = wide##_unpacklo_epi32((integer)v[i], (integer)v[(i) + 1]); \
        integer b = wide##_unpackhi_epi32((integer)v[i], (integer)v[(i) + 1]); \
        integer c = wide##_unpacklo_epi32((integer)v[(i) + 2], (integer)v[(i) + 3]); \
        integer d = wide##_unpackhi_epi32((integer)v[(i) + 2], (integer)v[(i) + 3]); \
        v[i] = (vec)wide##_unpacklo_epi64(a, c); \
        v[(i) + 1] = (vec)wide##_unpackhi_epi64(a, c); \
        v[(i) + 2] = (vec)wide##_unpacklo_epi64(b, d); \
        v[(i) + 3] = (vec)wide##_unpackhi_epi64(b, d); \
    }

/* Adds the key stream to the blocks at the same place in their 128 bits. */
#define DTRAIN__CHACHA_WRITE(wide, vec, integer, blocks) \
    DTRAIN__CHACHA_COLUMNS(wide, vec, integer, 0) \
    DTRAIN__CHACHA_COLUMNS(wide, vec, integer, 4) \
    DTRAIN__CHACHA_COLUMNS(wide, vec, integer, 8) \
    DTRAIN__CHACHA_COLUMNS(wide, vec, integer, 12) \
    blocks(0) blocks(1) blocks(2) blocks(3)
#endif

#if defined(DTRAIN__X86)
typedef uint32_t dtrain__u32x8 __attribute__((vector_size(32)));
typedef uint32_t dtrain__u32x16 __attribute__((vector_size(64)));

#define DTRAIN__CHACHA_PUT_AVX2(at, x) \
    _mm256_storeu_si256((__m256i *)(void *)(out + (at)), \
                        _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i *)(const void *)(in + (at)))));

/* Blocks j and j + 4. */
#define DTRAIN__CHACHA_BLOCKS_AVX2(j) \
    { \
        __m256i a = (__m256i)v[j], b = (__m256i)v[(j) + 4], c = (__m256i)v[(j) + 8], d = (__m256i)v[(j) + 12]; \
        DTRAIN__CHACHA_PUT_AVX2((j)*64, _mm256_permute2x128_si256(a, b, 0x20)) \
        DTRAIN__CHACHA_PUT_AVX2((j)*64 + 32, _mm256_permute2x128_si256(c, d, 0x20)) \
        DTRAIN__CHACHA_PUT_AVX2((j)*64 + 256, _mm256_permute2x128_si256(a, b, 0x31)) \
        DTRAIN__CHACHA_PUT_AVX2((j)*64 + 288, _mm256_permute2x128_si256(c, d, 0x31)) \
    }
#define DTRAIN__CHACHA_WRITE_AVX2 DTRAIN__CHACHA_WRITE(_mm256, dtrain__u32x8, __m256i, DTRAIN__CHACHA_BLOCKS_AVX2)
#define DTRAIN__CHACHA_BYTES_AVX2(x, a, b, c, d) \
    (dtrain__u32x8) _mm256_shuffle_epi8((__m256i)(x), _mm256_set_epi32(d, c, b, a, d, c, b, a))
#define DTRAIN__CHACHA_TURN16_AVX2(x) DTRAIN__CHACHA_BYTES_AVX2(x, 0x01000302, 0x05040706, 0x09080b0a, 0x0d0c0f0e)
#define DTRAIN__CHACHA_TURN8_AVX2(x) DTRAIN__CHACHA_BYTES_AVX2(x, 0x02010003, 0x06050407, 0x0a09080b, 0x0e0d0c0f)

DTRAIN__CHACHA_KERNEL(dtrain__chacha_avx2, __attribute__((target("avx2"), noinline)), dtrain__u32x8, 8,
                      DTRAIN__CHACHA_TURN16_AVX2, DTRAIN__CHACHA_TURN8_AVX2, DTRAIN__CHACHA_WRITE_AVX2)

/* These forms have a mask of all lanes. gcc 12 warns of the plain forms, since they start with an unset value. */
#define DTRAIN__CHACHA_512_unpacklo_epi32(a, b) _mm512_maskz_unpacklo_epi32(0xffff, a, b)
#define DTRAIN__CHACHA_512_unpackhi_epi32(a, b) _mm512_maskz_unpackhi_epi32(0xffff, a, b)
#define DTRAIN__CHACHA_512_unpacklo_epi64(a, b) _mm512_maskz_unpacklo_epi64(0xff, a, b)
#define DTRAIN__CHACHA_512_unpackhi_epi64(a, b) _mm512_maskz_unpackhi_epi64(0xff, a, b)
#define DTRAIN__CHACHA_512_shuffle(a, b, order) _mm512_maskz_shuffle_i32x4(0xffff, a, b, order)

#define DTRAIN__CHACHA_PUT_AVX512(at, x) \
    _mm512_storeu_si512((void *)(out + (at)), _mm512_xor_si512(x, _mm512_loadu_si512((const void *)(in + (at)))));

/* Blocks j, j + 4, j + 8 and j + 12. */
#define DTRAIN__CHACHA_BLOCKS_AVX512(j) \
    { \
        __m512i a = DTRAIN__CHACHA_512_shuffle((__m512i)v[j], (__m512i)v[(j) + 4], 0x44); \
        __m512i b = DTRAIN__CHACHA_512_shuffle((__m512i)v[j], (__m512i)v[(j) + 4], 0xee); \
        __m512i c = DTRAIN__CHACHA_512_shuffle((__m512i)v[(j) + 8], (__m512i)v[(j) + 12], 0x44); \
        __m512i d = DTRAIN__CHACHA_512_shuffle((__m512i)v[(j) + 8], (__m512i)v[(j) + 12], 0xee); \
        DTRAIN__CHACHA_PUT_AVX512((j)*64, DTRAIN__CHACHA_512_shuffle(a, c, 0x88)) \
        DTRAIN__CHACHA_PUT_AVX512((j)*64 + 256, DTRAIN__CHACHA_512_shuffle(a, c, 0xdd)) \
        DTRAIN__CHACHA_PUT_AVX512((j)*64 + 512, DTRAIN__CHACHA_512_shuffle(b, d, 0x88)) \
        DTRAIN__CHACHA_PUT_AVX512((j)*64 + 768, DTRAIN__CHACHA_512_shuffle(b, d, 0xdd)) \
    }
#define DTRAIN__CHACHA_WRITE_AVX512 \
    DTRAIN__CHACHA_WRITE(DTRAIN__CHACHA_512, dtrain__u32x16, __m512i, DTRAIN__CHACHA_BLOCKS_AVX512)

DTRAIN__CHACHA_KERNEL(dtrain__chacha_avx512, __attribute__((target("avx512f,avx512bw,avx512vl"), noinline)),
                      dtrain__u32x16, 16, DTRAIN__CHACHA_TURN16, DTRAIN__CHACHA_TURN8, DTRAIN__CHACHA_WRITE_AVX512)
#elif defined(DTRAIN__NEON)
#define DTRAIN__CHACHA_NEON_unpacklo_epi32(a, b) vzip1q_u32(a, b)
#define DTRAIN__CHACHA_NEON_unpackhi_epi32(a, b) vzip2q_u32(a, b)
#define DTRAIN__CHACHA_NEON_unpacklo_epi64(a, b) vzip1q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b))
#define DTRAIN__CHACHA_NEON_unpackhi_epi64(a, b) vzip2q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b))
#define DTRAIN__CHACHA_PUT_NEON(at, x) vst1q_u8(out + (at), veorq_u8((uint8x16_t)(x), vld1q_u8(in + (at))));
#define DTRAIN__CHACHA_BLOCKS_NEON(j) \
    DTRAIN__CHACHA_PUT_NEON((j)*64, v[j]) \
    DTRAIN__CHACHA_PUT_NEON((j)*64 + 16, v[(j) + 4]) \
    DTRAIN__CHACHA_PUT_NEON((j)*64 + 32, v[(j) + 8]) \
    DTRAIN__CHACHA_PUT_NEON((j)*64 + 48, v[(j) + 12])
#define DTRAIN__CHACHA_WRITE_NEON \
    DTRAIN__CHACHA_WRITE(DTRAIN__CHACHA_NEON, dtrain__u32x4, uint32x4_t, DTRAIN__CHACHA_BLOCKS_NEON)
#define DTRAIN__CHACHA_TURN16_NEON(x) (dtrain__u32x4) vrev32q_u16((uint16x8_t)(x))

DTRAIN__CHACHA_KERNEL(dtrain__chacha_neon, __attribute__((noinline)), dtrain__u32x4, 4, DTRAIN__CHACHA_TURN16_NEON,
                      DTRAIN__CHACHA_TURN8, DTRAIN__CHACHA_WRITE_NEON)
#endif

/* Poly1305. A number is five limbs of 26 bits, each in 64 bits. r[5 + i] is 5 r[1 + i]. */
#define DTRAIN__POLY_MASK 0x3ffffffu

/* Multiplies h by r, modulo 2^130 - 5. Limbs of h are below 2^28 before and below 2^27 after. */
#define DTRAIN__POLY_TIMES(vec, mul, h, r) \
    { \
        vec d0 = mul(h[0], r[0]) + mul(h[1], r[8]) + mul(h[2], r[7]) + mul(h[3], r[6]) + mul(h[4], r[5]); \
        vec d1 = mul(h[0], r[1]) + mul(h[1], r[0]) + mul(h[2], r[8]) + mul(h[3], r[7]) + mul(h[4], r[6]); \
        vec d2 = mul(h[0], r[2]) + mul(h[1], r[1]) + mul(h[2], r[0]) + mul(h[3], r[8]) + mul(h[4], r[7]); \
        vec d3 = mul(h[0], r[3]) + mul(h[1], r[2]) + mul(h[2], r[1]) + mul(h[3], r[0]) + mul(h[4], r[8]); \
        vec d4 = mul(h[0], r[4]) + mul(h[1], r[3]) + mul(h[2], r[2]) + mul(h[3], r[1]) + mul(h[4], r[0]); \
        d1 += d0 >> 26, d4 += d3 >> 26; \
        d0 &= DTRAIN__POLY_MASK, d3 &= DTRAIN__POLY_MASK; \
        d2 += d1 >> 26, d0 += (d4 >> 26) + (d4 >> 26 << 2); \
        h[4] = d4 & DTRAIN__POLY_MASK, d1 &= DTRAIN__POLY_MASK; \
        d3 += d2 >> 26, h[2] = d2 & DTRAIN__POLY_MASK; \
        h[1] = d1 + (d0 >> 26), h[0] = d0 & DTRAIN__POLY_MASK; \
        h[4] += d3 >> 26, h[3] = d3 & DTRAIN__POLY_MASK; \
    }

#define DTRAIN__POLY_EACH(one) one(0) one(1) one(2) one(3) one(4)
#define DTRAIN__POLY_LIMB_IN(i) memcpy(&h[i], spread[i], sizeof h[i]);
#define DTRAIN__POLY_LIMB_OUT(i) memcpy(spread[i], &h[i], sizeof h[i]);

/* Adds whole groups of blocks to h, one block per lane. At each group but the last, all lanes are multiplied by
 * r^lanes. At the last group, each lane is multiplied by the power for its block.
 *
 *   source   Goll and Gueron, Vectorization of Poly1305, 2015 */
#define DTRAIN__POLY_KERNEL(name, target, vec, lanes, mul, load) \
    static target void name(uint64_t sum[5], uint64_t powers[DTRAIN__POLY_LANES][9], const unsigned char *data, \
                            size_t groups) \
    { \
        static const unsigned char order[3][8] = {{0, 1}, {0, 2, 1, 3}, {0, 4, 1, 5, 2, 6, 3, 7}}; \
        const unsigned char *block = order[(lanes) <= 2 ? 0 : (lanes) == 4 ? 1 : 2]; \
        uint64_t spread[9][lanes]; \
        vec h[5], all[9], last[9], zero = {0}; \
        for (int i = 0; i < 9; i++) { \
            all[i] = zero + powers[(lanes)-1][i]; \
            for (int lane = 0; lane < (lanes); lane++) \
                spread[i][lane] = powers[(lanes)-1 - block[lane]][i]; \
            memcpy(&last[i], spread[i], sizeof last[i]); \
        } \
        memset(spread, 0, sizeof spread); \
        for (int i = 0; i < 5; i++) \
            spread[i][0] = sum[i]; \
        DTRAIN__POLY_EACH(DTRAIN__POLY_LIMB_IN) \
        for (; groups > 0; groups--, data += (lanes)*DTRAIN__POLY_BLOCK) { \
            const vec *r = groups > 1 ? all : last; \
            vec low, high; \
            load h[0] += low & DTRAIN__POLY_MASK; \
            h[1] += low >> 26 & DTRAIN__POLY_MASK; \
            h[2] += (low >> 52 | high << 12) & DTRAIN__POLY_MASK; \
            h[3] += high >> 14 & DTRAIN__POLY_MASK; \
            h[4] += high >> 40 | (uint64_t)1 << 24; \
            DTRAIN__POLY_TIMES(vec, mul, h, r) \
        } \
        DTRAIN__POLY_EACH(DTRAIN__POLY_LIMB_OUT) \
        for (int i = 0; i < 5; i++) { \
            sum[i] = 0; \
            for (int lane = 0; lane < (lanes); lane++) \
                sum[i] += spread[i][lane]; \
        } \
        dtrain__poly_carry(sum); \
    }

/* Carries: afterwards every limb is below 2^26, except that h[1] may be 2^26. */
static void dtrain__poly_carry(uint64_t h[5])
{
    for (int i = 0; i < 4; i++) {
        h[i + 1] += h[i] >> 26;
        h[i] &= DTRAIN__POLY_MASK;
    }
    h[0] += 5 * (h[4] >> 26);
    h[4] &= DTRAIN__POLY_MASK;
    h[1] += h[0] >> 26;
    h[0] &= DTRAIN__POLY_MASK;
}

#define DTRAIN__POLY_MUL(a, b) ((a) * (b))
#define DTRAIN__POLY_LOAD \
    low = dtrain__load_le64(data); \
    high = dtrain__load_le64(data + 8);

DTRAIN__POLY_KERNEL(dtrain__poly_base, __attribute__((noinline)), uint64_t, 1, DTRAIN__POLY_MUL, DTRAIN__POLY_LOAD)

#if defined(DTRAIN__X86)
typedef uint64_t dtrain__u64x4 __attribute__((vector_size(32)));
typedef uint64_t dtrain__u64x8 __attribute__((vector_size(64)));

#define DTRAIN__POLY_MUL_AVX2(a, b) ((dtrain__u64x4)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#define DTRAIN__POLY_LOAD_AVX2 \
    __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)data); \
    __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(data + 32)); \
    low = (dtrain__u64x4)_mm256_unpacklo_epi64(a, b); \
    high = (dtrain__u64x4)_mm256_unpackhi_epi64(a, b);
#define DTRAIN__POLY_MUL_AVX512(a, b) ((dtrain__u64x8)_mm512_maskz_mul_epu32(0xff, (__m512i)(a), (__m512i)(b)))
#define DTRAIN__POLY_LOAD_AVX512 \
    __m512i a = _mm512_loadu_si512((const void *)data), b = _mm512_loadu_si512((const void *)(data + 64)); \
    low = (dtrain__u64x8)DTRAIN__CHACHA_512_unpacklo_epi64(a, b); \
    high = (dtrain__u64x8)DTRAIN__CHACHA_512_unpackhi_epi64(a, b);

DTRAIN__POLY_KERNEL(dtrain__poly_avx2, __attribute__((target("avx2"), noinline)), dtrain__u64x4, 4,
                    DTRAIN__POLY_MUL_AVX2, DTRAIN__POLY_LOAD_AVX2)
DTRAIN__POLY_KERNEL(dtrain__poly_avx512, __attribute__((target("avx512f,avx512bw,avx512vl"), noinline)), dtrain__u64x8,
                    8, DTRAIN__POLY_MUL_AVX512, DTRAIN__POLY_LOAD_AVX512)
#elif defined(DTRAIN__NEON)
#define DTRAIN__POLY_MUL_NEON(a, b) vmull_u32(vmovn_u64(a), vmovn_u64(b))
#define DTRAIN__POLY_LOAD_NEON \
    uint64x2_t a = vreinterpretq_u64_u8(vld1q_u8(data)), b = vreinterpretq_u64_u8(vld1q_u8(data + 16)); \
    low = vzip1q_u64(a, b); \
    high = vzip2q_u64(a, b);
DTRAIN__POLY_KERNEL(dtrain__poly_neon, __attribute__((noinline)), uint64x2_t, 2, DTRAIN__POLY_MUL_NEON,
                    DTRAIN__POLY_LOAD_NEON)
#endif
DTRAIN__EXACT_END

typedef struct dtrain__chacha_way {
    size_t blocks; /* in a group of the cipher */
    void (*blocks_of)(uint32_t state[16], const unsigned char *in, unsigned char *out, size_t groups);
    size_t lanes; /* in a group of the tag */
    void (*add)(uint64_t sum[5], uint64_t powers[DTRAIN__POLY_LANES][9], const unsigned char *data, size_t groups);
} dtrain__chacha_way;

static const dtrain__chacha_way *dtrain__chacha_choose(int isa)
{
    static const dtrain__chacha_way base = {4, dtrain__chacha_base, 1, dtrain__poly_base};
#if defined(DTRAIN__X86)
    static const dtrain__chacha_way avx2 = {8, dtrain__chacha_avx2, 4, dtrain__poly_avx2};
    static const dtrain__chacha_way avx512 = {16, dtrain__chacha_avx512, 8, dtrain__poly_avx512};
    if (isa >= DTRAIN__ISA_AVX2)
        return isa == DTRAIN__ISA_AVX512 ? &avx512 : &avx2;
#elif defined(DTRAIN__NEON)
    static const dtrain__chacha_way neon = {4, dtrain__chacha_neon, 2, dtrain__poly_neon};
    if (dtrain__isa_is_neon(isa))
        return &neon;
#endif
    (void)isa;
    return &base;
}

/* Adds the key stream from state's counter on. in and out are the same buffer, or do not overlap. */
static void dtrain__chacha_xor(const dtrain__chacha_way *way, uint32_t state[16], const unsigned char *in,
                               unsigned char *out, size_t bytes)
{
    const dtrain__chacha_way *base = dtrain__chacha_choose(DTRAIN__ISA_SCALAR);
    unsigned char rest[DTRAIN__CHACHA_LANES * DTRAIN__CHACHA_BLOCK];
    size_t group = way->blocks * DTRAIN__CHACHA_BLOCK, whole = bytes / group * group;
    way->blocks_of(state, in, out, bytes / group);
    if (bytes == whole)
        return;
    if (bytes - whole <= base->blocks * DTRAIN__CHACHA_BLOCK)
        way = base;
    memset(rest, 0, way->blocks * DTRAIN__CHACHA_BLOCK);
    memcpy(rest, in + whole, bytes - whole);
    way->blocks_of(state, rest, rest, 1);
    memcpy(out + whole, rest, bytes - whole);
}

/* A tag in progress. */
typedef struct dtrain__poly {
    uint64_t sum[5], powers[DTRAIN__POLY_LANES][9]; /* powers of r, from r^1 at [0] */
    size_t lanes;                                   /* how many powers are known */
    unsigned char pad[16];
} dtrain__poly;

static void dtrain__poly_start(dtrain__poly *poly, const unsigned char key[DTRAIN__KEY_BYTES])
{
    uint64_t low = dtrain__load_le64(key) & UINT64_C(0x0ffffffc0fffffff), *r = poly->powers[0];
    uint64_t high = dtrain__load_le64(key + 8) & UINT64_C(0x0ffffffc0ffffffc);
    memset(poly->sum, 0, sizeof poly->sum);
    r[0] = low & DTRAIN__POLY_MASK;
    r[1] = low >> 26 & DTRAIN__POLY_MASK;
    r[2] = (low >> 52 | high << 12) & DTRAIN__POLY_MASK;
    r[3] = high >> 14 & DTRAIN__POLY_MASK;
    r[4] = high >> 40;
    for (int i = 1; i < 5; i++)
        r[4 + i] = 5 * r[i];
    poly->lanes = 1;
    memcpy(poly->pad, key + 16, sizeof poly->pad);
}

/* Computes the powers of r up to r^lanes. */
static void dtrain__poly_raise(dtrain__poly *poly, size_t lanes)
{
    for (; poly->lanes < lanes; poly->lanes++) {
        uint64_t *h = poly->powers[poly->lanes];
        const uint64_t *r = poly->powers[0];
        memcpy(h, poly->powers[poly->lanes - 1], sizeof poly->powers[0]);
        DTRAIN__POLY_TIMES(uint64_t, DTRAIN__POLY_MUL, h, r)
        for (int i = 1; i < 5; i++)
            h[4 + i] = 5 * h[i];
    }
}

/* Adds data, padded with zeros to whole blocks. */
static void dtrain__poly_add(dtrain__poly *poly, const dtrain__chacha_way *way, const unsigned char *data, size_t bytes)
{
    unsigned char rest[DTRAIN__POLY_BLOCK] = {0};
    size_t group = way->lanes * DTRAIN__POLY_BLOCK, groups = bytes / group;
    if (way->lanes > 1 && groups >= 4) { /* for less, the powers cost more than they save */
        dtrain__poly_raise(poly, way->lanes);
        way->add(poly->sum, poly->powers, data, groups);
        data += groups * group;
        bytes -= groups * group;
    }
    dtrain__poly_base(poly->sum, poly->powers, data, bytes / DTRAIN__POLY_BLOCK);
    if (bytes % DTRAIN__POLY_BLOCK == 0)
        return;
    memcpy(rest, data + bytes / DTRAIN__POLY_BLOCK * DTRAIN__POLY_BLOCK, bytes % DTRAIN__POLY_BLOCK);
    dtrain__poly_base(poly->sum, poly->powers, rest, 1);
}

/* Gives the tag: the sum modulo 2^130 - 5, plus the pad, modulo 2^128. */
static void dtrain__poly_finish(dtrain__poly *poly, unsigned char tag[DTRAIN__TAG_BYTES])
{
    uint64_t *h = poly->sum, less[5], carry = 5, low, high;
    dtrain__poly_carry(h);
    dtrain__poly_carry(h);
    for (int i = 0; i < 5; i++) {
        less[i] = h[i] + carry;
        carry = less[i] >> 26;
        less[i] &= DTRAIN__POLY_MASK;
    }
    for (int i = 0; i < 5; i++) /* carry is 1 where h was 2^130 - 5 or more */
        h[i] = (h[i] & (carry - 1)) | (less[i] & (0 - carry));
    low = h[0] | h[1] << 26 | h[2] << 52;
    high = h[2] >> 12 | h[3] << 14 | h[4] << 40;
    carry = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t half = i < 2 ? low : high;
        carry += (half >> (32 * (i % 2)) & 0xffffffffu) + dtrain__load_le32(poly->pad + 4 * i);
        dtrain__store_le32(tag + 4 * i, (uint32_t)(carry & 0xffffffffu));
        carry >>= 32;
    }
}

/* Overwrites a secret. The assembly statement keeps compilers from removing the memset. */
static void dtrain__wipe(void *secret, size_t bytes)
{
    memset(secret, 0, bytes);
    __asm__ __volatile__("" : : "r"(secret) : "memory");
}

/* Sets the state to block 1 and starts the tag with the key from block 0: RFC 8439, section 2.8. */
static void dtrain__aead_start(uint32_t state[16], dtrain__poly *poly, const unsigned char key[DTRAIN__KEY_BYTES],
                               const unsigned char nonce[12])
{
    static const uint32_t words[4] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
    unsigned char first[DTRAIN__CHACHA_BLOCK] = {0};
    memcpy(state, words, sizeof words);
    for (int i = 0; i < 8; i++)
        state[4 + i] = dtrain__load_le32(key + 4 * i);
    state[12] = 0;
    for (int i = 0; i < 3; i++)
        state[13 + i] = dtrain__load_le32(nonce + 4 * i);
    dtrain__chacha_xor(dtrain__chacha_choose(DTRAIN__ISA_SCALAR), state, first, first, sizeof first);
    state[12] = 1;
    dtrain__poly_start(poly, first);
    dtrain__wipe(first, sizeof first);
}

static void dtrain__aead_tag(dtrain__poly *poly, const dtrain__chacha_way *way, const unsigned char *extra,
                             size_t extra_bytes, const unsigned char *data, size_t bytes,
                             unsigned char tag[DTRAIN__TAG_BYTES])
{
    unsigned char lengths[16];
    dtrain__poly_add(poly, way, extra, extra_bytes);
    dtrain__poly_add(poly, way, data, bytes);
    dtrain__put_le(lengths, extra_bytes, 8);
    dtrain__put_le(lengths + 8, bytes, 8);
    dtrain__poly_add(poly, way, lengths, sizeof lengths);
    dtrain__poly_finish(poly, tag);
    dtrain__wipe(poly, sizeof *poly);
}

/* Encrypts `bytes` bytes from in to out, which are the same or do not overlap. Makes the tag of out and of extra. */
static void dtrain__aead_seal(const dtrain__chacha_way *way, const unsigned char key[DTRAIN__KEY_BYTES],
                              const unsigned char nonce[12], const unsigned char *extra, size_t extra_bytes,
                              const unsigned char *in, unsigned char *out, size_t bytes,
                              unsigned char tag[DTRAIN__TAG_BYTES])
{
    uint32_t state[16];
    dtrain__poly poly;
    dtrain__aead_start(state, &poly, key, nonce);
    dtrain__chacha_xor(way, state, in, out, bytes);
    dtrain__aead_tag(&poly, way, extra, extra_bytes, out, bytes, tag);
    dtrain__wipe(state, sizeof state);
}

/* Decrypts into out if the tag is right. Otherwise returns 0 and does not change out. */
static int dtrain__aead_open(const dtrain__chacha_way *way, const unsigned char key[DTRAIN__KEY_BYTES],
                             const unsigned char nonce[12], const unsigned char *extra, size_t extra_bytes,
                             const unsigned char *in, unsigned char *out, size_t bytes,
                             const unsigned char tag[DTRAIN__TAG_BYTES])
{
    uint32_t state[16];
    unsigned char right[DTRAIN__TAG_BYTES];
    dtrain__poly poly;
    dtrain__aead_start(state, &poly, key, nonce);
    dtrain__aead_tag(&poly, way, extra, extra_bytes, in, bytes, right);
    int good = dtrain__memory_equal_secret(right, tag, sizeof right);
    if (good)
        dtrain__chacha_xor(way, state, in, out, bytes);
    dtrain__wipe(state, sizeof state);
    return good;
}

/* HKDF-SHA256. Extracts a key from a secret and a salt, and expands it with info to at most 255 * 32 bytes. */
static void dtrain__hkdf(const void *secret, size_t secret_bytes, const void *salt, size_t salt_bytes, const void *info,
                         size_t info_bytes, unsigned char *out, size_t bytes)
{
    dtrain__sha256_hmac hmac;
    unsigned char key[32], block[32], number = 0;
    dtrain__sha256_hmac_start(&hmac, salt, salt_bytes);
    dtrain__sha256_hmac_add(&hmac, secret, secret_bytes);
    dtrain__sha256_hmac_finish(&hmac, key);
    while (bytes > 0) {
        size_t part = bytes < sizeof block ? bytes : sizeof block;
        dtrain__sha256_hmac_start(&hmac, key, sizeof key);
        if (number++ > 0)
            dtrain__sha256_hmac_add(&hmac, block, sizeof block);
        dtrain__sha256_hmac_add(&hmac, info, info_bytes);
        dtrain__sha256_hmac_add(&hmac, &number, 1);
        dtrain__sha256_hmac_finish(&hmac, block);
        memcpy(out, block, part);
        out += part;
        bytes -= part;
    }
    dtrain__wipe(&hmac, sizeof hmac);
    dtrain__wipe(key, sizeof key);
    dtrain__wipe(block, sizeof block);
}

DTRAIN__FAST_END
#endif
