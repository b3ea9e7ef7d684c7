/* ---- >>collectives ----
 * The public calls. Each describes itself as an operation and hands it to the core, blocking or not. The group's
 * control plane answers the calls of the store. */
#ifndef DTRAIN__COLLECTIVES
#define DTRAIN__COLLECTIVES
#include "op.c"
#include "work.c"
DTRAIN__FAST_BEGIN

DTRAIN_API size_t dtrain_shard(const dtrain_comm *comm, size_t count, int rank, size_t *begin)
{
    return dtrain__split(count, dtrain_comm_size(comm), comm != NULL ? rank : -1, begin);
}

/* Describes a call. The text of op->error stays as it is: only a failure fills it. */
static DTRAIN__NOINLINE void dtrain__op_describe(dtrain__op *op, dtrain__kind kind, const void *in, void *out,
                                                 size_t count, dtrain_dtype dtype)
{
    unsigned char *at = (unsigned char *)op;
    size_t left = offsetof(dtrain__op, error);
    for (; left >= 64; left -= 64, at += 64)
        memset(at, 0, 64); /* for many more bytes compilers choose an instruction that starts slowly */
    memset(at, 0, left);
    op->error.status = DTRAIN_OK;
    op->kind = kind;
    op->in = in;
    op->out = out;
    op->count = count;
    op->dtype = dtype;
    op->from = -1;
}

static dtrain__op dtrain__op_of(dtrain__kind kind, const void *in, void *out, size_t count, dtrain_dtype dtype)
{
    dtrain__op op;
    dtrain__op_describe(&op, kind, in, out, count, dtype);
    return op;
}

/* The same with parts of the caller; comm may be NULL, which a later check finds. */
static dtrain__op dtrain__op_of_parts(const dtrain_comm *comm, dtrain__kind kind, const void *in, void *out,
                                      const size_t *counts, const size_t *offsets, dtrain_dtype dtype)
{
    dtrain__op op = dtrain__op_of(kind, in, out, 0, dtype);
    op.counts = counts;
    op.offsets = offsets;
    for (int rank = 0; comm != NULL && counts != NULL && rank < comm->size; rank++) {
        size_t sum = op.count + counts[rank];
        op.count = sum >= op.count ? sum : SIZE_MAX; /* refused as too large */
    }
    return op;
}

/* Runs a call to its end, or starts it if work is not NULL. */
static dtrain_status dtrain__collective(dtrain_comm *comm, dtrain__kind kind, const void *in, void *out, size_t count,
                                        dtrain_dtype dtype, dtrain_op reduction, int root, dtrain_work **work)
{
    dtrain__op op;
    dtrain__op_describe(&op, kind, in, out, count, dtype);
    op.op = reduction;
    op.root = root;
    return dtrain__work_call(comm, &op, work);
}

static dtrain_status dtrain__collective_async(dtrain_comm *comm, dtrain__kind kind, const void *in, void *out,
                                              size_t count, dtrain_dtype dtype, dtrain_op reduction, int root,
                                              dtrain_work **work)
{
    if (work != NULL)
        return dtrain__collective(comm, kind, in, out, count, dtype, reduction, root, work);
    return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                        "%s_async: work is NULL; give an address for the handle", dtrain__op_kind_name(kind));
}

static dtrain_status dtrain__collective_v(dtrain_comm *comm, dtrain__kind kind, const void *in, void *out,
                                          const size_t *counts, const size_t *offsets, dtrain_dtype dtype,
                                          dtrain_op reduction, int root, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of_parts(comm, kind, in, out, counts, offsets, dtype);
    op.op = reduction;
    op.root = root;
    if (counts == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "%s_v: counts is NULL; give an array with one count for each rank",
                            dtrain__op_kind_name(kind));
    return dtrain__work_call(comm, &op, work);
}

DTRAIN_API dtrain_status dtrain_all_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__collective(comm, DTRAIN__ALL_REDUCE, in, out, count, dtype, op, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_all_reduce_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_op op, dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__ALL_REDUCE, in, out, count, dtype, op, 0, work);
}

DTRAIN_API dtrain_status dtrain_reduce(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                       dtrain_op op, int root)
{
    return dtrain__collective(comm, DTRAIN__REDUCE, in, out, count, dtype, op, root, NULL);
}

DTRAIN_API dtrain_status dtrain_reduce_scatter(dtrain_comm *comm, const void *in, void *out, size_t count,
                                               dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__collective(comm, DTRAIN__REDUCE_SCATTER, in, out, count, dtype, op, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_reduce_scatter_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                     dtrain_dtype dtype, dtrain_op op, dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__REDUCE_SCATTER, in, out, count, dtype, op, 0, work);
}

DTRAIN_API dtrain_status dtrain_reduce_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                 const size_t *offsets, dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__collective_v(comm, DTRAIN__REDUCE_SCATTER, in, out, counts, offsets, dtype, op, 0, NULL);
}

static dtrain_status dtrain__reduce_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                              const size_t *offsets, dtrain_dtype dtype, dtrain_op op,
                                              dtrain_work **work)
{
    return dtrain__collective_v(comm, DTRAIN__REDUCE_SCATTER, in, out, counts, offsets, dtype, op, 0, work);
}

/* Sums as dtrain__reduce_scatter_v does. Results keep the dtype of partial sums, which is float32 for 16-bit floats. in
 * and out are apart. */
static dtrain_status dtrain__reduce_scatter_partial(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                    dtrain_dtype dtype, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of_parts(comm, DTRAIN__REDUCE_SCATTER, in, out, counts, NULL, dtype);
    op.op = DTRAIN_SUM;
    op.partial = 1;
    return dtrain__work_call(comm, &op, work);
}

/* Sums, gathers or reduce-scatters float32 in whole rows; starts it only if work is not NULL. */
static dtrain_status dtrain__collective_rows(dtrain_comm *comm, dtrain__kind kind, const float *in, float *out,
                                             size_t rows, size_t columns, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of(kind, in, out, rows * columns, DTRAIN_F32);
    op.op = kind == DTRAIN__ALL_GATHER ? (dtrain_op)0 : DTRAIN_SUM;
    op.row = kind == DTRAIN__ALL_REDUCE ? 0 : columns;
    return dtrain__work_call(comm, &op, work);
}

DTRAIN_API dtrain_status dtrain_scan(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                     dtrain_op op)
{
    return dtrain__collective(comm, DTRAIN__SCAN, in, out, count, dtype, op, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_scan_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype, dtrain_op op, dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__SCAN, in, out, count, dtype, op, 0, work);
}

DTRAIN_API dtrain_status dtrain_exscan(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                       dtrain_op op)
{
    return dtrain__collective(comm, DTRAIN__EXSCAN, in, out, count, dtype, op, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_exscan_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                             dtrain_dtype dtype, dtrain_op op, dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__EXSCAN, in, out, count, dtype, op, 0, work);
}

DTRAIN_API dtrain_status dtrain_all_gather(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype)
{
    return dtrain__collective(comm, DTRAIN__ALL_GATHER, in, out, count, dtype, (dtrain_op)0, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_all_gather_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                 dtrain_dtype dtype, dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__ALL_GATHER, in, out, count, dtype, (dtrain_op)0, 0, work);
}

DTRAIN_API dtrain_status dtrain_all_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                             const size_t *offsets, dtrain_dtype dtype)
{
    return dtrain__collective_v(comm, DTRAIN__ALL_GATHER, in, out, counts, offsets, dtype, (dtrain_op)0, 0, NULL);
}

static dtrain_status dtrain__all_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                          const size_t *offsets, dtrain_dtype dtype, dtrain_work **work)
{
    return dtrain__collective_v(comm, DTRAIN__ALL_GATHER, in, out, counts, offsets, dtype, (dtrain_op)0, 0, work);
}

DTRAIN_API dtrain_status dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype, int root)
{
    return dtrain__collective(comm, DTRAIN__BROADCAST, buffer, buffer, count, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_broadcast_async(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype,
                                                int root, dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__BROADCAST, buffer, buffer, count, dtype, (dtrain_op)0, root, work);
}

DTRAIN_API dtrain_status dtrain_gather(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                       int root)
{
    return dtrain__collective(comm, DTRAIN__GATHER, in, out, count, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                         const size_t *offsets, dtrain_dtype dtype, int root)
{
    return dtrain__collective_v(comm, DTRAIN__GATHER, in, out, counts, offsets, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_scatter(dtrain_comm *comm, const void *in, void *out, size_t count, dtrain_dtype dtype,
                                        int root)
{
    return dtrain__collective(comm, DTRAIN__SCATTER, in, out, count, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                          const size_t *offsets, dtrain_dtype dtype, int root)
{
    return dtrain__collective_v(comm, DTRAIN__SCATTER, in, out, counts, offsets, dtype, (dtrain_op)0, root, NULL);
}

DTRAIN_API dtrain_status dtrain_all_to_all(dtrain_comm *comm, const void *in, void *out, size_t count,
                                           dtrain_dtype dtype)
{
    return dtrain__collective(comm, DTRAIN__ALL_TO_ALL, in, out, count, dtype, (dtrain_op)0, 0, NULL);
}

static dtrain_status dtrain__all_to_all_v(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                          const size_t *in_offsets, void *out, const size_t *out_counts,
                                          const size_t *out_offsets, dtrain_dtype dtype, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of_parts(comm, DTRAIN__ALL_TO_ALL, in, out, in_counts, in_offsets, dtype);
    op.out_counts = out_counts;
    op.out_offsets = out_offsets;
    if (in_counts == NULL || out_counts == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "all_to_all_v: %s is NULL; give an array with one count for each rank",
                            in_counts == NULL ? "in_counts" : "out_counts");
    return dtrain__work_call(comm, &op, work);
}

DTRAIN_API dtrain_status dtrain_all_to_all_v(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                             const size_t *in_offsets, void *out, const size_t *out_counts,
                                             const size_t *out_offsets, dtrain_dtype dtype)
{
    return dtrain__all_to_all_v(comm, in, in_counts, in_offsets, out, out_counts, out_offsets, dtype, NULL);
}

DTRAIN_API dtrain_status dtrain_barrier(dtrain_comm *comm)
{
    return dtrain__collective(comm, DTRAIN__BARRIER, NULL, NULL, 0, DTRAIN_U8, (dtrain_op)0, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_send(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype, int peer)
{
    return dtrain__collective(comm, DTRAIN__SEND, in, NULL, count, dtype, (dtrain_op)0, peer, NULL);
}

DTRAIN_API dtrain_status dtrain_send_async(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype,
                                           int peer, dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__SEND, in, NULL, count, dtype, (dtrain_op)0, peer, work);
}

DTRAIN_API dtrain_status dtrain_recv(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer)
{
    return dtrain__collective(comm, DTRAIN__RECV, NULL, out, count, dtype, (dtrain_op)0, peer, NULL);
}

DTRAIN_API dtrain_status dtrain_recv_async(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer,
                                           dtrain_work **work)
{
    return dtrain__collective_async(comm, DTRAIN__RECV, NULL, out, count, dtype, (dtrain_op)0, peer, work);
}

static dtrain_status dtrain__exchange(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                      size_t out_count, int from, dtrain_dtype dtype, dtrain_work **work)
{
    dtrain__op op = dtrain__op_of(DTRAIN__EXCHANGE, in, out, in_count, dtype);
    op.in_count = out_count;
    op.root = to;
    op.from = from;
    return dtrain__work_call(comm, &op, work);
}

DTRAIN_API dtrain_status dtrain_exchange(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                         size_t out_count, int from, dtrain_dtype dtype)
{
    return dtrain__exchange(comm, in, in_count, to, out, out_count, from, dtype, NULL);
}

DTRAIN_API dtrain_status dtrain_start(dtrain_comm *comm, const dtrain_call *call, dtrain_work **work)
{
    dtrain__error *error = comm != NULL ? &comm->error : NULL;
    if (work != NULL)
        *work = NULL;
    if (call == NULL || work == NULL)
        return dtrain__fail(error, DTRAIN_ERR_INVALID, "start: %s is NULL; give %s", call == NULL ? "call" : "work",
                            call == NULL ? "a call" : "an address for the handle");
    if (call->kind < DTRAIN_CALL_ALL_REDUCE || call->kind > DTRAIN_CALL_EXCHANGE)
        return dtrain__fail(error, DTRAIN_ERR_INVALID,
                            "start: call.kind is %d; expected a DTRAIN_CALL constant" DTRAIN__ZERO_FIRST,
                            (int)call->kind);
    dtrain__kind kind = (dtrain__kind)((int)call->kind - (int)DTRAIN_CALL_ALL_REDUCE + (int)DTRAIN__ALL_REDUCE);
    int parts = kind == DTRAIN__REDUCE_SCATTER || kind == DTRAIN__ALL_GATHER || kind == DTRAIN__GATHER ||
                kind == DTRAIN__SCATTER || kind == DTRAIN__ALL_TO_ALL;
    if ((call->counts != NULL && !parts) || (call->out_counts != NULL && kind != DTRAIN__ALL_TO_ALL))
        return dtrain__fail(error, DTRAIN_ERR_INVALID, "start: %s has no form with %s: leave them NULL",
                            dtrain__op_kind_name(kind), call->counts != NULL && !parts ? "counts" : "out_counts");
    if (kind == DTRAIN__EXCHANGE)
        return dtrain__exchange(comm, call->in, call->count, call->root, call->out, call->out_count, call->from,
                                call->dtype, work);
    if (call->out_counts != NULL || (kind == DTRAIN__ALL_TO_ALL && call->counts != NULL))
        return dtrain__all_to_all_v(comm, call->in, call->counts, call->offsets, call->out, call->out_counts,
                                    call->out_offsets, call->dtype, work);
    if (call->counts != NULL)
        return dtrain__collective_v(comm, kind, call->in, call->out, call->counts, call->offsets, call->dtype, call->op,
                                    call->root, work);
    if (kind == DTRAIN__BARRIER)
        return dtrain__collective(comm, kind, NULL, NULL, 0, DTRAIN_U8, (dtrain_op)0, 0, work);
    return dtrain__collective(comm, kind, kind == DTRAIN__BROADCAST ? call->out : call->in, call->out, call->count,
                              call->dtype, call->op, call->root, work);
}

/* Compares with rank 0's data, piece by piece. *first: the first element that differs, or count. */
static dtrain_status dtrain__compare_with_root(dtrain_comm *comm, const unsigned char *data, size_t count,
                                               dtrain_dtype dtype, unsigned char *piece, size_t piece_count,
                                               size_t *first)
{
    size_t width = dtrain_dtype_bits(dtype) / 8;
    dtrain_status status = DTRAIN_OK;
    *first = count;
    for (size_t at = 0; status == DTRAIN_OK && at < count; at += piece_count) {
        size_t n = count - at < piece_count ? count - at : piece_count;
        if (comm->rank == 0)
            memcpy(piece, data + at * width, n * width);
        status = dtrain_broadcast(comm, piece, n, dtype, 0);
        if (status != DTRAIN_OK || *first < count || memcmp(piece, data + at * width, n * width) == 0)
            continue;
        for (*first = at; memcmp(piece + (*first - at) * width, data + *first * width, width) == 0;)
            ++*first;
    }
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_check_equal(dtrain_comm *comm, const void *data, size_t count, dtrain_dtype dtype)
{
    size_t width = dtrain_dtype_bits(dtype) / 8, piece_bytes = (size_t)256 << 10, first;
    if (comm == NULL || width == 0 || dtrain_dtype_bits(dtype) % 8 != 0 || (data == NULL && count > 0))
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "check_equal: needs a group, data, and a dtype of whole bytes (got dtype %d%s%s)",
                            (int)dtype, comm == NULL ? ", no group" : "", data == NULL && count > 0 ? ", no data" : "");
    if (dtrain__group_whole(comm, "check_equal") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    size_t table_bytes = (size_t)comm->size * sizeof(uint64_t);
    unsigned char *piece = (unsigned char *)dtrain__alloc(comm->allocator, piece_bytes + table_bytes);
    if (piece == NULL)
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "check_equal on rank %d: no memory for %zu bytes",
                            comm->rank, piece_bytes + table_bytes);
    uint64_t *table = (uint64_t *)(void *)(piece + piece_bytes), mine;
    dtrain_status status =
        dtrain__compare_with_root(comm, (const unsigned char *)data, count, dtype, piece, piece_bytes / width, &first);
    mine = first;
    if (status == DTRAIN_OK)
        status = dtrain_all_gather(comm, &mine, table, (size_t)comm->size, DTRAIN_U64);
    for (int rank = 0; status == DTRAIN_OK && rank < comm->size; rank++)
        if (table[rank] != count)
            status = dtrain__fail(&comm->error, DTRAIN_ERR_MISMATCH,
                                  "check_equal (%s x %zu): rank %d differs from rank 0, first in element %llu; compare "
                                  "earlier in the program to find where they part",
                                  dtrain_dtype_name(dtype), count, rank, (unsigned long long)table[rank]);
    dtrain__free(comm->allocator, piece);
    return status;
}

DTRAIN__FAST_END

static dtrain_status dtrain__store_do(dtrain_comm *comm, int what, const char *key, void *value, size_t capacity,
                                      size_t *bytes)
{
    size_t length = key != NULL ? strlen(key) : 0;
    dtrain__store_call call = {NULL, what, key, value,     capacity, bytes, comm != NULL ? &comm->error : NULL,
                               0,    0,    0,   DTRAIN_OK, ""};
    if (comm == NULL || length == 0 || length >= DTRAIN__STORE_KEY_BYTES || (value == NULL && capacity > 0) ||
        (bytes == NULL && (what == DTRAIN__STORE_GET || what == DTRAIN__STORE_WAIT)) ||
        (what == DTRAIN__STORE_SET && capacity > DTRAIN__STORE_VALUE_BYTES))
        return dtrain__fail(
            comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
            "%s: needs a group, a key of 1 to 255 characters (got %zu), a value of at most %zu bytes, and "
            "addresses for what comes back",
            dtrain__store_names[what], length, DTRAIN__STORE_VALUE_BYTES);
    int entered;
    dtrain_status status = dtrain__group_enter(comm, dtrain__store_names[what], &entered);
    if (status != DTRAIN_OK)
        return status;
    int64_t deadline_ns = dtrain__group_deadline(comm, dtrain__os_now_ns());
    if (!comm->plane->in_process)
        status = dtrain__work_usable(comm, dtrain__store_names[what]);
    if (status == DTRAIN_OK)
        status = dtrain__seat_store(comm->seat, &call, deadline_ns);
    dtrain__group_exit(comm, entered);
    return status;
}

/* Sets or gets a value of the library's own, from any thread that the program does not know of. On a transport that is
 * polled only the program's threads may move messages. Returns whether that went well. */
static int dtrain__store_own(dtrain_comm *comm, int what, const char *key, void *value, size_t capacity, size_t *bytes,
                             int64_t span_ns)
{
    dtrain__error ignored, before = dtrain__thread_error;
    dtrain__store_call call = {NULL, what, key, value, capacity, bytes, &ignored, 1, 0, 0, DTRAIN_OK, ""};
    if (!comm->plane->in_process && comm->desc.progress == DTRAIN_PROGRESS_POLL)
        return 0;
    dtrain_status status = dtrain__seat_store(comm->seat, &call, dtrain__os_now_ns() + span_ns);
    dtrain__thread_error = before;
    return status == DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_store_set(dtrain_comm *comm, const char *key, const void *value, size_t bytes)
{
    void *data;
    memcpy(&data, &value, sizeof data); /* it is only read */
    return dtrain__store_do(comm, DTRAIN__STORE_SET, key, data, bytes, NULL);
}

DTRAIN_API dtrain_status dtrain_store_get(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                          size_t *bytes)
{
    return dtrain__store_do(comm, DTRAIN__STORE_GET, key, value, capacity, bytes);
}

DTRAIN_API dtrain_status dtrain_store_delete(dtrain_comm *comm, const char *key)
{
    return dtrain__store_do(comm, DTRAIN__STORE_DELETE, key, NULL, 0, NULL);
}

DTRAIN_API dtrain_status dtrain_store_wait(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                           size_t *bytes)
{
    int64_t began = dtrain__os_now_ns();
    dtrain_status status = dtrain__store_do(comm, DTRAIN__STORE_WAIT, key, value, capacity, bytes);
    if (comm != NULL && DTRAIN__ATOMIC_LOAD(&comm->use.mark, RELAXED) == DTRAIN__COMM_MARK)
        dtrain__work_blocked_in(comm, dtrain__os_now_ns() - began);
    return status;
}

#endif
