/* What strangers may do to a group: nothing. Doors on their own, then a listening port under attack while a group
 * forms and trains. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

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
