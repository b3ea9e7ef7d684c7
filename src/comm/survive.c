/* ---- >>survive ----
 * Going on when ranks are lost: the survivors agree (by their control plane), make a group of those that are left,
 * and copy the state of the furthest to the rest. Works on a broken group: nothing here uses
 * its operations, but dtrain_resync, which is for the new one. */
#ifndef DTRAIN__SURVIVE
#define DTRAIN__SURVIVE
#include "split.c"

enum { DTRAIN__CONSENT_SHRINK = 1, DTRAIN__CONSENT_AGREE };

/* A rank's part in an agreement, and what came of it. */
typedef struct dtrain__survive_part {
    dtrain_comm *comm;
    const char *call;
    dtrain__agreement vote;
    int pending;               /* there is time left, but not in this call */
    dtrain__split_state split; /* who goes on */
} dtrain__survive_part;

/* Says why there is no agreement, or that this rank is none of it. */
static dtrain_status dtrain__survive_check(dtrain__survive_part *part)
{
    dtrain_comm *comm = part->comm;
    dtrain__error *error = &comm->error;
    if (part->vote.given_up)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST, "%s on rank %d: the others have given this rank up: %.400s",
                            part->call, comm->rank, comm->members->cause.text);
    if (part->vote.status == DTRAIN_ERR_MISMATCH)
        return dtrain__fail(error, DTRAIN_ERR_MISMATCH,
                            "%s on rank %d: ranks called comm_shrink and comm_agree at once; all must make the same "
                            "calls in the same order",
                            part->call, comm->rank);
    if (part->vote.status != DTRAIN_OK)
        return dtrain__fail(error, part->vote.status,
                            "%s on rank %d: %d of %d ranks are here, and that others are silent is no proof that they "
                            "are gone: only the larger part goes on",
                            part->call, comm->rank, part->split.size, comm->size);
    if (part->split.rank < 0)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST, "%s on rank %d: the others have gone on without this rank",
                            part->call, comm->rank);
    return DTRAIN_OK;
}

static dtrain_status dtrain__survive_late(dtrain__survive_part *part, int64_t started_ns)
{
    char whom[48] = "the others";
    if (part->vote.awaited >= 0)
        snprintf(whom, sizeof whom, "rank %d", part->vote.awaited);
    return dtrain__fail(&part->comm->error, DTRAIN_ERR_TIMEOUT,
                        "%s on rank %d waited %.3f s for %s to call it as well or to be lost; it can be called again",
                        part->call, part->comm->rank, (double)(dtrain__os_now_ns() - started_ns) * 1e-9, whom);
}

/* Comes to an agreement with the ranks that are left, or waits for one until until_ns: then it is pending. On success
 * and on failure the split is to be ended. */
static dtrain_status dtrain__survive_agree(dtrain__survive_part *part, int64_t until_ns)
{
    dtrain_comm *comm = part->comm;
    int64_t now = dtrain__os_now_ns(), span = comm->desc.timeout_ms;
    int64_t began = comm->vote_ns > 0 && comm->vote_kind == part->vote.kind ? comm->vote_ns : now;
    int64_t deadline_ns = span < 0 ? INT64_MAX : began + dtrain__os_ms_to_ns(span);
    int done;
    part->vote.number = comm->consents + 1;
    part->vote.awaited = -1;
    part->vote.voted = began != now;
    until_ns = until_ns < deadline_ns ? until_ns : deadline_ns;
    if (comm->plane->agree == NULL && comm->size > 1)
        return dtrain__fail(&comm->error, DTRAIN_ERR_UNSUPPORTED,
                            "%s on rank %d: a transport of your own does not tell who is lost", part->call, comm->rank);
    if (comm->plane->agree == NULL) {
        dtrain__split_add(&part->split, 0, 0);
        return DTRAIN_OK;
    }
    part->vote.goes_on = part->split.states;
    done = comm->plane->agree(comm->transport.self, &part->vote, until_ns);
    for (int rank = 0; done && rank < comm->size; rank++)
        if (part->vote.goes_on[rank])
            dtrain__split_add(&part->split, rank, dtrain__group_world(comm, rank));
    dtrain__work_blocked_in(comm, now);
    if (part->vote.starved) /* nothing is pending; the next call votes */
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY,
                            "%s on rank %d: no memory for its vote; it can be called again", part->call, comm->rank);
    part->pending = !done && dtrain__os_now_ns() < deadline_ns;
    comm->vote_ns = part->pending ? began : 0;
    comm->vote_kind = part->vote.kind;
    if (part->pending)
        return DTRAIN_OK;
    if (!done)
        return dtrain__survive_late(part, began);
    comm->consents++;
    return dtrain__survive_check(part);
}

static dtrain_status dtrain__survive_begin(dtrain__survive_part *part, dtrain_comm *comm, int kind, const char *call,
                                           uint64_t flags)
{
    dtrain_status status = dtrain__work_usable(comm, call);
    memset(part, 0, sizeof *part);
    part->comm = comm;
    part->call = call;
    part->vote.kind = kind;
    part->vote.flags = flags;
    return status == DTRAIN_OK ? dtrain__split_begin(&part->split, comm, call) : status;
}

/* Shrinks, or comes back at until_ns without a group. */
static dtrain_status dtrain__survive_shrink(dtrain_comm *comm, int64_t until_ns, dtrain_comm **survivors)
{
    dtrain__survive_part part;
    dtrain_status status = dtrain__split_check(comm, survivors, "comm_shrink");
    if (status == DTRAIN_OK)
        status = dtrain__survive_begin(&part, comm, DTRAIN__CONSENT_SHRINK, "comm_shrink", 0);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__survive_agree(&part, until_ns);
    if (status == DTRAIN_OK && !part.pending) {
        part.split.id = part.vote.id;
        part.split.replaces = 1;
        status = dtrain__split_make(&part.split, survivors);
        if (status != DTRAIN_OK) {
            dtrain__error cause = dtrain__thread_error;
            dtrain__fail(&comm->error, status, "comm_shrink on rank %d: %.560s", comm->rank, cause.text);
        }
    }
    dtrain__split_end(&part.split);
    return status;
}

DTRAIN_API dtrain_status dtrain_comm_shrink(dtrain_comm *comm, dtrain_comm **survivors)
{
    return dtrain__survive_shrink(comm, INT64_MAX, survivors);
}

DTRAIN_API dtrain_status dtrain_comm_shrink_poll(dtrain_comm *comm, int64_t budget_us, dtrain_comm **survivors)
{
    int64_t now = dtrain__os_now_ns();
    if (comm != NULL && budget_us < 0)
        return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                            "comm_shrink_poll on rank %d: a budget of %lld us; 0 or more is possible", comm->rank,
                            (long long)budget_us);
    return dtrain__survive_shrink(comm, budget_us < (INT64_MAX - now) / 1000 ? now + budget_us * 1000 : INT64_MAX,
                                  survivors);
}

DTRAIN_API dtrain_status dtrain_comm_agree(dtrain_comm *comm, uint64_t *flags)
{
    dtrain__survive_part part;
    dtrain_status status;
    if (comm == NULL || flags == NULL)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "comm_agree: needs a group and flags (%s is NULL)", comm == NULL ? "comm" : "flags");
    status = dtrain__survive_begin(&part, comm, DTRAIN__CONSENT_AGREE, "comm_agree", *flags);
    if (status != DTRAIN_OK)
        return status;
    status = dtrain__survive_agree(&part, INT64_MAX);
    if (status == DTRAIN_OK)
        *flags = part.vote.flags;
    dtrain__split_end(&part.split);
    return status;
}

/* What a rank has to offer, or to receive. */
typedef struct dtrain__survive_progress {
    uint64_t step;
    uint64_t shape; /* a digest of the buffers' sizes */
} dtrain__survive_progress;

/* The rank with the highest step, or an error where sizes differ. */
static dtrain_status dtrain__survive_source(dtrain_comm *comm, const dtrain__survive_progress *all, int *source)
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
static dtrain_status dtrain__survive_room(dtrain__split_state *split, int source, const size_t *bytes, int count,
                                          unsigned char **room, size_t *total)
{
    dtrain_comm *comm = split->parent;
    uint64_t *all = (uint64_t *)(void *)split->entries, fits = 1;
    for (int i = 0; i < count && fits; i++) {
        fits = bytes[i] <= SIZE_MAX - *total;
        *total += bytes[i];
    }
    if (comm->rank != source && *total > 0) {
        *room = fits ? (unsigned char *)dtrain__alloc(comm->allocator, *total) : NULL;
        fits = *room != NULL;
    }
    dtrain_status status = dtrain__split_gather(split, &fits, all, 1);
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
    dtrain__split_state split;
    dtrain__survive_progress mine, *all;
    unsigned char digest[32], *room = NULL;
    size_t total = 0, at = 0;
    dtrain_status status;
    int source = 0, flaw = count < 0 || (count > 0 && (buffers == NULL || bytes == NULL));
    for (int i = 0; !flaw && i < count; i++)
        flaw = buffers[i] == NULL && bytes[i] > 0;
    if (comm == NULL || flaw)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "resync: needs a group and %d buffers with their sizes", count);
    status = dtrain__split_begin(&split, comm, "resync");
    if (status != DTRAIN_OK)
        return status;
    dtrain_sha256(count > 0 ? (const void *)bytes : "", (size_t)count * sizeof(size_t), digest);
    mine.step = step;
    mine.shape = dtrain__get_le(digest, 8);
    all = (dtrain__survive_progress *)(void *)split.entries; /* an entry is larger */
    status = dtrain__split_gather(&split, &mine, all, sizeof mine / sizeof(uint64_t));
    if (status == DTRAIN_OK)
        status = dtrain__survive_source(comm, all, &source);
    if (status == DTRAIN_OK) {
        step = all[source].step;
        status = dtrain__survive_room(&split, source, bytes, count, &room, &total);
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
    dtrain__split_end(&split);
    return status;
}

#endif
