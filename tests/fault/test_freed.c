/* A program frees a buffer under an operation: with DTRAIN_DEBUG=1 a line names the operation and the buffer before the
 * signal goes where it went before. */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include <sys/resource.h>

#define COUNT ((size_t)1 << 20)

typedef struct mistake {
    int receives; /* the operation writes to the buffer */
    int small;    /* the buffer is smaller than the call says, and the call waits */
    int debug, handler;
} mistake;

static int *gone; /* shared by all processes: the buffer is unmapped */

static void exits(int number)
{
    _exit(number == SIGSEGV || number == SIGBUS ? 42 : 43);
}

static float *floats(void)
{
    void *pages = mmap(NULL, COUNT * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    return (float *)pages;
}

static dtrain_status frees_too_early(dtrain_comm *world, void *user)
{
    const mistake *m = (const mistake *)user;
    int rank = dtrain_comm_rank(world);
    float *x = floats();
    dtrain_work *work;
    dtrain_status status;
    DTRAIN_IGNORE(dtrain_barrier(world));
    if (rank == 0 && m->small)
        munmap(x + COUNT / 2, COUNT / 2 * sizeof *x);
    while (rank != 0 && !m->small && !__atomic_load_n(gone, __ATOMIC_SEQ_CST))
        usleep(1000);
    if (m->small)
        return dtrain_all_reduce(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM);
    status = m->receives ? dtrain_broadcast_async(world, x, COUNT, DTRAIN_F32, 1, &work)
                         : dtrain_all_reduce_async(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM, &work);
    CHECK_EQ(status, DTRAIN_OK);
    if (rank == 0) {
        munmap(x, COUNT * sizeof *x);
        __atomic_store_n(gone, 1, __ATOMIC_SEQ_CST);
    }
    return dtrain_work_wait(work);
}

static int frees_as_process(dtrain_comm *world, scene *s)
{
    int rank = dtrain_comm_rank(world);
    if (frees_too_early(world, s->user) != DTRAIN_OK && rank == 0)
        fprintf(stderr, "%s\n", dtrain_last_error());
    return 0;
}

/* Runs it, by threads or by processes; what rank 0 writes to stderr goes into text. Returns how its process ended. */
static int end_of_mistake(mistake *m, int way, int threads, char *text, size_t room)
{
    int ends[2], end = 0;
    size_t used = 0;
    ssize_t n;
    scene s;
    scene_begin_by(&s, 2, way);
    s.user = m;
    *gone = 0;
    CHECK_EQ(pipe(ends), 0);
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        const struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        setenv("DTRAIN_DEBUG", m->debug ? "1" : "0", 1);
        if (m->handler)
            signal(SIGSEGV, exits), signal(SIGBUS, exits);
        if (threads)
            _exit(dtrain_run_threads(2, frees_too_early, m, NULL) != DTRAIN_OK);
        _exit(rank_main(&s, 0, frees_as_process));
    }
    close(ends[1]);
    pid_t other = threads ? 0 : start_rank(&s, 1, frees_as_process);
    while ((n = read(ends[0], text + used, room - 1 - used)) > 0)
        used += (size_t)n;
    text[used] = 0;
    close(ends[0]);
    end = end_of(pid, 30);
    if (!threads)
        end_of(other, 30);
    return end;
}

static void check_mistake(mistake m, int way, int threads, const char *call)
{
    char text[8192];
    const char *reads = m.receives ? " writes to the program's buffer out=0x" : " reads the program's buffer in=0x";
    int end = end_of_mistake(&m, way, threads, text, sizeof text);
    if (m.handler)
        CHECK_EQ(end, 42);
    else
        CHECK(end == 128 + SIGSEGV || end == 128 + SIGBUS);
    if (!m.debug) {
        CHECK(strstr(text, "the program's buffer") == NULL);
        return;
    }
    CHECK_CONTAINS(text, call);
    if (strstr(text, " uses the program's buffer ") == NULL) /* where the system does not tell a read from a write */
        CHECK_CONTAINS(text, reads);
    CHECK_CONTAINS(text, " of 4194304 bytes, which is not there at byte ");
}

static void share(void)
{
    if (gone == NULL)
        gone = (int *)mmap(NULL, sizeof *gone, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

TEST(a_buffer_freed_under_an_operation_is_named_before_the_process_dies)
{
    const char *reduce = "dtrain: all_reduce #2 (sum, f32 x 1048576) of rank 0",
               *broadcast = "dtrain: broadcast #2 (f32 x 1048576) of rank 0";
    mistake m = {0};
    share();
    m.debug = 1;
    for (m.handler = 0; m.handler < 2; m.handler++) {
        m.receives = m.small = 0;
        check_mistake(m, UNIX, 1, reduce);
        check_mistake(m, UNIX, 0, reduce);
        m.small = 1;
        check_mistake(m, UNIX, 1, reduce);
        m.small = 0;
        m.receives = 1;
        check_mistake(m, UNIX, 1, broadcast);
    }
    m.handler = m.receives = m.debug = 0;
    check_mistake(m, UNIX, 1, reduce);
}

/* The system then tells of it instead of a signal. */
TEST(a_system_call_that_meets_a_freed_buffer_says_so)
{
    mistake m = {0};
    char text[8192];
    share();
    m.receives = 1;
    CHECK_EQ(end_of_mistake(&m, TCP, 0, text, sizeof text), 0);
    CHECK_CONTAINS(text, "broadcast #2 (f32 x 1048576, root 1) on rank 0: ");
    CHECK_CONTAINS(text, "the program's memory for what goes in from rank 1 is not there at 0x");
}
