/* What is left of jobs that are killed while they save: with disks of their own, of which one is slow, always a
 * checkpoint that all ranks have. LOCAL_ROUNDS sets how many jobs are killed in each way, LOCAL_DELAY_MS how long a
 * write takes on the slow disk, CHECKPOINT_SEED what is drawn. */
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "checkpoint_model.h"
#include "checkpoint_holding.h"

#include <errno.h>

static int slow_ms, full; /* what each write of this process takes; 1: it fails */
static int no_locks;      /* the errno of the file system, which has none */
static int *gate;         /* shared by processes: 1: writes of those that are slow wait */

int hook_file_fault(const char *call)
{
    if (strcmp(call, "lock") == 0)
        return no_locks;
    if (strcmp(call, "write") != 0)
        return 0;
    if (slow_ms > 0)
        usleep((unsigned)slow_ms * 1000);
    while (slow_ms > 0 && gate != NULL && __atomic_load_n(gate, __ATOMIC_SEQ_CST))
        usleep(500);
    return full ? ENOSPC : 0;
}

static void *shared_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static long number_of(const char *variable, long otherwise)
{
    const char *text = getenv(variable);
    return text != NULL ? strtol(text, NULL, 10) : otherwise;
}

/* ---- disks of their own ---- */

/* How far each rank of a job has come. */
typedef struct progress {
    uint64_t whole[4], begun[4]; /* the step whose part is whole on the rank's disk; the one that it saves */
    int saving, failed;          /* ranks that have begun to save; 1: one has seen an error */
    char text[400];
} progress;

typedef struct local_job {
    dtrain_checkpoint_desc desc;
    int async, resumes, again; /* again: saves the step that it resumes from once more */
    uint64_t loaded;
} local_job;

static progress *seen;

static dtrain_status local_load(dtrain_comm *world, void *user)
{
    local_job *j = (local_job *)user;
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    holding_begin(h, dtrain_comm_size(world), dtrain_comm_rank(world));
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &j->desc), DTRAIN_OK);
    dtrain_status status = dtrain_checkpoint_load(ckpt, &h->state, NULL, NULL);
    if (status == DTRAIN_OK)
        CHECK(holding_is(h, h->state.step));
    if (dtrain_comm_rank(world) == 0)
        j->loaded = h->state.step;
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return status;
}

/* Goes on from the newest checkpoint, and saves step after step, until it is killed. */
static int local_train(dtrain_comm *world, scene *s)
{
    local_job *j = (local_job *)s->user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    holding_begin(h, ranks, rank);
    dtrain_status status = dtrain_checkpoint_create(&ckpt, world, &j->desc);
    if (status == DTRAIN_OK && j->resumes)
        status = dtrain_checkpoint_load(ckpt, &h->state, NULL, NULL);
    __atomic_fetch_add(&seen->saving, 1, __ATOMIC_SEQ_CST);
    for (uint64_t step = h->state.step + !(j->again && j->resumes); status == DTRAIN_OK; step++) {
        holding_fill(h, step);
        seen->begun[rank] = step;
        status = j->async ? dtrain_checkpoint_save_async(ckpt, &h->state) : dtrain_checkpoint_save(ckpt, &h->state);
        if (status == DTRAIN_OK && j->async)
            status = dtrain_checkpoint_wait(ckpt);
        if (status == DTRAIN_OK)
            seen->whole[rank] = step;
    }
    if (status != DTRAIN_ERR_PEER_LOST && __atomic_exchange_n(&seen->failed, 1, __ATOMIC_SEQ_CST) == 0)
        snprintf(seen->text, sizeof seen->text, "rank %d: %s: %.300s", rank, dtrain_status_name(status),
                 dtrain_last_error());
    for (;;) /* the others are on their way out as well: nobody leaves before it is killed */
        pause();
    return 1;
}

static uint64_t slowest(int ranks)
{
    uint64_t least = UINT64_MAX;
    for (int rank = 0; rank < ranks; rank++)
        least = seen->whole[rank] < least ? seen->whole[rank] : least;
    return least;
}

/* Checkpoints that a rank has on its disk. */
static long count_indexes(const char *directory, int rank)
{
    char command[300];
    long count = -1;
    snprintf(command, sizeof command, "ls %s/rank-%05d/step-*/index.json 2>/dev/null | wc -l", directory, rank);
    FILE *pipe = popen(command, "r");
    CHECK(pipe != NULL && fscanf(pipe, "%ld", &count) == 1);
    pclose(pipe);
    return count;
}

/* Starts a job of which one rank has a slow disk, kills it at a random moment when that rank has saved a few steps, and
 * loads. */
static int a_local_kill(local_job *j, uint64_t seed, int round)
{
    int ranks = 2 + round % 3, slow = (int)(dtrain_random_u64(seed, (uint64_t)round) % (uint64_t)ranks);
    int delay = (int)number_of("LOCAL_DELAY_MS", 10), before = test_failures;
    pid_t pids[4];
    scene s;
    scene_begin(&s, ranks, 0);
    s.user = j;
    j->again = round % 2;
    memset(seen, 0, sizeof *seen);
    for (int rank = 0; rank < 4; rank++)
        seen->whole[rank] = seen->begun[rank] = j->loaded;
    for (int rank = 0; rank < ranks; rank++) {
        slow_ms = rank == slow ? delay : 0;
        pids[rank] = start_rank(&s, rank, local_train);
    }
    slow_ms = 0;
    double until = now_s() + 60;
    uint64_t enough = j->loaded + dtrain_random_u64(seed, (uint64_t)round + 1000000) % 4;
    while ((seen->saving < ranks || slowest(ranks) < enough) && now_s() < until && !seen->failed)
        usleep(500);
    usleep((unsigned)(dtrain_random_u64(seed, (uint64_t)round + 2000000) % (uint64_t)(delay * 8000 + 2000)));
    for (int i = 0; i < ranks; i++)
        kill(pids[(i + round) % ranks], SIGKILL);
    for (int rank = 0; rank < ranks; rank++)
        waitpid(pids[rank], NULL, 0);
    if (seen->failed)
        TEST_FAIL("round %d: %s", round, seen->text);
    uint64_t whole = slowest(ranks), begun = 0;
    for (int rank = 0; rank < ranks; rank++)
        begun = seen->begun[rank] > begun ? seen->begun[rank] : begun;
    j->loaded = 0;
    dtrain_status status = whole > 0 ? dtrain_run_threads(ranks, local_load, j, NULL) : DTRAIN_OK;
    if (status != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    if (j->loaded < whole || j->loaded > begun)
        TEST_FAIL("step %llu is loaded, %llu is whole on all ranks, %llu begun", (unsigned long long)j->loaded,
                  (unsigned long long)whole, (unsigned long long)begun);
    if (test_failures != before)
        TEST_FAIL("round %d of seed %llu: %d ranks, rank %d slow, async %d", round, (unsigned long long)seed, ranks,
                  slow, j->async);
    for (int rank = 0; rank < ranks; rank++) /* keep_last is at most 3 */
        CHECK(count_indexes(j->desc.directory, rank) <= 5);
    j->resumes = whole > 0;
    return test_failures == before;
}

static void local_kills(int async)
{
    uint64_t seed = (uint64_t)number_of("CHECKPOINT_SEED", 21);
    int rounds = (int)number_of("LOCAL_ROUNDS", 4), good = 0;
    local_job j;
    memset(&j, 0, sizeof j);
    j.desc.directory = fresh("local");
    j.desc.local = j.desc.no_sync = 1;
    j.async = async;
    seen = (progress *)shared_memory(sizeof *seen);
    dtrain_set_log(quiet, NULL);
    for (int round = 0; round < rounds; round++) {
        j.desc.keep_last = round % 4;
        int whole = a_local_kill(&j, seed, round);
        good += whole;
        if (!whole) { /* the next one begins anew */
            fresh("local");
            j.resumes = 0;
            j.loaded = 0;
        }
    }
    dtrain_set_log(NULL, NULL);
    munmap(seen, sizeof *seen);
    if (good < rounds)
        TEST_FAIL("%d of %d kills left not what they should", rounds - good, rounds);
}

TEST(a_local_job_killed_while_it_saves_has_the_newest_common_step)
{
    local_kills(0);
}

TEST(a_local_job_killed_while_it_saves_asynchronously_has_it_too)
{
    local_kills(1);
}

/* Rank 1's disk is slow, then full: nobody goes ahead of it, and what all have stays, with little beside it. */
static int local_lag(dtrain_comm *world, scene *s)
{
    local_job *j = (local_job *)s->user;
    int rank = dtrain_comm_rank(world), before = test_failures;
    uint64_t step;
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    holding_begin(h, 2, rank);
    slow_ms = rank == 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &j->desc), DTRAIN_OK);
    for (step = 1; step <= 4; step++) {
        holding_fill(h, step);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        __atomic_store_n(gate, step == 4, __ATOMIC_SEQ_CST);
        CHECK_EQ(dtrain_checkpoint_save_async(ckpt, &h->state), DTRAIN_OK);
        if (step < 4 || rank == 0)
            CHECK_EQ(dtrain_checkpoint_wait(ckpt), DTRAIN_OK);
        if (step > 1)
            continue;
        full = rank == 1; /* the only step, saved again: rank 0 has replaced its part when rank 1 fails */
        holding_fill(h, 50);
        h->state.step = 1;
        CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_ERR_IO);
        CHECK_EQ(dtrain_checkpoint_load(ckpt, &h->state, NULL, NULL), DTRAIN_OK);
        CHECK(holding_is(h, 1));
        full = 0;
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_save_async(ckpt, &h->state), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1: checkpoint: rank 1 still writes its part of step 4");
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    __atomic_store_n(gate, 0, __ATOMIC_SEQ_CST);
    dtrain_status status = dtrain_checkpoint_wait(ckpt);
    CHECK_EQ(status, rank == 0 ? DTRAIN_ERR_INVALID : DTRAIN_OK); /* of rank 0's last call */
    full = rank == 1;
    for (; step <= 9; step++) {
        holding_fill(h, step);
        CHECK_EQ(dtrain_checkpoint_save_async(ckpt, &h->state), DTRAIN_OK);
        CHECK_EQ(dtrain_checkpoint_wait(ckpt), rank == 0 ? DTRAIN_OK : DTRAIN_ERR_IO);
    }
    if (rank == 0)
        CHECK_EQ(count_indexes(j->desc.directory, 0), 3); /* the newest two, and what all have */
    for (; step <= 14; step++) {
        holding_fill(h, step);
        CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_ERR_IO);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    }
    CHECK(count_indexes(j->desc.directory, 0) <= 4);
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &h->state, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(h->state.step, 4);
    CHECK(holding_is(h, 4));
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return test_failures != before;
}

TEST(no_rank_goes_ahead_of_a_slow_or_full_disk_of_another_and_what_all_have_stays)
{
    local_job j;
    scene s;
    memset(&j, 0, sizeof j);
    j.desc.directory = fresh("lag");
    j.desc.local = j.desc.no_sync = 1;
    gate = (int *)shared_memory(sizeof *gate);
    scene_begin(&s, 2, 0);
    s.user = &j;
    dtrain_set_log(quiet, NULL);
    run_ranks(&s, local_lag);
    dtrain_set_log(NULL, NULL);
    gate = NULL;
}

/* Saves step 10, or loads it, of what all ranks have alike. */
typedef struct alike_job {
    dtrain_checkpoint_desc desc;
    uint64_t content; /* as of this step */
    int loads;
} alike_job;

static dtrain_status local_alike(dtrain_comm *world, void *user)
{
    const alike_job *j = (const alike_job *)user;
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    holding_begin(h, dtrain_comm_size(world), dtrain_comm_rank(world));
    holding_fill(h, j->loads ? 0 : j->content);
    h->list.pieces = &h->pieces[1];
    h->list.count = 1;
    h->state.step = 10;
    dtrain_status status = dtrain_checkpoint_create(&ckpt, world, &j->desc);
    if (status == DTRAIN_OK)
        status =
            j->loads ? dtrain_checkpoint_load(ckpt, &h->state, NULL, NULL) : dtrain_checkpoint_save(ckpt, &h->state);
    for (size_t i = 0; i < 500 && status == DTRAIN_OK; i++)
        if (h->all[i] != of_step(j->content, MANY + i))
            status = DTRAIN_ERR_MISMATCH;
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return status;
}

TEST(a_step_that_fewer_ranks_have_saved_again_is_loaded_and_not_what_the_others_kept)
{
    for (int round = 0; round < 8; round++) { /* which save has the higher number is chance */
        alike_job j;
        memset(&j, 0, sizeof j);
        j.desc.directory = fresh("fewer");
        j.desc.local = j.desc.no_sync = 1;
        j.content = 1;
        CHECK_EQ(dtrain_run_threads(4, local_alike, &j, NULL), DTRAIN_OK);
        j.content = 2;
        CHECK_EQ(dtrain_run_threads(2, local_alike, &j, NULL), DTRAIN_OK);
        j.loads = 1;
        CHECK_EQ(dtrain_run_threads(2 + round % 3, local_alike, &j, NULL), DTRAIN_OK);
    }
}

/* ---- who saves ---- */

/* A process that is alone with a directory. */
typedef struct solo {
    holding *h;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt;
} solo;

static solo solo_begin(const char *directory)
{
    solo p;
    memset(&p, 0, sizeof p);
    p.h = (holding *)malloc(sizeof *p.h);
    p.desc.directory = directory;
    p.desc.no_sync = 1;
    holding_begin(p.h, 1, 0);
    CHECK_EQ(dtrain_checkpoint_create(&p.ckpt, NULL, &p.desc), DTRAIN_OK);
    return p;
}

static dtrain_status solo_save(solo *p, uint64_t step, int async)
{
    holding_fill(p->h, step);
    if (!async)
        return dtrain_checkpoint_save(p->ckpt, &p->h->state);
    CHECK_EQ(dtrain_checkpoint_save_async(p->ckpt, &p->h->state), DTRAIN_OK);
    return dtrain_checkpoint_wait(p->ckpt);
}

static void solo_end(solo *p)
{
    dtrain_checkpoint_destroy(p->ckpt);
    free(p->h);
}

/* What a job that was killed in the middle of step 7 has left: new files, in its own directory and beside latest. */
static void leave(const char *directory)
{
    char command[600];
    snprintf(command, sizeof command,
             "cd %s && mkdir -p step-7 step-8 && touch step-7/rank-00000.00000000deadbeef-1.safetensors "
             "step-7/.rank-00001.00000000deadbeef-1.safetensors.0123456789abcdef.tmp step-7/.index.json.0123.tmp "
             "step-7/rank-00001.00000000deadbeef-1.done .latest.0123456789abcdef.tmp",
             directory);
    CHECK_EQ(system(command), 0);
}

/* Starts a process that saves step 1 and stays; with forks, so does a child of it, whose number is put into
 * *ready. Comes back when step 1 is there. */
static pid_t start_holder(const char *directory, int *ready, int forks)
{
    *ready = 0;
    pid_t pid = fork();
    if (pid != 0) {
        while (pid > 0 && __atomic_load_n(ready, __ATOMIC_SEQ_CST) == 0)
            usleep(500);
        return pid;
    }
    solo p = solo_begin(directory);
    int bad = solo_save(&p, 1, 0) != DTRAIN_OK;
    pid_t child = forks ? fork() : 0;
    if (!forks || child != 0)
        __atomic_store_n(ready, bad ? -1 : forks ? (int)child : 1, __ATOMIC_SEQ_CST);
    for (;;)
        pause();
}

TEST(a_second_job_that_saves_is_refused_by_name_and_a_reader_is_not)
{
    char name[100], host[64] = "";
    const char *directory = fresh("second");
    int *ready = (int *)shared_memory(sizeof *ready);
    pid_t pid = start_holder(directory, ready, 0);
    CHECK_EQ(*ready, 1);
    CHECK_EQ(gethostname(host, sizeof host - 1), 0);
    snprintf(name, sizeof name, "pid %ld on %.40s holds the lock", (long)pid, host);
    solo p = solo_begin(directory);
    for (int async = 0; async < 2; async++) {
        CHECK_EQ(solo_save(&p, 2, async), DTRAIN_ERR_IO);
        CHECK_CONTAINS(dtrain_last_error(), name);
    }
    CHECK_EQ(count_files(directory, "step-*"), 1);
    CHECK_EQ(dtrain_checkpoint_load(p.ckpt, &p.h->state, NULL, NULL), DTRAIN_OK);
    CHECK(holding_is(p.h, 1));
    CHECK_EQ(dtrain_checkpoint_verify(directory), DTRAIN_OK);
    CHECK_EQ(kill(pid, SIGKILL), 0);
    waitpid(pid, NULL, 0);
    CHECK_EQ(solo_save(&p, 2, 0), DTRAIN_OK);
    solo_end(&p);
}

/* A file .lock that this user may not write. */
TEST(a_second_job_of_another_user_is_refused_too)
{
    const char *directory = fresh("users");
    int *ready = (int *)shared_memory(sizeof *ready);
    if (getuid() != 0) {
        printf("skipped: only root can be two users\n");
        return;
    }
    CHECK_EQ(chmod(base, 0711), 0);
    CHECK_EQ(mkdir(directory, 0777), 0);
    CHECK_EQ(chmod(directory, 0777), 0);
    pid_t pid = start_holder(directory, ready, 0);
    for (int held = 1; held >= 0; held--) {
        pid_t other = fork();
        if (other == 0) {
            CHECK_EQ(setuid(65534), 0);
            solo p = solo_begin(directory);
            CHECK_EQ(solo_save(&p, 2, 0), held ? DTRAIN_ERR_IO : DTRAIN_OK);
            if (held)
                CHECK_CONTAINS(dtrain_last_error(), "holds the lock");
            _exit(test_failures != 0);
        }
        CHECK_EQ(end_of(other, 60), 0);
        if (held) {
            CHECK_EQ(kill(pid, SIGKILL), 0);
            waitpid(pid, NULL, 0);
        }
    }
}

TEST(who_saves_under_another_users_lock_file_is_alone_there_as_well)
{
    const char *directory = fresh("guest");
    char name[64];
    int *ready = (int *)shared_memory(sizeof *ready);
    if (getuid() != 0) {
        printf("skipped: only root can be two users\n");
        return;
    }
    CHECK_EQ(chmod(base, 0711), 0);
    CHECK_EQ(mkdir(directory, 0777), 0);
    CHECK_EQ(chmod(directory, 0777), 0);
    solo p = solo_begin(directory);
    CHECK_EQ(solo_save(&p, 1, 0), DTRAIN_OK);
    solo_end(&p);
    pid_t pid = fork();
    if (pid == 0) {
        CHECK_EQ(setuid(65534), 0);
        p = solo_begin(directory);
        dtrain_status status = solo_save(&p, 2, 0);
        __atomic_store_n(ready, status == DTRAIN_OK ? 1 : -1, __ATOMIC_SEQ_CST);
        for (;;)
            pause();
    }
    while (pid > 0 && __atomic_load_n(ready, __ATOMIC_SEQ_CST) == 0)
        usleep(500);
    CHECK_EQ(*ready, 1);
    snprintf(name, sizeof name, "pid %ld holds the lock", (long)pid);
    p = solo_begin(directory);
    CHECK_EQ(solo_save(&p, 3, 0), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), name);
    CHECK_EQ(kill(pid, SIGKILL), 0);
    waitpid(pid, NULL, 0);
    CHECK_EQ(solo_save(&p, 3, 0), DTRAIN_OK);
    solo_end(&p);
}

/* A killed saver's forked child has its descriptors, and its lock no more. */
TEST(the_lock_of_a_killed_job_is_free_though_its_child_lives)
{
    const char *directory = fresh("orphan");
    int *child = (int *)shared_memory(sizeof *child);
    pid_t pid = start_holder(directory, child, 1);
    CHECK(*child > 1);
    solo p = solo_begin(directory);
    CHECK_EQ(solo_save(&p, 2, 0), DTRAIN_ERR_IO);
    CHECK_EQ(kill(pid, SIGKILL), 0);
    waitpid(pid, NULL, 0);
    CHECK_EQ(kill(*child, 0), 0);
    leave(directory);
    CHECK_EQ(solo_save(&p, 2, 0), DTRAIN_OK);
    CHECK_EQ(count_files(directory, "*deadbeef*"), 0);
    CHECK_EQ(kill(*child, SIGKILL), 0);
    solo_end(&p);
}

TEST(leftovers_of_a_killed_save_go_with_the_next_jobs_first_save_whatever_their_age)
{
    for (int async = 0; async < 2; async++) {
        const char *directory = fresh("leftovers");
        solo p = solo_begin(directory);
        CHECK_EQ(solo_save(&p, 5, async), DTRAIN_OK);
        leave(directory);
        CHECK_EQ(solo_save(&p, 6, async), DTRAIN_OK); /* not its first: what is new may be another's */
        CHECK_EQ(count_files(directory, "*deadbeef*"), 3);
        solo q = solo_begin(directory); /* of the same process, which holds the lock: it is not alone */
        CHECK_EQ(solo_save(&q, 6, async), DTRAIN_OK);
        CHECK_EQ(count_files(directory, "*deadbeef*"), 3);
        solo_end(&q);
        solo_end(&p);
        p = solo_begin(directory);
        CHECK_EQ(solo_save(&p, 9, async), DTRAIN_OK);
        CHECK_EQ(count_files(directory, "*deadbeef*"), 0);
        CHECK_EQ(count_files(directory, "*.tmp"), 0);
        CHECK_EQ(count_files(directory, "step-*"), 3); /* 5, 6, 9 */
        CHECK_EQ(dtrain_checkpoint_verify(directory), DTRAIN_OK);
        solo_end(&p);
    }
}

/* Two checkpointers of one process, of which the one that ends takes the process' lock along. */
TEST(what_is_new_stays_while_any_checkpointer_that_has_saved_there_lives)
{
    for (int later = 0; later < 2; later++) {
        const char *directory = fresh("two");
        solo both[2], next;
        for (int i = 0; i < 2; i++) {
            both[i] = solo_begin(directory);
            CHECK_EQ(solo_save(&both[i], 5 + (uint64_t)i, 0), DTRAIN_OK);
        }
        solo_end(&both[later]);
        leave(directory); /* as the other's save may be under way */
        pid_t child = fork();
        if (child == 0) { /* another job */
            next = solo_begin(directory);
            CHECK_EQ(solo_save(&next, 9, 0), DTRAIN_OK);
            _exit(test_failures != 0);
        }
        CHECK_EQ(end_of(child, 60), 0);
        CHECK_EQ(count_files(directory, "*deadbeef*"), 3);
        next = solo_begin(directory); /* of this process */
        CHECK_EQ(solo_save(&next, 10, 0), DTRAIN_OK);
        CHECK_EQ(count_files(directory, "*deadbeef*"), 3);
        solo_end(&next);
        solo_end(&both[!later]);
    }
}

TEST(without_locks_in_the_file_system_the_age_of_leftovers_decides)
{
    const char *directory = fresh("no-locks");
    int *ready = (int *)shared_memory(sizeof *ready);
    pid_t pid = start_holder(directory, ready, 0);
    static const int errors[] = {ENOLCK, EINVAL, ENOTSUP, ENOSYS};
    leave(directory);
    for (uint64_t i = 0; i < 4; i++) {
        no_locks = errors[i];
        solo p = solo_begin(directory);
        CHECK_EQ(solo_save(&p, 10 + i, (int)i % 2), DTRAIN_OK);
        solo_end(&p);
    }
    no_locks = 0;
    CHECK_EQ(count_files(directory, "*deadbeef*"), 3);
    CHECK_EQ(count_files(directory, "*.tmp"), 3);
    CHECK_EQ(kill(pid, SIGKILL), 0);
    waitpid(pid, NULL, 0);
}
