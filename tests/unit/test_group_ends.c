/* Ends of groups while others are in a call: an allocation stops until the other side has gone on. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "hooks.h"
#include "dtrain.h"
#include "test.h"
#include "groups.h"

/* A thread that stops in the library's call for memory that `stops` names, until it may go on or 300 ms have passed. */
static struct {
    size_t bytes; /* a block larger than this: freed, or with `makes` made */
    int makes;
    uint32_t armed, stopped, go_on; /* stopped: 2 once it goes on */
} stops;

void *hook_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    size_t bytes = stops.makes ? new_bytes : new_bytes == 0 ? old_bytes : 0;
    if (bytes > stops.bytes && __atomic_exchange_n(&stops.armed, 0, __ATOMIC_SEQ_CST)) {
        __atomic_store_n(&stops.stopped, 1, __ATOMIC_SEQ_CST);
        for (int ms = 0; ms < 300 && !__atomic_load_n(&stops.go_on, __ATOMIC_SEQ_CST); ms++)
            usleep(1000);
        __atomic_store_n(&stops.stopped, 2, __ATOMIC_SEQ_CST);
    }
    return dtrain__memory_resize(pointer, old_bytes, new_bytes, align);
}

static void stops_begin(size_t bytes, int makes)
{
    memset(&stops, 0, sizeof stops);
    stops.bytes = bytes;
    stops.makes = makes;
    stops.armed = 1;
}

static void stops_wait(void)
{
    while (!__atomic_load_n(&stops.stopped, __ATOMIC_SEQ_CST))
        usleep(100);
}

static void *leaves_last(void *pointer)
{
    dtrain_comm_destroy((dtrain_comm *)pointer);
    return NULL;
}

static void *splits_and_talks(void *pointer)
{
    dtrain_comm **ends = (dtrain_comm **)pointer;
    int rank = dtrain_comm_rank(ends[0]), x = 7;
    CHECK_EQ(dtrain_comm_split(ends[0], 0, 0, &ends[1]), DTRAIN_OK);
    CHECK_EQ(rank == 0 ? dtrain_send(ends[1], &x, 1, DTRAIN_I32, 1) : dtrain_recv(ends[1], &x, 1, DTRAIN_I32, 0),
             DTRAIN_OK);
    return NULL;
}

/* Ranks leave a group and its world in different orders: one frees the group while another leaves the world. */
TEST(a_world_stays_until_its_last_group_is_freed)
{
    dtrain_comm *worlds[2], *ends[2][2];
    pthread_t threads[2];
    CHECK_EQ(dtrain_threads_create(worlds, 2, NULL), DTRAIN_OK);
    for (int rank = 0; rank < 2; rank++) {
        ends[rank][0] = worlds[rank];
        pthread_create(&threads[rank], NULL, splits_and_talks, ends[rank]);
    }
    for (int rank = 0; rank < 2; rank++)
        pthread_join(threads[rank], NULL);
    dtrain_comm_destroy(ends[0][0]);
    dtrain_comm_destroy(ends[1][1]);
    stops_begin(DTRAIN__RING_BYTES, 0); /* rank 0 frees the ring between them */
    pthread_create(&threads[0], NULL, leaves_last, ends[0][1]);
    stops_wait();
    dtrain_comm_destroy(ends[1][0]);
    CHECK_EQ(__atomic_load_n(&stops.stopped, __ATOMIC_SEQ_CST), 2); /* else it frees into a world that is gone */
    __atomic_store_n(&stops.go_on, 1, __ATOMIC_SEQ_CST);
    pthread_join(threads[0], NULL);
}

static void *stores(void *pointer)
{
    static char value[50000];
    CHECK_EQ(dtrain_store_set((dtrain_comm *)pointer, "key", value, sizeof value), DTRAIN_OK);
    return NULL;
}

TEST(a_forked_child_leaves_while_a_thread_is_in_a_call)
{
    dtrain_comm *worlds[2];
    pthread_t thread;
    CHECK_EQ(dtrain_threads_create(worlds, 2, NULL), DTRAIN_OK);
    stops_begin(50000, 1);
    pthread_create(&thread, NULL, stores, worlds[1]);
    stops_wait();
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dtrain_comm_destroy(worlds[0]);
        dtrain_comm_destroy(worlds[1]);
        _exit(0);
    }
    __atomic_store_n(&stops.go_on, 1, __ATOMIC_SEQ_CST);
    CHECK_EQ(end_of(child, 10), 0);
    pthread_join(thread, NULL);
    dtrain_comm_destroy(worlds[0]);
    dtrain_comm_destroy(worlds[1]);
}
