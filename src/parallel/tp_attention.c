/* ---- >>tp-attention ----
 * Attention of whole heads. Queries, keys and values of a head are strided views of qkv. Probabilities are computed in
 * strips of positions, so that causal attention computes about half of them. Backward allocates nothing: it recomputes
 * the output in the room for the gradient of the queries, and holds gradients of probabilities in tiles on the stack.
 */
#ifndef DTRAIN__TP_ATTENTION
#define DTRAIN__TP_ATTENTION
#include "tp_softmax.c"
#include "tensor_parallel.h"
#include "../tensor/gemm.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__TP_ATTENTION_STRIP 64 /* positions in a strip */
#define DTRAIN__TP_ATTENTION_TILE 128 /* positions that a strip sees, in a tile; a tile is 32 KiB */

/* One head of one sequence. */
typedef struct dtrain__tp_attention_state {
    size_t positions, channels;
    size_t qkv_row, row; /* elements from one position to the next */
    size_t first, out;   /* where its queries begin in qkv, keys and values one and two rows later; its output in out */
    const float *queries, *keys, *values;
    float *kept;
    float scale;
    int causal;
} dtrain__tp_attention_state;

static dtrain__tp_attention_state dtrain__tp_attention_head(const dtrain_attention *a, size_t index, const float *qkv,
                                                            float *kept)
{
    dtrain__tp_attention_state h;
    size_t sequence = index / a->heads, head = index % a->heads;
    h.positions = a->positions;
    h.channels = a->channels;
    h.row = a->heads * a->channels;
    h.qkv_row = 3 * h.row;
    h.first = sequence * a->positions * h.qkv_row + head * a->channels;
    h.out = sequence * a->positions * h.row + head * a->channels;
    h.queries = qkv + h.first;
    h.keys = h.queries + h.row;
    h.values = h.keys + h.row;
    h.kept = kept + index * a->positions * a->positions;
    h.scale = (float)(1.0 / dtrain__vector_sqrt_f64((double)a->channels));
    h.causal = a->causal;
    return h;
}

/* Returns the number of positions in the strip at `at`. *seen: how many positions its last one sees. */
static size_t dtrain__tp_attention_strip(const dtrain__tp_attention_state *h, size_t at, size_t *seen)
{
    size_t n = h->positions - at < DTRAIN__TP_ATTENTION_STRIP ? h->positions - at : DTRAIN__TP_ATTENTION_STRIP;
    *seen = h->causal ? at + n : h->positions;
    return n;
}

static dtrain_status dtrain__tp_attention_need(const char *call, const char *what, const void *data,
                                               const dtrain_attention *a, size_t wide, size_t last)
{
    const size_t sizes[5] = {a->batch, a->positions, wide, a->heads, last};
    size_t count = sizeof(float) * 16; /* so that the sum of a few such sizes does not overflow */
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

/* Checks the arrays of a call, and counts heads over all sequences; 0 if heads are empty. */
static dtrain_status dtrain__tp_attention_begin(const char *call, const dtrain_attention *a, const float *qkv,
                                                const float *kept, const char *what, const float *out, size_t *heads)
{
    *heads = 0;
    if (a == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the attention is NULL, expected a filled dtrain_attention",
                            call);
    dtrain_status status = dtrain__tp_attention_need(call, "qkv", qkv, a, 3, a->channels);
    if (status == DTRAIN_OK)
        status = dtrain__tp_attention_need(call, "kept", kept, a, a->positions, 1);
    if (status == DTRAIN_OK)
        status = dtrain__tp_attention_need(call, what, out, a, 1, a->channels);
    if (a->positions > 0 && a->channels > 0)
        *heads = a->batch * a->heads;
    return status;
}

/* out of a strip = its probabilities x the values that it sees */
static void dtrain__tp_attention_values(const dtrain__tp_attention_state *h, size_t at, float *out, size_t out_row)
{
    size_t seen, n = dtrain__tp_attention_strip(h, at, &seen);
    dtrain_sgemm(0, 0, n, h->channels, seen, 1.0f, h->kept + at * h->positions, h->positions, h->values, h->qkv_row,
                 0.0f, out + at * out_row, out_row);
}

/* Computes the probabilities of a strip, 0 for positions that it does not see, and its output. */
static void dtrain__tp_attention_ahead(const dtrain__tp_attention_state *h, size_t at, float *out)
{
    size_t seen, n = dtrain__tp_attention_strip(h, at, &seen);
    float *row = h->kept + at * h->positions;
    dtrain_sgemm(0, 1, n, seen, h->channels, h->scale, h->queries + at * h->qkv_row, h->qkv_row, h->keys, h->qkv_row,
                 0.0f, row, h->positions);
    for (size_t i = 0; i < n; i++, row += h->positions) {
        size_t own = h->causal ? at + i + 1 : h->positions;
        dtrain__tp_softmax_row(row, own);
        if (own < h->positions)
            memset(row + own, 0, (h->positions - own) * sizeof(float));
    }
    dtrain__tp_attention_values(h, at, out, h->row);
}

DTRAIN_API dtrain_status dtrain_attention_forward(const dtrain_attention *attention, const float *qkv, float *kept,
                                                  float *out)
{
    size_t heads;
    dtrain_status status = dtrain__tp_attention_begin("attention_forward", attention, qkv, kept, "out", out, &heads);
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < heads; i++) {
        dtrain__tp_attention_state h = dtrain__tp_attention_head(attention, i, qkv, kept);
        for (size_t at = 0; at < h.positions; at += DTRAIN__TP_ATTENTION_STRIP)
            dtrain__tp_attention_ahead(&h, at, out + h.out);
    }
    dtrain__fpmode_restore(mode);
    return DTRAIN_OK;
}

/* Turns the probabilities p of a strip into the gradient of its scores, p (d - p . d), where d is the gradient of p.
 * For each row, p . d is the dot product of the output and its gradient. */
static void dtrain__tp_attention_scores(const dtrain__tp_attention_state *h, size_t at, const float *d_out,
                                        const float *out)
{
    float tile[DTRAIN__TP_ATTENTION_STRIP * DTRAIN__TP_ATTENTION_TILE], mean[DTRAIN__TP_ATTENTION_STRIP];
    size_t seen, n = dtrain__tp_attention_strip(h, at, &seen);
    const float *slopes = d_out + at * h->row;
    for (size_t i = 0; i < n; i++) {
        double sum;
        dtrain__tp_dot(out + (at + i) * h->qkv_row, slopes + i * h->row, h->channels, &sum);
        mean[i] = (float)sum;
    }
    for (size_t j = 0; j < seen; j += DTRAIN__TP_ATTENTION_TILE) {
        size_t columns = seen - j < DTRAIN__TP_ATTENTION_TILE ? seen - j : DTRAIN__TP_ATTENTION_TILE;
        dtrain_sgemm(0, 1, n, columns, h->channels, 1.0f, slopes, h->row, h->values + j * h->qkv_row, h->qkv_row, 0.0f,
                     tile, columns);
        for (size_t i = 0; i < n; i++) {
            size_t limit = h->causal ? at + i + 1 : h->positions, left = limit > j ? limit - j : 0;
            dtrain__tp_slope(h->kept + (at + i) * h->positions + j, tile + i * columns, left < columns ? left : columns,
                             mean[i]);
        }
    }
}

DTRAIN_API dtrain_status dtrain_attention_backward(const dtrain_attention *attention, const float *qkv, float *kept,
                                                   const float *d_out, float *d_qkv)
{
    size_t heads, strip = DTRAIN__TP_ATTENTION_STRIP;
    dtrain_status status =
        dtrain__tp_attention_begin("attention_backward", attention, qkv, kept, "d_out", d_out, &heads);
    if (status == DTRAIN_OK)
        status = dtrain__tp_attention_need("attention_backward", "d_qkv", d_qkv, attention, 3, attention->channels);
    if (status != DTRAIN_OK)
        return status;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < heads; i++) {
        dtrain__tp_attention_state h = dtrain__tp_attention_head(attention, i, qkv, kept);
        size_t t = h.positions, c = h.channels, wide = h.qkv_row;
        const float *slopes = d_out + h.out;
        float *d_queries = d_qkv + h.first, *d_keys = d_queries + h.row, *d_values = d_keys + h.row;
        dtrain_sgemm(1, 0, t, c, t, 1.0f, h.kept, t, slopes, h.row, 0.0f, d_values, wide);
        for (size_t at = 0; at < t; at += strip)
            dtrain__tp_attention_values(&h, at, d_queries, wide);
        for (size_t at = 0; at < t; at += strip)
            dtrain__tp_attention_scores(&h, at, slopes, d_queries);
        dtrain_sgemm(0, 0, t, c, t, h.scale, h.kept, t, h.keys, wide, 0.0f, d_queries, wide);
        dtrain_sgemm(1, 0, t, c, t, h.scale, h.kept, t, h.queries, wide, 0.0f, d_keys, wide);
    }
    dtrain__fpmode_restore(mode);
    return DTRAIN_OK;
}

DTRAIN__FAST_END
#endif
