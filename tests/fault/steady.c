/* Eight ranks on few cores, mixed collectives for MINUTES, half on threads and half over unix sockets: no operation
 * takes 100 ms longer than its ranks computed or waited for a processor, or the machine itself stood still, and memory
 * stays what it was when warm.
 *
 *   steady [MINUTES]   0: a few thousand operations */
#define DTRAIN_API static
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#define RANKS 8
#define MOST ((size_t)1 << 18) /* elements */
#define STALL_NS 100000000
#define WARM 1000 /* operations after which nothing grows any more */

typedef struct spent {
    int64_t begin_ns, end_ns, busy_ns; /* busy: on a processor, or waiting for one */
} spent;

typedef struct run {
    int64_t until_ns;
    int rank, sockets, stop;
    char root[64];
    dtrain_allocator *allocator;
} run;

static spent spents[RANKS];
static long operations, stalls;
static int64_t longest_ns, worst_ns, still_ns; /* still: the machine stood still, as the witness saw it */
static int failures, witnessed;

static int64_t busy_ns(void)
{
    unsigned long long ran = 0, waited = 0;
    FILE *file = fopen("/proc/thread-self/schedstat", "r");
    if (file == NULL)
        return 0;
    if (fscanf(file, "%llu %llu", &ran, &waited) != 2)
        ran = waited = 0;
    fclose(file);
    return (int64_t)(ran + waited);
}

/* Sleeps for a millisecond again and again. What it oversleeps without having waited for a processor, no library has
 * caused: a virtual machine was stopped. */
static void *witness(void *unused)
{
    while (__atomic_load_n(&witnessed, __ATOMIC_SEQ_CST)) {
        int64_t begin = dtrain__os_now_ns(), busy = busy_ns();
        usleep(1000);
        int64_t gap = dtrain__os_now_ns() - begin - (busy_ns() - busy);
        if (gap > 20000000)
            __atomic_add_fetch(&still_ns, gap, __ATOMIC_SEQ_CST);
    }
    return unused;
}

static dtrain_status operate(dtrain_comm *world, int k, float *x, float *y)
{
    uint64_t dice = dtrain_random_u64(4711, (uint64_t)k);
    size_t count = (size_t)(dice >> 20) % MOST >> dice % 18, low;
    dtrain_work *work = NULL;
    dtrain_status status;
    if (k < 200) /* first what needs most memory */
        count = k % 2 ? MOST - 1 : (size_t)8192 << k / 2 % 3;
    dtrain_shard(world, count, dtrain_comm_rank(world), &low);
    switch (dice / 32 % 7) {
    case 0: return dtrain_reduce_scatter(world, x, x + low, count, DTRAIN_F32, DTRAIN_SUM);
    case 1: return dtrain_all_gather(world, x + low, x, count, DTRAIN_F32);
    case 2: return dtrain_broadcast(world, x, count, DTRAIN_F32, (int)(dice / 1024 % RANKS));
    case 3: return dtrain_barrier(world);
    case 4: return dtrain_all_to_all(world, x, y, count / RANKS * RANKS, DTRAIN_F32);
    case 5:
        status = dtrain_all_reduce_async(world, x, y, count, DTRAIN_F32, DTRAIN_MEAN, &work);
        return status == DTRAIN_OK ? dtrain_work_wait(work) : status;
    default: return dtrain_all_reduce(world, x, y, count, DTRAIN_F32, DTRAIN_MEAN);
    }
}

/* Rank 0, between two barriers: what the last operation took beyond what its ranks were busy with. */
static void judge(int k)
{
    static int64_t still_before;
    int64_t begin = INT64_MAX, end = 0, busy = 0, still = __atomic_load_n(&still_ns, __ATOMIC_SEQ_CST);
    for (int rank = 0; rank < RANKS; rank++) {
        begin = spents[rank].begin_ns < begin ? spents[rank].begin_ns : begin;
        end = spents[rank].end_ns > end ? spents[rank].end_ns : end;
        busy = spents[rank].busy_ns > busy ? spents[rank].busy_ns : busy;
    }
    if (end - begin - busy > STALL_NS) { /* the witness has waked as well, but may not have said so */
        usleep(50000);
        still = __atomic_load_n(&still_ns, __ATOMIC_SEQ_CST);
    }
    busy += still - still_before;
    still_before = still;
    operations++;
    longest_ns = end - begin > longest_ns ? end - begin : longest_ns;
    worst_ns = end - begin - busy > worst_ns ? end - begin - busy : worst_ns;
    if (end - begin - busy <= STALL_NS)
        return;
    stalls++;
    printf("operation %d took %.1f ms, of which its busiest rank was busy for %.1f ms\n", k,
           (double)(end - begin) * 1e-6, (double)busy * 1e-6);
    for (int rank = 0; rank < RANKS; rank++)
        printf("    rank %d from %.1f to %.1f ms, busy for %.1f\n", rank,
               (double)(spents[rank].begin_ns - begin) * 1e-6, (double)(spents[rank].end_ns - begin) * 1e-6,
               (double)spents[rank].busy_ns * 1e-6);
}

static dtrain_status body(dtrain_comm *world, void *user)
{
    run *r = (run *)user;
    int rank = dtrain_comm_rank(world), go = 1;
    float *x = (float *)calloc(MOST, sizeof *x), *y = (float *)calloc(MOST, sizeof *y);
    size_t warm = 0;
    dtrain_status status = x != NULL && y != NULL ? DTRAIN_OK : DTRAIN_ERR_MEMORY;
    int64_t busy = busy_ns();
    for (int k = 0; status == DTRAIN_OK && go; k++) {
        spents[rank].begin_ns = dtrain__os_now_ns();
        status = operate(world, k, x, y);
        spents[rank].end_ns = dtrain__os_now_ns();
        spents[rank].busy_ns = busy_ns() - busy;
        if (status == DTRAIN_OK)
            status = dtrain_barrier(world);
        if (rank == 0)
            judge(k);
        busy = busy_ns(); /* a rank may wait for a processor as it leaves the broadcast, and begin late */
        go = k < WARM + 300 || dtrain__os_now_ns() < r->until_ns;
        if (status == DTRAIN_OK)
            status = dtrain_broadcast(world, &go, 1, DTRAIN_I32, 0);
        if (k == WARM)
            warm = dtrain_comm_allocator(world)->bytes;
        if (k >= WARM && go && dtrain_comm_allocator(world)->bytes > warm) {
            __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);
            printf("rank %d: %zu bytes in use, %zu when warm\n", rank, dtrain_comm_allocator(world)->bytes, warm);
            go = 0;
            break;
        }
    }
    free(x);
    free(y);
    return status;
}

static void *rank_of_sockets(void *pointer)
{
    run *r = (run *)pointer;
    dtrain_comm_desc desc;
    dtrain_comm *world = NULL;
    memset(&desc, 0, sizeof desc);
    desc.rank = r->rank;
    desc.world_size = RANKS;
    desc.root = r->root;
    if (dtrain_comm_create(&world, &desc) != DTRAIN_OK || body(world, r) != DTRAIN_OK) {
        __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);
        printf("rank %d: %s\n", r->rank, dtrain_last_error());
    }
    dtrain_comm_destroy(world);
    return NULL;
}

static void part(int sockets, double minutes)
{
    pthread_t threads[RANKS];
    run runs[RANKS];
    memset(runs, 0, sizeof runs);
    operations = longest_ns = worst_ns = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        runs[rank].rank = rank;
        runs[rank].until_ns = dtrain__os_now_ns() + (int64_t)(minutes * 60e9);
        snprintf(runs[rank].root, sizeof runs[rank].root, "unix:/tmp/dtrain-steady-%ld", (long)getpid());
        if (sockets)
            pthread_create(&threads[rank], NULL, rank_of_sockets, &runs[rank]);
    }
    if (!sockets && dtrain_run_threads(RANKS, body, &runs[0], NULL) != DTRAIN_OK) {
        failures++;
        printf("%s\n", dtrain_last_error());
    }
    for (int rank = 0; sockets && rank < RANKS; rank++)
        pthread_join(threads[rank], NULL);
    printf("%s: %ld operations, the longest %.1f ms, at most %.1f ms of one unexplained; the machine stood still for "
           "%.1f ms\n",
           sockets ? "unix sockets" : "threads", operations, (double)longest_ns * 1e-6, (double)worst_ns * 1e-6,
           (double)still_ns * 1e-6);
}

int main(int argc, char **argv)
{
    double minutes = argc > 1 ? atof(argv[1]) : 0;
    pthread_t thread;
    setvbuf(stdout, NULL, _IOLBF, 0);
    witnessed = 1;
    if (pthread_create(&thread, NULL, witness, NULL) != 0)
        witnessed = 0;
    part(0, minutes / 2);
    part(1, minutes / 2);
    if (witnessed) {
        __atomic_store_n(&witnessed, 0, __ATOMIC_SEQ_CST);
        pthread_join(thread, NULL);
    }
    printf("%d passed, %ld failed\n", failures == 0 && stalls == 0, failures + stalls);
    return failures != 0 || stalls != 0;
}
