/* The cipher of sealed connections against the vectors of its RFCs, and every kernel of it against each other. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

static size_t bytes_of(const char *hex, unsigned char *out)
{
    size_t bytes = 0;
    for (unsigned value; hex[2 * bytes] != 0 && sscanf(hex + 2 * bytes, "%2x", &value) == 1; bytes++)
        out[bytes] = (unsigned char)value;
    return bytes;
}

static int is_hex(const unsigned char *data, size_t bytes, const char *hex)
{
    static unsigned char expected[512];
    return bytes_of(hex, expected) == bytes && memcmp(data, expected, bytes) == 0;
}

/* The kernels that this machine has; returns how many. */
static int kernels(const dtrain__chacha_way *ways[3])
{
    static const int sets[] = {DTRAIN__ISA_SCALAR, DTRAIN__ISA_NEON, DTRAIN__ISA_AVX2, DTRAIN__ISA_AVX512};
    int count = 0;
    for (int i = 0; i < 4; i++)
        if (dtrain__isa_has(sets[i]))
            ways[count++] = dtrain__chacha_choose(sets[i]);
    return count;
}

static const char sunscreen[] = "Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
                                "future, sunscreen would be it.";

TEST(the_key_stream_is_that_of_rfc_8439_2_4_2)
{
    const dtrain__chacha_way *ways[3];
    unsigned char out[114], key[32];
    for (int way = 0, count = kernels(ways); way < count; way++) {
        uint32_t state[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
        for (int i = 0; i < 32; i++)
            key[i] = (unsigned char)i;
        for (int i = 0; i < 8; i++)
            state[4 + i] = dtrain__load_le32(key + 4 * i);
        state[12] = 1;
        state[14] = 0x4a000000;
        dtrain__chacha_xor(ways[way], state, (const unsigned char *)sunscreen, out, sizeof out);
        CHECK(is_hex(out, sizeof out,
                     "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
                     "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
                     "5af90bbf74a35be6b40b8eedf2785e42874d"));
    }
}

TEST(tags_are_those_of_rfc_8439_a_3)
{
    static const struct vector {
        const char *key, *data, *tag;
    } vectors[] = {
        {"0000000000000000000000000000000000000000000000000000000000000000",
         "0000000000000000000000000000000000000000000000000000000000000000"
         "0000000000000000000000000000000000000000000000000000000000000000",
         "00000000000000000000000000000000"},
        {"0200000000000000000000000000000000000000000000000000000000000000", "ffffffffffffffffffffffffffffffff",
         "03000000000000000000000000000000"},
        {"02000000000000000000000000000000ffffffffffffffffffffffffffffffff", "02000000000000000000000000000000",
         "03000000000000000000000000000000"},
        {"0100000000000000000000000000000000000000000000000000000000000000",
         "fffffffffffffffffffffffffffffffff0ffffffffffffffffffffffffffffff11000000000000000000000000000000",
         "05000000000000000000000000000000"},
        {"0100000000000000000000000000000000000000000000000000000000000000",
         "fffffffffffffffffffffffffffffffffbfefefefefefefefefefefefefefefe01010101010101010101010101010101",
         "00000000000000000000000000000000"},
        {"0200000000000000000000000000000000000000000000000000000000000000", "fdffffffffffffffffffffffffffffff",
         "faffffffffffffffffffffffffffffff"},
        {"0100000000000000040000000000000000000000000000000000000000000000",
         "e33594d7505e43b900000000000000003394d7505e4379cd01000000000000000000000000000000000000000000000001000000"
         "000000000000000000000000",
         "14000000000000005500000000000000"},
        {"0100000000000000040000000000000000000000000000000000000000000000",
         "e33594d7505e43b900000000000000003394d7505e4379cd010000000000000000000000000000000000000000000000",
         "13000000000000000000000000000000"}};
    const dtrain__chacha_way *ways[3];
    for (int way = 0, count = kernels(ways); way < count; way++)
        for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
            unsigned char key[32], data[64], tag[16];
            size_t bytes = bytes_of(vectors[i].data, data);
            dtrain__poly poly;
            bytes_of(vectors[i].key, key);
            dtrain__poly_start(&poly, key);
            dtrain__poly_add(&poly, ways[way], data, bytes);
            dtrain__poly_finish(&poly, tag);
            CHECK(is_hex(tag, sizeof tag, vectors[i].tag));
        }
}

TEST(a_sealed_record_is_that_of_rfc_8439_2_8_2)
{
    const dtrain__chacha_way *ways[3];
    unsigned char key[32], nonce[12], extra[12], out[114], back[114], tag[16];
    bytes_of("808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f", key);
    bytes_of("070000004041424344454647", nonce);
    bytes_of("50515253c0c1c2c3c4c5c6c7", extra);
    for (int way = 0, count = kernels(ways); way < count; way++) {
        dtrain__aead_seal(ways[way], key, nonce, extra, sizeof extra, (const unsigned char *)sunscreen, out, sizeof out,
                          tag);
        CHECK(is_hex(out, sizeof out,
                     "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
                     "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
                     "3ff4def08e4b7a9de576d26586cec64b6116"));
        CHECK(is_hex(tag, sizeof tag, "1ae10b594f09e26a7e902ecbd0600691"));
        CHECK(dtrain__aead_open(ways[way], key, nonce, extra, sizeof extra, out, back, sizeof back, tag));
        CHECK(memcmp(back, sunscreen, sizeof back) == 0);
    }
}

TEST(keys_are_derived_as_in_rfc_5869_appendix_a)
{
    unsigned char secret[80], salt[80], info[80], out[82];
    for (int i = 0; i < 80; i++) {
        secret[i] = (unsigned char)i;
        salt[i] = (unsigned char)(0x60 + i);
        info[i] = (unsigned char)(0xb0 + i);
    }
    dtrain__hkdf(secret, 80, salt, 80, info, 80, out, 82);
    CHECK(is_hex(out, 82,
                 "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
                 "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"));
    memset(secret, 0x0b, 22);
    for (int i = 0; i < 13; i++) {
        salt[i] = (unsigned char)i;
        info[i] = (unsigned char)(0xf0 + i);
    }
    dtrain__hkdf(secret, 22, salt, 13, info, 10, out, 42);
    CHECK(is_hex(out, 42, "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"));
    dtrain__hkdf(secret, 22, NULL, 0, NULL, 0, out, 42);
    CHECK(is_hex(out, 42, "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"));
}

static void print_hex(FILE *file, const unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        fprintf(file, "%02x", data[i]);
    fputc('.', file);
}

static void draw(unsigned char *out, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++)
        out[i] = (unsigned char)dtrain_random_u64(seed, i);
}

/* Seals the same by each kernel, and opens it by the next one; tests/interop compares what goes to `file`. */
static void compare_kernels(const dtrain__chacha_way **ways, int count, size_t bytes, FILE *file)
{
    static unsigned char plain[70000], sealed[3][70000], back[70000];
    unsigned char key[32], nonce[12], extra[20], tag[3][16];
    size_t extra_bytes = bytes % sizeof extra, skew = bytes * 37 % 64;
    draw(key, sizeof key, 4 * bytes);
    draw(nonce, sizeof nonce, 4 * bytes + 1);
    draw(extra, sizeof extra, 4 * bytes + 2);
    draw(plain + skew, bytes, 4 * bytes + 3);
    for (int way = 0; way < count; way++) {
        size_t at = (skew + (size_t)way * 7) % 64;
        sealed[way][at + bytes] = 0xa5;
        dtrain__aead_seal(ways[way], key, nonce, extra, extra_bytes, plain + skew, sealed[way] + at, bytes, tag[way]);
        CHECK(sealed[way][at + bytes] == 0xa5);
        CHECK(memcmp(sealed[way] + at, sealed[0] + skew, bytes) == 0);
        CHECK(memcmp(tag[way], tag[0], 16) == 0);
        CHECK(dtrain__aead_open(ways[(way + 1) % count], key, nonce, extra, extra_bytes, sealed[way] + at, back + way,
                                bytes, tag[way]));
        CHECK(memcmp(back + way, plain + skew, bytes) == 0);
    }
    if (file == NULL)
        return;
    print_hex(file, key, sizeof key);
    print_hex(file, nonce, sizeof nonce);
    print_hex(file, extra, extra_bytes);
    print_hex(file, plain + skew, bytes);
    print_hex(file, sealed[0] + skew, bytes);
    print_hex(file, tag[0], 16);
    fputc('\n', file);
}

TEST(every_kernel_seals_to_the_same_bytes_at_every_length)
{
    const dtrain__chacha_way *ways[3];
    int count = kernels(ways);
    const char *path = getenv("SEALED_RECORDS");
    FILE *file = path != NULL ? fopen(path, "w") : NULL;
    for (size_t bytes = 0; bytes <= 1100; bytes++)
        compare_kernels(ways, count, bytes, bytes % 3 == 0 ? file : NULL);
    for (size_t bytes = 2048; bytes <= 65536; bytes *= 2)
        for (size_t beside = 0; beside < 3; beside++)
            compare_kernels(ways, count, bytes + beside - 1, file);
    if (file != NULL)
        fclose(file);
}

TEST(a_changed_bit_anywhere_is_found_and_nothing_is_decrypted)
{
    const dtrain__chacha_way *ways[3];
    unsigned char key[32] = {1}, nonce[12] = {2}, extra[4] = {3}, plain[300] = {4}, sealed[300], back[300], tag[16];
    for (int way = 0, count = kernels(ways); way < count; way++) {
        int opened = 0, touched = 0;
        dtrain__aead_seal(ways[way], key, nonce, extra, 4, plain, sealed, sizeof sealed, tag);
        for (unsigned bit = 0; bit < 8 * (300 + 16 + 4 + 12 + 32); bit++) {
            size_t at = bit / 8;
            unsigned char *byte = at < 300   ? sealed + at
                                  : at < 316 ? tag + (at - 300)
                                  : at < 320 ? extra + (at - 316)
                                  : at < 332 ? nonce + (at - 320)
                                             : key + (at - 332);
            memset(back, 0x77, sizeof back);
            *byte = (unsigned char)(*byte ^ 1u << bit % 8);
            opened += dtrain__aead_open(ways[way], key, nonce, extra, 4, sealed, back, sizeof back, tag);
            *byte = (unsigned char)(*byte ^ 1u << bit % 8);
            for (size_t i = 0; i < sizeof back; i++)
                touched += back[i] != 0x77;
        }
        CHECK_EQ(opened, 0);
        CHECK_EQ(touched, 0);
    }
}
