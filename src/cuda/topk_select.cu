/* ---- >>cuda-topk-select ----
 * Finds the k-th largest key in the lists of >>cuda-topk, or in the vector if the lists do not hold it. It does so by
 * 11, 10 and 10 bits from the top. For each a kernel counts keys by these bits. Then each chunk of tiles is counted:
 * keys above the k-th, and equal to it. Of the equal ones the first are taken. Last, each chunk is written at the place
 * that the counts of the chunks before it give. Every kernel reads either source by the same code, and no block waits
 * for another. */
#ifndef DTRAIN__CUDA_TOPK_SELECT
#define DTRAIN__CUDA_TOPK_SELECT
#include "topk.cu"

/* The keys: positions first to end of data, counted from the last multiple of 16 bytes before it. */
typedef struct dtrain__cuda_topk_source {
    const float *data;
    size_t first, end;
} dtrain__cuda_topk_source;

typedef struct dtrain__cuda_topk_find_shared {
    uint32_t sums[DTRAIN__CUDA_TOPK_THREADS], groups[16];
    dtrain__cuda_topk_search found;
} dtrain__cuda_topk_find_shared;

typedef struct dtrain__cuda_topk_aim_shared {
    uint32_t bins[1024];
    dtrain__cuda_topk_find_shared find;
    dtrain__cuda_topk_search upper;
    uint32_t last;
} dtrain__cuda_topk_aim_shared;

typedef struct dtrain__cuda_topk_bins_shared {
    uint32_t bins[DTRAIN__CUDA_TOPK_BINS];
    dtrain__cuda_topk_find_shared find;
} dtrain__cuda_topk_bins_shared;

typedef struct dtrain__cuda_topk_chunk_shared {
    uint64_t parts[DTRAIN__CUDA_TOPK_THREADS], groups[16];
    uint64_t before[DTRAIN__CUDA_TOPK_THREADS], befores[16];
    dtrain__cuda_topk_find_shared find;
} dtrain__cuda_topk_chunk_shared;

/* A thread's part of a tile, as positions of a source. */
typedef struct dtrain__cuda_topk_part {
    size_t begin, end;
} dtrain__cuda_topk_part;

DTRAIN__CUDA_FN int dtrain__cuda_topk_listed(const dtrain__cuda_topk_args *args)
{
    return args->state->passed >= args->k && args->state->passed <= args->room;
}

DTRAIN__CUDA_FN dtrain__cuda_topk_source dtrain__cuda_topk_source_of(const dtrain__cuda_topk_args *args, int listed)
{
    dtrain__cuda_topk_source source = {args->data, args->first, args->end};
    if (listed) {
        source.data = args->listed_values;
        source.first = 0;
        source.end = args->room;
    }
    return source;
}

/* Finds the next bits of the key from the counts of a level, in phases 0 to 2; known: the bits found before. Each
 * thread has 8 bins from the top on, or 4 of the 1024 of later levels. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_find(const uint32_t *bins, dtrain__cuda_topk_search known, dtrain__cuda_at at,
                                            dtrain__cuda_topk_find_shared *shared, int level, int phase)
{
    uint32_t each = level == 0 ? 8 : 4, bin = each * (DTRAIN__CUDA_TOPK_THREADS - at.thread) - 1;
    if (phase == 0) {
        uint32_t sum = 0;
        for (uint32_t i = 0; i < each; i++)
            sum += bins[bin - i];
        shared->sums[at.thread] = sum;
    } else if (phase == 1) {
        uint32_t sum = 0;
        for (uint32_t i = 0; at.thread < 16 && i < 16; i++)
            sum += shared->sums[16 * at.thread + i];
        if (at.thread < 16)
            shared->groups[at.thread] = sum;
    } else {
        uint32_t left = known.left, above = 0;
        for (uint32_t i = 0; i < at.thread / 16; i++)
            above += shared->groups[i];
        for (uint32_t i = at.thread / 16 * 16; i < at.thread; i++)
            above += shared->sums[i];
        if (above >= left || left - above > shared->sums[at.thread])
            return;
        left -= above;
        for (; left > bins[bin]; bin--)
            left -= bins[bin];
        shared->found.prefix = level == 0 ? bin : known.prefix << 10 | bin;
        shared->found.left = left;
    }
}

/* Does the same as the kernels after a level. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_find_level(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_find_shared *shared, int level, int phase)
{
    dtrain__cuda_topk_search known = {0, (uint32_t)args->k};
    if (level > 0)
        known = args->state->search[level - 1];
    dtrain__cuda_topk_find(args->state->bins[level], known, at, shared, level, phase);
}

/* Returns the number of elements in the sample. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_sample(const dtrain__cuda_topk_args *args)
{
    size_t quarter = (args->count + 3) / 4;
    return quarter < DTRAIN__CUDA_TOPK_SAMPLE ? (uint32_t)quarter : DTRAIN__CUDA_TOPK_SAMPLE;
}

/* Returns the place in the sample of a key that k of all should pass: 4 deviations below that of k. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_place(const dtrain__cuda_topk_args *args)
{
    uint32_t sample = dtrain__cuda_topk_sample(args);
    uint32_t expected = (uint32_t)((uint64_t)args->k * sample / args->count), root = 0;
    for (uint32_t bit = 128; bit > 0; bit /= 2)
        root += (root + bit) * (root + bit) <= expected ? bit : 0;
    uint32_t place = expected + 4 * root + 8;
    return place < sample ? place : sample;
}

/* Counts the upper bits of a sampled key. The vector is cut into equal pieces, and one key of each is taken, at a place
 * that no pattern of the data follows. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_look(const dtrain__cuda_topk_args *args, dtrain__cuda_at at)
{
    uint32_t sample = dtrain__cuda_topk_sample(args), i = (uint32_t)at.block * at.threads + at.thread;
    uint32_t random = (i + 1) * 0x9E3779B9u;
    if (i >= sample)
        return;
    size_t piece = args->count / sample;
    random = (random ^ random >> 15) * 0x85EBCA6Bu;
    size_t from = i * piece + (size_t)((uint64_t)(random ^ random >> 13) * piece >> 32);
    float x = args->data[from];
    if (args->add != NULL)
        x = dtrain__cuda_add_f32(x, args->add[from]);
    uint32_t key = dtrain__cuda_topk_key(dtrain__cuda_bits_f32(x));
    args->sample[i] = key;
    dtrain__cuda_atomic_add_u32(args->state->bins[0] + (key >> 20), 1);
}

/* The bits of a key that a level knows, and those that it finds. */
typedef struct dtrain__cuda_topk_level {
    uint32_t known, prefix, shift, mask;
} dtrain__cuda_topk_level;

/* Counts 4 keys from position `at` on, if the source has them. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_count4(uint32_t *bins, dtrain__cuda_topk_level level,
                                              dtrain__cuda_topk_source source, dtrain__cuda_vector v, size_t at)
{
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t key = dtrain__cuda_topk_key(v.word[j]);
        if (at + j >= source.first && at + j < source.end && key >> level.known == level.prefix)
            dtrain__cuda_atomic_add_u32(bins + (key >> level.shift & level.mask), 1);
    }
}

/* Returns whether one of 4 keys has the known bits. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_any(dtrain__cuda_topk_level level, dtrain__cuda_vector v)
{
    uint32_t any = 0;
    for (int j = 0; j < 4; j++)
        any |= (uint32_t)(dtrain__cuda_topk_key(v.word[j]) >> level.known == level.prefix);
    return any;
}

/* Counts the keys of a source that have the known bits, by the bits of a level. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_count_source(uint32_t *bins, dtrain__cuda_topk_level level,
                                                    dtrain__cuda_topk_source source, dtrain__cuda_at at)
{
    dtrain__cuda_topk_source all = {source.data, 0, 4}; /* what is whole needs no look at the ends */
    size_t step = 4 * at.blocks * at.threads, i = 4 * (at.block * at.threads + at.thread);
    if (i < source.first) { /* what follows is whole, except at the end */
        dtrain__cuda_topk_count4(bins, level, source, dtrain__cuda_topk_load(source.data, i, source.first, source.end),
                                 i);
        i += step;
    }
    for (; i + 3 * step + 4 <= source.end; i += 4 * step) {
        const dtrain__cuda_vector *from = (const dtrain__cuda_vector *)(source.data + (i - source.first));
        dtrain__cuda_vector v[4];
        uint32_t any = 0;
        /* The branch comes after all four loads, so that they are in flight together. */
        for (size_t j = 0; j < 4; j++)
            v[j] = from[step / 4 * j];
        for (int j = 0; j < 4; j++)
            any |= dtrain__cuda_topk_any(level, v[j]);
        for (int j = 0; any != 0 && j < 4; j++)
            dtrain__cuda_topk_count4(bins, level, all, v[j], 0);
    }
    for (; i < source.end; i += step)
        dtrain__cuda_topk_count4(bins, level, source, dtrain__cuda_topk_load(source.data, i, source.first, source.end),
                                 i);
}

/* Finds the upper 21 bits of the key: some from the blocks' counts, the rest from the keys that share those. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_aim_at(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                              dtrain__cuda_topk_aim_shared *shared, int phase)
{
    dtrain__cuda_topk_search known = {0, dtrain__cuda_topk_place(args)};
    if (phase < 3) {
        dtrain__cuda_topk_find(args->state->bins[0], known, at, &shared->find, 0, phase);
    } else if (phase == 3) {
        if (at.thread == 0)
            shared->upper = shared->find.found;
        dtrain__cuda_topk_level level = {20, shared->find.found.prefix, 10, 1023};
        dtrain__cuda_topk_source keys = {(const float *)args->sample, 0, dtrain__cuda_topk_sample(args)};
        dtrain__cuda_at alone = {0, 1, at.thread, at.threads};
        dtrain__cuda_topk_count_source(shared->bins, level, keys, alone);
    } else {
        dtrain__cuda_topk_find(shared->bins, shared->upper, at, &shared->find, 1, phase - 4);
    }
}

/* The last block to sample finds the bar from all samples. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_aim_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                dtrain__cuda_topk_aim_shared *shared, dtrain__cuda_none *own, int phase)
{
    (void)own;
    if (phase == 0) {
        for (uint32_t i = at.thread; i < 1024; i += at.threads)
            shared->bins[i] = 0;
        dtrain__cuda_topk_look(args, at);
        dtrain__cuda_topk_fence();
    } else if (phase == 1) {
        if (at.thread == 0) {
            shared->last = dtrain__cuda_atomic_add_u32(&args->state->sampled, 1) + 1 == at.blocks;
            dtrain__cuda_topk_fence();
        }
    } else if (!shared->last) {
        return;
    } else if (phase < 9) {
        dtrain__cuda_topk_aim_at(args, at, shared, phase - 2);
    } else {
        uint32_t bar = shared->find.found.prefix << 10;
        for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            args->state->bins[0][i] = 0;
        if (at.thread > 0)
            return;
        args->state->sampled = 0;
        args->state->bar = args->bar != 0 ? args->bar : bar > 0 ? bar : 1;
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_aim, dtrain__cuda_topk_args, dtrain__cuda_topk_aim_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 10)

/* Counts the keys of the source that have the known bits, by the bits of a level. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_count_bins(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_bins_shared *shared)
{
    int listed = dtrain__cuda_topk_listed(args);
    dtrain__cuda_topk_level level = {31, 0, 20, 2047};
    if (args->level > 0) {
        level.known = args->level == 1 ? 20 : 10;
        level.prefix = shared->find.found.prefix;
        level.shift = level.known - 10;
        level.mask = 1023;
    }
    dtrain__cuda_topk_source source = dtrain__cuda_topk_source_of(args, listed);
    source.end = listed ? args->state->passed : source.end;
    dtrain__cuda_topk_count_source(shared->bins, level, source, at);
}

/* Block 0 also keeps what was found, and clears what this step will add to. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_keep(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                            const dtrain__cuda_topk_bins_shared *shared)
{
    if (at.block > 0)
        return;
    if (args->level == 0)
        args->state->spans[at.thread % DTRAIN__CUDA_TOPK_SPANS] = 0;
    else if (at.thread == 0)
        args->state->search[args->level - 1] = shared->find.found;
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_bins_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                 dtrain__cuda_topk_bins_shared *shared, dtrain__cuda_none *own,
                                                 int phase)
{
    (void)own;
    if (dtrain__cuda_topk_listed(args)) { /* fewer blocks have fewer bins to add */
        size_t enough = args->state->passed / DTRAIN__CUDA_TOPK_EACH + 1;
        at.blocks = at.blocks < enough ? at.blocks : enough;
    }
    if (at.block >= at.blocks)
        return;
    if (phase == 0) {
        for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            shared->bins[i] = 0;
    }
    if (phase < 3) {
        if (args->level > 0)
            dtrain__cuda_topk_find_level(args, at, &shared->find, args->level - 1, phase);
    } else if (phase == 3) {
        dtrain__cuda_topk_keep(args, at, shared);
        dtrain__cuda_topk_count_bins(args, at, shared);
    } else {
        for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            if (shared->bins[i] != 0)
                dtrain__cuda_atomic_add_u32(args->state->bins[args->level] + i, shared->bins[i]);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_bins, dtrain__cuda_topk_args, dtrain__cuda_topk_bins_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 5)

/* Returns a thread's part of a chunk. Threads come in the order of the elements. */
DTRAIN__CUDA_FN dtrain__cuda_topk_part dtrain__cuda_topk_part_of(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                                 int listed)
{
    size_t tile = at.block * DTRAIN__CUDA_TOPK_TILES + at.thread / DTRAIN__CUDA_TOPK_PARTS;
    uint64_t part = at.thread % DTRAIN__CUDA_TOPK_PARTS;
    dtrain__cuda_topk_part its = {0, 0};
    if (tile >= args->tiles)
        return its;
    if (listed) {
        dtrain__cuda_topk_run run = args->runs[tile];
        its.begin = (size_t)(run.start + run.count * part / DTRAIN__CUDA_TOPK_PARTS);
        its.end = (size_t)(run.start + run.count * (part + 1) / DTRAIN__CUDA_TOPK_PARTS);
        return its;
    }
    its.begin = tile * DTRAIN__CUDA_TOPK_TILE + (size_t)part * (DTRAIN__CUDA_TOPK_TILE / DTRAIN__CUDA_TOPK_PARTS);
    its.end = its.begin + DTRAIN__CUDA_TOPK_TILE / DTRAIN__CUDA_TOPK_PARTS;
    its.begin = its.begin > args->first ? its.begin : args->first;
    its.end = its.end < args->end ? its.end : args->end;
    return its;
}

/* Returns the keys of a part above the k-th, plus 2^32 times the keys equal to it. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_topk_count_part(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                      uint32_t least)
{
    int listed = dtrain__cuda_topk_listed(args);
    dtrain__cuda_topk_source source = dtrain__cuda_topk_source_of(args, listed);
    dtrain__cuda_topk_part part = dtrain__cuda_topk_part_of(args, at, listed);
    uint64_t counts = 0;
    source.end = listed ? args->state->passed : source.end;
    for (size_t i = part.begin / 4 * 4; i < part.end; i += 4) {
        dtrain__cuda_vector v = dtrain__cuda_topk_load(source.data, i, source.first, source.end);
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t key = dtrain__cuda_topk_key(v.word[j]);
            if (i + j >= part.begin && i + j < part.end)
                counts += (uint64_t)(key > least) + ((uint64_t)(key == least) << 32);
        }
    }
    return counts;
}

/* Keeps here what the last kernel needs, as it clears the rest for the next step. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_settle(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                              dtrain__cuda_topk_search found)
{
    if (at.block > 0)
        return;
    for (uint32_t i = at.thread; i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
        args->state->bins[0][i] = args->state->bins[1][i] = 0;
    if (at.thread > 0)
        return;
    args->state->search[2] = found;
    args->state->listed = (uint32_t)dtrain__cuda_topk_listed(args);
}

DTRAIN__CUDA_FN size_t dtrain__cuda_topk_span(const dtrain__cuda_topk_args *args)
{
    return (args->chunks + DTRAIN__CUDA_TOPK_SPANS - 1) / DTRAIN__CUDA_TOPK_SPANS;
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_sum16(const uint64_t *from, uint64_t *to, uint32_t thread)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < 16; i++)
        sum += from[16 * thread + i];
    to[thread] = sum;
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_count_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_chunk_shared *shared, dtrain__cuda_none *own,
                                                  int phase)
{
    (void)own;
    if (phase < 3) {
        dtrain__cuda_topk_find_level(args, at, &shared->find, 2, phase);
    } else if (phase == 3) {
        uint64_t counts = dtrain__cuda_topk_count_part(args, at, shared->find.found.prefix);
        shared->parts[at.thread] = counts;
        args->parts[at.block * at.threads + at.thread] = counts;
    } else if (phase == 4) {
        dtrain__cuda_topk_settle(args, at, shared->find.found);
        if (at.thread < 16)
            dtrain__cuda_topk_sum16(shared->parts, shared->groups, at.thread);
    } else if (at.thread == 0) {
        uint64_t total = 0;
        for (int i = 0; i < 16; i++)
            total += shared->groups[i];
        args->totals[at.block] = total;
        dtrain__cuda_atomic_add_u64(args->state->spans + at.block / dtrain__cuda_topk_span(args), total);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_count, dtrain__cuda_topk_args, dtrain__cuda_topk_chunk_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 6)

/* Returns the thread's share of the counts of all chunks before the block's. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_topk_before(const dtrain__cuda_topk_args *args, dtrain__cuda_at at)
{
    size_t each = dtrain__cuda_topk_span(args), span = at.block / each;
    uint64_t sum = at.thread < span ? args->state->spans[at.thread] : 0;
    for (size_t i = span * each + at.thread; i < at.block; i += at.threads)
        sum += args->totals[i];
    return sum;
}

/* Writes what is chosen of a part. `counts`: keys before it that are above the k-th, and equal to it. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_write(const dtrain__cuda_topk_args *args, dtrain__cuda_at at, uint64_t counts)
{
    int listed = (int)args->state->listed;
    dtrain__cuda_topk_source source = dtrain__cuda_topk_source_of(args, listed);
    dtrain__cuda_topk_part part = dtrain__cuda_topk_part_of(args, at, listed);
    uint32_t least = args->state->search[2].prefix, left = args->state->search[2].left;
    uint32_t ties = (uint32_t)(counts >> 32), taken = ties < left ? ties : left;
    size_t to = (size_t)(uint32_t)counts + taken;
    for (size_t i = part.begin / 4 * 4; i < part.end; i += 4) {
        dtrain__cuda_vector v = dtrain__cuda_topk_load(source.data, i, source.first, listed ? part.end : source.end),
                            n = v;
        if (listed) /* the load does not wait for the choice */
            n = dtrain__cuda_topk_load((const float *)args->listed_indices, i, 0, part.end);
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t key = dtrain__cuda_topk_key(v.word[j]);
            if (i + j < part.begin || i + j >= part.end || key < least || (key == least && taken == left) ||
                to == args->k) /* only if the vector is written meanwhile */
                continue;
            taken += key == least;
            args->indices[to] = listed ? n.word[j] : (uint32_t)(i + j - source.first);
            args->values[to++] = dtrain__cuda_float_of(v.word[j]);
        }
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_fill_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                 dtrain__cuda_topk_chunk_shared *shared, dtrain__cuda_none *own,
                                                 int phase)
{
    (void)own;
    if (phase == 0) {
        shared->parts[at.thread] = args->parts[at.block * at.threads + at.thread];
        shared->before[at.thread] = dtrain__cuda_topk_before(args, at);
        for (uint32_t i = at.thread; at.block == 0 && i < DTRAIN__CUDA_TOPK_BINS; i += at.threads)
            args->state->bins[2][i] = 0;
        if (at.block == 0 && at.thread == 0)
            args->state->passed = 0;
    } else if (phase == 1) {
        if (at.thread < 16)
            dtrain__cuda_topk_sum16(shared->parts, shared->groups, at.thread);
        else if (at.thread < 32)
            dtrain__cuda_topk_sum16(shared->before, shared->befores, at.thread - 16);
    } else {
        uint64_t counts = 0;
        for (int i = 0; i < 16; i++)
            counts += shared->befores[i];
        for (uint32_t i = 0; i < at.thread / 16; i++)
            counts += shared->groups[i];
        for (uint32_t i = at.thread / 16 * 16; i < at.thread; i++)
            counts += shared->parts[i];
        dtrain__cuda_topk_write(args, at, counts);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_fill, dtrain__cuda_topk_args, dtrain__cuda_topk_chunk_shared, dtrain__cuda_none,
                    DTRAIN__CUDA_TOPK_THREADS, 3)

/* What a dtrain_device_selection points to. */
typedef struct dtrain__cuda_selection {
    void *memory;
    dtrain__cuda_topk_args args; /* those that do not change from step to step */
} dtrain__cuda_selection;

static void *dtrain__cuda_topk_take(uintptr_t *at, size_t bytes)
{
    void *taken = (void *)*at;
    *at += (bytes + 255) / 256 * 256;
    return taken;
}

/* Lays out the workspace from memory on; returns its bytes. */
static size_t dtrain__cuda_topk_lay(dtrain__cuda_topk_args *args, void *memory)
{
    size_t tiles = (args->count + 3 + DTRAIN__CUDA_TOPK_TILE - 1) / DTRAIN__CUDA_TOPK_TILE;
    size_t chunks = (tiles + DTRAIN__CUDA_TOPK_TILES - 1) / DTRAIN__CUDA_TOPK_TILES;
    size_t parts = chunks * DTRAIN__CUDA_TOPK_THREADS, room = args->room;
    uintptr_t at = (uintptr_t)memory;
    args->state = (dtrain__cuda_topk_state *)dtrain__cuda_topk_take(&at, sizeof *args->state);
    args->runs = (dtrain__cuda_topk_run *)dtrain__cuda_topk_take(&at, tiles * sizeof *args->runs);
    args->sample = (uint32_t *)dtrain__cuda_topk_take(&at, DTRAIN__CUDA_TOPK_SAMPLE * sizeof *args->sample);
    args->totals = (uint64_t *)dtrain__cuda_topk_take(&at, chunks * sizeof *args->totals);
    args->parts = (uint64_t *)dtrain__cuda_topk_take(&at, parts * sizeof *args->parts);
    args->listed_indices = (uint32_t *)dtrain__cuda_topk_take(&at, room * sizeof *args->listed_indices);
    args->listed_values = (float *)dtrain__cuda_topk_take(&at, room * sizeof *args->listed_values);
    return (size_t)(at - (uintptr_t)memory);
}

static dtrain_status dtrain__cuda_selection_create(dtrain_device *device, size_t count, size_t k,
                                                   dtrain_device_selection **made)
{
    size_t room = count / 64 + k + k / 2;
    uint32_t zero = 0;
    dtrain__cuda_selection *selection = (dtrain__cuda_selection *)calloc(1, sizeof *selection);
    *made = NULL;
    if (selection == NULL)
        return dtrain_error_set(DTRAIN_ERR_MEMORY, "device_selection_create: no memory for %zu bytes",
                                sizeof *selection);
    selection->args.count = count;
    selection->args.k = k;
    selection->args.room = room < count ? room : count;
    size_t bytes = dtrain__cuda_topk_lay(&selection->args, NULL);
    dtrain_status status = device->ops->allocate(device, DTRAIN_MEMORY_DEVICE, bytes, &selection->memory);
    if (status == DTRAIN_OK)
        status = device->ops->fill(device, selection->memory, &zero, sizeof zero,
                                   sizeof(dtrain__cuda_topk_state) / sizeof zero);
    if (status != DTRAIN_OK) {
        if (selection->memory != NULL)
            device->ops->release(device, DTRAIN_MEMORY_DEVICE, selection->memory);
        free(selection);
        return status;
    }
    dtrain__cuda_topk_lay(&selection->args, selection->memory);
    *made = (dtrain_device_selection *)selection;
    return DTRAIN_OK;
}

static void dtrain__cuda_selection_destroy(dtrain_device *device, dtrain_device_selection *selection)
{
    device->ops->release(device, DTRAIN_MEMORY_DEVICE, ((dtrain__cuda_selection *)selection)->memory);
    free(selection);
}

/* Launches the kernels of a step, in order. */
static dtrain_status dtrain__cuda_topk_launch(dtrain_device *device, dtrain__cuda_topk_args *args)
{
    const char *call = "device_select";
    size_t blocks = 4 * (size_t)dtrain__cuda_queue_of(device)->processors;
    size_t most = args->tiles * DTRAIN__CUDA_TOPK_VECTORS;
    size_t most_samples = DTRAIN__CUDA_TOPK_SAMPLE / DTRAIN__CUDA_TOPK_THREADS;
    size_t samples = (args->count + 4 * DTRAIN__CUDA_TOPK_THREADS - 1) / (4 * DTRAIN__CUDA_TOPK_THREADS);
    dtrain_status status = DTRAIN_OK;
    blocks = blocks < most ? blocks : most;
    samples = samples < most_samples ? samples : most_samples;
    if (args->k > 0)
        status = dtrain__cuda_topk_aim_launch(device, call, samples, args);
    if (status == DTRAIN_OK && args->count > 0 && (args->k > 0 || args->add != NULL))
        status = dtrain__cuda_topk_collect_launch(device, call, args->tiles, args);
    if (args->k == 0)
        return status;
    for (args->level = 0; status == DTRAIN_OK && args->level < 3; args->level++)
        status = dtrain__cuda_topk_bins_launch(device, call, blocks, args);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_topk_count_launch(device, call, args->chunks, args);
    return status == DTRAIN_OK ? dtrain__cuda_topk_fill_launch(device, call, args->chunks, args) : status;
}

static dtrain_status dtrain__cuda_select(dtrain_device *device, dtrain_device_selection *selection, float *sum,
                                         const float *add, uint32_t *indices, float *values)
{
    dtrain__cuda_topk_args args = ((dtrain__cuda_selection *)selection)->args;
    const dtrain__cuda_array arrays[] = {{"sum", sum, sizeof *sum, args.count, 1},
                                         {"add", add, sizeof *add, args.count, 1},
                                         {"indices", indices, sizeof *indices, args.k, 1},
                                         {"values", values, sizeof *values, args.k, 1},
                                         {NULL, NULL, 0, 0, 0}};
    dtrain_status status = dtrain__cuda_arrays(device, "device_select", arrays);
    if (status != DTRAIN_OK)
        return status;
    args.data = sum;
    args.add = add;
    args.indices = indices;
    args.values = values;
    args.first = ((uintptr_t)sum & 15) / sizeof *sum;
    args.end = args.first + args.count;
    args.tiles = (args.end + DTRAIN__CUDA_TOPK_TILE - 1) / DTRAIN__CUDA_TOPK_TILE;
    args.chunks = (args.tiles + DTRAIN__CUDA_TOPK_TILES - 1) / DTRAIN__CUDA_TOPK_TILES;
    args.add_whole = (((uintptr_t)sum ^ (uintptr_t)add) & 15) == 0;
    return dtrain__cuda_topk_launch(device, &args);
}

#endif
