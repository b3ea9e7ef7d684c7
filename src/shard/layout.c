/* ---- >>layout ----
 * How a parameter table is cut over ranks: the ranges of units, this rank's part of each, and where they lie. A range
 * is what one parameter has in one unit. Parts are contiguous slices of a unit's concatenation, so a rank may have
 * nothing of a range. All of it is arithmetic. The plan of >>fsdp and the object agree because both ask here. */
#ifndef DTRAIN__LAYOUT
#define DTRAIN__LAYOUT
#include "fsdp.h"
#include "../train/params.c"
#include "../train/train_kernels.c"

#define DTRAIN__LAYOUT_SMALL DTRAIN__TUNED(layout_small, (size_t)16 << 10) /* elements of a small range, at most */
#define DTRAIN__LAYOUT_STAGE ((size_t)64 << 10) /* elements of a unit's small ranges that travel together, at most */
#define DTRAIN__LAYOUT_ALONE 65536 /* elements of a gradient that is too large to be copied to others and back */
/* The most elements, cuts or events. A few hundred bytes of each can be counted without an overflow. */
#define DTRAIN__LAYOUT_MOST (SIZE_MAX >> 12)
/* With 32 bits a system has room for more elements than that. A plan counts less than 128 bytes of each, as long as
 * there are fewer than 2^20 micro-batches. */
#define DTRAIN__LAYOUT_ELEMENTS (sizeof(size_t) < 8 ? SIZE_MAX >> 7 : DTRAIN__LAYOUT_MOST)
#define DTRAIN__LAYOUT_LINE 64   /* floats; on a device a unit begins at a multiple */
#define DTRAIN__LAYOUT_LITTLE 32 /* small ranges stay in memory if they are at most this fraction of two units */
/* The least elements of a part that gets whole pages of its own. */
#define DTRAIN__LAYOUT_HOME DTRAIN__TUNED(layout_home, (size_t)64 << 10)

typedef struct dtrain__layout_cut {
    size_t param; /* of the table */
    int layer;    /* of a stacked parameter; else -1 */
    int unit, trained;
    int packed;                     /* travels with the other small ranges of its unit, on a device with all */
    size_t stage, grad_stage;       /* where it is among these, and among the trained ones of these; on a device among
                                     * all of its unit */
    size_t element, count;          /* first element in the parameter, and how many */
    float *data, *grads;            /* the range in full, and its gradient; NULL: none */
    size_t begin;                   /* in the unit's concatenation */
    size_t own, own_count;          /* this rank's part of the range */
    int home;                       /* 1: that part stays at its addresses in full; 0: it is kept apart */
    size_t weight;                  /* where the part is among this rank's weights that are kept apart */
    int stays;                      /* small: its pages, and its gradient's, are never dropped */
    size_t grad;                    /* where the part is in this rank's gradients and optimizer state, if trained */
    size_t full_grad;               /* where the range is among all trained ranges */
    int codes, codes_grad;          /* parameters, gradients travel quantised */
    size_t code, code_out, code_in; /* bytes into the unit's stages: parameters, gradients sent, gradients received */
} dtrain__layout_cut;

typedef struct dtrain__layout_unit {
    size_t first, end;           /* its cuts */
    size_t count;                /* elements */
    size_t trained;              /* those of them with a gradient */
    size_t grad, grad_count;     /* this rank's gradients */
    size_t small;                /* elements of small gradients of units before it: see DTRAIN__LAYOUT_ALONE */
    size_t packed, packed_grads; /* elements of small ranges, and of trained ones; on a device of all ranges */
    int tied;
    /* on a device, for its weights and for its gradients: */
    size_t place[2], floats[2]; /* begin and size of its place; size 0: all ranges are in the caller's memory */
    int shares[2];              /* its place is that of all even units, or of all odd units */
    int whole[2];               /* no range is in the caller's memory */
} dtrain__layout_unit;

typedef struct dtrain__layout {
    dtrain_param *table; /* a copy with names and parts of its own; the other tables are in the same block */
    size_t table_count, bytes;
    dtrain__layout_cut *cuts;
    size_t cut_count;
    dtrain__layout_unit *units;
    int unit_count, shards, copies, shard; /* ranks of one copy; copies; this rank's place in its copy */
    dtrain_device *device;                 /* of all parameters; NULL: the CPU */
    int resident;                          /* full parameters are kept */
    int apart;                             /* this rank's weights are kept apart from them */
    size_t stage;                          /* elements of a stage: the most that one unit's small ranges have; on a
                                            * device 0 if nothing travels by way of one */
    size_t place_floats[2];                /* of all places: see dtrain__layout_unit */
    size_t weights, grads, trained; /* elements: this rank's parts kept apart, its trained parts, all trained ranges */
    size_t small;                   /* elements of small gradients */
    size_t code_stage, code_out, code_in; /* bytes: the most that one unit's quantised ranges have */
    size_t *offsets;                      /* a parameter's: bytes from the begin of the reserved addresses */
    size_t reserved;
} dtrain__layout;

/* Returns a desc, which may be NULL, with its defaults filled in. */
static dtrain_fsdp_desc dtrain__layout_desc(const dtrain_fsdp_desc *given)
{
    dtrain_fsdp_desc desc;
    memset(&desc, 0, sizeof desc);
    if (given != NULL)
        desc = *given;
    desc.strategy = desc.strategy == DTRAIN_STRATEGY_DEFAULT ? DTRAIN_FULL_SHARD : desc.strategy;
    desc.gather_dtype = desc.gather_dtype == 0 ? DTRAIN_F32 : desc.gather_dtype;
    desc.reduce_dtype = desc.reduce_dtype == 0 ? DTRAIN_F32 : desc.reduce_dtype;
    desc.bucket_bytes = desc.bucket_bytes == 0 ? (size_t)1 << 20 : desc.bucket_bytes;
    desc.keep_full_grads |= desc.compress != NULL;
    return desc;
}

static int dtrain__layout_is_16_bit(dtrain_dtype dtype)
{
    return dtype == DTRAIN_BF16 || dtype == DTRAIN_F16;
}

/* Checks that 1-bit Adam is possible. */
static dtrain_status dtrain__layout_check_adam(const dtrain_fsdp_desc *desc, const dtrain_device *device)
{
    const dtrain_compress_desc *compress = desc->compress;
    dtrain_optimizer_kind kind = desc->optimizer.kind;
    if (!compress->adam)
        return DTRAIN_OK;
    if (kind == DTRAIN_OPTIMIZER_NONE)
        return dtrain__params_no_adam(compress, "fsdp without an optimizer");
    if (desc->strategy != DTRAIN_DDP || device != NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "fsdp: compress.adam needs all of m and v in each rank's memory, on the CPU: use "
                            "DTRAIN_DDP there; if sharded or on %s, leave it 0",
                            device != NULL ? dtrain_device_name(device) : "a device");
    if (kind == DTRAIN_SGD || compress->feedback.start_step == 0 || compress->feedback.momentum != 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: compress.adam with %s, feedback.start_step %llu and feedback.momentum %g: expected "
                            "DTRAIN_ADAMW, a start_step above 0, in which v forms, and momentum 0",
                            kind == DTRAIN_SGD ? "DTRAIN_SGD" : "DTRAIN_ADAMW",
                            (unsigned long long)compress->feedback.start_step, (double)compress->feedback.momentum);
    return DTRAIN_OK;
}

/* Checks that sums can travel compressed. They must be whole, and in the same scale step after step. */
static dtrain_status dtrain__layout_check_compress(const dtrain_fsdp_desc *desc, const dtrain_device *device)
{
    dtrain_strategy strategy = desc->strategy;
    dtrain_status status = dtrain__layout_check_adam(desc, device);
    if (status != DTRAIN_OK)
        return status;
    if (strategy != DTRAIN_DDP && strategy != DTRAIN_HYBRID_SHARD)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: compress works on sums that travel between copies: use DTRAIN_DDP or "
                            "DTRAIN_HYBRID_SHARD; for sharded gradients use quantise_reduce");
    if (strategy == DTRAIN_HYBRID_SHARD && desc->compress->kind == DTRAIN_COMPRESS_POWERSGD && desc->shard_size > 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: PowerSGD needs whole matrices, and hybrid sharding leaves slices of them on a rank: "
                            "use DTRAIN_DDP, or another compressor");
    if (desc->reduce_dtype != DTRAIN_F32 || desc->loss_scale != 0.0f)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "fsdp: compress with reduce_dtype %s and loss_scale %g: unsent gradients are kept in float32 and without "
            "a scale, so leave both 0",
            dtrain_dtype_name(desc->reduce_dtype), (double)desc->loss_scale);
    return DTRAIN_OK;
}

/* Checks that parameters and gradients can travel quantised. */
static dtrain_status dtrain__layout_check_quantise(const dtrain_fsdp_desc *desc)
{
    dtrain_strategy strategy = desc->strategy;
    size_t gather = desc->quantise_gather, reduce = desc->quantise_reduce;
    if (gather % 8 != 0 || gather > 65536 || reduce % 8 != 0 || reduce > 65536)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "fsdp: quantise_gather is %zu, quantise_reduce %zu: expected multiples of 8, at most 65,536", gather,
            reduce);
    if (gather > 0 && (strategy == DTRAIN_DDP || strategy == DTRAIN_SHARD_GRAD_OP))
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "fsdp: quantise_gather would round the full weights that DTRAIN_DDP and DTRAIN_SHARD_GRAD_OP keep: use "
            "DTRAIN_FULL_SHARD or DTRAIN_HYBRID_SHARD");
    if (reduce > 0 && strategy == DTRAIN_DDP)
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "fsdp: quantise_reduce needs sharded gradients: with DTRAIN_DDP use compress, which keeps rounding errors "
            "for the next step");
    if (reduce > 0 && desc->reduce_dtype != DTRAIN_F32)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: quantise_reduce with reduce_dtype %s: gradients are added as float32, leave it 0",
                            dtrain_dtype_name(desc->reduce_dtype));
    return DTRAIN_OK;
}

static dtrain_status dtrain__layout_check_desc(const dtrain_fsdp_desc *desc, int world, const dtrain_device *device)
{
    dtrain_strategy strategy = desc->strategy;
    dtrain_dtype dtypes[2] = {desc->gather_dtype, desc->reduce_dtype};
    if (strategy < DTRAIN_FULL_SHARD || strategy > DTRAIN_HYBRID_SHARD)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: strategy is %d, expected DTRAIN_FULL_SHARD, "
                            "DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP or DTRAIN_HYBRID_SHARD" DTRAIN__ZERO_FIRST,
                            (int)strategy);
    if (strategy == DTRAIN_HYBRID_SHARD && (desc->shard_size < 1 || world % desc->shard_size != 0))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: shard_size is %d on %d ranks: hybrid sharding needs one "
                            "that divides the number of ranks",
                            desc->shard_size, world);
    for (int i = 0; i < 2; i++)
        if (dtypes[i] != DTRAIN_F32 && !dtrain__layout_is_16_bit(dtypes[i]))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "fsdp: %s is %d, expected DTRAIN_F32, DTRAIN_BF16 or "
                                "DTRAIN_F16" DTRAIN__ZERO_FIRST,
                                i == 0 ? "gather_dtype" : "reduce_dtype", (int)dtypes[i]);
    dtrain_status status = dtrain__layout_check_quantise(desc);
    if (status == DTRAIN_OK && desc->compress != NULL)
        status = dtrain__layout_check_compress(desc, device);
    if (status != DTRAIN_OK)
        return status;
    if (device != NULL && (desc->quantise_gather > 0 || desc->quantise_reduce > 0))
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "fsdp: quantise_gather and quantise_reduce are for the CPU's memory, parameters are on %s: "
                            "use gather_dtype and reduce_dtype DTRAIN_BF16 there",
                            dtrain_device_name(device));
    if (desc->micro_batches < 0 || desc->loss_scale_steps < 0 || !dtrain__train_finite((double)desc->loss_scale) ||
        desc->loss_scale < 0.0f)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "fsdp: micro_batches is %d, loss_scale %g, loss_scale_steps %d: "
                            "expected finite numbers of at least 0" DTRAIN__ZERO_FIRST,
                            desc->micro_batches, (double)desc->loss_scale, desc->loss_scale_steps);
    if (desc->trace_events > DTRAIN__LAYOUT_MOST)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "fsdp: trace_events is %zu, more than memory: keep fewer",
                            desc->trace_events);
    return DTRAIN_OK;
}

static dtrain_status dtrain__layout_check_table(const dtrain_param *table, size_t count)
{
    dtrain_status status = dtrain__params_check_for(table, count, 1);
    size_t elements = 0, cuts = 0;
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++) {
        if (!dtrain__add_size(elements, dtrain_param_elements(&table[i]), &elements) ||
            !dtrain__add_size(cuts, dtrain__params_layers(&table[i]), &cuts) || elements > DTRAIN__LAYOUT_ELEMENTS ||
            cuts > DTRAIN__LAYOUT_MOST)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "fsdp: the parameters up to %s have more elements or layers than memory: check shapes",
                                table[i].name);
        if (table[i].device != table[0].device)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "fsdp: parameter %s is on %s, %s on %s: expected all in one memory, and one queue",
                                table[i].name, dtrain_device_name(table[i].device), table[0].name,
                                dtrain_device_name(table[0].device));
        if (table[i].dtype != DTRAIN_F32 && !(table[i].frozen && table[i].data != NULL))
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "fsdp: parameter %s is %s: list F32 parameters, or freeze it and give its data",
                                table[i].name, dtrain_dtype_name(table[i].dtype));
    }
    return status;
}

static void dtrain__layout_destroy(dtrain__layout *layout, dtrain_allocator *allocator)
{
    dtrain__free(allocator, layout->table);
    memset(layout, 0, sizeof *layout);
}

/* Takes a table of count elements from a block of zeros, and adds its bytes to *used. NULL: it only counts them. */
static DTRAIN__NOINLINE void *dtrain__layout_take(unsigned char *block, size_t *used, size_t count, size_t bytes)
{
    void *taken = block != NULL ? block + *used : NULL;
    *used += (count * bytes + DTRAIN__CACHE_LINE - 1) / DTRAIN__CACHE_LINE * DTRAIN__CACHE_LINE;
    return taken;
}

/* Copies the table, with the names and parts that it points to, and makes room for its cuts. */
static dtrain_status dtrain__layout_copy(dtrain__layout *layout, const dtrain_param *table, size_t count,
                                         dtrain_allocator *allocator)
{
    size_t names_bytes = 0, part_count = 0;
    unsigned char *block = NULL;
    char *names = NULL;
    dtrain_param_part *parts = NULL;
    layout->table_count = count;
    layout->unit_count = dtrain_params_units(table, count);
    for (size_t i = 0; i < count; i++) {
        names_bytes += strlen(table[i].name) + 1;
        part_count += table[i].part != NULL;
        layout->cut_count += dtrain__params_layers(&table[i]);
    }
    for (int pass = 0; pass < 2; pass++) {
        block = pass > 0 ? (unsigned char *)dtrain__alloc(allocator, layout->bytes) : NULL;
        if (pass > 0 && block == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "fsdp: no memory for a table of %zu parameters", count);
        layout->bytes = 0;
        layout->table = (dtrain_param *)dtrain__layout_take(block, &layout->bytes, count, sizeof *layout->table);
        names = (char *)dtrain__layout_take(block, &layout->bytes, names_bytes, 1);
        parts = (dtrain_param_part *)dtrain__layout_take(block, &layout->bytes, part_count, sizeof *parts);
        layout->offsets = (size_t *)dtrain__layout_take(block, &layout->bytes, count, sizeof *layout->offsets);
        layout->cuts =
            (dtrain__layout_cut *)dtrain__layout_take(block, &layout->bytes, layout->cut_count, sizeof *layout->cuts);
        layout->units = (dtrain__layout_unit *)dtrain__layout_take(block, &layout->bytes, (size_t)layout->unit_count,
                                                                   sizeof *layout->units);
    }
    memcpy(layout->table, table, count * sizeof(dtrain_param));
    for (size_t i = 0; i < count; i++) {
        size_t bytes = strlen(table[i].name) + 1;
        layout->table[i].name = (const char *)memcpy(names, table[i].name, bytes);
        names += bytes;
        if (table[i].part != NULL) {
            *parts = *table[i].part;
            layout->table[i].part = parts++;
        }
        layout->offsets[i] = layout->reserved;
        if (table[i].dtype == DTRAIN_F32)
            layout->reserved += (dtrain_param_elements(&table[i]) * sizeof(float) + 63) / 64 * 64;
    }
    return DTRAIN_OK;
}

/* Writes the cuts of one unit, in table order. */
static size_t dtrain__layout_fill(dtrain__layout *layout, int number, size_t at)
{
    dtrain__layout_unit *unit = &layout->units[number];
    unit->first = at;
    for (size_t i = 0; i < layout->table_count; i++) {
        const dtrain_param *param = &layout->table[i];
        size_t layers = dtrain__params_layers(param);
        if (number < param->unit || (size_t)number >= (size_t)param->unit + layers)
            continue;
        dtrain__layout_cut *cut = &layout->cuts[at++];
        cut->param = i;
        cut->unit = number;
        cut->layer = param->stacked ? number - param->unit : -1;
        cut->trained = !param->frozen;
        cut->count = param->dtype == DTRAIN_F32 ? dtrain_param_elements(param) / layers : 0;
        cut->element = (size_t)(number - param->unit) * cut->count;
        cut->begin = unit->count;
        unit->count += cut->count;
        unit->trained += cut->trained ? cut->count : 0;
        unit->tied |= param->tied;
    }
    unit->end = at;
    return at;
}

static size_t dtrain__layout_line(size_t floats)
{
    return (floats + DTRAIN__LAYOUT_LINE - 1) / DTRAIN__LAYOUT_LINE * DTRAIN__LAYOUT_LINE;
}

/* Finds the places of units on a device: first the two shared ones, then those of units with their own.
 *
 *   grads   1: of gradients; 0: of weights
 *   stays   1: no unit shares a place */
static void dtrain__layout_place(dtrain__layout *layout, int grads, int stays)
{
    size_t shared[2] = {0, 0}, own;
    for (int number = 0; number < layout->unit_count; number++) {
        dtrain__layout_unit *unit = &layout->units[number];
        unit->whole[grads] = 1;
        for (size_t i = unit->first; i < unit->end; i++) {
            const dtrain__layout_cut *cut = &layout->cuts[i];
            const dtrain_param *param = &layout->table[cut->param];
            if (cut->count == 0 || (grads && !cut->trained))
                continue;
            if ((grads ? param->grad : param->data) != NULL)
                unit->whole[grads] = 0;
            else
                unit->floats[grads] = dtrain__layout_line(grads ? unit->trained : unit->count);
        }
        unit->shares[grads] = !unit->tied && !stays && (!grads || unit->floats[grads] > 0);
        if (unit->shares[grads] && unit->floats[grads] > shared[number & 1])
            shared[number & 1] = unit->floats[grads];
    }
    own = shared[0] + shared[1];
    for (int number = 0; number < layout->unit_count; number++) {
        dtrain__layout_unit *unit = &layout->units[number];
        unit->place[grads] = !unit->shares[grads] ? own : number & 1 ? shared[0] : 0;
        own += unit->shares[grads] ? 0 : unit->floats[grads];
    }
    layout->place_floats[grads] = own;
}

/* Does the same for weights and gradients, and finds the size of a stage: 0 if nothing travels by way of one. */
static void dtrain__layout_place_all(dtrain__layout *layout, const dtrain_fsdp_desc *desc)
{
    int gathers = layout->apart || layout->shards > 1, scatters = layout->shards > 1;
    int needed = (gathers && dtrain__layout_is_16_bit(desc->gather_dtype)) ||
                 (scatters && dtrain__layout_is_16_bit(desc->reduce_dtype));
    dtrain__layout_place(layout, 0, layout->resident || desc->no_reshard_after_forward);
    dtrain__layout_place(layout, 1, desc->no_overlap);
    for (int i = 0; i < layout->unit_count; i++)
        needed |= (gathers && !layout->units[i].whole[0]) || (scatters && !layout->units[i].whole[1]);
    layout->stage = needed ? dtrain__layout_line(layout->stage) : 0;
}

/* Says which ranges of a unit travel together: small ones, if there are several; on a device all. A rank's part of
 * these is one piece, as its slice of the unit is. */
static void dtrain__layout_pack(dtrain__layout *layout, int number)
{
    dtrain__layout_unit *unit = &layout->units[number];
    size_t small = 0, elements = 0;
    int all = layout->device != NULL;
    for (size_t i = unit->first; i < unit->end; i++) {
        dtrain__layout_cut *cut = &layout->cuts[i];
        cut->packed = all || (layout->shards > 1 && cut->count > 0 && cut->count <= DTRAIN__LAYOUT_SMALL &&
                              elements + cut->count <= DTRAIN__LAYOUT_STAGE);
        elements += cut->packed ? cut->count : 0;
        small += (size_t)cut->packed;
    }
    for (size_t i = unit->first; i < unit->end; i++) {
        dtrain__layout_cut *cut = &layout->cuts[i];
        cut->packed = all || (cut->packed && small > 1);
        cut->stage = unit->packed;
        cut->grad_stage = unit->packed_grads;
        unit->packed += cut->packed ? cut->count : 0;
        unit->packed_grads += cut->packed && cut->trained ? cut->count : 0;
    }
    layout->stage = unit->packed > layout->stage ? unit->packed : layout->stage;
}

/* Returns how many elements two stretches have in common. Sets *low to where these begin; if there are none, to a. */
static size_t dtrain__layout_overlap(size_t a, size_t a_count, size_t b, size_t b_count, size_t *low)
{
    size_t begin = a > b ? a : b, end = a + a_count < b + b_count ? a + a_count : b + b_count;
    *low = begin < end ? begin : a;
    return begin < end ? end - begin : 0;
}

/* Returns how many elements of a range a rank of the copy has; *own is where they begin in the range. */
static size_t dtrain__layout_part(const dtrain__layout *layout, const dtrain__layout_cut *cut, int shard, size_t *own)
{
    size_t begin, all = dtrain__split(layout->units[cut->unit].count, layout->shards, shard, &begin);
    size_t count = dtrain__layout_overlap(cut->begin, cut->count, begin, all, own);
    *own -= cut->begin;
    return count;
}

/* Returns the bytes of count numbers when quantised. */
static DTRAIN__NOINLINE size_t dtrain__layout_code_bytes(size_t count, size_t block)
{
    return block == 0 || count == 0 ? 0 : 4 * ((count - 1) / block + 1) + count;
}

static size_t dtrain__layout_round(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

/* Says which ranges of a unit travel quantised, and where they lie in its stages. Packed ranges never do. */
static void dtrain__layout_code(dtrain__layout *layout, int number, const dtrain_fsdp_desc *desc)
{
    dtrain__layout_unit *unit = &layout->units[number];
    size_t stage = 0, out = 0, in = 0, own;
    for (size_t i = unit->first; i < unit->end && layout->shards > 1; i++) {
        dtrain__layout_cut *cut = &layout->cuts[i];
        cut->codes = desc->quantise_gather > 0 && !cut->packed && cut->count > 0;
        cut->codes_grad = desc->quantise_reduce > 0 && !cut->packed && cut->count > 0 && cut->trained;
        cut->code = stage;
        cut->code_out = out;
        cut->code_in = in;
        for (int shard = 0; shard < layout->shards; shard++) {
            size_t count = dtrain__layout_part(layout, cut, shard, &own);
            stage += cut->codes ? dtrain__layout_code_bytes(count, desc->quantise_gather) : 0;
            out += cut->codes_grad ? dtrain__layout_code_bytes(count, desc->quantise_reduce) : 0;
        }
        in += cut->codes_grad
                  ? (size_t)layout->shards * dtrain__layout_code_bytes(cut->own_count, desc->quantise_reduce)
                  : 0;
        stage = dtrain__layout_round(stage);
        out = dtrain__layout_round(out);
        in = dtrain__layout_round(in);
    }
    layout->code_stage = stage > layout->code_stage ? stage : layout->code_stage;
    layout->code_out = out > layout->code_out ? out : layout->code_out;
    layout->code_in = in > layout->code_in ? in : layout->code_in;
}

/* Returns the bytes that a rank sends of a unit in a gather; grads: of its gradients to their owners. On a device,
 * gradients are rounded but travel as float32. */
static uint64_t dtrain__layout_sends(const dtrain__layout *layout, const dtrain_fsdp_desc *desc, int number, int grads)
{
    size_t block = grads ? desc->quantise_reduce : desc->quantise_gather, own;
    int narrow = dtrain__layout_is_16_bit(grads ? desc->reduce_dtype : desc->gather_dtype);
    uint64_t bytes = 0, width = narrow && (!grads || layout->device == NULL) ? 2 : 4;
    for (size_t i = layout->units[number].first; i < layout->units[number].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        int coded = grads ? cut->codes_grad : cut->codes;
        if (!coded && (!grads || cut->trained))
            bytes += width * (cut->count - cut->own_count);
        for (int shard = 0; shard < layout->shards && coded; shard++)
            if (shard != layout->shard)
                bytes += dtrain__layout_code_bytes(dtrain__layout_part(layout, cut, shard, &own), block);
    }
    return bytes;
}

/* Says which ranges keep their pages. To drop the pages of a small range costs more time than it saves memory. So small
 * ranges stay, if all of them together are little beside the two largest units. */
static void dtrain__layout_stay(dtrain__layout *layout)
{
    size_t small = 0, two[2] = {0, 0};
    for (size_t i = 0; i < layout->cut_count; i++)
        small += layout->cuts[i].count <= DTRAIN__LAYOUT_SMALL ? layout->cuts[i].count : 0;
    for (int i = 0; i < layout->unit_count; i++) {
        size_t count = layout->units[i].count;
        two[1] = count > two[0] ? two[0] : count > two[1] ? count : two[1];
        two[0] = count > two[0] ? count : two[0];
    }
    for (size_t i = 0; i < layout->cut_count && small <= (two[0] + two[1]) / DTRAIN__LAYOUT_LITTLE; i++)
        layout->cuts[i].stays = layout->cuts[i].count > 0 && layout->cuts[i].count <= DTRAIN__LAYOUT_SMALL;
}

/* Returns how many elements of a range, or of its gradient, are in memory for good; *at is where they begin. */
static size_t dtrain__layout_staying(const dtrain__layout_cut *cut, int grads, size_t *at)
{
    *at = cut->stays || grads ? 0 : cut->own;
    return cut->stays ? cut->count : cut->home && !grads ? cut->own_count : 0;
}

/* Cuts a table for rank `rank` of `world`, after checking the table and the desc. */
static dtrain_status dtrain__layout_create(dtrain__layout *layout, const dtrain_param *table, size_t count,
                                           const dtrain_fsdp_desc *desc, int world, int rank,
                                           dtrain_allocator *allocator)
{
    memset(layout, 0, sizeof *layout);
    dtrain_device *device = count > 0 && table != NULL ? table[0].device : NULL;
    dtrain_status status = dtrain__layout_check_desc(desc, world, device);
    if (status == DTRAIN_OK)
        status = dtrain__layout_check_table(table, count);
    if (status == DTRAIN_OK)
        status = dtrain__layout_copy(layout, table, count, allocator);
    if (status != DTRAIN_OK) {
        dtrain__layout_destroy(layout, allocator);
        return status;
    }
    layout->device = device;
    layout->shards = desc->strategy == DTRAIN_DDP            ? 1
                     : desc->strategy == DTRAIN_HYBRID_SHARD ? desc->shard_size
                                                             : world;
    layout->copies = world / layout->shards;
    layout->shard = rank % layout->shards;
    layout->resident = desc->strategy == DTRAIN_SHARD_GRAD_OP || layout->shards == 1;
    layout->apart = !layout->resident || dtrain__layout_is_16_bit(desc->gather_dtype);
    for (size_t at = 0, number = 0; number < (size_t)layout->unit_count; number++) {
        dtrain__layout_unit *unit = &layout->units[number];
        unit->grad = layout->grads;
        unit->small = layout->small;
        at = dtrain__layout_fill(layout, (int)number, at);
        dtrain__layout_pack(layout, (int)number);
        for (size_t i = unit->first; i < unit->end; i++) {
            dtrain__layout_cut *cut = &layout->cuts[i];
            cut->own_count = dtrain__layout_part(layout, cut, layout->shard, &cut->own);
            cut->home = device == NULL && !layout->resident && desc->quantise_gather == 0 &&
                        !dtrain__layout_is_16_bit(desc->gather_dtype) && !cut->packed &&
                        cut->own_count >= DTRAIN__LAYOUT_HOME;
            cut->weight = layout->weights;
            cut->grad = layout->grads;
            cut->full_grad = layout->trained;
            layout->weights += layout->apart && !cut->home ? cut->own_count : 0;
            layout->grads += cut->trained ? cut->own_count : 0;
            layout->trained += cut->trained ? cut->count : 0;
            layout->small += cut->trained && cut->count < DTRAIN__LAYOUT_ALONE ? cut->count : 0;
        }
        unit->grad_count = layout->grads - unit->grad;
        dtrain__layout_code(layout, (int)number, desc);
    }
    if (device == NULL)
        dtrain__layout_stay(layout);
    else
        dtrain__layout_place_all(layout, desc);
    return DTRAIN_OK;
}

/* Says whether a bucket that begins with unit `highest` is sent when `unit` has joined it: it is large enough, or no
 * trained unit follows. */
static int dtrain__layout_ends_bucket(const dtrain__layout *layout, int unit, int highest, size_t bucket_bytes)
{
    const dtrain__layout_unit *units = layout->units;
    int last = unit;
    while (last > 0 && units[last - 1].trained == 0)
        last--;
    return last == 0 ||
           (units[highest].grad + units[highest].grad_count - units[unit].grad) * sizeof(float) >= bucket_bytes;
}

#endif
