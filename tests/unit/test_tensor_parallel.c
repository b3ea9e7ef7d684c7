/* ---- >>test_tensor_parallel ----
 * Linear layers that are split beside the whole ones in float64 that share nothing with them, at 1 to 8 ranks and sizes
 * that do not divide; the same bits on threads, processes and cables; what cannot be, and what fails. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "split_layers.h"

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

static size_t part_of(size_t size, size_t step, int ranks, int rank)
{
    dtrain__tp_linear l;
    memset(&l, 0, sizeof l);
    l.step = step;
    l.tp.size = ranks;
    return dtrain__tp_linear_part(&l, size, rank);
}

TEST(parts_are_granules_of_every_block)
{
    CHECK_EQ(part_of(7, 1, 3, 0), 3);
    CHECK_EQ(part_of(7, 1, 3, 2), 2);
    CHECK_EQ(part_of(3 * 5 * 4, 3 * 4, 2, 0), 3 * 3 * 4); /* 5 heads of 4 channels: 3 and 2 */
    CHECK_EQ(part_of(3 * 5 * 4, 3 * 4, 2, 1), 3 * 2 * 4);
    CHECK_EQ(part_of(2, 1, 4, 1), 1);
    CHECK_EQ(part_of(2, 1, 4, 2), 0);
    CHECK_EQ(part_of(0, 3 * 2, 4, 0), 0);
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
    size_t step = (size_t)(c.blocks > 0 ? 3 : 1) * (size_t)(c.granule > 0 ? 2 : 1);
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

/* A sum of products in float64, and of their sizes. */
typedef struct products {
    double sum, size;
} products;

static void add_product(products *p, float a, float b)
{
    p->sum += (double)a * (double)b;
    p->size += fabs((double)a * (double)b);
}

static int is_near(const linear_test *t, int number, const char *what, float got, products expected, size_t r, size_t k)
{
    if (near(got, expected.sum, expected.size))
        return 1;
    TEST_FAIL("case %d, rank %d of %d: %s[%zu, %zu] is %g, expected %g", number, t->rank, t->ranks, what, r, k,
              (double)got, expected.sum);
    return 0;
}

static void linear_check_y(const linear_test *t, int number)
{
    const linear_case *c = &t->c;
    size_t first = c->sequence && c->row ? t->row_begin : 0;
    for (size_t r = 0; r < t->y_rows; r++)
        for (size_t k = 0; k < t->y_columns; k++) {
            size_t o = c->gather ? k : whole_out(t, k);
            products p = {0, 0};
            add_product(&p, c->bias ? t->b[o] : 0, 1);
            for (size_t i = 0; i < c->inputs; i++)
                add_product(&p, t->x[(r + first) * c->inputs + i], weight_at(t, o, i));
            if (!is_near(t, number, "y", t->y[r * t->y_columns + k], p, r, k))
                return;
        }
}

static void linear_check_dx(const linear_test *t, int number)
{
    const linear_case *c = &t->c;
    size_t first = c->sequence && !c->row ? t->row_begin : 0;
    for (size_t r = 0; r < t->x_rows; r++)
        for (size_t k = 0; k < t->x_columns; k++) {
            products p = {0, 0};
            for (size_t o = 0; o < c->outputs; o++)
                add_product(&p, t->dy[(r + first) * c->outputs + o], weight_at(t, o, whole_in(t, k)));
            if (!is_near(t, number, "dx", t->dx[r * t->x_columns + k], p, r, k))
                return;
        }
}

static void linear_check_dw(const linear_test *t, int number)
{
    const linear_case *c = &t->c;
    for (size_t o = 0; o < t->out; o++) {
        products bias = {0, 0};
        for (size_t r = 0; r < c->rows; r++)
            add_product(&bias, t->dy[r * c->outputs + whole_out(t, o)], 1);
        if (!is_near(t, number, "d_bias", t->db[o], bias, 0, o))
            return;
        for (size_t i = 0; i < t->in; i++) {
            products p = {0.25, 0.25};
            for (size_t r = 0; r < c->rows; r++)
                add_product(&p, t->dy[r * c->outputs + whole_out(t, o)], t->x[r * c->inputs + whole_in(t, i)]);
            if (!is_near(t, number, "d_weight", t->dw[local_weight(t, o, i)], p, o, i))
                return;
        }
    }
}

static dtrain_status linear_backward(const linear_test *t, const dtrain_parallel_linear *layer, const float *x,
                                     float *dx)
{
    return t->c.row ? dtrain_row_parallel_linear_backward(layer, x, t->my_dy, dx)
                    : dtrain_column_parallel_linear_backward(layer, x, t->my_dy, dx);
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
    CHECK_EQ(linear_backward(t, &layer, NULL, dx), DTRAIN_OK);
    layer.weight = NULL;
    layer.d_weight = dw;
    layer.d_bias = db;
    CHECK_EQ(linear_backward(t, &layer, t->my_x, NULL), DTRAIN_OK);
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
    CHECK_EQ(linear_backward(&t, &layer, t.my_x, t.dx), DTRAIN_OK);
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
    size_t part = part_of(layer.outputs, 1, ranks, rank);
    float *x = draw(1, 33 * 70), *w = draw(10 + (uint64_t)rank, part * 70), *dy = draw(20 + (uint64_t)rank, 33 * part);
    layer.weight = w;
    for (layer.no_overlap = 0; layer.no_overlap < 2; layer.no_overlap++) {
        float *dx = draw(5, 33 * 70), *dw = draw(6, part * 70);
        layer.d_weight = dw;
        CHECK_EQ(dtrain_column_parallel_linear_backward(&layer, x, dy, dx), DTRAIN_OK);
        same_bits(0, rank, hash_of(hash_of(1, dx, 33 * 70), dw, part * 70));
        free(dx);
        free(dw);
    }
    free(x);
    free(w);
    free(dy);
}

TEST(large_products_have_the_same_bits_polled_and_without_overlap)
{
    memset(seen, 0, sizeof seen);
    everywhere(2, large_linear);
}

/* ---- what cannot be ---- */

static void refused_layers(dtrain_comm *world)
{
    float numbers[16] = {0};
    dtrain_parallel_linear layer;
    memset(&layer, 0, sizeof layer);
    layer.group = world;
    layer.rows = layer.inputs = layer.outputs = 2;
    CHECK_EQ(dtrain_column_parallel_linear(NULL, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_row_parallel_linear(&layer, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "weight is NULL, expected 2 x 1 elements");
    layer.weight = numbers;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, NULL, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "x is NULL, expected 2 x 2 elements");
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
    CHECK_CONTAINS(dtrain_last_error(), "there are 2 outputs, expected a multiple of 3 blocks x granule 1; 3 would fit");
    layer.blocks = SIZE_MAX;
    layer.granule = 2;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, numbers, numbers), DTRAIN_ERR_INVALID);
    layer.blocks = layer.granule = 0;
    layer.rows = SIZE_MAX / 2;
    CHECK_EQ(dtrain_column_parallel_linear(&layer, numbers, numbers), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "more than memory can hold");
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK); /* nothing of all this was seen by a peer */
}

static void refused_vocabularies(dtrain_comm *world)
{
    float numbers[16] = {0};
    int32_t tokens[2] = {1, 7};
    double loss;
    dtrain_parallel_vocab vocab;
    memset(&vocab, 0, sizeof vocab);
    vocab.group = world;
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
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
}

TEST(wrong_arguments_are_refused_before_anything_is_communicated)
{
    dtrain_attention a = {1, 2, 1, 1, 0};
    float numbers[8] = {0};
    on_threads(2, refused_layers, NULL);
    on_processes(2, refused_layers, NULL);
    on_threads(2, refused_vocabularies, NULL);
    on_processes(2, refused_vocabularies, NULL);
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
    CHECK_CONTAINS(dtrain_last_error(), "f32 x 4");
    CHECK_CONTAINS(dtrain_last_error(), "f32 x 6");
}

TEST(sizes_that_differ_between_ranks_are_a_mismatch_on_both)
{
    on_threads(2, other_rows, NULL);
    on_processes(2, other_rows, NULL);
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
