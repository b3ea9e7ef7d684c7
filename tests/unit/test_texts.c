/* What error texts say to somebody who made a beginner's mistake: the call that was made and its unit first, the likely
 * cause, and nothing twice. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "groups.h"

/* How often a part stands in the last error. */
static int times(const char *part)
{
    int found = 0;
    for (const char *at = dtrain_last_error(); (at = strstr(at, part)) != NULL; at += strlen(part))
        found++;
    return found;
}

static void starts(const char *with)
{
    if (strncmp(dtrain_last_error(), with, strlen(with)) != 0)
        TEST_FAIL("\"%s\" does not start with \"%s\"", dtrain_last_error(), with);
}

/* The first error of a message is quoted by the next of the same name. */
static int again(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    float x[2] = {0};
    (void)s;
    if (rank == 0)
        DTRAIN_IGNORE(dtrain_send(world, x, 2, DTRAIN_F32, 1));
    if (rank != 1)
        return 0;
    CHECK_EQ(dtrain_recv(world, x, 1, DTRAIN_F32, 0), DTRAIN_ERR_MISMATCH);
    CHECK_EQ(dtrain_recv(world, x, 1, DTRAIN_F32, 0), DTRAIN_ERR_MISMATCH);
    starts("recv #1 (f32 x 1) on rank 1: rank 0 called send #1 (f32 x 2), this rank 1 recv #1 (f32 x 1); both must");
    CHECK_EQ(times(": "), 1);
    return 0;
}

/* A collective that rank 0 alone calls. */
static int alone(dtrain_comm *world, scene *s)
{
    int32_t x = 1;
    (void)s;
    if (dtrain_comm_rank(world) == 0)
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_ERR_MISMATCH);
    else
        CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_MISMATCH);
    CHECK_EQ(times("inside an if (rank == 0)"), 1);
    return 0;
}

static int alone_in_time(dtrain_comm *world, scene *s)
{
    int32_t x = 1;
    dtrain_comm *own = NULL;
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &own), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0) {
        own->desc.timeout_ms = 100;
        CHECK_EQ(dtrain_all_reduce(own, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM), DTRAIN_ERR_TIMEOUT);
        CHECK_EQ(times("not one inside an if (rank == 0)"), 1);
    }
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_comm_destroy(own);
    return 0;
}

/* Rank 0 alone gathers a unit, to sample. */
static int samples(dtrain_comm *world, scene *s)
{
    dtrain_param table[2];
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_desc desc;
    dtrain_comm *own = NULL;
    (void)s;
    memset(table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    desc.strategy = DTRAIN_FULL_SHARD;
    for (int i = 0; i < 2; i++) {
        table[i].name = i ? "b" : "a";
        table[i].dtype = DTRAIN_F32;
        table[i].shape[0] = 64;
        table[i].unit = i;
    }
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &own), DTRAIN_OK);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, own, table, 2, &desc), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 0) {
        fsdp->gathers->desc.timeout_ms = 300;
        CHECK_EQ(dtrain_fsdp_gather(fsdp, 1), DTRAIN_ERR_TIMEOUT);
        starts("dtrain_fsdp_gather on rank 0, gathering of unit 1: all_gather_v #1 (f32 x 64): rank 0 waited");
        CHECK_EQ(times("gather and reduce on every rank, also to sample or to validate"), 1);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    dtrain_fsdp_destroy(fsdp);
    dtrain_comm_destroy(own);
    return 0;
}

TEST(a_quoted_error_is_not_repeated)
{
    scene s;
    scene_begin(&s, 2, 0);
    run_ranks(&s, again);
    CHECK_EQ(dtrain_error_set(DTRAIN_ERR_IO, "reading: reading: a: b: b on rank 1: b: the end"), DTRAIN_ERR_IO);
    CHECK(strcmp(dtrain_last_error(), "reading: a: b: b on rank 1: the end") == 0);
    CHECK_EQ(dtrain_error_set(DTRAIN_ERR_IO, "of 2: 2: a :: b: "), DTRAIN_ERR_IO);
    CHECK(strcmp(dtrain_last_error(), "of 2: 2: a :: b: ") == 0);
}

TEST(a_call_on_one_rank_alone_is_named_as_the_likely_cause)
{
    scene s;
    on_threads(2, alone, NULL);
    on_threads(3, alone_in_time, NULL);
    scene_begin(&s, 3, 1);
    run_ranks(&s, alone_in_time);
}

TEST(sampling_on_one_rank_alone_under_fsdp_is_told)
{
    scene s;
    on_threads(2, samples, NULL);
    scene_begin(&s, 2, 0);
    run_ranks(&s, samples);
}

static dtrain_status refused(dtrain_comm *world, dtrain_dtype dtype, dtrain_op op)
{
    int32_t x[2] = {0, 0};
    return dtrain_all_reduce(world, x, x, 1, dtype, op);
}

static int arguments(dtrain_comm *world, scene *s)
{
    (void)s;
    CHECK_EQ(refused(world, (dtrain_dtype)DTRAIN_SUM, (dtrain_op)DTRAIN_F32), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("are the two swapped?"), 1);
    CHECK_EQ(refused(world, DTRAIN_I32, DTRAIN_MEAN), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("swapped"), 0);
    CHECK_EQ(times("a mean is for floats: sum, and divide"), 1);
    CHECK_EQ(refused(world, DTRAIN_F32, DTRAIN_XOR), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("AND, OR and XOR are for integers"), 1);
    CHECK_EQ(refused(world, DTRAIN_F32, (dtrain_op)7), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("give a DTRAIN_ constant of dtrain_op"), 1);
    CHECK_EQ(refused(world, DTRAIN_F4, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("send it as bytes"), 1);
    return 0;
}

TEST(arguments_are_said_to_be_swapped_only_where_they_may_be)
{
    on_threads(1, arguments, NULL);
}

static int swapped(dtrain_comm *world, scene *s)
{
    float x[4096] = {0};
    (void)s;
    CHECK_EQ(dtrain_broadcast(world, x, 0, DTRAIN_F32, 4096), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("rank 4096 is not among the 2 ranks of the group; are count and root swapped?"), 1);
    CHECK_EQ(dtrain_reduce(world, x, x, 1, DTRAIN_F32, DTRAIN_SUM, 4096), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("are count and root swapped?"), 1);
    CHECK_EQ(dtrain_gather(world, x, x, 0, DTRAIN_F32, 4096), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("are count and root swapped?"), 1);
    CHECK_EQ(dtrain_scatter(world, x, x, 1, DTRAIN_F32, 4096), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("are count and root swapped?"), 1);
    CHECK_EQ(dtrain_send(world, x, 1, DTRAIN_F32, 4096), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("are count and the rank swapped?"), 1);
    CHECK_EQ(dtrain_broadcast(world, x, 4096, DTRAIN_F32, 2), DTRAIN_ERR_INVALID);
    CHECK_EQ(times("swapped"), 0);
    return 0;
}

TEST(a_count_that_would_be_a_rank_is_said_to_be_swapped_with_the_root)
{
    on_threads(2, swapped, NULL);
}

/* Fields of these bytes have impossible values. */
TEST(a_desc_that_was_not_zeroed_is_told_so)
{
    static const char zero_first[] = "a desc that is not zeroed first (= {0})";
    dtrain_comm *world = NULL;
    dtrain_comm_desc desc, one;
    memset(&desc, 0x5a, sizeof desc);
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_INVALID);
    CHECK_EQ(times(zero_first), 1);
    memset(&one, 0, sizeof one);
    one.rank = one.world_size = 0x5a5a5a5a;
    CHECK_EQ(dtrain_comm_create(&world, &one), DTRAIN_ERR_INVALID);
    CHECK_EQ(times(zero_first), 1);
    one.world_size = 1;
    one.rank = 0;
    CHECK_EQ(dtrain_comm_create(&world, &one), DTRAIN_OK);
    dtrain_fsdp *fsdp = NULL;
    dtrain_fsdp_desc shards;
    dtrain_param table[1];
    memset(table, 0, sizeof table);
    table[0].name = "a";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = 4;
    memset(&shards, 0, sizeof shards);
    memset(&shards.strategy, 0x5a, sizeof shards.strategy);
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, &shards), DTRAIN_ERR_INVALID);
    CHECK_EQ(times(zero_first), 1);
    dtrain_comm_destroy(world);
}

#define LARGE ((size_t)4 << 20) /* more than any buffer between two ranks takes */

/* Every rank sends to the next, or receives from the one before, before it does the other. */
static int same_way_first(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world), *sends = (int *)s->user;
    float *x = (float *)calloc(LARGE, sizeof *x);
    CHECK(x != NULL);
    world->desc.timeout_ms = test_ms(rank == 0 ? 2000 : 20000);
    dtrain_status status = *sends ? dtrain_send(world, x, LARGE, DTRAIN_F32, (rank + 1) % ranks)
                                  : dtrain_recv(world, x, LARGE, DTRAIN_F32, (rank + ranks - 1) % ranks);
    CHECK(status != DTRAIN_OK || *sends); /* rank 0 leaves then, and takes what is on its way */
    if (rank == 0) {
        CHECK_EQ(status, DTRAIN_ERR_TIMEOUT);
        CHECK_EQ(times("call dtrain_exchange"), 1);
        CHECK_EQ(
            times(*sends ? "they all send first, and nobody receives" : "they all receive first, and nobody sends"), 1);
    }
    free(x);
    return 0;
}

TEST(ranks_that_all_send_first_are_told_of_exchange)
{
    for (int ranks = 2; ranks < 4; ranks++)
        for (int sends = 0; sends < 2; sends++) {
            scene s;
            scene_begin(&s, ranks, 1);
            s.user = &sends;
            s.desc.heartbeat_ms = test_ms(2000); /* four say what a rank waits for before rank 0's deadline */
            if (sends)
                run_ranks(&s, same_way_first);
            else
                on_threads(ranks, same_way_first, &s);
        }
}

/* Messages that cross, and a rank that stops driving them: it is no circle. */
TEST(ranks_that_send_and_receive_at_once_are_not_told_of_exchange)
{
    dtrain_comm *worlds[2];
    dtrain_work *in[2], *out[2];
    dtrain_comm_desc desc = {0};
    float *x = (float *)calloc(4 * LARGE, sizeof *x);
    CHECK(x != NULL);
    desc.progress = DTRAIN_PROGRESS_POLL;
    desc.timeout_ms = 300;
    CHECK_EQ(dtrain_threads_create(worlds, 2, &desc), DTRAIN_OK);
    worlds[1]->desc.timeout_ms = test_ms(20000);
    for (int r = 1; r >= 0; r--) { /* rank 1 begins both, and is not polled again */
        float *own = x + 2 * (size_t)r * LARGE;
        CHECK_EQ(dtrain_recv_async(worlds[r], own, LARGE, DTRAIN_F32, !r, &in[r]), DTRAIN_OK);
        CHECK_EQ(dtrain_send_async(worlds[r], own + LARGE, LARGE, DTRAIN_F32, !r, &out[r]), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_poll(worlds[r], 0), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_work_wait(in[0]), DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 is in recv #1 (f32 x 4194304)");
    CHECK_CONTAINS(dtrain_last_error(), "waiting for rank 0");
    CHECK_EQ(times("they all"), 0);
    CHECK(dtrain_work_wait(out[0]) != DTRAIN_OK);
    CHECK_EQ(times("they all"), 0);
    for (int r = 0; r < 2; r++)
        dtrain_comm_destroy(worlds[r]);
    free(x);
}

static int unwaited;
static char unwaited_text[400];

static void keep_unwaited(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    if (strstr(text, "nobody waited for") == NULL)
        return;
    if (__atomic_fetch_add(&unwaited, 1, __ATOMIC_SEQ_CST) == 0)
        snprintf(unwaited_text, sizeof unwaited_text, "%s", text);
}

static int forgets(dtrain_comm *world, scene *s)
{
    int32_t x[3] = {1, 2, 3};
    dtrain_work *work[3];
    (void)s;
    for (int i = 0; i < 3; i++)
        CHECK_EQ(dtrain_all_reduce_async(world, &x[i], &x[i], 1, DTRAIN_I32, DTRAIN_SUM, &work[i]), DTRAIN_OK);
    while (!dtrain_work_done(work[2]))
        usleep(100);
    CHECK_EQ(dtrain_work_wait(work[0]), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

static int waits(dtrain_comm *world, scene *s)
{
    int32_t x = 1;
    dtrain_work *work;
    (void)s;
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM, &work), DTRAIN_OK);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    return 0;
}

TEST(handles_that_nobody_waits_for_are_told_of_when_their_group_ends)
{
    dtrain_set_log(keep_unwaited, NULL);
    on_threads(2, waits, NULL);
    CHECK_EQ(unwaited, 0);
    on_threads(2, forgets, NULL);
    dtrain_set_log(NULL, NULL);
    CHECK_EQ(unwaited, 2);
    CHECK_CONTAINS(unwaited_text,
                   "nobody waited for 2 handles, the first of all_reduce #2 (sum, i32 x 1): call dtrain_work_wait");
}

static int served;

static dtrain_status ends_at_once(void *user, int worker, const dtrain_server_stats *stats)
{
    (void)user;
    (void)worker;
    (void)stats;
    return DTRAIN_ERR_ABORTED;
}

/* A server that ends while messages of its workers are under way. */
static int ends_the_server(dtrain_comm *world, scene *s)
{
    float x[4] = {1, 2, 3, 4}, grad[4] = {1, 1, 1, 1};
    dtrain_param table = {0};
    dtrain_server_desc desc = {0};
    dtrain_serve_desc serve = {0};
    dtrain_optimizer_desc sgd = {0};
    dtrain_server *server;
    int rank = dtrain_comm_rank(world);
    (void)s;
    table.name = "x";
    table.dtype = DTRAIN_F32;
    table.shape[0] = 4;
    table.data = x;
    table.grad = grad;
    desc.async = 1;
    sgd.kind = DTRAIN_SGD;
    serve.on_update = ends_at_once;
    CHECK_EQ(dtrain_server_create(&server, world, &table, 1, &desc), DTRAIN_OK);
    if (rank == 1)
        CHECK_EQ(dtrain_server_push(server, 1), DTRAIN_OK);
    if (rank == 0) {
        CHECK_EQ(dtrain_optimizer_create(&serve.optimizer, &table, 1, &sgd, NULL), DTRAIN_OK);
        CHECK_EQ(dtrain_server_run(server, &serve), DTRAIN_ERR_ABORTED);
        dtrain_optimizer_destroy(serve.optimizer);
        __atomic_store_n(&served, 1, __ATOMIC_SEQ_CST);
    }
    while (!__atomic_load_n(&served, __ATOMIC_SEQ_CST))
        usleep(1000);
    dtrain_server_destroy(server);
    return 0;
}

TEST(handles_of_the_library_are_none_that_a_program_could_wait_for)
{
    unwaited = 0;
    dtrain_set_log(keep_unwaited, NULL);
    on_threads(3, ends_the_server, NULL);
    dtrain_set_log(NULL, NULL);
    CHECK_EQ(unwaited, 0);
}

/* A constant in the place of another enum's is then an error, and no other choice of its own. */
TEST(constants_of_different_enums_differ)
{
    static const int constants[] = {DTRAIN_LOG_INFO,
                                    DTRAIN_LOG_WARN,
                                    DTRAIN_LOG_ERROR,
                                    DTRAIN_ORDER_ANY,
                                    DTRAIN_ALGORITHM_FUSED,
                                    DTRAIN_ALGORITHM_RECURSIVE_DOUBLING,
                                    DTRAIN_ALGORITHM_TREE,
                                    DTRAIN_ALGORITHM_RING,
                                    DTRAIN_ALGORITHM_HALVING_DOUBLING,
                                    DTRAIN_ALGORITHM_DIRECT,
                                    DTRAIN_ALGORITHM_BRUCK,
                                    DTRAIN_ALGORITHM_NODES,
                                    DTRAIN_ALGORITHM_DOUBLE_TREE,
                                    DTRAIN_CALL_ALL_REDUCE,
                                    DTRAIN_CALL_REDUCE_SCATTER,
                                    DTRAIN_CALL_ALL_GATHER,
                                    DTRAIN_CALL_BROADCAST,
                                    DTRAIN_CALL_REDUCE,
                                    DTRAIN_CALL_GATHER,
                                    DTRAIN_CALL_SCATTER,
                                    DTRAIN_CALL_ALL_TO_ALL,
                                    DTRAIN_CALL_SCAN,
                                    DTRAIN_CALL_EXSCAN,
                                    DTRAIN_CALL_BARRIER,
                                    DTRAIN_CALL_SEND,
                                    DTRAIN_CALL_RECV,
                                    DTRAIN_CALL_EXCHANGE,
                                    DTRAIN_PROGRESS_POLL,
                                    DTRAIN_INDEX_U32,
                                    DTRAIN_INDEX_U16,
                                    DTRAIN_INDEX_DELTA,
                                    DTRAIN_INDEX_NONE,
                                    DTRAIN_EXCHANGE_GATHER,
                                    DTRAIN_EXCHANGE_SPLIT,
                                    DTRAIN_DEVICE_STAGED,
                                    DTRAIN_DEVICE_EVENTS,
                                    DTRAIN_DEVICE_FLAGS,
                                    DTRAIN_DEVICE_HOSTS,
                                    DTRAIN_PIPELINE_GPIPE,
                                    DTRAIN_PIPELINE_1F1B,
                                    DTRAIN_PIPELINE_INTERLEAVED,
                                    DTRAIN_PIPELINE_ZB_H1,
                                    DTRAIN_PART_FORWARD,
                                    DTRAIN_PART_BACKWARD,
                                    DTRAIN_PART_INPUT,
                                    DTRAIN_PART_WEIGHTS,
                                    DTRAIN_FULL_SHARD,
                                    DTRAIN_SHARD_GRAD_OP,
                                    DTRAIN_DDP,
                                    DTRAIN_HYBRID_SHARD,
                                    DTRAIN_MEMORY_DEVICE,
                                    DTRAIN_MEMORY_PINNED,
                                    DTRAIN_BOOL,
                                    DTRAIN_F4,
                                    DTRAIN_F6_E2M3,
                                    DTRAIN_F6_E3M2,
                                    DTRAIN_U8,
                                    DTRAIN_I8,
                                    DTRAIN_F8_E5M2,
                                    DTRAIN_F8_E4M3,
                                    DTRAIN_F8_E8M0,
                                    DTRAIN_F8_E4M3FNUZ,
                                    DTRAIN_F8_E5M2FNUZ,
                                    DTRAIN_I16,
                                    DTRAIN_U16,
                                    DTRAIN_F16,
                                    DTRAIN_BF16,
                                    DTRAIN_I32,
                                    DTRAIN_U32,
                                    DTRAIN_F32,
                                    DTRAIN_C64,
                                    DTRAIN_F64,
                                    DTRAIN_I64,
                                    DTRAIN_U64,
                                    DTRAIN_SUM,
                                    DTRAIN_MEAN,
                                    DTRAIN_PROD,
                                    DTRAIN_MIN,
                                    DTRAIN_MAX,
                                    DTRAIN_AND,
                                    DTRAIN_OR,
                                    DTRAIN_XOR,
                                    DTRAIN_SCHEDULE_LINEAR,
                                    DTRAIN_SCHEDULE_COSINE,
                                    DTRAIN_SGD,
                                    DTRAIN_ADAMW,
                                    DTRAIN_OPTIMIZER_NONE,
                                    DTRAIN_COMPRESS_TOPK,
                                    DTRAIN_COMPRESS_BF16,
                                    DTRAIN_COMPRESS_F16,
                                    DTRAIN_COMPRESS_INT8,
                                    DTRAIN_COMPRESS_FP8,
                                    DTRAIN_COMPRESS_SIGN,
                                    DTRAIN_COMPRESS_POWERSGD,
                                    DTRAIN_COMPRESS_OWN};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        for (size_t j = 0; j < i; j++)
            CHECK(constants[i] != constants[j]);
}
