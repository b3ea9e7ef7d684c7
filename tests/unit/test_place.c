/* Where a process believes it stands, by desc and by each launcher's variables; HMAC-SHA256 by its standard. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#ifndef _WIN32
#include <sys/wait.h>
#endif

static const char *const variables[] = {"DTRAIN_RANK",
                                        "DTRAIN_WORLD_SIZE",
                                        "DTRAIN_ROOT",
                                        "DTRAIN_TOKEN",
                                        "DTRAIN_TOKEN_FILE",
                                        "DTRAIN_INTERFACE",
                                        "DTRAIN_INSECURE",
                                        "DTRAIN_SECURE",
                                        "DTRAIN_TIMEOUT_MS",
                                        "DTRAIN_LISTEN_FD",
                                        "RANK",
                                        "WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_JOB_NODELIST",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_JOB_ID",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "OMPI_MCA_ess_base_jobid",
                                        "PMIX_NAMESPACE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALNRANKS",
                                        "JOB_COMPLETION_INDEX",
                                        "TORCHELASTIC_USE_AGENT_STORE",
                                        "DTRAIN_JOB",
                                        "TORCHELASTIC_RUN_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_HET_SIZE",
                                        "SLURM_NNODES",
                                        "SLURM_JOB_NUM_NODES",
                                        "PMI_JOBID"};

/* Clears the environment of all launchers, then sets name, value, name, value, ..., NULL. */
static void environment(const char *name, ...)
{
    va_list arguments;
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++)
        unsetenv(variables[i]);
    va_start(arguments, name);
    for (; name != NULL; name = va_arg(arguments, const char *))
        setenv(name, va_arg(arguments, const char *), 1);
    va_end(arguments);
}

static dtrain__place read_place(dtrain_status expected)
{
    dtrain_comm_desc desc;
    dtrain__place place;
    memset(&desc, 0, sizeof desc);
    CHECK_EQ(dtrain__place_read(&place, &desc), expected);
    return place;
}

static void stands(int rank, int world_size, const char *root)
{
    dtrain__place place = read_place(DTRAIN_OK);
    CHECK_EQ(place.keys.rank, rank);
    CHECK_EQ(place.keys.world_size, world_size);
    if (strcmp(place.root, root) != 0)
        TEST_FAIL("the root is \"%s\", expected \"%s\"", place.root, root);
}

static void refused(const char *text)
{
    read_place(DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), text);
}

TEST(without_a_launcher_it_is_a_world_of_one)
{
    environment(NULL);
    stands(0, 1, "");
    environment("RANK", "5", NULL); /* a name too common to mean anything alone */
    stands(0, 1, "");
    environment("DTRAIN_WORLD_SIZE", "1", NULL);
    stands(0, 1, "");
}

TEST(dtrain_variables_come_first)
{
    environment("DTRAIN_RANK", "2", "DTRAIN_WORLD_SIZE", "4", "DTRAIN_ROOT", "10.0.0.1:29500", "RANK", "0",
                "WORLD_SIZE", "9", "MASTER_ADDR", "elsewhere", "MASTER_PORT", "1", NULL);
    stands(2, 4, "10.0.0.1:29500");
    CHECK_CONTAINS(read_place(DTRAIN_OK).believed, "DTRAIN_RANK=2 DTRAIN_WORLD_SIZE=4");
    environment("DTRAIN_RANK", "2", NULL);
    refused("DTRAIN_RANK=2 is set and DTRAIN_WORLD_SIZE is not");
    environment("DTRAIN_WORLD_SIZE", "4", NULL);
    refused("set DTRAIN_RANK");
    environment("DTRAIN_RANK", "1", "DTRAIN_WORLD_SIZE", "2", NULL);
    refused("set DTRAIN_ROOT=host:port");
    environment("DTRAIN_RANK", "4", "DTRAIN_WORLD_SIZE", "4", "DTRAIN_ROOT", "a:1", NULL);
    refused("DTRAIN_RANK=4: expected a number from 0 to 3");
    environment("DTRAIN_RANK", "one", "DTRAIN_WORLD_SIZE", "4", "DTRAIN_ROOT", "a:1", NULL);
    refused("DTRAIN_RANK=one: expected a number");
    environment("DTRAIN_RANK", "0", "DTRAIN_WORLD_SIZE", "4x", "DTRAIN_ROOT", "a:1", NULL);
    refused("DTRAIN_WORLD_SIZE=4x");
}

TEST(torchrun_gives_all_four)
{
    environment("RANK", "3", "WORLD_SIZE", "4", "MASTER_ADDR", "node0", "MASTER_PORT", "29501", NULL);
    stands(3, 4, "node0:29501");
    environment("RANK", "3", "WORLD_SIZE", "4", "MASTER_ADDR", "fd00::7", "MASTER_PORT", "29501", NULL);
    stands(3, 4, "[fd00::7]:29501");
    environment("RANK", "3", "WORLD_SIZE", "4", "MASTER_ADDR", "node0", NULL);
    refused("set MASTER_PORT");
    environment("RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "n", "MASTER_PORT", "29501x", NULL);
    refused("MASTER_PORT=29501x");
    environment("RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "n", "MASTER_PORT", "29501",
                "TORCHELASTIC_USE_AGENT_STORE", "True", NULL); /* torchrun's agent listens at 29501 */
    stands(1, 2, "n:29502");
    environment("RANK", "3", "WORLD_SIZE", "4", NULL);
    refused("set DTRAIN_ROOT=host:port, the same on every rank");
}

TEST(slurm_gives_ranks_and_the_first_node)
{
    environment("SLURM_PROCID", "5", "SLURM_NTASKS", "8", "SLURM_JOB_NODELIST", "gpu-[007-009,12]-x,b", "SLURM_JOB_ID",
                "123456", NULL);
    stands(5, 8, "gpu-007-x:18456");
    environment("SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "8", "SLURM_STEP_NODELIST", "alpha,beta", "SLURM_JOB_ID",
                "7", "SLURM_JOB_NODELIST", "other", NULL);
    stands(5, 8, "alpha:15007");
    environment("SLURM_PROCID", "5", "SLURM_NTASKS", "8", "MASTER_ADDR", "m", "MASTER_PORT", "1234", NULL);
    stands(5, 8, "m:1234");
    environment("SLURM_PROCID", "5", "SLURM_NTASKS", "8", NULL);
    refused("set DTRAIN_ROOT");
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "1", NULL);
    stands(0, 1, "");
}

TEST(a_slurm_batch_script_without_srun_is_a_world_of_one_or_told_of_srun)
{
    environment("SLURM_PROCID", "0", "SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "a", "SLURM_NNODES", "1", NULL);
    stands(0, 1, "");
    CHECK(read_place(DTRAIN_OK).alone);
    environment("SLURM_PROCID", "0", "SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "a", "SLURM_NTASKS", "4", NULL);
    refused("start the program with srun");
    CHECK_CONTAINS(dtrain_last_error(), "SLURM_NTASKS=4");
    setenv("DTRAIN_ROOT", "a:5", 1); /* a root does not make it a rank */
    refused("start the program with srun");
    setenv("DTRAIN_WORLD_SIZE", "1", 1);
    stands(0, 1, "");
    environment("SLURM_PROCID", "0", "SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "a,b", "SLURM_JOB_NUM_NODES", "2",
                NULL);
    refused("SLURM_JOB_NUM_NODES=2"); /* srun starts one task on each */
    environment("SLURM_PROCID", "0", "SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "a", "SLURM_NTASKS", "4",
                "SLURM_STEP_ID", "0", NULL);
    stands(0, 4, "a:15007");
}

TEST(the_steps_of_a_slurm_job_have_ports_and_sizes_of_their_own)
{
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "8", "SLURM_STEP_NUM_TASKS", "2", "SLURM_JOB_ID", "7",
                "SLURM_STEP_NODELIST", "a", "SLURM_STEP_ID", "0", NULL);
    stands(0, 2, "a:15007");
    setenv("SLURM_STEP_ID", "1", 1);
    stands(0, 2, "a:15108");
    setenv("SLURM_STEP_ID", "4294967290", 1); /* the step of an interactive shell: 7 + 7290 x 101 = 736297 */
    stands(0, 2, "a:21297");
}

TEST(mpirun_inside_a_slurm_job_says_more_than_the_job)
{
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "4", "OMPI_COMM_WORLD_RANK", "3", "OMPI_COMM_WORLD_SIZE", "4",
                "DTRAIN_ROOT", "m:1234", NULL);
    stands(3, 4, "m:1234");
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "4", "PMI_RANK", "3", "PMI_SIZE", "4", "MPI_LOCALNRANKS", "2",
                "DTRAIN_ROOT", "m:1234", NULL);
    stands(3, 4, "m:1234");
    environment("SLURM_PROCID", "2", "SLURM_NTASKS", "4", "PMI_RANK", "2", "PMI_SIZE", "4", "SLURM_JOB_ID", "7",
                "SLURM_JOB_NODELIST", "alpha,beta", NULL); /* srun --mpi=pmi2 */
    stands(2, 4, "alpha:15007");
}

TEST(without_unix_sockets_open_mpi_meets_at_a_port_that_the_job_gives)
{
    dtrain__net_has(AF_UNIX);
    uint32_t before = dtrain__os_without_mask;
    dtrain__os_without_mask = 0; /* the environment is read again */
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_SIZE", "4",
                "PMIX_NAMESPACE", "ab", "DTRAIN_WITHOUT", "unix", NULL);
    stands(1, 4, "127.0.0.1:18105"); /* 97 x 31 + 98 */
    unsetenv("DTRAIN_WITHOUT");
    dtrain__os_without_mask = before;
}

/* Open MPI says that all ranks are on this host. The name of the job, cut to its end, is that of the root. */
static void meets_at(const char *directory, const char *at)
{
    char expected[160];
    struct stat what;
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_SIZE", "4",
                "PMIX_NAMESPACE", "prterun-a@1", "TMPDIR", directory, NULL);
    snprintf(expected, sizeof expected, "unix:%s%s/dtrain-%lu/prterun_a_1", at, directory, (unsigned long)getuid());
    stands(1, 4, expected);
    setenv("PMIX_NAMESPACE", "prterun-a-host-with-a-long-name.cluster.example.org-123456@1", 1);
    snprintf(expected, sizeof expected, "unix:%s%s/dtrain-%lu/me_cluster_example_org_123456_1", at, directory,
             (unsigned long)getuid()); /* the end of a long name, which tells jobs apart */
    stands(1, 4, expected);
    *strrchr(expected, '/') = 0;
    if (*at == 0) {
        CHECK(lstat(expected + 5, &what) == 0 && (what.st_mode & 0777) == 0700);
        CHECK_EQ(chmod(expected + 5, 0755), 0); /* others might have put their socket there */
        read_place(DTRAIN_ERR_DENIED);
        CHECK_CONTAINS(dtrain_last_error(), "nobody else may enter");
        rmdir(expected + 5);
    }
    setenv("TMPDIR", "/a/directory/whose/name/is/too/long/for/the/path/of/a/socket/in/it", 1);
    snprintf(expected, sizeof expected, "unix:%s/tmp/dtrain-%lu/%s", at, (unsigned long)getuid(),
             "me_cluster_example_org_123456_1");
    stands(1, 4, expected);
    unsetenv("TMPDIR");
}

TEST(open_mpi_meets_by_a_socket_of_its_own_on_one_host)
{
    if (!dtrain__net_has(AF_UNIX)) {
        printf("skipped: no unix sockets here\n");
        return;
    }
    char directory[] = "/tmp/test-place-XXXXXX";
    const char *without = getenv("DTRAIN_WITHOUT");
    CHECK(mkdtemp(directory) != NULL);
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", NULL);
    refused("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4) does not know where rank 0 is: set DTRAIN_ROOT");
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_SIZE", "2", NULL);
    refused("set DTRAIN_ROOT");
    meets_at(directory, dtrain__net_has_names() ? "@" : "");
    if (without == NULL) {
        uint32_t before = dtrain__os_without_mask;
        setenv("DTRAIN_WITHOUT", "abstract", 1);
        dtrain__os_without_mask = 0; /* the environment is read again */
        meets_at(directory, "");
        unsetenv("DTRAIN_WITHOUT");
        dtrain__os_without_mask = before;
    }
    rmdir(directory);
}

TEST(pmi_and_kubernetes_give_what_they_have)
{
    environment("PMI_RANK", "1", "PMI_SIZE", "2", NULL);
    refused("PMI_RANK=1 PMI_SIZE=2");
    environment("PMI_RANK", "1", "PMI_SIZE", "2", "DTRAIN_ROOT", "h:5", NULL);
    stands(1, 2, "h:5");
    environment("PMI_RANK", "1", NULL);
    refused("PMI_SIZE is not; set both");
    environment("JOB_COMPLETION_INDEX", "2", NULL);
    refused("this is a pod of an indexed job; set DTRAIN_WORLD_SIZE and DTRAIN_ROOT");
    environment("JOB_COMPLETION_INDEX", "2", "DTRAIN_WORLD_SIZE", "3", NULL);
    refused("set DTRAIN_ROOT");
    environment("JOB_COMPLETION_INDEX", "2", "DTRAIN_WORLD_SIZE", "3", "DTRAIN_ROOT", "job-0.svc:29500", NULL);
    stands(2, 3, "job-0.svc:29500");
    environment("JOB_COMPLETION_INDEX", "2", "DTRAIN_WORLD_SIZE", "1", NULL);
    stands(0, 1, "");
}

static void is_of_job(const char *expected)
{
    dtrain__place place = read_place(DTRAIN_OK);
    if (strcmp(place.keys.job, expected) != 0)
        TEST_FAIL("the job is \"%s\", expected \"%s\"", place.keys.job, expected);
}

TEST(a_rank_is_of_the_job_that_its_launcher_names)
{
    environment("RANK", "1", "WORLD_SIZE", "2", "DTRAIN_ROOT", "h:5", "TORCHELASTIC_RUN_ID", "none", NULL);
    is_of_job(""); /* what torchrun says where nobody gave one */
    setenv("TORCHELASTIC_RUN_ID", "exp-7", 1);
    setenv("SLURM_JOB_ID", "4711", 1); /* torchrun runs inside it */
    is_of_job("torchrun-exp-7");
    setenv("DTRAIN_JOB", "mine", 1);
    is_of_job("mine");
    environment("SLURM_PROCID", "1", "SLURM_NTASKS", "2", "DTRAIN_ROOT", "h:5", "SLURM_JOB_ID", "4711",
                "TORCHELASTIC_RUN_ID", "exp-7", NULL);
    is_of_job("slurm-4711");
    setenv("SLURM_STEP_ID", "3", 1);
    is_of_job("slurm-4711.3");
    setenv("SLURM_HET_SIZE", "2", 1); /* its parts have other numbers */
    is_of_job("");
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2", "DTRAIN_ROOT", "h:5", "SLURM_JOB_ID", "4711",
                "OMPI_MCA_ess_base_jobid", "3212836865", NULL);
    is_of_job("mpi-3212836865");
    setenv("PMIX_NAMESPACE", "prterun-a-1@1", 1);
    is_of_job("mpi-prterun-a-1@1");
    environment("PMI_RANK", "1", "PMI_SIZE", "2", "DTRAIN_ROOT", "h:5", NULL);
    is_of_job("");
    setenv("PMI_JOBID", "99.0", 1);
    is_of_job("mpi-99.0");
    environment("DTRAIN_RANK", "1", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", "h:5", "SLURM_JOB_ID", "4711", NULL);
    is_of_job(""); /* started by hand: perhaps from two allocations */
}

TEST(long_and_unprintable_names_of_jobs_stay_apart)
{
    /* printf %s ID | sha256sum, the first 8 bytes from the last to the first */
    environment("DTRAIN_RANK", "1", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", "h:5", "DTRAIN_JOB",
                "an id of more than sixty-three characters ends with a hash of the whole, 1", NULL);
    is_of_job("an?id?of?more?than?sixty-three?characters?ends~f5a4869ec4c1a3bc");
    setenv("DTRAIN_JOB", "an id of more than sixty-three characters ends with a hash of the whole, 2", 1);
    is_of_job("an?id?of?more?than?sixty-three?characters?ends~f0d98d8bcf94a15e");
    setenv("DTRAIN_JOB", "a\x1b[31m\xc3\xa9", 1);
    is_of_job("a?[31m??~2ce047169d61eb50");
    setenv("DTRAIN_JOB", "sixty-three-characters-fit-as-they-are-without-a-hash-xxxxxxxxx", 1);
    is_of_job("sixty-three-characters-fit-as-they-are-without-a-hash-xxxxxxxxx");
}

/* What DTRAIN_SECURE and the desc's wish give; -2: refused. */
static int secure_of(const char *variable, int wish)
{
    dtrain_comm_desc desc;
    dtrain__place place;
    memset(&desc, 0, sizeof desc);
    desc.secure = wish;
    environment("DTRAIN_RANK", "1", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", "h:5", "DTRAIN_TOKEN",
                "a token of the environment", variable != NULL ? "DTRAIN_SECURE" : NULL, variable, NULL);
    return dtrain__place_read(&place, &desc) == DTRAIN_OK ? place.keys.secure : -2;
}

TEST(sealing_is_asked_for_by_a_variable_where_the_desc_leaves_it_open)
{
    CHECK_EQ(secure_of(NULL, 0), 0);
    CHECK_EQ(secure_of("1", 0), 1);
    CHECK_EQ(secure_of("0", 0), -1);
    CHECK_EQ(secure_of("0", 1), 1);
    CHECK_EQ(secure_of("1", -1), -1);
    CHECK_EQ(secure_of("yes", 0), -2);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_SECURE");
}

TEST(a_desc_with_a_world_size_reads_no_environment)
{
    dtrain_comm_desc desc;
    dtrain__place place;
    environment("DTRAIN_RANK", "7", "DTRAIN_WORLD_SIZE", "8", "DTRAIN_ROOT", "env:1", "DTRAIN_TOKEN",
                "a token of the environment", "DTRAIN_INSECURE", "1", "DTRAIN_TIMEOUT_MS", "5", NULL);
    memset(&desc, 0, sizeof desc);
    desc.rank = 1;
    desc.world_size = 2;
    desc.root = "desc:2";
    CHECK_EQ(dtrain__place_read(&place, &desc), DTRAIN_OK);
    CHECK(place.keys.rank == 1 && place.keys.world_size == 2 && strcmp(place.root, "desc:2") == 0);
    CHECK(place.keys.token_bytes == 0 && place.hub.insecure == 0 && place.hub.timeout_ms == 60000);
    desc.root = NULL;
    CHECK_EQ(dtrain__place_read(&place, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "desc.root is needed");
    desc.rank = 2;
    CHECK_EQ(dtrain__place_read(&place, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 2 of 2 ranks");
    desc.rank = 0;
    desc.world_size = 5000;
    CHECK_EQ(dtrain__place_read(&place, &desc), DTRAIN_ERR_INVALID);
    desc.world_size = -1;
    CHECK_EQ(dtrain__place_read(&place, &desc), DTRAIN_ERR_INVALID);
}

TEST(roots_are_checked_before_anything_is_looked_up)
{
    static const char *const good[] = {"a:1", "127.0.0.1:65535", "[::1]:29500", "unix:/tmp/x", "unix:x"};
    static const char *const bad[] = {"a",          "a:",    ":5",    "a:65536", "a:-1", "a:x",
                                      "fd00::1:80", "unix:", "[::1]", "a:1x",    "a:0"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        environment("DTRAIN_RANK", "1", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", good[i], NULL);
        stands(1, 2, good[i]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        environment("DTRAIN_RANK", "1", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", bad[i], NULL);
        refused(bad[i]);
    }
    environment("DTRAIN_RANK", "0", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", "a:0", NULL);
    stands(0, 2, "a:0");
}

TEST(tokens_come_from_a_variable_or_a_file_and_are_never_shown)
{
    char path[] = "/tmp/test-place-token-XXXXXX";
    static const char secret[] = "the secret of the file\r\nand more";
    int fd = mkstemp(path);
    dtrain__place place;
    CHECK(write(fd, secret, sizeof secret - 1) == (ssize_t)sizeof secret - 1);
    close(fd);
    environment("DTRAIN_RANK", "0", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", "a:1", "DTRAIN_TOKEN_FILE", path, NULL);
    place = read_place(DTRAIN_OK);
    CHECK(place.keys.token_bytes == 22 && memcmp(place.keys.token, secret, 22) == 0);
    CHECK(strstr(place.believed, "secret") == NULL);
    CHECK_CONTAINS(place.believed, "DTRAIN_TOKEN_FILE (22 bytes)");
    setenv("DTRAIN_TOKEN", "the variable's own secret", 1);
    place = read_place(DTRAIN_OK);
    CHECK_EQ(place.keys.token_bytes, 25);
    setenv("DTRAIN_TOKEN", "short", 1);
    read_place(DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_TOKEN has 5 bytes; a token needs at least 16");
    CHECK(strstr(dtrain_last_error(), "short") == NULL);
    unsetenv("DTRAIN_TOKEN");
    unlink(path);
    read_place(DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "cannot be read: No such file");
}

static char warned[300];
static int warnings;

static void keep_warning(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    CHECK_EQ(level, DTRAIN_LOG_WARN);
    snprintf(warned, sizeof warned, "%s", text);
    warnings++;
}

/* Makes a world, calls something there and leaves it. */
static void world_of_one(const dtrain_comm_desc *desc)
{
    dtrain_comm *world;
    CHECK_EQ(dtrain_comm_create(&world, desc), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(world), 1);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(world);
}

static dtrain_status in_a_thread(dtrain_comm *world, void *user)
{
    (void)user;
    return dtrain_barrier(world);
}

#ifndef _WIN32
/* A process that has told nothing yet: what a world of one logs. */
static void world_of_one_warns(const char *text)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        warnings = 0;
        dtrain_set_log(keep_warning, NULL);
        world_of_one(NULL);
        CHECK_EQ(warnings, 1);
        CHECK_CONTAINS(warned, text);
        CHECK_CONTAINS(warned, "so this is a world of one; start four ranks");
        _exit(test_end());
    }
    int end = -1;
    CHECK_EQ(waitpid(pid, &end, 0), pid);
    CHECK_EQ(end, 0);
}

TEST(a_size_without_a_rank_is_named_in_a_world_of_one)
{
    environment(NULL);
    world_of_one_warns("no launcher has set a rank, so");
    environment("WORLD_SIZE", "4", NULL);
    world_of_one_warns("no launcher has set a rank (WORLD_SIZE=4 is set, and RANK is not), so");
    environment("RANK", "3", NULL);
    world_of_one_warns("(RANK=3 is set, and WORLD_SIZE is not)");
    environment("SLURM_NTASKS", "8", NULL);
    world_of_one_warns("(SLURM_NTASKS=8 is set, and SLURM_PROCID is not)");
    environment("OMPI_COMM_WORLD_SIZE", "2", NULL);
    world_of_one_warns("(OMPI_COMM_WORLD_SIZE=2 is set, and OMPI_COMM_WORLD_RANK is not)");
    environment("PMI_SIZE", "16", NULL);
    world_of_one_warns("(PMI_SIZE=16 is set, and PMI_RANK is not)");
    environment(NULL);
}
#endif

TEST(a_world_of_one_that_nobody_asked_for_is_told_of_once)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.world_size = 1;
    warnings = 0;
    dtrain_set_log(keep_warning, NULL);
    environment(NULL);
    world_of_one(&desc); /* these say what is meant */
    CHECK_EQ(dtrain_run_threads(2, in_a_thread, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_run_threads(1, in_a_thread, NULL, NULL), DTRAIN_OK);
    environment("DTRAIN_WORLD_SIZE", "1", NULL);
    world_of_one(NULL);
    environment("DTRAIN_RANK", "0", "DTRAIN_WORLD_SIZE", "1", NULL);
    world_of_one(NULL);
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "1", NULL);
    world_of_one(NULL);
    environment("JOB_COMPLETION_INDEX", "2", "DTRAIN_WORLD_SIZE", "1", NULL);
    world_of_one(NULL);
    CHECK_EQ(warnings, 0);
    environment("RANK", "5", NULL); /* one name of two is no launcher */
    dtrain_comm *world;
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(world), 1); /* the program may go on to threads */
    CHECK_EQ(warnings, 0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(world);
    CHECK_EQ(warnings, 1);
    CHECK_CONTAINS(warned, "this is a world of one; start four ranks with \"dtrun -n 4 PROGRAM\"");
    CHECK_CONTAINS(warned, "set DTRAIN_WORLD_SIZE=1 if one is meant");
    environment(NULL);
    world_of_one(NULL);
    CHECK_EQ(warnings, 1);
    dtrain_set_log(dtrain__log_stderr, NULL);
}

#ifndef _WIN32
TEST(threads_in_each_process_of_a_launcher_are_told_to_be_worlds_apart)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        warnings = 0;
        dtrain_set_log(keep_warning, NULL);
        environment("DTRAIN_RANK", "1", "DTRAIN_WORLD_SIZE", "2", NULL);
        CHECK_EQ(dtrain_run_threads(1, in_a_thread, NULL, NULL), DTRAIN_OK);
        CHECK_EQ(warnings, 0);
        CHECK_EQ(dtrain_run_threads(4, in_a_thread, NULL, NULL), DTRAIN_OK);
        CHECK_EQ(warnings, 1);
        CHECK_CONTAINS(warned,
                       "one of 2 ranks (DTRAIN_RANK=1 DTRAIN_WORLD_SIZE=2), and its 4 threads are a world apart");
        CHECK_EQ(dtrain_run_threads(4, in_a_thread, NULL, NULL), DTRAIN_OK);
        CHECK_EQ(warnings, 1);
        _exit(test_end());
    }
    int end = -1;
    CHECK_EQ(waitpid(pid, &end, 0), pid);
    CHECK_EQ(end, 0);
}
#endif

/* What the library says of a token file that holds `bytes` bytes. */
static void token_file_is(const char *path, const char *text, size_t bytes, int mode, dtrain_status expected)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(write(fd, text, bytes) == (ssize_t)bytes && fchmod(fd, (mode_t)mode) == 0);
    close(fd);
    warned[0] = 0;
    read_place(expected);
}

TEST(a_token_that_is_meant_and_missing_or_cut_is_an_error)
{
    char directory[] = "/tmp/test-place-token-XXXXXX", path[64];
    CHECK(mkdtemp(directory) != NULL);
    snprintf(path, sizeof path, "%s/token", directory);
    environment("DTRAIN_RANK", "0", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", "a:1", "DTRAIN_TOKEN", "", NULL);
    read_place(DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_TOKEN is empty");
    unsetenv("DTRAIN_TOKEN");
    setenv("DTRAIN_TOKEN_FILE", "", 1);
    read_place(DTRAIN_ERR_IO);
    setenv("DTRAIN_TOKEN_FILE", path, 1);
    CHECK_EQ(mkfifo(path, 0600), 0); /* nobody will write to it */
    read_place(DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "is no regular file");
    CHECK_EQ(unlink(path), 0);
    dtrain_set_log(keep_warning, NULL);
    token_file_is(path, "", 0, 0600, DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(dtrain_last_error(), "is empty");
    token_file_is(path, "\nthe second line is no token", 27, 0600, DTRAIN_ERR_DENIED);
    token_file_is(path, "sixteen letters.\0and more\n", 26, 0600, DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "has a byte of 0");
    token_file_is(path, "sixteen letters.\nand \0more", 26, 0400, DTRAIN_OK);
    CHECK_EQ(warned[0], 0);
    token_file_is(path, "sixteen letters.\n", 17, 0444, DTRAIN_OK);
    CHECK_CONTAINS(warned, path);
    CHECK_CONTAINS(warned, "chmod 600");
    dtrain_set_log(dtrain__log_stderr, NULL);
    unlink(path);
    rmdir(directory);
}

TEST(the_rest_of_the_variables_stand_for_their_fields)
{
    dtrain__place place;
    environment("DTRAIN_RANK", "0", "DTRAIN_WORLD_SIZE", "2", "DTRAIN_ROOT", "a:1", "DTRAIN_INTERFACE", "eth7",
                "DTRAIN_INSECURE", "1", "DTRAIN_TIMEOUT_MS", "1234", "DTRAIN_LISTEN_FD", "9", NULL);
    place = read_place(DTRAIN_OK);
    CHECK(strcmp(place.listen_on, "eth7") == 0 && place.hub.insecure == 1 && place.hub.timeout_ms == 1234);
    CHECK_EQ(place.hub.listen_fd, 9);
    setenv("DTRAIN_RANK", "1", 1);
    CHECK_EQ(read_place(DTRAIN_OK).hub.listen_fd, -1);
    setenv("DTRAIN_INSECURE", "yes", 1);
    refused("DTRAIN_INSECURE=yes");
    setenv("DTRAIN_INSECURE", "0", 1);
    setenv("DTRAIN_TIMEOUT_MS", "soon", 1);
    refused("DTRAIN_TIMEOUT_MS=soon");
}

TEST(a_number_of_ranks_of_a_node_is_one)
{
    static const char *const bad[] = {"two", "2x", "-3", "99999999999"};
    dtrain_comm_desc desc;
    dtrain_comm *world;
    memset(&desc, 0, sizeof desc);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        setenv("DTRAIN_NODE_RANKS", bad[i], 1);
        CHECK_EQ(dtrain_threads_create(&world, 1, &desc), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_NODE_RANKS=");
        CHECK_CONTAINS(dtrain_last_error(), bad[i]);
    }
    unsetenv("DTRAIN_NODE_RANKS");
    desc.node_ranks = -3;
    CHECK_EQ(dtrain_threads_create(&world, 1, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "node_ranks is -3");
    desc.node_ranks = INT_MAX; /* all on one */
    desc.algorithm = DTRAIN_ALGORITHM_NODES;
    float x = 1;
    CHECK_EQ(dtrain_threads_create(&world, 1, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    dtrain_comm_destroy(world);
}

/* RFC 4231, the seven test cases. */
static void hmac_is(const void *key, size_t key_bytes, const void *data, size_t bytes, const char *hex, size_t kept)
{
    unsigned char mac[32];
    char text[65];
    dtrain__sha256_hmac hmac;
    dtrain__sha256_hmac_start(&hmac, key, key_bytes);
    for (size_t i = 0; i < bytes; i++) /* byte by byte: the pieces do not matter */
        dtrain__sha256_hmac_add(&hmac, (const unsigned char *)data + i, 1);
    dtrain__sha256_hmac_finish(&hmac, mac);
    for (int i = 0; i < 32; i++)
        snprintf(text + 2 * i, 3, "%02x", mac[i]);
    CHECK(strncmp(text, hex, 2 * kept) == 0);
}

TEST(hmac_sha256_gives_the_values_of_rfc_4231)
{
    unsigned char key[131], data[152];
    memset(key, 0x0b, 20);
    hmac_is(key, 20, "Hi There", 8, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", 32);
    hmac_is("Jefe", 4, "what do ya want for nothing?", 28,
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843", 32);
    memset(key, 0xaa, 20);
    memset(data, 0xdd, 50);
    hmac_is(key, 20, data, 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe", 32);
    for (int i = 0; i < 25; i++)
        key[i] = (unsigned char)(i + 1);
    memset(data, 0xcd, 50);
    hmac_is(key, 25, data, 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b", 32);
    memset(key, 0x0c, 20);
    hmac_is(key, 20, "Test With Truncation", 20, "a3b6167473100ee06e0c796c2955552b", 16);
    memset(key, 0xaa, 131);
    hmac_is(key, 131, "Test Using Larger Than Block-Size Key - Hash Key First", 54,
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54", 32);
    memcpy(data,
           "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
           "hashed before being used by the HMAC algorithm.",
           152);
    hmac_is(key, 131, data, 152, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2", 32);
}

TEST(secrets_are_compared_whole)
{
    unsigned char a[32], b[32];
    CHECK_EQ(dtrain__os_random(a, sizeof a), 0);
    memcpy(b, a, sizeof b);
    CHECK(dtrain__memory_equal_secret(a, b, sizeof a));
    for (size_t i = 0; i < sizeof a; i++) {
        b[i] ^= 1;
        CHECK(!dtrain__memory_equal_secret(a, b, sizeof a));
        b[i] ^= 1;
    }
    CHECK_EQ(dtrain__os_random(b, sizeof b), 0);
    CHECK(!dtrain__memory_equal_secret(a, b, sizeof a));
}
