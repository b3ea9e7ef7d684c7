/* ---- >>device_packed ----
 * What packing compressors do in an all-reduce, of a vector that is a device's: >>compressed step by step, packed,
 * unpacked and added up there. Packed bytes alone are copied to the CPU, and sent by it as its own. Where one of them
 * stands for what is no number, which the CPU sees in them, such is dropped from what is left. */
#ifndef DTRAIN__DEVICE_PACKED
#define DTRAIN__DEVICE_PACKED
#include "compress.h"
#include "quantise.c"
#include "device_vector.c"

/* What one call is about. */
typedef struct dtrain__device_packed {
    dtrain__device_vector *v;
    const dtrain_compressor *q;
    size_t *counts, *offsets, *in_counts, *in_offsets; /* of packed parts, in bytes */
    size_t begin, part;                                /* this rank's */
    int rank, ranks;
    uint64_t sent;
} dtrain__device_packed;

/* Whether a device can pack so. */
static int dtrain__device_packed_can(const dtrain_compressor *q)
{
    return q->reduce == NULL && (q->pack == dtrain__quantise_int8_pack_now ||
                                 q->pack == dtrain__quantise_fp8_pack_now || q->pack == dtrain__quantise_cast_pack_now);
}

static dtrain_status dtrain__device_packed_pack(const dtrain__device_packed *p, const float *in, size_t count,
                                                size_t at)
{
    dtrain_device *device = p->v->device;
    unsigned char *out = p->v->out_there.data + at;
    if (p->q->pack == dtrain__quantise_cast_pack_now)
        return dtrain_device_convert(device, in, DTRAIN_F32, out, (dtrain_dtype)p->q->block, count);
    return dtrain_device_pack(device, p->q->pack == dtrain__quantise_int8_pack_now ? DTRAIN_I8 : DTRAIN_F8_E4M3,
                              p->q->block, in, count, out);
}

static dtrain_status dtrain__device_packed_unpack(const dtrain__device_packed *p, const unsigned char *in, float *out,
                                                  size_t count)
{
    dtrain_device *device = p->v->device;
    if (p->q->pack == dtrain__quantise_cast_pack_now)
        return dtrain_device_convert(device, in, (dtrain_dtype)p->q->block, out, DTRAIN_F32, count);
    return dtrain_device_unpack(device, p->q->pack == dtrain__quantise_int8_pack_now ? DTRAIN_I8 : DTRAIN_F8_E4M3,
                                p->q->block, in, out, count, 0);
}

/* Whether packed bytes on the CPU may stand for an infinity or NaN: of a cast a number, of others the largest of a
 * block, which its scale tells. */
static int dtrain__device_packed_bad(const dtrain_compressor *q, const unsigned char *packed, size_t count)
{
    float top = q->pack == dtrain__quantise_int8_pack_now ? 127.0f : 448.0f;
    if (q->pack == dtrain__quantise_cast_pack_now) {
        unsigned exponent = q->block == DTRAIN_F16 ? 0x7c00u : 0x7f80u;
        int bad = 0;
        for (size_t i = 0; i < count; i++) {
            uint16_t half;
            memcpy(&half, packed + 2 * i, 2);
            bad |= (half & exponent) == exponent;
        }
        return bad;
    }
    for (size_t i = 0; i < dtrain__quantise_blocks(count, q->block); i++) {
        float scale;
        uint32_t bits;
        memcpy(&scale, packed + 4 * i, 4);
        scale = scale * top;
        memcpy(&bits, &scale, 4);
        if ((bits & 0x7f800000u) == 0x7f800000u)
            return 1;
    }
    return 0;
}

/* Makes all memory that steps of a vector need: packed parts, and what unpacks of them, to all of the vector at least,
 * and to twice a part. */
static dtrain_status dtrain__device_packed_reserve(dtrain__device_vector *v, const dtrain_compressor *q, int ranks)
{
    size_t out = 0, in, wide, part = dtrain__split(v->count, ranks, 0, NULL); /* no other's is longer */
    int good = dtrain__mul_size(q->bytes(q, part), (size_t)ranks, &in) &&
               dtrain__mul_size(part * sizeof(float), (size_t)(ranks > 2 ? ranks : 2), &wide);
    for (int r = 0; good && r < ranks; r++)
        good = dtrain__add_size(out, q->bytes(q, dtrain__split(v->count, ranks, r, NULL)), &out);
    if (!good)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory to pack %zu elements for %d ranks", v->count, ranks);
    dtrain_status status = dtrain__device_buffer_reserve(v->device, DTRAIN_MEMORY_PINNED, &v->out_here, out);
    if (status == DTRAIN_OK)
        status = dtrain__device_buffer_reserve(v->device, DTRAIN_MEMORY_PINNED, &v->in_here, in);
    if (status == DTRAIN_OK)
        status = dtrain__device_buffer_reserve(v->device, DTRAIN_MEMORY_DEVICE, &v->out_there, out);
    if (status == DTRAIN_OK)
        status = dtrain__device_buffer_reserve(v->device, DTRAIN_MEMORY_DEVICE, &v->in_there, in);
    return status == DTRAIN_OK ? dtrain__device_buffer_reserve(v->device, DTRAIN_MEMORY_DEVICE, &v->wide, wide)
                               : status;
}

static void dtrain__device_packed_place(dtrain__device_packed *p)
{
    size_t at = 0;
    for (int r = 0; r < p->ranks; r++) {
        p->offsets[r] = at;
        p->counts[r] = p->q->bytes(p->q, dtrain__split(p->v->count, p->ranks, r, NULL));
        at += p->counts[r];
        p->sent += r != p->rank ? p->counts[r] : 0;
        p->in_counts[r] = p->q->bytes(p->q, p->part);
        p->in_offsets[r] = (size_t)r * p->in_counts[r];
    }
}

/* All bytes of the packed vector. */
static size_t dtrain__device_packed_total(const dtrain__device_packed *p)
{
    return p->offsets[p->ranks - 1] + p->counts[p->ranks - 1];
}

/* Unpacks all parts to out. */
static dtrain_status dtrain__device_packed_open(const dtrain__device_packed *p)
{
    dtrain_status status = DTRAIN_OK;
    for (int r = 0; status == DTRAIN_OK && r < p->ranks; r++) {
        size_t begin, part = dtrain__split(p->v->count, p->ranks, r, &begin);
        status = dtrain__device_packed_unpack(p, p->v->out_there.data + p->offsets[r], p->v->out + begin, part);
    }
    return status;
}

/* Takes what was packed from the residual. */
static dtrain_status dtrain__device_packed_left(const dtrain__device_packed *p)
{
    dtrain__device_vector *v = p->v;
    int bad = 0;
    dtrain_status status = dtrain__device_packed_open(p);
    if (status == DTRAIN_OK)
        status = dtrain_device_axpy(v->device, DTRAIN_F32, v->residual, -1.0, v->out, v->count);
    for (int r = 0; !bad && r < p->ranks; r++)
        bad = dtrain__device_packed_bad(p->q, v->out_here.data + p->offsets[r],
                                        dtrain__split(v->count, p->ranks, r, NULL));
    if (status != DTRAIN_OK || !bad)
        return status;
    status = dtrain__device_buffer_reserve(v->device, DTRAIN_MEMORY_DEVICE, &v->spread, v->count * sizeof(float));
    return status == DTRAIN_OK
               ? dtrain__device_vector_finite(v, v->residual, v->out, (float *)(void *)v->spread.data, v->count)
               : status;
}

/* Packs every rank's part of what is to be sent; the CPU has it when this returns. */
static dtrain_status dtrain__device_packed_send(const dtrain__device_packed *p, const float *in)
{
    dtrain__device_vector *v = p->v;
    const float *from = v->residual != NULL ? v->residual : in;
    dtrain_status status = DTRAIN_OK;
    if (v->residual != NULL)
        status = dtrain_device_axpy(v->device, DTRAIN_F32, v->residual, 1.0, in, v->count);
    for (int r = 0; status == DTRAIN_OK && r < p->ranks; r++) {
        size_t begin, part = dtrain__split(v->count, p->ranks, r, &begin);
        status = dtrain__device_packed_pack(p, from + begin, part, p->offsets[r]);
    }
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(v->device, v->out_here.data, v->out_there.data, dtrain__device_packed_total(p));
    if (status == DTRAIN_OK)
        status = dtrain_device_wait(v->device);
    if (status == DTRAIN_OK && v->residual != NULL)
        status = dtrain__device_packed_left(p);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Adds up the unpacked parts of all ranks in this rank's part of out, as many at once as a device takes. So many are a
 * whole subtree, as that is a power of two. */
static dtrain_status dtrain__device_packed_tree(const dtrain__device_packed *p)
{
    dtrain__device_vector *v = p->v;
    float *wide = (float *)(void *)v->wide.data;
    size_t ranks = (size_t)p->ranks, stride = 1;
    dtrain_status status = DTRAIN_OK;
    do {
        size_t next = stride * DTRAIN__DEVICE_MOST;
        for (size_t first = 0; status == DTRAIN_OK && first < ranks; first += next) {
            const void *in[DTRAIN__DEVICE_MOST];
            void *out[1];
            int n = 0;
            for (size_t r = first; r < ranks && r < first + next; r += stride)
                in[n++] = wide + r * p->part;
            out[0] = next >= ranks ? v->out + p->begin : wide + first * p->part;
            status = dtrain_device_reduce(v->device, DTRAIN_F32, DTRAIN_SUM, in, n, out, 1, 0, p->part);
        }
        stride = next;
    } while (stride < ranks);
    return status;
}

static dtrain_status dtrain__device_packed_fold(const dtrain__device_packed *p)
{
    dtrain__device_vector *v = p->v;
    float *wide = (float *)(void *)v->wide.data;
    size_t bytes = p->in_counts[p->rank];
    dtrain_status status = dtrain_device_copy(v->device, v->in_there.data, v->in_here.data, bytes * (size_t)p->ranks);
    for (int r = 0; status == DTRAIN_OK && r < p->ranks; r++)
        status =
            dtrain__device_packed_unpack(p, v->in_there.data + p->in_offsets[r], wide + (size_t)r * p->part, p->part);
    return status == DTRAIN_OK ? dtrain__device_packed_tree(p) : status;
}

/* Keeps what packing the sum of this rank's part loses. */
static dtrain_status dtrain__device_packed_keep(const dtrain__device_packed *p)
{
    dtrain__device_vector *v = p->v;
    float *lost = (float *)(void *)v->wide.data, *back = lost + p->part, *sum = v->out + p->begin;
    dtrain_status status = dtrain_device_copy(v->device, lost, sum, p->part * sizeof(float));
    if (status == DTRAIN_OK)
        status = dtrain__device_packed_unpack(p, v->out_there.data + p->offsets[p->rank], back, p->part);
    if (status == DTRAIN_OK)
        status = dtrain_device_axpy(v->device, DTRAIN_F32, lost, -1.0, back, p->part);
    if (status == DTRAIN_OK && dtrain__device_packed_bad(p->q, v->out_here.data + p->offsets[p->rank], p->part))
        status = dtrain__device_vector_finite(v, lost, back, sum, p->part);
    return status == DTRAIN_OK ? dtrain_device_axpy(v->device, DTRAIN_F32, v->residual + p->begin, 1.0, lost, p->part)
                               : status;
}

/* Adds up this rank's part and packs the sum; the CPU has it when this returns. */
static dtrain_status dtrain__device_packed_sum(dtrain__device_packed *p)
{
    dtrain__device_vector *v = p->v;
    size_t at = p->offsets[p->rank];
    dtrain_status status = dtrain__device_packed_fold(p);
    p->sent += p->counts[p->rank] * (uint64_t)(p->ranks - 1);
    if (status == DTRAIN_OK)
        status = dtrain__device_packed_pack(p, v->out + p->begin, p->part, at);
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(v->device, v->out_here.data + at, v->out_there.data + at, p->counts[p->rank]);
    if (status == DTRAIN_OK)
        status = dtrain_device_wait(v->device);
    if (status == DTRAIN_OK && v->residual != NULL && p->part > 0)
        status = dtrain__device_packed_keep(p);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

/* Sums what all ranks send of `in` and of their residuals into v->out; `numbers` has room for 4 a rank. */
static dtrain_status dtrain__device_packed_reduce(dtrain__device_vector *v, const dtrain_compressor *q, size_t *numbers,
                                                  const float *in, uint64_t *sent)
{
    dtrain__device_packed p;
    p.v = v;
    p.q = q;
    p.rank = dtrain_comm_rank(v->comm);
    p.ranks = dtrain_comm_size(v->comm);
    p.counts = numbers;
    p.offsets = numbers + p.ranks;
    p.in_counts = p.offsets + p.ranks;
    p.in_offsets = p.in_counts + p.ranks;
    p.part = dtrain__split(v->count, p.ranks, p.rank, &p.begin);
    p.sent = 0;
    dtrain__device_packed_place(&p);
    dtrain_status status = dtrain__device_packed_send(&p, in);
    if (status == DTRAIN_OK)
        status = dtrain_all_to_all_v(v->comm, v->out_here.data, p.counts, p.offsets, v->in_here.data, p.in_counts,
                                     p.in_offsets, DTRAIN_U8);
    if (status == DTRAIN_OK)
        status = dtrain__device_packed_sum(&p);
    if (status == DTRAIN_OK)
        status = dtrain_all_gather_v(v->comm, v->out_here.data + p.offsets[p.rank], v->out_here.data, p.counts,
                                     p.offsets, DTRAIN_U8);
    *sent += p.sent;
    if (status != DTRAIN_OK)
        return status;
    status = dtrain_device_copy(v->device, v->out_there.data, v->out_here.data, dtrain__device_packed_total(&p));
    if (status == DTRAIN_OK)
        status = dtrain__device_packed_open(&p);
    return dtrain__device_vector_broken(v->comm, v->device, status);
}

#endif
