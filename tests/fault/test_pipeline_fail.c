/* Pipelines that go wrong: callbacks that fail, wrong descs and inputs, ranks without memory, processes that are
 * killed; what every rank is told, and that the next step is whole. */
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "pipeline_model.h"
#include <sys/mman.h>

/* ---- callbacks ---- */

typedef struct failure {
    setting s;
    int rank, chunk, after, replicas;
    const char *in;
    dtrain_strategy strategy;
} failure;

/* Of a stage: not its first pair, which may have no gradient of its input to make; one with weights apart, if so. */
static int pair_of(const failure *f, int first)
{
    return first + 1 + (strcmp(f->in, "backward_weights") == 0 && first % 2 == 0);
}

static void will_fail(const failure *f, rank_of_pipeline *r)
{
    stage *s = r->stages[f->chunk];
    s->fails_pair = pair_of(f, s->first);
    s->fails_after = f->after;
    s->fails_in = f->in;
}

/* What all ranks must be told: who, what and why. */
static void check_told(const failure *f, const rank_of_pipeline *r, int ranks, const char *told)
{
    char who[96], why[96];
    int begins[PAIRS + 1];
    CHECK_EQ(dtrain_split_stages(NULL, PAIRS, ranks * r->chunks, begins), DTRAIN_OK);
    snprintf(who, sizeof who, ranks > 1 ? "the pipeline could not go on: rank %d: ERR_IO: " : "could not go on: ERR_IO: ",
             f->rank);
    snprintf(why, sizeof why, "layer w%d: %s returned ERR_IO (33)", pair_of(f, begins[f->chunk * ranks + f->rank]),
             f->in);
    CHECK_CONTAINS(told, who);
    CHECK_CONTAINS(told, why);
}

static dtrain_status fails_once(dtrain_comm *world, void *user)
{
    const failure *f = (const failure *)user;
    int ranks = dtrain_comm_size(world);
    rank_of_pipeline *r = rank_create(world, &f->s, NULL, NULL, 0, 1);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    if (r->rank == f->rank)
        will_fail(f, r);
    CHECK_EQ(rank_step(r), DTRAIN_ERR_ABORTED);
    check_told(f, r, ranks, dtrain_last_error());
    check_told(f, r, ranks, dtrain_last_error());
    if (r->rank == f->rank)
        CHECK(r->stages[f->chunk]->fails_in == NULL);
    rank_clear(r);
    CHECK_EQ(rank_step(r), DTRAIN_OK);
    rank_check(r, reference_of(r->micro));
    CHECK_EQ(dtrain_pipeline_get_stats(r->pipeline).peak, dtrain_pipeline_get_plan(r->pipeline)->peak[r->rank]);
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(a_callback_that_fails_on_one_rank_is_told_to_all_and_the_next_step_is_whole)
{
    static const dtrain_pipeline_schedule kinds[] = {DTRAIN_PIPELINE_GPIPE, DTRAIN_PIPELINE_1F1B, DTRAIN_PIPELINE_ZB_H1,
                                                     DTRAIN_PIPELINE_INTERLEAVED};
    static const char *const where[] = {"forward", "backward", "backward_weights"};
    reference_of(1);
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 3; i++)
            for (int ranks = 1; ranks <= 4; ranks++) {
                failure f;
                int before = test_failures;
                memset(&f, 0, sizeof f);
                f.s.schedule = kinds[k];
                f.s.micro = 5;
                f.rank = (k + i) % ranks;
                f.chunk = k == 3 ? i % 2 : 0;
                f.after = i;
                f.in = where[i];
                CHECK_EQ(dtrain_run_threads(ranks, fails_once, &f, NULL), DTRAIN_OK);
                if (test_failures != before)
                    TEST_FAIL("schedule %d, %s, %d ranks", (int)kinds[k], where[i], ranks);
            }
}

/* Ranks 0 and 1 are a pipeline; 1 and 2 a group of the callbacks of 1, as of tensor parallelism, which 2 leaves. */
static dtrain_status loses_its_mate(dtrain_comm *world, void *user)
{
    const failure *f = (const failure *)user;
    int rank = dtrain_comm_rank(world);
    dtrain_comm *group = NULL, *side = NULL;
    CHECK_EQ(dtrain_comm_split(world, rank == 2, rank, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank > 0, rank, &side), DTRAIN_OK);
    if (rank < 2) {
        rank_of_pipeline *r = rank_create(group, &f->s, NULL, NULL, 0, 1);
        CHECK_EQ(rank_agree(r), DTRAIN_OK);
        if (rank == f->rank) {
            will_fail(f, r);
            r->stages[0]->side = side;
        }
        CHECK_EQ(rank_step(r), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "the pipeline could not go on: rank 1: ERR_PEER_LOST");
        CHECK_CONTAINS(dtrain_last_error(), "returned ERR_PEER_LOST (35): barrier #1 on rank 0: rank 1");
        rank_clear(r);
        CHECK_EQ(rank_step(r), DTRAIN_OK);
        rank_check(r, reference_of(r->micro));
        rank_destroy(r);
    }
    dtrain_comm_destroy(side);
    dtrain_comm_destroy(group);
    return DTRAIN_OK;
}

TEST(a_callback_that_loses_a_rank_of_its_own_group_is_a_lost_rank_to_the_pipeline)
{
    static const char *const where[] = {"forward", "backward"};
    reference_of(1);
    for (int i = 0; i < 2; i++) {
        failure f;
        memset(&f, 0, sizeof f);
        f.s.micro = 3;
        f.rank = 1;
        f.in = where[i];
        CHECK_EQ(dtrain_run_threads(3, loses_its_mate, &f, NULL), DTRAIN_OK);
    }
}

static dtrain_status fails_sharded(dtrain_comm *world, void *user)
{
    const failure *f = (const failure *)user;
    dtrain_comm *group = NULL, *same = NULL;
    dtrain_fsdp_desc desc;
    int rank = dtrain_comm_rank(world), replica = rank % f->replicas, ranks = dtrain_comm_size(world) / f->replicas;
    memset(&desc, 0, sizeof desc);
    desc.strategy = f->strategy;
    CHECK_EQ(dtrain_comm_split(world, replica, rank, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank / f->replicas, rank, &same), DTRAIN_OK);
    rank_of_pipeline *r = rank_create(group, &f->s, same, &desc, replica, f->replicas);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    for (int step = 0; step < 3; step++) {
        int bad = step == 1;
        if (bad && replica == 1 && r->rank == f->rank)
            will_fail(f, r);
        for (int c = 0; c < r->chunks; c++)
            CHECK_EQ(dtrain_fsdp_begin(r->fsdps[c], r->micro, 1), DTRAIN_OK);
        CHECK_EQ(rank_step(r), bad && replica == 1 ? DTRAIN_ERR_ABORTED : DTRAIN_OK);
        if (bad && replica == 1)
            check_told(f, r, ranks, dtrain_last_error());
        for (int c = 0; c < r->chunks; c++) {
            CHECK_EQ(dtrain_fsdp_finish(r->fsdps[c], NULL), bad ? DTRAIN_ERR_ABORTED : DTRAIN_OK);
            if (!bad)
                CHECK_EQ(dtrain_fsdp_drop(r->fsdps[c]), DTRAIN_OK);
            else
                CHECK_CONTAINS(dtrain_last_error(), "returned ERR_IO (33)");
        }
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    rank_destroy(r);
    dtrain_comm_destroy(same);
    dtrain_comm_destroy(group);
    return DTRAIN_OK;
}

TEST(with_fsdp_the_step_of_all_pipelines_is_dropped)
{
    static const char *const where[] = {"forward", "backward", "backward_weights"};
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 3; i++) {
            failure f;
            int before = test_failures;
            memset(&f, 0, sizeof f);
            f.s.schedule = (dtrain_pipeline_schedule)(DTRAIN_PIPELINE_GPIPE + k);
            f.s.micro = 4;
            f.replicas = 2;
            f.rank = i;
            f.after = 1;
            f.in = where[i];
            f.strategy = k % 2 ? DTRAIN_DDP : DTRAIN_FULL_SHARD;
            CHECK_EQ(dtrain_run_threads(6, fails_sharded, &f, NULL), DTRAIN_OK);
            if (test_failures != before)
                TEST_FAIL("schedule %d, %s", (int)f.s.schedule, where[i]);
        }
}

static dtrain_status fails_to_evaluate(dtrain_comm *world, void *user)
{
    const failure *f = (const failure *)user;
    rank_of_pipeline *r = rank_create(world, &f->s, NULL, NULL, 0, 1);
    int last = r->rank == dtrain_comm_size(world) - 1;
    dtrain_tensor output;
    if (r->rank == f->rank)
        will_fail(f, r);
    CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, r->rank == 0 ? r->inputs : NULL, r->pointers[0], &output),
             DTRAIN_ERR_ABORTED);
    check_told(f, r, dtrain_comm_size(world), dtrain_last_error());
    CHECK(output.data == NULL && output.ndim == 0 && output.dtype == 0);
    CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, NULL, r->pointers[0], &output), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "ERR_INVALID: input is NULL");
    CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, r->rank == 0 ? r->inputs : NULL, r->pointers[0], &output),
             DTRAIN_OK);
    CHECK_EQ(output.data != NULL, last);
    if (last)
        CHECK(((float *)output.data)[0] == reference_of(1)->loss[0]);
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(an_evaluation_that_fails_is_told_to_all)
{
    failure f;
    memset(&f, 0, sizeof f);
    f.s.schedule = DTRAIN_PIPELINE_INTERLEAVED;
    f.in = "forward";
    f.chunk = 1;
    for (int ranks = 1; ranks <= 3; ranks++)
        for (f.rank = 0; f.rank < ranks; f.rank++)
            CHECK_EQ(dtrain_run_threads(ranks, fails_to_evaluate, &f, NULL), DTRAIN_OK);
}

/* ---- inputs and shapes ---- */

static dtrain_status wrong_inputs(dtrain_comm *world, void *user)
{
    const failure *f = (const failure *)user;
    rank_of_pipeline *r = rank_create(world, &f->s, NULL, NULL, 0, 1);
    int middle = dtrain_comm_size(world) / 2;
    CHECK_EQ(rank_step(r), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "call dtrain_pipeline_agree first");
    CHECK_EQ(dtrain_fuse_begin(world), DTRAIN_OK);
    CHECK_EQ(rank_agree(r), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "cannot be fused; call fuse_end first");
    CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, r->inputs, r->pointers[0], NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_fuse_end(world), DTRAIN_OK);
    CHECK_EQ(dtrain_pipeline_agree(r->pipeline, NULL), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "ERR_INVALID: inputs is NULL");
    if (r->rank == middle) {
        r->stages[0]->fails_in = "shape";
        r->stages[0]->fails_pair = r->stages[0]->first;
    }
    CHECK_EQ(rank_agree(r), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "shape returned ERR_IO (33)");
    r->inputs[1].ndim = 9;
    CHECK_EQ(rank_agree(r), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "ndim 9");
    CHECK_EQ(rank_step(r), DTRAIN_ERR_INVALID);
    r->inputs[1] = r->batches[1].input;
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    CHECK_EQ(dtrain_pipeline_step(r->pipeline, NULL, r->pointers), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "input 0 is NULL, agreed on was F32 [3, 5]");
    r->inputs[1] = r->inputs[0];
    CHECK_EQ(rank_step(r), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "input 1 is F32 [3, 5], agreed on was F32 [4, 5]: call dtrain_pipeline_agree");
    r->inputs[1] = r->batches[1].input;
    r->inputs[1].data = NULL;
    CHECK_EQ(rank_step(r), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "input 1 is F32 [4, 5] without data");
    r->inputs[1] = r->batches[1].input;
    rank_clear(r);
    CHECK_EQ(rank_step(r), DTRAIN_OK);
    rank_check(r, reference_of(r->micro));
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(wrong_inputs_and_shapes_are_told_to_all_ranks)
{
    failure f;
    memset(&f, 0, sizeof f);
    f.s.micro = 3;
    for (int ranks = 1; ranks <= 4; ranks++)
        CHECK_EQ(dtrain_run_threads(ranks, wrong_inputs, &f, NULL), DTRAIN_OK);
}

static dtrain_status differs(dtrain_comm *world, void *user)
{
    setting s = {DTRAIN_PIPELINE_1F1B, 0, 4, 0};
    (void)user;
    s.micro += dtrain_comm_rank(world) == 2;
    rank_of_pipeline *r = rank_create(world, &s, NULL, NULL, 0, 1);
    CHECK_EQ(rank_agree(r), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "the plan's micro_batches 4 on ranks 0, 1, but 5 on rank 2; give");
    rank_destroy(r);
    s.micro = 4;
    r = rank_create(world, &s, NULL, NULL, 0, 1);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 2) { /* comes back with another */
        rank_destroy(r);
        s.micro = 3;
        r = rank_create(world, &s, NULL, NULL, 0, 1);
    }
    CHECK_EQ(rank_agree(r), DTRAIN_ERR_MISMATCH);
    CHECK_EQ(rank_step(r), DTRAIN_ERR_INVALID); /* nobody waits for rank 2, which refuses */
    CHECK_CONTAINS(dtrain_last_error(), "call dtrain_pipeline_agree first");
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(ranks_with_other_descs_are_told_who_differs)
{
    CHECK_EQ(dtrain_run_threads(3, differs, NULL, NULL), DTRAIN_OK);
}

/* ---- descs ---- */

static void refused(dtrain_comm *group, const dtrain_pipeline_desc *desc, const char *text)
{
    static char some;
    dtrain_pipeline *pipeline = (dtrain_pipeline *)(void *)&some;
    CHECK_EQ(dtrain_pipeline_create(&pipeline, group, desc), DTRAIN_ERR_INVALID);
    CHECK(pipeline == NULL);
    CHECK_CONTAINS(dtrain_last_error(), text);
}

/* On one rank of three alone: nothing is communicated. */
static dtrain_status refuses(dtrain_comm *world, void *user)
{
    setting s = {DTRAIN_PIPELINE_1F1B, 0, 4, 0};
    dtrain_pipeline_desc desc;
    dtrain_comm *alone;
    (void)user;
    CHECK_EQ(dtrain_comm_split(world, dtrain_comm_rank(world) != 0 ? -1 : 0, 0, &alone), DTRAIN_OK);
    if (dtrain_comm_rank(world) != 0)
        return DTRAIN_OK;
    rank_of_pipeline *r = rank_create(world, &s, NULL, NULL, 0, 1);
    stage *narrow = stage_create(0, 3, 1, 0, 2);
    pipeline_desc(&s, r, &desc);
    refused(NULL, &desc, "group is NULL");
    refused(world, NULL, "desc is NULL");
    desc.micro_batches = -1;
    refused(world, &desc, "-1 micro-batches, 0 chunks; expected 1 to");
    desc.micro_batches = 4;
    desc.chunks = 2;
    refused(world, &desc, "2 chunks a rank are for the interleaved schedule alone; others have 1");
    desc.schedule = DTRAIN_PIPELINE_INTERLEAVED;
    refused(world, &desc, "the module of chunk 1 is NULL: each of the 2 chunks");
    stage *bare = stage_create(1, 3, 0, 0, 8);
    dtrain_module *same[2] = {r->modules[0], r->modules[0]}, *two[2] = {r->modules[0], bare->module};
    dtrain_fsdp *fsdps[2];
    CHECK_EQ(dtrain_fsdp_create(&fsdps[1], alone, r->stages[0]->table, (size_t)(2 * r->stages[0]->pairs), NULL),
             DTRAIN_OK);
    desc.modules = same;
    refused(world, &desc, "chunks 0 and 1 have the same module");
    desc.modules = two;
    refused(world, &desc, "dtrain_pipeline_create: parameter w8 has no memory: give an fsdp");
    desc.fsdps = fsdps;
    fsdps[0] = fsdps[1];
    refused(world, &desc, "chunks 0 and 1 have the same fsdp");
    fsdps[0] = NULL;
    refused(world, &desc,
            "dtrain_pipeline_create: fsdp was made from another table than the module (see parameter w8)");
    dtrain_fsdp_destroy(fsdps[1]);
    dtrain_comm_destroy(alone);
    stage_destroy(bare);
    desc.fsdps = NULL;
    desc.modules = r->modules;
    desc.schedule = (dtrain_pipeline_schedule)7;
    refused(world, &desc, "there is no schedule 7");
    desc.schedule = DTRAIN_PIPELINE_1F1B;
    desc.chunks = 0;
    desc.modules = &narrow->module;
    refused(world, &desc,
            "the module of chunk 0 on rank 0 is made for 2 micro-batches in flight, the schedule needs 3");
    desc.schedule = DTRAIN_PIPELINE_GPIPE;
    refused(world, &desc, "the schedule needs 4: set micro_batches of its desc");
    desc.modules = NULL;
    refused(world, &desc, "modules is NULL");
    CHECK_EQ(dtrain_pipeline_create(NULL, world, &desc), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_pipeline_step(NULL, NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_pipeline_agree(NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK(dtrain_pipeline_get_plan(NULL) == NULL);
    CHECK_EQ(dtrain_pipeline_get_stats(NULL).peak, 0);
    dtrain_pipeline_destroy(NULL);
    stage_destroy(narrow);
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(wrong_descs_are_refused_with_what_would_fit_before_anything_is_sent)
{
    CHECK_EQ(dtrain_run_threads(3, refuses, NULL, NULL), DTRAIN_OK);
}

/* ---- memory ---- */

static void *maybe(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    int *left = (int *)user;
    void *block = NULL;
    if (new_bytes > 0 && (*left)-- <= 0)
        return NULL;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (pointer != NULL && new_bytes > 0)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

static dtrain_status lacks_memory(dtrain_comm *world, void *user)
{
    setting s = {DTRAIN_PIPELINE_1F1B, 0, 4, 0};
    rank_of_pipeline *r = rank_create(world, &s, NULL, NULL, 0, 1);
    dtrain_pipeline *kept = r->pipeline, *made = NULL;
    dtrain_pipeline_desc desc;
    int left = 0, needed = 0;
    dtrain_allocator allocator = {maybe, &left, 0, 0};
    (void)user;
    pipeline_desc(&s, r, &desc);
    desc.allocator = &allocator;
    for (; made == NULL && needed < 100; needed++) {
        left = needed;
        if (dtrain_pipeline_create(&made, world, &desc) != DTRAIN_OK) {
            CHECK_CONTAINS(dtrain_last_error(), "no memory");
            CHECK_EQ(allocator.bytes, 0);
        }
    }
    CHECK(needed > 10 && needed < 100);
    r->pipeline = made;
    left = r->rank == 1 ? 0 : 100;
    CHECK_EQ(rank_agree(r), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(),
                   "the pipeline could not go on: rank 1: ERR_MEMORY: no memory for what travels");
    left = 100;
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    left = r->rank == 1 ? 0 : 100;
    CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, r->inputs, r->pointers[0], NULL), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(),
                   "the pipeline could not go on: rank 1: ERR_MEMORY: no memory for F32 [3, 6] to evaluate");
    left = 100;
    CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, r->inputs, r->pointers[0], NULL), DTRAIN_OK);
    rank_clear(r);
    CHECK_EQ(rank_step(r), DTRAIN_OK);
    rank_check(r, reference_of(4));
    dtrain_pipeline_destroy(made);
    CHECK_EQ(allocator.bytes, 0);
    r->pipeline = kept;
    rank_destroy(r);
    return DTRAIN_OK;
}

TEST(a_rank_without_memory_is_told_to_all_and_may_try_again)
{
    CHECK_EQ(dtrain_run_threads(3, lacks_memory, NULL, NULL), DTRAIN_OK);
}

/* ---- groups that break ---- */

/* How many ranks know that it is over; none leaves before all do, so that none learns by that. 0: not in time. */
static int all_know(int *know, int ranks)
{
    __atomic_add_fetch(know, 1, __ATOMIC_SEQ_CST);
    for (double until = now_s() + 30; __atomic_load_n(know, __ATOMIC_SEQ_CST) < ranks;) {
        if (now_s() > until)
            return 0;
        usleep(1000);
    }
    return 1;
}

/* One rank aborts the group of its pipeline: the other pipeline is not in it. */
static dtrain_status aborts(dtrain_comm *world, void *user)
{
    static const setting s = {DTRAIN_PIPELINE_1F1B, 0, 4, 0};
    dtrain_comm *group = NULL, *same = NULL;
    int rank = dtrain_comm_rank(world);
    CHECK_EQ(dtrain_comm_split(world, rank % 2, rank, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank / 2, rank, &same), DTRAIN_OK);
    rank_of_pipeline *r = rank_create(group, &s, same, NULL, rank % 2, 2);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0)
        CHECK_EQ(dtrain_comm_abort(group, "enough"), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_begin(r->fsdps[0], r->micro, 1), DTRAIN_OK);
    CHECK_EQ(rank_step(r), DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "enough");
    CHECK_EQ(rank_step(r), DTRAIN_ERR_ABORTED);
    CHECK_EQ(dtrain_fsdp_gather(r->fsdps[0], 0), DTRAIN_ERR_ABORTED);
    if (!all_know((int *)user, 4))
        TEST_FAIL("rank %d: others were not told", rank);
    rank_destroy(r);
    dtrain_comm_destroy(same);
    dtrain_comm_destroy(group);
    return DTRAIN_OK;
}

TEST(a_pipeline_that_breaks_is_told_to_the_others_by_the_groups_of_fsdp)
{
    int know = 0;
    CHECK_EQ(dtrain_run_threads(4, aborts, &know, NULL), DTRAIN_OK);
}

static int comes_late(dtrain_comm *world, scene *scene_of_test)
{
    static const setting s = {DTRAIN_PIPELINE_1F1B, 0, 4, 0};
    int *know = (int *)scene_of_test->user, rank = dtrain_comm_rank(world);
    rank_of_pipeline *r = rank_create(world, &s, NULL, NULL, 0, 1);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    while (rank == 1 && __atomic_load_n(know, __ATOMIC_SEQ_CST) < 2)
        usleep(1000);
    CHECK_EQ(rank_step(r), DTRAIN_ERR_TIMEOUT);
    if (rank == 1) /* not that it has waited for the others, which have given up */
        CHECK_CONTAINS(dtrain_last_error(), "has broken off");
    CHECK(all_know(know, 3));
    rank_destroy(r);
    return 0;
}

static dtrain_status comes_late_on_threads(dtrain_comm *world, void *user)
{
    comes_late(world, (scene *)user);
    return DTRAIN_OK;
}

TEST(a_stage_that_comes_too_late_hears_of_it_at_once)
{
    scene s;
    int *know = (int *)mmap(NULL, sizeof *know, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(know != MAP_FAILED);
    reference_of(1);
    scene_begin(&s, 3, 0);
    s.desc.timeout_ms = 1000;
    s.user = know;
    *know = 0;
    run_ranks(&s, comes_late);
    *know = 0;
    memset(&s.desc, 0, sizeof s.desc);
    s.desc.timeout_ms = 1000;
    CHECK_EQ(dtrain_run_threads(3, comes_late_on_threads, &s, &s.desc), DTRAIN_OK);
    munmap(know, sizeof *know);
}

/* ---- processes that are killed ---- */

typedef struct victim {
    setting s;
    int rank, replicas; /* of the world */
    const char *in;
} victim;

static int
    *told; /* of all processes: how many survivors know; none leaves before all do, so that none learns by that */
static const char *dies_in;
static int dies_after;

static void die(const char *what, int pair)
{
    (void)pair;
    if (dies_in != NULL && strcmp(what, dies_in) == 0 && dies_after-- == 0)
        kill(getpid(), SIGKILL);
}

static int until_one_dies(dtrain_comm *world, scene *scene_of_test)
{
    const victim *v = (const victim *)scene_of_test->user;
    dtrain_comm *group = NULL, *same = NULL;
    dtrain_fsdp_desc desc;
    int rank = dtrain_comm_rank(world);
    dtrain_status status = DTRAIN_OK;
    memset(&desc, 0, sizeof desc);
    CHECK_EQ(dtrain_comm_split(world, rank % v->replicas, rank, &group), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, rank / v->replicas, rank, &same), DTRAIN_OK);
    rank_of_pipeline *r =
        rank_create(group, &v->s, v->replicas > 1 ? same : NULL, &desc, rank % v->replicas, v->replicas);
    CHECK_EQ(rank_agree(r), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    for (int step = 0; status == DTRAIN_OK && step < 100; step++) {
        if (step == 3 && rank == v->rank) {
            dies_in = v->in;
            dies_after = 3;
            r->stages[0]->on_call = die;
        }
        for (int c = 0; v->replicas > 1 && status == DTRAIN_OK && c < r->chunks; c++)
            status = dtrain_fsdp_begin(r->fsdps[c], r->micro, 1);
        if (status == DTRAIN_OK)
            status = rank_step(r);
        for (int c = 0; v->replicas > 1 && status == DTRAIN_OK && c < r->chunks; c++) {
            status = dtrain_fsdp_finish(r->fsdps[c], NULL);
            if (status == DTRAIN_OK)
                status = dtrain_fsdp_drop(r->fsdps[c]);
        }
    }
    if (status != DTRAIN_ERR_PEER_LOST)
        TEST_FAIL("rank %d ended with %d: %s", rank, (int)status, dtrain_last_error());
    CHECK_CONTAINS(dtrain_last_error(), "rank ");
    if (!all_know(told, scene_of_test->ranks - 1))
        TEST_FAIL("rank %d: others were not told", rank);
    CHECK_EQ(rank_step(r), DTRAIN_ERR_PEER_LOST);
    CHECK_EQ(dtrain_pipeline_evaluate(r->pipeline, r->inputs, NULL, NULL), DTRAIN_ERR_PEER_LOST);
    rank_destroy(r);
    dtrain_comm_destroy(same);
    dtrain_comm_destroy(group);
    return 0;
}

static void one_dies(victim v, int ranks)
{
    scene s;
    pid_t pids[8];
    int before = test_failures;
    scene_begin(&s, ranks, 1);
    s.desc.timeout_ms = test_ms(60000);
    s.user = &v;
    told = (int *)mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(told != MAP_FAILED);
    for (int rank = 0; rank < ranks; rank++)
        pids[rank] = start_rank(&s, rank, until_one_dies);
    for (int rank = 0; rank < ranks; rank++)
        CHECK_EQ(end_of(pids[rank], 40), rank == v.rank ? 128 + SIGKILL : 0);
    munmap(told, sizeof *told);
    if (test_failures != before)
        TEST_FAIL("rank %d of %d, schedule %d, %s", v.rank, ranks, (int)v.s.schedule, v.in);
}

TEST(a_stage_that_is_killed_is_lost_to_all_others)
{
    static const char *const where[] = {"forward", "backward"};
    dtrain_set_log(quiet, NULL);
    for (int rank = 0; rank < 4; rank++) {
        victim v = {{DTRAIN_PIPELINE_1F1B, 0, 6, 0}, 0, 1, NULL};
        v.rank = rank;
        v.in = where[rank % 2];
        if (rank == 1)
            v.s.schedule = DTRAIN_PIPELINE_INTERLEAVED;
        if (rank == 2)
            v.s.schedule = DTRAIN_PIPELINE_ZB_H1;
        one_dies(v, 4);
    }
}

TEST(a_stage_that_is_killed_is_lost_to_other_pipelines_too)
{
    static const char *const where[] = {"forward", "backward"};
    dtrain_set_log(quiet, NULL);
    for (int rank = 0; rank < 6; rank += 3) {
        victim v = {{DTRAIN_PIPELINE_1F1B, 0, 4, 0}, 0, 2, NULL};
        v.rank = rank;
        v.in = where[rank % 2];
        one_dies(v, 6);
    }
}
