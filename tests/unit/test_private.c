/* How processes meet without a token: where only their user may enter, or over TCP where that is asked for. Every rank
 * is a process of its own. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include "meetings.h"

static char own_directory[120];

/* Leaves names out that are no files, or lets the environment say so again. Returns whether this system has them then.
 */
static int names(int on)
{
    static char before[200];
    const char *without = getenv("DTRAIN_WITHOUT");
    if (!on) {
        char text[220];
        snprintf(before, sizeof before, "%s", without != NULL ? without : "");
        snprintf(text, sizeof text, "%s%sabstract", before, before[0] != 0 ? "," : "");
        setenv("DTRAIN_WITHOUT", text, 1);
    } else if (before[0] != 0) {
        setenv("DTRAIN_WITHOUT", before, 1);
    } else {
        unsetenv("DTRAIN_WITHOUT");
    }
    dtrain__os_without_mask = 0; /* the environment is read again */
    return dtrain__net_has_names();
}

static int no_unix_sockets(void)
{
    if (!scene_has_unix())
        printf("skipped: no unix sockets here\n");
    return !scene_has_unix();
}

TEST(where_there_are_no_unix_sockets_a_token_is_asked_for)
{
    scene s;
    scene_begin(&s, 2, 1);
    s.desc.token = NULL;
    dtrain__net_has(AF_UNIX);
    uint32_t before = dtrain__os_without_mask;
    setenv("DTRAIN_WITHOUT", "unix", 1);
    dtrain__os_without_mask = 0; /* the environment is read again */
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(end_of(start_refused(&s, rank, DTRAIN_ERR_DENIED,
                                      "no unix sockets, and there is no token: set DTRAIN_TOKEN"),
                        10),
                 0);
    unsetenv("DTRAIN_WITHOUT");
    dtrain__os_without_mask = before;
}

TEST(without_ipv6_a_name_stands_for_its_other_addresses)
{
    dtrain__address found[DTRAIN__MAX_ADDRESSES];
    int count;
    dtrain__net_has(AF_INET6);
    uint32_t before = dtrain__os_without_mask;
    setenv("DTRAIN_WITHOUT", "ipv6", 1);
    dtrain__os_without_mask = 0;
    CHECK_EQ(dtrain__net_look_up("[::1]:29500", 0, found, &count), DTRAIN_ERR_IO);
    CHECK_CONTAINS(dtrain_last_error(), "[::1]:29500: no IPv4 or IPv6 address that this host can use");
    CHECK_EQ(dtrain__net_look_up("localhost:29500", 0, found, &count), DTRAIN_OK);
    for (int i = 0; i < count; i++)
        CHECK_EQ(found[i].at.any.sa_family, AF_INET);
    unsetenv("DTRAIN_WITHOUT");
    dtrain__os_without_mask = before;
}

/* A root on loopback for ranks without a token, who meet in own_directory: TMPDIR is this program's own meanwhile. */
static void scene_private(scene *s, int ranks)
{
    char parent[64];
    scene_begin(s, ranks, 0);
    snprintf(parent, sizeof parent, "%s", scene_directory);
    setenv("TMPDIR", parent, 1);
    snprintf(own_directory, sizeof own_directory, "%s/dtrain-%ld", parent, (long)geteuid());
    snprintf(s->root, sizeof s->root, "127.0.0.1:%d", free_port());
}

static void private_end(void)
{
    CHECK_EQ(rmdir(own_directory), 0); /* the ranks have left nothing in it */
    unsetenv("TMPDIR");
}

static void socket_of(const scene *s, char path[160])
{
    snprintf(path, 160, "%.110s%s", own_directory, strchr(s->root, ':'));
    *strrchr(path, ':') = '/';
}

/* Every listener and connection of this rank is a unix socket of the user's own directory. */
static int meets_in_private(dtrain_comm *world, scene *s)
{
    const dtrain__hub *hub = CHANNEL(world)->hub;
    char path[160];
    struct stat what;
    dtrain__address address;
    int count, fd;
    socket_of(s, path);
    CHECK(lstat(path, &what) == 0 && S_ISSOCK(what.st_mode));
    CHECK(lstat(own_directory, &what) == 0 && (what.st_mode & 07777) == 0700);
    CHECK_CONTAINS(dtrain__net_text(&hub->listening).text, own_directory);
    CHECK_EQ(dtrain__net_look_up(s->root, 0, &address, &count), DTRAIN_OK);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, &address.at.any, address.bytes) != 0 && errno == ECONNREFUSED);
    close(fd);
    return nothing(world, s);
}

TEST(without_a_token_the_ranks_of_a_port_on_loopback_meet_where_only_their_user_may_enter)
{
    scene s;
    char path[160];
    dtrain__address address;
    if (no_unix_sockets())
        return;
    CHECK(!names(0));
    scene_private(&s, 3);
    s.desc.listen_on = "0.0.0.0"; /* no way around it */
    run_ranks(&s, meets_in_private);
    s.desc.listen_on = NULL;
    socket_of(&s, path); /* what a killed job has left is in nobody's way */
    CHECK_EQ(dtrain__net_unix_address(&address, path), DTRAIN_OK);
    CHECK_EQ(mkdir(own_directory, 0700), errno == EEXIST ? -1 : 0);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(bind(fd, &address.at.any, address.bytes) == 0 && listen(fd, 1) == 0);
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_IO, "another group, an earlier one, or a process"), 10), 0);
    close(fd);
    pid_t one = start_rank(&s, 1, meets_in_private), two = start_rank(&s, 2, meets_in_private);
    usleep(100000); /* early ones find their way as well */
    pid_t root = start_rank(&s, 0, meets_in_private);
    CHECK(end_of(root, 20) == 0 && end_of(one, 20) == 0 && end_of(two, 20) == 0);
    snprintf(s.root, sizeof s.root, "127.0.0.1:0");
    CHECK_CONTAINS(listens_at(s.root, NULL).text, own_directory);
    s.desc.timeout_ms = 200;
    snprintf(s.root, sizeof s.root, "localhost:9");
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_TIMEOUT, "or set DTRAIN_TOKEN on every rank"), 10), 0);
    private_end();
    names(1);
}

/* Every listener of this rank is a name. A rank is killed, and nothing is left. */
static int meets_by_name(dtrain_comm *world, scene *s)
{
    const dtrain__hub *hub = CHANNEL(world)->hub;
    int rank = dtrain_comm_rank(world);
    CHECK(dtrain__net_is_abstract(&hub->listening));
    CHECK_CONTAINS(dtrain__net_text(&hub->listening).text, rank == 0 ? own_directory : "unix:@");
    CHECK(access(own_directory, F_OK) != 0);
    CHECK_EQ(nothing(world, s), 0);
    if (rank == *(int *)s->user)
        kill(getpid(), SIGKILL);
    return 0;
}

TEST(names_of_unix_sockets_leave_no_file)
{
    scene s;
    char taken[160];
    dtrain__address address;
    int victim = 0;
    if (no_unix_sockets() || !dtrain__net_has_names()) {
        printf("skipped: no names of unix sockets here\n");
        return;
    }
    scene_private(&s, 3);
    s.user = &victim;
    dtrain_set_log(quiet, NULL);
    for (; victim < 3; victim++) /* a name is free at once when its process has died */
        run_ranks_but(&s, victim, meets_by_name);
    CHECK(access(own_directory, F_OK) != 0);
    snprintf(taken, sizeof taken, "@%s/%s", own_directory, strchr(s.root, ':') + 1);
    CHECK_EQ(dtrain__net_unix_address(&address, taken), DTRAIN_OK);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(bind(fd, &address.at.any, address.bytes) == 0 && listen(fd, 1) == 0);
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_IO, "another group, an earlier one, or a process"), 10), 0);
    close(fd);
    snprintf(s.root, sizeof s.root, "127.0.0.1:0");
    CHECK_CONTAINS(listens_at(s.root, NULL).text, own_directory);
    unsetenv("TMPDIR");
    snprintf(s.root, sizeof s.root, "unix:@dtrain-test-%ld", (long)getpid()); /* one that the user gives */
    victim = 3;
    run_ranks(&s, nothing);
    CHECK(!names(0));
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_INVALID, "has no names for unix sockets: give a path"), 10), 0);
    names(1);
    dtrain_set_log(NULL, NULL);
}

TEST(a_meeting_place_that_others_may_enter_is_refused)
{
    scene s;
    if (no_unix_sockets())
        return;
    CHECK(!names(0));
    scene_private(&s, 2);
    CHECK_EQ(mkdir(own_directory, 0755), 0);
    CHECK_EQ(chmod(own_directory, 0755), 0);
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_DENIED, "of this user that nobody else may enter"), 10), 0);
    CHECK_EQ(end_of(start_refused(&s, 1, DTRAIN_ERR_DENIED, "of this user that nobody else may enter"), 10), 0);
    CHECK_EQ(rmdir(own_directory), 0);
    CHECK_EQ(symlink(scene_directory, own_directory), 0);
    CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_DENIED, "of this user that nobody else may enter"), 10), 0);
    CHECK_EQ(unlink(own_directory), 0);
    CHECK_EQ(mkdir(own_directory, 0700), 0);
    if (geteuid() == 0) {
        CHECK_EQ(chown(own_directory, 65534, 65534), 0);
        CHECK_EQ(end_of(start_refused(&s, 0, DTRAIN_ERR_DENIED, "of this user that nobody else may enter"), 10), 0);
    }
    private_end();
    names(1);
}

static int over_tcp(dtrain_comm *world, scene *s)
{
    CHECK(!dtrain__net_is_unix(&CHANNEL(world)->hub->listening));
    return nothing(world, s);
}

TEST(tcp_without_a_token_has_to_be_asked_for)
{
    scene s;
    char fd_text[16];
    struct sockaddr_in address;
    socklen_t bytes = sizeof address;
    if (no_unix_sockets())
        return;
    scene_private(&s, 2);
    s.desc.insecure = 1;
    run_ranks(&s, over_tcp);
    s.desc.insecure = 0;
    for (int any = 0; any < 2; any++) { /* a listener that a launcher has left open, to this host or to all */
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        memset(&address, 0, sizeof address);
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(any ? INADDR_ANY : INADDR_LOOPBACK);
        CHECK(bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 4) == 0);
        CHECK_EQ(getsockname(fd, (struct sockaddr *)&address, &bytes), 0);
        snprintf(s.root, sizeof s.root, "127.0.0.1:%d", ntohs(address.sin_port));
        snprintf(fd_text, sizeof fd_text, "%d", fd);
        setenv("DTRAIN_RANK", "0", 1);
        setenv("DTRAIN_WORLD_SIZE", "2", 1);
        setenv("DTRAIN_ROOT", s.root, 1);
        setenv("DTRAIN_LISTEN_FD", fd_text, 1);
        dtrain_comm *world;
        CHECK_EQ(dtrain_comm_create_async(&world, NULL), DTRAIN_ERR_DENIED);
        CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_LISTEN_FD listens at ");
        CHECK_CONTAINS(dtrain_last_error(), any ? " 0.0.0.0:" : " 127.0.0.1:");
        CHECK_CONTAINS(dtrain_last_error(), "set DTRAIN_TOKEN");
        CHECK_CONTAINS(dtrain_last_error(), "or start the ranks with dtrun");
        close(fd);
    }
    unsetenv("DTRAIN_RANK");
    unsetenv("DTRAIN_WORLD_SIZE");
    unsetenv("DTRAIN_ROOT");
    unsetenv("DTRAIN_LISTEN_FD");
    rmdir(own_directory);
    unsetenv("TMPDIR");
}

/* Another user, at a unix socket that all may use: comes as a rank would, or waits for one. */
static int as_nobody(scene *s, int listens)
{
    dtrain__address address;
    char byte;
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    double until = now_s() + 10;
    if (setuid(65534) != 0 || dtrain__net_unix_address(&address, s->root + 5) != DTRAIN_OK)
        return 1;
    if (listens)
        return bind(fd, &address.at.any, address.bytes) != 0 ||
               (!dtrain__net_is_abstract(&address) && chmod(s->root + 5, 0777) != 0) || listen(fd, 4) != 0 ||
               (fd = accept(fd, NULL, NULL)) < 0 || recv(fd, &byte, 1, 0) != 0;
    while (connect(fd, &address.at.any, address.bytes) != 0)
        if (now_s() > until)
            return 2;
    return recv(fd, &byte, 1, 0) != 0; /* closed at once */
}

TEST(without_a_token_another_user_is_nobodys_peer)
{
    scene s;
    if (no_unix_sockets())
        return;
    if (geteuid() != 0) {
        printf("skipped: only root can be two users\n");
        return;
    }
    for (int way = 0; way < 4; way++) {
        int listens = way % 2, named = way / 2 && dtrain__net_has_names();
        scene_begin(&s, 2, 0);
        if (named)
            snprintf(s.root, sizeof s.root, "unix:@dtrain-test-%ld-%d", (long)getpid(), way);
        s.desc.insecure = named; /* all users of the host reach a name */
        CHECK_EQ(chmod(scene_directory, 0777), 0);
        s.desc.timeout_ms = listens ? 10000 : 1500;
        dtrain_set_log(quiet, NULL);
        mode_t before = umask(0); /* of rank 0's socket */
        fflush(stdout);
        pid_t nobody = fork();
        if (nobody == 0)
            _exit(as_nobody(&s, listens));
        for (int i = 0; named && listens && i < 200; i++)
            usleep(1000); /* a rank that comes too early is refused by nobody, and tries again */
        while (listens && !named && access(s.root + 5, F_OK) != 0 && waitpid(nobody, NULL, WNOHANG) == 0)
            usleep(1000);
        pid_t rank = listens ? start_refused(&s, 1, DTRAIN_ERR_DENIED, "belongs to another user, and there is no token")
                             : start_refused(&s, 0, DTRAIN_ERR_TIMEOUT, "another user's process came");
        umask(before);
        CHECK_EQ(end_of(nobody, 20), 0);
        CHECK_EQ(end_of(rank, 20), 0);
        unlink(s.root + 5);
        dtrain_set_log(NULL, NULL);
        CHECK_EQ(chmod(scene_directory, 0700), 0);
    }
}

/* Every rank has met at the path in the user's own directory. */
static int meets_at_the_path(dtrain_comm *world, scene *s)
{
    const dtrain__hub *hub = CHANNEL(world)->hub;
    CHECK(!dtrain__net_is_abstract(&hub->listening));
    CHECK_CONTAINS(dtrain__net_text(&hub->listening).text, own_directory);
    return nothing(world, s);
}

/* Another user binds the name of a group first, and listens there or does not. */
TEST(a_name_that_another_user_holds_stops_no_group)
{
    if (no_unix_sockets() || !dtrain__net_has_names() || geteuid() != 0) {
        printf("skipped: this takes names of unix sockets, and root to be two users\n");
        return;
    }
    for (int way = 0; way < 4; way++) {
        scene s;
        char name[160], byte = 0;
        dtrain__address address;
        int ready[2];
        scene_private(&s, 3);
        if (way / 2)
            s.desc.token = "a token of this test's";
        snprintf(name, sizeof name, "@%s/%s", own_directory, strchr(s.root, ':') + 1);
        if (way / 2) /* with a token a port on loopback is TCP */
            snprintf(s.root, sizeof s.root, "unix:%.110s", name);
        CHECK_EQ(dtrain__net_unix_address(&address, name), DTRAIN_OK);
        CHECK_EQ(pipe(ready), 0);
        fflush(stdout);
        pid_t nobody = fork();
        if (nobody == 0) {
            int fd = socket(AF_UNIX, SOCK_STREAM, 0);
            if (setuid(65534) != 0 || bind(fd, &address.at.any, address.bytes) != 0 ||
                (way % 2 && listen(fd, 20) != 0) || write(ready[1], "", 1) != 1)
                _exit(1);
            pause();
        }
        CHECK_EQ(read(ready[0], &byte, 1), 1);
        dtrain_set_log(quiet, NULL);
        run_ranks(&s, meets_at_the_path);
        dtrain_set_log(NULL, NULL);
        kill(nobody, SIGKILL);
        CHECK_EQ(end_of(nobody, 10), 128 + SIGKILL);
        close(ready[0]);
        close(ready[1]);
        private_end();
    }
}
