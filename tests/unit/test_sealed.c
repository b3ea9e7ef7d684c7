/* Sealed connections: what both sides agree on, and what a relay between them can do. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>

/* What each side says of sealing, and what comes of it: '-' not sealed, 's' sealed, '!' refused. */
TEST(both_sides_find_the_same_whatever_each_says)
{
    static const int views[] = {0, 1, 2, 3, 4, 5}; /* by itself, on, off: on this host, and leaving it */
    static const char *const expected[] = {"-sss--", "ssssss", "ssss!!", "ssss!!", "-s!!--", "-s!!--"};
    dtrain__keys keys;
    dtrain__handshake handshake;
    memset(&keys, 0, sizeof keys);
    memset(&handshake, 0, sizeof handshake);
    for (int a = 0; a < 6; a++)
        for (int b = 0; b < 6; b++) {
            handshake.hello[DTRAIN__HELLO_SECURE] = (unsigned char)views[a];
            handshake.challenge[DTRAIN__CHALLENGE_SECURE] = (unsigned char)views[b];
            keys.token_bytes = 16;
            char found = dtrain__handshake_disagrees(&handshake)       ? '!'
                         : dtrain__handshake_sealed(&handshake, &keys) ? 's'
                                                                       : '-';
            if (found != expected[a][b] || expected[b][a] != expected[a][b])
                TEST_FAIL("%d and %d give %c, expected %c", views[a], views[b], found, expected[a][b]);
            keys.token_bytes = 0;
            CHECK(!dtrain__handshake_sealed(&handshake, &keys));
        }
}

/* A relay between rank 1, which believes it to be rank 0, and rank 0. It knows handshakes and records, and harms one.
 */
enum {
    HONEST = 0,
    FLIP_HEAD,
    FLIP_BODY,
    FLIP_TAG,
    REPLAY,
    SWAP,
    LEAVE_OUT,
    INJECT,
    CUT_BETWEEN,
    CUT_INSIDE,
    FLIP_HELLO,
    FLIP_CHALLENGE,
    PLAY_AGAIN,
    RAW,
    HARMS
};

typedef struct relay {
    int harm, connection, to_root, record; /* which of the relay's connections, which way, which record of it */
    int from, to, steps;                   /* ports; all_reduces */
    int spoken;                            /* rank 1's connection for data is there, by way of the relay */
    int connections, done;                 /* made; harms done */
    int leaked;                            /* the marker was seen */
    int answer;                            /* to a session that was played again */
    unsigned char said[1 << 20];           /* that session */
    size_t said_bytes;
    char texts[4][1024]; /* what the ranks were told */
    int status[4];
    double took[4];
} relay;

typedef struct pipe_end {
    relay *r;
    int in, out, number, to_root;
} pipe_end;

static const uint64_t marker = 0x5ea1ed5ea1ed5ea1u;

static int take_all(int fd, unsigned char *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = read(fd, data + done, bytes - done);
        if (n <= 0 && !(n < 0 && errno == EINTR))
            return 0;
        done += n > 0 ? (size_t)n : 0;
    }
    return 1;
}

static int give_all(int fd, const unsigned char *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = send(fd, data + done, bytes - done, MSG_NOSIGNAL);
        if (n <= 0 && !(n < 0 && errno == EINTR))
            return 0;
        done += n > 0 ? (size_t)n : 0;
    }
    return 1;
}

static int loopback(int port, int listens);

/* Says all that rank 1 has said on this connection once more, on one of its own; returns what the verdict is. */
static int play_again(const relay *r)
{
    unsigned char heard[DTRAIN__CHALLENGE_BYTES + DTRAIN__VERDICT_BYTES];
    int fd = loopback(r->to, 0), whole;
    give_all(fd, r->said, r->said_bytes);
    whole = take_all(fd, heard, sizeof heard);
    close(fd);
    return whole ? heard[DTRAIN__CHALLENGE_BYTES] : -1;
}

/* Keeps what is sent on where it is to be played again. */
static int send_on(const pipe_end *p, const unsigned char *data, size_t bytes)
{
    relay *r = p->r;
    if (r->harm == PLAY_AGAIN && p->to_root && p->number == r->connection && bytes <= sizeof r->said - r->said_bytes) {
        memcpy(r->said + r->said_bytes, data, bytes);
        r->said_bytes += bytes;
    }
    return give_all(p->out, data, bytes);
}

/* Sends on one record, harmed or not; returns 0 when the connection is to end. */
static int harm_record(const pipe_end *p, unsigned char *record, size_t bytes, unsigned char *kept, size_t *kept_bytes)
{
    switch (p->r->harm) {
    case FLIP_HEAD: record[0] ^= 1; break;
    case FLIP_BODY: record[4 + (bytes - 20) / 2] ^= 16; break;
    case FLIP_TAG: record[bytes - 1] ^= 128; break;
    case REPLAY: return give_all(p->out, record, bytes) && give_all(p->out, record, bytes);
    case SWAP: memcpy(kept, record, *kept_bytes = bytes); return 1;
    case LEAVE_OUT: return 1;
    case INJECT: memset(kept, 0, 20), kept[0] = 8; return give_all(p->out, kept, 28) && give_all(p->out, record, bytes);
    case PLAY_AGAIN: p->r->answer = play_again(p->r); break;
    case CUT_BETWEEN: return 0;
    case CUT_INSIDE: give_all(p->out, record, bytes / 2); return 0;
    default: break;
    }
    return give_all(p->out, record, bytes);
}

static int relay_handshake(const pipe_end *p)
{
    static const size_t sizes[2][2] = {{DTRAIN__CHALLENGE_BYTES, DTRAIN__VERDICT_BYTES},
                                       {DTRAIN__HELLO_BYTES, DTRAIN__PROOF_BYTES}};
    unsigned char message[DTRAIN__VERDICT_BYTES];
    for (int i = 0; i < 2; i++) {
        size_t bytes = sizes[p->to_root][i];
        if (!take_all(p->in, message, bytes))
            return 0;
        if (i == 0 && p->r->harm == (p->to_root ? FLIP_HELLO : FLIP_CHALLENGE))
            message[p->to_root ? DTRAIN__HELLO_SECURE : DTRAIN__CHALLENGE_SECURE] ^= DTRAIN__SECURE_ON;
        if (!send_on(p, message, bytes))
            return 0;
    }
    return 1;
}

/* Plain traffic, which has no records. */
static int relay_raw(const pipe_end *p, unsigned char *data, size_t room)
{
    ssize_t n;
    while ((n = read(p->in, data, room)) > 0) {
        for (size_t at = 0; at + 8 <= (size_t)n; at++)
            if (memcmp(data + at, &marker, 8) == 0)
                p->r->leaked = 1;
        if (!give_all(p->out, data, (size_t)n))
            return 0;
    }
    return 1;
}

static void *relay_one_way(void *pointer)
{
    pipe_end *p = (pipe_end *)pointer;
    static __thread unsigned char record[DTRAIN__RECORD_BYTES + 64], kept[DTRAIN__RECORD_BYTES + 64];
    size_t kept_bytes = 0;
    int good = relay_handshake(p);
    if (good && p->r->harm == RAW)
        good = relay_raw(p, record, sizeof record);
    for (int number = 0; good && take_all(p->in, record, 4); number++) {
        size_t bytes = (dtrain__load_le32(record) & 0xffffffu) + DTRAIN__RECORD_EXTRA;
        good = bytes <= sizeof record && take_all(p->in, record + 4, bytes - 4);
        for (size_t at = 0; good && at + 8 <= bytes; at++)
            if (memcmp(record + at, &marker, 8) == 0)
                p->r->leaked = 1;
        int mine = p->r->harm != HONEST && p->number == p->r->connection && p->to_root == p->r->to_root &&
                   number == p->r->record;
        if (good && mine) {
            p->r->done++;
            good = harm_record(p, record, bytes, kept, &kept_bytes);
        } else if (good) {
            good = send_on(p, record, bytes) && (kept_bytes == 0 || give_all(p->out, kept, kept_bytes));
            kept_bytes = 0;
        }
    }
    shutdown(p->out, good ? SHUT_WR : SHUT_RDWR);
    if (!good)
        shutdown(p->in, SHUT_RDWR);
    return NULL;
}

static int loopback(int port, int listens)
{
    struct sockaddr_in address;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (listens)
        return bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 64) == 0 ? fd : -1;
    for (double until = now_s() + 10; connect(fd, (struct sockaddr *)&address, sizeof address) != 0; usleep(1000))
        if (now_s() > until)
            return -1;
    return fd;
}

/* The relay's process, until it is killed. */
static pid_t start_relay(relay *r)
{
    static pipe_end ends[512];
    pthread_t thread;
    int listener;
    r->from = free_port();
    listener = loopback(r->from, 1);
    CHECK(listener >= 0);
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid != 0) {
        close(listener);
        return pid;
    }
    for (int i = 0; i < 512; i += 2) {
        int in = accept(listener, NULL, NULL), out = loopback(r->to, 0);
        if (in < 0 || out < 0)
            _exit(1);
        pipe_end there = {r, in, out, i / 2, 1}, back = {r, out, in, i / 2, 0};
        ends[i] = there;
        ends[i + 1] = back;
        r->connections++;
        pthread_create(&thread, NULL, relay_one_way, &ends[i]);
        pthread_create(&thread, NULL, relay_one_way, &ends[i + 1]);
    }
    _exit(0);
}

static relay *new_relay(int harm, int connection, int to_root, int record)
{
    static relay *shared;
    if (shared == NULL)
        shared = (relay *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(shared, 0, sizeof *shared);
    shared->harm = harm;
    shared->connection = connection;
    shared->to_root = to_root;
    shared->record = record;
    shared->steps = 60;
    return shared;
}

enum { NUMBERS = 9000 };

/* Sums until something is wrong; rank 1 speaks first, so that the connection for data goes by the relay. */
static dtrain_status sums(dtrain_comm *world, relay *r)
{
    static uint64_t x[NUMBERS];
    int rank = dtrain_comm_rank(world);
    dtrain_status status = rank == 1 ? dtrain_send(world, &marker, 8, DTRAIN_U8, 0) : DTRAIN_OK;
    if (rank == 1)
        __atomic_store_n(&r->spoken, 1, __ATOMIC_SEQ_CST);
    while (rank == 0 && !__atomic_load_n(&r->spoken, __ATOMIC_SEQ_CST))
        usleep(200);
    if (rank == 0)
        status = dtrain_recv(world, x, 8, DTRAIN_U8, 1);
    for (int step = 0; status == DTRAIN_OK && step < r->steps; step++) {
        size_t count = step % 3 == 0 ? 1 : step % 3 == 1 ? 3000 : NUMBERS;
        for (size_t i = 0; i < count; i++)
            x[i] = rank == 0 ? 0 : marker;
        status = dtrain_all_reduce(world, x, x, count, DTRAIN_U64, DTRAIN_SUM);
        for (size_t i = 0; status == DTRAIN_OK && i < count; i++)
            if (x[i] != marker) {
                TEST_FAIL("rank %d folded a wrong element in step %d", rank, step);
                break;
            }
    }
    return status;
}

static int under_attack(dtrain_comm *world, scene *s)
{
    relay *r = (relay *)s->user;
    int rank = dtrain_comm_rank(world);
    double begin = now_s();
    r->status[rank] = (int)sums(world, r);
    r->took[rank] = now_s() - begin;
    snprintf(r->texts[rank], sizeof r->texts[rank], "%s", world->error.text);
    return 0;
}

/* Runs two ranks with the relay between; returns how often it did its harm. */
static int attack(relay *r, int secure, int64_t reconnect_ms)
{
    scene s, other;
    scene_begin(&s, 2, 1);
    s.user = r;
    s.desc.secure = secure;
    s.desc.token = "a token of sixteen bytes or more";
    s.desc.reconnect_ms = reconnect_ms;
    s.desc.heartbeat_ms = 2000;
    r->to = atoi(strrchr(s.root, ':') + 1);
    pid_t relaying = start_relay(r), pids[2];
    other = s;
    snprintf(other.root, sizeof other.root, "127.0.0.1:%d", r->from);
    pids[0] = start_rank(&s, 0, under_attack);
    pids[1] = start_rank(&other, 1, under_attack);
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(end_of(pids[rank], 60), 0);
    kill(relaying, SIGKILL);
    waitpid(relaying, NULL, 0);
    return r->done;
}

TEST(a_relay_reads_plain_traffic_and_no_sealed_traffic)
{
    relay *r = new_relay(HONEST, 0, 0, 0);
    attack(r, 1, 0);
    CHECK_EQ(r->status[0], DTRAIN_OK);
    CHECK_EQ(r->status[1], DTRAIN_OK);
    CHECK(r->connections >= 2);
    CHECK(!r->leaked);
    r = new_relay(RAW, 0, 0, 0);
    setenv("DTRAIN_TRANSPORT", "tcp", 1); /* else plain traffic inside a host does not pass the relay */
    attack(r, -1, 0);
    unsetenv("DTRAIN_TRANSPORT");
    CHECK_EQ(r->status[0], DTRAIN_OK);
    CHECK_EQ(r->status[1], DTRAIN_OK);
    CHECK(r->leaked);
}

TEST(whatever_a_relay_does_to_a_record_is_an_error_and_never_a_wrong_element)
{
    static const char *const names[HARMS] = {"",          "head",   "body",        "tag",        "replay", "swap",
                                             "leave out", "inject", "cut between", "cut inside", "",       "",
                                             "",          ""};
    dtrain_set_log(quiet, NULL);
    for (int harm = FLIP_HEAD; harm <= CUT_INSIDE; harm++)
        for (int to_root = 0; to_root < 2; to_root++) {
            relay *r = new_relay(harm, 1, to_root, 7 + harm);
            int tampered = harm != CUT_BETWEEN && harm != CUT_INSIDE;
            if (attack(r, 1, 0) != 1)
                TEST_FAIL("%s: the relay did nothing", names[harm]);
            for (int rank = 0; rank < 2; rank++)
                if (r->status[rank] != (tampered ? DTRAIN_ERR_CORRUPT : DTRAIN_ERR_PEER_LOST) || r->took[rank] > 15 ||
                    (tampered && strstr(r->texts[rank], "a sealed record on it is wrong") == NULL))
                    TEST_FAIL("%s, to rank %d: rank %d after %.1f s: %d, %s", names[harm], 1 - to_root, rank,
                              r->took[rank], r->status[rank], r->texts[rank]);
        }
    dtrain_set_log(dtrain__log_stderr, NULL);
}

TEST(a_changed_record_of_the_control_plane_ends_the_group_and_says_why)
{
    dtrain_set_log(quiet, NULL);
    for (int to_root = 0; to_root < 2; to_root++) {
        relay *r = new_relay(FLIP_BODY, 0, to_root, 2);
        r->steps = 1 << 30;
        CHECK_EQ(attack(r, 1, 0), 1);
        CHECK(r->status[0] != DTRAIN_OK && r->status[1] != DTRAIN_OK);
        CHECK_CONTAINS(r->texts[1 - to_root], "a sealed record on it is wrong");
    }
    dtrain_set_log(dtrain__log_stderr, NULL);
}

TEST(a_connection_that_was_harmed_comes_back_with_other_keys_and_the_right_bits)
{
    dtrain_set_log(quiet, NULL);
    for (int harm = FLIP_HEAD; harm <= CUT_INSIDE; harm++) {
        relay *r = new_relay(harm, 1, harm % 2, 7 + harm);
        CHECK_EQ(attack(r, 1, 5000), 1);
        CHECK_EQ(r->status[0], DTRAIN_OK);
        CHECK_EQ(r->status[1], DTRAIN_OK);
        CHECK(r->connections >= 2);
    }
    dtrain_set_log(dtrain__log_stderr, NULL);
}

TEST(a_session_that_is_played_again_is_denied_and_disturbs_nobody)
{
    dtrain_set_log(quiet, NULL);
    relay *r = new_relay(PLAY_AGAIN, 1, 1, 20);
    CHECK_EQ(attack(r, 1, 0), 1);
    CHECK_EQ(r->answer, DTRAIN_ERR_DENIED);
    CHECK_EQ(r->status[0], DTRAIN_OK);
    CHECK_EQ(r->status[1], DTRAIN_OK);
    dtrain_set_log(dtrain__log_stderr, NULL);
}

static void keep_warning(void *user, dtrain_log_level level, const char *text)
{
    if (level == DTRAIN_LOG_WARN)
        snprintf((char *)user, sizeof((relay *)0)->texts[0], "%s", text);
}

/* A rank's process that does not get in; what it is told comes to `texts`. */
static pid_t start_refused(scene *s, int rank)
{
    relay *r = (relay *)s->user;
    pid_t pid;
    fflush(stdout);
    fflush(stderr);
    pid = fork();
    if (pid != 0)
        return pid;
    dtrain_comm_desc desc = scene_desc(s, rank);
    dtrain_comm *world;
    dtrain_set_log(keep_warning, r->texts[rank]);
    r->status[rank] = (int)dtrain_comm_create(&world, &desc);
    snprintf(r->texts[rank], sizeof r->texts[rank], "%s", dtrain_last_error());
    _exit(0);
}

/* Rank 1 is sent away by rank 0, which says so in its log and goes on to wait. */
static void both_refuse(scene *s, scene *other)
{
    relay *r = (relay *)s->user;
    pid_t root = start_refused(s, 0);
    CHECK_EQ(end_of(start_refused(other, 1), 60), 0);
    for (double until = now_s() + 20; r->texts[0][0] == 0 && now_s() < until; usleep(1000))
        continue;
    kill(root, SIGKILL);
    waitpid(root, NULL, 0);
}

TEST(a_relay_that_changes_what_is_said_of_sealing_is_refused)
{
    dtrain_set_log(quiet, NULL);
    for (int harm = FLIP_HELLO; harm <= FLIP_CHALLENGE; harm++) {
        relay *r = new_relay(harm, 0, 0, 0);
        scene s, other;
        scene_begin(&s, 2, 1);
        s.user = r;
        s.desc.secure = 1;
        s.desc.token = "a token of sixteen bytes or more";
        s.desc.timeout_ms = 1500; /* until then rank 1 tries again */
        r->to = atoi(strrchr(s.root, ':') + 1);
        pid_t relaying = start_relay(r);
        other = s;
        snprintf(other.root, sizeof other.root, "127.0.0.1:%d", r->from);
        both_refuse(&s, &other);
        kill(relaying, SIGKILL);
        waitpid(relaying, NULL, 0);
        CHECK_EQ(r->status[1], DTRAIN_ERR_DENIED);
        CHECK_CONTAINS(r->texts[0], "does not hold this group's token");
    }
    dtrain_set_log(dtrain__log_stderr, NULL);
}

TEST(on_against_off_is_a_mismatch_that_names_both_on_both_sides)
{
    dtrain_set_log(quiet, NULL);
    for (int rank_on = 0; rank_on < 2; rank_on++) {
        relay *r = new_relay(HONEST, 0, 0, 0);
        scene s, other;
        scene_begin(&s, 2, 1);
        s.user = r;
        s.desc.token = "a token of sixteen bytes or more";
        other = s;
        s.desc.secure = rank_on == 0 ? 1 : -1;
        other.desc.secure = -s.desc.secure;
        both_refuse(&s, &other);
        CHECK_EQ(r->status[1], DTRAIN_ERR_MISMATCH);
        for (int rank = 0; rank < 2; rank++) {
            CHECK_CONTAINS(r->texts[rank], rank_on == 1 ? "has DTRAIN_SECURE or desc.secure on, rank 0 has it off"
                                                        : "has DTRAIN_SECURE or desc.secure off, rank 0 has it on");
            CHECK_CONTAINS(r->texts[rank], "give every rank the same");
        }
    }
    dtrain_set_log(dtrain__log_stderr, NULL);
}

TEST(sealing_without_a_token_is_refused_at_once)
{
    dtrain_comm_desc desc;
    dtrain_comm *world;
    memset(&desc, 0, sizeof desc);
    desc.world_size = 2;
    desc.root = "127.0.0.1:9";
    desc.secure = 1;
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "desc.secure = 1 asks for sealed traffic and there is no token");
    desc.secure = 2;
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "secure is 2; expected 1 (on), 0 (automatic) or -1 (off)");
}

static int is_killed(dtrain_comm *world, scene *s)
{
    float x[5000] = {0};
    dtrain_status status = DTRAIN_OK;
    double begin = 0;
    (void)s;
    for (int step = 0; status == DTRAIN_OK && step < 100000; step++) {
        begin = now_s();
        if (step == 20 && dtrain_comm_rank(world) == 1)
            kill(getpid(), SIGKILL);
        status = dtrain_all_reduce(world, x, x, 5000, DTRAIN_F32, DTRAIN_SUM);
    }
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(world->error.text, "rank 1 (");
    CHECK_WITHIN(now_s() - begin, 2);
    return 0;
}

TEST(a_killed_rank_of_a_sealed_group_is_named_within_two_seconds)
{
    scene s;
    pid_t pids[3];
    scene_begin(&s, 3, 1);
    s.desc.secure = 1;
    s.desc.token = "a token of sixteen bytes or more";
    for (int rank = 0; rank < 3; rank++)
        pids[rank] = start_rank(&s, rank, is_killed);
    for (int rank = 0; rank < 3; rank++)
        CHECK_EQ(end_of(pids[rank], 30), rank == 1 ? 128 + SIGKILL : 0);
}

/* Sends of all sizes about records and stripes both ways, byte by byte at the edges, and sums. */
static int sizes_and_edges(dtrain_comm *world, scene *s)
{
    static const size_t sizes[] = {1,
                                   1,
                                   1,
                                   15,
                                   16,
                                   17,
                                   63,
                                   16383,
                                   16384,
                                   16385,
                                   131072,
                                   131073,
                                   (1 << 18) - 70,
                                   (1 << 18) - 1,
                                   1,
                                   1,
                                   1 << 18,
                                   (1 << 18) + 1,
                                   3 << 18,
                                   1};
    static unsigned char out[3 << 18], in[3 << 18];
    int peer = 1 - dtrain_comm_rank(world), bad = 0;
    uint64_t x[64], expected = 1;
    (void)s;
    for (size_t round = 0; round < 3; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            for (size_t at = 0; at < sizes[i]; at++)
                out[at] = (unsigned char)(at * 31 + (at >> 9) + i + round + (size_t)peer);
            CHECK_EQ(dtrain_exchange(world, out, sizes[i], peer, in, sizes[i], peer, DTRAIN_U8), DTRAIN_OK);
            for (size_t at = 0; at < sizes[i]; at++)
                bad += in[at] != (unsigned char)(at * 31 + (at >> 9) + i + round + (size_t)(1 - peer));
        }
    CHECK_EQ(bad, 0);
    for (int step = 0; step < 20; step++, expected *= 2) {
        x[63] = expected;
        CHECK_EQ(dtrain_all_reduce(world, x + 63, x + 63, 1, DTRAIN_U64, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(x[63], 2 * expected);
    }
    return 0;
}

TEST(records_and_stripes_of_all_sizes_arrive_over_many_lanes_and_by_polling)
{
    static const int lanes[] = {1, 2, 8};
    for (int i = 0; i < 6; i++) {
        scene s;
        scene_begin(&s, 2, i % 2);
        s.desc.secure = 1;
        s.desc.token = "a token of sixteen bytes or more";
        s.desc.connections = lanes[i / 2];
        s.desc.progress = i % 2 ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        run_ranks(&s, sizes_and_edges);
    }
}

/* Sends on from `gone` and reads what comes, until all of data is there; returns whether it is, and no more. */
static int goes_on(dtrain__stream *stream, int reader, const unsigned char *data, size_t gone, size_t bytes)
{
    static unsigned char heard[1 << 17];
    size_t came = 0;
    for (ssize_t n = 0; n >= 0 && came<sizeof heard; came += n> 0 ? (size_t)n : 0) {
        if (gone < bytes && (n = dtrain__stream_send(stream, data + gone, bytes - gone, 0)) > 0)
            gone += (size_t)n;
        n = recv(reader, heard + came, sizeof heard - came, MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN && (gone < bytes || came < bytes))
            n = 0;
    }
    return gone == bytes && came == bytes && memcmp(heard, data, bytes) == 0;
}

TEST(a_stream_whose_next_connection_is_not_sealed_sends_each_byte_once)
{
    static unsigned char data[100010];
    dtrain_allocator allocator;
    dtrain__stream stream;
    int ends[2], next[2], little = 4096;
    memset(&allocator, 0, sizeof allocator);
    memset(&stream, 0, sizeof stream);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 7 + (i >> 8));
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, next) == 0);
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
    CHECK(dtrain__os_manners(ends[0]) == 0 && dtrain__os_manners(next[0]) == 0);
    stream.fd = ends[0];
    stream.seal = (dtrain__seal *)dtrain__alloc(&allocator, sizeof *stream.seal);
    stream.replay = (unsigned char *)dtrain__alloc(&allocator, DTRAIN__REPLAY_BYTES);
    CHECK_EQ(dtrain__stream_send(&stream, data, 100000, 0), 99999); /* all is sealed, and some of it waits */
    dtrain__stream_cut(&stream);
    dtrain__stream_unseal(&allocator, &stream);
    CHECK(dtrain__stream_resume(&stream, next[0], 0)); /* the peer has received nothing */
    CHECK(goes_on(&stream, next[1], data, 99999, sizeof data));
    dtrain__stream_cut(&stream);
    dtrain__stream_free(&allocator, &stream);
    close(ends[1]);
    close(next[1]);
}

static uint64_t blocks;

static void *count_blocks(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    __atomic_add_fetch(&blocks, new_bytes > 0, __ATOMIC_SEQ_CST);
    return test_resize(pointer, old_bytes, new_bytes, align);
}

static int warm_loop(dtrain_comm *world, scene *s)
{
    static float x[70000];
    int busy = 0; /* rounds that allocated: the first, and those of the first control messages */
    (void)s;
    for (int round = 0; round < 20; round++) {
        uint64_t before = __atomic_load_n(&blocks, __ATOMIC_SEQ_CST);
        for (int step = 0; step < 10; step++)
            CHECK_EQ(dtrain_all_reduce(world, x, x, 70000, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        busy += __atomic_load_n(&blocks, __ATOMIC_SEQ_CST) > before;
    }
    CHECK(busy > 0 && busy < 5);
    return 0;
}

TEST(a_warm_loop_over_sealed_connections_allocates_nothing)
{
    scene s;
    dtrain_allocator allocator;
    memset(&allocator, 0, sizeof allocator);
    allocator.resize = count_blocks;
    scene_begin(&s, 3, 1);
    s.desc.allocator = &allocator;
    s.desc.secure = 1;
    s.desc.token = "a token of sixteen bytes or more";
    run_ranks(&s, warm_loop);
}

static int poor; /* this process has no memory for records */

static void *refuse_records(void *user, void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    (void)user;
    return poor && new_bytes == sizeof(dtrain__seal) + 64 ? NULL : test_resize(pointer, old_bytes, new_bytes, align);
}

static int without_memory(dtrain_comm *world, scene *s)
{
    float x = 1;
    poor = dtrain_comm_rank(world) == 1; /* before rank 0 can call: its connections for the world are sealed */
    scene_meet(s->ranks);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_ERR_MEMORY);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1 has no memory to seal its connection to rank 0");
    return 0;
}

TEST(a_rank_without_memory_to_seal_a_connection_is_the_one_that_is_named)
{
    scene s;
    dtrain_allocator allocator;
    memset(&allocator, 0, sizeof allocator);
    allocator.resize = refuse_records;
    scene_begin(&s, 2, 1);
    s.desc.allocator = &allocator;
    s.desc.secure = 1;
    s.desc.token = "a token of sixteen bytes or more";
    run_ranks(&s, without_memory);
}

static int told;

static void count_told(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    if (level == DTRAIN_LOG_INFO && strstr(text, "connections are sealed") != NULL &&
        strstr(text, "DTRAIN_SECURE=0 or desc.secure = -1 on every rank turns that off") != NULL)
        __atomic_add_fetch(&told, 1, __ATOMIC_SEQ_CST);
}

static int says_it_once(dtrain_comm *world, scene *s)
{
    float x = 1;
    (void)s;
    for (double until = now_s() + 20; __atomic_load_n(&told, __ATOMIC_SEQ_CST) == 0 && now_s() < until; usleep(1000))
        continue;
    for (int step = 0; step < 20; step++)
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_MEAN), DTRAIN_OK);
    CHECK_EQ(__atomic_load_n(&told, __ATOMIC_SEQ_CST), 1);
    return 0;
}

TEST(each_process_says_once_that_it_seals_and_how_to_turn_that_off)
{
    scene s;
    scene_begin(&s, 3, 1);
    s.desc.secure = 1;
    s.desc.token = "a token of sixteen bytes or more";
    dtrain_set_log(count_told, NULL);
    run_ranks(&s, says_it_once);
    dtrain_set_log(dtrain__log_stderr, NULL);
}
