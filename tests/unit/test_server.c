/* The synchronous parameter server: bit for bit an all-reduce, on threads and on processes, of which some are killed.
 * Pieces are short, so that small models have many. */
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "server_model.h"

const size_t hook_server_piece = 1000;

/* Numbers of many magnitudes, which no other order adds to the same bits. */
static float gradient(int rank, size_t i, int step)
{
    uint64_t seed = (uint64_t)rank * 1000 + (uint64_t)step;
    float scales[4] = {1e-6f, 0.01f, 1.0f, 1e6f};
    return dtrain_random_normal(seed, i) * scales[dtrain_random_u64(seed + 77, i) % 4];
}

static void model_fill(model *m, int rank, int step)
{
    for (size_t i = 0; i < ALL; i++)
        m->grad[i] = gradient(rank, i, step);
}

/* ---- synchronous ---- */

static void equals_an_all_reduce(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    model *m = (model *)malloc(sizeof *m), *plain = (model *)malloc(sizeof *plain);
    dtrain_server *server;
    dtrain_aggregator other = dtrain_aggregator_all_reduce(world);
    model_open(m, rank);
    model_open(plain, plan.server);
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &plan), DTRAIN_OK);
    CHECK(memcmp(m->data, plain->data, sizeof m->data) == 0); /* the server's parameters, frozen ones too */
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int step = 0; step < 3; step++) {
        double total = -1, expected = -2, weight = step == 2 ? 0.0 : rank == 1 ? 0.0 : 0.7 * rank + 1.3;
        model_fill(m, rank, step);
        model_fill(plain, rank, step);
        CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, weight, &total), DTRAIN_OK);
        CHECK_EQ(other.aggregate(other.self, plain->table, PARAMS, weight, &expected), DTRAIN_OK);
        CHECK(total == expected);
        CHECK(memcmp(m->grad, plain->grad, sizeof m->grad) == 0);
    }
    dtrain_server_stats stats = dtrain_server_get_stats(server);
    CHECK_EQ(stats.steps, 3);
    /* 12 pieces of up to 1,000 of the 11,056 elements, each with its weight */
    CHECK_EQ(stats.sent_bytes, 3 * (rank == plan.server ? (size_t)ranks - 1 : 1) * (4 * TRAINED + 8 * 12));
    CHECK_EQ(stats.received_bytes, stats.sent_bytes);
    dtrain_compressed_stats counters = dtrain_aggregator_get_stats(&aggregator);
    CHECK_EQ(counters.steps, 3);
    CHECK_EQ(counters.sent_bytes, stats.sent_bytes);
    CHECK_EQ(counters.dense_bytes, stats.sent_bytes);
    CHECK_EQ(dtrain_aggregator_get_stats(&other).steps, 0);
    CHECK_EQ(stats.workers, rank == plan.server ? ranks - 1 : 0);
    dtrain_aggregator_destroy(&aggregator);
    dtrain_server_destroy(server);
    free(m);
    free(plain);
}

TEST(synchronous_is_an_all_reduce_bit_for_bit_on_1_to_8_threads)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        for (int server = 0; server<ranks; server += ranks> 4 ? 3 : 1) {
            plan_begin(server);
            on_threads(ranks, equals_an_all_reduce, NULL);
        }
}

TEST(synchronous_is_an_all_reduce_bit_for_bit_on_processes_and_without_a_service_thread)
{
    dtrain_comm_desc poll;
    memset(&poll, 0, sizeof poll);
    poll.progress = DTRAIN_PROGRESS_POLL;
    for (int server = 0; server < 3; server++) {
        plan_begin(server);
        on_processes(3, equals_an_all_reduce, NULL);
        on_processes(3, equals_an_all_reduce, &poll);
        on_threads(3, equals_an_all_reduce, &poll);
    }
}

/* Against a mean in float64. */
static void is_the_mean(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    model *m = (model *)malloc(sizeof *m);
    dtrain_server *server;
    double total = 0;
    model_open(m, rank);
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (size_t i = 0; i < ALL; i++)
        m->grad[i] = value(rank, i);
    CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, rank + 1.0, &total), DTRAIN_OK);
    CHECK(total == ranks * (ranks + 1) / 2);
    for (size_t i = 0; i < ALL; i++) {
        double sum = 0;
        for (int r = 0; r < ranks; r++)
            sum += value(r, i);
        int frozen = i >= ODD && i < ODD + FROZEN;
        double error = (double)m->grad[i] - (frozen ? value(rank, i) : sum / total);
        if (error > 1e-4 || error < -1e-4) {
            TEST_FAIL("element %zu on rank %d is off by %g", i, rank, error);
            break;
        }
    }
    dtrain_server_destroy(server);
    free(m);
}

TEST(the_mean_of_3_4_and_5_ranks_is_that_of_float64)
{
    plan_begin(1);
    for (int ranks = 3; ranks <= 5; ranks++)
        on_threads(ranks, is_the_mean, NULL);
}

/* All ranks get the same bits, and what came out and what was kept are what went in. */
static void compressed(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    model *m = (model *)malloc(sizeof *m);
    double *in = (double *)calloc(ALL, sizeof *in), *out = (double *)calloc(ALL, sizeof *out), total = 0;
    dtrain_server *server;
    model_open(m, rank);
    m->table[0].dense = 1;
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int step = 0; step < 5; step++) {
        for (size_t i = 0; i < ALL; i++) {
            m->grad[i] = dtrain_random_normal((uint64_t)(rank + 100 * step), i);
            in[i] += (double)m->grad[i];
        }
        CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, 2.0, &total), DTRAIN_OK);
        CHECK(total == 2.0 * ranks);
        float *frozen = m->grad + ODD;
        memset(frozen, 0, FROZEN * sizeof(float));
        CHECK_EQ(dtrain_comm_check_equal(world, m->grad, ALL, DTRAIN_F32), DTRAIN_OK);
        for (size_t i = 0; i < ALL; i++)
            out[i] += rank == 0 ? (double)m->grad[i] * total : 0.0;
    }
    dtrain_aggregator mine = dtrain_aggregator_server(server);
    const dtrain_piece *piece = piece_at(dtrain_aggregator_pieces(&mine), 0);
    const float *residual = (const float *)piece->data;
    CHECK(strcmp(piece->name, "residual") == 0);
    CHECK_EQ(piece->count, TRAINED);
    size_t dense = dtrain_param_elements(&m->table[0]);
    CHECK(dense >= plan_compress.least_count);
    for (size_t i = 0; i < dense; i++)
        CHECK(residual[i] == 0.0f); /* nothing was lost of what is dense */
    for (size_t i = 0, k = 0; i < ALL; i++)
        if (i < ODD || i >= ODD + FROZEN)
            out[i] += (double)residual[k++];
    CHECK_EQ(dtrain_all_reduce(world, in, in, ALL, DTRAIN_F64, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, out, out, ALL, DTRAIN_F64, DTRAIN_SUM), DTRAIN_OK);
    for (size_t i = 0; i < ALL; i++) {
        double error = in[i] - out[i];
        if ((i < ODD || i >= ODD + FROZEN) && (error > 1e-4 || error < -1e-4)) {
            TEST_FAIL("element %zu: %g went in, %g came out or was kept", i, in[i], out[i]);
            break;
        }
    }
    dtrain_server_stats stats = dtrain_server_get_stats(server);
    size_t peers = rank == plan.server ? (size_t)ranks - 1 : 1;
    CHECK(stats.sent_bytes < 5 * peers * (4 * dense + 4 * (TRAINED - dense) * 3 / 10));
    dtrain_compressed_stats counters = dtrain_aggregator_get_stats(&aggregator);
    CHECK_EQ(counters.sent_bytes, stats.sent_bytes);
    CHECK(counters.dense_bytes >= 5 * peers * 4 * TRAINED && counters.dense_bytes < 5 * peers * (4 * TRAINED + 200));
    dtrain_server_destroy(server);
    free(in);
    free(out);
    free(m);
}

TEST(compressed_nothing_is_lost_and_all_ranks_get_the_same_bits)
{
    plan_begin(1);
    plan_compress.kind = DTRAIN_COMPRESS_INT8;
    plan_compress.least_count = 10;
    plan.compress = &plan_compress;
    for (int ranks = 2; ranks <= 5; ranks++)
        on_threads(ranks, compressed, NULL);
    plan_compress.kind = DTRAIN_COMPRESS_FP8;
    on_processes(3, compressed, NULL);
    plan_compress.kind = DTRAIN_COMPRESS_TOPK;
    plan_compress.topk.schedule.ratio = 0.1;
    on_processes(3, compressed, NULL);
    plan_compress.topk.values = DTRAIN_BF16;
    on_threads(4, compressed, NULL);
}

static dtrain_status create_compressed(dtrain_comm *world, const dtrain_compress_desc *compress)
{
    model *m = (model *)malloc(sizeof *m);
    dtrain_server *server = NULL;
    dtrain_server_desc desc = plan;
    model_open(m, dtrain_comm_rank(world));
    desc.compress = compress;
    dtrain_status status = dtrain_server_create(&server, world, m->table, PARAMS, &desc);
    dtrain_server_destroy(server);
    free(m);
    return status;
}

static void compares_what_it_reads(dtrain_comm *world)
{
    int last = dtrain_comm_rank(world) == 2;
    dtrain_compress_desc compress;
    memset(&compress, 0, sizeof compress);
    if (last) {
        compress.kind = DTRAIN_COMPRESS_TOPK;
        compress.topk.schedule.ratio = 0.01;
        compress.topk.values = DTRAIN_F32;
        compress.least_count = 1024;
        compress.block = 7; /* not read */
    }
    CHECK_EQ(create_compressed(world, &compress), DTRAIN_OK);
    compress.topk.schedule.ratio = last ? 0.02 : 0.01;
    CHECK_EQ(create_compressed(world, &compress), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "desc.compress.topk.schedule.ratio 0.01 on ranks 0, 1, but 0.02 on rank 2; ");
    compress.kind = DTRAIN_COMPRESS_INT8; /* which reads no ratio */
    compress.block = last ? 256 : 0;
    CHECK_EQ(create_compressed(world, &compress), DTRAIN_OK);
    compress.block = last ? 128 : 0;
    CHECK_EQ(create_compressed(world, &compress), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "desc.compress.block 256 on ranks 0, 1, but 128 on rank 2; ");
    dtrain_compressor own = dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, last ? 64 : 32);
    compress.kind = DTRAIN_COMPRESS_OWN;
    compress.own = &own;
    CHECK_EQ(create_compressed(world, &compress), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "desc.compress.block 32 on ranks 0, 1, but 64 on rank 2; ");
}

TEST(what_compression_reads_is_the_same_on_all_ranks_written_out_or_not)
{
    plan_begin(1);
    on_threads(3, compares_what_it_reads, NULL);
}

static void refuses_another_table(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = (model *)malloc(sizeof *m);
    dtrain_server *server = NULL;
    dtrain_server_desc desc = plan;
    model_open(m, rank);
    m->table[5].shape[0] -= rank == 2;
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &desc), DTRAIN_ERR_MISMATCH);
    CHECK(server == NULL);
    CHECK_CONTAINS(dtrain_last_error(), "dtrain_server_create: parameter 5 ");
    model_open(m, rank);
    desc.staleness += rank == 1;
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &desc), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "desc.staleness ");
    desc = plan;
    m->table[0].name = rank == 1 ? "one" : "odd"; /* a name twice, on one rank */
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &desc),
             rank == 1 ? DTRAIN_ERR_INVALID : DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), rank == 1 ? "one" : "rank 1 of 3 could not make its part: two parameters");
    desc.server = 3;
    model_open(m, rank);
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the server is rank 3, expected 0 to 2");
    desc.server = 0;
    dtrain_compress_desc powersgd;
    memset(&powersgd, 0, sizeof powersgd);
    powersgd.kind = DTRAIN_COMPRESS_POWERSGD;
    desc.compress = &powersgd;
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "does not pack");
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, NULL), DTRAIN_OK); /* the group is whole */
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    double total;
    m->table[5].frozen = 1;
    CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, 1.0, &total), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "parameter large has 0 trained elements, the aggregator was made for 8651");
    CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, -1.0, &total), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_server_push(server, 1.0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the server is synchronous");
    dtrain_server_destroy(server);
    free(m);
}

TEST(another_table_or_desc_is_refused_on_all_ranks)
{
    plan_begin(0);
    on_threads(3, refuses_another_table, NULL);
    plan_begin(2);
    plan.async = 1;
    plan.server = 0;
    on_processes(3, refuses_another_table, NULL);
}

static size_t peaks[2];

static void allocates_nothing_warm(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = (model *)malloc(sizeof *m);
    dtrain_server *server;
    double total;
    model_open(m, rank);
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int step = 0; step < 20; step++) {
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (rank == 0 && (step == 10 || step == 19))
            peaks[step == 19] = dtrain_comm_allocator(world)->peak_bytes;
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, 1.0, &total), DTRAIN_OK);
    }
    dtrain_server_destroy(server);
    free(m);
}

TEST(a_warm_step_allocates_nothing_and_all_memory_is_given_back)
{
    dtrain_allocator allocator = {NULL, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    plan_begin(0);
    on_threads(3, allocates_nothing_warm, &desc);
    CHECK_EQ(peaks[0], peaks[1]);
    CHECK_EQ(allocator.bytes, 0);
}

static void *no_more(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    int *left = (int *)user;
    if (new_bytes > old_bytes && --*left < 0)
        return NULL;
    return dtrain__memory_resize(pointer, old_bytes, new_bytes, align);
}

TEST(out_of_memory_is_a_status)
{
    static model m;
    int failed = 0;
    model_open(&m, 0);
    plan_begin(0);
    for (int allowed = 0; allowed < 100; allowed++) {
        int left = 1000000;
        dtrain_allocator allocator = {no_more, &left, 0, 0};
        dtrain_comm_desc desc;
        dtrain_comm *world;
        dtrain_server *server;
        memset(&desc, 0, sizeof desc);
        desc.allocator = &allocator;
        CHECK_EQ(dtrain_threads_create(&world, 1, &desc), DTRAIN_OK);
        left = allowed;
        dtrain_status status = dtrain_server_create(&server, world, m.table, PARAMS, &plan);
        CHECK(status == DTRAIN_OK || (status == DTRAIN_ERR_MEMORY && server == NULL));
        failed += status != DTRAIN_OK;
        dtrain_server_destroy(server);
        dtrain_comm_destroy(world);
        CHECK_EQ(allocator.bytes, 0);
        if (status == DTRAIN_OK)
            break;
    }
    CHECK(failed >= 8 && failed < 100);
}

/* ---- synchronous, and ranks die ---- */

enum { STEPS = 12 };

/* The sum of the ranks in the set, by the tree over those, and its mean. */
static int is_mean_of(const model *m, int step, const int *set, int n)
{
    float *rows[8], *sum = (float *)malloc(ALL * sizeof(float));
    const void *in[8];
    void *out[1];
    int good = 1;
    for (int k = 0; k < n; k++) {
        in[k] = rows[k] = (float *)malloc(ALL * sizeof(float));
        for (size_t i = 0; i < ALL; i++)
            rows[k][i] = gradient(set[k], i, step);
    }
    out[0] = sum;
    dtrain__fold(DTRAIN_F32, DTRAIN_SUM, 1.0, in, n, out, 1, 0, ALL);
    double total = 0;
    for (int k = 0; k < n; k++)
        total += set[k] + 1.0;
    for (size_t i = 0; i < ALL; i++)
        if ((i < ODD || i >= ODD + FROZEN) && m->grad[i] != sum[i] / (float)total)
            good = 0;
    for (int k = 0; k < n; k++)
        free(rows[k]);
    free(sum);
    return good;
}

static int trains_on(dtrain_comm *world, scene *s)
{
    static const int all[4] = {0, 1, 2, 3};
    int rank = dtrain_comm_rank(world), survivors[3], n = 0;
    static model m;
    dtrain_server *server;
    (void)s;
    dtrain_set_log(quiet, NULL);
    for (int r = 0; r < 4; r++)
        if (r != victim)
            survivors[n++] = r;
    model_open(&m, rank);
    CHECK_EQ(dtrain_server_create(&server, world, m.table, PARAMS, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int step = 0; step < STEPS; step++) {
        double total = 0;
        model_fill(&m, rank, step);
        if (step == FATAL && rank == victim)
            raise(SIGKILL);
        CHECK_EQ(aggregator.aggregate(aggregator.self, m.table, PARAMS, rank + 1.0, &total), DTRAIN_OK);
        CHECK(total == (step < FATAL ? 10.0 : 9.0 - victim));
        CHECK(is_mean_of(&m, step, step < FATAL ? all : survivors, step < FATAL ? 4 : 3));
    }
    dtrain_server_stats stats = dtrain_server_get_stats(server);
    CHECK_EQ(stats.lost, rank == plan.server);
    CHECK_EQ(stats.workers, rank == plan.server ? 2 : 0);
    dtrain_server_destroy(server);
    return 0;
}

TEST(a_killed_worker_leaves_the_others_with_the_mean_of_theirs)
{
    pid_t pids[4];
    for (int server = 0; server < 2; server++) {
        scene s;
        scene_begin(&s, 4, server);
        plan_begin(server);
        victim = server == 0 ? 2 : 0; /* rank 0 of the world may die where it is not the server */
        for (int rank = 0; rank < 4; rank++)
            pids[rank] = start_rank(&s, rank, trains_on);
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == victim ? 128 + SIGKILL : 0);
    }
}

/* Killed from outside, at any moment: every piece is the mean of all four or of the three others. */
static int trains_while_one_is_killed(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    static model m;
    dtrain_server *server;
    int fewer = 0, told = 0;
    (void)s;
    dtrain_set_log(quiet, NULL);
    model_open(&m, rank);
    CHECK_EQ(dtrain_server_create(&server, world, m.table, PARAMS, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int after = 0; after < 10;) {
        double total = 0;
        for (size_t i = 0; i < ALL; i++)
            m.grad[i] = rank == victim ? 8.0f : 1.0f;
        dtrain_status status = aggregator.aggregate(aggregator.self, m.table, PARAMS, 1.0, &total);
        CHECK_EQ(status, DTRAIN_OK);
        if (status != DTRAIN_OK)
            return 1;
        for (size_t i = 0; i < ALL; i++) {
            int frozen = i >= ODD && i < ODD + FROZEN;
            fewer |= !frozen && m.grad[i] == 1.0f;
            CHECK(frozen || m.grad[i] == (fewer ? 1.0f : 11.0f / 4.0f));
        }
        CHECK(total == (fewer ? 3.0 : 4.0));
        after += fewer;
        if (rank == victim && !told)
            say_underway();
        told = 1;
    }
    dtrain_server_destroy(server);
    return 0;
}

TEST(a_worker_killed_at_any_moment_leaves_the_others_training)
{
    unsigned seed = (unsigned)time(NULL);
    printf("seed %u\n", seed);
    srand(seed);
    plan_begin(0);
    victim = 3;
    for (int round = 0; round < 6; round++)
        kill_one(trains_while_one_is_killed, round % 2);
}

static int loses_its_server(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    static model m;
    dtrain_server *server;
    dtrain_status status = DTRAIN_OK;
    char text[64];
    (void)s;
    dtrain_set_log(quiet, NULL);
    snprintf(text, sizeof text, "with rank %d, the parameter server", plan.server);
    model_open(&m, rank);
    CHECK_EQ(dtrain_server_create(&server, world, m.table, PARAMS, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    for (int step = 0; status == DTRAIN_OK && step < 100000; step++) {
        double total;
        if (step == FATAL && rank == plan.server)
            raise(SIGKILL);
        if (plan.async && rank == plan.server) {
            usleep(300000);
            raise(SIGKILL);
        }
        status = aggregator.aggregate(aggregator.self, m.table, PARAMS, 1.0, &total);
    }
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), text);
    CHECK_CONTAINS(dtrain_last_error(), "is lost");
    double total;
    CHECK_EQ(aggregator.aggregate(aggregator.self, m.table, PARAMS, 1.0, &total), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), text);
    dtrain_server_destroy(server);
    return 0;
}

TEST(a_killed_server_is_named_by_all_workers)
{
    for (int async = 0; async < 2; async++) {
        pid_t pids[4];
        scene s;
        scene_begin(&s, 4, 1);
        plan_begin(1);
        plan.async = async;
        for (int rank = 0; rank < 4; rank++)
            pids[rank] = start_rank(&s, rank, loses_its_server);
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(end_of(pids[rank], 18), rank == plan.server ? 128 + SIGKILL : 0); /* well within the deadline */
    }
}

/* A rank that computes for longer than the deadline: the server names it, and tells the others. */
static void names_the_absent(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = (model *)malloc(sizeof *m);
    dtrain_server *server;
    double total;
    model_open(m, rank);
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    if (rank == 0) {
        CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, 1.0, &total), DTRAIN_ERR_TIMEOUT);
        CHECK_CONTAINS(dtrain_last_error(), "the parameter server, with rank 2");
        CHECK_EQ(aggregator.aggregate(aggregator.self, m->table, PARAMS, 1.0, &total), DTRAIN_ERR_TIMEOUT);
    } else if (rank == 2) {
        await(2);
    } else {
        dtrain_status status = aggregator.aggregate(aggregator.self, m->table, PARAMS, 1.0, &total);
        CHECK(status == DTRAIN_ERR_TIMEOUT || status == DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "with rank 0, the parameter server");
    }
    meet();
    await(3);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK); /* the group itself is whole */
    dtrain_server_destroy(server);
    free(m);
}

TEST(a_worker_that_does_not_come_is_named_at_the_deadline)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 2000;
    dtrain_set_log(quiet, NULL);
    plan_begin(0);
    met = 0;
    on_threads(3, names_the_absent, &desc);
    dtrain_set_log(dtrain__log_stderr, NULL);
}
