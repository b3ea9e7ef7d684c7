/* What strangers may do to a group: nothing. Doors on their own, then a listening port under attack while a group
 * forms and trains. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>

static const char token[] = "a secret that the strangers lack";

typedef struct parley {
    dtrain__handshake initiator, acceptor;
    dtrain__keys keys[2]; /* of the initiator, rank 1, and of the acceptor, rank 0 */
    unsigned char said[4][DTRAIN__VERDICT_BYTES];
} parley;

static void parley_begin(parley *p)
{
    memset(p, 0, sizeof *p);
    for (int i = 0; i < 2; i++) {
        memcpy(p->keys[i].token, token, sizeof token);
        p->keys[i].token_bytes = sizeof token - 1;
        p->keys[i].world_size = 2;
        p->keys[i].rank = 1 - i;
    }
    p->initiator.fd = p->acceptor.fd = -1;
    p->initiator.purpose = DTRAIN__PURPOSE_CONTROL;
    p->acceptor.state = DTRAIN__HANDSHAKE_HELLO;
    CHECK_EQ(dtrain__os_random(p->keys[1].run, sizeof p->keys[1].run), 0);
    CHECK_EQ(dtrain__handshake_begin(&p->initiator, &p->keys[0]), 0);
}

/* Hands a message to a handshake as if it had come over the wire. */
static void hand(dtrain__handshake *handshake, const dtrain__keys *keys, const unsigned char *message)
{
    memcpy(handshake->in, message, dtrain__handshake_wants(handshake));
    dtrain__handshake_take(handshake, keys);
}

/* Runs a whole handshake; what was said stays in p->said. */
static void parley_run(parley *p)
{
    parley_begin(p);
    memcpy(p->said[0], p->initiator.out, DTRAIN__HELLO_BYTES);
    hand(&p->acceptor, &p->keys[1], p->said[0]);
    memcpy(p->said[1], p->acceptor.out, DTRAIN__CHALLENGE_BYTES);
    hand(&p->initiator, &p->keys[0], p->said[1]);
    memcpy(p->said[2], p->initiator.out, DTRAIN__PROOF_BYTES);
    hand(&p->acceptor, &p->keys[1], p->said[2]);
    if (p->acceptor.state == DTRAIN__HANDSHAKE_PROVED)
        dtrain__handshake_answer(&p->acceptor, &p->keys[1], DTRAIN_OK, "");
    memcpy(p->said[3], p->acceptor.out, DTRAIN__VERDICT_BYTES);
    hand(&p->initiator, &p->keys[0], p->said[3]);
}

TEST(ranks_with_one_token_admit_each_other)
{
    parley p;
    parley_run(&p);
    CHECK_EQ(p.acceptor.state, DTRAIN__HANDSHAKE_OPEN);
    CHECK_EQ(p.acceptor.error.status, DTRAIN_OK);
    CHECK_EQ(p.initiator.state, DTRAIN__HANDSHAKE_OPEN);
    CHECK_EQ(p.initiator.error.status, DTRAIN_OK);
}

TEST(a_recorded_handshake_proves_nothing)
{
    parley recorded, fresh;
    parley_run(&recorded);
    parley_begin(&fresh);
    memcpy(fresh.keys[1].run, recorded.keys[1].run, sizeof fresh.keys[1].run); /* even in the same run */
    hand(&fresh.acceptor, &fresh.keys[1], recorded.said[0]);
    CHECK_EQ(fresh.acceptor.state, DTRAIN__HANDSHAKE_PROOF);
    hand(&fresh.acceptor, &fresh.keys[1], recorded.said[2]);
    CHECK_EQ(fresh.acceptor.error.status, DTRAIN_ERR_DENIED);
    /* nor does a recorded acceptor */
    hand(&fresh.initiator, &fresh.keys[0], recorded.said[1]);
    hand(&fresh.initiator, &fresh.keys[0], recorded.said[3]);
    CHECK_EQ(fresh.initiator.state, DTRAIN__HANDSHAKE_CLOSED);
    CHECK_EQ(fresh.initiator.error.status, DTRAIN_ERR_DENIED);
}

TEST(every_changed_bit_of_a_handshake_is_noticed)
{
    static const size_t sizes[] = {DTRAIN__HELLO_BYTES, DTRAIN__CHALLENGE_BYTES, DTRAIN__PROOF_BYTES,
                                   DTRAIN__VERDICT_BYTES};
    int admitted = 0;
    for (size_t message = 0; message < 4; message++)
        for (size_t at = 0; at < sizes[message]; at++) {
            parley p;
            unsigned char changed[DTRAIN__VERDICT_BYTES];
            parley_begin(&p);
            for (size_t m = 0; m < 4; m++) {
                dtrain__handshake *from = m % 2 == 0 ? &p.initiator : &p.acceptor;
                dtrain__handshake *to = m % 2 == 0 ? &p.acceptor : &p.initiator;
                memcpy(changed, from->out, sizes[m]);
                if (m == message)
                    changed[at] ^= (unsigned char)(1 << at % 8);
                if (dtrain__handshake_wants(to) == sizes[m])
                    hand(to, m % 2 == 0 ? &p.keys[1] : &p.keys[0], changed);
                if (p.acceptor.state == DTRAIN__HANDSHAKE_PROVED)
                    dtrain__handshake_answer(&p.acceptor, &p.keys[1], DTRAIN_OK, "");
            }
            admitted += p.initiator.state == DTRAIN__HANDSHAKE_OPEN && p.initiator.error.status == DTRAIN_OK;
        }
    CHECK_EQ(admitted, 0);
}

TEST(our_own_challenge_reflected_proves_nothing)
{
    parley p, other;
    parley_begin(&p);
    parley_begin(&other);
    /* The stranger has this acceptor's challenge answered by a rank that wanted somebody else. */
    hand(&p.acceptor, &p.keys[1], p.initiator.out);
    hand(&other.initiator, &other.keys[0], p.acceptor.out);
    CHECK_EQ(other.initiator.state, DTRAIN__HANDSHAKE_VERDICT);
    hand(&p.acceptor, &p.keys[1], other.initiator.out);
    CHECK_EQ(p.acceptor.error.status, DTRAIN_ERR_DENIED);
}

TEST(another_version_or_byte_order_is_named)
{
    parley p;
    parley_begin(&p);
    p.initiator.out[8] = 10;
    hand(&p.acceptor, &p.keys[1], p.initiator.out);
    CHECK_EQ(p.acceptor.error.status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(p.acceptor.error.text, "wire version 10, this rank 9: build both from one dtrain.h");
    CHECK_EQ(p.acceptor.out_bytes, DTRAIN__CHALLENGE_BYTES); /* the other side hears our version */
    parley_begin(&p);
    p.initiator.out[10] = (unsigned char)(3 - p.initiator.out[10]);
    hand(&p.acceptor, &p.keys[1], p.initiator.out);
    CHECK_CONTAINS(p.acceptor.error.text, "ranks of one group need one byte order");
    parley_begin(&p);
    memcpy(p.said[1], p.initiator.out, DTRAIN__CHALLENGE_BYTES); /* begins alike */
    p.said[1][8] = 10;
    hand(&p.initiator, &p.keys[0], p.said[1]);
    CHECK_EQ(p.initiator.error.status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(p.initiator.error.text, "wire version 10");
}

/* One attacker, at the port of s->root, until killed. */
static void attack(scene *s, uint64_t seed)
{
    dtrain__address address;
    struct rlimit files;
    int count, fds[1000], open_now = 0, fd;
    unsigned char bytes[512];
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    dtrain__net_look_up(s->root, 0, &address, &count);
    for (uint64_t turn = 0;; turn++) {
        uint64_t dice = dtrain_random_u64(seed, turn);
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (unsigned char)dtrain_random_u64(seed + 1, turn * sizeof bytes + i);
        if (turn % 500 == 0) /* a thousand at once, and silence */
            while (open_now < 1000 && dtrain__net_connect(&address, &fds[open_now]) == 0)
                open_now++;
        while (turn % 500 == 250 && open_now > 0)
            close(fds[--open_now]);
        if (dtrain__net_connect(&address, &fd) != 0) {
            usleep(1000);
            continue;
        }
        for (int wait = 0; wait < 20 && dtrain__net_connected(fd) == EINPROGRESS; wait++)
            usleep(100);
        if (dice % 4 > 0)
            memcpy(bytes, dtrain__handshake_magic, 8);
        if (dice % 4 > 1) { /* a hello like a rank's, then a made-up proof, or the greatest lengths */
            dtrain__put_le(bytes + 8, DTRAIN__WIRE_VERSION, 2);
            bytes[10] = dtrain__byte_order();
            bytes[11] = (unsigned char)(dice >> 8 & 3);
            dtrain__put_le(bytes + 12, dice >> 16 & 3, 4);
            dtrain__put_le(bytes + 16, dice % 4 == 3 ? UINT64_MAX : 0, 4);
            dtrain__put_le(bytes + 20, 3, 4);
        }
        dtrain__os_send(fd, bytes, dice >> 32 & 1 ? sizeof bytes : dice >> 33 & 127, 0);
        usleep((useconds_t)(dice >> 40 & 1023));
        close(fd);
    }
}

static int trains_on(dtrain_comm *world, scene *s)
{
    enum { COUNT = 3000 };
    static float x[COUNT];
    double until = now_s() + 3;
    int steps = 0, most_handshakes = 0, go_on = 1;
    (void)s;
    while (go_on) {
        float more = now_s() < until;
        for (int i = 0; i < COUNT; i++)
            x[i] = (float)(dtrain_comm_rank(world) + i + steps);
        if (dtrain_all_reduce(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM) != DTRAIN_OK) {
            TEST_FAIL("step %d: %s", steps, world->error.text);
            return 1;
        }
        CHECK(x[0] == (float)(3 + 3 * steps) && x[COUNT - 1] == (float)(3 + 3 * (steps + COUNT - 1)));
        CHECK_EQ(dtrain_all_reduce(world, &more, &more, 1, DTRAIN_F32, DTRAIN_MIN), DTRAIN_OK);
        go_on = more > 0;
        steps++;
        pthread_mutex_lock(&CHANNEL(world)->hub->mutex);
        if (CHANNEL(world)->hub->inbound > most_handshakes)
            most_handshakes = CHANNEL(world)->hub->inbound;
        pthread_mutex_unlock(&CHANNEL(world)->hub->mutex);
    }
    CHECK(steps > 50);
    CHECK(most_handshakes <= DTRAIN__HANDSHAKES);
    CHECK(dtrain_comm_allocator(world)->peak_bytes < (size_t)1 << 20);
    return 0;
}

TEST(a_group_under_attack_forms_and_trains_and_never_notices)
{
    scene s;
    pid_t pids[3], attackers[2];
    scene_begin(&s, 3, 1);
    s.desc.token = token;
    dtrain_set_log(quiet, NULL);
    for (int i = 0; i < 2; i++) {
        fflush(stdout);
        if ((attackers[i] = fork()) == 0)
            attack(&s, 100 + (uint64_t)i);
    }
    for (int rank = 0; rank < 3; rank++) {
        pids[rank] = start_rank(&s, rank, trains_on);
        usleep(200000);
    }
    for (int rank = 0; rank < 3; rank++)
        CHECK_EQ(end_of(pids[rank], 40), 0);
    for (int i = 0; i < 2; i++) {
        kill(attackers[i], SIGKILL);
        end_of(attackers[i], 5);
    }
    dtrain_set_log(NULL, NULL);
}

/* ---- between a rank and the root's address ----
 *
 * A process takes the connections of rank 1 and makes one to rank 0 for each. To some it does one of these harms. */

typedef struct harm {
    int to_root, at; /* flips a bit of this byte on the way to rank 0, or back */
} harm;

enum {
    ANSWERS = -1,
    REFUSES = -2
}; /* as `at`: it answers itself, like a web server, or like a rank without the token */

static const harm harms[] = {{0, 0},
                             {0, 12},
                             {0, 40},
                             {0, DTRAIN__CHALLENGE_BYTES},
                             {1, 48},
                             {1, DTRAIN__HELLO_BYTES + 50},
                             {0, ANSWERS},
                             {0, REFUSES}};

#define HARMS ((int)(sizeof harms / sizeof harms[0]))

typedef struct between {
    int from, to;          /* ports */
    int harmed;            /* how many connections were harmed; HARMS: it is honest */
    int cuts;              /* counts up: all connections end */
    unsigned char run[16]; /* the last that rank 0 named */
} between;

typedef struct connection {
    between *b;
    int fds[2]; /* rank 1's, rank 0's */
    int harm;
} connection;

static int port_of_loopback(int port, int listens)
{
    struct sockaddr_in address;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (listens ? bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 64) == 0
                : connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

/* Answers in rank 0's place: with its version, rank and run, and a no that nothing proves. */
static void answers(const connection *c)
{
    unsigned char said[512], text[DTRAIN__CHALLENGE_BYTES + DTRAIN__VERDICT_BYTES];
    memset(text, 0, sizeof text);
    memcpy(text, harms[c->harm].at == ANSWERS ? "HTTP/1.1" : "dtrain\r\n", 8);
    text[8] = DTRAIN__WIRE_VERSION;
    text[10] = dtrain__byte_order();
    memcpy(text + 16, c->b->run, sizeof c->b->run);
    text[DTRAIN__CHALLENGE_BYTES] = DTRAIN_ERR_MISMATCH;
    send(c->fds[0], text, sizeof text, MSG_NOSIGNAL);
    while (recv(c->fds[0], said, sizeof said, 0) > 0)
        continue;
}

static void passes_on(connection *c)
{
    unsigned char data[4096];
    int64_t at[2] = {0, 0}; /* bytes to rank 0, and back */
    int cuts = __atomic_load_n(&c->b->cuts, __ATOMIC_SEQ_CST);
    while (cuts == __atomic_load_n(&c->b->cuts, __ATOMIC_SEQ_CST)) {
        struct pollfd fds[2] = {{c->fds[0], POLLIN, 0}, {c->fds[1], POLLIN, 0}};
        poll(fds, 2, 5);
        for (int side = 0; side < 2; side++) {
            ssize_t n = fds[side].revents != 0 ? recv(c->fds[side], data, sizeof data, 0) : -1;
            if (n == 0 || (n < 0 && fds[side].revents != 0))
                return;
            int64_t flip = c->harm < HARMS && harms[c->harm].to_root == !side ? harms[c->harm].at - at[side] : -1;
            if (side == 1 && at[1] == 0 && n >= 32 && c->harm == HARMS)
                memcpy(c->b->run, data + 16, sizeof c->b->run);
            if (n > 0 && flip >= 0 && flip < n)
                data[flip] ^= 1;
            if (n > 0 && send(c->fds[1 - side], data, (size_t)n, MSG_NOSIGNAL) != n)
                return;
            at[side] += n > 0 ? n : 0;
        }
    }
}

static void *connection_main(void *pointer)
{
    connection *c = (connection *)pointer;
    if (c->harm < HARMS && harms[c->harm].at < 0)
        answers(c);
    else
        passes_on(c);
    close(c->fds[0]);
    close(c->fds[1]);
    free(c);
    return NULL;
}

static pid_t start_between(between *b)
{
    b->from = free_port();
    int listener = port_of_loopback(b->from, 1);
    CHECK(listener >= 0);
    fflush(stdout);
    pid_t pid = fork();
    while (pid == 0) {
        connection *c = (connection *)malloc(sizeof *c);
        pthread_t thread;
        c->b = b;
        c->fds[0] = accept(listener, NULL, NULL);
        c->fds[1] = port_of_loopback(b->to, 0);
        c->harm = b->harmed;
        if (c->fds[0] < 0 || c->fds[1] < 0) { /* rank 0 does not listen yet */
            close(c->fds[0]);
            free(c);
            continue;
        }
        b->harmed += b->harmed < HARMS;
        pthread_create(&thread, NULL, connection_main, c);
        pthread_detach(thread);
    }
    close(listener);
    return pid;
}

/* Adds up; then, with reconnect_ms, loses its connections and finds a stranger in rank 0's place for a while. */
static int adds_up(dtrain_comm *world, scene *s)
{
    between *b = (between *)s->user;
    int rank = dtrain_comm_rank(world);
    float x = 1;
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(x == 2);
    CHECK_EQ(__atomic_load_n(&b->harmed, __ATOMIC_SEQ_CST), HARMS);
    scene_meet(s->ranks);
    if (s->desc.reconnect_ms == 0)
        return 0;
    if (rank == 1) {
        __atomic_store_n(&b->harmed, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&b->cuts, 1, __ATOMIC_SEQ_CST);
    }
    for (double until = now_s() + 30; __atomic_load_n(&b->harmed, __ATOMIC_SEQ_CST) < HARMS && now_s() < until;)
        usleep(1000);
    if (rank == 1) /* over the control connection */
        CHECK_EQ(dtrain_store_set(world, "key", "value", 5), DTRAIN_OK);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(x == 4);
    return 0;
}

TEST(only_a_no_that_is_proved_ends_a_try_to_reach_rank_0)
{
    between *b = (between *)mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    dtrain_set_log(quiet, NULL);
    for (int reconnects = 0; reconnects < 2; reconnects++) {
        scene s, other;
        pid_t pids[2];
        memset(b, 0, sizeof *b);
        scene_begin(&s, 2, 1);
        s.user = b;
        s.desc.token = token;
        s.desc.timeout_ms = test_ms(40000);
        s.desc.reconnect_ms = reconnects ? test_ms(40000) : 0;
        b->to = atoi(strrchr(s.root, ':') + 1);
        pid_t proxy = start_between(b);
        other = s;
        snprintf(other.root, sizeof other.root, "127.0.0.1:%d", b->from);
        for (int rank = 0; rank < 2; rank++)
            pids[rank] = start_rank(rank == 0 ? &s : &other, rank, adds_up);
        for (int rank = 0; rank < 2; rank++)
            CHECK_EQ(end_of(pids[rank], 60), 0);
        kill(proxy, SIGKILL);
        end_of(proxy, 5);
    }
    dtrain_set_log(NULL, NULL);
    munmap(b, sizeof *b);
}
