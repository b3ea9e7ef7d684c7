/* ---- >>rounds-groups ----
 * The groups of a local SGD object. When a member is gone, the others make new groups. All leave a broken group in the
 * same order: abort all three groups, agree, shrink. If no round was under way, they agree on nothing. A member that is
 * the only one left, or that the others have given up, goes on alone: its groups are NULL. */
#ifndef DTRAIN__ROUNDS_GROUPS
#define DTRAIN__ROUNDS_GROUPS
#include "rounds_state.c"
#include "../comm/survive.c"

#define DTRAIN__ROUNDS_SLICE_MS 100 /* waits are this short, so that they end when the object is destroyed */

static int dtrain__rounds_stopping(const dtrain_local_sgd *local)
{
    return dtrain__worker_stopping(&local->worker);
}

/* Wakes the training thread: something has changed. */
static void dtrain__rounds_tell(dtrain_local_sgd *local)
{
    DTRAIN__ATOMIC_ADD(&local->news, 1, SEQ_CST);
    dtrain__bell_ring(&local->to_caller);
}

static void dtrain__rounds_sent(dtrain_local_sgd *local, uint64_t bytes)
{
    dtrain__os_lock(&local->mutex);
    local->stats.sent_bytes += bytes;
    dtrain__os_unlock(&local->mutex);
}

/* Aborts the groups if the object is being destroyed while the thread may wait for others. The mutex is held. */
static void dtrain__rounds_cut(dtrain_local_sgd *local)
{
    dtrain_comm *groups[3];
    groups[0] = local->up;
    groups[1] = local->down;
    groups[2] = local->group;
    for (int i = 0; i < 3; i++)
        if (local->busy && dtrain__rounds_stopping(local) && groups[i] != NULL)
            DTRAIN_IGNORE(dtrain_comm_abort(groups[i], "it leaves local SGD"));
}

/* Says whether the thread may wait for others from here on. */
static void dtrain__rounds_busy(dtrain_local_sgd *local, int busy)
{
    dtrain__os_lock(&local->mutex);
    local->busy = busy;
    dtrain__rounds_cut(local);
    dtrain__os_unlock(&local->mutex);
}

/* Agrees with all members that are left. Returns 1 if every one of them can, 0 if one cannot, and -1 if the others go
 * on without this rank or this rank leaves. */
static int dtrain__rounds_agree(dtrain_local_sgd *local, int can)
{
    uint64_t flags = can != 0;
    dtrain_status status;
    dtrain__group_set_timeout(local->group, DTRAIN__ROUNDS_SLICE_MS);
    do /* after a timeout ask again: this rank's vote stands, and so does a decision */
        status = dtrain_comm_agree(local->group, &flags);
    while (status == DTRAIN_ERR_TIMEOUT && !dtrain__rounds_stopping(local));
    dtrain__group_set_timeout(local->group, local->timeout_ms);
    return status == DTRAIN_OK ? flags == 1 : -1;
}

/* Returns the server's rank in a group; -1: there is no server, or it is not in the group. */
static int dtrain__rounds_find_server(const dtrain_local_sgd *local, const dtrain_comm *group)
{
    int server = local->desc.through_server && group != NULL ? dtrain_comm_size(group) - 1 : -1;
    while (server >= 0 && dtrain__seat_world(group->seat, server) != local->server_origin)
        server--;
    return server;
}

static void dtrain__rounds_set_groups(dtrain_local_sgd *local, dtrain_comm *group, dtrain_comm *up, dtrain_comm *down)
{
    dtrain_comm *old = local->group, *old_up = local->up, *old_down = local->down;
    dtrain__os_lock(&local->mutex);
    local->group = group;
    local->up = up;
    local->down = down;
    local->stats.left = dtrain_comm_size(group);
    dtrain__os_unlock(&local->mutex);
    for (int i = 0; i < local->desc.fragments; i++)
        local->fragments[i].opened_ns = 0;
    local->told = 0;
    memset(local->works, 0, local->sizes.works * sizeof *local->works); /* a group's handles end with it */
    if (old_up != up)
        dtrain__group_close(old_up);
    if (old_down != down)
        dtrain__group_close(old_down);
    if (old != group)
        dtrain__group_close(old);
    local->server = dtrain__rounds_find_server(local, group);
    for (int i = 0; group != NULL && i < local->desc.fragments; i++)
        if (local->fragments[i].pack != NULL)
            dtrain__compressed_move(local->fragments[i].pack, group);
}

/* Makes the two groups over which rounds are opened. A server is rank 0 of both. Collective. On an error it makes
 * neither. */
static dtrain_status dtrain__rounds_talk(const dtrain_local_sgd *local, dtrain_comm *group, dtrain_comm **up,
                                         dtrain_comm **down)
{
    int server = dtrain__rounds_find_server(local, group), key = dtrain_comm_rank(group) != server;
    *down = NULL;
    dtrain_status status = dtrain_comm_split(group, 0, key, up);
    if (status == DTRAIN_OK)
        status = dtrain_comm_split(group, 0, key, down);
    if (status != DTRAIN_OK) {
        dtrain__error cause = dtrain__thread_error;
        dtrain__group_close(*up);
        *up = NULL;
        return dtrain__report(&cause);
    }
    dtrain__group_set_timeout(*up, -1); /* a member sends nothing for as long as it trains */
    dtrain__group_set_timeout(*down, -1);
    return DTRAIN_OK;
}

/* This rank makes its rounds alone from here on. */
static void dtrain__rounds_alone(dtrain_local_sgd *local, const char *why)
{
    dtrain__os_lock(&local->mutex);
    if (!dtrain__rounds_stopping(local)) {
        dtrain__fail(&local->error, DTRAIN_ERR_PEER_LOST, "local_sgd: rank %d goes on alone: %.500s", local->rank, why);
        dtrain__log(DTRAIN_LOG_WARN, "%s", local->error.text);
    }
    dtrain__os_unlock(&local->mutex);
    dtrain__rounds_set_groups(local, NULL, NULL, NULL);
}

/* Tries to make groups of the members that are left. Returns 1 if made, 0 if more members were lost meanwhile, and -1
 * if this rank is alone. */
static int dtrain__rounds_shrink(dtrain_local_sgd *local)
{
    dtrain_comm *group = NULL, *up = NULL, *down = NULL;
    dtrain_status status;
    do {
        dtrain__group_set_timeout(local->group, DTRAIN__ROUNDS_SLICE_MS);
        status = dtrain_comm_shrink(local->group, &group);
    } while (status == DTRAIN_ERR_TIMEOUT && !dtrain__rounds_stopping(local));
    if (status != DTRAIN_OK)
        return -1;
    dtrain__group_set_timeout(group, local->timeout_ms);
    dtrain__rounds_set_groups(local, group, NULL, NULL);
    if (dtrain_comm_size(group) == 1)
        return 1;
    if (local->desc.through_server && local->server < 0) {
        dtrain__fail(NULL, DTRAIN_ERR_PEER_LOST, "rank %d, the server of its rounds, is lost", local->desc.server);
        return -1;
    }
    dtrain__rounds_busy(local, 1);
    status = dtrain__rounds_talk(local, group, &up, &down);
    dtrain__rounds_busy(local, 0);
    if (status != DTRAIN_OK)
        DTRAIN_IGNORE(dtrain_comm_abort(group, dtrain_last_error()));
    int all = dtrain__rounds_agree(local, status == DTRAIN_OK); /* a member without these groups would never be heard */
    if (all == 1) {
        dtrain__rounds_set_groups(local, group, up, down);
    } else {
        dtrain__group_close(up);
        dtrain__group_close(down);
    }
    return all;
}

/* Goes on with the members that are left. agreed: all have agreed already to leave the group. */
static void dtrain__rounds_regroup(dtrain_local_sgd *local, int agreed, const char *why)
{
    dtrain__error cause;
    int before = dtrain_comm_size(local->group), made = 0, closed = 1; /* closed: all have finished, and may leave */
    dtrain__os_lock(&local->mutex);
    for (int i = 0; i < local->desc.fragments; i++)
        closed &= local->fragments[i].closed;
    dtrain__os_unlock(&local->mutex);
    dtrain__fail(&cause, DTRAIN_ERR_PEER_LOST, "%.500s", why);
    DTRAIN_IGNORE(dtrain_comm_abort(local->up, cause.text));
    DTRAIN_IGNORE(dtrain_comm_abort(local->down, cause.text));
    DTRAIN_IGNORE(dtrain_comm_abort(local->group, cause.text));
    if (!agreed && dtrain__rounds_agree(local, 0) < 0)
        made = -1;
    while (made == 0 && !dtrain__rounds_stopping(local))
        made = dtrain__rounds_shrink(local);
    if (dtrain__rounds_stopping(local))
        return;
    if (made < 0 || dtrain_comm_size(local->group) == 1) {
        if (made < 0)
            snprintf(cause.text, sizeof cause.text, "%.500s", dtrain_last_error());
        if (!closed)
            dtrain__rounds_alone(local, cause.text);
        else
            dtrain__rounds_set_groups(local, NULL, NULL, NULL);
    } else {
        dtrain__log(closed ? DTRAIN_LOG_INFO : DTRAIN_LOG_WARN,
                    "local_sgd: rank %d goes on with %d of %d members: %.400s", local->rank,
                    dtrain_comm_size(local->group), before, cause.text);
    }
    dtrain__rounds_tell(local);
}

#endif
