/* Random collectives on random groups for MINUTES, threads and every fourth time processes, some with a rank that
 * comes late, leaves, calls something else, is killed or stopped: every call ends by its deadline with the right result
 * or an error, and an error after a death names the dead.
 *
 *   soak [MINUTES [SEED [FIRST]]]   repeatable from the seed that it prints, or from its round FIRST on; "soak 0" does
 *                                   twenty rounds */
#include "dtrain.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { NONE, LATE, LEAVES, CALLS_ELSE, KILLED, STOPPED };

typedef struct episode {
    uint64_t seed, number;
    int ranks, operations, trouble, culprit, when;
} episode;

static int failures;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t draw(const episode *e, uint64_t what)
{
    return dtrain_random_u64(e->seed, e->number * 4096 + what);
}

static float value(int rank, size_t i, uint64_t salt)
{
    return (float)((int)((size_t)rank * 7919 + i * 31 + salt % 977) % 1000) * 0.37f - 100.0f;
}

static float tree(int first, int n, size_t i, uint64_t salt)
{
    int left = 1;
    if (n == 1)
        return value(first, i, salt);
    while (2 * left < n)
        left *= 2;
    return tree(first, left, i, salt) + tree(first + left, n - left, i, salt);
}

static void report(const episode *e, int rank, int op, const char *what)
{
    __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);
    fprintf(stderr, "round %llu, %d ranks, operation %d, rank %d: %s: %s\n", (unsigned long long)e->number, e->ranks,
            op, rank, what, dtrain_last_error());
}

/* One operation; what it must give is computed apart from it. */
static dtrain_status operate(const episode *e, dtrain_comm *world, int op, float *x, float *out, size_t count)
{
    int rank = dtrain_comm_rank(world), kind = (int)(draw(e, 100 + 2 * (uint64_t)op) % 4);
    uint64_t salt = draw(e, 101 + 2 * (uint64_t)op);
    size_t low, n = dtrain_shard(world, count, rank, &low), step = count / 7 + 1;
    dtrain_work *work;
    dtrain_status status;
    for (size_t i = 0; i < count; i++)
        x[i] = value(rank, i, salt);
    if (kind == 0) {
        status = dtrain_all_reduce(world, x, out, count, DTRAIN_F32, DTRAIN_SUM);
    } else if (kind == 1) {
        status = dtrain_all_reduce_async(world, x, out, count, DTRAIN_F32, DTRAIN_SUM, &work);
        if (status == DTRAIN_OK)
            status = dtrain_work_wait(work);
    } else {
        status = dtrain_reduce_scatter(world, x, out + low, count, DTRAIN_F32, DTRAIN_SUM);
        if (status == DTRAIN_OK)
            status = dtrain_all_gather(world, out + low, out, count, DTRAIN_F32);
    }
    (void)n;
    for (size_t i = salt % step; status == DTRAIN_OK && i < count; i += step)
        if (out[i] != tree(0, e->ranks, i, salt)) {
            report(e, rank, op, "wrong result");
            return DTRAIN_ERR_CORRUPT;
        }
    return status;
}

static dtrain_status body(dtrain_comm *world, void *user)
{
    const episode *e = (const episode *)user;
    int rank = dtrain_comm_rank(world);
    size_t most = (size_t)1 << 16;
    float *x = (float *)malloc((most + 1) * sizeof(float)), *out = (float *)malloc((most + 1) * sizeof(float));
    dtrain_status status = x != NULL && out != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    for (int op = 0; op < e->operations && status == DTRAIN_OK; op++) {
        size_t count = (size_t)(draw(e, 2000 + (uint64_t)op) >> (op % 17)) % most;
        if (e->trouble != 0 && rank == e->culprit && op == e->when) {
            struct timespec nap = {0, 120000000};
            if (e->trouble == LATE)
                nanosleep(&nap, NULL);
            if (e->trouble == LEAVES)
                break;
            if (e->trouble == CALLS_ELSE)
                count++;
            if (e->trouble == KILLED || e->trouble == STOPPED)
                kill(getpid(), e->trouble == KILLED ? SIGKILL : SIGSTOP);
        }
        status = operate(e, world, op, x, out, count);
    }
    free(x);
    free(out);
    if (e->trouble == NONE && status != DTRAIN_OK)
        report(e, rank, -1, "failed without trouble");
    if (e->trouble >= KILLED && status != DTRAIN_OK) {
        char name[24];
        snprintf(name, sizeof name, "rank %d (", e->culprit);
        if (status != DTRAIN_ERR_PEER_LOST || strstr(dtrain_last_error(), name) == NULL)
            report(e, rank, -1, "the dead rank is not named");
    }
    return e->trouble == NONE ? status : DTRAIN_OK;
}

/* One rank's process. */
static int rank_main(const episode *e, int rank, const char *root)
{
    dtrain_comm_desc desc;
    dtrain_comm *world;
    memset(&desc, 0, sizeof desc);
    desc.rank = rank;
    desc.world_size = e->ranks;
    desc.root = root;
    desc.token = "what TCP takes to meet";
    desc.connections = 1 + (int)(draw(e, 8) % 3);
    desc.timeout_ms = e->trouble == LATE ? 1000 : 20000; /* late to an operation, not to the group */
    desc.heartbeat_ms = e->trouble == STOPPED ? 700 : 0;
    desc.reconnect_ms = draw(e, 9) % 3 == 0 ? 300 : 0;
    desc.secure = draw(e, 10) % 3 == 0;
    if (dtrain_comm_create(&world, &desc) != DTRAIN_OK) {
        if (e->trouble == NONE) /* else the group may have ended before this rank saw it complete */
            report(e, rank, -1, "did not join");
        return failures != 0;
    }
    body(world, (void *)(uintptr_t)e);
    dtrain_comm_destroy(world);
    return failures != 0;
}

/* The episode's ranks as processes; all must end by themselves, but for the culprit. */
static void processes_of(episode *e)
{
    pid_t pids[16];
    char root[64];
    int status;
    if (draw(e, 10) % 2)
        snprintf(root, sizeof root, "unix:/tmp/dtrain-soak-%ld", (long)getpid());
    else
        snprintf(root, sizeof root, "127.0.0.1:%d", 21000 + (int)((uint64_t)getpid() * 131 + e->number) % 10000);
    fflush(stdout);
    for (int rank = 0; rank < e->ranks; rank++)
        if ((pids[rank] = fork()) == 0)
            _exit(rank_main(e, rank, root));
    for (int rank = 0; rank < e->ranks; rank++) {
        int64_t until = now_ns() + (int64_t)40 * 1000000000;
        struct timespec nap = {0, 1000000};
        if (e->trouble >= KILLED && rank == e->culprit)
            continue;
        while (waitpid(pids[rank], &status, WNOHANG) == 0 && now_ns() < until)
            nanosleep(&nap, NULL);
        if (now_ns() >= until) {
            report(e, rank, -1, "hangs");
            kill(pids[rank], SIGKILL);
            waitpid(pids[rank], &status, 0);
        } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            report(e, rank, -1, "ended badly");
    }
    if (e->trouble >= KILLED) {
        kill(pids[e->culprit], SIGKILL);
        waitpid(pids[e->culprit], &status, 0);
    }
    if (root[0] == 'u')
        unlink(root + 5);
    for (int rank = 0; rank < e->ranks && root[0] == 'u'; rank++) {
        char path[80];
        snprintf(path, sizeof path, "%s.%d", root + 5, rank);
        unlink(path);
    }
}

static void round_of(episode *e)
{
    static const dtrain_algorithm algorithms[] = {DTRAIN_ALGORITHM_AUTO, DTRAIN_ALGORITHM_AUTO, DTRAIN_ALGORITHM_TREE,
                                                  DTRAIN_ALGORITHM_RECURSIVE_DOUBLING,
                                                  DTRAIN_ALGORITHM_HALVING_DOUBLING};
    dtrain_comm_desc desc;
    int64_t started = now_ns();
    memset(&desc, 0, sizeof desc);
    e->ranks = 1 + (int)(draw(e, 0) % 9);
    e->operations = 1 + (int)(draw(e, 1) % 40);
    e->trouble = draw(e, 2) % 3 == 0 ? 1 + (int)(draw(e, 3) % 3) : NONE;
    e->culprit = (int)(draw(e, 4) % (uint64_t)e->ranks);
    e->when = (int)(draw(e, 5) % (uint64_t)e->operations);
    if (e->number % 4 == 3) {
        e->ranks = e->ranks > 1 ? e->ranks : 2;
        e->trouble = draw(e, 2) % 2 == 0 ? 1 + (int)(draw(e, 3) % 5) : NONE;
        processes_of(e);
        return;
    }
    desc.algorithm = algorithms[draw(e, 6) % 5];
    desc.progress = draw(e, 7) % 2 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
    desc.timeout_ms = e->trouble == LATE ? 50 : 20000;
    if (dtrain_run_threads(e->ranks, body, e, &desc) != DTRAIN_OK && e->trouble == 0)
        report(e, -1, -1, "the group failed");
    if (now_ns() - started > (int64_t)60 * 1000000000)
        report(e, -1, -1, "took more than a minute");
}

int main(int argc, char **argv)
{
    double minutes = argc > 1 ? atof(argv[1]) : 0;
    episode e;
    int64_t end = now_ns() + (int64_t)(minutes * 60e9);
    memset(&e, 0, sizeof e);
    e.seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)now_ns();
    e.number = argc > 3 ? strtoull(argv[3], NULL, 10) : 0;
    printf("seed %llu\n", (unsigned long long)e.seed);
    dtrain_set_log(NULL, NULL);
    do
        round_of(&e);
    while (failures == 0 && (++e.number < 20 || now_ns() < end));
    printf("%llu rounds\n%d passed, %d failed\n", (unsigned long long)e.number, failures == 0, failures);
    return failures != 0;
}
