/* Trains a GPT on threads or processes, on the bytes of any text file or on token ids, replicated or sharded.
 *
 * cc -O3 -march=native -fno-math-errno -ffp-contract=off -I. examples/train_gpt.c -o build/train_gpt -lpthread -lm
 * build/train_gpt --ranks 4 --steps 200
 * build/dtrun -n 4 build/train_gpt --steps 200 --strategy full
 * build/train_gpt --ranks 8 --mesh dp=2,pp=2,tp=2 --layers 8 --heads 8
 * build/train_gpt --open gpt2 --tokens text.bin --context 256 --ranks 4 --strategy full --lr 1e-4 --export tuned
 *
 * The model is that of GPT-2: a decoder-only transformer with learned positions, pre-norm blocks, GELU and an output
 * layer that is not tied. The last tenth of the text is held out.
 *
 *   --batch           sequences of a micro-batch
 *   --micro           micro-batches of a step, over all ranks together, dealt in turn. If it is a power of two, 1, 2, 4
 *                     and 8 ranks end with the same weights, bit for bit, under every strategy
 *   --save, --resume  leave checkpoints, and go on from them with the same bits, on any number of ranks; with
 *                     --compress or --local-steps, where ranks have state of their own, on as many
 *   --local-steps H   each rank trains by itself; every H steps all average how far they have come (DiLoCo)
 *   --mesh            splits the model over stages of a pipeline and inside its layers
 *   --open, --export  read and write a GPT-2 of Hugging Face; copy the tokenizer's files yourself
 *   --tokens FILE     trains on ids that a tokenizer has made
 */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <ctype.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define REPORT_PROGRAM "train_gpt"
#include "gpt_flags.h"
#include "gpt.h"
#include "gpt_aggregate.h"
#include "gpt_text.h"
#include "gpt_huggingface.h"
#include "gpt_job.h"
#include "gpt_mesh.h"
#include "gpt_save.h"

#define GPT_SAMPLE 200

static int64_t gpt_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Lists the parameters as the flags say. */
static void gpt_describe_run(gpt *model, const gpt_flags *f)
{
    gpt_describe(model, f);
    model->table[WTE].dense = model->table[WPE].dense = f->dense_embeddings;
}

/* Unit by unit, so that no rank need hold the model: each writes the unit in full and keeps its slice. */
static dtrain_status gpt_initialise(gpt *model, uint64_t seed)
{
    dtrain_status status = DTRAIN_OK;
    for (int unit = 0; unit <= (int)model->L + 1 && status == DTRAIN_OK; unit++) {
        status = dtrain_fsdp_gather(model->fsdp, unit);
        for (int i = 0; i < model->listed && status == DTRAIN_OK; i++)
            gpt_first_values(model, i, unit, seed);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_put(model->fsdp, unit);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_release(model->fsdp, unit);
    }
    return status;
}

/* About how many bytes a rank's activations take; in floating point, so that no flags can overflow it. */
static double gpt_activation_bytes(const gpt_flags *f)
{
    double L = (double)f->layers, C = (double)f->width, T = (double)f->context, B = (double)f->batch;
    return 4 * ((18 * L + 8) * B * T * C + (L * B * (double)f->heads + 1) * T * T + (double)f->vocab * B * T);
}

/* Of about how many micro-batches a pipeline's rank holds activations at once, the mean of its ranks. */
static double gpt_micro_batches_held(const gpt_flags *f)
{
    double micro = f->mesh != NULL ? (double)(f->micro / f->mesh_sizes[GPT_DP]) : 1;
    double held = f->mesh != NULL ? (f->mesh_sizes[GPT_PP] + 1) / 2.0 : 1;
    if (f->recompute)
        return 1;
    return strcmp(f->schedule, "gpipe") == 0 || held > micro ? micro : held;
}

/* Has the ranks train by themselves, from rank 0's weights. Blocking: a run gives the same bits every time. */
static dtrain_status gpt_create_local(gpt *model, const gpt_flags *flags, dtrain_comm *world)
{
    dtrain_param table[GPT_PARAMS];
    dtrain_local_sgd_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.steps = (int)flags->local_steps;
    desc.outer_lr = 1.0f; /* for tens of rounds; the paper's 0.7 and 0.9 are for hundreds */
    desc.outer_momentum = (float)flags->outer_momentum;
    desc.no_momentum = flags->outer_momentum == 0;
    desc.warmup_rounds = flags->outer_warmup > 0 ? (int)flags->outer_warmup : -1;
    desc.blocking = 1;
    desc.through_server = flags->aggregator != NULL && strcmp(flags->aggregator, "ps") == 0;
    desc.compress = flags->compress != NULL ? &flags->compression : NULL;
    for (int i = 0; i < model->listed; i++) {
        table[i] = model->table[i];
        table[i].data = model->params[i];
        table[i].grad = model->grads[i];
    }
    return dtrain_local_sgd_create(&model->local, world, table, (size_t)model->listed, &desc);
}

/* Collective: every rank of world. aggregate and mesh: NULL, or what the run goes through, and is split by. */
static dtrain_status gpt_create(gpt *model, const gpt_flags *flags, dtrain_comm *world, gpt_aggregate *aggregate,
                                gpt_mesh *mesh)
{
    dtrain_fsdp_desc desc = gpt_fsdp_desc(flags, flags->strategy, dtrain_comm_size(world));
    dtrain_comm *owners; /* of the slices */
    dtrain_status status;
    size_t floats;
    gpt_describe_run(model, flags);
    model->strategy = desc.strategy;
    model->aggregate = aggregate;
    model->mesh = mesh;
    if (mesh != NULL) {
        desc = gpt_fsdp_desc(flags, flags->strategy, flags->mesh_sizes[GPT_DP]);
        status = gpt_mesh_create(mesh, model, flags, &desc, world);
        model->fsdp = mesh->fsdps[0];
        return status;
    }
    floats = gpt_lay_out(model, NULL);
    status = dtrain_tensor_create(&model->memory, DTRAIN_F32, 1, &floats, dtrain_comm_allocator(world));
    if (status == DTRAIN_OK && flags->local_steps > 0)
        status = dtrain_comm_split(world, dtrain_comm_rank(world), 0, &model->alone);
    owners = aggregate != NULL ? aggregate->alone : model->alone != NULL ? model->alone : world;
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_create(&model->fsdp, owners, model->table, (size_t)model->listed, &desc);
    if (status != DTRAIN_OK)
        return status;
    gpt_lay_out(model, (float *)model->memory.data);
    for (int i = 0; i < model->listed; i++) {
        model->params[i] = dtrain_fsdp_param(model->fsdp, model->table[i].name);
        model->grads[i] = dtrain_fsdp_grad(model->fsdp, model->table[i].name);
    }
    status = flags->open_model != NULL ? gpt_hf_load_all(model, flags, owners)
                                       : gpt_initialise(model, (uint64_t)flags->seed);
    return status == DTRAIN_OK && model->alone != NULL ? gpt_create_local(model, flags, world) : status;
}

static void gpt_destroy(gpt *model)
{
    if (model->mesh != NULL) {
        gpt_mesh_destroy(model->mesh);
        return;
    }
    dtrain_local_sgd_destroy(model->local);
    dtrain_fsdp_destroy(model->fsdp);
    dtrain_comm_destroy(model->alone);
    dtrain_tensor_destroy(&model->memory);
}

/* Gathers a unit, and with the head the embedding where that is the output layer. */
static dtrain_status gpt_gather(gpt *m, int unit)
{
    dtrain_status status = dtrain_fsdp_gather(m->fsdp, unit);
    return status == DTRAIN_OK && m->tied && unit == (int)m->L + 1 ? dtrain_fsdp_gather(m->fsdp, 0) : status;
}

/* tokens[B, T] to logits, for B up to the model's own. Collective: a rank without sequences has B = 0. */
static dtrain_status gpt_forward(gpt *m, const int32_t *tokens, size_t B)
{
    dtrain_status status = DTRAIN_OK;
    int last = (int)m->L + 1;
    for (int unit = 0; unit <= last && status == DTRAIN_OK; unit++) {
        status = gpt_gather(m, unit);
        if (status != DTRAIN_OK)
            return status;
        if (unit == 0)
            nn_embedding_forward(m->x, tokens, gpt_weight(m, WTE, 0), gpt_weight(m, WPE, 0), B, m->T, m->C);
        else if (unit < last)
            gpt_layer_forward(m, (size_t)unit - 1, B);
        else
            gpt_head_forward(m, B);
        status = dtrain_fsdp_release(m->fsdp, unit);
        if (status == DTRAIN_OK && unit == last && m->tied)
            status = dtrain_fsdp_release(m->fsdp, 0);
    }
    return status;
}

/* Forward and backward of one micro-batch; each unit's gradients are on their way as soon as they are there. */
static dtrain_status gpt_micro_batch(gpt *m, const int32_t *tokens, const int32_t *targets, double *loss)
{
    int last = (int)m->L + 1;
    dtrain_status status = gpt_forward(m, tokens, m->B);
    if (status == DTRAIN_OK)
        *loss = nn_cross_entropy(m->logits, targets, m->B * m->T, m->V);
    for (int unit = last; unit >= 0 && status == DTRAIN_OK; unit--) {
        status = gpt_gather(m, unit);
        if (status != DTRAIN_OK)
            return status;
        if (unit == last)
            gpt_head_backward(m);
        else if (unit > 0)
            gpt_layer_backward(m, (size_t)unit - 1);
        else
            nn_embedding_backward(gpt_grad(m, WTE, 0), gpt_grad(m, WPE, 0), m->dx, tokens, m->B, m->T, m->C);
        status = dtrain_fsdp_reduce(m->fsdp, unit);
    }
    return status;
}

/* Loss over held-out sequences, dealt to the ranks and summed in their own order: the same on any number of ranks. */
static dtrain_status gpt_validate(const gpt_job *job, gpt *m, dtrain_comm *world, double *loss)
{
    size_t T = m->T, rank = (size_t)dtrain_comm_rank(world), ranks = (size_t)dtrain_comm_size(world);
    double losses[GPT_VALIDATION], spare;
    int32_t *tokens = (int32_t *)malloc((T + 1) * sizeof *tokens);
    dtrain_status status = tokens != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    if (m->mesh != NULL) {
        rank = (size_t)m->mesh->at[GPT_DP];
        ranks = (size_t)m->mesh->sizes[GPT_DP];
    }
    memset(losses, 0, sizeof losses);
    for (size_t first = 0; first < GPT_VALIDATION && status == DTRAIN_OK; first += ranks) {
        size_t i = first + rank, B = i < GPT_VALIDATION;
        gpt_draw_held_out(job, B ? i : 0, tokens);
        if (m->mesh != NULL) {
            status = gpt_mesh_evaluate(m->mesh, tokens, B ? &losses[i] : &spare);
            continue;
        }
        status = gpt_forward(m, tokens, B);
        if (B)
            losses[i] = nn_cross_entropy(m->logits, tokens + 1, T, m->V);
    }
    free(tokens);
    if (status == DTRAIN_OK) /* each sum has one term that is not zero */
        status = dtrain_all_reduce(world, losses, losses, GPT_VALIDATION, DTRAIN_F64, DTRAIN_SUM);
    *loss = 0;
    for (size_t i = 0; i < GPT_VALIDATION; i++)
        *loss += losses[i];
    *loss /= (double)(GPT_VALIDATION * T);
    return status;
}

/* Prints what the model writes; the ranks that do not print gather with the one that does. */
static dtrain_status gpt_sample(const gpt_job *job, gpt *m, int root)
{
    size_t T = m->T;
    int V = (int)m->V, text = job->flags.tokens == NULL && V == GPT_VOCAB;
    int32_t *window = (int32_t *)calloc(T + 1, sizeof *window);
    dtrain_status status = window != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    if (root)
        printf("sample: ");
    for (size_t i = 0, n = 1; i < GPT_SAMPLE && status == DTRAIN_OK; i++) {
        float *row = m->logits + (n - 1) * m->V, sum = 0, draw;
        int next = 0;
        window[0] = n == 1 && i == 0 && text ? '\n' : window[0];
        status = gpt_forward(m, window, root ? 1 : 0);
        if (status != DTRAIN_OK || !root)
            continue;
        nn_cross_entropy(row, window, 1, m->V);
        row[window[0]] += 1.0f; /* the gradient of the first target is its probability less one */
        draw = dtrain_random_uniform((uint64_t)job->flags.seed + 99, i);
        while (next < V - 1 && (sum += row[next]) < draw)
            next++;
        if (text)
            putchar(isprint(next) || next == '\n' ? next : '?');
        else
            printf("%d ", next);
        if (n == T)
            memmove(window, window + 1, (T - 1) * sizeof *window);
        else
            n++;
        window[n - 1] = next;
    }
    if (root)
        putchar('\n');
    free(window);
    return status;
}

static int gpt_keeps_full_weights(const dtrain_fsdp_desc *desc)
{
    return desc->strategy == DTRAIN_SHARD_GRAD_OP || desc->strategy == DTRAIN_DDP;
}

/* Bytes that rank 0 sends in a step: what is gathered in each micro-batch, or once where it stays; gradients of each,
 * or once where they are kept in full. */
static size_t gpt_sent(const dtrain_fsdp_plan_result *plan, const dtrain_fsdp_desc *desc)
{
    uint64_t micro = (uint64_t)desc->micro_batches, gathers = gpt_keeps_full_weights(desc) ? 1 : micro;
    uint64_t reduces = desc->keep_full_grads || desc->compress != NULL ? 1 : micro;
    return (size_t)(gathers * plan->sent_gather + reduces * plan->sent_reduce);
}

/* What each strategy would take on this many ranks, before anything is allocated; *chosen: the plan of the one. */
static void gpt_print_plans(const gpt_job *job, size_t *chosen)
{
    const gpt_flags *f = &job->flags;
    dtrain_fsdp_plan_result plan;
    gpt model;
    gpt_describe_run(&model, f);
    printf("%zu parameters on %d ranks; MiB at most on rank 0, and sent by it in a step:\n", model.count,
           job->world_size);
    printf("strategy   weights  gradients  optimizer  gathered    total     sent\n");
    for (int i = 0; i < GPT_STRATEGIES; i++) {
        const char *name = gpt_strategies[i].name;
        int mine = strcmp(name, job->flags.strategy) == 0;
        dtrain_fsdp_desc desc = gpt_fsdp_desc(f, name, job->world_size);
        int stay = gpt_keeps_full_weights(&desc);
        if (dtrain_fsdp_plan(model.table, (size_t)model.listed, &desc, job->world_size, 0, &plan) != DTRAIN_OK) {
            printf("%-8s   not with --shard-size %ld on %d ranks\n", name, job->flags.shard_size, job->world_size);
            continue;
        }
        printf("%-8s  %8.2f  %9.2f  %9.2f  %8.2f  %7.2f  %7.2f%s\n", name,
               gpt_mib(plan.weights + (stay ? plan.full_weights : 0)), gpt_mib(plan.gradients), gpt_mib(plan.optimizer),
               gpt_mib(plan.full_grads + (stay ? 0 : plan.full_weights)), gpt_mib(plan.peak),
               gpt_mib(gpt_sent(&plan, &desc)), mine ? "  <- this run" : "");
        *chosen = mine ? plan.peak : *chosen;
    }
    fflush(stdout);
}

/* The clock and the counters when training began. */
typedef struct gpt_progress {
    int64_t started_ns, blocked_ns;
    dtrain_fsdp_stats stats;
    size_t planned_bytes; /* by FSDP; 0: nobody asked */
    long first;           /* the step, counted from 0, that it began with */
} gpt_progress;

/* What this rank's objects have done. */
static dtrain_fsdp_stats gpt_stats(const gpt *m)
{
    return m->mesh != NULL ? gpt_mesh_stats(m->mesh) : dtrain_fsdp_get_stats(m->fsdp);
}

static void gpt_show(const gpt_job *job, const gpt_progress *progress, dtrain_comm *world, long step, double loss,
                     double lr, double norm)
{
    long steps = job->flags.steps, done = step + 1;
    double seconds = (double)(gpt_now_ns() - progress->started_ns) * 1e-9 + 1e-9, tokens;
    double blocked = (double)(dtrain_comm_blocked_ns(world) - progress->blocked_ns) * 1e-9;
    char text[256];
    if (job->flags.quiet)
        return;
    tokens = (double)(done - progress->first) * (double)(job->flags.micro * job->flags.batch * job->flags.context);
    snprintf(text, sizeof text, "%ld/%ld loss %.4f lr %.2e norm %.3f %.0f tokens/s comm %.1f%% left %.0f s", done,
             steps, loss, lr, norm, tokens / seconds, 100 * blocked / seconds,
             seconds / (double)(done - progress->first) * (double)(steps - done));
    report_step(text, done, steps);
}

/* As gpt_step, with every rank's part of a model that is split further. */
static dtrain_status gpt_step_on_mesh(gpt_job *job, gpt *m, dtrain_comm *world, long step, int32_t *tokens,
                                      double *losses, float lr, double *loss, double *norm)
{
    gpt_mesh *mesh = m->mesh;
    size_t rank = (size_t)mesh->at[GPT_DP], ranks = (size_t)mesh->sizes[GPT_DP], BT = m->B * m->T;
    memset(losses, 0, (size_t)job->flags.micro * sizeof *losses);
    for (size_t i = 0; i < (size_t)mesh->micro; i++) {
        int32_t *at = (int32_t *)mesh->memory.data + 2 * i * BT;
        gpt_draw(job, step, (long)(i * ranks + rank), tokens, tokens + BT);
        for (size_t k = 0; k < 2 * BT; k++)
            at[k] = tokens[k];
    }
    dtrain_status status = gpt_mesh_micro_batches(mesh, losses + rank, ranks);
    if (status == DTRAIN_OK)
        status = gpt_mean_loss(&job->flags, world, losses, loss);
    if (status != DTRAIN_OK || !isfinite(*loss))
        return status;
    return gpt_mesh_update(mesh, (float)job->flags.clip, lr, norm);
}

/* One step on one rank, micro-batches dealt in turn; *loss is the mean over all ranks' tokens, the same bits
 * everywhere; with --local-steps that of this rank's. Where it is not finite nothing is applied. */
static dtrain_status gpt_step(gpt_job *job, gpt *m, dtrain_comm *world, long step, int32_t *tokens, double *losses,
                              float lr, double *loss, double *norm)
{
    size_t micro = (size_t)job->flags.micro, BT = m->B * m->T;
    size_t rank = (size_t)dtrain_comm_rank(world), ranks = (size_t)dtrain_comm_size(world);
    size_t mine = micro / ranks + (rank < micro % ranks);
    double weight = (double)(mine * BT);
    dtrain_status status = m->aggregate != NULL && mine == 0
                               ? gpt_aggregate_nothing(m->fsdp, (int)m->L + 2)
                               : dtrain_fsdp_begin(m->fsdp, (int)mine, m->aggregate != NULL ? 1.0 : weight);
    memset(losses, 0, micro * sizeof *losses);
    for (size_t i = rank; i < micro && status == DTRAIN_OK; i += ranks) {
        gpt_draw(job, step, (long)i, tokens, tokens + BT);
        status = gpt_micro_batch(m, tokens, tokens + BT, &losses[i]);
    }
    if (m->aggregate != NULL && status == DTRAIN_OK)
        status = gpt_aggregate_step(m->aggregate, m->fsdp, weight);
    else if (m->local == NULL && mine * ranks < micro && status == DTRAIN_OK) /* others have one more */
        status = dtrain_fsdp_join(m->fsdp);
    if (m->local == NULL && status == DTRAIN_OK) /* each sum has one term that is not zero */
        status = dtrain_all_reduce(world, losses, losses, micro, DTRAIN_F64, DTRAIN_SUM);
    *loss = 0;
    for (size_t i = 0; i < micro; i++)
        *loss += losses[i];
    *loss /= (double)((m->local != NULL ? mine : micro) * BT);
    if (status != DTRAIN_OK || !isfinite(*loss))
        return status;
    status = dtrain_fsdp_clip_grad_norm(m->fsdp, (float)job->flags.clip, norm);
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_step(m->fsdp, lr);
    if (status == DTRAIN_OK && m->local != NULL) /* without sharding the optimizer's weights are those of the layers */
        status = dtrain_local_sgd_step(m->local, (double)(mine * BT));
    return status;
}

/* Compares what more than one rank keeps: full parameters, or slices of the same part. */
static dtrain_status gpt_check_copies(gpt *m, dtrain_comm *world)
{
    int shards = dtrain_fsdp_shard_size(m->fsdp), ranks = dtrain_comm_size(world), rank = dtrain_comm_rank(world);
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    dtrain_comm *copies = NULL;
    dtrain_status status = dtrain_fsdp_local(m->fsdp, &slices, &count);
    if (status == DTRAIN_OK && shards < ranks)
        status = dtrain_comm_split(world, rank % shards, rank, &copies);
    for (size_t i = 0; i < count && status == DTRAIN_OK && shards < ranks; i++)
        status = dtrain_comm_check_equal(copies, slices[i].weights, slices[i].count, DTRAIN_F32);
    for (int i = 0; i < m->listed && status == DTRAIN_OK; i++)
        if (m->strategy == DTRAIN_SHARD_GRAD_OP)
            status = dtrain_comm_check_equal(world, m->params[i], dtrain_param_elements(&m->table[i]), DTRAIN_F32);
    dtrain_comm_destroy(copies);
    return status;
}

/* The hash of the hashes of all parameters, on rank 0, which has one of them in full at a time. */
static dtrain_status gpt_digest(gpt *m, dtrain_comm *world, unsigned char digest[32])
{
    int root = dtrain_comm_rank(world) == 0;
    unsigned char digests[GPT_PARAMS][32];
    dtrain_status status = DTRAIN_OK;
    for (int i = 0; i < m->listed && status == DTRAIN_OK && (root || m->local == NULL); i++) {
        size_t elements = dtrain_param_elements(&m->table[i]);
        float *value = root || m->mesh != NULL ? (float *)malloc(elements * sizeof(float)) : NULL;
        status = (root || m->mesh != NULL) && value == NULL ? DTRAIN_ERR_MEMORY : DTRAIN_OK;
        if (status == DTRAIN_OK && m->mesh != NULL)
            status = gpt_mesh_get(m->mesh, &m->table[i], world, (int32_t *)(void *)value);
        else if (status == DTRAIN_OK && (root || m->aggregate == NULL))
            status = dtrain_fsdp_get(m->fsdp, m->table[i].name, value, 0);
        if (root && status == DTRAIN_OK)
            gpt_hash(value, elements, digests[i]);
        free(value);
    }
    if (root && status == DTRAIN_OK)
        dtrain_sha256(digests, (size_t)m->listed * sizeof digests[0], digest);
    return status;
}

static void gpt_result(const gpt_job *job, const gpt *m, dtrain_comm *world, const gpt_progress *progress,
                       const dtrain_fsdp_stats *stats, double seconds, int64_t blocked_ns)
{
    double tokens = (double)(job->flags.steps - progress->first) *
                    (double)(job->flags.micro * job->flags.batch * job->flags.context);
    double communicated = (double)(stats->communicated_ns - progress->stats.communicated_ns);
    double waited = (double)(stats->waited_ns - progress->stats.waited_ns);
    size_t peak = gpt_stats(m).peak_bytes;
    printf(" tokens_per_s=%.0f comm_share=%.4f peak_bytes=%zu fsdp_bytes=%zu hidden=%.4f\n", tokens / seconds,
           (double)blocked_ns * 1e-9 / seconds, dtrain_comm_allocator(world)->peak_bytes + peak, peak,
           communicated > 0 ? fmax(0, 1 - waited / communicated) : 1.0);
}

/* After training: compares copies, validates, samples and prints the result. */
static dtrain_status gpt_finish(gpt_job *job, gpt *m, dtrain_comm *world, const gpt_progress *progress, double loss)
{
    int root = dtrain_comm_rank(world) == 0;
    double validation = 0, seconds = (double)(gpt_now_ns() - progress->started_ns) * 1e-9;
    int64_t blocked = dtrain_comm_blocked_ns(world) - progress->blocked_ns;
    dtrain_fsdp_stats stats = gpt_stats(m);
    unsigned char digest[32];
    dtrain_status status = m->local != NULL ? dtrain_local_sgd_finish(m->local) : DTRAIN_OK;
    dtrain_local_sgd_stats rounds = dtrain_local_sgd_get_stats(m->local);
    if (status == DTRAIN_OK)
        status = m->mesh == NULL ? gpt_check_copies(m, world) : DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = gpt_validate(job, m, world, &validation);
    if (status == DTRAIN_OK && !job->flags.quiet && m->mesh == NULL)
        status = gpt_sample(job, m, root);
    if (status == DTRAIN_OK)
        status = gpt_digest(m, world, digest);
    if (status == DTRAIN_OK && job->flags.export_model != NULL && (root || (m->local == NULL && m->aggregate == NULL)))
        status = gpt_hf_export(m, &job->flags, root);
    if (status == DTRAIN_OK && root && job->flags.trace != NULL)
        status = dtrain_fsdp_trace(m->fsdp, job->flags.trace);
    if (status != DTRAIN_OK || !root)
        return status;
    if (!job->flags.quiet && m->mesh != NULL)
        gpt_mesh_print(m->mesh, job->flags.mesh, job->flags.schedule);
    else if (!job->flags.quiet)
        printf("memory of %s: %.2f MiB planned, %.2f MiB used at most\n", job->flags.strategy,
               gpt_mib(progress->planned_bytes), gpt_mib(gpt_stats(m).peak_bytes));
    if (m->local != NULL)
        printf("%d rounds of %ld steps: %.2f MiB sent, %.2f MiB if all trained together: 1/%.1f\n", (int)rounds.taken,
               job->flags.local_steps, gpt_mib((size_t)rounds.sent_bytes), gpt_mib((size_t)rounds.dense_bytes),
               (double)rounds.dense_bytes / ((double)rounds.sent_bytes + 1e-9));
    if (!job->flags.quiet)
        gpt_print_buckets(&job->flags, m->fsdp, &progress->stats, &stats);
    gpt_print_result(digest, loss, validation);
    gpt_result(job, m, world, progress, &stats, seconds, blocked);
    return DTRAIN_OK;
}

static dtrain_status gpt_loop(gpt_job *job, gpt *m, dtrain_comm *world, size_t planned_bytes, gpt_saver *saver,
                              long first, int32_t *tokens, double *losses)
{
    int root = dtrain_comm_rank(world) == 0;
    long end = gpt_end_step(&job->flags);
    dtrain_schedule schedule = gpt_schedule(&job->flags);
    gpt_progress progress;
    double loss = first > 0 && root ? job->losses[first - 1] : 0, norm = 0;
    dtrain_status status = DTRAIN_OK;
    progress.started_ns = gpt_now_ns();
    progress.blocked_ns = dtrain_comm_blocked_ns(world);
    progress.stats = gpt_stats(m);
    progress.planned_bytes = planned_bytes;
    progress.first = first;
    for (long step = first; step < end && status == DTRAIN_OK; step++) {
        float lr = dtrain_schedule_lr(&schedule, (uint64_t)step);
        status = m->mesh != NULL ? gpt_step_on_mesh(job, m, world, step, tokens, losses, lr, &loss, &norm)
                                 : gpt_step(job, m, world, step, tokens, losses, lr, &loss, &norm);
        if (status == DTRAIN_OK && !isfinite(loss) && m->local != NULL) { /* this rank's alone */
            DTRAIN_IGNORE(dtrain_comm_abort(world, "its loss is not finite: a lower --lr may help"));
            return dtrain_barrier(world);
        }
        if (status == DTRAIN_OK && !isfinite(loss)) { /* the same on every rank: all leave here */
            if (root)
                job->diverged = step + 1;
            return DTRAIN_OK;
        }
        if (status == DTRAIN_OK && root) {
            job->losses[step] = loss;
            if (job->csv.file != NULL)
                gpt_write_line(job, m->fsdp, step, loss, (double)lr, norm);
            gpt_show(job, &progress, world, step, loss, (double)lr, norm);
        }
        if (status == DTRAIN_OK)
            status = gpt_saver_step(saver, &job->flags, m, step + 1, end);
    }
    return status == DTRAIN_OK ? gpt_finish(job, m, world, &progress, loss) : status;
}

static dtrain_status gpt_rank(dtrain_comm *world, void *user)
{
    gpt_job *job = (gpt_job *)user;
    gpt model;
    gpt_aggregate aggregate;
    gpt_saver saver;
    dtrain_tensor tokens, losses;
    long first = 0;
    dtrain_allocator *allocator = dtrain_comm_allocator(world);
    size_t bytes = 2 * (size_t)(job->flags.batch * job->flags.context), micro = (size_t)job->flags.micro, planned = 0;
    dtrain_status status;
    memset(&saver, 0, sizeof saver);
    memset(&tokens, 0, sizeof tokens);
    memset(&losses, 0, sizeof losses);
    gpt_mesh mesh;
    memset(&mesh, 0, sizeof mesh);
    if (dtrain_comm_rank(world) == 0 && !job->flags.quiet && job->flags.mesh == NULL)
        gpt_print_plans(job, &planned);
    memset(&model, 0, sizeof model);
    const dtrain_compress_desc *compress = job->flags.compress != NULL ? &job->flags.compression : NULL;
    status = gpt_aggregates(&job->flags) ? gpt_aggregate_open(&aggregate, world, job->flags.aggregator, compress)
                                         : DTRAIN_OK;
    if (status == DTRAIN_OK)
        status = gpt_create(&model, &job->flags, world, gpt_aggregates(&job->flags) ? &aggregate : NULL,
                            job->flags.mesh != NULL ? &mesh : NULL);
    if (status == DTRAIN_OK)
        status = dtrain_tensor_create(&tokens, DTRAIN_I32, 1, &bytes, allocator);
    if (status == DTRAIN_OK)
        status = dtrain_tensor_create(&losses, DTRAIN_F64, 1, &micro, allocator);
    for (int chunk = 0; status == DTRAIN_OK && job->flags.mesh != NULL && chunk < mesh.count; chunk++)
        saver.lists[saver.state.list_count++] = dtrain_fsdp_pieces(mesh.fsdps[chunk]);
    if (status == DTRAIN_OK)
        status = gpt_saver_open(&saver, &job->flags, job->losses, &model, world, &first);
    if (status == DTRAIN_OK)
        status = gpt_loop(job, &model, world, planned, &saver, first, (int32_t *)tokens.data, (double *)losses.data);
    dtrain_checkpoint_destroy(saver.ckpt);
    dtrain_tensor_destroy(&tokens);
    dtrain_tensor_destroy(&losses);
    gpt_destroy(&model);
    if (gpt_aggregates(&job->flags))
        gpt_aggregate_close(&aggregate);
    return status;
}

/* ---- the program ---- */

/* Whether a mesh fits the ranks and the model; says what would. */
static int gpt_settle_mesh(const gpt_job *job)
{
    const gpt_flags *f = &job->flags;
    const int *n = f->mesh_sizes;
    char why[200] = "";
    if (n[GPT_DP] * n[GPT_PP] * n[GPT_TP] != job->world_size)
        snprintf(why, sizeof why, "is for %d x %d x %d = %d ranks, and there are %d", n[GPT_DP], n[GPT_PP], n[GPT_TP],
                 n[GPT_DP] * n[GPT_PP] * n[GPT_TP], job->world_size);
    else if (n[GPT_PP] * f->chunks > f->layers)
        snprintf(why, sizeof why, "makes %ld stages of %ld layers: at most %ld fit", n[GPT_PP] * f->chunks, f->layers,
                 f->layers / f->chunks);
    else if (n[GPT_TP] > f->heads)
        snprintf(why, sizeof why, "splits %ld heads over %d ranks: at most %ld fit", f->heads, n[GPT_TP], f->heads);
    else if (f->micro % n[GPT_DP] != 0)
        snprintf(why, sizeof why, "deals %ld micro-batches to %d pipelines: --micro must be a multiple of %d", f->micro,
                 n[GPT_DP], n[GPT_DP]);
    return why[0] != 0 ? report_complain("--mesh", f->mesh, why) : 0;
}

/* The memory of this machine in bytes; 0 or less: it is not told. */
static double gpt_machine_bytes(void)
{
#ifdef _WIN32
    MEMORYSTATUSEX status = {.dwLength = sizeof status};
    return GlobalMemoryStatusEx(&status) ? (double)status.ullTotalPhys : 0;
#else
    return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
#endif
}

/* Settles what depends on the number of ranks, and whether the model fits. */
static int gpt_settle(gpt_job *job)
{
    gpt_flags *f = &job->flags;
    dtrain_fsdp_plan_result plan;
    dtrain_fsdp_desc desc;
    double memory = gpt_machine_bytes(), needed;
    gpt model;
    int ranks = f->mesh != NULL ? f->mesh_sizes[GPT_DP] : job->world_size, parts = job->world_size / ranks;
    if (gpt_settle_micro(f, ranks) != 0)
        return 1;
    if (f->mesh != NULL && gpt_settle_mesh(job) != 0)
        return 1;
    if (f->local_steps > 0 && f->micro < job->world_size) {
        fprintf(stderr, "train_gpt: flag --micro %ld: under --local-steps each of %d ranks needs one or more\n",
                f->micro, job->world_size);
        return 1;
    }
    desc = gpt_fsdp_desc(f, f->strategy, ranks);
    gpt_describe_run(&model, f);
    if (dtrain_fsdp_plan(model.table, (size_t)model.listed, &desc, ranks, 0, &plan) != DTRAIN_OK)
        return report_complain("strategy", f->strategy, dtrain_last_error());
    needed =
        ((double)plan.peak + gpt_micro_batches_held(f) * gpt_activation_bytes(f)) / (double)parts * (double)f->ranks;
    memory = memory > 0 ? memory : (double)(SIZE_MAX / 64); /* not told: what can be addressed */
    if (needed <= memory)
        return 0;
    fprintf(stderr,
            "train_gpt: this model is too large: %ld ranks need about %.3g GB of memory, this machine has %.3g\n",
            f->ranks, needed * 1e-9, memory * 1e-9);
    return 1;
}

static int gpt_main(int argc, char **argv)
{
    gpt_job job;
    memset(&job, 0, sizeof job);
    job.flags = gpt_defaults();
    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return gpt_help();
    int bad = gpt_parse(&job.flags, argc, argv) || gpt_hf_open(&job.flags) || gpt_hf_check_export(&job.flags) ||
              gpt_read_text(&job) || gpt_join(&job) || gpt_settle(&job) || gpt_open_outputs(&job) ||
              gpt_run(&job, gpt_rank);
    return gpt_close(&job, bad);
}

#ifndef TRAIN_GPT_NO_MAIN
int main(int argc, char **argv)
{
    utf8_arguments(argc, argv);
    return gpt_main(argc, argv);
}
#endif

/* The end of what train_gpt --ranks 4 --steps 200 --batch 4 prints on two cores, less its sample of text:
 *
 * step 190/200 loss 2.2172 lr 1.08e-04 norm 0.835 21247 tokens/s comm 11.9% left 2 s
 * step 200/200 loss 2.2646 lr 1.00e-04 norm 1.096 21318 tokens/s comm 11.8% left 0 s
 * memory of ddp: 18.28 MiB planned, 17.50 MiB used at most
 * result weights_sha256=ab749012417be71e85199cf3a384604d8f23de10a47ffc03ec433476b38e5d7f loss=2.264570
 * val_loss=2.183122 tokens_per_s=21318 comm_share=0.1185 peak_bytes=115405370 fsdp_bytes=18352754 hidden=0.9673
 */
