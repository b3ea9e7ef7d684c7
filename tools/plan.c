/* Estimates a step of train_gpt under every layout of its ranks, and names the fastest layout that fits. For each
 * layout it prints the memory that a rank needs, the bytes that it sends and the time of a step.
 *
 * cc -O2 -ffp-contract=off -I. tools/plan.c -o build/plan -lpthread -lm
 * build/plan --layers 24 --heads 16 --width 2048 --context 1024 --sequences 256 --micro 64 --ranks 16 --bandwidth 12
 * build/plan --layers 8 --width 512 --ranks 4 --measure
 *
 * The layouts are all products dp x pp x tp that make up the ranks. With dp > 1 each has FSDP's strategies ddp, grad
 * and full; with pp > 1 it has the schedules gpipe, 1f1b, interleaved and zb. The layouts that the model does not allow
 * come last, each with the reason and the sizes that would fit. tools/plan_model.h says how memory, bytes and time are
 * found. In the table a step is the sum of compute, bubble, tp, pp and dp. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#define REPORT_PROGRAM "plan"
#include "examples/report.h"
#include "plan_flags.h"
#include "plan_measure.h"

static int plan_complain(const char *what)
{
    progress_end();
    fflush(stdout);
    fprintf(stderr, "plan: %s\n", what);
    return 2;
}

static void plan_print_input(const plan_input *in, int measured)
{
    printf("%ld layers, %ld heads, width %ld, context %ld, vocab %ld\n", in->layers, in->heads, in->width, in->context,
           in->vocab);
    printf("%ld sequences a step in %ld micro-batches of %ld; %ld ranks\n", in->sequences, in->micro,
           in->sequences / in->micro, in->ranks);
    printf("%s: %.4g GFLOP/s, %.4g GB/s copied, %.4g GB/s and %.4g us a link", measured ? "measured" : "given",
           in->rate * 1e-9, in->copy_rate * 1e-9, in->bandwidth * 1e-9, in->latency * 1e6);
    if (in->processors > 0)
        printf(",\n%ld processors for all", in->processors);
    if (in->memory > 0)
        printf(";\n%.4g GB of memory a rank", in->memory * 1e-9);
    printf("\n\n%37s%9s%9s   %s\n", "MB of", "MB", "ms", "% of the step");
    printf("%4s%4s%4s  %-6s%-11s%7s%8s%9s  %5s%5s%4s%4s%4s\n", "dp", "pp", "tp", "", "schedule", "memory", "sent",
           "a step", "comp", "idle", "tp", "pp", "dp");
}

static void plan_print_result(const plan_result *r)
{
    const double parts[5] = {r->compute, r->bubble, r->tp, r->pp, r->dp};
    printf("%4d%4d%4d  %-6s%-11s%7.0f%c%8.1f%9.2f ", r->layout.dp, r->layout.pp, r->layout.tp,
           plan_strategy_name(&r->layout), r->layout.pp > 1 ? plan_schedule_name(&r->layout) : "-",
           r->memory.all * 1e-6, r->fits ? ' ' : '!', r->sent * 1e-6, r->step * 1e3);
    for (int i = 0; i < 5; i++)
        printf(i < 2 ? "%5.0f" : "%4.0f", r->step > 0 ? 100 * parts[i] / r->step : 0);
    puts("");
}

/* Prints a line for each layout that the model does not allow. Layouts that differ only in schedule or strategy and
 * have the same reason share a line. */
static void plan_print_left_out(const plan_result *results, size_t count)
{
    const plan_result *before = NULL;
    for (size_t i = 0; i < count; i++) {
        const plan_layout *l = &results[i].layout;
        if (results[i].why[0] == 0)
            continue;
        if (before == NULL || before->layout.dp != l->dp || before->layout.pp != l->pp || before->layout.tp != l->tp ||
            strcmp(before->why, results[i].why) != 0)
            printf("left out: dp=%d,pp=%d,tp=%d%s: %s\n", l->dp, l->pp, l->tp, l->chunks > 1 ? " interleaved" : "",
                   results[i].why);
        before = &results[i];
    }
}

/* Prints the best layout, or why there is none. */
static void plan_print_verdict(const plan_input *in, const plan_result *results, size_t count)
{
    const plan_result *least, *best = plan_best(results, count, &least);
    char flags[200];
    if (best != NULL) {
        printf("best: train_gpt --layers %ld --heads %ld --width %ld --context %ld --batch %ld %s", in->layers,
               in->heads, in->width, in->context, in->sequences / in->micro,
               plan_flags(in, &best->layout, flags, sizeof flags));
        if (in->processors > 0) /* ranks are threads; else a launcher starts the processes */
            printf(" --ranks %ld", in->ranks);
        printf("%s\n", in->vocab != 256 ? " (whose own vocab is 256)" : "");
        return;
    }
    if (least == NULL) {
        printf("no layout: the model allows none of %ld ranks, see above\n", in->ranks);
        return;
    }
    printf("no layout fits in %.4g GB a rank: the least is %.4g GB (weights %.4g, gradients %.4g, optimizer %.4g, "
           "activations %.4g) with %s; more ranks%s need less\n",
           in->memory * 1e-9, least->memory.all * 1e-9, least->memory.weights * 1e-9, least->memory.gradients * 1e-9,
           least->memory.optimizer * 1e-9, least->memory.activations * 1e-9,
           plan_flags(in, &least->layout, flags, sizeof flags),
           in->sequences > in->micro ? ", or more and smaller micro-batches," : "");
}

static void plan_print_table(const plan_options *options, const plan_result *results, size_t count)
{
    int unfit = 0;
    plan_print_input(&options->in, options->measure);
    for (size_t i = 0; i < count && results[i].why[0] == 0; i++) {
        plan_print_result(&results[i]);
        unfit += !results[i].fits;
    }
    puts("\ncomp: computing; idle: the pipeline's bubble; tp, pp, dp: communicating");
    if (unfit > 0)
        puts("!: needs more than the memory of a rank");
    plan_print_left_out(results, count);
    plan_print_verdict(&options->in, results, count);
}

static void plan_print_lines(const plan_result *results, size_t count)
{
    char line[500];
    for (size_t i = 0; i < count && results[i].why[0] == 0; i++)
        puts(plan_line(&results[i], line, sizeof line));
}

static void plan_write_csv(FILE *file, const plan_result *results, size_t count)
{
    fprintf(file, "dp,pp,tp,strategy,schedule,chunks,fits,live,weights,gradients,optimizer,activations,other,memory,"
                  "sent_tp,sent_pp,sent_dp,sent,step_s,compute_s,bubble_s,tp_s,pp_s,dp_s,tp_hidden_s,dp_hidden_s,"
                  "bubble_share,left_out\n");
    for (size_t i = 0; i < count; i++) {
        const plan_result *r = &results[i];
        const plan_memory *m = &r->memory;
        fprintf(file, "%d,%d,%d,%s,%s,%d,", r->layout.dp, r->layout.pp, r->layout.tp, plan_strategy_name(&r->layout),
                plan_schedule_name(&r->layout), r->layout.chunks);
        if (r->why[0] != 0)
            fprintf(file, "0,,,,,,,,,,,,,,,,,,,,,\"%s\"\n", r->why);
        else
            fprintf(file,
                    "%d,%d,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,"
                    "%.9g,%.9g,%.6f,\n",
                    r->fits, r->live, m->weights, m->gradients, m->optimizer, m->activations, m->other, m->all,
                    r->sent_tp, r->sent_pp, r->sent_dp, r->sent, r->step, r->compute, r->bubble, r->tp, r->pp, r->dp,
                    r->tp_hidden, r->dp_hidden, r->bubble_share);
    }
}

/* Prints all layouts; returns the exit status. */
static int plan_print(const plan_options *options, const plan_result *results, size_t count, report_file *csv)
{
    const plan_result *least;
    int code = plan_best(results, count, &least) == NULL;
    if (options->lines)
        plan_print_lines(results, count);
    else
        plan_print_table(options, results, count);
    if (csv->file != NULL) {
        plan_write_csv(csv->file, results, count);
        if (report_close(csv) != 0)
            return 2;
    }
    return fflush(stdout) != 0 || ferror(stdout) ? plan_complain("writing the output failed; is the disk full?") : code;
}

int main(int argc, char **argv)
{
    plan_options options;
    plan_result *results = NULL;
    report_file csv;
    size_t count;
    char why[400];
    int code = 2;
    utf8_arguments(argc, argv);
    memset(&csv, 0, sizeof csv);
    if (plan_parse(&options, argc, argv, why, sizeof why) != 0) {
        fprintf(stderr, "plan: %s; see plan --help\n", why);
        return TOOL_WRONG;
    }
    if (options.help)
        return plan_help();
    if (options.csv != NULL && report_open(&csv, options.csv) != 0)
        return 2;
    progress_begin("plan", 0);
    dtrain_status status = options.measure ? plan_measure(&options.in) : DTRAIN_OK;
    plan_defaults(&options.in);
    progress_begin("plan", 500);
    if (status == DTRAIN_OK)
        status = plan_all(&options.in, &results, &count);
    progress_end();
    if (status == DTRAIN_OK)
        code = plan_print(&options, results, count, &csv);
    else if (status == DTRAIN_ERR_MEMORY)
        plan_complain("no memory to plan so many ranks and micro-batches; use smaller --ranks or --micro");
    else
        plan_complain(dtrain_last_error());
    report_discard(&csv);
    free(results);
    return code;
}
