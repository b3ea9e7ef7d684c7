/* ---- >>matrix_product ----
 * The matrix product of layers, for programs that bring no BLAS. */
#ifndef DTRAIN__GEMM_H
#define DTRAIN__GEMM_H
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c = alpha op(a) x op(b) + beta c over row-major float32 matrices of any leading dimension.
 *
 *   m, n, k      op(a) is m x k, op(b) is k x n, c is m x n; zero is legal
 *   lda, ldb, ldc   elements from one row to the next, as stored
 *   alpha        0 leaves a and b unread
 *   beta         0 overwrites c without reading it
 *   override     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), defined
 *                before the implementation, takes the place of the built-in product
 *   bits         the same for one shape under any compiler flags, with avx2, avx512 and neon, which round each
 *                term once; and the same elsewhere, where each term is rounded twice
 *   source       Goto and van de Geijn, ACM TOMS 34(3), 2008
 *
 * any thread; c overlaps neither a nor b; allocates nothing */
DTRAIN_API void dtrain_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                             const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc);

#ifdef __cplusplus
}
#endif

#endif
