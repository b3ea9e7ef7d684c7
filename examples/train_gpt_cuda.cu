/* Trains the GPT of train_gpt on GPUs, one to a rank or shared: the same model, first weights and text, and so the same
 * loss within 1e-4. Layers are kernels of its own and products cuBLAS's.
 *
 * nvcc -std=c++17 -O2 -arch=sm_80 -Xcompiler -ffp-contract=off -I. examples/train_gpt_cuda.cu -o build/train_gpt_cuda \
 *     -lcublas -lpthread -lm
 * build/train_gpt_cuda --ranks 4 --steps 200
 * build/dtrun -n 4 build/train_gpt_cuda --steps 200
 * cc -O2 -ffp-contract=off -DDTRAIN_CUDA_EMULATE -x c -I. examples/train_gpt_cuda.cu \
 *     -o build/train_gpt_cuda_emulated -lpthread -lm
 *
 * Rank r computes on GPU r modulo the number of GPUs, or modulo N with --gpus N. If the number of micro-batches is a
 * power of two, 1, 2, 4 and 8 ranks end with the same weights, bit for bit, in every run. The last command compiles it
 * as C, with emulated GPUs. Checkpoints are those of train_gpt: either program goes on from the other's.
 */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#define DTRAIN_CUDA_IMPLEMENTATION
#include "dtrain_cuda.h"

#include <string.h>
#include <unistd.h>

#define REPORT_PROGRAM "train_gpt_cuda"
#include "gpt_flags.h"
#include "gpt.h"
#include "gpt_aggregate.h"
#include "gpt_text.h"
#include "gpt_job.h"
#include "gpt_save.h"
#include "gpu_kernels.h"
#include "gpu_trace.h"
#include "gpt_cuda_layers.h"

/* A rank: its model, and what it computes a step from. Pinned memory is copied from and to while the CPU goes on. */
typedef struct gpt_rank {
    gpt_cuda c;
    gpu_trace trace; /* of rank 0 */
    const gpt_job *job;
    dtrain_comm *world;
    size_t slots, each;    /* micro-batches of a step; numbers of each: tokens, targets, order, first */
    int32_t *ids, *staged; /* [slots, each] on the GPU, and pinned */
    double *losses, *seen; /* [slots] on the GPU, and pinned */
    int32_t *drawn;        /* [2 BT] tokens and targets */
    double *step_losses;   /* [micro] of all ranks */
} gpt_rank;

/* ---- a rank's memory ---- */

static dtrain_status gpt_room(gpt_rank *r, dtrain_memory memory, void **at, size_t bytes)
{
    return dtrain_device_alloc(r->c.g.device, memory, bytes, at);
}

/* Lays out what gpt_lay_out does not; returns how many floats all take. */
static size_t gpt_cuda_lay_out(gpt_cuda *c, float *memory)
{
    gpt *m = &c->m;
    size_t BT = m->B * m->T, at = gpt_lay_out(m, memory);
    c->datt = gpt_take(memory, &at, m->B * m->H * m->T * m->T);
    c->parts = gpt_take(memory, &at, (BT + GPT_CUDA_CHUNK - 1) / GPT_CUDA_CHUNK * 4 * m->C);
    c->row_losses = gpt_take(memory, &at, BT);
    return at;
}

static dtrain_status gpt_allocate(gpt_rank *r)
{
    gpt_cuda *c = &r->c;
    size_t BT = c->m.B * c->m.T, units = c->m.L + 2, micro = (size_t)r->job->flags.micro;
    size_t ranks = (size_t)dtrain_comm_size(r->world), floats = gpt_cuda_lay_out(c, NULL);
    void *at = NULL, *ids = NULL, *staged = NULL, *losses = NULL, *seen = NULL;
    r->slots = (micro + ranks - 1) / ranks;
    r->each = 3 * BT + GPT_VOCAB + 1;
    c->weights = (float **)calloc(2 * units * GPT_PARAMS, sizeof(float *));
    r->drawn = (int32_t *)malloc(2 * BT * sizeof *r->drawn);
    r->step_losses = (double *)calloc(micro, sizeof(double));
    if (c->weights == NULL || r->drawn == NULL || r->step_losses == NULL)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "no memory for %zu sequences", c->m.B);
    c->grads = c->weights + units * GPT_PARAMS;
    dtrain_status status = gpt_room(r, DTRAIN_MEMORY_DEVICE, &at, floats * sizeof(float));
    if (status == DTRAIN_OK)
        status = gpt_room(r, DTRAIN_MEMORY_DEVICE, &ids, r->slots * r->each * sizeof(int32_t));
    if (status == DTRAIN_OK)
        status = gpt_room(r, DTRAIN_MEMORY_PINNED, &staged, r->slots * r->each * sizeof(int32_t));
    if (status == DTRAIN_OK)
        status = gpt_room(r, DTRAIN_MEMORY_DEVICE, &losses, r->slots * sizeof(double));
    if (status == DTRAIN_OK)
        status = gpt_room(r, DTRAIN_MEMORY_PINNED, &seen, r->slots * sizeof(double));
    c->memory = (float *)at;
    gpt_cuda_lay_out(c, c->memory);
    r->ids = (int32_t *)ids;
    r->staged = (int32_t *)staged;
    r->losses = (double *)losses;
    r->seen = (double *)seen;
    return status;
}

static void gpt_rank_close(gpt_rank *r)
{
    gpt_cuda *c = &r->c;
    dtrain_fsdp_destroy(r->c.m.fsdp);
    if (c->g.device != NULL) {
        dtrain_device_free(c->g.device, DTRAIN_MEMORY_DEVICE, c->memory);
        dtrain_device_free(c->g.device, DTRAIN_MEMORY_DEVICE, r->ids);
        dtrain_device_free(c->g.device, DTRAIN_MEMORY_PINNED, r->staged);
        dtrain_device_free(c->g.device, DTRAIN_MEMORY_DEVICE, r->losses);
        dtrain_device_free(c->g.device, DTRAIN_MEMORY_PINNED, r->seen);
    }
    gpu_trace_close(&r->trace);
    gpu_close(&c->g);
    free(c->weights);
    free(r->drawn);
    free(r->step_losses);
}

/* Where the units' parts of the parameters lie stays the same. */
static void gpt_find_parameters(gpt_rank *r)
{
    gpt_cuda *c = &r->c;
    for (size_t unit = 0; unit <= c->m.L + 1; unit++)
        for (size_t i = 0; i < GPT_PARAMS; i++) {
            const char *name = c->m.table[i].name;
            c->weights[unit * GPT_PARAMS + i] = dtrain_fsdp_unit_param(r->c.m.fsdp, name, (int)unit);
            c->grads[unit * GPT_PARAMS + i] = dtrain_fsdp_unit_grad(r->c.m.fsdp, name, (int)unit);
        }
}

/* Writes the first values of a unit: those of train_gpt, made on the CPU. */
static dtrain_status gpt_first_unit(gpt_rank *r, size_t unit, float *values)
{
    const gpt *m = &r->c.m;
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < GPT_PARAMS && status == DTRAIN_OK; i++) {
        float *to = gpt_cuda_weight(&r->c, unit, i);
        size_t n = dtrain_param_elements(&m->table[i]) / (m->table[i].stacked ? m->L : 1);
        size_t first = (unit - (size_t)m->table[i].unit) * n;
        for (size_t k = 0; to != NULL && k < n; k++)
            values[k] = gpt_first_value(m, i, (uint64_t)r->job->flags.seed, first + k);
        if (to != NULL) /* returns when values may be written again */
            status = dtrain_device_copy(r->c.g.device, to, values, n * sizeof(float));
    }
    return status;
}

/* Unit by unit, so that no rank need hold the model. */
static dtrain_status gpt_initialise(gpt_rank *r)
{
    const gpt *m = &r->c.m;
    size_t wide = 4 * m->C > m->T ? 4 * m->C : m->T;
    float *values = (float *)malloc((wide > GPT_VOCAB ? wide : GPT_VOCAB) * m->C * sizeof(float));
    dtrain_status status = values != NULL ? DTRAIN_OK : dtrain_error_set(DTRAIN_ERR_MEMORY, "no memory for a layer");
    for (int unit = 0; unit <= (int)m->L + 1 && status == DTRAIN_OK; unit++) {
        status = dtrain_fsdp_gather(r->c.m.fsdp, unit);
        if (status == DTRAIN_OK)
            status = gpt_first_unit(r, (size_t)unit, values);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_put(r->c.m.fsdp, unit);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_release(r->c.m.fsdp, unit);
    }
    free(values);
    return status;
}

/* Which of the job's GPUs is this rank's: those of a host are dealt in turn. */
static int gpt_gpu_of(const gpt_job *job, dtrain_comm *world)
{
    const char *local = job->world != NULL ? getenv("DTRAIN_LOCAL_RANK") : NULL;
    int rank = local != NULL ? atoi(local) : dtrain_comm_rank(world);
    return rank > 0 ? rank % job->gpus : 0;
}

/* Collective: every rank of world. */
static dtrain_status gpt_rank_open(gpt_rank *r, const gpt_job *job, dtrain_comm *world)
{
    const gpt_flags *f = &job->flags;
    dtrain_fsdp_desc desc = gpt_fsdp_desc(f, f->strategy, dtrain_comm_size(world));
    memset(r, 0, sizeof *r);
    r->job = job;
    r->world = world;
    gpt_describe(&r->c.m, f);
    r->c.m.table[WTE].dense = r->c.m.table[WPE].dense = f->dense_embeddings;
    dtrain_status status = gpu_open(&r->c.g, gpt_gpu_of(job, world));
    for (int i = 0; i < GPT_PARAMS; i++)
        r->c.m.table[i].device = r->c.g.device;
    if (status == DTRAIN_OK)
        status = gpt_allocate(r);
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_create(&r->c.m.fsdp, world, r->c.m.table, GPT_PARAMS, &desc);
    if (status != DTRAIN_OK)
        return status;
    gpt_find_parameters(r);
    status = gpt_initialise(r);
    if (status == DTRAIN_OK && f->trace != NULL && dtrain_comm_rank(world) == 0)
        status = gpu_trace_open(&r->trace, &r->c.g);
    return status;
}

/* ---- training ---- */

/* Writes a micro-batch's numbers to pinned memory: rows are also listed by token, for the embedding's gradient. */
static void gpt_stage(gpt_rank *r, size_t slot, const int32_t *tokens, const int32_t *targets, size_t B)
{
    size_t BT = r->c.m.B * r->c.m.T, rows = B * r->c.m.T;
    int32_t *to = r->staged + slot * r->each, *order = to + 2 * BT, *first = order + BT, next[GPT_VOCAB];
    memset(first, 0, (GPT_VOCAB + 1) * sizeof *first);
    for (size_t i = 0; i < rows; i++) {
        to[i] = tokens[i];
        to[BT + i] = targets[i];
        first[tokens[i] + 1]++;
    }
    for (size_t v = 0; v < GPT_VOCAB; v++) {
        next[v] = first[v];
        first[v + 1] += first[v];
    }
    for (size_t i = 0; i < rows; i++)
        order[next[tokens[i]]++] = (int32_t)i;
}

static gpt_cuda_batch gpt_batch_of(const gpt_rank *r, size_t slot, size_t B)
{
    size_t BT = r->c.m.B * r->c.m.T;
    const int32_t *at = r->ids + slot * r->each;
    gpt_cuda_batch batch = {at, at + BT, at + 2 * BT, at + 3 * BT, B};
    return batch;
}

/* Around what is computed of a unit. */
static void gpt_begin(gpt_rank *r, const char *what, int unit)
{
    gpu_span_begin(&r->trace, &r->c.g, what, unit);
    GPU_BEGIN();
}

static void gpt_end(gpt_rank *r)
{
    GPU_END();
    gpu_span_end(&r->trace, &r->c.g);
}

/* Collective: a rank without sequences has batch->B = 0. */
static dtrain_status gpt_forward(gpt_rank *r, const gpt_cuda_batch *batch)
{
    int last = (int)r->c.m.L + 1;
    dtrain_status status = DTRAIN_OK;
    for (int unit = 0; unit <= last && status == DTRAIN_OK; unit++) {
        status = dtrain_fsdp_gather(r->c.m.fsdp, unit);
        if (status != DTRAIN_OK)
            return status;
        gpt_begin(r, "forward", unit);
        if (batch->B > 0 && unit == 0)
            gpt_cuda_embedding_forward(&r->c, batch);
        else if (batch->B > 0 && unit < last)
            gpt_cuda_layer_forward(&r->c, (size_t)unit - 1, batch->B);
        else if (batch->B > 0)
            gpt_cuda_head_forward(&r->c, batch->B);
        gpt_end(r);
        status = dtrain_fsdp_release(r->c.m.fsdp, unit);
    }
    return status == DTRAIN_OK ? r->c.g.status : status;
}

/* Forward and backward of one micro-batch; each unit's gradients are on their way as soon as they are there. */
static dtrain_status gpt_micro_batch(gpt_rank *r, size_t slot)
{
    int last = (int)r->c.m.L + 1;
    gpt_cuda_batch batch = gpt_batch_of(r, slot, r->c.m.B);
    dtrain_status status = gpt_forward(r, &batch);
    if (status == DTRAIN_OK)
        gpt_cuda_loss(&r->c, &batch, r->losses + slot);
    for (int unit = last; unit >= 0 && status == DTRAIN_OK; unit--) {
        status = dtrain_fsdp_gather(r->c.m.fsdp, unit);
        if (status != DTRAIN_OK)
            return status;
        gpt_begin(r, "backward", unit);
        if (unit == last)
            gpt_cuda_head_backward(&r->c);
        else if (unit > 0)
            gpt_cuda_layer_backward(&r->c, (size_t)unit - 1);
        else
            gpt_cuda_embedding_backward(&r->c, &batch);
        gpt_end(r);
        status = dtrain_fsdp_reduce(r->c.m.fsdp, unit);
    }
    return status == DTRAIN_OK ? r->c.g.status : status;
}

/* Micro-batches are dealt in turn, all of a step's copied to the GPU at once. */
static dtrain_status gpt_stage_step(gpt_rank *r, long step, size_t mine)
{
    size_t BT = r->c.m.B * r->c.m.T, ranks = (size_t)dtrain_comm_size(r->world);
    for (size_t i = 0; i < mine; i++) {
        gpt_draw(r->job, step, (long)(i * ranks + (size_t)dtrain_comm_rank(r->world)), r->drawn, r->drawn + BT);
        gpt_stage(r, i, r->drawn, r->drawn + BT, r->c.m.B);
    }
    return dtrain_device_copy(r->c.g.device, r->ids, r->staged, mine * r->each * sizeof(int32_t));
}

/* The mean over all ranks' tokens; waits for the GPU. */
static dtrain_status gpt_step_loss(gpt_rank *r, size_t mine, double *loss)
{
    size_t micro = (size_t)r->job->flags.micro, ranks = (size_t)dtrain_comm_size(r->world);
    dtrain_status status = dtrain_device_wait(r->c.g.device);
    if (status != DTRAIN_OK)
        return status;
    memset(r->step_losses, 0, micro * sizeof(double));
    for (size_t i = 0; i < mine; i++)
        r->step_losses[i * ranks + (size_t)dtrain_comm_rank(r->world)] = r->seen[i];
    return gpt_mean_loss(&r->job->flags, r->world, r->step_losses, loss);
}

/* One step on one rank. Where the loss is not finite nothing is applied. */
static dtrain_status gpt_step(gpt_rank *r, long step, float lr, double *loss, double *norm)
{
    size_t micro = (size_t)r->job->flags.micro, ranks = (size_t)dtrain_comm_size(r->world);
    size_t rank = (size_t)dtrain_comm_rank(r->world), mine = micro / ranks + (rank < micro % ranks);
    dtrain_status status = gpt_stage_step(r, step, mine);
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_begin(r->c.m.fsdp, (int)mine, (double)(mine * r->c.m.B * r->c.m.T));
    for (size_t i = 0; i < mine && status == DTRAIN_OK; i++)
        status = gpt_micro_batch(r, i);
    if (status == DTRAIN_OK && mine * ranks < micro) /* others have one more */
        status = dtrain_fsdp_join(r->c.m.fsdp);
    if (status == DTRAIN_OK)
        status = dtrain_device_copy(r->c.g.device, r->seen, r->losses, mine * sizeof(double));
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_clip_grad_norm(r->c.m.fsdp, (float)r->job->flags.clip, norm);
    if (status == DTRAIN_OK)
        status = gpt_step_loss(r, mine, loss);
    return status == DTRAIN_OK && isfinite(*loss) ? dtrain_fsdp_step(r->c.m.fsdp, lr) : status;
}

/* Loss over held-out sequences, dealt to the ranks and summed in their own order: the same on any number of ranks. */
static dtrain_status gpt_validate(gpt_rank *r, double *loss)
{
    const gpt_job *job = r->job;
    size_t T = r->c.m.T, ranks = (size_t)dtrain_comm_size(r->world), bytes = r->each * sizeof(int32_t);
    double losses[GPT_VALIDATION];
    dtrain_device *device = r->c.g.device;
    dtrain_status status = DTRAIN_OK;
    memset(losses, 0, sizeof losses);
    for (size_t first = 0; first < GPT_VALIDATION && status == DTRAIN_OK; first += ranks) {
        size_t i = first + (size_t)dtrain_comm_rank(r->world), B = i < GPT_VALIDATION;
        gpt_draw_held_out(job, B ? i : 0, r->drawn);
        gpt_cuda_batch batch = gpt_batch_of(r, 0, B);
        gpt_stage(r, 0, r->drawn, r->drawn + 1, B);
        status = dtrain_device_copy(device, r->ids, r->staged, bytes);
        if (status == DTRAIN_OK)
            status = gpt_forward(r, &batch);
        if (status != DTRAIN_OK || !B)
            continue;
        gpt_cuda_loss(&r->c, &batch, r->losses);
        status = dtrain_device_copy(device, r->seen, r->losses, sizeof(double));
        if (status == DTRAIN_OK)
            status = dtrain_device_wait(device); /* before seen is read, and staged written again */
        losses[i] = r->seen[0];
    }
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(r->world, losses, losses, GPT_VALIDATION, DTRAIN_F64, DTRAIN_SUM);
    *loss = 0;
    for (size_t i = 0; i < GPT_VALIDATION; i++)
        *loss += losses[i];
    *loss /= (double)(GPT_VALIDATION * T);
    return status == DTRAIN_OK ? r->c.g.status : status;
}

/* The hash of the hashes of all parameters, as train_gpt's; every rank's copy is compared with rank 0's. */
static dtrain_status gpt_digest(gpt_rank *r, unsigned char digest[32])
{
    unsigned char digests[GPT_PARAMS][32];
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < GPT_PARAMS && status == DTRAIN_OK; i++) {
        size_t count = dtrain_param_elements(&r->c.m.table[i]);
        float *value = (float *)malloc(count * sizeof(float));
        if (value == NULL)
            status = dtrain_error_set(DTRAIN_ERR_MEMORY, "no %zu bytes for a parameter", count * sizeof(float));
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_get(r->c.m.fsdp, r->c.m.table[i].name, value, -1);
        if (status == DTRAIN_OK)
            status = dtrain_comm_check_equal(r->world, value, count, DTRAIN_F32);
        if (status == DTRAIN_OK)
            gpt_hash(value, count, digests[i]);
        free(value);
    }
    if (status == DTRAIN_OK)
        dtrain_sha256(digests, sizeof digests, digest);
    return status;
}

/* When training began, and with which step, counted from 0. */
typedef struct gpt_progress {
    int64_t started_ns;
    long first;
    dtrain_fsdp_stats stats;
} gpt_progress;

static double gpt_tokens(const gpt_flags *f, const gpt_progress *progress, long done)
{
    return (double)(done - progress->first) * (double)(f->micro * f->batch * f->context);
}

static void gpt_show(const gpt_rank *r, const gpt_progress *progress, long step, double loss, float lr, double norm)
{
    const gpt_flags *f = &r->job->flags;
    long done = step + 1;
    double seconds = (double)(gpu_now_ns() - progress->started_ns) * 1e-9 + 1e-9;
    char text[256];
    r->job->losses[step] = loss;
    gpt_write_line(r->job, r->c.m.fsdp, step, loss, (double)lr, norm);
    if (f->quiet)
        return;
    snprintf(text, sizeof text, "%ld/%ld loss %.4f lr %.2e norm %.3f %.0f tokens/s left %.0f s", done, f->steps, loss,
             (double)lr, norm, gpt_tokens(f, progress, done) / seconds,
             seconds / (double)(done - progress->first) * (double)(f->steps - done));
    report_step(text, done, f->steps);
}

/* After training: validates, compares copies and prints the result. */
static dtrain_status gpt_finish(gpt_rank *r, const gpt_progress *progress, double loss)
{
    const gpt_flags *f = &r->job->flags;
    double validation = 0, seconds = (double)(gpu_now_ns() - progress->started_ns) * 1e-9;
    dtrain_fsdp_stats stats = dtrain_fsdp_get_stats(r->c.m.fsdp);
    unsigned char digest[32];
    dtrain_status status = gpt_validate(r, &validation);
    if (status == DTRAIN_OK)
        status = gpt_digest(r, digest);
    if (status == DTRAIN_OK && f->trace != NULL && dtrain_comm_rank(r->world) == 0)
        status = dtrain_fsdp_trace(r->c.m.fsdp, f->trace);
    if (status == DTRAIN_OK && r->trace.spans != NULL)
        status = gpu_trace_add(&r->trace, &r->c.g, f->trace);
    if (status != DTRAIN_OK || dtrain_comm_rank(r->world) != 0)
        return status;
    if (!f->quiet)
        gpt_print_buckets(f, r->c.m.fsdp, &progress->stats, &stats);
    gpt_print_result(digest, loss, validation);
    printf(" tokens_per_s=%.0f device=%s\n", gpt_tokens(f, progress, gpt_end_step(f)) / seconds,
           dtrain_device_name(r->c.g.device));
    return status;
}

/* first: the step, counted from 0, to begin with. */
static dtrain_status gpt_train(gpt_rank *r, gpt_job *job, gpt_saver *saver, long first)
{
    int root = dtrain_comm_rank(r->world) == 0;
    long end = gpt_end_step(&job->flags);
    dtrain_schedule schedule = gpt_schedule(&job->flags);
    gpt_progress progress = {gpu_now_ns(), first, dtrain_fsdp_get_stats(r->c.m.fsdp)};
    double loss = first > 0 && root ? job->losses[first - 1] : 0, norm = 0;
    dtrain_status status = DTRAIN_OK;
    for (long step = first; step < end && status == DTRAIN_OK; step++) {
        float lr = dtrain_schedule_lr(&schedule, (uint64_t)step);
        status = gpt_step(r, step, lr, &loss, &norm);
        if (status == DTRAIN_OK && !isfinite(loss)) { /* the same on every rank: all leave here */
            if (root)
                job->diverged = step + 1;
            return DTRAIN_OK;
        }
        if (status == DTRAIN_OK && root)
            gpt_show(r, &progress, step, loss, lr, norm);
        if (status == DTRAIN_OK)
            status = gpt_saver_step(saver, &job->flags, &r->c.m, step + 1, end);
    }
    return status == DTRAIN_OK ? gpt_finish(r, &progress, loss) : status;
}

static dtrain_status gpt_run_rank(dtrain_comm *world, void *user)
{
    gpt_job *job = (gpt_job *)user;
    gpt_rank rank;
    gpt_saver saver;
    long first = 0;
    memset(&saver, 0, sizeof saver);
    dtrain_status status = gpt_rank_open(&rank, job, world);
    if (status == DTRAIN_OK)
        status = gpt_saver_open(&saver, &job->flags, job->losses, &rank.c.m, world, &first);
    if (status == DTRAIN_OK)
        status = gpt_train(&rank, job, &saver, first);
    dtrain_checkpoint_destroy(saver.ckpt);
    gpt_rank_close(&rank);
    return status;
}

/* ---- the program ---- */

static int gpt_cuda_help(void)
{
    gpt_help_alike(
        "train_gpt_cuda trains train_gpt's model on GPUs, by threads, or by the processes that dtrun starts.");
    puts("  --gpus N         the first N GPUs alone; ranks are dealt to them in turn\n"
         "  --csv build/train_gpt_cuda.csv --svg build/train_gpt_cuda.svg   the loss of each step\n"
         "  --compress topk:0.01|int8|fp8|bf16|f16   how gradients travel, as train_gpt's; top-k under --optimizer\n"
         "                   sgd needs --clip 0, or :nofeedback\n"
         "  --trace FILE     when rank 0 gathered, reduced and waited, and its GPU computed, for Perfetto");
    return 0;
}

/* Takes --gpus N out of the arguments, and counts the GPUs. */
static int gpt_find_gpus(gpt_job *job, int *argc, char **argv)
{
    double asked = 1024;
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "--gpus") != 0)
            argv[kept++] = argv[i];
        else if (gpt_number(argv[i], argv[i + 1], 1, 1024, &asked) != 0)
            return 1;
        else
            i++;
    }
    argv[kept] = NULL;
    *argc = kept;
    if (dtrain_cuda_count(&job->gpus) != DTRAIN_OK)
        return report_complain("GPUs", "of this machine", dtrain_last_error());
    job->gpus = job->gpus < (int)asked ? job->gpus : (int)asked;
    return job->gpus > 0 ? 0 : report_complain("GPUs", "of this machine", "there are none");
}

/* What train_gpt has beyond this program. */
static int gpt_check_program(const gpt_flags *f)
{
    if (f->mesh != NULL || f->aggregator != NULL || f->local_steps > 0 || f->tokens != NULL || f->open_model != NULL ||
        f->export_model != NULL || f->tied || f->vocab != GPT_VOCAB)
        return report_complain("flag", "of train_gpt's", "is not one of --help's here");
    return 0;
}

int main(int argc, char **argv)
{
    gpt_job job;
    memset(&job, 0, sizeof job);
    job.flags = gpt_defaults();
    job.flags.csv = "build/train_gpt_cuda.csv";
    job.flags.svg = "build/train_gpt_cuda.svg";
    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return gpt_cuda_help();
    int bad = gpt_find_gpus(&job, &argc, argv) || gpt_parse(&job.flags, argc, argv) || gpt_check_program(&job.flags) ||
              gpt_read_text(&job) || gpt_join(&job) || gpt_settle_micro(&job.flags, job.world_size) ||
              gpt_open_outputs(&job) || gpt_run(&job, gpt_run_rank);
    return gpt_close(&job, bad);
}

/* The result of train_gpt_cuda_emulated --ranks 2 --steps 50 --text src/train/train.h, but for its hash and speed, and
 * of train_gpt with the same flags:
 *
 * loss=2.706722 val_loss=2.667903
 */
