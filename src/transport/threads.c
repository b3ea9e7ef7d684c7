/* ---- >>threads ----
 * Ranks of one address space. A group is what its ranks share, and lazily one ring of bytes for each ordered pair that
 * exchanges messages. All waiting is on the group's one bell. The groups that come of one world share an allocator, a
 * store and a service thread, which live as long as one of these groups. */
#ifndef DTRAIN__THREADS
#define DTRAIN__THREADS
#include "../base/base.h"
#include "../base/os.c"
#include "../base/status.c"
#include "../base/memory.c"
#include "../base/worker.c"
#include "../control/plane.c"

#define DTRAIN__THREADS_RING_BYTES ((size_t)1 << 16)

/* What is known of one rank; guarded by the world's mutex, where it says no more. */
typedef struct dtrain__threads_rank {
    int origin;    /* the rank in the world's first group */
    int vote_kind; /* of its last vote */
    uint64_t voted, vote_flags;
    uint64_t goes_on;  /* number of the last decision that this rank is part of */
    dtrain__error why; /* it left; written by itself, readable once it has */
    dtrain__tell tell; /* readable once there is a record */
    void *record;      /* what it does, which peers read until the group is freed */
} dtrain__threads_rank;

typedef struct dtrain__threads_ring {
    uint64_t written;
    char pad[DTRAIN__CACHE_LINE - 8];
    uint64_t read;
    char pad2[DTRAIN__CACHE_LINE - 8];
    unsigned char bytes[DTRAIN__THREADS_RING_BYTES];
} dtrain__threads_ring;

typedef struct dtrain__threads_group dtrain__threads_group;

typedef struct dtrain__threads_end {
    dtrain__threads_group *group;
    int rank;
} dtrain__threads_end;

typedef struct dtrain__threads_world {
    dtrain__origin origin;
    pthread_mutex_t mutex; /* guards groups, their ends, and store */
    dtrain__threads_group *groups;
    dtrain__bell bell; /* the service thread's; rung with that of every group */
    dtrain_allocator own;
    dtrain_allocator *allocator;
    dtrain__store store;
} dtrain__threads_world;

struct dtrain__threads_group {
    dtrain__shared shared;
    int ends;    /* ranks that have come and not left */
    uint64_t id; /* its name in the world; the first one's is 0 */
    dtrain__threads_world *world;
    dtrain__threads_group *next;
    dtrain_allocator *allocator; /* the world's */
    int *bound; /* ranks of the world whose end with an error breaks it, members or not; NULL: none but members */
    int bound_count;
    dtrain__threads_rank *ranks;
    dtrain__threads_ring **rings; /* size x size, [from * size + to]; made by the sender */
    dtrain__threads_end *rank_ends;
    uint64_t decided, decided_flags, decided_id; /* what its ranks last agreed on; guarded by the world's mutex */
    int decided_mixed;                           /* they called different things */
};

static void dtrain__threads_break(dtrain__threads_group *group, const dtrain__error *cause)
{
    dtrain__membership_break(&group->shared.members, cause);
    dtrain__bell_ring(&group->shared.bell);
}

static dtrain__threads_ring *dtrain__threads_ring_between(dtrain__threads_group *group, int from, int to)
{
    size_t index = (size_t)from * (size_t)group->shared.members.size + (size_t)to;
    return __atomic_load_n(&group->rings[index], __ATOMIC_ACQUIRE);
}

static size_t dtrain__threads_put(dtrain__threads_ring *ring, const unsigned char *data, size_t bytes)
{
    uint64_t written = ring->written, read = __atomic_load_n(&ring->read, __ATOMIC_SEQ_CST);
    size_t room = DTRAIN__THREADS_RING_BYTES - (size_t)(written - read), n = bytes < room ? bytes : room;
    size_t at = (size_t)written % DTRAIN__THREADS_RING_BYTES, first = DTRAIN__THREADS_RING_BYTES - at;
    if (n == 0)
        return 0;
    first = first < n ? first : n;
    memcpy(ring->bytes + at, data, first);
    memcpy(ring->bytes, data + first, n - first);
    __atomic_store_n(&ring->written, written + n, __ATOMIC_SEQ_CST);
    return n;
}

static size_t dtrain__threads_take(dtrain__threads_ring *ring, unsigned char *data, size_t bytes)
{
    uint64_t read = ring->read, written = __atomic_load_n(&ring->written, __ATOMIC_SEQ_CST);
    size_t held = (size_t)(written - read), n = bytes < held ? bytes : held;
    size_t at = (size_t)read % DTRAIN__THREADS_RING_BYTES, first = DTRAIN__THREADS_RING_BYTES - at;
    if (n == 0)
        return 0;
    first = first < n ? first : n;
    memcpy(data, ring->bytes + at, first);
    memcpy(data + first, ring->bytes, n - first);
    __atomic_store_n(&ring->read, read + n, __ATOMIC_SEQ_CST);
    return n;
}

/* Says that `peer` has left, which an operation needs; breaks the group if it did so with an error. */
static dtrain_status dtrain__threads_lost(dtrain__threads_group *group, int peer)
{
    dtrain__error lost;
    if (dtrain__membership_lost(&group->shared.members, peer, &lost))
        dtrain__threads_break(group, &lost);
    return lost.status;
}

typedef struct dtrain__threads_wait {
    dtrain__threads_group *group;
    int from, to, peer;
    int to_write;
} dtrain__threads_wait;

static int dtrain__threads_ready(void *pointer)
{
    dtrain__threads_wait *wait = (dtrain__threads_wait *)pointer;
    dtrain__threads_ring *ring = dtrain__threads_ring_between(wait->group, wait->from, wait->to);
    const dtrain__membership *members = &wait->group->shared.members;
    if (dtrain__membership_broken(members) || dtrain__membership_left(members, wait->peer))
        return 1;
    if (ring == NULL)
        return 0;
    uint64_t held = __atomic_load_n(&ring->written, __ATOMIC_SEQ_CST) - __atomic_load_n(&ring->read, __ATOMIC_SEQ_CST);
    return wait->to_write ? held < DTRAIN__THREADS_RING_BYTES : held > 0;
}

/* Moves bytes through one ring until all went, the deadline passed, or the peer left. What a peer wrote before
 * it left is still received. */
static dtrain_status dtrain__threads_move(dtrain__threads_wait *wait, unsigned char *out, const unsigned char *in,
                                          size_t bytes, int64_t deadline_ns, size_t *moved)
{
    dtrain__threads_group *group = wait->group;
    *moved = 0;
    for (unsigned turn = 0;; turn++) {
        int left = dtrain__membership_left(&group->shared.members, wait->peer);
        dtrain__threads_ring *ring = dtrain__threads_ring_between(group, wait->from, wait->to);
        size_t n = 0;
        if (ring != NULL && !(wait->to_write && left))
            n = wait->to_write ? dtrain__threads_put(ring, in + *moved, bytes - *moved)
                               : dtrain__threads_take(ring, out + *moved, bytes - *moved);
        *moved += n;
        if (n > 0) {
            dtrain__bell_ring(&group->shared.bell);
            turn = 0;
        }
        if (*moved == bytes)
            return DTRAIN_OK;
        if (dtrain__membership_broken(&group->shared.members))
            return dtrain__report(dtrain__membership_cause(&group->shared.members));
        if (left && n == 0)
            return dtrain__threads_lost(group, wait->peer);
        if (n == 0 && (deadline_ns == 0 || dtrain__os_now_ns() >= deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
        dtrain__bell_wait(&group->shared.bell, turn, deadline_ns, dtrain__threads_ready, wait);
    }
}

static dtrain_status dtrain__threads_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__threads_end *end = (dtrain__threads_end *)self;
    dtrain__threads_group *group = end->group;
    dtrain__threads_wait wait = {group, end->rank, peer, peer, 1};
    size_t index = (size_t)end->rank * (size_t)group->shared.members.size + (size_t)peer;
    *moved = 0;
    if (group->rings[index] == NULL) {
        dtrain__threads_ring *ring = (dtrain__threads_ring *)dtrain__alloc(group->allocator, sizeof *ring);
        if (ring == NULL)
            return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes of messages from rank %d to rank %d",
                                sizeof *ring, end->rank, peer);
        __atomic_store_n(&group->rings[index], ring, __ATOMIC_RELEASE);
    }
    return dtrain__threads_move(&wait, NULL, (const unsigned char *)data, bytes, deadline_ns, moved);
}

static dtrain_status dtrain__threads_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__threads_end *end = (dtrain__threads_end *)self;
    dtrain__threads_wait wait = {end->group, peer, end->rank, peer, 0};
    return dtrain__threads_move(&wait, (unsigned char *)data, NULL, bytes, deadline_ns, moved);
}

static void dtrain__threads_free(dtrain__threads_group *group)
{
    size_t size = (size_t)group->shared.members.size;
    dtrain_allocator *allocator = group->allocator;
    if (group->rings != NULL)
        for (size_t i = 0; i < size * size; i++)
            dtrain__free(allocator, group->rings[i]);
    for (size_t rank = 0; group->ranks != NULL && rank < size; rank++)
        dtrain__free(allocator, group->ranks[rank].record);
    dtrain__free(allocator, group->rings);
    dtrain__free(allocator, group->bound);
    dtrain__free(allocator, group->shared.slots);
    dtrain__free(allocator, group->shared.members.ranks);
    dtrain__free(allocator, group->ranks);
    dtrain__free(allocator, group->rank_ends);
    dtrain__free(allocator, group);
}

static void dtrain__threads_world_free(dtrain__threads_world *world)
{
    dtrain__origin_stop(&world->origin);
    dtrain__store_free(&world->store, world->allocator);
    pthread_mutex_destroy(&world->mutex);
    pthread_mutex_destroy(&world->origin.mutex);
    dtrain__free(world->allocator, world);
}

/* A rank's end leaves, or with a reason the thread behind it has given up; the caller holds the world's mutex. */
static void dtrain__threads_mark(dtrain__threads_group *group, int rank, const dtrain__error *why)
{
    dtrain__membership *members = &group->shared.members;
    if (!dtrain__membership_left(members, rank)) {
        if (why != NULL) {
            group->ranks[rank].why = *why;
            members->ranks[rank].why = group->ranks[rank].why.text;
            members->ranks[rank].calls = UINT64_MAX; /* who needs it finds out */
        }
        dtrain__membership_leave(members, rank);
    }
    dtrain__bell_ring(&group->shared.bell);
}

/* The thread behind a rank has given up without which the group's ranks cannot go on. */
static void dtrain__threads_lost_bound(dtrain__threads_group *group, int origin, const dtrain__error *why)
{
    dtrain__error lost, kept = dtrain__thread_error;
    dtrain__fail(&lost, DTRAIN_ERR_PEER_LOST, "rank %d of the world, of another group of this mesh, has left%s%.400s",
                 origin, why != NULL && why->text[0] != 0 ? ": " : "", why != NULL ? why->text : "");
    dtrain__thread_error = kept;
    dtrain__threads_break(group, &lost);
}

/* The rank's thread ends with an error: nobody shall wait for it in any group. */
static void dtrain__threads_give_up(void *self, const dtrain__error *why)
{
    dtrain__threads_group *of = ((dtrain__threads_end *)self)->group;
    dtrain__threads_world *world = of->world;
    int origin = of->ranks[((dtrain__threads_end *)self)->rank].origin;
    pthread_mutex_lock(&world->mutex);
    for (dtrain__threads_group *group = world->groups; group != NULL; group = group->next) {
        int member = 0;
        for (int other = 0; group != of && other < group->shared.members.size; other++)
            if (group->ranks[other].origin == origin) {
                dtrain__threads_mark(group, other, why);
                member = 1;
            }
        for (int i = 0; !member && i < group->bound_count; i++)
            if (group->bound[i] == origin)
                dtrain__threads_lost_bound(group, origin, why);
    }
    pthread_mutex_unlock(&world->mutex);
}

/* The rank's end leaves; the last of a group frees it, the last of a world the world. */
static void dtrain__threads_detach(dtrain__threads_group *group, int rank)
{
    dtrain__threads_world *world = group->world;
    dtrain__threads_group **at = &world->groups;
    int ends, last;
    pthread_mutex_lock(&world->mutex);
    dtrain__threads_mark(group, rank, NULL);
    ends = --group->ends;
    while (ends == 0 && *at != group)
        at = &(*at)->next;
    if (ends == 0)
        *at = group->next;
    last = world->groups == NULL;
    pthread_mutex_unlock(&world->mutex);
    if (ends == 0)
        dtrain__threads_free(group);
    if (last)
        dtrain__threads_world_free(world);
}

static void dtrain__threads_destroy(void *self)
{
    dtrain__threads_end *end = (dtrain__threads_end *)self;
    dtrain__threads_detach(end->group, end->rank);
}

/* A world without groups, for dtrain__threads_attach. */
static dtrain__threads_world *dtrain__threads_world_create(dtrain_allocator *allocator)
{
    dtrain__threads_world *world = (dtrain__threads_world *)dtrain__memory_owner(
        allocator, sizeof *world, offsetof(dtrain__threads_world, own), &allocator);
    if (world == NULL)
        return NULL;
    world->allocator = allocator;
    world->origin.bell = &world->bell;
    pthread_mutex_init(&world->mutex, NULL);
    pthread_mutex_init(&world->origin.mutex, NULL);
    return world;
}

/* Adds a group to the world; the caller holds its mutex. NULL when there is no memory. */
static dtrain__threads_group *dtrain__threads_make(dtrain__threads_world *world, uint64_t id, const int *origins,
                                                   int size)
{
    size_t ranks = (size_t)size;
    dtrain__threads_group *group = (dtrain__threads_group *)dtrain__alloc(world->allocator, sizeof *group);
    if (group == NULL)
        return NULL;
    group->world = world;
    group->allocator = world->allocator;
    group->id = id;
    group->shared.members.size = size;
    group->shared.bell.spins =
        size <= dtrain__os_processors() ? 100 : 0; /* some 5 us; other programs want to run too */
    group->shared.bell.also = &world->bell;
    group->shared.slots = (dtrain__slot *)dtrain__alloc(group->allocator, ranks * sizeof(dtrain__slot));
    group->shared.members.ranks =
        (dtrain__departure *)dtrain__alloc(group->allocator, ranks * sizeof(dtrain__departure));
    group->ranks = (dtrain__threads_rank *)dtrain__alloc(group->allocator, ranks * sizeof(dtrain__threads_rank));
    group->rings =
        (dtrain__threads_ring **)dtrain__alloc(group->allocator, ranks * ranks * sizeof(dtrain__threads_ring *));
    group->rank_ends = (dtrain__threads_end *)dtrain__alloc(group->allocator, ranks * sizeof(dtrain__threads_end));
    if (group->shared.slots == NULL || group->shared.members.ranks == NULL || group->ranks == NULL ||
        group->rings == NULL || group->rank_ends == NULL) {
        dtrain__threads_free(group);
        return NULL;
    }
    for (int rank = 0; rank < size; rank++)
        group->ranks[rank].origin = origins != NULL ? origins[rank] : rank;
    group->next = world->groups;
    world->groups = group;
    return group;
}

/* Comes to the group of that name, which the first to come makes; undone by dtrain__threads_detach. */
static dtrain_status dtrain__threads_attach(dtrain__threads_group **out, dtrain__threads_world *world, uint64_t id,
                                            const int *origins, int size)
{
    pthread_mutex_lock(&world->mutex);
    dtrain__threads_group *group = world->groups;
    while (group != NULL && group->id != id)
        group = group->next;
    if (group == NULL)
        group = dtrain__threads_make(world, id, origins, size);
    if (group != NULL)
        group->ends++;
    pthread_mutex_unlock(&world->mutex);
    *out = group;
    return group != NULL ? DTRAIN_OK : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", size);
}

/* Breaks the group whenever one of these ranks of the world ends with an error; 0: no memory. */
static int dtrain__threads_bind(dtrain__threads_group *group, const int *origins, int count)
{
    int bound;
    pthread_mutex_lock(&group->world->mutex);
    if (group->bound == NULL)
        group->bound = (int *)dtrain__alloc(group->allocator, (size_t)count * sizeof(int));
    bound = group->bound != NULL;
    if (bound && group->bound_count == 0) {
        memcpy(group->bound, origins, (size_t)count * sizeof(int));
        group->bound_count = count;
    }
    pthread_mutex_unlock(&group->world->mutex);
    return bound;
}

/* Makes a group to which `size` ranks have come, the first of its world. The transport of each is had from
 * dtrain__threads_transport. */
static dtrain_status dtrain__threads_create(dtrain__threads_group **out, int size, dtrain_allocator *allocator)
{
    dtrain__threads_world *world = dtrain__threads_world_create(allocator);
    dtrain_status status = DTRAIN_ERR_MEMORY;
    if (world == NULL)
        return dtrain__fail(NULL, status, "no memory for a group of %d ranks", size);
    status = dtrain__threads_attach(out, world, 0, NULL, size);
    if (status == DTRAIN_OK)
        (*out)->ends = size;
    else
        dtrain__threads_world_free(world);
    return status;
}

static void dtrain__threads_fail(void *self, dtrain_status why, const char *text)
{
    dtrain__error cause;
    cause.status = why;
    snprintf(cause.text, sizeof cause.text, "%s", text);
    dtrain__threads_break(((dtrain__threads_end *)self)->group, &cause);
}

static void dtrain__threads_transport(dtrain_transport *transport, dtrain__threads_group *group, int rank)
{
    memset(transport, 0, sizeof *transport);
    group->rank_ends[rank].group = group;
    group->rank_ends[rank].rank = rank;
    transport->self = &group->rank_ends[rank];
    transport->rank = rank;
    transport->size = group->shared.members.size;
    transport->send = dtrain__threads_send;
    transport->recv = dtrain__threads_recv;
    transport->destroy = dtrain__threads_destroy;
    transport->fail = dtrain__threads_fail;
}

#endif
