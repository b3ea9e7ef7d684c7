/* Two jobs at one root: ranks whose launchers name other jobs stay apart, and the log names who joins where a launcher
 * says nothing. Every rank is a process that learns its place from the environment. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

/* What the ranks of one test's environment share. */
typedef struct job {
    const char *root, *ranks;
} job;

/* Sets what a launcher would; name: of the job, or NULL. */
static void become(const job *j, int rank, const char *name)
{
    char number[8];
    snprintf(number, sizeof number, "%d", rank);
    setenv("DTRAIN_RANK", number, 1);
    setenv("DTRAIN_WORLD_SIZE", j->ranks, 1);
    setenv("DTRAIN_ROOT", j->root, 1);
    setenv("DTRAIN_TIMEOUT_MS", "15000", 1);
    setenv("DTRAIN_TOKEN", "what TCP takes to meet", 1);
    if (name != NULL)
        setenv("DTRAIN_JOB", name, 1);
    else
        unsetenv("DTRAIN_JOB");
}

/* Joins, and works until all ranks have. */
static int joins(const job *j, int rank, const char *name)
{
    int before = test_failures;
    dtrain_comm *world;
    become(j, rank, name);
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    if (world != NULL)
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    else
        TEST_FAIL("%s", dtrain_last_error());
    dtrain_comm_destroy(world);
    return test_failures != before;
}

static pid_t start(const job *j, int rank, const char *name)
{
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0)
        _exit(joins(j, rank, name));
    return pid;
}

/* Comes as a rank of another job, which is no reason to wait. */
static int is_refused(const job *j, int rank, const char *name, const char *text, long root)
{
    int before = test_failures;
    char who[64];
    dtrain_comm *world;
    become(j, rank, name);
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(dtrain_last_error(), text);
    snprintf(who, sizeof who, "rank 0 (pid %ld", root);
    CHECK_CONTAINS(dtrain_last_error(), who);
    snprintf(who, sizeof who, "rank %d (pid %ld", rank, (long)getpid());
    CHECK_CONTAINS(dtrain_last_error(), who);
    CHECK_CONTAINS(dtrain_last_error(), "give each job a root of its own, such as another port");
    dtrain_comm_destroy(world);
    return test_failures != before;
}

static int refused_process(const job *j, int rank, const char *name, const char *text, long root)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(is_refused(j, rank, name, text, root));
    return end_of(pid, 20);
}

static int infos, warnings;
static char lines[4000];

static void keep(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    infos += level == DTRAIN_LOG_INFO;
    warnings += level == DTRAIN_LOG_WARN;
    snprintf(lines + strlen(lines), sizeof lines - strlen(lines), "%s\n", text);
}

/* This process's rank 0, polled from here, so that its log is at hand. */
static dtrain_comm *root_of(const job *j, const char *name)
{
    dtrain_comm *world = NULL;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.progress = DTRAIN_PROGRESS_POLL;
    become(j, 0, name);
    infos = warnings = 0;
    lines[0] = 0;
    dtrain_set_log(keep, NULL);
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    return world;
}

/* Polls until the process has ended; returns its exit status. */
static int poll_beside(dtrain_comm *world, pid_t pid)
{
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0)
        CHECK_EQ(dtrain_comm_poll(world, 1000), DTRAIN_OK);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void until_formed(dtrain_comm *world)
{
    int ready = 0;
    while (!ready && dtrain_comm_ready(world, &ready) == DTRAIN_OK)
        CHECK_EQ(dtrain_comm_poll(world, 1000), DTRAIN_OK);
    CHECK(ready);
}

TEST(a_rank_of_another_job_is_refused_and_the_own_one_joins)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        scene_begin(&s, 2, tcp);
        job j = {s.root, "2"};
        dtrain_comm *world = root_of(&j, "job-1");
        fflush(stdout);
        pid_t other = fork();
        if (other == 0)
            _exit(is_refused(&j, 1, "job-2", ") is of job job-2, rank 0 (", (long)getppid()));
        CHECK_EQ(poll_beside(world, other), 0);
        CHECK_CONTAINS(lines, "(rank 1) was sent away: rank 1 (pid ");
        CHECK_CONTAINS(lines, ") is of job job-2, rank 0 (");
        CHECK_EQ(warnings, 1);
        pid_t one = start(&j, 1, "job-1");
        until_formed(world);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        CHECK_EQ(end_of(one, 20), 0);
        CHECK_EQ(infos, 0); /* their jobs were compared */
        dtrain_comm_destroy(world);
    }
    dtrain_set_log(NULL, NULL);
}

TEST(a_group_that_runs_refuses_another_jobs_rank_at_once)
{
    scene s;
    scene_begin(&s, 3, 0);
    job j = {s.root, "2"}, larger = {s.root, "3"};
    pid_t zero = start(&j, 0, "job-1");
    dtrain_comm *world;
    become(&j, 1, "job-1");
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    dtrain_set_log(NULL, NULL);
    CHECK_EQ(refused_process(&j, 1, "job-2", "is of job job-2", (long)zero), 0);
    CHECK_EQ(refused_process(&larger, 2, "job-2", "is of job job-2", (long)zero), 0); /* and not: of another size */
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(world);
    CHECK_EQ(end_of(zero, 20), 0);
}

TEST(a_rank_that_starts_again_under_its_job_is_admitted)
{
    scene s;
    scene_begin(&s, 3, 0);
    job j = {s.root, "3"};
    dtrain_comm *world = root_of(&j, "job-1");
    pid_t first = start(&j, 1, "job-1");
    while (!CHANNEL(world)->hub->members[1].joined)
        CHECK_EQ(dtrain_comm_poll(world, 1000), DTRAIN_OK);
    kill(first, SIGKILL);
    waitpid(first, NULL, 0);
    while (CHANNEL(world)->hub->members[1].joined)
        CHECK_EQ(dtrain_comm_poll(world, 1000), DTRAIN_OK);
    pid_t one = start(&j, 1, "job-1"), two = start(&j, 2, "job-1");
    until_formed(world);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(end_of(one, 20), 0);
    CHECK_EQ(end_of(two, 20), 0);
    CHECK_EQ(infos + warnings, 0);
    dtrain_comm_destroy(world);
    dtrain_set_log(NULL, NULL);
}

/* What rank 0 logs of a rank 1, where either may have no job's name. */
static void logs(const char *own, const char *others, int expected_infos, int expected_warnings, const char *text)
{
    char who[64], host[64] = "", program[32];
    scene s;
    scene_begin(&s, 2, 0);
    job j = {s.root, "2"};
    dtrain_comm *world = root_of(&j, own);
    pid_t one = start(&j, 1, others);
    until_formed(world);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(end_of(one, 20), 0);
    CHECK_EQ(infos, expected_infos);
    CHECK_EQ(warnings, expected_warnings);
    gethostname(host, sizeof host - 1);
    dtrain__os_program(program, sizeof program);
    CHECK_CONTAINS(program, "(test_job)");
    snprintf(who, sizeof who, "rank 1 is pid %ld (test_job) on %.20s", (long)one, host);
    CHECK_CONTAINS(lines, who);
    CHECK_CONTAINS(lines, text);
    dtrain_comm_destroy(world);
    dtrain_set_log(NULL, NULL);
}

TEST(without_two_names_to_compare_the_log_names_who_joins)
{
    logs(NULL, NULL, 1, 0, "no launcher's job was compared");
    logs("job-1", NULL, 0, 1, "of no launcher's job, and rank 0 of job job-1");
    logs(NULL, "job-2", 0, 1, "of job job-2, and rank 0 of none");
}

/* The handshake of a peer that holds the token and says of its job and process what no launcher would. */
TEST(a_hostile_name_of_a_job_is_bounded_and_made_printable)
{
    dtrain__keys keys[2];
    dtrain__handshake initiator, acceptor;
    memset(keys, 0, sizeof keys);
    memset(&initiator, 0, sizeof initiator);
    memset(&acceptor, 0, sizeof acceptor);
    initiator.fd = acceptor.fd = -1;
    acceptor.state = DTRAIN__HANDSHAKE_HELLO;
    initiator.purpose = DTRAIN__PURPOSE_CONTROL;
    keys[0].rank = 1;
    keys[0].world_size = keys[1].world_size = 2;
    strcpy(keys[1].job, "job-1");
    strcpy(keys[1].name, "pid 1 (root) on alpha");
    CHECK_EQ(dtrain__handshake_begin(&initiator, &keys[0]), 0);
    memcpy(acceptor.in, initiator.out, DTRAIN__HELLO_BYTES);
    dtrain__handshake_take(&acceptor, &keys[1]);
    memcpy(initiator.in, acceptor.out, DTRAIN__CHALLENGE_BYTES);
    dtrain__handshake_take(&initiator, &keys[0]);
    unsigned char *proof = acceptor.in;
    memset(proof, 0x1b, DTRAIN__PROOF_BYTES); /* and nothing that ends a text */
    dtrain__handshake_mac(&keys[0], &initiator, "dtrain initiator", 0, proof + 32, DTRAIN__PROOF_BYTES - 32, proof);
    dtrain__handshake_take(&acceptor, &keys[1]);
    CHECK_EQ(acceptor.state, DTRAIN__HANDSHAKE_PROVED);
    CHECK_EQ(strlen(acceptor.job), DTRAIN__JOB_BYTES - 1);
    CHECK_EQ(strlen(acceptor.name), DTRAIN__NAME_BYTES - 1);
    dtrain__hub hub;
    memset(&hub, 0, sizeof hub);
    hub.size = 2;
    hub.keys = keys[1];
    dtrain__hub_admit(&hub, &acceptor);
    CHECK_EQ(acceptor.error.status, DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(acceptor.error.text, "rank 1 (????");
    CHECK_CONTAINS(acceptor.error.text, "rank 0 (pid 1 (root) on alpha) of job job-1: give each job");
    CHECK(strchr(acceptor.error.text, 0x1b) == NULL);
}

/* Two runs of mpirun on one host: their ids differ at the end alone. */
TEST(long_names_of_jobs_are_told_apart)
{
    dtrain__hub hub;
    dtrain__handshake handshake;
    memset(&hub, 0, sizeof hub);
    memset(&handshake, 0, sizeof handshake);
    handshake.fd = -1;
    handshake.purpose = DTRAIN__PURPOSE_CONTROL;
    hub.size = 2;
    strcpy(handshake.job, "mpi-prterun-node0123.cluster.example.org-4712@1");
    strcpy(hub.keys.job, "mpi-prterun-node0123.cluster.example.org-4711@1");
    dtrain__hub_admit(&hub, &handshake);
    CHECK_EQ(handshake.error.status, DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(handshake.error.text, "-4712@1, rank 0");
    CHECK_CONTAINS(handshake.error.text, "-4711@1: give each job a root of its own, such as another port");
}
