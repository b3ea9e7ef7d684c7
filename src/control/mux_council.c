/* ---- >>mux_council ----
 * The store of ranks that a transport of the user's own joins, and their votes: a council (see >>council), whose
 * messages the mux carries. Its turn guards it. */
#ifndef DTRAIN__MUX_COUNCIL
#define DTRAIN__MUX_COUNCIL
#include "mux_lanes.c"

static int dtrain__mux_council_send(void *self, int to, int type, const void *head, size_t head_bytes, const void *data,
                                    size_t bytes)
{
    dtrain__mux *mux = (dtrain__mux *)self;
    return mux->peers[to].gone == DTRAIN_OK &&
           dtrain__mux_post(mux, to, 0, DTRAIN__MUX_OTHERS + type, head, head_bytes, data, bytes);
}

static void dtrain__mux_council_tell(void *self)
{
    dtrain__bell_ring(&((dtrain__mux *)self)->bell);
}

static int dtrain__mux_council_gone(void *self, int rank)
{
    const dtrain__mux_peer *p = &((dtrain__mux *)self)->peers[rank];
    return p->gone == DTRAIN_OK ? DTRAIN__PRESENT : p->bye ? DTRAIN__LEFT : DTRAIN__LOST;
}

static int dtrain__mux_council_member(void *self, uint64_t group, int i)
{
    const dtrain__mux_lane *lane = dtrain__mux_lane_of((dtrain__mux *)self, group);
    return lane == NULL ? -2 : i < lane->size ? lane->worlds[i] : -1;
}

static dtrain__store_call **dtrain__mux_council_call(void *self, uint64_t group)
{
    dtrain__mux_lane *lane = dtrain__mux_lane_of((dtrain__mux *)self, group);
    return lane != NULL ? &lane->asks : NULL;
}

static void dtrain__mux_convene(dtrain__mux *mux)
{
    dtrain__council *council = &mux->council;
    council->self = mux;
    council->allocator = mux->allocator;
    council->origin = &mux->origin;
    council->rank = mux->table.rank;
    council->size = mux->table.size;
    council->send = dtrain__mux_council_send;
    council->tell = dtrain__mux_council_tell;
    council->gone = dtrain__mux_council_gone;
    council->member = dtrain__mux_council_member;
    council->call = dtrain__mux_council_call;
}

/* A call that waits for the council. */
typedef struct dtrain__mux_wait {
    dtrain__mux_lane *lane;
    dtrain__agreement *agreement; /* of a vote; else of the store: */
    dtrain_status status;
} dtrain__mux_wait;

static int dtrain__mux_council_ended(dtrain__mux_wait *wait, int late)
{
    dtrain__mux_lane *lane = wait->lane;
    dtrain__council *council = &lane->mux->council;
    return wait->agreement != NULL
               ? dtrain__consent_decided(council, lane->id, wait->agreement, 0)
               : dtrain__council_ended(council, lane->id, lane->rank, &lane->members, late, &wait->status);
}

/* Moves messages until the call has ended, or its time; the caller holds turn, and has let it go then. Returns whether
 * it has ended. */
static int dtrain__mux_council_wait(dtrain__mux_wait *wait, int64_t deadline_ns)
{
    dtrain__mux *mux = wait->lane->mux;
    for (int64_t span = 100000;; span = span < DTRAIN__MUX_SHORT_NS ? 2 * span : span) {
        int moved = dtrain__mux_sweep(mux, DTRAIN__MUX_KEPT), late = dtrain__os_now_ns() >= deadline_ns;
        int ended = dtrain__mux_council_ended(wait, late);
        dtrain__mux_exit(mux);
        if (ended || late)
            return ended;
        if (!moved)
            dtrain__mux_rest(mux, span, deadline_ns);
        dtrain__mux_enter(mux);
    }
}

static int dtrain__mux_plane_agree(void *self, dtrain__agreement *agreement, int64_t deadline_ns)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux_wait wait = {lane, agreement, DTRAIN_OK};
    dtrain__mux_enter(lane->mux);
    agreement->starved =
        !agreement->voted && !dtrain__consent_vote(&lane->mux->council, lane->id, &lane->members, agreement);
    if (!agreement->starved)
        return dtrain__mux_council_wait(&wait, deadline_ns);
    dtrain__mux_exit(lane->mux);
    return 0;
}

static dtrain_status dtrain__mux_plane_store(void *self, dtrain__store_call *call, int64_t deadline_ns)
{
    dtrain__mux_lane *lane = (dtrain__mux_lane *)self;
    dtrain__mux_wait wait = {lane, NULL, DTRAIN_OK};
    dtrain__mux_enter(lane->mux);
    wait.status = dtrain__council_ask(&lane->mux->council, lane->id, lane->rank, call);
    if (wait.status == DTRAIN_OK)
        dtrain__mux_council_wait(&wait, deadline_ns);
    else
        dtrain__mux_exit(lane->mux);
    return wait.status;
}

#endif
