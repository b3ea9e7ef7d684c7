/* The flags of train_gpt, of which train_gpt_cuda has some: their names, their bounds, what they are when they are not
 * given. Define REPORT_PROGRAM, and include dtrain.h first. */
#ifndef GPT_FLAGS_H
#define GPT_FLAGS_H

#include "report.h"

typedef struct gpt_flags {
    long layers, heads, width, context, batch, micro, accum, steps, seed, ranks, shard_size, every, until, local_steps,
        outer_warmup, chunks, vocab, token_bits;
    long positions;   /* that have an embedding, of which --context are used; 0: as many */
    long token_bytes; /* of --tokens, or 1 */
    double lr, clip, outer_momentum;
    const char *optimizer, *strategy, *gather, *text, *csv, *svg, *trace, *save, *aggregator, *compress, *mesh,
        *schedule, *tokens, *open_model, *export_model;
    dtrain_compress_desc compression; /* what --compress says */
    int dense_embeddings;             /* and whether these travel as they are */
    int quiet, resume, sequence, recompute, tied;
    int mesh_sizes[3]; /* what --mesh says: data, pipeline and tensor parallel */
} gpt_flags;

static inline int gpt_number(const char *flag, const char *text, double least, double most, double *value)
{
    char *end;
    if (text == NULL)
        return report_complain("flag", flag, "needs a value");
    *value = strtod(text, &end);
    if (end == text || *end != 0 || !(*value >= least && *value <= most)) {
        fprintf(stderr, REPORT_PROGRAM ": flag %s %s: needs a number from %g to %g\n", flag, text, least, most);
        return 1;
    }
    return 0;
}

/* Whether gradients go through an aggregator: with --local-steps none do, and it says how rounds go. */
static inline int gpt_aggregates(const gpt_flags *f)
{
    return f->aggregator != NULL && f->local_steps == 0;
}

/* Whether what a step sends is told: where it is not what a formula says. */
static inline int gpt_counts(const gpt_flags *f)
{
    return f->compress != NULL || (gpt_aggregates(f) && strcmp(f->aggregator, "ps") == 0);
}

/* After how many steps this run ends. */
static inline long gpt_end_step(const gpt_flags *f)
{
    return f->until > 0 && f->until < f->steps ? f->until : f->steps;
}

/* Finds a word among those that a flag can have. */
static inline int gpt_choice(const char *flag, const char *word, const char *const *words)
{
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(word, words[i]) == 0)
            return 0;
    fprintf(stderr, REPORT_PROGRAM ": %s %s: is unknown; possible are", flag, word);
    for (int i = 0; words[i] != NULL; i++)
        fprintf(stderr, "%s %s", i > 0 ? "," : "", words[i]);
    fputc('\n', stderr);
    return 1;
}

/* Reads what follows a kind of --compress and its number, in any order, each after a colon. */
static inline int gpt_read_options(gpt_flags *f, const char *text)
{
    dtrain_compress_desc *desc = &f->compression;
    for (size_t length; *text == ':'; text += 1 + length) {
        const char *value = strchr(text, '=');
        char *end = NULL;
        length = strcspn(text + 1, ":");
        unsigned long number = value != NULL && value[1] >= '1' && value[1] <= '9' ? strtoul(value + 1, &end, 10) : 0;
        int whole = number > 0 && number <= 1000000000 && end == text + 1 + length;
        if (length == 10 && strncmp(text + 1, "nofeedback", length) == 0)
            desc->feedback.no_feedback = 1;
        else if (length == 5 && strncmp(text + 1, "dense", length) == 0)
            f->dense_embeddings = 1;
        else if (length == 4 && strncmp(text + 1, "adam", length) == 0)
            desc->adam = 1;
        else if (whole && strncmp(text, ":start=", 7) == 0)
            desc->feedback.start_step = number;
        else if (whole && strncmp(text, ":stage=", 7) == 0 && desc->kind == DTRAIN_COMPRESS_TOPK)
            desc->topk.schedule.stage_steps = number;
        else
            break;
    }
    return *text == 0 ? 0
                      : report_complain("--compress", f->compress,
                                        "ends in what is unknown; :nofeedback, :dense, :start=N, :adam and of topk "
                                        ":stage=N may follow, N from 1 to 1e9");
}

/* Reads --compress: a kind, of top-k its ratio and of PowerSGD its rank, and options. Top-k with feedback takes SGD's
 * momentum over, as a velocity of each rank's (momentum correction). */
static inline int gpt_read_compression(gpt_flags *f)
{
    static const struct {
        const char *name;
        dtrain_compression kind;
        double number, least, most; /* 0: it has none */
    } kinds[] = {{"topk", DTRAIN_COMPRESS_TOPK, 0.01, 1e-9, 1},   {"int8", DTRAIN_COMPRESS_INT8, 0, 0, 0},
                 {"fp8", DTRAIN_COMPRESS_FP8, 0, 0, 0},           {"bf16", DTRAIN_COMPRESS_BF16, 0, 0, 0},
                 {"f16", DTRAIN_COMPRESS_F16, 0, 0, 0},           {"sign", DTRAIN_COMPRESS_SIGN, 0, 0, 0},
                 {"powersgd", DTRAIN_COMPRESS_POWERSGD, 4, 1, 64}};
    const char *text = f->compress;
    size_t length = strcspn(text, ":"), i = 0, count = sizeof kinds / sizeof kinds[0];
    dtrain_compress_desc *desc = &f->compression;
    while (i < count && (strlen(kinds[i].name) != length || strncmp(kinds[i].name, text, length) != 0))
        i++;
    if (i == count)
        return report_complain("--compress", text,
                               "is unknown; possible are topk:0.01, int8, fp8, bf16, f16, sign and "
                               "powersgd:4, with options after it");
    double number = kinds[i].number;
    char *end = NULL;
    text += length;
    if (*text == ':' && kinds[i].most > 0 && !(text[1] >= 'a' && text[1] <= 'z')) {
        number = strtod(text + 1, &end);
        if (end == text + 1 || !(number >= kinds[i].least && number <= kinds[i].most))
            return report_complain("--compress", f->compress, "needs a ratio above 0 and at most 1, or a rank to 64");
        text = end;
    }
    desc->kind = kinds[i].kind;
    desc->topk.schedule.ratio = desc->kind == DTRAIN_COMPRESS_TOPK ? number : 0;
    desc->rank = desc->kind == DTRAIN_COMPRESS_POWERSGD ? (int)number : 0;
    if (gpt_read_options(f, text) != 0)
        return 1;
    if (desc->kind == DTRAIN_COMPRESS_TOPK && !desc->feedback.no_feedback && strcmp(f->optimizer, "sgd") == 0 &&
        (f->aggregator == NULL || strcmp(f->aggregator, "ps") != 0))
        desc->feedback.momentum = 0.9f;
    if (f->dense_embeddings && (f->aggregator != NULL || f->local_steps > 0))
        return report_complain("--compress", f->compress,
                               "has :dense, which goes with no --aggregator or --local-steps");
    if (f->local_steps > 0 && (desc->kind == DTRAIN_COMPRESS_TOPK || desc->rank > 0))
        return report_complain("--compress", f->compress,
                               "does not go with --local-steps, whose rounds go as int8, fp8, bf16, f16 or sign");
    if (strcmp(f->strategy, "ddp") == 0 || (strcmp(f->strategy, "hybrid") == 0 && desc->rank == 0))
        return 0;
    return report_complain("--compress", f->compress, "needs --strategy ddp, or hybrid where it is not powersgd");
}

/* Reads --mesh: names with sizes, in any order; one that is not there is 1. */
static inline int gpt_read_mesh(gpt_flags *f)
{
    static const char *const names[] = {"dp=", "pp=", "tp="};
    for (int i = 0; i < 3; i++)
        f->mesh_sizes[i] = 0;
    for (const char *at = f->mesh; f->mesh != NULL && *at != 0;) {
        char *end = NULL;
        int which = 0;
        while (which < 3 && strncmp(at, names[which], 3) != 0)
            which++;
        long size = which < 3 ? strtol(at + 3, &end, 10) : 0;
        if (which == 3 || end == at + 3 || size < 1 || size > 1024 || f->mesh_sizes[which] > 0 ||
            (*end != 0 && (*end != ',' || end[1] == 0)))
            return report_complain(
                "--mesh", f->mesh,
                "needs sizes from 1 to 1024, each once, as in dp=2,pp=2,tp=2; what is left out is 1");
        f->mesh_sizes[which] = (int)size;
        at = *end == ',' ? end + 1 : end;
    }
    for (int i = 0; i < 3; i++)
        f->mesh_sizes[i] = f->mesh_sizes[i] > 0 ? f->mesh_sizes[i] : 1;
    return 0;
}

/* What does not go with --mesh, or without it. */
static inline int gpt_check_mesh(gpt_flags *f)
{
    static const char *const schedules[] = {"gpipe", "1f1b", "interleaved", "zb", NULL};
    int interleaved = strcmp(f->schedule, "interleaved") == 0;
    if (gpt_choice("--schedule", f->schedule, schedules) || gpt_read_mesh(f))
        return 1;
    if (f->mesh == NULL && (f->sequence || f->recompute || f->chunks > 0 || strcmp(f->schedule, "1f1b") != 0))
        return report_complain("flag", "--schedule, --chunks, --sequence or --recompute", "needs --mesh");
    if (f->mesh != NULL && (f->aggregator != NULL || f->local_steps > 0 || f->trace != NULL || f->compress != NULL))
        return report_complain("flag", "--mesh", "goes with no --aggregator, --local-steps, --compress or --trace");
    if (f->chunks > 0 && !interleaved)
        return report_complain("flag", "--chunks", "needs --schedule interleaved");
    if (f->recompute && strcmp(f->schedule, "zb") == 0)
        return report_complain("flag", "--recompute",
                               "does not go with --schedule zb, which keeps gradients for later");
    f->chunks = f->chunks > 0 ? f->chunks : interleaved ? 2 : 1;
    return 0;
}

/* What --open, --export, --tokens and --tied go with. */
static inline int gpt_check_model(gpt_flags *f)
{
    if (f->mesh != NULL && (f->open_model != NULL || f->export_model != NULL || f->tied))
        return report_complain("flag", "--mesh", "goes with no --open, --export or --tied");
    if (f->token_bits != 16 && f->token_bits != 32)
        return report_complain("flag", "--token-bits", "is 16 or 32");
    f->token_bytes = f->tokens != NULL ? f->token_bits / 8 : 1;
    return 0;
}

static inline int gpt_check_flags(gpt_flags *f)
{
    static const char *const optimizers[] = {"adamw", "sgd", NULL}, *const gathers[] = {"bf16", "f16", "f32", NULL};
    static const char *const strategies[] = {"full", "grad", "ddp", "hybrid", NULL};
    static const char *const aggregators[] = {"all-reduce", "ps", NULL};
    if (f->resume && f->save == NULL)
        return report_complain("flag", "--resume", "needs --save DIR, where the checkpoint is");
    if (f->aggregator != NULL && strcmp(f->strategy, "ddp") != 0)
        return report_complain("flag", "--aggregator", "needs --strategy ddp");
    if (f->local_steps > 0 && (strcmp(f->strategy, "ddp") != 0 || strcmp(f->gather, "f32") != 0))
        return report_complain("flag", "--local-steps", "needs --strategy ddp and --gather f32");
    if (gpt_check_mesh(f) || gpt_check_model(f))
        return 1;
    if (f->width % f->heads != 0)
        return report_complain("flag", "--width", "must be a multiple of --heads");
    return gpt_choice("--optimizer", f->optimizer, optimizers) || gpt_choice("--strategy", f->strategy, strategies) ||
           gpt_choice("--gather", f->gather, gathers) ||
           (f->aggregator != NULL && gpt_choice("--aggregator", f->aggregator, aggregators)) ||
           (f->compress != NULL && gpt_read_compression(f));
}

/* Reads a flag that has a number; returns whether it is one. *bad: whether a complaint says what the number must be. */
static inline int gpt_parse_number(gpt_flags *f, const char *flag, const char *text, int *bad)
{
    const struct {
        const char *name;
        long *whole; /* NULL: real */
        double *real, least, most;
    } numbers[] = {{"--layers", &f->layers, NULL, 1, 1000},
                   {"--heads", &f->heads, NULL, 1, 1000},
                   {"--width", &f->width, NULL, 1, 65536},
                   {"--context", &f->context, NULL, 1, 65536},
                   {"--batch", &f->batch, NULL, 1, 65536},
                   {"--micro", &f->micro, NULL, 1, 65536},
                   {"--accum", &f->accum, NULL, 1, 1024},
                   {"--steps", &f->steps, NULL, 1, 1e9},
                   {"--seed", &f->seed, NULL, 0, 4e9},
                   {"--ranks", &f->ranks, NULL, 1, 1024},
                   {"--shard-size", &f->shard_size, NULL, 1, 65536},
                   {"--every", &f->every, NULL, 1, 1e9},
                   {"--until", &f->until, NULL, 1, 1e9},
                   {"--local-steps", &f->local_steps, NULL, 1, 1e9},
                   {"--outer-warmup", &f->outer_warmup, NULL, 0, 1e9},
                   {"--chunks", &f->chunks, NULL, 2, 16},
                   {"--vocab", &f->vocab, NULL, 1, 1 << 24},
                   {"--token-bits", &f->token_bits, NULL, 16, 32},
                   {"--lr", NULL, &f->lr, 0, 1000},
                   {"--clip", NULL, &f->clip, 0, 1000},
                   {"--outer-momentum", NULL, &f->outer_momentum, 0, 0.999}};
    size_t count = sizeof numbers / sizeof numbers[0], k = 0;
    double value = 0;
    while (k < count && strcmp(flag, numbers[k].name) != 0)
        k++;
    if (k == count)
        return 0;
    *bad = gpt_number(flag, text, numbers[k].least, numbers[k].most, &value);
    if (!*bad && numbers[k].whole != NULL && value != (double)(long)value)
        *bad = report_complain("flag", flag, "needs a whole number");
    if (!*bad && numbers[k].whole != NULL)
        *numbers[k].whole = (long)value;
    else if (!*bad)
        *numbers[k].real = value;
    return 1;
}

static inline int gpt_parse(gpt_flags *f, int argc, char **argv)
{
    const struct {
        const char *name, **value;
    } texts[] = {{"--optimizer", &f->optimizer}, {"--strategy", &f->strategy}, {"--gather", &f->gather},
                 {"--text", &f->text},           {"--csv", &f->csv},           {"--svg", &f->svg},
                 {"--trace", &f->trace},         {"--save", &f->save},         {"--aggregator", &f->aggregator},
                 {"--compress", &f->compress},   {"--mesh", &f->mesh},         {"--schedule", &f->schedule},
                 {"--tokens", &f->tokens},       {"--open", &f->open_model},   {"--export", &f->export_model}};
    const struct {
        const char *name;
        int *value;
    } switches[] = {{"--quiet", &f->quiet},
                    {"--resume", &f->resume},
                    {"--sequence", &f->sequence},
                    {"--recompute", &f->recompute},
                    {"--tied", &f->tied}};
    size_t text_count = sizeof texts / sizeof texts[0], switch_count = sizeof switches / sizeof switches[0];
    for (int i = 1; i < argc; i++) {
        size_t k = 0;
        int bad = 0;
        if (gpt_parse_number(f, argv[i], argv[i + 1], &bad)) {
            if (bad)
                return 1;
            i++;
            continue;
        }
        while (k < text_count && strcmp(argv[i], texts[k].name) != 0)
            k++;
        if (k < text_count && argv[i + 1] == NULL)
            return report_complain("flag", argv[i], "needs a value");
        if (k < text_count) {
            *texts[k].value = argv[++i];
            continue;
        }
        for (k = 0; k < switch_count && strcmp(argv[i], switches[k].name) != 0; k++)
            continue;
        if (k == switch_count)
            return report_complain("flag", argv[i], "is unknown; --help lists them");
        *switches[k].value = 1;
    }
    return gpt_check_flags(f);
}

static inline gpt_flags gpt_defaults(void)
{
    gpt_flags f;
    memset(&f, 0, sizeof f);
    f.layers = f.heads = 4;
    f.width = f.context = 128;
    f.batch = 8;
    f.shard_size = 2;
    f.steps = 100;
    f.every = 50;
    f.lr = 1e-3;
    f.clip = 1;
    f.outer_momentum = 0.8;
    f.outer_warmup = 2;
    f.seed = f.ranks = 1;
    f.optimizer = "adamw";
    f.strategy = "ddp";
    f.gather = "f32";
    f.schedule = "1f1b";
    f.vocab = 256; /* of bytes */
    f.token_bits = 16;
    f.token_bytes = 1;
    f.text = "dtrain.h";
    f.csv = "build/train_gpt.csv";
    f.svg = "build/train_gpt.svg";
    return f;
}

/* Prints what the program is, and the flags that both programs have. */
static inline void gpt_help_alike(const char *program)
{
    puts(program);
    puts("\n"
         "  --layers 4 --heads 4 --width 128 --context 128   the model\n"
         "  --batch 8        sequences a micro-batch\n"
         "  --micro 8        micro-batches a step, over all ranks together\n"
         "  --accum N        or: micro-batches a rank and step\n"
         "  --steps 100 --lr 1e-3 --clip 1 --optimizer adamw|sgd --seed 1\n"
         "  --strategy ddp|grad|full|hybrid   what ranks keep a part of: nothing;\n"
         "                   gradients and optimizer state; parameters as well; these\n"
         "                   among every --shard-size 2 ranks\n"
         "  --gather f32|bf16|f16   how parameters travel\n"
         "  --ranks 1        threads that share the work\n"
         "  --text dtrain.h  what to learn; its last tenth is held out\n"
         "  --save DIR --every 50   checkpoints in DIR, each so many steps and at the\n"
         "                   end; two are kept\n"
         "  --resume         goes on from the newest in DIR, on any number of ranks, with\n"
         "                   any strategy; but on as many where each keeps something of\n"
         "                   its own, as with --compress\n"
         "  --until N        stops after step N of --steps\n"
         "  --quiet          only the result");
}

static inline int gpt_help(void)
{
    gpt_help_alike("train_gpt trains a byte-level GPT on threads, or on the processes that a\n"
                   "launcher such as dtrun starts.\n\n"
                   "  train_gpt --ranks 4 --strategy full --save run\n"
                   "  train_gpt --ranks 4 --text novel.txt --steps 2000 --layers 6 --width 256\n"
                   "  dtrun -n 4 train_gpt --mesh dp=2,pp=2 --micro 16");
    puts("  --csv build/train_gpt.csv --svg build/train_gpt.svg   the loss of each step\n"
         "  --compress topk:0.01|int8|fp8|bf16|f16|sign|powersgd:4   how gradients travel;\n"
         "                   as they are without it. Under --optimizer sgd, top-k with\n"
         "                   feedback takes the momentum of 0.9 over. Options may follow,\n"
         "                   as in topk:0.01:stage=25:dense. :nofeedback forgets what is\n"
         "                   not sent. :start=N sends the first N steps as they are,\n"
         "                   :dense the embeddings of all steps. :adam with :start=N sends\n"
         "                   AdamW's momenta after these, and v stays as it is then (1-bit\n"
         "                   Adam). :stage=N lets top-k begin with a ratio of 0.25, and\n"
         "                   multiplies it by 0.25 every N steps until it is the one given\n"
         "  --aggregator all-reduce|ps   gradients in full, once a step, through one of\n"
         "                   dtrain's aggregators: ps is a parameter server on rank 0,\n"
         "                   through which rounds of --local-steps go as well\n"
         "  --local-steps H  each rank trains by itself; all average every H steps\n"
         "                   (DiLoCo), with an outer --outer-momentum 0.8, of which the\n"
         "                   first --outer-warmup 2 rounds have none\n"
         "  --mesh dp=2,pp=2,tp=2   ranks as data parallel x stages of a pipeline x parts\n"
         "                   of each layer; the strategy is over the first. No sample is\n"
         "                   printed\n"
         "  --schedule 1f1b|gpipe|interleaved|zb   order of a pipeline's micro-batches;\n"
         "                   --chunks 2 a rank, interleaved\n"
         "  --sequence       splits by rows what tensor parallelism leaves whole\n"
         "  --recompute      blocks keep their input alone, and run twice\n"
         "  --tokens FILE    instead of --text: token ids, little-endian, of --token-bits\n"
         "                   16 or 32 each, below --vocab 256\n"
         "  --open DIR       begins with a GPT-2 in the layout of Hugging Face,\n"
         "                   config.json and safetensors; the model's sizes and its\n"
         "                   vocabulary are those of config.json\n"
         "  --export DIR     writes the trained model in that layout, which transformers'\n"
         "                   GPT2LMHeadModel reads\n"
         "  --tied           the output layer is the embedding\n"
         "  --trace FILE     when rank 0 computed, gathered, reduced and waited, for\n"
         "                   Perfetto");
    return 0;
}

#endif
