/* ---- >>powersgd ----
 * A matrix M as the product of two thin ones. P = M Q is summed over ranks and made orthonormal. Q = M' P is summed.
 * The result is P Q'. The next step starts from Q, which is kept transposed. Every rank computes the result for itself.
 * So the products here have loops of their own, with the same bits on every instruction set; those of gemm differ. */
#ifndef DTRAIN__POWERSGD
#define DTRAIN__POWERSGD
#include "compress.h"
#include "feedback.c"
#include "../base/random.c"
#include "../comm/collectives.c"

#define DTRAIN__POWERSGD_LANES 16
#define DTRAIN__POWERSGD_RANKS 64

typedef struct dtrain__powersgd {
    dtrain_allocator heap, *allocator;
    size_t rows, columns, rank;
    uint64_t seed;
    float *left;  /* rows x rank */
    float *right; /* rank x columns: Q transposed; in the same block */
} dtrain__powersgd;

DTRAIN__EXACT_BEGIN

/* left = m right': lane i % 16 adds element i of a row; lanes are added as a tree. */
DTRAIN__INLINE void dtrain__powersgd_left_body(const float *m, const float *right, float *left, size_t rows,
                                               size_t columns, size_t rank)
{
    uint32_t zero = dtrain__isa_zero;
    for (size_t row = 0; row < rows; row++)
        for (size_t j = 0; j < rank; j++) {
            const float *a = m + row * columns, *b = right + j * columns;
            float lanes[DTRAIN__POWERSGD_LANES] = {0};
            size_t i = 0;
            for (; i + DTRAIN__POWERSGD_LANES <= columns; i += DTRAIN__POWERSGD_LANES)
                for (size_t k = 0; k < DTRAIN__POWERSGD_LANES; k++)
                    lanes[k] = lanes[k] + dtrain__isa_rounded_f32(a[i + k] * b[i + k], zero);
            for (size_t k = 0; i < columns; i++, k++)
                lanes[k] = lanes[k] + dtrain__isa_rounded_f32(a[i] * b[i], zero);
            for (size_t half = DTRAIN__POWERSGD_LANES / 2; half > 0; half /= 2)
                for (size_t k = 0; k < half; k++)
                    lanes[k] = lanes[k] + lanes[k + half];
            left[row * rank + j] = lanes[0];
        }
}

/* right = left' m, one row of m after the other. */
DTRAIN__INLINE void dtrain__powersgd_right_body(const float *m, float *right, const float *left, size_t rows,
                                                size_t columns, size_t rank)
{
    uint32_t zero = dtrain__isa_zero;
    for (size_t i = 0; i < rank * columns; i++)
        right[i] = 0.0f;
    for (size_t row = 0; row < rows; row++)
        for (size_t j = 0; j < rank; j++) {
            const float *a = m + row * columns;
            float *b = right + j * columns, by = left[row * rank + j];
            DTRAIN__INDEPENDENT for (size_t i = 0; i < columns; i++) b[i] =
                b[i] + dtrain__isa_rounded_f32(a[i] * by, zero);
        }
}

/* out = left right, one term after the other. */
DTRAIN__INLINE void dtrain__powersgd_product_body(float *out, const float *right, const float *left, size_t rows,
                                                  size_t columns, size_t rank)
{
    uint32_t zero = dtrain__isa_zero;
    for (size_t row = 0; row < rows; row++)
        for (size_t j = 0; j < rank; j++) {
            float *a = out + row * columns, by = left[row * rank + j];
            const float *b = right + j * columns;
            if (j == 0)
                DTRAIN__INDEPENDENT for (size_t i = 0; i < columns; i++) a[i] = by * b[i];
            else
                DTRAIN__INDEPENDENT for (size_t i = 0; i < columns; i++) a[i] =
                    a[i] + dtrain__isa_rounded_f32(by * b[i], zero);
        }
}

DTRAIN__KERNEL(dtrain__powersgd_left,
               (const float *m, const float *right, float *left, size_t rows, size_t columns, size_t rank),
               (m, right, left, rows, columns, rank))
DTRAIN__KERNEL(dtrain__powersgd_right,
               (const float *m, float *right, const float *left, size_t rows, size_t columns, size_t rank),
               (m, right, left, rows, columns, rank))
DTRAIN__KERNEL(dtrain__powersgd_product,
               (float *out, const float *right, const float *left, size_t rows, size_t columns, size_t rank),
               (out, right, left, rows, columns, rank))

/* The dot product of two columns of left. */
static double dtrain__powersgd_dot(const float *left, size_t rows, size_t rank, size_t a, size_t b)
{
    uint32_t zero = dtrain__isa_zero;
    double sum = 0.0;
    for (size_t i = 0; i < rows; i++)
        sum = sum + dtrain__isa_rounded_f64((double)left[i * rank + a] * (double)left[i * rank + b], zero);
    return sum;
}

/* Makes columns orthonormal, each against those before it. It does so twice, because float32 keeps few bits of the
 * difference of nearly equal columns. A column that depends on those before it becomes zero. */
static void dtrain__powersgd_orthonormalize(float *left, size_t rows, size_t rank)
{
    uint32_t zero = dtrain__isa_zero;
    for (size_t j = 0; j < rank; j++) {
        double before = dtrain__powersgd_dot(left, rows, rank, j, j), after = before;
        for (size_t pass = 0; pass < 2; pass++) {
            for (size_t k = 0; k < j; k++) {
                double along = dtrain__powersgd_dot(left, rows, rank, k, j);
                for (size_t i = 0; i < rows; i++)
                    left[i * rank + j] = (float)((double)left[i * rank + j] -
                                                 dtrain__isa_rounded_f64(along * (double)left[i * rank + k], zero));
            }
            after = dtrain__powersgd_dot(left, rows, rank, j, j);
            double length = dtrain__vector_sqrt_f64(after);
            int any = after > before * 1e-10 && length > 0.0;
            for (size_t i = 0; i < rows; i++)
                left[i * rank + j] = any ? (float)((double)left[i * rank + j] / length) : 0.0f;
            before = any ? 1.0 : 0.0;
        }
    }
}

DTRAIN__EXACT_END

/* Draws every row of the start again that is all zeros, or has a NaN or infinity. It would stay so otherwise. */
static void dtrain__powersgd_restart(dtrain__powersgd *p)
{
    for (size_t j = 0; j < p->rank; j++) {
        float *row = p->right + j * p->columns;
        uint32_t bits, any = 0, bad = 0;
        for (size_t i = 0; i < p->columns; i++) {
            memcpy(&bits, &row[i], sizeof bits);
            any |= bits & 0x7fffffffu;
            bad |= (uint32_t)((bits & 0x7f800000u) == 0x7f800000u);
        }
        for (size_t i = 0; (any == 0 || bad) && i < p->columns; i++)
            row[i] = dtrain_random_normal(p->seed, (uint64_t)j * p->columns + i);
    }
}

/* All-reduces a vector that is not longer than its thin matrices. */
static dtrain_status dtrain__powersgd_whole(dtrain_comm *comm, const float *in, float *residual, float *out,
                                            size_t count, uint64_t *sent)
{
    if (residual != NULL) {
        dtrain__fold_sum_f32(residual, in, count);
        memcpy(out, residual, count * sizeof(float));
        memset(residual, 0, count * sizeof(float));
        in = out;
    }
    *sent += dtrain__plan_sent_bytes(count, dtrain_comm_size(comm));
    return dtrain_all_reduce(comm, in, out, count, DTRAIN_F32, DTRAIN_SUM);
}

static dtrain_status dtrain__powersgd_thin(dtrain__powersgd *p, dtrain_comm *comm, const float *in, float *residual,
                                           float *out, size_t count, uint64_t *sent)
{
    size_t left = p->rows * p->rank, right = p->columns * p->rank;
    *sent += dtrain__plan_sent_bytes(left + right, dtrain_comm_size(comm));
    if (residual != NULL)
        dtrain__fold_sum_f32(residual, in, count);
    const float *m = residual != NULL ? residual : in;
    dtrain__powersgd_restart(p);
    dtrain__powersgd_left(m, p->right, p->left, p->rows, p->columns, p->rank);
    dtrain_status status = dtrain_all_reduce(comm, p->left, p->left, left, DTRAIN_F32, DTRAIN_SUM);
    if (status != DTRAIN_OK)
        return status;
    dtrain__powersgd_orthonormalize(p->left, p->rows, p->rank);
    dtrain__powersgd_right(m, p->right, p->left, p->rows, p->columns, p->rank);
    if (residual != NULL) {
        dtrain__powersgd_product(out, p->right, p->left, p->rows, p->columns, p->rank);
        dtrain__feedback_left(residual, out, count);
    }
    status = dtrain_all_reduce(comm, p->right, p->right, right, DTRAIN_F32, DTRAIN_SUM);
    if (status != DTRAIN_OK)
        return status;
    dtrain__powersgd_product(out, p->right, p->left, p->rows, p->columns, p->rank);
    dtrain__powersgd_restart(p); /* it is kept, and so stays finite */
    return DTRAIN_OK;
}

static dtrain_status dtrain__powersgd_reduce(const dtrain_compressor *compressor, dtrain_comm *comm, const float *in,
                                             float *residual, float *out, size_t count, uint64_t *sent)
{
    dtrain__powersgd *p = (dtrain__powersgd *)compressor->self;
    if (count != p->rows * p->columns)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "powersgd: a vector of %zu elements, the matrix has %zu x %zu: make a compressor for each "
                            "shape",
                            count, p->rows, p->columns);
    if (count == 0)
        return DTRAIN_OK;
    uint64_t mode = dtrain__fpmode_enter();
    dtrain_status status = (p->rows + p->columns) * p->rank < count
                               ? dtrain__powersgd_thin(p, comm, in, residual, out, count, sent)
                               : dtrain__powersgd_whole(comm, in, residual, out, count, sent);
    dtrain__fpmode_restore(mode);
    return status;
}

static void dtrain__powersgd_destroy(void *self)
{
    dtrain__powersgd *p = (dtrain__powersgd *)self;
    dtrain_allocator *allocator = p->allocator;
    dtrain__free(allocator, p->left);
    dtrain__free(allocator, p);
}

DTRAIN_API dtrain_status dtrain_compressor_powersgd(dtrain_compressor *compressor, size_t rows, size_t columns,
                                                    int rank, uint64_t seed, dtrain_allocator *allocator)
{
    size_t bytes, r = rank == 0 ? 4 : (size_t)rank;
    if (compressor == NULL || rank < 0 || rank > DTRAIN__POWERSGD_RANKS || !dtrain__mul_size(rows, columns, &bytes))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "compressor_powersgd: a matrix of %zu x %zu with rank %d; expected rank 1 to %d, or 0 for "
                            "4, and a place for the compressor",
                            rows, columns, rank, DTRAIN__POWERSGD_RANKS);
    memset(compressor, 0, sizeof *compressor);
    dtrain__powersgd *p =
        (dtrain__powersgd *)dtrain__memory_owner(allocator, sizeof *p, offsetof(dtrain__powersgd, heap), &allocator);
    if (p != NULL && dtrain__add_size(rows, columns, &bytes) && dtrain__mul_size(bytes, r * sizeof(float), &bytes))
        p->left = (float *)dtrain__alloc(allocator, bytes);
    if (p == NULL || p->left == NULL) {
        dtrain__free(allocator, p);
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compressor_powersgd: no memory for %zu x %zu by %zu", rows,
                            columns, r);
    }
    p->allocator = allocator;
    p->rows = rows;
    p->columns = columns;
    p->rank = r;
    p->seed = seed;
    p->right = p->left + rows * r;
    compressor->name = "powersgd";
    compressor->self = p;
    compressor->reduce = dtrain__powersgd_reduce;
    compressor->destroy = dtrain__powersgd_destroy;
    return DTRAIN_OK;
}

#endif
