/* ---- >>survive ----
 * Going on when ranks are lost: the survivors agree (see >>consent; on a board its mutex is the leader), make a group
 * of those that are left, and copy the state of the furthest to the rest. Works on a broken group: nothing here uses
 * its operations, but dtrain_resync, which is for the new one. */
#ifndef DTRAIN__SURVIVE
#define DTRAIN__SURVIVE
#include "split.c"

enum { DTRAIN__CONSENT_SHRINK = 1, DTRAIN__CONSENT_AGREE };

/* A rank's part in an agreement, and what came of it. */
typedef struct dtrain__accord {
    dtrain_comm *comm;
    const char *call;
    int kind;
    uint64_t flags, id, number;
    dtrain_status status;
    int awaited;
    int given_up;        /* by the others */
    dtrain__draft draft; /* who goes on */
} dtrain__accord;

/* Looks whether all that have not left the board have voted, and decides; the caller holds the family's mutex. */
static void dtrain__accord_count(dtrain__board *board, uint64_t number)
{
    uint64_t flags = UINT64_MAX;
    int kind = 0, mixed = 0;
    for (int rank = 0; rank < board->size; rank++) {
        dtrain__slot *slot = &board->slots[rank];
        if (__atomic_load_n(&slot->left, __ATOMIC_SEQ_CST))
            continue;
        if (slot->voted < number)
            return;
        mixed |= kind != 0 && kind != slot->vote_kind;
        kind = slot->vote_kind;
        flags &= slot->vote_flags;
    }
    for (int rank = 0; rank < board->size; rank++)
        if (!__atomic_load_n(&board->slots[rank].left, __ATOMIC_SEQ_CST))
            board->slots[rank].goes_on = number;
    board->decided = number;
    board->decided_flags = flags;
    board->decided_mixed = mixed;
    board->decided_id = dtrain__hub_group_id(++board->family->serial, 0);
    dtrain__bell_ring(&board->bell);
}

/* Whether the board has decided; then takes the decision over. */
static int dtrain__accord_on_board(void *pointer)
{
    dtrain__accord *accord = (dtrain__accord *)pointer;
    dtrain__board *board = accord->comm->transport.board;
    int done;
    pthread_mutex_lock(&board->family->mutex);
    if (board->decided < accord->number)
        dtrain__accord_count(board, accord->number);
    done = board->decided >= accord->number;
    accord->status = board->decided_mixed ? DTRAIN_ERR_MISMATCH : DTRAIN_OK;
    accord->flags = board->decided_flags;
    accord->id = board->decided_id;
    accord->awaited = -1;
    accord->draft.size = 0;
    for (int rank = 0; rank < board->size; rank++) {
        if (done && board->slots[rank].goes_on == accord->number)
            dtrain__draft_add(&accord->draft, rank, board->slots[rank].origin);
        else if (!done && accord->awaited < 0 && board->slots[rank].voted < accord->number &&
                 !__atomic_load_n(&board->slots[rank].left, __ATOMIC_SEQ_CST))
            accord->awaited = rank;
    }
    pthread_mutex_unlock(&board->family->mutex);
    return done;
}

static int dtrain__accord_vote_on_board(dtrain__accord *accord, int64_t deadline_ns)
{
    dtrain__board *board = accord->comm->transport.board;
    dtrain__slot *slot = &board->slots[accord->comm->rank];
    pthread_mutex_lock(&board->family->mutex);
    slot->voted = accord->number;
    slot->vote_kind = accord->kind;
    slot->vote_flags = accord->flags;
    pthread_mutex_unlock(&board->family->mutex);
    dtrain__bell_ring(&board->bell);
    for (unsigned turn = 0; !dtrain__accord_on_board(accord); turn++) {
        if (dtrain__os_now_ns() >= deadline_ns)
            return 0;
        dtrain__bell_wait(&board->bell, turn, deadline_ns, dtrain__accord_on_board, accord);
    }
    return 1;
}

/* Whether the hub has heard of the decision; then takes it over. */
static int dtrain__accord_on_hub(dtrain__accord *accord)
{
    dtrain__channel *channel = accord->comm->socket;
    dtrain__hub *hub = channel->hub;
    dtrain__consent *consent;
    int done;
    pthread_mutex_lock(&hub->mutex);
    consent = dtrain__consent_find(hub, channel->id, accord->number);
    if (consent != NULL && !consent->decided)
        accord->awaited = dtrain__hub_leads(hub) ? dtrain__consent_awaits(hub, consent) : -1;
    accord->given_up = hub->given_up;
    done = (consent != NULL && consent->decided) || hub->given_up;
    accord->status = hub->given_up || consent == NULL ? DTRAIN_ERR_PEER_LOST : consent->status;
    accord->draft.size = 0;
    if (done && consent != NULL) {
        accord->flags = consent->flags;
        accord->id = consent->id;
        for (int i = 0; i < consent->count; i++)
            if (consent->votes[i].vote == DTRAIN__VOTE_YES)
                dtrain__draft_add(&accord->draft, i, consent->votes[i].world);
    }
    pthread_mutex_unlock(&hub->mutex);
    return done;
}

static int dtrain__accord_vote_on_hub(dtrain__accord *accord, int64_t deadline_ns)
{
    dtrain__channel *channel = accord->comm->socket;
    dtrain__hub *hub = channel->hub;
    struct pollfd none[1];
    pthread_mutex_lock(&hub->mutex);
    int good = dtrain__consent_vote(channel, accord->number, accord->kind, accord->flags);
    pthread_mutex_unlock(&hub->mutex);
    while (good) {
        uint64_t seen = __atomic_load_n(&hub->news, __ATOMIC_SEQ_CST);
        if (dtrain__accord_on_hub(accord))
            return 1;
        if (dtrain__os_now_ns() >= deadline_ns)
            break;
        dtrain__hub_wait(channel, none, 0, deadline_ns, seen);
    }
    return 0;
}

/* Says why there is no agreement, or that this rank is none of it. */
static dtrain_status dtrain__accord_check(dtrain__accord *accord)
{
    dtrain_comm *comm = accord->comm;
    dtrain__error *error = &comm->error;
    if (accord->given_up)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST, "%s on rank %d: the others have given this rank up: %.400s",
                            accord->call, comm->rank, comm->socket->cause.text);
    if (accord->status == DTRAIN_ERR_MISMATCH)
        return dtrain__fail(error, DTRAIN_ERR_MISMATCH,
                            "%s on rank %d: ranks called comm_shrink and comm_agree at once; all must make the same "
                            "calls in the same order",
                            accord->call, comm->rank);
    if (accord->status != DTRAIN_OK)
        return dtrain__fail(error, accord->status,
                            "%s on rank %d: %d of %d ranks are here, and that others are silent is no proof that they "
                            "are gone: only the larger part goes on",
                            accord->call, comm->rank, accord->draft.size, comm->size);
    if (accord->draft.rank < 0)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST, "%s on rank %d: the others have gone on without this rank",
                            accord->call, comm->rank);
    return DTRAIN_OK;
}

static dtrain_status dtrain__accord_late(dtrain__accord *accord, int64_t started_ns)
{
    char whom[48] = "the others";
    if (accord->awaited >= 0)
        snprintf(whom, sizeof whom, "rank %d", accord->awaited);
    return dtrain__fail(&accord->comm->error, DTRAIN_ERR_TIMEOUT,
                        "%s on rank %d waited %.3f s for %s to call it as well or to be lost; it can be called again",
                        accord->call, accord->comm->rank, (double)(dtrain__os_now_ns() - started_ns) * 1e-9, whom);
}

/* Comes to an agreement with the ranks that are left. On success and on failure the draft is to be ended. */
static dtrain_status dtrain__accord_reach(dtrain__accord *accord)
{
    dtrain_comm *comm = accord->comm;
    int64_t now = dtrain__os_now_ns(), span = comm->desc.timeout_ms;
    int64_t deadline_ns = span < 0 ? INT64_MAX : now + dtrain__os_ms_to_ns(span);
    int done;
    accord->number = comm->consents + 1;
    accord->awaited = -1;
    if (comm->transport.board != NULL)
        done = dtrain__accord_vote_on_board(accord, deadline_ns);
    else if (comm->socket != NULL)
        done = dtrain__accord_vote_on_hub(accord, deadline_ns);
    else if (comm->size == 1) {
        dtrain__draft_add(&accord->draft, 0, 0);
        return DTRAIN_OK;
    } else
        return dtrain__fail(&comm->error, DTRAIN_ERR_UNSUPPORTED,
                            "%s on rank %d: a transport of your own does not tell who is lost", accord->call,
                            comm->rank);
    if (!done)
        return dtrain__accord_late(accord, now);
    comm->consents++;
    return dtrain__accord_check(accord);
}

static dtrain_status dtrain__accord_begin(dtrain__accord *accord, dtrain_comm *comm, int kind, const char *call,
                                          uint64_t flags)
{
    dtrain_status status = dtrain__comm_usable(comm, call);
    memset(accord, 0, sizeof *accord);
    accord->comm = comm;
    accord->call = call;
    accord->kind = kind;
    accord->flags = flags;
    return status == DTRAIN_OK ? dtrain__draft_begin(&accord->draft, comm, call) : status;
}

DTRAIN_API dtrain_status dtrain_comm_shrink(dtrain_comm *comm, dtrain_comm **survivors)
{
    dtrain__accord accord;
    dtrain_status status = dtrain__draft_check(comm, survivors, "comm_shrink");
    if (status == DTRAIN_OK)
        status = dtrain__accord_begin(&accord, comm, DTRAIN__CONSENT_SHRINK, "comm_shrink", 0);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__accord_reach(&accord);
    if (status == DTRAIN_OK) {
        accord.draft.id = accord.id;
        status = dtrain__draft_make(&accord.draft, survivors);
        if (status != DTRAIN_OK) {
            dtrain__error cause = dtrain__thread_error;
            dtrain__fail(&comm->error, status, "comm_shrink on rank %d: %.560s", comm->rank, cause.text);
        }
    }
    dtrain__draft_end(&accord.draft);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_agree(dtrain_comm *comm, uint64_t *flags)
{
    dtrain__accord accord;
    dtrain_status status;
    if (comm == NULL || flags == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_agree: needs a group and flags (%s is NULL)", comm == NULL ? "comm" : "flags");
    status = dtrain__accord_begin(&accord, comm, DTRAIN__CONSENT_AGREE, "comm_agree", *flags);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__accord_reach(&accord);
    if (status == DTRAIN_OK)
        *flags = accord.flags;
    dtrain__draft_end(&accord.draft);
    return status;
}

/* What a rank has to offer, or to receive. */
typedef struct dtrain__progress {
    uint64_t step;
    uint64_t shape; /* a digest of the buffers' sizes */
} dtrain__progress;

/* The rank with the highest step, or an error where sizes differ. */
static dtrain_status dtrain__resync_source(dtrain_comm *comm, const dtrain__progress *all, int *source)
{
    *source = 0;
    for (int rank = 1; rank < comm->size; rank++) {
        if (all[rank].shape != all[0].shape)
            return dtrain__fail(&comm->error, DTRAIN_ERR_MISMATCH,
                                "resync on rank %d: rank %d gave buffers of other sizes than rank 0", comm->rank, rank);
        *source = all[rank].step > all[*source].step ? rank : *source;
    }
    return DTRAIN_OK;
}

/* Room for what a rank receives, *total bytes, or an error on all ranks where one has none: what it has itself stays
 * whole until all has come, as the source may be lost on the way. */
static dtrain_status dtrain__resync_room(dtrain__draft *draft, int source, const size_t *bytes, int count,
                                         unsigned char **room, size_t *total)
{
    dtrain_comm *comm = draft->parent;
    uint64_t *all = (uint64_t *)(void *)draft->seats, fits = 1;
    for (int i = 0; i < count && fits; i++) {
        fits = bytes[i] <= SIZE_MAX - *total;
        *total += bytes[i];
    }
    if (comm->rank != source && *total > 0) {
        *room = fits ? (unsigned char *)dtrain__alloc(comm->allocator, *total) : NULL;
        fits = *room != NULL;
    }
    dtrain_status status = dtrain__draft_gather(draft, &fits, all, 1);
    for (int rank = 0; rank < comm->size && status == DTRAIN_OK; rank++)
        if (!all[rank])
            status = dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY,
                                  "resync on rank %d: rank %d has no memory to receive %zu bytes beside its own",
                                  comm->rank, rank, *total);
    return status;
}

DTRAIN_API dtrain_status dtrain_resync(dtrain_comm *comm, uint64_t step, void *const *buffers, const size_t *bytes,
                                       int count, uint64_t *step_out)
{
    dtrain__draft draft;
    dtrain__progress mine, *all;
    unsigned char digest[32], *room = NULL;
    size_t total = 0, at = 0;
    dtrain_status status;
    int source = 0, flaw = count < 0 || (count > 0 && (buffers == NULL || bytes == NULL));
    for (int i = 0; !flaw && i < count; i++)
        flaw = buffers[i] == NULL && bytes[i] > 0;
    if (comm == NULL || flaw)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "resync: needs a group and %d buffers with their sizes", count);
    status = dtrain__draft_begin(&draft, comm, "resync");
    if (status != DTRAIN_OK)
        return status;
    dtrain_sha256(count > 0 ? (const void *)bytes : "", (size_t)count * sizeof(size_t), digest);
    mine.step = step;
    mine.shape = dtrain__get_le(digest, 8);
    all = (dtrain__progress *)(void *)draft.seats; /* a seat is larger */
    status = dtrain__draft_gather(&draft, &mine, all, sizeof mine / sizeof(uint64_t));
    if (status == DTRAIN_OK)
        status = dtrain__resync_source(comm, all, &source);
    if (status == DTRAIN_OK) {
        step = all[source].step;
        status = dtrain__resync_room(&draft, source, bytes, count, &room, &total);
    }
    for (int i = 0; status == DTRAIN_OK && i < count; i++) {
        status = dtrain_broadcast(comm, room != NULL ? room + at : buffers[i], bytes[i], DTRAIN_U8, source);
        at += bytes[i];
    }
    at = 0;
    for (int i = 0; status == DTRAIN_OK && room != NULL && i < count; i++) {
        if (bytes[i] > 0)
            memcpy(buffers[i], room + at, bytes[i]);
        at += bytes[i];
    }
    if (status == DTRAIN_OK && step_out != NULL)
        *step_out = step;
    dtrain__free(comm->allocator, room, total);
    dtrain__draft_end(&draft);
    return status;
}

#endif
