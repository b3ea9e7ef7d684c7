/* A program that uses MPI itself, with dtrain beside it: on a communicator of its own, on threads of its own, and at a
 * lower level of threads. Run by mpi.sh under mpiexec -n 4; prints what is wrong. Other ways to end:
 *
 *   offload  MPI's collectives in the place of dtrain's, and what ends them
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

/* ---- MPI's collectives ---- */

static int begun;                      /* reduce-scatters that MPI was given */
static MPI_Comm aside = MPI_COMM_NULL; /* not NULL: the next one hangs until all have met there */
static int (*given)(const void *, void *, const int *, dtrain__mpi_datatype, dtrain__mpi_op, dtrain__mpi_comm,
                    dtrain__mpi_request *);
static dtrain__mpi_comm kept;

static int counted(const void *in, void *out, const int *counts, dtrain__mpi_datatype type, dtrain__mpi_op op,
                   dtrain__mpi_comm comm, dtrain__mpi_request *request)
{
    MPI_Request other;
    begun++;
    if (aside == MPI_COMM_NULL)
        return given(in, out, counts, type, op, comm, request);
    kept = comm;
    int code = MPI_Ibarrier(aside, &other);
    memcpy(request, &other, sizeof other);
    return code;
}

static dtrain_comm *offloading(int64_t timeout_ms)
{
    dtrain_comm *world = NULL;
    dtrain_comm_desc desc;
    MPI_Comm all = MPI_COMM_WORLD;
    memset(&desc, 0, sizeof desc);
    desc.algorithm = DTRAIN_ALGORITHM_MPI;
    desc.order = DTRAIN_ORDER_ANY;
    desc.timeout_ms = timeout_ms;
    expect(dtrain_comm_from_mpi(&world, &all, &desc) == DTRAIN_OK, "a world that hands its calls to MPI");
    return world;
}

/* Calls all_reduce, which must end so; the text must have `part`. Returns its buffer, which MPI may still use. */
static float *ends(dtrain_comm *world, dtrain_status status, const char *part)
{
    float *x = (float *)calloc(COUNT, sizeof(float));
    dtrain_status got = dtrain_all_reduce(world, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM);
    expect(got == status && strstr(dtrain_last_error(), part) != NULL, part);
    return x;
}

/* What ends a call before MPI has it. */
static void ends_before(int rank)
{
    dtrain_comm *world = offloading(0), *rest = NULL;
    int before = begun;
    float x = 0;
    if (rank == 1)
        expect(dtrain_broadcast(world, &x, 1, DTRAIN_F32, 0) == DTRAIN_ERR_MISMATCH, "another call than the others'");
    else
        free(ends(world, DTRAIN_ERR_MISMATCH, "rank 1"));
    expect(dtrain_comm_shrink(world, &rest) == DTRAIN_OK && dtrain_comm_size(rest) == 4, "a shrink without a death");
    sums(rest, 10);
    expect(begun == before + 10, "the shrunk group's calls are MPI's, and no others");
    dtrain_comm_destroy(rest);
    dtrain_comm_destroy(world);
    world = offloading(0);
    if (rank == 2)
        expect(dtrain_comm_abort(world, "enough") == DTRAIN_OK, "an abort");
    free(ends(world, DTRAIN_ERR_ABORTED, "rank 2 aborted the group: enough"));
    dtrain_comm_destroy(world);
    world = offloading(0);
    if (rank != 3) {
        free(ends(world, DTRAIN_ERR_PEER_LOST, "rank 3 has left"));
        expect(dtrain_comm_shrink(world, &rest) == DTRAIN_OK && dtrain_comm_size(rest) == 3, "those that are left");
        sums(rest, 10);
        dtrain_comm_destroy(rest);
    }
    dtrain_comm_destroy(world);
    world = offloading(1000);
    if (rank != 0)
        free(ends(world, DTRAIN_ERR_TIMEOUT, "waited"));
    MPI_Barrier(MPI_COMM_WORLD);
    dtrain_comm_destroy(world);
    expect(begun == before + (rank != 3 ? 20 : 10), "MPI is given no call that cannot be made");
}

/* A deadline while MPI has the call: rank 2 begins another one. Then it begins the right one, so that all can end. */
static void ends_within(int rank)
{
    static const int counts[4] = {(COUNT + 3) / 4, (COUNT + 2) / 4, (COUNT + 1) / 4, COUNT / 4};
    dtrain_comm *world = offloading(1000);
    MPI_Comm copy, comm;
    MPI_Request request;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    aside = rank == 2 ? copy : MPI_COMM_NULL;
    float *x = ends(world, DTRAIN_ERR_TIMEOUT, "keep them until the process ends"), part[COUNT];
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 2) {
        memcpy(&comm, &kept, sizeof comm);
        MPI_Ireduce_scatter(x, part, counts, MPI_FLOAT, MPI_SUM, comm, &request);
    } else {
        MPI_Ibarrier(copy, &request);
    }
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    dtrain_comm_destroy(world);
    free(x);
}

static void gives_calls_to_mpi(int rank)
{
    dtrain_comm *world = offloading(0);
    given = dtrain__mpi()->call.Ireduce_scatter;
    dtrain__mpi()->call.Ireduce_scatter = counted;
    sums(world, 50);
    expect(begun == 50, "each all-reduce is MPI's");
    dtrain_comm_destroy(world);
    ends_before(rank);
    ends_within(rank);
    MPI_Finalize();
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
    if (argc > 1 && strcmp(argv[1], "offload") == 0) {
        gives_calls_to_mpi(rank);
        return wrong;
    }
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
