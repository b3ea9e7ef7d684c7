/* Operations that are waited for in part, or aborted: on threads, on processes over TCP, and over a transport
 * that has nothing but send and recv. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "worlds.h"
#include "wait_in_part.h"

#include <sys/mman.h>

/* How far one rank has told the others that it has come, in memory that ranks share, threads or processes. */
static int *told;

__attribute__((constructor)) static void share_told(void)
{
    told = (int *)mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static void tell(int how_far)
{
    __atomic_store_n(told, how_far, __ATOMIC_SEQ_CST);
}

static void await_told(int how_far)
{
    while (__atomic_load_n(told, __ATOMIC_SEQ_CST) < how_far)
        usleep(1000);
}

/* ---- waiting in part ---- */

static int64_t thread_cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void waits_in_part(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float x = 1, token = 0;
    dtrain_work *work;
    if (rank == 0)
        tell(0);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 1)
        await_told(1);
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    if (rank == 0) {
        CHECK_EQ(wait_in_part(work, 0), 0);
        int64_t cpu = thread_cpu_ns();
        double begin = now_s();
        CHECK_EQ(wait_in_part(work, 100), 0);
        CHECK(now_s() - begin >= 0.1);
        CHECK(thread_cpu_ns() - cpu < 60000000);
        CHECK(!dtrain_work_done(work));
        tell(1);
    }
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK(x == 2);
    if (rank == 1)
        await_told(2);
    if (rank == 0) {
        CHECK_EQ(dtrain_recv_async(world, &token, 1, DTRAIN_F32, 1, &work), DTRAIN_OK);
        CHECK_EQ(wait_in_part(work, 20), 0);
        tell(2);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        CHECK(token == 2);
    } else
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK);
}

TEST(a_wait_that_times_out_sleeps_and_leaves_its_operation_running)
{
    everywhere(2, waits_in_part);
}

/* ---- abort ---- */

static void *abort_soon(void *pointer)
{
    usleep(50000);
    CHECK_EQ(dtrain_comm_abort((dtrain_comm *)pointer, "the loss is not a number"), DTRAIN_OK);
    return NULL;
}

static const char *const aborted_by_1 = "rank 1 aborted the group: the loss is not a number";

/* Ranks 0 and 2 are blocked for rank 1, which aborts while it waits for a message that nobody sends. */
static void aborts(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    float x = 1;
    dtrain_work *work = NULL;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    double begin = now_s();
    if (rank == 1) {
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, abort_soon, world), 0);
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 0), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "recv #1 (f32 x 1) on rank 1: rank 1 aborted the group");
        pthread_join(thread, NULL);
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, 0), DTRAIN_ERR_ABORTED);
    } else if (rank == 0) {
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_ABORTED);
        CHECK_CONTAINS(dtrain_last_error(), "all_reduce #2 (sum, f32 x 1) on rank 0: ");
    } else {
        CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_ABORTED);
    }
    CHECK_CONTAINS(dtrain_last_error(), aborted_by_1);
    CHECK_WITHIN(now_s() - begin, 10);
    CHECK_EQ(dtrain_comm_abort(world, "later"), DTRAIN_OK);
    CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, (rank + 1) % 3), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), aborted_by_1);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), aborted_by_1);
}

TEST(an_abort_ends_blocked_pending_and_later_calls_on_every_rank)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int poll = 0; poll < 2; poll++) {
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        on_threads(3, aborts, &desc);
        on_processes(3, aborts, &desc);
    }
    CHECK_EQ(dtrain_comm_abort(NULL, "x"), DTRAIN_ERR_INVALID);
}

TEST(an_abort_over_a_transport_of_your_own_ends_the_blocked_call_and_tells_the_transport)
{
    cable *cables = cables_new(2);
    cable_end end;
    dtrain_comm *comm = cable_comm(cables, &end, 0, 2, NULL);
    pthread_t thread;
    float x = 1;
    double begin = now_s();
    CHECK_EQ(pthread_create(&thread, NULL, abort_soon, comm), 0);
    CHECK_EQ(dtrain_all_reduce(comm, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "all_reduce #1 (sum, f32 x 1) on rank 0: rank 0 aborted the group: the loss");
    CHECK_WITHIN(now_s() - begin, 10);
    pthread_join(thread, NULL);
    CHECK(end.told);
    CHECK_EQ(dtrain_send(comm, &x, 1, DTRAIN_F32, 1), DTRAIN_ERR_ABORTED);
    dtrain_comm_destroy(comm);
    free(cables);
}

/* Large collectives, blocking, async and fused, on fresh buffers that are freed as soon as a call has failed. */
static void until_aborted(dtrain_comm *world)
{
    dtrain_status status = DTRAIN_OK;
    for (int step = 0; status == DTRAIN_OK; step++) {
        size_t count = 50000 + 1000 * (size_t)(step % 50);
        float *in = values(0, count), *out = (float *)malloc(count * sizeof(float));
        dtrain_work *work = NULL;
        if (step % 3 == 0) {
            status = dtrain_all_reduce_async(world, in, out, count, DTRAIN_F32, DTRAIN_SUM, &work);
            if (status == DTRAIN_OK)
                status = dtrain_work_wait(work);
        } else if (step % 3 == 1) {
            status = dtrain_all_reduce(world, in, out, count, DTRAIN_F32, DTRAIN_SUM);
        } else {
            CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
            for (size_t k = 0; k < 10; k++)
                CHECK_EQ(dtrain_all_reduce(world, in + k, out + k, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
            CHECK_EQ(dtrain_broadcast(world, out, count, DTRAIN_F32, step % 2), DTRAIN_OK);
            status = dtrain_fuse_end(world);
        }
        memset(in, 0, count * sizeof(float));
        free(in);
        free(out);
    }
    CHECK_EQ(status, DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "aborted the group: ");
}

static dtrain_comm *victims[3];

static void *until_aborted_main(void *pointer)
{
    until_aborted((dtrain_comm *)pointer);
    return NULL;
}

TEST(buffers_may_be_freed_at_once_after_an_abort)
{
    for (int round = 0; round < 40; round++) {
        pthread_t threads[3];
        CHECK_EQ(dtrain_threads_create(victims, 3, NULL), DTRAIN_OK);
        for (int rank = 0; rank < 3; rank++)
            CHECK_EQ(pthread_create(&threads[rank], NULL, until_aborted_main, victims[rank]), 0);
        usleep((useconds_t)(2000 + 700 * round));
        CHECK_EQ(dtrain_comm_abort(victims[round % 3], "enough"), DTRAIN_OK);
        for (int rank = 0; rank < 3; rank++)
            pthread_join(threads[rank], NULL);
        for (int rank = 0; rank < 3; rank++)
            dtrain_comm_destroy(victims[rank]);
    }
}
