/* ---- >>device_hosts ----
 * Collectives of devices across hosts that have equally many ranks, neighbours in rank order. Two groups do the work.
 * `inside` has the ranks of a host and uses EVENTS. `between` has the ranks with the same place in every host and is
 * STAGED.
 *
 * Every rank first takes part in a step of the whole group. Before anything is done, the step finds calls that differ,
 * memory that cannot be shared and ranks that do not come. A later failure breaks all three groups. In each call every
 * rank waits for ranks of its host and of every other host, so no rank waits for one that has left. */
#ifndef DTRAIN__DEVICE_HOSTS
#define DTRAIN__DEVICE_HOSTS
#include "../comm/step.c"
#include "../comm/split.c"
#include "device_call.c"
#include "staged.c"
#include "processes.c"
#include "events.c"

struct dtrain__hosts {
    dtrain_comm *near_ranks, *far_ranks; /* ranks of this host; ranks of this place in every host */
    dtrain_device_group *inside, *between;
    int each, count, place;          /* each: ranks of a host; count: hosts; place: this rank's among its host's */
    dtrain__processes_buffers *told; /* from every rank, before a call begins */
    dtrain_extent *pieces;           /* at most one for each host */
    void *scratch;                   /* device memory: this host's sums in a reduce-scatter */
    size_t scratch_bytes;
};

/* ---- which ranks are on which host ---- */

#ifndef DTRAIN__DEVICE_HOST /* tests define it to split one host into several */
#define DTRAIN__DEVICE_HOST(rank, host) (host)
#endif

static uint64_t dtrain__hosts_own(const dtrain_comm *comm)
{
    uint64_t (*host)(void *self, int rank) = comm->plane->host;
    return DTRAIN__DEVICE_HOST(dtrain__seat_world(comm->seat, comm->rank),
                               host != NULL ? host(comm->transport.self, comm->rank) : 0);
}

/* Returns the number of ranks before the first that is on another host than rank 0. */
static int dtrain__hosts_each(const dtrain_device_group *group)
{
    int each = 1;
    while (each < group->comm->size && group->notes[each].host == group->notes[0].host)
        each++;
    return each;
}

/* Returns whether a rank is on the host where it must be, if all hosts have `each` ranks. */
static int dtrain__hosts_fits(const dtrain_device_group *group, int each, int rank)
{
    const dtrain__device_note *notes = group->notes;
    int first = rank - rank % each;
    if (first + each > group->comm->size || notes[rank].host != notes[first].host)
        return 0;
    for (int other = 0; rank == first && other < first; other += each)
        if (notes[other].host == notes[rank].host)
            return 0;
    return 1;
}

/* Returns why HOSTS is not possible where the devices would allow it, and on which rank; NULL: it is possible. */
static const char *dtrain__hosts_hindrance(const dtrain_device_group *group, int *rank)
{
    int each = dtrain__hosts_each(group);
    *rank = 0;
    if (each == group->comm->size)
        return "all ranks are on one host, where DTRAIN_DEVICE_EVENTS is enough";
    if (each == 1)
        return "it is the only rank of its host, or its neighbour in rank order is on another host";
    if (each > DTRAIN__DEVICE_MOST)
        return "its host has more than 64 ranks";
    if (group->comm->desc.order != DTRAIN_ORDER_ANY && !dtrain__step_power_of_two(each))
        return "the number of ranks of its host is no power of two, which the tree order of sums needs";
    for (*rank = each; *rank < group->comm->size; ++*rank)
        if (!dtrain__hosts_fits(group, each, *rank))
            return "its host has more or fewer ranks than that of rank 0, or they are not neighbours in rank order";
    return NULL;
}

/* ---- making ---- */

static dtrain_status dtrain__hosts_new(dtrain_device_group *group)
{
    dtrain_comm *comm = group->comm;
    int each = dtrain__hosts_each(group), count = comm->size / each;
    size_t header = (sizeof(dtrain__hosts) + 63) / 64 * 64;
    size_t bytes =
        header + (size_t)comm->size * sizeof(dtrain__processes_buffers) + (size_t)count * sizeof(dtrain_extent);
    unsigned char *block = (unsigned char *)dtrain__alloc(comm->allocator, bytes);
    if (block == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes", bytes);
    group->hosts = (dtrain__hosts *)(void *)block;
    group->hosts->each = each;
    group->hosts->count = count;
    group->hosts->place = comm->rank % each;
    group->hosts->told = (dtrain__processes_buffers *)(void *)(block + header);
    group->hosts->pieces = (dtrain_extent *)(void *)(group->hosts->told + comm->size);
    return DTRAIN_OK;
}

/* Makes a group of some ranks that ends when the whole one does; between processes, for any reason. */
static dtrain_status dtrain__hosts_part(dtrain_comm *whole, int color, dtrain_comm **part)
{
    dtrain_status status = dtrain__split_by_color(whole, color, whole->rank, 1, part, "device_group_create");
    if (status == DTRAIN_OK)
        dtrain__seat_follow((*part)->seat, whole->seat);
    return status;
}

/* Makes the two groups that this rank is in. */
static dtrain_status dtrain__hosts_split(dtrain_device_group *group)
{
    dtrain__hosts *hosts = group->hosts;
    dtrain_status status = dtrain__hosts_part(group->comm, group->comm->rank / hosts->each, &hosts->near_ranks);
    return status == DTRAIN_OK ? dtrain__hosts_part(group->comm, hosts->place, &hosts->far_ranks) : status;
}

/* Makes this rank's ends of the two groups of devices. UNSUPPORTED: the devices of its host do not reach each other. */
static dtrain_status dtrain__hosts_make(dtrain_device_group *group)
{
    dtrain__hosts *hosts = group->hosts;
    dtrain_device_group_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = DTRAIN_DEVICE_EVENTS;
    dtrain_status status = dtrain_device_group_create(&hosts->inside, hosts->near_ranks, group->device, &desc);
    if (status != DTRAIN_OK)
        return status;
    hosts->between = dtrain__device_group_new(hosts->far_ranks);
    if (hosts->between == NULL)
        return DTRAIN_ERR_MEMORY;
    hosts->between->device = group->device;
    hosts->between->mode = DTRAIN_DEVICE_STAGED;
    hosts->between->chunk_bytes = group->chunk_bytes;
    hosts->between->slots = group->slots;
    hosts->scratch_bytes = (size_t)group->slots * dtrain__staged_slot_bytes(group);
    return dtrain_device_alloc(group->device, DTRAIN_MEMORY_DEVICE, hosts->scratch_bytes, &hosts->scratch);
}

static void dtrain__hosts_free(dtrain_device_group *group)
{
    dtrain__hosts *hosts = group->hosts;
    if (hosts == NULL)
        return;
    dtrain_device_group_destroy(hosts->inside);
    if (hosts->between != NULL)
        dtrain__free(hosts->far_ranks->allocator, hosts->between);
    dtrain_device_free(group->device, DTRAIN_MEMORY_DEVICE, hosts->scratch);
    dtrain__group_close(hosts->far_ranks);
    dtrain__group_close(hosts->near_ranks);
    dtrain__free(group->comm->allocator, hosts);
    group->hosts = NULL;
}

/* ---- a call ----
 * A sum is folded inside each host, a share by each rank. The CPU adds the hosts' sums of a share between hosts, and
 * each rank hands its share to all of its host. If hosts have a power of two of ranks, the tree of >>order is the tree
 * over the hosts' trees, so the bits are the same. A mean is the sum, divided once where the hosts' sums are added.
 * Partial sums of 16-bit floats are float32, for which no buffer has room: such calls go STAGED among all ranks. */

/* Breaks all groups after a phase failed; this thread's last error says why. */
static dtrain_status dtrain__hosts_failed(dtrain_device_group *group, const dtrain__op *whole, int between,
                                          dtrain_status status)
{
    dtrain_comm *comm = group->comm;
    const dtrain__hosts *hosts = group->hosts;
    int first = between ? hosts->place : comm->rank - hosts->place;
    dtrain__fail(&comm->error, status, "%s on rank %d, %s (whose ranks 0, 1 are ranks %d, %d of the group): %s",
                 dtrain__device_text(comm, whole, comm->number).text, comm->rank,
                 between ? "between hosts" : "inside its host", first, first + (between ? hosts->each : 1),
                 dtrain__status_cause(&dtrain__thread_error));
    dtrain__error cause = dtrain__thread_error;
    status = dtrain__device_break(group);
    dtrain__group_break(hosts->near_ranks, &cause);
    dtrain__group_break(hosts->far_ranks, &cause);
    dtrain__events_end(hosts->inside);
    return status;
}

static dtrain_op dtrain__hosts_op(const dtrain__op *whole)
{
    return whole->op == DTRAIN_MEAN ? DTRAIN_SUM : whole->op;
}

/* Runs a step inside the host on this rank's share, which is in pieces; 0 pieces: on the whole. */
static dtrain_status dtrain__hosts_inside(dtrain_device_group *group, const dtrain__op *whole, dtrain__op *op,
                                          int pieces)
{
    dtrain_device_group *inside = group->hosts->inside;
    op->op = dtrain__op_reduces(op) ? dtrain__hosts_op(whole) : (dtrain_op)0;
    inside->pieces = group->hosts->pieces;
    inside->piece_count = pieces;
    dtrain_status status = dtrain__events_run(inside, op);
    return status == DTRAIN_OK ? DTRAIN_OK : dtrain__hosts_failed(group, whole, 0, status);
}

/* Runs a step between hosts. It uses the slots of the whole group, and the queue that fills them. */
static dtrain_status dtrain__hosts_between(dtrain_device_group *group, const dtrain__op *whole, dtrain__op *op)
{
    dtrain_device_group *between = group->hosts->between;
    int reduces = dtrain__op_reduces(op);
    op->op = reduces ? dtrain__hosts_op(whole) : (dtrain_op)0;
    between->pinned = group->pinned;
    between->slot_events = group->slot_events;
    between->mean_of = reduces && whole->op == DTRAIN_MEAN ? group->comm->size : 0;
    dtrain_status status = dtrain__staged_run(between, op);
    return status == DTRAIN_OK ? DTRAIN_OK : dtrain__hosts_failed(group, whole, 1, status);
}

/* Hands this rank's share of the result, in its output, to all of its host. */
static dtrain_status dtrain__hosts_hand_out(dtrain_device_group *group, const dtrain__op *whole, int pieces)
{
    size_t span = dtrain__device_span(group, whole);
    dtrain__op op = dtrain__op_of(DTRAIN__ALL_GATHER, NULL, whole->out, span, whole->dtype);
    return dtrain__hosts_inside(group, whole, &op, pieces);
}

/* Checks that all ranks make this call, and can. */
static dtrain_status dtrain__hosts_meet(dtrain_device_group *group, const dtrain__op *whole)
{
    dtrain__processes_buffers mine;
    dtrain__op op = *whole;
    memset(&mine, 0, sizeof mine);
    op.kind = whole->kind == DTRAIN__BROADCAST ? DTRAIN__ALL_REDUCE : whole->kind; /* that shares the buffers of all
                                                                                      ranks */
    if (group->hosts->inside->processes != NULL)
        mine.status = (uint64_t)dtrain__processes_pack(group->hosts->inside, &op, &mine);
    return dtrain__processes_tell(group, whole, &mine, group->hosts->told);
}

/* Makes this rank's share of a vector that every rank has whole, as one piece. Returns its address in `out`. */
static unsigned char *dtrain__hosts_share(dtrain_device_group *group, const dtrain__op *whole)
{
    size_t width = dtrain_dtype_bits(whole->dtype) / 8;
    dtrain_extent *piece = &group->hosts->pieces[0];
    piece->count = dtrain__events_share(group->hosts->near_ranks, whole->count, width, &piece->begin);
    piece->begin = piece->count > 0 ? piece->begin : 0;
    return (unsigned char *)whole->out + piece->begin * width;
}

static dtrain_status dtrain__hosts_all_reduce(dtrain_device_group *group, const dtrain__op *whole)
{
    unsigned char *share = dtrain__hosts_share(group, whole);
    size_t n = group->hosts->pieces[0].count;
    dtrain__op fold = dtrain__op_of(DTRAIN__REDUCE_SCATTER, whole->in, share, whole->count, whole->dtype);
    dtrain__op add = dtrain__op_of(DTRAIN__ALL_REDUCE, share, share, n, whole->dtype);
    dtrain_status status = dtrain__hosts_inside(group, whole, &fold, 1);
    if (status == DTRAIN_OK)
        status = dtrain__hosts_between(group, whole, &add);
    return status == DTRAIN_OK ? dtrain__hosts_hand_out(group, whole, 1) : status;
}

/* First gives all of it to the root's host. Then each rank there sends a share to every host. */
static dtrain_status dtrain__hosts_broadcast(dtrain_device_group *group, const dtrain__op *whole)
{
    const dtrain__hosts *hosts = group->hosts;
    unsigned char *share = dtrain__hosts_share(group, whole);
    int home = whole->root / hosts->each, here = group->comm->rank / hosts->each == home;
    dtrain__op all = dtrain__op_of(DTRAIN__BROADCAST, whole->in, whole->out, whole->count, whole->dtype);
    dtrain__op some = dtrain__op_of(DTRAIN__BROADCAST, share, share, hosts->pieces[0].count, whole->dtype);
    all.root = whole->root % hosts->each;
    some.root = home;
    dtrain_status status = here ? dtrain__hosts_inside(group, whole, &all, 0) : DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = dtrain__hosts_between(group, whole, &some);
    return status == DTRAIN_OK && !here ? dtrain__hosts_hand_out(group, whole, 1) : status;
}

/* First brings the shards of this rank's place in every host to it, in the whole vector; then hands them to its host.
 */
static dtrain_status dtrain__hosts_all_gather(dtrain_device_group *group, const dtrain__op *whole)
{
    const dtrain__hosts *hosts = group->hosts;
    dtrain__op some = dtrain__op_of(DTRAIN__ALL_GATHER, whole->in, whole->out, 0, whole->dtype);
    for (int host = 0; host < hosts->count; host++) {
        hosts->pieces[host] = group->shards[host * hosts->each + hosts->place];
        hosts->between->shards[host] = hosts->pieces[host];
        some.count += hosts->pieces[host].count;
    }
    dtrain_status status = dtrain__hosts_between(group, whole, &some);
    return status == DTRAIN_OK ? dtrain__hosts_hand_out(group, whole, hosts->count) : status;
}

/* Folds the host's sums of the shards of this rank's place into the scratch, as much as it holds at a time. From there
 * each goes to its owner. */
static dtrain_status dtrain__hosts_reduce_scatter(dtrain_device_group *group, const dtrain__op *whole)
{
    const dtrain__hosts *hosts = group->hosts;
    size_t width = dtrain_dtype_bits(whole->dtype) / 8, longest = 0;
    size_t room = hosts->scratch_bytes / width / (size_t)hosts->count, span = dtrain__device_span(group, whole);
    dtrain_status status = DTRAIN_OK;
    for (int rank = 0; rank < group->comm->size; rank++)
        longest = group->shards[rank].count > longest ? group->shards[rank].count : longest;
    for (size_t at = 0; at < longest && status == DTRAIN_OK; at += room) {
        size_t sum = 0, own = group->shards[group->comm->rank].count > at ? at * width : 0;
        for (int host = 0; host < hosts->count; host++) {
            dtrain_extent shard = group->shards[host * hosts->each + hosts->place];
            size_t n = shard.count > at ? shard.count - at : 0;
            n = n < room ? n : room;
            hosts->pieces[host].begin = n > 0 ? shard.begin + at : 0;
            hosts->pieces[host].count = hosts->between->shards[host].count = n;
            hosts->between->shards[host].begin = sum;
            sum += n;
        }
        dtrain__op fold = dtrain__op_of(DTRAIN__REDUCE_SCATTER, whole->in, hosts->scratch, span, whole->dtype);
        dtrain__op add =
            dtrain__op_of(DTRAIN__REDUCE_SCATTER, hosts->scratch, (unsigned char *)whole->out + own, sum, whole->dtype);
        status = dtrain__hosts_inside(group, whole, &fold, hosts->count);
        if (status == DTRAIN_OK)
            status = dtrain__hosts_between(group, whole, &add);
    }
    return status;
}

static dtrain_status dtrain__hosts_run(dtrain_device_group *group, const dtrain__op *op)
{
    if (dtrain__op_reduces(op) && dtrain__fold_partial(op->dtype) != op->dtype &&
        (op->op == DTRAIN_SUM || op->op == DTRAIN_MEAN || op->op == DTRAIN_PROD))
        return dtrain__staged_run(group, op); /* 16-bit floats: among all ranks */
    dtrain_status status = dtrain__hosts_meet(group, op);
    if (status != DTRAIN_OK || op->count == 0)
        return status;
    switch (op->kind) {
    case DTRAIN__ALL_REDUCE: return dtrain__hosts_all_reduce(group, op);
    case DTRAIN__REDUCE_SCATTER: return dtrain__hosts_reduce_scatter(group, op);
    case DTRAIN__ALL_GATHER: return dtrain__hosts_all_gather(group, op);
    default: return dtrain__hosts_broadcast(group, op);
    }
}

#endif
