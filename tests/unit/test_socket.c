/* Groups of processes over TCP and unix sockets: the bits of threads, progress, the store; what a process may meet
 * beside its ranks: signals, forked children, many descriptors, little memory. Every rank is a process of its own. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>

/* One hash of many collectives, the same on every transport. */
static int many_collectives(dtrain_comm *world, uint64_t *hash)
{
    static const size_t counts[] = {0, 1, 2, 7, 1000, 1025, 20011, 70001, 300007};
    static const dtrain_dtype dtypes[] = {DTRAIN_F32, DTRAIN_F64, DTRAIN_BF16, DTRAIN_F16, DTRAIN_I32};
    int rank = dtrain_comm_rank(world), bad = 0;
    *hash = 0;
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        float *values = (float *)malloc(counts[c] * 4 + 4);
        for (size_t i = 0; i < counts[c]; i++)
            values[i] = 8 * dtrain_random_uniform(77 + (uint64_t)rank, i) - 4;
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            size_t count = counts[c], bytes = count * (dtrain_dtype_bits(dtypes[d]) / 8), low, n;
            dtrain_op op = dtypes[d] == DTRAIN_I32 ? DTRAIN_SUM : c % 2 ? DTRAIN_MEAN : DTRAIN_SUM;
            unsigned char *in = (unsigned char *)malloc(bytes + 8), *out = (unsigned char *)malloc(bytes + 8);
            if (dtypes[d] == DTRAIN_I32)
                memcpy(in, values, bytes);
            else
                CHECK_EQ(dtrain_convert(values, DTRAIN_F32, in, dtypes[d], count), DTRAIN_OK);
            bad |= dtrain_all_reduce(world, in, out, count, dtypes[d], op) != DTRAIN_OK;
            *hash = dtrain__xxh64_of(out, bytes, *hash);
            n = dtrain_shard(world, count, rank, &low);
            bad |= dtrain_reduce_scatter(world, in, in + low * (bytes / (count > 0 ? count : 1)), count, dtypes[d],
                                         op) != DTRAIN_OK;
            bad |= dtrain_all_gather(world, in + low * (bytes / (count > 0 ? count : 1)), in, count, dtypes[d]) !=
                   DTRAIN_OK;
            CHECK(memcmp(in, out, bytes) == 0);
            bad |=
                dtrain_broadcast(world, out, count, dtypes[d], (int)(c % (size_t)dtrain_comm_size(world))) != DTRAIN_OK;
            bad |= n > count;
            free(in);
            free(out);
        }
        free(values);
    }
    if (bad)
        TEST_FAIL("rank %d: %s", rank, dtrain_last_error());
    return bad;
}

static uint64_t expected_hash;

static dtrain_status on_threads(dtrain_comm *world, void *user)
{
    uint64_t hash;
    (void)user;
    CHECK_EQ(many_collectives(world, &hash), 0);
    if (dtrain_comm_rank(world) == 0)
        expected_hash = hash;
    return DTRAIN_OK;
}

static int as_on_threads(dtrain_comm *world, scene *s)
{
    uint64_t hash;
    (void)s;
    CHECK_EQ(many_collectives(world, &hash), 0);
    CHECK_EQ(hash, expected_hash);
    return 0;
}

static void same_bits(const char *transport, int connections)
{
    static const int sizes[] = {2, 3, 4, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        scene s;
        CHECK_EQ(dtrain_run_threads(sizes[i], on_threads, NULL, NULL), DTRAIN_OK);
        scene_begin(&s, sizes[i], strcmp(transport, "tcp") == 0);
        s.transport = scene_has_unix() ? transport : "tcp";
        s.desc.connections = connections;
        run_ranks(&s, as_on_threads);
    }
}

TEST(tcp_gives_the_bits_of_threads_at_2_3_4_and_8_ranks)
{
    same_bits("tcp", 0);
}

TEST(unix_sockets_give_the_bits_of_threads_at_2_3_4_and_8_ranks)
{
    same_bits("unix", 0);
}

TEST(shared_memory_gives_the_bits_of_threads_at_2_3_4_and_8_ranks)
{
    same_bits("shm", 0);
    same_bits("shm", 3);
}

TEST(three_connections_to_a_peer_give_the_same_bits)
{
    same_bits("tcp", 3);
}

TEST(the_six_addresses_of_ipv6_work_as_well)
{
    scene s;
    struct sockaddr_in6 address;
    socklen_t bytes = sizeof address;
    int fd = dtrain__without("ipv6") ? -1 : socket(AF_INET6, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        printf("skipped: no IPv6 here\n");
        return;
    }
    CHECK_EQ(getsockname(fd, (struct sockaddr *)&address, &bytes), 0);
    close(fd);
    CHECK_EQ(dtrain_run_threads(3, on_threads, NULL, NULL), DTRAIN_OK);
    scene_begin(&s, 3, 1);
    snprintf(s.root, sizeof s.root, "[::1]:%d", ntohs(address.sin6_port));
    run_ranks(&s, as_on_threads);
}

static int polled(dtrain_comm *world, scene *s)
{
    float x[3000];
    dtrain_work *work;
    (void)s;
    for (int turn = 0; turn < 20; turn++) {
        for (int i = 0; i < 3000; i++)
            x[i] = (float)(dtrain_comm_rank(world) + 1);
        CHECK_EQ(dtrain_all_reduce_async(world, x, x, 3000, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        while (!dtrain_work_done(work))
            CHECK_EQ(dtrain_comm_poll(world, 200), DTRAIN_OK);
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        CHECK(x[0] == 10 && x[2999] == 10);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(polling_alone_moves_a_group_of_processes)
{
    scene s;
    scene_begin(&s, 4, 1);
    s.desc.progress = DTRAIN_PROGRESS_POLL;
    run_ranks(&s, polled);
}

static int in_flight(dtrain_comm *world, scene *s)
{
    enum { N = 6, COUNT = 100003 };
    static float x[N][COUNT];
    dtrain_work *work[N];
    (void)s;
    for (int k = 0; k < N; k++) {
        for (int i = 0; i < COUNT; i++)
            x[k][i] = (float)(dtrain_comm_rank(world) + k);
        CHECK_EQ(dtrain_all_reduce_async(world, x[k], x[k], COUNT, DTRAIN_F32, DTRAIN_SUM, &work[k]), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    for (int k = 0; k < N; k++) {
        CHECK_EQ(dtrain_work_wait(work[k]), DTRAIN_OK);
        CHECK(x[k][0] == (float)(3 + 3 * k) && x[k][COUNT - 1] == (float)(3 + 3 * k));
    }
    return 0;
}

TEST(async_work_is_driven_by_the_service_thread)
{
    scene s;
    scene_begin(&s, 3, 1);
    run_ranks(&s, in_flight);
}

/* The first call after the group has formed comes while the service thread is about to sleep; it is not slept through,
 * which took half a second in one group of ten. */
static int calls_at_once(scene *s, int rank)
{
    int slow = 0, before = test_failures;
    for (int round = 0; round < 100; round++) {
        dtrain_comm_desc desc = scene_desc(s, rank);
        dtrain_comm *world;
        dtrain_work *work;
        float x = 1;
        if (dtrain_comm_create(&world, &desc) != DTRAIN_OK) {
            TEST_FAIL("round %d, rank %d: %s", round, rank, dtrain_last_error());
            return 1;
        }
        double begin = now_s();
        CHECK_EQ(dtrain_all_reduce_async(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM, &work), DTRAIN_OK);
        while (!dtrain_work_done(work))
            sched_yield();
        slow += now_s() - begin > 0.4;
        CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
        dtrain_comm_destroy(world);
    }
    CHECK(slow <= 2);
    return test_failures != before;
}

TEST(async_work_is_not_slept_through)
{
    scene s;
    pid_t pids[2];
    scene_begin(&s, 2, 1);
    for (int rank = 0; rank < 2; rank++) {
        fflush(stdout);
        if ((pids[rank] = fork()) == 0)
            _exit(calls_at_once(&s, rank));
    }
    CHECK_EQ(end_of(pids[0], 120), 0);
    CHECK_EQ(end_of(pids[1], 120), 0);
}

/* Rank 1 deletes what rank 0 has set. A call that waits for the key is woken by the next value alone. */
static void store_deletes(dtrain_comm *world)
{
    char text[8];
    size_t bytes;
    int rank = dtrain_comm_rank(world);
    if (rank == 0)
        CHECK_EQ(dtrain_store_set(world, "brief", "old", 4), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 1)
        CHECK_EQ(dtrain_store_delete(world, "brief"), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_store_get(world, "brief", text, sizeof text, &bytes), DTRAIN_OK);
    CHECK(bytes == DTRAIN_STORE_ABSENT);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 2) {
        CHECK_EQ(dtrain_store_delete(world, "brief"), DTRAIN_OK); /* it is absent, and others may wait for it */
        CHECK_EQ(dtrain_store_set(world, "brief", "new", 4), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_store_wait(world, "brief", text, sizeof text, &bytes), DTRAIN_OK);
    CHECK(bytes == 4 && strcmp(text, "new") == 0);
    CHECK_EQ(dtrain_store_delete(world, ""), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_store_delete(world, NULL), DTRAIN_ERR_INVALID);
}

static int store_calls(dtrain_comm *world, scene *s)
{
    char text[64], key[16];
    unsigned char large[65536];
    size_t bytes;
    int rank = dtrain_comm_rank(world);
    (void)s;
    CHECK_EQ(dtrain_store_get(world, "never", text, sizeof text, &bytes), DTRAIN_OK);
    CHECK(bytes == DTRAIN_STORE_ABSENT);
    if (rank == 2) {
        usleep(50000);
        CHECK_EQ(dtrain_store_set(world, "late", "so it is", 9), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_store_wait(world, "late", text, sizeof text, &bytes), DTRAIN_OK);
    CHECK(bytes == 9 && strcmp(text, "so it is") == 0);
    snprintf(key, sizeof key, "of %d", rank);
    memset(large, rank, sizeof large);
    CHECK_EQ(dtrain_store_set(world, key, large, sizeof large), DTRAIN_OK);
    CHECK_EQ(dtrain_store_set(world, key, large, sizeof large), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    snprintf(key, sizeof key, "of %d", (rank + 1) % 3);
    CHECK_EQ(dtrain_store_get(world, key, large, 10, &bytes), DTRAIN_OK);
    CHECK(bytes == 65536 && large[0] == (rank + 1) % 3 && large[10] == rank);
    CHECK_EQ(dtrain_store_set(world, "empty", NULL, 0), DTRAIN_OK);
    CHECK_EQ(dtrain_store_get(world, "empty", text, sizeof text, &bytes), DTRAIN_OK);
    CHECK(bytes == 0);
    CHECK_EQ(dtrain_store_set(world, "", text, 1), DTRAIN_ERR_INVALID);
    CHECK_EQ(dtrain_store_set(world, "k", large, 65537), DTRAIN_ERR_INVALID);
    store_deletes(world);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

static dtrain_status store_on_threads(dtrain_comm *world, void *user)
{
    (void)user;
    return store_calls(world, NULL) ? DTRAIN_ERR_ABORTED : DTRAIN_OK;
}

TEST(the_store_keeps_byte_strings_on_processes_and_on_threads)
{
    scene s;
    for (int way = TCP; way < WAYS; way++) {
        scene_begin_by(&s, 3, way);
        s.desc.progress = way == OWN ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        run_ranks(&s, store_calls);
    }
    CHECK_EQ(dtrain_run_threads(3, store_on_threads, NULL, NULL), DTRAIN_OK);
}

TEST(a_deleted_key_gives_its_memory_back)
{
    static unsigned char large[65536];
    char key[16];
    dtrain_comm *world;
    CHECK_EQ(dtrain_threads_create(&world, 1, NULL), DTRAIN_OK);
    size_t before = dtrain_comm_allocator(world)->bytes;
    for (int i = 0; i < 2000; i++) { /* 125 MiB in all: twice what the store holds */
        snprintf(key, sizeof key, "%d", i);
        CHECK_EQ(dtrain_store_set(world, key, large, sizeof large), DTRAIN_OK);
        if (i >= 900) {
            snprintf(key, sizeof key, "%d", i - 900);
            CHECK_EQ(dtrain_store_delete(world, key), DTRAIN_OK);
        }
    }
    for (int i = 1100; i < 2000; i++) {
        snprintf(key, sizeof key, "%d", i);
        CHECK_EQ(dtrain_store_delete(world, key), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_comm_allocator(world)->bytes, before);
    dtrain_comm_destroy(world);
}

TEST(a_key_of_a_full_store_can_be_set_again)
{
    static unsigned char large[65536];
    char key[16];
    dtrain_comm *world;
    int i = 0;
    CHECK_EQ(dtrain_threads_create(&world, 1, NULL), DTRAIN_OK);
    for (dtrain_status status = DTRAIN_OK; status == DTRAIN_OK; i++) {
        snprintf(key, sizeof key, "%d", i);
        status = dtrain_store_set(world, key, large, sizeof large);
    }
    CHECK(i > 1000 && i <= 1025); /* 64 MiB */
    CHECK_EQ(dtrain_store_set(world, "0", large, sizeof large), DTRAIN_OK);
    CHECK_EQ(dtrain_store_set(world, "another", large, sizeof large), DTRAIN_ERR_MEMORY);
    dtrain_comm_destroy(world);
}

/* The least that a look for an absent key costs, as others share the processor. */
static int64_t look_ns(dtrain_comm *world)
{
    struct timespec from, to;
    int64_t least = INT64_MAX;
    size_t bytes;
    for (int i = 0; i < 200; i++) {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
        CHECK_EQ(dtrain_store_get(world, "nobody's", NULL, 0, &bytes), DTRAIN_OK);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
        int64_t ns = (int64_t)(to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
        least = ns < least ? ns : least;
    }
    return least;
}

/* 300 times as many keys would cost 300 times as much, if a look went through all of them. */
TEST(a_look_costs_the_same_with_thirty_thousand_keys)
{
    char key[16], value[16] = "";
    size_t bytes;
    int64_t few = 0;
    dtrain_comm *world;
    CHECK_EQ(dtrain_threads_create(&world, 1, NULL), DTRAIN_OK);
    for (int i = 0; i < 30000; i++) {
        snprintf(key, sizeof key, "%d", i);
        CHECK_EQ(dtrain_store_set(world, key, key, strlen(key) + 1), DTRAIN_OK);
        if (i == 99)
            few = look_ns(world);
    }
    int64_t many = look_ns(world);
    if (many > 20 * few)
        TEST_FAIL("a look takes %lld ns with 100 keys and %lld ns with 30000", (long long)few, (long long)many);
    for (int i = 1; i < 30000; i++) {
        snprintf(key, sizeof key, "%d", i);
        CHECK_EQ(dtrain_store_get(world, key, value, sizeof value, &bytes), DTRAIN_OK);
        CHECK(bytes == strlen(key) + 1 && strcmp(value, key) == 0);
    }
    dtrain_comm_destroy(world);
}

/* Rank 0 computes, which keeps the store, and is killed then. */
static int store_without_rank_0(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    char value = 0, own = (char)rank;
    size_t bytes;
    double begin;
    dtrain_comm *rest;
    CHECK_EQ(dtrain_comm_split(world, rank == 0 ? -1 : 0, 0, &rest), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 0) {
        usleep(1500000);
        raise(SIGKILL);
    }
    begin = now_s();
    CHECK_EQ(dtrain_store_set(rest, "key", &own, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_store_wait(rest, "key", &value, 1, &bytes), DTRAIN_OK);
    CHECK(bytes == 1 && value > 0 && now_s() - begin < 1);
    CHECK_EQ(dtrain_store_wait(rank == 1 ? world : rest, "nobody", &value, 1, &bytes), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(),
                   rank == 1 ? "rank 0" : "rank 0 of the first world, which kept the store, is gone");
    CHECK_EQ(dtrain_store_get(rest, "key", &value, 1, &bytes), DTRAIN_ERR_PEER_LOST);
    CHECK_EQ(dtrain_barrier(rest), DTRAIN_OK);
    dtrain_comm_destroy(rest);
    CHECK_EQ(dtrain_comm_shrink(world, &rest), DTRAIN_OK); /* its rank 0 is rank 1 */
    CHECK_EQ(dtrain_store_get(rest, "key", &value, 1, &bytes), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0 of the first world, which kept the store, is gone");
    dtrain_comm_destroy(rest);
    return 0;
}

TEST(the_store_answers_while_rank_0_computes_and_dies_with_it)
{
    for (int way = TCP; way < WAYS; way++) {
        scene s;
        pid_t pids[3];
        scene_begin_by(&s, 3, way);
        for (int rank = 0; rank < 3; rank++)
            pids[rank] = start_rank(&s, rank, store_without_rank_0);
        for (int rank = 0; rank < 3; rank++)
            CHECK_EQ(end_of(pids[rank], 30), rank == 0 ? 128 + SIGKILL : 0);
    }
}

static int waits_in_vain(dtrain_comm *world, scene *s)
{
    char text[8];
    size_t bytes;
    (void)s;
    CHECK_EQ(dtrain_store_wait(world, "nobody", text, sizeof text, &bytes), DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(world->error.text, "nobody has set \"nobody\"");
    usleep(dtrain_comm_rank(world) == 0 ? 500000 : 0); /* it keeps the store */
    return 0;
}

TEST(a_wait_for_a_key_that_nobody_sets_ends_at_the_deadline)
{
    scene s;
    for (int way = UNIX; way <= OWN; way += OWN) {
        scene_begin_by(&s, 2, way);
        s.desc.timeout_ms = 600;
        run_ranks(&s, waits_in_vain);
    }
}

static int waits_for_a_key(dtrain_comm *world, scene *s)
{
    char value = 'x';
    size_t bytes;
    (void)s;
    if (dtrain_comm_rank(world) == 0)
        CHECK_EQ(dtrain_store_wait(world, "key", &value, 1, &bytes), DTRAIN_OK);
    else
        CHECK_EQ(dtrain_store_set(world, "key", &value, 1), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(the_longest_times_are_long)
{
    scene s;
    scene_begin(&s, 2, 0);
    s.desc.timeout_ms = s.desc.heartbeat_ms = s.desc.reconnect_ms = INT64_MAX;
    run_ranks(&s, waits_for_a_key);
}

static int descriptors(void)
{
    int open_now = 0;
    for (int fd = 0; fd < 1024; fd++)
        open_now += fcntl(fd, F_GETFD) >= 0;
    return open_now;
}

static int threads_now(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    while (tasks != NULL && readdir(tasks) != NULL)
        count++;
    if (tasks != NULL)
        closedir(tasks);
    return count;
}

static int comes_and_goes(scene *s, int rank, int rounds)
{
    dtrain_allocator heap;
    int before = test_failures, at_first = descriptors(), threads = threads_now();
    memset(&heap, 0, sizeof heap);
    for (int round = 0; round < rounds; round++) {
        dtrain_comm_desc desc = scene_desc(s, rank);
        dtrain_comm *world;
        float x = 1;
        desc.allocator = &heap;
        if (dtrain_comm_create(&world, &desc) != DTRAIN_OK) {
            TEST_FAIL("round %d, rank %d: %s", round, rank, dtrain_last_error());
            return 1;
        }
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        dtrain_comm_destroy(world);
    }
    CHECK_EQ(descriptors(), at_first);
    for (int look = 0; look < 2000 && threads_now() != threads; look++)
        usleep(1000); /* the system lists a joined thread a moment longer */
    CHECK_EQ(threads_now(), threads);
    CHECK_EQ(heap.bytes, 0);
    return test_failures != before;
}

TEST(coming_and_going_a_thousand_times_leaves_no_descriptor_thread_or_byte)
{
    scene s;
    pid_t pids[2];
    scene_begin(&s, 2, 0);
    for (int rank = 0; rank < 2; rank++) {
        fflush(stdout);
        if ((pids[rank] = fork()) == 0)
            _exit(comes_and_goes(&s, rank, 1000));
    }
    CHECK_EQ(end_of(pids[0], 60), 0);
    CHECK_EQ(end_of(pids[1], 60), 0);
}

/* An allocator whose nth new block, counted from when it is armed, is refused. */
typedef struct miser {
    uint32_t armed, count, refused;
} miser;

static void *resize_or_refuse(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    miser *m = (miser *)user;
    void *block = NULL;
    if (new_bytes > 0 && __atomic_load_n(&m->armed, __ATOMIC_SEQ_CST) &&
        __atomic_add_fetch(&m->count, 1, __ATOMIC_SEQ_CST) == m->refused)
        return NULL;
    if (new_bytes > 0 && posix_memalign(&block, align < sizeof block ? sizeof block : align, new_bytes) != 0)
        return NULL;
    if (block != NULL && pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    return block;
}

static dtrain_status keeps_and_sums(dtrain_comm *world)
{
    static unsigned char value[5000], got[5000];
    int rank = dtrain_comm_rank(world);
    char mine[2] = {(char)('a' + rank), 0}, other[2] = {(char)('b' - rank), 0};
    float x = 1;
    size_t bytes = 0;
    memset(value, 'a' + rank, sizeof value);
    dtrain_status status = dtrain_store_set(world, mine, value, sizeof value);
    if (status == DTRAIN_OK && (status = dtrain_store_wait(world, other, got, sizeof got, &bytes)) == DTRAIN_OK)
        CHECK(bytes == sizeof got && got[0] == other[0] && got[sizeof got - 1] == other[0]);
    if (status == DTRAIN_OK && (status = dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM)) == DTRAIN_OK)
        CHECK(x == 2);
    return status;
}

/* One rank whose nth block is refused (0: none is); its results are right, or it has an error of its own. */
static int short_of_memory(scene *s, int rank, uint32_t refused)
{
    dtrain_comm_desc desc;
    miser m = {0, 0, refused};
    dtrain_allocator heap = {resize_or_refuse, &m, 0, 0};
    dtrain_comm *world;
    dtrain_status status;
    int before = test_failures, ready = 0;
    s->desc.allocator = &heap;
    desc = scene_desc(s, rank);
    CHECK_EQ(s->own != NULL ? scene_join(&world, s, rank) : dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    __atomic_store_n(&m.armed, 1, __ATOMIC_SEQ_CST);
    while ((status = dtrain_comm_ready(world, &ready)) == DTRAIN_OK && !ready)
        usleep(100);
    if (status == DTRAIN_OK)
        status = keeps_and_sums(world);
    if (status != DTRAIN_OK) {
        CHECK(status == DTRAIN_ERR_MEMORY || status == DTRAIN_ERR_PEER_LOST || status == DTRAIN_ERR_TIMEOUT);
        CHECK(strstr(world->error.text, "no control message") == NULL);
    }
    dtrain_comm_destroy(world);
    CHECK_EQ(heap.bytes, 0);
    return test_failures != before;
}

TEST(a_refused_block_is_an_error_and_never_half_a_message)
{
    for (uint32_t nth = 1; nth <= 16; nth++)
        for (int who = 0; who < 4; who++) {
            scene s;
            pid_t pids[2];
            scene_begin_by(&s, 2, who < 2 ? UNIX : OWN);
            s.desc.timeout_ms = 500;
            for (int rank = 0; rank < 2; rank++) {
                fflush(stdout);
                if ((pids[rank] = fork()) == 0)
                    _exit(short_of_memory(&s, rank, rank == who % 2 ? nth : 0));
                scene_started(&s, rank);
            }
            CHECK_EQ(end_of(pids[0], 20), 0);
            CHECK_EQ(end_of(pids[1], 20), 0);
        }
}

static int has_a_child(dtrain_comm *world, scene *s)
{
    float x = 1;
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    pid_t child = fork();
    if (child == 0) {
        int good = dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM) == DTRAIN_ERR_INVALID &&
                   strstr(world->error.text, "forked child") != NULL;
        dtrain_comm_destroy(world);
        _exit(!good);
    }
    CHECK_EQ(end_of(child, 10), 0);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(x == 2);
    return 0;
}

TEST(a_forked_child_is_refused_and_harms_nothing)
{
    scene s;
    scene_begin(&s, 2, 0);
    run_ranks(&s, has_a_child);
}

static void on_alarm(int number)
{
    (void)number;
}

static int in_a_storm_of_signals(dtrain_comm *world, scene *s)
{
    struct itimerval often = {{0, 300}, {0, 300}};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm; /* without SA_RESTART: every call may be interrupted */
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    int bad = as_on_threads(world, s);
    memset(&often, 0, sizeof often);
    setitimer(ITIMER_REAL, &often, NULL);
    return bad;
}

TEST(interrupted_calls_go_on)
{
    scene s;
    CHECK_EQ(dtrain_run_threads(3, on_threads, NULL, NULL), DTRAIN_OK);
    scene_begin(&s, 3, 1);
    run_ranks(&s, in_a_storm_of_signals);
}

/* How many descriptors from one on are sockets with a peer. */
static int sockets_from(int first)
{
    int count = 0;
    for (int fd = first; fd < first + 1024; fd++) {
        struct sockaddr_storage peer;
        socklen_t bytes = sizeof peer;
        count += getpeername(fd, (struct sockaddr *)&peer, &bytes) == 0;
    }
    return count;
}

static int beyond_select(scene *s, int rank)
{
    struct rlimit files;
    dtrain_comm_desc desc = scene_desc(s, rank);
    dtrain_comm *world;
    int before = test_failures, highest = 0;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (int i = 0; i < 1100 && highest >= 0; i++)
        highest = open("/dev/null", O_RDONLY);
    if (highest < 1024) {
        printf("skipped: this process may open %d descriptors only\n", (int)files.rlim_max);
        return 0;
    }
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_OK);
    if (world == NULL)
        return 1;
    CHECK_EQ(as_on_threads(world, s), 0);
    CHECK(sockets_from(1024) >= 2);             /* for control and for data */
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK); /* until both have counted, neither leaves */
    dtrain_comm_destroy(world);
    return test_failures != before;
}

TEST(descriptors_above_1024_are_like_others)
{
    scene s;
    pid_t pids[2];
    CHECK_EQ(dtrain_run_threads(2, on_threads, NULL, NULL), DTRAIN_OK);
    scene_begin(&s, 2, 1);
    for (int rank = 0; rank < 2; rank++) {
        fflush(stdout);
        if ((pids[rank] = fork()) == 0)
            _exit(beyond_select(&s, rank));
    }
    CHECK_EQ(end_of(pids[0], 60), 0);
    CHECK_EQ(end_of(pids[1], 60), 0);
}

/* Rank 0 has sent the first 3 bytes of a frame when all ranks have come. */
TEST(the_table_of_addresses_goes_between_frames)
{
    static dtrain__hub hub;
    dtrain__member members[2];
    dtrain_allocator heap = {NULL, NULL, 0, 0};
    unsigned char got[256];
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    memset(&hub, 0, sizeof hub);
    memset(members, 0, sizeof members);
    hub.allocator = &heap;
    hub.members = members;
    hub.size = 2;
    dtrain__hub_expect(&hub, &members[0]);
    dtrain__hub_expect(&hub, &members[1]);
    members[0].joined = members[1].joined = 1;
    members[1].control.fd = fds[0];
    dtrain__frame_close(&members[1], dtrain__frame_open(&hub, &members[1], 0x4241));
    dtrain__bytes_drop(&members[1].out, 3);
    dtrain__hub_complete(&hub);
    dtrain__frame_close(&members[1], dtrain__frame_open(&hub, &members[1], 0x4443));
    dtrain__hub_flush(&hub, 1);
    size_t table = hub.table.bytes;
    CHECK(table > 6 && table < sizeof got - 9);
    CHECK_EQ(recv(fds[1], got, sizeof got, MSG_DONTWAIT), (ssize_t)(3 + table + 6));
    CHECK_EQ(memcmp(got, "\0AB", 3), 0);
    CHECK_EQ(memcmp(got + 3, hub.table.data, table), 0);
    CHECK_EQ(memcmp(got + 3 + table, "\0\0\0\0CD", 6), 0);
    CHECK_EQ(dtrain__hub_due(&members[1]), 0);
    dtrain__bytes_free(&heap, &hub.table);
    for (int rank = 0; rank < 2; rank++)
        dtrain__hub_forget(&hub, &members[rank]);
    CHECK_EQ(heap.bytes, 0);
    close(fds[0]);
    close(fds[1]);
}
