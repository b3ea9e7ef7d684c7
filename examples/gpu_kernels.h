/* How train_gpt_cuda's kernels are written: once. nvcc makes kernels of them; with DTRAIN_CUDA_EMULATE they compile as
 * loops of C. The 32 lanes of a warp sum a row, and both forms add the lanes by the same tree. Nothing is added by
 * atomics, so that every run gives the same bits. Matrix products are those of cuBLAS, emulated of dtrain_sgemm.
 * Include dtrain.h and dtrain_cuda.h first. */
#ifndef GPU_KERNELS_H
#define GPU_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#ifndef DTRAIN_CUDA_EMULATE
#include <cublas_v2.h>
#endif

#define GPU_WARP 32

/* A rank's queue on its GPU, and what else it computes with. */
typedef struct gpu {
    dtrain_device *device;
    dtrain_status status; /* of what was queued: the first that is not DTRAIN_OK stays */
#ifndef DTRAIN_CUDA_EMULATE
    cudaStream_t stream;
    cublasHandle_t blas;
    void *workspace;
#endif
} gpu;

/* A kernel is GPU_KERNEL name(parameters) { GPU_EACH(i, n) ... } or { GPU_ROWS(row, rows) { ... } }, and is queued by
 * GPU_EACH_LAUNCH or GPU_ROWS_LAUNCH(gpu, n or rows, name, arguments). In a row all lanes have the same variables;
 * GPU_COLUMNS(i, n) deals i to the lanes, always the same to one lane, and GPU_ROW_SUM adds what they have. */
#ifdef DTRAIN_CUDA_EMULATE
#define GPU_KERNEL static void
#define GPU_FN static inline
#define GPU_LANES GPU_WARP
#define GPU_EACH_LANE(lane, own) for (size_t lane = 0, own = 0; lane < GPU_WARP; lane++, own++)
#define GPU_EACH(i, n) for (size_t i = 0; i < (n); i++)
#define GPU_ROWS(row, rows) for (size_t row = 0; row < (rows); row++)
#define GPU_COLUMNS(i, n) for (size_t i = 0; i < (n); i++)
#define GPU_SYNC_LANES() ((void)0)
#define GPU_EACH_LAUNCH(gpu, n, name, ...) \
    do { \
        dtrain_cuda_emulated_open(); \
        name(__VA_ARGS__); \
        dtrain_cuda_emulated_close(); \
    } while (0)
#define GPU_ROWS_LAUNCH GPU_EACH_LAUNCH
#define GPU_BEGIN() dtrain_cuda_emulated_open() /* around many kernels: opening takes longer than a small one does */
#define GPU_END() dtrain_cuda_emulated_close()
#else
#define GPU_KERNEL static __global__ void
#define GPU_FN static __device__ __forceinline__
#define GPU_LANES 1
#define GPU_EACH_LANE(lane, own) for (size_t lane = threadIdx.x % GPU_WARP, own = 0; own < 1; own++)
#define GPU_FIRST (blockIdx.x * (size_t)blockDim.x + threadIdx.x)
#define GPU_THREADS (gridDim.x * (size_t)blockDim.x)
#define GPU_EACH(i, n) for (size_t i = GPU_FIRST; i < (n); i += GPU_THREADS)
#define GPU_ROWS(row, rows) for (size_t row = GPU_FIRST / GPU_WARP; row < (rows); row += GPU_THREADS / GPU_WARP)
#define GPU_COLUMNS(i, n) for (size_t i = threadIdx.x % GPU_WARP; i < (n); i += GPU_WARP)
#define GPU_SYNC_LANES() __syncwarp()
#define GPU_BEGIN() ((void)0)
#define GPU_END() ((void)0)
#define GPU_BLOCK 256
#define GPU_EACH_LAUNCH(gpu, n, name, ...) \
    do { \
        size_t gpu_blocks = ((n) + GPU_BLOCK - 1) / GPU_BLOCK; \
        name<<<(unsigned)(gpu_blocks < 8192 ? gpu_blocks : 8192), GPU_BLOCK, 0, (gpu)->stream>>>(__VA_ARGS__); \
        gpu_note(gpu, #name, cudaGetLastError()); \
    } while (0)
#define GPU_ROWS_LAUNCH(gpu, rows, name, ...) GPU_EACH_LAUNCH(gpu, (rows)*GPU_WARP, name, __VA_ARGS__)
#endif

/* result = start, to which `term` of every i below n is joined by the warp's fold, the same on all lanes. */
#define GPU_ROW_FOLD(type, fold, start, result, i, n, term) \
    do { \
        type gpu_part[GPU_LANES]; \
        GPU_EACH_LANE(gpu_lane, gpu_own) \
        { \
            type gpu_sum = start; \
            for (size_t i = gpu_lane; i < (n); i += GPU_WARP) \
                gpu_sum = fold(gpu_sum, term); \
            gpu_part[gpu_own] = gpu_sum; \
        } \
        result = fold##_warp(gpu_part); \
    } while (0)
#define GPU_ROW_SUM(result, i, n, term) GPU_ROW_FOLD(float, gpu_add, 0.0f, result, i, n, term)
#define GPU_ROW_SUM_F64(result, i, n, term) GPU_ROW_FOLD(double, gpu_add_f64, 0.0, result, i, n, term)
#define GPU_ROW_MAX(result, i, n, term) GPU_ROW_FOLD(float, gpu_max, -INFINITY, result, i, n, term)

GPU_FN float gpu_add(float a, float b)
{
    return a + b;
}

GPU_FN double gpu_add_f64(double a, double b)
{
    return a + b;
}

GPU_FN float gpu_max(float a, float b)
{
    return a > b ? a : b;
}

/* Lane l and lane l + d, d = 16, 8, ..., 1: on a GPU both of them have the sum, as a + b is b + a. */
#ifdef DTRAIN_CUDA_EMULATE
#define GPU_WARP_FOLD(type, fold) \
    GPU_FN type fold##_warp(type *part) \
    { \
        for (size_t d = GPU_WARP / 2; d > 0; d /= 2) \
            for (size_t lane = 0; lane < d; lane++) \
                part[lane] = fold(part[lane], part[lane + d]); \
        return part[0]; \
    }
#else
#define GPU_WARP_FOLD(type, fold) \
    GPU_FN type fold##_warp(type *part) \
    { \
        for (int d = GPU_WARP / 2; d > 0; d /= 2) \
            part[0] = fold(part[0], __shfl_xor_sync(0xffffffffu, part[0], d)); \
        return part[0]; \
    }
#endif
GPU_WARP_FOLD(float, gpu_add)
GPU_WARP_FOLD(double, gpu_add_f64)
GPU_WARP_FOLD(float, gpu_max)

#ifndef DTRAIN_CUDA_EMULATE
#define GPU_WORKSPACE ((size_t)32 << 20) /* what cuBLAS asks for on an H100 */

static void gpu_note(gpu *g, const char *what, cudaError_t error)
{
    if (error != cudaSuccess && g->status == DTRAIN_OK)
        g->status = dtrain_error_set(DTRAIN_ERR_IO, "%s on %s: %s (%s)", what, g->device->name,
                                     cudaGetErrorString(error), cudaGetErrorName(error));
}

static void gpu_note_blas(gpu *g, const char *what, cublasStatus_t error)
{
    if (error != CUBLAS_STATUS_SUCCESS && g->status == DTRAIN_OK)
        g->status = dtrain_error_set(error == CUBLAS_STATUS_ALLOC_FAILED ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_IO,
                                     "%s on %s: %s (cuBLAS %d)", what, g->device->name, cublasGetStatusString(error),
                                     (int)error);
}

/* The workspace is this stream's alone, and products are in float32 throughout: equal bits from run to run. */
static void gpu_open_blas(gpu *g)
{
    gpu_note_blas(g, "cublasCreate", cublasCreate(&g->blas));
    if (g->status == DTRAIN_OK)
        gpu_note_blas(g, "cublasSetStream", cublasSetStream(g->blas, g->stream)); /* resets the workspace */
    if (g->status == DTRAIN_OK)
        g->status = dtrain_device_alloc(g->device, DTRAIN_MEMORY_DEVICE, GPU_WORKSPACE, &g->workspace);
    if (g->status == DTRAIN_OK)
        gpu_note_blas(g, "cublasSetWorkspace", cublasSetWorkspace(g->blas, g->workspace, GPU_WORKSPACE));
    if (g->status == DTRAIN_OK)
        gpu_note_blas(g, "cublasSetMathMode", cublasSetMathMode(g->blas, CUBLAS_PEDANTIC_MATH));
    if (g->status == DTRAIN_OK)
        gpu_note_blas(g, "cublasSetAtomicsMode", cublasSetAtomicsMode(g->blas, CUBLAS_ATOMICS_NOT_ALLOWED));
}
#endif

/* Makes GPU `index` the calling thread's, and a queue on it. */
static dtrain_status gpu_open(gpu *g, int index)
{
    dtrain_cuda_desc desc;
    memset(g, 0, sizeof *g);
    desc.index = index;
    desc.stream = NULL;
    g->status = dtrain_cuda_create(&g->device, &desc);
#ifndef DTRAIN_CUDA_EMULATE
    if (g->status == DTRAIN_OK) {
        g->stream = (cudaStream_t)dtrain_cuda_stream(g->device);
        gpu_note(g, "cudaSetDevice", cudaSetDevice(index));
        gpu_open_blas(g);
    }
#endif
    return g->status;
}

static void gpu_close(gpu *g)
{
#ifndef DTRAIN_CUDA_EMULATE
    if (g->device != NULL)
        DTRAIN_IGNORE(dtrain_device_wait(g->device));
    if (g->blas != NULL)
        cublasDestroy(g->blas);
    if (g->workspace != NULL)
        dtrain_device_free(g->device, DTRAIN_MEMORY_DEVICE, g->workspace);
#endif
    dtrain_cuda_destroy(g->device);
    memset(g, 0, sizeof *g);
}

/* A matrix of a product: rows of `row` floats, transposed or not, and one a member of a batch, `next` floats apart. */
typedef struct gpu_matrix {
    const float *at;
    size_t row;
    int transposed;
    size_t next;
} gpu_matrix;

/* out[m, n] = alpha a[m, k] b[k, n] + beta out, row-major, for `batch` of them; rows of out are `row` floats long, and
 * members `next` apart. */
static void gpu_product(gpu *g, size_t m, size_t n, size_t k, float alpha, gpu_matrix a, gpu_matrix b, float beta,
                        float *out, size_t row, size_t next, size_t batch)
{
#ifdef DTRAIN_CUDA_EMULATE
    (void)g;
    dtrain_cuda_emulated_open();
    for (size_t i = 0; i < batch; i++)
        dtrain_sgemm(a.transposed, b.transposed, m, n, k, alpha, a.at + i * a.next, a.row, b.at + i * b.next, b.row,
                     beta, out + i * next, row);
    dtrain_cuda_emulated_close();
#else
    /* cuBLAS counts by columns, where a row-major matrix is its own transpose: out^T = b^T a^T. */
    gpu_note_blas(g, "cublasSgemmStridedBatched",
                  cublasSgemmStridedBatched(g->blas, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                            a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, (int)n, (int)m, (int)k, &alpha,
                                            b.at, (int)b.row, (long long)b.next, a.at, (int)a.row, (long long)a.next,
                                            &beta, out, (int)row, (long long)next, (int)batch));
#endif
}

static gpu_matrix gpu_rows(const float *at, size_t row, size_t next)
{
    gpu_matrix matrix = {at, row, 0, next};
    return matrix;
}

static gpu_matrix gpu_turned(const float *at, size_t row, size_t next)
{
    gpu_matrix matrix = {at, row, 1, next};
    return matrix;
}

#endif
