/* FSDP over every transport: processes on TCP and unix sockets, ranks that poll, a transport of the user's own that
 * counts what it sends; and processes that are killed in the middle of a step. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "fsdp_model.h"

static const dtrain_strategy strategies[4] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP, DTRAIN_HYBRID_SHARD};

static int trial_in_a_process(dtrain_comm *world, scene *s)
{
    return trial_rank(world, s->user) != DTRAIN_OK;
}

static void run_in_processes(trial t, int way, dtrain_progress progress)
{
    scene s;
    int before = test_failures;
    scene_begin_by(&s, t.ranks, way);
    s.desc.progress = progress;
    reference(&t);
    s.user = &t;
    run_ranks(&s, trial_in_a_process);
    trial_blame(&t, before);
    free(t.expected);
}

TEST(processes_give_the_same_bits_over_every_transport)
{
    for (int i = 0; i < 4; i++)
        for (int way = UNIX; way < WAYS; way++) {
            trial t = trial_of(strategies[i], 4, 2, 7);
            t.unused = way == TCP ? 1u << 3 : 0;
            t.desc.gather_dtype = i == 1 ? DTRAIN_BF16 : DTRAIN_F32;
            run_in_processes(t, way, DTRAIN_PROGRESS_THREAD);
        }
    run_in_processes(trial_of(DTRAIN_FULL_SHARD, 3, 0, 3), TCP, DTRAIN_PROGRESS_THREAD);
}

TEST(ranks_that_start_no_thread_give_them_too)
{
    dtrain_comm_desc desc = {0};
    desc.progress = DTRAIN_PROGRESS_POLL;
    for (int i = 0; i < 4; i++) {
        trial t = trial_of(strategies[i], 4, 2, 8);
        trial_run(t, &desc);
        run_in_processes(t, i, DTRAIN_PROGRESS_POLL);
    }
}

/* ---- a transport of the user's own ---- */

typedef struct own_rank {
    pthread_t thread;
    dtrain_transport below;
    dtrain__threads_group *board;
    int rank, ranks;
    uint64_t sent, sends;
    dtrain_status (*body)(dtrain_comm *world, struct own_rank *own);
    trial *t;
} own_rank;

static dtrain_status own_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    own_rank *own = (own_rank *)self;
    dtrain_status status = own->below.send(own->below.self, peer, data, bytes, deadline_ns, moved);
    __atomic_add_fetch(&own->sent, *moved, __ATOMIC_RELAXED);
    __atomic_add_fetch(&own->sends, 1, __ATOMIC_RELAXED);
    return status;
}

static dtrain_status own_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    own_rank *own = (own_rank *)self;
    return own->below.recv(own->below.self, peer, data, bytes, deadline_ns, moved);
}

static void own_destroy(void *self)
{
    own_rank *own = (own_rank *)self;
    own->below.destroy(own->below.self);
}

static void *own_main(void *pointer)
{
    own_rank *own = (own_rank *)pointer;
    dtrain_transport transport;
    dtrain_comm_desc desc = {0};
    dtrain_comm *world = NULL;
    desc.timeout_ms = test_ms(10000);
    dtrain__end end;
    dtrain__threads_end(&end, own->board, own->rank);
    own->below = end.transport;
    memset(&transport, 0, sizeof transport);
    transport.self = own;
    transport.rank = own->rank;
    transport.size = own->ranks;
    transport.send = own_send;
    transport.recv = own_recv;
    transport.destroy = own_destroy;
    CHECK_EQ(dtrain_comm_from_transport(&world, &transport, &desc), DTRAIN_OK);
    CHECK_EQ(own->body(world, own), DTRAIN_OK);
    dtrain_comm_destroy(world);
    return NULL;
}

static void on_own_transport(int ranks, dtrain_status (*body)(dtrain_comm *world, own_rank *own), trial *t)
{
    own_rank own[8];
    dtrain__threads_group *board = NULL;
    memset(own, 0, sizeof own);
    CHECK_EQ(dtrain__threads_create(&board, ranks, NULL), DTRAIN_OK);
    for (int rank = 0; rank < ranks; rank++) {
        own[rank].board = board;
        own[rank].rank = rank;
        own[rank].ranks = ranks;
        own[rank].body = body;
        own[rank].t = t;
        CHECK_EQ(pthread_create(&own[rank].thread, NULL, own_main, &own[rank]), 0);
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(own[rank].thread, NULL);
}

static dtrain_status own_trial(dtrain_comm *world, own_rank *own)
{
    return trial_rank(world, own->t);
}

static void own_trials(trial *t)
{
    int before = test_failures;
    reference(t);
    on_own_transport(t->ranks, own_trial, t);
    trial_blame(t, before);
    free(t->expected);
}

TEST(a_transport_of_ones_own_gives_the_same_weights)
{
    for (int i = 0; i < 3; i++)
        for (int ranks = 2; ranks <= 4; ranks++) {
            trial t = trial_of(strategies[i], ranks, 0, ranks == 3 ? 3 : 2 * ranks);
            own_trials(&t);
        }
    trial t = trial_of(DTRAIN_HYBRID_SHARD, 4, 2, 8);
    own_trials(&t);
}

/* Eight layers of 256 KiB, so that headers and notes are small beside them. */
static dtrain_status own_counted(dtrain_comm *world, own_rank *own)
{
    dtrain_param table[1];
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_plan_result plan;
    memset(table, 0, sizeof table);
    table[0].name = "stack";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = 8;
    table[0].shape[1] = 65536;
    table[0].stacked = 1;
    CHECK_EQ(dtrain_fsdp_plan(table, 1, &own->t->desc, own->ranks, own->rank, &plan), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, &own->t->desc), DTRAIN_OK);
    dtrain_status status = DTRAIN_OK;
    for (int step = 0; step < 3 && status == DTRAIN_OK; step++) {
        uint64_t before = own->sent, sends = own->sends;
        status = forward_pass(fsdp, 8);
        for (int u = 7; u >= 0 && status == DTRAIN_OK; u--) {
            status = dtrain_fsdp_gather(fsdp, u);
            status = status == DTRAIN_OK ? dtrain_fsdp_reduce(fsdp, u) : status;
        }
        status = status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.1f) : status;
        double sent = (double)(own->sent - before), planned = (double)(plan.sent_gather + plan.sent_reduce);
        if (sent < planned || sent > planned * 1.01)
            TEST_FAIL("strategy %d, rank %d of %d: sent %.0f bytes in %llu messages, planned %.0f",
                      (int)own->t->desc.strategy, own->rank, own->ranks, sent, (unsigned long long)(own->sends - sends),
                      planned);
    }
    dtrain_fsdp_destroy(fsdp);
    return status;
}

TEST(what_is_sent_in_a_step_is_what_the_plan_says)
{
    for (int i = 0; i < 3; i++)
        for (int ranks = 2; ranks <= 4; ranks += 2)
            for (int way = 0; way < 4; way++) {
                trial t = trial_of(strategies[i], ranks, 0, ranks);
                t.desc.no_prefetch = way == 1;
                t.desc.no_reshard_after_forward = way == 2;
                t.desc.gather_dtype = way == 3 ? DTRAIN_BF16 : DTRAIN_F32;
                on_own_transport(ranks, own_counted, &t);
            }
}

/* ---- slices in memory that the ranks share ---- */

enum { STACKED = 3, LAYER_FLOATS = 3 * (64 << 10) + 1001 };

static float stack_value(size_t i)
{
    return (float)(i % 8191) - 4000.0f;
}

/* Whether a gathered layer has its first values, less so many steps of gradients of 1. */
static int layer_is(dtrain_fsdp *fsdp, const float *stack, int layer, int steps)
{
    size_t i = 0;
    const float *x = stack + (size_t)layer * LAYER_FLOATS;
    CHECK_EQ(dtrain_fsdp_gather(fsdp, layer), DTRAIN_OK);
    while (i < LAYER_FLOATS && x[i] == stack_value((size_t)layer * LAYER_FLOATS + i) - (float)steps)
        i++;
    return i == LAYER_FLOATS;
}

/* Trains layers whose slices begin and end inside pages. */
static int trains_shared_slices(dtrain_comm *world, scene *s)
{
    dtrain_param table[1] = {{0}};
    dtrain_fsdp_desc desc = {0};
    dtrain_fsdp *fsdp = NULL;
    size_t all = (size_t)STACKED * LAYER_FLOATS;
    float *first = (float *)malloc(all * sizeof *first);
    for (size_t i = 0; i < all; i++)
        first[i] = stack_value(i);
    table[0].name = "stack";
    table[0].dtype = DTRAIN_F32;
    table[0].data = first;
    table[0].shape[0] = STACKED;
    table[0].shape[1] = LAYER_FLOATS;
    table[0].stacked = 1;
    desc.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_fsdp_adopt(&fsdp, world, table, 1, &desc), DTRAIN_OK);
    const float *stack = (const float *)table[0].data;
    for (int step = 0; step < 3; step++) {
        for (int layer = 0; layer < STACKED; layer++) {
            CHECK(layer_is(fsdp, stack, layer, step));
            CHECK_EQ(dtrain_fsdp_release(fsdp, layer), DTRAIN_OK);
        }
        for (int layer = STACKED - 1; layer >= 0; layer--) {
            CHECK(layer_is(fsdp, stack, layer, step));
            for (size_t i = 0; i < LAYER_FLOATS; i++)
                ((float *)table[0].grad)[(size_t)layer * LAYER_FLOATS + i] = 1.0f;
            CHECK_EQ(dtrain_fsdp_reduce(fsdp, layer), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_step(fsdp, 1.0f), DTRAIN_OK);
    }
    if (world->shared != NULL && dtrain__os_moves() && s->user != NULL)
        CHECK_EQ(fsdp->gathers->rounds, 0); /* none went through bounce buffers */
    dtrain_fsdp_destroy(fsdp);
    free(first);
    return 0;
}

TEST(slices_inside_full_ranges_are_gathered_in_place)
{
    for (int ranks = 2; ranks <= 3; ranks++) {
        scene s;
        scene_begin_by(&s, ranks, ranks == 2 ? UNIX : OWN_HOST);
        s.user = &s;
        run_ranks(&s, trains_shared_slices);
    }
}

TEST(a_system_that_maps_no_page_twice_gathers_them_too)
{
    scene s;
    int without = dtrain__without("mremap");
    uint32_t before = dtrain__os_without_mask;
    if (!without)
        dtrain__os_without_mask |= 1u << dtrain__os_without_find("mremap", 6);
    scene_begin(&s, 2, 0);
    run_ranks(&s, trains_shared_slices);
    dtrain__os_without_mask = before;
}

/* ---- killed ---- */

typedef struct death {
    dtrain_fsdp_desc desc;
    int when, step;
} death;

static void die_at(const death *d, int rank, int step, int when)
{
    if (rank == 2 && step == d->step && when == d->when)
        kill(getpid(), SIGKILL);
}

static dtrain_status steps_until_death(dtrain_fsdp *fsdp, const death *d, int rank)
{
    dtrain_status status = DTRAIN_OK;
    for (int step = 0; step < 4 && status == DTRAIN_OK; step++) {
        for (int u = 0; u < UNITS && status == DTRAIN_OK; u++) {
            status = dtrain_fsdp_gather(fsdp, u);
            die_at(d, rank, step, u == 2 ? 0 : -1);
            status = status == DTRAIN_OK ? dtrain_fsdp_release(fsdp, u) : status;
        }
        for (int u = UNITS - 1; u >= 0 && status == DTRAIN_OK; u--) {
            status = dtrain_fsdp_gather(fsdp, u);
            status = status == DTRAIN_OK ? dtrain_fsdp_reduce(fsdp, u) : status;
            die_at(d, rank, step, u == 2 ? 1 : -1);
        }
        die_at(d, rank, step, 2);
        status = status == DTRAIN_OK ? dtrain_fsdp_clip_grad_norm(fsdp, 1, NULL) : status;
        die_at(d, rank, step, 3);
        status = status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.1f) : status;
    }
    return status;
}

static int lines_of(const char *path)
{
    int lines = 0, c;
    FILE *file = fopen(path, "r");
    while (file != NULL && (c = fgetc(file)) != EOF)
        lines += c == '\n';
    if (file != NULL)
        fclose(file);
    return lines;
}

static int open_files(void)
{
    int open = 0;
    for (int fd = 0; fd < 256; fd++)
        open += fcntl(fd, F_GETFD) >= 0;
    return open;
}

static long held;

static void *counting_resize(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    __atomic_add_fetch(&held, (long)new_bytes - (long)old_bytes, __ATOMIC_SEQ_CST);
    return dtrain__memory_resize(pointer, old_bytes, new_bytes, align);
}

static long bytes_held(void)
{
    return __atomic_load_n(&held, __ATOMIC_SEQ_CST);
}

static int mourns(dtrain_comm *world, scene *s)
{
    const death *d = (const death *)s->user;
    dtrain_param table[PARAMS];
    dtrain_fsdp *fsdp = NULL;
    size_t count = model_describe(table);
    int maps = lines_of("/proc/self/maps");
    long before = bytes_held();
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, count, &d->desc), DTRAIN_OK);
    /* who is out of it, whatever it returns, knows that all have theirs: now one may die */
    DTRAIN_IGNORE(dtrain_barrier(world));
    size_t own = dtrain_fsdp_get_stats(fsdp).bytes;
    dtrain_status status = steps_until_death(fsdp, d, dtrain_comm_rank(world));
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), "rank 2");
    CHECK_EQ(dtrain_fsdp_gather(fsdp, 0), DTRAIN_ERR_PEER_LOST);
    CHECK_EQ(dtrain_fsdp_publish(fsdp), DTRAIN_ERR_PEER_LOST);
    double begin = now_s();
    dtrain_fsdp_destroy(fsdp);
    CHECK_WITHIN(now_s() - begin, 2.0);
    CHECK(bytes_held() - before < (long)own); /* what is left is the group's, whose buffers have grown */
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) /* which map memory of their own */
    CHECK(lines_of("/proc/self/maps") <= maps + 8);
#else
    (void)maps;
#endif
    return 0;
}

/* As a process of its own would: the group and the object are made and gone, and nothing of either is left. */
static void mourn_alone(scene *s, int rank)
{
    int files = open_files(), bad = rank_main(s, rank, mourns);
    CHECK_EQ(bytes_held(), 0);
    CHECK_EQ(open_files(), files);
    _exit(bad || test_failures > 0);
}

TEST(a_killed_process_is_named_to_all_others_which_leave_nothing_behind)
{
    dtrain_allocator allocator = {counting_resize, NULL, 0, 0};
    for (int i = 0; i < 4; i++)
        for (int when = 0; when < 4; when++) {
            scene s;
            death d;
            pid_t pids[4];
            memset(&d, 0, sizeof d);
            d.desc.strategy = strategies[i];
            d.desc.shard_size = 2;
            d.when = when;
            d.step = when % 3;
            scene_begin(&s, 4, when % 2);
            s.desc.allocator = &allocator;
            s.user = &d;
            fflush(stdout);
            fflush(stderr);
            for (int rank = 0; rank < 4; rank++) {
                pids[rank] = fork();
                if (pids[rank] == 0)
                    mourn_alone(&s, rank);
            }
            for (int rank = 0; rank < 4; rank++) {
                int end = end_of(pids[rank], 30);
                if (end != (rank == 2 ? 128 + SIGKILL : 0))
                    TEST_FAIL("strategy %d, death %d: rank %d ended with %d", (int)strategies[i], when, rank, end);
            }
        }
}
