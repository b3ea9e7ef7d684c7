/* dtrun on POSIX: one process with one poll() loop. Its signal handlers only write to a pipe that the loop reads. Every
 * rank leads a process group of its own. dtrun reaps the ranks only after all have ended, so that no other process gets
 * the number of a group. A second process, the guard, waits until dtrun has ended, however it ended. Then the guard
 * kills the groups that are left and removes the private directory. */
#ifndef DTRUN_POSIX_H
#define DTRUN_POSIX_H

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#define READ_BYTES 16384   /* read of one stream in one turn */
#define QUEUE_BYTES 262144 /* output that waits for its reader; with more, dtrun reads no more from the ranks */
#define SETTLE_MS 50       /* a rank whose peer is killed may end before dtrun learns of the peer's end */
#define SAME_SIGNAL_MS 250 /* timeout(1) sends each signal to its child and to its group: dtrun takes both as one */

typedef struct stream { /* the line that a rank is writing, or output that dtrun's reader has not taken yet */
    int fd, gone;       /* fd: -1 after its end; gone: dtrun's reader has closed it */
    int after_return;   /* the last line ended with a carriage return: a newline that follows belongs to it */
    char *bytes;
    size_t length, room;
} stream;

typedef struct rank {
    pid_t pid;       /* 0 before its start */
    int code, value; /* si_code and si_status of its end; code is 0 while it runs */
} rank;

typedef enum phase {
    STARTED,     /* no deadline */
    FAILED,      /* a rank has failed; another one may have failed before it */
    LEAVING,     /* the other ranks should notice and end; at the deadline they get SIGTERM */
    TERMINATING, /* they have got SIGTERM; at the deadline they get SIGKILL */
    KILLED,      /* they have got SIGKILL; at the deadline dtrun gives them up */
    LINGERING    /* all ranks have ended; their children may still run */
} phase;

typedef struct launch { /* in memory shared with the guard; no other child may write to it */
    options o;
    int first_rank, listener, started, running, first_failed; /* first_failed: -1 while none has failed */
    pid_t guard, feeder;
    pid_t groups[MOST_RANKS]; /* 0 after dtrun found it empty */
    rank ranks[MOST_RANKS];
    stream streams[2 * MOST_RANKS]; /* output and error of each */
    struct pollfd polled[2 * MOST_RANKS + 3];
    stream queues[2]; /* of standard output and error */
    phase phase;
    int64_t deadline, asked_at; /* asked_at: time of the first SIGINT or SIGTERM; 0 before it */
    int lost_output;            /* the exit status after the ranks were ended because nobody reads the output; else 0 */
    int hurry;                  /* end although output still waits for its reader */
    char token[TOKEN_BYTES + 1], directory[256];
} launch;

static int wake[2];

static int64_t now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static void make_pipe(int ends[2])
{
    if (pipe(ends) != 0)
        refuse(1, "pipe: %s", strerror(errno));
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
}

static void remove_directory(const char *path)
{
    DIR *directory = path[0] ? opendir(path) : NULL;
    struct dirent *entry;
    while (directory && (entry = readdir(directory)) != NULL)
        unlinkat(dirfd(directory), entry->d_name, 0); /* "." and ".." are refused */
    if (directory)
        closedir(directory);
    rmdir(path);
}

/* ---- >>environment ---- */

static void listen_for_rank_0(launch *l, char *root, size_t bytes)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    l->listener = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (l->listener < 0 || bind(l->listener, (struct sockaddr *)&address, length) != 0 ||
        listen(l->listener, 1024) != 0 || getsockname(l->listener, (struct sockaddr *)&address, &length) != 0)
        refuse(1, "cannot listen on 127.0.0.1: %s", strerror(errno));
    fcntl(l->listener, F_SETFD, FD_CLOEXEC);
    snprintf(root, bytes, "127.0.0.1:%d", ntohs(address.sin_port));
}

static void set_number(const char *name, int value, int overwrite)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, overwrite);
}

static void set_environment(launch *l)
{
    const char *parent = getenv("TMPDIR");
    char root[sizeof l->directory + 16], job[48];
    if (l->o.use_unix) {
        if (!parent || parent[0] != '/' || strlen(parent) > 72) /* a socket's path has room for 104 bytes */
            parent = "/tmp";
        snprintf(l->directory, sizeof l->directory, "%s/dtrun.XXXXXX", parent);
        if (!mkdtemp(l->directory))
            refuse(1, "cannot make a directory in %s: %s", parent, strerror(errno));
        snprintf(root, sizeof root, "unix:%s/root", l->directory);
    } else if (!l->o.root)
        listen_for_rank_0(l, root, sizeof root);
    setenv("DTRAIN_ROOT", l->o.root ? l->o.root : root, 1);
    setenv("DTRAIN_TOKEN", l->token, 1);
    snprintf(job, sizeof job, "dtrun-%ld-%llx", (long)getpid(), (unsigned long long)time(NULL));
    if (l->o.nodes == 1) /* hosts of several nodes have no name in common */
        setenv("DTRAIN_JOB", job, 1);
    unsetenv("DTRAIN_TOKEN_FILE");
    unsetenv("DTRAIN_LISTEN_FD");
    set_number("DTRAIN_WORLD_SIZE", l->o.local_size * l->o.nodes, 1);
    set_number("DTRAIN_LOCAL_SIZE", l->o.local_size, 1);
    set_number("OMP_NUM_THREADS", l->o.threads, 0);
    set_number("OPENBLAS_NUM_THREADS", l->o.threads, 0);
    set_number("MKL_NUM_THREADS", l->o.threads, 0);
}

/* Keeps the descriptors that the caller left open from the ranks. Raises the limit of descriptors, because dtrun needs
 * two pipes for each rank, and a rank a connection to each other rank. */
static void set_descriptors(const launch *l)
{
    struct rlimit limit;
    struct dirent *entry;
    DIR *open_ones = opendir("/dev/fd");
    while (open_ones && (entry = readdir(open_ones)) != NULL)
        if (atoi(entry->d_name) > 2)
            fcntl(atoi(entry->d_name), F_SETFD, FD_CLOEXEC);
    if (open_ones)
        closedir(open_ones);
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
        limit.rlim_cur >= (rlim_t)l->o.local_size * (rlim_t)l->o.nodes * 2 + 64)
        return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

/* ---- >>output ---- */

static stream *queue_of(launch *l, int which)
{
    return &l->queues[l->queues[1].fd == 1 ? 0 : which]; /* one queue if output and error are one file */
}

static void append(stream *s, const char *bytes, size_t count)
{
    if (s->gone || count == 0)
        return;
    if (count > s->room - s->length) {
        s->room = (s->length + count) * 2;
        s->bytes = realloc(s->bytes, s->room);
        if (!s->bytes)
            refuse(1, "out of memory");
    }
    memcpy(s->bytes + s->length, bytes, count);
    s->length += count;
}

static void say(launch *l, const char *format, ...)
{
    char text[1024] = "dtrun: ";
    va_list list;
    va_start(list, format);
    vsnprintf(text + 7, sizeof text - 8, format, list);
    va_end(list);
    strcat(text, "\n");
    append(queue_of(l, 1), text, strlen(text));
}

static void emit_line(launch *l, int index)
{
    stream *s = &l->streams[index];
    stream *q = queue_of(l, index % 2);
    char prefix[24];
    snprintf(prefix, sizeof prefix, "[%d] ", l->first_rank + index / 2);
    if (!l->o.no_prefix)
        append(q, prefix, strlen(prefix));
    append(q, s->bytes, s->length);
    append(q, "\n", 1);
    s->length = 0;
}

static void take_bytes(launch *l, int index, const char *bytes, size_t count)
{
    stream *s = &l->streams[index];
    for (; count > 0; bytes++, count--) {
        int is_end = *bytes == '\n' || *bytes == '\r';
        int ends = *bytes == '\n' ? !s->after_return : is_end && s->length > 0;
        if (ends || (!is_end && s->length == LINE_BYTES))
            emit_line(l, index);
        s->after_return = *bytes == '\r' && (ends || s->after_return);
        if (!is_end)
            append(s, bytes, 1);
    }
}

/* Returns 1 if there may be more to read. */
static int read_stream(launch *l, int index)
{
    stream *s = &l->streams[index];
    char bytes[READ_BYTES];
    ssize_t got = s->fd < 0 ? -1 : read(s->fd, bytes, sizeof bytes);
    if (got > 0)
        take_bytes(l, index, bytes, (size_t)got);
    if (got != 0)
        return got > 0;
    if (s->length > 0)
        emit_line(l, index);
    close(s->fd);
    s->fd = -1;
    return 0;
}

/* ---- >>ending ---- */

static void signal_groups(const launch *l, int signal_number)
{
    int i;
    for (i = 0; i < l->started; i++)
        if (l->groups[i] > 0)
            kill(-l->groups[i], signal_number);
}

static void go_on(launch *l, phase next, int signal_number)
{
    const int64_t waits[] = {0, SETTLE_MS, l->o.grace_ms, l->o.grace_ms, (int64_t)l->o.grace_ms + LINGER_MS, LINGER_MS};
    l->phase = next;
    l->deadline = now_ms() + waits[next];
    signal_groups(l, signal_number);
    if (signal_number == SIGTERM)
        signal_groups(l, SIGCONT); /* a stopped process ends only after SIGCONT */
}

static void reap(pid_t pid)
{
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        continue;
}

static void clean_up(const launch *l)
{
    signal_groups(l, SIGKILL);
    remove_directory(l->directory);
    kill(l->guard, SIGKILL);
    reap(l->guard);
    if (l->feeder > 0 && kill(l->feeder, SIGKILL) == 0)
        reap(l->feeder);
}

static const char *end_of(const launch *l, int index, char text[160])
{
    const rank *r = &l->ranks[index];
    int length = snprintf(text, 160, r->pid ? "rank %d (pid %ld) " : "rank %d ", l->first_rank + index, (long)r->pid);
    if (r->code == CLD_EXITED)
        snprintf(text + length, 64, "exited with status %d", r->value);
    else if (r->code)
        snprintf(text + length, 64, "was killed by signal %d (%s)", r->value, strsignal(r->value));
    else
        snprintf(text + length, 64, r->pid ? "has not ended" : "was not started");
    return text;
}

static void name_failed(launch *l, int index)
{
    char text[160], others[80] = "";
    if (l->running > 0 && l->o.survivors)
        snprintf(others, sizeof others, "; ranks that go on: %d", l->running);
    else if (l->running > 0)
        snprintf(others, sizeof others, "; ending the other %d rank%s, as --survivors is not set", l->running,
                 l->running == 1 ? "" : "s");
    say(l, "%s%s", end_of(l, index, text), others);
}

static void look_at(launch *l, int index)
{
    rank *r = &l->ranks[index];
    siginfo_t info;
    info.si_pid = 0;
    if (r->code || waitid(P_PID, (id_t)r->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
        return;
    r->code = info.si_code;
    r->value = info.si_status;
    l->running--;
    if (r->code == CLD_EXITED && r->value == 0)
        return;
    if (l->first_failed < 0 ||
        (l->phase == FAILED && l->ranks[l->first_failed].code == CLD_EXITED && r->code != CLD_EXITED))
        l->first_failed = index;
    if (l->phase == STARTED && l->o.survivors)
        name_failed(l, index);
    else if (l->phase == STARTED)
        go_on(l, FAILED, 0);
}

static void check_deadline(launch *l)
{
    phase now = l->phase;
    if (now == STARTED || now == LINGERING || now_ms() < l->deadline)
        return;
    l->hurry = now == KILLED;
    if (now == FAILED)
        name_failed(l, l->first_failed);
    else if (now != KILLED)
        say(l, "%d rank%s did not end within %d ms: %s", l->running, l->running == 1 ? "" : "s", l->o.grace_ms,
            now == LEAVING ? "SIGTERM" : "SIGKILL");
    if (now != KILLED)
        go_on(l, now + 1, now == LEAVING ? SIGTERM : now == TERMINATING ? SIGKILL : 0);
}

/* Writes as much as the reader takes without blocking. After poll(), a write of PIPE_BUF bytes does not block; a larger
 * one may. O_NONBLOCK is no way out: it would change the descriptor for every process that shares it. */
static void flush(launch *l, stream *q)
{
    struct pollfd ready = {q->fd, POLLOUT, 0};
    size_t done = 0;
    ssize_t written = 0;
    while (done < q->length && done < 64 * PIPE_BUF && written >= 0 && poll(&ready, 1, 0) > 0) {
        written = write(q->fd, q->bytes + done, q->length - done < PIPE_BUF ? q->length - done : PIPE_BUF);
        done += written > 0 ? (size_t)written : 0;
    }
    if (done > 0)
        memmove(q->bytes, q->bytes + done, q->length -= done);
    if (written >= 0 || errno == EINTR || errno == EAGAIN)
        return;
    q->gone = 1;
    q->length = 0;
    if (l->first_failed < 0)
        l->lost_output = errno == EPIPE ? 128 + SIGPIPE : 1;
    if (l->phase <= LEAVING) {
        say(l, "standard %s: %s; ending the ranks", q == l->queues ? "output" : "error", strerror(errno));
        go_on(l, TERMINATING, SIGTERM);
    }
}

/* ---- >>signals ---- */

static void on_signal(int signal_number, siginfo_t *info, void *context)
{
    int saved = errno;
    int note[2] = {signal_number, info->si_pid};
    ssize_t written = write(wake[1], note, sizeof note); /* a full pipe wakes the loop too, which looks at every rank */
    (void)written;
    (void)context;
    errno = saved;
}

static void catch_signals(void)
{
    static const int caught[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT, SIGCHLD};
    struct sigaction action, before;
    size_t i;
    make_pipe(wake);
    fcntl(wake[0], F_SETFL, O_NONBLOCK);
    fcntl(wake[1], F_SETFL, O_NONBLOCK);
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NOCLDSTOP;
    sigfillset(&action.sa_mask);
    for (i = 0; i < sizeof caught / sizeof *caught; i++) {
        sigaction(caught[i], NULL, &before);
        if (before.sa_handler != SIG_IGN || caught[i] == SIGCHLD) /* nohup and sh's background jobs ignore signals */
            sigaction(caught[i], &action, NULL);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTTIN, SIG_IGN); /* in the background only the cat of input_of stops, not dtrun */
    sigemptyset(&action.sa_mask);
    sigprocmask(SIG_SETMASK, &action.sa_mask, NULL);
}

static void asked_to_end(launch *l, int signal_number)
{
    int counts = signal_number == SIGINT || signal_number == SIGTERM;
    if (l->phase == LINGERING)
        l->hurry = 1;
    else if (counts && l->asked_at && now_ms() - l->asked_at >= SAME_SIGNAL_MS)
        go_on(l, KILLED, SIGKILL);
    else if (l->phase == TERMINATING || l->phase == KILLED)
        signal_groups(l, signal_number);
    else {
        say(l, "signal %d (%s) passed on; SIGKILL follows after %d ms or a second signal", signal_number,
            strsignal(signal_number), l->o.grace_ms);
        go_on(l, TERMINATING, signal_number);
    }
    if (counts && !l->asked_at)
        l->asked_at = now_ms();
}

static void take_note(launch *l, int signal_number, pid_t pid)
{
    int64_t since = now_ms();
    int i;
    if (signal_number == SIGCHLD) { /* one signal may stand for many ends; it names the first */
        for (i = 0; i < l->started; i++)
            if (l->ranks[i].pid == pid)
                look_at(l, i);
    } else if (signal_number == SIGTSTP) {
        signal_groups(l, SIGTSTP);
        raise(SIGSTOP);
        l->deadline += now_ms() - since;
    } else if (signal_number == SIGCONT || signal_number == SIGUSR1 || signal_number == SIGUSR2)
        signal_groups(l, signal_number);
    else
        asked_to_end(l, signal_number);
}

/* Waits for output, a signal or the deadline, and handles what came. */
static void turn(launch *l, int64_t wait_ms)
{
    int i, note[2], any, count = 2 * l->started;
    for (i = 0; i < count; i++)
        l->polled[i] = (struct pollfd){queue_of(l, i % 2)->length < QUEUE_BYTES ? l->streams[i].fd : -1, POLLIN, 0};
    for (i = 0; i < 2; i++)
        l->polled[count + i] = (struct pollfd){l->queues[i].length > 0 ? l->queues[i].fd : -1, POLLOUT, 0};
    l->polled[count + 2] = (struct pollfd){wake[0], POLLIN, 0};
    if (poll(l->polled, (nfds_t)count + 3, wait_ms < 0 ? 0 : (int)wait_ms) > 0)
        for (i = 0; i < count; i++)
            if (l->polled[i].revents)
                read_stream(l, i);
    for (any = 0; read(wake[0], note, sizeof note) == sizeof note; any = 1)
        take_note(l, note[0], note[1]);
    for (i = 0; any && i < l->started; i++)
        look_at(l, i);
    flush(l, &l->queues[0]);
    flush(l, &l->queues[1]);
    check_deadline(l);
}

/* ---- >>start ---- */

/* Forks a child with default signal handling. On Linux the kernel kills the child when dtrun ends. */
static pid_t fork_child(void)
{
    sigset_t all, before;
    pid_t parent = getpid(), child;
    int i;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before); /* so that dtrun's handlers never run in the child */
    child = fork();
    for (i = 1; child == 0 && i < NSIG; i++)
        if (i != SIGKILL && i != SIGSTOP)
            signal(i, SIG_DFL);
    sigprocmask(SIG_SETMASK, &before, NULL); /* before is empty, see catch_signals */
    if (child != 0)
        return child;
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    if (getppid() != parent)
        _exit(127);
    return 0;
}

/* Starts the process that cleans up after dtrun has ended. */
static void start_guard(launch *l)
{
    int i, ends[2]; /* the writing end closes when dtrun ends */
    char byte;
    pid_t pid;
    make_pipe(ends);
    pid = fork_child();
    if (pid < 0)
        refuse(1, "fork: %s", strerror(errno));
    close(ends[pid == 0]);
    if (pid > 0) {
        l->guard = pid;
        return;
    }
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, 0);
    prctl(PR_SET_NAME, "dtrun-guard");
#endif
    setsid();
    for (i = 1; i < NSIG; i++)
        signal(i, SIG_IGN);
    while (read(ends[0], &byte, 1) > 0)
        continue;
    signal_groups(l, SIGKILL);
    remove_directory(l->directory);
    _exit(0);
}

/* Returns the standard input of a rank. Rank 0 is not in the terminal's foreground group, so it cannot read from the
 * terminal: a cat in dtrun's own group reads for it. */
static int input_of(launch *l, int index)
{
    int ends[2];
    pid_t pid;
    if (l->first_rank + index > 0)
        return open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (!isatty(0))
        return fcntl(0, F_DUPFD_CLOEXEC, 3);
    make_pipe(ends);
    pid = fork_child();
    if (pid == 0) {
        dup2(ends[1], 1);
        execlp("cat", "cat", (char *)NULL);
        _exit(127);
    }
    l->feeder = pid;
    close(ends[1]);
    return ends[0];
}

static void become_rank(const launch *l, int index, const int standard[3], int report)
{
    int i, error, global = l->first_rank + index;
    setpgid(0, 0);
    set_number("DTRAIN_RANK", global, 1);
    set_number("DTRAIN_LOCAL_RANK", index, 1);
    if (global == 0 && l->listener >= 0) {
        set_number("DTRAIN_LISTEN_FD", l->listener, 1);
        fcntl(l->listener, F_SETFD, 0);
    }
    for (i = 0; i < 3; i++)
        dup2(standard[i], i);
    execvp(l->o.command[0], l->o.command);
    error = errno;
    _exit(write(report, &error, sizeof error) < 0 ? 126 : 127);
}

/* Ends the ranks that have started and says why. Their output is dropped: it would hide the reason. */
static void give_up_start(launch *l, int status, const char *what, int error)
{
    int i;
    clean_up(l);
    for (i = 0; i < l->started; i++)
        reap(l->ranks[i].pid);
    refuse(status, "cannot %s %s: %s", status == 127 ? "run" : "start another", what, strerror(error));
}

static void start_rank(launch *l, int index)
{
    int i, pipes[3][2], standard[3], error = 0;
    ssize_t got;
    pid_t pid;
    for (i = 0; i < 3; i++)
        make_pipe(pipes[i]); /* output, error, and errno if the program cannot be run */
    standard[0] = input_of(l, index);
    standard[1] = pipes[0][1];
    standard[2] = pipes[1][1];
    pid = fork_child();
    if (pid == 0)
        become_rank(l, index, standard, pipes[2][1]);
    if (pid < 0)
        give_up_start(l, 1, "rank", errno);
    l->groups[index] = l->ranks[index].pid = pid;
    l->started++;
    l->running++;
    close(standard[0]);
    for (i = 0; i < 3; i++)
        close(pipes[i][1]);
    for (i = 0; i < 2; i++) {
        fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
        l->streams[2 * index + i].fd = pipes[i][0];
    }
    while ((got = read(pipes[2][0], &error, sizeof error)) < 0 && errno == EINTR)
        continue;
    close(pipes[2][0]);
    if (got > 0)
        give_up_start(l, 127, l->o.command[0], error);
}

/* Returns whether a group has a member or a pipe a writer. Forgets the numbers of empty groups. */
static int remains(launch *l)
{
    int i, any = 0;
    for (i = 0; i < l->started; i++) {
        if (l->groups[i] > 0 && kill(-l->groups[i], 0) != 0 && errno == ESRCH)
            l->groups[i] = 0;
        any |= l->groups[i] > 0 || l->streams[2 * i].fd >= 0 || l->streams[2 * i + 1].fd >= 0;
    }
    return any;
}

static int finish(launch *l)
{
    const rank *first = &l->ranks[l->first_failed < 0 ? 0 : l->first_failed];
    int i, reads, unnamed = l->phase == FAILED;
    char text[160];
    for (i = 0; l->running == 0 && i < l->started; i++)
        reap(l->ranks[i].pid);
    if (l->running == 0)
        go_on(l, LINGERING, 0);
    /* a child of a rank, such as a tee or a logger, may still end by itself; no signal tells dtrun when */
    while (!l->hurry && remains(l) && now_ms() < l->deadline)
        turn(l, 20);
    clean_up(l);
    for (i = 0; i < 2 * l->started; i++) {
        for (reads = 0; reads < 8 && read_stream(l, i);) /* 8 reads at most: a writer that is left may never end */
            reads++;
        if (l->streams[i].length > 0)
            emit_line(l, i);
    }
    if (unnamed)
        name_failed(l, l->first_failed);
    for (i = 0; l->first_failed >= 0 && l->o.local_size > 1 && i < l->o.local_size; i++)
        say(l, "%s%s", end_of(l, i, text), i == l->first_failed ? ", the first to fail" : "");
    do
        turn(l, l->queues[0].length + l->queues[1].length > 0 ? 1000 : 0);
    while (!l->hurry && l->queues[0].length + l->queues[1].length > 0);
    if (l->lost_output)
        return l->lost_output;
    if (l->first_failed < 0)
        return l->running > 0 || l->started < l->o.local_size ? 128 + SIGKILL : 0;
    return first->code == CLD_EXITED ? first->value : 128 + first->value;
}

static int run(char **arguments)
{
    launch *l = mmap(NULL, sizeof *l, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANON, -1, 0);
    struct stat out, err;
    int fd;
    if (l == MAP_FAILED)
        refuse(1, "no memory: %s", strerror(errno));
    /* No descriptor of dtrun takes the number of a closed standard one. Output to a closed one is an error. */
    do
        fd = open("/dev/null", fcntl(1, F_GETFD) < 0 && fcntl(0, F_GETFD) >= 0 ? O_RDONLY : O_RDWR);
    while (fd >= 0 && fd < 3);
    close(fd);
    parse(&l->o, arguments);
    if (l->o.token_file)
        read_token(l->token, l->o.token_file);
    else
        make_token(l->token);
    catch_signals();
    set_descriptors(l);
    l->first_rank = l->o.node * l->o.local_size;
    l->listener = l->first_failed = -1;
    l->queues[0].fd = l->queues[1].fd = 1;
    if (fstat(1, &out) != 0 || fstat(2, &err) != 0 || out.st_dev != err.st_dev || out.st_ino != err.st_ino)
        l->queues[1].fd = 2;
    start_guard(l);
    set_environment(l);
    while (l->started < l->o.local_size && l->phase == STARTED) {
        start_rank(l, l->started);
        if (l->listener >= 0)
            close(l->listener); /* so that connections to a dead rank 0 are refused */
        l->listener = -1;
        turn(l, 0);
    }
    while (!l->hurry && l->running > 0)
        turn(l, l->phase == STARTED ? 3600000 : l->deadline - now_ms());
    return finish(l);
}

#endif
