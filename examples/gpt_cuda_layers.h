/* The layers of train_gpt's model on a GPU, forward and backward by hand: the sums of nn.h, in other orders. Include
 * gpt.h and gpu_kernels.h first.
 *
 * Functions add to gradients of weights. cuBLAS adds those of products. Those of biases, norms and embeddings take two
 * passes: the first sums chunks of GPT_CUDA_CHUNK rows, the second adds the chunks in order. */
#ifndef GPT_CUDA_LAYERS_H
#define GPT_CUDA_LAYERS_H

#define GPT_CUDA_CHUNK 32

/* One rank's model: shapes and activations are the CPU example's, the latter in memory of the GPU. */
typedef struct gpt_cuda {
    gpt m; /* its params and grads are not used */
    gpu g;
    float **weights, **grads; /* [L + 2][GPT_PARAMS]: where each unit's part of a parameter lies */
    float *memory;            /* of activations */
    float *datt;              /* [B, H, T, T] */
    float *parts;             /* [chunks, 4 C] sums of chunks */
    float *row_losses;        /* [BT] */
} gpt_cuda;

/* What a micro-batch is computed from, in memory of the GPU; B <= the model's. */
typedef struct gpt_cuda_batch {
    const int32_t *tokens, *targets; /* [BT] */
    const int32_t *order, *first;    /* [BT] and [V + 1]: rows of token v are order[first[v]] to order[first[v + 1]] */
    size_t B;
} gpt_cuda_batch;

static float *gpt_cuda_weight(const gpt_cuda *c, size_t unit, int which)
{
    return c->weights[unit * GPT_PARAMS + (size_t)which];
}

static float *gpt_cuda_grad(const gpt_cuda *c, size_t unit, int which)
{
    return c->grads[unit * GPT_PARAMS + (size_t)which];
}

/* ---- kernels ---- */

GPU_KERNEL gpt_embed(float *out, const int32_t *tokens, const float *wte, const float *wpe, size_t BT, size_t T,
                     size_t C)
{
    size_t n = BT * C;
    GPU_EACH(i, n)
    {
        size_t row = i / C, c = i % C;
        out[i] = wte[(size_t)tokens[row] * C + c] + wpe[row % T * C + c];
    }
}

GPU_KERNEL gpt_embed_tokens_backward(float *dwte, const float *dout, const int32_t *order, const int32_t *first,
                                     size_t V, size_t C)
{
    size_t n = V * C;
    GPU_EACH(i, n)
    {
        size_t v = i / C, c = i % C;
        float sum = 0;
        for (int32_t k = first[v]; k < first[v + 1]; k++)
            sum += dout[(size_t)order[k] * C + c];
        dwte[i] += sum;
    }
}

GPU_KERNEL gpt_embed_positions_backward(float *dwpe, const float *dout, size_t B, size_t T, size_t C)
{
    size_t n = T * C;
    GPU_EACH(i, n)
    {
        float sum = 0;
        for (size_t b = 0; b < B; b++)
            sum += dout[b * T * C + i];
        dwpe[i] += sum;
    }
}

/* out[BT, OC] += bias[OC] + residual[BT, OC], which may be NULL */
GPU_KERNEL gpt_add_bias(float *out, const float *bias, const float *residual, size_t n, size_t OC)
{
    GPU_EACH(i, n)
    out[i] += bias[i % OC] + (residual != NULL ? residual[i] : 0.0f);
}

GPU_KERNEL gpt_gelu(float *out, const float *in, size_t n)
{
    GPU_EACH(i, n)
    {
        float x = in[i];
        out[i] = 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    }
}

/* d[n] *= gelu'(in[n]) */
GPU_KERNEL gpt_gelu_backward(float *d, const float *in, size_t n)
{
    GPU_EACH(i, n)
    {
        float x = in[i], t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
        float slope = 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x);
        d[i] *= 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope;
    }
}

GPU_KERNEL gpt_norm(float *out, float *mean, float *rstd, const float *in, const float *w, const float *b, size_t rows,
                    size_t C)
{
    GPU_ROWS(row, rows)
    {
        const float *x = in + row * C;
        float m, r;
        GPU_ROW_SUM(m, i, C, x[i]);
        m /= (float)C;
        GPU_ROW_SUM(r, i, C, (x[i] - m) * (x[i] - m));
        r = 1.0f / sqrtf(r / (float)C + 1e-5f);
        GPU_COLUMNS(i, C)
        out[row * C + i] = (x[i] - m) * r * w[i] + b[i];
        mean[row] = m;
        rstd[row] = r;
    }
}

/* dx[BT, C] += the gradient of the norm's input; with `first` it is written. */
GPU_KERNEL gpt_norm_backward_rows(float *dx, const float *dout, const float *in, const float *w, const float *mean,
                                  const float *rstd, int first, size_t rows, size_t C)
{
    GPU_ROWS(row, rows)
    {
        const float *x = in + row * C, *dy = dout + row * C;
        float m = mean[row], r = rstd[row], a, b;
        GPU_ROW_SUM(a, i, C, dy[i] * w[i]);
        GPU_ROW_SUM(b, i, C, dy[i] * w[i] * ((x[i] - m) * r));
        a /= (float)C;
        b /= (float)C;
        GPU_COLUMNS(i, C)
        {
            float d = (dy[i] * w[i] - a - (x[i] - m) * r * b) * r;
            dx[row * C + i] = first ? d : dx[row * C + i] + d;
        }
    }
}

/* parts[chunks, 2 C]: sums over a chunk's rows, of the weights' gradients and then of the biases' */
GPU_KERNEL gpt_norm_parts(float *parts, const float *dout, const float *in, const float *mean, const float *rstd,
                          size_t rows, size_t C)
{
    size_t n = (rows + GPT_CUDA_CHUNK - 1) / GPT_CUDA_CHUNK * C;
    GPU_EACH(i, n)
    {
        size_t chunk = i / C, c = i % C, begin = chunk * GPT_CUDA_CHUNK;
        size_t end = begin + GPT_CUDA_CHUNK < rows ? begin + GPT_CUDA_CHUNK : rows;
        float dw = 0, db = 0;
        for (size_t row = begin; row < end; row++) {
            float dy = dout[row * C + c];
            dw += dy * ((in[row * C + c] - mean[row]) * rstd[row]);
            db += dy;
        }
        parts[chunk * 2 * C + c] = dw;
        parts[chunk * 2 * C + C + c] = db;
    }
}

GPU_KERNEL gpt_column_parts(float *parts, const float *x, size_t rows, size_t C)
{
    size_t n = (rows + GPT_CUDA_CHUNK - 1) / GPT_CUDA_CHUNK * C;
    GPU_EACH(i, n)
    {
        size_t begin = i / C * GPT_CUDA_CHUNK, end = begin + GPT_CUDA_CHUNK < rows ? begin + GPT_CUDA_CHUNK : rows;
        float sum = 0;
        for (size_t row = begin; row < end; row++)
            sum += x[row * C + i % C];
        parts[i] = sum;
    }
}

/* out[n] += parts[chunks, stride], of each row the first n */
GPU_KERNEL gpt_column_totals(float *out, const float *parts, size_t chunks, size_t stride, size_t n)
{
    GPU_EACH(i, n)
    {
        float sum = 0;
        for (size_t k = 0; k < chunks; k++)
            sum += parts[k * stride + i];
        out[i] += sum;
    }
}

/* Turns scores[rows, T], of position row % T each, into probabilities of the positions up to it, and 0 after it. */
GPU_KERNEL gpt_softmax(float *scores, size_t rows, size_t T)
{
    GPU_ROWS(row, rows)
    {
        float *s = scores + row * T, max, sum;
        size_t n = row % T + 1;
        GPU_ROW_MAX(max, i, n, s[i]);
        GPU_COLUMNS(i, T)
        s[i] = i < n ? expf(s[i] - max) : 0.0f;
        GPU_ROW_SUM(sum, i, n, s[i]);
        GPU_COLUMNS(i, n)
        s[i] /= sum;
    }
}

/* d[rows, T]: from gradients of probabilities att to those of scores */
GPU_KERNEL gpt_softmax_backward(float *d, const float *att, size_t rows, size_t T)
{
    GPU_ROWS(row, rows)
    {
        const float *a = att + row * T;
        float *ds = d + row * T, mean;
        size_t n = row % T + 1;
        GPU_ROW_SUM(mean, i, n, a[i] * ds[i]);
        GPU_COLUMNS(i, T)
        ds[i] = i < n ? a[i] * (ds[i] - mean) : 0.0f;
    }
}

/* Turns logits[rows, V] into their gradient, and writes -log p(target) of each row. */
GPU_KERNEL gpt_cross_entropy(float *losses, float *logits, const int32_t *targets, size_t rows, size_t V)
{
    GPU_ROWS(row, rows)
    {
        float *p = logits + row * V, max, sum, target = p[targets[row]];
        size_t hit = (size_t)targets[row];
        GPU_SYNC_LANES(); /* all have read it, before its lane writes */
        GPU_ROW_MAX(max, i, V, p[i]);
        GPU_COLUMNS(i, V)
        p[i] = expf(p[i] - max);
        GPU_ROW_SUM(sum, i, V, p[i]);
        GPU_COLUMNS(i, V)
        p[i] = p[i] / sum - (i == hit ? 1.0f : 0.0f);
        losses[row] = logf(sum) + max - target;
    }
}

/* The sum of a micro-batch's losses, to one place. */
GPU_KERNEL gpt_loss(double *loss, const float *losses, size_t n)
{
    GPU_ROWS(row, 1)
    {
        double sum;
        GPU_ROW_SUM_F64(sum, i, n, (double)losses[i]);
        loss[row] = sum;
    }
}

/* ---- layers ---- */

/* Adds the sums over x[rows, n] to out[n]. */
static void gpt_cuda_add_columns(gpt_cuda *c, float *out, const float *x, size_t rows, size_t n)
{
    size_t chunks = (rows + GPT_CUDA_CHUNK - 1) / GPT_CUDA_CHUNK;
    GPU_EACH_LAUNCH(&c->g, chunks * n, gpt_column_parts, c->parts, x, rows, n);
    GPU_EACH_LAUNCH(&c->g, n, gpt_column_totals, out, c->parts, chunks, n, n);
}

/* out[BT, OC] = in[BT, IC] x w[OC, IC]^T + bias + residual; both may be NULL */
static void gpt_cuda_linear(gpt_cuda *c, float *out, const float *in, const float *w, const float *bias,
                            const float *residual, size_t BT, size_t IC, size_t OC)
{
    gpu_product(&c->g, BT, OC, IC, 1, gpu_rows(in, IC, 0), gpu_turned(w, IC, 0), 0, out, OC, 0, 1);
    if (bias != NULL)
        GPU_EACH_LAUNCH(&c->g, BT * OC, gpt_add_bias, out, bias, residual, BT * OC, OC);
}

/* din[BT, IC] = dout x w;  dw += dout^T x in;  db += sums of dout's rows; db may be NULL */
static void gpt_cuda_linear_backward(gpt_cuda *c, float *din, float *dw, float *db, const float *dout, const float *in,
                                     const float *w, size_t BT, size_t IC, size_t OC)
{
    gpu_product(&c->g, BT, IC, OC, 1, gpu_rows(dout, OC, 0), gpu_rows(w, IC, 0), 0, din, IC, 0, 1);
    gpu_product(&c->g, OC, IC, BT, 1, gpu_turned(dout, OC, 0), gpu_rows(in, IC, 0), 1, dw, IC, 0, 1);
    if (db != NULL)
        gpt_cuda_add_columns(c, db, dout, BT, OC);
}

static void gpt_cuda_norm_backward(gpt_cuda *c, float *dx, float *dw, float *db, const float *dout, const float *in,
                                   const float *w, const float *mean, const float *rstd, int first, size_t BT)
{
    size_t C = c->m.C, chunks = (BT + GPT_CUDA_CHUNK - 1) / GPT_CUDA_CHUNK;
    GPU_EACH_LAUNCH(&c->g, chunks * C, gpt_norm_parts, c->parts, dout, in, mean, rstd, BT, C);
    GPU_EACH_LAUNCH(&c->g, C, gpt_column_totals, dw, c->parts, chunks, 2 * C, C);
    GPU_EACH_LAUNCH(&c->g, C, gpt_column_totals, db, c->parts + C, chunks, 2 * C, C);
    GPU_ROWS_LAUNCH(&c->g, BT, gpt_norm_backward_rows, dx, dout, in, w, mean, rstd, first, BT, C);
}

/* One product for all sequences a head. */
static void gpt_cuda_attention(gpt_cuda *c, float *out, float *att, const float *qkv, size_t B)
{
    size_t C = c->m.C, T = c->m.T, H = c->m.H, D = C / H, each = T * 3 * C, square = H * T * T;
    float scale = 1.0f / sqrtf((float)D);
    for (size_t h = 0; h < H; h++)
        gpu_product(&c->g, T, T, D, scale, gpu_rows(qkv + h * D, 3 * C, each), gpu_turned(qkv + C + h * D, 3 * C, each),
                    0, att + h * T * T, T, square, B);
    GPU_ROWS_LAUNCH(&c->g, B * H * T, gpt_softmax, att, B * H * T, T);
    for (size_t h = 0; h < H; h++)
        gpu_product(&c->g, T, D, T, 1, gpu_rows(att + h * T * T, T, square), gpu_rows(qkv + 2 * C + h * D, 3 * C, each),
                    0, out + h * D, C, T * C, B);
}

static void gpt_cuda_attention_backward(gpt_cuda *c, float *dqkv, const float *dout, const float *att, const float *qkv,
                                        size_t B)
{
    size_t C = c->m.C, T = c->m.T, H = c->m.H, D = C / H, each = T * 3 * C, square = H * T * T;
    float scale = 1.0f / sqrtf((float)D), *ds = c->datt;
    for (size_t h = 0; h < H; h++) {
        const float *dy = dout + h * D;
        gpu_product(&c->g, T, D, T, 1, gpu_turned(att + h * T * T, T, square), gpu_rows(dy, C, T * C), 0,
                    dqkv + 2 * C + h * D, 3 * C, each, B);
        gpu_product(&c->g, T, T, D, 1, gpu_rows(dy, C, T * C), gpu_turned(qkv + 2 * C + h * D, 3 * C, each), 0,
                    ds + h * T * T, T, square, B);
    }
    GPU_ROWS_LAUNCH(&c->g, B * H * T, gpt_softmax_backward, ds, att, B * H * T, T);
    for (size_t h = 0; h < H; h++) {
        gpu_product(&c->g, T, D, T, scale, gpu_rows(ds + h * T * T, T, square), gpu_rows(qkv + C + h * D, 3 * C, each),
                    0, dqkv + h * D, 3 * C, each, B);
        gpu_product(&c->g, T, D, T, scale, gpu_turned(ds + h * T * T, T, square), gpu_rows(qkv + h * D, 3 * C, each), 0,
                    dqkv + C + h * D, 3 * C, each, B);
    }
}

static void gpt_cuda_embedding_forward(gpt_cuda *c, const gpt_cuda_batch *batch)
{
    size_t T = c->m.T, C = c->m.C, BT = batch->B * T;
    GPU_EACH_LAUNCH(&c->g, BT * C, gpt_embed, c->m.x, batch->tokens, gpt_cuda_weight(c, 0, WTE),
                    gpt_cuda_weight(c, 0, WPE), BT, T, C);
}

static void gpt_cuda_embedding_backward(gpt_cuda *c, const gpt_cuda_batch *batch)
{
    size_t T = c->m.T, C = c->m.C, V = GPT_VOCAB;
    GPU_EACH_LAUNCH(&c->g, V * C, gpt_embed_tokens_backward, gpt_cuda_grad(c, 0, WTE), c->m.dx, batch->order,
                    batch->first, V, C);
    GPU_EACH_LAUNCH(&c->g, T * C, gpt_embed_positions_backward, gpt_cuda_grad(c, 0, WPE), c->m.dx, batch->B, T, C);
}

/* Layer l, of unit l + 1. */
static void gpt_cuda_layer_forward(gpt_cuda *c, size_t l, size_t B)
{
    gpt *m = &c->m;
    size_t C = m->C, BT = B * m->T, at = l * m->B * m->T, u = l + 1;
    float *x = m->x + at * C, *next = x + m->B * m->T * C, *mid = m->mid + at * C, *wide = m->fcg + at * 4 * C;
    GPU_ROWS_LAUNCH(&c->g, BT, gpt_norm, m->ln1 + at * C, m->mean1 + at, m->rstd1 + at, x, gpt_cuda_weight(c, u, LN1W),
                    gpt_cuda_weight(c, u, LN1B), BT, C);
    gpt_cuda_linear(c, m->qkv + at * 3 * C, m->ln1 + at * C, gpt_cuda_weight(c, u, QKVW), gpt_cuda_weight(c, u, QKVB),
                    NULL, BT, C, 3 * C);
    gpt_cuda_attention(c, m->atty + at * C, m->att + l * m->B * m->H * m->T * m->T, m->qkv + at * 3 * C, B);
    gpt_cuda_linear(c, mid, m->atty + at * C, gpt_cuda_weight(c, u, PROJW), gpt_cuda_weight(c, u, PROJB), x, BT, C, C);
    GPU_ROWS_LAUNCH(&c->g, BT, gpt_norm, m->ln2 + at * C, m->mean2 + at, m->rstd2 + at, mid,
                    gpt_cuda_weight(c, u, LN2W), gpt_cuda_weight(c, u, LN2B), BT, C);
    gpt_cuda_linear(c, m->fch + at * 4 * C, m->ln2 + at * C, gpt_cuda_weight(c, u, FCW), gpt_cuda_weight(c, u, FCB),
                    NULL, BT, C, 4 * C);
    GPU_EACH_LAUNCH(&c->g, BT * 4 * C, gpt_gelu, wide, m->fch + at * 4 * C, BT * 4 * C);
    gpt_cuda_linear(c, next, wide, gpt_cuda_weight(c, u, FCPW), gpt_cuda_weight(c, u, FCPB), mid, BT, 4 * C, C);
}

/* dx holds the gradient of the layer's output and becomes that of its input. */
static void gpt_cuda_layer_backward(gpt_cuda *c, size_t l)
{
    gpt *m = &c->m;
    size_t C = m->C, T = m->T, BT = m->B * T, at = l * BT, u = l + 1;
    float *dx = m->dx, *db = m->dbranch, *dw = m->dwide;
    gpt_cuda_linear_backward(c, dw, gpt_cuda_grad(c, u, FCPW), gpt_cuda_grad(c, u, FCPB), dx, m->fcg + at * 4 * C,
                             gpt_cuda_weight(c, u, FCPW), BT, 4 * C, C);
    GPU_EACH_LAUNCH(&c->g, BT * 4 * C, gpt_gelu_backward, dw, m->fch + at * 4 * C, BT * 4 * C);
    gpt_cuda_linear_backward(c, db, gpt_cuda_grad(c, u, FCW), gpt_cuda_grad(c, u, FCB), dw, m->ln2 + at * C,
                             gpt_cuda_weight(c, u, FCW), BT, C, 4 * C);
    gpt_cuda_norm_backward(c, dx, gpt_cuda_grad(c, u, LN2W), gpt_cuda_grad(c, u, LN2B), db, m->mid + at * C,
                           gpt_cuda_weight(c, u, LN2W), m->mean2 + at, m->rstd2 + at, 0, BT);
    gpt_cuda_linear_backward(c, db, gpt_cuda_grad(c, u, PROJW), gpt_cuda_grad(c, u, PROJB), dx, m->atty + at * C,
                             gpt_cuda_weight(c, u, PROJW), BT, C, C);
    gpt_cuda_attention_backward(c, dw, db, m->att + l * m->B * m->H * T * T, m->qkv + at * 3 * C, m->B);
    gpt_cuda_linear_backward(c, db, gpt_cuda_grad(c, u, QKVW), gpt_cuda_grad(c, u, QKVB), dw, m->ln1 + at * C,
                             gpt_cuda_weight(c, u, QKVW), BT, C, 3 * C);
    gpt_cuda_norm_backward(c, dx, gpt_cuda_grad(c, u, LN1W), gpt_cuda_grad(c, u, LN1B), db, m->x + at * C,
                           gpt_cuda_weight(c, u, LN1W), m->mean1 + at, m->rstd1 + at, 0, BT);
}

static void gpt_cuda_head_forward(gpt_cuda *c, size_t B)
{
    gpt *m = &c->m;
    size_t C = m->C, BT = B * m->T, u = m->L + 1;
    GPU_ROWS_LAUNCH(&c->g, BT, gpt_norm, m->lnf, m->meanf, m->rstdf, m->x + m->L * m->B * m->T * C,
                    gpt_cuda_weight(c, u, LNFW), gpt_cuda_weight(c, u, LNFB), BT, C);
    gpt_cuda_linear(c, m->logits, m->lnf, gpt_cuda_weight(c, u, HEADW), NULL, NULL, BT, C, GPT_VOCAB);
}

/* The sum of the losses over the batch's rows to *loss; logits become their gradient. */
static void gpt_cuda_loss(gpt_cuda *c, const gpt_cuda_batch *batch, double *loss)
{
    size_t BT = batch->B * c->m.T;
    GPU_ROWS_LAUNCH(&c->g, BT, gpt_cross_entropy, c->row_losses, c->m.logits, batch->targets, BT, GPT_VOCAB);
    GPU_ROWS_LAUNCH(&c->g, (size_t)1, gpt_loss, loss, c->row_losses, BT);
}

static void gpt_cuda_head_backward(gpt_cuda *c)
{
    gpt *m = &c->m;
    size_t C = m->C, BT = m->B * m->T, u = m->L + 1;
    gpt_cuda_linear_backward(c, m->dbranch, gpt_cuda_grad(c, u, HEADW), NULL, m->logits, m->lnf,
                             gpt_cuda_weight(c, u, HEADW), BT, C, GPT_VOCAB);
    gpt_cuda_norm_backward(c, m->dx, gpt_cuda_grad(c, u, LNFW), gpt_cuda_grad(c, u, LNFB), m->dbranch,
                           m->x + m->L * BT * C, gpt_cuda_weight(c, u, LNFW), m->meanf, m->rstdf, 1, BT);
}

#endif
