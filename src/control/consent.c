/* ---- >>consent ----
 * What the members of a channel agree on although some of them are lost: the AND of their flags, who is still there,
 * and a name for the group of those. Each member votes; the leader decides when every member has voted, has left or is
 * lost, and tells those that voted. A consent is known by its channel, its number and its members: the leader may not
 * be a member, and a vote that lists others belongs to another consent.
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

#define DTRAIN__CONSENTS 128           /* that a rank keeps, the latest */
#define DTRAIN__CONSENT_FRAME_BYTES 13 /* of a member in a frame: flags, rank in the world, vote */

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
    int sole;             /* see consent_sole(); of the last look */
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

/* The channel's consent, with the channel's members. */
static dtrain__consent *dtrain__consent_find(const dtrain__channel *channel, uint64_t number)
{
    for (dtrain__consent *consent = channel->hub->consents; consent != NULL; consent = consent->next) {
        int same = 0;
        if (consent->channel != channel->id || consent->number != number || consent->count != channel->size)
            continue;
        while (same < channel->size && consent->votes[same].world == channel->peers[same].world)
            same++;
        if (same == channel->size)
            return consent;
    }
    return NULL;
}

/* The only rank that has voted; -1: none has, or several have. */
static int dtrain__consent_sole(const dtrain__consent *consent)
{
    int sole = -1;
    for (int i = 0; i < consent->count; i++) {
        if (consent->votes[i].vote == DTRAIN__VOTE_YES && sole >= 0)
            return -1;
        if (consent->votes[i].vote == DTRAIN__VOTE_YES)
            sole = consent->votes[i].world;
    }
    return sole;
}

/* Makes room: of those that one rank alone has voted in, or of the rest, whichever are more, the oldest goes. So a rank
 * that votes in groups which do not exist drives out its own votes first. */
static void dtrain__consent_evict(dtrain__hub *hub)
{
    dtrain__consent **worst = NULL;
    int kept = 0, most = 0;
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next, kept++)
        consent->sole = dtrain__consent_sole(consent);
    for (dtrain__consent **at = &hub->consents; kept >= DTRAIN__CONSENTS && *at != NULL; at = &(*at)->next) {
        int alike = 0;
        for (dtrain__consent *other = hub->consents; other != NULL; other = other->next)
            alike += other->sole == (*at)->sole;
        worst = alike >= most ? at : worst;
        most = alike > most ? alike : most;
    }
    if (worst != NULL)
        dtrain__consent_drop(hub, worst);
}

static void dtrain__consent_keep(dtrain__hub *hub, dtrain__consent **at)
{
    dtrain__consent *consent = *at;
    *at = consent->next;
    consent->next = hub->spare_consents;
    hub->spare_consents = consent;
}

/* Keeps for the next ones what nobody asks for again: whoever votes in the number'th of a channel knows that the one
 * before is decided, so all of its members that are left have voted in that, and know of those before it. */
static void dtrain__consent_retire(dtrain__hub *hub, uint64_t channel, uint64_t number)
{
    for (dtrain__consent **at = &hub->consents; *at != NULL;) {
        dtrain__consent *consent = *at;
        if (consent->channel != channel || !consent->decided || number < 2 || consent->number > number - 2)
            at = &consent->next;
        else
            dtrain__consent_keep(hub, at);
    }
}

/* One that was kept, for as many members, or NULL. */
static dtrain__consent *dtrain__consent_spare(dtrain__hub *hub, int count)
{
    for (dtrain__consent **at = &hub->spare_consents; *at != NULL; at = &(*at)->next) {
        dtrain__consent *consent = *at;
        if (consent->count != count)
            continue;
        *at = consent->next;
        memset(consent, 0, dtrain__consent_bytes(count));
        return consent;
    }
    return NULL;
}

/* A new one without votes. NULL when there is no memory. */
static dtrain__consent *dtrain__consent_open(dtrain__hub *hub, uint64_t channel, uint64_t number, int kind, int count)
{
    dtrain__consent *consent = dtrain__consent_spare(hub, count);
    if (consent == NULL)
        consent = (dtrain__consent *)dtrain__alloc(hub->allocator, dtrain__consent_bytes(count));
    if (consent == NULL)
        return NULL;
    dtrain__consent_evict(hub);
    consent->channel = channel;
    consent->number = number;
    consent->kind = kind;
    consent->count = count;
    consent->flags = UINT64_MAX;
    consent->next = hub->consents;
    hub->consents = consent;
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
        dtrain__hub_note(hub, "rank %d has no room to tell rank %d of an agreement", hub->rank, to);
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
        consent->id = dtrain__plane_group_id(dtrain__origin_serial(&hub->origin), hub->rank);
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
    dtrain__consent *consent = dtrain__consent_find(channel, number);
    dtrain__consent_retire(hub, channel->id, number);
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
        if (dtrain__membership_left(&channel->members, i) && i != channel->rank)
            consent->votes[i].vote = DTRAIN__VOTE_OUT;
    dtrain__consent_note(consent, hub->rank, kind, flags);
    if (!dtrain__hub_leads(hub))
        dtrain__consent_send(hub, hub->leader, consent);
    dtrain__consent_step(hub);
    dtrain__hub_kick(hub);
    return 1;
}

/* A member's end of the channel is gone, or its process: it votes no more. `world` is its rank in the world. */
static void dtrain__consent_left(dtrain__hub *hub, uint64_t channel, int world)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next)
        for (int i = 0; consent->channel == channel && !consent->decided && i < consent->count; i++)
            if (consent->votes[i].world == world)
                consent->votes[i].vote = DTRAIN__VOTE_OUT;
}

/* There is another leader: it gets all that this rank keeps. */
static void dtrain__consent_resend(dtrain__hub *hub)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next)
        if (!dtrain__hub_leads(hub))
            dtrain__consent_send(hub, hub->leader, consent);
}

/* A consent as a frame has it. */
typedef struct dtrain__consent_frame {
    uint64_t channel, number, kind, decided, status, flags, id, count;
    const unsigned char *entries; /* count of them */
} dtrain__consent_frame;

static uint64_t dtrain__consent_frame_world(const dtrain__consent_frame *frame, uint64_t i)
{
    return dtrain__get_le(frame->entries + i * DTRAIN__CONSENT_FRAME_BYTES + 8, 4);
}

static int dtrain__consent_frame_read(dtrain__consent_frame *frame, dtrain__reader *reader)
{
    int good = dtrain__take(reader, &frame->channel, 8) && dtrain__take(reader, &frame->number, 8) &&
               dtrain__take(reader, &frame->kind, 1) && dtrain__take(reader, &frame->decided, 1) &&
               dtrain__take(reader, &frame->status, 2) && dtrain__take(reader, &frame->flags, 8) &&
               dtrain__take(reader, &frame->id, 8) && dtrain__take(reader, &frame->count, 4);
    frame->entries = reader->at;
    return good && frame->decided <= 1 && frame->status <= DTRAIN_ERR_ABORTED &&
           reader->left % DTRAIN__CONSENT_FRAME_BYTES == 0 &&
           frame->count == reader->left / DTRAIN__CONSENT_FRAME_BYTES;
}

/* Whether `from` may send this: its members are those of the channel, where this rank knows it, else ranks of the world
 * with `from` among them. The leader gets votes. Others get decisions of the leader; so does a leader that has followed
 * another one, from a member that has heard of them. */
static int dtrain__consent_frame_fits(dtrain__hub *hub, int from, const dtrain__consent_frame *frame)
{
    const dtrain__channel *channel = dtrain__hub_channel(hub, frame->channel);
    int among = from == hub->leader;
    if (!hub->formed || frame->count == 0 || frame->count > (uint64_t)hub->size ||
        (channel != NULL && frame->count != (uint64_t)channel->size) ||
        (dtrain__hub_leads(hub) ? frame->decided && hub->rank == 0 : !frame->decided))
        return 0;
    dtrain__hub_list_begin(hub);
    for (uint64_t i = 0; i < frame->count; i++) {
        uint64_t world = dtrain__consent_frame_world(frame, i);
        if (!dtrain__hub_list_add(hub, world) ||
            frame->entries[i * DTRAIN__CONSENT_FRAME_BYTES + 12] > DTRAIN__VOTE_OUT ||
            (channel != NULL && world != (uint64_t)channel->peers[i].world))
            return 0;
        among |= (int)world == from;
    }
    return among;
}

/* Whether a consent is of the channel and the members that a frame lists. */
static int dtrain__consent_frame_lists(const dtrain__consent_frame *frame, const dtrain__consent *consent)
{
    uint64_t same = 0;
    if (consent->channel != frame->channel || (uint64_t)consent->count != frame->count)
        return 0;
    while (same < frame->count && dtrain__consent_frame_world(frame, same) == (uint64_t)consent->votes[same].world)
        same++;
    return same == frame->count;
}

/* The consent that a frame belongs to. */
static dtrain__consent *dtrain__consent_frame_find(const dtrain__hub *hub, const dtrain__consent_frame *frame)
{
    for (dtrain__consent *consent = hub->consents; consent != NULL; consent = consent->next)
        if (consent->number == frame->number && dtrain__consent_frame_lists(frame, consent))
            return consent;
    return NULL;
}

/* As consent_retire, for a leader that is no member and never votes itself. */
static void dtrain__consent_frame_retire(dtrain__hub *hub, const dtrain__consent_frame *frame)
{
    for (dtrain__consent **at = &hub->consents; *at != NULL;) {
        dtrain__consent *consent = *at;
        if (!consent->decided || frame->number < 2 || consent->number > frame->number - 2 ||
            !dtrain__consent_frame_lists(frame, consent))
            at = &consent->next;
        else
            dtrain__consent_keep(hub, at);
    }
}

/* Counts a frame's entries: all of a decision; else the vote of `from`, and whom it knows to have left. */
static void dtrain__consent_frame_count(const dtrain__consent_frame *frame, dtrain__consent *consent, int from)
{
    for (int i = 0; i < consent->count; i++) {
        const unsigned char *entry = frame->entries + (size_t)i * DTRAIN__CONSENT_FRAME_BYTES;
        dtrain__vote *mine = &consent->votes[i];
        if (frame->decided)
            mine->vote = entry[12];
        else if (entry[12] == DTRAIN__VOTE_OUT && mine->vote == DTRAIN__VOTE_NONE)
            mine->vote = DTRAIN__VOTE_OUT;
        else if (mine->world == from && entry[12] == DTRAIN__VOTE_YES)
            dtrain__consent_note(consent, from, (int)frame->kind, dtrain__get_le(entry, 8));
    }
}

/* A vote, or a decision. Returns 0 when it is malformed or out of place. */
static int dtrain__take_consent(dtrain__hub *hub, int from, dtrain__reader *reader)
{
    dtrain__consent_frame frame;
    dtrain__consent *consent;
    if (!dtrain__consent_frame_read(&frame, reader) || !dtrain__consent_frame_fits(hub, from, &frame))
        return 0;
    consent = dtrain__consent_frame_find(hub, &frame);
    if (consent != NULL && consent->decided) {
        if (!frame.decided) /* it asks for what it has missed */
            dtrain__consent_send(hub, from, consent);
        return 1;
    }
    if (consent == NULL) {
        if (!frame.decided)
            dtrain__consent_frame_retire(hub, &frame);
        consent = dtrain__consent_open(hub, frame.channel, frame.number, (int)frame.kind, (int)frame.count);
        if (consent == NULL)
            return 1; /* no memory: the call ends at its deadline */
        for (int i = 0; i < consent->count; i++)
            consent->votes[i].world = (int)dtrain__consent_frame_world(&frame, (uint64_t)i);
    }
    dtrain__consent_frame_count(&frame, consent, from);
    if (frame.decided) {
        consent->decided = 1;
        consent->status = (dtrain_status)frame.status;
        consent->flags = frame.flags;
        consent->id = frame.id;
        for (int i = 0; dtrain__hub_leads(hub) && i < consent->count; i++)
            if (consent->votes[i].vote == DTRAIN__VOTE_YES && consent->votes[i].world != hub->rank)
                dtrain__consent_send(hub, consent->votes[i].world, consent);
        dtrain__hub_tell(hub);
    }
    return 1;
}

#endif
