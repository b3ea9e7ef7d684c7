/* ---- >>tp-linear ----
 * Linear layers split by outputs (column) or inputs (row). `in` and `out` are the sizes of this rank's part of the
 * weight. Backward hides communication behind two products. It gathers split rows while it computes the gradient of the
 * input, and sums that over ranks while it computes the gradients of the weights. */
#ifndef DTRAIN__TP_LINEAR
#define DTRAIN__TP_LINEAR
#include "tp_call.c"

#define DTRAIN__TP_SLICE 256 /* rows of a product between two polls; each slice packs the other factor again */

typedef struct dtrain__tp_linear {
    const dtrain_parallel_linear *layer;
    dtrain__tp tp;
    size_t blocks, granule, step; /* step: blocks x granule; the split dimension is a multiple of it */
    size_t in, out;               /* of this rank's weight */
    int gathers;                  /* 1: gathers the output */
} dtrain__tp_linear;

/* Returns a rank's share of the split dimension. */
static size_t dtrain__tp_linear_part(const dtrain__tp_linear *l, size_t size, int rank)
{
    return dtrain__split(size / l->step, l->tp.size, rank, NULL) * l->step;
}

/* Reads a layer and checks its sizes; row: it is split by inputs. */
static dtrain_status dtrain__tp_linear_begin(dtrain__tp_linear *l, const char *name,
                                             const dtrain_parallel_linear *layer, int row)
{
    memset(l, 0, sizeof *l);
    if (layer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the layer is NULL, expected a filled dtrain_parallel_linear",
                            name);
    size_t size = row ? layer->inputs : layer->outputs;
    l->layer = layer;
    l->blocks = layer->blocks > 0 ? layer->blocks : 1;
    l->granule = layer->granule > 0 ? layer->granule : 1;
    dtrain_status status = dtrain__tp_begin(&l->tp, name, layer->group, layer->sequence);
    if (status != DTRAIN_OK)
        return status;
    if (row && layer->gather_output)
        return dtrain__fail(
            dtrain__tp_error(&l->tp), DTRAIN_ERR_INVALID,
            "%s on rank %d: gather_output is for column layers; the output of a row layer is whole: leave it 0", name,
            l->tp.rank);
    if (!dtrain__mul_size(l->blocks, l->granule, &l->step) || size % l->step != 0)
        return dtrain__fail(
            dtrain__tp_error(&l->tp), DTRAIN_ERR_INVALID,
            "%s on rank %d: there are %zu %s, expected a multiple of %zu blocks x granule %zu; %zu would fit", name,
            l->tp.rank, size, row ? "inputs" : "outputs", l->blocks, l->granule,
            l->step > 0 ? (size / l->step + 1) * l->step : 0);
    size_t part = dtrain__tp_linear_part(l, size, l->tp.rank);
    l->in = row ? part : layer->inputs;
    l->out = row ? layer->outputs : part;
    l->gathers = layer->gather_output && l->tp.size > 1;
    dtrain__tp_need(&l->tp, "x in whole", l, layer->rows, layer->inputs, &status);
    dtrain__tp_need(&l->tp, "y in whole", l, layer->rows, layer->outputs, &status);
    dtrain__tp_need(&l->tp, "the weight in whole", l, layer->inputs, layer->outputs, &status);
    return status;
}

/* Reads a layer and checks its arrays. backward: y is its gradient, and d_x may be NULL for not wanted. */
static dtrain_status dtrain__tp_linear_take(dtrain__tp_linear *l, const char *name, const dtrain_parallel_linear *layer,
                                            int row, const float *x, const float *y, int backward, const float *d_x)
{
    dtrain_status status = dtrain__tp_linear_begin(l, name, layer, row);
    if (status != DTRAIN_OK)
        return status;
    size_t split = dtrain__tp_rows(&l->tp, layer->rows);
    size_t first = layer->by_inputs ? l->in : l->out, second = layer->by_inputs ? l->out : l->in;
    if (!backward || d_x != NULL)
        dtrain__tp_need(&l->tp, "weight", layer->weight, first, second, &status);
    if (!backward || layer->d_weight != NULL)
        dtrain__tp_need(&l->tp, "x", x, row ? layer->rows : split, l->in, &status);
    dtrain__tp_need(&l->tp, backward ? "dy" : "y", y, row ? split : layer->rows, l->gathers ? layer->outputs : l->out,
                    &status);
    return status;
}

static void dtrain__tp_linear_add_bias(const dtrain__tp_linear *l, float *y, size_t rows)
{
    for (size_t r = 0; l->layer->bias != NULL && r < rows; r++)
        dtrain__tp_add(y + r * l->out, l->layer->bias, l->out);
}

/* y[rows, out] = x[rows, in] W^T; back: dx = dy W. Sizes may be 0, which a program's own DTRAIN_SGEMM may not allow. */
static void dtrain__tp_linear_product(const dtrain__tp_linear *l, int back, const float *from, float *to)
{
    size_t rows = l->layer->rows, k = back ? l->out : l->in, n = back ? l->in : l->out;
    int transposes = back ? l->layer->by_inputs != 0 : !l->layer->by_inputs;
    if (k > 0 && rows > 0 && n > 0)
        dtrain_sgemm(0, transposes, rows, n, k, 1.0f, from, k, l->layer->weight, transposes ? k : n, 0.0f, to, n);
    else if (rows > 0 && n > 0)
        memset(to, 0, rows * n * sizeof(float));
}

/* d_weight += dy^T x, d_bias += the sum of dy's rows; polled: in slices, with a poll of the group between them. */
static void dtrain__tp_linear_weights(const dtrain__tp_linear *l, const float *x, const float *dy, int polled)
{
    size_t all = l->layer->by_inputs ? l->in : l->out, n = l->layer->by_inputs ? l->out : l->in;
    const float *left = l->layer->by_inputs ? x : dy, *right = l->layer->by_inputs ? dy : x;
    size_t rows = l->layer->rows, step = polled ? DTRAIN__TP_SLICE : all;
    for (size_t at = 0; l->layer->d_weight != NULL && at < all; at += step) {
        size_t m = all - at < step ? all - at : step;
        if (n > 0 && rows > 0)
            dtrain_sgemm(1, 0, m, n, rows, 1.0f, left + at, all, right, n, 1.0f, l->layer->d_weight + at * n, n);
        if (polled)
            DTRAIN_IGNORE(dtrain_comm_poll(l->tp.group, 50));
    }
    if (l->layer->d_bias != NULL)
        dtrain__tp_add_columns(l->layer->d_bias, dy, rows, l->out);
}

/* Copies a rank's columns from whole rows to `part` (into is NULL), or from `part` into whole rows. */
static void dtrain__tp_linear_columns(const dtrain__tp_linear *l, int rank, const float *whole, float *into,
                                      float *part)
{
    size_t begin, block = l->layer->outputs / l->blocks;
    size_t n = dtrain__split(block / l->granule, l->tp.size, rank, &begin) * l->granule;
    for (size_t r = 0; n > 0 && r < l->layer->rows; r++)
        for (size_t b = 0; b < l->blocks; b++, part += n) {
            size_t at = r * l->layer->outputs + b * block + begin * l->granule;
            memcpy(into != NULL ? into + at : part, into != NULL ? part : whole + at, n * sizeof(float));
        }
}

/* Copies this rank's columns of dy, which is whole. */
static const float *dtrain__tp_linear_own_columns(dtrain__tp_linear *l, const float *dy, dtrain_status *status)
{
    float *part = dtrain__tp_floats(&l->tp, l->layer->rows, l->out, status);
    if (*status == DTRAIN_OK)
        dtrain__tp_linear_columns(l, l->tp.rank, dy, NULL, part);
    return part;
}

/* y[rows, outputs] = every rank's part[rows, its outputs], in the order of the whole layer */
static dtrain_status dtrain__tp_linear_gather(dtrain__tp_linear *l, const float *part, float *y)
{
    dtrain_status status = DTRAIN_OK;
    size_t rows = l->layer->rows, begin = 0;
    float *parts = dtrain__tp_floats(&l->tp, rows, l->layer->outputs, &status);
    size_t *counts = (size_t *)dtrain__tp_room(&l->tp, (size_t)l->tp.size, sizeof *counts, &status);
    if (status != DTRAIN_OK)
        return status;
    for (int r = 0; r < l->tp.size; r++)
        counts[r] = rows * dtrain__tp_linear_part(l, l->layer->outputs, r);
    status = dtrain_all_gather_v(l->tp.group, part, parts, counts, NULL, DTRAIN_F32);
    for (int r = 0; status == DTRAIN_OK && r < l->tp.size; begin += counts[r++])
        dtrain__tp_linear_columns(l, r, NULL, y, parts + begin);
    return status;
}

DTRAIN_API dtrain_status dtrain_column_parallel_linear(const dtrain_parallel_linear *layer, const float *x, float *y)
{
    dtrain__tp_linear l;
    dtrain_status status = dtrain__tp_linear_take(&l, "column_parallel_linear", layer, 0, x, y, 0, NULL);
    if (status != DTRAIN_OK)
        return status;
    float *part = l.gathers ? dtrain__tp_floats(&l.tp, layer->rows, l.out, &status) : y;
    x = dtrain__tp_gather(&l.tp, x, layer->rows, l.in, NULL, &status);
    if (status == DTRAIN_OK) {
        dtrain__tp_linear_product(&l, 0, x, part);
        dtrain__tp_linear_add_bias(&l, part, layer->rows);
    }
    if (status == DTRAIN_OK && l.gathers)
        status = dtrain__tp_linear_gather(&l, part, y);
    return dtrain__tp_end(&l.tp, status);
}

DTRAIN_API dtrain_status dtrain_row_parallel_linear(const dtrain_parallel_linear *layer, const float *x, float *y)
{
    dtrain__tp_linear l;
    dtrain_status status = dtrain__tp_linear_take(&l, "row_parallel_linear", layer, 1, x, y, 0, NULL);
    if (status != DTRAIN_OK)
        return status;
    float *share = dtrain__tp_share(&l.tp, y, layer->rows, l.out, &status);
    if (status == DTRAIN_OK)
        dtrain__tp_linear_product(&l, 0, x, share);
    dtrain__tp_sum_shares(&l.tp, share, y, layer->rows, l.out, NULL, &status);
    if (status == DTRAIN_OK)
        dtrain__tp_linear_add_bias(&l, y, dtrain__tp_rows(&l.tp, layer->rows));
    return dtrain__tp_end(&l.tp, status);
}

DTRAIN_API dtrain_status dtrain_column_parallel_linear_backward(const dtrain_parallel_linear *layer, const float *x,
                                                                const float *dy, float *dx)
{
    dtrain__tp_linear l;
    dtrain_work *gathering = NULL, *summing = NULL;
    dtrain_status status = dtrain__tp_linear_take(&l, "column_parallel_linear_backward", layer, 0, x, dy, 1, dx);
    if (status != DTRAIN_OK)
        return status;
    int overlaps = !layer->no_overlap && layer->d_weight != NULL;
    float *share = dx != NULL ? dtrain__tp_share(&l.tp, dx, layer->rows, l.in, &status) : NULL;
    if (l.gathers)
        dy = dtrain__tp_linear_own_columns(&l, dy, &status);
    if (layer->d_weight != NULL)
        x = dtrain__tp_gather(&l.tp, x, layer->rows, l.in, overlaps ? &gathering : NULL, &status);
    if (dx != NULL && status == DTRAIN_OK)
        dtrain__tp_linear_product(&l, 1, dy, share);
    if (dx != NULL)
        dtrain__tp_sum_shares(&l.tp, share, dx, layer->rows, l.in, overlaps ? &summing : NULL, &status);
    status = dtrain__tp_wait(status, gathering);
    if (status == DTRAIN_OK)
        dtrain__tp_linear_weights(&l, x, dy, summing != NULL && layer->group->desc.progress == DTRAIN_PROGRESS_POLL);
    return dtrain__tp_end(&l.tp, dtrain__tp_wait(status, summing));
}

DTRAIN_API dtrain_status dtrain_row_parallel_linear_backward(const dtrain_parallel_linear *layer, const float *x,
                                                             const float *dy, float *dx)
{
    dtrain__tp_linear l;
    dtrain_status status = dtrain__tp_linear_take(&l, "row_parallel_linear_backward", layer, 1, x, dy, 1, dx);
    if (status != DTRAIN_OK)
        return status;
    if (dx != NULL || layer->d_weight != NULL || layer->d_bias != NULL)
        dy = dtrain__tp_gather(&l.tp, dy, layer->rows, l.out, NULL, &status);
    if (status == DTRAIN_OK && dx != NULL)
        dtrain__tp_linear_product(&l, 1, dy, dx);
    if (status == DTRAIN_OK)
        dtrain__tp_linear_weights(&l, x, dy, 0);
    return dtrain__tp_end(&l.tp, status);
}

#endif
