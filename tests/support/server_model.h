/* What the tests of the parameter server share: a model, a plan, and a rank that is killed. Include dtrain.h first. */
#ifndef DTRAIN_TEST_SERVER_MODEL_H
#define DTRAIN_TEST_SERVER_MODEL_H
#include "worlds.h"

enum { PARAMS = 6, ODD = 1003, FROZEN = 64, ONE = 1, STACKED = 3 * 467, LARGE = 41 * 211 };
enum { TRAINED = ODD + ONE + STACKED + LARGE, ALL = TRAINED + FROZEN };

typedef struct model {
    dtrain_param table[PARAMS];
    float data[ALL], grad[ALL];
} model;

/* An odd vector, nothing, frozen ones, a scalar, three layers and a matrix. */
static void model_open(model *m, int rank)
{
    const char *const names[PARAMS] = {"odd", "empty", "frozen", "one", "stacked", "large"};
    const size_t shapes[PARAMS][2] = {{ODD, 0}, {0, 5}, {FROZEN, 0}, {ONE, 0}, {3, 467}, {41, 211}};
    size_t at = 0;
    memset(m, 0, sizeof *m);
    for (int i = 0; i < PARAMS; i++) {
        m->table[i].name = names[i];
        m->table[i].dtype = DTRAIN_F32;
        m->table[i].ndim = shapes[i][1] > 0 ? 2 : 1;
        memcpy(m->table[i].shape, shapes[i], sizeof shapes[i]);
        m->table[i].data = m->data + at;
        m->table[i].grad = m->grad + at;
        at += dtrain_param_elements(&m->table[i]);
    }
    m->table[2].frozen = 1;
    m->table[4].stacked = 1;
    CHECK_EQ(at, ALL);
    for (size_t i = 0; i < ALL; i++)
        m->data[i] = value(rank, i);
}

static dtrain_server_desc plan; /* set before any rank exists */
static dtrain_compress_desc plan_compress;

static void plan_begin(int server)
{
    memset(&plan, 0, sizeof plan);
    memset(&plan_compress, 0, sizeof plan_compress);
    plan.server = server;
}

enum { FATAL = 5 }; /* the step in which a rank dies */

static int victim, underway[2]; /* underway: a pipe to which the victim says that it trains */

static void say_underway(void)
{
    CHECK_EQ(write(underway[1], "", 1), 1);
}

/* Ranks as processes, one of which is killed at some moment after its first step; the others end well. */
static void kill_one(rank_body body, int tcp)
{
    pid_t pids[4];
    scene s;
    char word;
    scene_begin(&s, 4, tcp);
    CHECK_EQ(pipe(underway), 0);
    for (int rank = 0; rank < 4; rank++)
        pids[rank] = start_rank(&s, rank, body);
    close(underway[1]);
    CHECK_EQ(read(underway[0], &word, 1), 1);
    usleep((useconds_t)(rand() % 30000));
    kill(pids[victim], SIGKILL);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(end_of(pids[rank], 40), rank == victim ? 128 + SIGKILL : 0);
    close(underway[0]);
}

static int met; /* how many threads have come to where others wait for them */

static void meet(void)
{
    __atomic_add_fetch(&met, 1, __ATOMIC_SEQ_CST);
}

static void await(int others)
{
    while (__atomic_load_n(&met, __ATOMIC_SEQ_CST) < others)
        usleep(1000);
}

#endif
