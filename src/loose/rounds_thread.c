/* ---- >>rounds-thread ----
 * The thread that runs the rounds of a local SGD object. It uses three groups:
 *
 *   up      members hand in to its rank 0: the first member that is left, or the server
 *   down    rank 0 opens rounds
 *   group   a round sums
 *
 * Between two rounds each member sends once over up, at the latest when a round is opened. So every receive of rank 0
 * ends. The threads of all members always answer, so that a round can be three collectives over all that are left: the
 * weights (hellos), the sum, and an agreement. The agreement makes the outer step happen on every survivor or on none.
 * Therefore all members have the same outer weights, momentum and round numbers between rounds, and those that are left
 * can go on from them. A second agreement follows the outer step. So once a member's round is over, all have made its
 * outer step, and a save or load may use what they keep. */
#ifndef DTRAIN__ROUNDS_THREAD
#define DTRAIN__ROUNDS_THREAD
#include "rounds_server.c"

#define DTRAIN__ROUNDS_RECALL_NS 20000000 /* at least this long between two recalls */
#define DTRAIN__ROUNDS_RECALL UINT64_MAX  /* in place of a fragment: no round; hand in again */

/* Whether the outer step from the mean in local->sum leaves weights and momentum finite; the same on every member. */
static int dtrain__rounds_bounded(const dtrain_local_sgd *local, const dtrain__rounds_fragment *f,
                                  const dtrain_optimizer_desc *outer)
{
    float weights[512], velocity[512] = {0};
    int bad = 0;
    for (size_t at = 0; at < f->count; at += 512) {
        size_t n = f->count - at < 512 ? f->count - at : 512;
        memcpy(weights, local->outer + f->begin + at, n * sizeof(float));
        if (local->velocity != NULL)
            memcpy(velocity, local->velocity + f->begin + at, n * sizeof(float));
        DTRAIN_IGNORE(
            dtrain_device_sgd(NULL, weights, local->sum + at, velocity, n, outer, local->desc.outer_lr, NULL));
        bad |= dtrain__device_unbounded(DTRAIN_F32, weights, n) || dtrain__device_unbounded(DTRAIN_F32, velocity, n);
    }
    return !bad;
}

/* Makes the outer step of a fragment from the weighted sum in local->sum, and notes who took part. all: the hellos. */
static void dtrain__rounds_commit(dtrain_local_sgd *local, int fragment, int mine, double total, const uint64_t *all,
                                  int members)
{
    dtrain__rounds_fragment *f = &local->fragments[fragment];
    dtrain_optimizer_desc outer;
    memset(&outer, 0, sizeof outer);
    outer.kind = DTRAIN_SGD;
    outer.momentum = local->desc.outer_momentum;
    outer.nesterov = 1;
    dtrain__os_lock(&local->mutex);
    int steps = total > 0.0 && f->count > 0;
    if (local->counters[1 + fragment] < (uint64_t)local->desc.warmup_rounds)
        outer.momentum = 0.0f; /* leaves the velocity as it is */
    if (steps) {
        uint64_t mode = dtrain__fpmode_enter();
        dtrain__fold_divide_f32(local->sum, total, f->count);
        dtrain__fpmode_restore(mode);
    }
    if (steps && !dtrain__rounds_bounded(local, f, &outer)) {
        dtrain__log(DTRAIN_LOG_WARN,
                    "local_sgd: rank %d: the outer step of round %llu is not finite, so it moves no weights: the "
                    "members' differences are too large",
                    local->rank, (unsigned long long)local->counters[1 + fragment]);
        steps = 0;
    }
    if (f->pack != NULL)
        dtrain__versions_end(dtrain__compressed_versions(f->pack), steps);
    if (steps)
        DTRAIN_IGNORE(dtrain_device_sgd(NULL, local->outer + f->begin, local->sum,
                                        local->velocity != NULL ? local->velocity + f->begin : NULL, f->count, &outer,
                                        local->desc.outer_lr, NULL));
    local->counters[1 + fragment]++;
    local->stats.members = 0;
    f->closed = 1;
    for (int r = 0; r < members; r++) {
        uint64_t flags = all[DTRAIN__ROUNDS_WORDS * r] >> 32;
        if (flags & DTRAIN__ROUNDS_IN)
            local->last[local->stats.members++] = (int)all[DTRAIN__ROUNDS_WORDS * r + 3];
        f->closed &= (flags & DTRAIN__ROUNDS_FINAL) != 0;
    }
    local->stats.rounds++;
    local->stats.taken += mine != 0;
    local->stats.missed += mine == 0;
    if (!mine && f->state != DTRAIN__ROUNDS_LANDED)
        f->behind = 1;
    dtrain__os_unlock(&local->mutex);
    int64_t now = dtrain__os_now_ns();
    local->gap_ns = now - local->made_ns;
    local->made_ns = now;
    dtrain__rounds_tell(local);
}

/* Lets the training thread have the result of a round, which all members have by now. */
static void dtrain__rounds_land(dtrain_local_sgd *local, int fragment, int mine)
{
    dtrain__os_lock(&local->mutex);
    if (mine)
        local->fragments[fragment].state = DTRAIN__ROUNDS_LANDED;
    dtrain__os_unlock(&local->mutex);
    dtrain__rounds_tell(local);
}

/* Takes this rank's difference into a round. Returns its flags; 0: none is handed in. */
static int dtrain__rounds_take(dtrain_local_sgd *local, int fragment, double *weight)
{
    dtrain__rounds_fragment *f = &local->fragments[fragment];
    int flags = 0;
    *weight = 0.0;
    dtrain__os_lock(&local->mutex);
    if (f->state == DTRAIN__ROUNDS_READY) {
        f->state = DTRAIN__ROUNDS_FLYING;
        flags = f->flags;
        *weight = f->handed;
    }
    dtrain__os_unlock(&local->mutex);
    return flags;
}

/* Gathers the hellos of all members. */
static dtrain_status dtrain__rounds_say(dtrain_local_sgd *local, const uint64_t *mine, uint64_t *all, int n)
{
    if (local->server >= 0)
        return dtrain__rounds_say_through(local, mine, all);
    dtrain__rounds_sent(local, DTRAIN__ROUNDS_WORDS * sizeof(uint64_t) * (uint64_t)(n - 1));
    return dtrain_all_gather(local->group, mine, all, DTRAIN__ROUNDS_WORDS * (size_t)n, DTRAIN_U64);
}

/* Exchanges hellos: fragment and flags, round, weight, rank. *total: the sum of all weights, added by the tree. */
static dtrain_status dtrain__rounds_hello(dtrain_local_sgd *local, int fragment, int flags, double weight,
                                          double *total)
{
    uint64_t *mine = local->hellos, *all = mine + DTRAIN__ROUNDS_WORDS;
    int n = dtrain_comm_size(local->group);
    void *outs[1];
    mine[0] = (uint64_t)flags << 32 | (uint64_t)fragment;
    mine[1] = local->counters[1 + fragment];
    memcpy(&mine[2], &weight, sizeof weight);
    mine[3] = (uint64_t)local->rank;
    dtrain_status status = dtrain__rounds_say(local, mine, all, n);
    for (int r = 0; status == DTRAIN_OK && r < n; r++) {
        const uint64_t *said = all + DTRAIN__ROUNDS_WORDS * r;
        double theirs;
        memcpy(&theirs, said + 2, sizeof theirs);
        local->parts[r] = said + 2;
        if ((said[0] & UINT32_MAX) != (uint64_t)fragment || said[1] != mine[1] || said[3] >= (uint64_t)local->ranks)
            status = dtrain__fail(
                NULL, DTRAIN_ERR_MISMATCH,
                "local_sgd: rank %llu is in round %llu of fragment %llu, rank %d in round %llu of fragment %d",
                (unsigned long long)said[3], (unsigned long long)said[1], (unsigned long long)(said[0] & UINT32_MAX),
                local->rank, (unsigned long long)mine[1], fragment);
        else if (!dtrain__train_finite(theirs) || theirs < 0.0)
            status = dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                                  "local_sgd: rank %llu brings a weight of %g, expected a number of at least 0",
                                  (unsigned long long)said[3], theirs);
    }
    outs[0] = total;
    if (status == DTRAIN_OK)
        dtrain__fold(DTRAIN_F64, DTRAIN_SUM, 1.0, local->parts, n, outs, 1, 0, 1);
    return status;
}

/* Sums the members' differences into local->sum. in: this rank's, or NULL; local->sum is zeros then. total: the weight
 * of all. */
static dtrain_status dtrain__rounds_reduce(dtrain_local_sgd *local, dtrain__rounds_fragment *f, const float *in,
                                           double total)
{
    const float *from = in != NULL ? in : local->sum;
    uint64_t sent = dtrain__plan_sent_bytes(f->count, dtrain_comm_size(local->group));
    dtrain_status status;
    if (f->pack != NULL) {
        sent = dtrain_compressed_get_stats(f->pack).sent_bytes;
        dtrain__compressed_lend(f->pack, local->rooms, local->sizes.rooms);
    }
    if (local->server >= 0) {
        status = dtrain__rounds_through(local, f, in, total);
    } else if (f->pack != NULL) {
        status = dtrain__compressed_step(f->pack, from, local->sum, DTRAIN_SUM, total, NULL);
        dtrain__rounds_sent(local, dtrain_compressed_get_stats(f->pack).sent_bytes - sent);
    } else {
        status = dtrain_all_reduce(local->group, from, local->sum, f->count, DTRAIN_F32, DTRAIN_SUM);
        dtrain__rounds_sent(local, sent);
    }
    if (f->pack != NULL)
        dtrain__compressed_lend(f->pack, NULL, NULL);
    return status;
}

/* Tries to make a round with all members that are left. Returns 1 if it was made, 0 if the group must be left, and -1
 * if the others go on without this rank. */
static int dtrain__rounds_round(dtrain_local_sgd *local, int fragment)
{
    dtrain__rounds_fragment *f = &local->fragments[fragment];
    double weight, total = 0.0;
    int mine = dtrain__rounds_take(local, fragment, &weight), members = dtrain_comm_size(local->group);
    const float *in = mine && weight > 0.0 ? local->diff + f->begin : NULL;
    dtrain__rounds_busy(local, 1);
    dtrain_status status = dtrain__rounds_hello(local, fragment, mine, weight, &total);
    if (status == DTRAIN_OK && total > 0.0 && f->count > 0) {
        if (in == NULL)
            memset(local->sum, 0, f->count * sizeof(float));
        status = dtrain__rounds_reduce(local, f, in, total);
    }
    dtrain__error cause = dtrain__thread_error;
    if (status != DTRAIN_OK)
        DTRAIN_IGNORE(dtrain_comm_abort(local->group, cause.text));
    int made = dtrain__rounds_agree(local, status == DTRAIN_OK), stays = made;
    if (made == 1) {
        dtrain__rounds_commit(local, fragment, mine, total, local->hellos + DTRAIN__ROUNDS_WORDS, members);
        stays = dtrain__rounds_agree(local, 1);
        dtrain__rounds_land(local, fragment, mine);
    }
    dtrain__rounds_busy(local, 0);
    if (made == 1)
        return stays;
    dtrain__os_lock(&local->mutex); /* this rank hands its difference in again */
    if (f->pack != NULL)
        dtrain__versions_end(dtrain__compressed_versions(f->pack), 0);
    f->state = mine ? DTRAIN__ROUNDS_READY : f->state;
    local->stats.undone++;
    dtrain__os_unlock(&local->mutex);
    if (made == 0 && status != DTRAIN_OK)
        dtrain__report(&cause);
    else if (made == 0) /* else the agreement's error stays, which says why the others go on without this rank */
        dtrain__fail(NULL, DTRAIN_ERR_PEER_LOST, "local_sgd: round %llu failed on another member",
                     (unsigned long long)local->counters[1 + fragment]);
    return made;
}

/* Makes a round; if that fails, makes new groups. Returns 1 if the round was made. */
static int dtrain__rounds_run(dtrain_local_sgd *local, int fragment)
{
    int made = dtrain__rounds_round(local, fragment);
    if (made == 0)
        dtrain__rounds_regroup(local, 1, dtrain_last_error());
    else if (made < 0 && !dtrain__rounds_stopping(local))
        dtrain__rounds_alone(local, dtrain_last_error());
    return made == 1;
}

/* Makes rounds of one member: the outer step with its own difference. Returns whether there was one. */
static int dtrain__rounds_run_alone(dtrain_local_sgd *local)
{
    int ran = 0;
    for (int i = 0; i < local->desc.fragments; i++) {
        dtrain__rounds_fragment *f = &local->fragments[i];
        uint64_t said[DTRAIN__ROUNDS_WORDS];
        double weight;
        int mine = dtrain__rounds_take(local, i, &weight);
        if (!mine)
            continue;
        if (f->count > 0)
            memcpy(local->sum, local->diff + f->begin, f->count * sizeof(float));
        said[0] = (uint64_t)mine << 32 | (uint64_t)i;
        said[3] = (uint64_t)local->rank;
        dtrain__rounds_commit(local, i, mine, weight, said, 1);
        dtrain__rounds_land(local, i, mine);
        ran = 1;
    }
    return ran;
}

/* Writes this rank's flags of each fragment to words. Returns whether it has handed in any. */
static int dtrain__rounds_flags(dtrain_local_sgd *local, uint64_t *words)
{
    int any = 0;
    dtrain__os_lock(&local->mutex);
    for (int i = 0; i < local->desc.fragments; i++) {
        const dtrain__rounds_fragment *f = &local->fragments[i];
        words[i] = f->state == DTRAIN__ROUNDS_READY ? (uint64_t)f->flags : 0;
        any |= words[i] != 0;
    }
    dtrain__os_unlock(&local->mutex);
    return any;
}

static dtrain_status dtrain__rounds_send(dtrain_local_sgd *local, dtrain_comm *over, int to, const uint64_t *words,
                                         size_t count)
{
    dtrain__rounds_busy(local, 1);
    dtrain_status status = dtrain_send(over, words, count, DTRAIN_U64, to);
    dtrain__rounds_busy(local, 0);
    dtrain__rounds_sent(local, count * sizeof *words);
    return status;
}

/* Returns 1 if a message has arrived, 0 if not, and -1 if the group is broken. A group completes its calls in order, so
 * that a receive can have its message before it counts as done. So it reads the operation's own state, under the lock
 * of whoever drives the group. */
static int dtrain__rounds_came(dtrain_work *work)
{
    dtrain_comm *comm = work->comm;
    if (!dtrain__os_try_lock(&comm->queue.drive))
        return 0; /* asked again soon */
    int came = work->ended || dtrain_work_done(work);
    dtrain__error error = work->op.error;
    dtrain__os_unlock(&comm->queue.drive);
    return came && dtrain__report(&error) != DTRAIN_OK ? -1 : came;
}

/* Returns when a fragment's window opens because of one member's flags; 0: it does not. A member that was late gives
 * the others as much time as there was between the last two rounds. */
static int64_t dtrain__rounds_opens(const dtrain_local_sgd *local, uint64_t flags, int64_t now)
{
    if ((flags & DTRAIN__ROUNDS_IN) == 0 || (flags & DTRAIN__ROUNDS_FINAL) != 0)
        return 0;
    return (flags & DTRAIN__ROUNDS_OPENS) != 0 ? now : now + local->gap_ns;
}

/* Returns the fragment whose round begins, because all have handed in or its window has passed; -1: none yet. *until:
 * when the next window ends. Words of members whose message has not arrived are zero. */
static int dtrain__rounds_choose(dtrain_local_sgd *local, int64_t *until)
{
    int n = dtrain_comm_size(local->up), chosen = -1;
    int64_t now = dtrain__os_now_ns();
    *until = INT64_MAX;
    for (int i = 0; i < local->desc.fragments; i++) {
        dtrain__rounds_fragment *f = &local->fragments[i];
        int64_t ends = INT64_MAX;
        int in = 0;
        for (int r = 0; r < n; r++) {
            uint64_t flags = local->words[r * local->desc.fragments + i];
            int64_t opens = dtrain__rounds_opens(local, flags, now);
            in += (flags & DTRAIN__ROUNDS_IN) != 0;
            f->opened_ns = opens != 0 && (f->opened_ns == 0 || opens < f->opened_ns) ? opens : f->opened_ns;
        }
        if (f->opened_ns != 0 && local->desc.window_ms >= 0)
            ends = f->opened_ns + dtrain__os_ms_to_ns(local->desc.window_ms);
        if ((in == n || ends <= now) && (chosen < 0 || f->opened_ns < local->fragments[chosen].opened_ns))
            chosen = i;
        *until = ends < *until ? ends : *until;
    }
    return chosen;
}

/* Receives who has handed in since the last round. Returns 0 if up is broken. */
static int dtrain__rounds_hear(dtrain_local_sgd *local)
{
    int n = dtrain_comm_size(local->up), fragments = local->desc.fragments;
    size_t bytes = (size_t)fragments * sizeof(uint64_t);
    dtrain__rounds_flags(local, local->words);
    for (int r = 1; r < n; r++) {
        uint64_t *words = local->words + r * fragments, *inbox = local->inbox + r * fragments;
        if (local->works[r] == NULL) {
            memset(words, 0, bytes);
            if (dtrain_recv_async(local->up, inbox, (size_t)fragments, DTRAIN_U64, r, &local->works[r]) != DTRAIN_OK)
                return 0;
        }
        int came = dtrain__rounds_came(local->works[r]);
        if (came < 0)
            return 0;
        if (came)
            memcpy(words, inbox, bytes);
    }
    return 1;
}

/* After a round: waits for the messages of all members, which have sent theirs or are about to. Returns 0 if up is
 * broken. */
static int dtrain__rounds_heard_all(dtrain_local_sgd *local)
{
    dtrain_status status = DTRAIN_OK;
    dtrain__rounds_busy(local, 1);
    for (int r = 1; r < dtrain_comm_size(local->up) && status == DTRAIN_OK; r++) {
        status = dtrain_work_wait(local->works[r]);
        local->works[r] = NULL;
    }
    dtrain__rounds_busy(local, 0);
    for (int i = 0; i < local->desc.fragments; i++)
        local->fragments[i].opened_ns = 0;
    return status == DTRAIN_OK;
}

/* Opens a round: sends its fragment and number to all others. */
static dtrain_status dtrain__rounds_open(dtrain_local_sgd *local, uint64_t fragment, uint64_t round)
{
    dtrain_status status = DTRAIN_OK;
    local->opening[0] = fragment;
    local->opening[1] = round;
    for (int r = 1; r < dtrain_comm_size(local->down) && status == DTRAIN_OK; r++)
        status = dtrain__rounds_send(local, local->down, r, local->opening, 2);
    return status;
}

/* Whether all have handed in, but different fragments, and no window is open that would end this. Then rank 0 asks all
 * to hand in again, because a member may have another fragment by now. *until: when it may ask next. */
static int dtrain__rounds_crossed(const dtrain_local_sgd *local, int64_t *until)
{
    int n = dtrain_comm_size(local->up), fragments = local->desc.fragments;
    if (fragments == 1 || *until != INT64_MAX)
        return 0;
    for (int r = 0; r < n; r++) {
        uint64_t any = 0;
        for (int i = 0; i < fragments; i++)
            any |= local->words[r * fragments + i];
        if (any == 0)
            return 0;
    }
    *until = local->recalled_ns + DTRAIN__ROUNDS_RECALL_NS;
    return dtrain__os_now_ns() >= *until;
}

/* A turn of rank 0 of up: receives who has handed in, and opens rounds. Returns 1 if it did something, 0 if not, and -1
 * if the groups are broken. */
static int dtrain__rounds_lead(dtrain_local_sgd *local, int64_t *until)
{
    dtrain__os_lock(&local->mutex);
    int recalls = local->recalls;
    dtrain__os_unlock(&local->mutex);
    if (!dtrain__rounds_hear(local))
        return -1;
    int fragment = recalls ? -1 : dtrain__rounds_choose(local, until);
    if (fragment < 0 && !recalls && !dtrain__rounds_crossed(local, until))
        return 0;
    if (fragment < 0) {
        local->recalled_ns = dtrain__os_now_ns();
        if (dtrain__rounds_open(local, DTRAIN__ROUNDS_RECALL, 0) != DTRAIN_OK || !dtrain__rounds_heard_all(local))
            return -1;
        dtrain__os_lock(&local->mutex);
        local->recalls = recalls ? 0 : local->recalls;
        dtrain__os_unlock(&local->mutex);
        dtrain__rounds_tell(local);
        return 1;
    }
    if (dtrain__rounds_open(local, (uint64_t)fragment, local->counters[1 + fragment]) != DTRAIN_OK)
        return -1;
    return !dtrain__rounds_run(local, fragment) || dtrain__rounds_heard_all(local) ? 1 : -1;
}

/* A turn of the others: they hand in, and take part once a round is opened. Returns as dtrain__rounds_lead. */
static int dtrain__rounds_follow(dtrain_local_sgd *local)
{
    uint64_t *mine = local->words, *opening = local->opening;
    int any = dtrain__rounds_flags(local, mine);
    if (local->works[0] == NULL &&
        dtrain_recv_async(local->down, opening, 2, DTRAIN_U64, 0, &local->works[0]) != DTRAIN_OK)
        return -1;
    int opened = dtrain_work_done(local->works[0]);
    if (opened) {
        dtrain_status status = dtrain_work_wait(local->works[0]);
        local->works[0] = NULL;
        if (status != DTRAIN_OK)
            return -1;
    }
    if (!local->told && (any || opened)) {
        if (dtrain__rounds_send(local, local->up, 0, mine, (size_t)local->desc.fragments) != DTRAIN_OK)
            return -1;
        local->told = 1;
    }
    if (!opened)
        return 0;
    if (opening[0] == DTRAIN__ROUNDS_RECALL) {
        local->told = 0;
        return 1;
    }
    if (opening[0] >= (uint64_t)local->desc.fragments || opening[1] != local->counters[1 + opening[0]]) {
        dtrain__fail(NULL, DTRAIN_ERR_CORRUPT,
                     "local_sgd: rank 0 of the members opened round %llu of fragment %llu, which rank %d does not have",
                     (unsigned long long)opening[1], (unsigned long long)opening[0], local->rank);
        return -1;
    }
    if (dtrain__rounds_run(local, (int)opening[0]))
        local->told = 0;
    return 1;
}

/* A turn of the worker. Messages of a group do not wake it, so that it polls: every 0.5 ms, and after 100 turns without
 * work every 5 ms. */
static int64_t dtrain__rounds_turn(void *owner)
{
    dtrain_local_sgd *local = (dtrain_local_sgd *)owner;
    int64_t until = INT64_MAX, wait;
    int did;
    if (local->up == NULL) {
        did = dtrain__rounds_run_alone(local);
    } else {
        int leads = dtrain_comm_rank(local->up) == 0;
        /* rank 0 may have no receive under way that would tell it of a lost member */
        did = dtrain__group_gone(local->up) != DTRAIN_OK ? -1
              : leads                                    ? dtrain__rounds_lead(local, &until)
                                                         : dtrain__rounds_follow(local);
        if (did < 0 && !dtrain__rounds_stopping(local))
            dtrain__rounds_regroup(local, 0, dtrain_last_error());
    }
    local->idle = did != 0 ? 0 : local->idle + 1;
    if (did != 0)
        return 0;
    wait = local->up == NULL ? INT64_MAX : dtrain__os_now_ns() + (local->idle < 100 ? 500000 : 5000000);
    return until < wait ? until : wait;
}

#endif
