/* ---- >>fsdp-access ----
 * Parameters by name: addresses, full values in and out, and unsharding; and the trace file. */
#ifndef DTRAIN__FSDP_ACCESS
#define DTRAIN__FSDP_ACCESS
#include "fsdp_step.c"
#include "../base/json_writer.c"

#define DTRAIN__FSDP_STAGE ((size_t)1 << 13) /* elements that are broadcast at once: 32 KiB, beyond the plan */

static size_t dtrain__fsdp_find(const dtrain_fsdp *fsdp, const char *name)
{
    size_t i = 0;
    while (i < fsdp->layout.table_count && strcmp(fsdp->layout.table[i].name, name) != 0)
        i++;
    return i;
}

/* Returns the address of a parameter or its gradient in a unit; with unit -1 of all of it. On a device a stacked
 * parameter has no such address if its layers do not lie side by side. */
static float *dtrain__fsdp_address(const dtrain_fsdp *fsdp, const char *name, int unit, int grad)
{
    size_t param = fsdp != NULL && name != NULL ? dtrain__fsdp_find(fsdp, name) : 0;
    if (fsdp == NULL || name == NULL || param == fsdp->layout.table_count || unit >= fsdp->layout.unit_count)
        return NULL;
    const dtrain_param *given = &fsdp->layout.table[param];
    if (unit < 0 && given->stacked)
        return (float *)(grad ? given->grad : given->data);
    const dtrain__layout_unit *cuts = &fsdp->layout.units[unit >= 0 ? unit : given->unit];
    for (size_t i = cuts->first; i < cuts->end; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        if (cut->param == param)
            return !grad ? cut->data : cut->trained ? cut->grads : NULL;
    }
    return NULL;
}

DTRAIN_API float *dtrain_fsdp_unit_param(const dtrain_fsdp *fsdp, const char *name, int unit)
{
    return unit >= 0 ? dtrain__fsdp_address(fsdp, name, unit, 0) : NULL;
}

DTRAIN_API float *dtrain_fsdp_unit_grad(const dtrain_fsdp *fsdp, const char *name, int unit)
{
    return unit >= 0 ? dtrain__fsdp_address(fsdp, name, unit, 1) : NULL;
}

DTRAIN_API float *dtrain_fsdp_param(const dtrain_fsdp *fsdp, const char *name)
{
    return dtrain__fsdp_address(fsdp, name, -1, 0);
}

DTRAIN_API float *dtrain_fsdp_grad(const dtrain_fsdp *fsdp, const char *name)
{
    return dtrain__fsdp_address(fsdp, name, -1, 1);
}

DTRAIN_API dtrain_status dtrain_fsdp_put(dtrain_fsdp *fsdp, int unit)
{
    dtrain_status status = dtrain__fsdp_enter_held(fsdp, "dtrain_fsdp_put", unit, ", write its parameters, then put");
    if (status != DTRAIN_OK)
        return status;
    const dtrain__layout *layout = &fsdp->layout;
    for (size_t i = layout->units[unit].first; layout->apart && i < layout->units[unit].end; i++) {
        const dtrain__layout_cut *cut = &layout->cuts[i];
        if (!cut->home)
            dtrain__fsdp_copy(fsdp, fsdp->state.masters + cut->weight, cut->data + cut->own, cut->own_count);
    }
    if (layout->device != NULL && fsdp->desc.gather_dtype != DTRAIN_F32)
        status = dtrain__fsdp_gather_stage(fsdp, unit);
    for (size_t i = layout->units[unit].first; status == DTRAIN_OK && i < layout->units[unit].end; i++)
        dtrain__fsdp_round(fsdp, layout->cuts[i].data, layout->cuts[i].count, fsdp->desc.gather_dtype, unit % 2);
    fsdp->state.units[unit].stale |= fsdp->layout.code_stage > 0; /* the next gather rounds by blocks */
    return dtrain__fsdp_leave(fsdp, status);
}

/* Stores elements [at, at + count) of a parameter, whose values all ranks have. They go to this rank's slice, and to
 * full parameters that stay, rounded as a gather would round them. */
static void dtrain__fsdp_keep(dtrain_fsdp *fsdp, size_t param, size_t at, const float *values, size_t count)
{
    for (size_t i = 0; i < fsdp->layout.cut_count; i++) {
        const dtrain__layout_cut *cut = &fsdp->layout.cuts[i];
        size_t low, n, own = cut->element + cut->own;
        if (cut->param != param)
            continue;
        n = dtrain__layout_overlap(at, count, own, cut->own_count, &low);
        if (fsdp->layout.apart && n > 0)
            dtrain__fsdp_copy(fsdp, dtrain__fsdp_own(fsdp, cut) + (low - own), values + (low - at), n);
        n = dtrain__layout_overlap(at, count, cut->element, cut->count, &low);
        if (!fsdp->layout.resident || n == 0)
            continue;
        float *full = cut->data + (low - cut->element);
        dtrain__fsdp_copy(fsdp, full, values + (low - at), n);
        dtrain__fsdp_round(fsdp, full, n, fsdp->desc.gather_dtype, cut->unit % 2);
    }
}

/* Drops gathered units that hold older values of a parameter. A held unit is dropped when it is released. */
static dtrain_status dtrain__fsdp_forget(dtrain_fsdp *fsdp, size_t param)
{
    dtrain_status status = DTRAIN_OK;
    for (size_t i = 0; i < fsdp->layout.cut_count && !fsdp->layout.resident && status == DTRAIN_OK; i++) {
        dtrain__fsdp_unit *unit = &fsdp->state.units[fsdp->layout.cuts[i].unit];
        if (fsdp->layout.cuts[i].param != param || unit->state == DTRAIN__FSDP_WEIGHTS_ABSENT)
            continue;
        unit->stale = 1;
        if (!unit->held)
            status = dtrain__fsdp_gather_drop(fsdp, fsdp->layout.cuts[i].unit);
    }
    return status;
}

/* Stores a parameter's values, which are in memory of `device`, on the ranks that keep them. They are those of rank
 * `root`, or with root -1 each rank's own. They go by way of a stage of `most` elements. */
static dtrain_status dtrain__fsdp_distribute(dtrain_fsdp *fsdp, size_t param, const float *values,
                                             dtrain_device *device, float *stage, size_t most, int root)
{
    size_t count = dtrain_param_elements(&fsdp->layout.table[param]);
    int gives = root < 0 || root == dtrain__fsdp_rank(fsdp);
    dtrain_status status = DTRAIN_OK;
    for (size_t at = 0; status == DTRAIN_OK && at < count; at += most) {
        size_t n = count - at < most ? count - at : most;
        if (gives)
            status = dtrain_device_copy(device, stage, values + at, n * sizeof(float));
        if (status == DTRAIN_OK && root >= 0 && fsdp->world != NULL)
            status = dtrain_broadcast(fsdp->world, stage, n, DTRAIN_F32, root);
        if (status == DTRAIN_OK)
            dtrain__fsdp_keep(fsdp, param, at, stage, n);
    }
    return status == DTRAIN_OK ? status : dtrain__fsdp_break(fsdp, status, "setting a parameter", -1);
}

/* Begins a public call that takes a parameter's name and a rank: checks both, and finds the parameter. */
static dtrain_status dtrain__fsdp_named(dtrain_fsdp *fsdp, const char *call, const char *name, int root, int lowest,
                                        size_t *param)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, call, 0);
    if (status != DTRAIN_OK)
        return status;
    *param = name != NULL ? dtrain__fsdp_find(fsdp, name) : fsdp->layout.table_count;
    if (*param == fsdp->layout.table_count)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the table has no parameter named %s", call,
                            name != NULL ? name : "NULL");
    if (fsdp->layout.table[*param].dtype != DTRAIN_F32)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED, "%s: %s is %s, expected F32: use its data in your own memory",
                            call, name, dtrain_dtype_name(fsdp->layout.table[*param].dtype));
    if (root < lowest || root >= dtrain_comm_size(fsdp->comm))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: root is %d, expected %d to %d", call, root, lowest,
                            dtrain_comm_size(fsdp->comm) - 1);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_set(dtrain_fsdp *fsdp, const char *name, const float *value, int root)
{
    size_t param;
    dtrain_status status = dtrain__fsdp_named(fsdp, "dtrain_fsdp_set", name, root, 0, &param);
    if (status != DTRAIN_OK)
        return status;
    if (value == NULL && dtrain__fsdp_rank(fsdp) == root)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_set: value is NULL on rank %d, the root: expected %zu floats of %s", root,
                            dtrain_param_elements(&fsdp->layout.table[param]), name);
    size_t count = dtrain_param_elements(&fsdp->layout.table[param]);
    size_t most = count < DTRAIN__FSDP_STAGE ? count : DTRAIN__FSDP_STAGE;
    float *stage = (float *)dtrain__alloc(&fsdp->memory, most * sizeof(float));
    if (stage == NULL) {
        status = dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", most * sizeof(float));
        return dtrain__fsdp_leave(fsdp, dtrain__fsdp_break(fsdp, status, "setting a parameter", -1));
    }
    status = dtrain__fsdp_forget(fsdp, param);
    if (status == DTRAIN_OK)
        status = dtrain__fsdp_distribute(fsdp, param, value, NULL, stage, most, root);
    dtrain__free(&fsdp->memory, stage);
    return dtrain__fsdp_leave(fsdp, status);
}

/* Gives rank `root` a range's full value, or with root -1 all ranks. Only ranks of root's copy take part. */
static dtrain_status dtrain__fsdp_get_cut(dtrain_fsdp *fsdp, size_t index, float *value, int root)
{
    const dtrain__layout_cut *cut = &fsdp->layout.cuts[index];
    const size_t *counts = fsdp->state.counts + index * (size_t)fsdp->layout.shards;
    size_t bytes = cut->own_count * sizeof(float);
    dtrain_device *queue = fsdp->device.queue;
    int rank = dtrain__fsdp_rank(fsdp), shards = fsdp->layout.shards;
    const float *own = dtrain__fsdp_own(fsdp, cut);
    float *out = value != NULL ? value + cut->element : NULL, *copy = NULL;
    dtrain_status status = DTRAIN_OK;
    if (cut->count == 0 || (root >= 0 && root / shards != rank / shards))
        return DTRAIN_OK;
    if (fsdp->gathers == NULL)
        return root < 0 || root == rank ? dtrain_device_copy(queue, out, own, bytes) : DTRAIN_OK;
    if (queue != NULL) {
        own = copy = (float *)dtrain__alloc(&fsdp->memory, bytes);
        if (copy == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", bytes);
        status = dtrain_device_copy(queue, copy, dtrain__fsdp_own(fsdp, cut), bytes);
    }
    if (status == DTRAIN_OK)
        status = root < 0 ? dtrain_all_gather_v(fsdp->gathers, own, out, counts, NULL, DTRAIN_F32)
                          : dtrain_gather_v(fsdp->gathers, own, out, counts, NULL, DTRAIN_F32, root % shards);
    dtrain__free(&fsdp->memory, copy);
    return status;
}

DTRAIN_API dtrain_status dtrain_fsdp_get(dtrain_fsdp *fsdp, const char *name, float *value, int root)
{
    size_t param;
    dtrain_status status = dtrain__fsdp_named(fsdp, "dtrain_fsdp_get", name, root, -1, &param);
    if (status != DTRAIN_OK)
        return status;
    if (value == NULL && (root < 0 || root == dtrain__fsdp_rank(fsdp)))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_get: value is NULL on rank %d, which gets %s: give memory for %zu floats",
                            dtrain__fsdp_rank(fsdp), name, dtrain_param_elements(&fsdp->layout.table[param]));
    for (size_t i = 0; status == DTRAIN_OK && i < fsdp->layout.cut_count; i++)
        if (fsdp->layout.cuts[i].param == param)
            status = dtrain__fsdp_get_cut(fsdp, i, value, root);
    if (status != DTRAIN_OK)
        status = dtrain__fsdp_break(fsdp, status, "getting a parameter", -1);
    return dtrain__fsdp_leave(fsdp, status);
}

DTRAIN_API dtrain_status dtrain_fsdp_unshard(dtrain_fsdp *fsdp)
{
    dtrain_status status = dtrain__fsdp_enter(fsdp, "dtrain_fsdp_unshard", 0);
    if (status != DTRAIN_OK)
        return status;
    for (int i = 0; i < fsdp->layout.unit_count && !fsdp->layout.resident; i++)
        if (dtrain__fsdp_share_place(fsdp, i, i, 0) && fsdp->layout.units[i].floats[0] > 0)
            return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                                "dtrain_fsdp_unshard: unit %d has no memory of its own on rank %d's %s: get parameters "
                                "with dtrain_fsdp_get, or set no_reshard_after_forward",
                                i, dtrain__fsdp_rank(fsdp), dtrain_device_name(fsdp->device.queue));
    fsdp->schedule.keeps = 1;
    for (int i = 0; status == DTRAIN_OK && i < fsdp->layout.unit_count && !fsdp->layout.resident; i++) {
        if (fsdp->state.units[i].stale)
            status = dtrain__fsdp_gather_drop(fsdp, i);
        if (status == DTRAIN_OK)
            status = dtrain__fsdp_gather_whole(fsdp, i);
    }
    return dtrain__fsdp_leave(fsdp, status);
}

static void dtrain__fsdp_write_meta(dtrain__json_writer *json, const char *what, int rank, int lane, const char *name)
{
    dtrain__json_begin(json, 1);
    dtrain__json_member_text(json, "name", what);
    dtrain__json_member_text(json, "ph", "M");
    dtrain__json_member_u64(json, "pid", (uint64_t)rank);
    dtrain__json_member_u64(json, "tid", (uint64_t)lane);
    dtrain__json_member(json, "args");
    dtrain__json_begin(json, 1);
    dtrain__json_member_text(json, "name", name);
    dtrain__json_end(json);
    dtrain__json_end(json);
}

static void dtrain__fsdp_write_event(dtrain__json_writer *json, int rank, const char *lane,
                                     const dtrain__fsdp_event *event)
{
    char name[40];
    if (event->unit >= 0)
        snprintf(name, sizeof name, "%s unit %d", lane, event->unit);
    else
        snprintf(name, sizeof name, "%s all units", lane);
    dtrain__json_begin(json, 1);
    dtrain__json_member_text(json, "name", name);
    dtrain__json_member_text(json, "ph", "X");
    dtrain__json_member_u64(json, "pid", (uint64_t)rank);
    dtrain__json_member_u64(json, "tid", (uint64_t)event->lane);
    dtrain__json_member_us(json, "ts", (uint64_t)event->begin_ns);
    dtrain__json_member_us(json, "dur", (uint64_t)(event->end_ns - event->begin_ns));
    if (event->dense_bytes > 0) {
        dtrain__json_member(json, "args");
        dtrain__json_begin(json, 1);
        dtrain__json_member_u64(json, "dense_bytes", event->dense_bytes);
        dtrain__json_member_u64(json, "sent_bytes", event->sent_bytes);
        dtrain__json_end(json);
    }
    dtrain__json_end(json);
}

/* Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU */
static void dtrain__fsdp_write_events(const dtrain_fsdp *fsdp, dtrain__json_writer *json)
{
    static const char *const lanes[DTRAIN__FSDP_LANES] = {"compute", "gather", "reduce", "wait"};
    size_t most = fsdp->desc.trace_events,
           first = fsdp->figures.event_count > most ? fsdp->figures.event_count - most : 0;
    int rank = dtrain__fsdp_rank(fsdp);
    char title[32];
    snprintf(title, sizeof title, "rank %d", rank);
    dtrain__json_begin(json, 1);
    dtrain__json_member(json, "traceEvents");
    dtrain__json_begin(json, 0);
    dtrain__fsdp_write_meta(json, "process_name", rank, 0, title);
    for (int lane = 0; lane < DTRAIN__FSDP_LANES; lane++)
        dtrain__fsdp_write_meta(json, "thread_name", rank, lane, lanes[lane]);
    for (size_t i = first; i < fsdp->figures.event_count; i++) {
        const dtrain__fsdp_event *event = &fsdp->figures.events[i % most];
        dtrain__json_put(json, "\n", 1); /* a line for each */
        dtrain__fsdp_write_event(json, rank, lanes[event->lane], event);
    }
    dtrain__json_end(json);
    dtrain__json_end(json);
}

DTRAIN_API dtrain_status dtrain_fsdp_add_sent(dtrain_fsdp *fsdp, int64_t begin_ns, uint64_t dense_bytes,
                                              uint64_t sent_bytes)
{
    int64_t now_ns = dtrain__os_now_ns();
    if (fsdp == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_fsdp_add_sent: the object is NULL: create it first");
    begin_ns = begin_ns < now_ns ? begin_ns : now_ns - 1;
    dtrain__fsdp_record(fsdp, DTRAIN__FSDP_LANE_REDUCE, -1, begin_ns, now_ns);
    dtrain__fsdp_account(fsdp, 0, fsdp->layout.unit_count - 1, dense_bytes, sent_bytes, now_ns - begin_ns);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_fsdp_trace(const dtrain_fsdp *fsdp, const char *path)
{
    if (fsdp == NULL || path == NULL || fsdp->desc.trace_events == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "dtrain_fsdp_trace: %s: give an object whose desc had trace_events above 0, and a path",
                            fsdp == NULL   ? "fsdp is NULL"
                            : path == NULL ? "path is NULL"
                                           : "desc.trace_events was 0");
    dtrain__json_writer json;
    dtrain__json_write_start(&json, NULL, 0); /* counts */
    dtrain__fsdp_write_events(fsdp, &json);
    size_t bytes = json.bytes;
    void *text = dtrain__os_alloc(bytes, 64);
    int error = ENOMEM;
    if (text != NULL) {
        dtrain__json_write_start(&json, text, bytes);
        dtrain__fsdp_write_events(fsdp, &json);
        error = dtrain__os_replace_file(path, text, bytes);
    }
    dtrain__os_free(text);
    if (error == 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_IO, "dtrain_fsdp_trace: rank %d cannot write %s: %s", dtrain__fsdp_rank(fsdp),
                        path, dtrain__os_error_text(error));
}

#endif
