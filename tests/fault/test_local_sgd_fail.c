/* Local SGD when members are killed or stopped, its memory and bytes, what it saves, and what it refuses. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "processes.h"

#include "local_sgd_toy.h"

/* ---- who is killed ---- */

typedef struct massacre {
    int victims, ready[2];
    uint64_t seed;
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
} massacre;

/* The survivors have the same bits in everything that shall be the same. */
static void equal_state(dtrain_local_sgd *local, dtrain_comm *group, const toy *t)
{
    const dtrain_piece *p;
    CHECK_EQ(dtrain_comm_check_equal(group, t->data, t->count, DTRAIN_F32), DTRAIN_OK);
    for (int i = 0; (p = piece_at(dtrain_local_sgd_pieces(local), i)) != NULL; i++) {
        if (strcmp(p->name, "counters") == 0)
            CHECK_EQ(dtrain_comm_check_equal(group, (uint64_t *)p->data + 1, p->count - 1, p->dtype), DTRAIN_OK);
        else if (strcmp(p->name, "outer") == 0 || strcmp(p->name, "momentum") == 0)
            CHECK_EQ(dtrain_comm_check_equal(group, p->data, p->count, p->dtype), DTRAIN_OK);
    }
}

static int at_risk(dtrain_comm *world, scene *s)
{
    massacre *m = (massacre *)s->user;
    int rank = dtrain_comm_rank(world), left = s->ranks - m->victims;
    uint64_t enough = 0;
    toy t;
    dtrain_local_sgd *local;
    dtrain_comm *rest = NULL;
    dtrain_local_sgd_stats stats;
    dtrain_set_log(quiet, NULL);
    toy_begin(&t, 500);
    if (m->desc.compress != NULL)
        m->desc.compress = &m->compress;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &m->desc), DTRAIN_OK);
    ssize_t ignored = write(m->ready[1], "", 1);
    (void)ignored;
    double until = now_s() + 30;
    do {
        toy_step(&t, m->seed, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1 + rank), DTRAIN_OK);
        if (rank == 4)
            usleep(300); /* of another pace */
        stats = dtrain_local_sgd_get_stats(local);
        if (stats.left == left && enough == 0)
            enough = stats.rounds + 5;
    } while ((enough == 0 || stats.rounds < enough) && now_s() < until);
    CHECK_EQ(stats.left, left);
    dtrain_status status = dtrain_local_sgd_finish(local);
    if (status != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", rank, dtrain_last_error());
    CHECK_EQ(dtrain_comm_shrink(world, &rest), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(rest), left);
    equal_state(local, rest, &t);
    CHECK(t.data[0] != 0);
    if (dtrain_comm_rank(rest) == 0)
        printf("%d rounds, %d undone\n", (int)dtrain_local_sgd_get_stats(local).rounds,
               (int)dtrain_local_sgd_get_stats(local).undone);
    fflush(stdout);
    CHECK_EQ(dtrain_barrier(rest), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    dtrain_comm_destroy(rest);
    toy_end(&t);
    return 0;
}

/* Five processes, of which one to four are killed at random moments of rounds that follow each other closely. */
static void kill_round(uint64_t seed)
{
    enum { RANKS = 5 };
    scene s;
    massacre m;
    pid_t pids[RANKS];
    int killed = 0;
    char byte;
    memset(&m, 0, sizeof m);
    m.seed = seed;
    m.victims = 1 + (int)(dtrain_random_u64(seed, 1) % 8) / 3; /* up to 3 */
    m.desc.steps = 2;
    m.desc.window_ms = seed % 3 == 0 ? -1 : 3;
    m.desc.blocking = seed % 2 == 0;
    m.desc.fragments = seed % 4 < 2 ? 1 : 2;
    m.compress.kind = DTRAIN_COMPRESS_INT8;
    m.desc.compress = seed % 5 < 2 ? &m.compress : NULL;
    scene_begin(&s, RANKS, seed % 2 != 0);
    s.user = &m;
    CHECK_EQ(pipe(m.ready), 0);
    for (int rank = 0; rank < RANKS; rank++)
        pids[rank] = start_rank(&s, rank, at_risk);
    for (int rank = 0; rank < RANKS; rank++)
        CHECK_EQ(read(m.ready[0], &byte, 1), 1);
    for (int v = 0; v < m.victims; v++) {
        int victim = (int)(dtrain_random_u64(seed, 10 + (uint64_t)v) % (RANKS + 3)) % RANKS; /* low ranks more often */
        while (killed >> victim & 1)
            victim = (victim + 1) % RANKS;
        usleep((useconds_t)(dtrain_random_u64(seed, 20 + (uint64_t)v) % 60000));
        kill(pids[victim], SIGKILL);
        killed |= 1 << victim;
    }
    for (int rank = 0; rank < RANKS; rank++) {
        int end = end_of(pids[rank], 60);
        if (end != (killed >> rank & 1 ? 128 + SIGKILL : 0))
            TEST_FAIL("seed %llu: rank %d ended with %d; killed were 0x%x", (unsigned long long)seed, rank, end,
                      (unsigned)killed);
    }
    close(m.ready[0]);
    close(m.ready[1]);
}

TEST(survivors_of_kills_at_random_moments_have_the_same_rounds_and_bits_and_go_on)
{
    const char *rounds = getenv("KILL_ROUNDS"), *given = getenv("KILL_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)dtrain__os_now_ns();
    printf("seed %llu\n", (unsigned long long)seed);
    for (int round = 0; round < (rounds != NULL ? atoi(rounds) : 10); round++)
        kill_round(seed + (uint64_t)round);
}

/* Rank 0, which has made no step, has heard from both others; then one of them leaves. */
static dtrain_status one_leaves(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    dtrain_local_sgd_desc desc;
    toy t;
    dtrain_local_sgd *local;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.steps = 1;
    desc.window_ms = -1;
    toy_begin(&t, 20);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    if (rank > 0)
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    usleep(100000); /* it is on its way */
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 2) {
        dtrain_local_sgd_destroy(local);
        local = NULL;
    }
    double until = now_s() + 10;
    while (rank < 2 && dtrain_local_sgd_get_stats(local).left == 3 && now_s() < until)
        usleep(1000);
    if (rank < 2)
        CHECK_EQ(dtrain_local_sgd_get_stats(local).left, 2);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

static int one_leaves_process(dtrain_comm *world, scene *s)
{
    (void)s;
    dtrain_set_log(quiet, NULL);
    return (int)one_leaves(world, NULL);
}

TEST(who_awaits_nothing_from_the_others_hears_that_one_has_left)
{
    scene s;
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_run_threads(3, one_leaves, NULL, NULL), DTRAIN_OK);
    scene_begin(&s, 3, 1);
    run_ranks(&s, one_leaves_process);
}

/* Rank 3 is stopped, and wakes when the others have gone on without it. */
static int among_stopped(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    dtrain_local_sgd_desc desc;
    dtrain_local_sgd_stats stats;
    dtrain_comm *rest = NULL;
    toy t;
    dtrain_local_sgd *local;
    (void)s;
    memset(&stats, 0, sizeof stats);
    dtrain_set_log(quiet, NULL);
    memset(&desc, 0, sizeof desc);
    desc.steps = 2;
    desc.window_ms = 5;
    toy_begin(&t, 20);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    double until = now_s() + 20;
    for (int step = 0; now_s() < until; step++) {
        toy_step(&t, 1, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        usleep(1000);
        if (step == 50 && rank == 3)
            raise(SIGSTOP);
        stats = dtrain_local_sgd_get_stats(local);
        if (stats.left == (rank == 3 ? 1 : 3))
            break;
    }
    CHECK_EQ(stats.left, rank == 3 ? 1 : 3);
    CHECK((local->error.text[0] != 0) == (rank == 3));
    if (rank == 3)
        CHECK_CONTAINS(local->error.text, "rank 3 goes on alone: ");
    for (int step = 0; step < 10; step++) {
        toy_step(&t, 1, rank, 0.02f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    if (rank < 3) {
        CHECK_EQ(dtrain_comm_shrink(world, &rest), DTRAIN_OK);
        equal_state(local, rest, &t);
        usleep(3500000); /* rank 3 hears it from who is there */
    }
    dtrain_local_sgd_destroy(local);
    dtrain_comm_destroy(rest);
    toy_end(&t);
    return 0;
}

TEST(a_stopped_member_is_given_up_and_trains_on_alone_when_it_wakes)
{
    scene s;
    pid_t pids[4];
    scene_begin(&s, 4, 1);
    s.desc.heartbeat_ms = 1000;
    for (int rank = 0; rank < 4; rank++)
        pids[rank] = start_rank(&s, rank, among_stopped);
    usleep(3500000);
    kill(pids[3], SIGCONT);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(end_of(pids[rank], 30), 0);
}

/* ---- memory and bytes ---- */

typedef struct measured {
    dtrain_allocator allocator;
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
} measured;

static dtrain_status measure(dtrain_comm *world, void *user)
{
    measured *m = (measured *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    size_t plan = 0, before, peak;
    toy t;
    dtrain_local_sgd *local;
    toy_begin(&t, 300);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &m->desc), DTRAIN_OK);
    plan = local->sizes.all;
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    before = m->allocator.bytes;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_local_sgd_desc less = m->desc;
    less.max_bytes = plan - (size_t)(rank == ranks - 1); /* too few on one rank: none has it */
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &less),
             rank == ranks - 1 ? DTRAIN_ERR_MEMORY : DTRAIN_ERR_ABORTED);
    char text[64];
    snprintf(text, sizeof text, rank == ranks - 1 ? "%zu bytes are needed" : "rank %zu of",
             rank == ranks - 1 ? plan : (size_t)ranks - 1);
    CHECK_CONTAINS(dtrain_last_error(), text);
    CHECK(local == NULL);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(m->allocator.bytes, before);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    less.max_bytes = plan;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &less), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    for (int turn = 0; turn < 2; turn++) {
        peak = __atomic_load_n(&m->allocator.peak_bytes, __ATOMIC_SEQ_CST); /* the threads still count */
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        for (int step = 0; step < 20; step++) {
            toy_step(&t, 1, rank, 0.1f);
            CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        if (ranks == 1) /* and nothing later; groups may take another handle */
            CHECK_EQ(__atomic_load_n(&m->allocator.peak_bytes, __ATOMIC_SEQ_CST), peak);
    }
    /* as dtrain_local_sgd_destroy: first what is the groups', which the plan leaves out, then the object's own */
    dtrain__worker_end(&local->worker);
    dtrain_comm_destroy(local->up);
    dtrain_comm_destroy(local->down);
    dtrain_comm_destroy(local->group);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    before = m->allocator.bytes;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain__rounds_free(local);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(before - m->allocator.bytes, plan * (size_t)ranks);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(the_plan_is_what_is_allocated_and_a_byte_less_is_refused)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int kind = 0; kind < 4; kind++) {
            dtrain_comm_desc desc;
            measured m;
            memset(&desc, 0, sizeof desc);
            memset(&m, 0, sizeof m);
            m.desc.steps = 4;
            m.desc.blocking = 1;
            m.desc.window_ms = -1;
            m.desc.no_momentum = kind == 1;
            m.desc.fragments = kind == 2 ? 3 : 1;
            m.compress.kind = DTRAIN_COMPRESS_INT8;
            m.desc.compress = kind >= 2 ? &m.compress : NULL;
            desc.allocator = &m.allocator;
            CHECK_EQ(dtrain_run_threads(ranks, measure, &m, &desc), DTRAIN_OK);
            CHECK_EQ(m.allocator.bytes, 0);
        }
}

static dtrain_status count_bytes(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), packed = *(int *)user;
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
    toy t;
    dtrain_local_sgd *local;
    memset(&desc, 0, sizeof desc);
    memset(&compress, 0, sizeof compress);
    compress.kind = DTRAIN_COMPRESS_INT8;
    desc.steps = 20;
    desc.blocking = 1;
    desc.window_ms = -1;
    desc.compress = packed ? &compress : NULL;
    toy_begin(&t, 2000);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    for (int step = 0; step < 40; step++) {
        toy_step(&t, 1, rank, 0.1f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1), DTRAIN_OK);
    }
    dtrain_local_sgd_stats stats = dtrain_local_sgd_get_stats(local);
    uint64_t dense = 40 * (8 * (uint64_t)t.count / (uint64_t)ranks * (uint64_t)(ranks - 1));
    CHECK_EQ(stats.dense_bytes, dense);
    CHECK(stats.sent_bytes >= dense / (packed ? 80 : 20)); /* every round was sent */
    if (stats.sent_bytes * 20 > dense / (packed ? 3 : 1) * 11 / 10)
        TEST_FAIL("%llu bytes of %llu", (unsigned long long)stats.sent_bytes, (unsigned long long)dense);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(rounds_of_20_steps_send_a_twentieth_and_int8_a_third_of_that_at_most)
{
    for (int packed = 0; packed < 2; packed++)
        for (int ranks = 2; ranks <= 4; ranks++)
            CHECK_EQ(dtrain_run_threads(ranks, count_bytes, &packed, NULL), DTRAIN_OK);
}

/* ---- saving ---- */

typedef struct saved {
    int stop; /* after so many steps the object is made anew; 0: never */
    unsigned char digest[32];
} saved;

static void make_or_load(dtrain_local_sgd **local, dtrain_comm *world, toy *t, unsigned char *file, int save)
{
    dtrain_compress_desc compress;
    dtrain_local_sgd_desc desc;
    size_t at = 0;
    memset(&desc, 0, sizeof desc);
    memset(&compress, 0, sizeof compress);
    compress.kind = DTRAIN_COMPRESS_INT8;
    compress.least_count = 1;
    desc.steps = 6;
    desc.fragments = 2;
    desc.blocking = 1;
    desc.window_ms = -1;
    desc.warmup_rounds = 3; /* fewer than 40 steps have, more than any has that is saved */
    desc.compress = &compress;
    desc.no_broadcast = 1;
    if (!save)
        CHECK_EQ(dtrain_local_sgd_create(local, world, t->table, 5, &desc), DTRAIN_OK);
    if (file == NULL)
        return;
    const dtrain_piece *p;
    for (int i = 0; (p = piece_at(dtrain_local_sgd_pieces(*local), i)) != NULL; i++) {
        size_t bytes = p->count * (dtrain_dtype_bits(p->dtype) / 8);
        unsigned char *data = (unsigned char *)p->data;
        memcpy(save ? file + at : data, save ? data : file + at, bytes);
        at += bytes;
    }
    CHECK(at > 4 * t->count * sizeof(float)); /* outer, momentum, base, the residuals, and the numbers */
}

static dtrain_status save_and_load(dtrain_comm *world, void *user)
{
    saved *s = (saved *)user;
    int rank = dtrain_comm_rank(world);
    unsigned char *file = (unsigned char *)calloc(1, 1 << 20);
    toy t;
    dtrain_local_sgd *local;
    toy_begin(&t, 50);
    make_or_load(&local, world, &t, NULL, 0);
    for (int step = 1; step <= 40; step++) {
        toy_step(&t, 8, rank, 0.05f);
        CHECK_EQ(dtrain_local_sgd_step(local, 1 + (step * rank) % 3), DTRAIN_OK);
        if (step != s->stop)
            continue;
        CHECK_EQ(dtrain_local_sgd_sync(local), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        make_or_load(&local, world, &t, file, 1);
        dtrain_local_sgd_destroy(local);
        make_or_load(&local, world, &t, file, 0);
        CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_local_sgd_finish(local), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_check_equal(world, t.data, t.count, DTRAIN_F32), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0)
        dtrain_sha256(t.data, t.count * sizeof(float), s->digest);
    dtrain_local_sgd_destroy(local);
    toy_end(&t);
    free(file);
    return DTRAIN_OK;
}

TEST(a_run_saved_anywhere_in_a_round_goes_on_with_the_same_bits)
{
    saved whole = {0, {0}};
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_run_threads(3, save_and_load, &whole, NULL), DTRAIN_OK);
    for (int stop = 11; stop <= 18; stop++) {
        saved s = {0, {0}};
        s.stop = stop;
        CHECK_EQ(dtrain_run_threads(3, save_and_load, &s, NULL), DTRAIN_OK);
        CHECK(memcmp(s.digest, whole.digest, 32) == 0);
    }
}

/* ---- what is refused ---- */

static void refused(dtrain_comm *world, const toy *t, const dtrain_local_sgd_desc *desc, dtrain_status expected,
                    const char *text)
{
    dtrain_local_sgd *local;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t->table, 5, desc), expected);
    CHECK_CONTAINS(dtrain_last_error(), text);
    CHECK(local == NULL);
}

TEST(what_cannot_be_is_refused_with_a_text_that_says_what_was_expected)
{
    dtrain_comm_desc poll;
    dtrain_comm *world, *two[2];
    dtrain_local_sgd_desc desc, none;
    dtrain_compress_desc compress;
    dtrain_local_sgd *local;
    toy t;
    memset(&none, 0, sizeof none);
    memset(&compress, 0, sizeof compress);
    toy_begin(&t, 2);
    CHECK_EQ(dtrain_threads_create(&world, 1, NULL), DTRAIN_OK);
    desc = none, desc.steps = -1;
    refused(world, &t, &desc, DTRAIN_ERR_INVALID, "-1 steps with an overlap of 0");
    desc = none, desc.steps = 3, desc.overlap = 3;
    refused(world, &t, &desc, DTRAIN_ERR_INVALID, "3 steps with an overlap of 3");
    desc = none, desc.outer_lr = -1;
    refused(world, &t, &desc, DTRAIN_ERR_INVALID, "outer_lr is -1");
    desc = none, desc.outer_momentum = 1;
    refused(world, &t, &desc, DTRAIN_ERR_INVALID, "outer_momentum 1");
    desc = none, desc.mixing = 1.5f;
    refused(world, &t, &desc, DTRAIN_ERR_INVALID, "mixing is 1.5");
    desc = none, desc.fragments = 6;
    refused(world, &t, &desc, DTRAIN_ERR_INVALID, "6 fragments of a table of 5 units, expected 1 to 5");
    desc = none, desc.compress = &compress;
    refused(world, &t, &desc, DTRAIN_ERR_UNSUPPORTED, "which does not pack vectors");
    compress.kind = DTRAIN_COMPRESS_INT8;
    compress.feedback.start_step = 3;
    refused(world, &t, &desc, DTRAIN_ERR_UNSUPPORTED, "start_step is 3; rounds are packed from the first on");
    compress.feedback.start_step = 0;
    compress.kind = DTRAIN_COMPRESS_OWN;
    refused(world, &t, &desc, DTRAIN_ERR_INVALID, "without own");
    CHECK_EQ(dtrain_local_sgd_create(&local, NULL, t.table, 5, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_step(local, -1), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(local->error.text, "a weight of at least 0");
    CHECK_EQ(dtrain_local_sgd_step(NULL, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_local_sgd_get_stats(local).steps, 0);
    dtrain_local_sgd_destroy(local);
    for (int i = 0; i < 4; i++)
        t.table[i].frozen = 1;
    refused(world, &t, &none, DTRAIN_ERR_INVALID, "no parameter of the table has a gradient");
    for (int i = 0; i < 4; i++)
        t.table[i].frozen = 0;
    dtrain_comm_destroy(world);
    memset(&poll, 0, sizeof poll);
    poll.progress = DTRAIN_PROGRESS_POLL;
    poll.timeout_ms = 50;
    CHECK_EQ(dtrain_threads_create(two, 2, &poll), DTRAIN_OK);
    CHECK_EQ(dtrain_local_sgd_create(&local, two[0], t.table, 5, NULL), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_PROGRESS_POLL");
    dtrain_comm_destroy(two[0]);
    dtrain_comm_destroy(two[1]);
    dtrain_local_sgd_destroy(NULL);
    toy_end(&t);
}

static dtrain_status other_desc(dtrain_comm *world, void *user)
{
    dtrain_local_sgd_desc desc;
    dtrain_local_sgd *local;
    toy t;
    int warmup = *(const int *)user;
    memset(&desc, 0, sizeof desc);
    *(warmup ? &desc.warmup_rounds : &desc.steps) = dtrain_comm_rank(world) == 1 ? 20 : 10;
    toy_begin(&t, 2);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), warmup ? "dtrain_local_sgd_create: desc.warmup_rounds 10 on rank"
                                               : "dtrain_local_sgd_create: desc.steps 10 on rank");
    toy_end(&t);
    return DTRAIN_OK;
}

static dtrain_status written_out(dtrain_comm *world, void *user)
{
    int last = dtrain_comm_rank(world) == 2;
    dtrain_local_sgd_desc desc;
    dtrain_compress_desc compress;
    dtrain_local_sgd *local;
    toy t;
    (void)user;
    memset(&desc, 0, sizeof desc);
    memset(&compress, 0, sizeof compress);
    desc.compress = &compress;
    compress.kind = DTRAIN_COMPRESS_INT8;
    compress.block = last ? 256 : 0;
    compress.least_count = last ? 1024 : 0;
    compress.topk.schedule.ratio = last ? 0.5 : 0.0; /* not read */
    toy_begin(&t, 2);
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_OK);
    dtrain_local_sgd_destroy(local);
    compress.block = last ? 128 : 0;
    CHECK_EQ(dtrain_local_sgd_create(&local, world, t.table, 5, &desc), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "desc.compress.block 256 on ranks 0, 1, but 128 on rank 2; ");
    toy_end(&t);
    return DTRAIN_OK;
}

TEST(what_0_stands_for_is_the_same_written_out)
{
    CHECK_EQ(dtrain_run_threads(3, written_out, NULL, NULL), DTRAIN_OK);
}

TEST(descs_that_differ_are_a_mismatch_on_every_rank)
{
    for (int warmup = 0; warmup < 2; warmup++)
        CHECK_EQ(dtrain_run_threads(3, other_desc, &warmup, NULL), DTRAIN_OK);
}
