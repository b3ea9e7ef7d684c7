/* ---- >>names ----
 * A hash table over an array of structs, each of which begins with the address and length of a text. It is built once,
 * over the whole array, and that finds duplicates too. Texts come from files, so the hash has a random key: nobody can
 * choose texts that collide.
 *
 *   source   SipHash-1-3: Aumasson and Bernstein, INDOCRYPT 2012 */
#ifndef DTRAIN__NAMES
#define DTRAIN__NAMES
#include "../base/memory.c"
#include "../base/os_files.c"
DTRAIN__FAST_BEGIN

typedef struct dtrain__names_text {
    const char *text;
    size_t length;
} dtrain__names_text;

typedef struct dtrain__names_entry {
    uint32_t hash;
    uint32_t index; /* in the array, plus 1; 0: free */
} dtrain__names_entry;

typedef struct dtrain__names {
    uint64_t key[2];
    const void *array;
    size_t stride; /* bytes from one struct to the next */
    dtrain__names_entry *slots;
    size_t mask; /* the number of slots, a power of two, minus 1 */
    int shift;   /* hash >> shift is the first slot to try */
} dtrain__names;

/* A buffer for slots of a large table. Each bin is for one stretch of the table and empties into it when it is full. So
 * the build visits few pages of memory at a time. */
enum { DTRAIN__NAMES_BINS = 2048, DTRAIN__NAMES_BIN = 64 };

typedef struct dtrain__names_bins {
    dtrain__names_entry (*slots)[DTRAIN__NAMES_BIN];
    unsigned char used[DTRAIN__NAMES_BINS];
} dtrain__names_bins;

static uint64_t dtrain__names_rotate(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

static inline void dtrain__names_round(uint64_t v[4])
{
    v[0] += v[1];
    v[1] = dtrain__names_rotate(v[1], 13) ^ v[0];
    v[0] = dtrain__names_rotate(v[0], 32);
    v[2] += v[3];
    v[3] = dtrain__names_rotate(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = dtrain__names_rotate(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = dtrain__names_rotate(v[1], 17) ^ v[2];
    v[2] = dtrain__names_rotate(v[2], 32);
}

static uint64_t dtrain__names_hash(const uint64_t key[2], const char *text, size_t length)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du, key[0] ^ 0x6c7967656e657261u,
                     key[1] ^ 0x7465646279746573u};
    uint64_t word, left = length;
    for (; left >= 8; text += 8, left -= 8) {
        word = dtrain__load_le64((const unsigned char *)text);
        v[3] ^= word;
        dtrain__names_round(v);
        v[0] ^= word;
    }
    word = (uint64_t)length << 56;
    for (int i = 0; i < (int)left; i++)
        word |= (uint64_t)(unsigned char)text[i] << 8 * i;
    v[3] ^= word;
    dtrain__names_round(v);
    v[0] ^= word;
    v[2] ^= 0xff;
    for (int i = 0; i < 3; i++)
        dtrain__names_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static const void *dtrain__names_element(const dtrain__names *names, size_t index)
{
    return (const char *)names->array + index * names->stride;
}

static dtrain__names_text dtrain__names_at(const dtrain__names *names, size_t index)
{
    dtrain__names_text name; /* copied: the struct there is of another type */
    memcpy(&name, dtrain__names_element(names, index), sizeof name);
    return name;
}

static int dtrain__names_same(const dtrain__names_text *a, const dtrain__names_text *b)
{
    return a->length == b->length && (a->length == 0 || memcmp(a->text, b->text, a->length) == 0);
}

/* Returns the slot of the text that a struct begins with: its own, or the free one where it belongs. It reads the
 * struct only if a slot has the same hash, since that may be a cache miss. */
static dtrain__names_entry *dtrain__names_slot(const dtrain__names *names, uint32_t hash, const void *element)
{
    for (size_t at = hash >> names->shift;; at = (at + 1) & names->mask) {
        dtrain__names_entry *slot = &names->slots[at];
        if (slot->index == 0)
            return slot;
        if (slot->hash != hash)
            continue;
        dtrain__names_text have = dtrain__names_at(names, slot->index - 1), wanted;
        memcpy(&wanted, element, sizeof wanted);
        if (dtrain__names_same(&have, &wanted))
            return slot;
    }
}

/* Empties a bin into the table. Returns the smallest of `twice` and the indices of duplicates in the bin. */
static size_t dtrain__names_empty(dtrain__names *names, const dtrain__names_entry *bin, int used, size_t twice)
{
    for (int i = 0; i < used; i++)
        __builtin_prefetch(&names->slots[bin[i].hash >> names->shift], 1);
    for (int i = 0; i < used; i++) {
        const void *element = dtrain__names_element(names, bin[i].index - 1);
        dtrain__names_entry *slot = dtrain__names_slot(names, bin[i].hash, element);
        if (slot->index == 0)
            *slot = bin[i];
        else if (bin[i].index - 1 < twice)
            twice = bin[i].index - 1;
    }
    return twice;
}

/* Enters all texts. Returns the index of the first duplicate, or count. Equal texts go to one bin, in their order. */
static size_t dtrain__names_enter(dtrain__names *names, dtrain__names_bins *bins, int bin_shift, size_t count)
{
    size_t twice = count;
    for (size_t i = 0; i < twice; i++) {
        dtrain__names_text name = dtrain__names_at(names, i);
        uint32_t hash = (uint32_t)dtrain__names_hash(names->key, name.text, name.length);
        size_t bin = (size_t)((uint64_t)hash >> bin_shift);
        dtrain__names_entry *slot = &bins->slots[bin][bins->used[bin]++];
        slot->hash = hash;
        slot->index = (uint32_t)(i + 1);
        if (bins->used[bin] == DTRAIN__NAMES_BIN) {
            bins->used[bin] = 0;
            twice = dtrain__names_empty(names, bins->slots[bin], DTRAIN__NAMES_BIN, twice);
        }
    }
    for (size_t bin = 0; bin <= (uint64_t)UINT32_MAX >> bin_shift; bin++)
        twice = dtrain__names_empty(names, bins->slots[bin], bins->used[bin], twice);
    return twice;
}

static void dtrain__names_free(dtrain__names *names, dtrain_allocator *allocator)
{
    dtrain__free(allocator, names->slots);
    names->slots = NULL;
}

/* Builds the table over an array, which must stay in place. Returns 0 if there is no memory.
 *
 *   count   below 2^31
 *   twice   out: the first element whose text is a duplicate; count: none is */
static int dtrain__names_build(dtrain__names *names, dtrain_allocator *allocator, const void *array, size_t stride,
                               size_t count, size_t *twice)
{
    dtrain__names_bins bins;
    size_t slots = 8, bin_count = 1;
    int bin_shift = 32;
    memset(names, 0, sizeof *names);
    memset(&bins, 0, sizeof bins);
    if (dtrain__os_random(names->key, sizeof names->key) != 0)
        names->key[0] = (uint64_t)dtrain__os_now_ns() ^ (uint64_t)(uintptr_t)names;
    for (names->shift = 29; slots / 3 * 2 < count; names->shift--)
        slots *= 2;
    for (; bin_count < DTRAIN__NAMES_BINS && bin_count * 8192 < slots; bin_shift--)
        bin_count *= 2;
    names->array = array;
    names->stride = stride;
    names->mask = slots - 1;
    names->slots = (dtrain__names_entry *)dtrain__alloc(allocator, slots * sizeof *names->slots);
    bins.slots = (dtrain__names_entry(*)[DTRAIN__NAMES_BIN])dtrain__alloc(allocator, bin_count * sizeof *bins.slots);
    int built = names->slots != NULL && bins.slots != NULL;
    if (built)
        *twice = dtrain__names_enter(names, &bins, bin_shift, count);
    else
        dtrain__names_free(names, allocator);
    dtrain__free(allocator, bins.slots);
    return built;
}

/* Finds the index of a text. Returns 0 if the table does not have it, or was not built. */
static int dtrain__names_find(const dtrain__names *names, const char *text, size_t length, size_t *index)
{
    if (names->slots == NULL || (text == NULL && length > 0))
        return 0;
    dtrain__names_text wanted = {text, length};
    uint32_t hash = (uint32_t)dtrain__names_hash(names->key, text, length);
    const dtrain__names_entry *slot = dtrain__names_slot(names, hash, &wanted);
    *index = slot->index - 1u;
    return slot->index != 0;
}

DTRAIN__FAST_END
#endif
