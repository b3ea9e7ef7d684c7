/* ---- >>packed ----
 * The all-reduce of a vector by a compressor that packs. Each rank gets its part of all vectors, packed. It adds the
 * parts as float32 by the tree and packs the sum, and all ranks gather the sums. The owner of a part keeps what packing
 * the sum loses.
 *
 * A vector on a device is packed, unpacked and added up there. Only packed bytes are copied to the CPU, which sends
 * them. The CPU sees in them whether a NaN or infinity was packed. Only then are the residuals searched for such
 * elements. */
#ifndef DTRAIN__PACKED
#define DTRAIN__PACKED
#include "compress.h"
#include "quantise.c"
#include "device_vector.c"

/* The arguments and memory of one call. */
typedef struct dtrain__packed {
    dtrain__device_vector *v;
    const dtrain_compressor *q;
    size_t *counts, *offsets, *in_counts, *in_offsets; /* of packed parts, in bytes */
    unsigned char *out_here, *in_here;                 /* packed parts on the CPU: sent and received ones */
    unsigned char *out, *in;                           /* the same on the device; on the CPU the same memory */
    float *wide;                                       /* received parts, unpacked */
    size_t begin, part;                                /* this rank's part */
    int rank, ranks;
    uint64_t *sent;
} dtrain__packed;

/* Whether a device supports this compressor. */
static int dtrain__packed_can(const dtrain_compressor *q)
{
    return q->reduce == NULL && (q->pack == dtrain__quantise_int8_pack_now ||
                                 q->pack == dtrain__quantise_fp8_pack_now || q->pack == dtrain__quantise_cast_pack_now);
}

static dtrain_dtype dtrain__packed_code(const dtrain_compressor *q)
{
    return q->pack == dtrain__quantise_int8_pack_now ? DTRAIN_I8 : DTRAIN_F8_E4M3;
}

/* Packs some elements to their place `at` among all parts. */
static dtrain_status dtrain__packed_pack(const dtrain__packed *p, const float *in, size_t count, size_t at)
{
    dtrain_device *device = p->v->device;
    const dtrain_compressor *q = p->q;
    if (device != NULL && q->pack != dtrain__quantise_cast_pack_now)
        return dtrain_device_pack(device, dtrain__packed_code(q), q->block, in, count, p->out + at);
    if (device != NULL)
        return dtrain_device_convert(device, in, DTRAIN_F32, p->out + at, (dtrain_dtype)q->block, count);
    q->pack(q, in, count, p->out + at);
    return DTRAIN_OK;
}

static dtrain_status dtrain__packed_unpack(const dtrain__packed *p, const unsigned char *in, float *out, size_t count)
{
    dtrain_device *device = p->v->device;
    const dtrain_compressor *q = p->q;
    if (device != NULL && q->pack != dtrain__quantise_cast_pack_now)
        return dtrain_device_unpack(device, dtrain__packed_code(q), q->block, in, out, count, 0);
    if (device != NULL)
        return dtrain_device_convert(device, in, (dtrain_dtype)q->block, out, DTRAIN_F32, count);
    q->unpack(q, in, out, count);
    return DTRAIN_OK;
}

/* Whether packed bytes on the CPU may hold an infinity or NaN: any number of a cast, or the scale of a block. */
static int dtrain__packed_bad(const dtrain_compressor *q, const unsigned char *packed, size_t count)
{
    float top = q->pack == dtrain__quantise_int8_pack_now ? 127.0f : 448.0f;
    if (q->pack == dtrain__quantise_cast_pack_now)
        return dtrain__device_unbounded((dtrain_dtype)q->block, packed, count);
    for (size_t i = 0; i < dtrain__quantise_blocks(count, q->block); i++) {
        float scale;
        memcpy(&scale, packed + 4 * i, 4);
        scale = scale * top;
        if (dtrain__device_unbounded(DTRAIN_F32, &scale, 1))
            return 1;
    }
    return 0;
}

/* Copies between CPU and device; nothing to do for a vector on the CPU. */
static dtrain_status dtrain__packed_move(const dtrain__packed *p, unsigned char *to, const unsigned char *from,
                                         size_t bytes)
{
    return to == from ? DTRAIN_OK : dtrain_device_copy(p->v->device, to, from, bytes);
}

/* Returns the bytes of all packed parts. */
static size_t dtrain__packed_total(const dtrain__packed *p)
{
    return p->offsets[p->ranks - 1] + p->counts[p->ranks - 1];
}

/* Begins a call: places the packed parts, and allocates all memory. `numbers` has room for 4 a rank. */
static dtrain_status dtrain__packed_open(dtrain__packed *p, dtrain__device_vector *v, const dtrain_compressor *q,
                                         size_t *numbers, uint64_t *sent)
{
    int there = v->device != NULL;
    size_t out = 0, in, wide, longest;
    p->v = v;
    p->q = q;
    p->sent = sent;
    p->rank = dtrain_comm_rank(v->comm);
    p->ranks = dtrain_comm_size(v->comm);
    p->part = dtrain__split(v->count, p->ranks, p->rank, &p->begin);
    p->counts = numbers;
    p->offsets = p->counts + p->ranks;
    p->in_counts = p->offsets + p->ranks;
    p->in_offsets = p->in_counts + p->ranks;
    longest = dtrain__split(v->count, p->ranks, 0, NULL);
    int good = dtrain__mul_size(q->bytes(q, longest), (size_t)p->ranks, &in) &&
               dtrain__mul_size(longest * sizeof(float), (size_t)(p->ranks > 2 ? p->ranks : 2), &wide);
    for (int r = 0; good && r < p->ranks; r++) {
        p->counts[r] = q->bytes(q, dtrain__split(v->count, p->ranks, r, NULL));
        p->offsets[r] = out;
        p->in_counts[r] = q->bytes(q, p->part);
        p->in_offsets[r] = (size_t)r * p->in_counts[r];
        good = dtrain__add_size(out, p->counts[r], &out);
    }
    if (!good)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory to pack %zu elements for %d ranks", v->count, p->ranks);
    dtrain_status status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_OUT, out);
    if (status == DTRAIN_OK)
        status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_IN, in);
    if (status == DTRAIN_OK && there)
        status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_OUT_THERE, out);
    if (status == DTRAIN_OK && there)
        status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_IN_THERE, in);
    if (status == DTRAIN_OK)
        status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_WIDE, wide);
    p->out_here = v->buffers[DTRAIN__DEVICE_OUT].data;
    p->in_here = v->buffers[DTRAIN__DEVICE_IN].data;
    p->out = there ? v->buffers[DTRAIN__DEVICE_OUT_THERE].data : p->out_here;
    p->in = there ? v->buffers[DTRAIN__DEVICE_IN_THERE].data : p->in_here;
    p->wide = dtrain__device_vector_floats(v, DTRAIN__DEVICE_WIDE);
    return status;
}

/* data = data - sent; a NaN or infinity becomes 0. here: packed bytes of `sent` on the CPU. It may overwrite sent. */
static dtrain_status dtrain__packed_subtract(const dtrain__packed *p, float *data, float *sent,
                                             const unsigned char *here, size_t count)
{
    dtrain__device_vector *v = p->v;
    if (v->device == NULL) {
        dtrain__feedback_left(data, sent, count);
        return DTRAIN_OK;
    }
    dtrain_status status = dtrain_device_axpy(v->device, DTRAIN_F32, data, -1.0, sent, count);
    if (status != DTRAIN_OK || !dtrain__packed_bad(p->q, here, count))
        return status;
    status = dtrain__device_vector_reserve(v, DTRAIN__DEVICE_SPREAD, count * sizeof(float));
    return status == DTRAIN_OK ? dtrain__device_vector_finite(
                                     v, data, sent, dtrain__device_vector_floats(v, DTRAIN__DEVICE_SPREAD), count)
                               : status;
}

/* Unpacks all parts to v->out; takes: also subtracts them from the residual. */
static dtrain_status dtrain__packed_unpack_all(const dtrain__packed *p, int takes)
{
    dtrain_status status = DTRAIN_OK;
    for (int r = 0; status == DTRAIN_OK && r < p->ranks; r++) {
        size_t begin, at = p->offsets[r], part = dtrain__split(p->v->count, p->ranks, r, &begin);
        status = dtrain__packed_unpack(p, p->out + at, p->v->out + begin, part);
        if (status == DTRAIN_OK && takes)
            status = dtrain__packed_subtract(p, p->v->residual + begin, p->v->out + begin, p->out_here + at, part);
    }
    return status;
}

/* Packs every rank's part. The CPU has the bytes when this returns. */
static dtrain_status dtrain__packed_send(const dtrain__packed *p, const float *in)
{
    dtrain__device_vector *v = p->v;
    const float *from = v->residual != NULL ? v->residual : in;
    dtrain_status status = DTRAIN_OK;
    if (v->residual != NULL)
        status = dtrain_device_axpy(v->device, DTRAIN_F32, v->residual, 1.0, in, v->count);
    for (int r = 0; status == DTRAIN_OK && r < p->ranks; r++) {
        size_t begin, part = dtrain__split(v->count, p->ranks, r, &begin);
        status = dtrain__packed_pack(p, from + begin, part, p->offsets[r]);
    }
    *p->sent += dtrain__packed_total(p) - p->counts[p->rank];
    if (status == DTRAIN_OK)
        status = dtrain__packed_move(p, p->out_here, p->out, dtrain__packed_total(p));
    if (status == DTRAIN_OK)
        status = dtrain_device_wait(v->device);
    if (status == DTRAIN_OK && v->residual != NULL)
        status = dtrain__packed_unpack_all(p, 1);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Adds up the unpacked parts of all ranks in this rank's part of v->out, as many at once as a device takes. That number
 * is a power of two, so that they are a whole subtree. */
static dtrain_status dtrain__packed_tree(const dtrain__packed *p)
{
    size_t ranks = (size_t)p->ranks, stride = 1;
    dtrain_status status = DTRAIN_OK;
    do {
        size_t next = stride * DTRAIN__DEVICE_MOST;
        for (size_t first = 0; status == DTRAIN_OK && first < ranks; first += next) {
            const void *in[DTRAIN__DEVICE_MOST];
            void *out[1];
            int n = 0;
            for (size_t r = first; r < ranks && r < first + next; r += stride)
                in[n++] = p->wide + r * p->part;
            out[0] = next >= ranks ? p->v->out + p->begin : p->wide + first * p->part;
            status = dtrain_device_reduce(p->v->device, DTRAIN_F32, DTRAIN_SUM, in, n, out, 1, 0, p->part);
        }
        stride = next;
    } while (stride < ranks);
    return status;
}

/* Packs a rank's part of v->out, which is a sum, to its place, and keeps what that loses. The CPU has the bytes when
 * this returns. */
static dtrain_status dtrain__packed_settle(const dtrain__packed *p, int rank)
{
    dtrain__device_vector *v = p->v;
    size_t at = p->offsets[rank], begin, part = dtrain__split(v->count, p->ranks, rank, &begin);
    float *lost = p->wide, *back = lost + part;
    dtrain_status status = dtrain__packed_pack(p, v->out + begin, part, at);
    *p->sent += p->counts[rank] * (uint64_t)(p->ranks - 1);
    if (status == DTRAIN_OK)
        status = dtrain__packed_move(p, p->out_here + at, p->out + at, p->counts[rank]);
    if (status == DTRAIN_OK)
        status = dtrain_device_wait(v->device);
    if (status != DTRAIN_OK || v->residual == NULL || part == 0)
        return status;
    status = dtrain_device_copy(v->device, lost, v->out + begin, part * sizeof(float));
    if (status == DTRAIN_OK)
        status = dtrain__packed_unpack(p, p->out + at, back, part);
    if (status == DTRAIN_OK)
        status = dtrain__packed_subtract(p, lost, back, p->out_here + at, part);
    if (status == DTRAIN_OK)
        status = dtrain_device_axpy(v->device, DTRAIN_F32, v->residual + begin, 1.0, lost, part);
    if (v->device == NULL) /* there compressors lose a sixteenth of a number at most, so no two losses overflow */
        dtrain__feedback_finite(v->residual + begin, part);
    return status;
}

/* Adds up what has arrived for this rank's part, and packs the sum. */
static dtrain_status dtrain__packed_sum(const dtrain__packed *p)
{
    dtrain__device_vector *v = p->v;
    dtrain_status status = dtrain__packed_move(p, p->in, p->in_here, p->in_counts[p->rank] * (size_t)p->ranks);
    for (int r = 0; status == DTRAIN_OK && r < p->ranks; r++)
        status = dtrain__packed_unpack(p, p->in + p->in_offsets[r], p->wide + (size_t)r * p->part, p->part);
    if (status == DTRAIN_OK)
        status = dtrain__packed_tree(p);
    if (status == DTRAIN_OK)
        status = dtrain__packed_settle(p, p->rank);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Sums over ranks what each sends of `in` and its residual into v->out. */
static dtrain_status dtrain__packed_reduce(dtrain__device_vector *v, const dtrain_compressor *q, size_t *numbers,
                                           const float *in, uint64_t *sent)
{
    dtrain__packed p;
    dtrain_status status =
        dtrain__device_vector_broken(v->comm, v->device, dtrain__packed_open(&p, v, q, numbers, sent));
    if (status == DTRAIN_OK)
        status = dtrain__packed_send(&p, in);
    if (status == DTRAIN_OK)
        status = dtrain_all_to_all_v(v->comm, p.out_here, p.counts, p.offsets, p.in_here, p.in_counts, p.in_offsets,
                                     DTRAIN_U8);
    if (status == DTRAIN_OK)
        status = dtrain__packed_sum(&p);
    if (status == DTRAIN_OK)
        status =
            dtrain_all_gather_v(v->comm, p.out_here + p.offsets[p.rank], p.out_here, p.counts, p.offsets, DTRAIN_U8);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__packed_move(&p, p.out, p.out_here, dtrain__packed_total(&p));
    if (status == DTRAIN_OK)
        status = dtrain__packed_unpack_all(&p, 0);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

#endif
