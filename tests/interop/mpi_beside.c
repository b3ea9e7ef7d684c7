/* A program that uses MPI itself, with dtrain beside it: on a communicator of its own, on threads of its own, and at a
 * lower level of threads. Run by mpi.sh under mpiexec -n 4; prints what is wrong. Other ways to end:
 *
 *   dies     rank 2 kills itself, and the others go on
 *   late     rank 2 does not come to make the group
 *   leaves   all ranks exit with a world open that has initialised MPI
 *   ends     all ranks call MPI_Finalize with a world open, and then destroy it */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { ROUNDS = 300, COUNT = 20011 };
static int wrong;

static void expect(int good, const char *what)
{
    if (good)
        return;
    wrong = 1;
    fprintf(stderr, "FAIL %s: %s\n", what, dtrain_last_error());
}

/* The program's own messages, of any tag, while dtrain's calls are under way. */
static void *own_messages(void *pointer)
{
    int rank, size, sum, token, *bad = (int *)pointer;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int round = 0; round < ROUNDS; round++) {
        MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        *bad |= sum != size * (size - 1) / 2;
        int out = rank + round;
        MPI_Sendrecv(&out, 1, MPI_INT, (rank + 1) % size, round % 5, &token, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        *bad |= token != (rank + size - 1) % size + round;
    }
    return NULL;
}

static void sums(dtrain_comm *world, int rounds)
{
    int rank = dtrain_comm_rank(world), ranks = dtrain_comm_size(world);
    float *x = (float *)malloc(COUNT * sizeof(float));
    for (int round = 0; round < rounds; round++) {
        size_t count = (size_t)(round % 3 == 0 ? COUNT : round);
        for (size_t i = 0; i < count; i++)
            x[i] = (float)(rank + 1) * (float)(i % 100);
        expect(dtrain_all_reduce(world, x, x, count, DTRAIN_F32, DTRAIN_SUM) == DTRAIN_OK, "all_reduce");
        for (size_t i = 0; i < count; i++)
            if (x[i] != (float)(ranks * (ranks + 1) / 2) * (float)(i % 100)) {
                expect(0, "a sum beside the program's messages");
                break;
            }
    }
    free(x);
}

/* Groups that are destroyed as soon as their calls have ended here, which may be before they have at the others. */
static void short_lives(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    for (int round = 0; round < ROUNDS; round++) {
        dtrain_comm *groups[3] = {NULL, NULL, NULL};
        dtrain_work *work = NULL;
        float x[100] = {0};
        expect(dtrain_comm_split(world, (rank + round) % 2, 0, &groups[0]) == DTRAIN_OK, "a split");
        expect(dtrain_comm_split(world, 0, 0, &groups[1]) == DTRAIN_OK, "a copy");
        expect(dtrain_comm_split(groups[1], rank / 2, 0, &groups[2]) == DTRAIN_OK, "a split of the copy");
        for (int i = 0; i < 3; i++) {
            expect(dtrain_all_reduce_async(groups[i], x, x, 100, DTRAIN_F32, DTRAIN_SUM, &work) == DTRAIN_OK, "a call");
            expect(dtrain_work_wait(work) == DTRAIN_OK, "its end");
        }
        for (int i = 0; i < 3; i++)
            dtrain_comm_destroy(groups[(i + round) % 3]);
    }
}

/* The three that have come end with the reason. */
static void misses_rank_2(int rank)
{
    dtrain_comm *world = NULL;
    dtrain_comm_desc desc;
    MPI_Comm all = MPI_COMM_WORLD;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 1000;
    if (rank != 2) {
        expect(dtrain_comm_from_mpi(&world, &all, &desc) == DTRAIN_ERR_TIMEOUT, "a rank that does not come");
        expect(strstr(dtrain_last_error(), "within 1000 ms") != NULL && world == NULL, "how long it was awaited");
        if (!wrong)
            printf("refused\n");
        fflush(stdout);
    } else {
        sleep(3); /* until the others have met their deadline */
    }
    _exit(wrong);
}

static void leaves_a_world_open(void)
{
    dtrain_comm *world = NULL;
    setenv("DTRAIN_TRANSPORT", "mpi", 1);
    expect(dtrain_comm_create(&world, NULL) == DTRAIN_OK, "a world that initialises MPI");
    sums(world, 5);
    expect(dtrain_barrier(world) == DTRAIN_OK, "the last call");
    if (!wrong)
        printf("left\n");
    fflush(stdout);
    exit(0);
}

static void finalizes_first(dtrain_comm *world)
{
    sums(world, 2);
    MPI_Finalize();
    expect(dtrain_barrier(world) == DTRAIN_ERR_IO, "a call after MPI_Finalize");
    expect(strstr(dtrain_last_error(), "call dtrain_comm_destroy before") != NULL, "its cure");
    dtrain_comm_destroy(world);
    expect(dtrain_comm_from_mpi(&world, &(MPI_Comm){MPI_COMM_WORLD}, NULL) == DTRAIN_ERR_UNSUPPORTED,
           "a world too late");
    if (!wrong)
        printf("ended\n");
    fflush(stdout);
    exit(wrong);
}

/* A communicator that this rank is no member of, and one that has two groups. */
static void refuses_communicators(int rank, const dtrain_comm_desc *desc)
{
    dtrain_comm *group = NULL;
    MPI_Comm some, halves;
    MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? MPI_UNDEFINED : 0, 0, &some);
    if (rank == 0) {
        expect(dtrain_comm_from_mpi(&group, &some, desc) == DTRAIN_ERR_INVALID, "MPI_COMM_NULL");
        expect(group == NULL && strstr(dtrain_last_error(), "MPI_COMM_NULL") != NULL, "its name");
    } else {
        MPI_Comm_free(&some);
    }
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, 0, &some);
    MPI_Intercomm_create(some, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &halves);
    expect(dtrain_comm_from_mpi(&group, &halves, desc) == DTRAIN_ERR_INVALID, "an intercommunicator");
    MPI_Comm_free(&halves);
    MPI_Comm_free(&some);
}

static void goes_on_without_rank_2(dtrain_comm *world)
{
    dtrain_comm *rest = NULL;
    sums(world, 2);
    if (dtrain_comm_rank(world) == 2)
        raise(SIGKILL);
    float x = 1;
    expect(dtrain_all_reduce(world, &x, &x, 1, DTRAIN_F32, DTRAIN_SUM) == DTRAIN_ERR_PEER_LOST, "a dead rank");
    expect(strstr(dtrain_last_error(), "rank 2") != NULL, "its number");
    expect(dtrain_comm_shrink(world, &rest) == DTRAIN_OK && dtrain_comm_size(rest) == 3, "the survivors");
    sums(rest, 10);
    if (!wrong)
        printf("survived\n");
    fflush(stdout);
    _exit(wrong); /* MPI_Finalize would wait for rank 2 */
}

int main(int argc, char **argv)
{
    int asked = argc > 1 && strcmp(argv[argc - 1], "funneled") == 0 ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, level,
        rank;
    dtrain_comm *world = NULL, *half = NULL;
    dtrain_comm_desc desc;
    MPI_Comm colour;
    memset(&desc, 0, sizeof desc);
    expect(dtrain_comm_from_mpi(&world, &(MPI_Comm){MPI_COMM_WORLD}, NULL) == DTRAIN_ERR_INVALID,
           "MPI that is not initialised");
    if (argc > 1 && strcmp(argv[1], "leaves") == 0)
        leaves_a_world_open();
    MPI_Init_thread(&argc, &argv, asked, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (argc > 1 && strcmp(argv[1], "late") == 0)
        misses_rank_2(rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &colour);
    MPI_Comm all = MPI_COMM_WORLD;
    if (level < MPI_THREAD_MULTIPLE) {
        expect(dtrain_comm_from_mpi(&world, &all, NULL) == DTRAIN_ERR_UNSUPPORTED, "too low a level");
        expect(strstr(dtrain_last_error(), "MPI_THREAD_MULTIPLE") != NULL, "the cure");
        desc.progress = DTRAIN_PROGRESS_POLL;
    }
    desc.heartbeat_ms = argc > 1 && strcmp(argv[1], "dies") == 0 ? 1500 : 0;
    expect(dtrain_comm_from_mpi(&world, &all, &desc) == DTRAIN_OK, "the world");
    if (desc.heartbeat_ms > 0)
        goes_on_without_rank_2(world);
    if (argc > 1 && strcmp(argv[1], "ends") == 0)
        finalizes_first(world);
    refuses_communicators(rank, &desc);
    expect(dtrain_comm_from_mpi(&half, &colour, &desc) == DTRAIN_OK, "half of it");
    expect(dtrain_comm_size(half) == 2 && dtrain_comm_rank(half) == (rank < 2), "its ranks");
    int bad = 0;
    pthread_t thread;
    if (level == MPI_THREAD_MULTIPLE)
        pthread_create(&thread, NULL, own_messages, &bad);
    else
        own_messages(&bad);
    sums(world, ROUNDS);
    sums(half, ROUNDS);
    sums(world, 10);
    if (level == MPI_THREAD_MULTIPLE)
        pthread_join(thread, NULL);
    expect(!bad, "the program's own messages");
    short_lives(world);
    dtrain_comm_destroy(half);
    dtrain_comm_destroy(world);
    MPI_Finalize();
    return wrong;
}
