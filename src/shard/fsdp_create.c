/* ---- >>fsdp-create ----
 * Makes and frees an object: its groups, its memory, its first values, and its list of pieces for checkpoints. */
#ifndef DTRAIN__FSDP_CREATE
#define DTRAIN__FSDP_CREATE
#include "fsdp_plan.c"
#include "fsdp_access.c"
#include "../comm/work.c"
#include "../train/state.c"

static const char *dtrain__fsdp_strategy_name(int value)
{
    static const char *const names[] = {"FULL_SHARD", "SHARD_GRAD_OP", "DDP", "HYBRID_SHARD"};
    int index = value == DTRAIN_STRATEGY_DEFAULT ? 0 : value - DTRAIN_FULL_SHARD;
    return index >= 0 && index < 4 ? names[index] : NULL;
}

static const char *dtrain__fsdp_optimizer_name(int value)
{
    static const char *const names[] = {"SGD", "ADAMW", "NONE"};
    int index = (value == DTRAIN_OPTIMIZER_DEFAULT ? DTRAIN_ADAMW : value) - DTRAIN_SGD;
    return index >= 0 && index < 3 ? names[index] : NULL;
}

static const dtrain__alike_field dtrain__fsdp_fields[] = {
    DTRAIN__ALIKE_CONSTANT(dtrain_fsdp_desc, strategy, dtrain__fsdp_strategy_name),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, shard_size, NUMBER),
    DTRAIN__ALIKE_CONSTANT(dtrain_fsdp_desc, gather_dtype, dtrain__alike_dtype),
    DTRAIN__ALIKE_CONSTANT(dtrain_fsdp_desc, reduce_dtype, dtrain__alike_dtype),
    DTRAIN__ALIKE_CONSTANT(dtrain_fsdp_desc, optimizer.kind, dtrain__fsdp_optimizer_name),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, optimizer.beta1, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, optimizer.beta2, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, optimizer.eps, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, optimizer.weight_decay, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, optimizer.momentum, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, optimizer.nesterov, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, optimizer.decoupled_decay, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, groups, OWN), /* each by its own table */
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, group_count, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, no_reshard_after_forward, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, no_prefetch, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, no_overlap, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, keep_full_grads, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, micro_batches, OWN), /* read by dtrain_fsdp_plan alone */
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, loss_scale, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, loss_scale_steps, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, bucket_bytes, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, no_broadcast, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, trace_events, OWN), /* each rank keeps as many as it likes */
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, quantise_gather, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, quantise_reduce, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, compress, OWN), /* by its own table */
    DTRAIN__ALIKE_FIELD(dtrain_fsdp_desc, check_every, NUMBER),
    {"debug (or DTRAIN_DEBUG)", offsetof(dtrain_fsdp_desc, debug), sizeof(int), DTRAIN__ALIKE_NUMBER, NULL}};

static const dtrain__alike_field dtrain__fsdp_group_fields[] = {
    DTRAIN__ALIKE_FIELD(dtrain_param_group, name, NAME), DTRAIN__ALIKE_FIELD(dtrain_param_group, lr_factor, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_param_group, weight_decay, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_param_group, no_decay, FLAG)};

enum {
    DTRAIN__FSDP_FIELDS = sizeof dtrain__fsdp_fields / sizeof dtrain__fsdp_fields[0],
    DTRAIN__FSDP_GROUP_FIELDS = sizeof dtrain__fsdp_group_fields / sizeof dtrain__fsdp_group_fields[0]
};

/* Describes what must be the same on every rank: the table, the desc, its compression, its groups. */
static int dtrain__fsdp_line(const void *pointer, size_t index, dtrain__alike_line *line)
{
    const dtrain__params_given *given = (const dtrain__params_given *)pointer;
    const dtrain_fsdp_desc *desc = (const dtrain_fsdp_desc *)given->desc;
    size_t lines = dtrain__params_lines(given->count) + given->field_count + DTRAIN__PARAMS_COMPRESS, group;
    char prefix[40];
    if (index < lines)
        return dtrain__params_given_line(given, index, line);
    group = (index - lines) / DTRAIN__FSDP_GROUP_FIELDS;
    snprintf(prefix, sizeof prefix, "desc.groups[%zu].", group);
    return group < desc->group_count &&
           dtrain__alike_field_line(line, prefix,
                                    &dtrain__fsdp_group_fields[(index - lines) % DTRAIN__FSDP_GROUP_FIELDS],
                                    &desc->groups[group]);
}

/* Compares tables and descs on all ranks. A rank with bad arguments takes part, so that the others learn it. */
static dtrain_status dtrain__fsdp_compare(dtrain_fsdp *fsdp, const dtrain_param *table, size_t count,
                                          dtrain_status mine)
{
    dtrain__params_given given = {
        table, count, 1, &fsdp->desc, dtrain__fsdp_fields, DTRAIN__FSDP_FIELDS, fsdp->desc.compress};
    dtrain__alike alike = {fsdp->call, &given, dtrain__fsdp_line, "give all ranks the same table and desc", 0, {0}, 0};
    return dtrain__alike_meet(fsdp->comm, &alike, mine);
}

/* Makes the reducer, if sums travel compressed: between copies, or to nobody in a world of one. */
static dtrain_status dtrain__fsdp_make_sender(dtrain_fsdp *fsdp)
{
    int alone = dtrain_comm_size(fsdp->comm) == 1;
    if (fsdp->desc.compress == NULL || (fsdp->copies == NULL && !alone))
        return DTRAIN_OK;
    int threaded = fsdp->copies != NULL && !fsdp->shares_comm && !fsdp->desc.no_overlap &&
                   fsdp->comm->desc.progress != DTRAIN_PROGRESS_POLL;
    return dtrain__reducer_create(&fsdp->reducer, alone ? fsdp->comm : fsdp->copies, threaded, &fsdp->layout,
                                  fsdp->desc.compress, fsdp->desc.bucket_bytes, &fsdp->memory);
}

/* Makes the groups. If the transport has none, and all ranks are one group, the caller's serves for all. */
static dtrain_status dtrain__fsdp_groups(dtrain_fsdp *fsdp)
{
    int rank = dtrain__fsdp_rank(fsdp), shards = fsdp->layout.shards, copies = fsdp->layout.copies;
    if (shards * copies == 1)
        return DTRAIN_OK;
    dtrain_status status = dtrain_comm_split(fsdp->comm, 0, 0, &fsdp->world);
    if (status == DTRAIN_ERR_UNSUPPORTED && (shards == 1 || copies == 1)) {
        fsdp->shares_comm = 1;
        fsdp->world = fsdp->comm;
        fsdp->gathers = fsdp->reduces = shards > 1 ? fsdp->comm : NULL;
        fsdp->copies = copies > 1 ? fsdp->comm : NULL;
        return DTRAIN_OK;
    }
    if (status == DTRAIN_OK && shards > 1)
        status = dtrain_comm_split(fsdp->comm, rank / shards, rank, &fsdp->gathers);
    if (status == DTRAIN_OK && shards > 1)
        status = dtrain_comm_split(fsdp->comm, rank / shards, rank, &fsdp->reduces);
    if (status == DTRAIN_OK && copies > 1)
        status = dtrain_comm_split(fsdp->comm, rank % shards, rank, &fsdp->copies);
    return status;
}

/* Says whether a group's name fits a parameter's. */
static int dtrain__fsdp_fits(const char *pattern, const char *name)
{
    size_t bytes = strlen(pattern);
    if (bytes > 0 && pattern[bytes - 1] == '*')
        return strncmp(pattern, name, bytes - 1) == 0;
    return strcmp(pattern, name) == 0;
}

static dtrain_status dtrain__fsdp_check_groups(const dtrain_fsdp_desc *desc, const char *call)
{
    if (desc->group_count > 0 && desc->groups == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: groups is NULL, expected %zu of them: or set group_count 0",
                            call, desc->group_count);
    for (size_t i = 0; i < desc->group_count; i++) {
        const dtrain_param_group *group = &desc->groups[i];
        if (group->name == NULL || strlen(group->name) > 127 || !dtrain__train_finite((double)group->lr_factor) ||
            !dtrain__train_finite((double)group->weight_decay) || group->lr_factor < 0.0f || group->weight_decay < 0.0f)
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "%s: groups[%zu] has name %.40s, lr_factor %g and weight_decay %g: expected a name of "
                                "at most 127 characters, and numbers of at least 0",
                                call, i, group->name != NULL ? group->name : "NULL", (double)group->lr_factor,
                                (double)group->weight_decay);
    }
    return DTRAIN_OK;
}

/* A group that fits no parameter is most often a misspelt one, whose parameters would train with other settings. */
static dtrain_status dtrain__fsdp_check_fits(const dtrain_fsdp *fsdp)
{
    for (size_t k = 0; k < fsdp->desc.group_count; k++) {
        const char *name = fsdp->desc.groups[k].name;
        int fits = 0;
        for (size_t i = 0; i < fsdp->layout.table_count && !fits; i++)
            fits = dtrain__fsdp_fits(name, fsdp->layout.table[i].name);
        if (!fits)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "%s: groups[%zu] has name %s, which none of the %zu parameters has: correct the name (a "
                "* counts only at its end), or leave out groups of another table, such as that of "
                "another stage of a pipeline",
                fsdp->call, k, name, fsdp->layout.table_count);
    }
    return DTRAIN_OK;
}

static void dtrain__fsdp_group_params(dtrain_fsdp *fsdp)
{
    for (size_t i = 0; i < fsdp->layout.table_count; i++) {
        const dtrain_param *param = &fsdp->layout.table[i];
        const dtrain_param_group *group = NULL;
        for (size_t k = fsdp->desc.group_count; k-- > 0;)
            group = dtrain__fsdp_fits(fsdp->desc.groups[k].name, param->name) ? &fsdp->desc.groups[k] : group;
        fsdp->state.lr_factors[i] = group != NULL && group->lr_factor > 0.0f ? group->lr_factor : 1.0f;
        fsdp->state.decays[i] = fsdp->optimizer.weight_decay;
        if (group != NULL && group->weight_decay > 0.0f)
            fsdp->state.decays[i] = group->weight_decay;
        if (param->no_decay || (group != NULL && group->no_decay))
            fsdp->state.decays[i] = 0.0f;
    }
}

/* Fills in a cut's slice, after the memory is reserved. */
static void dtrain__fsdp_describe(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    const dtrain_param *param = &fsdp->layout.table[cut->param];
    dtrain_slice *slice = &fsdp->state.slices[index];
    size_t floats = dtrain__fsdp_plan_state_floats(&fsdp->optimizer);
    slice->name = param->name;
    slice->dtype = param->dtype;
    slice->ndim = dtrain__params_ndim(param);
    memcpy(slice->shape, param->shape, sizeof slice->shape);
    slice->layer = cut->layer;
    slice->unit = cut->unit;
    slice->begin = cut->own;
    slice->count = cut->own_count;
    slice->no_decay = fsdp->state.decays[cut->param] == 0.0f;
    slice->weights = dtrain__fsdp_own(fsdp, cut);
    slice->device = fsdp->device.queue;
    for (size_t k = 0; cut->trained && k < floats; k++)
        slice->state[k] = fsdp->state.arrays + k * fsdp->layout.grads + cut->grad;
    for (int shard = 0; shard < fsdp->layout.shards; shard++) {
        size_t own;
        fsdp->state.counts[index * (size_t)fsdp->layout.shards + (size_t)shard] =
            dtrain__layout_part(&fsdp->layout, cut, shard, &own);
        for (int grads = 0; grads <= cut->trained && cut->packed; grads++)
            fsdp->state
                .packed_counts[(2 * (size_t)cut->unit + (size_t)grads) * (size_t)fsdp->layout.shards + (size_t)shard] +=
                dtrain__layout_part(&fsdp->layout, cut, shard, &own);
    }
}

/* Returns the bytes of the pages that have slices inside reserved ranges. base: where the ranges begin; there the pages
 * of the window are mapped too. NULL: counts only. Slices that share a page follow each other in the window. A slice
 * that the system maps nothing for stays this rank's own. */
static size_t dtrain__fsdp_slice_pages(const dtrain_fsdp *fsdp, unsigned char *base)
{
    size_t page = dtrain__os_page_bytes(), place = 0, end = 0, count = 0;
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        size_t begin = fsdp->layout.offsets[cut->param] + (cut->element + cut->own) * sizeof(float);
        size_t stop = (begin + cut->own_count * sizeof(float) + page - 1) / page * page;
        begin = begin / page * page > end ? begin / page * page : end;
        if (!cut->home || fsdp->layout.table[cut->param].data != NULL || stop <= begin)
            continue;
        if (base != NULL) {
            dtrain__window_alias alias = {(uintptr_t)(base + begin), stop - begin, place};
            if (dtrain__os_alias(fsdp->state.window + place, base + begin, stop - begin) != 0)
                break;
            if (count > 0 && begin == end)
                fsdp->state.aliases[count - 1].bytes += stop - begin;
            else
                fsdp->state.aliases[count++] = alias;
        }
        place += stop - begin;
        end = stop;
    }
    if (count > 0)
        dtrain__window_map(fsdp->state.window, fsdp->state.aliases, count);
    return place;
}

static dtrain_status dtrain__fsdp_cpu_reserve(dtrain_fsdp *fsdp)
{
    dtrain__layout *layout = &fsdp->layout;
    dtrain_fsdp_plan_result plan;
    int any = 0;
    memset(&plan, 0, sizeof plan);
    dtrain_status status = dtrain__fsdp_code_create(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_plan_fill(layout, &fsdp->desc, dtrain_comm_size(fsdp->comm), dtrain__fsdp_rank(fsdp),
                                        &fsdp->memory, &plan);
    for (size_t i = 0; i < layout->table_count; i++)
        any |= fsdp->state.reserved[i];
    for (int grads = 0; status == DTRAIN_OK && grads < 2; grads++)
        status = dtrain__pages_create(&fsdp->state.pages[grads], any >> grads & 1 ? layout->reserved : 0,
                                      grads ? plan.full_grads : plan.full_weights, grads, &fsdp->memory);
    if (status != DTRAIN_OK)
        return status;
    if (fsdp->state.window != NULL)
        dtrain__fsdp_slice_pages(fsdp, fsdp->state.pages[0].base);
    for (size_t i = 0; i < layout->table_count; i++) {
        if (fsdp->state.reserved[i] & 1)
            layout->table[i].data = fsdp->state.pages[0].base + layout->offsets[i];
        if (fsdp->state.reserved[i] & 2)
            layout->table[i].grad = fsdp->state.pages[1].base + layout->offsets[i];
    }
    for (size_t i = 0; i < layout->cut_count; i++)
        for (int grads = 0; grads <= layout->cuts[i].trained; grads++) { /* pages that are never dropped */
            const dtrain__layout_cut *cut = &layout->cuts[i];
            size_t at, count = dtrain__layout_staying(cut, grads, &at);
            size_t begin = layout->offsets[cut->param] + (cut->element + at) * sizeof(float);
            if (fsdp->state.reserved[cut->param] & (1 << grads))
                dtrain__pages_take(&fsdp->state.pages[grads], begin, count * sizeof(float));
        }
    return DTRAIN_OK;
}

/* Gives parameters without memory their addresses. */
static dtrain_status dtrain__fsdp_reserve(dtrain_fsdp *fsdp)
{
    dtrain__layout *layout = &fsdp->layout;
    for (size_t i = 0; i < layout->table_count; i++) {
        dtrain_param *param = &layout->table[i];
        param->grad = param->frozen ? NULL : param->grad;
        fsdp->state.reserved[i] = (unsigned char)((param->data == NULL) | (!param->frozen && param->grad == NULL) << 1);
    }
    dtrain_status status =
        fsdp->device.queue != NULL ? dtrain__fsdp_device_reserve(fsdp) : dtrain__fsdp_cpu_reserve(fsdp);
    for (size_t i = 0; status == DTRAIN_OK && i < layout->cut_count; i++) {
        dtrain__layout_cut *cut = &layout->cuts[i];
        const dtrain_param *param = &layout->table[cut->param];
        cut->data = param->data != NULL ? (float *)param->data + cut->element : cut->data;
        cut->grads = param->grad != NULL ? (float *)param->grad + cut->element : cut->grads;
    }
    return status;
}

static dtrain_status dtrain__fsdp_no_memory(const dtrain_fsdp *fsdp)
{
    return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                        "%s: no memory on rank %d's %s for slices of %zu weights and %zu gradients", fsdp->call,
                        dtrain__fsdp_rank(fsdp), dtrain_device_name(fsdp->device.queue), fsdp->layout.weights,
                        fsdp->layout.grads);
}

/* Allocates what collectives read and write in place: stages, slices kept apart, and the first level of sums. Ranks of
 * a host share it if they can. */
static dtrain_status dtrain__fsdp_allocate_shared(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    const dtrain__plane *plane = fsdp->comm->plane;
    size_t stages = dtrain__layout_line(dtrain__fsdp_plan_stages(layout, &fsdp->desc) / sizeof(float));
    size_t masters = dtrain__layout_line(layout->weights), sums = fsdp->in_place ? layout->small : layout->grads;
    size_t bytes = (stages + masters + sums) * sizeof(float);
    int shares = fsdp->world != NULL && fsdp->device.queue == NULL && plane->sharing != NULL && !plane->in_process;
    size_t slices = shares ? dtrain__fsdp_slice_pages(fsdp, NULL) : 0;
    void *memory = NULL;
    dtrain_status status = shares ? dtrain_comm_alloc(fsdp->world, slices + bytes, &memory) : DTRAIN_OK;
    if (status != DTRAIN_OK)
        return dtrain__fail(NULL, status, "%s: %s", fsdp->call, dtrain__status_cause(&dtrain__thread_error));
    if (!shares)
        memory = dtrain__fsdp_alloc(fsdp, bytes);
    if (memory == NULL)
        return dtrain__fsdp_no_memory(fsdp);
    dtrain__memory_count(&fsdp->memory, shares ? bytes : 0);
    fsdp->state.window = shares ? (unsigned char *)memory : NULL;
    fsdp->state.stages = (float *)(void *)((unsigned char *)memory + slices);
    fsdp->state.masters = fsdp->state.stages + stages;
    fsdp->state.parts.levels[0] = fsdp->state.masters + masters;
    return DTRAIN_OK;
}

static dtrain_status dtrain__fsdp_allocate(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    int ranks = dtrain_comm_size(fsdp->comm);
    size_t floats = dtrain__fsdp_plan_state_floats(&fsdp->optimizer);
    size_t bytes = dtrain__fsdp_plan_tables(fsdp, layout, &fsdp->desc, ranks, NULL);
    dtrain_status status = dtrain__fsdp_allocate_shared(fsdp); /* first, as it takes all ranks */
    if (status != DTRAIN_OK)
        return status;
    fsdp->state.tables = (unsigned char *)dtrain__alloc(&fsdp->memory, bytes);
    dtrain__fsdp_plan_tables(fsdp, layout, &fsdp->desc, ranks, fsdp->state.tables);
    fsdp->schedule.staged[0] = fsdp->schedule.staged[1] = -1;
    fsdp->state.arrays = (float *)dtrain__fsdp_alloc(fsdp, floats * layout->grads * sizeof(float));
    if (fsdp->state.tables == NULL || fsdp->state.arrays == NULL)
        return dtrain__fsdp_no_memory(fsdp);
    return dtrain__fsdp_reserve(fsdp);
}

/* Gives every rank the first values of parameters in the caller's memory. */
static dtrain_status dtrain__fsdp_first_values(dtrain_fsdp *fsdp)
{
    dtrain__layout *layout = &fsdp->layout;
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < layout->table_count && fsdp->world != NULL && !fsdp->desc.no_broadcast; i++)
        if (status == DTRAIN_OK && !(fsdp->state.reserved[i] & 1))
            status = dtrain__fsdp_broadcast(fsdp, layout->table[i].data, dtrain_param_elements(&layout->table[i]),
                                            layout->table[i].dtype);
    for (size_t i = 0; status == DTRAIN_OK && i < layout->cut_count; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        if ((fsdp->state.reserved[cut->param] & 1) || cut->count == 0)
            continue;
        if (layout->apart && !cut->home)
            dtrain__fsdp_copy(fsdp, fsdp->state.masters + cut->weight, cut->data + cut->own, cut->own_count);
        dtrain__fsdp_round(fsdp, cut->data, cut->count, fsdp->desc.gather_dtype, cut->unit % 2);
    }
    for (int i = 0; i < layout->unit_count; i++) {
        fsdp->schedule.trained_units += layout->units[i].trained > 0;
        if (layout->resident)
            dtrain__fsdp_page_weights(fsdp, i, 1);
    }
    return status;
}

static dtrain_status dtrain__fsdp_init(dtrain_fsdp *fsdp, const dtrain_param *table, size_t count, dtrain_status status)
{
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_groups(&fsdp->desc, fsdp->call);
    if (status == DTRAIN_OK)
        status = dtrain__optimizer_check(&fsdp->optimizer, 1, fsdp->call);
    if (status == DTRAIN_OK)
        status = dtrain__layout_create(&fsdp->layout, table, count, &fsdp->desc, dtrain_comm_size(fsdp->comm),
                                       dtrain__fsdp_rank(fsdp), &fsdp->memory);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_fits(fsdp);
    status = dtrain__fsdp_compare(fsdp, table, count, status);
    fsdp->device.queue = fsdp->layout.device;
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_groups(fsdp);
    if (status == DTRAIN_OK && fsdp->device.queue != NULL)
        status = dtrain__fsdp_make_device_groups(fsdp);
    if (status != DTRAIN_OK)
        return status;
    /* with debug, gradients are compared with their earlier values */
    fsdp->in_place = fsdp->ddp && !fsdp->desc.debug && fsdp->desc.compress == NULL && fsdp->device.queue == NULL;
    status = dtrain__fsdp_allocate(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_make_sender(fsdp);
    if (status == DTRAIN_OK && fsdp->device.refused.status != DTRAIN_OK)
        status = dtrain__report(&fsdp->device.refused);
    if (fsdp->world != NULL)
        status = dtrain__alike_agree(fsdp->world, fsdp->call, 0, status);
    if (status != DTRAIN_OK)
        return status;
    dtrain__fsdp_group_params(fsdp);
    for (size_t i = 0; i < fsdp->layout.cut_count; i++)
        dtrain__fsdp_describe(fsdp, i);
    fsdp->desc.groups = NULL;
    fsdp->desc.compress = NULL;
    fsdp->schedule.scattering = fsdp->schedule.bucket = fsdp->schedule.at = -1;
    dtrain__fsdp_debug_share(fsdp);
    dtrain__fsdp_zero_grads(fsdp);
    dtrain__fsdp_reset(fsdp, 0);
    status = dtrain__fsdp_first_values(fsdp);
    if (status == DTRAIN_OK && fsdp->device.refused.status != DTRAIN_OK)
        status = dtrain__report(&fsdp->device.refused);
    if (status == DTRAIN_OK && fsdp->desc.debug)
        dtrain__fsdp_debug_create(fsdp);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    return dtrain__fsdp_break(fsdp, status, "giving every rank the first values", -1);
}

/* How an object is made:
 *
 *   CREATED   over the table as it is
 *   ADOPTED   with the library's memory for all F32 parameters
 *   OF_DDP    for a dtrain_ddp, where an empty parameter without a gradient counts as frozen */
enum { DTRAIN__FSDP_CREATED, DTRAIN__FSDP_ADOPTED, DTRAIN__FSDP_OF_DDP };

/* Copies a table as the object that is made sees it; NULL: no memory. */
static dtrain_param *dtrain__fsdp_see_table(dtrain_allocator *memory, const dtrain_param *table, size_t count, int how)
{
    dtrain_param *seen = NULL;
    size_t bytes;
    if (dtrain__mul_size(count, sizeof *seen, &bytes))
        seen = (dtrain_param *)dtrain__alloc(memory, bytes);
    for (size_t i = 0; seen != NULL && i < count; i++) {
        seen[i] = table[i];
        if (how == DTRAIN__FSDP_OF_DDP)
            seen[i].frozen = !dtrain__params_trained(&table[i]);
        else if (how == DTRAIN__FSDP_ADOPTED && table[i].dtype == DTRAIN_F32)
            seen[i].data = seen[i].grad = NULL;
    }
    return seen;
}

/* Makes an object in the public function `call`. checked: a failure that the caller has found, for the other ranks. */
static dtrain_status dtrain__fsdp_make(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                       const dtrain_fsdp_desc *desc, int how, const char *call, dtrain_status checked)
{
    if (fsdp == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the object to make and comm are needed, got NULL", call);
    *fsdp = NULL;
    dtrain_allocator *given = dtrain_comm_allocator(comm), memory = {given->resize, given->user, 0, 0};
    dtrain_param *seen = NULL;
    dtrain_fsdp *made = (dtrain_fsdp *)dtrain__alloc(&memory, sizeof *made), none;
    if (made == NULL) { /* the others learn it when they compare */
        memset(&none, 0, sizeof none);
        none.comm = comm;
        none.call = call;
        checked = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for %zu bytes", call, sizeof *made);
        return dtrain__fsdp_compare(&none, table, count, checked);
    }
    made->memory = memory;
    made->comm = comm;
    made->call = call;
    made->desc = dtrain__layout_desc(desc);
    made->desc.debug = made->desc.debug >= 0 && dtrain__fsdp_debug_asked(made->desc.debug);
    made->ddp = how == DTRAIN__FSDP_OF_DDP;
    made->optimizer = dtrain__optimizer_defaults(&made->desc.optimizer);
    made->scaling.loss_scale = made->desc.loss_scale > 0.0f ? made->desc.loss_scale : 1.0f;
    made->freezes = made->desc.compress != NULL && made->desc.compress->adam;
    made->freeze_step = made->freezes ? made->desc.compress->feedback.start_step : 0;
    if (how != DTRAIN__FSDP_CREATED && checked == DTRAIN_OK) {
        seen = dtrain__fsdp_see_table(given, table, count, how);
        if (seen == NULL)
            checked = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for %zu parameters", call, count);
    }
    dtrain_status status = dtrain__fsdp_init(made, seen != NULL ? seen : table, count, checked);
    dtrain__free(given, seen);
    if (status == DTRAIN_OK) {
        *fsdp = made;
        return DTRAIN_OK;
    }
    dtrain__error cause = dtrain__thread_error;
    dtrain_fsdp_destroy(made);
    return dtrain__report(&cause);
}

DTRAIN_API dtrain_status dtrain_fsdp_create(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table,
                                            size_t count, const dtrain_fsdp_desc *desc)
{
    return dtrain__fsdp_make(fsdp, comm, table, count, desc, DTRAIN__FSDP_CREATED, "dtrain_fsdp_create", DTRAIN_OK);
}

#define DTRAIN__FSDP_ADOPTS ((size_t)1 << 18) /* elements that are broadcast at once: 1 MiB */

/* Takes the values of a table over, on all ranks or on none. given: for each parameter, 1 if it has values. */
static dtrain_status dtrain__fsdp_adopt_values(dtrain_fsdp *fsdp, const dtrain_param *table, unsigned char *given,
                                               float *stage)
{
    size_t count = fsdp->layout.table_count;
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < count; i++)
        given[i] = table[i].dtype == DTRAIN_F32 && table[i].data != NULL;
    if (fsdp->world != NULL)
        status = dtrain_broadcast(fsdp->world, given, count, DTRAIN_U8, 0);
    for (size_t i = 0; i < count && status == DTRAIN_OK && fsdp->desc.no_broadcast; i++)
        if (table[i].dtype == DTRAIN_F32 && given[i] != (table[i].data != NULL))
            status = dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                  "parameter %s has %s on rank 0 and %s here: with no_broadcast every rank needs data",
                                  table[i].name, given[i] ? "data" : "none", given[i] ? "none" : "data");
    for (size_t i = 0; i < count && status == DTRAIN_OK; i++)
        if (given[i])
            status = dtrain__fsdp_distribute(fsdp, i, (const float *)table[i].data, fsdp->device.queue, stage,
                                             DTRAIN__FSDP_ADOPTS, fsdp->desc.no_broadcast ? -1 : 0);
    if (status == DTRAIN_OK && fsdp->device.refused.status != DTRAIN_OK)
        status = dtrain__report(&fsdp->device.refused);
    return fsdp->world != NULL ? dtrain__alike_agree(fsdp->world, fsdp->call, 0, status) : status;
}

DTRAIN_API dtrain_status dtrain_fsdp_adopt(dtrain_fsdp **fsdp, dtrain_comm *comm, dtrain_param *table, size_t count,
                                           const dtrain_fsdp_desc *desc)
{
    const char *call = "dtrain_fsdp_adopt";
    dtrain_status status = DTRAIN_OK;
    float *stage = NULL;
    size_t bytes;
    if (fsdp == NULL || comm == NULL || table == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: fsdp, comm and table are needed, got NULL", call);
    dtrain_allocator *memory = dtrain_comm_allocator(comm);
    if (dtrain__add_size(count, DTRAIN__FSDP_ADOPTS * sizeof(float), &bytes))
        stage = (float *)dtrain__alloc(memory, bytes);
    if (stage == NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "%s: no memory for %zu parameters", call, count);
    status = dtrain__fsdp_make(fsdp, comm, table, count, desc, DTRAIN__FSDP_ADOPTED, call, status);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_adopt_values(*fsdp, table, (unsigned char *)(stage + DTRAIN__FSDP_ADOPTS), stage);
    dtrain__error cause = dtrain__thread_error;
    dtrain__free(memory, stage);
    if (status != DTRAIN_OK) {
        dtrain_fsdp_destroy(*fsdp);
        *fsdp = NULL;
        return dtrain__report(&cause);
    }
    for (size_t i = 0; i < count; i++) {
        if (table[i].dtype != DTRAIN_F32)
            continue;
        table[i].data = dtrain_fsdp_param(*fsdp, table[i].name);
        table[i].grad = dtrain_fsdp_grad(*fsdp, table[i].name);
    }
    return DTRAIN_OK;
}

/* Waits for an operation until until_ns. After that it breaks the groups, if they are the object's own. */
static void dtrain__fsdp_cancel(dtrain_fsdp *fsdp, dtrain_work **work, int64_t until_ns)
{
    dtrain_comm *groups[] = {fsdp->gathers, fsdp->reduces, fsdp->copies, fsdp->world};
    int ended;
    if (*work == NULL)
        return;
    dtrain__work_end(*work, fsdp->shares_comm ? INT64_MAX : until_ns, &ended);
    for (size_t i = 0; !ended && i < sizeof groups / sizeof groups[0]; i++)
        if (groups[i] != NULL)
            DTRAIN_IGNORE(dtrain_comm_abort(groups[i], "it has destroyed its dtrain_fsdp while this was under way"));
    if (!ended)
        DTRAIN_IGNORE(dtrain_work_wait(*work));
    *work = NULL;
}

static void dtrain__fsdp_quiesce(dtrain_fsdp *fsdp)
{
    int64_t until_ns = dtrain__os_now_ns() + DTRAIN__FSDP_GRACE_NS;
    dtrain__fsdp_cancel(fsdp, &fsdp->exchange.announcing, until_ns);
    dtrain__fsdp_cancel(fsdp, &fsdp->exchange.exchanging, until_ns);
    for (size_t i = 0;
         fsdp->schedule.gathering != NULL && fsdp->schedule.reducing != NULL && i < fsdp->layout.cut_count; i++) {
        dtrain__fsdp_cancel(fsdp, &fsdp->schedule.gathering[i], until_ns);
        dtrain__fsdp_cancel(fsdp, &fsdp->schedule.reducing[i], until_ns);
    }
    for (int i = 0; fsdp->schedule.copying != NULL && i < fsdp->layout.unit_count; i++)
        dtrain__fsdp_cancel(fsdp, &fsdp->schedule.copying[i], until_ns);
    dtrain__reducer_destroy(fsdp->reducer, until_ns);
}

static void dtrain__fsdp_free(dtrain_fsdp *fsdp)
{
    dtrain_allocator *memory = &fsdp->memory, last;
    dtrain__free(memory, fsdp->state.tables);
    if (fsdp->state.window != NULL)
        dtrain_comm_free(fsdp->state.window);
    else
        dtrain__fsdp_release(fsdp, fsdp->state.stages);
    dtrain__fsdp_release(fsdp, fsdp->state.arrays);
    for (int i = 0; i < DTRAIN__TERMS_LEVELS; i++) {
        if (i > 0)
            dtrain__fsdp_release(fsdp, fsdp->state.parts.levels[i]);
        dtrain__fsdp_release(fsdp, fsdp->state.full.levels[i]);
    }
    dtrain__fsdp_free_places(fsdp);
    dtrain__pages_destroy(&fsdp->state.pages[0]);
    dtrain__pages_destroy(&fsdp->state.pages[1]);
    dtrain__layout_destroy(&fsdp->layout, memory);
    last = *memory;
    dtrain__free(&last, fsdp);
}

DTRAIN_API void dtrain_fsdp_destroy(dtrain_fsdp *fsdp)
{
    if (fsdp == NULL)
        return;
    dtrain__error kept = dtrain__thread_error; /* maybe the reason for destroy; operations under way set others */
    dtrain__fsdp_quiesce(fsdp);
    dtrain__thread_error = kept;
    dtrain__fsdp_debug_destroy(fsdp);
    for (int i = 0; i < DTRAIN__FSDP_WAYS; i++) {
        dtrain_device_group_destroy(fsdp->device.groups[i]);
        dtrain__group_close(fsdp->device.comms[i]);
    }
    if (!fsdp->shares_comm) {
        dtrain__group_close(fsdp->gathers);
        dtrain__group_close(fsdp->reduces);
        dtrain__group_close(fsdp->copies);
        dtrain__group_close(fsdp->world);
    }
    dtrain__fsdp_free(fsdp);
}

/* ---- its state, for checkpoints ---- */

/* Lists the weights of an FSDP's slices; with which = 0 or 1 their optimizer state. */
static void dtrain__fsdp_state_put(const dtrain_fsdp *fsdp, int which, dtrain__lister *lister)
{
    const dtrain__layout *layout = &fsdp->layout;
    for (size_t i = 0; i < layout->cut_count; i++) {
        const dtrain_slice *slice = &fsdp->state.slices[i];
        const dtrain_param *param = &layout->table[layout->cuts[i].param];
        if (slice->dtype != DTRAIN_F32 || (which >= 0 && !layout->cuts[i].trained))
            continue;
        dtrain_piece piece = dtrain__state_of(param, DTRAIN_F32, slice->layer);
        piece.suffix = which >= 0 ? dtrain__state_suffix(&fsdp->optimizer, which) : NULL;
        piece.begin = slice->begin;
        piece.count = slice->count;
        dtrain__state_copies(&piece, param, layout->copies, dtrain__fsdp_rank(fsdp) / layout->shards);
        if (layout->shards > 1 && piece.copies > layout->copies) {
            /* These copies have other sizes in other ranges of the unit, so their slices differ. */
            piece.copies = layout->copies;
            piece.copy = dtrain__fsdp_rank(fsdp) / layout->shards;
            piece.unsaved = param->part->copy > 0;
        }
        piece.data = which >= 0 ? slice->state[which] : slice->weights;
        dtrain__state_put_range(lister, param, &piece);
    }
    for (size_t i = 0; i < layout->table_count; i++) {
        const dtrain_param *param = &layout->table[i];
        int no_layers = param->stacked && param->shape[0] == 0;
        if (which >= 0 ? !no_layers || !dtrain__params_trained(param) : param->dtype == DTRAIN_F32 && !no_layers)
            continue; /* others are frozen, and in full on every rank, or have no layer that a slice could be of */
        dtrain_piece piece = dtrain__state_of(param, which >= 0 ? DTRAIN_F32 : param->dtype, -1);
        piece.suffix = which >= 0 ? dtrain__state_suffix(&fsdp->optimizer, which) : NULL;
        dtrain__state_copies(&piece, param, dtrain_comm_size(fsdp->comm), dtrain__fsdp_rank(fsdp));
        piece.data = param->data;
        dtrain__state_put_range(lister, param, &piece);
    }
}

static dtrain_status dtrain__fsdp_state_list(const dtrain_pieces *list, dtrain__lister *lister)
{
    const dtrain_fsdp *fsdp = (const dtrain_fsdp *)list->object;
    int floats = (int)dtrain__fsdp_plan_state_floats(&fsdp->optimizer);
    for (int which = -1; which < floats; which++)
        dtrain__fsdp_state_put(fsdp, which, lister);
    dtrain__reducer_list(fsdp->reducer, &fsdp->layout, dtrain__fsdp_rank(fsdp), lister);
    dtrain__state_tell(lister, &fsdp->optimizer, fsdp->step);
    if (fsdp->desc.loss_scale > 0.0f) {
        dtrain__pieces_tell_f64(lister, "loss_scale", (double)fsdp->scaling.loss_scale, 0);
        dtrain__pieces_tell_u64(lister, "good_steps", (uint64_t)fsdp->scaling.good_steps, 0);
    }
    return DTRAIN_OK;
}

/* Begins a load: an open step is given up. */
static dtrain_status dtrain__fsdp_state_loading(const dtrain_pieces *list, int turn)
{
    dtrain_fsdp *fsdp = (dtrain_fsdp *)list->object;
    dtrain_status status = turn == 0 ? dtrain_fsdp_drop(fsdp) : DTRAIN_OK;
    if (status == DTRAIN_OK)
        dtrain__reducer_loading(fsdp->reducer);
    return status;
}

/* Ends a load: publishes the weights, which drops gradients, and sets the counters. */
static dtrain_status dtrain__fsdp_state_loaded(const dtrain_pieces *list, const dtrain__lister *lister)
{
    dtrain_fsdp *fsdp = (dtrain_fsdp *)list->object;
    uint64_t step = fsdp->step, good_steps = (uint64_t)fsdp->scaling.good_steps;
    double scale = (double)fsdp->scaling.loss_scale;
    if (lister->failed) /* the weights are undefined until the next load */
        return dtrain__reducer_loaded(fsdp->reducer, lister);
    dtrain_status status = dtrain_fsdp_publish(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__reducer_loaded(fsdp->reducer, lister);
    if (status == DTRAIN_OK)
        status = dtrain__pieces_ask(lister, "optimizer.step", UINT64_MAX, &step, NULL);
    if (status == DTRAIN_OK)
        status = dtrain__pieces_ask(lister, "good_steps", INT_MAX, &good_steps, NULL);
    if (status == DTRAIN_OK)
        status = dtrain__pieces_ask(lister, "loss_scale", 0, NULL, &scale);
    if (status != DTRAIN_OK)
        return status;
    fsdp->step = step;
    if (fsdp->desc.loss_scale > 0.0f && !(scale > 0.0 && dtrain__train_finite((double)(float)scale)))
        return dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                            "checkpoint: loss_scale is %g, expected a number above 0: load another checkpoint", scale);
    if (fsdp->desc.loss_scale > 0.0f) {
        fsdp->scaling.loss_scale = (float)scale;
        fsdp->scaling.good_steps = (int)good_steps;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_pieces dtrain_fsdp_pieces(dtrain_fsdp *fsdp)
{
    dtrain_pieces made = dtrain__pieces_make(fsdp, dtrain__fsdp_state_list, dtrain__fsdp_state_loaded);
    made.loading = dtrain__fsdp_state_loading;
    return made;
}

#endif
