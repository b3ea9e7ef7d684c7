/* ---- >>sampler ----
 * The examples of a micro-batch, computed from seed, step and index. There is no state to keep, to share between ranks,
 * or to save. A permutation of a rectangle just larger than the epoch shuffles it. A position that lands outside the
 * epoch is permuted again until it lands inside. */
#ifndef DTRAIN__SAMPLER
#define DTRAIN__SAMPLER
#include "train.h"
#include "../base/memory.c"
#include "../tensor/dtype.c"

/* With fewer rounds, some orders of short epochs are more likely than others. */
#define DTRAIN__SAMPLER_ROUNDS 8

static uint64_t dtrain__sampler_root(uint64_t square)
{
    uint64_t root = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint64_t next = root | (uint64_t)1 << bit;
        if (next * next <= square)
            root = next;
    }
    return root;
}

DTRAIN_API dtrain_status dtrain_sampler_init(dtrain_sampler *sampler, const dtrain_sampler_desc *desc)
{
    if (sampler == NULL || desc == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "dtrain_sampler_init: a sampler and a desc are needed, got NULL");
    memset(sampler, 0, sizeof *sampler);
    if (desc->count == 0 || desc->count > (uint64_t)1 << 62)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sampler: count is %llu, expected 1 to 2^62 examples",
                            (unsigned long long)desc->count);
    if (desc->micro_batches < 0)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sampler: micro_batches is %d, expected 0 or more",
                            desc->micro_batches);
    if (desc->batch > (size_t)1 << 30)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "sampler: batch is %zu, expected at most 2^30 examples",
                            desc->batch);
    sampler->desc = *desc;
    if (desc->batch == 0)
        sampler->desc.batch = 1;
    if (desc->micro_batches == 0)
        sampler->desc.micro_batches = 1;
    sampler->rows = dtrain__sampler_root(desc->count);
    sampler->columns = (desc->count + sampler->rows - 1) / sampler->rows;
    return DTRAIN_OK;
}

static uint64_t dtrain__sampler_per_step(const dtrain_sampler *sampler)
{
    return (uint64_t)sampler->desc.batch * (uint64_t)sampler->desc.micro_batches;
}

DTRAIN_API uint64_t dtrain_sampler_steps(const dtrain_sampler *sampler)
{
    uint64_t each = dtrain__sampler_per_step(sampler);
    return (sampler->desc.count + each - 1) / each;
}

/* Permutes a position. Each round adds to one coordinate a number that depends only on the other, so the round can be
 * undone. */
static uint64_t dtrain__sampler_permute(const dtrain_sampler *sampler, uint64_t key, uint64_t value)
{
    uint64_t row = value / sampler->columns, column = value % sampler->columns;
    for (uint64_t round = 0; round < DTRAIN__SAMPLER_ROUNDS; round += 2) {
        row = (row + dtrain_random_u64(key, round << 40 | column) % sampler->rows) % sampler->rows;
        column = (column + dtrain_random_u64(key, (round + 1) << 40 | row) % sampler->columns) % sampler->columns;
    }
    return row * sampler->columns + column;
}

/* Returns the example at a position of an epoch's shuffle. */
static uint64_t dtrain__sampler_index(const dtrain_sampler *sampler, uint64_t epoch, uint64_t position)
{
    if (sampler->desc.no_shuffle || position >= sampler->desc.count)
        return position;
    uint64_t key = dtrain_random_u64(sampler->desc.seed, epoch);
    do
        position = dtrain__sampler_permute(sampler, key, position);
    while (position >= sampler->desc.count);
    return position;
}

/* Returns how many examples a step of an epoch has: full micro-batches, or what is left for the last step. */
static uint64_t dtrain__sampler_left(const dtrain_sampler *sampler, uint64_t step_of_epoch)
{
    uint64_t each = dtrain__sampler_per_step(sampler);
    uint64_t left = sampler->desc.count - step_of_epoch * each;
    return left < each ? left : each;
}

DTRAIN__OF_PROCESS(uint32_t, dtrain__sampler_told)

/* Says once a process that some ranks have no examples, which nothing else shows: the weights are equal all the same.
 */
static void dtrain__sampler_tell_idle(int micro_batches, int ranks)
{
    if (micro_batches < ranks && DTRAIN__ATOMIC_EXCHANGE(dtrain__sampler_told(), 1, RELAXED) == 0)
        dtrain__log(
            DTRAIN_LOG_WARN,
            "sampler: a step has %d micro-batches for %d ranks, so some ranks have no examples; set micro_batches "
            "to %d or more",
            micro_batches, ranks, ranks);
}

DTRAIN_API int dtrain_sampler_share(const dtrain_sampler *sampler, uint64_t step, int rank, int ranks, int *first)
{
    size_t begin = 0, micro_batches = (size_t)sampler->desc.micro_batches;
    size_t share = dtrain__split(micro_batches, ranks, rank, &begin), stride = 1;
    uint64_t filled = dtrain__sampler_left(sampler, step % dtrain_sampler_steps(sampler));
    if (sampler->desc.strided && ranks > 0 && rank >= 0 && rank < ranks) {
        begin = (size_t)rank; /* the share is the same, because earlier ranks have one more here too */
        stride = (size_t)ranks;
    }
    dtrain__sampler_tell_idle(sampler->desc.micro_batches, ranks);
    if (first != NULL)
        *first = (int)begin;
    if (filled <= begin)
        return 0;
    uint64_t most = (filled - begin - 1) / stride + 1;
    return (int)(share < most ? share : most);
}

DTRAIN_API size_t dtrain_sampler_batch(const dtrain_sampler *sampler, uint64_t step, int micro_batch,
                                       uint64_t *examples)
{
    uint64_t steps = dtrain_sampler_steps(sampler), left = dtrain__sampler_left(sampler, step % steps);
    size_t begin, count = dtrain__split((size_t)left, sampler->desc.micro_batches, micro_batch, &begin);
    uint64_t first = step % steps * dtrain__sampler_per_step(sampler) + begin;
    for (size_t i = 0; examples != NULL && i < count; i++)
        examples[i] = dtrain__sampler_index(sampler, step / steps, first + i);
    return count;
}

#endif
