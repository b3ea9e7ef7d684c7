/* FSDP beyond one object: a state that is written to new slices goes on as if it had never stopped, and a rank that is
 * lost is noticed by those that share no sharded group with it. */
#include "dtrain.h"
#include "test.h"
#include "processes.h"

enum { UNITS = 3, ELEMENTS = 37, STEPS = 6, HALF = 3 };

static const char *const names[UNITS] = {"a", "b", "c"};

static dtrain_status create(dtrain_fsdp **fsdp, dtrain_comm *world, dtrain_strategy strategy)
{
    dtrain_param table[UNITS];
    dtrain_fsdp_desc desc;
    memset(table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    desc.strategy = strategy;
    desc.shard_size = 2;
    for (int i = 0; i < UNITS; i++) {
        table[i].name = names[i];
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = ELEMENTS;
        table[i].unit = i;
    }
    return dtrain_fsdp_create(fsdp, world, table, UNITS, &desc);
}

/* One micro-batch a rank; the gradient depends on rank, step and element. leave: ends before the last reduction. */
static dtrain_status train(dtrain_fsdp *fsdp, int rank, int first, int end, int leave)
{
    dtrain_status status = DTRAIN_OK;
    for (int step = first; step < end && status == DTRAIN_OK; step++) {
        for (int unit = UNITS - 1; unit >= 0 && status == DTRAIN_OK; unit--) {
            status = dtrain_fsdp_gather(fsdp, unit);
            float *grad = dtrain_fsdp_grad(fsdp, names[unit]);
            for (uint64_t k = 0; k < ELEMENTS && status == DTRAIN_OK; k++)
                grad[k] = dtrain_random_normal((uint64_t)(100 * step + 10 * unit + rank), k);
            if (leave && unit == 0)
                return DTRAIN_ERR_IO;
            if (status == DTRAIN_OK)
                status = dtrain_fsdp_reduce(fsdp, unit);
        }
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_step(fsdp, 0.05f);
    }
    return status;
}

/* Copies weights and averages of all slices; to = 1: into saved, else from it. */
static void copy_slices(dtrain_fsdp *fsdp, float (*saved)[3][ELEMENTS], int to)
{
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    CHECK_EQ(count, UNITS);
    for (size_t i = 0; i < count; i++)
        for (int k = 0; k < 3 && slices[i].count > 0; k++) {
            float *mine = k == 0 ? slices[i].weights : slices[i].state[k - 1];
            memcpy(to ? saved[i][k] : mine, to ? mine : saved[i][k], slices[i].count * sizeof(float));
        }
}

typedef struct resumed {
    dtrain_strategy strategy;
    int forgets; /* the step is not set */
    int same;    /* by rank 0: all weights were those of the run that never stopped */
} resumed;

static dtrain_status stop_and_resume(dtrain_comm *world, void *user)
{
    resumed *r = (resumed *)user;
    float saved[UNITS][3][ELEMENTS], straight[ELEMENTS], again[ELEMENTS];
    dtrain_fsdp *one, *two;
    int rank = dtrain_comm_rank(world), same = 1;
    CHECK_EQ(create(&one, world, r->strategy), DTRAIN_OK);
    CHECK_EQ(create(&two, world, r->strategy), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get_step(one), 0);
    CHECK_EQ(train(one, rank, 0, HALF, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get_step(one), HALF);
    copy_slices(one, saved, 1);
    CHECK_EQ(train(one, rank, HALF, STEPS, 0), DTRAIN_OK);
    copy_slices(two, saved, 0);
    if (!r->forgets)
        CHECK_EQ(dtrain_fsdp_set_step(two, dtrain_fsdp_get_step(one) - (STEPS - HALF)), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_publish(two), DTRAIN_OK);
    CHECK_EQ(train(two, rank, HALF, STEPS, 0), DTRAIN_OK);
    for (int i = 0; i < UNITS; i++) {
        CHECK_EQ(dtrain_fsdp_get(one, names[i], straight, -1), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_get(two, names[i], again, -1), DTRAIN_OK);
        same = same && memcmp(straight, again, sizeof straight) == 0;
    }
    if (rank == 0)
        r->same = same;
    dtrain_fsdp_destroy(one);
    dtrain_fsdp_destroy(two);
    return DTRAIN_OK;
}

TEST(a_state_in_new_slices_goes_on_with_the_same_bits_once_its_step_is_set)
{
    for (int strategy = DTRAIN_FULL_SHARD; strategy <= DTRAIN_HYBRID_SHARD; strategy++)
        for (int forgets = 0; forgets < 2; forgets++) {
            resumed r;
            r.strategy = (dtrain_strategy)strategy;
            r.forgets = forgets;
            r.same = -1;
            CHECK_EQ(dtrain_run_threads(4, stop_and_resume, &r, NULL), DTRAIN_OK);
            CHECK_EQ(r.same, !forgets);
        }
}

static dtrain_status set_in_a_step(dtrain_comm *world, void *user)
{
    dtrain_fsdp *fsdp;
    (void)user;
    CHECK_EQ(create(&fsdp, world, DTRAIN_FULL_SHARD), DTRAIN_OK);
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        CHECK_EQ(dtrain_fsdp_gather(fsdp, unit), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, unit), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_finish(fsdp, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_set_step(fsdp, 7), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "dtrain_fsdp_set_step: the gradients of the last step are finished");
    CHECK_EQ(dtrain_fsdp_get_step(fsdp), 0);
    CHECK_EQ(dtrain_fsdp_drop(fsdp), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_set_step(fsdp, 7), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get_step(fsdp), 7);
    CHECK_EQ(dtrain_fsdp_set_step(NULL, 7), DTRAIN_ERR_INVALID);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(the_step_is_not_set_under_gradients_that_wait_for_theirs)
{
    CHECK_EQ(dtrain_run_threads(2, set_in_a_step, NULL, NULL), DTRAIN_OK);
}

static int told; /* ranks that have an error */

/* Rank 3 leaves in a step. Rank 0 shares no group of two with it, and waits for rank 1 or 2, which stay. */
static dtrain_status leave_hybrid(dtrain_comm *world, void *user)
{
    dtrain_fsdp *fsdp;
    int rank = dtrain_comm_rank(world);
    double began = now_s(), seconds;
    const dtrain_slice *slices = NULL;
    size_t count = 0;
    (void)user;
    CHECK_EQ(create(&fsdp, world, DTRAIN_HYBRID_SHARD), DTRAIN_OK);
    CHECK_EQ(train(fsdp, rank, 0, 2, 0), DTRAIN_OK);
    dtrain_status status = train(fsdp, rank, 2, STEPS, rank == 3);
    CHECK_EQ(status, rank == 3 ? DTRAIN_ERR_IO : DTRAIN_ERR_PEER_LOST);
    __atomic_add_fetch(&told, rank != 3, __ATOMIC_SEQ_CST);
    do /* nobody goes before all know, which would tell the others by itself */
        seconds = now_s() - began;
    while (rank != 3 && __atomic_load_n(&told, __ATOMIC_SEQ_CST) < 3 && seconds < 20);
    CHECK(seconds < 20);
    CHECK_EQ(dtrain_fsdp_local(fsdp, &slices, &count), DTRAIN_OK);
    CHECK_EQ(count, UNITS);
    CHECK_EQ(dtrain_fsdp_get_step(fsdp), 2);
    dtrain_fsdp_destroy(fsdp);
    return status;
}

TEST(a_lost_rank_is_an_error_for_ranks_that_share_no_group_with_it)
{
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = test_ms(40000);
    told = 0;
    CHECK_EQ(dtrain_run_threads(4, leave_hybrid, NULL, &desc), DTRAIN_ERR_IO);
    CHECK_EQ(told, 3);
}
