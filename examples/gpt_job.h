/* What train_gpt and train_gpt_cuda do alike around the steps: the job of a run, its group of processes, its FSDP, its
 * files and its result. Include dtrain.h, gpt_flags.h and gpt_text.h first. */
#ifndef GPT_JOB_H
#define GPT_JOB_H

#define GPT_TRACE_EVENTS 100000 /* the last of rank 0's */

typedef struct gpt_job {
    gpt_flags flags;
    unsigned char *text; /* its first train_tokens are learned; flags.token_bytes each */
    size_t text_tokens, train_tokens;
    double *losses; /* [steps], of rank 0; saved with the model */
    long diverged;  /* the step, counted from 1, whose loss was not finite; 0: none; written by rank 0 */
    report_file csv, svg;
    dtrain_comm *world; /* of processes, when a launcher has started several; else NULL */
    int world_size;     /* of them, or of threads */
    int gpus;           /* that the ranks of train_gpt_cuda compute on */
} gpt_job;

/* ---- before ---- */

static inline int gpt_read_text(gpt_job *job)
{
    return gpt_text_read(&job->flags, &job->text, &job->text_tokens, &job->train_tokens);
}

/* Joins the group of processes that the environment describes, if it describes one. */
static inline int gpt_join(gpt_job *job)
{
    dtrain_status status = dtrain_comm_create(&job->world, NULL);
    if (status != DTRAIN_OK) {
        fprintf(stderr, REPORT_PROGRAM ": %s: %s\n", dtrain_status_name(status), dtrain_last_error());
        return 1;
    }
    if (dtrain_comm_size(job->world) == 1) {
        dtrain_comm_destroy(job->world);
        job->world = NULL;
    } else if (job->flags.ranks > 1)
        return report_complain("flag", "--ranks", "is for threads; a launcher has started processes already");
    job->world_size = job->world != NULL ? dtrain_comm_size(job->world) : (int)job->flags.ranks;
    return 0;
}

/* Settles how many micro-batches a step has; ranks: those that they are dealt to. */
static inline int gpt_settle_micro(gpt_flags *f, int ranks)
{
    if (f->accum > 0 && f->micro > 0 && f->micro != f->accum * ranks) {
        fprintf(stderr, REPORT_PROGRAM ": flag --micro %ld: --accum %ld on %d ranks makes %ld: leave one of them out\n",
                f->micro, f->accum, ranks, f->accum * ranks);
        return 1;
    }
    f->micro = f->accum > 0 ? f->accum * ranks : f->micro > 0 ? f->micro : 8;
    return 0;
}

static inline int gpt_open_outputs(gpt_job *job)
{
    if (dtrain_comm_rank(job->world) != 0)
        return 0; /* rank 0 writes */
    if (report_open(&job->csv, job->flags.csv) != 0 || report_open(&job->svg, job->flags.svg) != 0)
        return 1;
    if (job->flags.trace != NULL && report_try(job->flags.trace) != 0)
        return 1;
    if (report_same_file(&job->csv, &job->svg))
        return report_complain("output", job->flags.svg, "is the file of --csv too");
    job->losses = (double *)calloc((size_t)job->flags.steps, sizeof(double));
    if (job->losses == NULL)
        return report_complain("flag", "--steps", "needs more memory than there is");
    if (fprintf(job->csv.file, "step,loss,lr,norm%s\n", gpt_counts(&job->flags) ? ",dense_bytes,sent_bytes" : "") < 0 ||
        fflush(job->csv.file) != 0)
        return report_complain("output", job->flags.csv, strerror(errno));
    return 0;
}

static const struct {
    const char *name;
    dtrain_strategy strategy;
} gpt_strategies[] = {{"full", DTRAIN_FULL_SHARD},
                      {"grad", DTRAIN_SHARD_GRAD_OP},
                      {"ddp", DTRAIN_DDP},
                      {"hybrid", DTRAIN_HYBRID_SHARD}};

enum { GPT_STRATEGIES = sizeof gpt_strategies / sizeof gpt_strategies[0] };

static inline dtrain_fsdp_desc gpt_fsdp_desc(const gpt_flags *flags, const char *strategy, int ranks)
{
    dtrain_fsdp_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < GPT_STRATEGIES; i++)
        if (strcmp(strategy, gpt_strategies[i].name) == 0)
            desc.strategy = gpt_strategies[i].strategy;
    desc.shard_size = (int)flags->shard_size;
    desc.gather_dtype = strcmp(flags->gather, "bf16") == 0  ? DTRAIN_BF16
                        : strcmp(flags->gather, "f16") == 0 ? DTRAIN_F16
                                                            : DTRAIN_F32;
    desc.optimizer.kind = strcmp(flags->optimizer, "sgd") == 0 ? DTRAIN_SGD : DTRAIN_ADAMW;
    desc.optimizer.weight_decay = desc.optimizer.kind == DTRAIN_ADAMW ? 0.1f : 0; /* coupled, it would outweigh g */
    desc.optimizer.beta2 = 0.95f;
    desc.optimizer.momentum = flags->compression.feedback.momentum > 0 ? 0 : 0.9f;
    if (flags->compress != NULL && flags->aggregator == NULL && flags->local_steps == 0 &&
        (desc.strategy == DTRAIN_DDP || desc.strategy == DTRAIN_HYBRID_SHARD))
        desc.compress = &flags->compression;
    if (desc.compress != NULL && flags->compression.kind == DTRAIN_COMPRESS_TOPK)
        desc.bucket_bytes = SIZE_MAX; /* chosen among all, where by buckets it trains worse, but overlaps */
    desc.micro_batches = (int)((flags->micro + ranks - 1) / ranks);
    desc.keep_full_grads = gpt_aggregates(flags);
    desc.trace_events = flags->trace != NULL ? GPT_TRACE_EVENTS : 0;
    return desc;
}

/* Runs rank on every rank: of the processes, or of threads. */
static inline int gpt_run(gpt_job *job, dtrain_status (*rank)(dtrain_comm *world, void *job))
{
    dtrain_status status =
        job->world != NULL ? rank(job->world, job) : dtrain_run_threads((int)job->flags.ranks, rank, job, NULL);
    if (status == DTRAIN_OK && job->diverged > 0)
        fprintf(stderr, REPORT_PROGRAM ": the loss of step %ld is not finite: a lower --lr than %g may help\n",
                job->diverged, job->flags.lr);
    if (status == DTRAIN_OK)
        return job->diverged > 0;
    fprintf(stderr, REPORT_PROGRAM ": %s: %s\n", dtrain_status_name(status), dtrain_last_error());
    return 1;
}

/* ---- steps ---- */

/* Writes held-out sequence i of GPT_VALIDATION, context + 1 tokens. */
static inline void gpt_draw_held_out(const gpt_job *job, size_t i, int32_t *tokens)
{
    size_t T = (size_t)job->flags.context, room = job->text_tokens - job->train_tokens - T;
    gpt_text_copy(&job->flags, job->text, job->train_tokens + gpt_text_held_out(room, i), T + 1, tokens);
}

static inline void gpt_draw(const gpt_job *job, long step, long micro, int32_t *tokens, int32_t *targets)
{
    gpt_text_draw(&job->flags, job->text, job->train_tokens, step, micro, tokens, targets);
}

/* The mean of a step's losses, of which each rank has its own; the same bits on all. */
static inline dtrain_status gpt_mean_loss(const gpt_flags *flags, dtrain_comm *world, double *losses, double *loss)
{
    size_t micro = (size_t)flags->micro;
    dtrain_status status = /* each sum has one term that is not zero */
        dtrain_all_reduce(world, losses, losses, micro, DTRAIN_F64, DTRAIN_SUM);
    *loss = 0;
    for (size_t i = 0; i < micro; i++)
        *loss += losses[i];
    *loss /= (double)(micro * (size_t)(flags->batch * flags->context));
    return status;
}

/* Writes a step's line of the CSV file. */
static inline void gpt_write_line(const gpt_job *job, const dtrain_fsdp *fsdp, long step, double loss, double lr,
                                  double norm)
{
    const dtrain_bucket *buckets;
    size_t count = dtrain_fsdp_buckets(fsdp, &buckets);
    uint64_t dense = 0, sent = 0;
    for (size_t i = 0; i < count; i++) {
        dense += buckets[i].dense_bytes;
        sent += buckets[i].sent_bytes;
    }
    fprintf(job->csv.file, "%ld,%.9g,%.9g,%.9g", step + 1, loss, lr, norm);
    if (gpt_counts(&job->flags))
        fprintf(job->csv.file, ",%llu,%llu", (unsigned long long)dense, (unsigned long long)sent);
    fputc('\n', job->csv.file);
}

/* ---- after ---- */

static inline double gpt_mib(size_t bytes)
{
    return (double)bytes / (1 << 20);
}

/* What rank 0's gradients were in each bucket of the last step, and in all steps. */
static inline void gpt_print_buckets(const gpt_flags *flags, const dtrain_fsdp *fsdp, const dtrain_fsdp_stats *before,
                                     const dtrain_fsdp_stats *after)
{
    const dtrain_bucket *buckets;
    size_t count = dtrain_fsdp_buckets(fsdp, &buckets);
    if (flags->compress == NULL)
        return;
    for (size_t i = 0; i < count; i++)
        printf("units %d to %d: %llu bytes sent of %llu, a %.1fth, in %.1f ms\n", buckets[i].first_unit,
               buckets[i].last_unit, (unsigned long long)buckets[i].sent_bytes,
               (unsigned long long)buckets[i].dense_bytes,
               buckets[i].sent_bytes > 0 ? (double)buckets[i].dense_bytes / (double)buckets[i].sent_bytes : 1.0,
               (double)buckets[i].ns * 1e-6);
    printf("gradients with --compress %s: %.2f MiB sent, %.2f without\n", flags->compress,
           gpt_mib((size_t)(after->sent_bytes - before->sent_bytes)),
           gpt_mib((size_t)(after->dense_bytes - before->dense_bytes)));
}

/* Hashes floats as little-endian bytes, the same on every machine. Leaves them so in memory. */
static inline void gpt_hash(float *values, size_t count, unsigned char digest[32])
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        const unsigned char bytes[4] = {(unsigned char)bits, (unsigned char)(bits >> 8), (unsigned char)(bits >> 16),
                                        (unsigned char)(bits >> 24)};
        memcpy(values + i, bytes, sizeof bytes);
    }
    dtrain_sha256(values, count * sizeof(float), digest);
}

/* Begins the line of the result, which the program ends. */
static inline void gpt_print_result(const unsigned char digest[32], double loss, double validation)
{
    printf("result weights_sha256=");
    for (int i = 0; i < 32; i++)
        printf("%02x", digest[i]);
    printf(" loss=%.6f val_loss=%.6f", loss, validation);
}

/* Puts the files in their places, unless something was bad, and frees what the job has; returns what main does. */
static inline int gpt_close(gpt_job *job, int bad)
{
    if (!bad && job->svg.file != NULL) {
        report_draw_curve(job->svg.file, job->losses, gpt_end_step(&job->flags));
        bad = report_close(&job->csv) | report_close(&job->svg);
        if (fflush(stdout) != 0 || ferror(stdout))
            bad = report_complain("output", "of the result", "could not be written");
    }
    report_discard(&job->csv);
    report_discard(&job->svg);
    dtrain_comm_destroy(job->world);
    free(job->losses);
    free(job->text);
    return bad;
}

#endif
