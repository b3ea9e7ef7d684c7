/* ---- >>weighted ----
 * The mean with a weight a rank: the sum of the weights first, so that all ranks agree on whether there is a mean,
 * then the sum of the weighted inputs, divided once. Both are all-reduces in the tree order that say in their
 * headers what they are part of. 16-bit inputs are weighted as float32, piece by piece. */
#ifndef DTRAIN__WEIGHTED_MEAN
#define DTRAIN__WEIGHTED_MEAN
#include "work.c"
#include "collectives.c"
#include "fuse.c"

#define DTRAIN__WEIGHTED_PIECE ((size_t)1 << 18) /* elements, where they cannot be weighted in place */

/* Whether a weight is a number that the partial dtype of dtype can hold; by its bits, whatever the compiler assumes
 * of infinities. *positive: and above 0. */
static int dtrain__weighted_number(dtrain_dtype dtype, double weight, int *positive)
{
    uint64_t bits;
    memcpy(&bits, &weight, sizeof bits);
    *positive = bits != 0 && bits >> 63 == 0;
    return bits >> 52 < 0x7ff ? dtype == DTRAIN_F64 || weight <= (double)FLT_MAX : bits << 1 == 0;
}

/* One all-reduce of partial sums, in place. */
static dtrain_status dtrain__weighted_sum(dtrain_comm *comm, void *sums, size_t count, dtrain_dtype dtype,
                                          const dtrain__op *whole)
{
    dtrain__op op;
    memcpy(&op, whole, offsetof(dtrain__op, error));
    op.error.status = DTRAIN_OK;
    op.in = op.out = sums;
    op.count = count;
    op.dtype = dtype;
    op.op = DTRAIN_SUM;
    op.form = DTRAIN__WEIGHTED;
    op.first = whole->count;
    op.digest = (uint64_t)whole->dtype;
    return dtrain__work_call(comm, &op, NULL);
}

static dtrain_status dtrain__weighted_check(dtrain_comm *comm, const dtrain__op *op, double weight)
{
    dtrain_status status;
    int positive;
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted: the group is NULL; was its creation "
                            "checked?");
    status = dtrain__op_check(comm, op);
    if (status != DTRAIN_OK)
        return status;
    if (comm->fusing)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted on rank %d: it cannot be fused; call fuse_end first", comm->rank);
    if (!dtrain__weighted_number(op->dtype, weight, &positive))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted of %zu elements on rank %d: the weight is %g; a number of at least 0 "
                            "is expected that %s can hold",
                            op->count, comm->rank, weight, op->dtype == DTRAIN_F64 ? "a double" : "a float");
    return DTRAIN_OK;
}

/* Sums the weights; every rank comes to the same verdict. */
static dtrain_status dtrain__weighted_total(dtrain_comm *comm, const dtrain__op *op, double weight, double *total)
{
    dtrain_status status;
    int positive;
    *total = weight;
    status = dtrain__weighted_sum(comm, total, 1, DTRAIN_F64, op);
    if (status == DTRAIN_OK && !(dtrain__weighted_number(op->dtype, *total, &positive) && positive))
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "all_reduce_weighted of %zu elements: the weights of all %d ranks add up to %g, which "
                            "nothing can be divided by; one at least must be above 0",
                            op->count, comm->size, *total);
    return status;
}

DTRAIN_API dtrain_status dtrain_all_reduce_weighted(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                    dtrain_dtype dtype, double weight)
{
    dtrain__op op = dtrain__op_of(DTRAIN__ALL_REDUCE, in, out, count, dtype);
    dtrain_status status;
    double total;
    size_t width = dtrain_dtype_bits(dtype) / 8;
    dtrain_dtype partial = dtrain__fold_partial(dtype);
    op.op = DTRAIN_MEAN;
    status = dtrain__weighted_check(comm, &op, weight);
    if (status != DTRAIN_OK)
        return status;
    weight = dtype == DTRAIN_F64 ? weight : (double)(float)weight;
    status = dtrain__weighted_total(comm, &op, weight, &total);
    size_t piece = partial == dtype ? count : DTRAIN__WEIGHTED_PIECE;
    if (status == DTRAIN_OK && partial != dtype)
        status = dtrain__fuse_reserve(comm, (count < piece ? count : piece) * sizeof(float));
    for (size_t at = 0; status == DTRAIN_OK && at < count; at += piece) {
        size_t n = count - at < piece ? count - at : piece;
        void *sums = partial == dtype ? out : comm->packed;
        dtrain__fold_weigh(dtype, weight, (const unsigned char *)in + at * width, sums, n);
        status = dtrain__weighted_sum(comm, sums, n, partial, &op);
        if (status == DTRAIN_OK)
            dtrain__fold_finish(dtype, DTRAIN_MEAN, total, sums, (unsigned char *)out + at * width, n);
    }
    return status;
}

#endif
