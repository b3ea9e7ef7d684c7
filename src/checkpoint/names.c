/* ---- >>names ----
 * A hash table over texts that lie in an array of structs, each of which begins with the text's address and length. It
 * is built once, over all of them, and finds duplicates on the way. Texts come from files, so the hash is keyed by
 * bytes that nobody can guess: whoever chooses the texts does not choose what collides.
 * Source of the hash: SipHash-1-3, Aumasson and Bernstein, INDOCRYPT 2012. */
#ifndef DTRAIN__NAMES
#define DTRAIN__NAMES
#include "../base/memory.c"
#include "../base/os.c"

typedef struct dtrain__name {
    const char *text;
    size_t length;
} dtrain__name;

typedef struct dtrain__name_slot {
    uint32_t hash;
    uint32_t index; /* in the array, and one more; 0: free */
} dtrain__name_slot;

typedef struct dtrain__names {
    uint64_t key[2];
    const void *array;
    size_t stride; /* bytes from one struct to the next */
    dtrain__name_slot *slots;
    size_t mask; /* slots are a power of two, and this is one less */
} dtrain__names;

static uint64_t dtrain__names_rotate(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

static void dtrain__names_round(uint64_t v[4])
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
        memcpy(&word, text, 8);
        v[3] ^= word;
        dtrain__names_round(v);
        v[0] ^= word;
    }
    word = 0;
    if (left > 0)
        memcpy(&word, text, (size_t)left);
    word ^= (uint64_t)length << 56;
    v[3] ^= word;
    dtrain__names_round(v);
    v[0] ^= word;
    v[2] ^= 0xff;
    for (int i = 0; i < 3; i++)
        dtrain__names_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static dtrain__name dtrain__names_at(const dtrain__names *names, size_t index)
{
    dtrain__name name; /* copied: the struct there is of another type */
    memcpy(&name, (const char *)names->array + index * names->stride, sizeof name);
    return name;
}

/* The slot of a text: its own, or the free one where it belongs. */
static dtrain__name_slot *dtrain__names_slot(const dtrain__names *names, uint32_t hash, const char *text, size_t length)
{
    for (size_t at = hash & names->mask;; at = (at + 1) & names->mask) {
        dtrain__name_slot *slot = &names->slots[at];
        if (slot->index == 0)
            return slot;
        if (slot->hash != hash)
            continue;
        dtrain__name have = dtrain__names_at(names, slot->index - 1);
        if (have.length == length && (length == 0 || memcmp(have.text, text, length) == 0))
            return slot;
    }
}

/* Enters all texts; gives the first that comes twice, or count. */
static size_t dtrain__names_enter(dtrain__names *names, size_t count)
{
    enum { AHEAD = 16 }; /* slots on their way from memory at once: a large table's are nowhere near */
    uint32_t hashes[AHEAD];
    for (size_t base = 0; base < count; base += AHEAD) {
        size_t n = count - base < AHEAD ? count - base : (size_t)AHEAD;
        for (size_t i = 0; i < n; i++) {
            dtrain__name name = dtrain__names_at(names, base + i);
            hashes[i] = (uint32_t)dtrain__names_hash(names->key, name.text, name.length);
            __builtin_prefetch(&names->slots[hashes[i] & names->mask], 1);
        }
        for (size_t i = 0; i < n; i++) {
            dtrain__name name = dtrain__names_at(names, base + i);
            dtrain__name_slot *slot = dtrain__names_slot(names, hashes[i], name.text, name.length);
            if (slot->index != 0)
                return base + i;
            slot->hash = hashes[i];
            slot->index = (uint32_t)(base + i + 1);
        }
    }
    return count;
}

static void dtrain__names_free(dtrain__names *names, dtrain_allocator *allocator)
{
    if (names->slots != NULL)
        dtrain__free(allocator, names->slots, (names->mask + 1) * sizeof *names->slots);
    names->slots = NULL;
}

/* Builds the table over an array that stays where it is. Returns 0 when there is no memory.
 *
 *   count   below 2^31
 *   twice   out: the first element whose text came before; count: none */
static int dtrain__names_build(dtrain__names *names, dtrain_allocator *allocator, const void *array, size_t stride,
                               size_t count, size_t *twice)
{
    size_t slots = 8;
    memset(names, 0, sizeof *names);
    if (dtrain__os_random(names->key, sizeof names->key) != 0)
        names->key[0] = (uint64_t)dtrain__os_now_ns() ^ (uint64_t)(uintptr_t)names;
    while (slots / 3 * 2 < count)
        slots *= 2;
    names->array = array;
    names->stride = stride;
    names->mask = slots - 1;
    names->slots = (dtrain__name_slot *)dtrain__alloc(allocator, slots * sizeof *names->slots);
    if (names->slots == NULL)
        return 0;
    *twice = dtrain__names_enter(names, count);
    return 1;
}

/* Gives the index of a text; 0 when the table has it not, or was not built. */
static int dtrain__names_find(const dtrain__names *names, const char *text, size_t length, size_t *index)
{
    if (names->slots == NULL || (text == NULL && length > 0))
        return 0;
    uint32_t hash = (uint32_t)dtrain__names_hash(names->key, text, length);
    const dtrain__name_slot *slot = dtrain__names_slot(names, hash, text, length);
    *index = slot->index - 1u;
    return slot->index != 0;
}

#endif
