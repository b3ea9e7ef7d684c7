/* ---- >>norm ----
 * An exact sum of squares of float32. It is an integer that does not depend on the order of the elements, or on how
 * they are divided among calls and ranks. It is rounded once, at the end.
 *
 * The square of a float32 is a 48-bit integer times a power of two. Long slices first add the integers of each exponent
 * in 64 bits. Those sums go to a fixed-point number of 32-bit limbs, whose carries are done later. All arithmetic is
 * on integers, so neither compiler flags nor floating-point modes change it.
 *
 *   source   Neal, Fast exact summation using small and large superaccumulators, arXiv:1505.05571, 2015 */
#ifndef DTRAIN__NORM
#define DTRAIN__NORM
#include "isa.c"

/* Bit 0 of limb 0 is 2^-298, the square of the smallest float32. The largest square is below 2^256. The sum of 2^72
 * squares, over all ranks, has 626 bits. Each limb keeps 32 of them between calls. */
#define DTRAIN__NORM_DIGITS 20
#define DTRAIN__NORM_INFINITIES 20 /* the limb that counts them */
#define DTRAIN__NORM_NANS 21
#define DTRAIN__NORM_LIMBS 22
#define DTRAIN__NORM_LOWEST (-298)

#define DTRAIN__NORM_BLOCK 65536u /* so many squares of 48 bits fit into 64 */
#define DTRAIN__NORM_FEW 128u     /* for fewer elements, clearing and reading the bins costs more than it saves */
#define DTRAIN__NORM_SETS 4u      /* so neighbours with one exponent need not wait for each other's store */

/* The sum: zero before the first element. Up to 2^24 ranks all-reduce it as I64 with DTRAIN_SUM. */
typedef struct dtrain__norm {
    int64_t limbs[DTRAIN__NORM_LIMBS];
} dtrain__norm;

/* Returns the squared mantissa. Subnormals, with exponent field 0, lack the leading bit. */
static uint64_t dtrain__norm_square(uint32_t bits)
{
    uint32_t exponent = bits >> 23 & 255, leading = (0u - exponent) & 0x800000u;
    uint32_t mantissa = (bits & 0x7FFFFFu) | leading;
    return (uint64_t)mantissa * mantissa;
}

/* Adds squares with one exponent field. A limb grows by less than 2^33. */
static void dtrain__norm_put(dtrain__norm *sum, uint64_t squares, uint32_t exponent)
{
    uint32_t position = exponent > 0 ? 2 * exponent - 2 : 0, shift = position % 32;
    int64_t *limb = sum->limbs + position / 32;
    uint64_t low = (squares & 0xFFFFFFFFu) << shift, high = (squares >> 32) << shift;
    limb[0] += (int64_t)(low & 0xFFFFFFFFu);
    limb[1] += (int64_t)(low >> 32) + (int64_t)(high & 0xFFFFFFFFu);
    limb[2] += (int64_t)(high >> 32);
}

static void dtrain__norm_carry(dtrain__norm *sum)
{
    for (int i = 0; i + 1 < DTRAIN__NORM_DIGITS; i++) {
        sum->limbs[i + 1] += sum->limbs[i] >> 32;
        sum->limbs[i] &= 0xFFFFFFFF;
    }
}

static void dtrain__norm_add_few(dtrain__norm *sum, const dtrain__u32 *x, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = x[i], exponent = bits >> 23 & 255;
        if (exponent < 255)
            dtrain__norm_put(sum, dtrain__norm_square(bits), exponent);
        else
            sum->limbs[bits & 0x7FFFFFu ? DTRAIN__NORM_NANS : DTRAIN__NORM_INFINITIES]++;
    }
}

static void dtrain__norm_add_block(dtrain__norm *sum, const dtrain__u32 *x, size_t count)
{
    uint64_t bins[256][DTRAIN__NORM_SETS];
    size_t whole = count - count % DTRAIN__NORM_SETS;
    memset(bins, 0, sizeof bins);
    for (size_t i = 0; i < whole; i += DTRAIN__NORM_SETS) {
        uint32_t a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
        bins[a >> 23 & 255][0] += dtrain__norm_square(a);
        bins[b >> 23 & 255][1] += dtrain__norm_square(b);
        bins[c >> 23 & 255][2] += dtrain__norm_square(c);
        bins[d >> 23 & 255][3] += dtrain__norm_square(d);
    }
    for (uint32_t exponent = 0; exponent < 255; exponent++) {
        const uint64_t *bin = bins[exponent];
        uint64_t squares = bin[0] + bin[1] + bin[2] + bin[3];
        if (squares != 0)
            dtrain__norm_put(sum, squares, exponent);
    }
    dtrain__norm_add_few(sum, x + whole, count - whole);
    if ((bins[255][0] | bins[255][1] | bins[255][2] | bins[255][3]) == 0)
        return;
    for (size_t i = 0; i < whole; i++)
        if ((x[i] >> 23 & 255) == 255)
            dtrain__norm_add_few(sum, x + i, 1);
}

/* Adds the squares of count floats at any alignment; up to 2^48 over all calls. */
static void dtrain__norm_add_squares(dtrain__norm *sum, const float *floats, size_t count)
{
    const dtrain__u32 *x = (const dtrain__u32 *)(const void *)floats;
    while (count >= DTRAIN__NORM_FEW) {
        size_t block = count < DTRAIN__NORM_BLOCK ? count : DTRAIN__NORM_BLOCK;
        dtrain__norm_add_block(sum, x, block);
        dtrain__norm_carry(sum);
        x += block;
        count -= block;
    }
    dtrain__norm_add_few(sum, x, count);
    dtrain__norm_carry(sum);
}

/* Returns whether all added elements were finite, on every rank. */
static int dtrain__norm_finite(const dtrain__norm *sum)
{
    return sum->limbs[DTRAIN__NORM_INFINITIES] == 0 && sum->limbs[DTRAIN__NORM_NANS] == 0;
}

/* Returns the sum, rounded once to the nearest float64, ties to even; NaN if an element was NaN, else infinity if one
 * was infinite. */
static double dtrain__norm_value(const dtrain__norm *sum)
{
    dtrain__norm carried = *sum;
    int top = DTRAIN__NORM_DIGITS - 1, zeros = 0;
    uint64_t bits = 0, rest = 0;
    double value;
    dtrain__norm_carry(&carried);
    while (top > 0 && carried.limbs[top] == 0)
        top--;
    for (int i = top; i >= 0; i--) {
        uint64_t limb = (uint64_t)carried.limbs[i];
        if (i > top - 2)
            bits |= limb << (i == top ? 32 : 0);
        else
            rest |= i == top - 2 ? limb << 32 : (uint64_t)(limb != 0);
    }
    while (bits != 0 && bits >> 63 == 0) {
        bits = bits << 1 | rest >> 63;
        rest = rest << 1; /* at most 31 times, so the bit for the lower limbs stays below its limb */
        zeros++;
    }
    if (bits != 0) {
        uint64_t exponent = (uint64_t)(32 * top + 31 - zeros + DTRAIN__NORM_LOWEST + 1023);
        uint64_t below = (bits & 0x7FF) | (uint64_t)(rest != 0), half = 0x400;
        bits = (exponent << 52) + (bits << 1 >> 12);           /* the leading bit is not stored */
        bits += below > half || (below == half && (bits & 1)); /* a carry into the exponent is right */
    }
    if (!dtrain__norm_finite(sum))
        bits = sum->limbs[DTRAIN__NORM_NANS] != 0 ? UINT64_C(0x7FF8000000000000) : UINT64_C(0x7FF0000000000000);
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
