/* ---- >>compress ----
 * Less to send: the largest gradients alone (top-k), fewer bits a number (quantisers), few numbers a matrix
 * (PowerSGD), what was not sent kept for the next step (error feedback), and all-reduces over them.
 * Selections, packed bytes and sums are the same bits under any compiler flags and instruction set, and what all
 * ranks get is the same on each. Bytes from another rank are checked in full before anything is written from them.
 *
 *     dtrain_compressor compressor = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);              or one of these:
 *     DTRAIN_CHECK(dtrain_compressor_topk(&compressor, &topk, NULL));
 *     DTRAIN_CHECK(dtrain_compressor_powersgd(&compressor, rows, columns, 4, seed, NULL));
 *     DTRAIN_CHECK(dtrain_compressed_create(&compressed, world, count, &compressor, NULL));
 *     ...
 *     DTRAIN_CHECK(dtrain_compressed_all_reduce(compressed, grads, grads, DTRAIN_MEAN));
 *     uint64_t sent = dtrain_compressed_get_stats(compressed).sent_bytes;
 *     dtrain_compressed_destroy(compressed); */
#ifndef DTRAIN__COMPRESS_H
#define DTRAIN__COMPRESS_H
#include "../base/base.h"
#include "../tensor/tensor.h"
#include "../tensor/device.h"
#include "../tensor/pieces.h"
#include "descs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns how many elements a ratio of a vector is: max(1, ceil(count * ratio)), computed exactly; 0 for count 0.
 *
 *   ratio   above 1 counts as 1; below 0 and NaN as 0
 *
 * any thread */
DTRAIN_API size_t dtrain_topk_count(size_t count, double ratio);

/* Makes a compressor that owns nothing: copy it freely.
 *
 *   kind    DTRAIN_COMPRESS_BF16, _F16   each number, rounded to the nearest
 *           DTRAIN_COMPRESS_INT8         a float32 scale for each block, its largest magnitude / 127, then a byte a
 *                                        number: x / scale rounded to the nearest, ties to even
 *           DTRAIN_COMPRESS_FP8          the same with E4M3 numbers and the largest magnitude / 448
 *           DTRAIN_COMPRESS_SIGN         a scale, the mean magnitude of the block, then a bit a number, 1 for
 *                                        negative; use it with feedback
 *           of another kind the table is zero, which every call refuses
 *   block   a multiple of 8, at most 65,536; 0: 256, for sign 1,024; not read for BF16 and F16
 *
 * All scales come first. A block with a NaN or infinity unpacks as NaN throughout, so that it is not hidden. The same
 * bytes under any flags and instruction set.
 *
 *   source   int8: Dettmers, 8-bit approximations for parallelism in deep learning, ICLR 2016; fp8: Micikevicius and
 *            others, arXiv:2209.05433, 2022; sign: Seide, Fu, Droppo, Li, Yu, Interspeech 2014
 *
 * any thread */
DTRAIN_API dtrain_compressor dtrain_compressor_of(dtrain_compression kind, size_t block);

/* Selects the k elements of largest magnitude of a vector, NaN and then infinity before all numbers, of equals the
 * first.
 *
 *   create    for vectors of count elements, of which k; on a device it makes all memory that selecting needs
 *   select    data: count float32; add: NULL, or count float32 that are added to data first, in the same pass. indices
 *             and values: room for k, in ascending order of index. On a device the CPU does not wait, and
 *             nothing is allocated
 *   destroy   after what was queued before; a NULL selection is legal
 *   device    the same in all three; NULL: the CPU
 *   errors    DTRAIN_ERR_INVALID      k above count, something is NULL, or a selection of another device
 *             DTRAIN_ERR_UNSUPPORTED  2^32 elements or more
 *             DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_selection_create(dtrain_device *device, size_t count, size_t k,
                                                             dtrain_device_selection **selection);
DTRAIN_API_MUST dtrain_status dtrain_device_select(dtrain_device *device, dtrain_device_selection *selection,
                                                   float *data, const float *add, uint32_t *indices, float *values);
DTRAIN_API void dtrain_device_selection_destroy(dtrain_device *device, dtrain_device_selection *selection);

/* data[indices[i]] += values[i] for k elements.
 *
 *   indices   ascending, none twice. What is not below count is left out: nobody reads them to refuse it
 *   data      count float32
 *   errors    DTRAIN_ERR_INVALID      k above count, or something is NULL
 *             DTRAIN_ERR_UNSUPPORTED  2^32 elements or more
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_sparse_add(dtrain_device *device, const uint32_t *indices,
                                                       const float *values, size_t k, float *data, size_t count);

/* Pack and unpack on a device as dtrain_compressor_of INT8 and FP8 does, the same bytes.
 *
 *   code     DTRAIN_I8, or DTRAIN_F8_E4M3
 *   block    as in those calls, which say by bytes(compressor, count) how many bytes the packed form has
 *   add      1: out[i] += what is unpacked, each rounded; 0: out[i] is overwritten
 *   errors   DTRAIN_ERR_INVALID      a bad block, or something is NULL
 *            DTRAIN_ERR_UNSUPPORTED  another code
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_pack(dtrain_device *device, dtrain_dtype code, size_t block,
                                                 const float *in, size_t count, void *out);
DTRAIN_API_MUST dtrain_status dtrain_device_unpack(dtrain_device *device, dtrain_dtype code, size_t block,
                                                   const void *in, float *out, size_t count, int add);

/* Makes the compressor that sends the largest elements. It counts its steps, for the schedule: one a vector.
 *
 *   allocator   must outlive it; NULL: the C library
 *   errors      DTRAIN_ERR_INVALID  a ratio or threshold that selects nothing, an unknown dtype, form or exchange
 *               DTRAIN_ERR_MEMORY
 *   source      gather: Lin and others, ICLR 2018; switch to dense: Renggli and others, SparCML, SC 2019; split: Li and
 *               Hoefler, Near-Optimal Sparse Allreduce (Ok-Topk), PPoPP 2022
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_compressor_topk(dtrain_compressor *compressor, const dtrain_topk_desc *desc,
                                                     dtrain_allocator *allocator);

/* Makes the compressor that sends a matrix as the product of two thin ones, whose second starts from the last step's.
 * A vector for which that is no shorter is all-reduced as it is.
 *
 *   rows, columns   the matrix of its vectors, row-major: they have rows * columns elements
 *   rank            columns of the thin matrices, 1 to 64; 0: 4
 *   seed            of the first start; the same on every rank
 *   allocator       must outlive it; NULL: the C library
 *   errors          DTRAIN_ERR_INVALID, DTRAIN_ERR_MEMORY
 *   source          Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_compressor_powersgd(dtrain_compressor *compressor, size_t rows, size_t columns,
                                                         int rank, uint64_t seed, dtrain_allocator *allocator);

/* Makes the state of a vector's all-reduce. Memory: the residual and velocity, and once warm what a step packs.
 *
 * On a device the residual and velocity are its memory, it selects, packs, unpacks and adds, and the CPU copies and
 * sends what is selected or packed; the bits are the CPU's. Ranks may be on different devices, and on none. There are
 * top-k by a ratio, int8, fp8 and casts, without max_norm and start_step; top-k's pieces are merged by the CPU.
 *
 *   comm         must outlive it, as must the device
 *   compressor   is taken over, and destroyed with it or on an error
 *   desc         NULL: all defaults
 *   errors       DTRAIN_ERR_INVALID  a table that cannot be used; constants out of range; momentum without top-k, or
 *                                    without feedback
 *                DTRAIN_ERR_UNSUPPORTED  a device that cannot do this; the text says what can be done instead
 *                DTRAIN_ERR_MEMORY
 *   source       Seide and others, Interspeech 2014; momentum correction, masking and clipping: Lin, Han, Mao, Wang,
 *                Dally, ICLR 2018; start_step: PyTorch's start_powerSGD_iter
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_compressed_create(dtrain_compressed **compressed, dtrain_comm *comm, size_t count,
                                                       const dtrain_compressor *compressor,
                                                       const dtrain_compressed_desc *desc);

/* Sums over all ranks what each sends of in and of its residual; the same bits on every rank.
 *
 * Packing compressors: each part of the vector (see dtrain_shard) is packed and sent to its rank, which adds in the
 * tree order as float32, packs the sum and sends it to all. What either packing lost is in the residuals afterwards, so
 * that the sum of out and of all ranks' residuals is that of all inputs, and residuals before, to rounding.
 *
 * On a device, in is read and out is written in the order of its queue, and is whole for what is queued after the call.
 * The CPU waits for the device where it reads what it sends: once for a selection, twice for what is packed.
 *
 *   in, out   count float32 each, memory of the device where there is one; the same buffer, or apart
 *   op        DTRAIN_SUM; DTRAIN_MEAN divides once by the world size, which on a device is at most 64 or a power of two
 *   errors    DTRAIN_ERR_CORRUPT  a rank sent bytes that are none; the text names it, and the group is broken
 *             of the device       the text names rank and device, and the group is broken
 *             others as dtrain_all_reduce; the residual is undefined after an error
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_compressed_all_reduce(dtrain_compressed *compressed, const float *in, float *out,
                                                           dtrain_op op);

/* Lists what a checkpoint keeps besides the vector, a row of {ranks, count} for each rank: residual.0, velocity.0, what
 * the compressor has (start.0 of PowerSGD, step.0 of top-k's schedule), with start_step dense_steps.0, how many steps
 * were not compressed. Steps are two floats, the halves of a number below 2^48. As many ranks go on from it.
 * Give several of one checkpoint a name each (see dtrain_pieces).
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_compressed_pieces(dtrain_compressed *compressed);

/* Says how much was sent; zeroes for NULL.
 *
 * one thread per object */
DTRAIN_API dtrain_compressed_stats dtrain_compressed_get_stats(const dtrain_compressed *compressed);

/* Frees the state and its compressor; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_compressed_destroy(dtrain_compressed *compressed);

#ifdef __cplusplus
}
#endif

#endif
