/* Ranks as real processes for tests: run_ranks() forks them, a body returns 0 when its checks held. With TEST_SEALED=1
 * in the environment their connections are sealed. Ranks that meet over unix sockets share memory where they can, and
 * those that meet over TCP do not; TEST_TRANSPORT=tcp, unix or shm says otherwise. On Windows ranks are threads, which
 * meet over TCP. */
#ifndef DTRAIN_TEST_PROCESSES_H
#define DTRAIN_TEST_PROCESSES_H
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pairs.h"

#define MAX_PROCESSES 64

#ifdef _WIN32
#define SCENE_THREADS 1 /* ranks are threads, which cannot close the pairs of others: they meet over TCP */
#else
#define SCENE_THREADS 0
#endif

/* How the ranks of a scene meet: over unix sockets, TCP, or a transport of the user's own, without and with `alive`,
 * and with `host` too. */
enum { UNIX = 0, TCP, OWN, OWN_ASKED, OWN_HOST, WAYS };

/* A group's end in the hub of its process. */
#define CHANNEL(world) ((dtrain__channel *)(world)->transport.self)

typedef struct scene {
    int ranks, seconds; /* seconds: that a process may take; 0: 60 */
    char root[128];
    dtrain_comm_desc desc; /* rank, world_size and root are filled in */
    void *user;
    pairs *own;            /* NULL: ranks meet at the root */
    const char *transport; /* DTRAIN_TRANSPORT; empty: none; NULL: tcp for TCP with a token, else none */
} scene;

typedef int (*rank_body)(dtrain_comm *world, scene *s);

static char scene_directory[64];

static void scene_clean(void)
{
    if (scene_directory[0] != 0)
        rmdir(scene_directory);
}

/* A port of the loopback device that nobody listens at. Several tests run at once: each program tries ports of its own
 * first, below those that a system gives to connections (from 32768 on Linux, 49152 elsewhere), as one of these could
 * be taken before rank 0 listens. */
static int free_port(void)
{
    static int serial;
    struct sockaddr_in address;
    int taken = 1, port = 0;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int tries = 0; taken && tries < 1000; tries++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        port = 10000 + (int)((getpid() * 64L + serial++) % 20000);
        address.sin_port = htons((uint16_t)port);
        taken = bind(fd, (struct sockaddr *)&address, sizeof address) != 0;
        close(fd);
    }
    CHECK(!taken);
    return port;
}

/* A root that nobody else uses: a path in a directory of this program's, or a free port of the loopback device. */
static void scene_root(scene *s, int tcp)
{
    static int serial;
    if (tcp) {
        snprintf(s->root, sizeof s->root, "127.0.0.1:%d", free_port());
        return;
    }
    if (scene_directory[0] == 0) {
        snprintf(scene_directory, sizeof scene_directory, "/tmp/dtrain-test-XXXXXX");
        CHECK(mkdtemp(scene_directory) != NULL);
        atexit(scene_clean);
    }
    snprintf(s->root, sizeof s->root, "unix:%s/r%d", scene_directory, serial++);
}

int dtrain__without(const char *what); /* private, and so not declared for tests of the public functions alone */

/* A machine without unix sockets has the loopback device. */
static int scene_has_unix(void)
{
    int fd = dtrain__without("unix") ? -1 : socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static int *scene_met; /* shared with the processes: how often one has come to scene_meet() */

__attribute__((unused)) static void scene_begin(scene *s, int ranks, int tcp)
{
    const char *directory = getenv("TEST_MPI_DIRECTORY");
    char board[256]; /* a file of zeros, for ranks that no parent has forked */
    snprintf(board, sizeof board, "%s/board", directory != NULL ? directory : "");
    int fd = directory != NULL ? open(board, O_RDWR) : -1;
    if (scene_met == NULL)
        scene_met = (int *)mmap(NULL, sizeof *scene_met, PROT_READ | PROT_WRITE,
                                MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    if (fd < 0)
        *scene_met = 0;
    else
        close(fd);
    memset(s, 0, sizeof *s);
    s->ranks = ranks;
    s->desc.timeout_ms = test_ms(20000);
    tcp |= !scene_has_unix();
    tcp |= getenv("TEST_TRANSPORT") != NULL && strcmp(getenv("TEST_TRANSPORT"), "tcp") == 0;
    s->desc.token = tcp ? "what TCP takes to meet" : NULL;
    scene_root(s, tcp);
}

__attribute__((unused)) static void scene_begin_by(scene *s, int ranks, int way)
{
    static pairs *last;
    scene_begin(s, ranks, way == TCP);
    free(last);
    s->own = last = way >= OWN && !SCENE_THREADS ? pairs_new(ranks, way >= OWN_ASKED) : NULL;
    if (way == OWN_HOST && s->own != NULL)
        s->own->hosts = 1;
}

/* Comes back when all ranks' processes are here. Before one of them breaks: a barrier ends with an error on a rank that
 * hears of that while it is still in there. */
__attribute__((unused)) static void scene_meet(int ranks)
{
    int all = (__atomic_fetch_add(scene_met, 1, __ATOMIC_SEQ_CST) / ranks + 1) * ranks;
    while (__atomic_load_n(scene_met, __ATOMIC_SEQ_CST) < all)
        usleep(100);
}

/* Seals what a test leaves open, where that is asked for. */
static void scene_seal(dtrain_comm_desc *desc)
{
    if (getenv("TEST_SEALED") == NULL || desc->secure != 0)
        return;
    desc->secure = 1;
    desc->token = desc->token != NULL ? desc->token : "a token that seals this test";
}

static dtrain_comm_desc scene_desc(scene *s, int rank)
{
    dtrain_comm_desc desc = s->desc;
    const char *transport = getenv("TEST_TRANSPORT");
    if (desc.token == NULL && SCENE_THREADS)
        desc.token = "what TCP takes to meet";
    if (transport == NULL)
        transport = s->transport != NULL                                      ? s->transport
                    : strncmp(s->root, "unix:", 5) != 0 && desc.token != NULL ? "tcp"
                                                                              : "";
    if (transport[0] != 0)
        setenv("DTRAIN_TRANSPORT", transport, 1);
    else
        unsetenv("DTRAIN_TRANSPORT");
    desc.rank = rank;
    desc.world_size = s->ranks;
    desc.root = s->root;
    scene_seal(&desc);
    return desc;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* For tests whose ranks have reason to complain. */
__attribute__((unused)) static void quiet(void *user, dtrain_log_level level, const char *text)
{
    (void)user;
    (void)level;
    (void)text;
}

static dtrain_status scene_join(dtrain_comm **world, scene *s, int rank)
{
    dtrain_comm_desc desc = scene_desc(s, rank);
    if (s->own == NULL)
        return dtrain_comm_create(world, &desc);
    pairs_close(s->own, rank, 1);
    return pairs_join(world, s->own, rank, &desc);
}

/* The parent of a rank's process keeps none of its ends, which show by closing when that dies. */
static void scene_started(scene *s, int rank)
{
    if (s->own != NULL)
        pairs_close(s->own, rank, 0);
}

/* One rank's process: joins, runs the body, leaves. */
static int rank_main(scene *s, int rank, rank_body body)
{
    dtrain_comm *world = NULL;
    int before = test_failures;
    dtrain_status status = scene_join(&world, s, rank);
    if (status != DTRAIN_OK) {
        test_judge(status, "scene_join", "DTRAIN_OK");
        TEST_FAIL("rank %d: %s", rank, dtrain_last_error());
        return test_end();
    }
    int bad = body(world, s);
    dtrain_comm_destroy(world);
    return test_failures != before ? test_end() : bad != 0;
}

#ifdef _WIN32 /* no fork: a rank is a thread, its pid the address of this */
typedef struct scene_rank {
    scene *s;
    rank_body body;
    HANDLE thread;
    int rank, end;
} scene_rank;

static unsigned __stdcall scene_rank_main(void *pointer)
{
    scene_rank *own = (scene_rank *)pointer;
    own->end = rank_main(own->s, own->rank, own->body);
    return 0;
}

__attribute__((unused)) static pid_t start_rank(scene *s, int rank, rank_body body)
{
    scene_rank *own = (scene_rank *)calloc(1, sizeof *own);
    own->s = s;
    own->rank = rank;
    own->body = body;
    own->thread = (HANDLE)_beginthreadex(NULL, 0, scene_rank_main, own, 0, NULL);
    return (pid_t)own;
}

static int end_of(pid_t pid, double seconds)
{
    scene_rank *own = (scene_rank *)pid;
    int end = WaitForSingleObject(own->thread, (DWORD)(seconds * 1000 * test_slow())) == WAIT_OBJECT_0 ? own->end : -1;
    CloseHandle(own->thread);
    if (end >= 0)
        free(own);
    return end;
}
#else
__attribute__((unused)) static pid_t start_rank(scene *s, int rank, rank_body body)
{
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0)
        _exit(rank_main(s, rank, body));
    scene_started(s, rank);
    return pid;
}

/* Says what the threads of a process wait for, if the system shows it. */
static void tell_waits(pid_t pid)
{
    char command[256];
    snprintf(command, sizeof command,
             "[ -d /proc/%ld/task ] && for t in /proc/%ld/task/*; do echo \"$t: $(sed -n '/State/s/.*://p' $t/status) "
             "in $(cat $t/wchan), call "
             "$(cat $t/syscall)\"; done >&2 2>/dev/null",
             (long)pid, (long)pid);
    if (system(command) != 0)
        fprintf(stderr, "process %ld has not ended, and its threads are not shown\n", (long)pid);
}

/* Waits for a process; -1 when it has not ended in time and had to be killed. */
static int end_of(pid_t pid, double seconds)
{
    int status;
    double until = now_s() + seconds * test_slow();
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (now_s() > until) {
            tell_waits(pid);
            kill(pid, SIGCONT);
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        usleep(2000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
#endif

/* Under mpiexec this process is a rank of the scenes that have as many. Others are skipped, and those with a victim. */
static int run_rank_of_mpi(scene *s, int victim, rank_body body)
{
    const char *ranks = getenv("TEST_MPI_RANKS");
    if (ranks != NULL && atoi(ranks) == s->ranks && victim < 0 && s->own == NULL) {
        CHECK_EQ(rank_main(s, 0, body), 0);
        printf("ran %d ranks of MPI\n", s->ranks);
    }
    return ranks != NULL;
}

/* Runs the body once a rank, each in a process of its own. All must return 0, but the victim, which kills itself; -1:
 * there is none. */
static void run_ranks_but(scene *s, int victim, rank_body body)
{
    pid_t pids[MAX_PROCESSES];
    if (run_rank_of_mpi(s, victim, body))
        return;
    for (int rank = 0; rank < s->ranks; rank++)
        pids[rank] = start_rank(s, rank, body);
    for (int rank = 0; rank < s->ranks; rank++) {
        int end = end_of(pids[rank], s->seconds > 0 ? s->seconds : 60);
        if (end == (rank == victim ? 128 + SIGKILL : 0))
            continue;
        test_judge(end, "end_of()", "");
        TEST_FAIL("rank %d of %d at %s ended with %d", rank, s->ranks, s->root, end);
    }
}

__attribute__((unused)) static void run_ranks(scene *s, rank_body body)
{
    run_ranks_but(s, -1, body);
}

#endif
