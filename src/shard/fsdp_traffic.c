/* ---- >>fsdp-traffic ----
 * What a rank will send in a step, from its layout alone: in numbers that the counters of a run then show, or for
 * selections, whose lengths nobody knows before, at most. */
#ifndef DTRAIN__FSDP_TRAFFIC
#define DTRAIN__FSDP_TRAFFIC
#include "fsdp_quantise.c"
#include "reducer.c"

/* Bytes of a quantised range that are not this rank's: what it sends, of gradients, and what it passes on in a ring, of
 * parameters. */
static uint64_t dtrain__fsdp_traffic_sends(const dtrain__layout *layout, const dtrain__layout_cut *cut, size_t block)
{
    uint64_t bytes = 0;
    size_t own;
    for (int shard = 0; shard < layout->shards; shard++)
        if (shard != layout->shard)
            bytes += dtrain__layout_code_bytes(dtrain__layout_part(layout, cut, shard, &own), block);
    return bytes;
}

/* What all buckets send between copies. */
static uint64_t dtrain__fsdp_traffic_copies(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int copy)
{
    const dtrain__layout_unit *units = layout->units;
    uint64_t bytes = 0;
    int highest = -1, narrow = dtrain__layout_is_16_bit(desc->reduce_dtype);
    for (int unit = layout->unit_count - 1; unit >= 0; unit--) {
        if (units[unit].trained == 0)
            continue;
        highest = highest < 0 ? unit : highest;
        if (!narrow && !dtrain__layout_ends_bucket(layout, unit, highest, desc->bucket_bytes))
            continue;
        size_t plain = units[highest].grad + units[highest].grad_count - units[unit].grad;
        if (desc->compress != NULL)
            bytes += dtrain__reducer_bytes(layout, desc->compress, unit, highest, copy, &plain);
        bytes += dtrain__plan_sent_bytes(plain, layout->copies) / (narrow ? 2 : 1);
        highest = -1;
    }
    return bytes;
}

/* What other ranks are sent: each unit is gathered in both passes, but for the two that are still there. */
static void dtrain__fsdp_traffic(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int rank,
                                 dtrain_fsdp_plan_result *plan)
{
    uint64_t gather_bytes = dtrain__layout_is_16_bit(desc->gather_dtype) ? 2 : 4;
    uint64_t reduce_bytes = dtrain__layout_scatter_bytes(layout, desc);
    for (int i = 0; i < layout->unit_count; i++) {
        uint64_t passes = layout->resident || desc->no_reshard_after_forward ||
                                  i + DTRAIN__FSDP_ROTATING >= layout->unit_count || layout->units[i].tied
                              ? 1
                              : 2;
        for (size_t k = layout->units[i].first; k < layout->units[i].end && layout->shards > 1; k++) {
            const dtrain__layout_cut *cut = &layout->cuts[k];
            uint64_t others = (uint64_t)(cut->count - cut->own_count);
            plan->sent_gather += passes * (cut->codes ? dtrain__fsdp_traffic_sends(layout, cut, desc->quantise_gather)
                                                      : others * gather_bytes);
            if (cut->trained)
                plan->sent_reduce += cut->codes_grad ? dtrain__fsdp_traffic_sends(layout, cut, desc->quantise_reduce)
                                                     : others * reduce_bytes;
        }
    }
    if (layout->copies > 1)
        plan->sent_reduce += dtrain__fsdp_traffic_copies(layout, desc, rank / layout->shards);
}

#endif
