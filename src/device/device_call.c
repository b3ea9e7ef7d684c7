/* ---- >>device_call ----
 * A rank's end of a group of devices, and what its calls share. Each call is checked as on the CPU. It consists of
 * steps, which are collectives of the CPU; their headers say which call they are steps of. So deadlines, lost ranks and
 * calls that differ are found as between CPUs. Calls devices through >>device_calls only. */
#ifndef DTRAIN__DEVICE_STEPS
#define DTRAIN__DEVICE_STEPS
#include "device_group.h"
#include "../tensor/device.c"
#include "../comm/op.c"
#include "../comm/work.c"
#include "../comm/collectives.c"
#include "../base/worker.c"

#define DTRAIN__DEVICE_NOTE_TEXT 256
#define DTRAIN__DEVICE_SLOTS 64 /* most slots of a group */

typedef struct dtrain__flags_state dtrain__flags_state; /* see >>device_flags */

/* What a rank tells the others while the group is made, in whole 64-bit words. */
typedef struct dtrain__device_note {
    uint64_t status;          /* its result so far; if not DTRAIN_OK, text says why */
    uint64_t host;            /* equal on ranks of one host */
    uint64_t has_device, ops; /* ops: address of the device's table; 0 if it lacks what EVENTS needs */
    dtrain_device_event *events[2] __attribute__((aligned(8))); /* see >>device_events */
    unsigned char *probe __attribute__((aligned(8)));
    char handles[32]
        __attribute__((aligned(8))); /* of the device's table, like the next ones: see >>device_processes */
    uint64_t process, page_fd, page_key[2];
    dtrain_device_shared shared_probe;
    uint64_t identity, blocks, block_bytes; /* FLAGS: see dtrain_device_flag_traits; blocks 0: not possible */
    dtrain__flags_state *flags __attribute__((aligned(8)));
    dtrain_device_shared shared_words;
    char text[DTRAIN__DEVICE_NOTE_TEXT] __attribute__((aligned(8)));
} dtrain__device_note;

#define DTRAIN__DEVICE_NOTE_WORDS (sizeof(dtrain__device_note) / sizeof(uint64_t))

/* Addresses of a rank's buffers in a call. */
typedef struct dtrain__device_buffers {
    const void *in __attribute__((aligned(8)));
    void *out __attribute__((aligned(8)));
} dtrain__device_buffers;

#define DTRAIN__DEVICE_BUFFER_WORDS (sizeof(dtrain__device_buffers) / sizeof(uint64_t))

typedef struct dtrain__processes dtrain__processes;
typedef struct dtrain__hosts dtrain__hosts;

struct dtrain_device_group {
    dtrain_comm *comm;
    dtrain_device *device;       /* with the caller's queue, or the group's own: see >>device_async */
    struct dtrain__async *async; /* NULL: calls cannot be started */
    dtrain_device_mode mode;
    size_t chunk_bytes; /* 0: by the size of each call */
    int slots;
    int no_devices;                   /* no rank has a device: calls are the CPU's */
    dtrain__device_note mine, *notes; /* notes: of all ranks */
    dtrain__device_buffers *buffers;  /* of all ranks, in the call under way */
    dtrain_extent *shards;            /* of all ranks, in the call under way */
    size_t *counts;                   /* elements of each rank's part of a chunk */
    const void **ins;
    void **outs;
    dtrain__processes *processes;      /* what ranks share that are processes of one host; else NULL */
    unsigned char *pinned;             /* the slots, of chunk_bytes each, or of the largest chunk if that is 0 */
    dtrain_device_event **slot_events; /* one a slot: passed when the copies to and from it are done */
    dtrain__hosts *hosts;              /* HOSTS: the groups that do its calls; else NULL */
    const dtrain_extent *pieces;       /* in a group of HOSTS: the parts of the vector that make up this rank's shard */
    int piece_count;                   /* 0: the shard is one piece */
    int mean_of;                       /* in a group of HOSTS: divides results by this many ranks; 0: does not */
    dtrain__flags_state *flags;        /* FLAGS, like all that follow; else NULL */
    uint32_t *words;                   /* this rank's flags, in memory of its device */
    uint64_t *failure;                 /* an error that a kernel or a peer has left for the CPU; 0: none */
    uint32_t epoch;                    /* of the call under way, or of the last */
    int blocks;                        /* thread blocks that run at the same time on every device */
    size_t block_bytes;                /* bytes of an array that a block handles at a time */
    int part_blocks, part_at_once, part_queued; /* of the call under way */
};

/* Allocates a rank's end and its arrays as one block, the arrays of the strictest alignment first. */
static dtrain_device_group *dtrain__device_group_new(dtrain_comm *comm)
{
    size_t size = (size_t)comm->size, header = (sizeof(dtrain_device_group) + 63) / 64 * 64;
    size_t each = sizeof(dtrain__device_note) + sizeof(dtrain__device_buffers) + sizeof(dtrain_extent) +
                  sizeof(size_t) + 2 * sizeof(void *);
    size_t bytes = header + size * each + DTRAIN__DEVICE_SLOTS * sizeof(void *);
    unsigned char *block = (unsigned char *)dtrain__alloc(comm->allocator, bytes);
    dtrain_device_group *group = (dtrain_device_group *)(void *)block;
    if (group == NULL) {
        dtrain__fail(&comm->error, DTRAIN_ERR_MEMORY, "device_group_create on rank %d: no memory for %zu bytes",
                     comm->rank, bytes);
        return NULL;
    }
    group->comm = comm;
    group->notes = (dtrain__device_note *)(void *)(block + header);
    group->buffers = (dtrain__device_buffers *)(void *)(group->notes + size);
    group->shards = (dtrain_extent *)(void *)(group->buffers + size);
    group->counts = (size_t *)(void *)(group->shards + size);
    group->ins = (const void **)(void *)(group->counts + size);
    group->outs = (void **)(void *)(group->ins + size);
    group->slot_events = (dtrain_device_event **)(void *)(group->outs + size);
    return group;
}

/* Returns the elements of a call's vector, up to the end of its last part. */
static size_t dtrain__device_span(const dtrain_device_group *group, const dtrain__op *op)
{
    size_t span = op->offsets != NULL ? 0 : op->count;
    for (int rank = 0; op->offsets != NULL && rank < group->comm->size; rank++)
        if (op->counts[rank] > 0 && op->offsets[rank] + op->counts[rank] > span)
            span = op->offsets[rank] + op->counts[rank];
    return span;
}

/* Gives the text of a call for errors. */
static dtrain__text dtrain__device_text(const dtrain_comm *comm, const dtrain__op *whole, uint64_t number)
{
    dtrain__op op = dtrain__op_of(whole->kind, NULL, NULL, 0, DTRAIN_U8);
    op.form = DTRAIN__ON_DEVICE;
    op.first = whole->count;
    op.digest = dtrain__op_pack(whole, 0);
    op.number = number;
    return dtrain__op_text(comm, &op);
}

/* Queues this rank's part of a call under FLAGS. Defined in flags.c. */
static dtrain_status dtrain__flags_reduce(dtrain_device_group *group, dtrain_dtype dtype, dtrain_op op, int n, int m,
                                          size_t begin, size_t count);

/* Queues this rank's share of a call, for the first n inputs and m outputs of the group's arrays. */
static dtrain_status dtrain__device_share(dtrain_device_group *group, dtrain_dtype dtype, dtrain_op op, int n, int m,
                                          size_t begin, size_t count)
{
    if (group->flags != NULL)
        return dtrain__flags_reduce(group, dtype, op, n, m, begin, count);
    return dtrain_device_reduce(group->device, dtype, op, group->ins, n, group->outs, m, begin, count);
}

/* Runs one of the CPU's collectives as a step of a call. */
static dtrain_status dtrain__device_step(dtrain_device_group *group, const dtrain__op *whole, int step, dtrain__op *op)
{
    op->op = dtrain__op_reduces(op) ? whole->op : (dtrain_op)0;
    op->root = op->kind == DTRAIN__BROADCAST ? whole->root : 0;
    op->form = DTRAIN__ON_DEVICE;
    op->first = whole->count;
    op->digest = dtrain__op_pack(whole, step);
    op->whole_parts = whole->counts != NULL ? dtrain__op_parts_hash(group->comm, whole) : 0;
    return dtrain__work_call(group->comm, op, NULL);
}

/* Breaks the group on every rank with this thread's last error, unless it is broken. Returns that error. */
static dtrain_status dtrain__device_break(dtrain_device_group *group)
{
    dtrain_comm *comm = group->comm;
    dtrain__error mine = dtrain__thread_error;
    dtrain__group_break(comm, &mine);
    comm->error = mine;
    return dtrain__report(&mine);
}

/* Breaks the group after a device failed in a call. `number` is that of the step under way, or of the next. */
static dtrain_status dtrain__device_failed(dtrain_device_group *group, const dtrain__op *whole, uint64_t number,
                                           dtrain_status status)
{
    const dtrain_comm *comm = group->comm;
    dtrain__fail(NULL, status, "%s on rank %d: its device %s failed: %s", dtrain__device_text(comm, whole, number).text,
                 comm->rank, dtrain_device_name(group->device), dtrain__status_cause(&dtrain__thread_error));
    return dtrain__device_break(group);
}

/* Starts a thread for the group. */
static dtrain_status dtrain__device_thread(dtrain__worker *worker, const char *without)
{
    int error = dtrain__worker_start(worker);
    if (error == 0)
        return DTRAIN_OK;
    return dtrain__fail(NULL, DTRAIN_ERR_IO,
                        "the system refused a thread (%s; see ulimit -u and pids.max): %s, or set progress to "
                        "DTRAIN_PROGRESS_POLL, which needs none",
                        dtrain__os_error_text(error), without);
}

/* Checks a call as on the CPU, before a peer sees any of it. */
static dtrain_status dtrain__device_begin(dtrain_device_group *group, const dtrain__op *whole)
{
    char call[64];
    snprintf(call, sizeof call, "device_group_%s", dtrain__op_kind_name((uint64_t)whole->kind));
    if (group == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: the group is NULL; was its creation checked?", call);
    dtrain_status status = dtrain__group_whole(group->comm, call);
    return status == DTRAIN_OK ? dtrain__op_check(group->comm, whole) : status;
}

#endif
