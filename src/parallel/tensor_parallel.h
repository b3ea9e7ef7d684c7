/* ---- >>tensor-parallel ----
 * Layers split inside. Each rank of a group holds a part of a layer's weights. It computes a part of the output, or one
 * term of the sum that is the output. Two layers in a row, the first split by outputs (column), the second by inputs
 * (row), need one all-reduce forward and one backward:
 *
 *     hidden    = gelu(dtrain_column_parallel_linear(x))     x: whole; hidden: this rank's channels
 *     y         = dtrain_row_parallel_linear(hidden)         y: whole, the same bits on every rank
 *
 * Attention is split by heads. A column layer of 3 blocks, with the channels of a head as its granule, computes
 * queries, keys and values. Then come dtrain_attention_forward, and a row layer of the same granule.
 *
 * Sequence parallelism also splits what lies between these layers (norms, dropout, residuals), by rows. Each all-reduce
 * becomes a reduce-scatter and an all-gather, which together send as many bytes. Parameters that are not split then get
 * partial gradients, which dtrain_sequence_parallel_sum adds up.
 *
 * What holds for every call here:
 *
 *   data       float32, row-major. Gradients of weights are added to, gradients of activations are overwritten
 *   sizes      need not divide among the ranks. A pointer to an empty part may be NULL. NULL for a gradient always
 *              means that no rank wants it
 *   buffers    the buffers of a call do not overlap
 *   ranks      every rank of the group makes the same calls with the same sizes and flags, and wants the same
 *              gradients. Inputs that are whole are the same on every rank
 *   order      sums over ranks have the order of >>order
 *   memory     temporary memory comes from the group's allocator
 *   group      NULL or of one rank: nothing is communicated
 *   errors     DTRAIN_ERR_INVALID   wrong arguments, or a call between dtrain_fuse_begin and dtrain_fuse_end. Nothing
 *                                   has been communicated
 *              DTRAIN_ERR_MEMORY    no memory on this rank. The others wait for it until their deadline, or until it
 *                                   leaves the group
 *              DTRAIN_ERR_MISMATCH  ranks gave different sizes, and so communicate different numbers of elements
 *              others as dtrain_all_reduce
 *   source     Shoeybi and others, Megatron-LM, arXiv:1909.08053, 2019.
 *              Sequence parallelism: Korthikanti and others, Reducing activation recomputation in large transformer
 *              models, MLSys 2023 */
#ifndef DTRAIN__TENSOR_PARALLEL_H
#define DTRAIN__TENSOR_PARALLEL_H
#include "../comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One rank's part of a linear layer: y[rows, outputs] = x[rows, inputs] W^T + bias. Leave at 0 what does not apply.
 *
 * A column layer is split by outputs, a row layer by inputs. `part` is this rank's share of that dimension, as
 * dtrain_param_cut gives it. With one block and a granule of 1 it is a dtrain_shard of the dimension. */
typedef struct dtrain_parallel_linear {
    dtrain_comm *group;     /* the ranks that split the layer; NULL: this rank has all of it */
    size_t rows;            /* of x and y in whole: tokens */
    size_t inputs, outputs; /* of the whole layer */
    size_t blocks;          /* equal blocks in the split dimension, each cut alike (3: query, key, value); 0: 1 */
    size_t granule;         /* blocks are cut at multiples of this (channels of a head); 0: 1 */
    const float *weight;    /* column: [part, inputs]; row: [outputs, part] */
    const float *bias; /* column: [part]; row: [outputs], the same on every rank, added once, after the sum; or NULL */
    float *d_weight;   /* shaped as weight, added to; NULL: not wanted */
    float *d_bias;     /* shaped as bias, added to; of a row layer the same on every rank; NULL: not wanted */
    int by_inputs;     /* 1: weight is transposed, [inputs, outputs] before the cut, as in x W */
    int gather_output; /* 1, column only: y, and dy, is [rows, outputs] on every rank */
    int sequence;      /* 1: x of a column layer, y of a row layer is this rank's dtrain_shard of the rows */
    int no_overlap;    /* 1: does not communicate and compute at the same time; the same bits */
} dtrain_parallel_linear;

/* Computes y of a column layer, which is split by outputs.
 *
 * It communicates only with sequence or gather_output.
 *
 *   x   [rows, inputs], the same on every rank; with sequence this rank's rows, which the call gathers
 *   y   out: [rows, part]; with gather_output [rows, outputs], in the order of the whole layer
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_column_parallel_linear(const dtrain_parallel_linear *layer, const float *x,
                                                            float *y);

/* Computes the gradients of a column layer, which is split by outputs.
 *
 * The sum of dx over ranks runs while the gradients of the weights are computed. With sequence, x is gathered while dx
 * is computed. Under DTRAIN_PROGRESS_POLL the call polls the group between slices of the weights' product.
 *
 *   x    as forward got it; may be NULL if d_weight is
 *   dy   shaped as y; with gather_output the same on every rank
 *   dx   out: shaped as x; NULL: not wanted, and weight is not read. To compute the two halves apart, call twice: first
 *        with d_weight and d_bias NULL, then with dx NULL
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_column_parallel_linear_backward(const dtrain_parallel_linear *layer,
                                                                     const float *x, const float *dy, float *dx);

/* Computes y of a row layer, which is split by inputs: sums the ranks' products, then adds the bias.
 *
 *   x   [rows, part], as a column layer gives it
 *   y   out: [rows, outputs] on every rank; with sequence this rank's rows
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_row_parallel_linear(const dtrain_parallel_linear *layer, const float *x, float *y);

/* Computes the gradients of a row layer, which is split by inputs.
 *
 * It communicates only with sequence: then it gathers dy.
 *
 *   x    as forward got it; may be NULL if d_weight is
 *   dy   shaped as y; without sequence the same on every rank
 *   dx   as in dtrain_column_parallel_linear_backward
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_row_parallel_linear_backward(const dtrain_parallel_linear *layer, const float *x,
                                                                  const float *dy, float *dx);

/* One rank's part of an embedding, split by the vocabulary. Leave at 0 what does not apply. */
typedef struct dtrain_parallel_vocab {
    dtrain_comm *group;  /* the ranks that split the table; NULL: this rank has all of it */
    size_t rows;         /* tokens */
    size_t vocab, width; /* of the whole table */
    const float *table;  /* this rank's dtrain_shard of the vocabulary: [part, width] */
    float *d_table;      /* shaped as table, added to; NULL: not wanted */
    int sequence;        /* 1: the output and its gradient are this rank's dtrain_shard of the rows */
} dtrain_parallel_vocab;

/* Looks tokens up in a table whose rows are split over ranks. The output has the bits of the table.
 *
 *   tokens   [rows], the same on every rank, also with sequence; a token outside 0 to vocab - 1 is DTRAIN_ERR_INVALID
 *   out      out: [rows, width] on every rank; with sequence this rank's rows
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_vocab_parallel_embedding(const dtrain_parallel_vocab *layer, const int32_t *tokens,
                                                              float *out);

/* Adds the gradient of the output to d_table, token after token. With sequence it gathers d_out first.
 *
 *   tokens   as forward got them
 *   d_out    shaped as out
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_vocab_parallel_embedding_backward(const dtrain_parallel_vocab *layer,
                                                                       const int32_t *tokens, const float *d_out);

/* Computes softmax cross-entropy and its gradient over logits that are split by the vocabulary.
 *
 * Ranks exchange three numbers a row: no rank ever holds a whole row.
 *
 *   logits    [rows, this rank's dtrain_shard of vocab]. Out: the gradient of the sum over rows, not divided
 *   targets   [rows], the same on every rank. -1 leaves a row out: its loss and gradient are 0, whatever its logits.
 *             Another target outside 0 to vocab - 1 is DTRAIN_ERR_INVALID
 *   loss      out: the sum of -log p(target), the same bits on every rank and under any flags and instruction set.
 *             Large logits do not overflow. A NaN or a positive infinity makes it NaN; a negative infinity as the
 *             target's logit makes it infinite
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms, twice */
DTRAIN_API_MUST dtrain_status dtrain_vocab_parallel_cross_entropy(dtrain_comm *group, float *logits,
                                                                  const int32_t *targets, size_t rows, size_t vocab,
                                                                  double *loss);

/* Sizes of the attention of this rank's heads. */
typedef struct dtrain_attention {
    size_t batch, positions;
    size_t heads;    /* of this rank: its dtrain_shard of all heads; may be 0 */
    size_t channels; /* of one head */
    int causal;      /* 1: a position sees itself and those before it */
} dtrain_attention;

/* Computes softmax(q k^T / sqrt(channels)) v for each head of each sequence. It communicates nothing.
 *
 *   qkv    [batch * positions, 3 * heads * channels], as a column layer of 3 blocks gives it: queries of all heads,
 * then keys, then values kept   out: [batch, heads, positions, positions]: the probabilities, for backward out    out:
 * [batch * positions, heads * channels]
 *
 * any thread; buffers are apart */
DTRAIN_API_MUST dtrain_status dtrain_attention_forward(const dtrain_attention *attention, const float *qkv, float *kept,
                                                       float *out);

/* Computes the gradient of qkv.
 *
 *   qkv     as forward got it
 *   kept    as forward left it; the call overwrites it with the gradient of the scores
 *   d_out   shaped as out
 *   d_qkv   out: shaped as qkv
 *
 * any thread; buffers are apart */
DTRAIN_API_MUST dtrain_status dtrain_attention_backward(const dtrain_attention *attention, const float *qkv,
                                                        float *kept, const float *d_out, float *d_qkv);

/* Adds up the partial gradients of a parameter that every rank holds in whole, under sequence parallelism.
 *
 *   part   count elements: the gradient from this rank's rows
 *   out    count elements: the call adds the sum of part over all ranks to them
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_sequence_parallel_sum(dtrain_comm *group, const float *part, float *out,
                                                           size_t count);

#ifdef __cplusplus
}
#endif

#endif
