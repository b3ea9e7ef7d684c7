/* Fused calls, weighted means, crossing messages, and operations that are cancelled, aborted or waited for in part:
 * on threads, on processes over TCP, and over a transport that has nothing but send and recv. */
#define DTRAIN_IMPLEMENTATION
#include "../dtrain.h"
#include "test.h"
#include "processes.h"

#define CABLE_BYTES 8192
#define MANY 9

/* Bytes from one rank to another. */
typedef struct cable {
    pthread_mutex_t mutex;
    size_t written, read;
    unsigned char bytes[CABLE_BYTES];
} cable;

typedef struct cable_end {
    cable *cables; /* [from * size + to] */
    int rank, size;
    int told; /* fail was called */
} cable_end;

static dtrain_status cable_move(cable *c, int sending, unsigned char *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    for (*moved = 0;;) {
        size_t before = *moved;
        pthread_mutex_lock(&c->mutex);
        while (*moved < bytes && (sending ? c->written - c->read < CABLE_BYTES : c->written > c->read)) {
            if (sending)
                c->bytes[c->written++ % CABLE_BYTES] = data[(*moved)++];
            else
                data[(*moved)++] = c->bytes[c->read++ % CABLE_BYTES];
        }
        pthread_mutex_unlock(&c->mutex);
        if (*moved == bytes)
            return DTRAIN_OK;
        if (*moved == before && dtrain__os_now_ns() >= deadline_ns)
            return DTRAIN_ERR_TIMEOUT;
        if (*moved == before)
            usleep(100);
    }
}

static dtrain_status cable_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                size_t *moved)
{
    cable_end *end = (cable_end *)self;
    unsigned char *at;
    memcpy(&at, &data, sizeof at);
    return cable_move(&end->cables[end->rank * end->size + peer], 1, at, bytes, deadline_ns, moved);
}

static dtrain_status cable_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    cable_end *end = (cable_end *)self;
    return cable_move(&end->cables[peer * end->size + end->rank], 0, (unsigned char *)data, bytes, deadline_ns, moved);
}

static void cable_fail(void *self, dtrain_status why, const char *text)
{
    cable_end *end = (cable_end *)self;
    (void)why;
    (void)text;
    __atomic_store_n(&end->told, 1, __ATOMIC_SEQ_CST);
}

typedef void (*world_body)(dtrain_comm *world);

typedef struct own_rank {
    pthread_t thread;
    cable_end end;
    dtrain_comm *comm;
    world_body body;
} own_rank;

static void *own_main(void *pointer)
{
    own_rank *rank = (own_rank *)pointer;
    rank->body(rank->comm);
    dtrain_comm_destroy(rank->comm);
    return NULL;
}

static cable *cables_new(int ranks)
{
    cable *cables = (cable *)calloc((size_t)(ranks * ranks), sizeof(cable));
    for (int i = 0; i < ranks * ranks; i++)
        pthread_mutex_init(&cables[i].mutex, NULL);
    return cables;
}

static dtrain_comm *cable_comm(cable *cables, cable_end *end, int rank, int ranks, const dtrain_comm_desc *desc)
{
    dtrain_transport transport;
    dtrain_comm *comm = NULL;
    memset(&transport, 0, sizeof transport);
    end->cables = cables;
    end->rank = rank;
    end->size = ranks;
    end->told = 0;
    transport.self = end;
    transport.rank = rank;
    transport.size = ranks;
    transport.send = cable_send;
    transport.recv = cable_recv;
    transport.fail = cable_fail;
    CHECK_EQ(dtrain_comm_from_transport(&comm, &transport, desc), DTRAIN_OK);
    return comm;
}

static void on_cables(int ranks, world_body body, const dtrain_comm_desc *desc)
{
    cable *cables = cables_new(ranks);
    own_rank own[16];
    for (int rank = 0; rank < ranks; rank++) {
        own[rank].body = body;
        own[rank].comm = cable_comm(cables, &own[rank].end, rank, ranks, desc);
    }
    for (int rank = 0; rank < ranks; rank++)
        CHECK_EQ(pthread_create(&own[rank].thread, NULL, own_main, &own[rank]), 0);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(own[rank].thread, NULL);
    free(cables);
}

static world_body current; /* before any thread or process of it exists */

static dtrain_status on_a_thread(dtrain_comm *world, void *user)
{
    (void)user;
    current(world);
    return DTRAIN_OK;
}

static int in_a_process(dtrain_comm *world, scene *s)
{
    (void)s;
    current(world);
    return 0;
}

static void on_threads(int ranks, world_body body, const dtrain_comm_desc *desc)
{
    current = body;
    CHECK_EQ(dtrain_run_threads(ranks, on_a_thread, NULL, desc), DTRAIN_OK);
}

static void on_processes(int ranks, world_body body, const dtrain_comm_desc *desc)
{
    scene s;
    scene_begin(&s, ranks, 1);
    if (desc != NULL)
        s.desc = *desc;
    if (s.desc.timeout_ms == 0)
        s.desc.timeout_ms = 20000;
    current = body;
    run_ranks(&s, in_a_process);
}

static void everywhere(int ranks, world_body body)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int poll = 0; poll < 2; poll++) {
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        on_threads(ranks, body, &desc);
        on_processes(ranks, body, &desc);
        on_cables(ranks, body, &desc);
    }
}

static float value(int rank, size_t i)
{
    return (float)((int)((size_t)rank * 7919 + i * 31) % 1000) * 0.37f - 100.0f;
}

static float *values(int rank, size_t count)
{
    float *data = (float *)malloc((count + 1) * sizeof(float));
    for (size_t i = 0; i < count; i++)
        data[i] = value(rank, i);
    return data;
}

static int holds(const float *data, int rank, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (data[i] != value(rank, i))
            return 0;
    return 1;
}

/* ---- fuse ---- */

static const size_t small_counts[MANY] = {1024, 1, 0, 7, 513, 300000, 64, 64, 3};

/* Calls of every kind, fused or not; the results go to out[0 .. MANY + 4]. */
static void mixture(dtrain_comm *world, float **in, float **out, int fused)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), to = (rank + 1) % ranks;
    size_t low, n = dtrain_shard(world, small_counts[0], rank, &low);
    if (fused)
        CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    for (int k = 0; k < MANY; k++) {
        dtrain_op op = k == 4 ? DTRAIN_MEAN : DTRAIN_SUM;
        int in_place = k % 2;
        if (in_place)
            memcpy(out[k], in[k], small_counts[k] * sizeof(float));
        CHECK_EQ(dtrain_all_reduce(world, in_place ? out[k] : in[k], out[k], small_counts[k], DTRAIN_F32, op),
                 DTRAIN_OK);
        if (fused && k == 6)
            CHECK_EQ(dtrain_send(world, in[0], 1024, DTRAIN_F32, to), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_broadcast(world, out[MANY], 1000, DTRAIN_F32, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_broadcast(world, out[MANY + 1], 9, DTRAIN_F32, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_broadcast(world, out[MANY + 2], 9, DTRAIN_F32, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_reduce_scatter(world, in[0], out[MANY + 3], 1024, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_gather(world, in[0] + low, out[MANY + 4], 1024, DTRAIN_F32), DTRAIN_OK);
    if (!fused)
        return;
    CHECK_EQ(dtrain_recv(world, out[MANY + 5], 1024, DTRAIN_F32, (rank + ranks - 1) % ranks), DTRAIN_OK);
    CHECK_EQ(dtrain_exchange(world, in[0], 700, to, out[MANY + 6], 700, (rank + ranks - 1) % ranks, DTRAIN_F32),
             DTRAIN_OK);
    CHECK(n == 0 || out[MANY + 4][low] == 0); /* nothing has run yet */
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK(holds(out[MANY + 5], (rank + ranks - 1) % ranks, 1024));
    CHECK(holds(out[MANY + 6], (rank + ranks - 1) % ranks, 700));
}

static void a_mixture(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float *in[MANY], *alone[MANY + 7], *fused[MANY + 7];
    for (int k = 0; k < MANY; k++)
        in[k] = values(rank, small_counts[k]);
    for (int k = 0; k < MANY + 7; k++) {
        size_t count = k < MANY ? small_counts[k] : 1024;
        alone[k] = (float *)calloc(count + 1, sizeof(float));
        fused[k] = (float *)calloc(count + 1, sizeof(float));
        for (size_t i = 0; i < count && k >= MANY && k < MANY + 3; i++)
            alone[k][i] = fused[k][i] = value(rank, i);
    }
    mixture(world, in, alone, 0);
    uint64_t before = world->number;
    mixture(world, in, fused, 1);
    /* 4 sums, a mean, a large sum, 3 sums; 2 broadcasts from rank 1, one from rank 0; 3 others; messages apart */
    int ring = world->desc.algorithm == DTRAIN_ALGORITHM_RING;
    CHECK_EQ(world->number - before, (ring ? MANY : 4) + 2 + 3);
    for (int k = 0; k < MANY + 5; k++)
        CHECK_EQ(memcmp(alone[k], fused[k], (k < MANY ? small_counts[k] : 1024) * sizeof(float)), 0);
    for (int k = 0; k < MANY + 7; k++) {
        free(alone[k]);
        free(fused[k]);
        if (k < MANY)
            free(in[k]);
    }
}

TEST(fused_calls_give_the_bits_of_the_calls_alone_in_fewer_operations)
{
    everywhere(3, a_mixture);
    everywhere(2, a_mixture);
}

TEST(fused_calls_give_the_bits_of_the_ring_where_that_was_asked_for)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.algorithm = DTRAIN_ALGORITHM_RING;
    on_threads(3, a_mixture, &desc);
    on_processes(3, a_mixture, &desc);
}

/* Every rank sends to and receives from every other, each in an order of its own, around an all_reduce. */
static void all_to_all(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    static const size_t sizes[] = {5, 400000};
    float one = 1;
    for (int turn = 0; turn < 2; turn++) {
        size_t count = sizes[turn];
        float *mine = values(rank, count), *got = (float *)calloc(count * (size_t)ranks, sizeof(float)), sum = 0;
        CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
        for (int k = 0; k < 2 * ranks; k++) {
            int peer = rank % 2 ? k / 2 : ranks - 1 - k / 2;
            if (k == rank)
                CHECK_EQ(dtrain_all_reduce(world, &one, &sum, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
            if (peer == rank)
                continue;
            if ((k + rank) % 2)
                CHECK_EQ(dtrain_send(world, mine, count, DTRAIN_F32, peer), DTRAIN_OK);
            else
                CHECK_EQ(dtrain_recv(world, got + (size_t)peer * count, count, DTRAIN_F32, peer), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
        CHECK(sum == (float)ranks);
        for (int peer = 0; peer < ranks; peer++)
            CHECK(peer == rank || holds(got + (size_t)peer * count, peer, count));
        free(mine);
        free(got);
    }
}

TEST(everyone_sends_to_everyone_in_one_fuse)
{
    everywhere(2, all_to_all);
    everywhere(5, all_to_all);
}

static void other_fuse(dtrain_comm *world)
{
    float x[4] = {1, 2, 3, 4};
    int rank = dtrain_comm_rank(world);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x, x, rank == 0 ? 1 : 2, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x + 2, x + 2, rank == 0 ? 2 : 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce #1 (sum, f32 x 1, 2 fused)");
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce #1 (sum, f32 x 2, 2 fused)");
    CHECK_CONTAINS(dtrain_comm_error(world), "2 fused");
}

TEST(ranks_that_fuse_differently_are_told_even_where_the_sizes_add_up)
{
    on_threads(2, other_fuse, NULL);
    on_processes(2, other_fuse, NULL);
}

static void fuse_misused(dtrain_comm *world)
{
    float x[4] = {1, 1, 1, 1};
    int both[2] = {0, 1};
    dtrain_mesh_dim dim = {"data", 0};
    dtrain_mesh *mesh = (dtrain_mesh *)x;
    dtrain_comm *group = world;
    dtrain_work *work = (dtrain_work *)x;
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "there was no fuse_begin");
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "call fuse_end first");
    CHECK_EQ(dtrain_all_reduce_async(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce_async on rank");
    CHECK(work == NULL);
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, (dtrain_dtype)DTRAIN_SUM, (dtrain_op)DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_check_equal(world, x, 1, DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 1, DTRAIN_F32, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "comm_split on rank");
    CHECK_CONTAINS(dtrain_last_error(), "it cannot be fused; call fuse_end first");
    CHECK_EQ(dtrain_comm_subgroup(world, both, 2, &group), DTRAIN_ERR_INVALID);
    CHECK(group == NULL);
    CHECK_EQ(dtrain_mesh_create(&mesh, world, &dim, 1), DTRAIN_ERR_INVALID);
    CHECK(mesh == NULL);
    CHECK_EQ(dtrain_all_reduce(world, x + 1, x + 1, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK(x[0] == 2 && x[1] == 2 && x[2] == 1);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
}

TEST(a_fuse_says_what_it_does_not_take_and_may_be_left_open)
{
    everywhere(2, fuse_misused);
    CHECK_EQ(dtrain_fuse_begin(NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fuse_end(NULL), DTRAIN_ERR_INVALID);
}

static dtrain_status left_with_handles(dtrain_comm *world, void *user)
{
    static float x[2][3];
    dtrain_work *work[3];
    (void)user;
    for (int i = 0; i < 3; i++) {
        float *at = &x[dtrain_comm_rank(world)][i];
        CHECK_EQ(dtrain_all_reduce_async(world, at, at, 1, DTRAIN_F32, DTRAIN_SUM, &work[i]), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_OK);
    CHECK(dtrain_work_done(work[0]));
    return DTRAIN_OK;
}

TEST(handles_that_nobody_waited_for_go_with_the_group)
{
    dtrain_allocator allocator = {NULL, NULL, 0, 0};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    CHECK_EQ(dtrain_run_threads(2, left_with_handles, NULL, &desc), DTRAIN_OK);
    CHECK_EQ(allocator.bytes, 0);
}

static void warm_fuses(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), peer = 1 - rank;
    float *x = values(rank, 6000);
    size_t warm = 0, peak = 0;
    for (int step = 0; step < 30; step++) {
        CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
        for (size_t k = 0; k < 20; k++) {
            CHECK_EQ(dtrain_all_reduce(world, x + 100 * k, x + 100 * k, 100, DTRAIN_F32, DTRAIN_MEAN), DTRAIN_OK);
            CHECK_EQ(dtrain_send(world, x + 2000, 100, DTRAIN_F32, peer), DTRAIN_OK);
            CHECK_EQ(dtrain_recv(world, x + 3000 + 100 * k, 100, DTRAIN_F32, peer), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (step == 2) {
            warm = dtrain_comm_allocator(world)->bytes;
            peak = dtrain_comm_allocator(world)->peak_bytes;
        }
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_comm_allocator(world)->bytes, warm);
    CHECK_EQ(dtrain_comm_allocator(world)->peak_bytes, peak);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    free(x);
}

TEST(a_warm_fuse_allocates_nothing)
{
    everywhere(2, warm_fuses);
}

/* ---- weighted means ---- */

static float weight_of(int rank)
{
    static const float weights[] = {3, 0, 0.7f, 1, 12.5f};
    return weights[rank];
}

/* The tree of the manual over weighted values of those that count. */
static float weighted_tree(int first, int n, size_t i)
{
    int left = 1;
    if (n == 1)
        return weight_of(first) != 0 ? value(first, i) * weight_of(first) : -0.0f;
    while (2 * left < n)
        left *= 2;
    return weighted_tree(first, left, i) + weighted_tree(first + left, n - left, i);
}

static void weighted_means(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t count = 3001;
    float *x = values(rank, count), *out = (float *)calloc(count, sizeof(float)), *expected = values(0, count);
    uint16_t *half = (uint16_t *)calloc(2 * count, 2), *expected_half = (uint16_t *)calloc(count, 2);
    double total = 0;
    for (int r = 0; r < ranks; r++)
        total += (double)weight_of(r); /* few bits: exact in any order */
    for (size_t i = 0; i < count; i++)
        expected[i] = weighted_tree(0, ranks, i) / (float)total;
    if (weight_of(rank) == 0)
        memset(x, 0xff, count * sizeof(float)); /* NaNs */
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, out, count, DTRAIN_F32, (double)weight_of(rank)), DTRAIN_OK);
    CHECK_EQ(memcmp(out, expected, count * sizeof(float)), 0);
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, count, DTRAIN_F32, (double)weight_of(rank)), DTRAIN_OK);
    CHECK_EQ(memcmp(x, expected, count * sizeof(float)), 0);
    CHECK_EQ(dtrain_all_reduce_weighted(world, NULL, NULL, 0, DTRAIN_F32, (double)weight_of(rank)), DTRAIN_OK);
    for (size_t i = 0; i < count; i++) /* whole numbers: exact in bf16, and their weighted sums in float32 */
        half[i] = 0, x[i] = (float)((int)(i % 200) - 100 + rank);
    dtrain_convert(x, DTRAIN_F32, half, DTRAIN_BF16, count);
    for (size_t i = 0; i < count; i++) {
        float sum = 0, total_of = 0;
        for (int r = 0; r < ranks; r++) {
            sum += ((float)((int)(i % 200) - 100 + r)) * (float)(r + 1);
            total_of += (float)(r + 1);
        }
        x[i] = sum / total_of;
    }
    dtrain_convert(x, DTRAIN_F32, expected_half, DTRAIN_BF16, count);
    CHECK_EQ(dtrain_all_reduce_weighted(world, half, half + count, count, DTRAIN_BF16, rank + 1), DTRAIN_OK);
    CHECK_EQ(memcmp(half + count, expected_half, count * 2), 0);
    free(x);
    free(out);
    free(expected);
    free(half);
    free(expected_half);
}

TEST(weighted_means_are_the_trees_and_ignore_ranks_without_weight)
{
    everywhere(5, weighted_means);
    everywhere(3, weighted_means);
}

static void bad_weights(dtrain_comm *world)
{
    double x[2] = {1, 2}, nan;
    uint64_t bits = 0x7ff8000000000000u;
    float y[2] = {1, 2};
    memcpy(&nan, &bits, sizeof nan);
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 2, DTRAIN_F64, -1), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "the weight is -1");
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 2, DTRAIN_F64, nan), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 2, DTRAIN_F64, 1e308 * 10), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_all_reduce_weighted(world, y, y, 2, DTRAIN_F32, 1e39), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_all_reduce_weighted(world, y, y, 2, DTRAIN_I32, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_all_reduce_weighted(NULL, y, y, 2, DTRAIN_F32, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 2, DTRAIN_F64, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "add up to 0");
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 2, DTRAIN_F64, 1e308), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "add up to inf");
    CHECK(x[0] == 1 && x[1] == 2);
    CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 2, DTRAIN_F64, dtrain_comm_rank(world) == 1 ? 1e-300 : 0),
             DTRAIN_OK);
    CHECK(x[0] == 1 && x[1] == 2);
    if (dtrain_comm_rank(world) == 0)
        CHECK_EQ(dtrain_all_reduce_weighted(world, x, x, 1, DTRAIN_F64, 1), DTRAIN_ERR_MISMATCH);
    else
        CHECK_EQ(dtrain_all_reduce(world, x, x, 1, DTRAIN_F64, DTRAIN_SUM), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "(weighted mean, f64 x 1)");
    CHECK_CONTAINS(dtrain_last_error(), "(sum, f64 x 1)");
}

TEST(weights_that_are_none_are_refused_and_no_weight_at_all_is_refused_on_every_rank)
{
    on_threads(2, bad_weights, NULL);
    on_processes(2, bad_weights, NULL);
}

/* ---- messages that cross ---- */

static void crossing(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t count = 1000000;
    float *mine = values(rank, count), *got = (float *)calloc(count * (size_t)ranks, sizeof(float)), sum = 1;
    dtrain_work *work[16];
    int started = 0;
    for (int k = 1; k < ranks; k++)
        CHECK_EQ(dtrain_send_async(world, mine, count, DTRAIN_F32, (rank + k) % ranks, &work[started++]), DTRAIN_OK);
    for (int peer = 0; peer < ranks; peer++)
        if (peer != rank) {
            float *to = got + (size_t)peer * count;
            CHECK_EQ(dtrain_recv_async(world, to, count, DTRAIN_F32, peer, &work[started++]), DTRAIN_OK);
        }
    CHECK_EQ(dtrain_all_reduce_async(world, &sum, &sum, 1, DTRAIN_F32, DTRAIN_SUM, &work[started++]), DTRAIN_OK);
    while (world->desc.progress == DTRAIN_PROGRESS_POLL && !dtrain_work_done(work[started - 1])) {
        CHECK_EQ(dtrain_comm_poll(world, 500), DTRAIN_OK);
        for (int k = started - 1; k > 0; k--) /* finished in order */
            CHECK(!dtrain_work_done(work[k]) || dtrain_work_done(work[k - 1]));
        sched_yield();
    }
    for (int k = started - 1; k >= 0; k--)
        CHECK_EQ(dtrain_work_wait(work[k]), DTRAIN_OK);
    CHECK(sum == (float)ranks);
    for (int peer = 0; peer < ranks; peer++)
        CHECK(peer == rank || holds(got + (size_t)peer * count, peer, count));
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    free(mine);
    free(got);
}

TEST(large_messages_cross_whatever_was_queued_first)
{
    everywhere(2, crossing);
    everywhere(4, crossing);
}

static void one_after_another(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), peer = 1 - rank;
    float in[200], out[200];
    dtrain_work *work[400];
    for (int k = 0; k < 200; k++) {
        in[k] = value(rank, (size_t)k);
        CHECK_EQ(dtrain_send_async(world, &in[k], 1, DTRAIN_F32, peer, &work[2 * k]), DTRAIN_OK);
        CHECK_EQ(dtrain_recv_async(world, &out[k], 1, DTRAIN_F32, peer, &work[2 * k + 1]), DTRAIN_OK);
    }
    for (int k = 0; k < 400; k++)
        if (dtrain_work_wait(work[k]) != DTRAIN_OK)
            TEST_FAIL("%s", dtrain_last_error());
    CHECK(holds(out, peer, 200));
}

TEST(messages_between_two_ranks_keep_their_order)
{
    everywhere(2, one_after_another);
}

/* ---- waiting in part ---- */

static int64_t thread_cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void waits_in_part(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float x = 1, token = 0;
    dtrain_work *work;
    if (rank == 1)
        usleep(300000);
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    if (rank == 0) {
        CHECK_EQ(dtrain_work_wait_for(work, 0), DTRAIN_ERR_TIMEOUT);
        int64_t cpu = thread_cpu_ns();
        double begin = now_s();
        CHECK_EQ(dtrain_work_wait_for(work, 100), DTRAIN_ERR_TIMEOUT);
        CHECK(now_s() - begin >= 0.1);
        CHECK(thread_cpu_ns() - cpu < 60000000);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0: all_reduce of 1 elements is still under way after 100 ms");
        CHECK(!dtrain_work_done(work));
    }
    CHECK_EQ(dtrain_work_wait_for(work, rank == 0 ? -1 : 10000), DTRAIN_OK);
    CHECK(x == 2);
    CHECK_EQ(dtrain_work_wait_for(NULL, 1), DTRAIN_ERR_INVALID);
    if (rank == 1)
        usleep(150000);
    if (rank == 0) {
        CHECK_EQ(dtrain_recv_async(world, &token, 1, DTRAIN_F32, 1, &work), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait_for(work, 20), DTRAIN_ERR_TIMEOUT);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        CHECK(token == 2);
    } else
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK);
}

TEST(a_wait_that_times_out_sleeps_and_leaves_its_operation_running)
{
    everywhere(2, waits_in_part);
}

/* ---- cancel ---- */

static void *cancel_soon(void *pointer)
{
    usleep(50000);
    CHECK_EQ(dtrain_work_cancel((dtrain_work *)pointer), DTRAIN_OK);
    return NULL;
}

/* Rank 1 cancels what rank 0 has not joined yet, from another thread while it waits. */
static void cancels_a_collective(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float x = 1;
    dtrain_work *work[2];
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 1) {
        pthread_t thread;
        CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work[1]), DTRAIN_OK);
        CHECK_EQ(pthread_create(&thread, NULL, cancel_soon, work[0]), 0);
        CHECK_EQ(dtrain_work_wait(work[0]), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "rank 1 cancelled all_reduce #2 (sum, f32 x 1)");
        CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "all_reduce #");
        CHECK_CONTAINS(dtrain_last_error(), "rank 1 cancelled all_reduce #2 (sum, f32 x 1)");
        pthread_join(thread, NULL);
    } else if (rank == 0) {
        usleep(200000);
        if (world->desc.progress == DTRAIN_PROGRESS_POLL)
            CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK); /* hears of it */
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "on rank 0: rank 1 cancelled all_reduce #2 (sum, f32 x 1)");
    } else {
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "on rank 2: rank 1 cancelled all_reduce #2 (sum, f32 x 1)");
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 cancelled");
}

TEST(cancelling_a_collective_ends_it_on_every_rank_and_names_the_canceller)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int poll = 0; poll < 2; poll++) {
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        on_threads(3, cancels_a_collective, &desc);
        on_processes(3, cancels_a_collective, &desc);
    }
}

TEST(cancelling_over_a_transport_of_your_own_ends_the_operation_and_tells_the_transport)
{
    for (int poll = 0; poll < 2; poll++) {
        cable *cables = cables_new(2);
        cable_end end;
        dtrain_comm_desc desc;
        dtrain_work *work;
        float x = 1;
        memset(&desc, 0, sizeof desc);
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        dtrain_comm *comm = cable_comm(cables, &end, 0, 2, &desc);
        CHECK_EQ(dtrain_recv_async(comm, &x, 1, DTRAIN_F32, 1, &work), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait_for(work, 20), DTRAIN_ERR_TIMEOUT); /* so it has begun */
        CHECK_EQ(dtrain_work_cancel(work), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "recv #1 (f32 x 1) on rank 0: rank 0 cancelled recv #1 (f32 x 1)");
        CHECK(end.told);
        CHECK_EQ(dtrain_barrier(comm), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0 cancelled recv #1");
        dtrain_comm_destroy(comm);
        free(cables);
    }
}

static void cancels_a_message(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    size_t count = 1500000; /* more than the system takes on its way */
    float *x = values(rank, count), first = 1, second = 2;
    dtrain_work *work[3];
    if (rank == 0) {
        CHECK_EQ(dtrain_send_async(world, x, count, DTRAIN_F32, 1, &work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_send_async(world, &first, 1, DTRAIN_F32, 1, &work[1]), DTRAIN_OK);
        CHECK_EQ(dtrain_send_async(world, &second, 1, DTRAIN_F32, 1, &work[2]), DTRAIN_OK);
        CHECK_EQ(dtrain_work_cancel(work[1]), DTRAIN_OK);
        CHECK_EQ(dtrain_send(world, x, 1, DTRAIN_F32, 2), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_work_cancel(work[2]), DTRAIN_OK); /* it has ended: the queue was waited for */
        CHECK_EQ(dtrain_work_wait(work[1]), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "rank 0 cancelled send #2 (f32 x 1) before it began");
        CHECK_EQ(dtrain_work_wait(work[2]), DTRAIN_OK);
    } else if (rank == 1) {
        CHECK_EQ(dtrain_recv(world, &first, 1, DTRAIN_F32, 2), DTRAIN_OK); /* so the cancel came first */
        CHECK_EQ(dtrain_recv(world, x, count, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK(holds(x, 0, count));
        CHECK_EQ(dtrain_recv(world, &first, 1, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK(first == 2);
    } else {
        CHECK_EQ(dtrain_recv(world, x, 1, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_send(world, x, 1, DTRAIN_F32, 1), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    free(x);
}

TEST(cancelling_a_message_that_has_not_begun_leaves_the_group_usable)
{
    everywhere(3, cancels_a_message);
}

TEST(cancelling_in_a_world_of_one_leaves_it_usable)
{
    dtrain_comm *world;
    dtrain_work *work;
    dtrain_comm_desc desc;
    float x = 1;
    memset(&desc, 0, sizeof desc);
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_threads_create(&world, 1, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    CHECK_EQ(dtrain_work_cancel(work), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "before it began");
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_work_cancel(NULL), DTRAIN_ERR_INVALID);
    dtrain_comm_destroy(world);
}

/* ---- abort ---- */

static void *abort_soon(void *pointer)
{
    usleep(50000);
    CHECK_EQ(dtrain_comm_abort((dtrain_comm *)pointer, "the loss is not a number"), DTRAIN_OK);
    return NULL;
}

static const char *const aborted_by_1 = "rank 1 aborted the group: the loss is not a number";

/* Ranks 0 and 2 are blocked for rank 1, which aborts while it waits for a message that nobody sends. */
static void aborts(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float x = 1;
    dtrain_work *work = NULL;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    double begin = now_s();
    if (rank == 1) {
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, abort_soon, world), 0);
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 0), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "recv #1 (f32 x 1) on rank 1: rank 1 aborted the group");
        pthread_join(thread, NULL);
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, 0), DTRAIN_ERR_ABORTED);
    } else if (rank == 0) {
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "all_reduce #2 (sum, f32 x 1) on rank 0: ");
    } else {
        CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_ABORTED);
    }
    CHECK_CONTAINS(dtrain_last_error(), aborted_by_1);
    CHECK(now_s() - begin < 10);
    CHECK_EQ(dtrain_comm_abort(world, "later"), DTRAIN_OK);
    CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, (rank + 1) % 3), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), aborted_by_1);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), aborted_by_1);
}

TEST(an_abort_ends_blocked_pending_and_later_calls_on_every_rank)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int poll = 0; poll < 2; poll++) {
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        on_threads(3, aborts, &desc);
        on_processes(3, aborts, &desc);
    }
    CHECK_EQ(dtrain_comm_abort(NULL, "x"), DTRAIN_ERR_INVALID);
}

TEST(an_abort_over_a_transport_of_your_own_ends_the_blocked_call_and_tells_the_transport)
{
    cable *cables = cables_new(2);
    cable_end end;
    dtrain_comm *comm = cable_comm(cables, &end, 0, 2, NULL);
    pthread_t thread;
    float x = 1;
    double begin = now_s();
    CHECK_EQ(pthread_create(&thread, NULL, abort_soon, comm), 0);
    CHECK_EQ(dtrain_all_reduce(comm, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce #1 (sum, f32 x 1) on rank 0: rank 0 aborted the group: the loss");
    CHECK(now_s() - begin < 10);
    pthread_join(thread, NULL);
    CHECK(end.told);
    CHECK_EQ(dtrain_send(comm, &x, 1, DTRAIN_F32, 1), DTRAIN_ERR_ABORTED);
    dtrain_comm_destroy(comm);
    free(cables);
}

/* Large collectives, blocking, async and fused, on fresh buffers that are freed as soon as a call has failed. */
static void until_aborted(dtrain_comm *world)
{
    dtrain_status status = DTRAIN_OK;
    for (int step = 0; status == DTRAIN_OK; step++) {
        size_t count = 50000 + 1000 * (size_t)(step % 50);
        float *in = values(0, count), *out = (float *)malloc(count * sizeof(float));
        dtrain_work *work = NULL;
        if (step % 3 == 0) {
            status = dtrain_all_reduce_async(world, in, out, count, DTRAIN_F32, DTRAIN_SUM, &work);
            if (status == DTRAIN_OK)
                status = dtrain_work_wait(work);
        } else if (step % 3 == 1) {
            status = dtrain_all_reduce(world, in, out, count, DTRAIN_F32, DTRAIN_SUM);
        } else {
            CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
            for (size_t k = 0; k < 10; k++)
                CHECK_EQ(dtrain_all_reduce(world, in + k, out + k, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
            CHECK_EQ(dtrain_broadcast(world, out, count, DTRAIN_F32, step % 2), DTRAIN_OK);
            status = dtrain_fuse_end(world);
        }
        memset(in, 0, count * sizeof(float));
        free(in);
        free(out);
    }
    CHECK_EQ(status, DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "aborted the group: ");
}

static dtrain_comm *victims[3];

static void *until_aborted_main(void *pointer)
{
    until_aborted((dtrain_comm *)pointer);
    return NULL;
}

TEST(buffers_may_be_freed_at_once_after_an_abort)
{
    for (int round = 0; round < 40; round++) {
        pthread_t threads[3];
        CHECK_EQ(dtrain_threads_create(victims, 3, NULL), DTRAIN_OK);
        for (int rank = 0; rank < 3; rank++)
            CHECK_EQ(pthread_create(&threads[rank], NULL, until_aborted_main, victims[rank]), 0);
        usleep((useconds_t)(2000 + 700 * round));
        CHECK_EQ(dtrain_comm_abort(victims[round % 3], "enough"), DTRAIN_OK);
        for (int rank = 0; rank < 3; rank++)
            pthread_join(threads[rank], NULL);
        for (int rank = 0; rank < 3; rank++)
            dtrain_comm_destroy(victims[rank]);
    }
}

static void *cancel_now(void *pointer)
{
    dtrain_work_cancel((dtrain_work *)pointer);
    return NULL;
}

/* Ranks start the same; rank 0 cancels about when it runs. Whatever comes of it, it is one of two things. */
static void cancels_in_a_race(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    for (int step = 0;; step++) {
        size_t count = 20000;
        float *x = values(rank, count);
        dtrain_work *work;
        pthread_t thread;
        dtrain_status status = dtrain_all_reduce_async(world, x, x, count, DTRAIN_F32, DTRAIN_SUM, &work);
        CHECK_EQ(status, DTRAIN_OK);
        int cancels = rank == 0 && step == 5;
        if (cancels)
            CHECK_EQ(pthread_create(&thread, NULL, cancel_now, work), 0);
        usleep(rank == 0 ? 0 : 30);
        while (cancels && !dtrain_work_done(work))
            if (world->desc.progress == DTRAIN_PROGRESS_POLL)
                dtrain_comm_poll(world, 100);
        if (cancels)
            pthread_join(thread, NULL);
        status = dtrain_work_wait(work);
        CHECK(status == DTRAIN_OK || status == DTRAIN_ERR_ABORTED);
        free(x);
        if (status != DTRAIN_OK || step == 20)
            return;
    }
}

TEST(a_cancel_in_a_race_with_the_end_gives_one_or_the_other)
{
    for (int round = 0; round < 10; round++)
        on_threads(3, cancels_in_a_race, NULL);
    for (int round = 0; round < 3; round++)
        on_processes(2, cancels_in_a_race, NULL);
}
