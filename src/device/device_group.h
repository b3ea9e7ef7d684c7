/* ---- >>device-group ----
 * Collectives over memory of devices, between ranks of any group.
 *
 *     dtrain_device_group_desc desc = {DTRAIN_DEVICE_MODE_AUTO, 0, 0, 1};      async 1: for all_reduce_async
 *     DTRAIN_CHECK(dtrain_device_group_create(&group, world, gpu, &desc));     gpu NULL: a rank on the CPU
 *     DTRAIN_CHECK(dtrain_device_group_broadcast(group, params, count, DTRAIN_F32, 0));
 *     DTRAIN_CHECK(dtrain_device_group_all_reduce(group, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN));
 *     DTRAIN_CHECK(dtrain_device_group_reduce_scatter_v(group, grads, mine, counts, offsets, DTRAIN_F32, DTRAIN_MEAN));
 *     DTRAIN_CHECK(dtrain_device_group_all_gather_v(group, mine, params, counts, offsets, DTRAIN_F32));
 *     DTRAIN_CHECK(dtrain_device_group_all_reduce_async(group, grads, grads, count, DTRAIN_F32, DTRAIN_MEAN, &work));
 *     ...                                                                      queue what does not need the sum
 *     DTRAIN_CHECK(dtrain_device_work_wait(work, gpu));                        gpu's queue waits for the sum
 *
 * Each rank has one queue. Sums add in the tree of >>order, so results have the bits of the CPU's collectives on the
 * same numbers. If desc.order or an algorithm of the communicator frees the order, the bits are still the same on
 * every rank.
 *
 * The ranks agree on a mode when the group is made; you may ask for one:
 *
 *     mode     how bytes go                                               needs
 *     EVENTS   each rank's device reads and writes the others' memory,    threads, or processes of one host; devices
 *              ordered by events                                          that reach each other's memory
 *     FLAGS    as EVENTS, but one kernel a rank, and the kernels wait     as EVENTS, and a physical device for each
 *              for each other; only on request                            rank
 *     HOSTS    EVENTS inside each host. Between hosts each rank sends a   several hosts with the same power of two of
 *              share of the vector as in STAGED                           ranks, numbered host by host
 *     STAGED   chunks go through pinned memory, and the CPU reduces them  nothing; also ranks without a device
 *
 * The tests run every mode on emulated devices. Not run on a GPU yet: dtrain_cuda.h lists what is checked. */
#ifndef DTRAIN__DEVICE_GROUP_H
#define DTRAIN__DEVICE_GROUP_H
#include "../comm/comm.h"
#include "../tensor/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dtrain_device_mode {
    DTRAIN_DEVICE_MODE_AUTO = 0,
    DTRAIN_DEVICE_STAGED = 1301, /* through pinned memory and the CPU's collectives */
    DTRAIN_DEVICE_EVENTS,        /* devices touch each other's memory, ordered by events */
    DTRAIN_DEVICE_FLAGS,         /* the same, by kernels that wait for each other */
    DTRAIN_DEVICE_HOSTS          /* EVENTS inside each host, STAGED between them */
} dtrain_device_mode;

typedef struct dtrain_device_group_desc {
    dtrain_device_mode mode; /* 0: EVENTS on one host, HOSTS on several; STAGED if that is not possible */
    size_t chunk_bytes;      /* STAGED, HOSTS: bytes of a chunk, 256 KiB to 4 MiB; 0: by the size of each call */
    int slots;               /* STAGED, HOSTS: pinned slots, of the largest chunk each, 2 to 64; 0: 4 */
    int async;               /* 1: allows dtrain_device_group_all_reduce_async, with a queue and a thread for it */
} dtrain_device_group_desc;

typedef struct dtrain_device_group dtrain_device_group;

/* Creates this rank's end of a group of devices. All memory and events are made here, except those of works.
 *
 * EVENTS needs, on every rank:
 *   - at most 64 ranks, all threads of one process, or one process each on one Linux host and under one user
 *   - threads of dtrain_run_threads or dtrain_threads_create, or processes of dtrain_comm_create; groups made from
 *     such a group do as well
 *   - threads: devices of one table; processes: devices whose tables share memory, as dtrain_cuda.h's do
 *   - access to the others' memory: each rank tries it here, in its queue's order, on 256 bytes of every rank. If one
 *     has no access, the group is STAGED
 *
 * FLAGS also needs a physical device for each rank. Its kernel keeps the device until all ranks' kernels have come. If
 * a device belongs to several groups, queue calls on them in the same order on all devices.
 *
 * HOSTS needs several hosts whose ranks could use EVENTS. Every host has the same number of ranks, and they are
 * neighbours in rank order. That number is a power of two, unless the communicator's desc frees the order. In an
 * all-reduce or a broadcast each rank sends only a share of the vector to other hosts. Sums, means and products of
 * 16-bit floats go as in STAGED. Each rank's device also holds a buffer as large as its slots.
 * A host is known by its name and the time of its last start, so a container counts as one. Between ranks that differ
 * in either, EVENTS is tried only if you ask for it.
 *
 * STAGED, and HOSTS between hosts, cut a vector of S bytes into chunks of sqrt(600,000 S) bytes, down to whole 64
 * bytes:
 *
 *     S              chunk
 *     to 114 kB      256 KiB
 *     1 MB           775 kB
 *     from 29.3 MB   4 MiB
 *
 * At that size two costs are equal. One is what each chunk costs in the slowest stage: a = 50 us. The other is the time
 * in which the first chunk comes from the device and the last returns, at b = 24 GB/s each (PCIe 4.0 x 16). So a chunk
 * has sqrt(S a / (1 / b + 1 / b)) bytes.
 *
 *   group    out: the group; NULL on an error
 *   comm     must outlive the group; you may make other calls on it between the group's
 *   device   this rank's, which must outlive the group; NULL: this rank's buffers are the CPU's
 *   desc     the same on every rank; NULL: all defaults
 *   errors   the same on every rank, except for a rank's own NULLs, open fuse and first memory:
 *            DTRAIN_ERR_INVALID      a NULL, an open fuse, or a field out of range; the text names the rank
 *            DTRAIN_ERR_MISMATCH     descs differ; the text names the field and both ranks
 *            DTRAIN_ERR_UNSUPPORTED  the mode that you asked for is not possible; the text names the rank and why
 *            DTRAIN_ERR_MEMORY       no memory
 *            and what a device returns, and those of dtrain_all_gather
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms, up to four times, in HOSTS eleven times */
DTRAIN_API_MUST dtrain_status dtrain_device_group_create(dtrain_device_group **group, dtrain_comm *comm,
                                                         dtrain_device *device, const dtrain_device_group_desc *desc);

/* Returns the mode of a group; DTRAIN_DEVICE_MODE_AUTO for NULL.
 *
 * any thread */
DTRAIN_API dtrain_device_mode dtrain_device_group_mode(const dtrain_device_group *group);

/* Run the collectives of >>comm over memory of this rank's device. Counts, shards, in-place rule and bits are the same.
 *
 * A call takes its place in the device's queue. What was queued before it is done first, and what is queued after it
 * sees the result. dtrain_device_wait waits until the result is there. A call returns after these:
 *
 *     EVENTS, FLAGS   all ranks have made the call
 *     STAGED, HOSTS   the same, and this rank's device has done what was queued and copied its data to the CPU
 *
 *   in, out, data   memory of this rank's device. Except in STAGED, other devices touch it until the call has ended in
 *                   the queue: free it with dtrain_device_free, or after dtrain_device_wait. Allocate once, not for
 *                   every call: processes open each other's allocations and keep them open. Freed memory goes back to
 *                   the system when the group is destroyed, or when this rank has another allocation in its place
 *   errors          those of the CPU's collectives, whose texts quote this call
 *                   DTRAIN_ERR_IO       a device failed; another status if the device returned one. The text names the
 *                                       rank and the device. The group is broken on every rank (ABORTED on the others
 *                                       over a transport of your own)
 *                   DTRAIN_ERR_UNSUPPORTED  except in STAGED: processes cannot share some rank's memory (of a pool,
 *                                       managed, pinned, mapped piece by piece). The text, on all ranks, says which
 *                                       and what to do. The group is usable
 *                   DTRAIN_ERR_TIMEOUT  the group is usable if nothing was done yet, and broken otherwise. In FLAGS
 *                                       also: a device waited timeout_ms in an earlier call. The text names it and
 *                                       the rank that it waited for
 *
 * In HOSTS an error text says whether the failure was inside the host or between hosts, and how ranks are numbered
 * there.
 *
 * A call that breaks the group in EVENTS, FLAGS or HOSTS first drains its own queue and its peers', so nothing waits
 * for work that will not come. When it returns, no peer's device is in this rank's memory, nor this rank's device in
 * theirs: you may free any of it. The contents of out are undefined. The drain may take longer than timeout_ms. A
 * killed process is waited for until the system has ended its work on its device. A rank that is lost because it is
 * silent is waited for two seconds more.
 *
 * A process may also be killed after this rank's call has returned, while its queue waits for the other's. A thread of
 * the group ends such a wait after a tenth of a second. With DTRAIN_PROGRESS_POLL there is no thread:
 * dtrain_device_group_wait, the next call or destroy ends the wait, so use dtrain_device_group_wait there, not
 * dtrain_device_wait. In FLAGS a device stops waiting after timeout_ms at the latest, and leaves its part undone.
 * dtrain_device_group_wait or the next call returns that error.
 *
 * collective: every rank of comm, same order; blocks up to timeout_ms this many times:
 *     EVENTS         2
 *     FLAGS          1
 *     STAGED         2 for each chunk
 *     HOSTS          5, and 2 for each chunk
 *     HOSTS, reduce-scatter   1, and for every slots' worth of data 2 and 2 for each chunk */
DTRAIN_API_MUST dtrain_status dtrain_device_group_all_reduce(dtrain_device_group *group, const void *in, void *out,
                                                             size_t count, dtrain_dtype dtype, dtrain_op op);
DTRAIN_API_MUST dtrain_status dtrain_device_group_reduce_scatter(dtrain_device_group *group, const void *in, void *out,
                                                                 size_t count, dtrain_dtype dtype, dtrain_op op);
DTRAIN_API_MUST dtrain_status dtrain_device_group_all_gather(dtrain_device_group *group, const void *in, void *out,
                                                             size_t count, dtrain_dtype dtype);
DTRAIN_API_MUST dtrain_status dtrain_device_group_broadcast(dtrain_device_group *group, void *data, size_t count,
                                                            dtrain_dtype dtype, int root);

/* Run a reduce-scatter or an all-gather with parts that you cut: rank r has elements [offsets[r],
 * offsets[r] + counts[r]).
 *
 *   counts, offsets   as in dtrain_reduce_scatter_v and dtrain_all_gather_v; offsets NULL: one part after the other
 *   errors            those of the calls above, and
 *                     DTRAIN_ERR_INVALID   counts is NULL
 *                     DTRAIN_ERR_MISMATCH  another rank gave other counts or offsets, even with the same sum
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

/* Starts an all-reduce after what the device's queue holds; it runs beside what you queue later.
 *
 * Needs desc.async. A thread of the group makes the started calls, one after another in the order in which they were
 * started, on a queue of the group's own. Blocking calls take their turn among them. Wait for every work before you
 * make other calls on comm. With DTRAIN_PROGRESS_POLL, or if the device's table makes no queues, there is no thread:
 * the call itself runs the all-reduce and blocks.
 *
 *   in, out   until the work has been waited for, do not write in or out, read out, or free either
 *   work      out: for dtrain_device_work_wait; NULL on an error
 *   errors    on this rank alone; dtrain_device_work_wait returns those of the all-reduce and of the device
 *             DTRAIN_ERR_INVALID  a NULL, no desc.async, a forked child, or bad arguments
 *             DTRAIN_ERR_MEMORY   no memory for another work; works that have ended are used again
 *
 * collective: every rank of comm, same order; never blocks if the group has its thread */
DTRAIN_API_MUST dtrain_status dtrain_device_group_all_reduce_async(dtrain_device_group *group, const void *in,
                                                                   void *out, size_t count, dtrain_dtype dtype,
                                                                   dtrain_op op, dtrain_device_work **work);

/* Returns the result of a started all-reduce, orders it before what is queued from now on, and frees the work.
 *
 * The CPU waits until the thread has queued the call: in EVENTS until all ranks have made it, in STAGED and HOSTS until
 * all data has come. The device's queue waits for the rest.
 *
 *   work     NULL returns DTRAIN_OK
 *   device   the queue of this rank that is to see the result, of the group's table; NULL: the one given to create
 *   errors   those of the all-reduce. Works started before this call returned the first error end with that error too,
 *            and no part of them is done. If the group is still usable, after a TIMEOUT, start all of them again
 *            DTRAIN_ERR_INVALID  device is of another table; the work is kept, wait for it again
 *
 * one thread per object; blocks until the calls before it are over, each up to its own time */
DTRAIN_API_MUST dtrain_status dtrain_device_work_wait(dtrain_device_work *work, dtrain_device *device);

/* Waits for the device's queue, and returns whether all calls so far were done in full.
 *
 *   errors   what dtrain_device_wait returns
 *            DTRAIN_ERR_TIMEOUT    FLAGS: a device has waited too long for another
 *            DTRAIN_ERR_IO         FLAGS between processes: another rank's device failed in an earlier call
 *            DTRAIN_ERR_PEER_LOST  EVENTS and FLAGS between processes: a rank ended before its device had done its part
 *                                  of an earlier call. Results since then are undefined; the group is broken on every
 *                                  rank
 *
 * one thread per object; blocks as dtrain_device_wait */
DTRAIN_API_MUST dtrain_status dtrain_device_group_wait(dtrain_device_group *group);

/* Frees this rank's end of a group when its queue is done; NULL is legal.
 *
 * Call it before you destroy comm or the device. It waits for no peer, except one about to return from a call that this
 * rank has returned from. It frees works that you have not waited for. A call under way gets one second to end; then
 * the group is aborted.
 *
 * one thread per object */
DTRAIN_API void dtrain_device_group_destroy(dtrain_device_group *group);

#ifdef __cplusplus
}
#endif

#endif
