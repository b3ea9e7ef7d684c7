/* Checkpoints on disks that ranks do not share: they hand each other what they lack, or are told that nobody has it. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "checkpoint_model.h"

typedef struct spread {
    const char *directories[8]; /* of each rank: its host's disk */
    int strategy, shard_size, fails;
    uint64_t step, loaded;
    dtrain_checkpoint_report reports[8];
} spread;

static dtrain_status spread_body(dtrain_comm *world, void *user, int loads)
{
    spread *s = (spread *)user;
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    model m;
    memset(&desc, 0, sizeof desc);
    desc.directory = s->directories[rank];
    desc.local = desc.no_sync = 1;
    model_create(&m, world, s->strategy, s->shard_size, 0);
    model_each(&m, s->step, !loads, ranks, rank);
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &desc), DTRAIN_OK);
    dtrain_checkpoint_state state = state_of(&m, s->step);
    dtrain_status status =
        loads ? dtrain_checkpoint_load(ckpt, &state, NULL, &s->reports[rank]) : dtrain_checkpoint_save(ckpt, &state);
    if (loads && status == DTRAIN_OK)
        CHECK(model_each(&m, state.step, 0, ranks, rank));
    if (rank == 0)
        s->loaded = state.step;
    if (!s->fails && status != DTRAIN_OK)
        TEST_FAIL("rank %d: %s", rank, dtrain_last_error());
    dtrain_checkpoint_destroy(ckpt);
    model_destroy(&m);
    return status;
}

static dtrain_status spread_save(dtrain_comm *world, void *user)
{
    return spread_body(world, user, 0);
}

static dtrain_status spread_load(dtrain_comm *world, void *user)
{
    return spread_body(world, user, 1);
}

static void spread_begin(spread *s, const char *name, int hosts)
{
    static char paths[8][200];
    const char *directory = fresh(name);
    memset(s, 0, sizeof *s);
    shell("mkdir -p %s", directory);
    for (int rank = 0; rank < 8; rank++) {
        snprintf(paths[rank], sizeof paths[rank], "%s/host-%d", directory, rank % hosts);
        s->directories[rank] = paths[rank];
    }
}

TEST(ranks_without_a_shared_disk_hand_each_other_what_they_lack)
{
    const struct {
        int from, from_strategy, to, to_strategy, hosts;
    } cases[] = {{4, DTRAIN_FULL_SHARD, 4, DTRAIN_FULL_SHARD, 4},
                 {4, DTRAIN_FULL_SHARD, 3, DTRAIN_FULL_SHARD, 4},
                 {4, DTRAIN_FULL_SHARD, 3, DTRAIN_FULL_SHARD, 3},
                 {3, DTRAIN_FULL_SHARD, 5, DTRAIN_FULL_SHARD, 5},
                 {4, DTRAIN_HYBRID_SHARD, 3, DTRAIN_DDP, 2},
                 {2, 0, 3, DTRAIN_FULL_SHARD, 3},
                 {1, DTRAIN_FULL_SHARD, 1, 0, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int before = test_failures;
        spread s;
        spread_begin(&s, "spread", cases[i].hosts);
        s.strategy = cases[i].from_strategy;
        s.shard_size = 2;
        s.step = i;
        CHECK_EQ(dtrain_run_threads(cases[i].from, spread_save, &s, NULL), DTRAIN_OK);
        s.strategy = cases[i].to_strategy;
        s.fails = cases[i].from > cases[i].to && cases[i].hosts > cases[i].to;
        dtrain_status status = dtrain_run_threads(cases[i].to, spread_load, &s, NULL);
        /* the slices of the rank whose host is gone are nowhere */
        CHECK_EQ(status, s.fails ? DTRAIN_ERR_IO : DTRAIN_OK);
        if (test_failures != before)
            TEST_FAIL("case %zu: %s", i, dtrain_last_error());
    }
}

TEST(each_rank_reads_its_own_disk_and_a_lost_disk_is_made_up_for_by_copies)
{
    spread s;
    spread_begin(&s, "lost", 4);
    s.strategy = DTRAIN_HYBRID_SHARD;
    s.shard_size = 2;
    s.step = 8;
    CHECK_EQ(dtrain_run_threads(4, spread_save, &s, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_run_threads(4, spread_load, &s, NULL), DTRAIN_OK);
    for (int rank = 0; rank < 4; rank++) {
        CHECK(s.reports[rank].bytes > 0);
        CHECK(s.reports[rank].bytes_read >= s.reports[rank].bytes);
    }
    shell("rm -rf %s", s.directories[1]); /* ranks 1 and 3 have the same slices */
    CHECK_EQ(dtrain_run_threads(4, spread_load, &s, NULL), DTRAIN_OK);
    shell("rm -rf %s", s.directories[3]);
    s.fails = 1;
    CHECK_EQ(dtrain_run_threads(4, spread_load, &s, NULL), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "on the disks of the 4 ranks no step is whole");
}

TEST(the_newest_step_that_is_whole_among_the_disks_is_loaded)
{
    spread s;
    spread_begin(&s, "newest", 3);
    s.strategy = DTRAIN_FULL_SHARD;
    for (s.step = 1; s.step <= 3; s.step++)
        CHECK_EQ(dtrain_run_threads(3, spread_save, &s, NULL), DTRAIN_OK);
    CHECK_EQ(count_files(s.directories[0], "index.json"), 2);      /* the last two stay */
    shell("rm %s/rank-00001/step-3/index.json", s.directories[1]); /* killed before it was there */
    dtrain_set_log(quiet, NULL);
    s.step = 2;
    CHECK_EQ(dtrain_run_threads(3, spread_load, &s, NULL), DTRAIN_OK);
    CHECK_EQ(s.loaded, 2);
    shell("rm %s/rank-00002/step-2/index.json", s.directories[2]);
    s.fails = 1;
    CHECK_EQ(dtrain_run_threads(3, spread_load, &s, NULL), DTRAIN_ERR_IO);
    dtrain_set_log(NULL, NULL);
}

static dtrain_status not_shared(dtrain_comm *world, void *user)
{
    spread *s = (spread *)user;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    memset(&desc, 0, sizeof desc);
    desc.directory = s->directories[dtrain_comm_rank(world)];
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &desc), DTRAIN_ERR_IO);
    CHECK(ckpt == NULL);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1, 2 does not see the file that rank 0 made");
    return DTRAIN_OK;
}

TEST(a_part_in_another_steps_directory_is_no_part_of_it)
{
    spread s;
    spread_begin(&s, "part", 2);
    s.strategy = DTRAIN_FULL_SHARD;
    s.step = 5;
    CHECK_EQ(dtrain_run_threads(2, spread_save, &s, NULL), DTRAIN_OK);
    shell("cd %s/rank-00000 && cp -r step-5 step-10", s.directories[0]);
    shell("cd %s/rank-00001 && cp -r step-5 step-10", s.directories[1]);
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain_run_threads(2, spread_load, &s, NULL), DTRAIN_OK);
    dtrain_set_log(NULL, NULL);
    CHECK_EQ(s.loaded, 5);
}

TEST(ranks_that_share_no_file_system_are_told_so_at_once)
{
    spread s;
    spread_begin(&s, "strangers", 3);
    CHECK_EQ(dtrain_run_threads(3, not_shared, &s, NULL), DTRAIN_OK);
    CHECK_EQ(count_files(s.directories[0], ".shared*"), 0);
}

/* ---- runs that are turned back ---- */

/* Four numbers that say which branch saved them. */
typedef struct turn {
    const char *directory;
    int local, loads, exact, keep_last;
    uint64_t from, first, last; /* loads `from` if exact, then saves first to last, by tens */
    float value;
    uint64_t step;
} turn;

static dtrain_status turn_body(dtrain_comm *world, void *user)
{
    turn *t = (turn *)user;
    float x[4];
    size_t begin, count = dtrain_shard(world, 4, dtrain_comm_rank(world), &begin);
    dtrain_piece piece;
    dtrain_pieces list;
    dtrain_checkpoint *ckpt = NULL;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint_state state;
    dtrain_checkpoint_load_desc how;
    memset(&piece, 0, sizeof piece), memset(&list, 0, sizeof list), memset(&desc, 0, sizeof desc);
    memset(&state, 0, sizeof state), memset(&how, 0, sizeof how);
    piece.name = "w";
    piece.dtype = DTRAIN_F32;
    piece.ndim = 1;
    piece.shape[0] = 4;
    piece.begin = begin;
    piece.count = count;
    piece.data = x;
    list.pieces = &piece;
    list.count = 1;
    desc.directory = t->directory;
    desc.local = t->local;
    desc.keep_last = t->keep_last;
    desc.no_sync = 1;
    state.lists = &list;
    state.list_count = 1;
    how.exact = t->exact;
    how.step = t->from;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &desc), DTRAIN_OK);
    dtrain_status status = t->loads ? dtrain_checkpoint_load(ckpt, &state, &how, NULL) : DTRAIN_OK;
    if (status == DTRAIN_OK && dtrain_comm_rank(world) == 0 && t->loads) {
        t->step = state.step;
        t->value = t->first == 0 ? x[0] : t->value;
    }
    for (int i = 0; i < 4; i++)
        x[i] = t->value;
    for (state.step = t->first; status == DTRAIN_OK && state.step <= t->last && t->first > 0; state.step += 10)
        status =
            state.step % 20 == 0 ? dtrain_checkpoint_save(ckpt, &state) : dtrain_checkpoint_save_async(ckpt, &state),
        status = status == DTRAIN_OK ? dtrain_checkpoint_wait(ckpt) : status;
    dtrain_checkpoint_destroy(ckpt);
    return status;
}

static void turn_run(turn t)
{
    CHECK_EQ(dtrain_run_threads(2, turn_body, &t, NULL), DTRAIN_OK);
}

/* The newest is `step` of the branch that saved `value`. */
static void turn_newest(const turn *like, uint64_t step, float value)
{
    turn t = *like;
    t.loads = 1;
    t.exact = 0;
    t.first = t.last = 0;
    CHECK_EQ(dtrain_run_threads(2, turn_body, &t, NULL), DTRAIN_OK);
    if (t.step != step || t.value != value)
        TEST_FAIL("local %d: loaded step %llu of branch %g, expected step %llu of branch %g", t.local,
                  (unsigned long long)t.step, (double)t.value, (unsigned long long)step, (double)value);
}

static int turn_has(const turn *t, int step)
{
    char name[64];
    snprintf(name, sizeof name, t->local ? "rank-00001/step-%d" : "step-%d", step);
    return exists(t->directory, name);
}

TEST(a_run_that_was_turned_back_resumes_on_its_own_branch)
{
    for (int local = 0; local < 2; local++) {
        turn t = {fresh("turn"), local, 0, 0, 5, 0, 10, 50, 1, 0},
             back = {t.directory, local, 1, 1, 5, 10, 20, 30, 2, 0};
        turn again = {t.directory, local, 1, 0, 5, 0, 40, 40, 3, 0},
             fresh_job = {t.directory, local, 0, 0, 5, 0, 10, 10, 4, 0};
        turn_run(t);
        turn_newest(&t, 50, 1);
        turn_run(back);
        turn_newest(&t, 30, 2);
        if (!local) {
            shell("rm %s/latest", t.directory);
            dtrain_set_log(quiet, NULL);
            turn_newest(&t, 30, 2);
            CHECK_EQ(dtrain_checkpoint_verify(t.directory), DTRAIN_OK);
            dtrain_set_log(NULL, NULL);
        }
        turn_run(again); /* goes on from 30 of the second branch */
        turn_newest(&t, 40, 3);
        turn_run(back); /* and back once more */
        turn_newest(&t, 30, 2);
        turn_run(fresh_job); /* a job that loads nothing, where there are higher steps */
        turn_newest(&t, 10, 4);
    }
}

TEST(keep_last_counts_from_the_newest_branch)
{
    for (int local = 0; local < 2; local++) {
        turn t = {fresh("kept last"), local, 0, 0, 4, 0, 10, 40, 1, 0},
             back = {t.directory, local, 1, 1, 2, 10, 15, 35, 2, 0};
        turn_run(t);
        turn_run(back); /* 15, 25 and 35; those of the first branch between them go */
        turn_newest(&t, 35, 2);
        CHECK(turn_has(&t, 35) && turn_has(&t, 25) && turn_has(&t, 40));
        CHECK(!turn_has(&t, 30) && !turn_has(&t, 20) && !turn_has(&t, 15));
        CHECK(local || !turn_has(&t, 10)); /* a disk keeps what all ranks had when the job began */
    }
}

/* ---- directories ---- */

/* Removes the directory of a checkpointer, and makes another there. */
static dtrain_status removed_and_made_again(dtrain_comm *world, void *user)
{
    int local = *(const int *)user, rank = dtrain_comm_rank(world);
    char directory[160], text[300];
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint_state state;
    dtrain_checkpoint *ckpt = NULL;
    memset(&desc, 0, sizeof desc);
    memset(&state, 0, sizeof state);
    snprintf(directory, sizeof directory, "%s/again", base);
    desc.directory = directory;
    desc.local = local;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0) {
        shell("rm -r %s", directory);
        shell("mkdir %s", directory);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    snprintf(text, sizeof text, "\"%s\" was removed after the checkpointer had opened it", directory);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), text);
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), text);
    dtrain_checkpoint_destroy(ckpt);
    return DTRAIN_OK;
}

TEST(a_directory_that_was_removed_is_told_from_one_without_checkpoints)
{
    for (int local = 0; local < 2; local++) {
        shell("mkdir %s", fresh("again"));
        CHECK_EQ(dtrain_run_threads(3, removed_and_made_again, &local, NULL), DTRAIN_OK);
    }
}

TEST(a_directory_may_have_a_path_as_long_as_the_system_takes)
{
    static char path[4000];
    size_t length = (size_t)snprintf(path, sizeof path, "%s", fresh("long"));
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint_state state;
    dtrain_checkpoint *ckpt = NULL;
    while (length < sizeof path - 250) {
        memset(path + length, 'a', 201);
        path[length] = '/';
        length += 201;
    }
    memset(&desc, 0, sizeof desc);
    memset(&state, 0, sizeof state);
    desc.directory = path;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, NULL, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    CHECK_EQ(dtrain_checkpoint_verify(path), DTRAIN_OK);
}
