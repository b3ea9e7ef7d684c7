/* ---- >>plan ----
 * The plan that an operation follows. It is asked for by name, or selected by kind, size and number of ranks, so that
 * all ranks select the same. */
#ifndef DTRAIN__PLAN
#define DTRAIN__PLAN
#include "step.c"
#include "tree.c"
#include "halving.c"
#include "rounds.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__PLAN_BRUCK ((size_t)64 << 10) /* bytes that a rank may hold of all ranks' inputs */
#define DTRAIN__PLAN_WHOLE ((size_t)32 << 10) /* up to these bytes, reductions use few whole messages */
#define DTRAIN__PLAN_PIPE ((size_t)2 << 20)   /* above these bytes, a broadcast goes from rank to rank */

/* Whether it keeps partial sums of the whole vector: loaded before the first step, finished after the last. */
static int dtrain__plan_whole(const dtrain__op *op)
{
    return dtrain__op_reduces(op) && op->algorithm != DTRAIN_ALGORITHM_HALVING_DOUBLING &&
           op->algorithm != DTRAIN_ALGORITHM_DIRECT && op->algorithm != DTRAIN_ALGORITHM_BRUCK;
}

static size_t dtrain__plan_scratch(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t halves = dtrain__op_scans(op) ? 3 : dtrain__step_holds_in_out(op) ? 1 : 2;
    switch (op->algorithm) {
    case DTRAIN_ALGORITHM_HALVING_DOUBLING: return dtrain__halving_scratch(comm, op);
    case DTRAIN_ALGORITHM_DIRECT: return dtrain__direct_scratch(comm, op);
    case DTRAIN_ALGORITHM_BRUCK: return dtrain__bruck_scratch(comm, op);
    default: return dtrain__plan_whole(op) ? halves * dtrain__step_half(op) : 0;
    }
}

/* A message of the caller, or two that cross. */
static int dtrain__plan_message(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    size_t width = dtrain__op_width(op);
    if (op->kind != DTRAIN__RECV && op->root >= 0)
        dtrain__step_send(step, op->root, (const unsigned char *)op->in, op->count * width);
    if (op->kind == DTRAIN__RECV)
        dtrain__step_recv(step, op->root, (unsigned char *)op->out, op->count * width);
    else if (op->kind == DTRAIN__EXCHANGE && op->from >= 0)
        dtrain__step_recv(step, op->from, (unsigned char *)op->out, op->in_count * width);
    step->send_first = comm->rank < op->root;
    step->tag_out = step->tag_in = 0;
    return k == 0;
}

/* Fills in step k of an operation; returns 0 if there is no such step. */
static int dtrain__plan_step(const dtrain_comm *comm, const dtrain__op *op, int k, dtrain__step *step)
{
    memset(step, 0, sizeof *step);
    step->to = step->from = -1;
    step->tag_out = step->tag_in = (uint64_t)k;
    if (dtrain__op_is_message(op))
        return dtrain__plan_message(comm, op, k, step);
    switch (op->algorithm) {
    case DTRAIN_ALGORITHM_HALVING_DOUBLING: return dtrain__halving_plan(comm, op, k, step);
    case DTRAIN_ALGORITHM_NODES: return dtrain__tree_nodes(comm, op, k, step);
    case DTRAIN_ALGORITHM_DOUBLE_TREE: return dtrain__tree_two(comm, op, k, step);
    case DTRAIN_ALGORITHM_BRUCK: return dtrain__bruck_plan(comm, op, k, step);
    case DTRAIN_ALGORITHM_RING:
        return op->kind == DTRAIN__BROADCAST ? dtrain__ring_broadcast(comm, op, k, step)
                                             : dtrain__ring_plan(comm, op, k, step);
    case DTRAIN_ALGORITHM_DIRECT:
        return dtrain__op_reduces(op)                                      ? dtrain__direct_reduce(comm, op, k, step)
               : op->kind == DTRAIN__GATHER || op->kind == DTRAIN__SCATTER ? dtrain__direct_root(comm, op, k, step)
                                                                           : dtrain__direct_pairs(comm, op, k, step);
    default: return dtrain__tree_plan(comm, op, k, step);
    }
}

/* Whether a kind of operation over messages has this algorithm. */
static int dtrain__plan_exists(const dtrain_comm *comm, dtrain__kind kind, dtrain_algorithm algorithm)
{
    int sums = kind == DTRAIN__ALL_REDUCE || kind == DTRAIN__REDUCE_SCATTER;
    if (kind == DTRAIN__SCAN || kind == DTRAIN__EXSCAN)
        return algorithm == DTRAIN_ALGORITHM_TREE;
    switch (algorithm) {
    case DTRAIN_ALGORITHM_TREE: return sums || kind == DTRAIN__REDUCE || kind == DTRAIN__BROADCAST;
    case DTRAIN_ALGORITHM_RECURSIVE_DOUBLING: return sums && dtrain__step_power_of_two(comm->size);
    case DTRAIN_ALGORITHM_RING: return sums || kind == DTRAIN__ALL_GATHER || kind == DTRAIN__BROADCAST;
    case DTRAIN_ALGORITHM_HALVING_DOUBLING:
    case DTRAIN_ALGORITHM_DOUBLE_TREE: return kind == DTRAIN__ALL_REDUCE && comm->size > 1;
    case DTRAIN_ALGORITHM_NODES: return kind == DTRAIN__ALL_REDUCE && comm->node_ranks > 0;
    case DTRAIN_ALGORITHM_BRUCK:
        return kind == DTRAIN__ALL_REDUCE || kind == DTRAIN__ALL_GATHER || kind == DTRAIN__BARRIER;
    case DTRAIN_ALGORITHM_DIRECT: return kind != DTRAIN__BROADCAST && kind != DTRAIN__BARRIER;
    default: return 0;
    }
}

static dtrain_algorithm dtrain__plan_all_reduce(const dtrain_comm *comm, size_t bytes)
{
    int doubles = dtrain__step_power_of_two(comm->size);
    size_t kib = !doubles          ? 32
                 : comm->size == 2 ? 256
                 : comm->size == 4 ? 64
                                   : 128; /* up to this size few whole steps
                                           * are faster */
    if (comm->size > 1 && bytes > kib << 10)
        return DTRAIN_ALGORITHM_HALVING_DOUBLING;
    if (doubles)
        return DTRAIN_ALGORITHM_RECURSIVE_DOUBLING;
    /* fewer steps between hosts, fewer messages on one */
    return comm->node_ranks != comm->size && bytes * (size_t)comm->size <= DTRAIN__PLAN_BRUCK ? DTRAIN_ALGORITHM_BRUCK
                                                                                              : DTRAIN_ALGORITHM_TREE;
}

/* Whether a collective is posted if the ranks share posts. */
static int dtrain__plan_fuses(const dtrain_comm *comm, const dtrain__op *op)
{
    dtrain_algorithm asked = comm->asked[op->kind];
    return !dtrain__op_is_message(op) && (asked == DTRAIN_ALGORITHM_AUTO || asked == DTRAIN_ALGORITHM_FUSED);
}

static dtrain_algorithm dtrain__plan_select(const dtrain_comm *comm, const dtrain__op *op)
{
    size_t bytes = dtrain__op_bytes(op);
    int doubles = dtrain__step_power_of_two(comm->size);
    dtrain_algorithm asked = comm->asked[op->kind];
    if (dtrain__op_is_message(op))
        return DTRAIN_ALGORITHM_AUTO;
    int fused = comm->shared != NULL && !op->posted;
    if (fused && dtrain__plan_fuses(comm, op))
        return DTRAIN_ALGORITHM_FUSED;
    if (op->counts != NULL && dtrain__op_reduces(op))
        return DTRAIN_ALGORITHM_DIRECT; /* its vector may have gaps */
    if (asked == DTRAIN_ALGORITHM_RECURSIVE_DOUBLING && !doubles)
        asked = DTRAIN_ALGORITHM_TREE;
    if (dtrain__plan_exists(comm, op->kind, asked))
        return asked;
    if (fused && comm->plane->in_process && !dtrain__op_reduces(op))
        return DTRAIN_ALGORITHM_FUSED;
    switch (op->kind) {
    case DTRAIN__ALL_REDUCE: return dtrain__plan_all_reduce(comm, bytes);
    case DTRAIN__REDUCE_SCATTER:
        if (bytes > (comm->size == 2 ? DTRAIN__MESSAGE_SMALL : DTRAIN__PLAN_WHOLE))
            return DTRAIN_ALGORITHM_DIRECT;
        return doubles ? DTRAIN_ALGORITHM_RECURSIVE_DOUBLING : DTRAIN_ALGORITHM_TREE;
    case DTRAIN__ALL_GATHER:
        return comm->size > 3 && bytes <= DTRAIN__PLAN_BRUCK ? DTRAIN_ALGORITHM_BRUCK : DTRAIN_ALGORITHM_RING;
    case DTRAIN__BROADCAST:
        return bytes <= DTRAIN__PLAN_PIPE || comm->size == 2 ? DTRAIN_ALGORITHM_TREE : DTRAIN_ALGORITHM_RING;
    case DTRAIN__REDUCE: return bytes <= 4 * DTRAIN__PLAN_WHOLE ? DTRAIN_ALGORITHM_TREE : DTRAIN_ALGORITHM_DIRECT;
    case DTRAIN__BARRIER: return DTRAIN_ALGORITHM_BRUCK;
    case DTRAIN__SCAN:
    case DTRAIN__EXSCAN: return DTRAIN_ALGORITHM_TREE;
    default: return DTRAIN_ALGORITHM_DIRECT;
    }
}

/* Returns the value from first to last that has the name; -1: none. */
static int dtrain__plan_find(const char *(*name_of)(uint64_t), int first, int last, const char *name, size_t bytes)
{
    for (int value = first; value <= last; value++)
        if (strlen(name_of((uint64_t)value)) == bytes && memcmp(name_of((uint64_t)value), name, bytes) == 0)
            return value;
    return -1;
}

/* Finds an algorithm by its name; returns 0 if there is none. */
static int dtrain__plan_named(const char *name, size_t bytes, dtrain_algorithm *algorithm)
{
    int found = bytes == 4 && memcmp(name, "auto", 4) == 0
                    ? DTRAIN_ALGORITHM_AUTO
                    : dtrain__plan_find(dtrain__op_algorithm_name, DTRAIN_ALGORITHM_FUSED, DTRAIN_ALGORITHM_DOUBLE_TREE,
                                        name, bytes);
    if (found >= 0)
        *algorithm = (dtrain_algorithm)found;
    return found >= 0;
}

/* Reads DTRAIN_ALGORITHM: "ring", or "all_reduce=ring,broadcast=tree". */
static dtrain_status dtrain__plan_ask(dtrain_comm *comm, const char *text)
{
    while (text != NULL && *text != 0) {
        size_t bytes = strcspn(text, ","), kind_bytes = strcspn(text, "=,");
        int every = kind_bytes == bytes, first = DTRAIN__ALL_REDUCE, last = DTRAIN__BARRIER;
        const char *name = every ? text : text + kind_bytes + 1;
        dtrain_algorithm algorithm = DTRAIN_ALGORITHM_AUTO;
        if (!every)
            first = last = dtrain__plan_find(dtrain__op_kind_name, first, last, text, kind_bytes);
        if (first < 0 || !dtrain__plan_named(name, bytes - (size_t)(name - text), &algorithm))
            return dtrain__fail(&comm->error, DTRAIN_ERR_INVALID,
                                "DTRAIN_ALGORITHM: \"%.*s\" is neither an algorithm (auto, fused, recursive_doubling, "
                                "tree, ring, halving_doubling, direct, bruck, nodes, double_tree) nor "
                                "COLLECTIVE=ALGORITHM as in all_reduce=ring,broadcast=tree",
                                (int)(bytes < 60 ? bytes : 60), text);
        for (int kind = first; kind <= last; kind++)
            if (algorithm != DTRAIN_ALGORITHM_FUSED || comm->shared != NULL)
                comm->asked[kind] = algorithm;
        text += bytes + (text[bytes] == ',');
    }
    return DTRAIN_OK;
}

/* The bytes that a rank sends in an all-reduce of this many float32. */
static uint64_t dtrain__plan_sent_bytes(size_t count, int ranks)
{
    return 8 * (uint64_t)count / (uint64_t)ranks * (uint64_t)(ranks - 1);
}

DTRAIN__FAST_END
#endif
