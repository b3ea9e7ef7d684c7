/* What the tests of split layers share: numbers, sums in float64 to compare with, and bits that every world must have.
 */
#ifndef DTRAIN_TEST_SPLIT_LAYERS_H
#define DTRAIN_TEST_SPLIT_LAYERS_H
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

__attribute__((unused)) static uint64_t hash_of(uint64_t hash, const float *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ to_bits(data[i])) * UINT64_C(1099511628211);
    return hash;
}

/* What ranks have computed in the first world that ran a case; others must have the same. */
#define CASES 64
static uint64_t seen[CASES][MANY];

__attribute__((unused)) static void same_bits(int number, int rank, uint64_t hash)
{
    if (seen[number][rank] == 0)
        seen[number][rank] = hash;
    else if (seen[number][rank] != hash)
        TEST_FAIL("case %d, rank %d: other bits than on threads", number, rank);
}

/* got beside a sum of products in float64 that were so large. */
__attribute__((unused)) static int near(float got, double expected, double size)
{
    return fabs((double)got - expected) <= 8 * EPSILON * (size + fabs(expected)) + 1e-30;
}

#endif
