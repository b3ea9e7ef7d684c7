/* The GPT of train_gpt in a world of one, with its weights and gradients as flat arrays in table order, for tests that
 * compare it with a reference. Include train_gpt.c and test.h first. */
#ifndef DTRAIN_TEST_GPT_ALONE_H
#define DTRAIN_TEST_GPT_ALONE_H

typedef struct gpt_alone {
    dtrain_comm *world;
    gpt model;
    float *weights, *grads; /* [model.count] */
} gpt_alone;

/* Where layer l of a parameter begins in the flat arrays. */
static size_t alone_at(const gpt *m, int which, size_t l)
{
    size_t at = 0;
    for (int i = 0; i < which; i++)
        at += dtrain_param_elements(&m->table[i]);
    return at + (m->table[which].stacked ? l * (dtrain_param_elements(&m->table[which]) / m->L) : 0);
}

static void alone_read(gpt_alone *a)
{
    for (int i = 0; i < GPT_PARAMS; i++)
        memcpy(a->weights + alone_at(&a->model, i, 0), a->model.params[i],
               dtrain_param_elements(&a->model.table[i]) * sizeof(float));
}

static void alone_create(gpt_alone *a, const gpt_flags *flags)
{
    dtrain_comm_desc desc;
    memset(a, 0, sizeof *a);
    memset(&desc, 0, sizeof desc);
    desc.world_size = 1;
    if (dtrain_comm_create(&a->world, &desc) != DTRAIN_OK ||
        gpt_create(&a->model, flags, a->world, NULL, NULL) != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    a->weights = (float *)calloc(2 * a->model.count, sizeof(float));
    if (a->weights == NULL)
        abort();
    a->grads = a->weights + a->model.count;
    alone_read(a);
}

/* Adds noise to the weights, so large that every path carries gradient. */
static void alone_stir(gpt_alone *a)
{
    for (int unit = 0; unit <= (int)a->model.L + 1; unit++)
        CHECK_EQ(dtrain_fsdp_gather(a->model.fsdp, unit), DTRAIN_OK);
    for (int i = 0; i < GPT_PARAMS; i++)
        for (size_t k = 0, at = alone_at(&a->model, i, 0); k < dtrain_param_elements(&a->model.table[i]); k++)
            a->model.params[i][k] += 0.2f * dtrain_random_normal(77, at + k);
    for (int unit = 0; unit <= (int)a->model.L + 1; unit++)
        CHECK_EQ(dtrain_fsdp_put(a->model.fsdp, unit), DTRAIN_OK);
    alone_read(a);
}

/* Runs one micro-batch of weight 1 and returns its loss; its gradients, as the optimizer would get them, to grads. */
static double alone_micro_batch(gpt_alone *a, const int32_t *tokens, const int32_t *targets)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    double loss = 0;
    CHECK_EQ(dtrain_fsdp_begin(a->model.fsdp, 1, 1), DTRAIN_OK);
    CHECK_EQ(gpt_micro_batch(&a->model, tokens, targets, &loss), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_finish(a->model.fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(a->model.fsdp, &slices, &count), DTRAIN_OK);
    for (size_t i = 0; i < count; i++)
        for (int p = 0; p < GPT_PARAMS; p++)
            if (strcmp(slices[i].name, a->model.table[p].name) == 0)
                memcpy(a->grads + alone_at(&a->model, p, slices[i].layer > 0 ? (size_t)slices[i].layer : 0),
                       slices[i].grads, slices[i].count * sizeof(float));
    CHECK_EQ(dtrain_fsdp_drop(a->model.fsdp), DTRAIN_OK);
    return loss;
}

static void alone_destroy(gpt_alone *a)
{
    gpt_destroy(&a->model);
    dtrain_comm_destroy(a->world);
    free(a->weights);
}

#endif
