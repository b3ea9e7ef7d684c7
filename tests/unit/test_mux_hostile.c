/* A user's transport that lies, and peers that send what no dtrain sends: nothing is overwritten, waited for past a
 * deadline, or kept without end. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"

#define MIB ((size_t)1 << 20)

/* Rank 0's end of a transport whose rank 1 is this test: it receives what `next` makes, one frame after the other, and
 * takes all that is sent to it, or nothing. */
typedef struct stranger {
    size_t (*next)(struct stranger *stranger); /* fills frame; 0: nothing comes now */
    unsigned char frame[DTRAIN__MUX_HEADER + 1024];
    size_t at, bytes;
    uint64_t count;
    int deaf, lie, leaves, destroys, calls_after;
} stranger;

static void until(int64_t deadline_ns)
{
    while (dtrain__os_now_ns() < deadline_ns)
        usleep(100);
}

static dtrain_status stranger_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns,
                                   size_t *moved)
{
    stranger *s = (stranger *)self;
    (void)peer, (void)data;
    s->calls_after += s->leaves > 0;
    *moved = s->deaf ? 0 : bytes;
    if (s->deaf)
        until(deadline_ns);
    return s->deaf ? DTRAIN_ERR_TIMEOUT : DTRAIN_OK;
}

static dtrain_status stranger_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    stranger *s = (stranger *)self;
    (void)peer;
    s->calls_after += s->leaves > 0;
    for (*moved = 0; *moved < bytes;) {
        size_t n;
        if (s->at == s->bytes) {
            s->at = 0;
            s->bytes = s->next != NULL ? s->next(s) : 0;
        }
        if (s->at == s->bytes)
            break;
        n = s->bytes - s->at < bytes - *moved ? s->bytes - s->at : bytes - *moved;
        memcpy((char *)data + *moved, s->frame + s->at, n);
        s->at += n;
        *moved += n;
    }
    if (s->lie == 1)
        return DTRAIN_OK; /* whatever has come */
    if (s->lie == 2)
        *moved = bytes + 4096;
    if (*moved < bytes)
        until(deadline_ns);
    return *moved < bytes ? DTRAIN_ERR_TIMEOUT : DTRAIN_OK;
}

static void stranger_leave(void *self, const char *why)
{
    CHECK(why != NULL);
    ((stranger *)self)->leaves++;
}

static void stranger_destroy(void *self)
{
    CHECK_EQ(((stranger *)self)->leaves, 1);
    ((stranger *)self)->destroys++;
}

static dtrain_comm *meet(stranger *s, int64_t timeout_ms)
{
    dtrain_transport table;
    dtrain_comm_desc desc;
    dtrain_comm *world = NULL;
    memset(&table, 0, sizeof table);
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = timeout_ms;
    table.self = s;
    table.size = 2;
    table.send = stranger_send;
    table.recv = stranger_recv;
    table.leave = stranger_leave;
    table.destroy = stranger_destroy;
    CHECK_EQ(dtrain_comm_from_transport(&world, &table, &desc), DTRAIN_OK);
    return world;
}

static size_t frame(stranger *s, uint64_t lane, int kind, size_t bytes)
{
    dtrain__mux_frame(s->frame, lane, kind, s->frame + DTRAIN__MUX_HEADER, bytes);
    s->count++;
    return DTRAIN__MUX_HEADER + bytes;
}

/* ---- transports that lie ---- */

/* A recv that says OK before all has come is asked again, and the call keeps its deadline. */
TEST(ok_that_is_said_too_early_is_no_circle)
{
    stranger s = {0};
    float x = 1;
    int64_t began = dtrain__os_now_ns();
    dtrain_comm *world;
    s.lie = 1;
    world = meet(&s, 200);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_TIMEOUT);
    dtrain_comm_destroy(world);
    CHECK(dtrain__os_now_ns() - began < INT64_C(5000000000));
}

TEST(more_that_has_moved_than_was_to_is_an_error)
{
    stranger s = {0};
    float x = 1;
    dtrain_comm *world;
    s.lie = 2;
    world = meet(&s, 5000);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_INVALID);
    CHECK(strstr(dtrain_last_error(), "rank 1") != NULL);
    dtrain_comm_destroy(world);
}

/* ---- peers that send without end ---- */

static size_t next_empty(stranger *s)
{
    return frame(s, 0, DTRAIN__MUX_DATA, 0);
}

static size_t next_leave(stranger *s)
{
    memset(s->frame + DTRAIN__MUX_HEADER, 0, 8);
    return frame(s, 5, DTRAIN__MUX_FAIL, 8);
}

static size_t next_lane(stranger *s)
{
    return frame(s, 1000 + s->count, DTRAIN__MUX_DATA, 1);
}

static size_t next_wait(stranger *s)
{
    unsigned char *ask = s->frame + DTRAIN__MUX_HEADER;
    dtrain__put_le(ask, 0, 8);
    dtrain__put_le(ask + 8, s->count, 4);
    ask[12] = DTRAIN__STORE_GET;
    dtrain__put_le(ask + 13, 1, 2);
    ask[15] = 'k';
    return frame(s, 0, DTRAIN__MUX_OTHERS + DTRAIN__FRAME_ASK, 16);
}

/* A call ends by its deadline, or before with an error, and little memory is taken. */
static void endless(size_t (*next)(stranger *s), int deaf)
{
    static char value[65536];
    stranger s = {0};
    float x[1000] = {0};
    int64_t began = dtrain__os_now_ns();
    dtrain_comm *world;
    s.deaf = deaf;
    world = meet(&s, 300);
    CHECK_EQ(dtrain_store_set(world, "k", value, sizeof value), DTRAIN_OK);
    s.next = next;
    CHECK(dtrain_recv(world, x, 1000, DTRAIN_F32, 1) != DTRAIN_OK);
    CHECK(dtrain_all_reduce(world, x, x, 1000, DTRAIN_F32, DTRAIN_SUM) != DTRAIN_OK);
    CHECK(dtrain_comm_allocator(world)->peak_bytes < 128 * MIB);
    dtrain_comm_destroy(world);
    CHECK_EQ(s.destroys, 1);
    CHECK(dtrain__os_now_ns() - began < INT64_C(10000000000));
}

TEST(empty_frames_without_end_keep_no_call)
{
    endless(next_empty, 0);
}

TEST(messages_without_end_for_a_group_that_is_not_take_no_memory)
{
    endless(next_leave, 0);
}

TEST(frames_for_groups_without_end_take_no_memory)
{
    endless(next_lane, 0);
}

TEST(requests_of_a_rank_that_takes_no_answers_take_no_memory)
{
    endless(next_wait, 1);
}

/* ---- the table's leave ---- */

/* What is destroyed first is the world, of which the other groups have the transport. */
TEST(leave_is_called_once_by_the_last_group)
{
    stranger s = {0};
    dtrain_transport table;
    dtrain_comm *world, *group;
    memset(&table, 0, sizeof table);
    table.self = &s;
    table.size = 1;
    table.send = stranger_send;
    table.recv = stranger_recv;
    table.leave = stranger_leave;
    table.destroy = stranger_destroy;
    CHECK_EQ(dtrain_comm_from_transport(&world, &table, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    dtrain_comm_destroy(world);
    CHECK_EQ(s.leaves, 0);
    dtrain_comm_destroy(group);
    CHECK_EQ(s.leaves, 1);
    CHECK_EQ(s.destroys, 1);
    CHECK_EQ(s.calls_after, 0);
}
