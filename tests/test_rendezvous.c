/* How processes meet: tokens, world sizes, fingerprints, addresses, early and late ones, those that do not get in.
 * Every rank is a process of its own. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"

static const char token[] = "sixteen bytes or more of secret";

/* Ranks that do not get in: each runs create and expects an error. */
typedef struct misfit {
    dtrain_status expected;
    const char *text;
} misfit;

static int refused(scene *s, int rank, misfit m)
{
    dtrain_comm_desc desc = scene_desc(s, rank);
    dtrain_comm *world;
    int before = test_failures;
    CHECK_EQ(dtrain_comm_create(&world, &desc), m.expected);
    CHECK(world == NULL);
    CHECK_CONTAINS(dtrain_last_error(), m.text);
    return test_failures != before;
}

static pid_t start_refused(scene *s, int rank, dtrain_status expected, const char *text)
{
    misfit m = {expected, text};
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(refused(s, rank, m));
    return pid;
}

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
    snprintf(s.root, sizeof s.root, "0.0.0.0:0");
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_DENIED, "there is no token: set DTRAIN_TOKEN"), 5), 0);
    snprintf(s.root, sizeof s.root, "192.0.2.1:29500");
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_DENIED, "192.0.2.1:29500 is beyond this host"), 5), 0);
}

/* Where rank 0 listens, as text. */
static dtrain__address_text listens_at(const char *root, const char *secret)
{
    dtrain_comm_desc desc;
    dtrain_comm *world;
    dtrain__address_text text = {""};
    memset(&desc, 0, sizeof desc);
    desc.world_size = 2;
    desc.root = root;
    desc.token = secret;
    CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
    if (world != NULL)
        text = dtrain__net_text(&world->socket->hub->listening);
    dtrain_comm_destroy(world);
    return text;
}

TEST(a_hosts_name_that_means_loopback_there_is_for_other_hosts_as_well)
{
    char root[80] = "";
    dtrain__address addresses[DTRAIN__MAX_ADDRESSES];
    int count;
    CHECK(strncmp(listens_at("127.0.0.1:0", token).text, "127.0.0.1:", 10) == 0);
    CHECK(strncmp(listens_at("localhost:0", NULL).text, "0.0.0.0:", 8) != 0);
    CHECK_EQ(gethostname(root, 64), 0);
    strcat(root, ":0");
    if (dtrain__net_resolve(root, addresses, &count) != DTRAIN_OK || !dtrain__net_is_local(&addresses[0]) ||
        strncmp(root, "localhost:", 10) == 0) {
        printf("skipped: this host's name does not mean loopback\n");
        return;
    }
    CHECK_CONTAINS(listens_at(root, token).text, addresses[0].at.any.sa_family == AF_INET ? "0.0.0.0:" : "[::]:");
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
    pid_t root = start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, "believes in a world of 3 ranks");
    pid_t other = start_refused(&larger, 1, DTRAIN_ERR_MISMATCH, "believes in a world of 3 ranks, rank 0 in one of 2");
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(other, 10), 0);
    dtrain_set_log(NULL, NULL);
}

static int nothing(dtrain_comm *world, scene *s)
{
    (void)s;
    return dtrain_barrier(world) != DTRAIN_OK;
}

TEST(two_processes_with_one_rank_are_told_apart)
{
    scene s;
    scene_begin(&s, 3, 1);
    dtrain_set_log(quiet, NULL);
    pid_t root = start_rank(&s, 0, nothing), first = start_rank(&s, 1, nothing);
    usleep(300000);
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_MISMATCH, "two processes say they are rank 1"), 10), 0);
    pid_t last = start_rank(&s, 2, nothing);
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(first, 10), 0);
    CHECK_EQ(end_of(last, 10), 0);
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
    CHECK_EQ(dtrain__net_resolve("127.0.0.1:0", &address, &count), DTRAIN_OK);
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
    shutdown(world->socket->hub->listener, SHUT_RDWR);
    usleep(200000);
    CHECK_EQ(dtrain_recv(world, &x, 1, DTRAIN_F32, 3 - dtrain_comm_rank(world)), DTRAIN_ERR_TIMEOUT);
    CHECK_CONTAINS(dtrain_comm_error(world), "no connection to it: connect: the connection to 127.0.0.1:");
    CHECK_CONTAINS(dtrain_comm_error(world), "(Connection refused)");
    CHECK_CONTAINS(dtrain_comm_error(world), "the call can be made again");
    usleep(500000); /* or the other one would hear that this one has left */
    return 0;
}

TEST(a_timeout_says_that_no_connection_could_be_made)
{
    scene s;
    scene_begin(&s, 3, 1);
    s.desc.timeout_ms = 700;
    dtrain_set_log(quiet, NULL);
    run_ranks(&s, behind_a_firewall);
    dtrain_set_log(NULL, NULL);
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
        CHECK_CONTAINS(dtrain_comm_error(world), "still forming");
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

/* While a second process says that it is rank 1. */
static int undisturbed(dtrain_comm *world, scene *s)
{
    float x[2];
    double until = now_s() + 2;
    (void)s;
    do {
        x[0] = 1;
        x[1] = now_s() < until;
        CHECK_EQ(dtrain_all_reduce(world, x, x, 2, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    } while (x[0] == 2 && x[1] > 0);
    CHECK(world->socket->hub->members[1 - dtrain_comm_rank(world)].down_ns == 0);
    return 0;
}

TEST(a_second_rank_1_comes_too_late_to_disturb_the_first)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.reconnect_ms = 5000;
    pid_t root = start_rank(&s, 0, undisturbed), one = start_rank(&s, 1, undisturbed);
    usleep(500000);
    s.desc.timeout_ms = 700;
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_TIMEOUT, "its group is complete and runs"), 10), 0);
    CHECK_EQ(end_of(root, 10), 0);
    CHECK_EQ(end_of(one, 10), 0);
}

TEST(a_root_that_is_taken_and_a_desc_that_cannot_be_are_named)
{
    scene s;
    dtrain__address address;
    int count, fd;
    char long_text[200];
    scene_begin(&s, 2, 1);
    dtrain__net_resolve(s.root, &address, &count);
    CHECK_EQ(dtrain__net_listen(&address, &fd), 0);
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_IO, "another group, or the last one, is there"), 10), 0);
    close(fd);
    s.desc.connections = 9;
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "9 connections to a peer; 1 to 8"), 10), 0);
    s.desc.connections = 0;
    memset(long_text, 'x', sizeof long_text);
    long_text[sizeof long_text - 1] = 0;
    s.desc.fingerprint = long_text;
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "a fingerprint of 199 bytes"), 10), 0);
    s.desc.fingerprint = NULL;
    s.desc.algorithm = DTRAIN_ALGORITHM_FUSED;
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "DTRAIN_ALGORITHM_FUSED is for ranks that share"), 10), 0);
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
