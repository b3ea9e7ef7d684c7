/* ---- >>comm ----
 * Groups of ranks and the collectives between them. A dtrain_comm is one rank's end of a group. Every rank of the group
 * makes the same collective calls in the same order. `count` is the total, and a rank's shard is its part of it as
 * dtrain_shard cuts it. The size of the group need not divide count.
 *
 *   call             a rank gives              a rank gets
 *   all_reduce       count elements            the reduction of all inputs
 *   reduce_scatter   count elements            its shard of the reduction
 *   all_gather       its shard                 count elements: all shards
 *   broadcast        root: count elements      the root's elements
 *   reduce           count elements            root: the reduction of all inputs
 *   gather           its shard                 root: count elements: all shards
 *   scatter          root: count elements      its shard
 *   all_to_all       count elements            its shard of every rank's elements
 *   scan, exscan     count elements            the reduction of the inputs up to its own, or before it
 *
 * ---- >>order ----
 * Reductions add along the balanced binary tree over ranks. Its left part is the largest power of two below the number
 * of ranks. A mean is the tree's sum divided once. 16-bit floats are summed as float32 and rounded once. The result has
 * the same bits on every rank and transport.
 *
 *   2 ranks   x0 + x1
 *   4 ranks   (x0 + x1) + (x2 + x3)
 *   5 ranks   ((x0 + x1) + (x2 + x3)) + x4
 *
 * ---- >>disagree ----
 * When ranks do not agree, the error says who did what. Say rank 2 of three processes calls broadcast while the others
 * call all_reduce. A rank that has waited for a quarter of its deadline writes one line to the log. In that time each
 * group writes at most one. Time behind the rank's own earlier calls does not count:
 *
 *     all_reduce #11 (sum, f32 x 4): rank 0 has waited 1.3 s for rank 2;
 *     rank 2 is in broadcast #11 (f32 x 4, root 1) since 1.3 s, waiting for rank 1;
 *     rank 1 is in all_reduce #11 (sum, f32 x 4) since 1.3 s, waiting for rank 0
 *
 * The log is silent if the deadline is under a second. At the deadline the call returns DTRAIN_ERR_MISMATCH, and its
 * text quotes both calls. If the two calls meet directly, as those of threads do, it returns that at once.
 *
 * Each rank keeps its last 256 operations in each group. DTRAIN_TRACE=failed in the environment makes each rank that
 * fails write them to failed.rank-N.json. dtrain_comm_trace writes them at any time. The tool dtrace merges the files:
 *
 *     $ build/dtrace -o all.json failed.rank-*.json
 *     ...
 *     differ:      first in #11 of group 0: rank 0 called all_reduce #11 (sum, f32 x 4) by tree, rank 2 broadcast ...
 *
 * DDP and the replicas of FSDP also find weights that drift apart: see check_every in dtrain_ddp_desc.
 * dtrain_comm_check_equal compares any data of your own. */
#ifndef DTRAIN__COMM_H
#define DTRAIN__COMM_H
#include "../base/base.h"
#include "../tensor/tensor.h"
#include "../wire/transport.h"

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

/* Which ranks may go on after a loss: see dtrain_comm_shrink. */
typedef enum dtrain_quorum {
    DTRAIN_QUORUM_MAJORITY = 0, /* more than half of the group, or the half with the lowest rank */
    DTRAIN_QUORUM_ANY = 1701    /* whoever is left. If the network is cut in two, both parts go on, each for itself */
} dtrain_quorum;

/* How a collective moves its data. If a collective has no such form for this number of ranks, the library chooses one.
 *
 * RING and DOUBLE_TREE add in an order of their own. NODES does so if the number of ranks in a node is no power of two.
 * The others add in the tree order.
 *
 * Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; RING: Patarasuk, Yuan, J. Parallel Distrib. Comput. 69(2),
 * 2009; BRUCK: Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 8(11), 1997; DOUBLE_TREE: Sanders, Speck, Traeff,
 * Parallel Computing 35(12), 2009; binary blocks of HALVING_DOUBLING: Rabenseifner, ICCS 2004. */
typedef enum dtrain_algorithm {
    DTRAIN_ALGORITHM_AUTO = 0,
    DTRAIN_ALGORITHM_FUSED = 201,        /* threads: each rank does its share of the work for all */
    DTRAIN_ALGORITHM_RECURSIVE_DOUBLING, /* whole vectors between partners; TREE unless size is a power of two */
    DTRAIN_ALGORITHM_TREE,               /* whole vectors up to one rank and down again */
    DTRAIN_ALGORITHM_RING,               /* parts from neighbour to neighbour */
    DTRAIN_ALGORITHM_HALVING_DOUBLING,   /* all_reduce: partners exchange halves; each rank folds one part */
    DTRAIN_ALGORITHM_DIRECT,             /* every pair of ranks exchanges once */
    DTRAIN_ALGORITHM_BRUCK,              /* every rank gets all inputs in few steps and folds them itself */
    DTRAIN_ALGORITHM_NODES,              /* all_reduce: inside each node, then between the nodes' first ranks */
    DTRAIN_ALGORITHM_DOUBLE_TREE         /* all_reduce: pieces alternate between two trees */
} dtrain_algorithm;

/* Who drives async work, and the connections between processes. */
typedef enum dtrain_progress {
    DTRAIN_PROGRESS_THREAD = 0, /* a service thread; threads of one process start it with their first async call */
    DTRAIN_PROGRESS_POLL = 301  /* dtrain_comm_poll, and every call that waits; threads: for logs and traces alone */
} dtrain_progress;

/* How to make a group. Zero the whole struct, then set what differs: zero means the default.
 *
 * RANK AND SIZE come from the desc if world_size is not 0. Otherwise they come from the first of these that the
 * environment holds:
 *
 *   dtrain      DTRAIN_RANK, DTRAIN_WORLD_SIZE
 *   torchrun    RANK, WORLD_SIZE
 *   Slurm       SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS; skipped for ranks that mpirun started inside the
 *               Slurm job. Start the ranks with srun. Without srun, a batch script's program is a world of one,
 *               and an error if the job has more tasks
 *   Open MPI    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
 *   PMI         PMI_RANK, PMI_SIZE
 *   Kubernetes  JOB_COMPLETION_INDEX, DTRAIN_WORLD_SIZE
 *
 * THE ROOT is the address at which rank 0 listens. It comes from the first of these that is set, the environment only
 * if world_size is 0:
 *
 *   desc.root
 *   DTRAIN_ROOT
 *   MASTER_ADDR, MASTER_PORT   the next port if torchrun's own agent listens at MASTER_PORT
 *   Slurm                      the first host of the node list, and the port
 *                              15000 + (SLURM_JOB_ID + 101 * SLURM_STEP_ID) % 10000
 *   Open MPI, PMI              with all ranks on one host: a unix socket that is named after the job
 *
 * If all ranks have a token and the root is a name that means loopback on rank 0, such as localhost, rank 0 listens on
 * all interfaces. For this host alone, give 127.0.0.1 or [::1].
 *
 * A name is looked up again until the deadline, as it may not be known yet. If rank 0 does not find its own within 50
 * ms, it listens and calls on_address later, on the thread that makes progress.
 *
 * OTHER FIELDS that are 0 or NULL come from these variables. The last three are always read, the others only if
 * world_size is 0:
 *
 *   token             DTRAIN_TOKEN, or DTRAIN_TOKEN_FILE: a file whose first line is the token
 *   listen_on         DTRAIN_INTERFACE
 *   insecure          DTRAIN_INSECURE=1
 *   secure            DTRAIN_SECURE: 1 on, 0 off
 *   timeout_ms        DTRAIN_TIMEOUT_MS
 *   node_ranks        DTRAIN_NODE_RANKS
 *   trace_on_failure  DTRAIN_TRACE
 *   algorithm         DTRAIN_ALGORITHM: ring, or all_reduce=ring,broadcast=tree; it overrides the field
 *
 * JOBS. Rank 0 refuses ranks of another job. The job's name is DTRAIN_JOB: any text, the same on all ranks; dtrun sets
 * it. Without that, it is the launcher's TORCHELASTIC_RUN_ID, SLURM_JOB_ID and SLURM_STEP_ID, PMIX_NAMESPACE,
 * OMPI_MCA_ess_base_jobid or PMI_JOBID. If either side has no name, rank 0's log says who came: pid, program, host.
 *
 * BEHIND NAT OR A FIREWALL. Two ranks connect to each other when they first need it, and each of them tries. One way is
 * enough: the first connection that is complete stays. Set listen_on or DTRAIN_INTERFACE to "none" on a rank that
 * nobody can reach. It never listens and connects to all others. Between two such ranks a transfer ends the group with
 * DTRAIN_ERR_UNSUPPORTED: send by way of a rank that listens. Rank 0 always listens. If rank 0 is lost, the lowest rank
 * that is left needs connections to all others; see dtrain_comm_shrink.
 *
 * TOKEN. The token is the group's secret. Ranks prove to each other that they hold it before they read anything else
 * from a connection. dtrun makes one for each run. A token file must be a regular file; a warning names a file that
 * others than its owner can read. An empty DTRAIN_TOKEN, an empty file and a token with a zero byte are errors: unset
 * both variables to have no token.
 *
 * Only an answer that is proved with the token ends a try to reach rank 0. Anything else may be a stranger's, or bytes
 * that somebody has changed on the way. The rank logs it and tries again: until its deadline while the group forms,
 * later for reconnect_ms. So a rank with another token gets DTRAIN_ERR_DENIED at its deadline. Without a token, a proof
 * shows only that no byte was changed. A rank then believes whoever answers at rank 0's address: a process of its own
 * user on a unix socket, anybody with insecure.
 *
 * Without a token, ranks meet over unix sockets alone. Each checks that the other's process belongs to its own user. A
 * root on loopback such as "127.0.0.1:29500" then means the socket "unix:@/tmp/dtrain-UID/29500". UID is the user's
 * number. On Linux @ marks a name that is no file, so nothing is left when processes are killed. Processes in different
 * network namespaces cannot reach each other by name: give them "unix:/path". Other systems have paths alone, and the
 * directory is the user's alone. TMPDIR replaces /tmp if it is an absolute path of at most 44 bytes. TCP without a
 * token, even on loopback, needs insecure or DTRAIN_INSECURE=1.
 *
 * SHARED MEMORY. Two processes of one host share memory where the system lets one open the other's, as Linux does
 * within one user and one container. It carries what their connection would; the connection stays and shows when a
 * process dies. If all ranks of a group share memory, up to 64 of them, their collectives need no messages, except an
 * all-to-all with counts. They are done in place on memory of dtrain_comm_alloc. Other buffers are copied through 2 MiB
 * that the group shares. Messages on a sealed connection go by no shared memory, and with secure = 1 nothing does.
 * desc.transport, or DTRAIN_TRANSPORT, says what to take:
 *
 *   NULL    shared memory where it can be had, else the connection
 *   shm     the same, and a warning in the log where it cannot be had
 *   unix    unix sockets, also with a token; all ranks are on the root's host
 *   tcp     TCP, which needs a token or insecure
 *   mpi     messages of MPI, in a program that defines DTRAIN_MPI; see >>from_mpi
 *
 * The file of dtrain_comm_trace says what each pair of ranks uses, and why they share no memory if they do not.
 *
 * HEARTBEATS go between the leader and each other rank, over the connection that the rank has to the leader. One goes
 * every quarter of heartbeat_ms, or every sixteenth of timeout_ms if that is less. They are at least 500 ms apart,
 * unless a quarter of heartbeat_ms is less. None goes while other control messages do. Ranks may have different
 * heartbeat_ms: the shorter one of the two says how often, and each rank judges its peers by its own. A negative one
 * sends as the default does. Ranks of >>from_mpi send one every quarter of heartbeat_ms to each peer.
 *
 * FIREWALLS may forget a connection that is idle. So each TCP connection sends a few bytes every second while it is
 * idle, if the system can do that. On Linux a data connection counts as dead when its other host answers nothing that
 * is sent on it for heartbeat_ms. With reconnect_ms it is made again, else the group ends with DTRAIN_ERR_PEER_LOST.
 *
 * SEALING. With a token, every connection that leaves the host is encrypted and authenticated with ChaCha20-Poly1305.
 * Each connection and direction has a key of its own, made from the token and both sides' nonces. A connection's two
 * addresses say whether it leaves the host, and both sides prove what they found. Between two network namespaces of
 * one host it does. Collectives may still use memory that these share, as it never leaves the host.
 *
 * Before a connection has its keys, both sides say who they are, in the clear. That is: rank, number of ranks and
 * version; the job's name; process number, program and host. Why a rank is refused is in the clear, too.
 *
 *   secure = 1 or DTRAIN_SECURE=1    seals the connections inside the host, too
 *   secure = -1 or DTRAIN_SECURE=0   seals none: for a network that is yours alone; set it on every rank
 *   1 on one rank and -1 on another  the ranks do not meet (DTRAIN_ERR_MISMATCH)
 *
 * A tunnel whose two ends look local, such as that of ssh -L, is not sealed unless you ask for it. Each sealed
 * connection takes 260 KB of memory.
 *
 * A record that was changed, injected, replayed, moved or dropped ends its connection before any of it is used. That
 * ends the group with DTRAIN_ERR_CORRUPT, or with DTRAIN_ERR_PEER_LOST on a control connection. With reconnect_ms the
 * connection is made again, with other keys. Sealing does not protect against:
 *
 *   a token that leaks later   it decrypts the recorded traffic of its jobs: there is no forward secrecy
 *   members of the group       who holds the token can read and forge everything
 *   a weak token               it can be guessed from a recorded handshake: take 16 random bytes or more
 *   traffic analysis           sizes and times of messages stay visible
 *
 *   source    RFC 8439 (ChaCha20-Poly1305), RFC 5869 (HKDF-SHA256) */
typedef struct dtrain_comm_desc {
    int rank;                /* used when world_size is not 0 */
    int world_size;          /* 0: from the environment */
    const char *root;        /* where rank 0 listens: "host:port", "[address]:port", "unix:/path", "unix:@name" */
    const char *token;       /* the group's secret, 16 to 255 bytes; NULL: the environment's, or none */
    const char *fingerprint; /* of model and program, at most 127 bytes, compared when ranks meet; NULL: "" */
    const char *listen_on;   /* interface or address of this rank, or "none"; NULL: what routes to the root */
    const char *transport;   /* "tcp", "unix", "shm" or "mpi"; NULL: DTRAIN_TRANSPORT, else the fastest */
    int insecure;            /* 1: allows TCP without a token, which lets in whoever can connect */
    int secure;              /* 1: seal all connections; -1: none; 0: with a token, those that leave the host */
    int connections;         /* to each peer, used in turn; 0: 1; at most 8 */
    int64_t timeout_ms;      /* deadline of every blocking or async call; 0: 60,000; negative: none */
    int64_t heartbeat_ms; /* a rank that is silent for this long is lost: see HEARTBEATS; 0: 15,000; negative: never */
    int64_t reconnect_ms; /* how long a reset connection may take to come back; 0: a reset ends the group */
    dtrain_algorithm algorithm;  /* of every collective that has it; 0: chosen by kind, size and transport */
    dtrain_order order;          /* of reductions; 0: the tree's */
    int node_ranks;              /* ranks r with equal r / node_ranks share a host; 0: detected */
    int checksum;                /* 1: messages carry a checksum of their data; -1: none; 0: over your transports */
    dtrain_progress progress;    /* 0: a service thread */
    size_t stack_bytes;          /* of dtrain_run_threads' threads; 0: 8 MiB; at least 64 KiB, which calls need */
    dtrain_allocator *allocator; /* NULL: one of the group's own, on the C library */
    void (*on_address)(void *user, const char *address); /* rank 0 listens there; tells which port a port of 0 became */
    void *on_address_user;
    const char *trace_on_failure; /* path prefix, copied (see dtrain_comm_trace); NULL: DTRAIN_TRACE, else none */
    dtrain_quorum quorum;         /* who may go on after a loss; alike on every rank. 0: a majority */
} dtrain_comm_desc;

/* Makes the group of processes that desc or the environment describes.
 *
 * If neither describes one, the group is a world of one rank. The first call on such a world logs a warning, once a
 * process. DTRAIN_WORLD_SIZE=1 says that one rank is meant.
 *
 * Rank 0 listens at the root. If that is a name, it listens at all addresses of the name that its host has. The others
 * reach it there within timeout_ms, in any order. Two ranks connect to each other when they first need it. One service
 * thread looks after the connections of this group and of all groups made from it. With DTRAIN_PROGRESS_POLL there is
 * no such thread. If the root is a name, each rank but rank 0 looks it up on a thread of its own. It does so again
 * until it reaches rank 0 or timeout_ms has passed. A forked child cannot use its parent's group.
 *
 *   comm     out: this rank's end; NULL on an error
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID   a variable or field is missing or malformed; the text names it
 *            DTRAIN_ERR_DENIED    no token or another one; a process of another job or user; a stranger at the root
 *            DTRAIN_ERR_MISMATCH  another world size, wire version, byte order or fingerprint; a rank taken twice; a
 *                                 complete group at the root that does not end within 5 s
 *            DTRAIN_ERR_TIMEOUT   the text says who came, who did not, and which variables were used
 *            DTRAIN_ERR_IO        the system refused a socket or a thread
 *
 * any thread; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_create(dtrain_comm **comm, const dtrain_comm_desc *desc);

/* Starts what dtrain_comm_create does. Call dtrain_comm_ready until it says that the group has formed.
 *
 * On rank 0 a host name may take 50 ms.
 *
 *   comm, desc   as dtrain_comm_create
 *   errors       what is found at once, such as bad arguments; dtrain_comm_ready returns the others
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_comm_create_async(dtrain_comm **comm, const dtrain_comm_desc *desc);

/* Says whether a group from dtrain_comm_create_async has formed.
 *
 * With DTRAIN_PROGRESS_POLL, call dtrain_comm_poll in between: it forms the group.
 *
 *   ready     out: 1 when the group can be used
 *   returns   DTRAIN_OK while the group may still form; else an error as of dtrain_comm_create, after which the group
 *             can only be destroyed
 *
 * one thread per object; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_comm_ready(dtrain_comm *comm, int *ready);

/* Makes the `ranks` ends of a group for a program that brings its own threads: comms[r] is rank r's end.
 *
 *   comms    out: ranks pointers, NULL on an error. One thread at a time uses each, and each is destroyed by itself
 *   ranks    1 or more
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID, DTRAIN_ERR_MEMORY
 *
 * any thread */
DTRAIN_API_MUST dtrain_status dtrain_threads_create(dtrain_comm **comms, int ranks, const dtrain_comm_desc *desc);

/* Runs body once for each rank, on a thread of its own, and returns when all have returned.
 *
 *   ranks     1 or more
 *   body      gets user and its rank's end, which is destroyed after body returns. If body returns an error, its ends
 *             of other groups count as gone, too, but the program still destroys them
 *   returns   DTRAIN_OK if every body returned it; else the status of the rank that failed first, with a text that
 *             begins with that rank's number. Ranks that wait for it get DTRAIN_ERR_PEER_LOST
 *
 * any thread; blocks until the last body returns */
DTRAIN_API_MUST dtrain_status dtrain_run_threads(int ranks, dtrain_status (*body)(dtrain_comm *world, void *user),
                                                 void *user, const dtrain_comm_desc *desc);

/* Leaves the group and frees this end; NULL is legal.
 *
 * It never waits for a peer, but for two exceptions. The last group over a transport of your own gives peers up to a
 * second to take what was sent to them. So does a group over TCP if a peer is still sending to this rank. Pending work
 * is cancelled, and its handles are freed with the group. If no error came before, the log says how many handles nobody
 * waited for.
 *
 *   what peers do                               what they get
 *   receive what this rank has sent             the data
 *   need this rank for more                     DTRAIN_ERR_PEER_LOST, "rank 2 has left the group"
 *   a collective that this rank has not ended   the same
 *   send messages to each other                 everything as before
 *
 * Two cases do break the group. An exchange that needs this rank has stopped in the middle of its other message. Or
 * this rank had met an error in the group before it left; the peers' text gives that as the reason.
 *
 * A process that ends without this call is lost in every group that it has not destroyed, and in no other. Over a
 * transport of your own a rank is lost if the table returns DTRAIN_ERR_PEER_LOST for it, or if `alive` returns 0.
 *
 * one thread per object */
DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm);

/* Return this end's rank, 0 for NULL, and the number of ranks, 1 for NULL.
 *
 * any thread */
DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm);
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm);

/* Returns the group's allocator: read its counters, or give it to objects that are to share it.
 *
 * any thread */
DTRAIN_API dtrain_allocator *dtrain_comm_allocator(dtrain_comm *comm);

/* Returns the nanoseconds that this rank's callers have spent in blocking calls and waits of the group.
 *
 *   counted       the group's own calls, and those of everything made from it: groups by split and mesh, DDP, FSDP,
 *                 pipelines, servers, local SGD. Threads that wait at the same time add up
 *   not counted   waits of the library's own threads, and dtrain_comm_poll
 *
 * The survivors' group of dtrain_comm_shrink starts at 0. It adds to the group that the broken one was made from.
 *
 * any thread */
DTRAIN_API int64_t dtrain_comm_blocked_ns(const dtrain_comm *comm);

/* Writes this rank's last 256 operations in the group to a file that chrome://tracing and Perfetto load.
 *
 * The file has one event for each operation, the one under way included. pid is the rank, tid the group. args hold:
 *
 *   the call        its text, number, dtype, count, bytes and algorithm
 *   awaited         the peer that it waited for last
 *   status          how it ended
 *   ..._ns          when it was called, started, moved its first bytes and ended, by CLOCK_MONOTONIC
 *
 * An event "transport" for each peer says what carries the bytes: shared memory, a unix socket or TCP. If the ranks
 * share no memory, it says why.
 *
 * tools/dtrace.c merges the files of all ranks (see >>disagree).
 *
 * Set desc.trace_on_failure, or DTRAIN_TRACE in the environment, to have the file written by the first operation that
 * fails. It is PREFIX.rank-N.json, or PREFIX.group-G.rank-N.json in a group made from another. A deadline after which
 * the call can be made again does not count as a failure. The log says if the file cannot be written. Another thread
 * writes it. The failing call and dtrain_comm_destroy each wait up to 1 s for it, so a file system that hangs holds
 * neither.
 *
 *   path     at most 4,095 bytes; the file is replaced once the new one is whole on disk, else untouched
 *   errors   DTRAIN_ERR_INVALID  no group, no path, or a forked child
 *            DTRAIN_ERR_IO       the system refused; only dtrain_last_error has the text
 *   source   Trace Event Format of the catapult project
 *
 * any thread, also while operations are under way; not after dtrain_comm_destroy */
DTRAIN_API_MUST dtrain_status dtrain_comm_trace(dtrain_comm *comm, const char *path);

/* Splits `count` elements over the ranks of `comm` and says which part is `rank`'s.
 *
 * Parts are contiguous, in rank order, and differ by at most one element: the first count % size ranks hold one more. A
 * rank beyond `count` holds none. The library cuts everything over ranks by this rule.
 *
 *   rank      0 <= rank < size of comm
 *   begin     out: index of the part's first element; may be NULL
 *   returns   the number of elements in the part; 0 for a bad rank or a NULL comm
 *
 * any thread */
DTRAIN_API size_t dtrain_shard(const dtrain_comm *comm, size_t count, int rank, size_t *begin);

/* Reduces `count` elements over all ranks; every rank gets the whole result.
 *
 *   in, out   count elements of dtype, at any alignment; the same buffer, or two that do not overlap
 *   dtype     F64, F32, F16, BF16; I8, U8, I32, U32, I64, U64, which wrap around
 *   op        DTRAIN_SUM, PROD, MIN, MAX (a NaN wins); DTRAIN_MEAN for floats divides once by the world size;
 *             DTRAIN_AND, OR, XOR for integers
 *   order     the binary tree over ranks (see >>order), unless the desc frees it
 *   errors    DTRAIN_ERR_MISMATCH   another rank called something else; the text quotes both calls
 *             DTRAIN_ERR_TIMEOUT    the deadline of comm passed; usable again if nothing had moved
 *             DTRAIN_ERR_PEER_LOST  a rank has died and the group is broken (see dtrain_comm_shrink), or a rank that is
 *                                   needed has left (see dtrain_comm_destroy)
 *             DTRAIN_ERR_INVALID    bad arguments; another thread is in a call on comm; comm is destroyed
 *             on any error the contents of out are undefined, in is unchanged unless in == out
 *
 * A rank that only sends in a call may return DTRAIN_OK before its peer finds a mismatch. That holds for dtrain_send
 * and for some ranks of broadcast, reduce, gather and scatter. The next operation in which this rank receives has the
 * error.
 *
 * Once this rank knows that the group is broken, each call fails at once, also one that only sends. A destroyed comm is
 * found out only until somebody else takes its memory.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_all_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                dtrain_dtype dtype, dtrain_op op);

/* Reduces `count` elements over all ranks; each rank gets its shard of the result (see dtrain_shard).
 *
 *   in       count elements; unchanged, except for this rank's shard in place
 *   out      as many elements as this rank's shard has; in place means out == in + begin of the shard
 *   others   as dtrain_all_reduce
 *
 * In the _v form rank r gets elements [offsets[r], offsets[r] + counts[r]).
 *
 *   counts, offsets   one for each rank, the same on every rank; parts may be empty and leave gaps. offsets NULL: parts
 *                     follow each other
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
 * dtrain_reduce_scatter_v. Parts must not overlap. Elements between them are unchanged.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_all_gather(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                dtrain_dtype dtype);
DTRAIN_API_MUST dtrain_status dtrain_all_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                                  const size_t *offsets, dtrain_dtype dtype);

/* Copies `count` elements from rank root to every rank, in place.
 *
 *   buffer   count elements, read on the root and overwritten elsewhere
 *   dtype    any of whole bytes
 *   root     0 <= root < size of comm
 *   errors   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype,
                                               int root);

/* Reduces `count` elements over all ranks to rank root.
 *
 *   in       count elements
 *   out      on the root: count elements, may be the same as in; elsewhere: not touched, may be NULL
 *   others   as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_reduce(dtrain_comm *comm, const void *in, void *out, size_t count,
                                            dtrain_dtype dtype, dtrain_op op, int root);

/* Reduce `count` elements over the ranks up to this one. Rank r gets the result of ranks 0 to r, from dtrain_exscan of
 * ranks 0 to r - 1. The result has the bits that dtrain_all_reduce gives in a group of these ranks alone.
 *
 *   in, out   count elements; the same buffer, or two that do not overlap. dtrain_exscan does not touch rank 0's out,
 *             which may be NULL
 *   op        DTRAIN_MEAN divides by the number of these ranks
 *   order     the binary tree over ranks, also where the desc frees it
 *   others    as dtrain_all_reduce
 *   source    Hillis and Steele, Data Parallel Algorithms, CACM 29(12), 1986
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_scan(dtrain_comm *comm, const void *in, void *out, size_t count,
                                          dtrain_dtype dtype, dtrain_op op);
DTRAIN_API_MUST dtrain_status dtrain_exscan(dtrain_comm *comm, const void *in, void *out, size_t count,
                                            dtrain_dtype dtype, dtrain_op op);

/* Joins every rank's shard of `count` elements on rank root.
 *
 *   in       this rank's shard (see dtrain_shard); in place on the root means in == out + begin of the shard
 *   out      on the root: count elements; elsewhere: not touched, may be NULL
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * The _v form takes parts as dtrain_all_gather_v does, the same arrays on every rank.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_gather(dtrain_comm *comm, const void *in, void *out, size_t count,
                                            dtrain_dtype dtype, int root);
DTRAIN_API_MUST dtrain_status dtrain_gather_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                              const size_t *offsets, dtrain_dtype dtype, int root);

/* Gives each rank its shard of rank root's `count` elements.
 *
 *   in       on the root: count elements; elsewhere: not read, may be NULL
 *   out      this rank's shard (see dtrain_shard); in place on the root means out == in + begin of the shard
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * The _v form takes parts as dtrain_all_gather_v does, the same arrays on every rank.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_scatter(dtrain_comm *comm, const void *in, void *out, size_t count,
                                             dtrain_dtype dtype, int root);
DTRAIN_API_MUST dtrain_status dtrain_scatter_v(dtrain_comm *comm, const void *in, void *out, const size_t *counts,
                                               const size_t *offsets, dtrain_dtype dtype, int root);

/* Gives each rank its shard of every rank's `count` elements.
 *
 *   in       count elements: rank r gets shard r (see dtrain_shard)
 *   out      this rank's shard of rank 0's elements, then of rank 1's, and so on: size times the shard's length. May be
 *            the same as in if count is a multiple of the world size
 *   dtype    any of whole bytes
 *   errors   as dtrain_all_reduce
 *
 * In the _v form you give the parts. offsets NULL: parts follow each other.
 *
 *   in_counts, in_offsets     rank r gets elements [in_offsets[r], in_offsets[r] + in_counts[r]) of in
 *   out_counts, out_offsets   what rank r gives goes to [out_offsets[r], out_offsets[r] + out_counts[r]) of out; these
 *                             parts must not overlap
 *   in place                  in == out, with the same arrays for both
 *   errors                    DTRAIN_ERR_MISMATCH  a rank gives another count than its peer expects; the text has both
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_all_to_all(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                dtrain_dtype dtype);
DTRAIN_API_MUST dtrain_status dtrain_all_to_all_v(dtrain_comm *comm, const void *in, const size_t *in_counts,
                                                  const size_t *in_offsets, void *out, const size_t *out_counts,
                                                  const size_t *out_offsets, dtrain_dtype dtype);

/* Returns when every rank has called it. Errors are those of dtrain_all_reduce.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_barrier(dtrain_comm *comm);

/* Sends `count` elements to rank peer, which calls dtrain_recv with the same count and dtype.
 *
 * Messages from one rank to another keep their order. The call may return before the peer has received. Send and
 * receive a message between the same two collectives of the group, or one call returns DTRAIN_ERR_MISMATCH.
 *
 *   in       count elements
 *   dtype    any of whole bytes
 *   peer     another rank than this one
 *   errors   as dtrain_all_reduce
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_send(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype,
                                          int peer);

/* Receives `count` elements that rank peer sends with dtrain_send.
 *
 * On a broken group it still takes a message that has arrived whole; without one it fails at once. So what dtrain_send
 * sent before the group broke is not lost. It takes none after dtrain_comm_abort, nor after another call of this rank
 * has stopped in the middle of a message. A send that has stopped so does not count.
 *
 *   out      count elements
 *   errors   as dtrain_all_reduce; on DTRAIN_ERR_MISMATCH the message has another count or dtype, and out is unchanged
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_recv(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype, int peer);

/* Sends to one rank and receives from another at the same time. Use it for rings and halos, where every rank sends.
 *
 *   to, from   other ranks than this one, the same or two; -1: none. They call dtrain_exchange, or dtrain_send and
 *              dtrain_recv, with the same counts
 *   in, out    must not overlap
 *   errors     as dtrain_recv
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_exchange(dtrain_comm *comm, const void *in, size_t in_count, int to, void *out,
                                              size_t out_count, int from, dtrain_dtype dtype);

/* Starts what the function without _async does.
 *
 * A collective or an exchange starts after all earlier calls of this rank in the group, and later calls start after it.
 * Blocking calls take part in this order. Sends and recvs between two collectives move together, and each is done when
 * its own message has moved. So messages of any size may cross, and a send does not wait for a recv. Messages to one
 * peer keep their order, and so do messages from one peer.
 *
 *   work     out: the handle, to be given to dtrain_work_wait once; NULL on an error
 *   buffers  belong to the operation until it is done, and so do arrays of counts and offsets
 *   errors   bad arguments at once; all others from dtrain_work_wait
 *
 * collective (send and recv: this rank and its peer): every rank of comm, same order; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_all_reduce_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                      dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_reduce_scatter_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                          dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_scan_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_exscan_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                  dtrain_dtype dtype, dtrain_op op, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_all_gather_async(dtrain_comm *comm, const void *in, void *out, size_t count,
                                                      dtrain_dtype dtype, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_broadcast_async(dtrain_comm *comm, void *buffer, size_t count, dtrain_dtype dtype,
                                                     int root, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_send_async(dtrain_comm *comm, const void *in, size_t count, dtrain_dtype dtype,
                                                int peer, dtrain_work **work);
DTRAIN_API_MUST dtrain_status dtrain_recv_async(dtrain_comm *comm, void *out, size_t count, dtrain_dtype dtype,
                                                int peer, dtrain_work **work);

/* Which function's work dtrain_start starts. */
typedef enum dtrain_call_kind {
    DTRAIN_CALL_ALL_REDUCE = 1601,
    DTRAIN_CALL_REDUCE_SCATTER,
    DTRAIN_CALL_ALL_GATHER,
    DTRAIN_CALL_BROADCAST, /* of out */
    DTRAIN_CALL_REDUCE,
    DTRAIN_CALL_GATHER,
    DTRAIN_CALL_SCATTER,
    DTRAIN_CALL_ALL_TO_ALL,
    DTRAIN_CALL_SCAN,
    DTRAIN_CALL_EXSCAN,
    DTRAIN_CALL_BARRIER,
    DTRAIN_CALL_SEND,
    DTRAIN_CALL_RECV,
    DTRAIN_CALL_EXCHANGE
} dtrain_call_kind;

/* What dtrain_start starts. Zero the whole struct, then set what the function of that name takes. */
typedef struct dtrain_call {
    dtrain_call_kind kind;
    const void *in;
    void *out;
    size_t count; /* of an exchange: in_count */
    dtrain_dtype dtype;
    dtrain_op op;
    int root;                        /* or the peer of a message; of an exchange: to */
    int from;                        /* of an exchange, and so is the next */
    size_t out_count;
    const size_t *counts, *offsets;  /* of the _v form, which counts ask for; of an all-to-all: in_counts, in_offsets */
    const size_t *out_counts, *out_offsets; /* of dtrain_all_to_all_v */
} dtrain_call;

/* Starts any call of a collective, of its _v form, or of a message.
 *
 * The functions that end in _async are short forms of it. What they say holds here, too.
 *
 *   call     copied; the arrays that it names belong to the operation until it is done
 *   work     out: the handle, to be given to dtrain_work_wait once; NULL on an error
 *   errors   bad arguments at once; all others from dtrain_work_wait
 *
 * collective (messages: this rank and its peer): every rank of comm, same order; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_start(dtrain_comm *comm, const dtrain_call *call, dtrain_work **work);

/* Says whether an operation has ended, with or without an error; 1 for NULL. It drives nothing.
 *
 * any thread; never blocks */
DTRAIN_API int dtrain_work_done(const dtrain_work *work);

/* Waits until an operation has ended, returns its result and frees its handle. Call it once for each handle.
 *
 * The operation's deadline counts from the call that started it.
 *
 *   errors    DTRAIN_ERR_INVALID for NULL, and for a handle that was waited for before; else the operation's
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_work_wait(dtrain_work *work);

/* Breaks the group: every pending and later operation on all its ranks ends with DTRAIN_ERR_ABORTED.
 *
 * The text has this rank's number and `why`. A blocked call returns at once on any rank. Over a transport of your own
 * it returns as soon as send or recv keeps its deadline, some milliseconds later. Free buffers once the calls that use
 * them have returned. A group that is broken already keeps its first cause.
 *
 *   why       at most 300 characters are kept; NULL: none
 *   returns   DTRAIN_OK; DTRAIN_ERR_INVALID for NULL and in a forked child
 *
 * any thread, before dtrain_comm_destroy; never blocks */
DTRAIN_API_MUST dtrain_status dtrain_comm_abort(dtrain_comm *comm, const char *why);

/* Opens a fuse: it notes the group's blocking calls, and dtrain_fuse_end runs many small ones as one.
 *
 * A noted call returns DTRAIN_OK. A call with bad arguments returns its error at once and is not noted. The buffers
 * belong to the fuse until dtrain_fuse_end. A buffer that a call writes must overlap no other.
 *
 *   messages      sends, recvs and exchanges run first, all together: every rank may send to and receive from every
 *                 other, of any size, in any order
 *   collectives   run in the order of their calls, the same calls on every rank. Neighbours become one operation, with
 *                 the same bits; messages between them do not matter
 *   neighbours    all_reduces of one dtype and op in the tree order, or broadcasts of one dtype and root, of up to
 *                 1 MiB each and 4 MiB together
 *   errors        DTRAIN_ERR_INVALID  a fuse is open already
 *
 * Calls that cannot wait for dtrain_fuse_end return DTRAIN_ERR_INVALID inside a fuse: the asynchronous ones,
 * check_equal, those that make groups, and those of objects that use this very group.
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_fuse_begin(dtrain_comm *comm);

/* Runs all noted calls and closes the fuse.
 *
 *   returns   the first error; DTRAIN_ERR_INVALID without dtrain_fuse_begin. A text names a fused operation by its
 *             first call: "all_reduce #4 (sum, f32 x 1024, 3 fused)"
 *
 * collective: every rank of comm, same order, where collectives were noted; blocks up to timeout_ms an operation */
DTRAIN_API_MUST dtrain_status dtrain_fuse_end(dtrain_comm *comm);

/* Advances the group's async work on the calling thread for about budget_us, or until nothing can move.
 *
 * After something has moved it looks again for up to a quarter of the budget, as a peer may be polling, too.
 *
 * Between processes it also answers peers and sends heartbeats: call it several times in every heartbeat_ms. A call
 * that waits for an operation does the same, also for what this rank has started in other groups of the same world.
 * While this rank computes or waits for something else, the peers that need it wait, too.
 *
 *   returns   DTRAIN_OK, even if work has failed: dtrain_work_wait returns that error
 *   errors    DTRAIN_ERR_INVALID  comm is NULL, or has a service thread
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_comm_poll(dtrain_comm *comm, int64_t budget_us);

/* Compares the bits of `count` elements of dtype on all ranks with rank 0's.
 *
 *   dtype    any of whole bytes
 *   errors   DTRAIN_ERR_MISMATCH  they differ. The text, the same on every rank, names the first rank that differs from
 *                                 rank 0, and the first element that differs there
 *            others as dtrain_all_reduce
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_comm_check_equal(dtrain_comm *comm, const void *data, size_t count,
                                                      dtrain_dtype dtype);

/* The size that dtrain_store_get gives for a key that nobody has set. */
#define DTRAIN_STORE_ABSENT ((size_t)-1)

/* Sets key to a string of bytes that every rank can get. It is for a program's own set-up, not for tensors.
 *
 * A world and all groups made from it share one store. Rank 0 of the world holds it: when that rank is gone, so is the
 * store, also for groups that dtrain_comm_shrink made. To give bytes to every rank at once, use dtrain_broadcast with
 * DTRAIN_U8.
 *
 *   key      1 to 255 characters
 *   value    up to 65,536 bytes; the store holds up to 64 MiB
 *   errors   DTRAIN_ERR_MEMORY  the store is full: see dtrain_store_delete
 *            DTRAIN_ERR_TIMEOUT, DTRAIN_ERR_PEER_LOST as dtrain_all_reduce
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_store_set(dtrain_comm *comm, const char *key, const void *value, size_t bytes);

/* Gets the value that key was last set to; dtrain_store_wait first waits until it is set.
 *
 *   value    out: at most capacity bytes of the value
 *   bytes    out: the value's whole size, also if it is larger than capacity; DTRAIN_STORE_ABSENT: not set
 *   errors   as dtrain_store_set
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_store_get(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                               size_t *bytes);
DTRAIN_API_MUST dtrain_status dtrain_store_wait(dtrain_comm *comm, const char *key, void *value, size_t capacity,
                                                size_t *bytes);

/* Deletes key and its value, and frees their memory on rank 0. Any rank may delete a key, whoever set it.
 *
 * A key that is not set is no error. When the call returns, dtrain_store_get gives DTRAIN_STORE_ABSENT on every rank. A
 * call of dtrain_store_wait for the key waits until the key is set again.
 *
 *   errors   DTRAIN_ERR_INVALID  no group, or a bad key
 *            DTRAIN_ERR_TIMEOUT, DTRAIN_ERR_PEER_LOST as dtrain_store_set; the key may be deleted or not
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_store_delete(dtrain_comm *comm, const char *key);

#ifdef __cplusplus
}
#endif

#endif
