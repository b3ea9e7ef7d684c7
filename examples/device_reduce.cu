/* Three steps of AdamW on a GPU, whose gradients come as four buffers, and the same on the CPU: reduced in the tree
 * order, shortened to a norm of 1, applied with a bf16 copy of the weights on the way out. Every bit agrees.
 *
 * nvcc -std=c++17 -O2 -arch=sm_80 -Xcompiler -ffp-contract=off -I. examples/device_reduce.cu \
 *     -o build/device_reduce -lpthread -lm
 * build/device_reduce
 */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#define DTRAIN_CUDA_IMPLEMENTATION
#include "dtrain_cuda.h"

enum { COUNT = 1000003, BUFFERS = 4, STEPS = 3 };

/* What a step leaves behind, in the CPU's memory. */
typedef struct result {
    float params[COUNT];
    uint16_t copy[COUNT];
    double norm;
} result;

static result on_cpu, on_gpu;
static float drawn[COUNT];

static void *room(dtrain_device *device, size_t bytes)
{
    void *memory;
    const unsigned char zero = 0;
    DTRAIN_CHECK(dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, bytes, &memory));
    DTRAIN_CHECK(dtrain_device_fill(device, memory, &zero, 1, bytes));
    return memory;
}

static void draw(dtrain_device *device, float *to, uint64_t seed)
{
    for (size_t i = 0; i < COUNT; i++)
        drawn[i] = dtrain_random_normal(seed, i);
    DTRAIN_CHECK(dtrain_device_copy(device, to, drawn, sizeof drawn));
}

/* The same calls for both; device NULL is the CPU, which waits for the GPU in draw, as it writes the same memory again,
 * and where it fetches the weights. */
static void train(dtrain_device *device, result *out)
{
    const size_t bytes = COUNT * sizeof(float), limb_bytes = DTRAIN_SQUARES_LIMBS * sizeof(int64_t);
    void *grads[BUFFERS];
    float *params = (float *)room(device, bytes), *m = (float *)room(device, bytes), *v = (float *)room(device, bytes);
    uint16_t *copy = (uint16_t *)room(device, sizeof out->copy);
    int64_t *limbs = (int64_t *)room(device, limb_bytes);
    double *norm = (double *)room(device, sizeof *norm);
    for (int k = 0; k < BUFFERS; k++)
        grads[k] = room(device, bytes);
    draw(device, params, 1);
    for (uint64_t step = 1; step <= STEPS; step++) {
        const unsigned char zero = 0;
        const void *in[BUFFERS];
        for (int k = 0; k < BUFFERS; k++) {
            draw(device, (float *)grads[k], 10 * step + (uint64_t)k);
            in[k] = grads[k];
        }
        DTRAIN_CHECK(dtrain_device_reduce(device, DTRAIN_F32, DTRAIN_MEAN, in, BUFFERS, grads, 1, 0, COUNT));
        DTRAIN_CHECK(dtrain_device_fill(device, limbs, &zero, 1, limb_bytes));
        DTRAIN_CHECK(dtrain_device_squares(device, (float *)grads[0], COUNT, limbs));
        DTRAIN_CHECK(dtrain_device_clip(device, limbs, 1.0f, norm, (float *)grads[0], COUNT));
        DTRAIN_CHECK(dtrain_device_adamw(device, params, (float *)grads[0], m, v, COUNT, NULL, 0.001f, step, copy));
    }
    DTRAIN_CHECK(dtrain_device_copy(device, out->params, params, bytes));
    DTRAIN_CHECK(dtrain_device_copy(device, out->copy, copy, sizeof out->copy));
    DTRAIN_CHECK(dtrain_device_copy(device, &out->norm, norm, sizeof out->norm));
    void *all[] = {params, m, v, copy, limbs, norm};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, all[i]);
    for (int k = 0; k < BUFFERS; k++)
        dtrain_device_free(device, DTRAIN_MEMORY_DEVICE, grads[k]);
}

int main(void)
{
    dtrain_device *gpu;
    dtrain_status status = dtrain_cuda_create(&gpu, NULL);
    if (status == DTRAIN_ERR_UNSUPPORTED) {
        printf("not run: %s\n", dtrain_last_error());
        return 0;
    }
    DTRAIN_CHECK(status);
    train(NULL, &on_cpu);
    train(gpu, &on_gpu);
    dtrain_cuda_destroy(gpu);
    int same = memcmp(on_cpu.params, on_gpu.params, sizeof on_cpu.params) == 0 &&
               memcmp(on_cpu.copy, on_gpu.copy, sizeof on_cpu.copy) == 0 && on_cpu.norm == on_gpu.norm;
    printf("%d steps of %d weights, the last gradient's norm %.6f: CPU and GPU %s\n", STEPS, COUNT, on_gpu.norm,
           same ? "agree in every bit" : "DIFFER");
    return !same;
}

/* 3 steps of 1000003 weights, the last gradient's norm 499.701077: CPU and GPU agree in every bit */
