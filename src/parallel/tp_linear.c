/* ---- >>tp-linear ----
 * Linear layers split by outputs (column) or inputs (row). A layer here is what this rank has of it: `in` and `out` are
 * the sizes of its own weight. Backward begins the sum of the input's gradient before it computes the weights', and the
 * gathering of split rows before it computes the input's. */
#ifndef DTRAIN__TP_LINEAR
#define DTRAIN__TP_LINEAR
#include "tp_call.c"

#define DTRAIN__TP_SLICE 256 /* rows of a product between two polls: a slice packs the other factor anew */

typedef struct dtrain__tp_linear {
    const dtrain_parallel_linear *layer;
    dtrain__tp tp;
    size_t blocks, granule, part; /* part: of the split dimension */
    size_t in, out;               /* of this rank's weight */
    size_t split_rows;            /* rows of the side that sequence splits: this rank's, or all */
    int splits;                   /* rows are split, over several ranks */
    int gathers;                  /* the output is gathered */
} dtrain__tp_linear;

static size_t dtrain__tp_part(size_t size, size_t blocks, size_t granule, int parts, int part)
{
    size_t step;
    blocks = blocks > 0 ? blocks : 1;
    granule = granule > 0 ? granule : 1;
    if (!dtrain__mul_size(blocks, granule, &step) || size % step != 0)
        return 0;
    return dtrain__split(size / step, parts, part, NULL) * step;
}

static dtrain_status dtrain__tp_linear_cut(dtrain__tp_linear *l, const char *what, size_t size)
{
    size_t step;
    if (!dtrain__mul_size(l->blocks, l->granule, &step) || size % step != 0)
        return dtrain__fail(dtrain__tp_error(&l->tp), DTRAIN_ERR_INVALID,
                            "%s on rank %d: %zu %s are no multiple of %zu blocks of granules of %zu; %zu would be",
                            l->tp.name, l->tp.rank, size, what, l->blocks, l->granule,
                            step > 0 ? (size / step + 1) * step : 0);
    l->part = dtrain__tp_part(size, l->blocks, l->granule, l->tp.size, l->tp.rank);
    return DTRAIN_OK;
}

/* Takes a layer up; row: it is split by inputs. */
static dtrain_status dtrain__tp_linear_begin(dtrain__tp_linear *l, const char *name,
                                             const dtrain_parallel_linear *layer, int row)
{
    dtrain_status status;
    memset(l, 0, sizeof *l);
    if (layer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the layer is NULL", name);
    l->layer = layer;
    l->blocks = layer->blocks > 0 ? layer->blocks : 1;
    l->granule = layer->granule > 0 ? layer->granule : 1;
    status = dtrain__tp_begin(&l->tp, name, layer->group);
    if (status == DTRAIN_OK && row && layer->gather_output)
        return dtrain__fail(dtrain__tp_error(&l->tp), DTRAIN_ERR_INVALID,
                            "%s on rank %d: gather_output is for layers split by outputs; this one's output is whole",
                            name, l->tp.rank);
    if (status == DTRAIN_OK)
        status = dtrain__tp_linear_cut(l, row ? "inputs" : "outputs", row ? layer->inputs : layer->outputs);
    l->in = row ? l->part : layer->inputs;
    l->out = row ? layer->outputs : l->part;
    l->splits = layer->sequence && l->tp.size > 1;
    l->gathers = layer->gather_output && l->tp.size > 1;
    l->split_rows = l->splits ? dtrain__tp_rows(&l->tp, layer->rows) : layer->rows;
    dtrain__tp_need(&l->tp, "x in whole", l, layer->rows, layer->inputs, &status);
    dtrain__tp_need(&l->tp, "y in whole", l, layer->rows, layer->outputs, &status);
    dtrain__tp_need(&l->tp, "the weight in whole", l, layer->inputs, layer->outputs, &status);
    return status;
}

static void dtrain__tp_linear_need_weight(const dtrain__tp_linear *l, dtrain_status *status)
{
    size_t first = l->layer->by_inputs ? l->in : l->out, second = l->layer->by_inputs ? l->out : l->in;
    dtrain__tp_need(&l->tp, "weight", l->layer->weight, first, second, status);
}

/* y[rows, out] = x[rows, in] W^T */
static void dtrain__tp_linear_product(const dtrain__tp_linear *l, const float *x, float *y)
{
    dtrain__tp_product(0, !l->layer->by_inputs, l->layer->rows, l->out, l->in, x, l->layer->weight, y, 0);
}

/* dx[rows, in] = dy[rows, out] W */
static void dtrain__tp_linear_input(const dtrain__tp_linear *l, const float *dy, float *dx)
{
    dtrain__tp_product(0, l->layer->by_inputs, l->layer->rows, l->in, l->out, dy, l->layer->weight, dx, 0);
}

/* A slice of the weight's gradient: m rows of it from `at` on. */
static void dtrain__tp_linear_slice(const dtrain__tp_linear *l, const float *x, const float *dy, size_t at, size_t m)
{
    size_t all = l->layer->by_inputs ? l->in : l->out, n = l->layer->by_inputs ? l->out : l->in;
    const float *left = l->layer->by_inputs ? x : dy, *right = l->layer->by_inputs ? dy : x;
    if (m > 0 && n > 0 && l->layer->rows > 0)
        dtrain_sgemm(1, 0, m, n, l->layer->rows, 1.0f, left + at, all, right, n, 1.0f, l->layer->d_weight + at * n, n);
}

/* d_weight += dy^T x, d_bias += the sum of dy's rows; polled: slice by slice, the group polled between them. */
static void dtrain__tp_linear_weights(const dtrain__tp_linear *l, const float *x, const float *dy, int polled)
{
    size_t all = l->layer->by_inputs ? l->in : l->out, step = polled ? DTRAIN__TP_SLICE : all;
    for (size_t at = 0; l->layer->d_weight != NULL && at < all; at += step) {
        dtrain__tp_linear_slice(l, x, dy, at, all - at < step ? all - at : step);
        if (polled)
            DTRAIN_IGNORE(dtrain_comm_poll(l->tp.group, 50));
    }
    if (l->layer->d_bias != NULL)
        dtrain__tp_add_columns(l->layer->d_bias, dy, l->layer->rows, l->out);
}

/* Copies this rank's columns out of whole rows, or those of `rank` into them. */
static void dtrain__tp_linear_columns(const dtrain__tp_linear *l, int rank, float *whole, float *part, int into)
{
    size_t begin, block = l->layer->outputs / l->blocks;
    size_t n = dtrain__split(block / l->granule, l->tp.size, rank, &begin) * l->granule;
    for (size_t r = 0; n > 0 && r < l->layer->rows; r++)
        for (size_t b = 0; b < l->blocks; b++, part += n) {
            float *at = whole + r * l->layer->outputs + b * block + begin * l->granule;
            memcpy(into ? at : part, into ? part : at, n * sizeof(float));
        }
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
        counts[r] = rows * dtrain__tp_part(l->layer->outputs, l->blocks, l->granule, l->tp.size, r);
    status = dtrain_all_gather_v(l->tp.group, part, parts, counts, NULL, DTRAIN_F32);
    for (int r = 0; status == DTRAIN_OK && r < l->tp.size; begin += counts[r++])
        dtrain__tp_linear_columns(l, r, y, parts + begin, 1);
    return status;
}

DTRAIN_API dtrain_status dtrain_column_parallel_linear(const dtrain_parallel_linear *layer, const float *x, float *y)
{
    dtrain__tp_linear l;
    dtrain_status status = dtrain__tp_linear_begin(&l, "column_parallel_linear", layer, 0);
    const float *wide = x;
    float *part = y, *gathered;
    if (status != DTRAIN_OK)
        return status;
    dtrain__tp_linear_need_weight(&l, &status);
    dtrain__tp_need(&l.tp, "x", x, l.split_rows, l.in, &status);
    dtrain__tp_need(&l.tp, "y", y, layer->rows, l.gathers ? layer->outputs : l.out, &status);
    if (l.gathers)
        part = dtrain__tp_floats(&l.tp, layer->rows, l.out, &status);
    if (l.splits) {
        wide = gathered = dtrain__tp_floats(&l.tp, layer->rows, l.in, &status);
        if (status == DTRAIN_OK)
            status = dtrain__collective_rows(l.tp.group, DTRAIN__ALL_GATHER, x, gathered, layer->rows, l.in, NULL);
    }
    if (status == DTRAIN_OK) {
        dtrain__tp_linear_product(&l, wide, part);
        dtrain__tp_add_bias(part, layer->bias, layer->rows, l.out);
    }
    if (status == DTRAIN_OK && l.gathers)
        status = dtrain__tp_linear_gather(&l, part, y);
    return dtrain__tp_end(&l.tp, status);
}

DTRAIN_API dtrain_status dtrain_row_parallel_linear(const dtrain_parallel_linear *layer, const float *x, float *y)
{
    dtrain__tp_linear l;
    dtrain_status status = dtrain__tp_linear_begin(&l, "row_parallel_linear", layer, 1);
    float *sum = y;
    if (status != DTRAIN_OK)
        return status;
    dtrain__tp_linear_need_weight(&l, &status);
    dtrain__tp_need(&l.tp, "x", x, layer->rows, l.in, &status);
    dtrain__tp_need(&l.tp, "y", y, l.split_rows, l.out, &status);
    if (l.splits)
        sum = dtrain__tp_floats(&l.tp, layer->rows, l.out, &status);
    if (status == DTRAIN_OK)
        dtrain__tp_linear_product(&l, x, sum);
    if (status == DTRAIN_OK && l.tp.size > 1)
        status = dtrain__collective_rows(l.tp.group, l.splits ? DTRAIN__REDUCE_SCATTER : DTRAIN__ALL_REDUCE, sum, y,
                                         layer->rows, l.out, NULL);
    if (status == DTRAIN_OK)
        dtrain__tp_add_bias(y, layer->bias, l.split_rows, l.out);
    return dtrain__tp_end(&l.tp, status);
}

/* What backward has of its operands in whole, and what is under way. */
typedef struct dtrain__tp_linear_back {
    const float *x, *dy; /* [rows, in], [rows, out] */
    float *gathered;     /* where the rows of x go; NULL: they are here */
    float *sum;          /* this rank's share of dx */
    dtrain_work *gather, *reduce;
    int overlap;
} dtrain__tp_linear_back;

/* Finds room for a column layer's backward, and its own columns of dy. */
static void dtrain__tp_column_prepare(dtrain__tp_linear *l, dtrain__tp_linear_back *back, const float *x,
                                      const float *dy, float *dx, dtrain_status *status)
{
    memset(back, 0, sizeof *back);
    back->x = x;
    back->dy = dy;
    back->sum = dx;
    back->overlap = !l->layer->no_overlap && l->layer->d_weight != NULL;
    if (l->splits && l->layer->d_weight != NULL)
        back->x = back->gathered = dtrain__tp_floats(&l->tp, l->layer->rows, l->in, status);
    if (l->splits && dx != NULL)
        back->sum = dtrain__tp_floats(&l->tp, l->layer->rows, l->in, status);
    if (l->gathers) {
        float *part = dtrain__tp_floats(&l->tp, l->layer->rows, l->out, status), *whole;
        memcpy(&whole, &dy, sizeof whole); /* only read */
        if (*status == DTRAIN_OK)
            dtrain__tp_linear_columns(l, l->tp.rank, whole, part, 0);
        back->dy = part;
    }
}

/* The products of a column layer's backward, beside what they communicate. */
static dtrain_status dtrain__tp_column_compute(dtrain__tp_linear *l, dtrain__tp_linear_back *back, const float *x,
                                               float *dx)
{
    size_t rows = l->layer->rows;
    dtrain_status status = DTRAIN_OK;
    if (back->gathered != NULL)
        status = dtrain__collective_rows(l->tp.group, DTRAIN__ALL_GATHER, x, back->gathered, rows, l->in,
                                         back->overlap ? &back->gather : NULL);
    if (status == DTRAIN_OK && dx != NULL)
        dtrain__tp_linear_input(l, back->dy, back->sum);
    if (status == DTRAIN_OK && dx != NULL && l->tp.size > 1)
        status = dtrain__collective_rows(l->tp.group, l->splits ? DTRAIN__REDUCE_SCATTER : DTRAIN__ALL_REDUCE,
                                         back->sum, dx, rows, l->in, back->overlap ? &back->reduce : NULL);
    status = dtrain__tp_wait(status, &back->gather);
    if (status == DTRAIN_OK)
        dtrain__tp_linear_weights(l, back->x, back->dy,
                                  back->reduce != NULL && l->tp.group->desc.progress == DTRAIN_PROGRESS_POLL);
    return dtrain__tp_wait(status, &back->reduce);
}

DTRAIN_API dtrain_status dtrain_column_parallel_linear_backward(const dtrain_parallel_linear *layer, const float *x,
                                                                const float *dy, float *dx)
{
    dtrain__tp_linear l;
    dtrain__tp_linear_back back;
    dtrain_status status = dtrain__tp_linear_begin(&l, "column_parallel_linear_backward", layer, 0);
    if (status != DTRAIN_OK)
        return status;
    if (dx != NULL)
        dtrain__tp_linear_need_weight(&l, &status);
    if (layer->d_weight != NULL)
        dtrain__tp_need(&l.tp, "x", x, l.split_rows, l.in, &status);
    dtrain__tp_need(&l.tp, "dy", dy, layer->rows, l.gathers ? layer->outputs : l.out, &status);
    if (status == DTRAIN_OK)
        dtrain__tp_column_prepare(&l, &back, x, dy, dx, &status);
    if (status == DTRAIN_OK)
        status = dtrain__tp_column_compute(&l, &back, x, dx);
    return dtrain__tp_end(&l.tp, status);
}

DTRAIN_API dtrain_status dtrain_row_parallel_linear_backward(const dtrain_parallel_linear *layer, const float *x,
                                                             const float *dy, float *dx)
{
    dtrain__tp_linear l;
    const float *wide = dy;
    dtrain_status status = dtrain__tp_linear_begin(&l, "row_parallel_linear_backward", layer, 1);
    if (status != DTRAIN_OK)
        return status;
    if (dx != NULL)
        dtrain__tp_linear_need_weight(&l, &status);
    if (layer->d_weight != NULL)
        dtrain__tp_need(&l.tp, "x", x, layer->rows, l.in, &status);
    dtrain__tp_need(&l.tp, "dy", dy, l.split_rows, l.out, &status);
    if (l.splits && (dx != NULL || layer->d_weight != NULL || layer->d_bias != NULL)) {
        float *gathered = dtrain__tp_floats(&l.tp, layer->rows, l.out, &status);
        if (status == DTRAIN_OK)
            status = dtrain__collective_rows(l.tp.group, DTRAIN__ALL_GATHER, dy, gathered, layer->rows, l.out, NULL);
        wide = gathered;
    }
    if (status == DTRAIN_OK && dx != NULL)
        dtrain__tp_linear_input(&l, wide, dx);
    if (status == DTRAIN_OK)
        dtrain__tp_linear_weights(&l, x, wide, 0);
    return dtrain__tp_end(&l.tp, status);
}

#endif
