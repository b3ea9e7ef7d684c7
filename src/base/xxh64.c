/* ---- >>xxh64 ----
 * A 64-bit hash as fast as memory, which detects damage by disks and networks. It is not a signature: anybody can forge
 * it. Bytes may come in any pieces.
 *
 *   source   XXH64: Collet, xxHash fast digest algorithm, version 0.1.1, 2018 */
#ifndef DTRAIN__XXH64
#define DTRAIN__XXH64
#include "memory.c"

#define DTRAIN__XXH64_PRIME1 0x9E3779B185EBCA87u
#define DTRAIN__XXH64_PRIME2 0xC2B2AE3D27D4EB4Fu
#define DTRAIN__XXH64_PRIME3 0x165667B19E3779F9u
#define DTRAIN__XXH64_PRIME4 0x85EBCA77C2B2AE63u
#define DTRAIN__XXH64_PRIME5 0x27D4EB2F165667C5u

typedef struct dtrain__xxh64 {
    uint64_t lanes[4], seed, bytes;
    unsigned char rest[32]; /* the last bytes % 32 bytes, which are not a whole stripe */
} dtrain__xxh64;

static uint64_t dtrain__xxh64_rotate(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

static void dtrain__xxh64_begin(dtrain__xxh64 *hash, uint64_t seed)
{
    hash->lanes[0] = seed + DTRAIN__XXH64_PRIME1 + DTRAIN__XXH64_PRIME2;
    hash->lanes[1] = seed + DTRAIN__XXH64_PRIME2;
    hash->lanes[2] = seed;
    hash->lanes[3] = seed - DTRAIN__XXH64_PRIME1;
    hash->seed = seed;
    hash->bytes = 0;
}

static uint64_t dtrain__xxh64_round(uint64_t lane, uint64_t word)
{
    return dtrain__xxh64_rotate(lane + word * DTRAIN__XXH64_PRIME2, 31) * DTRAIN__XXH64_PRIME1;
}

static void dtrain__xxh64_stripes(dtrain__xxh64 *hash, const unsigned char *from, size_t count)
{
    uint64_t a = hash->lanes[0], b = hash->lanes[1], c = hash->lanes[2], d = hash->lanes[3];
    for (; count > 0; count--, from += 32) {
        a = dtrain__xxh64_round(a, dtrain__load_le64(from));
        b = dtrain__xxh64_round(b, dtrain__load_le64(from + 8));
        c = dtrain__xxh64_round(c, dtrain__load_le64(from + 16));
        d = dtrain__xxh64_round(d, dtrain__load_le64(from + 24));
    }
    hash->lanes[0] = a;
    hash->lanes[1] = b;
    hash->lanes[2] = c;
    hash->lanes[3] = d;
}

static void dtrain__xxh64_add(dtrain__xxh64 *hash, const void *data, size_t bytes)
{
    const unsigned char *from = (const unsigned char *)data;
    size_t have = (size_t)(hash->bytes % 32);
    hash->bytes += bytes;
    if (have > 0 && bytes > 0) {
        size_t take = bytes < 32 - have ? bytes : 32 - have;
        memcpy(hash->rest + have, from, take);
        from += take;
        bytes -= take;
        if (have + take < 32)
            return;
        dtrain__xxh64_stripes(hash, hash->rest, 1);
    }
    dtrain__xxh64_stripes(hash, from, bytes / 32);
    if (bytes % 32 > 0)
        memcpy(hash->rest, from + bytes / 32 * 32, bytes % 32);
}

/* Adds the bytes after the last whole stripe, then does the avalanche. */
static uint64_t dtrain__xxh64_finish(uint64_t sum, const unsigned char *from, size_t bytes)
{
    for (; bytes >= 8; bytes -= 8, from += 8)
        sum = dtrain__xxh64_rotate(sum ^ dtrain__xxh64_round(0, dtrain__load_le64(from)), 27) * DTRAIN__XXH64_PRIME1 +
              DTRAIN__XXH64_PRIME4;
    if (bytes >= 4) {
        sum ^= dtrain__get_le(from, 4) * DTRAIN__XXH64_PRIME1;
        sum = dtrain__xxh64_rotate(sum, 23) * DTRAIN__XXH64_PRIME2 + DTRAIN__XXH64_PRIME3;
        bytes -= 4;
        from += 4;
    }
    for (; bytes > 0; bytes--, from++)
        sum = dtrain__xxh64_rotate(sum ^ *from * DTRAIN__XXH64_PRIME5, 11) * DTRAIN__XXH64_PRIME1;
    sum = (sum ^ sum >> 33) * DTRAIN__XXH64_PRIME2;
    sum = (sum ^ sum >> 29) * DTRAIN__XXH64_PRIME3;
    return sum ^ sum >> 32;
}

/* Returns the hash of all bytes so far; more may follow. */
static uint64_t dtrain__xxh64_end(const dtrain__xxh64 *hash)
{
    const uint64_t *lanes = hash->lanes;
    uint64_t sum = hash->seed + DTRAIN__XXH64_PRIME5;
    if (hash->bytes >= 32) {
        sum = dtrain__xxh64_rotate(lanes[0], 1) + dtrain__xxh64_rotate(lanes[1], 7) +
              dtrain__xxh64_rotate(lanes[2], 12) + dtrain__xxh64_rotate(lanes[3], 18);
        for (int i = 0; i < 4; i++)
            sum = (sum ^ dtrain__xxh64_round(0, lanes[i])) * DTRAIN__XXH64_PRIME1 + DTRAIN__XXH64_PRIME4;
    }
    return dtrain__xxh64_finish(sum + hash->bytes, hash->rest, (size_t)(hash->bytes % 32));
}

static uint64_t dtrain__xxh64_of(const void *data, size_t bytes, uint64_t seed)
{
    dtrain__xxh64 hash;
    dtrain__xxh64_begin(&hash, seed);
    dtrain__xxh64_add(&hash, data, bytes);
    return dtrain__xxh64_end(&hash);
}

#endif
