/* Threads that the system refuses, and what a rank says of waiting: for a peer, and behind its own calls. */
#define _GNU_SOURCE
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#include <sys/resource.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LIMITS 0 /* sanitizers take more memory than the limit gives */
#else
#define LIMITS 1
#endif

enum { RANKS = 8 };

static int told; /* ranks that have learnt why the others do not come */

static dtrain_status sum(dtrain_comm *world, void *user)
{
    int one = 1;
    (void)user;
    dtrain_status status = dtrain_all_reduce(world, &one, &one, 1, DTRAIN_I32, DTRAIN_SUM);
    if (status == DTRAIN_ERR_PEER_LOST && strstr(dtrain_last_error(), "the system refused its thread") != NULL &&
        strstr(dtrain_last_error(), "pids.max") != NULL)
        __atomic_add_fetch(&told, 1, __ATOMIC_SEQ_CST);
    return status;
}

/* Each thread asks for a stack of 1 GiB, and there is memory for two. */
static int runs_with_little_memory(void)
{
    struct rlimit limit = {(rlim_t)5 << 29, (rlim_t)5 << 29};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.stack_bytes = (size_t)1 << 30;
    desc.timeout_ms = test_ms(20000);
    if (setrlimit(RLIMIT_AS, &limit) != 0)
        return 77;
    CHECK_EQ(dtrain_run_threads(RANKS, sum, NULL, &desc), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "of 8 could not start, as the system refused its thread");
    CHECK(told >= 1 && told < RANKS);
    return test_end();
}

TEST(ranks_learn_that_the_system_refused_the_thread_of_another)
{
    int end = 0;
    if (!LIMITS || sizeof(void *) < 8) {
        puts("skipped: it needs a limit on memory");
        return;
    }
    pid_t child = fork();
    if (child == 0)
        _exit(runs_with_little_memory());
    CHECK_EQ(waitpid(child, &end, 0), child);
    CHECK(WIFEXITED(end));
    CHECK_EQ(WEXITSTATUS(end), 0);
}

static int lines; /* that say how long a rank has waited */

static void count_lines(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    if (strstr(text, "has waited") != NULL)
        __atomic_add_fetch(&lines, 1, __ATOMIC_SEQ_CST);
}

enum { MESSAGES = 40 };

/* Rank 1 sends a message each 75 ms. The last one comes after 3 s, but none is awaited for a second. */
static dtrain_status one_after_another(dtrain_comm *world, void *user)
{
    int data[MESSAGES];
    dtrain_work *work[MESSAGES];
    (void)user;
    for (int i = 0; i < MESSAGES; i++) {
        data[i] = i;
        if (dtrain_comm_rank(world) == 0) {
            CHECK_EQ(dtrain_recv_async(world, &data[i], 1, DTRAIN_I32, 1, &work[i]), DTRAIN_OK);
        } else {
            usleep(75000);
            CHECK_EQ(dtrain_send(world, &data[i], 1, DTRAIN_I32, 0), DTRAIN_OK);
        }
    }
    for (int i = 0; i < MESSAGES && dtrain_comm_rank(world) == 0; i++)
        CHECK_EQ(dtrain_work_wait(work[i]), DTRAIN_OK);
    return DTRAIN_OK;
}

/* An overloaded machine may hold rank 1 up for a second once or twice; if the queue counted, 20 lines would come. */
TEST(time_in_the_own_queue_is_no_wait_for_a_peer)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 6000;
    dtrain_set_log(count_lines, NULL);
    CHECK_EQ(dtrain_run_threads(2, one_after_another, NULL, &desc), DTRAIN_OK);
    dtrain_set_log(NULL, NULL);
    CHECK(lines <= 2);
}

/* Rank 0 awaits a message of each of 39 others in vain. */
static dtrain_status in_vain(dtrain_comm *world, void *user)
{
    int data[MESSAGES];
    dtrain_work *work[MESSAGES];
    (void)user;
    if (dtrain_comm_rank(world) > 0) {
        usleep(3000000);
        return DTRAIN_OK;
    }
    for (int i = 0; i < 39; i++)
        CHECK_EQ(dtrain_recv_async(world, &data[i], 1, DTRAIN_I32, 1 + i, &work[i]), DTRAIN_OK);
    for (int i = 0; i < 39; i++)
        CHECK(dtrain_work_wait(work[i]) != DTRAIN_OK);
    return DTRAIN_OK;
}

TEST(a_group_tells_the_log_once_whom_its_calls_await)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 2000;
    lines = 0;
    dtrain_set_log(count_lines, NULL);
    CHECK_EQ(dtrain_run_threads(40, in_vain, NULL, &desc), DTRAIN_OK);
    dtrain_set_log(NULL, NULL);
    CHECK(lines >= 1 && lines <= 4);
}
