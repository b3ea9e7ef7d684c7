/* What tools/plan expects of a layout, against numbers found by hand for a model of 656 parameters, the activations
 * that examples/gpt.h lays out, and the formulas of the schedules; which layouts it leaves out, how it orders the
 * others, and what it says to wrong flags. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

#include <math.h>
#include <unistd.h>

#define REPORT_PROGRAM "test_plan"
#include "../../examples/gpt_flags.h"
#include "../../examples/gpt.h"
#include "../../tools/plan_flags.h"
#include "../../tools/plan_measure.h"

/* 2 layers of 244 parameters, an embedding of 96 and a head of 72; micro-batches of 2 sequences of 8 tokens. What is
 * not a matrix product takes no time. */
static plan_input tiny(long ranks, long micro)
{
    plan_input in;
    memset(&in, 0, sizeof in);
    in.layers = 2;
    in.heads = 2;
    in.width = 4;
    in.context = 8;
    in.vocab = 16;
    in.sequences = 2 * micro;
    in.micro = micro;
    in.ranks = ranks;
    in.chunks = 2;
    in.bandwidth = 1e12;
    in.rate = 1024;
    in.copy_rate = 1e30;
    return in;
}

static plan_result estimate(const plan_input *in, int dp, int pp, int tp, dtrain_pipeline_schedule schedule,
                            dtrain_strategy strategy)
{
    plan_result result;
    memset(&result, 0, sizeof result);
    result.layout.dp = dp;
    result.layout.pp = pp;
    result.layout.tp = tp;
    result.layout.chunks = schedule == DTRAIN_PIPELINE_INTERLEAVED ? (int)in->chunks : 1;
    result.layout.schedule = schedule;
    result.layout.strategy = strategy;
    if (plan_estimate(in, &result) != DTRAIN_OK)
        TEST_FAIL("dp=%d,pp=%d,tp=%d: %s", dp, pp, tp, dtrain_last_error());
    return result;
}

static void near_to(double got, double expected, double within, int line)
{
    if (!(fabs(got - expected) <= within))
        TEST_FAIL("line %d: %.12g, expected %.12g within %g", line, got, expected, within);
}

#define CHECK_NEAR(got, expected, within) near_to(got, expected, within, __LINE__)

TEST(memory_of_one_rank_is_all_of_the_model)
{
    plan_input in = tiny(1, 1);
    plan_result r = estimate(&in, 1, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    double page = (double)sysconf(_SC_PAGESIZE);
    CHECK_EQ(r.why[0], 0);
    CHECK_EQ(r.memory.weights, page);                 /* 2,624 bytes */
    CHECK_EQ(r.memory.gradients, 656 * 4 + 2 * page); /* sums, and two units in full */
    CHECK_EQ(r.memory.optimizer, 656 * 8);
    CHECK_EQ(r.memory.activations, (16 * (2 * 84 + 26) + 456) * 4);
    CHECK(r.memory.all ==
          r.memory.weights + r.memory.gradients + r.memory.optimizer + r.memory.activations + r.memory.other);
    CHECK_EQ(r.live, 1);
    CHECK_EQ(r.sent, 0);
    CHECK(r.fits);
}

TEST(activations_of_one_rank_are_those_that_the_gpt_lays_out)
{
    static const long sizes[][5] = {{2, 2, 32, 16, 1}, {4, 4, 128, 128, 8}, {7, 3, 96, 33, 5}};
    for (int i = 0; i < 3; i++) {
        const long *s = sizes[i];
        plan_input in = tiny(1, 1);
        gpt model;
        in.layers = s[0];
        in.heads = s[1];
        in.width = s[2];
        in.context = s[3];
        in.sequences = s[4];
        in.vocab = GPT_VOCAB;
        plan_result r = estimate(&in, 1, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
        gpt_flags flags = gpt_defaults();
        flags.layers = s[0];
        flags.heads = s[1];
        flags.width = s[2];
        flags.context = s[3];
        flags.batch = s[4];
        gpt_describe(&model, &flags);
        CHECK_NEAR(r.memory.activations / 4, (double)gpt_lay_out(&model, NULL), 21 * 15); /* each array to 64 bytes */
        CHECK_EQ(r.memory.optimizer, 8 * model.count);
    }
}

TEST(tensor_parallel_ranks_hold_half_of_what_is_split)
{
    plan_input in = tiny(2, 1);
    plan_result r = estimate(&in, 1, 1, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    CHECK_EQ(r.memory.optimizer, (32 + 32 + 2 * 134 + 40) * 8);
    CHECK_EQ(r.memory.activations, (16 * (2 * 52 + 18) + 328) * 4);
    CHECK_EQ(r.sent_tp, 10 * 256 + 64 + 128);
    CHECK_EQ(r.sent, r.sent_tp);
}

TEST(the_first_stage_holds_two_micro_batches_of_two)
{
    plan_input in = tiny(2, 2);
    plan_result r = estimate(&in, 1, 2, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    CHECK_EQ(r.memory.optimizer, (96 + 244) * 8);
    CHECK_EQ(r.memory.activations, (2 * 16 * 88 + 584) * 4);
    CHECK_EQ(r.live, 2);
    CHECK_EQ(r.sent_pp, 2 * 256);
    CHECK_EQ(r.sent, r.sent_pp);
    in = tiny(2, 6);
    CHECK_EQ(estimate(&in, 1, 2, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).memory.activations, (2 * 16 * 88 + 584) * 4);
    r = estimate(&in, 1, 2, 1, DTRAIN_PIPELINE_GPIPE, DTRAIN_DDP); /* the last stage has the logits */
    CHECK_EQ(r.live, 6);
    CHECK_EQ(r.memory.activations, (6 * 16 * 110 + 584) * 4);
    r = estimate(&in, 1, 2, 1, DTRAIN_PIPELINE_ZB_H1, DTRAIN_DDP); /* gradients wait for those of the weights */
    CHECK_EQ(r.live, 2);
    CHECK_EQ(r.memory.activations, (2 * 16 * (110 + 36 + 16) + 584) * 4);
}

TEST(full_shard_over_four_holds_a_quarter_of_each_unit)
{
    plan_input in = tiny(4, 4);
    plan_result full = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_FULL_SHARD);
    plan_result grad = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_SHARD_GRAD_OP);
    plan_result none = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    CHECK_EQ(full.memory.optimizer, (24 + 2 * 61 + 18) * 8);
    CHECK_EQ(grad.memory.optimizer, full.memory.optimizer);
    CHECK_EQ(none.memory.optimizer, 656 * 8);
    CHECK_EQ(full.sent, ((72 + 183) * 2 + 183 + 54 + 492) * 4);
    CHECK_EQ(grad.sent, 2 * 492 * 4);
    CHECK_EQ(none.sent, 2 * 492 * 4);
    in.sequences = 16; /* twice as many micro-batches: each gathered, and reduced; what stays is gathered once */
    in.micro = 8;
    CHECK_EQ(estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_FULL_SHARD).sent, 2 * full.sent);
    CHECK_EQ(estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_SHARD_GRAD_OP).sent, 3 * 492 * 4);
}

TEST(products_take_their_operations)
{
    plan_input in = tiny(1, 1);
    plan_result r = estimate(&in, 1, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    CHECK_NEAR(r.compute, 6 * 16 * 448 / 1024.0 + 12 * 2 * 16 * 8 * 4 / 1024.0, 1e-9);
    CHECK_NEAR(r.step, r.compute, 1e-9);
    in.ranks = in.micro = 4;
    in.sequences = 8;
    CHECK_NEAR(estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).compute, 54, 1e-9);
    CHECK_NEAR(estimate(&in, 1, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).compute, 4 * 54, 1e-9);
}

TEST(activations_wait_for_their_transfer)
{
    plan_input in = tiny(2, 1);
    in.bandwidth = 256;
    in.latency = 1;
    plan_result r = estimate(&in, 1, 2, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    CHECK_NEAR(r.pp, 2 * (1 + 1), 1e-9); /* there and back */
    CHECK_NEAR(r.step, 54 + 4, 1e-9);
    CHECK_NEAR(r.bubble, 54 - r.compute, 1e-9);
}

TEST(all_reduces_of_the_pass_back_hide_under_the_weights_products)
{
    plan_input in = tiny(2, 1);
    in.bandwidth = 256; /* an activation a second */
    plan_result r = estimate(&in, 1, 1, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    CHECK_NEAR(r.compute, 27, 1e-9);
    CHECK_NEAR(r.tp_hidden, 2 * 0.75 + 2 * 1 + 1, 1e-9);
    CHECK_NEAR(r.tp, 5 + 0.75 + 2 * 0.25, 1e-9);
    in.ranks = 4;
    CHECK(estimate(&in, 1, 2, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).tp_hidden > 2);
    CHECK_NEAR(estimate(&in, 1, 2, 2, DTRAIN_PIPELINE_ZB_H1, DTRAIN_DDP).tp_hidden, 0, 0); /* they come later */
    in.ranks = in.processors = 2; /* which no message has to itself */
    r = estimate(&in, 1, 1, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP);
    CHECK_NEAR(r.tp_hidden, 0, 0);
    CHECK_NEAR(r.tp, 5 + 0.75 + 5, 1e-9);
}

TEST(an_all_reduce_is_the_faster_of_two)
{
    plan_input in = tiny(4, 1);
    in.bandwidth = 1000;
    in.latency = 1;
    CHECK_NEAR(plan_all_reduce(&in, 4, 1000).seconds, 2 * (1 + 1), 1e-12); /* two rounds of all of it */
    CHECK_NEAR(plan_all_reduce(&in, 4, 1000).bytes, 2000, 1e-9);
    CHECK_NEAR(plan_all_reduce(&in, 4, 8000).seconds, 4 * 1 + 12, 1e-12); /* four of a half and a quarter */
    CHECK_NEAR(plan_all_reduce(&in, 4, 8000).bytes, 12000, 1e-9);
    CHECK_NEAR(plan_all_reduce(&in, 5, 10).seconds, 3 * 1.01, 1e-12);
}

/* Stages of one layer each, beside which the head is nothing. */
static plan_input stages(long layers, long ranks, long micro)
{
    plan_input in = tiny(ranks, micro);
    in.layers = layers;
    in.width = 256;
    in.context = in.vocab = 1;
    return in;
}

TEST(the_bubble_is_that_of_the_formulas)
{
    static const dtrain_pipeline_schedule schedules[] = {DTRAIN_PIPELINE_GPIPE, DTRAIN_PIPELINE_1F1B,
                                                         DTRAIN_PIPELINE_INTERLEAVED, DTRAIN_PIPELINE_ZB_H1};
    const double expected[] = {3.0 / 11, 3.0 / 11, 3.0 / 19, 3.0 / 27};
    plan_input in = stages(8, 4, 8);
    for (int i = 0; i < 4; i++) {
        plan_result r = estimate(&in, 1, 4, 1, schedules[i], DTRAIN_DDP);
        CHECK_NEAR(r.bubble_share, expected[i], 0.003);
        CHECK_NEAR(r.bubble / r.step, expected[i], 0.003);
        CHECK_NEAR(r.compute + r.bubble, r.step, 1e-6 * r.step);
    }
    in.processors = 1; /* another rank has always something to do */
    for (int i = 0; i < 4; i++) {
        plan_result r = estimate(&in, 1, 4, 1, schedules[i], DTRAIN_DDP);
        CHECK_NEAR(r.bubble, 0, 1e-6 * r.step);
        CHECK_NEAR(r.step / estimate(&in, 1, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).step, 1, 1e-6);
    }
}

static double shared_span(dtrain_pipeline_schedule schedule, int ranks, int micro, double processors, double *whole,
                          double *work)
{
    dtrain_pipeline_plan_desc desc;
    dtrain_pipeline_plan *plan = NULL;
    double span;
    memset(&desc, 0, sizeof desc);
    desc.schedule = schedule;
    desc.ranks = ranks;
    desc.micro_batches = micro;
    desc.transfer = processors > ranks ? 0.25 : 0;
    CHECK_EQ(dtrain_pipeline_plan_create(&plan, &desc, NULL), DTRAIN_OK);
    span = plan_shared_span(plan, processors);
    *whole = plan->span;
    *work = 0;
    for (size_t i = 0; i < plan->rank_tasks * (size_t)ranks; i++)
        *work += plan->tasks[i].end - plan->tasks[i].begin;
    dtrain_pipeline_plan_destroy(plan);
    return span;
}

TEST(ranks_that_share_processors_take_what_others_leave)
{
    static const dtrain_pipeline_schedule schedules[] = {DTRAIN_PIPELINE_GPIPE, DTRAIN_PIPELINE_1F1B,
                                                         DTRAIN_PIPELINE_INTERLEAVED, DTRAIN_PIPELINE_ZB_H1};
    double whole, work;
    for (int i = 0; i < 4; i++)
        for (int p = 1; p <= 5; p++)
            for (int m = 1; m <= 9; m += 2) {
                double span = shared_span(schedules[i], p, m, p + 1, &whole, &work);
                CHECK_NEAR(span, whole, 1e-9 * whole);
                span = shared_span(schedules[i], p, m, p, &whole, &work);
                CHECK_NEAR(span, whole, 1e-9 * whole);
                span = shared_span(schedules[i], p, m, 1, &whole, &work);
                CHECK_NEAR(span, work, 1e-9 * work);
                span = shared_span(schedules[i], p, m, 0.5, &whole, &work);
                CHECK_NEAR(span, 2 * work, 1e-9 * work);
                span = shared_span(schedules[i], p, m, 1.7, &whole, &work);
                CHECK(span >= whole - 1e-9 && span >= work / 1.7 - 1e-9 && span <= work + 1e-9);
            }
    /* F0 1; F1 and F0 at 3/4; B0 2; B0, F1 and half of B1, at 3/4; half of B1 1; B1 2 */
    CHECK_NEAR(shared_span(DTRAIN_PIPELINE_1F1B, 2, 2, 1.5, &whole, &work), 10, 1e-9);
    CHECK_NEAR(whole, 9, 1e-9);
}

TEST(four_ranks_on_two_processors_take_twice_as_long)
{
    plan_input in = tiny(4, 4);
    in.bandwidth = 1e3;
    for (int i = 0; i < 2; i++) {
        in.copy_rate = i ? 1e4 : 1e30; /* so that the optimizer takes some time, too */
        in.processors = 4;
        plan_result own = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_SHARD_GRAD_OP);
        in.processors = 2;
        plan_result half = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_SHARD_GRAD_OP);
        CHECK_NEAR(half.compute, 2 * own.compute, 1e-9 * own.compute);
        CHECK_NEAR(half.dp, 2 * own.dp, 1e-9 * own.dp);
        CHECK_NEAR(half.step, 2 * own.step, 1e-9 * own.step);
    }
    in.copy_rate = 1e30;
    CHECK_NEAR(estimate(&in, 2, 2, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).compute, 2 * 54, 1e-9);
}

/* Reductions that take longer than what they run beside make a step longer; the last and the first stand alone. */
TEST(of_gathers_and_reductions_what_fits_beside_computation_is_hidden)
{
    plan_input in = tiny(4, 4);
    in.bandwidth = 492 * 4; /* all slices of others in a second, where computation takes 18 and 36 */
    plan_result r = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_FULL_SHARD);
    CHECK_NEAR(r.dp, 2 * 72 / 492.0, 1e-9);
    CHECK_NEAR(r.dp + r.dp_hidden, (747 + 492) / 492.0, 1e-9);
    CHECK_NEAR(r.step, r.compute + r.dp, 1e-9);
    r = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_SHARD_GRAD_OP);
    CHECK_NEAR(r.dp, 72 / 492.0 + 1, 1e-9); /* parameters are sent anew when they are updated */
    in.bandwidth /= 100;
    r = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_FULL_SHARD);
    CHECK_NEAR(r.dp, 100 * (747 + 492) / 492.0 - 54 + 2 * 7200 / 492.0, 1e-6);
    in.processors = 4;
    in.bandwidth *= 100;
    r = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_FULL_SHARD);
    CHECK_NEAR(r.dp, (747 + 492) / 492.0, 1e-9);
    CHECK_NEAR(r.dp_hidden, 0, 1e-9);
}

static const plan_result *find(const plan_result *results, size_t count, int dp, int pp, int tp)
{
    for (size_t i = 0; i < count; i++)
        if (results[i].layout.dp == dp && results[i].layout.pp == pp && results[i].layout.tp == tp)
            return &results[i];
    TEST_FAIL("there is no dp=%d,pp=%d,tp=%d", dp, pp, tp);
    return results;
}

TEST(layouts_that_cannot_be_are_left_out_with_what_would_fit)
{
    plan_input in = tiny(4, 2);
    plan_result *results;
    size_t count;
    in.heads = 6;
    in.width = 12;
    CHECK_EQ(plan_all(&in, &results, &count), DTRAIN_OK);
    CHECK_CONTAINS(find(results, count, 1, 1, 4)->why, "6 heads are not split evenly over tp=4; tp of 1, 2, 3 or 6");
    CHECK_CONTAINS(find(results, count, 1, 4, 1)->why, "2 layers cannot be cut into 4 stages; 1 to 2 would fit");
    CHECK_CONTAINS(
        find(results, count, 4, 1, 1)->why,
        "2 micro-batches are not dealt evenly to dp=4; dp of 1 or 2, or a multiple of 4 as --micro, would fit");
    CHECK_EQ(find(results, count, 2, 2, 1)->why[0], 0);
    for (size_t i = 1; i < count; i++)
        CHECK((results[i - 1].why[0] != 0) <= (results[i].why[0] != 0));
    free(results);
    in = tiny(3, 8); /* which train_gpt --mesh dp=3 --micro 8 refuses */
    CHECK_CONTAINS(estimate(&in, 3, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).why,
                   "8 micro-batches are not dealt evenly to dp=3; dp of 1 or 2, or a multiple of 3 as --micro");
    in = tiny(2, 2);
    in.vocab = 1;
    CHECK_CONTAINS(estimate(&in, 1, 1, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).why,
                   "a vocabulary of 1 has no part for each of tp=2");
}

TEST(every_layout_of_eight_ranks_is_tried_and_its_parts_make_the_whole)
{
    plan_input in = tiny(8, 8), fast;
    plan_result *results, again;
    size_t count;
    in.layers = in.heads = 8;
    in.width = 64;
    in.vocab = 256;
    in.bandwidth = 3e5;
    in.latency = 1e-3;
    in.rate = 1e7;
    in.copy_rate = 1e7;
    CHECK_EQ(plan_list(&in, NULL), 58);
    for (in.processors = 0; in.processors <= 12; in.processors += 3) {
        CHECK_EQ(plan_all(&in, &results, &count), DTRAIN_OK);
        CHECK_EQ(count, 58);
        fast = in;
        fast.bandwidth *= 3;
        for (size_t i = 0; i < count; i++) {
            const plan_result *r = &results[i];
            if (r->why[0] != 0) { /* 8 layers cannot be cut into 16 stages */
                CHECK(r->layout.pp == 8 && r->layout.chunks == 2);
                continue;
            }
            CHECK(i == 0 || results[i - 1].step <= r->step);
            CHECK(r->compute > 0 && r->bubble >= 0 && r->tp >= 0 && r->pp >= -1e-12 && r->dp >= -1e-12);
            CHECK_NEAR(r->compute + r->bubble + r->tp + r->pp + r->dp, r->step, 1e-9 * r->step);
            CHECK((r->tp > 0) == (r->layout.tp > 1) && (r->sent_pp > 0) == (r->layout.pp > 1));
            again = estimate(&fast, r->layout.dp, r->layout.pp, r->layout.tp, r->layout.schedule, r->layout.strategy);
            CHECK(again.step <= r->step * (1 + 1e-12) && again.memory.all == r->memory.all);
        }
        free(results);
    }
}

TEST(a_slow_link_makes_the_layout_that_sends_less_the_best)
{
    plan_input in = tiny(4, 4);
    plan_result *results;
    const plan_result *least;
    size_t count;
    double sent[2];
    in.layers = in.heads = 4;
    in.width = 64;
    in.vocab = 256;
    in.rate = 1e9;
    in.copy_rate = 1e9;
    for (int slow = 0; slow < 2; slow++) {
        in.bandwidth = slow ? 1e5 : 1e12;
        in.latency = slow ? 1e-3 : 1e-7;
        CHECK_EQ(plan_all(&in, &results, &count), DTRAIN_OK);
        const plan_result *best = plan_best(results, count, &least);
        sent[slow] = best->sent;
        CHECK_EQ(best->layout.pp > 1, slow); /* activations of 4 KiB are less than parameters, and than 16 of them */
        CHECK_EQ(best->layout.tp, 1);
        if (slow)
            CHECK(find(results, count, 1, 1, 4)->step > 2 * best->step);
        free(results);
    }
    CHECK(sent[1] < sent[0]);
}

TEST(little_memory_makes_full_shard_the_best_and_less_names_the_smallest_need)
{
    plan_input in = tiny(4, 4);
    plan_result *results;
    const plan_result *best, *least;
    char flags[200];
    size_t count;
    in.layers = 12;
    in.heads = 1;
    in.width = 64;
    in.bandwidth = 1e3; /* full shard sends the most */
    in.rate = 1e12;
    double full = estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_FULL_SHARD).memory.all;
    CHECK(full < 0.7 * estimate(&in, 4, 1, 1, DTRAIN_PIPELINE_1F1B, DTRAIN_DDP).memory.all);
    for (int i = 0; i < 3; i++) {
        in.memory = i == 0 ? 0 : i == 1 ? full : full - 1;
        CHECK_EQ(plan_all(&in, &results, &count), DTRAIN_OK);
        best = plan_best(results, count, &least);
        if (i == 0)
            CHECK(best != NULL && best->layout.strategy != DTRAIN_FULL_SHARD);
        else if (i == 1)
            CHECK(best != NULL && strcmp(plan_flags(&in, &best->layout, flags, sizeof flags),
                                         "--mesh dp=4,pp=1,tp=1 --micro 4 --strategy full") == 0);
        else
            CHECK(best == NULL && least != NULL && least->memory.all == full);
        free(results);
    }
}

TEST(flags_and_lines_name_the_layout)
{
    plan_input in = tiny(8, 8);
    plan_result r;
    char text[600];
    in.layers = 8;
    r = estimate(&in, 2, 2, 2, DTRAIN_PIPELINE_1F1B, DTRAIN_FULL_SHARD);
    CHECK(strcmp(plan_flags(&in, &r.layout, text, sizeof text),
                 "--mesh dp=2,pp=2,tp=2 --schedule 1f1b --micro 8 --strategy full") == 0);
    r.step = 2e-3;
    CHECK_CONTAINS(plan_line(&r, text, sizeof text),
                   "op=plan ranks=8 mesh=dp2.pp2.tp2 schedule=1f1b strategy=full us=2000.0 compute_us=");
    in.chunks = 4;
    r = estimate(&in, 4, 2, 1, DTRAIN_PIPELINE_INTERLEAVED, DTRAIN_SHARD_GRAD_OP);
    CHECK(strcmp(plan_flags(&in, &r.layout, text, sizeof text),
                 "--mesh dp=4,pp=2,tp=1 --schedule interleaved --chunks 4 --micro 8 --strategy grad") == 0);
}

/* Reads flags that are one string, parted by spaces. */
static int parse(plan_options *options, const char *flags, char *why, size_t size)
{
    static char text[400];
    char *argv[40] = {text}, *at = text;
    int argc = 1;
    snprintf(text, sizeof text, "%s", flags);
    while (*at != 0 && argc < 39) {
        argv[argc++] = at;
        at += strcspn(at, " ");
        if (*at == ' ')
            *at++ = 0;
    }
    argv[argc] = NULL;
    return plan_parse(options, argc, argv, why, size);
}

TEST(bad_flags_are_refused_with_what_would_fit)
{
    static const char *const cases[][2] = {
        {"--heads 5", "--heads 5: --width 128 is not a multiple of it; 1, 2, 4, 8, 16, 32, 64 or 128 would fit"},
        {"--sequences 12 --micro 8",
         "--micro 8: --sequences 12 is not a multiple of it; 1, 2, 3, 4, 6 or 12 would fit"},
        {"--micro 0", "--micro 0: a whole number from 1 to 4096 is expected"},
        {"--sequences 1000000 --micro 2",
         "--sequences 1000000: a micro-batch has 500000 of them, and train_gpt takes at most 65536"},
        {"--chunks 17", "--chunks 17: a whole number from 2 to 16 is expected"},
        {"--ranks 2.5", "--ranks 2.5: a whole number from 1 to 1024 is expected"},
        {"--ranks 12x", "--ranks 12x: a whole number from 1 to 1024 is expected"},
        {"--ranks 99999999999999999999", "--ranks 99999999999999999999: a whole number"},
        {"--vocab 10000001", "--vocab 10000001: a whole number from 1 to 10000000 is expected"},
        {"--ranks", "--ranks: a whole number from 1 to 1024 is expected"},
        {"--layers nan", "--layers nan: a whole number"},
        {"--bandwidth -1", "--bandwidth -1: a number from 1e-06 to 1000000 is expected"},
        {"--bandwidth 0x1", "--bandwidth 0x1: a number from"},
        {"--rate 1e", "--rate 1e: a number from 0.001 to 1000000000 is expected"},
        {"--memory 16GB", "--memory 16GB: a number from"},
        {"--rank 4", "--rank: there is no such flag"},
        {"8", "8: there is no such flag"},
        {"--csv", "--csv: the name of a file is expected after it"}};
    plan_options options;
    char why[400];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        why[0] = 0;
        CHECK_EQ(parse(&options, cases[i][0], why, sizeof why), 1);
        CHECK_CONTAINS(why, cases[i][1]);
    }
    CHECK_EQ(parse(&options, "--width 512 --heads 8 --memory 1.5 --latency 3 --processors 2 --measure --lines --csv x",
                   why, sizeof why),
             0);
    CHECK(options.in.width == 512 && options.in.heads == 8 && options.in.processors == 2 && options.measure &&
          options.lines);
    CHECK(strcmp(options.csv, "x") == 0);
    CHECK_NEAR(options.in.memory, 1.5e9, 1e-3);
    CHECK_NEAR(options.in.latency, 3e-6, 1e-18);
    CHECK_EQ(options.in.rate, 0);
    plan_defaults(&options.in);
    CHECK(options.in.rate > 0 && options.in.copy_rate > 0 && options.in.bandwidth > 0);
    CHECK_NEAR(options.in.latency, 3e-6, 1e-18);
}

TEST(what_is_measured_takes_the_place_of_what_is_not_given)
{
    plan_options options;
    char why[400];
    CHECK_EQ(parse(&options, "--width 64 --context 32 --ranks 2 --sequences 8 --measure --latency 7", why, sizeof why),
             0);
    CHECK_EQ(plan_measure(&options.in), DTRAIN_OK);
    CHECK(options.in.rate > 1e6 && options.in.rate < 1e15);
    CHECK(options.in.copy_rate > 1e6 && options.in.copy_rate < 1e15);
    CHECK(options.in.bandwidth > 1e4 && options.in.bandwidth < 1e15);
    CHECK(options.in.processors >= 1);
    CHECK_NEAR(options.in.latency, 7e-6, 1e-18);
}
