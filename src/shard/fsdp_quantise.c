/* ---- >>fsdp-quantise ----
 * Parameters and gradients of sharded units as int8, with a scale for each block. A rank packs its part of a range for
 * all ranks that gather it. It packs each part of its gradients for the part's owner, who adds them as float32 in tree
 * order. Small ranges, which travel together, are not quantised. Packed ranges wait in stages beside the full memory:
 * for two units that are gathered, and for one that is reduced.
 *
 *   source   Wang and others, ZeRO++, arXiv:2306.10209, 2023, but for its quantised reduction in two steps */
#ifndef DTRAIN__FSDP_QUANTISE
#define DTRAIN__FSDP_QUANTISE
#include "fsdp.c"
#include "../compress/quantise.c"

/* Returns the elements that are unpacked at once: whole blocks. */
static size_t dtrain__fsdp_code_tile(size_t block)
{
    return block < DTRAIN__FSDP_CHUNK ? DTRAIN__FSDP_CHUNK / block * block : block;
}

/* Returns the bytes that packing needs besides stages: a tile of every rank's numbers, and of packed ones. */
static size_t dtrain__fsdp_code_scratch(const dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    size_t tile = desc->quantise_reduce > 0 ? dtrain__fsdp_code_tile(desc->quantise_reduce) : 0;
    return tile == 0 ? 0 : ((size_t)layout->shards + 2) * tile * sizeof(float);
}

static size_t dtrain__fsdp_code_memory(const dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    return 2 * layout->code_stage + layout->code_out + layout->code_in + dtrain__fsdp_code_scratch(layout, desc) +
           (desc->quantise_gather + desc->quantise_reduce > 0 ? (size_t)5 : 0) * layout->cut_count *
               (size_t)layout->shards * sizeof(size_t);
}

/* Returns a range's five tables of bytes, with an entry for each rank: see dtrain__fsdp_code_create. */
static size_t *dtrain__fsdp_code_counts(const dtrain_fsdp *fsdp, size_t index)
{
    return fsdp->codes.counts + 5 * index * (size_t)fsdp->layout.shards;
}

/* Divides up the memory, and fills in five tables for each range:
 *
 *   0   bytes that a rank sends of its parameters
 *   1   bytes of gradients that go to a rank
 *   2   where these begin
 *   3   bytes of gradients that come from a rank
 *   4   where these begin */
static dtrain_status dtrain__fsdp_code_create(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    const dtrain_fsdp_desc *desc = &fsdp->desc;
    size_t n = (size_t)layout->shards;
    if (desc->quantise_gather == 0 && desc->quantise_reduce == 0)
        return DTRAIN_OK;
    fsdp->codes.scratch = (float *)(void *)(fsdp->codes.counts + 5 * layout->cut_count * n);
    fsdp->codes.stages = (unsigned char *)fsdp->codes.scratch + dtrain__fsdp_code_scratch(layout, desc);
    for (size_t i = 0; i < layout->cut_count; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        size_t *counts = dtrain__fsdp_code_counts(fsdp, i), at = 0, own;
        for (size_t shard = 0; shard < n; shard++) {
            size_t count = dtrain__layout_part(layout, cut, (int)shard, &own);
            counts[shard] = dtrain__layout_code_bytes(count, desc->quantise_gather);
            counts[n + shard] = dtrain__layout_code_bytes(count, desc->quantise_reduce);
            counts[2 * n + shard] = at;
            at += counts[n + shard];
            counts[3 * n + shard] = dtrain__layout_code_bytes(cut->own_count, desc->quantise_reduce);
            counts[4 * n + shard] = shard * counts[3 * n + shard];
        }
    }
    return DTRAIN_OK;
}

/* Starts to gather a range: packs this rank's part for every rank. */
static dtrain_status dtrain__fsdp_code_gather(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = dtrain__fsdp_code_counts(fsdp, index);
    unsigned char *stage = fsdp->codes.stages + (size_t)(cut->unit % 2) * fsdp->layout.code_stage + cut->code,
                  *own = stage;
    for (int shard = 0; shard < fsdp->layout.shard; shard++)
        own += counts[shard];
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__quantise_int8_pack(fsdp->state.masters + cut->weight, cut->own_count, fsdp->desc.quantise_gather, own);
    dtrain__fpmode_restore(mode);
    return dtrain__all_gather_v(fsdp->gathers, own, stage, counts, NULL, DTRAIN_U8, &fsdp->schedule.gathering[index]);
}

/* Unpacks the parts of all ranks, this one's included, so that all ranks have the same bits. */
static void dtrain__fsdp_code_gathered(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = dtrain__fsdp_code_counts(fsdp, index);
    const unsigned char *from = fsdp->codes.stages + (size_t)(cut->unit % 2) * fsdp->layout.code_stage + cut->code;
    uint64_t mode = dtrain__fpmode_enter();
    for (int shard = 0; shard < fsdp->layout.shards; from += counts[shard++]) {
        size_t own, count = dtrain__layout_part(&fsdp->layout, cut, shard, &own);
        if (count > 0)
            dtrain__quantise_int8_unpack(from, cut->data + own, count, fsdp->desc.quantise_gather);
    }
    dtrain__fpmode_restore(mode);
}

static unsigned char *dtrain__fsdp_code_out(const dtrain_fsdp *fsdp, const dtrain__layout_cut *cut)
{
    return fsdp->codes.stages + 2 * fsdp->layout.code_stage + cut->code_out;
}

static unsigned char *dtrain__fsdp_code_in(const dtrain_fsdp *fsdp, const dtrain__layout_cut *cut)
{
    return fsdp->codes.stages + 2 * fsdp->layout.code_stage + fsdp->layout.code_out + cut->code_in;
}

/* Starts to reduce a range: packs each rank's part of the gradients for that rank. */
static dtrain_status dtrain__fsdp_code_reduce(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    const float *full = cut->grads;
    size_t n = (size_t)fsdp->layout.shards, own;
    const size_t *out = dtrain__fsdp_code_counts(fsdp, index) + n;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t shard = 0; shard < n; shard++) {
        size_t count = dtrain__layout_part(&fsdp->layout, cut, (int)shard, &own);
        if (count > 0)
            dtrain__quantise_int8_pack(full + own, count, fsdp->desc.quantise_reduce,
                                       dtrain__fsdp_code_out(fsdp, cut) + out[n + shard]);
    }
    dtrain__fpmode_restore(mode);
    return dtrain__all_to_all_v(fsdp->reduces, dtrain__fsdp_code_out(fsdp, cut), out, out + n,
                                dtrain__fsdp_code_in(fsdp, cut), out + 2 * n, out + 3 * n, DTRAIN_U8,
                                &fsdp->schedule.reducing[index]);
}

/* Adds up this rank's part of a range, tile by tile. */
static void dtrain__fsdp_code_reduced(dtrain_fsdp *fsdp, size_t index, float *sum)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    size_t n = (size_t)fsdp->layout.shards, block = fsdp->desc.quantise_reduce, tile = dtrain__fsdp_code_tile(block);
    size_t blocks = dtrain__quantise_blocks(cut->own_count, block);
    const size_t *offsets = dtrain__fsdp_code_counts(fsdp, index) + 4 * n;
    unsigned char *code = (unsigned char *)(fsdp->codes.scratch + n * tile);
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t at = 0; at < cut->own_count; at += tile) {
        size_t count = cut->own_count - at < tile ? cut->own_count - at : tile;
        size_t scales = 4 * dtrain__quantise_blocks(count, block);
        void *outs[1];
        outs[0] = sum + at;
        for (size_t r = 0; r < n; r++) {
            const unsigned char *in = dtrain__fsdp_code_in(fsdp, cut) + offsets[r];
            memcpy(code, in + 4 * (at / block), scales);
            memcpy(code + scales, in + 4 * blocks + at, count);
            dtrain__quantise_int8_unpack(code, fsdp->codes.scratch + r * tile, count, block);
            fsdp->codes.parts[r] = fsdp->codes.scratch + r * tile;
        }
        dtrain__fold(DTRAIN_F32, DTRAIN_SUM, 1.0, fsdp->codes.parts, (int)n, outs, 1, 0, count);
    }
    dtrain__fpmode_restore(mode);
}

#endif
