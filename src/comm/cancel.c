/* ---- >>cancel ----
 * Ending what is under way on purpose, from any thread: one operation, or the group. Nothing of a group that its
 * own thread writes is touched here but through atomics; the thread that drives finds out at its next turn. */
#ifndef DTRAIN__CANCEL
#define DTRAIN__CANCEL
#include "work.c"

/* These may be called beside another call of the group, whose error text so stays as it is. */
static dtrain_status dtrain__cancel_check(const dtrain_comm *comm, const char *call)
{
    if (comm == NULL)
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: needs a group or handle (got NULL)", call);
    if (dtrain__group_alive(comm, call) != DTRAIN_OK)
        return DTRAIN_ERR_INVALID;
    if (comm->process != getpid())
        return dtrain__fail(NULL, DTRAIN_ERR_INVALID, "%s: process %ld made this group, and this is its forked child",
                            call, (long)comm->process);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_work_cancel(dtrain_work *work)
{
    if (work != NULL && __atomic_load_n(&work->mark, __ATOMIC_RELAXED) == 0)
        return DTRAIN_OK; /* another thread's wait has it: there is nothing left to cancel */
    dtrain_status status = work != NULL ? dtrain__work_alive(work, "work_cancel") : DTRAIN_OK;
    dtrain_comm *comm = work != NULL && status == DTRAIN_OK ? work->comm : NULL;
    if (status == DTRAIN_OK)
        status = dtrain__cancel_check(comm, "work_cancel");
    if (status != DTRAIN_OK)
        return status;
    __atomic_store_n(&work->op.cancelled, 1, __ATOMIC_SEQ_CST);
    dtrain__bell_ring(comm->bell);
    if (comm->transport.wake != NULL)
        comm->transport.wake(comm->transport.self);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_status dtrain_comm_abort(dtrain_comm *comm, const char *why)
{
    dtrain__error cause, kept = dtrain__thread_error;
    dtrain_status status = dtrain__cancel_check(comm, "comm_abort");
    if (status != DTRAIN_OK)
        return status;
    dtrain__fail(&cause, DTRAIN_ERR_ABORTED, "rank %d aborted the group: %.300s", comm->rank,
                 why != NULL && why[0] != 0 ? why : "it gave no reason");
    dtrain__thread_error = kept;
    dtrain__group_break(comm, &cause);
    return DTRAIN_OK;
}

#endif
