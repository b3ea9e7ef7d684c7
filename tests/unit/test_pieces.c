/* Lists of pieces: what a checkpoint makes of several of them, of names that begin alike, of what has an element a
 * step, of settings; and that what compression keeps of an FSDP goes on to the bit. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>

#include "test.h"
#include "checkpoint_model.h"

static dtrain_checkpoint *open_at(const char *path, dtrain_comm *comm)
{
    dtrain_checkpoint *ckpt = NULL;
    dtrain_checkpoint_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = path;
    desc.no_sync = 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, comm, &desc), DTRAIN_OK);
    return ckpt;
}

static dtrain_piece vector_of(const char *name, float *data, size_t count)
{
    dtrain_piece piece;
    memset(&piece, 0, sizeof piece);
    piece.name = name;
    piece.dtype = DTRAIN_F32;
    piece.ndim = 1;
    piece.shape[0] = piece.count = count;
    piece.data = data;
    return piece;
}

static dtrain_checkpoint_state state_with(const dtrain_pieces *lists, size_t count, uint64_t step)
{
    dtrain_checkpoint_state state;
    memset(&state, 0, sizeof state);
    state.lists = lists;
    state.list_count = count;
    state.step = step;
    return state;
}

/* ---- arrays of the program's own ---- */

TEST(two_lists_of_the_same_names_need_a_name_each)
{
    float a[3] = {1, 2, 3}, b[3] = {4, 5, 6};
    dtrain_piece one = vector_of("w", a, 3), two = vector_of("w", b, 3);
    dtrain_pieces lists[2];
    memset(lists, 0, sizeof lists);
    lists[0].pieces = &one;
    lists[1].pieces = &two;
    lists[0].count = lists[1].count = 1;
    dtrain_checkpoint *ckpt = open_at(fresh("names"), NULL);
    dtrain_checkpoint_state state = state_with(lists, 2, 1);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_ERR_INVALID);
    lists[0].name = "left/";
    lists[1].name = "right/";
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
    memset(a, 0, sizeof a);
    memset(b, 0, sizeof b);
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_OK);
    CHECK(a[0] == 1 && a[2] == 3 && b[0] == 4 && b[2] == 6);
    lists[1].name = "wrong/";
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "missing: \"wrong/w\"; extra: \"right/w\"");
    static char endless[600];
    memset(endless, 'x', sizeof endless - 1);
    lists[1].name = endless;
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "has 600 bytes, expected fewer than 512");
    dtrain_checkpoint_destroy(ckpt);
}

static dtrain_status logs(dtrain_comm *world, void *user)
{
    float losses[5] = {5, 4, 3, 2, 1};
    int root = dtrain_comm_rank(world) == 0;
    dtrain_piece piece = vector_of("losses", root ? losses : NULL, 5);
    dtrain_pieces list;
    memset(&list, 0, sizeof list);
    list.pieces = &piece;
    list.count = 1;
    piece.per_step = 1;
    dtrain_checkpoint *ckpt = open_at((const char *)user, world);
    dtrain_checkpoint_state state = state_with(&list, 1, 3);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK); /* of 5 the first 3 */
    losses[2] = losses[3] = 0;
    state.step = 0;
    piece.shape[0] = 3; /* there is room for no more */
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(state.step, 3);
    CHECK(losses[1] == 4 && losses[2] == 3 * root && losses[3] == 0);
    piece.shape[0] = 2;
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "it is of step 3, and \"losses\" has room for 2 steps");
    dtrain_checkpoint_destroy(ckpt);
    return DTRAIN_OK;
}

TEST(what_has_an_element_a_step_is_as_long_as_the_checkpoint_has_steps)
{
    CHECK_EQ(dtrain_run_threads(2, logs, (void *)(uintptr_t)fresh("logs"), NULL), DTRAIN_OK);
}

/* ---- settings ---- */

TEST(settings_can_be_read_and_another_schedule_is_refused)
{
    dtrain_schedule schedule = {DTRAIN_SCHEDULE_COSINE, 0.5f, 0.25f, 10, 100};
    model m;
    model_create(&m, NULL, 0, 0, 1);
    m.optimizer->step = 41;
    dtrain_checkpoint *ckpt = open_at(fresh("settings"), NULL);
    dtrain_checkpoint_state state = state_of(&m, 7);
    m.lists[1] = dtrain_schedule_pieces(&schedule);
    state.list_count = 2;
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
    m.optimizer->step = 0;
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_OK);
    CHECK_EQ(m.optimizer->step, 41);
    CHECK(strcmp(dtrain_checkpoint_value(ckpt, "optimizer.kind", NULL), "sgd") == 0);
    CHECK(strcmp(dtrain_checkpoint_value(ckpt, "optimizer.step", NULL), "41") == 0);
    CHECK(strcmp(dtrain_checkpoint_value(ckpt, "schedule.lr", NULL), "0.5") == 0);
    CHECK(dtrain_checkpoint_value(ckpt, "schedule.none", NULL) == NULL);
    schedule.total_steps = 200;
    CHECK_EQ(dtrain_checkpoint_load(ckpt, &state, NULL, NULL), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "another schedule.total_steps: 100 was saved, this run has 200");
    schedule.lr = (float)NAN;
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "list 1: the setting schedule.lr is nan");
    m.lists[1] = dtrain_schedule_pieces(NULL);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "list 1 of 2 is of an object that is NULL");
    dtrain_checkpoint_destroy(ckpt);
    model_destroy(&m);
}

/* ---- what compression keeps ---- */

enum { STEPS = 6, STOP = 3 };

typedef struct compressed_run {
    const char *directory;
    int shard_size, resumes;
    unsigned char digest[32];
} compressed_run;

static dtrain_status compressed_step(dtrain_fsdp *fsdp, dtrain_comm *world, int step)
{
    dtrain_status status = DTRAIN_OK;
    for (int unit = 0; unit < 2 && status == DTRAIN_OK; unit++) {
        static const char *const names[2] = {"a", "b"};
        static const size_t counts[2] = {2001, 3000}; /* two shards of the first are not equally long */
        status = dtrain_fsdp_gather(fsdp, unit);
        float *grad = dtrain_fsdp_grad(fsdp, names[unit]);
        for (size_t i = 0; i < counts[unit]; i++)
            grad[i] += dtrain_random_normal((uint64_t)(step * 8 + dtrain_comm_rank(world)), i);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, unit);
    }
    return status == DTRAIN_OK ? dtrain_fsdp_step(fsdp, 0.1f) : status;
}

static dtrain_status compressed_body(dtrain_comm *world, void *user)
{
    compressed_run *r = (compressed_run *)user;
    dtrain_param table[2];
    dtrain_compress_desc compress;
    dtrain_fsdp_desc desc = desc_of(r->shard_size > 0 ? DTRAIN_HYBRID_SHARD : DTRAIN_DDP, r->shard_size, 0);
    dtrain_fsdp *fsdp = NULL;
    memset(table, 0, sizeof table);
    memset(&compress, 0, sizeof compress);
    for (int i = 0; i < 2; i++) {
        table[i].name = i == 0 ? "a" : "b";
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = i == 0 ? 2001 : 3000;
        table[i].unit = i;
    }
    compress.kind = DTRAIN_COMPRESS_INT8;
    desc.compress = &compress;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 2, &desc), DTRAIN_OK);
    dtrain_checkpoint *ckpt = open_at(r->directory, world);
    dtrain_pieces list = dtrain_fsdp_pieces(fsdp);
    dtrain_checkpoint_state state = state_with(&list, 1, STOP);
    dtrain_status status = r->resumes ? dtrain_checkpoint_load(ckpt, &state, NULL, NULL) : DTRAIN_OK;
    CHECK_EQ(status, DTRAIN_OK);
    for (int step = r->resumes ? STOP : 0; step < STEPS && status == DTRAIN_OK; step++) {
        if (step == STOP && !r->resumes)
            CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
        status = compressed_step(fsdp, world, step);
    }
    static __thread float values[5001];
    CHECK_EQ(status, DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get(fsdp, "a", values, -1), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_get(fsdp, "b", values + 2001, -1), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0)
        dtrain_sha256(values, sizeof values, r->digest);
    dtrain_checkpoint_destroy(ckpt);
    dtrain_fsdp_destroy(fsdp);
    return status;
}

TEST(an_fsdp_that_compresses_goes_on_to_the_bit)
{
    for (int shard_size = 0; shard_size <= 2; shard_size += 2) {
        compressed_run whole, half;
        memset(&whole, 0, sizeof whole);
        whole.directory = fresh("compressed");
        whole.shard_size = shard_size;
        half = whole;
        half.resumes = 1;
        CHECK_EQ(dtrain_run_threads(4, compressed_body, &whole, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_run_threads(4, compressed_body, &half, NULL), DTRAIN_OK);
        CHECK(memcmp(whole.digest, half.digest, 32) == 0);
    }
}
