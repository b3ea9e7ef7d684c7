/* ---- >>test_aggregator_compressed ----
 * Aggregators that compress a table's gradients beside plain ones, and DDP beside them. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "worlds.h"

static float gradient(int rank, size_t i, int step)
{
    uint64_t index = (uint64_t)i + (uint64_t)step * 100000;
    float own = dtrain_random_normal((uint64_t)rank + 1, index), common = dtrain_random_normal(99, index);
    return own * own * own + common;
}

enum { SMALL = 10, MATRIX = 40 * 30, FROZEN = 8, ALL = SMALL + MATRIX + FROZEN };

typedef struct model {
    float data[ALL], grad[ALL];
    dtrain_param table[3];
} model;

static void model_open(model *m, int rank)
{
    const char *const names[] = {"bias", "matrix", "frozen"};
    const size_t begins[] = {0, SMALL, SMALL + MATRIX};
    memset(m, 0, sizeof *m);
    for (int i = 0; i < 3; i++) {
        m->table[i].name = names[i];
        m->table[i].dtype = DTRAIN_F32;
        m->table[i].unit = i;
        m->table[i].data = m->data + begins[i];
        m->table[i].grad = m->grad + begins[i];
    }
    m->table[0].shape[0] = SMALL;
    m->table[1].shape[0] = 40;
    m->table[1].shape[1] = 30;
    m->table[2].shape[0] = FROZEN;
    m->table[2].frozen = 1;
    for (int i = 0; i < ALL; i++)
        m->data[i] = (float)(i * (rank + 1));
}

static dtrain_compress_desc compress_plan;

/* Everything is selected: what comes out is what a plain all-reduce gives. */
static void aggregates_as_plain(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = (model *)malloc(sizeof *m), *plain = (model *)malloc(sizeof *plain);
    dtrain_aggregator aggregator, other = dtrain_aggregator_all_reduce(world);
    model_open(m, rank);
    model_open(plain, rank);
    CHECK_EQ(dtrain_aggregator_compressed(&aggregator, world, m->table, 3, &compress_plan), DTRAIN_OK);
    CHECK_EQ(pieces_named(dtrain_aggregator_pieces(&aggregator), "residual"), 1); /* all in one */
    CHECK(piece_at(dtrain_aggregator_pieces(&other), 0) == NULL);
    for (int step = 0; step < 2; step++) {
        double total = 0, expected = 0;
        for (int i = 0; i < ALL; i++)
            m->grad[i] = plain->grad[i] = gradient(rank, (size_t)i, step);
        CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, 3, rank + 1.0, &total), DTRAIN_OK);
        CHECK_EQ(other.aggregate(other.self, plain->table, 3, rank + 1.0, &expected), DTRAIN_OK);
        CHECK(total == expected);
        CHECK(memcmp(m->grad, plain->grad, sizeof m->grad) == 0);
    }
    dtrain_compressed_stats stats = dtrain_aggregator_get_stats(&aggregator);
    CHECK_EQ(stats.steps, 2);
    CHECK_EQ(stats.dense_bytes, 2 * (8 * (SMALL + MATRIX) / 3 * 2));
    double total;
    CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, 2, 1.0, &total), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the aggregator was made for 3 parameters");
    dtrain_aggregator_destroy(&aggregator);
    dtrain_compress_desc unknown = compress_plan;
    unknown.kind = (dtrain_compression)900;
    CHECK_EQ(dtrain_aggregator_compressed(&aggregator, world, m->table, 3, &unknown), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "kind 900 without own");
    free(m);
    free(plain);
}

TEST(an_aggregator_that_selects_all_is_a_plain_one)
{
    memset(&compress_plan, 0, sizeof compress_plan);
    compress_plan.topk.schedule.ratio = 1.0;
    compress_plan.topk.exchange = DTRAIN_EXCHANGE_SPLIT;
    on_threads(3, aggregates_as_plain, NULL);
}

/* DDP with two, no and one micro-batches beside the aggregator over sums made by hand. */
static void ddp_sends_what_the_aggregator_does(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), micros = rank == 0 ? 2 : rank == 1 ? 0 : 1;
    model *m = (model *)malloc(sizeof *m), *sums = (model *)malloc(sizeof *sums);
    dtrain_aggregator aggregator;
    dtrain_ddp_desc desc;
    dtrain_ddp *ddp = NULL;
    const dtrain_bucket *buckets;
    uint64_t sent = 0, dense = 0;
    memset(&desc, 0, sizeof desc);
    desc.compress = &compress_plan;
    model_open(m, rank);
    model_open(sums, rank);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, m->table, 3, &desc), DTRAIN_OK);
    CHECK(m->data[5] == 5.0f && m->data[ALL - 1] == (float)(ALL - 1)); /* rank 0's */
    CHECK_EQ(dtrain_aggregator_compressed(&aggregator, world, sums->table, 3, &compress_plan), DTRAIN_OK);
    for (int step = 0; step < 3; step++) {
        double total = 0, expected = 0;
        CHECK_EQ(dtrain_ddp_begin(ddp, micros, micros * 1.5), DTRAIN_OK);
        memset(sums->grad, 0, sizeof sums->grad);
        for (int micro = 0; micro < micros; micro++)
            for (int unit = 1; unit >= 0; unit--) {
                for (int i = unit == 0 ? 0 : SMALL; i < (unit == 0 ? SMALL : SMALL + MATRIX); i++) {
                    m->grad[i] += gradient(rank * 10 + micro, (size_t)i, step);
                    sums->grad[i] += gradient(rank * 10 + micro, (size_t)i, step);
                }
                CHECK_EQ(dtrain_ddp_reduce(ddp, unit), DTRAIN_OK);
            }
        CHECK_EQ(dtrain_ddp_finish(ddp, &total), DTRAIN_OK);
        for (size_t i = dtrain_ddp_buckets(ddp, &buckets); i-- > 0;) {
            sent += buckets[i].sent_bytes;
            dense += buckets[i].dense_bytes;
        }
        CHECK_EQ(aggregator.aggregate(aggregator.self, sums->table, 3, micros * 1.5, &expected), DTRAIN_OK);
        CHECK(total == 4.5 && expected == 4.5);
        CHECK(memcmp(m->grad, sums->grad, (SMALL + MATRIX) * sizeof(float)) == 0);
        CHECK_EQ(dtrain_comm_check_equal(world, m->grad, SMALL + MATRIX, DTRAIN_F32), DTRAIN_OK);
    }
    dtrain_compressed_stats stats = dtrain_aggregator_get_stats(&aggregator);
    CHECK_EQ(stats.steps, 3);
    CHECK(stats.sent_bytes > 0 && stats.sent_bytes < stats.dense_bytes / 2);
    CHECK(sent == stats.sent_bytes && dense == stats.dense_bytes);
    CHECK_EQ(pieces_named(dtrain_ddp_pieces(ddp), "residual"), 1);
    dtrain_pieces nothing = dtrain_ddp_pieces(NULL);
    CHECK_EQ(dtrain_pieces_each(&nothing, 1, 1, 0, piece_find, NULL), DTRAIN_ERR_INVALID);
    dtrain_aggregator_destroy(&aggregator);
    dtrain_ddp_destroy(ddp);
    free(m);
    free(sums);
}

TEST(ddp_compresses_its_sums)
{
    const dtrain_compression kinds[] = {DTRAIN_COMPRESS_DEFAULT, DTRAIN_COMPRESS_INT8, DTRAIN_COMPRESS_POWERSGD};
    for (int k = 0; k < 3; k++) {
        memset(&compress_plan, 0, sizeof compress_plan);
        compress_plan.kind = kinds[k];
        on_threads(3, ddp_sends_what_the_aggregator_does, NULL);
    }
    on_processes(3, ddp_sends_what_the_aggregator_does, NULL);
}
