/* ---- >>server ----
 * The parameter server: one rank of a group to which all others, the workers, send their gradients.
 *
 * Synchronous: the server trains too. It folds the gradients of all ranks in the order of >>order and sends the mean
 * back, the same bits as dtrain_aggregator_all_reduce gives. A worker that dies is left out from there on.
 *
 * Asynchronous: the server holds the parameters and the optimizer and only serves. A worker pushes the gradients of
 * its step, pulls the newest parameters, and goes on; it waits for a slower one only when it would otherwise be more
 * than `staleness` steps ahead of it (stale synchronous parallel).
 *
 *     DTRAIN_CHECK(dtrain_server_push(server, weight));      after its backward pass
 *     DTRAIN_CHECK(dtrain_server_pull(server));
 *
 * Each worker and the server are a group of two of their own, so that each can be lost by itself. */
#ifndef DTRAIN__SERVER_H
#define DTRAIN__SERVER_H
#include "../train/train.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_server dtrain_server;

/* How a server works; the same on every rank. Zero means the default. */
typedef struct dtrain_server_desc {
    int server;       /* its rank; 0 */
    int async;        /* 1: asynchronous */
    int staleness;    /* asynchronous: steps that a worker may be ahead of the slowest; 0: 4; negative: none */
    int no_broadcast; /* 1: the parameters are the same on all ranks already */
    const dtrain_compress_desc *compress; /* copied; a kind that packs: TOPK of one ratio, taken piece by piece, BF16,
                                           * F16, INT8, FP8, SIGN, or an OWN without reduce. NULL: as they are */
} dtrain_server_desc;

/* Makes one rank's end of a parameter server, and gives every rank the server's parameters, frozen ones too.
 *
 * Memory, in bytes for P trained elements: synchronous, up to 2 MiB on a worker and 1 MiB a worker on the server; with
 * compression, 4 P on each rank for what was not sent. Asynchronous, 4 P on a worker and 4 P a worker on the server;
 * with compression fewer, but 4 P on a worker for what was not sent, and on the server 4 P a worker for what each has.
 *
 *   comm     must outlive it; may be used for other things, and may break, without harm to it
 *   table    copied; its data and grad are used until destroyed; the same on every rank but for addresses
 *   desc     NULL: all defaults
 *   errors   DTRAIN_ERR_INVALID      a bad table, a rank outside the group, constants out of range
 *            DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32; a compressor that does not pack; a transport of your
 *                                    own
 *            DTRAIN_ERR_MISMATCH     tables or descs differ; the text names the parameter or field, and who gave what
 *            DTRAIN_ERR_ABORTED      another rank could not make its end; the text has its number and why
 *            DTRAIN_ERR_MEMORY; those of dtrain_broadcast and dtrain_comm_split
 *            on every rank, whichever it was
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms a call of those two */
DTRAIN_API_MUST dtrain_status dtrain_server_create(dtrain_server **server, dtrain_comm *comm, const dtrain_param *table,
                                                   size_t count, const dtrain_server_desc *desc);

/* Makes the aggregator of a server, which must outlive it; every call has the table's parameters, whose memory may
 * move.
 *
 * Synchronous: sends each rank's sums and weight to the server, and gives every rank the mean, in pieces that are on
 * their way in both directions at once. With compression each piece is packed by the worker, folded as float32,
 * packed by the server, and what either packing loses is kept for the next step; all ranks get the same bits.
 * When a worker is lost, the mean is over those that are left, by their weights: in the step in which it is lost, from
 * the first piece that it did not send. total_weight is that of the last piece.
 *
 * Asynchronous, on workers: dtrain_server_push, then dtrain_server_pull. *total_weight is 0, as the server applies
 * the gradients: dtrain_train_step does not. After a pull that came too late, call dtrain_server_pull first.
 *
 *   errors   DTRAIN_ERR_PEER_LOST  the server is lost; the text has its rank. For good, as the next three
 *            DTRAIN_ERR_CORRUPT    a rank sent what no rank sends; the text names it
 *            DTRAIN_ERR_TIMEOUT    synchronous: a rank has sent nothing for timeout_ms; the text names it
 *            DTRAIN_ERR_ABORTED    the server gave up; the text says why
 *            DTRAIN_ERR_INVALID    another table, a bad weight, or the asynchronous server's own rank
 *
 * any thread; its aggregate is collective over the server and the workers that are left, and blocks up to timeout_ms a
 * message */
DTRAIN_API dtrain_aggregator dtrain_aggregator_server(dtrain_server *server);

/* Sends the sums in the table's gradients to an asynchronous server, which divides them by weight and applies them.
 *
 * Returns when they are copied. They count from the parameters of the last pull, of which each push needs one; the
 * first has those of dtrain_server_create.
 *
 *   weight   of the step's examples; 0: nothing is applied, but the step counts
 *   errors   DTRAIN_ERR_INVALID    no pull since the last push; the server's own rank; it is synchronous; a bad weight
 *            DTRAIN_ERR_PEER_LOST  the server is lost; the text has its rank
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_server_push(dtrain_server *server, double weight);

/* Fetches the asynchronous server's newest parameters into the table.
 *
 * A worker that has pushed c gradients gets them once every other worker that is left has pushed c - staleness, and
 * so they hold all but the last `staleness` steps of the slowest. How many steps of the slowest they lack is the
 * staleness of the gradient that is computed from them: never above the bound. Packed, what has changed since
 * the last pull travels, and what packing loses of it comes with later pulls. The age of a gradient, the number of
 * updates between its pull and its own application, is so never above (workers - 1) * (2 * staleness + 1).
 *
 *   errors   DTRAIN_ERR_TIMEOUT    a slower worker did not come within timeout_ms; the text says which, and how far
 *                                  behind. It can be called again
 *            DTRAIN_ERR_PEER_LOST  the server is lost; the text has its rank
 *            DTRAIN_ERR_INVALID    as dtrain_server_push
 *   source   Ho and others, More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013
 *
 * one thread per object; blocks up to timeout_ms a message, for the server's answer twice that */
DTRAIN_API_MUST dtrain_status dtrain_server_pull(dtrain_server *server);

/* Says that this worker is done: nobody waits for it any more. A worker that is destroyed without it counts as lost.
 *
 *   errors   as dtrain_server_push; DTRAIN_OK for one that has left already
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_server_leave(dtrain_server *server);

#define DTRAIN_STALENESS_BINS 16

/* What an end of a server has done. */
typedef struct dtrain_server_stats {
    uint64_t steps;                                   /* synchronous: aggregated; asynchronous: gradients pushed, on the
                                                       * server those of all workers */
    uint64_t updates;                                 /* of the asynchronous server: gradients applied */
    uint64_t pulls, waits;                            /* on the server those of all; how many had to wait for another */
    uint64_t largest_staleness, staleness_sum;        /* of the gradients in updates; on a worker of those it pulled */
    uint64_t staleness_counts[DTRAIN_STALENESS_BINS]; /* how many had 0, 1, ...; the last: that or more */
    uint64_t largest_age, age_sum;                    /* of the gradients in updates; on a worker 0 */
    uint64_t sent_bytes, received_bytes;              /* of gradients and parameters */
    int workers, left, lost;                          /* on the server: there now, left, lost; on a worker 0 */
} dtrain_server_stats;

/* How an asynchronous server applies what is pushed. */
typedef struct dtrain_serve_desc {
    dtrain_optimizer *optimizer; /* made from the server's table */
    dtrain_schedule schedule;    /* of the learning rate; its steps are updates */
    float max_norm;              /* of each gradient; 0: not clipped */
    /* Called after each update with the worker whose gradient it was; what is saved there is whole. May be NULL. A
     * status other than DTRAIN_OK ends dtrain_server_run with it. */
    dtrain_status (*on_update)(void *user, int worker, const dtrain_server_stats *stats);
    void *user;
} dtrain_serve_desc;

/* Serves until no worker is left: all have left or are lost. The table's data are the parameters.
 *
 * A lost worker is left out, with a line in the log; a gradient that it had not sent in full is not applied.
 *
 *   errors   DTRAIN_ERR_INVALID  another rank than the server's; it is synchronous; no optimizer
 *            DTRAIN_ERR_TIMEOUT  no worker has sent anything for timeout_ms; the text names the slowest. It can be
 *                                called again
 *            that of on_update: it can be called again
 *
 * one thread per object; blocks until then */
DTRAIN_API_MUST dtrain_status dtrain_server_run(dtrain_server *server, const dtrain_serve_desc *desc);

/* Says what this end has done; zeroes for NULL.
 *
 * one thread per object */
DTRAIN_API dtrain_server_stats dtrain_server_get_stats(const dtrain_server *server);

/* Leaves the groups and frees this end; NULL is legal. Never waits for a peer.
 *
 * one thread per object */
DTRAIN_API void dtrain_server_destroy(dtrain_server *server);

#ifdef __cplusplus
}
#endif

#endif
