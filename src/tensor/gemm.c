/* ---- >>gemm ----
 * The float32 matrix product. op(b) is packed in blocks of 256 x 256 on the stack; a kernel per instruction
 * set multiplies a few rows of op(a), read where they lie, by a packed panel in registers. Each element of c
 * is a sum over k in ascending order, a block of 256 at a time, so the bits depend on shape and instruction
 * set alone. Goto and van de Geijn, ACM TOMS 34(3), 2008; Van Zee and van de Geijn, ACM TOMS 41(3), 2015. */
#ifndef DTRAIN__GEMM
#define DTRAIN__GEMM
#include "tensor.h"
#include "isa.c"
#include "vector.c"

#define DTRAIN__GEMM_KC 256
#define DTRAIN__GEMM_NC 256

/* c[rows][columns] (+)= a[rows][k] x panel[k][width]: rows and columns up to the kernel's own tile. */
typedef void (*dtrain__gemm_kernel)(size_t k, const float *a, size_t a_row, size_t a_column, const float *panel,
                                    float *c, size_t ldc, size_t rows, size_t columns, int accumulate);

#define DTRAIN__GEMM_PARAMETERS                                                                                 \
    size_t k, const float *a, size_t a_row, size_t a_column, const float *panel, float *c, size_t ldc, size_t rows, \
        size_t columns, int accumulate

static void dtrain__gemm_store(const float *tile, size_t width, float *c, size_t ldc, size_t rows, size_t columns,
                               int accumulate)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            c[i * ldc + j] = accumulate ? c[i * ldc + j] + tile[i * width + j] : tile[i * width + j];
}

/* A kernel of ROWS rows by VECTORS vectors of LANES floats. Rows beyond the matrix repeat the last one; what they
 * and the padding of the panel give is not stored. */
#define DTRAIN__GEMM_KERNEL(name, attributes, vector, LANES, ROWS, VECTORS, zero, broadcast, load, store, fma, add) \
    attributes static void name(DTRAIN__GEMM_PARAMETERS)                                                      \
    {                                                                                                         \
        vector sum[ROWS][VECTORS];                                                                            \
        const float *row[ROWS];                                                                               \
        for (size_t i = 0; i < ROWS; i++) {                                                                   \
            row[i] = a + (i < rows ? i : rows - 1) * a_row;                                                   \
            for (size_t v = 0; v < VECTORS; v++)                                                              \
                sum[i][v] = zero();                                                                           \
        }                                                                                                     \
        for (size_t p = 0; p < k; p++) {                                                                      \
            vector b[VECTORS];                                                                                \
            for (size_t v = 0; v < VECTORS; v++)                                                              \
                b[v] = load(panel + p * (VECTORS * LANES) + v * LANES);                                       \
            for (size_t i = 0; i < ROWS; i++) {                                                               \
                vector x = broadcast(row[i][p * a_column]);                                                   \
                for (size_t v = 0; v < VECTORS; v++)                                                          \
                    sum[i][v] = fma(x, b[v], sum[i][v]);                                                      \
            }                                                                                                 \
        }                                                                                                     \
        if (rows == ROWS && columns == VECTORS * LANES) {                                                     \
            for (size_t i = 0; i < ROWS; i++)                                                                 \
                for (size_t v = 0; v < VECTORS; v++) {                                                        \
                    float *to = c + i * ldc + v * LANES;                                                      \
                    store(to, accumulate ? add(load(to), sum[i][v]) : sum[i][v]);                             \
                }                                                                                             \
        } else {                                                                                              \
            float tile[ROWS * VECTORS * LANES];                                                               \
            for (size_t i = 0; i < ROWS; i++)                                                                 \
                for (size_t v = 0; v < VECTORS; v++)                                                          \
                    store(tile + i * (VECTORS * LANES) + v * LANES, sum[i][v]);                               \
            dtrain__gemm_store(tile, VECTORS * LANES, c, ldc, rows, columns, accumulate);                     \
        }                                                                                                     \
    }

DTRAIN__EXACT_BEGIN

#if defined(DTRAIN__X86)
DTRAIN__GEMM_KERNEL(dtrain__gemm_avx512, __attribute__((target("avx512f"))), __m512, 16, 8, 2, _mm512_setzero_ps,
                    _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps)
DTRAIN__GEMM_KERNEL(dtrain__gemm_avx2, __attribute__((target("avx2,fma"))), __m256, 8, 6, 2, _mm256_setzero_ps,
                    _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps)
#endif

/* Four floats in terms of the compiler's own vectors: SSE2, NEON, or whatever there is. */
typedef float dtrain__f32x4 __attribute__((vector_size(16)));
typedef uint32_t dtrain__u32x4 __attribute__((vector_size(16)));

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_zero(void)
{
    dtrain__f32x4 x = {0, 0, 0, 0};
    return x;
}

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_set(float value)
{
    dtrain__f32x4 x = {value, value, value, value};
    return x;
}

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_load(const float *from)
{
    dtrain__f32x4 x;
    memcpy(&x, from, sizeof x);
    return x;
}

DTRAIN__INLINE void dtrain__x4_store(float *to, dtrain__f32x4 x)
{
    memcpy(to, &x, sizeof x);
}

DTRAIN__INLINE dtrain__f32x4 dtrain__x4_add(dtrain__f32x4 a, dtrain__f32x4 b)
{
    return a + b;
}

/* Two roundings: this kernel's bits are those of processors without a fused product. */
DTRAIN__INLINE dtrain__f32x4 dtrain__x4_fma(dtrain__f32x4 a, dtrain__f32x4 b, dtrain__f32x4 c)
{
    dtrain__f32x4 product = a * b;
#if defined(__clang__) && defined(__FAST_MATH__)
    dtrain__u32x4 bits;
    uint32_t zero = dtrain__opaque_zero;
    memcpy(&bits, &product, sizeof bits);
    dtrain__u32x4 zeros = {zero, zero, zero, zero};
    bits ^= zeros;
    memcpy(&product, &bits, sizeof bits);
#endif
    return product + c;
}

DTRAIN__GEMM_KERNEL(dtrain__gemm_base, , dtrain__f32x4, 4, 4, 2, dtrain__x4_zero, dtrain__x4_set, dtrain__x4_load,
                    dtrain__x4_store, dtrain__x4_fma, dtrain__x4_add)

DTRAIN__EXACT_END

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
            for (size_t p = 0; p < k; p++)
                memcpy(panel + p * width, b + p * b_row + j, columns * sizeof(float));
        else
            for (size_t p = 0; p < k; p += 8) /* a line of each column at a time */
                for (size_t i = 0; i < columns; i++)
                    for (size_t q = p; q < p + 8 && q < k; q++)
                        panel[q * width + i] = b[q * b_row + (j + i) * b_column];
        if (alpha != 1)
            dtrain__scale_f32(panel, (double)alpha, k * width);
    }
}

static void dtrain__gemm_builtin(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                                 const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c,
                                 size_t ldc)
{
    float pack[DTRAIN__GEMM_KC * DTRAIN__GEMM_NC] __attribute__((aligned(64)));
    dtrain__gemm_kernel kernel = dtrain__gemm_base;
    size_t rows = 4, width = 8, a_row = transpose_a ? 1 : lda, a_column = transpose_a ? lda : 1;
    size_t b_row = transpose_b ? 1 : ldb, b_column = transpose_b ? ldb : 1;
#if defined(DTRAIN__X86)
    int isa = dtrain__isa();
    if (isa == DTRAIN__ISA_AVX512) {
        kernel = dtrain__gemm_avx512;
        rows = 8;
        width = 32;
    } else if (isa == DTRAIN__ISA_AVX2) {
        kernel = dtrain__gemm_avx2;
        rows = 6;
        width = 16;
    }
#endif
    for (size_t i = 0; i < m && n > 0; i++) {
        if (beta == 0 && k == 0)
            memset(c + i * ldc, 0, n * sizeof(float));
        else if (beta != 0 && beta != 1)
            dtrain__scale_f32(c + i * ldc, (double)beta, n);
    }
    for (size_t jc = 0; jc < n; jc += DTRAIN__GEMM_NC) {
        size_t nc = n - jc < DTRAIN__GEMM_NC ? n - jc : DTRAIN__GEMM_NC;
        for (size_t pc = 0; pc < k; pc += DTRAIN__GEMM_KC) {
            size_t kc = k - pc < DTRAIN__GEMM_KC ? k - pc : DTRAIN__GEMM_KC;
            dtrain__gemm_pack(b + pc * b_row + jc * b_column, b_row, b_column, kc, nc, width, alpha, pack);
            for (size_t i = 0; i < m; i += rows)
                for (size_t j = 0; j < nc; j += width)
                    kernel(kc, a + i * a_row + pc * a_column, a_row, a_column, pack + j * kc, c + i * ldc + jc + j, ldc,
                           m - i < rows ? m - i : rows, nc - j < width ? nc - j : width, beta != 0 || pc > 0);
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

#endif
