/* Local SGD and DiLoCo: rounds against float64 references, members that are late, killed, stopped or leave, memory,
 * bytes, and resuming. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "processes.h"

#include <math.h>

#include "local_sgd_toy.h"

static void toy_step_f64(double *x, size_t count, uint64_t seed, int member, double lr)
{
    for (size_t i = 0; i < count; i++)
        x[i] -= lr * (x[i] - (double)goal(seed, member, i));
}

static double weight_of(int member, int step)
{
    return 1.0 + (double)((member * 7 + step * 3) % 5);
}

static void near(const float *got, const double *expected, size_t count, double tolerance, const char *what)
{
    for (size_t i = 0; i < count; i++)
        if (!(fabs((double)got[i] - expected[i]) <= tolerance)) {
            TEST_FAIL("%s: element %zu is %.9g, expected %.9g", what, i, (double)got[i], expected[i]);
            return;
        }
}

/* A run of rounds and its reference, all fragments of the same steps. */
typedef struct course {
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
    int rounds, ranks;
    uint64_t seed;
    float inner_lr;
    unsigned char digest[32]; /* of rank 0 */
} course;

/* What DiLoCo's formulas give in float64: the outer weights after `rounds` rounds of all members. */
static void reference(const course *c, double *outer, const float *first, size_t count)
{
    double x[MOST], velocity[MOST], sum[MOST];
    double lr = (double)c->desc.outer_lr, momentum = c->desc.no_momentum ? 0 : (double)c->desc.outer_momentum;
    memset(velocity, 0, sizeof velocity);
    for (size_t i = 0; i < count; i++)
        outer[i] = (double)first[i];
    for (int round = 0; round < c->rounds; round++) {
        double total = 0;
        memset(sum, 0, sizeof sum);
        for (int m = 0; m < c->ranks; m++) {
            double weight = 0;
            memcpy(x, outer, count * sizeof *x);
            for (int step = 0; step < c->desc.steps; step++) {
                toy_step_f64(x, count, c->seed, m, (double)c->inner_lr);
                weight += weight_of(m, step);
            }
            for (size_t i = 0; i < count; i++)
                sum[i] += weight * (outer[i] - x[i]);
            total += weight;
        }
        int warm = round >= (c->desc.warmup_rounds == 0 ? 2 : c->desc.warmup_rounds);
        for (size_t i = 0; i < count; i++) {
            double g = sum[i] / total;
            velocity[i] = warm ? momentum * velocity[i] + g : 0;
            outer[i] -= lr * (g + momentum * velocity[i]);
        }
    }
}

/* How far a packed course may be from the reference. */
static double tolerance_of(const course *c)
{
    switch (c->desc.compress != NULL ? c->compress.kind : DTRAIN_COMPRESS_DEFAULT) {
    case DTRAIN_COMPRESS_DEFAULT: return 1e-5 * c->rounds;
    case DTRAIN_COMPRESS_BF16: return 0.01;
    case DTRAIN_COMPRESS_INT8: return 0.01;
    case DTRAIN_COMPRESS_FP8: return 0.06;
    default: return 4; /* one bit a number, in a handful of rounds */
    }
}

static dtrain_status run_course(dtrain_comm *world, void *user)
{
    course *c = (course *)user;
    int rank = dtrain_comm_rank(world);
    double expected[MOST];
    float first[MOST];
    toy t;
    dtrain_local_sgd *local;
    toy_begin(&t, 40);
    for (size_t i = 0; i < t.count; i++)
        t.data[i] = dtrain_random_normal(c->seed, i) + (float)rank; /* rank 0's are broadcast */
    t.frozen[3] = (float)rank;
    dtrain_status status = dtrain_local_sgd_create(&local, world, t.table, 5, &c->desc);
    if (status != DTRAIN_OK)
        return status;
    CHECK_EQ(t.frozen[3], 0);
    memcpy(first, t.data, t.count * sizeof(float));
    CHECK(first[0] == dtrain_random_normal(c->seed, 0));
    for (int step = 0; step < c->rounds * c->desc.steps; step++) {
        toy_step(&t, c->seed, rank, c->inner_lr);
        CHECK_EQ(dtrain_local_sgd_step(local, weight_of(rank, step % c->desc.steps)), DTRAIN_OK);
    }
    dtrain_local_sgd_stats stats = dtrain_local_sgd_get_stats(local);
    CHECK_EQ(stats.rounds, c->rounds);
    CHECK_EQ(stats.taken, c->rounds);
    CHECK_EQ(stats.applied, c->rounds);
    CHECK_EQ(stats.missed + stats.undone, 0);
    CHECK_EQ(stats.members, c->ranks);
    CHECK_EQ(stats.left, c->ranks);
    CHECK_EQ(stats.steps, c->rounds * c->desc.steps);
    CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    reference(c, expected, first, t.count);
    near(t.data, expected, t.count, tolerance_of(c), "after all rounds");
    if (rank == 0)
        dtrain_sha256(t.data, t.count * sizeof(float), c->digest);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

static int run_course_process(dtrain_comm *world, scene *s)
{
    course *c = (course *)s->user;
    unsigned char before[32];
    memcpy(before, c->digest, 32);
    CHECK_EQ(run_course(world, c), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0)
        CHECK(memcmp(before, c->digest, 32) == 0); /* that of threads */
    return 0;
}

static course new_course(int ranks, int steps, int rounds)
{
    course c;
    memset(&c, 0, sizeof c);
    c.ranks = ranks;
    c.rounds = rounds;
    c.seed = 5;
    c.inner_lr = 0.05f;
    c.desc.steps = steps;
    c.desc.window_ms = -1;
    c.desc.blocking = 1;
    c.desc.outer_lr = 0.7f;
    c.desc.outer_momentum = 0.9f;
    return c;
}

TEST(a_round_with_outer_rate_1_and_no_momentum_is_the_mean_by_samples)
{
    for (int ranks = 1; ranks <= 5; ranks++) {
        course c = new_course(ranks, 4, 1);
        c.desc.outer_lr = 1;
        c.desc.no_momentum = 1;
        CHECK_EQ(dtrain_run_threads(ranks, run_course, &c, NULL), DTRAIN_OK);
    }
}

TEST(rounds_are_nesterovs_steps_on_the_mean_difference_on_threads_and_processes)
{
    for (int ranks = 1; ranks <= 5; ranks++) {
        course c = new_course(ranks, 6, 5);
        CHECK_EQ(dtrain_run_threads(ranks, run_course, &c, NULL), DTRAIN_OK);
        if (ranks == 2 || ranks == 3) {
            scene s;
            scene_begin(&s, ranks, ranks == 3);
            s.user = &c;
            run_ranks(&s, run_course_process);
        }
    }
}

TEST(the_first_rounds_have_no_momentum_where_the_desc_says_so)
{
    static const int warmups[] = {-1, 0, 1, 3, 6}; /* none, those of the default, some, and all */
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int i = 0; i < 5; i++) {
            course c = new_course(ranks, 4, 5);
            c.desc.warmup_rounds = warmups[i];
            CHECK_EQ(dtrain_run_threads(ranks, run_course, &c, NULL), DTRAIN_OK);
            if (ranks < 3 || warmups[i] != 3)
                continue;
            scene s;
            scene_begin(&s, ranks, 1);
            s.user = &c;
            run_ranks(&s, run_course_process);
        }
}

TEST(packed_differences_come_near_the_reference_with_the_same_bits_on_threads_and_processes)
{
    static const dtrain_compression kinds[] = {DTRAIN_COMPRESS_BF16, DTRAIN_COMPRESS_INT8, DTRAIN_COMPRESS_FP8,
                                               DTRAIN_COMPRESS_SIGN};
    for (int k = 0; k < 4; k++)
        for (int ranks = 1; ranks <= 4; ranks++) {
            course c = new_course(ranks, 6, 5);
            c.compress.kind = kinds[k];
            c.compress.least_count = 1;
            c.desc.compress = &c.compress;
            c.desc.warmup_rounds = -1; /* what tolerance_of() is for */
            CHECK_EQ(dtrain_run_threads(ranks, run_course, &c, NULL), DTRAIN_OK);
            if (ranks == 3) {
                scene s;
                scene_begin(&s, ranks, 0);
                s.user = &c;
                run_ranks(&s, run_course_process);
            }
        }
}

/* One step a round with a plain average is synchronous SGD. */
static dtrain_status one_step_rounds(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_local_sgd_desc desc;
    double x[MOST];
    toy t;
    dtrain_local_sgd *local;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.steps = desc.no_momentum = desc.blocking = 1;
    desc.outer_lr = 1;
    desc.window_ms = -1;
    toy_begin(&t, 20);
    memset(x, 0, sizeof x);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 0; step < 20; step++) {
        for (size_t i = 0; i < t.count; i++) {
            double gradient = 0;
            for (int m = 0; m < ranks; m++)
                gradient += x[i] - (double)goal(9, m, i);
            x[i] -= 0.1 * gradient / ranks;
        }
        toy_step(&t, 9, rank, 0.1f);
        CHECK_EQ(dtrain_local_sgd_step(local, 3), DTRAIN_OK);
        near(t.data, x, t.count, 1e-5, "synchronous SGD");
    }
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(rounds_of_one_step_are_synchronous_sgd)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        CHECK_EQ(dtrain_run_threads(ranks, one_step_rounds, NULL, NULL), DTRAIN_OK);
}

/* Each unit's values rise by rank + 1 in every step; a fragment becomes the mean at its own steps alone. */
static dtrain_status in_fragments(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), fragments = *(int *)user, applied = 0;
    double value[UNITS] = {0}, outer[UNITS] = {0};
    dtrain_local_sgd_desc desc;
    toy t;
    dtrain_local_sgd *local;
    memset(&desc, 0, sizeof desc);
    desc.steps = 10;
    desc.no_momentum = desc.blocking = 1;
    desc.outer_lr = 1;
    desc.window_ms = -1;
    desc.fragments = fragments;
    toy_begin(&t, 10);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 1; step <= 30; step++) {
        for (size_t i = 0; i < t.count; i++)
            t.data[i] += (float)(rank + 1);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        for (int u = 0; u < UNITS; u++) {
            int fragment = u % fragments, mine = step % 10 == (fragment + 1) * 10 / fragments % 10;
            int since = step <= 10 && mine ? step : 10; /* steps since this fragment's last round */
            value[u] += rank + 1;
            if (mine)
                value[u] = outer[u] = outer[u] + 1.5 * since; /* 1 of rank 0 and 2 of rank 1 */
            applied += mine && u < fragments;
            for (size_t i = 0; i < t.sizes[u]; i++)
                if ((double)t.data[t.starts[u] + i] != value[u]) {
                    TEST_FAIL("step %d, unit %d of %d fragments: %g, expected %g", step, u, fragments,
                              (double)t.data[t.starts[u] + i], value[u]);
                    break;
                }
        }
        CHECK_EQ(dtrain_local_sgd_get_stats(local).applied, applied);
    }
    CHECK_EQ(applied, 3 * fragments);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(every_fragment_is_averaged_at_its_own_steps_and_all_units_are_in_one)
{
    for (int fragments = 1; fragments <= UNITS; fragments++)
        CHECK_EQ(dtrain_run_threads(2, in_fragments, &fragments, NULL), DTRAIN_OK);
}

/* With an overlap, what a round brings is mixed with what was trained meanwhile, that many steps later. */
static dtrain_status overlapped(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    dtrain_local_sgd_desc desc;
    toy t;
    dtrain_local_sgd *local;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.steps = 10;
    desc.overlap = 3;
    desc.mixing = 0.25f;
    desc.no_momentum = desc.blocking = 1;
    desc.outer_lr = 1;
    desc.window_ms = -1;
    toy_begin(&t, 10);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 1; step <= 22; step++) {
        float each = (float)(rank + 1), expected = 0;
        for (size_t i = 0; i < t.count; i++)
            t.data[i] += each;
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        if (step == 12)
            expected = 12 * each;
        else if (step == 13) /* outer is 15, the mean at step 10 */
            expected = 0.75f * 13 * each + 0.25f * 15;
        else if (step == 22)
            expected = 0.75f * 13 * each + 0.25f * 15 + 9 * each;
        for (size_t i = 0; i < t.count && expected > 0; i++)
            if (t.data[i] != expected) {
                TEST_FAIL("step %d on rank %d: %g, expected %g", step, rank, (double)t.data[i], (double)expected);
                break;
            }
    }
    /* the second difference: from 15 to what each had at step 20, which is 0.75 * 13 * each + 3.75 + 7 * each */
    CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
    const dtrain_piece *outer = piece_at(dtrain_local_sgd_pieces(local), 0);
    CHECK_EQ(strcmp(outer->name, "outer"), 0);
    CHECK_EQ(outer->count, t.count);
    CHECK(fabs((double)*(float *)outer->data - (0.75 * 13 * 1.5 + 3.75 + 7 * 1.5)) < 1e-4);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(an_overlapped_round_is_mixed_in_when_its_steps_are_made)
{
    CHECK_EQ(dtrain_run_threads(2, overlapped, NULL, NULL), DTRAIN_OK);
}

/* ---- who is late ---- */

typedef struct gate {
    int value;
} gate;

static void gate_wait(gate *g, int value)
{
    while (__atomic_load_n(&g->value, __ATOMIC_SEQ_CST) < value)
        usleep(200);
}

static void until_rounds(dtrain_local_sgd *local, uint64_t rounds)
{
    for (int turn = 0; dtrain_local_sgd_get_stats(local).rounds < rounds; turn++) {
        usleep(500);
        if (turn > 60000) {
            TEST_FAIL("round %d did not come", (int)rounds);
            return;
        }
    }
}

/* Rank 2 makes its steps when the others' first round was made; then all three make one. */
static dtrain_status one_late(dtrain_comm *world, void *user)
{
    gate *g = (gate *)user;
    int rank = dtrain_comm_rank(world), members[3] = {-1, -1, -1};
    dtrain_local_sgd_desc desc;
    dtrain_local_sgd_stats stats;
    toy t;
    dtrain_local_sgd *local;
    memset(&desc, 0, sizeof desc);
    desc.steps = 4;
    desc.no_momentum = 1;
    desc.outer_lr = 1;
    desc.window_ms = 1000;
    toy_begin(&t, 10);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    if (rank == 2) {
        gate_wait(g, 2);
        for (int turn = 0; dtrain_local_sgd_get_stats(local).missed == 0 && turn < 60000; turn++)
            usleep(500);
        CHECK_EQ(dtrain_local_sgd_get_stats(local).missed, 1); /* its thread was in it, with nothing */
        CHECK_EQ(dtrain_local_sgd_get_stats(local).applied, 0);
        CHECK_EQ(t.data[0], 0);
    }
    for (int step = 0; step < 4; step++) {
        for (size_t i = 0; i < t.count; i++)
            t.data[i] += (float)(rank + 1);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    if (rank < 2) { /* 4 and 8, weights 4: they waited for the window, not for rank 2 */
        until_rounds(local, 1);
        CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
        stats = dtrain_local_sgd_get_stats(local);
        CHECK_EQ(stats.members, 2);
        CHECK_EQ(stats.taken, 1);
        CHECK_EQ(dtrain_local_sgd_members(local, members), 2);
        CHECK(members[0] == 0 && members[1] == 1);
        CHECK_EQ(t.data[0], 6);
        __atomic_add_fetch(&g->value, 1, __ATOMIC_SEQ_CST);
        gate_wait(g, 3); /* rank 2 has handed in */
        usleep(1100000);
        CHECK_EQ(dtrain_local_sgd_get_stats(local).rounds, 1); /* what is late opens no window yet */
        __atomic_add_fetch(&g->value, 1, __ATOMIC_SEQ_CST);
        gate_wait(g, 5); /* the other one has looked, too */
        for (int step = 0; step < 4; step++) {
            for (size_t i = 0; i < t.count; i++)
                t.data[i] += (float)(rank + 1);
            CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        }
    } else
        __atomic_add_fetch(&g->value, 1, __ATOMIC_SEQ_CST);
    until_rounds(local, 2);
    CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
    stats = dtrain_local_sgd_get_stats(local);
    CHECK_EQ(stats.members, 3);
    CHECK_EQ(stats.taken, rank == 2 ? 1 : 2);
    /* from 6: differences 4, 8, and that of rank 2, which is 12 from the 0 that it started from */
    CHECK_EQ(t.data[0], 14);
    CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(a_late_member_is_left_out_and_its_steps_count_in_the_next_round)
{
    gate g = {0};
    CHECK_EQ(dtrain_run_threads(3, one_late, &g, NULL), DTRAIN_OK);
}

/* Rank 1 makes no steps while rank 0 makes a thousand, its rounds with a window of a millisecond. */
static dtrain_status one_idle(dtrain_comm *world, void *user)
{
    gate *g = (gate *)user;
    int rank = dtrain_comm_rank(world);
    dtrain_local_sgd_desc desc;
    toy t;
    dtrain_local_sgd *local;
    memset(&desc, 0, sizeof desc);
    desc.steps = 10;
    desc.window_ms = g->value < 0 ? -1 : 1;
    toy_begin(&t, 10);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0) {
        for (int step = 0; step < 1000; step++) {
            toy_step(&t, 1, rank, 0.1f);
            CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        }
        if (g->value < 0) { /* nothing can have come */
            CHECK_EQ(dtrain_local_sgd_get_stats(local).rounds, 0);
            CHECK(fabs((double)(t.data[0] - goal(1, 0, 0))) < 1e-4);
        } else {
            until_rounds(local, 1);
            CHECK_EQ(dtrain_local_sgd_get_stats(local).members, 1);
        }
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    CHECK(dtrain_local_sgd_get_stats(local).steps == (rank == 0 ? 1000 : 0));
    CHECK(t.data[0] != 0);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(steps_wait_for_nobody_and_finish_counts_them_all)
{
    gate closed = {0}, open = {-1};
    CHECK_EQ(dtrain_run_threads(2, one_idle, &closed, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_run_threads(2, one_idle, &open, NULL), DTRAIN_OK);
}

/* Members make different numbers of steps, in no order, and finish. Without momentum and with weights by steps, outer
 * rate 1: then all is the sum of what each has trained, whichever rounds it came to, over the weights. */
static dtrain_status uneven(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    dtrain_local_sgd_desc desc = *(dtrain_local_sgd_desc *)user;
    toy t;
    dtrain_local_sgd *local;
    toy_begin(&t, 30);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 0; step < 31 + 17 * rank; step++) {
        toy_step(&t, 3, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        if (rank % 2)
            usleep((useconds_t)(dtrain_random_u64(3, (uint64_t)step) % 2000));
    }
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    uint64_t rounds = dtrain_local_sgd_get_stats(local).rounds;
    CHECK_EQ(dtrain_comm_check_equal(world, &rounds, 1, DTRAIN_U64), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK); /* nothing is left to do */
    CHECK(dtrain_local_sgd_get_stats(local).rounds == rounds);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(members_of_any_pace_finish_with_equal_bits)
{
    dtrain_local_sgd_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.steps = 5;
    desc.window_ms = 2;
    for (int ranks = 1; ranks <= 4; ranks++)
        CHECK_EQ(dtrain_run_threads(ranks, uneven, &desc, NULL), DTRAIN_OK);
    desc.fragments = 3;
    desc.overlap = 2;
    CHECK_EQ(dtrain_run_threads(3, uneven, &desc, NULL), DTRAIN_OK);
    desc.blocking = 1;
    CHECK_EQ(dtrain_run_threads(3, uneven, &desc, NULL), DTRAIN_OK);
}

/* Rank 0 and 1 finish after their snapshot of fragment 0, rank 2 after one of fragment 1; with a window that waits for
 * all, each round needs what some hand in only later. */
static dtrain_status crossing(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    dtrain_local_sgd_desc desc;
    toy t;
    dtrain_local_sgd *local;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.steps = 10; /* fragment 0 at steps 5, 15, ...; 1 at 10, 20, ... */
    desc.fragments = 2;
    desc.window_ms = -1;
    toy_begin(&t, 10);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    local->counters[0] = rank == 2 ? 7 : 0;
    for (int step = 0; step < 6; step++) {
        toy_step(&t, 3, rank, 0.1f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    usleep(50000); /* every thread has handed in what there is */
    CHECK_EQ(dtrain_local_sgd_get_stats(local).rounds, 0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(members_that_hand_in_different_fragments_come_together)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 5000;
    CHECK_EQ(dtrain_run_threads(3, crossing, NULL, &desc), DTRAIN_OK);
}

/* Two of three leave in the middle, one of them rank 0; the last goes on and is alone. */
static dtrain_status leavers(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), stay = rank == 1;
    dtrain_local_sgd_desc desc;
    toy t;
    dtrain_local_sgd *local;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.steps = 2;
    desc.window_ms = 1;
    toy_begin(&t, 30);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 0; step < (stay ? 1000000 : 40 + 30 * rank); step++) {
        toy_step(&t, 3, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        if (stay && dtrain_local_sgd_get_stats(local).left == 1)
            break;
        usleep(200);
    }
    if (stay) {
        CHECK_EQ(dtrain_local_sgd_get_stats(local).left, 1);
        uint64_t before = dtrain_local_sgd_get_stats(local).taken;
        for (int step = 0; step < 20; step++) {
            toy_step(&t, 3, rank, 0.02f);
            CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
            CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
        }
        CHECK(dtrain_local_sgd_get_stats(local).taken >= before + 10);
        CHECK_EQ(dtrain_local_sgd_get_stats(local).members, 1);
        CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    }
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(who_is_left_alone_trains_on)
{
    dtrain_set_log(quiet, NULL);
    for (int turn = 0; turn < 5; turn++)
        CHECK_EQ(dtrain_run_threads(3, leavers, NULL, NULL), DTRAIN_OK);
}
