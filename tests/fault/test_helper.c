/* ---- >>test_helper ----
 * A rank forks a process that is not part of the group, such as a data loader, and is killed. The copies of the sockets
 * that the helper would hold hide no death and hold no port. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#ifndef _WIN32
#include <sys/syscall.h>

static volatile pid_t *helper; /* shared with the ranks */

typedef struct household {
    int victim, raw; /* raw: no handler of the C library runs in the helper, which keeps the sockets */
} household;

static pid_t fork_raw(void)
{
#ifdef SYS_fork
    return (pid_t)syscall(SYS_fork);
#else
    return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
#endif
}

static int with_a_helper(dtrain_comm *world, scene *s)
{
    const household *h = (const household *)s->user;
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (dtrain_comm_rank(world) == h->victim) {
        pid_t pid = h->raw ? fork_raw() : fork();
        if (pid == 0)
            for (;;)
                pause();
        *helper = pid;
        scene_meet(s->ranks);
        kill(getpid(), SIGKILL);
    }
    scene_meet(s->ranks);
    double begin = now_s();
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_PEER_LOST);
    CHECK_WITHIN(now_s() - begin, 3); /* the manual says two; heartbeat_ms is 15 */
    if (h->raw)
        CHECK_CONTAINS(dtrain_last_error(), "its process has ended");
    return 0;
}

static void end_helper(void)
{
    CHECK(*helper > 0);
    kill(*helper, SIGKILL);
    *helper = 0;
}

static void lose(scene *s, household *h, int tcp)
{
    if (helper == NULL)
        helper = (pid_t *)mmap(NULL, sizeof *helper, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    scene_begin(s, 3, tcp);
    s->user = h;
    run_ranks_but(s, h->victim, with_a_helper);
}

static int sums(dtrain_comm *world, scene *s)
{
    int32_t one = 1;
    (void)s;
    CHECK_EQ(dtrain_all_reduce(world, &one, &one, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(one, 3);
    return 0;
}

TEST(a_forked_helper_hides_no_death_and_holds_no_port)
{
    for (int tcp = 0; tcp < 2; tcp++)
        for (int victim = 0; victim < 2; victim++) {
            household h = {victim, 0};
            scene s;
            lose(&s, &h, tcp);
            run_ranks(&s, sums); /* a new group at the same root */
            end_helper();
        }
}

#ifdef __linux__
TEST(on_one_machine_the_end_of_a_process_counts_and_not_that_of_its_sockets)
{
    for (int tcp = 0; tcp < 2; tcp++)
        for (int victim = 0; victim < 2; victim++) {
            household h = {victim, 1};
            scene s;
            lose(&s, &h, tcp);
            if (tcp && victim == 0) {
                dtrain_comm_desc desc = scene_desc(&s, 0);
                dtrain_comm *world;
                CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_IO);
                CHECK_CONTAINS(dtrain_last_error(), "a process that a rank of it started");
            }
            end_helper();
        }
}
#endif

/* In the child the numbers of the parent's sockets are free for files of its own, which stay open. */
static int opens_files(dtrain_comm *world, scene *s)
{
    enum { FILES = 64 };
    struct stat at;
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    pid_t child = fork();
    if (child == 0) {
        int fds[FILES], open_files = 0;
        for (int i = 0; i < FILES; i++)
            fds[i] = open("/dev/null", O_RDONLY);
        dtrain_comm_destroy(world);
        for (int i = 0; i < FILES; i++)
            open_files += fds[i] >= 0 && fstat(fds[i], &at) == 0;
        _exit(open_files != FILES);
    }
    CHECK_EQ(end_of(child, 10), 0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(a_child_that_destroys_its_copy_closes_no_file_of_its_own)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        scene_begin(&s, 2, tcp);
        run_ranks(&s, opens_files);
    }
}

/* In the child those numbers are also free for the sockets of a group of its own. */
static int makes_a_group_in_a_child(dtrain_comm *world, scene *s)
{
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    pid_t child = fork();
    if (child == 0) {
        dtrain_comm *own = NULL;
        dtrain_comm_desc desc = scene_desc(s, dtrain_comm_rank(world));
        char root[100];
        snprintf(root, sizeof root, "unix:%s/children", scene_directory);
        desc.root = root;
        desc.transport = "unix"; /* memory that is shared would carry the barrier */
        CHECK_EQ(dtrain_comm_create(&own, &desc), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(own), DTRAIN_OK);
        dtrain_comm_destroy(world);
        scene_meet(2);
        dtrain_status status = dtrain_barrier(own);
        dtrain_comm_destroy(own);
        _exit(status != DTRAIN_OK);
    }
    CHECK_EQ(end_of(child, 10), 0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(a_child_that_destroys_its_copy_keeps_a_group_of_its_own)
{
    scene s;
    scene_begin(&s, 2, 0);
    run_ranks(&s, makes_a_group_in_a_child);
}
#else
TEST(without_fork_there_are_no_helpers)
{
    puts("skipped: this system has no fork()");
}
#endif
