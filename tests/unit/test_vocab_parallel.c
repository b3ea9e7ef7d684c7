/* ---- >>test_vocab_parallel ----
 * The embedding and the cross-entropy that are split by the vocabulary beside the whole ones in float64, and beside
 * finite differences; what is no number; memory. */
#include "dtrain.h"
#include "test.h"
#include "split_layers.h"

/* ---- the embedding ---- */

static void one_embedding(dtrain_comm *world, size_t rows, size_t vocab, size_t width, int sequence, int number)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t begin, first = 0, part = cut_of(vocab, ranks, rank, &begin), mine = rows;
    float *table = draw(1, vocab * width), *d_whole = draw(2, rows * width), *out, *d_table;
    int32_t *tokens = (int32_t *)malloc((rows + 1) * sizeof *tokens);
    if (sequence)
        mine = cut_of(rows, ranks, rank, &first);
    out = (float *)malloc((mine * width + 1) * sizeof(float));
    d_table = (float *)calloc(part * width + 1, sizeof(float));
    for (size_t i = 0; i < vocab * width; i += 5)
        table[i] = -0.0f;
    for (size_t i = 0; i < rows; i++)
        tokens[i] = (int32_t)(dtrain_random_u64(3, i) % vocab);
    dtrain_parallel_vocab layer = {world, rows, vocab, width, table + begin * width, d_table, sequence};
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
    t->part = cut_of(vocab, dtrain_comm_size(world), dtrain_comm_rank(world), &t->begin);
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

/* Exponentials over their whole range: of two logits that lie x apart the lesser has 1 / (1 + e^x), to a few units in
 * the last place, or where it is subnormal, of the smallest number. */
TEST(small_probabilities_are_exact_to_a_few_units)
{
    int32_t target = 0;
    double loss;
    for (float x = 0; x < 110; x += 0.0123f) {
        float logits[2] = {5, 5 - x};
        double p = 1 / (1 + exp((double)(5 - logits[1]))), unit = fmax(p * 2 * EPSILON, 1.4012984643e-45);
        CHECK_EQ(dtrain_vocab_parallel_cross_entropy(NULL, logits, &target, 1, 2, &loss), DTRAIN_OK);
        if (fabs((double)logits[1] - p) > 2.5 * unit)
            TEST_FAIL("%g apart: %g, expected %g", (double)x, (double)logits[1], p);
    }
}

TEST(equal_logits_lose_the_logarithm_of_their_number)
{
    static float logits[5000];
    int32_t target = 3;
    for (size_t n = 4; n < 5000; n += 1 + n / 50) {
        double loss;
        for (size_t i = 0; i < n; i++)
            logits[i] = -2.5f;
        CHECK_EQ(dtrain_vocab_parallel_cross_entropy(NULL, logits, &target, 1, n, &loss), DTRAIN_OK);
        CHECK(fabs(loss - log((double)n)) <= 4.5e-16 * loss);
    }
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

/* ---- memory ---- */

/* No memory for a temporary: an error, nothing lost, and the group goes on. */
static size_t allowance;

static void *stingy(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    (void)old_bytes;
    void *memory = NULL;
    if (new_bytes == 0) {
        free(pointer);
        return NULL;
    }
    if (pointer != NULL || new_bytes > __atomic_load_n(&allowance, __ATOMIC_SEQ_CST))
        return NULL;
    return posix_memalign(&memory, align, new_bytes) == 0 ? memory : NULL;
}

TEST(without_memory_there_is_an_error_and_nothing_is_lost)
{
    dtrain_allocator allocator;
    dtrain_comm_desc desc;
    dtrain_comm *ends[2];
    float numbers[4] = {0}, y[4], logits[40] = {0};
    int32_t targets[40] = {0};
    double loss;
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
    CHECK_CONTAINS(dtrain_last_error(), "row_parallel_linear on rank 0: no memory for 2 x 8 bytes");
    CHECK_EQ(allocator.bytes, before);
    allowance = 200; /* enough for the largest of 40 rows, not for their sums */
    CHECK_EQ(dtrain_vocab_parallel_cross_entropy(ends[0], logits, targets, 40, 2, &loss), DTRAIN_ERR_MEMORY);
    CHECK_EQ(allocator.bytes, before);
    allowance = SIZE_MAX;
    dtrain_comm_destroy(ends[0]);
    dtrain_comm_destroy(ends[1]);
    CHECK_EQ(allocator.bytes, 0);
}

TEST(temporary_memory_is_the_groups_and_given_back)
{
    dtrain_allocator allocator;
    dtrain_comm_desc desc;
    memset(&allocator, 0, sizeof allocator);
    memset(&desc, 0, sizeof desc);
    memset(seen, 0, sizeof seen);
    desc.allocator = &allocator;
    on_threads(3, embeddings, &desc);
    CHECK_EQ(allocator.bytes, 0);
    memset(seen, 0, sizeof seen);
    on_threads(3, entropies, &desc);
    CHECK_EQ(allocator.bytes, 0);
}
