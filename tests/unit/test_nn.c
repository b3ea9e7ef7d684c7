/* The layers of examples/nn.h and the GPT made of them, against a float64 twin that is written on a tape of scalar
 * operations and shares nothing with them: each layer against finite differences, the model's every gradient, and
 * whole steps of training with optimizers written from their papers. */
#define DTRAIN_API static
#define main train_gpt_main
#include "../../examples/train_gpt.c"
#undef main

#include "test.h"
#include "gpt_alone.h"

/* ---- the tape: scalars in float64, differentiated in reverse ---- */

typedef enum tape_kind { TAPE_LEAF, TAPE_DOT, TAPE_ADD, TAPE_EXP, TAPE_LOG, TAPE_TANH, TAPE_RSQRT } tape_kind;

/* DOT: the sum over n of node a + i * a_step times node b + i * b_step, plus node c where c is not negative.
 * ADD: node a plus node b. The others: a function of node a. */
typedef struct tape_node {
    tape_kind kind;
    int a, a_step, b, b_step, c, n;
    double value, grad;
} tape_node;

typedef struct tape {
    tape_node *nodes;
    int count, room;
} tape;

static int tape_push(tape *t, tape_kind kind, int a, int b)
{
    tape_node *node;
    if (t->count == t->room) {
        t->room = t->room > 0 ? 2 * t->room : 4096;
        t->nodes = (tape_node *)realloc(t->nodes, (size_t)t->room * sizeof *t->nodes);
        if (t->nodes == NULL)
            abort();
    }
    node = &t->nodes[t->count];
    memset(node, 0, sizeof *node);
    node->kind = kind;
    node->a = a;
    node->b = b;
    return t->count++;
}

static int tape_leaf(tape *t, double value)
{
    int at = tape_push(t, TAPE_LEAF, 0, 0);
    t->nodes[at].value = value;
    return at;
}

static int tape_dot(tape *t, int a, int a_step, int b, int b_step, int n, int c)
{
    int at = tape_push(t, TAPE_DOT, a, b);
    tape_node *node = &t->nodes[at];
    node->a_step = a_step;
    node->b_step = b_step;
    node->c = c;
    node->n = n;
    node->value = c >= 0 ? t->nodes[c].value : 0;
    for (int i = 0; i < n; i++)
        node->value += t->nodes[a + i * a_step].value * t->nodes[b + i * b_step].value;
    return at;
}

static int tape_mul(tape *t, int a, int b)
{
    return tape_dot(t, a, 0, b, 0, 1, -1);
}

static int tape_add(tape *t, int a, int b)
{
    int at = tape_push(t, TAPE_ADD, a, b);
    t->nodes[at].value = t->nodes[a].value + t->nodes[b].value;
    return at;
}

static int tape_call(tape *t, tape_kind kind, int a)
{
    int at = tape_push(t, kind, a, 0);
    double x = t->nodes[a].value;
    t->nodes[at].value = kind == TAPE_EXP    ? exp(x)
                         : kind == TAPE_LOG  ? log(x)
                         : kind == TAPE_TANH ? tanh(x)
                                             : 1 / sqrt(x);
    return at;
}

/* Adds to every node's grad what the node `from` changes by; its own grad is set by the caller. */
static void tape_backward(tape *t, int from)
{
    tape_node *all = t->nodes;
    for (int at = from; at >= 0; at--) {
        const tape_node *node = &all[at];
        double g = node->grad, y = node->value;
        switch (node->kind) {
        case TAPE_LEAF: break;
        case TAPE_DOT:
            for (int i = 0; i < node->n && g != 0; i++) {
                all[node->a + i * node->a_step].grad += g * all[node->b + i * node->b_step].value;
                all[node->b + i * node->b_step].grad += g * all[node->a + i * node->a_step].value;
            }
            if (node->c >= 0)
                all[node->c].grad += g;
            break;
        case TAPE_ADD:
            all[node->a].grad += g;
            all[node->b].grad += g;
            break;
        case TAPE_EXP: all[node->a].grad += g * y; break;
        case TAPE_LOG: all[node->a].grad += g / all[node->a].value; break;
        case TAPE_TANH: all[node->a].grad += g * (1 - y * y); break;
        case TAPE_RSQRT: all[node->a].grad += g * -0.5 * y * y * y; break;
        }
    }
}

/* Copies scattered nodes next to each other, as a matrix that a dot product can walk. */
static int tape_gather(tape *t, const int *scattered, int n)
{
    int first = t->count;
    for (int i = 0; i < n; i++)
        tape_dot(t, scattered[i], 0, scattered[i], 0, 0, scattered[i]);
    return first;
}

static int *test_ints(int n)
{
    int *ints = (int *)calloc((size_t)n + 1, sizeof *ints);
    if (ints == NULL)
        abort();
    return ints;
}

/* ---- the layers, from their definitions: each takes and returns the first node of a matrix ---- */

/* [rows, outs] from x [rows, ins], w [outs, ins] and b [outs] or -1 */
static int ref_linear(tape *t, int x, int w, int b, int rows, int ins, int outs)
{
    int first = t->count;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outs; o++)
            tape_dot(t, x + r * ins, 1, w + o * ins, 1, ins, b < 0 ? -1 : b + o);
    return first;
}

static int ref_layernorm(tape *t, int x, int w, int b, int rows, int C)
{
    int *out = test_ints(rows * C), minus = tape_leaf(t, -1.0 / C), part = tape_leaf(t, 1.0 / C), first;
    int small = tape_leaf(t, 1e-5);
    for (int r = 0; r < rows; r++) {
        int mean = tape_dot(t, x + r * C, 1, minus, 0, C, -1), centred = t->count, square, scale;
        for (int c = 0; c < C; c++)
            tape_add(t, x + r * C + c, mean);
        square = tape_dot(t, centred, 1, centred, 1, C, -1);
        scale = tape_call(t, TAPE_RSQRT, tape_add(t, tape_mul(t, square, part), small));
        for (int c = 0; c < C; c++)
            out[r * C + c] = tape_dot(t, tape_mul(t, centred + c, scale), 0, w + c, 0, 1, b + c);
    }
    first = tape_gather(t, out, rows * C);
    free(out);
    return first;
}

static int ref_gelu(tape *t, int x, int n)
{
    int *out = test_ints(n), half = tape_leaf(t, 0.5), root = tape_leaf(t, sqrt(2 / acos(-1.0))), first;
    int cubic = tape_leaf(t, 0.044715);
    for (int i = 0; i < n; i++) {
        int cube = tape_mul(t, tape_mul(t, x + i, x + i), x + i), halved = tape_mul(t, x + i, half);
        int inner = tape_mul(t, root, tape_dot(t, cubic, 0, cube, 0, 1, x + i));
        out[i] = tape_dot(t, halved, 0, tape_call(t, TAPE_TANH, inner), 0, 1, halved);
    }
    first = tape_gather(t, out, n);
    free(out);
    return first;
}

static int ref_attention(tape *t, int qkv, int B, int T, int C, int H)
{
    int *out = test_ints(B * T * C), D = C / H, first, one = tape_leaf(t, 1), minus = tape_leaf(t, -1);
    int scale = tape_leaf(t, 1 / sqrt((double)D));
    for (int row = 0; row < B * T; row++)
        for (int h = 0; h < H; h++) {
            int past = row % T + 1, start = row - row % T, scores = t->count, powers, whole, inverse;
            int q = qkv + row * 3 * C + h * D, k = qkv + start * 3 * C + C + h * D, v = k + C;
            for (int j = 0; j < past; j++)
                tape_dot(t, q, 1, k + j * 3 * C, 1, D, -1);
            powers = t->count + past;
            for (int j = 0; j < past; j++)
                tape_mul(t, scores + j, scale);
            for (int j = 0; j < past; j++)
                tape_call(t, TAPE_EXP, scores + past + j);
            whole = tape_dot(t, powers, 1, one, 0, past, -1);
            inverse = tape_call(t, TAPE_EXP, tape_mul(t, tape_call(t, TAPE_LOG, whole), minus));
            for (int d = 0; d < D; d++)
                out[row * C + h * D + d] = tape_mul(t, tape_dot(t, powers, 1, v + d, 3 * C, past, -1), inverse);
        }
    first = tape_gather(t, out, B * T * C);
    free(out);
    return first;
}

static int ref_embedding(tape *t, int wte, int wpe, const int32_t *tokens, int B, int T, int C)
{
    int first = t->count;
    for (int row = 0; row < B * T; row++)
        for (int c = 0; c < C; c++)
            tape_add(t, wte + tokens[row] * C + c, wpe + row % T * C + c);
    return first;
}

static int ref_sum(tape *t, int x, int y, int n)
{
    int first = t->count;
    for (int i = 0; i < n; i++)
        tape_add(t, x + i, y + i);
    return first;
}

static int ref_cross_entropy(tape *t, int logits, const int32_t *targets, int rows, int V)
{
    int one = tape_leaf(t, 1), minus = tape_leaf(t, -1), total = tape_leaf(t, 0);
    for (int r = 0; r < rows; r++) {
        int powers = t->count, whole;
        for (int v = 0; v < V; v++)
            tape_call(t, TAPE_EXP, logits + r * V + v);
        whole = tape_call(t, TAPE_LOG, tape_dot(t, powers, 1, one, 0, V, -1));
        total = tape_add(t, total, tape_dot(t, logits + r * V + targets[r], 0, minus, 0, 1, whole));
    }
    return total;
}

/* ---- one layer of nn.h at a time ---- */

enum { LAYER_LINEAR, LAYER_LAYERNORM, LAYER_GELU, LAYER_ATTENTION, LAYER_EMBEDDING, LAYER_CROSS_ENTROPY };

/* What a layer is tried on: inputs one after the other (x, then w, then b), and weights of its outputs. */
typedef struct layer_case {
    int kind, B, T, C, OC, H, ins[3], outs, all;
    int32_t tokens[512];
    float *in, *out, *grad, *weight;
} layer_case;

static float *test_floats(int n)
{
    float *floats = (float *)calloc((size_t)n + 1, sizeof *floats);
    if (floats == NULL)
        abort();
    return floats;
}

static void layer_create(layer_case *c, int kind, int B, int T, int C, int OC, int H)
{
    int rows = B * T;
    memset(c, 0, sizeof *c);
    c->kind = kind;
    c->B = B;
    c->T = T;
    c->C = C;
    c->OC = OC;
    c->H = H;
    c->ins[0] = kind == LAYER_ATTENTION ? rows * 3 * C : kind == LAYER_EMBEDDING ? OC * C : rows * C;
    c->ins[1] = kind == LAYER_LINEAR ? OC * C : kind == LAYER_LAYERNORM ? C : kind == LAYER_EMBEDDING ? T * C : 0;
    c->ins[2] = kind == LAYER_LINEAR ? OC : kind == LAYER_LAYERNORM ? C : 0;
    c->outs = kind == LAYER_LINEAR ? rows * OC : kind == LAYER_CROSS_ENTROPY ? 1 : rows * C;
    c->all = c->ins[0] + c->ins[1] + c->ins[2];
    c->in = test_floats(c->all);
    c->grad = test_floats(c->all);
    c->out = test_floats(c->outs);
    c->weight = test_floats(c->outs);
    for (int i = 0; i < c->all; i++)
        c->in[i] = dtrain_random_normal(17, (uint64_t)i);
    for (int i = 0; i < c->outs; i++)
        c->weight[i] = kind == LAYER_CROSS_ENTROPY ? 1 : dtrain_random_normal(18, (uint64_t)i);
    for (int i = 0; i < rows; i++)
        c->tokens[i] = (int32_t)(dtrain_random_u64(19, (uint64_t)i) % (uint64_t)(OC > 0 ? OC : C));
}

static void layer_destroy(layer_case *c)
{
    free(c->in);
    free(c->grad);
    free(c->out);
    free(c->weight);
}

/* The weighted sum of the layer's outputs in float64; where bump >= 0, with that input moved by step. */
static double layer_reference(const layer_case *c, double *outs, int bump, double step)
{
    tape t = {NULL, 0, 0};
    int rows = c->B * c->T, x = 0, w = c->ins[0], b = w + c->ins[1], y = 0;
    double sum = 0;
    for (int i = 0; i < c->all; i++)
        tape_leaf(&t, (double)c->in[i] + (i == bump ? step : 0));
    switch (c->kind) {
    case LAYER_LINEAR: y = ref_linear(&t, x, w, b, rows, c->C, c->OC); break;
    case LAYER_LAYERNORM: y = ref_layernorm(&t, x, w, b, rows, c->C); break;
    case LAYER_GELU: y = ref_gelu(&t, x, rows * c->C); break;
    case LAYER_ATTENTION: y = ref_attention(&t, x, c->B, c->T, c->C, c->H); break;
    case LAYER_EMBEDDING: y = ref_embedding(&t, x, w, c->tokens, c->B, c->T, c->C); break;
    default: y = ref_cross_entropy(&t, x, c->tokens, rows, c->C); break;
    }
    for (int i = 0; i < c->outs; i++) {
        sum += (double)c->weight[i] * t.nodes[y + i].value;
        if (outs != NULL)
            outs[i] = t.nodes[y + i].value;
    }
    free(t.nodes);
    return sum;
}

/* Forward and backward by nn.h: c->out and c->grad. */
static void layer_run(layer_case *c)
{
    size_t B = (size_t)c->B, T = (size_t)c->T, C = (size_t)c->C, OC = (size_t)c->OC, H = (size_t)c->H, BT = B * T;
    float *x = c->in, *w = x + c->ins[0], *b = w + c->ins[1], *y = c->out, *dy = c->weight;
    float *dx = c->grad, *dw = dx + c->ins[0], *db = dw + c->ins[1];
    size_t room = B * H * T * T + T * T + 2 * BT + 2 * C;
    float *scratch = test_floats((int)room), *mean = scratch + T * T + 2 * C;
    float *rstd = mean + BT, *att = rstd + BT;
    memset(scratch, 0xff, room * sizeof *scratch); /* NaN: nothing is read before it is written */
    switch (c->kind) {
    case LAYER_LINEAR:
        nn_linear_forward(y, x, w, b, BT, C, OC);
        nn_linear_backward(dx, dw, db, dy, x, w, BT, C, OC);
        break;
    case LAYER_LAYERNORM:
        nn_layernorm_forward(y, mean, rstd, x, w, b, BT, C);
        nn_layernorm_backward(dx, dw, db, dy, x, w, mean, rstd, BT, C, scratch);
        break;
    case LAYER_GELU:
        nn_gelu_forward(y, x, BT * C);
        nn_gelu_backward(dx, dy, x, BT * C);
        break;
    case LAYER_ATTENTION:
        nn_attention_forward(y, att, x, B, T, C, H);
        nn_attention_backward(dx, dy, att, x, B, T, C, H, scratch);
        break;
    case LAYER_EMBEDDING:
        nn_embedding_forward(y, c->tokens, x, w, B, T, C);
        nn_embedding_backward(dx, dw, dy, c->tokens, B, T, C);
        break;
    default:
        memcpy(dx, x, BT * C * sizeof(float));
        y[0] = (float)nn_cross_entropy(dx, c->tokens, BT, C);
        break;
    }
    free(scratch);
}

/* The largest difference, in units of the largest magnitude expected. */
static double test_off(const float *got, const double *expected, int n)
{
    double most = 1e-30, off = 0;
    for (int i = 0; i < n; i++) {
        double difference = fabs((double)got[i] - expected[i]);
        most = fabs(expected[i]) > most ? fabs(expected[i]) : most;
        off = difference > off || difference != difference ? difference : off;
    }
    return off / most;
}

/* Every how manieth input is moved, as each takes a forward pass. */
static int layer_every = 1;

static void layer_check(int kind, int B, int T, int C, int OC, int H)
{
    layer_case c;
    double *expected, off;
    layer_create(&c, kind, B, T, C, OC, H);
    expected = (double *)calloc((size_t)(c.all + c.outs), sizeof(double));
    if (expected == NULL)
        abort();
    layer_run(&c);
    layer_reference(&c, expected, -1, 0);
    off = test_off(c.out, expected, c.outs);
    if (!(off < 2e-6))
        TEST_FAIL("layer %d forward, B %d T %d C %d OC %d H %d: off by %g", kind, B, T, C, OC, H, off);
    for (int i = 0; i < c.all; i++)
        expected[i] = i % layer_every != 0
                          ? (double)c.grad[i]
                          : (layer_reference(&c, NULL, i, 1e-5) - layer_reference(&c, NULL, i, -1e-5)) / 2e-5;
    for (int i = 0, at = 0; i < 3; at += c.ins[i++]) {
        off = c.ins[i] > 0 ? test_off(c.grad + at, expected + at, c.ins[i]) : 0;
        if (!(off < 4e-6))
            TEST_FAIL("layer %d gradient of input %d, B %d T %d C %d OC %d H %d: off by %g", kind, i, B, T, C, OC, H,
                      off);
    }
    free(expected);
    layer_destroy(&c);
}

TEST(linear_agrees_with_finite_differences)
{
    layer_check(LAYER_LINEAR, 1, 1, 1, 1, 0);
    layer_check(LAYER_LINEAR, 2, 3, 7, 5, 0);
    layer_check(LAYER_LINEAR, 1, 19, 18, 17, 0);
}

TEST(layernorm_agrees_with_finite_differences)
{
    layer_check(LAYER_LAYERNORM, 1, 2, 3, 0, 0);
    layer_check(LAYER_LAYERNORM, 2, 3, 16, 0, 0);
    layer_check(LAYER_LAYERNORM, 1, 5, 37, 0, 0);
}

TEST(gelu_agrees_with_finite_differences)
{
    layer_check(LAYER_GELU, 1, 1, 1, 0, 0);
    layer_check(LAYER_GELU, 3, 5, 21, 0, 0);
}

TEST(attention_agrees_with_finite_differences)
{
    layer_check(LAYER_ATTENTION, 1, 1, 2, 0, 1);
    layer_check(LAYER_ATTENTION, 2, 5, 6, 0, 3);
    layer_check(LAYER_ATTENTION, 1, 19, 8, 0, 2);
}

/* Beyond NN_ROWS and NN_TERMS positions, and not a multiple of them. */
TEST(attention_by_blocks_agrees_with_finite_differences)
{
    layer_check(LAYER_ATTENTION, 2, 33, 4, 0, 2);
    layer_every = 5;
    layer_check(LAYER_ATTENTION, 1, 70, 6, 0, 2);
    layer_every = 59;
    layer_check(LAYER_ATTENTION, 1, 293, 2, 0, 1);
    layer_every = 1;
}

TEST(embedding_agrees_with_finite_differences)
{
    layer_check(LAYER_EMBEDDING, 2, 5, 6, 9, 0);
    layer_check(LAYER_EMBEDDING, 1, 17, 3, 2, 0);
}

TEST(cross_entropy_agrees_with_finite_differences)
{
    layer_check(LAYER_CROSS_ENTROPY, 1, 1, 2, 0, 0);
    layer_check(LAYER_CROSS_ENTROPY, 2, 5, 37, 0, 0);
}

TEST(exp_and_tanh_are_right_everywhere)
{
    double off_exp = 0, off_tanh = 0;
    for (int i = -870000; i <= 870000; i += 7) {
        float x = (float)i / 10000.0f;
        double e = fabs((double)nn_exp(x) / exp((double)x) - 1), h = fabs((double)nn_tanh(x) - tanh((double)x));
        off_exp = e > off_exp ? e : off_exp;
        off_tanh = h > off_tanh ? h : off_tanh;
    }
    CHECK(off_exp < 2.4e-7);
    CHECK(off_tanh < 2.4e-7);
    CHECK(nn_exp(-1e30f) < 2e-38f);
    CHECK(nn_exp(1e30f) > 6e37f);
    CHECK(nn_tanh(100.0f) == 1.0f);
    CHECK(nn_tanh(-100.0f) == -1.0f);
    CHECK(nn_exp(nanf("")) != nn_exp(nanf("")));
}

/* ---- the whole model ---- */

/* Text that a model can learn something of: words drawn from a short list that the seed makes. */
static unsigned char *test_text(uint64_t seed, size_t bytes)
{
    unsigned char *text = (unsigned char *)malloc(bytes + 16);
    size_t at = 0;
    if (text == NULL)
        abort();
    for (uint64_t word = 0; at < bytes; word++) {
        uint64_t which = dtrain_random_u64(seed, word) % 24, length = 2 + dtrain_random_u64(seed + 1, which) % 6;
        for (uint64_t i = 0; i < length; i++)
            text[at++] = (unsigned char)('a' + dtrain_random_u64(seed + 2, which * 8 + i) % 26);
        text[at++] = ' ';
    }
    return text;
}

static gpt_job test_job(long layers, long heads, long width, long context, long batch, long micro, long steps)
{
    gpt_job job;
    memset(&job, 0, sizeof job);
    job.flags = gpt_defaults();
    job.flags.layers = layers;
    job.flags.heads = heads;
    job.flags.width = width;
    job.flags.context = context;
    job.flags.batch = batch;
    job.flags.micro = micro;
    job.flags.steps = steps;
    job.flags.quiet = 1;
    job.text_tokens = 4000;
    job.train_tokens = 3600;
    job.text = test_text(5, job.text_tokens);
    job.losses = (double *)calloc((size_t)steps, sizeof(double));
    return job;
}

static void test_job_destroy(gpt_job *job)
{
    free(job->text);
    free(job->losses);
}

/* The first node of layer l of a parameter: the tape's first leaves are the model's parameters in table order. */
static int ref_param(const gpt *m, int which, int l)
{
    return (int)alone_at(m, which, (size_t)l);
}

/* The whole model in float64 from weights[m->count]; returns the node of the summed loss. */
static int ref_gpt(tape *t, const gpt *m, const double *weights, const int32_t *tokens, const int32_t *targets)
{
    int B = (int)m->B, T = (int)m->T, C = (int)m->C, H = (int)m->H, BT = B * T, x, y;
    t->count = 0;
    for (size_t i = 0; i < m->count; i++)
        tape_leaf(t, weights[i]);
    x = ref_embedding(t, ref_param(m, WTE, 0), ref_param(m, WPE, 0), tokens, B, T, C);
    for (int l = 0; l < (int)m->L; l++) {
        y = ref_layernorm(t, x, ref_param(m, LN1W, l), ref_param(m, LN1B, l), BT, C);
        y = ref_linear(t, y, ref_param(m, QKVW, l), ref_param(m, QKVB, l), BT, C, 3 * C);
        y = ref_attention(t, y, B, T, C, H);
        y = ref_linear(t, y, ref_param(m, PROJW, l), ref_param(m, PROJB, l), BT, C, C);
        x = ref_sum(t, x, y, BT * C);
        y = ref_layernorm(t, x, ref_param(m, LN2W, l), ref_param(m, LN2B, l), BT, C);
        y = ref_linear(t, y, ref_param(m, FCW, l), ref_param(m, FCB, l), BT, C, 4 * C);
        y = ref_gelu(t, y, BT * 4 * C);
        y = ref_linear(t, y, ref_param(m, FCPW, l), ref_param(m, FCPB, l), BT, 4 * C, C);
        x = ref_sum(t, x, y, BT * C);
    }
    x = ref_layernorm(t, x, ref_param(m, LNFW, 0), ref_param(m, LNFB, 0), BT, C);
    x = ref_linear(t, x, ref_param(m, HEADW, 0), -1, BT, C, 256);
    return ref_cross_entropy(t, x, targets, BT, 256);
}

static double *test_doubles(size_t n)
{
    double *doubles = (double *)calloc(n, sizeof *doubles);
    if (doubles == NULL)
        abort();
    return doubles;
}

TEST(every_gradient_of_the_model_agrees_with_the_float64_tape)
{
    gpt_job job = test_job(2, 3, 21, 19, 2, 1, 1);
    gpt_alone a;
    const gpt *m = &a.model;
    tape t = {NULL, 0, 0};
    int32_t tokens[2 * 19], targets[2 * 19];
    double loss, *weights;
    int root;
    alone_create(&a, &job.flags);
    alone_stir(&a); /* far from where training starts, so that no path is near zero */
    weights = test_doubles(2 * m->count);
    for (size_t i = 0; i < m->count; i++)
        weights[i] = (double)a.weights[i];
    gpt_draw(&job, 0, 0, tokens, targets);
    loss = alone_micro_batch(&a, tokens, targets);
    root = ref_gpt(&t, m, weights, tokens, targets);
    CHECK(fabs(loss / t.nodes[root].value - 1) < 1e-5);
    t.nodes[root].grad = 1;
    tape_backward(&t, root);
    for (size_t i = 0; i < m->count; i++)
        weights[m->count + i] = t.nodes[i].grad;
    for (int p = 0; p < GPT_PARAMS; p++) {
        size_t at = (size_t)ref_param(m, p, 0), n = dtrain_param_elements(&m->table[p]);
        double off = test_off(a.grads + at, weights + m->count + at, (int)n);
        if (!(off < 2e-5))
            TEST_FAIL("gradient of %s: off by %g", m->table[p].name, off);
    }
    for (int p = 0; p < GPT_PARAMS; p++) { /* the tape itself, against differences */
        size_t n = dtrain_param_elements(&m->table[p]), at = (size_t)ref_param(m, p, 0);
        at += dtrain_random_u64(78, (uint64_t)p) % n;
        double kept = weights[at], up, down, slope = weights[m->count + at];
        weights[at] = kept + 1e-5;
        up = t.nodes[ref_gpt(&t, m, weights, tokens, targets)].value;
        weights[at] = kept - 1e-5;
        down = t.nodes[ref_gpt(&t, m, weights, tokens, targets)].value;
        weights[at] = kept;
        CHECK(fabs((up - down) / 2e-5 - slope) < 1e-5 * (1 + fabs(slope)));
    }
    free(weights);
    free(t.nodes);
    alone_destroy(&a);
    test_job_destroy(&job);
}

/* ---- training ---- */

/* Trains in float64 from the same weights on the same batches, by AdamW or SGD written from their papers. */
static void ref_train(const gpt_job *job, const gpt_alone *a, double *losses)
{
    const gpt *m = &a->model;
    size_t n = m->count, BT = m->B * m->T, micro = (size_t)job->flags.micro;
    double *w = test_doubles(4 * n), *g = w + n, *first = g + n, *second = first + n;
    double warm = (double)(job->flags.steps / 10), steps = (double)job->flags.steps, peak = job->flags.lr;
    int adam = strcmp(job->flags.optimizer, "sgd") != 0;
    int32_t *text = (int32_t *)calloc(2 * BT, sizeof *text);
    tape t = {NULL, 0, 0};
    for (size_t i = 0; i < n; i++)
        w[i] = (double)a->weights[i];
    for (long step = 0; text != NULL && step < job->flags.steps; step++) {
        double s = (double)step, along = (s - warm) / (steps - warm), square = 0, clip, lr;
        lr = s < warm ? peak * (s + 1) / warm : 0.1 * peak + 0.9 * peak * (1 + cos(acos(-1.0) * along)) / 2;
        losses[step] = 0;
        memset(g, 0, n * sizeof *g);
        for (size_t k = 0; k < micro; k++) {
            gpt_draw(job, step, (long)k, text, text + BT);
            int root = ref_gpt(&t, m, w, text, text + BT);
            losses[step] += t.nodes[root].value / (double)(micro * BT);
            t.nodes[root].grad = 1;
            tape_backward(&t, root);
            for (size_t i = 0; i < n; i++)
                g[i] += t.nodes[i].grad / (double)(micro * BT);
        }
        for (size_t i = 0; i < n; i++)
            square += g[i] * g[i];
        clip = square > 1 ? 1 / sqrt(square) : 1;
        for (int p = 0; p < GPT_PARAMS; p++) {
            size_t at = (size_t)ref_param(m, p, 0), end = at + dtrain_param_elements(&m->table[p]);
            double decay = m->table[p].no_decay || !adam ? 0 : 0.1;
            for (size_t i = at; i < end; i++) {
                double d = g[i] * clip;
                first[i] = adam ? 0.9 * first[i] + 0.1 * d : 0.9 * first[i] + d + decay * w[i];
                second[i] = 0.95 * second[i] + 0.05 * d * d;
                if (adam)
                    w[i] -= lr * decay * w[i] +
                            lr * first[i] / (1 - pow(0.9, s + 1)) / (sqrt(second[i] / (1 - pow(0.95, s + 1))) + 1e-8);
                else
                    w[i] -= lr * first[i];
            }
        }
    }
    free(t.nodes);
    free(text);
    free(w);
}

static void first_steps_check(const char *optimizer, double lr)
{
    gpt_job job = test_job(2, 2, 24, 20, 2, 2, 20);
    gpt_alone a;
    double expected[20], off = 0;
    job.flags.optimizer = optimizer;
    job.flags.lr = lr;
    alone_create(&a, &job.flags);
    ref_train(&job, &a, expected);
    CHECK_EQ(gpt_run(&job, gpt_rank), 0);
    for (int i = 0; i < 20; i++)
        off = fabs(job.losses[i] - expected[i]) > off ? fabs(job.losses[i] - expected[i]) : off;
    if (!(off < 1e-4))
        TEST_FAIL("%s: losses are off by %g", optimizer, off);
    CHECK(expected[19] < expected[0] - 0.1);
    alone_destroy(&a);
    test_job_destroy(&job);
}

TEST(first_steps_of_adamw_agree_with_float64)
{
    first_steps_check("adamw", 1e-3);
}

TEST(first_steps_of_sgd_agree_with_float64)
{
    first_steps_check("sgd", 0.1);
}
