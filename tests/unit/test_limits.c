/* What a control group of Linux and an affinity mask leave a rank: memory, time of processors, processors. A test makes
 * control groups where it may, and else says so. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "test.h"

#include "processes.h"

#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>

#define MIB ((size_t)1 << 20)

/* ---- control groups ---- */

static char group_directory[512]; /* of the group that a test made */

static int group_write(const char *file, const char *text)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", group_directory, file);
    int fd = open(path, O_WRONLY);
    ssize_t n = fd >= 0 ? write(fd, text, strlen(text)) : -1;
    if (fd >= 0)
        close(fd);
    return n == (ssize_t)strlen(text);
}

/* Makes a control group with a file, in either version. Returns 0 if this process may not. */
static int group_make(const char *controller, const char *file)
{
    char path[600], line[1024], mount[256], type[16], options[256];
    FILE *mounts = fopen("/proc/self/mounts", "r");
    int made = 0;
    while (!made && mounts != NULL && fgets(line, sizeof line, mounts) != NULL) {
        if (sscanf(line, "%*s %255s %15s %255s", mount, type, options) != 3 || strncmp(type, "cgroup", 6) != 0 ||
            (strcmp(type, "cgroup") == 0 && strstr(options, controller) == NULL))
            continue;
        snprintf(group_directory, sizeof group_directory, "%s/dtrain-test-%ld", mount, (long)getpid());
        if (mkdir(group_directory, 0755) != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", group_directory, file);
        made = access(path, W_OK) == 0;
        if (!made)
            rmdir(group_directory);
    }
    if (mounts != NULL)
        fclose(mounts);
    return made;
}

static int alloc_more_than_is_left(dtrain_comm *world, scene *s)
{
    void *memory = NULL;
    (void)s;
    CHECK_EQ(dtrain_comm_alloc(world, 96 * MIB, &memory), DTRAIN_ERR_MEMORY);
    CHECK(memory == NULL);
    return 0;
}

/* A process in the group, then two ranks in it that ask for 192 MiB of 128. */
static int memory_of_group(void)
{
    scene s;
    CHECK(group_write("cgroup.procs", "0"));
    uint64_t left = dtrain__os_memory_left();
    CHECK(left <= 128 * MIB);
    CHECK(left > 64 * MIB);
    scene_begin(&s, 2, 0);
    dtrain_set_log(quiet, NULL);
    run_ranks(&s, alloc_more_than_is_left);
    return test_end();
}

static void run_in_group(int (*body)(void))
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(body());
    CHECK_EQ(end_of(pid, 60), 0);
    for (int i = 0; rmdir(group_directory) != 0 && i < 1000; i++)
        usleep(1000);
}

TEST(memory_is_what_the_control_group_leaves)
{
    const char *files[] = {"memory.max", "memory.limit_in_bytes"};
    int version = group_make("memory", files[0]) ? 0 : group_make("memory", files[1]) ? 1 : -1;
    if (version < 0) {
        printf("skipped: this process may make no control group for memory\n");
        return;
    }
    CHECK(group_write(files[version], "134217728"));
    run_in_group(memory_of_group);
}

/* ---- what the system writes, from files of the test's own ---- */

static char fake_directory[64];

static void fake_write(const char *name, const char *text)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", fake_directory, name);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0);
    if (file != NULL)
        fclose(file);
}

/* Puts a file in the place of one in /proc/self, in this process's view alone. Returns 0 if it may not. */
static int fake_proc(const char *name)
{
    char from[200], to[64];
    snprintf(from, sizeof from, "%s/%s", fake_directory, name);
    snprintf(to, sizeof to, "/proc/%ld/%s", (long)getpid(), name);
    return mount(from, to, NULL, MS_BIND, NULL) == 0;
}

/* A system with long names, in which the group for memory is beyond the first 4 KiB of both files. */
static int reads_long_lists(void)
{
    static char text[16384], filler[6000], name[500];
    size_t used = 0;
    memset(filler, 'f', sizeof filler - 1);
    memset(name, 'n', sizeof name - 1);
    snprintf(text, sizeof text,
             "1 0 0:1 / / rw - overlay overlay rw,lowerdir=%s\n"
             "2 1 0:2 /kube\\134x2dpods %s/a\\040b rw,nosuid shared:9 - cgroup2 cgroup2 rw\n",
             filler, fake_directory);
    fake_write("mountinfo", text);
    for (int i = 12; i > 0; i--)
        used += (size_t)snprintf(text + used, sizeof text - used, "%d:other%d:/%s\n", i, i, name);
    snprintf(text + used, sizeof text - used, "0::/kube\\x2dpods/pod\n");
    fake_write("cgroup", text);
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        !fake_proc("mountinfo") || !fake_proc("cgroup"))
        return 75;
    fake_write("a b/pod/memory.max", "3000000\n");
    fake_write("a b/pod/memory.current", "1000000\n");
    CHECK_EQ(dtrain__os_memory_left(), 2000000);
    fake_write("a b/memory.max", "1500000\n"); /* the group above has less, and counts nothing as used */
    CHECK_EQ(dtrain__os_memory_left(), 1500000);
    fake_write("a b/memory.max", "max\n");
    fake_write("a b/pod/memory.max", "0\n");
    CHECK_EQ(dtrain__os_memory_left(), 0);
    fake_write("a b/pod/cpu.max", "max 100000\n");
    int all = dtrain__os_processors();
    fake_write("a b/cpu.max", "100000 100000\n");
    CHECK_EQ(dtrain__os_processors(), 1);
    fake_write("a b/cpu.max", "100000 0\n"); /* no kernel writes this */
    CHECK_EQ(dtrain__os_processors(), all);
    return test_end();
}

TEST(groups_with_long_and_escaped_names_are_found)
{
    char command[200];
    snprintf(fake_directory, sizeof fake_directory, "/tmp/dtrain-limits-%ld", (long)getpid());
    snprintf(command, sizeof command, "mkdir -p '%s/a b/pod'", fake_directory);
    CHECK_EQ(system(command), 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(reads_long_lists());
    int end = end_of(pid, 60);
    if (end == 75)
        printf("skipped: this process may not mount files\n");
    else
        CHECK_EQ(end, 0);
    snprintf(command, sizeof command, "rm -r %s", fake_directory);
    CHECK_EQ(system(command), 0);
}

/* The barrier keeps each process until the other has asked for its processors. */
static int is_crowded(dtrain_comm *world, int expected)
{
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(CHANNEL(world)->hub->crowded, expected);
    return 0;
}

static int crowded(dtrain_comm *world, scene *s)
{
    (void)s;
    return is_crowded(world, 1);
}

static int not_crowded(dtrain_comm *world, scene *s)
{
    (void)s;
    return is_crowded(world, 0);
}

static int version_two;

/* One and a half processors do not let two ranks run at once. */
static int quota_of_group(void)
{
    scene s;
    CHECK(group_write("cgroup.procs", "0"));
    int before = dtrain__os_processors();
    scene_begin(&s, 2, 0);
    CHECK(before >= 2);
    run_ranks(&s, not_crowded);
    CHECK(version_two ? group_write("cpu.max", "150000 100000") : group_write("cpu.cfs_quota_us", "150000"));
    CHECK_EQ(dtrain__os_processors(), 1);
    scene_begin(&s, 2, 0);
    run_ranks(&s, crowded);
    CHECK(version_two ? group_write("cpu.max", "250000 100000") : group_write("cpu.cfs_quota_us", "250000"));
    CHECK_EQ(dtrain__os_processors(), 2);
    scene_begin(&s, 2, 0);
    run_ranks(&s, not_crowded);
    return test_end();
}

TEST(a_quota_of_processor_time_counts_as_processors)
{
    version_two = group_make("cpu", "cpu.max");
    if (!version_two && !group_make("cpu", "cpu.cfs_quota_us")) {
        printf("skipped: this process may make no control group for processors\n");
        return;
    }
    run_in_group(quota_of_group);
}

/* ---- affinity ---- */

static int first_processor, second_processor;

/* Finds two processors that this process may use. Returns 0 if there are none. */
static int two_processors(void)
{
    cpu_set_t set;
    int found = 0;
    CHECK_EQ(sched_getaffinity(0, sizeof set, &set), 0);
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++)
        if (CPU_ISSET((size_t)i, &set))
            *(found++ == 0 ? &first_processor : &second_processor) = i;
    if (found < 2)
        printf("skipped: this process may use one processor only\n");
    return found == 2;
}

static void bind_to(int processor)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)processor, &set);
    CHECK_EQ(sched_setaffinity(0, sizeof set, &set), 0);
}

/* Two ranks, bound to one processor each by their launcher: to the same, or each to its own. */
static void run_bound(int apart, rank_body body)
{
    scene s;
    pid_t pids[2];
    scene_begin(&s, 2, 0);
    for (int rank = 0; rank < 2; rank++) {
        fflush(stdout);
        pids[rank] = fork();
        if (pids[rank] == 0) {
            bind_to(rank == 1 && apart ? second_processor : first_processor);
            _exit(rank_main(&s, rank, body));
        }
    }
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(end_of(pids[rank], 60), 0);
}

TEST(ranks_with_a_processor_each_are_not_crowded)
{
    if (two_processors())
        run_bound(1, not_crowded);
}

TEST(ranks_bound_to_one_processor_are_crowded)
{
    if (two_processors())
        run_bound(0, crowded);
}

static int shares_without_crowd(dtrain_comm *world, scene *s)
{
    float one = 1;
    int *apart = (int *)s->user, shared;
    bind_to(*apart && dtrain_comm_rank(world) == 1 ? second_processor : first_processor);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, &one, &one, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    shared = world->shared != NULL;
    CHECK(shared);
    CHECK(!shared || world->shared->crowded == !*apart);
    return 0;
}

TEST(ranks_of_a_transport_are_crowded_only_on_the_same_processor)
{
    if (!two_processors())
        return;
    for (int apart = 0; apart < 2; apart++) {
        scene s;
        scene_begin_by(&s, 2, OWN_HOST);
        s.user = &apart;
        run_ranks(&s, shares_without_crowd);
    }
}
#endif
