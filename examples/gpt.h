/* The model that train_gpt trains, a decoder-only transformer: its parameters, activations and layers,
 * forward and backward. What is gathered, reduced and stepped when is the program's. Include dtrain.h and
 * gpt_flags.h first. */
#ifndef GPT_H
#define GPT_H

#include "nn.h"

#define GPT_VOCAB 256 /* of bytes */

enum {
    WTE,
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    PROJW,
    PROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPW,
    FCPB,
    LNFW,
    LNFB,
    HEADW,
    GPT_PARAMS
};

/* One model and the activations of one micro-batch. L layers, rows BT = B * T, V tokens, P >= T positions. */
typedef struct gpt {
    size_t L, H, C, T, B, V, P, count;
    int tied;   /* the output layer is the embedding, and HEADW is not there */
    int listed; /* parameters of the table */
    dtrain_param table[GPT_PARAMS];
    dtrain_fsdp *fsdp;
    dtrain_strategy strategy;
    struct gpt_aggregate *aggregate; /* NULL: FSDP itself reduces */
    dtrain_comm *alone;              /* with local: the world of one that fsdp is over; else NULL */
    struct gpt_mesh *mesh;   /* the parts of a model that is split further; fsdp is the first's; NULL: none is */
    dtrain_local_sgd *local; /* this rank trains by itself and averages now and then; NULL: all train together */
    float *params[GPT_PARAMS], *grads[GPT_PARAMS]; /* of full size; a unit's are there while it is gathered */
    dtrain_tensor memory;
    float *x;                             /* [L + 1, BT, C] the residual stream, before each block and after the last */
    float *mid;                           /* [L, BT, C] after attention */
    float *ln1, *ln2, *lnf;               /* [L, BT, C], [L, BT, C], [BT, C] */
    float *mean1, *rstd1, *mean2, *rstd2; /* [L, BT] */
    float *meanf, *rstdf;                 /* [BT] */
    float *qkv, *att, *atty;              /* [L, BT, 3 C], [L, B, H, T, T], [L, BT, C] */
    float *fch, *fcg;                     /* [L, BT, 4 C] before and after GELU */
    float *logits;                        /* [BT, V], then their gradient */
    float *dx, *dbranch, *dwide, *scratch; /* [BT, C], [BT, C], [BT, 4 C], [T, T] and [2 C] */
} gpt;

static inline void gpt_param(gpt *model, int which, const char *name, int unit, int stacked, int no_decay, size_t a,
                             size_t b)
{
    dtrain_param *p = &model->table[which];
    size_t sizes[3], n = 0;
    memset(p, 0, sizeof *p);
    if (stacked)
        sizes[n++] = model->L;
    sizes[n++] = a;
    if (b > 0)
        sizes[n++] = b;
    memcpy(p->shape, sizes, n * sizeof sizes[0]);
    p->name = name;
    p->dtype = DTRAIN_F32;
    p->unit = unit;
    p->stacked = stacked;
    p->no_decay = no_decay;
    model->count += dtrain_param_elements(p);
}

/* Lists the parameters: unit 0 is the embedding, units 1 to L the layers, unit L + 1 the head. */
static inline void gpt_describe(gpt *model, const gpt_flags *f)
{
    size_t C = (size_t)f->width;
    int last = (int)f->layers + 1;
    memset(model, 0, sizeof *model);
    model->L = (size_t)f->layers;
    model->H = (size_t)f->heads;
    model->C = C;
    model->T = (size_t)f->context;
    model->B = (size_t)f->batch;
    model->V = (size_t)f->vocab;
    model->P = f->positions > 0 ? (size_t)f->positions : model->T;
    model->tied = f->tied;
    model->listed = f->tied ? HEADW : GPT_PARAMS;
    gpt_param(model, WTE, "wte", 0, 0, 0, model->V, C);
    gpt_param(model, WPE, "wpe", 0, 0, 0, model->P, C);
    model->table[WTE].tied = f->tied;
    gpt_param(model, LN1W, "ln1w", 1, 1, 1, C, 0);
    gpt_param(model, LN1B, "ln1b", 1, 1, 1, C, 0);
    gpt_param(model, QKVW, "qkvw", 1, 1, 0, 3 * C, C);
    gpt_param(model, QKVB, "qkvb", 1, 1, 1, 3 * C, 0);
    gpt_param(model, PROJW, "projw", 1, 1, 0, C, C);
    gpt_param(model, PROJB, "projb", 1, 1, 1, C, 0);
    gpt_param(model, LN2W, "ln2w", 1, 1, 1, C, 0);
    gpt_param(model, LN2B, "ln2b", 1, 1, 1, C, 0);
    gpt_param(model, FCW, "fcw", 1, 1, 0, 4 * C, C);
    gpt_param(model, FCB, "fcb", 1, 1, 1, 4 * C, 0);
    gpt_param(model, FCPW, "fcprojw", 1, 1, 0, C, 4 * C);
    gpt_param(model, FCPB, "fcprojb", 1, 1, 1, C, 0);
    gpt_param(model, LNFW, "lnfw", last, 0, 1, C, 0);
    gpt_param(model, LNFB, "lnfb", last, 0, 1, C, 0);
    if (!f->tied)
        gpt_param(model, HEADW, "headw", last, 0, 0, model->V, C);
}

/* Element k of a parameter at first: norm weights are 1, biases 0, the rest normal with deviation 0.02, smaller where a
 * branch joins the residual. */
static inline float gpt_first_value(const gpt *model, int which, uint64_t seed, size_t k)
{
    int weight = which == LN1W || which == LN2W || which == LNFW;
    float deviation = which == PROJW || which == FCPW ? 0.02f / sqrtf(2.0f * (float)model->L) : 0.02f;
    if (model->table[which].no_decay)
        return weight ? 1.0f : 0.0f;
    return deviation * dtrain_random_normal(seed + 1000 * (uint64_t)which, k);
}

/* Writes the first values of one unit's part of a parameter. */
static inline void gpt_first_values(gpt *model, int which, int unit, uint64_t seed)
{
    const dtrain_param *param = &model->table[which];
    size_t layers = param->stacked ? model->L : 1, n = dtrain_param_elements(param) / layers;
    if (unit < param->unit || (size_t)(unit - param->unit) >= layers)
        return;
    for (size_t k = (size_t)(unit - param->unit) * n, end = k + n; k < end; k++)
        model->params[which][k] = gpt_first_value(model, which, seed, k);
}

static inline float *gpt_take(float *memory, size_t *at, size_t count)
{
    float *taken = memory != NULL ? memory + *at : NULL;
    *at += (count + 15) / 16 * 16;
    return taken;
}

/* Lays the activations out in memory and returns how many floats they take; NULL memory only measures. */
static inline size_t gpt_lay_out(gpt *m, float *memory)
{
    size_t L = m->L, C = m->C, T = m->T, BT = m->B * T, at = 0;
    m->x = gpt_take(memory, &at, (L + 1) * BT * C);
    m->mid = gpt_take(memory, &at, L * BT * C);
    m->ln1 = gpt_take(memory, &at, L * BT * C);
    m->ln2 = gpt_take(memory, &at, L * BT * C);
    m->lnf = gpt_take(memory, &at, BT * C);
    m->mean1 = gpt_take(memory, &at, L * BT);
    m->rstd1 = gpt_take(memory, &at, L * BT);
    m->mean2 = gpt_take(memory, &at, L * BT);
    m->rstd2 = gpt_take(memory, &at, L * BT);
    m->meanf = gpt_take(memory, &at, BT);
    m->rstdf = gpt_take(memory, &at, BT);
    m->qkv = gpt_take(memory, &at, L * BT * 3 * C);
    m->att = gpt_take(memory, &at, L * m->B * m->H * T * T);
    m->atty = gpt_take(memory, &at, L * BT * C);
    m->fch = gpt_take(memory, &at, L * BT * 4 * C);
    m->fcg = gpt_take(memory, &at, L * BT * 4 * C);
    m->logits = gpt_take(memory, &at, BT * m->V);
    m->dx = gpt_take(memory, &at, BT * C);
    m->dbranch = gpt_take(memory, &at, BT * C);
    m->dwide = gpt_take(memory, &at, BT * 4 * C);
    m->scratch = gpt_take(memory, &at, T * T + 2 * C);
    return at;
}

/* Layer l's part of a stacked parameter, or of its gradient. */
static inline float *gpt_weight(const gpt *m, int which, size_t l)
{
    size_t n = dtrain_param_elements(&m->table[which]);
    return m->params[which] + (m->table[which].stacked ? l * (n / m->L) : 0);
}

static inline float *gpt_grad(const gpt *m, int which, size_t l)
{
    size_t n = dtrain_param_elements(&m->table[which]);
    return m->grads[which] + (m->table[which].stacked ? l * (n / m->L) : 0);
}

static inline void gpt_layer_forward(gpt *m, size_t l, size_t B)
{
    size_t C = m->C, T = m->T, BT = B * T, at = l * m->B * T;
    float *x = m->x + at * C, *next = x + m->B * T * C, *mid = m->mid + at * C, *wide = m->fcg + at * 4 * C;
    nn_layernorm_forward(m->ln1 + at * C, m->mean1 + at, m->rstd1 + at, x, gpt_weight(m, LN1W, l),
                         gpt_weight(m, LN1B, l), BT, C);
    nn_linear_forward(m->qkv + at * 3 * C, m->ln1 + at * C, gpt_weight(m, QKVW, l), gpt_weight(m, QKVB, l), BT, C,
                      3 * C);
    nn_attention_forward(m->atty + at * C, m->att + l * m->B * m->H * T * T, m->qkv + at * 3 * C, B, T, C, m->H);
    nn_linear_forward(mid, m->atty + at * C, gpt_weight(m, PROJW, l), gpt_weight(m, PROJB, l), BT, C, C);
    for (size_t i = 0; i < BT * C; i++)
        mid[i] += x[i];
    nn_layernorm_forward(m->ln2 + at * C, m->mean2 + at, m->rstd2 + at, mid, gpt_weight(m, LN2W, l),
                         gpt_weight(m, LN2B, l), BT, C);
    nn_linear_forward(m->fch + at * 4 * C, m->ln2 + at * C, gpt_weight(m, FCW, l), gpt_weight(m, FCB, l), BT, C, 4 * C);
    nn_gelu_forward(wide, m->fch + at * 4 * C, BT * 4 * C);
    nn_linear_forward(next, wide, gpt_weight(m, FCPW, l), gpt_weight(m, FCPB, l), BT, 4 * C, C);
    for (size_t i = 0; i < BT * C; i++)
        next[i] += mid[i];
}

/* dx holds the gradient of the layer's output and becomes that of its input. */
static inline void gpt_layer_backward(gpt *m, size_t l)
{
    size_t C = m->C, T = m->T, BT = m->B * T, at = l * BT;
    float *dx = m->dx, *db = m->dbranch, *dw = m->dwide, *norm = m->scratch + T * T;
    nn_linear_backward(dw, gpt_grad(m, FCPW, l), gpt_grad(m, FCPB, l), dx, m->fcg + at * 4 * C, gpt_weight(m, FCPW, l),
                       BT, 4 * C, C);
    nn_gelu_backward(dw, dw, m->fch + at * 4 * C, BT * 4 * C);
    nn_linear_backward(db, gpt_grad(m, FCW, l), gpt_grad(m, FCB, l), dw, m->ln2 + at * C, gpt_weight(m, FCW, l), BT, C,
                       4 * C);
    nn_layernorm_backward(dx, gpt_grad(m, LN2W, l), gpt_grad(m, LN2B, l), db, m->mid + at * C, gpt_weight(m, LN2W, l),
                          m->mean2 + at, m->rstd2 + at, BT, C, norm);
    nn_linear_backward(db, gpt_grad(m, PROJW, l), gpt_grad(m, PROJB, l), dx, m->atty + at * C, gpt_weight(m, PROJW, l),
                       BT, C, C);
    nn_attention_backward(dw, db, m->att + l * m->B * m->H * T * T, m->qkv + at * 3 * C, m->B, T, C, m->H, m->scratch);
    nn_linear_backward(db, gpt_grad(m, QKVW, l), gpt_grad(m, QKVB, l), dw, m->ln1 + at * C, gpt_weight(m, QKVW, l), BT,
                       C, 3 * C);
    nn_layernorm_backward(dx, gpt_grad(m, LN1W, l), gpt_grad(m, LN1B, l), db, m->x + at * C, gpt_weight(m, LN1W, l),
                          m->mean1 + at, m->rstd1 + at, BT, C, norm);
}

static inline void gpt_head_forward(gpt *m, size_t B)
{
    size_t C = m->C, BT = B * m->T;
    nn_layernorm_forward(m->lnf, m->meanf, m->rstdf, m->x + m->L * m->B * m->T * C, gpt_weight(m, LNFW, 0),
                         gpt_weight(m, LNFB, 0), BT, C);
    nn_linear_forward(m->logits, m->lnf, gpt_weight(m, m->tied ? WTE : HEADW, 0), NULL, BT, C, m->V);
}

/* logits hold their gradient. */
static inline void gpt_head_backward(gpt *m)
{
    size_t C = m->C, BT = m->B * m->T;
    int head = m->tied ? WTE : HEADW;
    nn_linear_backward(m->dbranch, gpt_grad(m, head, 0), NULL, m->logits, m->lnf, gpt_weight(m, head, 0), BT, C, m->V);
    memset(m->dx, 0, BT * C * sizeof(float));
    nn_layernorm_backward(m->dx, gpt_grad(m, LNFW, 0), gpt_grad(m, LNFB, 0), m->dbranch, m->x + m->L * BT * C,
                          gpt_weight(m, LNFW, 0), m->meanf, m->rstdf, BT, C, m->scratch + m->T * m->T);
}

#endif
