/* ---- >>cuda ----
 * Devices for NVIDIA's GPUs: a dtrain_device over a stream of the CUDA runtime. You need the CUDA Toolkit to build and
 * a driver to run. Without a driver the calls return DTRAIN_ERR_UNSUPPORTED and the program goes on. */
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
    void *stream; /* a cudaStream_t of yours, which must outlive the device; NULL: a new stream, which is not ordered
                   * with the default stream */
} dtrain_cuda_desc;

/* Counts the GPUs that this process can use.
 *
 *   count    out: 0 on an error
 *   errors   DTRAIN_ERR_UNSUPPORTED  no driver, no GPU, or a build without CUDA; the text says which
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_cuda_count(int *count);

/* Creates a device: a queue on a GPU. Several on one GPU run side by side.
 *
 *   device   out: the device; NULL on an error
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_UNSUPPORTED  as dtrain_cuda_count; or the build has no code for this GPU
 *            DTRAIN_ERR_INVALID      no such GPU; or a stream that is destroyed or another GPU's
 *            DTRAIN_ERR_MEMORY       no memory
 *            DTRAIN_ERR_IO           CUDA returned an error; the text quotes it
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_cuda_create(dtrain_device **device, const dtrain_cuda_desc *desc);

/* Waits for what was queued, and frees the device; NULL is legal. Before it, free the memory that you allocated through
 * the device.
 *
 * one thread per object */
DTRAIN_API void dtrain_cuda_destroy(dtrain_device *device);

/* Returns the stream of a device as a cudaStream_t: queue your own kernels on it, in order with the rest.
 *
 * For a device that dtrain_cuda_create did not make it returns NULL.
 *
 * any thread */
DTRAIN_API void *dtrain_cuda_stream(const dtrain_device *device);

#ifdef DTRAIN_CUDA_EMULATE
/* Open the memory of emulated devices to the CPU, and close it again. Call them around your own kernels, which are
 * calls of functions there.
 *
 * The memory is open to the calling thread and to threads that it starts meanwhile. Other threads may have access too.
 *
 * any thread */
DTRAIN_API void dtrain_cuda_emulated_open(void);
DTRAIN_API void dtrain_cuda_emulated_close(void);
#endif

#ifdef __cplusplus
}
#endif

#endif
