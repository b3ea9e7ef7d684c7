/* The arithmetic under checkpoints: hashes, and which elements of one split are those of another. */
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "reshard_plan.h"

TEST(an_index_of_another_version_says_so)
{
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    for (unsigned version = 0; version <= 2; version += 2) {
        char text[200];
        dtrain__index index;
        dtrain__index_begin(&index, &heap);
        int bytes = snprintf(text, sizeof text, "{\"format\":\"dtrain checkpoint\",\"version\":%u", version);
        bytes += snprintf(text + bytes, sizeof text - (size_t)bytes, ",\"hash\":\"%016llx\"}",
                          (unsigned long long)dtrain__xxh64_of(text, (size_t)bytes, 0));
        CHECK_EQ(dtrain__index_read(&index, "index.json", text, (size_t)bytes), DTRAIN_ERR_UNSUPPORTED);
        CHECK_CONTAINS(dtrain_last_error(), version == 0 ? "of version 0" : "of version 2");
        dtrain__index_free(&index);
    }
    CHECK_EQ(heap.bytes, 0);
}

TEST(xxh64_gives_the_hashes_of_the_reference_implementation)
{
    /* of bytes (7 i + 3) mod 256, by the Python package xxhash 3.5, with the seeds 0 and 0x9e3779b1 */
    static const struct {
        size_t bytes;
        uint64_t plain, seeded;
    } expected[] = {{0, 0xef46db3751d8e999u, 0xac75fda2929b17efu},   {1, 0x1f25c8d0bc1f4bb6u, 0x79cf94f5ace37fe1u},
                    {3, 0x31d2363f52e564c9u, 0x96d2a5e583ddd738u},   {4, 0x9bb64b7d66ee9fdau, 0x4a862fbb4b73776eu},
                    {7, 0x9a7b149959ce60d8u, 0xddc5cf71d37a6368u},   {8, 0xdab99d95c6f90092u, 0xc6e75e2cbd8e07eeu},
                    {31, 0xa2aa5f33cc4a6119u, 0x381822f33376d6b6u},  {32, 0x23c3c17ef790fd97u, 0x9abd315470ac276au},
                    {33, 0x50a7cfc7ba588784u, 0x72cdd3262f467933u},  {63, 0x5e3e54b431c7493cu, 0x634da7d265979e61u},
                    {64, 0x0eb64b3ef6eeb01fu, 0xbcb3847d70525180u},  {100, 0xa61f8d4c170fe531u, 0x86f549ede5ac87e2u},
                    {222, 0x8488aa61fc67f7ebu, 0xa0e106fbd1fdfc38u}, {1000, 0x5f235fa033f1a3fbu, 0x83080310ee83cc20u}};
    unsigned char data[1000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(7 * i + 3);
    for (size_t k = 0; k < sizeof expected / sizeof expected[0]; k++) {
        CHECK(dtrain__xxh64_of(data, expected[k].bytes, 0) == expected[k].plain);
        CHECK(dtrain__xxh64_of(data, expected[k].bytes, 0x9e3779b1u) == expected[k].seeded);
        for (size_t step = 1; step < 70; step += 13) { /* in pieces of any size */
            dtrain__xxh64 hash;
            dtrain__xxh64_begin(&hash, 0);
            for (size_t at = 0; at < expected[k].bytes; at += step)
                dtrain__xxh64_add(&hash, data + at, step < expected[k].bytes - at ? step : expected[k].bytes - at);
            CHECK(dtrain__xxh64_end(&hash) == expected[k].plain);
        }
    }
}

static dtrain_piece piece_of(int ndim, size_t a, size_t b, size_t c)
{
    dtrain_piece piece;
    memset(&piece, 0, sizeof piece);
    piece.name = "w";
    piece.dtype = DTRAIN_F32;
    piece.ndim = ndim;
    piece.shape[0] = a;
    piece.shape[1] = b;
    piece.shape[2] = c;
    piece.count = ndim == 0 ? 1 : ndim == 1 ? a : ndim == 2 ? a * b : a * b * c;
    return piece;
}

TEST(columns_come_out_of_rows_one_element_at_a_time)
{
    /* rows of {2, 3} on two ranks; the second column is wanted: element 1 of each row */
    dtrain_piece have[2] = {piece_of(2, 2, 3, 0), piece_of(2, 2, 3, 0)}, want = piece_of(2, 2, 3, 0);
    reshard_copy copies[4];
    size_t count = 99;
    have[0].count = 3;
    have[1].begin = have[1].count = 3;
    want.boxed = 1;
    want.box_begin[1] = 1;
    want.box_size[0] = 2;
    want.box_size[1] = 1;
    want.count = 2;
    CHECK_EQ(reshard_plan(have, 2, &want, 1, NULL, 0, &count), DTRAIN_OK);
    CHECK_EQ(count, 2);
    CHECK_EQ(reshard_plan(have, 2, &want, 1, copies, 4, &count), DTRAIN_OK);
    CHECK_EQ(count, 2);
    CHECK_EQ(copies[0].from, 0);
    CHECK_EQ(copies[0].from_begin, 1);
    CHECK_EQ(copies[0].to_begin, 0);
    CHECK_EQ(copies[0].count, 1);
    CHECK_EQ(copies[1].from, 1);
    CHECK_EQ(copies[1].from_begin, 1);
    CHECK_EQ(copies[1].to_begin, 1);
    CHECK_EQ(copies[1].count, 1);
}

TEST(what_lies_together_on_both_sides_is_one_copy)
{
    dtrain_piece have = piece_of(3, 5, 7, 11), want = piece_of(3, 5, 7, 11);
    reshard_copy copy;
    size_t count;
    want.begin = 13;
    want.count = 300;
    CHECK_EQ(reshard_plan(&have, 1, &want, 1, &copy, 1, &count), DTRAIN_OK);
    CHECK_EQ(count, 1);
    CHECK_EQ(copy.from_begin, 13);
    CHECK_EQ(copy.to_begin, 0);
    CHECK_EQ(copy.count, 300);
    have = want = piece_of(0, 0, 0, 0);
    CHECK_EQ(reshard_plan(&have, 1, &want, 1, &copy, 1, &count), DTRAIN_OK);
    CHECK_EQ(count, 1);
    CHECK_EQ(copy.count, 1);
}

static uint64_t drawn, seed;

static size_t draw(size_t below)
{
    return (size_t)(dtrain_random_u64(seed, drawn++) % below);
}

/* Cuts a box in two along a random dimension, until there are `parts`; then gives some of them away as flat ranges. */
static size_t split(dtrain_piece *pieces, size_t parts)
{
    size_t count = 1;
    pieces[0].boxed = 1;
    memcpy(pieces[0].box_size, pieces[0].shape, sizeof pieces[0].shape);
    while (count < parts) {
        size_t i = draw(count);
        dtrain_piece *p = &pieces[i], *q = &pieces[count];
        *q = *p;
        if (draw(3) == 0 || p->begin > 0) { /* a flat range: what is a range already stays one */
            size_t cut = draw(p->count + 1);
            q->begin += cut;
            q->count -= cut;
            p->count = cut;
        } else if (p->begin == 0 && p->ndim > 0) {
            int d = (int)draw((size_t)p->ndim);
            size_t cut = draw(p->box_size[d] + 1), all = 1;
            for (int k = 0; k < p->ndim; k++)
                all *= p->box_size[k];
            if (p->count != all)
                continue;
            p->box_size[d] = cut;
            q->box_begin[d] += cut;
            q->box_size[d] -= cut;
            p->count = q->count = 1;
            for (int k = 0; k < p->ndim; k++) {
                p->count *= p->box_size[k];
                q->count *= q->box_size[k];
            }
        } else {
            continue;
        }
        count++;
    }
    return count;
}

/* The place in the tensor of each element of a piece, by counting up indices. */
static void places(const dtrain_piece *piece, size_t *out)
{
    size_t index[DTRAIN_MAX_DIMS] = {0}, at = 0;
    for (size_t e = 0; e < piece->begin + piece->count; e++) {
        size_t place = 0;
        for (int d = 0; d < piece->ndim; d++)
            place = place * piece->shape[d] + piece->box_begin[d] + index[d];
        if (e >= piece->begin)
            out[at++] = place;
        for (int d = piece->ndim - 1; d >= 0 && ++index[d] == piece->box_size[d]; d--)
            index[d] = 0;
    }
}

static void a_random_plan(void)
{
    static size_t from[4096], to[4096];
    static reshard_copy copies[40000];
    dtrain_piece have[17], want[16];
    int ndim = (int)draw(4);
    size_t count = 0, taken = 0, wanted = 0;
    have[0] = piece_of(ndim, 1 + draw(9), 1 + draw(9), 1 + draw(9));
    want[0] = have[0];
    size_t haves = split(have, ndim == 0 ? 1 : 1 + draw(16)), wants = split(want, ndim == 0 ? 1 : 1 + draw(16));
    CHECK_EQ(reshard_plan(have, haves, want, wants, copies, 40000, &count), DTRAIN_OK);
    for (size_t k = 0; k < wants; k++) {
        size_t next = 0;
        places(&want[k], to);
        wanted += want[k].count;
        for (size_t i = 0; i < count; i++) {
            if (copies[i].to != k)
                continue;
            CHECK_EQ(copies[i].to_begin, next);
            places(&have[copies[i].from], from);
            for (size_t e = 0; e < copies[i].count; e++)
                CHECK_EQ(from[copies[i].from_begin + e], to[next + e]);
            next += copies[i].count;
        }
        CHECK_EQ(next, want[k].count);
        taken += next;
    }
    CHECK_EQ(taken, wanted);
    CHECK_EQ(
        wanted,
        (ndim == 0 ? 1 : have[0].shape[0] * (ndim > 1 ? have[0].shape[1] : 1) * (ndim > 2 ? have[0].shape[2] : 1)));
    if (have[0].count == 0)
        return;
    CHECK_EQ(reshard_plan(have + 1, haves - 1, want, wants, copies, 40000, &count), DTRAIN_ERR_MISMATCH);
    have[haves] = have[0]; /* one piece too many, then a copy of it */
    CHECK_EQ(reshard_plan(have, haves + 1, want, wants, copies, 40000, &count), DTRAIN_ERR_INVALID);
    have[0].copies = have[haves].copies = 2;
    have[haves].copy = 1;
    CHECK_EQ(reshard_plan(have, haves + 1, want, wants, copies, 40000, &count), DTRAIN_OK);
}

TEST(random_splits_of_up_to_three_dimensions_fit_as_counting_says)
{
    seed = 20260;
    for (int i = 0; i < 3000; i++) {
        int before = test_failures;
        uint64_t began = drawn;
        a_random_plan();
        if (test_failures != before) {
            TEST_FAIL("round %d, from draw %llu of seed %llu", i, (unsigned long long)began, (unsigned long long)seed);
            return;
        }
    }
}

TEST(pieces_that_make_no_sense_are_refused)
{
    dtrain_piece good = piece_of(2, 4, 5, 0), bad;
    reshard_copy copies[8];
    size_t count;
    bad = good;
    bad.count = 21;
    CHECK_EQ(reshard_plan(&bad, 1, &good, 1, copies, 8, &count), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "of what exists: piece 0, of \"w\": its range reaches beyond the box");
    bad = good;
    bad.boxed = 1;
    bad.box_begin[1] = SIZE_MAX;
    bad.box_size[0] = bad.box_size[1] = 2;
    CHECK_EQ(reshard_plan(&good, 1, &bad, 1, copies, 8, &count), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "of what is wanted: piece 0, of \"w\": its box reaches beyond the shape");
    bad = good;
    bad.shape[0] = SIZE_MAX / 8;
    bad.shape[1] = 9;
    CHECK_EQ(reshard_plan(&bad, 1, &good, 1, copies, 8, &count), DTRAIN_ERR_INVALID);
    bad = good;
    bad.dtype = DTRAIN_F4;
    CHECK_EQ(reshard_plan(&bad, 1, &good, 1, copies, 8, &count), DTRAIN_ERR_INVALID);
    bad = good;
    bad.copies = 2;
    bad.copy = 2;
    CHECK_EQ(reshard_plan(&bad, 1, &good, 1, copies, 8, &count), DTRAIN_ERR_INVALID);
    bad = good;
    bad.shape[0] = 5;
    bad.shape[1] = 4;
    CHECK_EQ(reshard_plan(&bad, 1, &good, 1, copies, 8, &count), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "\"w\" is wanted with another shape or dtype than it has");
    bad = good;
    bad.suffix = "@adam.m";
    CHECK_EQ(reshard_plan(&bad, 1, &good, 1, copies, 8, &count), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "20 elements of \"w\" are wanted, and the pieces that exist have 0");
    bad.name = "w@adam";
    bad.suffix = ".m";
    good.name = "w@adam.m";
    CHECK_EQ(reshard_plan(&bad, 1, &good, 1, copies, 8, &count), DTRAIN_OK);
}

/* One element missing and another there twice: as many as there should be. */
TEST(a_hole_and_an_overlap_do_not_cancel)
{
    dtrain_piece have[2] = {piece_of(1, 10, 0, 0), piece_of(1, 10, 0, 0)}, want = piece_of(1, 10, 0, 0);
    reshard_copy copies[8];
    size_t count;
    have[0].count = 6;
    have[1].begin = 5;
    have[1].count = 4;
    CHECK_EQ(reshard_plan(have, 2, &want, 1, copies, 8, &count), DTRAIN_ERR_MISMATCH);
    have[1].begin = 6;
    CHECK_EQ(reshard_plan(have, 2, &want, 1, copies, 8, &count), DTRAIN_OK);
}

/* 2^58 rows, or 2^26 where a size has 32 bits: counting them up would not end, or take long. */
TEST(tilings_and_plans_take_no_longer_for_more_elements)
{
    size_t rows = SIZE_MAX / 64 + 1;
    dtrain_piece have[2] = {piece_of(2, rows, 2, 0), piece_of(2, rows, 2, 0)}, want = have[0];
    reshard_copy copies[8];
    dtrain__region whole, region;
    dtrain__region_tiling tiling;
    size_t count;
    for (int i = 0; i < 2; i++) {
        have[i].boxed = 1;
        have[i].box_begin[1] = (size_t)i;
        have[i].box_size[0] = have[i].shape[0];
        have[i].box_size[1] = 1;
        have[i].count = have[i].shape[0];
        have[i].dtype = DTRAIN_U8;
    }
    want = have[0];
    CHECK(dtrain__region_of(&whole, &want) == NULL);
    want.boxed = 0;
    want.count = want.shape[0] * 2;
    CHECK(dtrain__region_of(&whole, &want) == NULL);
    dtrain__region_tiling_begin(&tiling, &whole);
    for (int i = 0; i < 2; i++) {
        CHECK(!dtrain__region_tiling_whole(&tiling));
        CHECK(dtrain__region_of(&region, &have[i]) == NULL);
        dtrain__region_tiling_add(&tiling, &region);
    }
    CHECK(dtrain__region_tiling_whole(&tiling));
    want.begin = want.count / 2;
    want.count = 3;
    CHECK_EQ(reshard_plan(have, 2, &want, 1, copies, 8, &count), DTRAIN_OK);
    CHECK_EQ(count, 3); /* columns 0, 1, 0 */
    CHECK_EQ(copies[1].from, 1);
    CHECK_EQ(copies[1].count, 1);
    have[1].box_begin[1] = 0; /* the same column twice */
    dtrain__region_tiling_begin(&tiling, &whole);
    for (int i = 0; i < 2; i++) {
        CHECK(dtrain__region_of(&region, &have[i]) == NULL);
        dtrain__region_tiling_add(&tiling, &region);
    }
    CHECK(!dtrain__region_tiling_whole(&tiling));
}
