/* ---- >>mux_plane ----
 * The control plane of ranks that a user's own transport joins. Each group is a lane of a mux. Control messages of the
 * mux say who leaves and what breaks a group, and carry those of the council, which the mux's turn guards. The service
 * thread looks for what comes while no call does. */
#ifndef DTRAIN__MUX_PLANE
#define DTRAIN__MUX_PLANE
#include "mux_lanes.c"

#define DTRAIN__MUX_IDLE_NS 50000000 /* longest pause of the service thread if no call is under way */

/* ---- the council ---- */

static int dtrain__mux_council_send(void *self, int to, int type, const void *head, size_t head_bytes, const void *data,
                                    size_t bytes)
{
    dtrain__mux *mux = (dtrain__mux *)self;
    return mux->peers[to].gone == DTRAIN_OK &&
           dtrain__mux_post(mux, to, 0, DTRAIN__MUX_OTHERS + type, head, head_bytes, data, bytes);
}

static void dtrain__mux_council_tell(void *self)
{
    dtrain__mux_ring((dtrain__mux *)self);
}

static int dtrain__mux_council_gone(void *self, int rank)
{
    const dtrain__mux_peer *p = &((dtrain__mux *)self)->peers[rank];
    return p->gone == DTRAIN_OK ? DTRAIN__PRESENT : p->bye ? DTRAIN__LEFT : DTRAIN__LOST;
}

static int dtrain__mux_council_dead(void *self, int rank)
{
    dtrain__mux *mux = (dtrain__mux *)self;
    dtrain__mux_peer *p = &mux->peers[rank];
    if (!p->dead && mux->table.alive != NULL)
        p->dead = mux->table.alive(mux->table.self, rank) == 0;
    return p->dead;
}

/* Ranks of a table that does not tell hosts are on one machine where it proves deaths. */
static int dtrain__mux_council_beside(void *self, int a, int b)
{
    const dtrain_transport *table = &((dtrain__mux *)self)->table;
    uint64_t host = table->host != NULL ? table->host(table->self, a) : 0;
    return table->host == NULL ? table->alive != NULL : host != 0 && host == table->host(table->self, b);
}

static void dtrain__mux_council_lock(void *self, int on)
{
    if (on)
        dtrain__mux_enter((dtrain__mux *)self);
    else
        dtrain__mux_exit((dtrain__mux *)self);
}

/* Moves what can be moved. If nothing can, rests: first a little, then longer. */
static void dtrain__mux_council_wait(dtrain__seat *seat, unsigned turn, int64_t until_ns, uint64_t seen)
{
    dtrain__mux *mux = ((dtrain__mux_lane *)(void *)seat)->mux;
    (void)seen;
    dtrain__mux_enter(mux);
    int moved = dtrain__mux_sweep(mux, DTRAIN__MUX_KEPT);
    dtrain__mux_exit(mux);
    if (!moved)
        dtrain__mux_rest(mux, (int64_t)100000 << (turn < 4 ? turn : 4), until_ns);
}

/* Returns 0 if there is no memory. */
static int dtrain__mux_convene(dtrain__mux *mux)
{
    dtrain__council *council = &mux->council;
    council->serial = mux->table.host != NULL ? dtrain__council_number() : 0;
    council->self = mux;
    council->allocator = mux->allocator;
    council->origin = &mux->origin;
    council->rank = mux->table.rank;
    council->send = dtrain__mux_council_send;
    council->tell = dtrain__mux_council_tell;
    council->gone = dtrain__mux_council_gone;
    council->dead = dtrain__mux_council_dead;
    council->beside = dtrain__mux_council_beside;
    council->lock = dtrain__mux_council_lock;
    council->lost = dtrain__mux_marks;
    council->ended = dtrain__mux_end;
    council->wait = dtrain__mux_council_wait;
    return dtrain__council_open(council, mux->table.size);
}

/* ---- the transport ---- */

/* One turn of the service thread. A thread in a call does the same, and more. until_ns: 0 if calls under way have just
 * moved, soon if some wait, late if there are none. */
static void dtrain__mux_plane_step(dtrain__origin *origin, int64_t until_ns)
{
    dtrain__mux *mux = (dtrain__mux *)(void *)origin; /* its first member */
    int moved = until_ns == 0;                        /* by calls under way */
    if (dtrain__os_try_lock(&mux->turn)) {
        moved |= dtrain__mux_sweep(mux, DTRAIN__MUX_EARLY);
        dtrain__os_unlock(&mux->turn);
    }
    int64_t now = dtrain__os_now_ns(),
            most = until_ns - now < DTRAIN__MUX_IDLE_NS ? DTRAIN__MUX_SHORT_NS : DTRAIN__MUX_IDLE_NS;
    mux->idle_ns = moved || mux->idle_ns == 0 ? 100000 : 2 * mux->idle_ns;
    mux->idle_ns = mux->idle_ns < most ? mux->idle_ns : most;
    if (mux->table.poll != NULL) {
        int64_t soon = now + mux->idle_ns;
        mux->table.poll(mux->table.self, moved ? 0 : soon < until_ns ? soon : until_ns);
    } else if (!moved) {
        dtrain__mux_rest(mux, mux->idle_ns, until_ns);
    }
}

static void dtrain__mux_plane_kick(dtrain__origin *origin)
{
    dtrain__mux_wake((dtrain__mux *)(void *)origin);
}

static void dtrain__mux_plane_poll(void *self, int64_t deadline_ns)
{
    dtrain__mux *mux = ((dtrain__mux_lane *)self)->mux;
    (void)deadline_ns;
    if (mux->table.poll != NULL)
        mux->table.poll(mux->table.self, 0);
    dtrain__mux_drive(mux, 0);
}

static void dtrain__mux_plane_wake(void *self)
{
    dtrain__mux_wake(((dtrain__mux_lane *)self)->mux);
}

static void dtrain__mux_plane_fail(void *self, dtrain_status why, const char *text)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux *mux = lane->mux;
    dtrain__error cause;
    dtrain__membership_because(&cause, why, "%s", text);
    dtrain__os_lock(&mux->mutex);
    int first = dtrain__seat_break(&lane->seat, &cause);
    dtrain__os_unlock(&mux->mutex);
    if (!first)
        return;
    dtrain__mux_tell(lane, DTRAIN__MUX_FAIL, (uint64_t)why, text);
    if (lane->seat.id == 0 && mux->table.fail != NULL)
        mux->table.fail(mux->table.self, why, text);
}

static void dtrain__mux_plane_leave(void *self, const char *why)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    if (!lane->seat.forked) {
        dtrain__mux_enter(lane->mux);
        dtrain__council_leave(&lane->seat);
        snprintf(lane->mux->why, sizeof lane->mux->why, "%s", why);
        dtrain__mux_exit(lane->mux);
        dtrain__mux_tell(lane, DTRAIN__MUX_LEAVE, lane->seat.calls, why);
    }
}

static void dtrain__mux_plane_end(dtrain__end *end, dtrain__mux_lane *lane)
{
    dtrain__seat_give(&lane->seat, end);
    end->transport.poll = dtrain__mux_plane_poll;
    end->transport.wake = dtrain__mux_plane_wake;
    end->transport.fail = dtrain__mux_plane_fail;
    end->transport.leave = dtrain__mux_plane_leave;
    end->transport.destroy = dtrain__mux_detach;
    end->long_runs = lane->own.send != NULL;
}

/* Asks the table for streams of the lane's own. On an error it has none. */
static dtrain_status dtrain__mux_plane_lanes(dtrain__mux_lane *lane)
{
    const dtrain_transport *table = &lane->mux->table;
    dtrain_status status = DTRAIN_OK;
    size_t size = (size_t)lane->seat.size;
    int *worlds = table->lanes != NULL ? (int *)dtrain__alloc(lane->mux->allocator, size * sizeof(int)) : NULL;
    if (table->lanes != NULL && worlds == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "no memory for a group of %d ranks", lane->seat.size);
    for (int rank = 0; worlds != NULL && rank < lane->seat.size; rank++)
        worlds[rank] = dtrain__seat_world(&lane->seat, rank);
    if (worlds != NULL)
        status = table->lanes(table->self, lane->seat.id, worlds, lane->seat.size, &lane->own);
    dtrain__free(lane->mux->allocator, worlds);
    if (status == DTRAIN_OK)
        return status;
    if (dtrain__thread_error.status != status)
        dtrain__fail(NULL, status, "the transport made no lanes for a group of %d ranks: it returned %s",
                     lane->seat.size, dtrain_status_name(status));
    memset(&lane->own, 0, sizeof lane->own);
    return status;
}

static dtrain_status dtrain__mux_plane_group(void *self, const dtrain__group_desc *desc, dtrain__end *end)
{
    dtrain__mux *mux = ((dtrain__mux_lane *)self)->mux;
    dtrain__mux_lane *lane;
    dtrain_status status = dtrain__mux_attach(&lane, mux, desc->id, desc->worlds, desc->size, desc->rank);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__mux_plane_lanes(lane);
    if (status == DTRAIN_OK) {
        dtrain__mux_plane_end(end, lane);
        return status;
    }
    dtrain__mux_plane_leave(lane, "");
    dtrain__mux_detach(lane);
    return status;
}

static uint64_t dtrain__mux_plane_host(void *self, int rank)
{
    const dtrain__mux_lane *lane = (const dtrain__mux_lane *)self;
    const dtrain_transport *table = &lane->mux->table;
    return table->host != NULL ? table->host(table->self, dtrain__seat_world(&lane->seat, rank)) : 0;
}

static int dtrain__mux_plane_offer(void *self, int polls, unsigned char *offer)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    uint64_t host = dtrain__mux_plane_host(self, 0);
    for (int rank = 0; rank < lane->seat.size; rank++)
        if (host == 0 || dtrain__mux_plane_host(self, rank) != host)
            return 0;
    return dtrain__arena_offer(&lane->arena, &lane->seat, lane->mux->doorbell[1], polls, offer);
}

static int dtrain__mux_plane_prepare(void *self, int opened, unsigned char *offer, int64_t until_ns)
{
    const dtrain__mux_lane *lane = (const dtrain__mux_lane *)self;
    return dtrain__arena_prepare(lane->arena, &lane->seat, opened, offer, until_ns);
}

static void dtrain__mux_plane_open(void *self, unsigned char *offers)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    for (int rank = 0; rank < lane->seat.size; rank++) {
        uint64_t process = dtrain__get_le(offers + (size_t)rank * DTRAIN__SHARING_BYTES + DTRAIN__OFFER_PROCESS, 8);
        lane->mux->peers[dtrain__seat_world(&lane->seat, rank)].process = process <= INT_MAX ? (long)process : 0;
    }
    dtrain__arena_open(lane->arena, &lane->seat, offers);
}

static long dtrain__mux_plane_process(const void *self, int rank)
{
    const dtrain__mux *mux = (const dtrain__mux *)self;
    const dtrain_transport *table = &mux->table;
    return table->host(table->self, rank) != table->host(table->self, table->rank) ? -1 : mux->peers[rank].process;
}

static dtrain__shared *dtrain__mux_plane_keep(void *self, const unsigned char *verdicts)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__os_crowd crowd = {dtrain__mux_plane_process, lane->mux, lane->mux->table.size};
    dtrain__shared *shared = dtrain__arena_keep(&lane->arena, &lane->seat, dtrain__os_crowded(&crowd), verdicts);
    DTRAIN__ATOMIC_STORE(&lane->shares, shared != NULL, SEQ_CST);
    return shared;
}

static void dtrain__mux_plane_way(void *self, int rank, char *text, size_t capacity)
{
    const dtrain__mux_lane *lane = (const dtrain__mux_lane *)self;
    (void)rank;
    snprintf(text, capacity, "%s of the transport, %s", lane->own.send != NULL ? "a stream" : "frames",
             DTRAIN__ATOMIC_LOAD(&lane->shares, SEQ_CST) ? "collectives in shared memory" : "no shared memory");
}

/* A thread that rests is always woken by the doorbell. */
static void dtrain__mux_plane_doze(void *self)
{
    (void)self;
}

static const dtrain__sharing dtrain__mux_sharing = {dtrain__mux_plane_offer, dtrain__mux_plane_prepare,
                                                    dtrain__mux_plane_open, dtrain__mux_plane_keep,
                                                    dtrain__mux_plane_doze};

static const dtrain__plane dtrain__mux_plane = {0,
                                                1,
                                                dtrain__mux_plane_group,
                                                dtrain__mux_plane_host,
                                                NULL,
                                                dtrain__mux_plane_way,
                                                NULL,
                                                NULL,
                                                NULL,
                                                NULL,
                                                &dtrain__mux_sharing,
                                                NULL};

/* Makes this rank's end of the world over a user's table, which stays the user's on an error. */
static dtrain_status dtrain__mux_plane_create(dtrain__end *end, const dtrain_transport *table,
                                              dtrain_allocator *allocator)
{
    dtrain__mux *mux;
    dtrain__mux_lane *lane;
    dtrain_status status = dtrain__mux_create(&mux, table, allocator);
    if (status != DTRAIN_OK)
        return status;
    mux->origin.step = dtrain__mux_plane_step;
    mux->origin.kick = dtrain__mux_plane_kick;
    mux->council.exchange = dtrain__mux_move;
    mux->council.plane = &dtrain__mux_plane;
    status = dtrain__mux_attach(&lane, mux, 0, NULL, table->size, table->rank);
    if (status != DTRAIN_OK) {
        dtrain__mux_free(mux);
        return status;
    }
    status = dtrain__mux_plane_lanes(lane);
    if (status == DTRAIN_OK)
        dtrain__mux_plane_end(end, lane);
    else
        dtrain__mux_detach(lane);
    return status;
}

#endif
