/* Ranks that are processes of one host with a queue each on one GPU: collectives on each other's memory by handles of
 * CUDA's IPC give the bits of the CPU's; what cannot be shared is refused or staged; who is killed is lost to the rest.
 */
#include "dtrain.h"
#include "cuda_processes.h"
#include <pthread.h>
#include <sys/mman.h>

static dtrain_device *device_begin(void)
{
    return device_on(0);
}

/* ---- results ---- */

static dtrain_device_mode wanted, becomes;

static int tries(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_begin();
    (void)s;
    works(world, device, wanted, becomes);
    works(world, device, wanted, becomes);
    CHECK_EQ(memory_files(), 0);
    device_finish(device);
    return 0;
}

static void tries_on(int ranks, dtrain_device_mode mode, dtrain_device_mode expected)
{
    scene s;
    wanted = mode;
    becomes = expected;
    scene_on_gpu(&s, ranks, ranks % 2);
    run_ranks(&s, tries);
}

TEST(processes_on_one_gpu_go_by_events_and_give_the_cpus_bits)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        tries_on(ranks, DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_EVENTS);
    tries_on(4, DTRAIN_DEVICE_EVENTS, DTRAIN_DEVICE_EVENTS);
}

TEST(processes_on_one_gpu_give_the_cpus_bits_staged)
{
    tries_on(2, DTRAIN_DEVICE_STAGED, DTRAIN_DEVICE_STAGED);
}

static size_t large;

static int tries_large(dtrain_comm *world, scene *s)
{
    const size_t counts[] = {(large >> 8) + 1, large, large - 1};
    trial t = {counts, 3, large};
    dtrain_device *device = device_begin();
    (void)s;
    works_on(world, device, wanted, becomes, &t);
    device_finish(device);
    return 0;
}

TEST(large_vectors_of_processes_give_the_cpus_bits)
{
    large = cuda_large();
    wanted = DTRAIN_DEVICE_MODE_AUTO;
    becomes = DTRAIN_DEVICE_EVENTS;
    for (int ranks = 2; ranks <= 4 && large > 0; ranks += 2) {
        scene s;
        scene_on_gpu(&s, ranks, 0);
        s.seconds = 900;
        s.desc.timeout_ms = 300000;
        run_ranks(&s, tries_large);
    }
}

typedef struct lent {
    uint64_t at, bytes;
} lent;

/* A peer has new memory: what lay in its place is gone from the list. Returns how many are there now. */
static int now_lent(lent *list, int count, lent made)
{
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (list[i].at + list[i].bytes <= made.at || made.at + made.bytes <= list[i].at)
            list[kept++] = list[i];
    list[kept] = made;
    return kept + 1;
}

/* Memory comes and goes, at old addresses and new: what was opened before is not taken for it, and is closed if it
 * lay in the same place. */
static int reuses(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_begin();
    dtrain_device_group *group = NULL;
    int rank = dtrain_comm_rank(world), size = dtrain_comm_size(world), counts[3] = {0}, expected = 0;
    lent lists[3][40], all[3];
    (void)s;
    CHECK_OK(dtrain_device_group_create(&group, world, device, NULL));
    CHECK_EQ(dtrain_device_group_mode(group), DTRAIN_DEVICE_EVENTS);
    for (int i = 0; i < 40; i++) {
        float one = (float)(rank + i), got = 0;
        size_t bytes = (size_t)(1000 + i % 3 * 1024) * 4;
        float *x = (float *)device_put(device, NULL, bytes);
        lent mine = {(uint64_t)(uintptr_t)x, bytes};
        CHECK_OK(dtrain_all_gather(world, &mine, all, 2 * (size_t)size, DTRAIN_I64));
        for (int peer = 0; peer < size; peer++)
            counts[peer] = now_lent(lists[peer], counts[peer], all[peer]);
        CHECK_OK(dtrain_device_fill(device, x, &one, 4, 1000));
        CHECK_OK(dtrain_device_group_all_reduce(group, x, x, 1000, DTRAIN_F32, DTRAIN_SUM));
        CHECK_OK(dtrain_device_copy(device, &got, x + 999, 4));
        CHECK(got == (float)(size * i + size * (size - 1) / 2));
        device_drop(device, x);
    }
#ifndef __CUDACC__
    for (int peer = 0; peer < size; peer++)
        expected += peer != rank ? counts[peer] : 0;
    CHECK_EQ(opened(), expected);
    dtrain_device_group_destroy(group);
    CHECK_EQ(opened(), 0);
#else
    (void)expected;
    dtrain_device_group_destroy(group);
#endif
    device_finish(device);
    return 0;
}

TEST(memory_that_was_freed_is_not_taken_for_what_is_in_its_place)
{
    scene s;
    scene_on_gpu(&s, 3, 0);
    run_ranks(&s, reuses);
}

/* ---- what cannot be shared ---- */

enum { POOL, MANAGED, PINNED, CPUS, MEMORIES };

static void *bad_memory(dtrain_device *device, int kind, size_t bytes)
{
    void *made = NULL;
    if (kind == POOL)
        CHECK_EQ(cudaMallocAsync(&made, bytes, (cudaStream_t)dtrain_cuda_stream(device)), cudaSuccess);
    else if (kind == MANAGED)
        CHECK_EQ(cudaMallocManaged(&made, bytes), cudaSuccess);
    else
        CHECK_OK(dtrain_device_alloc(kind == CPUS ? NULL : device, DTRAIN_MEMORY_PINNED, bytes, &made));
    return made;
}

static void bad_free(dtrain_device *device, int kind, void *memory)
{
    if (kind == POOL || kind == MANAGED)
        CHECK_EQ(cudaFree(memory), cudaSuccess);
    else
        dtrain_device_free(kind == CPUS ? NULL : device, DTRAIN_MEMORY_PINNED, memory);
}

static int refuses(dtrain_comm *world, scene *s)
{
    static const char *const texts[] = {"cudaMallocAsync", "cudaMallocManaged", "pinned", "the CPU's"};
    dtrain_device *device = device_begin();
    dtrain_device_group *group = NULL;
    (void)s;
    float *good = (float *)device_put(device, NULL, 4000), *in = (float *)device_put(device, NULL, 4000), one = 1,
          got = 0;
    CHECK_OK(dtrain_device_group_create(&group, world, device, NULL));
    for (int kind = 0; kind < MEMORIES; kind++) {
        int bad = dtrain_comm_rank(world) == VICTIM;
        float *x = bad ? (float *)bad_memory(device, kind, 4000) : good;
        dtrain_status status = kind == CPUS ? DTRAIN_ERR_INVALID : DTRAIN_ERR_UNSUPPORTED;
        CHECK_ERROR(dtrain_device_group_all_reduce(group, x, x, 1000, DTRAIN_F32, DTRAIN_SUM), status,
                    "rank 1's memory");
        CHECK_CONTAINS(dtrain_last_error(), texts[kind]);
        CHECK_CONTAINS(dtrain_last_error(), "dtrain_device_alloc");
        CHECK_CONTAINS(dtrain_last_error(), "device_group_all_reduce");
        if (kind != CPUS)
            CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_DEVICE_STAGED");
        CHECK_ERROR(dtrain_device_group_all_gather(group, in, x, 1000, DTRAIN_F32), status, texts[kind]);
        CHECK_OK(dtrain_device_fill(device, good, &one, 4, 1000));
        CHECK_OK(dtrain_device_group_all_reduce(group, good, good, 1000, DTRAIN_F32, DTRAIN_SUM));
        CHECK_OK(dtrain_device_copy(device, &got, good + 999, 4));
        CHECK(got == (float)dtrain_comm_size(world));
        if (bad)
            bad_free(device, kind, x);
    }
    dtrain_device_group_destroy(group);
    device_drop(device, good);
    device_drop(device, in);
    device_finish(device);
    return 0;
}

TEST(memory_that_cannot_be_shared_is_refused_on_all_ranks_with_the_cure)
{
    scene s;
    scene_on_gpu(&s, 3, 0);
    run_ranks(&s, refuses);
}

enum { NO_IPC, NO_WORDS, OTHER_HANDLES, NO_HANDLES, NO_DEVICE, HANDS_OUT_NONSENSE, HINDRANCES };

static int way;

static dtrain_status nonsense(dtrain_device *device, const void *pointer, dtrain_device_shared *shared)
{
    (void)device, (void)pointer;
    memset(shared, 0x55, sizeof *shared);
    return DTRAIN_OK;
}

static int no_way(dtrain_comm *world, scene *s)
{
    static const char *const texts[] = {"",          "cuStreamWriteValue32", "of another kind", "cannot share memory",
                                        "no device", "cudaIpcOpenMemHandle"};
    dtrain_device *device = device_begin();
    dtrain_device_group *group = NULL;
    dtrain_device_group_desc desc;
    int victim = dtrain_comm_rank(world) == VICTIM;
    (void)s;
    if (victim && way == OTHER_HANDLES)
        ops.handles = "of somebody else's";
    if (victim && way == NO_HANDLES)
        ops.handles = NULL;
    if (victim && way == HANDS_OUT_NONSENSE)
        ops.memory_share = nonsense;
#ifndef __CUDACC__
    dtrain__cuda_emulated.no_ipc = victim && way == NO_IPC;
    dtrain__cuda_emulated.no_words = victim && way == NO_WORDS;
#endif
    dtrain_device *mine = victim && way == NO_DEVICE ? NULL : device;
    memset(&desc, 0, sizeof desc);
    desc.mode = DTRAIN_DEVICE_EVENTS;
    CHECK_ERROR(dtrain_device_group_create(&group, world, mine, &desc), DTRAIN_ERR_UNSUPPORTED, texts[way]);
    CHECK(group == NULL);
    CHECK_CONTAINS(dtrain_last_error(), way == HANDS_OUT_NONSENSE ? "rank 0: cuda" : "rank 1");
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_DEVICE_STAGED");
    if (mine != NULL)
        works(world, mine, DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_STAGED);
    else
        works(world, NULL, DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_STAGED);
    CHECK_EQ(memory_files(), 0);
    device_finish(device);
    return 0;
}

TEST(where_processes_cannot_reach_each_other_the_group_is_staged_and_events_unsupported)
{
#ifdef __CUDACC__
    way = OTHER_HANDLES;
#else
    way = NO_IPC;
#endif
    for (; way < HINDRANCES; way++) {
        scene s;
        scene_on_gpu(&s, 3, 0);
        run_ranks(&s, no_way);
    }
}

/* Two ranks of one process do not open what is their own. */
static void *one_of_two(void *user)
{
    scene *s = (scene *)user;
    static int next;
    dtrain_comm_desc desc = scene_desc(s, __atomic_fetch_add(&next, 1, __ATOMIC_SEQ_CST));
    dtrain_comm *world = NULL;
    dtrain_device_group *group = NULL;
    dtrain_device_group_desc events;
    dtrain_device *device = cuda_device(0);
    memset(&events, 0, sizeof events);
    events.mode = DTRAIN_DEVICE_EVENTS;
    CHECK_OK(dtrain_comm_create(&world, &desc));
    CHECK_ERROR(dtrain_device_group_create(&group, world, device, &events), DTRAIN_ERR_UNSUPPORTED, "in one process");
    works(world, device, DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_STAGED);
    dtrain_comm_destroy(world);
    dtrain_cuda_destroy(device);
    return NULL;
}

static int two_in_one(dtrain_comm *world, scene *s)
{
    scene two;
    pthread_t threads[2];
    (void)world, (void)s;
    scene_on_gpu(&two, 2, 0);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, one_of_two, &two), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

TEST(ranks_of_a_transport_of_processes_that_are_in_one_process_stage)
{
    scene s;
    scene_on_gpu(&s, 1, 0);
    run_ranks(&s, two_in_one);
}

/* Handles are of allocations, and are opened by others only, once or again, while there is something to open. */
static int hands_over(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_begin();
    dtrain_device_shared shared, all[2];
    int rank = dtrain_comm_rank(world), peer = 1 - rank;
    void *first = NULL, *again = NULL;
    unsigned char *own = (unsigned char *)device_put(device, NULL, 5000), byte = (unsigned char)(7 + rank),
                  got[2] = {0};
    (void)s;
    CHECK_OK(dtrain_device_fill(device, own, &byte, 1, 5000));
    CHECK_OK(ops.memory_share(device, own + 4321, &shared));
    CHECK_EQ(shared.offset, 4321);
    CHECK_EQ(shared.base, (uintptr_t)own);
    CHECK_EQ(shared.bytes, 5000);
    CHECK_OK(dtrain_all_gather(world, &shared, all, 2 * sizeof shared, DTRAIN_U8));
    CHECK_EQ(ops.memory_open(device, &all[rank], &first), DTRAIN_ERR_UNSUPPORTED);
    CHECK_OK(ops.memory_open(device, &all[peer], &first));
    CHECK_OK(ops.memory_open(device, &all[peer], &again));
    CHECK(first == again);
    ops.memory_close(device, again);
    CHECK_OK(dtrain_device_copy(device, got, (unsigned char *)first + 4999, 1));
    CHECK_EQ(got[0], 7 + peer);
    CHECK_OK(dtrain_barrier(world));
    byte = (unsigned char)(17 + rank); /* into the peer's */
    CHECK_OK(dtrain_device_fill(device, (unsigned char *)first + 4999, &byte, 1, 1));
    CHECK_OK(dtrain_device_wait(device));
    CHECK_OK(dtrain_barrier(world));
    CHECK_OK(dtrain_device_copy(device, got, own + 4998, 2));
    CHECK_EQ(got[0], 7 + rank);
    CHECK_EQ(got[1], 17 + peer);
    ops.memory_close(device, first);
    CHECK_OK(dtrain_barrier(world));
    device_drop(device, own);
    CHECK_OK(dtrain_barrier(world));
    CHECK(ops.memory_open(device, &all[peer], &first) != DTRAIN_OK);
    device_finish(device);
    CHECK_EQ(memory_files(), 0);
    return 0;
}

TEST(handles_are_of_allocations_and_open_for_others_alone_while_they_last)
{
    scene s;
    scene_on_gpu(&s, 2, 0);
    run_ranks(&s, hands_over);
}

#ifdef DTRAIN_CUDA_EMULATE
/* Memory is opened while something runs: what begins before that has ended reaches it. */
static int opens_beside(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_begin();
    dtrain_device_shared shared, all[2];
    int peer = 1 - dtrain_comm_rank(world);
    unsigned char *own = (unsigned char *)device_put(device, NULL, 5000), byte = (unsigned char)(9 - peer), got = 0;
    void *opened = NULL;
    (void)s;
    CHECK_OK(dtrain_device_fill(device, own, &byte, 1, 5000));
    CHECK_OK(ops.memory_share(device, own, &shared));
    CHECK_OK(dtrain_all_gather(world, &shared, all, 2 * sizeof shared, DTRAIN_U8));
    dtrain_cuda_emulated_open();
    CHECK_OK(ops.memory_open(device, &all[peer], &opened));
    CHECK_OK(dtrain_device_copy(device, &got, (unsigned char *)opened + 4999, 1));
    dtrain_cuda_emulated_close();
    CHECK_EQ(got, 8 + peer);
    CHECK_OK(dtrain_barrier(world));
    ops.memory_close(device, opened);
    device_drop(device, own);
    device_finish(device);
    return 0;
}

TEST(memory_is_opened_while_a_kernel_runs)
{
    scene s;
    scene_on_gpu(&s, 2, 0);
    run_ranks(&s, opens_beside);
}
#endif

/* Two processes' queues write words of a page that both have, and await them: cyclically, whoever writes. */
static int words_pass(dtrain_comm *world, scene *s)
{
    static const uint32_t numbers[] = {1, 2, 0x7fffffff, 0x80000000u, 0xfffffffe, 0xffffffff, 0, 1, 2};
    dtrain_device *device = device_begin();
    uint32_t *page = (uint32_t *)s->user;
    void *queues = NULL;
    int rank = dtrain_comm_rank(world), wrong = 0;
    CHECK_OK(ops.page_open(device, page, 4096, &queues));
    uint32_t *word = (uint32_t *)queues + 16;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers && queues != NULL; i++) {
        if (rank == 0)
            CHECK_OK(ops.word_write(device, word, numbers[i]));
        CHECK_OK(dtrain_device_wait(device));
        CHECK_OK(dtrain_barrier(world));
        wrong += page[16] != numbers[i];
        for (uint32_t back = 0; back < 0x80000000u; back += 0x0fffffff) /* what has come, and any time before */
            CHECK_OK(ops.word_await(device, word, numbers[i] - back));
        CHECK_OK(dtrain_device_wait(device));
        CHECK_OK(dtrain_barrier(world));
    }
    CHECK_EQ(wrong, 0);
    ops.page_close(device, page);
    CHECK(ops.page_open(device, page, 4096, &queues) == DTRAIN_OK); /* again */
    ops.page_close(device, page);
    device_finish(device);
    return 0;
}

TEST(words_that_queues_of_two_processes_write_and_await_wrap)
{
    scene s;
    scene_begin(&s, 2, 0);
    s.user = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s.user != MAP_FAILED);
    run_ranks(&s, words_pass);
    munmap(s.user, 4096);
}

/* ---- ranks that die ---- */

TEST(a_killed_process_is_lost_to_the_others_in_any_phase_and_they_go_on_without_it)
{
    how = SIGKILL;
    for (when = 1; when <= 64; when += 1 + when / 16)
        goes(4, 0, when % 2 ? DTRAIN_PROGRESS_THREAD : DTRAIN_PROGRESS_POLL);
}

TEST(a_process_killed_at_any_time_is_lost_to_the_others)
{
    how = SIGKILL;
    when = 0;
    for (unsigned i = 0; i < 12; i++)
        goes(2 + (int)(i % 3), 1 + i * 4919, DTRAIN_PROGRESS_THREAD);
}

TEST(a_stopped_process_is_lost_to_the_others_after_the_heartbeats_time)
{
    static const int at[] = {9, 31};
    how = SIGSTOP;
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        when = at[i];
        goes(3, 0, i % 2 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD);
    }
}

TEST(a_device_that_breaks_ends_the_group_on_all_processes)
{
    how = 0;
    for (when = 1; when <= 60; when += 1 + when / 16) {
        scene s;
        int before = test_failures;
        scene_on_gpu(&s, 3, 0);
        run_ranks(&s, one_breaks);
        if (test_failures != before)
            TEST_FAIL("call %d", when);
    }
}

/* ---- queues that are late ----
 * A GPU's queue may be far behind the CPU, and its process be killed before it comes to what others' queues wait for.
 * The emulation's queues run at once; here what they have of words waits in a list, as it does on a GPU: calls return,
 * and the queue is done when the list is. */

enum { LATE_WORDS = 4096, LATE_EVENTS = 64 };

static struct late {
    unsigned char *page, *queues;
    size_t bytes;
    int count, next; /* of the list: those before next are done */
    struct {
        int awaits;
        uint32_t *word, value;
    } words[LATE_WORDS];
    struct {
        dtrain_device_event *event;
        int after;
    } events[LATE_EVENTS];
} late;

static dtrain_status late_page_open(dtrain_device *device, void *page, size_t bytes, void **queues)
{
    dtrain_status status = real.page_open(device, page, bytes, queues);
    late.page = (unsigned char *)page;
    late.queues = (unsigned char *)*queues;
    late.bytes = bytes;
    return status;
}

/* A word of the page's that no rank of four has. */
static uint32_t *spare(void)
{
    return (uint32_t *)(void *)(late.bytes - sizeof(uint32_t) + late.page);
}

/* Stops this rank's queue here, until it is let go. */
static void hold(dtrain_device *device)
{
    __atomic_store_n(spare(), 0u, __ATOMIC_SEQ_CST);
    CHECK_OK(ops.word_await(device, (uint32_t *)(void *)(late.queues + late.bytes - sizeof(uint32_t)), 1));
}

static void let_go(void)
{
    __atomic_store_n(spare(), 1u, __ATOMIC_SEQ_CST);
}

#ifndef __CUDACC__
/* Does what the queue can do now; returns whether that is all. */
static int late_run(dtrain_device *device)
{
    for (; late.next < late.count; late.next++) {
        uint32_t *word = late.words[late.next].word, value = late.words[late.next].value;
        if (!late.words[late.next].awaits)
            CHECK_OK(real.word_write(device, word, value));
        else if ((int32_t)(__atomic_load_n(word, __ATOMIC_SEQ_CST) - value) < 0)
            return 0;
    }
    return 1;
}

static dtrain_status late_word(dtrain_device *device, int awaits, uint32_t *word, uint32_t value)
{
    if (late.count == LATE_WORDS)
        exit(1);
    late.words[late.count].awaits = awaits;
    late.words[late.count].word = word;
    late.words[late.count++].value = value;
    late_run(device);
    return DTRAIN_OK;
}

static dtrain_status late_word_write(dtrain_device *device, uint32_t *word, uint32_t value)
{
    return late_word(device, 0, word, value);
}

static dtrain_status late_word_await(dtrain_device *device, uint32_t *word, uint32_t value)
{
    return late_word(device, 1, word, value);
}

static dtrain_status late_wait(dtrain_device *device)
{
    while (!late_run(device))
        usleep(500);
    return real.wait(device);
}

static dtrain_status late_event_record(dtrain_device *device, dtrain_device_event *event)
{
    int i = 0;
    while (late.events[i].event != NULL && late.events[i].event != event)
        if (++i == LATE_EVENTS)
            exit(1);
    late.events[i].event = event;
    late.events[i].after = late.count;
    return real.event_record(device, event);
}

static dtrain_status late_event_done(dtrain_device *device, dtrain_device_event *event, int *done)
{
    int i = 0;
    late_run(device);
    while (i < LATE_EVENTS - 1 && late.events[i].event != NULL && late.events[i].event != event)
        i++;
    dtrain_status status = real.event_done(device, event, done);
    *done &= late.events[i].event != event || late.next >= late.events[i].after;
    return status;
}
#endif

/* A device whose queue can be late. */
static dtrain_device *late_begin(void)
{
    dtrain_device *device = device_begin();
    memset(&late, 0, sizeof late);
    ops.page_open = late_page_open;
#ifndef __CUDACC__
    ops.word_write = late_word_write;
    ops.word_await = late_word_await;
    ops.wait = late_wait;
    ops.event_record = late_event_record;
    ops.event_done = late_event_done;
#endif
    return device;
}

static int is_done(dtrain_device *device, dtrain_device_event *event)
{
    int done = 0;
    CHECK_OK(device->ops->event_record(device, event));
    for (int i = 0; i < 20 && !done; i++) {
        CHECK_OK(device->ops->event_done(device, event, &done));
        usleep(500);
    }
    return done;
}

/* Forty calls, on both sides of where the group's numbers wrap: no queue goes on before the late one. */
static int one_is_late(dtrain_comm *world, scene *s)
{
    dtrain_device *device = late_begin();
    dtrain_device_group *group = NULL;
    dtrain_device_event *event = NULL;
    int victim = dtrain_comm_rank(world) == VICTIM, early = 0;
    (void)s;
    float *x = (float *)device_put(device, NULL, 4000);
    CHECK_OK(device->ops->event_create(device, &event));
    CHECK_OK(dtrain_device_group_create(&group, world, device, NULL));
    CHECK_EQ(dtrain_device_group_mode(group), DTRAIN_DEVICE_EVENTS);
    for (int i = 0; i < 40 && group != NULL; i++) {
        if (victim)
            hold(device);
        CHECK_OK(dtrain_device_group_all_reduce(group, x, x, 1000, DTRAIN_F32, DTRAIN_SUM));
        early += is_done(device, event);
        CHECK_OK(dtrain_barrier(world));
        if (victim)
            let_go();
        CHECK_OK(dtrain_device_group_wait(group));
        CHECK_OK(dtrain_barrier(world));
    }
    CHECK_EQ(early, 0);
    dtrain_device_group_destroy(group);
    device->ops->event_destroy(device, event);
    device_drop(device, x);
    device_finish(device);
    return 0;
}

TEST(a_late_queue_keeps_the_others_until_it_has_come_also_where_numbers_wrap)
{
    scene s;
    scene_begin(&s, 3, 0);
    run_ranks(&s, one_is_late);
}

/* What the others do after the last call that the late queue's process has lived to make. */
enum { CALLS, WAITS, WAITS_FOR_THE_GROUP, DESTROYS, AFTERWARDS };

static int afterwards;

static int late_and_killed(dtrain_comm *world, scene *s)
{
    dtrain_device *device = late_begin();
    dtrain_device_group *group = NULL;
    dtrain_comm *rest = NULL;
    dtrain_status status = DTRAIN_OK;
    float *x = (float *)device_put(device, NULL, MOST * 4);
    CHECK_OK(dtrain_device_group_create(&group, world, device, NULL));
    CHECK_EQ(dtrain_device_group_mode(group), DTRAIN_DEVICE_EVENTS);
    for (int i = 0; i < 5; i++) {
        if (i == 2 && dtrain_comm_rank(world) == VICTIM)
            hold(device);
        CHECK_OK(dtrain_device_group_all_reduce(group, x, x, MOST, DTRAIN_F32, DTRAIN_SUM));
    }
    scene_meet(s->ranks);
    if (dtrain_comm_rank(world) == VICTIM)
        kill(getpid(), SIGKILL);
    double begun = now_s();
    if (afterwards == WAITS)
        CHECK_OK(dtrain_device_wait(device));
    if (afterwards == WAITS || afterwards == WAITS_FOR_THE_GROUP) {
        CHECK_ERROR(dtrain_device_group_wait(group), DTRAIN_ERR_PEER_LOST, "rank 1 is lost");
        CHECK_CONTAINS(dtrain_last_error(), "results since are undefined");
    } else if (afterwards == CALLS) {
        for (int i = 0; i < 1000 && status == DTRAIN_OK; i++)
            status = dtrain_device_group_all_reduce(group, x, x, MOST, DTRAIN_F32, DTRAIN_SUM);
        CHECK_ERROR(dtrain_error_set(status, "%s", dtrain_last_error()), DTRAIN_ERR_PEER_LOST, "rank 1");
    }
    dtrain_device_group_destroy(group);
    CHECK_EQ(late.next, late.count);
    CHECK_WITHIN(now_s() - begun, 20); /* the deadline is 60 */
    device_drop(device, x);
    while ((status = dtrain_barrier(world)) == DTRAIN_OK && now_s() - begun < 20)
        continue;
    CHECK_OK(dtrain_comm_shrink(world, &rest));
    if (rest != NULL)
        works(rest, device, DTRAIN_DEVICE_EVENTS, DTRAIN_DEVICE_EVENTS);
    dtrain_comm_destroy(rest);
    device_finish(device);
    (void)s;
    return 0;
}

TEST(a_process_killed_before_its_queue_came_to_its_words_keeps_nobody)
{
    for (int i = 0; i < 2 * AFTERWARDS; i++) {
        scene s;
        pid_t pids[MAX_PROCESSES];
        int before = test_failures;
        afterwards = i / 2;
        if (afterwards == WAITS && i % 2)
            continue; /* without a thread of the library's, nobody would know */
        scene_begin(&s, 4, 0);
        dtrain_set_log(quiet, NULL);
        s.desc.progress = i % 2 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        for (int rank = 0; rank < 4; rank++)
            pids[rank] = start_rank(&s, rank, late_and_killed);
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(end_of(pids[rank], 60), rank == VICTIM ? 128 + SIGKILL : 0);
        if (test_failures != before)
            TEST_FAIL("afterwards %d, %s", afterwards, i % 2 ? "polling" : "with a thread");
    }
}
