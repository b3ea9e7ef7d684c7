/* ---- >>meet ----
 * Before the first collective of a group of processes, its ranks find out whether they share memory for posts. They
 * exchange offers, open them, and exchange what each has found; they share them only if all could. The messages bear
 * the number and the description of the collective, so that errors tell of nothing else. */
#ifndef DTRAIN__MEET
#define DTRAIN__MEET
#include "message.c"

typedef struct dtrain__meet {
    int round; /* 1: offers; 2: verdicts */
    dtrain__op op;
    unsigned char *records; /* one for each rank; in the same block */
} dtrain__meet;

/* Returns 0 if the ranks share no posts, as all of them know without a message, or there is no memory. */
static int dtrain__meet_begin(dtrain_comm *comm, dtrain__op *op)
{
    const dtrain__sharing *sharing = comm->plane->sharing;
    unsigned char offer[DTRAIN__SHARING_BYTES];
    if (sharing == NULL || !sharing->offer(comm->transport.self, comm->desc.progress == DTRAIN_PROGRESS_POLL, offer))
        return 0;
    comm->meet =
        (dtrain__meet *)dtrain__alloc(comm->allocator, sizeof *comm->meet + (size_t)comm->size * DTRAIN__SHARING_BYTES);
    if (comm->meet == NULL) {
        dtrain__fail(&op->error, DTRAIN_ERR_MEMORY, "%s on rank %d: no memory to share posts",
                     dtrain__op_text(comm, op).text, comm->rank);
        return 0;
    }
    comm->meet->round = 1;
    comm->meet->records = (unsigned char *)(comm->meet + 1);
    memcpy(comm->meet->records + (size_t)comm->rank * DTRAIN__SHARING_BYTES, offer, sizeof offer);
    return 1;
}

/* Describes the messages of a round as part of the collective. */
static void dtrain__meet_start(dtrain_comm *comm, const dtrain__op *whole)
{
    dtrain__meet *meet = comm->meet;
    dtrain__op *op = &meet->op;
    dtrain__call call;
    dtrain__op_call(comm, whole, 0, &call);
    memset(op, 0, sizeof *op);
    op->kind = DTRAIN__ALL_GATHER;
    op->dtype = DTRAIN_U8;
    op->algorithm = DTRAIN_ALGORITHM_BRUCK;
    op->row = DTRAIN__SHARING_BYTES;
    op->count = (size_t)comm->size * DTRAIN__SHARING_BYTES;
    op->in = meet->records + (size_t)comm->rank * DTRAIN__SHARING_BYTES;
    op->out = meet->records;
    op->form = whole->form == DTRAIN__ON_DEVICE ? DTRAIN__ON_DEVICE : DTRAIN__MEETING;
    op->first = whole->form == DTRAIN__ON_DEVICE ? whole->first : call.count;
    op->digest = whole->form == DTRAIN__ON_DEVICE ? whole->digest : dtrain__op_pack(whole, meet->round);
    op->awaited = -1;
    op->started_ns = whole->started_ns;
    op->deadline_ns = whole->deadline_ns;
    op->serial = whole->serial; /* its record is the collective's, of which nothing has moved */
    op->moved_ns = 1;
}

/* Advances the meeting for the collective that waits for it. Returns 1 once the ranks know whether they share posts. 0:
 * not yet, or *ended says that the collective has ended with an error. */
static int dtrain__meet_advance(dtrain_comm *comm, dtrain__op *op, int64_t wait_ns, int *ended)
{
    *ended = 0;
    op->number = comm->number + 1;
    if (comm->meet == NULL && !dtrain__meet_begin(comm, op)) {
        *ended = op->error.status != DTRAIN_OK;
        comm->decided = !*ended;
        return comm->decided;
    }
    dtrain__recorder_start(comm, op);
    for (dtrain__meet *meet = comm->meet;; meet->round++) {
        unsigned char *own = meet->records + (size_t)comm->rank * DTRAIN__SHARING_BYTES;
        if (meet->op.phase == 0 && !comm->plane->sharing->prepare(comm->transport.self, meet->round == 2, own,
                                                                  wait_ns != 0 ? wait_ns : comm->poll_until_ns))
            return 0;
        if (meet->op.phase == 0)
            dtrain__meet_start(comm, op);
        int over = dtrain__message_advance(comm, &meet->op, wait_ns);
        op->awaited = meet->op.awaited;
        op->touched = meet->op.touched;
        if (!over)
            return 0;
        meet->op.phase = 0; /* another collective may try it again */
        if (meet->op.error.status != DTRAIN_OK) {
            op->error = meet->op.error;
            *ended = 1;
            return 0;
        }
        comm->number = op->number - 1;
        if (meet->round == 2)
            break;
        comm->plane->sharing->open(comm->transport.self, meet->records);
    }
    comm->shared = comm->plane->sharing->keep(comm->transport.self, comm->meet->records);
    dtrain__free(comm->allocator, comm->meet);
    comm->meet = NULL;
    comm->decided = 1;
    op->awaited = -1;
    op->touched = 0;
    return 1;
}

/* The collective that waits for the meeting ends at its deadline. */
static int dtrain__meet_expire(dtrain_comm *comm, dtrain__op *op)
{
    comm->meet->op.phase = 0;
    dtrain__recorder_expire(comm, op);
    return dtrain__message_fail(comm, op);
}

#endif
