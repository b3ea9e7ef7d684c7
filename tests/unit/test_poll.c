/* With progress by poll: how many polls a message takes, and how much of the set-up one poll does. */
#define _GNU_SOURCE
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

enum { COUNT = 200000, MANY = 1000000 };

static float numbers[MANY];
static const int64_t long_us = 20000000, brief_us = 100000;

/* Starts a message from rank 0 to rank 1, after one that made what it needs. */
static dtrain_work *start_message(dtrain_comm *world, size_t count)
{
    int rank = dtrain_comm_rank(world);
    dtrain_work *work = NULL;
    float x = 1;
    CHECK_EQ(rank == 0 ? dtrain_send(world, &x, 1, DTRAIN_F32, 1) : dtrain_recv(world, &x, 1, DTRAIN_F32, 0),
             DTRAIN_OK);
    for (size_t i = 0; i < count; i++)
        numbers[i] = rank == 0 ? (float)i : -1;
    CHECK_EQ(rank == 0 ? dtrain_send_async(world, numbers, count, DTRAIN_F32, 1, &work)
                       : dtrain_recv_async(world, numbers, count, DTRAIN_F32, 0, &work),
             DTRAIN_OK);
    return work;
}

static void end_message(dtrain_work *work, size_t count)
{
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK(numbers[1] == 1 && numbers[count - 1] == (float)(count - 1));
}

/* Both poll at the same time. */
static int together(dtrain_comm *world, scene *s)
{
    int polls = 0;
    dtrain_work *work = start_message(world, MANY);
    scene_meet(s->ranks);
    for (; !dtrain_work_done(work); polls++)
        CHECK_EQ(dtrain_comm_poll(world, long_us), DTRAIN_OK);
    CHECK(polls <= 2);
    end_message(work, MANY);
    return 0;
}

static void begin(scene *s, int way)
{
    scene_begin(s, 2, way == TCP);
    s->desc.progress = DTRAIN_PROGRESS_POLL;
}

TEST(a_poll_goes_on_while_its_peer_does)
{
    for (int way = UNIX; way <= TCP; way++) {
        scene s;
        begin(&s, way);
        run_ranks(&s, together);
    }
}

static int *turns; /* shared with the processes */

/* This rank's turn, and the other one's after it. */
static void await_turn(int turn)
{
    while (__atomic_load_n(turns, __ATOMIC_SEQ_CST) < turn)
        usleep(100);
}

static void end_turn(void)
{
    __atomic_add_fetch(turns, 1, __ATOMIC_SEQ_CST);
}

/* They poll in turns, as frames do that never coincide. */
static int in_turns(dtrain_comm *world, scene *s)
{
    dtrain_work *work = start_message(world, COUNT);
    int rank = dtrain_comm_rank(world), done = 0, needed = 0;
    (void)s;
    for (int frame = 0; frame < 30; frame++) {
        await_turn(2 * frame + rank);
        needed += !done;
        if (!done)
            CHECK_EQ(dtrain_comm_poll(world, brief_us), DTRAIN_OK);
        done = dtrain_work_done(work);
        end_turn();
    }
    CHECK(needed <= 2);
    end_message(work, COUNT);
    return 0;
}

static void take_turns(rank_body body)
{
    scene s;
    begin(&s, UNIX);
    turns = (int *)mmap(NULL, sizeof *turns, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    run_ranks(&s, body);
    munmap(turns, sizeof *turns);
}

TEST(a_message_of_800_kB_through_shared_memory_needs_one_poll_of_each_rank)
{
    take_turns(in_turns);
}

/* The bytes of memory in files without a name that this process has open. */
static int64_t nameless_bytes(void)
{
    int64_t bytes = 0;
    for (int fd = 0; fd < 100; fd++) {
        struct stat what;
        if (fstat(fd, &what) == 0 && S_ISREG(what.st_mode) && what.st_nlink == 0)
            bytes += (int64_t)what.st_blocks * 512;
    }
    return bytes;
}

/* Polls without a budget until the work has ended, and looks how much shared memory one of them makes. */
static void set_up(dtrain_comm *world, dtrain_work *work, int64_t *most)
{
    for (int64_t before = nameless_bytes(), now; !dtrain_work_done(work); before = now) {
        CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK);
        now = nameless_bytes();
        *most = now - before > *most ? now - before : *most;
    }
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
}

/* The first collective of the world, and of a group made from it. */
static int first_collectives(dtrain_comm *world, scene *s)
{
    (void)s;
    dtrain_comm *group = NULL;
    int64_t most = 0;
    float x = 1;
    for (int made = 0; made < 2; made++) {
        dtrain_work *work = NULL;
        CHECK_EQ(dtrain_all_reduce_async(made ? group : world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        set_up(made ? group : world, work, &most);
        if (!made)
            CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_OK);
    }
    CHECK(x == 4);
    CHECK(most <= 655360); /* parts of the connection's rings, 2 MiB, and of the group's posts, 2 MiB */
    dtrain_comm_destroy(group);
    return 0;
}

/* The first messages between all ranks. */
static int first_messages(dtrain_comm *world, scene *s)
{
    dtrain_work *works[2 * 4];
    int64_t most = 0;
    float out = 1, in[5];
    int count = 0;
    for (int peer = 0; peer < s->ranks; peer++) {
        if (peer == dtrain_comm_rank(world))
            continue;
        CHECK_EQ(dtrain_send_async(world, &out, 1, DTRAIN_F32, peer, &works[count]), DTRAIN_OK);
        CHECK_EQ(dtrain_recv_async(world, &in[peer], 1, DTRAIN_F32, peer, &works[count + 1]), DTRAIN_OK);
        count += 2;
    }
    for (int i = 0; i < count; i++)
        set_up(world, works[i], &most);
    CHECK(most <= 655360); /* parts of the rings of one connection, which are 2 MiB */
    return 0;
}

TEST(a_poll_makes_a_small_part_of_the_shared_memory)
{
    scene s;
    if (!dtrain__os_shows_files()) {
        printf("skipped: this system does not show the files of a process\n");
        return;
    }
    begin(&s, UNIX);
    run_ranks(&s, first_collectives);
    begin(&s, UNIX);
    s.ranks = 5;
    run_ranks(&s, first_messages);
}
