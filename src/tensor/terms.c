/* ---- >>terms ----
 * The sum of numbered terms, however many come: the balanced tree whose left part is the largest power of two.
 *
 * A binary counter holds it. Level l has the sum of 2^l terms. Term k goes to level t, where k has t trailing one bits:
 * that level is free. It takes in the lower levels, lowest first. After n terms the levels of n's one bits are left.
 * They are added up in the same way. */
#ifndef DTRAIN__TERMS
#define DTRAIN__TERMS
#include "device.c"

#define DTRAIN__TERMS_LEVELS 32
#define DTRAIN__TERMS_TILE 2048 /* elements at a time, in the CPU's first cache */

typedef struct dtrain__terms {
    float *levels[DTRAIN__TERMS_LEVELS]; /* NULL: not used yet */
} dtrain__terms;

static int dtrain__terms_level(unsigned term)
{
    int ones = 0;
    while (term >> ones & 1)
        ones++;
    return ones;
}

/* Returns the levels that so many terms need. */
static int dtrain__terms_levels(unsigned count)
{
    int levels = 1;
    while (count >> levels != 0)
        levels++;
    return levels;
}

/* out = x + the levels of `set` from their element `at` on, lowest first. out may be x, and else is none of them. */
static dtrain_status dtrain__terms_add(const dtrain__terms *terms, unsigned set, size_t at, const float *x, float *out,
                                       size_t count, dtrain_device *queue)
{
    size_t tile = queue != NULL ? count : DTRAIN__TERMS_TILE;
    dtrain_status status = DTRAIN_OK;
    if (set == 0 && out == x)
        return DTRAIN_OK;
    uint64_t mode = dtrain__fpmode_enter();
    for (size_t i = 0; i < count && status == DTRAIN_OK; i += tile) {
        size_t n = count - i < tile ? count - i : tile;
        void *sum[1];
        const void *in[2];
        sum[0] = out + i;
        in[1] = x + i;
        for (int level = 0; set >> level != 0 && status == DTRAIN_OK; level++) {
            if (!(set >> level & 1))
                continue;
            in[0] = terms->levels[level] + at + i;
            status = dtrain_device_reduce(queue, DTRAIN_F32, DTRAIN_SUM, in, 2, sum, 1, 0, n);
            in[1] = sum[0];
        }
        if (in[1] != sum[0] && status == DTRAIN_OK)
            status = dtrain_device_copy(queue, sum[0], in[1], n * sizeof(float));
    }
    dtrain__fpmode_restore(mode);
    return status;
}

#endif
