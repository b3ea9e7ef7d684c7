/* Local SGD through a server: the bits of the all-reduce, what travels, members that are late or killed, and the death
 * of the server. */
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "processes.h"

const size_t hook_rounds_piece = 100; /* so that a small model has many pieces */

#include <math.h>

#include "local_sgd_toy.h"

typedef struct course {
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
    int rounds, packs;
    uint64_t sent[5]; /* by each rank in all rounds */
    float result[MOST];
} course;

static dtrain_status run_course(dtrain_comm *world, void *user)
{
    course *c = (course *)user;
    dtrain_local_sgd_desc desc = c->desc;
    dtrain_compress_desc compress = c->compress;
    int rank = dtrain_comm_rank(world);
    toy t;
    dtrain_local_sgd *local;
    desc.compress = c->packs ? &compress : NULL;
    toy_begin(&t, 40);
    for (size_t i = 0; i < t.count; i++)
        t.data[i] = dtrain_random_normal(3, i);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 0; step < c->rounds * desc.steps; step++) {
        toy_step(&t, 6, rank, 0.05f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1 + (rank * 3 + step) % 4), DTRAIN_OK);
    }
    dtrain_local_sgd_stats stats = dtrain_local_sgd_get_stats(local);
    CHECK_EQ(stats.taken, c->rounds * desc.fragments);
    CHECK_EQ(stats.members, dtrain_comm_size(world));
    CHECK_EQ(stats.missed + stats.undone, 0);
    c->sent[rank] = stats.sent_bytes;
    if (desc.fragments == 1)
        CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    if (rank == 0)
        memcpy(c->result, t.data, t.count * sizeof(float));
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

static course new_course(int rounds, dtrain_compression kind, int feedback)
{
    course c;
    memset(&c, 0, sizeof c);
    c.rounds = rounds;
    c.packs = kind != DTRAIN_COMPRESS_DEFAULT;
    c.compress.kind = kind;
    c.compress.least_count = 1;
    c.compress.feedback.no_feedback = !feedback;
    c.desc.steps = 3;
    c.desc.fragments = 1;
    c.desc.blocking = 1;
    c.desc.window_ms = -1;
    return c;
}

TEST(with_all_members_in_time_rounds_through_any_server_have_the_bits_of_the_all_reduce)
{
    static const dtrain_compression kinds[] = {DTRAIN_COMPRESS_DEFAULT, DTRAIN_COMPRESS_BF16, DTRAIN_COMPRESS_INT8,
                                               DTRAIN_COMPRESS_SIGN};
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int k = 0; k < 4; k++)
            for (int server = 0; server < ranks; server += 2) {
                course all = new_course(4, kinds[k], 0), through;
                all.desc.fragments = 1 + server;
                through = all;
                through.desc.through_server = 1;
                through.desc.server = server;
                CHECK_EQ(dtrain_run_threads(ranks, run_course, &all, NULL), DTRAIN_OK);
                CHECK_EQ(dtrain_run_threads(ranks, run_course, &through, NULL), DTRAIN_OK);
                CHECK(all.result[0] != 0);
                if (memcmp(all.result, through.result, sizeof all.result) != 0)
                    TEST_FAIL("%d ranks, kind %d, server %d: other bits", ranks, (int)kinds[k], server);
            }
}

TEST(with_feedback_the_first_round_has_the_same_bits_and_later_ones_stay_near_the_dense)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        course all = new_course(1, DTRAIN_COMPRESS_INT8, 1), through = all;
        course dense = new_course(8, DTRAIN_COMPRESS_DEFAULT, 0), packed = new_course(8, DTRAIN_COMPRESS_INT8, 1);
        through.desc.through_server = packed.desc.through_server = 1;
        CHECK_EQ(dtrain_run_threads(ranks, run_course, &all, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_run_threads(ranks, run_course, &through, NULL), DTRAIN_OK);
        CHECK(memcmp(all.result, through.result, sizeof all.result) == 0);
        CHECK_EQ(dtrain_run_threads(ranks, run_course, &dense, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_run_threads(ranks, run_course, &packed, NULL), DTRAIN_OK);
        for (int i = 0; i < MOST; i++)
            if (!(fabsf(dense.result[i] - packed.result[i]) <= 0.01f)) {
                TEST_FAIL("%d ranks: element %d is %g, dense %g", ranks, i, (double)packed.result[i],
                          (double)dense.result[i]);
                break;
            }
    }
}

/* 4 bytes an element up, and back to each worker; besides what members say: 4 words, its flags, and what opens. */
TEST(a_worker_sends_its_difference_once_a_round_and_the_server_the_sum_to_each)
{
    course c = new_course(4, DTRAIN_COMPRESS_DEFAULT, 0);
    toy t;
    toy_begin(&t, 40);
    uint64_t vector = 4 * (uint64_t)t.count;
    c.desc.through_server = 1;
    c.desc.server = 2;
    CHECK_EQ(dtrain_run_threads(4, run_course, &c, NULL), DTRAIN_OK);
    for (int rank = 0; rank < 4; rank++) {
        uint64_t least = 4 * (rank == 2 ? 3 * (vector + 4 * 32 + 16) : vector + 32 + 8);
        if (c.sent[rank] < least || c.sent[rank] > least + 16) /* a worker hands in once more, or not yet */
            TEST_FAIL("rank %d sent %llu bytes, expected %llu", rank, (unsigned long long)c.sent[rank],
                      (unsigned long long)least);
    }
    toy_end(&t);
}

static int course_process(dtrain_comm *world, scene *s)
{
    course *c = (course *)s->user;
    float expected[MOST];
    memcpy(expected, c->result, sizeof expected);
    CHECK_EQ(run_course(world, c), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0)
        CHECK(memcmp(expected, c->result, sizeof expected) == 0); /* those of threads */
    return 0;
}

TEST(processes_have_the_bits_of_threads)
{
    for (int packed = 0; packed < 2; packed++) {
        course c = new_course(3, packed ? DTRAIN_COMPRESS_INT8 : DTRAIN_COMPRESS_DEFAULT, 1);
        scene s;
        c.desc.through_server = 1;
        c.desc.server = 1;
        CHECK_EQ(dtrain_run_threads(3, run_course, &c, NULL), DTRAIN_OK);
        scene_begin(&s, 3, packed);
        s.user = &c;
        run_ranks(&s, course_process);
    }
}

/* ---- who is slow ---- */

/* Rank 2 makes no step before the others have made 5 rounds, in which it sends nothing but what it says. */
static int one_slow(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), members[3];
    dtrain_local_sgd_desc desc;
    dtrain_local_sgd_stats stats;
    toy t;
    dtrain_local_sgd *local;
    (void)s;
    memset(&desc, 0, sizeof desc);
    desc.steps = 2;
    desc.blocking = 1;
    desc.window_ms = 1;
    desc.through_server = 1;
    toy_begin(&t, 500);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    double until = now_s() + 30;
    do {
        if (rank < 2) {
            toy_step(&t, 1, rank, 0.02f);
            CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        } else
            usleep(1000);
        stats = dtrain_local_sgd_get_stats(local);
    } while (stats.rounds < 5 && now_s() < until);
    CHECK(stats.rounds >= 5);
    if (rank == 2) {
        CHECK_EQ(stats.taken, 0);
        CHECK(stats.sent_bytes <= (stats.rounds + 1) * 40);
        CHECK_EQ(t.data[0], 0);
        toy_step(&t, 1, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_members(local, members), 3); /* the last one has all */
    CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    CHECK(t.data[0] != 0);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return 0;
}

TEST(a_slow_member_sends_nothing_and_holds_up_nobody_but_its_steps_count)
{
    scene s;
    scene_begin(&s, 3, 1);
    run_ranks(&s, one_slow);
}

/* ---- who is killed ---- */

typedef struct murder {
    int victim, ready[2];
    uint64_t seed;
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
} murder;

/* What those left have when the server, rank 1, or another is dead. */
static void after_death(dtrain_comm *world, const murder *m, dtrain_local_sgd *local, toy *t)
{
    dtrain_comm *rest = NULL;
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_shrink(world, &rest), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(rest), 3);
    if (m->victim == 1) {
        CHECK_CONTAINS(local->error.text, "goes on alone: rank 1, the server of its rounds, is lost");
    } else {
        CHECK_EQ(local->error.text[0], 0);
        CHECK_EQ(dtrain_comm_check_equal(rest, t->data, t->count, DTRAIN_F32), DTRAIN_OK);
        const dtrain_piece *p;
        for (int i = 0; (p = piece_at(dtrain_local_sgd_pieces(local), i)) != NULL; i++)
            if (strcmp(p->name, "outer") == 0 || strcmp(p->name, "momentum") == 0)
                CHECK_EQ(dtrain_comm_check_equal(rest, p->data, p->count, p->dtype), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(rest), DTRAIN_OK);
    dtrain_comm_destroy(rest);
}

static int at_risk(dtrain_comm *world, scene *s)
{
    murder *m = (murder *)s->user;
    int rank = dtrain_comm_rank(world), left = m->victim == 1 ? 1 : 3;
    uint64_t enough = 0;
    toy t;
    dtrain_local_sgd *local;
    dtrain_local_sgd_stats stats;
    dtrain_set_log(quiet, NULL);
    toy_begin(&t, 500);
    m->desc.compress = m->compress.kind != DTRAIN_COMPRESS_DEFAULT ? &m->compress : NULL;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &m->desc), DTRAIN_OK);
    ssize_t ignored = write(m->ready[1], "", 1);
    (void)ignored;
    double until = now_s() + 30;
    do {
        toy_step(&t, m->seed, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1 + rank), DTRAIN_OK);
        stats = dtrain_local_sgd_get_stats(local);
        if (stats.left == left && enough == 0)
            enough = stats.rounds + 5;
    } while ((enough == 0 || stats.rounds < enough) && now_s() < until);
    CHECK_EQ(stats.left, left);
    CHECK(t.data[0] != 0);
    after_death(world, m, local, &t);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return 0;
}

/* Four processes, of which one is killed at a random moment of rounds that follow each other closely. */
static void kill_one(uint64_t seed, int victim)
{
    scene s;
    murder m;
    pid_t pids[4];
    char byte;
    memset(&m, 0, sizeof m);
    m.seed = seed;
    m.victim = victim;
    m.desc.steps = 2;
    m.desc.window_ms = seed % 3 == 0 ? -1 : 3;
    m.desc.blocking = seed % 2 == 0;
    m.desc.fragments = seed % 4 < 2 ? 1 : 2;
    m.desc.through_server = 1;
    m.desc.server = 1;
    m.compress.kind = seed % 5 < 2 ? DTRAIN_COMPRESS_INT8 : DTRAIN_COMPRESS_DEFAULT;
    scene_begin(&s, 4, seed % 2 != 0);
    s.user = &m;
    CHECK_EQ(pipe(m.ready), 0);
    for (int rank = 0; rank < 4; rank++)
        pids[rank] = start_rank(&s, rank, at_risk);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(read(m.ready[0], &byte, 1), 1);
    usleep((useconds_t)(dtrain_random_u64(seed, 20) % 60000));
    kill(pids[victim], SIGKILL);
    for (int rank = 0; rank < 4; rank++) {
        int end = end_of(pids[rank], 60);
        if (end != (rank == victim ? 128 + SIGKILL : 0))
            TEST_FAIL("seed %llu: rank %d ended with %d; killed was %d", (unsigned long long)seed, rank, end, victim);
    }
    close(m.ready[0]);
    close(m.ready[1]);
}

TEST(without_a_worker_the_others_go_on_and_without_the_server_each_alone)
{
    const char *rounds = getenv("KILL_ROUNDS"), *given = getenv("KILL_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)dtrain__os_now_ns();
    printf("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < (rounds != NULL ? atoi(rounds) : 8); round++)
        kill_one(seed + (uint64_t)round, round % 4);
}

/* ---- memory, and what is refused ---- */

typedef struct measured {
    dtrain_allocator allocator;
    size_t taken[3];
} measured;

static dtrain_status measure(dtrain_comm *world, void *user)
{
    measured *m = (measured *)user;
    int rank = dtrain_comm_rank(world);
    course c = new_course(1, DTRAIN_COMPRESS_DEFAULT, 0);
    size_t plan = 0, before;
    toy t;
    dtrain_local_sgd *local;
    toy_begin(&t, 300);
    c.desc.through_server = 1;
    c.desc.server = 2;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &c.desc), DTRAIN_OK);
    plan = local->sizes.all + (rank == 2 ? 0 : 2 * 3 * 100 * sizeof(float)); /* the server's */
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    c.desc.max_bytes = plan - (rank == 2); /* too few on the server alone */
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &c.desc),
             rank == 2 ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_ABORTED);
    CHECK(local == NULL);
    c.desc.max_bytes = plan;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &c.desc), DTRAIN_OK);
    CHECK_EQ(local->sizes.all, rank == 2 ? plan : plan - 2 * 3 * 100 * sizeof(float));
    /* as dtrain_local_sgd_destroy: first what is the groups', which the plan leaves out, then the object's own */
    dtrain__worker_end(&local->worker);
    dtrain_comm_destroy(local->up);
    dtrain_comm_destroy(local->down);
    dtrain_comm_destroy(local->group);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    before = m->allocator.bytes;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    size_t sizes = local->sizes.all;
    m->taken[rank] = sizes;
    dtrain__rounds_free(local);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(before - m->allocator.bytes, m->taken[0] + m->taken[1] + m->taken[2]);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(the_plan_is_what_the_server_takes_and_workers_lack_its_inboxes)
{
    dtrain_comm_desc desc;
    measured m;
    memset(&desc, 0, sizeof desc);
    memset(&m, 0, sizeof m);
    desc.allocator = &m.allocator;
    CHECK_EQ(dtrain_run_threads(3, measure, &m, &desc), DTRAIN_OK);
    CHECK_EQ(m.allocator.bytes, 0);
}

static dtrain_status other_servers(dtrain_comm *world, void *user)
{
    course c = new_course(1, DTRAIN_COMPRESS_DEFAULT, 0);
    toy t;
    dtrain_local_sgd *local;
    (void)user;
    toy_begin(&t, 2);
    c.desc.through_server = 1;
    c.desc.server = 3;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &c.desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the server is rank 3, expected 0 to 2");
    c.desc.server = dtrain_comm_rank(world) == 2;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &c.desc), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "desc.server 0 on ranks 0, 1, but 1 on rank 2; ");
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(a_server_outside_the_group_is_invalid_and_different_ones_are_a_mismatch)
{
    CHECK_EQ(dtrain_run_threads(3, other_servers, NULL, NULL), DTRAIN_OK);
}
