/* ---- >>fsdp-traffic ----
 * What a rank will send in a step, from its layout alone: in numbers that the counters of a run then show, or for
 * selections, whose lengths nobody knows before, at most. */
#ifndef DTRAIN__FSDP_TRAFFIC
#define DTRAIN__FSDP_TRAFFIC
#include "fsdp_quantise.c"
#include "sender.c"

/* Bytes of a quantised range that are not this rank's: what it sends, of gradients, and what it passes on in a ring, of
 * parameters. */
static uint64_t dtrain__plan_sends(const dtrain__layout *layout, const dtrain__cut *cut, size_t block)
{
    uint64_t bytes = 0;
    size_t own;
    for (int shard = 0; shard < layout->shards; shard++)
        if (shard != layout->shard)
            bytes += dtrain__layout_code_bytes(dtrain__layout_part(layout, cut, shard, &own), block);
    return bytes;
}

/* What a selection takes at most: the header and, for each element, its index and its value. */
static uint64_t dtrain__plan_selection(const dtrain_topk_desc *topk, size_t chosen, size_t count)
{
    uint64_t width = topk->values == DTRAIN_BF16 || topk->values == DTRAIN_F16 ? 2 : 4;
    uint64_t bytes = (uint64_t)chosen * (width + (topk->indices == DTRAIN_INDEX_DELTA ? 5 : 4));
    if (topk->indices == DTRAIN_INDEX_AUTO && bytes > width * count) /* then without indices */
        bytes = width * count;
    return DTRAIN__SPARSE_HEADER + bytes;
}

/* Top-k after its warm-up, at most; lengths travel before the selections. */
static uint64_t dtrain__plan_topk(const dtrain_topk_desc *topk, size_t count, int ranks)
{
    double ratio = topk->threshold > 0.0f ? 1.0 : topk->schedule.ratio == 0.0 ? 0.01 : topk->schedule.ratio;
    size_t chosen = dtrain_topk_count(count, ratio), part = dtrain_split(count, ranks, 0, NULL), picked;
    uint64_t others = (uint64_t)(ranks - 1), one = dtrain__plan_selection(topk, chosen, count);
    uint64_t dense = dtrain__feedback_dense_bytes(count, ranks), most = 8 * (uint64_t)count;
    if (topk->exchange == DTRAIN_EXCHANGE_GATHER || (topk->exchange == DTRAIN_EXCHANGE_AUTO && ranks <= 8)) {
        if (one * (uint64_t)ranks <= most)
            return others * (8 + one);
        one = one < most ? one : most; /* together selections are no longer than that, or vectors are sent */
        return 8 * others + (others * one > dense ? others * one : dense);
    }
    picked = chosen > part / (size_t)ranks ? part : chosen * (size_t)ranks;
    if (topk->exchange == DTRAIN_EXCHANGE_SPLIT_TOPK)
        picked = dtrain_topk_count(part, ratio);
    return others * (16 + DTRAIN__SPARSE_HEADER + dtrain__plan_selection(topk, picked, part)) +
           dtrain__plan_selection(topk, chosen, SIZE_MAX / 8);
}

/* What a compressor that packs sends: each other rank its part, and all of them this one's sum. */
static uint64_t dtrain__plan_packs(const dtrain_compressor *q, size_t count, int ranks, int rank)
{
    uint64_t bytes = 0;
    for (int r = 0; r < ranks; r++)
        bytes += q->bytes(q, dtrain_split(count, ranks, r, NULL)) * (r == rank ? (uint64_t)(ranks - 1) : 1);
    return bytes;
}

/* What one part of a bucket sends between copies; *plain: how many elements travel as they are, with others. */
static uint64_t dtrain__plan_part(const dtrain_compress_desc *desc, size_t count, size_t rows, int ranks, int rank,
                                  size_t *plain)
{
    size_t thin;
    dtrain_compressor q;
    rows = rows > 0 ? rows : 1;
    if (count == 0 || ranks < 2)
        return 0;
    if (dtrain__compression_is_plain(desc, count, rows)) {
        *plain += count;
        return 0;
    }
    switch (desc->kind) {
    case DTRAIN_COMPRESS_DEFAULT:
    case DTRAIN_COMPRESS_TOPK: return dtrain__plan_topk(&desc->topk, count, ranks);
    case DTRAIN_COMPRESS_POWERSGD:
        thin = (rows + count / rows) * (desc->rank > 0 ? (size_t)desc->rank : 4);
        return dtrain__feedback_dense_bytes(thin < count ? thin : count, ranks);
    default: break;
    }
    if (dtrain__compression_make(desc, 1, 1, NULL, &q) != DTRAIN_OK || q.reduce != NULL)
        return dtrain__feedback_dense_bytes(count, ranks); /* nobody knows */
    return dtrain__plan_packs(&q, count, ranks, rank);
}

/* What a bucket of units sends between copies. */
static uint64_t dtrain__plan_bucket(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int lowest, int highest,
                                    int copy)
{
    const dtrain__cut_unit *units = layout->units;
    size_t plain = 0, count = units[highest].grad + units[highest].grad_count - units[lowest].grad;
    uint64_t bytes = 0;
    if (desc->compress == NULL)
        plain = count;
    else if (desc->compress->kind != DTRAIN_COMPRESS_POWERSGD)
        bytes = dtrain__plan_part(desc->compress, count, 1, layout->copies, copy, &plain);
    for (size_t i = units[lowest].first;
         desc->compress != NULL && desc->compress->kind == DTRAIN_COMPRESS_POWERSGD && i < units[highest].end; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        size_t rows = layout->table[cut->param].shape[cut->layer >= 0 ? 1 : 0];
        if (cut->trained)
            bytes += dtrain__plan_part(desc->compress, cut->own_count, rows, layout->copies, copy, &plain);
    }
    uint64_t dense = dtrain__feedback_dense_bytes(plain, layout->copies);
    return bytes + (dtrain__layout_is_16_bit(desc->reduce_dtype) ? dense / 2 : dense);
}

/* What all buckets send between copies. */
static uint64_t dtrain__plan_copies(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int copy)
{
    size_t bucket_bytes = desc->bucket_bytes == 0 ? DTRAIN__FSDP_BUCKET : desc->bucket_bytes;
    uint64_t bytes = 0;
    int highest = -1;
    for (int unit = layout->unit_count - 1; unit >= 0; unit--) {
        if (layout->units[unit].trained == 0)
            continue;
        highest = highest < 0 ? unit : highest;
        if (!dtrain__layout_is_16_bit(desc->reduce_dtype) &&
            !dtrain__layout_ends_bucket(layout, unit, highest, bucket_bytes))
            continue;
        bytes += dtrain__plan_bucket(layout, desc, unit, highest, copy);
        highest = -1;
    }
    return bytes;
}

/* What other ranks are sent: each unit is gathered in both passes, but for the two that are still there. */
static void dtrain__plan_traffic(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int rank,
                                 dtrain_fsdp_plan_result *plan)
{
    uint64_t gather_bytes = dtrain__layout_is_16_bit(desc->gather_dtype) ? 2 : 4;
    uint64_t reduce_bytes = dtrain__layout_is_16_bit(desc->reduce_dtype) ? 2 : 4;
    for (int i = 0; i < layout->unit_count; i++) {
        uint64_t passes = layout->resident || desc->no_reshard_after_forward ||
                                  i + DTRAIN__FSDP_ROTATING >= layout->unit_count || layout->units[i].tied
                              ? 1
                              : 2;
        for (size_t k = layout->units[i].first; k < layout->units[i].end && layout->shards > 1; k++) {
            const dtrain__cut *cut = &layout->cuts[k];
            uint64_t others = (uint64_t)(cut->count - cut->own_count);
            plan->sent_gather +=
                passes * (cut->codes ? dtrain__plan_sends(layout, cut, desc->quantise_gather) : others * gather_bytes);
            if (cut->trained)
                plan->sent_reduce +=
                    cut->codes_grad ? dtrain__plan_sends(layout, cut, desc->quantise_reduce) : others * reduce_bytes;
        }
    }
    if (layout->copies > 1)
        plan->sent_reduce += dtrain__plan_copies(layout, desc, rank / layout->shards);
}

#endif
