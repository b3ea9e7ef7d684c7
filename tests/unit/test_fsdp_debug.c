/* Mistakes in the order of FSDP's and DDP's calls that would train on other numbers without a word: what is an error
 * always, and what DTRAIN_DEBUG finds besides. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "test.h"
#include "processes.h"
#include <setjmp.h>
#include <signal.h>
#include <sys/resource.h>

#define UNITS 4
#define EACH 40000 /* elements of a unit: many pages, and one that it shares with each neighbour */

static void describe(dtrain_param *table)
{
    memset(table, 0, sizeof *table);
    table[0].name = "layers";
    table[0].dtype = DTRAIN_F32;
    table[0].shape[0] = UNITS;
    table[0].shape[1] = EACH;
    table[0].stacked = 1;
}

/* ---- a reduce without a gather ---- */

typedef struct way {
    dtrain_strategy strategy;
    int stays; /* 1: no_reshard_after_forward; 2: unshard */
    int legal;
} way;

static dtrain_status forward(dtrain_fsdp *fsdp, int releases)
{
    dtrain_status status = DTRAIN_OK;
    for (int u = 0; u < UNITS && status == DTRAIN_OK; u++) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK && releases)
            status = dtrain_fsdp_release(fsdp, u);
    }
    return status;
}

static dtrain_status backward(dtrain_fsdp *fsdp, int gathers, int releases)
{
    dtrain_status status = DTRAIN_OK;
    for (int u = UNITS - 1; u >= 0 && status == DTRAIN_OK; u--) {
        if (gathers)
            status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK)
            dtrain_fsdp_unit_grad(fsdp, "layers", u)[7] += 1.0f;
        if (status == DTRAIN_OK && releases)
            status = dtrain_fsdp_release(fsdp, u);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, u);
    }
    return status;
}

static dtrain_status reduces_ungathered(dtrain_comm *world, void *user)
{
    const way *w = (const way *)user;
    dtrain_param table[1];
    dtrain_fsdp_desc desc = {0};
    dtrain_fsdp *fsdp = NULL;
    char expected[128];
    describe(table);
    desc.strategy = w->strategy;
    desc.shard_size = dtrain_comm_size(world);
    desc.no_reshard_after_forward = w->stays == 1;
    desc.optimizer.kind = DTRAIN_SGD;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, &desc), DTRAIN_OK);
    for (int micro = 0; micro < 2; micro++) {
        CHECK_EQ(forward(fsdp, 1), DTRAIN_OK);
        if (w->stays == 2)
            CHECK_EQ(dtrain_fsdp_unshard(fsdp), DTRAIN_OK);
        CHECK_EQ(backward(fsdp, 0, 0), w->legal ? DTRAIN_OK : DTRAIN_ERR_INVALID);
        snprintf(expected, sizeof expected, "unit %d was released on rank %d after its forward pass", UNITS - 1,
                 dtrain_comm_rank(world));
        CHECK_CONTAINS(w->legal ? expected : dtrain_last_error(), expected);
        snprintf(expected, sizeof expected, "call dtrain_fsdp_gather(fsdp, %d) before its backward", UNITS - 1);
        CHECK_CONTAINS(w->legal ? expected : dtrain_last_error(), expected);
        if (!w->legal) { /* the object stays as it was, but for the gradient that this test has added already */
            dtrain_fsdp_unit_grad(fsdp, "layers", UNITS - 1)[7] = 0.0f;
            CHECK_EQ(backward(fsdp, 1, 0), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_fsdp_reduce(fsdp, 1), DTRAIN_ERR_INVALID);
        CHECK_CONTAINS(dtrain_last_error(), "call dtrain_fsdp_gather(fsdp, 1), compute, then reduce");
    }
    CHECK_EQ(dtrain_fsdp_step(fsdp, 1.0f), DTRAIN_OK);
    CHECK_EQ(forward(fsdp, 0), DTRAIN_OK); /* what is held since the forward pass is there */
    CHECK_EQ(backward(fsdp, 0, 0), DTRAIN_OK);
    CHECK_EQ(forward(fsdp, 1), DTRAIN_OK);
    CHECK_EQ(backward(fsdp, 1, 1), DTRAIN_OK); /* released on the way down, and not left out yet */
    CHECK_EQ(dtrain_fsdp_step(fsdp, 1.0f), DTRAIN_OK);
    float value[UNITS * EACH];
    CHECK_EQ(dtrain_fsdp_get(fsdp, "layers", value, -1), DTRAIN_OK);
    for (int u = 0; u < UNITS; u++)
        CHECK(value[u * EACH + 7] == -4.0f && value[u * EACH + 8] == 0.0f);
    dtrain_fsdp_destroy(fsdp);
    return DTRAIN_OK;
}

TEST(a_reduce_of_a_unit_that_this_pass_has_not_gathered_is_an_error)
{
    way ways[] = {{DTRAIN_FULL_SHARD, 0, 0}, {DTRAIN_HYBRID_SHARD, 0, 0},  {DTRAIN_FULL_SHARD, 1, 1},
                  {DTRAIN_FULL_SHARD, 2, 1}, {DTRAIN_SHARD_GRAD_OP, 0, 1}, {DTRAIN_DDP, 0, 1}};
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++)
        for (int ranks = 1; ranks <= 3; ranks++)
            CHECK_EQ(dtrain_run_threads(ranks, reduces_ungathered, &ways[i], NULL), DTRAIN_OK);
}

/* ---- memory that is watched ---- */

enum {
    NO_MISTAKE,
    NO_GATHER,
    RELEASED,
    WRITTEN,
    AFTER_REDUCE,
    WHILE_IT_WAITS,
    SHARED_PAGE,
    ANOTHERS_SLICE,
    IN_A_CHILD,
    KILLED,
    ELSEWHERE
};

enum { AS_IT_WAS, SIGINFO, PLAIN, IGNORED, ONCE, JUMPS }; /* what the program does with the signal */

typedef struct mistake {
    int what, handler, ranks, own_memory, processes;
    size_t each; /* elements of a unit; 0: EACH */
    dtrain_fsdp_desc desc;
    const char *expected; /* of stderr; NULL: nothing */
    int ends;             /* with this exit status; 0: by SIGSEGV or SIGBUS where a line is expected */
} mistake;

static volatile float sink;
static sigjmp_buf back;
static int handled;

static void say(const char *text)
{
    ssize_t ignored = write(2, text, strlen(text));
    (void)ignored;
}

static char stack[1 << 16];

static void on_siginfo(int number, siginfo_t *info, void *context)
{
    char here;
    int alternate = &here > stack && &here < stack + sizeof stack;
    (void)context;
    say(info->si_addr != NULL && alternate ? "own handler\n" : "not as it was\n");
    _exit(number == SIGSEGV || number == SIGBUS ? 42 : 43);
}

static void on_signal(int number)
{
    (void)number;
    say("own handler\n");
    _exit(42);
}

static void once(int number)
{
    (void)number;
    say("once\n");
}

static void jumps(int number)
{
    (void)number;
    handled++;
    siglongjmp(back, 1);
}

static void handle(int how)
{
    const int signals[2] = {SIGSEGV, SIGBUS};
    struct sigaction action;
    stack_t other = {0};
    memset(&action, 0, sizeof action);
    action.sa_handler = how == PLAIN ? on_signal : how == ONCE ? once : how == JUMPS ? jumps : SIG_IGN;
    action.sa_flags = how == ONCE ? (int)SA_RESETHAND : how == JUMPS ? SA_NODEFER : 0;
    if (how == SIGINFO) {
        action.sa_sigaction = on_siginfo;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        other.ss_sp = stack;
        other.ss_size = sizeof stack;
        sigaltstack(&other, NULL);
    }
    for (int i = 0; i < 2 && how != AS_IT_WAS; i++)
        sigaction(signals[i], &action, NULL);
}

/* Forgets a gather, or writes a gradient too late, on the last rank. */
static void err(dtrain_fsdp *fsdp, const mistake *m, size_t each)
{
    float *params = dtrain_fsdp_param(fsdp, "layers"), *grads = dtrain_fsdp_grad(fsdp, "layers");
    size_t middle = 2 * each + each / 2 + 64; /* of unit 2 */
    pid_t child;
    int status;
    switch (m->what) {
    case NO_GATHER:
    case RELEASED: sink = params[middle]; break;
    case ANOTHERS_SLICE: sink = params[2 * each + each / 4]; break;
    case WRITTEN: params[middle] = 1.0f; break;
    case AFTER_REDUCE:
    case WHILE_IT_WAITS: grads[middle] += 1.0f; break;
    case SHARED_PAGE: sink = params[2 * each - 1] + params[3 * each]; break;
    case IN_A_CHILD:
        child = fork();
        if (child == 0)
            sink = params[middle];
        waitpid(child, &status, 0);
        _exit(WIFSIGNALED(status) ? 44 : 45);
    case KILLED: raise(SIGSEGV); break;
    case ELSEWHERE: *(volatile int *)(uintptr_t)64 = 1; break;
    default: break;
    }
}

static dtrain_status makes_a_mistake(dtrain_comm *world, void *user)
{
    const mistake *m = (const mistake *)user;
    dtrain_param table[1];
    dtrain_fsdp *fsdp = NULL;
    size_t each = m->each > 0 ? m->each : EACH;
    int me = dtrain_comm_rank(world) == dtrain_comm_size(world) - 1;
    dtrain_status status;
    describe(table);
    table[0].shape[1] = each;
    if (m->own_memory) {
        table[0].data = malloc(UNITS * each * sizeof(float));
        table[0].grad = (float *)malloc(UNITS * each * sizeof(float));
        memset(table[0].data, 0, UNITS * each * sizeof(float));
    }
    status = dtrain_fsdp_create(&fsdp, world, table, 1, &m->desc);
    if (status == DTRAIN_OK && m->what == RELEASED)
        status = forward(fsdp, 1);
    if (status == DTRAIN_OK && m->what >= AFTER_REDUCE && m->what <= SHARED_PAGE)
        status = forward(fsdp, 1);
    for (int u = m->what == WHILE_IT_WAITS ? 2 : UNITS - 1;
         u >= 2 && (m->what == AFTER_REDUCE || m->what == WHILE_IT_WAITS) && status == DTRAIN_OK; u--) {
        status = dtrain_fsdp_gather(fsdp, u);
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, u);
    }
    if (status == DTRAIN_OK && m->what == SHARED_PAGE)
        status = dtrain_fsdp_gather(fsdp, 2);
    if (me && status == DTRAIN_OK)
        err(fsdp, m, each);
    if (status == DTRAIN_OK && m->what != AFTER_REDUCE && m->what != WHILE_IT_WAITS)
        status = forward(fsdp, 1);
    for (int u = UNITS - 1; u >= 0 && status == DTRAIN_OK && m->what == NO_MISTAKE; u--) {
        status = dtrain_fsdp_gather(fsdp, u);
        dtrain_fsdp_unit_grad(fsdp, "layers", u)[each / 2] += dtrain_fsdp_unit_param(fsdp, "layers", u)[5];
        if (status == DTRAIN_OK)
            status = dtrain_fsdp_reduce(fsdp, u);
    }
    dtrain_fsdp_destroy(fsdp);
    free(table[0].data);
    free(table[0].grad);
    return status;
}

static int rank_of_a_mistake(dtrain_comm *world, scene *s)
{
    return makes_a_mistake(world, s->user) != DTRAIN_OK;
}

/* Runs it in a process of its own; what that writes to stderr goes into text. Returns how it ended. */
static int end_of_mistake(const mistake *m, char *text, size_t room)
{
    int ends[2], status = 0;
    size_t used = 0;
    ssize_t n;
    CHECK_EQ(pipe(ends), 0);
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid == 0) {
        const struct rlimit none = {0, 0};
        mistake copy = *m;
        scene s;
        setrlimit(RLIMIT_CORE, &none);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        handle(m->handler);
        if (!m->processes)
            _exit(dtrain_run_threads(m->ranks, makes_a_mistake, &copy, NULL) != DTRAIN_OK);
        scene_begin(&s, m->ranks, 0);
        s.user = &copy;
        pid_t first = start_rank(&s, 0, rank_of_a_mistake);
        close(1);
        status = rank_main(&s, 1, rank_of_a_mistake);
        end_of(first, 10);
        _exit(status);
    }
    close(ends[1]);
    while ((n = read(ends[0], text + used, room - 1 - used)) > 0)
        used += (size_t)n;
    text[used] = 0;
    char *emulator = strstr(text, "qemu: uncaught target signal"); /* a line that qemu adds where a fault ends */
    if (emulator != NULL)
        *emulator = 0;
    close(ends[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static int is_fault(int end)
{
    return end == -SIGSEGV || end == -SIGBUS;
}

#define LINE_OF(rank, verb, unit) \
    "dtrain: rank " #rank " " verb " parameter layers (unit " #unit \
    "), which is not gathered: call dtrain_fsdp_gather(fsdp, " #unit ") before\n"
#define GRAD_OF(rank, unit) \
    "dtrain: rank " #rank " wrote the gradient of parameter layers (unit " #unit \
    ") after the unit was reduced, so the sum would miss it: write it before dtrain_fsdp_reduce(fsdp, " #unit \
    "), or for the next micro-batch call dtrain_fsdp_gather(fsdp, " #unit ") before\n"

/* Where the system does not tell a read from a write, a parameter was "used". */
static void check_line(const char *text, const char *expected)
{
    char other[512];
    const char *verb = strstr(expected, " parameter ");
    int before = verb != NULL ? (int)(verb - expected) : 0, skip = before - 4;
    while (skip > 0 && expected[skip - 1] != ' ')
        skip--;
    snprintf(other, sizeof other, "%.*sused%s", skip > 0 ? skip : 0, expected, verb != NULL ? verb : "");
    if (strcmp(text, expected) != 0 && strcmp(text, other) != 0)
        TEST_FAIL("stderr has \"%s\", expected \"%s\"", text, expected);
}

static void check_mistake(mistake m)
{
    char text[4096];
    int before = test_failures;
    m.ranks = m.ranks > 0 ? m.ranks : 2;
    m.desc.debug = 1;
    int end = end_of_mistake(&m, text, sizeof text);
    if (m.ends != 0 || m.expected == NULL)
        CHECK_EQ(end, m.ends);
    else
        CHECK(is_fault(end));
    check_line(text, m.expected != NULL ? m.expected : "");
    if (test_failures != before)
        TEST_FAIL("mistake %d, handler %d, strategy %d on %d ranks", m.what, m.handler, (int)m.desc.strategy, m.ranks);
}

/* A test that needs closed pages, on a system that closes none. */
static int no_pages_close(void)
{
    if (dtrain__without("mprotect"))
        printf("skipped: DTRAIN_WITHOUT has mprotect\n");
    return dtrain__without("mprotect");
}

TEST(a_parameter_that_is_not_gathered_cannot_be_read)
{
    if (no_pages_close())
        return;
    mistake m;
    memset(&m, 0, sizeof m);
    for (int own = 0; own < 2; own++) {
        m.own_memory = own;
        m.expected = LINE_OF(1, "read", 2);
        m.what = RELEASED;
        check_mistake(m);
        m.what = NO_GATHER;
        check_mistake(m);
        m.desc.gather_dtype = DTRAIN_BF16;
        check_mistake(m);
        m.desc.gather_dtype = DTRAIN_F32;
        m.desc.quantise_gather = 256;
        check_mistake(m);
        m.desc.quantise_gather = 0;
        m.what = WRITTEN;
        m.expected = LINE_OF(1, "wrote", 2);
        check_mistake(m);
        m.expected = NULL;
        m.what = SHARED_PAGE; /* stays open while one of its units is */
        check_mistake(m);
        m.what = NO_MISTAKE;
        check_mistake(m);
    }
    m.what = NO_GATHER;
    m.expected = LINE_OF(3, "read", 2);
    m.ranks = 4;
    m.desc.strategy = DTRAIN_HYBRID_SHARD;
    m.desc.shard_size = 2;
    check_mistake(m);
    m.ranks = 2;
    m.desc.strategy = DTRAIN_FULL_SHARD;
    m.expected = NULL;
    m.each = 300000; /* the last rank's slice stays where it is, and readable: the middle of unit 2 is its first part */
    check_mistake(m);
    m.what = ANOTHERS_SLICE;
    m.expected = LINE_OF(1, "read", 2);
    check_mistake(m);
    m.what = NO_GATHER;
    m.expected = NULL;
    m.each = 0;
    m.desc.strategy = DTRAIN_SHARD_GRAD_OP; /* keeps all parameters */
    check_mistake(m);
}

TEST(a_gradient_that_was_reduced_cannot_be_written)
{
    if (no_pages_close())
        return;
    static const dtrain_strategy strategies[] = {DTRAIN_FULL_SHARD, DTRAIN_SHARD_GRAD_OP, DTRAIN_DDP};
    mistake m;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < 12; i++) {
        m.desc.strategy = strategies[i % 3];
        m.own_memory = i / 3 % 2;
        m.desc.reduce_dtype = i / 6 ? DTRAIN_BF16 : DTRAIN_F32;
        m.what = i % 2 ? WHILE_IT_WAITS : AFTER_REDUCE;
        m.expected = GRAD_OF(1, 2);
        check_mistake(m);
    }
    memset(&m, 0, sizeof m);
    m.what = AFTER_REDUCE;
    m.ranks = 1;
    m.expected = GRAD_OF(0, 2);
    check_mistake(m);
}

static dtrain_status debugs_on_one_rank(dtrain_comm *world, void *user)
{
    dtrain_param table[1];
    dtrain_fsdp_desc desc = {0};
    dtrain_fsdp *fsdp = NULL;
    (void)user;
    describe(table);
    desc.debug = dtrain_comm_rank(world) == 1;
    CHECK_EQ(dtrain_fsdp_create(&fsdp, world, table, 1, &desc), DTRAIN_ERR_MISMATCH);
    CHECK_CONTAINS(dtrain_last_error(), "desc.debug (or DTRAIN_DEBUG) 0 on rank 0, but 1 on rank 1");
    return DTRAIN_OK;
}

TEST(all_ranks_are_watched_or_none)
{
    CHECK_EQ(dtrain_run_threads(2, debugs_on_one_rank, NULL, NULL), DTRAIN_OK);
}

TEST(the_programs_own_handler_is_called_as_it_would_be)
{
    if (no_pages_close())
        return;
    mistake m;
    memset(&m, 0, sizeof m);
    m.what = NO_GATHER;
    m.ends = 42;
    m.expected = LINE_OF(1, "read", 2) "own handler\n";
    m.processes = 1; /* the stack for signals is its thread's that has set it up */
    m.handler = SIGINFO;
    check_mistake(m);
    m.processes = 0;
    m.handler = PLAIN;
    check_mistake(m);
    m.ends = 0;
    m.handler = IGNORED; /* which a fault is not */
    m.expected = LINE_OF(1, "read", 2);
    check_mistake(m);
    m.handler = ONCE; /* the second time the default is back */
    m.expected = LINE_OF(1, "read", 2) "once\n";
    check_mistake(m);
    memset(&m, 0, sizeof m);
    m.processes = 1;
    m.what = NO_GATHER; /* the default, in a process a rank */
    m.expected = LINE_OF(1, "read", 2);
    check_mistake(m);
    m.processes = 0;
    m.what = IN_A_CHILD;
    m.ends = 44;
    check_mistake(m);
    m.expected = NULL;
    for (m.what = KILLED; m.what <= ELSEWHERE; m.what++) {
        char text[4096];
        m.desc.debug = 1;
        m.ranks = 2;
        CHECK_EQ(end_of_mistake(&m, text, sizeof text), -SIGSEGV);
        CHECK_EQ(strlen(text), 0); /* not of this library's making */
    }
}

static struct sigaction now_for(int number)
{
    struct sigaction now;
    CHECK_EQ(sigaction(number, NULL, &now), 0);
    return now;
}

TEST(the_handler_is_there_while_something_is_watched)
{
    if (no_pages_close())
        return;
    dtrain_comm_desc one = {0};
    dtrain_comm *world = NULL;
    dtrain_fsdp *fsdps[2] = {NULL, NULL};
    dtrain_fsdp_desc desc = {0};
    dtrain_param table[1];
    int read_end[2];
    one.world_size = 1;
    CHECK_EQ(dtrain_comm_create(&world, &one), DTRAIN_OK);
    handle(JUMPS);
    desc.optimizer.kind = DTRAIN_SGD;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 2; i++) {
            describe(table);
            desc.debug = round == 0 ? 1 : 0;
            CHECK_EQ(dtrain_fsdp_create(&fsdps[i], world, table, 1, &desc), DTRAIN_OK);
            CHECK((now_for(SIGSEGV).sa_handler == jumps) == (round == 1));
            CHECK((now_for(SIGBUS).sa_handler == jumps) == (round == 1));
        }
        CHECK_EQ(forward(fsdps[1], 0), DTRAIN_OK);
        CHECK_EQ(backward(fsdps[1], 0, 0), DTRAIN_OK);
        handled = 0;
        CHECK_EQ(pipe(read_end), 0); /* lines about what follows are not this test's */
        int kept = dup(2);
        for (volatile int i = 0; i < 2; i++) { /* a handler that does not return: the next fault is as good */
            dup2(read_end[1], 2);
            if (sigsetjmp(back, 1) == 0)
                dtrain_fsdp_grad(fsdps[1], "layers")[EACH / 2] = 1.0f;
            dup2(kept, 2);
            CHECK_EQ(handled, round == 0 ? i + 1 : 0);
        }
        close(kept);
        close(read_end[0]);
        close(read_end[1]);
        dtrain_fsdp_destroy(fsdps[0]);
        CHECK((now_for(SIGSEGV).sa_handler == jumps) == (round == 1));
        dtrain_fsdp_destroy(fsdps[1]);
        CHECK(now_for(SIGSEGV).sa_handler == jumps && now_for(SIGBUS).sa_handler == jumps);
        CHECK_EQ(now_for(SIGSEGV).sa_flags & SA_NODEFER, SA_NODEFER);
    }
    desc.debug = 1;
    describe(table);
    CHECK_EQ(dtrain_fsdp_create(&fsdps[0], world, table, 1, &desc), DTRAIN_OK);
    handle(PLAIN); /* the program replaces it: that one stays */
    dtrain_fsdp_destroy(fsdps[0]);
    CHECK(now_for(SIGSEGV).sa_handler == on_signal);
    signal(SIGSEGV, SIG_DFL);
    signal(SIGBUS, SIG_DFL);
    dtrain_comm_destroy(world);
}

/* ---- memory of two objects ---- */

/* After a regroup a program may make the next object before it destroys the last one. */
static dtrain_status makes_another(dtrain_comm *world, void *user)
{
    int goes_on = *(const int *)user;
    dtrain_param table[1];
    dtrain_fsdp *fsdps[2] = {NULL, NULL};
    dtrain_fsdp_desc desc = {0};
    float value[UNITS * EACH];
    describe(table);
    table[0].data = calloc(UNITS * EACH, sizeof(float));
    table[0].grad = calloc(UNITS * EACH, sizeof(float));
    desc.optimizer.kind = DTRAIN_SGD;
    desc.debug = 1;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(dtrain_fsdp_create(&fsdps[i], world, table, 1, &desc), DTRAIN_OK);
        CHECK_EQ(forward(fsdps[i], 1), DTRAIN_OK);
        CHECK_EQ(backward(fsdps[i], 1, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdps[i], 1.0f), DTRAIN_OK);
    }
    if (!goes_on) {
        dtrain_fsdp_destroy(fsdps[0]);
        fsdps[0] = NULL;
    }
    for (int i = goes_on ? 0 : 1; i < 2; i++) {
        CHECK_EQ(forward(fsdps[i], 1), DTRAIN_OK);
        CHECK_EQ(backward(fsdps[i], 1, 0), DTRAIN_OK);
        CHECK_EQ(dtrain_fsdp_step(fsdps[i], 1.0f), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_fsdp_get(fsdps[1], "layers", value, -1), DTRAIN_OK);
    for (int u = 0; u < UNITS && !goes_on; u++)
        CHECK(value[u * EACH + 8] == 0.0f);
    dtrain_fsdp_destroy(fsdps[1]);
    dtrain_fsdp_destroy(fsdps[0]);
    free(table[0].data);
    free(table[0].grad);
    return DTRAIN_OK;
}

TEST(memory_that_two_objects_have_stays_open)
{
    for (int goes_on = 0; goes_on <= 1; goes_on++)
        for (int ranks = 1; ranks <= 3; ranks++)
            CHECK_EQ(dtrain_run_threads(ranks, makes_another, &goes_on, NULL), DTRAIN_OK);
}

/* ---- a system that closes no pages ---- */

static void log_lines(void *user, dtrain_log_level level, const char *text)
{
    *(int *)user += level == DTRAIN_LOG_WARN && strstr(text, "nothing is watched, training goes on") != NULL;
}

TEST(where_pages_cannot_be_closed_the_log_says_so_once_and_training_goes_on)
{
    mistake m;
    int lines = 0;
    pid_t pid = fork();
    if (pid == 0) {
        setenv("DTRAIN_WITHOUT", "mprotect", 1);
        dtrain__os_without_mask = 0; /* the environment is read again */
        dtrain_set_log(log_lines, &lines);
        memset(&m, 0, sizeof m);
        m.desc.debug = 1;
        for (m.what = NO_MISTAKE; m.what <= NO_GATHER; m.what++)
            CHECK_EQ(dtrain_run_threads(1, makes_a_mistake, &m, NULL), DTRAIN_OK);
        CHECK_EQ(lines, 2); /* of two objects */
        _exit(test_failures > 0);
    }
    CHECK_EQ(end_of(pid, 10), 0);
}

/* ---- DDP ---- */

typedef struct late {
    int debug, waits, no_overlap, mistake, micro, zeroes;
} late;

static dtrain_status writes_late(dtrain_comm *world, void *user)
{
    const late *l = (const late *)user;
    int ranks = dtrain_comm_size(world), me = dtrain_comm_rank(world) == ranks - 1;
    dtrain_param table[1];
    dtrain_ddp_desc desc = {0};
    dtrain_ddp *ddp = NULL;
    float *data = (float *)calloc(UNITS * EACH, sizeof(float)), *grad = (float *)calloc(UNITS * EACH, sizeof(float));
    const char *expected = "could not go on: the gradient of model.layers.11.self_attn.q_proj.weight (unit 2) was "
                           "written after dtrain_ddp_reduce: its gradients are dropped on all ranks";
    describe(table);
    table[0].name = "model.layers.11.self_attn.q_proj.weight";
    table[0].data = data;
    table[0].grad = grad;
    desc.debug = l->debug;
    desc.no_overlap = l->no_overlap;
    CHECK_EQ(dtrain_ddp_create(&ddp, world, table, 1, &desc), DTRAIN_OK);
    for (int step = 0; step < 2; step++) { /* the second without the mistake */
        int wrong = l->mistake && step == 0;
        CHECK_EQ(dtrain_ddp_begin(ddp, l->micro, 1.0), DTRAIN_OK);
        for (int micro = 0; micro < l->micro; micro++) {
            grad[2 * EACH + 3] += 1.0f;
            if (!l->waits)
                CHECK_EQ(dtrain_ddp_reduce(ddp, 3), DTRAIN_OK);
            CHECK_EQ(dtrain_ddp_reduce(ddp, 2), DTRAIN_OK); /* it waits where unit 3 is missing */
            if (wrong && me && micro == l->micro - 1)
                grad[2 * EACH + (l->zeroes && l->debug ? 3 : 4)] = l->zeroes ? 0.0f : 1.0f;
            if (l->waits)
                CHECK_EQ(dtrain_ddp_reduce(ddp, 3), DTRAIN_OK);
            if (l->zeroes && micro < l->micro - 1)
                memset(grad + 2 * EACH, 0, EACH * sizeof(float)); /* they are zero already */
            CHECK_EQ(dtrain_ddp_reduce(ddp, 1), DTRAIN_OK);
            if (!l->zeroes)
                CHECK_EQ(dtrain_ddp_reduce(ddp, 0), DTRAIN_OK);
            else
                CHECK_EQ(dtrain_ddp_next(ddp), DTRAIN_OK); /* unit 0 is left out */
            if (micro < l->micro - 1)
                grad[2 * EACH + 3] += 1.0f; /* early, for the next one */
        }
        if (wrong && l->debug) {
            CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_ERR_ABORTED);
            CHECK_CONTAINS(dtrain_last_error(), expected);
            CHECK_CONTAINS(dtrain_last_error(), ranks == 1 ? "dtrain_ddp_finish: rank 0 could not go on"
                                                             : "dtrain_ddp_finish: rank 1 could not go on");
        } else {
            CHECK_EQ(dtrain_ddp_finish(ddp, NULL), DTRAIN_OK);
            CHECK(grad[2 * EACH + 3] == (float)(2 * l->micro - 1));
        }
        memset(grad, 0, UNITS * EACH * sizeof(float));
    }
    dtrain_ddp_destroy(ddp);
    free(data);
    free(grad);
    return DTRAIN_OK;
}

TEST(a_gradient_written_after_its_reduce_fails_the_step_of_ddp_on_all_ranks)
{
    for (int i = 0; i < 64; i++) {
        late l = {i & 1, i >> 1 & 1, i >> 2 & 1, i >> 3 & 1, 1 + (i >> 4 & 1), i >> 5 & 1};
        int before = test_failures, ranks = i % 3 == 0 ? 1 : 2;
        CHECK_EQ(dtrain_run_threads(ranks, writes_late, &l, NULL), DTRAIN_OK);
        if (test_failures != before)
            TEST_FAIL("debug %d, waits %d, no_overlap %d, mistake %d, %d micro-batches, zeroes %d, %d ranks", l.debug,
                      l.waits, l.no_overlap, l.mistake, l.micro, l.zeroes, ranks);
    }
}
