/* Compressed all-reduces of vectors on devices beside those on the CPU: results, residuals, velocities and what is sent
 * are the same to the bit, step after step, for every compressor that a device has, among ranks of which some have
 * none; whatever call or memory fails, every rank hears of it and nothing is left. */
#include <stddef.h>

static void *counted_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align);
#define DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align) counted_resize(pointer, old_bytes, new_bytes, align)
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "../dtrain.h"
#include "test.h"
#include "worlds.h"
#include "fake_device.h"

enum { MOST = 4099, MOST_RANKS = 66 };
enum { TOPK, INT8, FP8, BF16, F16, KINDS };
enum { NOISE, FEW, ZEROS, SPECIAL, HUGE_ONES, NUMBERS };

static struct {
    size_t count;
    int kind, numbers, steps, alone; /* alone: rank 1's vector is on the CPU */
    dtrain_topk_desc topk;
    dtrain_compressed_desc desc;
    dtrain_op op;
} plan;

static fake fakes[MOST_RANKS];
static long resizes, fail_resize; /* the failing one, counted from 1; 0: none */
static size_t resized_bytes;

static void *counted_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
{
    void *block = NULL;
    if (new_bytes > 0 && __atomic_add_fetch(&resizes, 1, __ATOMIC_SEQ_CST) == fail_resize)
        return NULL;
    if (new_bytes > 0 && posix_memalign(&block, align, new_bytes) != 0)
        return NULL;
    if (block != NULL && pointer != NULL)
        memcpy(block, pointer, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(pointer);
    __atomic_add_fetch(&resized_bytes, new_bytes - old_bytes, __ATOMIC_SEQ_CST);
    return block;
}

static float gradient(int rank, size_t i, int step)
{
    static const uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u, 0x80000000u,
                                       0x00000001u, 0x807fffffu, 0x7f7fffffu, 0xff7fffffu, 0x47800000u};
    uint64_t index = (uint64_t)i + (uint64_t)step * 100000, random = dtrain_random_u64((uint64_t)rank + 1, index);
    float noise = dtrain_random_normal((uint64_t)rank + 1, index);
    switch (plan.numbers) {
    case FEW: return (float)((int)(random % 5) - 2);
    case ZEROS: return from_bits(random % 2 == 0 ? 0x80000000u : 0);
    case SPECIAL: return random % 29 == 0 && step % 3 != 2 ? from_bits(special[random / 29 % 10]) : noise;
    case HUGE_ONES: return noise * (random % 3 == 0 ? 3e38f : 1e30f); /* infinite, or so when added up */
    default: return noise * noise * noise;
    }
}

static dtrain_compressor compressor_of(int kind)
{
    dtrain_compressor made;
    memset(&made, 0, sizeof made);
    switch (kind) {
    case INT8: return dtrain_compressor_int8(64);
    case FP8: return dtrain_compressor_fp8(64);
    case BF16: return dtrain_compressor_cast(DTRAIN_BF16);
    case F16: return dtrain_compressor_cast(DTRAIN_F16);
    default: break;
    }
    if (dtrain_compressor_topk(&made, &plan.topk, NULL) != DTRAIN_OK)
        TEST_FAIL("%s", dtrain_last_error());
    return made;
}

/* ---- beside the CPU's ---- */

typedef struct side {
    dtrain_device *device;
    dtrain_compressed *state;
    float *in, *out; /* the device's, or the CPU's where there is none */
} side;

static dtrain_status side_begin(side *s, dtrain_comm *world, dtrain_device *device)
{
    dtrain_compressor compressor = compressor_of(plan.kind);
    dtrain_compressed_desc desc = plan.desc;
    void *memory[2] = {NULL, NULL};
    memset(s, 0, sizeof *s);
    s->device = device;
    desc.device = device;
    dtrain_status status = dtrain_compressed_create(&s->state, world, plan.count, &compressor, &desc);
    for (int i = 0; status == DTRAIN_OK && i < 2; i++)
        status = dtrain_device_alloc(device, DTRAIN_MEMORY_DEVICE, (plan.count + 1) * sizeof(float), &memory[i]);
    s->in = (float *)memory[0];
    s->out = (float *)memory[1];
    return status;
}

static void side_end(side *s)
{
    dtrain_compressed_destroy(s->state);
    dtrain_device_free(s->device, DTRAIN_MEMORY_DEVICE, s->in);
    dtrain_device_free(s->device, DTRAIN_MEMORY_DEVICE, s->out);
}

/* One step; in place in every second. */
static dtrain_status side_step(side *s, int rank, int step)
{
    float *numbers = (float *)malloc((plan.count + 1) * sizeof(float)), *in = s->in;
    for (size_t i = 0; i < plan.count; i++)
        numbers[i] = gradient(rank, i, step);
    dtrain_status status = dtrain_device_copy(s->device, in, numbers, plan.count * sizeof(float));
    if (status == DTRAIN_OK)
        status = dtrain_compressed_all_reduce(s->state, in, step % 2 == 0 ? s->out : in, plan.op);
    if (status == DTRAIN_OK && step % 2 != 0)
        status = dtrain_device_copy(s->device, s->out, in, plan.count * sizeof(float));
    free(numbers);
    return status;
}

/* What a NaN holds is nobody's. */
static int same_floats(const side *a, const float *x, const side *b, const float *y, size_t count, size_t *where)
{
    float *left = (float *)malloc((count + 1) * sizeof(float)), *right = (float *)malloc((count + 1) * sizeof(float));
    DTRAIN_CHECK(dtrain_device_copy(a->device, left, x, count * sizeof(float)));
    DTRAIN_CHECK(dtrain_device_copy(b->device, right, y, count * sizeof(float)));
    for (*where = 0; *where < count; ++*where)
        if (to_bits(left[*where]) != to_bits(right[*where]) &&
            !(left[*where] != left[*where] && right[*where] != right[*where]))
            break;
    free(left);
    free(right);
    return *where == count;
}

static void compare(const side *cpu, const side *there, int rank, int step)
{
    size_t where, counts[2];
    const char *names[2];
    float *data[2];
    dtrain_compressed_stats a = dtrain_compressed_counters(cpu->state), b = dtrain_compressed_counters(there->state);
    CHECK(a.steps == b.steps && a.dense_bytes == b.dense_bytes && a.sent_bytes == b.sent_bytes);
    if (!same_floats(cpu, cpu->out, there, there->out, plan.count, &where))
        TEST_FAIL("rank %d, step %d: element %zu of %zu differs, kind %d, numbers %d, exchange %d", rank, step, where,
                  plan.count, plan.kind, plan.numbers, (int)plan.topk.exchange);
    for (int i = 0; dtrain_compressed_state(cpu->state, i, &names[0], &data[0], &counts[0]); i++) {
        side here[2] = {*cpu, *there};
        CHECK(dtrain_compressed_state(there->state, i, &names[1], &data[1], &counts[1]));
        CHECK_EQ(strcmp(names[0], names[1]), 0);
        CHECK_EQ(counts[0], counts[1]);
        if (strcmp(names[0], "step") == 0)
            here[1].device = NULL;
        if (!same_floats(&here[0], data[0], &here[1], data[1], counts[0], &where))
            TEST_FAIL("rank %d, step %d: element %zu of %zu of the %s differs, kind %d, numbers %d", rank, step, where,
                      plan.count, names[0], plan.kind, plan.numbers);
    }
}

static void beside_the_cpu(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    dtrain_device *device = fake_begin(&fakes[rank], "fake:0");
    side cpu, there;
    CHECK_EQ(side_begin(&cpu, world, NULL), DTRAIN_OK);
    CHECK_EQ(side_begin(&there, world, plan.alone && rank == 1 ? NULL : device), DTRAIN_OK);
    for (int step = 0; test_failures == 0 && step < plan.steps; step++) {
        CHECK_EQ(side_step(&cpu, rank, step), DTRAIN_OK);
        if (side_step(&there, rank, step) != DTRAIN_OK)
            TEST_FAIL("rank %d: %s", rank, dtrain_last_error());
        else
            compare(&cpu, &there, rank, step);
    }
    side_end(&cpu);
    side_end(&there);
    fake_end(&fakes[rank]);
}

static void plan_new(int kind, size_t count)
{
    memset(&plan, 0, sizeof plan);
    plan.kind = kind;
    plan.count = count;
    plan.steps = 4;
    plan.op = DTRAIN_SUM;
    plan.topk.schedule.ratio = 0.05;
}

static const size_t counts[] = {0, 1, 2, 7, 64, 65, 1021, MOST};
static const int worlds[] = {1, 2, 3, 4, 8};

TEST(packed_vectors_give_the_cpus_bits)
{
    for (int kind = INT8; kind < KINDS; kind++)
        for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
            for (size_t c = 0; test_failures == 0 && c < sizeof counts / sizeof *counts; c++) {
                plan_new(kind, counts[c]);
                plan.numbers = (int)(c + w) % NUMBERS;
                plan.op = (c + w) % 3 == 0 ? DTRAIN_MEAN : DTRAIN_SUM;
                plan.desc.no_feedback = (c + w) % 4 == 3;
                plan.alone = c % 2 == 1;
                on_threads(worlds[w], beside_the_cpu, NULL);
            }
}

TEST(packed_numbers_that_are_none_are_dropped_as_on_the_cpu)
{
    for (int kind = INT8; kind < KINDS; kind++)
        for (int numbers = SPECIAL; numbers < NUMBERS; numbers++)
            for (int ranks = 1; test_failures == 0 && ranks < 5; ranks++) {
                plan_new(kind, 1021);
                plan.numbers = numbers;
                plan.steps = 6;
                plan.op = ranks == 3 ? DTRAIN_MEAN : DTRAIN_SUM;
                on_threads(ranks, beside_the_cpu, NULL);
            }
}

TEST(selected_elements_give_the_cpus_bits)
{
    static const dtrain_dtype wires[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16};
    static const double ratios[] = {0.05, 0.4, 1.0};
    for (int exchange = DTRAIN_EXCHANGE_GATHER; exchange <= DTRAIN_EXCHANGE_SPLIT_TOPK; exchange++)
        for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
            for (size_t c = 0; test_failures == 0 && c < sizeof counts / sizeof *counts; c++) {
                size_t turn = c + w + (size_t)exchange;
                plan_new(TOPK, counts[c]);
                plan.topk.exchange = (dtrain_sparse_exchange)exchange;
                plan.topk.values = wires[turn % 3];
                plan.topk.schedule.ratio = ratios[turn / 3 % 3];
                plan.numbers = (int)(turn % NUMBERS);
                plan.op = turn % 4 == 0 ? DTRAIN_MEAN : DTRAIN_SUM;
                plan.desc.no_feedback = turn % 7 == 3;
                plan.alone = c % 2 == 1;
                on_threads(worlds[w], beside_the_cpu, NULL);
            }
}

TEST(selected_numbers_that_are_none_are_dropped_as_on_the_cpu)
{
    static const dtrain_dtype wires[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16};
    for (int wire = 0; wire < 3; wire++)
        for (int numbers = SPECIAL; numbers < NUMBERS; numbers++)
            for (int ranks = 1; test_failures == 0 && ranks < 5; ranks++) {
                plan_new(TOPK, 1021);
                plan.topk.values = wires[wire];
                plan.topk.schedule.ratio = ranks % 2 == 0 ? 0.01 : 0.1; /* fewer, and more than are none */
                plan.topk.exchange = ranks == 3 ? DTRAIN_EXCHANGE_SPLIT_TOPK : DTRAIN_EXCHANGE_GATHER;
                plan.numbers = numbers;
                plan.steps = 6;
                on_threads(ranks, beside_the_cpu, NULL);
            }
}

TEST(ratios_that_warm_up_and_momentum_give_the_cpus_bits)
{
    for (int masks = 0; masks < 2; masks++)
        for (int numbers = 0; numbers < NUMBERS; numbers++)
            for (int ranks = 1; test_failures == 0 && ranks < 4; ranks++) {
                plan_new(TOPK, 1021);
                plan.topk.schedule.ratio = 0.01;
                plan.topk.schedule.stage_steps = 2;
                plan.desc.momentum = 0.9f;
                plan.desc.no_masking = !masks;
                plan.numbers = numbers;
                plan.steps = 9;
                on_threads(ranks, beside_the_cpu, NULL);
            }
}

TEST(processes_and_more_ranks_than_a_device_adds_up_at_once_give_the_cpus_bits)
{
    for (int kind = 0; test_failures == 0 && kind < KINDS; kind++) {
        plan_new(kind, MOST);
        on_processes(2, beside_the_cpu, NULL);
        plan_new(kind, 300);
        plan.steps = 2;
        on_threads(MOST_RANKS, beside_the_cpu, NULL);
    }
}

/* ---- memory ---- */

static void warm(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    dtrain_device *device = fake_begin(&fakes[rank], "fake:0");
    side there;
    long made = 0, called = 0;
    CHECK_EQ(side_begin(&there, world, device), DTRAIN_OK);
    for (int step = 0; step < 14; step++) {
        if (step == 6) {
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
            made = fakes[rank].allocations;
            called = __atomic_load_n(&resizes, __ATOMIC_SEQ_CST);
            CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
        }
        CHECK_EQ(side_step(&there, rank, step), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    CHECK_EQ(fakes[rank].allocations, made);
    CHECK_EQ(__atomic_load_n(&resizes, __ATOMIC_SEQ_CST), called);
    CHECK_EQ(dtrain_barrier(world), DTRAIN_OK);
    side_end(&there);
    fake_end(&fakes[rank]);
}

TEST(nothing_is_allocated_once_warm)
{
    for (int kind = 0; kind < KINDS; kind++)
        for (int exchange = DTRAIN_EXCHANGE_GATHER; exchange <= DTRAIN_EXCHANGE_SPLIT_TOPK; exchange++) {
            plan_new(kind, MOST);
            plan.topk.exchange = (dtrain_sparse_exchange)exchange;
            plan.op = DTRAIN_MEAN;
            if (kind == TOPK || exchange == DTRAIN_EXCHANGE_GATHER)
                on_threads(3, warm, NULL);
        }
}

TEST(only_what_is_sent_is_copied_to_the_cpu)
{
    for (int kind = 0; kind < KINDS; kind++) {
        plan_new(kind, MOST);
        plan.numbers = SPECIAL;
        plan.topk.schedule.ratio = 0.01;
        on_threads(1, warm, NULL);
        fakes[0].largest_copy = 0;
    }
}

/* ---- refusals ---- */

static void refuses(dtrain_comm *world)
{
    dtrain_device *device = fake_begin(&fakes[0], "fake:0");
    dtrain_compressed *made = NULL;
    dtrain_compressed_desc desc;
    dtrain_topk_desc topk;
    dtrain_compressor q = dtrain_compressor_sign(0);
    memset(&desc, 0, sizeof desc);
    memset(&topk, 0, sizeof topk);
    desc.device = device;
    CHECK_EQ(dtrain_compressed_create(&made, world, 100, &q, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0: fake:0 has no kernels for the compressor sign: take top-k");
    CHECK_EQ(dtrain_compressor_powersgd(&q, 10, 10, 2, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&made, world, 100, &q, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "the compressor powersgd");
    topk.threshold = 0.5f;
    CHECK_EQ(dtrain_compressor_topk(&q, &topk, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&made, world, 100, &q, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "not those from a threshold of 0.5 on: give topk a ratio");
    q = dtrain_compressor_int8(0);
    desc.max_norm = 2.0f;
    CHECK_EQ(dtrain_compressed_create(&made, world, 100, &q, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "max_norm is 2, and fake:0");
    CHECK(made == NULL);
    fake_end(&fakes[0]);
}

TEST(what_a_device_cannot_do_is_refused_with_the_cure)
{
    on_threads(1, refuses, NULL);
}

static void divides(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    dtrain_device *device = fake_begin(&fakes[rank], "fake:0");
    side there;
    CHECK_EQ(side_begin(&there, world, device), DTRAIN_OK);
    CHECK_EQ(side_step(&there, rank, 0), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "DTRAIN_MEAN over 66 ranks");
    side_end(&there);
    fake_end(&fakes[rank]);
}

TEST(a_mean_over_66_ranks_is_refused)
{
    plan_new(INT8, 100);
    plan.op = DTRAIN_MEAN;
    on_threads(MOST_RANKS, divides, NULL);
}

/* ---- failures ---- */

static struct {
    int calls_too, stays_broken;
    long call, allocation, resize;
    dtrain_status statuses[2];
    char texts[2][600];
    int came;
} fault;

static dtrain_status fails(dtrain_comm *world, void *user)
{
    int rank = dtrain_comm_rank(world);
    dtrain_device *device = fake_begin(&fakes[rank], rank == 0 ? "fake:0" : "fake:1");
    side there;
    (void)user;
    if (rank == 0) {
        fakes[0].fail_call = fault.call;
        fakes[0].stays_broken = fault.stays_broken;
        fakes[0].fail_allocation = fault.allocation;
    }
    dtrain_status status = side_begin(&there, world, device);
    for (int step = 0; status == DTRAIN_OK && step < 3; step++)
        status = side_step(&there, rank, step);
    snprintf(fault.texts[rank], sizeof fault.texts[rank], "%s", status == DTRAIN_OK ? "" : dtrain_last_error());
    fault.statuses[rank] = status;
    if (rank == 0)
        fault.came = fault.call > 0         ? fakes[0].calls >= fault.call
                     : fault.allocation > 0 ? fakes[0].allocations >= fault.allocation
                                            : 1;
    side_end(&there);
    fake_end(&fakes[rank]);
    return status;
}

/* Returns 0 when what was to fail was never reached. */
static int fails_well(long call, long allocation)
{
    dtrain_comm_desc desc;
    size_t before = resized_bytes;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 20000;
    fault.call = call;
    fault.allocation = allocation;
    double begin = now_s();
    dtrain_run_threads(2, fails, NULL, &desc);
    CHECK(now_s() - begin < 10.0);
    if (!fault.came) {
        CHECK_EQ(fault.statuses[0], DTRAIN_OK);
        CHECK_EQ(fault.statuses[1], DTRAIN_OK);
        return 0;
    }
    if (fault.statuses[0] != (call > 0 ? DTRAIN_ERR_IO : DTRAIN_ERR_MEMORY))
        TEST_FAIL("call %ld, allocation %ld: %s: %s", call, allocation, dtrain_status_name(fault.statuses[0]),
                  fault.texts[0]);
    CHECK_CONTAINS(fault.texts[0], "the fake device");
    if (strncmp(fault.texts[0], "compressed", 10) == 0) { /* not the test's own copies */
        CHECK_CONTAINS(fault.texts[0], "rank 0, fake:0: ");
        if (strncmp(fault.texts[0], "compressed all_reduce", 21) == 0 && fault.statuses[1] != DTRAIN_OK)
            CHECK_CONTAINS(fault.texts[1], "rank 0");
    }
    CHECK_EQ(resized_bytes, before);
    return 1;
}

TEST(whatever_call_or_memory_fails_both_ranks_hear_of_it_and_nothing_is_left)
{
    const int all = getenv("DEVICE_FAULTS") != NULL;
    for (int kind = 0; kind < KINDS; kind++)
        for (int way = 0; way < (kind == TOPK ? 3 : 1); way++) {
            long n = 1;
            plan_new(kind, 300);
            plan.numbers = SPECIAL;
            plan.op = DTRAIN_MEAN;
            plan.topk.exchange = (dtrain_sparse_exchange)(DTRAIN_EXCHANGE_GATHER + way);
            plan.desc.momentum = kind == TOPK ? 0.5f : 0;
            fault.stays_broken = (kind + way) % 2;
            while (test_failures == 0 && fails_well(n, 0))
                n += all ? 1 : 2;
            CHECK(n > 20);
            for (n = 1; test_failures == 0 && fails_well(0, n); n++)
                ;
            CHECK(n > 5);
        }
}
