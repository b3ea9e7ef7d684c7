/* The manual's ways in, as a program writes them; compiled as C99 and as C++11, and run as a world of one and
 * on threads. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <pthread.h>
#include <string.h>

#define COUNT 103 /* 2 and 4 ranks do not divide it */

static dtrain_status same_everywhere(dtrain_comm *world, const float *params)
{
    return dtrain_comm_check_equal(world, params, COUNT, DTRAIN_F32);
}

/* Stands for a trainer's backward pass: the mean over ranks of what it gives is params - 1. */
static void compute_gradients(const float *params, float *grads, int rank, int ranks)
{
    for (size_t i = 0; i < COUNT; i++)
        grads[i] = params[i] - 1 + (float)(2 * rank - ranks + 1);
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
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t count = COUNT;
    (void)user;
    for (size_t i = 0; i < count; i++)
        params[i] = (float)rank + (float)i / COUNT;
    DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0)); /* every rank starts from rank 0's weights */
    for (int step = 0; step < 100; step++) {
        compute_gradients(params, grads, rank, ranks);
        DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN));
        for (size_t i = 0; i < count; i++)
            params[i] -= 0.1f * grads[i];
    }
    DTRAIN_CHECK(same_everywhere(world, params));
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
    float params[COUNT], grads[COUNT], m[COUNT], v[COUNT];
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t count = COUNT;
    (void)user;
    memset(params, 0, sizeof params);
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int step = 0; step < 100; step++) {
        compute_gradients(params, grads, rank, ranks);
        size_t lo, n = dtrain_shard(world, count, rank, &lo); /* uneven is fine: earlier ranks one longer */
        DTRAIN_CHECK(dtrain_reduce_scatter(world, grads, grads + lo, count, DTRAIN_F32, DTRAIN_MEAN));
        for (size_t i = 0; i < n; i++)
            update(params + lo + i, grads + lo + i, m + i, v + i);
        DTRAIN_CHECK(dtrain_all_gather(world, params + lo, params, count, DTRAIN_F32));
    }
    DTRAIN_CHECK(same_everywhere(world, params));
    return trained(params) ? DTRAIN_OK : DTRAIN_ERR_INVALID;
}

#ifdef __cplusplus
#define ZERO                                                                                                           \
    {                                                                                                                  \
    }
#else
#define ZERO                                                                                                           \
    {                                                                                                                  \
        0                                                                                                              \
    }
#endif

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
    double norm = 0;
    float value[V * C];
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    desc.strategy = *(dtrain_strategy *)user;
    desc.shard_size = 2;
    desc.optimizer.kind = DTRAIN_ADAMW;
    table_of(table);
    DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &desc));
    float *wte = dtrain_fsdp_param(fsdp, "wte"), *qkvw = dtrain_fsdp_param(fsdp, "qkvw");
    for (int step = 0; step < 400; step++) {
        DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
        DTRAIN_CHECK(dtrain_fsdp_release(fsdp, 0));
        for (int l = 0; l < L; l++) {                      /* forward */
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 1 + l)); /* also starts the next one */
            DTRAIN_CHECK(dtrain_fsdp_release(fsdp, 1 + l));
        }
        for (int l = L - 1; l >= 0; l--) {
            size_t at = (size_t)l * 3 * C * C;
            DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 1 + l));
            layer_backward(qkvw + at, dtrain_fsdp_grad(fsdp, "qkvw") + at, 3 * C * C, rank, ranks);
            DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, 1 + l));
        }
        DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
        layer_backward(wte, dtrain_fsdp_grad(fsdp, "wte"), V * C, rank, ranks);
        DTRAIN_CHECK(dtrain_fsdp_reduce(fsdp, 0));
        DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, &norm));
        DTRAIN_CHECK(dtrain_fsdp_step(fsdp, 0.02f));
    }
    DTRAIN_CHECK(dtrain_fsdp_get(fsdp, "wte", value, -1));
    dtrain_fsdp_destroy(fsdp);
    for (int i = 0; i < V * C; i++)
        if (!(value[i] > 0.9f && value[i] < 1.1f))
            return DTRAIN_ERR_INVALID;
    return norm < 1.0 ? DTRAIN_OK : DTRAIN_ERR_INVALID;
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

static dtrain_status frame_loop(dtrain_comm *world, void *user)
{
    float grads[COUNT];
    size_t count = COUNT;
    dtrain_work *work;
    (void)user;
    for (size_t i = 0; i < count; i++)
        grads[i] = (float)dtrain_comm_rank(world);
    DTRAIN_CHECK(dtrain_all_reduce_async(world, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN, &work));
    while (!dtrain_work_done(work)) {
        DTRAIN_CHECK(dtrain_comm_poll(world, 300 /* us */));
        render_frame();
    }
    dtrain_status status = dtrain_work_wait(work); /* the result, once; frees the handle */
    if (status == DTRAIN_OK && 2 * grads[COUNT - 1] != (float)(dtrain_comm_size(world) - 1))
        return DTRAIN_ERR_INVALID;
    return status;
}

static int passed, failed;

static void check(const char *what, dtrain_status status)
{
    printf("%s %s\n", status == DTRAIN_OK ? "ok" : "FAIL", what);
    passed += status == DTRAIN_OK;
    failed += status != DTRAIN_OK;
}

int main(void)
{
    dtrain_comm *world;
    dtrain_comm_desc poll = poll_desc();
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL)); /* from the environment; a world of one without it */
    check("data-parallel in a world of one", data_parallel(world, NULL));
    check("optimizer state sharded in a world of one", optimizer_state_sharded(world, NULL));
    dtrain_comm_destroy(world);
    dtrain_strategy full = DTRAIN_FULL_SHARD, hybrid = DTRAIN_HYBRID_SHARD;
    check("fully sharded on three threads", dtrain_run_threads(3, fully_sharded, &full, NULL));
    check("fully sharded in nodes of two", dtrain_run_threads(4, fully_sharded, &hybrid, NULL));
    check("data-parallel on four threads", dtrain_run_threads(4, data_parallel, NULL, NULL));
    check("optimizer state sharded on two threads", dtrain_run_threads(2, optimizer_state_sharded, NULL, NULL));
    check("optimizer state sharded on four threads", dtrain_run_threads(4, optimizer_state_sharded, NULL, NULL));
    check("a frame loop on two threads", dtrain_run_threads(2, frame_loop, NULL, &poll));
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
