/* TRAINING: the sections and snippets of what trains, and notes for porting a trainer of your own
 *
 * CONTENTS
 *     >>safetensors  files of named tensors that Python reads; Hugging Face models
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
 * OPTIMIZER STATE SHARDED (ZeRO-1): each rank updates its own slice of the parameters.
 *
 *     size_t lo, n = dtrain_shard(world, count, rank, &lo);
 *     DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0));
 *     float *m = (float *)calloc(n + 1, sizeof *m), *v = (float *)calloc(n + 1, sizeof *v);
 *     ...
 *     DTRAIN_CHECK(dtrain_reduce_scatter(world, grads, grads + lo, count, DTRAIN_F32, DTRAIN_SUM));
 *     for (size_t i = 0; i < n; i++) {
 *         grads[lo + i] /= (float)examples;            the examples of all ranks in the step
 *         update(params + lo + i, grads + lo + i, m + i, v + i);
 *     }
 *     DTRAIN_CHECK(dtrain_all_gather(world, params + lo, params, count, DTRAIN_F32));
 *
 * REDUCED DURING BACKWARD: declare the parameters once, in a table of dtrain_param, with a unit for each layer. The
 * gradients of a unit travel while the backward pass goes on. A dtrain_sampler deals the examples.
 *
 *     data.micro_batches = 8;                          of all ranks together: at least as many as ranks
 *     DTRAIN_CHECK(dtrain_sampler_init(&sampler, &data));
 *     DTRAIN_CHECK(dtrain_optimizer_create(&optimizer, table, 2, &sgd, NULL));
 *     DTRAIN_CHECK(dtrain_ddp_create(&ddp, world, table, 2, NULL));
 *     for (uint64_t step = 0; step < epochs * dtrain_sampler_steps(&sampler); step++) {
 *         int mine = dtrain_sampler_share(&sampler, step, rank, ranks, &first);
 *         double weight = 0;                           this rank's examples in the step
 *         for (int micro = first; micro < first + mine; micro++)
 *             weight += (double)dtrain_sampler_batch(&sampler, step, micro, NULL);
 *         DTRAIN_CHECK(dtrain_ddp_begin(ddp, mine, weight));
 *         for (int micro = first; micro < first + mine; micro++) {
 *             size_t n = dtrain_sampler_batch(&sampler, step, micro, examples);
 *             ...                                      backward of unit 1 adds up its gradients, which travel
 *             DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 1));
 *             ...                                      while backward of unit 0 goes on
 *             DTRAIN_CHECK(dtrain_ddp_reduce(ddp, 0));
 *             DTRAIN_CHECK(dtrain_ddp_next(ddp));      needed only if a micro-batch leaves a unit out
 *         }
 *         DTRAIN_CHECK(dtrain_ddp_finish(ddp, &total));
 *         DTRAIN_CHECK(dtrain_clip_grad_norm(table, 2, 1.0f, &norm));
 *         DTRAIN_CHECK(dtrain_optimizer_step(optimizer, 0.2f));
 *     }
 *     dtrain_ddp_destroy(ddp);
 *
 * Add up gradients of the sum of losses, not of their mean: dtrain_ddp_finish divides them by the weights of all ranks.
 * With a fixed number of micro-batches the weights have the same bits on 1, 2, 4 or 8 ranks. An all-reduce of your own
 * gradients gives all ranks of a run the same bits; another number of ranks rounds in another way.
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
 * used at both ends of the model: they are unit 0, tied. A trainer that points its arrays into its block later on, such
 * as when it first needs gradients, must no longer do so.
 *
 *     dtrain_fsdp *fsdp;
 *     dtrain_fsdp_desc desc;
 *     dtrain_param table[ARRAYS];
 *     int layers[ARRAYS] = {0, L, L, 0};
 *     memset(&desc, 0, sizeof desc);
 *     desc.optimizer.kind = DTRAIN_ADAMW;
 *     DTRAIN_CHECK(dtrain_params_of_arrays(table, ARRAYS, names, sizes, layers, block, NULL));
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
 * CHECKPOINTS: each rank saves what it holds. Any number of ranks, under any strategy, can resume. Give one list for
 * each object that has state; >>pieces has the others.
 *
 *     DTRAIN_CHECK(dtrain_checkpoint_create(&ckpt, world, &desc));      desc.directory = "run"
 *     lists[0] = dtrain_fsdp_pieces(fsdp);                              with DDP: dtrain_params_pieces
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
 *     globals, static, rand()  Ranks that are threads share them. Give each rank its own, or start processes.
 *     threads of its own       Get one end for each thread from dtrain_threads_create. One thread at a time may call on
 *                              an end, else the call returns DTRAIN_ERR_INVALID.
 *     helper threads           Let one thread of each rank make all calls on a group. Threads that communicate at once
 *                              need a group each: make it with dtrain_comm_split.
 *     OpenMP                   Call dtrain outside parallel regions. dtrain uses no OpenMP. dtrun sets OMP_NUM_THREADS
 *                              to 1 unless you set it: else every rank would use all processors.
 *     a frame loop             Use the snippet "A FRAME LOOP". A frame calls dtrain_comm_poll with a budget.
 *     fork()                   Make the group in the process that uses it. A forked child cannot use its parent's, and
 *                              closes its copies of the sockets. So a data loader hides no death of its parent.
 *     print and save           Do it on rank 0: `if (rank == 0)`. Every rank takes part in dtrain_checkpoint_save.
 *
 *   A program for MPI
 *
 *     MPI_COMM_WORLD           dtrain_comm_create finds its place under mpirun and srun. A program that stays with MPI
 *                              gives its communicator to dtrain_comm_from_mpi.
 *     MPI_IN_PLACE             Give the same buffer as in and out.
 *     tags, MPI_ANY_SOURCE     There are none. Messages from one rank to another keep their order. Independent streams
 *                              need a group each. If a rank does not know who sends, exchange the counts first.
 *     MPI_Isend, MPI_Barrier,  A collective starts after all earlier calls of the rank. Receive a message before the
 *       MPI_Recv               next collective. If not, the collective or the receive is a DTRAIN_ERR_MISMATCH.
 *     MPI_Request_free         There is none. Call dtrain_work_wait once for each handle.
 *     MPI_Abort                Calls return a status and no process is killed. dtrain_comm_abort ends a group everywhere.
 *
 *   The data loader
 *
 *     Shuffle by one seed      All ranks need the same order. dtrain_sampler gives it, from seed and epoch alone.
 *     Take your share          dtrain_shard cuts a list into one part for each rank. dtrain_sampler_share cuts a step.
 *     Make equal calls         Each rank makes as many steps as the others, also with fewer examples or with none.
 *     Draw your own noise      For dropout and augmentation add the rank to the seed.
 *
 *   Ranks with unequal numbers of examples: do not use DTRAIN_MEAN, which weighs ranks alike. If a rank does not know
 *   the number of all examples, sum it with the gradients, then divide. DDP and FSDP do the same with the weight that
 *   you give to dtrain_ddp_begin and dtrain_fsdp_begin.
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
 *                              the code of your own functions is as without the header. For 32-bit ARM and a few
 *                              other processors clang cannot do that: an error says what to do.
 *     -ffp-contract=off        Compile your own arithmetic with it if runs on different machines shall have equal bits.
 *     -msse2 -mfpmath=sse      On 32-bit x86, compile your own arithmetic with them for the same reason.
 *     -Ofast on your code      The compiler may reorder sums. Ranks of one build on equal processors still agree, as
 *                              they apply the same reduced gradients. Other flags, compilers or processors give
 *                              other weights.
 *     OpenMP reduction(+:x)    The order of the sum can change from run to run, and so can the last bits of weights.
 *                              Ranks still agree.
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
 *     MPI                0   0 %  is left out unless DTRAIN_MPI is defined; then it needs TRANSPORT, and has 13 KB
 *     DEVICE            36   5 %  collectives on memory of devices, with FSDP over several ranks there
 *     COMPRESS          72  12 %  top-k, quantisers, PowerSGD, compress and quantise_... of descs
 *     TRAIN             34   5 %  parameter table, optimizers, sampler, schedules, clipping, aggregators, products
 *     SHARD             73   9 %  FSDP and DDP; needs TRAIN
 *     PARALLEL          54  10 %  modules, pipelines, tensor parallelism; needs SHARD
 *     LOOSE             43   7 %  parameter server, local SGD; needs TRAIN and COMPRESS
 *     SAFETENSORS       42   5 %  files of tensors, Hugging Face models
 *     CHECKPOINT        69  10 %  checkpoints; needs TRAIN and SAFETENSORS
 *     what is left     175  27 %  collectives of threads, tensors, queues of devices
 *
 * OTHER LANGUAGES: load the shared library of `make install`. This header declares only functions, enums and structs
 * without bit fields, which most languages can call. You need none of its macros:
 *
 *     DTRAIN_DECLARATIONS_ONLY   Define it where a tool reads this header: it leaves out one pointer for the linker.
 *     DTRAIN_CHECK       Compare the status with 0. The text of the error is dtrain_last_error().
 *     constants          Use their values: DTRAIN_MAX_DIMS is 8. Enums are ints. Count on from the last value given.
 *     versions           Compare dtrain_version() / 100 with the version that your structs were written for.
 *     callbacks          They may run on threads of dtrain. Do not let an exception leave them.
 *     dtrain_error_set   It alone takes a variable number of arguments, as printf does. Callbacks may call it.
 *
 * This Python program trains on two threads, saves a checkpoint and loads it. It takes the path of the library and a
 * directory:
 *
 *     import ctypes as C, os, sys
 *     lib = C.CDLL(sys.argv[1])  # python3 ddp.py libdtrain.so DIRECTORY
 *     assert lib.dtrain_version() // 100 == 2  # the structs and numbers below are those of 0.2
 *     P, I, S, U64, TEXT, F32 = C.c_void_p, C.c_int, C.c_size_t, C.c_uint64, C.c_char_p, 18
 *     class Param(C.Structure):
 *         _fields_ = [("name", TEXT), ("dtype", I), ("shape", S * 8), ("ndim", I), ("stacked", I), ("unit", I),
 *                     ("no_decay", I), ("frozen", I), ("tied", I), ("data", P), ("grad", P), ("part", P),
 *                     ("device", P), ("dense", I)]
 *     class Pieces(C.Structure):
 *         _fields_ = [("pieces", P), ("count", S), ("name", TEXT), ("copies", I), ("copy", I), ("private", P * 5)]
 *     class State(C.Structure):
 *         _fields_ = [("step", U64), ("lists", C.POINTER(Pieces)), ("list_count", S), ("seed", U64),
 *                     ("random_index", U64), ("values", P), ("value_count", S)]
 *     class Where(C.Structure):
 *         _fields_ = [("directory", TEXT), ("keep_last", I), ("local", I), ("no_verify", I), ("no_sync", I),
 *                     ("timeout_ms", C.c_int64), ("allocator", P)]
 *     lib.dtrain_last_error.restype, lib.dtrain_params_pieces.restype = TEXT, Pieces
 *     def call(name, *args):  # ends the process on an error, as DTRAIN_CHECK does
 *         if getattr(lib, name)(*args) != 0: sys.stderr.write(lib.dtrain_last_error().decode() + "\n"), os._exit(1)
 *     def train(world, user):  # the loss of an example is (w[0] x[0] + w[1] x[1] - 3)^2 / 2
 *         world, ddp, ckpt, w, g = P(world), P(), P(), (C.c_float * 2)(1, 2), (C.c_float * 2)()
 *         x = [(1, 2), (4, 0)][lib.dtrain_comm_rank(world)]
 *         table = Param(b"w", F32, (S * 8)(2), data=C.addressof(w), grad=C.addressof(g))
 *         call("dtrain_ddp_create", C.byref(ddp), world, C.byref(table), S(1), None)
 *         for step in range(2):
 *             call("dtrain_ddp_begin", ddp, 1, C.c_double(1))
 *             g[:] = [(w[0] * x[0] + w[1] * x[1] - 3) * x[i] for i in range(2)]
 *             call("dtrain_ddp_reduce", ddp, 0)
 *             call("dtrain_ddp_finish", ddp, None)  # g is the mean over the ranks
 *             w[:] = [w[i] - g[i] / 2 for i in range(2)]
 *         state = State(2, C.pointer(lib.dtrain_params_pieces(C.byref(table), S(1), None)), 1)
 *         call("dtrain_checkpoint_create", C.byref(ckpt), world, C.byref(Where(sys.argv[2].encode())))
 *         call("dtrain_checkpoint_save", ckpt, C.byref(state))
 *         w[:], state.step = (0, 0), 0
 *         call("dtrain_checkpoint_load", ckpt, C.byref(state), None, None)
 *         print(f"step {state.step}: {w[0]} {w[1]}\n", end="")
 *         lib.dtrain_checkpoint_destroy(ckpt), lib.dtrain_ddp_destroy(ddp)
 *         return 0
 *     call("dtrain_run_threads", 2, C.CFUNCTYPE(I, P, P)(train), None, None)
 */
