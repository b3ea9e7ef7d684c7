/* ---- >>device_group ----
 * Makes groups of devices, and their calls. After every step that can fail on one rank, the ranks tell each other what
 * they have and how it went. So either all have the group or all have the error. The mode follows from what all have
 * told, and so is the same everywhere. */
#ifndef DTRAIN__DEVICE_GROUP
#define DTRAIN__DEVICE_GROUP
#include "device_call.c"
#include "staged.c"
#include "processes.c"
#include "events.c"
#include "flags.c"
#include "hosts.c"
#include "async.c"
#include "../comm/alike.c"

/* Keeps this rank's error for its next note. */
static DTRAIN__NOINLINE void dtrain__device_note_status(dtrain_device_group *group, dtrain_status status)
{
    group->mine.status = (uint64_t)status;
    if (status != DTRAIN_OK)
        snprintf(group->mine.text, sizeof group->mine.text, "%.255s", dtrain__thread_error.text);
}

/* Gathers every rank's note. */
static dtrain_status dtrain__device_meet(dtrain_device_group *group)
{
    dtrain_comm *comm = group->comm;
    dtrain_status status =
        dtrain_all_gather(comm, &group->mine, group->notes, DTRAIN__DEVICE_NOTE_WORDS * (size_t)comm->size, DTRAIN_U64);
    if (status != DTRAIN_OK)
        dtrain__fail(&comm->error, status, "device_group_create: %.560s", dtrain__thread_error.text);
    return status;
}

static dtrain_status dtrain__device_check_desc(const dtrain_device_group_desc *desc)
{
    if (desc->mode != DTRAIN_DEVICE_MODE_AUTO &&
        (desc->mode < DTRAIN_DEVICE_STAGED || desc->mode > DTRAIN_DEVICE_HOSTS))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "desc.mode is %d, expected DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_STAGED, "
                            "DTRAIN_DEVICE_EVENTS, DTRAIN_DEVICE_FLAGS or DTRAIN_DEVICE_HOSTS" DTRAIN__ZERO_FIRST,
                            (int)desc->mode);
    if (desc->chunk_bytes != 0 &&
        (desc->chunk_bytes < DTRAIN__STAGED_CHUNK_LEAST || desc->chunk_bytes > DTRAIN__STAGED_CHUNK_MOST))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "desc.chunk_bytes is %zu, expected 0 or %zu to %zu" DTRAIN__ZERO_FIRST, desc->chunk_bytes,
                            DTRAIN__STAGED_CHUNK_LEAST, DTRAIN__STAGED_CHUNK_MOST);
    if (desc->slots != 0 && (desc->slots < 2 || desc->slots > DTRAIN__DEVICE_SLOTS))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "desc.slots is %d, expected 0 or 2 to %d" DTRAIN__ZERO_FIRST,
                            desc->slots, DTRAIN__DEVICE_SLOTS);
    if (desc->async != 0 && desc->async != 1)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "desc.async is %d, expected 0 or 1" DTRAIN__ZERO_FIRST,
                            desc->async);
    return DTRAIN_OK;
}

/* Takes a desc and fills in its defaults. */
static dtrain_status dtrain__device_take_desc(dtrain_device_group *group, dtrain_device_group_desc *desc)
{
    dtrain_status status = dtrain__device_check_desc(desc);
    if (status != DTRAIN_OK)
        return status;
    group->mode = desc->mode;
    group->chunk_bytes = desc->chunk_bytes = desc->chunk_bytes / 64 * 64;
    group->slots = desc->slots = desc->slots > 0 ? desc->slots : 4;
    group->mine.host = dtrain__hosts_own(group->comm);
    group->mine.has_device = group->device != NULL;
    if (group->device != NULL && dtrain__events_has_all(group->device))
        group->mine.ops = (uint64_t)(uintptr_t)group->device->ops;
    if (group->mine.ops != 0 && group->mine.host != 0 && !group->comm->plane->in_process &&
        desc->mode != DTRAIN_DEVICE_STAGED && dtrain__processes_has_all(group->device))
        dtrain__processes_offer(group);
    if (group->mode == DTRAIN_DEVICE_FLAGS)
        status = dtrain__flags_note(group);
    return status == DTRAIN_OK && desc->async ? dtrain__async_create(group) : status;
}

static const dtrain__alike_field dtrain__device_fields[] = {
    DTRAIN__ALIKE_FIELD(dtrain_device_group_desc, mode, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_device_group_desc, chunk_bytes, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_device_group_desc, slots, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_device_group_desc, async, NUMBER)};

static int dtrain__device_line(const void *desc, size_t index, dtrain__alike_line *line)
{
    return desc != NULL && index < sizeof dtrain__device_fields / sizeof dtrain__device_fields[0] &&
           dtrain__alike_field_line(line, "desc.", &dtrain__device_fields[index], desc);
}

/* Agrees whether every rank did its part, and whether all gave the same desc, if there is one. */
static dtrain_status dtrain__device_agree(dtrain_comm *comm, const dtrain_device_group_desc *desc, dtrain_status mine)
{
    dtrain__alike alike = {
        "device_group_create", desc, dtrain__device_line, "give every rank the same desc", 1, {0}, 0};
    if (mine != DTRAIN_OK)
        dtrain__fail(&comm->error, mine, "device_group_create on rank %d: %.560s", comm->rank,
                     dtrain__thread_error.text);
    return dtrain__alike_meet(comm, &alike, mine);
}

/* Returns why EVENTS, or HOSTS, is not possible by what all ranks have told, and on which rank; NULL: it is possible.
 */
static const char *dtrain__device_hindrance(const dtrain_device_group *group, int hosts, int *rank)
{
    const dtrain__device_note *first = &group->notes[0];
    *rank = group->comm->rank;
    int threads = group->comm->plane->in_process;
    if (!threads && group->mine.host == 0)
        return "its group has neither threads nor processes of dtrain_comm_create";
    if (group->comm->size > DTRAIN__DEVICE_MOST && !hosts)
        return "its group has more than 64 ranks";
    for (*rank = 0; *rank < group->comm->size; ++*rank) {
        const dtrain__device_note *note = &group->notes[*rank];
        if (!note->has_device)
            return "it has no device";
        if (note->ops == 0)
            return "its device's table lacks allocate, release, wait, reduce or events";
        if (threads && note->ops != first->ops)
            return "its device is of another kind than that of rank 0";
        const char *why = threads ? NULL : dtrain__processes_hindrance(group, *rank);
        if (why != NULL)
            return why;
    }
    if (hosts)
        return dtrain__hosts_hindrance(group, rank);
    return group->mode == DTRAIN_DEVICE_FLAGS ? dtrain__flags_hindrance(group, rank) : NULL;
}

static dtrain_status dtrain__device_no_events(dtrain_device_group *group, int rank, const char *why)
{
    const char *mode = group->mode == DTRAIN_DEVICE_FLAGS   ? "FLAGS"
                       : group->mode == DTRAIN_DEVICE_HOSTS ? "HOSTS"
                                                            : "EVENTS";
    return dtrain__fail(&group->comm->error, DTRAIN_ERR_UNSUPPORTED,
                        "device_group_create on rank %d: DTRAIN_DEVICE_%s is not possible on rank %d: %s; ask for "
                        "DTRAIN_DEVICE_STAGED, or leave desc.mode 0",
                        group->comm->rank, mode, rank, why);
}

static void dtrain__device_end_probe(dtrain_device_group *group)
{
    dtrain_device_free(group->device, DTRAIN_MEMORY_DEVICE, group->mine.probe);
    group->mine.probe = NULL;
}

/* Reads what all have told about access to the others' memory. If one has none, *reached becomes 0; that is an error if
 * a mode was asked for. */
static dtrain_status dtrain__device_reached(dtrain_device_group *group, int tried, int *reached)
{
    dtrain_comm *comm = group->comm;
    for (int rank = 0; rank < comm->size; rank++) {
        dtrain__device_note *note = &group->notes[rank];
        note->text[sizeof note->text - 1] = 0;
        if (note->status == DTRAIN_OK)
            continue;
        *reached = 0;
        if (note->status != DTRAIN_ERR_UNSUPPORTED && !tried)
            return dtrain__fail(&comm->error, dtrain__status_told(note->status),
                                "device_group_create on rank %d: rank %d: %s", comm->rank, rank, note->text);
        if (group->mode == DTRAIN_DEVICE_MODE_AUTO)
            continue;
        dtrain__device_no_events(group, rank, note->text);
        dtrain__error said = dtrain__thread_error;
        dtrain_status status = dtrain__device_meet(group); /* a rank may have died meanwhile */
        if (status != DTRAIN_OK)
            return status;
        comm->error = said;
        return dtrain__report(&said);
    }
    return DTRAIN_OK;
}

/* Finds out whether the devices reach each other's memory, and sets *reached. */
static dtrain_status dtrain__device_try_events(dtrain_device_group *group, int *reached)
{
    dtrain_status status = group->mode == DTRAIN_DEVICE_FLAGS ? dtrain__flags_make(group) : DTRAIN_OK;
    dtrain__device_note_status(group, status == DTRAIN_OK ? dtrain__events_make(group) : status);
    status = dtrain__device_meet(group);
    dtrain__processes_close_offer(group);
    if (status == DTRAIN_OK)
        status = dtrain__device_reached(group, 0, reached);
    if (status == DTRAIN_OK && *reached) {
        dtrain__events_set(group, DTRAIN__EVENTS_INSIDE);
        int ended = dtrain__events_ended(group);
        status = ended ? DTRAIN_OK : dtrain__events_try(group);
        if (group->mode == DTRAIN_DEVICE_FLAGS && !ended && status == DTRAIN_OK)
            status = dtrain__flags_join(group);
        dtrain__device_note_status(group, status);
        dtrain__events_set(group, DTRAIN__EVENTS_FREE);
        status = dtrain__device_meet(group);
        if (status != DTRAIN_OK) { /* the probe is freed: no peer may try from here on */
            status = dtrain__device_break(group);
            dtrain__events_end(group);
            dtrain__events_settle(group, DTRAIN__EVENTS_FREE);
        } else {
            status = dtrain__device_reached(group, 1, reached);
        }
    }
    dtrain__device_end_probe(group);
    dtrain__device_note_status(group, DTRAIN_OK);
    return status;
}

/* Finds out whether the devices of each host reach each other's memory, sets *reached, and makes what HOSTS needs. */
static dtrain_status dtrain__device_try_hosts(dtrain_device_group *group, int *reached)
{
    dtrain_status status = dtrain__device_agree(group->comm, NULL, dtrain__hosts_new(group));
    dtrain__processes_close_offer(group);
    if (status == DTRAIN_OK)
        status = dtrain__hosts_split(group);
    if (status != DTRAIN_OK)
        return status;
    dtrain__device_note_status(group, dtrain__hosts_make(group));
    status = dtrain__device_meet(group);
    if (status == DTRAIN_OK)
        status = dtrain__device_reached(group, 0, reached);
    if (status == DTRAIN_OK && !*reached)
        dtrain__hosts_free(group);
    dtrain__device_note_status(group, DTRAIN_OK);
    return status;
}

static dtrain_status dtrain__device_make_slots(dtrain_device_group *group)
{
    void *pinned = NULL;
    size_t bytes = (size_t)group->slots * dtrain__staged_slot_bytes(group);
    dtrain_status status = dtrain_device_alloc(group->device, DTRAIN_MEMORY_PINNED, bytes, &pinned);
    group->pinned = (unsigned char *)pinned;
    for (int slot = 0; slot < group->slots && status == DTRAIN_OK; slot++)
        status = dtrain__device_event_create(group->device, &group->slot_events[slot]);
    return status;
}

/* Agrees on the mode, and makes what it needs. */
static dtrain_status dtrain__device_settle(dtrain_device_group *group)
{
    int rank, reached;
    dtrain_status status = dtrain__device_meet(group);
    if (status != DTRAIN_OK)
        return status;
    group->no_devices = 1;
    for (rank = 0; rank < group->comm->size; rank++)
        group->no_devices &= group->notes[rank].has_device == 0;
    int hosts = group->mode == DTRAIN_DEVICE_HOSTS ||
                (group->mode == DTRAIN_DEVICE_MODE_AUTO && dtrain__hosts_each(group) < group->comm->size);
    const char *why = dtrain__device_hindrance(group, hosts, &rank);
    if (why != NULL && group->mode != DTRAIN_DEVICE_MODE_AUTO && group->mode != DTRAIN_DEVICE_STAGED)
        return dtrain__device_no_events(group, rank, why);
    reached = why == NULL && group->mode != DTRAIN_DEVICE_STAGED;
    if (reached)
        status = hosts ? dtrain__device_try_hosts(group, &reached) : dtrain__device_try_events(group, &reached);
    if ((!reached || hosts) && status == DTRAIN_OK)
        dtrain__processes_free(group);
    if (!reached)
        group->mode = DTRAIN_DEVICE_STAGED;
    else if (group->mode == DTRAIN_DEVICE_MODE_AUTO)
        group->mode = hosts ? DTRAIN_DEVICE_HOSTS : DTRAIN_DEVICE_EVENTS;
    if (status != DTRAIN_OK || (reached && !hosts) || group->no_devices)
        return status;
    return dtrain__device_agree(group->comm, NULL, dtrain__device_make_slots(group));
}

DTRAIN_API dtrain_status dtrain_device_group_create(dtrain_device_group **group, dtrain_comm *comm,
                                                    dtrain_device *device, const dtrain_device_group_desc *desc)
{
    dtrain_device_group_desc taken;
    dtrain_status status;
    if (group != NULL)
        *group = NULL;
    if (group == NULL || comm == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "device_group_create: %s is NULL, expected %s", group == NULL ? "group" : "comm",
                            group == NULL ? "a place for the group" : "the ranks to make it of");
    if (dtrain__group_whole(comm, "device_group_create") != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    dtrain_device_group *made = dtrain__device_group_new(comm);
    if (made == NULL)
        return DTRAIN_ERR_MEMORY;
    made->device = device;
    memset(&taken, 0, sizeof taken);
    if (desc != NULL)
        taken = *desc;
    status = dtrain__device_agree(comm, &taken, dtrain__device_take_desc(made, &taken));
    if (status == DTRAIN_OK)
        status = dtrain__device_settle(made);
    if (status == DTRAIN_OK) {
        *group = made;
        return DTRAIN_OK;
    }
    dtrain__error cause = dtrain__thread_error;
    dtrain_device_group_destroy(made);
    return dtrain__report(&cause);
}

DTRAIN_API dtrain_device_mode dtrain_device_group_mode(const dtrain_device_group *group)
{
    return group != NULL ? group->mode : DTRAIN_DEVICE_MODE_AUTO;
}

/* Makes a call, or starts it and waits for it. */
static dtrain_status dtrain__device_make(dtrain_device_group *group, const dtrain__op *op)
{
    dtrain_device_work *work;
    dtrain_status status;
    if (group != NULL && group->async != NULL) { /* it takes its turn among those that were started */
        status = dtrain__async_start(group, op, &work);
        return status == DTRAIN_OK ? dtrain_device_work_wait(work, group->async->caller) : status;
    }
    status = dtrain__device_begin(group, op);
    return status == DTRAIN_OK ? dtrain__async_run(group, op) : status;
}

static dtrain_status dtrain__device_collective(dtrain_device_group *group, dtrain__kind kind, const void *in, void *out,
                                               size_t count, dtrain_dtype dtype, dtrain_op reduction, int root)
{
    dtrain__op op = dtrain__op_of(kind, in, out, count, dtype);
    op.op = reduction;
    op.root = root;
    return dtrain__device_make(group, &op);
}

DTRAIN_API dtrain_status dtrain_device_group_all_reduce(dtrain_device_group *group, const void *in, void *out,
                                                        size_t count, dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__device_collective(group, DTRAIN__ALL_REDUCE, in, out, count, dtype, op, 0);
}

DTRAIN_API dtrain_status dtrain_device_group_reduce_scatter(dtrain_device_group *group, const void *in, void *out,
                                                            size_t count, dtrain_dtype dtype, dtrain_op op)
{
    return dtrain__device_collective(group, DTRAIN__REDUCE_SCATTER, in, out, count, dtype, op, 0);
}

DTRAIN_API dtrain_status dtrain_device_group_all_gather(dtrain_device_group *group, const void *in, void *out,
                                                        size_t count, dtrain_dtype dtype)
{
    return dtrain__device_collective(group, DTRAIN__ALL_GATHER, in, out, count, dtype, (dtrain_op)0, 0);
}

DTRAIN_API dtrain_status dtrain_device_group_broadcast(dtrain_device_group *group, void *data, size_t count,
                                                       dtrain_dtype dtype, int root)
{
    return dtrain__device_collective(group, DTRAIN__BROADCAST, data, data, count, dtype, (dtrain_op)0, root);
}

DTRAIN_API dtrain_status dtrain_device_group_reduce_scatter_v(dtrain_device_group *group, const void *in, void *out,
                                                              const size_t *counts, const size_t *offsets,
                                                              dtrain_dtype dtype, dtrain_op op)
{
    dtrain__op call;
    dtrain_status status = dtrain__async_op_v(group, DTRAIN__REDUCE_SCATTER, in, out, counts, offsets, dtype, &call);
    call.op = op;
    return status == DTRAIN_OK ? dtrain__device_make(group, &call) : status;
}

DTRAIN_API dtrain_status dtrain_device_group_all_gather_v(dtrain_device_group *group, const void *in, void *out,
                                                          const size_t *counts, const size_t *offsets,
                                                          dtrain_dtype dtype)
{
    dtrain__op call;
    dtrain_status status = dtrain__async_op_v(group, DTRAIN__ALL_GATHER, in, out, counts, offsets, dtype, &call);
    return status == DTRAIN_OK ? dtrain__device_make(group, &call) : status;
}

DTRAIN_API dtrain_status dtrain_device_group_wait(dtrain_device_group *group)
{
    if (group == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "device_group_wait: the group is NULL; was its creation checked?");
    if (group->async != NULL) /* after that, the thread leaves the queue alone */
        dtrain__async_wait(group->async, group->async->worker.posted, INT64_MAX);
    dtrain_status status = dtrain__events_wait(group);
    if (status == DTRAIN_OK && group->mode == DTRAIN_DEVICE_FLAGS) {
        status = dtrain__flags_check(group);
        return status == DTRAIN_OK ? DTRAIN_OK : dtrain__flags_retreat(group, status);
    }
    return status == DTRAIN_OK && group->processes != NULL ? dtrain__processes_check(group) : status;
}

/* A peer may still use this rank's events after the last exchange of a call. It waits for no rank while it does. */
DTRAIN_API void dtrain_device_group_destroy(dtrain_device_group *group)
{
    if (group == NULL)
        return;
    dtrain__error kept = dtrain__thread_error;
    if (!dtrain__async_stop(group)) {
        dtrain__async_destroy(group, 0);
        dtrain__free(group->comm->allocator, group);
        return;
    }
    dtrain__hosts_free(group);
    if (group->processes != NULL && group->processes->queues != NULL) {
        dtrain__processes_wait(group); /* lets peers go on that wait for a device that has failed */
        dtrain__events_settle(group, DTRAIN__EVENTS_FREE);
    } else if (group->mine.events[0] != NULL && group->comm->plane->in_process) {
        dtrain__events_settle(group, DTRAIN__EVENTS_FREE);
    }
    dtrain__flags_leave(group);
    dtrain__processes_free(group);
    DTRAIN_IGNORE(dtrain_device_wait(group->device));
    for (int i = 0; i < 2; i++)
        dtrain__device_event_destroy(group->device, group->mine.events[i]);
    for (int slot = 0; slot < group->slots; slot++)
        dtrain__device_event_destroy(group->device, group->slot_events[slot]);
    dtrain__device_end_probe(group);
    dtrain_device_free(group->device, DTRAIN_MEMORY_PINNED, group->pinned);
    dtrain__async_destroy(group, 1);
    dtrain__thread_error = kept;
    dtrain__free(group->comm->allocator, group);
}

/* Makes a group with started calls, and defaults for the rest. */
static dtrain_status dtrain__device_group_async(dtrain_device_group **group, dtrain_comm *comm, dtrain_device *device)
{
    dtrain_device_group_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.async = 1;
    return dtrain_device_group_create(group, comm, device, &desc);
}

#endif
