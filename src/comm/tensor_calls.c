/* ---- >>tensor_calls ----
 * Collectives over tensors: the same calls, with shapes compared first. */
#ifndef DTRAIN__TENSOR_CALLS
#define DTRAIN__TENSOR_CALLS
#include "../tensor/tensor.c"
#include "op.c"
#include "collectives.c"

/* Checks that a tensor is in memory that a group can read. */
static dtrain_status dtrain__tensor_reaches(dtrain_comm *comm, const char *call, const dtrain_tensor *tensor)
{
    dtrain_status status = dtrain__tensor_on_cpu(call, tensor, DTRAIN__TENSOR_COPY_FIRST);
    if (status != DTRAIN_OK && comm != NULL)
        comm->error = dtrain__thread_error;
    return status;
}

static size_t dtrain__tensor_rows(const dtrain_tensor *tensor)
{
    return tensor->ndim > 0 ? tensor->shape[0] : 1;
}

/* Elements of one row. */
static size_t dtrain__tensor_row(const dtrain_tensor *tensor)
{
    size_t row = 1;
    for (int i = 1; i < tensor->ndim; i++)
        row *= tensor->shape[i];
    return row;
}

/* Checks that part is whole but for its first size, which must be rows. */
static dtrain_status dtrain__tensor_fits(dtrain_comm *comm, const char *call, const dtrain_tensor *whole,
                                         const dtrain_tensor *part, size_t rows)
{
    int fits = comm != NULL && whole != NULL && part != NULL;
    if (!fits)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID, "%s: the group or a tensor is NULL",
                            call);
    fits = whole->dtype == part->dtype && whole->ndim == part->ndim && dtrain__tensor_rows(part) == rows;
    for (int i = 1; fits && i < whole->ndim; i++)
        fits = whole->shape[i] == part->shape[i];
    if (fits) {
        dtrain_status status = dtrain__tensor_reaches(comm, call, whole);
        return status == DTRAIN_OK ? dtrain__tensor_reaches(comm, call, part) : status;
    }
    dtrain_tensor expected = *whole;
    expected.shape[0] = rows;
    return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: %s was expected beside %s, %s came", call,
                        comm->rank, dtrain__tensor_text(&expected).text, dtrain__tensor_text(whole).text,
                        dtrain__tensor_text(part).text);
}

/* The same, where the part is this rank's share of the rows. */
static dtrain_status dtrain__tensor_splits(dtrain_comm *comm, const char *call, const dtrain_tensor *whole,
                                           const dtrain_tensor *part)
{
    size_t rows = comm != NULL && whole != NULL ? dtrain_shard(comm, dtrain__tensor_rows(whole), comm->rank, NULL) : 0;
    if (comm != NULL && whole != NULL && whole->ndim == 0)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID, "%s on rank %d: a scalar has no dimension 0 to split",
                            call, comm->rank);
    return dtrain__tensor_fits(comm, call, whole, part, rows);
}

DTRAIN_API dtrain_status dtrain_tensor_all_reduce(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out,
                                                  dtrain_op op)
{
    dtrain_status status =
        dtrain__tensor_fits(comm, "tensor_all_reduce", in, out, in != NULL ? dtrain__tensor_rows(in) : 0);
    return status != DTRAIN_OK ? status : dtrain_all_reduce(comm, in->data, out->data, in->count, in->dtype, op);
}

DTRAIN_API dtrain_status dtrain_tensor_reduce_scatter(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out,
                                                      dtrain_op op)
{
    dtrain_status status = dtrain__tensor_splits(comm, "tensor_reduce_scatter", in, out);
    if (status != DTRAIN_OK)
        return status;
    dtrain__op call = dtrain__op_of(DTRAIN__REDUCE_SCATTER, in->data, out->data, in->count, in->dtype);
    call.op = op;
    call.row = dtrain__tensor_row(in);
    return dtrain__comm_call(comm, &call, NULL);
}

DTRAIN_API dtrain_status dtrain_tensor_all_gather(dtrain_comm *comm, const dtrain_tensor *in, dtrain_tensor *out)
{
    dtrain_status status = dtrain__tensor_splits(comm, "tensor_all_gather", out, in);
    if (status != DTRAIN_OK)
        return status;
    dtrain__op call = dtrain__op_of(DTRAIN__ALL_GATHER, in->data, out->data, out->count, out->dtype);
    call.row = dtrain__tensor_row(out);
    return dtrain__comm_call(comm, &call, NULL);
}

DTRAIN_API dtrain_status dtrain_tensor_broadcast(dtrain_comm *comm, dtrain_tensor *tensor, int root)
{
    if (tensor == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "tensor_broadcast: the tensor is NULL");
    dtrain_status status = dtrain__tensor_reaches(comm, "tensor_broadcast", tensor);
    return status != DTRAIN_OK ? status : dtrain_broadcast(comm, tensor->data, tensor->count, tensor->dtype, root);
}

#endif
