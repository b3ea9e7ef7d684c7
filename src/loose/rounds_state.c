/* ---- >>rounds-state ----
 * The data of a local SGD object, its size, and what the training thread does with it. That thread takes snapshots of
 * how far it has come, and applies the results of rounds. Only the training thread touches the parameters. The mutex
 * protects all other data that both threads use. A thread holds it at most for one pass over memory. */
#ifndef DTRAIN__ROUNDS_STATE
#define DTRAIN__ROUNDS_STATE
#include "local_sgd.h"
#include "../tensor/pieces.c"
#include "../train/train_kernels.c"
#include "../train/params.c"
#include "../train/optimizer.c"
#include "../train/compression.c"
#include "../base/worker.c"

enum {
    DTRAIN__ROUNDS_IDLE = 0, /* no difference is handed in */
    DTRAIN__ROUNDS_READY,    /* a difference is handed in; a later one may replace it */
    DTRAIN__ROUNDS_FLYING,   /* the thread has the difference in a round */
    DTRAIN__ROUNDS_LANDED    /* the round is done; its result is not applied yet */
};

/* Flags that a member sends for each fragment to the member that opens rounds: it has handed in; that opens a window;
 * it has finished. */
enum { DTRAIN__ROUNDS_IN = 1, DTRAIN__ROUNDS_OPENS = 2, DTRAIN__ROUNDS_FINAL = 4 };

enum { DTRAIN__ROUNDS_WORDS = 4 }; /* of a hello, which each member sends at the beginning of a round */

/* Rounds through a server: pieces under way in each direction for each member, and elements of a piece that is not
 * packed. */
enum { DTRAIN__ROUNDS_WAYS = 2 };
#define DTRAIN__ROUNDS_PIECE DTRAIN__TUNED(rounds_piece, (size_t)131072)

typedef struct dtrain__rounds_fragment {
    size_t begin, count;     /* in the object's own order of elements */
    int boundary;            /* a snapshot follows each step whose number modulo desc.steps is this */
    int state, flags;        /* flags: of the difference, DTRAIN__ROUNDS_IN and others */
    int due;                 /* a boundary has passed while the last difference was in a round */
    int behind;              /* a round was made without this rank since its last result */
    int closed;              /* every member had finished in the last round */
    int astray;              /* the parameters of the difference were not finite: it is handed in as nothing */
    uint64_t snapshot;       /* the step of the difference */
    double handed;           /* the weight of the difference */
    int64_t opened_ns;       /* when its window opened or will open; 0: no member has handed in */
    dtrain_compressed *pack; /* NULL: not packed */
} dtrain__rounds_fragment;

typedef struct dtrain__rounds_sizes {
    size_t total, largest;  /* elements of all fragments, and of the largest */
    size_t works;           /* handles */
    size_t rooms[3], packs; /* bytes of the rooms, and of the packing states */
    size_t all;             /* bytes of everything that is allocated */
} dtrain__rounds_sizes;

struct dtrain_local_sgd {
    dtrain_allocator *allocator;
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
    dtrain_comm *comm; /* the caller's */
    int rank, ranks;   /* in the caller's group */
    int server;        /* rank of the server in group; -1: none */
    int server_origin; /* its rank in the world */
    int64_t timeout_ms;
    dtrain__params params;
    dtrain__rounds_sizes sizes;
    dtrain__rounds_fragment *fragments;
    unsigned char *block;                        /* holds all of these arrays; see dtrain__rounds_place */
    float *outer, *velocity, *base, *diff, *sum; /* velocity: NULL without momentum */
    double *weights;                             /* of the steps since each fragment's snapshot */
    uint64_t *counters;                          /* steps, then rounds of each fragment */
    dtrain_local_sgd_stats stats;
    dtrain__os_mutex mutex;
    dtrain__worker worker;
    dtrain__bell to_caller;
    uint32_t news; /* counts rings of the caller's bell */
    int recalls;   /* the thread of rank 0 of up shall ask all members to hand in again; under the mutex */
    /* used by the worker thread only */
    unsigned idle;                  /* turns since it did something */
    dtrain_comm *group, *up, *down; /* for rounds, for handing in, and for opening rounds; NULL: alone. Replaced under
                                       the mutex */
    int busy;                       /* in a call that may wait for others; under the mutex */
    int told;                       /* this member has handed in since the last round */
    dtrain_work **works;     /* on rank 0 of up one receive for each rank; on other ranks the first receives from down.
                                Then the transfers of a server */
    uint64_t *words;         /* flags of each fragment, for each rank that has sent them; first this rank's own */
    uint64_t *inbox;         /* the same, while they are being received */
    uint64_t opening[2];     /* the fragment and the round that rank 0 opens */
    int64_t recalled_ns;     /* when all members were asked to hand in again */
    int64_t made_ns, gap_ns; /* when the last round was made, and how long after the one before */
    uint64_t *hellos;        /* DTRAIN__ROUNDS_WORDS each: this rank's, then those of all */
    const void **parts;      /* inputs of folds, one a rank */
    int *last;               /* members of the last round */
    unsigned char *rooms[3]; /* lent to the packing under way: out, in, wide */
    dtrain__error error;
};

static dtrain_local_sgd_desc dtrain__rounds_defaults(const dtrain_local_sgd_desc *given)
{
    dtrain_local_sgd_desc desc;
    memset(&desc, 0, sizeof desc);
    if (given != NULL)
        desc = *given;
    desc.steps = desc.steps == 0 ? 500 : desc.steps;
    desc.outer_lr = desc.outer_lr == 0.0f ? 0.7f : desc.outer_lr;
    desc.outer_momentum = desc.no_momentum ? 0.0f : desc.outer_momentum == 0.0f ? 0.9f : desc.outer_momentum;
    desc.warmup_rounds = desc.warmup_rounds == 0 ? 2 : desc.warmup_rounds < 0 ? 0 : desc.warmup_rounds;
    desc.fragments = desc.fragments == 0 ? 1 : desc.fragments;
    desc.mixing = desc.mixing == 0.0f ? 0.5f : desc.mixing;
    desc.window_ms = desc.window_ms == 0 ? 10000 : desc.window_ms;
    desc.server = desc.through_server ? desc.server : 0;
    return desc;
}

/* Checks a full desc against the table. */
static dtrain_status dtrain__rounds_check(const dtrain_local_sgd_desc *desc, const dtrain__params *params)
{
    double lr = (double)desc->outer_lr, momentum = (double)desc->outer_momentum, mixing = (double)desc->mixing;
    if (desc->steps < 1 || desc->overlap < 0 || desc->overlap >= desc->steps)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "local_sgd: %d steps with an overlap of %d; expected at least 1 step, and an overlap from "
                            "0 to steps - 1" DTRAIN__ZERO_FIRST,
                            desc->steps, desc->overlap);
    if (!dtrain__train_finite(lr) || lr <= 0.0 || !dtrain__train_finite(momentum) || momentum < 0.0 || momentum >= 1.0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "local_sgd: outer_lr is %g, outer_momentum %g; expected outer_lr above 0, and "
                            "outer_momentum from 0 to below 1" DTRAIN__ZERO_FIRST,
                            lr, momentum);
    if (!dtrain__train_finite(mixing) || mixing < 0.0 || mixing > 1.0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "local_sgd: mixing is %g, expected a number above 0 and at most 1" DTRAIN__ZERO_FIRST,
                            mixing);
    if (params->range_count == 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "local_sgd: no parameter of the table has a gradient, so there is nothing to average: "
                            "set grad, and leave frozen 0");
    if (desc->fragments < 1 || desc->fragments > params->units)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                            "local_sgd: %d fragments of a table of %d units, expected 1 to %d", desc->fragments,
                            params->units, params->units);
    return DTRAIN_OK;
}

/* Makes the compressor of a fragment. It must pack and own nothing. */
static dtrain_status dtrain__rounds_compressor(const dtrain_compress_desc *desc, dtrain_allocator *allocator,
                                               dtrain_compressor *made)
{
    if (desc->kind == DTRAIN_COMPRESS_DEFAULT || desc->kind == DTRAIN_COMPRESS_TOPK ||
        desc->kind == DTRAIN_COMPRESS_POWERSGD)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "local_sgd: compress.kind is %d, which does not pack vectors: expected BF16, F16, INT8, "
                            "FP8, SIGN, or OWN",
                            (int)desc->kind);
    if (desc->feedback.start_step > 0)
        return dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                            "local_sgd: compress.feedback.start_step is %llu; rounds are packed from the first on: "
                            "leave it 0",
                            (unsigned long long)desc->feedback.start_step);
    dtrain_status status = dtrain__params_no_adam(desc, "local_sgd");
    if (status == DTRAIN_OK)
        status = dtrain__compression_make(desc, 1, 1, allocator, made);
    if (status == DTRAIN_OK && made->reduce != NULL)
        status = dtrain__fail(NULL, DTRAIN_ERR_UNSUPPORTED,
                              "local_sgd: the compressor %s has a reduce of its own; expected one that packs",
                              made->name != NULL ? made->name : "of compress.own");
    return status;
}

static int dtrain__rounds_packs(const dtrain_local_sgd_desc *desc, int ranks, size_t count)
{
    size_t least = desc->compress == NULL            ? SIZE_MAX
                   : desc->compress->least_count > 0 ? desc->compress->least_count
                                                     : DTRAIN__COMPRESSION_LEAST;
    return ranks > 1 && count >= least;
}

static size_t dtrain__rounds_count(const dtrain__params *params, int fragments, int fragment)
{
    size_t count = 0;
    for (size_t i = 0; i < params->range_count; i++)
        count += params->ranges[i].unit % fragments == fragment ? params->ranges[i].count : 0;
    return count;
}

/* Sizes the rooms for rounds of count elements. Members may become fewer, so the rooms fit every number of members up
 * to ranks. q: the compressor, or NULL. serves: pieces of all members arrive here. */
static void dtrain__rounds_rooms(dtrain__rounds_sizes *sizes, const dtrain_compressor *q, size_t count, int ranks,
                                 int serves)
{
    for (int r = 2; r <= ranks; r++) {
        size_t part = dtrain__split(count, r, 0, NULL), shorter = dtrain__split(count, r, r - 1, NULL);
        size_t longer = count - shorter * (size_t)r; /* parts that are one longer */
        size_t dense = count < DTRAIN__ROUNDS_PIECE ? count : DTRAIN__ROUNDS_PIECE, need[3] = {0, 0, 0};
        size_t piece = q != NULL ? q->bytes(q, part) : dense * sizeof(float);
        if (q != NULL) {
            need[0] = longer * q->bytes(q, part) + ((size_t)r - longer) * q->bytes(q, shorter);
            need[1] = (size_t)r * piece;
            need[2] = (size_t)r * part * sizeof(float);
        }
        if (serves)
            need[1] = DTRAIN__ROUNDS_WAYS * (size_t)r * piece;
        for (int i = 0; i < 3; i++)
            sizes->rooms[i] = need[i] > sizes->rooms[i] ? need[i] : sizes->rooms[i];
    }
}

/* Returns the next array in a block and advances *at; without a block it only counts. */
static void *dtrain__rounds_next(unsigned char *block, size_t *at, size_t count, size_t size)
{
    size_t from = (*at + 63) / 64 * 64;
    *at = from + count * size;
    return block != NULL ? block + from : NULL;
}

/* Places all arrays in one block, and returns how many bytes that has. */
static size_t dtrain__rounds_place(dtrain_local_sgd *local, unsigned char *block)
{
    const dtrain__rounds_sizes *sizes = &local->sizes;
    size_t n = (size_t)local->ranks, fragments = (size_t)local->desc.fragments, total = sizes->total, at = 0;
    size_t momentum = local->desc.outer_momentum != 0.0f ? total : 0;
    local->outer = (float *)dtrain__rounds_next(block, &at, total, sizeof(float));
    local->velocity = (float *)dtrain__rounds_next(block, &at, momentum, sizeof(float));
    local->base = (float *)dtrain__rounds_next(block, &at, total, sizeof(float));
    local->diff = (float *)dtrain__rounds_next(block, &at, total, sizeof(float));
    local->sum = (float *)dtrain__rounds_next(block, &at, sizes->largest, sizeof(float));
    local->weights = (double *)dtrain__rounds_next(block, &at, fragments, sizeof(double));
    local->counters = (uint64_t *)dtrain__rounds_next(block, &at, fragments + 1, sizeof(uint64_t));
    local->fragments =
        (dtrain__rounds_fragment *)dtrain__rounds_next(block, &at, fragments, sizeof(dtrain__rounds_fragment));
    local->works = (dtrain_work **)dtrain__rounds_next(block, &at, sizes->works, sizeof(dtrain_work *));
    local->words = (uint64_t *)dtrain__rounds_next(block, &at, n * fragments, sizeof(uint64_t));
    local->inbox = (uint64_t *)dtrain__rounds_next(block, &at, n * fragments, sizeof(uint64_t));
    local->parts = (const void **)dtrain__rounds_next(block, &at, n, sizeof(void *));
    local->last = (int *)dtrain__rounds_next(block, &at, n, sizeof(int));
    local->hellos = (uint64_t *)dtrain__rounds_next(block, &at, (n + 1) * DTRAIN__ROUNDS_WORDS, sizeof(uint64_t));
    for (int i = 0; i < 3; i++)
        local->rooms[i] = (unsigned char *)dtrain__rounds_next(block, &at, sizes->rooms[i], 1);
    local->velocity = momentum > 0 ? local->velocity : NULL;
    return at;
}

/* Computes all sizes on this rank. The elements are in memory, but a few times as many bytes may overflow. */
static dtrain_status dtrain__rounds_plan(dtrain_local_sgd *local)
{
    const dtrain__params *params = &local->params;
    const dtrain_local_sgd_desc *desc = &local->desc;
    dtrain__rounds_sizes *sizes = &local->sizes;
    int ranks = local->ranks, serves = desc->through_server && local->rank == desc->server;
    size_t bytes;
    dtrain_compressor q;
    if (desc->through_server && (desc->server < 0 || desc->server >= ranks))
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "local_sgd: the server is rank %d, expected 0 to %d",
                            desc->server, ranks - 1);
    memset(&q, 0, sizeof q);
    if (desc->compress != NULL && dtrain__rounds_compressor(desc->compress, NULL, &q) != DTRAIN_OK)
        return dtrain__thread_error.status;
    for (int f = 0; f < desc->fragments; f++) {
        size_t count = dtrain__rounds_count(params, desc->fragments, f);
        int packs = dtrain__rounds_packs(desc, ranks, count);
        sizes->total += count;
        sizes->largest = count > sizes->largest ? count : sizes->largest;
        dtrain__rounds_rooms(sizes, packs ? &q : NULL, count, ranks, serves);
        if (packs)
            sizes->packs += dtrain__compressed_bytes(count, ranks, &desc->compress->feedback);
    }
    sizes->works = (size_t)ranks * (desc->through_server ? 1 + 2 * DTRAIN__ROUNDS_WAYS : 1);
    if (!dtrain__mul_size(sizes->total, 8 * sizeof(float), &bytes))
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "local_sgd: %zu elements need more bytes than memory can hold",
                            sizes->total);
    sizes->all = sizeof(dtrain_local_sgd) + params->range_count * sizeof(dtrain__params_range) + sizes->packs +
                 dtrain__rounds_place(local, NULL);
    return DTRAIN_OK;
}

/* Called for each run of a fragment's elements that lie in one parameter. */
typedef void (*dtrain__rounds_piece)(dtrain_local_sgd *local, float *data, size_t at, size_t count);

/* Calls piece for each run of a fragment, in the default floating-point mode. */
static void dtrain__rounds_walk(dtrain_local_sgd *local, int fragment, dtrain__rounds_piece piece)
{
    const dtrain__params *params = &local->params;
    size_t at = local->fragments[fragment].begin;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < params->range_count; i++)
        if (params->ranges[i].unit % local->desc.fragments == fragment) {
            piece(local, params->ranges[i].data, at, params->ranges[i].count);
            at += params->ranges[i].count;
        }
    dtrain__fpmode_restore(mode);
}

/* Takes back differences that no round has taken. Their steps count in the next ones. Returns 1 if another is in a
 * round. The mutex is held. */
static int dtrain__rounds_withdraw(dtrain_local_sgd *local)
{
    int flying = 0;
    for (int i = 0; i < local->desc.fragments; i++) {
        dtrain__rounds_fragment *f = &local->fragments[i];
        flying |= f->state == DTRAIN__ROUNDS_FLYING;
        if (f->state != DTRAIN__ROUNDS_READY)
            continue;
        f->state = DTRAIN__ROUNDS_IDLE;
        f->due = 1;
        local->weights[i] += f->handed;
    }
    return flying;
}

/* The first outer weights are the parameters. */
static void dtrain__rounds_start(dtrain_local_sgd *local, float *data, size_t at, size_t count)
{
    if (count > 0)
        memcpy(local->outer + at, data, count * sizeof(float));
    if (count > 0)
        memcpy(local->base + at, data, count * sizeof(float));
}

/* diff = base - data */
static void dtrain__rounds_subtract(dtrain_local_sgd *local, float *data, size_t at, size_t count)
{
    dtrain__fold_weigh_f32(data, -1.0, local->diff + at, count);
    dtrain__fold_sum_f32(local->diff + at, local->base + at, count);
}

static void dtrain__rounds_adopt(dtrain_local_sgd *local, float *data, size_t at, size_t count)
{
    if (count > 0)
        memcpy(data, local->outer + at, count * sizeof(float));
}

/* data = (1 - mixing) * data + mixing * outer */
static void dtrain__rounds_mix(dtrain_local_sgd *local, float *data, size_t at, size_t count)
{
    float share = local->desc.mixing, rest = 1.0f - share, tile[512];
    for (size_t i = 0; i < count; i += 512) {
        size_t n = count - i < 512 ? count - i : 512;
        dtrain__fold_weigh_f32(local->outer + at + i, (double)share, tile, n);
        dtrain__fold_weigh_f32(data + i, (double)rest, data + i, n);
        dtrain__fold_sum_f32(data + i, tile, n);
    }
}

/* Hands in a fragment's difference. It replaces one that no round has taken. The mutex is held. */
static void dtrain__rounds_snapshot(dtrain_local_sgd *local, int fragment, int final)
{
    dtrain__rounds_fragment *f = &local->fragments[fragment];
    f->handed = (f->state == DTRAIN__ROUNDS_READY ? f->handed : 0.0) + local->weights[fragment];
    f->handed = (double)(float)f->handed; /* rounded as the product below rounds it */
    local->weights[fragment] = 0.0;
    dtrain__rounds_walk(local, fragment, dtrain__rounds_subtract);
    f->astray = dtrain__device_unbounded(DTRAIN_F32, local->diff + f->begin, f->count);
    if (f->astray) {
        dtrain__log(
            DTRAIN_LOG_WARN,
            "local_sgd: rank %d hands in nothing of fragment %d: its parameters are not finite. It goes on from the "
            "outer weights",
            local->rank, fragment);
        memset(local->diff + f->begin, 0, f->count * sizeof(float));
        f->handed = 0.0;
    }
    if (f->count > 0) {
        uint64_t mode = dtrain__fpmode_enter();
        dtrain__fold_weigh_f32(local->diff + f->begin, f->handed, local->diff + f->begin, f->count);
        dtrain__fpmode_restore(mode);
    }
    /* a member that was late opens no window, because the others are in the middle of their steps */
    f->flags = DTRAIN__ROUNDS_IN | (final ? DTRAIN__ROUNDS_FINAL : f->behind ? 0 : DTRAIN__ROUNDS_OPENS);
    f->state = DTRAIN__ROUNDS_READY;
    f->due = 0;
    f->closed = 0;
    f->snapshot = local->counters[0];
    dtrain__worker_call(&local->worker);
}

/* Applies the result of a fragment's round, if there is one. The mutex is held. */
static void dtrain__rounds_apply(dtrain_local_sgd *local, int fragment)
{
    dtrain__rounds_fragment *f = &local->fragments[fragment];
    if (f->state != DTRAIN__ROUNDS_LANDED)
        return;
    int adopts = f->astray || f->snapshot == local->counters[0];
    dtrain__rounds_walk(local, fragment, adopts ? dtrain__rounds_adopt : dtrain__rounds_mix);
    if (f->count > 0)
        memcpy(local->base + f->begin, local->outer + f->begin, f->count * sizeof(float));
    f->state = DTRAIN__ROUNDS_IDLE;
    f->behind = 0;
    local->stats.applied++;
}

#endif
