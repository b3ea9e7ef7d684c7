/* Steps of build/train_gpt_cuda on GPU 0: one rank, four ranks with DDP and four with FSDP. Each rank has one
 * micro-batch.
 *
 * The program runs a few times in each way, in turns. Its lines give the tokens per second up to a step. The time of a
 * step is the difference of two lines, and the figure of a run is their median, so that the slow first steps do not
 * count. Four ranks on one GPU compute as much as four steps of one rank. */
#ifndef BENCH_CUDA_TRAIN_H
#define BENCH_CUDA_TRAIN_H
#include <unistd.h>

#define TRAIN_PROGRAM "build/train_gpt_cuda"
#define TRAIN_TURNS 3
#define TRAIN_LINES 64
#define TRAIN_MODEL "--layers 3 --heads 12 --width 768 --context 512 --batch 8"
#define TRAIN_TOKENS (8.0 * 512) /* of a micro-batch */

enum { TRAIN_ONE, TRAIN_DDP, TRAIN_FSDP, TRAIN_WAYS };

typedef struct train_bench {
    const char *program, *model;        /* model: the flags of its sizes */
    double tokens;                      /* of a micro-batch */
    double ms[TRAIN_WAYS][TRAIN_TURNS]; /* of a step */
    char why[512];                      /* why there are no figures; empty: there are */
} train_bench;

static const char *const train_flags[TRAIN_WAYS] = {"--ranks 1 --micro 1", "--ranks 4 --micro 4",
                                                    "--ranks 4 --micro 4 --strategy full"};

/* Reads "step 8/16 loss ... 12345 tokens/s ..."; *ms is the time since the first step. Returns 0 for another line. */
static int train_line(const char *line, double tokens_of_step, long *step, double *ms)
{
    double loss, lr, norm, rate;
    if (sscanf(line, "step %ld/%*d loss %lf lr %lf norm %lf %lf tokens/s", step, &loss, &lr, &norm, &rate) != 5 ||
        rate <= 0)
        return 0;
    *ms = (double)*step * tokens_of_step / rate * 1e3;
    return 1;
}

/* Runs the program once and returns the ms of a step. Returns 0 if it failed; t->why then holds its last line. */
static double train_run(train_bench *t, int way)
{
    char command[1024], line[512];
    double steps_ms[TRAIN_LINES], last_ms = 0, ms;
    long last = 0, step;
    int count = 0;
    snprintf(command, sizeof command, "%s %s %s --gpus 1 --steps 16 --csv /dev/null --svg /dev/null 2>&1", t->program,
             t->model, train_flags[way]);
    FILE *out = popen(command, "r");
    while (out != NULL && fgets(line, sizeof line, out) != NULL) {
        line[strcspn(line, "\n")] = 0;
        snprintf(t->why, sizeof t->why, "%s", line);
        if (!train_line(line, t->tokens * (way == TRAIN_ONE ? 1 : 4), &step, &ms))
            continue;
        if (last > 0 && count < TRAIN_LINES)
            steps_ms[count++] = (ms - last_ms) / (double)(step - last);
        last = step;
        last_ms = ms;
    }
    if (out == NULL || pclose(out) != 0 || count == 0)
        return 0;
    t->why[0] = 0;
    return ranks_median(steps_ms, count);
}

static void train_measure(train_bench *t)
{
    for (int turn = 0; turn < TRAIN_TURNS; turn++)
        for (int way = 0; way < TRAIN_WAYS; way++) {
            t->ms[way][turn] = train_run(t, way);
            if (t->why[0] != 0)
                return;
        }
}

/* Prints a line: the ms of a step in one way, beside `steps` steps in another. It may take `limit` times as long. */
static void train_print(const char *name, const train_bench *t, int way, int other, int steps, double limit)
{
    double ratios[TRAIN_TURNS], ms[TRAIN_TURNS], other_ms[TRAIN_TURNS];
    for (int i = 0; i < TRAIN_TURNS; i++) {
        ms[i] = t->ms[way][i];
        other_ms[i] = t->ms[other][i] * steps;
        ratios[i] = ms[i] / other_ms[i];
    }
    double ratio = ranks_median(ratios, TRAIN_TURNS);
    printf("op=%s ms=%.3f against_ms=%.3f times=%.3f limit=%.2f %s\n", name, ranks_median(ms, TRAIN_TURNS),
           ranks_median(other_ms, TRAIN_TURNS), ratio, limit, ratio <= limit ? "ok" : "MISSED");
}

/* Prints the lines of ddp and fsdp that are wanted. Returns 1 if the program failed. */
static int train_lines(train_bench *t, int ddp, int fsdp)
{
    if (!ddp && !fsdp)
        return 0;
    if (access(t->program, X_OK) != 0) {
        printf("op=ddp_4, fsdp_4 skipped: there is no %s; make cuda builds it if the toolkit has cuBLAS\n",
               t->program);
        return 0;
    }
    train_measure(t);
    if (t->why[0] != 0) {
        printf("op=ddp_4, fsdp_4 FAILED: %s\n", t->why);
        return 1;
    }
    if (ddp)
        train_print("ddp_4", t, TRAIN_DDP, TRAIN_ONE, 4, 1.1);
    if (fsdp)
        train_print("fsdp_4", t, TRAIN_FSDP, TRAIN_DDP, 1, 1.25);
    return 0;
}

#endif
