/* AdamW and SGD of dtrain_cuda.h give the bits of the CPU's. */
#include "dtrain.h"
#include "cuda_buffers.h"

enum { ARRAYS = 4, LARGE = 140001 }; /* params, gradients, m or the velocity, v */

static buffer arrays[ARRAYS], copy;
static float *host[ARRAYS];
static uint16_t *host_copy;

static void create(size_t count)
{
    buffers_create(ARRAYS + 1, 4 * count);
    for (int k = 0; k < ARRAYS; k++) {
        host[k] = (float *)malloc(4 * count);
        CHECK(host[k] != NULL);
    }
    host_copy = (uint16_t *)malloc(2 * count);
    CHECK(host_copy != NULL);
}

static void destroy(void)
{
    buffers_destroy();
    for (int k = 0; k < ARRAYS; k++)
        free(host[k]);
    free(host_copy);
}

/* Fills host arrays and sends them to the device; offsets: 4 bits an array, of bytes, the copy's last. */
static void put(size_t count, uint64_t seed, unsigned offsets, void **device)
{
    for (int k = 0; k < ARRAYS; k++) {
        fill_values(DTRAIN_F32, seed * 5 + (uint64_t)k, host[k], count);
        for (size_t i = 0; k == 3 && i < count; i += seed % 2 + 1) { /* squares have no sign, but let some have one */
            uint32_t bits;
            memcpy(&bits, &host[k][i], 4);
            bits &= 0x7fffffffu;
            memcpy(&host[k][i], &bits, 4);
        }
        device[k] = buffer_put(&arrays[k], offsets >> 4 * k & 15, host[k], 4 * count);
    }
    device[ARRAYS] = buffer_put(&copy, offsets >> 16 & 15, NULL, 2 * count);
    buffers_send();
}

/* Compares all arrays with the host's, and the copy, if there is one, with the new parameters. */
static void same(const char *call, size_t count, unsigned offsets, int copies)
{
    static const char *const names[ARRAYS] = {"params", "grads", "m", "v"};
    char what[96];
    buffers_fetch();
    for (int k = 0; k < ARRAYS; k++) {
        snprintf(what, sizeof what, "%s, %s, offsets %x", call, names[k], offsets);
        if (!same_values(what, DTRAIN_F32, buffer_get(&arrays[k]), host[k], count))
            return;
    }
    snprintf(what, sizeof what, "%s, copy, offsets %x", call, offsets);
    memset(host_copy, POISON, 2 * count);
    if (copies)
        CHECK_EQ(dtrain_convert(host[0], DTRAIN_F32, host_copy, DTRAIN_BF16, count), DTRAIN_OK);
    same_values(what, DTRAIN_BF16, buffer_get(&copy), host_copy, count);
}

static void adamw(size_t count, uint64_t seed, unsigned offsets, int copies)
{
    dtrain_optimizer_desc desc;
    float lr = seed % 5 == 0 ? 1e-38f : 3e-3f;
    void *device[ARRAYS + 1];
    memset(&desc, 0, sizeof desc);
    desc.weight_decay = seed % 3 == 0 ? 0.0f : 0.1f;
    put(count, seed, offsets, device);
    CHECK_OK(dtrain_device_adamw(test_device(), (float *)device[0], (const float *)device[1], (float *)device[2],
                                 (float *)device[3], count, &desc, lr, seed % 100 + 1,
                                 copies ? (uint16_t *)device[4] : NULL));
    dtrain_adamw(host[0], host[1], host[2], host[3], count, &desc, lr, seed % 100 + 1);
    same("adamw", count, offsets, copies);
}

/* kind: 1 has momentum, 2 Nesterov's, 4 a decay that is not coupled, 8 no decay, 16 a decay that is subnormal */
static void sgd(size_t count, uint64_t seed, unsigned offsets, int copies, unsigned kind)
{
    dtrain_optimizer_desc desc;
    void *device[ARRAYS + 1];
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_SGD;
    desc.momentum = kind & 1 ? 0.9f : 0.0f;
    desc.nesterov = kind & 2 ? 1 : 0;
    desc.decoupled_decay = kind & 4 ? 1 : 0;
    desc.weight_decay = kind & 8 ? 0.0f : kind & 16 ? from_bits(77) : 0.01f;
    put(count, seed, offsets, device);
    CHECK_OK(dtrain_device_sgd(test_device(), (float *)device[0], (const float *)device[1],
                               kind & 1 ? (float *)device[2] : NULL, count, &desc, 0.1f,
                               copies ? (uint16_t *)device[4] : NULL));
    CHECK_OK(dtrain_device_sgd(NULL, host[0], host[1], host[2], count, &desc, 0.1f, NULL));
    same("sgd", count, offsets, copies);
}

TEST(steps_of_every_count_to_1000)
{
    create(1000);
    for (size_t count = 0; count <= 1000; count++) {
        unsigned one = (unsigned)(count / 7 % 4) * 4, offsets = one * 0x1111u | (one / 2) << 16;
        adamw(count, count, offsets, count % 2 != 0);
        sgd(count, count, offsets, count % 2 == 0, (unsigned)count % 32);
    }
    destroy();
}

TEST(steps_at_every_alignment)
{
    create(128);
    for (unsigned i = 0; i < 16 * ARRAYS + 16; i++) { /* one array away from the others, by any number of bytes */
        unsigned offsets = (i & 15) << i / 16 * 4;
        adamw(117, i, offsets, 1);
        sgd(117, i, offsets, 1, i % 32);
    }
    for (unsigned seed = 0; seed < 500; seed++) {
        unsigned offsets = (unsigned)mix(seed) & 0xfffff;
        adamw(100, seed, offsets, seed % 2 != 0);
        sgd(100, seed, offsets, seed % 2 != 0, seed % 32);
    }
    destroy();
}

TEST(steps_of_large_counts)
{
    create(LARGE);
    for (size_t count = 1024; count < 5000; count += 103) { /* a thread's second group there and not */
        adamw(count, count, 0, 1);
        sgd(count, count, 0, 1, (unsigned)count % 32);
    }
    adamw(LARGE, 1, 0, 1);
    adamw(LARGE, 2, 0x44444, 0);
    for (unsigned kind = 0; kind < 32; kind += 5)
        sgd(LARGE - kind, kind, kind % 2 ? 0 : 0x84444, 1, kind);
    destroy();
}
