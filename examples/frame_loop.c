/* Two ranks that draw 60 frames a second and exchange 4 MiB of gradients meanwhile: no call blocks a frame, and no
 * thread is started. dtrain gets 300 microseconds of each frame.
 *
 * cc -O2 -I. examples/frame_loop.c -o build/frame_loop -lpthread -lm && build/frame_loop */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <pthread.h>
#include <time.h>

enum { COUNT = 1 << 20, EXCHANGES = 40 };

typedef struct player {
    dtrain_comm *world;
    float *grads;
    double longest_us; /* that a frame has spent in dtrain */
    int exchanged, frames;
} player;

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static void render_frame(double started_us)
{
    double left = 1e6 / 60 - (now_us() - started_us);
    struct timespec rest;
    rest.tv_sec = 0;
    rest.tv_nsec = left > 0 ? (long)(left * 1e3) : 0;
    nanosleep(&rest, NULL);
}

static void *play(void *argument)
{
    player *p = (player *)argument;
    dtrain_work *work = NULL;
    for (; p->exchanged < EXCHANGES; p->frames++) {
        double started = now_us(), spent;
        if (work == NULL)
            DTRAIN_CHECK(dtrain_all_reduce_async(p->world, p->grads, p->grads, COUNT, DTRAIN_F32, DTRAIN_MEAN, &work));
        DTRAIN_CHECK(dtrain_comm_poll(p->world, 300));
        if (dtrain_work_done(work)) {
            DTRAIN_CHECK(dtrain_work_wait(work));
            work = NULL;
            p->exchanged++;
        }
        spent = now_us() - started;
        p->longest_us = spent > p->longest_us ? spent : p->longest_us;
        render_frame(started);
    }
    return NULL;
}

int main(void)
{
    dtrain_comm_desc desc = {0};
    dtrain_comm *comms[2];
    player players[2];
    pthread_t threads[2];
    desc.progress = DTRAIN_PROGRESS_POLL;
    DTRAIN_CHECK(dtrain_threads_create(comms, 2, &desc));
    for (int r = 0; r < 2; r++) {
        players[r].world = comms[r];
        players[r].grads = (float *)calloc(COUNT, sizeof(float));
        players[r].longest_us = 0;
        players[r].exchanged = players[r].frames = 0;
        if (players[r].grads == NULL || pthread_create(&threads[r], NULL, play, &players[r]) != 0)
            return 1;
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        dtrain_comm_destroy(comms[r]);
        free(players[r].grads);
    }
    printf("%d exchanges in %d frames; longest time of a frame in dtrain: %.0f us and %.0f us\n", players[0].exchanged,
           players[0].frames, players[0].longest_us, players[1].longest_us);
    return 0;
}

/* 40 exchanges in 115 frames; longest time of a frame in dtrain: 934 us and 883 us */
