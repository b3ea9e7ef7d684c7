/* ---- >>cuda-walk ----
 * How kernels walk flat arrays. They take groups of 16 bytes of the widest array if all pointers reach a multiple of
 * that at one index. Before that index, after the last group, and if there is no such index, they take single elements.
 * An element belongs to one thread, which reads all of it before it writes, so outputs may be inputs. Any alignment
 * will do, even one that does not suit an element. */
#ifndef DTRAIN__CUDA_WALK
#define DTRAIN__CUDA_WALK
#include "body.h"
#include "queue.cu"

#define DTRAIN__CUDA_THREADS 256
/* Most blocks a processor. A block that ends is faster than one that goes round (3 % of a copy on an H100), so almost
 * none does. The emulation's do, as the code for it needs tests. */
#ifdef DTRAIN_CUDA_EMULATE
#define DTRAIN__CUDA_BLOCKS 32
#else
#define DTRAIN__CUDA_BLOCKS 65536
#endif

/* Elements [head, head + groups * lanes) go by groups; the rest, `singles`, one by one. */
typedef struct dtrain__cuda_walk {
    size_t head, groups, singles, lanes;
} dtrain__cuda_walk;

/* Bit h of the result: pointer, h elements on, is at a multiple of the bytes of `lanes` elements. */
static uint32_t dtrain__cuda_heads(const void *pointer, size_t width, size_t lanes)
{
    uint32_t heads = 0;
    for (size_t h = 0; h < lanes; h++)
        if (((uintptr_t)pointer + h * width) % (lanes * width) == 0)
            heads |= (uint32_t)1 << h;
    return heads;
}

/* heads: the results of dtrain__cuda_heads for all pointers, joined by &. */
static dtrain__cuda_walk dtrain__cuda_walk_make(uint32_t heads, size_t lanes, size_t count)
{
    dtrain__cuda_walk walk = {0, 0, 0, lanes};
    while (heads != 0 && (heads >> walk.head & 1) == 0)
        walk.head++;
    if (heads != 0 && count > walk.head)
        walk.groups = (count - walk.head) / lanes;
    walk.singles = count - walk.groups * lanes;
    return walk;
}

/* Checks the arrays of a call, all as long as the first, and says how to walk them together. */
static dtrain_status dtrain__cuda_walk_arrays(dtrain_device *device, const char *call, const dtrain__cuda_array *arrays,
                                              dtrain__cuda_walk *walk)
{
    uint32_t heads = ~(uint32_t)0;
    size_t widest = 0;
    for (size_t i = 0; arrays[i].what != NULL; i++)
        widest = arrays[i].width > widest ? arrays[i].width : widest;
    for (size_t i = 0; arrays[i].what != NULL; i++)
        if (arrays[i].pointer != NULL)
            heads &= dtrain__cuda_heads(arrays[i].pointer, arrays[i].width, 16 / widest);
    *walk = dtrain__cuda_walk_make(heads, 16 / widest, arrays->count);
    return dtrain__cuda_arrays(device, call, arrays);
}

/* Returns the blocks of a kernel whose threads hold `unroll` groups at once. */
static size_t dtrain__cuda_walk_blocks(dtrain_device *device, const dtrain__cuda_walk *walk, size_t unroll)
{
    size_t most = (size_t)dtrain__cuda_queue_of(device)->processors * DTRAIN__CUDA_BLOCKS;
    size_t grouped = walk->groups / (DTRAIN__CUDA_THREADS * unroll), single = walk->singles / DTRAIN__CUDA_THREADS;
    size_t blocks = (grouped > single ? grouped : single) + 1;
    return blocks < most ? blocks : most;
}

/* Returns the bits of one element of 1, 2, 4 or 8 bytes. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_element(const unsigned char *at, size_t width)
{
    uint64_t bits = 0;
    if (width == 1)
        return *at;
    if ((uintptr_t)at % width != 0) {
        for (size_t i = 0; i < width; i++)
            bits |= (uint64_t)at[i] << 8 * i;
        return bits;
    }
    if (width == 2)
        return *(const dtrain__cuda_u16 *)at;
    if (width == 4)
        return *(const dtrain__cuda_u32 *)at;
    return *(const dtrain__cuda_u64 *)at;
}

DTRAIN__CUDA_FN void dtrain__cuda_element_store(unsigned char *at, size_t width, uint64_t bits)
{
    if (width == 1)
        *at = (unsigned char)bits;
    else if ((uintptr_t)at % width != 0)
        for (size_t i = 0; i < width; i++)
            at[i] = (unsigned char)(bits >> 8 * i);
    else if (width == 2)
        *(dtrain__cuda_u16 *)at = (uint16_t)bits;
    else if (width == 4)
        *(dtrain__cuda_u32 *)at = (uint32_t)bits;
    else
        *(dtrain__cuda_u64 *)at = bits;
}

/* Loads a whole group from element number `element` on, or that element alone, in the lowest lane above zeros. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_load(const void *from, size_t element, size_t width, int whole)
{
    const unsigned char *at = (const unsigned char *)from + element * width;
    dtrain__cuda_vector v = {{0, 0, 0, 0}};
    uint64_t bits;
    if (whole)
        return *(const dtrain__cuda_vector *)at;
    bits = dtrain__cuda_element(at, width);
    v.word[0] = (uint32_t)bits;
    v.word[1] = (uint32_t)(bits >> 32);
    return v;
}

DTRAIN__CUDA_FN void dtrain__cuda_store(void *to, size_t element, size_t width, int whole, dtrain__cuda_vector v)
{
    unsigned char *at = (unsigned char *)to + element * width;
    if (whole)
        *(dtrain__cuda_vector *)at = v;
    else
        dtrain__cuda_element_store(at, width, v.word[0] | (uint64_t)v.word[1] << 32);
}

/* Does the same for groups of 4 elements of 16 bits that accompany groups of 32 bits, in one 64-bit word. */
DTRAIN__CUDA_FN uint64_t dtrain__cuda_load_half(const void *from, size_t element, int whole)
{
    const unsigned char *at = (const unsigned char *)from + element * 2;
    return whole ? *(const dtrain__cuda_u64 *)at : dtrain__cuda_element(at, 2);
}

DTRAIN__CUDA_FN void dtrain__cuda_store_half(void *to, size_t element, int whole, uint64_t bits)
{
    unsigned char *at = (unsigned char *)to + element * 2;
    if (whole)
        *(dtrain__cuda_u64 *)at = bits;
    else
        dtrain__cuda_element_store(at, 2, bits);
}

/* Defines name_walk(device, call, args), which queues a walk args->walk. name_load(args, element, whole) returns what a
 * thread holds of a group or an element; name_store(args, element, whole, &held) does the rest. A thread loads `unroll`
 * groups before it stores the first. Past the end it loads its first group again, which takes no branch. */
#define DTRAIN__CUDA_WALK_KERNEL(name, args_type, held_type, lanes, unroll) \
    DTRAIN__CUDA_FN void name##_body(const args_type *args, dtrain__cuda_at at, dtrain__cuda_none *shared, \
                                     dtrain__cuda_none *own, int phase) \
    { \
        size_t threads = at.threads, groups = args->walk.groups, head = args->walk.head; \
        (void)shared, (void)own, (void)phase; \
        for (size_t first = at.block * threads * (unroll) + at.thread; first < groups; \
             first += at.blocks * threads * (unroll)) { \
            held_type held[unroll]; \
            DTRAIN__CUDA_UNROLL for (size_t u = 0; u < (unroll); u++) \
            { \
                size_t group = first + u * threads; \
                held[u] = name##_load(args, head + (group < groups ? group : first) * (lanes), 1); \
            } \
            DTRAIN__CUDA_UNROLL for (size_t u = 0; u < (unroll); u++) if (first + u * threads < groups) \
                name##_store(args, head + (first + u * threads) * (lanes), 1, &held[u]); \
        } \
        for (size_t i = at.block * threads + at.thread; i < args->walk.singles; i += at.blocks * threads) { \
            size_t element = i < head ? i : i + groups * (lanes); \
            held_type held = name##_load(args, element, 0); \
            name##_store(args, element, 0, &held); \
        } \
    } \
    DTRAIN__CUDA_KERNEL(name, args_type, dtrain__cuda_none, dtrain__cuda_none, DTRAIN__CUDA_THREADS, 1) \
    static dtrain_status name##_walk(dtrain_device *device, const char *call, const args_type *args) \
    { \
        return name##_launch(device, call, dtrain__cuda_walk_blocks(device, &args->walk, unroll), args); \
    }

#endif
