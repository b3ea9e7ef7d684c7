/* ---- >>rounds-calls ----
 * The public calls of local SGD: creation, the step of the training thread, waiting for rounds, and the end. */
#ifndef DTRAIN__ROUNDS_CALLS
#define DTRAIN__ROUNDS_CALLS
#include "rounds_thread.c"

/* Frees everything but the groups. */
static void dtrain__rounds_free(dtrain_local_sgd *local)
{
    dtrain_allocator *allocator = local->allocator;
    for (int i = 0; local->fragments != NULL && i < local->desc.fragments; i++)
        dtrain_compressed_destroy(local->fragments[i].pack);
    dtrain__free(allocator, local->block);
    dtrain__free(allocator, local->params.ranges);
    dtrain__os_mutex_free(&local->mutex);
    dtrain__free(allocator, local);
}

/* Assigns elements to fragments, and makes the packing state of those that travel packed. */
static dtrain_status dtrain__rounds_lay_out(dtrain_local_sgd *local, dtrain_comm *comm)
{
    int64_t n = local->desc.fragments, steps = local->desc.steps;
    size_t at = 0;
    for (int i = 0; i < local->desc.fragments; i++) {
        dtrain__rounds_fragment *f = &local->fragments[i];
        dtrain_compressor q;
        f->begin = at;
        f->count = dtrain__rounds_count(&local->params, local->desc.fragments, i);
        f->boundary = (int)((i + 1) * steps / n % steps);
        at += f->count;
        if (!dtrain__rounds_packs(&local->desc, local->ranks, f->count))
            continue;
        dtrain_status status = dtrain__rounds_compressor(&local->compress, local->allocator, &q);
        if (status == DTRAIN_OK)
            status = dtrain_compressed_create(&f->pack, comm, f->count, &q, &local->compress.feedback);
        if (status != DTRAIN_OK)
            return status;
    }
    return DTRAIN_OK;
}

/* Allocates the block that dtrain__rounds_plan has sized. */
static dtrain_status dtrain__rounds_allocate(dtrain_local_sgd *local, dtrain_comm *comm)
{
    local->block = (unsigned char *)dtrain__alloc(local->allocator, dtrain__rounds_place(local, NULL));
    if (local->block == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_local_sgd_create: no memory for %zu bytes",
                            local->sizes.all);
    dtrain__rounds_place(local, local->block);
    return dtrain__rounds_lay_out(local, comm);
}

static dtrain_status dtrain__rounds_init(dtrain_local_sgd *local, dtrain_comm *comm, const dtrain_param *table,
                                         size_t count, const dtrain_local_sgd_desc *desc)
{
    local->desc = dtrain__rounds_defaults(desc);
    if (local->desc.compress != NULL) {
        local->compress = *local->desc.compress;
        local->desc.compress = &local->compress;
    }
    dtrain_status status =
        dtrain__params_create(&local->params, table, count, local->allocator, "dtrain_local_sgd_create");
    if (status == DTRAIN_OK)
        status = dtrain__params_on_cpu(table, count, "dtrain_local_sgd_create");
    if (status == DTRAIN_OK)
        status = dtrain__rounds_check(&local->desc, &local->params);
    if (status == DTRAIN_OK)
        status = dtrain__rounds_plan(local);
    if (status != DTRAIN_OK)
        return status;
    if (local->desc.through_server)
        local->server_origin = dtrain__seat_world(comm->seat, local->desc.server);
    if (local->ranks > 1 && comm->desc.progress == DTRAIN_PROGRESS_POLL)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "dtrain_local_sgd_create: the group's progress is DTRAIN_PROGRESS_POLL; rounds need a "
                            "service thread: create the group with DTRAIN_PROGRESS_THREAD");
    if (local->desc.max_bytes > 0 && local->sizes.all > local->desc.max_bytes)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY,
                            "dtrain_local_sgd_create: max_bytes is %zu, %zu bytes are needed: raise it, or set more "
                            "fragments or no_momentum, which need fewer",
                            local->desc.max_bytes, local->sizes.all);
    return dtrain__rounds_allocate(local, comm);
}

static const dtrain__alike_field dtrain__rounds_fields[] = {
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, steps, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, outer_lr, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, outer_momentum, FLOAT),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, no_momentum, OWN), /* outer_momentum is 0 then */
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, warmup_rounds, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, fragments, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, overlap, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, mixing, OWN),   /* concerns this rank's weights only */
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, blocking, OWN), /* concerns this rank's waits only */
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, compress, OWN), /* compared field by field elsewhere */
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, window_ms, NUMBER),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, max_bytes, OWN), /* concerns this rank's memory only */
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, no_broadcast, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, through_server, FLAG),
    DTRAIN__ALIKE_FIELD(dtrain_local_sgd_desc, server, NUMBER)};

enum { DTRAIN__ROUNDS_FIELDS = sizeof dtrain__rounds_fields / sizeof dtrain__rounds_fields[0] };

/* Broadcasts the parameters, and makes the groups and the thread of the object. */
static dtrain_status dtrain__rounds_join(dtrain_local_sgd *local, dtrain_comm *comm, const dtrain_param *table,
                                         size_t count)
{
    dtrain_status status = DTRAIN_OK;
    dtrain_comm *group = NULL, *up = NULL, *down = NULL;
    for (size_t i = 0; status == DTRAIN_OK && i < count && !local->desc.no_broadcast; i++)
        status = dtrain_broadcast(comm, table[i].data, dtrain_param_elements(&table[i]), table[i].dtype, 0);
    if (status == DTRAIN_OK && local->ranks > 1)
        status = dtrain_comm_split(comm, 0, 0, &group);
    if (group != NULL)
        group->apart = 1; /* the thread uses it, and the groups made from it */
    if (status == DTRAIN_OK && local->ranks > 1)
        status = dtrain__rounds_talk(local, group, &up, &down);
    if (status != DTRAIN_OK) {
        dtrain__error cause = dtrain__thread_error;
        dtrain__group_close(group);
        return dtrain__report(&cause);
    }
    dtrain__rounds_set_groups(local, group, up, down);
    local->made_ns = dtrain__os_now_ns();
    for (int i = 0; i < local->desc.fragments; i++)
        dtrain__rounds_walk(local, i, dtrain__rounds_start);
    local->worker.owner = local;
    local->worker.turn = dtrain__rounds_turn;
    int error = dtrain__worker_start(&local->worker);
    if (error != 0)
        return dtrain__fail(NULL, DTRAIN_ERR_IO, "dtrain_local_sgd_create: the system gives no thread: %s",
                            dtrain__os_error_text(error));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_local_sgd_create(dtrain_local_sgd **local, dtrain_comm *comm, const dtrain_param *table,
                                                 size_t count, const dtrain_local_sgd_desc *desc)
{
    if (local == NULL || comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_local_sgd_create: %s is NULL, expected %s",
                            local == NULL ? "local" : "comm", local == NULL ? "a place for the object" : "a group");
    *local = NULL;
    dtrain_allocator *allocator = dtrain_comm_allocator(comm);
    dtrain_local_sgd *made = (dtrain_local_sgd *)dtrain__alloc(allocator, sizeof *made);
    if (made == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "dtrain_local_sgd_create: no memory for %zu bytes", sizeof *made);
    made->allocator = allocator;
    made->comm = comm;
    made->rank = dtrain_comm_rank(comm);
    made->ranks = dtrain_comm_size(comm);
    made->timeout_ms = comm->desc.timeout_ms;
    made->server = -1;
    dtrain__os_mutex_init(&made->mutex);
    dtrain_status status = dtrain__rounds_init(made, comm, table, count, desc);
    dtrain__params_given given = {
        table, count, 0, &made->desc, dtrain__rounds_fields, DTRAIN__ROUNDS_FIELDS, made->desc.compress};
    status = dtrain__compression_meet(
        comm, "dtrain_local_sgd_create",
        "give all ranks the same table, and the same desc but for mixing, blocking and max_bytes", given, status);
    if (status == DTRAIN_OK)
        status = dtrain__rounds_join(made, comm, table, count);
    if (status == DTRAIN_OK) {
        *local = made;
        return DTRAIN_OK;
    }
    dtrain__error cause = dtrain__thread_error;
    dtrain_local_sgd_destroy(made);
    return dtrain__report(&cause);
}

/* A training thread waits until news changes. */
typedef struct dtrain__rounds_wait {
    dtrain_local_sgd *local;
    uint32_t news;
} dtrain__rounds_wait;

static int dtrain__rounds_has_news(void *pointer)
{
    const dtrain__rounds_wait *wait = (const dtrain__rounds_wait *)pointer;
    return DTRAIN__ATOMIC_LOAD(&wait->local->news, SEQ_CST) != wait->news;
}

/* Whether a fragment's difference is handed in or in a round; -1: that of any fragment. *news: its value before. */
static int dtrain__rounds_under_way(dtrain_local_sgd *local, int fragment, uint32_t *news)
{
    int under_way = 0;
    *news = DTRAIN__ATOMIC_LOAD(&local->news, SEQ_CST);
    dtrain__os_lock(&local->mutex);
    for (int i = 0; i < local->desc.fragments; i++)
        under_way |= (fragment < 0 || i == fragment) && (local->fragments[i].state == DTRAIN__ROUNDS_READY ||
                                                         local->fragments[i].state == DTRAIN__ROUNDS_FLYING);
    dtrain__os_unlock(&local->mutex);
    return under_way;
}

static void dtrain__rounds_wait_for_news(dtrain_local_sgd *local, uint32_t news, int64_t until_ns)
{
    dtrain__rounds_wait wait = {local, news};
    int64_t began = dtrain__os_now_ns();
    for (unsigned turn = 0; !dtrain__rounds_has_news(&wait) && dtrain__os_now_ns() < until_ns; turn++)
        dtrain__bell_wait(&local->to_caller, turn, until_ns, dtrain__rounds_has_news, &wait);
    dtrain__os_lock(&local->mutex);
    if (local->group != NULL)
        dtrain__work_blocked(local->group, dtrain__os_now_ns() - began);
    dtrain__os_unlock(&local->mutex);
}

/* Returns the deadline of a round that begins now, with its window or without. */
static int64_t dtrain__rounds_deadline(const dtrain_local_sgd *local, int window)
{
    int64_t now = dtrain__os_now_ns();
    if (local->timeout_ms < 0 || (window && local->desc.window_ms < 0))
        return INT64_MAX;
    now += dtrain__os_ms_to_ns(local->timeout_ms);
    return window ? now + dtrain__os_ms_to_ns(local->desc.window_ms) : now;
}

/* Waits until the round of a fragment (-1: of every fragment) is over. Returns 0 if it takes too long. */
static int dtrain__rounds_wait_round(dtrain_local_sgd *local, int fragment)
{
    int64_t until = dtrain__rounds_deadline(local, 1);
    uint32_t news;
    while (dtrain__rounds_under_way(local, fragment, &news)) {
        if (dtrain__os_now_ns() >= until)
            return 0;
        dtrain__rounds_wait_for_news(local, news, until);
    }
    return 1;
}

/* A fragment's part of a step: applies a result if there is one, and takes a snapshot at the boundary. Returns 1 if
 * this step must wait for the fragment's round. */
static int dtrain__rounds_step_fragment(dtrain_local_sgd *local, int fragment)
{
    dtrain__rounds_fragment *f = &local->fragments[fragment];
    uint64_t step = local->counters[0], overlap = (uint64_t)local->desc.overlap;
    int waits;
    dtrain__os_lock(&local->mutex);
    if (step >= f->snapshot + overlap)
        dtrain__rounds_apply(local, fragment);
    f->due |= step % (uint64_t)local->desc.steps == (uint64_t)f->boundary;
    if (f->due && (f->state == DTRAIN__ROUNDS_IDLE || f->state == DTRAIN__ROUNDS_READY))
        dtrain__rounds_snapshot(local, fragment, 0);
    waits = local->desc.blocking && f->state != DTRAIN__ROUNDS_IDLE && step == f->snapshot + overlap;
    dtrain__os_unlock(&local->mutex);
    return waits;
}

DTRAIN_API dtrain_status dtrain_local_sgd_step(dtrain_local_sgd *local, double weight)
{
    if (local == NULL || !dtrain__train_finite(weight) || weight < 0.0)
        return dtrain__fail(local != NULL ? &local->error : NULL, DTRAIN_ERR_INVALID,
                            "dtrain_local_sgd_step: %s, weight is %g; expected an object, and a weight of at least 0",
                            local == NULL ? "local is NULL" : "an object", weight);
    dtrain__os_lock(&local->mutex);
    local->counters[0]++;
    local->stats.steps++;
    local->stats.dense_bytes += dtrain__plan_sent_bytes(local->sizes.total, local->ranks);
    for (int i = 0; i < local->desc.fragments; i++)
        local->weights[i] += weight;
    dtrain__os_unlock(&local->mutex);
    for (int i = 0; i < local->desc.fragments; i++) {
        if (!dtrain__rounds_step_fragment(local, i))
            continue;
        if (!dtrain__rounds_wait_round(local, i))
            dtrain__log(DTRAIN_LOG_WARN,
                        "local_sgd: rank %d goes on without a round of fragment %d, which did not come within "
                        "window_ms and timeout_ms",
                        local->rank, i);
        dtrain__os_lock(&local->mutex);
        dtrain__rounds_apply(local, i);
        dtrain__os_unlock(&local->mutex);
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_local_sgd_sync(dtrain_local_sgd *local)
{
    if (local == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_local_sgd_sync: the object is NULL: create it first");
    int over = dtrain__rounds_wait_round(local, -1);
    dtrain__os_lock(&local->mutex);
    for (int i = 0; i < local->desc.fragments; i++)
        dtrain__rounds_apply(local, i);
    dtrain__os_unlock(&local->mutex);
    return over ? DTRAIN_OK
                : dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                               "dtrain_local_sgd_sync on rank %d: no round came within window_ms and timeout_ms; other "
                               "members are late. Call it again, or train on",
                               local->rank);
}

/* Applies results, and hands in all fragments for the last time. Returns 1 once all members have finished. *made: the
 * number of rounds so far. */
static int dtrain__rounds_close(dtrain_local_sgd *local, uint64_t *made)
{
    int closed = 1;
    dtrain__os_lock(&local->mutex);
    for (int i = 0; i < local->desc.fragments; i++) {
        dtrain__rounds_fragment *f = &local->fragments[i];
        dtrain__rounds_apply(local, i);
        int all = f->state == DTRAIN__ROUNDS_IDLE && f->closed && f->snapshot == local->counters[0];
        if (!all && (f->state == DTRAIN__ROUNDS_IDLE ||
                     (f->state == DTRAIN__ROUNDS_READY && (f->flags & DTRAIN__ROUNDS_FINAL) == 0)))
            dtrain__rounds_snapshot(local, i, 1);
        closed &= all;
    }
    *made = local->stats.rounds;
    dtrain__os_unlock(&local->mutex);
    return closed;
}

DTRAIN_API dtrain_status dtrain_local_sgd_finish(dtrain_local_sgd *local)
{
    uint64_t before = 0, made = 0;
    if (local == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_local_sgd_finish: the object is NULL: create it first");
    int64_t until = dtrain__rounds_deadline(local, 0);
    for (;;) {
        uint32_t news = DTRAIN__ATOMIC_LOAD(&local->news, SEQ_CST);
        if (dtrain__rounds_close(local, &made))
            return DTRAIN_OK;
        until = made != before ? dtrain__rounds_deadline(local, 0) : until;
        before = made;
        if (dtrain__os_now_ns() >= until)
            return dtrain__fail(
                NULL, DTRAIN_ERR_TIMEOUT,
                "dtrain_local_sgd_finish on rank %d: no round was made within timeout_ms: other members "
                "have neither finished nor handed in. Call it again to go on waiting",
                local->rank);
        dtrain__rounds_wait_for_news(local, news, until);
    }
}

DTRAIN_API dtrain_local_sgd_stats dtrain_local_sgd_get_stats(dtrain_local_sgd *local)
{
    dtrain_local_sgd_stats stats;
    memset(&stats, 0, sizeof stats);
    if (local == NULL)
        return stats;
    dtrain__os_lock(&local->mutex);
    stats = local->stats;
    dtrain__os_unlock(&local->mutex);
    return stats;
}

DTRAIN_API int dtrain_local_sgd_members(dtrain_local_sgd *local, int *ranks)
{
    int count = 0;
    if (local == NULL || ranks == NULL)
        return 0;
    dtrain__os_lock(&local->mutex);
    for (; count < local->stats.members; count++)
        ranks[count] = local->last[count];
    dtrain__os_unlock(&local->mutex);
    return count;
}

/* Takes back what this rank has handed in, and waits for rounds that have it. Returns 0 if that takes too long. */
static int dtrain__rounds_take_back(dtrain_local_sgd *local)
{
    int64_t until = dtrain__rounds_deadline(local, 0);
    for (;;) {
        uint32_t news = DTRAIN__ATOMIC_LOAD(&local->news, SEQ_CST);
        dtrain__os_lock(&local->mutex);
        int flying = dtrain__rounds_withdraw(local);
        dtrain__os_unlock(&local->mutex);
        if (!flying || dtrain__os_now_ns() >= until)
            return !flying;
        dtrain__rounds_wait_for_news(local, news, until);
    }
}

/* Waits until the thread of rank 0 of up has heard of all members again. By then each has made the rounds that were
 * opened before. Returns at once on the others; returns 0 if it takes too long. */
static int dtrain__rounds_recall(dtrain_local_sgd *local)
{
    int64_t until = dtrain__rounds_deadline(local, 0);
    dtrain__os_lock(&local->mutex);
    local->recalls = 1;
    dtrain__os_unlock(&local->mutex);
    dtrain__worker_call(&local->worker);
    for (;;) {
        uint32_t news = DTRAIN__ATOMIC_LOAD(&local->news, SEQ_CST);
        dtrain__os_lock(&local->mutex);
        local->recalls &= local->up != NULL && dtrain_comm_rank(local->up) == 0;
        int waits = local->recalls;
        dtrain__os_unlock(&local->mutex);
        if (!waits || dtrain__os_now_ns() >= until)
            return !waits;
        dtrain__rounds_wait_for_news(local, news, until);
    }
}

/* Ends all rounds in two turns. The caller has all members agree after each. Then no round is under way on any, and
 * none begins until one makes a step. */
static dtrain_status dtrain__rounds_end(dtrain_local_sgd *local, int turn)
{
    return (turn == 0 ? dtrain__rounds_take_back(local) : dtrain__rounds_recall(local))
               ? DTRAIN_OK
               : dtrain__fail(
                     NULL, DTRAIN_ERR_TIMEOUT,
                     "local_sgd on rank %d: a round that had begun did not end within timeout_ms: call it again",
                     local->rank);
}

/* Has all ranks of the caller's group come here, and returns an error on all if one has one. */
static dtrain_status dtrain__rounds_meet(dtrain_local_sgd *local, dtrain_status status)
{
    dtrain__error cause = dtrain__thread_error;
    uint64_t late = status != DTRAIN_OK;
    dtrain_status met = dtrain_all_reduce(local->comm, &late, &late, 1, DTRAIN_U64, DTRAIN_MAX);
    if (met != DTRAIN_OK || !late)
        return met;
    return status != DTRAIN_OK ? dtrain__report(&cause)
                               : dtrain__fail(NULL, DTRAIN_ERR_TIMEOUT,
                                              "local_sgd on rank %d: a round that had begun did not end within "
                                              "timeout_ms on another rank: call it again",
                                              local->rank);
}

/* Starts from the parameters as they are, as a new object does. No round is under way. The mutex is held. */
static dtrain_status dtrain__rounds_restart(dtrain_local_sgd *local)
{
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < local->desc.fragments; i++) {
        dtrain__rounds_walk(local, i, dtrain__rounds_start);
        local->weights[i] = 0.0;
        if (local->fragments[i].pack != NULL && status == DTRAIN_OK)
            status = dtrain__compressed_forget(local->fragments[i].pack);
    }
    if (local->velocity != NULL)
        memset(local->velocity, 0, local->sizes.total * sizeof(float));
    return status;
}

/* Goes on from other outer weights: results that were not applied are of the old ones. The mutex is held. */
static void dtrain__rounds_turn_over(dtrain_local_sgd *local)
{
    for (int i = 0; i < local->desc.fragments; i++) {
        dtrain__rounds_fragment *f = &local->fragments[i];
        f->state = DTRAIN__ROUNDS_IDLE;
        f->snapshot = local->counters[0];
        f->due = f->behind = f->closed = f->astray = 0;
    }
}

DTRAIN_API dtrain_status dtrain_local_sgd_publish(dtrain_local_sgd *local)
{
    if (local == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_local_sgd_publish: the object is NULL: create it first");
    dtrain_status status = dtrain__group_whole(local->comm, "dtrain_local_sgd_publish");
    for (int turn = 0; status == DTRAIN_OK && turn < 2; turn++)
        status = dtrain__rounds_meet(local, dtrain__rounds_end(local, turn));
    for (size_t i = 0; status == DTRAIN_OK && i < local->params.range_count && !local->desc.no_broadcast; i++)
        status =
            dtrain_broadcast(local->comm, local->params.ranges[i].data, local->params.ranges[i].count, DTRAIN_F32, 0);
    if (status != DTRAIN_OK)
        return status;
    dtrain__os_lock(&local->mutex);
    dtrain__rounds_turn_over(local);
    status = dtrain__rounds_restart(local);
    dtrain__os_unlock(&local->mutex);
    dtrain_status met = dtrain_barrier(local->comm); /* a round before that would be lost on this rank alone */
    return status == DTRAIN_OK ? met : status;
}

/* The load makes the agreements: ranks that are lost take no part in it, but count in the caller's group. */
static dtrain_status dtrain__rounds_loading(const dtrain_pieces *list, int turn)
{
    return dtrain__rounds_end((dtrain_local_sgd *)list->object, turn);
}

/* After a load: of a file without this state the parameters alone, which it starts from. The load ends with an
 * agreement, so that no round begins before all are here. */
static dtrain_status dtrain__rounds_loaded(const dtrain_pieces *list, const dtrain__lister *lister)
{
    dtrain_local_sgd *local = (dtrain_local_sgd *)list->object;
    dtrain_status status = DTRAIN_OK;
    int forgets = 0;
    dtrain__os_lock(&local->mutex);
    int whole = dtrain__pieces_got(lister, local->outer) && dtrain__pieces_got(lister, local->base) &&
                dtrain__pieces_got(lister, local->weights) && dtrain__pieces_got(lister, local->counters);
    if (!whole) {
        status = dtrain__rounds_restart(local);
        memset(local->counters, 0, (size_t)(local->desc.fragments + 1) * sizeof *local->counters);
    } else if (local->velocity != NULL && !dtrain__pieces_got(lister, local->velocity))
        memset(local->velocity, 0, local->sizes.total * sizeof(float));
    dtrain__rounds_turn_over(local);
    for (int i = 0; i < local->desc.fragments && status == DTRAIN_OK; i++) {
        dtrain_compressed *pack = local->fragments[i].pack;
        if (pack == NULL || dtrain__compressed_residual(pack) == NULL ||
            (dtrain__compression_known(dtrain__compressed_unit(pack), lister) && dtrain__compressed_got(pack, lister)))
            continue;
        status = dtrain__compressed_forget(pack);
        forgets = 1;
    }
    dtrain__os_unlock(&local->mutex);
    if (forgets)
        dtrain__compression_say_forgotten(local->rank, lister);
    return status;
}

static dtrain_status dtrain__rounds_list(const dtrain_pieces *list, dtrain__lister *lister)
{
    dtrain_local_sgd *l = (dtrain_local_sgd *)list->object;
    dtrain__pieces_row row = {l->rank, l->ranks, 1, 0, 0};
    size_t fragments = (size_t)l->desc.fragments;
    uint32_t news;
    if (lister->got == NULL && dtrain__rounds_under_way(l, -1, &news)) /* a load ends them itself */
        return dtrain__fail(
            NULL, DTRAIN_ERR_INVALID,
            "dtrain_local_sgd_pieces: a round of rank %d is under way: call dtrain_local_sgd_sync on every "
            "rank first",
            l->rank);
    dtrain__pieces_put_row(lister, &row, "outer", DTRAIN_F32, l->outer, l->sizes.total, NULL);
    row.number++;
    dtrain__pieces_put_row(lister, &row, "momentum", DTRAIN_F32, l->velocity, l->sizes.total, NULL);
    row.number += l->velocity != NULL;
    dtrain__pieces_put_row(lister, &row, "base", DTRAIN_F32, l->base, l->sizes.total, NULL);
    row.number++;
    dtrain__pieces_put_row(lister, &row, "weights", DTRAIN_F64, l->weights, fragments, NULL);
    row.number++;
    dtrain__pieces_put_row(lister, &row, "counters", DTRAIN_U64, l->counters, fragments + 1, NULL);
    for (int i = 0; i < l->desc.fragments; i++) {
        char name[24];
        const dtrain__rounds_fragment *f = &l->fragments[i];
        dtrain__os_lock(&l->mutex); /* a load lists them while a round may end, and then again */
        const float *residual = f->pack != NULL ? dtrain__compressed_residual(f->pack) : NULL;
        const double *unit = f->pack != NULL ? dtrain__compressed_unit(f->pack) : NULL;
        dtrain__os_unlock(&l->mutex);
        snprintf(name, sizeof name, "residual.%d", i);
        row.number += residual != NULL;
        dtrain__pieces_put_row(lister, &row, name, DTRAIN_F32, residual, f->count, NULL);
        snprintf(name, sizeof name, "unit.%d", i);
        if (residual != NULL)
            dtrain__pieces_put_optional(lister, &row, name, DTRAIN_F64, unit, 1);
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_pieces dtrain_local_sgd_pieces(dtrain_local_sgd *local)
{
    dtrain_pieces made = dtrain__pieces_make(local, dtrain__rounds_list, dtrain__rounds_loaded);
    made.loading = dtrain__rounds_loading;
    return made;
}

DTRAIN_API void dtrain_local_sgd_destroy(dtrain_local_sgd *local)
{
    if (local == NULL)
        return;
    if (dtrain__worker_runs(&local->worker)) {
        dtrain__os_lock(&local->mutex);
        dtrain__worker_stop(&local->worker);
        dtrain__rounds_cut(local);
        dtrain__os_unlock(&local->mutex);
        dtrain__worker_end(&local->worker);
    }
    dtrain__group_close(local->up);
    dtrain__group_close(local->down);
    dtrain__group_close(local->group);
    dtrain__rounds_free(local);
}

#endif
