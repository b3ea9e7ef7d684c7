/* ---- >>survive ----
 * Continuing when ranks are lost. The survivors agree over their control plane and make a group of those that are left.
 * Then they copy the state of the furthest to the rest. Agreeing works on a broken group, as it uses none of the
 * group's operations. dtrain_resync uses them: it is for the new group. */
#ifndef DTRAIN__SURVIVE
#define DTRAIN__SURVIVE
#include "split.c"

enum { DTRAIN__CONSENT_SHRINK = 1, DTRAIN__CONSENT_AGREE };

/* A rank's part in an agreement, and its result. */
typedef struct dtrain__survive_part {
    dtrain__split_state split; /* who continues */
    dtrain__agreement vote;
    int pending; /* the call returns; the deadline is still to come */
} dtrain__survive_part;

/* Returns why there is no agreement, or why this rank is not part of it. */
static dtrain_status dtrain__survive_check(dtrain__survive_part *part)
{
    dtrain_comm *comm = part->split.parent;
    dtrain__error *error = &comm->error;
    if (part->vote.given_up)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST,
                            "%s on rank %d: the others have given this rank up: %.400s; end it", part->split.call,
                            comm->rank, comm->members->cause.text);
    if (part->vote.status == DTRAIN_ERR_MISMATCH)
        return dtrain__fail(error, DTRAIN_ERR_MISMATCH,
                            "%s on rank %d: ranks called comm_shrink and comm_agree at once; all must make the same "
                            "calls in the same order",
                            part->split.call, comm->rank);
    if (part->vote.status != DTRAIN_OK)
        return dtrain__fail(error, part->vote.status,
                            "%s on rank %d: %d of %d ranks are here; the others may still run, cut off by the network, "
                            "so only the larger part continues, and of two halves that with the lowest rank; end this "
                            "rank. Where no network can do that, desc.quorum = DTRAIN_QUORUM_ANY lets it go on",
                            part->split.call, comm->rank, part->split.size, comm->size);
    if (part->split.rank < 0)
        return dtrain__fail(error, DTRAIN_ERR_PEER_LOST,
                            "%s on rank %d: the others have gone on without this rank; end it", part->split.call,
                            comm->rank);
    return DTRAIN_OK;
}

/* Agrees with the ranks that are left, or waits until until_ns: then the agreement is pending. The caller ends the
 * split in any case. */
static dtrain_status dtrain__survive_agree(dtrain__survive_part *part, int64_t until_ns)
{
    dtrain_comm *comm = part->split.parent;
    int64_t now = dtrain__os_now_ns();
    int64_t began = comm->vote.begun_ns > 0 && comm->vote.kind == part->vote.kind ? comm->vote.begun_ns : now;
    int64_t deadline_ns = dtrain__group_deadline(comm, began);
    int done;
    part->vote.number = comm->vote.count + 1;
    part->vote.awaited = -1;
    part->vote.voted = began != now;
    until_ns = until_ns < deadline_ns ? until_ns : deadline_ns;
    part->vote.goes_on = part->split.states;
    done = dtrain__seat_agree(comm->seat, &part->vote, until_ns);
    for (int rank = 0; done && rank < comm->size; rank++)
        if (part->vote.goes_on[rank])
            dtrain__split_add(&part->split, rank, dtrain__seat_world(comm->seat, rank));
    dtrain__work_blocked_in(comm, dtrain__os_now_ns() - now);
    if (part->vote.starved) /* nothing is pending: the next call votes again */
        return dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY,
                            "%s on rank %d: no memory for its vote; it can be called again", part->split.call,
                            comm->rank);
    part->pending = !done && dtrain__os_now_ns() < deadline_ns;
    comm->vote.begun_ns = part->pending ? began : 0;
    comm->vote.kind = part->vote.kind;
    if (part->pending)
        return DTRAIN_OK;
    char whom[48] = "the others";
    if (part->vote.awaited >= 0)
        snprintf(whom, sizeof whom, "rank %d", part->vote.awaited);
    if (!done)
        return dtrain__fail(
            &comm->error, DTRAIN_ERR_TIMEOUT,
            "%s on rank %d waited %.3f s for %s to call it as well or to be lost; it can be called again",
            part->split.call, comm->rank, (double)(dtrain__os_now_ns() - began) * 1e-9, whom);
    comm->vote.count++;
    return dtrain__survive_check(part);
}

static dtrain_status dtrain__survive_begin(dtrain__survive_part *part, dtrain_comm *comm, int kind, const char *call,
                                           uint64_t flags)
{
    dtrain_status status = dtrain__work_usable(comm, call);
    memset(part, 0, sizeof *part);
    part->vote.kind = kind;
    part->vote.flags = flags;
    return status == DTRAIN_OK ? dtrain__split_begin(&part->split, comm, call) : status;
}

/* Shrinks, or returns at until_ns without a group. */
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
        dtrain__window_note(comm);
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
                            "comm_shrink_poll on rank %d: budget_us is %lld; expected 0 or more", comm->rank,
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

/* The sizes of a resync's buffers. */
typedef struct dtrain__survive_sizes {
    const size_t *bytes;
    int count;
} dtrain__survive_sizes;

static int dtrain__survive_line(const void *given, size_t index, dtrain__alike_line *line)
{
    const dtrain__survive_sizes *sizes = (const dtrain__survive_sizes *)given;
    if (index > (size_t)sizes->count)
        return 0;
    if (index == 0)
        return dtrain__alike_number(line, "the number of buffers is", sizes->count, 0);
    dtrain__alike_text(line, "", "");
    snprintf(line->what, sizeof line->what, "bytes[%zu] is", index - 1);
    snprintf(line->value, sizeof line->value, "%zu", sizes->bytes[index - 1]);
    return 1;
}

/* Finds the rank with the highest step, and that step. Compares the sizes, which all ranks must give alike. */
static dtrain_status dtrain__survive_source(dtrain_comm *comm, const dtrain__survive_sizes *sizes, uint64_t *step,
                                            int *source)
{
    dtrain__alike alike = {"resync", sizes, dtrain__survive_line, "give every rank the same sizes", 1, {*step}, 0};
    dtrain_status status = dtrain__alike_meet(comm, &alike, DTRAIN_OK);
    *source = *step == alike.most[0] ? comm->rank : comm->size;
    *step = alike.most[0];
    return status == DTRAIN_OK ? dtrain_all_reduce(comm, source, source, 1, DTRAIN_I32, DTRAIN_MIN) : status;
}

/* Allocates room for what a rank receives, *total bytes, or returns an error on all ranks if one has no memory. A
 * rank's own state stays whole until everything has come, as the source may be lost on the way. */
static dtrain_status dtrain__survive_room(dtrain_comm *comm, int source, const dtrain__survive_sizes *sizes,
                                          unsigned char **room, size_t *total)
{
    dtrain_status status = DTRAIN_OK;
    int fits = 1;
    for (int i = 0; i < sizes->count && fits; i++)
        fits = dtrain__add_size(*total, sizes->bytes[i], total);
    if (comm->rank != source && fits && *total > 0)
        *room = (unsigned char *)dtrain__alloc(comm->allocator, *total);
    if (comm->rank != source && *room == NULL && (*total > 0 || !fits))
        status = dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "resync: no memory to receive %zu bytes beside its own",
                              *total);
    return dtrain__alike_agree(comm, "resync", 1, status);
}

DTRAIN_API dtrain_status dtrain_resync(dtrain_comm *comm, uint64_t step, void *const *buffers, const size_t *bytes,
                                       int count, uint64_t *step_out)
{
    dtrain__survive_sizes sizes = {bytes, count};
    unsigned char *room = NULL;
    size_t total = 0, at = 0;
    int source = 0, flaw = count < 0 || (count > 0 && (buffers == NULL || bytes == NULL));
    for (int i = 0; !flaw && i < count; i++)
        flaw = buffers[i] == NULL && bytes[i] > 0;
    if (comm == NULL || flaw)
        return dtrain__fail(comm != NULL ? &comm->error : NULL, DTRAIN_ERR_INVALID,
                            "resync: %s; give a group, and each of the %d buffers with its size",
                            comm == NULL ? "comm is NULL" : "count is negative or a buffer is missing", count);
    dtrain_status status = dtrain__survive_source(comm, &sizes, &step, &source);
    if (status == DTRAIN_OK)
        status = dtrain__survive_room(comm, source, &sizes, &room, &total);
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
    dtrain__free(comm->allocator, room);
    return status;
}

#endif
