/* The flags of plan: their names, bounds and defaults. Include dtrain.h first. */
#ifndef PLAN_FLAGS_H
#define PLAN_FLAGS_H

#include "plan_model.h"
#include "tool.h"

typedef struct plan_options {
    plan_input in;
    int measure, lines, help;
    const char *csv; /* NULL: no file */
} plan_options;

typedef struct plan_number {
    const char *name;
    long *whole; /* where a whole number goes; NULL: the flag takes a real number */
    double *real;
    double least, most, unit; /* unit: the value in bytes, seconds or operations that 1 stands for */
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

/* Reads the value of a flag; returns 0, or 1 with why. */
static inline int plan_read_number(const plan_number *n, const char *text, char *why, size_t size)
{
    uint64_t whole = 0;
    double real = 0;
    if (text == NULL || !(n->whole != NULL ? tool_whole(text, (uint64_t)n->least, (uint64_t)n->most, &whole)
                                           : tool_real(text, n->least, n->most, &real))) {
        snprintf(why, size, "%s%s%.40s: a %snumber from %.10g to %.10g is expected", n->name, text != NULL ? " " : "",
                 text != NULL ? text : "", n->whole != NULL ? "whole " : "", n->least, n->most);
        return 1;
    }
    if (n->whole != NULL)
        *n->whole = (long)whole;
    else
        *n->real = real * n->unit;
    return 0;
}

/* Checks the flags together; returns 0, or 1 with why. */
static inline int plan_check(const plan_input *in, char *why, size_t size)
{
    char fits[160];
    if (in->width % in->heads != 0) {
        snprintf(why, size, "--heads %ld: --width %ld is not a multiple of it; %s would fit", in->heads, in->width,
                 plan_divisors(in->width, in->width, fits, sizeof fits));
        return 1;
    }
    if (in->sequences % in->micro != 0) {
        snprintf(why, size, "--micro %ld: --sequences %ld is not a multiple of it; %s would fit", in->micro,
                 in->sequences, plan_divisors(in->sequences, 4096, fits, sizeof fits));
        return 1;
    }
    if (in->sequences / in->micro > PLAN_BATCH) {
        snprintf(why, size,
                 "--sequences %ld: a micro-batch has %ld of them, and train_gpt takes at most %d; use a larger --micro",
                 in->sequences, in->sequences / in->micro, PLAN_BATCH);
        return 1;
    }
    return 0;
}

/* Sets the rates that are neither given nor measured. */
static inline void plan_defaults(plan_input *in)
{
    in->rate = in->rate > 0 ? in->rate : 50e9;
    in->copy_rate = in->copy_rate > 0 ? in->copy_rate : 10e9;
    in->bandwidth = in->bandwidth > 0 ? in->bandwidth : 1e9;
    in->latency = in->latency > 0 ? in->latency : 20e-6;
}

/* Reads the flags. Rates that are not given stay 0: plan_measure or plan_defaults sets them.
 *
 *   why       out: the flag that is wrong, and what would fit, in one line
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
            snprintf(why, size, "%.60s: %s", argv[i],
                     strcmp(argv[i], "--csv") == 0 ? "the name of a file is expected after it"
                                                   : "there is no such flag");
            return 1;
        }
    }
    return options->help ? 0 : plan_check(in, why, size);
}

/* Prints the help; returns the exit status. */
static inline int plan_help(void)
{
    return tool_help(
        "usage: plan [flags]\n"
        "Estimates a step of train_gpt under every layout of ranks: memory, bytes, time.\n"
        "  --layers 4 --heads 4 --width 128 --context 128 --vocab 256   the model\n"
        "  --sequences 64  sequences of a step, over all ranks\n"
        "  --micro 8       micro-batches of a step, over all ranks\n"
        "  --ranks 4       data-parallel x pipeline x tensor-parallel ranks; at most 1024\n"
        "  --chunks 2      stages that a rank has with the interleaved schedule\n"
        "  --memory GB     memory of a rank; without it any layout fits\n"
        "  --processors N  ranks are threads on N processors; without it each has its own\n"
        "  --bandwidth 1   GB/s of a rank's link\n"
        "  --latency 20    us of a message\n"
        "  --rate 50       GFLOP/s of a rank's matrix products\n"
        "  --copy 10       GB/s that a rank reads and writes outside of products\n"
        "  --measure       measures the five above on this machine, except those given\n"
        "  --csv FILE      writes every layout in bytes and seconds\n"
        "  --lines         prints one key=value line for each layout instead of a table\n"
        "  --help          prints this text\n"
        "Exit status: 0; 1 if no layout fits; 2 for a wrong command line or an error of\n"
        "the system.\n"
        "  plan --layers 24 --heads 16 --width 2048 --context 1024 --sequences 256 \\\n"
        "       --micro 64 --ranks 16 --bandwidth 12 --memory 24\n"
        "  plan --layers 8 --width 512 --ranks 4 --measure\n");
}

#endif
