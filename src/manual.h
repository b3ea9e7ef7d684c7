/* dtrain.h - distributed training in one C header. Public domain or MIT, at your choice: see LICENSE.
 *
 * Copy this file into a C program that trains something. In one source file, before any system header, write
 *
 *     #define DTRAIN_IMPLEMENTATION
 *     #include "dtrain.h"
 *
 * In other files include it without the define. Link -lpthread -lm. The program can then train data-parallel, sharded
 * or split over ranks. A rank is a thread, or a process on this host or another one.
 *
 * dtrain is no framework: it has no autograd and no graph. Its only layers are those that several ranks compute
 * together (>>tensor-parallel).
 *
 * dtrain.h compiles as C99 and later and as C++11 and later, by gcc and clang, on Linux and other POSIX systems. In C++
 * name a desc and set its fields.
 *
 * CONTENTS (search for the mark)
 *     >>base         status codes, errors, log, allocator, random numbers, SHA-256
 *     >>tensor       element types, conversions, tensors, the matrix product
 *     >>device       memory and arithmetic of GPUs: queues, copies, events, a table to fill for your own device
 *     >>pieces       lists of what objects keep, for checkpoints and file formats of your own
 *     >>safetensors  files of named tensors that Python reads; Hugging Face models; a table of parameters as a file
 *     >>transport    the table to fill for a transport of your own
 *     >>comm         groups of threads and processes, the environment, collectives, asynchronous and fused work, the
 *                    store
 *     >>order        the order in which a reduction adds
 *     >>disagree     what you see when ranks do not make the same calls
 *     >>groups       groups of a group's ranks, meshes, survivors
 *     >>own_transport  groups over a transport of your own
 *     >>device-group collectives on memory of devices: staged through the CPU's, or on each other's by events
 *                    or by flags
 *     >>compress-descs   how to say what is sent compressed
 *     >>compress     top-k, quantisers, PowerSGD, error feedback, and all-reduces over them
 *     >>train        parameter table, sampler, optimizers, schedules
 *     >>fsdp         parameters, gradients and optimizer state sharded over ranks; hybrid sharding
 *     >>data-parallel  DDP: every rank holds all parameters, and the program its own optimizer
 *     >>module       a model as a list of layers that the library gathers, calls and reduces
 *     >>pipeline     layers cut into stages, schedules of micro-batches: planned, checked, run over modules
 *     >>tensor-parallel  layers split inside: linear layers, embedding, cross-entropy, attention, over a group's ranks
 *     >>server       the parameter server: in step with all workers, or asynchronous with bounded staleness
 *     >>local-sgd    local SGD and DiLoCo: many steps alone, then a round with the ranks that are reachable
 *     >>checkpoint   the state of a run on disk, which any number of ranks can resume
 *
 * Below: SNIPPETS, PORTING NOTES, CONVENTIONS, ENVIRONMENT, MACROS, PARTS. The glossary of private terms opens the
 * implementation.
 *
 * SNIPPETS. Each is part of a program that the tests compile and run.
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
 * To use n threads, put the loop into a function `dtrain_status train(dtrain_comm *world, void *user)`. Call
 * dtrain_run_threads(n, train, user, NULL). If you start the threads yourself, dtrain_threads_create gives their ends.
 *
 * REDUCED DURING BACKWARD: declare the parameters once, in a table of dtrain_param, with a unit for each layer. The
 * gradients of a unit travel while the backward pass goes on. A dtrain_sampler deals the examples.
 *
 *     DTRAIN_CHECK(dtrain_sampler_init(&sampler, &data));
 *     DTRAIN_CHECK(dtrain_optimizer_create(&optimizer, table, 2, &sgd, NULL));
 *     DTRAIN_CHECK(dtrain_ddp_create(&ddp, world, table, 2, NULL));
 *     for (uint64_t step = 0; step < epochs * dtrain_sampler_steps(&sampler); step++) {
 *         int mine = dtrain_sampler_share(&sampler, step, rank, ranks, &first);
 *         DTRAIN_CHECK(dtrain_ddp_begin(ddp, mine, 4.0 * mine));
 *         for (int micro = first; micro < first + mine; micro++) {
 *             size_t n = dtrain_sampler_batch(&sampler, step, micro, examples);
 *             ...                                      backward adds gradients up, last unit first
 *             DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 1));
 *             DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 0));
 *             DTRAIN_CHECK(dtrain_ddp_next(ddp));      needed if a unit had no gradient
 *         }
 *         DTRAIN_CHECK(dtrain_ddp_finish(ddp, &total));
 *         DTRAIN_CHECK(dtrain_clip_grad_norm(table, 2, 1.0f, &norm));
 *         DTRAIN_CHECK(dtrain_optimizer_step(optimizer, 0.2f));
 *     }
 *     dtrain_ddp_destroy(ddp);
 *
 * PROCESSES AND HOSTS: start the first snippet by dtrun, or by another launcher that dtrain_comm_desc lists. Without a
 * launcher set the place of each process yourself:
 *
 *     dtrain_comm_desc desc;
 *     memset(&desc, 0, sizeof desc);
 *     desc.rank = rank, desc.world_size = ranks, desc.root = root, desc.token = secret;      root: "10.0.0.1:29500"
 *     DTRAIN_CHECK(dtrain_comm_create(&world, &desc));
 *
 * OTHER DATA THAN GRADIENTS: each rank has the part that dtrain_shard gives it, or a part of the length that you give
 * (the calls that end in _v). The last call can send each token to the expert that it chose.
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
 * The store keeps a few bytes under a name. Any rank sets them, any rank reads them:
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
 * A FRAME LOOP: no call blocks and dtrain starts no thread. Set desc.progress = DTRAIN_PROGRESS_POLL.
 *
 *     DTRAIN_CHECK(dtrain_comm_create_async(&world, &desc));
 *     ...                                              each frame, until ready is 1
 *     DTRAIN_CHECK(dtrain_comm_poll(world, 300));
 *     DTRAIN_CHECK(dtrain_comm_ready(world, &ready));
 *     ...                                              then, in each frame that has gradients
 *     DTRAIN_CHECK(dtrain_all_reduce_async(world, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN, &work));
 *     ...                                              each frame, until the work is done
 *     DTRAIN_CHECK(dtrain_comm_poll(world, 300));
 *     if (dtrain_work_done(work)) status = dtrain_work_wait(work), done = 1;
 *     ...                                              after DTRAIN_ERR_PEER_LOST: each frame, until group is set
 *     DTRAIN_CHECK(dtrain_comm_shrink_poll(world, 300, &group));
 *
 * GOING ON WITHOUT A LOST RANK: the survivors make a group. Each takes the state of the rank with the highest step.
 *
 *     DTRAIN_CHECK(dtrain_comm_shrink(world, &group));
 *     DTRAIN_CHECK(dtrain_resync(group, step, buffers, bytes, 1, &step));
 *
 * OPTIMIZER STATE SHARDED (ZeRO-1): each rank updates its own slice of the parameters.
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
 * FULLY SHARDED: declare the parameters once, in a table of dtrain_param. A layer has memory only while it is gathered.
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
 * With FSDP you can also take several micro-batches a step, scale the loss (desc.loss_scale), drop a step, and gather
 * everything for an evaluation:
 *
 *     DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, 2, tokens));
 *     float scale = dtrain_fsdp_loss_scale(fsdp);
 *     ...                                              forward and backward with scale * loss
 *     DTRAIN_CHECK(dtrain_fsdp_next(fsdp));
 *     ...                                              forward and backward again
 *     DTRAIN_CHECK(loss < limit ? dtrain_fsdp_step(fsdp, lr) : dtrain_fsdp_drop(fsdp));
 *     DTRAIN_CHECK(dtrain_fsdp_unshard(fsdp));
 *
 * FULLY SHARDED, ON ARRAYS THAT A TRAINER HAS: the trainer has pointers into one block. The library copies the values,
 * and you point at its memory. Arrays 1 and 2 hold the weights of all L layers, which are units 1 to L. The others are
 * used at both ends of the model: they are unit 0, tied.
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
 *     ...                                                        forward: before the embedding, before each layer,
 *     DTRAIN_CHECK(dtrain_fsdp_forward_to(fsdp, 0));             and before the output layer, which uses unit 0
 *     DTRAIN_CHECK(dtrain_fsdp_forward_to(fsdp, 1 + l));
 *     DTRAIN_CHECK(dtrain_fsdp_gather(fsdp, 0));
 *     ...                                                        backward: before each layer, and before the embedding
 *     DTRAIN_CHECK(dtrain_fsdp_backward_to(fsdp, 1 + l));
 *     DTRAIN_CHECK(dtrain_fsdp_backward_to(fsdp, 0));
 *     ...
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));                  instead of the trainer's own update
 *     ...
 *     dtrain_fsdp_destroy(fsdp);
 *
 * ON GPUS: dtrain_cuda.h makes a dtrain_device of a GPU's stream. Name it in the table. The same calls of DDP, FSDP,
 * optimizers and checkpoints then train on the GPU. For collectives of your own make a group of devices. No GPU has run
 * dtrain_cuda.h yet: see its manual.
 *
 *     table[i].device = gpu;
 *     float *w = dtrain_fsdp_unit_param(fsdp, "qkvw", layer);          memory of the GPU, at addresses that stay
 *     DTRAIN_CHECK(dtrain_device_group_create(&group, world, gpu, NULL));
 *
 * IN PARTS: dtrain_mesh lays ranks out as replicas, stages and parts of layers. The table says which part of a tensor
 * this rank has (dtrain_param_cut, dtrain_param_layers). FSDP goes over the replicas. A dtrain_pipeline runs a
 * dtrain_module of each stage, whose callbacks call the layers of >>tensor-parallel.
 *
 *     dtrain_mesh_dim dims[] = {{"data", 0}, {"pipeline", stages}};                  0: as many as the ranks make
 *     DTRAIN_CHECK(dtrain_mesh_create(&mesh, world, dims, 2));
 *     DTRAIN_CHECK(dtrain_fsdp_create(&fsdp, dtrain_mesh_group(mesh, "data"), table, 1, &desc));
 *     DTRAIN_CHECK(dtrain_module_create(&module, layers, 1, table, 1, &held));       layers: your callbacks
 *     schedule.modules = &module, schedule.fsdps = &fsdp, schedule.micro_batches = MICRO;
 *     DTRAIN_CHECK(dtrain_pipeline_create(&pipeline, model, &schedule));             model: the group "pipeline"
 *     DTRAIN_CHECK(dtrain_pipeline_agree(pipeline, inputs));
 *     ...
 *     DTRAIN_CHECK(dtrain_fsdp_begin(fsdp, MICRO, MICRO));
 *     DTRAIN_CHECK(dtrain_pipeline_step(pipeline, inputs, batches));
 *     DTRAIN_CHECK(dtrain_fsdp_clip_model_grad_norm(&fsdp, 1, model, 1.0f, &norm));
 *     DTRAIN_CHECK(dtrain_fsdp_step(fsdp, lr));
 *
 * CHECKPOINTS: each rank saves what it holds. Any number of ranks, under any strategy, can resume.
 *
 *     DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &desc));      desc.directory = "run"
 *     lists[0] = dtrain_fsdp_pieces(fsdp);                              one list for each object that has state
 *     lists[1] = dtrain_sampler_pieces(&sampler);
 *     state.lists = lists, state.list_count = 2;
 *     if (resume) DTRAIN_CHECK(dtrain_checkpoint_load(ckpt, &state, NULL, NULL));   sets state.step
 *     ...
 *     state.step = step;
 *     DTRAIN_CHECK(dtrain_checkpoint_save(ckpt, &state));               or dtrain_checkpoint_save_async
 *
 * PORTING NOTES for a trainer of your own
 *
 *     your trainer has         do this
 *     flat arrays              Keep parameters in one block and gradients in another. Then the first snippet is enough:
 *                              one broadcast before the loop and one all-reduce a step.
 *     a list of layers         Fill one dtrain_param for each array. Give each layer a unit, in the order of forward.
 *                              The table then serves DDP, FSDP, optimizers, clipping and checkpoints.
 *     threads of its own       Get one end for each thread from dtrain_threads_create. One thread at a time may call on
 *                              an end, else the call returns DTRAIN_ERR_INVALID.
 *     helper threads           Let one thread of each rank make all calls on a group. Threads that communicate at once
 *                              need a group each: make it with dtrain_comm_split.
 *     OpenMP                   Call dtrain outside parallel regions. dtrain uses no OpenMP. dtrun sets OMP_NUM_THREADS
 *                              to 1 unless you set it: else every rank would use all processors.
 *     a frame loop             Use the snippet "A FRAME LOOP". A frame calls dtrain_comm_poll with a budget.
 *     fork()                   Make the group in the process that uses it. A forked child cannot use its parent's.
 *     print and save           Do it on rank 0: `if (rank == 0)`. Every rank takes part in dtrain_checkpoint_save.
 *
 *   The data loader
 *
 *     Shuffle by one seed      All ranks need the same order. dtrain_sampler gives it, from seed and epoch alone.
 *     Take your share          dtrain_shard cuts a list into one part for each rank. dtrain_sampler_share cuts a step.
 *     Make equal calls         Each rank makes as many steps as the others, also with fewer examples or with none.
 *     Draw your own noise      For dropout and augmentation add the rank to the seed.
 *
 *   Ranks with unequal numbers of examples: do not use DTRAIN_MEAN, which weighs ranks alike. Sum the gradients and the
 *   number of examples, then divide. DDP and FSDP do the same with the weight that you give to dtrain_ddp_begin and
 *   dtrain_fsdp_begin.
 *
 *     grads[count] = (float)examples;                          one element more than parameters
 *     DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count + 1, DTRAIN_F32, DTRAIN_SUM));
 *     for (size_t i = 0; i < count; i++)
 *         grads[i] /= grads[count];
 *
 *   What must be equal on all ranks
 *
 *     what                            who takes care of it, or finds a difference
 *     calls: order, sizes, dtypes     each collective: DTRAIN_ERR_MISMATCH, and a text that quotes both calls
 *     first weights                   dtrain_broadcast, dtrain_ddp_create and dtrain_fsdp_create copy rank 0's
 *     weights later on                DDP and FSDP's replicas compare hashes; for your own arrays call
 *                                     dtrain_comm_check_equal
 *     learning rate, optimizer state  the same hashes: the weights differ from the next step on
 *     decisions: skip, stop, save     you: decide from reduced numbers, such as the mean loss, not from a clock
 *     the table of parameters         dtrain_ddp_create, dtrain_fsdp_create
 *     dtrain.h, byte order            dtrain_comm_create: DTRAIN_ERR_MISMATCH
 *     program and model               dtrain_comm_create, if you set desc.fingerprint
 *
 *   Flags of the compiler
 *
 *     -Ofast, -ffast-math      You may compile dtrain.h with them: by gcc and clang its arithmetic keeps its bits, and
 *                              the code of your own functions is as without the header.
 *     -ffp-contract=off        Compile your own arithmetic with it if runs on different machines shall have equal bits.
 *     -Ofast on your code      The compiler may reorder sums. Ranks of one build on equal processors still agree, as
 *                              they apply the same reduced gradients. Other flags, compilers or processors give
 *                              other weights.
 *     OpenMP reduction(+:x)    The order of the sum can change from run to run, and so can the last bits of weights.
 *                              Ranks still agree.
 *
 * CONVENTIONS
 *     Status    Every fallible call returns dtrain_status, 0 for success. dtrain_last_error() is the calling thread's
 *               text: what was expected, what came, which rank, which operation and its number. The library never
 *               exits, aborts or raises a signal. DTRAIN_CHECK prints and exits, in your code only. Compilers warn if
 *               you do not read a result. DTRAIN_IGNORE(call) leaves it on purpose.
 *     Desc      Create calls take a desc struct. Zero it, then set what differs. Zero means the default.
 *     Counts    A count is the total number of elements. It need not be a multiple of the number of ranks: shards
 *               differ by at most one element, earlier ranks longer. In place means that a rank's part stays at its
 *               offset.
 *     Order     A reduction adds by one tree over ranks: the same bits on every rank, transport and algorithm. Only
 *               DTRAIN_ORDER_ANY, or an algorithm with an order of its own (dtrain_algorithm), adds otherwise.
 *     Bits      Kernels, conversions, folds and optimizers give the same bits under any compiler flags and instruction
 *               set. Matrix products have two sets of bits. AVX2, AVX-512 and 64-bit ARM round each term once. SSE2,
 *               scalar code and other processors round it twice.
 *     Threads   Each function has one line: any thread; one thread per object; collective. Library threads block all
 *               signals but SIGSEGV, SIGBUS, SIGFPE and SIGILL.
 *     Memory    comes from the desc's allocator, which counts bytes and their peak. A warm training loop allocates
 *               nothing.
 *     Groups    dtrain_comm_split and dtrain_mesh_create make groups of a group's ranks. You may use several at once,
 *               from several threads. An error that breaks one group leaves the others whole. The loss of a rank of a
 *               mesh ends all groups of the mesh.
 *     Time      Every blocking call has a deadline, 60 seconds unless the desc says otherwise. If a call expires before
 *               anything moved, you can make it again. After that the group is broken and says why.
 *     Leaving   A rank that destroys its end has left the group. That breaks nothing: calls that need this rank fail
 *               with "rank 2 has left the group", and others go on.
 *     Failure   A rank that dies, or is silent for heartbeat_ms, breaks its groups. So does dtrain_comm_abort. The
 *               leader (rank 0, or the lowest rank that is left) tells the others. A killed process is known within two
 *               seconds, a stopped one or a host that is cut off within heartbeat_ms. Once a rank knows, its calls fail at
 *               once, with the number of the lost rank and the first cause. Only dtrain_recv still takes what had
 *               arrived. The survivors may go on: dtrain_comm_shrink makes a group of them, and dtrain_resync copies
 *               the state of the rank with the highest step to all.
 *     Diagnosis Each rank keeps its last 256 operations (dtrain_comm_trace). Heartbeats carry the last one, so the text
 *               of a deadline says what the awaited rank does, and which rank it awaits in turn. DDP and FSDP's
 *               replicas compare a hash of their weights while they train. The text names the first parameter that
 *               differs, and the ranks. DTRAIN_DEBUG=1 finds calls in a wrong order under FSDP and DDP.
 *     Machine   The library tries at run time what a system offers, and works without it.
 *     Strangers A connection is admitted by a mutual HMAC-SHA256 challenge over the group's token. Without a token a
 *               rank speaks only to processes of the same user on this host, over unix sockets.
 *     Sealing   With a token, connections that leave the host are encrypted and authenticated, others are not. There is
 *               no forward secrecy. See dtrain_comm_desc.
 *     Members   The token keeps strangers out. It does not protect members from each other. A member that sends a
 *               malformed control frame, or one that it may not send, is lost, and the others go on. A member can still
 *               send wrong data, or say that the leader is lost. All trust the leader, which decides who is lost and
 *               what the survivors agree on. Ranks that share the memory of devices can write each other's. The leader
 *               handles no more requests of a member that has 1 MiB to read.
 *
 * ENVIRONMENT
 *     The variables of the first group count only if desc.world_size is 0, and only where the desc leaves the field 0.
 *
 *     DTRAIN_RANK, DTRAIN_WORLD_SIZE, DTRAIN_ROOT   the place of this process; dtrun sets them. dtrain_comm_desc lists
 *                             the variables of other launchers
 *     DTRAIN_TOKEN            the group's secret, 16 to 255 bytes
 *     DTRAIN_TOKEN_FILE       a file whose first line is the secret
 *     DTRAIN_JOB              name of the job; processes of another job are refused
 *     DTRAIN_INTERFACE        interface or address of this rank
 *     DTRAIN_INSECURE         1: TCP without a token
 *     DTRAIN_SECURE           1: seal all connections; 0: none. Unset: with a token, those that leave the host
 *     DTRAIN_TIMEOUT_MS       deadline of every blocking call, -1: none
 *     DTRAIN_LISTEN_FD        rank 0: number of a listening socket that the launcher has opened at DTRAIN_ROOT
 *
 *     DTRAIN_NODE_RANKS       ranks on each host
 *     DTRAIN_ALGORITHM        `ring`, or `all_reduce=ring,broadcast=tree`: overrides the choice of algorithms
 *     DTRAIN_TRACE            PREFIX: a rank that fails writes its last operations to PREFIX.rank-N.json
 *     DTRAIN_DEBUG            1: checks the order of calls under FSDP and DDP, see >>fsdp and dtrain_ddp_desc
 *     DTRAIN_ISA              scalar, sse2, avx2 or avx512: at most this instruction set
 *     DTRAIN_WITHOUT          for tests: what not to try, with commas between, or all:
 *         avx512, avx2                instruction sets, with all wider ones
 *         mremap, populate, pagemap   Linux's ways to move pages, to bring many, and to see which are present
 *         mprotect                    closed pages, for DTRAIN_DEBUG
 *         memfd                       files without a name in memory; files in /tmp take their place
 *         unix, ipv6                  sockets; without unix, ranks need a token
 *         pkeys                       protection keys of dtrain_cuda.h's emulated GPUs
 *     DTRAIN_CUDA_EMULATED_BYTES   memory of each emulated GPU, 2^34 unless set
 *     TMPDIR                  unix sockets are in TMPDIR/dtrain-UID; in /tmp/dtrain-UID if it is unset, relative or
 *                             longer than 44 bytes
 *
 * MACROS, before the first include of dtrain.h
 *     DTRAIN_IMPLEMENTATION   in one file: the implementation as well
 *     DTRAIN_API static       nothing of dtrain is visible outside the file; the compiler drops what you do not call
 *     DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align)   another allocator behind everything; a desc can also
 *                             bring one.
 *     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)   your BLAS, in place of the
 *                             built-in product
 *     DTRAIN_NO_SOCKETS, ...  leave parts out, see PARTS
 *     DTRAIN_CUDA_IMPLEMENTATION   in one file, for nvcc: that of dtrain_cuda.h
 *     DTRAIN_CUDA_STUB        dtrain_cuda.h without CUDA: every call returns DTRAIN_ERR_UNSUPPORTED
 *     DTRAIN_CUDA_EMULATE     dtrain_cuda.h with GPUs that the CPU emulates, for tests
 *
 * PARTS: define DTRAIN_NO_SOCKETS and the like, before every include of dtrain.h, to leave parts out. Each takes the
 * parts along that need it. Its own functions are then not declared. A call of another part that would need it returns
 * DTRAIN_ERR_UNSUPPORTED and names the macro. `tools/amalgamate --parts SOCKETS,SHARD` writes a header that has only
 * these parts and what they need. Text is of an object for x86-64 by gcc -O2. Time is a share of what the whole
 * takes to compile.
 *
 *     DTRAIN_NO_   text KB  time  leaves out
 *     SOCKETS           70  10 %  ranks that are processes, on one host or many
 *     TRANSPORT         19   2 %  dtrain_comm_from_transport
 *     DEVICE            36   5 %  collectives on memory of devices, with FSDP over several ranks there
 *     COMPRESS          72  12 %  top-k, quantisers, PowerSGD, compress and quantise_... of descs
 *     TRAIN             34   5 %  parameter table, optimizers, sampler, schedules, clipping, aggregators, products
 *     SHARD             73   9 %  FSDP and DDP; needs TRAIN
 *     PARALLEL          54  10 %  modules, pipelines, tensor parallelism; needs SHARD
 *     LOOSE             43   7 %  parameter server, local SGD; needs TRAIN and COMPRESS
 *     SAFETENSORS       42   5 %  files of tensors, Hugging Face models
 *     CHECKPOINT        69  10 %  checkpoints; needs TRAIN and SAFETENSORS
 *     what is left     175  27 %  collectives of threads, tensors, queues of devices
 */
