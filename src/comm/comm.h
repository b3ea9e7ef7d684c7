/* ---- >>comm ----
 * Groups of ranks and the collectives between them. A dtrain_comm is one rank's end of a group; every
 * rank of the group makes the same collective calls in the same order. Results of reductions follow
 * one order of operations (see >>order), the same bits on every rank and transport.
 *
 * ---- >>order ----
 * The balanced binary tree over ranks whose left part is the largest power of two below their number:
 * two ranks x0 + x1; four (x0 + x1) + (x2 + x3); five ((x0 + x1) + (x2 + x3)) + x4. A mean is the tree's
 * sum divided once. 16-bit floats are summed as float32 and rounded once. */
#ifndef DTRAIN__COMM_H
#define DTRAIN__COMM_H
#include "../base/base.h"
#include "../tensor/tensor.h"
#include "../transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_comm dtrain_comm;
typedef struct dtrain_work dtrain_work;

/* The order in which a reduction combines the ranks' values. */
typedef enum dtrain_order {
    DTRAIN_ORDER_TREE = 0, /* see >>order */
    DTRAIN_ORDER_ANY = 401 /* whatever is fastest; still the same bits on every rank */
} dtrain_order;

/* How a collective moves its data. RING and DOUBLE_TREE add in an order of their own, NODES too where the ranks of a
 * node are no power of two; the others add in the tree order. Where a collective has no such form for this number of
 * ranks, the library chooses one.
 *
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; RING: Patarasuk, Yuan, J. Parallel Distrib. Comput. 69(2),
 * 2009; BRUCK: Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 8(11), 1997; DOUBLE_TREE: Sanders, Speck, Traeff,
 * Parallel Computing 35(12), 2009; binary blocks of HALVING_DOUBLING: Rabenseifner, ICCS 2004. */
typedef enum dtrain_algorithm {
    DTRAIN_ALGORITHM_AUTO = 0,
    DTRAIN_ALGORITHM_FUSED = 201,        /* one address space: each rank does its share on every rank's buffer */
    DTRAIN_ALGORITHM_RECURSIVE_DOUBLING, /* whole vectors between partners; worlds of a power of two, others TREE */
    DTRAIN_ALGORITHM_TREE,               /* whole vectors up to a rank and down again */
    DTRAIN_ALGORITHM_RING,               /* parts from neighbour to neighbour */
    DTRAIN_ALGORITHM_HALVING_DOUBLING,   /* all_reduce: halves of halves, each rank folds a part */
    DTRAIN_ALGORITHM_DIRECT,             /* every pair of ranks exchanges once */
    DTRAIN_ALGORITHM_BRUCK,              /* everything to everyone in few steps, folded by each */
    DTRAIN_ALGORITHM_NODES,              /* all_reduce: inside nodes, then between their first ranks */
    DTRAIN_ALGORITHM_DOUBLE_TREE         /* all_reduce: pieces in turn over two trees */
} dtrain_algorithm;

typedef enum dtrain_progress {
    DTRAIN_PROGRESS_THREAD = 0, /* a service thread drives async work, and the connections of processes; ranks of one
                                 * process start it with their first async call */
    DTRAIN_PROGRESS_POLL = 301  /* no thread is started; dtrain_comm_poll drives both, and calls that wait */
} dtrain_progress;

/* How to make a group. Zero means the default; zero the whole struct, then set what differs.
 *
 * A nonzero world_size means that rank and root are taken from here and the environment is not read. Else they
 * come from the first of these that the environment holds:
 *
 *   dtrain      DTRAIN_RANK, DTRAIN_WORLD_SIZE, DTRAIN_ROOT
 *   torchrun    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
 *   Slurm       SLURM_PROCID, SLURM_NTASKS, unless mpirun has started the rank inside the job
 *   Open MPI    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
 *   PMI         PMI_RANK, PMI_SIZE
 *   Kubernetes  JOB_COMPLETION_INDEX, with DTRAIN_WORLD_SIZE
 *
 * DTRAIN_ROOT, else MASTER_ADDR and MASTER_PORT (the next port, where torchrun's agent has that one), give the root
 * to all of them. DTRAIN_TOKEN or the file named by DTRAIN_TOKEN_FILE, DTRAIN_INTERFACE, DTRAIN_INSECURE=1,
 * DTRAIN_SECURE (1: on, 0: off) and DTRAIN_TIMEOUT_MS stand for the fields of those names where these are 0.
 *
 * Rank 0 refuses the ranks of another job. Which job a rank is of says DTRAIN_JOB, any text, the same on all ranks
 * (dtrun sets it); else its launcher's TORCHELASTIC_RUN_ID, SLURM_JOB_ID and SLURM_STEP_ID, PMIX_NAMESPACE,
 * OMPI_MCA_ess_base_jobid or PMI_JOBID. Where either has none, rank 0's log names the newcomer: pid, program, host.
 *
 * A token file is a regular file, whose first line is the token; a warning names one that others than its owner can
 * read. DTRAIN_TOKEN that is set and empty, an empty file and a token with a byte of 0 are errors: unset both
 * variables to have no token.
 *
 * Always, and for threads too: DTRAIN_ALGORITHM=ring, or all_reduce=ring,broadcast=tree, overrides algorithm, and
 * DTRAIN_NODE_RANKS stands for node_ranks where this is 0.
 *
 * Ranks prove to each other that they hold the token before anything else is read from a connection. dtrun makes one
 * by itself. Without a token ranks meet over unix sockets alone, and each looks whether the other's process is its own
 * user's. The ranks of a root on loopback, "127.0.0.1:29500", then meet at the socket /tmp/dtrain-UID/29500, or in
 * TMPDIR where that is set to a path of at most 44 bytes: UID is the user's number, the directory is the user's alone.
 * TCP without a token, even on loopback, takes insecure or DTRAIN_INSECURE=1.
 *
 * With a token, every connection that leaves the host is sealed: all control and data go in records of
 * ChaCha20-Poly1305. Each connection and direction has a key of its own, made from the token and what both sides said.
 * Whether a connection leaves the host follows from its own two addresses; both sides prove what they found. Set
 * secure = 1 or DTRAIN_SECURE=1 to seal connections on this host, too. Set -1, or DTRAIN_SECURE=0, on every rank where
 * the network is yours alone. A rank with 1 and one with -1 do not meet (DTRAIN_ERR_MISMATCH). A tunnel whose two ends
 * look local, such as that of ssh -L, is not sealed by itself. Each sealed connection takes 260 KB of memory.
 *
 * A record that is changed, injected, replayed, moved or left out ends its connection before any of it is used. That
 * ends the group with DTRAIN_ERR_CORRUPT or, of a control connection, DTRAIN_ERR_PEER_LOST; with reconnect_ms the
 * connection is made again, with other keys. Sealing does not give:
 *
 *   forward secrecy     whoever learns the token later can read what was recorded of its jobs
 *   members' secrets    whoever holds the token can read and forge everything
 *   a better token      a weak one can be guessed from a recorded handshake: take 16 random bytes or more
 *   sizes and times     of messages, which stay visible
 *
 *   source    RFC 8439 (ChaCha20-Poly1305), RFC 5869 (HKDF-SHA256) */
typedef struct dtrain_comm_desc {
    int rank;                    /* used when world_size is not 0 */
    int world_size;              /* 0: from the environment */
    const char *root;            /* where rank 0 listens: "host:port", "[address]:port" or "unix:/path" */
    const char *token;           /* the group's secret, 16 to 255 bytes; NULL: none beside the environment's */
    const char *fingerprint;     /* of model and program, at most 127 bytes, compared when ranks meet; NULL: "" */
    const char *listen_on;       /* interface or address of this rank; NULL: the one that routes to the root */
    int insecure;                /* 1: without a token use TCP all the same: whoever can connect may come in */
    int secure;                  /* 1: seal all connections; -1: none; 0: with a token, those that leave the host */
    int connections;             /* to each peer, used in turn; 0: 1; at most 8 */
    int64_t timeout_ms;          /* deadline of every blocking or async call; 0: 60,000; negative: none */
    int64_t heartbeat_ms;        /* a rank that was silent for so long is lost; 0: 15,000; negative: never */
    int64_t reconnect_ms;        /* a reset connection may be made again within; 0: it ends the group */
    dtrain_algorithm algorithm;  /* of every collective that has it; 0: chosen by kind, size and transport */
    dtrain_order order;          /* of reductions; 0: the tree's */
    int node_ranks;              /* ranks r with equal r / node_ranks share a host; 0: found out */
    int checksum;                /* 1: messages carry one of their data; -1: none do; 0: over your own transports */
    dtrain_progress progress;    /* 0: a service thread */
    size_t stack_bytes;          /* of dtrain_run_threads' threads; 0: 8 MiB; at least 64 KiB, which calls need */
    dtrain_allocator *allocator; /* NULL: one of the group's own, on the C library */
    void (*on_address)(void *user, const char *address); /* rank 0 listens there; tells the port that port 0 became */
    void *on_address_user;
    const char *trace_on_failure; /* see dtrain_comm_trace; copied; NULL: DTRAIN_TRACE of the environment, else none */
} dtrain_comm_desc;

/* Makes the group of processes that the environment or desc describes; a world of one where they describe none. The
 * first call on such a world logs a warning, once a process, unless DTRAIN_WORLD_SIZE is 1.
 *
 * Rank 0 listens at the root address, the others reach it there, in any order, within timeout_ms. Between processes
 * connections are made when first needed; one service thread looks after those of this group and of all that come of
 * it by dtrain_comm_split and its like, unless progress is DTRAIN_PROGRESS_POLL. A forked child cannot use its
 * parent's group.
 *
 *   comm     out: this rank's end; NULL on an error
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID   a variable or field is missing or malformed; the text names it
 *            DTRAIN_ERR_DENIED    no token where one is needed, or not the same; another job's or user's process
 *            DTRAIN_ERR_MISMATCH  another world size, wire version, byte order or fingerprint; a rank taken twice
 *            DTRAIN_ERR_TIMEOUT   the text says who came, who did not, and which variables were believed
 *            DTRAIN_ERR_IO        the system refused a socket or a thread, or does not know a name
 *
 * any thread; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_create(dtrain_comm **comm, const dtrain_comm_desc *desc);

/* Starts what dtrain_comm_create does; dtrain_comm_ready says how it went. Numeric addresses never block; a host
 * name is looked up by the system's resolver, which may. Errors in arguments at once.
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_comm_create_async(dtrain_comm **comm, const dtrain_comm_desc *desc);

/* Says whether a group from dtrain_comm_create_async has formed; with DTRAIN_PROGRESS_POLL, dtrain_comm_poll forms it.
 *
 *   ready     out: 1 when the group can be used
 *   returns   DTRAIN_OK while it may still form; else as dtrain_comm_create, and it can only be destroyed
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_comm_ready(dtrain_comm *comm, int *ready);

/* Makes `ranks` connected ends for a program that brings its own threads: comms[r] is rank r's.
 *
 *   comms    out: ranks pointers, each used by one thread at a time and destroyed by itself
 *   errors   DTRAIN_ERR_INVALID, DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_threads_create(dtrain_comm **comms, int ranks, const dtrain_comm_desc *desc);

/* Runs body once a rank, each on a thread of its own, and returns when all have returned.
 *
 *   body      gets its rank's end, which is destroyed after it returns; when it returns an error, its ends of other
 *             groups count as gone, too, but are still its own to destroy
 *   returns   DTRAIN_OK when every body did; else the status of the rank that failed first, and a text that
 *             begins with its number. Ranks that wait for it get DTRAIN_ERR_PEER_LOST
 *
 * any thread; blocks until the last body returns */
DTRAIN_API_MUST dtrain_status dtrain_run_threads(int ranks, dtrain_status (*body)(dtrain_comm *world, void *user),
                                                 void *user, const dtrain_comm_desc *desc);

/* Leaves the group and frees this end; NULL is legal. Never waits for a peer; but the last group over a transport of
 * your own gives peers that are there up to a second to take what was sent to them.
 *
 * Peers still receive what this rank has sent. Their calls that need this rank for more get DTRAIN_ERR_PEER_LOST and
 * "rank 2 has left the group", and so does every collective that this rank has not ended. That does not break the
 * group: messages between others go on. An exchange that has stopped in the middle of its other message does break it,
 * and so does a call that needs this rank where the text has a reason: this rank has met an error in the group before.
 * Work still pending is cancelled, its handles die with the group.
 *
 * A process that ends without this call is lost in all groups that it has not destroyed, and in no other. Over a
 * transport of your own that is a peer of which the table says DTRAIN_ERR_PEER_LOST, or `alive` 0.
 *
 * one thread per object */
DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm);

/* Return this end's rank, 0 for NULL, and the number of ranks, 1 for NULL.
 *
 * any thread */
DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm);
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm);

/* Returns the allocator that the group uses, for its counters and for objects that shall share them.
 *
 * any thread */
DTRAIN_API dtrain_allocator *dtrain_comm_allocator(dtrain_comm *comm);

/* Returns the nanoseconds that this rank's callers have spent inside blocking calls and waits of the group.
 *
 * What is made from a group adds to the group's count as well as to its own: groups by split and mesh,
 * and all that DDP, FSDP, pipelines, servers and local SGD wait for in them. What threads of the library
 * wait is not counted, dtrain_comm_poll neither. Threads that wait at once add up. The survivors' group of
 * dtrain_comm_shrink begins at 0, and adds to the group that the broken one was made from.
 *
 * any thread */
DTRAIN_API int64_t dtrain_comm_blocked_ns(const dtrain_comm *comm);

/* Writes the last 256 operations of this rank in the group to a file that chrome://tracing and Perfetto load.
 *
 * One event an operation, the one under way included: pid is the rank, tid the group, args the call, its bytes,
 * whom it awaited last, how it ended, and when it was called, started, moved its first bytes and ended, in
 * nanoseconds of CLOCK_MONOTONIC. tools/dtrace.c merges the files of all ranks and says which rank the others waited
 * for and in which operation they first differ. The path is replaced when the whole file is on disk, else untouched.
 *
 * With desc.trace_on_failure, or DTRAIN_TRACE in the environment, set to a path's beginning, the rank's first
 * operation that fails writes PREFIX.rank-N.json by itself, unless a deadline passed after which the call can be made
 * again. What goes wrong in it is said in the log.
 *
 *   path     at most 1,023 bytes
 *   errors   DTRAIN_ERR_INVALID  no group, no path, or a forked child
 *            DTRAIN_ERR_IO       the system refused; only dtrain_last_error has the text
 *   source   Trace Event Format of the catapult project
 *
 * any thread, also while operations are under way; not after dtrain_comm_destroy */
DTRAIN_API_MUST dtrain_status dtrain_comm_trace(dtrain_comm *comm, const char *path);

/* Splits `count` elements over the ranks of `comm` and says which part is `rank`'s.
 *
 * Parts are contiguous, in rank order, and differ by at most one element: the first count % size ranks hold one more. A
 * rank beyond `count` holds none. All that the library cuts over ranks is cut so.
 *
 *   rank      0 <= rank < size of comm
 *   begin     out: index of the part's first element; may be NULL
 *   returns   the number of elements in the part; 0 for a bad rank or a NULL comm
 *
 * any thread */
DTRAIN_API size_t dtrain_shard(const dtrain_comm *comm, size_t count, int rank, size_t *begin);

/* Reduces `count` elements over all ranks; every rank gets the whole result.
 *
 *   in, out   count elements of dtype; the same buffer, or apart (overlap is an error); any alignment
 *   dtype     F64, F32, F16, BF16; I8, U8, I32, U32, I64, U64, which wrap around
 *   op        DTRAIN_SUM, PROD, MIN, MAX (a NaN wins); DTRAIN_MEAN for floats divides once by the world size;
 *             DTRAIN_AND, OR, XOR for integers
 *   order     the binary tree over ranks (see >>order), unless the desc frees it
 *   errors    DTRAIN_ERR_MISMATCH   another rank called something else; the text quotes both calls. A rank that only
 *                                   sends in its call (dtrain_send; broadcast, reduce, gather and scatter on some
 *                                   ranks) may have DTRAIN_OK already when its peer, whose call has the error, finds
 *                                   out; then this rank's next operation that receives has it
 *             DTRAIN_ERR_TIMEOUT    the deadline of comm; usable again if nothing had moved
 *             DTRAIN_ERR_PEER_LOST  a rank has died and the group is broken (see dtrain_comm_shrink): a call that
 *                                   begins once this rank knows of that fails at once, also one that only sends. Or
 *                                   a rank that is needed has left (see dtrain_comm_destroy)
 *             DTRAIN_ERR_INVALID    bad arguments; another thread is in a call on comm; comm is destroyed, which is
 *                                   seen only until somebody else takes its memory
 *             on any error the contents of out are undefined, in is unchanged unless in == out
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_all_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                dtrain_dtype dtype, dtrain_op op);

/* Reduces `count` elements over all ranks; each rank gets its shard of the result (see dtrain_shard).
 *
 *   in       count elements, of which none but those of out change
 *   out      as many elements as this rank's shard has; in place means out == in + begin of the shard
 *   others   as dtrain_all_reduce
 *
 * In the _v form rank r gets elements [offsets[r], offsets[r] + counts[r]).
 *
 *   counts, offsets   one for each rank, the same on every rank; parts may be empty and leave gaps. offsets NULL:
 *                     one after the other
 *   in place          out == in + this rank's offset, and no parts that overlap
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_reduce_scatter(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                    dtrain_dtype dtype, dtrain_op op);
DTRAIN_API_MUST dtrain_status dtrain_reduce_scatter_v(dtrain_comm *comm, const void *in, void *out,
                                                      const size_t *counts, const size_t *offsets, dtrain_dtype dtype,
                                                      dtrain_op op);

/* Joins every rank's shard of `count` elements; every rank gets them all.
 *
 *   in       this rank's shard (see dtrain_shard); in place means in == out + begin of the shard
 *   out      count elements
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * In the _v form rank r's part goes to [offsets[r], offsets[r] + counts[r]). Counts and offsets are as in
 * dtrain_reduce_scatter_v. Parts do not overlap; what lies between them is unchanged.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_all_gather(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                dtrain_dtype dtype);
DTRAIN_API_MUST dtrain_status dtrain_all_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                  const size_t *offsets, dtrain_dtype dtype);

/* Copies `count` elements from rank root to every rank, in place.
 *
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype,
                                               int root);

/* Reduces `count` elements over all ranks to rank root.
 *
 *   out      count elements on the root, where it may be in; on other ranks not touched, may be NULL
 *   others   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                            dtrain_dtype dtype, dtrain_op op, int root);

/* Joins every rank's shard of `count` elements on rank root.
 *
 *   in       this rank's shard (see dtrain_shard); in place on the root means in == out + begin of the shard
 *   out      count elements on the root; on other ranks not touched, may be NULL
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * The _v form has parts as in dtrain_all_gather_v, the same arrays on every rank.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_gather(dtrain_comm *comm, const void *in, void *out, size_t count,
                                            dtrain_dtype dtype, int root);
DTRAIN_API_MUST dtrain_status dtrain_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                              const size_t *offsets, dtrain_dtype dtype, int root);

/* Hands rank root's `count` elements out, to each rank its shard.
 *
 *   in       count elements on the root; on other ranks not read, may be NULL
 *   out      this rank's shard (see dtrain_shard); in place on the root means out == in + begin of the shard
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * The _v form has parts as in dtrain_all_gather_v, the same arrays on every rank.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_scatter(dtrain_comm *comm, const void *in, void *out, size_t count,
                                             dtrain_dtype dtype, int root);
DTRAIN_API_MUST dtrain_status dtrain_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                               const size_t *offsets, dtrain_dtype dtype, int root);

/* Hands each rank's `count` elements out, to each rank its shard of them.
 *
 *   in       count elements: rank r gets shard r (see dtrain_shard)
 *   out      this rank's shard of rank 0's elements, then of rank 1's, and so on: size times its length. May be in
 *            where count is a multiple of the world size
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * In the _v form the caller says the parts:
 *
 *   in_counts, in_offsets     rank r gets in[in_offsets[r] .. + in_counts[r]); offsets NULL: one after the other
 *   out_counts, out_offsets   what rank r gives goes to out[out_offsets[r] .. + out_counts[r]); parts do not overlap
 *   in place                  in == out with the same arrays for both
 *   errors                    DTRAIN_ERR_MISMATCH  a rank gives another count than its peer awaits; names both
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_all_to_all(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                dtrain_dtype dtype);
DTRAIN_API_MUST dtrain_status dtrain_all_to_all_v(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                                  const size_t *in_offsets, void *out, const size_t *out_counts,
                                                  const size_t *out_offsets, dtrain_dtype dtype);

/* Returns when every rank has called it; errors as dtrain_all_reduce.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_barrier(dtrain_comm *comm);

/* Sends `count` elements to rank peer, which calls dtrain_recv with the same count and dtype.
 *
 * Messages between two ranks keep their order. The call may return before the peer has received.
 *
 *   peer     another rank than this one
 *   errors   as dtrain_all_reduce
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_send(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype,
                                          int peer);

/* Receives `count` elements that rank peer sends; see dtrain_send.
 *
 * On a broken group it takes a message that has come whole, and else fails at once. So a dtrain_send that returned
 * DTRAIN_OK before the group broke is not in vain. It takes none after dtrain_comm_abort, nor after another call of
 * this rank has stopped in the middle of a message.
 *
 *   errors   DTRAIN_ERR_MISMATCH  what came has another count or dtype; out is unchanged
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_recv(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer);

/* Sends to one rank while it receives from another; of use to rings and halos, where sends alone would cross.
 *
 *   to, from   other ranks than this one, the same or two; -1: none. They call dtrain_exchange, or dtrain_send and
 *              dtrain_recv, with the same counts
 *   in, out    apart
 *   errors     as dtrain_recv
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_exchange(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                              size_t out_count, int from, dtrain_dtype dtype);

/* Starts what the function without _async does.
 *
 * A collective or an exchange waits for all that the group's rank has called before it, and what is called after it
 * waits for it; this holds for blocking calls, too. Between two of them sends and recvs move together, and each is done
 * when its own message has gone or come: messages of any size may cross, and a send does not wait for a recv. Those to
 * one peer, and those from one, keep their order.
 *
 *   work     out: the handle, to be given to dtrain_work_wait once; NULL on an error
 *   buffers  belong to the operation until it is done, and so do arrays of counts and offsets
 *   errors   bad arguments at once; all others from dtrain_work_wait
 *
 * collective: every rank of comm, same order; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_all_reduce_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                      dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_reduce_scatter_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                          dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_all_gather_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                      dtrain_dtype dtype, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_broadcast_async(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype,
                                                     int root, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_send_async(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype,
                                                int peer, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_recv_async(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype,
                                                int peer, dtrain_work **work);

/* Says whether an operation has ended, well or not; 1 for NULL. Never blocks and drives nothing.
 *
 * any thread */
DTRAIN_API int dtrain_work_done(const dtrain_work *work);

/* Returns an operation's result, once, and frees its handle; waits for its end, which its deadline bounds.
 *
 *   returns   DTRAIN_ERR_INVALID for NULL
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_work_wait(dtrain_work *work);

/* Breaks the group: every pending and later operation on all its ranks ends with DTRAIN_ERR_ABORTED, and a text that
 * has this rank's number and why. Buffers may be freed when the calls that use them have returned.
 *
 * A call that is blocked, on any rank, returns at once; over a transport of your own as soon as its send or recv keeps
 * a deadline, which is some milliseconds away. A group that is broken already keeps its first cause.
 *
 *   why       at most 300 characters are kept; NULL: none
 *   returns   DTRAIN_OK; DTRAIN_ERR_INVALID for NULL and in a forked child
 *
 * any thread, before dtrain_comm_destroy; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_comm_abort(dtrain_comm *comm, const char *why);

/* Opens a fuse: blocking calls of the group are noted, and run by dtrain_fuse_end, many small ones as one.
 *
 * A noted call returns DTRAIN_OK, or at once what is wrong with its arguments, and then is not noted. Its buffers
 * belong to the fuse until the end; none may overlap another that is written.
 *
 *   messages      sends, recvs and exchanges run first, all of them together: every rank may send to and receive
 *                 from every other, of any size, in any order
 *   collectives   run in the order of their calls. Neighbours, messages aside, become one operation where they are
 *                 all_reduces of one dtype and op in the tree order, or broadcasts of one dtype and root, of up to
 *                 1 MiB each and 4 MiB together; the same bits as alone. Every rank must fuse the same calls
 *   errors        DTRAIN_ERR_INVALID  a fuse is open already. So get calls that cannot wait for its end: asynchronous
 *                                     ones, check_equal, and those that make groups
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_fuse_begin(dtrain_comm *comm);

/* Runs the noted calls, all of them, and closes the fuse.
 *
 *   returns   the first error. Texts call operations of several calls by the first one: "all_reduce #4 (sum,
 *             f32 x 1024, 3 fused)"; DTRAIN_ERR_INVALID without dtrain_fuse_begin
 *
 * collective: every rank of comm, same order, where collectives were noted; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fuse_end(dtrain_comm *comm);

/* Advances the group's async work on the calling thread for about budget_us, less when nothing can move.
 *
 * Between processes it also answers peers and sends heartbeats: call it several times in every heartbeat_ms. A call
 * that waits for an operation does the same, also for what this rank has begun in other groups of the same world. A
 * rank that waits for anything else, or computes, keeps those waiting that need it.
 *
 *   returns   DTRAIN_OK, also when work failed: dtrain_work_wait tells; DTRAIN_ERR_INVALID for a NULL comm or
 *             a group that has a service thread
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_comm_poll(dtrain_comm *comm, int64_t budget_us);

/* Compares `bytes` bytes, elements of dtype, on all ranks.
 *
 *   errors   DTRAIN_ERR_MISMATCH  they differ; the text names the first rank that differs from rank 0 and
 *                                 its first element that does. The same on every rank
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_check_equal(dtrain_comm *comm, const void *data, size_t count,
                                                      dtrain_dtype dtype);

/* What dtrain_store_get says of a key that nobody has set. */
#define DTRAIN_STORE_ABSENT ((size_t)-1)

/* Sets key to a string of bytes that every rank can get; for a program's own set-up, not for tensors.
 *
 * A world and the groups that come of it share one store, which rank 0 of the world keeps and takes along.
 *
 *   key      1 to 255 characters
 *   value    up to 65,536 bytes; rank 0 keeps 64 MiB of them
 *   errors   DTRAIN_ERR_MEMORY  the store is full
 *            DTRAIN_ERR_TIMEOUT, DTRAIN_ERR_PEER_LOST as dtrain_all_reduce
 *
 * To hand bytes to every rank at once, dtrain_broadcast them as DTRAIN_U8.
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_store_set(dtrain_comm *comm, const char *key, const void *value, size_t bytes);

/* Gets what key was last set to; dtrain_store_wait waits until it is set.
 *
 *   value    out: capacity bytes at most
 *   bytes    out: the value's whole size, also when it is larger than capacity; DTRAIN_STORE_ABSENT: not set
 *   errors   as dtrain_store_set
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_store_get(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                               size_t *bytes);
DTRAIN_API_MUST dtrain_status dtrain_store_wait(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                                size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
