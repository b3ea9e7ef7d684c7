/* The code blocks of the section manuals of module.h, pipeline.h, server.h, device_group.h and cuda/manual.h, as a
 * program writes them: C99 and C++11 without a warning, each run to a result. GPUs are the two of the emulation. */
#define DTRAIN_CUDA_EMULATE
#include "dtrain_cuda.h"
#include "test.h"

static dtrain_status good(int is)
{
    return is ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

static void on_ranks(int ranks, dtrain_status (*body)(dtrain_comm *, void *), void *user)
{
    if (dtrain_run_threads(ranks, body, user, NULL) != DTRAIN_OK)
        TEST_FAIL("on %d ranks: %s", ranks, dtrain_last_error());
}

/* ---- layers of one weight, whose product is to become 2 ---- */

enum { MOST = 4 };

static dtrain_status scale(void *user, const dtrain_layer_context *c)
{
    (void)user;
    *(float *)c->output.data = c->params[0][0] * *(const float *)c->input.data;
    return DTRAIN_OK;
}

static dtrain_status scale_backward(void *user, const dtrain_layer_context *c)
{
    float d = *(const float *)c->d_output.data;
    (void)user;
    c->grads[0][0] += d * *(const float *)c->input.data;
    if (c->d_input.data != NULL)
        *(float *)c->d_input.data = d * c->params[0][0];
    return DTRAIN_OK;
}

/* Half the square of the distance from the batch, a float. */
static dtrain_status distance(void *user, const dtrain_layer_context *c)
{
    float d = *(const float *)c->input.data - *(const float *)c->batch;
    (void)user;
    *(float *)c->output.data = d * d / 2;
    return DTRAIN_OK;
}

static dtrain_status distance_backward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    *(float *)c->d_input.data = *(const float *)c->input.data - *(const float *)c->batch;
    return DTRAIN_OK;
}

static const char *const weights[MOST] = {"w0", "w1", "w2", "w3"};

static void scale_of(dtrain_layer *layer, dtrain_param *param, int number, int unit, float *data)
{
    memset(layer, 0, sizeof *layer), memset(param, 0, sizeof *param);
    layer->name = "scale", layer->params = &weights[number], layer->param_count = 1, layer->unit = unit;
    layer->forward = scale, layer->backward = scale_backward;
    param->name = weights[number], param->dtype = DTRAIN_F32, param->shape[0] = 1, param->unit = unit;
    param->data = data;
}

static void distance_of(dtrain_layer *layer)
{
    memset(layer, 0, sizeof *layer);
    layer->name = "distance", layer->forward = distance, layer->backward = distance_backward;
}

static int near(float got, float expected)
{
    return got > expected - 0.01f && got < expected + 0.01f;
}

/* ---- src/parallel/module.h ---- */

static dtrain_status module_trains(dtrain_comm *world, void *user)
{
    float start[2] = {1, 1}, x = 1 + 0.1f * (float)dtrain_comm_rank(world), targets = 2 * x, lr = 0.1f;
    const size_t shape[1] = {1};
    int micro_batches = 3;
    dtrain_layer layers[3];
    dtrain_param table[2];
    dtrain_fsdp *fsdp;
    dtrain_fsdp_desc desc;
    dtrain_module *module;
    dtrain_tensor tokens, loss;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.optimizer.kind = DTRAIN_SGD;
    for (int i = 0; i < 2; i++)
        scale_of(&layers[i], &table[i], i, i, &start[i]);
    distance_of(&layers[2]);
    DTRAIN_CHECK(dtrain_tensor_view(&tokens, DTRAIN_F32, 1, shape, &x));
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, 2, &desc));
    DTRAIN_CHECK(dtrain_module_create(&module, layers, 3, table, 2, NULL));
    for (int step = 0; step < 100; step++) {
        DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, micro_batches, micro_batches));
        for (int i = 0; i < micro_batches; i++) {
            DTRAIN_CHECK(dtrain_fsdp_forward(fsdp, module, 0, &tokens, &targets, &loss));
            DTRAIN_CHECK(dtrain_fsdp_backward(fsdp, module, 0, NULL, NULL));
        }
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
    }
    float last = *(const float *)loss.data;
    for (int i = 0; i < 2; i++)
        DTRAIN_CHECK(dtrain_fsdp_get(fsdp, weights[i], &start[i], -1));
    dtrain_module_destroy(module);
    dtrain_fsdp_destroy(fsdp);
    return good(near(start[0] * start[1], 2) && last < 1e-4f);
}

TEST(a_module_trains_by_the_block_of_its_manual)
{
    for (int ranks = 1; ranks <= MOST; ranks++)
        on_ranks(ranks, module_trains, NULL);
}

/* ---- src/parallel/pipeline.h ---- */

/* Each rank is a stage of one weight, the last also has the loss. */
static dtrain_status pipeline_trains(dtrain_comm *group, void *user)
{
    enum { MICRO = 4 };
    int rank = dtrain_comm_rank(group), ranks = dtrain_comm_size(group), micro_batches = MICRO, steps = 200;
    float start = 1, x[MICRO] = {0.5f, 1, 1.5f, 1}, t[MICRO] = {1, 2, 3, 2}, lr = 0.05f, product;
    double weight = MICRO;
    const size_t shape[1] = {1};
    void *batches[MICRO];
    dtrain_comm *alone;
    dtrain_layer layers[2];
    dtrain_param table[1];
    dtrain_fsdp *fsdp;
    dtrain_fsdp_desc sharded;
    dtrain_module *module;
    dtrain_module_desc in_flight;
    dtrain_pipeline *pipeline;
    dtrain_pipeline_desc desc;
    dtrain_tensor inputs[MICRO];
    (void)user;
    memset(&desc, 0, sizeof desc), memset(&sharded, 0, sizeof sharded), memset(&in_flight, 0, sizeof in_flight);
    scale_of(&layers[0], &table[0], rank, 0, &start);
    distance_of(&layers[1]);
    for (int i = 0; i < MICRO; i++) {
        DTRAIN_CHECK(dtrain_tensor_view(&inputs[i], DTRAIN_F32, 1, shape, &x[i]));
        batches[i] = &t[i];
    }
    sharded.optimizer.kind = DTRAIN_SGD, in_flight.micro_batches = MICRO;
    DTRAIN_CHECK(dtrain_comm_split(group, rank, 0, &alone));
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, alone, table, 1, &sharded));
    DTRAIN_CHECK(dtrain_module_create(&module, layers, rank == ranks - 1 ? 2 : 1, table, 1, &in_flight));
    desc.micro_batches = MICRO, desc.modules = &module, desc.fsdps = &fsdp;
    DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, group, &desc));
    DTRAIN_CHECK(dtrain_pipeline_agree(pipeline, rank == 0 ? inputs : NULL));
    for (int step = 0; step < steps; step++) {
        DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, micro_batches, weight));
        DTRAIN_CHECK(dtrain_pipeline_step(pipeline, rank == 0 ? inputs : NULL, batches));
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
    }
    DTRAIN_CHECK(dtrain_fsdp_get(fsdp, weights[rank], &start, -1));
    DTRAIN_CHECK(dtrain_all_reduce(group, &start, &product, 1, DTRAIN_F32, DTRAIN_PROD));
    dtrain_pipeline_destroy(pipeline);
    dtrain_module_destroy(module);
    dtrain_fsdp_destroy(fsdp);
    dtrain_comm_destroy(alone);
    return good(near(product, 2));
}

TEST(a_pipeline_trains_by_the_block_of_its_manual)
{
    for (int ranks = 1; ranks <= MOST; ranks++)
        on_ranks(ranks, pipeline_trains, NULL);
}

enum { WIDTH = 4, HEADS = 2, ROWS = 3, LAYERS = 2, QKVW = 0, PROJW = 1 };

/* The model's tokens of a micro-batch are to come out turned by one channel. */
typedef struct turned {
    float x[ROWS * WIDTH], expected[ROWS * WIDTH];
    double loss;
} turned;

/* This rank's part of a layer: by outputs, or by inputs. */
static dtrain_parallel_linear linear_of(void *user, int by_inputs, const float *weight, float *d_weight)
{
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = (dtrain_comm *)user, layer.rows = ROWS, layer.blocks = 3, layer.granule = WIDTH / HEADS;
    layer.inputs = by_inputs ? 3 * WIDTH : WIDTH, layer.outputs = by_inputs ? WIDTH : 3 * WIDTH;
    layer.weight = weight, layer.d_weight = d_weight;
    return layer;
}

static dtrain_status block_shape(void *user, const dtrain_tensor *input, dtrain_tensor *output, size_t *saved_bytes)
{
    (void)user, (void)input, (void)output;
    *saved_bytes = ROWS * 3 * WIDTH * sizeof(float);
    return DTRAIN_OK;
}

static dtrain_status block(void *user, const dtrain_layer_context *c)
{
    dtrain_parallel_linear first = linear_of(user, 0, c->params[0], NULL),
                           second = linear_of(user, 1, c->params[1], NULL);
    dtrain_status status = dtrain_column_parallel_linear(&first, (const float *)c->input.data, (float *)c->saved);
    return status != DTRAIN_OK ? status
                               : dtrain_row_parallel_linear(&second, (const float *)c->saved, (float *)c->output.data);
}

static dtrain_status block_backward(void *user, const dtrain_layer_context *c)
{
    float d_hidden[ROWS * 3 * WIDTH];
    dtrain_parallel_linear first = linear_of(user, 0, c->params[0], c->grads[0]);
    dtrain_parallel_linear second = linear_of(user, 1, c->params[1], c->grads[1]);
    dtrain_status status = dtrain_row_parallel_linear_backward(&second, (const float *)c->saved,
                                                               (const float *)c->d_output.data, d_hidden);
    return status != DTRAIN_OK ? status
                               : dtrain_column_parallel_linear_backward(&first, (const float *)c->input.data, d_hidden,
                                                                        (float *)c->d_input.data);
}

static dtrain_status turned_loss(void *user, const dtrain_layer_context *c)
{
    turned *batch = (turned *)c->batch;
    float *d = (float *)c->output.data;
    (void)user;
    batch->loss = 0;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        d[i] = ((const float *)c->input.data)[i] - batch->expected[i];
        batch->loss += (double)(d[i] * d[i]) / 2;
    }
    return DTRAIN_OK;
}

static dtrain_status turned_loss_backward(void *user, const dtrain_layer_context *c)
{
    (void)user;
    memcpy(c->d_input.data, c->output.data, ROWS * WIDTH * sizeof(float));
    return DTRAIN_OK;
}

/* Layers QKVW and PROJW, split by heads; values depend on the place in the whole model alone. */
static dtrain_status model_in_parts(dtrain_comm *world, void *user)
{
    enum { MICRO = 2 };
    static const char *const names[2] = {"qkvw", "projw"};
    const size_t shape[2] = {ROWS, WIDTH};
    float memory[2][3 * WIDTH * WIDTH], lr = 0.3f;
    double norm = 0, loss[2] = {0, 0};
    size_t table_count = 2, layer_count = 1, channels = WIDTH / HEADS;
    void *batches[MICRO];
    turned data[MICRO];
    dtrain_mesh *mesh;
    dtrain_comm *model;
    dtrain_param table[2];
    dtrain_param_part parts[2];
    dtrain_layer layers[2];
    dtrain_fsdp *fsdp;
    dtrain_fsdp_desc desc;
    dtrain_module *module;
    dtrain_module_desc in_flight;
    dtrain_pipeline *pipeline;
    dtrain_pipeline_desc stages;
    dtrain_tensor tensors[MICRO];
    (void)user;
    memset(table, 0, sizeof table), memset(parts, 0, sizeof parts), memset(layers, 0, sizeof layers);
    memset(&desc, 0, sizeof desc), memset(&in_flight, 0, sizeof in_flight), memset(&stages, 0, sizeof stages);
    for (int i = 0; i < 2; i++) {
        table[i].name = names[i], table[i].dtype = DTRAIN_F32, table[i].stacked = 1, table[i].shape[0] = LAYERS;
        table[i].shape[1] = i == QKVW ? 3 * WIDTH : WIDTH, table[i].shape[2] = i == QKVW ? WIDTH : 3 * WIDTH;
    }
    dtrain_mesh_dim dims[] = {{"data", 0}, {"pipeline", 2}, {"tensor", 2}}; /* 0: what is left of the ranks */
    const char *both[] = {"pipeline", "tensor"};
    DTRAIN_CHECK(dtrain_mesh_create(&mesh, world, dims, 3));
    DTRAIN_CHECK(dtrain_mesh_join(mesh, world, both, 2, &model)); /* the ranks of one copy of the model */
    int stage = dtrain_comm_rank(dtrain_mesh_group(mesh, "pipeline"));
    int rank = dtrain_comm_rank(dtrain_mesh_group(mesh, "tensor")), tp = 2;
    size_t first = (size_t)stage, count = 1;
    DTRAIN_CHECK(dtrain_param_layers(&table[QKVW], &parts[QKVW], first, count));
    DTRAIN_CHECK(dtrain_param_cut(&table[QKVW], &parts[QKVW], 1, 3, channels, tp, rank));
    DTRAIN_CHECK(dtrain_param_layers(&table[PROJW], &parts[PROJW], first, count));
    DTRAIN_CHECK(dtrain_param_cut(&table[PROJW], &parts[PROJW], 2, 3, channels, tp, rank));
    for (int i = 0; i < 2; i++) {
        table[i].data = memory[i];
        for (size_t k = 0; k < dtrain_param_elements(&table[i]); k++)
            memory[i][k] = 0.3f * dtrain_random_normal((uint64_t)i, dtrain_param_whole_index(&table[i], k));
    }
    layers[0].name = "block", layers[0].params = names, layers[0].param_count = 2, layers[0].shape = block_shape;
    layers[0].forward = block, layers[0].backward = block_backward, layers[0].user = dtrain_mesh_group(mesh, "tensor");
    layers[1].name = "loss", layers[1].forward = turned_loss, layers[1].backward = turned_loss_backward;
    layer_count += stage == 1;
    desc.optimizer.kind = DTRAIN_SGD, in_flight.micro_batches = MICRO;
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, dtrain_mesh_group(mesh, "data"), table, table_count, &desc));
    DTRAIN_CHECK(dtrain_module_create(&module, layers, layer_count, table, table_count, &in_flight));
    stages.micro_batches = MICRO, stages.modules = &module, stages.fsdps = &fsdp;
    DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, dtrain_mesh_group(mesh, "pipeline"), &stages));
    for (int i = 0; i < MICRO; i++) {
        for (size_t k = 0; k < ROWS * WIDTH; k++)
            data[i].x[k] = dtrain_random_normal(2 + (uint64_t)i, k);
        for (int k = 0; k < ROWS * WIDTH; k++)
            data[i].expected[k] = data[i].x[k / WIDTH * WIDTH + (k + 1) % WIDTH];
        DTRAIN_CHECK(dtrain_tensor_view(&tensors[i], DTRAIN_F32, 2, shape, data[i].x));
        batches[i] = &data[i];
    }
    dtrain_tensor *inputs = stage == 0 ? tensors : NULL;
    DTRAIN_CHECK(dtrain_pipeline_agree(pipeline, inputs));
    for (int step = 0; step < 200; step++) {
        DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, MICRO, MICRO * ROWS));
        DTRAIN_CHECK(dtrain_pipeline_step(pipeline, inputs, batches)); /* all micro-batches, both ways */
        DTRAIN_CHECK(dtrain_fsdp_clip_model_grad_norm(&fsdp, 1, model, 1.0f, &norm));
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
        loss[step > 0] = data[0].loss + data[1].loss;
    }
    DTRAIN_CHECK(dtrain_comm_check_equal(world, &norm, 1, DTRAIN_F64));
    dtrain_pipeline_destroy(pipeline);
    dtrain_module_destroy(module);
    dtrain_fsdp_destroy(fsdp);
    dtrain_comm_destroy(model);
    dtrain_mesh_destroy(mesh);
    return good(stage == 0 || loss[1] < 0.05 * loss[0]);
}

TEST(a_model_in_parts_trains_by_the_blocks_of_its_manual)
{
    on_ranks(4, model_in_parts, NULL);
    on_ranks(8, model_in_parts, NULL);
}

/* ---- src/loose/server.h ---- */

static dtrain_status workers_push(dtrain_comm *world, void *user)
{
    enum { COUNT = 5, STEPS = 60 };
    float params[COUNT] = {0, 0, 0, 0, 0}, grads[COUNT];
    int rank = dtrain_comm_rank(world), right = 1;
    double weight = 1 + rank;
    dtrain_param table[1];
    dtrain_server *server;
    dtrain_server_desc desc;
    dtrain_serve_desc serve;
    dtrain_optimizer_desc sgd;
    (void)user;
    memset(table, 0, sizeof table), memset(&desc, 0, sizeof desc), memset(&serve, 0, sizeof serve);
    memset(&sgd, 0, sizeof sgd);
    table[0].name = "w", table[0].dtype = DTRAIN_F32, table[0].shape[0] = COUNT;
    table[0].data = params, table[0].grad = grads;
    desc.async = 1, sgd.kind = DTRAIN_SGD, serve.schedule.lr = 0.1f;
    DTRAIN_CHECK(dtrain_server_create(&server, world, table, 1, &desc));
    if (rank == 0) {
        DTRAIN_CHECK(dtrain_optimizer_create(&serve.optimizer, table, 1, &sgd, NULL));
        DTRAIN_CHECK(dtrain_server_run(server, &serve));
        dtrain_optimizer_destroy(serve.optimizer);
        right = dtrain_server_get_stats(server).updates == (uint64_t)(STEPS * (dtrain_comm_size(world) - 1));
    }
    for (int step = 0; step < STEPS && rank > 0; step++) {
        for (int i = 0; i < COUNT; i++)
            grads[i] = (float)weight * (params[i] - 1);
        DTRAIN_CHECK(dtrain_server_push(server, weight)); /* after the backward pass */
        DTRAIN_CHECK(dtrain_server_pull(server));
    }
    if (rank > 0)
        DTRAIN_CHECK(dtrain_server_leave(server));
    dtrain_server_destroy(server);
    for (int i = 0; i < COUNT; i++)
        right &= near(params[i], 1);
    return good(right);
}

TEST(workers_train_by_the_block_of_the_servers_manual)
{
    for (int ranks = 2; ranks <= MOST; ranks++)
        on_ranks(ranks, workers_push, NULL);
}

/* ---- src/device/device_group.h ---- */

enum { CPUS, GPUS, MIXED };

static dtrain_status device_group_sums(dtrain_comm *world, void *user)
{
    enum { LONGEST = MOST * (MOST + 1) / 2 };
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), kind = *(const int *)user, right = 1;
    float host[3][LONGEST];
    size_t counts[MOST], offsets[MOST], count = 0;
    void *params, *grads, *mine;
    dtrain_device *gpu = NULL;
    dtrain_cuda_desc at = {rank % 2, NULL};
    dtrain_device_group *group;
    dtrain_device_work *work;
    if (kind == GPUS || (kind == MIXED && rank < ranks - 1))
        DTRAIN_CHECK(dtrain_cuda_create(&gpu, &at));
    for (int r = 0; r < ranks; r++) { /* parts of any length */
        counts[r] = (size_t)r + 1, offsets[r] = count;
        count += counts[r];
    }
    for (size_t i = 0; i < count; i++)
        host[0][i] = (float)(rank + 7), host[1][i] = (float)i + (float)rank;
    DTRAIN_CHECK(dtrain_device_alloc(gpu, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &params));
    DTRAIN_CHECK(dtrain_device_alloc(gpu, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &grads));
    DTRAIN_CHECK(dtrain_device_alloc(gpu, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &mine));
    DTRAIN_CHECK(dtrain_device_copy(gpu, params, host[0], count * sizeof(float)));
    DTRAIN_CHECK(dtrain_device_copy(gpu, grads, host[1], count * sizeof(float)));
    dtrain_device_group_desc desc = {DTRAIN_DEVICE_MODE_AUTO, 0, 0, 1};  /* async 1: for all_reduce_async */
    DTRAIN_CHECK(dtrain_device_group_create(&group, world, gpu, &desc)); /* gpu NULL: a rank on the CPU */
    DTRAIN_CHECK(dtrain_device_group_broadcast(group, params, count, DTRAIN_F32, 0));
    DTRAIN_CHECK(dtrain_device_copy(gpu, host[0], params, count * sizeof(float)));
    DTRAIN_CHECK(dtrain_device_group_all_reduce(group, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN));
    DTRAIN_CHECK(dtrain_device_group_reduce_scatter_v(group, grads, mine, counts, offsets, DTRAIN_F32, DTRAIN_MEAN));
    DTRAIN_CHECK(dtrain_device_group_all_gather_v(group, mine, params, counts, offsets, DTRAIN_F32));
    DTRAIN_CHECK(dtrain_device_group_all_reduce_async(group, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN, &work));
    DTRAIN_CHECK(dtrain_device_scale(gpu, DTRAIN_F32, params, 2, count)); /* does not need the sum */
    DTRAIN_CHECK(dtrain_device_work_wait(work, gpu));                     /* gpu's queue waits for the sum */
    DTRAIN_CHECK(dtrain_device_copy(gpu, host[1], params, count * sizeof(float)));
    DTRAIN_CHECK(dtrain_device_copy(gpu, host[2], grads, count * sizeof(float)));
    right &= dtrain_device_group_mode(group) == (kind == GPUS ? DTRAIN_DEVICE_EVENTS : DTRAIN_DEVICE_STAGED);
    for (size_t i = 0; i < count; i++) {
        float mean = (float)i + (float)(ranks - 1) / 2;
        right &= host[0][i] == 7 && host[1][i] == 2 * mean && host[2][i] == mean;
    }
    dtrain_device_group_destroy(group);
    dtrain_device_free(gpu, DTRAIN_MEMORY_DEVICE, params);
    dtrain_device_free(gpu, DTRAIN_MEMORY_DEVICE, grads);
    dtrain_device_free(gpu, DTRAIN_MEMORY_DEVICE, mine);
    dtrain_cuda_destroy(gpu);
    return good(right);
}

TEST(groups_of_devices_sum_by_the_block_of_their_manual)
{
    for (int ranks = 1; ranks <= MOST; ranks++)
        for (int kind = CPUS; kind <= MIXED; kind++)
            on_ranks(ranks, device_group_sums, &kind);
}

/* ---- src/cuda/manual.h ---- */

TEST(the_first_program_of_the_cuda_manual_runs)
{
    enum { COUNT = 1000 };
    float host[COUNT];
    size_t count = COUNT;
    dtrain_device *gpu;
    void *x;
    float one = 1;
    DTRAIN_CHECK(dtrain_cuda_create(&gpu, NULL));
    DTRAIN_CHECK(dtrain_device_alloc(gpu, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &x));
    DTRAIN_CHECK(dtrain_device_fill(gpu, x, &one, sizeof one, count));
    DTRAIN_CHECK(dtrain_device_scale(gpu, DTRAIN_F32, x, 0.5, count));
    DTRAIN_CHECK(dtrain_device_copy(gpu, host, x, count * sizeof(float))); /* returns when host is written */
    dtrain_device_free(gpu, DTRAIN_MEMORY_DEVICE, x);
    dtrain_cuda_destroy(gpu);
    for (int i = 0; i < COUNT; i++)
        CHECK(host[i] == 0.5f);
}

typedef struct trained {
    int on_gpus;
    float values[2 * WIDTH];
} trained;

/* Stacked layers of weights that are to become 1. */
static dtrain_status trains_on_gpus(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), right = 1;
    size_t count = 1;
    float values[2 * WIDTH], lr = 0.3f, number = 1 + 0.01f * (float)rank;
    void *ones;
    trained *result = (trained *)user;
    dtrain_device *gpu = NULL;
    dtrain_cuda_desc at = {rank % 2, NULL};
    dtrain_param table[1];
    dtrain_fsdp *fsdp;
    dtrain_fsdp_desc desc;
    memset(table, 0, sizeof table), memset(&desc, 0, sizeof desc);
    desc.optimizer.kind = DTRAIN_SGD;
    table[0].name = "qkvw", table[0].dtype = DTRAIN_F32, table[0].shape[0] = 2, table[0].shape[1] = WIDTH;
    table[0].stacked = 1;
    if (result->on_gpus)
        DTRAIN_CHECK(dtrain_cuda_create(&gpu, &at));
    DTRAIN_CHECK(dtrain_device_alloc(gpu, DTRAIN_MEMORY_DEVICE, WIDTH * sizeof(float), &ones));
    DTRAIN_CHECK(dtrain_device_fill(gpu, ones, &number, sizeof number, WIDTH));
    for (size_t i = 0; i < count; i++)
        table[i].device = gpu; /* data, grad: memory of the GPU; for FSDP also NULL */
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc)); /* or dtrain_ddp_create */
    for (int step = 0; step < 20; step++) {
        for (int unit = 1; unit >= 0; unit--) {
            float *w = dtrain_fsdp_unit_param(fsdp, "qkvw", unit); /* layer by layer, at addresses that stay */
            float *g = dtrain_fsdp_unit_grad(fsdp, "qkvw", unit);
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, unit)); /* then queue kernels on dtrain_cuda_stream(gpu) */
            DTRAIN_CHECK(dtrain_device_axpy(gpu, DTRAIN_F32, g, 1, w, WIDTH));
            DTRAIN_CHECK(dtrain_device_axpy(gpu, DTRAIN_F32, g, -1, ones, WIDTH));
            DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, unit));
        }
        DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, NULL)); /* NULL: the CPU does not wait for the norm */
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
    }
    DTRAIN_CHECK(dtrain_fsdp_get(fsdp, "qkvw", values, -1));
    for (int i = 0; i < 2 * WIDTH; i++)
        right &= values[i] > 0.95f && values[i] < 1.05f;
    if (rank == 0)
        memcpy(result->values, values, sizeof values);
    dtrain_fsdp_destroy(fsdp);
    dtrain_device_free(gpu, DTRAIN_MEMORY_DEVICE, ones);
    dtrain_cuda_destroy(gpu);
    return good(right);
}

TEST(training_by_the_block_of_the_cuda_manual_gives_the_cpus_bits)
{
    for (int ranks = 1; ranks <= MOST; ranks++) {
        trained result[2];
        for (int i = 0; i < 2; i++) {
            result[i].on_gpus = i;
            on_ranks(ranks, trains_on_gpus, &result[i]);
        }
        CHECK(memcmp(result[0].values, result[1].values, sizeof result[0].values) == 0);
    }
}
