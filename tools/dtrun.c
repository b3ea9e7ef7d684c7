/* Starts the ranks of a program as processes, on this host or as this host's share of several.
 *
 * cc -O2 -I. tools/dtrun.c -o build/dtrun
 *
 *   dtrun -n 4 ./train_gpt --steps 200
 *   dtrun -n 2 --node 0/2 --root host:port --token-file f ./train_gpt     on the first host of two, 1/2 on the second
 *
 *   -n N               processes on this host
 *   --node I/N         this is host I of N, each of which starts as many processes
 *   --root HOST:PORT   where rank 0 listens; without it, a free port of the loopback device
 *   --unix             ranks meet and talk over unix sockets in a private directory
 *   --token-file F     the group's secret, first line of F; without it, one is made (one host only)
 *   --threads N        threads of a process for BLAS libraries, 1
 *   --grace-ms N       how long ranks may go on after one has failed, 5000
 *   --no-prefix        lines as they are, without "[rank] "
 *
 * Each line of a rank's output comes whole, behind its rank. Standard input, unless it is a terminal, goes to rank 0.
 * SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on. When a rank fails, the others have grace-ms to
 * end, then get SIGTERM, then SIGKILL; dtrun says which rank failed first, and how, and exits as that rank did (128 + N
 * after signal N). */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#define LINE_BYTES 65536
#define MOST_RANKS 1024
#define CONFUSED 2 /* exit status of wrong flags */
#define CANNOT_RUN 127

typedef struct stream {
    int fd; /* read end of a rank's stdout or stderr; -1 when it has ended */
    size_t bytes;
    char *line;
} stream;

typedef struct child {
    pid_t pid;
    int ended, status; /* as waitpid gives it */
    stream streams[2];
} child;

typedef struct launch {
    int count, node, nodes, local, threads, no_prefix;
    long grace_ms;
    const char *root, *token_file;
    char **program;
    char directory[256], address[300], token[300];
    int listener;
    child *children;
    int running, failed; /* failed: the local index of the first rank that did, or -1 */
    int64_t ended_ms;    /* when the rest was first told to end, or 0 */
    int stage;           /* 0 run, 1 grace, 2 SIGTERM sent, 3 SIGKILL sent */
    int interrupts;
} launch;

static int signal_pipe[2] = {-1, -1};

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* One line to stderr, in one write, so that it stays whole among the ranks' lines. */
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    char text[1024] = "dtrun: ";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + 7, sizeof text - 8, format, arguments);
    va_end(arguments);
    strcat(text, "\n");
    ssize_t ignored = write(2, text, strlen(text));
    (void)ignored;
}

static void on_signal(int number)
{
    int kept = errno;
    unsigned char byte = (unsigned char)number;
    ssize_t ignored = write(signal_pipe[1], &byte, 1);
    (void)ignored;
    errno = kept;
}

static int number_of(const char *text, long least, long most, long *out)
{
    char *end;
    errno = 0;
    *out = strtol(text, &end, 10);
    return end != text && *end == 0 && errno == 0 && *out >= least && *out <= most;
}

static int read_node(launch *l, const char *text)
{
    char host[16];
    const char *slash = strchr(text, '/');
    long node, nodes;
    if (slash == NULL || (size_t)(slash - text) >= sizeof host)
        return 0;
    memcpy(host, text, (size_t)(slash - text));
    host[slash - text] = 0;
    if (!number_of(slash + 1, 1, MOST_RANKS, &nodes) || !number_of(host, 0, nodes - 1, &node))
        return 0;
    l->node = (int)node;
    l->nodes = (int)nodes;
    return 1;
}

/* Reads one flag with its value; returns how many arguments it took, 0 when it is wrong (and says so). */
static int read_flag(launch *l, const char *flag, const char *value)
{
    long number = 0;
    int good = value != NULL;
    if (strcmp(flag, "--unix") == 0 || strcmp(flag, "--no-prefix") == 0) {
        l->local |= flag[2] == 'u';
        l->no_prefix |= flag[2] == 'n';
        return 1;
    }
    if (strcmp(flag, "-n") == 0) {
        good = good && number_of(value, 1, MOST_RANKS, &number);
        l->count = (int)number;
    } else if (strcmp(flag, "--node") == 0) {
        good = good && read_node(l, value);
    } else if (strcmp(flag, "--threads") == 0) {
        good = good && number_of(value, 1, 65536, &number);
        l->threads = (int)number;
    } else if (strcmp(flag, "--grace-ms") == 0) {
        good = good && number_of(value, 0, INT_MAX, &l->grace_ms);
    } else if (strcmp(flag, "--root") == 0) {
        l->root = value;
    } else if (strcmp(flag, "--token-file") == 0) {
        l->token_file = value;
    } else {
        say("%s is no flag of dtrun; dtrun -n N [flags] PROGRAM [ARGUMENTS], --help lists them", flag);
        return 0;
    }
    if (!good)
        say("%s %s: not a value that it can have", flag, value != NULL ? value : "(nothing)");
    return good ? 2 : 0;
}

static int print_help(void)
{
    printf("dtrun -n N [flags] PROGRAM [ARGUMENTS]\n"
           "  -n N               processes on this host\n"
           "  --node I/N         this is host I of N, each of which starts as many processes\n"
           "  --root HOST:PORT   where rank 0 listens; without it, a free port of the loopback device\n"
           "  --unix             unix sockets in a private directory\n"
           "  --token-file F     the group's secret, first line of F; without it, one is made (one host only)\n"
           "  --threads N        threads of a process for BLAS libraries, 1\n"
           "  --grace-ms N       how long ranks may go on after one has failed, 5000\n"
           "  --no-prefix        lines without \"[rank] \"\n");
    return 0;
}

static int read_arguments(launch *l, int argc, char **argv)
{
    int at = 1;
    while (at < argc && argv[at][0] == '-') {
        int taken = read_flag(l, argv[at], at + 1 < argc ? argv[at + 1] : NULL);
        if (taken == 0)
            return 0;
        at += taken;
    }
    l->program = argv + at;
    if (l->count == 0 || at >= argc)
        say(l->count == 0 ? "-n N is needed: how many processes?" : "no program is given");
    else if ((long)l->count * l->nodes > MOST_RANKS)
        say("%d processes on %d hosts are more than %d ranks", l->count, l->nodes, MOST_RANKS);
    else if (l->nodes > 1 && (l->root == NULL || l->token_file == NULL))
        say("several hosts need --root host:port and --token-file, the same on each");
    else if (l->local && (l->root != NULL || l->nodes > 1))
        say("--unix is for one host, and chooses the root itself");
    else
        return 1;
    return 0;
}

static int read_token(launch *l)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char bytes[32];
    int fd = open(l->token_file != NULL ? l->token_file : "/dev/urandom", O_RDONLY | O_CLOEXEC);
    ssize_t n = -1;
    if (fd >= 0)
        n = l->token_file != NULL ? read(fd, l->token, sizeof l->token - 1) : read(fd, bytes, sizeof bytes);
    int error = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0 || (l->token_file == NULL && n != (ssize_t)sizeof bytes)) {
        say("%s cannot be read: %s", l->token_file != NULL ? l->token_file : "/dev/urandom", strerror(error));
        return 0;
    }
    for (size_t i = 0; l->token_file == NULL && i < sizeof bytes; i++) {
        l->token[2 * i] = digits[bytes[i] >> 4];
        l->token[2 * i + 1] = digits[bytes[i] & 15];
    }
    l->token[l->token_file != NULL ? n : 64] = 0;
    l->token[strcspn(l->token, "\r\n")] = 0;
    if (strlen(l->token) >= 16 && strlen(l->token) <= 255)
        return 1;
    say("the first line of %s has %zu bytes; a token has 16 to 255", l->token_file, strlen(l->token));
    return 0;
}

/* Decides where ranks meet: the given root, a private directory, or a port that is bound here and now. */
static int make_root(launch *l)
{
    const char *base = getenv("TMPDIR");
    struct sockaddr_in address;
    socklen_t bytes = sizeof address;
    if (l->root != NULL) {
        snprintf(l->address, sizeof l->address, "%s", l->root);
        return 1;
    }
    if (l->local) {
        snprintf(l->directory, sizeof l->directory, "%.60s/dtrun-XXXXXX", base != NULL && *base != 0 ? base : "/tmp");
        if (mkdtemp(l->directory) == NULL) {
            say("cannot make a directory %s: %s", l->directory, strerror(errno));
            l->directory[0] = 0;
            return 0;
        }
        snprintf(l->address, sizeof l->address, "unix:%s/root", l->directory);
        return 1;
    }
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    l->listener = socket(AF_INET, SOCK_STREAM, 0);
    if (l->listener < 0 || fcntl(l->listener, F_SETFD, FD_CLOEXEC) < 0 ||
        bind(l->listener, (struct sockaddr *)&address, bytes) != 0 || listen(l->listener, 1024) != 0 ||
        getsockname(l->listener, (struct sockaddr *)&address, &bytes) != 0) {
        say("cannot listen on the loopback device: %s", strerror(errno));
        return 0;
    }
    snprintf(l->address, sizeof l->address, "127.0.0.1:%d", ntohs(address.sin_port));
    return 1;
}

/* Removes the private directory and what ranks that were killed left in it. */
static void remove_root(launch *l)
{
    char path[300];
    if (l->directory[0] == 0)
        return;
    snprintf(path, sizeof path, "%s/root", l->directory);
    unlink(path);
    for (int rank = 0; rank < l->count; rank++) {
        snprintf(path, sizeof path, "%s/root.%d", l->directory, rank);
        unlink(path);
    }
    rmdir(l->directory);
}

static void set_number(const char *name, int value, int overwrite)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, overwrite);
}

/* The child's side, up to the program. Never returns; what goes wrong is written to report. */
static void become_rank(launch *l, int index, int out, int err, int report, pid_t parent)
{
    int in = index == 0 && l->node == 0 && !isatty(0) ? 0 : open("/dev/null", O_RDONLY), error;
    sigset_t none;
    setpgid(0, 0);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a dtrun that is killed leaves no ranks behind */
#endif
    if (getppid() != parent)
        _exit(CANNOT_RUN);
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if ((in != 0 && dup2(in, 0) < 0) || dup2(out, 1) < 0 || dup2(err, 2) < 0)
        _exit(CANNOT_RUN);
    if (in > 2)
        close(in);
    set_number("DTRAIN_RANK", l->node * l->count + index, 1);
    set_number("DTRAIN_WORLD_SIZE", l->nodes * l->count, 1);
    set_number("DTRAIN_LOCAL_RANK", index, 1);
    set_number("DTRAIN_LOCAL_SIZE", l->count, 1);
    setenv("DTRAIN_ROOT", l->address, 1);
    setenv("DTRAIN_TOKEN", l->token, 1);
    unsetenv("DTRAIN_LISTEN_FD");
    if (l->listener >= 0 && index == 0) {
        fcntl(l->listener, F_SETFD, 0);
        set_number("DTRAIN_LISTEN_FD", l->listener, 1);
    }
    set_number("OMP_NUM_THREADS", l->threads, 0);
    set_number("OPENBLAS_NUM_THREADS", l->threads, 0);
    set_number("MKL_NUM_THREADS", l->threads, 0);
    execvp(l->program[0], l->program);
    error = errno;
    ssize_t ignored = write(report, &error, sizeof error);
    (void)ignored;
    _exit(CANNOT_RUN);
}

static int make_pipe(int ends[2])
{
    return pipe(ends) == 0 && fcntl(ends[0], F_SETFD, FD_CLOEXEC) == 0 && fcntl(ends[1], F_SETFD, FD_CLOEXEC) == 0;
}

/* Starts one rank; returns 0 when the program cannot be run (and says so). */
static int start_rank(launch *l, int index)
{
    child *c = &l->children[index];
    int out[2], err[2], report[2], error = 0;
    pid_t parent = getpid();
    if (!make_pipe(out) || !make_pipe(err) || !make_pipe(report)) {
        say("no pipe for rank %d: %s", l->node * l->count + index, strerror(errno));
        return 0;
    }
    c->pid = fork();
    if (c->pid == 0)
        become_rank(l, index, out[1], err[1], report[1], parent);
    close(out[1]);
    close(err[1]);
    close(report[1]);
    if (c->pid < 0) {
        say("the system refused a process for rank %d: %s", l->node * l->count + index, strerror(errno));
        return 0;
    }
    setpgid(c->pid, c->pid); /* the child does so too: whoever comes first */
    c->streams[0].fd = out[0];
    c->streams[1].fd = err[0];
    l->running++;
    for (int i = 0; i < 2; i++)
        fcntl(c->streams[i].fd, F_SETFL, O_NONBLOCK);
    ssize_t n;
    while ((n = read(report[0], &error, sizeof error)) < 0 && errno == EINTR)
        continue;
    close(report[0]);
    if (n != (ssize_t)sizeof error)
        return 1;
    say("%s cannot be run: %s", l->program[0], strerror(error));
    return 0;
}

static void write_all(int fd, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            struct pollfd one = {fd, POLLOUT, 0};
            poll(&one, 1, 1000);
            continue;
        }
        if (n <= 0) /* nobody reads any more; the ranks go on */
            return;
        data += n;
        bytes -= (size_t)n;
    }
}

static void put_line(launch *l, int index, int which, const char *text, size_t bytes, int ended)
{
    static char whole[LINE_BYTES + 32];
    size_t at = 0;
    if (!l->no_prefix)
        at = (size_t)snprintf(whole, 24, "[%d] ", l->node * l->count + index);
    memcpy(whole + at, text, bytes);
    at += bytes;
    if (!ended)
        whole[at++] = '\n';
    write_all(which + 1, whole, at);
}

/* Passes on what whole lines a rank has written; `last` also what has no end. */
static void pass_lines(launch *l, int index, int which, int last)
{
    stream *s = &l->children[index].streams[which];
    size_t begin = 0;
    for (size_t i = 0; i < s->bytes; i++)
        if (s->line[i] == '\n' || s->line[i] == '\r') {
            put_line(l, index, which, s->line + begin, i + 1 - begin, 1);
            begin = i + 1;
        }
    if (begin < s->bytes && (last || (begin == 0 && s->bytes == LINE_BYTES))) {
        put_line(l, index, which, s->line + begin, s->bytes - begin, 0);
        begin = s->bytes;
    }
    memmove(s->line, s->line + begin, s->bytes - begin);
    s->bytes -= begin;
}

static void read_stream(launch *l, int index, int which)
{
    stream *s = &l->children[index].streams[which];
    ssize_t n = read(s->fd, s->line + s->bytes, LINE_BYTES - s->bytes);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    s->bytes += n > 0 ? (size_t)n : 0;
    pass_lines(l, index, which, n <= 0);
    if (n <= 0) {
        close(s->fd);
        s->fd = -1;
    }
}

static void signal_ranks(launch *l, int number)
{
    for (int i = 0; i < l->count; i++)
        if (l->children[i].pid > 0 && (!l->children[i].ended || number == SIGKILL))
            kill(-l->children[i].pid, number);
}

static void describe(char *text, size_t capacity, int status)
{
    if (WIFSIGNALED(status))
        snprintf(text, capacity, "was killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) != 0)
        snprintf(text, capacity, "exited with status %d", WEXITSTATUS(status));
    else
        snprintf(text, capacity, "ended well");
}

static void reap(launch *l)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < l->count; i++) {
            child *c = &l->children[i];
            char how[96];
            if (c->pid != pid || c->ended)
                continue;
            c->ended = 1;
            c->status = status;
            l->running--;
            if (status == 0 || l->failed >= 0)
                continue;
            l->failed = i;
            describe(how, sizeof how, status);
            if (l->running > 0 && l->stage == 0)
                say("rank %d (pid %ld) %s; ending the other %d", l->node * l->count + i, (long)pid, how, l->running);
            else
                say("rank %d (pid %ld) %s", l->node * l->count + i, (long)pid, how);
        }
}

/* Takes the ranks that are left a step nearer to their end, when the time has come. */
static void advance_end(launch *l)
{
    int64_t now = now_ms();
    if (l->failed >= 0 && l->stage == 0) {
        l->stage = 1;
        l->ended_ms = now;
    }
    if (l->stage == 0 || l->stage == 3 || now - l->ended_ms < l->grace_ms)
        return;
    l->ended_ms = now;
    signal_ranks(l, l->stage == 1 ? SIGTERM : SIGKILL);
    signal_ranks(l, SIGCONT);
    l->stage++;
}

static void take_signals(launch *l)
{
    unsigned char number;
    while (read(signal_pipe[0], &number, 1) == 1) {
        if (number == SIGCHLD)
            continue;
        signal_ranks(l, number);
        if (number != SIGINT && number != SIGTERM && number != SIGHUP && number != SIGQUIT)
            continue;
        if (++l->interrupts > 1) {
            signal_ranks(l, SIGKILL);
            l->stage = 3;
        } else if (l->stage < 2) {
            l->stage = 2;
            l->ended_ms = now_ms();
        }
    }
}

/* Watches the ranks until the last one has ended and its output has been passed on. */
static void watch(launch *l)
{
    struct pollfd *fds = (struct pollfd *)malloc(sizeof(struct pollfd) * (size_t)(2 * l->count + 1));
    int *owner = (int *)malloc(sizeof(int) * (size_t)(2 * l->count + 1));
    int64_t drained_ms = 0;
    while (fds != NULL && owner != NULL) {
        int count = 0, n;
        fds[count].fd = signal_pipe[0];
        fds[count++].events = POLLIN;
        for (int i = 0; i < 2 * l->count; i++)
            if (l->children[i / 2].streams[i % 2].fd >= 0) {
                owner[count] = i;
                fds[count].fd = l->children[i / 2].streams[i % 2].fd;
                fds[count++].events = POLLIN;
            }
        if (l->running == 0 && drained_ms == 0) {
            drained_ms = now_ms();
            signal_ranks(l, SIGKILL); /* what the ranks have started and left behind */
        }
        if (l->running == 0 && (count == 1 || now_ms() - drained_ms > 2000))
            break;
        n = poll(fds, (nfds_t)count, l->stage > 0 || l->running == 0 ? 50 : 1000);
        for (int i = 1; n > 0 && i < count; i++)
            if (fds[i].revents != 0)
                read_stream(l, owner[i] / 2, owner[i] % 2);
        take_signals(l);
        reap(l);
        advance_end(l);
    }
    free(fds);
    free(owner);
}

static int watch_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD};
    struct sigaction action;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files); /* many ranks have many pipes, and rank 0 many connections */
    }
    if (!make_pipe(signal_pipe) || fcntl(signal_pipe[0], F_SETFL, O_NONBLOCK) < 0 ||
        fcntl(signal_pipe[1], F_SETFL, O_NONBLOCK) < 0)
        return 0;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    sigfillset(&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        sigaction(numbers[i], &action, NULL);
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, NULL);
    return 1;
}

static int run(launch *l)
{
    int status = 0, started = 0;
    l->children = (child *)calloc((size_t)l->count, sizeof(child));
    for (int i = 0; l->children != NULL && i < l->count; i++)
        for (int which = 0; which < 2; which++) {
            l->children[i].streams[which].fd = -1;
            l->children[i].streams[which].line = (char *)malloc(LINE_BYTES);
            if (l->children[i].streams[which].line == NULL)
                l->count = 0;
        }
    if (l->children == NULL || l->count == 0) {
        say("no memory");
        return 1;
    }
    while (started < l->count && start_rank(l, started))
        started++;
    if (l->listener >= 0)
        close(l->listener);
    if (started < l->count) {
        signal_ranks(l, SIGKILL);
        while (waitpid(-1, &status, 0) > 0 || errno == EINTR)
            continue;
        return CANNOT_RUN;
    }
    watch(l);
    for (int i = 0; i < l->count && l->failed >= 0; i++) {
        char how[96];
        describe(how, sizeof how, l->children[i].status);
        say("rank %d %s", l->node * l->count + i, how);
    }
    status = l->failed >= 0 ? l->children[l->failed].status : 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
    launch l;
    int status = CONFUSED;
    memset(&l, 0, sizeof l);
    l.nodes = l.threads = 1;
    l.grace_ms = 5000;
    l.listener = l.failed = -1;
    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return print_help();
    if (!read_arguments(&l, argc, argv) || !read_token(&l))
        return CONFUSED;
    if (!watch_signals()) {
        say("no pipe for signals: %s", strerror(errno));
        return 1;
    }
    if (make_root(&l))
        status = run(&l);
    remove_root(&l);
    return status;
}
