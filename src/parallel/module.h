/* ---- >>module ----
 * A model as a list of layers with callbacks, for programs in which the library orders the work. The library gathers a
 * layer's parameters, calls it, and releases them; backward goes the other way and reduces gradients as each unit is
 * complete. It owns the activations between layers and what a layer saves for its backward, for each micro-batch that
 * is in flight. A program with a loop of its own needs none of this.
 *
 * Gradients are sums over a micro-batch's examples: callbacks add to them and never divide. The step divides once, by
 * the weight of all ranks (dtrain_fsdp_begin). Without FSDP they stay in the caller's table, as sums.
 *
 *     for (int i = 0; i < micro_batches; i++) {
 *         DTRAIN_CHECK(dtrain_fsdp_forward(fsdp, module, 0, &tokens, &targets, &loss));
 *         DTRAIN_CHECK(dtrain_fsdp_backward(fsdp, module, 0, NULL, NULL));
 *     }
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr)); */
#ifndef DTRAIN__MODULE_H
#define DTRAIN__MODULE_H
#include "../shard/fsdp.h"
#include "../tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DTRAIN_EVALUATE (-1) /* in place of a micro-batch: a forward pass that no backward follows */

/* What a callback computes from and into; good until it returns. Memory of tensors is aligned to 64 bytes, but for the
 * caller's own. */
typedef struct dtrain_layer_context {
    int layer;              /* its index */
    int micro_batch;        /* the place, as given to dtrain_fsdp_forward; DTRAIN_EVALUATE: no backward follows. In a
                             * pipeline micro-batches take turns in a place: batch says which it is */
    void *batch;            /* as given to dtrain_fsdp_forward */
    float *const *params;   /* an address for each name of the layer; of a stacked one, its own layer's. Read only */
    float *const *grads;    /* in backward: to add to; NULL where the parameter is frozen */
    dtrain_tensor input;    /* read only */
    dtrain_tensor output;   /* forward writes all of it; backward reads it */
    void *saved;            /* forward writes it, backward reads it; as many bytes as shape said */
    dtrain_tensor d_output; /* in backward: of output's shape, read only; data NULL for a last layer that is the loss */
    dtrain_tensor d_input;  /* in backward: of input's shape, to be written in full; data NULL: not wanted */
} dtrain_layer_context;

/* Computes a layer, or its gradients; any status but DTRAIN_OK fails the step (see dtrain_fsdp_forward). */
typedef dtrain_status (*dtrain_layer_fn)(void *user, const dtrain_layer_context *context);

/* Says what a layer makes of an input, by its dtype and shape alone: they have no data.
 *
 *   output        holds input's dtype, ndim and shape; change what differs. Its count and bytes are not read
 *   saved_bytes   holds 0 */
typedef dtrain_status (*dtrain_layer_shape_fn)(void *user, const dtrain_tensor *input, dtrain_tensor *output,
                                               size_t *saved_bytes);

typedef struct dtrain_layer {
    const char *name;            /* for texts */
    const char *const *params;   /* names of the table */
    size_t param_count;          /* 0: none, and unit is not read */
    int unit;                    /* of its parameters; others it may have are tied, and of an earlier layer's unit */
    dtrain_layer_shape_fn shape; /* NULL: output has input's shape, and nothing is saved */
    dtrain_layer_fn forward;
    dtrain_layer_fn backward;         /* gradients of the input, and of the parameters where backward_weights is NULL */
    dtrain_layer_fn backward_weights; /* gradients of the parameters alone, at some time after backward; may be NULL */
    void *user;                       /* handed to all four */
    int recompute; /* 1: what it saves is not kept; forward is called again, its output not used, just before backward,
                    * and before backward_weights where that comes apart. The same each time */
} dtrain_layer;

typedef struct dtrain_module_desc {
    int micro_batches;           /* in flight at once, forward done and backward not; 0: 1 */
    dtrain_allocator *allocator; /* of activations; must outlive the module; NULL: the C library */
} dtrain_module_desc;

typedef struct dtrain_module dtrain_module;

/* Makes a module of layers over the parameters of a table.
 *
 *   layers   in the order of forward; copied, names included. Their units do not descend
 *   table    the one that dtrain_fsdp_create takes, on a pipeline's rank that of its own layers; copied, names
 *            included. Parameters need memory only where the module is used without FSDP
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID      no layers; a layer without name, forward or backward, with a parameter that the
 *                                    table has not, or of another unit and not tied; a bad table
 *            DTRAIN_ERR_UNSUPPORTED  a parameter that is not F32
 *            DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_module_create(dtrain_module **module, const dtrain_layer *layers, size_t count,
                                                   const dtrain_param *table, size_t table_count,
                                                   const dtrain_module_desc *desc);

/* Frees a module and its activations; NULL is legal.
 *
 * one thread per object */
DTRAIN_API void dtrain_module_destroy(dtrain_module *module);

/* Runs all layers over one micro-batch.
 *
 * Memory is allocated when a micro-batch is larger than any before it in its place, and reused. A forward over one that
 * had no backward replaces it. DTRAIN_EVALUATE has a place of its own, keeps nothing, and disturbs none.
 *
 * When a callback fails on this rank, or there is no memory, the rank gives the step up: this call and backward return
 * DTRAIN_OK and go on gathering and reducing with the others, the output is zeros, and the step ends on every rank with
 * DTRAIN_ERR_ABORTED, this rank's number, the layer and its status. Without FSDP, and under DTRAIN_EVALUATE, the
 * callback's status is returned, on this rank alone.
 *
 *   fsdp          made from the module's table; NULL: parameters are in the table's memory
 *   micro_batch   a place below desc.micro_batches, or DTRAIN_EVALUATE
 *   input         copied, unless it is to evaluate
 *   batch         handed to callbacks, in backward too, until when it must stay; may be NULL
 *   output        out: of the last layer, a view that is good until the next forward in this place. Without dtype,
 *                 shape and data where a failure left none
 *   errors        DTRAIN_ERR_INVALID  no such place; no input or output; fsdp is of another table; a parameter without
 *                                     memory. Nothing is changed
 *                 those of dtrain_fsdp_gather, or of the callback
 *
 * collective: every rank, same order; blocks up to timeout_ms a unit */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_forward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                                  const dtrain_tensor *input, void *batch, dtrain_tensor *output);

/* Runs all layers backward over a micro-batch that was run forward, and reduces each unit's gradients after its first
 * layer. If a table has units that no layer uses, end the micro-batch with dtrain_fsdp_next, as in a loop of your own.
 *
 *   d_output   gradient of the output, of its dtype and shape; NULL: the last layer is the loss and begins by itself
 *   d_input    out: memory of the input's dtype and shape for its gradient; NULL: not wanted
 *   errors     DTRAIN_ERR_INVALID  no forward in this place; other shapes; more micro-batches than announced, or
 *                                  gradients that are finished and not used. Nothing is changed
 *              those of dtrain_fsdp_reduce, or of the callback; failures as in dtrain_fsdp_forward
 *
 * collective: every rank, same order; blocks up to timeout_ms a unit */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_backward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                                   const dtrain_tensor *d_output, const dtrain_tensor *d_input);

#ifdef __cplusplus
}
#endif

#endif
