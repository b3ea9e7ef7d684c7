/* ---- >>gemm ----
 * The float32 matrix product. op(b) is packed in blocks of 256 x 256 on the stack. A kernel for each instruction set
 * multiplies a few rows of op(a) by a packed panel in registers. The rows are read in place unless a is transposed. The
 * stack in use stays below 280 KiB, for threads that have half a megabyte.
 *
 * Each element of c is a sum over k in ascending order, a block of 256 at a time. So the bits depend on the shape, and
 * on whether a term is rounded once (AVX2, AVX-512, NEON) or twice.
 *
 *   source   Goto and van de Geijn, ACM TOMS 34(3), 2008; Van Zee and van de Geijn, ACM TOMS 41(3), 2015 */
#ifndef DTRAIN__GEMM
#define DTRAIN__GEMM
#include "gemm.h"
#include "isa.c"
#include "fold.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__GEMM_KC 256
#define DTRAIN__GEMM_NC 256
#define DTRAIN__GEMM_MC 16 /* rows of a transposed a that are packed together: one cache line of each column */

/* Computes c[rows][columns] (+)= a[rows][k] x panel[k][width], with rows and columns up to the kernel's tile. */
typedef void (*dtrain__gemm_kernel)(size_t k, const float *a, size_t a_row, size_t a_column, const float *panel,
                                    float *c, size_t ldc, size_t rows, size_t columns, int accumulate);

/* A kernel and the tile of c that it makes. width is at most DTRAIN__GEMM_NC, and rows at most DTRAIN__GEMM_MC. */
typedef struct dtrain__gemm_shape {
    dtrain__gemm_kernel kernel;
    size_t rows, width;
} dtrain__gemm_shape;

#define DTRAIN__GEMM_PARAMETERS \
    size_t k, const float *a, size_t a_row, size_t a_column, const float *panel, float *c, size_t ldc, size_t rows, \
        size_t columns, int accumulate

static void dtrain__gemm_store(const float *tile, size_t width, float *c, size_t ldc, size_t rows, size_t columns,
                               int accumulate)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            c[i * ldc + j] = accumulate ? c[i * ldc + j] + tile[i * width + j] : tile[i * width + j];
}

/* A kernel of ROWS rows by VECTORS vectors of LANES floats. Rows beyond the matrix repeat the last one. Their results,
 * and those of the panel's padding, are not stored. fmadd takes its first factor as spread(float), a `factor`. */
#define DTRAIN__GEMM_KERNEL(name, attributes, vector, LANES, ROWS, VECTORS, op, factor, spread, fmadd) \
    attributes static __attribute__((noinline)) void name(DTRAIN__GEMM_PARAMETERS) \
    { \
        vector sum[ROWS][VECTORS]; \
        const float *row[ROWS]; \
        for (size_t i = 0; i < ROWS; i++) { \
            row[i] = a + (i < rows ? i : rows - 1) * a_row; \
            for (size_t v = 0; v < VECTORS; v++) \
                sum[i][v] = op##_set1_ps(0); \
        } \
        for (size_t p = 0; p < k; p++) { \
            vector b[VECTORS]; \
            for (size_t v = 0; v < VECTORS; v++) \
                b[v] = op##_loadu_ps(panel + p * (VECTORS * LANES) + v * LANES); \
            for (size_t i = 0; i < ROWS; i++) { \
                factor x = spread(row[i][p * a_column]); \
                for (size_t v = 0; v < VECTORS; v++) \
                    sum[i][v] = fmadd(x, b[v], sum[i][v]); \
            } \
        } \
        if (rows == ROWS && columns == VECTORS * LANES) { \
            for (size_t i = 0; i < ROWS; i++) \
                for (size_t v = 0; v < VECTORS; v++) { \
                    float *to = c + i * ldc + v * LANES; \
                    if (accumulate) \
                        sum[i][v] = op##_loadu_ps(to) + sum[i][v]; \
                    op##_storeu_ps(to, sum[i][v]); \
                } \
        } else { \
            float tile[ROWS * VECTORS * LANES]; \
            for (size_t i = 0; i < ROWS; i++) \
                for (size_t v = 0; v < VECTORS; v++) \
                    op##_storeu_ps(tile + i * (VECTORS * LANES) + v * LANES, sum[i][v]); \
            dtrain__gemm_store(tile, VECTORS *LANES, c, ldc, rows, columns, accumulate); \
        } \
    }

DTRAIN__EXACT_BEGIN

#if defined(DTRAIN__X86)
DTRAIN__GEMM_KERNEL(dtrain__gemm_avx512, __attribute__((target("avx512f"))), __m512, 16, 8, 2, _mm512, __m512,
                    _mm512_set1_ps, _mm512_fmadd_ps)
DTRAIN__GEMM_KERNEL(dtrain__gemm_avx2, __attribute__((target("avx2,fma"))), __m256, 8, 6, 2, _mm256, __m256,
                    _mm256_set1_ps, _mm256_fmadd_ps)
#endif

#if defined(DTRAIN__NEON)
/* Multiplies by a lane, so that the factor need not be spread over a vector. */
DTRAIN__INLINE dtrain__x4 dtrain__gemm_fused(float a, dtrain__x4 b, dtrain__x4 c)
{
    __asm__("fmla %0.4s, %2.4s, %1.s[0]" : "+w"(c) : "w"(a), "w"(b));
    return c;
}

/* 24 accumulators and their operands fill 28 of the 32 registers. */
DTRAIN__GEMM_KERNEL(dtrain__gemm_neon, , dtrain__x4, 4, 8, 3, dtrain__x4, float, , dtrain__gemm_fused)
#endif

/* Two roundings, as on processors without a fused product. */
DTRAIN__INLINE dtrain__x4 dtrain__gemm_rounded(dtrain__x4 a, dtrain__x4 b, dtrain__x4 c)
{
    dtrain__x4 product = a * b;
#if defined(__clang__) && defined(DTRAIN__X86)
    __asm__("" : "+x"(product)); /* see DTRAIN__EXACT_BEGIN: nothing else keeps clang from contracting */
#elif defined(__clang__) && defined(__aarch64__)
    __asm__("" : "+w"(product));
#elif defined(__clang__) && defined(__ARM_FP) && defined(__arm__)
    for (int i = 0; i < 4; i++) {
        float lane = product[i];
        __asm__("" : "+t"(lane));
        product[i] = lane;
    }
#endif
    return product + c;
}

/* 8 accumulators and their operands fill the 16 registers of SSE2. */
DTRAIN__GEMM_KERNEL(dtrain__gemm_base, , dtrain__x4, 4, 4, 2, dtrain__x4, dtrain__x4, dtrain__x4_set1_ps,
                    dtrain__gemm_rounded)

DTRAIN__EXACT_END

/* Interleaves the lower halves of two vectors, or the upper ones. */
#ifdef __clang__
#define DTRAIN__GEMM_LACE(name, i, j, k, l) \
    DTRAIN__INLINE dtrain__x4 name(dtrain__x4 a, dtrain__x4 b) \
    { \
        return __builtin_shufflevector(a, b, i, j, k, l); \
    }
#else
#define DTRAIN__GEMM_LACE(name, i, j, k, l) \
    DTRAIN__INLINE dtrain__x4 name(dtrain__x4 a, dtrain__x4 b) \
    { \
        const dtrain__u32x4 lanes = {i, j, k, l}; \
        return __builtin_shuffle(a, b, lanes); \
    }
#endif
DTRAIN__GEMM_LACE(dtrain__gemm_lace_low, 0, 4, 1, 5)
DTRAIN__GEMM_LACE(dtrain__gemm_lace_high, 2, 6, 3, 7)

/* Copies k pieces of n floats that lie from_row floats apart, and then to_row. A constant size is a few moves, not a
 * call. */
static void dtrain__gemm_copy(float *to, size_t to_row, const float *from, size_t from_row, size_t k, size_t n)
{
    if (n == 32)
        for (size_t p = 0; p < k; p++)
            memcpy(to + p * to_row, from + p * from_row, 32 * sizeof(float));
    else if (n == 16)
        for (size_t p = 0; p < k; p++)
            memcpy(to + p * to_row, from + p * from_row, 16 * sizeof(float));
    else
        for (size_t p = 0; p < k; p++)
            memcpy(to + p * to_row, from + p * from_row, n * sizeof(float));
}

/* out[4][4], rows `width` floats apart, = the transpose of four columns of four floats. */
DTRAIN__INLINE void dtrain__gemm_turn_four(const float *columns, size_t apart, float *out, size_t width)
{
    dtrain__x4 v[4], low[2], high[2];
    for (size_t i = 0; i < 4; i++)
        v[i] = dtrain__x4_loadu_ps(columns + i * apart);
    for (size_t i = 0; i < 2; i++) {
        low[i] = dtrain__gemm_lace_low(v[i], v[i + 2]);
        high[i] = dtrain__gemm_lace_high(v[i], v[i + 2]);
    }
    dtrain__x4_storeu_ps(out, dtrain__gemm_lace_low(low[0], low[1]));
    dtrain__x4_storeu_ps(out + width, dtrain__gemm_lace_high(low[0], low[1]));
    dtrain__x4_storeu_ps(out + 2 * width, dtrain__gemm_lace_low(high[0], high[1]));
    dtrain__x4_storeu_ps(out + 3 * width, dtrain__gemm_lace_high(high[0], high[1]));
}

/* Transposes n columns of k floats into a panel. */
static void dtrain__gemm_turn(const float *columns, size_t apart, size_t k, size_t n, size_t width, float *panel)
{
    const size_t line = DTRAIN__CACHE_LINE / sizeof(float);
    size_t deep = k - k % 4, wide = n - n % 4;
    for (size_t p = 0; p < deep; p += line) /* a cache line of each column at a time */
        for (size_t i = 0; i < wide; i += 4)
            for (size_t q = p; q < p + line && q < deep; q += 4)
                dtrain__gemm_turn_four(columns + i * apart + q, apart, panel + q * width + i, width);
    for (size_t i = 0; i < n; i++)
        for (size_t q = i < wide ? deep : 0; q < k; q++)
            panel[q * width + i] = columns[i * apart + q];
}

/* Packs alpha x op(b)[0 .. k)[0 .. n) into panels of `width` columns, zero beyond n. */
static void dtrain__gemm_pack(const float *b, size_t b_row, size_t b_column, size_t k, size_t n, size_t width,
                              float alpha, float *pack)
{
    for (size_t j = 0; j < n; j += width) {
        size_t columns = n - j < width ? n - j : width;
        float *panel = pack + j * k;
        if (columns < width)
            memset(panel, 0, k * width * sizeof(float));
        if (b_column == 1)
            dtrain__gemm_copy(panel, width, b + j, b_row, k, columns);
        else
            dtrain__gemm_turn(b + j * b_column, b_column, k, columns, width, panel);
        if (alpha != 1)
            dtrain__fold_weigh_f32(panel, (double)alpha, panel, k * width);
    }
}

/* Asks for a row of a that a later tile reads. Processors do not foresee it, as rows may lie pages apart. */
static void dtrain__gemm_fetch(const float *row, size_t k)
{
    for (size_t p = 0; p < k; p += DTRAIN__CACHE_LINE / sizeof(float))
        __builtin_prefetch(row + p);
}

/* Asks for a tile of c, to which a kernel stores at its end. */
static void dtrain__gemm_expect(float *c, size_t ldc, size_t rows, size_t columns)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j += DTRAIN__CACHE_LINE / sizeof(float))
            __builtin_prefetch(c + i * ldc + j, 1);
}

/* Computes c (+)= op(a) x the packed nc columns of op(b). */
static void dtrain__gemm_block(const dtrain__gemm_shape *shape, const float *a, size_t lda, int transpose_a, size_t m,
                               size_t nc, size_t kc, const float *pack, float *c, size_t ldc, int accumulate)
{
    float pack_a[DTRAIN__GEMM_KC * DTRAIN__GEMM_MC] __attribute__((aligned(64)));
    int packs = transpose_a && nc > 2 * shape->width; /* with fewer panels, a is read too seldom to repay packing */
    size_t group = packs ? DTRAIN__GEMM_MC / shape->rows * shape->rows : m;
    size_t a_row = transpose_a ? 1 : lda, a_column = packs ? DTRAIN__GEMM_MC : transpose_a ? lda : 1;
    for (size_t low = 0; low < m; low += group) {
        size_t high = m - low < group ? m : low + group;
        const float *rows = a + low * (transpose_a ? 1 : lda);
        if (packs) {
            dtrain__gemm_copy(pack_a, DTRAIN__GEMM_MC, rows, lda, kc, high - low);
            rows = pack_a;
        }
        for (size_t i = low; i < high; i += shape->rows)
            for (size_t j = 0; j < nc; j += shape->width) {
                size_t panel = j / shape->width, next = i + shape->rows + panel;
                size_t tall = high - i < shape->rows ? high - i : shape->rows;
                size_t wide = nc - j < shape->width ? nc - j : shape->width;
                if (!transpose_a && panel < shape->rows && next < high)
                    dtrain__gemm_fetch(a + next * lda, kc);
                dtrain__gemm_expect(c + i * ldc + j, ldc, tall, wide);
                shape->kernel(kc, rows + (i - low) * a_row, a_row, a_column, pack + j * kc, c + i * ldc + j, ldc, tall,
                              wide, accumulate);
            }
    }
}

static dtrain__gemm_shape dtrain__gemm_choose(void)
{
    dtrain__gemm_shape shape = {dtrain__gemm_base, 4, 8};
#if defined(DTRAIN__X86)
    int isa = dtrain__isa();
    if (isa == DTRAIN__ISA_AVX512) {
        shape.kernel = dtrain__gemm_avx512;
        shape.rows = 8;
        shape.width = 32;
    } else if (isa == DTRAIN__ISA_AVX2) {
        shape.kernel = dtrain__gemm_avx2;
        shape.rows = 6;
        shape.width = 16;
    }
#elif defined(DTRAIN__NEON)
    if (dtrain__isa() != DTRAIN__ISA_SCALAR) {
        shape.kernel = dtrain__gemm_neon;
        shape.rows = 8;
        shape.width = 12;
    }
#endif
    return shape;
}

static void dtrain__gemm_builtin(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                                 const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c,
                                 size_t ldc)
{
    float pack[DTRAIN__GEMM_KC * DTRAIN__GEMM_NC] __attribute__((aligned(64)));
    dtrain__gemm_shape shape = dtrain__gemm_choose();
    size_t b_row = transpose_b ? 1 : ldb, b_column = transpose_b ? ldb : 1;
    size_t most = DTRAIN__GEMM_NC / shape.width * shape.width; /* whole panels fit into pack */
    if (m == 0 || n == 0)
        return;
    if (alpha == 0)
        k = 0;
    for (size_t i = 0; i < m; i++) {
        if (beta == 0 && k == 0)
            memset(c + i * ldc, 0, n * sizeof(float));
        else if (beta != 0 && beta != 1)
            dtrain__fold_weigh_f32(c + i * ldc, (double)beta, c + i * ldc, n);
    }
    for (size_t jc = 0; jc < n; jc += most) {
        size_t nc = n - jc < most ? n - jc : most;
        for (size_t pc = 0; pc < k; pc += DTRAIN__GEMM_KC) {
            size_t kc = k - pc < DTRAIN__GEMM_KC ? k - pc : DTRAIN__GEMM_KC;
            dtrain__gemm_pack(b + pc * b_row + jc * b_column, b_row, b_column, kc, nc, shape.width, alpha, pack);
            dtrain__gemm_block(&shape, a + pc * (transpose_a ? lda : 1), lda, transpose_a, m, nc, kc, pack, c + jc, ldc,
                               beta != 0 || pc > 0);
        }
    }
}

DTRAIN_API void dtrain_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                             const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
#ifdef DTRAIN_SGEMM
    DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
#else
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__gemm_builtin(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    dtrain__fpmode_restore(mode);
#endif
}

DTRAIN__FAST_END
#endif
