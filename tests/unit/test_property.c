/* Every collective against an independent reference: on random calls that all ranks draw alike from a seed, over
 * every transport and algorithm. Integers wrap, floats are crafted so that sums are exact in any order, or drawn at
 * random and summed by the tree of the manual. PROPERTY_SEED=n repeats a run; PROPERTY_LARGE=1 adds vectors of more
 * than 2^31 elements, which take 5 GB. */
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include <math.h>

const size_t hook_block_bytes = 5 << 10; /* several blocks at small counts */
const size_t hook_block_alone = 12 << 10;
const size_t hook_message_chunk = 4 << 10; /* and several chunks in each */
const size_t hook_bounce_bytes = 12 << 10; /* and several rounds through bounce buffers */

#define MOST_RANKS 200

typedef enum how { ON_THREADS, ON_BARE_MESSAGES, ON_UNIX_SOCKETS, ON_TCP } how;

typedef struct stage {
    const char *name;
    how how;
    dtrain_algorithm algorithm;
    dtrain_order order;
    int any_order; /* the order of sums is not the tree's: only exact ones are compared */
    int node_ranks;
    int windows; /* buffers are of dtrain_comm_alloc, or one rank's is not */
} stage;

typedef enum kind {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    REDUCE,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    SCAN,
    EXSCAN,
    EXCHANGE,
    BARRIER,
    KINDS
} kind;

typedef struct call {
    uint64_t seed;
    kind kind;
    int uneven, in_place, exact, root, async;
    dtrain_dtype dtype;
    dtrain_op op;
    size_t count, width, shift;
    size_t counts[MOST_RANKS], offsets[MOST_RANKS];
} call;

static uint64_t seed_of_run = 1;

static uint64_t draw(uint64_t seed, uint64_t index)
{
    uint64_t z = seed * 0x9e3779b97f4a7c15u + index * 0xd1342543de82ef95u + 1;
    z = (z ^ z >> 32) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 29) * 0x94d049bb133111ebu;
    return z ^ z >> 32;
}

/* Rounds to a float of `digits` bits with least exponent `least`, ties to even; returns its value. */
static double rounded(double x, int digits, int least)
{
    int exponent;
    if (x == 0 || isnan(x) || isinf(x))
        return x;
    frexp(x, &exponent);
    exponent = exponent - 1 < least ? least : exponent - 1;
    double step = ldexp(1, exponent - digits + 1);
    return nearbyint(x / step) * step;
}

static uint16_t half_bits(double x)
{
    double value = rounded(x, 11, -14), magnitude = fabs(value);
    uint16_t sign = signbit(value) ? 0x8000u : 0;
    int exponent;
    if (isnan(value))
        return 0x7e00u;
    if (magnitude >= 65536)
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < ldexp(1, -14))
        return (uint16_t)(sign | (uint16_t)ldexp(magnitude, 24));
    frexp(magnitude, &exponent);
    return (uint16_t)(sign | (uint16_t)((exponent + 14) << 10) | ((uint16_t)ldexp(magnitude, 11 - exponent) & 0x3ffu));
}

static double half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double value = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31)
        value = mantissa != 0 ? (double)NAN : (double)INFINITY;
    return bits >> 15 ? -value : value;
}

static uint16_t bfloat_bits(double x)
{
    float value = (float)rounded(x, 8, -126);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)(bits >> 16);
}

static double bfloat_value(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static int is_float(dtrain_dtype dtype)
{
    return dtype == DTRAIN_F64 || dtype == DTRAIN_F32 || dtype == DTRAIN_F16 || dtype == DTRAIN_BF16;
}

static int is_signed(dtrain_dtype dtype)
{
    return dtype == DTRAIN_I8 || dtype == DTRAIN_I32 || dtype == DTRAIN_I64;
}

/* The float that element `index` of rank's input is, as a value of its dtype. */
static double float_value(const call *c, int rank, size_t index)
{
    uint64_t bits = draw(c->seed + (uint64_t)rank, index);
    if (c->exact && c->op == DTRAIN_PROD)
        return bits % 16 == 0 && rank < 8 ? 2 : bits & 16 ? -1 : 1;
    if (c->exact && (c->op == DTRAIN_MIN || c->op == DTRAIN_MAX) && bits % 61 == 0)
        return (double)NAN;
    if (c->exact)
        return (double)(int)(bits % 5) - 2;
    double x = ldexp((double)(int64_t)(bits >> 11), -52) - 1;
    x = c->op == DTRAIN_PROD ? 1 + x / 64 : x;
    return c->dtype == DTRAIN_F64    ? x
           : c->dtype == DTRAIN_F32  ? (double)(float)x
           : c->dtype == DTRAIN_BF16 ? bfloat_value(bfloat_bits(x))
                                     : half_value(half_bits(x));
}

static void put_float(dtrain_dtype dtype, double value, unsigned char *at)
{
    float single = (float)value;
    uint16_t narrow = dtype == DTRAIN_BF16 ? bfloat_bits(value) : half_bits(value);
    memcpy(at,
           dtype == DTRAIN_F64   ? (void *)&value
           : dtype == DTRAIN_F32 ? (void *)&single
                                 : (void *)&narrow,
           dtrain_dtype_bits(dtype) / 8);
}

static void put_integer(size_t width, uint64_t value, unsigned char *at)
{
    uint8_t one = (uint8_t)value;
    uint16_t two = (uint16_t)value;
    uint32_t four = (uint32_t)value;
    memcpy(at, width == 1 ? (void *)&one : width == 2 ? (void *)&two : width == 4 ? (void *)&four : (void *)&value, width);
}

static uint64_t get_integer(size_t width, const unsigned char *at)
{
    uint8_t one = at[0];
    uint16_t two = 0;
    uint32_t four = 0;
    uint64_t eight = 0;
    memcpy(width == 2 ? (void *)&two : width == 4 ? (void *)&four : (void *)&eight, at, width);
    return width == 1 ? one : width == 2 ? two : width == 4 ? four : eight;
}

static void put_input(const call *c, int rank, size_t index, unsigned char *at)
{
    if (is_float(c->dtype))
        put_float(c->dtype, float_value(c, rank, index), at);
    else
        put_integer(c->width, draw(c->seed + (uint64_t)rank, index), at);
}

static double combine_floats(const call *c, double a, double b)
{
    int wide = c->dtype == DTRAIN_F64;
    switch (c->op) {
    case DTRAIN_PROD: return wide ? a * b : (double)((float)a * (float)b);
    case DTRAIN_MIN: return isnan(a) || isnan(b) ? (double)NAN : a < b ? a : b;
    case DTRAIN_MAX: return isnan(a) || isnan(b) ? (double)NAN : a > b ? a : b;
    default: return wide ? a + b : (double)((float)a + (float)b);
    }
}

/* The manual's tree: the left part is the largest power of two below n. */
static double float_tree(const call *c, int first, int n, size_t index)
{
    int left = 1;
    if (n == 1)
        return float_value(c, first, index);
    while (2 * left < n)
        left *= 2;
    return combine_floats(c, float_tree(c, first, left, index), float_tree(c, first + left, n - left, index));
}

static int64_t as_signed(uint64_t x, size_t width)
{
    return width == 8 ? (int64_t)x : (int64_t)(x << (64 - 8 * width)) >> (64 - 8 * width);
}

static uint64_t combine_integers(const call *c, uint64_t a, uint64_t b)
{
    uint64_t mask = c->width == 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * c->width) - 1;
    int less = is_signed(c->dtype) ? as_signed(a, c->width) < as_signed(b, c->width) : (a & mask) < (b & mask);
    switch (c->op) {
    case DTRAIN_PROD: return a * b;
    case DTRAIN_MIN: return less ? a : b;
    case DTRAIN_MAX: return less ? b : a;
    case DTRAIN_AND: return a & b;
    case DTRAIN_OR: return a | b;
    case DTRAIN_XOR: return a ^ b;
    default: return a + b;
    }
}

static void put_reduced(const call *c, int ranks, size_t index, unsigned char *at)
{
    uint64_t sum = draw(c->seed, index);
    if (is_float(c->dtype)) {
        double value = float_tree(c, 0, ranks, index);
        if (c->op == DTRAIN_MEAN)
            value = c->dtype == DTRAIN_F64 ? value / ranks : (double)((float)value / (float)ranks);
        put_float(c->dtype, value, at);
        return;
    }
    for (int rank = 1; rank < ranks; rank++)
        sum = combine_integers(c, sum, draw(c->seed + (uint64_t)rank, index));
    put_integer(c->width, sum, at);
}

static int is_nan(const call *c, const unsigned char *at)
{
    uint64_t bits = get_integer(c->width, at);
    return c->dtype == DTRAIN_F64    ? (bits & INT64_MAX) > 0x7ff0000000000000
           : c->dtype == DTRAIN_F32  ? (bits & 0x7fffffff) > 0x7f800000
           : c->dtype == DTRAIN_F16  ? (bits & 0x7fff) > 0x7c00
           : c->dtype == DTRAIN_BF16 ? (bits & 0x7fff) > 0x7f80
                                     : 0;
}

static int same_element(const call *c, const unsigned char *a, const unsigned char *b)
{
    return memcmp(a, b, c->width) == 0 || (is_nan(c, a) && is_nan(c, b));
}

/* Parts of counts and offsets: as dtrain_shard cuts, or drawn, some empty, with gaps. */
static void draw_parts(call *c, int ranks)
{
    size_t next = 0;
    for (int rank = 0; rank < ranks; rank++) {
        uint64_t dice = draw(c->seed + 77, (uint64_t)rank);
        size_t share = c->count / (size_t)ranks + ((size_t)rank < c->count % (size_t)ranks);
        c->counts[rank] = !c->uneven ? share : dice % 4 == 0 ? 0 : (size_t)(dice / 4) % (2 * share + 2);
        next += c->uneven && dice / 64 % 3 == 0 ? 3 : 0;
        c->offsets[rank] = next;
        next += c->counts[rank];
    }
    c->count = c->uneven ? next : c->count;
}

static void draw_call(call *c, const stage *s, uint64_t seed, int ranks)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_F64, DTRAIN_F16, DTRAIN_BF16, DTRAIN_I8, DTRAIN_U8,
                                          DTRAIN_I32, DTRAIN_U32, DTRAIN_I64, DTRAIN_U64,  DTRAIN_F32};
    static const size_t counts[] = {0,   1,   2,   3,    7,    63,   64,   65,   255,  256,  257,  511,
                                    512, 513, 640, 1023, 1279, 1280, 1281, 1999, 2561, 3000, 4097, 6001};
    uint64_t dice = draw(seed, 1);
    int floats;
    memset(c, 0, sizeof *c);
    c->seed = draw(seed, 2);
    c->kind = (kind)(dice % 14 < KINDS ? dice % 14 : dice % 2 ? ALL_REDUCE : REDUCE_SCATTER);
    c->dtype = dtypes[dice / 16 % (sizeof dtypes / sizeof dtypes[0])];
    c->width = dtrain_dtype_bits(c->dtype) / 8;
    floats = is_float(c->dtype);
    c->op = (dtrain_op)(DTRAIN_SUM + (int)((dice >> 9) % (floats ? 5 : 8)));
    if (!floats && c->op == DTRAIN_MEAN)
        c->op = DTRAIN_SUM;
    c->exact = s->any_order || (dice >> 14 & 1);
    c->in_place = (int)(dice >> 15 & 1);
    c->uneven = (int)(dice >> 16 & 1) &&
                (c->kind == REDUCE_SCATTER || c->kind == ALL_GATHER || c->kind == GATHER || c->kind == SCATTER);
    c->async = (dice >> 17 & 3) == 0;
    c->root = (int)((dice >> 20) % (uint64_t)ranks);
    c->shift = (dice >> 32 & 1) * (dice >> 33) % 8;
    c->count = counts[(dice >> 40) % (ranks > 16 ? 18 : sizeof counts / sizeof counts[0])];
    if (c->kind == ALL_TO_ALL && c->in_place)
        c->count -= c->count % (size_t)ranks;
    draw_parts(c, ranks);
}

/* What rank `from` gives to rank `to` in an uneven all-to-all. */
static size_t given(const call *c, int from, int to)
{
    uint64_t dice = draw(c->seed + 5, (uint64_t)(from * MOST_RANKS + to));
    return dice % 3 == 0 ? 0 : (size_t)dice % 40;
}

typedef struct buffers {
    unsigned char *in, *out, *expected;
    size_t out_elements; /* to compare; elements between parts must stay as they were */
} buffers;

static dtrain_status end(dtrain_status status, dtrain_work **work, const call *c)
{
    return status == DTRAIN_OK && c->async ? dtrain_work_wait(*work) : status;
}

static dtrain_status make_call(dtrain_comm *w, const call *c, const void *in, void *out)
{
    dtrain_work *work = NULL, **handle = &work, **started = c->async ? handle : NULL;
    const size_t *at = c->offsets;
    int rank = dtrain_comm_rank(w), ranks = dtrain_comm_size(w), next = (rank + 1) % ranks;
#define EITHER(name, ...) (c->async ? name##_async(w, __VA_ARGS__, handle) : name(w, __VA_ARGS__))
    switch (c->kind) {
    case ALL_REDUCE: return end(EITHER(dtrain_all_reduce, in, out, c->count, c->dtype, c->op), handle, c);
    case REDUCE: return dtrain_reduce(w, in, out, c->count, c->dtype, c->op, c->root);
    case REDUCE_SCATTER:
        if (c->uneven)
            return end(dtrain__reduce_scatter_v(w, in, out, c->counts, at, c->dtype, c->op, started), handle, c);
        return end(EITHER(dtrain_reduce_scatter, in, out, c->count, c->dtype, c->op), handle, c);
    case ALL_GATHER:
        if (c->uneven)
            return end(dtrain__all_gather_v(w, in, out, c->counts, at, c->dtype, started), handle, c);
        return end(EITHER(dtrain_all_gather, in, out, c->count, c->dtype), handle, c);
    case BROADCAST: return end(EITHER(dtrain_broadcast, out, c->count, c->dtype, c->root), handle, c);
    case GATHER:
        if (c->uneven)
            return dtrain_gather_v(w, in, out, c->counts, at, c->dtype, c->root);
        return dtrain_gather(w, in, out, c->count, c->dtype, c->root);
    case SCATTER:
        if (c->uneven)
            return dtrain_scatter_v(w, in, out, c->counts, at, c->dtype, c->root);
        return dtrain_scatter(w, in, out, c->count, c->dtype, c->root);
    case ALL_TO_ALL: return dtrain_all_to_all(w, in, out, c->count, c->dtype);
    case SCAN: return end(EITHER(dtrain_scan, in, out, c->count, c->dtype, c->op), handle, c);
    case EXSCAN: return end(EITHER(dtrain_exscan, in, out, c->count, c->dtype, c->op), handle, c);
    case EXCHANGE:
        if (ranks == 1)
            return DTRAIN_OK;
        return dtrain_exchange(w, in, c->count, next, out, c->count, (rank + ranks - 1) % ranks, c->dtype);
    default: return dtrain_barrier(w);
    }
}

/* Lays the input out, says what each element of the output must be, and where in and out lie. */
static void prepare(const call *c, int rank, int ranks, buffers *b, unsigned char **in, unsigned char **out)
{
    size_t w = c->width, mine = c->counts[rank], at = c->offsets[rank];
    int root = rank == c->root, left = (rank + ranks - 1) % ranks;
    for (size_t i = 0; i < c->count; i++)
        put_input(c, rank, i, b->in + i * w);
    *in = b->in;
    *out = b->out;
    b->out_elements = c->count;
    switch (c->kind) {
    case ALL_REDUCE:
    case REDUCE:
        if (c->kind == REDUCE && !root)
            break;
        for (size_t i = 0; i < c->count; i++)
            put_reduced(c, ranks, i, b->expected + i * w);
        *in = c->in_place ? b->out : b->in;
        break;
    case REDUCE_SCATTER:
        for (size_t i = 0; i < mine; i++)
            put_reduced(c, ranks, at + i, b->expected + (at + i) * w);
        *out = c->in_place ? b->in + at * w : b->out + at * w;
        break;
    case ALL_GATHER:
    case GATHER:
        for (int r = 0; (c->kind == ALL_GATHER || root) && r < ranks; r++)
            for (size_t i = 0; i < c->counts[r]; i++)
                put_input(c, r, c->offsets[r] + i, b->expected + (c->offsets[r] + i) * w);
        *in = b->in + at * w;
        if (c->in_place && (c->kind == ALL_GATHER || root)) {
            memcpy(b->out + at * w, *in, mine * w);
            *in = b->out + at * w;
        }
        break;
    case SCATTER:
        for (size_t i = 0; i < mine; i++)
            put_input(c, c->root, at + i, b->expected + (at + i) * w);
        *out = c->in_place && root ? b->in + at * w : b->out + at * w;
        break;
    case BROADCAST:
        for (size_t i = 0; i < c->count; i++)
            put_input(c, c->root, i, b->expected + i * w);
        if (root)
            memcpy(b->out, b->in, c->count * w);
        break;
    case ALL_TO_ALL:
        for (int r = 0; r < ranks; r++)
            for (size_t i = 0; i < mine; i++)
                put_input(c, r, at + i, b->expected + ((size_t)r * mine + i) * w);
        b->out_elements = (size_t)ranks * mine;
        *in = c->in_place ? b->out : b->in;
        break;
    case SCAN:
    case EXSCAN: /* rank 0 of an exscan: nothing is written */
        *in = c->in_place ? b->out : b->in;
        for (size_t i = 0; i < c->count; i++)
            if (c->kind == SCAN || rank > 0)
                put_reduced(c, rank + (c->kind == SCAN), i, b->expected + i * w);
            else if (c->in_place)
                put_input(c, rank, i, b->expected + i * w);
        break;
    case EXCHANGE:
        for (size_t i = 0; ranks > 1 && i < c->count; i++)
            put_input(c, left, i, b->expected + i * w);
        break;
    default: b->out_elements = 0;
    }
    if (*in == b->out && c->kind != ALL_GATHER && c->kind != GATHER)
        memcpy(b->out, b->in, c->count * w);
}

#define WINDOW_BYTES ((size_t)512 << 10)

static int check_call(dtrain_comm *w, const stage *s, const call *c, int number, unsigned char *window)
{
    int rank = dtrain_comm_rank(w), ranks = dtrain_comm_size(w);
    size_t bytes = (c->count + (size_t)ranks) * c->width * (c->kind == ALL_TO_ALL ? 2 : 1) + 64, wrong = SIZE_MAX;
    int apart = window == NULL || 3 * bytes > WINDOW_BYTES || (number % 4 == 3 && number / 4 % ranks == rank);
    unsigned char *memory = apart ? (unsigned char *)malloc(3 * bytes) : window, *in, *out;
    buffers b = {memory + c->shift, memory + bytes + c->shift, memory + 2 * bytes, 0};
    memset(memory, 0xa5, 3 * bytes);
    prepare(c, rank, ranks, &b, &in, &out);
    dtrain_status status = make_call(w, c, in, out);
    unsigned char *result =
        (c->kind == REDUCE_SCATTER || c->kind == SCATTER) && out >= b.in && out < b.in + bytes && c->in_place ? b.in
                                                                                                              : b.out;
    int parts = result == b.in; /* around this rank's part lies the input */
    for (size_t i = parts ? c->offsets[rank] : 0;
         i < (parts ? c->offsets[rank] + c->counts[rank] : b.out_elements) && wrong == SIZE_MAX; i++)
        if (!same_element(c, result + i * c->width, b.expected + i * c->width))
            wrong = i;
    for (size_t i = b.out_elements * c->width; status == DTRAIN_OK && i < b.out_elements * c->width + 16; i++)
        if (b.out[i] != 0xa5 && !(c->kind == ALL_TO_ALL && c->in_place))
            wrong = b.out_elements;
    if (status != DTRAIN_OK || wrong != SIZE_MAX)
        TEST_FAIL("%s, %d ranks, call %d of seed %llu (kind %d, dtype %s, op %d, %zu elements, uneven %d, in place %d, "
                  "exact %d, root %d, async %d, shift %zu), rank %d: %s, element %zd is wrong",
                  s->name, ranks, number, (unsigned long long)seed_of_run, (int)c->kind, dtrain_dtype_name(c->dtype),
                  (int)c->op, c->count, c->uneven, c->in_place, c->exact, c->root, c->async, c->shift, rank,
                  status != DTRAIN_OK ? dtrain_last_error() : "ok", (ssize_t)wrong);
    if (apart)
        free(memory);
    return status == DTRAIN_OK && wrong == SIZE_MAX;
}

/* Uneven all-to-all, whose counts differ from rank to rank. */
static int check_all_to_all_v(dtrain_comm *w, const stage *s, const call *c)
{
    int rank = dtrain_comm_rank(w), ranks = dtrain_comm_size(w), good = 1;
    size_t out_counts[MOST_RANKS] = {0}, in_counts[MOST_RANKS] = {0}, out_at[MOST_RANKS] = {0}, next = 0, at = 0;
    uint32_t *in = (uint32_t *)calloc((size_t)ranks * 44 + 1, 4), *out = (uint32_t *)calloc((size_t)ranks * 44 + 1, 4);
    for (int r = 0; r < ranks; r++) {
        in_counts[r] = given(c, rank, r);
        out_counts[r] = given(c, r, rank);
        out_at[r] = next + 3;
        next += out_counts[r] + 3;
        for (size_t i = 0; i < in_counts[r]; i++)
            in[at++] = (uint32_t)draw(c->seed + (uint64_t)rank, (uint64_t)r * 64 + i);
    }
    dtrain_status status = dtrain_all_to_all_v(w, in, in_counts, NULL, out, out_counts, out_at, DTRAIN_U32);
    for (int r = 0; r < ranks; r++)
        for (size_t i = 0; i < out_counts[r]; i++)
            good = good && out[out_at[r] + i] == (uint32_t)draw(c->seed + (uint64_t)r, (uint64_t)rank * 64 + i);
    if (status != DTRAIN_OK || !good)
        TEST_FAIL("%s, %d ranks: uneven all_to_all on rank %d: %s", s->name, ranks, rank,
                  status != DTRAIN_OK ? dtrain_last_error() : "wrong values");
    free(in);
    free(out);
    return status == DTRAIN_OK && good;
}

typedef struct run {
    const stage *stage;
    int calls, ranks, rank;
    dtrain__threads_group *board;
    char root[80];
    dtrain_comm_desc desc;
} run;

static dtrain_status calls_of_a_rank(dtrain_comm *w, void *user)
{
    const run *r = (const run *)user;
    call *c = (call *)malloc(sizeof *c);
    void *window = NULL;
    int good = 1;
    if (r->stage->windows)
        CHECK_EQ(dtrain_comm_alloc(w, WINDOW_BYTES, &window), DTRAIN_OK);
    for (int i = 0; good && i < r->calls; i++) {
        uint64_t seed = draw(seed_of_run, (uint64_t)(i * 1000 + dtrain_comm_size(w)));
        draw_call(c, r->stage, seed, dtrain_comm_size(w));
        good = check_call(w, r->stage, c, i, (unsigned char *)window);
        if (good && i % 8 == 0)
            good = check_all_to_all_v(w, r->stage, c);
    }
    dtrain_comm_free(window);
    free(c);
    return good ? DTRAIN_OK : DTRAIN_ERR_ABORTED;
}

/* More elements than a 32-bit integer counts, reduced in place and then gathered. */
static dtrain_status large_calls(dtrain_comm *w, void *user)
{
    size_t count = ((size_t)1 << 31) + 4099, begin, mine = dtrain_shard(w, count, dtrain_comm_rank(w), &begin);
    int rank = dtrain_comm_rank(w), ranks = dtrain_comm_size(w), rest = ranks * (ranks - 1) / 2;
    unsigned char *x = (unsigned char *)malloc(count);
    dtrain_status status = x != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    (void)user;
    for (size_t i = 0; x != NULL && i < count; i++)
        x[i] = (unsigned char)(i * 7 + (i >> 31) + (size_t)rank);
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(w, x, x, count, DTRAIN_U8, DTRAIN_SUM);
    for (size_t i = begin; status == DTRAIN_OK && i < begin + mine; i++)
        x[i] = (unsigned char)(x[i] + 1);
    if (status == DTRAIN_OK)
        status = dtrain_all_gather(w, x + begin, x, count, DTRAIN_U8);
    for (size_t i = 0; status == DTRAIN_OK && i < count; i++)
        if (x[i] != (unsigned char)((size_t)ranks * (i * 7 + (i >> 31)) + (size_t)rest + 1)) {
            TEST_FAIL("element %zu of %zu is wrong", i, count);
            break;
        }
    free(x);
    return status;
}

static void *rank_of_messages(void *pointer)
{
    run *r = (run *)pointer;
    dtrain_comm *w = NULL;
    dtrain__end end;
    dtrain_status status;
    if (r->stage->how == ON_BARE_MESSAGES) {
        dtrain__threads_end(&end, r->board, r->rank);
        dtrain_transport transport = end.transport;
        transport.fail = NULL;
        status = dtrain_comm_from_transport(&w, &transport, &r->desc);
    } else {
        r->desc.rank = r->rank;
        r->desc.world_size = r->ranks;
        r->desc.root = r->root;
        r->desc.token = "what TCP takes to meet";
        status = dtrain_comm_create(&w, &r->desc);
    }
    if (status != DTRAIN_OK)
        TEST_FAIL("%s: rank %d of %d: %s", r->stage->name, r->rank, r->ranks, dtrain_last_error());
    else if (r->calls == 0)
        CHECK_EQ(large_calls(w, r), DTRAIN_OK);
    else
        calls_of_a_rank(w, r);
    dtrain_comm_destroy(w);
    return NULL;
}

static void run_stage(const stage *s, int ranks, int calls)
{
    int port = free_port();
    run *runs = (run *)calloc((size_t)ranks, sizeof *runs);
    pthread_t threads[MOST_RANKS];
    dtrain__threads_group *board = NULL;
    if (s->how == ON_BARE_MESSAGES)
        CHECK_EQ(dtrain__threads_create(&board, ranks, NULL), DTRAIN_OK);
    for (int rank = 0; rank < ranks; rank++) {
        run *r = &runs[rank];
        r->stage = s;
        r->calls = calls;
        r->ranks = ranks;
        r->rank = rank;
        r->board = board;
        r->desc.algorithm = s->algorithm;
        r->desc.order = s->order;
        r->desc.node_ranks = s->node_ranks;
        r->desc.stack_bytes = (size_t)256 << 10;
        r->desc.timeout_ms = calls == 0 ? 600000 : 0; /* gigabytes on a busy machine */
        r->desc.secure = (s->how == ON_UNIX_SOCKETS || s->how == ON_TCP) && ranks % 2 == 1 && !s->windows;
        if (s->how == ON_UNIX_SOCKETS && scene_has_unix())
            snprintf(r->root, sizeof r->root, "unix:/tmp/dtrain-property-%ld-%d", (long)getpid(), port);
        else
            snprintf(r->root, sizeof r->root, "127.0.0.1:%d", port);
        if (s->how != ON_THREADS)
            CHECK_EQ(pthread_create(&threads[rank], NULL, rank_of_messages, r), 0);
    }
    if (s->how == ON_THREADS && dtrain_run_threads(ranks, calls_of_a_rank, &runs[0], &runs[0].desc) != DTRAIN_OK)
        TEST_FAIL("%s, %d ranks: %s", s->name, ranks, dtrain_last_error());
    for (int rank = 0; s->how != ON_THREADS && rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    free(runs);
}

static void run_worlds(const stage *s, int calls)
{
    static const int worlds[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 24, 32};
    const char *seed = getenv("PROPERTY_SEED");
    if (seed != NULL)
        seed_of_run = strtoull(seed, NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed_of_run);
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++)
        run_stage(s, worlds[i], worlds[i] > 9 ? calls / 3 : calls);
}

#define STAGE(name, ...) \
    TEST(name) \
    { \
        const stage one = {#name, __VA_ARGS__, 0}; \
        run_worlds(&one, 100); \
    }

STAGE(threads, ON_THREADS, DTRAIN_ALGORITHM_AUTO, DTRAIN_ORDER_TREE, 0, 0)
STAGE(messages, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_AUTO, DTRAIN_ORDER_TREE, 0, 0)
STAGE(messages_in_any_order, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_AUTO, DTRAIN_ORDER_ANY, 1, 0)
STAGE(tree, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_TREE, DTRAIN_ORDER_TREE, 0, 0)
STAGE(recursive_doubling, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_RECURSIVE_DOUBLING, DTRAIN_ORDER_TREE, 0, 0)
STAGE(halving_doubling, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_HALVING_DOUBLING, DTRAIN_ORDER_TREE, 0, 0)
STAGE(direct, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_DIRECT, DTRAIN_ORDER_TREE, 0, 0)
STAGE(bruck, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_BRUCK, DTRAIN_ORDER_TREE, 0, 0)
STAGE(nodes_of_four, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_NODES, DTRAIN_ORDER_TREE, 0, 4)
STAGE(nodes_of_three, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_NODES, DTRAIN_ORDER_TREE, 1, 3)
STAGE(ring, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_RING, DTRAIN_ORDER_TREE, 1, 0)
STAGE(double_tree, ON_BARE_MESSAGES, DTRAIN_ALGORITHM_DOUBLE_TREE, DTRAIN_ORDER_TREE, 1, 0)
STAGE(tree_over_a_board, ON_THREADS, DTRAIN_ALGORITHM_TREE, DTRAIN_ORDER_TREE, 0, 0)
STAGE(direct_over_a_board, ON_THREADS, DTRAIN_ALGORITHM_DIRECT, DTRAIN_ORDER_TREE, 0, 0)

TEST(unix_sockets)
{
    static const dtrain_algorithm algorithms[] = {DTRAIN_ALGORITHM_AUTO, DTRAIN_ALGORITHM_DIRECT,
                                                  DTRAIN_ALGORITHM_HALVING_DOUBLING};
    for (int i = 0; i < 3; i++) {
        const stage one = {"unix sockets", ON_UNIX_SOCKETS, algorithms[i], DTRAIN_ORDER_TREE, 0, 0, 0};
        for (int ranks = 2; ranks <= 9; ranks++)
            run_stage(&one, ranks, 40);
    }
}

TEST(windows)
{
    const stage one = {"windows", ON_UNIX_SOCKETS, DTRAIN_ALGORITHM_AUTO, DTRAIN_ORDER_TREE, 0, 0, 1};
    for (int ranks = 1; ranks <= 9; ranks++)
        run_stage(&one, ranks, 100);
}

TEST(tcp)
{
    const stage one = {"tcp", ON_TCP, DTRAIN_ALGORITHM_AUTO, DTRAIN_ORDER_TREE, 0, 0, 0};
    for (int ranks = 2; ranks <= 13; ranks += ranks == 9 ? 4 : 1)
        run_stage(&one, ranks, 40);
}

/* Random calls on a world of MPI's and on halves of it, with a service thread and without. */
static void calls_over_mpi(dtrain_algorithm algorithm)
{
    const char *transport = getenv("DTRAIN_TRANSPORT");
    if (transport == NULL || strcmp(transport, "mpi") != 0) {
        printf("skipped: DTRAIN_TRANSPORT is not mpi\n");
        return;
    }
    for (int polls = 0; polls < 2; polls++) {
        stage one = {"mpi", ON_TCP, algorithm, DTRAIN_ORDER_TREE, 0, 0, 0};
        run r = {&one, 100, 0, 0, NULL, "", {0}};
        dtrain_comm *world = NULL, *half = NULL;
        r.desc.algorithm = one.algorithm;
        r.desc.order = one.order;
        r.desc.progress = polls ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        if (dtrain_comm_create(&world, &r.desc) != DTRAIN_OK) {
            TEST_FAIL("%s", dtrain_last_error());
            return;
        }
        CHECK_EQ(calls_of_a_rank(world, &r), DTRAIN_OK);
        int rank = dtrain_comm_rank(world);
        CHECK_EQ(dtrain_comm_split(world, rank % 2, -rank, &half), DTRAIN_OK);
        CHECK_EQ(calls_of_a_rank(half, &r), DTRAIN_OK);
        dtrain_comm_destroy(half);
        CHECK_EQ(calls_of_a_rank(world, &r), DTRAIN_OK);
        dtrain_comm_destroy(world);
    }
}

/* Under mpiexec, with DTRAIN_TRANSPORT=mpi: tests/interop/mpi.sh does that. */
TEST(ranks_of_mpi)
{
    calls_over_mpi(DTRAIN_ALGORITHM_AUTO);
    calls_over_mpi(DTRAIN_ALGORITHM_TREE);
    calls_over_mpi(DTRAIN_ALGORITHM_DIRECT);
    calls_over_mpi(DTRAIN_ALGORITHM_HALVING_DOUBLING);
}

TEST(worlds_of_64_and_200_on_small_stacks)
{
    const stage one = {"many threads", ON_THREADS, DTRAIN_ALGORITHM_AUTO, DTRAIN_ORDER_TREE, 0, 0, 0};
    run_stage(&one, 64, 30);
    run_stage(&one, 200, 12);
}

TEST(more_elements_than_32_bits_count)
{
    const stage one = {"large", ON_UNIX_SOCKETS, DTRAIN_ALGORITHM_AUTO, DTRAIN_ORDER_TREE, 0, 0, 0};
    if (getenv("PROPERTY_LARGE") == NULL) {
        printf("skipped: PROPERTY_LARGE is not set\n");
        return;
    }
    CHECK_EQ(dtrain_run_threads(2, large_calls, NULL, NULL), DTRAIN_OK);
    run_stage(&one, 2, 0);
}
