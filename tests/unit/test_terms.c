/* Sums of numbered terms: the tree, written out here by recursion, for each number of terms. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

enum { MOST = 70, SIZE = 5000, SPARE = 3 };

static float terms[MOST][SIZE], levels[8][SPARE + SIZE], expected[SIZE], sum[SIZE];

/* The balanced tree of terms first to first + count - 1 whose left part is the largest power of two. */
static float tree(int first, int count, int element)
{
    int left = 1;
    if (count == 1)
        return terms[first][element];
    while (2 * left < count)
        left *= 2;
    return tree(first, left, element) + tree(first + left, count - left, element);
}

TEST(each_number_of_terms_is_added_in_the_order_of_its_tree)
{
    for (int k = 0; k < MOST; k++)
        for (int i = 0; i < SIZE; i++)
            terms[k][i] = (float)((k * 7919 + i * 104729) % 65537) * (k % 3 == 0 ? 1e-6f : 1e3f) + 0.1f;
    for (int count = 1; count <= MOST; count++) {
        dtrain__terms t;
        memset(&t, 0, sizeof t);
        for (int l = 0; l < dtrain__terms_levels((unsigned)count - 1); l++)
            t.levels[l] = levels[l];
        for (int k = 0; k < count - 1; k++) {
            int level = dtrain__terms_level((unsigned)k);
            CHECK(t.levels[level] != NULL);
            CHECK_EQ(dtrain__terms_add(&t, (1u << level) - 1, SPARE, terms[k], levels[level] + SPARE, SIZE, NULL),
                     DTRAIN_OK);
        }
        memcpy(sum, terms[count - 1], sizeof sum); /* the last term takes in all levels, in its own place */
        CHECK_EQ(dtrain__terms_add(&t, (unsigned)count - 1, SPARE, sum, sum, SIZE, NULL), DTRAIN_OK);
        for (int i = 0; i < SIZE; i++)
            expected[i] = tree(0, count, i);
        CHECK(memcmp(sum, expected, sizeof sum) == 0);
    }
}
