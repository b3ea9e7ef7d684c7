/* ---- >>threads_plane ----
 * The control plane of ranks of one address space: what they must know of each other is in their group, guarded by
 * the mutex of its world where it takes several words. Votes are counted by whoever looks. */
#ifndef DTRAIN__THREADS_PLANE
#define DTRAIN__THREADS_PLANE
#include "threads.c"

static dtrain__threads_group *dtrain__threads_plane_of(void *self)
{
    return ((dtrain__threads_end *)self)->group;
}

static const dtrain__plane *dtrain__threads_plane_table(void);

static void dtrain__threads_plane_end(dtrain__end *end, dtrain__threads_group *group, int rank)
{
    memset(end, 0, sizeof *end);
    dtrain__threads_transport(&end->transport, group, rank);
    end->plane = dtrain__threads_plane_table();
    end->origin = &group->world->origin;
    end->members = &group->shared.members;
    end->shared = &group->shared;
    end->allocator = group->allocator;
}

/* Makes a new world, and the end of its rank 0. */
static dtrain_status dtrain__threads_plane_create(dtrain__end *first, int ranks, dtrain_allocator *allocator)
{
    dtrain__threads_group *group = NULL;
    dtrain_status status = dtrain__threads_create(&group, ranks, allocator);
    if (status == DTRAIN_OK)
        dtrain__threads_plane_end(first, group, 0);
    return status;
}

/* The end of another rank of that world. */
static void dtrain__threads_plane_peer(const dtrain__end *first, int rank, dtrain__end *end)
{
    dtrain__threads_plane_end(end, dtrain__threads_plane_of(first->transport.self), rank);
}

static dtrain_status dtrain__threads_plane_group(void *self, const dtrain__group_desc *desc, dtrain__end *end)
{
    dtrain__threads_group *group = NULL;
    dtrain_status status =
        dtrain__threads_attach(&group, dtrain__threads_plane_of(self)->world, desc->id, desc->worlds, desc->size);
    if (status == DTRAIN_OK)
        dtrain__threads_plane_end(end, group, desc->rank);
    return status;
}

static int dtrain__threads_plane_world(void *self, int rank)
{
    return dtrain__threads_plane_of(self)->ranks[rank].origin;
}

static int dtrain__threads_plane_bound(void *self, int *worlds)
{
    const dtrain__threads_group *group = dtrain__threads_plane_of(self);
    if (worlds != NULL && group->bound_count > 0)
        memcpy(worlds, group->bound, (size_t)group->bound_count * sizeof *worlds);
    return group->bound_count;
}

static int dtrain__threads_plane_bind(void *self, const int *worlds, int count)
{
    return dtrain__threads_bind(dtrain__threads_plane_of(self), worlds, count);
}

static void dtrain__threads_plane_lost(void *self, int rank)
{
    dtrain__threads_lost(dtrain__threads_plane_of(self), rank);
}

/* Looks whether all that have not left have voted, and decides; the caller holds the world's mutex. */
static void dtrain__threads_plane_count(dtrain__threads_group *group, uint64_t number)
{
    const dtrain__membership *members = &group->shared.members;
    uint64_t flags = UINT64_MAX;
    int kind = 0, mixed = 0;
    for (int rank = 0; rank < members->size; rank++) {
        const dtrain__threads_rank *voter = &group->ranks[rank];
        if (dtrain__membership_left(members, rank))
            continue;
        if (voter->voted < number)
            return;
        mixed |= kind != 0 && kind != voter->vote_kind;
        kind = voter->vote_kind;
        flags &= voter->vote_flags;
    }
    for (int rank = 0; rank < members->size; rank++)
        if (!dtrain__membership_left(members, rank))
            group->ranks[rank].goes_on = number;
    group->decided = number;
    group->decided_flags = flags;
    group->decided_mixed = mixed;
    group->decided_id = dtrain__plane_group_id(dtrain__origin_serial(&group->world->origin), 0);
    dtrain__bell_ring(&group->shared.bell);
}

typedef struct dtrain__threads_vote {
    dtrain__threads_group *group;
    dtrain__agreement *agreement;
} dtrain__threads_vote;

/* Whether there is a decision; then takes it over. */
static int dtrain__threads_plane_decided(void *pointer)
{
    dtrain__threads_group *group = ((dtrain__threads_vote *)pointer)->group;
    dtrain__agreement *agreement = ((dtrain__threads_vote *)pointer)->agreement;
    int done;
    pthread_mutex_lock(&group->world->mutex);
    if (group->decided < agreement->number)
        dtrain__threads_plane_count(group, agreement->number);
    done = group->decided >= agreement->number;
    agreement->status = group->decided_mixed ? DTRAIN_ERR_MISMATCH : DTRAIN_OK;
    agreement->id = group->decided_id;
    agreement->awaited = -1;
    if (done)
        agreement->flags = group->decided_flags;
    for (int rank = 0; rank < group->shared.members.size; rank++) {
        agreement->goes_on[rank] = done && group->ranks[rank].goes_on == agreement->number;
        if (!done && agreement->awaited < 0 && group->ranks[rank].voted < agreement->number &&
            !dtrain__membership_left(&group->shared.members, rank))
            agreement->awaited = rank;
    }
    pthread_mutex_unlock(&group->world->mutex);
    return done;
}

static int dtrain__threads_plane_agree(void *self, dtrain__agreement *agreement, int64_t deadline_ns)
{
    dtrain__threads_vote vote = {dtrain__threads_plane_of(self), agreement};
    dtrain__threads_group *group = vote.group;
    dtrain__threads_rank *mine = &group->ranks[((dtrain__threads_end *)self)->rank];
    pthread_mutex_lock(&group->world->mutex);
    mine->voted = agreement->number;
    mine->vote_kind = agreement->kind;
    mine->vote_flags = agreement->flags;
    pthread_mutex_unlock(&group->world->mutex);
    dtrain__bell_ring(&group->shared.bell);
    for (unsigned turn = 0; !dtrain__threads_plane_decided(&vote); turn++) {
        if (dtrain__os_now_ns() >= deadline_ns)
            return 0;
        dtrain__bell_wait(&group->shared.bell, turn, deadline_ns, dtrain__threads_plane_decided, &vote);
    }
    return 1;
}

typedef struct dtrain__threads_look {
    dtrain__threads_group *group;
    dtrain__store_call *call;
} dtrain__threads_look;

static int dtrain__threads_plane_found(void *pointer)
{
    dtrain__threads_group *group = ((dtrain__threads_look *)pointer)->group;
    dtrain__store_call *call = ((dtrain__threads_look *)pointer)->call;
    pthread_mutex_lock(&group->world->mutex);
    dtrain__entry *entry = *dtrain__store_place(&group->world->store, call->key, strlen(call->key));
    if (entry != NULL)
        dtrain__store_copy(call, dtrain__entry_value(entry), entry->bytes);
    pthread_mutex_unlock(&group->world->mutex);
    return entry != NULL || dtrain__membership_broken(&group->shared.members);
}

static dtrain_status dtrain__threads_plane_store(void *self, dtrain__store_call *call, int64_t deadline_ns)
{
    dtrain__threads_look look = {dtrain__threads_plane_of(self), call};
    dtrain__threads_group *group = look.group;
    dtrain_status status;
    if (call->what == DTRAIN__STORE_SET) {
        pthread_mutex_lock(&group->world->mutex);
        status = dtrain__store_put(&group->world->store, group->allocator, call->key, strlen(call->key), call->value,
                                   call->capacity);
        for (dtrain__threads_group *other = group->world->groups; other != NULL; other = other->next)
            dtrain__bell_ring(&other->shared.bell);
        pthread_mutex_unlock(&group->world->mutex);
        return status;
    }
    *call->bytes = DTRAIN_STORE_ABSENT;
    for (unsigned turn = 0; !dtrain__threads_plane_found(&look) && call->what == DTRAIN__STORE_WAIT; turn++) {
        if (dtrain__os_now_ns() >= deadline_ns)
            return dtrain__fail(call->error, DTRAIN_ERR_TIMEOUT, "store_wait on rank %d: nobody has set \"%s\"",
                                ((dtrain__threads_end *)self)->rank, call->key);
        dtrain__bell_wait(&group->shared.bell, turn, deadline_ns, dtrain__threads_plane_found, &look);
    }
    if (*call->bytes == DTRAIN_STORE_ABSENT && call->what == DTRAIN__STORE_WAIT)
        return dtrain__report(dtrain__membership_cause(&group->shared.members));
    return DTRAIN_OK;
}

/* The group keeps the record. */
static void dtrain__threads_plane_publish(void *self, dtrain__tell tell, void *record)
{
    dtrain__threads_rank *mine = &dtrain__threads_plane_of(self)->ranks[((dtrain__threads_end *)self)->rank];
    if (tell == NULL)
        return;
    mine->tell = tell;
    __atomic_store_n(&mine->record, record, __ATOMIC_RELEASE);
}

static size_t dtrain__threads_plane_last(void *self, int rank, int64_t after_ns, void *out, size_t capacity,
                                         int64_t *age_ns)
{
    const dtrain__threads_rank *other = &dtrain__threads_plane_of(self)->ranks[rank];
    void *record = __atomic_load_n(&other->record, __ATOMIC_ACQUIRE);
    int awaits;
    (void)after_ns;
    *age_ns = 0;
    return record != NULL ? other->tell(record, (unsigned char *)out, capacity, &awaits) : 0;
}

static void dtrain__threads_plane_leaving(void *self, int forked, const dtrain__error *why, uint64_t calls)
{
    int rank = ((dtrain__threads_end *)self)->rank;
    dtrain__threads_group *group = dtrain__threads_plane_of(self);
    dtrain__departure *mine = &group->shared.members.ranks[rank];
    (void)forked;
    if (dtrain__membership_left(&group->shared.members, rank))
        return;
    if (why != NULL && why->text[0] != 0) {
        group->ranks[rank].why = *why;
        mine->why = group->ranks[rank].why.text;
    }
    mine->calls = calls;
}

static const dtrain__plane *dtrain__threads_plane_table(void)
{
    static const dtrain__plane table = {
        1,
        1,
        0,
        dtrain__threads_plane_group,
        dtrain__threads_plane_world,
        dtrain__plane_host,
        dtrain__plane_node_ranks,
        dtrain__threads_plane_bound,
        dtrain__threads_plane_bind,
        dtrain__plane_follow,
        dtrain__plane_form,
        dtrain__threads_plane_lost,
        dtrain__plane_skipped,
        dtrain__threads_plane_agree,
        dtrain__threads_plane_store,
        dtrain__threads_plane_publish,
        dtrain__threads_plane_last,
        dtrain__plane_suspect,
        dtrain__plane_rest,
        dtrain__threads_plane_leaving,
    };
    return &table;
}

#endif
