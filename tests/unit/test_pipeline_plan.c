/* Cuts into stages and planned schedules: orders written by hand, the formulas of the papers, every dependency looked
 * up by the test itself, and orders that cannot run. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

#include <math.h>

static int cut_is(const int *begins, const int *lengths, int stages)
{
    int at = 0;
    for (int s = 0; s < stages; s++) {
        if (begins[s] != at)
            return 0;
        at += lengths[s];
    }
    return begins[stages] == at;
}

TEST(layers_are_cut_evenly_earlier_stages_one_longer)
{
    static const int ten[] = {4, 3, 3}, seven[] = {2, 2, 2, 1}, two[] = {1, 1}, one[] = {5};
    int begins[5];
    CHECK_EQ(dtrain_split_stages(NULL, 10, 3, begins), DTRAIN_OK);
    CHECK(cut_is(begins, ten, 3));
    CHECK_EQ(dtrain_split_stages(NULL, 7, 4, begins), DTRAIN_OK);
    CHECK(cut_is(begins, seven, 4));
    CHECK_EQ(dtrain_split_stages(NULL, 2, 2, begins), DTRAIN_OK);
    CHECK(cut_is(begins, two, 2));
    CHECK_EQ(dtrain_split_stages(NULL, 5, 1, begins), DTRAIN_OK);
    CHECK(cut_is(begins, one, 1));
    CHECK_EQ(dtrain_split_stages(NULL, 3, 4, begins), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "3 layers cannot be cut into 4 stages; 1 to 3 would fit");
    CHECK_EQ(dtrain_split_stages(NULL, 3, 0, begins), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_split_stages(NULL, -1, 1, begins), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_split_stages(NULL, 3, 1, NULL), DTRAIN_ERR_INVALID);
}

/* The least largest stage, by trying every cut. */
static double least_of_all(const double *costs, int layers, int stages)
{
    double best = HUGE_VAL, sum = 0.0;
    if (stages == 1) {
        for (int i = 0; i < layers; i++)
            sum += costs[i];
        return sum;
    }
    for (int first = 1; first <= layers - stages + 1; first++) {
        sum += costs[first - 1];
        double rest = least_of_all(costs + first, layers - first, stages - 1), most = sum > rest ? sum : rest;
        best = most < best ? most : best;
    }
    return best;
}

TEST(layers_of_different_cost_are_cut_so_that_the_largest_stage_is_least)
{
    static const double up[] = {1, 1, 1, 5}, down[] = {5, 1, 1, 1}, none[] = {0, 0, 0}, bad[] = {1, -1}, nan[] = {NAN};
    static const int up_cut[] = {3, 1}, down_cut[] = {1, 3}, none_cut[] = {2, 1};
    int begins[12];
    CHECK_EQ(dtrain_split_stages(up, 4, 2, begins), DTRAIN_OK);
    CHECK(cut_is(begins, up_cut, 2));
    CHECK_EQ(dtrain_split_stages(down, 4, 2, begins), DTRAIN_OK);
    CHECK(cut_is(begins, down_cut, 2));
    CHECK_EQ(dtrain_split_stages(none, 3, 2, begins), DTRAIN_OK);
    CHECK(cut_is(begins, none_cut, 2));
    for (uint64_t trial = 0; trial < 400; trial++) {
        double costs[10], most = 0.0;
        int layers = 1 + (int)(dtrain_random_u64(trial, 0) % 10), stages = 1 + (int)(trial % (uint64_t)layers);
        for (int i = 0; i < layers; i++)
            costs[i] = (double)(dtrain_random_u64(trial, (uint64_t)i + 1) % 20);
        CHECK_EQ(dtrain_split_stages(costs, layers, stages, begins), DTRAIN_OK);
        CHECK(begins[0] == 0 && begins[stages] == layers);
        for (int s = 0; s < stages; s++) {
            double sum = 0.0;
            CHECK(begins[s] < begins[s + 1]);
            for (int i = begins[s]; i < begins[s + 1]; i++)
                sum += costs[i];
            most = sum > most ? sum : most;
        }
        CHECK(most == least_of_all(costs, layers, stages));
    }
    CHECK_EQ(dtrain_split_stages(bad, 2, 1, begins), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "layer 1 costs -1");
    CHECK_EQ(dtrain_split_stages(nan, 1, 1, begins), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_split_stages(up, 4, 5, begins), DTRAIN_ERR_INVALID);
}

static dtrain_pipeline_plan *plan_of(dtrain_pipeline_schedule schedule, int ranks, int micro_batches, int chunks)
{
    dtrain_pipeline_plan_desc desc;
    dtrain_pipeline_plan *plan = NULL;
    memset(&desc, 0, sizeof desc);
    desc.schedule = schedule;
    desc.ranks = ranks;
    desc.micro_batches = micro_batches;
    desc.chunks = chunks;
    dtrain_status status = dtrain_pipeline_plan_create(&plan, &desc, NULL);
    if (status != DTRAIN_OK)
        TEST_FAIL("schedule %d, %d ranks, %d micro-batches, %d chunks: %s", (int)schedule, ranks, micro_batches, chunks,
                  dtrain_last_error());
    return plan;
}

/* "0: F0 F1 B0 ...", a line a rank; of several chunks "F0.1". I and W are the two parts of B. */
static void text_is(dtrain_pipeline_schedule schedule, int ranks, int micro_batches, int chunks, const char *expected)
{
    char text[2000];
    size_t used = 0;
    dtrain_pipeline_plan *plan = plan_of(schedule, ranks, micro_batches, chunks);
    for (int rank = 0; rank < plan->desc.ranks; rank++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%d:", rank);
        for (size_t i = 0; i < plan->rank_tasks; i++) {
            const dtrain_pipeline_task *task = &plan->tasks[(size_t)rank * plan->rank_tasks + i];
            used += (size_t)snprintf(text + used, sizeof text - used, " %c%d", "FBIW"[task->part - DTRAIN_PART_FORWARD],
                                     task->micro_batch);
            if (plan->desc.chunks > 1)
                used += (size_t)snprintf(text + used, sizeof text - used, ".%d", task->chunk);
        }
        used += (size_t)snprintf(text + used, sizeof text - used, "\n");
    }
    if (strcmp(text, expected) != 0)
        TEST_FAIL("the plan is\n%sexpected was\n%s", text, expected);
    dtrain_pipeline_plan_destroy(plan);
}

TEST(schedules_are_those_of_the_papers)
{
    text_is(DTRAIN_PIPELINE_GPIPE, 2, 3, 0, "0: F0 F1 F2 B0 B1 B2\n1: F0 F1 F2 B0 B1 B2\n");
    text_is(DTRAIN_PIPELINE_DEFAULT, 3, 4, 0,
            "0: F0 F1 F2 B0 F3 B1 B2 B3\n"
            "1: F0 F1 B0 F2 B1 F3 B2 B3\n"
            "2: F0 B0 F1 B1 F2 B2 F3 B3\n");
    text_is(DTRAIN_PIPELINE_1F1B, 3, 1, 1, "0: F0 B0\n1: F0 B0\n2: F0 B0\n");
    text_is(DTRAIN_PIPELINE_INTERLEAVED, 2, 2, 0,
            "0: F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0\n"
            "1: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0\n");
    text_is(DTRAIN_PIPELINE_INTERLEAVED, 2, 1, 2, "0: F0.0 F0.1 B0.1 B0.0\n1: F0.0 F0.1 B0.1 B0.0\n");
    text_is(DTRAIN_PIPELINE_ZB_H1, 2, 3, 0, "0: F0 F1 I0 W0 F2 I1 W1 I2 W2\n1: F0 I0 F1 I1 W0 F2 I2 W1 W2\n");
    text_is(DTRAIN_PIPELINE_DEFAULT, 0, 0, 0, "0: F0 B0\n");
}

/* When a part of a chunk's micro-batch ends on a rank, which it does once; NAN: never, or again. */
static double end_of(const dtrain_pipeline_plan *plan, int rank, int forward, int chunk, int micro_batch)
{
    double end = NAN;
    for (size_t i = 0; i < plan->rank_tasks; i++) {
        const dtrain_pipeline_task *task = &plan->tasks[(size_t)rank * plan->rank_tasks + i];
        if (task->chunk == chunk && task->micro_batch == micro_batch && task->part != DTRAIN_PART_WEIGHTS &&
            (task->part == DTRAIN_PART_FORWARD) == forward)
            end = isnan(end) ? task->end : NAN;
    }
    return end;
}

/* A task begins when the one before has ended, and what it needs of its own and of the other rank. */
static void dependencies_hold(const dtrain_pipeline_plan *plan)
{
    int ranks = plan->desc.ranks, chunks = plan->desc.chunks, last = ranks * chunks - 1;
    for (int rank = 0; rank < ranks; rank++) {
        double before = 0.0;
        for (size_t i = 0; i < plan->rank_tasks; i++) {
            const dtrain_pipeline_task *t = &plan->tasks[(size_t)rank * plan->rank_tasks + i];
            int stage = t->chunk * ranks + rank, m = t->micro_batch;
            CHECK(t->begin >= before && t->end > t->begin);
            CHECK(m >= 0 && m < plan->desc.micro_batches && t->chunk >= 0 && t->chunk < chunks);
            before = t->end;
            if (t->part == DTRAIN_PART_FORWARD && stage > 0)
                CHECK(t->begin >= end_of(plan, (stage - 1) % ranks, 1, (stage - 1) / ranks, m));
            if (t->part == DTRAIN_PART_BACKWARD || t->part == DTRAIN_PART_INPUT)
                CHECK(t->begin >= end_of(plan, rank, 1, t->chunk, m));
            if ((t->part == DTRAIN_PART_BACKWARD || t->part == DTRAIN_PART_INPUT) && stage < last)
                CHECK(t->begin >= end_of(plan, (stage + 1) % ranks, 0, (stage + 1) / ranks, m));
            if (t->part == DTRAIN_PART_WEIGHTS)
                CHECK(t->begin >= end_of(plan, rank, 0, t->chunk, m));
        }
        for (int m = 0; m < plan->desc.micro_batches * chunks; m++) /* nothing is left out */
            for (int forward = 0; forward < 2; forward++)
                CHECK(!isnan(end_of(plan, rank, forward, m % chunks, m / chunks)));
    }
}

static void bubble_is(const dtrain_pipeline_plan *plan, double expected)
{
    if (fabs(plan->bubble - expected) > 1e-12)
        TEST_FAIL("schedule %d, %d ranks, %d micro-batches, %d chunks: bubble %g, expected %g",
                  (int)plan->desc.schedule, plan->desc.ranks, plan->desc.micro_batches, plan->desc.chunks, plan->bubble,
                  expected);
}

static void peak_is_within(const dtrain_pipeline_plan *plan, int rank, int most)
{
    if (plan->peak[rank] > most)
        TEST_FAIL("schedule %d, %d ranks, %d micro-batches, %d chunks: rank %d holds %d, at most %d expected",
                  (int)plan->desc.schedule, plan->desc.ranks, plan->desc.micro_batches, plan->desc.chunks, rank,
                  plan->peak[rank], most);
}

static int at_most(int a, int b)
{
    return a < b ? a : b;
}

TEST(bubbles_and_held_micro_batches_are_those_of_the_formulas)
{
    for (int p = 1; p <= 8; p++)
        for (int m = 1; m <= 32; m++) {
            dtrain_pipeline_plan *gpipe = plan_of(DTRAIN_PIPELINE_GPIPE, p, m, 0);
            dtrain_pipeline_plan *ours = plan_of(DTRAIN_PIPELINE_1F1B, p, m, 0);
            dtrain_pipeline_plan *zero = plan_of(DTRAIN_PIPELINE_ZB_H1, p, m, 0);
            bubble_is(gpipe, (p - 1) / (double)(m + p - 1));
            bubble_is(ours, (p - 1) / (double)(m + p - 1));
            if (m >= p)
                bubble_is(zero, (p - 1) / (double)(3 * m + p - 1));
            else
                CHECK(zero->span < ours->span || p == 1);
            for (int r = 0; r < p; r++) {
                CHECK_EQ(gpipe->peak[r], m);
                CHECK_EQ(ours->peak[r], at_most(p - r, m));
                peak_is_within(zero, r, at_most(p, m));
            }
            dependencies_hold(gpipe);
            dependencies_hold(ours);
            dependencies_hold(zero);
            dtrain_pipeline_plan_destroy(gpipe);
            dtrain_pipeline_plan_destroy(ours);
            dtrain_pipeline_plan_destroy(zero);
        }
}

TEST(interleaved_bubbles_and_held_chunks_are_those_of_the_formulas)
{
    for (int p = 1; p <= 8; p++)
        for (int m = 1; m <= 32; m++)
            for (int v = 1; v <= 4; v++) {
                dtrain_pipeline_plan *plan = plan_of(DTRAIN_PIPELINE_INTERLEAVED, p, m, v);
                if (m % p == 0)
                    bubble_is(plan, (p - 1) / (double)(v * m + p - 1));
                for (int r = 0; r < p; r++)
                    peak_is_within(plan, r, at_most(m * v, v > 1 ? 2 * (p - r - 1) + (v - 1) * p + 1 : p - r));
                dependencies_hold(plan);
                dtrain_pipeline_plan_destroy(plan);
            }
}

TEST(uneven_stages_and_transfers_take_their_time)
{
    static const double shares[2] = {1, 3};
    dtrain_pipeline_plan_desc desc;
    dtrain_pipeline_plan *plan = NULL;
    memset(&desc, 0, sizeof desc);
    desc.ranks = 2;
    desc.micro_batches = 2;
    desc.forward = 1;
    desc.backward_input = 2;
    desc.transfer = 0.5;
    desc.shares = shares;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_OK);
    /* rank 1: F0 1.5 to 4.5, B0 to 10.5, F1 to 13.5, B1 to 19.5; rank 0 then B1 from 20 to 22 */
    CHECK(fabs(plan->span - 22.0) < 1e-12);
    CHECK(fabs(plan->bubble - (1.0 - (6.0 + 18.0) / 44.0)) < 1e-12);
    dtrain_pipeline_plan_destroy(plan);
}

static void swap(dtrain_pipeline_plan *plan, size_t a, size_t b)
{
    dtrain_pipeline_task kept = plan->tasks[a];
    plan->tasks[a] = plan->tasks[b];
    plan->tasks[b] = kept;
}

TEST(orders_that_cannot_run_are_found)
{
    dtrain_pipeline_plan *plan = plan_of(DTRAIN_PIPELINE_1F1B, 2, 2, 0); /* 0: F0 F1 B0 B1  1: F0 B0 F1 B1 */
    double span = plan->span;
    swap(plan, 4, 5);
    CHECK_EQ(dtrain__pipeline_plan_check(plan), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 stops at its task 0, B0 of chunk 0, whose input is never there");
    swap(plan, 4, 5);
    swap(plan, 4, 6); /* rank 0 sends F0 first, rank 1 awaits F1 first */
    CHECK_EQ(dtrain__pipeline_plan_check(plan), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 stops at its task 0, F1");
    swap(plan, 4, 6);
    CHECK_EQ(dtrain__pipeline_plan_check(plan), DTRAIN_OK);
    CHECK(plan->span == span);
    dtrain_pipeline_plan_destroy(plan);
    plan = plan_of(DTRAIN_PIPELINE_ZB_H1, 2, 3, 0); /* 0: F0 F1 I0 W0 ... */
    swap(plan, 2, 3);
    CHECK_EQ(dtrain__pipeline_plan_check(plan), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0 stops at its task 2, W0");
    dtrain_pipeline_plan_destroy(plan);
}

static void *no_memory(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)align;
    if (new_bytes > *(const size_t *)user)
        return NULL;
    return old_bytes == 0 ? calloc(1, new_bytes) : (free(pointer), NULL);
}

TEST(what_cannot_be_planned_is_refused)
{
    size_t most = 1000;
    dtrain_allocator small = {no_memory, &most, 0, 0};
    static const double negative[2] = {1, -1};
    dtrain_pipeline_plan_desc desc;
    dtrain_pipeline_plan *plan = NULL;
    memset(&desc, 0, sizeof desc);
    desc.ranks = -1;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "-1 ranks");
    desc.ranks = 2;
    desc.chunks = 2;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "interleaved schedule alone");
    desc.chunks = 0;
    desc.schedule = (dtrain_pipeline_schedule)7;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_ERR_INVALID);
    desc.schedule = DTRAIN_PIPELINE_GPIPE;
    desc.forward = INFINITY;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_ERR_INVALID);
    desc.forward = 0;
    desc.shares = negative;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the share of stage 1 is -1");
    desc.shares = NULL;
    desc.ranks = desc.micro_batches = 1000000;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, &small), DTRAIN_ERR_MEMORY);
    desc.ranks = desc.micro_batches = 4;
    for (most = 0; most < 5000 && dtrain_pipeline_plan_create(&plan, &desc, &small) != DTRAIN_OK; most += 8) {
        CHECK(plan == NULL);
        CHECK_EQ(small.bytes, 0);
    }
    CHECK(most > 0 && plan != NULL);
    dtrain_pipeline_plan_destroy(plan);
    CHECK_EQ(small.bytes, 0);
    CHECK_EQ(dtrain_pipeline_plan_create(NULL, &desc, NULL), DTRAIN_ERR_INVALID);
    dtrain_pipeline_plan_destroy(NULL);
}
