/* Neural-network layers that the examples share: float32, forward and backward by hand.
 *
 * B sequences, T positions, C channels, OC output channels, V vocabulary, H heads, D = C / H; BT = B * T rows.
 * Weights are [OC, C], row-major. Functions add to gradients of weights, and overwrite gradients of inputs unless a
 * comment says otherwise. All are sums over rows: divide them once, at the end of a step. Include dtrain.h first. */
#ifndef NN_H
#define NN_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#define NN_LANES 16
#define NN_ROWS 32   /* positions that attention takes at once, and leaves out what none of them sees */
#define NN_TERMS 256 /* terms that dtrain_sgemm adds at a time: sums that are cut at a multiple keep their bits */

typedef union nn_word {
    unsigned bits;
    float value;
} nn_word;

/* exp(x) within 2 ulp, as 2^n times a polynomial; |x| is cut to 87, NaN stays NaN. It has no branch, so that compilers
 * vectorise loops of it. For that the cut is a minimum of integers: one of floats would become a branch. */
static inline float nn_exp(float x)
{
    float bounded, n, r, p = 1.9875691500e-4f;
    nn_word word, rounded, power;
    unsigned size;
    word.value = x;
    size = word.bits & 0x7FFFFFFFu;
    size = size < 0x42AE0000u ? size : 0x42AE0000u; /* 87 */
    word.bits = (word.bits & 0x80000000u) | size;
    bounded = word.value + (x - x);
    rounded.value = bounded * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the last bits hold the nearest integer */
    rounded.bits -= 0x4B400000u;
    n = (float)(int)rounded.bits;
    r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    power.bits = (rounded.bits + 127u) << 23;
    return (p * r * r + r + 1.0f) * power.value;
}

static inline float nn_tanh(float x)
{
    return 1.0f - 2.0f / (nn_exp(2.0f * x) + 1.0f);
}

static inline float nn_lanes_sum(const float *lanes)
{
    float sum = 0;
    for (int k = 0; k < NN_LANES; k++)
        sum += lanes[k];
    return sum;
}

/* sum of x[n] */
static inline float nn_sum(const float *x, size_t n)
{
    float lanes[NN_LANES] = {0}, rest = 0;
    size_t i = 0;
    for (; n - i >= NN_LANES; i += NN_LANES)
        for (size_t k = 0; k < NN_LANES; k++)
            lanes[k] += x[i + k];
    for (size_t left = n % NN_LANES; left > 0; left--, i++)
        rest += x[i];
    return nn_lanes_sum(lanes) + rest;
}

/* sum of a[n] * b[n] */
static inline float nn_dot(const float *a, const float *b, size_t n)
{
    float lanes[NN_LANES] = {0}, rest = 0;
    size_t i = 0;
    for (; n - i >= NN_LANES; i += NN_LANES)
        for (size_t k = 0; k < NN_LANES; k++)
            lanes[k] += a[i + k] * b[i + k];
    for (size_t left = n % NN_LANES; left > 0; left--, i++)
        rest += a[i] * b[i];
    return nn_lanes_sum(lanes) + rest;
}

/* largest of x[n], n > 0 */
static inline float nn_max(const float *x, size_t n)
{
    float lanes[NN_LANES], max = x[0];
    size_t i = 0;
    for (size_t k = 0; k < NN_LANES; k++)
        lanes[k] = x[0];
    for (; n - i >= NN_LANES; i += NN_LANES)
        for (size_t k = 0; k < NN_LANES; k++)
            lanes[k] = x[i + k] > lanes[k] ? x[i + k] : lanes[k];
    for (size_t left = n % NN_LANES; left > 0; left--, i++)
        max = x[i] > max ? x[i] : max;
    for (size_t k = 0; k < NN_LANES; k++)
        max = lanes[k] > max ? lanes[k] : max;
    return max;
}

/* out[BT, OC] = in[BT, C] x w[OC, C]^T + b[OC]; b may be NULL */
static inline void nn_linear_forward(float *out, const float *in, const float *w, const float *b, size_t BT, size_t C,
                                     size_t OC)
{
    dtrain_sgemm(0, 1, BT, OC, C, 1, in, C, w, C, 0, out, OC);
    for (size_t t = 0; b != NULL && t < BT; t++)
        for (size_t o = 0; o < OC; o++)
            out[t * OC + o] += b[o];
}

/* din[BT, C] = dout[BT, OC] x w;  dw[OC, C] += dout^T x in;  db[OC] += sum of dout's rows; db may be NULL */
static inline void nn_linear_backward(float *din, float *dw, float *db, const float *dout, const float *in,
                                      const float *w, size_t BT, size_t C, size_t OC)
{
    dtrain_sgemm(0, 0, BT, C, OC, 1, dout, OC, w, C, 0, din, C);
    dtrain_sgemm(1, 0, OC, C, BT, 1, dout, OC, in, C, 1, dw, C);
    for (size_t t = 0; db != NULL && t < BT; t++)
        for (size_t o = 0; o < OC; o++)
            db[o] += dout[t * OC + o];
}

/* out[BT, C] = (in - mean) * rstd * w[C] + b[C]; mean[BT] and rstd[BT] are kept for backward */
static inline void nn_layernorm_forward(float *out, float *mean, float *rstd, const float *in, const float *w,
                                        const float *b, size_t BT, size_t C)
{
    for (size_t t = 0; t < BT; t++) {
        const float *x = in + t * C;
        float *y = out + t * C;
        float m = nn_sum(x, C) / (float)C, r;
        for (size_t c = 0; c < C; c++)
            y[c] = x[c] - m;
        r = 1.0f / sqrtf(nn_dot(y, y, C) / (float)C + 1e-5f);
        for (size_t c = 0; c < C; c++)
            y[c] = y[c] * r * w[c] + b[c];
        mean[t] = m;
        rstd[t] = r;
    }
}

/* din[BT, C] += gradient of the input; dw[C], db[C] += theirs. scratch[2 C] */
static inline void nn_layernorm_backward(float *din, float *dw, float *db, const float *dout, const float *in,
                                         const float *w, const float *mean, const float *rstd, size_t BT, size_t C,
                                         float *scratch)
{
    float *norm = scratch, *dnorm = scratch + C;
    for (size_t t = 0; t < BT; t++) {
        const float *x = in + t * C, *dy = dout + t * C;
        float *dx = din + t * C, m = mean[t], r = rstd[t], a, b; /* copies: stores may not change them */
        for (size_t c = 0; c < C; c++) {
            norm[c] = (x[c] - m) * r;
            dnorm[c] = dy[c] * w[c];
        }
        for (size_t c = 0; c < C; c++) {
            dw[c] += dy[c] * norm[c];
            db[c] += dy[c];
        }
        a = nn_sum(dnorm, C) / (float)C;
        b = nn_dot(dnorm, norm, C) / (float)C;
        for (size_t c = 0; c < C; c++)
            dx[c] += (dnorm[c] - a - norm[c] * b) * r;
    }
}

/* out[n] = in * (1 + tanh(sqrt(2 / pi) (in + 0.044715 in^3))) / 2 */
static inline void nn_gelu_forward(float *out, const float *in, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = in[i];
        out[i] = 0.5f * x * (1.0f + nn_tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    }
}

/* din[n] = dout[n] * gelu'(in[n]); din may be dout */
static inline void nn_gelu_backward(float *din, const float *dout, const float *in, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = in[i], t = nn_tanh(0.79788456f * (x + 0.044715f * x * x * x));
        float slope = 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x);
        din[i] = dout[i] * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope);
    }
}

/* Turns scores[T] of position t into probabilities over positions 0 .. t, and 0 after it. */
static inline void nn_causal_softmax(float *scores, size_t t, size_t T)
{
    float max = nn_max(scores, t + 1), scale;
    for (size_t j = 0; j <= t; j++)
        scores[j] = nn_exp(scores[j] - max);
    scale = 1.0f / nn_sum(scores, t + 1);
    for (size_t j = 0; j <= t; j++)
        scores[j] *= scale;
    for (size_t j = t + 1; j < T; j++)
        scores[j] = 0;
}

/* out[B, T, C] from qkv[B, T, 3 C] (query, key, value; heads side by side in each); att[B, H, T, T] is kept */
static inline void nn_attention_forward(float *out, float *att, const float *qkv, size_t B, size_t T, size_t C,
                                        size_t H)
{
    size_t D = C / H, row = 3 * C;
    float scale = 1.0f / sqrtf((float)D);
    for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < H; h++) {
            const float *q = qkv + b * T * row + h * D, *k = q + C, *v = k + C;
            float *a = att + (b * H + h) * T * T;
            for (size_t t = 0; t < T; t += NN_ROWS) {
                size_t n = T - t < NN_ROWS ? T - t : NN_ROWS, seen = t + n;
                dtrain_sgemm(0, 1, n, seen, D, scale, q + t * row, row, k, row, 0, a + t * T, T);
                for (size_t i = t; i < seen; i++)
                    nn_causal_softmax(a + i * T, i, T);
                dtrain_sgemm(0, 0, n, D, seen, 1, a + t * T, T, v, row, 0, out + (b * T + t) * C + h * D, C);
            }
        }
}

/* dqkv[B, T, 3 C] from dout[B, T, C]; scratch[T, T] */
static inline void nn_attention_backward(float *dqkv, const float *dout, const float *att, const float *qkv, size_t B,
                                         size_t T, size_t C, size_t H, float *scratch)
{
    size_t D = C / H, row = 3 * C;
    float scale = 1.0f / sqrtf((float)D);
    for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < H; h++) {
            size_t at = b * T * row + h * D;
            const float *q = qkv + at, *k = q + C, *v = k + C, *a = att + (b * H + h) * T * T;
            const float *dy = dout + b * T * C + h * D;
            float *dq = dqkv + at, *dk = dq + C, *dv = dk + C;
            for (size_t t = 0; t < T; t += NN_ROWS) {
                size_t n = T - t < NN_ROWS ? T - t : NN_ROWS, seen = t + n;
                dtrain_sgemm(0, 1, n, seen, D, 1, dy + t * C, C, v, row, 0, scratch + t * T, T);
                for (size_t i = t; i < seen; i++) {
                    float *ds = scratch + i * T;
                    float mean = nn_dot(a + i * T, ds, i + 1);
                    for (size_t j = 0; j < seen; j++)
                        ds[j] = a[i * T + j] * (ds[j] - mean);
                    memset(ds + seen, 0, (T - seen) * sizeof *ds);
                }
                dtrain_sgemm(0, 0, n, D, seen, scale, scratch + t * T, T, k, row, 0, dq + t * row, row);
            }
            for (size_t t = 0; t < T; t += NN_ROWS) /* earlier positions do not see these */
                for (size_t from = t, to; from < T; from = to) {
                    size_t n = T - t < NN_ROWS ? T - t : NN_ROWS, part = from * T + t;
                    float begun = from > t;
                    to = (from / NN_TERMS + 1) * NN_TERMS;
                    to = to < T ? to : T;
                    dtrain_sgemm(1, 0, n, D, to - from, 1, a + part, T, dy + from * C, C, begun, dv + t * row, row);
                    dtrain_sgemm(1, 0, n, D, to - from, scale, scratch + part, T, q + from * row, row, begun,
                                 dk + t * row, row);
                }
        }
}

/* out[B, T, C] = wte[V, C] of each token + wpe[T, C] of its position */
static inline void nn_embedding_forward(float *out, const int32_t *tokens, const float *wte, const float *wpe, size_t B,
                                        size_t T, size_t C)
{
    for (size_t i = 0; i < B * T; i++)
        for (size_t c = 0; c < C; c++)
            out[i * C + c] = wte[(size_t)tokens[i] * C + c] + wpe[i % T * C + c];
}

/* dwte, dwpe += */
static inline void nn_embedding_backward(float *dwte, float *dwpe, const float *dout, const int32_t *tokens, size_t B,
                                         size_t T, size_t C)
{
    for (size_t i = 0; i < B * T; i++)
        for (size_t c = 0; c < C; c++) {
            dwte[(size_t)tokens[i] * C + c] += dout[i * C + c];
            dwpe[i % T * C + c] += dout[i * C + c];
        }
}

/* Turns logits[BT, V] into their gradient and returns the sum of -log p(target) over the rows. */
static inline double nn_cross_entropy(float *logits, const int32_t *targets, size_t BT, size_t V)
{
    double loss = 0;
    for (size_t i = 0; i < BT; i++) {
        float *row = logits + i * V, max = nn_max(row, V), target = row[targets[i]], sum;
        for (size_t v = 0; v < V; v++)
            row[v] = nn_exp(row[v] - max);
        sum = nn_sum(row, V);
        loss += (double)(logf(sum) + max - target);
        for (size_t v = 0; v < V; v++)
            row[v] /= sum;
        row[targets[i]] -= 1.0f;
    }
    return loss;
}

#endif
