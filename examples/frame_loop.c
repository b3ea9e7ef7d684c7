/* All-reduces gradients inside a 60 Hz frame loop that never blocks. Two ranks, each a thread of the program, give the
 * library at most 300 us a frame. The library starts no thread. Half-way the last rank quits without a word. The others
 * shrink the group to those that are left and train on, within the same budget. No error of training ends a game.
 *
 * cc -O2 -ffp-contract=off -I. examples/frame_loop.c -o build/frame_loop -lpthread -lm
 * build/frame_loop */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#define RANKS 2
#define FRAMES 180
#define FRAME_NS 16666667
#define BUDGET_US 300
#define COUNT ((size_t)1 << 20) /* 4 MiB of gradients; one more element asks to stop */
#define LOADING_MS 20000        /* the longest time without a frame, such as a loading screen */

typedef struct player {
    dtrain_comm *group; /* NULL: training has ended, the game has not */
    dtrain_work *work;
    float *grads;
    int rank, quits, broken, stop, frames, reduced;
    int64_t longest_ns;
} player;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_until(int64_t when_ns)
{
    int64_t left = when_ns - now_ns();
    struct timespec pause = {0, (long)(left > 0 ? left : 0)};
    nanosleep(&pause, NULL);
}

/* The group cannot be used any more: the game goes on without training. */
static void give_up(player *p)
{
    fprintf(stderr, "rank %d trains no more: %s\n", p->rank, dtrain_last_error());
    dtrain_comm_destroy(p->group); /* with its work */
    p->group = NULL;
    p->work = NULL;
}

/* What one frame does after a loss, until there is a group of the ranks that are left. */
static void go_on_without(player *p)
{
    dtrain_comm *left = NULL;
    if (dtrain_comm_shrink_poll(p->group, BUDGET_US, &left) != DTRAIN_OK) {
        give_up(p);
    } else if (left != NULL) {
        dtrain_comm_destroy(p->group);
        p->group = left;
        p->broken = 0;
    }
}

/* What one frame does for training: new gradients, or a part of their all-reduce, or its end. */
static void train_a_little(player *p)
{
    const float ranks = (float)dtrain_comm_size(p->group);
    dtrain_status status = DTRAIN_OK;
    if (p->work == NULL)
        status = dtrain_all_reduce_async(p->group, p->grads, p->grads, COUNT + 1, DTRAIN_F32, DTRAIN_SUM, &p->work);
    if (status == DTRAIN_OK)
        status = dtrain_comm_poll(p->group, BUDGET_US);
    if (status == DTRAIN_OK && dtrain_work_done(p->work)) {
        status = dtrain_work_wait(p->work);
        p->work = NULL;
        if (status == DTRAIN_OK) {
            p->reduced += p->grads[0] == ranks && p->grads[COUNT - 1] == ranks;
            p->stop = p->grads[COUNT] > 0;
        }
    }
    if (status == DTRAIN_ERR_PEER_LOST)
        p->broken = 1;
    else if (status != DTRAIN_OK)
        give_up(p);
}

static void *play(void *pointer)
{
    player *p = (player *)pointer;
    for (int64_t next = now_ns(); !p->stop && !(p->quits && p->frames == FRAMES / 2); p->frames++) {
        for (size_t i = 0; p->work == NULL && i < COUNT; i++)
            p->grads[i] = 1; /* the gradients of this game */
        if (p->work == NULL)
            p->grads[COUNT] = p->frames >= FRAMES ? 1.0f : 0.0f;
        int64_t began = now_ns();
        if (p->group == NULL)
            p->stop = p->frames >= FRAMES;
        else if (p->broken)
            go_on_without(p);
        else
            train_a_little(p);
        int64_t spent = now_ns() - began;
        p->longest_ns = spent > p->longest_ns ? spent : p->longest_ns;
        next += FRAME_NS; /* the game would simulate and render here */
        sleep_until(next);
    }
    dtrain_comm_destroy(p->group);
    return NULL;
}

int main(void)
{
    dtrain_comm *comms[RANKS];
    dtrain_comm_desc desc;
    pthread_t threads[RANKS];
    player players[RANKS];
    memset(&desc, 0, sizeof desc);
    memset(players, 0, sizeof players);
    desc.progress = DTRAIN_PROGRESS_POLL;
    desc.heartbeat_ms = 2 * LOADING_MS; /* between processes, a rank that does not poll for so long is lost */
    desc.timeout_ms = 3 * LOADING_MS;   /* and calls that wait for it end at this */
    if (dtrain_threads_create(comms, RANKS, &desc) != DTRAIN_OK)
        fprintf(stderr, "frame_loop: no training: %s\n", dtrain_last_error()); /* the ends are NULL: see play() */
    for (int r = 0; r < RANKS; r++) {
        players[r].group = comms[r];
        players[r].rank = r;
        players[r].quits = r > 0 && r == RANKS - 1;
        players[r].grads = (float *)malloc((COUNT + 1) * sizeof(float));
        if (players[r].grads == NULL || pthread_create(&threads[r], NULL, play, &players[r]) != 0)
            return fprintf(stderr, "frame_loop: out of memory or threads\n"), 1;
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
        printf("rank %d: %d frames, %d all-reduces of 4 MiB, longest time in dtrain %.2f ms a frame\n", r,
               players[r].frames, players[r].reduced, (double)players[r].longest_ns / 1e6);
        free(players[r].grads);
    }
    return 0;
}

/* What it prints:
 *
 * rank 0: 186 frames, 54 all-reduces of 4 MiB, longest time in dtrain 0.37 ms a frame
 * rank 1: 90 frames, 25 all-reduces of 4 MiB, longest time in dtrain 0.41 ms a frame
 */
