/* Roots that are names, with addresses of several families. The ranks are processes in a network of their own, with
 * interfaces, addresses and a file of host names that the test makes. */
#ifdef __linux__
#define _GNU_SOURCE
#include <sched.h>
#include <sys/mount.h>
#endif
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "meetings.h"

#ifdef __linux__

enum { NO_NETWORK = 77 };

static char hosts_file[64]; /* stands for /etc/hosts */

static void hosts(const char *text)
{
    FILE *file = fopen(hosts_file, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static int put_in_place_of(const char *path, const char *text)
{
    char own[] = "/tmp/test-root-names-XXXXXX";
    int fd = mkstemp(own), good;
    good = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && fchmod(fd, 0644) == 0 &&
           mount(own, path, NULL, MS_BIND, NULL) == 0;
    close(fd);
    unlink(own); /* it stays while it is mounted */
    return good;
}

/* Gives this process a network with a loopback device of these addresses, and names that only the file of host names
 * has. Returns 0 where that is not permitted. */
static int own_network(void)
{
    snprintf(hosts_file, sizeof hosts_file, "/etc/hosts");
    return unshare(CLONE_NEWNS | CLONE_NEWNET) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           put_in_place_of("/etc/hosts", "") && put_in_place_of("/etc/nsswitch.conf", "hosts: files dns\n") &&
           put_in_place_of("/etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n") &&
           system("ip link set lo up && ip addr add 10.77.9.1/32 dev lo && ip addr add fd79::1/128 dev lo") == 0;
}

/* Runs a body in a process with a network of its own. */
static void in_own_network(void (*body)(void))
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int before = test_failures;
        if (!own_network())
            _exit(NO_NETWORK);
        body();
        fflush(stdout);
        _exit(test_failures != before);
    }
    int end = end_of(pid, 60);
    if (end == NO_NETWORK)
        printf("skipped: networks of their own need root and iproute2\n");
    else
        CHECK_EQ(end, 0);
}

static void scene_at(scene *s, int ranks, const char *root)
{
    scene_begin(s, ranks, 1);
    snprintf(s->root, sizeof s->root, "%s", root);
}

static pid_t start_at(scene *s, int rank, const char *root)
{
    snprintf(s->root, sizeof s->root, "%s", root);
    return start_rank(s, rank, nothing);
}

static void meets_over_both_families(void)
{
    scene s;
    hosts("fd79::1 master\n10.77.9.1 master\n");
    scene_at(&s, 3, "");
    pid_t root = start_at(&s, 0, "master:29500"), v4 = start_at(&s, 1, "10.77.9.1:29500"),
          v6 = start_at(&s, 2, "[fd79::1]:29500");
    CHECK_EQ(end_of(root, 30), 0);
    CHECK_EQ(end_of(v4, 30), 0);
    CHECK_EQ(end_of(v6, 30), 0);
}

TEST(rank_0_listens_at_all_addresses_of_its_name)
{
    in_own_network(meets_over_both_families);
}

static void leaves_out_what_is_elsewhere(void)
{
    scene s;
    hosts("fd79::2 master\n10.77.9.1 master\n10.77.9.2 master\n");
    scene_at(&s, 2, "");
    pid_t root = start_at(&s, 0, "master:29500"), one = start_at(&s, 1, "10.77.9.1:29500");
    CHECK_EQ(end_of(root, 30), 0);
    CHECK_EQ(end_of(one, 30), 0);
}

static void localhost_is_for_other_hosts(void)
{
    scene s;
    hosts("::1 localhost\n127.0.0.1 localhost\n");
    scene_at(&s, 3, "");
    pid_t root = start_at(&s, 0, "localhost:29500"), v4 = start_at(&s, 1, "10.77.9.1:29500"),
          v6 = start_at(&s, 2, "[fd79::1]:29500");
    CHECK_EQ(end_of(root, 30), 0);
    CHECK_EQ(end_of(v4, 30), 0);
    CHECK_EQ(end_of(v6, 30), 0);
    CHECK_CONTAINS(listens_at("127.0.0.1:0", token).text, "127.0.0.1:");
}

TEST(with_a_token_localhost_on_rank_0_is_for_other_hosts_as_well)
{
    in_own_network(localhost_is_for_other_hosts);
}

TEST(rank_0_leaves_out_addresses_that_its_host_does_not_have)
{
    in_own_network(leaves_out_what_is_elsewhere);
}

/* Two hosts on one link. Their names of it differ, and so do its numbers. */
static void meets_on_a_link(void)
{
    scene s;
    char byte, command[160];
    int ready[2];
    CHECK_EQ(pipe(ready), 0);
    scene_at(&s, 3, "");
    fflush(stdout);
    pid_t other = fork();
    if (other == 0) { /* host B, of ranks 1 and 2 */
        int before = test_failures;
        CHECK(unshare(CLONE_NEWNET) == 0 && write(ready[1], "", 1) == 1);
        for (int i = 0; i < 500 && system("ip link show vb >/dev/null 2>&1") != 0; i++)
            usleep(10000);
        CHECK_EQ(system("ip link set lo up && ip link set vb up && "
                        "ip addr add fe80::b/64 dev vb nodad"),
                 0);
        pid_t one = start_at(&s, 1, "[fe80::a%vb]:29500"), two = start_at(&s, 2, "[fe80::a%vb]:29500");
        CHECK_EQ(end_of(one, 30), 0);
        CHECK_EQ(end_of(two, 30), 0);
        fflush(stdout);
        _exit(test_failures != before);
    }
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    snprintf(command, sizeof command,
             "ip link add va type veth peer name vb && ip link set vb netns %ld && ip link set va up && "
             "ip addr add fe80::a/64 dev va nodad",
             (long)other);
    CHECK_EQ(system(command), 0);
    pid_t root = start_at(&s, 0, "[fe80::a%va]:29500");
    CHECK_EQ(end_of(root, 30), 0);
    CHECK_EQ(end_of(other, 30), 0);
}

TEST(each_host_uses_its_own_zone_of_a_link)
{
    in_own_network(meets_on_a_link);
}

/* A name that is not known yet, then leads elsewhere, then to rank 0. */
static void meets_once_the_name_is_known(void)
{
    scene s;
    dtrain_set_log(quiet, NULL);
    scene_at(&s, 2, "");
    pid_t one = start_at(&s, 1, "master:29500");
    usleep(300000);
    hosts("10.77.9.3 master\n");
    usleep(1500000);
    pid_t root = start_at(&s, 0, "10.77.9.1:29500");
    hosts("10.77.9.1 master\n");
    CHECK_EQ(end_of(one, 30), 0);
    CHECK_EQ(end_of(root, 30), 0);
    hosts("10.77.9.2 master\n");
    scene_at(&s, 2, "");
    root = start_at(&s, 0, "late:29500");
    one = start_at(&s, 1, "late:29500");
    usleep(500000);
    hosts("10.77.9.1 late\n"); /* rank 0 does not know its own name before, either */
    CHECK_EQ(end_of(one, 30), 0);
    CHECK_EQ(end_of(root, 30), 0);
}

TEST(a_name_is_looked_up_again_until_it_leads_to_rank_0)
{
    in_own_network(meets_once_the_name_is_known);
}

/* The name server takes questions and answers none: the system waits 30 s for it. */
static void waits_for_no_name_server(void)
{
    scene s;
    dtrain_comm *world = NULL;
    struct sockaddr_in server;
    int fd = socket(AF_INET, SOCK_DGRAM, 0), ready;
    double began = now_s();
    memset(&server, 0, sizeof server);
    server.sin_family = AF_INET;
    server.sin_port = htons(53);
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(bind(fd, (struct sockaddr *)&server, sizeof server), 0);
    scene_at(&s, 2, "master.example:29500");
    for (int rank = 0; rank < 2; rank++) {
        s.desc.timeout_ms = 500;
        dtrain_comm_desc desc = scene_desc(&s, rank);
        CHECK_EQ(dtrain_comm_create(&world, &desc), DTRAIN_ERR_TIMEOUT);
        CHECK_CONTAINS(dtrain_last_error(), rank == 0 ? "rank 0 of 2 could not listen at master.example:29500"
                                                      : "for rank 0 at master.example:29500");
        CHECK_CONTAINS(dtrain_last_error(), "the system's resolver has not answered");
        desc.progress = DTRAIN_PROGRESS_POLL;
        desc.timeout_ms = 60000;
        CHECK_EQ(dtrain_comm_create_async(&world, &desc), DTRAIN_OK);
        for (int frame = 0; frame < 10; frame++) {
            CHECK_EQ(dtrain_comm_poll(world, 1000), DTRAIN_OK);
            CHECK_EQ(dtrain_comm_ready(world, &ready), DTRAIN_OK);
        }
        dtrain_comm_destroy(world);
    }
    CHECK(now_s() - began < 25);
    close(fd);
}

TEST(a_look_up_that_hangs_delays_neither_the_deadline_nor_a_frame)
{
    in_own_network(waits_for_no_name_server);
}

#else

TEST(networks_of_their_own_need_linux)
{
    printf("skipped: networks of their own need Linux\n");
}

#endif
