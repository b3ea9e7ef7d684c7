/* Saves that are killed, cut short or refused: an error that says why, the last checkpoint whole, and the next save
 * good. CHECKPOINT_ROUNDS sets how many jobs are killed, CHECKPOINT_SEED what is drawn. */
#include "hooks.h"
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "checkpoint_model.h"
#include "checkpoint_holding.h"

const int64_t hook_save_left_ns = 500000000;

#include <sys/mount.h>
#include <sys/resource.h>

/* ---- faults ---- */

static int armed, calls, target, error_number, hit; /* the target'th call fails */
static int gate;                                    /* 1: writes wait */
static int stutters;                                /* 1: few bytes a call */
static int all_full;                                /* 1: no thread's disk takes a byte */
static __thread int full;                           /* 1: this thread's takes none */

int hook_file_fault(const char *call)
{
    while (__atomic_load_n(&gate, __ATOMIC_SEQ_CST) && strcmp(call, "write") == 0)
        usleep(200);
    if ((full || __atomic_load_n(&all_full, __ATOMIC_SEQ_CST)) && strcmp(call, "write") == 0)
        return ENOSPC;
    if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST))
        return 0;
    if (__atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST) != target)
        return 0;
    __atomic_store_n(&hit, 1, __ATOMIC_SEQ_CST);
    return error_number;
}

size_t hook_file_limit(const char *call, size_t bytes)
{
    static uint32_t turn;
    size_t some = 1 + __atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED) % 97 * 41;
    (void)call;
    return stutters && bytes > some ? some : bytes;
}

static void arm(int at)
{
    static const int numbers[] = {EIO, ENOSPC, EROFS, EDQUOT, EACCES};
    calls = hit = 0;
    target = at;
    error_number = numbers[at % 5];
    __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}

static void disarm(void)
{
    __atomic_store_n(&armed, 0, __ATOMIC_SEQ_CST);
}

typedef struct job {
    const char *directory;
    int async, sync_disk;
    dtrain_checkpoint_desc desc;
} job;

static int beside_a_writer; /* which may remove what verify has found */

/* The newest checkpoint, loaded whole by a program that is alone, with every hash checked; -1: there is none. */
static long newest(const char *directory)
{
    holding *h = (holding *)malloc(sizeof *h); /* several ranks may ask at once */
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    long step = -1;
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    holding_begin(h, 1, 0);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    dtrain_status status = dtrain_checkpoint_load(ckpt, &h->state, NULL, NULL);
    if (status == DTRAIN_OK) {
        step = (long)h->state.step;
        CHECK(holding_is(h, (uint64_t)step));
        if (!beside_a_writer)
            CHECK_EQ(dtrain_checkpoint_verify(directory), DTRAIN_OK);
    } else if (strstr(dtrain_last_error(), "holds no checkpoint that is whole") == NULL) {
        TEST_FAIL("the newest checkpoint does not load: %s", dtrain_last_error());
    }
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return step;
}

/* ---- an error at every call in turn ---- */

static dtrain_status save_once(dtrain_checkpoint *ckpt, holding *h, int async)
{
    dtrain_status status =
        async ? dtrain_checkpoint_save_async(ckpt, &h->state) : dtrain_checkpoint_save(ckpt, &h->state);
    return async && status == DTRAIN_OK ? dtrain_checkpoint_wait(ckpt) : status;
}

typedef struct sweep {
    job job;
    int faults, errors, done;
    int replaces; /* the same step again and again */
    dtrain_status statuses[8];
} sweep;

/* Every rank saves, the nth call of any of them fails; all say the same, and the next save is good. */
static dtrain_status sweep_body(dtrain_comm *world, void *user)
{
    sweep *s = (sweep *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    long before = 1;
    holding_begin(h, ranks, rank);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &s->job.desc), DTRAIN_OK);
    holding_fill(h, 1);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    for (int at = 0; !s->done && test_failures == 0; at++) {
        uint64_t step = s->replaces ? 1 : 2 + (uint64_t)at * 2;
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (rank == 0)
            arm(at);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        holding_fill(h, step);
        s->statuses[rank] = save_once(ckpt, h, s->job.async);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (rank == 0) {
            disarm();
            s->done = !hit;
            s->faults += hit;
            for (int r = 0; r < ranks; r++)
                s->errors += s->statuses[r] != DTRAIN_OK;
            long found = newest(s->job.directory);
            if (found != before && found != (long)step)
                TEST_FAIL("after a fault at call %d the newest is %ld, expected %ld or %ld", at, found, before,
                          (long)step);
            if (s->statuses[0] == DTRAIN_OK && found != (long)step)
                TEST_FAIL("a fault at call %d was no error, and the newest is %ld", at, found);
        }
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (!s->job.async)
            CHECK_EQ(s->statuses[rank], s->statuses[0]);
        step += !s->replaces;
        holding_fill(h, step);
        dtrain_status again = save_once(ckpt, h, s->job.async);
        if (again != DTRAIN_OK)
            TEST_FAIL("the save after a fault at call %d, on rank %d: %s", at, rank, dtrain_last_error());
        before = (long)step;
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (rank == 0)
            CHECK_EQ(newest(s->job.directory), before);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    }
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return DTRAIN_OK;
}

static void a_sweep(int ranks, int async, int no_sync, int replaces)
{
    int before = test_failures;
    sweep s;
    memset(&s, 0, sizeof s);
    s.job.directory = fresh("sweep");
    s.job.async = async;
    s.job.desc.directory = s.job.directory;
    s.job.desc.keep_last = 2;
    s.job.desc.no_sync = no_sync;
    s.replaces = replaces;
    s.job.desc.timeout_ms = 3000; /* of an asynchronous save, when a mark cannot be written */
    test_failures = 0;
    CHECK_EQ(dtrain_run_threads(ranks, sweep_body, &s, NULL), DTRAIN_OK);
    CHECK(s.faults > 20);
    CHECK(s.errors > 15);
    if (test_failures > 0)
        TEST_FAIL("%d ranks, async %d, %d faults, %d errors", ranks, async, s.faults, s.errors);
    test_failures += before;
}

TEST(an_error_at_any_call_is_told_and_costs_no_checkpoint)
{
    a_sweep(1, 0, 0, 0);
    a_sweep(1, 1, 1, 0);
    a_sweep(3, 0, 1, 0);
    a_sweep(2, 1, 1, 0);
}

TEST(an_error_at_any_call_of_a_save_that_replaces_a_checkpoint_leaves_one_of_both)
{
    a_sweep(1, 0, 0, 1);
    a_sweep(2, 0, 0, 1);
    a_sweep(2, 1, 0, 1);
}

TEST(reads_and_writes_in_small_pieces_give_the_same)
{
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    memset(&desc, 0, sizeof desc);
    desc.directory = fresh("stutter");
    desc.no_sync = 1;
    holding_begin(h, 1, 0);
    holding_fill(h, 6);
    stutters = 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    CHECK_EQ(newest(desc.directory), 6);
    stutters = 0;
    CHECK_EQ(newest(desc.directory), 6);
    dtrain_checkpoint_destroy(ckpt);
    free(h);
}

TEST(a_second_save_while_one_is_written_is_refused_and_harms_neither)
{
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    memset(&desc, 0, sizeof desc);
    desc.directory = fresh("second");
    desc.no_sync = 1;
    holding_begin(h, 1, 0);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    holding_fill(h, 21);
    __atomic_store_n(&gate, 1, __ATOMIC_SEQ_CST);
    CHECK_EQ(dtrain_checkpoint_save_async(ckpt, &h->state), DTRAIN_OK);
    CHECK_EQ(dtrain__checkpoint_done(ckpt), 0);
    holding_fill(h, 22);
    CHECK_EQ(dtrain_checkpoint_save_async(ckpt, &h->state), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0 still writes its part of step 21: call dtrain_checkpoint_wait");
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_ERR_INVALID);
    __atomic_store_n(&gate, 0, __ATOMIC_SEQ_CST);
    CHECK_EQ(dtrain_checkpoint_wait(ckpt), DTRAIN_OK);
    CHECK_EQ(newest(desc.directory), 21);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    CHECK_EQ(newest(desc.directory), 22);
    dtrain_checkpoint_destroy(ckpt);
    free(h);
}

/* ---- a rank that does not come ---- */

static dtrain_status absent_body(dtrain_comm *world, void *user)
{
    job *j = (job *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    holding_begin(h, ranks, rank);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &j->desc), DTRAIN_OK);
    holding_fill(h, 1);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    holding_fill(h, 2);
    if (rank != 1) {
        CHECK_EQ(dtrain_checkpoint_save_async(ckpt, &h->state), DTRAIN_OK);
        dtrain_status status = dtrain_checkpoint_wait(ckpt);
        CHECK_EQ(status, rank == 0 ? DTRAIN_ERR_TIMEOUT : DTRAIN_ERR_IO);
        CHECK_CONTAINS(dtrain_last_error(), "nothing has come from rank 1");
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0)
        CHECK_EQ(newest(j->directory), 1);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    holding_fill(h, 3); /* the ranks that all take part in count their calls alike again */
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    /* a piece that is wrong on one rank: the others learn it before their time is up */
    double began = now_s();
    holding_fill(h, 4);
    h->pieces[0].count += rank == 1 ? MANY : 0;
    dtrain_status status = dtrain_checkpoint_save_async(ckpt, &h->state);
    CHECK_EQ(status, rank == 1 ? DTRAIN_ERR_INVALID : DTRAIN_OK);
    status = dtrain_checkpoint_wait(ckpt);
    CHECK_EQ(status, rank == 1 ? DTRAIN_ERR_INVALID : DTRAIN_ERR_IO); /* it is not visible, on any rank */
    if (rank != 1)
        CHECK_CONTAINS(dtrain_last_error(),
                       rank == 0 ? "rank 1 has failed: checkpoint: piece 0, of \"dealt\": its range" : "has failed");
    h->pieces[0].count -= rank == 1 ? MANY : 0;
    CHECK_WITHIN(now_s() - began, 20);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    holding_fill(h, 4);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    holding_fill(h, rank == 2 ? 6 : 5);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "step 5 on ranks 0, 1, but 6 on rank 2");
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0)
        CHECK_EQ(newest(j->directory), 4);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return DTRAIN_OK;
}

TEST(a_rank_that_does_not_save_is_named_and_the_last_checkpoint_stays)
{
    job j;
    memset(&j, 0, sizeof j);
    j.directory = j.desc.directory = fresh("absent");
    j.desc.no_sync = 1;
    j.desc.timeout_ms = 400;
    CHECK_EQ(dtrain_run_threads(3, absent_body, &j, NULL), DTRAIN_OK);
}

/* ---- full disks and disks that turn read-only ---- */

/* Rank 1's disk takes neither its part nor a mark that it has failed. The others hear of it at once, from rank 1. */
static dtrain_status no_mark_body(dtrain_comm *world, void *user)
{
    job *j = (job *)user;
    int rank = dtrain_comm_rank(world);
    char part[300];
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    holding_begin(h, 3, rank);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &j->desc), DTRAIN_OK);
    holding_fill(h, 1);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    holding_fill(h, 2);
    dtrain_status status = DTRAIN_OK;
    if (rank != 1 && j->async)
        status = dtrain_checkpoint_save_async(ckpt, &h->state);
    CHECK_EQ(status, DTRAIN_OK);
    snprintf(part, sizeof part, "ls -A %s/step-2 2>/dev/null | grep -c '^rank.*done' | grep -q 2", j->directory);
    while (rank == 1 && j->async && system(part) != 0)
        usleep(1000);
    full = rank == 1;
    if (rank == 1 && j->async)
        __atomic_store_n(&all_full, 1, __ATOMIC_SEQ_CST);
    if (rank == 1 || !j->async)
        status = save_once(ckpt, h, j->async);
    else
        status = dtrain_checkpoint_wait(ckpt);
    CHECK_EQ(status, DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1");
    CHECK_CONTAINS(dtrain_last_error(), "No space left on device");
    CHECK(strstr(dtrain_last_error(), "rank 0 has failed") == NULL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    full = 0;
    __atomic_store_n(&all_full, 0, __ATOMIC_SEQ_CST);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(newest(j->directory), 1);
    holding_fill(h, 3);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return DTRAIN_OK;
}

TEST(a_rank_whose_disk_takes_no_mark_tells_the_others_by_a_message)
{
    for (int async = 0; async < 2; async++) {
        job j;
        memset(&j, 0, sizeof j);
        j.directory = j.desc.directory = fresh("unmarked");
        j.async = async;
        j.desc.timeout_ms = test_ms(5000);
        CHECK_EQ(dtrain_run_threads(3, no_mark_body, &j, NULL), DTRAIN_OK);
    }
}

/* Rank 1 has saved twice before rank 0 begins, so it asks the store for both. */
static int saves_two_at_once(dtrain_comm *world, scene *s)
{
    dtrain_checkpoint *ckpts[2] = {NULL, NULL};
    dtrain_checkpoint_state state;
    memset(&state, 0, sizeof state);
    state.step = 1;
    for (int i = 0; i < 2; i++) {
        dtrain_checkpoint_desc desc;
        char directory[300];
        memset(&desc, 0, sizeof desc);
        snprintf(directory, sizeof directory, "%s/%d", (const char *)s->user, i);
        desc.directory = directory;
        CHECK_EQ(dtrain_checkpoint_create(&ckpts[i], world, &desc), DTRAIN_OK);
    }
    if (dtrain_comm_rank(world) == 0)
        usleep(500000);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(dtrain_checkpoint_save_async(ckpts[i], &state), DTRAIN_OK);
    double begin = now_s();
    for (int i = 0; i < 2; i++)
        CHECK_EQ(dtrain_checkpoint_wait(ckpts[i]), DTRAIN_OK);
    CHECK_WITHIN(now_s() - begin, 4);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    for (int i = 0; i < 2; i++)
        dtrain_checkpoint_destroy(ckpts[i]);
    return 0;
}

TEST(two_that_save_at_once_on_one_group_do_not_hold_each_other_up)
{
    scene s;
    char directory[200];
    scene_begin(&s, 2, 0);
    snprintf(directory, sizeof directory, "%s", fresh("two"));
    CHECK_EQ(mkdir(directory, 0700), 0);
    s.user = directory;
    run_ranks(&s, saves_two_at_once);
}

static int failures_before; /* of the process that forks */

/* Saves until it fails, in a process of its own; its exit says what was wrong. */
static int fill_up(const char *directory, int async, const char *says)
{
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    dtrain_status status = DTRAIN_OK;
    uint64_t step = 0;
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    desc.no_sync = 1;
    holding_begin(h, 1, 0);
    if (dtrain_checkpoint_create(&ckpt, NULL, &desc) != DTRAIN_OK)
        return 2;
    while (status == DTRAIN_OK && step < 1000) {
        holding_fill(h, ++step);
        status = save_once(ckpt, h, async);
    }
    if (status != DTRAIN_ERR_IO || strstr(dtrain_last_error(), says) == NULL) {
        fprintf(stderr, "step %llu: %s\n", (unsigned long long)step, dtrain_last_error());
        return 3;
    }
    long found = newest(directory);
    if (found != (long)step - 1) {
        fprintf(stderr, "the newest is %ld after %llu failed\n", found, (unsigned long long)step);
        return 4;
    }
    dtrain_checkpoint_destroy(ckpt);
    return step > 2 && test_failures == failures_before ? 0 : 5;
}

static int in_child(int (*body)(const char *directory, int async), const char *directory, int async)
{
    fflush(stdout);
    fflush(stderr);
    failures_before = test_failures;
    pid_t pid = fork();
    if (pid == 0)
        _exit(body(directory, async));
    return end_of(pid, 60);
}

static int limited(const char *directory, int async)
{
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    struct rlimit limit = {60000, 60000};
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    desc.no_sync = 1;
    holding_begin(h, 1, 0);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    holding_fill(h, 1);
    CHECK_EQ(save_once(ckpt, h, async), DTRAIN_OK);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    holding_fill(h, 2);
    CHECK_EQ(save_once(ckpt, h, async), DTRAIN_ERR_IO); /* and no SIGXFSZ, which would end the process */
    CHECK_CONTAINS(dtrain_last_error(), "File too large");
    CHECK_EQ(newest(directory), 1);
    h->pieces[0].count = h->pieces[0].shape[0] = 5000; /* what fits is saved */
    h->list.count = 2;
    holding_fill(h, 3);
    CHECK_EQ(save_once(ckpt, h, async), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    return test_failures != failures_before;
}

TEST(a_limit_of_file_sizes_is_an_error_and_no_signal)
{
    CHECK_EQ(in_child(limited, fresh("limit"), 0), 0);
    CHECK_EQ(in_child(limited, fresh("limit"), 1), 0);
}

static int no_room(const char *directory, int async)
{
    return fill_up(directory, async, "No space left on device");
}

static int turned(const char *directory, int async)
{
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    holding_begin(h, 1, 0);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    holding_fill(h, 1);
    CHECK_EQ(save_once(ckpt, h, async), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt); /* what it holds open for its lock would keep the disk as it is */
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    CHECK_EQ(mount(NULL, directory, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    holding_fill(h, 2);
    CHECK_EQ(save_once(ckpt, h, async), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "Read-only file system");
    CHECK_EQ(newest(directory), 1);
    CHECK_EQ(mount(NULL, directory, NULL, MS_REMOUNT, NULL), 0);
    CHECK_EQ(save_once(ckpt, h, async), DTRAIN_OK);
    CHECK_EQ(newest(directory), 2);
    dtrain_checkpoint_destroy(ckpt);
    return test_failures != failures_before;
}

TEST(a_disk_that_is_full_or_turns_read_only_keeps_what_it_has)
{
    const char *directory = fresh("disk");
    mkdir(directory, 0777);
    for (int async = 0; async < 2; async++) {
        if (mount("none", directory, "tmpfs", 0, "size=1m") != 0) {
            printf("skipped: no tmpfs may be mounted here (%s)\n", strerror(errno));
            return;
        }
        CHECK_EQ(in_child(no_room, directory, async), 0);
        CHECK_EQ(umount(directory), 0);
        CHECK_EQ(mount("none", directory, "tmpfs", 0, "size=1m"), 0);
        CHECK_EQ(in_child(turned, directory, async), 0);
        CHECK_EQ(umount(directory), 0);
    }
}

/* ---- killed jobs ---- */

typedef struct tally {
    uint64_t started, completed; /* the highest steps of rank 0 */
    int failed;                  /* a rank has seen an error of a save or load */
    char text[400];
} tally;

static tally *shared;

/* Trains: goes on from the newest checkpoint, and saves every step, until it is killed. */
static int train_until_killed(dtrain_comm *world, scene *s)
{
    job *j = (job *)s->user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    dtrain_status status = dtrain_checkpoint_create(&ckpt, world, &j->desc);
    holding_begin(h, ranks, rank);
    if (status == DTRAIN_OK && shared->completed > 0) {
        status = dtrain_checkpoint_load(ckpt, &h->state, NULL, NULL);
        if (status == DTRAIN_OK && !holding_is(h, h->state.step))
            status = DTRAIN_ERR_CORRUPT;
    }
    for (uint64_t step = h->state.step + 1; status == DTRAIN_OK; step++) {
        holding_fill(h, step);
        if (rank == 0)
            shared->started = step;
        status = save_once(ckpt, h, j->async);
        if (rank == 0 && status == DTRAIN_OK)
            shared->completed = step;
    }
    if (status != DTRAIN_ERR_PEER_LOST && __atomic_exchange_n(&shared->failed, 1, __ATOMIC_SEQ_CST) == 0)
        snprintf(shared->text, sizeof shared->text, "rank %d: %s: %.300s", rank, dtrain_status_name(status),
                 dtrain_last_error());
    while (getpid() != 0) /* the others are on their way out as well: nobody leaves before it is killed */
        usleep(10000);
    return 1;
}

/* Saves twice; rank 2 is gone before the second, and the others do not wait for it until their time is up. */
static int save_without_rank_2(dtrain_comm *world, scene *s)
{
    job *j = (job *)s->user;
    int rank = dtrain_comm_rank(world);
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint *ckpt = NULL;
    holding_begin(h, 3, rank);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &j->desc), DTRAIN_OK);
    holding_fill(h, 1);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    scene_meet(3);
    if (rank == 2)
        raise(SIGKILL);
    holding_fill(h, 2);
    CHECK_EQ(dtrain_checkpoint_save_async(ckpt, &h->state), DTRAIN_OK);
    dtrain_status status = dtrain_checkpoint_wait(ckpt);
    if (rank == 0) {
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "step 2: rank 2 has left the group before its part was written");
        CHECK_EQ(newest(j->directory), 1);
    } else {
        CHECK_EQ(status, DTRAIN_ERR_IO);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0 has failed: checkpoint of step 2: rank 2 has left");
    }
    dtrain_checkpoint_destroy(ckpt);
    free(h);
    return test_failures != 0;
}

TEST(a_rank_that_dies_before_an_asynchronous_save_is_not_waited_for)
{
    job j;
    scene s;
    pid_t pids[3];
    memset(&j, 0, sizeof j);
    j.directory = j.desc.directory = fresh("dead");
    j.desc.no_sync = 1;
    j.desc.timeout_ms = test_ms(250000);
    scene_begin(&s, 3, 0);
    s.user = &j;
    for (int rank = 0; rank < 3; rank++)
        pids[rank] = start_rank(&s, rank, save_without_rank_2);
    CHECK_EQ(end_of(pids[0], 100), 0);
    CHECK_EQ(end_of(pids[1], 100), 0);
    waitpid(pids[2], NULL, 0);
}

/* Steps that have a directory. */
static long count_steps(const char *directory)
{
    char command[200];
    long count = -1;
    snprintf(command, sizeof command, "find %s -name 'step-*' | wc -l", directory);
    FILE *pipe = popen(command, "r");
    CHECK(pipe != NULL && fscanf(pipe, "%ld", &count) == 1);
    pclose(pipe);
    return count;
}

/* Starts a job, kills it at a random moment, and looks at what is there. */
static void a_kill(job *j, uint64_t seed, int round)
{
    pid_t pids[3];
    scene s;
    int ranks = 1 + round % 3;
    scene_begin(&s, ranks, 0);
    s.user = j;
    shared->failed = 0;
    for (int rank = 0; rank < ranks; rank++)
        pids[rank] = start_rank(&s, rank, train_until_killed);
    double until = now_s() + 20;
    uint64_t before = shared->completed;
    while (shared->completed == before && now_s() < until && !shared->failed) /* it has begun to save */
        usleep(500);
    usleep((unsigned)(dtrain_random_u64(seed, (uint64_t)round) % 30000));
    for (int i = 0; i < ranks; i++) { /* one after the other, from a random rank on */
        kill(pids[(i + round) % ranks], SIGKILL);
        if (dtrain_random_u64(seed, (uint64_t)round + 1000000) % 2)
            usleep((unsigned)(dtrain_random_u64(seed, (uint64_t)round + 2000000) % 3000));
    }
    for (int rank = 0; rank < ranks; rank++)
        waitpid(pids[rank], NULL, 0);
    if (shared->failed && strstr(shared->text, "has failed") == NULL)
        TEST_FAIL("round %d: %s", round, shared->text);
    CHECK(shared->completed > before);
    long found = newest(j->directory);
    if (found < (long)shared->completed || found > (long)shared->started)
        TEST_FAIL("round %d of seed %llu: the newest is %ld, %llu is completed, %llu begun", round,
                  (unsigned long long)seed, found, (unsigned long long)shared->completed,
                  (unsigned long long)shared->started);
    CHECK(count_steps(j->directory) <= 5); /* 2 that stay, one half removed, one or two begun: of this job alone */
    shared->completed = shared->started = (uint64_t)found;
}

static void kills(int async)
{
    const char *rounds = getenv("CHECKPOINT_ROUNDS"), *given = getenv("CHECKPOINT_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 10) : 6;
    int before = test_failures;
    job j;
    memset(&j, 0, sizeof j);
    j.directory = j.desc.directory = fresh("kills");
    j.async = async;
    j.desc.keep_last = 2;
    shared = (tally *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    dtrain_set_log(quiet, NULL);
    for (int round = 0; round < (rounds != NULL ? atoi(rounds) : 6) && test_failures == before; round++) {
        j.desc.no_sync = round % 4 != 0;
        a_kill(&j, seed, round);
    }
    dtrain_set_log(NULL, NULL);
    munmap(shared, sizeof *shared);
}

TEST(a_job_killed_while_it_saves_leaves_the_newest_checkpoint_or_the_one_before)
{
    kills(0);
}

TEST(a_job_killed_while_it_saves_asynchronously_does_too)
{
    kills(1);
}

/* ---- readers beside a writer ---- */

static int read_along(const char *directory, int seconds)
{
    int before = test_failures;
    beside_a_writer = 1;
    double until = now_s() + seconds;
    long last = 0, loads = 0;
    while (now_s() < until && test_failures == before) {
        long found = newest(directory);
        CHECK(found >= last);
        last = found;
        loads++;
    }
    return test_failures != before || loads < 5;
}

TEST(readers_beside_a_writer_see_whole_checkpoints)
{
    holding *h = (holding *)malloc(sizeof *h);
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    pid_t pids[2];
    int ends = 0;
    memset(&desc, 0, sizeof desc);
    desc.directory = fresh("readers");
    desc.no_sync = 1;
    desc.keep_last = 2;
    holding_begin(h, 1, 0);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    holding_fill(h, 1);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            _exit(read_along(desc.directory, 2));
    }
    double until = now_s() + 2;
    for (uint64_t step = 2; now_s() < until; step++) {
        holding_fill(h, step);
        CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK);
        CHECK_EQ(dtrain_checkpoint_save(ckpt, &h->state), DTRAIN_OK); /* replaced in place */
    }
    for (int i = 0; i < 2; i++)
        ends += end_of(pids[i], 30);
    CHECK_EQ(ends, 0);
    dtrain_checkpoint_destroy(ckpt);
    free(h);
}
