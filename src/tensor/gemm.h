/* ---- >>sgemm ----
 * The matrix product of layers, for programs that bring no BLAS. */
#ifndef DTRAIN__SGEMM_H
#define DTRAIN__SGEMM_H
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Computes c = alpha op(a) x op(b) + beta c over row-major float32 matrices of any leading dimension.
 *
 *   transpose_a, transpose_b   1: op transposes the matrix; 0: op(x) is x
 *   m, n, k                    op(a) is m x k, op(b) is k x n, c is m x n; zero is legal
 *   lda, ldb, ldc              elements from one row to the next, as stored
 *   alpha                      0: a and b are not read
 *   beta                       0: c is overwritten, and not read
 *   override                   define DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c,
 *                              ldc) before the implementation to replace the built-in product
 *   bits                       the same for one shape under any compiler flags. avx2, avx512, neon and neon-bf16
 *                              round each term once and agree with each other; elsewhere each is rounded twice
 *   stack                      up to 280 KiB; musl gives a thread 128 (pthread_attr_setstacksize gives more)
 *   source                     Goto and van de Geijn, ACM TOMS 34(3), 2008
 *
 * any thread; c overlaps neither a nor b; allocates nothing */
DTRAIN_API void dtrain_sgemm(int transpose_a, int transpose_b, size_t m, size_t n, size_t k, float alpha,
                             const float *a, size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc);

#ifdef __cplusplus
}
#endif

#endif
