/* ---- >>memory ----
 * The allocator behind every object and its counters; checked arithmetic on sizes; numbers as bytes; comparing secrets.
 * Blocks are aligned to a cache line, and the line before a block holds its size. The counters are atomic, so one
 * allocator may serve several objects and threads. */
#ifndef DTRAIN__MEMORY
#define DTRAIN__MEMORY
#include "base.h"
#include "os_files.c"
#include "status.c"

static int dtrain__add_size(size_t a, size_t b, size_t *sum)
{
    *sum = a + b;
    return a <= SIZE_MAX - b;
}

static DTRAIN__NOINLINE int dtrain__mul_size(size_t a, size_t b, size_t *product)
{
    *product = a * b;
    return b == 0 || a <= SIZE_MAX / b;
}

static DTRAIN__NOINLINE uint64_t dtrain__get_le(const unsigned char *in, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;)
        value = value << 8 | in[i];
    return value;
}

/* Reads eight little-endian bytes at any address. */
static uint64_t dtrain__load_le64(const unsigned char *from)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
#else
    return dtrain__get_le(from, 8);
#endif
}

/* Compares in a time that does not depend on the bytes. */
static int dtrain__memory_equal_secret(const void *a, const void *b, size_t bytes)
{
    const volatile unsigned char *x = (const volatile unsigned char *)a, *y = (const volatile unsigned char *)b;
    unsigned char differ = 0;
    for (size_t i = 0; i < bytes; i++)
        differ = (unsigned char)(differ | (x[i] ^ y[i]));
    return differ == 0;
}

static void *dtrain__memory_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    if (new_bytes > 0) {
        block = dtrain__os_alloc(new_bytes, align < sizeof(void *) ? sizeof(void *) : align);
        if (block == NULL)
            return NULL;
        if (pointer != NULL)
            memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    }
    dtrain__os_free(pointer);
    return block;
}

#ifndef DTRAIN_RESIZE
#define DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align) \
    dtrain__memory_resize(pointer, old_bytes, new_bytes, align)
#endif

/* Adds to the bytes in use. To subtract, pass a number that wraps around. */
static void dtrain__memory_count(dtrain_allocator *allocator, size_t more)
{
    size_t in_use = DTRAIN__ATOMIC_ADD(&allocator->bytes, more, RELAXED);
    size_t peak = DTRAIN__ATOMIC_LOAD(&allocator->peak_bytes, RELAXED);
    while (in_use > peak && !DTRAIN__ATOMIC_COMPARE_EXCHANGE(&allocator->peak_bytes, &peak, in_use, RELAXED))
        continue;
}

#define DTRAIN__MEMORY_WORDS (DTRAIN__CACHE_LINE / sizeof(size_t)) /* in the line before a block */

/* Returns the size of a block; 0 for NULL. */
static size_t dtrain__memory_bytes(const void *pointer)
{
    return pointer != NULL ? *((const size_t *)pointer - DTRAIN__MEMORY_WORDS) : 0;
}

/* Resizes a block. With bytes 0 it frees the block and returns NULL; the allocator itself may lie in that block. */
static void *dtrain__resize(dtrain_allocator *allocator, void *pointer, size_t bytes)
{
    size_t line = DTRAIN__CACHE_LINE, old = dtrain__memory_bytes(pointer);
    size_t from = pointer != NULL ? old + line : 0, to = bytes > 0 ? bytes + line : 0;
    void *block = pointer != NULL ? (size_t *)pointer - DTRAIN__MEMORY_WORDS : NULL;
    if (bytes > SIZE_MAX - line)
        return NULL;
    if (bytes == 0)
        dtrain__memory_count(allocator, 0 - old);
    block = allocator->resize != NULL ? allocator->resize(allocator->user, block, from, to, line)
                                      : DTRAIN_RESIZE(allocator->user, block, from, to, line);
    if (bytes == 0 || block == NULL)
        return NULL;
    dtrain__memory_count(allocator, bytes - old);
    *(size_t *)block = bytes;
    return (size_t *)block + DTRAIN__MEMORY_WORDS;
}

/* Returns zeroed memory, or NULL if there is none. bytes 0 allocates one byte, so NULL always means failure. */
static DTRAIN__NOINLINE void *dtrain__alloc(dtrain_allocator *allocator, size_t bytes)
{
    void *block = dtrain__resize(allocator, NULL, bytes > 0 ? bytes : 1);
    if (block != NULL)
        memset(block, 0, bytes);
    return block;
}

static DTRAIN__NOINLINE void dtrain__free(dtrain_allocator *allocator, void *pointer)
{
    if (pointer != NULL)
        dtrain__resize(allocator, pointer, 0);
}

/* Allocates an object with an allocator of its own at offset `own`, for use if none is given. *used: the one to use. */
static void *dtrain__memory_owner(dtrain_allocator *given, size_t bytes, size_t own, dtrain_allocator **used)
{
    dtrain_allocator first = {NULL, NULL, 0, 0};
    unsigned char *made = (unsigned char *)dtrain__alloc(given != NULL ? given : &first, bytes);
    if (made == NULL)
        return NULL;
    memcpy(made + own, &first, sizeof first);
    *used = given != NULL ? given : (dtrain_allocator *)(void *)(made + own);
    return made;
}

/* Returns the block if it has so many bytes; else frees it and returns a new one, zeroed, without its contents. If
 * there is no memory, returns NULL and keeps the old block. */
static DTRAIN__NOINLINE void *dtrain__memory_room(dtrain_allocator *allocator, void *block, size_t bytes)
{
    if (block != NULL && dtrain__memory_bytes(block) >= bytes)
        return block;
    void *larger = dtrain__alloc(allocator, bytes);
    if (larger != NULL)
        dtrain__free(allocator, block);
    return larger;
}

/* Returns whether so many blocks fit into the memory that is left. Where it fills them, the system would kill the
 * process instead of an error. Little is not looked at. */
static int dtrain__memory_fits(int count, size_t each)
{
    uint64_t bytes = (uint64_t)count * each;
    return bytes < (uint64_t)64 << 20 || bytes < dtrain__os_memory_left();
}

/* Makes room for `more` elements of `size` bytes after `count`. Returns the array, which grows by doubling, or NULL. */
static DTRAIN__NOINLINE void *dtrain__memory_grow(dtrain_allocator *allocator, void *array, size_t size, size_t count,
                                                  size_t more)
{
    size_t bytes = dtrain__memory_bytes(array), need;
    if (!dtrain__add_size(count, more, &need) || !dtrain__mul_size(need, size, &need) || need > SIZE_MAX / 2)
        return NULL;
    if (array != NULL && need <= bytes)
        return array;
    for (bytes = bytes > 0 ? bytes : 16 * size; bytes < need;)
        bytes *= 2;
    return dtrain__resize(allocator, array, bytes);
}

static DTRAIN__NOINLINE void dtrain__put_le(unsigned char *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        out[i] = (unsigned char)(value >> (8 * i) & 255);
}

#endif
