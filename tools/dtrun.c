/* Starts the ranks of a program on this host and ends them together; `build/dtrun --help` lists the flags.
 *
 * cc -O2 -ffp-contract=off -I. tools/dtrun.c -o build/dtrun -lpthread -lm
 * build/dtrun -n 4 PROGRAM [ARGS...]
 *
 * This file reads the command line; dtrun_posix.h and dtrun_windows.h do the rest, each on its systems. */
#define _GNU_SOURCE
#define DTRAIN_API static /* functions that are not called cost no time to compile */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tool.h"

#define TOKEN_BYTES 255
#define MOST_RANKS 4096  /* on one host */
#define LINE_BYTES 65536 /* a longer line is cut */
#define LINGER_MS 1000   /* that children of the ranks get to end, after all ranks have ended */

typedef struct options {
    int local_size, node, nodes, threads, grace_ms, use_unix, no_prefix, survivors;
    char *root, *token_file, **command;
} options;

/* Prints an error and ends this process; then its ranks end too. */
static void refuse(int status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fputs("dtrun: ", stderr);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
    exit(status);
}

/* ---- >>options ---- */

static const char help_text[] = "usage: dtrun -n RANKS [flags] PROGRAM [ARGS...]\n"
                                "Starts RANKS processes of PROGRAM on this host and ends them together.\n"
                                "  -n RANKS          processes on this host, 1 to 4096\n"
                                "  --node I/N        this is host I of N hosts, with as many processes on each;\n"
                                "                    needs --root and --token-file, the same on every host\n"
                                "  --root ADDRESS    where rank 0 listens: host:port, [address]:port, unix:/path\n"
                                "  --unix            the ranks meet at a unix socket in a private directory\n"
                                "  --token-file F    its first line is the group's secret, 16 to 255 bytes;\n"
                                "                    without this flag each run makes a new secret\n"
                                "  --grace-ms N      after a failure: N ms, SIGTERM, N ms, SIGKILL; default 5000\n"
                                "  --survivors       after a failure the other ranks go on, on this host\n"
                                "  --threads N       OMP_NUM_THREADS and the like where they are unset; default 1\n"
                                "  --no-prefix       leaves out the [rank] before each line of output\n"
                                "  --help            prints this text\n"
                                "Each process gets DTRAIN_RANK, DTRAIN_WORLD_SIZE, DTRAIN_ROOT, DTRAIN_TOKEN,\n"
                                "DTRAIN_LOCAL_RANK, DTRAIN_LOCAL_SIZE and, on a single host, DTRAIN_JOB. Rank 0\n"
                                "reads the standard input. If a rank fails, dtrun ends the others,\n"
                                "unless --survivors is given.\n"
                                "Exit status: 0, or that of the first rank that failed: 128 + N after signal N.\n"
                                "127: PROGRAM cannot be run. 2: wrong command line. 1: an error of the system.\n"
                                "  dtrun -n 4 build/train_gpt --steps 100\n"
                                "  dtrun -n 8 --node 0/2 --root 10.0.0.1:29500 --token-file token build/train_gpt\n";

static int number(const char *flag, const char *text, int least, int most)
{
    uint64_t value;
    if (!tool_whole(text, (uint64_t)least, (uint64_t)most, &value))
        exit(tool_wrong("dtrun", flag, text, "a whole number from %d to %d is expected", least, most));
    return (int)value;
}

static void check_options(const options *l)
{
    if (l->local_size == 0)
        exit(tool_wrong("dtrun", "-n", NULL, "a number of ranks from 1 to %d is expected", MOST_RANKS));
    if (!l->command[0] || l->command[0][0] == 0)
        exit(tool_wrong("dtrun", "PROGRAM", NULL, "the program to run is expected after the flags"));
    if (l->root && l->use_unix)
        exit(tool_wrong("dtrun", "--unix", NULL, "it makes a root itself: leave out --root"));
    if (l->root && !strchr(l->root, ':'))
        exit(tool_wrong("dtrun", "--root", l->root, "host:port, [address]:port or unix:/path is expected"));
    if (l->nodes > 1 && (!l->root || !l->token_file))
        exit(tool_wrong("dtrun", l->root ? "--token-file" : "--root", NULL,
                        "several nodes need --root host:port and --token-file, the same on each"));
}

static void parse_node(options *l, const char *text)
{
    const char *end;
    uint64_t node, nodes;
    if (!tool_digits(text, &end, &node) || *end != '/' || !tool_whole(end + 1, 1, 65536, &nodes))
        exit(tool_wrong("dtrun", "--node", text, "I/N is expected, as in 0/2, with N from 1 to 65536"));
    if (node >= nodes)
        exit(tool_wrong("dtrun", "--node", text, "I from 0 to %llu is expected", (unsigned long long)nodes - 1));
    l->node = (int)node;
    l->nodes = (int)nodes;
}

static void parse(options *l, char **at)
{
    char *node = NULL;
    const struct {
        const char *name;
        int least, most, *number; /* a number; with most 0 a flag without a value */
        char **text;
    } known[] = {{"-n", 1, MOST_RANKS, &l->local_size, NULL},  {"--grace-ms", 0, 86400000, &l->grace_ms, NULL},
                 {"--threads", 1, 65536, &l->threads, NULL},   {"--unix", 0, 0, &l->use_unix, NULL},
                 {"--no-prefix", 0, 0, &l->no_prefix, NULL},   {"--node", 0, 0, NULL, &node},
                 {"--token-file", 0, 0, NULL, &l->token_file}, {"--root", 0, 0, NULL, &l->root},
                 {"--survivors", 0, 0, &l->survivors, NULL}};
    size_t i, count = sizeof known / sizeof *known;
    l->nodes = l->threads = 1;
    l->grace_ms = 5000;
    for (; *at && (*at)[0] == '-' && strcmp(*at, "--") != 0; at++) {
        for (i = 0; i < count && strcmp(*at, known[i].name) != 0;)
            i++;
        if (strcmp(*at, "--help") == 0 || strcmp(*at, "-h") == 0)
            exit(tool_help(help_text));
        if (i == count)
            exit(tool_wrong("dtrun", *at, NULL, "there is no such flag"));
        if ((known[i].text || known[i].most) && !*++at)
            exit(tool_wrong("dtrun", known[i].name, NULL, "a value is expected after it"));
        if (known[i].text)
            *known[i].text = *at;
        else
            *known[i].number = known[i].most ? number(known[i].name, *at, known[i].least, known[i].most) : 1;
    }
    l->command = *at && strcmp(*at, "--") == 0 ? at + 1 : at;
    if (node)
        parse_node(l, node);
    check_options(l);
}

/* ---- >>token ---- */

static void warn(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    if (level >= DTRAIN_LOG_WARN)
        fprintf(stderr, "dtrun: warning: %s\n", text);
}

static void read_token(char token[TOKEN_BYTES + 1], const char *path)
{
    size_t bytes;
    dtrain_set_log(warn, NULL);
    if (dtrain__place_read_token("token file", path, token, &bytes) != DTRAIN_OK)
        refuse(2, "--token-file: %s; see dtrun --help", dtrain_last_error());
    token[bytes] = 0;
}

static void make_token(char token[TOKEN_BYTES + 1])
{
    unsigned char random[32];
    int error = dtrain__os_random(random, sizeof random);
    if (error != 0)
        refuse(1, "random bytes: %s", dtrain__os_error_text(error));
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(token + 2 * i, 3, "%02x", random[i]);
}

#ifdef _WIN32
#include "dtrun_windows.h"
#else
#include "dtrun_posix.h"
#endif

int main(int argc, char **argv)
{
    utf8_arguments(argc, argv);
    return run(argv + (argc > 0));
}
