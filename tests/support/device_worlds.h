/* Ranks with fake devices, as threads or as processes, and collectives of theirs beside the CPU's on the same numbers.
 * All memory is counted. */
#ifndef DEVICE_WORLDS_H
#define DEVICE_WORLDS_H
#pragma GCC diagnostic ignored "-Wunused-function" /* no test uses all of it */
#include "async_device.h"
#include "processes.h"

enum { DG_MANY = 8, DG_ALL_REDUCE = 0, DG_REDUCE_SCATTER, DG_ALL_GATHER, DG_BROADCAST, DG_KINDS };
enum { DG_REDUCE_SCATTER_V = DG_KINDS, DG_ALL_GATHER_V };

static long resizes;
static size_t resized_bytes; /* in use */

void *hook_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    __atomic_add_fetch(&resizes, new_bytes > 0, __ATOMIC_SEQ_CST);
    if (new_bytes > 0 && posix_memalign(&block, align < sizeof(void *) ? sizeof(void *) : align, new_bytes) != 0)
        return NULL;
    if (block != NULL && pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    __atomic_add_fetch(&resized_bytes, new_bytes - old_bytes, __ATOMIC_SEQ_CST);
    return block;
}

typedef struct dg_world dg_world;

typedef struct dg_rank {
    dg_world *world;
    dtrain_comm *comm;
    dtrain_device_group *group;
    async_device fake;
    dtrain_device *device;
    int rank, size;
} dg_rank;

struct dg_world {
    int ranks;
    unsigned without; /* bit r: rank r has no device */
    dtrain_device_group_desc desc;
    dtrain_comm_desc comm;
    uint64_t seed;
    unsigned delay_us;
    int alone; /* 1: the body makes the group itself */
    void (*body)(dg_rank *r);
    dg_rank rank[DG_MANY];
    dtrain_status status[DG_MANY]; /* for a body to leave its own */
    char text[DG_MANY][512];
    int64_t number;     /* the body's own */
    unsigned behind_us; /* rank 0's queue rests so long before each call */
};

static void dg_device_begin(dg_world *w, int rank)
{
    dg_rank *r = &w->rank[rank];
    r->device = NULL;
    if (!(w->without >> rank & 1))
        r->device = async_begin(&r->fake, rank, w->seed, w->delay_us);
}

static void dg_device_end(dg_rank *r)
{
    if (r->device != NULL)
        async_end(&r->fake);
}

static dtrain_status dg_create(dg_rank *r)
{
    return dtrain_device_group_create(&r->group, r->comm, r->device, &r->world->desc);
}

static void dg_join(dg_world *w, dtrain_comm *comm)
{
    dg_rank *r = &w->rank[dtrain_comm_rank(comm)];
    r->world = w;
    r->comm = comm;
    r->group = NULL;
    r->rank = dtrain_comm_rank(comm);
    r->size = dtrain_comm_size(comm);
    if (!w->alone && dg_create(r) != DTRAIN_OK)
        TEST_FAIL("rank %d of %d: %s", r->rank, r->size, dtrain_last_error());
    else
        w->body(r);
    dtrain_device_group_destroy(r->group);
}

static dtrain_status dg_thread(dtrain_comm *comm, void *user)
{
    dg_join((dg_world *)user, comm);
    return DTRAIN_OK;
}

static int dg_process(dtrain_comm *comm, scene *s)
{
    dg_world *w = (dg_world *)s->user;
    dg_device_begin(w, dtrain_comm_rank(comm));
    dg_join(w, comm);
    dg_device_end(&w->rank[dtrain_comm_rank(comm)]);
    return 0;
}

/* The body on threads of this process, each with a device of its own. */
static void dg_on_threads(dg_world *w)
{
    size_t before = resized_bytes;
    for (int rank = 0; rank < w->ranks; rank++)
        dg_device_begin(w, rank);
    dtrain_status status = dtrain_run_threads(w->ranks, dg_thread, w, &w->comm);
    if (status != DTRAIN_OK)
        TEST_FAIL("%d ranks, seed %llu: %s", w->ranks, (unsigned long long)w->seed, dtrain_last_error());
    for (int rank = 0; rank < w->ranks; rank++)
        if (w->rank[rank].device != NULL)
            async_idle(&w->rank[rank].fake);
    for (int rank = 0; rank < w->ranks; rank++)
        dg_device_end(&w->rank[rank]);
    CHECK_EQ(resized_bytes, before);
}

/* The body on processes over TCP. */
static void dg_on_processes(dg_world *w)
{
    scene s;
    scene_begin(&s, w->ranks, 1);
    s.user = w;
    if (w->comm.timeout_ms != 0)
        s.desc = w->comm;
    run_ranks(&s, dg_process);
}

static dg_world dg_new(int ranks, dtrain_device_mode mode, void (*body)(dg_rank *r))
{
    dg_world w;
    memset(&w, 0, sizeof w);
    w.ranks = ranks;
    w.desc.mode = mode;
    w.desc.chunk_bytes = mode == DTRAIN_DEVICE_STAGED ? 262144 : 0;
    w.desc.slots = mode == DTRAIN_DEVICE_STAGED ? 2 : 0;
    w.comm.timeout_ms = test_ms(30000);
    w.delay_us = 60;
    w.seed = 1;
    w.body = body;
    return w;
}

/* Memory of the rank's device, or of the CPU where it has none. */
static char *dg_alloc(dg_rank *r, size_t bytes)
{
    void *made = NULL;
    CHECK_EQ(dtrain_device_alloc(r->device, DTRAIN_MEMORY_DEVICE, bytes, &made), DTRAIN_OK);
    return (char *)made;
}

static void dg_free(dg_rank *r, void *memory)
{
    dtrain_device_free(r->device, DTRAIN_MEMORY_DEVICE, memory);
}

static uint64_t dg_mix(uint64_t x)
{
    x = (x + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 29) * 0x94d049bb133111ebu;
    return x ^ x >> 32;
}

/* Numbers whose sum depends on the order; floats of many magnitudes, no NaN; integers of all bits. They repeat after a
 * prime number, which no chunk or shard is a multiple of. */
static void dg_numbers(void *to, dtrain_dtype dtype, size_t count, uint64_t seed)
{
    size_t width = dtrain_dtype_bits(dtype) / 8, period = count < 8191 ? count : 8191;
    for (size_t i = 0; i < period; i++) {
        uint64_t bits = dg_mix(seed * 1000003 + i);
        double number = ((double)(bits % 20001) - 10000) * 0.37 * (double)(1u << (bits >> 32) % 12);
        float narrow = (float)number;
        if (dtype == DTRAIN_F64)
            memcpy((char *)to + i * 8, &number, 8);
        else if (dtype == DTRAIN_F32)
            memcpy((char *)to + i * 4, &narrow, 4);
        else if (dtype == DTRAIN_BF16)
            CHECK_EQ(dtrain_convert(&narrow, DTRAIN_F32, (char *)to + i * 2, DTRAIN_BF16, 1), DTRAIN_OK);
        else
            memcpy((char *)to + i * width, &bits, width < 8 ? width : 8);
    }
    for (size_t i = period; i < count; i += period)
        memcpy((char *)to + i * width, to, (count - i < period ? count - i : period) * width);
}

typedef struct dg_call {
    int kind;
    dtrain_dtype dtype;
    dtrain_op op;
    size_t count;
    int root;
    const size_t *counts, *offsets; /* of the forms that end in _V, which lie within count elements */
} dg_call;

/* The collective of the group; of the CPU without one. */
static dtrain_status dg_do(dtrain_comm *comm, dtrain_device_group *group, const dg_call *c, const void *in, void *out)
{
    if (group == NULL)
        switch (c->kind) {
        case DG_ALL_REDUCE: return dtrain_all_reduce(comm, in, out, c->count, c->dtype, c->op);
        case DG_REDUCE_SCATTER: return dtrain_reduce_scatter(comm, in, out, c->count, c->dtype, c->op);
        case DG_ALL_GATHER: return dtrain_all_gather(comm, in, out, c->count, c->dtype);
        case DG_REDUCE_SCATTER_V: return dtrain_reduce_scatter_v(comm, in, out, c->counts, c->offsets, c->dtype, c->op);
        case DG_ALL_GATHER_V: return dtrain_all_gather_v(comm, in, out, c->counts, c->offsets, c->dtype);
        default: return dtrain_broadcast(comm, out, c->count, c->dtype, c->root);
        }
    switch (c->kind) {
    case DG_ALL_REDUCE: return dtrain_device_group_all_reduce(group, in, out, c->count, c->dtype, c->op);
    case DG_REDUCE_SCATTER: return dtrain_device_group_reduce_scatter(group, in, out, c->count, c->dtype, c->op);
    case DG_ALL_GATHER: return dtrain_device_group_all_gather(group, in, out, c->count, c->dtype);
    case DG_REDUCE_SCATTER_V:
        return dtrain_device_group_reduce_scatter_v(group, in, out, c->counts, c->offsets, c->dtype, c->op);
    case DG_ALL_GATHER_V: return dtrain_device_group_all_gather_v(group, in, out, c->counts, c->offsets, c->dtype);
    default: return dtrain_device_group_broadcast(group, out, c->count, c->dtype, c->root);
    }
}

/* Shards of any length, up to `most` elements: every third draw all of one rank's, else a third of them empty. Returns
 * their sum. */
__attribute__((unused)) static size_t dg_counts(size_t *counts, int ranks, size_t most, uint64_t draw)
{
    size_t sum = 0;
    for (int rank = 0; rank < ranks; rank++) {
        uint64_t own = dg_mix(draw * 64 + (uint64_t)rank);
        counts[rank] = own % 3 == 0 ? 0 : (size_t)(own / 3 % (most + 1));
        if (draw % 3 == 0)
            counts[rank] = (uint64_t)rank == draw / 3 % (uint64_t)ranks ? most : 0;
        sum += counts[rank];
    }
    return sum;
}

/* How a call lies in two buffers: in the first from one place on, in the second, or in place, from another. */
typedef struct dg_place {
    size_t in, out; /* bytes */
    int in_place;
} dg_place;

static void dg_pointers(const dg_rank *r, const dg_call *c, const dg_place *p, char *a, char *b, const char **in,
                        char **out)
{
    size_t begin, width = dtrain_dtype_bits(c->dtype) / 8;
    dtrain_shard(r->comm, c->count, r->rank, &begin);
    if (c->kind == DG_REDUCE_SCATTER_V || c->kind == DG_ALL_GATHER_V) {
        begin = 0;
        for (int rank = 0; rank < r->rank; rank++)
            begin += c->counts[rank];
        begin = c->offsets != NULL ? c->offsets[r->rank] : begin;
    }
    *in = a + p->in;
    *out = p->in_place ? a + p->in : b + p->out;
    if (p->in_place && (c->kind == DG_REDUCE_SCATTER || c->kind == DG_REDUCE_SCATTER_V))
        *out += begin * width;
    if (p->in_place && (c->kind == DG_ALL_GATHER || c->kind == DG_ALL_GATHER_V))
        *in += begin * width;
}

static long dg_first_difference(const char *got, const char *expected, size_t bytes)
{
    for (size_t i = 0; memcmp(got, expected, bytes) != 0 && i < bytes; i++)
        if (got[i] != expected[i])
            return (long)i;
    return -1;
}

#endif
