/* Trains train_gpt's model over slow links, dense and with each compressor: bytes, seconds and loss of each.
 *
 * cc -O2 -ffp-contract=off -I. examples/slow_link.c -o build/slow_link -lpthread -lm
 * build/slow_link --mbit 20 --latency-ms 2 --ranks 4 --steps 40
 *
 * Ranks are threads over a transport of this program. All that a rank sends leaves it at --mbit, and arrives
 * --latency-ms later. So you can try robots on Wi-Fi, or hosts behind a tunnel, on one machine. dtrain.h shows what it
 * prints, at >>compress.
 */
#define main train_gpt_main
#include "train_gpt.c"
#undef main

#include <pthread.h>

enum { LINK_RANKS = 16, LINK_ROOM = 1 << 20, LINK_CHUNK = 1 << 12, LINK_CHUNKS = 1024 };

/* Bytes under way from one rank to another, in chunks. */
typedef struct link_wire {
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    size_t written, read; /* bytes so far */
    size_t first, end;    /* chunks so far */
    struct {
        size_t until;     /* the chunk ends before this byte */
        int64_t ready_ns; /* when they arrive */
    } chunks[LINK_CHUNKS];
    unsigned char bytes[LINK_ROOM];
} link_wire;

typedef struct link_end {
    link_wire *wires; /* [from * ranks + to] */
    int rank, ranks;
    double ns_a_byte;
    int64_t latency_ns, next_ns; /* when this rank's link is free again */
    gpt_job *job;
    dtrain_status status;
    double seconds, loss, validation;
    uint64_t sent_bytes;
} link_end;

/* Sleeps until then, or until the wire has moved; its mutex is held. */
static void link_wait(link_wire *wire, int64_t until_ns)
{
    struct timespec now, until;
    int64_t left = until_ns - gpt_now_ns();
    clock_gettime(CLOCK_REALTIME, &now);
    left = left < 0 ? 0 : left > 100000000 ? 100000000 : left;
    left += now.tv_nsec;
    until.tv_sec = now.tv_sec + left / 1000000000;
    until.tv_nsec = left % 1000000000;
    pthread_cond_timedwait(&wire->moved, &wire->mutex, &until);
}

static dtrain_status link_send(void *self, int peer, const void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    link_end *end = (link_end *)self;
    link_wire *wire = &end->wires[end->rank * end->ranks + peer];
    for (*moved = 0; *moved < bytes;) {
        size_t n = bytes - *moved < LINK_CHUNK ? bytes - *moved : LINK_CHUNK;
        int64_t now = gpt_now_ns();
        end->next_ns = end->next_ns > now ? end->next_ns : now;
        pthread_mutex_lock(&wire->mutex);
        while ((wire->written - wire->read + n > LINK_ROOM || wire->end - wire->first == LINK_CHUNKS) &&
               gpt_now_ns() < deadline_ns)
            link_wait(wire, deadline_ns);
        if (wire->written - wire->read + n > LINK_ROOM || wire->end - wire->first == LINK_CHUNKS) {
            pthread_mutex_unlock(&wire->mutex);
            return DTRAIN_ERR_TIMEOUT;
        }
        for (size_t i = 0; i < n; i++)
            wire->bytes[(wire->written + i) % LINK_ROOM] = ((const unsigned char *)data)[*moved + i];
        wire->written += n;
        end->next_ns += (int64_t)((double)n * end->ns_a_byte);
        wire->chunks[wire->end % LINK_CHUNKS].until = wire->written;
        wire->chunks[wire->end++ % LINK_CHUNKS].ready_ns = end->next_ns + end->latency_ns;
        pthread_cond_broadcast(&wire->moved);
        pthread_mutex_unlock(&wire->mutex);
        *moved += n;
    }
    return DTRAIN_OK;
}

static dtrain_status link_recv(void *self, int peer, void *data, size_t bytes, int64_t deadline_ns, size_t *moved)
{
    link_end *end = (link_end *)self;
    link_wire *wire = &end->wires[peer * end->ranks + end->rank];
    dtrain_status status = DTRAIN_OK;
    pthread_mutex_lock(&wire->mutex);
    for (*moved = 0; *moved < bytes && status == DTRAIN_OK;) {
        size_t chunk = wire->first % LINK_CHUNKS;
        int64_t now = gpt_now_ns();
        if (wire->first < wire->end && wire->chunks[chunk].ready_ns <= now) {
            while (*moved < bytes && wire->read < wire->chunks[chunk].until)
                ((unsigned char *)data)[(*moved)++] = wire->bytes[wire->read++ % LINK_ROOM];
            wire->first += wire->read == wire->chunks[chunk].until;
            pthread_cond_broadcast(&wire->moved);
        } else if (now >= deadline_ns)
            status = DTRAIN_ERR_TIMEOUT;
        else
            link_wait(wire, wire->first < wire->end && wire->chunks[chunk].ready_ns < deadline_ns
                                ? wire->chunks[chunk].ready_ns
                                : deadline_ns);
    }
    pthread_mutex_unlock(&wire->mutex);
    return status;
}

/* Trains one rank for the steps that the flags say, and measures them. */
static dtrain_status link_train(link_end *end, dtrain_comm *world)
{
    gpt_job *job = end->job;
    size_t sequence = (size_t)(job->flags.batch * job->flags.context);
    int32_t *tokens = (int32_t *)malloc(2 * sequence * sizeof *tokens);
    double *losses = (double *)calloc((size_t)job->flags.micro, sizeof(double)), norm;
    dtrain_schedule schedule = gpt_schedule(&job->flags);
    gpt model;
    dtrain_status status = gpt_create(&model, &job->flags, world, NULL, NULL);
    if (tokens == NULL || losses == NULL)
        status = DTRAIN_ERR_MEMORY;
    int64_t begin = gpt_now_ns();
    for (long step = 0; step < job->flags.steps && status == DTRAIN_OK; step++)
        status = gpt_step(job, &model, world, step, tokens, losses, dtrain_schedule_lr(&schedule, (uint64_t)step),
                          &end->loss, &norm);
    end->seconds = (double)(gpt_now_ns() - begin) * 1e-9;
    end->sent_bytes = dtrain_fsdp_get_stats(model.fsdp).sent_bytes;
    if (status == DTRAIN_OK)
        status = gpt_validate(job, &model, world, &end->validation);
    if (status != DTRAIN_OK)
        fprintf(stderr, "slow_link: rank %d: %s\n", end->rank, dtrain_last_error());
    gpt_destroy(&model);
    free(tokens);
    free(losses);
    return status;
}

static void *link_rank(void *pointer)
{
    link_end *end = (link_end *)pointer;
    dtrain_transport transport;
    dtrain_comm *world;
    memset(&transport, 0, sizeof transport);
    transport.self = end;
    transport.rank = end->rank;
    transport.size = end->ranks;
    transport.send = link_send;
    transport.recv = link_recv;
    end->status = dtrain_comm_from_transport(&world, &transport, NULL);
    if (end->status != DTRAIN_OK)
        return NULL;
    end->status = link_train(end, world);
    dtrain_comm_destroy(world);
    return NULL;
}

/* Trains with one compressor, or with none (NULL), and prints a line of the table. */
static int link_try(gpt_job *job, const char *compress, double mbit, double latency_ms, double *dense_seconds)
{
    int ranks = job->world_size, bad = 0;
    link_wire *wires = (link_wire *)calloc((size_t)(ranks * ranks), sizeof *wires);
    pthread_t threads[LINK_RANKS];
    link_end ends[LINK_RANKS];
    memset(&job->flags.compression, 0, sizeof job->flags.compression);
    job->flags.compress = compress;
    if (wires == NULL || (compress != NULL && gpt_read_compression(&job->flags) != 0) || gpt_settle(job) != 0)
        return 1;
    memset(ends, 0, sizeof ends);
    for (int i = 0; i < ranks * ranks; i++) {
        pthread_mutex_init(&wires[i].mutex, NULL);
        pthread_cond_init(&wires[i].moved, NULL);
    }
    for (int rank = 0; rank < ranks; rank++) {
        ends[rank].wires = wires;
        ends[rank].rank = rank;
        ends[rank].ranks = ranks;
        ends[rank].ns_a_byte = 8e3 / mbit;
        ends[rank].latency_ns = (int64_t)(latency_ms * 1e6);
        ends[rank].job = job;
        bad |= pthread_create(&threads[rank], NULL, link_rank, &ends[rank]) != 0;
    }
    for (int rank = 0; rank < ranks; rank++) {
        pthread_join(threads[rank], NULL);
        bad |= ends[rank].status != DTRAIN_OK;
    }
    free(wires);
    if (compress == NULL)
        *dense_seconds = ends[0].seconds;
    printf("%-22s %9.1f %8.2f %7.1f %9.4f %9.4f\n", compress != NULL ? compress : "dense",
           (double)ends[0].sent_bytes / 1024 / (double)job->flags.steps, ends[0].seconds,
           *dense_seconds / ends[0].seconds, ends[0].loss, ends[0].validation);
    fflush(stdout);
    return bad;
}

/* Takes the program's own flags out of those of train_gpt. */
static int link_flags(int *argc, char **argv, double *mbit, double *latency_ms)
{
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        int speed = strcmp(argv[i], "--mbit") == 0;
        if (!speed && strcmp(argv[i], "--latency-ms") != 0) {
            argv[kept++] = argv[i];
            continue;
        }
        if (gpt_number(argv[i], argv[i + 1], speed ? 0.01 : 0, 1e6, speed ? mbit : latency_ms) != 0)
            return 1;
        i++;
    }
    *argc = kept;
    return 0;
}

int main(int argc, char **argv)
{
    static const char *const compressors[] = {
        NULL, "bf16", "int8", "fp8", "sign", "topk:0.1", "topk:0.01", "topk:0.01:nofeedback", "powersgd:4"};
    double mbit = 20, latency_ms = 2, dense_seconds = 0;
    int bad = 0;
    gpt_job job;
    memset(&job, 0, sizeof job);
    job.flags = gpt_defaults();
    job.flags.layers = 2;
    job.flags.width = job.flags.context = 64;
    job.flags.batch = 4;
    job.flags.ranks = 4;
    job.flags.steps = 40;
    job.flags.optimizer = "sgd";
    job.flags.lr = 0.2;
    if (link_flags(&argc, argv, &mbit, &latency_ms) || gpt_parse(&job.flags, argc, argv) || gpt_read_text(&job))
        return 1;
    job.world_size = (int)job.flags.ranks;
    if (job.flags.micro == 0 && job.flags.accum == 0) /* one a rank: dense sums are sent after every micro-batch */
        job.flags.micro = job.flags.ranks;
    if (job.flags.ranks > LINK_RANKS)
        return report_complain("flag", "--ranks", "is at most 16 here");
    printf("%ld ranks, %ld steps, %g Mbit/s and %g ms a link\n", job.flags.ranks, job.flags.steps, mbit, latency_ms);
    printf("compressor            KiB a step  seconds  faster      loss  val_loss\n");
    for (size_t i = 0; i < sizeof compressors / sizeof compressors[0] && !bad; i++)
        bad = link_try(&job, compressors[i], mbit, latency_ms, &dense_seconds);
    free(job.text);
    return bad;
}
