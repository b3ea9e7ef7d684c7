/* How processes meet: tokens, world sizes, fingerprints, addresses, early and late ones, those that do not get in.
 * Every rank is a process of its own. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "hooks.h"

#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "meetings.h"

int64_t hook_handshake_ns = 5000000000; /* for a stranger to prove itself; a test may make it shorter */

TEST(a_wrong_token_is_denied_and_the_owner_told)
{
    scene s, stranger;
    scene_begin(&s, 2, 1);
    s.desc.token = token;
    s.desc.timeout_ms = 1500;
    stranger = s;
    stranger.desc.token = "another secret of many bytes";
    dtrain_set_log(quiet, NULL);
    pid_t owner = start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, "does not hold this group's token");
    pid_t other = start_refused(&stranger, 1, DTRAIN_ERR_DENIED, "give every rank the same DTRAIN_TOKEN");
    CHECK_EQ(end_of(owner, 10), 0);
    CHECK_EQ(end_of(other, 10), 0);
    stranger.desc.token = NULL;
    stranger.desc.insecure = 1;
    owner = start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, " s at ");
    other = start_refused(&stranger, 1, DTRAIN_ERR_DENIED, "this rank's has 0 bytes");
    CHECK_EQ(end_of(owner, 10), 0);
    CHECK_EQ(end_of(other, 10), 0);
    dtrain_set_log(NULL, NULL);
}

TEST(a_short_token_is_refused_before_anything_is_sent)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.token = "fifteen bytes..";
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_DENIED, "15 bytes"), 5), 0);
}

TEST(beyond_this_host_a_token_is_needed)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.token = NULL;
    snprintf(s.root, sizeof s.root, "0.0.0.0:0");
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_DENIED, "there is no token: set DTRAIN_TOKEN"), 5), 0);
    snprintf(s.root, sizeof s.root, "192.0.2.1:29500");
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_DENIED, "192.0.2.1:29500 is beyond this host"), 5), 0);
}

TEST(a_hosts_name_that_means_loopback_there_is_for_other_hosts_as_well)
{
    char root[80] = "";
    dtrain__address addresses[DTRAIN__MAX_ADDRESSES];
    int count;
    CHECK(strncmp(listens_at("127.0.0.1:0", token).text, "127.0.0.1:", 10) == 0);
    if (scene_has_unix())
        CHECK(strncmp(listens_at("localhost:0", NULL).text, "0.0.0.0:", 8) != 0);
    CHECK_EQ(gethostname(root, 64), 0);
    strcat(root, ":0");
    if (dtrain__net_look_up(root, 0, addresses, &count) != DTRAIN_OK || !dtrain__net_is_local(&addresses[0]) ||
        strncmp(root, "localhost:", 10) == 0) {
        printf("skipped: this host's name does not mean loopback\n");
        return;
    }
    CHECK_CONTAINS(listens_at(root, token).text, addresses[0].at.any.sa_family == AF_INET ? "0.0.0.0:" : "[::]:");
    if (scene_has_unix())
        CHECK(strstr(listens_at(root, NULL).text, "0.0.0.0:") == NULL); /* without a token nobody else may come */
}

TEST(another_world_size_is_a_mismatch_that_names_both)
{
    scene s, larger;
    scene_begin(&s, 2, 1);
    s.desc.timeout_ms = 1500;
    larger = s;
    larger.ranks = 3;
    dtrain_set_log(quiet, NULL);
    pid_t root = start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, "expects a world of 3 ranks");
    pid_t other = start_refused(&larger, 1, DTRAIN_ERR_MISMATCH, "expects a world of 3 ranks, rank 0 one of 2");
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(other, 10), 0);
    dtrain_set_log(NULL, NULL);
}

/* A second rank 1: ends with 7 where it is the one that is refused, with 0 where the group is its own. */
static pid_t start_twin(scene *s)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    dtrain_comm_desc desc = scene_desc(s, 1);
    dtrain_comm *world;
    dtrain_status status = dtrain_comm_create(&world, &desc);
    if (status == DTRAIN_ERR_MISMATCH && strstr(dtrain_last_error(), "two processes say they are rank 1") != NULL)
        _exit(7);
    _exit(status != DTRAIN_OK || dtrain_barrier(world) != DTRAIN_OK);
}

TEST(two_processes_with_one_rank_are_told_apart)
{
    scene s;
    int first_is_refused, status;
    scene_begin(&s, 3, 1);
    dtrain_set_log(quiet, NULL);
    pid_t root = start_rank(&s, 0, nothing), first = start_twin(&s), second = start_twin(&s), ended;
    do
        ended = waitpid(-1, &status, 0); /* the others wait for rank 2 */
    while (ended < 0 && errno == EINTR);
    first_is_refused = ended == first;
    CHECK(ended == first || ended == second);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    pid_t last = start_rank(&s, 2, nothing);
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(first_is_refused ? second : first, 10), 0);
    CHECK_EQ(end_of(last, 10), 0);
    dtrain_set_log(NULL, NULL);
}

/* Moves a whole message over a blocking socket; 0: the other side has ended it. */
static int whole(int fd, void *message, size_t bytes, int sending)
{
    unsigned char *at = (unsigned char *)message;
    ssize_t n = 1;
    for (; bytes > 0 && n > 0; at += n > 0 ? n : 0, bytes -= n > 0 ? (size_t)n : 0)
        n = sending ? send(fd, at, bytes, 0) : recv(fd, at, bytes, 0);
    return bytes == 0;
}

/* The opening of a hello or a challenge of wire version 2: magic, version, byte order. */
static void version_2(unsigned char *message, size_t bytes)
{
    memset(message, 0, bytes);
    memcpy(message, "dtrain\r\n\2\0", 10);
    message[10] = dtrain__byte_order();
}

TEST(rank_0_and_an_older_rank_both_name_both_wire_versions)
{
    scene s;
    dtrain__address address;
    unsigned char hello[128], challenge[80];
    int count, fd;
    scene_begin(&s, 2, 1);
    s.desc.token = token;
    s.desc.timeout_ms = 1500;
    dtrain_set_log(quiet, NULL);
    pid_t root = start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, "speaks wire version 2, this rank 11: build both");
    CHECK_EQ(dtrain__net_look_up(s.root, 0, &address, &count), DTRAIN_OK);
    for (;;) { /* until rank 0 listens */
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, &address.at.any, address.bytes) == 0 || waitpid(root, NULL, WNOHANG) != 0)
            break;
        close(fd);
        usleep(1000);
    }
    version_2(hello, sizeof hello);
    CHECK(whole(fd, hello, sizeof hello, 1));
    CHECK(whole(fd, challenge, sizeof challenge, 0)); /* from it the older rank makes its own error */
    CHECK(memcmp(challenge, "dtrain\r\n\13\0", 10) == 0);
    CHECK(!whole(fd, challenge, 1, 0));
    close(fd);
    CHECK_EQ(end_of(root, 20), 0);
    dtrain_set_log(NULL, NULL);
}

TEST(a_rank_and_an_older_rank_0_both_name_both_wire_versions)
{
    scene s;
    dtrain__address address;
    unsigned char hello[128], challenge[80];
    int count;
    scene_begin(&s, 2, 1);
    s.desc.token = token;
    s.desc.timeout_ms = 1500; /* until then it tries again, as anybody may have answered */
    dtrain_set_log(quiet, NULL);
    CHECK_EQ(dtrain__net_look_up(s.root, 0, &address, &count), DTRAIN_OK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, &address.at.any, address.bytes) == 0 && listen(listener, 1) == 0);
    pid_t one = start_refused(&s, 1, DTRAIN_ERR_MISMATCH, "speaks wire version 2, this rank 11: build both");
    int fd = accept(listener, NULL, NULL);
    CHECK(whole(fd, hello, sizeof hello, 0)); /* all that the older rank 0 waits for */
    CHECK(memcmp(hello, "dtrain\r\n\13\0", 10) == 0);
    version_2(challenge, sizeof challenge);
    CHECK(whole(fd, challenge, sizeof challenge, 1));
    CHECK_EQ(end_of(one, 20), 0);
    close(fd);
    close(listener);
    dtrain_set_log(NULL, NULL);
}

TEST(another_fingerprint_is_a_mismatch_that_quotes_both)
{
    scene s, other;
    scene_begin(&s, 2, 0);
    s.desc.timeout_ms = 1500;
    s.desc.fingerprint = "gpt-4x128 v7";
    other = s;
    other.desc.fingerprint = "gpt-4x128 v8";
    dtrain_set_log(quiet, NULL);
    pid_t root = start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, "gpt-4x128 v8");
    pid_t one = start_refused(&other, 1, DTRAIN_ERR_MISMATCH, "\"gpt-4x128 v8\", rank 0 \"gpt-4x128 v7\"");
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(one, 10), 0);
    dtrain_set_log(NULL, NULL);
}

TEST(a_timeout_says_who_is_missing_and_what_was_believed)
{
    scene s;
    scene_begin(&s, 4, 1);
    s.desc.timeout_ms = 2500;
    pid_t root = start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, "for rank 1, 2 (came and left), 3;");
    s.desc.timeout_ms = 500;
    pid_t two = start_refused(&s, 2, DTRAIN_ERR_TIMEOUT, " s for other ranks, which have not come");
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(two, 10), 0);
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_TIMEOUT, "desc.rank=1 desc.world_size=4"), 10), 0);
}

TEST(early_and_late_starters_meet)
{
    scene s;
    scene_begin(&s, 3, 1);
    pid_t two = start_rank(&s, 2, nothing);
    usleep(400000);
    pid_t root = start_rank(&s, 0, nothing);
    usleep(200000);
    pid_t one = start_rank(&s, 1, nothing);
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(one, 10), 0);
    CHECK_EQ(end_of(two, 10), 0);
}

/* Gives up before the others come, and starts again. */
static int comes_twice(scene *s)
{
    int before = test_failures;
    dtrain_comm_desc desc = scene_desc(s, 1);
    dtrain_comm *world;
    desc.timeout_ms = 300;
    CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_TIMEOUT);
    usleep(400000);
    return rank_main(s, 1, nothing) || test_failures != before;
}

TEST(a_rank_that_gave_up_may_come_again)
{
    for (int again = 0; again < 2; again++) {
        scene s;
        scene_begin(&s, 3, 1);
        fflush(stdout);
        pid_t root = start_rank(&s, 0, nothing), one = fork();
        if (one == 0)
            _exit(comes_twice(&s));
        usleep(again ? 1000000 : 500000); /* rank 2 comes when rank 1 has come back, or is away */
        pid_t two = start_rank(&s, 2, nothing);
        CHECK_EQ(end_of(root, 20), 0);
        CHECK_EQ(end_of(one, 20), 0);
        CHECK_EQ(end_of(two, 20), 0);
    }
}

TEST(a_connection_that_met_itself_counts_as_refused)
{
    dtrain__address address;
    int count, fd, one = 1;
    CHECK_EQ(dtrain__net_look_up("127.0.0.1:0", 0, &address, &count), DTRAIN_OK);
    CHECK_EQ(dtrain__net_socket(AF_INET, &fd), 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    CHECK_EQ(bind(fd, &address.at.any, address.bytes), 0);
    CHECK_EQ(getsockname(fd, &address.at.any, &address.bytes), 0);
    CHECK(connect(fd, &address.at.any, address.bytes) == 0 || errno == EINPROGRESS);
    CHECK_EQ(dtrain__net_connected(fd), ECONNREFUSED);
    close(fd);
}

static int address_pipe[2];

static void tell_address(void *user, const char *address)
{
    (void)user;
    ssize_t ignored = write(address_pipe[1], address, strlen(address) + 1);
    (void)ignored;
}

/* Nobody can reach the others for data, as where a firewall lets the root's port through alone. */
static int behind_a_firewall(dtrain_comm *world, scene *s)
{
    float x = 1;
    (void)s;
    CHECK_EQ(dtrain_broadcast(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK); /* rank 0 to 1 and 2 */
    if (dtrain_comm_rank(world) == 0) {
        usleep(2000000);
        return 0;
    }
    shutdown(CHANNEL(world)->hub->listeners[0], SHUT_RDWR);
    usleep(200000);
    CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 3 - dtrain_comm_rank(world)), DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(world->error.text, "no connection to it: connect: the connection to 127.0.0.1:");
    CHECK_CONTAINS(world->error.text, "(Connection refused)");
    CHECK_CONTAINS(world->error.text, "the call can be made again");
    usleep(500000); /* or the other one would hear that this one has left */
    return 0;
}

TEST(a_timeout_says_that_no_connection_could_be_made)
{
    scene s;
    scene_begin(&s, 3, 1);
    s.desc.timeout_ms = 700;
    s.desc.algorithm = DTRAIN_ALGORITHM_TREE; /* rank 1 sends nothing to rank 2 */
    dtrain_set_log(quiet, NULL);
    run_ranks(&s, behind_a_firewall);
    dtrain_set_log(NULL, NULL);
}

/* Ports at which nobody answers: one takes connections, of the other even those get no answer. */
static int hanging_port(int takes)
{
    struct sockaddr_in address;
    socklen_t bytes = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_EQ(listen(fd, takes ? 64 : 0), 0);
    CHECK_EQ(getsockname(fd, (struct sockaddr *)&address, &bytes), 0);
    for (int i = 0; !takes && i < 4; i++) { /* Linux drops what comes to a full queue */
        int more = socket(AF_INET, SOCK_STREAM, 0);
        CHECK_EQ(dtrain__os_manners(more), 0);
        CHECK(connect(more, (struct sockaddr *)&address, sizeof address) == 0 || errno == EINPROGRESS);
    }
    return ntohs(address.sin_port);
}

/* Rank 0 looks for rank 1 at a port where its connection hangs. Rank 1 connects after that. */
static int reaches_the_other(dtrain_comm *world, scene *s)
{
    dtrain__hub *hub = CHANNEL(world)->hub;
    dtrain_work *work = NULL;
    int rank = dtrain_comm_rank(world), hangs = 0;
    float x = 7, y = 0;
    if (rank == 0) {
        pthread_mutex_lock(&hub->mutex);
        char address[32];
        snprintf(address, sizeof address, "127.0.0.1:%d", *(const int *)s->user);
        CHECK(dtrain__hub_say(hub, &hub->members[1].address, address));
        pthread_mutex_unlock(&hub->mutex);
        CHECK_EQ(dtrain_send_async(world, &x, 1, DTRAIN_F32, 1, &work), DTRAIN_OK);
    }
    for (double until = now_s() + 20; rank == 0 && !hangs && now_s() < until; usleep(1000)) {
        pthread_mutex_lock(&hub->mutex);
        hangs = CHANNEL(world)->peers[1].lanes[0].handshake != NULL;
        pthread_mutex_unlock(&hub->mutex);
    }
    scene_meet(s->ranks);
    if (rank == 1) {
        CHECK_EQ(dtrain_recv(world, &y, 1, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK(y == 7);
        return dtrain_send(world, &y, 1, DTRAIN_F32, 0) != DTRAIN_OK;
    }
    CHECK(hangs);
    CHECK_EQ(dtrain_work_wait(work), DTRAIN_OK);
    return dtrain_recv(world, &y, 1, DTRAIN_F32, 1) != DTRAIN_OK;
}

TEST(a_connection_that_hangs_gives_way_to_the_one_that_the_peer_makes)
{
    for (int takes = 0; takes < 2; takes++) {
        scene s;
        int port = hanging_port(takes);
        scene_begin(&s, 2, 1);
        s.desc.timeout_ms = test_ms(4000);
        s.user = &port;
        run_ranks(&s, reaches_the_other);
    }
}

/* All ranks need each other at the same moment, in one group after the other: each has connections of its own. */
static int all_at_once(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    for (int i = 0; i < 40; i++) {
        dtrain_comm *group = NULL;
        int32_t from[4], to[4];
        for (int to_rank = 0; to_rank < s->ranks; to_rank++)
            from[to_rank] = 10 * rank + to_rank;
        CHECK_EQ(dtrain_comm_split(world, 0, rank, &group), DTRAIN_OK);
        if (group == NULL || dtrain_all_to_all(group, from, to, 4, DTRAIN_I32) != DTRAIN_OK) {
            TEST_FAIL("group %d: %s", i, dtrain_last_error());
            return 1;
        }
        for (int of = 0; of < s->ranks; of++)
            CHECK_EQ(to[of], 10 * of + rank);
        dtrain_comm_destroy(group);
    }
    return 0;
}

TEST(ranks_that_connect_to_each_other_at_once_keep_one_connection)
{
    scene s;
    scene_begin(&s, 4, 1);
    run_ranks(&s, all_at_once);
}

/* The last ranks of three never listen; rank 0 and the others speak to them all the same. */
static int some_never_listen(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world), deaf = *(const int *)s->user;
    float x = (float)rank;
    if (rank >= 3 - deaf)
        CHECK_EQ(CHANNEL(world)->hub->listener_count, 0);
    if (deaf == 1) {
        CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK(x == 3);
        return 0;
    }
    for (int peer = 1; peer < 3; peer++)
        if (rank == 0)
            CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, peer), DTRAIN_OK);
        else if (rank == peer)
            CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK);
    scene_meet(s->ranks);
    if (rank == 0) {
        scene_meet(s->ranks);
        return 0;
    }
    CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 3 - rank), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(world->error.text, "cannot connect to each other, as neither listens");
    CHECK_CONTAINS(world->error.text, "let one of them listen, or send by way of a rank that listens");
    scene_meet(s->ranks);
    return 0;
}

TEST(ranks_that_never_listen_connect_to_all_that_do)
{
    for (int deaf = 1; deaf < 3; deaf++)
        for (int tcp = 0; tcp < 2; tcp++) {
            scene s, silent;
            pid_t pids[3];
            scene_begin(&s, 3, tcp);
            s.user = &deaf;
            s.desc.algorithm = DTRAIN_ALGORITHM_DIRECT;
            s.desc.timeout_ms = test_ms(10000);
            silent = s;
            silent.desc.listen_on = "none";
            for (int rank = 0; rank < 3; rank++)
                pids[rank] = start_rank(rank >= 3 - deaf ? &silent : &s, rank, some_never_listen);
            for (int rank = 0; rank < 3; rank++)
                CHECK_EQ(end_of(pids[rank], 30), 0);
        }
}

TEST(rank_0_cannot_do_without_listening)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.listen_on = "none";
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "all other ranks connect to it"), 10), 0);
}

TEST(port_0_becomes_a_port_that_rank_0_is_told)
{
    scene s;
    scene_begin(&s, 2, 1);
    CHECK_EQ(pipe(address_pipe), 0);
    snprintf(s.root, sizeof s.root, "127.0.0.1:0");
    s.desc.on_address = tell_address;
    pid_t root = start_rank(&s, 0, nothing);
    s.desc.on_address = NULL;
    CHECK(read(address_pipe[0], s.root, sizeof s.root) > 0);
    CHECK(strcmp(s.root, "127.0.0.1:0") != 0);
    pid_t one = start_rank(&s, 1, nothing);
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(one, 10), 0);
    close(address_pipe[0]);
    close(address_pipe[1]);
}

static int async_rank(scene *s, int rank)
{
    dtrain_comm_desc desc = scene_desc(s, rank);
    dtrain_comm *world;
    float x = 1;
    int ready = 0, frames = 0, before = test_failures;
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    if (rank == 0) {
        CHECK_EQ(dtrain_barrier(world), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(world->error.text, "still forming");
    }
    for (; !ready && frames < 20000; frames++) {
        CHECK_EQ(dtrain_comm_poll(world, 100), DTRAIN_OK);
        CHECK_EQ(dtrain_comm_ready(world, &ready), DTRAIN_OK);
        usleep(500);
    }
    CHECK(ready);
    CHECK_EQ(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    CHECK(x == 2);
    dtrain_comm_destroy(world);
    return test_failures != before;
}

TEST(a_group_forms_by_polling_without_blocking)
{
    scene s;
    pid_t pids[2];
    scene_begin(&s, 2, 1);
    for (int rank = 0; rank < 2; rank++) {
        fflush(stdout);
        if ((pids[rank] = fork()) == 0)
            _exit(async_rank(&s, rank));
    }
    CHECK_EQ(end_of(pids[0], 20), 0);
    CHECK_EQ(end_of(pids[1], 20), 0);
}

static int formed[2]; /* a pipe */

/* While a second process says that it is rank 1. */
static int undisturbed(dtrain_comm *world, scene *s)
{
    float x[2];
    double until = now_s() + 2;
    (void)s;
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(write(formed[1], "", 1), 1);
    do {
        x[0] = 1;
        x[1] = now_s() < until;
        CHECK_EQ(dtrain_all_reduce(world, x, x, 2, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    } while (x[0] == 2 && x[1] > 0);
    CHECK(CHANNEL(world)->hub->members[1 - dtrain_comm_rank(world)].down_ns == 0);
    return 0;
}

TEST(a_second_rank_1_comes_too_late_to_disturb_the_first)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.reconnect_ms = 5000;
    CHECK_EQ(pipe(formed), 0);
    pid_t root = start_rank(&s, 0, undisturbed), one = start_rank(&s, 1, undisturbed);
    char byte;
    close(formed[1]); /* so that two ranks which end early are no wait */
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(read(formed[0], &byte, 1), 1);
    s.desc.timeout_ms = 700;
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_TIMEOUT, "its group is complete and runs"), 10), 0);
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(one, 10), 0);
    close(formed[0]);
}

static int until_told(dtrain_comm *world, scene *s)
{
    int go_on = 1;
    char byte;
    (void)s;
    while (go_on && dtrain_comm_rank(world) == 0) {
        fcntl(formed[0], F_SETFL, O_NONBLOCK);
        go_on = read(formed[0], &byte, 1) != 1;
        if (go_on)
            usleep(10000);
    }
    return dtrain_barrier(world) != DTRAIN_OK;
}

/* Asks a group that was begun without waiting, until it forms or ends. */
static dtrain_status asks_until_told(const dtrain_comm_desc *desc)
{
    dtrain_comm *world = NULL;
    int ready = 0;
    dtrain_status status = dtrain_comm_create_async(&world, desc);
    double until = now_s() + test_ms(20);
    while (status == DTRAIN_OK && !ready && now_s() < until) {
        status = dtrain_comm_ready(world, &ready);
        if (desc->progress == DTRAIN_PROGRESS_POLL)
            CHECK_EQ(dtrain_comm_poll(world, 1000), DTRAIN_OK);
        usleep(1000);
    }
    dtrain_comm_destroy(world);
    return status;
}

TEST(what_rank_0_proves_ends_a_group_that_has_no_deadline)
{
    scene s;
    scene_begin(&s, 2, 1);
    CHECK_EQ(pipe(formed), 0);
    dtrain_set_log(quiet, NULL);
    pid_t ranks[2] = {start_rank(&s, 0, until_told), start_rank(&s, 1, until_told)};
    for (int poll = 0; poll < 2; poll++) {
        dtrain_comm_desc desc = scene_desc(&s, 1);
        desc.timeout_ms = -1;
        desc.progress = poll ? DTRAIN_PROGRESS_POLL : DTRAIN_PROGRESS_THREAD;
        usleep(poll ? 0 : 300000);
        CHECK_EQ(asks_until_told(&desc), DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(dtrain_last_error(), "its group is complete and runs");
        desc.world_size = 3;
        CHECK_EQ(asks_until_told(&desc), DTRAIN_ERR_MISMATCH);
        CHECK_CONTAINS(dtrain_last_error(), "expects a world of 3 ranks");
        desc.world_size = 2;
        desc.token = "not the token of that group";
        desc.timeout_ms = 700; /* a stranger may answer there: only a deadline ends that */
        CHECK_EQ(asks_until_told(&desc), DTRAIN_ERR_DENIED);
    }
    CHECK_EQ(write(formed[1], "", 1), 1);
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(end_of(ranks[rank], 10), 0);
    dtrain_set_log(NULL, NULL);
    close(formed[0]);
    close(formed[1]);
}

TEST(a_root_that_is_taken_and_a_desc_that_cannot_be_are_named)
{
    scene s;
    dtrain__address address;
    int count, fd;
    char long_text[200];
    scene_begin(&s, 2, 1);
    dtrain__net_look_up(s.root, 0, &address, &count);
    CHECK_EQ(dtrain__net_listen(&address, 0, &fd), 0);
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_IO, "another group, an earlier one, or a process"), 10), 0);
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_IO, "is desc.rank=0 given twice?"), 10), 0);
    close(fd);
    s.desc.connections = 9;
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "connections is 9; expected 1 to 8"), 10), 0);
    s.desc.connections = 0;
    memset(long_text, 'x', sizeof long_text);
    long_text[sizeof long_text - 1] = 0;
    s.desc.fingerprint = long_text;
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "fingerprint has 199 bytes"), 10), 0);
    s.desc.fingerprint = NULL;
    s.desc.algorithm = DTRAIN_ALGORITHM_FUSED;
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "DTRAIN_ALGORITHM_FUSED is for ranks that share"), 10), 0);
}

static char told_of_root[1024];

static void keep_root(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    if (level == DTRAIN_LOG_WARN && strstr(text, "does not have the address") != NULL)
        snprintf(told_of_root, sizeof told_of_root, "%s", text);
}

/* Another host may pass on what comes to the root, so rank 0 waits all the same. */
TEST(rank_0_says_at_once_that_its_host_does_not_have_the_root)
{
    const char *const listens_on[] = {NULL, "127.0.0.1"};
    for (int i = 0; i < 2; i++) {
        dtrain_comm_desc desc;
        dtrain_comm *world;
        memset(&desc, 0, sizeof desc);
        desc.world_size = 2;
        desc.root = "192.0.2.1:0"; /* of no host: RFC 5737 */
        desc.token = token;
        desc.timeout_ms = 200;
        desc.listen_on = listens_on[i];
        told_of_root[0] = 0;
        dtrain_set_log(keep_root, NULL);
        CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
        CHECK_CONTAINS(told_of_root, "does not have the address of the root 192.0.2.1:");
        CHECK_CONTAINS(told_of_root, ", and has ");
        CHECK_CONTAINS(told_of_root, "Give every rank a root that rank 0's host has");
        CHECK_CONTAINS(told_of_root, i == 0 ? "Rank 0 listens at 0.0.0.0:" : "Rank 0 listens at 127.0.0.1:");
        dtrain_comm_destroy(world);
        CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_TIMEOUT);
        CHECK_CONTAINS(dtrain_last_error(), " (which is no address of its host) for rank 1;");
    }
    told_of_root[0] = 0;
    dtrain_comm_desc desc;
    dtrain_comm *world;
    memset(&desc, 0, sizeof desc);
    desc.world_size = 2;
    desc.root = "127.0.0.1:0";
    desc.token = token;
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    dtrain_comm_destroy(world);
    CHECK_EQ(told_of_root[0], 0);
    dtrain_set_log(NULL, NULL);
}

TEST(an_interface_is_chosen_by_name_or_refused_by_it)
{
    scene s;
    scene_begin(&s, 3, 1);
    s.desc.listen_on = "lo";
    run_ranks(&s, nothing);
    s.desc.listen_on = "127.0.0.1";
    run_ranks(&s, nothing);
    s.desc.listen_on = "nosuch7";
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "\"nosuch7\" is neither an interface of this host"), 10),
             0);
}

/* Rank 0 calls, and rank 1 polls so seldom that each turn is longer than a stranger gets. */
static int computes_for_long(dtrain_comm *world, scene *s)
{
    float x = 7;
    hook_handshake_ns = 50000000;
    scene_meet(s->ranks);
    if (dtrain_comm_rank(world) == 0) {
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, 1), DTRAIN_OK);
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 1), DTRAIN_OK);
    } else {
        for (int turn = 0; turn < 4; turn++) {
            usleep(150000);
            CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_send(world, &x, 1, DTRAIN_F32, 0), DTRAIN_OK);
    }
    CHECK(x == 7);
    return 0;
}

TEST(a_rank_that_seldom_polls_is_reached_and_not_lost)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        scene s;
        scene_begin(&s, 2, tcp);
        s.desc.progress = DTRAIN_PROGRESS_POLL;
        run_ranks(&s, computes_for_long);
    }
}

TEST(a_strangers_time_runs_while_the_rank_polls_and_what_has_come_is_read_first)
{
    scene s;
    dtrain_comm *world;
    unsigned char hello[128], challenge[80];
    dtrain__address address;
    int count, fd;
    scene_begin(&s, 2, 0);
    dtrain_comm_desc desc = scene_desc(&s, 0);
    desc.progress = DTRAIN_PROGRESS_POLL;
    hook_handshake_ns = 100000000;
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    CHECK_EQ(dtrain__net_look_up(s.root, 0, &address, &count), DTRAIN_OK);
    fd = socket(address.at.any.sa_family, SOCK_STREAM, 0);
    CHECK_EQ(connect(fd, &address.at.any, address.bytes), 0);
    while (CHANNEL(world)->hub->handshakes == NULL)
        CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK);
    usleep(150000); /* the rank computes */
    memset(hello, 0, sizeof hello);
    memcpy(hello, "dtrain\r\n\13\0", 10);
    hello[10] = dtrain__byte_order();
    CHECK(whole(fd, hello, sizeof hello, 1));
    CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK);
    CHECK(whole(fd, challenge, sizeof challenge, 0));
    CHECK_EQ(recv(fd, challenge, 1, MSG_DONTWAIT), -1); /* and it is still open */
    while (CHANNEL(world)->hub->handshakes != NULL)     /* but not for ever */
        CHECK_EQ(dtrain_comm_poll(world, 100), DTRAIN_OK);
    CHECK_EQ(recv(fd, challenge, 1, 0), 0);
    close(fd);
    dtrain_comm_destroy(world);
    hook_handshake_ns = 5000000000;
}

/* A JOIN frame as rank 1 sends it: where it listens, its host, its process, its name, no fingerprint,
 * nothing believed. */
static int joins_from(dtrain__hub *hub, const char *address, const char *name)
{
    unsigned char frame[256];
    size_t bytes = 0, length = strlen(address);
    memset(frame, 0, sizeof frame);
    frame[bytes++] = (unsigned char)length;
    memcpy(frame + bytes, address, length);
    bytes += length + 8 + 16;
    length = strlen(name);
    frame[bytes++] = (unsigned char)length;
    memcpy(frame + bytes, name, length);
    hub->members[1].joined = 0;
    return dtrain__hub_frame(hub, 1, DTRAIN__FRAME_JOIN, frame, bytes + length + 4);
}

/* A log callback: whether the hub was locked meanwhile, and the line. */
static dtrain__hub *logging_hub;
static int logged_locked, logged_lines;
static char logged[700];

static void look_at_lock(void *user, dtrain_log_level level, const char *text)
{
    int locked = pthread_mutex_trylock(&logging_hub->mutex) != 0;
    (void)user;
    (void)level;
    if (!locked)
        pthread_mutex_unlock(&logging_hub->mutex);
    logged_locked += locked;
    logged_lines++;
    snprintf(logged, sizeof logged, "%s", text);
}

TEST(a_peers_address_is_in_numbers_and_its_name_is_printable_where_it_is_quoted)
{
    scene s;
    dtrain_comm *world;
    int ready;
    scene_begin(&s, 2, 0);
    dtrain_comm_desc desc = scene_desc(&s, 0);
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    dtrain__hub *hub = CHANNEL(world)->hub;
    CHECK_EQ(joins_from(hub, "127.0.0.1:4711", "x"), 1);
    CHECK_EQ(joins_from(hub, "[2001:db8::1]:4711", "x"), 1);
    CHECK_EQ(joins_from(hub, ":4711", "x"), 1);
    CHECK_EQ(joins_from(hub, "unix:/tmp/x.1", "x"), 1);
    CHECK_EQ(joins_from(hub, "localhost:4711", "x"), 0); /* any name: who answers for it may take his time */
    CHECK_EQ(joins_from(hub, "", "x"), 1);               /* it never listens */
    CHECK_EQ(joins_from(hub, ":1", "\x1b[31mred\r\n\xff\xc2\x9b caf\xc3\xa9 \x7f"), 1);
    hub->members[1].control.fd = -1;
    dtrain__hub_formed(hub);
    dtrain__hub_lost(hub, 1, "gone");
    CHECK_EQ(dtrain_comm_ready(world, &ready), DTRAIN_ERR_PEER_LOST);
    CHECK_CONTAINS(world->error.text, "rank 1 (?[31mred????? caf\xc3\xa9 ?) is lost: gone");
    dtrain_comm_destroy(world);
}

TEST(the_log_is_written_while_nobody_waits_for_it)
{
    scene s;
    dtrain_comm *world;
    dtrain__address address;
    unsigned char hello[128];
    int count, fd;
    scene_begin(&s, 2, 0);
    dtrain_comm_desc desc = scene_desc(&s, 0);
    desc.progress = DTRAIN_PROGRESS_POLL;
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    logging_hub = CHANNEL(world)->hub;
    dtrain_set_log(look_at_lock, NULL);
    CHECK_EQ(dtrain__net_look_up(s.root, 0, &address, &count), DTRAIN_OK);
    fd = socket(address.at.any.sa_family, SOCK_STREAM, 0);
    CHECK_EQ(connect(fd, &address.at.any, address.bytes), 0);
    version_2(hello, sizeof hello);
    CHECK(whole(fd, hello, sizeof hello, 1));
    for (double until = now_s() + 10; logged_lines == 0 && now_s() < until;)
        CHECK_EQ(dtrain_comm_poll(world, 0), DTRAIN_OK);
    CHECK_EQ(logged_lines, 1);
    CHECK_EQ(logged_locked, 0);
    CHECK_CONTAINS(logged, "speaks wire version 2");
    close(fd);
    dtrain_set_log(NULL, NULL);
    dtrain_comm_destroy(world);
}
