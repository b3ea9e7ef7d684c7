/* Groups and handles used after their end, and one group used by two threads at once: an error that says so. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include <pthread.h>

/* Keeps what is freed, so that what a destroyed group's memory holds can be read; small blocks have been taken by
 * somebody else. */
static void *keep(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    if (new_bytes == 0 && pointer != NULL && old_bytes < 164)
        memset(pointer, 0xa5, old_bytes);
    if (new_bytes == 0)
        return NULL;
    if (posix_memalign(&block, align < sizeof block ? sizeof block : align, new_bytes) != 0)
        return NULL;
    if (pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    return block;
}

static char logged[700];

static void note(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    CHECK_EQ(level, DTRAIN_LOG_ERROR);
    snprintf(logged, sizeof logged, "%s", text);
}

static void is_gone(dtrain_status status, const char *call)
{
    char text[100];
    CHECK_EQ(status, DTRAIN_ERR_INVALID);
    snprintf(text, sizeof text, "%s: this group was destroyed", call);
    CHECK_CONTAINS(dtrain_last_error(), text);
}

/* Destroys a group of one rank of two, whose memory stays, and calls what there is to call. */
static void use_after_the_end(dtrain_comm *gone, dtrain_work *handle)
{
    float x = 1;
    size_t bytes = sizeof x, got;
    uint64_t flags = 0;
    int ready;
    void *buffer = &x;
    dtrain_comm *group;
    dtrain_work *work;
    is_gone(dtrain_all_reduce(gone, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), "all_reduce");
    is_gone(dtrain_barrier(gone), "barrier");
    is_gone(dtrain_send(gone, &x, 1, DTRAIN_F32, 1), "send");
    is_gone(dtrain_all_reduce_async(gone, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), "all_reduce");
    CHECK(work == NULL);
    is_gone(dtrain_comm_check_equal(gone, &x, 1, DTRAIN_F32), "check_equal");
    is_gone(dtrain_comm_split(gone, 0, 0, &group), "comm_split");
    is_gone(dtrain_comm_shrink(gone, &group), "comm_shrink");
    is_gone(dtrain_comm_agree(gone, &flags), "comm_agree");
    is_gone(dtrain_resync(gone, 0, &buffer, &bytes, 1, NULL), "resync");
    is_gone(dtrain_fuse_begin(gone), "fuse_begin");
    is_gone(dtrain_fuse_end(gone), "fuse_end");
    is_gone(dtrain_store_set(gone, "key", "value", 5), "store_set");
    is_gone(dtrain_store_get(gone, "key", &x, sizeof x, &got), "store_get");
    is_gone(dtrain_store_wait(gone, "key", &x, sizeof x, &got), "store_wait");
    is_gone(dtrain_store_delete(gone, "key"), "store_delete");
    CHECK_EQ(dtrain_comm_blocked_ns(gone), 0);
    is_gone(dtrain_comm_poll(gone, 0), "comm_poll");
    is_gone(dtrain_comm_ready(gone, &ready), "comm_ready");
    is_gone(dtrain_comm_abort(gone, NULL), "comm_abort");
    is_gone(dtrain_comm_trace(gone, "/nowhere/trace.json"), "comm_trace");
    CHECK_EQ(dtrain_work_wait(handle), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "work_wait: the group of this handle was destroyed");
    logged[0] = 0;
    dtrain_set_log(note, NULL);
    dtrain_comm_destroy(gone);
    dtrain_set_log(NULL, NULL);
    CHECK_CONTAINS(logged, "comm_destroy: this group was destroyed");
}

TEST(a_destroyed_group_of_threads_is_named_in_each_call)
{
    dtrain_allocator keeper = {keep, NULL, 0, 0};
    dtrain_comm_desc desc;
    dtrain_comm *comms[2];
    dtrain_work *handle;
    float x = 1;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &keeper;
    CHECK_EQ(dtrain_threads_create(comms, 2, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce_async(comms[0], &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &handle), DTRAIN_OK);
    dtrain_comm_destroy(comms[0]);
    use_after_the_end(comms[0], handle);
    dtrain_comm_destroy(comms[1]);
}

TEST(a_destroyed_group_of_processes_is_named_in_each_call)
{
    dtrain_allocator keeper = {keep, NULL, 0, 0};
    scene s;
    dtrain_comm *world;
    dtrain_work *handle;
    float x = 1;
    scene_begin(&s, 2, 0);
    dtrain_comm_desc desc = scene_desc(&s, 0);
    desc.allocator = &keeper;
    desc.progress = DTRAIN_PROGRESS_POLL;
    fflush(stdout);
    pid_t one = fork();
    if (one == 0) {
        desc.rank = 1;
        if (dtrain_comm_create(&world, &desc) != DTRAIN_OK || dtrain_barrier(world) != DTRAIN_OK)
            _exit(1);
        dtrain_comm_destroy(world);
        _exit(0);
    }
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &handle), DTRAIN_OK);
    dtrain_comm_destroy(world);
    CHECK_EQ(end_of(one, 20), 0);
    use_after_the_end(world, handle);
}

TEST(a_handle_is_waited_for_once)
{
    dtrain_comm *world;
    float x = 1;
    dtrain_work *work;
    CHECK_EQ(dtrain_threads_create(&world, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_broadcast_async(world, &x, 1, DTRAIN_F32, 0, &work), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "work_wait: this handle was waited for before, which freed it; wait once");
    dtrain_work *again, *more;
    CHECK_EQ(dtrain_broadcast_async(world, &x, 1, DTRAIN_F32, 0, &again),
             DTRAIN_OK); /* and is in the list of spare ones once */
    CHECK_EQ(dtrain_broadcast_async(world, &x, 1, DTRAIN_F32, 0, &more), DTRAIN_OK);
    CHECK(again == work && more != work);
    CHECK_EQ(dtrain_work_wait(again), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(more), DTRAIN_OK);
    dtrain_comm_destroy(world);
}

/* What two threads of one rank do: the first is in a call that needs rank 1. */
typedef struct pair {
    dtrain_comm *mine, *other;
    dtrain_status status;
    float x;
} pair;

static void *reduces(void *pointer)
{
    pair *p = (pair *)pointer;
    p->status = dtrain_all_reduce(p->mine, &p->x, &p->x, 1, DTRAIN_F32, DTRAIN_SUM);
    return NULL;
}

static int in_a_call(dtrain_comm *comm)
{
    return __atomic_load_n(&comm->use.caller, __ATOMIC_SEQ_CST) != 0;
}

/* This rank's second thread calls while its first one waits for rank 1. */
static void calls_beside(dtrain_comm *mine, dtrain_comm *other)
{
    pair p = {mine, NULL, DTRAIN_ERR_IO, 1};
    pthread_t first;
    dtrain_work *work;
    float y = 0;
    CHECK_EQ(pthread_create(&first, NULL, reduces, &p), 0);
    while (!in_a_call(mine))
        usleep(100);
    CHECK_EQ(dtrain_barrier(mine), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "two threads called dtrain_all_reduce and dtrain_barrier on one group at once");
    CHECK_CONTAINS(dtrain_last_error(), "give each thread a group of its own (dtrain_comm_split)");
    CHECK_EQ(dtrain_send_async(mine, &y, 1, DTRAIN_F32, 1, &work), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "dtrain_all_reduce and dtrain_send on one group");
    CHECK_EQ(dtrain_store_set(mine, "key", NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "dtrain_all_reduce and dtrain_store_set on one group");
    CHECK_EQ(dtrain_comm_rank(mine), 0); /* any thread may ask */
    CHECK_EQ(dtrain_comm_trace(mine, "/nowhere/trace.json"), DTRAIN_ERR_IO);
    if (other != NULL)
        CHECK_EQ(dtrain_barrier(other), DTRAIN_OK);
    pthread_join(first, NULL);
    CHECK_EQ(p.status, DTRAIN_OK);
    CHECK_EQ(p.x, 3);
    CHECK(!in_a_call(mine));
    CHECK_EQ(dtrain_barrier(mine), DTRAIN_OK); /* one after the other */
}

/* Rank 1 comes to the call in the first group once both threads of rank 0 are through with the second. */
static dtrain_status two_groups(dtrain_comm *world, void *user)
{
    dtrain_comm *other;
    float x = 2;
    (void)user;
    dtrain_status status = dtrain_comm_split(world, 0, 0, &other);
    if (status != DTRAIN_OK)
        return status;
    if (dtrain_comm_rank(world) == 0) {
        calls_beside(world, other);
        dtrain_comm_destroy(other);
        return DTRAIN_OK;
    }
    status = dtrain_barrier(other);
    if (status == DTRAIN_OK)
        status = dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM);
    if (status == DTRAIN_OK)
        status = dtrain_barrier(world);
    CHECK_EQ(x, 3);
    dtrain_comm_destroy(other);
    return status;
}

static void *awaits_key(void *pointer)
{
    size_t bytes;
    CHECK_EQ(dtrain_store_wait((dtrain_comm *)pointer, "key", NULL, 0, &bytes), DTRAIN_OK);
    return NULL;
}

TEST(two_threads_on_one_groups_store_are_told_apart)
{
    dtrain_comm *worlds[2];
    pthread_t thread;
    CHECK_EQ(dtrain_threads_create(worlds, 2, NULL), DTRAIN_OK);
    CHECK_EQ(pthread_create(&thread, NULL, awaits_key, worlds[1]), 0);
    while (!in_a_call(worlds[1]))
        usleep(100);
    CHECK_EQ(dtrain_store_set(worlds[1], "key", NULL, 0), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "dtrain_store_wait and dtrain_store_set on one group");
    CHECK_EQ(dtrain_store_set(worlds[0], "key", NULL, 0), DTRAIN_OK);
    pthread_join(thread, NULL);
    dtrain_comm_destroy(worlds[0]);
    dtrain_comm_destroy(worlds[1]);
}

TEST(two_threads_on_one_group_are_told_apart_from_two_on_two)
{
    CHECK_EQ(dtrain_run_threads(2, two_groups, NULL, NULL), DTRAIN_OK);
}

static int two_groups_of_processes(dtrain_comm *world, scene *s)
{
    int before = test_failures;
    (void)s;
    CHECK_EQ(two_groups(world, NULL), DTRAIN_OK);
    return test_failures != before;
}

TEST(two_threads_on_one_group_of_processes_as_well)
{
    scene s;
    scene_begin(&s, 2, 0);
    run_ranks(&s, two_groups_of_processes);
}

/* Any thread may end what another one is in. */
TEST(an_abort_beside_a_call_is_no_second_call)
{
    dtrain_comm *comms[2];
    CHECK_EQ(dtrain_threads_create(comms, 2, NULL), DTRAIN_OK);
    pair p = {comms[0], NULL, DTRAIN_OK, 1};
    pthread_t first;
    CHECK_EQ(pthread_create(&first, NULL, reduces, &p), 0);
    while (!in_a_call(comms[0]))
        usleep(100);
    CHECK_EQ(dtrain_comm_abort(comms[0], "enough"), DTRAIN_OK);
    pthread_join(first, NULL);
    CHECK_EQ(p.status, DTRAIN_ERR_ABORTED);
    dtrain_comm_destroy(comms[0]);
    dtrain_comm_destroy(comms[1]);
}

TEST(constants_of_all_enums_are_disjoint)
{
    static const int first_last[][2] = {{DTRAIN_BOOL, DTRAIN_U64},
                                        {DTRAIN_ERR_INVALID, DTRAIN_ERR_ABORTED},
                                        {DTRAIN_SUM, DTRAIN_XOR},
                                        {DTRAIN_ALGORITHM_FUSED, DTRAIN_ALGORITHM_DOUBLE_TREE},
                                        {DTRAIN_PROGRESS_POLL, DTRAIN_PROGRESS_POLL},
                                        {DTRAIN_ORDER_ANY, DTRAIN_ORDER_ANY},
                                        {DTRAIN_SGD, DTRAIN_OPTIMIZER_NONE},
                                        {DTRAIN_FULL_SHARD, DTRAIN_HYBRID_SHARD},
                                        {DTRAIN_INDEX_U32, DTRAIN_INDEX_NONE},
                                        {DTRAIN_EXCHANGE_GATHER, DTRAIN_EXCHANGE_SPLIT},
                                        {DTRAIN_COMPRESS_TOPK, DTRAIN_COMPRESS_OWN},
                                        {DTRAIN_PIPELINE_GPIPE, DTRAIN_PIPELINE_ZB_H1},
                                        {DTRAIN_PART_FORWARD, DTRAIN_PART_WEIGHTS},
                                        {DTRAIN_MEMORY_DEVICE, DTRAIN_MEMORY_PINNED},
                                        {DTRAIN_DEVICE_STAGED, DTRAIN_DEVICE_HOSTS},
                                        {DTRAIN_LOG_INFO, DTRAIN_LOG_ERROR},
                                        {DTRAIN_CALL_ALL_REDUCE, DTRAIN_CALL_EXCHANGE},
                                        {DTRAIN_SCHEDULE_LINEAR, DTRAIN_SCHEDULE_COSINE}};
    int count = (int)(sizeof first_last / sizeof first_last[0]);
    for (int i = 0; i < count; i++)
        for (int k = 0; k < i; k++)
            CHECK(first_last[k][1] < first_last[i][0] || first_last[i][1] < first_last[k][0]);
    CHECK_EQ(strcmp(dtrain_status_name((dtrain_status)DTRAIN_F32), "not a dtrain_status"), 0);
}
