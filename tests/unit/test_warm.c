/* A warm loop allocates nothing: frames that poll with small budgets, agreement, local SGD and DDP beside them, on
 * threads and processes, with ranks that are late by random times. SEED=n sets the seed. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

enum { ROUNDS = 240, WARM = 80, COUNT = 20000, ELEMENTS = 1500 };

static uint32_t allocations;

static void *counting(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    if (new_bytes > old_bytes)
        __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
    return test_resize(pointer, old_bytes, new_bytes, align);
}

typedef struct trainer {
    dtrain_param table[2];
    float data[2][ELEMENTS], grad[2][ELEMENTS];
    dtrain_ddp *ddp;
    dtrain_local_sgd *local;
} trainer;

static void begin(trainer *t, dtrain_comm *world, dtrain_comm *own)
{
    dtrain_local_sgd_desc desc;
    memset(t, 0, sizeof *t);
    memset(&desc, 0, sizeof desc);
    desc.steps = 5;
    desc.blocking = 1;
    for (int i = 0; i < 2; i++) {
        t->table[i].name = i ? "b" : "a";
        t->table[i].dtype = DTRAIN_F32;
        t->table[i].shape[0] = ELEMENTS;
        t->table[i].unit = i;
        t->table[i].data = t->data[i];
        t->table[i].grad = t->grad[i];
    }
    if (world->desc.progress == DTRAIN_PROGRESS_THREAD) {
        CHECK_EQ(dtrain_local_sgd_create(&t->local, own, t->table, 2, &desc), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_ddp_create(&t->ddp, own, t->table, 2, NULL), DTRAIN_OK);
    }
}

static void train(trainer *t)
{
    if (t->local != NULL) {
        CHECK_EQ(dtrain_local_sgd_step(t->local, 1.0), DTRAIN_OK);
        return;
    }
    CHECK_EQ(dtrain_ddp_begin(t->ddp, 1, 1.0), DTRAIN_OK);
    for (int unit = 1; unit >= 0; unit--)
        CHECK_EQ(dtrain_ddp_reduce(t->ddp, unit), DTRAIN_OK);
    CHECK_EQ(dtrain_ddp_finish(t->ddp, NULL), DTRAIN_OK);
}

/* Between the rounds of calls each rank has frames of its own, some of them late. */
static void frames(dtrain_comm *world, dtrain_work **works, int count, uint64_t seed)
{
    for (int at = 0; at < count;) {
        uint64_t dice = dtrain_random_u64(seed, 0);
        seed = dice;
        if (world->desc.progress == DTRAIN_PROGRESS_POLL)
            CHECK_EQ(dtrain_comm_poll(world, (int64_t)(dice % 3) * 50), DTRAIN_OK);
        if (dice % 16 == 1)
            usleep((useconds_t)(dice >> 32) % 1500);
        while (at < count && dtrain_work_done(works[at]))
            CHECK_EQ(dtrain_work_wait(works[at++]), DTRAIN_OK);
    }
}

/* Rank 0, which counts votes, is the last only once the loop is warm. */
static void late(int rank, int round)
{
    if (round < WARM && rank != 0)
        usleep(500);
    else if (round >= WARM && round % 8 == 0 && rank == 0)
        usleep(3000);
}

static int game(dtrain_comm *world, scene *s)
{
    const char *said = getenv("SEED");
    uint64_t seed = said != NULL ? strtoull(said, NULL, 10) : 6, flags, before = 0, after = 0;
    int rank = dtrain_comm_rank(world);
    float *x = (float *)calloc(2 * COUNT, sizeof *x);
    trainer *t = (trainer *)malloc(sizeof *t);
    dtrain_comm *own = NULL;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &own), DTRAIN_OK);
    begin(t, world, own);
    for (int round = 0; round < ROUNDS && test_failures == 0; round++) {
        dtrain_work *works[2];
        CHECK_EQ(dtrain_all_reduce_async(world, x, x, COUNT, DTRAIN_F32, DTRAIN_MEAN, &works[0]), DTRAIN_OK);
        CHECK_EQ(dtrain_broadcast_async(world, x + COUNT, COUNT, DTRAIN_F32, round % 3, &works[1]), DTRAIN_OK);
        frames(world, works, 2, dtrain_random_u64(seed + (uint64_t)rank, (uint64_t)round));
        late(rank, round);
        train(t);
        late(rank, round);
        flags = (uint64_t)round;
        CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_OK);
        if (round == WARM || round == ROUNDS - 1) { /* nobody is in a call while it is read */
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            before = round == WARM ? allocations : before;
            after = allocations;
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
    }
    if (after != before)
        TEST_FAIL("rank %d of %s: %llu allocations after round %d", rank, s != NULL ? s->root : "threads",
                  (unsigned long long)(after - before), WARM);
    if (t->local != NULL)
        CHECK_EQ(dtrain_local_sgd_finish(t->local), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_local_sgd_destroy(t->local);
    dtrain_ddp_destroy(t->ddp);
    dtrain_comm_destroy(own);
    free(t);
    free(x);
    return 0;
}

static dtrain_status game_on_threads(dtrain_comm *world, void *user)
{
    (void)user;
    game(world, NULL);
    return DTRAIN_OK;
}

TEST(a_warm_loop_allocates_nothing_whoever_is_late)
{
    for (int poll = 0; poll < 2; poll++) {
        dtrain_allocator counted;
        dtrain_comm_desc desc;
        memset(&counted, 0, sizeof counted);
        memset(&desc, 0, sizeof desc);
        counted.resize = counting;
        desc.allocator = &counted;
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        CHECK_EQ(dtrain_run_threads(3, game_on_threads, NULL, &desc), DTRAIN_OK);
        for (int tcp = 0; tcp < 2; tcp++) {
            scene s;
            scene_begin(&s, 3, tcp);
            s.desc.allocator = &counted;
            s.desc.progress = desc.progress;
            run_ranks(&s, game);
        }
    }
}

/* Ranks 1 and 2 agree in a group of their own: rank 0 decides, and never votes. */
static int agreed_by_others(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    uint32_t before = 0, after;
    dtrain_comm *own = NULL;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, rank > 0, 0, &own), DTRAIN_OK);
    for (int round = 0; round < 200; round++) {
        uint64_t flags = (uint64_t)rank | 4;
        if (round == 20) {
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            before = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_comm_agree(own, &flags), DTRAIN_OK);
        CHECK_EQ(flags, 4);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    after = __atomic_load_n(&allocations, __ATOMIC_SEQ_CST);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK); /* nobody has left while it is read */
    CHECK_EQ(after - before, 0);
    dtrain_comm_destroy(own);
    return 0;
}

TEST(a_leader_that_is_no_member_allocates_nothing_for_agreements)
{
    dtrain_allocator counted = {counting, NULL, 0, 0};
    scene s;
    scene_begin(&s, 3, 0);
    s.desc.allocator = &counted;
    run_ranks(&s, agreed_by_others);
}
