/* ---- >>cuda-norm ----
 * The exact sum of squares of >>norm on a GPU, and the clipping by it. A square of a float32 is exact in float64. A
 * thread adds squares to three float64 that are integers times powers of two. Each starts at 1.5 times its anchor 2^(52
 * + p) and stays in that binade, so its last place is worth 2^p throughout. An addition rounds to a multiple of 2^p.
 * The difference to the value before is exact, and so is the rest (Fast2Sum), which goes to the next one.
 *
 * A window has squares in [2^(2b), 2^(2b + 76)), at most N = 2^10 of them. Their last bit is g = 2b - 46.
 *
 *   first    p = g + 82: at most N 2^(g + 122) = 2^(p + 50), and N roundings of half a place; rests up to 2^(g + 81)
 *   second   p = g + 41: at most N 2^(g + 81) = 2^(p + 50), and N roundings of half a place; rests up to 2^(g + 40)
 *   third    p = g:      at most N 2^(g + 40) = 2^(p + 50), multiples of 2^g: nothing is rounded
 *
 * All stay within 2^(p + 51), half a binade. A rest is exact, as its last bit is the square's or higher, in one of two
 * ways. Either the rest is what was to be added, of 48 bits. Or what was to be added reaches half a place, and from
 * there to its last bit are at most 48 bits.
 *
 * Each block places its window by the largest of its first numbers, and a thread moves its window up if it must.
 * Numbers below the window go to the block's limbs, one by one. The accumulators of a block are added as integers and
 * go to limbs of 32 bits that carry at once. Those go to the caller's limbs, which every call carries. Every addition
 * is of integers, so no grid and no order changes the sum.
 *
 *   source   Dekker, A floating-point technique for extending the available precision, 1971 (Fast2Sum)
 *            Demmel, Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64(7), 2015 (anchors) */
#ifndef DTRAIN__CUDA_NORM
#define DTRAIN__CUDA_NORM
#include "walk.cu"
#include "elementwise.cu"

#define DTRAIN__CUDA_NORM_THREADS 256
#define DTRAIN__CUDA_NORM_DIGITS 20
#define DTRAIN__CUDA_NORM_INFINITIES 20 /* limb of the caller's, and of a block's, where each counter has two words */
#define DTRAIN__CUDA_NORM_NANS 22
#define DTRAIN__CUDA_NORM_LOWEST (-298)
#define DTRAIN__CUDA_NORM_BINADES 38u
#define DTRAIN__CUDA_NORM_PLACES 41 /* places between two accumulators */
#define DTRAIN__CUDA_NORM_ABOVE 4u  /* binades of a window above the largest number that placed it */
#define DTRAIN__CUDA_NORM_ROUNDS 60 /* of 16 squares; with those at the ends, fewer than 2^10 */
#define DTRAIN__CUDA_INFINITY 0x7F800000u

typedef struct dtrain__cuda_squares_args {
    const float *x;
    uint64_t *limbs;
    dtrain__cuda_walk walk;
} dtrain__cuda_squares_args;

typedef struct dtrain__cuda_squares_shared {
    uint32_t limbs[24]; /* digits, and two counters of two words */
    uint32_t first_top, top;
    int64_t parts[3][DTRAIN__CUDA_NORM_THREADS], sums[3][16];
} dtrain__cuda_squares_shared;

/* A window holds numbers from `lowest` on, over `span` of bits. Their exponents, with the bias, are below top. */
typedef struct dtrain__cuda_squares_own {
    double sums[3];
    uint32_t lowest, span, top;
} dtrain__cuda_squares_own;

/* Adds to one limb of a block, and carries. */
DTRAIN__CUDA_FN void dtrain__cuda_limb_add(uint32_t *limb, uint32_t value)
{
    for (; value != 0; limb++)
        value = dtrain__cuda_atomic_add_u32(limb, value) > UINT32_MAX - value;
}

/* Adds a word whose bit 0 is at bit `position` of a block's limbs. */
DTRAIN__CUDA_FN void dtrain__cuda_limb_add_word(uint32_t *limbs, uint32_t position, uint64_t word)
{
    uint64_t lower = (word & 0xFFFFFFFFu) << position % 32, upper = (word >> 32) << position % 32;
    uint32_t *limb = limbs + position / 32;
    dtrain__cuda_limb_add(limb, (uint32_t)lower);
    dtrain__cuda_limb_add(limb + 1, (uint32_t)(lower >> 32));
    dtrain__cuda_limb_add(limb + 1, (uint32_t)upper);
    dtrain__cuda_limb_add(limb + 2, (uint32_t)(upper >> 32));
}

/* Returns a bit position in the limbs; bit 0 of limb 0 is worth 2^-298. It is that of the last place of a window's last
 * accumulator, and of a number's square. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_position(uint32_t exponent)
{
    return exponent > 0 ? 2 * exponent - 2 : 0;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_bottom(uint32_t top)
{
    return top - DTRAIN__CUDA_NORM_BINADES;
}

DTRAIN__CUDA_FN uint64_t dtrain__cuda_squares_anchor(uint32_t top, int accumulator)
{
    int place = (int)dtrain__cuda_squares_position(dtrain__cuda_squares_bottom(top)) + DTRAIN__CUDA_NORM_LOWEST +
                DTRAIN__CUDA_NORM_PLACES * (2 - accumulator);
    return (uint64_t)(1023 + 52 + place) << 52 | (uint64_t)1 << 51;
}

/* The lowest window also holds subnormals, whose last place is that of the smallest normal number. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_place(dtrain__cuda_squares_own *own, uint32_t top)
{
    uint32_t bottom = dtrain__cuda_squares_bottom(top);
    own->top = top;
    own->lowest = bottom > 1 ? bottom << 23 : 0;
    own->span = (top << 23) - own->lowest;
    for (int i = 0; i < 3; i++)
        own->sums[i] = dtrain__cuda_double_of(dtrain__cuda_squares_anchor(top, i));
}

/* Returns the top of a window for numbers of up to this exponent. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_top(uint32_t exponent)
{
    uint32_t top = exponent + 1 + DTRAIN__CUDA_NORM_ABOVE, least = DTRAIN__CUDA_NORM_BINADES + 1;
    return top < least ? least : top > 255 ? 255 : top;
}

/* Returns what an accumulator holds, in its last places. */
DTRAIN__CUDA_FN int64_t dtrain__cuda_squares_places(const dtrain__cuda_squares_own *own, int accumulator)
{
    return (int64_t)(dtrain__cuda_bits_f64(own->sums[accumulator]) -
                     dtrain__cuda_squares_anchor(own->top, accumulator));
}

/* Adds a 2^82 + b 2^41 + c, in last places of the window of top. It is not negative, and a is below 2^60. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_flush(uint32_t *limbs, uint32_t top, int64_t a, int64_t b, int64_t c)
{
    uint32_t position = dtrain__cuda_squares_position(dtrain__cuda_squares_bottom(top));
    uint64_t low = (uint64_t)c, middle = (uint64_t)(c >> 63), high = middle, carry;
    low += (uint64_t)b << 41;
    carry = low < (uint64_t)b << 41;
    middle += carry;
    high += middle < carry;
    middle += (uint64_t)(b >> 23);
    high += (uint64_t)(b >> 63) + (middle < (uint64_t)(b >> 23));
    middle += (uint64_t)a << 18;
    high += (uint64_t)(a >> 46) + (middle < (uint64_t)a << 18);
    dtrain__cuda_limb_add_word(limbs, position, low);
    dtrain__cuda_limb_add_word(limbs, position + 64, middle);
    dtrain__cuda_limb_add_word(limbs, position + 128, high);
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_flush_own(dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own)
{
    dtrain__cuda_squares_flush(shared->limbs, own->top, dtrain__cuda_squares_places(own, 0),
                               dtrain__cuda_squares_places(own, 1), dtrain__cuda_squares_places(own, 2));
    dtrain__cuda_squares_place(own, own->top);
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_accumulate(dtrain__cuda_squares_own *own, float number)
{
    double x = dtrain__cuda_widen_f32(number), rest = dtrain__cuda_mul_f64(x, x);
    for (int i = 0; i < 2; i++) {
        double sum = dtrain__cuda_add_f64(own->sums[i], rest);
        rest = dtrain__cuda_sub_f64(rest, dtrain__cuda_sub_f64(sum, own->sums[i]));
        own->sums[i] = sum;
    }
    own->sums[2] = dtrain__cuda_add_f64(own->sums[2], rest);
}

/* Returns whether the window does not hold one of four numbers. It holds zero. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_squares_misses(const dtrain__cuda_squares_own *own, dtrain__cuda_vector v)
{
    uint32_t misses = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t key = v.word[i] & 0x7FFFFFFFu;
        misses |= (uint32_t)(key - own->lowest >= own->span) & (uint32_t)(key != 0);
    }
    return misses;
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_take(dtrain__cuda_squares_own *own, dtrain__cuda_vector v)
{
    for (int i = 0; i < 4; i++)
        dtrain__cuda_squares_accumulate(own, dtrain__cuda_float_of(v.word[i]));
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_put(uint32_t *limbs, uint32_t key)
{
    uint32_t exponent = key >> 23, mantissa = (key & 0x7FFFFFu) | (exponent > 0 ? 0x800000u : 0);
    dtrain__cuda_limb_add_word(limbs, dtrain__cuda_squares_position(exponent), (uint64_t)mantissa * mantissa);
}

/* Adds any number. A window moves by steps of 16 binades, so that threads' windows seldom differ. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_any(dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own,
                                              uint32_t key)
{
    if (key >= DTRAIN__CUDA_INFINITY) {
        dtrain__cuda_limb_add(
            shared->limbs + (key > DTRAIN__CUDA_INFINITY ? DTRAIN__CUDA_NORM_NANS : DTRAIN__CUDA_NORM_INFINITIES), 1);
        return;
    }
    if (key < own->lowest) {
        dtrain__cuda_squares_put(shared->limbs, key);
        return;
    }
    if (key - own->lowest >= own->span) {
        uint32_t top = (dtrain__cuda_squares_top(key >> 23) + 15) / 16 * 16;
        dtrain__cuda_squares_flush_own(shared, own);
        dtrain__cuda_squares_place(own, top < 255 ? top : 255);
    }
    dtrain__cuda_squares_accumulate(own, dtrain__cuda_float_of(key));
}

/* Adds `vectors` times 4 numbers, `stride` numbers from 4 to 4, if the window does not hold all. It reads them again:
 * few come here, and registers cannot be indexed. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_each(dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own,
                                               const float *x, size_t stride, uint32_t vectors)
{
    DTRAIN__CUDA_ROLLED
    for (uint32_t i = 0; i < 4 * vectors; i++)
        dtrain__cuda_squares_any(shared, own, dtrain__cuda_bits_f32(x[i / 4 * stride + i % 4]) & 0x7FFFFFFFu);
}

/* Adds the numbers before and after those at multiples of 16 bytes, at most 6. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_ends(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                               dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own)
{
    size_t i = at.thread < args->walk.head ? at.thread : 4 * args->walk.groups + at.thread;
    if (at.block == 0 && at.thread < args->walk.singles)
        dtrain__cuda_squares_any(shared, own, dtrain__cuda_bits_f32(args->x[i]) & 0x7FFFFFFFu);
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_all(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                              dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own)
{
    const float *x = args->x + args->walk.head;
    const dtrain__cuda_vector *v = (const dtrain__cuda_vector *)x;
    size_t step = at.blocks * at.threads, i = at.block * at.threads + at.thread;
    int rounds = 0;
    DTRAIN__CUDA_ROLLED
    for (; i < args->walk.groups && args->walk.groups - i > 3 * step; i += 4 * step) {
        dtrain__cuda_vector a = v[i], b = v[i + step], c = v[i + 2 * step], d = v[i + 3 * step];
        /* The branch comes after all four loads, so that they are in flight together. */
        if (dtrain__cuda_squares_misses(own, a) | dtrain__cuda_squares_misses(own, b) |
            dtrain__cuda_squares_misses(own, c) | dtrain__cuda_squares_misses(own, d)) {
            dtrain__cuda_squares_each(shared, own, x + 4 * i, 4 * step, 4);
        } else {
            dtrain__cuda_squares_take(own, a);
            dtrain__cuda_squares_take(own, b);
            dtrain__cuda_squares_take(own, c);
            dtrain__cuda_squares_take(own, d);
        }
        if (++rounds < DTRAIN__CUDA_NORM_ROUNDS)
            continue;
        dtrain__cuda_squares_flush_own(shared, own);
        rounds = 0;
    }
    DTRAIN__CUDA_ROLLED
    for (; i < args->walk.groups; i += step)
        dtrain__cuda_squares_each(shared, own, x + 4 * i, 0, 1);
}

/* Finds the largest exponent of the block's first numbers. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_sample(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                                 dtrain__cuda_squares_shared *shared)
{
    const dtrain__cuda_vector *v = (const dtrain__cuda_vector *)(args->x + args->walk.head);
    size_t i = at.block * at.threads + at.thread;
    uint32_t top = dtrain__cuda_squares_top(0);
    if (i < args->walk.groups) {
        dtrain__cuda_vector sample = v[i];
        for (int j = 0; j < 4; j++) {
            uint32_t key = sample.word[j] & 0x7FFFFFFFu, its = dtrain__cuda_squares_top(key >> 23);
            top = key < DTRAIN__CUDA_INFINITY && its > top ? its : top;
        }
    }
    dtrain__cuda_atomic_max_u32(&shared->first_top, top);
}

/* Adds the block's limbs to the caller's. Block 0 carries these, also by additions, so it waits for no block. Limbs
 * stay below 2^45 after any number of calls. */
DTRAIN__CUDA_FN void dtrain__cuda_squares_deliver(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                                  const dtrain__cuda_squares_shared *shared)
{
    uint64_t value = 0, carry, before;
    if (at.thread >= DTRAIN__CUDA_NORM_DIGITS + 2)
        return;
    if (at.thread < DTRAIN__CUDA_NORM_DIGITS) {
        value = shared->limbs[at.thread];
    } else {
        uint32_t from = 2 * at.thread - DTRAIN__CUDA_NORM_DIGITS;
        value = shared->limbs[from] | (uint64_t)shared->limbs[from + 1] << 32;
    }
    if (value == 0 && at.block > 0)
        return;
    before = dtrain__cuda_atomic_add_u64(args->limbs + at.thread, value);
    if (at.block > 0 || at.thread >= DTRAIN__CUDA_NORM_DIGITS - 1)
        return;
    carry = (uint64_t)((int64_t)(before + value) >> 32);
    if (carry != 0) {
        dtrain__cuda_atomic_add_u64(args->limbs + at.thread, 0u - (carry << 32));
        dtrain__cuda_atomic_add_u64(args->limbs + at.thread + 1, carry);
    }
}

/* Adds, as integers, the accumulators of all threads whose window is the block's highest; the others go to the limbs.
 */
DTRAIN__CUDA_FN void dtrain__cuda_squares_part(dtrain__cuda_at at, dtrain__cuda_squares_shared *shared,
                                               dtrain__cuda_squares_own *own)
{
    if (own->top != shared->top)
        dtrain__cuda_squares_flush_own(shared, own);
    for (int i = 0; i < 3; i++)
        shared->parts[i][at.thread] = dtrain__cuda_squares_places(own, i);
}

DTRAIN__CUDA_FN int64_t dtrain__cuda_squares_sum16(const int64_t *from)
{
    int64_t sum = 0;
    for (int i = 0; i < 16; i++)
        sum += from[i];
    return sum;
}

DTRAIN__CUDA_FN void dtrain__cuda_squares_run_body(const dtrain__cuda_squares_args *args, dtrain__cuda_at at,
                                                   dtrain__cuda_squares_shared *shared, dtrain__cuda_squares_own *own,
                                                   int phase)
{
    if (phase == 0) {
        if (at.thread < 24)
            shared->limbs[at.thread] = 0;
        if (at.thread == 24)
            shared->first_top = shared->top = 0;
    } else if (phase == 1) {
        dtrain__cuda_squares_sample(args, at, shared);
    } else if (phase == 2) {
        dtrain__cuda_squares_place(own, shared->first_top);
        dtrain__cuda_squares_all(args, at, shared, own);
        dtrain__cuda_squares_ends(args, at, shared, own);
        if (own->top != shared->first_top || at.thread == 0)
            dtrain__cuda_atomic_max_u32(&shared->top, own->top);
    } else if (phase == 3) {
        dtrain__cuda_squares_part(at, shared, own);
    } else if (phase == 4) {
        if (at.thread < 48)
            shared->sums[at.thread / 16][at.thread % 16] =
                dtrain__cuda_squares_sum16(shared->parts[at.thread / 16] + at.thread % 16 * 16);
    } else if (phase == 5) {
        if (at.thread < 3)
            shared->parts[at.thread][0] = dtrain__cuda_squares_sum16(shared->sums[at.thread]);
    } else if (phase == 6) {
        if (at.thread == 0)
            dtrain__cuda_squares_flush(shared->limbs, shared->top, shared->parts[0][0], shared->parts[1][0],
                                       shared->parts[2][0]);
    } else {
        dtrain__cuda_squares_deliver(args, at, shared);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_squares_run, dtrain__cuda_squares_args, dtrain__cuda_squares_shared,
                    dtrain__cuda_squares_own, DTRAIN__CUDA_NORM_THREADS, 8)

/* Returns as many blocks as the GPU holds at once, or fewer if there is less to do. */
static size_t dtrain__cuda_norm_blocks(dtrain_device *device, size_t vectors)
{
    size_t most = (size_t)dtrain__cuda_queue_of(device)->processors * 4;
    size_t blocks = vectors / (4 * (size_t)DTRAIN__CUDA_NORM_THREADS) + 1;
    return blocks < most ? blocks : most;
}

static dtrain_status dtrain__cuda_squares(dtrain_device *device, const float *x, size_t count, int64_t *limbs)
{
    const char *call = "device_squares";
    const dtrain__cuda_array all[] = {{"x", x, sizeof *x, count, 1}, {NULL, NULL, 0, 0, 0}};
    const dtrain__cuda_array sum[] = {{"limbs", limbs, sizeof *limbs, DTRAIN_SQUARES_LIMBS, 1}, {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_squares_args args = {x, (uint64_t *)limbs, {0, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_walk_arrays(device, call, all, &args.walk);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_arrays(device, call, sum);
    size_t blocks = dtrain__cuda_norm_blocks(device, args.walk.groups);
    return status == DTRAIN_OK ? dtrain__cuda_squares_run_launch(device, call, blocks, &args) : status;
}

typedef struct dtrain__cuda_clip_args {
    const int64_t *limbs;
    double *norm;
    float *x;
    dtrain__cuda_walk walk;
    float max_norm;
} dtrain__cuda_clip_args;

typedef struct dtrain__cuda_clip_shared {
    int64_t limbs[DTRAIN_SQUARES_LIMBS];
    float factor;
    int shorten;
} dtrain__cuda_clip_shared;

/* Does what dtrain__norm_value does, and carries the limbs. */
DTRAIN__CUDA_FN double dtrain__cuda_clip_value(int64_t *limbs)
{
    int top = DTRAIN__CUDA_NORM_DIGITS - 1, zeros = 0;
    uint64_t bits = 0, rest = 0;
    DTRAIN__CUDA_ROLLED
    for (int i = 0; i < top; i++) {
        limbs[i + 1] += limbs[i] >> 32;
        limbs[i] &= 0xFFFFFFFF;
    }
    while (top > 0 && limbs[top] == 0)
        top--;
    DTRAIN__CUDA_ROLLED
    for (int i = top; i >= 0; i--) {
        uint64_t limb = (uint64_t)limbs[i];
        if (i > top - 2)
            bits |= limb << (i == top ? 32 : 0);
        else
            rest |= i == top - 2 ? limb << 32 : (uint64_t)(limb != 0);
    }
    while (bits != 0 && bits >> 63 == 0) {
        bits = bits << 1 | rest >> 63;
        rest = rest << 1;
        zeros++;
    }
    if (bits != 0) {
        uint64_t exponent = (uint64_t)(32 * top + 31 - zeros + DTRAIN__CUDA_NORM_LOWEST + 1023);
        uint64_t below = (bits & 0x7FF) | (uint64_t)(rest != 0), half = 0x400;
        bits = (exponent << 52) + (bits << 1 >> 12);
        bits += below > half || (below == half && (bits & 1));
    }
    if (limbs[DTRAIN_SQUARES_LIMBS - 1] != 0)
        bits = UINT64_C(0x7FF8000000000000);
    else if (limbs[DTRAIN_SQUARES_LIMBS - 2] != 0)
        bits = UINT64_C(0x7FF0000000000000);
    return dtrain__cuda_double_of(bits);
}

DTRAIN__CUDA_FN void dtrain__cuda_clip_measure(const dtrain__cuda_clip_args *args, dtrain__cuda_at at,
                                               dtrain__cuda_clip_shared *shared)
{
    double norm = dtrain__cuda_sqrt_f64(dtrain__cuda_clip_value(shared->limbs));
    double most = dtrain__cuda_widen_f32(args->max_norm);
    int finite = dtrain__cuda_bits_f64(norm) < UINT64_C(0x7FF0000000000000);
    if (at.block == 0)
        *args->norm = norm;
    shared->factor = dtrain__cuda_narrow_f64(dtrain__cuda_div_f64(most, norm));
    shared->shorten = most != 0.0 && finite && norm > most;
}

DTRAIN__CUDA_FN void dtrain__cuda_clip_run_body(const dtrain__cuda_clip_args *args, dtrain__cuda_at at,
                                                dtrain__cuda_clip_shared *shared, dtrain__cuda_none *own, int phase)
{
    (void)own;
    if (phase == 0) {
        if (at.thread < DTRAIN_SQUARES_LIMBS)
            shared->limbs[at.thread] = args->limbs[at.thread];
    } else if (phase == 1) {
        if (at.thread == 0)
            dtrain__cuda_clip_measure(args, at, shared);
    } else if (shared->shorten) {
        dtrain__cuda_axpy_args scale = {NULL, args->x, args->walk, 0, shared->factor};
        dtrain__cuda_scale_f32_body(&scale, at, NULL, NULL, 0);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_clip_run, dtrain__cuda_clip_args, dtrain__cuda_clip_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_NORM_THREADS, 3)

static dtrain_status dtrain__cuda_clip(dtrain_device *device, const int64_t *limbs, float max_norm, double *norm,
                                       float *x, size_t count)
{
    const char *call = "device_clip";
    const dtrain__cuda_array sum[] = {{"limbs", limbs, sizeof *limbs, DTRAIN_SQUARES_LIMBS, 1},
                                      {"norm", norm, sizeof *norm, 1, 1},
                                      {NULL, NULL, 0, 0, 0}};
    const dtrain__cuda_array all[] = {{"x", x, sizeof *x, count, 1}, {NULL, NULL, 0, 0, 0}};
    dtrain__cuda_clip_args args = {limbs, norm, x, {0, 0, 0, 0}, max_norm};
    dtrain_status status = dtrain__cuda_arrays(device, call, sum);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_walk_arrays(device, call, all, &args.walk);
    /* if nothing is shortened, one block writes the norm */
    size_t blocks = dtrain__cuda_norm_blocks(device, max_norm > 0.0f ? args.walk.groups : 0);
    return status == DTRAIN_OK ? dtrain__cuda_clip_run_launch(device, call, blocks, &args) : status;
}

#endif
