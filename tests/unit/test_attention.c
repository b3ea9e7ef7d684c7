/* ---- >>test_attention ----
 * Attention beside finite differences of itself in float64; heads together beside heads alone; and a block of a model,
 * split by heads, beside the whole one, and the sums that its split rows need. */
#include "dtrain.h"
#include "test.h"
#include "split_layers.h"

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
    CHECK(!causal || t < 2 || heads == 0 || kept[1] == 0);
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
    heads = cut_of(b->heads, dtrain_comm_size(group), dtrain_comm_rank(group), &first);
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
