/* ---- >>compress-descs ----
 * What compression is asked for and what it says it has sent: fields of other descs, too. A program that defines
 * DTRAIN_NO_COMPRESS has them as well, and calls that are given one return DTRAIN_ERR_UNSUPPORTED. */
#ifndef DTRAIN__DESCS_H
#define DTRAIN__DESCS_H
#include "../base/base.h"
#include "../tensor/tensor.h"
#include "../tensor/device.h"
#include "../comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What gradients become before they travel. */
typedef enum dtrain_compression {
    DTRAIN_COMPRESS_DEFAULT = 0, /* top-k */
    DTRAIN_COMPRESS_TOPK = 901,
    DTRAIN_COMPRESS_BF16,
    DTRAIN_COMPRESS_F16,
    DTRAIN_COMPRESS_INT8,
    DTRAIN_COMPRESS_FP8,
    DTRAIN_COMPRESS_SIGN,
    DTRAIN_COMPRESS_POWERSGD,
    DTRAIN_COMPRESS_OWN
} dtrain_compression;

/* A way to pack float32 vectors: a table of functions, to be filled by you or by those below. Each function gets the
 * table itself, and sets no global state: ranks are threads, too. */
typedef struct dtrain_compressor dtrain_compressor;
struct dtrain_compressor {
    const char *name;
    void *self;   /* yours */
    size_t block; /* of the compressors below: elements that share a scale, or the dtype of a cast */
    /* How many bytes count elements are packed into. It depends on count alone. */
    size_t (*bytes)(const dtrain_compressor *compressor, size_t count);
    void (*pack)(const dtrain_compressor *compressor, const float *in, size_t count, void *out);
    /* Any bytes must do: they come from another rank. */
    void (*unpack)(const dtrain_compressor *compressor, const void *in, float *out, size_t count);
    /* Instead of the three above, for what is no packing: adds in to residual (NULL: counts as zero, nothing is kept),
     * sums what it sends of that over all ranks of comm into out, which may be in, and leaves the rest in residual.
     * Adds the bytes that this rank sent to *sent. Collective; the same bits on every rank. */
    dtrain_status (*reduce)(const dtrain_compressor *compressor, dtrain_comm *comm, const float *in, float *residual,
                            float *out, size_t count, uint64_t *sent);
    void (*destroy)(void *self); /* may be NULL; called once, by what takes the compressor over */
};

/* A ratio that falls to its last value while training warms up: first, then each stage's factor times the one before.
 * The defaults are those of Deep Gradient Compression: 0.25, 0.0625, 0.015625, ... */
typedef struct dtrain_topk_schedule {
    double ratio;         /* the last */
    uint64_t stage_steps; /* steps of a stage; 0: no warm-up */
    double first_ratio;   /* 0: 0.25 */
    double factor;        /* above 0, below 1; 0: 0.25 */
} dtrain_topk_schedule;

/* How indices are packed. */
typedef enum dtrain_index_form {
    DTRAIN_INDEX_AUTO = 0,  /* whichever is shortest */
    DTRAIN_INDEX_U32 = 701, /* as they are */
    DTRAIN_INDEX_U16,       /* as they are, for up to 65,536 elements */
    DTRAIN_INDEX_DELTA,     /* how many elements were left out before each, 7 bits a byte, the lowest first */
    DTRAIN_INDEX_NONE       /* every element of the vector is there, zeros where sparse has none */
} dtrain_index_form;

/* How ranks add up what each has selected. The result is the same bits for all but SPLIT_TOPK. */
typedef enum dtrain_sparse_exchange {
    DTRAIN_EXCHANGE_AUTO = 0,     /* GATHER for up to 8 ranks, SPLIT for more */
    DTRAIN_EXCHANGE_GATHER = 801, /* every rank gets every selection; where those are longer than the whole vectors,
                                   * these are all-reduced instead */
    DTRAIN_EXCHANGE_SPLIT,        /* each rank adds up one part of the vector, then all get all sums; a part whose sums
                                   * are shorter without indices travels as it is */
    DTRAIN_EXCHANGE_SPLIT_TOPK    /* as SPLIT, but of its part's sums each rank passes on only the ratio's share, the
                                   * largest, and keeps the others in its residual */
} dtrain_sparse_exchange;

typedef struct dtrain_topk_desc {
    dtrain_topk_schedule schedule; /* its ratio is needed, unless threshold is */
    float threshold;               /* above 0: selects by magnitude, not by ratio */
    dtrain_dtype values;           /* on the wire; 0: DTRAIN_F32; DTRAIN_BF16, DTRAIN_F16 */
    dtrain_index_form indices;     /* 0: the shortest */
    dtrain_sparse_exchange exchange;
} dtrain_topk_desc;

/* The all-reduce of one vector, step after step, through a compressor, with what was not sent kept for the next. */
typedef struct dtrain_compressed dtrain_compressed;

typedef struct dtrain_compressed_desc {
    int no_feedback; /* 1: what is not sent is lost */
    float momentum;  /* top-k alone: of the velocity that is sent in the gradient's stead; the optimizer then has none.
                      * 0: none */
    int no_masking;  /* 1: the velocity of what was sent goes on; 0: it starts anew */
    float max_norm;  /* of this rank's vector, times the root of the number of ranks, at most; 0: any */
    uint64_t start_step; /* of the first step that is compressed, counted from 0. Those before it are all-reduced as
                          * they are, and leave no residual */
    dtrain_device *device; /* where in, out and the state are; in a dtrain_compress_desc it is NULL. NULL: the CPU */
} dtrain_compressed_desc;

typedef struct dtrain_compressed_stats {
    uint64_t steps;
    uint64_t dense_bytes; /* that this rank would have sent without the compressor: 2 (ranks - 1) / ranks a vector */
    uint64_t sent_bytes;  /* that this rank has sent */
} dtrain_compressed_stats;

#ifdef __cplusplus
}
#endif

#endif
