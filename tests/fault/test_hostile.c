/* A member that turns hostile: a process that was admitted and then sends frames that it has no right to send, or asks
 * and never reads. It is lost, or has what it asked for; the others go on. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

/* Sends a frame of this member's to the leader, as its hub would. */
static void say(dtrain_comm *world, int type, const void *body, size_t bytes)
{
    dtrain__hub *hub = CHANNEL(world)->hub;
    dtrain__member *leader = &hub->members[hub->leader];
    pthread_mutex_lock(&hub->mutex);
    size_t begin = dtrain__frame_open(hub, leader, type);
    dtrain__give_bytes(hub, &leader->out, body, bytes);
    CHECK(dtrain__frame_close(leader, begin));
    dtrain__hub_flush(hub, hub->leader);
    pthread_mutex_unlock(&hub->mutex);
}

/* A frame's body under way. */
typedef struct body {
    unsigned char data[4096];
    size_t bytes;
} body;

static void put(body *b, uint64_t value, int bytes)
{
    dtrain__put_le(b->data + b->bytes, value, bytes);
    b->bytes += (size_t)bytes;
}

static void put_text(body *b, int length_bytes, const char *text)
{
    put(b, strlen(text), length_bytes);
    memcpy(b->data + b->bytes, text, strlen(text));
    b->bytes += strlen(text);
}

static void put_consent(body *b, uint64_t channel, uint64_t number, int decided, int count)
{
    b->bytes = 0;
    put(b, channel, 8);
    put(b, number, 8);
    put(b, DTRAIN__CONSENT_AGREE, 1);
    put(b, (uint64_t)decided, 1);
    put(b, DTRAIN_OK, 2);
    put(b, 0, 8);
    put(b, 77 << 10, 8);
    put(b, (uint64_t)count, 4);
}

static void put_vote(body *b, uint64_t world, int vote)
{
    put(b, 0, 8);
    put(b, world, 4);
    put(b, (uint64_t)vote, 1);
}

/* A frame that tells of `about`; the list of members is to follow. */
static void put_reason(body *b, uint64_t channel, int about, int status, const char *why, int count)
{
    b->bytes = 0;
    put(b, channel, 8);
    put(b, (uint64_t)about, 4);
    put(b, (uint64_t)status, 2);
    put_text(b, 2, why);
    put(b, 0, 8);
    put(b, (uint64_t)count, 4);
}

static void put_ask(body *b, uint64_t channel, int what, const char *key)
{
    b->bytes = 0;
    put(b, channel, 8);
    put(b, 1000000, 4); /* a request of this rank's own has another number */
    put(b, (uint64_t)what, 1);
    put_text(b, 2, key);
}

enum { GROUP = 50 << 10 }; /* the name of a group that is none of rank 0's */

/* Frames of rank 2 of 3 that nobody may send, or not to rank 0, or not this rank; returns the frame's kind, 0 at the
 * end. */
static int wrong_frame(int which, body *b)
{
    memset(b, 0, sizeof *b);
    switch (which) {
    case 0: /* fewer members than the group has */
        put_consent(b, 0, 1, 0, 1);
        put_vote(b, 2, DTRAIN__VOTE_YES);
        return DTRAIN__FRAME_CONSENT;
    case 1: /* other members */
        put_consent(b, 0, 1, 0, 3);
        for (uint64_t i = 0; i < 3; i++)
            put_vote(b, 2 - i, DTRAIN__VOTE_YES);
        return DTRAIN__FRAME_CONSENT;
    case 2: /* a decision, which is rank 0's to make */
        put_consent(b, 0, 1, 1, 3);
        for (uint64_t i = 0; i < 3; i++)
            put_vote(b, i, DTRAIN__VOTE_YES);
        return DTRAIN__FRAME_CONSENT;
    case 3: /* a member twice */
        put_consent(b, GROUP, 1, 0, 2);
        put_vote(b, 2, DTRAIN__VOTE_YES);
        put_vote(b, 2, DTRAIN__VOTE_YES);
        return DTRAIN__FRAME_CONSENT;
    case 4: /* a group that the sender is not in */
        put_consent(b, GROUP, 1, 0, 2);
        put_vote(b, 0, DTRAIN__VOTE_YES);
        put_vote(b, 1, DTRAIN__VOTE_YES);
        return DTRAIN__FRAME_CONSENT;
    case 5: /* a rank that there is not */
        put_consent(b, GROUP, 1, 0, 2);
        put_vote(b, 2, DTRAIN__VOTE_YES);
        put_vote(b, 3, DTRAIN__VOTE_YES);
        return DTRAIN__FRAME_CONSENT;
    case 6: /* another's end has left */ put_reason(b, 0, 1, DTRAIN_OK, "made up", 0); return DTRAIN__FRAME_BYE;
    case 7: /* the same, of a group that rank 0 does not know */
        put_reason(b, GROUP, 0, DTRAIN_OK, "made up", 2);
        put(b, 1, 4);
        put(b, 2, 4);
        return DTRAIN__FRAME_BYE;
    case 8: /* the end of a group that the sender is not in */
        put_reason(b, GROUP, 0, DTRAIN_ERR_ABORTED, "made up", 1);
        put(b, 1, 4);
        return DTRAIN__FRAME_END;
    case 9: /* one member many times, to whom rank 0 would send it as often */
        put_reason(b, GROUP, 0, DTRAIN_ERR_ABORTED, "made up", 3);
        put(b, 2, 4);
        put(b, 1, 4);
        put(b, 1, 4);
        return DTRAIN__FRAME_END;
    case 10: /* about a member that the group has not */
        put_reason(b, GROUP, 2, DTRAIN_ERR_ABORTED, "made up", 2);
        put(b, 1, 4);
        put(b, 2, 4);
        return DTRAIN__FRAME_END;
    case 11: /* another's loss, which rank 0 finds */
        put_reason(b, 0, 1, DTRAIN_ERR_PEER_LOST, "made up", 0);
        return DTRAIN__FRAME_LOST;
    case 12: put_reason(b, 0, 1, DTRAIN_OK, "made up", 0); return DTRAIN__FRAME_GONE;
    case 13: put_reason(b, 0, 1, DTRAIN_ERR_MISMATCH, "made up", 0); return DTRAIN__FRAME_REFUSE;
    case 14: put(b, 3, 4); return DTRAIN__FRAME_TABLE;
    case 15: /* what only rank 0 says */
        put(b, 0, 8);
        put(b, 1, 4);
        put(b, 0, 3);
        return DTRAIN__FRAME_ANSWER;
    case 16: put_ask(b, 0, DTRAIN__STORE_GET, ""); return DTRAIN__FRAME_ASK;
    case 17: /* a value with a question */
        put_ask(b, 0, DTRAIN__STORE_GET, "key");
        put(b, 1, 8);
        return DTRAIN__FRAME_ASK;
    case 18: /* what another rank does */
        put(b, 0, 8);
        put(b, 0, 8);
        put(b, 1, 4);
        put(b, 0, 8);
        put(b, 0, 2);
        return DTRAIN__FRAME_BEAT;
    case 19: put_text(b, 1, "127.0.0.1:9"); return DTRAIN__FRAME_JOIN;
    case 20: return 99;
    default: return 0;
    }
}

/* Ranks 0 and 1 hear that rank 2 is lost, and go on as two. */
static int finds_the_wrong_frame(dtrain_comm *world, scene *s)
{
    int which = *(const int *)s->user, rank = dtrain_comm_rank(world), kind;
    dtrain_comm *rest = NULL;
    dtrain_status status;
    float x = 1;
    body b;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 2) {
        kind = wrong_frame(which, &b);
        say(world, kind, b.data, b.bytes);
    }
    do
        status = dtrain_recv(world, &x, 1, DTRAIN_F32, (rank + 1) % 3); /* nobody sends */
    while (status == DTRAIN_OK);
    CHECK_EQ(status, DTRAIN_ERR_PEER_LOST);
    if (rank == 2)
        return 0;
    CHECK_CONTAINS(world->error.text, "rank 2 (");
    CHECK_CONTAINS(world->error.text, "is lost: it sent a malformed control message");
    CHECK_EQ(dtrain_comm_shrink(world, &rest), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(rest), 2);
    x = (float)(1 + rank);
    CHECK_EQ(dtrain_all_reduce(rest, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(x == 3);
    dtrain_comm_destroy(rest);
    return 0;
}

TEST(a_member_that_sends_a_frame_out_of_place_is_lost_and_the_rest_goes_on)
{
    scene s;
    body b;
    for (int which = 0; wrong_frame(which, &b) != 0; which++) {
        int before = test_failures;
        scene_begin(&s, 3, 0);
        s.desc.timeout_ms = test_ms(10000);
        s.user = &which;
        run_ranks(&s, finds_the_wrong_frame);
        if (test_failures != before)
            TEST_FAIL("that was frame %d", which);
    }
}

/* Makes a control connection to a rank that this one does not lead, as a new leader would. */
static void calls(dtrain__hub *hub, int rank)
{
    dtrain__address address;
    dtrain__handshake *handshake = NULL;
    int open = 0;
    pthread_mutex_lock(&hub->mutex);
    if (dtrain__hub_peer_address(hub, rank, &address))
        handshake = dtrain__hub_connect(hub, rank, DTRAIN__PURPOSE_CONTROL, &address);
    while (handshake != NULL && open == 0) {
        open = dtrain__hub_advance(hub, handshake, dtrain__os_now_ns());
        pthread_mutex_unlock(&hub->mutex);
        usleep(1000);
        pthread_mutex_lock(&hub->mutex);
    }
    CHECK_EQ(open, 1);
    if (open == 1)
        dtrain__hub_adopt_control(hub, handshake);
    dtrain__hub_free_handshake(hub, &handshake);
    pthread_mutex_unlock(&hub->mutex);
}

/* Rank 1, which does not lead, says that a rank above it is lost: to rank 3 in a frame, and to rank 2 in the answer to
 * its connection. */
static int expels(dtrain_comm *world, scene *s)
{
    dtrain__hub *hub = CHANNEL(world)->hub;
    int rank = dtrain_comm_rank(world), about = *(const int *)s->user, come = 0;
    body b;
    float x = 1;
    scene_meet(s->ranks);
    if (rank == 1) {
        calls(hub, 3);
        put_reason(&b, 0, about, DTRAIN_ERR_PEER_LOST, "made up", 0);
        pthread_mutex_lock(&hub->mutex);
        size_t begin = dtrain__frame_open(hub, &hub->members[3], DTRAIN__FRAME_LOST);
        dtrain__give_bytes(hub, &hub->members[3].out, b.data, b.bytes);
        CHECK(dtrain__frame_close(&hub->members[3], begin));
        dtrain__hub_flush(hub, 3);
        hub->members[2].gone = DTRAIN__LOST;
        pthread_mutex_unlock(&hub->mutex);
    }
    if (rank == 2)
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 1), DTRAIN_ERR_TIMEOUT);
    for (double until = now_s() + 20; rank == 3 && !come && now_s() < until; usleep(1000)) {
        pthread_mutex_lock(&hub->mutex);
        come = hub->members[1].held || hub->members[2].gone != DTRAIN__PRESENT || hub->council.given_up;
        pthread_mutex_unlock(&hub->mutex);
    }
    CHECK(come == (rank == 3));
    scene_meet(s->ranks);
    if (rank >= 2) { /* they and rank 0 go on */
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK);
    }
    for (int peer = 2; rank == 0 && peer < 4; peer++)
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, peer), DTRAIN_OK);
    for (int peer = 2; rank == 0 && peer < 4; peer++)
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, peer), DTRAIN_OK);
    scene_meet(s->ranks);
    return 0;
}

TEST(a_member_that_does_not_lead_expels_nobody_above_it)
{
    scene s;
    for (int about = 2; about < 4; about++) {
        scene_begin(&s, 4, 0);
        s.desc.timeout_ms = test_ms(1000);
        s.user = &about;
        run_ranks(&s, expels);
    }
}

/* Rank 3 decides for the group of ranks 0 and 1, with more members than that has. */
static int has_a_group_apart(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    dtrain_comm *pair = NULL, *rest = NULL;
    uint64_t id = 0, flags = 6 + (uint64_t)rank;
    size_t bytes;
    body b;
    CHECK_EQ(dtrain_comm_split(world, rank < 2 ? 0 : -1, 0, &pair), DTRAIN_OK);
    if (rank == 0)
        CHECK_EQ(dtrain_store_set(world, "its name", &CHANNEL(pair)->seat.id, 8), DTRAIN_OK);
    CHECK_EQ(dtrain_store_wait(world, "its name", &id, 8, &bytes), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank >= 2) {
        put_consent(&b, id, 1, rank == 3, 4);
        for (uint64_t i = 0; i < 4; i++)
            put_vote(&b, 3 - i, DTRAIN__VOTE_YES);
        say(world, DTRAIN__FRAME_CONSENT, b.data, b.bytes);
    }
    CHECK_EQ(dtrain_recv(world, &id, 1, DTRAIN_U64, 3 - rank), DTRAIN_ERR_PEER_LOST);
    if (rank >= 2)
        return 0;
    CHECK_EQ(dtrain_comm_agree(pair, &flags), DTRAIN_OK);
    CHECK_EQ(flags, 6);
    CHECK_EQ(dtrain_comm_shrink(pair, &rest), DTRAIN_OK);
    CHECK_EQ(dtrain_comm_size(rest), 2);
    CHECK_EQ(dtrain_barrier(rest), DTRAIN_OK);
    dtrain_comm_destroy(rest);
    dtrain_comm_destroy(pair);
    return 0;
}

TEST(a_group_decides_for_itself_whatever_other_ranks_say)
{
    scene s;
    scene_begin(&s, 4, 0);
    run_ranks(&s, has_a_group_apart);
}

/* Rank 2 says in a split that it is another rank of the world. */
static int splits_with_a_liar(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    dtrain_comm *group = NULL;
    dtrain__split_entry entries[3], lie = {0, 0, 100000, 1};
    (void)s;
    if (rank == 2) {
        CHECK_EQ(dtrain_all_gather(world, &lie, entries, 3 * DTRAIN__SPLIT_WORDS, DTRAIN_U64), DTRAIN_OK);
    } else {
        CHECK_EQ(dtrain_comm_split(world, 0, 0, &group), DTRAIN_ERR_CORRUPT);
        CHECK_CONTAINS(world->error.text, "rank 2 says that it is rank 100000 of the world, and it is rank 2");
        CHECK(group == NULL);
    }
    return 0;
}

TEST(a_split_takes_nobody_for_another_rank)
{
    scene s;
    scene_begin(&s, 3, 0);
    run_ranks(&s, splits_with_a_liar);
}

/* Rank 2 votes in groups that there are not, and waits for keys in as many, while rank 1 has voted and rank 0 has not.
 */
static int agrees_in_a_flood(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    uint64_t flags = 7;
    size_t before = dtrain_comm_allocator(world)->bytes;
    body b;
    if (rank == 0)
        scene_meet(2);
    for (uint64_t i = 0; rank == 2 && i < 3000; i++) {
        put_consent(&b, GROUP + (i << 10), 1, 0, 3);
        for (uint64_t k = 0; k < 3; k++)
            put_vote(&b, k, k == 2 ? DTRAIN__VOTE_YES : DTRAIN__VOTE_NONE);
        say(world, DTRAIN__FRAME_CONSENT, b.data, b.bytes);
        put_ask(&b, GROUP + (i << 10), DTRAIN__STORE_WAIT, "no such key");
        say(world, DTRAIN__FRAME_ASK, b.data, b.bytes);
        if (i == 2999) { /* what comes after it has been read */
            CHECK_EQ(dtrain_store_set(world, "all is said", "", 0), DTRAIN_OK);
            scene_meet(2);
        }
    }
    (void)s;
    CHECK_EQ(dtrain_comm_agree(world, &flags), DTRAIN_OK);
    CHECK_EQ(flags, 7);
    if (rank == 0)
        CHECK(dtrain_comm_allocator(world)->bytes - before < (size_t)1 << 20);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    return 0;
}

TEST(votes_in_groups_that_there_are_not_drive_out_no_others)
{
    scene s;
    scene_begin(&s, 3, 0);
    run_ranks(&s, agrees_in_a_flood);
}

/* Has this process's hub stand still: it sends and reads nothing by itself until hub_goes_on(). */
static void hub_stands(dtrain_comm *world)
{
    while (pthread_mutex_trylock(&CHANNEL(world)->hub->step_mutex) != 0)
        dtrain__hub_kick(CHANNEL(world)->hub);
}

static void hub_goes_on(dtrain_comm *world)
{
    pthread_mutex_unlock(&CHANNEL(world)->hub->step_mutex);
}

/* What waits at rank 0 for a member. */
static size_t queue_of(dtrain_comm *world, int rank, int *held)
{
    dtrain__hub *hub = CHANNEL(world)->hub;
    pthread_mutex_lock(&hub->mutex);
    size_t bytes = hub->members[rank].out.bytes;
    *held = hub->members[rank].held;
    pthread_mutex_unlock(&hub->mutex);
    return bytes;
}

/* Rank 2 asks 1000 times for 64 KiB and reads nothing, while the others go on; then it reads. */
static int asks_and_does_not_read(dtrain_comm *world, scene *s)
{
    enum { ASKS = 1000, VALUE = 65536 };
    static unsigned char value[VALUE];
    int rank = dtrain_comm_rank(world), held = 0;
    size_t bytes = 0;
    dtrain_comm *pair = NULL;
    body b;
    CHECK_EQ(dtrain_comm_split(world, rank < 2 ? 0 : -1, 0, &pair), DTRAIN_OK);
    memset(value, 7, sizeof value);
    if (rank == 1)
        CHECK_EQ(dtrain_store_set(world, "a", value, VALUE), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 2) {
        hub_stands(world);
        put_ask(&b, 0, DTRAIN__STORE_GET, "a");
        for (int i = 0; i < ASKS; i++)
            say(world, DTRAIN__FRAME_ASK, b.data, b.bytes);
    }
    while (rank == 0 && !held && queue_of(world, 2, &held) < (size_t)ASKS / 2 * VALUE)
        usleep(1000);
    for (int i = 0; rank < 2 && i < 200; i++)
        CHECK_EQ(dtrain_barrier(pair), DTRAIN_OK);
    if (rank == 1)
        CHECK_EQ(dtrain_store_get(world, "a", value, VALUE, &bytes), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 2)
        hub_goes_on(world);
    CHECK_EQ(dtrain_store_get(world, "a", value, VALUE, &bytes), DTRAIN_OK); /* after all those before it */
    CHECK(bytes == VALUE && value[0] == 7 && value[VALUE - 1] == 7);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0)
        CHECK(dtrain_comm_allocator(world)->peak_bytes < (size_t)6 << 20);
    dtrain_comm_destroy(pair);
    return 0;
}

TEST(rank_0_keeps_few_answers_for_a_member_that_does_not_read_them)
{
    scene s;
    for (int tcp = 0; tcp < 2; tcp++) {
        scene_begin(&s, 3, tcp);
        s.desc.heartbeat_ms = 60000;
        s.desc.timeout_ms = test_ms(60000);
        run_ranks(&s, asks_and_does_not_read);
    }
}

/* Rank 2 has rank 0 tell rank 1 of groups that there are not, which rank 1 does not read for a while. */
static int tells_much(dtrain_comm *world, scene *s)
{
    enum { FRAMES = 80000 };
    int rank = dtrain_comm_rank(world), got = 0;
    char why[400];
    body b;
    size_t bytes;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 1)
        hub_stands(world);
    scene_meet(s->ranks);
    if (rank == 2) {
        dtrain__hub *hub = CHANNEL(world)->hub;
        memset(why, 'w', sizeof why);
        why[sizeof why - 1] = 0;
        put_reason(&b, GROUP, 0, DTRAIN_ERR_ABORTED, why, 2);
        put(&b, 2, 4);
        put(&b, 1, 4);
        for (int i = 0; i < FRAMES; i++) {
            say(world, DTRAIN__FRAME_END, b.data, b.bytes);
            while (queue_of(world, 0, &got) > 65536) {
                pthread_mutex_lock(&hub->mutex);
                dtrain__hub_flush(hub, 0);
                pthread_mutex_unlock(&hub->mutex);
            }
        }
        CHECK_EQ(dtrain_store_set(world, "said", "", 0), DTRAIN_OK);
    }
    if (rank == 0) {
        CHECK_EQ(dtrain_store_wait(world, "said", NULL, 0, &bytes), DTRAIN_OK);
        CHECK(queue_of(world, 1, &got) < (size_t)9 << 20);
    }
    scene_meet(s->ranks);
    if (rank == 1)
        hub_goes_on(world);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(dtrain_store_get(world, "said", NULL, 0, &bytes), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    if (rank == 0)
        CHECK(dtrain_comm_allocator(world)->peak_bytes < (size_t)30 << 20);
    return 0;
}

TEST(what_one_member_tells_another_that_does_not_read_has_a_limit)
{
    scene s;
    scene_begin(&s, 3, 0);
    s.desc.heartbeat_ms = 60000;
    s.desc.timeout_ms = test_ms(60000);
    run_ranks(&s, tells_much);
}

/* Rank 2 asks, does not read and sends nothing more: that is silence, and ends as any. */
static int asks_and_falls_silent(dtrain_comm *world, scene *s)
{
    enum { ASKS = 200, VALUE = 65536 };
    static unsigned char value[VALUE];
    int rank = dtrain_comm_rank(world);
    body b;
    if (rank == 1)
        CHECK_EQ(dtrain_store_set(world, "a", value, VALUE), DTRAIN_OK);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 2) {
        hub_stands(world);
        put_ask(&b, 0, DTRAIN__STORE_GET, "a");
        for (int i = 0; i < ASKS; i++)
            say(world, DTRAIN__FRAME_ASK, b.data, b.bytes);
    } else {
        CHECK_EQ(dtrain_recv(world, value, 1, DTRAIN_U8, 1 - rank), DTRAIN_ERR_PEER_LOST);
        CHECK_CONTAINS(world->error.text, "(heartbeat_ms); stopped, or overloaded, or its host is gone; it does not read either");
    }
    scene_meet(s->ranks);
    if (rank == 2)
        hub_goes_on(world);
    return 0;
}

TEST(a_member_that_asks_and_never_reads_is_lost_by_its_silence)
{
    scene s;
    scene_begin(&s, 3, 0);
    s.desc.heartbeat_ms = 2500;
    s.desc.timeout_ms = test_ms(60000);
    run_ranks(&s, asks_and_falls_silent);
}
