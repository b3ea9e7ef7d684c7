/* ---- >>test_tensor_parallel ----
 * Split layers beside the whole ones in float64 that share nothing with them, at 1 to 8 ranks and sizes that do not
 * divide; the same bits on threads, processes and cables; gradients beside finite differences; what cannot be. */
#include "../dtrain.h"
#include "test.h"
#include "worlds.h"

#include <math.h>

#define EPSILON 5.9604645e-8 /* 2^-24 */

static float noise(uint64_t seed, size_t i)
{
    return dtrain_random_normal(seed, i);
}

static float *draw(uint64_t seed, size_t count)
{
    float *data = (float *)malloc((count + 1) * sizeof(float));
    for (size_t i = 0; i < count; i++)
        data[i] = noise(seed, i);
    return data;
}

static uint64_t hash_of(uint64_t hash, const float *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ to_bits(data[i])) * UINT64_C(1099511628211);
    return hash;
}

/* What ranks have computed in the first world that ran a case; others must have the same. */
#define CASES 64
static uint64_t seen[CASES][MANY];

static void same_bits(int number, int rank, uint64_t hash)
{
    if (seen[number][rank] == 0)
        seen[number][rank] = hash;
    else if (seen[number][rank] != hash)
        TEST_FAIL("case %d, rank %d: other bits than on threads", number, rank);
}

/* ---- the smallest case, by hand ---- */

static void column_by_hand(dtrain_comm *world)
{
    static const float parts[2][4] = {{1, 2, 5, 6}, {3, 4, 7, 8}}, expected[2][2] = {{11, 14}, {17, 20}};
    static const float dy[2][2] = {{1, 0}, {0, 1}}, whole[4] = {11, 14, 17, 20};
    static const float d_weights[2][4] = {{1, 0, 2, 0}, {0, 1, 0, 2}};
    float x[2] = {1, 2}, y[4], dx[2], d_weight[4] = {0}, d_bias[2] = {5, 5};
    int rank = dtrain_comm_rank(world);
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = 1;
    layer.inputs = 2;
    layer.outputs = 4;
    layer.weight = parts[rank];
    layer.by_inputs = 1;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, x, y), DTRAIN_OK);
    CHECK(y[0] == expected[rank][0] && y[1] == expected[rank][1]);
    layer.d_weight = d_weight;
    layer.d_bias = d_bias;
    CHECK_EQ(dtrain_column_parallel_linear_backward(&layer, x, dy[rank], dx), DTRAIN_OK);
    CHECK(dx[0] == 1 + 4 && dx[1] == 5 + 8); /* column 0 and column 3 of W */
    CHECK(memcmp(d_weight, d_weights[rank], sizeof d_weight) == 0);
    CHECK(d_bias[0] == (rank == 0 ? 6 : 5) && d_bias[1] == (rank == 0 ? 5 : 6));
    layer.gather_output = 1;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, x, y), DTRAIN_OK);
    CHECK(memcmp(y, whole, sizeof y) == 0);
}

static void row_by_hand(dtrain_comm *world)
{
    static const float parts[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}}, x[2] = {1, 2}, ones[4] = {1, 1, 1, 1};
    static const float without[4] = {11, 14, 17, 20}, with[4] = {12, 15, 18, 21}, dy[4] = {1, 0, 0, 2};
    float y[4], dx, d_weight[4] = {0}, d_bias[4] = {0};
    int rank = dtrain_comm_rank(world);
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = 1;
    layer.inputs = 2;
    layer.outputs = 4;
    layer.weight = parts[rank];
    layer.by_inputs = 1;
    CHECK_EQ(dtrain_row_parallel_linear(&layer, x + rank, y), DTRAIN_OK);
    CHECK(memcmp(y, without, sizeof y) == 0);
    layer.bias = ones;
    CHECK_EQ(dtrain_row_parallel_linear(&layer, x + rank, y), DTRAIN_OK);
    CHECK(memcmp(y, with, sizeof y) == 0);
    layer.d_weight = d_weight;
    layer.d_bias = d_bias;
    CHECK_EQ(dtrain_row_parallel_linear_backward(&layer, x + rank, dy, &dx), DTRAIN_OK);
    CHECK(dx == (rank == 0 ? 1 + 8 : 5 + 16));
    CHECK(d_weight[0] == x[rank] && d_weight[1] == 0 && d_weight[2] == 0 && d_weight[3] == 2 * x[rank]);
    CHECK(memcmp(d_bias, dy, sizeof dy) == 0);
}

TEST(the_smallest_layers_are_those_by_hand)
{
    everywhere(2, column_by_hand);
    everywhere(2, row_by_hand);
}

TEST(parts_are_granules_of_every_block)
{
    CHECK_EQ(dtrain_parallel_part(7, 1, 1, 3, 0), 3);
    CHECK_EQ(dtrain_parallel_part(7, 0, 0, 3, 2), 2);
    CHECK_EQ(dtrain_parallel_part(3 * 5 * 4, 3, 4, 2, 0), 3 * 3 * 4); /* 5 heads of 4 channels: 3 and 2 */
    CHECK_EQ(dtrain_parallel_part(3 * 5 * 4, 3, 4, 2, 1), 3 * 2 * 4);
    CHECK_EQ(dtrain_parallel_part(2, 1, 1, 4, 1), 1);
    CHECK_EQ(dtrain_parallel_part(2, 1, 1, 4, 2), 0);
    CHECK_EQ(dtrain_parallel_part(0, 3, 2, 4, 0), 0);
    CHECK_EQ(dtrain_parallel_part(10, 3, 1, 2, 0), 0); /* 3 blocks of 10 are none */
    CHECK_EQ(dtrain_parallel_part(12, 1, 4, 2, 2), 0);
    CHECK_EQ(dtrain_parallel_part(SIZE_MAX, SIZE_MAX, 2, 2, 0), 0);
}

/* ---- linear layers beside float64 ---- */

typedef struct linear_case {
    int row;
    size_t rows, inputs, outputs, blocks, granule;
    int by_inputs, bias, gather, sequence, no_overlap;
} linear_case;

static linear_case linear_of(int number)
{
    static const size_t rows[] = {5, 13, 1, 0, 70}, sizes[] = {7, 12, 1, 3, 20, 0, 9};
    linear_case c;
    uint64_t bits = dtrain_random_u64(77, (uint64_t)number);
    memset(&c, 0, sizeof c);
    c.row = number % 2;
    c.rows = rows[bits % 5];
    c.inputs = sizes[bits / 5 % 7];
    c.outputs = sizes[bits / 35 % 7];
    c.blocks = bits >> 20 & 1 ? 3 : 0;
    c.granule = bits >> 21 & 1 ? 2 : 0;
    size_t step = (c.blocks > 0 ? 3 : 1) * (c.granule > 0 ? 2 : 1);
    *(c.row ? &c.inputs : &c.outputs) *= step;
    c.by_inputs = (int)(bits >> 22 & 1);
    c.bias = (int)(bits >> 23 & 1);
    c.gather = !c.row && (bits >> 24 & 1);
    c.sequence = (int)(bits >> 25 & 1);
    c.no_overlap = (int)(bits >> 26 & 3) == 0;
    return c;
}

/* Which rank has element i of the split dimension, found by dealing granules out one rank after the other. */
static int owner_of(const linear_case *c, size_t size, size_t i, int ranks)
{
    size_t blocks = c->blocks > 0 ? c->blocks : 1, granule = c->granule > 0 ? c->granule : 1;
    size_t granules = size / blocks / granule, mine = i % (size / blocks) / granule, at = 0;
    for (int r = 0; r < ranks; r++) {
        size_t n = granules / (size_t)ranks + ((size_t)r < granules % (size_t)ranks);
        if (mine < at + n)
            return r;
        at += n;
    }
    return -1;
}

/* One layer: everything in whole, and this rank's share of everything. */
typedef struct linear_test {
    linear_case c;
    int rank, ranks;
    size_t *mine, parts;         /* this rank's elements of the split dimension */
    size_t row_begin, row_end;   /* and rows */
    float *x, *w, *b, *dy, *dw0; /* whole */
    float *my_x, *my_w, *my_b, *my_dy;
    float *y, *dx, *dw, *db; /* this rank's results */
    size_t x_rows, x_columns, y_rows, y_columns, in, out;
} linear_test;

/* Element (o, i) of the whole weight. */
static float weight_at(const linear_test *t, size_t o, size_t i)
{
    return t->w[t->c.by_inputs ? i * t->c.outputs + o : o * t->c.inputs + i];
}

static size_t local_weight(const linear_test *t, size_t o, size_t i)
{
    return t->c.by_inputs ? i * t->out + o : o * t->in + i;
}

static size_t whole_out(const linear_test *t, size_t o)
{
    return t->c.row ? o : t->mine[o];
}

static size_t whole_in(const linear_test *t, size_t i)
{
    return t->c.row ? t->mine[i] : i;
}

static void linear_shares(linear_test *t)
{
    const linear_case *c = &t->c;
    t->my_x = (float *)malloc((t->x_rows * t->x_columns + 1) * sizeof(float));
    t->my_dy = (float *)malloc((t->y_rows * t->y_columns + 1) * sizeof(float));
    t->my_w = (float *)malloc((t->in * t->out + 1) * sizeof(float));
    t->my_b = (float *)malloc((t->out + 1) * sizeof(float));
    t->dw = (float *)malloc((t->in * t->out + 1) * sizeof(float));
    size_t x_first = c->sequence && !c->row ? t->row_begin : 0, y_first = c->sequence && c->row ? t->row_begin : 0;
    for (size_t r = 0; r < t->x_rows; r++)
        for (size_t i = 0; i < t->x_columns; i++)
            t->my_x[r * t->x_columns + i] = t->x[(r + x_first) * c->inputs + whole_in(t, i)];
    for (size_t r = 0; r < t->y_rows; r++)
        for (size_t o = 0; o < t->y_columns; o++)
            t->my_dy[r * t->y_columns + o] = t->dy[(r + y_first) * c->outputs + (c->gather ? o : whole_out(t, o))];
    for (size_t o = 0; o < t->out; o++) {
        t->my_b[o] = t->b[whole_out(t, o)];
        for (size_t i = 0; i < t->in; i++) {
            t->my_w[local_weight(t, o, i)] = weight_at(t, whole_out(t, o), whole_in(t, i));
            t->dw[local_weight(t, o, i)] = 0.25f;
        }
    }
}

static void linear_open(linear_test *t, dtrain_comm *world, int number)
{
    memset(t, 0, sizeof *t);
    t->c = linear_of(number);
    const linear_case *c = &t->c;
    size_t split = c->row ? c->inputs : c->outputs;
    t->rank = dtrain_comm_rank(world);
    t->ranks = dtrain_comm_size(world);
    t->mine = (size_t *)malloc((split + 1) * sizeof(size_t));
    for (size_t i = 0; i < split; i++)
        if (owner_of(c, split, i, t->ranks) == t->rank)
            t->mine[t->parts++] = i;
    size_t n = (size_t)t->ranks, r = (size_t)t->rank, base = c->rows / n, longer = c->rows % n;
    t->row_begin = r * base + (r < longer ? r : longer);
    t->row_end = t->row_begin + base + (r < longer);
    t->in = c->row ? t->parts : c->inputs;
    t->out = c->row ? c->outputs : t->parts;
    t->x_rows = c->sequence && !c->row ? t->row_end - t->row_begin : c->rows;
    t->y_rows = c->sequence && c->row ? t->row_end - t->row_begin : c->rows;
    t->x_columns = t->in;
    t->y_columns = c->gather ? c->outputs : t->out;
    t->x = draw(1, c->rows * c->inputs);
    t->w = draw(2, c->inputs * c->outputs);
    t->b = draw(3, c->outputs);
    t->dy = draw(4, c->rows * c->outputs);
    t->y = (float *)malloc((t->y_rows * t->y_columns + 1) * sizeof(float));
    t->dx = (float *)malloc((t->x_rows * t->x_columns + 1) * sizeof(float));
    t->db = (float *)calloc(t->out + 1, sizeof(float));
    linear_shares(t);
}

static void linear_close(linear_test *t)
{
    float *all[] = {t->x, t->w, t->b, t->dy, t->my_x, t->my_w, t->my_b, t->my_dy, t->y, t->dx, t->dw, t->db};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    free(t->mine);
}

/* got beside a sum of products in float64 that were so large. */
static int near(float got, double expected, double size)
{
    return fabs((double)got - expected) <= 8 * EPSILON * (size + fabs(expected)) + 1e-30;
}

static void linear_check_y(const linear_test *t, int number)
{
    const linear_case *c = &t->c;
    size_t first = c->sequence && c->row ? t->row_begin : 0;
    for (size_t r = 0; r < t->y_rows; r++)
        for (size_t k = 0; k < t->y_columns; k++) {
            size_t o = c->gather ? k : whole_out(t, k);
            double sum = c->bias ? (double)t->b[o] : 0, size = fabs(sum);
            for (size_t i = 0; i < c->inputs; i++) {
                double product = (double)t->x[(r + first) * c->inputs + i] * (double)weight_at(t, o, i);
                sum += product;
                size += fabs(product);
            }
            if (!near(t->y[r * t->y_columns + k], sum, size)) {
                TEST_FAIL("case %d, rank %d of %d: y[%zu, %zu] is %g, expected %g", number, t->rank, t->ranks, r, k,
                          (double)t->y[r * t->y_columns + k], sum);
                return;
            }
        }
}

static void linear_check_dx(const linear_test *t, int number)
{
    const linear_case *c = &t->c;
    size_t first = c->sequence && !c->row ? t->row_begin : 0;
    for (size_t r = 0; r < t->x_rows; r++)
        for (size_t k = 0; k < t->x_columns; k++) {
            double sum = 0, size = 0;
            for (size_t o = 0; o < c->outputs; o++) {
                double product = (double)t->dy[(r + first) * c->outputs + o] * (double)weight_at(t, o, whole_in(t, k));
                sum += product;
                size += fabs(product);
            }
            if (!near(t->dx[r * t->x_columns + k], sum, size)) {
                TEST_FAIL("case %d, rank %d of %d: dx[%zu, %zu] is %g, expected %g", number, t->rank, t->ranks, r, k,
                          (double)t->dx[r * t->x_columns + k], sum);
                return;
            }
        }
}

static void linear_check_dw(const linear_test *t, int number)
{
    const linear_case *c = &t->c;
    for (size_t o = 0; o < t->out; o++) {
        double bias = 0, bias_size = 0;
        for (size_t r = 0; r < c->rows; r++) {
            bias += (double)t->dy[r * c->outputs + whole_out(t, o)];
            bias_size += fabs((double)t->dy[r * c->outputs + whole_out(t, o)]);
        }
        int bad = !near(t->db[o], bias, bias_size);
        for (size_t i = 0; i < t->in; i++) {
            double sum = 0.25, size = 0.25;
            for (size_t r = 0; r < c->rows; r++) {
                double product =
                    (double)t->dy[r * c->outputs + whole_out(t, o)] * (double)t->x[r * c->inputs + whole_in(t, i)];
                sum += product;
                size += fabs(product);
            }
            bad += !near(t->dw[local_weight(t, o, i)], sum, size);
        }
        if (bad > 0) {
            TEST_FAIL("case %d, rank %d of %d: %d gradients of output %zu are wrong", number, t->rank, t->ranks, bad,
                      o);
            return;
        }
    }
}

static dtrain_parallel_linear linear_layer(const linear_test *t, dtrain_comm *world)
{
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = t->c.rows;
    layer.inputs = t->c.inputs;
    layer.outputs = t->c.outputs;
    layer.blocks = t->c.blocks;
    layer.granule = t->c.granule;
    layer.weight = t->my_w;
    layer.bias = t->c.bias ? t->my_b : NULL;
    layer.by_inputs = t->c.by_inputs;
    layer.gather_output = t->c.gather;
    layer.sequence = t->c.sequence;
    layer.no_overlap = t->c.no_overlap;
    return layer;
}

/* The two halves of backward, one after the other, give the bits of the whole. */
static void linear_halves(const linear_test *t, dtrain_parallel_linear layer, int number)
{
    size_t inputs = t->x_rows * t->x_columns, weights = t->in * t->out;
    float *dx = (float *)malloc((inputs + 1) * sizeof(float));
    float *dw = (float *)malloc((weights + 1) * sizeof(float)), *db = (float *)calloc(t->out + 1, sizeof(float));
    for (size_t i = 0; i < weights; i++)
        dw[i] = 0.25f;
    layer.d_weight = layer.d_bias = NULL;
    CHECK_EQ((t->c.row ? dtrain_row_parallel_linear_backward : dtrain_column_parallel_linear_backward)(&layer, NULL,
                                                                                                       t->my_dy, dx),
             DTRAIN_OK);
    layer.weight = NULL;
    layer.d_weight = dw;
    layer.d_bias = db;
    CHECK_EQ((t->c.row ? dtrain_row_parallel_linear_weights : dtrain_column_parallel_linear_weights)(&layer, t->my_x,
                                                                                                     t->my_dy),
             DTRAIN_OK);
    if (memcmp(dx, t->dx, inputs * sizeof(float)) != 0 || memcmp(dw, t->dw, weights * sizeof(float)) != 0 ||
        memcmp(db, t->db, t->out * sizeof(float)) != 0)
        TEST_FAIL("case %d, rank %d of %d: the halves give other bits", number, t->rank, t->ranks);
    free(dx);
    free(dw);
    free(db);
}

static void one_linear(dtrain_comm *world, int number)
{
    linear_test t;
    linear_open(&t, world, number);
    dtrain_parallel_linear layer = linear_layer(&t, world);
    layer.d_weight = t.dw;
    layer.d_bias = t.db;
    CHECK_EQ((t.c.row ? dtrain_row_parallel_linear : dtrain_column_parallel_linear)(&layer, t.my_x, t.y), DTRAIN_OK);
    CHECK_EQ((t.c.row ? dtrain_row_parallel_linear_backward : dtrain_column_parallel_linear_backward)(&layer, t.my_x,
                                                                                                      t.my_dy, t.dx),
             DTRAIN_OK);
    linear_check_y(&t, number);
    linear_check_dx(&t, number);
    linear_check_dw(&t, number);
    uint64_t hash =
        hash_of(hash_of(UINT64_C(0xcbf29ce484222325), t.y, t.y_rows * t.y_columns), t.dx, t.x_rows * t.x_columns);
    same_bits(number, t.rank, hash_of(hash_of(hash, t.dw, t.in * t.out), t.db, t.out));
    if (number % 3 == 0)
        linear_halves(&t, layer, number);
    linear_close(&t);
}

static void all_linears(dtrain_comm *world)
{
    for (int number = 0; number < CASES; number++)
        one_linear(world, number);
}

TEST(linear_layers_are_those_of_one_rank_in_float64)
{
    for (int ranks = 1; ranks <= 8; ranks++) {
        memset(seen, 0, sizeof seen);
        on_threads(ranks, all_linears, NULL);
    }
}

static void some_linears(dtrain_comm *world)
{
    for (int number = 0; number < 24; number++)
        one_linear(world, number);
}

TEST(linear_layers_have_the_same_bits_on_every_transport)
{
    static const int ranks[] = {2, 3, 5};
    for (int i = 0; i < 3; i++) {
        memset(seen, 0, sizeof seen);
        everywhere(ranks[i], some_linears);
    }
}

TEST(a_layer_without_a_group_is_whole)
{
    for (int number = 0; number < CASES; number++) {
        memset(seen, 0, sizeof seen);
        one_linear(NULL, number);
    }
}

/* A product long enough to be cut into slices where the group is polled. */
static void large_linear(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = 33;
    layer.inputs = 70;
    layer.outputs = 1403;
    size_t part = dtrain_parallel_part(layer.outputs, 1, 1, ranks, rank);
    float *x = draw(1, 33 * 70), *w = draw(10 + (uint64_t)rank, part * 70), *dy = draw(20 + (uint64_t)rank, 33 * part);
    float *dx = draw(5, 33 * 70), *dw = draw(6, part * 70);
    layer.weight = w;
    layer.d_weight = dw;
    CHECK_EQ(dtrain_column_parallel_linear_backward(&layer, x, dy, dx), DTRAIN_OK);
    same_bits(0, rank, hash_of(hash_of(1, dx, 33 * 70), dw, part * 70));
    free(x);
    free(w);
    free(dy);
    free(dx);
    free(dw);
}

TEST(large_products_have_the_same_bits_when_the_group_is_polled)
{
    memset(seen, 0, sizeof seen);
    everywhere(2, large_linear);
}

/* ---- the embedding ---- */

static void one_embedding(dtrain_comm *world, size_t rows, size_t vocab, size_t width, int sequence, int number)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t begin, first = 0, part = dtrain_split(vocab, ranks, rank, &begin), mine = rows;
    float *table = draw(1, vocab * width), *d_whole = draw(2, rows * width), *out, *d_table;
    int32_t *tokens = (int32_t *)malloc((rows + 1) * sizeof *tokens);
    dtrain_parallel_vocab layer;
    if (sequence)
        mine = dtrain_split(rows, ranks, rank, &first);
    out = (float *)malloc((mine * width + 1) * sizeof(float));
    d_table = (float *)calloc(part * width + 1, sizeof(float));
    for (size_t i = 0; i < vocab * width; i += 5)
        table[i] = -0.0f;
    for (size_t i = 0; i < rows; i++)
        tokens[i] = (int32_t)(dtrain_random_u64(3, i) % vocab);
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = rows;
    layer.vocab = vocab;
    layer.width = width;
    layer.table = table + begin * width;
    layer.d_table = d_table;
    layer.sequence = sequence;
    CHECK_EQ(dtrain_vocab_parallel_embedding(&layer, tokens, out), DTRAIN_OK);
    for (size_t i = 0; i < mine; i++)
        CHECK(memcmp(out + i * width, table + (size_t)tokens[first + i] * width, width * sizeof(float)) == 0);
    CHECK_EQ(dtrain_vocab_parallel_embedding_backward(&layer, tokens, d_whole + first * width), DTRAIN_OK);
    for (size_t v = 0; v < part; v++)
        for (size_t k = 0; k < width; k++) {
            double sum = 0, size = 0;
            for (size_t i = 0; i < rows; i++)
                if ((size_t)tokens[i] == begin + v) {
                    sum += (double)d_whole[i * width + k];
                    size += fabs((double)d_whole[i * width + k]);
                }
            CHECK(near(d_table[v * width + k], sum, size));
        }
    same_bits(number, rank, hash_of(hash_of(7, out, mine * width), d_table, part * width));
    free(table);
    free(d_whole);
    free(out);
    free(d_table);
    free(tokens);
}

static void embeddings(dtrain_comm *world)
{
    static const size_t sizes[][3] = {{11, 13, 5}, {3, 2, 7}, {1, 1, 1}, {0, 9, 4}, {40, 101, 16}, {5, 5, 0}};
    for (int i = 0; i < 6; i++)
        for (int sequence = 0; sequence < 2; sequence++)
            one_embedding(world, sizes[i][0], sizes[i][1], sizes[i][2], sequence, 2 * i + sequence);
}

TEST(embeddings_have_the_bits_of_the_table_and_the_sums_of_the_gradient)
{
    for (int ranks = 1; ranks <= 8; ranks++) {
        memset(seen, 0, sizeof seen);
        on_threads(ranks, embeddings, NULL);
        if (ranks == 2 || ranks == 5)
            on_processes(ranks, embeddings, NULL);
    }
    memset(seen, 0, sizeof seen);
    embeddings(NULL);
}

/* ---- cross-entropy ---- */

/* -log p of a row in float64, and its probabilities. */
static double entropy_of(const float *row, size_t vocab, int32_t target, double *p)
{
    double most = -HUGE_VAL, sum = 0;
    for (size_t v = 0; v < vocab; v++)
        most = (double)row[v] > most ? (double)row[v] : most;
    for (size_t v = 0; v < vocab; v++)
        sum += p[v] = exp((double)row[v] - most);
    for (size_t v = 0; v < vocab; v++)
        p[v] /= sum;
    return log(sum) + most - (double)row[target];
}

typedef struct entropy_test {
    size_t rows, vocab, begin, part;
    float *whole, *mine;
    int32_t *targets;
} entropy_test;

static void entropy_open(entropy_test *t, dtrain_comm *world, size_t rows, size_t vocab, float spread)
{
    t->rows = rows;
    t->vocab = vocab;
    t->part = dtrain_split(vocab, dtrain_comm_size(world), dtrain_comm_rank(world), &t->begin);
    t->whole = draw(9, rows * vocab);
    t->mine = (float *)malloc((rows * t->part + 1) * sizeof(float));
    t->targets = (int32_t *)malloc((rows + 1) * sizeof(int32_t));
    for (size_t i = 0; i < rows * vocab; i++)
        t->whole[i] *= spread;
    for (size_t i = 0; i < rows; i++)
        t->targets[i] = i % 4 == 3 ? -1 : (int32_t)(dtrain_random_u64(8, i) % vocab);
}

static void entropy_cut(entropy_test *t)
{
    for (size_t i = 0; i < t->rows; i++)
        memcpy(t->mine + i * t->part, t->whole + i * t->vocab + t->begin, t->part * sizeof(float));
}

static void entropy_close(entropy_test *t)
{
    free(t->whole);
    free(t->mine);
    free(t->targets);
}

static void one_entropy(dtrain_comm *world, size_t rows, size_t vocab, float spread, int number)
{
    entropy_test t;
    double loss = -1, expected = 0, *p = (double *)malloc((vocab + 1) * sizeof(double)), worst = 0;
    int rank = dtrain_comm_rank(world);
    entropy_open(&t, world, rows, vocab, spread);
    entropy_cut(&t);
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, t.mine, t.targets, rows, vocab, &loss), DTRAIN_OK);
    for (size_t i = 0; i < rows; i++) {
        if (t.targets[i] >= 0)
            expected += entropy_of(t.whole + i * vocab, vocab, t.targets[i], p);
        for (size_t v = 0; v < t.part; v++) {
            double d = t.targets[i] < 0 ? 0 : p[t.begin + v] - ((size_t)t.targets[i] == t.begin + v);
            double error = fabs((double)t.mine[i * t.part + v] - d);
            worst = error > worst ? error : worst;
        }
    }
    if (fabs(loss - expected) > 1e-6 * (double)rows + 1e-6 * fabs(expected) || worst > 6 * EPSILON)
        TEST_FAIL("case %d, rank %d of %d: loss %.9g, expected %.9g, gradients within %g", number, rank,
                  dtrain_comm_size(world), loss, expected, worst);
    uint64_t bits, least = 1;
    memcpy(&bits, &loss, sizeof bits);
    same_bits(number, rank, hash_of(bits | least << 63, t.mine, rows * t.part));
    CHECK_EQ(dtrain_comm_size(world) > 1 ? dtrain_comm_check_equal(world, &loss, 1, DTRAIN_F64) : DTRAIN_OK, DTRAIN_OK);
    entropy_close(&t);
    free(p);
}

static void entropies(dtrain_comm *world)
{
    static const size_t sizes[][2] = {{9, 13}, {1, 1}, {5, 2}, {0, 7}, {20, 1001}, {3, 64}};
    static const float spreads[] = {1, 10, 1e4f, 3e38f};
    for (int i = 0; i < 6; i++)
        for (int s = 0; s < 3; s++)
            one_entropy(world, sizes[i][0], sizes[i][1], spreads[s], 3 * i + s);
}

TEST(cross_entropy_is_that_of_whole_logits_in_float64)
{
    for (int ranks = 1; ranks <= 8; ranks++) {
        memset(seen, 0, sizeof seen);
        on_threads(ranks, entropies, NULL);
        if (ranks == 3 || ranks == 4)
            on_processes(ranks, entropies, NULL);
    }
    memset(seen, 0, sizeof seen);
    entropies(NULL);
}

/* By hand: logits 0, 0, 0 and target 2 are log 3; logits 1000, 0 and target 1 are 1000. */
static void entropy_by_hand(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float logits[2][2] = {{0, 0}, {0, 0}}, large[2][1] = {{1000}, {0}};
    int32_t two = 2, one = 1;
    double loss;
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, logits[rank], &two, 1, 3, &loss), DTRAIN_OK);
    CHECK(fabs(loss - 1.0986122886681098) < 1e-15);
    CHECK(fabs((double)logits[rank][0] - (rank == 0 ? 1.0 / 3 : -2.0 / 3)) < 1e-7);
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, large[rank], &one, 1, 2, &loss), DTRAIN_OK);
    CHECK(loss == 1000);
    CHECK(large[rank][0] == (rank == 0 ? 1.0f : -1.0f));
}

TEST(cross_entropy_is_that_by_hand)
{
    everywhere(2, entropy_by_hand);
}

static void entropy_differences(dtrain_comm *world)
{
    entropy_test t;
    double loss[2], d = 0.01;
    float *gradient;
    entropy_open(&t, world, 4, 11, 1);
    entropy_cut(&t);
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, t.mine, t.targets, 4, 11, &loss[0]), DTRAIN_OK);
    gradient = t.mine;
    t.mine = (float *)malloc((4 * t.part + 1) * sizeof(float));
    for (size_t i = 0; i < 44; i++) {
        float kept = t.whole[i];
        for (int side = 0; side < 2; side++) {
            t.whole[i] = kept + (side ? -(float)d : (float)d);
            entropy_cut(&t);
            CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, t.mine, t.targets, 4, 11, &loss[side]), DTRAIN_OK);
        }
        t.whole[i] = kept;
        size_t v = i % 11;
        if (v >= t.begin && v < t.begin + t.part)
            CHECK(fabs((loss[0] - loss[1]) / (2 * d) - (double)gradient[i / 11 * t.part + v - t.begin]) < 1e-4);
    }
    free(gradient);
    entropy_close(&t);
}

TEST(cross_entropy_has_the_gradient_of_its_differences)
{
    on_threads(1, entropy_differences, NULL);
    on_threads(3, entropy_differences, NULL);
}

/* Element `at` of row 0 has these bits: what is the loss? */
static double loss_with(dtrain_comm *world, size_t at, uint32_t bits, int32_t target)
{
    entropy_test t;
    double loss = 0;
    entropy_open(&t, world, 2, 7, 1);
    t.whole[at] = from_bits(bits);
    t.targets[0] = target;
    entropy_cut(&t);
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, t.mine, t.targets, 2, 7, &loss), DTRAIN_OK);
    for (size_t v = 0; target < 0 && v < t.part; v++)
        CHECK(t.mine[v] == 0);
    entropy_close(&t);
    return loss;
}

static void entropy_of_no_numbers(dtrain_comm *world)
{
    for (size_t at = 0; at < 7; at++) {
        CHECK(isnan(loss_with(world, at, 0x7fc00000u, 3)));
        CHECK(isnan(loss_with(world, at, 0xffc00001u, 3))); /* negative, which no maximum finds */
        CHECK(isnan(loss_with(world, at, 0x7f800000u, 3)));
        double masked = loss_with(world, at, 0xff800000u, 3);
        CHECK(at == 3 ? isinf(masked) && masked > 0 : isfinite(masked));
        CHECK(isfinite(loss_with(world, at, 0x7fc00000u, -1)));              /* its row is left out */
        CHECK(isfinite(loss_with(world, at, 0xff7fffffu, at == 0 ? 1 : 0))); /* the lowest number */
    }
}

TEST(what_is_no_number_makes_the_loss_none)
{
    on_threads(1, entropy_of_no_numbers, NULL);
    on_threads(3, entropy_of_no_numbers, NULL);
    on_threads(8, entropy_of_no_numbers, NULL);
    on_processes(2, entropy_of_no_numbers, NULL);
}

static void entropy_memory(dtrain_comm *world)
{
    entropy_test t;
    double loss;
    entropy_open(&t, world, 64, 4096, 1);
    entropy_cut(&t);
    dtrain_allocator *allocator = dtrain_comm_allocator(world);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    size_t before = __atomic_load_n(&allocator->peak_bytes, __ATOMIC_RELAXED);
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, t.mine, t.targets, 64, 4096, &loss), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    size_t after = __atomic_load_n(&allocator->peak_bytes, __ATOMIC_RELAXED);
    CHECK(after - before <= 4 * 64 * 20 + 65536); /* 20 bytes a row and rank; the logits have 1 MiB */
    entropy_close(&t);
}

TEST(cross_entropy_holds_no_whole_logits)
{
    on_threads(4, entropy_memory, NULL);
    on_processes(2, entropy_memory, NULL);
}

/* ---- attention ---- */

/* The sum of out * dy of one head in float64. */
static double attention_value(const double *qkv, const float *dy, size_t t, size_t c, int causal, double *out)
{
    double value = 0, p[64];
    for (size_t i = 0; i < t; i++) {
        size_t n = causal ? i + 1 : t;
        double sum = 0, most = -HUGE_VAL;
        for (size_t j = 0; j < n; j++) {
            p[j] = 0;
            for (size_t k = 0; k < c; k++)
                p[j] += qkv[i * 3 * c + k] * qkv[j * 3 * c + c + k] / sqrt((double)c);
            most = p[j] > most ? p[j] : most;
        }
        for (size_t j = 0; j < n; j++)
            sum += p[j] = exp(p[j] - most);
        for (size_t k = 0; k < c; k++) {
            double o = 0;
            for (size_t j = 0; j < n; j++)
                o += p[j] / sum * qkv[j * 3 * c + 2 * c + k];
            if (out != NULL)
                out[i * c + k] = o;
            value += o * (double)dy[i * c + k];
        }
    }
    return value;
}

static void attention_differences(size_t t, size_t c, int causal)
{
    dtrain_attention a;
    memset(&a, 0, sizeof a);
    a.batch = a.heads = 1;
    a.positions = t;
    a.channels = c;
    a.causal = causal;
    float *qkv = draw(1, t * 3 * c), *dy = draw(2, t * c), *d_qkv = draw(3, t * 3 * c), *out = draw(4, t * c);
    float *kept = draw(5, t * t);
    double *wide = (double *)malloc(t * 3 * c * sizeof(double)), *o = (double *)malloc(t * c * sizeof(double));
    double worst = 0, worst_d = 0;
    for (size_t i = 0; i < t * 3 * c; i++)
        wide[i] = (double)qkv[i];
    CHECK_EQ(dtrain_attention_forward(&a, qkv, kept, out), DTRAIN_OK);
    CHECK_EQ(dtrain_attention_backward(&a, qkv, kept, dy, d_qkv), DTRAIN_OK);
    attention_value(wide, dy, t, c, causal, o);
    for (size_t i = 0; i < t * c; i++)
        worst = fmax(worst, fabs((double)out[i] - o[i]));
    for (size_t i = 0; i < t * 3 * c; i++) {
        wide[i] = (double)qkv[i] + 1e-5;
        double above = attention_value(wide, dy, t, c, causal, NULL);
        wide[i] = (double)qkv[i] - 1e-5;
        double below = attention_value(wide, dy, t, c, causal, NULL);
        wide[i] = (double)qkv[i];
        worst_d = fmax(worst_d, fabs((above - below) / 2e-5 - (double)d_qkv[i]));
    }
    if (worst > 3e-6 || worst_d > 2e-5)
        TEST_FAIL("%zu positions of %zu channels, causal %d: out within %g, gradient within %g", t, c, causal, worst,
                  worst_d);
    free(qkv);
    free(dy);
    free(d_qkv);
    free(out);
    free(kept);
    free(wide);
    free(o);
}

TEST(attention_has_the_gradient_of_its_differences)
{
    for (int causal = 0; causal < 2; causal++) {
        attention_differences(1, 1, causal);
        attention_differences(5, 3, causal);
        attention_differences(17, 8, causal);
        attention_differences(20, 1, causal);
    }
}

/* Heads of several sequences, longer than a strip and a tile, each alone. */
static void attention_together(size_t batch, size_t t, size_t heads, size_t c, int causal)
{
    dtrain_attention a, alone;
    memset(&a, 0, sizeof a);
    a.batch = batch;
    a.positions = t;
    a.heads = heads;
    a.channels = c;
    a.causal = causal;
    alone = a;
    alone.batch = alone.heads = 1;
    size_t w = heads * c, rows = batch * t;
    float *qkv = draw(1, rows * 3 * w), *dy = draw(2, rows * w), *out = draw(3, rows * w),
          *d_qkv = draw(4, rows * 3 * w);
    float *kept = draw(5, batch * heads * t * t), *one = draw(6, t * 3 * c), *one_dy = draw(7, t * c);
    float *one_out = draw(8, t * c), *one_d = draw(9, t * 3 * c), *one_kept = draw(10, t * t);
    CHECK_EQ(dtrain_attention_forward(&a, qkv, kept, out), DTRAIN_OK);
    CHECK(!causal || t < 2 || kept[1] == 0);
    CHECK_EQ(dtrain_attention_backward(&a, qkv, kept, dy, d_qkv), DTRAIN_OK);
    for (size_t b = 0; b < batch; b++)
        for (size_t h = 0; h < heads; h++) {
            int bad = 0;
            for (size_t i = 0; i < t; i++) {
                memcpy(one_dy + i * c, dy + (b * t + i) * w + h * c, c * sizeof(float));
                for (size_t s = 0; s < 3; s++)
                    memcpy(one + (i * 3 + s) * c, qkv + (b * t + i) * 3 * w + s * w + h * c, c * sizeof(float));
            }
            CHECK_EQ(dtrain_attention_forward(&alone, one, one_kept, one_out), DTRAIN_OK);
            CHECK_EQ(dtrain_attention_backward(&alone, one, one_kept, one_dy, one_d), DTRAIN_OK);
            for (size_t i = 0; i < t; i++) {
                bad += memcmp(one_out + i * c, out + (b * t + i) * w + h * c, c * sizeof(float)) != 0;
                for (size_t s = 0; s < 3; s++)
                    bad += memcmp(one_d + (i * 3 + s) * c, d_qkv + (b * t + i) * 3 * w + s * w + h * c,
                                  c * sizeof(float)) != 0;
            }
            CHECK_EQ(bad, 0);
        }
    float *all[] = {qkv, dy, out, d_qkv, kept, one, one_dy, one_out, one_d, one_kept};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

TEST(heads_together_have_the_bits_of_heads_alone)
{
    for (int causal = 0; causal < 2; causal++) {
        attention_together(2, 7, 3, 5, causal);
        attention_together(1, 200, 2, 16, causal);
        attention_together(3, 64, 1, 4, causal);
        attention_together(2, 9, 0, 4, causal); /* a rank that has no head */
        attention_together(2, 0, 2, 4, causal);
    }
}

/* Strips and tiles beside one product: 150 positions, where all queries are equal, see the mean of all values. */
TEST(equal_scores_give_the_mean_of_what_is_seen)
{
    enum { T = 150 };
    static float qkv[T * 3], kept[T * T], out[T], dy[T], d_qkv[T * 3];
    dtrain_attention a = {1, T, 1, 1, 1};
    for (size_t i = 0; i < T; i++) {
        qkv[3 * i + 2] = (float)i;
        dy[i] = i == T - 1;
    }
    CHECK_EQ(dtrain_attention_forward(&a, qkv, kept, out), DTRAIN_OK);
    for (size_t i = 0; i < T; i++)
        CHECK(fabsf(out[i] - 0.5f * (float)i) < 1e-5f * (float)(i + 1));
    CHECK_EQ(dtrain_attention_backward(&a, qkv, kept, dy, d_qkv), DTRAIN_OK);
    for (size_t i = 0; i < T; i++)
        CHECK(fabsf(d_qkv[3 * i + 2] - 1.0f / T) < 1e-8f && fabsf(d_qkv[3 * i]) < 1e-4f);
}

/* ---- a block of all of them: qkv, attention, projection ---- */

typedef struct block {
    size_t rows, heads, channels;
    float *x, *qkv_w, *qkv_b, *out_w, *out_b, *dy;
} block;

/* What a rank has of a block; heads are its heads, in order from `first` on. */
static void block_run(const block *b, dtrain_comm *group, int sequence, const float *x, const float *dy, float *y,
                      float *dx, float *db)
{
    size_t c = b->channels, w = b->heads * c, first, heads;
    heads = dtrain_split(b->heads, dtrain_comm_size(group), dtrain_comm_rank(group), &first);
    size_t part = heads * c, inner = b->rows * part;
    float *qkv_w = draw(1, 3 * part * w), *qkv_b = draw(1, 3 * part), *out_w = draw(1, w * part);
    for (size_t s = 0; s < 3; s++)
        for (size_t i = 0; i < part; i++) {
            qkv_b[s * part + i] = b->qkv_b[s * w + first * c + i];
            memcpy(qkv_w + (s * part + i) * w, b->qkv_w + (s * w + first * c + i) * w, w * sizeof(float));
        }
    for (size_t o = 0; o < w; o++)
        memcpy(out_w + o * part, b->out_w + o * w + first * c, part * sizeof(float));
    dtrain_parallel_linear in, out;
    dtrain_attention a = {1, b->rows, heads, c, 1};
    memset(&in, 0, sizeof in);
    in.group = group;
    in.rows = b->rows;
    in.inputs = w;
    in.granule = c;
    in.sequence = sequence;
    out = in;
    in.outputs = 3 * w;
    in.blocks = 3;
    in.weight = qkv_w;
    in.bias = qkv_b;
    out.outputs = w;
    out.weight = out_w;
    out.bias = b->out_b;
    out.d_bias = db;
    float *qkv = draw(1, 3 * inner), *kept = draw(1, heads * b->rows * b->rows), *att = draw(1, inner);
    float *d_att = draw(1, inner), *d_qkv = draw(1, 3 * inner);
    CHECK_EQ(dtrain_column_parallel_linear(&in, x, qkv), DTRAIN_OK);
    CHECK_EQ(dtrain_attention_forward(&a, qkv, kept, att), DTRAIN_OK);
    CHECK_EQ(dtrain_row_parallel_linear(&out, att, y), DTRAIN_OK);
    CHECK_EQ(dtrain_row_parallel_linear_backward(&out, att, dy, d_att), DTRAIN_OK);
    CHECK_EQ(dtrain_attention_backward(&a, qkv, kept, d_att, d_qkv), DTRAIN_OK);
    CHECK_EQ(dtrain_column_parallel_linear_backward(&in, x, d_qkv, dx), DTRAIN_OK);
    float *all[] = {qkv_w, qkv_b, out_w, qkv, kept, att, d_att, d_qkv};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static float apart(const float *a, const float *b, size_t count)
{
    float worst = 0;
    for (size_t i = 0; i < count; i++)
        worst = fmaxf(worst, fabsf(a[i] - b[i]));
    return worst;
}

static void blocks_of_heads(dtrain_comm *world)
{
    block b = {11, 5, 4, draw(1, 220), draw(2, 1200), draw(3, 60), draw(4, 400), draw(5, 20), draw(6, 220)};
    float y[220], dx[220], whole_y[220], whole_dx[220], db[20] = {0}, whole_db[20] = {0}, twice[20] = {0};
    size_t begin, rows = dtrain_shard(world, 11, dtrain_comm_rank(world), &begin) * 20;
    block_run(&b, NULL, 0, b.x, b.dy, whole_y, whole_dx, whole_db);
    block_run(&b, world, 0, b.x, b.dy, y, dx, db);
    CHECK(apart(y, whole_y, 220) < 1e-4f && apart(dx, whole_dx, 220) < 2e-3f && apart(db, whole_db, 20) == 0);
    begin *= 20;
    block_run(&b, world, 1, b.x + begin, b.dy + begin, y, dx, twice);
    CHECK(apart(y, whole_y + begin, rows) < 1e-4f && apart(dx, whole_dx + begin, rows) < 2e-3f);
    CHECK(apart(twice, whole_db, 20) == 0);
    float *all[] = {b.x, b.qkv_w, b.qkv_b, b.out_w, b.out_b, b.dy};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

TEST(a_block_of_heads_is_that_of_one_rank)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        on_threads(ranks, blocks_of_heads, NULL);
    on_processes(3, blocks_of_heads, NULL);
}

static void sequence_sums(dtrain_comm *world)
{
    float part[3] = {1, (float)dtrain_comm_rank(world), -1}, out[3] = {10, 20, 30};
    int n = dtrain_comm_size(world);
    CHECK_EQ(dtrain_sequence_parallel_sum(world, part, out, 3), DTRAIN_OK);
    CHECK(out[0] == 10 + (float)n && out[1] == 20 + (float)(n * (n - 1) / 2) && out[2] == 30 - (float)n);
    CHECK(part[0] == 1);
    CHECK_EQ(dtrain_sequence_parallel_sum(world, NULL, NULL, 0), DTRAIN_OK);
}

TEST(parts_of_a_gradient_are_summed_onto_it)
{
    sequence_sums(NULL);
    for (int ranks = 1; ranks <= 5; ranks++)
        everywhere(ranks, sequence_sums);
}

/* ---- what cannot be ---- */

static void refusals(dtrain_comm *world)
{
    float numbers[16] = {0};
    int32_t tokens[2] = {1, 7};
    double loss;
    dtrain_parallel_linear layer;
    dtrain_parallel_vocab vocab;
    memset(&layer, 0, sizeof layer);
    memset(&vocab, 0, sizeof vocab);
    layer.group = vocab.group = world;
    layer.rows = layer.inputs = layer.outputs = 2;
    CHECK_EQ(dtrain_column_parallel_linear(NULL, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_row_parallel_linear(&layer, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_comm_error(world), "weight is NULL, expected 2 x 1 of it");
    layer.weight = numbers;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, NULL, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "x is NULL, expected 2 x 2 of it");
    CHECK_EQ(dtrain_row_parallel_linear(&layer, numbers, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_row_parallel_linear_backward(&layer, numbers, NULL, numbers), DTRAIN_ERR_INVALID);
    layer.d_weight = numbers;
    CHECK_EQ(dtrain_column_parallel_linear_backward(&layer, NULL, numbers, numbers), DTRAIN_ERR_INVALID);
    layer.gather_output = 1;
    CHECK_EQ(dtrain_row_parallel_linear(&layer, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "gather_output");
    layer.gather_output = 0;
    layer.blocks = 3;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "2 outputs are no multiple of 3 blocks of granules of 1; 3 would be");
    layer.blocks = 0;
    layer.rows = SIZE_MAX / 2;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "more than memory can hold");
    vocab.rows = 2;
    vocab.vocab = 7;
    vocab.width = 1;
    vocab.table = vocab.d_table = numbers;
    CHECK_EQ(dtrain_vocab_parallel_embedding(&vocab, tokens, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "tokens[1] is 7, expected 0 to 6");
    tokens[1] = -1;
    CHECK_EQ(dtrain_vocab_parallel_embedding_backward(&vocab, tokens, numbers), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, numbers, tokens, 2, 1, &loss), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, numbers, tokens, 2, 7, NULL), DTRAIN_ERR_INVALID);
    tokens[1] = -2;
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(world, numbers, tokens, 2, 7, &loss), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "or -1 for a row that is left out");
    CHECK_EQ(dtrain_sequence_parallel_sum(world, NULL, numbers, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(dtrain_sequence_parallel_sum(world, numbers, numbers, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK); /* nothing of all this was seen by a peer */
}

TEST(wrong_arguments_are_refused_before_anything_is_communicated)
{
    dtrain_attention a = {1, 2, 1, 1, 0};
    float numbers[8] = {0};
    on_threads(2, refusals, NULL);
    on_processes(2, refusals, NULL);
    CHECK_EQ(dtrain_attention_forward(NULL, numbers, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_attention_forward(&a, numbers, NULL, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "kept is NULL, expected 4 elements");
    CHECK_EQ(dtrain_attention_backward(&a, numbers, numbers, NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "d_out is NULL");
    a.heads = SIZE_MAX / 2;
    CHECK_EQ(dtrain_attention_forward(&a, numbers, numbers, numbers), DTRAIN_ERR_INVALID);
}

static void other_rows(dtrain_comm *world)
{
    float numbers[16] = {0}, y[16];
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = 2 + (size_t)dtrain_comm_rank(world);
    layer.inputs = layer.outputs = 2;
    layer.weight = numbers;
    CHECK_EQ(dtrain_row_parallel_linear(&layer, numbers, y), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_comm_error(world), "f32 x 4");
    CHECK_CONTAINS(dtrain_comm_error(world), "f32 x 6");
}

TEST(sizes_that_differ_between_ranks_are_a_mismatch_on_both)
{
    on_threads(2, other_rows, NULL);
    on_processes(2, other_rows, NULL);
}

/* No memory for a temporary: an error, nothing lost, and the group goes on. */
static size_t allowance;

static void *stingy(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    (void)old_bytes;
    void *block = NULL;
    if (new_bytes == 0) {
        free(pointer);
        return NULL;
    }
    if (pointer != NULL || new_bytes > __atomic_load_n(&allowance, __ATOMIC_SEQ_CST))
        return NULL;
    return posix_memalign(&block, align, new_bytes) == 0 ? block : NULL;
}

TEST(without_memory_there_is_an_error_and_nothing_is_lost)
{
    dtrain_allocator allocator;
    dtrain_comm_desc desc;
    dtrain_comm *ends[2];
    float numbers[4] = {0}, y[4];
    dtrain_parallel_linear layer;
    memset(&allocator, 0, sizeof allocator);
    memset(&desc, 0, sizeof desc);
    memset(&layer, 0, sizeof layer);
    allocator.resize = stingy;
    desc.allocator = &allocator;
    allowance = SIZE_MAX;
    CHECK_EQ(dtrain_threads_create(ends, 2, &desc), DTRAIN_OK);
    size_t before = allocator.bytes;
    layer.group = ends[0];
    layer.rows = layer.inputs = layer.outputs = 2;
    layer.weight = numbers;
    layer.sequence = 1;
    allowance = 0;
    CHECK_EQ(dtrain_row_parallel_linear(&layer, numbers, y), DTRAIN_ERR_MEMORY);
    CHECK_CONTAINS(dtrain_comm_error(ends[0]), "row_parallel_linear on rank 0: no memory for 2 x 8 bytes");
    CHECK_EQ(allocator.bytes, before);
    allowance = SIZE_MAX;
    dtrain_comm_destroy(ends[0]);
    dtrain_comm_destroy(ends[1]);
    CHECK_EQ(allocator.bytes, 0);
}

/* Rank 2 dies by SIGKILL inside a step; the others hear of it from the layer that needs it. */
static int step_until_one_dies(dtrain_comm *world, scene *s)
{
    enum { N = 64 };
    static float x[N * N], w[N * N], y[N * N], dx[N * N], dw[N * N];
    dtrain_parallel_linear layer;
    dtrain_status status = DTRAIN_OK;
    (void)s;
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = layer.inputs = layer.outputs = N;
    layer.weight = w;
    layer.d_weight = dw;
    layer.sequence = 1;
    for (int step = 0; status == DTRAIN_OK; step++) {
        status = dtrain_column_parallel_linear(&layer, x, y);
        if (status == DTRAIN_OK && step == 20 && dtrain_comm_rank(world) == 2)
            raise(SIGKILL);
        if (status == DTRAIN_OK)
            status = dtrain_column_parallel_linear_backward(&layer, x, y, dx);
    }
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), "rank 2");
    return 0;
}

TEST(a_rank_that_dies_is_named_to_all_others)
{
    scene s;
    pid_t pids[4];
    scene_begin(&s, 4, 1);
    for (int rank = 0; rank < 4; rank++)
        pids[rank] = start_rank(&s, rank, step_until_one_dies);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(end_of(pids[rank], 60), rank == 2 ? 128 + SIGKILL : 0);
}
