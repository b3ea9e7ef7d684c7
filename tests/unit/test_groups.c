/* Groups out of groups, on threads and on processes: who is in them, that they neither mix nor wait for each other, and
 * that what happens to one happens to no other. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "hooks.h"
#include "dtrain.h"
#include "test.h"
#include "groups.h"
#include "wait_in_part.h"

#include <dirent.h>

static int by_color_and_key(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), who[3] = {-1, -1, -1};
    dtrain_comm *half, *pair, *none, *again;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, rank % 2, -rank, &half), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(half), 3);
    CHECK_EQ(dtrain_comm_rank(half), 2 - rank / 2); /* of 4, 2, 0 and of 5, 3, 1 */
    CHECK_EQ(dtrain_all_gather(half, &rank, who, 3, DTRAIN_I32), DTRAIN_OK);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(who[i], 4 - 2 * i + rank % 2);
    CHECK_EQ(sum(half, rank), rank % 2 ? 9 : 6);
    /* of a group that came of a split: its first two, and one alone */
    CHECK_EQ(dtrain_comm_split(half, dtrain_comm_rank(half) / 2, 0, &pair), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(pair), rank < 2 ? 1 : 2);
    CHECK_EQ(sum(pair, rank), rank < 2 ? rank : rank % 2 ? 8 : 6);
    CHECK_EQ(dtrain_comm_split(world, rank < 2 ? -1 : 7, 0, &none), DTRAIN_OK);
    CHECK((none == NULL) == (rank < 2));
    CHECK(none == NULL || dtrain_comm_rank(none) == rank - 2); /* equal keys: by rank */
    CHECK(none == NULL || sum(none, 1) == 4);
    CHECK_EQ(dtrain_comm_split(half, 0, 0, &again), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_rank(again), dtrain_comm_rank(half));
    dtrain_comm_destroy(half); /* before those that came of it */
    CHECK_EQ(sum(again, 1), 3);
    CHECK_EQ(sum(pair, 1), dtrain_comm_size(pair));
    dtrain_comm_destroy(again);
    dtrain_comm_destroy(none);
    CHECK_EQ(sum(world, 1), 6);
    dtrain_comm_destroy(pair);
    return 0;
}

TEST(groups_form_by_color_and_key_and_out_of_each_other)
{
    on_both(6, by_color_and_key);
}

static int from_lists(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), listed = rank == 4 ? 0 : rank == 1 ? 1 : rank == 3 ? 2 : -1;
    dtrain_comm *group, *alone;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, listed < 0 ? -1 : 0, listed, &group), DTRAIN_OK);
    CHECK((group == NULL) == (listed < 0));
    CHECK(group == NULL || dtrain_comm_rank(group) == listed);
    CHECK(group == NULL || sum(group, rank) == 8);
    CHECK_EQ(dtrain_comm_split(world, -1, 0, &alone), DTRAIN_OK);
    CHECK(alone == NULL);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(world->error.text, "needs a group and a place for the new one (group is NULL)");
    CHECK_EQ(dtrain_comm_split(NULL, 0, 0, &alone), DTRAIN_ERR_INVALID);
    CHECK_EQ(sum(world, 1), 5);
    dtrain_comm_destroy(group);
    return 0;
}

TEST(a_group_of_listed_ranks_follows_its_list)
{
    on_both(5, from_lists);
}

typedef struct chatter {
    dtrain_comm *group;
    pthread_t thread;
    int turns;
    size_t count;
} chatter;

static void *chat(void *pointer)
{
    chatter *c = (chatter *)pointer;
    int size = dtrain_comm_size(c->group), rank = dtrain_comm_rank(c->group);
    float *x = (float *)malloc(c->count * sizeof(float));
    for (int turn = 0; turn < c->turns; turn++) {
        dtrain_work *work = NULL;
        for (size_t i = 0; i < c->count; i++)
            x[i] = (float)(rank + turn);
        if (turn % 3 == 0) {
            CHECK_EQ(dtrain_all_reduce_async(c->group, x, x, c->count, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
            CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        } else
            CHECK_EQ(dtrain_all_reduce(c->group, x, x, c->count, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK(x[0] == (float)(size * (size - 1) / 2 + size * turn) && x[c->count - 1] == x[0]);
    }
    free(x);
    return NULL;
}

static int in_many_threads(dtrain_comm *world, scene *s)
{
    static const size_t counts[] = {1, 5000, 200000};
    chatter c[4];
    (void)s;
    for (int i = 0; i < 4; i++) {
        if (i < 3)
            CHECK_EQ(dtrain_comm_split(world, i == 2 ? dtrain_comm_rank(world) / 2 : 0, i, &c[i].group), DTRAIN_OK);
        else
            c[i].group = world;
        c[i].turns = 30;
        c[i].count = counts[i % 3];
        if (c[i].group == NULL)
            return 1;
    }
    for (int i = 0; i < 4; i++)
        pthread_create(&c[i].thread, NULL, chat, &c[i]);
    for (int i = 0; i < 4; i++)
        pthread_join(c[i].thread, NULL);
    for (int i = 0; i < 3; i++)
        dtrain_comm_destroy(c[i].group);
    return 0;
}

TEST(threads_of_one_rank_use_different_groups_at_once)
{
    scene s;
    play p = {in_many_threads, NULL};
    on_both(4, in_many_threads);
    scene_begin(&s, 4, 1);
    s.desc.connections = 3;
    run_ranks(&s, in_many_threads);
    s.desc.connections = 0;
    s.desc.progress = DTRAIN_PROGRESS_POLL;
    run_ranks(&s, in_many_threads);
    CHECK_EQ(dtrain_run_threads(4, play_rank, &p, &s.desc), DTRAIN_OK);
}

/* A message of 8 MiB waits in one group for its receiver while the other group goes on, blocking and async. */
static int crossing(dtrain_comm *world, scene *s)
{
    enum { COUNT = 2 << 20 };
    static float big[2][COUNT]; /* one for each of two ranks of one process */
    int rank = dtrain_comm_rank(world);
    float *x = big[rank % 2], small[100] = {0};
    dtrain_comm *a, *b;
    dtrain_work *waiting, *work;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &a), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &b), DTRAIN_OK);
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)(rank == 0 ? i : 0);
    if (rank == 0)
        CHECK_EQ(dtrain_send_async(a, x, COUNT, DTRAIN_F32, 1, &waiting), DTRAIN_OK);
    for (int turn = 0; turn < 50; turn++) {
        CHECK_EQ(dtrain_all_reduce(b, small, small, 100, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(sum(world, 1), 2);
    }
    for (int turn = 0; turn < 20; turn++) {
        small[3] = (float)(rank + 1);
        CHECK_EQ(dtrain_all_reduce_async(b, small, small, 100, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        while (!dtrain_work_done(work)) /* the service thread alone drives it, beside the one that waits */
            usleep(200);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        CHECK(small[3] == 3);
    }
    if (rank == 0) {
        if (getenv("DTRAIN_MPI_SHM") == NULL) /* else MPI may have taken all of it */
            CHECK(!dtrain_work_done(waiting));
        CHECK_EQ(dtrain_barrier(b), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(waiting), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_barrier(b), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(a, x, COUNT, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK(x[1] == 1 && x[COUNT - 1] == COUNT - 1);
    }
    dtrain_comm_destroy(a);
    CHECK_EQ(sum(b, 1), 2);
    dtrain_comm_destroy(b);
    return 0;
}

TEST(a_large_message_that_waits_in_one_group_holds_up_no_other)
{
    on_both(2, crossing);
}

/* Rank 0 waits in the other group for rank 1, which waits in this one for what rank 0 has begun. */
static int begun_elsewhere(dtrain_comm *world, scene *s)
{
    enum { COUNT = 1 << 19 };
    static float sums[2][COUNT], sent[2][COUNT]; /* one for each of two ranks of one process */
    int rank = dtrain_comm_rank(world);
    float *x = sums[rank], *y = sent[rank];
    dtrain_comm *other;
    dtrain_work *work[2];
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &other), DTRAIN_OK);
    for (int i = 0; i < COUNT; i++) {
        x[i] = (float)(i + rank);
        y[i] = (float)(rank == 0 ? i : 0);
    }
    if (rank == 0) {
        CHECK_EQ(dtrain_all_reduce_async(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM, &work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_send_async(world, y, COUNT, DTRAIN_F32, 1, &work[1]), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(other), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_all_reduce(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(world, y, COUNT, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(other), DTRAIN_OK);
    }
    CHECK(x[1] == 3 && x[COUNT - 1] == 2 * COUNT - 1 && y[COUNT - 1] == COUNT - 1);
    dtrain_comm_destroy(other);
    return 0;
}

TEST(what_was_begun_in_one_group_goes_on_while_its_rank_waits_in_another)
{
    static const dtrain_algorithm algorithms[] = {DTRAIN_ALGORITHM_AUTO, DTRAIN_ALGORITHM_TREE};
    scene s;
    play p = {begun_elsewhere, NULL};
    for (int way = 0; way < 4; way++) {
        scene_begin(&s, 2, 1);
        s.desc.progress = way & 1 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        s.desc.algorithm = algorithms[way / 2];
        run_ranks(&s, begun_elsewhere);
        CHECK_EQ(dtrain_run_threads(2, play_rank, &p, &s.desc), DTRAIN_OK);
    }
}

/* What another thread of a rank that waits has begun meanwhile. */
typedef struct newcomer {
    dtrain_comm *group;
    uint32_t leave;
    pthread_t thread;
} newcomer;

static void *comes_later(void *pointer)
{
    newcomer *n = (newcomer *)pointer;
    int32_t x = 1;
    dtrain_work *work;
    usleep(30000);
    CHECK_EQ(dtrain_all_reduce_async(n->group, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM, &work), DTRAIN_OK);
    while (!__atomic_load_n(&n->leave, __ATOMIC_SEQ_CST)) /* computes */
        usleep(500);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK(x == 2);
    return NULL;
}

static int begun_meanwhile(dtrain_comm *world, scene *s)
{
    float y = 0;
    newcomer n = {NULL, 0, 0};
    dtrain_work *work;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &n.group), DTRAIN_OK);
    for (int queued = 0; queued < 2; queued++) {
        n.leave = 0;
        if (dtrain_comm_rank(world) == 1) {
            CHECK_EQ(sum(n.group, 1), 2);
            y = 7;
            CHECK_EQ(dtrain_send(world, &y, 1, DTRAIN_F32, 0), DTRAIN_OK);
            continue;
        }
        pthread_create(&n.thread, NULL, comes_later, &n);
        if (queued) {
            CHECK_EQ(dtrain_recv_async(world, &y, 1, DTRAIN_F32, 1, &work), DTRAIN_OK);
            CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        } else {
            CHECK_EQ(dtrain_recv(world, &y, 1, DTRAIN_F32, 1), DTRAIN_OK);
        }
        CHECK(y == 7);
        __atomic_store_n(&n.leave, 1, __ATOMIC_SEQ_CST);
        pthread_join(n.thread, NULL);
    }
    dtrain_comm_destroy(n.group);
    return 0;
}

/* On threads and on processes, with progress by poll. */
static void by_poll(int ranks, rank_body body, int64_t timeout_ms)
{
    scene s;
    play p = {body, NULL};
    for (int tcp = 0; tcp < 2; tcp++) {
        scene_begin(&s, ranks, tcp);
        s.desc.progress = DTRAIN_PROGRESS_POLL;
        s.desc.timeout_ms = timeout_ms;
        run_ranks(&s, body);
    }
    for (int tree = 0; tree < 2; tree++) {
        s.desc.algorithm = tree ? DTRAIN_ALGORITHM_TREE : DTRAIN_ALGORITHM_AUTO;
        CHECK_EQ(dtrain_run_threads(ranks, play_rank, &p, &s.desc), DTRAIN_OK);
    }
}

TEST(what_another_thread_begins_while_one_waits_goes_on_too)
{
    by_poll(2, begun_meanwhile, 4000);
}

static int one_breaks(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    float x[8] = {0};
    dtrain_comm *bad, *good, *late;
    dtrain_status status;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, rank / 2, 0, &bad), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &good), DTRAIN_OK);
    if (rank / 2 == 0) {
        status = rank == 0 ? dtrain_broadcast(bad, x, 8, DTRAIN_F32, 1)
                           : dtrain_all_reduce(bad, x, x, 8, DTRAIN_F32, DTRAIN_SUM);
        CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(bad->error.text, "broadcast #1 (f32 x 8, root 1)");
        CHECK_CONTAINS(bad->error.text, "all_reduce #1 (sum, f32 x 8)");
    } else {
        CHECK_EQ(sum(bad, rank), 5);
    }
    CHECK_EQ(sum(world, rank), 6);
    CHECK_EQ(sum(good, rank), 6);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &late), DTRAIN_OK);
    if (rank == 3) /* nobody else comes: the others' deadline is theirs, and so is what it breaks */
        late->desc.timeout_ms = 100;
    if (rank == 3)
        CHECK_EQ(dtrain_recv(late, x, 8, DTRAIN_F32, 2), DTRAIN_ERR_TIMEOUT);
    CHECK_EQ(sum(world, rank), 6);
    CHECK_EQ(sum(good, rank), 6);
    dtrain_comm_destroy(late);
    dtrain_comm_destroy(bad);
    CHECK_EQ(sum(good, rank), 6);
    dtrain_comm_destroy(good);
    return 0;
}

TEST(what_breaks_one_group_leaves_the_others)
{
    on_both(4, one_breaks);
}

/* Groups of five ranks: victim is in the second only. */
static int with_a_death(dtrain_comm *world, scene *s)
{
    int victim = *(const int *)s->user, rank = dtrain_comm_rank(world), at, lists[2][3];
    char text[64];
    size_t bytes;
    dtrain_comm *without[2], *with;
    for (int i = 0; i < 3; i++) {
        lists[0][i] = (victim + 1 + i) % 5; /* three others, and three with the last of these and the victim */
        lists[1][i] = (victim + 3 + i) % 5;
    }
    for (int l = 0; l < 2; l++) {
        int color = -1, key = 0;
        for (int i = 0; i < 3; i++)
            if (lists[l][i] == rank)
                color = 0, key = i;
        CHECK_EQ(dtrain_comm_split(world, color, key, l == 0 ? &without[0] : &with), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_comm_split(world, rank == victim ? -1 : 0, 0, &without[1]), DTRAIN_OK);
    CHECK(with == NULL || sum(with, 1) == 3);
    CHECK(without[0] == NULL || sum(without[0], 1) == 3);
    CHECK_EQ(sum(world, 1), 5);
    snprintf(text, sizeof text, "%d has come so far", rank);
    CHECK_EQ(dtrain_store_set(world, text, NULL, 0), DTRAIN_OK);
    for (int other = 0; rank == victim && other < 5; other++) {
        snprintf(text, sizeof text, "%d has come so far", other);
        CHECK_EQ(dtrain_store_wait(world, text, NULL, 0, &bytes), DTRAIN_OK);
    }
    if (rank == victim)
        kill(getpid(), SIGKILL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_PEER_LOST);
    snprintf(text, sizeof text, "rank %d (pid ", victim);
    CHECK_CONTAINS(world->error.text, text);
    for (int turn = 0; turn < 20; turn++) {
        CHECK_EQ(sum(without[1], 1), 4);
        CHECK(without[0] == NULL || sum(without[0], 1) == 3);
        usleep(turn == 0 ? 100000 : 0);
    }
    if (with != NULL) {
        CHECK_EQ(dtrain_barrier(with), DTRAIN_ERR_PEER_LOST);
        for (at = 0; lists[1][at] != victim; at++)
            continue;
        snprintf(text, sizeof text, "rank %d (rank %d of the world, pid ", at, victim);
        CHECK_CONTAINS(with->error.text, text);
    }
    for (int turn = 0; turn < 20; turn++)
        CHECK_EQ(sum(without[1], 1), 4);
    dtrain_comm_destroy(with);
    dtrain_comm_destroy(without[0]);
    dtrain_comm_destroy(without[1]);
    return 0;
}

TEST(a_killed_process_breaks_the_groups_that_have_it_and_no_other)
{
    for (int victim = 0; victim < 5; victim += 3)
        for (int tcp = 0; tcp < 2; tcp++) {
            scene s;
            pid_t pids[5];
            scene_begin(&s, 5, tcp);
            s.user = &victim;
            for (int rank = 0; rank < 5; rank++)
                pids[rank] = start_rank(&s, rank, with_a_death);
            for (int rank = 0; rank < 5; rank++)
                CHECK_EQ(end_of(pids[rank], 30), rank == victim ? 128 + SIGKILL : 0);
            if (!tcp) { /* what the victim could not remove */
                char path[160];
                snprintf(path, sizeof path, victim == 0 ? "%s" : "%s.%d", s.root + 5, victim);
                unlink(path);
            }
        }
}

static dtrain_status gives_up(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    dtrain_comm **children = (dtrain_comm **)user, *rest;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &children[rank]), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank == 1 ? -1 : 0, 0, &rest), DTRAIN_OK);
    if (rank == 1)
        return dtrain_recv(NULL, NULL, 0, DTRAIN_F32, 0); /* any error; its end of the child stays */
    CHECK_EQ(dtrain_barrier(children[rank]), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(children[rank]->error.text, "rank 1 has left the group: rank 1: recv: the group is NULL");
    CHECK_EQ(sum(rest, 1), 2);
    dtrain_comm_destroy(rest);
    return DTRAIN_OK;
}

TEST(a_thread_that_ends_with_an_error_is_missed_in_no_group)
{
    dtrain_comm *children[3] = {NULL, NULL, NULL};
    CHECK_EQ(dtrain_run_threads(3, gives_up, children, NULL), DTRAIN_ERR_INVALID);
    for (int rank = 0; rank < 3; rank++)
        dtrain_comm_destroy(children[rank]);
}

static int store_of_all(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    char text[32];
    size_t bytes;
    dtrain_comm *half;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, rank % 2, 0, &half), DTRAIN_OK);
    if (rank == 3) {
        usleep(20000);
        CHECK_EQ(dtrain_store_set(half, "from 3", "hello", 6), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_store_wait(rank == 1 ? half : world, "from 3", text, sizeof text, &bytes), DTRAIN_OK);
    CHECK(bytes == 6 && strcmp(text, "hello") == 0);
    CHECK_EQ(dtrain_store_get(half, "from 3", text, sizeof text, &bytes), DTRAIN_OK);
    CHECK(bytes == 6);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(half);
    return 0;
}

TEST(groups_of_one_world_share_its_store)
{
    scene s;
    on_both(4, store_of_all);
    scene_begin_by(&s, 4, OWN);
    run_ranks(&s, store_of_all);
}

static int entries_of(const char *path)
{
    int count = 0;
    DIR *directory = opendir(path);
    while (directory != NULL && readdir(directory) != NULL)
        count++;
    if (directory != NULL)
        closedir(directory);
    return count;
}

static int again_and_again(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), before = 0, threads = 0;
    int shared = world->plane->in_process;
    size_t bytes = 0;
    float x[100] = {0};
    (void)s;
    for (int round = 0; round < 200; round++) {
        dtrain_comm *groups[3];
        dtrain_work *work;
        if (round == 1) { /* a first time has made what stays */
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            before = entries_of("/proc/self/fd");
            threads = entries_of("/proc/self/task");
            bytes = shared ? 0 : dtrain_comm_allocator(world)->bytes;
        }
        CHECK_EQ(dtrain_comm_split(world, (rank + round) % 2, 0, &groups[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_split(world, 0, 0, &groups[1]), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_split(groups[1], rank / 2, 0, &groups[2]), DTRAIN_OK);
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(dtrain_all_reduce_async(groups[i], x, x, 100, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
            CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        }
        if (round > 0 && entries_of("/proc/self/task") > threads)
            TEST_FAIL("round %d: more threads than the %d there were", round, threads - 2);
        for (int i = 0; i < 3; i++)
            dtrain_comm_destroy(groups[(i + round) % 3]);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (!shared) { /* ranks that are threads count each other's */
        CHECK_EQ(entries_of("/proc/self/fd"), before);
        CHECK_EQ(dtrain_comm_allocator(world)->bytes, bytes);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(two_hundred_rounds_leave_no_descriptor_thread_or_byte)
{
    scene s;
    on_threads(4, again_and_again, NULL);
    scene_begin(&s, 4, 1);
    run_ranks(&s, again_and_again);
}

/* Waits by turns that end at once, from a group's first message on. */
static int in_no_time(dtrain_comm *world, scene *s)
{
    int other = 1 - dtrain_comm_rank(world);
    float in[100], out[100] = {0};
    dtrain_work *work[2];
    (void)s;
    CHECK_EQ(dtrain_send_async(world, out, 100, DTRAIN_F32, other, &work[0]), DTRAIN_OK);
    CHECK_EQ(dtrain_recv_async(world, in, 100, DTRAIN_F32, other, &work[1]), DTRAIN_OK);
    for (int i = 0; i < 2; i++) {
        while (!wait_in_part(work[i], 0))
            continue;
    }
    return 0;
}

TEST(waits_of_no_time_come_to_an_end_as_well)
{
    by_poll(2, in_no_time, 4000);
}

/* A bounded wait of a fifth of a second for a peer that is late; who waits sleeps. */
static dtrain_status sleeps(dtrain_comm *world, void *user)
{
    float x = 1;
    struct timespec from, to;
    dtrain_work *work;
    (void)user;
    if (dtrain_comm_rank(world) == 1)
        usleep(300000);
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
    if (dtrain_comm_rank(world) == 0)
        CHECK_EQ(wait_in_part(work, 200), 0);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
    CHECK((double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9 < 0.05);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK(x == 2);
    return DTRAIN_OK;
}

TEST(a_bounded_wait_for_another_thread_sleeps)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int way = 0; way < 4; way++) {
        desc.progress = way & 1 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        desc.algorithm = way & 2 ? DTRAIN_ALGORITHM_TREE : DTRAIN_ALGORITHM_AUTO;
        CHECK_EQ(dtrain_run_threads(2, sleeps, NULL, &desc), DTRAIN_OK);
    }
}

typedef struct driver {
    dtrain_comm *group;
    uint32_t drives, leave, waited; /* waited: for leave in vain */
} driver;

static void *drives(void *pointer)
{
    driver *d = (driver *)pointer;
    double until = now_s() + 10;
    pthread_mutex_lock(&d->group->queue.drive);
    __atomic_store_n(&d->drives, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&d->leave, __ATOMIC_SEQ_CST) && !d->waited) {
        usleep(1000);
        d->waited = now_s() > until;
    }
    pthread_mutex_unlock(&d->group->queue.drive);
    return NULL;
}

TEST(a_poll_waits_for_no_other_thread_of_the_rank)
{
    driver d = {NULL, 0, 0, 0};
    dtrain_comm_desc desc;
    pthread_t thread;
    memset(&desc, 0, sizeof desc);
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_threads_create(&d.group, 1, &desc), DTRAIN_OK);
    pthread_create(&thread, NULL, drives, &d);
    while (!__atomic_load_n(&d.drives, __ATOMIC_SEQ_CST))
        sched_yield();
    CHECK_EQ(dtrain_comm_poll(d.group, 0), DTRAIN_OK);
    __atomic_store_n(&d.leave, 1, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    CHECK(!d.waited);
    dtrain_comm_destroy(d.group);
}

/* Overwrites what is freed. */
static void *spoils(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    if (new_bytes == 0 && pointer != NULL)
        memset(pointer, 0xff, old_bytes);
    return test_resize(pointer, old_bytes, new_bytes, align);
}

TEST(a_forked_child_leaves_groups_one_by_one)
{
    dtrain_allocator heap;
    dtrain_comm *world, *group;
    dtrain_comm_desc desc;
    memset(&heap, 0, sizeof heap);
    heap.resize = spoils;
    memset(&desc, 0, sizeof desc);
    desc.world_size = 1;
    desc.allocator = &heap;
    desc.algorithm = DTRAIN_ALGORITHM_TREE;
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dtrain_comm_destroy(group);
        int bad = sum(world, 5) != 5;
        dtrain_comm_destroy(world);
        _exit(bad + 2 * (heap.bytes != 0));
    }
    CHECK_EQ(end_of(child, 10), 0);
    CHECK_EQ(sum(group, 4), 4);
    dtrain_comm_destroy(world);
    CHECK_EQ(sum(group, 3), 3);
    dtrain_comm_destroy(group);
    CHECK_EQ(heap.bytes, 0);
}

static void *outlives(void *pointer)
{
    dtrain_comm **ends = (dtrain_comm **)pointer, *child;
    dtrain_work *work;
    float x = 1;
    CHECK_EQ(dtrain_comm_split(*ends, 0, 0, &child), DTRAIN_OK);
    dtrain_comm_destroy(*ends);
    CHECK_EQ(sum(child, 1), 3);
    CHECK_EQ(dtrain_all_reduce_async(child, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK(x == 3);
    CHECK_EQ(dtrain_comm_split(child, 0, 0, ends), DTRAIN_OK);
    dtrain_comm_destroy(child);
    CHECK_EQ(sum(*ends, 2), 6);
    dtrain_comm_destroy(*ends);
    return NULL;
}

static int outlives_rank(scene *s, int rank)
{
    dtrain_comm_desc desc = scene_desc(s, rank);
    dtrain_comm *world;
    int before = test_failures, fds = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_OK);
    if (world != NULL)
        outlives(&world);
    CHECK_EQ(entries_of("/proc/self/fd"), fds);
    for (int turn = 0; turn < 1000 && entries_of("/proc/self/task") != threads; turn++)
        usleep(1000); /* a thread may be listed for a moment after it was joined */
    CHECK_EQ(entries_of("/proc/self/task"), threads);
    return test_failures != before;
}

TEST(a_group_outlives_the_one_it_comes_of)
{
    dtrain_allocator heap;
    dtrain_comm_desc desc;
    dtrain_comm *ends[3];
    pthread_t threads[3];
    scene s;
    memset(&heap, 0, sizeof heap);
    memset(&desc, 0, sizeof desc);
    for (int own = 0; own < 2; own++) {
        desc.allocator = own ? NULL : &heap;
        CHECK_EQ(dtrain_threads_create(ends, 3, &desc), DTRAIN_OK);
        for (int rank = 0; rank < 3; rank++)
            pthread_create(&threads[rank], NULL, outlives, &ends[rank]);
        for (int rank = 0; rank < 3; rank++)
            pthread_join(threads[rank], NULL);
        CHECK_EQ(heap.bytes, 0);
    }
    for (int round = 0; round < 4; round++) {
        pid_t pids[3];
        scene_begin(&s, 3, round % 2);
        fflush(stdout);
        for (int rank = 0; rank < 3; rank++)
            if ((pids[rank] = fork()) == 0)
                _exit(outlives_rank(&s, rank));
        for (int rank = 0; rank < 3; rank++)
            CHECK_EQ(end_of(pids[rank], 30), 0);
    }
}

static dtrain_status pretend_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline, size_t *moved)
{
    dtrain_transport *inner = (dtrain_transport *)self;
    return inner->send(inner->self, peer, data, bytes, deadline, moved);
}

static dtrain_status pretend_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline, size_t *moved)
{
    dtrain_transport *inner = (dtrain_transport *)self;
    return inner->recv(inner->self, peer, data, bytes, deadline, moved);
}

static dtrain_status over_another_transport(dtrain_comm *world, void *user)
{
    dtrain_transport own;
    dtrain_comm *outer, *group;
    (void)user;
    memset(&own, 0, sizeof own);
    own.self = &world->transport;
    own.rank = world->rank;
    own.size = world->size;
    own.send = pretend_send;
    own.recv = pretend_recv;
    CHECK_EQ(dtrain_comm_from_transport(&outer, &own, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(outer, own.rank / 2, 0, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(group), own.rank < 2 ? 2 : 1);
    CHECK_EQ(sum(outer, 1), 3);
    dtrain_comm_destroy(outer);
    CHECK_EQ(sum(group, 7), own.rank < 2 ? 14 : 7);
    dtrain_comm_destroy(group);
    return DTRAIN_OK;
}

TEST(a_transport_of_the_users_own_splits)
{
    CHECK_EQ(dtrain_run_threads(3, over_another_transport, NULL, NULL), DTRAIN_OK);
}

TEST(a_world_of_one_splits_too)
{
    dtrain_comm *world, *group;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.world_size = 1;
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 3, 1, &group), DTRAIN_OK);
    CHECK_EQ(sum(group, 5), 5);
    dtrain_comm_destroy(world);
    dtrain_comm_destroy(group);
}
