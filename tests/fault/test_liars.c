/* Members that were admitted and then lie: what they tell is refused, and nobody's memory is harmed. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

#include <unistd.h>

#include "liars.h"

static char directory[64];

static void quiet(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
}

/* What rank 0 met. */
typedef struct outcome {
    int loads;
    dtrain_status status;
    char text[640];
} outcome;

/* Each rank saves half of a tensor of 4,000 elements on a disk of its own, and loads all of it. */
static void halves(dtrain_comm *world, void *user)
{
    outcome *o = (outcome *)user;
    float x[4000];
    dtrain_piece piece;
    dtrain_pieces list;
    dtrain_checkpoint_state state;
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *ckpt = NULL;
    int rank = dtrain_comm_rank(world);
    char path[80];
    memset(&list, 0, sizeof list);
    memset(&piece, 0, sizeof piece);
    memset(&state, 0, sizeof state);
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < 4000; i++)
        x[i] = o->loads ? -1.0f : (float)(rank * 4000 + i);
    piece.name = "x";
    piece.dtype = DTRAIN_F32;
    piece.ndim = 1;
    piece.shape[0] = 8000;
    piece.begin = (size_t)(o->loads ? 1 - rank : rank) * 4000; /* what the other has */
    piece.count = 4000;
    piece.data = x;
    list.pieces = &piece;
    list.count = 1;
    state.lists = &list;
    state.list_count = 1;
    state.step = 5;
    snprintf(path, sizeof path, "%s/%d", directory, rank);
    desc.directory = path;
    desc.local = desc.no_sync = 1;
    desc.allocator = dtrain_comm_allocator(world);
    dtrain_status status = dtrain_checkpoint_create(&ckpt, world, &desc);
    if (status == DTRAIN_OK)
        status = o->loads ? dtrain_checkpoint_load(ckpt, &state, NULL, NULL) : dtrain_checkpoint_save(ckpt, &state);
    if (rank == 0) {
        o->status = status;
        snprintf(o->text, sizeof o->text, "%s", status != DTRAIN_OK ? dtrain_last_error() : "");
    }
    dtrain_checkpoint_destroy(ckpt);
}

/* Loads once for each message of rank 1, of which one word is another; returns how often the error had this text. */
static int told(unsigned word, uint64_t value, const char *text)
{
    int met = 0;
    for (unsigned message = 0; message < 40; message++) {
        unsigned char change[LIARS_CHANGE] = {0};
        outcome o = {1, DTRAIN_OK, ""};
        change[0] = (unsigned char)message;
        change[2] = (unsigned char)word;
        memcpy(change + 4, &value, sizeof value);
        liars_run(halves, &o, change, sizeof change, (size_t)64 << 20);
        met += o.status == DTRAIN_ERR_CORRUPT && strstr(o.text, text) != NULL;
    }
    return met;
}

TEST(a_rank_that_lies_while_local_checkpoints_are_loaded_is_told_of_and_harms_nobody)
{
    outcome o = {0, DTRAIN_OK, ""};
    char command[96];
    const uint64_t gibibyte = (uint64_t)1 << 30;
    snprintf(directory, sizeof directory, "/tmp/test_liars-XXXXXX");
    CHECK(mkdtemp(directory) != NULL);
    dtrain_set_log(quiet, NULL);
    liars_run(halves, &o, NULL, 0, SIZE_MAX);
    CHECK_EQ(o.status, DTRAIN_OK);
    o.loads = 1;
    liars_run(halves, &o, NULL, 0, SIZE_MAX);
    CHECK_EQ(o.status, DTRAIN_OK);
    /* the words of a request: holder, bytes, piece, begin of the box, its size, where in it, how many */
    CHECK(told(0, 7, "that nobody has") > 0);
    CHECK(told(1, 1, "asks rank 0 for 1 bytes that are not what their piece has") > 0);
    CHECK(told(1, 5 * gibibyte, "that nobody has") > 0);
    CHECK(told(2, gibibyte, "that nobody has") > 0);
    CHECK(told(3, UINT64_MAX - 3, "that are not what their piece has") > 0);
    CHECK(told(11, gibibyte, "that are not what their piece has") > 0);
    CHECK(told(19, UINT64_MAX - 3, "that are not what their piece has") > 0);
    CHECK(told(20, 3, "that are not what their piece has") > 0);
    CHECK(told(0, UINT64_MAX - 63, "announces 18446744073709551552 bytes of lists") > 0); /* with 64 of rank 0: 0 */
    CHECK(told(5, 0, "rank 1 lists parts that it cannot see") > 0); /* rank 0 would see it */
    CHECK(told(4, UINT64_MAX, "rank 1 lists parts that it cannot see") > 0);
    dtrain_set_log(NULL, NULL);
    snprintf(command, sizeof command, "rm -r %s", directory);
    CHECK_EQ(system(command), 0);
}

/* Rank 1 announces what no rank can announce; rank 0 works as it should. */
static dtrain_status announce(dtrain_comm *world, void *user)
{
    const double *lie = (const double *)user;
    float data[8] = {0}, grad[8] = {0};
    double all[4];
    dtrain_param table;
    dtrain_fsdp_desc desc;
    dtrain_fsdp *fsdp = NULL;
    memset(&table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    table.name = "w";
    table.dtype = DTRAIN_F32;
    table.shape[0] = 8;
    table.data = data;
    desc.strategy = DTRAIN_DDP;
    desc.optimizer.kind = DTRAIN_SGD;
    (void)grad;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, &table, 1, &desc), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 1) {
        CHECK_EQ(dtrain_all_gather(fsdp->world, lie, all, 4, DTRAIN_F64), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_fsdp_begin(fsdp, 1, 1.0), DTRAIN_OK);
        dtrain_status status = dtrain_fsdp_gather(fsdp, 0);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, 0);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_step(fsdp, 0.1f);
        CHECK_EQ(status, DTRAIN_ERR_CORRUPT);
        CHECK_CONTAINS(dtrain_last_error(), "rank 1 announces ");
    }
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(micro_batches_and_weights_that_cannot_be_are_refused)
{
    const double most = 1e300, nan = most * most - most * most;
    double lies[5][2] = {{1e300, 1.0}, {-1.0, 1.0}, {nan, 1.0}, {1.0, -1.0}, {1.0, nan}};
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = test_ms(20000);
    for (int i = 0; i < 5; i++)
        DTRAIN_IGNORE(dtrain_run_threads(2, announce, lies[i], &desc));
}

TEST(what_ranks_tell_by_number_is_one_that_there_is)
{
    dtrain_comm comm;
    dtrain_device_group group;
    dtrain_device_shared memory;
    memset(&comm, 0, sizeof comm);
    memset(&group, 0, sizeof group);
    memset(&memory, 0, sizeof memory);
    CHECK_EQ(dtrain__status_told(DTRAIN_ERR_IO), DTRAIN_ERR_IO);
    CHECK_EQ(dtrain__status_told((uint64_t)1 << 32), DTRAIN_ERR_CORRUPT); /* which as a status were DTRAIN_OK */
    CHECK_EQ(dtrain__status_told(UINT64_MAX), DTRAIN_ERR_CORRUPT);
    comm.size = 3;
    comm.rank = 1;
    group.comm = &comm;
    CHECK_EQ(dtrain__processes_named(&group, 1), 0);
    CHECK_EQ(dtrain__processes_named(&group, 3), 2);
    CHECK_EQ(dtrain__processes_named(&group, 0), 1);
    CHECK_EQ(dtrain__processes_named(&group, 4), 1);
    CHECK_EQ(dtrain__processes_named(&group, UINT64_MAX), 1);
    memory.bytes = 100;
    memory.offset = 60;
    CHECK(dtrain__processes_holds(&memory, 40));
    CHECK(!dtrain__processes_holds(&memory, 41));
    memory.offset = UINT64_MAX;
    CHECK(!dtrain__processes_holds(&memory, 0));
}
