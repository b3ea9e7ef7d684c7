/* ---- >>cuda ----
 * Devices for NVIDIA's GPUs: a dtrain_device over a stream of the CUDA runtime. Needs the CUDA Toolkit to build and a
 * driver to run; without one every call returns DTRAIN_ERR_UNSUPPORTED and the program goes on. */
#ifndef DTRAIN__CUDA_H
#define DTRAIN__CUDA_H
#include "manual.h"

#if defined(DTRAIN_CUDA_EMULATE) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE 1 /* mmap's MAP_ANONYMOUS */
#endif
#include "dtrain.h"
#ifdef DTRAIN_NO_DEVICE
#error "dtrain_cuda.h: its devices need the part that DTRAIN_NO_DEVICE leaves out: remove that macro"
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_cuda_desc {
    int index;    /* the GPU, from 0 */
    void *stream; /* a cudaStream_t of the caller's, which must outlive the device; NULL: a stream of its own,
                   * which does not wait for the default stream, nor that for it */
} dtrain_cuda_desc;

/* Counts the GPUs that this process can use.
 *
 *   count    out: 0 on an error
 *   errors   DTRAIN_ERR_UNSUPPORTED  no driver, no GPU, or a build without CUDA; the text says which
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_cuda_count(int *count);

/* Makes a queue on a GPU. Several on one GPU run side by side.
 *
 *   device   out: NULL on an error
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_UNSUPPORTED  as dtrain_cuda_count; or the build has no code for this GPU
 *            DTRAIN_ERR_INVALID      no such GPU; a stream that is destroyed or another GPU's
 *            DTRAIN_ERR_MEMORY, DTRAIN_ERR_IO
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc);

/* Waits for what was queued and frees the queue; memory that was allocated through it stays the caller's to free,
 * before this. NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device);

/* Returns the stream as a cudaStream_t, to queue kernels of your own in order with the rest; NULL for no device of
 * dtrain_cuda_create.
 *
 * any thread */
DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device);

#ifdef DTRAIN_CUDA_EMULATE
/* Emulated, open the devices' memory to the CPU, and close it again: around a kernel of the program's own, which is a
 * call there. Open to the calling thread, and to those that it starts meanwhile; to others perhaps.
 *
 * any thread */
DTRAIN_API void dtrain_cuda_emulated_open(void);
DTRAIN_API void dtrain_cuda_emulated_close(void);
#endif

#ifdef __cplusplus
}
#endif

#endif
