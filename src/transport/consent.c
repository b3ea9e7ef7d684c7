/* ---- >>consent ----
 * What the members of a channel agree on although some of them are lost: the AND of their flags, who is still there,
 * and a name for the group of those. Each member votes; the leader decides when every member has voted, has left or is
 * lost, and tells those that voted.
 *
 * Every rank keeps its own votes and the decisions that it has heard. When the leader is lost, the lowest rank left
 * leads: all send it what they keep, so that a decision that any survivor knows stands; it decides anew only when
 * every survivor has been heard, that is, when none of them knows of one.
 *
 * A closed or refused connection proves a death. Silence proves nothing: where some members are only silent, those that
 * voted go on if they are more, or as many and hold the lowest rank; so two parts of a torn network never both do. */
#ifndef DTRAIN__CONSENT
#define DTRAIN__CONSENT
#include "hub.c"

#define DTRAIN__CONSENTS 128 /* that a rank keeps, the latest */

enum { DTRAIN__VOTE_NONE = 0, DTRAIN__VOTE_YES, DTRAIN__VOTE_OUT };

typedef struct dtrain__vote {
    uint64_t flags;
    int world;
    int vote;
} dtrain__vote;

struct dtrain__consent {
    dtrain__consent *next;
    uint64_t channel, number; /* the number'th of the channel */
    int kind, mixed;          /* mixed: members called different things */
    int count, decided;
    dtrain_status status; /* of the decision */
    uint64_t flags, id;
    dtrain__vote votes[1]; /* count of them, in the channel's order */
};

static size_t dtrain__consent_bytes(int count)
{
    return sizeof(dtrain__consent) + (size_t)count * sizeof(dtrain__vote);
}

static void dtrain__consent_drop(dtrain__hub *hub, dtrain__consent **at)
{
    dtrain__consent *consent = *at;
    *at = consent->next;
    dtrain__free(hub->allocator, consent, dtrain__consent_bytes(consent->count));
}

static dtrain__consent *dtrain__consent_find(const dtrain__hub *hub, uint64_t channel, uint64_t number)
{
    dtrain__consent *consent = hub->consents;
    while (consent != NULL && (consent->channel != channel || consent->number != number))
        consent = consent->next;
    return consent;
}

/* A new one without votes; the oldest makes room for it. NULL when there is no memory. */
static dtrain__consent *dtrain__consent_open(dtrain__hub *hub, uint64_t channel, uint64_t number, int kind, int count)
{
    dtrain__consent *consent = (dtrain__consent *)dtrain__alloc(hub->allocator, dtrain__consent_bytes(count));
    dtrain__consent **at = &hub->consents;
    if (consent == NULL)
        return NULL;
    consent->channel = channel;
    consent->number = number;
    consent->kind = kind;
    consent->count = count;
    consent->flags = UINT64_MAX;
    consent->next = hub->consents;
    hub->consents = consent;
    for (int kept = 0; *at != NULL; kept++)
        if (kept < DTRAIN__CONSENTS)
            at = &(*at)->next;
        else
            dtrain__consent_drop(hub, at);
    return consent;
}

static void dtrain__consent_send(dtrain__hub *hub, int to, const dtrain__consent *consent)
{
    dtrain__member *member = &hub->members[to];
    if (member->gone != DTRAIN__PRESENT)
        return;
    size_t begin = dtrain__frame_open(hub, member, DTRAIN__FRAME_CONSENT);
    dtrain__give(hub, &member->out, consent->channel, 8);
    dtrain__give(hub, &member->out, consent->number, 8);
    dtrain__give(hub, &member->out, (uint64_t)consent->kind, 1);
    dtrain__give(hub, &member->out, (uint64_t)consent->decided, 1);
    dtrain__give(hub, &member->out, (uint64_t)consent->status, 2);
    dtrain__give(hub, &member->out, consent->flags, 8);
    dtrain__give(hub, &member->out, consent->id, 8);
    dtrain__give(hub, &member->out, (uint64_t)consent->count, 4);
    for (int i = 0; i < consent->count; i++) {
        dtrain__give(hub, &member->out, consent->votes[i].flags, 8);
        dtrain__give(hub, &member->out, (uint64_t)consent->votes[i].world, 4);
        dtrain__give(hub, &member->out, (uint64_t)consent->votes[i].vote, 1);
    }
    if (!dtrain__frame_close(member, begin))
        dtrain__log(DTRAIN_LOG_WARN, "rank %d has no memory to tell rank %d of an agreement", hub->rank, to);
}

/* Who does not go on, as far as the leader knows. Returns the first that is awaited, or -1. */
static int dtrain__consent_awaits(const dtrain__hub *hub, dtrain__consent *consent)
{
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        if (hub->members[vote->world].gone != DTRAIN__PRESENT)
            vote->vote = DTRAIN__VOTE_OUT;
        if (vote->vote == DTRAIN__VOTE_NONE)
            return i;
    }
    return -1;
}

/* Whether those that voted may go on without those that are only silent. */
static int dtrain__consent_majority(const dtrain__hub *hub, const dtrain__consent *consent)
{
    int here = 0, silent = 0, lowest = 0; /* lowest: the first of both is here */
    for (int i = 0; i < consent->count; i++) {
        int yes = consent->votes[i].vote == DTRAIN__VOTE_YES, mute = hub->members[consent->votes[i].world].silent;
        lowest |= here + silent == 0 && yes;
        here += yes;
        silent += !yes && mute;
    }
    return here > silent || (here == silent && lowest);
}

/* Decides what can be decided, and tells those that voted. */
static void dtrain__consent_step(dtrain__hub *hub)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next) {
        if (consent->decided || !dtrain__hub_leads(hub) || dtrain__consent_awaits(hub, consent) >= 0)
            continue;
        consent->decided = 1;
        consent->flags = UINT64_MAX;
        for (int i = 0; i < consent->count; i++)
            consent->flags &= consent->votes[i].vote == DTRAIN__VOTE_YES ? consent->votes[i].flags : UINT64_MAX;
        consent->id = dtrain__hub_group_id(++hub->serial, hub->rank);
        consent->status = consent->mixed                           ? DTRAIN_ERR_MISMATCH
                          : dtrain__consent_majority(hub, consent) ? DTRAIN_OK
                                                                   : DTRAIN_ERR_PEER_LOST;
        for (int i = 0; i < consent->count; i++)
            if (consent->votes[i].vote == DTRAIN__VOTE_YES && consent->votes[i].world != hub->rank)
                dtrain__consent_send(hub, consent->votes[i].world, consent);
        dtrain__hub_tell(hub);
    }
}

/* Notes a member's vote. Returns 0 when it is none. */
static int dtrain__consent_note(dtrain__consent *consent, int world, int kind, uint64_t flags)
{
    for (int i = 0; i < consent->count; i++) {
        if (consent->votes[i].world != world)
            continue;
        consent->votes[i].vote = DTRAIN__VOTE_YES;
        consent->votes[i].flags = flags;
        consent->mixed |= kind != consent->kind;
        return 1;
    }
    return 0;
}

/* This rank votes in its channel; voting again changes the flags, unless it is decided. Returns 0 when there is no
 * memory. */
static int dtrain__consent_vote(dtrain__channel *channel, uint64_t number, int kind, uint64_t flags)
{
    dtrain__hub *hub = channel->hub;
    dtrain__consent *consent = dtrain__consent_find(hub, channel->id, number);
    if (consent == NULL) {
        consent = dtrain__consent_open(hub, channel->id, number, kind, channel->size);
        if (consent == NULL)
            return 0;
        for (int i = 0; i < channel->size; i++)
            consent->votes[i].world = channel->peers[i].world;
    }
    if (consent->decided)
        return 1;
    for (int i = 0; i < channel->size; i++)
        if (channel->peers[i].left && i != channel->rank)
            consent->votes[i].vote = DTRAIN__VOTE_OUT;
    dtrain__consent_note(consent, hub->rank, kind, flags);
    if (!dtrain__hub_leads(hub))
        dtrain__consent_send(hub, hub->leader, consent);
    dtrain__consent_step(hub);
    dtrain__hub_kick(hub);
    return 1;
}

/* A member's end of the channel is gone, or its process: it votes no more. */
static void dtrain__consent_left(dtrain__hub *hub, uint64_t channel, int rank)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next)
        if (consent->channel == channel && !consent->decided && rank < consent->count)
            consent->votes[rank].vote = DTRAIN__VOTE_OUT;
}

/* There is another leader: it gets all that this rank keeps. */
static void dtrain__consent_resend(dtrain__hub *hub)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next)
        if (!dtrain__hub_leads(hub))
            dtrain__consent_send(hub, hub->leader, consent);
}

/* Reads the members of a consent into one that may have them already. Returns 0 when they do not fit it. */
static int dtrain__consent_read(dtrain__hub *hub, dtrain__consent *consent, int from, int kind, int fresh, int decided,
                                dtrain__reader *reader)
{
    uint64_t flags, world, vote;
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *mine = &consent->votes[i];
        if (!dtrain__take(reader, &flags, 8) || !dtrain__take(reader, &world, 4) || !dtrain__take(reader, &vote, 1) ||
            world >= (uint64_t)hub->size || vote > DTRAIN__VOTE_OUT || (!fresh && (int)world != mine->world))
            return 0;
        mine->world = (int)world;
        if (decided)
            mine->vote = (int)vote;
        else if (vote == DTRAIN__VOTE_OUT && mine->vote == DTRAIN__VOTE_NONE)
            mine->vote = DTRAIN__VOTE_OUT;
        else if (mine->world == from && vote == DTRAIN__VOTE_YES)
            dtrain__consent_note(consent, from, kind, flags);
    }
    return 1;
}

/* A vote, or a decision: from the leader, or from a rank that had heard of one before this rank led. */
static int dtrain__take_consent(dtrain__hub *hub, int from, dtrain__reader *reader)
{
    uint64_t channel, number, kind, decided, status, flags, id, count;
    dtrain__consent *consent;
    int fresh;
    if (!dtrain__take(reader, &channel, 8) || !dtrain__take(reader, &number, 8) || !dtrain__take(reader, &kind, 1) ||
        !dtrain__take(reader, &decided, 1) || !dtrain__take(reader, &status, 2) || status > DTRAIN_ERR_ABORTED ||
        !dtrain__take(reader, &flags, 8) || !dtrain__take(reader, &id, 8) || !dtrain__take(reader, &count, 4) ||
        count == 0 || count > (uint64_t)hub->size || reader->left != 13 * (size_t)count)
        return 0;
    consent = dtrain__consent_find(hub, channel, number);
    if (consent != NULL && consent->decided) {
        if (!decided) /* it asks for what it has missed */
            dtrain__consent_send(hub, from, consent);
        return 1;
    }
    fresh = consent == NULL;
    if (fresh)
        consent = dtrain__consent_open(hub, channel, number, (int)kind, (int)count);
    if (consent == NULL)
        return 1; /* no memory: the call ends at its deadline */
    if (consent->count != (int)count ||
        !dtrain__consent_read(hub, consent, from, (int)kind, fresh, decided != 0, reader)) {
        if (fresh)
            dtrain__consent_drop(hub, &hub->consents);
        return 0;
    }
    if (decided) {
        consent->decided = 1;
        consent->status = (dtrain_status)status;
        consent->flags = flags;
        consent->id = id;
        for (int i = 0; dtrain__hub_leads(hub) && i < consent->count; i++)
            if (consent->votes[i].vote == DTRAIN__VOTE_YES && consent->votes[i].world != hub->rank)
                dtrain__consent_send(hub, consent->votes[i].world, consent);
        dtrain__hub_tell(hub);
    }
    return 1;
}

#endif
