/* ---- >>device_staged ----
 * Collectives through pinned memory. A chunk is copied from the device to a slot, the CPU's own collective runs on the
 * slots, and the result is copied back. Meanwhile the next chunks go to their slots. Every element takes part in the
 * same additions as without chunks.
 *
 * Chunks are the same on every rank. An all-reduce or a broadcast is cut into pieces of the vector. A reduce-scatter or
 * an all-gather is cut into pieces of every shard. They lie side by side in a slot, so shards are those of the whole
 * vector. Shorter shards end in earlier chunks; a shard without an element takes no room.
 *
 * A slot's event is recorded after the copies into it, which the queue does after the last copies out of it. When it
 * has passed, the CPU may read and write the slot. */
#ifndef DTRAIN__DEVICE_STAGED
#define DTRAIN__DEVICE_STAGED
#include "device_call.c"

#define DTRAIN__STAGED_CHUNK_LEAST ((size_t)256 << 10)
#define DTRAIN__STAGED_CHUNK_MOST ((size_t)4 << 20)
#define DTRAIN__STAGED_RATE 600000 /* bytes: 50 us a chunk, divided by the 1/24 + 1/24 ns a byte of the two copies */

typedef struct dtrain__staged {
    dtrain_device_group *group;
    const dtrain__op *op;
    size_t width;
    size_t slot_bytes; /* distance of slots */
    size_t piece;      /* elements of a chunk, or of each shard's part of it */
    size_t chunks;     /* at least 1, so that peers also hear of a call on no elements */
    int shards;        /* chunks consist of pieces of shards */
    int direct;        /* the buffers are the CPU's and need no slot */
} dtrain__staged;

/* Returns the bytes of a chunk for a vector of this many bytes, if the desc says nothing: see
 * dtrain_device_group_create. In integers, so that every rank gets the same. */
static size_t dtrain__staged_chunk(size_t bytes)
{
    uint64_t least = DTRAIN__STAGED_CHUNK_LEAST / 64, most = DTRAIN__STAGED_CHUNK_MOST / 64;
    if (bytes / 8 > DTRAIN__STAGED_CHUNK_MOST)
        return DTRAIN__STAGED_CHUNK_MOST; /* the root is larger, and no product below overflows */
    while (least < most) {
        uint64_t middle = (least + most + 1) / 2;
        if (middle * 64 * middle * 64 <= (uint64_t)bytes * DTRAIN__STAGED_RATE)
            least = middle;
        else
            most = middle - 1;
    }
    return (size_t)least * 64;
}

/* Returns the distance of slots: a chunk, or the largest. */
static size_t dtrain__staged_slot_bytes(const dtrain_device_group *group)
{
    return group->chunk_bytes > 0 ? group->chunk_bytes : DTRAIN__STAGED_CHUNK_MOST;
}

static dtrain__staged dtrain__staged_of(dtrain_device_group *group, const dtrain__op *op)
{
    dtrain__staged run;
    int size = group->comm->size;
    run.group = group;
    run.op = op;
    run.width = dtrain_dtype_bits(op->dtype) / 8;
    run.shards = op->kind == DTRAIN__REDUCE_SCATTER || op->kind == DTRAIN__ALL_GATHER;
    run.direct = group->device == NULL && !run.shards;
    size_t longest = run.shards ? 0 : op->count, cut = 0;
    for (int rank = 0; rank < size && run.shards; rank++) {
        size_t n = group->shards[rank].count;
        longest = n > longest ? n : longest;
        cut += n > 0;
    }
    size_t chunk_bytes = group->chunk_bytes > 0 ? group->chunk_bytes : dtrain__staged_chunk(op->count * run.width);
    run.slot_bytes = dtrain__staged_slot_bytes(group);
    run.piece = chunk_bytes / run.width / (cut > 0 ? cut : 1);
    run.chunks = longest > 0 ? (longest - 1) / run.piece + 1 : 1;
    return run;
}

static unsigned char *dtrain__staged_slot(const dtrain__staged *run, size_t chunk)
{
    return run->group->pinned + chunk % (size_t)run->group->slots * run->slot_bytes;
}

/* Returns the elements of a chunk that belong to `rank`'s shard. *begin: their place in the vector. */
static size_t dtrain__staged_part(const dtrain__staged *run, size_t chunk, int rank, size_t *begin)
{
    size_t at = chunk * run->piece, n = run->op->count;
    *begin = at;
    if (run->shards) {
        n = run->group->shards[rank].count;
        *begin += run->group->shards[rank].begin;
    }
    n = n > at ? n - at : 0;
    return n < run->piece ? n : run->piece;
}

/* Copies between a slot and the whole vector on the device: the chunk, or every rank's part of it except that of rank
 * `not_of`. */
static dtrain_status dtrain__staged_spread(const dtrain__staged *run, size_t chunk, void *vector, int into_slot,
                                           int not_of)
{
    unsigned char *slot = dtrain__staged_slot(run, chunk);
    dtrain_status status = DTRAIN_OK;
    int parts = run->shards ? run->group->comm->size : 1;
    for (int rank = 0; rank < parts && status == DTRAIN_OK; rank++) {
        size_t begin, bytes = dtrain__staged_part(run, chunk, rank, &begin) * run->width;
        unsigned char *there = bytes > 0 ? (unsigned char *)vector + begin * run->width : NULL;
        if (rank != not_of && bytes > 0)
            status = dtrain_device_copy(run->group->device, into_slot ? slot : there, into_slot ? there : slot, bytes);
        slot += bytes;
    }
    return status;
}

/* Returns the bytes of this rank's part of a chunk. *in_slot: their address in the slot. */
static size_t dtrain__staged_own(const dtrain__staged *run, size_t chunk, unsigned char **in_slot)
{
    size_t begin, bytes = 0;
    *in_slot = dtrain__staged_slot(run, chunk);
    for (int rank = 0; rank <= run->group->comm->rank; rank++) {
        *in_slot += bytes;
        bytes = dtrain__staged_part(run, chunk, rank, &begin) * run->width;
    }
    return bytes;
}

/* Returns the address of the same part in a buffer that holds this rank's shard alone. */
static unsigned char *dtrain__staged_in_shard(const dtrain__staged *run, size_t chunk, const void *shard, size_t bytes)
{
    return bytes > 0 ? (unsigned char *)shard + chunk * run->piece * run->width : NULL;
}

/* Queues the copies that fill a chunk's slot, and the event that marks their end. */
static dtrain_status dtrain__staged_load(const dtrain__staged *run, size_t chunk)
{
    const dtrain__op *op = run->op;
    dtrain_device *device = run->group->device;
    unsigned char *slot;
    dtrain_status status = DTRAIN_OK;
    if (chunk >= run->chunks || run->direct)
        return DTRAIN_OK;
    if (op->kind == DTRAIN__ALL_GATHER) {
        size_t bytes = dtrain__staged_own(run, chunk, &slot);
        status = dtrain_device_copy(device, slot, dtrain__staged_in_shard(run, chunk, op->in, bytes), bytes);
    } else if (op->kind != DTRAIN__BROADCAST || op->root == run->group->comm->rank) {
        status = dtrain__staged_spread(run, chunk, (void *)op->in, 1, -1);
    }
    if (status != DTRAIN_OK)
        return status;
    return dtrain__device_event_record(device, run->group->slot_events[chunk % (size_t)run->group->slots]);
}

/* Queues the copies of a chunk's result to the device. */
static dtrain_status dtrain__staged_store(const dtrain__staged *run, size_t chunk)
{
    const dtrain__op *op = run->op;
    const dtrain_comm *comm = run->group->comm;
    unsigned char *slot;
    size_t bytes;
    if (run->direct || (op->kind == DTRAIN__BROADCAST && op->root == comm->rank))
        return DTRAIN_OK;
    if (op->kind == DTRAIN__REDUCE_SCATTER) {
        bytes = dtrain__staged_own(run, chunk, &slot);
        return dtrain_device_copy(run->group->device, dtrain__staged_in_shard(run, chunk, op->out, bytes), slot, bytes);
    }
    size_t own = run->group->shards[comm->rank].begin * run->width;
    int in_place = op->kind == DTRAIN__ALL_GATHER && (uintptr_t)op->in == (uintptr_t)op->out + own;
    return dtrain__staged_spread(run, chunk, op->out, 0, in_place ? comm->rank : -1);
}

/* What bell_wait checks before it sleeps; a device rings no bell. */
static int dtrain__staged_silent(void *pointer)
{
    (void)pointer;
    return 0;
}

/* Waits until a chunk is in its slot. */
static dtrain_status dtrain__staged_await(const dtrain__staged *run, size_t chunk)
{
    dtrain_comm *comm = run->group->comm;
    dtrain_device_event *event = run->group->slot_events[chunk % (size_t)run->group->slots];
    int64_t begun = dtrain__os_now_ns(), now = begun;
    int64_t limit = comm->desc.timeout_ms < 0 ? INT64_MAX : dtrain__os_ms_to_ns(comm->desc.timeout_ms);
    for (unsigned turn = 0; !run->direct; turn++) {
        int done = 0;
        dtrain_status status = dtrain__device_event_done(run->group->device, event, &done);
        if (status != DTRAIN_OK || done)
            return status;
        if (now - begun >= limit)
            return dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                                "chunk %zu of %zu has not come within %lld ms: what is queued before it takes longer, "
                                "or hangs; give a longer timeout_ms",
                                chunk + 1, run->chunks, (long long)comm->desc.timeout_ms);
        dtrain__bell_wait(comm->bell, turn, now + 50000, dtrain__staged_silent, NULL);
        now = dtrain__os_now_ns();
    }
    return DTRAIN_OK;
}

/* Runs the CPU's collective on a chunk. Every rank has one for it. */
static dtrain_status dtrain__staged_step(const dtrain__staged *run, size_t chunk)
{
    dtrain_device_group *group = run->group;
    const dtrain__op *whole = run->op;
    size_t begin, n = dtrain__staged_part(run, chunk, 0, &begin);
    unsigned char *slot = dtrain__staged_slot(run, chunk), *own = slot;
    dtrain__op op;
    if (run->shards) {
        for (int rank = 0; rank < group->comm->size; rank++)
            group->counts[rank] = dtrain__staged_part(run, chunk, rank, &begin);
        dtrain__staged_own(run, chunk, &own);
        int gathers = whole->kind == DTRAIN__ALL_GATHER;
        op = dtrain__op_of_parts(group->comm, whole->kind, gathers ? own : slot, gathers ? slot : own, group->counts,
                                 NULL, whole->dtype);
    } else if (run->direct && n > 0) {
        op = dtrain__op_of(whole->kind, (const unsigned char *)whole->in + begin * run->width,
                           (unsigned char *)whole->out + begin * run->width, n, whole->dtype);
    } else {
        op = dtrain__op_of(whole->kind, slot, slot, n, whole->dtype);
    }
    dtrain_status status = dtrain__device_step(group, whole, 0, &op);
    if (status == DTRAIN_OK && group->mean_of > 0)
        dtrain__fold_finish(op.dtype, DTRAIN_MEAN, group->mean_of, op.out, op.out,
                            run->shards ? group->counts[group->comm->rank] : n);
    return status;
}

/* Handles a chunk whose wait or collective failed. In the first chunk nothing has moved, or the group is broken
 * already; if not broken, the call can be repeated. Later this rank's peers are at another chunk: that breaks the
 * group. */
static dtrain_status dtrain__staged_stuck(const dtrain__staged *run, size_t chunk, dtrain_status status, int waited)
{
    dtrain_comm *comm = run->group->comm;
    if (waited)
        dtrain__fail(&comm->error, status, "%s on rank %d, its device %s: %s",
                     dtrain__device_text(comm, run->op, comm->number + 1).text, comm->rank,
                     dtrain_device_name(run->group->device), dtrain__status_cause(&dtrain__thread_error));
    return chunk > 0 ? dtrain__device_break(run->group) : status;
}

static dtrain_status dtrain__staged_run(dtrain_device_group *group, const dtrain__op *op)
{
    dtrain__staged run = dtrain__staged_of(group, op);
    size_t ahead = (size_t)group->slots - 1;
    dtrain_status status = DTRAIN_OK;
    for (size_t chunk = 0; chunk < ahead && status == DTRAIN_OK; chunk++)
        status = dtrain__staged_load(&run, chunk);
    for (size_t chunk = 0; chunk < run.chunks && status == DTRAIN_OK; chunk++) {
        status = dtrain__staged_load(&run, chunk + ahead);
        if (status != DTRAIN_OK)
            break;
        status = dtrain__staged_await(&run, chunk);
        if (status == DTRAIN_ERR_TIMEOUT)
            return dtrain__staged_stuck(&run, chunk, status, 1);
        if (status != DTRAIN_OK)
            break;
        status = dtrain__staged_step(&run, chunk);
        if (status != DTRAIN_OK)
            return dtrain__staged_stuck(&run, chunk, status, 0);
        status = dtrain__staged_store(&run, chunk);
    }
    return status == DTRAIN_OK ? DTRAIN_OK : dtrain__device_failed(group, op, group->comm->number + 1, status);
}

#endif
