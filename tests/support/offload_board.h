/* A transport's own collectives for ranks that are threads: each publishes its call on a board, and computes its result
 * from all ranks' buffers. */
#ifndef OFFLOAD_BOARD_H
#define OFFLOAD_BOARD_H
#include <pthread.h>

#define OFFLOAD_RANKS 32

typedef struct offload_end {
    int phase; /* 0: no call; 1: published; 2: the result is in part */
    uint64_t calls;
    unsigned char *part; /* of the result: this rank's in a reduction, else all of it */
    size_t bytes;
} offload_end;

static struct offload_board {
    pthread_mutex_t mutex;
    int ranks;
    uint64_t arrived, finished;
    dtrain_offload calls[OFFLOAD_RANKS];
    offload_end ends[OFFLOAD_RANKS];
} offload_board = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void offload_copy(offload_end *end, size_t at, const void *from, size_t bytes)
{
    if (bytes > 0)
        memcpy(end->part + at, from, bytes);
}

/* Computes what a rank gets, where nobody reads it. */
static void offload_compute(const dtrain_offload *mine, offload_end *end)
{
    const dtrain_offload *calls = offload_board.calls;
    int rank = mine->rank, ranks = offload_board.ranks;
    size_t width = dtrain_dtype_bits(mine->dtype) / 8, most = mine->count + 1;
    const void *ins[OFFLOAD_RANKS];
    for (int r = 0; mine->kind != DTRAIN_OFFLOAD_BROADCAST && r < ranks; r++) {
        size_t parts = mine->parts[r].begin + mine->parts[r].count,
               others = mine->others[r].begin + mine->others[r].count;
        most = parts > most ? parts : most;
        most = mine->kind == DTRAIN_OFFLOAD_ALL_TO_ALL && others > most ? others : most;
        ins[r] = (const unsigned char *)calls[r].in + mine->parts[rank].begin * width;
    }
    end->part = (unsigned char *)calloc(most, width);
    void *out = end->part;
    if (mine->kind == DTRAIN_OFFLOAD_REDUCE_SCATTER && mine->parts[rank].count > 0)
        dtrain__fold(mine->dtype, mine->op, ranks, ins, ranks, &out, 1, 0, mine->parts[rank].count);
    else if (mine->kind == DTRAIN_OFFLOAD_BROADCAST)
        offload_copy(end, 0, calls[mine->root].out, mine->count * width);
    for (int r = 0; r < ranks; r++)
        if (mine->kind == DTRAIN_OFFLOAD_ALL_GATHER)
            offload_copy(end, mine->parts[r].begin * width,
                         (const unsigned char *)calls[r].out + mine->parts[r].begin * width,
                         mine->parts[r].count * width);
        else if (mine->kind == DTRAIN_OFFLOAD_ALL_TO_ALL)
            offload_copy(end, mine->others[r].begin * width,
                         (const unsigned char *)calls[r].in + calls[r].parts[rank].begin * width,
                         mine->others[r].count * width);
}

/* Writes the result, and nothing between its parts. */
static void offload_deliver(const dtrain_offload *call, const offload_end *end)
{
    const dtrain_extent whole = {0, call->count},
                        own = {0, call->kind == DTRAIN_OFFLOAD_REDUCE_SCATTER ? call->parts[call->rank].count : 0};
    int parted = call->kind == DTRAIN_OFFLOAD_ALL_GATHER || call->kind == DTRAIN_OFFLOAD_ALL_TO_ALL;
    size_t width = dtrain_dtype_bits(call->dtype) / 8;
    for (int r = 0; r < (parted ? offload_board.ranks : 1); r++) {
        const dtrain_extent *part = call->kind == DTRAIN_OFFLOAD_BROADCAST        ? &whole
                                    : call->kind == DTRAIN_OFFLOAD_REDUCE_SCATTER ? &own
                                    : call->kind == DTRAIN_OFFLOAD_ALL_GATHER     ? &call->parts[r]
                                                                                  : &call->others[r];
        if (part->count > 0)
            memcpy((unsigned char *)call->out + part->begin * width, end->part + part->begin * width,
                   part->count * width);
    }
}

static dtrain_status offload_run(void *self, const dtrain_offload *call, int64_t deadline_ns)
{
    offload_end *end = (offload_end *)self;
    for (;;) {
        pthread_mutex_lock(&offload_board.mutex);
        uint64_t all = (uint64_t)offload_board.ranks;
        if (end->phase == 0) {
            offload_board.calls[call->rank] = *call;
            offload_board.arrived++;
            end->calls++;
            end->phase = 1;
        }
        if (end->phase == 1 && offload_board.arrived >= all * end->calls) {
            offload_compute(call, end);
            offload_board.finished++;
            end->phase = 2;
        }
        int ended = end->phase == 2 && offload_board.finished >= all * end->calls;
        pthread_mutex_unlock(&offload_board.mutex);
        if (ended) {
            offload_deliver(call, end);
            free(end->part);
            end->phase = 0;
            return DTRAIN_OK;
        }
        if (dtrain__os_now_ns() >= deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        sched_yield();
    }
}

/* The world's streams stay those of the transport. */
static dtrain_status offload_lanes(void *self, uint64_t group, const int *ranks, int size, dtrain_transport *lane)
{
    (void)ranks;
    (void)size;
    lane->self = &offload_board.ends[((dtrain__seat *)self)->rank];
    lane->offload = group == 0 ? offload_run : NULL;
    return DTRAIN_OK;
}

/* Before the ranks of a world start. */
static void offload_begin(int ranks)
{
    offload_board.ranks = ranks;
    offload_board.arrived = offload_board.finished = 0;
    memset(offload_board.ends, 0, sizeof offload_board.ends);
}

#endif
