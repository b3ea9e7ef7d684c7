/* The asynchronous parameter server: within its bound whatever workers do, slow, stopped or killed, and it learns. */
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "server_model.h"

const size_t hook_server_piece = 1000;

/* ---- the bound ---- */

enum { WORKERS = 4, CLOCKS = 16 };

/* Parameters that count: [0] falls by one with each update, [1 + w] with each of worker w's. */
typedef struct clocks {
    dtrain_param table;
    float data[CLOCKS], grad[CLOCKS];
} clocks;

static void clocks_open(clocks *c)
{
    memset(c, 0, sizeof *c);
    c->table.name = "clocks";
    c->table.dtype = DTRAIN_F32;
    c->table.shape[0] = CLOCKS;
    c->table.data = c->data;
    c->table.grad = c->grad;
}

static int64_t clock_of(const clocks *c, int worker)
{
    return -(int64_t)c->data[1 + worker];
}

/* What the test itself counts of what worker and server saw, beside the library's numbers. */
static struct {
    int64_t pulled_at[16]; /* updates that worker w's parameters held */
    int64_t updates, largest_age, largest_staleness, age_sum;
    int from[16];
} seen;

static dtrain_status count_update(void *user, int worker, const dtrain_server_stats *stats)
{
    const clocks *c = (const clocks *)user;
    int64_t age = seen.updates - __atomic_load_n(&seen.pulled_at[worker], __ATOMIC_SEQ_CST);
    CHECK_EQ(-(int64_t)c->data[0], seen.updates + 1);
    CHECK_EQ(stats->updates, seen.updates + 1);
    seen.updates++;
    seen.from[worker]++;
    seen.age_sum += age;
    seen.largest_age = age > seen.largest_age ? age : seen.largest_age;
    return DTRAIN_OK;
}

static dtrain_status serve(dtrain_server *server, clocks *c)
{
    dtrain_serve_desc desc;
    dtrain_optimizer_desc sgd;
    memset(&desc, 0, sizeof desc);
    memset(&sgd, 0, sizeof sgd);
    sgd.kind = DTRAIN_SGD;
    desc.schedule.lr = 1.0f;
    desc.on_update = count_update;
    desc.user = c;
    CHECK_EQ(dtrain_optimizer_create(&desc.optimizer, &c->table, 1, &sgd, NULL), DTRAIN_OK);
    dtrain_status status = dtrain_server_run(server, &desc);
    dtrain_optimizer_destroy(desc.optimizer);
    return status;
}

/* One step of a worker that has its parameters: the gradient counts. Checks the bound from the parameters alone. */
static dtrain_status tick(dtrain_server *server, clocks *c, int rank, int64_t step)
{
    memset(c->grad, 0, sizeof c->grad);
    c->grad[0] = c->grad[1 + rank] = 2.0f;
    CHECK_EQ(clock_of(c, rank), step);
    __atomic_store_n(&seen.pulled_at[rank], -(int64_t)c->data[0], __ATOMIC_SEQ_CST);
    for (int w = 0; w <= WORKERS; w++) {
        int64_t behind = step - clock_of(c, w), most = __atomic_load_n(&seen.largest_staleness, __ATOMIC_SEQ_CST);
        if (w == plan.server || w == rank)
            continue;
        while (behind > most && !__atomic_compare_exchange_n(&seen.largest_staleness, &most, behind, 0,
                                                             __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
    }
    dtrain_status status = dtrain_server_push(server, 2.0);
    memset(c->grad, 0x7f, sizeof c->grad); /* it has been copied */
    return status;
}

static void random_delays(dtrain_comm *world)
{
    enum { TICKS = 60 };
    int rank = dtrain_comm_rank(world), bound = plan.staleness < 0 ? 0 : plan.staleness;
    clocks c;
    dtrain_server *server;
    clocks_open(&c);
    CHECK_EQ(dtrain_server_create(&server, world, &c.table, 1, &plan), DTRAIN_OK);
    if (rank == plan.server) {
        CHECK_EQ(serve(server, &c), DTRAIN_OK);
        dtrain_server_stats stats = dtrain_server_get_stats(server);
        uint64_t binned = 0;
        for (int i = 0; i < DTRAIN_STALENESS_BINS; i++) {
            binned += stats.staleness_counts[i];
            CHECK(stats.staleness_counts[i] == 0 || i <= bound);
        }
        CHECK_EQ(stats.updates, TICKS * WORKERS);
        CHECK_EQ(binned, stats.updates);
        CHECK_EQ(stats.left, WORKERS);
        CHECK_EQ(stats.lost, 0);
        CHECK(stats.largest_staleness <= (uint64_t)bound);
        CHECK_EQ(stats.largest_staleness, seen.largest_staleness);
        CHECK_EQ(stats.largest_age, seen.largest_age);
        CHECK_EQ(stats.age_sum, seen.age_sum);
        CHECK(stats.largest_age <= (uint64_t)((WORKERS - 1) * (2 * bound + 1)));
        for (int w = 0; w <= WORKERS; w++)
            CHECK_EQ(clock_of(&c, w), w == rank ? 0 : TICKS);
    }
    for (int step = 0; rank != plan.server && step < TICKS; step++) {
        if (dtrain_random_u64((uint64_t)rank, (uint64_t)step) % 4 == 0)
            usleep((useconds_t)(dtrain_random_u64((uint64_t)rank + 9, (uint64_t)step) % 4000));
        CHECK_EQ(tick(server, &c, rank, step), DTRAIN_OK);
        CHECK_EQ(dtrain_server_pull(server), DTRAIN_OK);
    }
    if (rank != plan.server) {
        CHECK(dtrain_server_get_stats(server).largest_staleness <= (uint64_t)bound);
        CHECK_EQ(dtrain_server_get_stats(server).steps, TICKS);
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
        CHECK_EQ(dtrain_server_push(server, 1.0), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "has left");
    }
    dtrain_server_destroy(server);
}

TEST(staleness_stays_within_its_bound_under_random_delays)
{
    const int bounds[] = {-1, 1, 2, 5};
    for (int i = 0; i < 4; i++) {
        plan_begin(i);
        plan.async = 1;
        plan.staleness = bounds[i];
        memset(&seen, 0, sizeof seen);
        on_threads(WORKERS + 1, random_delays, NULL);
    }
}

/* Pulls as often as the others take to come nearer. */
static dtrain_status pull_again(dtrain_server *server)
{
    dtrain_status status = DTRAIN_ERR_TIMEOUT;
    for (int i = 0; i < 10 && status == DTRAIN_ERR_TIMEOUT; i++)
        status = dtrain_server_pull(server);
    return status;
}

/* Worker 2 stays in its first step until the others can do no more. */
static void one_stands_still(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), step = 0;
    dtrain_status status = DTRAIN_OK;
    clocks c;
    dtrain_server *server;
    clocks_open(&c);
    CHECK_EQ(dtrain_server_create(&server, world, &c.table, 1, &plan), DTRAIN_OK);
    if (rank == 0) {
        for (int i = 0; i < 10 && (status = serve(server, &c)) == DTRAIN_ERR_TIMEOUT; i++)
            CHECK_CONTAINS(dtrain_last_error(), "the slowest is rank");
        CHECK_EQ(status, DTRAIN_OK);
        CHECK_EQ(dtrain_server_get_stats(server).largest_staleness, 3);
        CHECK_EQ(dtrain_server_get_stats(server).updates, 3 * 10);
    } else {
        if (rank == 2)
            await(2);
        for (; status == DTRAIN_OK && rank != 2; step++) {
            CHECK_EQ(tick(server, &c, rank, step), DTRAIN_OK);
            status = dtrain_server_pull(server);
        }
        if (rank != 2) {
            CHECK_EQ(status, DTRAIN_ERR_TIMEOUT);
            CHECK_EQ(step, 4); /* three more than the one that it may be ahead of: steps 0, 1, 2 and 3 */
            CHECK_CONTAINS(dtrain_last_error(), "has pushed 4 gradients: rank 2 has pushed 0, and staleness allows 3 behind");
            CHECK_EQ(dtrain_server_push(server, 1.0), DTRAIN_ERR_INVALID);
            CHECK_CONTAINS(dtrain_last_error(), "no pull since the last push");
            meet();
            CHECK_EQ(pull_again(server), DTRAIN_OK);
        }
        for (; step < 10; step++) {
            CHECK_EQ(tick(server, &c, rank, step), DTRAIN_OK);
            CHECK_EQ(pull_again(server), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
    }
    dtrain_server_destroy(server);
}

TEST(a_slow_worker_stops_nobody_before_the_bound)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 1000;
    dtrain_set_log(quiet, NULL);
    plan_begin(0);
    plan.async = 1;
    plan.staleness = 3;
    for (int poll = 0; poll < 2; poll++) {
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        met = 0;
        memset(&seen, 0, sizeof seen);
        on_threads(4, one_stands_still, &desc);
    }
    dtrain_set_log(dtrain__log_stderr, NULL);
}

/* Worker 2 kills itself, in a step or in the middle of sending it. */
static int one_is_killed(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    clocks c;
    dtrain_server *server;
    (void)s;
    dtrain_set_log(quiet, NULL);
    clocks_open(&c);
    CHECK_EQ(dtrain_server_create(&server, world, &c.table, 1, &plan), DTRAIN_OK);
    if (rank == plan.server) {
        CHECK_EQ(serve(server, &c), DTRAIN_OK);
        dtrain_server_stats stats = dtrain_server_get_stats(server);
        CHECK_EQ(stats.lost, 1);
        CHECK_EQ(stats.left, 2);
        CHECK(clock_of(&c, 2) == FATAL || clock_of(&c, 2) == FATAL + 1);
        CHECK_EQ(clock_of(&c, 1), 50);
        CHECK_EQ(stats.updates, 100 + clock_of(&c, 2));
    }
    for (int step = 0; rank != plan.server && step < 50; step++) {
        if (rank == 2 && step == FATAL && victim == 0)
            raise(SIGKILL);
        CHECK_EQ(tick(server, &c, rank, step), DTRAIN_OK);
        if (rank == 2 && step == FATAL)
            raise(SIGKILL);
        CHECK_EQ(dtrain_server_pull(server), DTRAIN_OK);
    }
    if (rank != plan.server)
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
    dtrain_server_destroy(server);
    return 0;
}

TEST(a_killed_worker_holds_back_nobody)
{
    for (victim = 0; victim < 2; victim++) {
        pid_t pids[4];
        scene s;
        scene_begin(&s, 4, victim);
        plan_begin(3);
        plan.async = 1;
        plan.staleness = 2;
        memset(&seen, 0, sizeof seen);
        for (int rank = 0; rank < 4; rank++)
            pids[rank] = start_rank(&s, rank, one_is_killed);
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(end_of(pids[rank], 18), rank == 2 ? 128 + SIGKILL : 0);
    }
}

enum { WIDE = 150000 };

/* Every element counts the updates, so that a gradient applied in part, or parameters read while they change, show. */
static dtrain_status uniform(void *user, int worker, const dtrain_server_stats *stats)
{
    const float *data = (const float *)user;
    (void)worker;
    for (size_t i = 0; i < WIDE; i++)
        if (data[i] != -(float)stats->updates) {
            TEST_FAIL("element %zu is %g after %d updates", i, (double)data[i], (int)stats->updates);
            return DTRAIN_ERR_CORRUPT;
        }
    return DTRAIN_OK;
}

static int is_killed_from_outside(dtrain_comm *world, scene *s)
{
    static float data[WIDE], grad[WIDE];
    int rank = dtrain_comm_rank(world);
    dtrain_param table;
    dtrain_server *server;
    (void)s;
    dtrain_set_log(quiet, NULL);
    memset(&table, 0, sizeof table);
    table.name = "wide";
    table.dtype = DTRAIN_F32;
    table.shape[0] = WIDE;
    table.data = data;
    table.grad = grad;
    for (size_t i = 0; i < WIDE; i++)
        grad[i] = 1.0f;
    CHECK_EQ(dtrain_server_create(&server, world, &table, 1, &plan), DTRAIN_OK);
    if (rank == plan.server) {
        dtrain_serve_desc desc;
        dtrain_optimizer_desc sgd;
        memset(&desc, 0, sizeof desc);
        memset(&sgd, 0, sizeof sgd);
        sgd.kind = DTRAIN_SGD;
        desc.schedule.lr = 1.0f;
        desc.on_update = uniform;
        desc.user = data;
        CHECK_EQ(dtrain_optimizer_create(&desc.optimizer, &table, 1, &sgd, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_server_run(server, &desc), DTRAIN_OK);
        CHECK_EQ(dtrain_server_get_stats(server).lost, 1);
        CHECK_EQ(dtrain_server_get_stats(server).left, 2);
        dtrain_optimizer_destroy(desc.optimizer);
    }
    for (int step = 0; rank != plan.server && (step < 300 || rank == victim); step++) {
        CHECK_EQ(dtrain_server_push(server, 1.0), DTRAIN_OK);
        CHECK_EQ(dtrain_server_pull(server), DTRAIN_OK);
        if (rank == victim && step == 0)
            say_underway();
        for (size_t i = 1; i < WIDE; i++)
            if (data[i] != data[0]) {
                TEST_FAIL("rank %d pulled %g and %g at once", rank, (double)data[0], (double)data[i]);
                return 1;
            }
    }
    if (rank != plan.server)
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
    dtrain_server_destroy(server);
    return 0;
}

TEST(what_a_killed_worker_had_not_sent_in_full_is_not_applied)
{
    plan_begin(0);
    plan.async = 1;
    victim = 1;
    for (int round = 0; round < 4; round++)
        kill_one(is_killed_from_outside, round % 2);
}

/* A worker that stops counts until its heartbeat is overdue; then the others, which have waited at the bound, go on. */
static int one_stops(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    clocks c;
    dtrain_server *server;
    (void)s;
    dtrain_set_log(quiet, NULL);
    clocks_open(&c);
    CHECK_EQ(dtrain_server_create(&server, world, &c.table, 1, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    if (plan.async && rank == plan.server) {
        CHECK_EQ(serve(server, &c), DTRAIN_OK);
        CHECK(dtrain_server_get_stats(server).waits > 0);
    }
    for (int step = 0; !(plan.async && rank == plan.server) && step < 30; step++) {
        double total = 0;
        c.grad[0] = 1.0f;
        if (rank == victim && step == FATAL)
            raise(SIGSTOP);
        CHECK_EQ(aggregator.aggregate(aggregator.self, &c.table, 1, 1.0, &total), DTRAIN_OK);
        CHECK(total == (plan.async ? 0.0 : step < FATAL ? 4.0 : 3.0));
    }
    if (plan.async && rank != plan.server)
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
    if (rank == plan.server)
        CHECK_EQ(dtrain_server_get_stats(server).lost, 1);
    dtrain_server_destroy(server);
    return 0;
}

TEST(a_stopped_worker_is_left_out_when_its_heartbeat_is_overdue)
{
    for (int async = 0; async < 2; async++) {
        pid_t pids[4];
        scene s;
        scene_begin(&s, 4, 1);
        s.desc.heartbeat_ms = 1000;
        plan_begin(0);
        plan.async = async;
        victim = 2;
        for (int rank = 0; rank < 4; rank++)
            pids[rank] = start_rank(&s, rank, one_stops);
        for (int rank = 0; rank < 4; rank++)
            if (rank != victim)
                CHECK_EQ(end_of(pids[rank], 18), 0);
        kill(pids[victim], SIGKILL);
        kill(pids[victim], SIGCONT);
        end_of(pids[victim], 5);
    }
}

/* A server that leaves says so to a worker that waits. */
static void server_leaves(dtrain_comm *world)
{
    clocks c;
    dtrain_server *server;
    clocks_open(&c);
    CHECK_EQ(dtrain_server_create(&server, world, &c.table, 1, &plan), DTRAIN_OK);
    if (dtrain_comm_rank(world) != plan.server) {
        CHECK_EQ(dtrain_server_pull(server), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "with rank 1, the parameter server");
        CHECK_CONTAINS(dtrain_last_error(), "has left");
        CHECK_EQ(dtrain_server_push(server, 1.0), DTRAIN_ERR_PEER_LOST);
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_ERR_PEER_LOST);
    }
    dtrain_server_destroy(server);
}

TEST(a_server_that_leaves_is_named)
{
    plan_begin(1);
    plan.async = 1;
    on_threads(3, server_leaves, NULL);
    on_processes(3, server_leaves, NULL);
    on_cables(3, server_leaves, NULL);
}

/* ---- what is learnt ---- */

enum { ROWS = 90, COLUMNS = 5 };

static double feature(int row, int column)
{
    return column == 0 ? 1.0 : (double)dtrain_random_normal(5, (uint64_t)(row * COLUMNS + column));
}

static double target(int row)
{
    double y = 0.3 * (double)dtrain_random_normal(6, (uint64_t)row);
    for (int k = 0; k < COLUMNS; k++)
        y += feature(row, k) * (k - 1.5);
    return y;
}

/* The least squares by the normal equations, eliminated in float64. */
static void solve(double *w)
{
    double a[COLUMNS][COLUMNS + 1];
    memset(a, 0, sizeof a);
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < COLUMNS; i++) {
            for (int k = 0; k < COLUMNS; k++)
                a[i][k] += feature(row, i) * feature(row, k);
            a[i][COLUMNS] += feature(row, i) * target(row);
        }
    for (int i = 0; i < COLUMNS; i++)
        for (int r = 0; r < COLUMNS; r++)
            for (int k = COLUMNS; r != i && k >= i; k--)
                a[r][k] -= a[i][k] * a[r][i] / a[i][i];
    for (int i = 0; i < COLUMNS; i++)
        w[i] = a[i][COLUMNS] / a[i][i];
}

typedef struct lines {
    dtrain_param table;
    float data[COLUMNS], grad[COLUMNS];
    int rank;
} lines;

static dtrain_status lines_compute(void *user, double *weight)
{
    lines *l = (lines *)user;
    for (int row = l->rank - 1; row < ROWS; row += 3) {
        double error = -target(row);
        for (int k = 0; k < COLUMNS; k++)
            error += feature(row, k) * (double)l->data[k];
        for (int k = 0; k < COLUMNS; k++)
            l->grad[k] += (float)(error * feature(row, k));
        *weight += 1.0;
    }
    if (dtrain_random_u64((uint64_t)l->rank, (uint64_t)(l->data[0] * 1e6f)) % 16 == 0)
        usleep(500);
    return DTRAIN_OK;
}

static void learns(dtrain_comm *world)
{
    enum { UPDATES = 1500 };
    lines l;
    double best[COLUMNS];
    dtrain_server *server;
    dtrain_step_desc step;
    dtrain_step_result result = {-1.0, -1.0};
    dtrain_serve_desc desc;
    dtrain_optimizer_desc sgd;
    memset(&l, 0, sizeof l);
    memset(&step, 0, sizeof step);
    memset(&desc, 0, sizeof desc);
    memset(&sgd, 0, sizeof sgd);
    l.rank = dtrain_comm_rank(world);
    l.table.name = "w";
    l.table.dtype = DTRAIN_F32;
    l.table.shape[0] = COLUMNS;
    l.table.data = l.data;
    l.table.grad = l.grad;
    for (int k = 0; k < COLUMNS; k++)
        l.data[k] = (float)(l.rank * 10 + k);
    sgd.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_server_create(&server, world, &l.table, 1, &plan), DTRAIN_OK);
    CHECK_EQ(dtrain_optimizer_create(&step.optimizer, &l.table, 1, &sgd, NULL), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    solve(best);
    step.table = &l.table;
    step.count = 1;
    step.compute = lines_compute;
    step.user = &l;
    step.aggregator = &aggregator;
    step.lr = 1e9f; /* nothing is applied here */
    desc.optimizer = step.optimizer;
    desc.schedule.kind = DTRAIN_SCHEDULE_LINEAR;
    desc.schedule.lr = 0.05f;
    desc.schedule.total_steps = UPDATES;
    if (l.rank == 0) {
        double total;
        CHECK_EQ(aggregator.aggregate(aggregator.self, &l.table, 1, 1.0, &total), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "this rank is the server");
        CHECK_EQ(dtrain_server_run(server, &desc), DTRAIN_OK);
        CHECK(dtrain_server_get_stats(server).largest_staleness <= 4);
    } else {
        CHECK_EQ(dtrain_server_run(server, &desc), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "this rank is a worker");
    }
    for (int i = 0; i < UPDATES / 3 && l.rank != 0; i++) {
        CHECK_EQ(dtrain_train_step(&step, &result), DTRAIN_OK);
        CHECK(result.total_weight == 0.0);
    }
    for (int i = 0; i < 8 && l.rank != 0; i++) /* packed, each pull brings it nearer; for the others to end first */
        CHECK_EQ(dtrain_server_pull(server), DTRAIN_OK);
    if (l.rank != 0)
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
    double bound = l.rank == 0 ? 0.01 : 0.1; /* a worker may have pulled before the others' last steps */
    for (int k = 0; k < COLUMNS; k++)
        if ((double)l.data[k] - best[k] > bound || (double)l.data[k] - best[k] < -bound)
            TEST_FAIL("w[%d] is %g on rank %d, the closed form says %g", k, (double)l.data[k], l.rank, best[k]);
    dtrain_optimizer_destroy(step.optimizer);
    dtrain_server_destroy(server);
}

TEST(asynchronous_training_comes_to_the_least_squares)
{
    plan_begin(0);
    plan.async = 1;
    on_threads(4, learns, NULL);
    on_processes(4, learns, NULL);
    plan_compress.kind = DTRAIN_COMPRESS_INT8;
    plan_compress.least_count = 1;
    plan.compress = &plan_compress;
    on_threads(4, learns, NULL);
    plan_compress.kind = DTRAIN_COMPRESS_TOPK;
    plan_compress.topk.schedule.ratio = 0.4; /* two of five */
    on_threads(4, learns, NULL);
}

static void lie(const dtrain_compressor *compressor, const float *in, size_t count, void *out)
{
    (void)in;
    memset(out, 0xff, compressor->bytes(compressor, count));
}

/* Rank 1 sends what is no selection. */
static void one_lies(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    clocks c;
    dtrain_server *server;
    clocks_open(&c);
    CHECK_EQ(dtrain_server_create(&server, world, &c.table, 1, &plan), DTRAIN_OK);
    dtrain_aggregator aggregator = dtrain_aggregator_server(server);
    double total;
    if (rank == 1)
        server->compressor.pack = lie;
    if (plan.async && rank == 0) {
        CHECK_EQ(serve(server, &c), DTRAIN_OK);
        CHECK_EQ(dtrain_server_get_stats(server).lost, 1);
        CHECK_EQ(dtrain_server_get_stats(server).updates, 1);
        CHECK(c.data[0] == -1.0f);
    } else if (plan.async && rank == 1) {
        CHECK_EQ(aggregator.aggregate(aggregator.self, &c.table, 1, 1.0, &total), DTRAIN_ERR_PEER_LOST);
    } else {
        c.grad[0] = 1.0f;
        dtrain_status status = aggregator.aggregate(aggregator.self, &c.table, 1, 1.0, &total);
        CHECK_EQ(status, plan.async ? DTRAIN_OK : rank == 0 ? DTRAIN_ERR_CORRUPT : DTRAIN_ERR_ABORTED);
        if (!plan.async)
            CHECK_CONTAINS(dtrain_last_error(), "the parameter server, with rank 1: sparse_unpack");
        if (plan.async)
            CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
    }
    dtrain_server_destroy(server);
}

TEST(bytes_that_are_no_selection_are_applied_nowhere)
{
    dtrain_set_log(quiet, NULL);
    for (int async = 0; async < 2; async++) {
        plan_begin(0);
        plan.async = async;
        plan_compress.least_count = 1;
        plan_compress.topk.schedule.ratio = 0.2;
        plan.compress = &plan_compress;
        memset(&seen, 0, sizeof seen);
        on_threads(3, one_lies, NULL);
    }
    dtrain_set_log(dtrain__log_stderr, NULL);
}

/* Pieces, zero sizes and frozen ones: after one update all of it is what SGD makes of the gradient. */
static void one_update(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    model *m = (model *)malloc(sizeof *m), *start = (model *)malloc(sizeof *start);
    dtrain_server *server;
    model_open(m, rank);
    model_open(start, 0);
    CHECK_EQ(dtrain_server_create(&server, world, m->table, PARAMS, &plan), DTRAIN_OK);
    if (rank == 0) {
        dtrain_serve_desc desc;
        dtrain_optimizer_desc sgd;
        memset(&desc, 0, sizeof desc);
        memset(&sgd, 0, sizeof sgd);
        sgd.kind = DTRAIN_SGD;
        desc.schedule.lr = 0.5f;
        CHECK_EQ(dtrain_optimizer_create(&desc.optimizer, m->table, PARAMS, &sgd, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_server_run(server, &desc), DTRAIN_OK);
        dtrain_optimizer_destroy(desc.optimizer);
        CHECK_EQ(dtrain_server_get_stats(server).steps, 2);
        CHECK_EQ(dtrain_server_get_stats(server).updates, 1); /* a weight of 0 is a step without an update */
    } else {
        for (size_t i = 0; i < ALL; i++)
            m->grad[i] = value(3, i);
        CHECK_EQ(dtrain_server_push(server, 4.0), DTRAIN_OK);
        CHECK_EQ(dtrain_server_pull(server), DTRAIN_OK);
        CHECK_EQ(dtrain_server_push(server, 0.0), DTRAIN_OK);
        CHECK_EQ(dtrain_server_pull(server), DTRAIN_OK);
        CHECK_EQ(dtrain_server_leave(server), DTRAIN_OK);
        dtrain_server_stats stats = dtrain_server_get_stats(server);
        CHECK_EQ(stats.sent_bytes, 2 * 4 * TRAINED);
        dtrain_aggregator aggregator = dtrain_aggregator_server(server);
        CHECK_EQ(dtrain_aggregator_get_stats(&aggregator).steps, 2);
        CHECK_EQ(dtrain_aggregator_get_stats(&aggregator).sent_bytes, 2 * 4 * TRAINED);
        CHECK_EQ(dtrain_aggregator_get_stats(&aggregator).dense_bytes, 2 * 4 * TRAINED);
        CHECK_EQ(stats.received_bytes, 2 * 4 * TRAINED);
    }
    for (size_t i = 0; i < ALL; i++) {
        int frozen = i >= ODD && i < ODD + FROZEN;
        float expected = start->data[i];
        if (!frozen)
            expected -= 0.5f * (value(3, i) / 4.0f);
        if (m->data[i] != expected) {
            TEST_FAIL("element %zu on rank %d is %g, expected %g", i, rank, (double)m->data[i], (double)expected);
            break;
        }
    }
    dtrain_server_destroy(server);
    free(m);
    free(start);
}

TEST(a_pushed_gradient_is_applied_to_every_parameter_and_pulled)
{
    plan_begin(0);
    plan.async = 1;
    on_threads(2, one_update, NULL);
    on_processes(2, one_update, NULL);
}
