/* The model of the pipeline tests: pairs of a linear and a tanh layer, of widths that differ, and a loss; cut into
 * stages of whole pairs. Every second linear layer has its weights' gradients apart; tanh saves its slope. */
#ifndef DTRAIN_TEST_PIPELINE_MODEL_H
#define DTRAIN_TEST_PIPELINE_MODEL_H
#include <math.h>
#include <pthread.h>

#define PAIRS 24
#define ROWS 4 /* of a micro-batch, at most */
#define WIDEST 7
#define PAIR_FLOATS ((WIDEST + 1) * WIDEST)
#define MICRO 9

static size_t width(int pair) /* of its input; that of PAIRS: of the whole output */
{
    static const size_t widths[] = {5, 7, 4, 6, 3};
    return widths[pair % 5];
}

static float weight(int pair, size_t element)
{
    return 0.6f * dtrain_random_normal(3 + (uint64_t)pair, element);
}

/* ---- micro-batches ---- */

typedef struct batch {
    int number;
    float x[ROWS * WIDEST], target[ROWS * WIDEST], loss;
    int losses; /* how often it was set */
    dtrain_tensor input;
} batch;

static size_t rows_of(int number)
{
    return (size_t)(1 + (number + 2) % ROWS);
}

static void batch_init(batch *b, int number)
{
    size_t shape[2] = {rows_of(number), width(0)};
    memset(b, 0, sizeof *b);
    b->number = number;
    for (size_t i = 0; i < ROWS * WIDEST; i++) {
        b->x[i] = dtrain_random_normal(50 + (uint64_t)number, i);
        b->target[i] = dtrain_random_normal(1000 + (uint64_t)number, i);
    }
    CHECK_EQ(dtrain_tensor_view(&b->input, DTRAIN_F32, 2, shape, b->x), DTRAIN_OK);
}

/* ---- callbacks ---- */

typedef struct stage stage;

typedef struct layer_user {
    int pair;
    stage *of;
} layer_user;

/* One stage: its layers, parameters and gradients, and which callback of which pair is to fail, or to kill. */
struct stage {
    int first, pairs, last; /* pairs; last: the loss is here */
    dtrain_param table[2 * PAIRS];
    char names[2 * PAIRS][8];
    const char *params[2 * PAIRS];
    dtrain_layer layers[2 * PAIRS + 1];
    layer_user users[2 * PAIRS + 1];
    float weights[PAIRS * PAIR_FLOATS], grads[PAIRS * PAIR_FLOATS];
    dtrain_module *module;
    dtrain_fsdp *fsdp;
    int fails_pair, fails_after; /* of the linear layers; so many calls later */
    const char *fails_in;
    dtrain_comm *side; /* what fails is a barrier of these; NULL: the callback alone */
    void (*on_call)(const char *what, int pair);
    int calls;
};

static dtrain_status verdict(const layer_user *u, const char *what)
{
    stage *s = u->of;
    s->calls++;
    if (s->on_call != NULL)
        s->on_call(what, u->pair);
    if (s->fails_in == NULL || s->fails_pair != u->pair || strcmp(s->fails_in, what) != 0 || s->fails_after-- > 0)
        return DTRAIN_OK;
    s->fails_in = NULL;
    return s->side != NULL ? dtrain_barrier(s->side) : DTRAIN_ERR_IO;
}

static dtrain_status linear_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved)
{
    const layer_user *u = (const layer_user *)user;
    (void)saved;
    CHECK_EQ(input->shape[1], width(u->pair));
    output->shape[1] = width(u->pair + 1);
    return verdict(u, "shape");
}

static dtrain_status linear_forward(void *user, const dtrain_layer_context *c)
{
    const layer_user *u = (const layer_user *)user;
    size_t in = width(u->pair), out = width(u->pair + 1);
    const float *x = (const float *)c->input.data, *w = c->params[0];
    for (size_t r = 0; r < c->input.shape[0]; r++)
        for (size_t j = 0; j < out; j++) {
            float sum = c->params[1][j];
            for (size_t i = 0; i < in; i++)
                sum += x[r * in + i] * w[i * out + j];
            ((float *)c->output.data)[r * out + j] = sum;
        }
    return verdict(u, "forward");
}

static dtrain_status linear_inputs(void *user, const dtrain_layer_context *c)
{
    const layer_user *u = (const layer_user *)user;
    size_t in = width(u->pair), out = width(u->pair + 1);
    const float *d = (const float *)c->d_output.data, *w = c->params[0];
    for (size_t r = 0; c->d_input.data != NULL && r < c->input.shape[0]; r++)
        for (size_t i = 0; i < in; i++) {
            float sum = 0;
            for (size_t j = 0; j < out; j++)
                sum += d[r * out + j] * w[i * out + j];
            ((float *)c->d_input.data)[r * in + i] = sum;
        }
    return verdict(u, "backward");
}

static dtrain_status linear_weights(void *user, const dtrain_layer_context *c)
{
    const layer_user *u = (const layer_user *)user;
    size_t in = width(u->pair), out = width(u->pair + 1);
    const float *d = (const float *)c->d_output.data, *x = (const float *)c->input.data;
    for (size_t r = 0; r < c->input.shape[0]; r++)
        for (size_t j = 0; j < out; j++) {
            c->grads[1][j] += d[r * out + j];
            for (size_t i = 0; i < in; i++)
                c->grads[0][i * out + j] += x[r * in + i] * d[r * out + j];
        }
    return verdict(u, "backward_weights");
}

static dtrain_status linear_both(void *user, const dtrain_layer_context *c)
{
    dtrain_status status = linear_inputs(user, c);
    return status == DTRAIN_OK ? linear_weights(user, c) : status;
}

static dtrain_status tanh_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved)
{
    (void)user, (void)output;
    *saved = input->count * sizeof(float);
    return DTRAIN_OK;
}

static dtrain_status tanh_forward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    for (size_t i = 0; i < c->input.count; i++) {
        float y = tanhf(((const float *)c->input.data)[i]);
        ((float *)c->output.data)[i] = y;
        ((float *)c->saved)[i] = 1 - y * y;
    }
    return DTRAIN_OK;
}

static dtrain_status tanh_backward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    for (size_t i = 0; i < c->input.count; i++)
        ((float *)c->d_input.data)[i] = ((const float *)c->d_output.data)[i] * ((const float *)c->saved)[i];
    return DTRAIN_OK;
}

static dtrain_status loss_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved)
{
    (void)user, (void)input, (void)saved;
    output->ndim = 0;
    return DTRAIN_OK;
}

static dtrain_status loss_forward(void *user, const dtrain_layer_context *c)
{
    batch *b = (batch *)c->batch;
    const float *x = (const float *)c->input.data;
    float sum = 0;
    (void)user;
    CHECK_EQ(c->input.shape[0], rows_of(b->number));
    for (size_t i = 0; i < c->input.count; i++)
        sum += 0.5f * (x[i] - b->target[i]) * (x[i] - b->target[i]);
    b->loss = ((float *)c->output.data)[0] = sum;
    b->losses++;
    return DTRAIN_OK;
}

static dtrain_status loss_backward(void *user, const dtrain_layer_context *c)
{
    const batch *b = (const batch *)c->batch;
    (void)user;
    CHECK(c->d_output.data == NULL);
    for (size_t i = 0; i < c->input.count; i++)
        ((float *)c->d_input.data)[i] = ((const float *)c->input.data)[i] - b->target[i];
    return DTRAIN_OK;
}

/* ---- stages ---- */

static void stage_pair(stage *s, int k, int owns, int recompute)
{
    int pair = s->first + k;
    dtrain_layer *linear = &s->layers[2 * k], *tanh_layer = linear + 1;
    dtrain_param *w = &s->table[2 * k], *b = w + 1;
    for (int i = 0; i < 2; i++) {
        snprintf(s->names[2 * k + i], sizeof s->names[0], "%c%d", i == 0 ? 'w' : 'b', pair);
        s->params[2 * k + i] = s->names[2 * k + i];
        w[i].name = s->names[2 * k + i];
        w[i].dtype = DTRAIN_F32;
        w[i].unit = k;
        w[i].data = owns ? s->weights + k * PAIR_FLOATS + i * WIDEST * WIDEST : NULL;
        w[i].grad = owns ? s->grads + k * PAIR_FLOATS + i * WIDEST * WIDEST : NULL;
        s->users[2 * k + i].pair = pair;
        s->users[2 * k + i].of = s;
        linear[i].user = &s->users[2 * k + i];
    }
    w->shape[0] = width(pair);
    w->shape[1] = b->shape[0] = width(pair + 1);
    linear->name = w->name;
    linear->params = &s->params[2 * k];
    linear->param_count = 2;
    linear->unit = k;
    linear->shape = linear_shape;
    linear->forward = linear_forward;
    linear->backward = pair % 2 ? linear_both : linear_inputs;
    linear->backward_weights = pair % 2 ? NULL : linear_weights;
    tanh_layer->name = "tanh";
    tanh_layer->shape = tanh_shape;
    tanh_layer->forward = tanh_forward;
    tanh_layer->backward = tanh_backward;
    tanh_layer->recompute = recompute;
}

/* owns: parameters are in memory of the stage's. */
static stage *stage_create(int number, int stages, int owns, int recompute, int places)
{
    int begins[PAIRS + 1];
    dtrain_module_desc desc;
    stage *s = (stage *)calloc(1, sizeof *s);
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = places;
    CHECK_EQ(dtrain_split_stages(NULL, PAIRS, stages, begins), DTRAIN_OK);
    s->first = begins[number];
    s->pairs = begins[number + 1] - begins[number];
    s->last = number == stages - 1;
    for (int k = 0; k < s->pairs; k++)
        stage_pair(s, k, owns, recompute);
    for (int k = 0; k < s->pairs; k++)
        for (size_t e = 0; e < PAIR_FLOATS; e++)
            s->weights[(size_t)k * PAIR_FLOATS + e] = weight(s->first + k, e);
    dtrain_layer *loss = &s->layers[2 * s->pairs];
    loss->name = "loss";
    loss->shape = loss_shape;
    loss->forward = loss_forward;
    loss->backward = loss_backward;
    CHECK_EQ(dtrain_module_create(&s->module, s->layers, (size_t)(2 * s->pairs + s->last), s->table,
                                  (size_t)(2 * s->pairs), &desc),
             DTRAIN_OK);
    return s;
}

static void stage_destroy(stage *s)
{
    dtrain_module_destroy(s->module);
    dtrain_fsdp_destroy(s->fsdp);
    free(s);
}

/* ---- the whole model on one rank, one micro-batch after the other ---- */

typedef struct reference {
    float grads[PAIRS * PAIR_FLOATS], loss[MICRO];
} reference;

/* Micro-batches first, first + stride, ...; count of them. */
static void reference_run(reference *r, int first, int stride, int count)
{
    stage *s = stage_create(0, 1, 1, 0, 1);
    for (int i = 0; i < count; i++) {
        dtrain_tensor output;
        batch b;
        batch_init(&b, first + i * stride);
        CHECK_EQ(dtrain_fsdp_forward(NULL, s->module, 0, &b.input, &b, &output), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_backward(NULL, s->module, 0, NULL, NULL), DTRAIN_OK);
        r->loss[i] = b.loss;
    }
    memcpy(r->grads, s->grads, sizeof r->grads);
    stage_destroy(s);
}

/* Of 1 to MICRO micro-batches, 0 to count - 1: computed once. */
static reference references[MICRO + 1];

static void references_fill(void)
{
    for (int count = 1; count <= MICRO; count++)
        reference_run(&references[count], 0, 1, count);
}

static const reference *reference_of(int count)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, references_fill);
    return &references[count];
}

/* ---- one rank of a pipeline ---- */

#define CHUNKS 3

typedef struct setting {
    dtrain_pipeline_schedule schedule;
    int chunks, micro, recompute;
} setting;

typedef struct rank_of_pipeline {
    stage *stages[CHUNKS];
    dtrain_module *modules[CHUNKS];
    dtrain_fsdp *fsdps[CHUNKS];
    batch batches[MICRO];
    void *pointers[MICRO];
    dtrain_tensor inputs[MICRO];
    dtrain_pipeline *pipeline;
    int rank, chunks, micro;
} rank_of_pipeline;

static void pipeline_desc(const setting *s, rank_of_pipeline *r, dtrain_pipeline_desc *desc)
{
    memset(desc, 0, sizeof *desc);
    desc->schedule = s->schedule;
    desc->chunks = s->chunks;
    desc->micro_batches = s->micro;
    desc->modules = r->modules;
}

/* How many micro-batches a rank holds of each chunk at most: from a plan. */
static int places_of(const setting *s, int ranks, int rank)
{
    dtrain_pipeline_plan_desc desc;
    dtrain_pipeline_plan *plan = NULL;
    memset(&desc, 0, sizeof desc);
    desc.schedule = s->schedule;
    desc.ranks = ranks;
    desc.micro_batches = s->micro;
    desc.chunks = s->chunks;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_OK);
    int peak = plan->peak[rank];
    dtrain_pipeline_plan_destroy(plan);
    return peak;
}

/* stage_group: FSDP's, with a desc; NULL: none. Micro-batches are first, first + stride, ... */
static rank_of_pipeline *rank_create(dtrain_comm *group, const setting *s, dtrain_comm *stage_group,
                                     const dtrain_fsdp_desc *fsdp_desc, int first, int stride)
{
    rank_of_pipeline *r = (rank_of_pipeline *)calloc(1, sizeof *r);
    int ranks = dtrain_comm_size(group);
    dtrain_pipeline_desc desc;
    r->rank = dtrain_comm_rank(group);
    r->chunks = s->chunks > 0 ? s->chunks : s->schedule == DTRAIN_PIPELINE_INTERLEAVED ? 2 : 1;
    r->micro = s->micro > 0 ? s->micro : 1;
    for (int c = 0; c < r->chunks; c++) {
        stage *made = stage_create(c * ranks + r->rank, r->chunks * ranks, stage_group == NULL, s->recompute,
                                   places_of(s, ranks, r->rank));
        r->stages[c] = made;
        r->modules[c] = made->module;
        if (stage_group == NULL)
            continue;
        CHECK_EQ(dtrain_fsdp_create(&made->fsdp, stage_group, made->table, (size_t)(2 * made->pairs), fsdp_desc),
                 DTRAIN_OK);
        r->fsdps[c] = made->fsdp;
        for (int p = 0; p < 2 * made->pairs; p++)
            CHECK_EQ(dtrain_fsdp_set(made->fsdp, made->names[p],
                                     made->weights + (p / 2) * PAIR_FLOATS + (p % 2) * WIDEST * WIDEST, 0),
                     DTRAIN_OK);
    }
    for (int i = 0; i < r->micro; i++) {
        batch_init(&r->batches[i], first + i * stride);
        r->pointers[i] = &r->batches[i];
        r->inputs[i] = r->batches[i].input;
    }
    pipeline_desc(s, r, &desc);
    desc.fsdps = stage_group != NULL ? r->fsdps : NULL;
    if (dtrain_pipeline_create(&r->pipeline, group, &desc) != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", r->rank, dtrain_last_error());
    return r;
}

static dtrain_status rank_agree(rank_of_pipeline *r)
{
    return dtrain_pipeline_agree(r->pipeline, r->rank == 0 ? r->inputs : NULL);
}

static dtrain_status rank_step(rank_of_pipeline *r)
{
    return dtrain_pipeline_step(r->pipeline, r->rank == 0 ? r->inputs : NULL, r->pointers);
}

static void rank_destroy(rank_of_pipeline *r)
{
    dtrain_pipeline_destroy(r->pipeline);
    for (int c = 0; c < r->chunks; c++)
        stage_destroy(r->stages[c]);
    free(r);
}

/* Gradients are zeroed before a step, and compared after it; losses too. */
__attribute__((unused)) static void rank_clear(rank_of_pipeline *r)
{
    for (int c = 0; c < r->chunks; c++)
        memset(r->stages[c]->grads, 0, sizeof r->stages[c]->grads);
    for (int i = 0; i < r->micro; i++)
        r->batches[i].loss = -1;
}

__attribute__((unused)) static void rank_check(const rank_of_pipeline *r, const reference *expected)
{
    for (int c = 0; c < r->chunks; c++) {
        const stage *s = r->stages[c];
        for (int k = 0; k < s->pairs; k++)
            if (memcmp(s->grads + k * PAIR_FLOATS, expected->grads + (s->first + k) * PAIR_FLOATS,
                       PAIR_FLOATS * sizeof(float)) != 0)
                TEST_FAIL("rank %d: gradients of pair %d differ", r->rank, s->first + k);
        for (int i = 0; s->last && i < r->micro; i++)
            if (r->batches[i].loss != expected->loss[i])
                TEST_FAIL("loss %d is %.9g, expected %.9g", i, (double)r->batches[i].loss, (double)expected->loss[i]);
    }
}

#endif
