/* dtrain_cuda.h - NVIDIA's GPUs for dtrain.h. Public domain or MIT, at your choice: see LICENSE.
 *
 * Makes a dtrain_device (dtrain.h, >>device) of a stream of the CUDA runtime: memory, copies, events and kernels. They
 * give the same bits as the CPU. On a machine without a GPU or a driver, calls return DTRAIN_ERR_UNSUPPORTED and the
 * text says why; the program runs on.
 *
 * CONTENTS (search for the mark)
 *     >>cuda           number of GPUs, queues on them, streams of your own
 *     >>cuda-body      how kernels are written, on a GPU and emulated
 *
 * BUILD. A C program keeps its C compiler; one file goes to nvcc.
 *
 *     dtrain.c      #define DTRAIN_IMPLEMENTATION
 *                   #include "dtrain.h"
 *     kernels.cu    #define DTRAIN_CUDA_IMPLEMENTATION
 *                   #include "dtrain_cuda.h"
 *
 *     cc -O2 -ffp-contract=off -c dtrain.c program.c
 *     nvcc -std=c++17 -O2 -arch=sm_90 -c kernels.cu
 *     nvcc dtrain.o program.o kernels.o -lpthread -lm
 *
 * You may also put both implementations into one .cu file, dtrain.h first and before any system header. You need CUDA
 * 12.0 or later and a GPU of compute capability 8.0 or later. With CUDA 13, -arch=all-major makes code for every GPU.
 * CUDA 12's all-major begins with GPUs that are too old: name yours. The program links with the CUDA runtime alone,
 * statically: it needs no libcudart or libcuda to start.
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
 * examples/device_reduce.cu is a whole program. These calls of dtrain.h take a device, and run on the CPU for NULL:
 *
 *     memory and copies            >>device
 *     reduce, scale, axpy          F64, F32, F16, BF16; the reduction also takes integers
 *     convert                      between F64, F32, F16, BF16 and both FP8
 *     overflow, norm, clipping     >>device
 *     AdamW and SGD                by a parameter table, see below
 *     top-k, sparse sums           below 2^32 elements; with or without a residual
 *     int8, fp8                    with a scale a block
 *
 * Matrix products, sign compression and PowerSGD have no kernels here.
 *
 * RANKS talk from device memory through a group of devices: dtrain.h, >>device-group.
 *
 * TRAINING. Give every parameter of the table the same device. Then the calls of DDP and FSDP are those of the CPU.
 *
 *     for (size_t i = 0; i < count; i++)
 *         table[i].device = gpu;                               data, grad: memory of the GPU; for FSDP also NULL
 *     DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc));    or dtrain_ddp_create
 *     float *w = dtrain_fsdp_unit_param(fsdp, "qkvw", unit);   layer by layer, at addresses that stay
 *     ...
 *     DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, unit));            then queue kernels on dtrain_cuda_stream(gpu)
 *     DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, NULL));             NULL: the CPU does not wait for the norm
 *
 * Gathers and reductions run beside your kernels, ordered by events. The same gradients give the weights of the CPU,
 * bit for bit. With compress (top-k, int8, fp8, bf16, f16) the GPU selects or packs, and the result goes through the
 * socket. Checkpoints save from GPUs and load onto them; the files are those of the CPU.
 *
 * examples/train_gpt_cuda.cu trains the model of train_gpt with kernels of its own and cuBLAS:
 *
 *     make cuda
 *     build/train_gpt_cuda --ranks 4 --steps 200               threads, which share the GPUs
 *     build/train_gpt_cuda --ranks 4 --gpus 1 --strategy full --trace trace.json
 *     build/dtrun -n 4 build/train_gpt_cuda --steps 200        processes
 *     build/train_gpt_cuda --ranks 4 --save run --every 50     then --resume, on any number of ranks
 *
 * Its flags, files and checkpoints are those of train_gpt, and either program goes on from the other's checkpoint. It
 * refuses --mesh, --aggregator, --local-steps, --compress sign and powersgd, --tokens, --open and --export, and prints
 * no sample.
 *
 * LIMITS. These return DTRAIN_ERR_UNSUPPORTED for a table on a device: modules, pipelines, aggregators, local SGD, the
 * parameter server, and FSDP with quantise_gather, quantise_reduce or compress.adam. Tensor parallelism computes on
 * the CPU.
 *
 * WHAT IS CHECKED
 *
 *     - checked: it compiles for compute capability 8.0, 9.0 and 10.0 without spills or local memory
 *     - checked: its arithmetic in PTX is neither contracted nor flushed to zero
 *     - checked: emulated GPUs give the CPU's bits, to threads and processes, also when ranks are killed
 *     - checked on one H100: every test, kernels under memcheck and racecheck, train_gpt_cuda in every layout, and speed
 *     - NOT checked: several GPUs, so peer access and FLAGS between GPUs, or another kind of GPU
 *
 * On a machine with GPUs, these check the rest:
 *
 *     make test-cuda CUDA_LARGE=1                    every size to 2^28; train_gpt_cuda's losses beside train_gpt's
 *     make test-cuda SANITIZER="compute-sanitizer --tool memcheck"      or racecheck, synccheck, initcheck
 *     make bench-cuda                                one line each, with what it should reach: ok, MISSED or skipped
 *     python3 tools/bench_cuda_peers.py              the kernels' lines in PyTorch
 *
 * CONVENTIONS, in addition to those of dtrain.h
 *     Order     A device is a stream: calls run in the order in which you make them. Give it a stream of your own
 *               (dtrain_cuda_desc), or queue your kernels on its stream (dtrain_cuda_stream); they keep that order too.
 *     Pointers  Use device memory of any origin: dtrain_device_alloc, cudaMalloc, a tensor of PyTorch; pinned or
 *               managed memory too. Other memory of the CPU, another GPU's memory and freed memory are
 *               DTRAIN_ERR_INVALID. So is a range that ends beyond its allocation, if CUDA can tell. dtrain_device_copy
 *               also takes the CPU's memory, so it cannot tell freed memory of the GPU from that.
 *     Peers     dtrain_device_reduce and groups of devices take memory of any GPU that theirs reaches. On first use
 *               they open that GPU's memory to theirs (cudaDeviceEnablePeerAccess), for the rest of the process. Memory
 *               of cudaMallocAsync, or mapped by the driver's calls, is open only to GPUs that its maker has named.
 *               dtrain_device_copy copies between any two.
 *     Align     Any alignment will do, with two exceptions: arrays of the norm and of top-k, and what a call counts or
 *               reports in. Those lie at multiples of their elements' width, or are DTRAIN_ERR_INVALID.
 *     Current   A call leaves the calling thread's current GPU (cudaSetDevice) as it was. It makes no context on any
 *               GPU but the device's.
 *     Errors    Texts have CUDA's own name, number and message. DTRAIN_ERR_UNSUPPORTED: no driver, no GPU, or no code
 *               for it in this build. DTRAIN_ERR_MEMORY: the text says how much is free, and the device works on. After
 *               a fault of a kernel, also of your own, every later call returns DTRAIN_ERR_IO: CUDA gives the GPU back
 *               only to a new process.
 *     Bits      They are those of dtrain.h on the CPU, whatever the GPU and nvcc's flags (--use_fast_math, --fmad). A
 *               NaN stays a NaN; its payload may differ.
 *
 * MACROS, before the implementation
 *     DTRAIN_CUDA_STUB      for a machine without CUDA: compiles as C or C++; calls return DTRAIN_ERR_UNSUPPORTED
 *     DTRAIN_CUDA_EMULATE   two GPUs on the CPU, for tests: compiles as C by gcc or clang, on POSIX; make test uses it
 *
 * Emulated kernels run thread after thread, in changing order. Only the device may touch its memory, and your own
 * kernels between dtrain_cuda_emulated_open and _close. A write beside an allocation is DTRAIN_ERR_IO when it is freed.
 * DTRAIN_CUDA_EMULATED_BYTES in the environment is the memory of both GPUs together: 2^34 by default, and 2^28 where an
 * address has 32 bits.
 */
