/* ---- >>tp-vocab ----
 * Layers split by the vocabulary. The embedding gets each row from one rank. For the cross-entropy, ranks exchange
 * three numbers a row: the largest logit, the sum of exponentials, and the logit of the target. */
#ifndef DTRAIN__TP_VOCAB
#define DTRAIN__TP_VOCAB
#include "tp_call.c"
#include "tp_softmax.c"

typedef struct dtrain__tp_embedding {
    dtrain__tp tp;
    size_t begin, part; /* this rank's rows of the table */
} dtrain__tp_embedding;

/* Checks that every token is in the vocabulary, or is `least` if that is -1. */
static void dtrain__tp_vocab_check(const dtrain__tp *tp, const char *what, const int32_t *tokens, size_t rows,
                                   size_t vocab, int32_t least, dtrain_status *status)
{
    dtrain__tp_need(tp, what, tokens, rows, 1, status);
    for (size_t i = 0; *status == DTRAIN_OK && i < rows; i++)
        if (tokens[i] < least || (tokens[i] >= 0 && (size_t)tokens[i] >= vocab))
            *status = dtrain__fail(dtrain__tp_error(tp), DTRAIN_ERR_INVALID,
                                   "%s on rank %d: %s[%zu] is %d, expected 0 to %zu%s", tp->name, tp->rank, what, i,
                                   (int)tokens[i], vocab > 0 ? vocab - 1 : 0,
                                   least < 0 ? ", or -1 for a row that is left out" : "");
}

static dtrain_status dtrain__tp_embedding_begin(dtrain__tp_embedding *e, const char *name,
                                                const dtrain_parallel_vocab *layer, const int32_t *tokens)
{
    if (layer == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the layer is NULL, expected a filled dtrain_parallel_vocab",
                            name);
    dtrain_status status = dtrain__tp_begin(&e->tp, name, layer->group, layer->sequence);
    e->part = dtrain__split(layer->vocab, e->tp.size, e->tp.rank, &e->begin);
    dtrain__tp_need(&e->tp, "the output in whole", e, layer->rows, layer->width, &status);
    dtrain__tp_need(&e->tp, "the table in whole", e, layer->vocab, layer->width, &status);
    dtrain__tp_vocab_check(&e->tp, "tokens", tokens, layer->rows, layer->vocab, 0, &status);
    return status;
}

/* Copies this rank's rows. Rows of other ranks are -0, which changes no sum. */
static void dtrain__tp_embedding_look_up(const dtrain__tp_embedding *e, const dtrain_parallel_vocab *layer,
                                         const int32_t *tokens, float *out)
{
    const uint32_t minus_zero = (uint32_t)1 << 31;
    for (size_t i = 0; i < layer->rows; i++, out += layer->width) {
        size_t row = (size_t)tokens[i] - e->begin; /* wraps around for a token below begin */
        if (row < e->part && layer->width > 0)
            memcpy(out, layer->table + row * layer->width, layer->width * sizeof(float));
        for (size_t k = 0; row >= e->part && k < layer->width; k++)
            memcpy(out + k, &minus_zero, sizeof minus_zero);
    }
}

DTRAIN_API dtrain_status dtrain_vocab_parallel_embedding(const dtrain_parallel_vocab *layer, const int32_t *tokens,
                                                         float *out)
{
    dtrain__tp_embedding e;
    dtrain_status status = dtrain__tp_embedding_begin(&e, "vocab_parallel_embedding", layer, tokens);
    if (status != DTRAIN_OK)
        return status;
    dtrain__tp_need(&e.tp, "out", out, dtrain__tp_rows(&e.tp, layer->rows), layer->width, &status);
    dtrain__tp_need(&e.tp, "table", layer->table, e.part, layer->width, &status);
    float *share = dtrain__tp_share(&e.tp, out, layer->rows, layer->width, &status);
    if (status == DTRAIN_OK)
        dtrain__tp_embedding_look_up(&e, layer, tokens, share);
    dtrain__tp_sum_shares(&e.tp, share, out, layer->rows, layer->width, NULL, &status);
    return dtrain__tp_end(&e.tp, status);
}

DTRAIN_API dtrain_status dtrain_vocab_parallel_embedding_backward(const dtrain_parallel_vocab *layer,
                                                                  const int32_t *tokens, const float *d_out)
{
    dtrain__tp_embedding e;
    dtrain_status status = dtrain__tp_embedding_begin(&e, "vocab_parallel_embedding_backward", layer, tokens);
    if (status != DTRAIN_OK || layer->d_table == NULL)
        return status;
    dtrain__tp_need(&e.tp, "d_out", d_out, dtrain__tp_rows(&e.tp, layer->rows), layer->width, &status);
    d_out = dtrain__tp_gather(&e.tp, d_out, layer->rows, layer->width, NULL, &status);
    for (size_t i = 0; status == DTRAIN_OK && i < layer->rows; i++) {
        size_t row = (size_t)tokens[i] - e.begin;
        if (row < e.part)
            dtrain__tp_add(layer->d_table + row * layer->width, d_out + i * layer->width, layer->width);
    }
    return dtrain__tp_end(&e.tp, status);
}

/* This rank's logits, and three numbers for each row. */
typedef struct dtrain__tp_entropy {
    dtrain__tp tp;
    float *logits;
    const int32_t *targets;
    size_t rows, begin, part;
    float *most;           /* the largest logit */
    double *sums, *target; /* the sum of exponentials; the target's logit minus the largest */
} dtrain__tp_entropy;

static dtrain_status dtrain__tp_entropy_begin(dtrain__tp_entropy *e, dtrain_comm *group, float *logits,
                                              const int32_t *targets, size_t rows, size_t vocab, const double *loss)
{
    dtrain_status status = dtrain__tp_begin(&e->tp, "vocab_parallel_cross_entropy", group, 0);
    e->logits = logits;
    e->targets = targets;
    e->rows = rows;
    e->part = dtrain__split(vocab, e->tp.size, e->tp.rank, &e->begin);
    dtrain__tp_need(&e->tp, "loss", loss, 1, 1, &status);
    dtrain__tp_need(&e->tp, "logits", logits, rows, e->part, &status);
    dtrain__tp_vocab_check(&e->tp, "targets", targets, rows, vocab, -1, &status);
    e->most = dtrain__tp_floats(&e->tp, rows, 1, &status);
    e->sums = (double *)dtrain__tp_room(&e->tp, rows, 2 * sizeof(double), &status);
    e->target = status == DTRAIN_OK ? e->sums + rows : NULL;
    return status;
}

DTRAIN__EXACT_BEGIN

/* Computes the exponentials of all rows and their sums. Rows that are left out get a sum of 0. */
static void dtrain__tp_entropy_exponentials(const dtrain__tp_entropy *e)
{
    for (size_t i = 0; i < e->rows; i++) {
        float *row = e->logits + i * e->part;
        size_t target = (size_t)e->targets[i] - e->begin;
        e->sums[i] = e->target[i] = 0.0;
        if (e->targets[i] < 0)
            continue;
        if (target < e->part)
            e->target[i] = (double)row[target] - (double)e->most[i];
        dtrain__tp_exps(row, e->part, e->most[i]);
        dtrain__tp_sum(row, e->part, &e->sums[i]);
    }
}

/* Computes the gradient, and the loss, which is the same on every rank. */
static double dtrain__tp_entropy_finish(const dtrain__tp_entropy *e)
{
    double loss = 0.0;
    for (size_t i = 0; i < e->rows; i++) {
        float *row = e->logits + i * e->part;
        size_t target = (size_t)e->targets[i] - e->begin;
        if (e->targets[i] < 0) {
            if (e->part > 0)
                memset(row, 0, e->part * sizeof(float));
            continue;
        }
        dtrain__fold_divide_f32(row, e->sums[i], e->part);
        if (target < e->part)
            row[target] = row[target] - 1.0f;
        loss = loss + (dtrain__tp_log(e->sums[i]) - e->target[i]);
    }
    return loss;
}

DTRAIN__EXACT_END

DTRAIN_API dtrain_status dtrain_vocab_parallel_cross_entropy(dtrain_comm *group, float *logits, const int32_t *targets,
                                                             size_t rows, size_t vocab, double *loss)
{
    dtrain__tp_entropy e;
    dtrain_status status = dtrain__tp_entropy_begin(&e, group, logits, targets, rows, vocab, loss);
    if (status != DTRAIN_OK)
        return dtrain__tp_end(&e.tp, status);
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < rows; i++)
        dtrain__tp_max(logits + i * e.part, targets[i] < 0 ? 0 : e.part, &e.most[i]);
    if (e.tp.size > 1)
        status = dtrain_all_reduce(group, e.most, e.most, rows, DTRAIN_F32, DTRAIN_MAX);
    if (status == DTRAIN_OK) {
        dtrain__tp_entropy_exponentials(&e);
        if (e.tp.size > 1)
            status = dtrain_all_reduce(group, e.sums, e.sums, 2 * rows, DTRAIN_F64, DTRAIN_SUM);
    }
    if (status == DTRAIN_OK)
        *loss = dtrain__tp_entropy_finish(&e);
    dtrain__fpmode_restore(mode);
    return dtrain__tp_end(&e.tp, status);
}

#endif
