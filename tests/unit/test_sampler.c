/* Which examples a rank computes, and with which learning rate: samplers and schedules. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include <math.h>

/* ---- the sampler ---- */

static void check_epoch(uint64_t count, size_t batch, int micro, uint64_t epoch)
{
    static unsigned char seen[4096];
    uint64_t examples[64], total = 0;
    dtrain_sampler sampler;
    dtrain_sampler_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(seen, 0, sizeof seen);
    desc.count = count;
    desc.batch = batch;
    desc.micro_batches = micro;
    desc.seed = 7;
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    uint64_t steps = dtrain_sampler_steps(&sampler);
    for (uint64_t step = epoch * steps; step < (epoch + 1) * steps; step++) {
        for (int m = 0; m < micro; m++) {
            size_t got = dtrain_sampler_batch(&sampler, step, m, examples);
            CHECK(got <= batch);
            for (size_t i = 0; i < got; i++, total++) {
                CHECK(examples[i] < count);
                CHECK(!seen[examples[i]]);
                seen[examples[i]] = 1;
            }
        }
    }
    CHECK_EQ(total, count);
}

TEST(every_example_comes_exactly_once_an_epoch)
{
    const uint64_t counts[] = {1, 2, 3, 4, 5, 7, 8, 9, 100, 1000, 1023, 4096};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            check_epoch(counts[i], 1, 1, epoch);
            check_epoch(counts[i], 3, 8, epoch);
            check_epoch(counts[i], 64, 5, epoch);
        }
    }
}

TEST(the_ranks_of_any_world_share_the_same_micro_batches)
{
    dtrain_sampler sampler;
    dtrain_sampler_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.count = 203;
    desc.batch = 4;
    desc.micro_batches = 8;
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_sampler_steps(&sampler), 7); /* 6 * 32 = 192, and 11 */
    for (uint64_t step = 0; step < 7; step++) {
        for (int ranks = 1; ranks <= 16; ranks++) {
            int next = 0;
            for (int rank = 0; rank < ranks; rank++) {
                int first, share = dtrain_sampler_share(&sampler, step, rank, ranks, &first);
                CHECK(share == 0 || first == next);
                next += share;
            }
            CHECK_EQ(next, 8);
        }
    }
    desc.count = 195; /* a last step of 3 examples: 3 micro-batches of one, and none for the other ranks */
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_sampler_share(&sampler, 6, 0, 4, NULL), 2);
    CHECK_EQ(dtrain_sampler_share(&sampler, 6, 1, 4, NULL), 1);
    CHECK_EQ(dtrain_sampler_share(&sampler, 6, 2, 4, NULL), 0);
    uint64_t examples[4];
    CHECK_EQ(dtrain_sampler_batch(&sampler, 6, 2, examples), 1);
    CHECK_EQ(dtrain_sampler_batch(&sampler, 6, 2, NULL), 1);
    CHECK_EQ(dtrain_sampler_batch(&sampler, 6, 3, examples), 0);
    CHECK_EQ(dtrain_sampler_batch(&sampler, 6, 8, examples), 0);
}

TEST(strided_ranks_deal_a_steps_micro_batches_round)
{
    dtrain_sampler sampler;
    dtrain_sampler_desc desc;
    int first;
    memset(&desc, 0, sizeof desc);
    desc.count = 203;
    desc.batch = 4;
    desc.micro_batches = 8;
    desc.strided = 1;
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    static const int shares_of_3[3] = {3, 3, 2}; /* 0 3 6, 1 4 7, 2 5 */
    for (int rank = 0; rank < 3; rank++) {
        CHECK_EQ(dtrain_sampler_share(&sampler, 0, rank, 3, &first), shares_of_3[rank]);
        CHECK_EQ(first, rank);
    }
    CHECK_EQ(dtrain_sampler_share(&sampler, 0, 7, 9, &first), 1);
    CHECK_EQ(first, 7);
    CHECK_EQ(dtrain_sampler_share(&sampler, 0, 8, 9, NULL), 0);
    CHECK_EQ(dtrain_sampler_share(&sampler, 0, 3, 3, NULL), 0);
    CHECK_EQ(dtrain_sampler_share(&sampler, 0, -1, 3, NULL), 0);
    desc.count = 197; /* the last step has 5 examples, and so micro-batches 0 to 4: 0 3, 1 4, 2 */
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_sampler_share(&sampler, 6, 0, 3, NULL), 2);
    CHECK_EQ(dtrain_sampler_share(&sampler, 6, 1, 3, NULL), 2);
    CHECK_EQ(dtrain_sampler_share(&sampler, 6, 2, 3, NULL), 1);
    CHECK_EQ(dtrain_sampler_share(&sampler, 6, 5, 7, NULL), 0);
}

static void check_deal(const dtrain_sampler *sampler, uint64_t step, int ranks)
{
    int dealt[16] = {0};
    for (int rank = 0; rank < ranks; rank++) {
        int first, share = dtrain_sampler_share(sampler, step, rank, ranks, &first);
        for (int i = 0; i < share; i++)
            dealt[sampler->desc.strided ? first + i * ranks : first + i]++;
    }
    for (int micro = 0; micro < sampler->desc.micro_batches; micro++) {
        uint64_t examples[4];
        CHECK_EQ(dealt[micro], dtrain_sampler_batch(sampler, step, micro, examples) > 0);
    }
}

TEST(each_micro_batch_is_dealt_exactly_once)
{
    for (uint64_t count = 1; count <= 90; count++) {
        for (int micro = 1; micro <= 13; micro++) {
            dtrain_sampler sampler;
            dtrain_sampler_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.count = count;
            desc.batch = 4;
            desc.micro_batches = micro;
            for (desc.strided = 0; desc.strided < 2; desc.strided++) {
                CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
                for (uint64_t step = 0; step < dtrain_sampler_steps(&sampler); step++) {
                    for (int ranks = 1; ranks <= 9; ranks++)
                        check_deal(&sampler, step, ranks);
                }
            }
        }
    }
}

TEST(orders_depend_on_seed_and_epoch_and_are_even)
{
    int places[5][5], same_epoch = 0, same_seed = 0;
    memset(places, 0, sizeof places);
    for (uint64_t seed = 0; seed < 4000; seed++) {
        dtrain_sampler sampler;
        dtrain_sampler_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.count = 5;
        desc.seed = seed;
        CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
        for (uint64_t i = 0; i < 5; i++)
            places[i][dtrain__sampler_index(&sampler, 0, i)]++;
        same_epoch += dtrain__sampler_index(&sampler, 0, 0) == dtrain__sampler_index(&sampler, 1, 0);
        desc.seed = seed + 4000;
        uint64_t before = dtrain__sampler_index(&sampler, 0, 0);
        CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
        same_seed += before == dtrain__sampler_index(&sampler, 0, 0);
    }
    for (int i = 0; i < 5; i++) {
        for (int j = 0; j < 5; j++)
            CHECK(places[i][j] > 640 && places[i][j] < 960); /* 800, deviation 25 */
    }
    CHECK(same_epoch > 640 && same_epoch < 960);
    CHECK(same_seed > 640 && same_seed < 960);
}

TEST(a_sampler_refuses_what_it_cannot_deal)
{
    dtrain_sampler sampler;
    dtrain_sampler_desc desc;
    memset(&desc, 0, sizeof desc);
    CHECK_EQ(dtrain_sampler_init(&sampler, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "count is 0");
    desc.count = 3;
    desc.micro_batches = -1;
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "micro_batches is -1");
    desc.micro_batches = 1;
    desc.batch = SIZE_MAX;
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "at most 2^30");
    desc.batch = 0;
    desc.no_shuffle = 1;
    CHECK_EQ(dtrain_sampler_init(&sampler, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain__sampler_index(&sampler, 5, 2), 2);
}

/* ---- schedules ---- */

TEST(schedules_are_what_a_hand_computes)
{
    dtrain_schedule s;
    memset(&s, 0, sizeof s);
    s.lr = 0.5f;
    CHECK(dtrain_schedule_lr(&s, 0) == 0.5f);
    CHECK(dtrain_schedule_lr(&s, 1000000) == 0.5f);
    s.warmup_steps = 4;
    CHECK(dtrain_schedule_lr(&s, 0) == 0.125f);
    CHECK(dtrain_schedule_lr(&s, 2) == 0.375f);
    CHECK(dtrain_schedule_lr(&s, 4) == 0.5f);
    s.kind = DTRAIN_SCHEDULE_LINEAR;
    s.total_steps = 12;
    s.min_lr = 0.25f;
    CHECK(dtrain_schedule_lr(&s, 8) == 0.375f);
    CHECK(dtrain_schedule_lr(&s, 12) == 0.25f);
    CHECK(dtrain_schedule_lr(&s, 99) == 0.25f);
    s.kind = DTRAIN_SCHEDULE_COSINE;
    CHECK(dtrain_schedule_lr(&s, 3) == 0.5f);
    CHECK(dtrain_schedule_lr(&s, 4) == 0.5f);
    CHECK(dtrain_schedule_lr(&s, 8) == 0.375f);
    CHECK(dtrain_schedule_lr(&s, 12) == 0.25f);
    s.total_steps = 1004;
    for (uint64_t step = 4; step < 1004; step++) {
        double t = (double)(step - 4) / 1000.0;
        double expected = 0.25 + 0.125 * (1 + cos(3.14159265358979323846 * t));
        CHECK(fabs((double)dtrain_schedule_lr(&s, step) - expected) < 3e-8);
    }
    CHECK(dtrain_schedule_lr(NULL, 3) == 0.0f);
    s.kind = (dtrain_schedule_kind)DTRAIN_ORDER_ANY;
    CHECK(isnan(dtrain_schedule_lr(&s, 3)));
    CHECK_CONTAINS(dtrain_last_error(), "schedule_lr: kind is 401, expected DTRAIN_SCHEDULE_CONSTANT");
}
