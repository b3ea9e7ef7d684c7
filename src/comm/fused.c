/* ---- >>fused ----
 * Collectives between ranks that read each other's buffers in place (see >>threads). Each rank posts its call and
 * buffers. Once all have posted, each rank does its part straight on all ranks' buffers. It returns when all have done
 * theirs. Small inputs travel in the post itself and need no second round. No step waits: fused_advance does what can
 * be done now, so blocking calls, the service thread and poll share it.
 *
 * Processes reach the buffers that are in windows (see >>window). Other buffers go through bounce buffers (see
 * >>bounce). An uneven all-to-all goes by messages, as a rank does not know all its rounds. So does a scan.
 *
 * At its deadline a rank withdraws its post. It marks the post and looks whether every peer has posted. If all have, it
 * removes the mark and continues. Ranks withdraw one after another. Peers commit only after they have seen every post
 * while no rank was withdrawing, so all ranks commit or none. */
#ifndef DTRAIN__FUSED
#define DTRAIN__FUSED
#include "op.c"
#include "recorder.c"
#include "plan.c"
#include "bounce.c"
#include "window.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__FUSED_INLINE_ALL ((size_t)32 << 10) /* inputs of all ranks, as each rank folds them all */
#define DTRAIN__FUSED_LOOKS 1000u                   /* between processes, before a rank sleeps */
enum { DTRAIN__FUSED_POST = 0, DTRAIN__FUSED_GATHER, DTRAIN__FUSED_BODY, DTRAIN__FUSED_BOUNCE, DTRAIN__FUSED_FINISH };

static int dtrain__fused_inline(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t bytes = dtrain__op_bytes(op);
    if (op->kind == DTRAIN__BARRIER)
        return 1;
    return (op->kind == DTRAIN__ALL_REDUCE || op->kind == DTRAIN__BROADCAST || op->kind == DTRAIN__REDUCE ||
            dtrain__op_scans(op)) &&
           bytes <= comm->shared->inline_bytes && bytes * (size_t)comm->size <= DTRAIN__FUSED_INLINE_ALL;
}

/* Whether the inputs travel in the posts themselves. Then no buffer needs a name. */
static int dtrain__fused_tiny(const dtrain__op *op)
{
    return op->inlined && dtrain__op_bytes(op) <= DTRAIN__POST_INLINE_BYTES;
}

static dtrain__post *dtrain__fused_post_of(const dtrain_comm *comm, const dtrain__op *op, int rank)
{
    return &comm->shared->slots[rank].posts[op->turn & 1];
}

/* Where a rank's small input lies. */
static unsigned char *dtrain__fused_data(const dtrain_comm *comm, const dtrain__op *op, int rank)
{
    return comm->shared->bounce != NULL && dtrain__op_bytes(op) > DTRAIN__POST_LINE_BYTES
               ? dtrain__bounce_buffer(comm, op, rank, 0)
               : dtrain__fused_post_of(comm, op, rank)->data;
}

/* Makes room beside the caller's buffers. An all-to-all in place lends a copy of its input, as peers read it while this
 * rank writes. Returns 0 without memory. */
static int dtrain__fused_lend(dtrain_comm *comm, dtrain__op *op)
{
    size_t bytes, out_bytes, offset;
    if (op->kind != DTRAIN__ALL_TO_ALL || op->in != op->out || !comm->plane->in_process)
        return 1;
    if (dtrain__op_sizes(comm, op, &bytes, &out_bytes, &offset) != DTRAIN_OK ||
        !dtrain__op_reserve(comm, op, &comm->scratch, bytes))
        return 0;
    if (bytes > 0)
        memcpy(comm->scratch, op->in, bytes);
    return 1;
}

/* Two calls that differ have different checks, except one pair in 2^64. */
static uint64_t dtrain__fused_check(const uint64_t *words)
{
    static const uint64_t odd = 0x9e3779b97f4a7c15u;
    uint64_t a = 1, b = 2; /* apart, as a product waits for the one before */
    for (int i = 0; i < DTRAIN__POST_WORDS; i += 2) {
        a = (a ^ words[i]) * odd;
        a ^= a >> 32;
        if (i + 1 == DTRAIN__POST_WORDS)
            break;
        b = (b ^ words[i + 1]) * odd;
        b ^= b >> 32;
    }
    return (a ^ b >> 29) * odd ^ b;
}

/* Whether a rank's buffers do not say all that peers need: an uneven all-to-all has counts, and one in place a copy. */
static int dtrain__fused_apart(const dtrain__op *op)
{
    return op->kind == DTRAIN__ALL_TO_ALL && (op->counts != NULL || op->in == op->out);
}

/* The bytes of a rank's input or output that peers may reach for. */
static size_t dtrain__fused_reach(const dtrain_comm *comm, const dtrain__op *op, int rank, int out)
{
    size_t width = dtrain__op_width(op), whole = dtrain__op_bytes(op);
    int root = rank == op->root;
    if (dtrain__fused_apart(op))
        return 0;
    for (int part = 0; op->counts != NULL && part < comm->size; part++) { /* the parts may leave gaps */
        size_t end = (comm->parts[part].begin + comm->parts[part].count) * width;
        whole = comm->parts[part].count > 0 && end > whole ? end : whole;
    }
    switch (op->kind) {
    case DTRAIN__ALL_REDUCE:
    case DTRAIN__SCAN: return whole;
    case DTRAIN__EXSCAN: return !out || rank > 0 ? whole : 0;
    case DTRAIN__REDUCE: return !out || root ? whole : 0;
    case DTRAIN__REDUCE_SCATTER:
    case DTRAIN__ALL_TO_ALL: return out ? 0 : whole;
    case DTRAIN__ALL_GATHER: return out ? 0 : comm->parts[rank].count * width;
    case DTRAIN__BROADCAST:
    case DTRAIN__SCATTER: return !out && root ? whole : 0;
    case DTRAIN__GATHER: return out && root ? whole : 0;
    default: return 0;
    }
}

/* Between processes: names this rank's buffers in its post. Returns 0 if some peer cannot reach them. */
static int dtrain__fused_name(dtrain_comm *comm, const dtrain__op *op, dtrain__post *post)
{
    int good = 1, any = 0;
    post->windows[0] = post->windows[1] = 0; /* as a leaving rank looks, whatever was called */
    for (int out = 0; out < 2 && !dtrain__fused_tiny(op); out++) {
        size_t bytes = dtrain__fused_reach(comm, op, comm->rank, out), place = 0;
        post->windows[out] =
            bytes > DTRAIN__POST_INLINE_BYTES ? dtrain__window_name(comm, out ? op->out : op->in, bytes, &place) : 0;
        post->places[out] = place;
        good = good && (bytes == 0 || post->windows[out] != 0);
        any |= bytes > 0;
    }
    if (!good)
        post->windows[0] = post->windows[1] = 0;
    return good && any;
}

/* Finds the buffers that all ranks have named. Returns how many of those that are needed have a name; *needed: how many
 * that are. */
static int dtrain__fused_named(const dtrain_comm *comm, const dtrain__op *op, int *needed)
{
    int named = 0, tiny = dtrain__fused_tiny(op);
    *needed = 0;
    for (int i = 0; i < 2 * comm->size && !tiny; i++)
        if (dtrain__fused_reach(comm, op, i / 2, i % 2) > 0) {
            named += dtrain__fused_post_of(comm, op, i / 2)->windows[i % 2] != 0;
            *needed += 1;
        }
    return named;
}

/* Maps the buffers that all ranks have named. Returns 0 with an error if a rank names what this one does not have. */
static int dtrain__fused_map(dtrain_comm *comm, dtrain__op *op)
{
    for (int i = 0; i < 2 * comm->size; i++) {
        int out = i % 2, rank = i / 2;
        const dtrain__post *post = dtrain__fused_post_of(comm, op, rank);
        size_t bytes = dtrain__fused_reach(comm, op, rank, out);
        unsigned char *buffer;
        memcpy(&buffer, out ? (const void *)&op->out : (const void *)&op->in, sizeof buffer);
        if (rank != comm->rank && bytes > 0)
            buffer = dtrain__window_find(comm, post->windows[out], rank, post->places[out], bytes);
        comm->buffers[i] = buffer;
        if (buffer == NULL && bytes > 0)
            return dtrain__fail(&op->error, DTRAIN_ERR_INVALID,
                                "%s on rank %d: rank %d names memory of dtrain_comm_alloc that this rank does not have",
                                dtrain__op_text(comm, op).text, comm->rank, rank) == DTRAIN_OK;
    }
    return 1;
}

/* A rank's input or output, as this rank reaches it. Between processes nothing that another one can write says where
 * this rank's own are. */
static unsigned char *dtrain__fused_buffer(const dtrain_comm *comm, const dtrain__op *op, int rank, int out)
{
    const dtrain__post *post = dtrain__fused_post_of(comm, op, rank);
    unsigned char *buffer;
    if (!comm->plane->in_process)
        return comm->buffers[2 * rank + out];
    memcpy(&buffer, out ? (const void *)&post->at.own.out : (const void *)&post->at.own.in, sizeof buffer);
    return buffer;
}

/* Whether peers wait for nothing but this rank's post. Then it comes first, and the clock is read while it travels. */
static int dtrain__fused_posts_first(const dtrain_comm *comm, const dtrain__op *op)
{
    return dtrain__op_is_fused(op) && comm->decided && dtrain__fused_inline(comm, op);
}

#define DTRAIN__FUSED_ASKED 8 /* peers whose posts a rank asks its caches for while its own travels */

/* Shows the post to the peers, and wakes those that sleep. The clock is read while the post travels to them. */
static void dtrain__fused_show(dtrain_comm *comm, dtrain__op *op, dtrain__post *post)
{
    DTRAIN__ATOMIC_STORE(&post->arrived, 2 * op->turn, RELEASE);
    for (int peer = 0; peer < comm->size && peer < DTRAIN__FUSED_ASKED; peer++)
        __builtin_prefetch(&dtrain__fused_post_of(comm, op, peer)->arrived);
    if (op->started_ns == 0)
        dtrain__op_clock(comm, op);
    DTRAIN__ATOMIC_FENCE(); /* a peer that falls asleep now has seen the post, or this rank sees that it sleeps */
    dtrain__shared_ring(comm->shared, comm->rank);
}

static void dtrain__fused_post(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__slot *slot = &comm->shared->slots[comm->rank];
    dtrain__post *post = dtrain__fused_post_of(comm, op, comm->rank);
    op->inlined = dtrain__fused_inline(comm, op);
    dtrain__op_call(comm, op, 0, (dtrain__call *)post->call);
    post->check = dtrain__fused_check(post->call);
    post->at.own.in = op->kind == DTRAIN__ALL_TO_ALL && op->in == op->out ? comm->scratch : op->in;
    post->at.own.out = op->out;
    post->at.own.counts = op->counts;
    post->at.own.offsets = op->offsets;
    int named = !comm->plane->in_process && dtrain__fused_name(comm, op, post);
    op->rounds = op->put = op->taken = 0;
    if (!named && op->inlined) {
        if ((op->kind != DTRAIN__BROADCAST || op->root == comm->rank) && op->count > 0)
            memcpy(dtrain__fused_data(comm, op, comm->rank), op->in, dtrain__op_bytes(op));
    } else if (!named && dtrain__bounce_may(comm, op) && op->count > 0) {
        dtrain__bounce_put(comm, op);
    }
    DTRAIN__ATOMIC_STORE(&slot->put, comm->rounds + op->put, RELAXED); /* peers look once it has arrived */
    dtrain__fused_show(comm, op, post);
    op->phase = DTRAIN__FUSED_GATHER;
    op->at = 0;
}

static int dtrain__fused_arrived(const dtrain_comm *comm, const dtrain__op *op, int peer)
{
    return DTRAIN__ATOMIC_LOAD(&dtrain__fused_post_of(comm, op, peer)->arrived, SEQ_CST) == 2 * op->turn;
}

#define DTRAIN__FUSED_STUCK_NS 200000000 /* inside a peer's buffers, where a rank is for a few milliseconds at most */

/* Whether a peer may be inside this rank's buffers. A process that has ended left its flag as it was. */
static int dtrain__fused_inside(const dtrain_comm *comm, int peer)
{
    const dtrain__council *council = comm->seat->council;
    if (peer == comm->rank || !DTRAIN__ATOMIC_LOAD(&comm->shared->slots[peer].inside, SEQ_CST))
        return 0;
    if (comm->plane->in_process)
        return 1;
    dtrain__seat_lock(comm->seat, 1);
    int world = dtrain__seat_world(comm->seat, peer), gone = council->gone(council->self, world);
    int inside = gone == DTRAIN__PRESENT || (gone == DTRAIN__LOST && !council->dead(council->self, world));
    dtrain__seat_lock(comm->seat, 0);
    return inside;
}

/* The group is broken: closes this rank's buffers, and waits until no peer is inside them. A process that was stopped
 * there goes on to write to memory that this rank does not see any more. */
static void dtrain__fused_revoke(dtrain_comm *comm, const dtrain__op *op)
{
    int64_t until = comm->plane->in_process ? INT64_MAX : dtrain__os_now_ns() + DTRAIN__FUSED_STUCK_NS;
    DTRAIN__ATOMIC_STORE(&comm->shared->slots[comm->rank].closed, 1, SEQ_CST);
    for (int peer = 0; peer < comm->size; peer++)
        while (dtrain__fused_inside(comm, peer)) {
            if (until == INT64_MAX || dtrain__os_now_ns() < until) {
                dtrain__os_yield();
                continue;
            }
            if (op->phase != DTRAIN__FUSED_POST && op->rounds == 0)
                dtrain__window_part_from(op->out, dtrain__fused_reach(comm, op, comm->rank, 1));
            return;
        }
}

/* Ends an operation of a broken group, once no peer is inside its buffers. */
static int dtrain__fused_end_broken(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__op_blame(comm, op, dtrain__group_cause(comm));
    dtrain__fused_revoke(comm, op);
    return 1;
}

/* Breaks the group with the operation's error, then waits until no peer is inside its buffers. */
static void dtrain__fused_break(dtrain_comm *comm, const dtrain__op *op)
{
    dtrain__group_break(comm, &op->error);
    dtrain__fused_revoke(comm, op);
}

/* Compares all posts, so every rank finds the same verdict, and none touches a buffer after a mismatch. */
static int dtrain__fused_agree(dtrain_comm *comm, dtrain__op *op)
{
    const dtrain__post *first = dtrain__fused_post_of(comm, op, 0);
    dtrain__call other, mine;
    int differs = 1;
    while (differs < comm->size && dtrain__fused_post_of(comm, op, differs)->check == first->check)
        differs++;
    if (differs >= comm->size)
        return 1;
    dtrain__op_call(comm, op, 0, &mine);
    if (memcmp(&mine, first->call, sizeof mine) != 0)
        differs = 0;
    memcpy(&other, dtrain__fused_post_of(comm, op, differs)->call, sizeof other);
    dtrain__op_mismatch(comm, op, differs, &other);
    return 0;
}

/* The elements in `rank`'s input that are for this rank. */
static dtrain_extent dtrain__fused_given(const dtrain_comm *comm, const dtrain__op *op, int rank)
{
    const dtrain__post *post = dtrain__fused_post_of(comm, op, rank);
    dtrain_extent given = comm->parts[comm->rank];
    if (op->kind == DTRAIN__ALL_GATHER || op->kind == DTRAIN__GATHER)
        given.begin = 0;
    if (op->kind != DTRAIN__ALL_TO_ALL || op->counts == NULL)
        return given;
    const size_t *counts = post->at.own.counts, *offsets = post->at.own.offsets;
    given.begin = offsets != NULL ? offsets[comm->rank] : 0;
    for (int to = 0; offsets == NULL && to < comm->rank; to++)
        given.begin += counts[to];
    given.count = counts[comm->rank];
    return given;
}

/* Checks the counts between this rank and each peer of an uneven all-to-all. The ranks of other pairs would go on, so a
 * mismatch breaks the group. */
static int dtrain__fused_even(dtrain_comm *comm, dtrain__op *op)
{
    size_t width = dtrain__op_width(op);
    for (int peer = 0; op->kind == DTRAIN__ALL_TO_ALL && op->counts != NULL && peer < comm->size; peer++) {
        size_t gives = dtrain__fused_given(comm, op, peer).count, awaits = comm->others[peer].count;
        if (gives == awaits)
            continue;
        dtrain__op_uneven(comm, op, peer, comm->rank, gives * width, awaits * width);
        dtrain__fused_break(comm, op);
        return 0;
    }
    return 1;
}

/* Whether ranks need nothing of each other after the posts, as each folds all inputs itself. named: how many buffers
 * have names. */
static int dtrain__fused_small(const dtrain__op *op, int named)
{
    return named == 0 && op->inlined;
}

static void dtrain__fused_whole(dtrain_comm *comm, dtrain__op *op)
{
    int folds = op->kind == DTRAIN__ALL_REDUCE || (op->kind == DTRAIN__REDUCE && comm->rank == op->root);
    int ranks = dtrain__op_scans(op) ? dtrain__op_scanned(comm, op) : folds * comm->size;
    if (op->kind == DTRAIN__BROADCAST && op->root != comm->rank && op->count > 0)
        memcpy(op->out, dtrain__fused_data(comm, op, op->root), dtrain__op_bytes(op));
    if (ranks == 0 || op->count == 0)
        return;
    for (int rank = 0; rank < comm->size; rank++)
        comm->ins[rank] = dtrain__fused_data(comm, op, rank);
    dtrain__fold(op->dtype, op->op, ranks, comm->ins, ranks, &op->out, 1, 0, op->count);
}

#define DTRAIN__FUSED_STOPPED_NS 2000000000 /* of another rank that withdraws, which takes microseconds */

/* Makes this rank the one that withdraws. Returns 0 if another one was stopped or killed while it did so. */
static int dtrain__fused_lock(dtrain_comm *comm, uint64_t *withdrawn)
{
    uint64_t *word = &comm->shared->slots[0].withdrawn;
    int64_t until = dtrain__os_now_ns() + DTRAIN__FUSED_STOPPED_NS;
    *withdrawn = DTRAIN__ATOMIC_LOAD(word, SEQ_CST) & ~(uint64_t)1;
    while (!DTRAIN__ATOMIC_COMPARE_EXCHANGE(word, withdrawn, *withdrawn + 1, SEQ_CST)) {
        *withdrawn &= ~(uint64_t)1;
        if (!comm->plane->in_process && (dtrain__membership_broken(comm->members) || dtrain__os_now_ns() > until))
            return 0;
        dtrain__os_yield();
    }
    return 1;
}

/* Withdraws this rank's post by marking it. Returns a peer that has not posted. Returns -1 if all had: then the post
 * stands, and the operation must continue. Sets op->touched if nobody can tell: then the group must break. */
static int dtrain__fused_retract(dtrain_comm *comm, dtrain__op *op)
{
    dtrain__shared *shared = comm->shared;
    uint64_t *arrived = &dtrain__fused_post_of(comm, op, comm->rank)->arrived, withdrawn;
    int missing = -1;
    if (!dtrain__fused_lock(comm, &withdrawn)) {
        op->touched = 1;
        return op->awaited >= 0 ? op->awaited : comm->rank == 0;
    }
    DTRAIN__ATOMIC_STORE(arrived, 2 * op->turn + 1, SEQ_CST);
    for (int peer = 0; peer < comm->size && missing < 0; peer++)
        if (peer != comm->rank && !dtrain__fused_arrived(comm, op, peer))
            missing = peer;
    if (missing < 0)
        DTRAIN__ATOMIC_STORE(arrived, 2 * op->turn, SEQ_CST);
    DTRAIN__ATOMIC_STORE(&shared->slots[0].withdrawn, withdrawn + 2, SEQ_CST);
    dtrain__shared_ring(shared, comm->rank);
    return missing;
}

/* This rank leaves with the operation under way. Returns 1 if peers may use its buffers now or later, so that the group
 * must break. */
static int dtrain__fused_cancel(dtrain_comm *comm, dtrain__op *op)
{
    int rank = 0, needed, missing;
    if (comm->plane->in_process || !dtrain__op_is_fused(op) || op->phase == DTRAIN__FUSED_POST)
        return comm->plane->in_process;
    if (op->phase == DTRAIN__FUSED_GATHER) {
        missing = dtrain__fused_retract(comm, op);
        return op->touched || (missing < 0 && !dtrain__fused_small(op, dtrain__fused_named(comm, op, &needed)));
    }
    if (op->rounds > 0)
        return op->phase != DTRAIN__FUSED_FINISH;
    while (rank < comm->size && DTRAIN__ATOMIC_LOAD(&comm->shared->slots[rank].finished, SEQ_CST) >= op->turn)
        rank++;
    return rank < comm->size;
}

/* Withdraws this rank's post at its deadline; returns 0 if every peer had posted and the operation continues. */
static int dtrain__fused_withdraw(dtrain_comm *comm, dtrain__op *op)
{
    int missing = dtrain__fused_retract(comm, op);
    if (missing < 0)
        return 0;
    /* keep the peer awaited all along, not one that has just withdrawn its post */
    if (op->awaited < 0 || dtrain__fused_arrived(comm, op, op->awaited))
        op->awaited = missing;
    dtrain__recorder_expire(comm, op);
    if (op->touched)
        dtrain__fused_break(comm, op);
    return 1;
}

/* All ranks have posted an operation whose buffers they cannot reach: it continues by messages. A failure now breaks
 * the group, as some rank may have sent. */
static int dtrain__fused_pass(dtrain_comm *comm, dtrain__op *op)
{
    op->posted = op->touched = 1;
    op->phase = DTRAIN__FUSED_POST;
    op->algorithm = dtrain__plan_select(comm, op);
    return 0;
}

static int dtrain__fused_all_arrived(const dtrain_comm *comm, const dtrain__op *op)
{
    int peer = 0;
    while (peer < comm->size && dtrain__fused_arrived(comm, op, peer))
        peer++;
    return peer == comm->size;
}

/* A peer has not posted; left: it had left before this rank looked. Returns 1 if that ends the operation. */
static int dtrain__fused_lacks(dtrain_comm *comm, dtrain__op *op, int peer, int left)
{
    int missing = dtrain__membership_misses(comm->members, op->number);
    op->at = (size_t)peer;
    op->awaited = peer;
    left |= missing >= 0; /* it will not post, and nothing has moved */
    missing = missing >= 0 ? missing : peer;
    if (left)
        dtrain__op_needs_left(comm, op, missing);
    /* a peer may have posted, ended the operation and died since this rank looked for its post */
    if (dtrain__membership_broken(comm->members) && !dtrain__fused_all_arrived(comm, op))
        return dtrain__fused_end_broken(comm, op);
    if (!left)
        return 0;
    if (dtrain__fused_retract(comm, op) < 0) { /* all have posted by now, so the others do not wait for who left */
        op->error.status = DTRAIN_OK;
        return 0;
    }
    comm->messages.missed = op->number << DTRAIN__RANK_BITS | (uint64_t)missing;
    if (op->touched)
        dtrain__fused_break(comm, op);
    return 1;
}

/* Returns 1 if the operation has ended; else op->phase says whether all ranks have posted. */
static int dtrain__fused_gather(dtrain_comm *comm, dtrain__op *op)
{
    int peer = (int)op->at;
    for (; peer < comm->size; peer++) {
        int left = dtrain__membership_left(comm->members, peer);
        if (!dtrain__fused_arrived(comm, op, peer))
            return dtrain__fused_lacks(comm, op, peer, left);
    }
    op->at = 0;
    uint64_t *word = &comm->shared->slots[0].withdrawn, withdrawn = DTRAIN__ATOMIC_LOAD(word, SEQ_CST);
    if (!dtrain__fused_all_arrived(comm, op))
        return 0;
    if (withdrawn % 2 != 0 || DTRAIN__ATOMIC_LOAD(word, SEQ_CST) != withdrawn) /* the rank that withdraws rings */
        return dtrain__membership_broken(comm->members) && dtrain__fused_end_broken(comm, op);
    op->awaited = -1;
    comm->turn = op->turn;
    if (!dtrain__fused_agree(comm, op)) {
        comm->number = op->number;
        return 1;
    }
    int needed = 0, named = comm->plane->in_process ? 0 : dtrain__fused_named(comm, op, &needed);
    int small = dtrain__fused_small(op, named);
    int remote = !small && !comm->plane->in_process && (named < needed || dtrain__fused_apart(op));
    int bounces = remote && dtrain__bounce_may(comm, op);
    if (remote && !bounces)
        return dtrain__fused_pass(comm, op);
    comm->number = op->number;
    if (small) {
        /* No peer looks at the other post any more. This write fetches its line from them before the next call. */
        comm->shared->slots[comm->rank].posts[~op->turn & 1].check = 0;
        dtrain__fused_whole(comm, op);
        return 1;
    }
    if (bounces)
        op->rounds = dtrain__bounce_rounds(comm, op);
    else if (!comm->plane->in_process && !dtrain__fused_map(comm, op)) {
        dtrain__fused_break(comm, op);
        return 1;
    }
    if (comm->plane->in_process && !dtrain__fused_even(comm, op))
        return 1;
    op->touched = 1;
    dtrain__recorder_moved(comm, op);
    op->phase = bounces ? DTRAIN__FUSED_BOUNCE : DTRAIN__FUSED_BODY;
    return 0;
}

/* Folds elements [begin, begin + n) of all inputs into every rank's output, the root's, or this rank's. */
static void dtrain__fused_reduce(dtrain_comm *comm, const dtrain__op *op, size_t begin, size_t n)
{
    size_t width = dtrain__op_width(op);
    size_t offset = op->kind == DTRAIN__REDUCE_SCATTER ? begin - comm->parts[comm->rank].begin : begin;
    int outs = op->kind == DTRAIN__ALL_REDUCE ? comm->size : 1;
    for (int rank = 0; rank < comm->size; rank++) {
        comm->ins[rank] = dtrain__fused_buffer(comm, op, rank, 0) + begin * width;
        if (outs > 1)
            comm->outs[rank] = dtrain__fused_buffer(comm, op, rank, 1) + offset * width;
    }
    if (op->kind == DTRAIN__REDUCE)
        comm->outs[0] = dtrain__fused_buffer(comm, op, op->root, 1) + offset * width;
    else if (outs == 1)
        comm->outs[0] = (unsigned char *)op->out + offset * dtrain__op_result_width(op);
    dtrain__op_fold(comm, op, comm->outs, outs, n);
}

/* Folds the inputs of ranks 0 to r into rank r's output, for all r. The last rank comes first, as an output may be the
 * same rank's input. */
static void dtrain__fused_scan(dtrain_comm *comm, const dtrain__op *op, size_t begin, size_t n)
{
    size_t width = dtrain__op_width(op), tile = DTRAIN__FOLD_TILE_BYTES / width;
    int before = op->kind == DTRAIN__EXSCAN; /* ranks that get nothing */
    for (size_t end = begin + n; begin < end; begin += tile) {
        size_t count = end - begin < tile ? end - begin : tile;
        for (int rank = 0; rank < comm->size; rank++)
            comm->ins[rank] = dtrain__fused_buffer(comm, op, rank, 0) + begin * width;
        for (int rank = comm->size - 1; rank >= before; rank--) {
            void *out = dtrain__fused_buffer(comm, op, rank, 1) + begin * width;
            int ranks = rank + 1 - before;
            dtrain__fold(op->dtype, op->op, ranks, comm->ins, ranks, &out, 1, 0, count);
        }
    }
}

static void dtrain__fused_move(unsigned char *to, const unsigned char *from, size_t bytes)
{
    if (from != to)
        memcpy(to, from, bytes);
}

/* Copies elements [from, from + n) of what all ranks have for this one, taken end to end. */
static void dtrain__fused_collect(const dtrain_comm *comm, const dtrain__op *op, size_t from, size_t n)
{
    size_t width = dtrain__op_width(op), before = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        const dtrain_extent *part = &(op->kind == DTRAIN__ALL_TO_ALL ? comm->others : comm->parts)[rank];
        size_t low = from > before ? from : before, end = before + part->count;
        end = end < from + n ? end : from + n;
        if (low < end) {
            size_t given = dtrain__fused_given(comm, op, rank).begin + low - before;
            dtrain__fused_move((unsigned char *)op->out + (part->begin + low - before) * width,
                               dtrain__fused_buffer(comm, op, rank, 0) + given * width, (end - low) * width);
        }
        before += part->count;
    }
}

/* Reduces or copies elements [begin, begin + n) of the buffers of fused calls, taken end to end. */
static void dtrain__fused_segments(dtrain_comm *comm, dtrain__op *op, size_t begin, size_t n)
{
    size_t width = dtrain__op_width(op);
    const dtrain__segment *mine = (const dtrain__segment *)op->in;
    for (size_t k = 0, low = 0; n > 0; low += mine[k++].count) {
        if (begin >= low + mine[k].count)
            continue;
        size_t at = (begin - low) * width, left = low + mine[k].count - begin, part = n < left ? n : left;
        for (int rank = 0; rank < comm->size; rank++) {
            const dtrain__segment *theirs = (const dtrain__segment *)dtrain__fused_post_of(comm, op, rank)->at.own.in;
            comm->ins[rank] = (const unsigned char *)theirs[k].in + at;
            comm->outs[rank] = (unsigned char *)theirs[k].out + at;
        }
        if (op->kind == DTRAIN__BROADCAST)
            memcpy(comm->outs[comm->rank], comm->ins[op->root], part * width);
        else
            dtrain__op_fold(comm, op, comm->outs, comm->size, part);
        begin += part;
        n -= part;
    }
}

/* Copies elements [from, from + n) of one buffer: the root's, or this rank's part to or from the root. */
static void dtrain__fused_copy(const dtrain_comm *comm, const dtrain__op *op, size_t from, size_t n)
{
    size_t width = dtrain__op_width(op), at = op->kind == DTRAIN__BROADCAST ? 0 : comm->parts[comm->rank].begin;
    int gathers = op->kind == DTRAIN__GATHER;
    const unsigned char *source = dtrain__fused_buffer(comm, op, gathers ? comm->rank : op->root, 0);
    unsigned char *target = gathers ? dtrain__fused_buffer(comm, op, op->root, 1) : (unsigned char *)op->out;
    dtrain__fused_move(target + (from + (gathers ? at : 0)) * width, source + (from + (gathers ? 0 : at)) * width,
                       n * width);
}

/* This rank's part of the work, in elements. */
static size_t dtrain__fused_share(const dtrain_comm *comm, const dtrain__op *op, size_t *begin)
{
    size_t total = 0;
    *begin = 0;
    switch (op->kind) {
    case DTRAIN__REDUCE_SCATTER: *begin = comm->parts[comm->rank].begin; return comm->parts[comm->rank].count;
    case DTRAIN__GATHER:
    case DTRAIN__SCATTER: return comm->parts[comm->rank].count;
    case DTRAIN__BROADCAST: return op->root == comm->rank ? 0 : op->count;
    case DTRAIN__ALL_GATHER: return op->count;
    case DTRAIN__ALL_TO_ALL:
        for (int rank = 0; rank < comm->size; rank++)
            total += comm->others[rank].count;
        return total;
    default: return dtrain__bounce_share(comm, op, op->count, comm->rank, begin);
    }
}

/* Does a part of this rank's work. */
static void dtrain__fused_work(dtrain_comm *comm, dtrain__op *op, size_t from, size_t n)
{
    if (op->scattered)
        dtrain__fused_segments(comm, op, from, n);
    else if (dtrain__op_scans(op))
        dtrain__fused_scan(comm, op, from, n);
    else if (dtrain__op_reduces(op))
        dtrain__fused_reduce(comm, op, from, n);
    else if (op->kind == DTRAIN__ALL_GATHER || op->kind == DTRAIN__ALL_TO_ALL)
        dtrain__fused_collect(comm, op, from, n);
    else
        dtrain__fused_copy(comm, op, from, n);
}

/* This rank has done its part of the operation. */
static void dtrain__fused_done(dtrain_comm *comm, dtrain__op *op)
{
    DTRAIN__ATOMIC_STORE(&comm->shared->slots[comm->rank].finished, op->turn, SEQ_CST);
    dtrain__shared_ring(comm->shared, comm->rank);
    op->at = 0;
    op->phase = DTRAIN__FUSED_FINISH;
}

/* The operation awaits a peer, which had left when the caller looked in vain. Returns whether the operation has ended,
 * with an error. */
static int dtrain__fused_stuck(dtrain_comm *comm, dtrain__op *op, int left)
{
    if (left) { /* in the middle of the operation */
        dtrain__error lost;
        dtrain__seat_needed(comm->seat, op->awaited);
        lost = dtrain__thread_error;
        dtrain__group_break(comm, &lost);
    }
    return dtrain__membership_broken(comm->members) && dtrain__fused_end_broken(comm, op);
}

/* A peer has closed its buffers, and this process may not have heard the reason yet. Returns whether the operation has
 * ended. */
static int dtrain__fused_shut(dtrain_comm *comm, dtrain__op *op)
{
    for (int peer = 0; peer < comm->size; peer++)
        if (DTRAIN__ATOMIC_LOAD(&comm->shared->slots[peer].closed, SEQ_CST) != 0)
            op->awaited = peer;
    return dtrain__fused_stuck(comm, op, op->awaited >= 0 && dtrain__membership_left(comm->members, op->awaited));
}

static int dtrain__fused_body(dtrain_comm *comm, dtrain__op *op, int64_t until_ns)
{
    dtrain__shared *shared = comm->shared;
    size_t begin, share = dtrain__fused_share(comm, op, &begin);
    size_t chunk = (until_ns == INT64_MAX ? (size_t)4 << 20 : (size_t)64 << 10) / dtrain__op_width(op);
    while (op->at < share) {
        size_t n = share - op->at < chunk ? share - op->at : chunk;
        if (!dtrain__shared_enter(shared, comm->rank))
            return dtrain__fused_shut(comm, op);
        dtrain__fused_work(comm, op, begin + op->at, n);
        dtrain__shared_leave(shared, comm->rank);
        op->at += n;
        if (until_ns != INT64_MAX && op->at < share && dtrain__os_now_ns() >= until_ns)
            return 0;
    }
    dtrain__fused_done(comm, op);
    return 0;
}

/* Returns whether the operation has ended: an operation of one round needs no peer's end. */
static int dtrain__fused_bounce(dtrain_comm *comm, dtrain__op *op, int64_t until_ns)
{
    while (!dtrain__bounce_advance(comm, op, until_ns)) {
        int awaited = op->awaited;
        if (awaited < 0 || !dtrain__membership_left(comm->members, awaited))
            return dtrain__fused_stuck(comm, op, 0);
        if (!dtrain__bounce_step(comm, op) && op->awaited == awaited) /* it has not done this before it left */
            return dtrain__fused_stuck(comm, op, 1);
    }
    dtrain__fused_done(comm, op);
    return op->rounds <= 1;
}

/* Waits until all ranks have finished. Returns 1 once they have, or at the operation's end: then with an error. */
static int dtrain__fused_await(dtrain_comm *comm, dtrain__op *op)
{
    for (int peer = (int)op->at; peer < comm->size; peer++) {
        int left = dtrain__membership_left(comm->members, peer);
        if (DTRAIN__ATOMIC_LOAD(&comm->shared->slots[peer].finished, SEQ_CST) >= op->turn)
            continue;
        op->at = (size_t)peer;
        op->awaited = peer;
        return dtrain__fused_stuck(comm, op, left);
    }
    return 1;
}

/* Lets a little time pass before the next look. Beside other programs a yield may take many milliseconds, so the clock
 * is read after each. Returns `turn`, or after until_ns DTRAIN__FUSED_LOOKS. */
static unsigned dtrain__fused_look(const dtrain_comm *comm, unsigned turn, int64_t until_ns)
{
    if (!comm->shared->crowded || turn % 4 != 3) { /* the awaited one may run on another processor */
        dtrain__os_pause();
        return turn;
    }
    dtrain__os_yield();
    return dtrain__os_now_ns() < until_ns ? turn : DTRAIN__FUSED_LOOKS;
}

/* Waits once between processes: looks again, then sleeps until the doorbell or news of the world. turn: how many waits
 * came before, since something moved. Returns how many these count as. */
static unsigned dtrain__fused_wait(dtrain_comm *comm, unsigned turn, int64_t until_ns, int (*ready)(void *),
                                   void *context)
{
    dtrain__council *council = comm->seat->council;
    uint32_t *asleep = &comm->shared->slots[comm->rank].asleep;
    if (turn < DTRAIN__FUSED_LOOKS)
        return dtrain__fused_look(comm, turn, until_ns);
    uint64_t seen = DTRAIN__ATOMIC_LOAD(&council->news, SEQ_CST);
    DTRAIN__ATOMIC_STORE(asleep, 1, SEQ_CST);
    if (!ready(context))
        council->wait(comm->seat, turn, until_ns, seen);
    DTRAIN__ATOMIC_STORE(asleep, 0, SEQ_CST);
    return turn;
}

/* The service thread cannot advance the operation and will sleep. Returns 1 if it must look once more before. */
static int dtrain__fused_doze(dtrain_comm *comm)
{
    comm->plane->sharing->doze(comm->transport.self);
    return DTRAIN__ATOMIC_EXCHANGE(&comm->shared->slots[comm->rank].asleep, 1, SEQ_CST) == 0;
}

/* Advances the operation without waiting, and not much beyond until_ns; returns 1 at its end. */
static int dtrain__fused_advance(dtrain_comm *comm, dtrain__op *op, int64_t until_ns)
{
    if (op->phase == DTRAIN__FUSED_POST) {
        op->number = comm->number + 1;
        op->turn = comm->turn + 1;
        if (dtrain__membership_broken(comm->members))
            return dtrain__fused_end_broken(comm, op);
        if (!dtrain__op_tables(comm, op))
            return 1;
        dtrain__op_layout(comm, op);
        if (!dtrain__fused_lend(comm, op))
            return 1;
        dtrain__fused_post(comm, op);
    }
    if (op->phase == DTRAIN__FUSED_GATHER && dtrain__fused_gather(comm, op))
        return 1;
    if (op->phase == DTRAIN__FUSED_BODY && dtrain__fused_body(comm, op, until_ns))
        return 1;
    if (op->phase == DTRAIN__FUSED_BOUNCE && dtrain__fused_bounce(comm, op, until_ns))
        return 1;
    return op->phase == DTRAIN__FUSED_FINISH && dtrain__fused_await(comm, op);
}

/* Ends an operation whose deadline has passed; returns 0 if it continues after all. */
static int dtrain__fused_expire(dtrain_comm *comm, dtrain__op *op)
{
    if (op->phase == DTRAIN__FUSED_GATHER)
        return dtrain__fused_withdraw(comm, op);
    dtrain__recorder_expire(comm, op);
    dtrain__fused_break(comm, op);
    return 1;
}

DTRAIN__FAST_END
#endif
