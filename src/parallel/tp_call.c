/* ---- >>tp-call ----
 * What the calls of split layers share. They check arguments before anything is communicated, allocate memory that
 * lasts for one call, and run collectives on rows while they compute. */
#ifndef DTRAIN__TP_CALL
#define DTRAIN__TP_CALL
#include "tensor_parallel.h"
#include "../train/train_kernels.c"
#include "../tensor/gemm.c"
#include "../comm/work.c"
#include "../comm/collectives.c"

#define DTRAIN__TP_ROOMS 4

typedef struct dtrain__tp {
    const char *name; /* of the call, for texts */
    dtrain_comm *group;
    int rank, size;
    int splits;                    /* rows are split over several ranks */
    dtrain_allocator *memory, own; /* own: used without a group */
    void *rooms[DTRAIN__TP_ROOMS];
    int used;
} dtrain__tp;

static dtrain__error *dtrain__tp_error(const dtrain__tp *tp)
{
    return tp->group != NULL ? &tp->group->error : NULL;
}

static dtrain_status dtrain__tp_begin(dtrain__tp *tp, const char *name, dtrain_comm *group, int sequence)
{
    memset(tp, 0, sizeof *tp);
    tp->name = name;
    tp->group = group;
    tp->rank = dtrain_comm_rank(group);
    tp->size = dtrain_comm_size(group);
    tp->splits = sequence && tp->size > 1;
    tp->memory = group != NULL ? dtrain_comm_allocator(group) : &tp->own;
    return group != NULL ? dtrain__group_whole(group, name) : DTRAIN_OK;
}

/* Frees the memory of a call and returns its status. */
static dtrain_status dtrain__tp_end(dtrain__tp *tp, dtrain_status status)
{
    while (tp->used > 0)
        dtrain__free(tp->memory, tp->rooms[--tp->used]);
    return status;
}

/* Allocates memory for the rest of the call, not cleared. Does nothing after an error. */
static void *dtrain__tp_room(dtrain__tp *tp, size_t rows, size_t row_bytes, dtrain_status *status)
{
    size_t bytes;
    void *room = NULL;
    if (*status != DTRAIN_OK)
        return NULL;
    if (dtrain__mul_size(rows, row_bytes, &bytes))
        room = dtrain__resize(tp->memory, NULL, bytes > 0 ? bytes : 1);
    if (room == NULL) {
        *status = dtrain__fail(dtrain__tp_error(tp), DTRAIN_ERR_MEMORY, "%s on rank %d: no memory for %zu x %zu bytes",
                               tp->name, tp->rank, rows, row_bytes);
        return NULL;
    }
    return tp->rooms[tp->used++] = room;
}

static float *dtrain__tp_floats(dtrain__tp *tp, size_t rows, size_t columns, dtrain_status *status)
{
    return (float *)dtrain__tp_room(tp, rows, columns * sizeof(float), status);
}

/* Refuses a matrix that is too large for memory, or missing. Does nothing after an error. */
static DTRAIN__NOINLINE void dtrain__tp_need(const dtrain__tp *tp, const char *what, const void *data, size_t rows,
                                             size_t columns, dtrain_status *status)
{
    size_t count;
    if (*status != DTRAIN_OK)
        return;
    if (!dtrain__mul_size(rows, columns, &count) || count > SIZE_MAX / 4 / sizeof(double))
        *status = dtrain__fail(dtrain__tp_error(tp), DTRAIN_ERR_INVALID,
                               "%s on rank %d: %s would have %zu x %zu elements, more than memory can hold", tp->name,
                               tp->rank, what, rows, columns);
    else if (data == NULL && count > 0)
        *status = dtrain__fail(dtrain__tp_error(tp), DTRAIN_ERR_INVALID,
                               "%s on rank %d: %s is NULL, expected %zu x %zu elements", tp->name, tp->rank, what, rows,
                               columns);
}

/* Returns this rank's number of rows: its share if rows are split, else all. */
static size_t dtrain__tp_rows(const dtrain__tp *tp, size_t rows)
{
    return tp->splits ? dtrain__split(rows, tp->size, tp->rank, NULL) : rows;
}

/* Returns all rows, [rows, columns]. If rows are split, it gathers them. Does nothing after an error. */
static const float *dtrain__tp_gather(dtrain__tp *tp, const float *part, size_t rows, size_t columns,
                                      dtrain_work **work, dtrain_status *status)
{
    float *whole = tp->splits ? dtrain__tp_floats(tp, rows, columns, status) : NULL;
    if (tp->splits && *status == DTRAIN_OK)
        *status = dtrain__collective_rows(tp->group, DTRAIN__ALL_GATHER, part, whole, rows, columns, work);
    return tp->splits ? whole : part;
}

/* Returns room for this rank's term of a sum over ranks, [rows, columns]: `out` itself if it has all rows. */
static float *dtrain__tp_share(dtrain__tp *tp, float *out, size_t rows, size_t columns, dtrain_status *status)
{
    return tp->splits ? dtrain__tp_floats(tp, rows, columns, status) : out;
}

/* Sums the terms of all ranks into `out`; if rows are split, only this rank's rows. Does nothing after an error. */
static void dtrain__tp_sum_shares(const dtrain__tp *tp, const float *share, float *out, size_t rows, size_t columns,
                                  dtrain_work **work, dtrain_status *status)
{
    dtrain__kind kind = tp->splits ? DTRAIN__REDUCE_SCATTER : DTRAIN__ALL_REDUCE;
    if (*status == DTRAIN_OK && tp->size > 1)
        *status = dtrain__collective_rows(tp->group, kind, share, out, rows, columns, work);
}

/* Waits for an operation, if there is one. An earlier error keeps its status and text. */
static dtrain_status dtrain__tp_wait(dtrain_status status, dtrain_work *work)
{
    dtrain__error first = dtrain__thread_error;
    dtrain_status ended = work != NULL ? dtrain_work_wait(work) : DTRAIN_OK;
    if (status == DTRAIN_OK)
        return ended;
    dtrain__thread_error = first;
    return status;
}

/* out[i] += x[i] */
static void dtrain__tp_add(float *out, const float *x, size_t count)
{
    uint64_t mode = dtrain__fpmode_enter();
    dtrain__fold_sum_f32(out, x, count);
    dtrain__fpmode_restore(mode);
}

#define DTRAIN__TP_TILE 512 /* columns summed on the stack */
#define DTRAIN__TP_RUN 64   /* rows summed before their sum is added: sums of sums lose fewer bits */

/* sums[columns] += the sum over rows */
static void dtrain__tp_add_columns(float *sums, const float *x, size_t rows, size_t columns)
{
    float tile[DTRAIN__TP_TILE];
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t at = 0; at < columns; at += DTRAIN__TP_TILE) {
        size_t n = columns - at < DTRAIN__TP_TILE ? columns - at : DTRAIN__TP_TILE;
        for (size_t r = 0; r < rows; r++) {
            if (r % DTRAIN__TP_RUN == 0)
                memcpy(tile, x + r * columns + at, n * sizeof(float));
            else
                dtrain__fold_sum_f32(tile, x + r * columns + at, n);
            if (r % DTRAIN__TP_RUN == DTRAIN__TP_RUN - 1 || r == rows - 1)
                dtrain__fold_sum_f32(sums + at, tile, n);
        }
    }
    dtrain__fpmode_restore(mode);
}

DTRAIN_API dtrain_status dtrain_sequence_parallel_sum(dtrain_comm *group, const float *part, float *out, size_t count)
{
    dtrain__tp tp;
    dtrain_status status = dtrain__tp_begin(&tp, "sequence_parallel_sum", group, 0);
    dtrain__tp_need(&tp, "part", part, count, 1, &status);
    dtrain__tp_need(&tp, "out", out, count, 1, &status);
    float *sum = tp.size > 1 ? dtrain__tp_floats(&tp, count, 1, &status) : NULL;
    dtrain__tp_sum_shares(&tp, part, sum, count, 1, NULL, &status);
    if (status == DTRAIN_OK)
        dtrain__tp_add(out, sum != NULL ? sum : part, count);
    return dtrain__tp_end(&tp, status);
}

#endif
