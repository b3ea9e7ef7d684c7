/* The code of the manual and of the headers, as a program writes it. It is compiled as C99 and as C++11, and run in the
 * world that the environment describes, and as one to four threads. What each function ends with is the same on any
 * number of ranks. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __cplusplus
#define ZERO \
    { \
    }
#else
#define ZERO \
    { \
        0 \
    }
#endif

#define COUNT 103  /* 2 and 4 ranks do not divide it, */
#define EXAMPLES 7 /* nor this */

static dtrain_status same_everywhere(dtrain_comm *world, const float *params)
{
    return dtrain_comm_check_equal(world, params, COUNT, DTRAIN_F32);
}

/* Stands for a trainer's backward pass over a rank's examples: the mean over all examples is params - 1. */
static void compute_gradients(const float *params, float *grads, size_t examples, size_t first, size_t mine)
{
    memset(grads, 0, COUNT * sizeof *grads);
    for (size_t example = first; example < first + mine; example++)
        for (size_t i = 0; i < COUNT; i++)
            grads[i] += params[i] - 1 + 2 * (float)example - (float)examples + 1;
}

static int trained(const float *params)
{
    for (size_t i = 0; i < COUNT; i++)
        if (!(params[i] > 0.99f && params[i] < 1.01f))
            return 0;
    return 1;
}

static dtrain_status data_parallel(dtrain_comm *world, void *user)
{
    float params[COUNT], grads[COUNT];
    size_t count = COUNT, examples = EXAMPLES;
    (void)user;
    for (size_t i = 0; i < count; i++)
        params[i] = (float)dtrain_comm_rank(world) + (float)i / COUNT;
    DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0)); /* every rank starts from rank 0's weights */
    size_t first, mine = dtrain_shard(world, examples, dtrain_comm_rank(world), &first);
    for (int step = 0; step < 100; step++) {
        compute_gradients(params, grads, examples, first, mine);
        DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = 0; i < count; i++)
            grads[i] /= (float)examples;
        for (size_t i = 0; i < count; i++)
            params[i] -= 0.1f * grads[i];
    }
    DTRAIN_CHECK(same_everywhere(world, params));
    return trained(params) ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* The same in a world of its own, as the environment describes it. */
static dtrain_status from_the_environment(dtrain_comm *nobody, void *user)
{
    float params[COUNT] = ZERO, grads[COUNT];
    size_t count = COUNT, examples = EXAMPLES;
    dtrain_comm *world;
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL));
    DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0));
    size_t first, mine = dtrain_shard(world, examples, dtrain_comm_rank(world), &first);
    for (int step = 0; step < 100; step++) {
        compute_gradients(params, grads, examples, first, mine);
        DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = 0; i < count; i++)
            grads[i] /= (float)examples;
        for (size_t i = 0; i < count; i++)
            params[i] -= 0.1f * grads[i];
    }
    dtrain_comm_destroy(world);
    return trained(params) && nobody == NULL && user == NULL ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* Ranks that the program numbers itself, and that meet at a root which it names. */
static dtrain_status placed_by_hand(dtrain_comm *threads, void *user)
{
    char secret[] = "sixteen bytes or more", root[64];
    int rank = dtrain_comm_rank(threads), ranks = dtrain_comm_size(threads);
    dtrain_comm *world;
    dtrain_comm_desc desc;
    snprintf(root, sizeof root, "unix:%s.%d", (const char *)user, ranks);
    memset(&desc, 0, sizeof desc);
    desc.rank = rank, desc.world_size = ranks, desc.root = root, desc.token = secret;
    DTRAIN_CHECK(dtrain_comm_create(&world, &desc));
    int good = dtrain_comm_rank(world) == rank && dtrain_comm_size(world) == ranks;
    DTRAIN_CHECK(dtrain_barrier(world));
    dtrain_comm_destroy(world);
    return good ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* Ranks with other numbers of examples: rank r has r, rank 0 none. All examples have the gradient params - 1. */
static dtrain_status unequal(dtrain_comm *world, void *user)
{
    float params[COUNT] = ZERO, grads[COUNT + 1];
    int examples = dtrain_comm_rank(world) + (dtrain_comm_size(world) == 1);
    size_t count = COUNT;
    (void)user;
    for (int step = 0; step < 100; step++) {
        for (size_t i = 0; i < count; i++)
            grads[i] = (float)examples * (params[i] - 1);
        grads[count] = (float)examples;
        DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count + 1, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = 0; i < count; i++)
            grads[i] /= grads[count];
        for (size_t i = 0; i < count; i++)
            params[i] -= 0.1f * grads[i];
    }
    return trained(params) ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

static void update(float *param, float *grad, float *m, float *v)
{
    *m = 0.5f * *m + *grad;
    *v += *grad * *grad;
    *param -= 0.1f * *m;
}

static dtrain_status optimizer_state_sharded(dtrain_comm *world, void *user)
{
    float params[COUNT], grads[COUNT];
    int rank = dtrain_comm_rank(world);
    size_t count = COUNT, examples = EXAMPLES, first, mine = dtrain_shard(world, examples, rank, &first);
    (void)user;
    for (size_t i = 0; i < count; i++)
        params[i] = (float)rank + (float)i / COUNT;
    size_t lo, n = dtrain_shard(world, count, rank, &lo); /* earlier ranks one longer */
    DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0));
    float *m = (float *)calloc(n + 1, sizeof *m), *v = (float *)calloc(n + 1, sizeof *v);
    for (int step = 0; step < 100; step++) {
        compute_gradients(params, grads, examples, first, mine);
        DTRAIN_CHECK(dtrain_reduce_scatter(world, grads, grads + lo, count, DTRAIN_F32, DTRAIN_SUM));
        for (size_t i = 0; i < n; i++) {
            grads[lo + i] /= (float)examples;
            update(params + lo + i, grads + lo + i, m + i, v + i);
        }
        DTRAIN_CHECK(dtrain_all_gather(world, params + lo, params, count, DTRAIN_F32));
    }
    free(m);
    free(v);
    DTRAIN_CHECK(same_everywhere(world, params));
    return trained(params) ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

enum { V = 11, C = 3, L = 4, PARAMS = 2 };

static void table_of(dtrain_param *table)
{
    dtrain_param wte = ZERO, qkvw = ZERO;
    wte.name = "wte", wte.dtype = DTRAIN_F32, wte.shape[0] = V, wte.shape[1] = C, wte.unit = 0;
    qkvw.name = "qkvw", qkvw.dtype = DTRAIN_F32, qkvw.shape[0] = L, qkvw.shape[1] = 3 * C, qkvw.shape[2] = C;
    qkvw.stacked = 1, qkvw.unit = 1; /* units 1..L */
    table[0] = wte;
    table[1] = qkvw;
}

/* The mean over ranks of what it adds is params - 1. */
static void layer_backward(const float *params, float *grads, size_t count, int rank, int ranks)
{
    for (size_t i = 0; i < count; i++)
        grads[i] += params[i] - 1 + (float)(2 * rank - ranks + 1);
}

static dtrain_status fully_sharded(dtrain_comm *world, void *user)
{
    dtrain_fsdp *fsdp;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc desc = ZERO;
    double norm = 0, tokens = 2;
    float value[V * C], lr = 0.02f, loss = 0, limit = 1;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t count = PARAMS;
    desc.strategy = *(dtrain_strategy *)user;
    desc.shard_size = 2;
    desc.optimizer.kind = DTRAIN_ADAMW;
    table_of(table);
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc));
    float *qkvw = dtrain_fsdp_param(fsdp, "qkvw");
    float *wte = dtrain_fsdp_param(fsdp, "wte");
    for (int step = 0; step < 400; step++) {
        DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
        DTRAIN_CHECK(dtrain_fsdp_release(fsdp, 0));
        for (int layer = 1; layer <= L; layer++) {
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, layer));
            DTRAIN_CHECK(dtrain_fsdp_release(fsdp, layer));
        }
        for (int layer = L; layer >= 1; layer--) {
            size_t at = (size_t)(layer - 1) * 3 * C * C;
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, layer));
            layer_backward(qkvw + at, dtrain_fsdp_grad(fsdp, "qkvw") + at, 3 * C * C, rank, ranks);
            DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, layer));
        }
        DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
        layer_backward(wte, dtrain_fsdp_grad(fsdp, "wte"), V * C, rank, ranks);
        DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, 0));
        DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, &norm));
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
    }
    for (int step = 0; step < 2; step++, loss = 2) { /* of which the second is dropped */
        DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, 2, tokens));
        float scale = dtrain_fsdp_loss_scale(fsdp);
        for (int micro = 0; micro < 2; micro++) {
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
            for (int i = 0; i < V * C; i++)
                dtrain_fsdp_grad(fsdp, "wte")[i] += scale * (wte[i] - 1 + (float)(2 * rank - ranks + 1));
            DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, 0));
            DTRAIN_CHECK(dtrain_fsdp_next(fsdp));
        }
        DTRAIN_CHECK(loss < limit ? dtrain_fsdp_step(fsdp, lr) : dtrain_fsdp_drop(fsdp));
    }
    DTRAIN_CHECK(dtrain_fsdp_unshard(fsdp));
    memcpy(value, wte, sizeof value);
    dtrain_fsdp_destroy(fsdp);
    for (int i = 0; i < V * C; i++)
        if (!(value[i] > 0.9f && value[i] < 1.1f))
            return DTRAIN_ERR_INVALID;
    return norm < 1.0 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* A trainer of its own arrays: ARRAYS pointers into one block, and as many for gradients. */
enum { ARRAYS = 4 };
static const char *const names[ARRAYS] = {"wte", "ln1w", "qkvw", "lnfw"};
static const size_t sizes[ARRAYS] = {V * C, L *C, L * 3 * C *C, C};

static float *load_block(float **params, int rank)
{
    size_t at = 0, count = sizes[0] + sizes[1] + sizes[2] + sizes[3];
    float *block = (float *)malloc(count * sizeof(float));
    for (size_t i = 0; block != NULL && i < count; i++)
        block[i] = (float)i / (float)count + (float)rank;
    for (int i = 0; i < ARRAYS; at += sizes[i++])
        params[i] = block + at;
    return block;
}

static dtrain_status sharded_on_arrays(dtrain_comm *world, void *user)
{
    float *params[ARRAYS], *grads[ARRAYS], value[L * 3 * C * C], lr = 0.02f;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), wrong = 0;
    float *block = load_block(params, rank);
    dtrain_fsdp *fsdp;
    dtrain_fsdp_desc desc;
    dtrain_param table[ARRAYS];
    int layers[ARRAYS] = {0, L, L, 0};
    memset(&desc, 0, sizeof desc);
    desc.optimizer.kind = DTRAIN_ADAMW;
    DTRAIN_CHECK(dtrain_params_of_arrays(table, ARRAYS, names, sizes, layers, block, NULL));
    desc.strategy = *(dtrain_strategy *)user;
    desc.shard_size = 2;
    DTRAIN_CHECK(dtrain_fsdp_adopt(&fsdp, world, table, ARRAYS, &desc));
    for (int i = 0; i < ARRAYS; i++)
        params[i] = (float *)table[i].data, grads[i] = (float *)table[i].grad;
    free(block);
    for (int step = 0; step < 400; step++) {
        DTRAIN_CHECK(dtrain_fsdp_forward_to(fsdp, 0));
        for (int l = 0; l < L; l++)
            DTRAIN_CHECK(dtrain_fsdp_forward_to(fsdp, 1 + l));
        DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
        layer_backward(params[3], grads[3], sizes[3], rank, ranks);
        for (int l = L - 1; l >= 0; l--) {
            size_t one = (size_t)l * C, two = (size_t)l * 3 * C * C;
            DTRAIN_CHECK(dtrain_fsdp_backward_to(fsdp, 1 + l));
            layer_backward(params[1] + one, grads[1] + one, C, rank, ranks);
            layer_backward(params[2] + two, grads[2] + two, 3 * C * C, rank, ranks);
        }
        DTRAIN_CHECK(dtrain_fsdp_backward_to(fsdp, 0));
        layer_backward(params[0], grads[0], sizes[0], rank, ranks);
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
    }
    for (int i = 0; i < ARRAYS; i++) {
        DTRAIN_CHECK(dtrain_fsdp_get(fsdp, names[i], value, -1));
        for (size_t k = 0; k < sizes[i]; k++)
            wrong += !(value[k] > 0.9f && value[k] < 1.1f);
    }
    dtrain_fsdp_destroy(fsdp);
    return wrong == 0 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

static dtrain_comm_desc poll_desc(void)
{
    dtrain_comm_desc desc = ZERO;
    desc.progress = DTRAIN_PROGRESS_POLL;
    return desc;
}

static void render_frame(void)
{
}

/* NULL makes a world of its own, in frames as well. */
static dtrain_status frame_loop(dtrain_comm *world, void *user)
{
    float grads[COUNT];
    size_t count = COUNT;
    dtrain_work *work;
    dtrain_status status = DTRAIN_OK;
    dtrain_comm *group = NULL;
    dtrain_comm_desc desc = poll_desc();
    int ready = world != NULL, own = world == NULL, done = 0, ranks;
    (void)user;
    if (own)
        DTRAIN_CHECK(dtrain_comm_create_async(&world, &desc));
    while (!ready) {
        DTRAIN_CHECK(dtrain_comm_poll(world, 300));
        DTRAIN_CHECK(dtrain_comm_ready(world, &ready));
        render_frame();
    }
    for (size_t i = 0; i < count; i++)
        grads[i] = (float)dtrain_comm_rank(world);
    DTRAIN_CHECK(dtrain_all_reduce_async(world, grads, grads, count, DTRAIN_F32, DTRAIN_SUM, &work));
    while (!done) {
        DTRAIN_CHECK(dtrain_comm_poll(world, 300));
        render_frame();
        if (dtrain_work_done(work))
            status = dtrain_work_wait(work), done = 1;
    }
    while (group == NULL) {
        DTRAIN_CHECK(dtrain_comm_shrink_poll(world, 300, &group));
        render_frame();
    }
    ranks = dtrain_comm_size(world);
    if (dtrain_comm_size(group) != ranks)
        status = DTRAIN_ERR_PEER_LOST;
    dtrain_comm_destroy(group);
    if (status == DTRAIN_OK && 2 * grads[COUNT - 1] != (float)(ranks * (ranks - 1)))
        status = DTRAIN_ERR_INVALID;
    if (own)
        dtrain_comm_destroy(world);
    return status;
}

/* A linear model y = w x + b in units of one parameter, reduced while the rest of the backward pass would run. */
static dtrain_status reduced_in_backward(dtrain_comm *world, void *user)
{
    float weights[2] = {0, 0}, grads[2] = {0, 0};
    uint64_t examples[4], epochs = 60;
    double total, norm;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), first;
    dtrain_param table[2];
    dtrain_sampler_desc data = ZERO;
    dtrain_optimizer_desc sgd = ZERO;
    dtrain_sampler sampler;
    dtrain_optimizer *optimizer;
    dtrain_ddp *ddp;
    (void)user;
    memset(table, 0, sizeof table);
    for (int i = 0; i < 2; i++) {
        table[i].name = i == 0 ? "w" : "b", table[i].dtype = DTRAIN_F32, table[i].shape[0] = 1, table[i].unit = i;
        table[i].data = &weights[i], table[i].grad = &grads[i];
    }
    data.count = 64, data.batch = 4;
    data.micro_batches = 8;
    sgd.kind = DTRAIN_SGD;
    DTRAIN_CHECK(dtrain_sampler_init(&sampler, &data));
    DTRAIN_CHECK(dtrain_optimizer_create(&optimizer, table, 2, &sgd, NULL));
    DTRAIN_CHECK(dtrain_ddp_create(&ddp, world, table, 2, NULL));
    for (uint64_t step = 0; step < epochs * dtrain_sampler_steps(&sampler); step++) {
        int mine = dtrain_sampler_share(&sampler, step, rank, ranks, &first);
        double weight = 0;
        for (int micro = first; micro < first + mine; micro++)
            weight += (double)dtrain_sampler_batch(&sampler, step, micro, NULL);
        DTRAIN_CHECK(dtrain_ddp_begin(ddp, mine, weight));
        for (int micro = first; micro < first + mine; micro++) {
            size_t n = dtrain_sampler_batch(&sampler, step, micro, examples);
            float error[4], slope = weights[0], offset = weights[1];
            for (size_t i = 0; i < n; i++) {
                float x = (float)examples[i] / 32 - 1;
                error[i] = slope * x + offset - (3 * x - 1);
                grads[1] += error[i];
            }
            DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 1));
            for (size_t i = 0; i < n; i++)
                grads[0] += error[i] * ((float)examples[i] / 32 - 1);
            DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 0));
            DTRAIN_CHECK(dtrain_ddp_next(ddp));
        }
        DTRAIN_CHECK(dtrain_ddp_finish(ddp, &total));
        DTRAIN_CHECK(dtrain_clip_grad_norm(table, 2, 1.0f, &norm));
        DTRAIN_CHECK(dtrain_optimizer_step(optimizer, 0.2f));
    }
    dtrain_ddp_destroy(ddp);
    dtrain_optimizer_destroy(optimizer);
    int learnt = weights[0] > 2.99f && weights[0] < 3.01f && weights[1] > -1.01f && weights[1] < -0.99f;
    return learnt ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* What ranks tell each other beside sums of gradients. */
static dtrain_status collected(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), all[4], one = rank, back = -1;
    size_t counts[4], offsets[4], goes[4], comes[4], bytes, absent;
    uint64_t lines = (uint64_t)rank + 3, begin = 0, end = 0;
    float parts[10] = {0}, mine[4], sums[4], tokens[4], taken[4];
    char address[16];
    (void)user;
    for (int r = 0; r < ranks; r++) {
        counts[r] = (size_t)r + 1; /* parts of any length, in any place */
        offsets[r] = (size_t)(r * (r + 1) / 2);
        goes[r] = r == (rank + 1) % ranks ? 4 : 0; /* to the next rank */
    }
    for (int k = 0; k < 4; k++)
        mine[k] = tokens[k] = (float)rank;
    DTRAIN_CHECK(dtrain_gather(world, &one, all, (size_t)ranks, DTRAIN_I32, 0));
    DTRAIN_CHECK(dtrain_scatter(world, all, &back, (size_t)ranks, DTRAIN_I32, 0));
    DTRAIN_CHECK(dtrain_gather_v(world, mine, parts, counts, offsets, DTRAIN_F32, 0));
    DTRAIN_CHECK(dtrain_scatter_v(world, parts, mine, counts, offsets, DTRAIN_F32, 0));
    DTRAIN_CHECK(dtrain_all_gather_v(world, mine, parts, counts, offsets, DTRAIN_F32));
    DTRAIN_CHECK(dtrain_reduce_scatter_v(world, parts, sums, counts, offsets, DTRAIN_F32, DTRAIN_SUM));
    DTRAIN_CHECK(dtrain_all_to_all(world, goes, comes, (size_t)ranks, DTRAIN_U64));
    DTRAIN_CHECK(dtrain_all_to_all_v(world, tokens, goes, NULL, taken, comes, NULL, DTRAIN_F32));
    DTRAIN_CHECK(dtrain_exscan(world, &lines, &begin, 1, DTRAIN_U64, DTRAIN_SUM)); /* rank 0's begin stays 0 */
    DTRAIN_CHECK(dtrain_scan(world, &lines, &end, 1, DTRAIN_U64, DTRAIN_SUM));
    if (rank == 0)
        DTRAIN_CHECK(dtrain_store_set(world, "address", "10.0.0.1:80", 12));
    DTRAIN_CHECK(dtrain_store_wait(world, "address", address, sizeof address, &bytes));
    DTRAIN_CHECK(dtrain_store_get(world, "nobody's", address, 0, &absent)); /* does not wait */
    DTRAIN_CHECK(dtrain_barrier(world));
    DTRAIN_CHECK(dtrain_store_delete(world, "address")); /* when nobody needs it any more */
    int good = bytes == 12 && strcmp(address, "10.0.0.1:80") == 0 && back == rank && absent == DTRAIN_STORE_ABSENT;
    size_t count = offsets[ranks - 1] + counts[ranks - 1];
    good &= parts[count - 1] == (float)(ranks - 1) && sums[0] == (float)(ranks * rank);
    good &= taken[3] == (float)((rank + ranks - 1) % ranks);
    good &= begin == (uint64_t)(rank * 3 + rank * (rank - 1) / 2) && end == begin + lines;
    return good ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* Calls that go on beside the computation, and a group of the ranks that are left. */
static dtrain_status beside(dtrain_comm *world, void *user)
{
    float params[COUNT], grads[COUNT], all[COUNT];
    size_t counts[4];
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), one = rank, before = 0;
    size_t count = COUNT, lo, n = dtrain_shard(world, count, rank, &lo), bytes[1] = {sizeof params};
    void *buffers[1] = {params};
    uint64_t step = (uint64_t)rank, lines = 2, begin = 0, end = 0;
    dtrain_comm *group = NULL;
    dtrain_work *work, *sent, *came;
    (void)user;
    for (size_t i = 0; i < count; i++)
        params[i] = 1, grads[i] = (float)(2 * rank - ranks + 3); /* of one example a rank; the mean is 2 */
    DTRAIN_CHECK(dtrain_reduce_scatter_async(world, grads, grads + lo, count, DTRAIN_F32, DTRAIN_SUM, &work));
    DTRAIN_CHECK(dtrain_work_wait(work));
    for (size_t i = lo; i < lo + n; i++)
        params[i] -= 0.5f * grads[i] / (float)ranks;
    DTRAIN_CHECK(dtrain_all_gather_async(world, params + lo, params, count, DTRAIN_F32, &work));
    DTRAIN_CHECK(dtrain_work_wait(work));
    DTRAIN_CHECK(dtrain_broadcast_async(world, params, count, DTRAIN_F32, 0, &work));
    DTRAIN_CHECK(dtrain_work_wait(work));
    DTRAIN_CHECK(dtrain_exscan_async(world, &lines, &begin, 1, DTRAIN_U64, DTRAIN_SUM, &work));
    DTRAIN_CHECK(dtrain_work_wait(work));
    DTRAIN_CHECK(dtrain_scan_async(world, &lines, &end, 1, DTRAIN_U64, DTRAIN_SUM, &work));
    DTRAIN_CHECK(dtrain_work_wait(work));
    if (ranks > 1) { /* to the next rank, from the one before */
        DTRAIN_CHECK(dtrain_recv_async(world, &before, 1, DTRAIN_I32, (rank + ranks - 1) % ranks, &came));
        DTRAIN_CHECK(dtrain_send_async(world, &one, 1, DTRAIN_I32, (rank + 1) % ranks, &sent));
        DTRAIN_CHECK(dtrain_work_wait(sent));
        DTRAIN_CHECK(dtrain_work_wait(came));
    }
    for (int r = 0; r < ranks; r++)
        counts[r] = dtrain_shard(world, count, r, NULL);
    dtrain_call call;
    memset(&call, 0, sizeof call);
    call.kind = DTRAIN_CALL_GATHER;
    call.in = params + lo, call.out = all, call.counts = counts, call.dtype = DTRAIN_F32;
    DTRAIN_CHECK(dtrain_start(world, &call, &work));
    DTRAIN_CHECK(dtrain_work_wait(work));
    for (size_t i = 0; i < count && rank == 0; i++)
        if (all[i] != params[i])
            return DTRAIN_ERR_INVALID;
    DTRAIN_CHECK(dtrain_comm_shrink(world, &group));
    DTRAIN_CHECK(dtrain_resync(group, step, buffers, bytes, 1, &step));
    int good = params[COUNT - 1] == 0 && before == (ranks > 1 ? (rank + ranks - 1) % ranks : 0);
    good &= step == (uint64_t)ranks - 1 && begin == 2 * (uint64_t)rank && end == begin + 2;
    dtrain_comm_destroy(group);
    return good ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* On a GPU's memory with the device of dtrain_cuda_create; NULL is the CPU. */
static dtrain_status on_a_device(dtrain_comm *world, void *user)
{
    dtrain_device *gpu = NULL;
    dtrain_optimizer_desc sgd = ZERO;
    float w[3] = {1, 2, 3}, g[3] = {1, 1, 1}, update[3] = {2, 2, 2}, wide[3];
    uint16_t narrow[3];
    uint32_t found = 0;
    (void)world, (void)user;
    DTRAIN_CHECK(dtrain_device_axpy(gpu, DTRAIN_F32, g, 0.5, update, 3));
    DTRAIN_CHECK(dtrain_device_overflow(gpu, DTRAIN_F32, g, 3, &found));     /* a NaN or an infinity? */
    DTRAIN_CHECK(dtrain_device_sgd(gpu, w, g, NULL, 3, &sgd, 0.5f, narrow)); /* and the weights in BF16 */
    DTRAIN_CHECK(dtrain_convert(narrow, DTRAIN_BF16, wide, DTRAIN_F32, 3));
    return !found && wide[2] == 2 && w[2] == 2 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* Groups and tables of a device; NULL is the CPU. */
static dtrain_status on_gpus(dtrain_comm *world, void *user)
{
    dtrain_device *gpu = NULL;
    dtrain_device_group *group;
    dtrain_fsdp *fsdp;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc desc = ZERO;
    float sum = 1;
    (void)user;
    table_of(table);
    for (int i = 0, layer = 2; i < 1; i++) {
        table[i].device = gpu;
        DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &desc));
        float *w = dtrain_fsdp_unit_param(fsdp, "qkvw", layer);
        DTRAIN_CHECK(dtrain_device_group_create(&group, world, gpu, NULL));
        DTRAIN_CHECK(dtrain_device_group_all_reduce(group, &sum, &sum, 1, DTRAIN_F32, DTRAIN_SUM));
        if (w != dtrain_fsdp_param(fsdp, "qkvw") + 3 * C * C || sum != (float)dtrain_comm_size(world))
            return DTRAIN_ERR_INVALID;
    }
    dtrain_device_group_destroy(group);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

/* Layers of one weight: the first stage multiplies, the last one's loss is the half square of its distance from 6. */
enum { MICRO = 4 };

static dtrain_status multiply(void *user, const dtrain_layer_context *c)
{
    float x = *(const float *)c->input.data, y = c->params[0][0] * x;
    *(float *)c->output.data = *(int *)user ? (y - 6) * (y - 6) / 2 : y;
    return DTRAIN_OK;
}

static dtrain_status multiply_backward(void *user, const dtrain_layer_context *c)
{
    float x = *(const float *)c->input.data, w = c->params[0][0];
    float d = *(int *)user ? w * x - 6 : *(const float *)c->d_output.data;
    c->grads[0][0] += d * x;
    if (c->d_input.data != NULL)
        *(float *)c->d_input.data = d * w;
    return DTRAIN_OK;
}

static dtrain_status in_parts(dtrain_comm *world, void *user)
{
    const char *const weight[1] = {"w0"}, *const last_weight[1] = {"w1"};
    int ranks = dtrain_comm_size(world), stages = ranks % 2 == 0 ? 2 : 1, good;
    float data[MICRO] = {1, 1, 1, 1}, start = 1, lr = 0.1f;
    double norm = 0;
    void *batches[MICRO] = ZERO;
    dtrain_mesh *mesh;
    dtrain_fsdp *fsdp;
    dtrain_module *module;
    dtrain_pipeline *pipeline;
    dtrain_tensor tensors[MICRO], *inputs;
    dtrain_param table[1];
    dtrain_layer layers[1];
    dtrain_fsdp_desc desc = ZERO;
    dtrain_module_desc held = ZERO;
    dtrain_pipeline_desc schedule = ZERO;
    (void)user;
    memset(table, 0, sizeof table), memset(layers, 0, sizeof layers), memset(tensors, 0, sizeof tensors);
    dtrain_mesh_dim dims[] = {{"data", 0}, {"pipeline", stages}};
    DTRAIN_CHECK(dtrain_mesh_create(&mesh, world, dims, 2));
    dtrain_comm *model = dtrain_mesh_group(mesh, "pipeline");
    int stage = dtrain_comm_rank(model), last = stage == stages - 1;
    desc.strategy = DTRAIN_FULL_SHARD, held.micro_batches = MICRO;
    table[0].name = last ? "w1" : "w0", table[0].dtype = DTRAIN_F32, table[0].shape[0] = 1, table[0].data = &start;
    layers[0].name = "multiply", layers[0].params = last ? last_weight : weight, layers[0].param_count = 1;
    layers[0].forward = multiply, layers[0].backward = multiply_backward, layers[0].user = &last;
    for (int i = 0; i < MICRO; i++) {
        tensors[i].dtype = DTRAIN_F32, tensors[i].ndim = 1, tensors[i].shape[0] = 1, tensors[i].data = &data[i];
        tensors[i].count = 1, tensors[i].bytes = sizeof(float);
    }
    inputs = stage == 0 ? tensors : NULL;
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, dtrain_mesh_group(mesh, "data"), table, 1, &desc));
    DTRAIN_CHECK(dtrain_module_create(&module, layers, 1, table, 1, &held));
    schedule.modules = &module, schedule.fsdps = &fsdp, schedule.micro_batches = MICRO;
    DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, model, &schedule));
    DTRAIN_CHECK(dtrain_pipeline_agree(pipeline, inputs));
    for (int step = 0; step < 200; step++) {
        DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, MICRO, MICRO));
        DTRAIN_CHECK(dtrain_pipeline_step(pipeline, inputs, batches));
        DTRAIN_CHECK(dtrain_fsdp_clip_model_grad_norm(&fsdp, 1, model, 1.0f, &norm));
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
    }
    DTRAIN_CHECK(dtrain_fsdp_get(fsdp, table[0].name, &start, -1));
    good = stages == 1 ? start > 5.9f && start < 6.1f : start * start > 5.9f && start * start < 6.1f;
    dtrain_pipeline_destroy(pipeline);
    dtrain_module_destroy(module);
    dtrain_fsdp_destroy(fsdp);
    dtrain_mesh_destroy(mesh);
    return good && norm < 0.1 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* Saves, and loads into a new FSDP on as many ranks. */
static dtrain_status checkpointed(dtrain_comm *world, void *user)
{
    dtrain_checkpoint *ckpt;
    dtrain_checkpoint_desc desc = ZERO;
    dtrain_checkpoint_state state = ZERO;
    dtrain_pieces lists[2];
    dtrain_sampler sampler;
    dtrain_sampler_desc data = ZERO;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc sharded = ZERO;
    dtrain_fsdp *fsdp;
    float value[V * C];
    char directory[64];
    int good = 1;
    snprintf(directory, sizeof directory, "%s.run%d", (const char *)user, dtrain_comm_size(world));
    desc.directory = directory;
    data.count = 64;
    for (int resume = 0; resume < 2; resume++) {
        uint64_t step = resume ? 0 : 50;
        table_of(table);
        DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &sharded));
        DTRAIN_CHECK(dtrain_sampler_init(&sampler, &data));
        for (int i = 0; i < V * C; i++)
            value[i] = resume ? 0 : (float)i;
        DTRAIN_CHECK(dtrain_fsdp_set(fsdp, "wte", value, 0));
        DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &desc));
        lists[0] = dtrain_fsdp_pieces(fsdp);
        lists[1] = dtrain_sampler_pieces(&sampler);
        state.lists = lists, state.list_count = 2;
        if (resume)
            DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, NULL));
        step = resume ? state.step : step;
        state.step = step;
        DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));
        DTRAIN_CHECK(dtrain_fsdp_get(fsdp, "wte", value, -1));
        good &= step == 50 && value[V * C - 1] == (float)(V * C - 1);
        dtrain_checkpoint_destroy(ckpt);
        dtrain_fsdp_destroy(fsdp);
    }
    return good ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* What follows holds the blocks of code of the headers, as this file's other functions hold the manual's. */
static double far_from(const float *values, size_t count, double expected)
{
    double most = 0;
    for (size_t i = 0; i < count; i++)
        most = fmax(most, fabs((double)values[i] - expected));
    return most;
}

/* By their bits: -Ofast takes all numbers for finite. */
static int all_finite(const float *values, size_t count)
{
    int finite = 1;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        finite &= (bits & 0x7f800000) != 0x7f800000;
    }
    return finite;
}

/* tensor/tensor.h and train/train.h: the formulas of optimizers give what the optimizers do. */
static dtrain_status formulas(dtrain_comm *world, void *user)
{
    float params[COUNT], sgd[COUNT], grads[COUNT], first[COUNT] = ZERO, second[COUNT] = ZERO, velocities[COUNT] = ZERO;
    uint16_t halves[COUNT];
    size_t count = COUNT;
    dtrain_optimizer_desc desc = ZERO;
    double p = 2, q = 2, m = 0, v = 0, velocity = 0, d, wrong = 0;
    double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.25, momentum = 0.5, lr = 0.125;
    (void)user;
    desc.weight_decay = 0.25f, desc.momentum = 0.5f, desc.decoupled_decay = dtrain_comm_rank(world) % 2;
    for (size_t i = 0; i < count; i++)
        params[i] = sgd[i] = 2;
    for (int step = 1; step <= 5; step++) {
        double g = 1.0 / step;
        for (size_t i = 0; i < count; i++)
            grads[i] = (float)g;
        m = beta1 * m + (1 - beta1) * g;
        v = beta2 * v + (1 - beta2) * (g * g);
        double root = 1 / sqrt(1 - pow(beta2, step));
        p = (1 - lr * weight_decay) * p - (lr / (1 - pow(beta1, step))) * (m / (sqrt(v) * root + eps));
        dtrain_adamw(params, grads, first, second, count, &desc, 0.125f, (uint64_t)step);
        wrong = fmax(wrong, far_from(params, count, p));
        DTRAIN_CHECK(dtrain_device_sgd(NULL, sgd, grads, velocities, count, &desc, 0.125f, NULL));
        double was = p;
        p = q;
        if (!desc.decoupled_decay)
            g = g + weight_decay * p;
        else
            p = (1 - lr * weight_decay) * p;
        velocity = momentum * velocity + g;
        d = velocity;
        p = p - lr * d;
        q = p, p = was;
        wrong = fmax(wrong, far_from(sgd, count, q));
    }
    for (size_t i = 0; i < count; i++)
        params[i] = 1;
    DTRAIN_CHECK(dtrain_convert(params, DTRAIN_F32, halves, DTRAIN_BF16, count));
    return wrong < 1e-5 && halves[COUNT - 1] == 0x3f80 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* compress/compress.h: vectors that each compressor sends without loss. */
static dtrain_status compressed(dtrain_comm *world, void *user)
{
    enum { ROWS = 8, COLUMNS = 12 };
    float grads[ROWS * COLUMNS];
    size_t rows = ROWS, columns = COLUMNS, count = rows * columns;
    uint64_t seed = 1;
    int good = 1, ranks = dtrain_comm_size(world);
    dtrain_topk_desc topk = ZERO;
    (void)user;
    topk.schedule.ratio = 1;
    for (int which = 0; which < 3; which++) {
        dtrain_compressed *compressed;
        dtrain_compressor compressor = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);
        if (which == 1)
            DTRAIN_CHECK(dtrain_compressor_topk(&compressor, &topk, NULL));
        if (which == 2)
            DTRAIN_CHECK(dtrain_compressor_powersgd(&compressor, rows, columns, 4, seed, NULL));
        DTRAIN_CHECK(dtrain_compressed_create(&compressed, world, count, &compressor, NULL));
        for (size_t i = 0; i < count; i++)
            grads[i] = 1;
        DTRAIN_CHECK(dtrain_compressed_all_reduce(compressed, grads, grads, DTRAIN_MEAN));
        if (!all_finite(grads, count))
            dtrain_compressed_drop(compressed);
        uint64_t sent = dtrain_compressed_get_stats(compressed).sent_bytes;
        dtrain_compressed_destroy(compressed);
        good &= far_from(grads, count, 1) < 1e-3 && (sent > 0) == (ranks > 1);
    }
    return good ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* shard/ddp.h: a step of no examples, and one with a gradient that is not finite, are given up. */
static dtrain_status given_up(dtrain_comm *world, void *user)
{
    float weights[COUNT] = ZERO, grads[COUNT] = ZERO;
    size_t count = COUNT;
    int good = 1, applied = 0;
    dtrain_param table = ZERO;
    dtrain_compress_desc compress = ZERO;
    dtrain_ddp_desc desc = ZERO;
    dtrain_ddp *ddp;
    (void)user;
    table.name = "w", table.dtype = DTRAIN_F32, table.shape[0] = count, table.data = weights, table.grad = grads;
    compress.kind = DTRAIN_COMPRESS_INT8, compress.least_count = 1;
    desc.compress = &compress;
    DTRAIN_CHECK(dtrain_ddp_create(&ddp, world, &table, 1, &desc));
    for (int step = 0; step < 4; step++) {
        double examples;
        DTRAIN_CHECK(dtrain_ddp_begin(ddp, 1, step == 1 ? 0 : 2));
        for (size_t i = 0; i < count && step != 1; i++)
            grads[i] += step == 2 ? INFINITY : 2;
        DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 0));
        DTRAIN_CHECK(dtrain_ddp_finish(ddp, &examples));
        if (examples == 0 || !all_finite(grads, count))
            DTRAIN_CHECK(dtrain_ddp_drop(ddp));
        else
            good &= far_from(grads, count, 1) < 0.01, applied++;
    }
    dtrain_ddp_destroy(ddp);
    return good && applied == 2 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

static void read_weights(const char *path, float *weights)
{
    for (size_t i = 0; path != NULL && i < COUNT; i++)
        weights[i] = 5;
}

/* loose/local_sgd.h: other weights than those of the creation. */
static dtrain_status published(dtrain_comm *world, void *user)
{
    float weights[COUNT] = ZERO, grads[COUNT] = ZERO;
    const char *path = "model";
    dtrain_param table = ZERO;
    dtrain_local_sgd_desc desc = ZERO;
    dtrain_local_sgd *local;
    (void)user;
    table.name = "w", table.dtype = DTRAIN_F32, table.shape[0] = COUNT, table.data = weights, table.grad = grads;
    desc.steps = 1, desc.blocking = 1;
    DTRAIN_CHECK(dtrain_local_sgd_create(&local, world, &table, 1, &desc));
    read_weights(path, weights);
    DTRAIN_CHECK(dtrain_local_sgd_publish(local));
    DTRAIN_CHECK(dtrain_local_sgd_step(local, 1));
    DTRAIN_CHECK(dtrain_local_sgd_finish(local));
    dtrain_local_sgd_destroy(local);
    return far_from(weights, COUNT, 5) == 0 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

static void forward(const float *weights, int unit)
{
    (void)weights, (void)unit;
}

static void backward(const float *weights, float *grads, int unit)
{
    layer_backward(weights + unit * 3 * C * C, grads + unit * 3 * C * C, 3 * C * C, 0, 1);
}

/* shard/fsdp.h: one stacked tensor, of a unit a layer. */
static dtrain_status fsdp_loop(dtrain_comm *world, void *user)
{
    float value[L * 3 * C * C], lr = 0.02f;
    double norm = 1;
    int units = L;
    uint64_t steps = 200;
    size_t count = 1;
    dtrain_fsdp *fsdp;
    dtrain_param tables[PARAMS], *table = tables + 1;
    (void)user;
    table_of(tables);
    table->unit = 0;
    dtrain_fsdp_desc desc = ZERO;
    desc.strategy = DTRAIN_FULL_SHARD;
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc));
    float *qkvw = dtrain_fsdp_param(fsdp, "qkvw");
    float *d_qkvw = dtrain_fsdp_grad(fsdp, "qkvw");
    for (uint64_t step = 0; step < steps; step++) {
        for (int unit = 0; unit < units; unit++) {
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, unit));
            forward(qkvw, unit);
            DTRAIN_CHECK(dtrain_fsdp_release(fsdp, unit));
        }
        for (int unit = units - 1; unit >= 0; unit--) {
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, unit));
            backward(qkvw, d_qkvw, unit);
            DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, unit));
        }
        DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, &norm));
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
    }
    DTRAIN_CHECK(dtrain_fsdp_get(fsdp, "qkvw", value, -1));
    dtrain_fsdp_destroy(fsdp);
    return far_from(value, sizeof value / sizeof *value, 1) < 0.1 && norm < 1 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* Counts the weights of wte, and the elements of the program's own arrays. */
static void put(void *user, const dtrain_piece *piece)
{
    uint64_t *file = (uint64_t *)user;
    if (strcmp(piece->name, "wte") == 0 && piece->suffix == NULL)
        file[0] += piece->count;
    if (strncmp(piece->name, "own", 3) == 0)
        file[1] += piece->count;
}

/* tensor/pieces.h */
static dtrain_status pieces(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    float array[3] = {1, 2, 3};
    uint64_t file[2] = {0, 0};
    dtrain_piece own[2];
    dtrain_sampler sampler;
    dtrain_sampler_desc data = ZERO;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc sharded = ZERO;
    dtrain_fsdp *fsdp;
    (void)user;
    table_of(table);
    data.count = 64;
    sharded.strategy = DTRAIN_FULL_SHARD;
    memset(own, 0, sizeof own);
    for (int i = 0; i < 2; i++) {
        own[i].name = i == 0 ? "own.a" : "own.b", own[i].dtype = DTRAIN_F32, own[i].ndim = 1, own[i].shape[0] = 3;
        own[i].data = array, own[i].count = 3, own[i].copies = ranks, own[i].copy = rank;
    }
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &sharded));
    DTRAIN_CHECK(dtrain_sampler_init(&sampler, &data));
    dtrain_pieces lists[3] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&sampler)};
    lists[2].pieces = own;
    lists[2].count = 2;
    DTRAIN_CHECK(dtrain_pieces_each(lists, 3, ranks, rank, put, file));
    dtrain_fsdp_destroy(fsdp);
    DTRAIN_CHECK(dtrain_all_reduce(world, file, file, 2, DTRAIN_U64, DTRAIN_SUM));
    return file[0] == V * C && file[1] == 6 * (uint64_t)ranks ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* format/safetensors.h, in the working directory: rank 0 writes, all read. */
static dtrain_status tensor_files(dtrain_comm *world, void *user)
{
    enum { FILE_BYTES = 8 + 120 + (V * C + L * C) * 4 };
    float wte[V * C], wpe[L * C];
    size_t wte_shape[2] = {V, C}, wpe_shape[2] = {L, C};
    unsigned char weights[FILE_BYTES];
    const void *data;
    (void)user;
    for (int i = 0; i < V * C; i++)
        wte[i] = (float)i;
    memset(wpe, 0, sizeof wpe);
    dtrain_safetensors_source arrays[2] = {{"wte", 0, DTRAIN_F32, 2, wte_shape, wte, NULL, NULL},
                                           {"wpe", 0, DTRAIN_F32, 2, wpe_shape, wpe, NULL, NULL}};
    if (dtrain_comm_rank(world) == 0)
        DTRAIN_CHECK(dtrain_safetensors_save("model.safetensors", arrays, 2, NULL));
    DTRAIN_CHECK(dtrain_barrier(world));
    memset(wte, 0, sizeof wte);
    dtrain_safetensors *file;
    DTRAIN_CHECK(dtrain_safetensors_open(&file, "model.safetensors", NULL));
    DTRAIN_CHECK(dtrain_safetensors_load(file, "wte", wte, V * C, DTRAIN_F32));
    dtrain_safetensors_close(file);
    FILE *raw = fopen("model.safetensors", "rb");
    int good = raw != NULL && fread(weights, 1, sizeof weights, raw) == sizeof weights && fgetc(raw) == EOF;
    if (raw != NULL)
        fclose(raw);
    DTRAIN_CHECK(dtrain_safetensors_open_memory(&file, weights, sizeof weights, NULL));
    DTRAIN_CHECK(dtrain_safetensors_view(file, dtrain_safetensors_find(file, "wte", 3), &data));
    good &= wte[V * C - 1] == V * C - 1 && memcmp(data, wte, sizeof wte) == 0;
    dtrain_safetensors_close(file);
    DTRAIN_CHECK(dtrain_barrier(world));
    return good ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

/* checkpoint/checkpoint.h, in the working directory; goes on from what another number of ranks has saved there. */
static dtrain_status run_directory(dtrain_comm *world, void *user)
{
    dtrain_safetensors_pair values[1] = {{"note", 0, "a text", 0}};
    dtrain_checkpoint *ckpt;
    dtrain_sampler sampler;
    dtrain_sampler_desc data = ZERO;
    dtrain_param table[PARAMS];
    dtrain_fsdp_desc sharded = ZERO;
    dtrain_fsdp *fsdp;
    uint64_t step = 0, expected = (uint64_t)dtrain_comm_size(world) - 1;
    int resume = expected > 0, good;
    float value[V * C] = ZERO;
    (void)user;
    table_of(table);
    data.count = 64;
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &sharded));
    DTRAIN_CHECK(dtrain_sampler_init(&sampler, &data));
    dtrain_checkpoint_desc desc = ZERO;
    desc.directory = "run";
    desc.keep_last = 3;
    DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &desc));
    dtrain_pieces lists[2] = {dtrain_fsdp_pieces(fsdp), dtrain_sampler_pieces(&sampler)};
    dtrain_checkpoint_state state = ZERO;
    state.lists = lists;
    state.list_count = 2;
    if (resume) {
        DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, NULL));
        step = state.step;
    }
    DTRAIN_CHECK(dtrain_fsdp_get(fsdp, "wte", value, -1));
    good = step == expected && far_from(value, V * C, (double)expected) == 0;
    step++;
    for (int i = 0; i < V * C; i++)
        value[i] = (float)step;
    DTRAIN_CHECK(dtrain_fsdp_set(fsdp, "wte", value, 0));
    state.values = values, state.value_count = 1;
    state.step = step;
    DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));
    const char *note = dtrain_checkpoint_value(ckpt, "note", NULL);
    good &= resume ? note != NULL && strcmp(note, "a text") == 0 : note == NULL;
    if (dtrain_comm_rank(world) == 0) {
        DTRAIN_CHECK(dtrain_checkpoint_verify("run"));
        DTRAIN_CHECK(dtrain_checkpoint_export("run", "run.safetensors", 0));
    }
    DTRAIN_CHECK(dtrain_barrier(world));
    dtrain_checkpoint_destroy(ckpt);
    dtrain_fsdp_destroy(fsdp);
    return good ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

static int passed, failed;

static void check(const char *what, int ranks, dtrain_status status)
{
    printf("%s %s on %d ranks\n", status == DTRAIN_OK ? "ok" : "FAIL", what, ranks);
    passed += status == DTRAIN_OK;
    failed += status != DTRAIN_OK;
}

/* An argument is the beginning of paths for sockets and checkpoints; without one these snippets are left out. */
int main(int argc, char **argv)
{
    dtrain_comm *world;
    dtrain_comm_desc poll = poll_desc();
    dtrain_strategy full = DTRAIN_FULL_SHARD, hybrid = DTRAIN_HYBRID_SHARD;
    check("a world of its own", 0, from_the_environment(NULL, NULL));
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL)); /* from the environment; a world of one without it */
    int size = dtrain_comm_size(world);
    check("data-parallel from the environment", size, data_parallel(world, NULL));
    check("optimizer state sharded from the environment", size, optimizer_state_sharded(world, NULL));
    check("fully sharded from the environment", size, fully_sharded(world, &full));
    check("sharded on its own arrays from the environment", size, sharded_on_arrays(world, &full));
    check("reduced in backward from the environment", size, reduced_in_backward(world, NULL));
    check("formulas of optimizers from the environment", size, formulas(world, NULL));
    check("compressed from the environment", size, compressed(world, NULL));
    check("steps given up from the environment", size, given_up(world, NULL));
    check("weights published from the environment", size, published(world, NULL));
    check("the loop of FSDP from the environment", size, fsdp_loop(world, NULL));
    check("pieces from the environment", size, pieces(world, NULL));
    dtrain_comm_destroy(world);
    if (size == 1)
        check("a frame loop in a world that it has formed", size, frame_loop(NULL, NULL));
    for (int ranks = 1; ranks <= 4 && size == 1; ranks++) {
        check("data-parallel", ranks, dtrain_run_threads(ranks, data_parallel, NULL, NULL));
        check("reduced in backward", ranks, dtrain_run_threads(ranks, reduced_in_backward, NULL, NULL));
        check("on a device", ranks, dtrain_run_threads(ranks, on_a_device, NULL, NULL));
        check("collected", ranks, dtrain_run_threads(ranks, collected, NULL, NULL));
        check("beside the computation", ranks, dtrain_run_threads(ranks, beside, NULL, NULL));
        check("optimizer state sharded", ranks, dtrain_run_threads(ranks, optimizer_state_sharded, NULL, NULL));
        check("fully sharded", ranks, dtrain_run_threads(ranks, fully_sharded, &full, NULL));
        check("sharded on its own arrays", ranks, dtrain_run_threads(ranks, sharded_on_arrays, &full, NULL));
        if (ranks % 2 == 0)
            check("fully sharded in nodes of two", ranks, dtrain_run_threads(ranks, fully_sharded, &hybrid, NULL));
        check("unequal numbers of examples", ranks, dtrain_run_threads(ranks, unequal, NULL, NULL));
        check("on memory of devices", ranks, dtrain_run_threads(ranks, on_gpus, NULL, NULL));
        check("in parts", ranks, dtrain_run_threads(ranks, in_parts, NULL, NULL));
        check("formulas of optimizers", ranks, dtrain_run_threads(ranks, formulas, NULL, NULL));
        check("compressed", ranks, dtrain_run_threads(ranks, compressed, NULL, NULL));
        check("steps given up", ranks, dtrain_run_threads(ranks, given_up, NULL, NULL));
        check("weights published", ranks, dtrain_run_threads(ranks, published, NULL, NULL));
        check("the loop of FSDP", ranks, dtrain_run_threads(ranks, fsdp_loop, NULL, NULL));
        check("pieces", ranks, dtrain_run_threads(ranks, pieces, NULL, NULL));
        if (argc > 1) {
            check("placed by hand", ranks, dtrain_run_threads(ranks, placed_by_hand, argv[1], NULL));
            check("checkpointed", ranks, dtrain_run_threads(ranks, checkpointed, argv[1], NULL));
        }
        check("a frame loop", ranks, dtrain_run_threads(ranks, frame_loop, NULL, &poll));
    }
    char directory[256];
    snprintf(directory, sizeof directory, "%s.files", argc > 1 ? argv[1] : "");
    int inside = argc > 1 && size == 1;
    if (inside && (mkdir(directory, 0700) != 0 || chdir(directory) != 0))
        check("a working directory", size, DTRAIN_ERR_IO), inside = 0;
    for (int ranks = 1; ranks <= 4 && inside; ranks++) {
        check("files of tensors", ranks, dtrain_run_threads(ranks, tensor_files, NULL, NULL));
        check("a directory of checkpoints", ranks, dtrain_run_threads(ranks, run_directory, NULL, NULL));
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
