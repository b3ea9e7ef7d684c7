/* ---- >>cuda-addresses ----
 * Words and vectors of words at any address: `align`, the same for all threads, says what the address is a multiple of.
 * 16: a vector is loaded and stored at once; 4: a word is; 1: byte after byte. */
#ifndef DTRAIN__CUDA_ADDRESSES
#define DTRAIN__CUDA_ADDRESSES
#include "body.h"

typedef uint32_t dtrain__cuda_any_word __attribute__((may_alias));

static int dtrain__cuda_align_of(const void *pointer)
{
    return (uintptr_t)pointer % 16 == 0 ? 16 : (uintptr_t)pointer % 4 == 0 ? 4 : 1;
}

DTRAIN__CUDA_FN uint32_t dtrain__cuda_word_load(const unsigned char *from, int align)
{
    uint32_t word;
    if (align >= 4)
        return *(const dtrain__cuda_any_word *)from;
    memcpy(&word, from, sizeof word);
    return word;
}

DTRAIN__CUDA_FN void dtrain__cuda_word_store(unsigned char *to, uint32_t word, int align)
{
    if (align >= 4)
        *(dtrain__cuda_any_word *)to = word;
    else
        memcpy(to, &word, sizeof word);
}

/* The first n words of a vector; zeros beyond. */
DTRAIN__CUDA_FN dtrain__cuda_vector dtrain__cuda_vector_load(const unsigned char *from, size_t n, int align)
{
    dtrain__cuda_vector x;
    if (align == 16 && n >= 4)
        return *(const dtrain__cuda_vector *)from;
    x.word[0] = n > 0 ? dtrain__cuda_word_load(from, align) : 0;
    x.word[1] = n > 1 ? dtrain__cuda_word_load(from + 4, align) : 0;
    x.word[2] = n > 2 ? dtrain__cuda_word_load(from + 8, align) : 0;
    x.word[3] = n > 3 ? dtrain__cuda_word_load(from + 12, align) : 0;
    return x;
}

DTRAIN__CUDA_FN void dtrain__cuda_vector_store(unsigned char *to, dtrain__cuda_vector x, size_t n, int align)
{
    if (align == 16 && n >= 4) {
        *(dtrain__cuda_vector *)to = x;
        return;
    }
    for (uint32_t k = 0; k < 4; k++)
        if (k < n)
            dtrain__cuda_word_store(to + 4 * k, x.word[k], align);
}

#endif
