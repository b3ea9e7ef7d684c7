/* The main job: the GPT's gradients against a float64 twin and finite differences, and its weights on any number of
 * ranks; the program, its flags and files. Text is generated from a seed. */
#define DTRAIN_API static
#define TRAIN_GPT_NO_MAIN
#include "../../examples/train_gpt.c"
#include "test.h"
#include "gpt_alone.h"

/* ---- the twin: one sequence, plain loops in double, written from the equations ---- */

typedef struct twin {
    size_t L, H, C, T;
    const double *p[GPT_PARAMS];
} twin;

static void twin_norm(double *out, const double *in, const double *w, const double *b, size_t C)
{
    double mean = 0, variance = 0;
    for (size_t c = 0; c < C; c++)
        mean += in[c] / (double)C;
    for (size_t c = 0; c < C; c++)
        variance += (in[c] - mean) * (in[c] - mean) / (double)C;
    for (size_t c = 0; c < C; c++)
        out[c] = (in[c] - mean) / sqrt(variance + 1e-5) * w[c] + b[c];
}

static void twin_linear(double *out, const double *in, const double *w, const double *b, size_t C, size_t OC)
{
    for (size_t o = 0; o < OC; o++) {
        out[o] = b != NULL ? b[o] : 0;
        for (size_t c = 0; c < C; c++)
            out[o] += w[o * C + c] * in[c];
    }
}

static double twin_gelu(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void twin_attention(double *out, const double *qkv, size_t t, const twin *m)
{
    size_t C = m->C, D = C / m->H;
    for (size_t h = 0; h < m->H; h++) {
        double total = 0, weight;
        for (size_t c = 0; c < D; c++)
            out[h * D + c] = 0;
        for (size_t j = 0; j <= t; j++) {
            double score = 0;
            for (size_t c = 0; c < D; c++)
                score += qkv[t * 3 * C + h * D + c] * qkv[j * 3 * C + C + h * D + c];
            weight = exp(score / sqrt((double)D));
            total += weight;
            for (size_t c = 0; c < D; c++)
                out[h * D + c] += weight * qkv[j * 3 * C + 2 * C + h * D + c];
        }
        for (size_t c = 0; c < D; c++)
            out[h * D + c] /= total;
    }
}

static void twin_layer(const twin *m, size_t l, double *x, double *qkv)
{
    size_t C = m->C;
    double norm[64], branch[64], wide[256];
    for (size_t t = 0; t < m->T; t++) {
        twin_norm(norm, x + t * C, m->p[LN1W] + l * C, m->p[LN1B] + l * C, C);
        twin_linear(qkv + t * 3 * C, norm, m->p[QKVW] + l * 3 * C * C, m->p[QKVB] + l * 3 * C, C, 3 * C);
    }
    for (size_t t = 0; t < m->T; t++) {
        twin_attention(norm, qkv, t, m);
        twin_linear(branch, norm, m->p[PROJW] + l * C * C, m->p[PROJB] + l * C, C, C);
        for (size_t c = 0; c < C; c++)
            x[t * C + c] += branch[c];
        twin_norm(norm, x + t * C, m->p[LN2W] + l * C, m->p[LN2B] + l * C, C);
        twin_linear(wide, norm, m->p[FCW] + l * 4 * C * C, m->p[FCB] + l * 4 * C, C, 4 * C);
        for (size_t c = 0; c < 4 * C; c++)
            wide[c] = twin_gelu(wide[c]);
        twin_linear(branch, wide, m->p[FCPW] + l * 4 * C * C, m->p[FCPB] + l * C, 4 * C, C);
        for (size_t c = 0; c < C; c++)
            x[t * C + c] += branch[c];
    }
}

/* The sum of losses of one sequence. */
static double twin_loss(const twin *m, const int32_t *tokens, const int32_t *targets)
{
    static double x[32 * 64], qkv[32 * 3 * 64];
    double loss = 0, norm[64], logits[GPT_VOCAB];
    size_t C = m->C;
    for (size_t t = 0; t < m->T; t++)
        for (size_t c = 0; c < C; c++)
            x[t * C + c] = m->p[WTE][(size_t)tokens[t] * C + c] + m->p[WPE][t * C + c];
    for (size_t l = 0; l < m->L; l++)
        twin_layer(m, l, x, qkv);
    for (size_t t = 0; t < m->T; t++) {
        double total = 0;
        twin_norm(norm, x + t * C, m->p[LNFW], m->p[LNFB], C);
        twin_linear(logits, norm, m->p[HEADW], NULL, C, GPT_VOCAB);
        for (size_t v = 0; v < GPT_VOCAB; v++)
            total += exp(logits[v]);
        loss += log(total) - logits[targets[t]];
    }
    return loss;
}

/* ---- jobs ---- */

static unsigned char text[20000];

static gpt_job small_job(long ranks, long steps)
{
    gpt_job job;
    for (size_t i = 0; i < sizeof text; i++) /* words of a small alphabet, so that there is something to learn */
        text[i] = (unsigned char)(i % 6 == 5 ? ' ' : 'a' + (int)(dtrain_random_u64(5, i / 6 * 8 + i % 3) % 4));
    memset(&job, 0, sizeof job);
    job.flags = gpt_defaults();
    job.flags.layers = job.flags.heads = 2;
    job.flags.width = 16;
    job.flags.context = 12;
    job.flags.batch = 2;
    job.flags.micro = 8;
    job.flags.steps = steps;
    job.flags.ranks = ranks;
    job.flags.quiet = 1;
    job.text = text;
    job.text_tokens = sizeof text;
    job.train_tokens = sizeof text / 10 * 9;
    return job;
}

static double *widened(const gpt_alone *a, twin *m)
{
    const gpt *model = &a->model;
    double *all = (double *)malloc(model->count * sizeof(double));
    memset(m, 0, sizeof *m);
    m->L = model->L;
    m->H = model->H;
    m->C = model->C;
    m->T = model->T;
    for (size_t i = 0; all != NULL && i < model->count; i++)
        all[i] = (double)a->weights[i];
    for (int i = 0; i < GPT_PARAMS; i++)
        m->p[i] = all + alone_at(model, i, 0);
    return all;
}

static double twin_batch(const twin *m, const gpt_job *job, const int32_t *tokens)
{
    size_t T = m->T, B = (size_t)job->flags.batch;
    double loss = 0;
    for (size_t b = 0; b < B; b++)
        loss += twin_loss(m, tokens + b * T, tokens + (B + b) * T);
    return loss;
}

TEST(every_backward_agrees_with_finite_differences_of_a_float64_twin)
{
    gpt_job job = small_job(1, 1);
    gpt_alone a;
    twin m;
    int32_t tokens[2 * 2 * 12];
    double loss, *all;
    alone_create(&a, &job.flags);
    alone_stir(&a);
    all = widened(&a, &m);
    gpt_draw(&job, 0, 0, tokens, tokens + 24);
    loss = alone_micro_batch(&a, tokens, tokens + 24);
    CHECK(fabs(loss - twin_batch(&m, &job, tokens)) < 1e-4 * loss);
    for (int i = 0; i < GPT_PARAMS; i++) {
        size_t n = dtrain_param_elements(&a.model.table[i]), base = alone_at(&a.model, i, 0);
        for (int k = 0; k < 24; k++) {
            size_t at = base + (size_t)(dtrain_random_u64(9, (uint64_t)(100 * i + k)) % n);
            double kept = all[at], up, down, slope, got = (double)a.grads[at];
            all[at] = kept + 1e-5;
            up = twin_batch(&m, &job, tokens);
            all[at] = kept - 1e-5;
            down = twin_batch(&m, &job, tokens);
            all[at] = kept;
            slope = (up - down) / 2e-5;
            if (!(fabs(slope - got) <= 1e-3 * fabs(slope) + 2e-4))
                TEST_FAIL("%s: element %zu has gradient %g, the twin %g", a.model.table[i].name, at - base, got, slope);
        }
    }
    free(all);
    alone_destroy(&a);
}

typedef struct outcome {
    gpt_job *job;
    unsigned char digest[32];
    double *losses; /* [steps], by rank 0 */
    double validation;
} outcome;

/* The training loop of train_gpt without its reports; what it takes stays within the plan. */
static dtrain_status train_small(dtrain_comm *world, void *user)
{
    outcome *o = (outcome *)user;
    gpt_job *job = o->job;
    gpt model;
    int32_t tokens[2 * 2 * 12];
    unsigned char digest[32];
    double losses[64], loss, validation = 0, norm;
    int root = dtrain_comm_rank(world) == 0;
    dtrain_fsdp_stats stats;
    dtrain_fsdp_plan_result plan;
    dtrain_fsdp_desc desc = gpt_fsdp_desc(&job->flags, job->flags.strategy, dtrain_comm_size(world));
    dtrain_status status = gpt_create(&model, &job->flags, world, NULL, NULL);
    for (long step = 0; step < job->flags.steps && status == DTRAIN_OK; step++) {
        status = gpt_step(job, &model, world, step, tokens, losses, (float)job->flags.lr, &loss, &norm);
        if (root)
            o->losses[step] = loss;
    }
    if (status == DTRAIN_OK)
        status = gpt_check_copies(&model, world);
    if (status == DTRAIN_OK)
        status = gpt_validate(job, &model, world, &validation);
    if (status == DTRAIN_OK)
        status = gpt_digest(&model, world, digest);
    if (status == DTRAIN_OK && root) {
        memcpy(o->digest, digest, 32);
        o->validation = validation;
    }
    stats = dtrain_fsdp_get_stats(model.fsdp);
    CHECK_EQ(dtrain_fsdp_plan(model.table, GPT_PARAMS, &desc, dtrain_comm_size(world), dtrain_comm_rank(world), &plan),
             DTRAIN_OK);
    if (stats.peak_bytes > plan.peak + 65536)
        TEST_FAIL("%s: %zu bytes were planned, %zu used", job->flags.strategy, plan.peak, stats.peak_bytes);
    gpt_destroy(&model);
    return status;
}

static outcome run_small(gpt_job *job, double *losses)
{
    outcome o;
    memset(&o, 0, sizeof o);
    o.job = job;
    o.losses = losses;
    if (dtrain_run_threads((int)job->flags.ranks, train_small, &o, NULL) != DTRAIN_OK)
        TEST_FAIL("%ld ranks: %s", job->flags.ranks, dtrain_last_error());
    return o;
}

TEST(ranks_1_2_4_and_8_end_100_steps_with_the_same_bits)
{
    double one[100], other[100];
    gpt_job job = small_job(1, 100);
    job.flags.batch = 1;
    outcome first = run_small(&job, one), again = run_small(&job, other);
    CHECK(memcmp(first.digest, again.digest, 32) == 0);
    CHECK(one[99] < 0.75 * one[0]);
    for (long ranks = 2; ranks <= 8; ranks *= 2) {
        job.flags.ranks = ranks;
        outcome o = run_small(&job, other);
        CHECK(memcmp(first.digest, o.digest, 32) == 0);
        CHECK(memcmp(one, other, sizeof one) == 0);
        CHECK(first.validation == o.validation);
    }
}

TEST(every_strategy_and_dtype_ends_with_the_same_bits)
{
    static const char *const gathers[] = {"f32", "bf16", "f16"};
    double one[20], other[20];
    unsigned char last[32] = {0};
    for (int g = 0; g < 3; g++) {
        gpt_job job = small_job(1, 20);
        job.flags.gather = gathers[g];
        outcome first = run_small(&job, one);
        CHECK(memcmp(first.digest, last, 32) != 0);
        memcpy(last, first.digest, 32);
        for (int i = 0; i < GPT_STRATEGIES; i++) {
            int hybrid = gpt_strategies[i].strategy == DTRAIN_HYBRID_SHARD;
            job.flags.strategy = gpt_strategies[i].name;
            for (job.flags.ranks = hybrid ? 4 : 1; job.flags.ranks <= 8; job.flags.ranks *= 2) {
                outcome o = run_small(&job, other);
                if (memcmp(first.digest, o.digest, 32) != 0 || memcmp(one, other, sizeof one) != 0 ||
                    first.validation != o.validation)
                    TEST_FAIL("%s, %s on %ld ranks ends with other bits", gathers[g], job.flags.strategy,
                              job.flags.ranks);
            }
        }
    }
}

TEST(strategies_agree_where_ranks_do_not_divide_the_micro_batches)
{
    static const long ranks[] = {2, 3, 6, 9};
    double one[10], other[10];
    gpt_job job = small_job(1, 10);
    job.flags.micro = 7;
    for (int k = 0; k < 4; k++) {
        job.flags.ranks = ranks[k];
        job.flags.strategy = "ddp";
        outcome none = run_small(&job, one);
        job.flags.strategy = "grad";
        CHECK(memcmp(none.digest, run_small(&job, other).digest, 32) == 0);
        job.flags.strategy = "full";
        CHECK(memcmp(none.digest, run_small(&job, other).digest, 32) == 0);
        CHECK(memcmp(one, other, sizeof one) == 0);
    }
}

/* What gpt_check_copies is for: one rank's copy of the weights goes astray. */
static dtrain_status go_astray(dtrain_comm *world, void *user)
{
    gpt_job *job = (gpt_job *)user;
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    gpt model;
    dtrain_status status = gpt_create(&model, &job->flags, world, NULL, NULL);
    CHECK_EQ(status, DTRAIN_OK);
    CHECK_EQ(gpt_check_copies(&model, world), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_local(model.fsdp, &slices, &count), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 3 && model.strategy == DTRAIN_SHARD_GRAD_OP)
        model.params[LNFW][0] += 1;
    else if (dtrain_comm_rank(world) == 3)
        slices[0].weights[0] += 1;
    if (dtrain_comm_rank(world) % dtrain_fsdp_shard_size(model.fsdp) == 3 % dtrain_fsdp_shard_size(model.fsdp) ||
        model.strategy == DTRAIN_SHARD_GRAD_OP)
        CHECK_EQ(gpt_check_copies(&model, world), DTRAIN_ERR_MISMATCH);
    else
        CHECK_EQ(gpt_check_copies(&model, world), DTRAIN_OK);
    gpt_destroy(&model);
    return DTRAIN_OK;
}

TEST(a_copy_that_differs_is_found)
{
    static const char *const strategies[] = {"ddp", "grad", "hybrid"};
    for (int i = 0; i < 3; i++) {
        gpt_job job = small_job(4, 1);
        job.flags.strategy = strategies[i];
        CHECK_EQ(dtrain_run_threads(4, go_astray, &job, NULL), DTRAIN_OK);
    }
}

TEST(ranks_3_5_and_6_follow_the_same_loss_within_1e_5)
{
    static const long ranks[] = {3, 5, 6};
    double one[100], other[100];
    gpt_job job = small_job(1, 100);
    job.flags.batch = 1;
    run_small(&job, one);
    for (int k = 0; k < 3; k++) {
        job.flags.ranks = ranks[k];
        run_small(&job, other);
        for (int i = 0; i < 100; i++)
            if (!(fabs(one[i] - other[i]) <= 1e-5 * one[i]))
                TEST_FAIL("%ld ranks, step %d: loss %.9g, on one rank %.9g", ranks[k], i, other[i], one[i]);
    }
}

TEST(ranks_without_a_micro_batch_are_right)
{
    double one[20], other[20];
    gpt_job job = small_job(1, 20);
    job.flags.micro = 3;
    outcome first = run_small(&job, one);
    job.flags.ranks = 5;
    outcome o = run_small(&job, other);
    for (int i = 0; i < 20; i++)
        CHECK(fabs(one[i] - other[i]) <= 1e-5 * one[i]);
    job.flags.micro = 1;
    job.flags.ranks = 1;
    first = run_small(&job, one);
    job.flags.ranks = 4;
    o = run_small(&job, other);
    CHECK(memcmp(first.digest, o.digest, 32) == 0);
}

TEST(micro_batches_that_the_ranks_do_not_divide_are_right)
{
    static const long ranks[] = {2, 3, 4, 6, 9};
    double one[10], other[10];
    gpt_job job = small_job(1, 10);
    job.flags.micro = 7;
    run_small(&job, one);
    for (int k = 0; k < 5; k++) {
        job.flags.ranks = ranks[k];
        run_small(&job, other);
        for (int i = 0; i < 10; i++)
            if (!(fabs(one[i] - other[i]) <= 1e-5 * one[i]))
                TEST_FAIL("%ld ranks, step %d: loss %.9g, on one rank %.9g", ranks[k], i, other[i], one[i]);
    }
}

TEST(the_first_losses_agree_with_the_twin)
{
    double losses[1];
    gpt_job job = small_job(2, 1);
    int32_t tokens[2 * 2 * 12];
    gpt_alone a;
    twin m;
    double expected = 0, *all;
    run_small(&job, losses);
    alone_create(&a, &job.flags);
    all = widened(&a, &m);
    for (long i = 0; i < job.flags.micro; i++) {
        gpt_draw(&job, 0, i, tokens, tokens + 24);
        expected += twin_batch(&m, &job, tokens) / (double)(job.flags.micro * job.flags.batch * job.flags.context);
    }
    CHECK(fabs(losses[0] - expected) < 1e-4);
    free(all);
    alone_destroy(&a);
}

/* ---- the program: its flags, its files, what it prints ---- */

typedef struct program {
    int status;
    char out[4096], err[4096];
} program;

static void slurp(FILE *file, char *into, size_t room)
{
    rewind(file);
    into[fread(into, 1, room - 1, file)] = 0;
    fclose(file);
}

/* Runs the program on a space-separated command line; "%" in it is the directory dir. */
static program run_program(const char *line, const char *dir)
{
    program run;
    char words[2048], *argv[40];
    int argc = 0, kept_out = dup(1), kept_err = dup(2);
    size_t n = 0;
    FILE *out = tmpfile(), *err = tmpfile();
    static char name[] = "train_gpt";
    argv[argc++] = name;
    for (; *line != 0 && n < sizeof words / 2; line++)
        n += (size_t)sprintf(words + n, *line == '%' ? "%s" : "%.1s", *line == '%' ? dir : line);
    words[n] = 0;
    for (char *word = strtok(words, " "); word != NULL && argc < 39; word = strtok(NULL, " "))
        argv[argc++] = word;
    argv[argc] = NULL;
    memset(&run, 0, sizeof run);
    if (out == NULL || err == NULL || kept_out < 0 || kept_err < 0)
        abort();
    fflush(stdout);
    dup2(fileno(out), 1);
    dup2(fileno(err), 2);
    run.status = gpt_main(argc, argv);
    fflush(stdout);
    dup2(kept_out, 1);
    dup2(kept_err, 2);
    close(kept_out);
    close(kept_err);
    slurp(out, run.out, sizeof run.out);
    slurp(err, run.err, sizeof run.err);
    return run;
}

static char *make_directory(char *dir)
{
    strcpy(dir, "/tmp/test_gpt-XXXXXX");
    if (mkdtemp(dir) == NULL)
        abort();
    return dir;
}

static char *path_in(const char *dir, const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void write_text(const char *dir, const char *name, const void *data, size_t bytes)
{
    FILE *file = fopen(path_in(dir, name), "w");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        abort();
}

static char *read_text(const char *dir, const char *name, char *into, size_t room)
{
    FILE *file = fopen(path_in(dir, name), "r");
    into[0] = 0;
    if (file != NULL)
        slurp(file, into, room);
    return into;
}

/* A run that would succeed but for what is added to it. */
#define SMALL \
    "--layers 1 --heads 2 --width 16 --context 12 --batch 1 --micro 4 --steps 40 --text %/text --csv %/csv --svg " \
    "%/svg "

static const char *const bad_lines[][2] = {
    {"--bogus 3", "--bogus"},
    {"extra", "extra"},
    {"--steps", "--steps"},
    {"--text", "--text"},
    {"--lr", "--lr"},
    {"--steps ten", "--steps ten"},
    {"--steps 10x", "--steps 10x"},
    {"--steps 1.5", "whole number"},
    {"--steps 0", "--steps 0"},
    {"--layers 0", "--layers 0"},
    {"--heads 0", "--heads 0"},
    {"--width 0", "--width 0"},
    {"--context 0", "--context 0"},
    {"--batch 0", "--batch 0"},
    {"--micro 0", "--micro 0"},
    {"--ranks 0", "--ranks 0"},
    {"--ranks -1", "--ranks -1"},
    {"--lr nan", "--lr nan"},
    {"--lr -1", "--lr -1"},
    {"--heads 3", "multiple of --heads"},
    {"--optimizer lion", "lion"},
    {"--strategy zero", "possible are full, grad, ddp, hybrid"},
    {"--gather f64", "possible are bf16, f16, f32"},
    {"--strategy hybrid --shard-size 3 --ranks 4", "shard_size is 3 on 4 ranks"},
    {"--accum 3 --ranks 2", "--micro 4: --accum 3 on 2 ranks makes 6"},
    {"--accum 0", "--accum 0"},
    {"--clip -1", "--clip -1"},
    {"--trace %/none/trace", "/none/trace: No such file"},
    {"--trace %", "is a directory"},
    {"--trace /dev/null", "is no plain file"},
    {"--layers 1000 --heads 1 --width 65536 --batch 65536", sizeof(size_t) == 8 ? "too large" : "than memory"},
    {"--text %/none", "/none: No such file"},
    {"--text %/empty", "is empty"},
    {"--text %/short", "is too short"},
    {"--text %", "cannot be read"},
    {"--csv %/none/csv", "/none/csv: No such file"},
    {"--svg %/none/svg", "/none/svg: No such file"},
    {"--svg %", "is a directory"},
    {"--svg %/csv", "is the file of --csv"},
};

TEST(bad_flags_texts_and_outputs_end_with_one_line_before_training)
{
    char dir[64], line[512], none[8];
    small_job(1, 1); /* fills text */
    make_directory(dir);
    write_text(dir, "text", text, sizeof text);
    write_text(dir, "empty", text, 0);
    write_text(dir, "short", text, 100);
    for (size_t i = 0; i < sizeof bad_lines / sizeof bad_lines[0]; i++) {
        program run;
        snprintf(line, sizeof line, "%s%s", SMALL, bad_lines[i][0]);
        run = run_program(line, dir);
        const char *end = strchr(run.err, '\n');
        if (run.status != 1 || strstr(run.err, bad_lines[i][1]) == NULL || strncmp(run.err, "train_gpt: ", 11) != 0 ||
            end == NULL || end[1] != 0 || run.out[0] != 0)
            TEST_FAIL("%s: status %d, output \"%s\", error \"%s\"", bad_lines[i][0], run.status, run.out, run.err);
    }
    CHECK(read_text(dir, "csv", none, sizeof none)[0] == 0);
    CHECK_EQ(unlink(path_in(dir, "text")) | unlink(path_in(dir, "empty")) | unlink(path_in(dir, "short")), 0);
    CHECK_EQ(rmdir(dir), 0); /* nothing else was left in it */
}

static long count_of(const char *in, const char *part)
{
    long n = 0;
    for (; (in = strstr(in, part)) != NULL; in++)
        n++;
    return n;
}

TEST(a_run_that_diverges_says_at_which_step_and_fails)
{
    char dir[64], none[8];
    program run;
    small_job(1, 1);
    make_directory(dir);
    write_text(dir, "text", text, sizeof text);
    run = run_program(SMALL "--quiet --ranks 3 --optimizer sgd --lr 1000 --clip 0", dir);
    CHECK_EQ(run.status, 1);
    CHECK_CONTAINS(run.err, "is not finite: a lower --lr");
    CHECK(run.out[0] == 0);
    CHECK(read_text(dir, "csv", none, sizeof none)[0] == 0);
    CHECK_EQ(unlink(path_in(dir, "text")), 0);
    CHECK_EQ(rmdir(dir), 0);
}

TEST(the_program_reports_its_steps_and_writes_its_files)
{
    static char csv[8192], again[8192], svg[8192], trace[1 << 20];
    char dir[64];
    program one, two;
    small_job(1, 1);
    make_directory(dir);
    write_text(dir, "text", text, sizeof text);
    one = run_program(SMALL, dir);
    CHECK_EQ(one.status, 0);
    CHECK(one.err[0] == 0);
    CHECK_EQ(count_of(one.out, "\nstep ") + (strncmp(one.out, "step ", 5) == 0), 20);
    CHECK_CONTAINS(one.out, "step 40/40 loss ");
    CHECK_CONTAINS(one.out, "\nresult weights_sha256=");
    for (int i = 0; i < 5; i++) {
        static const char *const fields[] = {" loss=", " val_loss=", " tokens_per_s=", " comm_share=", " peak_bytes="};
        CHECK_EQ(count_of(one.out, fields[i]), 1);
    }
    read_text(dir, "csv", csv, sizeof csv);
    CHECK_EQ(count_of(csv, "\n"), 41);
    CHECK(strncmp(csv, "step,loss,lr,norm\n1,", 20) == 0);
    read_text(dir, "svg", svg, sizeof svg);
    CHECK(strncmp(svg, "<svg ", 5) == 0 && strcmp(svg + strlen(svg) - 7, "</svg>\n") == 0);
    CHECK_EQ(count_of(svg, "<polyline"), 1);
    CHECK_CONTAINS(one.out, "\nddp ");
    CHECK_CONTAINS(one.out, " <- this run\n");
    CHECK_CONTAINS(one.out, "\nhybrid     not with --shard-size 2 on 1 ranks\n");
    CHECK_CONTAINS(one.out, "\nmemory of ddp: ");
    two = run_program(SMALL "--ranks 2 --quiet", dir);
    CHECK_EQ(two.status, 0);
    CHECK(strncmp(two.out, "result weights_sha256=", 22) == 0 &&
          strncmp(strstr(one.out, "result "), two.out, 22 + 64) == 0);
    CHECK(strcmp(csv, read_text(dir, "csv", again, sizeof again)) == 0);
    two = run_program(SMALL "--ranks 4 --quiet --accum 1 --strategy full --trace %/trace", dir);
    CHECK(strncmp(strstr(one.out, "result "), two.out, 22 + 64) == 0);
    read_text(dir, "trace", trace, sizeof trace);
    CHECK(strncmp(trace, "{\"traceEvents\":[", 16) == 0);
    CHECK(count_of(trace, "\"gather unit 1\"") > 0 && count_of(trace, "\"reduce unit 1\"") > 0);
    CHECK_EQ(unlink(path_in(dir, "trace")), 0);
    CHECK_EQ(run_program(SMALL "--csv /dev/null --svg /dev/null --steps 1", dir).status, 0);
    CHECK_EQ(unlink(path_in(dir, "text")) | unlink(path_in(dir, "csv")) | unlink(path_in(dir, "svg")), 0);
    CHECK_EQ(rmdir(dir), 0);
}
