/* ---- >>split ----
 * Groups out of groups. The ranks of the parent tell each other where they want to be, and each makes its own end. Then
 * they agree whether all could: every rank has its group, or every rank has the error. A group's name is the lowest
 * member's rank in the world and a count that this member keeps, so no two names are the same. */
#ifndef DTRAIN__SPLIT
#define DTRAIN__SPLIT
#include "op.c"
#include "work.c"
#include "create.c"
#include "alike.c"

/* What a rank tells the others before a group is made. */
typedef struct dtrain__split_entry {
    uint64_t color;  /* ranks of one color make a group; DTRAIN__SPLIT_NONE: in no group */
    int64_t key;     /* their order in it */
    uint64_t origin; /* the rank in the world */
    uint64_t serial; /* for the name, if this is the lowest member */
} dtrain__split_entry;

#define DTRAIN__SPLIT_NONE UINT64_MAX
#define DTRAIN__SPLIT_WORDS (sizeof(dtrain__split_entry) / sizeof(uint64_t))

typedef struct dtrain__split_state {
    const char *call;
    dtrain_comm *parent;
    dtrain__split_entry *entries; /* of all ranks of the parent; one block with the next three */
    uint64_t *states;             /* 1: in the new group */
    int *members;                 /* ranks of the parent, in the new order */
    int *origins;                 /* their ranks in the world */
    int bound;                    /* the loss of any rank of the parent ends the new group; 0: as with the parent */
    int replaces;                 /* the new group replaces the parent */
    int size, rank;               /* of the new group; rank -1: this rank is not in it */
    uint64_t id;                  /* its name */
} dtrain__split_state;

static dtrain_status dtrain__split_begin(dtrain__split_state *split, dtrain_comm *parent, const char *call)
{
    size_t size = (size_t)parent->size, bytes = size * (sizeof *split->entries + sizeof(uint64_t) + 2 * sizeof(int));
    memset(split, 0, sizeof *split);
    if (dtrain__group_whole(parent, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    split->call = call;
    split->parent = parent;
    split->rank = -1;
    split->entries = (dtrain__split_entry *)DTRAIN__ATOMIC_EXCHANGE(&parent->vote.room, NULL, SEQ_CST);
    if (split->entries != NULL)
        memset((void *)split->entries, 0, bytes);
    else
        split->entries = (dtrain__split_entry *)dtrain__alloc(parent->allocator, bytes);
    if (split->entries == NULL)
        return dtrain__fail(&parent->error, DTRAIN_ERR_MEMORY, "%s on rank %d: no memory for %zu bytes", call,
                            parent->rank, bytes);
    split->states = (uint64_t *)(void *)(split->entries + size);
    split->members = (int *)(void *)(split->states + size);
    split->origins = split->members + size;
    return DTRAIN_OK;
}

/* Keeps the block for the next split of the group, which needs as much. */
static void dtrain__split_end(dtrain__split_state *split)
{
    void *entries = DTRAIN__ATOMIC_EXCHANGE(&split->parent->vote.room, (void *)split->entries, SEQ_CST);
    dtrain__free(split->parent->allocator, entries);
}

/* Learns from every rank of the parent where it wants to be. */
static dtrain_status dtrain__split_meet(dtrain__split_state *split, uint64_t color, int64_t key)
{
    dtrain_comm *parent = split->parent;
    dtrain__split_entry mine = {color, key, (uint64_t)dtrain__seat_world(parent->seat, parent->rank), 0};
    mine.serial = dtrain__origin_serial(parent->origin);
    dtrain_status status =
        dtrain_all_gather(parent, &mine, split->entries, DTRAIN__SPLIT_WORDS * (size_t)parent->size, DTRAIN_U64);
    if (status != DTRAIN_OK)
        return dtrain__fail(&parent->error, status, "%s: %.560s", split->call, dtrain__thread_error.text);
    for (int rank = 0; rank < parent->size && status == DTRAIN_OK; rank++)
        if (split->entries[rank].origin != (uint64_t)dtrain__seat_world(parent->seat, rank))
            status = dtrain__fail(&parent->error, DTRAIN_ERR_CORRUPT,
                                  "%s on rank %d: rank %d says that it is rank %llu of the world, and it is rank %d; "
                                  "check the transport between the two",
                                  split->call, parent->rank, rank, (unsigned long long)split->entries[rank].origin,
                                  dtrain__seat_world(parent->seat, rank));
    return status;
}

static void dtrain__split_add(dtrain__split_state *split, int member, int origin)
{
    if (member == split->parent->rank)
        split->rank = split->size;
    split->origins[split->size] = origin;
    split->members[split->size++] = member;
}

static uint64_t dtrain__split_name(const dtrain__split_state *split)
{
    int lowest = 0;
    for (int i = 1; i < split->size; i++)
        if (split->origins[i] < split->origins[lowest])
            lowest = i;
    return dtrain__plane_group_id(split->entries[split->members[lowest]].serial, split->origins[lowest]);
}

/* Ranks of a node in the new group, from the parent's nodes or the hosts of processes; 0: uneven. */
static int dtrain__split_node_ranks(const dtrain__split_state *split, const dtrain_comm *group)
{
    const int *members = split->members;
    int each = split->parent->node_ranks, n = 1;
    if (each == 0)
        return dtrain__plane_node_ranks(group->plane, group->transport.self, group->size);
    while (n < split->size && members[n] / each == members[0] / each)
        n++;
    for (int i = 0; i < split->size; i++)
        if (members[i] / each != members[i - i % n] / each ||
            (i >= n && i % n == 0 && members[i] / each == members[i - 1] / each))
            return 0;
    return n;
}

/* Binds the new group to ranks that are not its own, if the parent is so bound or the call asks for it. */
static dtrain_status dtrain__split_bind(dtrain__split_state *split, dtrain_comm *group)
{
    const dtrain_comm *parent = split->parent;
    dtrain_allocator *allocator = parent->allocator;
    int most = dtrain__seat_bound(parent->seat, NULL);
    size_t bytes = (size_t)(most > parent->size ? most : parent->size) * sizeof(int);
    int *bound = (int *)dtrain__alloc(allocator, bytes); /* ranks of the world */
    int count = bound != NULL ? dtrain__seat_bound(parent->seat, bound) : 0, good = bound != NULL;
    if (good && count == 0 && split->bound)
        for (; count < parent->size; count++)
            bound[count] = dtrain__seat_world(parent->seat, count);
    if (count > 0)
        good = dtrain__seat_bind(group->seat, bound, count);
    dtrain__free(allocator, bound);
    return good ? DTRAIN_OK
                : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory to list the ranks that %s depends on", split->call);
}

static dtrain_status dtrain__split_make(dtrain__split_state *split, dtrain_comm **group)
{
    dtrain_comm *parent = split->parent;
    dtrain__group_desc desc = {split->id, split->origins, split->size, split->rank};
    dtrain__end end;
    dtrain_status status = dtrain__service_share(parent);
    if (status == DTRAIN_OK)
        status = parent->plane->group(parent->transport.self, &desc, &end);
    if (status == DTRAIN_OK)
        status = dtrain__create_end(group, &end, &parent->desc);
    if (status != DTRAIN_OK)
        return status;
    if (parent->desc.progress == DTRAIN_PROGRESS_POLL && parent->service != NULL)
        dtrain__service_add(parent->service, *group);
    dtrain__blocked *above = split->replaces ? parent->blocked->above : parent->blocked;
    if (above != NULL && (*group)->allocator == parent->allocator) { /* the group's waits count there, too */
        (*group)->blocked->above = above;
        DTRAIN__ATOMIC_ADD(&above->held, 1, RELAXED);
    }
    (*group)->apart = parent->apart;
    (*group)->part = parent->part || (!split->replaces && split->size < parent->size); /* survivors are all there are */
    (*group)->group = split->id;
    (*group)->node_ranks = dtrain__split_node_ranks(split, *group);
    return DTRAIN_OK;
}

/* Makes this rank's end and learns how the others fared. If one rank could not, it is undone for all. */
static dtrain_status dtrain__split_settle(dtrain__split_state *split, dtrain_comm **group)
{
    dtrain_comm *parent = split->parent;
    dtrain_status status = DTRAIN_OK;
    if (split->rank >= 0) {
        split->id = dtrain__split_name(split);
        status = dtrain__split_make(split, group);
        if (status == DTRAIN_OK)
            status = dtrain__split_bind(split, *group);
    }
    if (status != DTRAIN_OK)
        dtrain__fail(&parent->error, status, "%s on rank %d: %.560s", split->call, parent->rank,
                     dtrain__thread_error.text);
    status = dtrain__alike_agree(parent, split->call, 1, status);
    if (status != DTRAIN_OK) {
        dtrain_comm_destroy(*group);
        *group = NULL;
    }
    return status;
}

/* Checks that there is a group, and an address for the new one. */
static dtrain_status dtrain__split_check(dtrain_comm *comm, dtrain_comm **group, const char *call)
{
    if (group != NULL)
        *group = NULL;
    if (comm != NULL && group != NULL)
        return DTRAIN_OK;
    return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                        "%s: needs a group and a place for the new one (%s is NULL)", call,
                        comm == NULL ? "comm" : "group");
}

/* As dtrain_comm_split; bound: the loss of any rank of comm ends the group. */
static dtrain_status dtrain__split_by_color(dtrain_comm *comm, int color, int key, int bound, dtrain_comm **group,
                                            const char *call)
{
    dtrain__split_state split;
    dtrain_status status = dtrain__split_check(comm, group, call);
    uint64_t mine = color < 0 ? DTRAIN__SPLIT_NONE : (uint64_t)color;
    if (status == DTRAIN_OK)
        status = dtrain__split_begin(&split, comm, call);
    if (status != DTRAIN_OK)
        return status;
    split.bound = bound;
    status = dtrain__split_meet(&split, mine, key);
    while (status == DTRAIN_OK && mine != DTRAIN__SPLIT_NONE) {
        /* the next in order of key and rank: the lowest key of those that are not in yet */
        int next = -1;
        for (int rank = 0; rank < comm->size; rank++)
            if (split.entries[rank].color == mine && split.states[rank] == 0 &&
                (next < 0 || split.entries[rank].key < split.entries[next].key))
                next = rank;
        if (next < 0)
            break;
        split.states[next] = 1;
        dtrain__split_add(&split, next, (int)split.entries[next].origin);
    }
    if (status == DTRAIN_OK)
        status = dtrain__split_settle(&split, group);
    dtrain__split_end(&split);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **group)
{
    return dtrain__split_by_color(comm, color, key, 0, group, "comm_split");
}

#endif
