/* ---- >>module ----
 * A model as a list of layers, whose callbacks the library calls. For each layer it gathers the parameters, calls the
 * callback, and releases the parameters. Backward runs the other way and reduces the gradients of each unit as soon as
 * they are complete. The library also keeps the activations between layers, and what a layer saves for its backward,
 * for each micro-batch in flight. If your program has a training loop of its own, you need no module.
 *
 * Callbacks add to gradients and never divide: gradients are sums over the examples of a micro-batch. The step divides
 * once, by the weight of all ranks (dtrain_fsdp_begin). Without FSDP the sums stay in your table.
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

#define DTRAIN_EVALUATE (-1) /* in place of a micro-batch: a forward pass without a backward pass */

/* What a callback gets; valid until the callback returns. Tensors of the library are aligned to 64 bytes; tensors that
 * you pass in keep your alignment. */
typedef struct dtrain_layer_context {
    int layer;              /* index of the layer */
    int micro_batch;        /* the place that dtrain_fsdp_forward got, or DTRAIN_EVALUATE. A pipeline uses a place for
                             * several micro-batches in turn: there, batch tells them apart */
    void *batch;            /* as dtrain_fsdp_forward got it */
    float *const *params;   /* one address for each name of the layer; of a stacked parameter this layer's part. Read
                             * only */
    float *const *grads;    /* backward: add to these; NULL for a frozen parameter */
    dtrain_tensor input;    /* read only */
    dtrain_tensor output;   /* forward writes all of it; backward reads it */
    void *saved;            /* forward writes it, backward reads it; saved_bytes bytes, as shape said */
    dtrain_tensor d_output; /* backward: read only, shaped as output. If the last layer is the loss, its data is NULL */
    dtrain_tensor d_input;  /* backward: write all of it; shaped as input. If its data is NULL, it is not wanted */
} dtrain_layer_context;

/* Computes a layer, or its gradients. Any status but DTRAIN_OK fails the step: see dtrain_fsdp_forward. */
typedef dtrain_status (*dtrain_layer_fn)(void *user, const dtrain_layer_context *context);

/* Says what shape the output of a layer has for an input. Both tensors come without data.
 *
 *   input         dtype and shape of the input
 *   output        in: a copy of input; out: change dtype, ndim and shape where they differ. The library computes count
 *                 and bytes
 *   saved_bytes   in: 0; out: bytes that forward saves for backward */
typedef dtrain_status (*dtrain_layer_shape_fn)(void *user, const dtrain_tensor *input, dtrain_tensor *output,
                                               size_t *saved_bytes);

typedef struct dtrain_layer {
    const char *name;            /* for error texts */
    const char *const *params;   /* names of parameters in the table */
    size_t param_count;          /* 0: none, and unit is not read */
    int unit;                    /* unit of its parameters. A parameter of another unit must be tied, and an earlier
                                  * layer must have that unit */
    dtrain_layer_shape_fn shape; /* NULL: the output has the shape of the input, and nothing is saved */
    dtrain_layer_fn forward;
    dtrain_layer_fn backward;         /* gradient of the input, and of the parameters if backward_weights is NULL */
    dtrain_layer_fn backward_weights; /* gradients of the parameters alone, at some time after backward; may be NULL */
    void *user;                       /* passed to all four callbacks */
    int recompute; /* 1: saves memory. What forward saves is not kept: forward runs again just before backward, and
                    * before a separate backward_weights. It must compute the same each time; its output is not used */
} dtrain_layer;

typedef struct dtrain_module_desc {
    int micro_batches;           /* most in flight at once: forward done, backward not; 0: 1 */
    dtrain_allocator *allocator; /* of activations; must outlive the module; NULL: the C library */
} dtrain_module_desc;

typedef struct dtrain_module dtrain_module;

/* Makes a module from layers and a table of parameters.
 *
 *   layers   in the order of forward, units ascending; copied, names included
 *   table    the table that dtrain_fsdp_create gets; in a pipeline that of the rank's own layers. Copied, names
 *            included. Its data may be NULL if you use the module with FSDP
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID      no layers; a layer without name, forward or backward; a parameter that is not in
 *                                    the table, or that has another unit and is not tied; a bad table
 *            DTRAIN_ERR_UNSUPPORTED  a parameter that is not F32, or not in the CPU's memory
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

/* Runs all layers forward over one micro-batch.
 *
 * Each place below desc.micro_batches holds one micro-batch in flight. A forward in a place replaces the micro-batch
 * that is there. The module allocates memory if a micro-batch is larger than all before it in its place, and reuses it
 * otherwise. DTRAIN_EVALUATE has a place of its own, which keeps nothing for a backward pass.
 *
 * A callback may fail on one rank, or memory may run out there. What follows depends on the call:
 *
 *   with FSDP         this call and backward return DTRAIN_OK and go on gathering and reducing, without callbacks. The
 *                     output is zeros. The step ends with DTRAIN_ERR_ABORTED on every rank; the text names the rank,
 *                     the layer and its status
 *   without FSDP      the call returns the callback's status
 *   DTRAIN_EVALUATE   the call returns the callback's status, on this rank alone
 *
 *   fsdp          made from the module's table; NULL: parameters are in the table's memory
 *   micro_batch   a place below desc.micro_batches, or DTRAIN_EVALUATE
 *   input         copied, but not for DTRAIN_EVALUATE
 *   batch         passed to callbacks, in backward too: keep it until then; may be NULL
 *   output        out: a view of the last layer's output, valid until the next forward in this place. After some
 *                 failures there is none: then its dtype is 0 and its data NULL
 *   errors        DTRAIN_ERR_INVALID  no such place; no input or output; fsdp made from another table; a parameter
 *                                     without memory. Nothing is changed
 *                 those of dtrain_fsdp_gather, or of the callback
 *
 * collective: every rank, same order; blocks up to timeout_ms a unit */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_forward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                                  const dtrain_tensor *input, void *batch, dtrain_tensor *output);

/* Runs all layers backward over a micro-batch, and reduces the gradients of each unit once its first layer is done.
 *
 * If the table has units that no layer uses, call dtrain_fsdp_next after each micro-batch.
 *
 *   d_output   gradient of the output, with its dtype and shape; NULL: the last layer is the loss
 *   d_input    out: memory for the gradient of the input, with its dtype and shape; NULL: not wanted
 *   errors     DTRAIN_ERR_INVALID  no forward in this place; other shapes; more micro-batches than announced; finished
 *                                  gradients that no step has used yet. Without FSDP: a parameter that is not
 *                                  frozen has no grad. Nothing is changed
 *              those of dtrain_fsdp_reduce, or of the callback; a failing callback as in dtrain_fsdp_forward
 *
 * collective: every rank, same order; blocks up to timeout_ms a unit */
DTRAIN_API_MUST dtrain_status dtrain_fsdp_backward(dtrain_fsdp *fsdp, dtrain_module *module, int micro_batch,
                                                   const dtrain_tensor *d_output, const dtrain_tensor *d_input);

#ifdef __cplusplus
}
#endif

#endif
