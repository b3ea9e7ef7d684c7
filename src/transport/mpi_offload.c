/* ---- >>mpi-offload ----
 * MPI's own collectives, for DTRAIN_ALGORITHM_MPI. Each is a call that does not block, and is asked again and again
 * whether it has ended. MPI cannot cancel it. One that is given up keeps its memory: the caller's, and that of the
 * lane.
 *
 * On a world they run on the communicator that dtrain's messages have, as MPI keeps the two apart. A group that is made
 * from it has a communicator of its own from its first such call on. */
#ifndef DTRAIN__MPI_OFFLOAD
#define DTRAIN__MPI_OFFLOAD
#include "mpi.c"

/* The type in which MPI moves elements; with `folds` it also adds and compares them. */
static dtrain__mpi_datatype dtrain__mpi_type(dtrain_dtype dtype, int folds)
{
    unsigned bits = dtrain_dtype_bits(dtype);
    if (folds && dtype == DTRAIN_F32)
        return DTRAIN__MPI_TYPE(FLOAT, 0x210);
    if (folds && dtype == DTRAIN_F64)
        return DTRAIN__MPI_TYPE(DOUBLE, 0x214);
    if (folds && dtype == DTRAIN_I32)
        return DTRAIN__MPI_TYPE(INT32_T, 0x250);
    if (folds && dtype == DTRAIN_I64)
        return DTRAIN__MPI_TYPE(INT64_T, 0x258);
    return bits == 8    ? DTRAIN__MPI_TYPE(UINT8_T, 0x241)
           : bits == 16 ? DTRAIN__MPI_TYPE(UINT16_T, 0x249)
           : bits == 32 ? DTRAIN__MPI_TYPE(UINT32_T, 0x251)
                        : DTRAIN__MPI_TYPE(UINT64_T, 0x259);
}

static dtrain__mpi_op dtrain__mpi_op_of(dtrain_op op)
{
    switch (op) {
    case DTRAIN_PROD: return DTRAIN__MPI_OP(PROD, 0x24);
    case DTRAIN_MIN: return DTRAIN__MPI_OP(MIN, 0x22);
    case DTRAIN_MAX: return DTRAIN__MPI_OP(MAX, 0x23);
    case DTRAIN_AND: return DTRAIN__MPI_OP(BAND, 0x28);
    case DTRAIN_OR: return DTRAIN__MPI_OP(BOR, 0x29);
    case DTRAIN_XOR: return DTRAIN__MPI_OP(BXOR, 0x2a);
    default: return DTRAIN__MPI_OP(SUM, 0x21);
    }
}

/* Writes parts as `size` counts, then `size` offsets. Returns 0 if one is too large for MPI. */
static int dtrain__mpi_extents(const dtrain_extent *parts, int size, int *out)
{
    for (int rank = 0; rank < size; rank++) {
        if (parts[rank].count > INT_MAX || parts[rank].begin > INT_MAX - parts[rank].count)
            return 0;
        out[rank] = (int)parts[rank].count;
        out[size + rank] = (int)parts[rank].begin;
    }
    return 1;
}

/* Makes room for what MPI reads and writes until the collective has ended. */
static dtrain_status dtrain__mpi_offload_room(dtrain__mpi_lane *lane, const dtrain_offload *call)
{
    size_t n = (size_t)lane->size, width = dtrain_dtype_bits(call->dtype) / 8;
    uintptr_t in = (uintptr_t)call->in, out = (uintptr_t)call->out;
    const dtrain_extent *last = &call->parts[n - 1];
    void *room;
    if (lane->extents == NULL)
        lane->extents = (int *)dtrain__alloc(&lane->heap, 4 * n * sizeof(int));
    if (lane->extents == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "MPI: no memory for a collective of %d ranks", lane->size);
    lane->collective.memory = (unsigned char *)call->out;
    if (call->kind == DTRAIN_OFFLOAD_BROADCAST)
        return DTRAIN_OK;
    if (!dtrain__mpi_extents(call->parts, lane->size, lane->extents) ||
        (call->kind == DTRAIN_OFFLOAD_ALL_TO_ALL &&
         !dtrain__mpi_extents(call->others, lane->size, lane->extents + 2 * n)))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "MPI: an all-to-all of more than %d elements on a rank; set DTRAIN_ALGORITHM to "
                            "mpi,all_to_all=direct",
                            INT_MAX);
    if (call->kind != DTRAIN_OFFLOAD_REDUCE_SCATTER || out - in >= (last->begin + last->count) * width)
        return DTRAIN_OK;
    room = dtrain__memory_room(&lane->heap, lane->result, call->parts[call->rank].count * width + 1);
    if (room == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "MPI: no memory for a result of %zu bytes",
                            call->parts[call->rank].count * width);
    lane->collective.memory = lane->result = (unsigned char *)room;
    return DTRAIN_OK;
}

static void dtrain__mpi_make(void *pointer)
{
    dtrain__mpi_lane *lane = (dtrain__mpi_lane *)pointer;
    dtrain__mpi_maker *maker = &lane->maker;
    maker->code = dtrain__mpi()->call.Comm_create_group(lane->comm, maker->members, lane->tag, &maker->comm);
    DTRAIN__ATOMIC_STORE(&maker->done, 1, RELEASE);
}

/* Whether the thread has ended; it holds no lock of dtrain's, as MPI's level is MULTIPLE. */
static int dtrain__mpi_made(dtrain__mpi_lane *lane)
{
    if (!DTRAIN__ATOMIC_LOAD(&lane->maker.done, ACQUIRE))
        return 0;
    dtrain__os_thread_join(&lane->maker.thread);
    lane->maker.state = DTRAIN__MPI_MADE;
    return 1;
}

/* Starts to make the group's communicator. */
static dtrain_status dtrain__mpi_make_begin(dtrain__mpi_lane *lane)
{
    const dtrain__mpi_calls *mpi = &dtrain__mpi()->call;
    dtrain__mpi_maker *maker = &lane->maker;
    dtrain__mpi_group all;
    int code = mpi->Comm_group(lane->comm, &all);
    if (code == 0)
        code = mpi->Group_incl(all, lane->size, lane->ranks, &maker->members);
    if (code == 0)
        code = mpi->Group_free(&all);
    if (code != 0)
        return dtrain__mpi_error("Group_incl", code);
    code = dtrain__os_thread_start(&maker->thread, dtrain__mpi_make, lane, (size_t)1 << 20);
    if (code != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO,
                            "MPI: the system refused a thread that makes a communicator (%s; see ulimit -u and "
                            "pids.max); choose another "
                            "algorithm than MPI",
                            dtrain__os_error_text(code));
    maker->state = DTRAIN__MPI_MAKING;
    return DTRAIN_OK;
}

/* Looks for the communicator of the lane's collectives. *ready 0: it is being made. */
static dtrain_status dtrain__mpi_find_comm(dtrain__mpi_lane *lane, dtrain__mpi_comm *comm, int *ready)
{
    dtrain__mpi_maker *maker = &lane->maker;
    dtrain_status status = maker->state == DTRAIN__MPI_LACKING ? dtrain__mpi_make_begin(lane) : DTRAIN_OK;
    *comm = maker->state == DTRAIN__MPI_GIVEN ? lane->comm : maker->comm;
    *ready = maker->state != DTRAIN__MPI_MAKING;
    if (status != DTRAIN_OK || *ready || !dtrain__mpi_made(lane))
        return status;
    dtrain__mpi()->call.Group_free(&maker->members);
    *comm = maker->comm;
    *ready = 1;
    if (maker->code == 0)
        maker->code = dtrain__mpi()->call.Comm_set_errhandler(maker->comm, DTRAIN__MPI_RETURN);
    return maker->code == 0 ? DTRAIN_OK : dtrain__mpi_error("Comm_create_group", maker->code);
}

/* Gives a collective to MPI, once there is a communicator for it. */
static dtrain_status dtrain__mpi_offload_begin(dtrain__mpi_lane *lane, const dtrain_offload *call)
{
    const dtrain__mpi_calls *mpi = &dtrain__mpi()->call;
    dtrain__mpi_flight *flight = &lane->collective;
    int n = lane->size, code, same = call->in == call->out;
    const char *name;
    dtrain__mpi_comm comm;
    int ready;
    dtrain__mpi_datatype type = dtrain__mpi_type(call->dtype, call->kind == DTRAIN_OFFLOAD_REDUCE_SCATTER);
    dtrain_status status = dtrain__mpi_find_comm(lane, &comm, &ready);
    if (status != DTRAIN_OK || !ready)
        return status;
    status = dtrain__mpi_offload_room(lane, call);
    int *parts = lane->extents, *others = parts + 2 * n;
    if (status != DTRAIN_OK)
        return status;
    switch (call->kind) {
    case DTRAIN_OFFLOAD_REDUCE_SCATTER:
        name = "Ireduce_scatter";
        code = mpi->Ireduce_scatter(call->in, flight->memory, parts, type, dtrain__mpi_op_of(call->op), comm,
                                    &flight->request);
        break;
    case DTRAIN_OFFLOAD_ALL_GATHER:
        name = "Iallgatherv";
        code =
            mpi->Iallgatherv(DTRAIN__MPI_IN_PLACE, 0, type, call->out, parts, parts + n, type, comm, &flight->request);
        break;
    case DTRAIN_OFFLOAD_BROADCAST:
        name = "Ibcast";
        code = mpi->Ibcast(call->out, (int)call->count, type, call->root, comm, &flight->request);
        break;
    default:
        name = "Ialltoallv";
        code = mpi->Ialltoallv(same ? DTRAIN__MPI_IN_PLACE : call->in, parts, parts + n, type, call->out, others,
                               others + n, type, comm, &flight->request);
    }
    if (code != 0)
        return dtrain__mpi_error(name, code);
    flight->bytes = 1;
    return DTRAIN_OK;
}

static dtrain_status dtrain__mpi_offload(void *self, const dtrain_offload *call, int64_t deadline_ns)
{
    dtrain__mpi_lane *lane = (dtrain__mpi_lane *)self;
    for (unsigned turn = 0;; turn++) {
        int ended = -1;
        dtrain__os_lock(dtrain__mpi_mutex());
        dtrain_status status = dtrain__mpi_usable();
        if (status == DTRAIN_OK && lane->collective.bytes == 0)
            status = dtrain__mpi_offload_begin(lane, call);
        if (status == DTRAIN_OK)
            ended = lane->collective.bytes > 0 ? dtrain__mpi_ended(&lane->collective) : 0;
        dtrain__os_unlock(dtrain__mpi_mutex());
        if (ended < 0)
            return status != DTRAIN_OK ? status : DTRAIN_ERR_IO;
        if (ended > 0)
            break;
        if (turn % 16 == 0 && dtrain__os_now_ns() >= deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        dtrain__mpi_rest(turn < 2 * DTRAIN__MPI_HASTE ? turn : DTRAIN__MPI_HASTE + 1); /* MPI moves while it is asked */
    }
    if (lane->collective.memory == lane->result && lane->result != NULL)
        memcpy(call->out, lane->result, call->parts[call->rank].count * (dtrain_dtype_bits(call->dtype) / 8));
    return DTRAIN_OK;
}

#endif
