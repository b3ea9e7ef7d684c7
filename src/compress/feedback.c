/* ---- >>feedback ----
 * What happens to a vector before and after compression. It is shortened if it is too long, and added to a velocity.
 * What was sent is subtracted from the residual. These work element by element, each operation rounded by itself. A
 * length is the root of squares added in float64 in a fixed order. Here are also the buffers of compression, which grow
 * and stay. */
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

/* residual = residual - sent; a NaN or infinity becomes 0, because it would stay forever */
DTRAIN__INLINE void dtrain__feedback_left_body(float *residual, const float *sent, size_t count)
{
    DTRAIN__INDEPENDENT for (size_t i = 0; i < count; i++)
    {
        float left = residual[i] - sent[i];
        uint32_t bits;
        memcpy(&bits, &left, sizeof bits);
        bits = (bits & 0x7f800000u) == 0x7f800000u ? 0 : bits;
        memcpy(&left, &bits, sizeof bits);
        residual[i] = left;
    }
}

DTRAIN__KERNEL(dtrain__feedback_velocity,
               (float *velocity, const float *in, float momentum, float factor, size_t count),
               (velocity, in, momentum, factor, count))
DTRAIN__KERNEL(dtrain__feedback_left, (float *residual, const float *sent, size_t count), (residual, sent, count))

/* Returns the factor that shortens a vector to the length `most`; 1 if it is not longer, or its length is not finite.
 */
static float dtrain__feedback_factor(const float *in, size_t count, double most)
{
    double length = dtrain__vector_sqrt_f64(dtrain__vector_sum_squares(in, count));
    uint64_t bits;
    memcpy(&bits, &length, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff && length > most ? (float)(most / length) : 1.0f;
}

DTRAIN__EXACT_END

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
