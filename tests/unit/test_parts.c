/* Parts of parameters: how they are cut, where their elements lie in the whole model, which tables have good ones, and
 * as which pieces of whole tensors they are saved. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "reshard_plan.h"

static dtrain_param whole(const char *name, int stacked, int ndim, size_t a, size_t b, size_t c)
{
    dtrain_param param;
    memset(&param, 0, sizeof param);
    param.name = name;
    param.dtype = DTRAIN_F32;
    param.stacked = stacked;
    param.ndim = ndim;
    param.shape[0] = a;
    param.shape[1] = b;
    param.shape[2] = c;
    return param;
}

/* ---- cutting ---- */

TEST(ten_columns_over_three_ranks_are_4_3_3)
{
    const size_t sizes[3] = {4, 3, 3}, begins[3] = {0, 4, 7};
    for (int i = 0; i < 3; i++) {
        dtrain_param_part part;
        dtrain_param param = whole("w", 0, 0, 5, 10, 0);
        CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 3, i), DTRAIN_OK);
        CHECK_EQ(param.shape[0], 5);
        CHECK_EQ(param.shape[1], sizes[i]);
        CHECK_EQ(param.ndim, 2);
        CHECK(param.part == &part);
        CHECK_EQ(part.begin, begins[i]);
        CHECK_EQ(part.shape[1], 10);
        CHECK_EQ(dtrain_param_elements(&param), 5 * sizes[i]);
    }
}

TEST(each_block_is_cut_alike_and_at_whole_heads)
{
    /* query, key and value of 5 heads of 2 in one: over 3 ranks 2, 2, 1 heads of each */
    const size_t sizes[3] = {12, 12, 6}, begins[3] = {0, 4, 8};
    for (int i = 0; i < 3; i++) {
        dtrain_param_part part;
        dtrain_param param = whole("qkv", 1, 3, 4, 30, 7);
        CHECK_EQ(dtrain_param_cut(&param, &part, 1, 3, 2, 3, i), DTRAIN_OK);
        CHECK_EQ(param.shape[1], sizes[i]);
        CHECK_EQ(part.begin, begins[i]);
        CHECK_EQ(part.blocks, 3);
    }
}

TEST(a_short_last_granule_ends_the_block_and_ranks_beyond_the_granules_get_nothing)
{
    const size_t begins[4] = {0, 4, 8, 10}, sizes[4] = {4, 4, 2, 0}; /* granules of 10: 4, 4, 2 */
    for (int i = 0; i < 4; i++) {
        dtrain_param_part part;
        dtrain_param param = whole("w", 0, 0, 10, 3, 0);
        CHECK_EQ(dtrain_param_cut(&param, &part, 0, 1, 4, 4, i), DTRAIN_OK);
        CHECK_EQ(part.begin, begins[i]);
        CHECK_EQ(param.shape[0], sizes[i]);
        CHECK_EQ(param.ndim, 2);
        CHECK_EQ(dtrain_param_elements(&param), 3 * sizes[i]);
    }
}

TEST(cuts_layers_and_copies_follow_one_another_in_any_order)
{
    dtrain_param_part a, b, c;
    dtrain_param x = whole("w", 1, 3, 6, 8, 5), y = x;
    CHECK_EQ(dtrain_param_layers(&x, &a, 1, 4), DTRAIN_OK);
    CHECK_EQ(dtrain_param_cut(&x, &a, 2, 0, 0, 2, 1), DTRAIN_OK);
    dtrain_param_copies(&x, &a, 3, 2);
    dtrain_param_copies(&y, &b, 3, 2);
    CHECK_EQ(dtrain_param_cut(&y, &b, 2, 0, 0, 2, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_param_layers(&y, &c, 1, 4), DTRAIN_OK); /* with another part, which takes over */
    CHECK(y.part == &c);
    CHECK(memcmp(a.shape, c.shape, sizeof a.shape) == 0 && memcmp(x.shape, y.shape, sizeof x.shape) == 0);
    CHECK(a.first_layer == 1 && c.first_layer == 1 && a.begin == 3 && c.begin == 3);
    CHECK(a.copies == 3 && c.copies == 3 && a.copy == 2 && c.copy == 2);
    CHECK(x.shape[0] == 4 && x.shape[1] == 8 && x.shape[2] == 2);
    CHECK_EQ(dtrain_param_layers(&x, &a, 2, 2), DTRAIN_OK); /* of those that it has */
    CHECK_EQ(a.first_layer, 3);
    CHECK_EQ(x.shape[0], 2);
    CHECK_EQ(a.shape[0], 6);
}

TEST(what_cannot_be_cut_is_refused_and_left_as_it_was)
{
    dtrain_param_part part;
    dtrain_param param = whole("w", 1, 3, 4, 30, 7), before = param;
    CHECK_EQ(dtrain_param_cut(&param, &part, 0, 0, 0, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "parameter w of 3 dimensions has no dim 0 to cut: expected 1 to 2");
    CHECK_EQ(dtrain_param_cut(&param, &part, 3, 0, 0, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_cut(&param, &part, -1, 0, 0, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 4, 0, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "has 30 in dim 1, which is not 4 equal blocks");
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 2, 2), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 0, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 2, -1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_layers(&param, &part, 2, 3), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "has 4 layers: first is 2 and count 3");
    CHECK_EQ(dtrain_param_layers(&param, &part, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_layers(&param, &part, SIZE_MAX, 2), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_cut(&param, NULL, 1, 0, 0, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_param_cut(NULL, &part, 1, 0, 0, 2, 0), DTRAIN_ERR_INVALID);
    CHECK(memcmp(&param, &before, sizeof param) == 0);
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 2, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 2, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "is cut along dim 1 already");
    CHECK_EQ(dtrain_param_cut(&param, &part, 2, 0, 0, 2, 0), DTRAIN_ERR_INVALID);
    param = whole("flat", 0, 1, 4, 0, 0);
    CHECK_EQ(dtrain_param_layers(&param, &part, 0, 2), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "flat is not stacked");
}

/* ---- where elements lie ---- */

TEST(elements_of_a_cut_qkv_lie_where_a_hand_puts_them)
{
    /* two layers of three blocks of two rows of two; rank 1 of 2 has the second row of each block, of layer 1 alone:
     * rows 1, 3, 5 of layer 1, which begins at element 12 */
    const size_t expected[6] = {14, 15, 18, 19, 22, 23};
    dtrain_param_part part;
    dtrain_param param = whole("qkv", 1, 3, 2, 6, 2);
    CHECK_EQ(dtrain_param_whole_index(&param, 17), 17);
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 3, 0, 2, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_param_layers(&param, &part, 1, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_param_elements(&param), 6);
    for (size_t e = 0; e < 6; e++)
        CHECK_EQ(dtrain_param_whole_index(&param, e), expected[e]);
}

TEST(elements_of_columns_lie_where_a_hand_puts_them)
{
    const size_t expected[4] = {2, 3, 7, 8}; /* columns 2 and 3 of {2, 5} */
    dtrain_param_part part;
    dtrain_param param = whole("w", 0, 2, 2, 5, 0);
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 3, 1), DTRAIN_OK);
    for (size_t e = 0; e < 4; e++)
        CHECK_EQ(dtrain_param_whole_index(&param, e), expected[e]);
}

/* A random tensor, and how ranks cut it. */
typedef struct cut {
    dtrain_param param;
    int dim, tensor, stages;
    size_t blocks, granule;
} cut;

static uint64_t drawn;

static size_t draw(size_t below)
{
    return (size_t)(dtrain_random_u64(20261121, drawn++) % below);
}

static cut random_cut(void)
{
    cut c;
    c.param = whole("t", (int)draw(2), 1 + (int)draw(3), 1 + draw(5), 1 + draw(7), 1 + draw(7));
    if (c.param.stacked && c.param.ndim == 1)
        c.param.ndim = 2;
    c.dim = c.param.stacked + (int)draw((size_t)(c.param.ndim - c.param.stacked));
    c.blocks = 1 + draw(3);
    c.granule = draw(4);
    c.param.shape[c.dim] *= c.blocks;
    c.tensor = 1 + (int)draw(5);
    c.stages = c.param.stacked ? 1 + (int)draw(c.param.shape[0]) : 1;
    return c;
}

/* The part of a rank; ranks of a stage are one after the other. */
static dtrain_param part_of(const cut *c, int rank, dtrain_param_part *part)
{
    dtrain_param param = c->param;
    size_t first, count = cut_of(param.shape[0], c->stages, rank / c->tensor, &first);
    if (param.stacked)
        CHECK_EQ(dtrain_param_layers(&param, part, first, count), DTRAIN_OK);
    CHECK_EQ(dtrain_param_cut(&param, part, c->dim, c->blocks, c->granule, c->tensor, rank % c->tensor), DTRAIN_OK);
    return param;
}

TEST(parts_of_any_cut_hold_each_element_of_the_whole_once)
{
    for (int round = 0; round < 400; round++) {
        cut c = random_cut();
        size_t all = dtrain_param_elements(&c.param), found = 0;
        unsigned char *seen = (unsigned char *)calloc(all, 1);
        for (int rank = 0; rank < c.tensor * c.stages; rank++) {
            dtrain_param_part part;
            dtrain_param param = part_of(&c, rank, &part);
            size_t count = dtrain_param_elements(&param), last = 0;
            param.data = &c; /* some memory */
            CHECK_EQ(dtrain__params_check(&param, 1), DTRAIN_OK);
            for (size_t e = 0; e < count; e++) {
                size_t at = dtrain_param_whole_index(&param, e);
                CHECK(at < all && !seen[at] && (e == 0 || at > last)); /* in the order of the whole */
                seen[at < all ? at : 0] = 1;
                last = at;
                found++;
            }
        }
        CHECK_EQ(found, all);
        free(seen);
    }
}

/* ---- tables ---- */

TEST(a_part_that_does_not_lie_in_its_whole_is_refused_by_name)
{
    static float memory[500];
    dtrain_param_part good;
    dtrain_param param = whole("qkv", 1, 3, 4, 30, 7);
    CHECK_EQ(dtrain_param_cut(&param, &good, 1, 3, 2, 3, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_param_layers(&param, &good, 1, 2), DTRAIN_OK);
    param.data = memory;
    CHECK_EQ(dtrain__params_check(&param, 1), DTRAIN_OK);
    for (int i = 0; i < 12; i++) {
        static const char *const texts[12] = {"copy is not",      "copy is not",      "copy is not",   "dim is none",
                                              "dim is none",      "multiply to more", "layers reach",  "layers reach",
                                              "its size differs", "divide by blocks", "begin and its", "counts layers"};
        dtrain_param_part part = good;
        part.copies = i == 0 ? -1 : 2;
        part.copy = i == 1 ? 2 : i == 2 ? -1 : 1;
        part.dim = i == 3 ? 3 : i == 4 ? -1 : 1;
        part.shape[0] = i == 5 ? SIZE_MAX / 4 : i == 6 ? 2 : 4;
        part.first_layer = i == 7 ? 3 : 1;
        part.shape[2] = i == 8 ? 8 : 7;
        part.blocks = i == 9 ? 5 : 3;
        part.begin = i == 10 ? 7 : 4;
        if (i == 11) {
            part.dim = 0;
            part.shape[1] = param.shape[1];
        }
        param.part = &part;
        CHECK_EQ(dtrain__params_check(&param, 1), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "parameter qkv: its part: ");
        CHECK_CONTAINS(dtrain_last_error(), texts[i]);
    }
    dtrain_param flat = whole("flat", 0, 1, 5, 0, 0);
    dtrain_param_part part;
    dtrain_param_copies(&flat, &part, 0, 0);
    flat.data = memory;
    CHECK_EQ(dtrain__params_check(&flat, 1), DTRAIN_OK);
    part.first_layer = 1;
    CHECK_EQ(dtrain__params_check(&flat, 1), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "is not stacked");
}

TEST(an_optimizer_steps_over_a_part_of_nothing)
{
    float x[3] = {1, 2, 3}, g[3] = {1, 1, 1};
    dtrain_param_part part;
    dtrain_param table[2] = {whole("none", 0, 2, 4, 2, 0), whole("some", 0, 1, 3, 0, 0)};
    dtrain_optimizer_desc desc;
    dtrain_optimizer *optimizer = NULL;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_SGD;
    desc.momentum = 0.5f;
    CHECK_EQ(dtrain_param_cut(&table[0], &part, 1, 0, 0, 3, 2), DTRAIN_OK);
    table[0].data = table[1].data = x;
    table[0].grad = table[1].grad = g;
    CHECK_EQ(dtrain_optimizer_create(&optimizer, table, 2, &desc, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_optimizer_step(optimizer, 0.25f), DTRAIN_OK);
    CHECK(x[0] == 0.75f && x[1] == 1.75f && x[2] == 2.75f);
    dtrain_optimizer_destroy(optimizer);
}

/* ---- pieces ---- */

static void check_piece(const dtrain_piece *piece, const char *text)
{
    char got[256];
    int at = snprintf(got, sizeof got, "%s%s", piece->name, piece->suffix != NULL ? piece->suffix : "");
    for (int d = 0; d < piece->ndim; d++) {
        size_t begin = piece->boxed ? piece->box_begin[d] : 0,
               size = piece->boxed ? piece->box_size[d] : piece->shape[d];
        at += snprintf(got + at, sizeof got - (size_t)at, " %zu-%zu/%zu", begin, begin + size, piece->shape[d]);
    }
    snprintf(got + at, sizeof got - (size_t)at, ", %zu from %zu, copy %d of %d%s", piece->count, piece->begin,
             piece->copy, piece->copies, piece->unsaved ? ", unsaved" : "");
    if (strcmp(got, text) != 0)
        TEST_FAIL("the piece is\n  %s, expected\n  %s", got, text);
}

/* Pieces, kept beyond the visit. */
typedef struct kept {
    dtrain_piece *pieces;
    size_t count, room;
} kept;

static void keep(void *user, const dtrain_piece *piece)
{
    kept *k = (kept *)user;
    CHECK(k->count < k->room);
    k->pieces[k->count++] = *piece; /* its name is the table's */
}

static size_t list(dtrain_pieces pieces, int ranks, int rank, dtrain_piece *out, size_t room)
{
    kept k = {out, 0, room};
    CHECK_EQ(dtrain_pieces_each(&pieces, 1, ranks, rank, keep, &k), DTRAIN_OK);
    return k.count;
}

TEST(a_tables_parts_are_boxes_of_whole_tensors)
{
    static float memory[5][200];
    dtrain_param_part parts[5];
    dtrain_piece pieces[16];
    dtrain_param table[5] = {whole("columns", 0, 2, 4, 10, 0), whole("qkv", 1, 3, 6, 12, 5),
                             whole("norm", 1, 2, 6, 3, 0), whole("mixed", 0, 2, 2, 6, 0), whole("none", 0, 1, 2, 0, 0)};
    CHECK_EQ(dtrain_param_cut(&table[0], &parts[0], 1, 0, 0, 3, 2), DTRAIN_OK);
    CHECK_EQ(dtrain_param_layers(&table[1], &parts[1], 4, 2), DTRAIN_OK);
    CHECK_EQ(dtrain_param_cut(&table[1], &parts[1], 1, 3, 0, 3, 2), DTRAIN_OK); /* one row of 4 */
    CHECK_EQ(dtrain_param_layers(&table[2], &parts[2], 4, 2), DTRAIN_OK);
    dtrain_param_copies(&table[2], &parts[2], 3, 2);
    CHECK_EQ(dtrain_param_cut(&table[3], &parts[3], 1, 2, 0, 3, 2), DTRAIN_OK); /* the last of 3 in each of 2 blocks */
    CHECK_EQ(dtrain_param_cut(&table[4], &parts[4], 0, 2, 0, 3, 2), DTRAIN_OK);
    for (int i = 0; i < 5; i++)
        table[i].data = memory[i];
    CHECK_EQ(list(dtrain_params_pieces(table, 5, NULL), 4, 1, pieces, 16), 13);
    check_piece(&pieces[0], "columns 0-4/4 7-10/10, 12 from 0, copy 1 of 4");
    check_piece(&pieces[1], "qkv 4-5/6 3-4/12 0-5/5, 5 from 0, copy 1 of 4");
    check_piece(&pieces[2], "qkv 4-5/6 7-8/12 0-5/5, 5 from 0, copy 1 of 4");
    check_piece(&pieces[3], "qkv 4-5/6 11-12/12 0-5/5, 5 from 0, copy 1 of 4");
    check_piece(&pieces[4], "qkv 5-6/6 3-4/12 0-5/5, 5 from 0, copy 1 of 4");
    check_piece(&pieces[6], "qkv 5-6/6 11-12/12 0-5/5, 5 from 0, copy 1 of 4");
    CHECK(pieces[6].data == memory[1] + 25);
    check_piece(&pieces[7], "norm 4-6/6 0-3/3, 6 from 0, copy 5 of 12");
    check_piece(&pieces[8], "mixed 0-1/2 2-3/6, 1 from 0, copy 1 of 4");
    check_piece(&pieces[9], "mixed 0-1/2 5-6/6, 1 from 0, copy 1 of 4");
    check_piece(&pieces[10], "mixed 1-2/2 2-3/6, 1 from 0, copy 1 of 4");
    check_piece(&pieces[11], "mixed 1-2/2 5-6/6, 1 from 0, copy 1 of 4");
    CHECK(pieces[11].data == memory[3] + 3);
    check_piece(&pieces[12], "none 1-1/2, 0 from 0, copy 1 of 4");
}

TEST(pieces_of_one_cut_make_up_those_of_any_other)
{
    enum { MOST = 4000, FLOATS = 5 * 7 * 3 * 7 * 3 };
    static dtrain_piece have[MOST], want[MOST];
    static reshard_copy copies[20000];
    static float from[16][FLOATS], to[16][FLOATS];
    for (int round = 0; round < 200; round++) {
        cut c = random_cut(), other = c;
        size_t have_count = 0, want_count = 0, count = 0;
        other.tensor = 1 + (int)draw(3);
        other.granule = draw(3);
        other.stages = c.param.stacked ? 1 + (int)draw(c.param.shape[0]) : 1;
        other.dim = c.param.stacked + (int)draw((size_t)(c.param.ndim - c.param.stacked));
        other.blocks = other.dim == c.dim ? c.blocks : 1;
        if (c.tensor * c.stages > 16 || other.tensor * other.stages > 16)
            continue;
        for (int side = 0; side < 2; side++) {
            const cut *now = side == 0 ? &c : &other;
            for (int rank = 0; rank < now->tensor * now->stages; rank++) {
                dtrain_param_part part;
                dtrain_param param = part_of(now, rank, &part);
                size_t listed;
                param.data = side == 0 ? from[rank] : to[rank];
                for (size_t e = 0; e < dtrain_param_elements(&param); e++)
                    ((float *)param.data)[e] = side == 0 ? (float)dtrain_param_whole_index(&param, e) : -1.0f;
                listed = list(dtrain_params_pieces(&param, 1, NULL), 1, 0,
                              side == 0 ? have + have_count : want + want_count, 500);
                *(side == 0 ? &have_count : &want_count) += listed;
            }
        }
        CHECK_EQ(reshard_plan(have, have_count, want, want_count, copies, 20000, &count), DTRAIN_OK);
        for (size_t i = 0; i < count && i < 20000; i++)
            memcpy((float *)want[copies[i].to].data + copies[i].to_begin,
                   (float *)have[copies[i].from].data + copies[i].from_begin, copies[i].count * sizeof(float));
        for (int rank = 0; rank < other.tensor * other.stages; rank++) {
            dtrain_param_part part;
            dtrain_param param = part_of(&other, rank, &part);
            for (size_t e = 0; e < dtrain_param_elements(&param); e++)
                CHECK(to[rank][e] == (float)dtrain_param_whole_index(&param, e));
        }
    }
}

TEST(what_is_marked_unsaved_is_wanted_and_never_had)
{
    dtrain_piece have[3], want;
    reshard_copy copies[4];
    size_t count = 0;
    memset(have, 0, sizeof have);
    for (int i = 0; i < 3; i++) {
        have[i].name = "norm";
        have[i].dtype = DTRAIN_F32;
        have[i].ndim = 1;
        have[i].shape[0] = 10;
    }
    have[0].begin = 2; /* [2, 9), which the other two have as [0, 6) and [6, 10) */
    have[0].count = 7;
    have[0].unsaved = 1;
    have[1].count = 6;
    have[2].begin = 6;
    have[2].count = 4;
    want = have[0];
    CHECK_EQ(reshard_plan(have, 3, &want, 1, copies, 4, &count), DTRAIN_OK);
    CHECK_EQ(count, 2);
    CHECK(copies[0].from == 1 && copies[0].from_begin == 2 && copies[0].to_begin == 0 && copies[0].count == 4);
    CHECK(copies[1].from == 2 && copies[1].from_begin == 0 && copies[1].to_begin == 4 && copies[1].count == 3);
    CHECK_EQ(reshard_plan(have, 1, &want, 1, copies, 4, &count), DTRAIN_ERR_MISMATCH);
}

/* ---- FSDP ---- */

enum { EMPTY, QKV, COLUMNS, NORM, PARAMS };

/* Rank 1 of 2 of the model; the unit of EMPTY has nothing. */
static void parts_table(dtrain_param *table, dtrain_param_part *parts)
{
    table[EMPTY] = whole("empty", 0, 1, 1, 0, 0);
    table[QKV] = whole("qkv", 1, 3, 2, 6, 2);
    table[COLUMNS] = whole("columns", 1, 3, 2, 2, 5);
    table[NORM] = whole("norm", 1, 2, 2, 3, 0);
    table[QKV].unit = table[COLUMNS].unit = table[NORM].unit = 1;
    CHECK_EQ(dtrain_param_cut(&table[EMPTY], &parts[EMPTY], 0, 0, 0, 2, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_param_cut(&table[QKV], &parts[QKV], 1, 3, 0, 2, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_param_cut(&table[COLUMNS], &parts[COLUMNS], 2, 0, 0, 2, 1), DTRAIN_OK); /* columns 3 and 4 */
    dtrain_param_copies(&table[NORM], &parts[NORM], 2, 1);
}

static dtrain_status step_parts(dtrain_fsdp *fsdp)
{
    dtrain_status status = DTRAIN_OK;
    for (int unit = 0; unit < 3 && status == DTRAIN_OK; unit++) {
        status = dtrain_fsdp_gather(fsdp, unit);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_release(fsdp, unit);
    }
    for (int unit = 2; unit >= 0 && status == DTRAIN_OK; unit--) {
        status = dtrain_fsdp_gather(fsdp, unit);
        float *grad = dtrain_fsdp_grad(fsdp, "norm");
        if (unit > 0)
            grad[3 * (unit - 1)] = 1.0f;
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, unit);
    }
    return status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 1.0f) : status;
}

/* A layer has 6 of qkv, 4 of columns, 3 of norm: 13, of which rank 0 has 7 and rank 1 6. */
static dtrain_status fsdp_body(dtrain_comm *world, void *user)
{
    int sharded = *(const int *)user, rank = dtrain_comm_rank(world);
    dtrain_param table[PARAMS];
    dtrain_param_part parts[PARAMS];
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    dtrain_piece pieces[32];
    size_t count = 0;
    parts_table(table, parts);
    memset(&desc, 0, sizeof desc);
    desc.strategy = sharded ? DTRAIN_FULL_SHARD : DTRAIN_DDP;
    desc.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, PARAMS, &desc), DTRAIN_OK);
    memset(parts, 0x55, sizeof parts); /* they were copied */
    CHECK_EQ(step_parts(fsdp), DTRAIN_OK);
    float norm[6] = {0};
    CHECK_EQ(dtrain_fsdp_get(fsdp, "norm", norm, -1), DTRAIN_OK);
    CHECK(norm[0] == -1.0f && norm[1] == 0.0f && norm[3] == -1.0f);
    count = list(dtrain_fsdp_pieces(fsdp), 2, rank, pieces, 32);
    if (!sharded) {
        CHECK_EQ(count, 11);
        check_piece(&pieces[0],
                    rank == 0 ? "empty 1-1/1, 0 from 0, copy 0 of 2" : "empty 1-1/1, 0 from 0, copy 1 of 2");
        check_piece(&pieces[1], rank == 0 ? "qkv 0-1/2 1-2/6 0-2/2, 2 from 0, copy 0 of 2"
                                          : "qkv 0-1/2 1-2/6 0-2/2, 2 from 0, copy 1 of 2");
        check_piece(&pieces[5],
                    rank == 0 ? "norm 0-1/2 0-3/3, 3 from 0, copy 1 of 4" : "norm 0-1/2 0-3/3, 3 from 0, copy 3 of 4");
    } else if (rank == 0) { /* columns: the first of four elements */
        CHECK_EQ(count, 11);
        check_piece(&pieces[3], "qkv 0-1/2 5-6/6 0-2/2, 2 from 0, copy 0 of 1");
        check_piece(&pieces[4], "columns 0-1/2 0-2/2 3-5/5, 1 from 0, copy 0 of 1");
        check_piece(&pieces[5], "norm 0-1/2 0-3/3, 0 from 0, copy 0 of 1, unsaved");
        check_piece(&pieces[9], "columns 1-2/2 0-2/2 3-5/5, 1 from 0, copy 0 of 1");
    } else { /* the other three: from the middle of a row on */
        CHECK_EQ(count, 7);
        check_piece(&pieces[1], "qkv 0-1/2 1-1/6 0-2/2, 0 from 0, copy 0 of 1");
        check_piece(&pieces[2], "columns 0-1/2 0-2/2 3-5/5, 3 from 1, copy 0 of 1");
        check_piece(&pieces[3], "norm 0-1/2 0-3/3, 3 from 0, copy 0 of 1, unsaved");
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(fsdp_shards_parts_also_those_of_nothing_and_knows_where_they_lie)
{
    for (int sharded = 0; sharded < 2; sharded++)
        CHECK_EQ(dtrain_run_threads(2, fsdp_body, &sharded, NULL), DTRAIN_OK);
}

/* Whatever is to be trained has no elements on this rank; others of the model count their steps, and so does it. */
static dtrain_status nothing_body(dtrain_comm *world, void *user)
{
    const int *strategy = (const int *)user;
    dtrain_param_part part;
    dtrain_param param = whole("none", 0, 2, 3, 4, 0);
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    double norm = -1.0;
    memset(&desc, 0, sizeof desc);
    desc.strategy = (dtrain_strategy)*strategy;
    desc.loss_scale = 8.0f;
    CHECK_EQ(dtrain_param_cut(&param, &part, 0, 0, 0, 4, 3), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, &param, 1, &desc), DTRAIN_OK);
    for (uint64_t step = 1; step <= 2; step++) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, &norm), DTRAIN_OK);
        CHECK(norm == 0.0);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 0.1f), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_get_step(fsdp), step);
        CHECK_EQ(fsdp->scaling.good_steps, step);
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(an_fsdp_of_nothing_steps_with_the_others)
{
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_DDP; strategy++)
        CHECK_EQ(dtrain_run_threads(2, nothing_body, &strategy, NULL), DTRAIN_OK);
}

/* Two ranks of one FSDP hold the same part; where they do not, tables differ. */
static dtrain_status strangers_body(dtrain_comm *world, void *user)
{
    float data[8] = {0};
    dtrain_param_part part;
    dtrain_param param = whole("w", 0, 2, 4, 4, 0);
    dtrain_fsdp *fsdp = NULL;
    (void)user;
    CHECK_EQ(dtrain_param_cut(&param, &part, 1, 0, 0, 2, dtrain_comm_rank(world)), DTRAIN_OK);
    param.data = data;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, &param, 1, NULL), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "parameter 0 \"w\": part.begin 0 on rank 0, but 2 on rank 1");
    return DTRAIN_OK;
}

TEST(ranks_with_parts_of_the_same_size_from_other_places_do_not_share_an_fsdp)
{
    CHECK_EQ(dtrain_run_threads(2, strangers_body, NULL, NULL), DTRAIN_OK);
}

/* ---- one decision for all parts ---- */

/* Two stages with a loss scale each; the first one's gradients are infinite in step 1. What each step changed, and the
 * scale after it. */
typedef struct stages {
    int clips, refused;
    float changes[2][4], scales[2][4];
} stages;

static dtrain_status stages_body(dtrain_comm *world, void *user)
{
    stages *s = (stages *)user;
    int stage = dtrain_comm_rank(world);
    dtrain_comm *own = NULL;
    float w[2] = {0, 0}, g[2] = {0, 0};
    dtrain_param table;
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    memset(&table, 0, sizeof table), memset(&desc, 0, sizeof desc);
    CHECK_EQ(dtrain_comm_split(world, stage, 0, &own), DTRAIN_OK);
    table.name = stage ? "b" : "a";
    table.dtype = DTRAIN_F32;
    table.shape[0] = 2;
    table.data = w;
    table.grad = g;
    desc.optimizer.kind = DTRAIN_SGD;
    desc.loss_scale = 1024;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, own, &table, 1, &desc), DTRAIN_OK);
    for (int step = 0; step < 4; step++) {
        float scale = dtrain_fsdp_loss_scale(fsdp), before = w[0];
        CHECK_EQ(dtrain_broadcast(world, &scale, 1, DTRAIN_F32, 1), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_begin(fsdp, 1, 1), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
        g[0] = g[1] = step == 1 && stage == 0 ? INFINITY : scale;
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, 0), DTRAIN_OK);
        if (s->clips < 2) {
            dtrain_status refused = dtrain_fsdp_step(fsdp, 1);
            s->refused += stage == 0 && refused == DTRAIN_ERR_INVALID &&
                          strstr(dtrain_last_error(), "call dtrain_fsdp_clip_model_grad_norm before") != NULL;
            if (s->clips == 0)
                CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
        }
        if (s->clips > 0) { /* also after a refusal */
            CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(&fsdp, 1, s->clips == 3 ? NULL : world, 0, NULL), DTRAIN_OK);
            CHECK_EQ(dtrain_fsdp_step(fsdp, 1), DTRAIN_OK);
        }
        s->changes[stage][step] = before - w[0];
        s->scales[stage][step] = dtrain_fsdp_loss_scale(fsdp);
    }
    dtrain_fsdp_destroy(fsdp);
    dtrain_comm_destroy(own);
    return DTRAIN_OK;
}

TEST(parts_with_a_loss_scale_step_only_once_all_have_decided)
{
    static const float changes[4] = {1, 0, 1, 1}, scales[4] = {1024, 512, 512, 512};
    for (int clips = 0; clips < 3; clips++) {
        stages s;
        memset(&s, 0, sizeof s);
        s.clips = clips;
        CHECK_EQ(dtrain_run_threads(2, stages_body, &s, NULL), DTRAIN_OK);
        CHECK_EQ(s.refused, clips < 2 ? 4 : 0);
        for (int stage = 0; stage < 2 && clips > 0; stage++)
            for (int step = 0; step < 4; step++)
                CHECK(s.changes[stage][step] == changes[step] && s.scales[stage][step] == scales[step]);
    }
}

/* One step with a loss scale in a group; what dtrain_fsdp_step returns without and, if that refuses, with the call for
 * a model. */
static void step_in(dtrain_comm *group, dtrain_status expected)
{
    float w[2] = {0, 0}, g[2] = {0, 0};
    dtrain_param table;
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    memset(&table, 0, sizeof table), memset(&desc, 0, sizeof desc);
    table.name = "a";
    table.dtype = DTRAIN_F32;
    table.shape[0] = 2;
    table.data = w;
    table.grad = g;
    desc.strategy = DTRAIN_DDP;
    desc.optimizer.kind = DTRAIN_SGD;
    desc.loss_scale = 8;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, group, &table, 1, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_begin(fsdp, 1, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_OK);
    dtrain_fsdp_grad(fsdp, "a")[0] = dtrain_fsdp_grad(fsdp, "a")[1] = 8;
    CHECK_EQ(dtrain_fsdp_reduce(fsdp, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_step(fsdp, 1), expected);
    if (expected != DTRAIN_OK) {
        CHECK_EQ(dtrain_fsdp_clip_model_grad_norm(&fsdp, 1, NULL, 0, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdp, 1), DTRAIN_OK);
    }
    CHECK(w[0] == -1 && w[1] == -1);
    dtrain_fsdp_destroy(fsdp);
}

/* Of five ranks the last two are one part of the model, and ranks 2 and 4 leave. */
static dtrain_status leaves_body(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), one = 1;
    dtrain_comm *whole = NULL, *part = NULL, *left = NULL, *of_part = NULL, *again = NULL;
    (void)user;
    CHECK_EQ(dtrain_comm_split(world, 0, -rank, &whole), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank < 3, 0, &part), DTRAIN_OK);
    step_in(world, DTRAIN_OK);
    step_in(whole, DTRAIN_OK);
    step_in(part, DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank != 2 && rank != 4) {
        CHECK_EQ(dtrain_all_reduce(world, &one, &one, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_ERR_PEER_LOST);
        if (rank < 3) { /* a part stays one when it loses ranks */
            CHECK_EQ(dtrain_comm_shrink(part, &of_part), DTRAIN_OK);
            step_in(of_part, DTRAIN_ERR_INVALID);
        }
        CHECK_EQ(dtrain_comm_shrink(world, &left), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_size(left), 3);
        step_in(left, DTRAIN_OK);
        CHECK_EQ(dtrain_comm_split(left, rank < 3, 0, &again), DTRAIN_OK);
        step_in(again, DTRAIN_ERR_INVALID);
    }
    dtrain_comm_destroy(again);
    dtrain_comm_destroy(left);
    dtrain_comm_destroy(of_part);
    dtrain_comm_destroy(part);
    dtrain_comm_destroy(whole);
    return DTRAIN_OK;
}

TEST(survivors_of_the_world_are_the_whole_of_it_and_a_part_stays_one)
{
    CHECK_EQ(dtrain_run_threads(5, leaves_body, NULL, NULL), DTRAIN_OK);
}
