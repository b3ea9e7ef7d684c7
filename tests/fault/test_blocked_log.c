/* Where the library's lines go blocks for ever: a pipe that nobody reads, a callback, a file system that hangs. The
 * ranks go on. */
#define _GNU_SOURCE
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>
#endif

static const char zeros[4096];

/* Makes stderr a pipe that is full. Returns the end to read. */
static int full_stderr(void)
{
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    dup2(ends[1], 2);
    close(ends[1]);
    fcntl(2, F_SETFL, O_NONBLOCK);
    while (write(2, zeros, sizeof zeros) > 0)
        continue;
    while (write(2, zeros, 1) > 0)
        continue;
    fcntl(2, F_SETFL, 0);
    return ends[0];
}

static void blocks(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
    for (;;)
        pause();
}

/* Trains while a stranger comes, whom rank 0's service thread has a line about. */
static int trains_beside_a_stranger(dtrain_comm *world, scene *s)
{
    if (dtrain_comm_rank(world) == 0 && s->user == NULL)
        full_stderr();
    scene_meet(3);
    for (int i = 0; i < 40; i++) {
        int one = 1;
        dtrain_status status = dtrain_all_reduce(world, &one, &one, 1, DTRAIN_I32, DTRAIN_SUM);
        if (status != DTRAIN_OK)
            return 10 + (int)status; /* stderr may be full */
        usleep(50000);
    }
    return 0;
}

static int rank_beside_a_stranger(scene *s, int rank)
{
    if (rank == 0 && s->user != NULL)
        dtrain_set_log(blocks, NULL);
    return rank_main(s, rank, trains_beside_a_stranger);
}

static void stranger_comes(int callback)
{
    scene s;
    pid_t pids[2];
    dtrain_comm *world;
    scene_begin(&s, 2, 1);
    s.desc.heartbeat_ms = test_ms(1000);
    s.user = callback ? &s : NULL;
    fflush(NULL);
    for (int rank = 0; rank < 2; rank++)
        if ((pids[rank] = fork()) == 0)
            exit(rank_beside_a_stranger(&s, rank));
    scene_meet(3);
    dtrain_comm_desc desc = scene_desc(&s, 1);
    desc.token = "not the token of the group";
    desc.timeout_ms = 300;
    CHECK(dtrain_comm_create(&world, &desc) != DTRAIN_OK);
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(end_of(pids[rank], 15), 0);
}

TEST(a_full_pipe_at_stderr_loses_no_rank_and_holds_no_destroy)
{
    stranger_comes(0);
}

TEST(a_callback_that_blocks_loses_no_rank_and_holds_no_destroy)
{
    stranger_comes(1);
}

/* Of 40 lines 32 wait. The rest are counted, and an exit brings out what it can. */
TEST(lines_beyond_the_buffer_are_counted)
{
    int ends[2];
    char text[40000], *at = text;
    CHECK_EQ(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        int reads = full_stderr();
        for (int i = 0; i < 40; i++)
            dtrain__log(DTRAIN_LOG_WARN, "line %d", i);
        for (ssize_t n = 0; n < 65536;)
            n += read(reads, text, 4096); /* what was in the pipe */
        fcntl(reads, F_SETFL, O_NONBLOCK);
        dtrain__log_flush(5000000000);
        ssize_t n = read(reads, text, sizeof text);
        CHECK(n > 0 && write(ends[1], text, n > 0 ? (size_t)n : 0) == n);
        exit(0);
    }
    close(ends[1]);
    CHECK_EQ(end_of(pid, 15), 0);
    ssize_t n = read(ends[0], text, sizeof text - 1);
    CHECK(n > 0);
    text[n > 0 ? n : 0] = 0;
    for (char *zero = text; zero < text + n; zero++)
        *zero = *zero != 0 ? *zero : ' ';
    for (int i = 0; i < 32; i++) {
        char line[40];
        snprintf(line, sizeof line, "dtrain: line %d\n", i);
        at = at != NULL ? strstr(at, line) : NULL;
        CHECK(at != NULL);
    }
    CHECK(strstr(text, "line 32") == NULL);
    CHECK(at != NULL && strstr(at, "dtrain: 8 lines are not shown") != NULL);
    close(ends[0]);
}

TEST(an_exit_does_not_wait_for_a_pipe_that_nobody_reads)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        full_stderr();
        dtrain__log(DTRAIN_LOG_WARN, "nobody reads this");
        exit(7);
    }
    CHECK_EQ(end_of(pid, 10), 7);
}

static void counts(void *user, dtrain_log_level level, const char *text)
{
    (void)level;
    __atomic_add_fetch((int *)user, 1, __ATOMIC_SEQ_CST);
    if (strcmp(text, "outer") == 0)
        dtrain__log(DTRAIN_LOG_INFO, "inner");
}

/* A callback may log itself; a forked child has a log of its own. */
TEST(lines_come_from_callbacks_and_from_forked_children)
{
    int count = 0;
    dtrain_set_log(counts, &count);
    dtrain__log(DTRAIN_LOG_INFO, "outer");
    dtrain__log_flush(5000000000);
    CHECK_EQ(__atomic_load_n(&count, __ATOMIC_SEQ_CST), 2);
    pid_t pid = fork();
    if (pid == 0) {
        dtrain__log(DTRAIN_LOG_INFO, "in the child");
        dtrain__log_flush(5000000000);
        exit(__atomic_load_n(&count, __ATOMIC_SEQ_CST));
    }
    CHECK_EQ(end_of(pid, 10), 3);
    dtrain_set_log(dtrain__log_stderr, NULL);
}

#ifdef __linux__
/* Mounts a file system that never answers, seen by this process alone. Returns whether the system allows it. */
static int hangs_at(const char *path)
{
    char options[100];
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    return fd >= 0 && unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("hangs", path, "fuse", 0, options) == 0;
}

static int fails_and_goes_on(dtrain_comm *world, scene *s)
{
    int one = 1;
    (void)s;
    dtrain_work *work = NULL;
    CHECK_EQ(dtrain_comm_rank(world) == 0 ? dtrain_all_reduce_async(world, &one, &one, 1, DTRAIN_I32, DTRAIN_SUM, &work)
                                          : dtrain_broadcast_async(world, &one, 1, DTRAIN_I32, 0, &work),
             DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_MISMATCH);
    return 0;
}

/* The service thread meets the failure. Its heartbeats go on, and no destroy waits for ever. */
TEST(the_trace_of_a_failure_on_a_file_system_that_hangs_holds_nobody)
{
    scene s;
    pid_t pids[2];
    char prefix[100];
    scene_begin(&s, 2, 0);
    snprintf(prefix, sizeof prefix, "%s/m", scene_directory);
    CHECK_EQ(mkdir(prefix, 0700), 0);
    fflush(NULL);
    for (int rank = 0; rank < 2; rank++)
        if ((pids[rank] = fork()) == 0) {
            if (!hangs_at(prefix))
                _exit(99);
            strcat(prefix, "/trace");
            s.desc.trace_on_failure = prefix;
            dtrain_set_log(quiet, NULL);
            _exit(rank_main(&s, rank, fails_and_goes_on));
        }
    int first = end_of(pids[0], 20), second = end_of(pids[1], 20);
    if (first == 99 || second == 99)
        printf("skipped: mounting a file system that hangs takes root and /dev/fuse\n");
    else
        CHECK(first == 0 && second == 0);
    rmdir(prefix);
}
#endif

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static int through;

static void takes_long(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
    usleep(200000);
}

static void takes_the_gate(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
    pthread_mutex_lock(&gate);
    through++;
    pthread_mutex_unlock(&gate);
}

TEST(setting_the_log_waits_for_the_old_callback_alone)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dtrain_set_log(takes_long, NULL);
        for (int i = 0; i < 10; i++) /* they take longer than this call waits for late lines */
            dtrain__log(DTRAIN_LOG_WARN, "line %d", i);
        pthread_mutex_lock(&gate);
        dtrain_set_log(takes_the_gate, NULL);
        pthread_mutex_unlock(&gate);
        dtrain_set_log(NULL, NULL);
        _exit(through > 0 ? 0 : 1);
    }
    CHECK_EQ(end_of(pid, 20), 0);
}
