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
 *     >>pieces       lists of what objects keep, for checkpoints and file formats of your own
 *     >>transport    the table to fill for a transport of your own
 *     >>comm         groups of threads and processes, the environment, collectives, asynchronous and fused work, groups
 *                    of groups, survivors, the store
 *     >>order        the order in which a reduction adds
 *     >>device-group collectives on memory of devices: staged through the CPU's, or on each other's by events
 *                    or by flags
 *     >>compress     top-k, quantisers, PowerSGD, error feedback, and all-reduces over them
 *     >>train        parameter table, sampler, optimizers, schedules
 *     >>server       the parameter server: in step with all workers, or asynchronous with bounded staleness
 *     >>local-sgd    local SGD and DiLoCo: many steps alone, then a round with whoever is there
 *     >>fsdp         parameters, gradients and optimizer state sharded over ranks; hybrid sharding
 *     >>data-parallel  every rank holds all parameters, and the program its own optimizer (DDP)
 *     >>module       a model as a list of layers that the library gathers, calls and reduces
 *     >>pipeline     layers cut into stages, schedules of micro-batches: planned, checked, run over modules
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
 * REDUCED DURING BACKWARD: declare parameters once, in a table of dtrain_param with a unit for each layer; a unit's
 * gradients travel while the backward pass goes on. A dtrain_sampler deals the examples.
 *
 *     DTRAIN_CHECK(dtrain_sampler_init(&sampler, &data));
 *     DTRAIN_CHECK(dtrain_optimizer_create(&optimizer, table, 2, &sgd, NULL));
 *     DTRAIN_CHECK(dtrain_ddp_create(&ddp, world, table, 2, NULL));
 *     for (uint64_t step = 0; step < epochs * dtrain_sampler_steps(&sampler); step++) {
 *         int mine = dtrain_sampler_share(&sampler, step, rank, ranks, &first);
 *         DTRAIN_CHECK(dtrain_ddp_begin(ddp, mine, 4.0 * mine));
 *         for (int micro = first; micro < first + mine; micro++) {
 *             size_t n = dtrain_sampler_batch(&sampler, step, micro, examples);
 *             ...                                      backward, from the last unit to the first, adds gradients up
 *             DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 1));
 *             DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 0));
 *             DTRAIN_CHECK(dtrain_ddp_next(ddp));      of use where some units had no gradient
 *         }
 *         DTRAIN_CHECK(dtrain_ddp_finish(ddp, &total));
 *         DTRAIN_CHECK(dtrain_clip_grad_norm(table, 2, 1.0f, &norm));
 *         DTRAIN_CHECK(dtrain_optimizer_step(optimizer, 0.2f));
 *     }
 *     dtrain_ddp_destroy(ddp);
 *
 * PROCESSES AND HOSTS: the first snippet again, under a launcher whose variables dtrain_comm_create knows (see
 * dtrain_comm_desc), or with rank, world_size and root in the desc:
 *
 *     dtrain_comm_desc desc = {0};
 *     desc.rank = 1, desc.world_size = 4, desc.root = "10.0.0.1:29500", desc.token = secret;
 *     DTRAIN_CHECK(dtrain_comm_create(&world, &desc));
 *
 * OTHER DATA THAN GRADIENTS: parts are those of dtrain_shard, or of the lengths that a program gives, as where each
 * token goes to the expert that it chose.
 *
 *     DTRAIN_CHECK(dtrain_gather(world, &one, all, (size_t)ranks, DTRAIN_I32, 0));
 *     DTRAIN_CHECK(dtrain_scatter(world, all, &back, (size_t)ranks, DTRAIN_I32, 0));
 *     DTRAIN_CHECK(dtrain_gather_v(world, mine, parts, counts, offsets, DTRAIN_F32, 0));
 *     DTRAIN_CHECK(dtrain_scatter_v(world, parts, mine, counts, offsets, DTRAIN_F32, 0));
 *     DTRAIN_CHECK(dtrain_all_gather_v(world, mine, parts, counts, offsets, DTRAIN_F32));
 *     DTRAIN_CHECK(dtrain_reduce_scatter_v(world, parts, sums, counts, offsets, DTRAIN_F32, DTRAIN_SUM));
 *     DTRAIN_CHECK(dtrain_all_to_all(world, goes, comes, (size_t)ranks, DTRAIN_U64));
 *     DTRAIN_CHECK(dtrain_all_to_all_v(world, tokens, goes, NULL, taken, comes, NULL, DTRAIN_F32));
 *
 * A few bytes under a name, from any rank to any:
 *
 *     DTRAIN_CHECK(dtrain_store_set(world, "address", "10.0.0.1:80", 12));
 *     DTRAIN_CHECK(dtrain_store_wait(world, "address", address, sizeof address, &bytes));
 *     DTRAIN_CHECK(dtrain_store_get(world, "nobody's", address, 0, &absent));      does not wait
 *
 * BESIDE THE COMPUTATION: start a call, compute, and wait for it.
 *
 *     DTRAIN_CHECK(dtrain_reduce_scatter_async(world, grads, grads + lo, count, DTRAIN_F32, DTRAIN_MEAN, &work));
 *     ...
 *     DTRAIN_CHECK(dtrain_work_wait(work));
 *     DTRAIN_CHECK(dtrain_all_gather_async(world, params + lo, params, count, DTRAIN_F32, &work));
 *     DTRAIN_CHECK(dtrain_broadcast_async(world, params, count, DTRAIN_F32, 0, &work));
 *     DTRAIN_CHECK(dtrain_recv_async(world, &before, 1, DTRAIN_I32, (rank + ranks - 1) % ranks, &came));
 *     DTRAIN_CHECK(dtrain_send_async(world, &one, 1, DTRAIN_I32, (rank + 1) % ranks, &sent));
 *
 * A FRAME LOOP THAT NEVER BLOCKS, and starts no thread: desc.progress = DTRAIN_PROGRESS_POLL.
 *
 *     DTRAIN_CHECK(dtrain_comm_create_async(&world, &desc));
 *     ...                                              each frame, until ready is 1
 *     DTRAIN_CHECK(dtrain_comm_poll(world, 300));
 *     DTRAIN_CHECK(dtrain_comm_ready(world, &ready));
 *     ...                                              then, with gradients in each frame that finds them done
 *     DTRAIN_CHECK(dtrain_all_reduce_async(world, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN, &work));
 *     ...                                              each frame, until the work is done
 *     DTRAIN_CHECK(dtrain_comm_poll(world, 300));
 *     if (dtrain_work_done(work)) status = dtrain_work_wait(work);
 *     ...                                              each frame after DTRAIN_ERR_PEER_LOST, until there is a group
 *     DTRAIN_CHECK(dtrain_comm_shrink_poll(world, 300, &group));
 *
 * GOING ON WITHOUT A LOST RANK: the survivors make a group, and take the state of the furthest.
 *
 *     DTRAIN_CHECK(dtrain_comm_shrink(world, &group));
 *     DTRAIN_CHECK(dtrain_resync(group, step, buffers, bytes, 1, &step));
 *
 * OPTIMIZER STATE SHARDED (ZeRO-1): the loop over parameters becomes a loop over my slice.
 *
 *     size_t lo, n = dtrain_shard(world, count, rank, &lo);
 *     DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0));
 *     float *m = (float *)calloc(n + 1, sizeof *m), *v = (float *)calloc(n + 1, sizeof *v);
 *     ...
 *     DTRAIN_CHECK(dtrain_reduce_scatter(world, grads, grads + lo, count, DTRAIN_F32, DTRAIN_MEAN));
 *     for (size_t i = 0; i < n; i++)
 *         update(params + lo + i, grads + lo + i, m + i, v + i);
 *     DTRAIN_CHECK(dtrain_all_gather(world, params + lo, params, count, DTRAIN_F32));
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
 * Several micro-batches a step, of which some leave units out; a scaled loss (desc.loss_scale); a step that is not
 * applied; and an evaluation by code that gathers nothing:
 *
 *     DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, 2, tokens));
 *     float scale = dtrain_fsdp_loss_scale(fsdp);
 *     ...                                              forward and backward with scale * loss
 *     DTRAIN_CHECK(dtrain_fsdp_next(fsdp));
 *     ...                                              forward and backward again
 *     DTRAIN_CHECK(loss < limit ? dtrain_fsdp_step(fsdp, lr) : dtrain_fsdp_drop(fsdp));
 *     DTRAIN_CHECK(dtrain_fsdp_unshard(fsdp));
 *
 * FULLY SHARDED, ON ARRAYS THAT A TRAINER HAS: pointers into one block, an array of a layer's weights holding all L
 * layers. The library takes the values over, you point at its memory. Arrays 1 and 2 belong to layers, units 1 to L; the
 * others are used at both ends of the model: unit 0, tied.
 *
 *     dtrain_fsdp *fsdp;
 *     dtrain_fsdp_desc desc;
 *     dtrain_param table[ARRAYS];
 *     memset(&desc, 0, sizeof desc), memset(table, 0, sizeof table);
 *     for (int i = 0; i < ARRAYS; i++) {
 *         int layers = i == 1 || i == 2;
 *         table[i].name = names[i], table[i].dtype = DTRAIN_F32, table[i].data = params[i];
 *         table[i].shape[0] = layers ? (size_t)L : sizes[i], table[i].shape[1] = layers ? sizes[i] / L : 0;
 *         table[i].stacked = table[i].unit = layers, table[i].tied = !layers;
 *     }
 *     desc.optimizer.kind = DTRAIN_ADAMW;
 *     DTRAIN_CHECK(dtrain_fsdp_adopt(&fsdp, world, table, ARRAYS, &desc));
 *     for (int i = 0; i < ARRAYS; i++)
 *         params[i] = (float *)table[i].data, grads[i] = (float *)table[i].grad;
 *     free(block);
 *     ...                                                        forward: at the top of the embedding, of each layer,
 *     DTRAIN_CHECK(dtrain_fsdp_forward_to(fsdp, 0));             and of the output layer, which uses unit 0 again
 *     DTRAIN_CHECK(dtrain_fsdp_forward_to(fsdp, 1 + l));
 *     DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
 *     ...                                                        backward: at the top of each layer, and below them
 *     DTRAIN_CHECK(dtrain_fsdp_backward_to(fsdp, 1 + l));
 *     DTRAIN_CHECK(dtrain_fsdp_backward_to(fsdp, 0));
 *     ...
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));                  instead of the trainer's own update
 *     ...
 *     dtrain_fsdp_destroy(fsdp);
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
 *     lists[0] = dtrain_fsdp_pieces(fsdp);                              and lists of all else that has state: see >>pieces
 *     lists[1] = dtrain_sampler_pieces(&sampler);                       state.lists = lists, state.list_count = 2
 *     DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, NULL));   state.step says where to go on
 *     ...
 *     DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));               or dtrain_checkpoint_save_async
 *
 * CONVENTIONS
 *     Status    Every fallible call returns dtrain_status, 0 for success. dtrain_last_error() is the calling thread's
 *               text: what was expected, what came, which rank, which operation and its number. The library never
 *               exits, aborts or raises a signal. DTRAIN_CHECK prints and exits, in your code only.
 *               Compilers warn of a result that nobody reads; DTRAIN_IGNORE(call) leaves it on purpose.
 *     Desc      Create calls take a desc struct: zero it, set what differs; zero means the default.
 *     Counts    Elements, and always the total, whatever the number of ranks divides; shards differ by at most one
 *               element, earlier ranks longer. In place means that a rank's part stays at its offset.
 *     Order     A reduction adds by one tree over ranks, the same bits on every rank, transport and algorithm, unless
 *               the desc says DTRAIN_ORDER_ANY or names an algorithm with an order of its own (dtrain_algorithm).
 *     Bits      Kernels, conversions, folds and optimizers give the same bits under any compiler flags and
 *               instruction set. Matrix products have two sets of bits: AVX2, AVX-512 and 64-bit ARM round each term
 *               once; SSE2, scalar code and other processors round it twice. The environment variable DTRAIN_ISA
 *               (scalar, sse2, avx2, avx512) narrows the instruction set. Compile your own arithmetic with
 *               -ffp-contract=off: otherwise compilers join products and sums where the processor can, and your
 *               weights depend on the compiler and the machine.
 *     Threads   One line on each function: any thread; one thread per object; collective. Library threads block all
 *               signals but SIGSEGV, SIGBUS, SIGFPE and SIGILL.
 *     Memory    From the desc's allocator, which counts bytes and their peak. A warm training loop allocates nothing.
 *     Groups    dtrain_comm_split and dtrain_mesh_create make groups of a group's ranks. Several may be used at once,
 *               from several threads. What breaks one leaves the others whole; the loss of a rank of a mesh ends all
 *               groups of the mesh.
 *     Time      Every blocking call has a deadline, 60 seconds unless the desc says otherwise. A call that expires
 *               before anything moved can be made again; after that the group is broken and says why.
 *     Leaving   Who destroys its end of a group has left it, which breaks nothing: calls that need this rank fail with
 *               "rank 2 has left the group", others go on.
 *     Failure   A rank that dies or is silent for heartbeat_ms breaks its groups; dtrain_comm_abort does so by hand.
 *               Rank 0, or the lowest that is left, tells the others. Once a rank knows, its calls fail at once, with
 *               the number of the lost rank and the first cause; dtrain_recv alone still takes what had come. The
 *               survivors may go on: dtrain_comm_shrink makes a group of them, dtrain_resync brings all to the state
 *               of the furthest.
 *     Diagnosis Each rank keeps its last 256 operations (dtrain_comm_trace; DTRAIN_TRACE=PREFIX in the environment
 *               writes PREFIX.rank-N.json on failure), and heartbeats carry the last one: the text of a deadline says
 *               what the awaited rank does, and whom it awaits in turn. DDP and replicas of FSDP compare a hash of
 *               their weights while they train: the text names the first parameter that differs, and the ranks.
 *               DTRAIN_DEBUG=1 finds mistakes of order under FSDP and DDP: parameters that are read without a gather,
 *               gradients that are written after their reduce. See >>fsdp and dtrain_ddp_desc.
 *     Machine   What not every machine has is found out by trying, and everything works without it. For tests of that,
 *               DTRAIN_WITHOUT in the environment names what is not to be tried: all, or some of
 *                   avx512, avx2                instruction sets, with all that are wider
 *                   mremap, populate, pagemap   Linux's ways to move pages, to bring many, and to see which are there
 *                   mprotect                    pages that are closed, for DTRAIN_DEBUG
 *                   memfd                       files without a name that are in memory; such files in /tmp serve
 *                   unix, ipv6                  sockets; ranks without a token then need one
 *                   pkeys                       protection keys of dtrain_cuda.h's emulated GPUs
 *               with commas between: DTRAIN_WITHOUT=avx512,unix.
 *     Strangers Connections are admitted by a mutual HMAC-SHA256 challenge over the group's token; without a token
 *               only processes of the same user on this host are spoken to, over unix sockets.
 *     Sealing   With a token, connections that leave the host are encrypted and authenticated: see dtrain_comm_desc.
 *     Members   The token keeps strangers out; it does not protect members from each other. A member that sends a
 *               malformed control frame, or one that it has no right to send, is lost, and the others go on. A member
 *               can still send wrong data, or say that the leader is lost. The leader is trusted: rank 0, or the lowest
 *               rank that is left, decides who is lost and what the survivors agree on. Ranks that share the memory of
 *               devices can write each other's. The leader handles no more requests of a member that has 1 MiB to read.
 *
 * MACROS, before the implementation
 *     DTRAIN_API static                  nothing of dtrain is visible outside the file
 *     DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align)   another allocator behind everything
 *     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)   your BLAS
 *
 * PARTS: a program that needs less compiles less. DTRAIN_NO_SOCKETS and the like, before every include of dtrain.h, leave
 * a part out, and with it the parts that need it. Its own functions are not declared then; a call of another part that
 * would need it returns DTRAIN_ERR_UNSUPPORTED and names the macro. `tools/amalgamate --parts SOCKETS,SHARD` writes a
 * header that has these parts alone, and what they need. Text is of an object for x86-64 by gcc -O2, time a share of what
 * the whole takes to compile.
 *
 *     DTRAIN_NO_   text KB  time  leaves out
 *     SOCKETS           70  10 %  ranks that are processes, on one host or many
 *     TRANSPORT         19   2 %  dtrain_comm_from_transport
 *     DEVICE            36   5 %  collectives on memory of devices, with FSDP over several ranks there
 *     COMPRESS          72  12 %  top-k, quantisers, PowerSGD, compress and quantise_... of descs
 *     TRAIN             34   5 %  parameter table, optimizers, sampler, schedules, clipping, aggregators, matrix product
 *     SHARD             73   9 %  FSDP and DDP; needs TRAIN
 *     PARALLEL          54  10 %  modules, pipelines, tensor parallelism; needs SHARD
 *     LOOSE             43   7 %  parameter server, local SGD; needs TRAIN and COMPRESS
 *     SAFETENSORS       42   5 %  files of tensors, Hugging Face models
 *     CHECKPOINT        69  10 %  checkpoints; needs TRAIN and SAFETENSORS
 *     what is left     175  27 %  collectives of threads, tensors, queues of devices
 */
