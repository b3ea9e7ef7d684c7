/* Ranks die, and the others agree, shrink, take over the furthest state and go on: threads that return, processes that
 * are killed or stopped, rank 0 and groups without it among them. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

static int sum(dtrain_comm *group, int mine, int *out)
{
    int32_t x = mine;
    dtrain_status status = dtrain_all_reduce(group, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM);
    *out = x;
    return (int)status;
}

/* Agreement on whole groups, on threads and on processes. */
static int of_one_mind(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), size = dtrain_comm_size(world), total;
    uint64_t flags = 0xF0 | (uint64_t)1 << rank, kept;
    char key[32];
    size_t bytes;
    dtrain_comm *all, *half;
    (void)s;
    CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_OK);
    CHECK_EQ(flags, size == 1 ? 0xF1 : 0xF0);
    for (int turn = 0; turn < 20; turn++) {
        flags = ~((uint64_t)1 << (turn + rank));
        CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_OK);
        CHECK(flags == ~((((uint64_t)1 << size) - 1) << turn));
    }
    CHECK_EQ(dtrain_comm_shrink(world, &all), DTRAIN_OK); /* nobody is lost: all of them */
    CHECK_EQ(dtrain_comm_size(all), size);
    CHECK_EQ(dtrain_comm_rank(all), rank);
    CHECK_EQ(sum(all, rank, &total), DTRAIN_OK);
    CHECK_EQ(total, size * (size - 1) / 2);
    CHECK_EQ(dtrain_comm_split(world, rank % 2, 0, &half), DTRAIN_OK);
    flags = rank % 2 ? 5 : 9;
    CHECK_EQ(dtrain_comm_agree(half, &flags), DTRAIN_OK);
    CHECK_EQ(flags, rank % 2 ? 5 : 9);
    dtrain_comm_destroy(half);
    dtrain_comm_destroy(all);
    if (size > 1) {
        kept = flags = 7;
        CHECK_EQ(rank == 0 ? dtrain_comm_shrink(world, &all) : dtrain_comm_agree(world, &flags), DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(world->error.text, "ranks called comm_shrink and comm_agree at once");
        CHECK(flags == kept);
        world->desc.timeout_ms = 300;
        if (rank != 1) {
            CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_ERR_TIMEOUT);
            CHECK_CONTAINS(world->error.text, rank == 0 ? "for rank 1 to call it as well" : "it can be called again");
        }
        world->desc.timeout_ms = test_ms(20000);
        snprintf(key, sizeof key, "%d waited", rank);
        CHECK_EQ(dtrain_store_set(world, key, NULL, 0), DTRAIN_OK);
        for (int other = 0; rank == 1 && other < size; other++) {
            snprintf(key, sizeof key, "%d waited", other);
            CHECK_EQ(dtrain_store_wait(world, key, NULL, 0, &bytes), DTRAIN_OK);
        }
    }
    CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_agree(world, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_comm_shrink(NULL, &all), DTRAIN_ERR_INVALID);
    return 0;
}

static dtrain_status of_one_mind_on_threads(dtrain_comm *world, void *user)
{
    dtrain_comm *own = NULL;
    of_one_mind(world, NULL);
    CHECK_EQ(pairs_join(&own, (pairs *)user, dtrain_comm_rank(world), &world->desc), DTRAIN_OK);
    of_one_mind(own, NULL);
    dtrain_comm_destroy(own);
    return DTRAIN_OK;
}

TEST(whole_groups_agree_and_shrink_to_themselves)
{
    scene s;
    for (int ranks = 1; ranks <= 4; ranks++) {
        pairs *own = pairs_new(ranks, ranks == 4);
        CHECK_EQ(dtrain_run_threads(ranks, of_one_mind_on_threads, own, NULL), DTRAIN_OK);
        free(own);
    }
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int way = ranks % 2; way < WAYS; way += 2) {
            scene_begin_by(&s, ranks, way);
            run_ranks(&s, of_one_mind);
        }
    for (int way = TCP; way < WAYS; way++) {
        scene_begin_by(&s, 3, way);
        s.desc.progress = DTRAIN_PROGRESS_POLL;
        run_ranks(&s, of_one_mind);
    }
}

/* Two ranks of the first group vote; the second group agrees in 150 groups of its own before the third rank votes. */
static int agrees_late(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    uint64_t flags = 7;
    size_t bytes;
    dtrain_comm *group, *pair;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, rank / 3, rank, &group), DTRAIN_OK);
    if (rank == 2)
        CHECK_EQ(dtrain_store_wait(world, "late", NULL, 0, &bytes), DTRAIN_OK);
    for (int i = 0; rank > 2 && i < 150; i++) {
        usleep(i == 0 ? 200000 : 0);
        CHECK_EQ(dtrain_comm_split(group, 0, 0, &pair), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_agree(pair, &flags), DTRAIN_OK);
        dtrain_comm_destroy(pair);
    }
    if (rank == 3)
        CHECK_EQ(dtrain_store_set(world, "late", NULL, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_agree(group, &flags), DTRAIN_OK);
    dtrain_comm_destroy(group);
    return 0;
}

static dtrain_status agrees_late_on_threads(dtrain_comm *world, void *user)
{
    (void)user;
    agrees_late(world, NULL);
    return DTRAIN_OK;
}

TEST(votes_of_other_groups_drive_out_none_that_is_under_way)
{
    scene s;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = test_ms(20000);
    CHECK_EQ(dtrain_run_threads(5, agrees_late_on_threads, NULL, &desc), DTRAIN_OK);
    scene_begin_by(&s, 5, TCP);
    run_ranks(&s, agrees_late);
}

/* Rank 1 has agreed in vain, and then shrinks as the others do. */
static int changes_its_mind(dtrain_comm *world, scene *s)
{
    uint64_t flags = 7;
    size_t bytes;
    dtrain_comm *group;
    (void)s;
    if (dtrain_comm_rank(world) == 1) {
        world->desc.timeout_ms = 300;
        CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_ERR_TIMEOUT);
        world->desc.timeout_ms = test_ms(20000);
        CHECK_EQ(dtrain_comm_shrink_poll(world, 0, &group), DTRAIN_OK);
        CHECK(group == NULL);
        CHECK_EQ(dtrain_store_set(world, "late", NULL, 0), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_store_wait(world, "late", NULL, 0, &bytes), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_comm_shrink(world, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(group), 3);
    dtrain_comm_destroy(group);
    return 0;
}

static dtrain_status changes_its_mind_on_threads(dtrain_comm *world, void *user)
{
    (void)user;
    changes_its_mind(world, NULL);
    return DTRAIN_OK;
}

TEST(another_call_after_a_deadline_takes_the_first_ones_vote_back)
{
    scene s;
    CHECK_EQ(dtrain_run_threads(3, changes_its_mind_on_threads, NULL, NULL), DTRAIN_OK);
    scene_begin_by(&s, 3, TCP);
    run_ranks(&s, changes_its_mind);
}

static int in_step(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    uint64_t steps[] = {4, 9, 9, 2}, step = 0;
    int weights[3] = {rank, rank, rank};
    double moments[2] = {rank, 1};
    void *buffers[] = {weights, NULL, moments};
    size_t bytes[] = {sizeof weights, 0, sizeof moments};
    (void)s;
    CHECK_EQ(dtrain_resync(world, steps[rank], buffers, bytes, 3, &step), DTRAIN_OK);
    CHECK(step == 9 && weights[0] == 1 && weights[2] == 1 && moments[0] == 1);
    bytes[0] = rank == 2 ? 4 : 8;
    CHECK_EQ(dtrain_resync(world, 1, buffers, bytes, 3, &step), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(world->error.text,
                   "bytes[0] is 8 on ranks 0, 1, 3, but 4 on rank 2; give every rank the same sizes");
    CHECK_EQ(dtrain_resync(world, (uint64_t)rank, NULL, NULL, 0, &step), DTRAIN_OK);
    CHECK_EQ(step, 3);
    CHECK_EQ(dtrain_resync(world, 1, NULL, bytes, 1, NULL), DTRAIN_ERR_INVALID);
    return 0;
}

static dtrain_status in_step_on_threads(dtrain_comm *world, void *user)
{
    (void)user;
    in_step(world, NULL);
    return DTRAIN_OK;
}

TEST(resync_copies_the_furthest_state_of_the_lowest_rank_that_has_it)
{
    scene s;
    CHECK_EQ(dtrain_run_threads(4, in_step_on_threads, NULL, NULL), DTRAIN_OK);
    scene_begin(&s, 4, 0);
    run_ranks(&s, in_step);
}

/* The source of the state dies while it sends: the last page of its large buffer cannot be read. */
static int loses_the_source(dtrain_comm *world, scene *s)
{
    enum { BYTES = 1 << 24, PAGE = 65536 };
    int rank = dtrain_comm_rank(world), small = rank, wrong = 0;
    uint64_t step = rank == 2 ? 7 : 3;
    unsigned char *large = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *buffers[] = {&small, large};
    size_t bytes[] = {sizeof small, BYTES};
    memset(large, rank, BYTES);
    scene_meet(s->ranks);
    if (rank == 2)
        CHECK_EQ(mprotect(large + BYTES - PAGE, PAGE, PROT_NONE), 0);
    if (dtrain_resync(world, step, buffers, bytes, 2, &step) == DTRAIN_OK)
        TEST_FAIL("rank %d has the state of a rank that died while it sent it", rank);
    if (rank == 2)
        raise(SIGKILL);
    for (size_t i = 0; i < BYTES; i++)
        wrong |= large[i] != rank;
    CHECK(step == 3 && small == rank && !wrong);
    return 0;
}

TEST(a_source_that_dies_on_the_way_leaves_every_state_as_it_was)
{
    scene s;
    pid_t pids[3];
    for (int way = TCP; way <= OWN; way++) {
        scene_begin_by(&s, 3, way);
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, loses_the_source);
        for (int rank = 0; rank < 2; rank++)
            CHECK_EQ(end_of(pids[rank], 30), 0);
        CHECK(end_of(pids[2], 30) != 0);
    }
}

enum { STATE = 1 << 20 };
static __thread int starves;

static void *has_no_room_for_the_state(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    return starves && new_bytes == STATE + 64 ? NULL : test_resize(pointer, old_bytes, new_bytes, align);
}

static int short_of_memory(dtrain_comm *world, scene *s)
{
    static unsigned char state[STATE];
    int rank = dtrain_comm_rank(world), wrong = 0;
    uint64_t step = (uint64_t)rank;
    void *buffers[] = {state};
    size_t bytes[] = {STATE};
    (void)s;
    memset(state, rank, STATE);
    starves = rank == 1;
    CHECK_EQ(dtrain_resync(world, step, buffers, bytes, 1, &step), DTRAIN_ERR_MEMORY);
    CHECK_CONTAINS(world->error.text, "rank 1: resync: no memory to receive 1048576 bytes");
    CHECK(step == (uint64_t)rank && state[0] == rank && state[STATE - 1] == rank);
    starves = 0;
    CHECK_EQ(dtrain_resync(world, step, buffers, bytes, 1, &step), DTRAIN_OK);
    for (size_t i = 0; i < STATE; i++)
        wrong |= state[i] != 2;
    CHECK(step == 2 && !wrong);
    return 0;
}

TEST(no_memory_for_the_state_on_one_rank_is_an_error_on_all_and_harms_nothing)
{
    dtrain_allocator allocator = {has_no_room_for_the_state, NULL, 0, 0};
    scene s;
    scene_begin(&s, 3, 0);
    s.desc.allocator = &allocator;
    run_ranks(&s, short_of_memory);
}

/* A random collective; the same on all ranks for the same dice. */
static dtrain_status random_call(dtrain_comm *group, uint64_t dice, float *x)
{
    size_t count = dice % 5 == 0 ? 70001 : 1 + (size_t)(dice >> 8 & 1023);
    int root = (int)(dice >> 24 & 255) % dtrain_comm_size(group);
    for (size_t i = 0; i < count; i += 64)
        x[i] = 1;
    switch (dice >> 32 & 3) {
    case 0: return dtrain_all_reduce(group, x, x, count, DTRAIN_F32, DTRAIN_SUM);
    case 1: return dtrain_broadcast(group, x, count, DTRAIN_F32, root);
    case 2: return dtrain_barrier(group);
    default: {
        size_t low;
        dtrain_shard(group, count, dtrain_comm_rank(group), &low);
        return dtrain_all_gather(group, x + low, x, count, DTRAIN_F32);
    }
    }
}

/* Works until `left` ranks have finished together: shrinks whenever something fails. group is destroyed. */
static int work_on(dtrain_comm *group, int left, uint64_t seed, int most)
{
    float *x = (float *)calloc(70001, sizeof(float));
    uint64_t step = 0, flags;
    int state[2] = {0, 0}, total = 0, shrinks = 0, good = 0;
    while (!good && shrinks < 12) {
        dtrain_status status = DTRAIN_OK;
        dtrain_comm *next = NULL;
        void *buffers[] = {state};
        size_t bytes[] = {sizeof state};
        status = dtrain_resync(group, step, buffers, bytes, 1, &step);
        while (status == DTRAIN_OK && (dtrain_comm_size(group) > left || step < (uint64_t)most)) {
            CHECK(state[0] == (int)step && state[1] == 3 * (int)step);
            status = random_call(group, dtrain_random_u64(seed, step), x);
            if (status == DTRAIN_OK) {
                step++;
                state[0]++;
                state[1] += 3;
            }
        }
        if (status == DTRAIN_OK)
            status = (dtrain_status)sum(group, 1, &total);
        flags = status == DTRAIN_OK ? 3 : 2;
        if (dtrain_comm_agree(group, &flags) != DTRAIN_OK || (flags & 2) == 0) {
            TEST_FAIL("agree after %d shrinks: %s", shrinks, group->error.text);
            break;
        }
        good = (flags & 1) != 0 && total == left && dtrain_comm_size(group) == left;
        if (good)
            break;
        if (dtrain_comm_shrink(group, &next) != DTRAIN_OK) {
            TEST_FAIL("shrink %d: %s", shrinks, group->error.text);
            break;
        }
        shrinks++;
        dtrain_comm_destroy(group);
        group = next;
    }
    if (!good)
        TEST_FAIL("rank %d of %d after %d shrinks: %s", dtrain_comm_rank(group), dtrain_comm_size(group), shrinks,
                  group->error.text);
    dtrain_comm_destroy(group);
    free(x);
    return !good;
}

typedef struct massacre {
    int victims, ready[2];
    uint64_t seed;
} massacre;

static int at_risk(scene *s, int rank)
{
    massacre *m = (massacre *)s->user;
    dtrain_comm *world;
    if (scene_join(&world, s, rank) != DTRAIN_OK) {
        TEST_FAIL("rank %d: %s", rank, dtrain_last_error());
        return 1;
    }
    ssize_t ignored = write(m->ready[1], "", 1);
    (void)ignored;
    return work_on(world, s->ranks - m->victims, m->seed, 50);
}

/* Eight processes, of which one or two are killed at random times during random collectives. */
static void kill_round(uint64_t seed, int way)
{
    scene s;
    massacre m;
    pid_t pids[8];
    int first = (int)(dtrain_random_u64(seed, 0) % 12) % 8, second; /* rank 0 more often than others */
    char byte;
    int before = test_failures;
    memset(&m, 0, sizeof m);
    m.seed = seed;
    m.victims = 1 + (int)(dtrain_random_u64(seed, 1) % 2);
    second = (first + 1 + (int)(dtrain_random_u64(seed, 2) % 7)) % 8;
    scene_begin_by(&s, 8, way);
    s.user = &m;
    CHECK_EQ(pipe(m.ready), 0);
    fflush(stdout);
    for (int rank = 0; rank < 8; rank++) {
        if ((pids[rank] = fork()) == 0)
            _exit(at_risk(&s, rank) || test_failures != before);
        scene_started(&s, rank);
    }
    for (int rank = 0; rank < 8; rank++)
        CHECK_EQ(read(m.ready[0], &byte, 1), 1);
    usleep((useconds_t)(dtrain_random_u64(seed, 3) % 30000));
    kill(pids[first], SIGKILL);
    if (m.victims == 2) {
        usleep((useconds_t)(dtrain_random_u64(seed, 4) % 4 == 0 ? 0 : dtrain_random_u64(seed, 5) % 20000));
        kill(pids[second], SIGKILL);
    }
    for (int rank = 0; rank < 8; rank++) {
        int victim = rank == first || (m.victims == 2 && rank == second), end = end_of(pids[rank], 40);
        if (end != (victim ? 128 + SIGKILL : 0))
            TEST_FAIL("seed %llu, way %d: rank %d ended with %d; killed were %d%s %d", (unsigned long long)seed, way,
                      rank, end, first, m.victims == 2 ? " and" : "; not", second);
    }
    close(m.ready[0]);
    close(m.ready[1]);
}

TEST(survivors_of_kills_at_random_times_shrink_and_go_on)
{
    const char *rounds = getenv("KILL_ROUNDS"), *given = getenv("KILL_SEED"); /* "make soak" asks for 200 */
    uint64_t seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)dtrain__os_now_ns();
    printf("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < (rounds != NULL ? atoi(rounds) : 6); round++)
        for (int way = UNIX; way < WAYS; way++)
            kill_round(seed + (uint64_t)round, way);
}

/* What the ranks heard of one vote. */
typedef struct verdict {
    int victim, shrinks; /* in dtrain_comm_shrink, not in dtrain_comm_agree */
    int sends, torn;     /* with which it dies */
    int shut;            /* it tells rank 1 nothing, who leads next */
    dtrain_status status[5];
    uint64_t heard[5];
} verdict;

/* The victim dies in one of its sends of the vote; the others have one answer, and go on. */
static int votes_to_death(dtrain_comm *world, scene *s)
{
    verdict *v = (verdict *)s->user;
    int rank = dtrain_comm_rank(world), total = 0, shrinks = 0;
    uint64_t flags = ~((uint64_t)1 << rank);
    dtrain_comm *group = NULL, *next = NULL;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    scene_meet(s->ranks);
    usleep((useconds_t)(1000 * (unsigned)((rank + v->victim) % s->ranks)));
    pairs_torn = v->torn;
    pairs_shut = rank == v->victim && v->shut ? 1 : -1;
    pairs_sends_left = rank == v->victim ? v->sends : -1;
    if (v->shrinks) {
        v->status[rank] = dtrain_comm_shrink(group, &next);
        v->heard[rank] = next != NULL ? next->group << 8 | (uint64_t)next->size : 0;
    } else {
        v->status[rank] = dtrain_comm_agree(group, &flags);
        v->heard[rank] = flags;
    }
    if (v->status[rank] != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", rank, group->error.text);
    if (rank == v->victim)
        raise(SIGKILL);
    while (total != s->ranks - 1 && shrinks++ < 3) {
        if (next == NULL)
            CHECK_EQ(dtrain_comm_shrink(group, &next), DTRAIN_OK);
        dtrain_comm_destroy(group);
        group = next;
        next = NULL;
        flags = sum(group, 1, &total) == DTRAIN_OK && total == s->ranks - 1;
        CHECK_EQ(dtrain_comm_agree(group, &flags), DTRAIN_OK);
        total = flags == 1 ? total : 0;
    }
    CHECK_EQ(total, s->ranks - 1);
    dtrain_comm_destroy(group);
    return 0;
}

TEST(a_death_in_any_send_of_a_vote_leaves_one_answer)
{
    verdict *v = (verdict *)mmap(NULL, sizeof *v, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int turn = 0; turn < 48; turn++) {
        scene s;
        pid_t pids[5];
        int before = test_failures, other;
        memset(v, 0, sizeof *v);
        v->victim = turn % 4 == 3 ? 4 : turn % 2; /* 0 leads, then 1 */
        v->shrinks = turn / 4 % 2;
        v->torn = turn / 8 % 2;
        v->sends = turn / 16 * 2 + turn / 4 % 2;
        v->shut = turn % 4 == 2;
        other = v->victim == 0;
        scene_begin_by(&s, 5, turn % 3 == 0 ? OWN_ASKED : OWN);
        s.user = v;
        for (int rank = 0; rank < 5; rank++)
            pids[rank] = start_rank(&s, rank, votes_to_death);
        for (int rank = 0; rank < 5; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == v->victim ? 128 + SIGKILL : 0);
        for (int rank = 0; rank < 5; rank++)
            CHECK(rank == v->victim || v->heard[rank] == v->heard[other]);
        if (test_failures != before)
            TEST_FAIL("turn %d: rank %d died in send %d", turn, v->victim, v->sends);
    }
    munmap(v, sizeof *v);
}

enum { VOTERS = 6, VOTES = 400 };

/* What each rank heard of each vote, in memory that the processes share; votes counts those of all. */
typedef struct session {
    uint64_t heard[VOTERS][VOTES], seed;
    int votes;
} session;

static int votes_and_votes(dtrain_comm *world, scene *s)
{
    session *all = (session *)s->user;
    int rank = dtrain_comm_rank(world);
    for (uint64_t n = 0; n < VOTES; n++) {
        uint64_t flags = dtrain_random_u64(all->seed + (uint64_t)rank, n) | dtrain_random_u64(all->seed, n + VOTES);
        if (dtrain_comm_agree(world, &flags) != DTRAIN_OK) {
            TEST_FAIL("vote %d on rank %d: %s", (int)n, rank, world->error.text);
            return 1;
        }
        all->heard[rank][n] = flags;
        __atomic_add_fetch(&all->votes, 1, __ATOMIC_SEQ_CST);
    }
    scene_meet(VOTERS - 2);
    return 0;
}

/* Two of six ranks are killed, the leader most often, while all vote and vote again: nobody hears another answer. */
TEST(votes_in_a_row_have_one_answer_each_whoever_is_killed)
{
    session *all = (session *)mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t first = (uint64_t)dtrain__os_now_ns();
    printf("seed %llu\n", (unsigned long long)first);
    for (int turn = 0; turn < 12; turn++) {
        scene s;
        pid_t pids[VOTERS];
        int killed[2], different = 0;
        memset(all, 0, sizeof *all);
        all->seed = first + (uint64_t)turn * 100;
        killed[0] = turn % 4 == 3 ? 3 : 0;
        killed[1] = turn % 2 == 0 ? 1 : 5;
        scene_begin_by(&s, VOTERS, TCP + turn % 3);
        s.user = all;
        for (int rank = 0; rank < VOTERS; rank++)
            pids[rank] = start_rank(&s, rank, votes_and_votes);
        for (int i = 0; i < 2; i++) {
            int votes = 100 + (int)(dtrain_random_u64(all->seed, (uint64_t)i) % 600);
            while (__atomic_load_n(&all->votes, __ATOMIC_SEQ_CST) < (i + 1) * votes && test_failures == 0)
                usleep(20);
            kill(pids[killed[i]], SIGKILL);
        }
        for (int rank = 0; rank < VOTERS; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == killed[0] || rank == killed[1] ? 128 + SIGKILL : 0);
        for (int n = 0; n < VOTES; n++)
            for (int rank = 0; rank < VOTERS; rank++)
                different += rank != killed[0] && rank != killed[1] && all->heard[rank][n] != all->heard[2][n];
        if (different > 0)
            TEST_FAIL("turn %d: %d answers differ", turn, different);
    }
    munmap(all, sizeof *all);
}

static dtrain_status some_return(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), left = 5, shrinks = 0, total = 0;
    dtrain_comm *group = NULL, *next, **kept = (dtrain_comm **)user;
    uint64_t flags = 1;
    float x[2000] = {0};
    dtrain_status status = DTRAIN_OK;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    for (int step = 0; status == DTRAIN_OK && step < 1000; step++) {
        if (rank == 0 && step == 30) {
            dtrain_comm_destroy(group);
            return DTRAIN_OK;
        }
        if (rank == 3 && step == 30) { /* with an error, and its end of the group stays */
            *kept = group;
            return dtrain_send(world, NULL, 0, DTRAIN_F32, 3);
        }
        status = dtrain_all_reduce(group, x, x, 2000, DTRAIN_F32, DTRAIN_SUM);
    }
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    while (shrinks++ < 5) {
        CHECK_EQ(dtrain_comm_shrink(group, &next), DTRAIN_OK);
        dtrain_comm_destroy(group);
        group = next;
        flags = sum(group, 1, &total) == DTRAIN_OK;
        CHECK_EQ(dtrain_comm_agree(group, &flags), DTRAIN_OK);
        if (flags == 1 && total == left - 2)
            break;
    }
    CHECK_EQ(dtrain_comm_size(group), 3);
    CHECK_EQ(dtrain_comm_rank(group), rank == 4 ? 2 : rank - 1);
    CHECK_EQ(total, 3);
    dtrain_comm_destroy(group);
    return DTRAIN_OK;
}

TEST(threads_that_return_are_shrunk_away)
{
    for (int round = 0; round < 20; round++) {
        dtrain_comm *kept = NULL;
        CHECK_EQ(dtrain_run_threads(5, some_return, &kept, NULL), DTRAIN_ERR_INVALID);
        dtrain_comm_destroy(kept);
    }
}

/* Ranks of a mask are stopped; the others shrink by what silence allows. */
typedef struct silence {
    int stopped; /* a bit a rank */
    int wakes;   /* a stopped rank goes on, and hears that it is out */
    int goes_on; /* the others may */
} silence;

static int among_silent(dtrain_comm *world, scene *s)
{
    const silence *q = (const silence *)s->user;
    int rank = dtrain_comm_rank(world), total, stopped = 0;
    dtrain_comm *rest = NULL;
    dtrain_status status;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (q->stopped >> rank & 1)
        raise(SIGSTOP);
    for (int r = 0; r < 4; r++)
        stopped += q->stopped >> r & 1;
    do
        status = dtrain_barrier(world);
    while (status == DTRAIN_OK);
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    status = dtrain_comm_shrink(world, &rest);
    if (q->stopped >> rank & 1) {
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(world->error.text, "the others have given this rank up");
    } else if (q->goes_on) {
        CHECK_EQ(status, DTRAIN_OK);
        CHECK_EQ(dtrain_comm_size(rest), 4 - stopped);
        CHECK_EQ(sum(rest, 1, &total), DTRAIN_OK);
        CHECK_EQ(total, 4 - stopped);
        usleep(q->wakes ? 1500000 : 0);
    } else {
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(world->error.text, "2 of 4 ranks are here");
        CHECK_CONTAINS(world->error.text, "only the larger part continues");
    }
    dtrain_comm_destroy(rest);
    return 0;
}

static void with_silence(silence q)
{
    scene s;
    pid_t pids[4];
    scene_begin(&s, 4, 1);
    s.user = &q;
    s.desc.heartbeat_ms = 1000;
    for (int rank = 0; rank < 4; rank++)
        pids[rank] = start_rank(&s, rank, among_silent);
    if (q.wakes)
        usleep(3500000);
    for (int rank = 0; rank < 4; rank++)
        if (q.stopped >> rank & 1 && q.wakes)
            kill(pids[rank], SIGCONT);
    for (int rank = 0; rank < 4; rank++)
        if (!(q.stopped >> rank & 1) || q.wakes)
            CHECK_EQ(end_of(pids[rank], 30), 0);
    for (int rank = 0; rank < 4; rank++)
        if (q.stopped >> rank & 1 && !q.wakes) {
            kill(pids[rank], SIGKILL);
            end_of(pids[rank], 5);
        }
}

TEST(only_a_majority_goes_on_without_ranks_that_are_silent)
{
    silence one = {1 << 3, 1, 1}, first = {1 << 0, 0, 1}, half = {1 << 1 | 1 << 3, 0, 1}, lower = {3, 0, 0};
    with_silence(one);
    with_silence(first);
    with_silence(half); /* the other half has rank 0 */
    with_silence(lower);
}

/* Rank 0 is killed; a group without it goes on, and hears at once of the next death, neighbours or not. */
static int without_rank_0(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), total;
    double begin;
    dtrain_comm *others, *rest;
    CHECK_EQ(dtrain_comm_split(world, rank == 0 ? -1 : 0, 0, &others), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 0) {
        __atomic_fetch_add(scene_met, 1, __ATOMIC_SEQ_CST); /* for the next time, too */
        raise(SIGKILL);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_PEER_LOST);
    usleep(300000);
    CHECK_EQ(sum(others, rank, &total), DTRAIN_OK);
    CHECK_EQ(total, 15);
    scene_meet(s->ranks);
    if (rank == 4)
        raise(SIGKILL);
    begin = now_s();
    CHECK_EQ(rank == 1 ? dtrain_recv(others, &total, 1, DTRAIN_I32, 3) : dtrain_barrier(others), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(others->error.text,
                   s->own != NULL ? "rank 3 (rank 4 of the world) is lost" : "rank 3 (rank 4 of the world, pid ");
    CHECK_WITHIN(now_s() - begin, 5);
    CHECK_EQ(dtrain_comm_shrink(others, &rest), DTRAIN_OK);
    dtrain_comm_destroy(others);
    CHECK_EQ(dtrain_comm_size(rest), 4);
    CHECK_EQ(sum(rest, rank, &total), DTRAIN_OK);
    CHECK_EQ(total, 11);
    dtrain_comm_destroy(rest);
    return 0;
}

TEST(groups_without_rank_0_outlive_it_and_hear_of_further_deaths)
{
    for (int way = UNIX; way < WAYS; way++) {
        scene s;
        pid_t pids[6];
        char path[320];
        scene_begin_by(&s, 6, way);
        for (int rank = 0; rank < 6; rank++)
            pids[rank] = start_rank(&s, rank, without_rank_0);
        for (int rank = 0; rank < 6; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == 0 || rank == 4 ? 128 + SIGKILL : 0);
        unlink(s.root + 5);
        snprintf(path, sizeof path, "%s.4", s.root + 5);
        unlink(path);
    }
}

/* This thread's calls get no memory, while others' do. */
static __thread int hungry;

static void *feeds_others(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    (void)user;
    if (new_bytes > 0 && (hungry || posix_memalign(&block, align, new_bytes) != 0))
        return NULL;
    if (pointer != NULL && new_bytes > 0)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

/* A vote for which there was no memory is none: rank 1 hears so, and votes in its next call. */
static int hungry_voter(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), total;
    uint64_t flags = 7;
    dtrain_comm *own = NULL, *group = NULL;
    (void)s;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &own), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_OK); /* what a group keeps is there now */
    CHECK_EQ(dtrain_comm_agree(own, &flags), DTRAIN_OK);
    flags = rank == 0 ? 1 : 3;
    if (rank == 1) {
        hungry = 1;
        CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_ERR_MEMORY);
        CHECK_CONTAINS(dtrain_last_error(), "comm_agree on rank 1: no memory for its vote");
        CHECK_EQ(flags, 3);
        CHECK_EQ(dtrain_comm_shrink(own, &group), DTRAIN_ERR_MEMORY);
        CHECK_EQ(dtrain_comm_shrink_poll(own, 0, &group), DTRAIN_ERR_MEMORY);
        CHECK(group == NULL);
        hungry = 0;
    }
    CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_OK);
    CHECK_EQ(flags, 1);
    while (group == NULL && test_failures == 0)
        CHECK_EQ(dtrain_comm_shrink_poll(own, 1000, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(group), 2);
    CHECK_EQ(sum(group, rank, &total), DTRAIN_OK);
    CHECK_EQ(total, 1);
    dtrain_comm_destroy(group);
    dtrain_comm_destroy(own);
    return 0;
}

TEST(a_vote_without_memory_is_an_error_and_no_answer)
{
    dtrain_allocator allocator = {feeds_others, NULL, 0, 0};
    scene s;
    for (int way = UNIX; way <= OWN; way += OWN) {
        scene_begin_by(&s, 2, way);
        s.desc.allocator = &allocator;
        run_ranks(&s, hungry_voter);
    }
}
