/* Memory that two processes share in place of a connection: which pairs of ranks take it, streams through it, sleep and
 * wake, ends, offers that lie, and counters that cannot be. Collectives, faults and kills over it are in the tests of
 * sockets, whose ranks share memory too. */
#define _GNU_SOURCE
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include <sched.h>
#include <sys/mount.h>

/* Both ends of a connection with memory, in one process or to be taken apart by fork. page NULL: the system has none.
 */
typedef struct pair {
    dtrain__stream ends[2];
} pair;

static int open_pair_to_fork(pair *p)
{
    unsigned char offer[DTRAIN__SHM_OFFER_BYTES];
    dtrain__shm_page *pages[2];
    size_t ring = 0;
    int fds[2], fd;
    memset(p, 0, sizeof *p);
    dtrain__shm_offer(offer, DTRAIN__RING_BYTES, &pages[0], &fd);
    if (pages[0] == NULL) {
        printf("skipped: this system has no memory that processes can share\n");
        return 0;
    }
    pages[1] = dtrain__shm_open(offer, &ring);
    CHECK(pages[1] != NULL && pages[1] != pages[0]);
    dtrain__os_share_close(fd);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    for (int side = 0; side < 2; side++) {
        CHECK_EQ(fcntl(fds[side], F_SETFL, O_NONBLOCK), 0);
        p->ends[side].fd = fds[side];
        p->ends[side].shm.page = pages[side];
        p->ends[side].shm.ring_bytes = DTRAIN__RING_BYTES;
        p->ends[side].shm.side = side;
    }
    return pages[1] != NULL;
}

/* Has this process close the descriptors: those of a parent are closed in a forked child. */
static int own_pair(pair *p)
{
    for (int side = 0; side < 2; side++)
        dtrain__os_own(p->ends[side].fd);
    return 1;
}

static int open_pair(pair *p)
{
    return open_pair_to_fork(p) && own_pair(p);
}

static void close_pair(pair *p)
{
    dtrain__stream_cut(&p->ends[0]);
    dtrain__stream_cut(&p->ends[1]);
}

/* Waits in poll() as the library does. */
static void wait_for(dtrain__stream *stream, int sending)
{
    int events;
    if (dtrain__stream_arm(stream, sending, &events))
        return;
    struct pollfd fd = {stream->fd, (short)events, 0};
    CHECK_EQ(poll(&fd, 1, 20000), 1);
}

enum { TOTAL = 3000000 };

static unsigned char byte_at(size_t i)
{
    return (unsigned char)(i * 2654435761u >> 13);
}

/* Sends TOTAL bytes in pieces of 1 to 100,000; pauses at some, so that the other side sleeps. */
static void *send_all(void *pointer)
{
    dtrain__stream *stream = (dtrain__stream *)pointer;
    static __thread unsigned char data[100000];
    for (size_t sent = 0, turn = 0; sent < TOTAL; turn++) {
        size_t n = 1 + (size_t)(dtrain_random_u64(1, turn) % (turn % 3 == 0 ? 100000 : 300));
        n = n < TOTAL - sent ? n : TOTAL - sent;
        for (size_t i = 0; i < n; i++)
            data[i] = byte_at(sent + i);
        ssize_t done = dtrain__stream_send(stream, data, n, 0);
        CHECK(done >= 0);
        if (done < 0)
            break;
        if (done == 0)
            wait_for(stream, 1);
        sent += (size_t)done;
        if (turn % 50 == 0)
            usleep(500);
    }
    return NULL;
}

static size_t receive_all(dtrain__stream *stream)
{
    static unsigned char data[70000];
    size_t got = 0, wrong = 0;
    for (size_t turn = 0; got < TOTAL; turn++) {
        size_t n = 1 + (size_t)(dtrain_random_u64(2, turn) % sizeof data);
        ssize_t done = dtrain__stream_recv(stream, data, n);
        if (done < 0)
            break;
        for (size_t i = 0; i < (size_t)done; i++)
            wrong += data[i] != byte_at(got + i);
        if (done == 0)
            wait_for(stream, 0);
        got += (size_t)done;
        if (turn % 60 == 0)
            usleep(500);
    }
    CHECK_EQ(wrong, 0);
    return got;
}

TEST(a_stream_arrives_whole_whoever_sleeps)
{
    pair p;
    pthread_t sender;
    for (int side = 0; side < 2 && open_pair(&p); side++) {
        CHECK_EQ(pthread_create(&sender, NULL, send_all, &p.ends[side]), 0);
        CHECK_EQ(receive_all(&p.ends[1 - side]), TOTAL);
        pthread_join(sender, NULL);
        CHECK_EQ(p.ends[side].sent, TOTAL);
        CHECK_EQ(p.ends[1 - side].received, TOTAL);
        close_pair(&p);
    }
}

TEST(what_was_sent_before_the_end_is_received_and_then_the_end)
{
    pair p;
    unsigned char data[100] = {7}, got[200];
    if (!open_pair(&p))
        return;
    CHECK_EQ(dtrain__stream_recv(&p.ends[1], got, 10), 0);
    CHECK_EQ(dtrain__stream_send(&p.ends[0], data, 100, 0), 100);
    dtrain__stream_end(&p.ends[0]);
    dtrain__stream_cut(&p.ends[0]);
    wait_for(&p.ends[1], 0);
    CHECK_EQ(dtrain__stream_recv(&p.ends[1], got, 60), 60);
    CHECK_EQ(dtrain__stream_recv(&p.ends[1], got, 60), 40);
    CHECK_EQ(dtrain__stream_recv(&p.ends[1], got, 60), -1);
    CHECK_EQ(errno, 0);
    CHECK_EQ(dtrain__stream_recv(&p.ends[1], got, 60), -1);
    close_pair(&p);
}

/* A process is killed at any moment while it stores into the memory. The other end takes what was published, in order,
 * and then finds the end. */
TEST(a_process_that_is_killed_in_a_store_leaves_an_end_and_no_lock)
{
    for (int round = 0; round < 20; round++) {
        pair p;
        if (!open_pair_to_fork(&p))
            return;
        fflush(stdout);
        pid_t child = fork();
        own_pair(&p);
        if (child == 0) {
            dtrain__stream_cut(&p.ends[1]);
            for (;;)
                send_all(&p.ends[0]);
        }
        dtrain__stream_cut(&p.ends[0]);
        usleep((useconds_t)(dtrain_random_u64(3, (uint64_t)round) % 3000));
        kill(child, SIGKILL);
        CHECK(receive_all(&p.ends[1]) <= TOTAL);
        waitpid(child, NULL, 0);
        close_pair(&p);
    }
}

TEST(counters_that_cannot_be_are_a_corrupt_connection)
{
    static const uint64_t bad[] = {DTRAIN__RING_BYTES + 1, (uint64_t)1 << 40, (uint64_t)1 << 63};
    unsigned char data[100] = {1};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        pair p;
        if (!open_pair(&p))
            return;
        dtrain__shm_page *page = p.ends[0].shm.page;
        page->ways[1].written = bad[i]; /* what side 1 says of its own ring, and of side 0's */
        CHECK_EQ(dtrain__stream_recv(&p.ends[0], data, 100), -1);
        CHECK_EQ(errno, ERANGE);
        page->ways[0].read = bad[i];
        CHECK_EQ(dtrain__stream_send(&p.ends[0], data, 100, 0), -1);
        CHECK_EQ(errno, ERANGE);
        close_pair(&p);
    }
}

TEST(an_offer_that_lies_is_not_taken)
{
    unsigned char offer[DTRAIN__SHM_OFFER_BYTES], other[DTRAIN__SHM_OFFER_BYTES];
    dtrain__shm_page *page, *opened;
    size_t ring = 0;
    int fd;
    memset(offer, 0, sizeof offer);
    CHECK(dtrain__shm_open(offer, &ring) == NULL);
    memset(offer, 255, sizeof offer);
    CHECK(dtrain__shm_open(offer, &ring) == NULL);
    dtrain__shm_offer(offer, DTRAIN__RING_BYTES, &page, &fd);
    if (page == NULL)
        return;
    memcpy(other, offer, sizeof other);
    other[31] ^= 1; /* the key */
    CHECK(dtrain__shm_open(other, &ring) == NULL);
    memcpy(other, offer, sizeof other);
    dtrain__put_le(other + 8, fd == 0, 4); /* standard input, or another segment */
    CHECK(dtrain__shm_open(other, &ring) == NULL);
    dtrain__put_le(other + 8, 9999, 4);
    CHECK(dtrain__shm_open(other, &ring) == NULL);
    memcpy(other, offer, sizeof other);
    dtrain__put_le(other, 1, 8); /* another process */
    CHECK(dtrain__shm_open(other, &ring) == NULL);
    memcpy(other, offer, sizeof other);
    dtrain__put_le(other + 12, 2 * DTRAIN__RING_BYTES, 4); /* larger rings than there are */
    CHECK(dtrain__shm_open(other, &ring) == NULL);
    dtrain__put_le(other + 12, DTRAIN__RING_BYTES + 1, 4);
    CHECK(dtrain__shm_open(other, &ring) == NULL);
    opened = dtrain__shm_open(offer, &ring);
    CHECK(opened != NULL);
    dtrain__shm_close(&opened, ring);
    dtrain__os_share_close(fd);
    CHECK(dtrain__shm_open(offer, &ring) == NULL); /* the offer has ended */
    dtrain__shm_close(&page, DTRAIN__RING_BYTES);
}

/* ---- which ranks share memory ---- */

typedef struct expectation {
    int shared;
    const char *way; /* as the trace says it */
} expectation;

static int shares(dtrain_comm *world, scene *s)
{
    const expectation *expected = (const expectation *)s->user;
    int shared = 0;
    float x = (float)dtrain_comm_rank(world);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(x == 3);
    for (int peer = 0; peer < 3; peer++) {
        char way[160] = "";
        shared += CHANNEL(world)->peers[peer].lanes[0].stream.shm.page != NULL;
        if (peer != dtrain_comm_rank(world))
            world->plane->way(world->transport.self, peer, way, sizeof way);
        if (way[0] != 0)
            CHECK_CONTAINS(way, expected->way);
    }
    CHECK((shared > 0) == expected->shared);
    CHECK((world->shared != NULL) == expected->shared);
    if (dtrain_comm_rank(world) == 0) {
        char path[] = "/tmp/dtrain-test-ways-XXXXXX", text[16384] = "";
        int fd = mkstemp(path);
        CHECK_EQ(dtrain_comm_trace(world, path), DTRAIN_OK);
        close(fd);
        fd = open(path, O_RDONLY);
        CHECK(read(fd, text, sizeof text - 1) > 0);
        CHECK_CONTAINS(text, expected->way);
        CHECK_CONTAINS(text, "\"peer\":1");
        close(fd);
        unlink(path);
    }
    return 0;
}

static void meet(const char *transport, const char *without, int tcp, int secure, const char *why)
{
    expectation expected = {why == NULL, why != NULL ? why : "shared memory"};
    scene s;
    scene_begin(&s, 3, tcp);
    s.transport = transport != NULL ? transport : "";
    s.desc.secure = secure;
    s.desc.token = "a token of this test's";
    if (expected.shared && dtrain__without("shm")) {
        expected.shared = 0;
        expected.way = "DTRAIN_WITHOUT names shm";
    }
    s.user = &expected;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) { /* what is left out is read once a process */
        int before = test_failures;
        if (without[0] != 0) {
            const char *environment = getenv("DTRAIN_WITHOUT");
            char both[200];
            snprintf(both, sizeof both, "%s,%s", environment != NULL ? environment : without, without);
            setenv("DTRAIN_WITHOUT", both, 1);
            __atomic_store_n(&dtrain__os_without_mask, 0u, __ATOMIC_RELAXED);
        }
        run_ranks(&s, shares);
        _exit(test_failures != before);
    }
    CHECK_EQ(end_of(child, 60), 0);
}

TEST(ranks_of_a_host_share_memory_unless_told_not_to)
{
#ifdef __linux__
    const char *none = NULL;
#else
    const char *none = "or has none to share";
#endif
    meet(NULL, "", 0, 0, none);
    meet(NULL, "", 1, 0, none);
    meet("shm", "", 1, 0, none);
    meet("shm", "", 1, -1, none);
    meet(NULL, "shm", 0, 0, "no shared memory: DTRAIN_WITHOUT names shm");
    meet(NULL, "memfd", 0, 0, none);
    meet(NULL, "proc", 0, 0, none);
    meet("shm", "proc,futex", 1, 0, none);
    meet("tcp", "", 1, 0, "TCP, no shared memory: the chosen transport asks for none");
    if (scene_has_unix())
        meet("unix", "", 1, 0, "unix socket, no shared memory: the chosen transport asks for none");
    meet(NULL, "", 1, 1, "no shared memory: the connection is sealed");
}

/* ---- bounce buffers ---- */

/* What the ranks' inputs sum up to in element i. */
static float sum_at(size_t i, int ranks)
{
    return (float)(ranks * (int)(i % 1000) + ranks * (ranks - 1) / 2);
}

/* Each of the calls fills bounce buffers by one way of copying: as it finds, by ordinary stores, by streaming stores.
 */
static int bounces(dtrain_comm *world, scene *s)
{
    enum { COUNT = 100001 }; /* so that fewer copies are made in a call than would have one timed */
    int rank = dtrain_comm_rank(world), bad = 0;
    float *in = (float *)malloc((COUNT + 1) * sizeof(float)), *out = (float *)malloc((COUNT + 1) * sizeof(float));
    size_t begin, part = dtrain_shard(world, COUNT, rank, &begin);
    in++, out++; /* aligned to nothing but their elements */
    for (size_t i = 0; i < COUNT; i++)
        in[i] = (float)(i % 1000) + (float)rank;
    for (int way = 0; way < 3; way++)
        for (int call = 0; call < 6; call++) {
            size_t from = 0, to = COUNT, at = 0;
            dtrain_status status = DTRAIN_OK;
            memset(out, 0, COUNT * sizeof(float));
            world->copies = DTRAIN__BOUNCE_TIMED / 2 + (way > 0); /* the next copy is timed, or one much later */
            world->streams = way == 2;
            switch (call) {
            case 0: status = dtrain_all_reduce(world, in, out, COUNT, DTRAIN_F32, DTRAIN_SUM); break;
            case 1:
                memcpy(out, in, COUNT * sizeof(float));
                status = dtrain_all_reduce(world, out, out, COUNT, DTRAIN_F32, DTRAIN_SUM);
                break;
            case 2:
                status = dtrain_reduce(world, in, rank == 1 ? out : NULL, COUNT, DTRAIN_F32, DTRAIN_SUM, 1);
                to = rank == 1 ? COUNT : 0;
                break;
            case 3:
                status = dtrain_reduce_scatter(world, in, out, COUNT, DTRAIN_F32, DTRAIN_SUM);
                from = at = begin, to = begin + part;
                break;
            case 4:
                for (size_t i = begin; i < begin + part; i++)
                    out[i] = sum_at(i, s->ranks);
                status = dtrain_all_gather(world, out + begin, out, COUNT, DTRAIN_F32);
                break;
            default:
                for (size_t i = 0; rank == 2 && i < COUNT; i++)
                    out[i] = sum_at(i, s->ranks);
                status = dtrain_broadcast(world, out, COUNT, DTRAIN_F32, 2);
            }
            CHECK_EQ(status, DTRAIN_OK);
            for (size_t i = from; i < to; i++)
                bad += out[i - at] != sum_at(i, s->ranks);
            if (bad > 0)
                TEST_FAIL("rank %d, call %d, way %d: %d elements are wrong", rank, call, way, bad);
            if (way > 0)
                CHECK_EQ(world->streams, way == 2);
            if (call == 0)
                CHECK(world->shared == NULL || world->copies > DTRAIN__BOUNCE_TIMED / 2 + (way > 0));
        }
    free(in - 1);
    free(out - 1);
    return 0;
}

TEST(bounce_buffers_are_the_same_by_either_kind_of_store)
{
    for (int ranks = 3; ranks <= 5; ranks += 2) {
        scene s;
        scene_begin(&s, ranks, 0);
        run_ranks(&s, bounces);
    }
}

/* ---- posts in memory that all ranks share ---- */

static int posts(const dtrain_comm *world)
{
    if (world->shared == NULL)
        printf("skipped: ranks share no memory here\n");
    return world->shared != NULL;
}

static int shares_nothing(dtrain_comm *world, scene *s)
{
    float x = 1;
    (void)s;
    for (int turn = 0; turn < 3; turn++, x /= 3) {
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK(x == 3);
    }
    CHECK(world->shared == NULL && CHANNEL(world)->arena == NULL);
    return 0;
}

TEST(one_rank_that_cannot_share_makes_all_send_messages)
{
    for (int rank = 0; rank < 3; rank++) {
        scene s;
        pid_t pids[3];
        scene_begin(&s, 3, 0);
        for (int r = 0; r < 3; r++) {
            if (r == rank) {
                setenv("DTRAIN_WITHOUT", "shm", 1);
                __atomic_store_n(&dtrain__os_without_mask, 0u, __ATOMIC_RELAXED);
            }
            pids[r] = start_rank(&s, r, shares_nothing);
            if (r == rank) {
                unsetenv("DTRAIN_WITHOUT");
                __atomic_store_n(&dtrain__os_without_mask, 0u, __ATOMIC_RELAXED);
            }
        }
        for (int r = 0; r < 3; r++)
            CHECK_EQ(end_of(pids[r], 30), 0);
    }
}

/* Ranks come late by turns, so that each of them sleeps and is woken: a caller, the service thread, and a caller that
 * polls. */
static int comes_late(dtrain_comm *world, scene *s)
{
    static float x[6001], y[6001];
    int rank = dtrain_comm_rank(world);
    (void)s;
    for (uint64_t turn = 0; turn < 200; turn++) {
        size_t n = 1 + (size_t)(dtrain_random_u64(turn, 1) % (turn % 3 == 0 ? 5999 : 19));
        dtrain_work *work = NULL;
        for (size_t i = 0; i < n; i++)
            x[i] = y[i] = (float)(rank + 1);
        if (dtrain_random_u64(turn, 2) % 3 == (uint64_t)rank)
            usleep((useconds_t)(dtrain_random_u64(turn, 3) % 3000));
        CHECK_EQ(dtrain_all_reduce_async(world, y, y, n, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        while (turn % 4 == 0 && !dtrain_work_done(work)) {
            if (world->desc.progress == DTRAIN_PROGRESS_POLL)
                CHECK_EQ(dtrain_comm_poll(world, 100), DTRAIN_OK);
            usleep(100);
        }
        if (turn % 2 == 0)
            CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        CHECK_EQ(dtrain_all_reduce(world, x, x, n, DTRAIN_F32, DTRAIN_MAX), DTRAIN_OK);
        if (turn % 2 == 1)
            CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        CHECK(x[0] == 3 && x[n - 1] == 3 && y[0] == 6 && y[n - 1] == 6);
        if (turn % 10 == 0)
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        CHECK_EQ(dtrain_broadcast(world, x, n, DTRAIN_F32, (int)(turn % 3)), DTRAIN_OK);
    }
    return 0;
}

TEST(ranks_that_come_late_are_waited_for_and_wake_the_others)
{
    for (int polls = 0; polls < 2; polls++) {
        scene s;
        scene_begin(&s, 3, 0);
        s.desc.progress = polls ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        run_ranks(&s, comes_late);
    }
}

#ifdef __linux__
static int has_a_deadline(dtrain_comm *world, scene *s)
{
    float x = 1;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (posts(world) && dtrain_comm_rank(world) == 0) {
        double begin = now_s();
        world->desc.timeout_ms = 300;
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_TIMEOUT);
        CHECK_WITHIN(now_s() - begin, 2);
    }
    scene_meet(s->ranks);
    return 0;
}

/* Two ranks and eight busy programs share one processor: each sched_yield() may take as long as all of these run. */
TEST(a_deadline_holds_beside_programs_that_keep_the_processor_busy)
{
    cpu_set_t all, one;
    pid_t busy[8];
    size_t first = 0;
    scene s;
    CHECK_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    for (int i = 0; i < 8; i++)
        if ((busy[i] = fork()) == 0)
            for (;;)
                dtrain__os_pause();
    for (int way = UNIX; way <= OWN_HOST; way += OWN_HOST) {
        scene_begin_by(&s, 2, way);
        run_ranks(&s, has_a_deadline);
    }
    for (int i = 0; i < 8; i++) {
        kill(busy[i], SIGKILL);
        waitpid(busy[i], NULL, 0);
    }
    CHECK_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}
#endif

/* Rank 0 hears that rank 1 has left, and takes its post back because rank 2 has not posted. Before it can, rank 2 posts
 * as well. Rank 1 left a post behind, so the others end the call, and rank 0 must, too. */
static int hears_of_a_leaver(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    float x = 1;
    dtrain_work *work = NULL;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (!posts(world))
        return 0;
    dtrain__slot *slots = world->shared->slots;
    uint64_t next = world->turn + 1, *first = &slots[0].posts[next & 1].arrived;
    scene_meet(s->ranks); /* the barrier has ended everywhere */
    if (rank == 0) {
        __atomic_store_n(&slots[0].withdrawn, 1u, __ATOMIC_SEQ_CST); /* somebody is at it */
        dtrain__seat_skipped(world->seat, 1, world->number);
    }
    scene_meet(s->ranks);
    while (rank == 2 && __atomic_load_n(first, __ATOMIC_SEQ_CST) != 2 * next)
        usleep(100);
    usleep(rank == 2 ? 100000 : 0);
    CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
    while (rank == 2 && __atomic_load_n(&slots[2].posts[next & 1].arrived, __ATOMIC_SEQ_CST) != 2 * next)
        usleep(100);
    if (rank == 2)
        __atomic_store_n(&slots[0].withdrawn, 2u, __ATOMIC_SEQ_CST);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    CHECK(x == 3);
    return 0;
}

TEST(a_post_that_cannot_be_taken_back_any_more_ends_as_with_the_others)
{
    for (int way = UNIX; way <= OWN_HOST; way += OWN_HOST) {
        scene s;
        scene_begin_by(&s, 3, way);
        run_ranks(&s, hears_of_a_leaver);
    }
}

/* What rank 1 does to the memory before it is killed or stopped. */
typedef enum misdeed { DIES, HOLDS_AND_DIES, HOLDS_AND_STOPS, LIES } misdeed;

static int suffers_rank_1(dtrain_comm *world, scene *s)
{
    misdeed what = *(const misdeed *)s->user;
    float x[2] = {1, 1};
    double begin = now_s();
    dtrain_status status = DTRAIN_OK;
    CHECK_EQ(dtrain_all_reduce(world, x, x, 2, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    if (!posts(world))
        return 0;
    if (dtrain_comm_rank(world) == 1) {
        usleep(100000); /* the others have ended the call */
        if (what == HOLDS_AND_DIES || what == HOLDS_AND_STOPS)
            __atomic_store_n(&world->shared->slots[0].withdrawn, 7u, __ATOMIC_SEQ_CST);
        if (what == LIES) {
            memset(world->shared->slots[1].posts, 0xff, sizeof world->shared->slots[1].posts);
            memset(world->shared->bounce, 0xff, 6 * world->shared->bounce_stride);
            __atomic_store_n(&world->shared->slots[1].put, UINT64_MAX, __ATOMIC_SEQ_CST);
            __atomic_store_n(&world->shared->slots[1].taken, UINT64_MAX, __ATOMIC_SEQ_CST);
            __atomic_store_n(&world->shared->slots[1].finished, UINT64_MAX, __ATOMIC_SEQ_CST);
            uint64_t next = world->turn + 1;
            __atomic_store_n(&world->shared->slots[1].posts[next & 1].arrived, 2 * next, __ATOMIC_SEQ_CST);
            usleep(300000);
        }
        kill(getpid(), what == HOLDS_AND_STOPS ? SIGSTOP : SIGKILL);
        _exit(0);
    }
    while (status == DTRAIN_OK && now_s() - begin < 20)
        status = dtrain_all_reduce(world, x, x, 1, DTRAIN_F32, DTRAIN_MAX);
    CHECK_WITHIN(now_s() - begin, 15);
    if (what == LIES) {
        CHECK_EQ(status, DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(dtrain_last_error(), ": rank 1 is in a group of 18446744073709551615 ranks");
    } else if (what == HOLDS_AND_STOPS) {
        CHECK(status == DTRAIN_ERR_TIMEOUT || status == DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "the group is broken");
    } else {
        CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(dtrain_last_error(), "rank 1");
    }
    return 0;
}

TEST(a_rank_that_dies_stops_or_lies_ends_the_others_calls)
{
    static misdeed what;
    for (what = DIES; what <= LIES; what++) {
        scene s;
        pid_t pids[3];
        scene_begin(&s, 3, 0);
        s.user = &what;
        s.desc.timeout_ms = what == HOLDS_AND_STOPS ? 500 : 10000;
        dtrain_set_log(quiet, NULL);
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, suffers_rank_1);
        CHECK_EQ(end_of(pids[0], 30), 0);
        CHECK_EQ(end_of(pids[2], 30), 0);
        kill(pids[1], SIGKILL);
        kill(pids[1], SIGCONT);
        end_of(pids[1], 10);
        dtrain_set_log(NULL, NULL);
    }
}

/* Memory that its maker could shorten, or that has no pages yet, would kill the process that maps it. */
TEST(memory_that_could_end_this_process_is_not_mapped)
{
    size_t bytes = (size_t)1 << 20;
    int fd, own;
    void *memory = dtrain__os_shows_files() ? dtrain__os_share(bytes, &own) : NULL;
    if (memory == NULL || (fd = dtrain__os_memfd()) < 0) {
        printf("skipped: this system has no memory that processes can share, or none that can be sealed\n");
        return;
    }
    void *again = dtrain__os_share_open(getpid(), own, bytes, 1);
    CHECK(again != NULL);
    CHECK(ftruncate(own, 10) != 0);
    dtrain__os_unreserve(again, bytes);
    dtrain__os_unreserve(memory, bytes);
    CHECK_EQ(posix_fallocate(fd, 0, (off_t)bytes), 0);
    CHECK(dtrain__os_share_open(getpid(), fd, bytes, 1) == NULL); /* not sealed */
    CHECK_EQ(ftruncate(fd, 0), 0);
    CHECK_EQ(ftruncate(fd, (off_t)bytes), 0);
    CHECK_EQ(fcntl(fd, 1033, DTRAIN__OS_SEALS), 0);
    CHECK(dtrain__os_share_open(getpid(), fd, bytes, 1) == NULL); /* sealed, but without pages */
    close(fd);
    close(own);
}

/* ---- memory with a name, where processes do not find each other's files ---- */

static void leave_out(const char *what)
{
    setenv("DTRAIN_WITHOUT", what, 1);
    __atomic_store_n(&dtrain__os_without_mask, 0u, __ATOMIC_RELAXED);
}

TEST(a_segment_is_of_its_maker_and_ends_with_its_name)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        size_t bytes = 5000;
        int number, other, before = test_failures;
        leave_out("proc");
        char *memory = (char *)dtrain__os_share(bytes, &number);
        char *second = (char *)dtrain__os_share(bytes, &other);
        CHECK(memory != NULL && second != NULL && number >= 0 && other >= 0 && number != other);
        char *again = (char *)dtrain__os_share_open(getpid(), number, bytes, 1);
        CHECK(again != NULL && again != memory);
        strcpy(memory + bytes - 6, "hello");
        CHECK(strcmp(again + bytes - 6, "hello") == 0);
        dtrain__os_segment_sweep(number); /* its maker lives */
        CHECK(dtrain__os_share_open(getppid(), number, bytes, 1) == NULL);
        CHECK(dtrain__os_share_open(getpid(), number, 5 * bytes, 1) == NULL);
        CHECK(dtrain__os_share_open(getpid(), 9999, bytes, 1) == NULL);
        dtrain__os_share_close(number);
        dtrain__os_share_close(other);
        CHECK(dtrain__os_share_open(getpid(), number, bytes, 1) == NULL);
        dtrain__os_unreserve(memory, bytes);
        CHECK(strcmp(again + bytes - 6, "hello") == 0); /* memory lasts as long as its last mapping */
        _exit(test_failures != before);
    }
    CHECK_EQ(end_of(child, 10), 0);
}

TEST(the_name_of_a_dead_maker_is_removed)
{
    int ends[2], number = -1;
    CHECK_EQ(pipe(ends), 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        leave_out("proc");
        int good = dtrain__os_share(100, &number) != NULL && write(ends[1], &number, sizeof number) > 0;
        _exit(!good);
    }
    CHECK_EQ(end_of(child, 10), 0);
    CHECK_EQ(read(ends[0], &number, sizeof number), (ssize_t)sizeof number);
    size_t end = dtrain__os_segment_end(100);
    int fd = dtrain__os_segment(number, O_RDWR);
    CHECK(fd >= 0 && dtrain__os_segment_maker(fd, end, 0) == (uint64_t)child);
    dtrain__os_segment_sweep(number);
    int now = dtrain__os_segment(number, O_RDWR);
    CHECK(now < 0 || dtrain__os_segment_maker(now, end, 0) != (uint64_t)child);
    close(fd);
    close(ends[0]);
    close(ends[1]);
    if (now >= 0)
        close(now);
}

/* Its maker died before it wrote who it is. */
TEST(a_segment_without_a_maker_is_removed_when_it_is_old)
{
    struct timespec old[2] = {{1000000000, 0}, {1000000000, 0}};
    int number = DTRAIN__OS_SEGMENTS - 1; /* names are taken from 0 on */
    for (int whole = 0; whole < 2; whole++) {
        int fd = dtrain__os_segment(number, O_RDWR | O_CREAT | O_EXCL);
        CHECK(fd >= 0);
        if (whole)
            CHECK_EQ(dtrain__os_segment_grow(fd, 3 * dtrain__os_page_bytes()), 0);
        dtrain__os_segment_sweep(number);
        int again = dtrain__os_segment(number, O_RDWR);
        CHECK(again >= 0); /* it is being made */
        CHECK_EQ(futimens(fd, old), 0);
        dtrain__os_segment_sweep(number);
        CHECK(dtrain__os_segment(number, O_RDWR) < 0);
        dtrain__os_segment(number, 0);
        close(again);
        close(fd);
    }
}

TEST(a_limit_on_the_size_of_files_is_no_signal)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit most = {65536, 65536};
        int fd, bad = setrlimit(RLIMIT_FSIZE, &most) != 0;
        bad |= dtrain__os_share((size_t)1 << 20, &fd) != NULL || fd >= 0;
        _exit(bad);
    }
    CHECK_EQ(end_of(child, 10), 0);
}

static int writes(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    int good = file != NULL && fputs(text, file) >= 0;
    return file != NULL && fclose(file) == 0 && good;
}

/* A control group of 2 GiB that is full, of which 1 GiB, 4 MiB and 1 KiB are files and caches that it can drop. */
/* Before Linux 6.4 a signal that this thread takes ends the call, and what it had allocated is undone. */
static _Thread_local volatile sig_atomic_t taken;
static int old_kernel, undone;

static void take(int signal)
{
    (void)signal;
    taken++;
}

int posix_fallocate(int fd, off_t at, off_t bytes)
{
    const struct timespec ms = {0, 1000000};
    sig_atomic_t before = taken;
    if (old_kernel)
        nanosleep(&ms, NULL); /* as long as a call takes */
    if (taken != before && ++undone < 1000)
        return EINTR;
    return fallocate(fd, 0, at, bytes) == 0 ? 0 : errno;
}

static pthread_t timed;
static int timer_ends;

static void *timer(void *unused)
{
    while (!__atomic_load_n(&timer_ends, __ATOMIC_SEQ_CST)) {
        pthread_kill(timed, SIGUSR1);
        usleep(200);
    }
    return unused;
}

TEST(a_periodic_timer_does_not_keep_memory_from_being_made)
{
    const size_t bytes = (size_t)40 << 20;
    struct sigaction action = {.sa_handler = take};
    pthread_t thread;
    int number;
    CHECK_EQ(sigaction(SIGUSR1, &action, NULL), 0);
    timed = pthread_self();
    old_kernel = 1;
    CHECK_EQ(pthread_create(&thread, NULL, timer, NULL), 0);
    while (taken == 0)
        sched_yield();
    unsigned char *memory = (unsigned char *)dtrain__os_share(bytes, &number);
    sig_atomic_t after = taken;
    while (taken == after) /* signals come again */
        sched_yield();
    __atomic_store_n(&timer_ends, 1, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    old_kernel = 0;
    CHECK_EQ(undone, 0);
    if (memory == NULL) {
        printf("skipped: this system has no memory that processes can share\n");
        return;
    }
    memory[bytes - 1] = 1;
    dtrain__os_share_close(number);
    dtrain__os_unmap(memory, bytes);
}

TEST(a_control_group_has_left_what_it_can_drop)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
            mount("none", "/sys/fs/cgroup", "tmpfs", 0, NULL) != 0)
            _exit(2);
        int good = mkdir("/sys/fs/cgroup/job", 0700) == 0 && writes("/sys/fs/cgroup/job/memory.max", "2147483648\n") &&
                   writes("/sys/fs/cgroup/job/memory.current", "2147479552\n") &&
                   writes("/sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_anon 6\nactive_anon 7\ninactive_file "
                                                            "1073741824\nactive_file 4194304\nslab_reclaimable 1024\n");
        dtrain__os_cgroup job = {.version = 2, .directory = "/sys/fs/cgroup/job"};
        dtrain__os_cgroup top = {.version = 2, .directory = "/sys/fs/cgroup"};
        good = good && dtrain__os_cgroup_left(&job, NULL) == 1077941248u; /* 4,096 and what it can drop */
        good = good && dtrain__os_cgroup_left(&top, NULL) == UINT64_MAX;  /* no limit */
        good = good && writes("/sys/fs/cgroup/job/memory.max", "max\n");
        _exit(!good || dtrain__os_cgroup_left(&job, NULL) != UINT64_MAX);
    }
    int end = end_of(child, 10);
    if (end == 2)
        printf("skipped: this user may mount nothing\n");
    CHECK(end == 0 || end == 2);
}

TEST(a_transport_that_is_none_is_refused)
{
    dtrain_comm *world = NULL;
    dtrain_comm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.world_size = 2;
    desc.root = "127.0.0.1:1";
    setenv("DTRAIN_TRANSPORT", "infiniband", 1);
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_TRANSPORT is \"infiniband\"; expected tcp, unix, shm or mpi");
    setenv("DTRAIN_TRANSPORT", "tcp", 1);
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(dtrain_last_error(), "the transport is tcp and there is no token");
    desc.root = "unix:/tmp/dtrain-none";
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "give a host and port");
    desc.root = "192.0.2.1:29500";
    setenv("DTRAIN_TRANSPORT", "unix", 1);
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(dtrain_last_error(), "is beyond this host");
    desc.transport = "tcp"; /* comes before the variable */
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_DENIED);
    CHECK_CONTAINS(dtrain_last_error(), "the transport is tcp and there is no token");
    desc.transport = "pigeon";
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "desc.transport is \"pigeon\"; expected tcp, unix, shm or mpi");
    desc.transport = "mpi";
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "built without DTRAIN_MPI");
    unsetenv("DTRAIN_TRANSPORT");
}

/* ---- dead and stopped peers ---- */

/* Rank 2 dies while ranks 0 and 1 send to it, and its rings are full. */
static int loses_rank_2(dtrain_comm *world, scene *s)
{
    static float big[1 << 20];
    float x = 1;
    (void)s;
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    if (dtrain_comm_rank(world) == 2) {
        usleep(100000);
        kill(getpid(), SIGKILL);
    }
    double begin = now_s();
    CHECK_EQ(dtrain_send(world, big, 1 << 20, DTRAIN_F32, 2), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), "rank 2");
    CHECK_WITHIN(now_s() - begin, 5);
    return 0;
}

TEST(a_peer_that_dies_with_a_full_ring_is_named)
{
    scene s;
    pid_t pids[3];
    scene_begin(&s, 3, 0);
    dtrain_set_log(quiet, NULL);
    for (int rank = 0; rank < 3; rank++)
        pids[rank] = start_rank(&s, rank, loses_rank_2);
    CHECK_EQ(end_of(pids[0], 30), 0);
    CHECK_EQ(end_of(pids[1], 30), 0);
    CHECK_EQ(end_of(pids[2], 30), 128 + SIGKILL);
    dtrain_set_log(NULL, NULL);
}

static int sums_for_a_while(dtrain_comm *world, scene *s)
{
    static float big[100000];
    (void)s;
    for (int step = 0; step < 300; step++) {
        for (int i = 0; i < 100000; i++)
            big[i] = 1;
        CHECK_EQ(dtrain_all_reduce(world, big, big, 100000, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK(big[0] == 2 && big[99999] == 2);
    }
    return 0;
}

TEST(a_stopped_peer_goes_on_where_it_was)
{
    scene s;
    pid_t pids[2];
    scene_begin(&s, 2, 0);
    for (int rank = 0; rank < 2; rank++)
        pids[rank] = start_rank(&s, rank, sums_for_a_while);
    for (int i = 0; i < 10; i++) {
        usleep(5000);
        kill(pids[i % 2], SIGSTOP);
        usleep(20000);
        kill(pids[i % 2], SIGCONT);
    }
    CHECK_EQ(end_of(pids[0], 30), 0);
    CHECK_EQ(end_of(pids[1], 30), 0);
}
