/* train_gpt --mesh: the model split over stages of a pipeline and inside its layers, data parallel or sharded besides.
 * Include dtrain.h, gpt.h, gpt_flags.h and gpt_layers.h first. */
#ifndef GPT_MESH_H
#define GPT_MESH_H

#include "gpt_layers.h"

#define GPT_CHUNKS 16

/* Names of --mesh, and of the mesh's dimensions. */
enum { GPT_DP, GPT_PP, GPT_TP, GPT_DIMS };

/* One chunk of a rank: a stage of the pipeline. */
typedef struct gpt_chunk {
    size_t first, count; /* layers */
    dtrain_param table[GPT_PARAMS];
    dtrain_param_part parts[GPT_PARAMS];
    int which[GPT_PARAMS]; /* of the model, each of the table */
    size_t params;
    dtrain_module *module;
} gpt_chunk;

/* One rank's part of a model, and the groups that it belongs to. */
typedef struct gpt_mesh {
    dtrain_mesh *mesh;
    dtrain_comm *model, *data,
        *pipe; /* one copy of the model; those with the same part; stages: all but model mesh's */
    int sizes[GPT_DIMS], at[GPT_DIMS];
    gpt_split split;
    gpt_chunk chunks[GPT_CHUNKS];
    dtrain_fsdp *fsdps[GPT_CHUNKS];
    int count, micro; /* chunks; micro-batches of one pipeline in a step */
    dtrain_pipeline *pipeline;
    dtrain_tensor scratch, memory; /* memory: tokens and targets of a step's micro-batches */
    dtrain_tensor *inputs;
    gpt_batch *batches;
    void **pointers;
} gpt_mesh;

static inline int gpt_mesh_first(const gpt_mesh *m, int chunk)
{
    return m->at[GPT_PP] == 0 && chunk == 0;
}

static inline int gpt_mesh_last(const gpt_mesh *m, int chunk)
{
    return m->at[GPT_PP] == m->sizes[GPT_PP] - 1 && chunk == m->count - 1;
}

/* Lists the parameters of a chunk: which layers of the model, and of each tensor which part. */
static inline dtrain_status gpt_chunk_describe(gpt_mesh *m, const gpt *whole, int index)
{
    gpt_chunk *chunk = &m->chunks[index];
    int first = gpt_mesh_first(m, index), last = gpt_mesh_last(m, index), tp = m->sizes[GPT_TP], at = m->at[GPT_TP];
    size_t D = m->split.D;
    dtrain_status status = DTRAIN_OK;
    chunk->params = 0;
    for (int i = 0; i < GPT_PARAMS && status == DTRAIN_OK; i++) {
        int stacked = whole->table[i].stacked, embedding = whole->table[i].unit == 0;
        if (!stacked && !(embedding ? first : last))
            continue;
        dtrain_param *param = &chunk->table[chunk->params];
        dtrain_param_part *part = &chunk->parts[chunk->params];
        chunk->which[chunk->params++] = i;
        *param = whole->table[i];
        memset(part, 0, sizeof *part);
        param->unit = embedding ? 0 : stacked ? first : first + (int)chunk->count;
        if (stacked)
            status = dtrain_param_layers(param, part, chunk->first, chunk->count);
        if (status != DTRAIN_OK)
            break;
        if (i == QKVW || i == QKVB)
            status = dtrain_param_cut(param, part, 1, 3, D, tp, at);
        else if (i == FCW || i == FCB)
            status = dtrain_param_cut(param, part, 1, 1, 1, tp, at);
        else if (i == PROJW || i == FCPW)
            status = dtrain_param_cut(param, part, 2, 1, i == PROJW ? D : 1, tp, at);
        else if (i == WTE || i == HEADW)
            status = dtrain_param_cut(param, part, 0, 1, 1, tp, at);
        else
            dtrain_param_copies(param, part, tp, at);
    }
    return status;
}

/* Makes a chunk's layers: embedding and head are of the first and the last stage. */
static inline dtrain_status gpt_chunk_module(gpt_mesh *m, const gpt *whole, int index, int places, int recompute)
{
    static const char *const embedding[] = {"wte", "wpe"}, *const head[] = {"lnfw", "lnfb", "headw"};
    const char *block[BLOCK_PARAMS];
    gpt_chunk *chunk = &m->chunks[index];
    size_t first = (size_t)gpt_mesh_first(m, index), last = (size_t)gpt_mesh_last(m, index), n = first + chunk->count;
    dtrain_layer *layers = (dtrain_layer *)calloc(n + last, sizeof *layers);
    dtrain_module_desc desc;
    if (layers == NULL)
        return DTRAIN_ERR_MEMORY;
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = places;
    for (int i = 0; i < BLOCK_PARAMS; i++)
        block[i] = whole->table[BLOCK_FIRST + i].name;
    for (size_t i = 0; i < n + last; i++) {
        dtrain_layer *layer = &layers[i];
        int is_embedding = i < first, is_head = i >= n;
        layer->name = is_embedding ? "embedding" : is_head ? "head" : "block";
        layer->params = is_embedding ? embedding : is_head ? head : block;
        layer->param_count = is_embedding ? 2 : is_head ? 3 : BLOCK_PARAMS;
        layer->unit = (int)i;
        layer->shape = is_embedding ? gpt_embedding_shape : is_head ? gpt_head_shape : gpt_block_shape;
        layer->forward = is_embedding ? gpt_embedding_layer_forward
                         : is_head    ? gpt_head_layer_forward
                                      : gpt_block_forward;
        layer->backward = is_embedding ? gpt_embedding_layer_weights
                          : is_head    ? gpt_head_layer_backward
                                       : gpt_block_backward;
        if (m->split.deferred)
            layer->backward_weights = is_embedding ? gpt_embedding_layer_weights
                                      : is_head    ? gpt_head_layer_weights
                                                   : gpt_block_weights;
        layer->recompute = recompute && !is_embedding && !is_head;
        layer->user = &m->split;
    }
    dtrain_status status = dtrain_module_create(&chunk->module, layers, n + last, chunk->table, chunk->params, &desc);
    free(layers);
    return status;
}

/* Writes a chunk's first values, which depend on the seed and the place in the whole tensor alone. */
static inline dtrain_status gpt_chunk_initialise(gpt_mesh *m, gpt *whole, int index, uint64_t seed)
{
    gpt_chunk *chunk = &m->chunks[index];
    dtrain_fsdp *fsdp = m->fsdps[index];
    dtrain_status status = DTRAIN_OK;
    for (int unit = 0; unit < dtrain_params_units(chunk->table, chunk->params) && status == DTRAIN_OK; unit++) {
        status = dtrain_fsdp_gather(fsdp, unit);
        for (size_t i = 0; i < chunk->params && status == DTRAIN_OK; i++) {
            const dtrain_param *param = &chunk->table[i];
            size_t layers = param->stacked ? chunk->count : 1, n = dtrain_param_elements(param) / layers;
            float *values = dtrain_fsdp_param(fsdp, param->name);
            if (unit < param->unit || unit - param->unit >= (int)layers)
                continue;
            for (size_t k = (size_t)(unit - param->unit) * n, end = k + n; k < end; k++)
                values[k] = gpt_first_value(whole, chunk->which[i], seed, dtrain_param_whole_index(param, k));
        }
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_put(fsdp, unit);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_release(fsdp, unit);
    }
    return status;
}

/* Lays the ranks out. */
static inline dtrain_status gpt_mesh_groups(gpt_mesh *m, const gpt_flags *flags, dtrain_comm *world)
{
    static const char *const names[GPT_DIMS] = {"data", "pipeline", "tensor"}, *const model[] = {"pipeline", "tensor"};
    dtrain_mesh_dim dims[GPT_DIMS];
    for (int i = 0; i < GPT_DIMS; i++) {
        dims[i].name = names[i];
        dims[i].size = m->sizes[i] = flags->mesh_sizes[i];
    }
    dtrain_status status = dtrain_mesh_create(&m->mesh, world, dims, GPT_DIMS);
    if (status == DTRAIN_OK)
        status = dtrain_mesh_join(m->mesh, world, model, 2, &m->model);
    if (status != DTRAIN_OK)
        return status;
    for (int i = 0; i < GPT_DIMS; i++)
        m->at[i] = dtrain_comm_rank(dtrain_mesh_group(m->mesh, names[i]));
    m->data = dtrain_mesh_group(m->mesh, names[GPT_DP]);
    m->pipe = dtrain_mesh_group(m->mesh, names[GPT_PP]);
    m->split.group = dtrain_mesh_group(m->mesh, names[GPT_TP]);
    return DTRAIN_OK;
}

static inline void gpt_mesh_sizes(gpt_mesh *m, const gpt_flags *flags)
{
    gpt_split *s = &m->split;
    s->V = (size_t)flags->vocab;
    s->C = (size_t)flags->width;
    s->T = (size_t)flags->context;
    s->H = (size_t)flags->heads;
    s->D = s->C / s->H;
    s->B = (size_t)flags->batch;
    s->heads = dtrain_shard(s->group, s->H, m->at[GPT_TP], NULL);
    s->wide = dtrain_shard(s->group, 4 * s->C, m->at[GPT_TP], NULL);
    s->sequence = flags->sequence;
    s->deferred = strcmp(flags->schedule, "zb") == 0;
    m->count = strcmp(flags->schedule, "interleaved") == 0 ? (int)flags->chunks : 1;
    m->micro = (int)flags->micro / m->sizes[GPT_DP];
}

static inline dtrain_pipeline_schedule gpt_mesh_schedule(const gpt_flags *flags)
{
    return strcmp(flags->schedule, "gpipe") == 0         ? DTRAIN_PIPELINE_GPIPE
           : strcmp(flags->schedule, "interleaved") == 0 ? DTRAIN_PIPELINE_INTERLEAVED
           : strcmp(flags->schedule, "zb") == 0          ? DTRAIN_PIPELINE_ZB_H1
                                                         : DTRAIN_PIPELINE_1F1B;
}

/* How many micro-batches a chunk holds at once: as many as the plan says of this rank, for all its chunks. */
static inline dtrain_status gpt_mesh_places(const gpt_mesh *m, const gpt_flags *flags, int *places)
{
    dtrain_pipeline_plan_desc desc;
    dtrain_pipeline_plan *plan;
    memset(&desc, 0, sizeof desc);
    desc.schedule = gpt_mesh_schedule(flags);
    desc.ranks = m->sizes[GPT_PP];
    desc.micro_batches = m->micro;
    desc.chunks = m->count;
    dtrain_status status = dtrain_pipeline_plan_create(&plan, &desc, NULL);
    if (status != DTRAIN_OK)
        return status;
    *places = plan->peak[m->at[GPT_PP]] < m->micro ? plan->peak[m->at[GPT_PP]] : m->micro;
    dtrain_pipeline_plan_destroy(plan);
    return DTRAIN_OK;
}

/* Tokens and targets of a step's micro-batches. */
static inline dtrain_status gpt_mesh_room(gpt_mesh *m, dtrain_allocator *allocator)
{
    size_t R = m->split.B * m->split.T, n = (size_t)m->micro, floats = gpt_scratch_floats(&m->split),
           tokens = 2 * n * R;
    const size_t shape[2] = {m->split.B, m->split.T};
    dtrain_status status = dtrain_tensor_create(&m->scratch, DTRAIN_F32, 1, &floats, allocator);
    if (status == DTRAIN_OK)
        status = dtrain_tensor_create(&m->memory, DTRAIN_I32, 1, &tokens, allocator);
    m->inputs = (dtrain_tensor *)calloc(n, sizeof *m->inputs);
    m->batches = (gpt_batch *)calloc(n, sizeof *m->batches);
    m->pointers = (void **)calloc(n, sizeof *m->pointers);
    if (m->inputs == NULL || m->batches == NULL || m->pointers == NULL)
        return DTRAIN_ERR_MEMORY;
    for (size_t i = 0; status == DTRAIN_OK && i < n; i++) {
        int32_t *at = (int32_t *)m->memory.data + 2 * i * R;
        status = dtrain_tensor_view(&m->inputs[i], DTRAIN_I32, 2, shape, at);
        m->batches[i].targets = at + R;
        m->pointers[i] = &m->batches[i];
    }
    m->split.scratch = (float *)m->scratch.data;
    return status;
}

/* Collective: every rank of world. fsdp is as without a mesh. */
static inline dtrain_status gpt_mesh_create(gpt_mesh *m, gpt *whole, const gpt_flags *flags,
                                            const dtrain_fsdp_desc *fsdp, dtrain_comm *world)
{
    int begins[GPT_CHUNKS * 1024 + 1], places = 0;
    dtrain_pipeline_desc desc;
    dtrain_module *modules[GPT_CHUNKS];
    memset(&desc, 0, sizeof desc);
    dtrain_status status = gpt_mesh_groups(m, flags, world);
    if (status != DTRAIN_OK)
        return status;
    gpt_mesh_sizes(m, flags);
    status = dtrain_split_stages(NULL, (int)flags->layers, m->sizes[GPT_PP] * m->count, begins);
    if (status == DTRAIN_OK)
        status = gpt_mesh_places(m, flags, &places);
    if (status == DTRAIN_OK)
        status = gpt_mesh_room(m, dtrain_comm_allocator(world));
    for (int c = 0; c < m->count && status == DTRAIN_OK; c++) {
        int stage = c * m->sizes[GPT_PP] + m->at[GPT_PP];
        m->chunks[c].first = (size_t)begins[stage];
        m->chunks[c].count = (size_t)(begins[stage + 1] - begins[stage]);
        status = gpt_chunk_describe(m, whole, c);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_create(&m->fsdps[c], m->data, m->chunks[c].table, m->chunks[c].params, fsdp);
        if (status == DTRAIN_OK)
            status = gpt_chunk_initialise(m, whole, c, (uint64_t)flags->seed);
        if (status == DTRAIN_OK)
            status = gpt_chunk_module(m, whole, c, places, flags->recompute);
        modules[c] = m->chunks[c].module;
    }
    if (status != DTRAIN_OK)
        return status;
    desc.schedule = gpt_mesh_schedule(flags);
    desc.micro_batches = m->micro;
    desc.chunks = m->count;
    desc.modules = modules;
    desc.fsdps = m->fsdps;
    status = dtrain_pipeline_create(&m->pipeline, m->pipe, &desc);
    return status == DTRAIN_OK ? dtrain_pipeline_agree(m->pipeline, m->inputs) : status;
}

static inline void gpt_mesh_destroy(gpt_mesh *m)
{
    dtrain_pipeline_destroy(m->pipeline);
    for (int c = 0; c < GPT_CHUNKS; c++) {
        dtrain_module_destroy(m->chunks[c].module);
        dtrain_fsdp_destroy(m->fsdps[c]);
    }
    dtrain_comm_destroy(m->model);
    dtrain_mesh_destroy(m->mesh);
    dtrain_tensor_destroy(&m->scratch);
    dtrain_tensor_destroy(&m->memory);
    free(m->inputs);
    free(m->batches);
    free(m->pointers);
}

/* Runs forward and backward of this pipeline's micro-batches. Tokens are in m->inputs, targets in m->batches. The loss
 * of each, a sum over rows, goes to losses[i * stride], on the first tensor rank of the last stage alone. */
static inline dtrain_status gpt_mesh_micro_batches(gpt_mesh *m, double *losses, size_t stride)
{
    dtrain_status status = DTRAIN_OK;
    for (int c = 0; c < m->count && status == DTRAIN_OK; c++)
        status = dtrain_fsdp_begin(m->fsdps[c], m->micro, (double)m->micro * (double)(m->split.B * m->split.T));
    if (status == DTRAIN_OK)
        status = dtrain_pipeline_step(m->pipeline, m->inputs, m->pointers);
    for (int i = 0; i < m->micro && gpt_mesh_last(m, m->count - 1) && m->at[GPT_TP] == 0; i++)
        losses[(size_t)i * stride] = m->batches[i].loss;
    return status;
}

/* Shortens the gradients of the whole model and applies them. */
static inline dtrain_status gpt_mesh_update(gpt_mesh *m, float clip, float lr, double *norm)
{
    dtrain_status status = dtrain_fsdp_clip_model_grad_norm(m->fsdps, m->count, m->model, clip, norm);
    for (int c = 0; c < m->count && status == DTRAIN_OK; c++)
        status = dtrain_fsdp_step(m->fsdps[c], lr);
    return status;
}

static inline dtrain_fsdp_stats gpt_mesh_stats(const gpt_mesh *m)
{
    dtrain_fsdp_stats sum = dtrain_fsdp_get_stats(m->fsdps[0]);
    for (int c = 1; c < m->count; c++) {
        dtrain_fsdp_stats stats = dtrain_fsdp_get_stats(m->fsdps[c]);
        sum.communicated_ns += stats.communicated_ns;
        sum.waited_ns += stats.waited_ns;
        sum.dense_bytes += stats.dense_bytes;
        sum.sent_bytes += stats.sent_bytes;
        sum.bytes += stats.bytes;
        sum.peak_bytes += stats.peak_bytes;
    }
    return sum;
}

/* What rank 0 did of the last step's pipeline. */
static inline void gpt_mesh_print(const gpt_mesh *m, const char *mesh, const char *schedule)
{
    const dtrain_pipeline_plan *plan = dtrain_pipeline_get_plan(m->pipeline);
    dtrain_pipeline_stats stats = dtrain_pipeline_get_stats(m->pipeline);
    printf(
        "mesh %s, %s: %.0f%% of a step's pipeline idle, %.0f%% planned; %d micro-batches held at once; %.2f MiB used "
        "at most\n",
        mesh, schedule, 100 * stats.bubble, 100 * plan->bubble, stats.peak,
        (double)gpt_mesh_stats(m).peak_bytes / (1 << 20));
}

/* The loss of one sequence, on the rank that gpt_mesh_micro_batches names; 0 on the others. tokens has T + 1. */
static inline dtrain_status gpt_mesh_evaluate(gpt_mesh *m, const int32_t *tokens, double *loss)
{
    size_t B = m->split.B;
    const size_t shape[2] = {1, m->split.T};
    int32_t *at = (int32_t *)m->memory.data;
    dtrain_tensor input, output;
    gpt_batch batch = {at + m->split.T, 0};
    dtrain_status status = dtrain_tensor_view(&input, DTRAIN_I32, 2, shape, at);
    for (size_t i = 0; i < m->split.T; i++) {
        at[i] = tokens[i];
        at[m->split.T + i] = tokens[i + 1];
    }
    m->split.B = 1;
    if (status == DTRAIN_OK)
        status = dtrain_pipeline_evaluate(m->pipeline, &input, &batch, &output);
    m->split.B = B;
    *loss = gpt_mesh_last(m, m->count - 1) && m->at[GPT_TP] == 0 ? batch.loss : 0;
    return status;
}

/* Puts a whole parameter together on rank 0, from what each rank holds: bits are added to zeros, so that none change.
 * Collective: every rank of world. */
static inline dtrain_status gpt_mesh_get(gpt_mesh *m, const dtrain_param *whole, dtrain_comm *world, int32_t *value)
{
    size_t n = dtrain_param_elements(whole);
    memset(value, 0, n * sizeof *value);
    for (int c = 0; c < m->count; c++) {
        const dtrain_slice *slices = NULL;
        size_t count = 0;
        dtrain_status status = dtrain_fsdp_local(m->fsdps[c], &slices, &count);
        if (status != DTRAIN_OK)
            return status;
        if (m->at[GPT_DP] / dtrain_fsdp_shard_size(m->fsdps[c]) > 0)
            continue; /* another copy */
        for (size_t i = 0; i < count; i++) {
            const dtrain_param *param = NULL;
            for (size_t k = 0; k < m->chunks[c].params; k++)
                if (strcmp(m->chunks[c].table[k].name, slices[i].name) == 0)
                    param = &m->chunks[c].table[k];
            if (strcmp(slices[i].name, whole->name) != 0 || param->part->copy > 0)
                continue;
            size_t layer = slices[i].layer > 0 ? (size_t)slices[i].layer : 0;
            size_t begin = layer * (dtrain_param_elements(param) / (param->stacked ? m->chunks[c].count : 1));
            for (size_t k = 0; k < slices[i].count; k++)
                memcpy(&value[dtrain_param_whole_index(param, begin + slices[i].begin + k)], &slices[i].weights[k],
                       sizeof *value);
        }
    }
    return dtrain_reduce(world, value, value, n, DTRAIN_I32, DTRAIN_SUM, 0);
}

#endif
