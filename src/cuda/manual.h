/* dtrain_cuda.h - NVIDIA's GPUs for dtrain.h. Public domain or MIT, at your choice: see LICENSE.
 *
 * A dtrain_device (dtrain.h, >>device) over a stream of the CUDA runtime: memory, copies, events, and kernels that give
 * the same bits as the CPU's. Programs that have no GPU, or no driver, are told so by a status and run on.
 *
 * CONTENTS (search for the mark)
 *     >>cuda           how many GPUs, queues on them, streams of the program's own
 *     >>cuda-body      how kernels are written, on a GPU and emulated
 *
 * BUILD: a C program keeps its C compiler, and one file goes to nvcc.
 *
 *     dtrain.c      #define DTRAIN_IMPLEMENTATION
 *                   #include "dtrain.h"
 *     kernels.cu    #define DTRAIN_CUDA_IMPLEMENTATION
 *                   #include "dtrain_cuda.h"
 *
 *     cc -O2 -ffp-contract=off -c dtrain.c program.c
 *     nvcc -O2 -arch=sm_90 -c kernels.cu
 *     nvcc dtrain.o program.o kernels.o -lpthread -lm
 *
 * Or both implementations in one .cu file, dtrain.h first and before any system header. CUDA 12.0 or later, GPUs from
 * compute capability 8.0 on; CUDA 13's -arch=all-major makes code for all of them, CUDA 12's begins with GPUs that are
 * too old for it: name yours. Links with the runtime alone, statically.
 *
 * A FIRST PROGRAM
 *
 *     dtrain_device *gpu;
 *     void *x;
 *     float one = 1;
 *     DTRAIN_CHECK(dtrain_cuda_create(&gpu, NULL));
 *     DTRAIN_CHECK(dtrain_device_alloc(gpu, DTRAIN_MEMORY_DEVICE, count * sizeof(float), &x));
 *     DTRAIN_CHECK(dtrain_device_fill(gpu, x, &one, sizeof one, count));
 *     DTRAIN_CHECK(dtrain_device_scale(gpu, DTRAIN_F32, x, 0.5, count));
 *     DTRAIN_CHECK(dtrain_device_copy(gpu, host, x, count * sizeof(float)));   returns when host is written
 *     dtrain_device_free(gpu, DTRAIN_MEMORY_DEVICE, x);
 *     dtrain_cuda_destroy(gpu);
 *
 * CONVENTIONS, beside those of dtrain.h
 *     Order     A device is a stream: what is handed to it runs in the order of the calls. Hand it a stream of your own
 *               (dtrain_cuda_desc), or queue your kernels on its (dtrain_cuda_stream), and they run in that order too.
 *     Pointers  Device memory of any origin will do: dtrain_device_alloc, cudaMalloc, a tensor of PyTorch's; and pinned
 *               or managed memory. Other memory of the CPU, another GPU's, freed memory, and where CUDA can tell a
 *               range that ends beyond its allocation, are DTRAIN_ERR_INVALID, but for dtrain_device_copy, which takes
 *               the CPU's, and therefore cannot tell freed memory of the GPU from it.
 *     Peers     dtrain_device_reduce and groups of devices take memory of any GPU that theirs reaches: handed some, they
 *               open that GPU's memory to theirs (cudaDeviceEnablePeerAccess), for the rest of the process. Memory of
 *               cudaMallocAsync, or mapped by the driver's calls, is open to whom its maker has said. dtrain_device_copy
 *               copies between any two. Elsewhere another GPU's memory is DTRAIN_ERR_INVALID.
 *               Any alignment will do but where the norm and top-k are concerned, and for what a call counts or
 *               reports in: those lie at multiples of their elements' width, or are DTRAIN_ERR_INVALID.
 *     Current   The calling thread's current GPU (cudaSetDevice) is after a call what it was before, and no other GPU
 *               than the device's gets a context.
 *     Errors    The text has CUDA's own name, number and message. DTRAIN_ERR_UNSUPPORTED: no driver, no GPU, or no code
 *               for it in this build. DTRAIN_ERR_MEMORY says what is free; the device works on. A kernel's fault, of
 *               the program's own kernels too, is DTRAIN_ERR_IO in every later call: CUDA gives the GPU back to a new
 *               process only.
 *     Bits      The same as dtrain.h's on the CPU, whatever nvcc's flags (--use_fast_math, --fmad) and the GPU; what a
 *               NaN holds is nobody's.
 *
 * MACROS, before the implementation
 *     DTRAIN_CUDA_STUB      no CUDA here: compiles as C or C++, and every call returns DTRAIN_ERR_UNSUPPORTED
 *     DTRAIN_CUDA_EMULATE   two GPUs on the CPU, for tests: compiles as C by gcc or clang, on POSIX. Kernels run thread
 *                           after thread, in changing order. Device memory cannot be touched but by the device, and
 *                           by a program's own kernels between dtrain_cuda_emulated_open and _close; writes beside an
 *                           allocation end in DTRAIN_ERR_IO when it is freed. In the environment,
 *                           DTRAIN_CUDA_EMULATED_BYTES is how much of it both have together (2^34 by default)
 */
