/* ---- >>random ----
 * Counter-based random numbers. Value `index` of stream `seed` is a function of these two alone. The normal draw is
 * integer arithmetic up to its last step, which is an exact scaling. So no compiler flag, rounding mode or libm can
 * change a bit of it. */
#ifndef DTRAIN__RANDOM
#define DTRAIN__RANDOM
#include "base.h"

#include <string.h>

/* Source: Philox4x32-10 of Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011. */
static void dtrain__random_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0;
        uint64_t b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Fills out with the four 32-bit words at `index` of stream `seed`. */
static void dtrain__random_u32x4(uint64_t seed, uint64_t index, uint32_t out[4])
{
    uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    dtrain__random_philox(counter, key, out);
}

DTRAIN_API uint64_t dtrain_random_u64(uint64_t seed, uint64_t index)
{
    uint32_t word[4];
    dtrain__random_u32x4(seed, index, word);
    return (uint64_t)word[1] << 32 | word[0];
}

DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t index)
{
    uint32_t word[4];
    dtrain__random_u32x4(seed, index, word);
    return (float)(int32_t)(word[0] >> 8) * (1.0f / 16777216.0f);
}

/* Returns -ln(v / 2^64) for v > 0, as a multiple of 2^-57, within 2^-50.
 *
 * It multiplies by factors 1 + 2^-k up to almost 2 and adds up their logarithms. The rest, d < 2^-20, contributes
 * -ln(1-d) = d + d^2/2.
 *
 *   source   Knuth, The Art of Computer Programming 1, exercise 1.2.2-28 */
static uint64_t dtrain__random_minus_log(uint64_t v)
{
    static const uint64_t log_factor[20] = {
        /* ln(1 + 2^-k) for k = 1 ... 20, times 2^57 */
        0x0cf991f65fcc260u, 0x0723fdf1e6a6887u, 0x03c4e0edc55e5ccu, 0x01f0a30c01162a6u, 0x00fc14d873c1980u,
        0x007f02a2c3f00f9u, 0x003fc054d620cf1u, 0x001ff00aa2b10bcu, 0x000ffc0154d5887u, 0x0007ff002aa2ac4u,
        0x0003ffc00554d56u, 0x0001fff000aaa2bu, 0x0000fffc001554du, 0x00007fff0002aaau, 0x00003fffc000555u,
        0x00001ffff0000abu, 0x00000ffffc00015u, 0x000007ffff00003u, 0x000003ffffc0000u, 0x000001fffff0000u};
    const uint64_t log_2 = 0x162e42fefa39ef3u, two = (uint64_t)1 << 63;
    int shift = __builtin_clzll(v);
    uint64_t m = v << shift >> 1; /* 1 <= m < 2, times 2^62 */
    uint64_t sum = (uint64_t)shift * log_2;
    for (int k = 1; k <= 20; k++) {
        uint64_t next = m + (m >> k);
        int fits = next <= two;
        m = fits ? next : m;
        sum += fits ? log_factor[k - 1] : 0;
    }
    uint64_t d = two - m; /* times 2^63 */
    uint64_t high = d >> 12;
    return sum + (d >> 6) + (high * high >> 46);
}

/* Returns the square root of n, 2^62 <= n < 2^64, within 1: Newton's method from the chord, which is within 3%. */
static uint64_t dtrain__random_sqrt(uint64_t n)
{
    uint64_t root = n / 3 / ((uint64_t)1 << 31) + 0x5c000000u;
    for (int i = 0; i < 3; i++)
        root = (root + n / root) / 2;
    return root < 0xffffffffu ? root : 0xffffffffu;
}

/* Returns sin(pi/2 * (w + 1/2) / 2^32) as a multiple of 2^-32, within 2^-29: the Taylor series to the 15th power. */
static uint64_t dtrain__random_sine(uint32_t w)
{
    static const uint64_t term[7] = {0xf4u, 0x3c61u, 0xa83c2u, 0x132d2cdu, 0x1466bc67u, 0xa55de731u, 0x1921fb544u};
    uint64_t square = (uint64_t)w * w >> 32, sum = 3;
    for (int i = 0; i < 7; i++)
        sum = term[i] - (sum * square >> 32);
    return (sum >> 2) * (2 * (uint64_t)w + 1) >> 31;
}

/* Returns sign * product * 2^-scale. Rounds the product to 24 bits first, so the conversion and scaling are exact. */
static float dtrain__random_float(uint64_t product, int scale, int negative)
{
    if (product == 0)
        return 0.0f;
    int shift = 40 - __builtin_clzll(product);
    if (shift > 0) {
        product = (product + ((uint64_t)1 << (shift - 1))) >> shift;
        scale -= shift;
    }
    uint32_t power_bits = (uint32_t)(127 - scale) << 23;
    float power;
    memcpy(&power, &power_bits, sizeof power);
    float magnitude = (float)(int32_t)product;
    return (negative ? -magnitude : magnitude) * power;
}

/* sqrt(-2 ln u) sin(angle): u from words 0 and 1, the angle from words 2 and 3. Results reach 9.4 deviations.
 *
 *   source   Box, Muller, Annals of Mathematical Statistics 29(2), 1958 */
DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t index)
{
    uint32_t word[4];
    dtrain__random_u32x4(seed, index, word);
    uint64_t v = ((uint64_t)word[1] << 32 | word[0]) + 1;       /* 0 stands for 2^64: u is 1 */
    uint64_t square = v != 0 ? dtrain__random_minus_log(v) : 0; /* of the radius, times 2^56 */
    if (square == 0)
        return 0.0f;
    int half_shift = __builtin_clzll(square) / 2;
    uint64_t radius = dtrain__random_sqrt(square << (2 * half_shift)); /* times 2^(28 + half_shift) */
    return dtrain__random_float(radius * dtrain__random_sine(word[2]), 60 + half_shift, (int)(word[3] & 1));
}

#endif
