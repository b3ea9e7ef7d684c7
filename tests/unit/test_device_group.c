/* Collectives over devices give the bits of the CPU's, at every size, kind, place and interleaving, in the order of
 * the queues alone, and make nothing after the start. */
#include "hooks.h"
#define DTRAIN_IMPLEMENTATION
#define DTRAIN_API static
#include "dtrain.h"
#include "test.h"
#include "device_bits.h"

static const int sizes[] = {1, 2, 3, 4, 5, 8};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* ---- a call at a time, beside the CPU's ---- */

static void at_all_sizes(dtrain_device_mode mode, void (*body)(dg_rank *r), unsigned delay_us)
{
    for (int i = 0; i < SIZES; i++) {
        dg_world w = dg_new(sizes[i], mode, body);
        w.delay_us = delay_us;
        w.seed = (uint64_t)(i + 1);
        dg_on_threads(&w);
    }
}

TEST(every_count_below_65_gives_the_cpus_bits_by_events)
{
    at_all_sizes(DTRAIN_DEVICE_EVENTS, every_small_count, 20);
}

TEST(every_count_below_65_gives_the_cpus_bits_staged)
{
    at_all_sizes(DTRAIN_DEVICE_STAGED, every_small_count, 20);
}

TEST(large_counts_give_the_cpus_bits_by_events)
{
    at_all_sizes(DTRAIN_DEVICE_EVENTS, large_counts, 20);
}

TEST(large_counts_give_the_cpus_bits_staged)
{
    at_all_sizes(DTRAIN_DEVICE_STAGED, large_counts, 20);
}

TEST(shards_of_any_length_give_the_cpus_bits_by_events)
{
    at_all_sizes(DTRAIN_DEVICE_EVENTS, cut_shards, 20);
}

TEST(shards_of_any_length_give_the_cpus_bits_staged)
{
    at_all_sizes(DTRAIN_DEVICE_STAGED, cut_shards, 20);
}

TEST(ranks_without_a_device_take_part_staged)
{
    static const unsigned without[] = {1, 2, 5, 6, 7};
    for (int i = 0; i < 5; i++) {
        dg_world w = dg_new(3, DTRAIN_DEVICE_STAGED, small_and_large);
        w.without = without[i];
        dg_on_threads(&w);
    }
}

TEST(processes_give_the_cpus_bits_staged)
{
    static const int ranks[] = {2, 3, 4};
    for (int i = 0; i < 3; i++) {
        dg_world w = dg_new(ranks[i], DTRAIN_DEVICE_STAGED, small_and_large);
        w.without = i == 1 ? 2 : 0;
        w.delay_us = 20;
        dg_on_processes(&w);
    }
}

/* ---- sequences, of which the CPU waits for nothing ---- */

enum { BUFFERS = 3 };

/* One step of a sequence, on the device and its group, or on the CPU. */
static dtrain_status step(dg_rank *r, dtrain_device *device, dtrain_device_group *group, char **x, size_t count,
                          uint64_t draw)
{
    static const dtrain_op ops[] = {DTRAIN_MEAN, DTRAIN_MAX, DTRAIN_MIN, DTRAIN_MEAN};
    int a = (int)(draw % BUFFERS), b = (a + 1 + (int)(draw / 4 % 2)) % BUFFERS;
    dg_call c = {(int)(draw / 256 % DG_KINDS),           DTRAIN_F32, ops[draw / 64 % 4], count,
                 (int)(draw / 1024 % (uint64_t)r->size), NULL, NULL};
    dg_place place = {0, 0, (int)(draw / 16 % 2)};
    float number = (float)(r->rank + 1) * (float)(draw % 97);
    const char *in;
    char *out;
    switch (draw / 65536 % 10) {
    case 0: return dtrain_device_fill(device, x[a], &number, 4, count);
    case 1: return dtrain_device_scale(device, DTRAIN_F32, x[a], 0.75, count);
    case 2: return dtrain_device_copy(device, x[b], x[a], count * 4);
    case 3: return dtrain_device_axpy(device, DTRAIN_F32, x[a], 0.5, x[b], count);
    default: break;
    }
    dg_pointers(r, &c, &place, x[a], x[b], &in, &out);
    return dg_do(r->comm, group, &c, in, out);
}

/* Queues `steps` steps with no wait between them, then does the same on the CPU; the buffers must be equal. */
static void sequence(dg_rank *r, size_t count, int steps, uint64_t seed)
{
    char *device[BUFFERS], *host[BUFFERS], *back = (char *)malloc(count * 4);
    for (int i = 0; i < BUFFERS; i++) {
        device[i] = dg_alloc(r, count * 4);
        host[i] = (char *)malloc(count * 4);
        dg_numbers(host[i], DTRAIN_F32, count, seed * 64 + (uint64_t)(r->rank * BUFFERS + i));
        CHECK_EQ(dtrain_device_copy(r->device, device[i], host[i], count * 4), DTRAIN_OK);
    }
    for (int i = 0; i < steps; i++)
        if (step(r, r->device, r->group, device, count, dg_mix(seed * 100 + (uint64_t)i)) != DTRAIN_OK)
            TEST_FAIL("rank %d, seed %llu, step %d: %s", r->rank, (unsigned long long)seed, i, dtrain_last_error());
    for (int i = 0; i < steps; i++)
        CHECK_EQ(step(r, NULL, NULL, host, count, dg_mix(seed * 100 + (uint64_t)i)), DTRAIN_OK);
    for (int i = 0; i < BUFFERS; i++) {
        CHECK_EQ(dtrain_device_copy(r->device, back, device[i], count * 4), DTRAIN_OK);
        long at = dg_first_difference(back, host[i], count * 4);
        if (at >= 0)
            TEST_FAIL("seed %llu, rank %d of %d, %zu elements: byte %ld of buffer %d differs", (unsigned long long)seed,
                      r->rank, r->size, count, at, i);
        dg_free(r, device[i]);
        free(host[i]);
    }
    free(back);
}

static void fifty_steps(dg_rank *r)
{
    sequence(r, 1009, 50, r->world->seed);
    sequence(r, 150001, 8, r->world->seed + 1);
}

TEST(fifty_steps_follow_each_other_by_the_queue_alone)
{
    at_all_sizes(DTRAIN_DEVICE_EVENTS, fifty_steps, 60);
    at_all_sizes(DTRAIN_DEVICE_STAGED, fifty_steps, 60);
}

/* The same buffer, again and again: whoever reads it late, or writes it early, changes the sum. */
static void one_buffer(dg_rank *r)
{
    enum { COUNT = 4099, STEPS = 50 };
    float expected = 0, got[COUNT];
    char *x = dg_alloc(r, COUNT * 4);
    for (int i = 0; i < STEPS; i++) {
        float number = (float)(r->rank * STEPS + i);
        CHECK_EQ(dtrain_device_fill(r->device, x, &number, 4, COUNT), DTRAIN_OK);
        CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
        CHECK_EQ(dtrain_device_scale(r->device, DTRAIN_F32, x, 0.5, COUNT), DTRAIN_OK);
        CHECK_EQ(dtrain_device_group_all_reduce(r->group, x, x, COUNT, DTRAIN_F32, DTRAIN_SUM), DTRAIN_OK);
    }
    CHECK_EQ(dtrain_device_copy(r->device, got, x, sizeof got), DTRAIN_OK);
    for (int rank = 0; rank < r->size; rank++)
        expected += (float)(rank * STEPS + STEPS - 1);
    expected *= 0.5f * (float)r->size;
    for (size_t i = 0; i < COUNT; i++)
        if (got[i] != expected) {
            TEST_FAIL("rank %d of %d: element %zu is %g, expected %g", r->rank, r->size, i, (double)got[i],
                      (double)expected);
            break;
        }
    dg_free(r, x);
}

TEST(one_buffer_is_filled_and_summed_fifty_times_without_a_wait)
{
    at_all_sizes(DTRAIN_DEVICE_EVENTS, one_buffer, 60);
    at_all_sizes(DTRAIN_DEVICE_STAGED, one_buffer, 60);
}

/* Groups are made anew for each, and destroyed while their queues are at work. */
static void short_sequence(dg_rank *r)
{
    static const size_t counts[] = {1, 2, 3, 7, 64, 257, 1000, 5003};
    uint64_t seed = r->world->seed;
    sequence(r, counts[seed % 8], 3 + (int)(seed / 8 % 8), seed);
}

TEST(seeded_interleavings_give_the_cpus_bits)
{
    const char *text = getenv("DTRAIN_TEST_INTERLEAVINGS");
    int number = text != NULL ? atoi(text) : 300;
    int before = test_failures;
    for (int i = 0; i < number && test_failures == before; i++) {
        dg_world w = dg_new(2 + i % 4, i % 3 == 2 ? DTRAIN_DEVICE_STAGED : DTRAIN_DEVICE_EVENTS, short_sequence);
        w.seed = (uint64_t)i + 1000;
        w.delay_us = (unsigned)(dg_mix((uint64_t)i) % 300);
        dg_on_threads(&w);
        if (test_failures != before)
            TEST_FAIL("seed %llu", (unsigned long long)w.seed);
    }
}

/* ---- creation ---- */

static void mode_is(dg_rank *r)
{
    CHECK_EQ(dtrain_device_group_mode(r->group), r->world->number);
}

static void mode_becomes(int ranks, unsigned without, dtrain_device_mode expected)
{
    dg_world w = dg_new(ranks, DTRAIN_DEVICE_MODE_AUTO, mode_is);
    w.without = without;
    w.number = expected;
    dg_on_threads(&w);
}

TEST(threads_with_devices_of_one_kind_go_by_events_and_all_others_staged)
{
    mode_becomes(2, 0, DTRAIN_DEVICE_EVENTS);
    mode_becomes(5, 0, DTRAIN_DEVICE_EVENTS);
    mode_becomes(3, 2, DTRAIN_DEVICE_STAGED);
    mode_becomes(3, 7, DTRAIN_DEVICE_STAGED);
    dg_world w = dg_new(2, DTRAIN_DEVICE_MODE_AUTO, mode_is);
    w.number = DTRAIN_DEVICE_STAGED;
    dg_on_processes(&w);
}

static void of_another_kind(dg_rank *r)
{
    dtrain_device_ops other = *r->device->ops;
    dtrain_device device = *r->device;
    if (r->rank == 1)
        device.ops = &other;
    CHECK_EQ(dtrain_device_group_create(&r->group, r->comm, &device, NULL), DTRAIN_OK);
    CHECK_EQ(dtrain_device_group_mode(r->group), DTRAIN_DEVICE_STAGED);
    dtrain_device_group_destroy(r->group);
    dtrain_device_group_desc events;
    memset(&events, 0, sizeof events);
    events.mode = DTRAIN_DEVICE_EVENTS;
    CHECK_EQ(dtrain_device_group_create(&r->group, r->comm, &device, &events), DTRAIN_ERR_UNSUPPORTED);
    CHECK_CONTAINS(dtrain_last_error(), "rank 1");
    CHECK(r->group == NULL);
}

TEST(a_device_of_another_kind_makes_the_group_a_staged_one)
{
    dg_world w = dg_new(3, DTRAIN_DEVICE_MODE_AUTO, of_another_kind);
    w.alone = 1;
    dg_on_threads(&w);
}

static void warm(dg_rank *r)
{
    long events = 0, allocations = 0, before = 0;
    char *x = dg_alloc(r, 4 * 200000), *y = dg_alloc(r, 4 * 200000);
    for (int i = 0; i < 12; i++) {
        for (int kind = 0; kind < DG_KINDS; kind++) {
            dg_call c = {kind, DTRAIN_F32, DTRAIN_SUM, 200000, 0, NULL, NULL};
            CHECK_EQ(dg_do(r->comm, r->group, &c, x, y), DTRAIN_OK);
        }
        CHECK_EQ(dtrain_device_wait(r->device), DTRAIN_OK);
        CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
        if (i == 3) {
            before = __atomic_load_n(&resizes, __ATOMIC_SEQ_CST);
            events = r->fake.events;
            allocations = r->fake.allocations;
        }
        CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    }
    CHECK_EQ(r->fake.events, events);
    CHECK_EQ(r->fake.allocations, allocations);
    CHECK_EQ(__atomic_load_n(&resizes, __ATOMIC_SEQ_CST), before);
    CHECK_EQ(dtrain_barrier(r->comm), DTRAIN_OK);
    dg_free(r, x);
    dg_free(r, y);
}

TEST(nothing_is_made_after_the_start)
{
    dg_world w = dg_new(3, DTRAIN_DEVICE_EVENTS, warm);
    dg_on_threads(&w);
    w = dg_new(3, DTRAIN_DEVICE_STAGED, warm);
    dg_on_threads(&w);
}

TEST(to_destroy_no_group_is_legal)
{
    dtrain_device_group_destroy(NULL);
}
