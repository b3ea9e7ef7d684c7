/* ---- >>watch ----
 * With DTRAIN_DEBUG=1: names the operation whose buffer is not there when a thread reads or writes it. The fault is
 * often in a thread of the library's, or of another rank, whose stack says nothing about the program's mistake. A
 * handler of faults looks through the operations under way of all groups of this process: see >>faults. */
#ifndef DTRAIN__WATCH
#define DTRAIN__WATCH
#include "../base/faults.c"
#include "op.c"

DTRAIN__OF_PROCESS(dtrain_comm *, dtrain__watch_list)

/* Says which buffer of an operation an address is in, if it is in one. */
static void dtrain__watch_look(dtrain__faults_line *line, const dtrain_comm *comm, const dtrain__op *op,
                               uintptr_t address, int writes)
{
    uintptr_t begins[2] = {(uintptr_t)op->in, (uintptr_t)op->out};
    char dtype[16];
    int i = writes == 1 ? 1 : 0;
    for (int turn = 0; turn < 2; turn++, i = !i) { /* a write is to out first: both may be one buffer */
        if (op->scattered || address < begins[i] || address - begins[i] >= op->reach[i])
            continue;
        dtrain__faults_put(line, "dtrain: ");
        dtrain__faults_put(line, dtrain__op_kind_name((uint64_t)op->kind));
        if (op->number > 0) {
            dtrain__faults_put(line, " #");
            dtrain__faults_put_digits(line, op->number, 10);
        }
        dtrain__faults_put(line, " (");
        if (dtrain__op_reduces(op)) {
            dtrain__faults_put(line, dtrain__op_name((uint64_t)op->op));
            dtrain__faults_put(line, ", ");
        }
        dtrain__op_dtype_name(op->dtype, dtype);
        dtrain__faults_put(line, dtype);
        dtrain__faults_put(line, " x ");
        dtrain__faults_put_digits(line, op->count, 10);
        dtrain__faults_put(line, ") of rank ");
        dtrain__faults_put_number(line, comm->rank);
        dtrain__faults_put(line, writes < 0 ? " uses" : writes ? " writes to" : " reads");
        dtrain__faults_put(line, i ? " the program's buffer out=0x" : " the program's buffer in=0x");
        dtrain__faults_put_digits(line, begins[i], 16);
        dtrain__faults_put(line, " of ");
        dtrain__faults_put_digits(line, op->reach[i], 10);
        dtrain__faults_put(line, " bytes, which is not there at byte ");
        dtrain__faults_put_digits(line, address - begins[i], 10);
        dtrain__faults_put(line,
                           ": it was freed, unmapped or protected while the operation was under way, or is smaller; "
                           "keep it until the call, or dtrain_work_wait, has returned");
        return;
    }
}

/* Runs in the handler. Handles stay in their group's list until it is destroyed, and so does what was noted in a fuse
 * until dtrain_fuse_end returns. */
static void dtrain__watch_report(dtrain__faults_line *line, uintptr_t address, int writes)
{
    const dtrain_comm *comm = DTRAIN__ATOMIC_LOAD(dtrain__watch_list(), SEQ_CST);
    for (; comm != NULL && line->bytes == 0; comm = DTRAIN__ATOMIC_LOAD(&comm->watch.next, SEQ_CST)) {
        const dtrain__op *running = DTRAIN__ATOMIC_LOAD(&comm->watch.running, SEQ_CST);
        const dtrain_work *work = DTRAIN__ATOMIC_LOAD(&comm->queue.newest, SEQ_CST);
        if (running != NULL)
            dtrain__watch_look(line, comm, running, address, writes);
        for (; work != NULL && line->bytes == 0; work = work->older)
            if (work->mark == DTRAIN__WORK_MARK && !DTRAIN__ATOMIC_LOAD(&work->done, SEQ_CST))
                dtrain__watch_look(line, comm, &work->op, address, writes);
        for (size_t i = 0; !comm->fuse.open && i < comm->fuse.noted && line->bytes == 0; i++)
            dtrain__watch_look(line, comm, &comm->fuse.notes[i].op, address, writes);
    }
}

/* Notes where the buffers of an operation end. Its counts were checked. */
static void dtrain__watch_note(dtrain_comm *comm, dtrain__op *op)
{
    size_t offset;
    dtrain_status status = dtrain__op_sizes(comm, op, &op->reach[0], &op->reach[1], &offset);
    (void)status;
}

static void dtrain__watch_add(dtrain_comm *comm)
{
    if (!dtrain__faults_asked())
        return;
    comm->watch.on = 1;
    dtrain__faults_lock();
    comm->watch.next = *dtrain__watch_list();
    DTRAIN__ATOMIC_STORE(dtrain__watch_list(), comm, SEQ_CST);
    dtrain__faults_watch(DTRAIN__FAULTS_GROUPS, dtrain__watch_report);
    dtrain__faults_unlock();
}

static void dtrain__watch_remove(dtrain_comm *comm)
{
    dtrain_comm **at = dtrain__watch_list();
    if (!comm->watch.on)
        return;
    dtrain__faults_lock();
    while (*at != comm)
        at = &(*at)->watch.next;
    DTRAIN__ATOMIC_STORE(at, comm->watch.next, SEQ_CST);
    if (*dtrain__watch_list() == NULL)
        dtrain__faults_watch(DTRAIN__FAULTS_GROUPS, NULL);
    dtrain__faults_unlock();
    dtrain__faults_settle();
}

#endif
