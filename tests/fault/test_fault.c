/* Collectives while the system and the connections misbehave: short reads and writes, EINTR and EAGAIN storms,
 * delays, resets, on plain connections, on sealed ones and with shared memory; over a transport of the user's own also
 * bytes that are dropped, cut off or changed. The calls that the library makes to the system are caught here and passed
 * on, or not. Every call ends within its deadline, with the right result or an error. FAULT_SEED=n and FAULT_RUNS=n
 * repeat and prolong. */
#define _GNU_SOURCE
#include "hooks.h"
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include <sys/syscall.h>

const size_t hook_block_bytes = 20 << 10;
const size_t hook_block_alone = 40 << 10;
const size_t hook_message_chunk = 8 << 10;

#define MOST_RANKS 6

enum { SHORT = 1, STORM = 2, DELAY = 4, RESET = 8, DROP = 16, CUT = 32, CHANGE = 64, CROSS = 128 };

static struct {
    uint32_t kinds, armed; /* armed: resets may come */
    uint64_t seed, calls, resets;
} fault;

static uint64_t throw_dice(void)
{
    uint64_t call = __atomic_fetch_add(&fault.calls, 1, __ATOMIC_RELAXED);
    return dtrain_random_u64(fault.seed, call);
}

/* Does one fault, or none; returns 0 when the call is to go on, with no more than *bytes. */
static int misbehave(int fd, size_t *bytes)
{
    uint32_t kinds = __atomic_load_n(&fault.kinds, __ATOMIC_RELAXED);
    uint64_t dice = kinds != 0 ? throw_dice() : 0;
    if ((kinds & DELAY) && dice % 64 == 0)
        usleep((useconds_t)(dice >> 32) % 2000);
    if ((kinds & STORM) && (dice >> 8) % 3 < (kinds & CROSS ? 2 : 1)) {
        errno = dice >> 20 & 1 ? EINTR : EAGAIN;
        return -1;
    }
    if ((kinds & RESET) && __atomic_load_n(&fault.armed, __ATOMIC_RELAXED) && (dice >> 24) % 400 == 0) {
        __atomic_add_fetch(&fault.resets, 1, __ATOMIC_RELAXED);
        shutdown(fd, SHUT_RDWR);
        errno = ECONNRESET;
        return -1;
    }
    if ((kinds & SHORT) && (dice >> 40) % 2 == 0 && *bytes > 1)
        *bytes = 1 + (size_t)(dice >> 44) % (*bytes < 3000 ? *bytes : 3000);
    return 0;
}

ssize_t send(int fd, const void *data, size_t bytes, int flags)
{
    if (misbehave(fd, &bytes) != 0)
        return -1;
    return syscall(SYS_sendto, fd, data, bytes, flags, NULL, 0);
}

ssize_t recv(int fd, void *data, size_t bytes, int flags)
{
    if (misbehave(fd, &bytes) != 0)
        return -1;
    return syscall(SYS_recvfrom, fd, data, bytes, flags, NULL, NULL);
}

/* A transport of the user's own: the threads transport's messages, on a bad day. */
static dtrain_status bad_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    uint32_t kinds = __atomic_load_n(&fault.kinds, __ATOMIC_RELAXED);
    uint64_t dice = throw_dice();
    unsigned char *copy = NULL;
    size_t n = bytes;
    dtrain_status status;
    if ((kinds & DELAY) && dice % 32 == 0)
        usleep((useconds_t)(dice >> 32) % 2000);
    if (!__atomic_load_n(&fault.armed, __ATOMIC_RELAXED) || (dice >> 8) % 100 != 0)
        return dtrain__threads_send(self, peer, data, bytes, deadline_ns, moved);
    if ((kinds & CUT) && (dice >> 20) % 4 == 0) {
        dtrain__threads_send(self, peer, data, bytes / 2, deadline_ns, moved);
        return DTRAIN_ERR_PEER_LOST;
    }
    if (bytes == 0 || !(kinds & (DROP | CHANGE)))
        return dtrain__threads_send(self, peer, data, bytes, deadline_ns, moved);
    __atomic_add_fetch(&fault.resets, 1, __ATOMIC_RELAXED);
    copy = (unsigned char *)malloc(bytes);
    memcpy(copy, data, bytes);
    if (kinds & CHANGE)
        copy[(dice >> 24) % bytes] ^= (unsigned char)(1 << (dice >> 50) % 8);
    else
        n = bytes - 1 - (size_t)(dice >> 24) % bytes;
    status = dtrain__threads_send(self, peer, copy, n, deadline_ns, moved);
    *moved = *moved == n ? bytes : *moved;
    free(copy);
    return status;
}

typedef struct rank_of_run {
    dtrain__threads_group *board; /* NULL: over sockets */
    pairs *own;                   /* or over these */
    int rank, ranks, calls, broke;
    int *formed;
    uint64_t seed;
    char root[80], why[1000]; /* why: it broke */
    int64_t reconnect_ms;
} rank_of_run;

/* What rank gives for element i of call number n. */
static int64_t given(uint64_t seed, int n, int rank, size_t i)
{
    return (int64_t)dtrain_random_u64(seed + (uint64_t)n * 64 + (uint64_t)rank, i) >> 8;
}

static int64_t total(uint64_t seed, int n, int ranks, size_t i)
{
    int64_t sum = 0;
    for (int rank = 0; rank < ranks; rank++)
        sum += given(seed, n, rank, i);
    return sum;
}

/* A vote: the AND of the survivors' flags has the bits of all. */
static dtrain_status one_vote(dtrain_comm *world, const rank_of_run *r, int n, int *right)
{
    uint64_t all = UINT64_MAX, mine = (uint64_t)given(r->seed, n, r->rank, 0), flags = mine;
    for (int rank = 0; rank < r->ranks; rank++)
        all &= (uint64_t)given(r->seed, n, rank, 0);
    dtrain_status status = dtrain_comm_agree(world, &flags);
    *right = (flags & all) == all && (flags & ~mine) == 0;
    return status;
}

/* Every rank sets a key, and waits for that of another. */
static dtrain_status one_store(dtrain_comm *world, const rank_of_run *r, int n, int64_t *in, int64_t *out, int *right)
{
    char key[32];
    int left = (r->rank + r->ranks - 1) % r->ranks;
    size_t bytes = 0, count = 1 + (size_t)n * 97;
    for (size_t i = 0; i < count; i++)
        in[i] = given(r->seed, n, r->rank, i);
    snprintf(key, sizeof key, "%d of %d", n, r->rank);
    dtrain_status status = dtrain_store_set(world, key, in, count * sizeof *in);
    snprintf(key, sizeof key, "%d of %d", n, left);
    if (status == DTRAIN_OK)
        status = dtrain_store_wait(world, key, out, count * sizeof *out, &bytes);
    *right = bytes == count * sizeof *out;
    for (size_t i = 0; i < count; i++)
        *right = *right && out[i] == given(r->seed, n, left, i);
    return status;
}

/* Whether call number n is a vote or the store's, which fails without breaking the group. */
static int is_control(const rank_of_run *r, int n)
{
    return (__atomic_load_n(&fault.kinds, __ATOMIC_RELAXED) & CROSS) == 0 &&
           dtrain_random_u64(r->seed, (uint64_t)n) / 1024 % 8 > 5;
}

/* Makes call number n; returns its status, and in *right whether what it gave is right. */
static dtrain_status one_call(dtrain_comm *world, rank_of_run *r, int n, int64_t *in, int64_t *out, int *right)
{
    static const size_t counts[] = {0, 1, 3, 100, 511, 2000, 9000};
    uint64_t dice = dtrain_random_u64(r->seed, (uint64_t)n);
    size_t count = counts[dice % 7], low, mine = dtrain_shard(world, count, r->rank, &low);
    int root = (int)(dice / 16 % (uint64_t)r->ranks), next = (r->rank + 1) % r->ranks;
    int left = (r->rank + r->ranks - 1) % r->ranks;
    dtrain_status status;
    *right = 1;
    if (__atomic_load_n(&fault.kinds, __ATOMIC_RELAXED) & CROSS) {
        usleep((useconds_t)(dtrain_random_u64(r->seed, (uint64_t)(100 + r->rank)) % 3000));
        count = 511;
    }
    for (size_t i = 0; i < count; i++)
        in[i] = given(r->seed, n, r->rank, i);
    switch (__atomic_load_n(&fault.kinds, __ATOMIC_RELAXED) & CROSS ? 3 : dice / 1024 % 8) {
    case 0:
        status = dtrain_broadcast(world, in, count, DTRAIN_I64, root);
        for (size_t i = 0; i < count; i++)
            *right = *right && in[i] == given(r->seed, n, root, i);
        return status;
    case 1:
        status = dtrain_all_gather(world, in + low, out, count, DTRAIN_I64);
        for (int from = 0; from < r->ranks; from++) {
            size_t begin, part = dtrain_shard(world, count, from, &begin);
            for (size_t i = begin; i < begin + part; i++)
                *right = *right && out[i] == given(r->seed, n, from, i);
        }
        return status;
    case 2:
        status = dtrain_reduce_scatter(world, in, out, count, DTRAIN_I64, DTRAIN_SUM);
        for (size_t i = 0; i < mine; i++)
            *right = *right && out[i] == total(r->seed, n, r->ranks, low + i);
        return status;
    case 3:
        status = dtrain_exchange(world, in, count, next, out, count, left, DTRAIN_I64);
        for (size_t i = 0; i < count; i++)
            *right = *right && out[i] == given(r->seed, n, left, i);
        return status;
    case 6: return one_vote(world, r, n, right);
    case 7: return one_store(world, r, n, in, out, right);
    default:
        status = dtrain_all_reduce(world, in, out, count, DTRAIN_I64, DTRAIN_SUM);
        for (size_t i = 0; i < count; i++)
            *right = *right && out[i] == total(r->seed, n, r->ranks, i);
        return status;
    }
}

static void *faulty_rank(void *pointer)
{
    rank_of_run *r = (rank_of_run *)pointer;
    dtrain_comm_desc desc;
    dtrain_comm *world = NULL;
    int64_t *in = (int64_t *)malloc(9000 * sizeof *in), *out = (int64_t *)malloc(9000 * sizeof *out);
    int right, last = 0;
    memset(&desc, 0, sizeof desc);
    desc.rank = r->rank;
    desc.world_size = r->ranks;
    desc.root = r->root;
    desc.token = "what TCP takes to meet";
    desc.timeout_ms = test_ms(10000);
    desc.reconnect_ms = r->reconnect_ms;
    desc.secure = r->seed % 3 == 0;
    dtrain_status status;
    if (r->board != NULL) {
        dtrain__end end;
        dtrain__threads_end(&end, r->board, r->rank);
        dtrain_transport transport = end.transport;
        transport.fail = NULL;
        transport.send = bad_send;
        desc.timeout_ms = 500;
        status = dtrain_comm_from_transport(&world, &transport, &desc);
    } else if (r->own != NULL) {
        status = pairs_join(&world, r->own, r->rank, &desc);
    } else {
        status = dtrain_comm_create(&world, &desc);
    }
    if (status != DTRAIN_OK)
        TEST_FAIL("seed %llu: rank %d: %s", (unsigned long long)r->seed, r->rank, dtrain_last_error());
    __atomic_add_fetch(r->formed, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(r->formed, __ATOMIC_SEQ_CST) < r->ranks)
        usleep(100);
    __atomic_store_n(&fault.armed, 1, __ATOMIC_RELAXED);
    for (int n = 0; status == DTRAIN_OK && n < r->calls; n++) {
        int64_t begin = dtrain__os_now_ns();
        last = n;
        status = one_call(world, r, n, in, out, &right);
        if (status == DTRAIN_OK && !right)
            TEST_FAIL("seed %llu: call %d on rank %d is wrong and says that it is right", (unsigned long long)r->seed,
                      n, r->rank);
        if (dtrain__os_now_ns() - begin > (desc.timeout_ms + 10000) * 1000000)
            TEST_FAIL("seed %llu: call %d on rank %d went far beyond its deadline", (unsigned long long)r->seed, n,
                      r->rank);
    }
    if (status == DTRAIN_OK &&
        !(__atomic_load_n(&fault.kinds, __ATOMIC_RELAXED) & CROSS)) /* until then rank 0 keeps the store */
        status = dtrain_barrier(world);
    r->broke = status != DTRAIN_OK;
    snprintf(r->why, sizeof r->why, "%s", r->broke ? dtrain_last_error() : "");
    if (status != DTRAIN_OK && !is_control(r, last) && dtrain_barrier(world) == DTRAIN_OK)
        TEST_FAIL("seed %llu: rank %d goes on after a failure", (unsigned long long)r->seed, r->rank);
    dtrain_comm_destroy(world);
    free(in);
    free(out);
    return NULL;
}

/* What a run goes over: a transport of the user's own that misbehaves; sockets; pairs of sockets in one. */
enum { BAD, SOCKETS, PAIRS };

/* Returns how many ranks ended with an error; told: none should, so that each is a failure. */
static int run_with(uint32_t kinds, uint64_t seed, int64_t reconnect_ms, int over, int told)
{
    dtrain__threads_group *board = NULL;
    pairs *own = NULL;
    static int turn;
    int port = free_port();
    rank_of_run ranks[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    int n = 2 + (int)(seed % 4), formed = 0, broke = 0;
    fault.seed = seed;
    fault.calls = 0;
    fault.armed = 0;
    __atomic_store_n(&fault.kinds, kinds, __ATOMIC_SEQ_CST);
    if (over == BAD)
        CHECK_EQ(dtrain__threads_create(&board, n, NULL), DTRAIN_OK);
    if (over == PAIRS)
        own = pairs_new(n, seed % 2 != 0);
    turn++;
    int local = seed % 2 == 0 && scene_has_unix();
    setenv("DTRAIN_TRANSPORT", seed / 2 % 2 != 0 ? "shm" : local ? "unix" : "tcp", 1);
    for (int rank = 0; rank < n; rank++) {
        rank_of_run *r = &ranks[rank];
        memset(r, 0, sizeof *r);
        r->board = board;
        r->own = own;
        r->rank = rank;
        r->ranks = n;
        r->calls = kinds & CROSS ? 1 : 20;
        r->formed = &formed;
        r->seed = seed;
        r->reconnect_ms = reconnect_ms;
        if (local)
            snprintf(r->root, sizeof r->root, "unix:/tmp/dtrain-fault-%ld-%d", (long)getpid(), turn);
        else
            snprintf(r->root, sizeof r->root, "127.0.0.1:%d", port);
        CHECK_EQ(pthread_create(&threads[rank], NULL, faulty_rank, r), 0);
    }
    for (int rank = 0; rank < n; rank++) {
        pthread_join(threads[rank], NULL);
        broke += ranks[rank].broke;
        if (told && ranks[rank].broke)
            TEST_FAIL("seed %llu: rank %d of %d: %s", (unsigned long long)seed, rank, n, ranks[rank].why);
    }
    __atomic_store_n(&fault.kinds, 0, __ATOMIC_SEQ_CST);
    free(own);
    return broke;
}

static int runs(int usual)
{
    const char *text = getenv("FAULT_RUNS");
    return text != NULL ? atoi(text) : usual;
}

static uint64_t first_seed(void)
{
    const char *text = getenv("FAULT_SEED");
    return text != NULL ? strtoull(text, NULL, 10) : 1;
}

TEST(short_calls_storms_and_delays_change_nothing)
{
    static const uint32_t kinds[] = {SHORT, STORM, DELAY, SHORT | STORM, SHORT | STORM | DELAY};
    dtrain_set_log(quiet, NULL);
    for (int i = 0; i < runs(12); i++) {
        uint64_t seed = first_seed() + (uint64_t)i;
        run_with(kinds[seed % 5], seed, 0, SOCKETS, 1);
        run_with(kinds[seed % 5], seed, 0, PAIRS, 1);
    }
    dtrain_set_log(NULL, NULL);
}

/* All ranks make their connections at once, two for each pair until they have settled on one. */
TEST(connections_that_cross_become_one)
{
    dtrain_set_log(quiet, NULL);
    for (int i = 0; i < runs(60); i++) {
        uint64_t seed = first_seed() + 4000000 + (uint64_t)i;
        run_with((i % 2 ? DELAY : 0) | STORM | SHORT | CROSS, seed, 0, SOCKETS, 1);
    }
    dtrain_set_log(NULL, NULL);
}

TEST(a_reset_ends_every_rank_or_none)
{
    dtrain_set_log(quiet, NULL);
    for (int i = 0; i < runs(12); i++) {
        uint64_t seed = first_seed() + 1000000 + (uint64_t)i;
        run_with(i % 2 ? RESET : RESET | SHORT | STORM, seed, 0, i % 3 == 0 ? PAIRS : SOCKETS, 0);
    }
    dtrain_set_log(NULL, NULL);
}

TEST(links_that_may_come_back_survive_resets)
{
    int survived = 0, resets = 0;
    dtrain_set_log(quiet, NULL);
    for (int i = 0; i < runs(12); i++) {
        uint64_t seed = first_seed() + 2000000 + (uint64_t)i;
        fault.resets = 0;
        int broke = run_with(RESET | (i % 3 ? SHORT : 0), seed, 5000, SOCKETS, 0);
        survived += broke == 0 && fault.resets > 0;
        resets += (int)fault.resets;
    }
    printf("%d resets, %d runs survived some\n", resets, survived);
    CHECK(resets > 0 && survived > 0);
    dtrain_set_log(NULL, NULL);
}

TEST(bytes_that_are_dropped_cut_off_or_changed_are_noticed)
{
    static const uint32_t kinds[] = {DROP, CUT, CHANGE, CHANGE | DELAY, DROP | CUT | DELAY};
    int broke = 0, damaged = 0;
    dtrain_set_log(quiet, NULL);
    for (int i = 0; i < runs(20); i++) {
        uint64_t seed = first_seed() + 3000000 + (uint64_t)i;
        fault.resets = 0;
        broke += run_with(kinds[i % 5], seed, 0, BAD, 0) > 0;
        damaged += fault.resets > 0;
    }
    printf("%d runs were damaged, %d ended with errors\n", damaged, broke);
    CHECK(damaged > 0 && broke >= damaged / 2);
    dtrain_set_log(NULL, NULL);
}
