/* ---- >>streaming ----
 * Copies that bypass the caches, for memory that another processor reads next, or this one much later. An ordinary
 * store first fetches the line that it overwrites, and takes it from the caches of the last reader. A streaming store
 * does neither. */
#ifndef DTRAIN__STREAMING
#define DTRAIN__STREAMING
#include "isa.c"
DTRAIN__FAST_BEGIN

#define DTRAIN__STREAMING_PAGE ((size_t)4096)
#define DTRAIN__STREAMING_PAGES ((size_t)4) /* at a time, which keeps more of the memory busy */
#define DTRAIN__STREAMING_BLOCK (DTRAIN__STREAMING_PAGES * DTRAIN__STREAMING_PAGE)

/* Copies 64 bytes; `to` is aligned. */
#ifdef __SSE2__
#define DTRAIN__STREAMING_END() _mm_sfence()
static void dtrain__streaming_line(unsigned char *to, const unsigned char *from)
{
    __m128i line[4];
    _mm_prefetch((const char *)from + 256, _MM_HINT_T0);
    for (int i = 0; i < 4; i++)
        line[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i));
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)(void *)(to + 16 * i), line[i]);
}
#elif defined(DTRAIN__NEON)
#define DTRAIN__STREAMING_END() (void)0
static void dtrain__streaming_line(unsigned char *to, const unsigned char *from)
{
    __builtin_prefetch(from + 256);
    uint8x16_t a = vld1q_u8(from), b = vld1q_u8(from + 16), c = vld1q_u8(from + 32), d = vld1q_u8(from + 48);
    __asm__("stnp %q1, %q2, [%0]\n\tstnp %q3, %q4, [%0, 32]" : : "r"(to), "w"(a), "w"(b), "w"(c), "w"(d) : "memory");
}
#endif

/* Copies whole blocks by streaming stores, and what is left by memcpy. `to` is aligned to 64 bytes. Whoever sees a later
 * release store sees all of them. */
static void dtrain__streaming_copy(unsigned char *to, const unsigned char *from, size_t bytes)
{
    size_t done = 0;
#ifdef DTRAIN__STREAMING_END
    for (; bytes - done >= DTRAIN__STREAMING_BLOCK; done += DTRAIN__STREAMING_BLOCK)
        for (size_t at = done; at < done + DTRAIN__STREAMING_PAGE; at += 64)
            for (size_t page = 0; page < DTRAIN__STREAMING_BLOCK; page += DTRAIN__STREAMING_PAGE)
                dtrain__streaming_line(to + at + page, from + at + page);
    DTRAIN__STREAMING_END();
#endif
    if (bytes > done)
        memcpy(to + done, from + done, bytes - done);
}

DTRAIN__FAST_END
#endif
