/* ---- >>transport ----
 * A transport moves bytes from rank to rank and knows nothing of tensors. It is two functions over a reliable, ordered
 * stream of bytes from each rank to each other one. Fill the table and give it to dtrain_comm_from_transport.
 * Everything runs over it: collectives, groups of its ranks, meshes and all that is built on them. */
#ifndef DTRAIN__TRANSPORT_H
#define DTRAIN__TRANSPORT_H
#include "../tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A run of bytes on its way to or from one peer. */
typedef struct dtrain_transfer {
    int peer;
    unsigned char *data; /* read when it is sent, written when it is received */
    size_t bytes;
    size_t moved; /* how many of them have moved; the transport adds to it */
    int more;     /* sending: more bytes to the same peer follow at once, so a transport may wait for them */
} dtrain_transfer;

/* A rank's part of a vector, in elements. */
typedef struct dtrain_extent {
    size_t begin, count;
} dtrain_extent;

/* One rank's end of a transport. send and recv are required; every other function may be NULL.
 *
 * send and recv move up to `bytes` bytes of the stream to or from `peer`. Every return sets *moved to how many moved:
 *
 *   DTRAIN_OK             all of them
 *   DTRAIN_ERR_TIMEOUT    not all: CLOCK_MONOTONIC passed deadline_ns. With a deadline in the past the call does what
 *                         it can without waiting; INT64_MAX means no deadline
 *   DTRAIN_ERR_PEER_LOST  the peer's end is closed
 *   another status        the transport is no longer usable
 *
 * One thread at a time calls these: the caller's, or the service thread, which starts with the group and receives while
 * no call does. Poll mode has no service thread. A call waits in slices of a few milliseconds and serves the other
 * peers in between. To send and receive at once without `exchange`, it tries to send without waiting, and waits for
 * the peer's bytes in between.
 *
 * The optional functions:
 *
 *   exchange   sends and receives at once until one of the two is complete. out or in may be NULL. Returns as send does
 *   poll       serves connections until deadline_ns or until wake. The service thread or dtrain_comm_poll calls it,
 *              also while another thread is in send or recv
 *   wake       ends a blocked poll early; any thread
 *   fail       tells the peers that the group is broken, and why; any thread. The core's own messages tell them too
 *   leave      tells the peers that this rank leaves; why may be empty. Called right before destroy
 *   alive      says at once what is known of a peer: 1 present, 0 dead, -1 unknown, -2 silent for too long, and may
 *              still run
 *   lanes      see below
 *   host       returns a number that ranks of one host have in common, and 0 where it is not known; always the same.
 *              Groups of ranks of a host then share memory for their collectives, if the system lets them
 *   destroy    called once, when the last group of the transport is destroyed
 *
 * If alive returns 0 or -2, calls that need the peer end with DTRAIN_ERR_PEER_LOST. send or recv can return that status
 * too. Only 0 proves a death. Return it only if you know it: the others may go on without that peer (see
 * dtrain_comm_shrink).
 *
 * Groups share the streams. The core sends frames of up to 64 KiB, each with the name of its group. Received bytes go
 * to the memory of the call that waits for them; other bytes are kept for their group, at most 64 MiB per peer. If a
 * peer sends more than that to a group from which nobody here receives, the waiting call ends with DTRAIN_ERR_MEMORY.
 * So receive from groups in the order in which peers send.
 *
 * With lanes, a group has streams of its own, without frames, copies or kept bytes. The world is group 0. The call
 * fills the table `lane`: self, send, recv and, if you like, exchange and destroy. `group` names the group and is the
 * same on all members. Rank i of the group is rank ranks[i] of this transport, for i < size. The call does not wait for
 * other members. Messages about ranks that leave and calls that fail still use this table. lanes is provisional: it may
 * change. */
typedef struct dtrain_transport {
    void *self; /* passed to every function */
    int rank;
    int size;
    dtrain_status (*send)(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved);
    dtrain_status (*recv)(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved);
    void (*destroy)(void *self); /* this one and all below may be NULL */
    dtrain_status (*exchange)(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns);
    void (*poll)(void *self, int64_t deadline_ns);
    void (*wake)(void *self);
    void (*fail)(void *self, dtrain_status why, const char *text);
    void (*leave)(void *self, const char *why);
    int (*alive)(void *self, int peer);
    dtrain_status (*lanes)(void *self, uint64_t group, const int *ranks, int size, struct dtrain_transport *lane);
    uint64_t (*host)(void *self, int rank);
} dtrain_transport;

#ifdef __cplusplus
}
#endif

#endif
