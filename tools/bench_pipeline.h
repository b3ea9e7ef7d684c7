/* The share of a pipeline's step in which ranks idle, measured beside what its plan says.
 *
 * Layers sleep, as if a device computed. Each chunk has one such layer, which sleeps PIPELINE_SLEEP_NS in forward,
 * backward and backward_weights. The figures are means over the ranks and medians of the runs; of_plan is measured over
 * planned. */
#ifndef BENCH_PIPELINE_H
#define BENCH_PIPELINE_H

#define PIPELINE_SLEEP_NS 5000000
#define PIPELINE_CHUNKS 8

static const char *const pipeline_names[] = {"gpipe", "1f1b", "interleaved", "zb_h1"};

static dtrain_status pipeline_sleep(void *user, const dtrain_layer_context *c)
{
    struct timespec pause = {0, PIPELINE_SLEEP_NS};
    (void)user, (void)c;
    nanosleep(&pause, NULL);
    return DTRAIN_OK;
}

static dtrain_status pipeline_nothing(void *user, const dtrain_layer_context *c)
{
    (void)user, (void)c;
    return DTRAIN_OK;
}

/* Makes a module of a layer that takes no time and one that sleeps. With the first layer, the first stage, too, has to
 * make the gradient of an input. */
static dtrain_status pipeline_module(const bench *b, dtrain_module **module)
{
    static const char *const names[] = {"w"};
    static float weight[1], grad[1];
    dtrain_param table;
    dtrain_layer layers[2];
    dtrain_module_desc desc;
    memset(&table, 0, sizeof table);
    memset(layers, 0, sizeof layers);
    memset(&desc, 0, sizeof desc);
    table.name = layers[0].name = layers[1].name = names[0];
    table.dtype = DTRAIN_F32;
    table.shape[0] = 1;
    table.data = weight;
    table.grad = grad;
    layers[0].forward = layers[0].backward = pipeline_nothing;
    layers[1].params = names;
    layers[1].param_count = 1;
    layers[1].forward = layers[1].backward = layers[1].backward_weights = pipeline_sleep;
    desc.micro_batches = b->micro;
    return dtrain_module_create(module, layers, 2, &table, 1, &desc);
}

static dtrain_status pipeline_rank(dtrain_comm *world, void *user)
{
    bench *b = (bench *)user;
    dtrain_module *modules[PIPELINE_CHUNKS] = {NULL};
    dtrain_pipeline *pipeline = NULL;
    dtrain_pipeline_desc desc;
    dtrain_tensor inputs[BENCH_RANKS];
    float numbers[16] = {0};
    size_t count = 16;
    memset(&desc, 0, sizeof desc);
    desc.schedule = b->schedule;
    desc.micro_batches = b->micro;
    desc.chunks = b->chunks;
    desc.modules = modules;
    for (int c = 0; c < b->chunks; c++)
        DTRAIN_CHECK(pipeline_module(b, &modules[c]));
    for (int i = 0; i < b->micro; i++)
        DTRAIN_CHECK(dtrain_tensor_view(&inputs[i], DTRAIN_F32, 1, &count, numbers));
    DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, world, &desc));
    DTRAIN_CHECK(dtrain_pipeline_agree(pipeline, inputs));
    for (int run = -1; run < b->runs; run++) {
        if (dtrain_comm_rank(world) == 0)
            bench_progress(b, "", run, b->runs);
        DTRAIN_CHECK(dtrain_barrier(world));
        DTRAIN_CHECK(dtrain_pipeline_step(pipeline, inputs, NULL));
        double bubble = dtrain_pipeline_get_stats(pipeline).bubble;
        DTRAIN_CHECK(dtrain_all_reduce(world, &bubble, &bubble, 1, DTRAIN_F64, DTRAIN_MEAN));
        if (run >= 0 && dtrain_comm_rank(world) == 0)
            b->us[run] = bubble;
    }
    if (dtrain_comm_rank(world) == 0)
        b->limit_us[0] = dtrain_pipeline_get_plan(pipeline)->bubble;
    dtrain_pipeline_destroy(pipeline);
    for (int c = 0; c < b->chunks; c++)
        dtrain_module_destroy(modules[c]);
    return DTRAIN_OK;
}

static int pipeline_run(bench *b)
{
    if (b->chunks == 0)
        b->chunks = b->schedule == DTRAIN_PIPELINE_INTERLEAVED ? 2 : 1;
    DTRAIN_CHECK(dtrain_run_threads(b->ranks, pipeline_rank, b, NULL));
    progress_end();
    double measured = bench_median(b->us, b->runs), planned = b->limit_us[0];
    printf("op=pipeline_bubble schedule=%s ranks=%d micro=%d chunks=%d layer_us=%d runs=%d bubble=%.4f plan=%.4f "
           "of_plan=%.3f\n",
           pipeline_names[b->schedule - DTRAIN_PIPELINE_GPIPE], b->ranks, b->micro, b->chunks, PIPELINE_SLEEP_NS / 1000,
           b->runs, measured, planned, planned > 0.0 ? measured / planned : 1.0);
    return 0;
}

#endif
