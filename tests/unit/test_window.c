/* Memory that all ranks of a host map: who has it, in which groups and how long; buffers of several kinds in one call;
 * ranks that are killed, stopped or lie while they are inside each other's buffers. Results of all collectives on such
 * memory are in test_property. */
#define _GNU_SOURCE
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include <dirent.h>
#include <sched.h>

enum { COUNT = 20000 };

static float *get(dtrain_comm *group, size_t count)
{
    void *memory = NULL;
    CHECK_EQ(dtrain_comm_alloc(group, count * sizeof(float), &memory), DTRAIN_OK);
    CHECK(memory != NULL && (uintptr_t)memory % 64 == 0);
    return (float *)memory;
}

static void fill(float *x, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        x[i] = value;
}

static int is(const float *x, size_t count, float value)
{
    size_t i = 0;
    while (i < count && x[i] == value)
        i++;
    return i == count;
}

static int shares(const dtrain_comm *group)
{
    return group->shared != NULL && !group->plane->in_process;
}

/* The trace says how ranks of a transport of the user's own reach each other. */
static int says_way(const dtrain_comm *world)
{
    char way[160] = "";
    world->plane->way(world->transport.self, 0, way, sizeof way);
    return strcmp(way, shares(world) ? "frames of the transport, collectives in shared memory"
                                     : "frames of the transport, no shared memory") == 0;
}

/* Sums x of all ranks, whose values are 1, 2, ... Returns whether that is right. */
static int sums(dtrain_comm *group, float *x, size_t count)
{
    int size = dtrain_comm_size(group);
    fill(x, count, (float)(dtrain_comm_rank(group) + 1));
    return dtrain_all_reduce(group, x, x, count, DTRAIN_F32, DTRAIN_SUM) == DTRAIN_OK &&
           is(x, count, (float)(size * (size + 1) / 2));
}

/* What of the group's collectives went through bounce buffers, and so not in place. */
static uint64_t bounced(const dtrain_comm *group)
{
    return group->rounds;
}

static int everywhere(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), size = dtrain_comm_size(world);
    float *x = get(world, COUNT), *y = get(world, rank == 1 ? COUNT + 5 : COUNT), *own = (float *)malloc(COUNT * 4);
    void *none = NULL;
    CHECK(x != y && is(x, COUNT, 0) && is(y, COUNT, 0));
    CHECK_EQ(dtrain_comm_alloc(world, 0, &none), DTRAIN_OK);
    CHECK(none != NULL || !shares(world));
    CHECK(s == NULL || s->own == NULL || says_way(world));
    uint64_t before = bounced(world);
    CHECK(sums(world, x, COUNT));
    CHECK(sums(world, x + 7, COUNT - 7));
    CHECK(!shares(world) || bounced(world) == before);
    CHECK(sums(world, rank == 0 ? own : x, COUNT)); /* one rank's is its own */
    CHECK(!shares(world) || bounced(world) != before);
    fill(y, COUNT, (float)rank);
    CHECK_EQ(dtrain_all_reduce(world, y, x, COUNT, DTRAIN_F32, DTRAIN_MAX), DTRAIN_OK);
    CHECK(is(x, COUNT, (float)(size - 1)) && is(y, COUNT, (float)rank));
    CHECK_EQ(dtrain_all_reduce(world, y, own, COUNT, DTRAIN_F32, DTRAIN_MIN), DTRAIN_OK);
    CHECK(is(own, COUNT, 0));
    dtrain_comm_free(none);
    dtrain_comm_free(y);
    CHECK(sums(world, x, COUNT)); /* the other one has gone, and this one is as before */
    if (rank == 0)
        dtrain_comm_free(x);
    CHECK(sums(world, rank == 0 ? own : x, COUNT));
    if (rank != 0)
        dtrain_comm_free(x);
    free(own);
    return 0;
}

static dtrain_status on_a_thread(dtrain_comm *world, void *user)
{
    return everywhere(world, (scene *)user) == 0 ? DTRAIN_OK : DTRAIN_ERR_ABORTED;
}

TEST(memory_is_zero_aligned_and_any_address_inside_counts)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int way = UNIX; way < WAYS; way++) {
            scene s;
            scene_begin_by(&s, ranks, way);
            s.desc.progress = ranks % 2 ? DTRAIN_PROGRESS_THREAD : DTRAIN_PROGRESS_POLL;
            run_ranks(&s, everywhere);
        }
    CHECK_EQ(dtrain_run_threads(3, on_a_thread, NULL, NULL), DTRAIN_OK);
}

/* A window of the world serves its halves, a copy and the survivors, and outlives all of them. */
static int in_groups(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    dtrain_comm *half, *copy;
    float *x = get(world, COUNT), *h;
    CHECK_EQ(dtrain_comm_split(world, rank % 2, 0, &half), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 0, -rank, &copy), DTRAIN_OK);
    h = get(half, COUNT);
    CHECK(sums(half, x, 10) && sums(copy, x, 10)); /* they find out what they share */
    uint64_t before = bounced(half) + bounced(copy);
    CHECK(sums(half, x, COUNT) && sums(copy, x, COUNT) && sums(half, h, COUNT));
    CHECK(!shares(world) || bounced(half) + bounced(copy) == before);
    CHECK(sums(world, h, COUNT)); /* a half's serves no larger group */
    dtrain_comm_destroy(half);
    fill(h, COUNT, 3);
    dtrain_comm_free(h);
    dtrain_comm_destroy(copy);
    CHECK(sums(world, x, COUNT));
    scene_meet(s->ranks); /* all have their sum */
    if (rank == 3)
        kill(getpid(), SIGKILL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_PEER_LOST);
    CHECK_EQ(dtrain_comm_shrink(world, &copy), DTRAIN_OK);
    dtrain_comm_destroy(world);
    CHECK(sums(copy, x, 10));
    before = bounced(copy);
    CHECK(sums(copy, x, COUNT));
    CHECK(copy->shared == NULL || bounced(copy) == before);
    dtrain_comm_destroy(copy);
    CHECK(is(x, COUNT, 6));
    dtrain_comm_free(x);
    dtrain_comm_free(NULL);
    fflush(stdout);
    _exit(test_failures != 0);
}

TEST(groups_and_survivors_use_it_and_it_outlives_them)
{
    scene s;
    scene_begin(&s, 4, 0);
    dtrain_set_log(quiet, NULL);
    run_ranks_but(&s, 3, in_groups);
    dtrain_set_log(NULL, NULL);
}

static int entries(const char *path)
{
    int count = 0;
    DIR *directory = opendir(path);
    while (directory != NULL && readdir(directory) != NULL)
        count++;
    if (directory != NULL)
        closedir(directory);
    return count;
}

static int mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    int lines = 0, c;
    while (file != NULL && (c = fgetc(file)) != EOF)
        lines += c == '\n';
    if (file != NULL)
        fclose(file);
    return lines;
}

static int comes_and_goes(dtrain_comm *world, scene *s)
{
    int files = 0, maps = 0;
    (void)s;
    for (int turn = 0; turn < 30; turn++) {
        float *x = get(world, COUNT), *big = get(world, (size_t)1 << 20);
        dtrain_comm *group;
        CHECK(sums(world, x, COUNT));
        CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
        CHECK(sums(group, big, (size_t)1 << 20));
        dtrain_comm_free(big);
        dtrain_comm_destroy(group);
        dtrain_comm_free(x);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (turn == 10) {
            files = entries("/proc/self/fd");
            maps = mappings();
        }
    }
    CHECK(entries("/proc/self/fd") <= files + 1);
    CHECK(mappings() <= maps + 4); /* what one rank frees a moment later than another */
    return 0;
}

TEST(nothing_is_left_behind)
{
    int before = entries("/dev/shm");
    scene s;
    scene_begin(&s, 3, 0);
    run_ranks(&s, comes_and_goes);
    CHECK_EQ(entries("/dev/shm"), before);
}

static int has_a_child(dtrain_comm *world, scene *s)
{
    float *x = get(world, COUNT);
    (void)s;
    CHECK(sums(world, x, 3));
    if (!shares(world))
        return 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        fill(x, COUNT, 77);
        dtrain_comm_free(x);
        _exit(0);
    }
    CHECK_EQ(end_of(child, 10), 0);
    CHECK(is(x, COUNT, 77));
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK(sums(world, x, COUNT));
    dtrain_comm_free(x);
    return 0;
}

TEST(a_forked_child_shares_it)
{
    scene s;
    scene_begin(&s, 2, 0);
    run_ranks(&s, has_a_child);
}

static int logged;

static void count_log(void *user, dtrain_log_level level, const char *text)
{
    (void)user, (void)level;
    logged += strstr(text, "was not given by dtrain_comm_alloc") != NULL;
}

static int asks_for_too_much(dtrain_comm *world, scene *s)
{
    void *x = world;
    (void)s;
    size_t much = sizeof x == 8 ? SIZE_MAX / 16384 + 1 : (size_t)3 << 30; /* 2^50 */
    CHECK_EQ(dtrain_comm_alloc(world, dtrain_comm_rank(world) == 1 ? much : 100, &x), DTRAIN_ERR_MEMORY);
    CHECK_CONTAINS(dtrain_last_error(), "has no memory for ");
    if (sizeof x == 8)
        CHECK_CONTAINS(dtrain_last_error(), "the ranks of its host ask for 1073741824 MiB");
    CHECK(x == NULL);
    CHECK_EQ(dtrain_comm_alloc(world, dtrain_comm_rank(world) == 1 ? SIZE_MAX : 100, &x), DTRAIN_ERR_MEMORY);
    CHECK_CONTAINS(dtrain_last_error(), "has no memory for ");
    CHECK_EQ(dtrain_comm_alloc(world, 100, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_alloc(NULL, 100, &x), DTRAIN_ERR_INVALID);
    float *y = get(world, COUNT);
    CHECK(sums(world, y, COUNT));
    dtrain_set_log(count_log, NULL);
    dtrain_comm_free(y + 1);
    CHECK_EQ(logged, 1);
    dtrain_comm_free(y);
    dtrain_comm_free(y);
    CHECK_EQ(logged, 2);
    dtrain_set_log(NULL, NULL);
    return 0;
}

TEST(what_cannot_be_had_is_an_error_on_every_rank)
{
    scene s;
    scene_begin(&s, 3, 0);
    run_ranks(&s, asks_for_too_much);
}

/* ---- several hosts ---- */

static int of_two_hosts(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    dtrain_comm *host;
    float *x = get(world, COUNT);
    (void)s;
    CHECK(sums(world, x, COUNT));
    CHECK(world->shared == NULL);
    CHECK_EQ(dtrain_comm_split(world, rank / 2, 0, &host), DTRAIN_OK);
    CHECK(sums(host, x, 3));
    uint64_t before = bounced(host);
    CHECK(sums(host, x, COUNT));
    CHECK(host->shared == NULL || bounced(host) == before);
    dtrain_comm_destroy(host);
    dtrain_comm_free(x);
    return 0;
}

TEST(ranks_of_several_hosts_share_it_inside_each)
{
    scene s;
    pid_t pids[4];
    scene_begin(&s, 4, 1);
    s.desc.token = "a token of this test's";
    fflush(stdout);
    for (int rank = 0; rank < 4; rank++) {
        if ((pids[rank] = fork()) == 0) {
            char name[32];
            snprintf(name, sizeof name, "host-%d", rank / 2);
            if (rank >= 2 && (unshare(CLONE_NEWUTS) != 0 || sethostname(name, strlen(name)) != 0))
                printf("skipped: the system gives this user no second host name\n");
            _exit(rank_main(&s, rank, of_two_hosts));
        }
        scene_started(&s, rank);
    }
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(end_of(pids[rank], 60), 0);
}

/* ---- ranks that end or stop inside their peers' buffers ---- */

enum { LARGE = 1 << 22 };

/* Reduces until another rank is gone; then writes to its buffers, which stay as they are. */
static int keeps_what_it_writes(dtrain_comm *world, scene *s)
{
    double begin = now_s();
    int plain = ((int *)s->user)[3]; /* buffers that are in no window */
    float *x = plain ? (float *)malloc(LARGE * sizeof(float)) : get(world, LARGE);
    dtrain_status status = DTRAIN_OK;
    fill(x, LARGE, 1);
    CHECK(sums(world, x, 10));
    scene_meet(s->ranks); /* no rank is killed before all have their sum */
    world->desc.timeout_ms = 1500;
    if (dtrain_comm_rank(world) == 0)
        __atomic_store_n((int *)s->user, shares(world) ? 1 : 2, __ATOMIC_SEQ_CST); /* all are there */
    if (!shares(world))
        return 0;
    while (status == DTRAIN_OK && now_s() - begin < 20)
        status = dtrain_all_reduce(world, x, x, LARGE, DTRAIN_F32, DTRAIN_MAX);
    if (dtrain_comm_rank(world) == 1)
        return 0; /* the one that was stopped: it was given up */
    CHECK(status == DTRAIN_ERR_PEER_LOST || status == DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1");
    fill(x, LARGE, 5);
    __atomic_add_fetch((int *)s->user + 1, 1, __ATOMIC_SEQ_CST); /* the test lets rank 1 go on */
    while (__atomic_load_n((int *)s->user + 2, __ATOMIC_SEQ_CST) == 0 && now_s() - begin < 30)
        usleep(1000);
    CHECK(is(x, LARGE, 5));
    if (plain)
        free(x);
    else
        dtrain_comm_free(x);
    return 0;
}

static void stops_rank_1(int by, int round)
{
    scene s;
    pid_t pids[3];
    int *told = (int *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANON, -1, 0);
    double until = now_s() + 20;
    scene_begin_by(&s, 3, round < 4 ? UNIX : OWN_HOST);
    s.user = told;
    told[3] = round % 2;
    dtrain_set_log(quiet, NULL);
    for (int rank = 0; rank < 3; rank++)
        pids[rank] = start_rank(&s, rank, keeps_what_it_writes);
    while (__atomic_load_n(told, __ATOMIC_SEQ_CST) == 0 && now_s() < until)
        usleep(100);
    usleep((useconds_t)(round % 4 * 1700));
    kill(pids[1], by);
    while (__atomic_load_n(told + 1, __ATOMIC_SEQ_CST) < 2 && now_s() < until && told[0] == 1)
        usleep(1000);
    kill(pids[1], SIGCONT);
    usleep(200000);
    __atomic_store_n(told + 2, 1, __ATOMIC_SEQ_CST);
    CHECK_EQ(end_of(pids[0], 30), 0);
    CHECK_EQ(end_of(pids[2], 30), 0);
    int end = end_of(pids[1], 30);
    CHECK(end == 0 || end == 128 + SIGKILL);
    dtrain_set_log(NULL, NULL);
    munmap(told, 4096);
}

TEST(a_rank_that_is_killed_inside_is_named)
{
    for (int round = 0; round < 8; round++)
        stops_rank_1(SIGKILL, round);
}

TEST(a_rank_that_is_stopped_inside_writes_nothing_when_it_goes_on)
{
    for (int round = 0; round < 8; round++)
        stops_rank_1(SIGSTOP, round);
}

/* Rank 1 names a window that there is not, or a place beyond its end. */
static int lies(dtrain_comm *world, scene *s)
{
    float *x = get(world, COUNT);
    CHECK(sums(world, x, 10));
    CHECK(sums(world, x, COUNT));
    if (!shares(world))
        return 0;
    if (dtrain_comm_rank(world) == 1) {
        CHECK(world->found.id != 0);
        if (*(int *)s->user == 0) {
            world->found.id ^= 1;
        } else {
            world->found.begin /= 2; /* places are counted from there */
            world->found.bytes = SIZE_MAX;
        }
        CHECK(dtrain_all_reduce(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM) != DTRAIN_OK);
        _exit(0);
    }
    CHECK_EQ(dtrain_all_reduce(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 names memory of dtrain_comm_alloc that this rank does not have");
    return 0;
}

TEST(a_name_that_lies_is_an_error)
{
    for (int how = 0; how < 2; how++) {
        scene s;
        scene_begin(&s, 2, 0);
        s.user = &how;
        dtrain_set_log(quiet, NULL);
        run_ranks(&s, lies);
        dtrain_set_log(NULL, NULL);
    }
}

/* ---- ranks that leave or are lost ---- */

/* Rank 0 has done its share of a sum and leaves before rank 1 has. */
static int leaves_in_the_middle(dtrain_comm *world, scene *s)
{
    int *told = (int *)s->user, rank = dtrain_comm_rank(world), before = test_failures;
    float *x = get(world, LARGE);
    double until = now_s() + 20;
    dtrain_work *work = NULL;
    fill(x, LARGE, 1);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce_async(world, x, x, LARGE, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    if (rank == 1) {
        CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK); /* it has posted */
        while (__atomic_load_n(told, __ATOMIC_SEQ_CST) == 0 && now_s() < until)
            usleep(1000);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0");
        __atomic_store_n(told, 2, __ATOMIC_SEQ_CST);
        return 0;
    }
    while (shares(world) && now_s() < until && (work->op.phase != DTRAIN__FUSED_FINISH || work->done))
        CHECK_EQ(dtrain_comm_poll(world, 1000), DTRAIN_OK);
    dtrain_comm_destroy(world);
    fill(x, LARGE, 1000);
    __atomic_store_n(told, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(told, __ATOMIC_SEQ_CST) != 2 && now_s() < until)
        usleep(1000);
    CHECK(is(x, LARGE, 1000));
    dtrain_comm_free(x);
    fflush(stdout);
    _exit(test_failures != before);
}

TEST(a_rank_that_leaves_ends_what_others_have_not_ended)
{
    scene s;
    int *told = (int *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANON, -1, 0);
    dtrain_set_log(quiet, NULL);
    for (int way = UNIX; way <= OWN_HOST; way += OWN_HOST) {
        scene_begin_by(&s, 2, way);
        *told = 0;
        s.user = told;
        s.desc.progress = DTRAIN_PROGRESS_POLL;
        run_ranks(&s, leaves_in_the_middle);
    }
    dtrain_set_log(NULL, NULL);
    munmap(told, 4096);
}

/* The others no longer map a buffer of rank 0's, as after a process that was stopped inside it. */
static int has_parted(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    float *x = get(world, COUNT);
    dtrain_comm *group;
    (void)s;
    CHECK(sums(world, x, COUNT));
    if (rank == 0)
        dtrain__window_part_from(x + 3, 9000);
    CHECK(is(x, COUNT, 6)); /* nothing has changed for its own process */
    CHECK_EQ(dtrain_comm_split(world, 0, -rank, &group), DTRAIN_OK);
    for (int root = 0; root < 3; root++) {
        fill(x, COUNT, (float)(rank == root ? 50 + root : 0));
        CHECK_EQ(dtrain_broadcast(world, x, COUNT, DTRAIN_F32, root), DTRAIN_OK);
        CHECK(is(x, COUNT, (float)(50 + root)));
        fill(x, COUNT, (float)(rank + 1));
        CHECK_EQ(dtrain_reduce(group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM, 2 - root), DTRAIN_OK);
        CHECK(is(x, COUNT, rank == root ? 6 : (float)(rank + 1)));
        CHECK(sums(world, x, COUNT) && sums(group, x, COUNT));
    }
    dtrain_comm_destroy(group);
    dtrain_comm_free(x);
    return 0;
}

TEST(a_buffer_that_was_taken_from_the_others_serves_all_groups)
{
    scene s;
    scene_begin(&s, 3, 0);
    run_ranks(&s, has_parted);
}

static int windows_in_use(void)
{
    int count = 0;
    for (dtrain__window *window = dtrain__windows()->first; window != NULL; window = window->next)
        count += window->used;
    return count;
}

static int outlives_rank_2(dtrain_comm *world, scene *s)
{
    float *x = get(world, COUNT), *y = get(world, COUNT);
    dtrain_comm *rest;
    (void)s;
    CHECK(sums(world, x, COUNT));
    if (dtrain_comm_rank(world) == 2)
        kill(getpid(), SIGKILL);
    dtrain_comm_free(x);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_PEER_LOST);
    CHECK_EQ(dtrain_comm_shrink(world, &rest), DTRAIN_OK);
    dtrain_comm_free(y);
    CHECK_EQ(dtrain_barrier(rest), DTRAIN_OK);
    const dtrain__council *council = rest->seat->council;
    while (council->gone(council->self, 2) == DTRAIN__PRESENT) /* another rank may have found the loss */
        usleep(1000);
    y = get(rest, 10); /* takes a place that is free */
    CHECK_EQ(windows_in_use(), 1);
    dtrain_comm_free(y);
    dtrain_comm_destroy(rest);
    return 0;
}

TEST(memory_that_a_lost_rank_had_not_freed_is_given_back)
{
    scene s;
    dtrain_set_log(quiet, NULL);
    for (int way = UNIX; way <= OWN_HOST; way += OWN_HOST) {
        scene_begin_by(&s, 3, way);
        run_ranks_but(&s, 2, outlives_rank_2);
    }
    dtrain_set_log(NULL, NULL);
}
