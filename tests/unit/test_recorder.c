/* What a rank remembers of its operations: as a file, in the texts of deadlines, and in other ranks' heartbeats. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#include <sys/resource.h>
#include <sys/stat.h>

typedef struct event {
    char name[64], call[32], text[128], dtype[8], op[16], algorithm[32], status[32], error[700], cat[16];
    uint64_t pid, tid, number, count, bytes, root, peer, awaited, serial;
    uint64_t called_ns, started_ns, moved_ns, ended_ns; /* UINT64_MAX: null */
    int async;
} event;

typedef struct trace {
    uint64_t rank, world_size, group, process, operations, realtime_ns, monotonic_ns;
    char host[64];
    int events;
    event event[300];
} trace;

static char directory[64];

static void remove_directory(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    if (system(command) != 0)
        perror(directory);
}

/* A path in a directory of this program's own. */
static const char *in_directory(const char *name)
{
    static __thread char path[256];
    if (directory[0] == 0) {
        snprintf(directory, sizeof directory, "/tmp/dtrain-recorder-XXXXXX");
        CHECK(mkdtemp(directory) != NULL);
        atexit(remove_directory);
    }
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static int exists(const char *path)
{
    struct stat what;
    return stat(path, &what) == 0;
}

static char *slurp(const char *path, size_t *bytes)
{
    char *text = (char *)calloc(1, 1 << 20);
    FILE *file = fopen(path, "rb");
    *bytes = file != NULL ? fread(text, 1, 1 << 20, file) : 0;
    if (file != NULL)
        fclose(file);
    return text;
}

static void take_text(dtrain__json_reader *reader, dtrain__json_token *token, const char *key, const char *name,
                      char *out, size_t capacity)
{
    if (strcmp(key, name) != 0 || token->kind != DTRAIN__JSON_STRING)
        return;
    size_t bytes = dtrain__json_string(reader, token, out, capacity - 1);
    out[bytes < capacity ? bytes : capacity - 1] = 0;
}

static void take_u64(dtrain__json_reader *reader, dtrain__json_token *token, const char *key, const char *name,
                     uint64_t *out)
{
    if (strcmp(key, name) == 0 && !dtrain__json_u64(reader, token, out))
        *out = UINT64_MAX;
}

static void take_event(dtrain__json_reader *reader, dtrain__json_token *token, const char *key, event *e)
{
    take_text(reader, token, key, "name", e->name, sizeof e->name);
    take_text(reader, token, key, "cat", e->cat, sizeof e->cat);
    take_text(reader, token, key, "call", e->call, sizeof e->call);
    take_text(reader, token, key, "text", e->text, sizeof e->text);
    take_text(reader, token, key, "dtype", e->dtype, sizeof e->dtype);
    take_text(reader, token, key, "op", e->op, sizeof e->op);
    take_text(reader, token, key, "algorithm", e->algorithm, sizeof e->algorithm);
    take_text(reader, token, key, "status", e->status, sizeof e->status);
    take_text(reader, token, key, "error", e->error, sizeof e->error);
    take_u64(reader, token, key, "pid", &e->pid);
    take_u64(reader, token, key, "tid", &e->tid);
    take_u64(reader, token, key, "number", &e->number);
    take_u64(reader, token, key, "count", &e->count);
    take_u64(reader, token, key, "bytes", &e->bytes);
    take_u64(reader, token, key, "root", &e->root);
    take_u64(reader, token, key, "peer", &e->peer);
    take_u64(reader, token, key, "awaited", &e->awaited);
    take_u64(reader, token, key, "serial", &e->serial);
    take_u64(reader, token, key, "called_ns", &e->called_ns);
    take_u64(reader, token, key, "started_ns", &e->started_ns);
    take_u64(reader, token, key, "moved_ns", &e->moved_ns);
    take_u64(reader, token, key, "ended_ns", &e->ended_ns);
    if (strcmp(key, "async") == 0)
        e->async = token->kind == DTRAIN__JSON_TRUE;
}

/* Reads a file back by the library's own strict reader; every "X" event of it. */
static trace *read_trace(const char *path)
{
    trace *t = (trace *)calloc(1, sizeof *t);
    size_t bytes;
    char *text = slurp(path, &bytes), key[32] = "";
    dtrain__json_reader reader;
    dtrain__json_token token;
    event e;
    int depth = 0;
    dtrain__json_open(&reader, text, bytes);
    while (dtrain__json_next(&reader, &token) != DTRAIN__JSON_END && token.kind != DTRAIN__JSON_ERROR) {
        if (token.kind == DTRAIN__JSON_OBJECT && reader.depth == 3)
            memset(&e, 0, sizeof e);
        if (token.kind == DTRAIN__JSON_OBJECT_END && reader.depth == 2 && depth == 3 && e.serial > 0 && t->events < 300)
            t->event[t->events++] = e;
        depth = reader.depth;
        if (token.kind == DTRAIN__JSON_KEY) {
            key[0] = 0;
            size_t n = dtrain__json_string(&reader, &token, key, sizeof key - 1);
            key[n < sizeof key ? n : 0] = 0;
            continue;
        }
        if (depth == 2) {
            take_u64(&reader, &token, key, "rank", &t->rank);
            take_u64(&reader, &token, key, "world_size", &t->world_size);
            take_u64(&reader, &token, key, "group", &t->group);
            take_u64(&reader, &token, key, "process", &t->process);
            take_u64(&reader, &token, key, "operations", &t->operations);
            take_u64(&reader, &token, key, "realtime_ns", &t->realtime_ns);
            take_u64(&reader, &token, key, "monotonic_ns", &t->monotonic_ns);
            take_text(&reader, &token, key, "host", t->host, sizeof t->host);
        } else if (depth > 2) {
            take_event(&reader, &token, key, &e);
        }
    }
    if (token.kind == DTRAIN__JSON_ERROR)
        TEST_FAIL("%s: byte %zu: %s", path, reader.offset, reader.error);
    free(text);
    return t;
}

static dtrain_status some_calls(dtrain_comm *world, void *user)
{
    static float data[2][5000];
    float *x = data[dtrain_comm_rank(world)];
    char name[32];
    dtrain_work *work;
    (void)user;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x, x, 5000, DTRAIN_F32, DTRAIN_MEAN), DTRAIN_OK);
    CHECK_EQ(dtrain_broadcast_async(world, x, 3, DTRAIN_F16, 1, &work), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0)
        CHECK_EQ(dtrain_send(world, x, 7, DTRAIN_U8, 1), DTRAIN_OK);
    else
        CHECK_EQ(dtrain_recv(world, x, 7, DTRAIN_U8, 0), DTRAIN_OK);
    snprintf(name, sizeof name, "calls-%d", dtrain_comm_rank(world));
    CHECK_EQ(dtrain_comm_trace(world, in_directory(name)), DTRAIN_OK);
    return dtrain_barrier(world);
}

static void check_times(const event *e, int moved)
{
    CHECK(e->called_ns > 0 && e->called_ns <= e->started_ns);
    CHECK(e->ended_ns >= e->started_ns && e->ended_ns <= (uint64_t)dtrain__os_now_ns());
    CHECK(moved ? e->moved_ns >= e->started_ns && e->moved_ns <= e->ended_ns : e->moved_ns == UINT64_MAX);
    CHECK(strcmp(e->status, "OK") == 0);
}

TEST(the_file_says_what_each_call_was_and_when)
{
    in_directory("");
    CHECK_EQ(dtrain_run_threads(2, some_calls, NULL, NULL), DTRAIN_OK);
    for (int rank = 0; rank < 2; rank++) {
        trace *t = read_trace(in_directory(rank == 0 ? "calls-0" : "calls-1"));
        event *e = t->event;
        CHECK_EQ(t->rank, rank);
        CHECK_EQ(t->world_size, 2);
        CHECK_EQ(t->group, 0);
        CHECK_EQ(t->process, getpid());
        CHECK(t->host[0] != 0 && t->realtime_ns > 1600000000000000000u && t->monotonic_ns > 0);
        CHECK_EQ(t->operations, 4);
        CHECK_EQ(t->events, 4);
        CHECK(strcmp(e[0].name, "barrier #1") == 0 && strcmp(e[0].cat, "collective") == 0);
        CHECK(strcmp(e[1].name, "all_reduce #2") == 0 && strcmp(e[1].dtype, "F32") == 0);
        CHECK(strcmp(e[1].op, "mean") == 0 && strcmp(e[1].algorithm, "fused") == 0 && !e[1].async);
        CHECK(strcmp(e[1].text, "all_reduce #2 (mean, f32 x 5000)") == 0);
        CHECK_EQ(e[1].count, 5000);
        CHECK_EQ(e[1].bytes, 20000);
        CHECK_EQ(e[1].number, 2);
        CHECK(strcmp(e[2].name, "broadcast #3") == 0 && e[2].async);
        CHECK_EQ(e[2].root, 1);
        CHECK_EQ(e[2].bytes, 6);
        CHECK(strcmp(e[3].name, rank == 0 ? "send #1" : "recv #1") == 0 && strcmp(e[3].cat, "message") == 0);
        CHECK_EQ(e[3].peer, 1 - rank);
        CHECK_EQ(e[3].root, UINT64_MAX);
        for (int i = 0; i < 4; i++) {
            check_times(&e[i], i == 1 || i == 3);
            CHECK_EQ(e[i].serial, i + 1);
            CHECK_EQ(e[i].pid, rank);
            CHECK_EQ(e[i].tid, 0);
        }
        free(t);
    }
}

static dtrain_status a_thousand(dtrain_comm *world, void *user)
{
    float x = 1;
    (void)user;
    for (int i = 0; i < 1000; i++)
        CHECK_EQ(i % 3 == 0 ? dtrain_barrier(world) : dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_MAX), 0);
    if (dtrain_comm_rank(world) == 1)
        CHECK_EQ(dtrain_comm_trace(world, in_directory("thousand")), DTRAIN_OK);
    return dtrain_barrier(world);
}

static void check_thousand(void)
{
    trace *t = read_trace(in_directory("thousand"));
    CHECK_EQ(t->operations, 1000);
    CHECK_EQ(t->events, 256);
    for (int i = 0; i < t->events; i++) {
        CHECK_EQ(t->event[i].number, 745 + i);
        CHECK(strcmp(t->event[i].call, (744 + i) % 3 == 0 ? "barrier" : "all_reduce") == 0);
        CHECK(i == 0 || t->event[i].called_ns >= t->event[i - 1].ended_ns);
    }
    free(t);
}

TEST(of_a_thousand_operations_the_last_256_are_kept_in_order)
{
    in_directory("");
    CHECK_EQ(dtrain_run_threads(2, a_thousand, NULL, NULL), DTRAIN_OK);
    check_thousand();
}

static int a_thousand_on_processes(dtrain_comm *world, scene *s)
{
    (void)s;
    return a_thousand(world, NULL) != DTRAIN_OK;
}

TEST(processes_keep_theirs_as_well)
{
    scene s;
    in_directory("");
    unlink(in_directory("thousand"));
    scene_begin(&s, 2, 0);
    run_ranks(&s, a_thousand_on_processes);
    check_thousand();
}

typedef struct onlooker {
    dtrain_comm *world;
    uint32_t stop;
    int files;
} onlooker;

static void look_on(void *user)
{
    onlooker *o = (onlooker *)user;
    uint32_t last;
    do { /* the last file has what went before the stop */
        last = __atomic_load_n(&o->stop, __ATOMIC_SEQ_CST);
        CHECK_EQ(dtrain_comm_trace(o->world, in_directory("live")), DTRAIN_OK);
        o->files++;
        usleep(1000);
    } while (!last);
}

static dtrain_status busy(dtrain_comm *world, void *user)
{
    static float data[2][20000];
    float *x = data[dtrain_comm_rank(world)];
    onlooker o = {world, 0, 0};
    dtrain__os_thread thread;
    dtrain_work *work[2];
    (void)user;
    if (dtrain_comm_rank(world) == 0)
        CHECK_EQ(dtrain__os_thread_start(&thread, look_on, &o, 0), 0);
    for (int i = 0; i < 300; i++) {
        CHECK_EQ(dtrain_all_reduce_async(world, x, x, 20000, DTRAIN_F32, DTRAIN_MEAN, &work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_all_reduce_async(world, x, x, 1, DTRAIN_F32, DTRAIN_MEAN, &work[1]), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_OK);
    }
    __atomic_store_n(&o.stop, 1, __ATOMIC_SEQ_CST);
    if (dtrain_comm_rank(world) == 0) {
        dtrain__os_thread_join(&thread);
        CHECK(o.files > 0);
    }
    return dtrain_barrier(world);
}

TEST(another_thread_may_write_the_file_while_work_is_under_way)
{
    dtrain_comm_desc desc;
    in_directory("");
    memset(&desc, 0, sizeof desc);
    for (int algorithm = 0; algorithm < 2; algorithm++) {
        desc.algorithm = algorithm == 0 ? DTRAIN_ALGORITHM_AUTO : DTRAIN_ALGORITHM_TREE;
        CHECK_EQ(dtrain_run_threads(2, busy, NULL, &desc), DTRAIN_OK);
        trace *t = read_trace(in_directory("live"));
        CHECK(t->events > 0 && t->events <= 256);
        for (int i = 1; i < t->events; i++)
            CHECK(t->event[i].serial > t->event[i - 1].serial);
        free(t);
    }
}

TEST(a_path_that_cannot_be_written_leaves_what_was_there)
{
    dtrain_comm *world;
    char path[4200];
    size_t bytes;
    CHECK_EQ(dtrain_threads_create(&world, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_trace(NULL, "x"), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_trace(world, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_trace(world, ""), DTRAIN_ERR_INVALID);
    memset(path, 'a', sizeof path);
    path[4096] = 0;
    CHECK_EQ(dtrain_comm_trace(world, path), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "1 to 4095 bytes (got 4096)");
    CHECK_EQ(dtrain_comm_trace(world, in_directory("nowhere/x")), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "nowhere/x: No such file or directory");
    mkdir(in_directory("taken"), 0700);
    CHECK_EQ(dtrain_comm_trace(world, in_directory("taken")), DTRAIN_ERR_IO);
    for (int i = 0; i < 300; i++)
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_trace(world, in_directory("kept")), DTRAIN_OK);
    char *before = slurp(in_directory("kept"), &bytes);
    pid_t child = fork();
    if (child == 0) { /* a disk that is full, by way of a limit; the group is the child's own */
        struct rlimit limit = {20000, 20000};
        dtrain_comm *own;
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        int bad = dtrain_comm_trace(world, in_directory("kept")) != DTRAIN_ERR_INVALID; /* the parent's */
        bad |= dtrain_threads_create(&own, 1, NULL) != DTRAIN_OK;
        for (int i = 0; i < 300; i++)
            bad |= dtrain_barrier(own) != DTRAIN_OK;
        bad |= dtrain_comm_trace(own, in_directory("kept")) != DTRAIN_ERR_IO;
        bad |= strstr(dtrain_last_error(), "File too large; the old file is unchanged") == NULL;
        _exit(bad);
    }
    CHECK_EQ(end_of(child, 30), 0);
    size_t again;
    char *after = slurp(in_directory("kept"), &again);
    CHECK(bytes == again && memcmp(before, after, bytes) == 0);
    snprintf(path, sizeof path, "test \"$(ls -A %s | grep -c tmp)\" = 0", directory);
    CHECK_EQ(system(path), 0);
    free(before);
    free(after);
    dtrain_comm_destroy(world);
}

TEST(texts_that_are_no_json_are_made_so)
{
    dtrain_comm *world;
    CHECK_EQ(dtrain_threads_create(&world, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    world->recorder->failed = 1;
    dtrain__fail(&world->recorder->error, DTRAIN_ERR_IO, "%s", "a\"b\\c\n\x01\xff\xc3\xa9\xe2\x82");
    CHECK_EQ(dtrain_comm_trace(world, in_directory("hostile")), DTRAIN_OK);
    trace *t = read_trace(in_directory("hostile"));
    CHECK(strcmp(t->event[0].error, "a\"b\\c???\xc3\xa9??") == 0);
    memset(world->recorder->error.text, '"', sizeof world->recorder->error.text - 1);
    CHECK_EQ(dtrain_comm_trace(world, in_directory("hostile")), DTRAIN_OK);
    free(t);
    t = read_trace(in_directory("hostile"));
    CHECK_EQ(strlen(t->event[0].error), DTRAIN__ERROR_BYTES - 1);
    free(t);
    dtrain_comm_destroy(world);
}

static dtrain_status mismatched_twice(dtrain_comm *world, void *user)
{
    float x = 1;
    (void)user;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    for (int i = 0; i < 2; i++) {
        dtrain_status status = dtrain_comm_rank(world) == 0
                                   ? dtrain_broadcast(world, &x, 1, DTRAIN_F32, 0)
                                   : dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM);
        CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(dtrain_last_error(), "both must make the same calls"); /* writing the file changes no error */
    }
    return dtrain_barrier(world);
}

TEST(the_first_failure_writes_a_file_a_rank_by_itself)
{
    dtrain_comm_desc desc;
    char prefix[256];
    in_directory("");
    memset(&desc, 0, sizeof desc);
    snprintf(prefix, sizeof prefix, "%s", in_directory("failed"));
    desc.trace_on_failure = prefix;
    CHECK_EQ(dtrain_run_threads(2, mismatched_twice, NULL, &desc), DTRAIN_OK);
    for (int rank = 0; rank < 2; rank++) {
        trace *t = read_trace(in_directory(rank == 0 ? "failed.rank-0.json" : "failed.rank-1.json"));
        CHECK_EQ(t->events, 2); /* once: the second failure is not in it */
        CHECK(strcmp(t->event[0].status, "OK") == 0 && t->event[0].error[0] == 0);
        CHECK(strcmp(t->event[1].status, "ERR_MISMATCH") == 0);
        CHECK_CONTAINS(t->event[1].error, "all_reduce #2 (sum, f32 x 1)");
        CHECK_CONTAINS(t->event[1].error, "broadcast #2 (f32 x 1, root 0)");
        free(t);
    }
    setenv("DTRAIN_TRACE", in_directory("environment"), 1);
    CHECK_EQ(dtrain_run_threads(2, mismatched_twice, NULL, NULL), DTRAIN_OK);
    unsetenv("DTRAIN_TRACE");
    CHECK(exists(in_directory("environment.rank-0.json")) && exists(in_directory("environment.rank-1.json")));
}

typedef struct listener {
    pthread_mutex_t mutex;
    char text[2000];
} listener;

static void hear(void *user, dtrain_log_level level, const char *text)
{
    listener *l = (listener *)user;
    (void)level;
    pthread_mutex_lock(&l->mutex);
    strncat(l->text, text, sizeof l->text - strlen(l->text) - 1);
    strncat(l->text, "\n", sizeof l->text - strlen(l->text) - 1);
    pthread_mutex_unlock(&l->mutex);
}

static listener heard = {PTHREAD_MUTEX_INITIALIZER, ""};

TEST(a_failure_file_that_cannot_be_written_is_a_line_in_the_log)
{
    dtrain_comm_desc desc;
    dtrain_comm *world;
    char prefix[4200];
    in_directory("");
    memset(&desc, 0, sizeof desc);
    snprintf(prefix, sizeof prefix, "%s", in_directory("nowhere/x"));
    desc.trace_on_failure = prefix;
    heard.text[0] = 0;
    dtrain_set_log(hear, &heard);
    CHECK_EQ(dtrain_run_threads(2, mismatched_twice, NULL, &desc), DTRAIN_OK);
    dtrain_set_log(dtrain__log_stderr, NULL);
    CHECK_CONTAINS(heard.text, "nowhere/x.rank-0.json: No such file");
    CHECK_CONTAINS(heard.text, "nowhere/x.rank-1.json: No such file");
    memset(prefix, 'a', sizeof prefix - 1);
    prefix[sizeof prefix - 1] = 0;
    CHECK_EQ(dtrain_threads_create(&world, 1, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "desc.trace_on_failure has 4199 bytes; expected at most 4095");
}

/* Rank 2 stays away after a barrier; 1 waits for 2 in a message, 0 for 1, and 0's deadline comes first. */
static dtrain_status a_chain(dtrain_comm *world, void *user)
{
    float x[4] = {0};
    int rank = dtrain_comm_rank(world);
    int late_us = *(int *)user;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 2) {
        usleep((useconds_t)(5 * late_us));
        CHECK_EQ(dtrain_send(world, x, 4, DTRAIN_F32, 1), DTRAIN_OK);
    } else if (rank == 1) {
        usleep((useconds_t)late_us);
        dtrain_status status;
        while ((status = dtrain_recv(world, x, 4, DTRAIN_F32, 2)) == DTRAIN_ERR_TIMEOUT)
            continue;
        CHECK_EQ(status, DTRAIN_OK);
        CHECK_EQ(dtrain_send(world, x, 4, DTRAIN_F32, 0), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_recv(world, x, 4, DTRAIN_F32, 1), DTRAIN_ERR_TIMEOUT);
        CHECK_CONTAINS(dtrain_last_error(), "recv #1 (f32 x 4): rank 0 waited ");
        CHECK_CONTAINS(dtrain_last_error(), " s for rank 1; rank 1 is in recv #1 (f32 x 4) since ");
        CHECK_CONTAINS(dtrain_last_error(), ", waiting for rank 2; rank 2 ended barrier #1 ");
        CHECK_CONTAINS(dtrain_last_error(), " s ago and has called nothing since");
        CHECK_CONTAINS(dtrain_last_error(), "nothing had moved, so the call can be made again");
        while (dtrain_recv(world, x, 4, DTRAIN_F32, 1) == DTRAIN_ERR_TIMEOUT)
            continue;
    }
    return DTRAIN_OK;
}

TEST(a_deadline_follows_the_ranks_that_wait_for_each_other_on_threads)
{
    dtrain_comm_desc desc;
    int late_us = 600000;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 1200;
    heard.text[0] = 0;
    dtrain_set_log(hear, &heard);
    CHECK_EQ(dtrain_run_threads(3, a_chain, &late_us, &desc), DTRAIN_OK);
    dtrain_set_log(dtrain__log_stderr, NULL);
    CHECK_CONTAINS(heard.text, "recv #1 (f32 x 4): rank 0 has waited 0.");
    CHECK_CONTAINS(heard.text, " s for rank 1; rank 1 ended barrier #1 ");
}

/* Of two that wait for rank 2, one expires first, and the other may then find only that one's post gone. */
static dtrain_status without_rank_2(dtrain_comm *world, void *user)
{
    float x = 1;
    dtrain_status status = DTRAIN_ERR_TIMEOUT;
    (void)user;
    if (dtrain_comm_rank(world) < 2) {
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_TIMEOUT);
        CHECK_CONTAINS(dtrain_last_error(),
                       "; rank 2 has called nothing yet; nothing had moved, so the call can be made");
        usleep(400000);
    } else {
        usleep(1000000);
    }
    while (status == DTRAIN_ERR_TIMEOUT)
        status = dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM);
    return status;
}

TEST(every_rank_that_expires_names_the_one_that_stays_away)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 400;
    CHECK_EQ(dtrain_run_threads(3, without_rank_2, NULL, &desc), DTRAIN_OK);
}

static int a_chain_of_processes(dtrain_comm *world, scene *s)
{
    int late_us = 1200000;
    (void)s;
    return a_chain(world, &late_us) != DTRAIN_OK;
}

TEST(heartbeats_carry_what_a_deadline_says_between_processes)
{
    scene s;
    scene_begin(&s, 3, 0);
    s.desc.timeout_ms = 4000;
    run_ranks(&s, a_chain_of_processes);
}

/* Neither call sends anything that the other takes: only what each does tells the other. */
static dtrain_status contradicting_calls(dtrain_comm *world, void *user)
{
    float x[4] = {0};
    dtrain_status status;
    (void)user;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0)
        status = dtrain_all_reduce(world, x, x, 4, DTRAIN_F32, DTRAIN_SUM);
    else
        status = dtrain_recv(world, x, 4, DTRAIN_F32, 0);
    usleep(300000); /* the other one's deadline comes at about the same time, and this rank should still be there */
    CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(world->error.text, "all_reduce #2 (sum, f32 x 4)");
    CHECK_CONTAINS(world->error.text, "recv #1 (f32 x 4)");
    CHECK_CONTAINS(world->error.text, "both must make the same calls in the same order");
    return DTRAIN_OK;
}

TEST(calls_of_which_no_message_meets_are_a_mismatch_at_the_deadline_on_threads)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 400;
    CHECK_EQ(dtrain_run_threads(2, contradicting_calls, NULL, &desc), DTRAIN_OK);
}

static int contradicting_processes(dtrain_comm *world, scene *s)
{
    (void)s;
    return contradicting_calls(world, NULL) != DTRAIN_OK;
}

TEST(calls_of_which_no_message_meets_are_a_mismatch_at_the_deadline_on_processes)
{
    scene s;
    char prefix[256];
    for (int rank = 0; rank < 2; rank++)
        unlink(in_directory(rank == 0 ? "processes.rank-0.json" : "processes.rank-1.json"));
    snprintf(prefix, sizeof prefix, "%s", in_directory("processes"));
    scene_begin(&s, 2, 1);
    s.desc.timeout_ms = 3500;
    s.desc.algorithm = DTRAIN_ALGORITHM_TREE; /* in which rank 0 hears rank 1 before it speaks */
    s.desc.trace_on_failure = prefix;
    run_ranks(&s, contradicting_processes);
    trace *t = read_trace(in_directory("processes.rank-0.json"));
    CHECK_EQ(t->events, 2);
    CHECK(strcmp(t->event[1].status, "ERR_MISMATCH") == 0);
    CHECK_EQ(t->event[1].awaited, 1);
    CHECK(exists(in_directory("processes.rank-1.json")));
    free(t);
}

/* A heartbeat whose last part is cut, too long, or of a rank that it cannot speak for. */
TEST(what_a_heartbeat_says_of_a_rank_is_checked)
{
    dtrain__hub hub;
    dtrain__member members[3];
    unsigned char frame[16 + 14 + DTRAIN__LAST_BYTES];
    memset(&hub, 0, sizeof hub);
    memset(members, 0, sizeof members);
    memset(frame, 0, sizeof frame);
    hub.size = 3;
    hub.members = members;
    dtrain__put_le(frame + 16, 2, 4);
    dtrain__put_le(frame + 20, 3, 4);
    dtrain__put_le(frame + 24, 100, 4);
    dtrain__put_le(frame + 28, DTRAIN__LAST_BYTES, 2);
    CHECK(dtrain__hub_frame(&hub, 2, DTRAIN__FRAME_BEAT, frame, sizeof frame));
    CHECK_EQ(members[2].last->bytes, DTRAIN__LAST_BYTES);
    CHECK_EQ(members[2].last->awaits, 2);
    CHECK(!dtrain__hub_frame(&hub, 1, DTRAIN__FRAME_BEAT, frame, sizeof frame)); /* rank 1 speaks for itself only */
    for (size_t bytes = 17; bytes < sizeof frame; bytes++)
        CHECK(!dtrain__hub_frame(&hub, 2, DTRAIN__FRAME_BEAT, frame, bytes));
    CHECK(dtrain__hub_frame(&hub, 2, DTRAIN__FRAME_BEAT, frame, 16));
    dtrain__put_le(frame + 20, 4, 4);
    CHECK(!dtrain__hub_frame(&hub, 2, DTRAIN__FRAME_BEAT, frame, sizeof frame));
    dtrain__put_le(frame + 20, 3, 4);
    dtrain__put_le(frame + 16, 3, 4);
    CHECK(!dtrain__hub_frame(&hub, 2, DTRAIN__FRAME_BEAT, frame, sizeof frame));
    dtrain__put_le(frame + 16, 2, 4);
    dtrain__put_le(frame + 28, DTRAIN__LAST_BYTES + 1, 2);
    CHECK(!dtrain__hub_frame(&hub, 2, DTRAIN__FRAME_BEAT, frame, sizeof frame));
}
