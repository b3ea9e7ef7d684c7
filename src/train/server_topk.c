/* ---- >>server_topk ----
 * Top-k as a compressor that packs, for the parameter server: of each piece the k elements of largest magnitude, whose
 * number depends on the length of the piece alone, and so the bytes do. What is unpacked is checked in full first. */
#ifndef DTRAIN__SERVER_TOPK
#define DTRAIN__SERVER_TOPK
#include "server.h"
#include "../compress/topk.c"
#include "../compress/sparse.c"

typedef struct dtrain__server_topk {
    dtrain_allocator *allocator;
    double ratio;
    dtrain_dtype values;
    dtrain_sparse sparse;
    dtrain_status status; /* of the last unpacking */
} dtrain__server_topk;

/* The form of a piece's indices: none where that is shorter. */
static dtrain_index_form dtrain__server_topk_form(const dtrain__server_topk *topk, size_t count, size_t k)
{
    size_t width = dtrain__sparse_width(topk->values), index = count <= 65536 ? 2 : 4;
    if (k * (index + width) >= count * width)
        return DTRAIN_INDEX_NONE;
    return index == 2 ? DTRAIN_INDEX_U16 : DTRAIN_INDEX_U32;
}

static size_t dtrain__server_topk_bytes(const dtrain_compressor *compressor, size_t count)
{
    const dtrain__server_topk *topk = (const dtrain__server_topk *)compressor->self;
    size_t k = dtrain_topk_count(count, topk->ratio), width = dtrain__sparse_width(topk->values);
    dtrain_index_form form = dtrain__server_topk_form(topk, count, k);
    if (form == DTRAIN_INDEX_NONE)
        return DTRAIN__SPARSE_HEADER + count * width;
    return DTRAIN__SPARSE_HEADER + k * (width + (form == DTRAIN_INDEX_U16 ? 2 : 4));
}

/* Without memory it packs what nobody takes for a selection, so that it is not hidden. */
static void dtrain__server_topk_pack(const dtrain_compressor *compressor, const float *in, size_t count, void *out)
{
    dtrain__server_topk *topk = (dtrain__server_topk *)compressor->self;
    size_t k = dtrain_topk_count(count, topk->ratio), bytes = dtrain__server_topk_bytes(compressor, count), written;
    dtrain_status status = dtrain_topk(in, count, k, &topk->sparse);
    if (status == DTRAIN_OK)
        status = dtrain_sparse_pack(&topk->sparse, topk->values, dtrain__server_topk_form(topk, count, k), out, bytes,
                                    &written);
    if (status != DTRAIN_OK)
        memset(out, 0, bytes);
}

static void dtrain__server_topk_unpack(const dtrain_compressor *compressor, const void *in, float *out, size_t count)
{
    dtrain__server_topk *topk = (dtrain__server_topk *)compressor->self;
    topk->status = dtrain_sparse_unpack(&topk->sparse, in, dtrain__server_topk_bytes(compressor, count), count);
    if (topk->status == DTRAIN_OK)
        topk->status = dtrain_sparse_write(&topk->sparse, out, count);
    if (topk->status != DTRAIN_OK)
        memset(out, 0, count * sizeof(float));
}

static void dtrain__server_topk_destroy(void *self)
{
    dtrain__server_topk *topk = (dtrain__server_topk *)self;
    dtrain_sparse_destroy(&topk->sparse);
    dtrain__free(topk->allocator, topk, sizeof *topk);
}

static dtrain_status dtrain__server_topk_make(dtrain_compressor *made, const dtrain_topk_desc *desc,
                                              dtrain_allocator *allocator)
{
    double ratio = desc->schedule.ratio != 0.0 ? desc->schedule.ratio : 0.01;
    dtrain_dtype values = desc->values != 0 ? desc->values : DTRAIN_F32;
    if (desc->schedule.stage_steps != 0 || desc->threshold != 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "server_create: top-k with a %s; a server's selects one ratio throughout",
                            desc->threshold != 0.0f ? "threshold" : "warm-up");
    if (!(ratio > 0.0 && ratio <= 1.0) || dtrain__sparse_width(values) == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "server_create: top-k with a ratio of %g as %s; expected above 0 to 1, and F32, BF16 or "
                            "F16",
                            ratio, dtrain_dtype_name(values));
    dtrain__server_topk *topk = (dtrain__server_topk *)dtrain__alloc(allocator, sizeof *topk);
    if (topk == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "server_create: no memory for %zu bytes", sizeof *topk);
    topk->allocator = topk->sparse.allocator = allocator;
    topk->ratio = ratio;
    topk->values = values;
    made->name = "topk";
    made->self = topk;
    made->bytes = dtrain__server_topk_bytes;
    made->pack = dtrain__server_topk_pack;
    made->unpack = dtrain__server_topk_unpack;
    made->destroy = dtrain__server_topk_destroy;
    return DTRAIN_OK;
}

#endif
