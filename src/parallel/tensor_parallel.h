/* ---- >>tensor-parallel ----
 * Layers split inside: each rank of a group holds a part of a layer's weights and computes a part of its output, or a
 * part of the sum that makes it. Two layers in a row, the first split by outputs (column), the second by inputs (row),
 * need one all-reduce forward and one backward:
 *
 *     hidden    = gelu(dtrain_column_parallel_linear(x))     x whole, hidden this rank's channels
 *     y         = dtrain_row_parallel_linear(hidden)         y whole, the same bits on every rank
 *
 * Attention is split by heads: a column layer of 3 blocks, whose granule is the channels of a head, gives queries, keys
 * and values; then dtrain_attention_forward, then a row layer of that granule. With sequence parallelism what lies
 * between (norms, dropout, residuals) is split by rows, the all-reduces become a reduce-scatter and an all-gather of as
 * many bytes, and dtrain_sequence_parallel_sum adds up the gradients of what is not split.
 *
 * Everything is float32 and row-major; gradients of weights are added to, those of activations are overwritten. Sizes
 * need not divide among the ranks. Pointers to empty parts may be NULL, but a gradient's NULL always means that no rank
 * wants it. Buffers of a call do not overlap. Every rank of the group makes the same calls with the same sizes and
 * flags, wants the same gradients, and holds the same inputs where they are whole. Sums over ranks have the order of
 * >>order. Temporary memory is the group's allocator's. A group of NULL or of one rank communicates nothing.
 *
 * Wrong arguments are DTRAIN_ERR_INVALID, before anything is communicated; so is a call between dtrain_fuse_begin and
 * dtrain_fuse_end. A rank without memory gets DTRAIN_ERR_MEMORY, and the others wait for it until their deadline or its
 * leaving. Other errors are those of dtrain_all_reduce; sizes that differ between ranks are DTRAIN_ERR_MISMATCH where
 * another number of elements is communicated.
 *
 *   source   Shoeybi and others, Megatron-LM, arXiv:1909.08053, 2019; sequence parallelism: Korthikanti and others,
 *            Reducing activation recomputation in large transformer models, MLSys 2023 */
#ifndef DTRAIN__TENSOR_PARALLEL_H
#define DTRAIN__TENSOR_PARALLEL_H
#include "../comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One rank's part of a linear layer: y[rows, outputs] = x[rows, inputs] W^T + bias. Zero what does not apply.
 *
 * A column layer is split by outputs, a row layer by inputs; part is what dtrain_param_cut leaves of that dimension:
 * with one block and granule a dtrain_shard of it. */
typedef struct dtrain_parallel_linear {
    dtrain_comm *group;     /* of the ranks that split the layer; NULL: this rank has all of it */
    size_t rows;            /* of x and y in whole: tokens */
    size_t inputs, outputs; /* of the whole layer */
    size_t blocks;       /* the split dimension is so many equal blocks, each cut alike (3: query, key, value); 0: 1 */
    size_t granule;      /* it is cut at multiples of so many (channels of a head); 0: 1 */
    const float *weight; /* column: [part, inputs]; row: [outputs, part] */
    const float *bias; /* column: [part]; row: [outputs], the same on every rank, added once, after the sum; or NULL */
    float *d_weight;   /* as weight, added to; NULL: not wanted */
    float *d_bias;     /* as bias, added to; of a row layer the same on every rank; NULL: not wanted */
    int by_inputs;     /* 1: weight is [inputs, outputs], cut likewise, as in x W */
    int gather_output; /* column: y, and dy, is [rows, outputs] on every rank */
    int sequence;      /* 1: x of a column layer, y of a row layer is this rank's dtrain_shard of the rows */
    int no_overlap;    /* 1: communicates while nothing is computed; the same bits */
} dtrain_parallel_linear;

/* Computes y of a layer split by outputs; without sequence or gather_output nothing is communicated.
 *
 *   x   [rows, inputs], the same on every rank; with sequence this rank's rows of it, which are gathered
 *   y   out: [rows, part]; with gather_output [rows, outputs], in the order of the whole layer
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_column_parallel_linear(const dtrain_parallel_linear *layer, const float *x,
                                                            float *y);

/* Computes the gradients of a layer split by outputs.
 *
 * The input's are summed while those of the weights are computed, and with sequence x is gathered while the input's
 * are. Under DTRAIN_PROGRESS_POLL the group is polled between slices of the weights' product.
 *
 *   x    as given to forward; may be NULL where d_weight is
 *   dy   of y's shape, with gather_output the same on every rank
 *   dx   out: of x's shape; NULL: not wanted, and then weight is not read. Schedules that separate the halves
 *        call it twice: with d_weight and d_bias NULL for the input's half, with dx NULL for that of the weights
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_column_parallel_linear_backward(const dtrain_parallel_linear *layer,
                                                                     const float *x, const float *dy, float *dx);

/* Computes y of a layer split by inputs: the ranks' products are summed, then the bias is added.
 *
 *   x   [rows, part], as a column layer gives them
 *   y   out: [rows, outputs] on every rank; with sequence this rank's rows of it
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_row_parallel_linear(const dtrain_parallel_linear *layer, const float *x, float *y);

/* Computes the gradients of a layer split by inputs; without sequence nothing is communicated, with it dy is gathered.
 *
 *   x    as given to forward; may be NULL where d_weight is
 *   dy   of y's shape; without sequence the same on every rank
 *   dx   as in dtrain_column_parallel_linear_backward
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_row_parallel_linear_backward(const dtrain_parallel_linear *layer, const float *x,
                                                                  const float *dy, float *dx);

/* One rank's part of an embedding. Zero what does not apply. */
typedef struct dtrain_parallel_vocab {
    dtrain_comm *group;  /* of the ranks that split the table; NULL: this rank has all of it */
    size_t rows;         /* tokens */
    size_t vocab, width; /* of the whole table */
    const float *table;  /* this rank's dtrain_shard of the vocabulary: [part, width] */
    float *d_table;      /* likewise, added to; NULL: not wanted */
    int sequence;        /* 1: the output, and its gradient, is this rank's dtrain_shard of the rows */
} dtrain_parallel_vocab;

/* Looks tokens up in a table whose rows are split; the bits are those of the table.
 *
 *   tokens   rows of them, the same on every rank, also with sequence; one outside 0 .. vocab - 1 is an error
 *   out      out: [rows, width] on every rank; with sequence this rank's rows of it
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_vocab_parallel_embedding(const dtrain_parallel_vocab *layer, const int32_t *tokens,
                                                              float *out);

/* Adds the output's gradient to the rows of the table, token after token; with sequence it is gathered first.
 *
 *   d_out   of out's shape
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_vocab_parallel_embedding_backward(const dtrain_parallel_vocab *layer,
                                                                       const int32_t *tokens, const float *d_out);

/* Computes softmax cross-entropy over logits of which each rank has its part of the vocabulary, and their gradient.
 * Three numbers a row are communicated: no rank ever holds a whole row.
 *
 *   logits    [rows, this rank's dtrain_shard of vocab]; overwritten by the gradient of the sum over rows, not divided
 *   targets   rows of them, the same on every rank; -1: the row is left out, its gradient is 0, and nothing in it
 *             counts; another outside 0 .. vocab - 1 is an error
 *   loss      out: the sum of -log p(target), the same bits on every rank and under any flags and instruction set.
 *             Large logits do not overflow; a NaN or a positive infinity makes it NaN; a target's negative infinity is
 *             an infinite loss
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms, twice */
DTRAIN_API_MUST dtrain_status dtrain_vocab_parallel_cross_entropy(dtrain_comm *group, float *logits,
                                                                  const int32_t *targets, size_t rows, size_t vocab,
                                                                  double *loss);

/* Attention of this rank's heads. */
typedef struct dtrain_attention {
    size_t batch, positions;
    size_t heads;    /* this rank's: its dtrain_shard of all; may be 0 */
    size_t channels; /* of one head */
    int causal;      /* 1: a position sees itself and those before it */
} dtrain_attention;

/* Computes softmax(q k^T / sqrt(channels)) v for each head and sequence. Communicates nothing.
 *
 *   qkv    [batch * positions, 3 * heads * channels]: queries, keys and values side by side, heads in each, as a column
 *          layer of 3 blocks gives them
 *   kept   out: batch * heads * positions * positions probabilities, for backward; [batch, heads, positions, positions]
 *   out    out: [batch * positions, heads * channels]
 *
 * any thread; buffers are apart */
DTRAIN_API_MUST dtrain_status dtrain_attention_forward(const dtrain_attention *attention, const float *qkv, float *kept,
                                                       float *out);

/* Computes the gradient of qkv.
 *
 *   kept    as forward left it; overwritten by the gradient of the scores
 *   d_out   of out's shape
 *   d_qkv   out: of qkv's shape
 *
 * any thread; buffers are apart */
DTRAIN_API_MUST dtrain_status dtrain_attention_backward(const dtrain_attention *attention, const float *qkv,
                                                        float *kept, const float *d_out, float *d_qkv);

/* Sums gradients of parameters that every rank holds, of which sequence parallelism gives each rank a part.
 *
 *   part   count elements; of this rank's rows
 *   out    count elements, to which the sum of part over all ranks is added
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_sequence_parallel_sum(dtrain_comm *group, const float *part, float *out,
                                                           size_t count);

#ifdef __cplusplus
}
#endif

#endif
