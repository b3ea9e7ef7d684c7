/* ---- >>cuda-fold ----
 * The reduction of >>fold. Element i of n inputs becomes one value in the tree order, stored to m outputs. A thread
 * reads all inputs of its elements before it writes one. Float sums and products follow the tree. One, two, four and
 * eight inputs are unrolled. Any other number goes eight at a time, under a binary counter of partial results, which
 * gives the same tree. Operations that are exact in any order (integers, least and greatest) fold from left to right.
 */
#ifndef DTRAIN__CUDA_FOLD
#define DTRAIN__CUDA_FOLD
#include "walk.cu"
#include "convert.cu"
#include "flags.cu"

#define DTRAIN__CUDA_FOLD_MOST 64 /* most inputs, and most outputs */

/* How a sum is finished. A division by a power of two is a product, which rounds the same. */
enum { DTRAIN__CUDA_FOLD_AS_IS, DTRAIN__CUDA_FOLD_MULTIPLY, DTRAIN__CUDA_FOLD_DIVIDE };

typedef struct dtrain__cuda_fold {
    const void *in[DTRAIN__CUDA_FOLD_MOST];
    void *out[DTRAIN__CUDA_FOLD_MOST];
    dtrain__cuda_walk walk;
    int n, m, op, finish;
    double by_f64;
    float by_f32;
    uint32_t flip; /* 1: signed integers */
} dtrain__cuda_fold;

/* Eight floats of 16 bits as float32: the low halves of four words, and the high ones. */
typedef struct dtrain__cuda_wide {
    dtrain__cuda_vector low, high;
} dtrain__cuda_wide;

DTRAIN__CUDA_FN uint64_t dtrain__cuda_lane_u64(dtrain__cuda_vector v, int lane)
{
    return v.word[2 * lane] | (uint64_t)v.word[2 * lane + 1] << 32;
}

DTRAIN__CUDA_FN void dtrain__cuda_lane_u64_set(dtrain__cuda_vector *v, int lane, uint64_t bits)
{
    v->word[2 * lane] = (uint32_t)bits;
    v->word[2 * lane + 1] = (uint32_t)(bits >> 32);
}

DTRAIN__CUDA_FN double dtrain__cuda_lane_f64(dtrain__cuda_vector v, int lane)
{
    return dtrain__cuda_double_of(dtrain__cuda_lane_u64(v, lane));
}

DTRAIN__CUDA_FN void dtrain__cuda_lane_f64_set(dtrain__cuda_vector *v, int lane, double x)
{
    dtrain__cuda_lane_u64_set(v, lane, dtrain__cuda_bits_f64(x));
}

/* ---- a op b, lane by lane ---- */

/* Gives r, whose words are each `expression` of a and b, the words of left and right. */
#define DTRAIN__CUDA_WORDS(expression) \
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) \
    { \
        uint32_t a = left.word[i], b = right.word[i]; \
        r.word[i] = expression; \
    }

#define DTRAIN__CUDA_LONGS(expression) \
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++) \
    { \
        uint64_t a = dtrain__cuda_lane_u64(left, i), b = dtrain__cuda_lane_u64(right, i); \
        dtrain__cuda_lane_u64_set(&r, i, expression); \
    }

/* Sums and products of floats. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_join_f32(int op, dtrain__cuda_vector left, dtrain__cuda_vector right)
{
    dtrain__cuda_vector r;
    if (op == DTRAIN_PROD)
        DTRAIN__CUDA_WORDS(
            dtrain__cuda_bits_f32(dtrain__cuda_mul_f32(dtrain__cuda_float_of(a), dtrain__cuda_float_of(b))))
    else
        DTRAIN__CUDA_WORDS(
            dtrain__cuda_bits_f32(dtrain__cuda_add_f32(dtrain__cuda_float_of(a), dtrain__cuda_float_of(b))))
    return r;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_join_f64(int op, dtrain__cuda_vector left, dtrain__cuda_vector right)
{
    dtrain__cuda_vector r;
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++)
    {
        double a = dtrain__cuda_lane_f64(left, i), b = dtrain__cuda_lane_f64(right, i);
        dtrain__cuda_lane_f64_set(&r, i, op == DTRAIN_PROD ? dtrain__cuda_mul_f64(a, b) : dtrain__cuda_add_f64(a, b));
    }
    return r;
}

DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_join_wide(int op, dtrain__cuda_wide left, dtrain__cuda_wide right)
{
    dtrain__cuda_wide r;
    r.low = dtrain__cuda_join_f32(op, left.low, right.low);
    r.high = dtrain__cuda_join_f32(op, left.high, right.high);
    return r;
}

/* Compares by bits: -0 is below +0, and a NaN before all. */
#define DTRAIN__CUDA_LEAST(kind, type, int_type, top, infinity, lanes) \
    DTRAIN__CUDA_FN type dtrain__cuda_pick_##kind(int op, type a, type b) \
    { \
        const type size = ((type)1 << (top)) - 1; \
        int_type left = (int_type)(a ^ (a >> (top)) * size), right = (int_type)(b ^ (b >> (top)) * size); \
        if ((a & size) > (infinity)) \
            return a; \
        if ((b & size) > (infinity)) \
            return b; \
        return (op == DTRAIN_MIN ? left < right : left > right) ? a : b; \
    } \
    DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_least_##kind(int op, uint32_t flip, dtrain__cuda_vector left, \
                                                                  dtrain__cuda_vector right) \
    { \
        dtrain__cuda_vector r; \
        (void)flip; \
        lanes(dtrain__cuda_pick_##kind(op, a, b)) \
        return r; \
    }

DTRAIN__CUDA_LEAST(f32, uint32_t, int32_t, 31, 0x7f800000u, DTRAIN__CUDA_WORDS)
DTRAIN__CUDA_LEAST(f64, uint64_t, int64_t, 63, 0x7ff0000000000000u, DTRAIN__CUDA_LONGS)

DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_least_wide(int op, uint32_t flip, dtrain__cuda_wide left,
                                                          dtrain__cuda_wide right)
{
    dtrain__cuda_wide r;
    r.low = dtrain__cuda_least_f32(op, flip, left.low, right.low);
    r.high = dtrain__cuda_least_f32(op, flip, left.high, right.high);
    return r;
}

/* Integers. flip maps the order of signed ones to that of unsigned ones. */
#define DTRAIN__CUDA_INTS(name, type, top, lanes) \
    DTRAIN__CUDA_FN dtrain__cuda_vector name(int op, uint32_t flip, dtrain__cuda_vector left, \
                                             dtrain__cuda_vector right) \
    { \
        dtrain__cuda_vector r; \
        type sign = (type)flip << (top); \
        switch (op) { \
        case DTRAIN_SUM: lanes(a + b) break; \
        case DTRAIN_PROD: lanes(a *b) break; \
        case DTRAIN_MIN: lanes((a ^ sign) < (b ^ sign) ? a : b) break; \
        case DTRAIN_MAX: lanes((a ^ sign) > (b ^ sign) ? a : b) break; \
        case DTRAIN_AND: lanes(a &b) break; \
        case DTRAIN_OR: lanes(a | b) break; \
        default: lanes(a ^ b) \
        } \
        return r; \
    }

DTRAIN__CUDA_INTS(dtrain__cuda_join_u32, uint32_t, 31, DTRAIN__CUDA_WORDS)
DTRAIN__CUDA_INTS(dtrain__cuda_join_u64, uint64_t, 63, DTRAIN__CUDA_LONGS)

/* Combines the four bytes of a word. */
DTRAIN__CUDA_FN uint32_t dtrain__cuda_bytes(int op, uint32_t flip, uint32_t left, uint32_t right)
{
    uint32_t r = 0, sign = flip << 7;
    if (op == DTRAIN_SUM) /* seven bits of each, which do not carry into the next, and the eighth without a carry */
        return ((left & 0x7f7f7f7fu) + (right & 0x7f7f7f7fu)) ^ ((left ^ right) & 0x80808080u);
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 32; i += 8)
    {
        uint32_t a = left >> i & 0xffu, b = right >> i & 0xffu;
        uint32_t below = (a ^ sign) < (b ^ sign), one = below == (uint32_t)(op == DTRAIN_MIN) ? a : b;
        r |= (op == DTRAIN_PROD ? a * b & 0xffu : one) << i;
    }
    return r;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_join_u8(int op, uint32_t flip, dtrain__cuda_vector left,
                                                         dtrain__cuda_vector right)
{
    dtrain__cuda_vector r;
    if (op >= DTRAIN_AND)
        return dtrain__cuda_join_u32(op, 0, left, right);
    DTRAIN__CUDA_WORDS(dtrain__cuda_bytes(op, flip, a, b))
    return r;
}

/* ---- into partial results, and out of them ---- */

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_same(dtrain__cuda_vector v)
{
    return v;
}

/* Returns x[i] * by, each product rounded. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_times_f32(dtrain__cuda_vector v, float by)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] =
        dtrain__cuda_bits_f32(dtrain__cuda_mul_f32(dtrain__cuda_float_of(v.word[i]), by));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_times_wide(dtrain__cuda_wide v, float by)
{
    v.low = dtrain__cuda_times_f32(v.low, by);
    v.high = dtrain__cuda_times_f32(v.high, by);
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_times_f64(dtrain__cuda_vector v, double by)
{
    DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++)
        dtrain__cuda_lane_f64_set(&v, i, dtrain__cuda_mul_f64(dtrain__cuda_lane_f64(v, i), by));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_same(const dtrain__cuda_fold *args, dtrain__cuda_vector v)
{
    (void)args;
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_f32(const dtrain__cuda_fold *args, dtrain__cuda_vector v)
{
    if (args->finish == DTRAIN__CUDA_FOLD_MULTIPLY)
        return dtrain__cuda_times_f32(v, args->by_f32);
    if (args->finish == DTRAIN__CUDA_FOLD_DIVIDE)
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] =
            dtrain__cuda_bits_f32(dtrain__cuda_div_f32(dtrain__cuda_float_of(v.word[i]), args->by_f32));
    return v;
}

DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_f64(const dtrain__cuda_fold *args, dtrain__cuda_vector v)
{
    if (args->finish == DTRAIN__CUDA_FOLD_MULTIPLY)
        return dtrain__cuda_times_f64(v, args->by_f64);
    if (args->finish == DTRAIN__CUDA_FOLD_DIVIDE)
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 2; i++)
            dtrain__cuda_lane_f64_set(&v, i, dtrain__cuda_div_f64(dtrain__cuda_lane_f64(v, i), args->by_f64));
    return v;
}

/* Floats of 16 bits: widens them to float32, rounds them back, and finishes them. */
#define DTRAIN__CUDA_HALVES(kind) \
    DTRAIN__CUDA_FN dtrain__cuda_wide dtrain__cuda_partial_##kind(dtrain__cuda_vector v) \
    { \
        dtrain__cuda_wide wide; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) \
        { \
            wide.low.word[i] = dtrain__cuda_bits_f32(dtrain__cuda_low_##kind(v.word[i])); \
            wide.high.word[i] = dtrain__cuda_bits_f32(dtrain__cuda_high_##kind(v.word[i])); \
        } \
        return wide; \
    } \
    DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_rounded_##kind(dtrain__cuda_wide w) \
    { \
        dtrain__cuda_vector v; \
        DTRAIN__CUDA_UNROLL for (int i = 0; i < 4; i++) v.word[i] = \
            dtrain__cuda_both_##kind(dtrain__cuda_float_of(w.low.word[i]), dtrain__cuda_float_of(w.high.word[i])); \
        return v; \
    } \
    DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_finish_##kind(const dtrain__cuda_fold *args, dtrain__cuda_wide w) \
    { \
        w.low = dtrain__cuda_finish_f32(args, w.low); \
        w.high = dtrain__cuda_finish_f32(args, w.high); \
        return dtrain__cuda_rounded_##kind(w); \
    }

DTRAIN__CUDA_HALVES(f16)
DTRAIN__CUDA_HALVES(bf16)

DTRAIN__CUDA_FN void dtrain__cuda_fold_store(const dtrain__cuda_fold *args, size_t element, size_t width, int whole,
                                             dtrain__cuda_vector v)
{
    for (int k = 0; k < args->m; k++)
        dtrain__cuda_store(args->out[k], element, width, whole, v);
}

/* ---- kernels ---- */

#define DTRAIN__CUDA_FOLD_PHASES 6 /* phases of a fold between two rounds of flags */

typedef struct dtrain__cuda_fold_flags {
    dtrain__cuda_fold fold;
    dtrain__cuda_flags flags;
    int at_once;
} dtrain__cuda_fold_flags;

/* Defines the kernel `name` of a fold, and name_flags, which does it between two rounds of flags. Threads hold
 * name_held. */
#define DTRAIN__CUDA_FOLD_KERNELS(name, lanes, unroll) \
    DTRAIN__CUDA_WALK_KERNEL(name, dtrain__cuda_fold, name##_held, lanes, unroll) \
    typedef struct name##_kept { \
        name##_held group, single; \
    } name##_kept; \
    DTRAIN__CUDA_FN void name##_flags_body(const dtrain__cuda_fold_flags *args, dtrain__cuda_at at, \
                                           dtrain__cuda_flags_block *shared, name##_kept *own, int phase) \
    { \
        const dtrain__cuda_fold *fold = &args->fold; \
        size_t i = at.block * at.threads + at.thread, groups = fold->walk.groups, head = fold->walk.head; \
        size_t element = head + i * (lanes), alone = i < head ? i : i + groups * (lanes); \
        if (phase == 0) \
            dtrain__cuda_flags_begin(&args->flags, at, &shared->stop); \
        else if (shared->stop) \
            return; \
        else if (phase == 1 || phase == 4) \
            dtrain__cuda_flags_await(&args->flags, at, phase == 4, &shared->stop); \
        else if (phase == 3) \
            dtrain__cuda_flags_signal(&args->flags, at, 1); \
        else if (phase == 2 && !args->at_once) \
            name##_body(fold, at, NULL, NULL, 0); \
        else if (phase == 2) { \
            if (i < groups) \
                own->group = name##_load(fold, element, 1); \
            if (i < fold->walk.singles) \
                own->single = name##_load(fold, alone, 0); \
        } else if (args->at_once) { \
            if (i < groups) \
                name##_store(fold, element, 1, &own->group); \
            if (i < fold->walk.singles) \
                name##_store(fold, alone, 0, &own->single); \
        } \
    } \
    DTRAIN__CUDA_TOGETHER(name##_flags, dtrain__cuda_fold_flags, dtrain__cuda_flags_block, name##_kept, \
                          DTRAIN__CUDA_THREADS, DTRAIN__CUDA_FOLD_PHASES)

/* Does the same for a fold whose threads hold its result. */
#define DTRAIN__CUDA_FOLD_HELD(name, wide, finish, width) \
    typedef wide name##_held; \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_fold *args, size_t element, int whole, const wide *held) \
    { \
        dtrain__cuda_fold_store(args, element, width, whole, finish(args, *held)); \
    } \
    DTRAIN__CUDA_FOLD_KERNELS(name, 16 / (width), 1)

/* Sums of `inputs` (1, 2, 4 or 8) inputs. */
#define DTRAIN__CUDA_FOLD_FIXED(name, inputs, unroll, wide, partial, join, finish, width) \
    typedef struct name##_held { \
        dtrain__cuda_vector in[inputs]; \
    } name##_held; \
    DTRAIN__CUDA_FN name##_held name##_load(const dtrain__cuda_fold *args, size_t element, int whole) \
    { \
        name##_held held; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < (inputs); k++) held.in[k] = \
            dtrain__cuda_load(args->in[k], element, width, whole); \
        return held; \
    } \
    DTRAIN__CUDA_FN void name##_store(const dtrain__cuda_fold *args, size_t element, int whole, \
                                      const name##_held *held) \
    { \
        wide part[inputs]; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < (inputs); k++) part[k] = partial(held->in[k]); \
        DTRAIN__CUDA_UNROLL for (int step = 1; step < (inputs); step *= 2) \
            DTRAIN__CUDA_UNROLL for (int k = 0; k + step < (inputs); k += 2 * step) part[k] = \
                join(DTRAIN_SUM, part[k], part[k + step]); \
        dtrain__cuda_fold_store(args, element, width, whole, finish(args, part[0])); \
    } \
    DTRAIN__CUDA_FOLD_KERNELS(name, 16 / (width), unroll)

/* Sums and products of any number of inputs. Partial results p8, p16 and p32 stand for that many inputs. The bits of
 * the number of eights say which of them are held. At the end the smaller joins the larger before it. */
#define DTRAIN__CUDA_FOLD_TREE(name, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FN wide name##_eight(const dtrain__cuda_fold *args, int from, size_t element, int whole) \
    { \
        dtrain__cuda_vector in[8]; \
        wide part[8]; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < 8; k++) in[k] = \
            dtrain__cuda_load(args->in[from + k], element, width, whole); \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < 8; k++) part[k] = partial(in[k]); \
        DTRAIN__CUDA_UNROLL for (int step = 1; step < 8; step *= 2) \
            DTRAIN__CUDA_UNROLL for (int k = 0; k + step < 8; k += 2 * step) part[k] = \
                join(args->op, part[k], part[k + step]); \
        return part[0]; \
    } \
    /* 1 to 7 inputs: four, then two, then one of them. The first stands in for those that do not exist. */ \
    DTRAIN__CUDA_FN wide name##_rest(const dtrain__cuda_fold *args, int from, int some, size_t element, int whole) \
    { \
        dtrain__cuda_vector in[7]; \
        wide four, two, one; \
        int op = args->op; \
        DTRAIN__CUDA_UNROLL for (int k = 0; k < 7; k++) \
        { \
            int has = some & (k < 4 ? 4 : k < 6 ? 2 : 1), at = k < 4 ? k : k < 6 ? (some & 4) + k - 4 : some & 6; \
            in[k] = dtrain__cuda_load(args->in[from + (has ? at : 0)], element, width, whole); \
        } \
        four = join(op, join(op, partial(in[0]), partial(in[1])), join(op, partial(in[2]), partial(in[3]))); \
        two = join(op, partial(in[4]), partial(in[5])); \
        one = partial(in[6]); \
        if (some & 2) \
            one = some & 1 ? join(op, two, one) : two; \
        if (some & 4) \
            one = some & 3 ? join(op, four, one) : four; \
        return one; \
    } \
    DTRAIN__CUDA_FN wide name##_load(const dtrain__cuda_fold *args, size_t element, int whole) \
    { \
        int eights = args->n / 8, some = args->n % 8, op = args->op, has = some != 0; \
        wide p, p8, p16, p32; \
        memset(&p8, 0, sizeof p8); \
        p = p16 = p32 = p8; \
        for (int k = 0; k < eights; k++) { \
            p = name##_eight(args, 8 * k, element, whole); \
            if (k & 1) \
                p = join(op, p8, p); \
            if ((k & 3) == 3) \
                p = join(op, p16, p); \
            if ((k & 7) == 7) \
                p = join(op, p32, p); \
            p8 = (k & 1) == 0 ? p : p8; \
            p16 = (k & 3) == 1 ? p : p16; \
            p32 = (k & 7) == 3 ? p : p32; \
        } \
        if (has) \
            p = name##_rest(args, 8 * eights, some, element, whole); \
        if (eights & 1) \
            p = has ? join(op, p8, p) : p8; \
        has |= eights & 1; \
        if (eights & 2) \
            p = has ? join(op, p16, p) : p16; \
        has |= eights & 2; \
        if (eights & 4) \
            p = has ? join(op, p32, p) : p32; \
        return p; \
    } \
    DTRAIN__CUDA_FOLD_HELD(name, wide, finish, width)

/* Operations exact in any order: four inputs at a time, from left to right. */
#define DTRAIN__CUDA_FOLD_ROW(name, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FN wide name##_load(const dtrain__cuda_fold *args, size_t element, int whole) \
    { \
        wide p = partial(dtrain__cuda_load(args->in[0], element, width, whole)); \
        for (int from = 1; from < args->n; from += 4) { \
            dtrain__cuda_vector in[4]; \
            DTRAIN__CUDA_UNROLL for (int k = 0; k < 4; k++) in[k] = \
                dtrain__cuda_load(args->in[from + k < args->n ? from + k : 0], element, width, whole); \
            DTRAIN__CUDA_UNROLL for (int k = 0; k < 4; k++) if (from + k < args->n) p = \
                join(args->op, args->flip, p, partial(in[k])); \
        } \
        return p; \
    } \
    DTRAIN__CUDA_FOLD_HELD(name, wide, finish, width)

/* A thread loads this many groups before it stores the first; the number of inputs times this are in flight. */
#define DTRAIN__CUDA_FOLD_SUMS(name, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_1, 1, 4, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_2, 2, 4, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_4, 4, 2, wide, partial, join, finish, width) \
    DTRAIN__CUDA_FOLD_FIXED(name##_8, 8, 1, wide, partial, join, finish, width)

DTRAIN__CUDA_FOLD_SUMS(dtrain__cuda_sum_f32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_f32,
                       dtrain__cuda_finish_f32, 4)
DTRAIN__CUDA_FOLD_SUMS(dtrain__cuda_sum_f16, dtrain__cuda_wide, dtrain__cuda_partial_f16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_f16, 2)
DTRAIN__CUDA_FOLD_SUMS(dtrain__cuda_sum_bf16, dtrain__cuda_wide, dtrain__cuda_partial_bf16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_bf16, 2)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_f64, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_f64,
                       dtrain__cuda_finish_f64, 8)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_f32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_f32,
                       dtrain__cuda_finish_f32, 4)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_f16, dtrain__cuda_wide, dtrain__cuda_partial_f16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_f16, 2)
DTRAIN__CUDA_FOLD_TREE(dtrain__cuda_tree_bf16, dtrain__cuda_wide, dtrain__cuda_partial_bf16, dtrain__cuda_join_wide,
                       dtrain__cuda_finish_bf16, 2)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_f64, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_least_f64,
                      dtrain__cuda_finish_same, 8)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_f32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_least_f32,
                      dtrain__cuda_finish_same, 4)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_f16, dtrain__cuda_wide, dtrain__cuda_partial_f16, dtrain__cuda_least_wide,
                      dtrain__cuda_finish_f16, 2)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_bf16, dtrain__cuda_wide, dtrain__cuda_partial_bf16, dtrain__cuda_least_wide,
                      dtrain__cuda_finish_bf16, 2)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_u8, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_u8,
                      dtrain__cuda_finish_same, 1)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_u32, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_u32,
                      dtrain__cuda_finish_same, 4)
DTRAIN__CUDA_FOLD_ROW(dtrain__cuda_row_u64, dtrain__cuda_vector, dtrain__cuda_same, dtrain__cuda_join_u64,
                      dtrain__cuda_finish_same, 8)

/* ---- the operation ---- */

/* In place of a number of inputs: any number by the tree, or in a row. */
enum { DTRAIN__CUDA_FOLD_BY_TREE = -2, DTRAIN__CUDA_FOLD_IN_A_ROW = -1 };

/* All folds, as each(name, dtype, inputs). Signed integers go as unsigned ones. */
#define DTRAIN__CUDA_FOLD_EACH(each) \
    each(dtrain__cuda_sum_f32_1, DTRAIN_F32, 1) each(dtrain__cuda_sum_f32_2, DTRAIN_F32, 2) \
    each(dtrain__cuda_sum_f32_4, DTRAIN_F32, 4) each(dtrain__cuda_sum_f32_8, DTRAIN_F32, 8) \
    each(dtrain__cuda_sum_f16_1, DTRAIN_F16, 1) each(dtrain__cuda_sum_f16_2, DTRAIN_F16, 2) \
    each(dtrain__cuda_sum_f16_4, DTRAIN_F16, 4) each(dtrain__cuda_sum_f16_8, DTRAIN_F16, 8) \
    each(dtrain__cuda_sum_bf16_1, DTRAIN_BF16, 1) each(dtrain__cuda_sum_bf16_2, DTRAIN_BF16, 2) \
    each(dtrain__cuda_sum_bf16_4, DTRAIN_BF16, 4) each(dtrain__cuda_sum_bf16_8, DTRAIN_BF16, 8) \
    each(dtrain__cuda_tree_f64, DTRAIN_F64, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_tree_f32, DTRAIN_F32, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_tree_f16, DTRAIN_F16, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_tree_bf16, DTRAIN_BF16, DTRAIN__CUDA_FOLD_BY_TREE) \
    each(dtrain__cuda_row_f64, DTRAIN_F64, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_f32, DTRAIN_F32, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_f16, DTRAIN_F16, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_bf16, DTRAIN_BF16, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_u8, DTRAIN_U8, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_u32, DTRAIN_U32, DTRAIN__CUDA_FOLD_IN_A_ROW) \
    each(dtrain__cuda_row_u64, DTRAIN_U64, DTRAIN__CUDA_FOLD_IN_A_ROW)

typedef dtrain_status (*dtrain__cuda_flags_launch)(dtrain_device *device, const char *call, size_t blocks,
                                                   const dtrain__cuda_fold_flags *args);

typedef struct dtrain__cuda_fold_kernel {
    dtrain_dtype dtype;
    int inputs;
    dtrain_status (*walk)(dtrain_device *device, const char *call, const dtrain__cuda_fold *args);
    dtrain__cuda_flags_launch flags;
} dtrain__cuda_fold_kernel;

/* Finds the kernel of an operation on n inputs: for sums the one of that number, if there is one. */
static const dtrain__cuda_fold_kernel *dtrain__cuda_fold_find(dtrain_dtype dtype, dtrain_op op, int n)
{
#define DTRAIN__CUDA_FOLD_ENTRY(name, dtype, inputs) {dtype, inputs, name##_walk, name##_flags_launch},
    static const dtrain__cuda_fold_kernel kernels[] = {DTRAIN__CUDA_FOLD_EACH(DTRAIN__CUDA_FOLD_ENTRY)};
#undef DTRAIN__CUDA_FOLD_ENTRY
    const int ways[] = {n, DTRAIN__CUDA_FOLD_BY_TREE, DTRAIN__CUDA_FOLD_IN_A_ROW};
    for (int way = op == DTRAIN_SUM ? 0 : op == DTRAIN_PROD ? 1 : 2; way < 3; way++)
        for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
            if (kernels[i].dtype == dtype && kernels[i].inputs == ways[way])
                return &kernels[i];
    return NULL;
}

/* Says how a mean is finished. A power of two is recognised by its bits; its inverse must also be normal. */
static void dtrain__cuda_fold_finish(dtrain__cuda_fold *args, dtrain_dtype dtype, double divisor)
{
    uint64_t bits;
    memcpy(&bits, &divisor, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023, most = dtype == DTRAIN_F64 ? 1022 : 126; /* larger if negative */
    args->finish = DTRAIN__CUDA_FOLD_DIVIDE;
    if (bits << 12 == 0 && exponent >= -most && exponent <= most) {
        args->finish = exponent == 0 ? DTRAIN__CUDA_FOLD_AS_IS : DTRAIN__CUDA_FOLD_MULTIPLY;
        bits = (uint64_t)(1023 - exponent) << 52;
        memcpy(&divisor, &bits, sizeof bits);
    }
    args->by_f64 = divisor;
    /* does not depend on the CPU's floating-point mode */
    DTRAIN_IGNORE(dtrain_convert(&divisor, DTRAIN_F64, &args->by_f32, DTRAIN_F32, 1));
}

/* Takes over one of a list of arrays, which may be of other GPUs. */
static dtrain_status dtrain__cuda_fold_pointers(dtrain_device *device, const char *what, const void *const *list, int n,
                                                size_t width, size_t begin, size_t count, const void **taken,
                                                uint32_t *heads)
{
    dtrain_status status = DTRAIN_OK;
    for (int k = 0; k < n && status == DTRAIN_OK; k++) {
        taken[k] = (const unsigned char *)list[k] + begin * width;
        *heads &= dtrain__cuda_heads(taken[k], width, 16 / width);
        status = dtrain__cuda_memory(device, "device_reduce", what, taken[k], count * width, 1);
    }
    return status;
}

/* Makes the arguments of a reduction, also of an empty one, and chooses its kernel. */
static dtrain_status dtrain__cuda_fold_make(dtrain_device *device, dtrain__cuda_fold *args, dtrain_dtype dtype,
                                            dtrain_op op, double divisor, const void *const *in, int n,
                                            void *const *out, int m, size_t begin, size_t count,
                                            const dtrain__cuda_fold_kernel **kernel)
{
    dtrain_dtype bits = dtype == DTRAIN_I8    ? DTRAIN_U8
                        : dtype == DTRAIN_I32 ? DTRAIN_U32
                        : dtype == DTRAIN_I64 ? DTRAIN_U64
                                              : dtype;
    size_t width = dtrain_dtype_bits(dtype) / 8;
    uint32_t heads = ~(uint32_t)0;
    memset(args, 0, sizeof *args);
    args->n = n;
    args->m = m;
    args->op = (int)(op == DTRAIN_MEAN ? DTRAIN_SUM : op);
    args->flip = bits != dtype;
    *kernel = dtrain__cuda_fold_find(bits, (dtrain_op)args->op, n);
    if (op == DTRAIN_MEAN)
        dtrain__cuda_fold_finish(args, dtype, divisor);
    dtrain_status status =
        dtrain__cuda_fold_pointers(device, "an input", in, n, width, begin, count, args->in, &heads);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_fold_pointers(device, "an output", (const void *const *)out, m, width, begin, count,
                                            (const void **)args->out, &heads);
    args->walk = dtrain__cuda_walk_make(heads, 16 / width, count);
    return status;
}

static dtrain_status dtrain__cuda_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op, double divisor,
                                         const void *const *in, int n, void *const *out, int m, size_t begin,
                                         size_t count)
{
    const dtrain__cuda_fold_kernel *kernel;
    dtrain__cuda_fold args;
    dtrain_status status =
        dtrain__cuda_fold_make(device, &args, dtype, op, divisor, in, n, out, m, begin, count, &kernel);
    return status == DTRAIN_OK ? kernel->walk(device, "device_reduce", &args) : status;
}

/* ---- between flags ---- */

/* Reports one block a processor. They are resident with any kernel, as these take 256 threads and hardly any shared
 * memory. */
static dtrain_status dtrain__cuda_flag_traits(dtrain_device *device, dtrain_device_flag_traits *traits)
{
    dtrain__cuda_queue *queue = dtrain__cuda_queue_of(device);
    int domain = 0, bus = 0, slot = 0;
    cudaError_t error = cudaDeviceGetAttribute(&domain, cudaDevAttrPciDomainId, queue->index);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, queue->index);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&slot, cudaDevAttrPciDeviceId, queue->index);
    traits->identity = (uint64_t)(uint32_t)domain << 32 | (uint64_t)(uint32_t)bus << 8 | (uint64_t)(uint32_t)slot;
    traits->blocks = queue->processors;
    traits->block_bytes = DTRAIN__CUDA_THREADS * sizeof(dtrain__cuda_vector);
    return dtrain__cuda_status(device, "device_flag_traits", error);
}

/* Makes the kernel's arguments, and chooses the kernel. */
static dtrain_status dtrain__cuda_flags_make(dtrain_device *device, const dtrain_device_flags *part,
                                             dtrain__cuda_fold_flags *args, dtrain__cuda_flags_launch *launch)
{
    const dtrain__cuda_fold_kernel *kernel;
    memset(&args->flags, 0, sizeof args->flags);
    args->at_once = part->at_once;
    args->flags.deadline_ns = part->deadline_ns;
    args->flags.epoch = part->epoch;
    args->flags.rank = part->rank;
    args->flags.ranks = part->ranks;
    for (int rank = 0; rank < part->ranks; rank++) {
        args->flags.words[rank] = part->words[rank];
        args->flags.errors[rank] = part->errors[rank];
    }
    dtrain_status status = dtrain__cuda_fold_make(device, &args->fold, part->dtype, part->op, (double)part->n, part->in,
                                                  part->n, part->out, part->m, part->begin, part->count, &kernel);
    *launch = kernel->flags;
    return status;
}

static dtrain_status dtrain__cuda_flags_run(dtrain_device *device, const dtrain_device_flags *part)
{
    const char *call = "device_flags";
    dtrain__cuda_flags_launch launch;
    dtrain__cuda_fold_flags args;
    dtrain_status status = DTRAIN_OK;
    for (int rank = 0; rank < part->ranks && status == DTRAIN_OK; rank++)
        status = dtrain__cuda_memory(device, call, "the words of a rank", part->words[rank], sizeof(uint32_t), 1);
    if (status == DTRAIN_OK)
        status = dtrain__cuda_flags_make(device, part, &args, &launch);
    return status == DTRAIN_OK ? launch(device, call, (size_t)part->blocks, &args) : status;
}

#endif
