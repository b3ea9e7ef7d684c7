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
 * dtrain.h compiles as C99 and later and as C++11 and later, by gcc and clang, on Linux, other POSIX systems and
 * Windows. In C++ name a desc and set its fields.
 *
 * CONTENTS (search for the mark)
 *     >>base         status codes, errors, log, allocator, random numbers, SHA-256
 *     >>tensor       element types, conversions, tensors
 *     >>device       memory and arithmetic of GPUs: queues, copies, events, a table to fill for your own device
 *     >>pieces       lists of what objects keep, for checkpoints and file formats of your own
 *     >>sgemm        the matrix product of layers
 *     >>transport    the table to fill for a transport of your own
 *     >>comm         groups of threads and processes, the environment, collectives, asynchronous and fused work, the
 *                    store
 *     >>order        the order in which a reduction adds
 *     >>disagree     what you see when ranks do not make the same calls
 *     >>groups       groups of a group's ranks, meshes, survivors
 *     >>own_transport  groups over a transport of your own
 *     >>from_mpi     groups over MPI
 *     >>device-group collectives on memory of devices: staged through the CPU's, or on each other's by events
 *                    or by flags
 *     >>compress-descs   how to say what is sent compressed
 *
 * Below: SNIPPETS, CONVENTIONS, ENVIRONMENT, MACROS, PACKAGES; then TRAINING, with more snippets, PORTING NOTES, PARTS
 * and OTHER LANGUAGES.
 *
 * SNIPPETS. Each is part of a program that the tests compile and run.
 *
 * DATA-PARALLEL IN AN EXISTING TRAINER
 *
 *     dtrain_comm *world;
 *     DTRAIN_CHECK(dtrain_comm_create(&world, NULL));
 *     DTRAIN_CHECK(dtrain_broadcast(world, params, count, DTRAIN_F32, 0));
 *     size_t first, mine = dtrain_shard(world, examples, dtrain_comm_rank(world), &first);
 *     ...                                              each step: add up the gradients of examples first to
 *     ...                                              first + mine - 1
 *     DTRAIN_CHECK(dtrain_all_reduce(world, grads, grads, count, DTRAIN_F32, DTRAIN_SUM));
 *     for (size_t i = 0; i < count; i++)
 *         grads[i] /= (float)examples;                 the examples of all ranks
 *     ...                                              your update, the same on every rank
 *     dtrain_comm_destroy(world);
 *
 * Sum gradients, and divide them by the number of all examples. DTRAIN_MEAN of each rank's own mean gives the same only
 * if all ranks have the same number of examples.
 *
 * To use n threads, put the loop into a function `dtrain_status train(dtrain_comm *world, void *user)`, without
 * dtrain_comm_create and dtrain_comm_destroy. Call dtrain_run_threads(n, train, user, NULL). If you start the threads
 * yourself, dtrain_threads_create gives their ends. Threads share globals, static variables and rand(): give each rank
 * its own.
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
 * Scans fold over the ranks up to this one. Here each rank learns where its lines of a common list begin and end:
 *
 *     DTRAIN_CHECK(dtrain_exscan(world, &lines, &begin, 1, DTRAIN_U64, DTRAIN_SUM));          rank 0's begin stays 0
 *     DTRAIN_CHECK(dtrain_scan(world, &lines, &end, 1, DTRAIN_U64, DTRAIN_SUM));
 *
 * The store keeps a few bytes under a name. Any rank sets them, any rank reads them:
 *
 *     DTRAIN_CHECK(dtrain_store_set(world, "address", "10.0.0.1:80", 12));
 *     DTRAIN_CHECK(dtrain_store_wait(world, "address", address, sizeof address, &bytes));
 *     DTRAIN_CHECK(dtrain_store_get(world, "nobody's", address, 0, &absent));      does not wait
 *     DTRAIN_CHECK(dtrain_store_delete(world, "address"));                         when nobody needs it any more
 *
 * BESIDE THE COMPUTATION: start a call, compute, and wait for it.
 *
 *     DTRAIN_CHECK(dtrain_reduce_scatter_async(world, grads, grads + lo, count, DTRAIN_F32, DTRAIN_SUM, &work));
 *     ...
 *     DTRAIN_CHECK(dtrain_work_wait(work));
 *     ...                                              divide by the number of all examples, and update
 *     DTRAIN_CHECK(dtrain_all_gather_async(world, params + lo, params, count, DTRAIN_F32, &work));
 *     DTRAIN_CHECK(dtrain_broadcast_async(world, params, count, DTRAIN_F32, 0, &work));
 *     DTRAIN_CHECK(dtrain_exscan_async(world, &lines, &begin, 1, DTRAIN_U64, DTRAIN_SUM, &work));
 *     DTRAIN_CHECK(dtrain_scan_async(world, &lines, &end, 1, DTRAIN_U64, DTRAIN_SUM, &work));
 *     DTRAIN_CHECK(dtrain_recv_async(world, &before, 1, DTRAIN_I32, (rank + ranks - 1) % ranks, &came));
 *     DTRAIN_CHECK(dtrain_send_async(world, &one, 1, DTRAIN_I32, (rank + 1) % ranks, &sent));
 *
 * Any other call starts so, too, here dtrain_gather_v:
 *
 *     dtrain_call call;
 *     memset(&call, 0, sizeof call);
 *     call.kind = DTRAIN_CALL_GATHER;
 *     call.in = params + lo, call.out = all, call.counts = counts, call.dtype = DTRAIN_F32;
 *     DTRAIN_CHECK(dtrain_start(world, &call, &work));
 *
 * A FRAME LOOP: no call blocks, and only log lines and traces start a thread. Set desc.progress =
 * DTRAIN_PROGRESS_POLL.
 *
 *     DTRAIN_CHECK(dtrain_comm_create_async(&world, &desc));
 *     ...                                              each frame, until ready is 1
 *     DTRAIN_CHECK(dtrain_comm_poll(world, 300));
 *     DTRAIN_CHECK(dtrain_comm_ready(world, &ready));
 *     ...                                              then, in each frame that has gradients
 *     DTRAIN_CHECK(dtrain_all_reduce_async(world, grads, grads, count, DTRAIN_F32, DTRAIN_SUM, &work));
 *     ...                                              each frame, until the work is done
 *     DTRAIN_CHECK(dtrain_comm_poll(world, 300));
 *     if (dtrain_work_done(work)) status = dtrain_work_wait(work), done = 1;
 *     ...                                              then divide by the number of all examples, and update
 *     ...                                              after DTRAIN_ERR_PEER_LOST: each frame, until group is set
 *     DTRAIN_CHECK(dtrain_comm_shrink_poll(world, 300, &group));
 *
 * A game does not end when training does: it handles errors as examples/frame_loop.c shows. A rank that does not poll
 * for heartbeat_ms is lost, and calls that wait for it end after timeout_ms. Set both to more than your longest loading
 * screen.
 *
 * WHICH CALLS BLOCK under DTRAIN_PROGRESS_POLL. The last line of each declaration says it, too. A call that is in no
 * row waits for no peer: it computes, reads or writes a file, or looks at this rank's own state.
 *
 *     never                      dtrain_comm_create_async with a numeric root, dtrain_comm_ready, dtrain_start, the
 *                                collectives and messages that end in _async, dtrain_work_done, dtrain_comm_abort,
 *                                dtrain_ddp_begin, dtrain_fsdp_begin, dtrain_fsdp_release, all that end in _destroy
 *                                but for what dtrain_comm_destroy says
 *     for about budget_us        dtrain_comm_poll, dtrain_comm_shrink_poll
 *     only what is not done yet  dtrain_work_wait: call it when dtrain_work_done is 1
 *     until the peers answer     every other call of >>comm and >>groups that its declaration calls collective.
 *                                Also dtrain_send, dtrain_recv, dtrain_exchange, dtrain_fuse_end, dtrain_store_set,
 *                                dtrain_store_get, dtrain_store_wait, dtrain_comm_create, dtrain_comm_from_mpi,
 *                                dtrain_run_threads
 *     the same, of DDP, FSDP     dtrain_ddp_create, dtrain_ddp_finish, dtrain_ddp_drop; all calls of >>fsdp that are
 *                                collective, and dtrain_fsdp_reduce and dtrain_fsdp_next. On devices that have one
 *                                queue dtrain_ddp_reduce, dtrain_ddp_next and dtrain_fsdp_put as well
 *     the same, of the others    modules, pipelines, tensor parallelism, device groups, compressed all-reduces and
 *                                aggregators: their creation and their collective calls.
 *                                Of these also dtrain_device_work_wait and dtrain_device_group_wait.
 *                                dtrain_local_sgd_create, _sync, _publish and _finish; with desc.blocking _step, too.
 *                                dtrain_server_create, _pull, _leave and _run
 *     files, and the peers       dtrain_checkpoint_create, _save, _load, and _wait while a save is under way
 *
 * The store's calls and dtrain_comm_split are for a loading screen. In a frame use what never blocks.
 *
 * GOING ON WITHOUT A LOST RANK: the survivors make a group. Each takes the state of the rank with the highest step.
 * Start the ranks with dtrun --survivors: without this flag dtrun ends all ranks after a loss.
 *
 *     DTRAIN_CHECK(dtrain_comm_shrink(world, &group));
 *     DTRAIN_CHECK(dtrain_resync(group, step, buffers, bytes, 1, &step));
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
 *               scalar code and other processors round it twice. With DTRAIN_ISA=scalar all processors have the same
 *               bits. Ranks of one group may differ in system, word size and instruction set, but not in byte order.
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
 *               seconds, a stopped one or a host that is cut off within heartbeat_ms. Then calls fail at once,
 *               with the number of the lost rank and the first cause. Only dtrain_recv still takes what had
 *               arrived. The survivors go on if they are a majority: dtrain_comm_shrink makes a group of them, and
 *               dtrain_resync copies the state of the rank with the highest step to all. On one machine whoever is left
 *               goes on after deaths. desc.quorum lets others go on, too.
 *     Diagnosis Each rank keeps its last 256 operations (dtrain_comm_trace). Heartbeats carry the last one, so the text
 *               of a deadline says what the awaited rank does, and which rank it awaits in turn. DDP and FSDP's
 *               replicas compare a hash of their weights while they train. The text names the first parameter that
 *               differs, and the ranks. DTRAIN_DEBUG=1 finds calls in a wrong order under FSDP and DDP, and
 *               buffers that were freed too early.
 *     Machine   The library tries at run time what a system offers, and works without it.
 *     Strangers A connection is admitted by a mutual HMAC-SHA256 challenge over the group's token. Without a token a
 *               rank speaks only to processes of the same user on this host, over unix sockets.
 *     Sealing   With a token, connections that leave the host are encrypted and authenticated, others are not. There is
 *               no forward secrecy. See dtrain_comm_desc.
 *     Members   The token keeps strangers out. It does not protect members from each other. A member that sends a
 *               malformed control frame, or one that it may not send, is lost. A member can still send wrong data, or say
 *               that the leader is lost. All trust the leader, which decides who is lost and what the survivors agree
 *               on. Ranks that share the memory of devices can write each other's. The leader handles no more requests
 *               of a member that has 1 MiB to read.
 *
 * ENVIRONMENT
 *     The variables of the first group count only if desc.world_size is 0, and only where the desc leaves the field 0.
 *
 *     DTRAIN_RANK, DTRAIN_WORLD_SIZE, DTRAIN_ROOT   the place of this process; dtrun sets them. A root on loopback
 *                             needs no token. dtrain_comm_desc lists the variables of other launchers
 *     DTRAIN_TOKEN            the group's secret, 16 to 255 bytes
 *     DTRAIN_TOKEN_FILE       a file whose first line is the secret
 *     DTRAIN_JOB              name of the job; processes of another job are refused
 *     DTRAIN_INTERFACE        interface or address of this rank, or none
 *     DTRAIN_INSECURE         1: TCP without a token
 *     DTRAIN_TRANSPORT        tcp, unix, shm or mpi; unset: the fastest, see dtrain_comm_desc
 *     DTRAIN_SECURE           1: seal all connections; 0: none. Unset: with a token, those that leave the host
 *     DTRAIN_TIMEOUT_MS       deadline of every blocking call, -1: none
 *     DTRAIN_LISTEN_FD        rank 0: number of a listening socket that the launcher has opened at DTRAIN_ROOT
 *
 *     DTRAIN_MPI_LIBRARY      path of a library with the standard ABI of MPI
 *     DTRAIN_MPI_SHM          0: MPI moves all bytes, also inside a host
 *     DTRAIN_MPI_STAGED       1: MPI never uses the caller's memory
 *     DTRAIN_NODE_RANKS       ranks on each host
 *     DTRAIN_ALGORITHM        `ring`, or `all_reduce=ring,broadcast=tree`: overrides the choice of algorithms
 *     DTRAIN_TRACE            PREFIX: a rank that fails writes its last operations to PREFIX.rank-N.json
 *     DTRAIN_DEBUG            1: checks the order of calls under FSDP and DDP, see >>fsdp and dtrain_ddp_desc.
 *                             Before a fault ends the process (SIGSEGV, SIGBUS), a line names the operation whose
 *                             buffer is not there
 *     DTRAIN_ISA              scalar, sse2, avx2, avx512, neon or neon-bf16: at most this instruction set
 *     DTRAIN_WITHOUT          for tests: what not to try, with commas between, or all:
 *         avx512, avx2, bf16, mremap, populate, pagemap, mprotect, memfd, unix, abstract, ipv6, shm, huge,
 *         futex, proc, pkeys (see CONTRIBUTING.md)
 *     DTRAIN_CUDA_EMULATED_BYTES   memory of each emulated GPU, 2^34 unless set
 *     TMPDIR                  unix sockets are named TMPDIR/dtrain-UID/...; /tmp/dtrain-UID/... if it is unset, relative
 *                             or longer than 44 bytes
 *
 * WINDOWS
 *     Windows 10 and later, by gcc or clang of MinGW-w64; link with -lws2_32. Texts and paths are UTF-8. This is
 *     different from POSIX systems:
 *
 *     unix sockets            There are none. Ranks of one host meet over TCP on loopback, which needs a token. dtrun
 *                             makes one. Ranks of one host share memory as elsewhere
 *     fork                    There is none. Start ranks with dtrun or as threads
 *     signals                 dtrun ends ranks at once after --grace-ms: they get no SIGTERM first. Ctrl-C reaches them
 *                             directly. The status of a rank that was ended so is 137
 *     file modes              A token file is not checked for readers other than its owner
 *     memory                  The system promises memory for all of a reserved range at once. Pages are not moved, so
 *                             FSDP gives pages back and gets new ones
 *     checkpoint lock         It tells jobs apart, but not two checkpointers of one process
 *     dtrain_cuda.h           It is not for Windows
 *
 * MACOS AND THE BSDS
 *     dtrain compiles and links for macOS, FreeBSD, NetBSD and OpenBSD, but has never run there. This is different from
 *     Linux:
 *
 *     unix sockets            They are files
 *     shared memory           It has a name of shm_open while ranks open it. If a rank is killed before it has removed
 *                             the name, a later process removes it. A rank wakes another by a datagram on loopback
 *     GPUs                    Processes do not share the memory of devices
 *     files                   On macOS a saved file is flushed by F_FULLFSYNC, to the disk itself
 *     memory                  Pages are not moved, so FSDP gives pages back and gets new ones
 *     checkpoint lock         It tells jobs apart, but not two checkpointers of one process
 *
 * WASM
 *     Emscripten compiles a program whose ranks are threads:
 *
 *       emcc -pthread -O2 -ffp-contract=off -DDTRAIN_NO_SOCKETS -c main.c
 *       emcc -pthread -sPROXY_TO_PTHREAD -sEXIT_RUNTIME -sINITIAL_MEMORY=512MB main.o -o main.js
 *
 *     -sPROXY_TO_PTHREAD keeps waiting ranks off a browser's main thread. The bits are those of DTRAIN_ISA=scalar.
 *     There are no processes. It is tested under node, not in a browser.
 *
 * MACROS, before the first include of dtrain.h
 *     DTRAIN_IMPLEMENTATION   in one file: the implementation as well
 *     DTRAIN_API static       nothing of dtrain is visible outside the file; the compiler drops what you do not call
 *     DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align)   another allocator behind everything; a desc can also
 *                             bring one.
 *     DTRAIN_SGEMM(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)   your BLAS, in place of the
 *                             built-in product
 *     DTRAIN_MPI              the part for MPI as well, see >>from_mpi; DTRAIN_MPI_HEADER="<mpi.h>" compiles it against
 *                             that file
 *     DTRAIN_NO_SOCKETS, ...  leave parts out, see PARTS
 *     DTRAIN_DECLARATIONS_ONLY   for a file that links with no implementation, such as one that loads the library at
 *                             run time: the linker does not compare versions
 *
 * PACKAGES: install the library, or make it part of your build, instead of copying this file. Then no file of yours
 * defines DTRAIN_IMPLEMENTATION.
 *
 *     make install PREFIX=/usr/local   both headers, the shared and the static library, dtrain.pc, a config for CMake,
 *                                      and dtrun, dtrace and safetensors with man pages. It knows DESTDIR and LIBDIR.
 *                                      make uninstall removes them
 *     pkg-config                       cc main.c $(pkg-config --cflags --libs dtrain); for the static library add
 *                                      --static to it, and -static to cc
 *     CMake                            find_package(dtrain 0.2), FetchContent or add_subdirectory, and
 *                                      target_link_libraries(main dtrain::dtrain). dtrain_STATIC=ON finds the static
 *                                      library. dtrain::header is this header alone
 *     Meson                            dependency('dtrain'), installed or in subprojects/. There
 *                                      dependency('dtrain-header', fallback: 'dtrain') is this header alone
 *     Windows                          CMake and Meson build for it by MinGW-w64. By hand, link -lws2_32
 *     without programs                 CMake takes DTRAIN_TOOLS=OFF, and Meson tools=false
 *     vcpkg                            vcpkg install dtrain --overlay-ports=packaging/vcpkg, in a clone
 *     Conan 2                          conan create packaging/conan, in a clone
 *     Python                           pip install ., in a clone; a C compiler makes the library. The module dtrain has
 *                                      the header's constants, structs and functions, for ctypes
 *
 * The library has all parts. Define DTRAIN_MPI to declare those of >>from_mpi. DTRAIN_VERSION in >>base says which
 * versions go together.
 */
