/* ---- >>transport ----
 * How bytes get from rank to rank. A transport knows nothing of tensors: it is two functions over a
 * reliable, ordered stream of bytes from each rank to each other one. Fill the table, give it to
 * dtrain_comm_from_transport, and everything runs over it: collectives, groups of its ranks, meshes and what is built
 * from them. */
#ifndef DTRAIN__TRANSPORT_H
#define DTRAIN__TRANSPORT_H
#include "../base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A run of bytes on its way to or from one peer. */
typedef struct dtrain_transfer {
    int peer;
    unsigned char *data; /* read when it is sent, written when it is received */
    size_t bytes;
    size_t moved; /* of bytes; the transport adds to it */
    int more;     /* sending: more to the same peer follows at once; a transport may wait for it */
} dtrain_transfer;

/* One rank's end of a transport.
 *
 * send and recv move up to `bytes` bytes of the stream to or from `peer` and set *moved, on every return,
 * to how many went. They return
 *
 *   DTRAIN_OK             all of them went
 *   DTRAIN_ERR_TIMEOUT    the clock CLOCK_MONOTONIC passed deadline_ns with some left. A deadline in the past
 *                         asks for what can be done without waiting; INT64_MAX never comes
 *   DTRAIN_ERR_PEER_LOST  the peer's end is closed
 *   another status        the transport is of no more use
 *
 * The core calls these from one thread at a time: the caller's, or the service thread's, which starts with the group
 * and looks for what has come when no call does. In poll mode there is no such thread. A call that waits does so in
 * slices of a few milliseconds, and looks at the other peers in between. Blocking sends of a group are ordered so that
 * they never form a cycle. The rest is optional, and NULL where it is missing:
 *
 *   exchange   sends and receives at once (either may be NULL) until one of the two is complete; returns as send does
 *   poll       looks after connections until deadline_ns or until woken; called by the service thread or by
 *              dtrain_comm_poll, also while another thread is in send or recv
 *   wake       cuts a blocked poll short; any thread
 *   fail       tells the peers that the group is broken, and why; any thread. The core's own messages tell them, too
 *   leave      tells the peers that this rank goes, and why (may be empty); right before destroy
 *   alive      says what is known of a peer, without waiting: 1 it is there, 0 it is gone, -1 unknown. 0 ends the calls
 *              that need the peer with DTRAIN_ERR_PEER_LOST, as that status of send or recv does. Both are for what is
 *              proved: survivors go on without that peer (see dtrain_comm_shrink)
 *
 * Groups share the streams. The core sends in frames of up to 64 KiB that name their group, and sorts what comes: bytes
 * for the call that waits go to its memory, others are kept for their group, at most 64 MiB a peer. A call that waits
 * while its peer sends more than that to another group, of which nobody here receives, ends with DTRAIN_ERR_MEMORY: it
 * is best to receive from groups in the order in which peers send.
 *
 *   lanes      fills the table of a group's own streams: self, send, recv, and where wanted exchange and destroy. `group`
 *              names it, the same on all members; ranks[i], of `size`, is the rank here of the group's rank i. It does
 *              not wait for other members. The group's messages then go there, unsorted and without a copy, and nothing
 *              is kept; who leaves and what fails is still told over this table. Provisional: it may change until the
 *              library's own transports have used it */
typedef struct dtrain_transport {
    void *self; /* given to every function */
    int rank;
    int size;
    dtrain_status (*send)(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved);
    dtrain_status (*recv)(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved);
    void (*destroy)(void *self); /* may be NULL; called once, by dtrain_comm_destroy */
    dtrain_status (*exchange)(void *self, dtrain_transfer *out, dtrain_transfer *in, int64_t deadline_ns);
    void (*poll)(void *self, int64_t deadline_ns);
    void (*wake)(void *self);
    void (*fail)(void *self, dtrain_status why, const char *text);
    void (*leave)(void *self, const char *why);
    int (*alive)(void *self, int peer);
    dtrain_status (*lanes)(void *self, uint64_t group, const int *ranks, int size, struct dtrain_transport *lane);
} dtrain_transport;

#ifdef __cplusplus
}
#endif

#endif
