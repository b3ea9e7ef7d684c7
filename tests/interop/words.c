/* Ranks with words of 32 bits and of 64 in one group of a host, in shared memory. Run by cross.sh, one program of each
 * kind; prints what is wrong. All sums are of small whole numbers, which float32 holds exactly. */
#include "dtrain.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AT = 50000, COUNT = 100003 };
static int wrong;

static void expect(int good, const char *what)
{
    if (good)
        return;
    wrong = 1;
    printf("FAIL with %d bits: %s: %s\n", (int)(8 * sizeof(void *)), what, dtrain_last_error());
}

static int all_are(const float *x, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        if (x[i] != value)
            return 0;
    return 1;
}

static void fill(float *x, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        x[i] = value;
}

/* Collectives of `count` elements on memory that starts at x, each with the answer by hand. */
static void collectives(dtrain_comm *world, float *x, size_t count, const char *where)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    float all = (float)(ranks * (ranks + 1) / 2);
    size_t lo, mine = dtrain_shard(world, count, rank, &lo);
    fill(x, count, (float)(rank + 1));
    expect(dtrain_all_reduce(world, x, x, count, DTRAIN_F32, DTRAIN_SUM) == DTRAIN_OK && all_are(x, count, all), where);
    fill(x, count, (float)(rank + 1));
    expect(dtrain_reduce_scatter(world, x, x + lo, count, DTRAIN_F32, DTRAIN_SUM) == DTRAIN_OK &&
               all_are(x + lo, mine, all),
           where);
    expect(dtrain_all_gather(world, x + lo, x, count, DTRAIN_F32) == DTRAIN_OK && all_are(x, count, all), where);
    fill(x, count, (float)rank);
    expect(dtrain_broadcast(world, x, count, DTRAIN_F32, ranks - 1) == DTRAIN_OK &&
               all_are(x, count, (float)(ranks - 1)),
           where);
}

/* Each rank sends r + 1 elements to rank r, and each holds its sender's number. */
static void uneven(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), good = 1;
    size_t counts[8], given[8], from[8], at = 0, back = 0;
    float out[64], in[64];
    for (int r = 0; r < ranks; r++) {
        counts[r] = (size_t)r + 1;
        given[r] = at;
        at += counts[r];
    }
    fill(out, at, (float)rank);
    size_t each[8];
    for (int r = 0; r < ranks; r++) {
        each[r] = (size_t)rank + 1;
        from[r] = back;
        back += each[r];
    }
    expect(dtrain_all_to_all_v(world, out, counts, given, in, each, from, DTRAIN_F32) == DTRAIN_OK, "all_to_all_v");
    for (int r = 0; r < ranks; r++)
        good = good && all_are(in + from[r], each[r], (float)r);
    expect(good, "the values of all_to_all_v");
}

/* A weight of 1 everywhere and gradients that are the rank's number: after steps at rate 1/4 all have 1 - steps/4 times
 * their mean. */
static void trains(dtrain_comm *world)
{
    int ranks = dtrain_comm_size(world), rank = dtrain_comm_rank(world), steps = 3;
    static float weights[1031];
    dtrain_param table[1];
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    dtrain_status status;
    memset(table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    fill(weights, 1031, 1.0f);
    table[0].name = "w";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = 1031;
    table[0].data = weights;
    desc.optimizer.kind = DTRAIN_SGD;
    status = dtrain_fsdp_create(&fsdp, world, table, 1, &desc);
    for (int step = 0; step < steps && status == DTRAIN_OK; step++) {
        status = dtrain_fsdp_gather(fsdp, 0);
        if (status == DTRAIN_OK) {
            fill(dtrain_fsdp_grad(fsdp, "w"), 1031, (float)(rank * 2));
            status = dtrain_fsdp_reduce(fsdp, 0);
        }
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_step(fsdp, 0.25f);
    }
    if (status == DTRAIN_OK)
        status = dtrain_fsdp_get(fsdp, "w", weights, -1);
    expect(status == DTRAIN_OK && all_are(weights, 1031, 1.0f - 0.25f * (float)(steps * (ranks - 1))), "fsdp");
    dtrain_fsdp_destroy(fsdp);
}

int main(void)
{
    dtrain_comm *world;
    void *block, *more;
    DTRAIN_CHECK(dtrain_comm_create(&world, NULL));
    int rank = dtrain_comm_rank(world);
    float *plain = (float *)malloc(COUNT * sizeof(float));
    expect(plain != NULL, "malloc");
    expect(dtrain_comm_alloc(world, (AT + COUNT) * sizeof(float), &block) == DTRAIN_OK, "comm_alloc");
    for (size_t count = 1; !wrong && count < COUNT; count = count * 7 + 3) {
        collectives(world, (float *)block, count, "at the start of shared memory");
        collectives(world, (float *)block + AT, count, "inside of shared memory");
        collectives(world, plain, count, "in other memory");
    }
    if (!wrong)
        uneven(world);
    if (!wrong)
        trains(world);
    /* 5 GiB of rank 0 are beyond a size of 32 bits. So all ranks get memory of their own. */
    size_t bytes = rank == 0 && SIZE_MAX > UINT32_MAX ? (size_t)(UINT64_C(5) << 30) : 4000;
    if (!wrong) {
        expect(dtrain_comm_alloc(world, bytes, &more) == DTRAIN_OK, "comm_alloc of 5 GiB on rank 0");
        if (!wrong)
            collectives(world, (float *)more, 1000, "in memory beyond 32 bits");
        dtrain_comm_free(more);
    }
    dtrain_comm_free(block);
    free(plain);
    dtrain_comm_destroy(world);
    return wrong;
}
