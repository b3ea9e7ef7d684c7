/* ---- >>sha256 ----
 * SHA-256, in one piece or streamed: start, add as often as needed, finish. Lengths are in bytes. The standard's
 * limit of 2^64 - 1 bits is beyond any file. The time depends on lengths, but not on data. */
#ifndef DTRAIN__SHA256
#define DTRAIN__SHA256
#include "base.h"

#include <string.h>

#define DTRAIN__SHA256_BLOCK 64u

typedef struct dtrain__sha256 {
    uint32_t state[8];
    uint64_t bytes; /* added so far; bytes % 64 of them wait in block */
    unsigned char block[DTRAIN__SHA256_BLOCK];
} dtrain__sha256;

static uint32_t dtrain__sha256_rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

/* The message schedule, FIPS 180-4 section 6.2.2 step 1. */
static void dtrain__sha256_schedule(uint32_t w[64], const unsigned char *block)
{
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16 | (uint32_t)block[4 * t + 2] << 8 |
               (uint32_t)block[4 * t + 3];
    for (int t = 16; t < 64; t++) {
        uint32_t a = w[t - 15], b = w[t - 2];
        uint32_t s0 = dtrain__sha256_rotate(a, 7) ^ dtrain__sha256_rotate(a, 18) ^ a >> 3;
        uint32_t s1 = dtrain__sha256_rotate(b, 17) ^ dtrain__sha256_rotate(b, 19) ^ b >> 10;
        w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
}

/* Round t, step 3. The variables a ... h do not move down by one; their places in v rotate by t instead. */
static inline void dtrain__sha256_round(uint32_t v[8], int t, uint32_t addend)
{
    uint32_t a = v[(8 - t) & 7], b = v[(9 - t) & 7], c = v[(10 - t) & 7];
    uint32_t e = v[(12 - t) & 7], f = v[(13 - t) & 7], g = v[(14 - t) & 7];
    uint32_t sum1 = dtrain__sha256_rotate(e, 6) ^ dtrain__sha256_rotate(e, 11) ^ dtrain__sha256_rotate(e, 25);
    uint32_t sum0 = dtrain__sha256_rotate(a, 2) ^ dtrain__sha256_rotate(a, 13) ^ dtrain__sha256_rotate(a, 22);
    uint32_t t1 = v[(15 - t) & 7] + sum1 + ((e & f) ^ (~e & g)) + addend;
    v[(11 - t) & 7] += t1;
    v[(15 - t) & 7] = t1 + sum0 + ((a & b) ^ (a & c) ^ (b & c));
}

static void dtrain__sha256_block(uint32_t state[8], const unsigned char *block)
{
    static const uint32_t k[64] = {
        0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
        0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
        0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
        0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
        0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
        0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
        0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
        0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};
    uint32_t w[64], v[8];
    dtrain__sha256_schedule(w, block);
    memcpy(v, state, sizeof v);
    for (int t = 0; t < 64; t += 8) /* after eight rounds every variable is back in its place */
        for (int i = 0; i < 8; i++)
            dtrain__sha256_round(v, i, k[t + i] + w[t + i]);
    for (int i = 0; i < 8; i++)
        state[i] += v[i];
}

static void dtrain__sha256_start(dtrain__sha256 *sha)
{
    static const uint32_t initial[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                        0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    memset(sha, 0, sizeof *sha);
    memcpy(sha->state, initial, sizeof initial);
}

static void dtrain__sha256_add(dtrain__sha256 *sha, const void *data, size_t bytes)
{
    const unsigned char *next = (const unsigned char *)data;
    while (bytes > 0) {
        size_t held = (size_t)(sha->bytes % DTRAIN__SHA256_BLOCK);
        size_t part = DTRAIN__SHA256_BLOCK - held;
        if (held == 0 && bytes >= DTRAIN__SHA256_BLOCK) {
            dtrain__sha256_block(sha->state, next);
        } else {
            part = bytes < part ? bytes : part;
            memcpy(sha->block + held, next, part);
            if (held + part == DTRAIN__SHA256_BLOCK)
                dtrain__sha256_block(sha->state, sha->block);
        }
        sha->bytes += part;
        next += part;
        bytes -= part;
    }
}

/* Pads with 0x80, zeros and the length in bits. Start sha again before its next use. */
static void dtrain__sha256_finish(dtrain__sha256 *sha, unsigned char digest[32])
{
    unsigned char pad[DTRAIN__SHA256_BLOCK + 8] = {0x80};
    uint64_t bits = sha->bytes * 8;
    size_t held = (size_t)(sha->bytes % DTRAIN__SHA256_BLOCK);
    size_t zeros_end = held < 56 ? 56 - held : 120 - held;
    for (int i = 0; i < 8; i++)
        pad[zeros_end + (size_t)i] = (unsigned char)(bits >> (56 - 8 * i) & 255);
    dtrain__sha256_add(sha, pad, zeros_end + 8);
    for (int i = 0; i < 32; i++)
        digest[i] = (unsigned char)(sha->state[i / 4] >> (24 - 8 * (i % 4)) & 255);
}

DTRAIN_API void dtrain_sha256(const void *data, size_t bytes, unsigned char digest[32])
{
    dtrain__sha256 sha;
    dtrain__sha256_start(&sha);
    dtrain__sha256_add(&sha, data, bytes);
    dtrain__sha256_finish(&sha, digest);
}

/* Keyed hash of a message. Source: RFC 2104, FIPS 198-1. */
typedef struct dtrain__sha256_hmac {
    dtrain__sha256 inner;
    unsigned char outer_key[DTRAIN__SHA256_BLOCK];
} dtrain__sha256_hmac;

static void dtrain__sha256_hmac_start(dtrain__sha256_hmac *hmac, const void *key, size_t key_bytes)
{
    unsigned char inner_key[DTRAIN__SHA256_BLOCK];
    memset(hmac->outer_key, 0, sizeof hmac->outer_key);
    if (key_bytes > sizeof hmac->outer_key)
        dtrain_sha256(key, key_bytes, hmac->outer_key);
    else if (key_bytes > 0)
        memcpy(hmac->outer_key, key, key_bytes);
    for (size_t i = 0; i < sizeof inner_key; i++) {
        inner_key[i] = hmac->outer_key[i] ^ 0x36;
        hmac->outer_key[i] ^= 0x5c;
    }
    dtrain__sha256_start(&hmac->inner);
    dtrain__sha256_add(&hmac->inner, inner_key, sizeof inner_key);
}

static void dtrain__sha256_hmac_add(dtrain__sha256_hmac *hmac, const void *data, size_t bytes)
{
    dtrain__sha256_add(&hmac->inner, data, bytes);
}

static void dtrain__sha256_hmac_finish(dtrain__sha256_hmac *hmac, unsigned char mac[32])
{
    unsigned char digest[32];
    dtrain__sha256_finish(&hmac->inner, digest);
    dtrain__sha256_start(&hmac->inner);
    dtrain__sha256_add(&hmac->inner, hmac->outer_key, sizeof hmac->outer_key);
    dtrain__sha256_add(&hmac->inner, digest, sizeof digest);
    dtrain__sha256_finish(&hmac->inner, mac);
}

#endif
