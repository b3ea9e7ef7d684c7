/* Collectives in one kernel a rank, of ranks that are processes with a GPU each: the CPU's bits; what cannot be is
 * refused on all ranks; who is killed is lost to kernels that wait for him, who never comes is a timeout. */
#ifndef __CUDACC__
#define DTRAIN__CUDA_EMULATED_GPUS 4
#endif
#include "dtrain.h"
#include "cuda_processes.h"
#include <pthread.h>

/* A scene of ranks with a GPU each; 0, which the test has said: there are too few. */
static int scene_on_gpus(scene *s, int ranks, int tcp)
{
    gpu_each = 1;
    breaks_in = DTRAIN_DEVICE_FLAGS;
    if (gpus() < ranks) {
        printf("skipped: %d ranks, as there are %d GPUs\n", ranks, gpus());
        return 0;
    }
    scene_begin(s, ranks, tcp);
    return 1;
}

static int async; /* 1: the group has a thread and a queue of its own */

static dtrain_status flags_create(dtrain_device_group **group, dtrain_comm *world, dtrain_device *device)
{
    dtrain_device_group_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = DTRAIN_DEVICE_FLAGS;
    desc.async = async;
    return dtrain_device_group_create(group, world, device, &desc);
}

/* ---- results ---- */

static dtrain_device_mode wanted, becomes;

/* Counts on both sides of what every rank folds for itself, 4096 elements where arrays are alike on all ranks: in
 * place. The group's epochs wrap after 16 calls. */
static int tries(dtrain_comm *world, scene *s)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 1000, 4095, 4096, 4097, MOST};
    trial t = {counts, sizeof counts / sizeof counts[0], MOST};
    dtrain_device *device = device_of_rank(world);
    (void)s;
    works_on(world, device, wanted, becomes, &t);
    works_on(world, device, wanted, becomes, &t);
    CHECK_EQ(memory_files(), 0);
#ifndef __CUDACC__
    CHECK_EQ(opened(), 0);
#endif
    device_finish(device);
    return 0;
}

static void tries_on(int ranks, dtrain_device_mode mode, dtrain_device_mode expected)
{
    scene s;
    wanted = mode;
    becomes = expected;
    if (scene_on_gpus(&s, ranks, ranks % 2))
        run_ranks(&s, tries);
}

TEST(processes_with_a_gpu_each_go_by_flags_where_asked_and_give_the_cpus_bits)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        tries_on(ranks, DTRAIN_DEVICE_FLAGS, DTRAIN_DEVICE_FLAGS);
}

TEST(processes_with_a_gpu_each_go_by_events_where_nothing_is_asked)
{
    tries_on(3, DTRAIN_DEVICE_MODE_AUTO, DTRAIN_DEVICE_EVENTS);
}

/* A sum of every rank's number, which no rank has before all have come. */
static int sums_of(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_of_rank(world);
    dtrain_device_group *group = NULL;
    int size = dtrain_comm_size(world);
    int64_t one = dtrain_comm_rank(world) + 1, got = 0;
    int64_t *x = (int64_t *)device_put(device, NULL, 1001 * sizeof one);
    (void)s;
    if (async) /* queues are of the companion's own table */
        device->ops = own_ops;
    CHECK_OK(flags_create(&group, world, device));
    for (int i = 0; i < 5000 && test_failures == 0; i++) { /* past 4096, where a call uses all blocks */
        CHECK_OK(dtrain_device_copy(device, x + 1000, &one, sizeof one));
        CHECK_OK(dtrain_device_group_all_reduce(group, x + i % 2, x + i % 2, 1001 - (size_t)(i % 2), DTRAIN_I64,
                                                DTRAIN_SUM));
        if (i % 100 != 0)
            continue;
        CHECK_OK(dtrain_device_copy(device, &got, x + 1000, sizeof got));
        CHECK_EQ(got, size * (size + 1) / 2);
    }
    CHECK_OK(dtrain_device_group_wait(group));
    dtrain_device_group_destroy(group);
    device_drop(device, x);
    device_finish(device);
    return 0;
}

TEST(thousands_of_calls_in_a_row_give_the_sum)
{
    for (async = 0; async < 2; async++) {
        scene s;
        if (scene_on_gpus(&s, 2, 0))
            run_ranks(&s, sums_of);
    }
    async = 0;
}

/* ---- what cannot be ---- */

enum { ONE_GPU, OTHER_HANDLES, NO_FLAGS, NO_IPC, NO_WORDS, APART, HINDRANCES };

static int way;

static dtrain_status no_register(dtrain_device *device, void *page, size_t bytes, void **queues)
{
    (void)page, (void)bytes, (void)queues;
    return dtrain_error_set(DTRAIN_ERR_UNSUPPORTED, "cudaHostRegister on %s: no", dtrain_device_name(device));
}

static int no_way(dtrain_comm *world, scene *s)
{
    static const char *const texts[] = {"the same physical device", "of another kind",  "lacks flags",
                                        "cudaIpcGetMemHandle",      "cudaHostRegister", "cannot reach"};
    int victim = dtrain_comm_rank(world) == VICTIM;
    dtrain_device *device = device_on(victim && way == ONE_GPU ? 0 : dtrain_comm_rank(world));
    dtrain_device_group *group = NULL;
    (void)s;
    if (victim && way == OTHER_HANDLES)
        ops.handles = "of somebody else's";
    if (victim && way == NO_FLAGS)
        ops.flags = NULL;
    if (victim && way == NO_WORDS)
        ops.page_open = no_register;
#ifndef __CUDACC__
    dtrain__cuda_emulated.no_ipc = victim && way == NO_IPC;
    dtrain__cuda_emulated.apart = victim && way == APART;
#endif
    CHECK_ERROR(flags_create(&group, world, device), DTRAIN_ERR_UNSUPPORTED, texts[way]);
    CHECK(group == NULL);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_DEVICE_FLAGS is not possible on rank 1");
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_DEVICE_STAGED");
    CHECK_EQ(memory_files(), 0);
    works(world, device, DTRAIN_DEVICE_STAGED, DTRAIN_DEVICE_STAGED);
    device_finish(device);
    return 0;
}

TEST(where_flags_cannot_be_all_ranks_are_told_why)
{
    for (way = 0; way < HINDRANCES; way++) {
        scene s;
        int before = test_failures;
#ifdef __CUDACC__
        if (way == NO_IPC || way == APART)
            continue;
#endif
        if (scene_on_gpus(&s, 3, 0))
            run_ranks(&s, no_way);
        if (test_failures != before)
            TEST_FAIL("way %d", way);
    }
}

/* Memory that processes cannot share ends a call on all ranks, and no more than that. */
static int refuses(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_of_rank(world);
    dtrain_device_group *group = NULL;
    float *good = (float *)device_put(device, NULL, 4000), one = 1, got = 0;
    void *pinned = NULL;
    (void)s;
    CHECK_OK(dtrain_device_alloc(device, DTRAIN_MEMORY_PINNED, 4000, &pinned));
    CHECK_OK(flags_create(&group, world, device));
    for (int i = 0; i < 20; i++) {
        float *x = dtrain_comm_rank(world) == VICTIM ? (float *)pinned : good;
        CHECK_ERROR(dtrain_device_group_all_reduce(group, x, x, 1000, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_UNSUPPORTED,
                    "rank 1's memory");
        CHECK_OK(dtrain_device_fill(device, good, &one, 4, 1000));
        CHECK_OK(dtrain_device_group_all_reduce(group, good, good, 1000, DTRAIN_F32, DTRAIN_SUM));
        CHECK_OK(dtrain_device_copy(device, &got, good + 999, 4));
        CHECK(got == (float)dtrain_comm_size(world));
    }
    dtrain_device_group_destroy(group);
    dtrain_device_free(device, DTRAIN_MEMORY_PINNED, pinned);
    device_drop(device, good);
    device_finish(device);
    return 0;
}

TEST(memory_that_cannot_be_shared_is_refused_and_the_group_is_usable)
{
    scene s;
    if (scene_on_gpus(&s, 3, 0))
        run_ranks(&s, refuses);
}

#ifndef __CUDACC__
/* ---- ranks that die ----
 * An emulated kernel keeps its thread: where no thread of the library's looks at the others, it waits for the deadline.
 */

TEST(a_killed_process_is_lost_to_the_others_in_any_phase_and_they_go_on_without_it)
{
    scene s;
    scene_on_gpus(&s, 1, 0);
    how = SIGKILL;
    for (when = 1; when <= 44; when += when < 26 ? 3 : 1) { /* the 27th, 30th, 33rd, 36th and 40th are kernels */
        deadline_ms = when % 10 == 0 ? 2500 : 20000;
        goes(4, 0, when % 10 == 0 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD);
    }
    deadline_ms = 20000;
}

TEST(a_process_killed_at_any_time_is_lost_to_the_others)
{
    scene s;
    scene_on_gpus(&s, 1, 0);
    how = SIGKILL;
    when = 0;
    for (unsigned i = 0; i < 16; i++)
        goes(2 + (int)(i % 3), 1 + (unsigned)(dtrain_random_u64(1, i) % 60000), DTRAIN_PROGRESS_THREAD);
}

TEST(a_stopped_process_is_lost_to_the_others_when_its_time_is_over)
{
    static const int at[] = {22, 26}; /* at a kernel, and after one */
    scene s;
    scene_on_gpus(&s, 1, 0);
    how = SIGSTOP;
    deadline_ms = 2500;
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        when = at[i];
        goes(3, 0, DTRAIN_PROGRESS_THREAD);
    }
    deadline_ms = 20000;
}

TEST(a_device_that_breaks_ends_the_group_on_all_processes)
{
    how = 0;
    for (when = 1; when <= 48; when += 1 + when / 16) {
        scene s;
        int before = test_failures;
        scene_on_gpus(&s, 3, 0);
        double begun = now_s();
        run_ranks(&s, one_breaks);
        CHECK_WITHIN(now_s() - begun, 15); /* the deadline is 20 */
        if (test_failures != before)
            TEST_FAIL("call %d", when);
    }
}

/* ---- queues that run beside the CPU ----
 * A thread of the device's does what it is given of kernels and words, in order, as a GPU does. */

enum { LATE_CALLS = 64 };

typedef struct late_call {
    int kind; /* 0: flags, 1: writes a word, 2: awaits one */
    dtrain_device_flags flags;
    const void *in[4];
    void *out[4];
    uint32_t *word, value;
} late_call;

static struct late {
    dtrain_device *device;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    late_call calls[LATE_CALLS]; /* a ring */
    unsigned given, done, marked;
    int held, ends;
} late;

static void *late_main(void *user)
{
    (void)user;
    pthread_mutex_lock(&late.mutex);
    for (;;) {
        while (!late.ends && (late.held || late.done == late.given))
            pthread_cond_wait(&late.changed, &late.mutex);
        if (late.ends)
            break;
        late_call *call = &late.calls[late.done % LATE_CALLS];
        pthread_mutex_unlock(&late.mutex);
        if (call->kind == 0)
            CHECK_OK(real.flags(late.device, &call->flags));
        else if (call->kind == 1)
            CHECK_OK(real.word_write(late.device, call->word, call->value));
        else
            CHECK_OK(real.word_await(late.device, call->word, call->value));
        pthread_mutex_lock(&late.mutex);
        late.done++;
        pthread_cond_broadcast(&late.changed);
    }
    pthread_mutex_unlock(&late.mutex);
    return NULL;
}

static void late_give(const late_call *call)
{
    pthread_mutex_lock(&late.mutex);
    while (late.given - late.done == LATE_CALLS)
        pthread_cond_wait(&late.changed, &late.mutex);
    late_call *own = &late.calls[late.given++ % LATE_CALLS];
    *own = *call;
    own->flags.in = own->in;
    own->flags.out = own->out;
    pthread_cond_broadcast(&late.changed);
    pthread_mutex_unlock(&late.mutex);
}

static void late_hold(int held)
{
    pthread_mutex_lock(&late.mutex);
    late.held = held;
    pthread_cond_broadcast(&late.changed);
    pthread_mutex_unlock(&late.mutex);
}

static int late_is_done(void)
{
    pthread_mutex_lock(&late.mutex);
    int done = late.done == late.given;
    pthread_mutex_unlock(&late.mutex);
    return done;
}

static dtrain_status late_wait(dtrain_device *device)
{
    pthread_mutex_lock(&late.mutex);
    while (late.done != late.given)
        pthread_cond_wait(&late.changed, &late.mutex);
    pthread_mutex_unlock(&late.mutex);
    return real.wait(device);
}

static dtrain_status late_flags(dtrain_device *device, const dtrain_device_flags *part)
{
    late_call call;
    (void)device;
    memset(&call, 0, sizeof call);
    call.flags = *part;
    memcpy(call.in, part->in, (size_t)part->n * sizeof *part->in);
    memcpy(call.out, part->out, (size_t)part->m * sizeof *part->out);
    late_give(&call);
    return DTRAIN_OK;
}

static dtrain_status late_word(int kind, uint32_t *word, uint32_t value)
{
    late_call call;
    memset(&call, 0, sizeof call);
    call.kind = kind;
    call.word = word;
    call.value = value;
    late_give(&call);
    return DTRAIN_OK;
}

static dtrain_status late_word_write(dtrain_device *device, uint32_t *word, uint32_t value)
{
    (void)device;
    return late_word(1, word, value);
}

static dtrain_status late_word_await(dtrain_device *device, uint32_t *word, uint32_t value)
{
    (void)device;
    return late_word(2, word, value);
}

/* One event at a time: the group asks for the last that was recorded. */
static dtrain_status late_event_record(dtrain_device *device, dtrain_device_event *event)
{
    pthread_mutex_lock(&late.mutex);
    late.marked = late.given;
    pthread_mutex_unlock(&late.mutex);
    return real.event_record(device, event);
}

static dtrain_status late_event_done(dtrain_device *device, dtrain_device_event *event, int *done)
{
    dtrain_status status = real.event_done(device, event, done);
    pthread_mutex_lock(&late.mutex);
    *done &= (int)(late.done - late.marked) >= 0;
    pthread_mutex_unlock(&late.mutex);
    return status;
}

static dtrain_status late_copy(dtrain_device *device, void *to, const void *from, size_t bytes)
{
    dtrain_status status = late_wait(device);
    return status == DTRAIN_OK ? real.copy(device, to, from, bytes) : status;
}

static dtrain_status late_reduce(dtrain_device *device, dtrain_dtype dtype, dtrain_op op, double divisor,
                                 const void *const *in, int n, void *const *out, int m, size_t begin, size_t count)
{
    dtrain_status status = late_wait(device);
    return status == DTRAIN_OK ? real.reduce(device, dtype, op, divisor, in, n, out, m, begin, count) : status;
}

static void late_release(dtrain_device *device, dtrain_memory memory, void *pointer)
{
    if (late_wait(device) == DTRAIN_OK)
        real.release(device, memory, pointer);
}

static dtrain_device *late_begin(const dtrain_comm *world)
{
    dtrain_device *device = device_of_rank(world);
    memset(&late, 0, sizeof late);
    late.device = device;
    pthread_mutex_init(&late.mutex, NULL);
    pthread_cond_init(&late.changed, NULL);
    ops.flags = late_flags;
    ops.word_write = late_word_write;
    ops.word_await = late_word_await;
    ops.wait = late_wait;
    ops.event_record = late_event_record;
    ops.event_done = late_event_done;
    ops.copy = late_copy;
    ops.reduce = late_reduce;
    ops.release = late_release;
    CHECK_EQ(pthread_create(&late.thread, NULL, late_main, NULL), 0);
    return device;
}

static void late_finish(dtrain_device *device)
{
    pthread_mutex_lock(&late.mutex);
    late.ends = 1;
    pthread_cond_broadcast(&late.changed);
    pthread_mutex_unlock(&late.mutex);
    pthread_join(late.thread, NULL);
    device_finish(device);
}

/* Calls return before the late queue has come; their results are there after it has, and not before. */
static int one_is_late(dtrain_comm *world, scene *s)
{
    dtrain_device *device = late_begin(world);
    dtrain_device_group *group = NULL;
    int victim = dtrain_comm_rank(world) == VICTIM, size = dtrain_comm_size(world), early = 0;
    float *x = (float *)device_put(device, NULL, 4000), got = 0, one = 1;
    (void)s;
    CHECK_OK(flags_create(&group, world, device));
    for (int i = 0; i < 40 && group != NULL; i++) {
        CHECK_OK(dtrain_device_copy(device, x + 999, &one, 4));
        late_hold(victim);
        CHECK_OK(dtrain_device_group_all_reduce(group, x, x, 1000, DTRAIN_F32, DTRAIN_SUM));
        usleep(500);
        early += late_is_done();
        CHECK_OK(dtrain_barrier(world));
        late_hold(0);
        CHECK_OK(dtrain_device_group_wait(group));
        CHECK_OK(dtrain_device_copy(device, &got, x + 999, 4));
        CHECK(got == (float)size);
    }
    CHECK_EQ(early, 0);
    dtrain_device_group_destroy(group);
    device_drop(device, x);
    late_finish(device);
    return 0;
}

TEST(calls_return_before_a_late_queue_has_come_and_kernels_wait_for_it)
{
    scene s;
    if (scene_on_gpus(&s, 3, 0))
        run_ranks(&s, one_is_late);
}

/* What the others do after the last call that the late queue's process has lived to make, or does not come to. */
enum { CALLS, WAITS, WAITS_FOR_THE_GROUP, DESTROYS, AFTERWARDS };

static int afterwards, lives;

static void sees(dtrain_device_group *group, dtrain_device *device, float *x, dtrain_status due, const char *text)
{
    dtrain_status status = DTRAIN_OK;
    if (afterwards == WAITS)
        CHECK_OK(dtrain_device_wait(device));
    if (afterwards == WAITS || afterwards == WAITS_FOR_THE_GROUP) {
        CHECK_ERROR(dtrain_device_group_wait(group), due, text);
        CHECK_CONTAINS(dtrain_last_error(), "results since are undefined");
    } else if (afterwards == CALLS) {
        for (int i = 0; i < 1000 && status == DTRAIN_OK; i++)
            status = dtrain_device_group_all_reduce(group, x, x, MOST, DTRAIN_F32, DTRAIN_SUM);
        CHECK_ERROR(dtrain_error_set(status, "%s", dtrain_last_error()), due, text);
    }
}

static int late_and_killed(dtrain_comm *world, scene *s)
{
    dtrain_device *device = late_begin(world);
    dtrain_device_group *group = NULL;
    dtrain_comm *rest = NULL;
    float *x = (float *)device_put(device, NULL, MOST * 4);
    int victim = dtrain_comm_rank(world) == VICTIM;
    CHECK_OK(flags_create(&group, world, device));
    for (int i = 0; i < 5; i++) {
        if (i == 2)
            late_hold(victim);
        CHECK_OK(dtrain_device_group_all_reduce(group, x, x, MOST, DTRAIN_F32, DTRAIN_SUM));
    }
    scene_meet(s->ranks);
    if (victim)
        kill(getpid(), SIGKILL);
    double begun = now_s();
    sees(group, device, x, DTRAIN_ERR_PEER_LOST, "rank 1");
    dtrain_device_group_destroy(group);
    CHECK(late_is_done());
    CHECK_WITHIN(now_s() - begun, 10); /* the deadline is 20 */
    device_drop(device, x);
    while (dtrain_barrier(world) == DTRAIN_OK && now_s() - begun < 20)
        continue;
    CHECK_OK(dtrain_comm_shrink(world, &rest));
    if (rest != NULL)
        works(rest, device, DTRAIN_DEVICE_FLAGS, DTRAIN_DEVICE_FLAGS);
    dtrain_comm_destroy(rest);
    late_finish(device);
    return 0;
}

/* The others' devices give up first, then the late one is let go, and finds that. */
static int late_for_the_deadline(dtrain_comm *world, scene *s)
{
    dtrain_device *device = late_begin(world);
    dtrain_device_group *group = NULL;
    float *x = (float *)device_put(device, NULL, MOST * 4);
    int victim = dtrain_comm_rank(world) == VICTIM;
    CHECK_OK(flags_create(&group, world, device));
    late_hold(victim);
    CHECK_OK(dtrain_device_group_all_reduce(group, x, x, MOST, DTRAIN_F32, DTRAIN_SUM));
    double begun = now_s();
    if (victim || afterwards == CALLS)
        usleep((useconds_t)(s->desc.timeout_ms * 1500));
    late_hold(0);
    sees(group, device, x, DTRAIN_ERR_TIMEOUT, "rank 1, whose queue did not get there");
    dtrain_device_group_destroy(group);
    CHECK_WITHIN(now_s() - begun, 20);
    device_drop(device, x);
    late_finish(device);
    return 0;
}

static void runs_late(int after, dtrain_progress progress, int64_t timeout_ms)
{
    scene s;
    pid_t pids[MAX_PROCESSES];
    int before = test_failures, ranks = 4;
    afterwards = after;
    if (!scene_on_gpus(&s, ranks, 0))
        return;
    dtrain_set_log(quiet, NULL);
    s.desc.progress = progress;
    s.desc.timeout_ms = timeout_ms;
    for (int rank = 0; rank < ranks; rank++)
        pids[rank] = start_rank(&s, rank, lives ? late_for_the_deadline : late_and_killed);
    for (int rank = 0; rank < ranks; rank++)
        CHECK_EQ(end_of(pids[rank], 60), rank == VICTIM && !lives ? 128 + SIGKILL : 0);
    if (test_failures != before)
        TEST_FAIL("afterwards %d, %s", after, progress == DTRAIN_PROGRESS_POLL ? "polling" : "with a thread");
}

TEST(a_process_killed_before_its_kernel_keeps_nobody)
{
    lives = 0;
    for (int after = 0; after < AFTERWARDS; after++) {
        runs_late(after, DTRAIN_PROGRESS_THREAD, test_ms(20000));
        if (after != WAITS) /* without a thread of the library's, nobody would know before the deadline */
            runs_late(after, DTRAIN_PROGRESS_POLL, test_ms(20000));
    }
}

static dtrain_status breaks_at_event(dtrain_device *device, dtrain_device_event *event)
{
    (void)device, (void)event;
    return dtrain_error_set(DTRAIN_ERR_IO, "the device breaks");
}

static dtrain_status breaks_at_wait(dtrain_device *device)
{
    return breaks_at_event(device, NULL);
}

/* The device of a rank fails after its calls have returned, before it has come to them. */
static int late_and_broken(dtrain_comm *world, scene *s)
{
    dtrain_device *device = late_begin(world);
    dtrain_device_group *group = NULL;
    float *x = (float *)device_put(device, NULL, MOST * 4);
    int victim = dtrain_comm_rank(world) == VICTIM;
    CHECK_OK(flags_create(&group, world, device));
    late_hold(victim);
    CHECK_OK(dtrain_device_group_all_reduce(group, x, x, MOST, DTRAIN_F32, DTRAIN_SUM));
    scene_meet(s->ranks);
    double begun = now_s();
    if (victim) {
        ops.event_record = breaks_at_event;
        ops.wait = breaks_at_wait;
        CHECK_ERROR(dtrain_device_group_wait(group), DTRAIN_ERR_IO, "the device breaks");
        ops.event_record = late_event_record;
        ops.wait = late_wait;
    } else {
        CHECK_ERROR(dtrain_device_group_wait(group), DTRAIN_ERR_IO, "the device of rank 1 failed in an earlier call");
    }
    late_hold(0);
    CHECK(dtrain_device_group_all_reduce(group, x, x, MOST, DTRAIN_F32, DTRAIN_SUM) == DTRAIN_ERR_IO);
    dtrain_device_group_destroy(group);
    CHECK_WITHIN(now_s() - begun, 10); /* the deadline is 20 */
    device_drop(device, x);
    late_finish(device);
    return 0;
}

TEST(a_device_that_fails_before_its_kernel_keeps_nobody)
{
    scene s;
    scene_on_gpus(&s, 3, 0);
    run_ranks(&s, late_and_broken);
}

TEST(a_kernel_that_never_comes_is_a_timeout_on_all_ranks_that_names_it)
{
    lives = 1;
    for (int after = 0; after < AFTERWARDS; after++)
        runs_late(after, DTRAIN_PROGRESS_THREAD, 1000);
}
#endif
