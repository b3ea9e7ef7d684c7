/* ---- >>device-group ----
 * Collectives over memory of devices: one queue a rank, over any group. Sums add in the tree of >>order, and results
 * are the bits of the CPU's collectives on the same numbers; where desc.order or an algorithm of the group frees the
 * order, still the same bits on every rank. How bytes go is agreed when the group is made, and can be asked for. */
#ifndef DTRAIN__DEVICE_GROUP_H
#define DTRAIN__DEVICE_GROUP_H
#include "../comm/comm.h"
#include "../tensor/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dtrain_device_mode {
    DTRAIN_DEVICE_MODE_AUTO = 0,
    DTRAIN_DEVICE_STAGED = 1301, /* through pinned memory: any devices, any transport, ranks without a device */
    DTRAIN_DEVICE_EVENTS,        /* each rank's device reads and writes the others' memory, ordered by events */
    DTRAIN_DEVICE_FLAGS,         /* the same, by kernels that wait for each other: a physical device for each rank */
    DTRAIN_DEVICE_HOSTS          /* EVENTS inside each host, STAGED between them */
} dtrain_device_mode;

typedef struct dtrain_device_group_desc {
    dtrain_device_mode mode; /* 0: EVENTS where it can be, or HOSTS, else STAGED */
    size_t chunk_bytes;      /* STAGED, HOSTS: of a chunk; 0: by the call's size; from 256 KiB to 4 MiB */
    int slots;               /* STAGED, HOSTS: pinned, of the largest chunk each; 0: 4; 2 to 64 */
    int async;               /* 1: has dtrain_device_group_all_reduce_async, and a queue and a thread for it */
} dtrain_device_group_desc;

typedef struct dtrain_device_group dtrain_device_group;

/* Makes a rank's end of a group of devices. Memory and events are made here, and nothing later.
 *
 * EVENTS can be where all ranks, 64 at most, are threads of dtrain_run_threads or dtrain_threads_create (or of a group
 * that comes of such a one) with devices of one table, or a process each, of dtrain_comm_create, on one host (Linux) and
 * under one user, with devices whose tables share memory between processes, as dtrain_cuda.h's do; and where each can
 * touch the others' memory: each tries it here, on 256 bytes of every rank, in its queue's order. One that cannot makes
 * it STAGED.
 *
 * FLAGS, which is used where it is asked for, takes besides that each rank's device is a physical one of its own. A call
 * is one kernel a rank, which keeps its device until all ranks' kernels are there: where a device belongs to several
 * groups, calls on them must be queued in one order on all devices.
 *
 * HOSTS can be where the ranks of each of several hosts could go by EVENTS, are neighbours in rank order, and are as
 * many as every other host's: a power of two, unless the communicator's desc frees the order. A host is known by its
 * name and its last start, so that a container is one; where these differ, EVENTS is tried only where it is asked for.
 * In an all-reduce or a broadcast every rank then sends a share of the vector to other hosts, and not all of it; sums,
 * means and products of 16-bit floats go as in STAGED. Each rank's device also holds as many bytes as its slots do.
 *
 * STAGED, and HOSTS between hosts, cut a vector of S bytes into chunks of sqrt(S a / (1 / b + 1 / b)) bytes. Then what
 * every chunk costs in the slowest stage, messages and reduction between the CPUs (a = 50 us), is as much as the time
 * in which the first chunk comes from the device and the last one goes back (b = 24 GB/s each, PCIe 4.0 x 16). It is
 * sqrt(S * 600,000), down to whole 64 bytes: 256 KiB up to 114 kB, 775 kB for 1 MB, 4 MiB from 29.3 MB on.
 *
 *   comm     must outlive it; other calls on it may come between the group's
 *   device   this rank's, which must outlive it; NULL: this rank's buffers are the CPU's
 *   desc     NULL: all defaults; the same on every rank
 *   errors   the same on every rank but for a rank's own NULLs, fuse and first memory:
 *            DTRAIN_ERR_INVALID      a NULL, an open fuse, or a field out of range; the text names the rank
 *            DTRAIN_ERR_MISMATCH     descs differ; the text names the field and both ranks
 *            DTRAIN_ERR_UNSUPPORTED  a mode other than STAGED was asked for where it cannot be; the text names the
 *                                    rank and why
 *            DTRAIN_ERR_MEMORY, what a device says; others as dtrain_all_gather
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms, up to four times, in HOSTS eleven times */
DTRAIN_API_MUST dtrain_status dtrain_device_group_create(dtrain_device_group **group, dtrain_comm *comm,
                                                         dtrain_device *device, const dtrain_device_group_desc *desc);

/* Returns how bytes go.
 *
 * any thread */
DTRAIN_API dtrain_device_mode dtrain_device_group_mode(const dtrain_device_group *group);

/* The collectives of >>comm over memory of this rank's device: the same counts, shards, in-place rule and bits.
 *
 * In the order of the device's queue: what was queued before is done first, what is queued after sees the result;
 * dtrain_device_wait says when it is there. The CPU waits until the other ranks have called it too; in STAGED and HOSTS
 * also for all copies from the device, and so for what was queued before; in EVENTS and FLAGS for no device. In FLAGS a
 * device waits for the others for timeout_ms at most, and then leaves its part undone: dtrain_device_group_wait, or the
 * next call, says so.
 *
 *   in, out, data   memory of the device, which but in STAGED the others' devices touch, up to the end of the call in
 *                   the queue: free it through the queue (dtrain_device_free), or after dtrain_device_wait. Processes
 *                   open each other's allocations once and keep them: what is freed is given back to the system when
 *                   the group is destroyed, or others of the rank's stand in its place. Allocate once, not for every
 *                   call
 *   errors          those of the CPU's collectives, whose texts quote this call
 *                   DTRAIN_ERR_IO       a device failed: the group is broken on every rank (ABORTED on the others over
 *                                       a transport of your own), and the text names the rank and the device; where a
 *                                       device says another status, that one
 *                   DTRAIN_ERR_UNSUPPORTED  memory of some rank's that processes cannot share (of a pool, managed,
 *                                       pinned, mapped piece by piece), but in STAGED; the text, on all ranks,
 *                                       says which and the cure; the group is usable
 *                   DTRAIN_ERR_TIMEOUT  usable again unless some of it was done; else, too, the group is broken; in
 *                                       FLAGS also that a device waited so long in an earlier call: the text names it
 *                                       and the rank that it waited for
 *                   in HOSTS the text says whether it was inside the host or between hosts, and how the ranks there are
 *                   numbered
 *
 * A call that breaks the group in EVENTS, FLAGS or HOSTS, whatever phase the others are in, returns when its rank's
 * device has left their memory, and their devices its own: any of it may be freed at once. No queue is left with a wait
 * for what nobody will do. For that, such a call waits for what its queue, and theirs, hold: longer than timeout_ms
 * where they do not get on. A process that was killed is not waited for once the system has taken down what it had on
 * its device; one that is lost as it is silent, for two seconds more. The contents of out are undefined.
 *
 * A process may also be killed when this rank's call has returned, and its queue waits for the other's. Those waits are
 * ended a tenth of a second later by a thread of the group; where progress is DTRAIN_PROGRESS_POLL, there is none, and
 * dtrain_device_group_wait, the next call or destroy ends them: wait with that there, not with dtrain_device_wait. In
 * FLAGS the device's own deadline ends them at the latest.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms, in EVENTS twice, in STAGED twice a chunk; in
 * HOSTS five times and twice a chunk, in a reduce-scatter once, and for every slots' worth of it twice and twice a
 * chunk */
DTRAIN_API_MUST dtrain_status dtrain_device_group_all_reduce(dtrain_device_group *group, const void *in, void *out,
                                                             size_t count, dtrain_dtype dtype, dtrain_op op);
DTRAIN_API_MUST dtrain_status dtrain_device_group_reduce_scatter(dtrain_device_group *group, const void *in, void *out,
                                                                 size_t count, dtrain_dtype dtype, dtrain_op op);
DTRAIN_API_MUST dtrain_status dtrain_device_group_all_gather(dtrain_device_group *group, const void *in, void *out,
                                                             size_t count, dtrain_dtype dtype);
DTRAIN_API_MUST dtrain_status dtrain_device_group_broadcast(dtrain_device_group *group, void *data, size_t count,
                                                            dtrain_dtype dtype, int root);

/* dtrain_device_group_reduce_scatter and dtrain_device_group_all_gather with parts as the caller says: of rank r the
 * elements [offsets[r], offsets[r] + counts[r]).
 *
 *   counts, offsets   as in dtrain_reduce_scatter_v and dtrain_all_gather_v; offsets NULL: one after the other
 *   errors            DTRAIN_ERR_INVALID   counts is NULL
 *                     DTRAIN_ERR_MISMATCH  another rank gave other counts or offsets, of the same sum or not
 *
 * collective: every rank of comm, same order; blocks as the calls above */
DTRAIN_API_MUST dtrain_status dtrain_device_group_reduce_scatter_v(dtrain_device_group *group, const void *in,
                                                                   void *out, const size_t *counts,
                                                                   const size_t *offsets, dtrain_dtype dtype,
                                                                   dtrain_op op);
DTRAIN_API_MUST dtrain_status dtrain_device_group_all_gather_v(dtrain_device_group *group, const void *in, void *out,
                                                               const size_t *counts, const size_t *offsets,
                                                               dtrain_dtype dtype);

typedef struct dtrain_device_work dtrain_device_work;

/* Starts an all-reduce that comes after what the device's queue holds now, and goes on beside what is queued later.
 *
 * With desc.async a thread of the group makes the calls above on a queue of the group's own, one after another in the
 * order in which they were started; the blocking calls take their turn among them. Other calls on comm may be made only
 * while every work has been waited for. Where progress is DTRAIN_PROGRESS_POLL, or the device's table makes no queues,
 * there is neither: the call is made on the device before this returns, and blocks as it does.
 *
 *   in, out   until the work has been waited for: not to be written, out not to be read, neither to be freed
 *   work      out: to be handed to dtrain_device_work_wait; NULL on an error
 *   errors    of the call itself, and of the device: dtrain_device_work_wait's. Here, on this rank alone:
 *             DTRAIN_ERR_INVALID  a NULL, no desc.async, a forked child, or arguments that the call refuses
 *             DTRAIN_ERR_MEMORY   no memory for another work: those that are over are used again
 *
 * collective: every rank of comm, same order; never blocks where there is the thread */
DTRAIN_API_MUST dtrain_status dtrain_device_group_all_reduce_async(dtrain_device_group *group, const void *in,
                                                                   void *out, size_t count, dtrain_dtype dtype,
                                                                   dtrain_op op, dtrain_device_work **work);
/* Orders a started collective before what is queued from now on, returns its result, once, and frees it.
 *
 * The CPU waits until the group's thread has handed the call over, as long as the blocking call would take: in EVENTS
 * until all ranks have come to it, in STAGED and HOSTS until all of it has come. The device's queue waits for the rest.
 *
 *   work     NULL is DTRAIN_OK
 *   device   the rank's queue that is to see the result, of the group's table; NULL: the one given to create
 *   errors   those of the call. Works that were started before the first error was returned here end with that one,
 *            too, and no part of them is done: after a TIMEOUT that leaves the group usable, start all of them again
 *            DTRAIN_ERR_INVALID  device is of another table; the work is still to be waited for
 *
 * one thread per object; blocks until the calls before it are over, each up to its own time */
DTRAIN_API_MUST dtrain_status dtrain_device_work_wait(dtrain_device_work *work, dtrain_device *device);

/* Waits for the device's queue, and says whether all calls so far have done what they should.
 *
 *   errors   what dtrain_device_wait says
 *            DTRAIN_ERR_TIMEOUT    FLAGS: a device has waited too long for another's
 *            DTRAIN_ERR_IO         FLAGS between processes: another rank's device has failed in an earlier call
 *            DTRAIN_ERR_PEER_LOST  EVENTS and FLAGS between processes: a rank has ended before its device had done its
 *                                  part of an earlier call; results since are undefined, and the group is broken on
 *                                  every rank
 *
 * one thread per object; blocks as dtrain_device_wait */
DTRAIN_API_MUST dtrain_status dtrain_device_group_wait(dtrain_device_group *group);

/* Frees a rank's end, once its queue has ended; NULL is legal. Waits for no peer but those that are about to return
 * from a call that this rank has returned from. Before comm and the device are destroyed.
 *
 * Works that were not waited for are freed: what is under way has a second to end; then the group is aborted.
 *
 * one thread per object */
DTRAIN_API void dtrain_device_group_destroy(dtrain_device_group *group);

#ifdef __cplusplus
}
#endif

#endif
