/* What tests of dtrain_cuda.h share. By a C compiler they run on the emulation; by nvcc, as .cu, on a GPU. */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#ifndef __CUDACC__
#define DTRAIN_CUDA_EMULATE
#endif
#define DTRAIN_CUDA_IMPLEMENTATION
#include "dtrain_cuda.h"
#include "test.h"

/* Makes a device; NULL after a failure. The emulation always has one; a machine without a GPU ends here, and says so.
 */
static dtrain_device *cuda_device(int index)
{
    dtrain_device *device = NULL;
    dtrain_cuda_desc desc = {0, NULL};
    desc.index = index;
    dtrain_status status = dtrain_cuda_create(&device, &desc);
#ifdef __CUDACC__
    static int some; /* a GPU that was there does not go */
    if (status == DTRAIN_ERR_UNSUPPORTED && !some) {
        printf("skipped: %s\n0 passed, 0 failed\n", dtrain_last_error());
        exit(0);
    }
    some = 1;
#endif
    if (status != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    return device;
}

/* One device for all tests of a program, which counts as having this many processors: grids are made of them. */
__attribute__((unused)) static dtrain_device *device_of(int processors)
{
    static dtrain_device *device;
    if (device == NULL)
        device = cuda_device(0);
    if (device == NULL)
        exit(1);
    dtrain__cuda_queue_of(device)->processors = processors;
    return device;
}

/* Memory of a device that holds these bytes, or none in particular. */
__attribute__((unused)) static void *device_put(dtrain_device *device, const void *from, size_t bytes)
{
    void *pointer = NULL;
    if (dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, bytes > 0 ? bytes : 1, &pointer) != DTRAIN_OK ||
        (from != NULL && dtrain_device_copy(device, pointer, from, bytes) != DTRAIN_OK)) {
        printf("%s\n", dtrain_last_error());
        exit(1);
    }
    return pointer;
}

__attribute__((unused)) static void device_drop(dtrain_device *device, void *pointer)
{
    dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, pointer);
}

/* How many elements tests of large vectors go up to: 2^28 with CUDA_LARGE=1 in the environment, 2^n with another n of
 * it. 0, which the test has said: they are not asked for. */
__attribute__((unused)) static size_t cuda_large(void)
{
    const char *text = getenv("CUDA_LARGE");
    int power = text != NULL ? atoi(text) : 0;
    if (power <= 0 || power > 40)
        printf("skipped: large vectors, which CUDA_LARGE=1 asks for\n");
    return power <= 0 || power > 40 ? 0 : (size_t)1 << (power == 1 ? 28 : power);
}

/* Numbers of a rank's, which repeat after a prime number of them. */
__attribute__((unused)) static void cuda_numbers(float *to, int rank, size_t count)
{
    enum { PERIOD = 65521 };
    for (size_t i = 0; i < count && i < PERIOD; i++)
        to[i] = dtrain_random_normal((uint64_t)rank + 1, i);
    for (size_t i = PERIOD; i < count; i += PERIOD)
        memcpy(to + i, to, (count - i < PERIOD ? count - i : PERIOD) * sizeof *to);
}

#define CHECK_OK(call) \
    do { \
        if ((call) != DTRAIN_OK) \
            TEST_FAIL("%s: %s", #call, dtrain_last_error()); \
    } while (0)

/* A call fails with a status, and its text has a part. */
#define CHECK_ERROR(call, status, part) \
    do { \
        CHECK_EQ(call, status); \
        CHECK_CONTAINS(dtrain_last_error(), part); \
    } while (0)

#endif
