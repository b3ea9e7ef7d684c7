/* ---- >>compress ----
 * Less to send. Top-k sends the largest elements of a vector, quantisers send fewer bits a number, PowerSGD sends a
 * matrix as two thin ones. Error feedback keeps what is not sent for the next step. Selections, packed bytes and sums
 * have the same bits under any compiler flags and instruction set, and results are the same on every rank. Bytes from
 * another rank are checked in full before anything is written from them.
 *
 *     dtrain_compressor compressor = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);              or one of these:
 *     DTRAIN_CHECK(dtrain_compressor_topk(&compressor, &topk, NULL));
 *     DTRAIN_CHECK(dtrain_compressor_powersgd(&compressor, rows, columns, 4, seed, NULL));
 *     DTRAIN_CHECK(dtrain_compressed_create(&compressed, world, count, &compressor, NULL));
 *     ...
 *     DTRAIN_CHECK(dtrain_compressed_all_reduce(compressed, grads, grads, DTRAIN_MEAN));
 *     if (!all_finite(grads, count))
 *         dtrain_compressed_drop(compressed);                                          and leave the optimizer out
 *     uint64_t sent = dtrain_compressed_get_stats(compressed).sent_bytes;
 *     dtrain_compressed_destroy(compressed);
 *
 * WHERE TO ASK FOR IT: the calls above compress one vector. To train with compression, set a field of a desc:
 *
 *     DDP, or FSDP as DDP or hybrid: compress       each bucket of gradients, sent while backward runs
 *     dtrain_aggregator_compressed                  all gradients, as one vector
 *     parameter server, local SGD: compress         gradients and parameters, or the differences of a round
 *     FSDP: quantise_gather, quantise_reduce        int8 weights and gradients between shards
 *
 * train_gpt has them as flags: --compress topk:0.01, int8, fp8, bf16, f16, sign or powersgd:4, with options after it
 * (see --help). It prints what each bucket sent; dtrain_ddp_buckets returns it.
 *
 * WHAT IT GAINS ON A SLOW LINK: build/slow_link trains the model of train_gpt over links of a bandwidth and a latency
 * that you choose.
 *
 *     4 ranks, 40 steps, 20 Mbit/s and 2 ms a link
 *     compressor            KiB a step  seconds  faster      loss  val_loss
 *     dense                      802.5    15.31     1.0    3.1890    3.3510
 *     bf16                       401.2     9.70     1.6    3.1890    3.3510
 *     int8                       203.8     6.29     2.4    3.1890    3.3510
 *     fp8                        203.8     6.50     2.4    3.1895    3.3514
 *     sign                        25.9     3.53     4.3    3.6322    3.6706
 *     topk:0.1                   200.8     6.22     2.5    3.2518    3.3846
 *     topk:0.01                   20.7     3.08     5.0    3.3824    3.5073
 *     topk:0.01:nofeedback        20.4     2.95     5.2    3.2969    3.4364
 *     powersgd:4                  76.5     8.43     1.8    3.1901    3.3508
 *
 * WHAT IT COSTS IN A LONGER RUN: how far the loss of train_gpt is from that with float32, after 300 steps on 4 ranks.
 * For AdamW it is the held-out loss, measured with tools/loss_table. For SGD it is the loss of the last step of
 *
 *     build/train_gpt --ranks 4 --batch 4 --steps 300 --optimizer sgd --lr 0.2 --compress int8
 *
 *     --compress                          SGD        AdamW
 *     int8                               -2.9 %      +0.0 %
 *     topk:0.01                          +6.8 %     +43 %
 *     topk:0.01:nofeedback               +5.8 %
 *     topk:0.01:dense:start=60                      +13.1 %
 *     topk:0.01:dense:start=60:adam                  +5.1 %
 *     powersgd:4                         -0.6 %     +11.6 %
 *     powersgd:4:dense:start=60                      +7.4 %
 *
 * Under SGD, top-k with feedback takes over momentum (momentum correction, factor masking: Lin and others, 2018). Each
 * rank sends from a velocity of its own (feedback.momentum), and the optimizer has none. All gradients of train_gpt are
 * one bucket. With buckets of 1 MiB, which overlap with backward, it trains worse.
 *
 * Under AdamW, top-k and PowerSGD fall behind. Use int8, or these three, which help:
 *
 *     feedback.start_step   sends the first steps as float32 (:start=60)
 *     dense in the table    never compresses that parameter: set it for embeddings (:dense)
 *     compress.adam         sends momenta instead of gradients after the first steps, and no longer changes AdamW's v
 *                           then, as 1-bit Adam does (:adam) */
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

/* Returns how many elements a ratio selects: max(1, ceil(count * ratio)), computed exactly; 0 for count 0.
 *
 *   ratio   above 1 counts as 1; below 0 and NaN count as 0
 *
 * any thread */
DTRAIN_API size_t dtrain_topk_count(size_t count, double ratio);

/* Makes a quantiser. It owns nothing: copy it freely.
 *
 *   kind    DTRAIN_COMPRESS_BF16, _F16   each number, rounded to the nearest
 *           DTRAIN_COMPRESS_INT8         for each block a float32 scale, its largest magnitude / 127. Then a byte a
 *                                        number: x / scale rounded to the nearest, ties to even
 *           DTRAIN_COMPRESS_FP8          as INT8, with E4M3 numbers and the largest magnitude / 448
 *           DTRAIN_COMPRESS_SIGN         for each block a float32 scale, its mean magnitude. Then a bit a number: 1 for
 *                                        negative. Use it with feedback
 *           another kind                 the table is all zeros, and every call refuses it
 *   block   elements that share a scale: a multiple of 8, at most 65,536. 0: 256, for sign 1,024. Not read for BF16 and
 *           F16
 *
 * The packed form is all scales, then all codes. A block with a NaN or infinity unpacks as NaN throughout, so that you
 * see it. The bytes are the same under any flags and instruction set.
 *
 *   source   int8: Dettmers, 8-bit approximations for parallelism in deep learning, ICLR 2016.
 *            fp8: Micikevicius and others, arXiv:2209.05433, 2022.
 *            sign: Seide, Fu, Droppo, Li, Yu, Interspeech 2014
 *
 * any thread */
DTRAIN_API dtrain_compressor dtrain_compressor_of(dtrain_compression kind, size_t block);

/* Selects the k elements of largest magnitude of a vector.
 *
 * NaN counts as largest, then infinity. Of equal magnitudes it takes those of lowest index.
 *
 *   create    makes a selection of k of count elements. On a device it allocates all memory that selecting needs
 *   select    data: count float32. add: NULL, or count float32 that the call adds to data first, in the same pass.
 *             indices, values: out, k of each, in ascending order of index. On a device the CPU does not wait, and
 *             nothing is allocated
 *   destroy   after what was queued before; a NULL selection is legal
 *   device    the same in all three; NULL: the CPU
 *   errors    DTRAIN_ERR_INVALID      k above count, NULL where memory is needed, or a selection of another device
 *             DTRAIN_ERR_UNSUPPORTED  2^32 elements or more
 *             DTRAIN_ERR_MEMORY
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_selection_create(dtrain_device *device, size_t count, size_t k,
                                                             dtrain_device_selection **selection);
DTRAIN_API_MUST dtrain_status dtrain_device_select(dtrain_device *device, dtrain_device_selection *selection,
                                                   float *data, const float *add, uint32_t *indices, float *values);
DTRAIN_API void dtrain_device_selection_destroy(dtrain_device *device, dtrain_device_selection *selection);

/* Adds k values to elements of a vector: data[indices[i]] += values[i].
 *
 *   indices   ascending, none twice. An index that is not below count is skipped without an error
 *   data      count float32
 *   errors    DTRAIN_ERR_INVALID      k above count, or NULL where memory is needed
 *             DTRAIN_ERR_UNSUPPORTED  2^32 elements or more
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_sparse_add(dtrain_device *device, const uint32_t *indices,
                                                       const float *values, size_t k, float *data, size_t count);

/* Packs and unpacks a vector on a device, with the bytes of dtrain_compressor_of INT8 and FP8.
 *
 *   code     DTRAIN_I8 or DTRAIN_F8_E4M3
 *   block    as for dtrain_compressor_of, whose bytes(compressor, count) says how many bytes the packed form has
 *   add      1: adds each unpacked number to out[i], rounded; 0: overwrites out[i]
 *   errors   DTRAIN_ERR_INVALID      a bad block, or NULL where memory is needed
 *            DTRAIN_ERR_UNSUPPORTED  another code
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_device_pack(dtrain_device *device, dtrain_dtype code, size_t block,
                                                 const float *in, size_t count, void *out);
DTRAIN_API_MUST dtrain_status dtrain_device_unpack(dtrain_device *device, dtrain_dtype code, size_t block,
                                                   const void *in, float *out, size_t count, int add);

/* Makes the compressor that sends the largest elements.
 *
 * It counts its steps, one for each vector, for the schedule of its ratio.
 *
 *   desc        required: a ratio
 *   allocator   must outlive the compressor; NULL: the C library
 *   errors      DTRAIN_ERR_INVALID  a ratio that is not above 0 and at most 1; an unknown dtype, form or exchange
 *               DTRAIN_ERR_MEMORY
 *   source      gather: Lin and others, ICLR 2018. Switch to dense: Renggli and others, SparCML, SC 2019
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_compressor_topk(dtrain_compressor *compressor, const dtrain_topk_desc *desc,
                                                     dtrain_allocator *allocator);

/* Makes the compressor that sends a matrix as the product of two thin matrices.
 *
 * The second thin matrix starts from that of the step before. If the thin matrices are not shorter than the vector, the
 * vector is all-reduced as it is.
 *
 *   rows, columns   the vector as a matrix, row-major; it has rows * columns elements
 *   rank            columns of each thin matrix, 1 to 64; 0: 4
 *   seed            for the first start; the same on every rank
 *   allocator       must outlive the compressor; NULL: the C library
 *   errors          DTRAIN_ERR_INVALID  a rank out of range, or sizes that overflow
 *                   DTRAIN_ERR_MEMORY
 *   source          Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_compressor_powersgd(dtrain_compressor *compressor, size_t rows, size_t columns,
                                                         int rank, uint64_t seed, dtrain_allocator *allocator);

/* Makes the state of the compressed all-reduce of one vector.
 *
 * Memory: the residual unless no_feedback, and the velocity if desc has momentum, each twice and 4 bytes an element;
 * after the first step the packed bytes of a step.
 *
 * On a device, residual and velocity are in its memory. The device selects, packs, unpacks and adds. The CPU copies and
 * sends what is selected or packed, and merges the selections of top-k. The bits are the CPU's. Ranks may be on
 * different devices, or on none. A device supports top-k, int8, fp8 and casts, without start_step.
 *
 *   comm         must outlive the state, and so must the device
 *   compressor   taken over: destroyed with the state, or by this call on an error
 *   desc         NULL: all defaults
 *   errors       DTRAIN_ERR_INVALID      a compressor without functions or with a bad block; constants out of range;
 *                                        momentum without top-k, or without feedback
 *                DTRAIN_ERR_UNSUPPORTED  something that the device does not support; the text says what to do instead
 *                DTRAIN_ERR_MEMORY
 *   source       Seide and others, Interspeech 2014. Momentum correction and masking: Lin, Han, Mao, Wang, Dally, ICLR
 *                2018. start_step: PyTorch's start_powerSGD_iter
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_compressed_create(dtrain_compressed **compressed, dtrain_comm *comm, size_t count,
                                                       const dtrain_compressor *compressor,
                                                       const dtrain_compressed_desc *desc);

/* Sums over all ranks what each sends of its vector and its residual; the same bits on every rank.
 *
 * With a compressor that packs, each part of the vector (see dtrain_shard) is packed and sent to its rank. That rank
 * adds the parts in the tree order as float32, packs the sum and sends it to all. Residuals keep what either packing
 * loses. So with DTRAIN_SUM, out plus all new residuals is the sum of all inputs and earlier residuals, to rounding.
 * Inputs of all steps must be in one unit, such as means over examples.
 *
 * A NaN or infinity reaches out in this step alone. So does a sum of finite numbers that is too large. What is kept has
 * 0 in the place of such a number, so it stays finite.
 *
 * On a device the call reads in and writes out in the order of the device's queue. What you queue after the call sees
 * all of out. The CPU waits for the device before it reads what it sends: once for a selection, twice for packed bytes.
 *
 *   in, out   count float32 each, in the device's memory if there is one; the same buffer, or apart
 *   op        DTRAIN_SUM; DTRAIN_MEAN divides once by the world size, which on a device is at most 64 or a power of two
 *   errors    DTRAIN_ERR_CORRUPT  a rank sent bytes that are not valid; the text names it, and the group is broken
 *             of the device       the text names rank and device, and the group is broken
 *             others as dtrain_all_reduce; after an error what is kept is as before the call
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms a message */
DTRAIN_API_MUST dtrain_status dtrain_compressed_all_reduce(dtrain_compressed *compressed, const float *in, float *out,
                                                           dtrain_op op);

/* Takes back the step of the last dtrain_compressed_all_reduce: what is kept between steps is again as before that
 * call. Call it on every rank if you do not apply a step, because its sum is not finite, say; else parts of it come
 * back in later ones. It does nothing if that call returned an error, even DTRAIN_ERR_INVALID, or if a load or another
 * drop came after it.
 *
 *   compressed   NULL is legal
 *
 * one thread per object */
DTRAIN_API void dtrain_compressed_drop(dtrain_compressed *compressed);

/* Lists what a checkpoint keeps besides the vector, for as many ranks to go on from.
 *
 * Each list has one row for each rank. Numbers of steps are two floats: the lower and upper 24 bits. If a checkpoint
 * keeps several of these objects, give each a name (see dtrain_pieces).
 *
 *   residual.0      with feedback
 *   velocity.0      with momentum
 *   start.0         of PowerSGD: where its next step starts
 *   step.0          of top-k: its number of steps, for the schedule
 *   dense_steps.0   with start_step: how many steps have not been compressed
 *
 * any thread */
DTRAIN_API dtrain_pieces dtrain_compressed_pieces(dtrain_compressed *compressed);

/* Returns how much was sent; zeros for NULL.
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
