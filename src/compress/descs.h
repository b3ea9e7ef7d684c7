/* ---- >>compress-descs ----
 * Descs and counters of compression, which other descs contain. With DTRAIN_NO_COMPRESS they stay, and a call that asks
 * for compression returns DTRAIN_ERR_UNSUPPORTED. */
#ifndef DTRAIN__DESCS_H
#define DTRAIN__DESCS_H
#include "../base/base.h"
#include "../tensor/tensor.h"
#include "../tensor/device.h"
#include "../comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How gradients are compressed before they are sent: see >>compress. */
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

/* A compressor for float32 vectors: a table of functions. dtrain_compressor_of and its like fill it, or you do. Each
 * function gets the table itself. No function may use global state: ranks can be threads of one process. */
typedef struct dtrain_compressor dtrain_compressor;
struct dtrain_compressor {
    const char *name;
    void *self;   /* yours */
    size_t block; /* of dtrain_compressor_of: elements that share a scale; of a cast its dtype */
    /* Returns the packed bytes of count elements. It depends on count alone. */
    size_t (*bytes)(const dtrain_compressor *compressor, size_t count);
    void (*pack)(const dtrain_compressor *compressor, const float *in, size_t count, void *out);
    /* Must accept any bytes: they come from another rank. */
    void (*unpack)(const dtrain_compressor *compressor, const void *in, float *out, size_t count);
    /* Set this instead of the three functions above for a compressor that does not pack. It adds in to residual, and
     * sums over all ranks of comm what each sends of that. The sum goes to out; what is not sent stays in residual.
     * out may be in. residual may be NULL: then it counts as zeros, and nothing is kept. The function adds the bytes
     * that this rank sent to *sent. Collective; the result has the same bits on every rank. */
    dtrain_status (*reduce)(const dtrain_compressor *compressor, dtrain_comm *comm, const float *in, float *residual,
                            float *out, size_t count, uint64_t *sent);
    void (*destroy)(void *self); /* called once, by the object that takes the compressor over; may be NULL */
};

/* A ratio for top-k that falls to its last value while training warms up. The ratio of each stage is factor times that
 * of the stage before. The defaults are those of Deep Gradient Compression: 0.25, 0.0625, 0.015625, ... */
typedef struct dtrain_topk_schedule {
    double ratio;         /* the last one */
    uint64_t stage_steps; /* steps a stage; 0: no warm-up */
    double first_ratio;   /* 0: 0.25 */
    double factor;        /* above 0, below 1; 0: 0.25 */
} dtrain_topk_schedule;

/* How the indices of selected elements are packed. */
typedef enum dtrain_index_form {
    DTRAIN_INDEX_AUTO = 0,  /* the shortest of the others */
    DTRAIN_INDEX_U32 = 701, /* 32 bits each */
    DTRAIN_INDEX_U16,       /* 16 bits each, for up to 65,536 elements */
    DTRAIN_INDEX_DELTA,     /* the number of elements skipped before each one, 7 bits a byte, the lowest first */
    DTRAIN_INDEX_NONE       /* no indices: every element of the vector is sent, 0 for those not selected */
} dtrain_index_form;

/* How ranks add up their selections. All forms give the same bits. */
typedef enum dtrain_sparse_exchange {
    DTRAIN_EXCHANGE_AUTO = 0,     /* GATHER for up to 8 ranks, SPLIT for more */
    DTRAIN_EXCHANGE_GATHER = 801, /* every rank gets every selection. If these are longer than two whole vectors
                                   * together, the whole vectors are all-reduced instead */
    DTRAIN_EXCHANGE_SPLIT         /* each rank adds up one part of the vector, then all ranks get all sums. Sums that
                                   * are shorter without indices travel without them */
} dtrain_sparse_exchange;

typedef struct dtrain_topk_desc {
    dtrain_topk_schedule schedule; /* its ratio is required */
    dtrain_dtype values;           /* as they are sent: DTRAIN_F32, DTRAIN_BF16 or DTRAIN_F16; 0: DTRAIN_F32 */
    dtrain_index_form indices;     /* AUTO, U32 or DELTA; 0: AUTO */
    dtrain_sparse_exchange exchange;
} dtrain_topk_desc;

/* The compressed all-reduce of one vector, step after step. It keeps what is not sent for the next step. */
typedef struct dtrain_compressed dtrain_compressed;

typedef struct dtrain_compressed_desc {
    int no_feedback;       /* 1: what is not sent is lost */
    float momentum;        /* top-k with feedback only: momentum of a velocity that is sent instead of the gradient. The
                            * optimizer then has no momentum of its own. 0: none */
    int no_masking;        /* 1: the velocity of elements that were sent goes on; 0: it starts again from 0 */
    uint64_t start_step;   /* first step that is compressed, counted from 0. Steps before it are all-reduced as float32,
                            * and leave no residual */
    dtrain_device *device; /* whose memory in, out and the state are; NULL: the CPU's. In a dtrain_compress_desc leave
                            * it NULL */
} dtrain_compressed_desc;

typedef struct dtrain_compressed_stats {
    uint64_t steps;
    uint64_t dense_bytes; /* that this rank would have sent without compression: 2 (ranks - 1) / ranks of each vector */
    uint64_t sent_bytes;  /* that this rank has sent */
} dtrain_compressed_stats;

#ifdef __cplusplus
}
#endif

#endif
