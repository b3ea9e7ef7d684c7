/* ---- >>server ----
 * The parameter server: one rank of a group, to which all others, the workers, send their gradients. It comes in two
 * forms.
 *
 * Synchronous: the server trains too. It adds up the gradients of all ranks in the order of >>order and sends the mean
 * back, with the bits of dtrain_aggregator_all_reduce. Use it as an aggregator (dtrain_aggregator_server). If a worker
 * dies, the others go on without it.
 *
 * Asynchronous: the server holds the parameters and the optimizer, and only serves (dtrain_server_run). A worker pushes
 * the gradients of its step, pulls the newest parameters, and goes on. It waits only if it would otherwise be more than
 * `staleness` steps ahead of the slowest worker (stale synchronous parallel):
 *
 *     DTRAIN_CHECK(dtrain_server_push(server, weight));      after the backward pass
 *     DTRAIN_CHECK(dtrain_server_pull(server));
 *
 * Both forms can pack what travels (compress in the desc). The server has a group of two with each worker, so that it
 * can lose one without the others. To see how much is sent, call dtrain_server_get_stats or
 * dtrain_aggregator_get_stats. The file examples/parameter_server.c shows both forms, and train_gpt --aggregator ps
 * trains through the first. */
#ifndef DTRAIN__SERVER_H
#define DTRAIN__SERVER_H
#include "../train/train.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dtrain_server dtrain_server;

/* How a server works; the same on every rank. Zero means the default. */
typedef struct dtrain_server_desc {
    int server;       /* rank of the server; 0 */
    int async;        /* 1: asynchronous */
    int staleness;    /* asynchronous: how many steps a worker may be ahead of the slowest; 0: 4; negative: none */
    int no_broadcast; /* 1: all ranks have the same parameters already */
    const dtrain_compress_desc *compress; /* copied; how gradients and parameters travel. A kind that packs: TOPK with
                                           * one ratio, which selects in each piece of 65,536 elements; BF16, F16, INT8,
                                           * FP8, SIGN, or an OWN without reduce. NULL: as float32 */
} dtrain_server_desc;

/* Makes one rank's end of a parameter server, and gives every rank the server's parameters, frozen ones too.
 *
 * Memory, at most, for P trained elements. F is 8 P bytes with error feedback (the default), and 0 without; packed is
 * the size of all packed gradients:
 *
 *   form           rank     without compression         with compression
 *   synchronous    worker   2.5 MiB                     2.5 MiB + F
 *                  server   1.5 MiB + 1 MiB a worker    1.5 MiB + 1.25 MiB a worker + F
 *   asynchronous   worker   0.5 MiB + 4 P               0.5 MiB + packed + F
 *                  server   0.5 MiB + 4 P a worker      0.5 MiB + (packed + 4 P) a worker
 *
 *   comm     must outlive the server. You may use it for other things, and it may break, without harm to the server
 *   table    copied; its data and grad are used until the server is destroyed. The same on every rank but for addresses
 *   desc     NULL: all defaults
 *   errors   the same on every rank, whichever rank has the cause:
 *            DTRAIN_ERR_INVALID      a bad table, a rank outside the group, constants out of range
 *            DTRAIN_ERR_UNSUPPORTED  a gradient that is not F32, or not in the CPU's memory; a compressor that does not
 *                                    pack; a transport of your own
 *            DTRAIN_ERR_MISMATCH     tables or descs differ; the text names the parameter or field, and both values
 *            DTRAIN_ERR_ABORTED      another rank could not make its end; the text names it and the cause
 *            DTRAIN_ERR_MEMORY; those of dtrain_broadcast and dtrain_comm_split
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms a call of those two */
DTRAIN_API_MUST dtrain_status dtrain_server_create(dtrain_server **server, dtrain_comm *comm, const dtrain_param *table,
                                                   size_t count, const dtrain_server_desc *desc);

/* Makes an aggregator of a server, which must outlive it.
 *
 * Every call gets the parameters of the server's table; their memory may have moved.
 *
 * Synchronous: each rank sends its sums and its weight to the server, and gets the mean. Pieces travel in both
 * directions at once. With compression the worker packs each piece, the server adds the pieces as float32 and packs the
 * sum. What either packing loses is added in the next step. All ranks get the same bits.
 *
 * A lost worker is left out from the first piece on that it did not send. The mean is over the others then, by their
 * weights. *total_weight is that of the last piece. With error feedback, workers send their weights before the pieces.
 * If a worker is lost between the two, the pieces that it did not send count as zeros in this step, and *total_weight
 * still includes its weight. It is left out from the next step on.
 *
 * Asynchronous, on workers: dtrain_server_push, then dtrain_server_pull. *total_weight is 0: the server applies the
 * gradients, and dtrain_train_step applies none. If the pull fails with DTRAIN_ERR_TIMEOUT, call dtrain_server_pull
 * before the next step.
 *
 *   errors   DTRAIN_ERR_INVALID    another table, a bad weight, or the asynchronous server's own rank
 *            After one of these the server cannot be used any more:
 *            DTRAIN_ERR_PEER_LOST  the server is lost; the text names its rank
 *            DTRAIN_ERR_CORRUPT    a rank sent data that is not valid; the text names it
 *            DTRAIN_ERR_TIMEOUT    synchronous: a rank has sent nothing for timeout_ms; the text names it
 *            DTRAIN_ERR_ABORTED    the server gave up; the text says why
 *
 * any thread; its aggregate is collective over the server and the workers that are left, and blocks up to timeout_ms a
 * message */
DTRAIN_API dtrain_aggregator dtrain_aggregator_server(dtrain_server *server);

/* Sends the gradient sums in the table to an asynchronous server, which divides them by weight and applies them.
 *
 * It returns when they are copied. Each push needs a pull before it; the first push follows dtrain_server_create.
 *
 *   weight   weight of the step's examples, at least 0. With 0 nothing is applied, but the step counts
 *   errors   DTRAIN_ERR_INVALID    no pull since the last push; called on the server's rank; a synchronous server; a
 *                                  bad weight; this worker has left
 *            DTRAIN_ERR_PEER_LOST  the server is lost; the text names its rank
 *
 * one thread per object */
DTRAIN_API_MUST dtrain_status dtrain_server_push(dtrain_server *server, double weight);

/* Fetches the newest parameters of an asynchronous server into the table.
 *
 * A worker that has pushed c gradients gets an answer once every other worker that is left has pushed c - staleness.
 * The staleness of a gradient is the number of the slowest worker's steps that its parameters lack. It never exceeds
 * desc.staleness. The age of a gradient is the number of updates between its pull and its own application. It never
 * exceeds (workers - 1) * (2 * staleness + 1).
 *
 * With compression, only the change since the last pull travels. What packing loses of it comes with later pulls.
 *
 *   errors   DTRAIN_ERR_TIMEOUT    a slower worker did not catch up within timeout_ms; the text names it and how far
 *                                  behind it is. You may call it again
 *            DTRAIN_ERR_PEER_LOST  the server is lost; the text names its rank
 *            DTRAIN_ERR_INVALID    as dtrain_server_push, but a pull needs no push before it
 *   source   Ho and others, More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013
 *
 * one thread per object; blocks up to timeout_ms a message, for the server's answer twice that */
DTRAIN_API_MUST dtrain_status dtrain_server_pull(dtrain_server *server);

/* Says that this worker is done, so that no other worker waits for it.
 *
 * Call it before dtrain_server_destroy: without it the worker counts as lost. A second call returns DTRAIN_OK.
 *
 *   errors   as dtrain_server_push
 *
 * one thread per object; blocks up to timeout_ms */
DTRAIN_API_MUST dtrain_status dtrain_server_leave(dtrain_server *server);

#define DTRAIN_STALENESS_BINS 16

/* What one end of a server has done so far. */
typedef struct dtrain_server_stats {
    uint64_t steps;                                   /* synchronous: steps aggregated; asynchronous: gradients pushed,
                                                       * on the server those of all workers */
    uint64_t updates;                                 /* asynchronous server: gradients applied */
    uint64_t pulls, waits;                            /* pulls, and how many of them had to wait for another worker; on
                                                       * the server those of all workers */
    uint64_t largest_staleness, staleness_sum;        /* over the gradients applied; on a worker over its pulls */
    uint64_t staleness_counts[DTRAIN_STALENESS_BINS]; /* how many had a staleness of 0, 1, ...; the last bin: that or
                                                       * more */
    uint64_t largest_age, age_sum;                    /* over the gradients applied; on a worker 0 */
    uint64_t sent_bytes, received_bytes;              /* of gradients and parameters */
    int workers, left, lost;                          /* on the server: workers present, left, lost; on a worker 0 */
} dtrain_server_stats;

/* How an asynchronous server applies gradients. */
typedef struct dtrain_serve_desc {
    dtrain_optimizer *optimizer; /* made from the server's table */
    dtrain_schedule schedule;    /* of the learning rate; its steps are updates */
    float max_norm;              /* each gradient is clipped to this norm; 0: not clipped */
    /* Called after each update, with the rank of the worker whose gradient it was; may be NULL. The parameters are
     * whole then, so that you may save them. A status other than DTRAIN_OK ends dtrain_server_run with it. */
    dtrain_status (*on_update)(void *user, int worker, const dtrain_server_stats *stats);
    void *user;
} dtrain_serve_desc;

/* Serves until every worker has left or is lost. The parameters are the table's data.
 *
 * If a worker is lost, the server logs it and goes on without it. A gradient that had not arrived in full is not
 * applied.
 *
 *   errors   DTRAIN_ERR_INVALID  called on another rank than the server's; a synchronous server; no optimizer
 *            DTRAIN_ERR_TIMEOUT  no worker has sent anything for timeout_ms; the text names the slowest. You may call
 *                                it again
 *            that of on_update: you may call it again
 *
 * one thread per object; blocks until then */
DTRAIN_API_MUST dtrain_status dtrain_server_run(dtrain_server *server, const dtrain_serve_desc *desc);

/* Returns what this end has done so far; zeros for NULL.
 *
 * one thread per object */
DTRAIN_API dtrain_server_stats dtrain_server_get_stats(const dtrain_server *server);

/* Leaves the groups and frees this end; NULL is legal. It never waits for a peer.
 *
 * one thread per object */
DTRAIN_API void dtrain_server_destroy(dtrain_server *server);

#ifdef __cplusplus
}
#endif

#endif
