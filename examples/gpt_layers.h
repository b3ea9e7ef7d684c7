/* train_gpt's model as layers of a dtrain_module, each split over a tensor-parallel group: the embedding, the blocks
 * and the head that is the loss. Include dtrain.h and gpt.h first.
 *
 * B sequences of T positions are R = B T rows. Heads and the channels of the feed-forward part are dealt to the ranks;
 * what lies between, C wide, is the same on all of them, or with sequence parallelism each rank has r of the rows. */
#ifndef GPT_LAYERS_H
#define GPT_LAYERS_H

#include "nn.h"

/* What all layers of one rank share. */
typedef struct gpt_split {
    dtrain_comm *group; /* tensor parallel; NULL: one rank */
    size_t V, C, T, H, D; /* of the whole model; D = C / H */
    size_t heads, wide; /* this rank's of H, and of 4 C */
    size_t B;           /* sequences of the micro-batches now; set between steps */
    int sequence;       /* parallel: activations of width C are split by rows */
    int deferred;       /* gradients of weights are computed after those of inputs: what they need is saved */
    float *scratch;     /* for backward: gradients that are not saved, and partial ones of norms */
} gpt_split;

/* One micro-batch, as callbacks see it. */
typedef struct gpt_batch {
    const int32_t *targets; /* [R]; read by the last stage */
    double loss;            /* out: the sum over rows, on the last stage */
} gpt_batch;

/* What a block keeps of its forward pass, and where its backward pass works. Without deferral the gradients of a block
 * lie in scratch. */
typedef struct gpt_block {
    float *ln1, *mean1, *rstd1, *qkv, *att, *atty, *mid, *ln2, *mean2, *rstd2, *wide, *gelu;
    float *d_wide, *d_ln2, *d_mid, *d_qkv, *d_ln1, *d_atty, *unused;
    size_t R, r;
} gpt_block;

/* A block's parameters, in the order in which its layer lists them. */
enum { BLOCK_FIRST = LN1W, BLOCK_PARAMS = FCPB - LN1W + 1 };

static inline size_t gpt_rows(const gpt_split *s, size_t *begin)
{
    size_t none;
    begin = begin != NULL ? begin : &none;
    *begin = 0;
    return s->sequence && s->group != NULL
               ? dtrain_shard(s->group, s->B * s->T, dtrain_comm_rank(s->group), begin)
               : s->B * s->T;
}

/* Lays out what a block saves, and its scratch; returns how many floats are saved. NULL memory only measures. */
static inline size_t gpt_block_lay_out(const gpt_split *s, gpt_block *b, float *saved, float *scratch)
{
    size_t C = s->C, inner = s->heads * s->D, at = 0, used = 0;
    b->R = s->B * s->T;
    b->r = gpt_rows(s, NULL);
    b->ln1 = gpt_take(saved, &at, b->r * C);
    b->mean1 = gpt_take(saved, &at, b->r);
    b->rstd1 = gpt_take(saved, &at, b->r);
    b->qkv = gpt_take(saved, &at, b->R * 3 * inner);
    b->att = gpt_take(saved, &at, s->B * s->heads * s->T * s->T);
    b->atty = gpt_take(saved, &at, b->R * inner);
    b->mid = gpt_take(saved, &at, b->r * C);
    b->ln2 = gpt_take(saved, &at, b->r * C);
    b->mean2 = gpt_take(saved, &at, b->r);
    b->rstd2 = gpt_take(saved, &at, b->r);
    b->wide = gpt_take(saved, &at, b->R * s->wide);
    b->gelu = gpt_take(saved, &at, b->R * s->wide);
    float *kept = s->deferred ? saved : scratch;
    size_t *kept_at = s->deferred ? &at : &used;
    b->d_wide = gpt_take(kept, kept_at, b->R * s->wide);
    b->d_ln2 = gpt_take(kept, kept_at, b->r * C);
    b->d_mid = gpt_take(kept, kept_at, b->r * C);
    b->d_qkv = gpt_take(kept, kept_at, b->R * 3 * inner);
    b->d_ln1 = gpt_take(kept, kept_at, b->r * C);
    b->d_atty = gpt_take(scratch, &used, b->R * inner);
    b->unused = gpt_take(scratch, &used, b->r * C);
    return at;
}

/* How many floats of scratch the layers need, for as many sequences as are set: a block's, and four rows for norms. */
static inline size_t gpt_scratch_floats(const gpt_split *s)
{
    size_t R = s->B * s->T, inner = s->heads * s->D;
    return R * (s->wide + 4 * s->C + 4 * inner) + s->T * s->C + 4 * s->C + 10 * 16;
}

static inline float *gpt_norm_scratch(const gpt_split *s)
{
    return s->scratch + gpt_scratch_floats(s) - 4 * s->C - 16;
}

/* Where a parameter's gradient is added; there is no place for any in a forward pass. */
static inline float *gpt_gradient(const dtrain_layer_context *c, int which)
{
    return c->grads != NULL ? c->grads[which] : NULL;
}

static inline dtrain_parallel_linear gpt_linear(const gpt_split *s, const dtrain_layer_context *c, int weight,
                                                size_t inputs, size_t outputs)
{
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = s->group;
    layer.rows = s->B * s->T;
    layer.inputs = inputs;
    layer.outputs = outputs;
    layer.weight = c->params[weight];
    layer.sequence = s->sequence;
    layer.d_weight = gpt_gradient(c, weight);
    return layer;
}

/* The four linear layers of a block; with gradients where the context has them. */
static inline dtrain_parallel_linear gpt_block_linear(const gpt_split *s, const dtrain_layer_context *c, int which)
{
    int weight = which - BLOCK_FIRST;
    dtrain_parallel_linear layer = gpt_linear(s, c, weight, which == FCPW ? 4 * s->C : s->C,
                                              which == QKVW  ? 3 * s->C
                                              : which == FCW ? 4 * s->C
                                                             : s->C);
    layer.bias = c->params[weight + 1];
    layer.d_bias = gpt_gradient(c, weight + 1);
    layer.blocks = which == QKVW ? 3 : 1;
    layer.granule = which == QKVW || which == PROJW ? s->D : 1;
    return layer;
}

static inline dtrain_status gpt_block_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output,
                                            size_t *saved_bytes)
{
    gpt_block block;
    (void)input;
    (void)output;
    *saved_bytes = gpt_block_lay_out((const gpt_split *)user, &block, NULL, NULL) * sizeof(float);
    return DTRAIN_OK;
}

static inline dtrain_status gpt_block_forward(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    const float *const *p = (const float *const *)c->params;
    const float *x = (const float *)c->input.data;
    float *y = (float *)c->output.data;
    gpt_block b;
    gpt_block_lay_out(s, &b, (float *)c->saved, s->scratch);
    dtrain_attention attention = {s->B, s->T, s->heads, s->D, 1};
    dtrain_parallel_linear qkv = gpt_block_linear(s, c, QKVW), proj = gpt_block_linear(s, c, PROJW);
    dtrain_parallel_linear fc = gpt_block_linear(s, c, FCW), fcproj = gpt_block_linear(s, c, FCPW);
    nn_layernorm_forward(b.ln1, b.mean1, b.rstd1, x, p[0], p[1], b.r, s->C);
    dtrain_status status = dtrain_column_parallel_linear(&qkv, b.ln1, b.qkv);
    if (status == DTRAIN_OK)
        status = dtrain_attention_forward(&attention, b.qkv, b.att, b.atty);
    if (status == DTRAIN_OK)
        status = dtrain_row_parallel_linear(&proj, b.atty, b.mid);
    for (size_t i = 0; i < b.r * s->C; i++)
        b.mid[i] += x[i];
    nn_layernorm_forward(b.ln2, b.mean2, b.rstd2, b.mid, p[LN2W - BLOCK_FIRST], p[LN2B - BLOCK_FIRST], b.r, s->C);
    if (status == DTRAIN_OK)
        status = dtrain_column_parallel_linear(&fc, b.ln2, b.wide);
    nn_gelu_forward(b.gelu, b.wide, b.R * s->wide);
    if (status == DTRAIN_OK)
        status = dtrain_row_parallel_linear(&fcproj, b.gelu, y);
    for (size_t i = 0; i < b.r * s->C; i++)
        y[i] += b.mid[i];
    return status;
}

/* Adds the gradient of a norm's input to dx, and with dw those of its parameters; each rank has a part of their sum
 * where the rows are split. */
static inline dtrain_status gpt_norm_backward(const gpt_split *s, float *dx, float *dw, float *db, const float *dy,
                                              const float *x, const float *w, const float *mean, const float *rstd,
                                              size_t rows)
{
    float *scratch = gpt_norm_scratch(s), *part_w = scratch + 2 * s->C, *part_b = scratch + 3 * s->C;
    int whole = dw != NULL && !s->sequence;
    memset(part_w, 0, 2 * s->C * sizeof(float));
    nn_layernorm_backward(dx, whole ? dw : part_w, whole ? db : part_b, dy, x, w, mean, rstd, rows, s->C, scratch);
    if (dw == NULL || whole)
        return DTRAIN_OK;
    dtrain_status status = dtrain_sequence_parallel_sum(s->group, part_w, dw, s->C);
    return status == DTRAIN_OK ? dtrain_sequence_parallel_sum(s->group, part_b, db, s->C) : status;
}

/* The input's gradient, and unless they are deferred those of the parameters. */
static inline dtrain_status gpt_block_backward(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    const float *dy = (const float *)c->d_output.data, *x = (const float *)c->input.data;
    float *dx = (float *)c->d_input.data, *const *g = c->grads;
    const float *const *p = (const float *const *)c->params;
    int now = !s->deferred;
    gpt_block b;
    gpt_block_lay_out(s, &b, (float *)c->saved, s->scratch);
    dtrain_attention attention = {s->B, s->T, s->heads, s->D, 1};
    dtrain_parallel_linear linear[4] = {gpt_block_linear(s, c, QKVW), gpt_block_linear(s, c, PROJW),
                                        gpt_block_linear(s, c, FCW), gpt_block_linear(s, c, FCPW)};
    for (int i = 0; i < 4 && !now; i++)
        linear[i].d_weight = linear[i].d_bias = NULL;
    dtrain_status status = dtrain_row_parallel_linear_backward(&linear[3], b.gelu, dy, b.d_wide);
    nn_gelu_backward(b.d_wide, b.d_wide, b.wide, b.R * s->wide);
    if (status == DTRAIN_OK)
        status = dtrain_column_parallel_linear_backward(&linear[2], b.ln2, b.d_wide, b.d_ln2);
    memcpy(b.d_mid, dy, b.r * s->C * sizeof(float));
    if (status == DTRAIN_OK)
        status = gpt_norm_backward(s, b.d_mid, now ? g[LN2W - BLOCK_FIRST] : NULL, g[LN2B - BLOCK_FIRST], b.d_ln2,
                                   b.mid, p[LN2W - BLOCK_FIRST], b.mean2, b.rstd2, b.r);
    if (status == DTRAIN_OK)
        status = dtrain_row_parallel_linear_backward(&linear[1], b.atty, b.d_mid, b.d_atty);
    if (status == DTRAIN_OK)
        status = dtrain_attention_backward(&attention, b.qkv, b.att, b.d_atty, b.d_qkv);
    if (status == DTRAIN_OK)
        status = dtrain_column_parallel_linear_backward(&linear[0], b.ln1, b.d_qkv, b.d_ln1);
    memcpy(dx, b.d_mid, b.r * s->C * sizeof(float));
    return status == DTRAIN_OK
               ? gpt_norm_backward(s, dx, now ? g[0] : NULL, g[1], b.d_ln1, x, p[0], b.mean1, b.rstd1, b.r)
               : status;
}

/* The deferred gradients of parameters. */
static inline dtrain_status gpt_block_weights(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    const float *dy = (const float *)c->d_output.data, *x = (const float *)c->input.data;
    const float *const *p = (const float *const *)c->params;
    float *const *g = c->grads;
    gpt_block b;
    gpt_block_lay_out(s, &b, (float *)c->saved, s->scratch);
    memset(b.unused, 0, b.r * s->C * sizeof(float)); /* of norms only the parameters' gradients are new */
    dtrain_parallel_linear linear[4] = {gpt_block_linear(s, c, QKVW), gpt_block_linear(s, c, PROJW),
                                        gpt_block_linear(s, c, FCW), gpt_block_linear(s, c, FCPW)};
    dtrain_status status = dtrain_row_parallel_linear_backward(&linear[3], b.gelu, dy, NULL);
    if (status == DTRAIN_OK)
        status = dtrain_column_parallel_linear_backward(&linear[2], b.ln2, b.d_wide, NULL);
    if (status == DTRAIN_OK)
        status = gpt_norm_backward(s, b.unused, g[LN2W - BLOCK_FIRST], g[LN2B - BLOCK_FIRST], b.d_ln2, b.mid,
                                   p[LN2W - BLOCK_FIRST], b.mean2, b.rstd2, b.r);
    if (status == DTRAIN_OK)
        status = dtrain_row_parallel_linear_backward(&linear[1], b.atty, b.d_mid, NULL);
    if (status == DTRAIN_OK)
        status = dtrain_column_parallel_linear_backward(&linear[0], b.ln1, b.d_qkv, NULL);
    return status == DTRAIN_OK ? gpt_norm_backward(s, b.unused, g[0], g[1], b.d_ln1, x, p[0], b.mean1, b.rstd1, b.r)
                               : status;
}

static inline dtrain_status gpt_embedding_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output,
                                                size_t *saved_bytes)
{
    const gpt_split *s = (const gpt_split *)user;
    (void)input;
    output->dtype = DTRAIN_F32;
    output->ndim = 2;
    output->shape[0] = gpt_rows(s, NULL);
    output->shape[1] = s->C;
    *saved_bytes = 0;
    return DTRAIN_OK;
}

static inline dtrain_parallel_vocab gpt_vocab(const gpt_split *s, const dtrain_layer_context *c)
{
    dtrain_parallel_vocab layer;
    memset(&layer, 0, sizeof layer);
    layer.group = s->group;
    layer.rows = s->B * s->T;
    layer.vocab = s->V;
    layer.width = s->C;
    layer.table = c->params[0];
    layer.d_table = gpt_gradient(c, 0);
    layer.sequence = s->sequence;
    return layer;
}

/* tokens[B, T] to x[r, C]: the token's row and the position's. */
static inline dtrain_status gpt_embedding_layer_forward(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    dtrain_parallel_vocab vocab = gpt_vocab(s, c);
    float *x = (float *)c->output.data;
    size_t begin, rows = gpt_rows(s, &begin);
    dtrain_status status = dtrain_vocab_parallel_embedding(&vocab, (const int32_t *)c->input.data, x);
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < s->C; k++)
            x[i * s->C + k] += c->params[1][(begin + i) % s->T * s->C + k];
    return status;
}

static inline dtrain_status gpt_embedding_layer_weights(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    dtrain_parallel_vocab vocab = gpt_vocab(s, c);
    const float *dx = (const float *)c->d_output.data;
    float *d_positions = s->sequence ? s->scratch : c->grads[1];
    size_t begin, rows = gpt_rows(s, &begin);
    dtrain_status status = dtrain_vocab_parallel_embedding_backward(&vocab, (const int32_t *)c->input.data, dx);
    if (s->sequence)
        memset(d_positions, 0, s->T * s->C * sizeof(float));
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < s->C; k++)
            d_positions[(begin + i) % s->T * s->C + k] += dx[i * s->C + k];
    return status == DTRAIN_OK && s->sequence
               ? dtrain_sequence_parallel_sum(s->group, d_positions, c->grads[1], s->T * s->C)
               : status;
}

/* A head's part of what is saved. */
typedef struct gpt_head {
    float *lnf, *mean, *rstd, *d_lnf;
    size_t r;
} gpt_head;

static inline size_t gpt_head_lay_out(const gpt_split *s, gpt_head *h, float *saved)
{
    size_t at = 0;
    h->r = gpt_rows(s, NULL);
    h->lnf = gpt_take(saved, &at, h->r * s->C);
    h->mean = gpt_take(saved, &at, h->r);
    h->rstd = gpt_take(saved, &at, h->r);
    h->d_lnf = gpt_take(saved, &at, h->r * s->C);
    return at;
}

static inline dtrain_status gpt_head_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output,
                                           size_t *saved_bytes)
{
    const gpt_split *s = (const gpt_split *)user;
    gpt_head head;
    (void)input;
    output->shape[0] = s->B * s->T;
    output->shape[1] = s->group != NULL ? dtrain_shard(s->group, s->V, dtrain_comm_rank(s->group), NULL) : s->V;
    *saved_bytes = gpt_head_lay_out(s, &head, NULL) * sizeof(float);
    return DTRAIN_OK;
}

/* x[r, C] to the loss; the output is the gradient of this rank's part of the logits. Parameters: norm, then weights. */
static inline dtrain_status gpt_head_layer_forward(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    gpt_batch *batch = (gpt_batch *)c->batch;
    float *logits = (float *)c->output.data;
    dtrain_parallel_linear head = gpt_linear(s, c, 2, s->C, s->V);
    gpt_head h;
    gpt_head_lay_out(s, &h, (float *)c->saved);
    nn_layernorm_forward(h.lnf, h.mean, h.rstd, (const float *)c->input.data, c->params[0], c->params[1], h.r, s->C);
    dtrain_status status = dtrain_column_parallel_linear(&head, h.lnf, logits);
    return status == DTRAIN_OK
               ? dtrain_vocab_parallel_cross_entropy(s->group, logits, batch->targets, s->B * s->T, s->V, &batch->loss)
               : status;
}

static inline dtrain_status gpt_head_layer_backward(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    dtrain_parallel_linear head = gpt_linear(s, c, 2, s->C, s->V);
    float *dx = (float *)c->d_input.data;
    gpt_head h;
    gpt_head_lay_out(s, &h, (float *)c->saved);
    if (s->deferred)
        head.d_weight = NULL;
    dtrain_status status = dtrain_column_parallel_linear_backward(&head, h.lnf, (const float *)c->output.data, h.d_lnf);
    memset(dx, 0, h.r * s->C * sizeof(float));
    return status == DTRAIN_OK ? gpt_norm_backward(s, dx, s->deferred ? NULL : c->grads[0], c->grads[1], h.d_lnf,
                                                   (const float *)c->input.data, c->params[0], h.mean, h.rstd, h.r)
                               : status;
}

static inline dtrain_status gpt_head_layer_weights(void *user, const dtrain_layer_context *c)
{
    const gpt_split *s = (const gpt_split *)user;
    dtrain_parallel_linear head = gpt_linear(s, c, 2, s->C, s->V);
    float *unused = s->scratch;
    gpt_head h;
    gpt_head_lay_out(s, &h, (float *)c->saved);
    dtrain_status status = dtrain_column_parallel_linear_backward(&head, h.lnf, (const float *)c->output.data, NULL);
    memset(unused, 0, h.r * s->C * sizeof(float));
    return status == DTRAIN_OK ? gpt_norm_backward(s, unused, c->grads[0], c->grads[1], h.d_lnf,
                                                   (const float *)c->input.data, c->params[0], h.mean, h.rstd, h.r)
                               : status;
}

#endif
