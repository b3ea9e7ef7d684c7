/* ---- >>tp-attention ----
 * Attention of whole heads. A head's queries, keys and values are strided views of qkv; probabilities are computed in
 * strips of positions, so that a causal one computes half of them. Backward needs no memory beside what it is given:
 * the output is computed anew where the gradient of the queries will be, and what reaches the probabilities, tile by
 * tile, on the stack. */
#ifndef DTRAIN__TP_ATTENTION
#define DTRAIN__TP_ATTENTION
#include "tp_softmax.c"
#include "tensor_parallel.h"
#include "../tensor/gemm.c"

#define DTRAIN__TP_ATTENTION_STRIP 64 /* positions at a time */
#define DTRAIN__TP_ATTENTION_TILE 128 /* of those that they see; a tile is 32 KiB */

/* One head of one sequence. */
typedef struct dtrain__tp_attention_state {
    size_t positions, channels;
    size_t qkv_row, row;        /* elements from one position to the next */
    size_t first, keys, values; /* where it lies in qkv: its queries; and how far behind are the others */
    size_t kept, out;
    float scale;
    int causal;
} dtrain__tp_attention_state;

static dtrain__tp_attention_state dtrain__tp_attention_head(const dtrain_attention *a, size_t index)
{
    dtrain__tp_attention_state h;
    size_t sequence = index / a->heads, head = index % a->heads;
    h.positions = a->positions;
    h.channels = a->channels;
    h.row = a->heads * a->channels;
    h.qkv_row = 3 * h.row;
    h.out = sequence * a->positions * h.row + head * a->channels;
    h.first = sequence * a->positions * h.qkv_row + head * a->channels;
    h.keys = h.first + h.row;
    h.values = h.first + 2 * h.row;
    h.kept = index * a->positions * a->positions;
    h.scale = (float)(1.0 / dtrain__vector_sqrt_f64((double)a->channels));
    h.causal = a->causal;
    return h;
}

/* How many positions the strip from `at` on has, and how many of all its last one sees. */
static size_t dtrain__tp_attention_strip(const dtrain__tp_attention_state *h, size_t at, size_t *seen)
{
    size_t n = h->positions - at < DTRAIN__TP_ATTENTION_STRIP ? h->positions - at : DTRAIN__TP_ATTENTION_STRIP;
    *seen = h->causal ? at + n : h->positions;
    return n;
}

static dtrain_status dtrain__tp_attention_need(const char *call, const char *what, const void *data,
                                               const size_t *sizes)
{
    size_t count = sizeof(float) * 16; /* so that sizes of a few arrays add up */
    for (int i = 0; i < 5; i++)
        if (sizes[i] == 0)
            return DTRAIN_OK;
    for (int i = 0; i < 5; i++)
        if (!dtrain__mul_size(count, sizes[i], &count))
            return dtrain__fail(NULL, DTRAIN_ERR_INVALID,
                                "%s: %s would have %zu x %zu x %zu x %zu x %zu elements, more than memory can hold",
                                call, what, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
    if (data != NULL)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: %s is NULL, expected %zu elements", call, what,
                        count / (sizeof(float) * 16));
}

/* out: or, of backward, its gradient; d_qkv is backward's alone. */
static dtrain_status dtrain__tp_attention_check(const char *call, const dtrain_attention *a, const float *qkv,
                                                const float *kept, const float *out, int backward, const float *d_qkv)
{
    dtrain_status status;
    if (a == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the attention is NULL", call);
    const size_t wide[5] = {a->batch, a->positions, 3, a->heads, a->channels};
    const size_t one[5] = {a->batch, a->positions, 1, a->heads, a->channels};
    const size_t square[5] = {a->batch, a->heads, a->positions, a->positions, 1};
    status = dtrain__tp_attention_need(call, "qkv", qkv, wide);
    if (status == DTRAIN_OK)
        status = dtrain__tp_attention_need(call, "kept", kept, square);
    if (status == DTRAIN_OK)
        status = dtrain__tp_attention_need(call, backward ? "d_out" : "out", out, one);
    if (status == DTRAIN_OK && backward)
        status = dtrain__tp_attention_need(call, "d_qkv", d_qkv, wide);
    return status;
}

/* How many heads there are to compute, over all sequences; 0, too, where they are empty. */
static size_t dtrain__tp_attention_heads(const dtrain_attention *a)
{
    return a->positions > 0 && a->channels > 0 ? a->batch * a->heads : 0;
}

/* Probabilities of a strip, 0 for what it does not see. */
static void dtrain__tp_attention_softmax(const dtrain__tp_attention_state *h, size_t at, size_t n, float *strip)
{
    for (size_t i = 0; i < n; i++, strip += h->positions) {
        size_t seen = h->causal ? at + i + 1 : h->positions;
        dtrain__tp_softmax_row(strip, seen);
        if (seen < h->positions)
            memset(strip + seen, 0, (h->positions - seen) * sizeof(float));
    }
}

/* out of a strip = its probabilities x the values that it sees */
static void dtrain__tp_attention_values(const dtrain__tp_attention_state *h, size_t at, const float *qkv,
                                        const float *kept, float *out, size_t out_row)
{
    size_t seen, n = dtrain__tp_attention_strip(h, at, &seen);
    dtrain_sgemm(0, 0, n, h->channels, seen, 1.0f, kept + h->kept + at * h->positions, h->positions, qkv + h->values,
                 h->qkv_row, 0.0f, out + at * out_row, out_row);
}

DTRAIN_API dtrain_status dtrain_attention_forward(const dtrain_attention *attention, const float *qkv, float *kept,
                                                  float *out)
{
    dtrain_status status = dtrain__tp_attention_check("attention_forward", attention, qkv, kept, out, 0, NULL);
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < dtrain__tp_attention_heads(attention); i++) {
        dtrain__tp_attention_state h = dtrain__tp_attention_head(attention, i);
        for (size_t at = 0; at < h.positions; at += DTRAIN__TP_ATTENTION_STRIP) {
            size_t seen, n = dtrain__tp_attention_strip(&h, at, &seen);
            float *strip = kept + h.kept + at * h.positions;
            dtrain_sgemm(0, 1, n, seen, h.channels, h.scale, qkv + h.first + at * h.qkv_row, h.qkv_row, qkv + h.keys,
                         h.qkv_row, 0.0f, strip, h.positions);
            dtrain__tp_attention_softmax(&h, at, n, strip);
            dtrain__tp_attention_values(&h, at, qkv, kept, out + h.out, h.row);
        }
    }
    dtrain__fpmode_restore(mode);
    return DTRAIN_OK;
}

/* Turns a strip's probabilities into the gradient of its scores, p (d - p . d): the mean p . d of a row is that of its
 * output with the output's gradient. */
static void dtrain__tp_attention_scores(const dtrain__tp_attention_state *h, size_t at, const float *qkv, float *kept,
                                        const float *d_out, const float *out)
{
    float tile[DTRAIN__TP_ATTENTION_STRIP * DTRAIN__TP_ATTENTION_TILE], mean[DTRAIN__TP_ATTENTION_STRIP];
    size_t seen, n = dtrain__tp_attention_strip(h, at, &seen);
    const float *slopes = d_out + h->out + at * h->row;
    for (size_t i = 0; i < n; i++) {
        double sum;
        dtrain__tp_dot(out + (at + i) * h->qkv_row, slopes + i * h->row, h->channels, &sum);
        mean[i] = (float)sum;
    }
    for (size_t j = 0; j < seen; j += DTRAIN__TP_ATTENTION_TILE) {
        size_t columns = seen - j < DTRAIN__TP_ATTENTION_TILE ? seen - j : DTRAIN__TP_ATTENTION_TILE;
        dtrain_sgemm(0, 1, n, columns, h->channels, 1.0f, slopes, h->row, qkv + h->values + j * h->qkv_row, h->qkv_row,
                     0.0f, tile, columns);
        for (size_t i = 0; i < n; i++) {
            size_t limit = h->causal ? at + i + 1 : h->positions, left = limit > j ? limit - j : 0;
            dtrain__tp_slope(kept + h->kept + (at + i) * h->positions + j, tile + i * columns,
                             left < columns ? left : columns, mean[i]);
        }
    }
}

DTRAIN_API dtrain_status dtrain_attention_backward(const dtrain_attention *attention, const float *qkv, float *kept,
                                                   const float *d_out, float *d_qkv)
{
    dtrain_status status = dtrain__tp_attention_check("attention_backward", attention, qkv, kept, d_out, 1, d_qkv);
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < dtrain__tp_attention_heads(attention); i++) {
        dtrain__tp_attention_state h = dtrain__tp_attention_head(attention, i);
        size_t t = h.positions, strip = DTRAIN__TP_ATTENTION_STRIP;
        float *scores = kept + h.kept, *d_queries = d_qkv + h.first;
        dtrain_sgemm(1, 0, t, h.channels, t, 1.0f, scores, t, d_out + h.out, h.row, 0.0f, d_qkv + h.values, h.qkv_row);
        for (size_t at = 0; at < t; at += strip)
            dtrain__tp_attention_values(&h, at, qkv, kept, d_queries, h.qkv_row);
        for (size_t at = 0; at < t; at += strip)
            dtrain__tp_attention_scores(&h, at, qkv, kept, d_out, d_queries);
        dtrain_sgemm(0, 0, t, h.channels, t, h.scale, scores, t, qkv + h.keys, h.qkv_row, 0.0f, d_queries, h.qkv_row);
        dtrain_sgemm(1, 0, t, h.channels, t, h.scale, scores, t, qkv + h.first, h.qkv_row, 0.0f, d_qkv + h.keys,
                     h.qkv_row);
    }
    dtrain__fpmode_restore(mode);
    return DTRAIN_OK;
}

#endif
