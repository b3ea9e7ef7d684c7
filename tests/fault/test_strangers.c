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
    p.initiator.out[8] = 12;
    hand(&p.acceptor, &p.keys[1], p.initiator.out);
    CHECK_EQ(p.acceptor.error.status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(p.acceptor.error.text, "wire version 12, this rank 11: build both from one dtrain.h");
    CHECK_EQ(p.acceptor.out_bytes, DTRAIN__CHALLENGE_BYTES); /* the other side hears our version */
    parley_begin(&p);
    p.initiator.out[10] = (unsigned char)(3 - p.initiator.out[10]);
    hand(&p.acceptor, &p.keys[1], p.initiator.out);
    CHECK_CONTAINS(p.acceptor.error.text, "ranks of one group need one byte order");
    parley_begin(&p);
    memcpy(p.said[1], p.initiator.out, DTRAIN__CHALLENGE_BYTES); /* begins alike */
    p.said[1][8] = 12;
    hand(&p.initiator, &p.keys[0], p.said[1]);
    CHECK_EQ(p.initiator.error.status, DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(p.initiator.error.text, "wire version 12");
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

static int handshakes_of(dtrain__hub *hub)
{
    int count = 0;
    pthread_mutex_lock(&hub->mutex);
    for (const dtrain__handshake *at = hub->handshakes; at != NULL; at = at->next)
        count++;
    pthread_mutex_unlock(&hub->mutex);
    return count;
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
        int handshakes = handshakes_of(CHANNEL(world)->hub);
        most_handshakes = handshakes > most_handshakes ? handshakes : most_handshakes;
    }
    CHECK(steps > 50);
    CHECK(most_handshakes <= 4 * (DTRAIN__HANDSHAKES + 3)); /* each of four stages has room for that many */
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

/* ---- many at the door ---- */

/* A connection to rank 0 from an address of this machine's. */
static int knocks(const char *from, int port)
{
    struct sockaddr_in here, there;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&here, 0, sizeof here);
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = inet_addr(from);
    there = here;
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    there.sin_port = htons((uint16_t)port);
    CHECK_EQ(bind(fd, (struct sockaddr *)&here, sizeof here), 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&there, sizeof there), 0);
    return fd;
}

/* Advances a rank's handshake until it is in the state, or closed. */
static void until(dtrain__handshake *handshake, const dtrain__keys *keys, dtrain__handshake_state state)
{
    for (double end = now_s() + 20; handshake->state != state && handshake->state != DTRAIN__HANDSHAKE_CLOSED;) {
        dtrain__handshake_step(handshake, keys);
        CHECK(now_s() < end);
        usleep(50);
    }
}

/* Ranks 1 to `ranks` say hello and wait. Strangers come meanwhile: silent ones, and others that say hello as well. Then
 * the ranks prove themselves. None was driven out. */
static void all_prove_themselves(int ranks, int strangers)
{
    static dtrain__handshake handshakes[100];
    dtrain__keys keys[100];
    int fds[300], admitted = 0;
    scene s;
    dtrain_comm *world;
    scene_begin(&s, ranks + 1, 1);
    s.desc.token = token;
    dtrain_comm_desc desc = scene_desc(&s, 0);
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    int port = atoi(strrchr(s.root, ':') + 1);
    for (int i = 0; i < ranks; i++) {
        memset(&keys[i], 0, sizeof keys[i]);
        memset(&handshakes[i], 0, sizeof handshakes[i]);
        memcpy(keys[i].token, token, sizeof token);
        keys[i].token_bytes = sizeof token - 1;
        keys[i].rank = 1 + i;
        keys[i].world_size = ranks + 1;
        handshakes[i].purpose = DTRAIN__PURPOSE_CONTROL;
        handshakes[i].fd = knocks("127.0.0.1", port);
        CHECK_EQ(dtrain__os_manners(handshakes[i].fd), 0);
        CHECK_EQ(dtrain__handshake_begin(&handshakes[i], &keys[i]), 0);
        while (handshakes[i].out_done < handshakes[i].out_bytes)
            handshakes[i].out_done += (size_t)send(handshakes[i].fd, handshakes[i].out + handshakes[i].out_done,
                                                   handshakes[i].out_bytes - handshakes[i].out_done, MSG_NOSIGNAL);
        struct pollfd one = {handshakes[i].fd, POLLIN, 0};
        CHECK(poll(&one, 1, test_ms(20000)) == 1); /* the challenge is here */
    }
    for (int i = 0; i < strangers; i++)
        fds[i] = knocks("127.0.0.1", port);
    for (int i = strangers; i < 2 * strangers; i++) {
        unsigned char challenge[DTRAIN__CHALLENGE_BYTES];
        fds[i] = knocks("127.0.0.2", port);
        send(fds[i], handshakes[0].hello, DTRAIN__HELLO_BYTES, MSG_NOSIGNAL);
        recv(fds[i], challenge, sizeof challenge, 0); /* rank 0 has seen it, and those before it */
    }
    for (int i = 0; i < ranks; i++) {
        until(&handshakes[i], &keys[i], DTRAIN__HANDSHAKE_OPEN);
        admitted += handshakes[i].state == DTRAIN__HANDSHAKE_OPEN;
    }
    CHECK_EQ(admitted, ranks);
    CHECK(handshakes_of(CHANNEL(world)->hub) <= 4 * (DTRAIN__HANDSHAKES + ranks + 1));
    for (int i = 0; i < 2 * strangers; i++)
        close(fds[i]);
    for (int i = 0; i < ranks; i++)
        dtrain__handshake_close(&handshakes[i]);
    dtrain_comm_destroy(world);
}

TEST(more_ranks_than_64_prove_themselves_at_once)
{
    dtrain_set_log(quiet, NULL);
    all_prove_themselves(100, 0);
    dtrain_set_log(NULL, NULL);
}

#ifdef __linux__ /* all of 127.0.0.0/8 is this machine's */
TEST(strangers_do_not_drive_out_ranks_that_are_about_to_prove_themselves)
{
    dtrain_set_log(quiet, NULL);
    all_prove_themselves(30, 150);
    dtrain_set_log(NULL, NULL);
}
#endif

TEST(waits_between_tries_double_and_are_longer_or_shorter_by_chance)
{
    int64_t wait_ns = 0, first = dtrain__hub_again_ns(&wait_ns, 0), expected = 4000000;
    int differ = 0;
    CHECK(first >= expected / 2 && first <= expected / 2 * 3);
    for (int i = 0; i < 20; i++) {
        int64_t again = dtrain__hub_again_ns(&wait_ns, 1000000000) - 1000000000;
        expected = 2 * expected < 512000000 ? 2 * expected : 500000000;
        CHECK(again >= expected / 2 && again <= expected / 2 * 3);
        differ += again != expected;
    }
    CHECK(differ > 10);
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

static const harm harms[] = {
    {0, 0},       {0, 12},     {0, 40}, {0, DTRAIN__CHALLENGE_BYTES}, {1, 48}, {1, DTRAIN__HELLO_BYTES + 50},
    {0, ANSWERS}, {0, REFUSES}};

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
