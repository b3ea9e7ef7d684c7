/* ---- >>fsdp-create ----
 * Makes and frees an object: its groups, its memory, the first values. */
#ifndef DTRAIN__FSDP_CREATE
#define DTRAIN__FSDP_CREATE
#include "fsdp_plan.c"
#include "fsdp_access.c"
#include "../comm/comm.c"

static void dtrain__fsdp_compress_fields(const dtrain_compress_desc *desc, double fields[18])
{
    const dtrain_topk_desc *topk = &desc->topk;
    fields[0] = (double)desc->kind;
    fields[1] = topk->schedule.ratio;
    fields[2] = (double)topk->schedule.stage_steps;
    fields[3] = topk->schedule.first_ratio;
    fields[4] = topk->schedule.factor;
    fields[5] = (double)topk->threshold;
    fields[6] = (double)topk->values;
    fields[7] = (double)topk->indices;
    fields[8] = (double)topk->exchange;
    fields[9] = (double)desc->block;
    fields[10] = (double)desc->rank;
    fields[11] = (double)(desc->own != NULL);
    fields[12] = (double)desc->feedback.no_feedback;
    fields[13] = (double)desc->feedback.momentum;
    fields[14] = (double)desc->feedback.no_masking;
    fields[15] = (double)desc->feedback.max_norm;
    fields[16] = (double)desc->least_count;
    fields[17] = 1.0;
}

/* Hashes what must be the same on every rank. */
static void dtrain__fsdp_digest(const dtrain_param *table, size_t count, const dtrain_fsdp_desc *desc,
                                unsigned char digest[32])
{
    const dtrain_optimizer_desc *o = &desc->optimizer;
    double fields[] = {(double)desc->strategy,
                       (double)desc->shard_size,
                       (double)desc->gather_dtype,
                       (double)desc->reduce_dtype,
                       (double)o->kind,
                       (double)o->beta1,
                       (double)o->beta2,
                       (double)o->eps,
                       (double)o->weight_decay,
                       (double)o->momentum,
                       (double)o->nesterov,
                       (double)o->decoupled_decay,
                       (double)desc->no_reshard_after_forward,
                       (double)desc->no_prefetch,
                       (double)desc->keep_full_grads,
                       (double)desc->loss_scale,
                       (double)desc->loss_scale_steps,
                       (double)desc->no_broadcast,
                       (double)desc->no_overlap,
                       (double)desc->bucket_bytes,
                       (double)desc->quantise_gather,
                       (double)desc->quantise_reduce};
    struct {
        unsigned char before[32];
        char name[128];
        float numbers[4];
    } group;
    struct {
        unsigned char before[32];
        double fields[18];
    } compress;
    dtrain_sha256(fields, sizeof fields, digest);
    if (desc->compress != NULL) {
        memset(&compress, 0, sizeof compress);
        memcpy(compress.before, digest, 32);
        dtrain__fsdp_compress_fields(desc->compress, compress.fields);
        dtrain_sha256(&compress, sizeof compress, digest);
    }
    for (size_t i = 0; i < desc->group_count; i++) {
        memset(&group, 0, sizeof group);
        memcpy(group.before, digest, 32);
        snprintf(group.name, sizeof group.name, "%s", desc->groups[i].name);
        group.numbers[0] = desc->groups[i].lr_factor;
        group.numbers[1] = desc->groups[i].weight_decay;
        group.numbers[2] = (float)desc->groups[i].no_decay;
        dtrain_sha256(&group, sizeof group, digest);
    }
    dtrain__params_digest(table, count, digest);
    for (size_t i = 0; i < count; i++) {
        memset(&group, 0, sizeof group);
        memcpy(group.before, digest, 32);
        group.numbers[0] = (float)(table[i].data != NULL);
        group.numbers[1] = (float)(table[i].device != NULL);
        dtrain_sha256(&group, sizeof group, digest);
    }
}

/* Compares tables and descs on all ranks; a rank whose own is bad takes part, so that the others learn it. */
static dtrain_status dtrain__fsdp_compare(dtrain_fsdp *fsdp, const dtrain_param *table, size_t count,
                                          dtrain_status mine)
{
    unsigned char digest[32];
    dtrain__error cause = dtrain__thread_error;
    memset(digest, 0, sizeof digest);
    if (mine == DTRAIN_OK)
        dtrain__fsdp_digest(table, count, &fsdp->desc, digest);
    dtrain_status status = dtrain_comm_check_equal(fsdp->comm, digest, sizeof digest, DTRAIN_U8);
    if (mine != DTRAIN_OK)
        return dtrain__report(&cause);
    if (status != DTRAIN_ERR_MISMATCH)
        return status;
    cause = dtrain__thread_error;
    return dtrain__fail(NULL, status,
                        "dtrain_fsdp_create: rank %d of %d has another parameter table or desc than others, or one of "
                        "them is refused: build them alike on every rank (by hash: %.300s)",
                        dtrain__fsdp_rank(fsdp), dtrain_comm_size(fsdp->comm), cause.text);
}

/* Tells all ranks when one could not make its own, so that none waits for it in what follows. */
static dtrain_status dtrain__fsdp_agree(dtrain_fsdp *fsdp, dtrain_status mine)
{
    dtrain__error cause = dtrain__thread_error;
    int32_t failed = mine != DTRAIN_OK ? dtrain__fsdp_rank(fsdp) + 1 : 0;
    char why[DTRAIN__FSDP_WHY];
    if (fsdp->world == NULL)
        return mine;
    memset(why, 0, sizeof why);
    dtrain_status status = dtrain_all_reduce(fsdp->world, &failed, &failed, 1, DTRAIN_I32, DTRAIN_MAX);
    if (status == DTRAIN_OK && failed == 0)
        return DTRAIN_OK;
    if (mine != DTRAIN_OK)
        snprintf(why, sizeof why, "%.*s", DTRAIN__FSDP_WHY - 1, cause.text);
    if (status == DTRAIN_OK)
        status = dtrain_broadcast(fsdp->world, why, sizeof why, DTRAIN_U8, failed - 1);
    if (mine != DTRAIN_OK)
        return dtrain__report(&cause);
    if (status != DTRAIN_OK)
        return status;
    return dtrain__fail(NULL, DTRAIN_ERR_ABORTED,
                        "dtrain_fsdp_create: rank %d of %d could not make its part: %.*s; nothing was made on any rank",
                        failed - 1, dtrain_comm_size(fsdp->comm), DTRAIN__FSDP_WHY - 1, why);
}

/* Makes what sends compressed, where something does: between copies, or to nobody in a world of one. */
static dtrain_status dtrain__fsdp_make_sender(dtrain_fsdp *fsdp)
{
    int alone = dtrain_comm_size(fsdp->comm) == 1;
    if (fsdp->desc.compress == NULL || (fsdp->copies == NULL && !alone))
        return DTRAIN_OK;
    int threaded = fsdp->copies != NULL && !fsdp->shares_comm && !fsdp->desc.no_overlap &&
                   fsdp->comm->desc.progress != DTRAIN_PROGRESS_POLL;
    return dtrain__sender_create(&fsdp->sender, alone ? fsdp->comm : fsdp->copies, threaded, &fsdp->layout,
                                 fsdp->desc.compress, fsdp->desc.bucket_bytes, &fsdp->memory);
}

/* Makes the groups; where a transport has none, and all ranks are one group, the caller's serves for all. */
static dtrain_status dtrain__fsdp_groups(dtrain_fsdp *fsdp)
{
    int rank = dtrain__fsdp_rank(fsdp), shards = fsdp->layout.shards, copies = fsdp->layout.copies;
    if (shards * copies == 1)
        return DTRAIN_OK;
    dtrain_status status = dtrain_comm_duplicate(fsdp->comm, &fsdp->world);
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

static dtrain_status dtrain__fsdp_check_groups(const dtrain_fsdp_desc *desc)
{
    if (desc->group_count > 0 && desc->groups == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_create: groups is NULL, expected %zu of them",
                            desc->group_count);
    for (size_t i = 0; i < desc->group_count; i++) {
        const dtrain_param_group *group = &desc->groups[i];
        if (group->name == NULL || strlen(group->name) > 127 || !dtrain__train_finite((double)group->lr_factor) ||
            !dtrain__train_finite((double)group->weight_decay) || group->lr_factor < 0.0f || group->weight_decay < 0.0f)
            return dtrain__fail(
                NULL, DTRAIN_ERR_INVALID,
                "dtrain_fsdp_create: group %zu needs a name of at most 127 characters, and lr_factor and "
                "weight_decay of at least 0",
                i);
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
        fsdp->lr_factors[i] = group != NULL && group->lr_factor > 0.0f ? group->lr_factor : 1.0f;
        fsdp->decays[i] = fsdp->optimizer.weight_decay;
        if (group != NULL && group->weight_decay > 0.0f)
            fsdp->decays[i] = group->weight_decay;
        if (param->no_decay || (group != NULL && group->no_decay))
            fsdp->decays[i] = 0.0f;
    }
}

/* Fills in what a cut's slice says, once the memory is there. */
static void dtrain__fsdp_describe(dtrain_fsdp *fsdp, size_t index)
{
    const dtrain__cut *cut = &fsdp->layout.cuts[index];
    const dtrain_param *param = &fsdp->layout.table[cut->param];
    dtrain_slice *slice = &fsdp->slices[index];
    size_t floats = dtrain__plan_state_floats(&fsdp->optimizer);
    slice->name = param->name;
    slice->dtype = param->dtype;
    slice->ndim = dtrain__params_ndim(param);
    memcpy(slice->shape, param->shape, sizeof slice->shape);
    slice->layer = cut->layer;
    slice->unit = cut->unit;
    slice->begin = cut->own;
    slice->count = cut->own_count;
    slice->no_decay = fsdp->decays[cut->param] == 0.0f;
    slice->weights = dtrain__fsdp_own(fsdp, cut);
    slice->device = fsdp->device.queue;
    for (size_t k = 0; cut->trained && k < floats; k++)
        slice->state[k] = fsdp->state + k * fsdp->layout.grads + cut->grad;
    for (int shard = 0; shard < fsdp->layout.shards; shard++) {
        size_t own;
        fsdp->counts[index * (size_t)fsdp->layout.shards + (size_t)shard] =
            dtrain__layout_part(&fsdp->layout, cut, shard, &own);
        for (int grads = 0; grads <= cut->trained && (cut->packed || fsdp->device.queue != NULL); grads++)
            fsdp->packed_counts[(2 * (size_t)cut->unit + (size_t)grads) * (size_t)fsdp->layout.shards +
                                (size_t)shard] += dtrain__layout_part(&fsdp->layout, cut, shard, &own);
    }
}

/* Takes the pages of a range that are never dropped. */
static void dtrain__fsdp_settle_in(dtrain_fsdp *fsdp, const dtrain__cut *cut)
{
    for (int grads = 0; grads <= cut->trained; grads++) {
        size_t at, count = dtrain__layout_staying(cut, grads, &at);
        size_t begin = fsdp->layout.offsets[cut->param] + (cut->element + at) * sizeof(float);
        if (fsdp->reserved[cut->param] & (1 << grads))
            dtrain__pages_take(grads ? &fsdp->grad_pages : &fsdp->weight_pages, begin, count * sizeof(float));
    }
}

/* Gives parameters without memory their addresses. */
static dtrain_status dtrain__fsdp_reserve(dtrain_fsdp *fsdp)
{
    dtrain__layout *layout = &fsdp->layout;
    dtrain_fsdp_plan_result plan;
    int any = 0;
    for (size_t i = 0; i < layout->table_count; i++) {
        fsdp->reserved[i] = (unsigned char)(layout->table[i].data == NULL);
        if (!layout->table[i].frozen && layout->table[i].grad == NULL)
            fsdp->reserved[i] |= 2;
        any |= fsdp->reserved[i];
        if (layout->table[i].frozen)
            layout->table[i].grad = NULL;
    }
    if (layout->device != NULL)
        return DTRAIN_OK;
    memset(&plan, 0, sizeof plan);
    dtrain_status status = dtrain__plan_fill(layout, &fsdp->desc, dtrain_comm_size(fsdp->comm), dtrain__fsdp_rank(fsdp),
                                             &fsdp->memory, &plan);
    if (status == DTRAIN_OK)
        status = dtrain__pages_create(&fsdp->weight_pages, any & 1 ? layout->reserved : 0, plan.full_weights, 0,
                                      &fsdp->memory);
    if (status == DTRAIN_OK)
        status =
            dtrain__pages_create(&fsdp->grad_pages, any & 2 ? layout->reserved : 0, plan.full_grads, 1, &fsdp->memory);
    for (size_t i = 0; status == DTRAIN_OK && i < layout->table_count; i++) {
        if (fsdp->reserved[i] & 1)
            layout->table[i].data = fsdp->weight_pages.base + layout->offsets[i];
        if (fsdp->reserved[i] & 2)
            layout->table[i].grad = fsdp->grad_pages.base + layout->offsets[i];
    }
    for (size_t i = 0; status == DTRAIN_OK && i < layout->cut_count; i++)
        dtrain__fsdp_settle_in(fsdp, &layout->cuts[i]);
    return status;
}

static dtrain_status dtrain__fsdp_allocate(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    dtrain_allocator *memory = &fsdp->memory;
    size_t cuts = layout->cut_count, params = layout->table_count, units = (size_t)layout->unit_count;
    size_t world = (size_t)dtrain_comm_size(fsdp->comm), floats = dtrain__plan_state_floats(&fsdp->optimizer);
    fsdp->units = (dtrain__fsdp_unit *)dtrain__alloc(memory, units * sizeof *fsdp->units);
    fsdp->copying = (dtrain_work **)dtrain__alloc(memory, units * sizeof *fsdp->copying);
    fsdp->reserved = (unsigned char *)dtrain__alloc(memory, params);
    fsdp->lr_factors = (float *)dtrain__alloc(memory, 2 * params * sizeof(float));
    fsdp->counts = (size_t *)dtrain__alloc(memory, cuts * (size_t)layout->shards * sizeof(size_t));
    fsdp->packed_counts = (size_t *)dtrain__alloc(memory, 2 * units * (size_t)layout->shards * sizeof(size_t));
    fsdp->stages = (float *)dtrain__alloc(memory, dtrain__plan_stages(layout));
    fsdp->staged[0] = fsdp->staged[1] = -1;
    fsdp->code_parts = (const void **)dtrain__alloc(memory, (size_t)layout->shards * sizeof(void *));
    fsdp->gathering = (dtrain_work **)dtrain__alloc(memory, cuts * sizeof *fsdp->gathering);
    fsdp->reducing = (dtrain_work **)dtrain__alloc(memory, cuts * sizeof *fsdp->reducing);
    fsdp->slices = (dtrain_slice *)dtrain__alloc(memory, cuts * sizeof *fsdp->slices);
    fsdp->notes = (dtrain__fsdp_note *)dtrain__alloc(memory, world * sizeof *fsdp->notes);
    fsdp->announcements = (double *)dtrain__alloc(memory, 2 * world * sizeof(double));
    fsdp->buckets = (dtrain_bucket *)dtrain__alloc(memory, 2 * units * sizeof *fsdp->buckets);
    fsdp->events = (dtrain__fsdp_event *)dtrain__alloc(memory, fsdp->desc.trace_events * sizeof *fsdp->events);
    fsdp->state = (float *)dtrain__fsdp_alloc(fsdp, floats * layout->grads * sizeof(float));
    fsdp->masters = (float *)dtrain__fsdp_alloc(fsdp, dtrain__plan_apart(layout));
    fsdp->levels[0] = (float *)dtrain__fsdp_alloc(fsdp, layout->grads * sizeof(float));
    if (fsdp->units == NULL || fsdp->copying == NULL || fsdp->reserved == NULL || fsdp->lr_factors == NULL ||
        fsdp->counts == NULL || fsdp->gathering == NULL || fsdp->reducing == NULL || fsdp->slices == NULL ||
        fsdp->notes == NULL || fsdp->announcements == NULL || fsdp->events == NULL || fsdp->state == NULL ||
        fsdp->masters == NULL || fsdp->levels[0] == NULL || fsdp->packed_counts == NULL || fsdp->stages == NULL ||
        fsdp->buckets == NULL || fsdp->code_parts == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "dtrain_fsdp_create: no memory on rank %d's %s for slices of %zu weights and %zu gradients",
                            dtrain__fsdp_rank(fsdp), dtrain_device_name(fsdp->device.queue), layout->weights,
                            layout->grads);
    fsdp->decays = fsdp->lr_factors + params;
    dtrain_status status = fsdp->device.queue != NULL ? dtrain__fsdp_make_places(fsdp) : dtrain__code_open(fsdp);
    return status == DTRAIN_OK ? dtrain__fsdp_reserve(fsdp) : status;
}

/* Gives every rank the first values of parameters that have memory of the caller's. */
static dtrain_status dtrain__fsdp_first_values(dtrain_fsdp *fsdp)
{
    dtrain__layout *layout = &fsdp->layout;
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < layout->table_count && fsdp->world != NULL && !fsdp->desc.no_broadcast; i++)
        if (status == DTRAIN_OK && !(fsdp->reserved[i] & 1))
            status =
                fsdp->device.queue != NULL
                    ? dtrain__fsdp_device_broadcast(fsdp, layout->table[i].data,
                                                    dtrain_param_elements(&layout->table[i]), layout->table[i].dtype)
                    : dtrain_broadcast(fsdp->world, layout->table[i].data, dtrain_param_elements(&layout->table[i]),
                                       layout->table[i].dtype, 0);
    for (size_t i = 0; status == DTRAIN_OK && i < layout->cut_count; i++) {
        const dtrain__cut *cut = &layout->cuts[i];
        if ((fsdp->reserved[cut->param] & 1) || cut->count == 0)
            continue;
        if (layout->apart && !cut->home)
            dtrain__fsdp_copy(fsdp, fsdp->masters + cut->weight, dtrain__fsdp_full(fsdp, cut) + cut->own,
                              cut->own_count);
        dtrain__fsdp_round(fsdp, dtrain__fsdp_full(fsdp, cut), cut->count, cut->unit);
    }
    for (int i = 0; i < layout->unit_count; i++) {
        fsdp->trained_units += layout->units[i].trained > 0;
        if (layout->resident)
            dtrain__fsdp_page_weights(fsdp, i, 1);
    }
    return status;
}

/* Memory for gradients of the caller's may hold anything; reserved pages are zeros. */
static void dtrain__fsdp_zero_grads(dtrain_fsdp *fsdp)
{
    for (size_t i = 0; i < fsdp->layout.table_count; i++) {
        const dtrain_param *param = &fsdp->layout.table[i];
        const float zero = 0.0f;
        if (param->grad != NULL && !(fsdp->reserved[i] & 2))
            dtrain__fsdp_queued(fsdp, dtrain_device_fill(fsdp->device.queue, param->grad, &zero, sizeof zero,
                                                         dtrain_param_elements(param)));
    }
}

static dtrain_status dtrain__fsdp_init(dtrain_fsdp *fsdp, const dtrain_param *table, size_t count, dtrain_status status)
{
    const char *bad = dtrain__optimizer_bad(&fsdp->optimizer, 1);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_check_groups(&fsdp->desc);
    if (status == DTRAIN_OK && bad != NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_create: the optimizer's desc has a bad %s", bad);
    if (status == DTRAIN_OK)
        status = dtrain__layout_create(&fsdp->layout, table, count, &fsdp->desc, dtrain_comm_size(fsdp->comm),
                                       dtrain__fsdp_rank(fsdp), &fsdp->memory);
    if (dtrain_comm_size(fsdp->comm) > 1)
        status = dtrain__fsdp_compare(fsdp, table, count, status);
    fsdp->device.queue = fsdp->layout.device;
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_groups(fsdp);
    if (status == DTRAIN_OK && fsdp->device.queue != NULL)
        status = dtrain__fsdp_make_device_groups(fsdp);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__fsdp_allocate(fsdp);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_make_sender(fsdp);
    if (status == DTRAIN_OK && fsdp->device.refused.status != DTRAIN_OK)
        status = dtrain__report(&fsdp->device.refused);
    status = dtrain__fsdp_agree(fsdp, status);
    if (status != DTRAIN_OK)
        return status;
    dtrain__fsdp_group_params(fsdp);
    for (size_t i = 0; i < fsdp->layout.cut_count; i++)
        dtrain__fsdp_describe(fsdp, i);
    fsdp->desc.groups = NULL;
    fsdp->desc.compress = NULL;
    fsdp->scattering = fsdp->bucket = -1;
    dtrain__fsdp_zero_grads(fsdp);
    dtrain__fsdp_reset(fsdp);
    status = dtrain__fsdp_first_values(fsdp);
    if (status == DTRAIN_OK && fsdp->device.refused.status != DTRAIN_OK)
        status = dtrain__report(&fsdp->device.refused);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    return dtrain__fsdp_break(fsdp, status, "giving every rank the first values, beginning with those", 0);
}

/* checked: what the caller found wrong, which the other ranks are to learn. */
static dtrain_status dtrain__fsdp_make(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table, size_t count,
                                       const dtrain_fsdp_desc *desc, dtrain_status checked)
{
    if (fsdp == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_create: fsdp and comm are needed, got NULL");
    *fsdp = NULL;
    dtrain_allocator memory = {NULL, NULL, 0, 0};
    memory.resize = dtrain_comm_allocator(comm)->resize;
    memory.user = dtrain_comm_allocator(comm)->user;
    dtrain_fsdp *made = (dtrain_fsdp *)dtrain__alloc(&memory, sizeof *made), none;
    if (made == NULL) { /* the others hear of it where they compare */
        memset(&none, 0, sizeof none);
        none.comm = comm;
        checked = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_fsdp_create: no memory for %zu bytes", sizeof *made);
        return dtrain_comm_size(comm) > 1 ? dtrain__fsdp_compare(&none, table, count, checked) : checked;
    }
    made->memory = memory;
    made->comm = comm;
    if (desc != NULL)
        made->desc = *desc;
    made->desc.gather_dtype = made->desc.gather_dtype == 0 ? DTRAIN_F32 : made->desc.gather_dtype;
    made->desc.reduce_dtype = made->desc.reduce_dtype == 0 ? DTRAIN_F32 : made->desc.reduce_dtype;
    made->desc.keep_full_grads |= made->desc.compress != NULL;
    made->desc.bucket_bytes = made->desc.bucket_bytes == 0 ? DTRAIN__FSDP_BUCKET : made->desc.bucket_bytes;
    made->optimizer = dtrain__optimizer_defaults(&made->desc.optimizer);
    made->loss_scale = made->desc.loss_scale > 0.0f ? made->desc.loss_scale : 1.0f;
    dtrain_status status = dtrain__fsdp_init(made, table, count, checked);
    if (status != DTRAIN_OK) {
        dtrain__error cause = dtrain__thread_error;
        dtrain_fsdp_destroy(made);
        return dtrain__report(&cause);
    }
    *fsdp = made;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_create(dtrain_fsdp **fsdp, dtrain_comm *comm, const dtrain_param *table,
                                            size_t count, const dtrain_fsdp_desc *desc)
{
    return dtrain__fsdp_make(fsdp, comm, table, count, desc, DTRAIN_OK);
}

/* Gives what is under way until then to end; after that, where groups are the object's own, breaks them off. */
static void dtrain__fsdp_let_go(dtrain_fsdp *fsdp, dtrain_work **work, int64_t until_ns)
{
    dtrain_comm *groups[] = {fsdp->gathers, fsdp->reduces, fsdp->copies, fsdp->world};
    int ended;
    if (*work == NULL)
        return;
    dtrain__work_end(*work, fsdp->shares_comm ? INT64_MAX : until_ns, &ended);
    for (size_t i = 0; !ended && i < sizeof groups / sizeof groups[0]; i++)
        if (groups[i] != NULL)
            dtrain_comm_abort(groups[i], "it has destroyed its dtrain_fsdp while this was under way");
    if (!ended)
        dtrain_work_wait(*work);
    *work = NULL;
}

static void dtrain__fsdp_quiesce(dtrain_fsdp *fsdp)
{
    int64_t until_ns = dtrain__os_now_ns() + DTRAIN__FSDP_GRACE_NS;
    dtrain__fsdp_let_go(fsdp, &fsdp->announcing, until_ns);
    dtrain__fsdp_let_go(fsdp, &fsdp->saying, until_ns);
    for (size_t i = 0; fsdp->gathering != NULL && fsdp->reducing != NULL && i < fsdp->layout.cut_count; i++) {
        dtrain__fsdp_let_go(fsdp, &fsdp->gathering[i], until_ns);
        dtrain__fsdp_let_go(fsdp, &fsdp->reducing[i], until_ns);
    }
    for (int i = 0; fsdp->copying != NULL && i < fsdp->layout.unit_count; i++)
        dtrain__fsdp_let_go(fsdp, &fsdp->copying[i], until_ns);
    dtrain__sender_stop(fsdp->sender, until_ns);
}

static void dtrain__fsdp_free(dtrain_fsdp *fsdp)
{
    const dtrain__layout *layout = &fsdp->layout;
    dtrain_allocator *memory = &fsdp->memory, last;
    size_t cuts = layout->cut_count, params = layout->table_count, units = (size_t)layout->unit_count;
    size_t world = (size_t)dtrain_comm_size(fsdp->comm), floats = dtrain__plan_state_floats(&fsdp->optimizer);
    dtrain__free(memory, fsdp->units, units * sizeof *fsdp->units);
    dtrain__free(memory, fsdp->copying, units * sizeof *fsdp->copying);
    dtrain__free(memory, fsdp->reserved, params);
    dtrain__free(memory, fsdp->lr_factors, 2 * params * sizeof(float));
    dtrain__free(memory, fsdp->counts, cuts * (size_t)layout->shards * sizeof(size_t));
    dtrain__free(memory, fsdp->packed_counts, 2 * units * (size_t)layout->shards * sizeof(size_t));
    dtrain__free(memory, fsdp->stages, dtrain__plan_stages(layout));
    dtrain__free(memory, fsdp->code_parts, (size_t)layout->shards * sizeof(void *));
    dtrain__free(memory, fsdp->code_counts, fsdp->code_bytes);
    dtrain__free(memory, fsdp->gathering, cuts * sizeof *fsdp->gathering);
    dtrain__free(memory, fsdp->reducing, cuts * sizeof *fsdp->reducing);
    dtrain__free(memory, fsdp->slices, cuts * sizeof *fsdp->slices);
    dtrain__free(memory, fsdp->notes, world * sizeof *fsdp->notes);
    dtrain__free(memory, fsdp->announcements, 2 * world * sizeof(double));
    dtrain__free(memory, fsdp->buckets, 2 * units * sizeof *fsdp->buckets);
    dtrain__free(memory, fsdp->events, fsdp->desc.trace_events * sizeof *fsdp->events);
    dtrain__fsdp_dealloc(fsdp, fsdp->state, floats * layout->grads * sizeof(float));
    dtrain__fsdp_dealloc(fsdp, fsdp->masters, dtrain__plan_apart(layout));
    for (int i = 0; i < DTRAIN__FSDP_LEVELS; i++) {
        dtrain__fsdp_dealloc(fsdp, fsdp->levels[i], layout->grads * sizeof(float));
        dtrain__fsdp_dealloc(fsdp, fsdp->full_levels[i], layout->trained * sizeof(float));
    }
    dtrain__fsdp_free_places(fsdp);
    dtrain__pages_destroy(&fsdp->weight_pages);
    dtrain__pages_destroy(&fsdp->grad_pages);
    dtrain__layout_destroy(&fsdp->layout, memory);
    last = *memory;
    dtrain__free(&last, fsdp, sizeof *fsdp);
}

DTRAIN_API void dtrain_fsdp_destroy(dtrain_fsdp *fsdp)
{
    if (fsdp == NULL)
        return;
    dtrain__error kept = dtrain__thread_error; /* why it is destroyed, perhaps: what was under way has its own */
    dtrain__fsdp_quiesce(fsdp);
    dtrain__thread_error = kept;
    dtrain__sender_destroy(fsdp->sender);
    dtrain__fsdp_end_device_groups(fsdp);
    if (!fsdp->shares_comm) {
        dtrain_comm_destroy(fsdp->gathers);
        dtrain_comm_destroy(fsdp->reduces);
        dtrain_comm_destroy(fsdp->copies);
        dtrain_comm_destroy(fsdp->world);
    }
    dtrain__fsdp_free(fsdp);
}

#endif
