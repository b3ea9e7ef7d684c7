/* Processes on one GPU that take their host for two: collectives give the CPU's bits, and who is killed, breaks or ends
 * the group in whatever phase is heard of on both. */
#include "hooks.h"

static const char *host_letters = ""; /* a letter for each rank */
uint64_t hook_device_host(int rank)
{
    return (uint64_t)(unsigned char)host_letters[rank];
}

#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "cuda_device.h"
#include "processes.h"

enum { MOST = 70001, VICTIM = 1 };

/* ---- a device that does something at one call of its table ---- */

enum { NOTHING, IS_KILLED, BREAKS, ABORTS };

static dtrain_device_ops ops, real;
static const dtrain_device_ops *own_ops;
static int asked, at_call, what;
static dtrain_comm *all_ranks;
static double begun; /* the calls of a group that breaks */

static dtrain_status asks(const char *name)
{
    if (++asked != at_call)
        return DTRAIN_OK;
    if (what == IS_KILLED)
        kill(getpid(), SIGKILL);
    if (what == ABORTS) {
        DTRAIN_IGNORE(dtrain_comm_abort(all_ranks, "it has had enough"));
        sleep(3);
    }
    return what == BREAKS ? dtrain_error_set(DTRAIN_ERR_IO, "%s breaks", name) : DTRAIN_OK;
}

#define COUNTED(name, parameters, arguments) \
    static dtrain_status counted_##name parameters \
    { \
        dtrain_status status = asks(#name); \
        return status == DTRAIN_OK ? real.name arguments : status; \
    }

COUNTED(copy, (dtrain_device * device, void *to, const void *from, size_t bytes), (device, to, from, bytes))
COUNTED(event_record, (dtrain_device * device, dtrain_device_event *event), (device, event))
COUNTED(event_await, (dtrain_device * device, dtrain_device_event *event), (device, event))
COUNTED(event_done, (dtrain_device * device, dtrain_device_event *event, int *done), (device, event, done))
COUNTED(reduce,
        (dtrain_device * device, dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n,
         void *const *out, int m, size_t begin, size_t count),
        (device, dtype, op, divisor, in, n, out, m, begin, count))

static dtrain_device *device_begin(void)
{
    dtrain_device *device = cuda_device(0);
    if (device == NULL)
        exit(1);
    own_ops = device->ops;
    real = ops = *device->ops;
    ops.copy = counted_copy;
    ops.event_record = counted_event_record;
    ops.event_await = counted_event_await;
    ops.event_done = counted_event_done;
    ops.reduce = counted_reduce;
    device->ops = &ops;
    asked = at_call = 0;
    return device;
}

static void device_finish(dtrain_device *device)
{
    device->ops = own_ops;
    dtrain_cuda_destroy(device);
}

/* ---- results ---- */

typedef struct room {
    float *a, *b; /* of the device */
    float *in, *out, *got;
} room;

static room room_new(dtrain_comm *world, dtrain_device *device)
{
    room r;
    r.a = (float *)device_put(device, NULL, (MOST + 8) * sizeof(float));
    r.b = (float *)device_put(device, NULL, (MOST + 8) * sizeof(float));
    r.in = (float *)calloc(3 * (size_t)MOST, sizeof(float));
    r.out = r.in + MOST;
    r.got = r.out + MOST;
    for (size_t i = 0; i < MOST; i++)
        r.in[i] = dtrain_random_normal((uint64_t)dtrain_comm_rank(world) + 1, i);
    return r;
}

static void room_free(room *r, dtrain_device *device)
{
    device_drop(device, r->a);
    device_drop(device, r->b);
    free(r->in);
}

/* One call beside the CPU's; returns whether the results differ. */
static int differs(dtrain_comm *world, dtrain_device *device, dtrain_device_group *group, room *r, int kind,
                   size_t count, size_t offset, int in_place)
{
    float *from = r->a + offset, *to = in_place ? from : r->b + 3 - offset;
    size_t begin, mine = dtrain_shard(world, count, dtrain_comm_rank(world), &begin), given = count,
                  taken = count;
    int root = dtrain_comm_size(world) - 2;
    CHECK_OK(dtrain_device_copy(device, from, r->in, count * sizeof(float)));
    switch (kind) {
    case 0:
        CHECK_OK(dtrain_device_group_all_reduce(group, from, to, count, DTRAIN_F32, DTRAIN_MEAN));
        CHECK_OK(dtrain_all_reduce(world, r->in, r->out, count, DTRAIN_F32, DTRAIN_MEAN));
        break;
    case 1:
        to = in_place ? from + begin : to;
        taken = mine;
        CHECK_OK(dtrain_device_group_reduce_scatter(group, from, to, count, DTRAIN_F32, DTRAIN_SUM));
        CHECK_OK(dtrain_reduce_scatter(world, r->in, r->out, count, DTRAIN_F32, DTRAIN_SUM));
        break;
    case 2:
        given = begin;
        CHECK_OK(dtrain_device_group_all_gather(group, from + given, to, count, DTRAIN_F32));
        CHECK_OK(dtrain_all_gather(world, r->in + given, r->out, count, DTRAIN_F32));
        break;
    default:
        to = from;
        memcpy(r->out, r->in, count * sizeof(float));
        CHECK_OK(dtrain_device_group_broadcast(group, from, count, DTRAIN_F32, root));
        CHECK_OK(dtrain_broadcast(world, r->out, count, DTRAIN_F32, root));
        break;
    }
    CHECK_OK(dtrain_device_copy(device, r->got, to, taken * sizeof(float)));
    return taken > 0 && memcmp(r->got, r->out, taken * sizeof(float)) != 0;
}

static dtrain_device_mode becomes;

static int gives_the_bits(dtrain_comm *world, scene *s)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 1000, 4097, MOST};
    dtrain_device *device = device_begin();
    dtrain_device_group *group = NULL;
    room r = room_new(world, device);
    (void)s;
    CHECK_OK(dtrain_device_group_create(&group, world, device, NULL));
    CHECK_EQ(dtrain_device_group_mode(group), becomes);
    for (size_t i = 0; i < 8 * sizeof counts / sizeof *counts && group != NULL; i++)
        if (differs(world, device, group, &r, (int)(i % 4), counts[i / 8], i % 3, (int)(i / 4 % 2)))
            TEST_FAIL("%s: rank %d: call %zu of %zu differs", host_letters, dtrain_comm_rank(world), i % 4,
                      counts[i / 8]);
    dtrain_device_group_destroy(group);
    room_free(&r, device);
    device_finish(device);
    return 0;
}

TEST(processes_of_two_hosts_and_more_give_the_cpus_bits)
{
    static const char *const on[] = {"aabb", "aabbcc", "aaaabbbb", "ab", "aab"};
    for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
        scene s;
        host_letters = on[i];
        becomes = i < 3 ? DTRAIN_DEVICE_HOSTS : DTRAIN_DEVICE_STAGED;
        scene_begin(&s, (int)strlen(on[i]), 1);
        run_ranks(&s, gives_the_bits);
    }
}

/* ---- ranks that die, break and abort ---- */

static int when; /* the call of the victim's table, once it has its group */

static dtrain_status calls_until_it_breaks(dtrain_comm *world, dtrain_device *device)
{
    float *x = (float *)device_put(device, NULL, MOST * 4), *y = (float *)device_put(device, NULL, MOST * 4);
    dtrain_device_group *group = NULL;
    char text[512];
    dtrain_status status = dtrain_device_group_create(&group, world, device, NULL);
    CHECK_EQ(status, DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_mode(group), DTRAIN_DEVICE_HOSTS);
    CHECK_OK(dtrain_barrier(world));
    all_ranks = world;
    begun = now_s();
    asked = 0;
    at_call = dtrain_comm_rank(world) == VICTIM ? when : 0;
    for (int i = 0; status == DTRAIN_OK; i++)
        switch (i % 4) {
        case 0: status = dtrain_device_group_all_reduce(group, x, y, MOST, DTRAIN_F32, DTRAIN_SUM); break;
        case 1: status = dtrain_device_group_reduce_scatter(group, x, y, MOST, DTRAIN_F32, DTRAIN_SUM); break;
        case 2: status = dtrain_device_group_all_gather(group, y, x, MOST, DTRAIN_F32); break;
        default: status = dtrain_device_group_broadcast(group, x, MOST, DTRAIN_F32, i / 4 % 4); break;
        }
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    device_drop(device, x);
    device_drop(device, y);
    dtrain_device_group_destroy(group);
    return dtrain_error_set(status, "%s", text);
}

static int one_goes(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_begin();
    dtrain_comm *rest = NULL;
    (void)s;
    dtrain_status status = calls_until_it_breaks(world, device);
    if (now_s() - begun > (what == ABORTS && dtrain_comm_rank(world) <= VICTIM ? 25 : 15)) /* the deadline is 60 */
        TEST_FAIL("rank %d has taken %.1f s: %s", dtrain_comm_rank(world), now_s() - begun, dtrain_last_error());
    CHECK_EQ(status, what == IS_KILLED ? DTRAIN_ERR_PEER_LOST : what == BREAKS ? DTRAIN_ERR_IO : DTRAIN_ERR_ABORTED);
    CHECK_CONTAINS(dtrain_last_error(), "device_group_");
    CHECK_CONTAINS(dtrain_last_error(), what == BREAKS ? "breaks" : what == ABORTS ? "had enough" : "rank 1");
    if (what == IS_KILLED) {
        CHECK_OK(dtrain_comm_shrink(world, &rest));
        host_letters = "aaaa"; /* of ranks of the world */
        becomes = DTRAIN_DEVICE_EVENTS;
        if (rest != NULL)
            gives_the_bits(rest, s);
    }
    dtrain_comm_destroy(rest);
    device_finish(device);
    return 0;
}

static void goes(int how, int first, int last, int step)
{
    dtrain_set_log(quiet, NULL);
    what = how;
    for (when = first; when <= last; when += step) {
        scene s;
        pid_t pids[4];
        int before = test_failures;
        host_letters = "aabb";
        scene_begin(&s, 4, 1);
        for (int rank = 0; rank < 4; rank++)
            pids[rank] = start_rank(&s, rank, one_goes);
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(end_of(pids[rank], 60), how == IS_KILLED && rank == VICTIM ? 128 + SIGKILL : 0);
        if (test_failures != before)
            TEST_FAIL("%d at call %d of the table", how, when);
    }
}

TEST(a_process_killed_in_any_phase_is_lost_to_both_hosts_and_the_rest_goes_on)
{
    goes(IS_KILLED, 1, 45, 2);
}

TEST(a_device_that_breaks_in_any_phase_ends_the_group_on_both_hosts)
{
    goes(BREAKS, 1, 45, 2);
}

TEST(an_abort_of_the_group_ends_whatever_phase_the_others_are_in)
{
    goes(ABORTS, 1, 45, 4);
}
