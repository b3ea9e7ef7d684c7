/* ---- >>cuda-topk ----
 * The k elements of largest magnitude on a GPU, with the bits and the order of >>topk. A key is a number's bits without
 * the sign; all NaNs have one key, above infinity. A sample of the keys gives a bar that slightly more than k should
 * pass. Then the vector is read once. A block takes a tile, adds the addend, and lists in order what passes the bar.
 * The lists come in any order in one array, and are found again by their tiles; >>cuda-topk-select chooses among them.
 * If the bar was wrong, and fewer than k passed or more than there is room for, it reads the vector instead. So results
 * never depend on the bar.
 *
 * A position is an index counted from the last multiple of 16 bytes before the vector. */
#ifndef DTRAIN__CUDA_TOPK
#define DTRAIN__CUDA_TOPK
#include "fold.cu"

#define DTRAIN__CUDA_TOPK_THREADS 256
#define DTRAIN__CUDA_TOPK_VECTORS 8 /* of 4 elements, for a thread */
#define DTRAIN__CUDA_TOPK_TILE 8192u
#define DTRAIN__CUDA_TOPK_TILES 8u  /* in a chunk, which a block counts and lists */
#define DTRAIN__CUDA_TOPK_PARTS 32u /* of a tile; each of as many threads has one */
#define DTRAIN__CUDA_TOPK_BINS 2048
#define DTRAIN__CUDA_TOPK_EACH 4096u /* listed keys that a block counts, about */
#define DTRAIN__CUDA_TOPK_SAMPLE 16384u
#define DTRAIN__CUDA_TOPK_NEVER 0x80000000u /* a bar above every key */
#define DTRAIN__CUDA_TOPK_NAN 0x7F800001u

/* Groups of chunks, at most 256, so that no block adds the counts of all chunks before its own. Fewer make each longer.
 */
#ifndef DTRAIN__CUDA_TOPK_SPANS
#define DTRAIN__CUDA_TOPK_SPANS 256u
#endif

/* What is known of the k-th largest key: its upper bits, and its place among the keys that share them. */
typedef struct dtrain__cuda_topk_search {
    uint32_t prefix, left;
} dtrain__cuda_topk_search;

/* State in device memory that lasts from step to step; zero at first. */
typedef struct dtrain__cuda_topk_state {
    uint32_t bar;
    uint32_t sampled; /* number of blocks that have sampled */
    uint32_t passed;
    uint32_t listed; /* the lists hold the k largest; for the last kernel */
    dtrain__cuda_topk_search search[3];
    uint32_t bins[3][DTRAIN__CUDA_TOPK_BINS];
    uint64_t spans[DTRAIN__CUDA_TOPK_SPANS]; /* counts: keys above the k-th, plus 2^32 times the keys equal to it */
} dtrain__cuda_topk_state;

typedef struct dtrain__cuda_topk_run {
    uint32_t start, count;
} dtrain__cuda_topk_run;

/* The arguments of all kernels. */
typedef struct dtrain__cuda_topk_args {
    float *data;      /* with add: becomes the sum */
    const float *add; /* or NULL */
    size_t count, k;
    size_t first, end; /* positions of the vector */
    size_t tiles, chunks;
    dtrain__cuda_topk_state *state;
    dtrain__cuda_topk_run *runs; /* one a tile: its list */
    uint32_t *sample;            /* keys */
    uint64_t *totals, *parts;    /* counts of a chunk, and of its threads */
    uint32_t *listed_indices;    /* and values, each with room for `room` */
    float *listed_values;
    size_t room;
    uint32_t *indices;
    float *values;
    uint32_t bar;         /* the bar of every step; 0: from a sample */
    int level, add_whole; /* add_whole: add is at multiples of 16 bytes where data is */
} dtrain__cuda_topk_args;

typedef struct dtrain__cuda_topk_collect_shared {
    uint32_t words[DTRAIN__CUDA_TOPK_TILE / 32]; /* one bit an element: it passes */
    uint32_t before[DTRAIN__CUDA_TOPK_TILE / 32], groups[16];
    uint32_t start, fits;
} dtrain__cuda_topk_collect_shared;

typedef struct dtrain__cuda_topk_collect_own {
    dtrain__cuda_vector v[DTRAIN__CUDA_TOPK_VECTORS];
    uint32_t mask; /* one bit an element: it passes */
} dtrain__cuda_topk_collect_own;

DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_key(uint32_t bits)
{
    uint32_t key = bits & 0x7FFFFFFFu;
    return key < DTRAIN__CUDA_TOPK_NAN ? key : DTRAIN__CUDA_TOPK_NAN;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_ones(uint32_t word)
{
#ifdef DTRAIN_CUDA_EMULATE
    return (uint32_t)__builtin_popcount(word);
#else
    return (uint32_t)__popc(word);
#endif
}

/* Lets all blocks see what the thread has written before they see its later writes. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_fence(void)
{
#ifndef DTRAIN_CUDA_EMULATE
    __threadfence();
#endif
}

/* Loads 4 numbers from position `at` on, a multiple of 4; zeros for positions outside first and end. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_topk_load(const float *data, size_t at, size_t first, size_t end)
{
    dtrain__cuda_vector v;
    if (at >= first && at + 4 <= end)
        return *(const dtrain__cuda_vector *)(data + (at - first));
    for (size_t i = 0; i < 4; i++)
        v.word[i] = at + i >= first && at + i < end ? *(const dtrain__cuda_u32 *)(data + (at + i - first)) : 0;
    return v;
}

/* Loads four addends, all of which exist. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_topk_addend(const float *add, int whole)
{
    dtrain__cuda_vector v;
    if (whole)
        return *(const dtrain__cuda_vector *)add;
    for (int i = 0; i < 4; i++)
        v.word[i] = dtrain__cuda_bits_f32(add[i]);
    return v;
}

/* Reads a tile that lies inside the vector. All loads of a half come before its stores. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_read_whole(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                  dtrain__cuda_topk_collect_own *own)
{
    size_t from = at.block * DTRAIN__CUDA_TOPK_TILE + 4 * at.thread - args->first;
    dtrain__cuda_vector *v = (dtrain__cuda_vector *)(args->data + from);
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++)
        own->v[j] = v[j * DTRAIN__CUDA_TOPK_THREADS];
    if (args->add == NULL)
        return;
    for (int half = 0; half < DTRAIN__CUDA_TOPK_VECTORS; half += 4) {
        const float *add = args->add + from + (size_t)half * 4 * DTRAIN__CUDA_TOPK_THREADS;
        dtrain__cuda_vector more[4];
        for (int j = 0; j < 4; j++)
            more[j] = dtrain__cuda_topk_addend(add + j * 4 * DTRAIN__CUDA_TOPK_THREADS, args->add_whole);
        for (int j = 0; j < 4; j++)
            own->v[half + j] = dtrain__cuda_join_f32(DTRAIN_SUM, own->v[half + j], more[j]);
        for (int j = half; j < half + 4; j++)
            v[j * DTRAIN__CUDA_TOPK_THREADS] = own->v[j];
    }
}

/* Reads the first or the last tile. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_read_end(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                dtrain__cuda_topk_collect_own *own)
{
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++) {
        size_t from = at.block * DTRAIN__CUDA_TOPK_TILE + 4 * ((size_t)j * DTRAIN__CUDA_TOPK_THREADS + at.thread);
        own->v[j] = dtrain__cuda_topk_load(args->data, from, args->first, args->end);
        for (size_t i = 0; args->add != NULL && i < 4; i++) {
            if (from + i < args->first || from + i >= args->end)
                continue;
            float sum =
                dtrain__cuda_add_f32(dtrain__cuda_float_of(own->v[j].word[i]), args->add[from + i - args->first]);
            own->v[j].word[i] = dtrain__cuda_bits_f32(sum);
            args->data[from + i - args->first] = sum;
        }
    }
}

/* Reads a tile. Positions outside the vector read as zero, which no bar lets pass. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_read(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                            dtrain__cuda_topk_collect_own *own)
{
    size_t from = at.block * DTRAIN__CUDA_TOPK_TILE;
    uint32_t bar = args->k > 0 ? args->state->bar : DTRAIN__CUDA_TOPK_NEVER;
    if (from >= args->first && from + DTRAIN__CUDA_TOPK_TILE <= args->end)
        dtrain__cuda_topk_read_whole(args, at, own);
    else
        dtrain__cuda_topk_read_end(args, at, own);
    own->mask = 0;
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++)
        for (int i = 0; i < 4; i++)
            own->mask |= (uint32_t)((own->v[j].word[i] & 0x7FFFFFFFu) >= bar) << (4 * j + i);
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_topk_word(uint32_t thread, int j)
{
    return (uint32_t)j * (DTRAIN__CUDA_TOPK_THREADS / 8) + thread / 8;
}

/* Writes a thread's passing elements to their place in the tile's list. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_list(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                            const dtrain__cuda_topk_collect_shared *shared,
                                            const dtrain__cuda_topk_collect_own *own)
{
    for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++) {
        uint32_t passing = own->mask >> (4 * j) & 15, word = dtrain__cuda_topk_word(at.thread, j);
        if (passing == 0)
            continue;
        uint32_t lower = ((uint32_t)1 << (4 * (at.thread % 8))) - 1;
        size_t to = (size_t)shared->start + shared->groups[word / 16] + shared->before[word] +
                    dtrain__cuda_topk_ones(shared->words[word] & lower);
        size_t from =
            at.block * DTRAIN__CUDA_TOPK_TILE + 4 * ((size_t)j * DTRAIN__CUDA_TOPK_THREADS + at.thread) - args->first;
        for (uint32_t i = 0; i < 4; i++) {
            if ((passing >> i & 1) == 0)
                continue;
            args->listed_indices[to] = (uint32_t)(from + i);
            args->listed_values[to++] = dtrain__cuda_float_of(own->v[j].word[i]);
        }
    }
}

/* Takes room for the tile's list. The order of lists is open and does not matter. */
DTRAIN__CUDA_FN void dtrain__cuda_topk_reserve(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                               dtrain__cuda_topk_collect_shared *shared)
{
    uint32_t total = 0;
    for (int i = 0; i < 16; i++) {
        uint32_t its = shared->groups[i];
        shared->groups[i] = total;
        total += its;
    }
    shared->start = total > 0 ? dtrain__cuda_atomic_add_u32(&args->state->passed, total) : 0;
    shared->fits = (size_t)shared->start + total <= args->room;
    if (args->k > 0) {
        args->runs[at.block].start = shared->start;
        args->runs[at.block].count = total;
    }
}

DTRAIN__CUDA_FN void dtrain__cuda_topk_collect_body(const dtrain__cuda_topk_args *args, dtrain__cuda_at at,
                                                    dtrain__cuda_topk_collect_shared *shared,
                                                    dtrain__cuda_topk_collect_own *own, int phase)
{
    if (phase == 0) {
        shared->words[at.thread] = 0;
        dtrain__cuda_topk_read(args, at, own);
    } else if (phase == 1) {
        for (int j = 0; j < DTRAIN__CUDA_TOPK_VECTORS; j++) {
            uint32_t passing = own->mask >> (4 * j) & 15;
            if (passing != 0)
                dtrain__cuda_atomic_or_u32(shared->words + dtrain__cuda_topk_word(at.thread, j),
                                           passing << (4 * (at.thread % 8)));
        }
    } else if (phase == 2) {
        uint32_t sum = 0;
        for (uint32_t i = 16 * at.thread; at.thread < 16 && i < 16 * at.thread + 16; i++) {
            shared->before[i] = sum;
            sum += dtrain__cuda_topk_ones(shared->words[i]);
        }
        if (at.thread < 16)
            shared->groups[at.thread] = sum;
    } else if (phase == 3) {
        if (at.thread == 0)
            dtrain__cuda_topk_reserve(args, at, shared);
    } else if (shared->fits) {
        dtrain__cuda_topk_list(args, at, shared, own);
    }
}

DTRAIN__CUDA_KERNEL(dtrain__cuda_topk_collect, dtrain__cuda_topk_args, dtrain__cuda_topk_collect_shared,
                    dtrain__cuda_topk_collect_own, DTRAIN__CUDA_TOPK_THREADS, 5)

#endif
