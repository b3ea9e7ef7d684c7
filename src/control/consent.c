/* ---- >>consent ----
 * What the members of a group agree on although some are lost: the AND of their flags, who is left, and a name for the
 * group of those. Each member votes. The leader decides when every member has voted, has left or is lost, and tells
 * those that voted. A consent is known by its group, its number and its members. The leader need not be a member. A
 * vote that lists other members belongs to another consent.
 *
 * Every rank keeps its own votes and the decisions that it has heard. When the leader is lost, the lowest rank left
 * leads. All send it what they keep, so a decision that any survivor knows stands. It decides anew only after it has
 * heard every survivor, and none knows of a decision. Nobody listens to a rank that it counts as gone.
 *
 * Neither silence nor a connection that is reset or refused proves a death, as a network can do both. Proofs are of
 * this machine: its system says that the process is gone. So those that voted continue if they are more than half of
 * all members, or the half with the lowest rank. Members that left of their own will do not count, nor, if all are on
 * one machine, those proved dead. So two parts of a torn network never both continue.
 *
 * A vote could count twice: a member votes, the network cuts it off, and it votes in the other part, too. So a decision
 * without members that may still run is a proposal first, which all that voted acknowledge. Who has acknowledged takes
 * it to the other part, where it stands: the majority of its members is not there, and ends that part at its next vote.
 * If a member is lost before it has acknowledged, the leader decides again. This is one round of Paxos (Lamport, The
 * Part-Time Parliament, 1998) whose ballots are leaders, each of which gives up the ranks before it for good.
 */
#ifndef DTRAIN__CONSENT
#define DTRAIN__CONSENT
#include "council.c"

#define DTRAIN__CONSENTS 128                /* most consents that a rank keeps; in a larger world one for each rank */
#define DTRAIN__CONSENT_DOUBT_NS 1000000000 /* for a process whose connections have ended to be gone */
#define DTRAIN__CONSENT_FRAME_BYTES 13      /* a member's bytes in a message: flags, rank in the world, vote */

/* DEAD: in a message about a vote: out, and proved dead on the sender's machine. */
enum { DTRAIN__VOTE_NONE = 0, DTRAIN__VOTE_YES, DTRAIN__VOTE_OUT, DTRAIN__VOTE_DEAD };
/* How far a consent is. PROPOSED: its decision stands unless the leader takes it back. */
enum { DTRAIN__CONSENT_OPEN = 0, DTRAIN__CONSENT_DECIDED, DTRAIN__CONSENT_PROPOSED };

typedef struct dtrain__vote {
    uint64_t flags;
    int world;
    int vote, kind; /* kind: of the call that votes */
    int asks;       /* it has sent its vote here and is owed the decision */
    int dead;       /* a member beside it has said that it is proved dead */
    int asked;      /* it is to acknowledge the proposal */
    int left;       /* its end of the group has left */
} dtrain__vote;

struct dtrain__consent {
    dtrain__consent *next;
    uint64_t group, number; /* its number among the group's */
    int kind;               /* kind of this rank's last vote */
    int count, heard;       /* heard: the voting call of this rank knows the decision */
    int decided;            /* DTRAIN__CONSENT_OPEN ... */
    int sole;               /* consent_sole() at the last look */
    int64_t doubt_ns;       /* until then it is not decided that too few are left; 0: that is not in question */
    dtrain_status status;   /* of the decision */
    uint64_t flags, id;
    dtrain__vote votes[1]; /* count of them, in the group's order, then room for them in a message */
};

static size_t dtrain__consent_bytes(int count)
{
    return sizeof(dtrain__consent) + (size_t)count * (sizeof(dtrain__vote) + DTRAIN__CONSENT_FRAME_BYTES);
}

static void dtrain__consent_drop(dtrain__council *council, dtrain__consent **at)
{
    dtrain__consent *consent = *at;
    *at = consent->next;
    dtrain__free(council->allocator, consent);
}

/* Whether its members are those of the council's list. */
static int dtrain__consent_listed(const dtrain__council *council, const dtrain__consent *consent)
{
    int same = 0;
    while (same < consent->count && same < council->listed && consent->votes[same].world == council->list[same])
        same++;
    return same == consent->count && same == council->listed;
}

static dtrain__consent *dtrain__consent_find(const dtrain__council *council, uint64_t group, uint64_t number)
{
    dtrain__consent *consent = council->consents;
    while (consent != NULL &&
           (consent->group != group || consent->number != number || !dtrain__consent_listed(council, consent)))
        consent = consent->next;
    return consent;
}

/* The only rank that has voted; -1: no rank has, or several have. */
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

/* Whether a call of this rank has voted and does not know the decision yet. */
static int dtrain__consent_owed(const dtrain__council *council, const dtrain__consent *consent)
{
    int voted = 0;
    for (int i = 0; i < consent->count; i++)
        voted |= consent->votes[i].world == council->rank && consent->votes[i].vote == DTRAIN__VOTE_YES;
    return voted && !consent->heard && dtrain__council_seat(council, consent->group) != NULL;
}

/* Makes room by dropping the oldest of the largest set, decided ones first. A set is the consents in which one certain
 * rank alone has voted, or all others. So a rank that votes in groups that do not exist drops its own votes first, and
 * a vote under way stays. What a call of this rank waits for always stays. A council that holds all ranks drops nothing
 * until the last end of a group leaves. */
static void dtrain__consent_evict(dtrain__council *council)
{
    dtrain__consent **worst = NULL;
    int kept = 0, most = 0, limit = council->size > DTRAIN__CONSENTS ? council->size : DTRAIN__CONSENTS;
    if (council->send == NULL)
        return;
    for (dtrain__consent *consent = council->consents; consent != NULL; consent = consent->next, kept++)
        consent->sole = dtrain__consent_sole(consent);
    for (dtrain__consent **at = &council->consents; kept >= limit && *at != NULL; at = &(*at)->next) {
        int alike = 0;
        for (dtrain__consent *other = council->consents; other != NULL; other = other->next)
            alike += other->sole == (*at)->sole;
        if (dtrain__consent_owed(council, *at) || alike < most)
            continue;
        if (alike > most || (*at)->decided || !(*worst)->decided)
            worst = at;
        most = alike;
    }
    if (worst != NULL)
        dtrain__consent_drop(council, worst);
}

/* The last end of a group has left, in a council that holds all ranks. */
static void dtrain__consent_forget(dtrain__council *council, uint64_t group)
{
    for (dtrain__consent **at = &council->consents; *at != NULL;)
        if ((*at)->group == group)
            dtrain__consent_drop(council, at);
        else
            at = &(*at)->next;
}

/* Puts aside, for reuse, the consents that nobody asks for again. A rank that votes in a group's consent N knows that N
 * - 1 is decided. So all its remaining members have voted in N - 1, and know the decisions before it. */
static void dtrain__consent_retire(dtrain__council *council, uint64_t group, uint64_t number)
{
    for (dtrain__consent **at = &council->consents; *at != NULL;) {
        dtrain__consent *consent = *at;
        if (consent->group != group || !consent->decided || number < 2 || consent->number > number - 2 ||
            !dtrain__consent_listed(council, consent)) {
            at = &consent->next;
            continue;
        }
        *at = consent->next;
        consent->next = council->spare_consents;
        council->spare_consents = consent;
    }
}

/* Returns one that was put aside for as many members, or NULL. */
static dtrain__consent *dtrain__consent_spare(dtrain__council *council, int count)
{
    for (dtrain__consent **at = &council->spare_consents; *at != NULL; at = &(*at)->next) {
        dtrain__consent *consent = *at;
        if (consent->count != count)
            continue;
        *at = consent->next;
        memset((void *)consent, 0, dtrain__consent_bytes(count));
        return consent;
    }
    return NULL;
}

/* Finds the listed members' consent, or makes one without votes. NULL: no memory. */
static dtrain__consent *dtrain__consent_open(dtrain__council *council, uint64_t group, uint64_t number, int kind)
{
    int count = council->listed;
    dtrain__consent *consent = dtrain__consent_find(council, group, number);
    if (consent != NULL)
        return consent;
    consent = dtrain__consent_spare(council, count);
    if (consent == NULL)
        consent = (dtrain__consent *)dtrain__alloc(council->allocator, dtrain__consent_bytes(count));
    if (consent == NULL)
        return NULL;
    dtrain__consent_evict(council);
    consent->group = group;
    consent->number = number;
    consent->kind = kind;
    consent->count = count;
    consent->flags = UINT64_MAX;
    for (int i = 0; i < count; i++)
        consent->votes[i].world = council->list[i];
    consent->next = council->consents;
    council->consents = consent;
    return consent;
}

static int dtrain__vote_says(const dtrain__consent *consent, const dtrain__vote *vote)
{
    return consent->decided ? vote->vote : vote->dead ? DTRAIN__VOTE_DEAD : vote->left ? DTRAIN__VOTE_OUT : vote->vote;
}

static void dtrain__consent_send(dtrain__council *council, int to, dtrain__consent *consent)
{
    unsigned char head[40], *body = (unsigned char *)(consent->votes + consent->count);
    dtrain__put_le(head, consent->group, 8);
    dtrain__put_le(head + 8, consent->number, 8);
    head[16] = (unsigned char)consent->kind;
    head[17] = (unsigned char)consent->decided;
    dtrain__put_le(head + 18, (uint64_t)consent->status, 2);
    dtrain__put_le(head + 20, consent->flags, 8);
    dtrain__put_le(head + 28, consent->id, 8);
    dtrain__put_le(head + 36, (uint64_t)consent->count, 4);
    for (int i = 0; i < consent->count; i++) {
        unsigned char *entry = body + i * DTRAIN__CONSENT_FRAME_BYTES;
        dtrain__put_le(entry, consent->votes[i].flags, 8);
        dtrain__put_le(entry + 8, (uint64_t)consent->votes[i].world, 4);
        entry[12] = (unsigned char)dtrain__vote_says(consent, &consent->votes[i]);
    }
    council->send(council->self, to, DTRAIN__FRAME_CONSENT, head, sizeof head, body,
                  (size_t)consent->count * DTRAIN__CONSENT_FRAME_BYTES);
}

static void dtrain__consent_answer(dtrain__council *council, dtrain__consent *consent)
{
    for (int i = 0; consent->decided == DTRAIN__CONSENT_DECIDED && i < consent->count; i++) {
        if (consent->votes[i].asks)
            dtrain__consent_send(council, consent->votes[i].world, consent);
        consent->votes[i].asks = 0;
    }
}

/* Marks the members that are gone, as the leader knows. Returns the first member still awaited, or -1. */
static int dtrain__consent_awaits(const dtrain__council *council, dtrain__consent *consent)
{
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        if (vote->left || council->gone(council->self, vote->world) != DTRAIN__PRESENT)
            vote->vote = DTRAIN__VOTE_OUT;
        if (vote->vote == DTRAIN__VOTE_NONE)
            return i;
    }
    return -1;
}

/* Whether those that voted may continue without the others.
 *
 *   doubtful  out: they could if members beside them prove to be dead
 *   torn      out: members that are not here may go on by themselves */
static int dtrain__consent_majority(dtrain__council *council, dtrain__consent *consent, int *doubtful, int *torn)
{
    int here = 0, dead = 0, lost = 0, beside = 1, lowest = -1, lowest_left = -1; /* lowest: whether that rank voted */
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        int yes = vote->vote == DTRAIN__VOTE_YES;
        if (!yes && council->gone(council->self, vote->world) != DTRAIN__LOST)
            continue; /* its end of the group, or its process, left of its own will */
        if (!yes && !vote->dead && dtrain__council_beside(council, council->rank, vote->world))
            vote->dead = council->dead(council->self, vote->world);
        here += yes;
        dead += !yes && vote->dead;
        lost += !yes && !vote->dead;
        beside = beside && dtrain__council_beside(council, consent->votes[0].world, vote->world);
        lowest = lowest < 0 ? yes : lowest;
        lowest_left = lowest_left < 0 && (yes || !vote->dead) ? yes : lowest_left;
    }
    int any = DTRAIN__ATOMIC_LOAD(&council->any_quorum, SEQ_CST) != 0, all = here + lost + (beside ? 0 : dead);
    *doubtful = beside && lost > 0;
    *torn = !any && all > here;
    return any || 2 * here > all || (2 * here == all && (beside ? lowest_left : lowest) == 1);
}

/* Whether to wait before too few are found to be left: a process whose connections have just ended may be dying. */
static int dtrain__consent_doubts(dtrain__council *council, dtrain__consent *consent)
{
    int64_t now = dtrain__os_now_ns();
    if (consent->doubt_ns == 0)
        consent->doubt_ns = now + DTRAIN__CONSENT_DOUBT_NS;
    if (now >= consent->doubt_ns)
        return 0;
    council->look_ns = now + DTRAIN__CONSENT_DOUBT_NS / 20;
    return 1;
}

static void dtrain__consent_settle(dtrain__council *council, dtrain__consent *consent)
{
    consent->decided = DTRAIN__CONSENT_DECIDED;
    dtrain__consent_answer(council, consent);
    council->tell(council->self);
}

/* Looks at a proposal. That of a leader before stands. This rank's stands once all that voted have acknowledged it, and
 * is taken back if one of them is gone. */
static void dtrain__consent_check(dtrain__council *council, dtrain__consent *consent)
{
    int asked = 0, taken_back = 0;
    int own = dtrain__plane_group_maker(consent->id) == council->rank;
    for (int i = 0; own && i < consent->count; i++) {
        const dtrain__vote *vote = &consent->votes[i];
        asked |= vote->asked;
        taken_back |= vote->asked && (vote->left || council->gone(council->self, vote->world) != DTRAIN__PRESENT);
    }
    if (taken_back)
        consent->decided = DTRAIN__CONSENT_OPEN;
    else if (!asked)
        dtrain__consent_settle(council, consent);
}

/* Decides what can be decided now. */
static void dtrain__consent_decide(dtrain__council *council, dtrain__consent *consent)
{
    int kind = 0, mixed = 0, doubtful = 0, torn = 0; /* mixed: members made different calls */
    if (dtrain__consent_awaits(council, consent) >= 0)
        return;
    int majority = dtrain__consent_majority(council, consent, &doubtful, &torn);
    if (!majority && doubtful && dtrain__consent_doubts(council, consent))
        return;
    consent->flags = UINT64_MAX;
    for (int i = 0; i < consent->count; i++) {
        const dtrain__vote *vote = &consent->votes[i];
        if (vote->vote != DTRAIN__VOTE_YES)
            continue;
        consent->flags &= vote->flags;
        mixed |= kind != 0 && kind != vote->kind;
        kind = vote->kind;
    }
    consent->id = dtrain__plane_group_id(dtrain__origin_serial(council->origin), council->rank);
    consent->status = mixed ? DTRAIN_ERR_MISMATCH : majority ? DTRAIN_OK : DTRAIN_ERR_PEER_LOST;
    consent->decided = DTRAIN__CONSENT_PROPOSED;
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        vote->asked = torn && majority && vote->vote == DTRAIN__VOTE_YES && vote->world != council->rank;
        if (vote->asked)
            dtrain__consent_send(council, vote->world, consent);
    }
    dtrain__consent_check(council, consent);
}

/* Tells the leader, which is on another machine, of members beside this rank that prove to be dead. */
static void dtrain__consent_report(dtrain__council *council, dtrain__consent *consent, int leader)
{
    int found = 0, unsure = 0;
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        if (vote->dead || council->gone(council->self, vote->world) != DTRAIN__LOST ||
            !dtrain__council_beside(council, council->rank, vote->world))
            continue;
        vote->dead = council->dead(council->self, vote->world);
        found |= vote->dead;
        unsure |= !vote->dead;
    }
    if (found)
        dtrain__consent_send(council, leader, consent);
    if (unsure)
        dtrain__consent_doubts(council, consent);
}

/* Decides whatever can be decided, and tells those that voted. */
static void dtrain__consent_step(dtrain__council *council)
{
    int leader = dtrain__council_leader(council), leads = leader == council->rank;
    council->look_ns = 0;
    for (dtrain__consent *consent = council->consents; consent != NULL; consent = consent->next) {
        if (!leads && !consent->decided && dtrain__consent_owed(council, consent) &&
            !dtrain__council_beside(council, council->rank, leader))
            dtrain__consent_report(council, consent, leader);
        if (leads && consent->decided == DTRAIN__CONSENT_PROPOSED)
            dtrain__consent_check(council, consent);
        if (leads && !consent->decided)
            dtrain__consent_decide(council, consent);
    }
}

/* Looks again at what waits for a proof. */
static void dtrain__consent_look(dtrain__council *council)
{
    if (council->look_ns != 0 && dtrain__os_now_ns() >= council->look_ns)
        dtrain__consent_step(council);
}

/* Notes the vote of a member, or this rank's own. */
static void dtrain__consent_note(dtrain__consent *consent, int world, int kind, uint64_t flags)
{
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        if (vote->world != world)
            continue;
        if (consent->decided)
            continue;
        vote->vote = DTRAIN__VOTE_YES;
        vote->kind = kind;
        vote->flags = flags;
    }
}

static void dtrain__consent_list(dtrain__seat *seat)
{
    dtrain__council_list(seat->council);
    for (int i = 0; i < seat->size; i++)
        dtrain__council_list_add(seat->council, (uint64_t)dtrain__seat_world(seat, i));
}

/* Votes in this rank's group. Voting again changes the vote until the consent is decided. Returns 0 if there is no
 * memory. */
static int dtrain__consent_vote(dtrain__seat *seat, const dtrain__agreement *agreement)
{
    dtrain__council *council = seat->council;
    int leader = dtrain__council_leader(council);
    dtrain__consent_list(seat);
    dtrain__consent_retire(council, seat->id, agreement->number);
    dtrain__consent *consent = dtrain__consent_open(council, seat->id, agreement->number, agreement->kind);
    if (consent == NULL)
        return 0;
    if (consent->decided == DTRAIN__CONSENT_PROPOSED && leader != council->rank)
        dtrain__consent_send(council, leader, consent);
    if (consent->decided)
        return 1;
    consent->kind = agreement->kind;
    for (int i = 0; i < seat->size; i++)
        if (dtrain__membership_left(seat->members, i))
            consent->votes[i].vote = DTRAIN__VOTE_OUT;
    dtrain__consent_note(consent, dtrain__seat_world(seat, seat->rank), agreement->kind, agreement->flags);
    if (leader != council->rank)
        dtrain__consent_send(council, leader, consent);
    dtrain__consent_step(council);
    return 1;
}

/* Whether this rank knows the decision; copies it then. */
static int dtrain__consent_decided(dtrain__seat *seat, dtrain__agreement *agreement)
{
    dtrain__council *council = seat->council;
    dtrain__consent_list(seat);
    dtrain__consent *consent = dtrain__consent_find(council, seat->id, agreement->number);
    int decided = consent != NULL && consent->decided == DTRAIN__CONSENT_DECIDED;
    if (decided)
        consent->heard = 1;
    agreement->given_up = council->given_up;
    agreement->status = council->given_up || consent == NULL ? DTRAIN_ERR_PEER_LOST : consent->status;
    if (consent != NULL && !decided)
        agreement->awaited =
            dtrain__council_leader(council) == council->rank && consent->decided == DTRAIN__CONSENT_OPEN
                ? dtrain__consent_awaits(council, consent)
                : -1;
    if (decided) {
        agreement->flags = consent->flags;
        agreement->id = consent->id;
    }
    for (int rank = 0; rank < council->listed; rank++)
        agreement->goes_on[rank] = decided && consent->votes[rank].vote == DTRAIN__VOTE_YES;
    return decided || council->given_up;
}

/* A member's end of the group is gone, or its process: it no longer votes. `world`: its rank in the world. */
static void dtrain__consent_left(dtrain__council *council, uint64_t group, int world)
{
    for (dtrain__consent *consent = council->consents; consent != NULL; consent = consent->next)
        for (int i = 0; consent->group == group && consent->decided != DTRAIN__CONSENT_DECIDED && i < consent->count;
             i++)
            if (consent->votes[i].world == world)
                consent->votes[i].left = 1, consent->votes[i].asks = 0;
}

/* There is a new leader: sends it everything that this rank keeps. */
static void dtrain__consent_resend(dtrain__council *council)
{
    int leader = dtrain__council_leader(council);
    for (dtrain__consent *consent = council->consents; consent != NULL; consent = consent->next)
        if (leader != council->rank)
            dtrain__consent_send(council, leader, consent);
}

static void dtrain__council_free(dtrain__council *council)
{
    for (int rank = 0; rank < council->size; rank++)
        dtrain__council_forget(council, rank, DTRAIN__EVERY_GROUP);
    dtrain__store_free(&council->store, council->allocator);
    dtrain__free(council->allocator, council->list);
    while (council->consents != NULL)
        dtrain__consent_drop(council, &council->consents);
    while (council->spare_consents != NULL)
        dtrain__consent_drop(council, &council->spare_consents);
    dtrain__council_close ended = DTRAIN__ATOMIC_LOAD(dtrain__council_closing(), SEQ_CST);
    if (ended != NULL && council->serial != 0)
        ended(council->serial);
}

/* A consent in a message. */
typedef struct dtrain__consent_frame {
    uint64_t group, number, kind, decided, status, flags, id, count;
    const unsigned char *entries; /* count of them */
} dtrain__consent_frame;

static int dtrain__consent_frame_read(dtrain__consent_frame *frame, dtrain__reader *reader)
{
    int good = dtrain__take(reader, &frame->group, 8) && dtrain__take(reader, &frame->number, 8) &&
               dtrain__take(reader, &frame->kind, 1) && dtrain__take(reader, &frame->decided, 1) &&
               dtrain__take(reader, &frame->status, 2) && dtrain__take(reader, &frame->flags, 8) &&
               dtrain__take(reader, &frame->id, 8) && dtrain__take(reader, &frame->count, 4);
    frame->entries = reader->at;
    return good && frame->decided <= DTRAIN__CONSENT_PROPOSED && dtrain__status_known(frame->status) &&
           reader->left % DTRAIN__CONSENT_FRAME_BYTES == 0 &&
           frame->count == reader->left / DTRAIN__CONSENT_FRAME_BYTES;
}

/* Lists a message's members. Returns whether `from` may send it. They must be the group's, if this rank knows the
 * group; else ranks of the world, with `from` among them. Nobody sends rank 0 a decision: it leads as long as it is
 * there. */
static int dtrain__consent_frame_fits(dtrain__council *council, int from, const dtrain__consent_frame *frame)
{
    int among = from == dtrain__council_leader(council);
    const dtrain__seat *seat = dtrain__council_seat(council, frame->group);
    if (frame->count == 0 || frame->count > (uint64_t)council->size ||
        (frame->decided && council->rank == 0 &&
         (frame->decided == DTRAIN__CONSENT_DECIDED || dtrain__plane_group_maker(frame->id) != 0)) ||
        (seat != NULL && frame->count != (uint64_t)seat->size))
        return 0;
    dtrain__council_list(council);
    for (uint64_t i = 0; i < frame->count; i++) {
        const unsigned char *entry = frame->entries + i * DTRAIN__CONSENT_FRAME_BYTES;
        uint64_t world = dtrain__get_le(entry + 8, 4);
        if (!dtrain__council_list_add(council, world) || entry[12] > DTRAIN__VOTE_DEAD ||
            (seat != NULL && dtrain__seat_world(seat, (int)i) != (int)world))
            return 0;
        among |= (int)world == from;
    }
    return among;
}

/* Counts a message's entries: all entries of a decision or proposal; else the vote of `from`, and whom it knows to have
 * left or to be dead. */
static void dtrain__consent_frame_count(dtrain__council *council, const dtrain__consent_frame *frame,
                                        dtrain__consent *consent, int from)
{
    for (int i = 0; i < consent->count; i++) {
        const unsigned char *entry = frame->entries + i * DTRAIN__CONSENT_FRAME_BYTES;
        dtrain__vote *mine = &consent->votes[i];
        int out = entry[12] == DTRAIN__VOTE_OUT || entry[12] == DTRAIN__VOTE_DEAD;
        mine->dead |= entry[12] == DTRAIN__VOTE_DEAD && dtrain__council_beside(council, from, mine->world);
        if (frame->decided)
            mine->vote = out ? (int)DTRAIN__VOTE_OUT : entry[12];
        else if (out && mine->vote == DTRAIN__VOTE_NONE)
            mine->vote = DTRAIN__VOTE_OUT;
        else if (mine->world == from && entry[12] == DTRAIN__VOTE_YES) {
            mine->asks = from != council->rank;
            dtrain__consent_note(consent, from, (int)frame->kind, dtrain__get_le(entry, 8));
        }
    }
}

/* The leader takes an acknowledgement of its proposal, or of one that it has taken back. */
static void dtrain__consent_acknowledged(dtrain__consent *consent, uint64_t id, int from)
{
    for (int i = 0; i < consent->count; i++) {
        dtrain__vote *vote = &consent->votes[i];
        if (vote->world != from)
            continue;
        vote->asks = 1;
        if (id == consent->id)
            vote->asked = 0;
    }
}

/* Takes a vote, a proposal or a decision. Returns 0 if it is malformed or out of place. */
static int dtrain__consent_take(dtrain__council *council, int from, dtrain__reader *reader)
{
    dtrain__consent_frame frame;
    int leader = dtrain__council_leader(council);
    if (!dtrain__consent_frame_read(&frame, reader) || !dtrain__consent_frame_fits(council, from, &frame))
        return 0;
    int leads = leader == council->rank, proposed = frame.decided == DTRAIN__CONSENT_PROPOSED;
    if (!frame.decided)
        dtrain__consent_retire(council, frame.group, frame.number);
    dtrain__consent *consent = dtrain__consent_open(council, frame.group, frame.number, (int)frame.kind);
    if (consent == NULL)
        return 1; /* without memory the call ends at its deadline */
    if (proposed && leads)
        dtrain__consent_acknowledged(consent, frame.id, from);
    if (!frame.decided) {
        dtrain__consent_frame_count(council, &frame, consent, from);
    } else if (consent->decided != DTRAIN__CONSENT_DECIDED &&
               !(proposed && dtrain__plane_group_maker(frame.id) == council->rank)) {
        dtrain__consent_frame_count(council, &frame, consent, from);
        consent->decided = proposed && !leads ? DTRAIN__CONSENT_PROPOSED : DTRAIN__CONSENT_DECIDED;
        consent->status = (dtrain_status)frame.status; /* what a leader before this one has proposed stands */
        consent->flags = frame.flags;
        consent->id = frame.id;
        if (consent->decided == DTRAIN__CONSENT_PROPOSED)
            dtrain__consent_send(council, leader, consent);
        else
            council->tell(council->self);
    }
    dtrain__consent_answer(council, consent);
    dtrain__consent_step(council);
    return 1;
}

/* A member's end of a group has left: it no longer votes or waits for a key. */
static void dtrain__council_left(dtrain__council *council, uint64_t group, int world)
{
    dtrain__council_forget(council, world, group);
    dtrain__consent_left(council, group, world);
    dtrain__consent_step(council);
}

/* This rank's end of a group is about to leave. Tells its members first what this rank knows to be decided: they no
 * longer ask a rank that has left. Then tells a leader that is no member. */
static void dtrain__council_leave(dtrain__seat *seat)
{
    dtrain__council *council = seat->council;
    unsigned char head[8];
    int leader = dtrain__council_leader(council);
    dtrain__put_le(head, seat->id, 8);
    dtrain__consent_list(seat);
    for (dtrain__consent *consent = council->consents; consent != NULL; consent = consent->next)
        for (int i = 0; consent->group == seat->id && consent->decided == DTRAIN__CONSENT_DECIDED && i < consent->count;
             i++)
            if (consent->votes[i].world != leader && consent->votes[i].world != council->rank)
                dtrain__consent_send(council, consent->votes[i].world, consent);
    if (!council->lists[leader])
        council->send(council->self, leader, DTRAIN__FRAME_BYE, head, sizeof head, NULL, 0);
}

/* Counts a rank as gone. */
static void dtrain__council_lost(dtrain__council *council, int rank)
{
    dtrain__council_forget(council, rank, DTRAIN__EVERY_GROUP);
    if (dtrain__council_leader(council) > rank) /* it was the leader */
        dtrain__consent_resend(council);
    dtrain__consent_step(council);
}

/* Waits for the end of an agreement, or of a store call; the other is NULL. Looks once more after the deadline. Returns
 * whether it has ended. */
static int dtrain__seat_await(dtrain__seat *seat, dtrain__agreement *agreement, const dtrain__store_call *call,
                              dtrain_status *status, int64_t deadline_ns)
{
    dtrain__council *council = seat->council;
    int ended, late = 0;
    for (unsigned turn = 0;; turn++) {
        uint64_t seen = DTRAIN__ATOMIC_LOAD(&council->news, SEQ_CST);
        dtrain__seat_lock(seat, 1);
        ended = agreement != NULL ? dtrain__consent_decided(seat, agreement)
                                  : dtrain__council_ended(seat, call, late, status);
        dtrain__seat_lock(seat, 0);
        if (ended || late)
            return ended;
        if (call != NULL && call->own)
            dtrain__os_sleep(1000000); /* the wake-ups of the group are its program's */
        else
            council->wait(seat, turn, deadline_ns, seen);
        late = dtrain__os_now_ns() >= deadline_ns;
    }
}

/* Votes and waits for the decision until deadline_ns; returns whether there is one. */
static int dtrain__seat_agree(dtrain__seat *seat, dtrain__agreement *agreement, int64_t deadline_ns)
{
    dtrain__seat_lock(seat, 1);
    agreement->starved = !agreement->voted && !dtrain__consent_vote(seat, agreement);
    dtrain__seat_lock(seat, 0);
    return !agreement->starved && dtrain__seat_await(seat, agreement, NULL, NULL, deadline_ns);
}

static dtrain_status dtrain__seat_store(dtrain__seat *seat, dtrain__store_call *call, int64_t deadline_ns)
{
    dtrain__seat_lock(seat, 1);
    dtrain_status status = dtrain__council_ask(seat, call);
    dtrain__seat_lock(seat, 0);
    if (status == DTRAIN_OK)
        dtrain__seat_await(seat, NULL, call, &status, deadline_ns);
    return status;
}

/* Takes one message from a rank that is not gone. Returns 0 if it is malformed or out of place. */
static int dtrain__council_take(dtrain__council *council, int from, int type, dtrain__reader *reader)
{
    uint64_t group;
    switch (type) {
    case DTRAIN__FRAME_BYE:
        if (!dtrain__take(reader, &group, 8) || reader->left > 0)
            return 0;
        dtrain__council_left(council, group, from);
        return 1;
    case DTRAIN__FRAME_ASK: return dtrain__council_take_ask(council, from, reader);
    case DTRAIN__FRAME_ANSWER: return dtrain__council_take_answer(council, from, reader);
    case DTRAIN__FRAME_CONSENT: return dtrain__consent_take(council, from, reader);
    default: return 0;
    }
}

#endif
