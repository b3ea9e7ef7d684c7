/* Collectives of a group of devices a call at a time, each beside the CPU's on the same numbers. */
#ifndef DEVICE_BITS_H
#define DEVICE_BITS_H
#include "device_worlds.h"

enum { EDGE = 64 };

typedef struct pair {
    char *device[2], *host[2], *back;
    size_t bytes;
} pair;

static void pair_begin(dg_rank *r, pair *p, size_t bytes)
{
    p->bytes = bytes + 2 * EDGE;
    p->back = (char *)malloc(p->bytes);
    for (int i = 0; i < 2; i++) {
        p->device[i] = dg_alloc(r, p->bytes);
        p->host[i] = (char *)malloc(p->bytes);
    }
}

static void pair_end(dg_rank *r, pair *p)
{
    for (int i = 0; i < 2; i++) {
        dg_free(r, p->device[i]);
        free(p->host[i]);
    }
    free(p->back);
}

/* Runs a call over the devices and over the CPU's memory; all bytes of both buffers must be the same after it, those
 * around the numbers and those of an input included. */
static void same_bits(dg_rank *r, pair *p, const dg_call *c, const dg_place *place, uint64_t seed)
{
    static const char *const modes[] = {"staged", "events", "flags", "hosts"};
    const char *in;
    char *out;
    size_t bytes = c->count * (dtrain_dtype_bits(c->dtype) / 8) + EDGE;
    for (int i = 0; i < 2; i++) {
        memset(p->host[i], 0xc3 + i, bytes);
        dg_numbers(p->host[i] + (i == 0 ? place->in : place->out), c->dtype, c->count,
                   seed * 64 + (uint64_t)(r->rank * 2 + i));
        CHECK_EQ(dtrain_device_copy(r->device, p->device[i], p->host[i], bytes), DTRAIN_OK);
    }
    dg_pointers(r, c, place, p->host[0], p->host[1], &in, &out);
    CHECK_EQ(dg_do(r->comm, NULL, c, in, out), DTRAIN_OK);
    dg_pointers(r, c, place, p->device[0], p->device[1], &in, &out);
    if (dg_do(r->comm, r->group, c, in, out) != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", r->rank, dtrain_last_error());
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(dtrain_device_copy(r->device, p->back, p->device[i], bytes), DTRAIN_OK);
        long at = dg_first_difference(p->back, p->host[i], bytes);
        if (at >= 0)
            TEST_FAIL("%s, rank %d of %d, call %d of %zu %s, op %d, root %d, %s, at %zu and %zu: byte %ld of buffer "
                      "%d differs",
                      modes[dtrain_device_group_mode(r->group) - DTRAIN_DEVICE_STAGED], r->rank, r->size, c->kind,
                      c->count, dtrain_dtype_name(c->dtype), (int)c->op, c->root,
                      place->in_place ? "in place" : "apart", place->in, place->out, at, i);
    }
}

/* A call of this count with the rest drawn. */
static void drawn_call(dg_rank *r, pair *p, int kind, size_t count, uint64_t seed)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F64, DTRAIN_I64};
    static const dtrain_op ops[] = {DTRAIN_SUM, DTRAIN_MEAN, DTRAIN_MAX, DTRAIN_MIN};
    uint64_t draw = dg_mix(seed * 64 + count * 4 + (uint64_t)kind);
    dg_call c = {kind, dtypes[draw % 4], ops[draw / 4 % 4], count, (int)(draw / 16 % (uint64_t)r->size), NULL, NULL};
    dg_place place = {(size_t)(draw / 128 % 8), (size_t)(draw / 1024 % 8), (int)(draw / 8192 % 2)};
    if (c.dtype == DTRAIN_I64 && c.op == DTRAIN_MEAN)
        c.op = DTRAIN_SUM;
    if (kind >= DG_ALL_GATHER && draw / 16384 % 4 == 0)
        c.dtype = draw / 65536 % 2 ? DTRAIN_U8 : DTRAIN_C64;
    same_bits(r, p, &c, &place, draw);
}

static void every_small_count(dg_rank *r)
{
    pair p;
    pair_begin(r, &p, 8 * 64);
    for (size_t count = 0; count < 65; count++)
        for (int kind = 0; kind < DG_KINDS; kind++)
            drawn_call(r, &p, kind, count, r->world->seed + count % 3);
    pair_end(r, &p);
}

/* A chunk's elements and one more or less, more than two slots of them, and many. */
static void large_counts(dg_rank *r)
{
    static const size_t counts[] = {1000, 65537, 100003, 200003};
    pair p;
    pair_begin(r, &p, 8 * 200003);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int kind = 0; kind < DG_KINDS; kind++)
            drawn_call(r, &p, kind, counts[i], r->world->seed + i);
    pair_end(r, &p);
}

/* Shards that the caller cuts: equal, empty, all of one rank, of a few elements and of several chunks; one after the
 * other, or from the last rank's to the first's with a gap before each. */
static void cut_shards(dg_rank *r)
{
    enum { MOST = 40009 };
    static const size_t most[] = {0, 1, 3, 17, 300, MOST};
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F64, DTRAIN_I64, DTRAIN_U8};
    static const dtrain_op ops[] = {DTRAIN_SUM, DTRAIN_MEAN, DTRAIN_MAX, DTRAIN_MIN};
    size_t counts[DG_MANY], offsets[DG_MANY];
    pair p;
    pair_begin(r, &p, (size_t)r->size * 8 * (MOST + 5));
    for (int i = 0; i < 60; i++) {
        uint64_t draw = dg_mix(r->world->seed * 64 + (uint64_t)i);
        size_t sum = dg_counts(counts, r->size, most[i % 6], draw % 999), next = 0;
        int apart = i / 24 % 2;
        for (int rank = r->size - 1; rank >= 0; rank--) {
            offsets[rank] = next + 5;
            next = offsets[rank] + counts[rank];
        }
        dg_call c = {i / 6 % 2 == 0 ? DG_REDUCE_SCATTER_V : DG_ALL_GATHER_V,
                     dtypes[draw / 1024 % 5],
                     ops[draw / 8192 % 4],
                     apart ? next : sum,
                     0,
                     counts,
                     apart ? offsets : NULL};
        dg_place place = {(size_t)(draw / 65536 % 8), (size_t)(draw / 524288 % 8), i / 12 % 2};
        if ((c.dtype == DTRAIN_I64 || c.dtype == DTRAIN_U8) && c.op == DTRAIN_MEAN)
            c.op = DTRAIN_SUM;
        same_bits(r, &p, &c, &place, draw);
    }
    pair_end(r, &p);
}

static void small_and_large(dg_rank *r)
{
    every_small_count(r);
    large_counts(r);
    cut_shards(r);
}

#endif
