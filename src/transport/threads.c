/* ---- >>threads ----
 * Ranks in one address space. A group has a state that its ranks share, and a ring of bytes for each ordered pair of
 * ranks. The sender makes the ring at its first message. All waiting is on the group's bell. The groups of one world
 * share a council, the mutex that guards it, an allocator and a service thread, which live until the last group ends.
 *
 * Ranks read each other's buffers in place. Each has one slot, where it posts its next call. The collectives are those
 * of >>fused. */
#ifndef DTRAIN__THREADS
#define DTRAIN__THREADS
#include "../base/worker.c"
#include "../control/consent.c"
#include "shared.c"
DTRAIN__FAST_BEGIN

/* ---- groups ---- */

typedef struct dtrain__threads_group dtrain__threads_group;

/* One rank's end of a group. */
typedef struct dtrain__threads_rank {
    dtrain__seat seat; /* first */
    dtrain__threads_group *group;
    dtrain__tell tell; /* peers may read it once record is set */
    void *record;      /* says what the rank does; peers read it until the group is freed */
} dtrain__threads_rank;

typedef struct dtrain__threads_world {
    dtrain__origin origin;
    dtrain__os_mutex mutex; /* guards the council and each group's `ends` */
    dtrain__council council;
    dtrain__bell bell; /* the service thread's; the bell of every group rings it too */
    dtrain_allocator own, *allocator;
    int polls; /* its ranks have progress by poll */
} dtrain__threads_world;

struct dtrain__threads_group {
    dtrain__shared shared;
    dtrain__membership members;
    int ends; /* how many ranks have joined and not left */
    dtrain__threads_world *world;
    dtrain__threads_rank *ranks;
    dtrain__ring ***rings; /* [from][to]; the sender makes its row, and each ring. Its bytes follow each */
};

/* The bytes of each ring. */
static size_t dtrain__threads_room(const dtrain__threads_group *group)
{
    return dtrain__ring_bytes(group->members.size, group->world->polls);
}

/* ---- messages ---- */

/* Returns NULL if the sender has sent nothing yet. */
static dtrain__ring *dtrain__threads_ring(const dtrain__threads_group *group, int from, int to)
{
    dtrain__ring **row = DTRAIN__ATOMIC_LOAD(&group->rings[from], ACQUIRE);
    return row != NULL ? DTRAIN__ATOMIC_LOAD(&row[to], ACQUIRE) : NULL;
}

typedef struct dtrain__threads_way {
    dtrain__threads_rank *mine;
    int peer, sending;
} dtrain__threads_way;

static dtrain__ring *dtrain__threads_ring_of(const dtrain__threads_way *way)
{
    int rank = way->mine->seat.rank;
    return dtrain__threads_ring(way->mine->group, way->sending ? rank : way->peer, way->sending ? way->peer : rank);
}

static int dtrain__threads_ready(void *pointer)
{
    const dtrain__threads_way *way = (dtrain__threads_way *)pointer;
    dtrain__ring *ring = dtrain__threads_ring_of(way);
    const dtrain__membership *members = way->mine->seat.members;
    if (dtrain__membership_broken(members) || dtrain__membership_left(members, way->peer))
        return 1;
    if (ring == NULL)
        return 0;
    uint64_t held = dtrain__ring_held(ring);
    return way->sending ? held < dtrain__threads_room(way->mine->group) : held > 0;
}

/* Moves bytes through one ring until all have moved, the deadline has passed, or the peer has left. Bytes that the peer
 * wrote before it left are still received. */
static dtrain_status dtrain__threads_move(dtrain__threads_way *way, unsigned char *data, size_t bytes,
                                          int64_t deadline_ns, size_t *moved)
{
    dtrain__seat *seat = &way->mine->seat;
    dtrain__bell *bell = &way->mine->group->shared.bell;
    *moved = 0;
    for (unsigned turn = 0;; turn++) {
        int left = dtrain__membership_left(seat->members, way->peer);
        dtrain__ring *ring = dtrain__threads_ring_of(way);
        size_t n = 0;
        if (ring != NULL && !(way->sending && left))
            n = dtrain__ring_move(ring, (unsigned char *)(ring + 1), dtrain__threads_room(way->mine->group),
                                  way->sending, data + *moved, bytes - *moved);
        *moved += n;
        if (n > 0) {
            dtrain__bell_ring(bell);
            turn = 0;
        }
        if (*moved == bytes)
            return DTRAIN_OK;
        if (dtrain__membership_broken(seat->members) || (left && n == 0))
            return dtrain__seat_needed(seat, way->peer);
        if (n == 0 && (deadline_ns == 0 || dtrain__os_now_ns() >= deadline_ns))
            return DTRAIN_ERR_TIMEOUT;
        dtrain__bell_wait(bell, turn, deadline_ns, dtrain__threads_ready, way);
    }
}

/* Makes the ring to a peer. Returns 0 if there is no memory. */
static int dtrain__threads_ring_make(dtrain__threads_rank *mine, int peer)
{
    dtrain__threads_group *group = mine->group;
    dtrain_allocator *allocator = group->world->allocator;
    dtrain__ring **row = group->rings[mine->seat.rank];
    if (row == NULL) {
        row = (dtrain__ring **)dtrain__alloc(allocator, (size_t)mine->seat.size * sizeof(dtrain__ring *));
        if (row == NULL)
            return 0;
        DTRAIN__ATOMIC_STORE(&group->rings[mine->seat.rank], row, RELEASE);
    }
    dtrain__ring *ring = (dtrain__ring *)dtrain__alloc(allocator, sizeof *ring + dtrain__threads_room(group));
    if (ring != NULL)
        DTRAIN__ATOMIC_STORE(&row[peer], ring, RELEASE);
    return ring != NULL;
}

static dtrain_status dtrain__threads_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__threads_rank *mine = (dtrain__threads_rank *)self;
    dtrain__threads_way way = {mine, peer, 1};
    unsigned char *from;
    *moved = 0;
    memcpy(&from, &data, sizeof data); /* casts const away; sending only reads */
    if (dtrain__threads_ring_of(&way) == NULL && !dtrain__threads_ring_make(mine, peer))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for %zu bytes of messages from rank %d to rank %d",
                            dtrain__threads_room(mine->group), mine->seat.rank, peer);
    return dtrain__threads_move(&way, from, bytes, deadline_ns, moved);
}

static dtrain_status dtrain__threads_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                          size_t *moved)
{
    dtrain__threads_rank *mine = (dtrain__threads_rank *)self;
    dtrain__threads_way way = {mine, peer, 0};
    return dtrain__threads_move(&way, (unsigned char *)data, bytes, deadline_ns, moved);
}

/* ---- the council: threads share it, so it sends no messages ---- */

static void dtrain__threads_tell(void *self)
{
    dtrain__threads_world *world = (dtrain__threads_world *)self;
    DTRAIN__ATOMIC_ADD(&world->council.news, 1, SEQ_CST);
    for (dtrain__seat *seat = world->council.seats; seat != NULL; seat = seat->next)
        dtrain__bell_ring(&((dtrain__threads_rank *)(void *)seat)->group->shared.bell);
}

static int dtrain__threads_gone(void *self, int rank)
{
    (void)self, (void)rank;
    return DTRAIN__PRESENT;
}

typedef struct dtrain__threads_look {
    const dtrain__council *council;
    uint64_t seen;
} dtrain__threads_look;

static int dtrain__threads_news(void *pointer)
{
    const dtrain__threads_look *look = (const dtrain__threads_look *)pointer;
    return DTRAIN__ATOMIC_LOAD(&look->council->news, SEQ_CST) != look->seen;
}

static void dtrain__threads_wait(dtrain__seat *seat, unsigned turn, int64_t until_ns, uint64_t seen)
{
    dtrain__threads_look look = {seat->council, seen};
    dtrain__bell_wait(&((dtrain__threads_rank *)(void *)seat)->group->shared.bell, turn, until_ns, dtrain__threads_news,
                      &look);
}

/* ---- groups come and go ---- */

static void dtrain__threads_free(dtrain__threads_group *group)
{
    size_t size = (size_t)group->members.size;
    dtrain_allocator *allocator = group->world->allocator;
    for (size_t from = 0; group->rings != NULL && from < size; from++) {
        for (size_t to = 0; group->rings[from] != NULL && to < size; to++)
            dtrain__free(allocator, group->rings[from][to]);
        dtrain__free(allocator, group->rings[from]);
    }
    for (size_t rank = 0; group->ranks != NULL && rank < size; rank++)
        dtrain__free(allocator, group->ranks[rank].record);
    dtrain__membership_free(&group->members, allocator);
    dtrain__free(allocator, group->rings);
    dtrain__free(allocator, group->shared.slots);
    dtrain__free(allocator, group->ranks);
    dtrain__free(allocator, group);
}

static void dtrain__threads_world_free(dtrain__threads_world *world)
{
    dtrain__origin_stop(&world->origin);
    dtrain__council_free(&world->council);
    dtrain__os_mutex_free(&world->mutex);
    dtrain__os_mutex_free(&world->origin.mutex);
    dtrain__free(world->allocator, world);
}

/* Marks a rank's end as left. why: the reason, may be empty. The caller holds the world's mutex. */
static void dtrain__threads_mark(dtrain__seat *seat, int rank, const char *why, uint64_t calls)
{
    dtrain__seat_left(seat, rank, why, calls);
    dtrain__council_left(seat->council, seat->id, dtrain__seat_world(seat, rank));
}

static void dtrain__threads_leave(void *self, const char *why)
{
    dtrain__seat *seat = (dtrain__seat *)self;
    if (seat->forked)
        return;
    dtrain__seat_lock(seat, 1);
    dtrain__threads_mark(seat, seat->rank, why, seat->calls);
    dtrain__seat_lock(seat, 0);
}

/* The rank's thread ends with an error. Marks it as left in its other groups, so that nobody waits for it. Breaks
 * further groups that are bound to it, so that they do not go on without it. */
static void dtrain__threads_give_up(void *self, const dtrain__error *why)
{
    dtrain__seat *of = (dtrain__seat *)self;
    int world = dtrain__seat_world(of, of->rank), rank;
    dtrain__error lost;
    dtrain__membership_because(&lost, DTRAIN_ERR_PEER_LOST,
                               "rank %d of the world, of another group of this mesh, has left: %.400s", world,
                               why->text);
    dtrain__seat_lock(of, 1);
    for (dtrain__seat *seat = of->council->seats; seat != NULL; seat = seat->next)
        if (seat->id != of->id && (rank = dtrain__seat_rank(seat, world)) >= 0)
            dtrain__threads_mark(seat, rank, why->text, UINT64_MAX); /* calls that need it then fail */
        else if (seat->id != of->id && seat->bound != NULL && seat->bound[world])
            dtrain__seat_break(seat, &lost);
    dtrain__seat_lock(of, 0);
}

/* The rank's end leaves and is freed. The last end of a group frees the group; the last end of a world frees the world.
 * A forked child takes no lock, since threads of its parent may have held it. */
static void dtrain__threads_destroy(void *self)
{
    dtrain__seat *seat = (dtrain__seat *)self;
    dtrain__threads_group *group = ((dtrain__threads_rank *)self)->group;
    dtrain__threads_world *world = group->world;
    int forked = seat->forked;
    dtrain__threads_leave(self, "");
    if (!forked)
        dtrain__os_lock(&world->mutex);
    dtrain__seat_unlink(seat);
    dtrain__seat_free(seat);
    int last = world->council.seats == NULL;
    if (--group->ends == 0) {
        dtrain__consent_forget(&world->council, seat->id);
        dtrain__threads_free(group);
    }
    if (!forked)
        dtrain__os_unlock(&world->mutex);
    if (last)
        dtrain__threads_world_free(world);
}

static dtrain__threads_world *dtrain__threads_world_create(dtrain_allocator *allocator, int size)
{
    dtrain__threads_world *world = (dtrain__threads_world *)dtrain__memory_owner(
        allocator, sizeof *world, offsetof(dtrain__threads_world, own), &allocator);
    if (world == NULL)
        return NULL;
    dtrain__council *council = &world->council;
    world->allocator = council->allocator = allocator;
    if (!dtrain__council_open(council, size)) {
        dtrain__free(allocator, world);
        return NULL;
    }
    world->origin.bell = &world->bell;
    council->self = world;
    council->origin = &world->origin;
    council->tell = dtrain__threads_tell;
    council->gone = dtrain__threads_gone;
    council->mutex = &world->mutex;
    council->wait = dtrain__threads_wait;
    dtrain__os_mutex_init(&world->mutex);
    dtrain__os_mutex_init(&world->origin.mutex);
    return world;
}

/* Makes a group that no rank has joined. Returns NULL if there is no memory. */
static dtrain__threads_group *dtrain__threads_make(dtrain__threads_world *world, int size)
{
    size_t ranks = (size_t)size;
    dtrain_allocator *allocator = world->allocator;
    dtrain__threads_group *group = (dtrain__threads_group *)dtrain__alloc(allocator, sizeof *group);
    if (group == NULL)
        return NULL;
    group->world = world;
    group->shared.bell.spins =
        size <= dtrain__os_processors() ? 100 : 0; /* about 5 us; other programs need the processors too */
    group->shared.bell.also = &world->bell;
    group->shared.members = &group->members;
    group->shared.inline_bytes = DTRAIN__POST_INLINE_BYTES;
    group->shared.slots = (dtrain__slot *)dtrain__alloc(allocator, ranks * sizeof(dtrain__slot));
    group->ranks = (dtrain__threads_rank *)dtrain__alloc(allocator, ranks * sizeof(dtrain__threads_rank));
    group->rings = (dtrain__ring ***)dtrain__alloc(allocator, ranks * sizeof(dtrain__ring **));
    if (dtrain__membership_open(&group->members, allocator, size) && group->shared.slots != NULL &&
        group->ranks != NULL && group->rings != NULL)
        return group;
    dtrain__threads_free(group);
    return NULL;
}

/* A rank joins the group with this id. The first one makes the group. dtrain__threads_destroy undoes it. */
static dtrain_status dtrain__threads_attach(dtrain__threads_group **out, dtrain__threads_world *world,
                                            const dtrain__group_desc *desc)
{
    dtrain__os_lock(&world->mutex);
    dtrain__seat *seat = dtrain__council_seat(&world->council, desc->id);
    dtrain__threads_group *group =
        seat != NULL ? ((dtrain__threads_rank *)(void *)seat)->group : dtrain__threads_make(world, desc->size);
    int good = group != NULL;
    if (good) {
        seat = &group->ranks[desc->rank].seat;
        group->ranks[desc->rank].group = group;
        good =
            dtrain__seat_open(seat, &world->council, desc->id, &group->members, desc->worlds, desc->size, desc->rank);
    }
    if (good) {
        group->ends++;
        seat->next = world->council.seats;
        world->council.seats = seat;
    } else if (group != NULL && group->ends == 0) {
        dtrain__threads_free(group);
    }
    dtrain__os_unlock(&world->mutex);
    *out = group;
    return good ? DTRAIN_OK : dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", desc->size);
}

static void dtrain__threads_fail(void *self, dtrain_status why, const char *text)
{
    dtrain__seat *seat = (dtrain__seat *)self;
    dtrain__error cause;
    dtrain__membership_because(&cause, why, "%s", text);
    dtrain__seat_lock(seat, 1);
    dtrain__seat_break(seat, &cause);
    dtrain__seat_lock(seat, 0);
}

/* ---- the plane ---- */

static void dtrain__threads_end(dtrain__end *end, dtrain__threads_group *group, int rank)
{
    dtrain__seat_give(&group->ranks[rank].seat, end);
    end->transport.send = dtrain__threads_send;
    end->transport.recv = dtrain__threads_recv;
    end->transport.fail = dtrain__threads_fail;
    end->transport.leave = dtrain__threads_leave;
    end->transport.destroy = dtrain__threads_destroy;
    end->shared = &group->shared;
}

static dtrain_status dtrain__threads_join(void *self, const dtrain__group_desc *desc, dtrain__end *end)
{
    dtrain__threads_group *group;
    dtrain_status status = dtrain__threads_attach(&group, ((dtrain__threads_rank *)self)->group->world, desc);
    if (status == DTRAIN_OK)
        dtrain__threads_end(end, group, desc->rank);
    return status;
}

/* Publishes what the rank does. The group owns the record. */
static void dtrain__threads_publish(void *self, dtrain__tell tell, void *record)
{
    dtrain__threads_rank *mine = (dtrain__threads_rank *)self;
    if (tell == NULL)
        return;
    mine->tell = tell;
    DTRAIN__ATOMIC_STORE(&mine->record, record, RELEASE);
}

static size_t dtrain__threads_last(void *self, int rank, int64_t after_ns, void *out, size_t capacity, int64_t *age_ns)
{
    const dtrain__threads_rank *other = &((dtrain__threads_rank *)self)->group->ranks[rank];
    void *record = DTRAIN__ATOMIC_LOAD(&other->record, ACQUIRE);
    int awaits;
    (void)after_ns;
    *age_ns = 0;
    return record != NULL ? other->tell(record, (unsigned char *)out, capacity, &awaits) : 0;
}

static size_t dtrain__threads_untaken(void *self, int rank)
{
    dtrain__threads_way way = {(dtrain__threads_rank *)self, rank, 0};
    const dtrain__ring *ring = dtrain__threads_ring_of(&way);
    return ring != NULL ? (size_t)dtrain__ring_held(ring) : 0;
}

static const dtrain__plane dtrain__threads_plane = {
    1,    0,    dtrain__threads_join,   NULL, NULL, NULL, dtrain__threads_publish, dtrain__threads_last, NULL,
    NULL, NULL, dtrain__threads_untaken};

/* Makes a new world, and a group that `size` ranks have joined. */
static dtrain_status dtrain__threads_create(dtrain__threads_group **out, int size, dtrain_allocator *allocator)
{
    dtrain__threads_world *world = dtrain__threads_world_create(allocator, size);
    dtrain_status status = DTRAIN_OK;
    int come = 0;
    if (world == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", size);
    world->council.plane = &dtrain__threads_plane;
    for (; status == DTRAIN_OK && come < size; come += status == DTRAIN_OK) {
        dtrain__group_desc desc = {0, NULL, size, come};
        status = dtrain__threads_attach(out, world, &desc);
    }
    if (status != DTRAIN_OK && come == 0)
        dtrain__threads_world_free(world);
    for (int rank = 0; status != DTRAIN_OK && rank < come; rank++)
        dtrain__threads_destroy(&(*out)->ranks[rank]);
    return status;
}

DTRAIN__FAST_END
#endif
