/* ---- >>split ----
 * Groups out of groups. The ranks of the parent exchange who wants to be where, each makes its own end, and a second
 * exchange tells whether all could: either every rank has its group or every rank has the error. A group's name is
 * the lowest member's rank in the world and a count that this member keeps, so that no two are ever the same. */
#ifndef DTRAIN__SPLIT
#define DTRAIN__SPLIT
#include "op.c"
#include "comm.c"
#include "group.c"
#include "collectives.c"

/* What a rank tells the others before a group is made. */
typedef struct dtrain__seat {
    uint64_t color;  /* ranks of one color make a group; DTRAIN__NO_SEAT: of none */
    int64_t key;     /* their order in it */
    uint64_t origin; /* the rank in the world */
    uint64_t serial; /* for the name, if this is the lowest member */
} dtrain__seat;

#define DTRAIN__NO_SEAT UINT64_MAX
#define DTRAIN__SEAT_WORDS (sizeof(dtrain__seat) / sizeof(uint64_t))

/* A group that is being made. */
typedef struct dtrain__draft {
    const char *call;
    dtrain_comm *parent;
    dtrain__seat *seats; /* of all ranks of the parent */
    uint64_t *states;    /* how each of them fared */
    int *members;        /* ranks of the parent, in the new order */
    int *origins;        /* the same in the world */
    int bound;           /* the loss of any rank of the parent ends the new group; else as the parent is bound */
    int size, rank;      /* of the new group; rank -1: this rank is none of it */
    uint64_t id;         /* its name */
    size_t bytes;        /* of the one block that all this is in, with seats at its start */
} dtrain__draft;

static dtrain_status dtrain__draft_begin(dtrain__draft *draft, dtrain_comm *parent, const char *call)
{
    size_t size = (size_t)parent->size;
    memset(draft, 0, sizeof *draft);
    if (parent->fusing)
        return dtrain__fail(&parent->error, DTRAIN_ERR_INVALID,
                            "%s on rank %d: it cannot be fused; call fuse_end first", call, parent->rank);
    draft->call = call;
    draft->parent = parent;
    draft->rank = -1;
    draft->bytes = size * (sizeof(dtrain__seat) + sizeof(uint64_t) + 2 * sizeof(int));
    draft->seats = (dtrain__seat *)dtrain__alloc(parent->allocator, draft->bytes);
    if (draft->seats == NULL)
        return dtrain__fail(&parent->error, DTRAIN_ERR_MEMORY, "%s on rank %d: no memory for %zu bytes", call,
                            parent->rank, draft->bytes);
    draft->states = (uint64_t *)(void *)(draft->seats + size);
    draft->members = (int *)(void *)(draft->states + size);
    draft->origins = draft->members + size;
    return DTRAIN_OK;
}

static void dtrain__draft_end(dtrain__draft *draft)
{
    dtrain__free(draft->parent->allocator, draft->seats, draft->bytes);
}

/* A number that this rank gives to no other group; 0 over a transport of the user's own, which has no groups. */
static uint64_t dtrain__draft_serial(dtrain_comm *parent)
{
    dtrain__board *board = parent->transport.board;
    pthread_mutex_t *mutex;
    uint64_t *count, serial;
    if (board == NULL && parent->socket == NULL)
        return 0;
    mutex = board != NULL ? &board->family->mutex : &parent->socket->hub->mutex;
    count = board != NULL ? &board->family->serial : &parent->socket->hub->serial;
    pthread_mutex_lock(mutex);
    serial = ++*count;
    pthread_mutex_unlock(mutex);
    return serial;
}

static int dtrain__comm_origin(const dtrain_comm *comm, int rank)
{
    if (comm->transport.board != NULL)
        return comm->transport.board->slots[rank].origin;
    return comm->socket != NULL ? comm->socket->peers[rank].world : rank;
}

/* Gathers what every rank of the parent says: `words` 64-bit words of each. */
static dtrain_status dtrain__draft_gather(dtrain__draft *draft, const void *mine, void *all, size_t words)
{
    dtrain_comm *parent = draft->parent;
    dtrain_status status = dtrain_all_gather(parent, mine, all, words * (size_t)parent->size, DTRAIN_U64);
    if (status == DTRAIN_OK)
        return DTRAIN_OK;
    dtrain__error cause = parent->error;
    return dtrain__fail(&parent->error, status, "%s: %.560s", draft->call, cause.text);
}

static dtrain_status dtrain__draft_meet(dtrain__draft *draft, uint64_t color, int64_t key)
{
    dtrain_comm *parent = draft->parent;
    dtrain__seat mine = {color, key, (uint64_t)dtrain__comm_origin(parent, parent->rank), 0};
    mine.serial = dtrain__draft_serial(parent);
    return dtrain__draft_gather(draft, &mine, draft->seats, DTRAIN__SEAT_WORDS);
}

static void dtrain__draft_add(dtrain__draft *draft, int member, int origin)
{
    if (member == draft->parent->rank)
        draft->rank = draft->size;
    draft->origins[draft->size] = origin;
    draft->members[draft->size++] = member;
}

static uint64_t dtrain__draft_name(const dtrain__draft *draft)
{
    int lowest = 0;
    for (int i = 1; i < draft->size; i++)
        if (draft->origins[i] < draft->origins[lowest])
            lowest = i;
    return dtrain__hub_group_id(draft->seats[draft->members[lowest]].serial, draft->origins[lowest]);
}

/* As the parent has it, or the hosts of processes. */
static int dtrain__draft_node_ranks(const dtrain__draft *draft, const dtrain_comm *group)
{
    const int *members = draft->members;
    int each = draft->parent->node_ranks, n = 1;
    if (each == 0)
        return group->socket != NULL ? dtrain__socket_node_ranks(group->socket) : 0;
    while (n < draft->size && members[n] / each == members[0] / each)
        n++;
    for (int i = 0; i < draft->size; i++)
        if (members[i] / each != members[i - i % n] / each ||
            (i >= n && i % n == 0 && members[i] / each == members[i - 1] / each))
            return 0;
    return n;
}

/* The ranks of the world whose loss is to end the new group, into `mates`, which has room for all; returns how many. */
static int dtrain__draft_mates(const dtrain__draft *draft, int *mates)
{
    const dtrain_comm *parent = draft->parent;
    const dtrain__board *board = parent->transport.board;
    const unsigned char *bound = parent->socket != NULL ? parent->socket->mates : NULL;
    int count = 0;
    if (board != NULL && board->mates != NULL) {
        memcpy(mates, board->mates, (size_t)board->mate_count * sizeof *mates);
        return board->mate_count;
    }
    for (int rank = 0; bound != NULL && rank < parent->socket->hub->size; rank++)
        if (bound[rank])
            mates[count++] = rank;
    for (int rank = 0; bound == NULL && draft->bound && rank < parent->size; rank++)
        mates[count++] = dtrain__comm_origin(parent, rank);
    return count;
}

/* How many ranks there are in the world at most. */
static int dtrain__draft_world(const dtrain__draft *draft)
{
    const dtrain_comm *parent = draft->parent;
    const dtrain__board *board = parent->transport.board;
    int mates = board != NULL ? board->mate_count : parent->socket != NULL ? parent->socket->hub->size : 0;
    return mates > parent->size ? mates : parent->size;
}

/* Binds the new group to ranks beyond it, where its parent is bound so or the call says so. */
static dtrain_status dtrain__draft_bind(dtrain__draft *draft, dtrain_comm *group)
{
    dtrain_allocator *allocator = draft->parent->allocator;
    size_t bytes = (size_t)dtrain__draft_world(draft) * sizeof(int);
    int *mates = (int *)dtrain__alloc(allocator, bytes), count = mates != NULL ? dtrain__draft_mates(draft, mates) : 0;
    int good = mates != NULL;
    if (count > 0 && group->transport.board != NULL)
        good = dtrain__board_bind(group->transport.board, mates, count);
    if (count > 0 && group->socket != NULL) {
        pthread_mutex_lock(&group->socket->hub->mutex);
        good = dtrain__channel_bind(group->socket, mates, count);
        pthread_mutex_unlock(&group->socket->hub->mutex);
    }
    dtrain__free(allocator, mates, bytes);
    return good ? DTRAIN_OK
                : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for the ranks that %s depends on", draft->call);
}

static dtrain_status dtrain__draft_on_channel(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain__hub *hub = draft->parent->socket->hub;
    dtrain__channel *channel = NULL;
    pthread_mutex_lock(&hub->mutex);
    dtrain_status status = dtrain__channel_create(&channel, hub, draft->id, draft->origins, draft->size, draft->rank);
    pthread_mutex_unlock(&hub->mutex);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__comm_on_channel(group, channel, &draft->parent->desc);
    if (status != DTRAIN_OK)
        dtrain__channel_destroy(channel);
    return status;
}

/* Makes this rank's end over the parent's transport. */
static dtrain_status dtrain__draft_place(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain_comm *parent = draft->parent;
    dtrain__board *board = parent->transport.board;
    dtrain_status status = DTRAIN_OK;
    if (parent->socket != NULL)
        return dtrain__draft_on_channel(draft, group);
    if (board == NULL && draft->size > 1)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "a transport of your own has no groups of its ranks, except of one; make one for each");
    status = board != NULL ? dtrain__board_attach(&board, board->family, draft->id, draft->origins, draft->size)
                           : dtrain__board_create(&board, 1, parent->desc.allocator);
    return status == DTRAIN_OK ? dtrain__comm_on_board(group, board, draft->rank, &parent->desc) : status;
}

static dtrain_status dtrain__draft_make(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain_status status = dtrain__service_share(draft->parent);
    if (status == DTRAIN_OK)
        status = dtrain__draft_place(draft, group);
    if (status != DTRAIN_OK)
        return status;
    if (draft->parent->desc.progress == DTRAIN_PROGRESS_POLL && draft->parent->service != NULL)
        dtrain__service_add(draft->parent->service, *group);
    (*group)->group = draft->id;
    (*group)->node_ranks = dtrain__draft_node_ranks(draft, *group);
    return DTRAIN_OK;
}

/* Makes this rank's end and hears how the others fared; one that could not undoes it for all. */
static dtrain_status dtrain__draft_settle(dtrain__draft *draft, dtrain_comm **group)
{
    dtrain_comm *parent = draft->parent;
    dtrain_status made = DTRAIN_OK, status;
    dtrain__error cause;
    uint64_t mine;
    if (draft->rank >= 0) {
        draft->id = dtrain__draft_name(draft);
        made = dtrain__draft_make(draft, group);
        if (made == DTRAIN_OK)
            made = dtrain__draft_bind(draft, *group);
    }
    cause = dtrain__thread_error;
    mine = (uint64_t)made;
    status = dtrain__draft_gather(draft, &mine, draft->states, 1);
    if (made != DTRAIN_OK)
        status = dtrain__fail(&parent->error, made, "%s on rank %d: %.560s", draft->call, parent->rank, cause.text);
    for (int rank = 0; status == DTRAIN_OK && rank < parent->size; rank++)
        if (draft->states[rank] != DTRAIN_OK)
            status = dtrain__fail(&parent->error, (dtrain_status)draft->states[rank],
                                  "%s on rank %d: rank %d could not make its end of a group (%s)", draft->call,
                                  parent->rank, rank, dtrain_status_name((dtrain_status)draft->states[rank]));
    if (status == DTRAIN_OK || *group == NULL)
        return status;
    cause = dtrain__thread_error;
    dtrain_comm_destroy(*group);
    *group = NULL;
    return dtrain__report(&cause);
}

/* Where the call can begin: there is a group and a place for the new one. */
static dtrain_status dtrain__draft_check(dtrain_comm *comm, dtrain_comm **group, const char *call)
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
static dtrain_status dtrain__split(dtrain_comm *comm, int color, int key, int bound, dtrain_comm **group,
                                   const char *call)
{
    dtrain__draft draft;
    dtrain_status status = dtrain__draft_check(comm, group, call);
    uint64_t mine = color < 0 ? DTRAIN__NO_SEAT : (uint64_t)color;
    if (status == DTRAIN_OK)
        status = dtrain__draft_begin(&draft, comm, call);
    if (status != DTRAIN_OK)
        return status;
    draft.bound = bound;
    status = dtrain__draft_meet(&draft, mine, key);
    for (int taken = 0; status == DTRAIN_OK && mine != DTRAIN__NO_SEAT; taken++) {
        /* the next in order of key and rank: the lowest key of those that are not in yet */
        int next = -1;
        for (int rank = 0; rank < comm->size; rank++)
            if (draft.seats[rank].color == mine && draft.states[rank] == 0 &&
                (next < 0 || draft.seats[rank].key < draft.seats[next].key))
                next = rank;
        if (next < 0)
            break;
        draft.states[next] = 1;
        dtrain__draft_add(&draft, next, (int)draft.seats[next].origin);
    }
    if (status == DTRAIN_OK)
        status = dtrain__draft_settle(&draft, group);
    dtrain__draft_end(&draft);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **group)
{
    return dtrain__split(comm, color, key, 0, group, "comm_split");
}

DTRAIN_API dtrain_status dtrain_comm_duplicate(dtrain_comm *comm, dtrain_comm **group)
{
    return dtrain__split(comm, 0, 0, 0, group, "comm_duplicate");
}

enum { DTRAIN__LIST_GOOD = 0, DTRAIN__LIST_NULL, DTRAIN__LIST_BAD, DTRAIN__LIST_TWICE };

/* What is wrong with a list of ranks, and with which of its entries. */
static int dtrain__subgroup_flaw(const dtrain_comm *comm, const int *ranks, int count, int *which)
{
    *which = 0;
    if (count < 0 || (ranks == NULL && count > 0))
        return DTRAIN__LIST_NULL;
    for (; *which < count; ++*which) {
        if (ranks[*which] < 0 || ranks[*which] >= comm->size)
            return DTRAIN__LIST_BAD;
        for (int i = 0; i < *which; i++)
            if (ranks[i] == ranks[*which])
                return DTRAIN__LIST_TWICE;
    }
    return DTRAIN__LIST_GOOD;
}

/* Compares what all ranks gave: a seat's color is the list's digest, its key the flaw and the length. */
static dtrain_status dtrain__subgroup_compare(dtrain__draft *draft)
{
    static const char *const flaws[] = {"", "no list", "a rank that is not in the group", "a rank twice"};
    dtrain_comm *comm = draft->parent;
    const dtrain__seat *first = &draft->seats[0];
    for (int rank = 0; rank < comm->size; rank++) {
        uint64_t flaw = (uint64_t)draft->seats[rank].key & 3;
        if (flaw != DTRAIN__LIST_GOOD)
            return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                                "%s on rank %d: rank %d gave %s; list each rank of 0 "
                                "to %d at most once",
                                draft->call, comm->rank, rank, flaws[flaw], comm->size - 1);
    }
    for (int rank = 1; rank < comm->size; rank++) {
        const dtrain__seat *other = &draft->seats[rank];
        if (other->color != first->color || other->key != first->key)
            return dtrain__fail(&comm->error, DTRAIN_ERR_MISMATCH,
                                "%s on rank %d: rank %d gave a list of %lld ranks, rank 0 another one of %lld; every "
                                "rank, listed or not, must give the same",
                                draft->call, comm->rank, rank, (long long)(other->key >> 2),
                                (long long)(first->key >> 2));
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_comm_subgroup(dtrain_comm *comm, const int *ranks, int count, dtrain_comm **group)
{
    dtrain__draft draft;
    unsigned char digest[32];
    int which, flaw;
    dtrain_status status = dtrain__draft_check(comm, group, "comm_subgroup");
    if (status == DTRAIN_OK)
        status = dtrain__draft_begin(&draft, comm, "comm_subgroup");
    if (status != DTRAIN_OK)
        return status;
    flaw = dtrain__subgroup_flaw(comm, ranks, count, &which);
    dtrain_sha256(ranks, flaw == DTRAIN__LIST_GOOD ? (size_t)count * sizeof *ranks : 0, digest);
    status = dtrain__draft_meet(&draft, dtrain__get_le(digest, 8), (int64_t)count * 4 + flaw);
    if (status == DTRAIN_OK)
        status = dtrain__subgroup_compare(&draft);
    if (status == DTRAIN_OK) {
        for (int i = 0; i < count; i++)
            dtrain__draft_add(&draft, ranks[i], (int)draft.seats[ranks[i]].origin);
        status = dtrain__draft_settle(&draft, group);
    }
    dtrain__draft_end(&draft);
    return status;
}

#endif
