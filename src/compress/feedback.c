/* ---- >>feedback ----
 * What happens to a vector before and after compression. It is added to a velocity, and what was sent is subtracted
 * from the residual. These work element by element, each operation rounded by itself. Here are also the buffers of
 * compression, which grow and stay. */
#ifndef DTRAIN__FEEDBACK
#define DTRAIN__FEEDBACK
#include "compress.h"
#include "../base/memory.c"
#include "../tensor/fold.c"
#include "../tensor/isa.c"
#include "../tensor/vector.c"

DTRAIN__EXACT_BEGIN

/* velocity = velocity * momentum + in * factor */
DTRAIN__INLINE void dtrain__feedback_velocity_body(float *velocity, const float *in, float momentum, float factor,
                                                   size_t count)
{
    uint32_t zero = dtrain__isa_zero;
    DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) velocity[i] =
        dtrain__isa_rounded_f32(velocity[i] * momentum, zero) + dtrain__isa_rounded_f32(in[i] * factor, zero);
}

/* Returns x, or 0 for a NaN or infinity, because it would stay forever. */
DTRAIN__INLINE float dtrain__feedback_bounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits & 0x7f800000u) == 0x7f800000u ? 0 : bits;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

/* residual = residual - sent */
DTRAIN__INLINE void dtrain__feedback_left_body(float *residual, const float *sent, size_t count)
{
    DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++) residual[i] =
        dtrain__feedback_bounded(residual[i] - sent[i]);
}

DTRAIN__KERNEL(dtrain__feedback_velocity,
               (float *velocity, const float *in, float momentum, float factor, size_t count),
               (velocity, in, momentum, factor, count))
DTRAIN__KERNEL(dtrain__feedback_left, (float *residual, const float *sent, size_t count), (residual, sent, count))

/* Replaces NaN and infinity by 0. data: NULL is nothing. */
static void dtrain__feedback_finite(float *data, size_t count)
{
    for (size_t i = 0; data != NULL && i < count; i++)
        data[i] = dtrain__feedback_bounded(data[i]);
}

DTRAIN__EXACT_END

/* Of two versions of a state, one counts. A step writes the other one. If the step is applied, that one counts, and the
 * first can be gone back to until the next step begins. So whatever ends a step that is not applied has nothing to
 * undo, and a checkpoint that is saved or loaded meanwhile has the state before it. */
typedef struct dtrain__versions {
    int now, other;
} dtrain__versions;

/* What the other version is. */
enum {
    DTRAIN__VERSION_NONE = 0, /* of no use */
    DTRAIN__VERSION_AFTER,    /* that after the step under way */
    DTRAIN__VERSION_BEFORE    /* that before the last step */
};

/* Ends a step. */
static void dtrain__versions_end(dtrain__versions *v, int applied)
{
    int counts = applied && v->other == DTRAIN__VERSION_AFTER;
    v->now = counts ? !v->now : v->now;
    v->other = counts ? DTRAIN__VERSION_BEFORE : DTRAIN__VERSION_NONE;
}

/* Goes back to before the last step, if that was applied and no other has begun. */
static void dtrain__versions_undo(dtrain__versions *v)
{
    v->now = v->other == DTRAIN__VERSION_BEFORE ? !v->now : v->now;
    v->other = DTRAIN__VERSION_NONE;
}

/* What parts of sums of weight `from` are multiplied by to become parts of sums of weight `to`: they are kept as shares
 * of the mean. A weight of 0: nothing is kept yet. */
static float dtrain__feedback_ratio(double to, double from)
{
    double ratio = from > 0.0 ? to / from : 1.0;
    return ratio < 3.4028234663852886e38 ? (float)ratio : 3.4028234663852886e38f;
}

/* Reads a number of steps as a checkpoint keeps it: its lower and upper 24 bits. */
static uint64_t dtrain__feedback_steps(const float step[2])
{
    return (uint64_t)step[0] + ((uint64_t)step[1] << 24);
}

static void dtrain__feedback_set_steps(float step[2], uint64_t steps)
{
    step[0] = (float)(steps & 0xffffff);
    step[1] = (float)(steps >> 24 & 0xffffff);
}

/* Makes a block at least `bytes` long. It grows by half more than needed, because packed sizes vary a little from step
 * to step. A block that grows loses its contents. */
static dtrain_status dtrain__feedback_reserve(unsigned char **block, dtrain_allocator *allocator, size_t bytes)
{
    size_t whole;
    void *larger = *block;
    if (larger == NULL || dtrain__memory_bytes(larger) < bytes)
        larger =
            dtrain__add_size(bytes, bytes / 2 + 4096, &whole) ? dtrain__memory_room(allocator, *block, whole) : NULL;
    if (larger == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_MEMORY, "compressed all_reduce: no memory for %zu bytes", bytes);
    *block = (unsigned char *)larger;
    return DTRAIN_OK;
}

/* Breaks the group: this rank cannot go on in the middle of an exchange. `where` says what failed. */
static dtrain_status dtrain__feedback_abort(dtrain_comm *comm, dtrain_status status, const char *where)
{
    dtrain__fail(NULL, status, "compressed all_reduce on rank %d, %s: %.500s", dtrain_comm_rank(comm), where,
                 dtrain__thread_error.text);
    dtrain__error kept = dtrain__thread_error;
    DTRAIN_IGNORE(dtrain_comm_abort(comm, kept.text));
    return dtrain__report(&kept);
}

/* Breaks the group because of data from rank `from`. */
static dtrain_status dtrain__feedback_broken(dtrain_comm *comm, dtrain_status status, int from)
{
    char where[32];
    snprintf(where, sizeof where, "data of rank %d", from);
    return dtrain__feedback_abort(comm, status, where);
}

#endif
