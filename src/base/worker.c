/* ---- >>worker ----
 * The bell, on which threads wait for each other, and the worker, a thread that works for one owner. A worker performs
 * jobs in the order of their posts. Or it takes turns, in which the owner looks for work itself. It sleeps in between.
 * One thread at a time posts. A zeroed worker has no thread: it performs its jobs when somebody waits for them.
 *
 * Ending a worker waits for the current job or turn only; other posted jobs stay undone. A forked child does not have
 * the thread, so there the end returns at once. */
#ifndef DTRAIN__WORKER
#define DTRAIN__WORKER
#include "os_files.c"

#define DTRAIN__BELL_YIELDS 200u

/* A thread that changes what others may wait for rings the bell. That costs one load while nobody sleeps. A waiting
 * thread spins briefly, yields, then sleeps. Before it sleeps it registers and looks once more; it sleeps only if the
 * bell has not rung since. */
typedef struct dtrain__bell {
    uint32_t rings; /* counted only while somebody sleeps */
    uint32_t sleepers;
    uint32_t spins;            /* busy looks before yielding; 0 if threads outnumber processors */
    struct dtrain__bell *also; /* rings with this one, for a thread that listens to many; NULL: none */
} dtrain__bell;

static void dtrain__bell_ring(dtrain__bell *bell)
{
    for (; bell != NULL; bell = bell->also)
        if (DTRAIN__ATOMIC_LOAD(&bell->sleepers, SEQ_CST) > 0) {
            DTRAIN__ATOMIC_ADD(&bell->rings, 1, SEQ_CST);
            dtrain__os_wake_word(&bell->rings);
        }
}

/* Waits once: spins, yields or sleeps for at most 0.1 s. turn: how many waits came before, since something moved. */
static void dtrain__bell_wait(dtrain__bell *bell, unsigned turn, int64_t deadline_ns, int (*ready)(void *),
                              void *context)
{
    if (turn < bell->spins) {
        dtrain__os_pause();
        return;
    }
    if (turn < bell->spins + DTRAIN__BELL_YIELDS) {
        dtrain__os_yield();
        return;
    }
    int64_t now = dtrain__os_now_ns();
    int64_t span = deadline_ns > now ? deadline_ns - now : 0;
    if (span > 100000000)
        span = 100000000;
    DTRAIN__ATOMIC_ADD(&bell->sleepers, 1, SEQ_CST);
    uint32_t rings = DTRAIN__ATOMIC_LOAD(&bell->rings, SEQ_CST);
    if (span > 0 && !ready(context))
        dtrain__os_wait_word(&bell->rings, rings, span);
    DTRAIN__ATOMIC_SUB(&bell->sleepers, 1, SEQ_CST);
}

/* ---- the thread ---- */

/* The first member of the owner's struct for a job. */
typedef struct dtrain__worker_job {
    struct dtrain__worker_job *next;
    uint64_t number; /* posted jobs are counted from 1 */
} dtrain__worker_job;

typedef struct dtrain__worker {
    void *owner;
    void (*perform)(void *owner, dtrain__worker_job *job);
    int64_t (*turn)(void *owner); /* instead of jobs; returns until when it may sleep unless called; 0: not at all */
    dtrain__worker_job *inbox;    /* posted jobs, the last one first */
    dtrain__worker_job *first;    /* jobs that the thread has taken, in order */
    uint64_t posted, done;        /* numbers of jobs; posted also counts calls */
    dtrain__bell bell;
    dtrain__os_thread thread;
    long process; /* the process of the thread */
    int threaded;
    uint32_t stop;
} dtrain__worker;

static int dtrain__worker_stopping(const dtrain__worker *worker)
{
    return DTRAIN__ATOMIC_LOAD(&worker->stop, SEQ_CST) != 0;
}

/* Performs the next job. Returns 0 if there is none. */
static int dtrain__worker_next(dtrain__worker *worker)
{
    dtrain__worker_job *job = worker->first, *none = NULL, *last = NULL;
    if (job == NULL)
        last = DTRAIN__ATOMIC_EXCHANGE(&worker->inbox, none, SEQ_CST);
    while (last != NULL) {
        dtrain__worker_job *before = last->next;
        last->next = job;
        job = last;
        last = before;
    }
    if (job == NULL)
        return 0;
    uint64_t number = job->number;
    worker->first = job->next;
    worker->perform(worker->owner, job);
    DTRAIN__ATOMIC_STORE(&worker->done, number, SEQ_CST);
    dtrain__bell_ring(&worker->bell);
    return 1;
}

/* What a thread waits for: the worker waits for a call, the owner for a job. */
typedef struct dtrain__worker_goal {
    const dtrain__worker *worker;
    uint64_t number;
} dtrain__worker_goal;

static int dtrain__worker_called(void *argument)
{
    const dtrain__worker_goal *goal = (const dtrain__worker_goal *)argument;
    return dtrain__worker_stopping(goal->worker) || DTRAIN__ATOMIC_LOAD(&goal->worker->posted, SEQ_CST) != goal->number;
}

static int dtrain__worker_reached(void *argument)
{
    const dtrain__worker_goal *goal = (const dtrain__worker_goal *)argument;
    return DTRAIN__ATOMIC_LOAD(&goal->worker->done, SEQ_CST) >= goal->number;
}

static void dtrain__worker_body(void *argument)
{
    dtrain__worker *worker = (dtrain__worker *)argument;
    dtrain__worker_goal called = {worker, 0};
    for (;;) {
        int64_t until = INT64_MAX;
        called.number = DTRAIN__ATOMIC_LOAD(&worker->posted, SEQ_CST);
        if (dtrain__worker_stopping(worker))
            return;
        if (worker->turn != NULL)
            until = worker->turn(worker->owner);
        else if (dtrain__worker_next(worker))
            continue;
        /* a worker that wakes by itself need not yield first */
        for (unsigned turn = until != INT64_MAX ? DTRAIN__BELL_YIELDS : 0;
             !dtrain__worker_called(&called) && dtrain__os_now_ns() < until; turn++)
            dtrain__bell_wait(&worker->bell, turn, until, dtrain__worker_called, &called);
    }
}

/* Starts the thread of a worker with an owner, and perform or turn. Returns 0 or an errno. */
static int dtrain__worker_start(dtrain__worker *worker)
{
    worker->process = dtrain__os_self();
    worker->stop = 0;
    int error = dtrain__os_thread_start(&worker->thread, dtrain__worker_body, worker, (size_t)8 << 20);
    worker->threaded = error == 0;
    return error;
}

/* Returns whether this process has the thread. */
static int dtrain__worker_runs(const dtrain__worker *worker)
{
    return worker->threaded && worker->process == dtrain__os_self();
}

/* Wakes a sleeping worker for a turn. */
static void dtrain__worker_call(dtrain__worker *worker)
{
    DTRAIN__ATOMIC_ADD(&worker->posted, 1, SEQ_CST);
    dtrain__bell_ring(&worker->bell);
}

/* Posts a job. It must stay in place until it is done. */
static void dtrain__worker_post(dtrain__worker *worker, dtrain__worker_job *job)
{
    job->number = worker->posted + 1;
    job->next = DTRAIN__ATOMIC_LOAD(&worker->inbox, SEQ_CST);
    while (!DTRAIN__ATOMIC_COMPARE_EXCHANGE(&worker->inbox, &job->next, job, SEQ_CST))
        continue;
    dtrain__worker_call(worker);
}

static int dtrain__worker_is_done(const dtrain__worker *worker, uint64_t number)
{
    dtrain__worker_goal goal = {worker, number};
    return dtrain__worker_reached(&goal);
}

/* Waits until `number` jobs are done, or until until_ns. Returns whether they are done. */
static int dtrain__worker_wait(dtrain__worker *worker, uint64_t number, int64_t until_ns)
{
    dtrain__worker_goal goal = {worker, number};
    while (!worker->threaded && worker->done < number && dtrain__worker_next(worker))
        continue;
    for (unsigned turn = 0; !dtrain__worker_reached(&goal); turn++) {
        if (until_ns != INT64_MAX && dtrain__os_now_ns() >= until_ns)
            return 0;
        dtrain__bell_wait(&worker->bell, turn, until_ns, dtrain__worker_reached, &goal);
    }
    return 1;
}

/* Tells the thread to end. */
static void dtrain__worker_stop(dtrain__worker *worker)
{
    DTRAIN__ATOMIC_STORE(&worker->stop, 1u, SEQ_CST);
    dtrain__bell_ring(&worker->bell);
}

/* Ends the thread, if there is one. */
static void dtrain__worker_end(dtrain__worker *worker)
{
    if (!dtrain__worker_runs(worker))
        return;
    dtrain__worker_stop(worker);
    dtrain__os_thread_join(&worker->thread);
    worker->threaded = 0;
}

#endif
