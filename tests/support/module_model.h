/* The model of the module tests: odd sizes, a stacked, a frozen and a tied parameter; layers that save, a layer whose
 * weights' gradients are apart, two layers of one unit; callbacks that fail where a test says so. */
#ifndef DTRAIN_TEST_MODULE_MODEL_H
#define DTRAIN_TEST_MODULE_MODEL_H
#include <math.h>

#define IN 5
#define HIDDEN 7
#define DEEP 2
#define ROWS 4 /* of a micro-batch, at most */
#define MOST 16

enum { GAIN, W_IN, B_IN, W_DEEP, B_DEEP, W_OUT, B_OUT, SHIFT, PARAMS };
enum { SCALE, FIRST, SOFT_1, DEEP_1, SOFT_2, DEEP_2, SOFT_3, LAST, ADD, UNSCALE, LOSS, LAYERS };

static const dtrain_param table_of_model[PARAMS] = {
    {"gain", DTRAIN_F32, {IN}, 0, 0, 0, 0, 0, 1, NULL, NULL, NULL, NULL, 0},
    {"w_in", DTRAIN_F32, {IN, HIDDEN}, 0, 0, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    {"b_in", DTRAIN_F32, {HIDDEN}, 0, 0, 1, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    {"w_deep", DTRAIN_F32, {DEEP, HIDDEN, HIDDEN}, 0, 1, 2, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    {"b_deep", DTRAIN_F32, {DEEP, HIDDEN}, 0, 1, 2, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    {"w_out", DTRAIN_F32, {HIDDEN, IN}, 0, 0, 4, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    {"b_out", DTRAIN_F32, {IN}, 0, 0, 4, 0, 0, 0, NULL, NULL, NULL, NULL, 0},
    {"shift", DTRAIN_F32, {IN}, 0, 0, 4, 0, 1, 0, NULL, NULL, NULL, NULL, 0},
};

static size_t offsets(size_t *begin)
{
    size_t all = 0;
    for (int p = 0; p < PARAMS; p++) {
        begin[p] = all;
        all += dtrain_param_elements(&table_of_model[p]);
    }
    return all;
}

#define WEIGHTS 204 /* 5 + 35 + 7 + 98 + 14 + 35 + 5 + 5 */

static float weight(size_t element)
{
    return 0.5f * dtrain_random_normal(3, element);
}

/* ---- the arithmetic of layers ---- */

static void linear(const float *x, const float *w, const float *b, float *y, size_t rows, size_t in, size_t out)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < out; j++) {
            float sum = b[j];
            for (size_t i = 0; i < in; i++)
                sum += x[r * in + i] * w[i * out + j];
            y[r * out + j] = sum;
        }
}

static void scale(const float *x, const float *gain, float *y, size_t rows)
{
    for (size_t i = 0; i < rows * IN; i++)
        y[i] = x[i] * gain[i % IN];
}

static void soft(const float *x, float *y, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] = x[i] / (1.0f + fabsf(x[i]));
}

static float loss_of(const float *x, const float *target, size_t count)
{
    float sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += 0.5f * (x[i] - target[i]) * (x[i] - target[i]);
    return sum;
}

/* ---- callbacks ---- */

/* What a layer's callbacks know, and which of them is to fail. */
typedef struct layer_user {
    size_t in, out;
    dtrain_comm *world; /* where a rank is to fail */
    int fails_on, forwards, backwards;
    const char *fails_in;
} layer_user;

static dtrain_status verdict(const layer_user *user, const char *what)
{
    if (user->fails_in != NULL && dtrain_comm_rank(user->world) == user->fails_on && strcmp(user->fails_in, what) == 0)
        return DTRAIN_ERR_IO;
    return DTRAIN_OK;
}

static void check_context(const dtrain_layer_context *c)
{
    CHECK_EQ((uintptr_t)c->output.data % 64, 0);
    CHECK_EQ((uintptr_t)c->saved % 64, 0);
    CHECK(c->input.data != NULL);
}

static const float *in_of(const dtrain_layer_context *c)
{
    return (const float *)c->input.data;
}

static float *out_of(const dtrain_layer_context *c)
{
    return (float *)c->output.data;
}

static dtrain_status linear_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved_bytes)
{
    layer_user *u = (layer_user *)user;
    CHECK_EQ(input->shape[1], u->in);
    CHECK_EQ(*saved_bytes, 0);
    output->shape[1] = u->out;
    return verdict(u, "shape");
}

static dtrain_status linear_forward(void *user, const dtrain_layer_context *c)
{
    layer_user *u = (layer_user *)user;
    u->forwards++;
    check_context(c);
    CHECK_EQ(c->output.count, c->input.shape[0] * u->out);
    linear(in_of(c), c->params[0], c->params[1], out_of(c), c->input.shape[0], u->in, u->out);
    return verdict(u, "forward");
}

static dtrain_status linear_inputs(void *user, const dtrain_layer_context *c)
{
    layer_user *u = (layer_user *)user;
    const float *d = (const float *)c->d_output.data;
    float *dx = (float *)c->d_input.data;
    u->backwards++;
    for (size_t r = 0; r < c->input.shape[0]; r++)
        for (size_t i = 0; i < u->in; i++) {
            float sum = 0;
            for (size_t j = 0; j < u->out; j++)
                sum += d[r * u->out + j] * c->params[0][i * u->out + j];
            dx[r * u->in + i] = sum;
        }
    return verdict(u, "backward");
}

static dtrain_status linear_weights(void *user, const dtrain_layer_context *c)
{
    layer_user *u = (layer_user *)user;
    const float *d = (const float *)c->d_output.data;
    for (size_t r = 0; r < c->input.shape[0]; r++)
        for (size_t j = 0; j < u->out; j++) {
            c->grads[1][j] += d[r * u->out + j];
            for (size_t i = 0; i < u->in; i++)
                c->grads[0][i * u->out + j] += in_of(c)[r * u->in + i] * d[r * u->out + j];
        }
    return verdict(u, "backward_weights");
}

static dtrain_status linear_both(void *user, const dtrain_layer_context *c)
{
    dtrain_status status = linear_inputs(user, c);
    return status == DTRAIN_OK ? linear_weights(user, c) : status;
}

static dtrain_status scale_forward(void *user, const dtrain_layer_context *c)
{
    check_context(c);
    scale(in_of(c), c->params[0], out_of(c), c->input.shape[0]);
    return verdict((layer_user *)user, "forward");
}

static dtrain_status scale_backward(void *user, const dtrain_layer_context *c)
{
    const float *d = (const float *)c->d_output.data;
    for (size_t i = 0; i < c->input.count; i++) {
        c->grads[0][i % IN] += in_of(c)[i] * d[i];
        if (c->d_input.data != NULL)
            ((float *)c->d_input.data)[i] = d[i] * c->params[0][i % IN];
    }
    return verdict((layer_user *)user, "backward");
}

static dtrain_status scale_inputs(void *user, const dtrain_layer_context *c)
{
    (void)user;
    for (size_t i = 0; i < c->input.count; i++)
        ((float *)c->d_input.data)[i] = ((const float *)c->d_output.data)[i] * c->params[0][i % IN];
    return DTRAIN_OK;
}

static dtrain_status scale_weights(void *user, const dtrain_layer_context *c)
{
    (void)user;
    for (size_t i = 0; i < c->input.count; i++)
        c->grads[0][i % IN] += in_of(c)[i] * ((const float *)c->d_output.data)[i];
    return DTRAIN_OK;
}

static dtrain_status soft_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved_bytes)
{
    (void)user, (void)output;
    *saved_bytes = input->count * sizeof(float);
    return DTRAIN_OK;
}

static dtrain_status soft_forward(void *user, const dtrain_layer_context *c)
{
    float *slope = (float *)c->saved;
    (void)user;
    CHECK_EQ(c->params == NULL, 0);
    soft(in_of(c), out_of(c), c->input.count);
    for (size_t i = 0; i < c->input.count; i++)
        slope[i] = 1.0f / ((1.0f + fabsf(in_of(c)[i])) * (1.0f + fabsf(in_of(c)[i])));
    return DTRAIN_OK;
}

static dtrain_status soft_backward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    for (size_t i = 0; i < c->input.count; i++)
        ((float *)c->d_input.data)[i] = ((const float *)c->d_output.data)[i] * ((const float *)c->saved)[i];
    return DTRAIN_OK;
}

static dtrain_status add_forward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    for (size_t i = 0; i < c->input.count; i++)
        out_of(c)[i] = in_of(c)[i] + c->params[0][i % IN];
    return DTRAIN_OK;
}

static dtrain_status add_backward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    CHECK(c->grads[0] == NULL);
    memcpy(c->d_input.data, c->d_output.data, c->d_input.bytes);
    return DTRAIN_OK;
}

static dtrain_status loss_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved_bytes)
{
    (void)user;
    output->ndim = 1;
    output->shape[0] = 1;
    *saved_bytes = input->bytes;
    return DTRAIN_OK;
}

static dtrain_status loss_forward(void *user, const dtrain_layer_context *c)
{
    const float *target = (const float *)c->batch;
    (void)user;
    for (size_t i = 0; i < c->input.count; i++)
        ((float *)c->saved)[i] = in_of(c)[i] - target[i];
    out_of(c)[0] = loss_of(in_of(c), target, c->input.count);
    return DTRAIN_OK;
}

static dtrain_status loss_backward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    CHECK(c->d_output.data == NULL);
    CHECK(((const float *)c->saved)[0] == in_of(c)[0] - ((const float *)c->batch)[0]);
    memcpy(c->d_input.data, c->saved, c->d_input.bytes);
    return DTRAIN_OK;
}

/* ---- the model ---- */

typedef struct model {
    layer_user users[LAYERS];
    dtrain_layer layers[LAYERS];
    dtrain_param table[PARAMS];
    size_t begin[PARAMS];
    float weights[WEIGHTS], grads[WEIGHTS]; /* without FSDP */
    dtrain_module *module;
} model;

static void layer_init(model *m, int i, const char *name, const char *const *params, size_t count, int unit)
{
    m->layers[i].name = name;
    m->layers[i].params = params;
    m->layers[i].param_count = count;
    m->layers[i].unit = unit;
    m->layers[i].user = &m->users[i];
}

static void linear_init(model *m, int i, const char *name, const char *const *params, int unit, size_t in, size_t out)
{
    layer_init(m, i, name, params, 2, unit);
    m->users[i].in = in;
    m->users[i].out = out;
    m->layers[i].shape = linear_shape;
    m->layers[i].forward = linear_forward;
    m->layers[i].backward = i == FIRST ? linear_inputs : linear_both;
    m->layers[i].backward_weights = i == FIRST ? linear_weights : NULL;
}

static void model_layers(model *m)
{
    static const char *const gain[] = {"gain"}, *const first[] = {"w_in", "b_in"}, *const deep[] = {"w_deep", "b_deep"},
                             *const last[] = {"w_out", "b_out"}, *const shift[] = {"shift"};
    layer_init(m, SCALE, "scale", gain, 1, 0);
    linear_init(m, FIRST, "first", first, 1, IN, HIDDEN);
    linear_init(m, DEEP_1, "deep 1", deep, 2, HIDDEN, HIDDEN);
    linear_init(m, DEEP_2, "deep 2", deep, 3, HIDDEN, HIDDEN);
    linear_init(m, LAST, "last", last, 4, HIDDEN, IN);
    layer_init(m, ADD, "add", shift, 1, 4);
    layer_init(m, UNSCALE, "unscale", gain, 1, 0);
    layer_init(m, LOSS, "loss", NULL, 0, 0);
    for (int i = SOFT_1; i <= SOFT_3; i += 2) {
        layer_init(m, i, "soft", NULL, 0, 0);
        m->layers[i].shape = soft_shape;
        m->layers[i].forward = soft_forward;
        m->layers[i].backward = soft_backward;
    }
    m->layers[SCALE].forward = m->layers[UNSCALE].forward = scale_forward;
    m->layers[SCALE].backward = m->layers[UNSCALE].backward = scale_backward;
    m->layers[ADD].forward = add_forward;
    m->layers[ADD].backward = add_backward;
    m->layers[LOSS].shape = loss_shape;
    m->layers[LOSS].forward = loss_forward;
    m->layers[LOSS].backward = loss_backward;
}

/* How the layers of models made from here on differ: set before ranks are started. */
static struct variant {
    int apart;     /* linear layers have backward_weights; 2: and so does the tied layer at the end; 3: and all */
    int recompute; /* of the layers that save, and one that does not */
} variant;

static void model_vary(model *m)
{
    for (int i = 0; i < LAYERS; i++) {
        if (variant.apart >= 1 && m->layers[i].backward == linear_both) {
            m->layers[i].backward = linear_inputs;
            m->layers[i].backward_weights = linear_weights;
        }
        if (i == UNSCALE ? variant.apart >= 2 : i == SCALE && variant.apart == 3) {
            m->layers[i].backward = scale_inputs;
            m->layers[i].backward_weights = scale_weights;
        }
        m->layers[i].recompute = variant.recompute && (m->layers[i].shape == soft_shape || i == LOSS || i == FIRST);
    }
}

/* owns: parameters are in memory of the model's, for a run without FSDP. */
static model *model_create(int owns, int micro_batches, dtrain_allocator *allocator)
{
    model *m = (model *)calloc(1, sizeof *m);
    dtrain_module_desc desc = {micro_batches, allocator};
    memcpy(m->table, table_of_model, sizeof m->table);
    CHECK_EQ(offsets(m->begin), WEIGHTS);
    for (size_t e = 0; e < WEIGHTS; e++)
        m->weights[e] = weight(e);
    for (int p = 0; owns && p < PARAMS; p++) {
        m->table[p].data = m->weights + m->begin[p];
        m->table[p].grad = m->table[p].frozen ? NULL : m->grads + m->begin[p];
    }
    model_layers(m);
    model_vary(m);
    CHECK_EQ(dtrain_module_create(&m->module, m->layers, LAYERS, m->table, PARAMS, &desc), DTRAIN_OK);
    memset(m->layers, 0x55, sizeof m->layers); /* copied: nobody reads them again */
    return m;
}

static void model_destroy(model *m)
{
    dtrain_module_destroy(m->module);
    free(m);
}

/* Micro-batch j: numbers that depend on j alone. */
typedef struct batch {
    float x[ROWS * IN], target[ROWS * IN];
    dtrain_tensor input;
} batch;

static void batch_init(batch *b, int j)
{
    size_t shape[2] = {(size_t)(1 + (j + 2) % ROWS), IN};
    for (size_t i = 0; i < ROWS * IN; i++) {
        b->x[i] = dtrain_random_normal(7 + (uint64_t)j, i);
        b->target[i] = dtrain_random_normal(1000 + (uint64_t)j, i);
    }
    CHECK_EQ(dtrain_tensor_view(&b->input, DTRAIN_F32, 2, shape, b->x), DTRAIN_OK);
}

static dtrain_status forward(dtrain_fsdp *fsdp, model *m, int place, batch *b, float *loss)
{
    dtrain_tensor output;
    dtrain_status status = dtrain_fsdp_forward(fsdp, m->module, place, &b->input, b->target, &output);
    if (status == DTRAIN_OK && loss != NULL)
        *loss = ((float *)output.data)[0];
    return status;
}

/* ---- scenes over strategies and ranks ---- */

typedef struct run {
    dtrain_fsdp_desc desc;
    int micro;    /* micro-batches of each rank, all in flight at once */
    int prefetch; /* 1: before every forward */
    const float *expected;
    int fails_layer;
    const char *fails_in, *text;
    uint64_t *allocations;
} run;

__attribute__((unused)) static dtrain_fsdp *fsdp_create(dtrain_comm *world, model *m, const dtrain_fsdp_desc *desc)
{
    dtrain_fsdp *fsdp = NULL;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table_of_model, PARAMS, desc), DTRAIN_OK);
    for (int p = 0; p < PARAMS; p++)
        CHECK_EQ(dtrain_fsdp_set(fsdp, table_of_model[p].name, m->weights + m->begin[p], 0), DTRAIN_OK);
    return fsdp;
}

/* Runs body under every strategy on 1 to 4 ranks. */
__attribute__((unused)) static void under_every_strategy(dtrain_status (*body)(dtrain_comm *world, void *user), run *r,
                                                         int least_ranks)
{
    for (int ranks = least_ranks; ranks <= 4; ranks++)
        for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_HYBRID_SHARD; strategy++) {
            int before = test_failures;
            r->desc.strategy = (dtrain_strategy)strategy;
            r->desc.shard_size = ranks % 2 == 0 ? 2 : 1;
            CHECK_EQ(dtrain_run_threads(ranks, body, r, NULL), DTRAIN_OK);
            if (test_failures != before)
                TEST_FAIL("strategy %d on %d ranks: %s", strategy, ranks, dtrain_last_error());
        }
}

/* Counts what is allocated, and refuses. */
typedef struct heap {
    uint64_t calls;
    int refuses;
} heap;

static void *count_or_refuse(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    heap *h = (heap *)user;
    __atomic_add_fetch(&h->calls, 1, __ATOMIC_RELAXED);
    if (new_bytes > old_bytes && __atomic_load_n(&h->refuses, __ATOMIC_RELAXED))
        return NULL;
    void *block = NULL;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (pointer != NULL && new_bytes > 0)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

#endif
