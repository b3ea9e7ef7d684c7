/* What a checkpoint of many tensors costs: files opened, and time of the processor. */
#include "hooks.h"
#include "dtrain.h"
#include "test.h"
#include "processes.h"

enum { TENSORS = 300, SAVERS = 4 };

static int opens;

int hook_file_fault(const char *call)
{
    opens += strcmp(call, "open") == 0;
    return 0;
}

static char directory[64], exported[80];

/* Each rank saves 2 of the 8 elements of each tensor: element k of tensor i is 8 i + k. */
static dtrain_status save(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    dtrain_piece pieces[TENSORS];
    float data[TENSORS][2];
    char names[TENSORS][16];
    dtrain_pieces list;
    dtrain_checkpoint *ckpt;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint_state state;
    (void)user;
    memset(pieces, 0, sizeof pieces);
    memset(&list, 0, sizeof list);
    memset(&desc, 0, sizeof desc);
    memset(&state, 0, sizeof state);
    for (int i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof names[i], "t%d", i);
        for (int k = 0; k < 2; k++)
            data[i][k] = (float)(8 * i + 2 * rank + k);
        pieces[i].name = names[i];
        pieces[i].dtype = DTRAIN_F32;
        pieces[i].ndim = 1;
        pieces[i].shape[0] = 8;
        pieces[i].begin = (size_t)(2 * rank);
        pieces[i].count = 2;
        pieces[i].data = data[i];
    }
    list.pieces = pieces;
    list.count = TENSORS;
    state.lists = &list;
    state.list_count = 1;
    state.step = 1;
    desc.directory = directory;
    desc.no_sync = 1;
    CHECK_EQ(dtrain_checkpoint_create(&ckpt, world, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain_checkpoint_save(ckpt, &state), DTRAIN_OK);
    dtrain_checkpoint_destroy(ckpt);
    return DTRAIN_OK;
}

static void saved(void)
{
    snprintf(directory, sizeof directory, "/tmp/dtrain-cost-%ld", (long)getpid());
    snprintf(exported, sizeof exported, "%s.safetensors", directory);
    CHECK_EQ(dtrain_run_threads(SAVERS, save, NULL, NULL), DTRAIN_OK);
}

static void removed(void)
{
    char command[192];
    snprintf(command, sizeof command, "rm -rf %s %s", directory, exported);
    CHECK_EQ(system(command), 0);
}

/* Four files of data, four of hashes, and a few for directories, the index and what is written. */
TEST(export_and_verify_open_each_file_once_however_many_tensors_there_are)
{
    saved();
    opens = 0;
    CHECK_EQ(dtrain_checkpoint_export(directory, exported, 0), DTRAIN_OK);
    CHECK(opens >= 8 && opens <= 20);
    opens = 0;
    CHECK_EQ(dtrain_checkpoint_verify(directory), DTRAIN_OK);
    CHECK(opens >= 8 && opens <= 20);
    dtrain_safetensors *file;
    CHECK_EQ(dtrain_safetensors_open(&file, exported, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_safetensors_count(file), TENSORS);
    for (int i = 0; i < TENSORS; i++) {
        char name[16];
        float data[8];
        snprintf(name, sizeof name, "t%d", i);
        CHECK_EQ(dtrain_safetensors_load(file, name, data, 8, DTRAIN_F32), DTRAIN_OK);
        for (int k = 0; k < 8; k++)
            CHECK_EQ((int)data[k], 8 * i + k);
    }
    dtrain_safetensors_close(file);
    removed();
}

static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void count_piece(void *user, const dtrain_piece *piece)
{
    (void)piece;
    ++*(int *)user;
}

/* Makes an optimizer of `count` parameters, each a unit, and lists its state. Returns the time for each parameter. */
static int64_t listed_ns(int count)
{
    enum { MOST = 8000 };
    static dtrain_param table[MOST];
    static float data[MOST], grad[MOST];
    static char names[MOST][16];
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc desc;
    int pieces = 0;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_ADAMW;
    for (int i = 0; i < count; i++) {
        snprintf(names[i], sizeof names[i], "p%d", i);
        table[i].name = names[i];
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = 1;
        table[i].unit = count - 1 - i;
        table[i].data = &data[i];
        table[i].grad = &grad[i];
    }
    int64_t from = cpu_ns();
    CHECK_EQ(dtrain_optimizer_create(&optimizer, table, (size_t)count, &desc, NULL), DTRAIN_OK);
    dtrain_pieces list = dtrain_params_pieces(table, (size_t)count, optimizer);
    CHECK_EQ(dtrain_pieces_each(&list, 1, 1, 0, count_piece, &pieces), DTRAIN_OK);
    int64_t ns = cpu_ns() - from;
    CHECK_EQ(pieces, 3 * count); /* weights and two moments */
    dtrain_optimizer_destroy(optimizer);
    return ns / count;
}

/* 80 times as many parameters would cost 80 times as much each, if each lookup walked all of them. */
TEST(the_state_of_a_parameter_is_found_without_a_walk)
{
    listed_ns(100);
    int64_t few = listed_ns(100), many = listed_ns(8000);
    if (many > 8 * few)
        TEST_FAIL("%lld ns for each of 100 parameters, %lld ns for each of 8000", (long long)few, (long long)many);
}
