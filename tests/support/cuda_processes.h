/* What tests of groups whose ranks are processes with GPUs share: a device that dies or breaks at one call of its
 * table, and collectives of all kinds against the CPU's. */
#ifndef CUDA_PROCESSES_H
#define CUDA_PROCESSES_H
#include "cuda_device.h"
#include "processes.h"
#include <sys/mman.h>

enum { MOST = 70001, VICTIM = 1 };

/* ---- a device that counts what the group asks of its table, and does something at one call ---- */

static dtrain_device_ops ops; /* of the rank's device */
static dtrain_device_ops real;
static int asked, at_call,
    signal_at; /* at_call: the number of that call; signal_at: SIGKILL, SIGSTOP or 0, a failure */

static dtrain_status asks(const char *what)
{
    if (++asked != at_call)
        return DTRAIN_OK;
    if (signal_at != 0)
        kill(getpid(), signal_at);
    return signal_at != 0 ? DTRAIN_OK : dtrain_error_set(DTRAIN_ERR_IO, "%s breaks", what);
}

#define COUNTED(name, parameters, arguments) \
    static dtrain_status counted_##name parameters \
    { \
        dtrain_status status = asks(#name); \
        return status == DTRAIN_OK ? real.name arguments : status; \
    }

COUNTED(allocate, (dtrain_device * device, dtrain_memory memory, size_t bytes, void **pointer),
        (device, memory, bytes, pointer))
COUNTED(wait, (dtrain_device * device), (device))
COUNTED(event_record, (dtrain_device * device, dtrain_device_event *event), (device, event))
COUNTED(event_await, (dtrain_device * device, dtrain_device_event *event), (device, event))
COUNTED(reduce,
        (dtrain_device * device, dtrain_dtype dtype, dtrain_op op, double divisor, const void *const *in, int n,
         void *const *out, int m, size_t begin, size_t count),
        (device, dtype, op, divisor, in, n, out, m, begin, count))
COUNTED(memory_share, (dtrain_device * device, const void *pointer, dtrain_device_shared *shared),
        (device, pointer, shared))
COUNTED(memory_open, (dtrain_device * device, const dtrain_device_shared *shared, void **base), (device, shared, base))
COUNTED(page_open, (dtrain_device * device, void *page, size_t bytes, void **queues), (device, page, bytes, queues))
COUNTED(word_write, (dtrain_device * device, uint32_t *word, uint32_t value), (device, word, value))
COUNTED(word_await, (dtrain_device * device, uint32_t *word, uint32_t value), (device, word, value))
COUNTED(flags, (dtrain_device * device, const dtrain_device_flags *part), (device, part))

/* This process' device on a GPU, whose table is `ops` from now on. */
static dtrain_device *counted_device(int gpu)
{
    dtrain_device *device = cuda_device(gpu);
    if (device == NULL)
        exit(1);
    real = ops = *device->ops;
    ops.allocate = counted_allocate;
    ops.wait = counted_wait;
    ops.event_record = counted_event_record;
    ops.event_await = counted_event_await;
    ops.reduce = counted_reduce;
    ops.memory_share = counted_memory_share;
    ops.memory_open = counted_memory_open;
    ops.page_open = counted_page_open;
    ops.word_write = counted_word_write;
    ops.word_await = counted_word_await;
    ops.flags = counted_flags;
    asked = at_call = signal_at = 0;
    return device;
}

static const dtrain_device_ops *own_ops;

static dtrain_device *device_on(int gpu)
{
    dtrain_device *device = counted_device(gpu);
    own_ops = device->ops;
    device->ops = &ops;
    return device;
}

/* The companion destroys what has its own table. */
static void device_finish(dtrain_device *device)
{
    device->ops = own_ops;
    dtrain_cuda_destroy(device);
}

/* How many GPUs there are; ends here without one. A process of its own looks for them: CUDA lives in none that was
 * forked after it began. */
static int gpus(void)
{
#ifdef __CUDACC__
    static int count;
    if (count == 0) {
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            dtrain_cuda_destroy(cuda_device(0)); /* prints and exits with 0 where there is none */
            dtrain_cuda_count(&count);
            _exit(count);
        }
        count = end_of(pid, 60);
        if (count == 0)
            exit(0);
    }
    return count;
#else
    return DTRAIN__CUDA_EMULATED_GPUS;
#endif
}

static void scene_on_gpu(scene *s, int ranks, int tcp)
{
    gpus();
    scene_begin(s, ranks, tcp);
}

/* Files without a name that this process has open. It looks at their names: fstat() of a descriptor that the service
 * thread closes is a race. */
__attribute__((unused)) static int memory_files(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        struct stat file;
        char name[32];
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        count += stat(name, &file) == 0 && S_ISREG(file.st_mode) && file.st_nlink == 0;
    }
    return count;
}

#ifndef __CUDACC__
/* Allocations of other processes that this one's emulated GPU has open. */
__attribute__((unused)) static int opened(void)
{
    int count = 0;
    for (dtrain__cuda_emulated_thing *thing = dtrain__cuda_emulated.things; thing != NULL; thing = thing->next)
        count += thing->kind == DTRAIN__CUDA_EMULATED_OPENED;
    return count;
}
#endif
/* ---- results ---- */

static int differ(const float *got, const float *expected, size_t count)
{
    return count > 0 && memcmp(got, expected, count * sizeof *got) != 0;
}

typedef struct place {
    float *a, *b; /* of the device: MOST + 8 each */
    float *in, *out, *got;
    size_t offset;
    int in_place;
} place;

/* The group's all-reduce and what follows from it against the CPU's; returns how many results are wrong. */
static int reduces(dtrain_comm *world, dtrain_device *device, dtrain_device_group *group, const place *p, size_t count)
{
    float *from = p->a + p->offset, *to = p->in_place ? from : p->b + 3 - p->offset;
    size_t begin, mine = dtrain_shard(world, count, dtrain_comm_rank(world), &begin);
    int wrong = 0;
    CHECK_OK(dtrain_device_copy(device, from, p->in, count * sizeof(float)));
    CHECK_OK(dtrain_device_group_all_reduce(group, from, to, count, DTRAIN_F32, DTRAIN_MEAN));
    CHECK_OK(dtrain_device_copy(device, p->got, to, count * sizeof(float)));
    CHECK_OK(dtrain_all_reduce(world, p->in, p->out, count, DTRAIN_F32, DTRAIN_MEAN));
    wrong += differ(p->got, p->out, count);
    CHECK_OK(dtrain_device_copy(device, from, p->in, count * sizeof(float)));
    to = p->in_place ? from + begin : to;
    CHECK_OK(dtrain_device_group_reduce_scatter(group, from, to, count, DTRAIN_F32, DTRAIN_SUM));
    CHECK_OK(dtrain_device_copy(device, p->got, to, mine * sizeof(float)));
    CHECK_OK(dtrain_reduce_scatter(world, p->in, p->out, count, DTRAIN_F32, DTRAIN_SUM));
    return wrong + differ(p->got, p->out, mine);
}

static int copies(dtrain_comm *world, dtrain_device *device, dtrain_device_group *group, const place *p, size_t count)
{
    float *all = p->b + p->offset, *from = p->a + 3 - p->offset;
    size_t begin, mine = dtrain_shard(world, count, dtrain_comm_rank(world), &begin);
    int wrong = 0, root = dtrain_comm_size(world) - 1;
    from = p->in_place ? all + begin : from;
    CHECK_OK(dtrain_device_copy(device, from, p->in, mine * sizeof(float)));
    CHECK_OK(dtrain_device_group_all_gather(group, from, all, count, DTRAIN_F32));
    CHECK_OK(dtrain_device_copy(device, p->got, all, count * sizeof(float)));
    CHECK_OK(dtrain_all_gather(world, p->in, p->out, count, DTRAIN_F32));
    wrong += differ(p->got, p->out, count);
    CHECK_OK(dtrain_device_copy(device, from, p->in, mine * sizeof(float)));
    CHECK_OK(dtrain_device_group_broadcast(group, all, count, DTRAIN_F32, root));
    if (dtrain_comm_rank(world) == root)
        memcpy(p->out, p->got, count * sizeof(float));
    CHECK_OK(dtrain_broadcast(world, p->out, count, DTRAIN_F32, root));
    CHECK_OK(dtrain_device_copy(device, p->got, all, count * sizeof(float)));
    return wrong + differ(p->got, p->out, count);
}

static place place_new(dtrain_comm *world, dtrain_device *device, size_t most)
{
    place p;
    memset(&p, 0, sizeof p);
    p.a = (float *)device_put(device, NULL, (most + 8) * sizeof(float));
    p.b = (float *)device_put(device, NULL, (most + 8) * sizeof(float));
    p.in = (float *)malloc(3 * most * sizeof(float));
    p.out = p.in + most;
    p.got = p.out + most;
    cuda_numbers(p.in, dtrain_comm_rank(world), most);
    return p;
}

static void place_free(place *p, dtrain_device *device)
{
    device_drop(device, p->a);
    device_drop(device, p->b);
    free(p->in);
}

/* How many elements the calls are tried with: each number twice, apart and in place. */
typedef struct trial {
    const size_t *counts;
    size_t counts_n, most; /* of them */
} trial;

/* Makes a group and tries it with all kinds of calls. */
static void works_on(dtrain_comm *world, dtrain_device *device, dtrain_device_mode mode, dtrain_device_mode expected,
                     const trial *t)
{
    dtrain_device_group *group = NULL;
    dtrain_device_group_desc desc;
    place p = place_new(world, device, t->most);
    int wrong = 0;
    memset(&desc, 0, sizeof desc);
    desc.mode = mode;
    CHECK_OK(dtrain_device_group_create(&group, world, device, &desc));
    CHECK_EQ(dtrain_device_group_mode(group), expected);
    for (size_t i = 0; i < 2 * t->counts_n && group != NULL; i++) {
        p.offset = i % 4;
        p.in_place = (int)(i % 2);
        wrong += reduces(world, device, group, &p, t->counts[i / 2]);
        wrong += copies(world, device, group, &p, t->counts[i / 2]);
    }
    CHECK_EQ(wrong, 0);
    dtrain_device_group_destroy(group);
    place_free(&p, device);
}

__attribute__((unused)) static void works(dtrain_comm *world, dtrain_device *device, dtrain_device_mode mode,
                                          dtrain_device_mode expected)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 64, 1000, 4097, MOST};
    trial t = {counts, sizeof counts / sizeof counts[0], MOST};
    works_on(world, device, mode, expected, &t);
}

/* ---- ranks that die ---- */

static int when, how; /* the call of the table, and what happens there: see asks */
static dtrain_device_mode breaks_in = DTRAIN_DEVICE_EVENTS;
static int gpu_each; /* 1: rank r has GPU r */
static int64_t deadline_ms = 20000;
static volatile int *begins; /* shared with the processes: 1 when the victim goes to make its group */

static dtrain_device *device_of_rank(const dtrain_comm *world)
{
    return device_on(gpu_each ? dtrain_comm_rank(world) : 0);
}

/* Makes a group and calls of all kinds on it until something fails. */
static dtrain_status calls_until_it_breaks(dtrain_comm *world, dtrain_device *device, dtrain_device_mode mode)
{
    float *x = (float *)device_put(device, NULL, MOST * 4), *y = (float *)device_put(device, NULL, MOST * 4);
    dtrain_device_group *group = NULL;
    dtrain_device_group_desc desc;
    char text[512];
    if (dtrain_comm_rank(world) == VICTIM)
        asked = 0, at_call = when, signal_at = how;
    memset(&desc, 0, sizeof desc);
    desc.mode = mode;
    dtrain_status status = dtrain_device_group_create(&group, world, device, &desc);
    for (int i = 0; status == DTRAIN_OK; i++)
        switch (i % 4) {
        case 0: status = dtrain_device_group_all_reduce(group, x, y, MOST, DTRAIN_F32, DTRAIN_SUM); break;
        case 1: status = dtrain_device_group_reduce_scatter(group, x, y, MOST, DTRAIN_F32, DTRAIN_SUM); break;
        case 2: status = dtrain_device_group_all_gather(group, y, x, MOST, DTRAIN_F32); break;
        default:
            status = dtrain_device_group_broadcast(group, x, MOST, DTRAIN_F32, i / 4 % dtrain_comm_size(world));
            break;
        }
    snprintf(text, sizeof text, "%s", dtrain_last_error());
    device_drop(device, x); /* no device is in there any more */
    device_drop(device, y);
    dtrain_device_group_destroy(group);
    return dtrain_error_set(status, "%s", text);
}

static int one_goes(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_of_rank(world);
    dtrain_comm *rest = NULL;
    CHECK_OK(dtrain_barrier(world));
    scene_meet(s->ranks);
    if (begins != NULL && dtrain_comm_rank(world) == VICTIM)
        *begins = 1;
    double begun = now_s();
    CHECK_EQ(calls_until_it_breaks(world, device, breaks_in), DTRAIN_ERR_PEER_LOST);
    if (dtrain_comm_rank(world) == VICTIM)
        return 0; /* it was stopped, and is out */
    CHECK_CONTAINS(dtrain_last_error(), "rank 1");
    CHECK(now_s() - begun < (double)s->desc.heartbeat_ms * 1e-3 + 20);
    CHECK_OK(dtrain_comm_shrink(world, &rest));
    if (rest != NULL)
        works(rest, device, breaks_in, breaks_in);
    dtrain_comm_destroy(rest);
    device_finish(device);
    return 0;
}

/* The victim's last call is the when'th of its table; after_us: it is killed so much later than it begins. */
__attribute__((unused)) static void goes(int ranks, unsigned after_us, dtrain_progress progress)
{
    scene s;
    pid_t pids[MAX_PROCESSES];
    int before = test_failures;
    scene_on_gpu(&s, ranks, 0);
    dtrain_set_log(quiet, NULL);
    void *shared = mmap(NULL, sizeof *begins, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    begins = (volatile int *)shared;
    s.desc.progress = progress;
    s.desc.timeout_ms = deadline_ms < 20000 ? deadline_ms : test_ms((int)deadline_ms);
    s.desc.heartbeat_ms = how == SIGSTOP ? 1000 : 0;
    for (int rank = 0; rank < ranks; rank++)
        pids[rank] = start_rank(&s, rank, one_goes);
    if (after_us > 0) {
        for (int i = 0; i < 30000 && !*begins; i++)
            usleep(1000);
        usleep(after_us);
        kill(pids[VICTIM], how);
    }
    for (int rank = 0; rank < ranks; rank++)
        if (rank != VICTIM)
            CHECK_EQ(end_of(pids[rank], 60), 0);
    if (how == SIGSTOP)
        kill(pids[VICTIM], SIGCONT);
    CHECK_EQ(end_of(pids[VICTIM], 30), how == SIGSTOP ? 0 : 128 + SIGKILL);
    munmap(shared, sizeof *begins);
    if (test_failures != before)
        TEST_FAIL("%d ranks, call %d of the table, after %u us, signal %d", ranks, when, after_us, how);
}

/* A device that breaks at the n-th call of its table. */
__attribute__((unused)) static int one_breaks(dtrain_comm *world, scene *s)
{
    dtrain_device *device = device_of_rank(world);
    (void)s;
    dtrain_status status = calls_until_it_breaks(world, device, breaks_in);
    CHECK(status == DTRAIN_ERR_IO ||
          (status == DTRAIN_ERR_UNSUPPORTED && strstr(dtrain_last_error(), "is not possible") != NULL));
    CHECK_CONTAINS(dtrain_last_error(), "breaks");
    CHECK_CONTAINS(dtrain_last_error(), "rank 1");
    device_finish(device);
    return 0;
}

#endif
