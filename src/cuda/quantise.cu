/* ---- >>cuda-quantise ----
 * int8 and fp8 with a scale a block, in the layout and with the bits of >>quantise: the scales of all blocks, then a
 * byte an element. A tile holds several blocks of up to 4,096 elements. A thread block keeps it in registers while it
 * finds their scales, so it reads them once. A longer block has a thread block of its own, which reads it twice. Packed
 * vectors and floats may start at any address. Whole words are loaded and stored only at addresses that suit their
 * size. */
#ifndef DTRAIN__CUDA_QUANTISE
#define DTRAIN__CUDA_QUANTISE
#include "body.h"
#include "queue.cu"

#define DTRAIN__CUDA_QUANTISE_THREADS 256u
#define DTRAIN__CUDA_QUANTISE_VECTORS 4u /* of 4 elements, held by a thread */
#define DTRAIN__CUDA_QUANTISE_TILE (4u * DTRAIN__CUDA_QUANTISE_VECTORS * DTRAIN__CUDA_QUANTISE_THREADS)
#define DTRAIN__CUDA_QUANTISE_SPREAD 8u /* words for a block's largest, so that few threads of a warp meet */
#define DTRAIN__CUDA_QUANTISE_LONG 512u /* threads for a long block */

typedef struct dtrain__cuda_quantise_args {
    const unsigned char *in;
    unsigned char *out;
    size_t count, block, blocks;
    uint32_t tile;   /* elements: whole blocks, or a part of a long one */
    uint32_t whole;  /* blocks in a tile */
    uint32_t parts;  /* tiles in a long block; 1 if blocks fit a tile */
    uint32_t divide; /* 2^20 / vectors in a block, rounded up: see dtrain__cuda_quantise_block_of */
    int floats;      /* 16, 4 or 1: the floats' address is a multiple of it */
    int packed;      /* the same for the packed bytes, whose codes are loaded and stored 4 at a time */
    int add;         /* unpack adds to the floats */
} dtrain__cuda_quantise_args;

/* A tile: its first element, that element's block, and the number of elements. */
typedef struct dtrain__cuda_quantise_tile {
    size_t begin, block;
    uint32_t count;
} dtrain__cuda_quantise_tile;

typedef struct dtrain__cuda_quantise_own {
    dtrain__cuda_vector x[DTRAIN__CUDA_QUANTISE_VECTORS];
} dtrain__cuda_quantise_own;

/* For each block of a tile, of 8 elements or more: first its largest magnitude, spread; then its factors. */
typedef struct dtrain__cuda_quantise_shared {
    uint32_t word[DTRAIN__CUDA_QUANTISE_TILE / 8][DTRAIN__CUDA_QUANTISE_SPREAD];
} dtrain__cuda_quantise_shared;

typedef struct dtrain__cuda_quantise_long_own {
    uint32_t largest;
} dtrain__cuda_quantise_long_own;

typedef struct dtrain__cuda_quantise_long_shared {
    uint32_t largest[DTRAIN__CUDA_QUANTISE_LONG], grow, inverse;
} dtrain__cuda_quantise_long_shared;

/* Loads a thread's 4 vectors of n floats, `stride` vectors apart, from vector `first` on; n is above 0. Vectors beyond
 * the floats are others of them, or zeros, so that aligned loads need no branch. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_read(const unsigned char *from, uint32_t n, uint32_t first, uint32_t stride,
                                                int align, dtrain__cuda_vector *x)
{
    if (align == 16 && n % 4 == 0) {
        for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
            uint32_t at = 4 * (first + k * stride);
            x[k] = dtrain__cuda_vector_load(from + 4 * (size_t)(at < n ? at : 0), 4, 16);
        }
        return;
    }
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t at = 4 * (first + k * stride);
        x[k] = dtrain__cuda_vector_load(from + 4 * (size_t)at, at < n ? n - at : 0, align);
    }
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_max(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_largest(dtrain__cuda_vector x)
{
    return dtrain__cuda_quantise_max(dtrain__cuda_quantise_max(x.word[0] & 0x7fffffffu, x.word[1] & 0x7fffffffu),
                                     dtrain__cuda_quantise_max(x.word[2] & 0x7fffffffu, x.word[3] & 0x7fffffffu));
}

/* Returns which block of its tile a vector is in. There are at most 1,024 vectors, and as many in a block. Rounding up
 * 2^20 / vectors adds remainders below 1,023 * 1,023 < 2^20 in all, which is less than the quotient's next step. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_block_of(const dtrain__cuda_quantise_args *args, uint32_t vector)
{
    return args->parts > 1 ? 0 : vector * args->divide >> 20;
}

DTRAIN__CUDA_FN dtrain__cuda_quantise_tile dtrain__cuda_quantise_tile_of(const dtrain__cuda_quantise_args *args,
                                                                         size_t block)
{
    dtrain__cuda_quantise_tile tile = {block * args->tile, block, 0};
    size_t left, in_block = args->tile;
    if (args->parts > 1) {
        size_t done = block % args->parts * args->tile;
        tile.block = block / args->parts;
        tile.begin = tile.block * args->block + done;
        in_block = args->block - done < in_block ? args->block - done : in_block;
    } else {
        tile.block = block * args->whole;
    }
    left = args->count - tile.begin;
    tile.count = (uint32_t)(left < in_block ? left : in_block);
    return tile;
}

/* Returns a block's scale as bits, and the factors of its numbers: first *grow, then *inverse. In a block with a NaN or
 * an infinity *grow is 0, and so are its codes. Blocks below 2^-100 grow first, as in dtrain__quantise_scale_of. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_scale(uint32_t largest, float top, uint32_t *grow, uint32_t *inverse)
{
    float value = dtrain__cuda_float_of(largest), by = dtrain__cuda_float_of(0x3f800000u);
    *grow = largest >= 0x7f800000u ? 0 : 0x3f800000u;
    *inverse = 0;
    if (largest >= 0x7f800000u || largest == 0)
        return largest == 0 ? 0 : 0x7fc00000u;
    if (largest < 0x0d800000u) {
        by = dtrain__cuda_float_of(0x71800000u); /* 2^100 */
        *grow = 0x71800000u;
    }
    *inverse = dtrain__cuda_bits_f32(dtrain__cuda_div_f32(top, dtrain__cuda_mul_f32(value, by)));
    return dtrain__cuda_bits_f32(dtrain__cuda_div_f32(value, top));
}

/* The constants' last places are those of the codes: 1, and 2^-9 for fp8's subnormals. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_encode(float x, int fp8)
{
    uint32_t bits = dtrain__cuda_bits_f32(x), size = bits & 0x7fffffffu, normal, small;
    if (!fp8)
        return dtrain__cuda_bits_f32(dtrain__cuda_add_f32(x, 12582912.0f)) & 0xffu;
    normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
    small = dtrain__cuda_bits_f32(dtrain__cuda_add_f32(dtrain__cuda_float_of(size), 24576.0f));
    return (bits >> 24 & 0x80u) | ((size < 121u << 23 ? small : normal) & 0x7fu);
}

DTRAIN__CUDA_FN float dtrain__cuda_quantise_decode(uint32_t code, int fp8)
{
    uint32_t size = code & 0x7fu, bits = (size << 20) + (120u << 23);
    if (!fp8)
        return (float)(int32_t)(int8_t)(unsigned char)code;
    if (size < 8)
        bits = dtrain__cuda_bits_f32(dtrain__cuda_mul_f32((float)(int32_t)size, 0.001953125f)); /* 2^-9 */
    return dtrain__cuda_float_of(bits | (code & 0x80u) << 24);
}

/* Returns the codes of 4 numbers, the first one lowest. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_codes(dtrain__cuda_vector x, uint32_t grow, uint32_t inverse, int fp8)
{
    float by = dtrain__cuda_float_of(grow), and_by = dtrain__cuda_float_of(inverse);
    uint32_t codes = 0;
    for (uint32_t k = 0; k < 4; k++) {
        float grown = dtrain__cuda_mul_f32(dtrain__cuda_float_of(x.word[k]), by);
        codes |= dtrain__cuda_quantise_encode(dtrain__cuda_mul_f32(grown, and_by), fp8) << (8 * k);
    }
    return grow == 0 ? 0 : codes;
}

DTRAIN__CUDA_FN void dtrain__cuda_quantise_put_codes(unsigned char *to, uint32_t codes, uint32_t n, int align)
{
    if (n >= 4 && align >= 4) {
        dtrain__cuda_word_store(to, codes, align);
        return;
    }
    for (uint32_t k = 0; k < 4; k++)
        if (k < n)
            to[k] = (unsigned char)(codes >> (8 * k));
}

/* Runs phase 2 of a tile: the scales of its blocks. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_scales(const dtrain__cuda_quantise_args *args,
                                                  dtrain__cuda_quantise_tile tile, uint32_t thread, float top,
                                                  dtrain__cuda_quantise_shared *shared)
{
    for (uint32_t b = thread; b < args->whole && b * args->block < tile.count; b += DTRAIN__CUDA_QUANTISE_THREADS) {
        uint32_t largest = 0, *word = shared->word[b], scale;
        for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_SPREAD; k++)
            largest = dtrain__cuda_quantise_max(largest, word[k]);
        scale = dtrain__cuda_quantise_scale(largest, top, &word[0], &word[1]);
        dtrain__cuda_word_store(args->out + 4 * (tile.block + b), scale, args->packed);
    }
}

/* Packs a tile of whole blocks: loads, largest magnitudes, scales, codes. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_pack_tile(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                     dtrain__cuda_quantise_shared *shared,
                                                     dtrain__cuda_quantise_own *own, int phase, int fp8)
{
    dtrain__cuda_quantise_tile tile = dtrain__cuda_quantise_tile_of(args, at.block);
    unsigned char *codes = args->out + 4 * args->blocks + tile.begin;
    if (phase == 0) {
        uint32_t words = args->whole * DTRAIN__CUDA_QUANTISE_SPREAD, *word = shared->word[0];
        dtrain__cuda_quantise_read(args->in + 4 * tile.begin, tile.count, at.thread, at.threads, args->floats, own->x);
        for (uint32_t i = at.thread; i < words; i += at.threads)
            word[i] = 0;
    }
    if (phase == 2)
        dtrain__cuda_quantise_scales(args, tile, at.thread, fp8 ? 448.0f : 127.0f, shared);
    if (phase != 1 && phase != 3)
        return;
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t vector = at.thread + k * at.threads, first = 4 * vector;
        uint32_t *word = shared->word[dtrain__cuda_quantise_block_of(args, vector)];
        if (first < tile.count && phase == 1)
            dtrain__cuda_atomic_max_u32(word + at.thread % DTRAIN__CUDA_QUANTISE_SPREAD,
                                        dtrain__cuda_quantise_largest(own->x[k]));
        if (first < tile.count && phase == 3)
            dtrain__cuda_quantise_put_codes(codes + first,
                                            dtrain__cuda_quantise_codes(own->x[k], word[0], word[1], fp8),
                                            tile.count - first, args->packed);
    }
}

/* Runs phases 1 and 2 of a long block: the largest of all threads, then the scale. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_long_scale(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                      dtrain__cuda_quantise_long_shared *shared, int phase, float top)
{
    uint32_t largest = 0, stride = phase == 1 ? 32 : 1, end = phase == 1 ? DTRAIN__CUDA_QUANTISE_LONG : 32;
    if (at.thread >= stride)
        return;
    for (uint32_t i = at.thread; i < end; i += stride)
        largest = dtrain__cuda_quantise_max(largest, shared->largest[i]);
    if (phase == 1)
        shared->largest[at.thread] = largest;
    else
        dtrain__cuda_word_store(args->out + 4 * at.block,
                                dtrain__cuda_quantise_scale(largest, top, &shared->grow, &shared->inverse),
                                args->packed);
}

/* Packs a block longer than a tile: its largest magnitude, its scale, and its numbers once more for the codes. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_pack_long(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                     dtrain__cuda_quantise_long_shared *shared,
                                                     dtrain__cuda_quantise_long_own *own, int phase, int fp8)
{
    size_t begin = at.block * args->block, left = args->count - begin;
    uint32_t n = (uint32_t)(left < args->block ? left : args->block);
    unsigned char *codes = args->out + 4 * args->blocks + begin;
    if (phase == 1 || phase == 2)
        dtrain__cuda_quantise_long_scale(args, at, shared, phase, fp8 ? 448.0f : 127.0f);
    if (phase == 1 || phase == 2)
        return;
    own->largest = 0;
    for (uint32_t v = at.thread; 4 * v < n; v += DTRAIN__CUDA_QUANTISE_VECTORS * at.threads) {
        dtrain__cuda_vector x[DTRAIN__CUDA_QUANTISE_VECTORS];
        dtrain__cuda_quantise_read(args->in + 4 * begin, n, v, at.threads, args->floats, x);
        for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
            uint32_t first = 4 * (v + k * at.threads);
            own->largest = dtrain__cuda_quantise_max(own->largest, dtrain__cuda_quantise_largest(x[k]));
            if (phase == 3 && first < n)
                dtrain__cuda_quantise_put_codes(codes + first,
                                                dtrain__cuda_quantise_codes(x[k], shared->grow, shared->inverse, fp8),
                                                n - first, args->packed);
        }
    }
    if (phase == 0)
        shared->largest[at.thread] = own->largest;
}

/* Multiplies 4 decoded numbers by their scale, adds the old values if asked to, and stores those below n. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_put_floats(const dtrain__cuda_quantise_args *args, unsigned char *to,
                                                      uint32_t codes, uint32_t scale, dtrain__cuda_vector old,
                                                      uint32_t n, int fp8)
{
    dtrain__cuda_vector x;
    for (uint32_t k = 0; k < 4; k++) {
        float number = dtrain__cuda_mul_f32(dtrain__cuda_quantise_decode(codes >> (8 * k) & 0xffu, fp8),
                                            dtrain__cuda_float_of(scale));
        if (args->add)
            number = dtrain__cuda_add_f32(dtrain__cuda_float_of(old.word[k]), number);
        x.word[k] = dtrain__cuda_bits_f32(number);
    }
    dtrain__cuda_vector_store(to, x, n, args->floats);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_quantise_get_codes(const unsigned char *from, uint32_t n)
{
    uint32_t codes = 0;
    for (uint32_t k = 0; k < 4; k++)
        if (k < n)
            codes |= (uint32_t)from[k] << (8 * k);
    return codes;
}

/* Loads the codes of a thread's 4 vectors and their blocks' scales; beyond the tile, those of its first vector. */
DTRAIN__CUDA_FN void dtrain__cuda_quantise_read_codes(const dtrain__cuda_quantise_args *args,
                                                      dtrain__cuda_quantise_tile tile, dtrain__cuda_at at,
                                                      uint32_t *codes, uint32_t *scale)
{
    const unsigned char *from = args->in + 4 * args->blocks + tile.begin, *scales = args->in + 4 * tile.block;
    int whole = args->packed >= 4 && tile.count % 4 == 0;
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t vector = at.thread + k * at.threads, left;
        vector = 4 * vector < tile.count ? vector : 0;
        left = tile.count - 4 * vector;
        codes[k] = whole ? dtrain__cuda_word_load(from + 4 * vector, 4)
                         : dtrain__cuda_quantise_get_codes(from + 4 * vector, left);
        scale[k] = dtrain__cuda_word_load(scales + 4 * dtrain__cuda_quantise_block_of(args, vector), args->packed);
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_quantise_unpack_tile(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at,
                                                       int fp8)
{
    dtrain__cuda_quantise_tile tile = dtrain__cuda_quantise_tile_of(args, at.block);
    unsigned char *to = args->out + 4 * tile.begin;
    uint32_t codes[DTRAIN__CUDA_QUANTISE_VECTORS], scale[DTRAIN__CUDA_QUANTISE_VECTORS];
    dtrain__cuda_vector old[DTRAIN__CUDA_QUANTISE_VECTORS];
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++)
        old[k].word[0] = old[k].word[1] = old[k].word[2] = old[k].word[3] = 0;
    dtrain__cuda_quantise_read_codes(args, tile, at, codes, scale);
    if (args->add)
        dtrain__cuda_quantise_read(to, tile.count, at.thread, at.threads, args->floats, old);
    for (uint32_t k = 0; k < DTRAIN__CUDA_QUANTISE_VECTORS; k++) {
        uint32_t first = 4 * (at.thread + k * at.threads);
        if (first < tile.count)
            dtrain__cuda_quantise_put_floats(args, to + 4 * (size_t)first, codes[k], scale[k], old[k],
                                             tile.count - first, fp8);
    }
}

/* fp8 is a constant in each kernel, so that neither has the other's code. */
#define DTRAIN__CUDA_QUANTISE_KERNELS(name, fp8) \
    DTRAIN__CUDA_FN void name##_pack_body(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at, \
                                          dtrain__cuda_quantise_shared *shared, dtrain__cuda_quantise_own *own, \
                                          int phase) \
    { \
        dtrain__cuda_quantise_pack_tile(args, at, shared, own, phase, fp8); \
    } \
    DTRAIN__CUDA_FN void name##_long_body(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at, \
                                          dtrain__cuda_quantise_long_shared *shared, \
                                          dtrain__cuda_quantise_long_own *own, int phase) \
    { \
        dtrain__cuda_quantise_pack_long(args, at, shared, own, phase, fp8); \
    } \
    DTRAIN__CUDA_FN void name##_unpack_body(const dtrain__cuda_quantise_args *args, dtrain__cuda_at at, \
                                            dtrain__cuda_none *shared, dtrain__cuda_none *own, int phase) \
    { \
        (void)shared, (void)own, (void)phase; \
        dtrain__cuda_quantise_unpack_tile(args, at, fp8); \
    } \
    DTRAIN__CUDA_KERNEL(name##_pack, dtrain__cuda_quantise_args, dtrain__cuda_quantise_shared, \
                        dtrain__cuda_quantise_own, DTRAIN__CUDA_QUANTISE_THREADS, 4) \
    DTRAIN__CUDA_KERNEL(name##_long, dtrain__cuda_quantise_args, dtrain__cuda_quantise_long_shared, \
                        dtrain__cuda_quantise_long_own, DTRAIN__CUDA_QUANTISE_LONG, 4) \
    DTRAIN__CUDA_KERNEL(name##_unpack, dtrain__cuda_quantise_args, dtrain__cuda_none, dtrain__cuda_none, \
                        DTRAIN__CUDA_QUANTISE_THREADS, 1)

DTRAIN__CUDA_QUANTISE_KERNELS(dtrain__cuda_int8, 0)
DTRAIN__CUDA_QUANTISE_KERNELS(dtrain__cuda_fp8, 1)

static dtrain__cuda_quantise_args dtrain__cuda_quantise_args_of(const void *in, void *out, size_t count, size_t block,
                                                                const void *floats, const void *packed)
{
    dtrain__cuda_quantise_args args;
    args.in = (const unsigned char *)in;
    args.out = (unsigned char *)out;
    args.count = count;
    args.block = block;
    args.blocks = count / block + (count % block != 0);
    args.tile = DTRAIN__CUDA_QUANTISE_TILE;
    args.parts = (uint32_t)((block + args.tile - 1) / args.tile);
    if (args.parts == 1)
        args.tile -= args.tile % (uint32_t)block;
    args.whole = args.tile / (uint32_t)block;
    args.divide = (uint32_t)(((1u << 20) + block / 4 - 1) / (block / 4));
    args.floats = dtrain__cuda_align_of(floats);
    args.packed = dtrain__cuda_align_of(packed);
    args.add = 0;
    return args;
}

static size_t dtrain__cuda_quantise_tiles(const dtrain__cuda_quantise_args *args)
{
    size_t whole = args->count / args->block, rest = args->count % args->block;
    return args->parts > 1 ? whole * args->parts + (rest + args->tile - 1) / args->tile
                           : args->count / args->tile + (args->count % args->tile != 0);
}

static dtrain_status dtrain__cuda_pack(dtrain_device *device, dtrain_dtype code, size_t block, const float *in,
                                       size_t count, void *out)
{
    const char *call = "device_pack";
    dtrain__cuda_quantise_args args = dtrain__cuda_quantise_args_of(in, out, count, block, in, out);
    const dtrain__cuda_array arrays[] = {
        {"in", in, sizeof *in, count, 0}, {"out", out, 1, 4 * args.blocks + count, 0}, {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_arrays(device, call, arrays);
    if (status != DTRAIN_OK)
        return status;
    if (args.parts > 1)
        return code == DTRAIN_I8 ? dtrain__cuda_int8_long_launch(device, call, args.blocks, &args)
                                 : dtrain__cuda_fp8_long_launch(device, call, args.blocks, &args);
    size_t tiles = dtrain__cuda_quantise_tiles(&args);
    return code == DTRAIN_I8 ? dtrain__cuda_int8_pack_launch(device, call, tiles, &args)
                             : dtrain__cuda_fp8_pack_launch(device, call, tiles, &args);
}

static dtrain_status dtrain__cuda_unpack(dtrain_device *device, dtrain_dtype code, size_t block, const void *in,
                                         float *out, size_t count, int add)
{
    const char *call = "device_unpack";
    dtrain__cuda_quantise_args args = dtrain__cuda_quantise_args_of(in, out, count, block, out, in);
    const dtrain__cuda_array arrays[] = {
        {"in", in, 1, 4 * args.blocks + count, 0}, {"out", out, sizeof *out, count, 0}, {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_arrays(device, call, arrays);
    if (status != DTRAIN_OK)
        return status;
    args.add = add;
    size_t tiles = dtrain__cuda_quantise_tiles(&args);
    return code == DTRAIN_I8 ? dtrain__cuda_int8_unpack_launch(device, call, tiles, &args)
                             : dtrain__cuda_fp8_unpack_launch(device, call, tiles, &args);
}

#endif
