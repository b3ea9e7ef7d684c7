/* For tests of groups: a body that runs on threads and on processes. Include dtrain.h and test.h first. */
#ifndef GROUPS_H
#define GROUPS_H

#include "processes.h"

/* The same body on threads and on processes. */
typedef struct play {
    rank_body body;
    scene *s;
} play;

static dtrain_status play_rank(dtrain_comm *world, void *user)
{
    play *p = (play *)user;
    p->body(world, p->s);
    return DTRAIN_OK;
}

static void on_threads(int ranks, rank_body body, scene *s)
{
    play p = {body, s};
    dtrain_comm_desc desc;
    if (getenv("TEST_MPI_RANKS") != NULL) /* then processes meet, not these threads */
        return;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = test_ms(20000);
    CHECK_EQ(dtrain_run_threads(ranks, play_rank, &p, &desc), DTRAIN_OK);
}

static inline void on_both(int ranks, rank_body body)
{
    scene s;
    on_threads(ranks, body, NULL);
    for (int tcp = 0; tcp < 2; tcp++) {
        scene_begin(&s, ranks, tcp);
        run_ranks(&s, body);
    }
}

/* The sum of what every rank of the group gives. */
static inline int sum(dtrain_comm *group, int mine)
{
    int32_t x = mine;
    if (dtrain_all_reduce(group, &x, &x, 1, DTRAIN_I32, DTRAIN_SUM) != DTRAIN_OK) {
        TEST_FAIL("rank %d of %d: %s", dtrain_comm_rank(group), dtrain_comm_size(group), dtrain_last_error());
        return -1;
    }
    return x;
}

#endif
