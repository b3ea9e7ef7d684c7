/* Compressed all-reduces of vectors on devices beside those on the CPU: results, residuals, velocities and what is sent
 * are the same to the bit, step after step, for every compressor that a device has, among ranks of which some have
 * none; whatever call or memory fails, every rank hears of it and nothing is left. */
#include "hooks.h"
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "piece_at.h"
#include "worlds.h"
#include "fake_device.h"

enum { MOST = 4099, MOST_RANKS = 66 };
enum { TOPK, INT8, FP8, BF16, F16, KINDS };
enum { NOISE, FEW, ZEROS, SPECIAL, HUGE_ONES, AT_THE_END, NUMBERS };

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

void *hook_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align)
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
    case AT_THE_END: /* a residual there, to which the rounding of a sum is added */
        return rank == 0      ? from_bits(0x7f7fffffu)
               : i % 100 < 90 ? 0.0f
                              : from_bits(rank == 1 ? 0x7f000000u : 0x7e810000u);
    case HUGE_ONES: return noise * (random % 3 == 0 ? 3e38f : 1e30f); /* infinite, or so when added up */
    default: return noise * noise * noise;
    }
}

static dtrain_compressor compressor_of(int kind)
{
    dtrain_compressor made;
    memset(&made, 0, sizeof made);
    switch (kind) {
    case INT8: return dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 64);
    case FP8: return dtrain_compressor_of(DTRAIN_COMPRESS_FP8, 64);
    case BF16: return dtrain_compressor_of(DTRAIN_COMPRESS_BF16, 0);
    case F16: return dtrain_compressor_of(DTRAIN_COMPRESS_F16, 0);
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
    size_t where;
    dtrain_compressed_stats a = dtrain_compressed_get_stats(cpu->state), b = dtrain_compressed_get_stats(there->state);
    CHECK(a.steps == b.steps && a.dense_bytes == b.dense_bytes && a.sent_bytes == b.sent_bytes);
    if (!same_floats(cpu, cpu->out, there, there->out, plan.count, &where))
        TEST_FAIL("rank %d, step %d: element %zu of %zu differs, kind %d, numbers %d, exchange %d", rank, step, where,
                  plan.count, plan.kind, plan.numbers, (int)plan.topk.exchange);
    const dtrain_piece *p;
    for (int i = 0; (p = piece_at(dtrain_compressed_pieces(cpu->state), i)) != NULL; i++) {
        side here[2] = {*cpu, *there};
        const dtrain_piece *q = piece_at(dtrain_compressed_pieces(there->state), i);
        CHECK_EQ(strcmp(p->name, q->name), 0);
        CHECK_EQ(p->count, q->count);
        here[1].device = q->device;
        for (where = 0; where < p->count && isfinite(((const float *)p->data)[where]);)
            where++;
        CHECK_EQ(where, p->count);
        if (!same_floats(&here[0], (float *)p->data, &here[1], (float *)q->data, p->count, &where))
            TEST_FAIL("rank %d, step %d: element %zu of %zu of the %s differs, kind %d, numbers %d", rank, step, where,
                      plan.count, p->name, plan.kind, plan.numbers);
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

static const size_t counts[] = {0, 1, 2, 7, 65, 1021};
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
    for (int exchange = DTRAIN_EXCHANGE_GATHER; exchange <= DTRAIN_EXCHANGE_SPLIT; exchange++)
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
                plan.topk.exchange = ranks == 3 ? DTRAIN_EXCHANGE_SPLIT : DTRAIN_EXCHANGE_GATHER;
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
    }
    plan_new(INT8, 300);
    plan.steps = 1;
    on_threads(MOST_RANKS, beside_the_cpu, NULL);
}

/* ---- sets, as DDP and FSDP have them ---- */

/* Parts of a vector, of which those of less than 300 travel as they are, sent in two goes. */
static const size_t parts[] = {700, 20, 0, 299, 301, 1, 2000};
enum { PARTS = sizeof parts / sizeof *parts, PARTS_ALL = 3321 };

static dtrain_status set_begin(dtrain__compression_set *set, dtrain_comm *world, dtrain_device *device)
{
    dtrain_compress_desc desc;
    size_t at = 0;
    memset(&desc, 0, sizeof desc);
    memset(set, 0, sizeof *set);
    desc.kind = plan.kind == TOPK ? DTRAIN_COMPRESS_TOPK : DTRAIN_COMPRESS_INT8;
    desc.topk = plan.topk;
    desc.feedback = plan.desc;
    desc.least_count = 300;
    dtrain_status status = dtrain__compression_begin(set, world, device, dtrain_comm_allocator(world), PARTS);
    for (int i = 0; status == DTRAIN_OK && i < PARTS; at += parts[i++])
        status = dtrain__compression_add(set, &desc, at, parts[i], 1, 0);
    return status == DTRAIN_OK ? dtrain__compression_end(set, &desc) : status;
}

static void sets(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    dtrain_device *device = fake_begin(&fakes[rank], "fake:0");
    dtrain__compression_set set[2];
    side sides[2];
    size_t where;
    memset(sides, 0, sizeof sides);
    sides[1].device = device;
    for (int i = 0; i < 2; i++) {
        void *made;
        CHECK_EQ(set_begin(&set[i], world, sides[i].device), DTRAIN_OK);
        CHECK_EQ(dtrain_device_alloc(sides[i].device, DTRAIN_MEMORY_DEVICE, PARTS_ALL * sizeof(float), &made),
                 DTRAIN_OK);
        sides[i].out = (float *)made;
    }
    for (int step = 0; step < 6; step++) {
        float numbers[PARTS_ALL];
        dtrain_compressed_stats stats[2];
        memset(stats, 0, sizeof stats);
        for (size_t i = 0; i < PARTS_ALL; i++)
            numbers[i] = gradient(rank, i, step);
        for (int i = 0; i < 2; i++) {
            CHECK_EQ(dtrain_device_copy(sides[i].device, sides[i].out, numbers, sizeof numbers), DTRAIN_OK);
            double total = step == 2 ? 0.0 : 1.0 + step; /* the weight of all ranks */
            CHECK_EQ(dtrain__compression_send(&set[i], sides[i].out, 0, 3, total, NULL, &stats[i]), DTRAIN_OK);
            CHECK_EQ(dtrain__compression_send(&set[i], sides[i].out, 3, set[i].part_count, total, NULL, &stats[i]),
                     DTRAIN_OK);
            dtrain__compression_end_step(&set[i], step != 1); /* which is dropped */
        }
        CHECK(stats[0].sent_bytes == stats[1].sent_bytes && stats[0].dense_bytes == stats[1].dense_bytes);
        if (!same_floats(&sides[0], sides[0].out, &sides[1], sides[1].out, PARTS_ALL, &where))
            TEST_FAIL("rank %d, step %d: element %zu of a set differs, kind %d", rank, step, where, plan.kind);
    }
    for (int i = 0; i < 2; i++) {
        dtrain__compression_close(&set[i]);
        dtrain_device_free(sides[i].device, DTRAIN_MEMORY_DEVICE, sides[i].out);
    }
    fake_end(&fakes[rank]);
}

TEST(sets_of_large_and_small_parts_give_the_cpus_bits)
{
    for (int ranks = 1; ranks < 4; ranks++)
        for (int kind = TOPK; kind <= INT8; kind++) {
            plan_new(kind, 0);
            plan.desc.momentum = kind == TOPK ? 0.5f : 0;
            on_threads(ranks, sets, NULL);
        }
}

static void set_refuses(dtrain_comm *world)
{
    dtrain__compression_set set;
    fake_begin(&fakes[0], "fake:0");
    plan.desc.device = &fakes[0].device;
    CHECK_EQ(set_begin(&set, world, NULL), DTRAIN_ERR_INVALID);
    CHECK_CONTAINS(dtrain_last_error(), "feedback.device is fake:0, expected NULL");
    dtrain__compression_close(&set);
    fake_end(&fakes[0]);
}

TEST(where_gradients_are_is_not_for_the_compression_to_say)
{
    plan_new(INT8, 0);
    on_threads(1, set_refuses, NULL);
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
        for (int exchange = DTRAIN_EXCHANGE_GATHER; exchange <= DTRAIN_EXCHANGE_SPLIT; exchange++) {
            plan_new(kind, MOST);
            plan.topk.exchange = (dtrain_sparse_exchange)exchange;
            plan.op = DTRAIN_MEAN;
            if (kind == TOPK || exchange == DTRAIN_EXCHANGE_GATHER)
                on_threads(3, warm, NULL);
        }
}

/* Once a way: what is sent, and by a selection what leaves the residual, its bad ones' indices and the sums. */
static void copies_little(dtrain_comm *world)
{
    int rank = dtrain_comm_rank(world);
    dtrain_device *device = fake_begin(&fakes[rank], "fake:0");
    side there;
    CHECK_EQ(side_begin(&there, world, device), DTRAIN_OK);
    for (int step = 0; step < 3; step++) {
        CHECK_EQ(side_step(&there, rank, 0),
                 DTRAIN_OK); /* what of this is the step's, and what the test's, is apart: */
        fakes[rank].largest_copy = 0;
        CHECK_EQ(dtrain_compressed_all_reduce(there.state, there.in, there.out, DTRAIN_SUM), DTRAIN_OK);
        CHECK(fakes[rank].largest_copy <= (plan.kind < BF16 ? (size_t)MOST * 5 / 4 : (size_t)MOST * 2 + 8));
        CHECK(plan.kind != TOPK || fakes[rank].largest_copy <= 2 * 4 * (MOST / 100 + 1));
    }
    side_end(&there);
    fake_end(&fakes[rank]);
}

TEST(only_what_is_sent_is_copied_to_the_cpu)
{
    for (int kind = 0; kind < KINDS; kind++) {
        plan_new(kind, MOST);
        plan.topk.schedule.ratio = 0.01;
        on_threads(2, copies_little, NULL);
    }
}

/* ---- refusals ---- */

static void refuses(dtrain_comm *world)
{
    dtrain_device *device = fake_begin(&fakes[0], "fake:0");
    dtrain_compressed *made = NULL;
    dtrain_compressed_desc desc;
    dtrain_compressor q = dtrain_compressor_of(DTRAIN_COMPRESS_SIGN, 0);
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    CHECK_EQ(dtrain_compressed_create(&made, world, 100, &q, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 0: fake:0 has no kernels for the compressor sign: take top-k");
    CHECK_EQ(dtrain_compressor_powersgd(&q, 10, 10, 2, 1, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_compressed_create(&made, world, 100, &q, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "the compressor powersgd");
    desc.start_step = 1;
    q = dtrain_compressor_of(DTRAIN_COMPRESS_INT8, 0);
    CHECK_EQ(dtrain_compressed_create(&made, world, 10, &q, &desc), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "start_step is 1, and a vector on fake:0 is compressed from its first step on");
    desc.start_step = 0;
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
    char texts[2][700];
    int came, ended; /* ended: rank 1 has */
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
    if (rank == 1)
        __atomic_store_n(&fault.ended, 1, __ATOMIC_SEQ_CST);
    double until = now_s() + 12.0; /* the other hears of it from the call, not because this rank leaves */
    while (rank == 0 && strncmp(fault.texts[0], "compressed all_reduce", 21) == 0 && now_s() < until &&
           !__atomic_load_n(&fault.ended, __ATOMIC_SEQ_CST))
        usleep(200);
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
    desc.timeout_ms = test_ms(20000);
    fault.call = call;
    fault.allocation = allocation;
    fault.ended = 0;
    double begin = now_s();
    DTRAIN_IGNORE(dtrain_run_threads(2, fails, NULL, &desc));
    CHECK_WITHIN(now_s() - begin, 10.0);
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
        for (int way = 0; way < (kind == TOPK ? 2 : 1); way++) {
            long n = 1;
            plan_new(kind, 300);
            plan.numbers = SPECIAL;
            plan.op = DTRAIN_MEAN;
            plan.topk.exchange = (dtrain_sparse_exchange)(DTRAIN_EXCHANGE_GATHER + way);
            plan.desc.momentum = kind == TOPK ? 0.5f : 0;
            fault.stays_broken = (kind + way) % 2;
            while (test_failures == 0 && fails_well(n, 0))
                n += all ? 1 : 3;
            CHECK(n > 20);
            for (n = 1; test_failures == 0 && fails_well(0, n); n++)
                ;
            CHECK(n > 5);
        }
}
