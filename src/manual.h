/* dtrain.h - distributed training in one C header. Public domain or MIT, at your choice: see LICENSE.
 *
 * A C program that already trains something copies this file, writes
 *
 *     #define DTRAIN_IMPLEMENTATION
 *     #include "dtrain.h"          (first, before any system header)
 *
 * in one source file, includes it without the define in others, links -lpthread -lm, and trains data-parallel, sharded
 * or split over ranks, on threads, on processes, or on many hosts.
 *
 * CONTENTS (search for the mark)
 *     >>base         status codes, errors, log, allocator, random numbers, SHA-256
 *     >>tensor       element types, conversions, tensors, the matrix product
 *     >>device       memory and arithmetic of GPUs: queues, copies, events, and a table to fill for a device of your own
 *     >>transport    the table to fill for a transport of your own
 *     >>comm         groups of threads and processes, the environment, collectives, asynchronous and fused work, groups
 *                    of groups, survivors, the store
 *     >>order        the order in which a reduction adds
 *     >>device-group collectives on memory of devices: staged through the CPU's, or on each other's by events
 *                    or by flags
 *     >>compress     top-k, quantisers, PowerSGD, error feedback, and all-reduces over them
 *     >>train        parameter table, sampler, optimizers, schedules, DDP
 *     >>server       the parameter server: in step with all workers, or asynchronous with bounded staleness
 *     >>local-sgd    local SGD and DiLoCo: many steps alone, then a round with whoever is there
 *     >>fsdp         parameters, gradients and optimizer state sharded over ranks; hybrid sharding
 *     >>module       a model as a list of layers that the library gathers, calls and reduces
 *     >>pipeline     layers cut into stages, schedules of micro-batches: planned, checked, drawn, run over modules
 *     >>tensor-parallel  layers split inside: linear layers, embedding, cross-entropy, attention, over a group's ranks
 *     >>safetensors  files of named tensors that Python reads; Hugging Face models; a table of parameters as a file
 *     >>checkpoint   the state of a run on disk, for any number of ranks to go on from
 *
 * DATA-PARALLEL IN AN EXISTING TRAINER
 *
 *     dtrain_comm *world;
 *     DTRAIN_CHECK(dtrain_comm_create(&world, NULL));
 *     DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0));
 *     ...
 *     DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN));
 *     ...
 *     dtrain_comm_destroy(world);
 *
 * The same as n threads: put it into a function dtrain_status train(dtrain_comm *world, void *user) and call
 * dtrain_run_threads(n, train, user, NULL); or get n connected ends from dtrain_threads_create.
 *
 * PROCESSES AND HOSTS: the first snippet again, under a launcher whose variables dtrain_comm_create knows (see
 * dtrain_comm_desc), or with rank, world_size and root in the desc:
 *
 *     dtrain_comm_desc desc = {0};
 *     desc.rank = 1, desc.world_size = 4, desc.root = "10.0.0.1:29500", desc.token = secret;
 *     DTRAIN_CHECK(dtrain_comm_create(&world, &desc));
 *
 * OPTIMIZER STATE SHARDED: reduce_scatter gradients, update my slice (dtrain_shard), all_gather parameters.
 *
 * FULLY SHARDED: declare parameters once, in a table of dtrain_param; their memory is there only while a layer runs.
 *
 *     DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, world, table, count, &desc));
 *     float *qkvw = dtrain_fsdp_param(fsdp, "qkvw");
 *     ...                                              forward, layer after layer
 *     DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, layer));   also starts the next one
 *     DTRAIN_CHECK(dtrain_fsdp_release(fsdp, layer));
 *     ...                                              backward: gather, compute, dtrain_fsdp_reduce(fsdp, layer)
 *     DTRAIN_CHECK(dtrain_fsdp_clip_grad_norm(fsdp, 1.0f, &norm));
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *
 * ON GPUS: dtrain_cuda.h makes a dtrain_device of a GPU's stream. The same calls of DDP, FSDP, optimizers and
 * checkpoints train there the parameters whose table says so; collectives of your own are those of a group of devices.
 *
 *     table[i].device = gpu;
 *     float *w = dtrain_fsdp_unit_param(fsdp, "qkvw", layer);          memory of the GPU, at addresses that stay
 *     DTRAIN_CHECK(dtrain_device_group_create(&group, world, gpu, NULL));
 *
 * IN PARTS: dtrain_mesh lays ranks out as replicas, stages and parts of layers. The table says which part of a tensor
 * this rank has (dtrain_param_cut, dtrain_param_layers), FSDP goes over the replicas, a dtrain_pipeline runs a
 * dtrain_module of each stage, whose callbacks call the layers of >>tensor-parallel.
 *
 *     DTRAIN_CHECK(dtrain_pipeline_step(pipeline, inputs, batches));
 *     DTRAIN_CHECK(dtrain_fsdp_clip_model_grad_norm(&fsdp, 1, model, 1.0f, &norm));
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *
 * CHECKPOINTS: each rank saves what it holds; any number of ranks, under any strategy, goes on from there.
 *
 *     DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &desc));      desc.directory = "run"
 *     state.fsdp = fsdp;                                                or table and optimizer, or pieces of your own
 *     DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, NULL));   state.step says where to go on
 *     ...
 *     DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));               or dtrain_checkpoint_save_async
 *
 * CONVENTIONS
 *     Status    Every fallible call returns dtrain_status, 0 for success. dtrain_last_error() is the calling thread's
 *               text: what was expected, what came, which rank, which operation and its number. The library never
 *               exits, aborts or raises a signal. DTRAIN_CHECK prints and exits, in your code only.
 *     Desc      Create calls take a desc struct: zero it, set what differs; zero means the default.
 *     Counts    Elements, and always the total, whatever the number of ranks divides; shards differ by at most one
 *               element, earlier ranks longer. In place means that a rank's part stays at its offset.
 *     Order     A reduction adds by one tree over ranks, the same bits on every rank, transport and algorithm, unless
 *               the desc says DTRAIN_ORDER_ANY or names an algorithm with an order of its own (dtrain_algorithm).
 *     Bits      Kernels, conversions, folds and optimizers give the same bits under any compiler flags and
 *               instruction set; matrix products those of the instruction set, which the environment variable
 *               DTRAIN_ISA (scalar, sse2, avx2, avx512) can narrow.
 *     Threads   One line on each function: any thread; one thread per object; collective. Library threads block all
 *               signals.
 *     Memory    From the desc's allocator, which counts bytes and their peak. A warm training loop allocates nothing.
 *     Groups    dtrain_comm_split, _duplicate, _subgroup and dtrain_mesh_create make groups of a group's ranks. Several
 *               may be used at once, from several threads; what breaks one leaves the others as they are, but for the
 *               loss of a rank of a mesh, which ends all groups of it.
 *     Time      Every blocking call has a deadline, 60 seconds unless the desc says otherwise. A call that expires
 *               before anything moved can be made again; after that the group is broken and says why.
 *
 *     Failure   A rank that dies, leaves or is silent for heartbeat_ms ends every later operation of its groups on
 *               every rank, with its number and the first cause; dtrain_comm_abort does so by hand. Rank 0, or the
 *               lowest that is left, tells the others. The survivors may go on: dtrain_comm_shrink makes a group of
 *               them, dtrain_resync brings all to the state of the furthest.
 *     Diagnosis Each rank keeps its last 256 operations (dtrain_comm_trace; DTRAIN_TRACE=PREFIX in the environment
 *               writes PREFIX.rank-N.json on failure), and heartbeats carry the last one: the text of a deadline says
 *               what the awaited rank does, and whom it awaits in turn.
 *     Strangers Connections are admitted by a mutual HMAC-SHA256 challenge over the group's token; without a token only
 *               this host is spoken to. Traffic is neither encrypted nor signed.
 *
 * MACROS, before the implementation
 *     DTRAIN_API static                  nothing of dtrain is visible outside the file
 *     DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align)   another allocator behind everything
 *     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)   your BLAS
 */
