/* Trains a byte-level GPT data-parallel on threads or processes, on any text file.
 *
 * cc -O3 -march=native -fno-math-errno -I. examples/train_gpt.c -o build/train_gpt -lpthread -lm
 * build/train_gpt --ranks 4 --steps 200
 * build/dtrun -n 4 build/train_gpt --steps 200
 *
 * A decoder-only transformer: learned positions, pre-norm blocks, GELU, untied output. --batch is sequences a
 * micro-batch, --micro micro-batches a step over all ranks together; with a power of two of them, 1, 2, 4 and 8
 * ranks end with the same weights, bit for bit. The last tenth of the text is held out. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nn.h"

#define GPT_VOCAB 256
#define GPT_VALIDATION 32 /* held-out sequences */
#define GPT_SAMPLE 200

typedef struct gpt_flags {
    long layers, heads, width, context, batch, micro, steps, seed, ranks;
    double lr;
    const char *optimizer, *text, *csv, *svg;
    int quiet;
} gpt_flags;

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

/* One model and the activations of one micro-batch. L layers, rows BT = B * T. */
typedef struct gpt {
    size_t L, H, C, T, B, count;
    dtrain_param table[GPT_PARAMS];
    dtrain_tensor params, grads, memory;
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

/* A file that is being written beside its target, whose place it takes when it is whole. */
typedef struct gpt_output {
    FILE *file;
    const char *path;
    char aside[4096]; /* empty: written in place, as a device or a pipe must be */
} gpt_output;

typedef struct gpt_job {
    gpt_flags flags;
    unsigned char *text;
    size_t text_bytes, train_bytes;
    double *losses; /* [steps], written by rank 0 */
    long diverged;  /* the step, counted from 1, whose loss was not finite; 0: none; written by rank 0 */
    gpt_output csv, svg;
    dtrain_comm *world; /* of processes, when a launcher has started several; else NULL */
} gpt_job;

static int64_t gpt_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void gpt_param(gpt *model, int which, const char *name, int unit, int stacked, int no_decay, size_t a, size_t b)
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

static void gpt_describe(gpt *model)
{
    size_t C = model->C;
    int last = (int)model->L + 1;
    gpt_param(model, WTE, "wte", 0, 0, 0, GPT_VOCAB, C);
    gpt_param(model, WPE, "wpe", 0, 0, 0, model->T, C);
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
    gpt_param(model, HEADW, "headw", last, 0, 0, GPT_VOCAB, C);
}

/* Norm weights are 1, biases 0, the rest normal with deviation 0.02, smaller where a branch joins the residual. */
static void gpt_initialise(gpt *model, uint64_t seed)
{
    for (int i = 0; i < GPT_PARAMS; i++) {
        float *p = (float *)model->table[i].data;
        size_t n = dtrain_param_elements(&model->table[i]);
        int weight = i == LN1W || i == LN2W || i == LNFW, random = !model->table[i].no_decay;
        float deviation = i == PROJW || i == FCPW ? 0.02f / sqrtf(2.0f * (float)model->L) : 0.02f;
        for (size_t k = 0; k < n; k++)
            p[k] = random ? deviation * dtrain_random_normal(seed + 1000 * (uint64_t)i, k) : weight ? 1.0f : 0.0f;
    }
}

static float *gpt_take(float *memory, size_t *at, size_t count)
{
    float *taken = memory != NULL ? memory + *at : NULL;
    *at += (count + 15) / 16 * 16;
    return taken;
}

/* Lays the activations out in memory and returns how many floats they take; NULL memory only measures. */
static size_t gpt_lay_out(gpt *m, float *memory)
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
    m->logits = gpt_take(memory, &at, BT * GPT_VOCAB);
    m->dx = gpt_take(memory, &at, BT * C);
    m->dbranch = gpt_take(memory, &at, BT * C);
    m->dwide = gpt_take(memory, &at, BT * 4 * C);
    m->scratch = gpt_take(memory, &at, T * T + 2 * C);
    return at;
}

/* About how many bytes one rank needs; in floating point, so that no flags can overflow it. */
static double gpt_bytes(const gpt_flags *f)
{
    double L = (double)f->layers, C = (double)f->width, T = (double)f->context, B = (double)f->batch;
    double weights = 12 * L * C * C + 13 * L * C + (2 * GPT_VOCAB + T) * C;
    double activations = (18 * L + 8) * B * T * C + (L * B * (double)f->heads + 1) * T * T + GPT_VOCAB * B * T;
    return 4 * (5 * weights + activations);
}

static dtrain_status gpt_create(gpt *model, const gpt_flags *flags, dtrain_allocator *allocator)
{
    dtrain_status status;
    size_t at = 0, floats;
    memset(model, 0, sizeof *model);
    model->L = (size_t)flags->layers;
    model->H = (size_t)flags->heads;
    model->C = (size_t)flags->width;
    model->T = (size_t)flags->context;
    model->B = (size_t)flags->batch;
    gpt_describe(model);
    floats = gpt_lay_out(model, NULL);
    status = dtrain_tensor_create(&model->params, DTRAIN_F32, 1, &model->count, allocator);
    if (status == DTRAIN_OK)
        status = dtrain_tensor_create(&model->grads, DTRAIN_F32, 1, &model->count, allocator);
    if (status == DTRAIN_OK)
        status = dtrain_tensor_create(&model->memory, DTRAIN_F32, 1, &floats, allocator);
    if (status != DTRAIN_OK)
        return status;
    gpt_lay_out(model, (float *)model->memory.data);
    for (int i = 0; i < GPT_PARAMS; i++) {
        model->table[i].data = (float *)model->params.data + at;
        model->table[i].grad = (float *)model->grads.data + at;
        at += dtrain_param_elements(&model->table[i]);
    }
    gpt_initialise(model, (uint64_t)flags->seed);
    return DTRAIN_OK;
}

static void gpt_destroy(gpt *model)
{
    dtrain_tensor_destroy(&model->params);
    dtrain_tensor_destroy(&model->grads);
    dtrain_tensor_destroy(&model->memory);
}

/* Layer l's part of a stacked parameter, or of its gradient. */
static float *gpt_weight(const gpt *m, int which, size_t l)
{
    size_t n = dtrain_param_elements(&m->table[which]);
    return (float *)m->table[which].data + (m->table[which].stacked ? l * (n / m->L) : 0);
}

static float *gpt_grad(const gpt *m, int which, size_t l)
{
    size_t n = dtrain_param_elements(&m->table[which]);
    return (float *)m->table[which].grad + (m->table[which].stacked ? l * (n / m->L) : 0);
}

static void gpt_layer_forward(gpt *m, size_t l, size_t B)
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
static void gpt_layer_backward(gpt *m, size_t l)
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

/* tokens[B, T] to logits, for B up to the model's own. */
static void gpt_forward(gpt *m, const unsigned char *tokens, size_t B)
{
    size_t C = m->C, BT = B * m->T;
    nn_embedding_forward(m->x, tokens, gpt_weight(m, WTE, 0), gpt_weight(m, WPE, 0), B, m->T, C);
    for (size_t l = 0; l < m->L; l++)
        gpt_layer_forward(m, l, B);
    nn_layernorm_forward(m->lnf, m->meanf, m->rstdf, m->x + m->L * m->B * m->T * C, gpt_weight(m, LNFW, 0),
                         gpt_weight(m, LNFB, 0), BT, C);
    nn_linear_forward(m->logits, m->lnf, gpt_weight(m, HEADW, 0), NULL, BT, C, GPT_VOCAB);
}

/* Forward and backward of one micro-batch; each unit's gradients go to ddp (NULL: stay) as soon as they are there. */
static dtrain_status gpt_micro_batch(gpt *m, dtrain_ddp *ddp, const unsigned char *tokens, const unsigned char *targets,
                                     double *loss)
{
    size_t C = m->C, BT = m->B * m->T, L = m->L;
    dtrain_status status = DTRAIN_OK;
    gpt_forward(m, tokens, m->B);
    *loss = nn_cross_entropy(m->logits, targets, BT, GPT_VOCAB);
    nn_linear_backward(m->dbranch, gpt_grad(m, HEADW, 0), NULL, m->logits, m->lnf, gpt_weight(m, HEADW, 0), BT, C,
                       GPT_VOCAB);
    memset(m->dx, 0, BT * C * sizeof(float));
    nn_layernorm_backward(m->dx, gpt_grad(m, LNFW, 0), gpt_grad(m, LNFB, 0), m->dbranch, m->x + L * BT * C,
                          gpt_weight(m, LNFW, 0), m->meanf, m->rstdf, BT, C, m->scratch + m->T * m->T);
    if (ddp != NULL)
        status = dtrain_ddp_reduce(ddp, (int)L + 1);
    for (size_t l = L; l-- > 0 && status == DTRAIN_OK;) {
        gpt_layer_backward(m, l);
        if (ddp != NULL)
            status = dtrain_ddp_reduce(ddp, 1 + (int)l);
    }
    nn_embedding_backward(gpt_grad(m, WTE, 0), gpt_grad(m, WPE, 0), m->dx, tokens, m->B, m->T, C);
    return status == DTRAIN_OK && ddp != NULL ? dtrain_ddp_reduce(ddp, 0) : status;
}

/* The sequences of micro-batch `micro` of `step`: a function of seed, step and micro alone. */
static void gpt_draw(const gpt_job *job, long step, long micro, unsigned char *tokens, unsigned char *targets)
{
    size_t T = (size_t)job->flags.context, B = (size_t)job->flags.batch;
    for (size_t b = 0; b < B; b++) {
        uint64_t index = ((uint64_t)step * (uint64_t)job->flags.micro + (uint64_t)micro) * B + b;
        uint64_t random = dtrain_random_u64((uint64_t)job->flags.seed ^ 0x7465787400000000u, index);
        const unsigned char *from = job->text + random % (job->train_bytes - T);
        memcpy(tokens + b * T, from, T);
        memcpy(targets + b * T, from + 1, T);
    }
}

/* Loss over held-out sequences, dealt to the ranks and summed in their own order: the same on any number of ranks. */
static dtrain_status gpt_validate(const gpt_job *job, gpt *m, dtrain_comm *world, double *loss)
{
    size_t T = m->T, room = job->text_bytes - job->train_bytes - T, first;
    size_t mine = dtrain_shard(world, GPT_VALIDATION, dtrain_comm_rank(world), &first);
    double losses[GPT_VALIDATION];
    dtrain_status status;
    for (size_t i = first; i < first + mine; i++) {
        const unsigned char *from = job->text + job->train_bytes + i * (room - 1) / (GPT_VALIDATION - 1);
        gpt_forward(m, from, 1);
        losses[i] = nn_cross_entropy(m->logits, from + 1, T, GPT_VOCAB);
    }
    status = dtrain_all_gather(world, losses + first, losses, GPT_VALIDATION, DTRAIN_F64);
    *loss = 0;
    for (size_t i = 0; i < GPT_VALIDATION; i++)
        *loss += losses[i];
    *loss /= (double)(GPT_VALIDATION * T);
    return status;
}

static void gpt_sample(const gpt_job *job, gpt *m)
{
    size_t T = m->T;
    unsigned char *window = (unsigned char *)calloc(T + 1, 1);
    if (window == NULL)
        return;
    printf("sample: ");
    for (size_t i = 0, n = 1; i < GPT_SAMPLE; i++) {
        float *row = m->logits + (n - 1) * GPT_VOCAB, sum = 0, draw;
        int next = 0;
        window[0] = n == 1 && i == 0 ? '\n' : window[0];
        gpt_forward(m, window, 1);
        nn_cross_entropy(row, window, 1, GPT_VOCAB);
        row[window[0]] += 1.0f; /* the gradient of the first target is its probability less one */
        draw = dtrain_random_uniform((uint64_t)job->flags.seed + 99, i);
        while (next < GPT_VOCAB - 1 && (sum += row[next]) < draw)
            next++;
        putchar(isprint(next) || next == '\n' ? next : '?');
        if (n == T)
            memmove(window, window + 1, T - 1);
        else
            n++;
        window[n - 1] = (unsigned char)next;
    }
    putchar('\n');
    free(window);
}

typedef struct gpt_progress {
    int64_t started_ns, blocked_ns; /* the clock and the time blocked when training began */
    int columns;                    /* of the terminal; 0: lines for a pipe */
} gpt_progress;

static gpt_progress gpt_begin(const dtrain_comm *world)
{
    gpt_progress progress;
    const char *columns = getenv("COLUMNS");
    progress.started_ns = gpt_now_ns();
    progress.blocked_ns = dtrain_comm_blocked_ns(world);
    progress.columns = !isatty(1) ? 0 : columns != NULL && atoi(columns) > 20 ? atoi(columns) : 80;
    return progress;
}

static void gpt_show(const gpt_job *job, const gpt_progress *progress, dtrain_comm *world, long step, double loss,
                     double lr, double norm)
{
    long steps = job->flags.steps, done = step + 1, every = steps / 20 > 0 ? steps / 20 : 1;
    double seconds = (double)(gpt_now_ns() - progress->started_ns) * 1e-9 + 1e-9, tokens;
    double blocked = (double)(dtrain_comm_blocked_ns(world) - progress->blocked_ns) * 1e-9;
    char text[256], bar[21];
    int room;
    if (job->flags.quiet || (progress->columns == 0 && done % every != 0 && done != steps))
        return;
    tokens = (double)done * (double)(job->flags.micro * job->flags.batch * job->flags.context);
    snprintf(text, sizeof text, "%ld/%ld loss %.4f lr %.2e norm %.3f %.0f tokens/s comm %.1f%% left %.0f s", done,
             steps, loss, lr, norm, tokens / seconds, 100 * blocked / seconds,
             seconds / (double)done * (double)(steps - done));
    if (progress->columns == 0)
        printf("step %s\n", text);
    else {
        room = progress->columns - 4 - (int)strlen(text); /* the bar takes what the text leaves */
        room = room > 20 ? 20 : room < 0 ? 0 : room;
        for (int i = 0; i < room; i++)
            bar[i] = (long)i < (long)room * done / steps ? '#' : '.';
        bar[room] = 0;
        printf("\r%s%s%s%.*s   %s", room > 0 ? "[" : "", bar, room > 0 ? "] " : "", progress->columns - 1, text,
               done == steps ? "\n" : "");
    }
    fflush(stdout);
}

/* One step on one rank; *loss is the mean over all ranks' tokens, the same bits everywhere. */
static dtrain_status gpt_step(gpt_job *job, gpt *m, dtrain_comm *world, dtrain_ddp *ddp, long step,
                              unsigned char *tokens, double *losses, double *loss)
{
    size_t micro = (size_t)job->flags.micro, BT = m->B * m->T, first;
    size_t mine = dtrain_shard(world, micro, dtrain_comm_rank(world), &first);
    double total = 0;
    dtrain_status status = dtrain_ddp_begin(ddp, (int)mine, (double)(mine * BT));
    for (size_t i = first; i < first + mine && status == DTRAIN_OK; i++) {
        gpt_draw(job, step, (long)i, tokens, tokens + BT);
        status = gpt_micro_batch(m, ddp, tokens, tokens + BT, &losses[i]);
    }
    if (status == DTRAIN_OK)
        status = dtrain_ddp_finish(ddp, &total);
    if (status == DTRAIN_OK)
        status = dtrain_all_gather(world, losses + first, losses, micro, DTRAIN_F64);
    *loss = 0;
    for (size_t i = 0; i < micro; i++)
        *loss += losses[i];
    *loss /= total;
    return status;
}

static void gpt_result(const gpt_job *job, const gpt *m, dtrain_comm *world, double loss, double validation,
                       double seconds, int64_t blocked_ns)
{
    unsigned char digest[32];
    double tokens = (double)job->flags.steps * (double)(job->flags.micro * job->flags.batch * job->flags.context);
    dtrain_sha256(m->params.data, m->params.bytes, digest);
    printf("result weights_sha256=");
    for (int i = 0; i < 32; i++)
        printf("%02x", digest[i]);
    printf(" loss=%.6f val_loss=%.6f tokens_per_s=%.0f comm_share=%.4f peak_bytes=%zu\n", loss, validation,
           tokens / seconds, (double)blocked_ns * 1e-9 / seconds, dtrain_comm_allocator(world)->peak_bytes);
}

static dtrain_status gpt_loop(gpt_job *job, gpt *m, dtrain_comm *world, dtrain_ddp *ddp, dtrain_optimizer *optimizer,
                              unsigned char *tokens, double *losses)
{
    int root = dtrain_comm_rank(world) == 0;
    dtrain_schedule schedule;
    gpt_progress progress;
    double loss = 0, norm = 0, validation = 0, seconds;
    int64_t blocked;
    dtrain_status status = DTRAIN_OK;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = DTRAIN_SCHEDULE_COSINE;
    schedule.lr = (float)job->flags.lr;
    schedule.min_lr = schedule.lr / 10;
    schedule.total_steps = (uint64_t)job->flags.steps;
    schedule.warmup_steps = (uint64_t)job->flags.steps / 10;
    progress = gpt_begin(world);
    for (long step = 0; step < job->flags.steps && status == DTRAIN_OK; step++) {
        float lr = dtrain_schedule_lr(&schedule, (uint64_t)step);
        status = gpt_step(job, m, world, ddp, step, tokens, losses, &loss);
        if (status == DTRAIN_OK && !isfinite(loss)) { /* the same on every rank: all leave here */
            if (root)
                job->diverged = step + 1;
            return DTRAIN_OK;
        }
        if (status == DTRAIN_OK)
            status = dtrain_clip_grad_norm(m->table, GPT_PARAMS, 1.0f, &norm);
        if (status == DTRAIN_OK)
            status = dtrain_optimizer_step(optimizer, lr);
        if (status != DTRAIN_OK || !root)
            continue;
        job->losses[step] = loss;
        if (job->csv.file != NULL)
            fprintf(job->csv.file, "%ld,%.9g,%.9g,%.9g\n", step + 1, loss, (double)lr, norm);
        gpt_show(job, &progress, world, step, loss, (double)lr, norm);
    }
    seconds = (double)(gpt_now_ns() - progress.started_ns) * 1e-9;
    blocked = dtrain_comm_blocked_ns(world) - progress.blocked_ns;
    if (status == DTRAIN_OK)
        status = dtrain_comm_check_equal(world, m->params.data, m->count, DTRAIN_F32);
    if (status == DTRAIN_OK)
        status = gpt_validate(job, m, world, &validation);
    if (status == DTRAIN_OK && root) {
        if (!job->flags.quiet)
            gpt_sample(job, m);
        gpt_result(job, m, world, loss, validation, seconds, blocked);
    }
    return status;
}

static dtrain_status gpt_rank(dtrain_comm *world, void *user)
{
    gpt_job *job = (gpt_job *)user;
    gpt model;
    dtrain_ddp *ddp = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_tensor tokens, losses;
    dtrain_optimizer_desc desc;
    dtrain_allocator *allocator = dtrain_comm_allocator(world);
    size_t bytes = 2 * (size_t)(job->flags.batch * job->flags.context), micro = (size_t)job->flags.micro;
    dtrain_status status = gpt_create(&model, &job->flags, allocator);
    memset(&tokens, 0, sizeof tokens);
    memset(&losses, 0, sizeof losses);
    memset(&desc, 0, sizeof desc);
    desc.kind = strcmp(job->flags.optimizer, "sgd") == 0 ? DTRAIN_SGD : DTRAIN_ADAMW;
    desc.weight_decay = 0.1f;
    desc.beta2 = 0.95f;
    desc.momentum = 0.9f;
    if (status == DTRAIN_OK)
        status = dtrain_tensor_create(&tokens, DTRAIN_U8, 1, &bytes, allocator);
    if (status == DTRAIN_OK)
        status = dtrain_tensor_create(&losses, DTRAIN_F64, 1, &micro, allocator);
    if (status == DTRAIN_OK)
        status = dtrain_ddp_create(&ddp, world, model.table, GPT_PARAMS, NULL);
    if (status == DTRAIN_OK)
        status = dtrain_optimizer_create(&optimizer, model.table, GPT_PARAMS, &desc, allocator);
    if (status == DTRAIN_OK)
        status = gpt_loop(job, &model, world, ddp, optimizer, (unsigned char *)tokens.data, (double *)losses.data);
    dtrain_optimizer_destroy(optimizer);
    dtrain_ddp_destroy(ddp);
    dtrain_tensor_destroy(&tokens);
    dtrain_tensor_destroy(&losses);
    gpt_destroy(&model);
    return status;
}

/* ---- files and flags ---- */

static int gpt_complain(const char *what, const char *detail, const char *why)
{
    fprintf(stderr, "train_gpt: %s %s: %s\n", what, detail, why);
    return 1;
}

static int gpt_read_text(gpt_job *job)
{
    FILE *file = fopen(job->flags.text, "rb");
    size_t room = 1 << 16, got;
    if (file == NULL)
        return gpt_complain("text", job->flags.text, strerror(errno));
    job->text = (unsigned char *)malloc(room);
    while (job->text != NULL && (got = fread(job->text + job->text_bytes, 1, room - job->text_bytes, file)) > 0) {
        job->text_bytes += got;
        if (job->text_bytes == room) {
            unsigned char *larger = (unsigned char *)realloc(job->text, room *= 2);
            if (larger == NULL)
                free(job->text);
            job->text = larger;
        }
    }
    int failed = ferror(file);
    fclose(file);
    if (job->text == NULL || failed)
        return gpt_complain("text", job->flags.text, failed ? "cannot be read" : "does not fit into memory");
    job->train_bytes = job->text_bytes / 10 * 9;
    if (job->text_bytes - job->train_bytes < (size_t)job->flags.context + 2 ||
        job->train_bytes < (size_t)job->flags.context + 2)
        return gpt_complain("text", job->flags.text,
                            job->text_bytes == 0 ? "is empty"
                                                 : "is too short: a tenth of it must be longer than the context");
    return 0;
}

/* A plain file is written as PATH.new; anything else that exists, a device or a pipe, is written itself. */
static int gpt_open(gpt_output *out, const char *path)
{
    struct stat info;
    int there = stat(path, &info) == 0;
    out->path = path;
    if (there && S_ISDIR(info.st_mode))
        return gpt_complain("output", path, "is a directory");
    if (there && access(path, W_OK) != 0)
        return gpt_complain("output", path, strerror(errno));
    if (*path == 0 || strlen(path) + 5 > sizeof out->aside)
        return gpt_complain("output", path, *path == 0 ? "the name is empty" : "the name is too long");
    if (!there || S_ISREG(info.st_mode))
        snprintf(out->aside, sizeof out->aside, "%s.new", path);
    out->file = fopen(out->aside[0] != 0 ? out->aside : path, "w");
    return out->file != NULL ? 0 : gpt_complain("output", path, strerror(errno));
}

static int gpt_same_file(const gpt_output *a, const gpt_output *b)
{
    struct stat x, y;
    return fstat(fileno(a->file), &x) == 0 && fstat(fileno(b->file), &y) == 0 && S_ISREG(x.st_mode) &&
           x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static int gpt_close(gpt_output *out)
{
    int bad = ferror(out->file);
    bad |= fclose(out->file) != 0;
    out->file = NULL;
    if (bad || (out->aside[0] != 0 && rename(out->aside, out->path) != 0))
        return gpt_complain("output", out->path, "could not be written; is the disk full?");
    return 0;
}

static void gpt_discard(gpt_output *out)
{
    if (out->file == NULL)
        return;
    fclose(out->file);
    out->file = NULL;
    if (out->aside[0] != 0)
        remove(out->aside);
}

/* The smallest of 1, 2 and 5 times a power of ten that cuts `whole` into at most `parts`. */
static double gpt_tick(double whole, int parts)
{
    static const double factors[] = {1, 2, 5};
    double unit = 1e-9;
    for (;; unit *= 10)
        for (int i = 0; i < 3; i++)
            if (whole / (factors[i] * unit) <= parts || unit > 1e30)
                return factors[i] * unit;
}

/* The loss of each step as a line over a grid; values that are no numbers leave it out. */
static void gpt_draw_curve(FILE *svg, const double *losses, long steps)
{
    double high = 0, tick, across = steps > 1 ? 560.0 / (double)(steps - 1) : 0;
    long stride = 1 + steps / 2000;
    for (long i = 0; i < steps; i++)
        high = losses[i] > high && losses[i] < 1e9 ? losses[i] : high;
    high = high > 0 ? high * 1.05 : 1;
    fprintf(svg, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 640 360\" width=\"640\" height=\"360\" "
                 "font-family=\"sans-serif\" font-size=\"12\">\n<title>Training loss</title>\n"
                 "<rect width=\"640\" height=\"360\" fill=\"white\"/>\n");
    tick = gpt_tick(high, 6);
    for (int i = 0; tick * i <= high; i++)
        fprintf(svg,
                "<path d=\"M60 %.1fH620\" stroke=\"#ddd\"/><text x=\"54\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                310 - 290 * tick * i / high, 314 - 290 * tick * i / high, tick * i);
    tick = gpt_tick((double)steps, 6);
    tick = tick < 1 ? 1 : tick;
    for (int i = 1; tick * i <= (double)steps; i++)
        fprintf(
            svg,
            "<path d=\"M%.1f 310v5\" stroke=\"#888\"/><text x=\"%.1f\" y=\"328\" text-anchor=\"middle\">%.0f</text>\n",
            60 + across * (tick * i - 1), 60 + across * (tick * i - 1), tick * i);
    fprintf(
        svg,
        "<path d=\"M60 20V310H620\" fill=\"none\" stroke=\"#888\"/>\n"
        "<text x=\"340\" y=\"348\" text-anchor=\"middle\">step</text>\n"
        "<text x=\"18\" y=\"165\" text-anchor=\"middle\" transform=\"rotate(-90 18 165)\">loss, nats a byte</text>\n"
        "<polyline fill=\"none\" stroke=\"#06c\" stroke-width=\"1.5\" points=\"");
    for (long i = 0; i < steps; i += stride)
        if (losses[i] >= 0 && losses[i] <= high)
            fprintf(svg, "%.1f,%.1f ", 60 + across * (double)i, 310 - 290 * losses[i] / high);
    fprintf(svg, "\"/>\n</svg>\n");
}

static int gpt_number(const char *flag, const char *text, double least, double most, double *value)
{
    char *end;
    if (text == NULL)
        return gpt_complain("flag", flag, "needs a value");
    *value = strtod(text, &end);
    if (end == text || *end != 0 || !(*value >= least && *value <= most)) {
        fprintf(stderr, "train_gpt: flag %s %s: needs a number from %g to %g\n", flag, text, least, most);
        return 1;
    }
    return 0;
}

static int gpt_check_size(const gpt_flags *f)
{
    double needed = gpt_bytes(f) * (double)f->ranks, memory = (double)sysconf(_SC_PHYS_PAGES);
    memory *= (double)sysconf(_SC_PAGESIZE);
    memory = memory > 0 ? memory : (double)(SIZE_MAX / 64); /* not told: what can be addressed */
    if (needed <= memory)
        return 0;
    fprintf(stderr,
            "train_gpt: this model is too large: %ld ranks need about %.3g GB of memory, this machine has %.3g\n",
            f->ranks, needed * 1e-9, memory * 1e-9);
    return 1;
}

static int gpt_parse(gpt_flags *f, int argc, char **argv)
{
    struct {
        const char *name;
        long *value;
        double least, most;
    } numbers[] = {
        {"--layers", &f->layers, 1, 1000},    {"--heads", &f->heads, 1, 1000},  {"--width", &f->width, 1, 65536},
        {"--context", &f->context, 1, 65536}, {"--batch", &f->batch, 1, 65536}, {"--micro", &f->micro, 1, 65536},
        {"--steps", &f->steps, 1, 1e9},       {"--seed", &f->seed, 0, 4e9},     {"--ranks", &f->ranks, 1, 1024}};
    struct {
        const char *name;
        const char **value;
    } texts[] = {{"--optimizer", &f->optimizer}, {"--text", &f->text}, {"--csv", &f->csv}, {"--svg", &f->svg}};
    for (int i = 1; i < argc; i++) {
        size_t n = sizeof numbers / sizeof numbers[0], t = sizeof texts / sizeof texts[0], k;
        double value;
        for (k = 0; k < n && strcmp(argv[i], numbers[k].name) != 0; k++)
            continue;
        if (k < n) {
            if (gpt_number(argv[i], argv[i + 1], numbers[k].least, numbers[k].most, &value) != 0)
                return 1;
            if (value != (double)(long)value)
                return gpt_complain("flag", argv[i], "needs a whole number");
            *numbers[k].value = (long)value;
            i++;
            continue;
        }
        for (k = 0; k < t && strcmp(argv[i], texts[k].name) != 0; k++)
            continue;
        if (k < t && argv[i + 1] == NULL)
            return gpt_complain("flag", argv[i], "needs a value");
        if (k < t)
            *texts[k].value = argv[++i];
        else if (strcmp(argv[i], "--lr") == 0) {
            if (gpt_number("--lr", argv[i + 1], 0, 1000, &f->lr) != 0)
                return 1;
            i++;
        } else if (strcmp(argv[i], "--quiet") == 0)
            f->quiet = 1;
        else
            return gpt_complain("flag", argv[i], "is unknown; --help lists them");
    }
    if (f->width % f->heads != 0)
        return gpt_complain("flag", "--width", "must be a multiple of --heads");
    if (strcmp(f->optimizer, "adamw") != 0 && strcmp(f->optimizer, "sgd") != 0)
        return gpt_complain("optimizer", f->optimizer, "is unknown; adamw and sgd are possible");
    return gpt_check_size(f);
}

static gpt_flags gpt_defaults(void)
{
    gpt_flags f;
    memset(&f, 0, sizeof f);
    f.layers = f.heads = 4;
    f.width = f.context = 128;
    f.batch = f.micro = 8;
    f.steps = 100;
    f.lr = 1e-3;
    f.seed = f.ranks = 1;
    f.optimizer = "adamw";
    f.text = "dtrain.h";
    f.csv = "build/train_gpt.csv";
    f.svg = "build/train_gpt.svg";
    return f;
}

/* Joins the group of processes that the environment describes, if it describes one. */
static int gpt_join(gpt_job *job)
{
    dtrain_status status = dtrain_comm_create(&job->world, NULL);
    if (status != DTRAIN_OK) {
        fprintf(stderr, "train_gpt: %s: %s\n", dtrain_status_name(status), dtrain_last_error());
        return 1;
    }
    if (dtrain_comm_size(job->world) == 1) {
        dtrain_comm_destroy(job->world);
        job->world = NULL;
    } else if (job->flags.ranks > 1)
        return gpt_complain("flag", "--ranks", "is for threads; a launcher has started processes already");
    return 0;
}

static int gpt_run(gpt_job *job)
{
    dtrain_status status =
        job->world != NULL ? gpt_rank(job->world, job) : dtrain_run_threads((int)job->flags.ranks, gpt_rank, job, NULL);
    if (status == DTRAIN_OK && job->diverged > 0)
        fprintf(stderr, "train_gpt: the loss of step %ld is not finite: a lower --lr than %g may help\n", job->diverged,
                job->flags.lr);
    if (status == DTRAIN_OK)
        return job->diverged > 0;
    fprintf(stderr, "train_gpt: %s: %s\n", dtrain_status_name(status), dtrain_last_error());
    return 1;
}

static int gpt_help(void)
{
    puts("train_gpt trains a byte-level GPT on threads, or on the processes that a launcher such as dtrun starts.\n"
         "  --layers 4 --heads 4 --width 128 --context 128   the model\n"
         "  --batch 8        sequences a micro-batch\n"
         "  --micro 8        micro-batches a step, over all ranks together\n"
         "  --steps 100 --lr 1e-3 --optimizer adamw|sgd --seed 1\n"
         "  --ranks 1        threads that share the work\n"
         "  --text dtrain.h  what to learn; its last tenth is held out\n"
         "  --csv build/train_gpt.csv --svg build/train_gpt.svg   the loss of each step\n"
         "  --quiet          only the result");
    return 0;
}

static int gpt_open_outputs(gpt_job *job)
{
    if (dtrain_comm_rank(job->world) != 0)
        return 0; /* rank 0 writes */
    if (gpt_open(&job->csv, job->flags.csv) != 0 || gpt_open(&job->svg, job->flags.svg) != 0)
        return 1;
    if (gpt_same_file(&job->csv, &job->svg))
        return gpt_complain("output", job->flags.svg, "is the file of --csv too");
    job->losses = (double *)calloc((size_t)job->flags.steps, sizeof(double));
    if (job->losses == NULL)
        return gpt_complain("flag", "--steps", "needs more memory than there is");
    if (fprintf(job->csv.file, "step,loss,lr,norm\n") < 0 || fflush(job->csv.file) != 0)
        return gpt_complain("output", job->flags.csv, strerror(errno));
    return 0;
}

static int gpt_main(int argc, char **argv)
{
    gpt_job job;
    int bad;
    memset(&job, 0, sizeof job);
    job.flags = gpt_defaults();
    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return gpt_help();
    bad = gpt_parse(&job.flags, argc, argv) || gpt_read_text(&job) || gpt_join(&job) || gpt_open_outputs(&job) ||
          gpt_run(&job);
    if (!bad && job.svg.file != NULL) {
        gpt_draw_curve(job.svg.file, job.losses, job.flags.steps);
        bad = gpt_close(&job.csv) | gpt_close(&job.svg);
        if (fflush(stdout) != 0 || ferror(stdout))
            bad = gpt_complain("output", "of the result", "could not be written");
    }
    gpt_discard(&job.csv);
    gpt_discard(&job.svg);
    dtrain_comm_destroy(job.world);
    free(job.losses);
    free(job.text);
    return bad;
}

#ifndef TRAIN_GPT_NO_MAIN
int main(int argc, char **argv)
{
    return gpt_main(argc, argv);
}
#endif

/* The end of what train_gpt --ranks 4 --steps 200 --batch 4 prints on two busy cores, less its sample of text:
 *
 * step 190/200 loss 2.0479 lr 1.08e-04 norm 0.751 12727 tokens/s comm 7.2% left 3 s
 * step 200/200 loss 2.0548 lr 1.00e-04 norm 0.772 12620 tokens/s comm 7.0% left 0 s
 * result weights_sha256=4ecc593d6d9900fcf6c32e07705b982029f42247bdff26fea87ec9c00896a72f loss=2.054758
 * val_loss=2.256497 tokens_per_s=12620 comm_share=0.0696 peak_bytes=165938104
 */
