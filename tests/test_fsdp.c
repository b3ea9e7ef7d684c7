/* FSDP against a reference that is computed by one rank with plain loops: gradients summed by the tree of the manual,
 * the norm in twice the precision of a double, AdamW from its formula's own function on whole arrays. Then what each
 * call promises, with values written by hand. */
#define DTRAIN_IMPLEMENTATION
#include "../dtrain.h"
#include "test.h"
#include "fsdp_model.h"

static void run_as(dtrain_strategy strategy, int ranks, int shard_size, int micro, int keep_full)
{
    trial t = trial_of(strategy, ranks, shard_size, micro);
    t.desc.keep_full_grads = keep_full;
    trial_run(t, NULL);
}

TEST(full_grad_and_none_give_the_weights_of_the_reference_bit_for_bit)
{
    const int worlds[] = {1, 2, 3, 4, 6, 8};
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_NO_SHARD; strategy++)
        for (int i = 0; i < 6; i++)
            run_as((dtrain_strategy)strategy, worlds[i], 0, worlds[i], 0);
}

TEST(hybrid_gives_them_where_shard_size_is_a_power_of_two)
{
    run_as(DTRAIN_HYBRID_SHARD, 4, 2, 4, 0);
    run_as(DTRAIN_HYBRID_SHARD, 8, 2, 8, 0);
    run_as(DTRAIN_HYBRID_SHARD, 8, 4, 8, 0);
    run_as(DTRAIN_HYBRID_SHARD, 6, 2, 6, 0);
    run_as(DTRAIN_HYBRID_SHARD, 4, 4, 4, 0);
    run_as(DTRAIN_HYBRID_SHARD, 4, 1, 4, 0);
}

TEST(eight_micro_batches_give_the_same_weights_on_1_2_4_and_8_ranks)
{
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_NO_SHARD; strategy++)
        for (int ranks = 1; ranks <= 8; ranks *= 2)
            for (int keep = 0; keep < 2; keep++)
                run_as((dtrain_strategy)strategy, ranks, 0, 8, keep);
    run_as(DTRAIN_HYBRID_SHARD, 4, 2, 8, 0);
    run_as(DTRAIN_HYBRID_SHARD, 8, 4, 8, 1);
}

static const dtrain_strategy strategies[4] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_NO_SHARD,
                                              DTRAIN_HYBRID_SHARD};

TEST(no_way_of_gathering_changes_a_bit)
{
    for (int i = 0; i < 4; i++)
        for (int way = 1; way < 8; way++) {
            trial t = trial_of(strategies[i], 4, 2, 8);
            t.desc.no_prefetch = way & 1;
            t.desc.no_reshard_after_forward = way >> 1 & 1;
            t.desc.keep_full_grads = way >> 2 & 1;
            t.swapped = way & 1;
            trial_run(t, NULL);
        }
}

TEST(memory_of_the_callers_takes_rank_0s_first_values)
{
    for (int i = 0; i < 4; i++)
        for (int way = 1; way < 4; way++) {
            trial t = trial_of(strategies[i], 4, 2, 4);
            t.own_data = way & 1;
            t.own_grads = way >> 1;
            trial_run(t, NULL);
            t.desc.no_broadcast = 1;
            trial_run(t, NULL);
        }
}

TEST(units_that_a_rank_leaves_out_add_nothing)
{
    const unsigned masks[] = {1u << 2, 1u << 3, 1u << 4,  1u << 0,     3u << 1,    7u << 1,
                              3u << 2, 3u << 3, 15u << 1, 0x8000001eu, 0x80000004u};
    dtrain_comm_desc soon = {0};
    soon.timeout_ms = 5000;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 11; k++) {
            trial t = trial_of(strategies[i], 4, 2, 8);
            t.unused = masks[k];
            trial_run(t, &soon);
            t.desc.no_prefetch = 1;
            trial_run(t, &soon);
            t.desc.keep_full_grads = 1;
            trial_run(t, &soon);
        }
}

TEST(ranks_without_a_micro_batch_join)
{
    dtrain_comm_desc soon = {0};
    soon.timeout_ms = 5000;
    for (int i = 0; i < 4; i++)
        for (int keep = 0; keep < 2; keep++)
            for (int micro = 1; micro < 8; micro++) {
                trial t = trial_of(strategies[i], 4, 2, micro);
                t.desc.keep_full_grads = keep;
                trial_run(t, &soon);
            }
}

TEST(sixteen_bits_on_the_way_leave_float32_masters)
{
    const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16};
    const int worlds[] = {1, 2, 4, 8};
    for (int i = 0; i < 4; i++)
        for (int w = 0; w < 4; w++)
            for (int k = 1; k < 9; k++) {
                trial t = trial_of(strategies[i], worlds[w], worlds[w] > 1 ? 2 : 1, 8);
                t.desc.gather_dtype = dtypes[k % 3];
                t.desc.reduce_dtype = dtypes[k / 3];
                t.own_data = k & 1;
                trial_run(t, NULL);
            }
}
