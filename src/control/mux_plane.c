/* ---- >>mux_plane ----
 * The control plane of ranks that a transport of the user's own joins: lanes of a mux, whose control messages say who
 * leaves and what breaks a group. The service thread looks for what comes while no call does. */
#ifndef DTRAIN__MUX_PLANE
#define DTRAIN__MUX_PLANE
#include "mux_council.c"

#define DTRAIN__MUX_IDLE_NS 50000000 /* between two looks of the service thread, where nothing comes */

static dtrain_status dtrain__mux_plane_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                            size_t *moved)
{
    dtrain_transfer out = {peer, NULL, bytes, 0, 0};
    memcpy(&out.data, &data, sizeof data); /* it is only read */
    dtrain_status status = dtrain__mux_move((dtrain__mux_lane *)self, &out, NULL, deadline_ns);
    *moved = out.moved;
    return status;
}

static dtrain_status dtrain__mux_plane_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns,
                                            size_t *moved)
{
    dtrain_transfer in = {peer, (unsigned char *)data, bytes, 0, 0};
    dtrain_status status = dtrain__mux_move((dtrain__mux_lane *)self, NULL, &in, deadline_ns);
    *moved = in.moved;
    return status;
}

static dtrain_status dtrain__mux_plane_exchange(void *self, dtrain_transfer *out, dtrain_transfer *in,
                                                int64_t deadline_ns)
{
    return dtrain__mux_move((dtrain__mux_lane *)self, out, in, deadline_ns);
}

/* On the service thread: whoever is in a call does the same, and more. */
static void dtrain__mux_plane_step(dtrain__origin *origin, int64_t until_ns)
{
    dtrain__mux *mux = (dtrain__mux *)(void *)origin; /* its first member */
    int moved = 0;
    if (pthread_mutex_trylock(&mux->turn) == 0) {
        moved = dtrain__mux_sweep(mux, DTRAIN__MUX_EARLY);
        pthread_mutex_unlock(&mux->turn);
    }
    mux->idle_ns = moved || mux->idle_ns == 0 ? 100000 : 2 * mux->idle_ns;
    mux->idle_ns = mux->idle_ns < DTRAIN__MUX_IDLE_NS ? mux->idle_ns : DTRAIN__MUX_IDLE_NS;
    if (mux->table.poll != NULL) {
        int64_t soon = dtrain__os_now_ns() + mux->idle_ns;
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
    cause.status = why;
    snprintf(cause.text, sizeof cause.text, "%s", text);
    pthread_mutex_lock(&mux->mutex);
    int first = dtrain__mux_break(lane, &cause);
    pthread_mutex_unlock(&mux->mutex);
    if (!first)
        return;
    dtrain__mux_tell(lane, DTRAIN__MUX_FAIL, (uint64_t)why, text);
    if (lane->id == 0 && mux->table.fail != NULL)
        mux->table.fail(mux->table.self, why, text);
}

static void dtrain__mux_plane_leave(void *self, const char *why)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    if (!lane->forked) {
        dtrain__mux_enter(lane->mux);
        dtrain__council_leave(&lane->mux->council, lane->id);
        snprintf(lane->mux->why, sizeof lane->mux->why, "%s", why);
        dtrain__mux_exit(lane->mux);
        dtrain__mux_tell(lane, DTRAIN__MUX_LEAVE, lane->calls, why);
    }
}

static void dtrain__mux_plane_destroy(void *self)
{
    dtrain__mux_detach((dtrain__mux_lane *)self);
}

static int dtrain__mux_plane_world(void *self, int rank)
{
    return ((dtrain__mux_lane *)self)->worlds[rank];
}

static int dtrain__mux_plane_bound(void *self, int *worlds)
{
    const dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    if (worlds == NULL)
        return lane->mux->table.size;
    for (int i = 0; i < lane->bound_count; i++)
        worlds[i] = lane->bound[i];
    return lane->bound_count;
}

static int dtrain__mux_plane_bind(void *self, const int *worlds, int count)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux *mux = lane->mux;
    int *bound = (int *)dtrain__alloc(mux->allocator, (size_t)count * sizeof(int));
    if (bound == NULL)
        return 0;
    memcpy(bound, worlds, (size_t)count * sizeof(int));
    dtrain__mux_enter(mux);
    lane->bound = bound;
    lane->bound_count = count;
    for (int i = 0; i < count; i++)
        if (mux->peers[worlds[i]].gone != DTRAIN_OK)
            dtrain__mux_lost(lane, worlds[i], mux->peers[worlds[i]].gone, "its end of the transport is closed");
    dtrain__mux_exit(mux);
    return 1;
}

static void dtrain__mux_plane_follow(void *self, void *leader)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    const dtrain__mux_lane *first = (const dtrain__mux_lane *)leader;
    pthread_mutex_lock(&lane->mux->mutex);
    lane->follows = 1;
    lane->leader = first->id;
    if (dtrain__membership_broken(&first->members))
        dtrain__mux_break(lane, dtrain__membership_cause(&first->members));
    pthread_mutex_unlock(&lane->mux->mutex);
}

static void dtrain__mux_plane_lost(void *self, int rank)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux_enter(lane->mux);
    dtrain__mux_needs(lane, rank);
    dtrain__mux_exit(lane->mux);
}

static void dtrain__mux_plane_skipped(void *self, int rank, uint64_t calls)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux_enter(lane->mux);
    dtrain__mux_left(lane, rank, calls, NULL, 0);
    dtrain__mux_exit(lane->mux);
}

static void dtrain__mux_plane_leaving(void *self, int forked, const dtrain__error *why, uint64_t calls)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    (void)why; /* dtrain__mux_plane_leave tells */
    lane->forked = forked;
    lane->calls = calls;
}

static const dtrain__plane *dtrain__mux_plane_table(void);

static void dtrain__mux_plane_end(dtrain__end *end, dtrain__mux_lane *lane)
{
    const dtrain_transport *table = &lane->mux->table;
    memset(end, 0, sizeof *end);
    end->transport.self = lane;
    end->transport.rank = lane->rank;
    end->transport.size = lane->size;
    end->transport.send = dtrain__mux_plane_send;
    end->transport.recv = dtrain__mux_plane_recv;
    if ((lane->own.send != NULL ? lane->own.exchange : table->exchange) != NULL)
        end->transport.exchange = dtrain__mux_plane_exchange;
    end->transport.poll = dtrain__mux_plane_poll;
    end->transport.wake = dtrain__mux_plane_wake;
    end->transport.fail = dtrain__mux_plane_fail;
    end->transport.leave = dtrain__mux_plane_leave;
    end->transport.destroy = dtrain__mux_plane_destroy;
    end->plane = dtrain__mux_plane_table();
    end->origin = &lane->mux->origin;
    end->members = &lane->members;
    end->allocator = lane->mux->allocator;
}

/* Makes the end of the world over a user's table, which stays the user's on an error. */
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
    status = dtrain__mux_attach(&lane, mux, 0, NULL, table->size, table->rank);
    if (status == DTRAIN_OK)
        dtrain__mux_plane_end(end, lane);
    else
        dtrain__mux_free(mux);
    return status;
}

static dtrain_status dtrain__mux_plane_group(void *self, const dtrain__group_desc *desc, dtrain__end *end)
{
    dtrain__mux *mux = ((dtrain__mux_lane *)self)->mux;
    dtrain__mux_lane *lane;
    dtrain_status status = dtrain__mux_attach(&lane, mux, desc->id, desc->worlds, desc->size, desc->rank);
    if (status != DTRAIN_OK)
        return status;
    if (mux->table.lanes != NULL)
        status = mux->table.lanes(mux->table.self, desc->id, desc->worlds, desc->size, &lane->own);
    if (status == DTRAIN_OK) {
        dtrain__mux_plane_end(end, lane);
        return status;
    }
    if (dtrain__thread_error.status != status)
        dtrain__fail(NULL, status, "the transport has no lane for a group of %d ranks: it said %s", desc->size,
                     dtrain_status_name(status));
    memset(&lane->own, 0, sizeof lane->own);
    dtrain__mux_plane_leave(lane, "");
    dtrain__mux_detach(lane);
    return status;
}

static const dtrain__plane *dtrain__mux_plane_table(void)
{
    static const dtrain__plane table = {
        0,
        0,
        1,
        dtrain__mux_plane_group,
        dtrain__mux_plane_world,
        dtrain__plane_host,
        dtrain__plane_node_ranks,
        dtrain__mux_plane_bound,
        dtrain__mux_plane_bind,
        dtrain__mux_plane_follow,
        dtrain__plane_form,
        dtrain__mux_plane_lost,
        dtrain__mux_plane_skipped,
        dtrain__mux_plane_agree,
        dtrain__mux_plane_store,
        dtrain__plane_publish,
        dtrain__plane_last,
        dtrain__plane_suspect,
        dtrain__plane_rest,
        dtrain__mux_plane_leaving,
    };
    return &table;
}

#endif
