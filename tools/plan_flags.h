/* The flags of plan: their names, bounds and defaults. Include dtrain.h first. */
#ifndef PLAN_FLAGS_H
#define PLAN_FLAGS_H

#include "plan_model.h"

typedef struct plan_options {
    plan_input in;
    int measure, lines, help;
    const char *csv; /* NULL: none */
} plan_options;

typedef struct plan_number {
    const char *name;
    long *whole; /* NULL: real is meant */
    double *real;
    double least, most, unit; /* of real: what 1 stands for */
} plan_number;

enum { PLAN_NUMBERS = 15, PLAN_BATCH = 65536 };

static inline void plan_numbers(plan_input *in, plan_number *numbers)
{
    const plan_number all[PLAN_NUMBERS] = {{"--layers", &in->layers, NULL, 1, 1000, 1},
                                           {"--heads", &in->heads, NULL, 1, 1000, 1},
                                           {"--width", &in->width, NULL, 1, 65536, 1},
                                           {"--context", &in->context, NULL, 1, 65536, 1},
                                           {"--vocab", &in->vocab, NULL, 1, 10000000, 1},
                                           {"--sequences", &in->sequences, NULL, 1, 1000000, 1},
                                           {"--micro", &in->micro, NULL, 1, 4096, 1},
                                           {"--ranks", &in->ranks, NULL, 1, 1024, 1},
                                           {"--chunks", &in->chunks, NULL, 2, 16, 1},
                                           {"--processors", &in->processors, NULL, 0, 65536, 1},
                                           {"--bandwidth", NULL, &in->bandwidth, 1e-6, 1e6, 1e9},
                                           {"--latency", NULL, &in->latency, 1e-3, 1e9, 1e-6},
                                           {"--memory", NULL, &in->memory, 1e-6, 1e6, 1e9},
                                           {"--rate", NULL, &in->rate, 1e-3, 1e9, 1e9},
                                           {"--copy", NULL, &in->copy_rate, 1e-3, 1e6, 1e9}};
    memcpy(numbers, all, sizeof all);
}

/* Reads a number's value; 0, or 1 with why. */
static inline int plan_read_number(const plan_number *n, const char *text, char *why, size_t size)
{
    char *end;
    double value;
    if (text == NULL || *text == 0) {
        snprintf(why, size, "flag %s: needs a value, a %snumber from %g to %g", n->name,
                 n->whole != NULL ? "whole " : "", n->least, n->most);
        return 1;
    }
    value = strtod(text, &end);
    if (*end != 0 || !(value >= n->least && value <= n->most) || (n->whole != NULL && value != (double)(long)value)) {
        snprintf(why, size, "flag %s %.40s: needs a %snumber from %g to %g", n->name, text,
                 n->whole != NULL ? "whole " : "", n->least, n->most);
        return 1;
    }
    if (n->whole != NULL)
        *n->whole = (long)value;
    else
        *n->real = value * n->unit;
    return 0;
}

/* Checks what flags say together; 0, or 1 with why. */
static inline int plan_check(const plan_input *in, char *why, size_t size)
{
    char fits[160];
    if (in->width % in->heads != 0) {
        snprintf(why, size, "flag --heads %ld: does not divide --width %ld; %s would fit", in->heads, in->width,
                 plan_divisors(in->width, in->width, fits, sizeof fits));
        return 1;
    }
    if (in->sequences % in->micro != 0) {
        snprintf(why, size, "flag --micro %ld: --sequences %ld are not so many equal micro-batches; %s would fit",
                 in->micro, in->sequences, plan_divisors(in->sequences, 4096, fits, sizeof fits));
        return 1;
    }
    if (in->sequences / in->micro > PLAN_BATCH) {
        snprintf(why, size,
                 "flag --sequences %ld: in %ld micro-batches of %ld each, where %d are the most of train_gpt",
                 in->sequences, in->micro, in->sequences / in->micro, PLAN_BATCH);
        return 1;
    }
    return 0;
}

/* What is not given, and not measured. */
static inline void plan_defaults(plan_input *in)
{
    in->rate = in->rate > 0 ? in->rate : 50e9;
    in->copy_rate = in->copy_rate > 0 ? in->copy_rate : 10e9;
    in->bandwidth = in->bandwidth > 0 ? in->bandwidth : 1e9;
    in->latency = in->latency > 0 ? in->latency : 20e-6;
}

/* Reads the flags; rates that are not given stay 0 until they are measured, or plan_defaults.
 *
 *   why       out: what is wrong with them, a line, and what would fit
 *   returns   0, or 1 with why */
static inline int plan_parse(plan_options *options, int argc, char **argv, char *why, size_t size)
{
    plan_number numbers[PLAN_NUMBERS];
    plan_input *in = &options->in;
    memset(options, 0, sizeof *options);
    in->layers = in->heads = in->ranks = 4;
    in->width = in->context = 128;
    in->vocab = 256;
    in->sequences = 64;
    in->micro = 8;
    in->chunks = 2;
    plan_numbers(in, numbers);
    for (int i = 1; i < argc; i++) {
        int k = 0;
        while (k < PLAN_NUMBERS && strcmp(argv[i], numbers[k].name) != 0)
            k++;
        if (k < PLAN_NUMBERS) {
            if (plan_read_number(&numbers[k], i + 1 < argc ? argv[i + 1] : NULL, why, size) != 0)
                return 1;
            i++;
        } else if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc)
            options->csv = argv[++i];
        else if (strcmp(argv[i], "--measure") == 0)
            options->measure = 1;
        else if (strcmp(argv[i], "--lines") == 0)
            options->lines = 1;
        else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            options->help = 1;
        else {
            snprintf(why, size, "flag %.60s: %s", argv[i],
                     strcmp(argv[i], "--csv") == 0 ? "needs the name of a file" : "is unknown; --help lists them");
            return 1;
        }
    }
    return options->help ? 0 : plan_check(in, why, size);
}

static inline int plan_help(void)
{
    puts(
        "plan estimates a step of train_gpt under every layout of ranks: memory, bytes and time.\n"
        "  --layers 4 --heads 4 --width 128 --context 128 --vocab 256   the model\n"
        "  --sequences 64   of a step, over all ranks\n"
        "  --micro 8        micro-batches that they are cut into, over all ranks, as train_gpt's\n"
        "  --ranks 4        dp x pp x tp of them: replicas, pipeline, tensor-parallel\n"
        "  --chunks 2       stages a rank of the interleaved schedule\n"
        "  --bandwidth 1    GB/s of a rank's link\n"
        "  --latency 20     us of a message\n"
        "  --memory GB      of a rank; what does not fit is marked. Any without it\n"
        "  --rate 50        GFLOP/s of a rank's matrix products\n"
        "  --copy 10        GB/s that anything else reads and writes\n"
        "  --processors N   the ranks are threads that share so many; each has its own without it\n"
        "  --measure        times products, copies and messages between threads of this machine, in place of those of\n"
        "                   the last five flags that are not given\n"
        "  --csv FILE       every layout and its parts, in bytes and seconds\n"
        "Ends with 0, with 1 when no layout fits, with 2 for a wrong call or what the system refuses.");
    return fflush(stdout) != 0 || ferror(stdout) ? 2 : 0;
}

#endif
