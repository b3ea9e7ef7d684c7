/* dtrain_start: every call can be started, and has the bits of the call that waits; what it refuses. Objects that use
 * the caller's group refuse it in a fuse. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "worlds.h"

enum { COUNT = 901, ROOM = 8 * COUNT, CALLS = 17 };

/* Parts of uneven length with gaps, the first of them empty. */
typedef struct parts {
    size_t counts[MANY], offsets[MANY], fives[MANY];
} parts;

/* Fills in call number k on the first COUNT numbers of in, and makes it, unless the address of a handle is given. */
static dtrain_status make(dtrain_comm *w, int k, const float *in, float *out, const parts *p, dtrain_work **work)
{
    int rank = dtrain_comm_rank(w), ranks = dtrain_comm_size(w), root = ranks - 1;
    int to = ranks > 1 ? (rank + 1) % ranks : -1, from = ranks > 1 ? (rank + ranks - 1) % ranks : -1;
    const size_t *n = p->counts, *at = p->offsets, *fives = p->fives;
    dtrain_call call;
    memset(&call, 0, sizeof call);
    call.in = in;
    call.out = out;
    call.count = COUNT;
    call.dtype = DTRAIN_F32;
    call.op = DTRAIN_SUM;
    call.root = root;
    if (k == 5)
        memcpy(out, in, COUNT * sizeof(float));
#define CALL(number, name, waits, ...) \
    case number: \
        if (work == NULL) \
            return waits; \
        call.kind = DTRAIN_CALL_##name; \
        __VA_ARGS__; \
        break
    switch (k) {
        CALL(0, ALL_REDUCE, dtrain_all_reduce(w, in, out, COUNT, DTRAIN_F32, DTRAIN_MEAN), call.op = DTRAIN_MEAN);
        CALL(1, REDUCE_SCATTER, dtrain_reduce_scatter(w, in, out, COUNT, DTRAIN_F32, DTRAIN_SUM), (void)0);
        CALL(2, REDUCE_SCATTER, dtrain_reduce_scatter_v(w, in, out, n, at, DTRAIN_F32, DTRAIN_SUM), call.counts = n,
             call.offsets = at);
        CALL(3, ALL_GATHER, dtrain_all_gather(w, in, out, COUNT, DTRAIN_F32), (void)0);
        CALL(4, ALL_GATHER, dtrain_all_gather_v(w, in, out, n, at, DTRAIN_F32), call.counts = n, call.offsets = at);
        CALL(5, BROADCAST, dtrain_broadcast(w, out, COUNT, DTRAIN_F32, root), call.in = NULL);
        CALL(6, REDUCE, dtrain_reduce(w, in, out, COUNT, DTRAIN_F32, DTRAIN_MAX, root), call.op = DTRAIN_MAX);
        CALL(7, SCAN, dtrain_scan(w, in, out, COUNT, DTRAIN_F32, DTRAIN_SUM), (void)0);
        CALL(8, EXSCAN, dtrain_exscan(w, in, out, COUNT, DTRAIN_F32, DTRAIN_SUM), (void)0);
        CALL(9, GATHER, dtrain_gather(w, in, out, COUNT, DTRAIN_F32, root), (void)0);
        CALL(10, GATHER, dtrain_gather_v(w, in, out, n, at, DTRAIN_F32, root), call.counts = n, call.offsets = at);
        CALL(11, SCATTER, dtrain_scatter(w, in, out, COUNT, DTRAIN_F32, root), (void)0);
        CALL(12, SCATTER, dtrain_scatter_v(w, in, out, n, at, DTRAIN_F32, root), call.counts = n, call.offsets = at);
        CALL(13, ALL_TO_ALL, dtrain_all_to_all(w, in, out, COUNT, DTRAIN_F32), (void)0);
        CALL(14, ALL_TO_ALL, dtrain_all_to_all_v(w, in, fives, at, out, fives, NULL, DTRAIN_F32), call.counts = fives,
             call.offsets = at, call.out_counts = fives);
        CALL(15, EXCHANGE, dtrain_exchange(w, in, COUNT, to, out, COUNT, from, DTRAIN_F32), call.root = to,
             call.from = from, call.out_count = COUNT);
        CALL(16, BARRIER, dtrain_barrier(w), (void)0);
    }
#undef CALL
    return dtrain_start(w, &call, work);
}

static void start_each(dtrain_comm *world)
{
    float *in = values(dtrain_comm_rank(world), ROOM), *waited[CALLS], *started[CALLS];
    dtrain_work *works[CALLS];
    parts p;
    for (int r = 0; r < MANY; r++) {
        p.counts[r] = (size_t)(7 * r);
        p.offsets[r] = (size_t)(60 * r + 1);
        p.fives[r] = 5;
    }
    for (int k = 0; k < CALLS; k++) {
        waited[k] = (float *)calloc(ROOM, sizeof(float));
        started[k] = (float *)calloc(ROOM, sizeof(float));
        CHECK_EQ(make(world, k, in, waited[k], &p, NULL), DTRAIN_OK);
    }
    for (int k = 0; k < CALLS; k++) /* all of them, and none is waited for */
        CHECK_EQ(make(world, k, in, started[k], &p, &works[k]), DTRAIN_OK);
    float sum = 1;
    CHECK_EQ(dtrain_all_reduce(world, &sum, &sum, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK); /* waits, after them all */
    CHECK_EQ((int)sum, dtrain_comm_size(world));
    for (int k = 0; k < CALLS; k++) {
        CHECK(dtrain_work_done(works[k]));
        CHECK_EQ(dtrain_work_wait(works[k]), DTRAIN_OK);
        CHECK_EQ(memcmp(waited[k], started[k], ROOM * sizeof(float)), 0);
        free(waited[k]);
        free(started[k]);
    }
    free(in);
}

TEST(every_call_can_be_started_and_has_the_bits_of_the_call_that_waits)
{
    for (int ranks = 1; ranks <= 5; ranks += ranks < 3 ? 1 : 2)
        everywhere(ranks, start_each);
}

static void start_messages(dtrain_comm *world)
{
    float *in = values(dtrain_comm_rank(world), 100000), *got = (float *)calloc(100000, sizeof(float));
    int other = 1 - dtrain_comm_rank(world);
    dtrain_work *sent, *came;
    dtrain_call call;
    memset(&call, 0, sizeof call);
    call.kind = DTRAIN_CALL_SEND;
    call.in = in;
    call.count = 100000;
    call.dtype = DTRAIN_F32;
    call.root = other;
    CHECK_EQ(dtrain_start(world, &call, &sent), DTRAIN_OK);
    call.kind = DTRAIN_CALL_RECV;
    call.out = got;
    CHECK_EQ(dtrain_start(world, &call, &came), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(came), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(sent), DTRAIN_OK);
    CHECK(holds(got, other, 100000));
    free(in);
    free(got);
}

TEST(a_message_can_be_started_so)
{
    everywhere(2, start_messages);
}

static void misuse(dtrain_comm *world)
{
    const size_t counts[2] = {1, 1};
    float x[2] = {1, 1};
    dtrain_work *work = NULL;
    dtrain_call call;
    memset(&call, 0, sizeof call);
    CHECK_EQ(dtrain_start(world, NULL, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "start: call is NULL; give a call");
    CHECK_EQ(dtrain_start(world, &call, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "start: work is NULL; give an address for the handle");
    CHECK_EQ(dtrain_start(world, &call, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "start: call.kind is 0; expected a DTRAIN_CALL constant");
    call.kind = DTRAIN_CALL_ALL_REDUCE;
    call.in = call.out = x;
    call.dtype = DTRAIN_F32;
    call.op = DTRAIN_SUM;
    call.counts = counts;
    CHECK_EQ(dtrain_start(world, &call, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "start: all_reduce has no form with counts: leave them NULL");
    call.counts = NULL;
    call.out_counts = counts;
    CHECK_EQ(dtrain_start(world, &call, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "start: all_reduce has no form with out_counts: leave them NULL");
    call.kind = DTRAIN_CALL_ALL_TO_ALL;
    CHECK_EQ(dtrain_start(world, &call, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "all_to_all_v: in_counts is NULL");
    call.counts = counts;
    call.out_counts = NULL;
    CHECK_EQ(dtrain_start(world, &call, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "all_to_all_v: out_counts is NULL");
    call.kind = (dtrain_call_kind)(DTRAIN_CALL_EXCHANGE + 1);
    CHECK_EQ(dtrain_start(world, &call, &work), DTRAIN_ERR_INVALID);
    CHECK(work == NULL);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    call.kind = DTRAIN_CALL_BARRIER;
    call.counts = NULL;
    CHECK_EQ(dtrain_start(world, &call, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "calls between fuse_begin and fuse_end cannot be asynchronous");
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK(work == NULL);
}

TEST(what_cannot_be_started_says_so)
{
    dtrain_work *work;
    dtrain_call call;
    memset(&call, 0, sizeof call);
    call.kind = DTRAIN_CALL_BARRIER;
    everywhere(2, misuse);
    CHECK_EQ(dtrain_start(NULL, &call, &work), DTRAIN_ERR_INVALID);
}

/* An object that needs results at once, on a group in a fuse: it is refused, and changes nothing. */
static void objects_in_a_fuse(dtrain_comm *world)
{
    float weight = 1, grad = 3;
    dtrain_param table[1];
    double total = 7;
    memset(table, 0, sizeof table);
    table[0].name = "w";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = 1;
    table[0].data = &weight;
    table[0].grad = &grad;
    dtrain_aggregator plain = dtrain_aggregator_all_reduce(world);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(plain.aggregate(plain.self, table, 1, 1.0, &total), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "aggregate on rank");
    CHECK(grad == 3 && (int)total == 7);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK_EQ(plain.aggregate(plain.self, table, 1, 1.0, &total), DTRAIN_OK);
    CHECK(grad == 3 && (int)total == 2);
}

TEST(an_aggregator_in_a_fuse_is_refused)
{
    everywhere(2, objects_in_a_fuse);
}

/* In a world of one, compressed sums of DDP and a resync use the caller's group. */
TEST(objects_of_one_rank_refuse_a_fuse_as_well)
{
    float weights[100] = {0}, grads[100];
    dtrain_param table[1];
    dtrain_comm *world = NULL;
    dtrain_ddp *ddp = NULL;
    dtrain_compress_desc compress;
    dtrain_ddp_desc desc;
    void *buffers[1] = {weights};
    size_t bytes[1] = {sizeof weights};
    uint64_t step = 3;
    memset(table, 0, sizeof table);
    memset(&compress, 0, sizeof compress);
    memset(&desc, 0, sizeof desc);
    table[0].name = "w";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = 100;
    table[0].data = weights;
    table[0].grad = grads;
    compress.kind = DTRAIN_COMPRESS_INT8;
    desc.compress = &compress;
    CHECK_EQ(dtrain_comm_create(&world, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_create(&ddp, world, table, 1, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_begin(ddp, 1, 1.0), DTRAIN_OK);
    for (int i = 0; i < 100; i++)
        grads[i] = 2;
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "cannot be fused; call fuse_end first");
    CHECK_EQ(dtrain_resync(world, step, buffers, bytes, 1, &step), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
    CHECK(grads[99] > 1.9f && grads[99] < 2.1f);
    CHECK_EQ(dtrain_resync(world, step, buffers, bytes, 1, &step), DTRAIN_OK);
    dtrain_ddp_destroy(ddp);
    dtrain_comm_destroy(world);
}
